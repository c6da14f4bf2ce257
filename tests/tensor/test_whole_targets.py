"""Cut values written in place into plain tensors: the tensor that the caller holds has the result, and its gradient."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

KIND = {"dtype": torch.float64}
SHAPE = (2, 3, 8, 5)
CUTS = [
    ({"rows": 2}, {2: "rows"}),
    ({"data": 2, "rows": 3}, {0: "data", 2: "rows"}),
    ({"channels": 2}, {1: "channels"}),
]


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """As MONAI has it."""
    shape = list(labels.shape)
    shape[1] = classes
    target = torch.zeros(size=shape, **KIND)
    return target.scatter_(dim=1, index=labels.long(), value=1)


def dice(x: Tensor) -> Tensor:
    target = one_hot(x.detach().abs().argmax(1, keepdim=True), 3)
    overlap, both = (x * target).sum((2, 3)), (x + target).sum((2, 3))
    return 1 - (2 * overlap + 1) / (both.abs() + 1)


def kept(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], list[Tensor]]:
    """The target itself after the write, and something computed with it and the cut tensor."""

    def run(x: Tensor) -> list[Tensor]:
        target = torch.linspace(0, 1, x.numel(), **KIND).reshape(x.shape)
        write(target, x)
        return [target, target * x.cos()]

    return run


def masked(target: Tensor, x: Tensor) -> None:
    target[x > 0] = 0.5


def part(target: Tensor, x: Tensor) -> None:
    target[:, 1:, ::2] = x[:, :2, 4:]


def added_part(target: Tensor, x: Tensor) -> None:
    target[:, :, 1:5] += x[:, :, 3:7]


def running(x: Tensor) -> Tensor:
    """Statistics by channel, that a module keeps."""
    mean = torch.zeros(3, **KIND)
    mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
    mean.copy_(x[0, :, 0, 0])
    return mean


INDEX = torch.tensor([2, 0])
WRITES: dict[str, Callable[[Tensor], Tensor | list[Tensor]]] = {
    "copy_": kept(lambda target, x: target.copy_(x)),
    "add_": kept(lambda target, x: target.add_(x, alpha=2)),
    "+=": kept(lambda target, x: target.__iadd__(x)),
    "lerp_": kept(lambda target, x: target.lerp_(x, 0.3)),
    "addcmul_": kept(lambda target, x: target.addcmul_(x, x)),
    "masked_fill_": kept(lambda target, x: target.masked_fill_(x > 0, 2.0)),
    "a view": kept(lambda target, x: target[:, 1].mul_(x[:, 0])),
    "all": kept(lambda target, x: target.__setitem__(..., x)),
    "part": kept(part),
    "added part": kept(added_part),
    "mask": kept(masked),
    "scatter_": kept(lambda target, x: target.scatter_(1, (x > 0).long(), x)),
    "scatter_add_": kept(lambda target, x: target.scatter_add_(1, (x > 0).long(), x)),
    "index_copy_": kept(lambda target, x: target.index_copy_(1, INDEX, x[:, :2])),
    "index_add_": kept(lambda target, x: target.index_add_(1, INDEX, x[:, :2])),
    "index_put_": kept(lambda target, x: target.index_put_((INDEX // 2, INDEX), x[:, 1])),
    "scatter": lambda x: torch.zeros(x.shape, **KIND).scatter(1, (x > 0).long(), x),
    "index_put": lambda x: torch.zeros(x.shape, **KIND).index_put((INDEX // 2,), x),
    "index_copy": lambda x: torch.zeros(x.shape, **KIND).index_copy(1, INDEX, x[:, :2]),
    "slice_scatter": lambda x: torch.zeros(2, 3, 20, 5, **KIND).slice_scatter(x, 2, 3, 19, 2),
    "select_scatter": lambda x: torch.ones(x.shape, **KIND).select_scatter(x[:, :, 3], 2, 6),
    "running statistics": running,
    "dice": dice,
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(("mesh", "cut"), CUTS)
def test_a_whole_tensor_takes_in_a_cut_one(name: str, mesh: dict[str, int], cut: dict[int, str]) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), **KIND)
    found = check_rule(WRITES[name], x, cuts=[cut], mesh=mesh)
    assert found.verdict == "exact", (found.why, found.error)


LARGE = (1, 2, 64, 32, 16)


def large(mesh: hc.Mesh) -> Tensor:
    return hc.shard(torch.randn(LARGE, generator=torch.Generator().manual_seed(2), **KIND), mesh, {2: "rows"})


class Made(nn.Module):
    """A forward that makes its target by itself."""

    def forward(self, x: Tensor) -> Tensor:
        target = torch.zeros(x.shape, **KIND)
        same = target
        target.copy_(x)
        target[:, :1] = x[:, 1:] * 2
        assert same is target
        return same * x


def test_what_a_forward_makes_is_cut_and_right() -> None:
    def on_rank() -> tuple[bool, int]:
        mesh = hc.Mesh(rows=2)
        x = large(mesh).requires_grad_()
        found = Made()(x)
        return isinstance(found, hc.ShardedTensor), mesh.world.traffic.gathered_bytes

    assert run_local(2, on_rank) == [(True, 0)] * 2
    x = torch.randn(1, 2, 64, 32, 16, generator=torch.Generator().manual_seed(2), **KIND)
    found = check_rule(Made(), x, cuts=[{2: "rows"}], mesh={"rows": 2})
    assert found.verdict == "exact", (found.why, found.error)


class Keeps(nn.Module):
    """What others can see stays whole: a buffer, an attribute, memory of numpy, a tensor with a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(LARGE, **KIND))
        self.last = torch.zeros(LARGE, **KIND)
        self.array = np.zeros(LARGE)
        self.view = torch.zeros(LARGE, **KIND)[:, :, :]

    def forward(self, x: Tensor) -> None:
        shared = torch.from_numpy(self.array)
        for target in (self.mean, self.last, shared, self.view._base):
            target.copy_(x)


def test_what_others_can_see_stays_whole() -> None:
    def on_rank() -> list[bool]:
        module, x = Keeps(), large(hc.Mesh(rows=2))
        module(x)
        outside = torch.zeros(LARGE, **KIND).copy_(x)
        whole = hc.gather(x)
        found = (module.mean, module.last, torch.from_numpy(module.array), module.view, outside)
        return [type(one) is Tensor and torch.equal(one, whole) for one in found]

    assert run_local(2, on_rank) == [[True] * 5] * 2


def test_a_sum_over_ranks_may_be_changed_in_place() -> None:
    """As MONAI's Tversky loss does with its counts."""

    def weighted(x: Tensor) -> Tensor:
        total = x.sum((2, 3))
        total *= 0.5
        return total

    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), **KIND)
    found = check_rule(weighted, x, cuts=[{2: "rows"}], mesh={"rows": 2})
    assert found.verdict == "exact", (found.why, found.error)
