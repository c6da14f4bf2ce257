"""Arrangements: uneven cuts, gathered late layers and recomputation give the values and gradients of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.arrangement import Arrangement, fingerprint
from halocline.errors import MeshError, PlanError
from halocline.world import run_local


class Classifier(nn.Module):
    """A skip connection past the blocks, norms and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU()) for _ in range(2)
        )
        self.pool = nn.MaxPool3d(2)
        self.late = nn.Sequential(nn.Conv3d(8, 4, 3, stride=2, padding=1), nn.InstanceNorm3d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skip = x
        for block in self.blocks:
            x = block(x)
        x = self.pool(torch.cat([skip, x], 1))
        return self.head(self.late(x).mean((2, 3, 4)))


ARRANGEMENTS = {
    "uneven": Arrangement({"data": 1, "depth": 2, "height": 1}, {"depth": (0, 9, 12)}),
    "aligned": Arrangement({"data": 1, "depth": 2, "height": 1}, multiple=4),
    "aligned, two axes, gather": Arrangement({"data": 1, "depth": 2, "height": 3}, multiple=2, gather=("late",)),
    "gather": Arrangement({"data": 1, "depth": 2, "height": 1}, gather=("late",)),
    "gather, data cut": Arrangement({"data": 2, "depth": 1, "height": 2}, gather=("late", "head")),
    "gather between cut layers": Arrangement({"data": 1, "depth": 2, "height": 2}, gather=("blocks.1",)),
    "recompute": Arrangement({"data": 1, "depth": 2, "height": 1}, recompute=("first", "blocks.0", "late")),
    "a layer's own cut": Arrangement(
        {"data": 1, "depth": 2, "height": 1},
        choices=hc.Choices(at={"blocks.1": hc.Choices(cut={3: "depth"}), "late": hc.Choices(cut={4: "depth"})}),
    ),
    "a layer's own cut, recomputed": Arrangement(
        {"data": 1, "depth": 2, "height": 2},
        choices=hc.Choices(
            at={"blocks.0": hc.Choices(recompute=True), "late": hc.Choices(cut={2: "height"}, recompute=True)}
        ),
    ),
    "all": Arrangement(
        {"data": 2, "depth": 2, "height": 1},
        {"depth": (0, 4, 12)},
        gather=("late",),
        recompute=("first", "blocks.0", "blocks.1", "late"),
    ),
}


def train(model: nn.Module, shards: list[Tensor]) -> dict[str, Tensor]:
    """Two steps; weights, gradients and running statistics at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in shards:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **gradients}


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 1, 12, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_answer_is_that_of_one_rank(name: str) -> None:
    arrangement = ARRANGEMENTS[name]
    torch.manual_seed(0)
    start = Classifier().double()
    true = train(copy.deepcopy(start), samples())

    def body() -> dict[str, Tensor]:
        model = hc.distribute(copy.deepcopy(start), plan=arrangement)
        return train(model, [arrangement.shard(x, "NCDHW") for x in samples()])

    for found in run_local(arrangement.ranks, body):
        assert found.keys() == true.keys()
        for key, value in true.items():
            assert torch.allclose(found[key].double(), value.double(), rtol=1e-9, atol=1e-11), key


def test_recomputation_sends_nothing_twice() -> None:
    def messages(arrangement: Arrangement) -> int:
        mesh = arrangement.mesh()
        model = hc.distribute(Classifier().double(), plan=arrangement)
        mesh.world.traffic.clear()
        train(model, [arrangement.shard(x, "NCDHW") for x in samples()])
        return mesh.world.traffic.messages

    plain, again = ARRANGEMENTS["recompute"], replace(ARRANGEMENTS["recompute"], recompute=())
    assert run_local(2, lambda: messages(plain)) == run_local(2, lambda: messages(again))


def test_gathered_layers_exchange_no_halos() -> None:
    def places(arrangement: Arrangement) -> set[str]:
        mesh, heard = arrangement.mesh(), list[str]()
        model = hc.distribute(Classifier().double(), plan=arrangement)
        with mesh.world.events.listening(lambda event: heard.append(str(getattr(event, "label", "")))):
            train(model, [arrangement.shard(x, "NCDHW") for x in samples()])
        return {words for words in heard if "conv3d in late" in words}

    cut = replace(ARRANGEMENTS["gather"], gather=())
    assert run_local(2, lambda: places(cut))[0] and not run_local(2, lambda: places(ARRANGEMENTS["gather"]))[0]


def test_a_plan_for_something_else_is_refused() -> None:
    arrangement = Arrangement({"data": 1, "depth": 2}, fingerprint=fingerprint(Classifier()))

    def other_network() -> None:
        hc.distribute(nn.Conv3d(1, 1, 3), plan=arrangement)

    def no_such_module() -> None:
        hc.distribute(Classifier(), plan=replace(arrangement, gather=("tail",)))

    def mesh_too() -> None:
        hc.distribute(Classifier(), arrangement.mesh(), plan=arrangement)

    with pytest.raises(PlanError, match="made for another network: this Conv3d has other parameters; plan for this"):
        run_local(2, other_network)
    with pytest.raises(PlanError, match="the module 'tail', which Classifier does not have"):
        run_local(2, no_such_module)
    with pytest.raises(MeshError, match="a mesh or a plan"):
        run_local(2, mesh_too)
    with pytest.raises(PlanError, match="depth=2 is for 2 ranks, and this run has 3; start 2 ranks, or make a plan"):
        run_local(3, arrangement.mesh)
    with pytest.raises(PlanError, match="a tensor of 3 dims needs as many letters"):
        run_local(2, lambda: arrangement.shard(torch.zeros(2, 2, 2), "NCDHW"))


class Noted(nn.Module):
    def __init__(self, seen: list[dict[int, str]]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(dict(x.sharding.dims_by_axis()))
        return x.sin()


def test_a_module_is_given_the_cut_that_its_choices_name_and_computes_again() -> None:
    own = hc.Choices(cut={1: "depth"}, recompute=True)

    def body() -> list[dict[int, str]]:
        seen: list[dict[int, str]] = []
        mesh = hc.Mesh(hc.Choices(at={"1": own}), depth=2)
        model = hc.distribute(nn.Sequential(Noted(seen), Noted(seen)), mesh)
        x = torch.ones(2, 4, 4, dtype=torch.float64, requires_grad=True)
        model(hc.shard(x, mesh, {2: "depth"})).square().sum().backward()
        return seen

    assert run_local(2, body) == [[{2: "depth"}, {1: "depth"}, {1: "depth"}]] * 2


def test_choices_for_modules_are_checked() -> None:
    def distributed(choices: hc.Choices) -> None:
        hc.distribute(Classifier(), hc.Mesh(choices, depth=1))

    with pytest.raises(MeshError, match="are for a module"):
        run_local(1, lambda: distributed(hc.Choices(recompute=True)))
    with pytest.raises(MeshError, match=r"'lat', which Classifier does not have"):
        run_local(1, lambda: distributed(hc.Choices(at={"lat": hc.Choices(cut={2: "depth"})})))
    assert hash(hc.Choices(cut={2: "depth"})) != hash(hc.Choices()) and "cut={2: 'depth'}" in repr(
        hc.Choices(cut={2: "depth"})
    )
