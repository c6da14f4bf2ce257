"""Every way around the rules is closed, and every misuse is a clear error of the library's own."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halocline as hc
from halocline.reduction.schedule.deferred import DeferredParameter, PendingGradient
from halocline.tensor.copy import WholeCopy
from halocline.world import run_local

DIMS = {2: "height"}


def on_ranks(function, ranks: int = 2):
    """Run ``function(mesh, sharded)`` on ranks in this process; the sample is 1 x 2 x 8 x 4."""

    def body():
        mesh = hc.Mesh(height=ranks)
        whole = torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4)
        return function(mesh, hc.shard(whole, mesh, DIMS))

    return run_local(ranks, body)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def disabled(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x + 1


WAYS_AROUND = {
    "vmap": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "func.grad": lambda x: torch.func.grad(lambda t: (t * 2).sum())(x),
    "func.grad of a weight": lambda x: torch.func.grad(lambda w: (x * w).sum())(torch.ones(4, dtype=torch.float64)),
    "torch.tensor": lambda x: torch.tensor(x),
    "as_tensor in numpy": lambda x: np.asarray(x),
    "disabled torch function": disabled,
    "foreign autograd Function": lambda x: Double.apply(x.requires_grad_()) + 1,
    "pickle": pickle.dumps,
    "item": lambda x: x.item(),
    "bool": lambda x: bool((x > 0).any(1)),
    "set data": lambda x: setattr(x, "data", torch.zeros(1, 2, 8, 4)),
    "numpy": lambda x: x.numpy(),
    "no rule": lambda x: torch.linalg.eigvals(x),
    "out= of another shape": lambda x: torch.add(x, 1, out=torch.empty(0)),
    "requires_grad of the shell": lambda x: Double.apply(x.requires_grad_()).sum(),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("way", WAYS_AROUND)
def test_ways_around_the_rules_are_refused(way: str) -> None:
    with pytest.raises(hc.Refused) as caught:
        on_ranks(lambda mesh, x: WAYS_AROUND[way](x))
    assert caught.value.why and caught.value.remedy


def test_torchscript_is_stopped() -> None:
    """TorchScript swallows our words and raises its own error; what counts is that no number comes out."""
    with pytest.raises(RuntimeError, match="TorchScript"):
        on_ranks(lambda mesh, x: scripted(x))


def test_refusal_has_four_parts() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.forward = lambda x: torch.linalg.eigvals(x)

        def forward(self, x):
            return self.inner(x)

    def body(mesh, x):
        with pytest.raises(hc.NoRule) as caught:
            hc.distribute(Odd(), mesh)(x)
        error = caught.value
        return error.operation, error.place, error.why, error.remedy

    operation, place, why, remedy = on_ranks(body)[0]
    assert "eigvals" in operation and place == "inner"
    assert "no rule" in why and "@hc.rule" in remedy


def test_global_shape_is_shown_everywhere() -> None:
    def body(mesh, x):
        assert x.shape == (1, 2, 8, 4) and x.size(2) == 8 and x.dim() == x.ndim == 4
        assert x.numel() == 64 and len(x) == 1 and x.dtype == torch.float64 and not x.is_cuda
        return tuple(hc.unwrap(x).shape)

    assert on_ranks(body, 4) == [(1, 2, 2, 4)] * 4


def test_deepcopy_is_a_sharded_copy() -> None:
    def body(mesh, x):
        twin = copy.deepcopy(x)
        twin.add_(1)
        return hc.gather(twin - x)

    assert all(torch.equal(difference, torch.ones(1, 2, 8, 4)) for difference in on_ranks(body))


def test_hooks_and_grad_see_sharded_tensors() -> None:
    def body(mesh, x):
        seen = []
        x.requires_grad_()
        middle = x * 3
        middle.register_hook(lambda g: seen.append(tuple(g.shape)) or g * 2)
        middle.retain_grad()
        (middle * middle).sum().backward()
        assert seen == [(1, 2, 8, 4)] and isinstance(x.grad, hc.ShardedTensor)
        return hc.gather(x.grad), hc.gather(x.detach())

    for gradient, x in on_ranks(body):
        torch.testing.assert_close(gradient, 2 * 2 * 3 * 3 * x)


def test_inplace_mutates_the_tile() -> None:
    def body(mesh, x):
        same = F.relu_(x.sub_(40))
        x += 1
        assert same is x
        return hc.gather(x)

    expected = (torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4) - 40).relu() + 1
    assert all(torch.equal(found, expected) for found in on_ranks(body))


def test_backward_seeds_may_be_whole_or_cut() -> None:
    def body(mesh, x):
        x.requires_grad_()
        seed = torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4)
        (x * 2).backward(seed)
        (x * 2).backward(hc.shard(seed, mesh, DIMS))
        return hc.gather(x.grad)

    expected = 4 * torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4)
    assert all(torch.equal(found, expected) for found in on_ranks(body))


BAD_INPUT = {
    "mesh does not multiply": (hc.MeshError, lambda mesh, x: hc.Mesh(data=3)),
    "mesh without axes": (hc.MeshError, lambda mesh, x: hc.Mesh()),
    "two inferred axes": (hc.MeshError, lambda mesh, x: hc.Mesh(data=-1, depth=-1)),
    "zero ranks on an axis": (hc.MeshError, lambda mesh, x: hc.Mesh(data=0, depth=2)),
    "unknown axis": (hc.MeshError, lambda mesh, x: hc.shard(torch.zeros(4, 4), mesh, {0: "rows"})),
    "no such dim": (hc.ShardingError, lambda mesh, x: hc.shard(torch.zeros(4, 4), mesh, {2: "height"})),
    "dim cut twice": (
        hc.ShardingError,
        lambda mesh, x: hc.shard(torch.zeros(4, 4), hc.Mesh(a=2, b=1), {0: "a", -2: "b"}),
    ),
    "axis cuts two dims": (
        hc.ShardingError,
        lambda mesh, x: hc.shard(torch.zeros(4, 4), mesh, {0: "height", 1: "height"}),
    ),
    "two meshes": (hc.MeshError, lambda mesh, x: x + hc.shard(torch.zeros(1, 2, 8, 4), hc.Mesh(other=2), {2: "other"})),
    "a tile where a whole is meant": (hc.ShardingError, lambda mesh, x: x + torch.zeros(1, 2, 4, 4)),
    "a target tile": (
        hc.ShardingError,
        lambda mesh, x: F.cross_entropy(x, torch.zeros(1, 4, 4, dtype=torch.long)),
    ),
    "sharded twice": (hc.ShardingError, lambda mesh, x: hc.shard(x, mesh, DIMS)),
    "tile of the wrong size": (
        hc.ShardingError,
        lambda mesh, x: hc.from_tile(torch.zeros(3), mesh, {0: "height"}, shape=[8]),
    ),
    "tiles that do not fit": (
        hc.ShardingError,
        lambda mesh, x: hc.from_tile(torch.zeros(3, 4 + mesh.rank), mesh, {0: "height"}),
    ),
    "cut points of another size": (
        hc.ShardingError,
        lambda mesh, x: hc.shard(torch.zeros(8), mesh, {0: "height"}, points={0: [0, 3, 9]}),
    ),
    "falling cut points": (
        hc.ShardingError,
        lambda mesh, x: hc.shard(torch.zeros(8), mesh, {0: "height"}, points={0: [0, 9, 8]}),
    ),
    "statistics": (hc.MeshError, lambda mesh, x: hc.distribute(nn.Linear(1, 1), mesh, batch_statistics="mine")),
    "distributed twice": (hc.MeshError, lambda mesh, x: hc.distribute(hc.distribute(nn.Linear(1, 1), mesh), mesh)),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_a_clear_error(case: str) -> None:
    kind, misuse = BAD_INPUT[case]
    with pytest.raises(kind) as caught:
        on_ranks(misuse)
    assert len(str(caught.value)) > 30  # says something


def test_ranks_that_diverge_raise() -> None:
    def body():
        mesh = hc.Mesh(height=2)
        x = hc.shard(torch.ones(1, 1, 8, 4), mesh, DIMS)
        kernel = torch.ones(1, 1, 3 + 2 * mesh.rank, 3)
        return F.conv2d(x, kernel, padding=(1 + mesh.rank, 1))

    with pytest.raises(hc.RankFailure, match="conv2d"):
        run_local(2, body, deadline=0.5)


def test_from_tile_finds_the_global_shape() -> None:
    def body():
        mesh = hc.Mesh(data=2, height=2)
        rows = 3 + mesh.coordinates["height"]
        tile = torch.full((2, rows), float(mesh.rank))
        x = hc.from_tile(tile, mesh, {0: "data", 1: "height"})
        return tuple(x.shape), hc.gather(x)

    for shape, whole in run_local(4, body):
        assert shape == (4, 7)
        assert whole[:2, :3].eq(0).all() and whole[:2, 3:].eq(1).all() and whole[2:, 3:].eq(3).all()


def test_libraries_that_dispatch_by_the_name_of_a_module_find_torch() -> None:
    """opt_einsum, autoray and others take ``type(x).__module__.split(".")[0]`` for the library to call."""
    kinds = (hc.ShardedTensor, WholeCopy, DeferredParameter, PendingGradient)
    assert {kind.__module__.split(".")[0] for kind in kinds} == {"torch"}
    assert pickle.loads(pickle.dumps(hc.ShardedTensor)) is hc.ShardedTensor
    assert "ShardedTensor(tile [1, 2, 4, 4]" in on_ranks(lambda mesh, x: repr(x), 2)[0]
