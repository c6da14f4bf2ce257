"""Parameters that are cut, or each rank's own, on some axes: averaging, weights, checkpoints, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing import shared_pool
from halocline.train import Checkpoints, place_optimizer_state
from halocline.train.guard import Guard, TrainingError
from halocline.train.settings import GuardSettings
from halocline.world import Mesh, place_parameter, placement_of, run_local

STEPS = 5


class Three(nn.Module):
    """A parameter of each kind: whole, cut on depth (each rank multiplies by its part), own on depth."""

    def __init__(self, place: int, places: int) -> None:
        super().__init__()
        numbers = torch.randn(10 + 4 * places, generator=torch.Generator().manual_seed(3)).double()
        whole, cut, own = numbers[:4], numbers[4:10].chunk(places)[place], numbers[10:].chunk(places)[place]
        self.whole, self.cut, self.own = (nn.Parameter(each.clone()) for each in (whole, cut, own))
        place_parameter(self.cut, depth="cut")
        place_parameter(self.own, depth="own")

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.whole * self.own).sum() * self.cut.square().sum()


def sample(data: int, depth: int, step: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(100 * step + 10 * data + depth)).double()


def train(mesh: Mesh, steps: int = STEPS, **options: Any) -> tuple[Three, torch.optim.Optimizer]:
    data, depth = mesh.coordinates["data"], mesh.coordinates["depth"]
    model = Three(depth, mesh.sizes["depth"])
    if mesh.rank == 3:
        with torch.no_grad():  # the first rank along data has the right values
            model.own.add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if "overlap" in options:
        options = {**options, "optimizer": optimizer}
    hc.distribute(model, mesh, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(sample(data, depth, step)).backward()
        optimizer.step()
    return model, optimizer


def one_rank(steps: int = STEPS) -> list[Three]:
    """The models of both places on depth, trained together on one rank."""
    models = [Three(place, 2) for place in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for model in models]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for depth, model in enumerate(models):
            (sum(model(sample(data, depth, step)) for data in range(2)) / 2).backward()  # type: ignore[union-attr]
        whole = (models[0].whole.grad + models[1].whole.grad) / 2  # type: ignore[operator]
        for model, optimizer in zip(models, optimizers, strict=True):
            model.whole.grad = whole.clone()
            optimizer.step()
    return models


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIONS: list[dict[str, Any]] = [{}, {"overlap": "next-forward"}, {"deterministic": False}, {"rings": "levels"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_averaged_over_the_axes_on_which_a_parameter_is_whole(options: dict[str, Any]) -> None:
    found = run_local(4, lambda: weights(train(Mesh(data=2, depth=2), **options)[0]))
    for rank, mine in enumerate(found):
        for a, b in zip(mine, weights(one_rank()[rank % 2]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def trained_between_processes() -> list[Tensor]:
    return weights(train(Mesh(data=2, depth=2))[0])


def test_between_processes() -> None:
    found = shared_pool(4).run(trained_between_processes, deadline=60.0)
    for rank, mine in enumerate(found):
        for a, b in zip(mine, weights(one_rank()[rank % 2]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_pile_up_under_no_sync() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2, depth=2)
        model, _ = train(mesh, 2)
        model.zero_grad()
        x = sample(mesh.coordinates["data"], mesh.coordinates["depth"], 9)
        with hc.no_sync(model):
            model(x).backward()
        model(x).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    for rank, mine in enumerate(run_local(4, run)):
        models = one_rank(2)
        for depth, model in enumerate(models):
            model.zero_grad()
            (sum(model(sample(data, depth, 9)) for data in range(2)) / 2).backward()  # type: ignore[union-attr]
        own = models[rank % 2]
        true = [models[0].whole.grad + models[1].whole.grad, 2 * own.cut.grad, 2 * own.own.grad]  # type: ignore[operator]
        for a, b in zip(mine, true, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_is_own_on_every_axis_is_never_averaged() -> None:
    def run() -> Tensor:
        mesh = Mesh(data=2)
        model = nn.Linear(2, 1, bias=False).double()
        place_parameter(model, data="own")
        with torch.no_grad():
            model.weight.fill_(1.0 + mesh.rank)
        hc.distribute(model, mesh)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + mesh.rank).double()).sum().backward()
        return torch.cat([model.weight.detach().flatten(), model.weight.grad.flatten()])  # type: ignore[union-attr]

    assert [each.tolist() for each in run_local(2, run)] == [[1.0] * 4, [2.0] * 4]


def saved_and_loaded(folder: Path) -> bool:
    mesh = Mesh(data=2, depth=2)
    model, optimizer = train(mesh, 3)
    place_optimizer_state(optimizer)
    tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with Checkpoints(folder, mesh) as checkpoints:
        checkpoints.save(3, tensors, {}, wait=True)
        loaded = checkpoints.load_latest({"model": model.state_dict()})
    assert loaded is not None
    before = weights(model)
    moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(loaded.tensors["model"])
    optimizer.load_state_dict(loaded.tensors["optimizer"])
    same = [*zip(weights(model), before, strict=True)]
    same += zip([state["momentum_buffer"] for state in optimizer.state.values()], moments, strict=True)
    return all(torch.equal(a, b) for a, b in same)


def test_a_checkpoint_has_the_values_of_every_place(tmp_path: Path) -> None:
    assert shared_pool(4).run(saved_and_loaded, tmp_path, deadline=60.0) == [True] * 4


def loaded_elsewhere(folder: Path) -> str:
    model = Three(0, 2)
    with Checkpoints(folder, Mesh(data=4)) as checkpoints, pytest.raises(hc.HaloclineError) as raised:
        checkpoints.load_latest({"model": model.state_dict()})
    return str(raised.value)


def test_it_is_loaded_on_the_same_axes_alone(tmp_path: Path) -> None:
    shared_pool(4).run(saved_and_loaded, tmp_path, deadline=60.0)
    assert all("not whole on axis 'depth'" in told for told in shared_pool(4).run(loaded_elsewhere, tmp_path))


def test_weights_are_compared_among_ranks_that_share_them() -> None:
    def run() -> str:
        mesh = Mesh(data=2, depth=2)
        model, _ = train(mesh, 2)
        guard = Guard(GuardSettings(drift_every=1), model, mesh)
        guard.look(0, 1.0, 0.1)  # own and cut values differ along depth, and may
        with torch.no_grad():
            model.own.add_(mesh.rank == 3)
        with pytest.raises(TrainingError) as raised:
            guard.look(1, 1.0, 0.1)
        return str(raised.value)

    for told in run_local(4, run):
        assert "first own (among ranks that share it; it is own on depth)" in told


def test_what_cannot_be_is_refused() -> None:
    def run() -> None:
        mesh = Mesh(depth=2)
        with pytest.raises(hc.MeshError, match="whole, cut, own, not 'split'"):
            place_parameter(nn.Linear(1, 1), depth="split")
        placed = nn.Conv1d(1, 1, 3, padding=1)
        place_parameter(placed, depth="own")
        with pytest.raises(hc.MeshError, match="lag=1 takes parameters that are whole"):
            hc.distribute(_partly_own(), Mesh(data=2, depth=1), lag=1)
        with pytest.raises(hc.MeshError, match="does so over all ranks"):
            hc.distribute(_partly_own(), Mesh(data=2, depth=1), averaging="external")
        with pytest.raises(hc.MeshError, match="no axis 'depth'"):
            hc.distribute(_partly_own(), Mesh(data=2))
        model = hc.distribute(placed, mesh)
        with pytest.raises(hc.Refused, match="is own on depth, along which the work is cut"):
            model(hc.shard(torch.ones(1, 1, 8), mesh, {2: "depth"}))

    run_local(2, run)


def _partly_own() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    place_parameter(model[1], depth="own")
    return model


def late_placements(mesh: Mesh) -> list[str]:
    """After ``hc.distribute``; with a gradient only later; with ``lag``."""
    said = []
    model = nn.Linear(2, 1).double()
    hc.distribute(model, mesh)
    frozen = nn.Linear(2, 1).double()
    place_parameter(frozen, data="own")
    frozen.requires_grad_(False)
    frozen_first = hc.distribute(nn.Sequential(frozen, nn.Linear(1, 1).double()), mesh)
    frozen.requires_grad_(True)
    own = nn.Linear(2, 1).double()
    place_parameter(own, data="own", depth="own")
    for attempt in (
        lambda: place_parameter(model, data="own"),
        lambda: frozen_first(torch.ones(1, 2, dtype=torch.float64)),
        lambda: hc.distribute(own, mesh, lag=1),
    ):
        with pytest.raises(hc.MeshError) as refusal:
            attempt()
        said.append(str(refusal.value))
    return said


def test_late_placements_are_refused() -> None:
    for after, thawed, lagged in run_local(4, lambda: late_placements(Mesh(data=2, depth=2))):
        assert "comes before hc.distribute" in after
        assert "required no gradient at hc.distribute" in thawed
        assert "lag=1 takes parameters that are whole" in lagged


class Roles(nn.Module):
    """A trunk that all ranks share, and a network with a batch norm that each group of ranks owns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.role = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.role(self.trunk(x)).square().mean()


def role_of(group: int) -> Roles:
    torch.manual_seed(0)
    model = Roles().double()
    with torch.no_grad():
        for parameter in model.role.parameters():
            parameter.add_(0.1 * group)
    return model


def rows(group: int, step: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + group)).double() + group


@pytest.mark.parametrize("copied", [False, True], ids=["placed", "a copy"])
def test_each_group_owns_a_network_with_its_buffers(copied: bool) -> None:
    """Against one rank with both groups' networks: the trunk's gradient is the mean, a role's its own."""
    models = [role_of(group) for group in range(2)]  # before the ranks, whose threads share torch's generator

    def run() -> dict[str, Tensor]:
        mesh = Mesh(group=2)
        model = models[mesh.coordinates["group"]]
        hc.place_parameter(model.role, group="own")
        if copied:
            model = copy.deepcopy(model)
        hc.distribute(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(mesh.coordinates["group"], step)).backward()
            optimizer.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    alone = [role_of(group) for group in range(2)]
    for step in range(3):
        for group, model in enumerate(alone):
            model.zero_grad()
            model(rows(group, step)).backward()
        for a, b in zip(alone[0].trunk.parameters(), alone[1].trunk.parameters(), strict=True):
            a.grad = b.grad = (a.grad + b.grad) / 2  # type: ignore[operator]
        for model in alone:
            torch.optim.SGD(model.parameters(), 0.05).step()
    found = run_local(2, run)
    assert not torch.equal(found[0]["role.1.running_mean"], found[1]["role.1.running_mean"])
    for mine, model in zip(found, alone, strict=True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_marks_outlive_copies_and_pickles(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    hc.place_parameter(weight, depth="cut")
    torch.save(weight, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=False)
    for made in (copy.deepcopy(weight), copy.deepcopy(copy.deepcopy(weight)), loaded, copy.deepcopy(loaded)):
        assert placement_of(made) == {"depth": "cut"}
        assert isinstance(made, nn.Parameter) and made.data_ptr() != weight.data_ptr()
