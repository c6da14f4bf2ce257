"""``halocline bench gpu``: the command, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from halocline.cli.output import (
    Debug,
    Json,
    clear_errors,
    fact_table,
    print_json,
    progress_console,
    say,
    size_text,
    stdout,
)
from halocline.errors import HaloclineError

COMMAND = "bench gpu"
LIMIT = 2**31

Subjects = Annotated[
    str, typer.Option("--subjects", help="Networks, with commas between them; monai is all of MONAI's.")
]
Sizes = Annotated[str, typer.Option("--sizes", help="Sides of the cubes, such as 256,320; each subject has its own.")]
Ways = Annotated[str, typer.Option("--ways", help="Ways to run a step; the library's own begin with halocline.")]
Minutes = Annotated[float, typer.Option("--minutes", min=0.1, help="When they are over, no further case is begun.")]
Profiled = Annotated[bool, typer.Option("--profile", help="Of the first subject and size: where the GPU's time goes.")]


def gpu(
    subjects: Subjects = "unet3d,cosmoflow,conv,monai",
    sizes: Sizes = "",
    ways: Ways = "plain,halocline,contiguous,compiled,tf32,halocline-contiguous,halocline-compiled",
    minutes: Minutes = 8.0,
    profile: Profiled = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Is a training step on one large GPU faster with the library than without? Plain PyTorch beside it.

    From 2^31 elements of one tensor on, cuDNN's fast ways are closed: plain PyTorch becomes many times slower, or
    crashes. `hc.distribute(model)` cuts such work into slabs on the same device. Networks of the field are trained on
    one volume, below that limit and above it, each way in a process of its own, so that a crash or a full memory ends
    that case alone. A step is forward, loss, backward and SGD with momentum, under autocast to bf16.

    **Ways**: *plain* is eager and channels-last, *contiguous* the same in torch's usual layout, *compiled* goes through
    torch.compile, *tf32* is float32 with TF32 allowed; *halocline* is plain after `hc.distribute(model)`, and there is
    *halocline-contiguous* and *halocline-compiled*.

    **Examples**

    - `halocline bench gpu`: everything that eight minutes allow for, the most telling first.

    - `halocline bench gpu --subjects unet3d --sizes 256 --ways plain,halocline`: one comparison, in a minute.

    - `halocline bench gpu --subjects BasicUNet,SegResNet --minutes 4`: two of MONAI's networks, if it is installed.

    - `halocline bench gpu --subjects unet3d --sizes 256 --ways halocline --profile`: what the step is made of.

    - `halocline bench gpu --json | tail -1`: everything, machine and losses too.

    **Reading it**: *floor* is what no step goes below: the larger of the convolutions' and products' arithmetic at the
    rate of a large matrix product, and their operands read and results written once at the rate of a large copy, both
    measured in the same run; all else is thought of as free. *speed-up* is over the fastest plain way that ran,
    *memory* the peak beside plain's, *losses* the largest relative difference from plain's over the first steps.

    **Exit status**: 0 measured (what failed is in the table), 2 no GPU, or a subject, size or way that is not there.
    """
    from ..gpu import NoGpu, make_plan, measure_gpu

    progress = progress_console()
    with clear_errors(COMMAND, debug):
        plan = make_plan(words(subjects), numbers(sizes), words(ways), minutes=minutes, profile=profile)
        try:
            result = measure_gpu(plan, lambda text: say(progress, escape(text)))
        except NoGpu as error:
            if as_json:
                print_json({"error": str(error)})
            raise
    if as_json:
        print_json(result)
    else:
        show_gpu(result)


def words(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise HaloclineError(f"{text!r}: give names with commas between them, such as unet3d,conv or plain,halocline")
    return parts


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise HaloclineError(f"{text!r}: give sizes with commas between them, such as 256,320") from error


def show_gpu(result: Mapping[str, Any]) -> None:
    """The longest table first: the one to read is the last."""
    stdout().print(case_table(result["cases"]))
    if result["profile"]:
        stdout().print(profile_table(result["profile"]))
    stdout().print(machine_table(result))
    stdout().print(subject_table(result["subjects"]))
    for line in remarks(result["cases"]):
        say(stdout(), line)


def table_of(title: str, *columns: str, left: int = 1) -> Table:
    """The first ``left`` columns are words, the rest numbers."""
    table = Table(title=title, title_style="bold", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def case_table(cases: Iterable[Mapping[str, Any]]) -> Table:
    headings = ("network", "way", "size", "ms\na step", "over\nfloor", "peak", "reserved")
    table = table_of("Every case (medians)", *headings, left=2)
    for case in cases:
        table.add_row(case["subject"], case["way"], str(case["size"]), *case_cells(case))
    return table


def case_cells(case: Mapping[str, Any]) -> Iterable[str]:
    yield "failed" if case["error"] else figure(case.get("ms"), ".1f")
    yield figure(case["over_floor"], ".2f", "x")
    yield size_text(case["peak_bytes"]) if case.get("peak_bytes") else ""
    yield size_text(case["reserved_bytes"]) if case.get("reserved_bytes") else ""


def figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def profile_table(profile: Mapping[str, Any]) -> Table:
    title = f"GPU time of a step: {profile['subject']} {profile['size']}, {profile['way']}"
    if profile["error"]:
        return fact_table(title, {"": profile["error"]})
    table = table_of(title, "family", "ms", "share")
    for family, figures in profile["families"].items():
        table.add_row(family, f"{figures['ms']:.1f}", f"{figures['share']:.1%}")
    table.add_section()
    table.add_row("all kernels", f"{profile['gpu_ms']:.1f}", "")
    if profile["floor"]:
        table.add_row("floor of the arithmetic", f"{profile['floor']['flops_ms']:.1f}", "")
    return table


def machine_table(result: Mapping[str, Any]) -> Table:
    machine, ceilings = result["machine"], result["ceilings"]
    facts = {
        "card": str(machine.get("card", "none")),
        "torch": f"{machine['torch']}, CUDA {machine.get('cuda')}, cuDNN {machine.get('cudnn')}",
        "matrix product, bf16": figure(ceilings["bf16_tflops"], ".0f", " TFLOP/s"),
        "matrix product, TF32": figure(ceilings["tf32_tflops"], ".0f", " TFLOP/s"),
        "copy, read and written": figure(ceilings["copy_tb_s"], ".2f", " TB/s"),
    }
    if ceilings["error"]:
        facts["ceilings"] = escape(ceilings["error"])
    return fact_table("The machine", facts)


def subject_table(subjects: Iterable[Mapping[str, Any]]) -> Table:
    headings = (
        "size",
        "largest\n/ 2^31",
        "floor\nms",
        "plain\nms",
        "halocline\nms",
        "speed\nup",
        "mem-\nory",
        "losses\ndiffer",
    )
    table = table_of("Plain PyTorch beside halocline", "network,\nbest plain", *headings)
    for subject in subjects:
        names = f"{subject['subject']}\n[dim]{subject['best_plain'] or 'none ran'}[/dim]"
        table.add_row(names, *subject_cells(subject))
    return table


def subject_cells(subject: Mapping[str, Any]) -> Iterable[str]:
    yield str(subject["size"])
    yield f"{subject['work']['largest'] / LIMIT:.2f}" if subject["work"] else ""
    yield figure(max(subject["floor"].values()) if subject["floor"] else None, ".1f")
    yield figure(subject["best_plain_ms"], ".1f")
    yield figure(subject["halocline_ms"], ".1f")
    yield figure(subject["speedup"], ".2f", "x")
    yield figure(subject["memory_ratio"], ".2f", "x")
    yield figure(subject["loss_difference"], ".1e")


def remarks(cases: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    listed = list(cases)
    for case in listed:
        if case["error"] and case["error"] != "not installed" and not case["error"].startswith("not run"):
            yield escape(f"{case['subject']}, {case['way']}, {case['size']}: {case['error']}")
    absent = dict.fromkeys(case["subject"] for case in listed if case["error"] == "not installed")
    if absent:
        yield f"not measured, for MONAI is not installed (pip install monai einops): {', '.join(absent)}"
    late = sum((case["error"] or "").startswith("not run") for case in listed)
    if late:
        what = f"{late} of {len(listed)} cases were not run"
        yield f"[yellow]{what}[/yellow]: out of time; give more --minutes or fewer cases"
