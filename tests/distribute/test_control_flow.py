"""Loops whose length is data and early exits, with samples and weights cut: the path and the answer of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.program import dry, record
from halocline.testing import shared_pool

LAYOUT = {"enter.*": {0: "model"}, "turn.weight": {1: "model"}}
BY_UNITS = {"enter.*": {0: "model"}, "turn.*": {0: "model"}}
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


class SettlingCell(Settling):
    """The same with a cell, whose hidden units a layout cuts."""

    def __init__(self, recompute: bool) -> None:
        super().__init__(recompute)
        self.turn = nn.GRUCell(16, 16)

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        turned: Tensor = self.turn(x, state)
        return turned * 1.25 if turned.mean() > 0 else turned - 0.1


def differences(kind: type[Settling]) -> list[tuple[int, int, float]]:
    """Turns of both, and the largest error of output and gradients, for every cut, layout and kind of loop."""
    mesh, found = hc.Mesh(data=2, model=2), []
    for cut in CUTS:
        for layout in (None, LAYOUT if kind is Settling else BY_UNITS):
            for recompute in (False, True):
                for enough in (0.0, 0.7, 0.95) if kind is Settling else (0.0, 0.4, 0.5):
                    torch.manual_seed(0)
                    plain, model = kind(recompute).double(), kind(recompute).double()
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


@pytest.mark.parametrize("kind", [Settling, pytest.param(SettlingCell, marks=pytest.mark.long)])
def test_loops_of_data_take_the_path_of_one_rank(kind: type[Settling]) -> None:
    found = shared_pool(4).run(differences, kind, deadline=120.0)[0]
    assert len(found) == 36 and {turns for turns, _, _ in found} >= {0} and len({turns for turns, _, _ in found}) >= 3
    for turns, wanted, error in found:
        assert turns == wanted and error <= 1e-8


class Branching(nn.Module):
    """torch.cond over what is cut, with weights that the branches name themselves."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.enter, self.turn, self.recompute = nn.Linear(16, 16), nn.Linear(16, 16), recompute

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.enter(x)
        for turn in range(3):
            state = (
                checkpoint(self.step, state, x, turn, use_reentrant=False)
                if self.recompute
                else self.step(state, x, turn)
            )
        return state

    def step(self, state: Tensor, x: Tensor, turn: int) -> Tensor:
        up = state.mean() * (-1) ** turn > 0
        return state + torch.cond(up, lambda s, x: self.turn(s) + x, lambda s, x: self.turn(s).tanh() - x, (state, x))


def uncompiled_branches() -> list[float]:
    """The largest errors of output and gradients, against a network with branches in Python."""
    mesh, found = hc.Mesh(data=2, model=2), []
    for cut in CUTS[:2]:
        for layout in (None, LAYOUT):
            for recompute in (False, True):
                torch.manual_seed(0)
                plain, model = Branching(recompute).double(), Branching(recompute).double()
                model.load_state_dict(plain.state_dict())
                x = torch.rand(4, 16, dtype=torch.float64)
                hc.distribute(model, mesh, layout=layout)
                want = plain(x)
                want.square().mean().backward()
                with torch.compiler.set_stance("force_eager"):
                    got = model(hc.shard(x, mesh, cut))
                    got.square().mean().backward()
                pairs = [
                    (got, want),
                    *((p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)),
                ]
                found.append(max((hc.gather(a) - b).abs().max().item() for a, b in pairs))
    return found


@pytest.mark.long
def test_torch_cond_takes_the_branch_of_one_rank() -> None:
    """The untouched network runs it compiled."""
    for errors in shared_pool(4).run(uncompiled_branches, deadline=240.0):
        assert len(errors) == 8 and max(errors) <= 1e-8


def uncompiled_loops() -> list[Any]:
    mesh = hc.Mesh(data=2, model=2)
    whole = torch.arange(64, dtype=torch.float64).reshape(4, 16) / 64
    x, said = hc.shard(whole, mesh, {0: "data"}), []
    weight = whole[0].clone().requires_grad_()
    hc.average_gradients([weight], mesh)
    with torch.compiler.set_stance("force_eager"):
        for most in (0.0, 5.0):
            leaf = (x * weight).abs()
            turns, out = torch.while_loop(
                lambda i, t, most=most: t.sum() < most * 16,
                lambda i, t: (i + 1, t * 1.5 + weight),
                (torch.tensor(0), leaf),
            )
            weight.grad = None
            out.square().sum().backward()
            own, plain, count = whole[0].clone().requires_grad_(), None, 0
            plain = (whole * own).abs()
            while plain.sum() < most * 16:
                plain, count = plain * 1.5 + own, count + 1
            plain.square().sum().backward()
            said.append(
                (
                    int(turns),
                    count,
                    (hc.gather(out) - plain).abs().max().item(),
                    (weight.grad - own.grad).abs().max().item(),
                )
            )
        try:  # the branch names a tensor that is cut, and its operands are plain
            torch.cond(torch.tensor(True), lambda t: x + t, lambda t: x, (torch.ones(16),))
        except hc.Refused as error:
            said.append(str(error))
        with torch.no_grad():
            said.append(
                (hc.gather(torch.cond(torch.tensor(True), lambda: x * 2, lambda: x, ())) - whole * 2).abs().max().item()
            )
    return said


def test_torch_while_loop_turns_as_often_as_one_rank() -> None:
    for first, second, refused, without in shared_pool(4).run(uncompiled_loops, deadline=120.0):
        assert first[:2] == (0, 0) and second[0] == second[1] > 1
        assert max(*first[2:], *second[2:], without) <= 1e-8
        assert "without autograd" in refused and "operands" in refused


def test_a_dry_run_has_no_value_to_branch_on() -> None:
    with dry(0, 2):
        mesh = hc.Mesh(data=2)
        x = hc.shard(torch.zeros(4, 16, device="meta"), mesh, {0: "data"})
        with pytest.raises(hc.Refused, match="branch on data"):
            record(lambda: torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t, (x,)), mesh)


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
