"""What a rank holds: at most 1.2/p of the untouched model's activations, from allocator events."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import halocline as hc
from halocline.testing import peak_bytes, shared_pool
from halocline.workloads.unet3d import UNet3d


def peak_of_step(shape: tuple[int, ...], sizes: dict[str, int] | None) -> int:
    """Peak of live tensor bytes above model, gradients and input during one forward and backward."""
    torch.manual_seed(0)
    # Width 20 keeps every wide convolution on torch's one fast path, cut or not: below it the CPU unrolls its input.
    model = UNet3d(width=20)
    x, y = torch.randn(shape), torch.randint(0, 3, (shape[0], *shape[2:]))
    quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if sizes:
        mesh = hc.Mesh(**sizes)
        model = hc.distribute(model, mesh)
        quiet = hc.no_sync(model)  # buckets of gradients are no activations
        x, y = hc.shard(x, mesh, {2: "depth", 3: "height"}), hc.shard(y, mesh, {1: "depth", 2: "height"})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with quiet:
        return peak_bytes(lambda: F.cross_entropy(model(x), y).backward()).peak


@pytest.mark.long
def test_unet_peaks_at_its_share() -> None:
    shape = (1, 1, 64, 32, 32)
    true = shared_pool(1).run(peak_of_step, shape, None, deadline=120)[0]
    cut = shared_pool(2).run(peak_of_step, shape, {"depth": 2, "height": 1}, deadline=120)
    print(f"one rank {true} bytes; cut in two {cut}; share {max(cut) / true:.3f}")
    assert max(cut) <= 1.2 / 2 * true
