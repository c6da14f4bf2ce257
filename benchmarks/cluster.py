"""A cluster on one machine: ranks in network namespaces, joined by links of a given rate.

    with Cluster(nodes=4, rate="1gbit") as cluster:
        results = cluster.run(function, argument, deadline=120)  # one result a rank
        cluster.set_rate("500mbit")

The ranks are those of a ``RankPool``: processes that stay from one call to the next, with torch.distributed (gloo)
started over the links. It takes root and iproute2. Namespaces bear the number of this process, go when it ends in
whatever way it can notice, and what a killed one left is removed by the next.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from halocline.testing.place import RankPlace
from halocline.testing.pool import RankPool

from .topology import (
    NAME,
    ClusterError,
    Placement,
    ShellCommand,
    Topology,
    counter_command,
    delete_command,
    rate_commands,
    setup_commands,
    teardown_commands,
)

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]

COMMAND_DEADLINE = 20.0  # seconds for one call of ip or tc
INSTALL = ("apt-get", "install", "-y", "iproute2")
INSTALL_DEADLINE = 300.0
NAMESPACES = Path("/run/netns")
PROGRAMS = ("ip", "tc")
SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))  # where ip is, and a plain PATH may not be
ENDINGS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
CLONE_NEWNET = 0x40000000
#: Nodes have no name service, on which torch remarks at every connection to the store.
QUIET = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}


class Cluster:
    """Nodes that exist between ``__enter__`` and ``__exit__``. One call at a time."""

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int = 1,
        rate: str | None = "1gbit",
        placement: Placement = "block",
        rails: int = 1,
        *,
        delay: str | None = None,
        collective_timeout: float = 120.0,
    ) -> None:
        if delay is not None:
            raise ClusterError(
                f"delay={delay!r}: links are emulated with a rate and without a delay, for which the kernel needs "
                "tc netem, which many are built without; leave it out"
            )
        self.topology = Topology(nodes, ranks_per_node, rate, placement, rails, os.getpid())
        self.collective_timeout = collective_timeout
        self.pool: RankPool | None = None
        self._remove: Callable[[], object] = lambda: None
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def size(self) -> int:
        """Ranks on all nodes."""
        return self.topology.size

    def __enter__(self) -> Cluster:
        check_possible()
        remove_leftovers()
        if _living(self.topology.switch):
            raise ClusterError("this process has a cluster already; leave its `with` before the next")
        self._handlers = _ending_signals_raise()
        # Runs once: at __exit__, when collected, or when the interpreter ends.
        self._remove = weakref.finalize(self, remove, self.topology)
        try:
            for command in setup_commands(self.topology):
                execute(command)
            self.pool = RankPool(self.size, collective_timeout=self.collective_timeout, place=Nodes(self.topology))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _undisturbed():
                if self.pool is not None:
                    self.pool.close()
                self._remove()
        finally:
            _restore(self._handlers)
            self._handlers = {}

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        deadline: float = 60.0,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Every rank's ``function(*args, *per_rank[rank], **kwargs)``, in rank order.

        The first rank to fail ends the call on all, with its traceback in the error (``RankError``), as does the
        deadline in seconds. The function is found by its import name.
        """
        if self.pool is None:
            raise ClusterError("the nodes of a cluster are there inside `with Cluster(...) as cluster:`")
        return self.pool.run(function, *args, deadline=deadline, per_rank=per_rank, **kwargs)

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of all links; None takes the limit away."""
        topology = self.topology.with_rate(rate)
        for command in rate_commands(topology):
            execute(command)
        self.topology = topology

    def sent_bytes(self) -> list[list[int]]:
        """By node and rail: bytes that have left its cards, headers included."""
        return [self._counted(node, "tx") for node in range(self.topology.nodes)]

    def received_bytes(self) -> list[list[int]]:
        return [self._counted(node, "rx") for node in range(self.topology.nodes)]

    def _counted(self, node: int, way: str) -> list[int]:
        shown = json.loads(execute(counter_command(self.topology.namespace(node))))
        counted = {link["ifname"]: int(link["stats64"][way]["bytes"]) for link in shown}
        return [counted[card] for card in self.topology.interfaces]


class Nodes(RankPlace):
    """Ranks in the namespaces of their nodes; the store that they meet at is on node 0."""

    forked = False  # whatever others have: QUIET is read at import

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.address = topology.address(0)

    def environment(self, rank: int, size: int, port: int) -> Mapping[str, str]:
        return {
            **super().environment(rank, size, port),
            **QUIET,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(self.topology.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(self.topology.ranks_per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": ",".join(self.topology.interfaces),
        }

    def enter(self, rank: int) -> None:
        enter_namespace(self.topology.namespace(self.topology.node_of(rank)))

    def inside(self, make: Callable[[], T]) -> T:
        """In a thread of its own, for a thread that enters a namespace is there for good."""
        made: list[T] = []
        errors: list[Exception] = []

        def body() -> None:
            try:
                enter_namespace(self.topology.namespace(0))
                made.append(make())
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        thread = threading.Thread(target=body, daemon=True)
        with _muted():
            thread.start()
            thread.join()
        for error in errors:
            raise error
        return made[0]


@contextmanager
def _muted() -> Iterator[None]:
    """For the one remark that QUIET comes too late for: this process has read its variables. Errors are exceptions."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def enter_namespace(name: str) -> None:
    """This thread, and those it starts, open their connections in that namespace from here on."""
    with (NAMESPACES / name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise ClusterError(f"cannot enter the network namespace {name}: {os.strerror(number)}")


# ---- what it takes ----


def missing() -> list[str]:
    """What this machine lacks for a cluster, each with how to get it."""
    if sys.platform != "linux":
        return [f"network namespaces, which {sys.platform} has not: run it on Linux"]
    lacking = []
    if os.geteuid() != 0:
        lacking.append("the rights of root, to make network namespaces: run it with sudo, or in a container as root")
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if absent:
        lacking.append(f"the program {' and '.join(absent)}: run `{' '.join(INSTALL)}`, or give --install as root")
    return lacking


def check_possible() -> None:
    if lacking := missing():
        raise ClusterError(f"an emulated cluster needs {'; and '.join(lacking)}")


def install() -> None:
    """Get iproute2 by apt-get, if it is not there. Only for a user who asked for it."""
    if all(shutil.which(name, path=SEARCH) for name in PROGRAMS):
        return
    if shutil.which(INSTALL[0], path=SEARCH) is None:
        raise ClusterError("there is no apt-get here: install iproute2 by the means of this system")
    try:
        done = subprocess.run(INSTALL, capture_output=True, text=True, timeout=INSTALL_DEADLINE)
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"`{' '.join(INSTALL)}` took more than {INSTALL_DEADLINE:g} s; run it by hand") from late
    if done.returncode:
        raise ClusterError(f"`{' '.join(INSTALL)}` failed: {_last_line(done.stderr)}")


# ---- running commands ----


def execute(command: ShellCommand) -> str:
    """Its output. A session of its own, so that a Ctrl-C at the terminal does not end it halfway."""
    program, *arguments = command.arguments
    path = shutil.which(program, path=SEARCH) or program
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE, start_new_session=True
        )
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"`{' '.join(command.arguments)}` took more than {COMMAND_DEADLINE:g} s") from late
    if done.returncode and not command.optional:
        raise ClusterError(f"`{' '.join(command.arguments)}` failed: {_last_line(done.stderr)}{_hint(done.stderr)}")
    return done.stdout


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it says nothing")


def _hint(text: str) -> str:
    if "not permitted" in text or "denied" in text:
        return "; root must be allowed to manage networks here (in a container: --privileged)"
    if "qdisc" in text.lower() or "No such file" in text:
        return "; if this is tc, the kernel may lack the token bucket filter (CONFIG_NET_SCH_TBF)"
    return ""


# ---- leaving nothing behind ----


def remove(topology: Topology) -> None:
    _delete(command for command in teardown_commands(topology))


def _delete(commands: Iterable[ShellCommand]) -> None:
    for command in commands:
        with suppress(ClusterError, OSError):  # one that will not go must not keep the others
            execute(command)


def remove_leftovers() -> None:
    """Namespaces of processes that were killed before they could remove them."""
    matches = [(entry.name, NAME.fullmatch(entry.name)) for entry in NAMESPACES.glob("hc*")]
    _delete(delete_command(name) for name, match in matches if match and not _runs(int(match[1])))


def _runs(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def _living(namespace: str) -> bool:
    return (NAMESPACES / namespace).exists()


def _ending_signals_raise() -> dict[signal.Signals, Any]:
    """SIGTERM ends Python without a word unless it is made an exception; SIGINT is one already."""
    return _handled_by(_leave, ENDINGS)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals to end wait until all is removed."""
    came: list[int] = []
    before = _handled_by(lambda number, frame: came.append(number), (signal.SIGINT, *ENDINGS))
    try:
        yield
    finally:
        _restore(before)
    for number in came[:1]:
        os.kill(os.getpid(), number)


def _handled_by(
    handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals]
) -> dict[Any, Any]:
    """The handlers that were there. Python runs handlers in its main thread only, and only there may they be set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set from Python
