"""The game of generators and discriminators: losses, one step of a rank, and the same game in a single process.

Ranks stand in a mesh of groups, one for each player, and replicas. A rank computes the losses of its group's
discriminator with its replica's snapshots and noise. Gradients of a discriminator are averaged over its group, those
of the generators over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ...distribute import distribute
from ...errors import ConfigError
from ...random.draw import Draw
from ...random.generator import GlobalBox, keys
from ...world import Mesh, place_parameter
from .networks import RandomField, gradient, induced_source, initialise, perceptron
from .players import Player, make_players, sensors
from .truth import DarcyFlow, FlowSettings

_CPU = torch.device("cpu")
_SNAPSHOTS, _FAKE, _MIX, _EQUATION, _PLACES = range(5)  # what random numbers are drawn for


@dataclass(frozen=True)
class GameSettings:
    """One game. ``equation`` and ``boundary`` weigh the residuals; 0 leaves a GAN that knows data alone."""

    subdomains: int = 1
    two_levels: bool = False
    snapshots: int = 2000  # realisations that sensors have seen
    sensors: int = 9  # of a player along each dim
    batch: int = 64  # snapshots of a replica and step
    points: int = 32  # where the equation is asked for, in each step
    noise: int = 8
    width: int = 64
    depth: int = 3
    critic_steps: int = 5
    penalty: float = 0.1
    equation: float = 1.0
    boundary: float = 10.0
    lr: float = 1e-3
    steps: int = 2000  # of the generators, over which the learning rate falls to ``final`` of its start
    final: float = 0.1
    seed: int = 0
    flow: FlowSettings = field(default_factory=FlowSettings)


class Generators(nn.Module):
    """log K and u."""

    def __init__(self, settings: GameSettings) -> None:
        super().__init__()
        shape = settings.flow.dims, settings.noise, settings.width, settings.depth
        self.log_k, self.u = RandomField(*shape), RandomField(*shape)


class Game:
    """What all ranks share: players, their sensors and snapshots, and the losses as functions of networks and noise."""

    def __init__(self, settings: GameSettings, dtype: torch.dtype = torch.float32) -> None:
        self.settings, self.dtype = settings, dtype
        dims = settings.flow.dims
        self.players = make_players(settings.subdomains, dims, settings.two_levels)
        self.places = [torch.tensor(sensors(player, settings.sensors, dims), dtype=dtype) for player in self.players]

    def generators(self) -> Generators:
        """New generators, the same on every rank."""
        made = Generators(self.settings).to(self.dtype)
        initialise(made, self.settings.seed)
        return made

    def discriminator(self, player: int) -> nn.Module:
        """A new discriminator of a player. It sees log K and u at its sensors."""
        settings = self.settings
        made = perceptron([2 * len(self.places[player]), *[settings.width] * settings.depth, 1]).to(self.dtype)
        initialise(made, settings.seed + 1 + player)
        return made

    def set_rate(self, step: int, *optimizers: torch.optim.Optimizer) -> None:
        """Set the learning rate of a step, which falls exponentially; it stays low if steps go on after the last."""
        settings = self.settings
        rate = settings.lr * settings.final ** min(1.0, step / settings.steps)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate

    def snapshots(self, player: int) -> Tensor:
        """What a player's sensors have seen, [snapshots, 2 * sensors]."""
        flow, points = DarcyFlow(self.settings.flow, self.settings.seed), self.places[player].double().numpy()
        rows = []
        for number in range(self.settings.snapshots):
            log_k, u = flow.fields(number)
            rows.append(np.concatenate([flow.at(log_k, points), flow.at(u, points)]))
        return torch.tensor(np.stack(rows), dtype=self.dtype)

    def drawn(self, use: int, step: int, player: int, replica: int, *shape: int, normal: bool = True) -> Tensor:
        """Numbers by what they are for, step, level, subdomain and replica, whichever rank draws them."""
        who = self.players[player]
        key = 0
        for part in (use, step, who.level, who.subdomain, replica):
            key = keys(key, part, 0)[0]
        draw = Draw(GlobalBox.all_of(shape), _CPU, (self.settings.seed, key))
        return draw.normal(self.dtype) if normal else draw.uniform(self.dtype)

    def fake(self, generators: Generators, player: int, noise: Tensor) -> Tensor:
        """What the player's sensors would see of generated fields."""
        points = self.places[player][None].expand(len(noise), -1, -1)
        return torch.cat([generators.log_k(points, noise), generators.u(points, noise)], 1)

    def critic_loss(
        self,
        generators: Generators,
        discriminator: nn.Module,
        real: Tensor,
        player: int,
        replica: int,
        step: int,
        turn: int,
    ) -> Tensor:
        """WGAN with gradient penalty: the mean over this replica's snapshots."""
        settings = self.settings
        tick = step * settings.critic_steps + turn
        chosen = self.drawn(_SNAPSHOTS, tick, player, replica, settings.batch, normal=False) * len(real)
        truth = real[chosen.long().clamp(max=len(real) - 1)]
        with torch.no_grad():
            noise = self.drawn(_FAKE, tick, player, replica, settings.batch, settings.noise)
            made = self.fake(generators, player, noise)
        mix = self.drawn(_MIX, tick, player, replica, settings.batch, 1, normal=False)
        between = (mix * truth + (1 - mix) * made).requires_grad_()
        (slope,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return discriminator(made).mean() - discriminator(truth).mean() + settings.penalty * penalty

    def generator_loss(
        self, generators: Generators, discriminator: nn.Module, player: int, replica: int, step: int
    ) -> Tensor:
        """What the player's discriminator makes of generated snapshots, and its share of the equation's residuals."""
        settings = self.settings
        noise = self.drawn(_FAKE, -1 - step, player, replica, settings.batch, settings.noise)
        loss = -discriminator(self.fake(generators, player, noise)).mean()
        if settings.equation:
            residual = self.residual(generators, noise, step, player, replica).square().mean()
            loss = loss + settings.equation * residual / len(self.players)
        if settings.boundary:
            loss = loss + settings.boundary * self.boundary(generators, noise) / len(self.players)
        return loss

    def residual(self, generators: Generators, noise: Tensor, step: int, player: int, replica: int) -> Tensor:
        """``div(K grad u)``, which the flow has as 0, at random points of the player's subdomain."""
        settings, who = self.settings, self.players[player]
        shape = len(noise), settings.points, settings.flow.dims
        share = self.drawn(_PLACES, step, player, replica, *shape, normal=False)
        low, high = (torch.tensor(ends, dtype=self.dtype) for ends in (who.low, who.high))
        points = low + (high - low) * share
        return induced_source(lambda x: generators.log_k(x, noise), lambda x: generators.u(x, noise), points)

    def boundary(self, generators: Generators, noise: Tensor) -> Tensor:
        """How far u is from 1 and 0 at the ends, and from no flow through the other sides: mean squares."""
        dims = self.settings.flow.dims
        along = torch.linspace(0, 1, 9, dtype=self.dtype)[:, None] if dims == 2 else torch.zeros(1, 0, dtype=self.dtype)
        total = torch.zeros((), dtype=self.dtype)
        for value in (0.0, 1.0):
            edge = torch.cat([torch.full((len(along), 1), value, dtype=self.dtype), along], 1)
            u = generators.u(edge[None].expand(len(noise), -1, -1), noise)
            total = total + (u - (1 - value)).square().mean()
            if dims == 2:
                side = edge.flip(1)[None].expand(len(noise), -1, -1).detach().requires_grad_()
                total = total + gradient(generators.u(side, noise), side)[..., 1].square().mean()
        return total


class PiganRank(nn.Module):
    """One rank's part in a game: the generators that all ranks share, and its group's discriminator."""

    def __init__(self, game: Game, mesh: Mesh) -> None:
        super().__init__()
        groups = len(game.players)
        if mesh.sizes.get("group", 1) != groups:
            raise ConfigError(f"a game of {groups} players needs a mesh with group={groups}, and this is {mesh}")
        self.game, self.mesh = game, mesh
        self.player, self.replica = mesh.coordinates.get("group", 0), mesh.coordinates.get("replica", 0)
        self.generators, self.discriminator = game.generators(), game.discriminator(self.player)
        place_parameter(self.discriminator, group="own")
        distribute(self, mesh)
        rate = game.settings.lr
        self.critic = torch.optim.Adam(self.discriminator.parameters(), rate, betas=(0.5, 0.9))
        self.maker = torch.optim.Adam(self.generators.parameters(), rate, betas=(0.5, 0.9))
        self.real = game.snapshots(self.player)
        self.steps = 0

    def step(self) -> tuple[float, float]:
        """Some steps of the discriminator and one of the generators. By all ranks together; returns both losses."""
        judged, made = self.make_step()
        return judged.item(), made.item()

    def make_step(self) -> tuple[Tensor, Tensor]:
        """As :meth:`step`, and the losses stay where they are."""
        game, who = self.game, (self.player, self.replica)
        game.set_rate(self.steps, self.critic, self.maker)
        for turn in range(game.settings.critic_steps):
            self.critic.zero_grad()
            loss = game.critic_loss(self.generators, self.discriminator, self.real, *who, self.steps, turn)
            loss.backward()
            self.critic.step()
        self.discriminator.requires_grad_(False)
        self.maker.zero_grad()
        made = game.generator_loss(self.generators, self.discriminator, *who, self.steps)
        (made * len(game.players)).backward()  # the mean over ranks of this is the sum over players
        self.maker.step()
        self.discriminator.requires_grad_(True)
        self.steps += 1
        return loss.detach(), made.detach()


class SoloGame:
    """The same game in one process, by plain torch: all discriminators beside each other. The reference for ranks."""

    def __init__(self, game: Game, replicas: int) -> None:
        self.game, self.replicas = game, replicas
        self.generators = game.generators()
        self.discriminators = [game.discriminator(player) for player in range(len(game.players))]
        rate = game.settings.lr
        self.critics = [torch.optim.Adam(each.parameters(), rate, betas=(0.5, 0.9)) for each in self.discriminators]
        self.maker = torch.optim.Adam(self.generators.parameters(), rate, betas=(0.5, 0.9))
        self.real = [game.snapshots(player) for player in range(len(game.players))]
        self.steps = 0

    def step(self) -> None:
        """As :meth:`PiganRank.step`, for all players and replicas."""
        game, replicas = self.game, range(self.replicas)
        game.set_rate(self.steps, self.maker, *self.critics)
        for player, (discriminator, critic) in enumerate(zip(self.discriminators, self.critics, strict=True)):
            for turn in range(game.settings.critic_steps):
                critic.zero_grad()
                for replica in replicas:
                    loss = game.critic_loss(
                        self.generators, discriminator, self.real[player], player, replica, self.steps, turn
                    )
                    (loss / self.replicas).backward()
                critic.step()
        self.maker.zero_grad()
        for player, discriminator in enumerate(self.discriminators):
            for replica in replicas:
                loss = game.generator_loss(self.generators, discriminator, player, replica, self.steps)
                (loss / self.replicas).backward()
        self.maker.step()
        self.steps += 1


def make_mesh(game: Game) -> Mesh:
    """A mesh of all ranks: one group for each player."""
    return Mesh(group=len(game.players), replica=-1)


__all__ = ["Game", "GameSettings", "Generators", "PiganRank", "Player", "SoloGame", "make_mesh"]
