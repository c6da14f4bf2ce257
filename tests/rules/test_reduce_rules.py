"""Reductions, norms and losses over cut dims: value, gradient and second gradient of one rank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import halocline as hc
from halocline.testing import check_rule, relative_error, run_local

MESHES = [{"data": 2, "height": 3}, {"data": 1, "height": 4}, {"data": 5, "height": 1}]  # five ranks for four samples
CUT, TARGET = {0: "data", 2: "height"}, {0: "data", 1: "height"}
GENERATOR = torch.Generator().manual_seed(6)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


X, Y, WEIGHT, BIAS, PLANE = random(4, 6, 11, 6), random(4, 6, 11, 6), random(6), random(6), random(11, 6)
CLASSES = torch.randint(0, 6, (4, 11, 6), generator=GENERATOR)
CLASS_WEIGHT = WEIGHT.exp()


def tracked(function, x, *parameters, **options):
    """The result and the running statistics it left."""
    running = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    return function(x, *running, *parameters, **options), *running


ONE_INPUT = {
    "sum": lambda x: x.sum(),
    "sum over some": lambda x: x.sum((2, 3)),
    "mean": lambda x: x.mean(2, keepdim=True),
    "max": lambda x: x.max(),
    "max with ties": lambda x: (x * 2).round().max() + (x - x.detach() + (x.detach() * 2).round()).amax((0, 2)).sum(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(2),
    "max along an uncut dim": lambda x: x.max(1),
    "max along a cut dim": lambda x: x.max(2),
    "argmax": lambda x: x.argmax(1),
    "var": lambda x: x.var((0, 2)),
    "std": lambda x: x.std(),
    "var_mean": lambda x: torch.var_mean(x, 2, correction=0),
    "norm": lambda x: x.norm(),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3, dim=2),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "logsumexp": lambda x: x.logsumexp(2),
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
    "any and all": lambda x: ((x > 2).any(2), (x < 9).all()),
    "dice": lambda x: (2 * (x.sigmoid() * 0.3).sum((2, 3)) + 1) / (x.sigmoid().sum((2, 3)) + 1),
}
WITH_PARAMETERS = {
    "batch norm": lambda x, w, b: tracked(F.batch_norm, x, w, b, training=True),
    "batch norm, given statistics": lambda x, w, b: F.batch_norm(x, WEIGHT, CLASS_WEIGHT, w, b, False),
    "instance norm": lambda x, w, b: tracked(F.instance_norm, x, w, b),
    "group norm": lambda x, w, b: F.group_norm(x, 3, w, b),
    "layer norm over channels last": lambda x, w, b: F.layer_norm(x, (6,), w, b),
    "layer norm over a cut plane": lambda x, w, b: F.layer_norm(x, (11, 6), PLANE * w, PLANE + b),
    "rms norm": lambda x, w, b: F.rms_norm(x, (11, 6), PLANE * w),
}
LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), reduction=reduction),
    "bce with logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
    "probabilities": lambda x, y, reduction: F.cross_entropy(x, y.exp() / 10, reduction=reduction),
}
CLASS_LOSSES = {
    "cross entropy": lambda x, y, reduction: F.cross_entropy(x, y, reduction=reduction),
    "weighted, smoothed, some ignored": lambda x, y, reduction: F.cross_entropy(
        x, y, CLASS_WEIGHT, ignore_index=2, reduction=reduction, label_smoothing=0.1
    ),
    "nll": lambda x, y, reduction: F.nll_loss(x.log_softmax(1), y, CLASS_WEIGHT, reduction=reduction),
}


#: How a loss is reduced, and whether its target is cut as the input is: all on the first mesh, half on each other.
KINDS = [(reduction, cut) for reduction in ("mean", "sum", "none") for cut in (True, False)]
SHARES = [KINDS, [KINDS[0], KINDS[3], KINDS[4]], [KINDS[1], KINDS[2], KINDS[5]]]
LOSS_MESHES = list(zip(MESHES, SHARES, strict=True))


def assert_exact(function, *inputs, cuts, mesh) -> None:
    """The second gradient takes the first with it; by itself, with no graph behind it, that is tried on one mesh."""
    for second_order in (False, True) if mesh == MESHES[0] else (True,):
        found = check_rule(function, *inputs, cuts=cuts, mesh=mesh, second_order=second_order)
        assert found.verdict == "exact", found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ONE_INPUT)
def test_reduction(name: str, mesh: dict[str, int]) -> None:
    assert_exact(ONE_INPUT[name], X, cuts=[CUT], mesh=mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_norm(name: str, mesh: dict[str, int]) -> None:
    assert_exact(WITH_PARAMETERS[name], X, WEIGHT, BIAS, cuts=[CUT], mesh=mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_of_half_precision_with_a_wider_weight(dtype: torch.dtype) -> None:
    """torch scales in float32 and rounds once; the result has the dtype of the input."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, bias = torch.linspace(0.5, 3, 8).to(dtype), torch.linspace(-1, 1, 8).to(dtype)
    true = F.layer_norm(x, (8,), weight, bias)

    def on_rank() -> torch.Tensor:
        return hc.gather(F.layer_norm(hc.shard(x, hc.Mesh(a=2), {1: "a"}), (8,), weight, bias))

    for found in run_local(2, on_rank):  # alike to one unit in the last place: statistics are merged in another order
        assert relative_error(found, true) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("mesh", "kinds"), LOSS_MESHES, ids=list(map(str, MESHES)))
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, mesh: dict[str, int], kinds: list[tuple[str, bool]]) -> None:
    for reduction, alike in kinds:
        loss = partial(LOSSES[name], reduction=reduction)
        assert_exact(loss, X, Y, cuts=[CUT, CUT if alike else None], mesh=mesh)


@pytest.mark.parametrize(("mesh", "kinds"), LOSS_MESHES, ids=list(map(str, MESHES)))
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_class_loss(name: str, mesh: dict[str, int], kinds: list[tuple[str, bool]]) -> None:
    for reduction, alike in kinds:
        loss = partial(CLASS_LOSSES[name], reduction=reduction)
        assert_exact(loss, X, CLASSES, cuts=[CUT, TARGET if alike else None], mesh=mesh)
