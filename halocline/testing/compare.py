"""Compares a cut call with the same call on one rank, value and gradient: the proof that comes with every rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HaloclineError
from ..rules import gather, shard
from ..world import AVERAGED, Mesh, run_local

#: Exact means at most this, in float64.
EXACT = 1e-8

Cuts = Sequence[Mapping[int, str] | None]


def relative_error(value: Tensor, true: Tensor, scale: float = 0.0) -> float:
    """``max|a-b| / max(max|b|, 1e-6 G)``: how far a tensor is from the true one; infinite for another shape or
    dtype.

    ``scale`` is G, the largest entry of all of a network's gradients: many true gradients are zero, and what rounding
    leaves of them must not count. Integers must be equal.
    """
    if value.shape != true.shape or value.dtype != true.dtype:
        return float("inf")
    if true.numel() == 0:
        return 0.0
    if not true.dtype.is_floating_point and not true.dtype.is_complex:
        return 0.0 if torch.equal(value, true) else float("inf")
    same = (value == true) | (value.isnan() & true.isnan())
    difference = torch.where(same, torch.zeros_like(true), value - true).abs().max().item()
    finite = torch.where(true.isfinite(), true.abs(), torch.zeros_like(true.abs()))
    if math.isnan(difference):  # compares as smaller than everything, and must not pass for it
        return float("inf")
    largest = max(finite.max().item(), 1e-6 * scale)
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


@dataclass
class Comparison:
    """The result of comparing a cut call with the uncut one.

    ``verdict`` is one of: exact; wrong; refused (by the library); invalid (torch itself refuses the call on one rank).
    Bytes are those of the rank that moved, or gathered, most in forward.
    """

    verdict: str
    error: float = 0.0
    why: str = ""
    moved_bytes: int = 0
    gathered_bytes: int = 0


def check_rule(
    function: Callable[..., Any],
    *inputs: Any,
    cuts: Cuts,
    mesh: Mapping[str, int],
    points: Sequence[Mapping[int, Sequence[int]] | None] | None = None,
    tolerance: float = EXACT,
    second_order: bool = False,
) -> Comparison:
    """Run ``function(*inputs)`` whole and cut over ranks in one process; compare every output and every gradient.

        x, w = torch.randn(1, 2, 9, 9, dtype=torch.float64), torch.randn(4, 2, 3, 3, dtype=torch.float64)
        assert check_rule(F.conv2d, x, w, cuts=[{2: "rows"}, None], mesh={"rows": 3}).verdict == "exact"

    ``cuts[i]`` says how input i is cut (None: left whole). Inputs that are not tensors pass through. With
    ``second_order`` a gradient penalty on the first cut input is differentiated again. Ranks are threads: no process is
    started.
    """
    subject = next((index for index, cut in enumerate(cuts) if cut), 0)
    try:
        true = _run(function, inputs, lambda i, t: t, second_order, subject)
    except HaloclineError:
        raise
    except Exception as error:  # noqa: BLE001  whatever torch raises, the call is not valid on one rank either
        return Comparison("invalid", why=str(error))

    def on_rank() -> tuple[list[Tensor], list[Tensor | None], int, int]:
        """The call on this rank's cut inputs.

        Its outputs, gradients, and the bytes that forward has moved and gathered.
        """
        layout = Mesh(**dict(mesh))

        def place(index: int, tensor: Tensor) -> Tensor:
            cut = cuts[index] if index < len(cuts) else None
            at = points[index] if points else None
            return shard(tensor, layout, cut, points=at) if cut else tensor

        seen: list[tuple[int, int]] = []
        traffic = layout.world.traffic
        traffic.clear()
        note = lambda: seen.append((traffic.moved_bytes, traffic.gathered_bytes))  # noqa: E731
        outputs, gradients = _run(function, inputs, place, second_order, subject, note)
        return outputs, gradients, *seen[0]

    try:
        results = run_local(math.prod(mesh.values()), on_rank)
    except HaloclineError as error:
        return Comparison("refused", why=str(error))
    worst = _worst(results, *true)
    moved, gathered = (max(f[k] for f in results) for k in (2, 3))
    return Comparison("exact" if worst <= tolerance else "wrong", worst, "", moved, gathered)  # type: ignore[arg-type]


def _run(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    place: Callable[[int, Tensor], Tensor],
    second_order: bool,
    subject: int,
    after_forward: Callable[[], None] = lambda: None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs (gathered) and the gradients of a fixed random combination of them by every floating input."""
    leaves: list[Tensor] = []
    handed: list[Any] = []
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            handed.append(value)
            continue
        leaf = value.detach().clone()
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            leaf.requires_grad_()
            setattr(leaf, AVERAGED, True)  # by _worst
            leaves.append(leaf)
        handed.append(place(index, leaf))
    result = function(*handed)
    after_forward()
    outputs = [gather(r) for r in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(r, Tensor)]
    loss = _combination([o for o in outputs if o.requires_grad])
    gradients: list[Tensor | None] = [None] * len(leaves)
    if loss is not None:
        gradients = list(torch.autograd.grad(loss, leaves, create_graph=second_order, allow_unused=True))
        if second_order:
            gradients += _penalty_gradients(function, handed, leaves, subject)
    return [o.detach() for o in outputs], [None if g is None else g.detach() for g in gradients]


def _penalty_gradients(
    function: Callable[..., Any], handed: list[Any], leaves: list[Tensor], subject: int
) -> list[Tensor | None]:
    """Of the first cut input: of a whole one a rank holds a share, which only its owner may square."""
    result = function(*handed)
    result = result[0] if isinstance(result, (tuple, list)) else result
    (slope,) = torch.autograd.grad(result.square().sum(), handed[subject], create_graph=True)
    penalty = (slope.square().sum() - 1).square()
    if not penalty.requires_grad:
        return []
    return list(torch.autograd.grad(penalty, leaves, allow_unused=True))


def _combination(outputs: list[Tensor]) -> Tensor | None:
    """A fixed random combination of all outputs, real, whose gradient reaches every output."""
    total: Tensor | None = None
    generator = torch.Generator().manual_seed(17)
    for output in outputs:
        seed = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        term = (output * seed).sum()
        term = term.real if term.is_complex() else term
        total = term if total is None else total + term
    return total


def _worst(results: list[Any], outputs: list[Tensor], gradients: list[Tensor | None]) -> float:
    """The largest relative error over outputs on every rank, and over gradients averaged over the ranks (law 3).

    An output or gradient that is missing counts as infinitely wrong, unless the true one is zero.
    """
    scale = max((g.abs().max().item() for g in gradients if g is not None and g.numel()), default=0.0)
    worst = 0.0
    for rank_outputs, rank_gradients, *_ in results:
        if len(rank_outputs) != len(outputs) or len(rank_gradients) != len(gradients):
            return float("inf")
        worst = max([worst, *(relative_error(a, b) for a, b in zip(rank_outputs, outputs, strict=True))])
    for index, true in enumerate(gradients):
        parts = [rank_gradients[index] for _, rank_gradients, *_ in results]
        if true is None or any(part is None for part in parts):
            worst = max(worst, 0.0 if true is None and all(p is None for p in parts) else _unused(true, parts))
            continue
        mean = torch.stack(parts).sum(0) / len(parts)
        worst = max(worst, relative_error(mean, true, scale))
    return worst


def _unused(true: Tensor | None, parts: list[Tensor | None]) -> float:
    """None and an all-zero gradient mean the same."""
    present = [t for t in (true, *parts) if t is not None]
    return 0.0 if all(not t.any() for t in present) else float("inf")
