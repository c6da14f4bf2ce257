"""Inputs and outputs of every kind, and the modes a network runs in."""

import contextlib
import copy
import functools
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

MESHES = [{"data": 2, "depth": 2}, {"depth": 3}, {"depth": 2, "height": 2}]
DIMS = {0: "data", -3: "depth", -2: "height"}


@dataclass
class Batch:
    volume: Tensor
    mask: Tensor | None
    scale: Tensor
    name: str


class Found(NamedTuple):
    logits: Tensor
    extras: dict[str, Any]


class Network(nn.Module):
    """Takes a dataclass and a dict, gives a named tuple with a dict, a list and None inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Conv3d(4, 2, 1)

    def forward(self, batch: Batch, more: dict[str, Any]) -> Found:
        h = torch.relu(self.norm(self.first(batch.volume)))
        if batch.mask is not None:
            h = h * batch.mask.unsqueeze(1)
        logits = self.last(h + more["context"]) * batch.scale
        pooled = h.mean((2, 3, 4))
        return Found(logits, {"pooled": pooled, "pair": [h.sum(1), None], "name": batch.name})


@functools.cache
def inputs(mask: bool) -> tuple[Batch, dict[str, Any]]:
    torch.manual_seed(2)
    volume = torch.randn(2, 1, 9, 6, 4, dtype=torch.float64)
    masked = torch.rand(2, 9, 6, 4, dtype=torch.float64) if mask else None
    scale = torch.tensor([[2.0], [3.0]], dtype=torch.float64).view(1, 2, 1, 1, 1)
    return Batch(volume, masked, scale, "tumour"), OrderedDict(
        context=torch.randn(4, 1, 1, 1, dtype=torch.float64), none=None
    )


@functools.cache
def _network() -> Network:
    torch.manual_seed(3)
    return Network().double()


def network() -> Network:
    return copy.deepcopy(_network())  # built once: ranks in one process share torch's random stream


MODES = {
    "train": lambda model: (model.train(), contextlib.nullcontext())[1],
    "eval": lambda model: (model.eval(), contextlib.nullcontext())[1],
    "no_grad": lambda model: (model.eval(), torch.no_grad())[1],
    "inference_mode": lambda model: (model.eval(), torch.inference_mode())[1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_structures_and_modes_equal_one_rank(mesh: dict[str, int], mode: str) -> None:
    plain = network()
    with MODES[mode](plain):
        true = plain(*inputs(True))

    def body() -> tuple[type, Found]:
        layout = hc.Mesh(**mesh)
        model = hc.distribute(network(), layout)
        dims = {dim: axis for dim, axis in DIMS.items() if axis in mesh}
        batch, more = hc.shard_inputs(inputs(True), layout, dims)
        assert isinstance(batch, Batch) and isinstance(more, OrderedDict) and batch.name == "tumour"
        assert isinstance(batch.mask, hc.ShardedTensor) and more["none"] is None
        assert not isinstance(batch.scale, hc.ShardedTensor)
        with MODES[mode](model):
            found = model(batch, more)
            return type(found.logits), hc.gather(found)

    ranks = 1
    for size in mesh.values():
        ranks *= size
    for kind, found in run_local(ranks, body):
        assert kind is hc.ShardedTensor and isinstance(found, Found)
        assert relative_error(found.logits, true.logits) < 1e-12
        assert relative_error(found.extras["pooled"], true.extras["pooled"]) < 1e-12
        assert relative_error(found.extras["pair"][0], true.extras["pair"][0]) < 1e-12
        assert found.extras["pair"][1] is None and found.extras["name"] == "tumour"


def test_none_in_place_of_a_tensor() -> None:
    true = network()(*inputs(False))

    def body() -> Tensor:
        mesh = hc.Mesh(depth=2)
        batch, more = hc.shard_inputs(inputs(False), mesh, {-3: "depth"})
        return hc.gather(hc.distribute(network(), mesh)(batch, more).logits)

    assert all(relative_error(found, true.logits) < 1e-12 for found in run_local(2, body))


def test_state_dict_is_the_plain_models() -> None:
    def body() -> dict[str, Tensor]:
        model = hc.distribute(network(), hc.Mesh(depth=2))
        return copy.deepcopy(model.state_dict())

    for state in run_local(2, body):
        network().load_state_dict(state, strict=True)
        assert list(state) == list(network().state_dict())


@pytest.mark.parametrize("bad", [{0: "data", 2: "depth"}, {}])
def test_inputs_that_cannot_be_placed(bad: dict[int, str]) -> None:
    def body() -> None:
        mesh = hc.Mesh(data=1, depth=2)
        hc.shard_inputs([None, "text"] if not bad else torch.zeros(2, 1, 4), mesh, bad)

    with pytest.raises(hc.ShardingError):
        run_local(2, body)


def test_a_copy_of_a_distributed_model_is_a_plain_one() -> None:
    """For a moving average of weights, or to save it whole; to train it, distribute it."""

    def body() -> tuple[Tensor, Tensor]:
        mesh = hc.Mesh(depth=2)
        model = hc.distribute(nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU()), mesh)
        x = hc.shard(torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)), mesh, {2: "depth"})
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        with torch.no_grad():
            same = hc.gather(twin(x)), hc.gather(model(x))
        with pytest.raises(hc.Refused, match="distribute"):
            twin(x)
        hc.distribute(twin, mesh)(x).sum().backward()
        return same

    assert all(torch.equal(*same) for same in run_local(2, body))


def test_a_mesh_can_be_pickled() -> None:
    def on_rank() -> bool:
        mesh = hc.Mesh(hc.Choices(at={"head": hc.Choices(remedy="gather")}), data=2)
        return pickle.loads(pickle.dumps(mesh)) == mesh

    assert run_local(2, on_rank) == [True, True]
    text = run_local(2, lambda: pickle.dumps(hc.Mesh(data=2)))[0]
    with pytest.raises(hc.MeshError, match="does not fit 1 ranks"):
        pickle.loads(text)
