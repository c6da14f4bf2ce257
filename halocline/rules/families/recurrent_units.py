"""Recurrent networks whose weights are cut by rows: each rank computes the gates of its own hidden units.

torch keeps the rows of one gate after those of another. Once a call they change places, so that each rank has every
gate of its units. The product with the whole sequence comes first; then each time step brings the hidden state together
and computes this rank's part of the next one. No rank holds more of a weight than its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Packed
from ...tensor import ShardedTensor
from ..asking_torch import planned
from ..double_backward import Autocast
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, follow
from ..remedy import choices_here
from ..table import run_for
from .contract import autocasts, linear

#: Gates of a hidden unit.
GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
#: The network that makes the same step as a cell.
NETWORK = {
    torch.lstm_cell: torch.lstm,
    torch.gru_cell: torch.gru,
    torch.rnn_tanh_cell: torch.rnn_tanh,
    torch.rnn_relu_cell: torch.rnn_relu,
}


class Weights(NamedTuple):
    """The weights of one layer in one direction: [gates, units, features], biases [gates, units]."""

    recurrent: Tensor
    entering: Tensor
    entering_bias: Tensor | None
    recurrent_bias: Tensor | None
    projection: Tensor | None  #: [projected, units]


def cut_by_units(ways: Sequence[Sequence[Tensor]], samples: str | None) -> bool:
    """Do the ranks of one axis share the hidden units? ``ways``: weights by direction; ``samples``: axis of the batch.

    Ranks that work on other samples cannot share units: they gather the weights.
    """
    rows = {_rows(weights) for weights in ways}
    found = rows.pop()
    if found is None or rows:
        return False
    mesh, axis = found
    return axis != samples and mesh.sizes[axis] > 1 and choices_here(mesh).remedy != "gather"


def _rows(weights: Sequence[Tensor]) -> tuple[Any, str] | None:
    """Mesh and axis of the first weight whose rows are cut, which are those of the gates."""
    of_rows = [(w.sharding.mesh, w.sharding.cuts[0]) for w in weights if isinstance(w, ShardedTensor)]
    return next(((mesh, cut.axis) for mesh, cut in of_rows if cut is not None), None)


def run_layer(
    function: Any,
    input: Tensor,
    start: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    batch_first: bool,
    sizes: tuple[int, ...] | None = None,
) -> tuple[Tensor, ...]:
    """One layer, in one or both directions: its results, and its last states. ``sizes``: samples by step, if packed."""
    ways = start[0].shape[0]
    each = len(params) // ways
    weights = [_arranged(function, params[way * each : (way + 1) * each], has_biases) for way in range(ways)]
    input = input.transpose(0, 1) if batch_first else input
    products = ([each.entering for each in weights], [each.entering_bias for each in weights])
    gates = run_for(function, _entering_rule, input, *products, sizes)
    gates = gates if isinstance(gates, tuple) else (gates,)
    steps, seen, ends = len(gates) // ways, [], []
    for way in range(ways):
        own, first = gates[way * steps : (way + 1) * steps], [state[way] for state in start]
        out, end = (_run_backwards if way else _run_forwards)(function, own, weights[way], first)
        seen.append(joined(torch.stack if sizes is None else torch.cat, out))
        ends.append(end)
    result = joined(torch.cat, seen, -1) if ways > 1 else seen[0]
    last = (joined(torch.stack, parts) for parts in zip(*ends, strict=True))
    return result.transpose(0, 1) if batch_first else result, *last


def joined(join: Callable[..., Tensor], parts: Sequence[Tensor], *dim: int) -> Tensor:
    """``torch.cat`` or ``torch.stack``, which under autocast raise for float16 beside bfloat16."""
    with Autocast.now(parts[0].device).off.again():
        return join(parts, *dim)


def as_autocast(
    function: Any,
    made: tuple[Tensor, ...],
    input: Tensor,
    state: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    sizes: tuple[int, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Under autocast, results of the dtypes of torch's own call, which is asked for two units of one feature.

    ``params`` are those of one layer in one direction.
    """
    if not autocasts(input.device.type):
        return made
    projected, cell = len(params) - 2 * has_biases - 2, function in NETWORK
    rows, of_state = 2 * GATES[NETWORK.get(function, function)], 2 - projected
    shapes = [(rows, 1), (rows, of_state), *[(rows,)] * (2 * has_biases), *[(1, 2)] * projected]
    memories = [2] if function in (torch.lstm, torch.lstm_cell) else []
    # For packed sequences of one length torch may take another kernel than for those of several.
    steps = (2, 1) if sizes and len(set(sizes)) > 1 else (1,)

    def zeros(like: Tensor, *size: int) -> Tensor:
        return torch.zeros(size, dtype=like.dtype, device=input.device)

    with planned(), torch.no_grad():
        one = [] if cell else [1]
        states = [zeros(state, *one, steps[0], size) for size in (of_state, *memories)]
        weights = [zeros(params[0], *shape) for shape in shapes]
        hx: Any = states if memories else states[0]
        options = weights if cell else [weights, has_biases, 1, 0.0, False, False]
        if sizes:
            asked = function(zeros(input, sum(steps), 1), torch.tensor(steps, device="cpu"), hx, *options)
        else:
            asked = function(zeros(input, *one, 1, 1), hx, *options, *([] if cell else [False]))
    asked = asked if isinstance(asked, tuple) else (asked,)
    return tuple(each.to(like.dtype) for each, like in zip(made, asked, strict=True))


def _run_forwards(
    function: Any, entered: Sequence[Tensor], weights: Weights, states: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden state of each time step, and the last states. Of packed sequences the longest come first."""
    seen, ended = [], []
    for gates in entered:
        if (left := gates.shape[0]) < states[0].shape[0]:
            ended.append([state[left:] for state in states])
            states = [state[:left] for state in states]
        states = _step(function, gates, weights, states)
        seen.append(states[0])
    ended.append(states)
    return seen, [parts[0] if len(parts) == 1 else joined(torch.cat, parts) for parts in zip(*ended[::-1], strict=True)]


def _run_backwards(
    function: Any, entered: Sequence[Tensor], weights: Weights, first: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same from the last time step on. Packed sequences that are shorter join where they end."""
    seen: list[Tensor] = []
    states = [state[: entered[-1].shape[0]] for state in first]
    for gates in reversed(entered):
        if (now := states[0].shape[0]) < gates.shape[0]:
            joining = [state[now : gates.shape[0]] for state in first]
            states = [joined(torch.cat, both) for both in zip(states, joining, strict=True)]
        states = _step(function, gates, weights, states)
        seen.append(states[0])
    return seen[::-1], states


def _step(function: Any, gates: Tensor, weights: Weights, states: list[Tensor]) -> list[Tensor]:
    """The states after one time step."""
    made = run_for(function, _step_rule, gates, weights.recurrent, weights.recurrent_bias, *states)
    hidden, *memory = made if isinstance(made, tuple) else (made,)
    if weights.projection is None:
        return [hidden, *memory]
    # The ranks' parts of the projection are added up (now, whatever the mesh chooses): no gather in the next step.
    return [F.linear(hidden, weights.projection).contiguous(), *memory]


def _arranged(function: Any, params: Sequence[Tensor], has_biases: bool) -> Weights:
    """The weights of one direction, each rank with all gates of its units."""
    entering, recurrent, *rest = params
    biases, projection = rest[: 2 * has_biases], rest[2 * has_biases :]
    recurrent, entering, *rest = run_for(function, _arranging_rule, recurrent, entering, biases, projection)
    first, second = rest[:2] if has_biases else (None, None)
    return Weights(recurrent, entering, first, second, rest[-1] if projection else None)


def _arranging_rule(
    function: Any, recurrent: Operand, entering: Operand, biases: list[Operand], projection: list[Operand]
) -> Recipe:
    """Rows of the same unit, one of each gate, come to lie on one rank. The first weight with cut rows decides."""
    gates = GATES[function]
    units = recurrent.shape[0] // gates
    rows = Link(0, Packed(gates, units))
    packed = (recurrent, entering, *biases)
    reads = [Read(weight, (rows, WHOLE)[: weight.ndim]) for weight in packed]
    outputs = [Output((gates, units, *weight.shape[1:]), (None, 0, None)[: weight.ndim + 1]) for weight in packed]

    def local(work: Work, *operands: Any) -> tuple[Tensor, ...]:
        recurrent, entering, biases, projection = operands
        parted = [w.unflatten(0, (gates, w.shape[0] // gates)) for w in (recurrent, entering, *biases)]
        return *parted, *(weight.view_as(weight) for weight in projection)

    return Recipe(
        space=(units,),
        reads=(*reads, *(follow(weight, None, 0) for weight in projection)),
        outputs=(*outputs, *(Output(weight.shape, (None, 0)) for weight in projection)),
        local=local,
        runs_empty=True,
    )


def _entering_rule(
    function: Any,
    input: Operand,
    weights: list[Operand],
    biases: list[Operand | None],
    sizes: tuple[int, ...] | None,
) -> Recipe:
    """What the sequence adds to the gates of each time step, for each direction. Time and features are read whole.

    Each step is a result of its own: the gradients of slices would be added up in tensors as long as the sequence.
    """
    gates, units, _ = weights[0].shape
    batch = 1 if sizes else input.shape[1]  # a packed batch is not cut
    reads = [follow(weight, None, 1, None) for weight in weights]
    reads += [follow(input, *((None, None) if sizes else (None, 0, None)))]
    reads += [follow(bias, None, 1) for bias in biases if bias is not None]

    def local(work: Work, input: Tensor, weights: list[Tensor], biases: list[Tensor | None], *_: Any) -> Any:
        products = [_by_gates(input, *each) for each in zip(weights, biases, strict=True)]
        return _results([step for each in products for step in (each.split(sizes) if sizes else each.unbind(0))])

    if sizes:
        outputs = [Output((size, gates, units), (None, None, 1)) for size in sizes]
    else:
        outputs = [Output((batch, gates, units), (0, None, 1))] * input.shape[0]
    return Recipe(
        space=(batch, units), reads=tuple(reads), outputs=(*outputs,) * len(weights), local=local, runs_empty=True
    )


def _results(made: Sequence[Tensor]) -> Any:
    """As the executor takes them: one by itself, several as a tuple."""
    return tuple(made) if len(made) > 1 else made[0]


def _by_gates(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer: [..., features] to [..., gates, units]."""
    made = F.linear(input, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return made.unflatten(-1, weight.shape[:2])


def _step_rule(
    function: Any, gates: Operand, weight: Operand, bias: Operand | None, state: Operand, *memory: Operand
) -> Recipe:
    """One time step: of the hidden state every rank needs all units, of what an LSTM remembers its own."""
    batch, _, units = gates.shape
    reads = [follow(gates, 0, None, 1), follow(weight, None, 1, None), follow(state, 0, None)]
    reads += [follow(each, 0, 1) for each in memory] + ([] if bias is None else [follow(bias, None, 1)])

    def local(work: Work, gates: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *memory: Tensor) -> Any:
        own = memory[0] if memory else state[:, work.box[1].lo : work.box[1].hi]
        return _results(_advanced(function, gates, _by_gates(state, weight, bias), own))

    return Recipe(
        space=(batch, units),
        reads=tuple(reads),
        outputs=(Output((batch, units), (0, 1)),) * (1 + len(memory)),
        local=local,
        runs_empty=True,
        gathers_by_design=True,
    )


def _advanced(function: Any, entered: Tensor, turned: Tensor | None, own: Tensor) -> tuple[Tensor, ...]:
    """The next state of some units, from what input and state add to their gates [..., gates, units].

    ``own`` is what they remember (LSTM), or their state (GRU). Without ``turned``, ``entered`` is the sum of both.
    """
    if function is torch.gru:
        assert turned is not None
        reset, update = (entered[:, :2] + turned[:, :2]).sigmoid().unbind(1)
        new = (entered[:, 2] + reset * turned[:, 2]).tanh()
        return (new + update * (own - new),)
    gates = (entered if turned is None else entered + turned).unbind(1)
    if function is torch.lstm:
        enter, keep, new, leave = gates
        memory = keep.sigmoid() * own + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * memory.tanh(), memory
    return (gates[0].tanh() if function is torch.rnn_tanh else gates[0].relu(),)


def run_cell(
    function: Any, input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Any]
) -> Any:
    """One step of a cell. Its gates change places instead of the weights' rows: they are fewer in a single step."""
    network = NETWORK[function]
    entered = F.linear(input, weights[0], biases[0])
    turned = run_for(F.linear, _turning_rule, states[0], weights[1], biases[1])
    gates = (entered, turned) if network is torch.gru else (entered + turned,)
    # A sum that the mesh lets wait is completed.
    made = run_for(network, _cell_rule, states[-1], *(each.contiguous() for each in gates))
    made = made if isinstance(made, tuple) else (made,)
    params = [*weights, *(bias for bias in biases if bias is not None)]
    return _results(as_autocast(function, made, input, states[0], params, biases[0] is not None))


def _turning_rule(function: Any, state: Operand, weight: Operand, bias: Operand | None) -> Recipe:
    """The linear layer of the hidden state."""
    return replace(linear(function, state, weight, bias), gathers_by_design=True)


def _cell_rule(function: Any, own: Operand, entered: Operand, turned: Operand | None = None) -> Recipe:
    """The next state of each unit, from its gates, which lie gate after gate."""
    gates = GATES[function]
    packed = (Link(0), Link(1, Packed(gates, own.shape[1])))
    reads = [Read(each, packed) for each in (entered, turned) if each is not None]

    def local(work: Work, own: Tensor, *parts: Tensor) -> Any:
        entered, turned = [part.unflatten(1, (gates, own.shape[1])) for part in parts] + [None] * (2 - len(parts))
        assert entered is not None
        return _results(_advanced(function, entered, turned, own))

    return Recipe(
        space=own.shape,
        reads=(*reads, follow(own)),
        outputs=(Output(own.shape, (0, 1)),) * (1 + (function is torch.lstm)),
        local=local,
        runs_empty=True,
    )
