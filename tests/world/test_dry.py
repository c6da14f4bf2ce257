"""A dry record of one rank is what that rank really does: same exchanges, same bytes at the transport."""

import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halocline as hc
from halocline.program import Record, dry, record
from halocline.testing import shared_pool
from halocline.workloads.cosmoflow import CosmoFlow
from halocline.workloads.unet3d import UNet3d
from halocline.world import Began, Summed, Waited

DIMS = {0: "data", 2: "depth", 3: "height"}


def unet(device: str) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    with torch.device(device):
        return UNet3d(width=2), torch.zeros(2, 1, 16, 24, 16), lambda out: out.square().mean()


def cosmoflow(device: str) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    with torch.device(device):
        return CosmoFlow(width=2, channels_in=2, size=(36, 32, 32)), torch.zeros(2, 2, 36, 32, 32), torch.sum


NETWORKS = {"unet": unet, "cosmoflow": cosmoflow}


def one_step(network: str, sizes: dict[str, int], device: str) -> tuple[Record, int, int]:
    mesh = hc.Mesh(**sizes)
    model, volume, loss = NETWORKS[network](device)
    model = hc.distribute(model, mesh)
    x = hc.shard(volume, mesh, {dim: axis for dim, axis in DIMS.items() if axis in sizes})
    mesh.world.traffic.clear()
    found = record(lambda: loss(model(x)).backward(), mesh)
    return found, mesh.world.traffic.transport_bytes, mesh.world.traffic.messages


def exchanges(found: Record) -> list[object]:
    """All communication, numbered from the start of the step; averages are numbered by the life of a process."""

    def label(event: Began | Waited | Summed) -> object:
        operation = re.sub(r"average \d+", "average", event.label.operation)
        return event.label._replace(operation=operation, channel=re.sub(r" \d+", "", event.label.channel))

    first = next(e.number for e in found.events if isinstance(e, Began))
    renumbered: list[object] = []
    for event in found.events:
        if isinstance(event, Began):
            renumbered.append(("begin", event.number - first, label(event), event.sends, event.receives))
        elif isinstance(event, Waited):
            renumbered.append(("wait", event.number - first, label(event)))
        elif isinstance(event, Summed):
            renumbered.append(("ring", label(event), event.ranks, event.bytes))
    return renumbered


@pytest.mark.parametrize(
    ("network", "sizes"),
    [
        ("unet", {"data": 1, "depth": 2, "height": 2}),
        ("unet", {"depth": 4}),
        ("cosmoflow", {"data": 2, "depth": 2}),
        pytest.param("unet", {"data": 2, "depth": 2}, marks=pytest.mark.long),
        pytest.param("cosmoflow", {"data": 1, "depth": 2, "height": 2}, marks=pytest.mark.long),
        pytest.param("cosmoflow", {"depth": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_dry_equals_real(network: str, sizes: dict[str, int]) -> None:
    real = shared_pool(4).run(one_step, network, sizes, "cpu")
    for rank, (found, transport_bytes, messages) in enumerate(real):
        with dry(rank, 4):
            planned, planned_bytes, planned_messages = one_step(network, sizes, "meta")
        assert exchanges(planned) == exchanges(found)
        assert planned.sent_bytes == planned_bytes == transport_bytes == found.sent_bytes
        assert planned.messages == planned_messages == messages
        assert planned.flops > 0


def test_flops_of_the_unet_are_the_papers() -> None:
    """93.8 TF a training step at 256 cubed, whatever the cut; a rank's share of 16 is a sixteenth."""
    with dry(13_800, 27_600):
        mesh = hc.Mesh(data=1725, depth=4, height=4)
        with torch.device("meta"):
            model, volume = UNet3d(), torch.empty(1725, 1, 256, 256, 256)
            target = torch.empty(1725, 256, 256, 256, dtype=torch.long)
        model = hc.distribute(model, mesh)
        x = hc.shard(volume, mesh, {0: "data", 2: "depth", 3: "height"})
        y = hc.shard(target, mesh, {0: "data", 1: "depth", 2: "height"})
        found = record(lambda: F.cross_entropy(model(x), y).backward(), mesh)
    convolutions = [o for o in found.operations if "convolution" in o.name]
    tiles, rims = ([o for o in convolutions if (len(o.shapes[0]) == 5) == tile] for tile in (True, False))
    assert sum(o.flops for o in tiles) * 16 == pytest.approx(93.8e12, rel=0.002)
    assert 0 < sum(o.flops for o in rims) * 16 < 0.05 * 93.8e12  # what slabs add, plane by plane
    assert {o.phase for o in found.operations} == {"forward", "backward"}
    assert any(o.place.startswith("down") for o in found.operations)
    again = json.loads(found.to_json())
    assert (again["rank"], again["ranks"], len(again["events"])) == (13_800, 27_600, len(found.events))


def test_a_value_is_asked_for_by_name() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.mean().item() > 0 else x

    with dry(0, 2):
        mesh = hc.Mesh(depth=2)
        model = hc.distribute(nn.Sequential(nn.ReLU(), Branching()), mesh)
        x = hc.shard(torch.empty(1, 1, 8, device="meta"), mesh, {2: "depth"})
        with pytest.raises(hc.Refused, match="item in 1: it needs a value"):
            record(lambda: model(x), mesh)
