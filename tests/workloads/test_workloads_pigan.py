"""The physics-informed GAN over groups of ranks is the multi-discriminator GAN of a single process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from halocline.workloads.pigan import (
    DarcyFlow,
    FlowSettings,
    Game,
    GameSettings,
    PiganRank,
    induced_source,
    make_players,
)
from halocline.workloads.pigan.game import SoloGame, make_mesh
from halocline.workloads.pigan.players import sensors
from halocline.world import Summed, run_local

SMALL = {"snapshots": 12, "batch": 4, "points": 5, "width": 6, "depth": 2, "noise": 3, "sensors": 3, "critic_steps": 2}


def game_of(subdomains: int, two_levels: bool, dims: int = 1) -> Game:
    flow = FlowSettings(dims=dims, points=9)
    return Game(GameSettings(subdomains=subdomains, two_levels=two_levels, flow=flow, **SMALL), torch.float64)


def parameters(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def gradients(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.parametrize(
    ("subdomains", "two_levels", "replicas", "dims"),
    [(1, False, 2, 1), (2, False, 2, 1), (4, False, 1, 2), (2, True, 2, 1), (4, True, 1, 2)],
    ids=["1 x 2", "2 x 2", "4 x 1", "two levels 3 x 2", "two levels 5 x 1"],
)
def test_ranks_play_the_game_of_one_process(subdomains: int, two_levels: bool, replicas: int, dims: int) -> None:
    game = game_of(subdomains, two_levels, dims)
    solo = SoloGame(game, replicas)
    true = []
    for _ in range(2):
        solo.step()
        true.append((parameters(solo.generators), gradients(solo.generators), *map(parameters, solo.discriminators)))

    def play() -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        rank, seen = PiganRank(game, make_mesh(game)), []
        for _ in range(2):
            rank.step()
            made = rank.generators
            seen.append((rank.player, parameters(made), gradients(made), parameters(rank.discriminator)))
        return seen

    ranks = run_local(len(game.players) * replicas, play)
    for step, (weights, slopes, *judges) in enumerate(true):
        for player, mine, slope, judge in (seen[step] for seen in ranks):
            assert float((mine - weights).abs().max()) < 1e-8
            assert float((slope - slopes).abs().max()) < 1e-8
            assert float((judge - judges[player]).abs().max()) < 1e-8
        firsts = {seen[step][0]: seen[step] for seen in ranks}
        assert all(torch.equal(seen[step][1], firsts[0][1]) for seen in ranks)  # generators, bit for bit
        assert all(torch.equal(seen[step][3], firsts[seen[step][0]][3]) for seen in ranks)  # and in a group
        told = [judge for _, _, _, judge in firsts.values()]
        assert all(not torch.equal(a, b) for at, a in enumerate(told) for b in told[:at])


def test_bytes_for_discriminators_do_not_depend_on_the_number_of_subdomains() -> None:
    def sent(game: Game) -> int:
        rank, heard = PiganRank(game, make_mesh(game)), []

        def listen(event: object) -> None:
            if isinstance(event, Summed) and len(event.ranks) == 2:  # the replicas of a group
                heard.append(event.bytes)

        rank.step()
        with rank.mesh.world.events.listening(listen):
            rank.step()
        return sum(heard)

    counts = [set(run_local(2 * subdomains, lambda s=subdomains: sent(game_of(s, False)))) for subdomains in (2, 4)]
    assert counts[0] == counts[1] and len(counts[0]) == 1 and counts[0].pop() > 0


def test_the_induced_source_is_the_analytic_one() -> None:
    x = torch.linspace(0, 1, 50, dtype=torch.float64)[None, :, None]
    found = induced_source(lambda p: p[..., 0], lambda p: torch.sin(math.pi * p[..., 0]), x)[0].detach()
    place = x[0, :, 0]
    true = torch.exp(place) * (math.pi * torch.cos(math.pi * place) - math.pi**2 * torch.sin(math.pi * place))
    assert float((found - true).abs().max()) < 1e-6
    both = induced_source(lambda p: p[..., 0] * p[..., 1], lambda p: (p**2).sum(2), torch.full((1, 1, 2), 0.5).double())
    assert both.detach().item() == pytest.approx(math.exp(0.25) * 5.0)  # K (u_xx + u_yy) + grad K . grad u


def test_the_truth_solves_its_equation() -> None:
    """In one dim the flow is the same everywhere: u falls by the integral of 1 / K."""
    flow = DarcyFlow(FlowSettings(points=201, lengths=(0.2,)))
    log_k, u = flow.fields(3)
    resistance = 0.5 * (np.exp(-log_k[1:]) + np.exp(-log_k[:-1]))
    true = 1 - np.concatenate([[0], np.cumsum(resistance)]) / resistance.sum()
    assert np.abs(u - true).max() < 1e-10
    square = DarcyFlow(FlowSettings(dims=2, points=17))
    layered = np.exp(np.linspace(0, 1, 17))[:, None] * np.ones(17)
    assert np.abs(square.solve(layered) - square.solve(layered)[:, :1]).max() < 1e-10
    assert np.abs(square.solve(np.ones((17, 17))) - np.linspace(1, 0, 17)[:, None]).max() < 1e-12


def test_fields_have_the_deviation_and_correlation_asked_for() -> None:
    flow = DarcyFlow(FlowSettings(points=33, lengths=(0.3, 0.05), deviations=(0.6, 0.8)))
    drawn = np.stack([flow.log_conductivity(np.random.default_rng(number)) for number in range(3000)])
    assert drawn.std() == pytest.approx(1.0, abs=0.03)
    lag = 4 / 32
    wanted = 0.36 * math.exp(-(lag**2) / (2 * 0.3**2)) + 0.64 * math.exp(-(lag**2) / (2 * 0.05**2))
    assert (drawn[:, 4:] * drawn[:, :-4]).mean() == pytest.approx(wanted, abs=0.03)


def test_every_player_sees_as_many_sensors_of_its_own() -> None:
    players = make_players(4, 2, two_levels=True)
    seen = [sensors(player, 5, 2) for player in players]
    assert {len(points) for points in seen} == {25}
    assert all(player.sees(points).all() for player, points in zip(players, seen, strict=True))
