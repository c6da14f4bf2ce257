"""Trainings under a real Slurm: preempted, out of time, requeued, on a node that goes down; and their curves.

Each case submits the script of ``halocline launch --slurm`` over two of four nodes, does one thing to the job in
mid-run, and waits for its end. Its losses must be those of a job that was left alone, to the bit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halocline.train.batch_files import BatchJob, slurm_script
from halocline.train.log import read_log

from .chaos_run import raw_log
from .slurm_cluster import SlurmCluster, SlurmError

STEPS, STRIKE = 40, 6  # steps of a run, and those made before something happens
LONG = {"time limit": 400}  # steps where Slurm takes its time: it looks at limits twice a minute
_POLL = 0.1
_LIMIT_LOOKS = 120.0  # seconds in which Slurm notices a limit, and the job saves and leaves
_SETTINGS = """workload = "unet3d"
steps = {steps}
checkpoint_every = 5
deadline = 30.0
network.width = 4
data.arguments.size = 32
data.samples = 4
data.validation = 0
gradients.deterministic = true
"""

Strike = Callable[[SlurmCluster, str], None]


def _shorten(slurm: SlurmCluster, job: str) -> None:
    """Lower the time limit so that Slurm sends SIGUSR1 at its next look; set it back once the job has left.

    A limit that was changed stays with a requeued job, which would then be out of time from its start.
    """
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    _until(lambda: slurm.job(job)["JobState"] != "RUNNING", _LIMIT_LOOKS, f"job {job} does not leave at its limit")
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")


def _kill_node(slurm: SlurmCluster, job: str) -> None:
    """Kill the daemon of the job's last node and all that it has started, as a power cut does."""
    slurm.kill_node(slurm.command("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()[-1])


def _set_down(slurm: SlurmCluster, job: str) -> None:
    """Set the last node of the job down, as an operator does, or Slurm once a node does not answer."""
    node = slurm.command("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()[-1]
    slurm.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=bench")


#: What happens to a job in mid-run. Two minutes before the end of its time Slurm sends SIGUSR1, as the script asks.
CASES: dict[str, Strike] = {
    "SIGTERM": lambda slurm, job: _told(slurm, "scancel", "--signal=TERM", job),
    "SIGUSR1": lambda slurm, job: _told(slurm, "scancel", "--signal=USR1", job),
    "time limit": _shorten,
    "scontrol requeue": lambda slurm, job: _told(slurm, "scontrol", "requeue", job),
    "node down": _set_down,
    "node dies": _kill_node,
}


def _told(slurm: SlurmCluster, *words: str) -> None:
    slurm.command(*words)


@dataclass
class SlurmCase:
    """One job: what happened to it, and what came of it."""

    case: str
    outcome: str = ""  # recovered, lost, different, failed
    requeued: int = 0  # times that Slurm started it again
    left: float | None = None  # seconds from the strike until the job ran no more
    again: float | None = None  # seconds from the strike to the next step, of which Slurm waits at least five
    repeated: int = 0  # steps made twice
    nodes: str = ""  # those of the last start
    detail: str = ""


def measure_slurm(cases: list[str], limit: float, tell: Callable[[SlurmCase], None]) -> dict[str, Any]:
    """Run a job for each case, and one of as many steps that is left alone; compare the curves."""
    with SlurmCluster() as slurm:
        version = slurm.command("sinfo", "--version").strip()
        made, references = [], dict[int, list[float]]()
        for name in cases:
            case, steps = SlurmCase(name), LONG.get(name, STEPS)
            if steps not in references:
                references[steps] = _undisturbed(slurm, steps, limit)
            out = _run(slurm, case, steps, CASES[name], limit)
            _judge(case, _losses(out), references[steps])
            slurm.resume_nodes()  # one that was set down is back for the next case
            made.append(case)
            tell(case)
    good = sum(case.outcome == "recovered" for case in made)
    return {"slurm": version, "jobs": len(made), "recovered": good, "cases": [asdict(case) for case in made]}


def _undisturbed(slurm: SlurmCluster, steps: int, limit: float) -> list[float]:
    """The losses of a job that is left alone."""
    case = SlurmCase(f"undisturbed {steps}")
    losses = _losses(_run(slurm, case, steps, None, limit))
    if case.detail or len(losses) != steps:
        raise SlurmError(f"the undisturbed job fails: {case.detail or f'{len(losses)} steps'}")
    return losses


def _run(slurm: SlurmCluster, case: SlurmCase, steps: int, strike: Strike | None, limit: float) -> Path:
    """Submit a job, strike in mid-run, and wait for its end; returns the folder of the run."""
    folder = slurm.folder / case.case.replace(" ", "-")
    folder.mkdir()
    (folder / "run.toml").write_text(_SETTINGS.format(steps=steps))
    out, script = folder / "run", folder / "run.sbatch"
    # Nodes of this cluster have no names that can be looked up, so the ranks are told where to meet.
    variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = BatchJob(str(folder / "run.toml"), str(out), 2, 1, cpus_per_rank=1, hours=1, variables=variables)
    path = f"export PATH={Path(sys.executable).parent}{os.pathsep}$PATH"
    script.write_text(slurm_script(job, setup=[path, f"cd {Path(__file__).parents[1]}"]))
    number = slurm.submit(script, f"--output={folder / 'output'}")
    try:
        struck = time.time()
        if strike is not None:
            _until(lambda: _steps(out) >= STRIKE, limit, f"job {number} made no {STRIKE} steps in {limit:g} s")
            struck = time.time()
            strike(slurm, number)
            _until(lambda: slurm.job(number)["JobState"] != "RUNNING", limit, f"job {number} does not leave")
            case.left = round(time.time() - struck, 2)
        facts = slurm.wait(number, limit)
    except SlurmError as error:
        case.detail = f"{error}: {_last_line(folder / 'output')}"
        slurm.command("scancel", number)
        return out
    case.requeued, case.nodes = int(facts["Restarts"]), facts["NodeList"]
    if facts["JobState"] != "COMPLETED":
        case.detail = f"{facts['JobState']}, exit status {facts['ExitCode']}: {_last_line(folder / 'output')}"
    if strike is not None:
        entries = [entry for entry in raw_log(out) if entry.get("kind") == "step"]
        case.repeated = len(entries) - len({entry["step"] for entry in entries})
        starts = [entry["time"] for entry in raw_log(out) if entry.get("kind") == "data" and entry["time"] > struck]
        later = [entry["time"] for entry in entries if starts and entry["time"] > starts[0]]
        case.again = round(later[0] - struck, 2) if later else None
    return out


def _judge(case: SlurmCase, losses: list[float], reference: list[float]) -> None:
    """Set the outcome: recovered only if Slurm started the job again and its curve is the reference, to the bit."""
    if case.detail:
        case.outcome = "failed"
    elif case.requeued != 1:
        case.outcome, case.detail = "lost", f"Slurm started it again {case.requeued} times, not once"
    elif losses != reference:
        case.outcome, case.detail = "different", f"losses {losses}, not {reference}"
    else:
        case.outcome = "recovered"


def _until(condition: Callable[[], bool], seconds: float, words: str) -> None:
    """Wait for something; SlurmError with these words if it does not happen in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SlurmError(words)
        time.sleep(_POLL)


def _steps(out: Path) -> int:
    return sum(1 for _ in read_log(out, "step")) if (out / "log.jsonl").exists() else 0


def _losses(out: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(out, "step")] if (out / "log.jsonl").exists() else []


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it printed nothing"
