"""Recurrent networks: time runs on whole, the batch keeps its cut.

A sequence that is cut in time is brought together first, since each step needs the one before it, wherever it lies.
Layers run one by one where something is dropped between them, so that it is drawn by global index, and where their
weights are cut by hidden units (``recurrent_units.py``). Weights that are cut otherwise are gathered in each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...tensor import ShardedTensor
from ..recipe import Operand, Output, Recipe, Work, as_called, follow, read_whole, whole_operands
from ..table import composite, refuse, run_for
from .random import dropped
from .recurrent_units import cut_by_units, run_cell, run_layer


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


def _register(function: Any) -> None:
    """Register a recurrent network as a composite over its rule."""

    def network(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """All layers in one call; layer by layer where something is dropped between them."""
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # (data, batch_sizes, hx, params, ...)
            raise refuse(function, "a packed sequence mixes the samples of a batch", "pad it, and mask what is behind")
        states = tuple(hx) if function is torch.lstm else (hx,)
        call = (has_biases, bidirectional, batch_first)
        each, ways, lost = len(params) // num_layers, 1 + bidirectional, dropout if train else 0.0
        layers = [list(params[layer * each : (layer + 1) * each]) for layer in range(num_layers)]
        batch = 0 if batch_first else 1
        of_ways = [list(zip(own[1 :: each // ways], own[:: each // ways], strict=True)) for own in layers]
        by_units = [cut_by_units(weights, input, batch) for weights in of_ways]
        if not any(by_units) and (not lost or num_layers == 1):
            return _run(function, input, states, list(params), num_layers, *call)
        ends = []
        for layer, own in enumerate(layers):
            # torch drops between layers, never before the first.
            input = dropped(input, lost) if layer else input
            start = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
            if by_units[layer]:
                input, *end = run_layer(function, input, start, own, has_biases, batch_first)
            else:
                input, *end = _run(function, input, start, own, 1, *call)
            ends.append(end)
        return input, *(torch.cat(parts) for parts in zip(*ends, strict=True))

    composite(function, family="recurrent")(network)


def _run(
    function: Any, input: Tensor, hx: tuple[Tensor, ...], params: list[Tensor], num_layers: int, *options: bool
) -> tuple[Tensor, ...]:
    """A sequence that was cut in time alone is whole from the second layer on. ``options``: biases, two ways, batch."""
    has_biases, bidirectional, batch_first = options
    call = (input, hx, params, has_biases, num_layers, bidirectional, batch_first)
    if any(isinstance(tensor, ShardedTensor) for tensor in (input, *hx, *params)):
        return run_for(function, _network_rule, *call)
    return _without_dropout(function, *call)


def _without_dropout(
    function: Any, input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, *options: bool
) -> tuple[Tensor, ...]:
    """torch's own call, as in evaluation."""
    state = tuple(hx) if function is torch.lstm else hx[0]
    return function(input, state, list(params), has_biases, num_layers, 0.0, False, *options)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _register(_function)


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


def _register_cell(function: Any) -> None:
    """Register a recurrent cell as a composite over its rule."""

    def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        """One step; by hidden units where those are cut."""
        if input.ndim == 2 and cut_by_units([[w_hh]], input, 0):
            states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
            return run_cell(function, input, states, (w_ih, w_hh), (b_ih, b_hh))
        return run_for(function, _cell_rule, input, hx, w_ih, w_hh, b_ih, b_hh)

    composite(function, family="recurrent")(cell)


for _cell in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    _register_cell(_cell)
