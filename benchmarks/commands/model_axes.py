"""``halocline bench model-axes``: the command, and its table."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, say, stdout

Counts = Annotated[str, typer.Option("--ranks", help="Numbers of ranks, such as 2,4.")]
Rate = Annotated[
    str | None, typer.Option("--rate", help="Emulate a cluster with links of this rate; default: loopback.")
]
Width = Annotated[int, typer.Option("--width", min=8, help="Features; hidden layers have four times as many.")]
Layers = Annotated[int, typer.Option("--layers", min=1, help="Blocks.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Rows of the batch.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; in each, every way has a turn.")]


def model_axes(
    ranks: Counts = "2,4",
    rate: Rate = None,
    width: Width = 256,
    layers: Layers = 4,
    tokens: Tokens = 512,
    repeat: Rounds = 15,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How fast is a step whose weights are cut? Against torch's own tensor parallelism, in the same run.

    The same ranks train one network cut by `parallelize_module` of torch (DTensor), by every layout by hand that cuts
    both weights of its blocks, and by the layout that `layout="auto"` chooses; once more with sums that travel in one
    piece and not in tiles. Steps take turns.

    **Examples**

    - `halocline bench model-axes`: 2 and 4 ranks of this machine.

    - `sudo halocline bench model-axes --rate 1gbit --json | tail -1`: ranks in network namespaces.

    **Reading it**: *over torch* is the step of the layout that DTensor has too, over DTensor's; *over one piece* the
    same over that without tiles; *auto over best* the step of the chosen layout over that of the best by hand. All are
    medians of ratios within a round.
    """
    from ..model_axes import measure_model_axes
    from ..model_axes_ranks import Sizes

    with clear_errors("bench model-axes", debug), progress_console().status("starting") as status:
        counts = [int(count) for count in ranks.split(",")]
        result = measure_model_axes(counts, rate, Sizes(width, layers, tokens), repeat, status.update)
    if as_json:
        print_json(result)
        return
    ways = list(result["cases"][0]["seconds"])
    ratios = ("over_torch", "over_one_piece", "auto_over_best")
    rows = [
        [
            str(each["ranks"]),
            *(f"{each['seconds'][way] * 1e3:.1f}" for way in ways),
            *(f"{each[r]:.2f}" for r in ratios),
        ]
        for each in result["cases"]
    ]
    title = f"Milliseconds a step, {layers} blocks of width {width}, {tokens} tokens, {rate or 'loopback'}"
    stdout().print(number_table(title, ("ranks", *ways, *(r.replace("_", " ") for r in ratios)), rows))
    if result["oversubscribed"]:
        say(stdout(), "[yellow]oversubscribed[/yellow]: more ranks than cores; the ratios still compare like with like")
