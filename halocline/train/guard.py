"""What is watched while a run goes on: losses that are no numbers, weights that drift apart, ranks that are slow."""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import HaloclineError
from ..world import Label, Mesh, placement_of, ranks_with_same
from ..world.agreement import extremes

if TYPE_CHECKING:  # LARC and the guard serve programs that have no pydantic
    from .settings import GuardSettings

_log = logging.getLogger("halocline.train")
#: Of the loss in fp16. It is halved at every overflow: below this, some forty steps in a row have been left out.
LEAST_SCALE = 2.0**-24
_LABEL = Label("guard", "the training loop", "control")
_MODEL = "model/"  # how the names of a model's tensors begin in a checkpoint


class TrainingError(HaloclineError, RuntimeError):
    """Training went wrong in a way that going on would not mend."""


def _warn(text: str) -> None:
    _log.warning("%s", text)


class Guard:
    """All its exchanges are made by all ranks at the same steps, and what it raises is raised by all.

    ``warn`` is called on rank 0, with what is no reason to end the run.
    """

    def __init__(
        self, settings: GuardSettings, model: nn.Module, mesh: Mesh, warn: Callable[[str], None] = _warn
    ) -> None:
        self._settings, self._model, self._mesh, self._warn = settings, model, mesh, warn
        self._everyone = tuple(range(mesh.size))
        self._busy: deque[float] = deque(maxlen=max(2, settings.drift_every))
        #: Buffers that a model is made with, such as a table not filled in yet.
        self._nan_from_the_start = {f"{_MODEL}{name}" for name, each in model.named_buffers() if _has_nan(each)}

    def look(self, step: int, loss: float, busy: float) -> None:
        """After each step: its loss, and the seconds that this rank computed in it."""
        if not math.isfinite(loss):
            self._report(self._settings.nan, f"step {step}: the loss is {loss}; lower the learning rate, or clip")
        self._busy.append(busy)
        if self._mesh.size > 1 and self._settings.drift_every and (step + 1) % self._settings.drift_every == 0:
            self._compare_weights(step)
            self._compare_times(step)

    def may_save(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Is this state sound: weights finite, nothing else NaN, and every tensor the same on every rank?

        By all ranks together; they exchange one fingerprint of 8 bytes a tensor, twice, and a flag.
        """
        names = list(tensors)
        words = fingerprints(tensors) if self._mesh.size > 1 else torch.zeros(len(names), dtype=torch.int64)
        weights = {f"{_MODEL}{name}" for name, _ in self._model.named_parameters()}
        bad = torch.tensor([self._is_bad(name, tensors[name], name in weights) for name in names], dtype=torch.int64)
        differ, bad_anywhere = self._compared(list(tensors.values()), words, bad)
        if bad_anywhere:
            first = bad_anywhere[0]
            ranks = [rank for rank, flag in enumerate(self._of_each_rank(bad[first])) if flag]
            where = f"{_said(names[first])} on rank {_listed(ranks)}" if self._mesh.size > 1 else _said(names[first])
            text = f"step {step}: {len(bad_anywhere)} tensors hold NaN or infinities, first {where}"
            self._report(
                self._settings.nan, f"{text}; no checkpoint is written of them; lower the learning rate, or clip"
            )
        elif differ:
            self._report_drift(step, tensors, words, differ, "; no checkpoint is written of them")
        return not (bad_anywhere or differ)

    def _is_bad(self, name: str, tensor: Tensor, is_weight: bool) -> bool:
        """Buffers may hold infinities, as masks do."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or name in self._nan_from_the_start:
            return False
        return not bool(tensor.detach().isfinite().all()) if is_weight else _has_nan(tensor)

    def _compared(self, tensors: Sequence[Tensor], words: Tensor, flags: Tensor) -> tuple[list[int], list[int]]:
        """Where ``words`` differ between ranks that share a tensor, and where a rank has a flag.

        In one exchange, and one more for each way in which tensors are not whole.
        """
        placed: dict[tuple[str, ...], list[int]] = {}
        for place, tensor in enumerate(tensors):
            if placement_of(tensor):
                placed.setdefault(tuple(sorted(placement_of(tensor))), []).append(place)
        apart, common = torch.zeros_like(words), words.clone()
        for _, places in sorted(placed.items()):
            own, ranks = words[places], ranks_with_same(tensors[places[0]], self._mesh)
            both = torch.cat([own, ~own])
            drifted = self._mesh.world.maximum(both, ranks, _LABEL) != both
            apart[places] = (drifted[: len(own)] | drifted[len(own) :]).to(torch.int64)
            common[places] = 0
        least, most = extremes(self._mesh.world, torch.cat([common, apart, flags]), _LABEL)
        count = len(words)
        differ, flagged = (least != most)[:count] | (most[count : 2 * count] > 0), most[2 * count :]
        return torch.nonzero(differ).flatten().tolist(), torch.nonzero(flagged).flatten().tolist()

    def _of_each_rank(self, word: Tensor) -> list[int]:
        table = torch.full((self._mesh.size,), torch.iinfo(torch.int64).min)
        table[self._mesh.rank] = word
        return [int(each) for each in self._maximum(table).tolist()]

    def _maximum(self, table: Tensor) -> Tensor:
        return table if self._mesh.size == 1 else self._mesh.world.maximum(table, self._everyone, _LABEL)

    def overflowed(self, step: int, scale: float) -> None:
        """After a step that was left out, since gradients overflowed in fp16; ``scale`` of the loss is now this."""
        if scale < LEAST_SCALE:
            text = f"step {step}: gradients overflow fp16 wherever the loss is scaled to, now by {scale:g}"
            self._report(
                self._settings.nan, f"{text}; nothing is learned; precision = 'bf16', or look for NaN in the gradients"
            )

    def _compare_weights(self, step: int) -> None:
        tensors = {
            f"{_MODEL}{name}": each for name, each in self._model.state_dict().items() if isinstance(each, Tensor)
        }
        words = fingerprints(tensors)
        differ, _ = self._compared(list(tensors.values()), words, torch.zeros(0, dtype=torch.int64))
        if differ:
            self._report_drift(step, tensors, words, differ)

    def _report_drift(
        self, step: int, tensors: Mapping[str, Tensor], words: Tensor, differ: Sequence[int], consequence: str = ""
    ) -> None:
        """Name the first tensor and the ranks that have another than most; of two ranks nobody knows which is right."""
        names = list(tensors)
        placement = placement_of(tensors[names[differ[0]]])
        where = f"(among ranks that share it; it is {', '.join(f'{kind} on {a}' for a, kind in placement.items())})"
        if not placement:
            where = self._who_differs(self._of_each_rank(words[differ[0]]))
        text = (
            f"step {step}: {len(differ)} of {len(names)} tensors differ between ranks, first {_said(names[differ[0]])}"
        )
        self._report(
            self._settings.drift, f"{text} {where}{consequence}; go back to a checkpoint, and look for a faulty machine"
        )

    def _who_differs(self, words: Sequence[int]) -> str:
        (usual, most), (_, second), *_ = Counter(words).most_common()
        if most > second:
            return f"on rank {_listed([rank for rank, word in enumerate(words) if word != usual])}"
        apart = sorted({words.index(word) for word in words})
        return f"(ranks {_listed(apart)} differ, and no majority tells which is right)"

    def _compare_times(self, step: int) -> None:
        """A rank far slower than the others holds all of them up; it is named once for each look."""
        table = torch.zeros(self._mesh.size, dtype=torch.float64)
        table[self._mesh.rank] = statistics.median(self._busy)
        times = self._mesh.world.maximum(table, self._everyone, _LABEL).tolist()
        slowest = max(range(len(times)), key=times.__getitem__)
        usual = statistics.median(seconds for rank, seconds in enumerate(times) if rank != slowest)
        if not times[slowest] > self._settings.slow * usual > 0:
            return
        if self._mesh.rank == 0:  # whose output is looked at
            text = f"step {step}: rank {slowest} computes {times[slowest]:.3g} s a step"
            self._warn(f"{text} where the others take {usual:.3g}; all wait for it")
        elif self._mesh.rank == slowest:
            _log.warning("step %d: this is the slow rank %d, on %s", step, slowest, socket.gethostname())

    def _report(self, policy: str, text: str) -> None:
        if policy == "raise":
            raise TrainingError(text)
        if self._mesh.rank == 0:
            self._warn(text)


def fingerprints(tensors: Mapping[str, Tensor]) -> Tensor:
    """A number for each tensor: the sum of its bits, read as whole numbers, with each place weighted."""
    words = [_fingerprint(tensor.detach()) for tensor in tensors.values()]
    return torch.stack([word.cpu() for word in words]) if words else torch.zeros(0, dtype=torch.int64)


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.detach().isnan().any())


def _said(name: str) -> str:
    """A tensor's name for people: weights and buffers by their own."""
    return name.removeprefix(_MODEL)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, its bits as good as random


def _fingerprint(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    mixed = words * _MIX
    mixed = mixed ^ (mixed >> 32)  # or two highest bits that change would cancel out
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return (mixed * (2 * places + 1)).sum()
