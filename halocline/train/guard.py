"""What is watched while a run goes on: losses that are no numbers, weights that drift apart, ranks that are slow."""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import HaloclineError
from ..world import Label, Mesh
from .settings import GuardSettings

_log = logging.getLogger("halocline.train")
#: Of the loss in fp16. It is halved at every overflow: below this, some forty steps in a row have been left out.
LEAST_SCALE = 2.0**-24
_LABEL = Label("guard", "the training loop", "control")


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

    def look(self, step: int, loss: float, busy: float) -> None:
        """After each step: its loss, and the seconds that this rank computed in it."""
        if not math.isfinite(loss):
            self._report(self._settings.nan, f"step {step}: the loss is {loss}; lower the learning rate, or clip")
        self._busy.append(busy)
        if self._mesh.size > 1 and self._settings.drift_every and (step + 1) % self._settings.drift_every == 0:
            self._compare_weights(step)
            self._compare_times(step)

    def finite_weights(self, step: int) -> bool:
        """May these weights be kept? A gradient that was no number shows in the loss of the next step only."""
        bad = [name for name, weight in self._model.named_parameters() if not bool(weight.detach().isfinite().all())]
        found = torch.tensor([float(len(bad))])
        if self._mesh.size > 1:
            found = self._mesh.world.maximum(found, self._everyone, _LABEL)
        if not found.item():
            return True
        first = f", first {bad[0]}" if bad else ""
        text = (
            f"step {step}: {found.item():.0f} weights hold NaN or infinities{first}; no checkpoint is written of them"
        )
        self._report(self._settings.nan, f"{text}; lower the learning rate, or clip")
        return False

    def overflowed(self, step: int, scale: float) -> None:
        """After a step that was left out, since gradients overflowed in fp16; ``scale`` of the loss is now this."""
        if scale < LEAST_SCALE:
            text = f"step {step}: gradients overflow fp16 wherever the loss is scaled to, now by {scale:g}"
            self._report(
                self._settings.nan, f"{text}; nothing is learned; precision = 'bf16', or look for NaN in the gradients"
            )

    def _compare_weights(self, step: int) -> None:
        names, words = fingerprints(self._model)
        # The least is the complement of the complements' greatest; a negative of the smallest number there is not.
        most = self._mesh.world.maximum(torch.cat([words, ~words]), self._everyone, _LABEL)
        differ = torch.nonzero(most[: len(names)] != ~most[len(names) :]).flatten().tolist()
        if differ:
            text = f"step {step}: {len(differ)} of {len(names)} weights differ between ranks, first {names[differ[0]]}"
            self._report(self._settings.drift, f"{text}; go back to a checkpoint, and look for a faulty machine")

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


def fingerprints(model: nn.Module) -> tuple[list[str], Tensor]:
    """A number for each weight and buffer: the sum of its bits, read as whole numbers, with each place weighted."""
    tensors = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    words = [_fingerprint(tensor.detach()) for tensor in tensors.values()]
    return list(tensors), torch.stack(words).cpu() if words else torch.zeros(0, dtype=torch.int64)


_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, its bits as good as random


def _fingerprint(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    mixed = words * _MIX
    mixed = mixed ^ (mixed >> 32)  # or two highest bits that change would cancel out
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return (mixed * (2 * places + 1)).sum()
