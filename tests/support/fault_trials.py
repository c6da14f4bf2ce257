"""Signals sent to the ranks and the launcher of a training run at random moments, with what came of it.

``python tests/support/fault_trials.py stop --trials 20`` stops (SIGSTOP) a random rank at a random moment of its
start, of a step or of a save, and ``restart`` does so with ``--restarts 1``. ``--by torchrun``, ``mpiexec`` or
``variables`` (as srun sets them: rank 0 serves the store) start the ranks otherwise, and count how long the other
ranks run on. ``term`` sends SIGTERM to the launcher while the run starts; ``orphan`` kills the launcher (SIGKILL).
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halocline.train.heartbeat import COMM

SETTINGS = (
    "network.width=2", "data.arguments.size=16", "data.samples=4", "data.validation=0", "checkpoint_every=1",
)  # fmt: skip
PATIENCE = 120.0  # seconds after which a run counts as hanging


@dataclass
class Outcome:
    """What a run did after the signal: exit status, seconds until it said so or ended, and its standard error."""

    status: int | None  # None: it was still running after PATIENCE
    seconds: float
    stderr: str
    stdout: str = ""
    moment: str = ""


def command(out: Path, steps: int, deadline: float, ranks: int, *more: str) -> list[str]:
    told = [word for each in (*SETTINGS, f"steps={steps}", f"deadline={deadline}") for word in ("--set", each)]
    base = [sys.executable, "-m", "halocline.cli", "train", "unet3d", "--out", str(out), *told]
    return [*base, *(["--ranks", str(ranks)] if ranks else []), *more]


def started(arguments: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    """In a process group of its own, so that nothing of it outlives the trial."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(arguments, stdout=out, stderr=err, env=environment, process_group=0, cwd=folder)


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of the ranks below a launcher, by rank."""
    found = {}
    for pid in descendants(launcher):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = dict(
                each.split(b"=", 1) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in each
            )
        except OSError:
            continue
        rank = variables.get(b"RANK", variables.get(b"PMI_RANK"))
        if name.startswith(COMM):  # forked of a template, whose variables these are
            found[int(name.removeprefix(COMM))] = pid
        elif rank is not None and any(word.startswith(b"halocline.cli") for word in words):
            found[int(rank)] = pid
    return found


def descendants(parent: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, new = [], [parent]
    while new:
        new = [child for each in new for child in parents.get(each, [])]
        found += new
    return sorted(found)


def steps_made(out: Path) -> int:
    log = out / "log.jsonl"
    return log.read_bytes().count(b'"step"') if log.exists() else 0


def finish(run: "subprocess.Popen[bytes]", folder: Path, since: float, moment: str) -> Outcome:
    seconds = None
    while run.poll() is None and time.monotonic() < since + PATIENCE:
        if seconds is None and b"halocline train: " in (folder / "stderr").read_bytes():
            seconds = time.monotonic() - since  # it has reported, and ends
        time.sleep(0.05)
    status, seconds = run.poll(), seconds or time.monotonic() - since
    for left in [run.pid, *descendants(run.pid)] if status is None else ():
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return Outcome(status, seconds, (folder / "stderr").read_text(), (folder / "stdout").read_text(), moment)


def until(condition, run: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 3 * PATIENCE
    while not condition() and run.poll() is None:
        if time.monotonic() > end:
            raise TimeoutError("the run did not come to the moment of the trial")
        time.sleep(0.05)


# ---- trials ----


def stop_a_rank(folder: Path, rng: random.Random, deadline: float, ranks: int, by: str, restarts: int = 0) -> Outcome:
    """SIGSTOP to any rank, at any time. The seconds are until the run ends, or until no other rank runs."""
    out, rank = folder / "run", rng.randrange(ranks)
    arguments = [*command(out, 40 if restarts else 100_000, deadline, 0), "--json"]
    if by == "own":
        arguments += ["--ranks", str(ranks), "--restarts", str(restarts)]
    run = started([*starter(by, ranks), *arguments[1 if by == "torchrun" else 0 :]], folder)
    until(lambda: rank in ranks_of(run.pid), run)
    until(lambda: len(ranks_of(run.pid)) == ranks, run)
    process, moment = ranks_of(run.pid)[rank], wait_for_moment(run, out, rng)
    others = [pid for other, pid in ranks_of(run.pid).items() if other != rank]
    if run.poll() is not None:
        raise RuntimeError(f"the run ended before the signal: {(folder / 'stderr').read_text()}")
    os.kill(process, signal.SIGSTOP)
    moment, since = f"rank {rank}, {moment}, step {steps_made(out)}", time.monotonic()
    if by == "own" and not restarts:
        return finish(run, folder, since, moment)
    wanted = [process] if by == "own" else others
    begun = set(wanted) if by == "own" else set()
    while time.monotonic() < since + PATIENCE and any(map(alive, wanted)):
        begun |= set(filter(has_socket, wanted))
        if len(begun) < len(wanted):  # a rank whose deadline has not begun: it still starts
            since = time.monotonic()
        time.sleep(0.05)
    seconds, hanging = time.monotonic() - since, any(map(alive, wanted))
    if by == "own":
        outcome = finish(run, folder, since, moment)
        return Outcome(outcome.status, seconds, outcome.stderr, outcome.stdout, moment)
    os.kill(process, signal.SIGKILL)
    outcome = finish(run, folder, since, moment)
    status = None if hanging else outcome.status
    return Outcome(status, seconds, outcome.stderr, outcome.stdout, moment)


def has_socket(pid: int) -> bool:
    """Has this process begun to meet the others?"""
    try:
        return any(str(each.readlink()).startswith("socket:") for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True  # it has ended meanwhile


def starter(by: str, ranks: int) -> list[str]:
    """The command that starts ranks, to which that of a rank is added."""
    folder = Path(sys.executable).parent
    return {
        "own": [],
        "torchrun": [str(folder / "torchrun"), "--nproc-per-node", str(ranks)],
        "mpiexec": [str(folder / "mpiexec"), "-n", str(ranks)],
        "variables": [sys.executable, __file__, "variables", str(ranks)],
    }[by]


def start_by_variables(ranks: int, rank_command: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(rank_command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    raise SystemExit(max(abs(process.wait()) for process in processes))


def wait_for_moment(run: "subprocess.Popen[bytes]", out: Path, rng: random.Random) -> str:
    when, step = rng.choice(("start", "step", "save")), rng.randrange(1, 12)
    if when == "start":
        time.sleep(rng.uniform(0, 6))
        return when
    until(lambda: steps_made(out) >= step, run)
    if when == "save":
        until(lambda: any((out / "checkpoints").glob(".*.part")), run)
    time.sleep(rng.uniform(0, 0.05))
    return when


def terminate_early(folder: Path, rng: random.Random, span: float, ranks: int) -> Outcome:
    """SIGTERM to the launcher at a random moment of its first ``span`` seconds, or just when it starts ranks."""
    run = started(command(folder / "run", 100_000, 60.0, ranks, "--json"), folder)
    began = time.monotonic()
    if ranks > 1 and rng.random() < 0.5:
        until(lambda: len(ranks_of(run.pid)) > 0, run)
        time.sleep(rng.uniform(0, 0.05))
    else:
        time.sleep(rng.uniform(0, span))
    since, steps, there = time.monotonic(), steps_made(folder / "run"), len(ranks_of(run.pid))
    os.kill(run.pid, signal.SIGTERM)
    return finish(run, folder, since, f"after {since - began:.2f} s, {there} ranks there, step {steps}")


def kill_the_launcher(folder: Path, rng: random.Random, span: float, ranks: int) -> Outcome:
    """SIGKILL to the launcher; the outcome's seconds are until its last rank has gone."""
    run = started(command(folder / "run", 100_000, 60.0, ranks), folder)
    delay = rng.uniform(0, span)
    until(lambda: ranks_of(run.pid), run)
    time.sleep(delay)
    processes = descendants(run.pid)
    run.kill()
    since = time.monotonic()
    run.wait()
    end = since + PATIENCE
    while (left := [pid for pid in processes if Path(f"/proc/{pid}/cmdline").exists() and alive(pid)]) and (
        time.monotonic() < end
    ):
        time.sleep(0.02)
    outcome = finish(run, folder, since, f"after {delay:.2f} s, {len(processes)} processes")
    return Outcome(None if left else 0, outcome.seconds, outcome.stderr, outcome.stdout, outcome.moment)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("stop", "restart", "term", "orphan"))
    parser.add_argument("--by", choices=("own", "torchrun", "mpiexec", "variables"), default="own")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=10.0, help="of the runs, in seconds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--span", type=float, default=8.0, help="seconds of start-up")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    for trial in range(told.trials):
        rng = random.Random(told.seed * 1000 + trial)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if told.kind in ("stop", "restart"):
                restarts = 1 if told.kind == "restart" else 0
                outcome = stop_a_rank(folder, rng, told.deadline, told.ranks, told.by, restarts)
            else:
                trial_of = terminate_early if told.kind == "term" else kill_the_launcher
                outcome = trial_of(folder, rng, told.span, told.ranks)
        last = (outcome.stderr.strip().splitlines() or [""])[-1][:200]
        print(json.dumps({"trial": trial, **{k: v for k, v in vars(outcome).items() if k not in ("stderr", "stdout")},
                          "last": last, "out": outcome.stdout[-160:]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["variables"]:
        start_by_variables(int(sys.argv[2]), sys.argv[3:])
    main()
