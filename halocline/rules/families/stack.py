"""Stacks of matrices, each needed whole: inverses, decompositions, solutions. The dims before the last two keep
their cuts.

A decomposition needs all of a matrix at once; the ranks share the work by the dims of the stack.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..recipe import WHOLE, Operand, Output, Read, Recipe, stretched
from ..table import composite, refuse, run_rule
from .pointwise import broadcast_shape
from .view import as_called, bound, operands, shapes, with_torch_names


def _matrices(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """Each matrix, of the last two dims, needs all of itself: the dims before keep their cuts."""
    given = list(operands((args, kwargs)))
    results = shapes(function, *args, **kwargs)
    batch = broadcast_shape(*(operand.shape[:-2] for operand in given))
    # Some options add or reorder dims: then no dim of the result can be told to be the stack.
    if any(result[: len(batch)] != batch for result in results):
        raise refuse(function, "its result is not a stack of matrices as its operands are", "call it on hc.gather(x)")
    reads = [Read(o, (*stretched(o.shape[:-2], batch), *[WHOLE] * min(2, o.ndim))) for o in given]
    own = tuple(range(len(batch)))
    return Recipe(
        space=batch,
        reads=tuple(reads),
        outputs=tuple(Output(result, (*own, *[None] * (len(result) - len(own)))) for result in results),
        local=as_called(function),
        runs_empty=True,
    )


def _register(function: Any) -> None:
    """Register a function of stacks of matrices; results of several parts bear torch's names."""
    describe = bound(_matrices, function)

    def run(*args: Any, **kwargs: Any) -> Any:
        return with_torch_names(function, run_rule(function, describe, args, kwargs))

    composite(function, family="stack")(run)


for _name in "inv det slogdet cholesky eigh eigvalsh svd svdvals qr pinv matrix_exp matrix_power".split():
    _register(getattr(torch.linalg, _name))
for _name in "inverse det slogdet logdet cholesky pinverse matrix_exp matrix_power".split():
    for _home in (torch, Tensor):
        _register(getattr(_home, _name))


def _solve_rule(A: Operand, B: Operand, left: bool) -> Recipe:
    return _matrices(lambda A, B, left: torch.linalg.solve(A, B, left=left), A, B, left)


@composite(torch.linalg.solve, family="stack")
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Vectors and matrices are told apart by global shapes: a tile's would be ambiguous."""
    if B.ndim == 1 or tuple(B.shape) == tuple(A.shape[:-1]):
        return solve(A, B.unsqueeze(-1), left=left).squeeze(-1)
    # A matrix for all of the stack.
    if B.ndim < A.ndim:
        B = B.expand(*A.shape[:-2], *B.shape[-2:])
    return run_rule(torch.linalg.solve, _solve_rule, (A, B, left), {})


@composite(torch.linalg.multi_dot, torch.chain_matmul, family="contract")
def multi_dot(*tensors: Any) -> Tensor:
    """Products from the left to the right."""
    return reduce(torch.matmul, list(operands(tensors, Tensor)))
