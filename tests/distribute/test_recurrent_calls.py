"""Unusual calls of recurrent networks that are cut: the values of torch, or its errors before anything moves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import halocline as hc
from halocline.testing import relative_error
from halocline.testing.compare import EXACT
from halocline.world import run_local

FEATURES, UNITS, BATCH, STEPS = 3, 4, 4, 3
CELLS = {torch.lstm_cell: 4, torch.gru_cell: 3, torch.rnn_tanh_cell: 1, torch.rnn_relu_cell: 1}
NETWORKS = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
Call = Callable[[Tensor, list[Tensor]], Any]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def weights(gates: int, ways: int = 1) -> list[Tensor]:
    rows = gates * UNITS
    return [drawn(rows, FEATURES), drawn(rows, UNITS), drawn(rows), drawn(rows)] * ways


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises((RuntimeError, TypeError)) as found:
        call()
    return found.value


def check_error(call: Call, x: Tensor, params: list[Tensor], samples: int | None, whole_text: bool) -> None:
    """Units are cut; then samples (a dim of ``x``). The type of torch's error, or all of it, and no message."""
    expected = raised(lambda: call(x, params))
    text = re.escape(str(expected)) if whole_text else None

    def body() -> None:
        mesh = hc.Mesh(m=2)
        calls = [(x, [hc.shard(each, mesh, {0: "m"}) for each in params])]
        if samples is not None:
            calls.append((hc.shard(x, mesh, {samples: "m"}), params))
        mesh.world.traffic.clear()
        for operands in calls:
            with pytest.raises(type(expected), match=text):
                call(*operands)
        assert mesh.world.traffic.messages == 0 and not mesh.world.traffic.gathers

    run_local(2, body)


CELL_SHAPES = {
    "state of fewer samples": (4, (1, 4)),
    "input of fewer samples": (1, (4, 4)),
    "narrower state": (4, (4, 1)),
    "wider state": (4, (4, 5)),
}


@pytest.mark.parametrize("function", CELLS)
@pytest.mark.parametrize("fault", CELL_SHAPES)
def test_states_that_do_not_fit_a_cell(function: Any, fault: str) -> None:
    batch, state = CELL_SHAPES[fault]
    good, wrong, params = drawn(batch, UNITS), drawn(*state), weights(CELLS[function])
    pairs: list[Any] = [(good, wrong), (wrong, good), (good,)] if function is torch.lstm_cell else [wrong]
    for hx in pairs:
        check_error(lambda x, params, hx=hx: function(x, hx, *params), drawn(batch, FEATURES), params, 0, True)


def states(function: Any, *shape: int) -> Any:
    return (drawn(*shape), drawn(*shape)) if function is torch.lstm else drawn(*shape)


@pytest.mark.parametrize("function", NETWORKS)
@pytest.mark.parametrize("shape", [(1, 5, 4), (1, 1, 4), (2, 4, 4), (1, 4, 3)])
def test_states_that_do_not_fit_a_network(function: Any, shape: tuple[int, ...]) -> None:
    """torch's kernels raise errors of their own here, so that only the type is the same."""
    options, hx = (True, 1, 0.0, False, False), states(function, *shape)
    for first, x in ((False, drawn(STEPS, BATCH, FEATURES)), (True, drawn(BATCH, STEPS, FEATURES))):
        check_error(
            lambda x, params, first=first: function(x, hx, params, *options, first),
            x,
            weights(NETWORKS[function]),
            0 if first else 1,
            False,
        )


@pytest.mark.parametrize("function", NETWORKS)
def test_no_time_steps(function: Any) -> None:
    hx = states(function, 1, BATCH, UNITS)
    check_error(
        lambda x, params: function(x, hx, params, True, 1, 0.0, False, False, False),
        drawn(0, BATCH, FEATURES),
        weights(NETWORKS[function]),
        1,
        True,
    )


def test_parameters_of_another_number() -> None:
    hx = states(torch.lstm, 1, BATCH, UNITS)
    check_error(
        lambda x, params: torch.lstm(x, hx, params[:3], True, 1, 0.0, False, False, False),
        drawn(STEPS, BATCH, FEATURES),
        weights(4),
        1,
        True,
    )


SIZES = [([3, 2, 1], 5), ([3, 2, 1], 1), ([1, 2, 3], 1), ([1, 2, 3], 3), ([2, 1, 3], 2), ([3, 2, 2], 3), ([7, -1], 7)]


@pytest.mark.parametrize("function", [torch.lstm, torch.gru])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(("sizes", "batch"), SIZES)
def test_packed_sequences_that_do_not_fit(function: Any, ways: int, sizes: list[int], batch: int) -> None:
    hx = states(function, ways, batch, UNITS)
    check_error(
        lambda x, params: function(x, torch.tensor(sizes), hx, params, True, 1, 0.0, False, ways == 2),
        drawn(6, FEATURES),
        weights(NETWORKS[function], ways),
        None,
        False,
    )


def test_calls_whose_answer_depends_on_the_kernel() -> None:
    """An LSTM's memory of another shape, and rows behind the last step: torch may give values, or crash."""
    options, x, data = (True, 1, 0.0, False, False), drawn(STEPS, BATCH, FEATURES), drawn(7, FEATURES)
    hidden, packed = drawn(1, BATCH, UNITS), drawn(1, 3, UNITS)

    def body() -> None:
        mesh = hc.Mesh(m=2)
        params = [hc.shard(each, mesh, {0: "m"}) for each in weights(4)]
        for memory in (drawn(1, 1, UNITS), drawn(2, BATCH, UNITS)):
            with pytest.raises(RuntimeError, match="Expected hidden size"):
                torch.lstm(x, (hidden, memory), params, *options, False)
        with pytest.raises(RuntimeError, match="two hidden states"):
            torch.lstm(x, (hidden,), params, *options, False)
        with pytest.raises(RuntimeError, match="batch sizes"):
            torch.lstm(data, torch.tensor([3, 2, 1]), (packed, packed), params, *options)
        with pytest.raises(RuntimeError, match="larger than 0"):
            torch.lstm(data[:0], torch.tensor([], dtype=torch.int64), (packed, packed), params, *options)

    run_local(2, body)


@pytest.mark.parametrize("function", NETWORKS)
@pytest.mark.parametrize("by_name", [False, True])
def test_packed_call(function: Any, by_name: bool) -> None:
    """Named arguments; time steps without samples; sizes that are cut; both directions."""
    gates, hx, data = NETWORKS[function], states(function, 2, 3, UNITS), drawn(6, FEATURES)
    names = ["data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional"]

    def call(sizes: Tensor, params: list[Tensor]) -> Any:
        args = (data, sizes, hx, params, True, 1, 0.0, False, True)
        return function(**dict(zip(names, args, strict=True))) if by_name else function(*args)

    def body() -> list[Any]:
        mesh = hc.Mesh(m=2)
        cut = [hc.shard(each, mesh, {0: "m"}) for each in weights(gates, 2)]
        sizes = torch.tensor([3, 2, 1, 0])
        return [hc.gather(call(each, cut)) for each in (sizes, hc.shard(sizes, mesh, {0: "m"}))]

    expected = call(torch.tensor([3, 2, 1, 0]), weights(gates, 2))
    for results in run_local(2, body):
        for found in results:
            torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_wrong_names_of_arguments() -> None:
    options = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    packed = {"data": drawn(6, FEATURES), "batch_sizes": torch.tensor([3, 2, 1]), "hx": drawn(1, 3, UNITS), **options}
    padded = {"input": drawn(STEPS, BATCH, FEATURES), "hx": drawn(1, BATCH, UNITS), **options}
    for wrong in ({**packed, "batch_first": True}, padded, {**padded, "batch_first": False, "size": 1}):
        check_error(
            lambda _, params, wrong=wrong: torch.gru(**wrong, params=params), packed["data"], weights(3), None, False
        )


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_lengths_that_are_cut(enforce_sorted: bool) -> None:
    """Packing and padding take lengths, and numbers of samples by time step, that are cut."""
    lengths, x = torch.tensor([5, 3, 2, 2]), drawn(5, 4, FEATURES)
    expected = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    padded = pad_packed_sequence(expected)

    def body() -> None:
        mesh = hc.Mesh(m=2)
        packed = pack_padded_sequence(
            hc.shard(x, mesh, {1: "m"}), hc.shard(lengths, mesh, {0: "m"}), enforce_sorted=enforce_sorted
        )
        for found, wanted in zip(packed, expected, strict=True):
            assert (found is None and wanted is None) or torch.equal(hc.gather(found), wanted)
        again = PackedSequence(expected.data, hc.shard(expected.batch_sizes, mesh, {0: "m"}))
        for found, wanted in zip(pad_packed_sequence(again), padded, strict=True):
            assert torch.equal(hc.gather(found), wanted)

    run_local(2, body)


LOWER = [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float32, torch.bfloat16)]
KINDS = [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell]


@pytest.mark.long
@pytest.mark.parametrize(("own", "lower"), LOWER)
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [*((kind, None) for kind in KINDS), *((k, n) for k in KINDS[:2] for n in ([3, 2, 2, 1], [3] * 4))],
)
def test_autocast_to_another_dtype(kind: Any, lengths: list[int] | None, own: torch.dtype, lower: torch.dtype) -> None:
    """Parameters of one dtype under autocast to another: torch's dtypes, values and gradients to their precision."""
    cell = issubclass(kind, nn.RNNCellBase)
    torch.manual_seed(0)
    net = (kind(FEATURES, UNITS) if cell else kind(FEATURES, UNITS, 2, bidirectional=True)).to(own)
    x: Any = drawn(*([BATCH, FEATURES] if cell else [STEPS, BATCH, FEATURES])).to(own)
    x = pack_padded_sequence(x, torch.tensor(lengths)) if lengths else x

    def run(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        with torch.autocast("cpu", dtype=lower):
            made = net(x)
        first, *last = made if isinstance(made, tuple) else (made,)
        last = [*last[0]] if last and isinstance(last[0], tuple) else last
        results = [first.data if lengths else first, *last]
        sum(each.float().sum() for each in results).backward()
        return hc.gather([each.detach() for each in results]), hc.gather([each.grad for each in net.parameters()])

    error = None
    try:
        expected, gradients = run(copy.deepcopy(net))
    except RuntimeError as raised:  # where torch has no kernel for these dtypes
        error = raised

    def body() -> None:
        cut = hc.distribute(copy.deepcopy(net), hc.Mesh(m=2), layout={"*": {0: "m"}})
        if error is not None:
            with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                run(cut)
            return
        results, by_weight = run(cut)
        for found, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
        assert max(map(relative_error, by_weight, gradients)) < 2**-5

    run_local(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_no_advice_on_the_hidden_state(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is gathered so that weights stay cut; an input that is cut by features is worth the advice."""
    cell = issubclass(kind, nn.RNNCellBase)
    net, steps = kind(16, 16), drawn(STEPS, 128, 16).float()

    def run(x: Tensor, cut: Any) -> None:
        state = None
        for step in x if cell else (x,):
            state = cut(step, state) if cell else cut(step)[1]

    def body(dims: dict[int, str]) -> None:
        mesh = hc.Mesh(m=2)
        run(hc.shard(steps, mesh, dims), hc.distribute(copy.deepcopy(net), mesh, layout={"*": {0: "m"}}))
        assert mesh.world.traffic.gathered_bytes > 0

    run_local(2, lambda: body({}))
    assert "saves no memory" not in caplog.text
    run_local(2, lambda: body({2: "m"}))
    assert caplog.text.count("saves no memory") == 1
