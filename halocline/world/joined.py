"""What worlds of processes share: a deadline, and error texts that say which rank failed where.

A rank that fails writes where it stopped into the common store, waits a few seconds for the others to do the same, and
raises an error that names ranks which are silent.
"""

from __future__ import annotations

import re
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Self

import torch

from ..errors import RankFailure
from .base import World
from .caller import LauncherCalls, meeting_calls
from .events import Label
from .rendezvous import BoundedStore, joined_store, within
from .tags import called_elsewhere, divergence
from .transport_errors import Diverged

DEFAULT_DEADLINE = 120.0  # seconds
_PATIENCE = 4.0  # times the longest successful wait: the deadline, if none was chosen
_DEEPEST = 64  # calls of the stack that ranks compare when they join
_QUICK = 1.0  # seconds for an answer of the store during a wait
_GRACE = 3.0  # seconds in which other ranks may write where they stopped, once one has failed


class JoinedWorld(World):
    """The base of worlds whose ranks are processes, which met at torch's store."""

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        super().__init__(rank, size, deadline)
        self.set_deadline(deadline)
        self._failed: str | None = None
        self._store_is_silent = False
        self._closed = False
        self._adapts = False
        self._everyone = tuple(range(size))  # the ranks that use it: fewer, if only some have made it
        self._first = False  # whether it is the world that all ranks joined, not a duplicate

    def set_deadline(self, seconds: float) -> None:
        """Set the seconds that any wait for another rank may take."""
        self.deadline, self._wait = seconds, timedelta(seconds=seconds)

    def choose_deadline(self, seconds: float | None) -> None:
        """Set the deadline; None starts with the default and lets it grow with the waits that the program needs."""
        self._adapts = seconds is None
        self.set_deadline(DEFAULT_DEADLINE if seconds is None else seconds)

    def waited(self, label: Label, event: int, began: float) -> float:
        """As in :class:`World`; without a chosen deadline, it becomes four times the longest successful wait."""
        seconds = super().waited(label, event, began)
        if self._adapts and _PATIENCE * seconds > self.deadline:
            self.set_deadline(_PATIENCE * seconds)
        return seconds

    def compare_launches(self) -> None:
        """When ranks have joined: calls of the stack that differ between ranks are the launcher's. By all ranks
        together."""
        calls, everyone = meeting_calls(_DEEPEST), tuple(range(self.size))
        label = Label("joining", "the world", "control")
        mine = torch.tensor([*calls, *[0] * (_DEEPEST - len(calls))], dtype=torch.int64, device="cpu")
        same = (mine == self.broadcast(mine, everyone, label)).tolist()
        shared = same.index(False) if False in same else _DEEPEST
        least = -int(self.maximum(torch.tensor([-shared], device="cpu"), everyone, label))
        if least < _DEEPEST:
            self.launcher_calls = LauncherCalls(threading.get_ident(), max(0, len(calls) - least))
        self.traffic.clear()
        self._first = True

    def _alike(self, made: Self) -> Self:
        """A duplicate, with this world's way to choose deadlines."""
        made._adapts = self._adapts
        return made

    def close(self) -> None:
        """Wait until all ranks close, unless one has failed, and release the transport. A second call does nothing."""
        if self._closed:
            return
        if not self._failed:
            with suppress(RankFailure):  # no rank may close while another waits for its last message
                self.maximum(torch.zeros(1), self._everyone, Label("closing", "a world", "control"))
        self._closed = True
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Close connections, and end the threads behind them."""

    def _refuse_after_failure(self) -> None:
        """Raise RankFailure if this world is closed or has failed."""
        if self._closed:
            raise RankFailure(f"rank {self.rank}: this world is closed; make another with world.duplicate()")
        if self._failed:
            raise RankFailure(f"rank {self.rank}: an earlier exchange failed ({self._failed}); start the run again")

    def _failure(self, peer: int | None, error: BaseException, label: Label) -> RankFailure:
        """The error for a failed wait: what this rank saw, where the others stopped, and which ranks are silent.

        Writes where this rank stopped into the store, and takes up to three seconds.
        """
        called = self.called(label)
        if isinstance(error, Diverged) and peer is not None:
            return self._divergence(peer, called)
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).strip() or type(error).__name__
        seen = self._seen(peer, text)
        self._failed = f"{label}: {seen}"
        heard = self._hear_others(called, [rank for rank in self._everyone if rank != self.rank])
        silent = [str(rank) for rank, words in heard.items() if words is None]
        parts = [f"rank {self.rank}, {called}: {seen}"]
        parts += [f"no word from rank {', '.join(silent)}, which died or hangs"] if silent else []
        parts += [f"rank {rank} stopped at {words}" for rank, words in heard.items() if words is not None]
        return RankFailure("; ".join(parts) + f". Look at that rank's own output first. ({text.splitlines()[0][:120]})")

    def _divergence(self, peer: int, called: str) -> RankFailure:
        """The error for two ranks that wait for each other at different places of the program."""
        self._failed = f"{called}: rank {peer} was elsewhere in the program"
        theirs = self._hear_others(called, [peer]).get(peer) or "another operation"
        self.leave()  # ranks that wait for this one need not wait for their deadline
        return RankFailure(divergence(self.rank, called, peer, theirs))

    def _seen(self, peer: int | None, text: str) -> str:
        """What this rank saw of a failure, from the transport's error text."""
        if peer is None or peer < 0:
            return "a reduction did not complete"
        if "closed" in text.lower() or "reset" in text.lower():
            return f"the connection to rank {peer} closed"
        return f"nothing came from rank {peer} within the deadline of {self.deadline:g} s"

    def _hear_others(self, called: str, ranks: Sequence[int]) -> dict[int, str | None]:
        """Where each of these ranks stopped, as it wrote into the store; None for a rank that is silent."""
        heard: dict[int, str | None] = dict.fromkeys(ranks)
        store = joined_store(_GRACE)
        if store is None:
            return {}

        def talk() -> None:
            store.set(f"halocline/failed/{self.rank}", called)
            end = time.monotonic() + _GRACE
            while None in heard.values() and time.monotonic() < end:
                for rank in [r for r, words in heard.items() if words is None]:
                    if store.check(f"halocline/failed/{rank}"):
                        heard[rank] = store.get(f"halocline/failed/{rank}")
                time.sleep(0.05)

        with suppress(RuntimeError, ValueError, OSError):  # the store may have ended with the process that serves it
            within(_GRACE, talk)
        return dict(heard)

    def compare_places(self, peer: int, awaited: int, label: Label) -> None:
        """During a long wait for ``peer``: raise Diverged if it says that it waits elsewhere in the program."""
        store = self._answering_store()
        if store is None or not self._first or label.channel not in ("moves", "control"):
            return
        theirs = None
        with self._noticing_silence():
            store.set(f"halocline/at/{self.rank}/{peer}", str(awaited))
            name = f"halocline/at/{peer}/{self.rank}"
            theirs = int(store.get(name)) if store.check(name) else None
        if theirs is not None and called_elsewhere(awaited, theirs):
            raise Diverged(peer, f"rank {peer} runs another operation")

    def forget_place(self, peer: int) -> None:
        """A long wait has ended: remove this rank's entry from the store."""
        store = self._answering_store()
        if store is not None:
            with self._noticing_silence():
                store.delete_key(f"halocline/at/{self.rank}/{peer}")

    def _answering_store(self) -> BoundedStore | None:
        """The common store, unless it has failed to answer before."""
        return None if self._store_is_silent else joined_store(_QUICK)

    @contextmanager
    def _noticing_silence(self) -> Iterator[None]:
        """A store that failed to answer once is not asked again: each time would cost a part of the deadline."""
        try:
            yield
        except TimeoutError:
            self._store_is_silent = True
        except (RuntimeError, ValueError):  # the store has ended with the rank that served it
            pass
