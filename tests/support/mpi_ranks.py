"""What the ranks of test_mpi_world.py run: found by name, since they are processes of their own."""

import importlib
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import halocline as hc
from halocline.testing import adjoint
from halocline.world import Label, Receive, Send, as_world, joined, mpi
from halocline.world.mpi import MpiWorld
from halocline.world.mpi_library import library

WORLDS: dict[int, MpiWorld] = {}
SIZES = (1, 7, 1000, 65537, 300001)


def everyone() -> MpiWorld:
    world = hc.Mesh(data=-1).world
    assert isinstance(world, MpiWorld)
    return world


def fresh(deadline: float, size: int | None = None) -> MpiWorld:
    """A world of the first ranks, that may fail without harm to the others."""
    mpi = library()
    group = mpi.COMM_WORLD.Get_group().Incl(range(size or mpi.COMM_WORLD.Get_size()))
    return MpiWorld(deadline, mpi.COMM_WORLD.Create_group(group))


def run_on_mpi(size: int, body: Callable[[], Any], deadline: float = 20.0) -> list[Any]:
    """In place of run_local: each rank runs the body once, and all learn what came of it."""
    rank, answer = dist.get_rank(), (None, None)
    if rank < size:
        if size not in WORLDS or WORLDS[size]._failed:
            WORLDS[size] = fresh(deadline, size)
        WORLDS[size].set_deadline(deadline)
        try:
            with as_world(WORLDS[size]):
                answer = (body(), None)
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            answer = (None, error)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    for _, error in answers:
        if error is not None:
            raise error
    return [value for value, _ in answers[:size]]


def run_tests(module: str, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The tests of a module on these ranks; the failures."""
    tests, failures = importlib.import_module(module), []
    tests.run_local = adjoint.run_local = run_on_mpi
    joined._GRACE = 0.2
    for name, arguments in cases:
        try:
            getattr(tests, name)(**arguments)
        except BaseException:  # noqa: BLE001  pytest's own among them
            failures.append(f"{name} {arguments}: {traceback.format_exc()}")
    return failures


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    layers = [
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 5, stride=2, padding=2),
    ]
    model = nn.Sequential(*layers, nn.AvgPool2d(3, 1, 1), nn.Conv2d(6, 3, 1)).double()
    return model, torch.randn(2, 2, 14, 11, dtype=torch.float64)


def cut_network() -> tuple[str, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    mesh = hc.Mesh(height=2, width=2)
    model, whole = network()
    x = hc.shard(whole, mesh, {2: "height", 3: "width"}).requires_grad_()
    model = hc.distribute(model, mesh)
    loss = model(x).square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return type(mesh.world).__name__, loss.detach(), gradients, hc.gather(x.grad)


def cut_network_comparing_places() -> int:
    """Ranks compare where they are during every wait, as they do during long ones."""
    before, mpi._COMPARE = mpi._COMPARE, 3e-4
    try:
        return sum(cut_network()[0] == "MpiWorld" for _ in range(4))
    finally:
        mpi._COMPARE = before


def deep_network(ranks: int) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(6)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers).double(), [torch.randn(3, 64, dtype=torch.float64) for _ in range(ranks)]


def average_with_overlap() -> tuple[int, dict[str, torch.Tensor]]:
    mesh = hc.Mesh(data=-1)
    model, batches = deep_network(mesh.size)
    names = list(model.state_dict())
    model = hc.distribute(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = mesh.world.traffic.sums
    for _ in range(4):
        optimizer.zero_grad()
        model(batches[mesh.rank]).square().mean().backward()
        optimizer.step()
    values = [value.detach().clone() for value in model.state_dict().values()]
    return mesh.world.traffic.sums - before, dict(zip(names, values, strict=True))


def looks_until_done() -> int:
    world, ranks = everyone(), tuple(range(dist.get_world_size()))
    large = torch.ones(1 << 20, dtype=torch.float64)
    pending = world.begin_sum(large, ranks, Label("sum", "test", "gradients"))
    looks = 0
    while not world._is_done(pending._posted) and looks < 300:
        looks += 1
        time.sleep(0.05)
    pending.wait()
    assert torch.equal(large, torch.full_like(large, world.size))
    return looks


def sum_float8() -> str:
    try:
        everyone().begin_sum(
            torch.zeros(3).to(torch.float8_e5m2), (0, 1, 2, 3), Label("sum", "test", "gradients")
        ).wait()
    except hc.Refused as error:
        return str(error)
    return ""


def sums_of_many_sizes() -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part and the sum, over the first 1, 2, 3, ... ranks; each rank's numbers are of another size."""
    world, found = everyone(), {}
    generator = torch.Generator().manual_seed(world.rank)
    for count in range(world.rank + 1, world.size + 1):
        for size in SIZES:
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                part = (torch.randn(size, generator=generator) * 2.0**world.rank).to(dtype)
                total = part.clone()
                world.begin_sum(total, tuple(range(count)), Label("sum", "test", "gradients")).wait()
                found[count, size, dtype] = part, total
    return found


def swap(world: MpiWorld, peer: int, operation: str, place: str, send: bool = True) -> str:
    """What the failure says, if it fails."""
    x = torch.ones(5)
    try:
        sends = [Send(peer, x)] if send else []
        world.begin(sends, [Receive(peer, 5)], x, tuple(range(world.size)), Label(operation, place)).wait()
    except hc.RankFailure as error:
        return str(error)
    return ""


def diverge() -> str:
    """Pairs whose partners run another operation each."""
    joined._GRACE = 0.2
    world = fresh(0.5)
    return swap(world, world.rank ^ 1, f"conv2d of rank {world.rank}", "down.1")


def wait_for_one_that_leaves() -> str:
    joined._GRACE = 0.2
    world = fresh(600.0)
    if world.rank == 0:
        return swap(world, 1, "fetch", "encoder", send=False)
    if world.rank == 1:
        world.leave()
        return ""
    text = ""
    for _ in range(world.rank - 1):  # a second try is refused at once
        try:
            world.begin_sum(torch.ones(5), tuple(range(world.size)), Label("sum", "loss", "gradients")).wait()
        except hc.RankFailure as error:
            text = str(error)
    return text


def print_a_mean_on_rank_0() -> tuple[str, float]:
    hc.init(deadline=60.0)
    mesh = hc.Mesh(height=-1)
    x = hc.shard(torch.ones(1, 1, 8, 4), mesh, {2: "height"})
    began = time.monotonic()
    try:
        if mesh.rank == 0:
            x.mean()
        (x * 2).mean()
    except hc.RankFailure as error:
        return str(error), time.monotonic() - began
    return "nothing noticed", 0.0
