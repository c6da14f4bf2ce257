"""One rank of ``halocline pigan``: plays its part; rank 0 compares with Monte Carlo and writes the report."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..train.heartbeat import follow_launcher
from ..train.launch import REQUEST, RESULT, this_rank
from . import end_at_once_on_failure
from .local_ranks import work_as_rank
from .output import progress_bar, say, set_quiet


def play(request: dict[str, Any]) -> dict[str, Any]:
    """All steps of a game on this rank. Returns the figures on rank 0, elsewhere nothing."""
    from ..workloads.pigan import FlowSettings, Game, GameSettings

    told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in request["flow"].items()}
    weights: dict[str, Any] = {"equation": 0.0, "boundary": 0.0} if request["data_only"] else {}
    game = Game(GameSettings(**request["game"], **weights, flow=FlowSettings(**told)))
    generators, seconds = _trained(game)
    if this_rank() != 0:
        return {}
    return _reported(game, generators, seconds, request)


def _trained(game: Any) -> tuple[Any, float]:
    """The generators after all steps, and the seconds that they took."""
    from ..workloads.pigan.game import PiganRank, SoloGame, make_mesh
    from ..world import this_world

    alone = this_world().size == 1
    part: Any = SoloGame(game, 1) if alone else PiganRank(game, make_mesh(game))
    began, steps = time.monotonic(), game.settings.steps
    with progress_bar(shown=this_rank() == 0) as bar:
        task = bar.add_task("steps", total=steps)
        for step in range(steps):
            part.step()
            bar.advance(task)
            if this_rank() == 0 and not bar.console.is_terminal and (step + 1) % max(1, steps // 10) == 0:
                say(bar.console, f"step {step + 1} of {steps}, {time.monotonic() - began:.0f} s")
    return part.generators, time.monotonic() - began


def _reported(game: Any, generators: Any, seconds: float, request: dict[str, Any]) -> dict[str, Any]:
    """Figures and page of a game that has ended."""
    from ..train.reporting.pigan_page import pigan_page
    from ..workloads.pigan import DarcyFlow
    from ..workloads.pigan.evaluate import compared, generated, moments_of, true_moments

    out = Path(request["out"])
    flow = DarcyFlow(game.settings.flow, game.settings.seed)
    truth, found = true_moments(game), moments_of(*generated(game, generators), flow)
    errors = compared(game, generators, truth)
    players = len(game.players)
    title = f"Darcy flow, {players} discriminator{'s'[: players > 1]}" + (", data only" if request["data_only"] else "")
    (out / "report.html").write_text(pigan_page(title, truth, found, errors, game.settings.flow.points))
    torch.save(generators.state_dict(), out / "generators.pt")
    result = {"steps": game.settings.steps, "seconds": seconds, "errors": errors, "report": str(out / "report.html")}
    (out / RESULT).write_text(json.dumps(result))
    return result


def main() -> None:
    """``python -m halocline.cli.pigan_rank FOLDER``, for the processes that ``halocline pigan`` starts."""
    follow_launcher()
    set_quiet("--quiet" in sys.argv)
    folder = Path(sys.argv[1])
    work_as_rank(folder, lambda: play(json.loads((folder / REQUEST).read_text())))


if __name__ == "__main__":
    end_at_once_on_failure(main)
