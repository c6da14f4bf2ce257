"""Padding and cropping on cut tensors against one rank, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from halocline.geometry import Interval, Mirror
from halocline.testing.compare import Comparison, check_rule
from halocline.world import Mesh, run_local

SETUPS = often(75)
MODES = ("constant", "reflect", "replicate", "circular")


@dataclass
class Setup:
    """A call, its sample, and how that is cut; printed when it goes wrong."""

    call: Callable[[Tensor], Tensor]
    shape: list[int]
    cuts: dict[int, str]
    mesh: dict[str, int]
    points: dict[int, list[int]]

    def compare(self, second_order: bool = False) -> Comparison:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return check_rule(
            self.call, x, cuts=[self.cuts], mesh=self.mesh, points=[self.points], second_order=second_order
        )


def amounts(random: Random, mode: str, size: int) -> list[int]:
    """Nothing, pads up to what torch takes of this mode, or a crop on one side or both that leaves something."""
    kind = random.random()
    if kind < 0.2:
        return [0, 0]
    if kind < 0.3:
        return [-random.randint(0, (size - 1) // 2) for _ in range(2)]
    crop = random.randint(0, (size - 1) // 2) if kind < 0.5 else 0
    most = min(9, {"constant": 9, "reflect": size - 1, "replicate": 9, "circular": size - crop}[mode])
    return random.sample([-crop if crop else random.randint(0, most), random.randint(0, most)], 2)


def setups(mode: str, count: int, seed: int = 0) -> Iterator[Setup]:
    random = Random(f"{mode} {seed}")
    for _ in range(count):
        spatial = random.choice((1, 1, 2, 2, 3))
        lead = [2, 2] if random.random() < 0.7 else [3]
        shape = lead + [random.randint(1, (20, 9, 5)[spatial - 1]) for _ in range(spatial)]
        padded = random.randint(1, len(shape)) if mode == "constant" else spatial
        pads = [amount for size in shape[: -padded - 1 : -1] for amount in amounts(random, mode, size)]
        value = random.choice((0.0, -1.5, float("inf"))) if mode == "constant" else None
        yield Setup(
            partial(F.pad, pad=pads, mode=mode, value=value),
            shape,
            *place(random, shape, cuttable(random, shape, len(lead))),
        )


def cuttable(random: Random, shape: list[int], lead: int) -> range:
    """Batch and channels are cut now and then."""
    return range(0 if random.random() < 0.2 else lead, len(shape))


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_any_padding_and_any_cut_is_exact(mode: str) -> None:
    for number, setup in enumerate(setups(mode, SETUPS)):
        found = setup.compare(second_order=number % 4 == 0)
        assert found.verdict == "exact", (setup, found)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_need_holds_every_source(mode: str, size: int) -> None:
    for before in range(-size + 1, size):
        for after in range(-size + 1, size):
            mirror = Mirror(size, before, mode, after)
            out = size + before + after
            if mirror.kept.empty or out < 1 or max(before, after) > mirror.kept.size:
                continue
            for lo in range(out):
                sources = [mirror.source(i) for i in range(lo, out)]
                needs = mirror.need(Interval(lo, out))
                assert all(0 <= need.lo < need.hi <= size for need in needs)
                if mode == "circular":
                    assert [i for need in needs for i in range(*need)] == sources
                else:
                    assert needs == (Interval(min(sources), max(sources) + 1),)


def padding_modules() -> Iterator[nn.Module]:
    for spatial in (1, 2, 3):
        pads = [2, 1, 0, 3, 1, 1][: 2 * spatial]
        for kind in ("ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad"):
            yield getattr(nn, f"{kind}{spatial}d")(tuple(pads))
        yield getattr(nn, f"ConstantPad{spatial}d")((-1, *pads[1:]), 0.7)


@pytest.mark.parametrize("module", list(padding_modules()), ids=str)
def test_modules(module: nn.Module) -> None:
    spatial = int(type(module).__name__[-2])
    x = torch.rand(2, 3, *(5, 7, 6)[:spatial], dtype=torch.float64)
    for cuts in ({2: "a"}, {1 + spatial: "a", 0: "b"}):
        found = check_rule(module, x, cuts=[cuts], mesh={"a": 3, "b": 2}, second_order=True)
        assert found.verdict == "exact", found


@pytest.mark.parametrize("mode", ["zeros", *MODES[1:]])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_with_every_padding_mode(spatial: int, mode: str) -> None:
    x = torch.rand(2, 2, *(9, 6, 5)[:spatial], dtype=torch.float64)
    for options in ({"padding": 2}, {"padding": "same", "dilation": 2}, {"padding": 1, "stride": 2}):
        kind: Any = getattr(nn, f"Conv{spatial}d")
        module = kind(2, 3, 3, padding_mode=mode, **options).double().requires_grad_(False)
        found = check_rule(
            module, x, cuts=[{2: "a", 1 + spatial: "b"} if spatial > 1 else {2: "a"}], mesh={"a": 3, "b": 2}
        )
        assert found.verdict == "exact", (module, found)


def traffic(function: Callable[[Tensor], Tensor], x: Tensor, cuts: dict[int, str], **mesh: int) -> list[int]:
    """Bytes moved by a call and its backward pass, on each rank."""

    def on_rank() -> int:
        layout = Mesh(**mesh)
        tile = hc.shard(x, layout, cuts).requires_grad_()
        layout.world.traffic.clear()
        function(tile).sum().backward()
        return layout.world.traffic.moved_bytes

    return run_local(torch.Size(mesh.values()).numel(), on_rank)


@pytest.mark.parametrize("mode", MODES[:3])
def test_tiles_stay_where_they_are(mode: str) -> None:
    pad = partial(F.pad, pad=(2, 3, 1, 3), mode=mode)
    assert traffic(pad, torch.rand(1, 2, 16, 16), {2: "a", 3: "b"}, a=2, b=3) == [0] * 6


def test_a_wrap_moves_only_what_wraps_and_an_unpadded_dim_nothing() -> None:
    x = torch.rand(1, 1, 16, 8)
    rows = partial(F.pad, pad=(1, 1, 0, 0), mode="circular")
    assert traffic(rows, x, {2: "a"}, a=4) == [0] * 4
    ends = partial(F.pad, pad=(0, 0, 1, 1), mode="circular")
    row = 8 * 4
    assert traffic(ends, x, {2: "a"}, a=4) == [2 * row, 0, 0, 2 * row]


def test_dtypes_are_kept() -> None:
    """Values are copied bit by bit; gradients add up, and are averaged over the ranks."""
    for dtype, tolerance in (
        (torch.int64, 0.0),
        (torch.float32, 1e-6),
        (torch.bfloat16, 2e-2),
        (torch.complex128, 1e-8),
    ):
        for mode in MODES:
            x = (10 * torch.rand(2, 3, 7)).to(dtype)
            call = partial(F.pad, pad=(3, 2), mode=mode)
            found = check_rule(call, x, cuts=[{2: "a"}], mesh={"a": 3}, tolerance=tolerance)
            assert found.verdict == "exact", (dtype, mode, found)
    flags = torch.rand(2, 3, 7) > 0.5
    assert check_rule(partial(F.pad, pad=(1, 1), value=True), flags, cuts=[{2: "a"}], mesh={"a": 3}).verdict == "exact"


@pytest.mark.parametrize(
    ("pads", "mode", "why"),
    [
        ((8, 0), "reflect", "less than the corresponding input dimension"),
        ((9, 0), "circular", "wrapping around more than once"),
        ((-6, 4), "circular", "of the 2 elements kept"),
        ((-4, -4), "replicate", "too small"),
        ((1, 1), "mirror", "mirror"),
        ((1,), "constant", "divisible by 2"),
        ((1, 1, 1, 1, 1, 1), "reflect", "not supported"),
    ],
)
def test_limits_are_those_of_the_global_size(pads: tuple[int, ...], mode: str, why: str) -> None:
    def on_rank() -> None:
        x = hc.shard(torch.ones(1, 2, 8), Mesh(a=2), {2: "a"})
        with pytest.raises(ShardingError, match=why):
            F.pad(x, pads, mode)

    run_local(2, on_rank)


def test_a_pad_wider_than_a_tile_but_not_than_the_sample_is_allowed() -> None:
    for mode in MODES:
        x = torch.rand(1, 2, 8, dtype=torch.float64)
        assert check_rule(partial(F.pad, pad=(7, 7), mode=mode), x, cuts=[{2: "a"}], mesh={"a": 4}).verdict == "exact"


def test_the_result_is_a_copy() -> None:
    """Written in place, a padded tensor must leave the one it came from alone, on inner ranks too."""

    plain = torch.rand(1, 1, 12)

    def on_rank() -> None:
        x = hc.shard(plain, Mesh(a=3), {2: "a"})
        for mode in MODES:
            for pads in ((1, 1), (0, 0), (-1, 0)):
                F.pad(x, pads, mode).add_(1)
                assert torch.equal(hc.gather(x), plain), (mode, pads)

    run_local(3, on_rank)


def test_constant_pad_nd() -> None:
    x = torch.rand(3, 7, dtype=torch.float64)
    call = partial(torch.constant_pad_nd, pad=(2, -1, 1, 0), value=3.0)
    assert check_rule(call, x, cuts=[{0: "a", 1: "b"}], mesh={"a": 2, "b": 2}).verdict == "exact"
