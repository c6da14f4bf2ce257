"""``bench pigan-scaling``: weak scaling of the physics-informed GAN, measured on an emulated cluster and simulated.

Every rank plays its part as ``halocline pigan`` does: groups of ranks with a discriminator each, whose gradients are
averaged in the group, and generators whose gradients are averaged over all. With more ranks there are more subdomains;
the work of a rank stays. On the emulated cluster ranks outnumber cores, so that networks sleep where they would
compute. For a described machine the step of one rank is recorded on meta tensors, with true networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from halocline.plan.cost import Key, Prices, key_of
from halocline.plan.machine import Machine, load_machine
from halocline.plan.replay import Replay
from halocline.program import Record, dry, record
from halocline.simulate import ScenarioError
from halocline.simulate.levers import Levers
from halocline.simulate.replaying import replayed
from halocline.simulate.variation import slowest
from halocline.workloads.pigan import FlowSettings, Game, GameSettings, PiganRank
from halocline.workloads.pigan.game import Generators
from halocline.world import Mesh

from .cluster import Cluster
from .machine import Others
from .machine import describe as describe_run
from .simulate import DEADLINE, LARGE, SMALL, calibrated
from .simulate_ranks import TAG, SleepingLayer, SleepingNetwork, sums_on_ranks

Say = Callable[[str], None]
#: One level, two replicas of each discriminator: as many subdomains as there are pairs of ranks.
EMULATED = GameSettings(width=256, depth=4, noise=20, critic_steps=5)
CRITIC_S, MAKER_S = 0.03, 0.10  # that a rank sleeps in one step of its discriminator, and of the generators
#: The widths of the published networks are not known. These keep a V100 busy with 256 snapshots a rank.
WIDE = GameSettings(
    width=1024, depth=4, noise=40, batch=256, points=256, sensors=12, critic_steps=5, flow=FlowSettings(dims=2)
)
REPLICAS = 25  # of a discriminator, on the described machine: 27,500 ranks are 1,100 subdomains
PUBLISHED = 0.931  # on 27,500 V100s (Yang et al. 2019)
WARM = 3  # steps until gradients have their buckets


class SleepingGame(Game):
    """A game whose networks have the weights of the true ones, and sleep."""

    def __init__(self, settings: GameSettings) -> None:
        super().__init__(settings)
        with torch.device("meta"):
            self._made = super().generators()
            self._judge = super().discriminator(0)

    @property
    def makers(self) -> tuple[SleepingLayer, ...]:
        """The layers of the generators."""
        return _asleep(self._made, MAKER_S)

    @property
    def judges(self) -> tuple[SleepingLayer, ...]:
        """Those of a discriminator."""
        return _asleep(self._judge, CRITIC_S)

    def generators(self) -> Any:
        return SleepingNetwork(self.makers)

    def discriminator(self, player: int) -> nn.Module:
        return SleepingNetwork(self.judges, len(self.makers))

    def snapshots(self, player: int) -> Tensor:
        return torch.zeros(1, 1)

    def critic_loss(self, generators: Any, discriminator: nn.Module, *rest: Any) -> Tensor:
        return discriminator(torch.zeros(1, 1, 1)).sum()

    def generator_loss(self, generators: Any, discriminator: nn.Module, *rest: Any) -> Tensor:
        return generators(torch.zeros(1, 1, 1)).sum()


def _asleep(network: nn.Module, seconds: float) -> tuple[SleepingLayer, ...]:
    """The layers of a network, which share so many seconds by their weights; backward takes twice as long."""
    layers = [list(part.parameters()) for part in network.modules() if isinstance(part, nn.Linear)]
    counts = [sum(weight.numel() for weight in weights) for weights in layers]
    return tuple(
        SleepingLayer(
            seconds * count / sum(counts) / 3,
            2 * seconds * count / sum(counts) / 3,
            tuple(tuple(weight.shape) for weight in weights),
        )
        for weights, count in zip(layers, counts, strict=True)
    )


class RecordedGame(Game):
    """A game on meta tensors: no number is drawn, and no equation solved."""

    def generators(self) -> Generators:
        return Generators(self.settings)

    def snapshots(self, player: int) -> Tensor:
        return torch.empty(self.settings.snapshots, 2 * len(self.places[player]))

    def drawn(self, use: int, step: int, player: int, replica: int, *shape: int, normal: bool = True) -> Tensor:
        return torch.empty(shape)


# ---- the emulated cluster ----

_playing: dict[str, PiganRank] = {}


def prepare(subdomains: int) -> None:
    """Set this rank up and run it warm."""
    torch.set_num_threads(1)
    game = SleepingGame(replace(EMULATED, subdomains=subdomains))
    _playing["game"] = PiganRank(game, Mesh(group=subdomains, replica=-1))
    for _ in range(WARM):
        _playing["game"].make_step()


def timed(count: int) -> float:
    """The median of ``count`` steps, in seconds."""
    import time

    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        _playing["game"].make_step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure_scaling(nodes: Sequence[int], rate: str, repeat: int, say: Say = lambda text: None) -> dict[str, Any]:
    """Steps on one node and on these numbers of nodes, a rank each, beside the same steps simulated."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    others = []
    for count in sorted({1, *nodes}):
        subdomains = max(1, count // 2)
        say(f"{count} node{'s'[: count > 1]}, {subdomains} subdomain{'s'[: subdomains > 1]}")
        with Cluster(nodes=count, rate=rate, collective_timeout=DEADLINE) as cluster:
            watch = Others(cluster.run)
            sums = cluster.run(sums_on_ranks, (SMALL, LARGE), 5, deadline=DEADLINE) if count > 1 else None
            cluster.run(prepare, subdomains, deadline=DEADLINE)
            turns = [max(cluster.run(timed, 3, deadline=DEADLINE)) for _ in range(repeat)]
            others.append(watch.share())
        predicted = None
        if sums is not None:
            machine = calibrated(sums, count)
            predicted = _replayed(SleepingGame(replace(EMULATED, subdomains=subdomains)), machine, count).seconds
        rows.append(
            {
                "nodes": count,
                "subdomains": subdomains,
                "step_s": median(turns),
                "spread": (max(turns) - min(turns)) / median(turns),
                "efficiency": rows[0]["step_s"] / median(turns) if rows else 1.0,
                "simulated_s": predicted,
                "simulated_over_measured": None if predicted is None else predicted / median(turns),
            }
        )
    machine_now = describe_run(max((share for share in others if share is not None), default=None))
    return {"rate": rate, "rows": rows, "machine": machine_now}


# ---- described machines ----


@dataclass(frozen=True)
class SimulatedGame:
    """A step of one rank among many."""

    ranks: int
    seconds: float  # the mean, stragglers included
    compute: float
    exposed: dict[str, float]
    sums: dict[int, int]  # bytes of gradients, by the number of ranks that they are summed over


def simulate_scaling(
    machine: str,
    sizes: Sequence[int],
    replicas: int = REPLICAS,
    say: Say = lambda text: None,
    settings: GameSettings = WIDE,
) -> dict[str, Any]:
    """The step of a wide game on a described machine at each size; efficiency by one rank."""
    described = load_machine(machine)
    wrong = [size for size in sizes if size != 1 and size % replicas]
    if wrong:
        raise ScenarioError(f"{wrong[0]:,} ranks do not divide into groups of {replicas}; give multiples of that")
    rows: list[SimulatedGame] = []
    for size in sorted({1, *sizes}):
        say(f"{size:,} rank{'s'[: size > 1]}")
        rows.append(simulated_game(replace(settings, subdomains=max(1, size // replicas)), described, size))
    return {
        "machine": machine,
        "replicas": replicas,
        "published": PUBLISHED,
        "rows": [{**vars(row), "efficiency": rows[0].seconds / row.seconds} for row in rows],
    }


def simulated_game(settings: GameSettings, machine: Machine, ranks: int) -> SimulatedGame:
    """A step of one rank with its collectives on the machine, and the wait for the slowest of all ranks."""
    with torch.device("meta"):
        game = RecordedGame(settings)
    return _replayed(game, machine, ranks)


def _replayed(game: Game, machine: Machine, ranks: int) -> SimulatedGame:
    rank = ranks // 2
    recorded, measured = _recorded(game, machine, rank, ranks)
    prices = Prices(machine.device, measured).on(machine, ranks, 1.0)
    line = replayed(recorded.events, rank, machine, prices, Levers(), ranks).timeline
    delays = slowest(machine, line.compute, ranks)
    sums: dict[int, int] = {}
    for each in recorded.sums:
        if each.label.channel.startswith("gradients") and len(each.ranks) > 1:
            sums[len(each.ranks)] = sums.get(len(each.ranks), 0) + each.bytes
    exposed = {kind: seconds for kind, seconds in line.exposed.items() if seconds > 0}
    return SimulatedGame(ranks, line.seconds + delays.mean, line.compute, {**exposed, "stragglers": delays.mean}, sums)


def _recorded(game: Game, machine: Machine, rank: int, ranks: int) -> tuple[Record, dict[Key, float]]:
    """One step of a rank, and the seconds of what sleeps in it."""
    with dry(rank, ranks), torch.device("meta"):
        mesh = Mesh(group=len(game.players), replica=-1)
        playing = PiganRank(game, mesh)
        pricing = Replay(rank, machine, Prices(machine.device).on(machine, ranks, 1.0))
        mesh.world.events.clock = pricing.clock
        mesh.world.events.add(pricing.take)
        for _ in range(WARM):
            record(playing.make_step, mesh)
        found = record(playing.make_step, mesh)
    return found, _sleeping_prices(game, found) if isinstance(game, SleepingGame) else {}


def _sleeping_prices(game: SleepingGame, found: Record) -> dict[Key, float]:
    """The operations that mark a layer take the time that it sleeps."""
    layers, prices = (*game.makers, *game.judges), dict[Key, float]()
    for event in found.operations:
        marked = event.name in ("add", "sub") and event.shapes and len(event.shapes[0]) == 1
        number = event.shapes[0][0] - TAG if marked else -1
        if 0 <= number < len(layers):
            layer = layers[number]
            prices[key_of(event)] = max(1e-9, layer.forward_s if event.name == "add" else layer.backward_s)
    return prices
