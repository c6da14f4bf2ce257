"""How the ranks of a run agree about a checkpoint: what one cannot do, all refuse, in the same words."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from ...errors import HaloclineError, RankFailure
from ...world import Mesh, World, new_group

_STORAGE = 600.0  # seconds, at least, where nobody sets a deadline: a large checkpoint takes minutes

T = TypeVar("T")
R = TypeVar("R")


class CheckpointError(HaloclineError, RuntimeError):
    """A checkpoint that cannot be written, or that is not what was written. Names the folder and the file."""


class Mismatch(CheckpointError):
    """A sound checkpoint of another model."""


@dataclass(frozen=True)
class _Answer(Generic[T]):
    """What a rank made of its work: a value, or the kind of error and its words."""

    value: T | None = None
    kind: type[CheckpointError] | None = None
    reason: str = ""


class Peers:
    """All ranks, in a gloo group of their own, so that a thread may talk beside the training. Made by all together."""

    def __init__(self, world: World | Mesh | None, deadline: float | None) -> None:
        self.rank, self.size = (0, 1) if world is None else (_world(world).rank, _world(world).size)
        self.deadline = deadline or (_STORAGE if world is None else max(_STORAGE, _world(world).deadline))
        self._spare = _spare(_world(world)) if world is not None else {}
        self._group = self._own_group() if self.size > 1 else None

    def _own_group(self) -> dist.ProcessGroup:
        if not dist.is_initialized() or dist.get_world_size() != self.size:
            raise CheckpointError(
                f"checkpoints of {self.size} ranks need as many processes, joined by torch.distributed; start the run "
                "with torchrun or Slurm, or make Checkpoints with a world of one rank"
            )
        if (self.deadline, self.size) in self._spare:
            return self._spare.pop((self.deadline, self.size))
        return new_group(self.deadline, backend="gloo")

    @property
    def is_first(self) -> bool:
        """Is this rank 0, which writes and decides?"""
        return self.rank == 0

    def agree(self, own: Callable[[], T]) -> list[T]:
        """What each rank made of its own work; where one failed, all raise that."""
        return self.centrally(own, lambda values: [values] * self.size)

    def told(self, work: Callable[[], T]) -> T:
        """What the first rank made of the work, on all."""
        return self.centrally(lambda: None, lambda _: [work()] * self.size)

    def centrally(self, own: Callable[[], T], work: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank's own work; then the first rank's with all results, which makes a result for each rank."""
        heard = self._gathered(_attempt(own))
        answers: list[_Answer[R]] | None = None
        if heard is not None:
            answers = self._worked_out(heard, work)
        answer = self._scattered(answers)
        if answer.kind is not None:
            raise answer.kind(answer.reason)
        return cast(R, answer.value)

    def _worked_out(self, heard: list[_Answer[T]], work: Callable[[list[T]], Sequence[R]]) -> list[_Answer[R]]:
        failed = [(rank, answer) for rank, answer in enumerate(heard) if answer.kind is not None]
        if failed:
            rank, first = failed[0]
            told = f"rank {rank}: {first.reason}" if self.size > 1 else first.reason
            return [_Answer(kind=first.kind, reason=told)] * self.size
        result = _attempt(lambda: work([cast(T, answer.value) for answer in heard]))
        if result.kind is not None:
            return [_Answer(kind=result.kind, reason=result.reason)] * self.size
        return [_Answer(value) for value in cast(Sequence[R], result.value)]

    def _gathered(self, mine: _Answer[T]) -> list[_Answer[T]] | None:
        if self._group is None:
            return [mine]
        table: list[Any] | None = [None] * self.size if self.is_first else None
        self._talk(lambda: dist.gather_object(mine, table, dst=0, group=self._group))
        return table

    def _scattered(self, answers: list[_Answer[R]] | None) -> _Answer[R]:
        if self._group is None:
            return cast(list[_Answer[R]], answers)[0]
        mine: list[Any] = [None]
        self._talk(lambda: dist.scatter_object_list(mine, answers, src=0, group=self._group))
        return cast(_Answer[R], mine[0])

    def _talk(self, talk: Callable[[], object]) -> None:
        try:
            talk()
        except RuntimeError as error:
            text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).strip()  # without the place in gloo's source
            words = text.splitlines() or [type(error).__name__]
            raise RankFailure(
                f"rank {self.rank}, checkpoint: another rank died, or did not answer within {self.deadline:g} s; look "
                f"at its own output first, then start the run again from the last checkpoint ({words[0][:160]})"
            ) from error

    def close(self) -> None:
        """The group is kept for the next: torch names new groups by how many there are, so none may be destroyed."""
        group, self._group = self._group, None
        if group is not None:
            self._spare[self.deadline, self.size] = group


def _spare(world: World) -> dict[tuple[float, int], Any]:
    """Groups that earlier checkpoints of these ranks have made."""
    groups: dict[tuple[float, int], Any] = world.__dict__.setdefault("_checkpoint_groups", {})
    return groups


def _world(world: World | Mesh) -> World:
    return world.world if isinstance(world, Mesh) else world


def _attempt(work: Callable[[], T]) -> _Answer[T]:
    try:
        return _Answer(work())
    except CheckpointError as error:
        return _Answer(kind=type(error), reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
        return _Answer(kind=CheckpointError, reason=reason(error))


def reason(error: BaseException) -> str:
    """An error as the end of a sentence."""
    if isinstance(error, CheckpointError):
        return str(error)
    system = _of_the_system(error)
    if system is None:
        return f"{type(error).__name__}: {str(error).strip()}"
    named = f" ({str(system.filename)!a})" if system.filename is not None else ""
    advice = "; make room, or keep fewer checkpoints" if system.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{system.strerror or system}{named}{advice}"


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The error under this one that the system gave: torch.save reports a full disk as a wrong position in a file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
