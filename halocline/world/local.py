"""All ranks in one process, a thread each: for tests on CPUs, with the same movements as between processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from ..errors import RankFailure
from .base import Incoming, Outgoing, World
from .capabilities import Capabilities
from .events import Label
from .pending import PendingExchange
from .tags import diverged, divergence

_current = threading.local()  # the world of this thread, if it is a rank of its own
Result = TypeVar("Result")


class _Board:
    """The messages of all ranks of a process, by (sender, receiver, tag). All access is under its condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int], list[Tensor]] = {}
        self.called: dict[tuple[int, int, int], str] = {}  # what each of them is for, and who sent it
        self.failure: str | None = None
        self._duplicates: dict[object, _Board] = {}

    def duplicate(self, number: object) -> _Board:
        """The board of the n-th duplicate of some ranks, the same for all of them."""
        with self.changed:
            return self._duplicates.setdefault(number, _Board())

    def fail(self, text: str) -> None:
        """Let all ranks that wait, on this board and on duplicates, raise with this text."""
        with self.changed:
            self.failure = self.failure or text
            self.changed.notify_all()
            others = list(self._duplicates.values())
        for other in others:
            other.fail(text)


class LocalWorld(World):
    """A rank that is a thread. Messages are copies on a board that all ranks share."""

    capabilities = Capabilities("local", separate_processes=False, detects_divergence=True, waits_for_any=True)

    def __init__(self, rank: int, size: int, board: _Board, deadline: float) -> None:
        super().__init__(rank, size, deadline)
        self._board, self._woken = board, False
        self._duplicates: Counter[tuple[int, ...]] = Counter()  # made so far, by the ranks that made them

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        """Leave copies of the messages on the board."""
        with self._board.changed:
            for peer, message, tag in sends:
                self._board.messages.setdefault((self.rank, peer, tag), []).append(message.detach().clone())
                self._board.called[self.rank, peer, tag] = self.called(label)
            self._board.changed.notify_all()
        return receives

    def complete(self, posted: object, label: Label) -> None:
        """Wait for the messages and copy them into the buffers."""
        end = time.monotonic() + self.deadline
        for peer, buffer, tag in posted:  # type: ignore[attr-defined]
            buffer.copy_(self._take((peer, self.rank, tag), end, label))

    def _take(self, key: tuple[int, int, int], end: float, label: Label) -> Tensor:
        """Wait for a message and remove it from the board; RankFailure at ``end`` or if another rank has failed."""
        board = self._board
        with board.changed:
            while not board.messages.get(key):
                if board.failure:
                    raise RankFailure(f"rank {self.rank}, {label}: {board.failure}")
                self._refuse_others(key, label)
                if not board.changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise RankFailure(
                        f"rank {self.rank}, {label}: nothing came from rank {key[0]} within {self.deadline:g} s; "
                        "it has died, hangs, or runs another operation"
                    )
            queue = board.messages[key]
            message = queue.pop(0)
            if not queue:
                del board.messages[key], board.called[key]
            return message

    def _refuse_others(self, awaited: tuple[int, int, int], label: Label) -> None:
        """Raise RankFailure if the peer has sent another message in place of the awaited one."""
        for key, called in self._board.called.items():
            if key[:2] == awaited[:2] and diverged(awaited[2], key[2]):
                raise RankFailure(divergence(self.rank, self.called(label), awaited[0], called))

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        """As in :class:`World`, by looking at the board."""
        board = self._board
        with board.changed:
            while not self._woken:
                for number, exchange in enumerate(under_way):
                    if all(board.messages.get((peer, self.rank, tag)) for peer, _, tag in exchange.posted):
                        return number
                if board.failure or time.monotonic() >= end:
                    exchange = under_way[0]
                    peer, _, tag = exchange.posted[0]
                    self._take((peer, self.rank, tag), 0.0, exchange.label)  # raises
                board.changed.wait(max(0.0, end - time.monotonic()))
            self._woken = False
        return None

    def leave(self) -> None:
        """Let the other ranks fail."""
        self._board.fail(f"rank {self.rank} has left")

    def wake(self) -> None:
        with self._board.changed:
            self._woken = True
            self._board.changed.notify_all()

    def _duplicate(self, wide: bool) -> LocalWorld:
        return self._duplicate_among(tuple(range(self.size)), wide)

    def _duplicate_among(self, members: tuple[int, ...], wide: bool) -> LocalWorld:
        self._duplicates[members] += 1
        board = self._board.duplicate((members, self._duplicates[members]))
        return LocalWorld(self.rank, self.size, board, self.deadline)


def current_local_world() -> World | None:
    """The world of this thread, if it is a rank of its own."""
    return getattr(_current, "world", None)


@contextmanager
def as_world(world: World) -> Iterator[None]:
    """A context in which this thread is a rank of ``world``."""
    before = current_local_world()
    _current.world = world
    try:
        yield
    finally:
        _current.world = before


def run_local(size: int, function: Callable[[], Result], deadline: float = 20.0) -> list[Result]:
    """Run ``function()`` on ``size`` ranks, a thread each, and return their results; raises the first error."""
    board = _Board()
    results: list[Result | None] = [None] * size
    errors: list[tuple[float, int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with as_world(LocalWorld(rank, size, board, deadline)):
                results[rank] = function()
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            errors.append((time.monotonic(), rank, error))
            board.fail(f"rank {rank} failed first: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * deadline)
        if thread.is_alive():
            raise RankFailure(f"ranks in one process: a rank still runs after {10 * deadline:g} s")
    if errors:
        raise min(errors, key=lambda item: item[:2])[2]
    return results  # type: ignore[return-value]
