"""A Slurm of several nodes on this machine: munged, slurmctld and a slurmd a node, each on its own loopback port.

    with SlurmCluster(nodes=4) as slurm:
        job = slurm.submit(script)
        slurm.scontrol("requeue", job)

Nothing of the system's own configuration is read or changed: keys, state, logs and sockets are in a temporary folder.
The daemons are children of this process, and the system ends them with it.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from halocline.errors import HaloclineError
from halocline.train.heartbeat import die_with_parent

DAEMONS, COMMANDS = ("munged", "slurmctld", "slurmd"), ("sbatch", "srun", "scontrol", "scancel", "squeue")
INSTALL = "apt-get install -y slurm-wlm munge"
REQUEUE_DELAY = 5  # seconds that a requeued job waits; 120 by default
NODE_PATIENCE = 10  # seconds after which a node that does not answer is down; 300 by default
DEADLINE = 30.0  # seconds for one command, and for the nodes to be idle
_POLL = 0.2
_SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")

CONFIGURATION = """ClusterName=halocline
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={delay}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=0
KillWait=20
SlurmdTimeout={patience}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(HaloclineError, RuntimeError):
    """Slurm is not there, does not start, or refuses a command."""


def missing() -> list[str]:
    """Programs that this machine lacks."""
    return [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=_SEARCH) is None]


class SlurmCluster:
    """The daemons and their nodes ``n0``, ``n1``, ..., between ``__enter__`` and ``__exit__``."""

    def __init__(self, nodes: int = 4, cpus: int = 4) -> None:
        self.nodes = [f"n{index}" for index in range(nodes)]
        self._cpus, self._opened = cpus, ExitStack()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._of_nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = Path()

    def __enter__(self) -> SlurmCluster:
        if lacking := missing():
            raise SlurmError(f"no {', '.join(lacking)} here; `{INSTALL}` has them")
        with ExitStack() as opened:
            self.folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="halocline-slurm-")))
            opened.callback(self._end)
            self._start()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _start(self) -> None:
        """Write key and configuration, start the daemons, and wait until every node is idle."""
        self.folder.chmod(0o755)  # munge refuses a socket that its clients cannot reach
        for name in ("state", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        control, *ports = _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        text = CONFIGURATION.format(
            control=control,
            user=getpass.getuser(),
            folder=self.folder,
            delay=REQUEUE_DELAY,
            patience=NODE_PATIENCE,
            nodes="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(text)
        own = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "log-file": "log/munged.log",
        }
        told = [f"--{name}={self.folder / file}" for name, file in {**own, "seed-file": "munge.seed"}.items()]
        self._daemon("munged", "--foreground", "--force", *told)
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged opens no socket")
        self._daemon("slurmctld", "-D", "-c", "-L", str(self.folder / "log/slurmctld.log"))
        for node in self.nodes:
            self._start_node(node)
        self._until(self._all_idle, "not all nodes became idle")

    def _start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._of_nodes[node] = self._daemon("slurmd", "-D", "-N", node, "-L", str(self.folder / f"log/{node}.log"))

    def _daemon(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground, as a child that ends with this process."""
        command = [shutil.which(program, path=_SEARCH) or program, *arguments]
        with (self.folder / "log" / "output").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                preexec_fn=die_with_parent(),
            )  # fmt: skip
        self._daemons.append(daemon)
        return daemon

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _all_idle(self) -> bool:
        told = self._attempt("sinfo", "-h", "-N", "-o", "%T")
        return told is not None and told.split() == ["idle"] * len(self.nodes)

    def _until(self, condition: Callable[[], bool], words: str) -> None:
        """Wait for the daemons; SlurmError with the last line of their logs if it takes too long."""
        end = time.monotonic() + DEADLINE
        while not condition():
            ended = [each.args for each in self._daemons if each.poll() is not None]
            if ended or time.monotonic() > end:
                raise SlurmError(f"{words}: {self._last_error()}")
            time.sleep(_POLL)

    def _last_error(self) -> str:
        lines = [
            line
            for log in sorted((self.folder / "log").iterdir())
            for line in log.read_text(errors="replace").splitlines()
            if "error" in line.lower()
        ]
        return lines[-1] if lines else "its logs have no error"

    # ---- commands ----

    def _attempt(self, program: str, *arguments: str) -> str | None:
        """The output of a command, or None if it failed."""
        with suppress(SlurmError):
            return self.command(program, *arguments)
        return None

    def command(self, program: str, *arguments: str) -> str:
        """The output of one of Slurm's commands. SlurmError if it fails."""
        try:
            done = subprocess.run(
                [program, *arguments], env=self.environment, capture_output=True, text=True, timeout=DEADLINE
            )
        except subprocess.TimeoutExpired as late:
            raise SlurmError(f"`{program} {' '.join(arguments)}` took more than {DEADLINE:g} s") from late
        if done.returncode:
            raise SlurmError(f"`{program} {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Hand a script to sbatch; returns the job's number."""
        return self.command("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """The facts of a job by the names that ``scontrol show job`` gives them."""
        return facts_of(self.command("scontrol", "show", "job", "-o", number))

    def wait(self, number: str, seconds: float) -> dict[str, str]:
        """The facts of a job once it has ended, for good; SlurmError if it has not by then."""
        end = time.monotonic() + seconds
        while (facts := self.job(number))["JobState"] not in _ENDED:
            if time.monotonic() > end:
                raise SlurmError(f"job {number} is still {facts['JobState']} after {seconds:g} s ({facts['Reason']})")
            time.sleep(_POLL)
        return facts

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node, the steps that it supervises, and their processes."""
        daemon = self._of_nodes[node]
        for pid in (daemon.pid, *_steps_of(node)):
            for each in (pid, *_descendants(pid)):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        daemon.wait()
        self._daemons.remove(daemon)

    def resume_nodes(self) -> None:
        """Bring nodes back that were set down, and start the daemons of those that were killed."""
        for node in self.nodes:
            if self._of_nodes[node].poll() is not None:
                self._start_node(node)
            if "DOWN" in facts_of(self.command("scontrol", "show", "node", "-o", node))["State"]:
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _end(self) -> None:
        """Cancel all jobs, then end the daemons, the nodes' first and munged last."""
        self._attempt("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
        self._attempt("scancel", "--user", getpass.getuser())
        end = time.monotonic() + 10.0
        while self._attempt("squeue", "-h") and time.monotonic() < end:
            time.sleep(_POLL)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(5.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _steps_of(node: str) -> list[int]:
    """The processes that supervise a node's steps, which run on without its daemon; and those that they supervise."""
    own = {pid for pid, _ in _parents() if f"SLURMD_NODENAME={node}" in _text(pid, "environ").split("\0")}
    above = {parent for pid, parent in _parents() if pid in own and _text(parent, "comm").startswith("slurmstepd")}
    return [*above, *own]


def _descendants(pid: int) -> list[int]:
    """All processes below one."""
    below, table = [pid], _parents()
    for each in below:
        below += [child for child, parent in table if parent == each]
    return below[1:]


def _parents() -> list[tuple[int, int]]:
    """Every process with its parent."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    told = [(pid, _text(pid, "stat").rpartition(")")[2].split()) for pid in pids]
    return [(pid, int(fields[1])) for pid, fields in told if fields]


def _text(pid: int, name: str) -> str:
    """A file of a process in /proc; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def facts_of(text: str) -> dict[str, str]:
    """The pairs ``Name=value`` of a line of scontrol."""
    return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
