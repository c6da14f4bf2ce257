"""Real processes over gloo: training equals one rank's, and a rank that fails never leaves the others hanging."""

import copy
import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halocline as hc
from halocline.testing.pool import RankPool, shared_pool
from halocline.world import Label
from halocline.world.launcher import adopt_environment
from halocline.world.mesh import forget


class Net(nn.Module):
    """Every family at once: convolutions of both kinds, three norms, a skip, a join of different cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = F.relu(self.batch(self.first(x)), inplace=True)
        low = F.relu(self.group(self.down(high)))
        return self.last(self.up(low) + high)


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return Net().double(), torch.randn(4, 2, 12, 10, dtype=torch.float64), torch.randint(0, 3, (4, 12, 10))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 5) -> tuple[list[float], dict]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_cut(sizes: dict[str, int]) -> tuple[list[float], dict]:
    mesh = hc.Mesh(**sizes)
    model, x, y = make()
    if mesh.rank:  # rank 0's weights are to arrive everywhere
        for parameter in model.parameters():
            parameter.data.zero_()
    dims = {0: "data", 2: "height"}
    model = hc.distribute(model, mesh)
    return train(model, hc.shard(x, mesh, dims), hc.shard(y, mesh, {0: "data", 1: "height"}))


@pytest.mark.parametrize("sizes", [{"data": 2, "height": 2}, {"data": 1, "height": 4}, {"data": 4, "height": 1}])
def test_training_equals_one_rank(sizes: dict[str, int]) -> None:
    true_losses, true_state = train(*make())
    found = shared_pool(4).run(train_cut, sizes)
    for losses, state in found:
        assert losses == pytest.approx(true_losses, rel=1e-12)
        for name, value in true_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-13)
    for name in true_state:  # the same bits on every rank
        assert all(torch.equal(found[0][1][name], state[name]) for _, state in found)


def plain_data_parallel() -> dict:
    mesh = hc.Mesh(data=-1)
    model, x, y = make()
    model = hc.distribute(model, mesh, batch_statistics="replica").eval()
    mine = slice(mesh.rank, mesh.rank + 1)
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_plain_inputs_on_a_data_mesh_are_local_batches() -> None:
    model, x, y = make()
    F.cross_entropy(model.eval()(x), y).backward()
    for gradients in shared_pool(4).run(plain_data_parallel):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-14)


def meet_fault(kind: str, culprit: int, deadline: float) -> str:
    """Two good convolutions; then one rank dies, sleeps, or runs something else."""
    forget()
    hc.init(deadline=deadline)
    mesh = hc.Mesh(height=-1)
    model = hc.distribute(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)).double(), mesh)
    x = hc.shard(torch.ones(1, 1, 16, 4, dtype=torch.float64), mesh, {2: "height"})
    model(x)
    h = model[0](x)
    if mesh.rank == culprit:
        if kind == "dies":
            os._exit(9)
        if kind == "hangs":
            time.sleep(600)
        if kind == "diverges":
            F.conv2d(h, torch.ones(1, 1, 5, 5, dtype=torch.float64), padding=2)
            return "the culprit ran on"
    (model[1](h)).sum().backward()
    return "no fault noticed"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dies", "hangs", "diverges"])
def test_a_failing_rank_is_named_by_all_others(kind: str) -> None:
    with RankPool(3) as pool:
        started = time.monotonic()
        outcomes = pool.outcomes(meet_fault, kind, 1, 2.0, deadline=14.0)
        assert time.monotonic() - started < 40
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        assert outcome.kind == "error", outcome.text
        assert isinstance(outcome.error, hc.RankFailure), outcome.text
        message = str(outcome.error)
        assert "rank 1" in message and "conv2d" in message and "in 1" in message


def mismatched_models() -> str:
    mesh = hc.Mesh(data=-1)
    try:
        hc.distribute(nn.Linear(2, 2 + mesh.rank // 2), mesh)
    except hc.MeshError as error:
        return str(error)
    return ""


def test_different_models_on_ranks_are_refused() -> None:
    assert all("different" in text for text in shared_pool(4).run(mismatched_models))


def copied_weights() -> list[torch.Tensor]:
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    mesh = hc.Mesh(data=-1)
    torch.manual_seed(mesh.rank)
    model = hc.distribute(copy.deepcopy(nn.Sequential(nn.Linear(3, 300), nn.BatchNorm1d(300))), mesh)
    return list(model.state_dict().values())


def test_rank_zeros_weights_go_everywhere() -> None:
    first, *others = shared_pool(4).run(copied_weights)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "123456",
}


def test_slurm_variables_become_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert adopt_environment()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu007",
    }
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 60000


def deadlines_chosen() -> list[int]:
    world = hc.Mesh(data=-1).world
    before, label, seen = world.deadline, Label("exchange", "a test"), []
    hc.init()
    for seconds in (20.0, 50.0, 40.0):
        world.waited(label, 1, time.perf_counter() - seconds)
        seen.append(world.deadline)
    world.sum(torch.ones(1), tuple(range(world.size)), Label("sum", "a test"))
    hc.init(deadline=7.0)
    world.waited(label, 1, time.perf_counter() - 50)
    seen.append(world.deadline)
    hc.init(deadline=before)
    return [round(deadline) for deadline in seen]


def test_the_default_deadline_grows_with_waits_that_ended_well() -> None:
    assert shared_pool(2).run(deadlines_chosen) == [[120, 200, 200, 7]] * 2
