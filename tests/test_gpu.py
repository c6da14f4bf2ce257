"""On a GPU: two ranks on one device, whose messages go through pinned host memory, train as one rank does."""

import pytest
import torch
from test_ranks import make, train

import halocline as hc
from halocline.testing import shared_pool

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
