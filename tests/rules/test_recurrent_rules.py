"""Recurrent networks, and weights that are made of others: as on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import number
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import halocline as hc
from halocline.testing import relative_error
from halocline.testing.compare import check_rule
from halocline.world import Mesh, run_local

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 3),
    "deep, both ways": lambda: nn.LSTM(6, 3, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(6, 3, 2, proj_size=2),
    "gru": lambda: nn.GRU(6, 3, batch_first=True),
    "relu": lambda: nn.RNN(6, 3, nonlinearity="relu"),
    "without bias": lambda: nn.RNN(6, 3, bias=False),
    "lstm cell": lambda: nn.LSTMCell(6, 3),
    "gru cell": lambda: nn.GRUCell(6, 3),
    "cell": lambda: nn.RNNCell(6, 3, bias=False),
}


def outputs(module: Any, x: Tensor) -> list[Tensor]:
    """Of a network all at once, of a cell step by step."""
    if not isinstance(module, nn.RNNCellBase):
        out, state = module(x)
        return [out, *(state if isinstance(state, tuple) else (state,))]
    state, seen = None, []
    for step in x:
        state = module(step, state)
        seen.append(state[0] if isinstance(state, tuple) else state)
    return [torch.stack(seen)]


@pytest.mark.parametrize("name", NETWORKS)
def test_recurrence(name: str) -> None:
    """Time, batch or features cut; five ranks for four samples."""
    torch.manual_seed(0)
    module = NETWORKS[name]().double().requires_grad_(False)
    for cut, mesh in [({0: "a"}, {"a": 3}), ({1: "a"}, {"a": 5}), ({1: "a", 2: "b"}, {"a": 2, "b": 2})]:
        found = check_rule(lambda x: outputs(module, x), number(5, 4, 6), cuts=[cut], mesh=mesh)
        assert found.verdict == "exact", f"{name} cut {cut}: {found}"


def test_what_is_dropped_between_layers_is_drawn_by_global_index() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(6, 3, 3, dropout=0.5, bidirectional=True).double()

    def body() -> list[Tensor]:
        mesh, found = Mesh(a=2), []
        part = hc.distribute(copy.deepcopy(module), mesh)
        for dim in (0, 1):
            with hc.random.reproducible(3):
                found.append(hc.gather(part(hc.shard(number(4, 4, 6), mesh, {dim: "a"}))[0]).detach())
        return found

    for over_time, over_batch in run_local(2, body):
        torch.testing.assert_close(over_time, over_batch)
        assert not torch.allclose(over_time, module.eval()(number(4, 4, 6))[0])


def test_refusals() -> None:
    module = nn.LSTM(6, 3).double()

    def body() -> None:
        x = hc.shard(number(4, 4, 6), Mesh(a=2), {1: "a"})
        state = torch.zeros(1, 4, 3).double(), torch.zeros(1, 4, 3).double()
        weights = [w.detach() for w in module._flat_weights]
        packed = pack_padded_sequence(number(4, 4, 6), torch.tensor([4, 3, 2, 1]))
        with pytest.raises(hc.Refused, match="packed"):
            torch.lstm(x[0], packed.batch_sizes, state, weights, True, 1, 0.0, False, False)
        for call in (
            lambda: torch.lstm(x[0], state, weights, True, 1, 0.0, False, False, False),
            lambda: torch.lstm_cell(x[0, :, 0], state, *weights),
        ):
            with pytest.raises(hc.Refused, match="unsqueeze"):
                call()

    run_local(2, body)


class ConvLSTM(nn.Module):
    """A memory of maps: gates by convolution, one step after the other."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _, height, width = x.shape
        state = memory = x.new_zeros(batch, self.hidden, height, width)
        for step in range(steps):
            keep, forget, give, new = self.gates(torch.cat([x[step], state], 1)).chunk(4, 1)
            memory = forget.sigmoid() * memory + keep.sigmoid() * new.tanh()
            state = give.sigmoid() * memory.tanh()
        return state


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(2, 4, 3, padding=1)),
        nn.LeakyReLU(0.2),
        parametrizations.weight_norm(nn.Conv2d(4, 4, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(4 * 4 * 3, 2)),
    )


@pytest.mark.parametrize(
    ("make", "size", "cut"),
    [
        (lambda: ConvLSTM(2, 3), (3, 2, 2, 7, 6), {3: "a", 1: "data"}),
        (parametrized, (2, 2, 8, 6), {2: "a", 0: "data"}),
        (parametrized, (2, 2, 8, 6), {3: "a"}),
    ],
)
def test_training(make: Callable[[], nn.Module], size: tuple[int, ...], cut: dict[int, str]) -> None:
    """Three steps of descent: losses, weights and buffers of one rank."""
    torch.manual_seed(0)
    start = make().double()

    def train(model: nn.Module, place: Callable[[Tensor], Tensor]) -> tuple[list[float], dict[str, Tensor]]:
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(3):
            optimizer.zero_grad()
            loss = F.softplus(model(place(number(*size, seed=step)))).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.detach() for name, value in model.state_dict().items()}

    def body() -> tuple[list[float], dict[str, Tensor]]:
        mesh = Mesh(data=2, a=2)
        return train(hc.distribute(copy.deepcopy(start), mesh), lambda x: hc.shard(x, mesh, cut))

    true_losses, true = train(copy.deepcopy(start), lambda x: x)
    for losses, found in run_local(4, body):
        assert losses == pytest.approx(true_losses, rel=1e-10)
        assert max(relative_error(found[name], value) for name, value in true.items()) < 1e-8
