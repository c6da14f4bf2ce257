"""One training step. It is meant to be read, and to be copied into your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ..distribute import no_sync
from .optimizers import Optimizer
from .precision import Precision

T = TypeVar("T")
Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def training_step(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],  # several: their gradients accumulate
    loss_of: Loss,
    optimizer: Optimizer,
    precision: Precision,
    clip: float | None = None,
) -> Tensor:
    """Forward and backward of each batch, one average of gradients, one optimizer step.

    Returns the mean loss over all samples, whole on every rank and not yet read by the host. Called by all ranks
    together. ``clip`` is the largest global norm of the gradients.
    """
    optimizer.zero_grad(set_to_none=True)
    losses, samples = [], sum(len(batch["x"]) for batch in batches)
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        with nullcontext() if last else no_sync(model):
            with record_function("forward"), precision.autocast():
                loss = loss_of(model(batch["x"]), batch) * (len(batch["x"]) / samples)  # the last batch may be small
            with record_function("backward"):
                precision.scaled(loss).backward()  # gradients are averaged over all ranks meanwhile
        losses.append(loss.detach())
    if clip is not None:
        precision.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # the true norm: gradients are whole on every rank
    precision.step(optimizer)
    return torch.stack(losses).sum()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in eval mode; each layer gets its own mode back, which may be eval for good."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def exhausted(steps: Generator[Any, Any, T]) -> T:
    """What a generator returns in the end."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result
