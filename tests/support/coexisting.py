"""One program on one rank and on cut tensors, whose outcomes must agree: shared by the tests of coexistence."""

import copy
import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

MESHES = [{"data": 2, "height": 2}, {"height": 3}]
INPUT, TARGET = {0: "data", 2: "height"}, {0: "data", 1: "height"}


class Network(nn.Module):
    """A small U-Net; nothing in place, which torch forbids behind modules with backward hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Tanh())
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.norm(self.first(x)))
        return self.last(torch.cat([high, self.up(self.deep(self.pool(high)))], 1))


@functools.cache
def _sample() -> tuple[Network, Tensor, Tensor]:
    torch.manual_seed(5)
    x = torch.randn(2, 2, 12, 6, dtype=torch.float64)
    return Network().double(), x, torch.randint(0, 3, (2, 12, 6))


def sample() -> tuple[Network, Tensor, Tensor]:
    """Drawn once: ranks in one process share torch's random stream."""
    model, x, y = _sample()
    return copy.deepcopy(model), x.clone(), y


Run = Callable[[Network, Tensor, Tensor], Mapping[str, Tensor] | None]


def outcome(run: Run, model: Network, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What ``run`` returns, the parameters and their gradients, the buffers, and the input's gradient."""
    found = dict(run(model, x, y) or {})
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"state {name}": value for name, value in model.state_dict().items()}
    if x.requires_grad and x.grad is not None:
        found["gradient of x"] = x.grad
    return found


def cut_outcome(run: Run, sizes: Mapping[str, int], dims: Mapping[int, str] = INPUT) -> list[dict[str, Tensor]]:
    def body() -> dict[str, Tensor]:
        mesh, (model, x, y) = hc.Mesh(**sizes), sample()
        mine = {dim: axis for dim, axis in dims.items() if axis in sizes}
        cut = hc.shard(x, mesh, mine), hc.shard(y, mesh, {max(0, dim - 1): axis for dim, axis in mine.items()})
        found = outcome(run, hc.distribute(model, mesh), *cut)
        return {name: hc.gather(value).detach() for name, value in found.items()}

    return run_local(math.prod(sizes.values()), body)


def agree(run: Run, sizes: Mapping[str, int], dims: Mapping[int, str] = INPUT, tolerance: float = 1e-9) -> None:
    """``run`` gives the same on cut tensors as on one rank."""
    true = outcome(run, *sample())
    scale = max(value.abs().max().item() for value in true.values() if value.is_floating_point())
    for found in cut_outcome(run, sizes, dims):
        assert found.keys() == true.keys()
        for name, value in true.items():
            assert relative_error(found[name], value.detach(), scale) < tolerance, name


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def on_ranks(function: Callable[[hc.Mesh, Tensor], object], ranks: int = 2) -> list[object]:
    """``function(mesh, x)`` on ranks in this process; x is 1 x 2 x 8 x 4, cut along its height."""

    def body() -> object:
        mesh = hc.Mesh(height=ranks)
        return function(mesh, hc.shard(torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4), mesh, {2: "height"}))

    return run_local(ranks, body)
