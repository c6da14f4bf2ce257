"""The benchmarks of the physics-informed GAN: what they compare, and the step that they simulate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import pigan, pigan_scaling
from benchmarks.pigan import PiganCase, cases, measure_pigan, verdict
from benchmarks.pigan_scaling import RecordedGame, SleepingGame, simulate_scaling
from halocline.plan.machine import load_machine
from halocline.simulate import ScenarioError
from halocline.workloads.pigan import FlowSettings, Game, GameSettings

SMALL = GameSettings(
    snapshots=8, batch=4, points=4, width=8, depth=2, noise=3, sensors=4, critic_steps=2, flow=FlowSettings(points=33)
)


@pytest.mark.long
def test_a_wide_step_is_simulated_for_many_ranks() -> None:
    """Work and bytes of a discriminator stay; generators are summed over all ranks, and the wait for them grows."""
    found = simulate_scaling("summit", [24, 96], 12, settings=SMALL)["rows"]
    assert [row["ranks"] for row in found] == [1, 24, 96] and not found[0]["sums"]
    (few, many) = found[1:]
    assert set(few["sums"]) == {12, 24} and set(many["sums"]) == {12, 96}
    assert few["sums"][12] == many["sums"][12] and few["sums"][24] == many["sums"][96]
    assert few["compute"] == pytest.approx(many["compute"])
    assert 0 < many["efficiency"] <= few["efficiency"] < found[0]["efficiency"] == 1.0
    true = Game(SMALL)  # the counts that travel along are a few bytes
    weights = 4 * sum(weight.numel() for weight in true.generators().parameters())
    assert weights <= many["sums"][96] < 1.05 * weights + 64
    judge = 4 * sum(weight.numel() for weight in true.discriminator(0).parameters())
    assert SMALL.critic_steps * judge <= many["sums"][12] < SMALL.critic_steps * (1.1 * judge + 64)
    with pytest.raises(ScenarioError, match="100 ranks do not divide into groups of 12"):
        simulate_scaling("summit", [100], 12, settings=SMALL)


def test_networks_that_sleep_have_the_weights_and_the_time_of_true_ones() -> None:
    game, true = SleepingGame(SMALL), Game(SMALL)
    for asleep, awake in ((game.generators(), true.generators()), (game.discriminator(0), true.discriminator(0))):
        shapes = sorted(tuple(weight.shape) for weight in asleep.parameters())
        assert shapes == sorted(tuple(weight.shape) for weight in awake.parameters())
    step = simulated_game_alone(game)
    asleep = SMALL.critic_steps * pigan_scaling.CRITIC_S + pigan_scaling.MAKER_S
    assert step == pytest.approx(asleep, rel=0.05)


def simulated_game_alone(game: SleepingGame) -> float:
    """Seconds that one rank computes in a step: to sleep, and next to nothing besides."""
    return pigan_scaling._replayed(game, load_machine("summit"), 1).compute


def test_a_recorded_game_has_the_places_of_a_true_one() -> None:
    with torch.device("meta"):
        recorded = RecordedGame(SMALL)
    assert all(place.is_meta for place in recorded.places)
    assert [place.shape for place in recorded.places] == [place.shape for place in Game(SMALL).places]


def test_ratios_are_those_of_each_seed() -> None:
    errors = {
        "one level, seed 0": {"covariance_short": 0.4},
        "two levels, seed 0": {"covariance_short": 0.1},
        "one level as long, seed 0": {"covariance_short": 0.2},
        "equation, seed 1": {"residual": 0.3},
        "data only, seed 1": {"residual": 1.5},
    }
    found = verdict(errors, 2)
    assert found["covariance_ratio"] == [pytest.approx(0.25), None]
    assert found["covariance_ratio_as_long"] == [pytest.approx(0.5), None]
    assert found["residual_ratio"] == [None, pytest.approx(0.2)]


def test_every_case_is_trained_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks for a few steps: one level gets the steps of two levels, and as many as fit into their time."""
    monkeypatch.setattr(pigan, "ONE_LENGTH", SMALL)
    monkeypatch.setattr(pigan, "TWO_LENGTHS", replace(SMALL, flow=FlowSettings(1, 33, (0.4, 0.1), (0.35, 0.35))))
    monkeypatch.setattr(pigan, "REALISATIONS", 40)
    said: list[str] = []
    result = measure_pigan(1, 4, tmp_path, said.append)
    assert [case.name for case in cases(1, 4)] == list(result["errors"]) and len(result["errors"]) == 5
    steps = {name: errors["steps"] for name, errors in result["errors"].items()}
    assert steps["two levels, seed 0"] == steps["one level, seed 0"] == 4
    assert steps["one level as long, seed 0"] > 4
    assert all(value > 0 for errors in result["errors"].values() for value in errors.values())
    assert len(list(tmp_path.glob("*.html"))) == 5
    assert isinstance(cases(1, 4)[0], PiganCase)
