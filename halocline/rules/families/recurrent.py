"""Recurrent networks: time runs on whole, the batch keeps its cut.

A sequence that is cut in time comes together first: the next step needs the last one, wherever it lies. Layers run one
by one where something is dropped between them, so that it is drawn by global index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, read_whole
from ..table import composite, refuse, rule, run_rule
from .dropout import dropped

_STATES = {torch.lstm: 2, torch.gru: 1, torch.rnn_tanh: 1, torch.rnn_relu: 1}


def _network_rule(function: Any) -> Any:
    def describe(
        input: Operand,
        hx: tuple[Operand, ...],
        params: list[Operand],
        has_biases: bool,
        num_layers: int,
        bidirectional: bool,
        batch_first: bool,
    ) -> Recipe:
        """All at once: what comes out of the last layer, and the last state of each."""
        if input.ndim != 3:
            raise refuse(function, "a sequence without a batch has nothing to be cut", "call x.unsqueeze(batch dim)")
        batch = 0 if batch_first else 1
        made = [*input.shape[:2], hx[0].shape[2] * (1 + bidirectional)]
        follow = lambda at: tuple(Link(0) if d == at else WHOLE for d in range(3))  # noqa: E731
        kept = lambda at: tuple(0 if d == at else None for d in range(3))  # noqa: E731

        def local(work: Work, input: Tensor, hx: Any, params: Any, *_: Any) -> tuple[Tensor, ...]:
            return _plainly(function, input, hx, params, has_biases, num_layers, bidirectional, batch_first)

        states = [Read(state, follow(1)) for state in hx]
        return Recipe(
            space=(input.shape[batch],),
            reads=(Read(input, follow(batch)), *states, *map(read_whole, params)),
            outputs=(Output(tuple(made), kept(batch)), *(Output(state.shape, kept(1)) for state in hx)),
            local=local,
        )

    return describe


_RULES = {function: _network_rule(function) for function in _STATES}


def _one_layer(
    params: Sequence[Tensor], hx: Sequence[Tensor], layer: int, num_layers: int, ways: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    each = len(params) // num_layers
    own = list(params[layer * each : (layer + 1) * each])
    return own, tuple(state[layer * ways : (layer + 1) * ways] for state in hx)


def _register(function: Any) -> None:
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
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # (data, batch_sizes, hx, params, ...)
            raise refuse(function, "a packed sequence mixes the samples of a batch", "pad it, and mask what is behind")
        states = tuple(hx) if function is torch.lstm else (hx,)
        call = (has_biases, bidirectional, batch_first)
        if not (train and dropout and num_layers > 1):
            return _run(function, input, states, list(params), num_layers, *call)
        ends = []
        for layer in range(num_layers):
            input = dropped(input, dropout) if layer else input
            own, start = _one_layer(params, states, layer, num_layers, 1 + bidirectional)
            input, *end = _run(function, input, start, own, 1, *call)
            ends.append(end)
        return input, *(torch.cat(parts) for parts in zip(*ends, strict=True))

    composite(function, family="recurrent")(network)


def _run(
    function: Any,
    input: Tensor,
    hx: tuple[Tensor, ...],
    params: list[Tensor],
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A sequence that was cut in time alone is whole from the second layer on."""
    if not any(isinstance(tensor, ShardedTensor) for tensor in (input, *hx, *params)):
        return _plainly(function, input, hx, params, has_biases, num_layers, bidirectional, batch_first)
    call = (input, hx, params, has_biases, num_layers, bidirectional, batch_first)
    return run_rule(function, _RULES[function], call, {})


def _plainly(
    function: Any,
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """torch's own call, without dropout."""
    state = tuple(hx) if function is torch.lstm else hx[0]
    return function(input, state, list(params), has_biases, num_layers, 0.0, False, bidirectional, batch_first)


for _function in _STATES:
    _register(_function)


def _cell(function: Any) -> Any:
    def describe(
        input: Operand,
        hx: Any,
        w_ih: Operand,
        w_hh: Operand,
        b_ih: Operand | None = None,
        b_hh: Operand | None = None,
    ) -> Recipe:
        """One step: samples keep their cut, features do not."""
        states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
        if input.ndim != 2:
            raise refuse(function, "a step without a batch has nothing to be cut", "call x.unsqueeze(0)")
        weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
        return Recipe(
            space=(input.shape[0],),
            reads=(*(Read(x, (Link(0), WHOLE)) for x in (input, *states)), *map(read_whole, weights)),
            outputs=tuple(Output(state.shape, (0, None)) for state in states),
            local=lambda work, *args, **kwargs: function(*args, **kwargs),
        )

    return describe


for _function in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    rule(_function, family="recurrent")(_cell(_function))
