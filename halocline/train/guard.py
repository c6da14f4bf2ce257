"""Checks while a run goes on: losses that are not finite, weights that differ between ranks, slow ranks.

Weights that are whole must have the same bits on every rank. If they do not, a machine is faulty or the program has a
bug, and going on would train several different networks. Ranks compare fingerprints, 8 bytes for each tensor.
"""

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
from ..tensor import unwrap
from ..world import Label, Mesh, placement_of, ranks_with_same
from ..world.agreement import extremes, gather_rows

if TYPE_CHECKING:  # LARC and the guard serve programs that have no pydantic
    from .settings import GuardSettings

_log = logging.getLogger("halocline.train")
#: Smallest scale of the loss in fp16. It is halved at every overflow: below this, about forty steps were skipped.
LEAST_SCALE = 2.0**-24
_LABEL = Label("guard", "the training loop", "control")
_NAN_ADVICE = {
    "raise": "lower the learning rate, or clip",
    "warn": "lower the learning rate, or clip",
    "skip": "the step is left out",
    "rollback": "weights and optimizer go back to the last checkpoint, and the samples are left out",
}
_MODEL = "model/"  # prefix of a model's tensors in a checkpoint


class TrainingError(HaloclineError, RuntimeError):
    """Training has failed in a way that further steps would not repair."""


def _warn(text: str) -> None:
    _log.warning("%s", text)


class Guard:
    """Watches losses, weights and step times. All ranks call it at the same steps, and all raise what it raises.

    ``warn`` is called on rank 0 with findings that do not end the run.
    """

    def __init__(
        self, settings: GuardSettings, model: nn.Module, mesh: Mesh, warn: Callable[[str], None] = _warn
    ) -> None:
        self._settings, self._model, self._mesh, self._warn = settings, model, mesh, warn
        self._everyone = tuple(range(mesh.size))
        self._busy: deque[float] = deque(maxlen=max(2, settings.drift_every))
        #: Buffers that hold NaN from the beginning, such as a table that is not filled in yet.
        self._nan_from_the_start = {f"{_MODEL}{name}" for name, each in model.named_buffers() if _has_nan(each)}

    def look(self, step: int, loss: float, busy: float) -> bool:
        """Check a step by its loss and the seconds that this rank computed in it; every so often compare ranks.

        Returns whether the loss is finite.
        """
        finite = math.isfinite(loss)
        if not finite:
            self._report(self._settings.nan, f"step {step}: the loss is {loss}; {_NAN_ADVICE[self._settings.nan]}")
        self._busy.append(busy)
        if self._mesh.size > 1 and self._settings.drift_every and (step + 1) % self._settings.drift_every == 0:
            self._compare_weights(step)
            self._compare_times(step)
        return finite

    def may_save(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Is this state sound: weights finite, no other NaN, and every tensor the same on every rank?

        By all ranks together. They exchange a fingerprint of 8 bytes per tensor, twice, and a flag.
        """
        names = list(tensors)
        words = fingerprints(tensors) if self._mesh.size > 1 else torch.zeros(len(names), dtype=torch.int64)
        weights = {f"{_MODEL}{name}" for name, _ in self._model.named_parameters()}
        bad = torch.tensor([self._is_bad(name, tensors[name], name in weights) for name in names], dtype=torch.int64)
        differ, bad_anywhere = self._compared(list(tensors.values()), words, bad)
        if bad_anywhere:
            first = bad_anywhere[0]
            ranks = [rank for rank, flag in enumerate(self._of_each_rank(bad[first])) if flag]
            where = (
                f"{_tensor_text(names[first])} on rank {_listed(ranks)}"
                if self._mesh.size > 1
                else _tensor_text(names[first])
            )
            text = f"step {step}: {len(bad_anywhere)} tensors hold NaN or infinities, first {where}"
            self._report(
                self._settings.nan, f"{text}; no checkpoint is written of them; lower the learning rate, or clip"
            )
        elif differ:
            self._report_drift(step, tensors, words, differ, "; no checkpoint is written of them")
        return not (bad_anywhere or differ)

    def _is_bad(self, name: str, tensor: Tensor, is_weight: bool) -> bool:
        """Is a weight not finite, or another tensor NaN? Buffers may hold infinities, as masks do."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or name in self._nan_from_the_start:
            return False
        return not bool(tensor.detach().isfinite().all()) if is_weight else _has_nan(tensor)

    def _compared(self, tensors: Sequence[Tensor], words: Tensor, flags: Tensor) -> tuple[list[int], list[int]]:
        """Indices of tensors whose ``words`` differ between ranks that share them, and of those with a flag on any
        rank.

        In one exchange, and one more for each set of axes on which tensors are not whole.
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
        """Every rank's number, on all ranks."""
        table = torch.full((self._mesh.size,), torch.iinfo(torch.int64).min)
        table[self._mesh.rank] = word
        if self._mesh.size > 1:
            table = self._mesh.world.maximum(table, self._everyone, _LABEL)
        return [int(each) for each in table.tolist()]

    def overflowed(self, step: int, scale: float) -> None:
        """A step was skipped because gradients overflowed in fp16; ``scale`` is the loss's new scale."""
        if scale < LEAST_SCALE:
            text = f"step {step}: gradients overflow fp16 wherever the loss is scaled to, now by {scale:g}"
            self._report(
                self._settings.nan, f"{text}; nothing is learned; precision = 'bf16', or look for NaN in the gradients"
            )

    def _compare_weights(self, step: int) -> None:
        """Compare the model's tensors between ranks. By all ranks together."""
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
        """Report the first tensor that differs, and the ranks whose values are not those of the majority.

        By all ranks together: finding the majority takes one more exchange. Of two ranks, neither is the majority.
        """
        names = list(tensors)
        placement = placement_of(tensors[names[differ[0]]])
        where = f"(among ranks that share it; it is {', '.join(f'{kind} on {a}' for a, kind in placement.items())})"
        if not placement:
            each = self._of_each_rank(words[differ[0]])
            (usual, most), (_, second), *_ = Counter(each).most_common()
            if most > second:
                where = f"on rank {_listed([rank for rank, word in enumerate(each) if word != usual])}"
            else:
                apart = _listed(sorted({each.index(word) for word in each}))
                where = f"(ranks {apart} differ, and no majority tells which is right)"
        first = _tensor_text(names[differ[0]])
        text = f"step {step}: {len(differ)} of {len(names)} tensors differ between ranks, first {first}"
        self._report(
            self._settings.drift, f"{text} {where}{consequence}; go back to a checkpoint, and look for a faulty machine"
        )

    def _compare_times(self, step: int) -> None:
        """Warn of a rank that is far slower than the others, since all wait for it. By all ranks together."""
        own = torch.tensor(statistics.median(self._busy), dtype=torch.float64)
        times = gather_rows(self._mesh.world, own, _LABEL).tolist()
        slowest = max(range(len(times)), key=times.__getitem__)
        usual = statistics.median(seconds for rank, seconds in enumerate(times) if rank != slowest)
        if not times[slowest] > self._settings.slow * usual > 0:
            return
        if self._mesh.rank == 0:  # its output is the one that users read
            text = f"step {step}: rank {slowest} computes {times[slowest]:.3g} s a step"
            self._warn(f"{text} where the others take {usual:.3g}; all wait for it")
        elif self._mesh.rank == slowest:
            _log.warning("step %d: this is the slow rank %d, on %s", step, slowest, socket.gethostname())

    def _report(self, policy: str, text: str) -> None:
        """Raise on all ranks, or warn on rank 0, as the settings say."""
        if policy == "raise":
            raise TrainingError(text)
        if self._mesh.rank == 0:
            self._warn(text)


def fingerprints(tensors: Mapping[str, Tensor]) -> Tensor:
    """An int64 for each tensor: the sum of its bits, read as integers, with each place weighted."""
    words = [_fingerprint(unwrap(tensor).detach()) for tensor in tensors.values()]
    return torch.stack([word.cpu() for word in words]) if words else torch.zeros(0, dtype=torch.int64)


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.detach().isnan().any())


def _tensor_text(name: str) -> str:
    """A tensor's name in messages: without the prefix that checkpoints add."""
    return name.removeprefix(_MODEL)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number with well-mixed bits, as int64


def _fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that changes with any bit of the tensor, and with the order of its elements. Computed on its device."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    mixed = words * _MIX
    mixed = mixed ^ (mixed >> 32)  # without this, changes of two highest bits would cancel out
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return (mixed * (2 * places + 1)).sum()
