"""A batch that was read with its rim: the first layer exchanges nothing, and its answer is that of one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halocline as hc
from halocline.data import Field, Generated, Loader
from halocline.geometry import slices
from halocline.testing import run_local

torch.manual_seed(0)
DATA = torch.randn(3, 2, 12, 10, 8, dtype=torch.float64).numpy()
LAYERS = {
    "conv": nn.Conv3d(2, 3, 3, padding=1),
    "strided": nn.Conv3d(2, 3, 3, stride=2, padding=1),
    "wide": nn.Conv3d(2, 3, 5, padding=2),
    "pool": nn.MaxPool3d(3, stride=1, padding=1),
}
MESHES = {"depth": ({"depth": 3}, {"D": "depth"}), "2x2": ({"depth": 2, "height": 2}, {"D": "depth", "H": "height"})}


def run(mesh, rim, use):
    sizes, cut = MESHES[mesh]

    def body():
        store = Generated(lambda s, box: DATA[s][slices(box)], 3, DATA.shape[1:], "CDHW", "float64")
        grid = hc.Mesh(**sizes)
        with Loader({"x": Field(store, rim=rim)}, grid, cut=cut, shuffle=False, epochs=1) as loader:
            found = []
            for batch in loader:
                grid.world.traffic.clear()
                result = use(batch["x"], grid)
                found.append((hc.gather(result).detach(), grid.world.traffic.messages))
            return found

    size = 1
    for number in sizes.values():
        size *= number
    return run_local(size, body)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_first_layer_asks_nobody(mesh, name):
    import copy

    layer = copy.deepcopy(LAYERS[name]).double()
    reach = 2 if name == "wide" else 1
    rim = dict.fromkeys("DHW", reach)
    before = {}

    def use(x, grid):
        own = hc.distribute(copy.deepcopy(layer), grid)
        grid.world.traffic.clear()
        result = own(x)
        before[grid.rank] = grid.world.traffic.messages
        if any(p.requires_grad for p in own.parameters()):
            result.square().sum().backward()
            return torch.cat([p.grad.flatten() for p in own.parameters()])
        return result

    found = run(mesh, rim, use)
    assert set(before.values()) == {0}, "the layer exchanged what was read with its tile"
    for sample, (value, _) in enumerate(found[0]):
        expected = layer(torch.from_numpy(DATA[sample : sample + 1]))
        parameters = list(layer.parameters())
        if parameters:
            gradients = torch.autograd.grad(expected.square().sum(), parameters)
            expected = torch.cat([g.flatten() for g in gradients])
        assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rim_that_is_too_narrow_is_not_used(mesh):
    weight = torch.randn(3, 2, 5, 5, 5, dtype=torch.float64)
    found = run(mesh, {"D": 1, "H": 1}, lambda x, grid: F.conv3d(x, weight, padding=2))
    for sample, (value, messages) in enumerate(found[0]):
        assert messages
        expected = F.conv3d(torch.from_numpy(DATA[sample : sample + 1]), weight, padding=2)
        assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)


def _written(x, grid):
    x.mul_(2.0)
    return x


def _written_through_a_view(x, grid):
    x[:, :1].add_(1.0)
    return x


def _set(x, grid):
    x[:, :, 2:5] = 7.0  # which falls into the tile of some ranks only
    return x


@pytest.mark.parametrize("write", [_written, _written_through_a_view, _set])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rim_is_stale_once_the_tile_was_written_to(mesh, write):
    weight = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64)
    found = run(mesh, {"D": 1, "H": 1}, lambda x, grid: F.conv3d(write(x, grid), weight, padding=1))
    for sample, (value, _) in enumerate(found[0]):
        x = write(torch.from_numpy(DATA[sample : sample + 1].copy()), None)
        assert torch.allclose(value, F.conv3d(x, weight, padding=1), rtol=1e-12, atol=1e-12)


def test_an_input_whose_gradient_is_wanted():
    weight = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64)

    def use(x, grid):
        x.requires_grad_()
        F.conv3d(x, weight, padding=1).square().sum().backward()
        return x.grad

    for sample, (value, _) in enumerate(run("2x2", {"D": 1, "H": 1}, use)[0]):
        x = torch.from_numpy(DATA[sample : sample + 1].copy()).requires_grad_()
        F.conv3d(x, weight, padding=1).square().sum().backward()
        assert torch.allclose(value, x.grad, rtol=1e-12, atol=1e-12)
