"""Random small programs: layers, gates, writes in place, checkpoints, penalties, and shapes that leave tiles empty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

Step = Callable[[Tensor], Tensor]
CHANNELS = 4


class Gate(nn.Module):
    """Squeeze and excite: a whole intermediate result scales a cut one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.inner(x.mean(tuple(range(2, x.ndim)))))
        return x * gate.reshape(*gate.shape, *[1] * (x.ndim - 2))


class Do(nn.Module):
    """A step without parameters, that prints as its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.step: Step = eval(f"lambda x: {text}", {"torch": torch, "F": F})

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def extra_repr(self) -> str:
        return self.text


class Write(nn.Module):
    """A statement that changes ``y``, a new tensor."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.code = text, compile(text, "<write>", "exec")

    def forward(self, x: Tensor) -> Tensor:
        names: dict[str, Any] = {"y": x * 1, "torch": torch, "F": F}
        exec(self.code, names)
        return names["y"]

    def extra_repr(self) -> str:
        return self.text


STEPS = """
x.contiguous() | x.contiguous().sin() | x.transpose(-1, -2).contiguous().transpose(-1, -2)
x.flatten(1).reshape(x.shape) | x[..., 1:] if x.shape[-1] > 2 else x | x[:, :, :-1] if x.shape[2] > 2 else x
x.flip(2) | x.roll(1, 2) | x - x.mean() | x / (x.abs().amax() + 1) | x.softmax(1) | x + x.mean(2, keepdim=True)
x * x.std(dim=1, keepdim=True)
torch.cat([x, x.sin()], 1)[:, ::2] | torch.where(x > 0, x, 0.1 * x) | F.pad(x, (1, 0, 0, 1)) | x.cumsum(2) * 0.1
F.interpolate(x, scale_factor=2) | F.avg_pool2d(x, 3, 1, 1) if x.ndim == 4 else x.tanh()
x.to(memory_format=torch.preserve_format) | F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2) if x.ndim == 4 else x.exp().log1p()
torch.stack([x, x.tanh()]).sum(0)
""".replace("\n", " | ").split(" | ")
WRITES = """
y[:, :, 0] += 1 | y[:, 0] *= 2 | y[y > 0] *= 2 | y[:, :, ::2] *= 0.5 | y[:, :, -1] = 0 | y.relu_() | y.mul_(2).add_(1)
y[:, :, 0] *= y[:, :, -1].clone()
y.contiguous().mul_(2) | y.flatten(2).mul_(2) | y[:, :, 1:].tanh_() | y.select(2, 0).mul_(3)
y.clamp_(-1, 1) | y.masked_fill_(y < -1, 0.5) | y[:, 1:3] = y[:, :2].clone() | y.transpose(2, 3).mul_(2)
""".replace("\n", " | ").split(" | ")


def layer(draw: Random, spatial: int) -> nn.Module:
    c = CHANNELS
    conv: Any = (nn.Conv2d, nn.Conv3d)[spatial - 2]
    back: Any = (nn.ConvTranspose2d, nn.ConvTranspose3d)[spatial - 2]
    batch: Any = (nn.BatchNorm2d, nn.BatchNorm3d)[spatial - 2]
    instance: Any = (nn.InstanceNorm2d, nn.InstanceNorm3d)[spatial - 2]
    largest: Any = (nn.MaxPool2d, nn.MaxPool3d)[spatial - 2]
    mean: Any = (nn.AvgPool2d, nn.AvgPool3d)[spatial - 2]
    made = [
        lambda: conv(c, c, 3, padding=1),
        lambda: conv(c, c, draw.choice((1, 2, 3, 5)), draw.choice((1, 2)), draw.choice((0, 1, 2))),
        lambda: conv(c, c, 3, padding=1, groups=draw.choice((1, c)), padding_mode=draw.choice(("zeros", "replicate"))),
        lambda: back(c, c, draw.choice((2, 3)), draw.choice((1, 2)), draw.choice((0, 1))),
        lambda: batch(c, eps=0.1),
        lambda: instance(c, affine=True, eps=0.1),
        lambda: nn.GroupNorm(2, c, eps=0.1),
        lambda: largest(2),
        lambda: mean(2, ceil_mode=True),
        lambda: largest(3, 2, 1),
        lambda: nn.ReLU(inplace=draw.random() < 0.5),
        lambda: nn.GELU(),
        lambda: nn.LeakyReLU(0.1, inplace=draw.random() < 0.5),
        Gate,
        lambda: Do(draw.choice([step for step in STEPS if step.strip()])),
        lambda: Do(draw.choice([step for step in STEPS if step.strip()])),
        lambda: Write(draw.choice([step for step in WRITES if step.strip()])),
        lambda: Write(draw.choice([step for step in WRITES if step.strip()])),
    ]
    return draw.choice(made)()


@dataclass
class Program:
    seed: int

    def __post_init__(self) -> None:
        draw = Random(self.seed)
        spatial = draw.choice((2, 2, 3))
        self.batch = draw.choice((1, 1, 2, 3))
        sizes = [draw.choice((1, 2, 3, 5, 8, 13)), *(draw.choice((2, 4, 7)) for _ in range(spatial - 1))]
        self.shape = (self.batch, CHANNELS, *sizes)
        self.last = draw.random() < 0.5
        torch.manual_seed(self.seed)
        blocks = [nn.Sequential(*(layer(draw, spatial) for _ in range(draw.choice((1, 2, 3))))) for _ in range(2)]
        self.model = nn.Sequential(*blocks).double()
        self.mode = draw.choice(("plain", "plain", "checkpoint", "reentrant", "penalty", "checkpointed penalty"))
        if self.mode == "checkpointed penalty" and any(isinstance(m, Write) for m in self.model.modules()):
            self.mode = "penalty"  # torch's checkpoints cannot be differentiated twice through writes in place
        ranks = draw.choice((2, 2, 3, 4))
        self.mesh, self.cut = {"a": ranks}, {draw.choice((2, 2, 2, 3)): "a"}
        if ranks == 2 and draw.random() < 0.3:
            self.mesh, self.cut = {"a": 2, "b": 2}, {**self.cut, 0: "b"}

    def __str__(self) -> str:
        form = "channels last" if self.last else "contiguous"
        return f"program {self.seed}: {self.model} on {self.shape} {form}, {self.mode}, cut {self.cut} over {self.mesh}"

    @property
    def torch_is_wrong(self) -> bool:
        """torch's own instance norm gives wrong gradients for one sample with channels last on the CPU."""
        return self.batch == 1 and self.last and any("InstanceNorm" in type(m).__name__ for m in self.model.modules())

    @property
    def known_limit(self) -> bool:
        """A second derivative through a view that is written in place: torch loses its graph where a tile is empty.

        Ranks that have elements then wait for one that has none, until the deadline.
        """
        if "penalty" not in self.mode:
            return False
        views = any(isinstance(m, Do | Write) and "[" in m.text for m in self.model.modules())
        return views and any(getattr(m, "inplace", False) or isinstance(m, Write) for m in self.model.modules())

    def run(self, mesh: hc.Mesh | None, nudge: float = 0.0) -> list[Tensor]:
        """Output, running statistics, gradients of the input and of every parameter."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64) * (1 + nudge)
        form = (torch.channels_last, torch.channels_last_3d)[len(self.shape) - 4] if self.last else None
        x = (x if form is None else x.contiguous(memory_format=form)).requires_grad_()
        model = _copy(self.model)
        if nudge:  # a bias breaks ties that any input has, as of the two elements of a norm
            for parameter in model.parameters():
                parameter.data += nudge * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if form is not None:
            model.to(memory_format=form)  # type: ignore[call-overload]
        if mesh is not None:
            model = hc.distribute(model, mesh)
        made = self._result(model, hc.shard(x, mesh, self.cut) if mesh is not None else x)
        # How often torch recomputes for a second derivative shows in running statistics, and is not ours to say.
        buffers = [] if self.mode == "checkpointed penalty" else [b.detach() for b in model.buffers()]
        found = [hc.gather(made.detach()), *buffers]
        return [*found, *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *model.parameters()))]

    def _result(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.mode == "reentrant":
            y = checkpoint(model[1], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)
        elif "checkpoint" in self.mode:
            y = checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)
        else:
            y = model(x)
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)
        if "penalty" in self.mode:
            (slope,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
            ((slope.square().sum() + 1e-3).sqrt() - 1).square().backward()
        else:
            (y * weights).sum().backward()
        return y


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def verdict(program: Program, deadline: float = 20.0) -> str:
    """exact, refused: why, invalid (torch refuses it on one rank), wrong: by how much, or what was raised."""
    if program.torch_is_wrong or program.known_limit:
        return "invalid"
    try:
        true, near = program.run(None), program.run(None, 1e-12)
    except Exception:  # noqa: BLE001  whatever torch raises, the program makes no sense on one rank either
        return "invalid"
    if any(value.isnan().any() for value in true) or _worst([near], true) > 1e-6:
        return "invalid"  # rounding decides, as where a mean of zero meets a relu
    ranks = 1
    for size in program.mesh.values():
        ranks *= size
    try:
        found = run_local(ranks, lambda: program.run(hc.Mesh(**program.mesh)), deadline=deadline)
    except hc.Refused as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001
        return f"raised: {type(error).__name__}: {error}"
    worst = _worst(found, true)
    return "exact" if worst < 1e-7 else f"wrong: {worst:.2g}"


def _worst(found: list[list[Tensor]], true: list[Tensor]) -> float:
    """Before a norm a bias has a gradient of rounding alone, from sums as large as those of the others."""
    scale = 1e3 * max(float(value.abs().max()) for value in true if value.numel())
    return max(relative_error(a, b, scale) for rank in found for a, b in zip(rank, true, strict=True))
