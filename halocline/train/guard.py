"""What is watched while a run goes on: losses that are no numbers, weights that drift apart, ranks that are slow."""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections import deque

import torch
from torch import Tensor, nn

from ..errors import HaloclineError
from ..world import Label, Mesh
from .settings import GuardSettings

_log = logging.getLogger("halocline.train")
_LABEL = Label("guard", "the training loop", "control")


class TrainingError(HaloclineError, RuntimeError):
    """Training went wrong in a way that going on would not mend."""


class Guard:
    """All its exchanges are made by all ranks at the same steps, and what it raises is raised by all."""

    def __init__(self, settings: GuardSettings, model: nn.Module, mesh: Mesh) -> None:
        self._settings, self._model, self._mesh = settings, model, mesh
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

    def _compare_weights(self, step: int) -> None:
        names, words = fingerprints(self._model)
        most = self._mesh.world.maximum(torch.cat([words, -words]), self._everyone, _LABEL)
        differ = torch.nonzero(most[: len(names)] != -most[len(names) :]).flatten().tolist()
        if differ:
            text = f"step {step}: {len(differ)} of {len(names)} weights differ between ranks, first {names[differ[0]]}"
            self._report(self._settings.drift, f"{text}; go back to a checkpoint, and look for a faulty machine")

    def _compare_times(self, step: int) -> None:
        """A rank far slower than the rest holds all of them up; it is named once for each look."""
        table = torch.zeros(self._mesh.size, dtype=torch.float64)
        table[self._mesh.rank] = statistics.median(self._busy)
        times = self._mesh.world.maximum(table, self._everyone, _LABEL).tolist()
        slowest, usual = max(range(len(times)), key=times.__getitem__), statistics.median(times)
        if usual > 0 and times[slowest] > self._settings.slow * usual and slowest == self._mesh.rank:
            _log.warning(
                "rank %d on %s computes %.3f s a step where the others take %.3f", slowest, socket.gethostname(),
                times[slowest], usual,
            )  # fmt: skip

    def _report(self, policy: str, text: str) -> None:
        if policy == "raise":
            raise TrainingError(text)
        if self._mesh.rank == 0:
            _log.warning("%s", text)


def fingerprints(model: nn.Module) -> tuple[list[str], Tensor]:
    """A number for each weight and buffer: the sum of its bits, read as whole numbers, with each place weighted."""
    names, words = [], []
    for name, tensor in model.state_dict().items():
        names.append(name)
        words.append(_fingerprint(tensor.detach()))
    return names, torch.stack(words).cpu() if words else torch.zeros(0, dtype=torch.int64)


def _fingerprint(tensor: Tensor) -> Tensor:
    data = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    flat = data.flatten()
    pad = -flat.numel() % 8
    words = torch.nn.functional.pad(flat, (0, pad)).view(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return (words * (2 * places + 1)).sum() >> 2  # a spare bit or two: the negative must not overflow
