"""On a GPU: two ranks on one device, whose messages go through pinned host memory, train as one rank does."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_ranks import make, train

import halocline as hc
from halocline.testing import RankPool, relative_error, shared_pool
from halocline.world.mesh import forget

pytestmark = pytest.mark.gpu


def train_on_gpu(sizes: dict[str, int]) -> tuple[list[float], dict, dict]:
    model, x, y = (thing.cuda() for thing in make())
    mesh = hc.Mesh(**sizes)
    model = hc.distribute(model, mesh)
    x, y = hc.shard(x, mesh, {0: "data", 2: "height"}), hc.shard(y, mesh, {0: "data", 1: "height"})
    losses, state = train(model, x, y)
    return losses, {name: value.cpu() for name, value in state.items()}, {"device": str(x.device)}


@pytest.mark.parametrize("sizes", [{"data": 1, "height": 2}, {"data": 2, "height": 1}], ids=str)
def test_training_on_a_gpu_equals_one_rank(sizes: dict[str, int]) -> None:
    model, x, y = (thing.cuda() for thing in make())
    true_losses, true_state = train(model, x, y)
    for losses, state, facts in shared_pool(2).run(train_on_gpu, sizes):
        assert facts["device"].startswith("cuda")
        assert losses == pytest.approx(true_losses, rel=1e-10)
        for name, value in true_state.items():
            torch.testing.assert_close(state[name], value.cpu(), rtol=1e-9, atol=1e-12)


def one_rank_with_nccl() -> tuple[list[float], str]:
    """What torchrun with one GPU a rank selects; with one GPU, start-up and control are all it can show."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
    }
    dist.destroy_process_group()
    forget()
    hc.init(deadline=30)
    mesh = hc.Mesh(data=1)
    model, x, y = (thing.cuda() for thing in make())
    model = hc.distribute(model, mesh)
    return train(model, hc.shard(x, mesh, {0: "data"}), hc.shard(y, mesh, {0: "data"}))[0], str(
        dist.get_backend_config()
    )


def test_nccl_starts_beside_gloo() -> None:
    model, x, y = (thing.cuda() for thing in make())
    with RankPool(1) as pool:
        ((losses, backend),) = pool.run(one_rank_with_nccl)
    assert "nccl" in backend
    assert "gloo" in backend
    assert losses == pytest.approx(train(model, x, y)[0], rel=1e-10)


def halo_network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv3d(4, 8, 3, padding=1),
        torch.nn.MaxPool3d(3, 2, 1),
        torch.nn.ConvTranspose3d(8, 4, 3, 2, 1, 1),
        torch.nn.Conv3d(4, 4, 5, padding=2),
    ).double()


def halo_step(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    y = model(x)
    y.square().mean().backward()
    return hc.gather(y).detach().cpu(), [p.grad.cpu() for p in model.parameters()]


def halo_on_gpu(channels_last: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tiles above the size from which halos lie beside them."""
    mesh = hc.Mesh(depth=2)
    x = torch.randn(1, 4, 32, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
    x = x.to(memory_format=torch.channels_last_3d) if channels_last else x
    model = hc.distribute(halo_network().cuda(), mesh)
    return halo_step(model, hc.shard(x, mesh, {2: "depth"}))


@pytest.mark.parametrize("channels_last", [False, True])
def test_halos_beside_the_tile_on_a_gpu(channels_last: bool) -> None:
    x = torch.randn(1, 4, 32, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    true, true_gradients = halo_step(halo_network().cuda(), x.cuda())
    for y, gradients in shared_pool(2).run(halo_on_gpu, channels_last):
        torch.testing.assert_close(y, true, rtol=1e-9, atol=1e-11)
        for found, gradient in zip(gradients, true_gradients, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-11)


NORMS = {"batch": (F.batch_norm, (None, None)), "instance": (F.instance_norm, ()), "group": (F.group_norm, (2,))}


def norm_gradient(name: str, shape: tuple[int, ...], device: str, sizes: dict[str, int] | None) -> list[torch.Tensor]:
    """Value and input gradient of a norm in training, channels last, of one sample a rank."""
    function, arguments = NORMS[name]
    generator = torch.Generator().manual_seed(0)
    x, seed = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
    form = (torch.channels_last, torch.channels_last_3d)[len(shape) - 4]
    options = {"training": True} if name == "batch" else {}
    if sizes is None:  # on contiguous tensors: torch's own gradient of one sample with channels last may be wrong
        leaf = x.requires_grad_()
        made = function(leaf, *arguments, **options)
        made.backward(seed)
        return [made.detach().cpu(), leaf.grad.cpu()]
    mesh, cut = hc.Mesh(**sizes), {0 if shape[0] > 1 else 2: "a"}
    leaf = x.contiguous(memory_format=form).requires_grad_()
    made = function(hc.shard(leaf, mesh, cut), *arguments, **options)
    made.backward(hc.shard(seed.contiguous(memory_format=form), mesh, cut))
    return [hc.gather(made.detach()).cpu(), leaf.grad.cpu()]


@pytest.mark.parametrize("shape", [(1, 4, 8, 6), (2, 4, 8, 6), (1, 4, 4, 8, 6)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_one_sample_with_channels_last(name: str, shape: tuple[int, ...]) -> None:
    true = norm_gradient(name, shape, "cuda", None)
    for found in shared_pool(2).run(norm_gradient, name, shape, "cuda", {"a": 2}):
        assert max(relative_error(a, b) for a, b in zip(found, true, strict=True)) < 1e-12
