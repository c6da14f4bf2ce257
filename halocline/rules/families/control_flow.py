"""torch.cond and torch.while_loop whose operands are cut: the branch or the loop itself, in Python.

They come here where torch runs them uncompiled (``torch.compiler.set_stance("force_eager")``). A predicate is whole,
and every rank has the same one, so all take one path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..table import composite, refuse


@composite(torch.ops.higher_order.cond)
def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """One of two branches."""
    return (true_fn if pred else false_fn)(*operands)


@composite(torch.ops.higher_order.while_loop)
def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """A loop. As in torch, what is handed out is never an input itself."""
    carried = tuple(each.clone() if isinstance(each, Tensor) else each for each in carried_inputs)
    while cond_fn(*carried, *additional_inputs):
        made = body_fn(*carried, *additional_inputs)
        if not isinstance(made, tuple) or len(made) != len(carried):
            raise refuse(
                "torch.while_loop", "its body does not return as much as it takes", "return a tuple of as many"
            )
        carried = made
    return carried
