"""Calls that are awkward to replay: tensors made of nothing, and parameters that a call returns as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.world import run_local

MICROBATCHES = 2


class Recurrent(nn.Module):
    """The first states are zeros that the LSTM makes on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.memory, self.head = (
            nn.LSTM(6, 6, batch_first=True),
            nn.GRU(6, 6, batch_first=True),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.rise(x[:, None].expand(-1, 3, -1))
        z, last = self.memory(y)
        return self.head(z[:, -1] + h[-1] * c[-1] + last[-1])


class Normed(nn.Module):
    """Spectral norm reads the weight through ``flatten(1)``, which returns a matrix as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def train(model: nn.Module, x: Tensor, y: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps on one rank: losses, and the state at the end."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for _ in range(2):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=x.dtype)
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(model(part), target) / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(total)
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("network", [Recurrent, Normed])
def test_the_answer_is_that_of_one_rank(network: type[nn.Module], schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    torch.manual_seed(0)
    model = network().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    true_losses, true_state = train(copy.deepcopy(model), x, y)

    def body() -> tuple[list[Tensor], dict[str, Tensor]]:
        mesh = hc.Mesh(stage=2)
        pipe = hc.pipeline(
            models[mesh.rank], mesh, loss=F.mse_loss, example=(x, y), microbatches=MICROBATCHES, schedule=schedule
        )
        optimizer, losses = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9), []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(x, y).detach())
            optimizer.step()
        return losses, pipe.state_dict()

    for losses, state in run_local(2, body):
        torch.testing.assert_close(losses, true_losses, rtol=0, atol=1e-10)
        assert state.keys() == true_state.keys()
        for name, value in true_state.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10, msg=name)
