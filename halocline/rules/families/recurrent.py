"""Recurrent networks: time runs on whole, the batch keeps its cut.

A sequence that is cut in time is brought together first, since each step needs the one before it, wherever it lies.
Layers run one by one where something is dropped between them, so that it is drawn by global index, and where their
weights are cut by hidden units (``recurrent_units.py``). Weights that are cut otherwise are gathered in each call. The
rows of packed sequences mix samples and time, so that they are whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch_private import pack_padded, pad_packed
from ...tensor import ShardedTensor
from ..asking_torch import planned
from ..recipe import Operand, Output, Recipe, Work, as_called, follow, read_whole, whole_operands
from ..table import composite, refuse, run_for
from .random import dropped
from .recurrent_units import GATES, as_autocast, cut_by_units, joined, run_cell, run_layer
from .view import whole_on_every_rank


def _network_rule(
    function: Any,
    input: Operand,
    hx: tuple[Operand, ...],
    params: list[Operand],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Recipe:
    """All layers at once: what comes out of the last layer, and the last state of each."""
    if input.ndim != 3:
        raise refuse(function, "a sequence without a batch has nothing to be cut", "call x.unsqueeze(batch dim)")
    batch = 0 if batch_first else 1
    # Both ways side by side.
    made = (*input.shape[:2], hx[0].shape[2] * (1 + bidirectional))
    of_input = tuple(0 if d == batch else None for d in range(3))
    of_state = (None, 0, None)

    def local(work: Work, input: Tensor, hx: Any, params: Any, *options: Any) -> tuple[Tensor, ...]:
        return _without_dropout(function, input, hx, params, *options)

    return Recipe(
        space=(input.shape[batch],),
        reads=(follow(input, *of_input), *(follow(state, *of_state) for state in hx), *map(read_whole, params)),
        outputs=(Output(made, of_input), *(Output(state.shape, of_state) for state in hx)),
        local=local,
    )


def _packed_rule(
    function: Any,
    data: Operand,
    sizes: tuple[int, ...],
    hx: tuple[Operand, ...],
    params: list[Operand],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> Recipe:
    """All layers at once of packed sequences, on whole operands. ``sizes``: samples by time step."""

    def local(work: Work, data: Tensor, _: Any, hx: Any, params: Any, *options: Any) -> tuple[Tensor, ...]:
        return _packed_without_dropout(function, data, sizes, hx, params, *options)

    made = (data.shape[0], hx[0].shape[2] * (1 + bidirectional))
    outputs = [Output(made, (None, None)), *(Output(state.shape, (None,) * 3) for state in hx)]
    return Recipe(space=(), reads=tuple(map(read_whole, (data, *hx, *params))), outputs=tuple(outputs), local=local)


class _Options(NamedTuple):
    """Of a recurrent network, as torch's functions take them; and how many packed samples each time step has."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    sizes: tuple[int, ...] | None = None


def _register(function: Any) -> None:
    """Register a recurrent network as a composite over its rules."""

    def network(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """``(input, hx, params, ...)`` or, of packed sequences, ``(data, batch_sizes, hx, params, ...)``."""
        second = args[1] if len(args) > 1 else kwargs.get("batch_sizes")
        if isinstance(second, Tensor) and not second.is_floating_point():
            return packed(*args, **kwargs)
        return padded(*args, **kwargs)

    def padded(input: Tensor, hx: Any, params: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return _run_layers(function, input, _states(function, hx), list(params), _Options(*args, **kwargs))

    def packed(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        if _axis(data, 0) is not None:
            why = "a packed sequence mixes the samples of a batch"
            raise refuse(function, why, "pad it, and mask what is behind, or pack it whole")
        sizes = tuple(whole_on_every_rank(batch_sizes).tolist())
        options = _Options(has_biases, num_layers, dropout, train, bidirectional, False, sizes)
        return _run_layers(function, data, _states(function, hx), list(params), options)

    composite(function, family="recurrent")(network)


def _states(function: Any, hx: Any) -> tuple[Tensor, ...]:
    return tuple(hx) if function in (torch.lstm, torch.lstm_cell) else (hx,)


def _check_network(
    function: Any, input: Tensor, states: tuple[Tensor, ...], params: list[Tensor], options: _Options
) -> None:
    """Raise RuntimeError, as torch does, where sequence, states and parameters do not fit together."""
    sizes, ways, memory = options.sizes, options.num_layers * (1 + options.bidirectional), function is torch.lstm
    if input.ndim != (3 if sizes is None else 2):
        return  # torch raises, or the rule refuses
    order = (1, 0) if options.batch_first else (0, 1)
    steps, batch = [input.shape[dim] for dim in order] if sizes is None else (len(sizes), max(sizes, default=0))
    if not steps:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    if sizes and ([*sizes, 0] != sorted([*sizes, 0], reverse=True) or sum(sizes) != input.shape[0]):
        raise RuntimeError(f"Expected batch sizes that do not increase and add up to {input.shape[0]}, got {[*sizes]}")
    each, least = len(params) / ways, 2 + 2 * options.has_biases
    if each not in (least, least + memory):
        raise RuntimeError("got an incorrect number of RNN parameters")
    rows, width = params[1].shape
    widths = (width, rows // GATES[function])[: 1 + memory]
    if len(states) != len(widths):
        raise RuntimeError("lstm expects two hidden states")
    for state, width in zip(states, widths, strict=True):
        if state.shape != (ways, batch, width):
            raise RuntimeError(f"Expected hidden size {(ways, batch, width)}, got {list(state.shape)}")


def _axis(tensor: Tensor, dim: int) -> str | None:
    cut = tensor.sharding.cuts[dim] if isinstance(tensor, ShardedTensor) else None
    return None if cut is None else cut.axis


def _run_layers(
    function: Any, input: Tensor, states: tuple[Tensor, ...], params: list[Tensor], options: _Options
) -> tuple[Tensor, ...]:
    """All layers in one call; layer by layer where something is dropped between them, or units are cut."""
    _check_network(function, input, states, params, options)
    layers, ways, lost = options.num_layers, 1 + options.bidirectional, options.dropout if options.train else 0.0
    each = len(params) // layers
    of_layers = [params[layer * each : (layer + 1) * each] for layer in range(layers)]
    samples = None if options.sizes else _axis(input, 0 if options.batch_first else 1)
    by_units = [_by_units(own, ways, samples) and input.ndim == (2 if options.sizes else 3) for own in of_layers]
    if not any(by_units) and (not lost or layers == 1):
        return _run(function, input, states, params, options)
    ends, entering = [], input
    for layer, own in enumerate(of_layers):
        # torch drops between layers, never before the first.
        input = dropped(input, lost) if layer else input
        start = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
        if by_units[layer]:
            each_way = options.has_biases, options.batch_first, options.sizes
            input, *end = run_layer(function, input, start, own, *each_way)
        else:
            input, *end = _run(function, input, start, own, options._replace(num_layers=1))
        ends.append(end)
    made = (input, *(joined(torch.cat, parts) for parts in zip(*ends, strict=True)))
    one = of_layers[0][: each // ways]
    return as_autocast(function, made, entering, states[0], one, options.has_biases, options.sizes)


def _by_units(params: list[Tensor], ways: int, samples: str | None) -> bool:
    """Are the hidden units of this layer cut? The weight of the state decides, then that of the input."""
    each = len(params) // ways
    return cut_by_units(list(zip(params[1::each], params[::each], strict=True)), samples)


def _run(
    function: Any, input: Tensor, hx: tuple[Tensor, ...], params: list[Tensor], options: _Options
) -> tuple[Tensor, ...]:
    """Some layers in one call. A sequence that was cut in time alone is whole from the second layer on."""
    has_biases, num_layers, bidirectional = options.has_biases, options.num_layers, options.bidirectional
    cut = any(isinstance(tensor, ShardedTensor) for tensor in (input, *hx, *params))
    if options.sizes:
        packed = (input, options.sizes, hx, params, has_biases, num_layers, bidirectional)
        return run_for(function, _packed_rule, *packed) if cut else _packed_without_dropout(function, *packed)
    call = (input, hx, params, has_biases, num_layers, bidirectional, options.batch_first)
    return run_for(function, _network_rule, *call) if cut else _without_dropout(function, *call)


def _without_dropout(
    function: Any, input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, *options: bool
) -> tuple[Tensor, ...]:
    """torch's own call, as in evaluation."""
    state = tuple(hx) if function is torch.lstm else hx[0]
    return function(input, state, list(params), has_biases, num_layers, 0.0, False, *options)


def _packed_without_dropout(
    function: Any, data: Tensor, sizes: tuple[int, ...], hx: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    """The same for packed sequences."""
    (has_biases, num_layers, bidirectional), state = options, tuple(hx) if function is torch.lstm else hx[0]
    samples = torch.tensor(sizes, device="cpu")
    return function(data, samples, state, list(params), has_biases, num_layers, 0.0, False, bidirectional)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _register(_function)


@composite(pack_padded, family="recurrent")
def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The rows that torch would pack. Samples and time are whole afterwards, features as they were."""
    input, lengths = input.transpose(0, 1) if batch_first else input, whole_on_every_rank(lengths)
    rows = torch.arange(input.shape[0] * input.shape[1], device="cpu").unflatten(0, (*input.shape[:2], 1))
    places, sizes = pack_padded(rows, lengths, False)
    return input.flatten(0, 1).index_select(0, places.flatten().to(input.device)), sizes


@composite(pad_packed, family="recurrent")
def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The rows where torch would put them. What is missing is one more row, of the padding."""
    if _axis(data, 0) is not None:
        raise refuse("pad_packed_sequence", "samples of a cut batch would be mixed", "hc.gather the packed data first")
    count = data.shape[0]
    rows = torch.arange(count, device="cpu").unsqueeze(1)
    places, lengths = pad_packed(rows, whole_on_every_rank(batch_sizes), False, float(count), total_length)
    padding = torch.full((1, *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)
    padded = torch.cat([data, padding]).index_select(0, places.flatten().to(data.device))
    padded = padded.unflatten(0, places.shape[:2])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _cell_rule(
    function: Any, input: Operand, hx: Any, w_ih: Operand, w_hh: Operand, b_ih: Any = None, b_hh: Any = None
) -> Recipe:
    """One step: samples keep their cut, features do not."""
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if input.ndim != 2:
        raise refuse(function, "a step without a batch has nothing to be cut", "call x.unsqueeze(0)")
    return Recipe(
        space=(input.shape[0],),
        reads=(*(follow(x, 0, None) for x in (input, *states)), *whole_operands(w_ih, w_hh, b_ih, b_hh)),
        outputs=tuple(Output(state.shape, (0, None)) for state in states),
        local=as_called(function),
    )


@lru_cache(maxsize=4096)
def _check_cell(function: Any, input: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, *states: Any) -> None:
    """Raise what torch raises for operands of these shapes."""
    with planned(), torch.no_grad():
        shapes = (input, w_ih, w_hh, b_ih, b_hh, *states)
        like = [None if shape is None else torch.empty(shape, device="meta") for shape in shapes]
        function(like[0], like[5:] if function is torch.lstm_cell else like[5], *like[1:5])


def _register_cell(function: Any) -> None:
    """Register a recurrent cell as a composite over its rule."""

    def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        """One step; by hidden units where those are cut."""
        states = _states(function, hx)
        if input.ndim == 2:
            _check_cell(function, *(None if x is None else x.shape for x in (input, w_ih, w_hh, b_ih, b_hh, *states)))
        if input.ndim == 2 and cut_by_units([[w_hh]], _axis(input, 0)):
            return run_cell(function, input, states, (w_ih, w_hh), (b_ih, b_hh))
        return run_for(function, _cell_rule, input, hx, w_ih, w_hh, b_ih, b_hh)

    composite(function, family="recurrent")(cell)


for _cell in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    _register_cell(_cell)
