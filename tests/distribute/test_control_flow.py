"""Loops whose length is data and early exits, with samples and weights cut: the path and the answer of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.testing import shared_pool

LAYOUT = {"enter.*": {0: "model"}, "turn.weight": {1: "model"}}
CUTS = ({0: "data"}, {1: "data"}, {})


class Settling(nn.Module):
    """A recurrent network that turns until its state is large enough, and leaves early where it is so at once."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.enter, self.turn, self.recompute = nn.Linear(16, 16), nn.Linear(16, 16), recompute
        self.turns = 0

    def forward(self, x: Tensor, enough: float) -> Tensor:
        state: Tensor = self.enter(x)
        self.turns = 0
        while state.abs().mean() < enough and self.turns < 20:
            inner = self.step
            state = checkpoint(inner, state, x, use_reentrant=False) if self.recompute else inner(state, x)
            self.turns += 1
        return state

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        """A turn; a branch inside what is computed again depends on data, too."""
        turned: Tensor = self.turn(state) + x
        return turned * 1.25 if turned.mean() > 0 else turned


def differences() -> list[tuple[int, int, float]]:
    """Turns of both, and the largest error of output and gradients, for every cut, layout and kind of loop."""
    mesh, found = hc.Mesh(data=2, model=2), []
    for cut in CUTS:
        for layout in (None, LAYOUT):
            for recompute in (False, True):
                for enough in (0.0, 0.7, 0.95):
                    torch.manual_seed(0)
                    plain, model = Settling(recompute).double(), Settling(recompute).double()
                    model.load_state_dict(plain.state_dict())
                    x = torch.rand(4, 16, dtype=torch.float64)
                    hc.distribute(model, mesh, layout=layout)
                    want = plain(x, enough)
                    got = model(hc.shard(x, mesh, cut) if cut else x, enough)
                    want.square().mean().backward()
                    got.square().mean().backward()
                    errors = [(hc.gather(got) - want).abs().max().item()]
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        if q.grad is None or p.grad is None:
                            assert (p.grad is None or not hc.gather(p.grad).any()) and q.grad is None
                            continue
                        errors.append((hc.gather(p.grad) - q.grad).abs().max().item())
                    found.append((model.turns, plain.turns, max(errors)))
    return found


def test_loops_of_data_take_the_path_of_one_rank() -> None:
    found = shared_pool(4).run(differences, deadline=120.0)[0]
    assert len(found) == 36 and {turns for turns, _, _ in found} >= {0} and len({turns for turns, _, _ in found}) >= 3
    for turns, wanted, error in found:
        assert turns == wanted and error <= 1e-8


def compiled_branches() -> list[str]:
    said = []
    mesh = hc.Mesh(data=2, model=2)
    x = hc.shard(torch.rand(4, 16), mesh, {0: "data"})
    for call in (
        lambda: torch.cond(x.sum() > 0, lambda t: t.relu(), lambda t: t.tanh(), (x,)),
        lambda: torch.while_loop(
            lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.zeros((), dtype=torch.int64), x)
        ),
    ):
        try:
            said.append(f"gave {call()}")
        except Exception as error:  # noqa: BLE001 - torch's own errors, of several kinds
            said.append(f"{type(error).__name__}")
    return said


@pytest.mark.long
def test_compiled_control_flow_gives_no_answer_on_cut_tensors() -> None:
    assert all(not said.startswith("gave") for said in shared_pool(4).run(compiled_branches, deadline=120.0)[0])
