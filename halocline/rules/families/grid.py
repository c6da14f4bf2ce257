"""Sampling at positions held in a tensor. Any output may read anywhere, so the sampled tensor is brought whole.

The result is cut as the positions are. An affine grid is cut by the batch alone: within a grid nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry.access import Everything
from ..recipe import Link, Operand, Output, Read, Recipe, Work, follow
from ..table import rule
from .view import shape


def _sample_rule(function: Any, input: Operand, grid: Operand, *args: Any, **kwargs: Any) -> Recipe:
    """The result is cut as the grid is; where the grid is whole, in proportion to the sample."""
    made = shape(function, input, grid, *args, **_quick(kwargs))
    positions = follow(grid, 0, *range(2, len(made)), None)
    sample = Read(input, (Link(0), Link(1), *(Link(2 + i, Everything(n)) for i, n in enumerate(input.shape[2:]))))

    def local(work: Work, tile: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """An empty result is a real one cut down: it then has torch's dtype, and hangs on both operands."""
        result = function(_at_least_one(tile, 2), _at_least_one(grid, 1), *args, **kwargs)
        for dim, interval in enumerate(work.box[2:], 2):
            result = result.narrow(dim, 0, interval.size) if interval.empty else result
        return result

    return Recipe(space=made, reads=(positions, sample), local=local, runs_empty=True)


def _quick(given: dict[str, Any]) -> dict[str, Any]:
    """Options that ask for the same shape, without torch's warning and without its slowest way to one."""
    quick = dict(given)
    if quick.get("align_corners", False) is None:
        quick["align_corners"] = False
    if quick.get("mode") == "bicubic":
        quick["mode"] = "nearest"
    return quick


def _at_least_one(tensor: Tensor, first: int) -> Tensor:
    # torch's kernels refuse empty tensors: one made-up element takes their place.
    missing = [int(size == 0) for size in tensor.shape[first:]]
    return F.pad(tensor, [side for m in reversed(missing) for side in (0, m)]) if any(missing) else tensor


def _affine_rule(function: Any, theta: Operand, size: Sequence[int], align_corners: bool | None = None) -> Recipe:
    """One grid for each sample of the batch; within a grid nothing is cut."""
    made = shape(function, theta, size, bool(align_corners))

    def local(work: Work, theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
        batch = work.box[0].size
        theta = theta if batch else F.pad(theta, (0, 0, 0, 0, 0, 1))
        return function(theta, [max(1, batch), *size[1:]], align_corners)[:batch]

    output = Output(made, (0, *[None] * (len(made) - 1)))
    reads = (follow(theta, 0, None, None),)
    return Recipe(space=made[:1], reads=reads, outputs=(output,), local=local, runs_empty=True)


for _function in (F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d):
    rule(_function, family="grid")(partial(_sample_rule, _function))
for _affine in (F.affine_grid, torch.affine_grid_generator):
    rule(_affine, family="grid")(partial(_affine_rule, _affine))
