"""``halocline bench pipeline``: the command, and its table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from halocline.cli.output import Debug, Json, clear_errors, fact_table, print_json, progress_console, say, stdout

Ranks = Annotated[str, typer.Option("--ranks", help="Numbers of sleeping stages, such as 2,3,4.")]
Counts = Annotated[str, typer.Option("--microbatches", help="Numbers of micro-batches, such as 4,8.")]
Sleep = Annotated[float, typer.Option("--sleep", min=0.001, help="Seconds of a forward; a backward takes two of them.")]
Width = Annotated[int, typer.Option("--width", min=1, help="Of the network beside torch's.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Steps of each; the median counts.")]
Deep = Annotated[
    bool, typer.Option("--deep", help="A ResNet of 1,001 layers instead, hybrid against data parallel, as root.")
]
Kinds = Annotated[
    bool, typer.Option("--kinds", help="A recommender on slow ranks and a fast one instead, placed by cost, as root.")
]
Rates = Annotated[str, typer.Option("--rates", help="Speeds of every link with --deep.")]


def pipeline(
    ranks: Ranks = "2,3,4",
    microbatches: Counts = "4,8",
    sleep: Sleep = 0.1,
    width: Width = 512,
    repeat: Rounds = 7,
    deep: Deep = False,
    rates: Rates = "20mbit,1gbit",
    kinds: Kinds = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How long does a pipelined step take beside torch.distributed.pipelining, and how large are the bubbles?

    Two ranks train the same network in the same two stages with GPipe and 1F1B, our step and torch's in turn. Then
    stages that sleep where they would compute show the bubble of each schedule, and stages cut automatically show how
    even they are. With `--deep`, four ranks on an emulated cluster, with a share of a core each, train a ResNet of
    1,001 layers in two stages of two replicas, and on four replicas alone. With `--kinds`, four slow ranks and a fast
    one train `ctr`, whose table the fast rank has no memory for.

    **Examples**

    - `halocline bench pipeline`: a table, in about four minutes.

    - `halocline bench pipeline --json | tail -1`: everything.

    - `sudo halocline bench pipeline --deep --repeat 3`: which of hybrid and data parallel wins, predicted and measured.

    **Reading it**: *step over torch* should be at most 1, *bubble over theory* at most 1.1, *zero-bubble over 1F1B*
    below 1, and *balance off* at most 0.1: the error of the predicted imbalance of stages.
    """
    if deep:
        _deep(rates, repeat, as_json, debug)
        return
    if kinds:
        _kinds(repeat, as_json, debug)
        return
    from ..pipeline import PipelineTrial, measure_pipeline

    progress = progress_console()
    counts = tuple(int(word) for word in ranks.split(",")), tuple(int(word) for word in microbatches.split(","))
    with clear_errors("bench pipeline", debug):
        result = measure_pipeline(PipelineTrial(*counts, sleep, width, repeat), lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    facts = {
        "step over torch": f"{result['step_over_torch']:.3f}",
        "bubble over theory": f"{result['bubble_over_theory']:.3f}",
        "zero-bubble over 1F1B": f"{result['zero_bubble_over_1f1b']:.3f}",
        "balance off": f"{result['balance_off']:.3f}",
    }
    for case in result["cases"]:
        if case["kind"] == "balance":
            found = f"slowest over mean {case['measured']:.3f}, predicted {case['predicted']:.3f}"
            facts[f"{case['network']}, {case['ranks']} stages"] = found
            continue
        name = f"{case['ranks']} ranks, {case['microbatches']} micro-batches, {case['schedule']}"
        if case["kind"] == "step":
            facts[name] = f"{1e3 * case['ours_s']:.1f} ms, torch {1e3 * case['torch_s']:.1f} ms"
        else:
            theory = "" if case["theory"] is None else f", theory {case['theory']:.3f}"
            facts[name] = f"bubble {case['bubble']:.3f}{theory}"
    stdout().print(fact_table("Pipelines", facts))
    _tell_disturbance(result)


def _deep(rates: str, repeat: int, as_json: bool, debug: bool) -> None:
    from ..pipeline_deep import DeepTrial, lines, measure_deep

    progress = progress_console()
    with clear_errors("bench pipeline", debug):
        speeds = tuple(rate.strip() for rate in rates.split(","))
        result = measure_deep(DeepTrial(rates=speeds, repeat=repeat), lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    say(stdout(), result["stages"])
    stdout().print(fact_table("Hybrid against data parallel", dict(lines(result))))
    _tell_disturbance(result)


def _kinds(repeat: int, as_json: bool, debug: bool) -> None:
    from ..pipeline_kinds import KindsTrial, kind_lines, measure_kinds

    progress = progress_console()
    with clear_errors("bench pipeline", debug):
        result = measure_kinds(KindsTrial(repeat), lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    say(stdout(), result["explained"])
    stdout().print(fact_table("Two kinds of ranks", {**kind_lines(result), "speed-up": f"{result['speedup']:.2f}"}))
    _tell_disturbance(result)


def _tell_disturbance(result: dict[str, Any]) -> None:
    if result["machine"]["disturbed"]:
        taken = result["machine"]["others_share"]
        say(stdout(), f"[yellow]disturbed[/yellow]: other programs took {taken:.0%} of the cores' time")
