"""Recurrent networks whose weights are cut by hidden units: the answer of one rank, and no weight is gathered."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
from model_axes import Layout, compared, drawn
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import halocline as hc
from halocline.program import Record, dry, record
from halocline.testing.compare import EXACT
from halocline.world import run_local

STEPS, BATCH, FEATURES, UNITS = 3, 3, 3, 5  # units do not divide


class Recurrent(nn.Module):
    """A network whose input and first states are parameters too, so that their gradients are compared."""

    def __init__(self, net: nn.RNNBase, given: bool = True) -> None:
        super().__init__()
        self.net = net
        ways, memory = net.num_layers * (1 + net.bidirectional), isinstance(net, nn.LSTM)
        first = (BATCH, STEPS) if net.batch_first else (STEPS, BATCH)
        self.input = nn.Parameter(torch.empty(*first, FEATURES))
        sizes = (net.proj_size or UNITS, UNITS)[: 1 + memory]
        self.states = nn.ParameterList([torch.empty(ways, BATCH, size) for size in sizes] if given else [])
        drawn_weights(self)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states: Any = tuple(self.states) if len(self.states) > 1 else next(iter(self.states), None)
        out, end = self.net(x + self.input, states)
        return out, *(end if isinstance(end, tuple) else (end,))


class Stepped(nn.Module):
    """A cell in a loop."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.net, self.input = cell, nn.Parameter(torch.empty(STEPS, BATCH, FEATURES))
        drawn_weights(self)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state: Any = None
        for step in x + self.input:
            state = self.net(step, state)
        return state if isinstance(state, tuple) else (state,)


class Packed(Recurrent):
    """Sequences of several lengths, packed for the network and padded again."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, states = self.net.batch_first, tuple(self.states)
        packed = pack_padded_sequence(x + self.input, LENGTHS, first, enforce_sorted=False)
        out, end = self.net(packed, (states if len(states) > 1 else states[0]) if states else None)
        padded, lengths = pad_packed_sequence(out, first, 0.5, STEPS + 1)
        assert torch.equal(lengths, LENGTHS)
        return padded, *(end if isinstance(end, tuple) else (end,))


LENGTHS = torch.tensor([1, 3, 2])


def drawn_weights(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM(FEATURES, UNITS)),
    "deep, both directions": lambda: Recurrent(nn.LSTM(FEATURES, UNITS, 2, bidirectional=True), given=False),
    "projected": lambda: Recurrent(nn.LSTM(FEATURES, UNITS, 2, bidirectional=True, proj_size=2)),
    "gru": lambda: Recurrent(nn.GRU(FEATURES, UNITS, 2, batch_first=True)),
    "gru, both directions, without bias": lambda: Recurrent(nn.GRU(FEATURES, UNITS, bias=False, bidirectional=True)),
    "tanh": lambda: Recurrent(nn.RNN(FEATURES, UNITS, batch_first=True, bidirectional=True), given=False),
    "relu": lambda: Recurrent(nn.RNN(FEATURES, UNITS, nonlinearity="relu")),
    "lstm cell": lambda: Stepped(nn.LSTMCell(FEATURES, UNITS)),
    "gru cell": lambda: Stepped(nn.GRUCell(FEATURES, UNITS)),
    "cell": lambda: Stepped(nn.RNNCell(FEATURES, UNITS, bias=False)),
}
TWICE = ("lstm", "projected", "gru", "gru cell")
BY_UNITS: Layout = {"net.weight_*": {0: "model"}, "net.bias_*": {0: "model"}}


def by_units(model: nn.Module) -> Layout:
    return {pattern: dims for pattern, dims in BY_UNITS.items() if "weight" in pattern or model.net.bias}


def input_of(model: nn.Module) -> tuple[Tensor, int]:
    """An input, and its dim of samples."""
    return torch.ones(model.input.shape, dtype=torch.float64), int(getattr(model.net, "batch_first", False) is False)


@pytest.mark.parametrize("name", NETWORKS)
def test_by_units(name: str) -> None:
    """Samples and units cut at the same time: values, gradients of weights, inputs and states, and of those."""
    model = NETWORKS[name]()
    x, batch = input_of(model)
    error = compared(model, [x], {"data": 2, "model": 2}, by_units(model), {batch: "data"}, twice=name in TWICE)
    assert error <= EXACT, error


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_to_cut(name: str) -> None:
    """More ranks than units; time or features cut by the axis that cuts the weights; any layout of any axes."""
    model = NETWORKS[name]()
    x, batch = input_of(model)
    for dims in ({}, {1 - batch: "model"}, {2: "model"}, {batch: "model"}):
        error = compared(model, [x], {"model": 7}, by_units(model), dims)
        assert error <= EXACT, (error, dims)
    for number, layout in enumerate(drawn(model.net, ["model", "data"], 6)):
        named = {f"net.{pattern}": dims for pattern, dims in layout.items()}
        error = compared(model, [x], {"data": 2, "model": 2}, named, {batch: "data"}, twice=number == 0)
        assert error <= EXACT, (error, layout)


PACKED = {
    "lstm": lambda: Packed(nn.LSTM(FEATURES, UNITS)),
    "deep, both directions": lambda: Packed(nn.LSTM(FEATURES, UNITS, 2, bidirectional=True, proj_size=2), given=False),
    "gru": lambda: Packed(nn.GRU(FEATURES, UNITS, 2, bidirectional=True, batch_first=True)),
    "relu": lambda: Packed(nn.RNN(FEATURES, UNITS, nonlinearity="relu", bias=False)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    """Shorter sequences end, or join, in between. Other layouts gather the weights."""
    model = PACKED[name]()
    x, _ = input_of(model)
    columns: Layout = {"net.weight_hh*": {1: "model"}, "net.weight_ih*": {1: "model"}}
    cases = [({"model": 2}, by_units(model)), ({"data": 2, "model": 3}, by_units(model)), ({"model": 2}, columns)]
    for number, (mesh, layout) in enumerate(cases):
        error = compared(model, [x], mesh, layout, twice=number == 0)
        assert error <= EXACT, (error, mesh, layout)


def test_packing_what_is_cut() -> None:
    """Features stay cut; samples and time are gathered where they are packed."""
    model = PACKED["gru"]()
    x, batch = input_of(model)
    for dims in ({2: "model"}, {batch: "data"}, {1 - batch: "data", 2: "model"}):
        error = compared(model, [x], {"data": 2, "model": 2}, by_units(model), dims)
        assert error <= EXACT, (error, dims)


def test_packed_samples_are_not_cut() -> None:
    def body() -> None:
        mesh = hc.Mesh(model=2)
        cut = hc.shard(torch.ones(6, FEATURES, dtype=torch.float64), mesh, {0: "model"})
        packed = PackedSequence(cut, torch.tensor([3, 2, 1]))
        with pytest.raises(hc.Refused, match="packed"):
            hc.distribute(NETWORKS["lstm"]().net, mesh)(packed)
        with pytest.raises(hc.Refused, match="mixed"):
            pad_packed_sequence(packed)

    run_local(2, body)


def test_sums_that_may_wait() -> None:
    """The sum of a projection is taken in each step, since the next one needs it."""
    net = NETWORKS["projected"]().net
    x = torch.ones(STEPS, BATCH, FEATURES, dtype=torch.float64)

    def body() -> Tensor:
        mesh = hc.Mesh(hc.Choices(defer_sums=True), model=2)
        return hc.gather(hc.distribute(copy.deepcopy(net), mesh, layout={"*": {0: "model"}})(x)[0]).detach()

    for found in run_local(2, body):
        torch.testing.assert_close(found, net(x)[0].detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ask", ["mesh", "block"])
def test_gathered_on_request(ask: str) -> None:
    """The same answer, from weights that every rank fetches whole."""
    model = NETWORKS["lstm"]()
    net, x = model.net, input_of(model)[0]

    def body() -> list[tuple[Tensor, int]]:
        choices = hc.Choices(remedy="gather") if ask == "mesh" else hc.Choices()
        mesh, found = hc.Mesh(choices, model=2), []
        own = hc.distribute(copy.deepcopy(net), mesh, layout={"*": {0: "model"}})
        for inside in (hc.remedy("gather") if ask == "block" else nullcontext(), nullcontext()):
            mesh.world.traffic.clear()
            with inside:
                out = own(x)[0]
            found.append((hc.gather(out).detach(), mesh.world.traffic.gathered_bytes))
        return found

    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    for (asked, whole), (by_itself, own) in run_local(2, body):
        for out in (asked, by_itself):
            torch.testing.assert_close(out, net(x)[0].detach(), rtol=0, atol=1e-12)
        assert abs(whole - weights / 2) < 300  # rows of uneven parts
        assert own == whole if ask == "mesh" else own < weights / 4


def test_what_is_dropped_is_that_of_other_cuts() -> None:
    net = NETWORKS["deep, both directions"]().net
    net.dropout, x = 0.5, torch.ones(STEPS, BATCH, FEATURES, dtype=torch.float64)

    def body() -> list[Tensor]:
        mesh, found = hc.Mesh(data=2, model=2), []
        for layout, dims in (
            (None, {1: "data"}),
            ({"*": {0: "model"}}, {1: "data"}),
            ({"*": {0: "model"}}, {0: "data"}),
        ):
            own = hc.distribute(copy.deepcopy(net), mesh, layout=layout)
            with hc.random.reproducible(3):
                found.append(hc.gather(own(hc.shard(x, mesh, dims))[0]).detach())
        return found

    for found in run_local(4, body):
        for other in found[1:]:
            torch.testing.assert_close(found[0], other)
        assert not torch.allclose(found[0], net.eval()(x)[0])


def recorded(make: Callable[[], nn.Module], x: Callable[[], Tensor], parts: int) -> tuple[Record, Record, int]:
    """Forward and backward on one rank of a dry world, behind a linear layer; and the bytes of the cut weights."""
    with dry(0, parts):
        with torch.device("meta"):
            model = nn.ModuleDict({"before": nn.Linear(1, WIDTH, bias=False), "net": make()})
            entering = x()
        mesh = hc.Mesh(model=parts)
        hc.distribute(model, mesh, layout={"net.*": {0: "model"}})
        weights = sum(p.numel() * p.element_size() for p in model["net"].parameters())
        found: list[Any] = []
        forward = record(lambda: found.append(model["net"](model["before"](entering))), mesh)
        return forward, record(lambda: found[0][0].square().mean().backward(), mesh), weights


def received(found: Record) -> Counter[int]:
    """Bytes of the exchanges of the network itself."""
    sizes = (sum(size for _, size in e.receives) for e in found.exchanges if e.label.operation in ("lstm", "gru"))
    return Counter(sizes)


WIDTH = 48
LONG, SAMPLES = 6, 2


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_what_travels(kind: type[nn.RNNBase], gates: int, parts: int) -> None:
    """Once a call, rows of the weights change places; in each step but the first, the hidden state is gathered."""
    state = SAMPLES * WIDTH * 4 * (parts - 1) // parts
    for found in recorded(lambda: kind(WIDTH, WIDTH), lambda: torch.zeros(LONG, SAMPLES, 1), parts)[:2]:
        sizes = received(found)
        assert sizes.pop(state) == LONG - 1
        (rows,) = sizes.elements()
        mine = (2 * WIDTH + 2) * gates * WIDTH * 4 // parts
        assert 0 < rows <= mine
        # No operation sees a gathered weight.
        assert max(prod(shape) for each in found.operations for shape in each.shapes) * parts <= gates * WIDTH * WIDTH


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_gates_of_a_cell_travel_in_place_of_weights(cell: type[nn.RNNCellBase]) -> None:
    forward, backward, weights = recorded(lambda: cell(WIDTH, WIDTH), lambda: torch.zeros(SAMPLES, 1), 2)
    for found in (forward, backward):
        gates = SAMPLES * 4 * WIDTH * 4
        assert 0 < sum(received(found).elements()) <= gates < weights / 2
        assert max(prod(shape) for each in found.operations for shape in each.shapes) * 2 <= 4 * WIDTH * WIDTH


def test_results_and_state() -> None:
    """Results are cut as those of a linear layer, and the state is that of one rank."""
    net = NETWORKS["lstm"]().net
    x = torch.ones(STEPS, BATCH, FEATURES, dtype=torch.float64)

    def body() -> None:
        mesh = hc.Mesh(model=2)
        own = hc.distribute(copy.deepcopy(net), mesh, layout={"*": {0: "model"}})
        out, (state, memory) = own(x)
        assert all(each.sharding.dims_by_axis() == {2: "model"} for each in (out, state, memory))
        assert own.weight_hh_l0.shape == net.weight_hh_l0.shape
        whole = hc.gather(own.state_dict())
        assert list(whole) == list(net.state_dict())
        assert all(torch.equal(whole[name], each) for name, each in net.state_dict().items())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            single = hc.distribute(copy.deepcopy(net).float(), mesh, layout={"*": {0: "model"}})
            wanted = copy.deepcopy(net).float()(x.float())
            assert single(x.float())[0].dtype == wanted[0].dtype

    run_local(2, body)
