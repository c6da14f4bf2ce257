"""Convolutions, norms, look-ups and losses whose channels, weights or classes are cut, alone and with space."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranges import often
from torch import Tensor

import halocline as hc
from halocline.testing.compare import check_rule
from halocline.world import run_local

DOUBLE = {"dtype": torch.float64}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DECONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def numbers(random: Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(1 << 30)), **DOUBLE)


def some_cut(random: Random, shape: tuple[int, ...], mesh: dict[str, int], dims: list[int]) -> tuple[Any, Any]:
    """Some axes on some of these dims, sometimes at random points; tiles may be empty."""
    axes = random.sample(list(mesh), random.randint(0, len(mesh)))
    cut = dict(zip(random.sample(dims, min(len(dims), len(axes))), axes, strict=False))
    points = {
        dim: (0, *sorted(random.randint(0, shape[dim]) for _ in range(mesh[axis] - 1)), shape[dim])
        for dim, axis in cut.items()
        if random.random() < 0.3
    }
    return cut or None, points or None


def one_convolution(seed: int) -> None:
    """A convolution with random sizes, groups and padding; input, weight and bias each cut in a way of their own."""
    random = Random(seed)
    spatial, groups = random.choice([1, 2, 2, 3]), random.choice([1, 1, 2, 3, 4])
    held, made = random.randint(1, 3), random.randint(1, 3)
    held, made = (held + 1, made + 1) if groups == 1 else (held, made)
    transposed = random.random() < 0.3
    kernel = [random.randint(1, 3) for _ in range(spatial)]
    sizes = [random.randint(5, 8) for _ in range(spatial)]
    x = numbers(random, random.randint(1, 2), groups * held, *sizes)
    w = numbers(random, *((groups * held, made) if transposed else (groups * made, held)), *kernel)
    b = numbers(random, groups * made)
    stride, padding, dilation = random.randint(1, 2), random.randint(0, 1), random.randint(1, 2)
    function = DECONV[spatial] if transposed else CONV[spatial]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    mesh = random.choice([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}])
    operands = [x, w] if random.random() < 0.2 else [x, w, b]
    placed = [some_cut(random, tuple(t.shape), mesh, list(range(t.ndim))) for t in operands]
    if not any(cut for cut, _ in placed):
        return
    found = check_rule(
        lambda *tensors: function(*tensors, **options),
        *operands,
        cuts=[cut for cut, _ in placed],
        points=[points for _, points in placed],
        mesh=mesh,
        second_order=random.random() < 0.15,
    )
    shapes = [list(t.shape) for t in operands]
    assert found.verdict in ("exact", "invalid"), f"{seed}: {function.__name__} {shapes} {options} {placed}: {found}"


def test_convolutions_with_cut_channels() -> None:
    for seed in range(often(24)):
        one_convolution(seed)


@pytest.mark.long
def test_many_convolutions_with_cut_channels() -> None:
    for seed in range(1000, 1250):
        one_convolution(seed)


@pytest.mark.trial
def test_thousands_of_convolutions_with_cut_channels() -> None:
    for seed in range(10_000, 13_000):
        one_convolution(seed)


NORMS: dict[str, Any] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "group 4": lambda x, w, b: F.group_norm(x, 4, w, b),
    "group 2": lambda x, w, b: F.group_norm(x, 2, w, b),
    "group 1": lambda x, w, b: F.group_norm(x, 1, w, b),
    "layer": lambda x, w, b: F.layer_norm(x.movedim(1, -1), (8,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x.movedim(1, -1), (8,), w) + b,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_cut_channels_with_cut_weights(name: str) -> None:
    random = Random(name)
    x, w, b = numbers(random, 4, 8, 6), numbers(random, 8), numbers(random, 8)
    for _ in range(often(5)):
        mesh = random.choice([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}])
        placed = [some_cut(random, tuple(t.shape), mesh, list(range(t.ndim))) for t in (x, w, b)]
        if not any(cut for cut, _ in placed):
            continue
        cuts, points = zip(*placed, strict=True)
        found = check_rule(NORMS[name], x, w, b, cuts=cuts, points=points, mesh=mesh, second_order=True)
        assert found.verdict == "exact", (name, placed, mesh, found)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics_of_cut_channels(kind: str) -> None:
    function = F.batch_norm if kind == "batch" else F.instance_norm

    def norm(x: Tensor) -> list[Tensor]:
        mean, var = torch.zeros(8, **DOUBLE), torch.ones(8, **DOUBLE)
        return [function(x, mean, var, None, None, True, 0.3), mean, var]

    x = numbers(Random(0), 4, 8, 6)
    for cut, mesh in (({1: "a"}, {"a": 3}), ({1: "a", 0: "b"}, {"a": 2, "b": 2}), ({1: "a", 2: "b"}, {"a": 2, "b": 2})):
        found = check_rule(norm, x, cuts=[cut], mesh=mesh)
        assert found.verdict == "exact" and found.gathered_bytes == 0, found


@pytest.mark.parametrize(("features", "made", "cut"), [(8, 8, {1: "a"}), (512, 2, {})])
def test_one_axis_for_two_dims_goes_to_the_cheaper(features: int, made: int, cut: dict[int, str]) -> None:
    """The input is gathered for rows of the weight, or a small weight moves and a small result is summed."""

    def body() -> dict[int, str]:
        mesh = hc.Mesh(a=2)
        x = hc.shard(torch.ones(64, features), mesh, {1: "a"})
        y = F.linear(x, hc.shard(torch.ones(made, features), mesh, {0: "a"}))
        return y.sharding.dims_by_axis() if isinstance(y, hc.ShardedTensor) else {}

    assert run_local(2, body) == [cut] * 2


TOKENS = torch.tensor([[0, 3, 9, 3], [7, 2, 2, 5]])


@pytest.mark.parametrize("padding", [None, -7])
@pytest.mark.parametrize("cut", [{0: "a"}, {0: "a", 1: "b"}])
@pytest.mark.parametrize("of_tokens", [None, {0: "b"}, {1: "a"}])
def test_embeddings_of_a_cut_vocabulary(padding: int | None, cut: dict[int, str], of_tokens: Any) -> None:
    table = numbers(Random(1), 10, 5)
    found = check_rule(
        lambda table, tokens: F.embedding(tokens, table, padding),
        table,
        TOKENS,
        cuts=[cut, of_tokens],
        mesh={"a": 3, "b": 2},
        second_order=True,
    )
    assert found.verdict == "exact", found
    if cut == {0: "a"} and of_tokens != {1: "a"}:
        assert found.gathered_bytes == 0


def test_tokens_and_classes_that_no_rank_has_raise() -> None:
    """As on one rank, and on every rank: no token silently becomes zeros."""

    def body() -> None:
        mesh = hc.Mesh(a=2)
        table = hc.shard(numbers(Random(1), 10, 5), mesh, {0: "a"})
        for wrong in (10, -1):
            with pytest.raises(IndexError, match="out of range"):
                F.embedding(torch.tensor([3, wrong]), table)
            with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
                F.cross_entropy(table.t(), torch.tensor([3, wrong, 0, 0, 0]))

    run_local(2, body)


CLASSES = 7
LOSSES: dict[str, Any] = {
    "cross entropy": lambda x, y: F.cross_entropy(x, y),
    "ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=2),
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2),
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.linspace(1, 2, CLASSES, **DOUBLE), label_smoothing=0.1),
    "weighted none": lambda x, y: F.cross_entropy(
        x, y, torch.linspace(1, 2, CLASSES, **DOUBLE), ignore_index=0, label_smoothing=0.1, reduction="none"
    ),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, torch.linspace(1, 2, CLASSES, **DOUBLE), ignore_index=3),
    "probabilities": lambda x, y: F.cross_entropy(
        x, F.one_hot(y, CLASSES).movedim(-1, 1).double() * 0.7 + 0.1, label_smoothing=0.3
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_cut_classes_gather_no_scores(name: str) -> None:
    random = Random(name)
    x, y = numbers(random, 4, CLASSES, 5), torch.arange(20).reshape(4, 5) * 3 % CLASSES
    for cut, of_target, mesh in (
        ({1: "a"}, None, {"a": 3}),
        ({1: "a", 0: "b"}, {0: "b"}, {"a": 2, "b": 2}),
        ({1: "a", 2: "b"}, None, {"a": 2, "b": 2}),
    ):
        found = check_rule(LOSSES[name], x, y, cuts=[cut, of_target], mesh=mesh, second_order=True)
        assert found.verdict == "exact", (cut, found)
        assert found.gathered_bytes == 0 or name == "probabilities", found


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_heads(heads: int, shared: int, causal: bool) -> None:
    random = Random(heads)
    q, k, v = numbers(random, 2, heads, 5, 3), *(numbers(random, 2, shared, 5, 3) for _ in range(2))
    for cuts, mesh in (
        ([{1: "a"}, {1: "a"}, {1: "a"}], {"a": 2}),
        ([{1: "a"}, None, {1: "a"}], {"a": 3}),
        ([{1: "a", 0: "b"}, {1: "a", 0: "b"}, {0: "b"}], {"a": 2, "b": 2}),
        ([{1: "a", 2: "b"}, {1: "a", 2: "b"}, {1: "a", 2: "b"}], {"a": 2, "b": 2}),
    ):
        found = check_rule(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared != heads),
            q, k, v, cuts=cuts, mesh=mesh,
        )  # fmt: skip
        assert found.verdict == "exact", (cuts, mesh, found)
