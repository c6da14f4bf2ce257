"""Parameter gradients averaged over all ranks when backward ends: law 3's last step, behind one small interface."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .._torch_private import after_backward, backward_number, is_captured
from ..world import AVERAGED, Label, Route, Sum, World

_BUCKET_BYTES = 25 << 20
_MOST_NESTED = 64  # passes inside each other


class GradientAverage:
    """Watches the gradients of a model's parameters; after each backward they are the mean over all ranks.

    ``autograd.grad`` of a parameter gives the mean too: what a rank holds of a whole value's gradient is its share.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], world: World) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.world, self.everyone = world, tuple(range(world.size))
        self.active = True
        world.engines += 1
        self._name = f"gradient average {world.engines}"  # ranks that average different models must not mix them up
        self._touched: dict[int, set[int]] = {}  # by backward pass: one that failed leaves no trace on the next
        self._pile: set[int] = set()
        for index, parameter in enumerate(self.parameters):
            self._watch(index, parameter)

    def _watch(self, index: int, parameter: Tensor) -> None:
        alive = weakref.ref(self)  # hooks live as long as the parameter, and must not keep the model alive

        def arrived(leaf: Tensor) -> None:
            engine = alive()
            if engine is not None:
                engine._arrived(index)

        def handed_out(gradient: Tensor) -> Tensor | None:
            engine = alive()
            # Asked anew each time: a change of dtype or device gives the leaf another node.
            if engine is None or not is_captured(get_gradient_edge(engine.parameters[index]).node):
                return None
            return engine.mean(gradient, engine.names[index])

        setattr(parameter, AVERAGED, True)
        parameter.register_post_accumulate_grad_hook(arrived)
        parameter.register_hook(handed_out)

    def _arrived(self, index: int) -> None:
        task = backward_number()
        if task not in self._touched:
            self._touched[task] = set()
            after_backward(lambda: self._finish(task))
        self._touched[task].add(index)

    def __deepcopy__(self, memo: object) -> None:
        """A copied or loaded model (a moving average of the weights, say) has parameters that nobody watches."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def mean(self, gradient: Tensor, name: str) -> Tensor:
        """Differentiable: the mean of whole values is its own adjoint."""
        share = 1.0 / self.world.size
        route = Route(self.world, self.everyone, Label(f"{self._name} of {name}", "autograd.grad", "gradients"))
        return Sum.apply(gradient, route, (share, share))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients pile up on each rank; the next backward outside averages the pile."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def _finish(self, task: int) -> None:
        self._pile |= self._touched.pop(task, set())
        # What is left belongs to passes that failed, or to those inside which this one ran (reentrant checkpoints).
        while len(self._touched) > _MOST_NESTED:
            del self._touched[next(iter(self._touched))]
        if not self.active:
            return
        touched, self._pile = self._pile, set()
        for bucket in self._buckets(self._agree(touched)):
            self._average(bucket)

    def _agree(self, touched: set[int]) -> list[int]:
        """Parameters that got a gradient on any rank, in one small message."""
        mine = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")
        mine[list(touched)] = 1
        label = Label(f"{self._name}: which came", "backward", "gradients")
        return torch.nonzero(self.world.maximum(mine, self.everyone, label)).flatten().tolist()

    def _buckets(self, indices: list[int]) -> Iterator[list[Tensor]]:
        """Consecutive parameters of one dtype and device, up to a size that fills the wire."""
        bucket: list[Tensor] = []
        filled = 0
        for index in indices:
            parameter = self.parameters[index]
            other = bucket and (bucket[0].dtype, bucket[0].device) != (parameter.dtype, parameter.device)
            if bucket and (other or filled >= _BUCKET_BYTES):
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += parameter.numel() * parameter.element_size()
        if bucket:
            yield bucket

    def _average(self, bucket: list[Tensor]) -> None:
        gradients = [_dense(p) for p in bucket]
        if any(g.requires_grad for g in gradients):  # backward(create_graph=True): the average is part of the graph
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = self.mean(gradient, "a parameter")
            return
        flat = torch.cat([g.reshape(-1) for g in gradients]) if len(gradients) > 1 else gradients[0].reshape(-1)
        label = Label(self._name, "backward", "gradients")
        total = self.world.sum(flat, self.everyone, label) / self.world.size
        at = 0
        for parameter, gradient in zip(bucket, gradients, strict=True):
            gradient.copy_(total[at : at + gradient.numel()].view_as(gradient))
            parameter.grad = gradient
            at += gradient.numel()


def _dense(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def same_weights(tensors: list[Tensor], world: World) -> None:
    """Give every rank the values that rank 0 has."""
    everyone = tuple(range(world.size))
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for same in by_kind.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            values = world.broadcast(flat, everyone, Label("rank 0's weights", "distribute"))
            for tensor, part in zip(same, values.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))
