"""What worlds of processes share: a deadline, spare worlds for other threads, and words about who failed where."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from .._torch_private import default_store
from ..errors import RankFailure
from .base import Label, World

_GRACE = 3.0  # seconds in which other ranks may still say what they saw, once one has failed


class JoinedWorld(World):
    """Ranks that are processes, met at torch's common store."""

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        super().__init__(rank, size, deadline)
        self.set_deadline(deadline)
        self._failed: str | None = None
        self._wide = False
        self._spare: dict[bool, list[Any]] = {}  # of its own kind: those that are not wide, and those that are
        self._lent = False

    def set_deadline(self, seconds: float) -> None:
        self.deadline, self._wait = seconds, timedelta(seconds=seconds)

    @abstractmethod
    def _another(self, wide: bool) -> Self:
        """The same ranks with connections of their own."""

    def beside(self, wide: bool = False) -> Self:
        spare = self._spare.get(wide)
        made: Self = spare.pop() if spare else self._another(wide)
        made._spare, made._lent, made._wide = self._spare, True, wide
        made.set_deadline(self.deadline)
        return made

    def close(self) -> None:
        """It is kept for the next who wants one. Its groups are not destroyed: torch names new ones by how many there
        are, and a name that comes again meets what the first one left behind.
        """
        if self._failed or not self._lent:
            return
        with suppress(RankFailure):  # no rank may use it anew while another waits for its last message
            self.maximum(torch.zeros(1), tuple(range(self.size)), Label("closing", "a world", "control"))
            self._lent = False
            self.traffic.clear()
            self._spare.setdefault(self._wide, []).append(self)

    def _refuse_after_failure(self) -> None:
        if self._failed:
            raise RankFailure(f"rank {self.rank}: an earlier exchange failed ({self._failed}); start the run again")

    @staticmethod
    def _host(tensor: Tensor, fill: bool = False) -> Tensor:
        """The tensor itself on the CPU; pinned host memory for a device tensor, which the transport cannot read."""
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor) if fill else host

    def _failure(self, peer: int | None, error: BaseException, label: Label) -> RankFailure:
        """Say what this rank saw, hear what the others saw, and name the rank where it began."""
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).strip() or type(error).__name__
        seen = self._seen(peer, text)
        self._failed = f"{label}: {seen}"
        heard = self._hear_others(label)
        silent = [str(rank) for rank, words in heard.items() if words is None]
        parts = [f"rank {self.rank}, {label}: {seen}"]
        parts += [f"no word from rank {', '.join(silent)}, which died or hangs"] if silent else []
        parts += [f"rank {rank} stopped at {words}" for rank, words in heard.items() if words is not None]
        return RankFailure("; ".join(parts) + f". Look at that rank's own output first. ({text.splitlines()[0][:120]})")

    def _seen(self, peer: int | None, text: str) -> str:
        if peer is None or peer < 0:
            return "a reduction did not complete"
        if "closed" in text.lower() or "reset" in text.lower():
            return f"the connection to rank {peer} closed"
        return f"nothing came from rank {peer} within the deadline of {self.deadline:g} s"

    def _hear_others(self, label: Label) -> dict[int, str | None]:
        """Where each other rank says it stopped; None for one that says nothing within a short grace."""
        heard: dict[int, str | None] = {rank: None for rank in range(self.size) if rank != self.rank}
        store = default_store()
        if store is None:
            return {}
        with suppress(RuntimeError, ValueError):  # the store itself may be gone with the rank that held it
            store.set(f"halocline/failed/{self.rank}", str(label))
            end = time.monotonic() + _GRACE
            while None in heard.values() and time.monotonic() < end:
                for rank in [r for r, words in heard.items() if words is None]:
                    if store.check([f"halocline/failed/{rank}"]):
                        heard[rank] = store.get(f"halocline/failed/{rank}").decode()
                time.sleep(0.05)
        return heard
