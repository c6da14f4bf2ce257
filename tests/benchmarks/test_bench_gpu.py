"""``bench gpu`` without a GPU: what is counted, in which order cases run, how they may end, and what is shown."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import halocline as hc
from benchmarks import gpu, gpu_case, gpu_child, gpu_count, gpu_profile
from benchmarks.gpu import GpuPlan, make_plan, measure_gpu, ordered
from benchmarks.gpu_case import WAYS, GpuCase, GpuStep
from benchmarks.gpu_child import Children
from benchmarks.gpu_count import StepCounts, count, count_step
from benchmarks.gpu_networks import OF_MONAI, OWN, SUBJECTS, Data, mean_square, no_loss
from halocline.cli.app import app

CEILINGS = {"bf16_tflops": 500.0, "tf32_tflops": 250.0, "copy_tb_s": 4.0}
WORK = StepCounts(flops=1e12, elements=10**9, largest=2**30, kept=2**30)
HUGE = StepCounts(flops=2e14, elements=10**11, largest=2**32, kept=2**36)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "gpu", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def children() -> Children:
    return Children(gpu.PRELOADED)


# ---- what is counted ----


def meta(*shape: int, gradient: bool = False) -> torch.Tensor:
    return torch.empty(shape, device="meta", requires_grad=gradient)


def test_the_work_of_two_convolutions_by_hand() -> None:
    model = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1, bias=False), nn.Conv3d(6, 4, 1, groups=2, bias=False))
    work = count_step(model.to("meta"), Data(meta(1, 2, 4, 4, 4)), no_loss)
    voxels = 64
    first, second = 2 * 6 * 27 * 2 * voxels, 2 * 4 * 3 * voxels  # a group reads 3 of the 6 channels
    assert work.flops == 2 * first + 3 * second  # the volume needs no gradient
    through_first, through_second = 2 * voxels + 2 * 6 * 27 + 6 * voxels, 6 * voxels + 4 * 3 + 4 * voxels
    assert work.elements == 2 * through_first + 3 * through_second
    assert work.largest == 6 * voxels
    assert work.kept == 2 * (2 * voxels + 6 * voxels)  # bytes: both convolutions keep what came in


def test_an_input_gradient_and_a_dense_layer_count() -> None:
    work = count_step(nn.Linear(8, 3).to("meta"), Data(meta(5, 8, gradient=True)), mean_square)
    assert work.flops == 3 * 2 * 5 * 8 * 3
    assert count_step(nn.Linear(8, 3).to("meta"), Data(meta(5, 8)), mean_square).flops == 2 * 2 * 5 * 8 * 3


def test_floors_follow_from_the_ceilings() -> None:
    assert WORK.floors(CEILINGS) == pytest.approx({"flops_ms": 2.0, "bytes_ms": 0.5})
    assert WORK.floors(CEILINGS, full=True) == pytest.approx({"flops_ms": 4.0, "bytes_ms": 1.0})


def test_the_largest_tensor_is_where_the_limit_is_passed() -> None:
    by_size = {size: count(SUBJECTS["unet3d"], size).largest for size in (192, 256)}
    assert by_size[192] == 192 * 192**3  # the last skip joined to what comes up: 64 + 128 channels
    assert by_size[192] < gpu_count.LIMIT <= by_size[256]
    assert count(SUBJECTS["conv"], 512).largest == gpu_count.LIMIT


def test_a_network_that_meta_tensors_cannot_run_has_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> StepCounts:
        raise RuntimeError("no meta kernel")

    monkeypatch.setattr(gpu_count, "count", fail)
    assert gpu_count.count_all([("conv", 8)]) == [None]


# ---- what is run, in which order ----


def test_each_subject_has_sizes_that_it_accepts() -> None:
    for subject in SUBJECTS.values():
        for size in subject.sizes:
            subject.check_size(size)
    assert {subject.name: set(subject.sizes) for subject in OWN} == {
        "unet3d": {128, 192, 256, 320, 384},
        "cosmoflow": {128, 256, 384, 512},
        "conv": {512},
    }
    assert len(OF_MONAI) >= 6


def test_plain_and_halocline_come_first_and_slow_cases_last() -> None:
    plan = make_plan(["conv", "unet3d"], [64, 128], ["tf32", "halocline", "plain"])
    works = dict.fromkeys(plan.pairs, WORK) | {("conv", 64): HUGE, ("unet3d", 128): None}
    cases = ordered(plan, works)
    assert len(cases) == len(set(cases)) == 12
    assert [case.way for case in cases[-4:]] == ["tf32"] * 4
    assert cases[7] == GpuCase("conv", 64, "plain")
    assert cases[0] == GpuCase("conv", 64, "halocline")  # is not slow: the library keeps the fast kernels
    assert cases[-1] == GpuCase("conv", 64, "tf32")


def test_monai_stands_for_all_its_networks() -> None:
    plan = make_plan(["VNet", "monai"], [], ["plain"])
    assert plan.pairs[0][0] == "VNet"
    assert sorted(plan.pairs) == sorted((subject.name, subject.sizes[0]) for subject in OF_MONAI)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--subjects", "unet4d"], "no subject 'unet4d'; there are unet3d, cosmoflow, conv, "),
        (["--ways", "plain,quick"], "no way 'quick'; there are plain, halocline, "),
        (["--sizes", "250"], "unet3d takes cubes whose side is a multiple of 8, not 250"),
        (["--sizes", "big"], "such as 256,320"),
        (["--subjects", ","], "give names with commas"),
    ],
)
def test_bad_options_say_what_is_allowed(arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    code, out, err = run()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    code, out, _ = run("--json")
    assert code == 2
    assert "no CUDA GPU" in json.loads(out)["error"]


@pytest.mark.long
def test_a_cuda_build_without_a_gpu_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # set here, to be unset again
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    with pytest.raises(hc.HaloclineError, match="no CUDA GPU is found"):
        measure_gpu(GpuPlan((("conv", 8),), ("plain",)))


# ---- how a case ends ----


def test_a_crash_and_a_deadline_end_a_child_alone(children: Children) -> None:
    assert children.call(os.abort, deadline=60).error == "crashed: SIGABRT"
    assert children.call(os._exit, 3, deadline=60).error == "crashed: exit status 3"
    assert children.call(time.sleep, 60, deadline=0.2).error == "deadline"
    assert children.call(abs, -2, deadline=60).value == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "out of memory"),
        (RuntimeError("cuDNN: out of memory"), "out of memory"),
        (ModuleNotFoundError("No module named 'monai'"), "not installed"),
        (RuntimeError("CUDA error: an illegal memory access\nmore"), "crashed: CUDA error: an illegal memory access"),
        (ValueError(""), "crashed: ValueError: "),
    ],
)
def test_an_error_becomes_a_few_words(error: Exception, words: str) -> None:
    assert gpu_child.describe(error) == words


def test_a_whole_run_on_the_cpu() -> None:
    said: list[str] = []
    plan = make_plan(["conv"], [8], ["plain", "tf32"], device="cpu")
    result = measure_gpu(plan, said.append)
    assert [(case["way"], case["error"]) for case in result["cases"]] == [("plain", None), ("tf32", None)]
    assert all(case["ms"] > 0 and case["over_floor"] > 0 and case["steps"] >= 1 for case in result["cases"])
    (subject,) = result["subjects"]
    assert subject["best_plain"] in ("plain", "tf32")
    assert subject["halocline_ms"] is None
    assert subject["work"]["flops"] == 2 * 2 * 16 * 4 * 27 * 8**3
    assert not torch.cuda.is_initialized()
    assert any("conv 8, plain" in text for text in said)
    json.dumps(result, allow_nan=False)


def test_what_there_is_no_time_or_package_for_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = make_plan(["conv", "UNet"], [16], ["plain"], minutes=0.0, device="cpu")
    errors = [case["error"] for case in measure_gpu(plan)["cases"]]
    assert errors == [gpu.OUT_OF_TIME, gpu.NOT_INSTALLED]


@pytest.mark.parametrize("subject", ["cosmoflow", "unet3d"])
def test_every_step_starts_from_the_same_weights_and_data(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_case, "hc", SimpleNamespace(distribute=lambda model: model))
    monkeypatch.setitem(WAYS, "full", gpu_case.StepMode(halocline=True, channels_last=False, tf32=True))
    losses = [float(GpuStep(GpuCase(subject, 16, way), "cpu")()) for way in ("tf32", "full")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- what is made of it ----


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolutions"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816dgrad_optimized_bf16_128x128_copy>", "convolutions"),
        ("void at::native::(anonymous namespace)::conv_depthwise3d_cuda_kernel<float>", "convolutions"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "convolutions"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>", "copies and casts"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<>", "copies and casts"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel<>", "norms"),
        ("void cudnn::bn_bw_1C11_kernel_new<float>", "norms"),
        ("triton_red_fused_convolution_native_group_norm_0", "norms"),
        ("triton_poi_fused_convolution_relu_1", "activations and other pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::threshold>", "activations and other pointwise"),
        (
            "void at::native::unrolled_elementwise_kernel<CUDAFunctor_add, LoadWithCast>",
            "activations and other pointwise",
        ),
        ("void at::native::(anonymous namespace)::max_pool3d_with_indices_single_out_frame<>", "pools"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>", "optimizer"),
        ("void at::native::reduce_kernel<512, 1, at::native::MeanOps>", "other"),
    ],
)
def test_kernels_have_families(kernel: str, family: str) -> None:
    assert gpu_profile.family_of(kernel) == family


def event(name: str, us: float, device: str = "CUDA", marked: bool = False) -> Any:
    times = SimpleNamespace(elapsed_us=lambda: us)
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(name=name, time_range=times, device_type=kind, is_user_annotation=marked)


def test_a_profile_counts_kernels_only() -> None:
    events = [event("gemm", 3000), event("gemm", 1000), event("max_pool", 1000), event("aten::mm", 9, "CPU")]
    events += [event("my span", 9, marked=True), event("Optimizer.step#SGD.step", 9)]
    found = gpu_profile.shares(gpu_profile.kernels(events))
    assert found["gpu_ms"] == 5
    assert found["families"]["convolutions"] == {"ms": 4, "share": 0.8}
    assert found["kernels"][0] == {"name": "gemm", "ms": 4, "calls": 2}
    assert gpu_profile.shares([])["families"]["pools"]["share"] == 0


def case(way: str, ms: float | None, error: str | None = None, peak: int = 2**30) -> dict[str, Any]:
    found = {**asdict(GpuCase("conv", 8, way)), "error": error}
    if ms is None:
        return found
    return {**found, "ms": ms, "steps": 3, "peak_bytes": peak, "reserved_bytes": 2 * peak, "losses": [1.0, 0.5]}


def canned(halocline_ms: float = 10.0) -> dict[str, Any]:
    ours = {**case("halocline", halocline_ms, peak=2**29), "losses": [1.0, 0.55]}
    cases = [case("plain", 40.0), ours, case("compiled", 20.0), case("tf32", None, "crashed: [x] y")]
    cases.append({**case("plain", None, gpu.OUT_OF_TIME), "size": 16})
    cases.append({**case("plain", None, gpu.NOT_INSTALLED), "subject": "VNet", "size": 416})
    works: dict[gpu.Pair, StepCounts | None] = {("conv", 8): WORK, ("conv", 16): None, ("VNet", 416): None}
    profiled = {**asdict(GpuCase("conv", 8, "halocline")), **gpu_profile.shares([("gemm", 3.0)]), "error": None}
    return {
        "cases": [gpu.with_floor(one, works, CEILINGS) for one in cases],
        "subjects": [gpu.summary(pair, work, gpu.by_way(cases, pair), CEILINGS) for pair, work in works.items()],
        "ceilings": {**CEILINGS, "error": None},
        "profile": {**profiled, "floor": WORK.floors(CEILINGS)},
        "machine": {"card": "H0", "cuda": "13", "cudnn": 9, "torch": "2"},
        "seconds": 1.0,
    }


def test_the_library_is_held_to_the_fastest_plain_way() -> None:
    result = canned()
    first, second, _ = result["subjects"]
    assert (first["best_plain"], first["best_plain_ms"], first["speedup"]) == ("compiled", 20.0, 2.0)
    assert (first["memory_ratio"], first["loss_difference"]) == (0.5, pytest.approx(0.1))
    assert second["best_plain"] is second["speedup"] is second["floor"] is None
    assert [one["over_floor"] for one in result["cases"]][:4] == [20.0, 5.0, 10.0, None]


def test_losses_that_overflow_agree_with_nothing() -> None:
    assert gpu.difference([1.0, None], [1.0, 2.0]) is None
    assert gpu.difference([], [1.0]) is None
    assert gpu.difference([2.0], [1.0, 5.0]) == 0.5
    assert [gpu_case.finite(value) for value in (1.5, float("nan"))] == [1.5, None]


def test_the_command_shows_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GpuPlan] = []
    monkeypatch.setattr(gpu, "measure_gpu", lambda plan, say: asked.append(plan) or canned())
    code, out, _ = run("--subjects", "conv", "--sizes", "8, 16", "--ways", "halocline, plain", "--minutes", "2")
    assert (code, asked[0]) == (0, GpuPlan((("conv", 8), ("conv", 16)), ("plain", "halocline"), 2.0))
    for words in (
        "2.00x",
        "0.50x",
        "1.0e-01",
        "/ 2^31",
        "20.00x",
        "crashed: [x] y",
        "500 TFLOP/s",
        "H0",
        "floor of the arithmetic",
        "none ran",
        "MONAI is not installed",
        "1 of 6 cases were not run",
    ):
        assert words in out
    assert out.index("Every case") < out.index("Plain PyTorch beside halocline")
    assert json.loads(run("--json", "--profile")[1])["subjects"][0]["speedup"] == 2.0
    assert asked[-1].profile


def test_a_profile_that_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {**asdict(GpuCase("conv", 8, "halocline")), "error": "out of memory", "floor": None}
    result = {**canned(), "profile": failed, "ceilings": {**dict.fromkeys(CEILINGS), "error": "deadline"}}
    monkeypatch.setattr(gpu, "measure_gpu", lambda plan, say: result)
    code, out, _ = run()
    assert code == 0
    assert "out of memory" in out
    assert "deadline" in out


def test_help_teaches() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "halocline bench gpu --subjects unet3d --sizes 256" in out
