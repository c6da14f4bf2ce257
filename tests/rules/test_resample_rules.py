"""Interpolation, pools with indices and grid sampling on cut tensors against one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from halocline.errors import Refused, ShardingError
from halocline.geometry import Interval, Partition, whole
from halocline.geometry.access import Everything, Resample
from halocline.rules import Operand, Work
from halocline.rules.families.positions import Style, picks_of
from halocline.rules.families.resample import describe
from halocline.rules.recipe import Slot
from halocline.testing import check_rule
from halocline.world import Mesh, run_local

BLENDS = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}
FACTORS = (2, 2.0, 3, 0.5, 1 / 3, 1.5, 2.1, 1.1, 0.7)


def placed(random: Random, shape: list[int], dims: list[int]) -> dict[str, Any]:
    cuts, mesh, points = place(random, shape, dims)
    return {"cuts": [cuts], "mesh": mesh, "points": [points]}


def sample(shape: list[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def resizing(random: Random, spatial: int, mode: str) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": mode}
    if mode in BLENDS[spatial]:
        options["align_corners"] = random.choice((None, False, True))
        options["antialias"] = spatial == 2 and random.random() < 0.4
    if random.random() < 0.5:
        options["size"] = [random.randint(2, 20) for _ in range(spatial)]
    else:
        factors = [random.choice(FACTORS) for _ in range(spatial)]
        options["scale_factor"] = factors if random.random() < 0.5 else factors[0]
        options["recompute_scale_factor"] = random.choice((None, False, True))
    return options


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "area", "linear", "bicubic"])
def test_any_size_and_any_cut_is_exact(mode: str) -> None:
    random, counts = Random(mode), Counter[str]()
    setups = often(50)
    for number in range(setups):
        spatial = 2 if mode == "bicubic" else random.choice((1, 2, 3))
        shape = [2, random.choice((1, 5)), *(random.randint(1, (24, 12, 7)[spatial - 1]) for _ in range(spatial))]
        options = resizing(random, spatial, BLENDS[spatial][0] if mode == "linear" else mode)
        place = placed(random, shape, list(range(2 if random.random() < 0.8 else 0, spatial + 2)))
        function = partial(F.interpolate, **options)
        found = check_rule(function, sample(shape, number), **place, second_order=number % 3 == 0)
        assert found.verdict in ("exact", "invalid") or "width 1" in found.why, (options, shape, place, found)
        counts[found.verdict] += 1
    assert counts["exact"] >= 0.7 * setups, counts


def disagreeing(mode: str, spatial: int, scaled: bool) -> list[tuple[int, int, float | None]]:
    """Sizes for which torch reads other inputs in float32 than in float64, or sends gradients elsewhere."""
    found = []
    for n in range(1, 26):
        for m in range(1, 60):
            scale = (m + 0.3) / n if scaled else None
            scales, beside = None if scale is None else (scale, *[1.0] * (spatial - 1)), [1] * (spatial - 1)
            single, double = (
                picks_of(Style(mode, None, False, dtype, "cpu", spatial), [n, *beside], [m, *beside], scales)[0]
                for dtype in (torch.float32, torch.float64)
            )
            if len({single.value, double.value, single.gradient, double.gradient}) > 1:
                found.append((n, m, scale))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_picks_what_torch_picks_for_the_dtype(mode: str) -> None:
    """Among the sizes where rounding decides, in three dims and in one."""
    random = Random(mode)
    awkward = disagreeing(mode, 1, False) + disagreeing(mode, 1, True)
    assert len(awkward) >= 6
    for n, m, scale in random.sample(awkward, min(often(20), len(awkward))):
        for dtype in (torch.float32, torch.float64):
            for spatial in (1, 3):
                size = {"size": (m, *[1] * (spatial - 1))}
                scaled = {"scale_factor": (scale, *[1.0] * (spatial - 1))}
                function = partial(F.interpolate, mode=mode, **(size if scale is None else scaled))
                x = sample([1, 2, n, *[1] * (spatial - 1)], n, dtype)
                found = check_rule(function, x, cuts=[{2: "a"}], mesh={"a": 3}, tolerance=1e-6)
                assert found.verdict == "exact", (n, m, scale, dtype, spatial, found)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_large_output_goes_by_another_kernel_than_its_tiles(layout: torch.memory_format) -> None:
    for mode, size in (("nearest", (106, 40)), ("nearest-exact", (106, 30)), ("nearest", (99, 64))):

        def function(x: Tensor, mode: str = mode, size: tuple[int, int] = size) -> Tensor:
            return F.interpolate(x.contiguous(memory_format=layout), mode=mode, size=size)

        for dtype in (torch.float32, torch.float64):
            found = check_rule(
                function, sample([1, 5, 53, 17], 3, dtype), cuts=[{2: "a"}], mesh={"a": 3}, tolerance=1e-6
            )
            assert found.verdict == "exact", (mode, size, dtype, found)


MODULES = [
    nn.Upsample(scale_factor=2),
    nn.Upsample(size=13, mode="nearest-exact"),
    nn.Upsample(scale_factor=(1.5, 0.7), mode="bilinear", align_corners=True),
    nn.Upsample(scale_factor=2, mode="bicubic", recompute_scale_factor=True),
    nn.UpsamplingNearest2d(scale_factor=2),
    nn.UpsamplingBilinear2d(size=(17, 5)),
    nn.MaxPool2d(3, 2, 1, return_indices=True),
    nn.AdaptiveMaxPool2d((3, None), return_indices=True),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules(module: nn.Module) -> None:
    x = sample([2, 3, 9, 8], 0)
    for cuts in ({2: "a"}, {3: "a", 0: "b"}, {2: "b", 3: "a"}):
        assert check_rule(module, x, cuts=[cuts], mesh={"a": 3, "b": 2}, second_order=True).verdict == "exact"


def test_other_dtypes() -> None:
    cut: dict[str, Any] = {"cuts": [{2: "a"}], "mesh": {"a": 3}}
    image = torch.randint(0, 256, (2, 3, 17, 12), dtype=torch.uint8)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        assert check_rule(partial(F.interpolate, size=(31, 7), mode=mode), image, **cut).verdict == "exact"
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.half, 3e-3)):
        x = sample([1, 2, 9, 7], 1, dtype)
        for mode in ("nearest", "bilinear", "bicubic"):
            found = check_rule(partial(F.interpolate, scale_factor=1.7, mode=mode), x, **cut, tolerance=tolerance)
            assert found.verdict == "exact", (dtype, mode, found)


def on_two(function: Callable[[Mesh], Any]) -> list[Any]:
    return run_local(2, lambda: function(Mesh(a=2)))


def test_doubling_moves_at_most_one_row_and_keeps_cuts_aligned() -> None:
    def on_rank(mesh: Mesh) -> tuple[int, int, tuple[int, ...]]:
        x = hc.shard(torch.ones(1, 2, 8, 4, 4), mesh, {2: "a"})
        F.interpolate(x, scale_factor=2)
        nearest = mesh.world.traffic.moved_bytes
        y = F.interpolate(x, scale_factor=2, mode="trilinear")
        return nearest, mesh.world.traffic.moved_bytes - nearest, y.sharding.cuts[2].partition.points  # type: ignore[attr-defined]

    assert on_two(on_rank) == [(0, 2 * 16 * 4, (0, 8, 16))] * 2


def test_a_result_of_the_same_size_is_no_view() -> None:
    def on_rank(mesh: Mesh) -> Tensor:
        x = hc.shard(torch.ones(1, 1, 6), mesh, {2: "a"})
        for mode in ("nearest", "linear"):
            F.interpolate(x, size=6, mode=mode).add_(1)
        return hc.gather(x)

    assert all(torch.equal(x, torch.ones(1, 1, 6)) for x in on_two(on_rank))


def test_first_asked_in_inference_mode_then_trained() -> None:
    def on_rank(mesh: Mesh) -> float:
        total = 0.0
        for mode in ("nearest", "linear"):
            x = hc.shard(torch.ones(1, 1, 11), mesh, {2: "a"})
            with torch.inference_mode():
                F.interpolate(x, size=29, mode=mode)
            x = hc.shard(torch.ones(1, 1, 11, requires_grad=True), mesh, {2: "a"})
            (slope,) = torch.autograd.grad(F.interpolate(x, size=29, mode=mode).sum(), x)
            total += float(hc.gather(slope).sum())
        return total

    assert all(abs(total - 58) < 1e-4 for total in on_two(on_rank))


def test_what_torch_refuses_or_garbles_is_refused() -> None:
    def on_rank(mesh: Mesh) -> None:
        x = hc.shard(torch.ones(1, 1, 8, 8), mesh, {2: "a"})
        with pytest.raises(ShardingError, match=r"greater than 0.*\[1, 1, 8, 8\]"):
            F.interpolate(x, scale_factor=0.1)
        with pytest.raises(ShardingError, match="only one of size or scale_factor"):
            F.interpolate(x, size=3, scale_factor=2)
        with pytest.raises(Refused, match=r"interpolate in .*: with antialias and a result of width 1.*; resize"):
            F.interpolate(x, size=(4, 1), mode="bilinear", antialias=True)

    on_two(on_rank)


def test_accesses() -> None:
    access = Resample(3, (0, 0, 1, 1, 2, 2), (0, 1, 1, 2, 2, 2))
    assert access.need(Interval(1, 4)) == (Interval(0, 3),)
    assert access.need(Interval(2, 2)) == (Interval(0, 0),)
    assert access.propagate_cut((0, 1, 1, 3), 6) == (0, 2, 2, 6)
    assert Everything(5).need(Interval(1, 2)) == (Interval(0, 5),)
    assert Everything(5).need(Interval(1, 1)) == (Interval(0, 0),)
    assert Everything(5).propagate_cut((0, 2, 5), 9) == (0, 4, 9)


# ---- pools with indices, and the way back ----


def pooling(random: Random, spatial: int, lead: int, shape: list[int]) -> Callable[[Tensor], Any]:
    kernel, stride = random.randint(1, 4), random.choice((None, random.randint(1, 4)))
    padding = random.randint(0, kernel // 2)
    kind = random.choice(("max", "adaptive", "unpool"))
    if kind == "adaptive":
        out = [random.choice((None, 1, random.randint(1, 9))) for _ in range(spatial)]
        return partial(getattr(F, f"adaptive_max_pool{spatial}d"), output_size=out, return_indices=True)
    dilation = random.randint(1, min(2, *shape[lead:]))
    windows = {"kernel_size": kernel, "stride": stride, "padding": padding}
    pool = partial(getattr(F, f"max_pool{spatial}d"), **windows, return_indices=True)
    if kind == "max":
        return partial(pool, dilation=dilation, ceil_mode=random.random() < 0.5)
    unpool = partial(getattr(F, f"max_unpool{spatial}d"), **windows)

    def there_and_back(x: Tensor) -> Tensor:
        values, indices = pool(x, dilation=dilation)
        return unpool(3 * values, indices, output_size=x.shape[lead:])

    return there_and_back


@pytest.mark.sweep
def test_indices_count_through_the_whole_sample() -> None:
    """Among equals, with infinities and NaN; then back to where they came from."""
    random, counts = Random(1), Counter[str]()
    setups = often(100)
    for number in range(setups):
        spatial, lead = random.choice((1, 2, 3)), random.choice((1, 2))
        shape = [2] * lead + [random.randint(1, (24, 12, 7)[spatial - 1]) for _ in range(spatial)]
        function = pooling(random, spatial, lead, shape)
        x = sample(shape, number)
        if number % 3 == 1:
            x = torch.where(x < -1, float("-inf"), x.round())
        elif number % 3 == 2:
            x = torch.where(x < -1.2, float("nan"), x)
        place = placed(random, shape, list(range(lead if random.random() < 0.8 else 0, lead + spatial)))
        found = check_rule(function, x, **place, second_order=number % 3 == 0)
        assert found.verdict in ("exact", "invalid"), (number, shape, place, found)
        counts[found.verdict] += 1
    assert counts["exact"] >= 0.6 * setups, counts


def test_every_name_of_a_pool_with_indices() -> None:
    x = sample([2, 3, 12], 0)
    names = (partial(torch.max_pool1d_with_indices, kernel_size=3), partial(torch.adaptive_max_pool1d, output_size=5))
    for function in (*names, partial(F.max_pool1d, kernel_size=12, return_indices=True)):
        assert check_rule(function, x, cuts=[{2: "a"}], mesh={"a": 4}).verdict == "exact"


def test_indices_of_another_make_reach_anywhere() -> None:
    """Not from a pool of these windows: exact all the same, though every rank then reads all."""
    generator = torch.Generator().manual_seed(4)
    places = torch.stack([torch.randperm(64, generator=generator)[:16].view(4, 4) for _ in range(3)])
    x = sample([3, 4, 4], 0)
    unpool = partial(F.max_unpool2d, kernel_size=2)
    for cuts in ([{1: "a"}, {1: "a"}], [{1: "a", 2: "b"}, None], [{2: "b"}, {1: "a"}]):
        assert check_rule(unpool, x, places, cuts=cuts, mesh={"a": 2, "b": 2}).verdict == "exact"

    def on_rank(mesh: Mesh) -> None:
        bad = hc.shard(torch.where(torch.arange(4).view(4, 1) == 3, 99, places), mesh, {1: "a"})
        values = hc.shard(x, mesh, {1: "a"})
        with pytest.raises(RuntimeError, match="invalid max index"):  # on both ranks, though one alone holds it
            F.max_unpool2d(values, bad, 2)

    on_two(on_rank)


def test_unpooling_what_was_pooled_moves_nothing() -> None:
    def on_rank(mesh: Mesh) -> int:
        values, indices = F.max_pool2d(hc.shard(torch.ones(1, 2, 8, 8), mesh, {2: "a"}), 2, return_indices=True)
        F.max_unpool2d(values, indices, 2)
        return mesh.world.traffic.moved_bytes

    assert sum(on_two(on_rank)) <= 2 * 8  # each tells the other that its indices stay in their windows


# ---- grids ----


@pytest.mark.sweep
@pytest.mark.parametrize("spatial", [2, 3])
def test_grid_sample(spatial: int) -> None:
    random = Random(spatial)
    for number in range(often(40)):
        sizes, out = ([random.randint(1, 7) for _ in range(spatial)] for _ in range(2))
        shape, grid_shape = [2, 2, *sizes], [2, *out, spatial]
        mode = random.choice(["bilinear", "nearest", *["bicubic"] * (spatial == 2)])
        padding = random.choice(("zeros", "border", "reflection"))
        function = partial(F.grid_sample, mode=mode, padding_mode=padding, align_corners=random.random() < 0.5)
        mesh = random.choice(({"a": 3}, {"a": 2, "b": 2}))
        sample_cut, grid_cut = (dict(zip(random.sample(range(n), len(mesh)), mesh, strict=True)) for n in (4, 3))
        cuts = random.choice(([sample_cut], [None, grid_cut], [sample_cut, grid_cut]))
        found = check_rule(function, sample(shape, number), 0.7 * sample(grid_shape, 99), cuts=cuts, mesh=mesh)
        assert found.verdict == "exact", (mode, padding, shape, grid_shape, cuts, mesh, found)


def test_a_whole_grid_leaves_the_result_cut() -> None:
    def on_rank(mesh: Mesh) -> Any:
        theta = torch.eye(2, 3).expand(2, 2, 3)
        x = hc.shard(torch.ones(2, 1, 6, 5), mesh, {2: "a"})
        y = F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)
        assert torch.allclose(hc.gather(y), hc.gather(x), atol=1e-6)
        return y.sharding.cuts[2].partition.points  # type: ignore[attr-defined]

    assert on_two(on_rank) == [(0, 3, 6)] * 2


def test_affine_grid_of_a_cut_batch() -> None:
    for size in ((3, 1, 4, 5), (3, 2, 2, 3, 4)):
        theta = sample([3, len(size) - 2, len(size) - 1], 0)
        function = partial(F.affine_grid, size=size, align_corners=False)
        found = check_rule(function, theta, cuts=[{0: "a"}], mesh={"a": 2}, points=[{0: (0, 0, 3)}])
        assert found.verdict == "exact", found


def test_autocast_gives_every_rank_the_same_dtype() -> None:
    """On the CPU it widens grid_sample and unpooling; a rank with nothing to do must say so too."""

    def on_rank(mesh: Mesh) -> list[torch.dtype]:
        x = hc.shard(torch.ones(1, 1, 4, 4, dtype=torch.bfloat16), mesh, {2: "a"}, points={2: (0, 0, 4)})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values, indices = F.max_pool2d(x, 2, return_indices=True)
            grid = torch.rand(1, 3, 3, 2)
            made = (F.max_unpool2d(values, indices, 2), F.grid_sample(x, grid, align_corners=False))
            return [y._tile.dtype for y in (F.interpolate(x, size=7), *made)]

    assert on_two(on_rank) == [[torch.bfloat16, torch.float32, torch.float32]] * 2


def in_pieces(x: Tensor, options: dict[str, Any], parts: int) -> Tensor:
    """What ``parts`` ranks would make of dim 2, one after the other: on a GPU, ranks cannot be threads in backward."""
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
    given = [options.get(name) for name in names]
    recipe = describe(Operand(0, tuple(x.shape), x.dtype, frozenset({2})), *given, False, x.device.type, False)
    if len(recipe.space) == 2:  # read whole
        return F.interpolate(x, **options)
    access = recipe.reads[0].links[2].access
    cut = Partition(access.propagate_cut(Partition.even(x.shape[2], parts).points, recipe.space[2]))
    made = []
    for piece in filter(lambda piece: piece.size, cut.pieces()):
        (need,) = access.need(piece)
        box = [piece if d == 2 else whole(n) for d, n in enumerate(recipe.space)]
        slots = [Slot((need,), False) if d == 2 else Slot((whole(n),), True) for d, n in enumerate(x.shape)]
        made.append(recipe.local(Work(tuple(box), (tuple(slots),)), x[:, :, need.lo : need.hi].contiguous()))
    return torch.cat(made, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bicubic"])
def test_positions_on_a_gpu_are_its_own(mode: str) -> None:
    random, count = Random(mode), 0
    for number in range(150):
        spatial = 2 if mode == "bicubic" else random.choice((1, 2, 3))
        shape = [1, 5, *(random.randint(1, (40, 20, 9)[spatial - 1]) for _ in range(spatial))]
        options = {**resizing(random, spatial, BLENDS[spatial][0] if mode == "linear" else mode), "antialias": False}
        x = sample(shape, number, random.choice((torch.float32, torch.float64))).cuda().requires_grad_()
        try:
            true = F.interpolate(x, **options)
        except RuntimeError:
            continue
        found, seed = in_pieces(x, options, 3), torch.randn_like(true)
        slopes = [torch.autograd.grad(y, x, seed)[0] for y in (true, found)]
        assert torch.allclose(found, true, atol=2e-5), (options, shape, x.dtype)
        assert torch.allclose(*slopes, atol=2e-4), (options, shape, x.dtype)
        count += 1
    assert count >= 120
