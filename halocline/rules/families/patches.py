"""Patches laid out in a row, and put back: F.unfold and F.fold. Patches follow the pixels at which they begin.

torch's result has one dim for all patches, rows before columns. For the work it is split into both, and merged again
after it, so that rows and columns of patches can be cut as the pixels are.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...geometry import Transposed, Window
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, pair
from ..table import composite, run_rule
from .view import local_shape, shape

Pair = tuple[int, ...]


def _counts(size: Pair, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Pair:
    """How many patches begin along each of the two dims."""
    dims = zip(size, kernel, dilation, padding, stride, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in dims)


def _unfold_rule(input: Operand, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Recipe:
    """(batch, channels, rows, columns) -> (batch, channels, places in a patch, patches down, patches across)."""
    shape(F.unfold, input, kernel, dilation, padding, stride)
    batch, channels, *size = input.shape
    counts = _counts(tuple(size), kernel, dilation, padding, stride)
    space = (batch, channels, prod(kernel), *counts)
    windows = [Link(3 + i, Window(kernel[i], stride[i], dilation[i], padding[i]), 0.0) for i in range(2)]

    def local(work: Work, tile: Tensor, *_: Any) -> Tensor:
        # Along a cut dim the zeros outside the sample came with the halo.
        inner = tuple(padding[i] if work.native(input, 2 + i) else 0 for i in range(2))
        return F.unfold(tile, kernel, dilation, inner, stride).reshape(local_shape(work))

    return Recipe(
        space=space,
        reads=(Read(input, (Link(0), Link(1), *windows)),),
        outputs=(Output(space, (0, 1, None, 3, 4)),),
        local=local,
    )


@composite(F.unfold, family="patches")
def unfold(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Rows of patches are merged with those across: where rows are cut, the merged dim is."""
    if input.ndim == 3:
        return unfold(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    options = tuple(pair(value, 2) for value in (kernel_size, dilation, padding, stride))
    return run_rule(F.unfold, _unfold_rule, (input, *options), {}).flatten(1, 2).flatten(2)


def _fold_rule(input: Operand, size: Pair, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Recipe:
    """The other way: a pixel is the sum of the patches that reach it."""
    space = (*input.shape[:2], *size)
    reach = [Transposed(kernel[i], stride[i], dilation[i], padding[i]) for i in range(2)]
    windows = [Link(2 + i, access) for i, access in enumerate(reach)]

    def local(work: Work, tile: Tensor, *_: Any) -> Tensor:
        """torch's fold of the patches at hand, trimmed or extended to this rank's pixels."""
        batch, channels, places, *counts = tile.shape
        if 0 in counts:  # pixels that no patch reaches
            return tile.new_zeros(local_shape(work)) + tile.sum()
        native = [work.native(input, 3 + i) for i in range(2)]
        full = tuple(size[i] if native[i] else (counts[i] - 1) * stride[i] + reach[i].reach + 1 for i in range(2))
        inner = tuple(padding[i] if native[i] else 0 for i in range(2))
        rows = tile.reshape(batch, channels * places, prod(counts))
        result = F.fold(rows, full, kernel, dilation, inner, stride)
        return F.pad(result, [side for i in (1, 0) for side in ((0, 0) if native[i] else _margins(work, i))])

    def _margins(work: Work, i: int) -> Pair:
        """How far what the patches reach goes beyond this rank's pixels (negative), or falls short of them."""
        (need,), wanted = work.slots[input.index][3 + i].needs, work.box[2 + i]
        first = stride[i] * need.lo - padding[i]
        last = stride[i] * (need.hi - 1) - padding[i] + reach[i].reach + 1
        return first - wanted.lo, wanted.hi - last

    return Recipe(space=space, reads=(Read(input, (Link(0), Link(1), WHOLE, *windows)),), local=local)


@composite(F.fold, family="patches")
def fold(
    input: Tensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """Each pixel fetches the patches that reach it."""
    if input.ndim == 2:
        return fold(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    size, *options = (pair(value, 2) for value in (output_size, kernel_size, dilation, padding, stride))
    shape(F.fold, input, size, *options)  # torch's own error for sizes that do not fit
    counts = _counts(size, *options)
    # Rows and columns of patches apart, so that each can be cut.
    split = input.unflatten(2, counts).unflatten(1, (-1, prod(options[0])))
    return run_rule(F.fold, _fold_rule, (split, size, *options), {})
