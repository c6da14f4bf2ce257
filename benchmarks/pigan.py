"""``bench pigan``: what the equation and a second level of discriminators give a physics-informed GAN."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halocline.train.reporting.pigan_page import pigan_page
from halocline.workloads.pigan import DarcyFlow, FlowSettings, Game, GameSettings
from halocline.workloads.pigan.evaluate import compared, generated, moments_of, true_moments
from halocline.workloads.pigan.game import SoloGame

TARGETS = {"u_mean": 0.05, "u_std": 0.20, "covariance_ratio": 0.5}
REALISATIONS = 2000  # of Monte Carlo, and of each trained game

ONE_LENGTH = GameSettings()
#: Sensors of the whole domain are 0.125 apart, more than the short length; those of a tile 0.031.
TWO_LENGTHS = GameSettings(noise=20, flow=FlowSettings(lengths=(0.4, 0.1), deviations=(0.5**1.5, 0.5**1.5)))
ONE, TWO, AS_LONG, EQUATION, DATA_ONLY = "one level", "two levels", "one level as long", "equation", "data only"


@dataclass(frozen=True)
class PiganCase:
    """One game to train, for the steps that its settings say. Cases are trained one after another in this process.

    ``as_long_as``: the names of two cases, of which the first has the same game: as many steps as fit into the
    processor time of the second.
    """

    name: str
    settings: GameSettings
    as_long_as: tuple[str, str] | None = None


def cases(seeds: int, steps: int) -> list[PiganCase]:
    """For each seed: with and without the equation, and on two correlation lengths with one and two levels."""
    found = []
    for seed in range(seeds):
        plain, mixed = (replace(game, seed=seed, steps=steps) for game in (ONE_LENGTH, TWO_LENGTHS))
        one, two = f"{ONE}, seed {seed}", f"{TWO}, seed {seed}"
        found += [
            PiganCase(f"{EQUATION}, seed {seed}", plain),
            PiganCase(f"{DATA_ONLY}, seed {seed}", replace(plain, equation=0.0, boundary=0.0)),
            PiganCase(one, mixed),
            PiganCase(two, replace(mixed, subdomains=4, two_levels=True)),
            PiganCase(f"{AS_LONG}, seed {seed}", mixed, (one, two)),
        ]
    return found


def measure_pigan(
    seeds: int, steps: int, out: Path, say: Callable[[str], None], only: str | None = None
) -> dict[str, Any]:
    """Train every case, write a page for each to ``out``, and compare them."""
    errors: dict[str, dict[str, float]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for case in cases(seeds, steps):
        settings = case.settings
        if case.as_long_as is not None:
            if not all(name in errors for name in case.as_long_as):
                continue
            own, other = (errors[name]["seconds"] for name in case.as_long_as)
            settings = replace(settings, steps=round(steps * other / own))
        if only is None or only in case.name:
            say(f"training {case.name}: {settings.steps} steps")
            errors[case.name] = _trained(case.name, settings, out)
            say(f"{case.name}: " + ", ".join(f"{name} {value:.3g}" for name, value in errors[case.name].items()))
    return {"steps": steps, "errors": errors, "targets": TARGETS, **verdict(errors, seeds)}


def verdict(errors: Mapping[str, Mapping[str, float]], seeds: int) -> dict[str, Any]:
    """For each seed, the figures that have a target. None where a case was left out."""

    def ratios(one: str, other: str, figure: str) -> list[float | None]:
        pairs = [(errors.get(f"{one}, seed {seed}"), errors.get(f"{other}, seed {seed}")) for seed in range(seeds)]
        return [a[figure] / b[figure] if a and b else None for a, b in pairs]

    return {
        "covariance_ratio": ratios(TWO, ONE, "covariance_short"),
        "covariance_ratio_as_long": ratios(TWO, AS_LONG, "covariance_short"),
        "residual_ratio": ratios(EQUATION, DATA_ONLY, "residual"),
    }


def _trained(name: str, settings: GameSettings, out: Path) -> dict[str, float]:
    """The errors of a game after its steps. ``seconds`` are of the processor: other programs do not count."""
    game = Game(settings)
    truth, solo = true_moments(game, REALISATIONS), SoloGame(game, 1)
    began = time.process_time()
    for _ in range(settings.steps):
        solo.step()
    spent = time.process_time() - began
    errors = compared(game, solo.generators, truth, REALISATIONS)
    flow = DarcyFlow(game.settings.flow, game.settings.seed)
    found = moments_of(*generated(game, solo.generators, REALISATIONS), flow)
    page = out / f"{name.replace(',', '').replace(' ', '-')}.html"
    page.write_text(pigan_page(name, truth, found, errors, flow.settings.points))
    return {**errors, "steps": float(settings.steps), "seconds": spent}
