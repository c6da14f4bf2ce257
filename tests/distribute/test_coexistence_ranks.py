"""Beside what else runs on ranks: DDP and FSDP2 average the gradients, DTensors come in and go out, torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from coexisting import INPUT, TARGET, sample
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.testing.pool import shared_pool

SIZES = {"data": 2, "height": 2}
Trained = tuple[list[float], dict[str, Tensor]]


def train(model: nn.Module, x: Tensor, y: Tensor) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name.removeprefix("module."): value.detach() for name, value in model.state_dict().items()}
    return losses, {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in state.items()}


def in_ddp(model: nn.Module, **options: object) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


def in_fsdp(model: nn.Module, *sizes: int, axis: str | None = None) -> nn.Module:
    """Two groups of parameters, one inside the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    for module in (model.deep, model):
        fully_shard(module, mesh=mesh[axis] if axis else mesh)
    return model


OWNERS = {
    "DDP": in_ddp,
    "DDP, unused parameters": lambda model: in_ddp(model, find_unused_parameters=True),
    "DDP, static graph": lambda model: in_ddp(model, static_graph=True),
    "FSDP2": lambda model: in_fsdp(model, 4),
    "HSDP": lambda model: in_fsdp(model, 2, 2),
    "FSDP2 over half of the ranks": lambda model: in_fsdp(model, 2, 2, axis="shards"),
}


def train_owned(owner: str, late: bool = False) -> Trained | Exception:
    mesh, (model, x, y) = hc.Mesh(**SIZES), sample()
    try:
        model = OWNERS[owner](hc.distribute(model, mesh)) if late else hc.distribute(OWNERS[owner](model), mesh)
        return train(model, hc.shard(x, mesh, INPUT), hc.shard(y, mesh, TARGET))
    except hc.HaloclineError as error:
        return error


@pytest.mark.long
@pytest.mark.parametrize("owner", [name for name in OWNERS if "half" not in name])
def test_whoever_averages_training_equals_one_rank(owner: str) -> None:
    model, x, y = sample()
    losses, state = train(model, x, y)
    for found in shared_pool(4).run(train_owned, owner):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        for name, value in state.items():
            assert relative_error(found[1][name], value, 1.0) < 1e-9, name


def test_averages_over_a_part_of_the_ranks_are_refused() -> None:
    for error in shared_pool(4).run(train_owned, "FSDP2 over half of the ranks"):
        assert isinstance(error, hc.MeshError) and "over 2 ranks" in str(error)


def test_parameters_replaced_after_distribute_are_noticed() -> None:
    """FSDP2 after hc.distribute; DDP keeps the parameters, and a mean of means is the mean."""
    for error in shared_pool(4).run(train_owned, "FSDP2", True):
        assert isinstance(error, hc.Refused) and "nobody averages" in str(error)
    model, x, y = sample()
    losses, _ = train(model, x, y)
    for found in shared_pool(4).run(train_owned, "DDP", True):
        assert found[0] == pytest.approx(losses, rel=1e-10)


def function(x: Tensor) -> Tensor:
    return (x * x).sin() * 2


def through_dtensors(shape: list[int], cuts: dict[str, int]) -> list[tuple[Tensor, Tensor]]:
    """Pairs that should be equal: found on cut tensors, and true."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = hc.Mesh(data=2, depth=2)
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "depth"))
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    function(whole).square().sum().backward()
    placements = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in mesh.names]
    source = distribute_tensor(whole.detach(), theirs, placements).requires_grad_()
    came = function(hc.from_dtensor(source, mesh))
    came.square().sum().backward()
    pairs = [(hc.gather(came), function(whole)), (source.grad.full_tensor(), whole.grad)]
    ours = hc.shard(whole.detach(), mesh, {dim: axis for axis, dim in cuts.items()}).requires_grad_()
    gone = hc.to_dtensor(function(ours), theirs)
    assert isinstance(gone, DTensor) and gone.shape == whole.shape and list(gone.placements) == placements
    gone.square().sum().full_tensor().backward()
    return [*pairs, (gone.full_tensor(), function(whole)), (hc.gather(ours.grad), whole.grad)]


CUTS = [
    ([4, 6], {"data": 0, "depth": 1}),
    ([5, 3], {"data": 1, "depth": 0}),  # uneven, and cut by chunks of 3 and 2
    ([3, 7], {"depth": 1}),  # whole along data, where each rank holds a share of the gradient
    ([1, 2], {"data": 0, "depth": 1}),  # a rank with nothing
]


@pytest.mark.parametrize(("shape", "cuts"), CUTS)
def test_dtensors_in_and_out(shape: list[int], cuts: dict[str, int]) -> None:
    for pairs in shared_pool(4).run(through_dtensors, shape, cuts):
        assert all(relative_error(found.detach(), true.detach()) < 1e-12 for found, true in pairs)


def unfit_dtensors() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, whole = hc.Mesh(data=2, depth=2), torch.ones(4, 4)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "depth"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("depth", "data"))
    trials = [
        lambda: hc.from_dtensor(distribute_tensor(whole, named, [Shard(0), Shard(0)]), mesh),
        lambda: hc.from_dtensor(DTensor.from_local(whole, named, [Partial(), Replicate()]), mesh),
        lambda: hc.from_dtensor(distribute_tensor(whole, turned, [Shard(0), Replicate()]), mesh),
        lambda: hc.from_dtensor(distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)]), mesh),
        lambda: hc.to_dtensor(whole),
    ]
    found = []
    for trial in trials:
        with pytest.raises((hc.MeshError, hc.ShardingError)) as caught:
            trial()
        found.append(str(caught.value))
    assert not isinstance(hc.from_dtensor(distribute_tensor(whole, named, [Replicate()] * 2), mesh), hc.ShardedTensor)
    default = hc.to_dtensor(hc.shard(whole, mesh, {1: "depth"}))
    assert default.device_mesh.mesh_dim_names == mesh.names and list(default.placements) == [Replicate(), Shard(1)]
    return found


def test_dtensors_that_do_not_fit_are_refused() -> None:
    for texts in shared_pool(4).run(unfit_dtensors):
        assert all(len(text) > 30 for text in texts)


#: Older versions of torch.compile raise an error of their own where the size of a cut dim is asked for.
ASKS = torch.__version__ >= (2, 13)


class Branching(nn.Module):
    """Asks for shapes, gathers, and computes with whole values between the cut ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(torch.relu(self.first(x)))
        if ASKS and x.shape[2] > 12:
            out = out * 2 / x.size(2)
        weight = (self.last.bias * 2).exp().sum()
        return out + hc.gather(out[:, :1]).mean() * weight


def branched(backend: str | None) -> list[Tensor]:
    """Values and gradients for several sizes; compiled, and cut, where a backend is named."""
    torch.manual_seed(4)
    model = Branching().double()
    samples, found = [torch.randn(1, 1, size, dtype=torch.float64) for size in (12, 16)], []
    run = model
    if backend is not None:
        mesh = hc.Mesh(width=-1)
        run = torch.compile(hc.distribute(model, mesh), backend=backend)
        samples = [hc.shard(x, mesh, {2: "width"}) for x in samples]
    for x in samples:
        out = run(x)
        out.square().mean().backward()
        found += [hc.gather(out).detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_compiled_models_run_eagerly_and_right(backend: str) -> None:
    """On processes: torch compiles in one thread at a time, and ranks that are threads wait for each other."""
    true = branched(None)
    for found in shared_pool(4).run(branched, backend):
        assert all(relative_error(a, b, 1.0) < 1e-9 for a, b in zip(found, true, strict=True))
