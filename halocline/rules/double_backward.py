"""Helpers for autograd Functions whose backward is differentiated again.

Such a Function saves its operands. When its backward runs with ``create_graph=True`` it computes the forward once more
from differentiable pieces and lets autograd derive the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Autocast(NamedTuple):
    """What autocast was when the Function ran: its backward may run under another."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """As it stands for this kind of device."""
        kind = device.type
        if kind == "meta":  # autocast does nothing there
            return cls(kind, False, torch.float32)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, it is as it was."""
        with nullcontext() if self.kind == "meta" else torch.autocast(self.kind, self.dtype, self.enabled):
            yield

    @property
    def off(self) -> Autocast:
        """The same device with autocast switched off."""
        return self._replace(enabled=False)


def in_autocast_dtype(*tensors: Tensor | None) -> list[Any]:
    """As autocast would hand them to an operator in low precision: before a Function, which saves what it gets."""
    first = tensors[0]
    autocast = Autocast.now(first.device)  # type: ignore[union-attr]
    if not autocast.enabled or first.dtype == torch.double:  # type: ignore[union-attr]
        return list(tensors)
    return [None if tensor is None else tensor.to(autocast.dtype) for tensor in tensors]


def differentiated(
    compute: Callable[..., Tensor],
    operands: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradient: Tensor,
    autocast: Autocast,
) -> tuple[Any, ...]:
    """The gradients of ``compute(*operands)`` as functions of the operands.

    Computed from aliases: the operands' own history, and hooks on them, belong to the backward that is under way.
    """
    with torch.enable_grad(), autocast.again():
        # Not the operands themselves: the backward under way would meet its own graph.
        aliases = [None if operand is None else operand.view_as(operand) for operand in operands]
        wanted = [alias for alias, flag in zip(aliases, needed, strict=True) if flag and alias is not None]
        gradients = iter(torch.autograd.grad(compute(*aliases), wanted, gradient, create_graph=True))
    pairs = zip(aliases, needed, strict=True)
    return tuple(next(gradients) if flag and alias is not None else None for alias, flag in pairs)
