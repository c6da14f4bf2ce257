"""What else a training script does with a model: copies, optimizers, parametrizations, averages of its own."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from coexisting import MESHES, Network, agree, cut_outcome, on_ranks, outcome, sample, step
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

Found = dict[str, Tensor]


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def saved_and_loaded(model: Network, x: Tensor, y: Tensor) -> None:
    train(model, x, y, sgd(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    train(model, x, y, sgd(model))


def converted(model: Network, x: Tensor, y: Tensor) -> None:
    train(model.float().double(), x, y, sgd(model))


def as_vector(model: Network, x: Tensor, y: Tensor) -> Found:
    step(model, x, y)
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.5, model.parameters())
    step(model, x, y)
    return {"vector": vector}


def moving_average(model: Network, x: Tensor, y: Tensor) -> Found:
    average, optimizer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(model)
    for _ in range(2):
        train(model, x, y, optimizer, 1)
        average.update_parameters(model)
    with torch.no_grad():
        return {"average": average.eval()(x), **{f"its {name}": value for name, value in average.state_dict().items()}}


def spectral(model: Network, x: Tensor, y: Tensor) -> None:
    spectral_norm(model.last)
    for buffer in model.last.parametrizations.weight[0].buffers():  # drawn at random: not by ranks in one process
        buffer.copy_(torch.ones_like(buffer) / buffer.numel() ** 0.5)
    train(model, x, y, sgd(model))


def optimizer(kind: type, **options: object):
    return lambda model, x, y: train(model, x, y, kind(model.parameters(), 1e-2, **options))


def closure(model: Network, x: Tensor, y: Tensor) -> None:
    chosen = torch.optim.LBFGS(model.eval().parameters(), max_iter=3)

    def loss() -> Tensor:
        chosen.zero_grad()
        return step(model, x, y)

    chosen.step(loss)


def scaled_and_clipped(model: Network, x: Tensor, y: Tensor) -> Found:
    chosen, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        chosen.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(chosen)
        norm = clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(chosen)
        scaler.update()
    clip_grad_value_(model.parameters(), 1e-3)
    return {"norm": norm}


RUNS = {
    "saved and loaded": saved_and_loaded,
    "converted": converted,
    "as a vector": as_vector,
    "moving average": moving_average,
    "spectral norm": spectral,
    "AdamW foreach": optimizer(torch.optim.AdamW, foreach=True, eps=1e-3),
    "AdamW fused": optimizer(torch.optim.AdamW, fused=True, eps=1e-3),
    "LBFGS": closure,
    "scaled and clipped": scaled_and_clipped,
}


@pytest.mark.parametrize("run", RUNS)
def test_training_equals_one_rank(run: str) -> None:
    agree(RUNS[run], MESHES[0])


def test_a_saved_state_is_the_plain_models() -> None:
    def run(model: Network, x: Tensor, y: Tensor) -> None:
        assert list(model.state_dict()) == list(sample()[0].state_dict())
        assert all(type(value) is Tensor for value in model.state_dict().values())

    cut_outcome(run, {"height": 2})


@pytest.mark.parametrize("late", [False, True])
def test_weight_norm_before_distribute_and_after(late: bool) -> None:
    """Afterwards they are new parameters, which are found at the next forward."""

    def body(mesh: hc.Mesh, x: Tensor) -> Tensor:
        layer = copy.deepcopy(plain)
        layer = weight_norm(hc.distribute(layer, mesh)) if late else hc.distribute(weight_norm(layer), mesh)
        layer(x).square().sum().backward()
        return layer.parametrizations.weight.original0.grad

    plain = nn.Conv2d(2, 2, 3, padding=1).double()
    one = weight_norm(copy.deepcopy(plain))
    one(torch.arange(64.0, dtype=torch.float64).view(1, 2, 8, 4)).square().sum().backward()
    for gradient in on_ranks(body):
        assert relative_error(gradient, one.parametrizations.weight.original0.grad) < 1e-12


def test_functional_call_with_parameters_of_ones_own() -> None:
    def gradients(model: nn.Module, x: Tensor, y: Tensor, mesh: hc.Mesh | None = None) -> list[Tensor]:
        own = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        if mesh is not None:
            hc.average_gradients(own.values(), mesh)
        F.cross_entropy(torch.func.functional_call(model, own, (x,)), y).backward()
        return [p.grad for p in own.values()]

    def body() -> list[Tensor]:
        mesh, (model, x, y) = hc.Mesh(height=2), sample()
        return gradients(
            hc.distribute(model, mesh), hc.shard(x, mesh, {2: "height"}), hc.shard(y, mesh, {1: "height"}), mesh
        )

    true = gradients(*sample())
    for found in run_local(2, body):
        assert all(relative_error(a, b, 1.0) < 1e-9 for a, b in zip(found, true, strict=True))


def test_copies_of_sharded_tensors() -> None:
    def body(mesh: hc.Mesh, x: Tensor) -> None:
        (x.requires_grad_() * 2).sum().backward()
        twin = copy.deepcopy({"x": x, "again": x})
        assert twin["x"] is twin["again"] and twin["x"].requires_grad and twin["x"].is_leaf
        assert torch.equal(hc.gather(twin["x"].grad), hc.gather(x.grad))
        with pytest.raises(RuntimeError, match="Only"):  # torch's own error begins so
            copy.deepcopy(x * 2)
        with pytest.raises(hc.Refused, match=r"hc\.gather"):
            pickle.dumps(x)

    on_ranks(body)


def test_gradients_that_somebody_else_averages() -> None:
    def body() -> Found:
        mesh, (model, x, y) = hc.Mesh(data=2, height=2), sample()
        hc.distribute(model, mesh, averaging="external")
        step(model, hc.shard(x, mesh, {0: "data", 2: "height"}), hc.shard(y, mesh, {0: "data", 1: "height"}))
        with pytest.raises(hc.MeshError, match="ask whoever averages"), hc.no_sync(model):
            pass
        return {name: p.grad for name, p in model.named_parameters()}

    model, x, y = sample()
    step(model, x, y)
    shares = run_local(4, body)
    for name, parameter in model.named_parameters():
        assert relative_error(sum(share[name] for share in shares) / 4, parameter.grad, 1.0) < 1e-10, name
    assert any(not torch.equal(shares[0][name], shares[1][name]) for name in shares[0])
    with pytest.raises(hc.MeshError, match="averaging"):
        run_local(1, lambda: hc.distribute(nn.Linear(1, 1), hc.Mesh(data=1), averaging="mine"))


def test_outcomes_hold_what_they_should() -> None:
    """The comparison itself would notice a missing gradient."""
    found = outcome(lambda model, x, y: {"loss": step(model, x.requires_grad_(), y)}, *sample())
    assert {"loss", "gradient of x", "gradient of last.bias", "state norm.running_mean"} <= found.keys()
