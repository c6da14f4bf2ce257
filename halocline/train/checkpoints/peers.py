"""How the ranks of a run agree about a checkpoint: if one rank fails, all raise the same error.

Saving and loading are sequences of steps in which each rank does its own work and rank 0 combines the results. A rank
that raised alone would leave the others waiting, so each result is sent as a value or an error, and rank 0 decides for
all.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import HaloclineError, RankFailure
from ...world import Mesh, World, new_group
from .wire import from_bytes, to_bytes

_STORAGE = 600.0  # seconds: the least default deadline, since a large checkpoint takes minutes
_MESSAGE = 1 << 28  # bytes of a message in which a tensor travels
_LONGEST = 1 << 31  # bytes of a message: plans of a million tensors

T = TypeVar("T")
R = TypeVar("R")


class CheckpointError(HaloclineError, RuntimeError):
    """A checkpoint cannot be written, or is damaged. The text names the folder and the file."""


class Mismatch(CheckpointError):
    """The checkpoint is sound, but of another model."""


@dataclass(frozen=True)
class _Answer(Generic[T]):
    """The outcome of one rank's work, as it is sent: a value, or the class of an error and its text."""

    value: T | None = None
    kind: type[CheckpointError] | None = None
    reason: str = ""


class Peers:
    """All ranks of a run, in a gloo group of their own, so that a thread may communicate beside training.

    Every method is called by all ranks together, and so is the constructor. Without a world there is one rank.
    """

    def __init__(self, world: World | Mesh | None, deadline: float | None) -> None:
        self.rank, self.size = (0, 1) if world is None else (_world(world).rank, _world(world).size)
        self.deadline = deadline or (_STORAGE if world is None else max(_STORAGE, _world(world).deadline))
        self._spare = _spare(_world(world)) if world is not None else {}
        self._group: dist.ProcessGroup | None = None
        if self.size == 1:
            return
        if not dist.is_initialized() or dist.get_world_size() != self.size:
            raise CheckpointError(
                f"checkpoints of {self.size} ranks need as many processes, joined by torch.distributed; start the run "
                "with torchrun or Slurm, or make Checkpoints with a world of one rank"
            )
        self._group = self._spare.pop((self.deadline, self.size), None) or new_group(self.deadline, backend="gloo")

    @property
    def is_first(self) -> bool:
        """Is this rank 0, which writes and decides?"""
        return self.rank == 0

    def agree(self, own: Callable[[], T]) -> list[T]:
        """The results of all ranks' own work, in the order of ranks. If one fails, all raise its error."""
        return self.centrally(own, lambda values: [values] * self.size)

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """The result of rank 0's work, on all ranks. If it fails, all raise."""
        return self.centrally(lambda: None, lambda _: [work()] * self.size)

    def centrally(self, own: Callable[[], T], work: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``own`` on every rank, then ``work`` on rank 0 with all results; it gives a result for each rank."""
        gathered = self._gathered(_attempt(own))
        answer = self._scattered(None if gathered is None else self._worked_out(gathered, work))
        if answer.kind is not None:
            raise answer.kind(answer.reason)
        return cast(R, answer.value)

    def _worked_out(self, gathered: list[_Answer[T]], work: Callable[[list[T]], Sequence[R]]) -> list[_Answer[R]]:
        """On rank 0: the answer for each rank, which is the first error if any rank has one."""
        failed = [(rank, answer) for rank, answer in enumerate(gathered) if answer.kind is not None]
        if failed:
            rank, first = failed[0]
            told = f"rank {rank}: {first.reason}" if self.size > 1 else first.reason
            return [_Answer(kind=first.kind, reason=told)] * self.size
        result = _attempt(lambda: work([cast(T, answer.value) for answer in gathered]))
        if result.kind is not None:
            return [_Answer(kind=result.kind, reason=result.reason)] * self.size
        return [_Answer(value) for value in cast(Sequence[R], result.value)]

    def _gathered(self, mine: _Answer[T]) -> list[_Answer[T]] | None:
        """All ranks' answers on rank 0; None elsewhere."""
        if self._group is None:
            return [mine]
        data = _encoded(mine)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._talk(lambda: dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group))
        longest = self._longest(lengths)
        rooms = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)] if self.is_first else None
        self._talk(lambda: dist.gather(_padded(data, longest), rooms, dst=0, group=self._group))
        if rooms is None:
            return None
        return [self._decoded(room, length) for room, length in zip(rooms, lengths, strict=True)]

    def _scattered(self, answers: list[_Answer[R]] | None) -> _Answer[R]:
        """This rank's one of the answers that rank 0 has."""
        if self._group is None:
            return cast(list[_Answer[R]], answers)[0]
        data = None if answers is None else [_encoded(answer) for answer in answers]
        lengths = torch.tensor([len(each) for each in data]) if data else torch.zeros(self.size, dtype=torch.int64)
        self._talk(lambda: dist.broadcast(lengths, src=0, group=self._group))
        longest = self._longest(list(lengths))
        mine = torch.empty(longest, dtype=torch.uint8)
        padded = [_padded(each, longest) for each in data] if data else None
        self._talk(lambda: dist.scatter(mine, padded, src=0, group=self._group))
        return self._decoded(mine, lengths[self.rank])

    def _longest(self, lengths: Sequence[Tensor]) -> int:
        """The longest of the messages that are announced, in bytes. RankFailure if no rank can have announced it."""
        if not all(0 < int(length) <= _LONGEST for length in lengths):
            raise RankFailure(f"rank {self.rank}, checkpoint: a message of impossible length came; start the run again")
        return max(int(length) for length in lengths)

    def _decoded(self, room: Tensor, length: Tensor) -> _Answer[Any]:
        """An answer that came. RankFailure if it is none."""
        try:
            value, kind, words = from_bytes(room[: int(length)].numpy().tobytes())
            return _Answer(value, None if kind is None else _KINDS[kind], str(words))
        except (ValueError, KeyError) as error:
            text = f"rank {self.rank}, checkpoint: what came is no message of a rank ({error}); start the run again"
            raise RankFailure(text) from error

    def _talk(self, talk: Callable[[], object]) -> None:
        """Run a collective call; RankFailure if another rank died or the deadline passed."""
        try:
            talk()
        except RuntimeError as error:
            text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).strip()  # without the place in gloo's source
            words = text.splitlines() or [type(error).__name__]
            raise RankFailure(
                f"rank {self.rank}, checkpoint: another rank died, or did not answer within {self.deadline:g} s; look "
                f"at its own output first, then start the run again from the last checkpoint ({words[0][:160]})"
            ) from error

    def post_tensor(self, rank: int, tensor: Tensor) -> Callable[[], None]:
        """Begin to send a tensor to a rank, which awaits it; returns a function that waits for the end."""
        return self._moved(dist.isend, _bytes_of(tensor.contiguous()), rank)

    def await_tensor(self, rank: int, tensor: Tensor) -> Callable[[], None]:
        """Begin to receive a contiguous tensor from a rank, in the order in which that one sends."""
        return self._moved(dist.irecv, _bytes_of(tensor), rank)

    def _moved(self, move: Callable[..., Any], data: Tensor, rank: int) -> Callable[[], None]:
        works: list[Any] = []
        self._talk(lambda: works.extend(move(part, rank, group=self._group) for part in data.split(_MESSAGE)))

        def wait() -> None:
            for work in works:
                self._talk(work.wait)

        return wait

    def close(self) -> None:
        """Keep the group for the next Peers: torch names new groups by their count, so none may be destroyed."""
        group, self._group = self._group, None
        if group is not None:
            self._spare[self.deadline, self.size] = group


#: The classes of errors that ranks tell each other, by name.
_KINDS: dict[str, type[CheckpointError]] = {each.__name__: each for each in (CheckpointError, Mismatch)}


def _encoded(answer: _Answer[Any]) -> bytes:
    """An answer as it is sent."""
    return to_bytes((answer.value, None if answer.kind is None else answer.kind.__name__, answer.reason))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _padded(data: bytes, size: int) -> Tensor:
    """Bytes as a tensor of that size."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _spare(world: World) -> dict[tuple[float, int], Any]:
    """Groups that earlier Peers of this world have left, by deadline and size."""
    groups: dict[tuple[float, int], Any] = world.__dict__.setdefault("_checkpoint_groups", {})
    return groups


def _world(world: World | Mesh) -> World:
    return world.world if isinstance(world, Mesh) else world


def _attempt(work: Callable[[], T]) -> _Answer[T]:
    """Run ``work`` and catch what it raises: the other ranks wait to hear of it."""
    try:
        return _Answer(work())
    except CheckpointError as error:
        return _Answer(kind=type(error), reason=str(error))
    except Exception as error:  # noqa: BLE001
        return _Answer(kind=CheckpointError, reason=reason(error))


def reason(error: BaseException) -> str:
    """An error as the end of a sentence, with advice for a full disk."""
    if isinstance(error, CheckpointError):
        return str(error)
    # Look for the system's own error below: torch.save reports a full disk as a wrong position in a file.
    system: BaseException | None = error
    while system is not None and not isinstance(system, OSError):
        system = system.__cause__ or system.__context__
    if system is None:
        return f"{type(error).__name__}: {str(error).strip()}"
    named = f" ({str(system.filename)!a})" if system.filename is not None else ""
    advice = "; make room, or keep fewer checkpoints" if system.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{system.strerror or system}{named}{advice}"
