"""Which numbers come next: a seed and a count of calls, equal on every rank. The two are all there is to save.

Recomputation (``torch.utils.checkpoint``) must draw the forward's numbers again. It restores the state of torch's own
generator, and that is how it is known here: each call moves torch's generator on by one draw, and remembers its number
by the state it met. A state met before is a recomputation, a ``fork_rng`` that has ended, or a ``torch.manual_seed``
said again, and the numbers repeat as torch's own would. What is remembered is a rank's own affair: torch's generators
may stand elsewhere on other ranks, the count of calls is the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from .._torch_private import in_backward
from ..errors import Refused
from ..tensor import here
from ..world import Label, World
from ..world.local import current_local_world
from .generator import signed

_log = logging.getLogger("halocline")
#: Calls remembered. A recomputation finds the calls of its forward if no more than these came in between.
_MOST = 1 << 16
Drawn = TypeVar("Drawn")


class DrawWatch:
    """Notices draws from torch's generators other than the library's own."""

    def __init__(self) -> None:
        self.start = self._known = _generators()
        self._unexplained = False

    def explained(self, draw: Callable[[], Drawn]) -> Drawn:
        """Run a draw that the library knows of."""
        self._unexplained = self.unexplained
        drawn = draw()
        self._known = _generators()
        return drawn

    @property
    def unexplained(self) -> bool:
        """So far."""
        return self._unexplained or _generators() != self._known


def _generators() -> tuple[bytes, tuple[int, int] | None]:
    """The states of torch's generators for the CPU and for the current device."""
    cpu = torch.get_rng_state().numpy().tobytes()
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return cpu, None
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return cpu, (generator.initial_seed(), generator.get_offset())


class State:
    """The random state of a rank.

    ``threaded``: ranks are threads of one process, and torch has one generator for all of them. ``asked``: the user has
    chosen the seed. ``repeated``: it draws again what was drawn before, in backward too.
    """

    def __init__(
        self, seed: int, counter: int = 0, *, threaded: bool = False, asked: bool = True, repeated: bool = False
    ) -> None:
        self.seed, self.counter, self.threaded, self.asked = seed % (1 << 64), counter, threaded, asked
        self._met: OrderedDict[int, int] = OrderedDict()
        self._warned = repeated
        self.watch: DrawWatch | None = None

    def next_call(self) -> int:
        """The number of the next call that draws."""
        if self.threaded:
            return self._next_threaded()
        moment = self.explained(_pass_moment)
        call = self._met.get(moment)
        # A state that was not met before: a new call, with the next number.
        if call is None:
            self._warn_if_late()
            call = self._met[moment] = self._count()
            # The least recently met goes first.
            if len(self._met) > _MOST:
                self._met.popitem(last=False)
        self._met.move_to_end(moment)
        return call

    def explained(self, draw: Callable[[], Drawn]) -> Drawn:
        """Draw from torch's generator in a way that gives all ranks the same numbers."""
        return draw() if self.watch is None else self.watch.explained(draw)

    def _count(self) -> int:
        self.counter += 1
        return self.counter - 1

    def _next_threaded(self) -> int:
        """The next call of a rank that is a thread: the count alone, since torch's generator is shared."""
        if in_backward():
            raise Refused(
                "a random function",
                here(),
                "it is called in backward, where a recomputation must draw the forward's numbers, and ranks that are "
                "threads share torch's generator, by which it would be known",
                "run the ranks as processes, or without checkpointing",
            )
        return self._count()

    def _warn_if_late(self) -> None:
        """Warn once where backward draws numbers that no forward drew."""
        if in_backward() and not self._warned:
            self._warned = True
            _log.warning(
                "a random function in %s draws new numbers in backward. If this is a recomputation, it differs from "
                "its forward: checkpoint with preserve_rng_state=True, and keep forward and backward inside the same "
                "hc.random.reproducible",
                here(),
            )


def _pass_moment() -> int:
    """Move torch's CPU generator on by one draw; return a hash of the state that it had."""
    # 5 kB of state as one number.
    moment = hash(torch.get_rng_state().numpy().tobytes())
    # With a generator named, the draw is torch's own even where :func:`reproducible` stands for it.
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
    return moment


_of_world: WeakKeyDictionary[World, State] = WeakKeyDictionary()  # of ranks that are not a process of their own
_of_process: list[State] = []


def current() -> State:
    """This rank's state. It begins with the same seed on all ranks; ranks that are threads, with their process's."""
    world = current_local_world()
    if world is None:
        return _process_state()
    # Ranks that are threads have states of their own, which begin as that of their process.
    if world not in _of_world:
        start, threaded = _process_state(), not world.capabilities.separate_processes and world.size > 1
        _of_world[world] = State(start.seed, start.counter, threaded=threaded, asked=start.asked)
    return _of_world[world]


def _process_state() -> State:
    if not _of_process:
        _of_process.append(State(0, asked=False))
    return _of_process[0]


def swap(new: State) -> State:
    """Put ``new`` in the place of this rank's state, which is returned."""
    old, world = current(), current_local_world()
    new.threaded = old.threaded
    if world is not None:
        _of_world[world] = new
    else:
        _of_process[0] = new
    return old


def seed(value: int) -> None:
    """Begin the numbers of this seed. Say it on every rank, or before ``hc.distribute``, which tells rank 0's."""
    swap(State(value))


def get_state() -> tuple[int, int]:
    """The seed and the number of calls so far: save them with a training run, once for all ranks."""
    now = current()
    return now.seed, now.counter


def set_state(state: tuple[int, int]) -> None:
    """Go on where :func:`get_state` was asked."""
    swap(State(*state))


def same_state(world: World) -> None:
    """Give every rank the state of rank 0. Without a chosen seed, it begins with that of rank 0's torch."""
    mine = get_state() if current().asked else (torch.initial_seed(), 0)
    words = torch.tensor([*map(signed, mine)], dtype=torch.int64, device="cpu")
    agreed, counter = world.broadcast(words, tuple(range(world.size)), Label("random state", "distribute")).tolist()
    if (agreed % (1 << 64), counter) != get_state():
        set_state((agreed, counter))
