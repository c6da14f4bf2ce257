"""A dry record of one rank is what that rank really does: same exchanges, same bytes at the transport."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halocline as hc
from halocline.program import Record, dry, record
from halocline.testing import shared_pool
from halocline.workloads.cosmoflow import CosmoFlow
from halocline.workloads.unet3d import UNet3d
from halocline.world import Averaged, Begun, Computed, Event, Redistributed, Summed, Traffic, Waited, World

DIMS = {0: "data", 2: "depth", 3: "height"}


def unet(device: str) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    with torch.device(device):
        return UNet3d(width=2), torch.zeros(2, 1, 16, 24, 16), lambda out: out.square().mean()


def cosmoflow(device: str) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    with torch.device(device):
        return CosmoFlow(width=2, channels_in=2, size=(36, 32, 32)), torch.zeros(2, 2, 36, 32, 32), torch.sum


NETWORKS = {"unet": unet, "cosmoflow": cosmoflow}


class Handed:
    """Counts the bytes that a world's transport is handed, past the events that tell of them."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch) -> None:
        self.bytes, self._world = 0, world
        for name in ("post", "post_sum"):
            patch.setattr(world, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., object]:
        call = getattr(self._world, name)

        def counting(given: object, *others: object) -> object:
            tensors = [given] if isinstance(given, torch.Tensor) else [message for _, message, _ in given]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            return call(given, *others)

        return counting


def steps(network: str, sizes: dict[str, int], device: str, count: int) -> tuple[Record, int, Traffic]:
    """The last of so many training steps, with what the transport was handed in it."""
    mesh = hc.Mesh(**sizes)
    model, volume, loss = NETWORKS[network](device)
    model = hc.distribute(model, mesh, deterministic=count > 1)
    x = hc.shard(volume, mesh, {dim: axis for dim, axis in DIMS.items() if axis in sizes})
    for _ in range(count - 1):
        loss(model(x)).backward()
        model.zero_grad()
    mesh.world.traffic.clear()
    with pytest.MonkeyPatch.context() as patch:
        handed = Handed(mesh.world, patch)
        found = record(lambda: loss(model(x)).backward(), mesh)
    return found, handed.bytes, replace(mesh.world.traffic)


def communication(found: Record) -> list[object]:
    """Events but for times and local work, numbered from the start of the step; each wait names what it waits for."""
    events = [event for event in found.events if isinstance(event, Begun | Waited | Summed | Redistributed | Averaged)]
    numbers = {event.number: place for place, event in enumerate(events)}

    def timeless(event: Event) -> object:
        facts = {**event._asdict(), "number": numbers[event.number], "time": None, "seconds": None}
        facts |= {"ready": None, "sent": None, "event": numbers.get(facts.get("event"))}
        # Averages are numbered by the life of a process.
        operation, channel = (re.sub(r" \d+", "", part) for part in (event.label.operation, event.label.channel))
        facts["label"] = event.label._replace(operation=operation, channel=channel)
        return type(event).__name__, facts

    return [timeless(event) for event in events]


def check_dry_is_real(network: str, sizes: dict[str, int], count: int) -> list[Record]:
    real = shared_pool(4).run(steps, network, sizes, "cpu", count)
    for rank, (found, handed, traffic) in enumerate(real):
        with dry(rank, 4):
            planned, planned_handed, planned_traffic = steps(network, sizes, "meta", count)
        assert communication(planned) == communication(found)
        assert planned.sent_bytes == planned_handed == handed == found.sent_bytes == traffic.transport_bytes
        assert planned.messages == planned_traffic.messages == found.messages == traffic.messages
        assert planned.flops > 0
    return [found for found, *_ in real]


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
    check_dry_is_real(network, sizes, 1)


@pytest.mark.parametrize(
    ("network", "sizes"),
    [
        ("unet", {"data": 2, "depth": 2}),
        pytest.param("cosmoflow", {"data": 1, "depth": 2, "height": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_dry_equals_real_in_the_steady_state(network: str, sizes: dict[str, int]) -> None:
    """In the third step gradients go in planned buckets, while backward runs."""
    for found in check_dry_is_real(network, sizes, 3):
        buckets = [event for event in found.events if isinstance(event, Averaged)]
        assert buckets and not any("what a sum costs" in event.label.operation for event in found.sums)
        kinds = [type(event) for event in found.events]
        assert kinds.index(Summed) < len(kinds) - 1 - kinds[::-1].index(Computed)  # the first sum goes under work


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
