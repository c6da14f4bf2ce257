"""The check itself: it must find what is wrong as surely as it finds what is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halocline as hc
from halocline.testing.check import BadUsage, NetworkReport, _error, _verdict, check_network
from halocline.testing.pool import Outcome, RankError, RankPool, shared_pool
from halocline.testing.task import make_model, make_task, remarks

KEYS = {
    *("target", "verdict", "output_error", "gradient_error", "worst_parameter", "refusals", "activation_ratio"),
    *("moved_bytes", "gathered_bytes", "ranks", "cut"),
}
VOLUME = [[1, 2, 8, 8, 8]]


def check(target: str, **options: Any) -> NetworkReport:
    return check_network(target, pool=shared_pool(2), **options)


# ---- networks to check; ranks import them from here ----


class Calls(nn.Module):
    """A convolution, and then whatever is given."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.then = nn.Conv3d(2, 2, 3, padding=1), then

    def forward(self, volume: Tensor) -> Any:
        return self.then(self.first(volume))


class Picks(nn.Module):
    """Planes by number, which might be any: all of them come together, and what follows is whole."""

    def forward(self, volume: Tensor) -> Tensor:
        return volume[:, :, torch.arange(volume.shape[2])]


class Many(nn.Module):
    """Three inputs (a volume, one like it with other channels, a whole vector) and outputs in a dict."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv3d(channels, 2, 3, padding=1), nn.BatchNorm3d(2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, volume: Tensor, mask: Tensor, scale: Tensor) -> dict[str, Any]:
        y = self.norm(self.convolution(volume)) * mask
        return {"y": y, "more": (y.mean((2, 3, 4)) * scale, [y.argmax(1)], "no tensor")}


def many(channels: int) -> nn.Module:
    return Many(channels)


def unknown() -> nn.Module:
    return Calls(lambda x: torch.renorm(torch.expand_copy(x, x.shape), 2, 0, 1.0))


def untrue() -> nn.Module:
    if dist.is_initialized():  # on the ranks alone
        hc.composite(torch.special.i1)(lambda x: x * 0.5)
    return Calls(torch.special.i1)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: complex weights, and a buffer that takes the lowest modes."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(2, 2, 4, 4, 3, dtype=torch.cfloat))

    def forward(self, volume: Tensor) -> Tensor:
        modes = torch.fft.rfftn(volume, dim=(2, 3, 4))
        kept = torch.zeros(modes.shape, dtype=self.kind)
        backend = sys.modules[type(modes).__module__.split(".")[0]]  # as opt_einsum finds the library to call
        kept[:, :, :4, :4, :3] = backend.einsum("bixyz,ioxyz->boxyz", modes[:, :, :4, :4, :3], self.weight).to(
            self.kind
        )
        return torch.fft.irfftn(kept, s=volume.shape[2:], dim=(2, 3, 4)).to(volume.dtype)


def spectral() -> nn.Module:
    return Spectral(torch.cdouble)


class Single(nn.Module):
    """Computes in float32, whatever comes in; on the ranks alone it may be a little off."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.first, self.off = nn.Conv3d(2, 2, 3, padding=1), off

    def forward(self, volume: Tensor) -> Tensor:
        found = nn.functional.conv3d(volume.float(), self.first.weight.float(), self.first.bias.float(), padding=1)
        return found.to(volume.dtype) * (1 + self.off * dist.is_initialized())


def gathers() -> nn.Module:
    return nn.Sequential(Picks(), nn.Conv3d(2, 2, 3, padding=1))


def level() -> nn.Module:
    return Calls(lambda x: x * 0)


def fails() -> nn.Module:
    return Calls(lambda x: x.view(-1, 7))


def no_module() -> int:
    return 3


number = 4


# ---- verdicts ----


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("unet3d", "float64"),
        ("cosmoflow", "float32"),
        pytest.param("unet3d", "float32", marks=pytest.mark.long),
        pytest.param("cosmoflow", "float64", marks=pytest.mark.long),
    ],
)
def test_built_in_networks_are_exact(target: str, dtype: str) -> None:
    shapes = [[1, 1, 16, 16, 16]] if target == "unet3d" else [[1, 2, 24, 24, 24]]
    report = check(target, arguments={"width": 2}, shapes=shapes, dtype=dtype, steps=3)
    assert report.verdict == "exact"
    assert (report.ranks, report.cut, report.dtype) == (2, {"depth": 2}, dtype)
    assert max(report.output_error, report.buffer_error, report.loss_error) <= (1e-8 if dtype == "float64" else 1e-4)
    assert report.gradient_error <= report.tolerance
    assert 0.4 < report.activation_ratio < 0.75
    assert report.moved_bytes > 0
    assert report.messages > 0
    assert set(report.gathers) <= ({"flatten in head.0"} if target == "cosmoflow" else set())


@pytest.mark.parametrize("cut", [{"depth": 2}, {"data": 2}, {"width": 2}])
def test_several_inputs_and_outputs(cut: dict[str, int]) -> None:
    shapes = [[2, 3, 7, 6, 5], [2, 1, 7, 6, 5], [2]]
    report = check("test_check:many", arguments={"channels": 3}, shapes=shapes, cut=cut)
    assert report.verdict == "exact"
    assert 0 < report.gradient_error <= 1e-8


def test_a_wrong_rule_is_found() -> None:
    report = check("test_check:untrue", shapes=VOLUME)
    assert report.verdict == "wrong"
    assert report.output_error > 1e-3
    assert report.gradient_error > 1e-3


def test_complex_weights_stay_complex() -> None:
    task = make_task("test_check:spectral", shapes=VOLUME)
    assert next(make_model(task).parameters()).dtype == torch.complex128
    found = check("test_check:spectral", shapes=VOLUME)
    assert found.verdict != "wrong" and found.gradient_error < 1e-12 and found.noise is None


def test_a_network_that_computes_in_float32_is_held_to_its_own_noise() -> None:
    found = check("test_check:Single", shapes=VOLUME)
    assert found.verdict != "wrong"
    assert 1e-8 < found.noise < 1e-6
    assert found.gradient_error <= found.tolerance <= 1e-5


def test_noise_excuses_no_more_than_a_hundred_thousandth() -> None:
    found = check("test_check:Single", shapes=VOLUME, arguments={"off": 3e-5})
    assert found.verdict == "wrong"
    assert found.noise is not None and found.output_error > 1e-5


def test_a_refusal_has_four_parts_and_names_every_function_without_rule() -> None:
    report = check("test_check:unknown", shapes=VOLUME)
    assert report.verdict == "refused"
    (refusal,) = report.refusals
    assert set(refusal) == {"operation", "place", "why", "remedy"}
    assert (refusal["operation"], refusal["place"]) == ("expand_copy", "Calls")
    assert report.without_rule == ["expand_copy", "renorm"]
    assert report.output_error is None


def test_gathering_the_volume_is_said() -> None:
    report = check("test_check:gathers", shapes=VOLUME)
    assert (report.verdict, report.gathered_bytes > 0) == ("gathered", True)
    assert report.activation_ratio > 0.75


def test_a_gradient_that_is_all_zero_is_said() -> None:
    report = check("test_check:level", shapes=VOLUME)
    assert (report.verdict, report.gradient_zero) == ("exact", True)


def test_another_failure_on_a_rank_is_an_error() -> None:
    class Failing:
        def run(self, *_: object, **__: object) -> None:
            raise RankError([Outcome(0, "hung"), Outcome(1, "error", error=ValueError("not here"))])

    with pytest.raises(RankError, match="rank 1 raised ValueError: not here"):
        check_network("test_check:level", shapes=VOLUME, pool=cast(RankPool, Failing()))


def test_ranks_that_take_too_long_are_told_with_what_helps() -> None:
    class Slow:
        def run(self, *_: object, **__: object) -> None:
            raise RankError(
                [Outcome(0, "hung", text="was still running after 9.0 s, at\n a stack"), Outcome(1, "value")]
            )

    with pytest.raises(
        BadUsage, match=r"^rank 0 was still running after 9\.0 s; give more time, such as --deadline 600$"
    ):
        check_network("test_check:level", shapes=VOLUME, pool=cast(RankPool, Slow()))


def test_a_cut_that_will_be_slow_is_told_before_ranks_start() -> None:
    few = make_task("test_check:level", shapes=VOLUME, cut={"depth": 2})
    assert remarks(few, 2) == []
    many = make_task("test_check:level", shapes=VOLUME, cut={"depth": 12})
    crowded, idle = remarks(many, 2)
    assert crowded.startswith("12 ranks share 2 cores") and idle.startswith("depth=12 cuts a dim of 8: 4 ranks")
    said: list[str] = []
    check("test_check:level", shapes=VOLUME, cut={"height": 2}, remark=said.append)
    assert all("cores" in text or "core:" in text for text in said)  # of a machine with one core


def test_no_number_is_infinitely_wrong() -> None:
    nothing, one = torch.full((2,), float("nan")), torch.ones(2)
    assert _error(nothing, one, 0.0) == _error(None, one, 0.0) == _error(one, None, 0.0) == float("inf")
    assert _error(None, one * 0, 0.0) == _error(nothing, nothing, 0.0) == 0


def test_little_memory_saved_counts_only_where_something_was_gathered() -> None:
    verdicts = [
        _verdict(True, gathered, ratio, ranks) for gathered in (0, 1) for ratio in (0.6, 0.8) for ranks in (3, 4)
    ]
    assert verdicts == ["exact"] * 4 + ["exact", "gathered", "gathered", "gathered"]
    assert _verdict(False, 1, 0.1, 2) == "wrong"


def test_the_report_is_json() -> None:
    shown = NetworkReport("unet3d", "wrong", output_error=float("inf"), gradient_error=1e-3).as_json()
    assert set(shown) > KEYS
    assert json.loads(json.dumps(shown, allow_nan=False))["output_error"] == sys.float_info.max


# ---- bad usage ----

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("unet", {}, r"no network 'unet' \(did you mean unet3d\?\); it is unet3d, cosmoflow, mlperf_cosmoflow, "),
    ("test_check:many", {}, "Give a shape for each input, such as --shape 1,1,32,32,32"),
    ("unet3d", {"shapes": [[1, 1, 32, 32]]}, "takes one input of 5 dims such as 1,1,32,32,32; got 1,1,32,32"),
    ("unet3d", {"shapes": [[1, 1, 0, 8, 8]]}, "a row of sizes from 1"),
    ("unet3d", {"cut": {"deep": 2}}, "no axis 'deep'.*its axes are data, depth, height, width"),
    ("a:b", {"shapes": [[1, 1, 8, 8]], "cut": {"depth": 2}}, "no axis 'depth'.*its axes are data, height, width"),
    ("unet3d", {"cut": {"depth": 2}, "ranks": 4}, "depth=2 makes 2 ranks, not 4"),
    ("unet3d", {"cut": {"depth": 0}}, "over one rank or more"),
    ("unet3d", {"ranks": 0}, "over one rank or more"),
    ("unet3d", {"dtype": "float16"}, "it is float64 or float32"),
    ("unet3d", {"steps": -1}, "0 or more"),
    ("unet3d", {"arguments": {"wide": 8}}, "unet3d cannot be built with .*'wide'"),
    ("no_such_module:factory", {"shapes": VOLUME}, "cannot find no_such_module:factory"),
    ("test_check:no_such_name", {"shapes": VOLUME}, "cannot find test_check:no_such_name"),
    ("test_check:number", {"shapes": VOLUME}, "must be a function"),
    ("test_check:no_module", {"shapes": VOLUME}, "must return a torch.nn.Module"),
    ("test_check:fails", {"shapes": VOLUME}, "fails on one rank, before any cut: RuntimeError"),
]


@pytest.mark.parametrize(("target", "options", "message"), BAD)
def test_bad_usage_says_what_is_allowed(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        check(target, **options)


def test_the_cut_falls_on_the_first_spatial_dim() -> None:
    assert make_task("a:b", shapes=[[1, 1, 8, 8, 8]], ranks=3).cut == {"depth": 3}
    assert make_task("a:b", shapes=[[1, 1, 8, 8]]).cut == {"height": 2}
    assert make_task("a:b", shapes=[[4, 9]]).cut == {"data": 2}


def test_inputs_are_cut_as_the_volume_where_they_have_its_size() -> None:
    shapes = [[2, 1, 4, 5, 6], [2, 4, 5, 6], [1, 3, 4, 5, 6], [2, 6], [4, 5, 6]]
    task = make_task("a:b", shapes=shapes, cut={"data": 2, "depth": 2, "width": 2})
    assert [task.dims(index) for index in range(5)] == [
        {0: "data", 2: "depth", 4: "width"},
        {0: "data", 1: "depth", 3: "width"},
        {2: "depth", 4: "width"},
        {},
        {0: "depth", 2: "width"},
    ]
