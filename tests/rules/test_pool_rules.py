"""Pools on cut tensors against one rank: value, gradient, and gradient of a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from placing import place
from ranges import often
from torch import Tensor, nn

import halocline as hc
from halocline.errors import ShardingError
from halocline.testing.compare import Comparison, check_rule
from halocline.world import Mesh, run_local

SETUPS = often(75)


@dataclass
class Setup:
    """A call, its sample, and how that is cut; printed when it goes wrong."""

    call: Callable[[Tensor], Tensor]
    shape: list[int]
    cuts: dict[int, str]
    mesh: dict[str, int]
    points: dict[int, list[int]]
    seed: int
    ties: bool = field(default=False)

    def sample(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if not self.ties:
            return torch.randn(self.shape, generator=generator, dtype=torch.float64)
        few = torch.randint(-1, 3, self.shape, generator=generator).double()
        return torch.where(few < 0, float("-inf"), few)

    def compare(self, second_order: bool = False) -> Comparison:
        return check_rule(
            self.call, self.sample(), cuts=[self.cuts], mesh=self.mesh, points=[self.points], second_order=second_order
        )


def geometry(random: Random) -> tuple[int, list[int], list[int]]:
    """How many spatial dims, a shape with or without a batch, and the dims to cut (mostly spatial ones)."""
    spatial = random.choice((1, 1, 2, 2, 3))
    lead = [2, 2] if random.random() < 0.7 else [3]
    shape = lead + [random.randint(1, (24, 12, 7)[spatial - 1]) for _ in range(spatial)]
    first = 0 if random.random() < 0.2 else len(lead)
    return spatial, shape, list(range(first, len(shape)))


def numbers(random: Random, count: int, low: int, high: int) -> Any:
    """One number for all dims, or one for each."""
    return random.randint(low, high) if random.random() < 0.5 else [random.randint(low, high) for _ in range(count)]


def windows(random: Random, spatial: int) -> tuple[Any, Any, Any]:
    kernel = numbers(random, spatial, 1, 5)
    smallest = kernel if isinstance(kernel, int) else min(kernel)
    return kernel, random.choice((None, numbers(random, spatial, 1, 4))), numbers(random, spatial, 0, smallest // 2)


def max_pool(random: Random, spatial: int, shape: list[int]) -> dict[str, Any]:
    kernel, stride, padding = windows(random, spatial)
    widest = min(3, *shape[-spatial:])  # a window that steps over the sample is refused: torch corrupts memory there
    options = {"dilation": numbers(random, spatial, 1, widest), "ceil_mode": random.random() < 0.5}
    return {"kernel_size": kernel, "stride": stride, "padding": padding, **options}


def avg_pool(random: Random, spatial: int, shape: list[int]) -> dict[str, Any]:
    kernel, stride, padding = windows(random, spatial)
    options: dict[str, Any] = {"ceil_mode": random.random() < 0.5, "count_include_pad": random.random() < 0.5}
    if spatial > 1 and random.random() < 0.2:
        options["divisor_override"] = random.randint(1, 9)
    return {"kernel_size": kernel, "stride": () if stride is None else stride, "padding": padding, **options}


def lp_pool(random: Random, spatial: int, shape: list[int]) -> dict[str, Any]:
    kernel, stride, _ = windows(random, spatial)
    norm = random.choice((2.0, 4.0, float("inf"), float("-inf")))
    return {"norm_type": norm, "kernel_size": kernel, "stride": stride, "ceil_mode": random.random() < 0.5}


def adaptive(random: Random, spatial: int, shape: list[int]) -> dict[str, Any]:
    if spatial == 1 or random.random() < 0.3:
        return {"output_size": random.randint(1, 9)}
    return {"output_size": [random.choice((None, 1, random.randint(1, 9))) for _ in range(spatial)]}


ARGUMENTS = {
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "lp_pool": lp_pool,
    "adaptive_avg_pool": adaptive,
    "adaptive_max_pool": adaptive,
}


def setups(name: str, count: int, seed: int = 0) -> Iterator[Setup]:
    random = Random(f"{name} {seed}")
    for number in range(count):
        spatial, shape, dims = geometry(random)
        function = getattr(F, f"{name}{spatial}d")
        options = ARGUMENTS[name](random, spatial, shape)
        ties = "max" in name and random.random() < 0.5
        yield Setup(partial(function, **options), shape, *place(random, shape, dims), seed=number, ties=ties)


def verdicts(name: str, count: int, seed: int = 0) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number, setup in enumerate(setups(name, count, seed)):
        found = setup.compare(second_order=number % 4 == 0 and not setup.ties)
        assert found.verdict in ("exact", "invalid"), (setup, found)
        counts[found.verdict] += 1
    return counts


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARGUMENTS)
def test_any_window_and_any_cut_is_exact(name: str) -> None:
    """Torch itself refuses some set-ups on one rank (a kernel larger than its sample); the library refuses none."""
    counts = verdicts(name, SETUPS)
    assert counts["exact"] >= SETUPS // 2, counts
    assert counts["exact"] + counts["invalid"] == SETUPS


MODULES = [
    nn.MaxPool1d(3, 2, 1),
    nn.MaxPool2d((3, 2), ceil_mode=True),
    nn.MaxPool3d(2, dilation=2),
    nn.AvgPool1d(3, 1, 1),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    nn.AvgPool3d((2, 3, 1), divisor_override=5),
    nn.LPPool1d(2, 3),
    nn.LPPool2d(2, (2, 3), stride=2),
    nn.LPPool3d(2, 2),
    nn.AdaptiveAvgPool1d(5),
    nn.AdaptiveAvgPool2d((None, 3)),
    nn.AdaptiveAvgPool3d(1),
    nn.AdaptiveMaxPool1d(1),
    nn.AdaptiveMaxPool2d((1, None)),
    nn.AdaptiveMaxPool3d((3, 1, 4)),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules(module: nn.Module) -> None:
    spatial = int(type(module).__name__[-2])
    x = torch.rand(2, 3, *(9, 8, 7)[:spatial], dtype=torch.float64)
    for cuts in ({2: "a"}, {1 + spatial: "a", 0: "b"}):
        found = check_rule(module, x, cuts=[cuts], mesh={"a": 3, "b": 2}, second_order=True)
        assert found.verdict == "exact", found


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_every_name_of_a_pool(spatial: int) -> None:
    x = torch.rand(2, 3, *[8] * spatial, dtype=torch.float64)
    for home, names in ((torch, ["max_pool"]), (F, ["max_pool", "avg_pool"])):
        for name in names:
            function = partial(getattr(home, f"{name}{spatial}d"), kernel_size=2)
            assert check_rule(function, x, cuts=[{2: "a"}], mesh={"a": 2}).verdict == "exact"


def test_integers_and_narrow_floats() -> None:
    whole = torch.randint(-9, 9, (2, 7, 8))
    for function in (partial(F.max_pool2d, kernel_size=3, stride=1, padding=1), partial(F.avg_pool2d, kernel_size=3)):
        assert check_rule(function, whole, cuts=[{1: "a"}], mesh={"a": 3}).verdict == "exact"
    ragged = partial(F.avg_pool2d, kernel_size=5, stride=2, padding=2, count_include_pad=False)
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.half, 2e-3)):
        for function in (ragged, partial(F.adaptive_avg_pool2d, output_size=(3, 5))):
            x = 5000 * torch.rand(1, 2, 11, 12).to(dtype)
            found = check_rule(function, x, cuts=[{2: "a"}], mesh={"a": 3}, tolerance=tolerance)
            assert found.verdict == "exact", found


def traffic(
    function: Callable[[Tensor], Tensor], x: Tensor, cuts: dict[int, str], **mesh: int
) -> list[tuple[int, int]]:
    """(bytes moved, bytes gathered) by a call and its backward pass, on each rank."""

    def on_rank() -> tuple[int, int]:
        layout = Mesh(**mesh)
        tile = hc.shard(x, layout, cuts).requires_grad_()
        layout.world.traffic.clear()
        function(tile).sum().backward()
        return layout.world.traffic.moved_bytes, layout.world.traffic.gathered_bytes

    return run_local(torch.Size(mesh.values()).numel(), on_rank)


def test_windows_that_end_at_the_cut_move_nothing() -> None:
    x = torch.rand(1, 2, 16, 16)
    for name in ("max_pool2d", "avg_pool2d"):
        pool = partial(getattr(F, name), kernel_size=2)
        assert traffic(pool, x, {2: "a", 3: "b"}, a=4, b=2) == [(0, 0)] * 8
    adaptive_pool = partial(F.adaptive_avg_pool2d, output_size=4)
    assert traffic(adaptive_pool, x, {2: "a"}, a=4) == [(0, 0)] * 4


def test_one_window_over_all_is_a_reduction_not_a_journey() -> None:
    """The global average is a sum over ranks; the global maximum sends one value for each tile and channel."""
    x = torch.rand(2, 3, 16, 16)
    for average in (partial(F.adaptive_avg_pool2d, output_size=1), partial(F.avg_pool2d, kernel_size=16)):
        assert traffic(average, x, {2: "a", 3: "b"}, a=2, b=2) == [(0, 0)] * 4
    for maximum in (partial(F.adaptive_max_pool2d, output_size=1), partial(F.max_pool2d, kernel_size=16)):
        moved = traffic(maximum, x, {2: "a"}, a=4)
        assert all(bytes_moved <= 4 * 2 * 2 * 3 * 4 for bytes_moved, _ in moved), moved


def test_what_torch_refuses_is_refused_for_the_global_shape() -> None:
    def on_rank() -> None:
        x = hc.shard(torch.ones(1, 1, 8, 8), Mesh(a=2), {2: "a"})
        with pytest.raises(ShardingError, match=r"too small.*\[1, 1, 8, 8\]"):
            F.max_pool2d(x, 9)
        with pytest.raises(ShardingError, match="half of"):
            F.avg_pool2d(x, 3, padding=2)
        with pytest.raises(ShardingError, match="output_size must be 2"):
            F.adaptive_avg_pool2d(x, (3,))  # type: ignore[arg-type]
        tiny = hc.shard(torch.ones(1, 2), Mesh(a=2), {1: "a"})
        with pytest.raises(ShardingError, match="steps over all 2 elements"):
            F.max_pool1d(tiny, 2, 1, 1, 3)

    run_local(2, on_rank)


def test_arguments_that_torch_refuses_are_refused_of_cut_tensors_too() -> None:
    pooled, places = F.max_pool3d(torch.randn(1, 1, 4, 4, 4), 2, return_indices=True)

    def body() -> None:
        mesh = Mesh(depth=2)
        values, indices = (hc.shard(tensor, mesh, {2: "depth"}) for tensor in (pooled, places))
        rows = hc.shard(torch.ones(6, 5), mesh, {0: "depth"})
        with pytest.raises(RuntimeError, match="exactly three elements"):
            F.max_unpool3d(values, indices, (2, 3))
        with pytest.raises(RuntimeError, match="expected input with shape"):
            F.layer_norm(rows, (3, 6, 5))

    run_local(2, body)
