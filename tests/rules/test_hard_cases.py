"""Cases that once gave a wrong number, a hang, or no word: each stays mended."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.program import dry
from halocline.rules.executor import _plans
from halocline.rules.plan import PlanCache
from halocline.testing import check_rule
from halocline.world import run_local

GENERATOR = torch.Generator().manual_seed(8)
X, Y = (torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
HEAD = nn.Linear(6, 3).double()


def true_gradient(model: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(model(x).square().mean(), next(model.parameters()))
    return gradient


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of memory, say")


def test_a_failed_backward_leaves_no_trace() -> None:
    def body() -> Tensor:
        mesh = hc.Mesh(data=2)
        model, x = hc.distribute(copy.deepcopy(HEAD), mesh), hc.shard(X, mesh, {0: "data"})
        fuse = Fails.apply(torch.ones((), dtype=torch.float64, requires_grad=True))
        with pytest.raises(ValueError, match="memory"):
            (model(x).square().mean() + 0 * fuse).backward()
        model.zero_grad()
        model(x).square().mean().backward()
        return model.weight.grad

    for found in run_local(2, body):
        torch.testing.assert_close(found, true_gradient(HEAD, X))


def test_what_piles_up_inside_no_sync_is_averaged_later() -> None:
    def body() -> Tensor:
        mesh = hc.Mesh(data=2)
        heads = hc.distribute(nn.ModuleList([copy.deepcopy(HEAD), copy.deepcopy(HEAD)]), mesh)
        x = hc.shard(X, mesh, {0: "data"})
        with hc.no_sync(heads):
            heads[0](x).square().mean().backward()
        heads[1](x).square().mean().backward()
        return heads[0].weight.grad

    for found in run_local(2, body):
        torch.testing.assert_close(found, true_gradient(HEAD, X))


def test_autograd_grad_after_a_change_of_dtype() -> None:
    single = copy.deepcopy(HEAD).float()

    def body() -> Tensor:
        mesh = hc.Mesh(data=2)
        model = hc.distribute(copy.deepcopy(single), mesh).double()
        return true_gradient(model, hc.shard(X, mesh, {0: "data"}))

    for found in run_local(2, body):
        torch.testing.assert_close(found, true_gradient(copy.deepcopy(single).double(), X))


def test_an_unwatched_leaf_is_found_behind_plain_work() -> None:
    def body() -> None:
        scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
        hc.shard(X, hc.Mesh(data=2), {0: "data"}) * scale.exp()

    with pytest.raises(hc.Refused, match="nobody averages"):
        run_local(2, body)


def test_gradients_of_inputs_whole_on_an_axis() -> None:
    def body() -> list[Tensor]:
        mesh = hc.Mesh(data=2, depth=2)
        other = hc.shard(Y, mesh, {0: "data"})
        leaf = X.clone().requires_grad_()
        (hc.shard(leaf, mesh, {1: "depth"}).square() * other).sum().backward()
        twin = copy.deepcopy(hc.shard(X, mesh, {1: "depth"}).requires_grad_())
        (twin.square() * other).sum().backward()
        middle = hc.shard(X, mesh, {1: "depth"}).requires_grad_() * 1.0
        middle.retain_grad()
        (middle.square() * other).sum().backward()
        return [leaf.grad, hc.gather(twin.grad), hc.gather(middle.grad)]

    for found in run_local(4, body):
        for gradient in found:
            torch.testing.assert_close(gradient, 2 * X * Y)


def test_a_computed_tile_is_refused() -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2)
        hc.from_tile(HEAD(X[:2]), mesh, {0: "data"})

    with pytest.raises(hc.Refused, match="computed"):
        run_local(2, body)


def test_tiles_of_different_dtypes_never_mix() -> None:
    def body() -> Tensor:
        mesh = hc.Mesh(data=2)
        dtype = torch.float32 if mesh.rank else torch.int32
        return hc.gather(hc.from_tile(torch.ones(2, 2, dtype=dtype), mesh, {0: "data"}))

    with pytest.raises(hc.RankFailure, match="gather"):
        run_local(2, body, deadline=0.5)


def test_shard_never_hands_out_the_callers_memory() -> None:
    def body() -> tuple[Tensor, bool]:
        mesh = hc.Mesh(data=2)
        whole = torch.ones(1, 3)
        for _ in range(2):
            x = hc.shard(whole, mesh, {0: "data"}).requires_grad_()
            x.square().sum().backward()
        hc.shard(whole, mesh, {0: "data"}).mul_(5)
        return whole, whole.requires_grad

    assert all(torch.equal(whole, torch.ones(1, 3)) and not asks for whole, asks in run_local(2, body))


def test_affine_instance_norm_with_an_empty_batch_tile() -> None:
    """A penalty on parameters, batch 1 over two data ranks: the rank without samples takes part in every sum."""
    norm = nn.InstanceNorm1d(3, affine=True).double()
    x = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(model: nn.Module, volume: Tensor) -> Tensor:
        slopes = torch.autograd.grad(model(volume).pow(3).sum(), list(model.parameters()), create_graph=True)
        sum(s.square().sum() for s in slopes).backward()
        return model.weight.grad

    true = run(copy.deepcopy(norm), x)

    def body() -> Tensor:
        mesh = hc.Mesh(data=2)
        return run(hc.distribute(copy.deepcopy(norm), mesh), hc.shard(x, mesh, {0: "data"}))

    for found in run_local(2, body, deadline=5):
        torch.testing.assert_close(found, true)


EXACT = {
    "a constant's deviation": (lambda x: (x * 0 + 1).std(), X),
    "weighted mse": (lambda x: F.mse_loss(x, torch.zeros_like(x), weight=torch.arange(24.0).view(4, 6).double()), X),
    "weighted l1": (lambda x: F.l1_loss(x, torch.zeros_like(x), weight=torch.arange(24.0).view(4, 6).double()), X),
    "torch.norm": (lambda x: torch.norm(x, dim=1), X),
    "a lazy conjugate": (lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))).conj(), X),
    "minus zero": (lambda x: (F.pad(x, (1, 1), value=0.0), F.pad(x, (1, 1), value=-0.0).signbit()), X),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact(case: str) -> None:
    function, x = EXACT[case]
    found = check_rule(function, x, cuts=[{0: "rows", 1: "columns"}], mesh={"rows": 2, "columns": 2})
    assert found.verdict == "exact", found


NARROW = {
    "rms_norm": lambda x: F.rms_norm(x, [6]),
    "norm": lambda x: x.norm(),
    "var": lambda x: (x + 10).var(),
    "std": lambda x: (x + 10).std(),
}


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", NARROW)
def test_statistics_of_narrow_numbers_are_taken_in_float32(case: str, dtype: torch.dtype) -> None:
    large = (X * 300).to(dtype) if case in ("rms_norm", "norm") else X.to(dtype)
    found = check_rule(NARROW[case], large, cuts=[{0: "rows"}], mesh={"rows": 2}, tolerance=0.02)
    assert found.verdict == "exact", found


REFUSED = {
    "a numpy operand": lambda x: x * np.ones((4, 6)),
    "in place with a numpy operand": lambda x: x.__ipow__(np.ones((4, 6))),
    "a trace": lambda x: torch.jit.trace(lambda t: (t * 2).sum(), x, check_trace=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.trace.*")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises((hc.Refused, RuntimeError)):
        run_local(2, lambda: REFUSED[case](hc.shard(X, hc.Mesh(data=2), {0: "data"})))


def test_dims_out_of_range_are_torchs_errors() -> None:
    def body() -> None:
        x = hc.shard(X, hc.Mesh(data=2), {0: "data"})
        for call in (lambda: x.sum(2), lambda: x.amax(-3), lambda: x.argmax(5)):
            with pytest.raises(IndexError, match="out of range"):
                call()
        with pytest.raises(RuntimeError, match="multiple times"):
            x.sum((1, -1))

    run_local(2, body)


def test_a_changing_number_is_not_planned_anew() -> None:
    with dry(0, 2):
        x = hc.shard(X.to("meta"), hc.Mesh(data=2), {0: "data"})
        x * 0.5
        before = len(_plans)
        for step in range(5):
            x * (1.5 + step)
        assert len(_plans) == before


def test_plans_are_kept_by_their_operands() -> None:
    cache = PlanCache()
    for number in range(3):
        cache.keep(number, plan := object(), PlanCache.MOST_OPERANDS // 2)  # type: ignore[arg-type]
        assert cache[number] is plan
    assert list(cache) == [2]


def test_inference_with_gradients_on_computes() -> None:
    def body() -> Tensor:
        x = hc.shard(X, hc.Mesh(data=2), {0: "data"})
        with torch.inference_mode(), torch.enable_grad():
            return hc.gather(x * 2)

    assert all(torch.equal(found, X * 2) for found in run_local(2, body))


def test_autocast_with_an_empty_tile_agrees_on_the_dtype() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)).eval()
    x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        true = model(x)

    def body() -> Tensor:
        mesh = hc.Mesh(data=4)
        mine = hc.distribute(copy.deepcopy(model), mesh)
        with torch.autocast("cpu", torch.bfloat16):
            return hc.gather(mine(hc.shard(x, mesh, {0: "data"})))

    for found in run_local(4, body, deadline=5):
        assert found.dtype == true.dtype
        torch.testing.assert_close(found, true)
