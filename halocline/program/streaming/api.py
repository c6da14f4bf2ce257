"""``hc.stream``: a model whose forward and backward go through the device in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import MeshError, Refused
from ...random.state import current
from ...sizes import bytes_from
from ...tensor import ShardedTensor
from ...tree import tensors_in
from .operations import Trace, fill
from .search import Layout, choose_layout
from .segments import Streamed
from .trace import trace

Model = TypeVar("Model", bound=nn.Module)


def stream(model: Model, memory: str | int) -> Model:
    """The same module, whose training step takes at most ``memory`` beside weights, inputs and outputs.

        model = hc.stream(Net(), memory="20GiB")
        loss = criterion(model(x), y)          # x is a whole sample on one device
        loss.backward()

    Each forward is recorded on shapes first. Its operations run in segments, and each segment in tiles of the sample;
    only what lies between segments is kept, and backward computes each tile again. Values and gradients are those of
    the model itself. Norms take statistics of the whole sample; random functions draw by global index, as inside
    ``hc.random.reproducible``. The log says what was chosen and how much is computed again.

    A forward that needs values of the sample to go on (``.item()``, a branch on data), a second derivative, and a
    limit that no choice of segments and tiles meets are refused. ``hc.stream`` is for one device; it takes no mesh.
    """
    if not isinstance(model, nn.Module):
        raise MeshError(f"hc.stream takes a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model.__dict__.get("forward"), StreamedForward):
        raise MeshError(f"this {type(model).__name__} is streamed already; call hc.stream once")
    model.__dict__["forward"] = StreamedForward(model, model.forward, bytes_from("memory", memory))
    return model


class StreamedForward:
    """Stands in the place of a module's forward."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], limit: int) -> None:
        self._model, self._forward, self.limit = model, forward, limit
        self._layouts: dict[Any, Layout] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the forward on shapes, choose segments and tiles, and run it in them."""
        if not tensors_in((args, kwargs)):
            return self._forward(*args, **kwargs)
        if any(isinstance(tensor, ShardedTensor) for tensor in tensors_in((args, kwargs))):
            raise MeshError("hc.stream is for one device: a streamed model takes whole tensors, not cut ones")
        recorded = trace(self._model, self._forward, args, kwargs)
        for _ in range(recorded.draws):  # the numbers that this forward draws are used up
            current().next_call()
        training = torch.is_grad_enabled() and any(recorded.values[v].requires_grad for v in recorded.outputs)
        step = Streamed(recorded, self.layout(recorded, training).segments)
        if not training:
            return _answer(recorded, step.forward(for_backward=False))
        sources = [n for n, v in enumerate(recorded.values) if v.outside is not None and v.requires_grad]
        tensors = [recorded.values[number].outside for number in sources]
        outputs = StreamedStep.apply(step, sources, *tensors)
        return _answer(recorded, list(outputs))

    def layout(self, recorded: Trace, training: bool) -> Layout:
        """Segments and tiles for such a trace, chosen once."""
        key = (recorded.key(), training)
        if key not in self._layouts:
            self._layouts[key] = choose_layout(recorded, self.limit, training)
        return self._layouts[key]


def _answer(recorded: Trace, outputs: list[Tensor]) -> Any:
    """The model's answer again, with tensors in the places of references."""
    by_value = dict(zip(recorded.outputs, outputs, strict=True))

    return fill(recorded.answer, by_value)


class StreamedStep(torch.autograd.Function):
    """The forward of a streamed model as one node, whose inputs are the sample and the weights."""

    @staticmethod
    def forward(ctx: Any, step: Streamed, sources: list[int], *tensors: Tensor):  # type: ignore[no-untyped-def]
        """The outputs of the model. ``tensors`` are those values of ``sources`` that require a gradient."""
        ctx.step, ctx.sources = step, sources
        ctx.save_for_backward(*tensors)  # so that torch notices a weight that is changed before backward
        outputs = step.forward(for_backward=True)
        constant = [
            o for v, o in zip(step.trace.outputs, outputs, strict=True) if not step.trace.values[v].requires_grad
        ]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[no-untyped-def]
        """Every tile again, under autograd. A second derivative is refused."""
        if torch.is_grad_enabled():
            raise Refused(
                "backward",
                "hc.stream",
                "a second derivative is asked for, and a streamed step computes the first only",
                "differentiate the model itself, without hc.stream",
            )
        if not ctx.step.kept and not ctx.step.outside:
            raise RuntimeError("Trying to backward through a streamed step a second time: its values are freed")
        _ = ctx.saved_tensors
        return None, None, *ctx.step.backward(gradients, ctx.sources)
