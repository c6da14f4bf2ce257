"""What the README says of torch's own DTensor, shown on the installed torch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import halocline as hc
from halocline.testing import shared_pool

pytestmark = pytest.mark.long


def convolve_both_ways() -> tuple[bool, float, float]:
    """Did DTensor raise, how far off it is, and how far off we are, for a 3x3 convolution cut in height."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    x, kernel = torch.randn(1, 2, 16, 8), torch.randn(3, 2, 3, 3)
    true = F.conv2d(x, kernel, padding=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    raised, theirs = False, 0.0
    try:
        cut = distribute_tensor(x, mesh, [Shard(2)])
        found = F.conv2d(cut, distribute_tensor(kernel, mesh, [Replicate()]), padding=1).full_tensor()
        theirs = (found - true).abs().max().item() if found.shape == true.shape else float("inf")
    except (RuntimeError, NotImplementedError, AssertionError):
        raised = True
    ours = hc.gather(F.conv2d(hc.shard(x, hc.Mesh(height=-1), {2: "height"}), kernel, padding=1))
    return raised, theirs, (ours - true).abs().max().item()


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the README speaks of torch 2.13")
def test_dtensor_cut_in_space_is_wrong_without_an_error() -> None:
    for raised, theirs, ours in shared_pool(4).run(convolve_both_ways):
        assert not raised and theirs > 0.1
        assert ours < 1e-5
