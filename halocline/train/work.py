"""Floating-point operations of a run's steps: counted once, in the first step, by the formulas that plans use."""

from __future__ import annotations

from typing import Any

import torch

from .._torch_private import TorchDispatchMode
from ..program.work import FORMULAS
from ..world import Label, World

_LABEL = Label("work of a step", "training", "control")


class _WorkMode(TorchDispatchMode):
    """Adds up the work of convolutions and products, of backward too, on this rank's local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = FORMULAS.get(function)
        if formula is not None:
            self.flops += formula(args, result)
        return result


class StepWork:
    """A context round every step: the first is counted on every rank, and the sum over ranks holds for all steps.

    Halos that ranks compute twice count twice. Entered and left by all ranks together.
    """

    def __init__(self, world: World) -> None:
        self.flops: float | None = None  # of one step, over all ranks
        self._world = world
        self._counting: _WorkMode | None = None

    def __enter__(self) -> None:
        if self.flops is None:
            self._counting = _WorkMode()
            self._counting.__enter__()

    def __exit__(self, *error: Any) -> None:
        counting, self._counting = self._counting, None
        if counting is None:
            return
        counting.__exit__(*error)
        if error[0] is None:
            everyone = tuple(range(self._world.size))
            mine = torch.tensor([counting.flops], dtype=torch.float64)
            self.flops = float(self._world.sum(mine, everyone, _LABEL)) if self._world.size > 1 else counting.flops

    def rates(self, seconds: float, waited: float) -> dict[str, float]:
        """FLOP/s of all ranks: over the whole step, and over the part of it in which this rank did not wait."""
        if not self.flops:
            return {}
        computing = max(1e-9, seconds - waited)
        return {"flops_per_second": self.flops / max(1e-9, seconds), "peak_flops_per_second": self.flops / computing}
