"""On the ranks of ``bench overhead``: the same small operations by every contender, timed in turn.

A *subject* is one operation; its *contenders* do the same work: plain torch on the tile, this library, torch's DTensor
where it gives the right answer, and the bare message or sum underneath. Every contender is a call without arguments.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.distribute import distribute, no_sync
from halocline.rules import from_tile
from halocline.tensor import ShardedTensor, unwrap
from halocline.world import Mesh

RANKS = 2
CHANNELS, SIDE = 4, 8
TILE = (1, CHANNELS, SIDE, SIDE, SIDE)
WHOLE = (1, CHANNELS, RANKS * SIDE, SIDE, SIDE)
DEPTH = 2  # the dim that is cut
SLAB = (1, CHANNELS, 1, SIDE, SIDE)  # what a 3x3x3 kernel needs of the neighbour
WARM = 3  # calls before the timed ones: the call before was another contender's
CLOSE = 1e-4  # relative to the largest number, in float32

Call = Callable[[], object]
Times = dict[tuple[str, str, str], list[float]]
Operation = Callable[[Any, Any], Tensor]  # of a network (or operand) and an input


@dataclass
class OverheadCall:
    name: str
    forward: dict[str, Call]
    backward: dict[str, Call] = field(default_factory=dict)  # forward and backward


@dataclass
class Kept:
    """What stays on a rank from one round to the next."""

    subjects: list[OverheadCall]
    notes: dict[str, str]  # by subject: why DTensor is left out


# ---- the contenders ----


@dataclass
class Inputs:
    """The same numbers in three dresses; ``seeds`` are the gradients that enter backward."""

    values: dict[str, Any]
    seeds: dict[str, Any]


def make_inputs(mesh: Mesh, device_mesh: Any) -> Inputs:
    """Rank by rank the same tile, a leaf that requires a gradient."""
    whole, seed = torch.randn(WHOLE), torch.randn(WHOLE)
    mine = slice(mesh.rank * SIDE, (mesh.rank + 1) * SIDE)

    def tile(tensor: Tensor) -> Tensor:
        return tensor[:, :, mine].clone()

    values = {
        "plain": tile(whole).requires_grad_(),
        "halocline": from_tile(tile(whole).requires_grad_(), mesh, {DEPTH: "depth"}, shape=WHOLE),
        "dtensor": _as_dtensor(whole, device_mesh).requires_grad_(),
        "whole": whole.clone().requires_grad_(),
    }
    seeds = {
        "plain": tile(seed),
        "halocline": from_tile(tile(seed), mesh, {DEPTH: "depth"}, shape=WHOLE),
        "dtensor": _as_dtensor(seed, device_mesh),
        "whole": seed,
    }
    return Inputs(values, seeds)


def _as_dtensor(whole: Tensor, device_mesh: Any, cut: bool = True) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(whole, device_mesh, _cut_in_depth() if cut else [Replicate()]).detach()


def make_networks(make: Callable[[], nn.Module], mesh: Mesh, device_mesh: Any) -> dict[str, nn.Module]:
    """One network with the same weights for each contender."""
    made = {}
    for who in ("plain", "halocline", "dtensor", "whole"):
        torch.manual_seed(1)
        made[who] = make()
    distribute(made["halocline"], mesh)
    for module in made["dtensor"].modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_as_dtensor(parameter.detach(), device_mesh, cut=False)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _as_dtensor(buffer, device_mesh, cut=False))
    return made


def make_subject(name: str, operation: Operation, operands: dict[str, Any], inputs: Inputs) -> tuple[OverheadCall, str]:
    """The subject, and why DTensor is not among its contenders, if it is not."""

    def forward(who: str) -> Call:
        operand, value = operands[who], inputs.values[who]
        return lambda: operation(operand, value)

    def both(who: str) -> Call:
        operand, value, seed = operands[who], inputs.values[who], inputs.seeds[who]
        return lambda: operation(operand, value).backward(seed)

    if fault := _fault("halocline", operation, operands, inputs):
        raise ArithmeticError(f"{name}: {fault}")
    note = _fault("dtensor", operation, operands, inputs)
    contenders = ["plain", "halocline"] if note else ["plain", "halocline", "dtensor"]
    return OverheadCall(name, {who: forward(who) for who in contenders}, {who: both(who) for who in contenders}), note


def _fault(who: str, operation: Operation, operands: dict[str, Any], inputs: Inputs) -> str:
    """What is wrong with a contender on any rank, value and gradient of the input; empty if nothing is."""
    try:
        mine = _compare(who, operation, operands, inputs)
    except Exception as error:  # noqa: BLE001 - whatever it raises: it is left out, and the reason told
        mine = f"refused: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
    said: list[str] = [""] * RANKS
    dist.all_gather_object(said, mine)
    return next((text for text in said if text), "")


def _compare(who: str, operation: Operation, operands: dict[str, Any], inputs: Inputs) -> str:
    true = operation(operands["whole"], inputs.values["whole"])
    (slope,) = torch.autograd.grad(true, inputs.values["whole"], inputs.seeds["whole"])
    result = operation(operands[who], inputs.values[who])
    result.backward(inputs.seeds[who])
    wrong = [
        what
        for what, one, other in (("value", result, true), ("gradient", inputs.values[who].grad, slope))
        if not _is_my_part(one, other.detach())
    ]
    return f"wrong {' and '.join(wrong)} without an error" if wrong else ""


def _is_my_part(tensor: Any, whole: Tensor) -> bool:
    """Is what lies here this rank's part of ``whole``?"""
    expected = whole[:, :, dist.get_rank() * SIDE : (dist.get_rank() + 1) * SIDE]
    part = _local(tensor)
    return part is not None and part.shape == expected.shape and torch.allclose(part, expected, CLOSE, CLOSE)


def _local(tensor: Any) -> Tensor | None:
    if tensor is None:
        return None
    if isinstance(tensor, ShardedTensor):
        return unwrap(tensor).detach()
    # What a DTensor says of itself counts too: a result laid out otherwise is brought back to the cut.
    return tensor.detach().redistribute(placements=_cut_in_depth()).to_local()


def _cut_in_depth() -> list[Any]:
    from torch.distributed.tensor import Shard

    return [Shard(DEPTH)]


def raw_exchanges() -> dict[str, Call]:
    """A slab each way between the two ranks, as bare as torch.distributed has it."""
    other = 1 - dist.get_rank()
    ours, theirs = torch.randn(SLAB), torch.empty(SLAB)

    def single() -> None:
        receiving, sending = dist.irecv(theirs, other), dist.isend(ours, other)
        for work in (receiving, sending):
            if work is not None:
                work.wait()

    def batched() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, ours, other)]
        ):
            work.wait()

    return {"raw isend/irecv": single, "raw batch_isend_irecv": batched}


def raw_sum() -> dict[str, Call]:
    """The all-reduce under a batch norm: a sum and a sum of squares for each channel, in float64."""
    statistics = torch.randn(2 * CHANNELS, dtype=torch.float64)
    return {"raw all_reduce": lambda: dist.all_reduce(statistics)}


def by_hand(local: Call, communication: Call) -> dict[str, Call]:
    """One after the other, as in a program without a library. A message among computations costs more than alone."""

    def both() -> None:
        communication()
        local()

    return {"by hand": both}


def make_subjects() -> Kept:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, device_mesh = Mesh(depth=RANKS), init_device_mesh("cpu", (RANKS,))

    def subject(name: str, operation: Operation, operands: dict[str, Any]) -> tuple[OverheadCall, str]:
        return make_subject(name, operation, operands, make_inputs(mesh, device_mesh))

    def layers(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
        """Of a larger network, for its outermost module has hooks that a layer has not."""
        made = make_networks(lambda: nn.Sequential(make()), mesh, device_mesh)
        _models.append(made["halocline"])
        return {who: network.get_submodule("0") for who, network in made.items()}

    _models.clear()
    point = layers(lambda: nn.Conv3d(CHANNELS, CHANNELS, 1))
    cube = layers(lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1))
    norm = layers(lambda: nn.BatchNorm3d(CHANNELS))
    second = make_inputs(mesh, device_mesh).values
    made = [
        subject("relu", lambda _, x: F.relu(x), second),
        subject("add", lambda y, x: x + y, second),
        subject("window", lambda net, x: net(x), point),
        subject("window function", lambda net, x: F.conv3d(x, net.weight, net.bias), point),
        subject("halo", lambda net, x: net(x), cube),
        subject("norm", lambda net, x: net(x), norm),
    ]
    subjects = {one.name: one for one, _ in made}
    for name, raw in (("halo", raw_exchanges()), ("norm", raw_sum())):
        subjects[name].forward |= raw | by_hand(subjects[name].forward["plain"], next(iter(raw.values())))
    return Kept(list(subjects.values()), {one.name: note for one, note in made if note})


# ---- the rounds ----

_kept: list[Kept] = []
_models: list[nn.Module] = []


def prepare() -> dict[str, str]:
    """Make every contender, and check that it gives the one-rank answer. Returns who is left out, and why."""
    _kept[:] = [make_subjects()]
    round_of(WARM)
    gc.collect()
    gc.freeze()  # a collection during a timed batch need not look at torch's own modules
    return _kept[0].notes


def round_of(calls: int) -> Times:
    """Seconds of each call of every contender: (subject, "forward" or "both", contender)."""
    times = {}
    with _unaveraged():
        for subject in _kept[0].subjects:
            for kind, contenders in (("forward", subject.forward), ("both", subject.backward)):
                for who, call in contenders.items():
                    times[subject.name, kind, who] = _time(call, calls)
    return times


@contextmanager
def _unaveraged() -> Iterator[None]:
    """Gradients of parameters are not averaged: that is no part of an operation's cost."""
    with ExitStack() as stack:
        for model in _models:
            stack.enter_context(no_sync(model))
        yield


def _time(call: Call, calls: int) -> list[float]:
    """Each call by itself: where ranks spin on few cores some calls lose a scheduler's tick, which spoils a mean."""
    for _ in range(WARM):
        call()
    dist.barrier()
    times, clock = [0.0] * calls, time.perf_counter
    for index in range(calls):
        started = clock()
        call()
        times[index] = clock() - started
    return times
