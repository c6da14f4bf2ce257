"""The modes a model runs in: in channels-last format, under autocast."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

Found = dict[str, Tensor]


class Volume(nn.Module):
    """Every step, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.deep, self.group = nn.Conv3d(4, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.up, self.last = nn.ConvTranspose3d(6, 4, 2, 2), nn.Conv3d(12, 3, 1)

    def forward(self, x: Tensor) -> Found:
        found: Found = {"conv": self.first(x)}
        found["norm"] = high = self.norm(found["conv"]).relu()
        found["pool"] = F.max_pool3d(high, 2)
        with torch.autocast("cpu", enabled=False):
            found["deep"] = self.group(self.deep(found["pool"].to(self.deep.weight.dtype)))
        found["up"] = self.up(found["deep"])
        found["wide"] = F.interpolate(F.avg_pool3d(high, 2), scale_factor=2, mode="trilinear")
        found["cat"] = torch.cat([high, found["up"], found["wide"]], 1)
        found["out"] = self.last(found["cat"])
        found["softmax"], found["mean"] = found["out"].softmax(1), found["out"].mean((2, 3, 4))
        return found


def volume(build: Volume, x: Tensor, mesh: hc.Mesh | None, dtype: torch.dtype | None = None) -> tuple[Found, Found]:
    model = copy.deepcopy(build)
    if mesh is not None:
        x = hc.shard(x, hc.distribute(model, mesh) and mesh, {2: "depth"})
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        found = model(x)
        loss = found["out"].square().mean() + found["mean"].sum()
    loss.backward()
    return {**found, "loss": loss}, {name: p.grad for name, p in model.named_parameters()}


def _compare(build: Volume, x: Tensor, tolerance: float, dtype: torch.dtype | None = None) -> list[tuple[Found, Found]]:
    true, slopes = volume(build, x, None, dtype)

    def body() -> tuple[Found, Found]:
        found, gradients = volume(build, x, hc.Mesh(depth=2), dtype)
        for name, value in true.items():
            whole = hc.gather(found[name])
            assert whole.dtype == value.dtype, name
            assert relative_error(whole.detach(), value.detach()) < tolerance, name
        for name, slope in slopes.items():
            assert relative_error(gradients[name], slope) < tolerance, name
        return {name: hc.unwrap(value) for name, value in found.items()}, gradients

    return run_local(2, body)


#: Convolutions keep the format, as torch's do; the library's norms in training mode do not.
KEPT = ("conv", "up", "cat", "out")


def test_channels_last_end_to_end() -> None:
    torch.manual_seed(1)
    last = torch.channels_last_3d
    x = torch.randn(2, 2, 8, 6, 4).contiguous(memory_format=last)
    build = Volume().to(memory_format=last)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        found = _compare(copy.deepcopy(build).to(dtype), x.to(dtype), tolerance)
        true = volume(copy.deepcopy(build).to(dtype), x.to(dtype), None)[0]
        for tiles, _ in found:
            lost = [name for name in KEPT if true[name].is_contiguous(memory_format=last)]
            lost = [name for name in lost if not tiles[name].is_contiguous(memory_format=last)]
            assert not lost


def test_autocast_gives_one_ranks_dtypes() -> None:
    torch.manual_seed(1)
    found = _compare(Volume(), torch.randn(2, 2, 8, 6, 4), 0.02, torch.bfloat16)
    assert found[0][0]["up"].dtype == torch.bfloat16 and found[0][0]["deep"].dtype == torch.float32
