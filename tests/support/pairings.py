"""Every way to average gradients with every mode of it, in every world: shared by the tests that go through them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from averaging import drawn
from ranges import OFTEN
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.buckets.cutting import LinkCost
from halocline.reduction.transport.compression import WIRES
from halocline.testing import RankPool, shared_pool
from halocline.testing.mpi_place import MpiPlace, mpiexec
from halocline.world import Mesh, forget, joined_world, run_local, this_world

RANKS = 4
WIDE = 97  # of its weight, 75 KB, a quarter still goes through shared memory
STEPS = 8
LOOKED_AT = 4  # the step whose gradients are read before the optimizer has them
TOLERANCE = 1e-12  # relative, of what is exact
Names = list[list[str]]
Gradients = dict[str, Tensor]
T = TypeVar("T")


class Algorithm(NamedTuple):
    """``rings`` (None: nothing is said of it), and the ranks of a node where this machine is to pass for several."""

    rings: str | tuple[int, ...] | None
    on_node: str = ""


ALGORITHMS = {
    "unsaid": Algorithm(None),
    "flat": Algorithm("flat"),
    "levels": Algorithm("levels"),
    "(2, 2)": Algorithm((2, 2)),
    "(4,)": Algorithm((4,)),
    "doubling": Algorithm("doubling"),
    "leaders:1": Algorithm("leaders:1", "2"),
    "leaders:2": Algorithm("leaders:2", "2"),
    "auto": Algorithm("auto", "2"),
}
#: The same again where this machine is what it is: one node, or where levels are two.
OTHERS = {
    "levels of 2 nodes": Algorithm("levels", "2"),
    "leaders:1 of a node": Algorithm("leaders:1"),
    "leaders:2 of a node": Algorithm("leaders:2"),
    "auto on a node": Algorithm("auto"),
}
EVERY = {**ALGORITHMS, **OTHERS}


class Mode(NamedTuple):
    """When sums are waited for, and in which precision they travel."""

    when: str
    wire: str | None

    @property
    def late(self) -> bool:
        return self.when == "lag"


MODES = {
    f"{when}, {wire or 'as they are'}": Mode(when, wire)
    for when in ("backward", "next forward", "lag")
    for wire in (None, "fp32", "bf16", "fp16")
    if (when, wire) != ("next forward", "fp16")  # which is refused
}


def some(cases: Sequence[T]) -> Sequence[T]:
    """Of those that take minutes: all where many set-ups are asked for, else every fifth."""
    return cases if OFTEN >= 4 else cases[::5]


# ---- the network and its steps ----


class Net(nn.Module):
    """Odd sizes, a weight used twice, complex numbers, and a parameter that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(5, WIDE), nn.Linear(WIDE, WIDE)
        self.again, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        self.again.weight = self.wide.weight
        self.seldom = nn.Parameter(torch.randn(WIDE))
        self.double()
        self.phases = nn.Parameter(torch.randn(WIDE, dtype=torch.complex128))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = torch.tanh(self.wide(torch.tanh(self.first(x))))
        if rows.any():
            x = x + rows[:, None] * self.seldom
        turned = x * self.phases
        return self.last(torch.tanh(self.again(turned.real * torch.cos(turned.imag))))


net = drawn(Net)
#: The last one is in none, and is put into one of its own.
GROUPS: Names = [["last.weight", "last.bias"], ["again.bias", "phases", "wide.bias"], ["wide.weight", "seldom"]]


class Micro(NamedTuple):
    """One backward of a step: its samples, which of them use the seldom parameter, and whether it is averaged."""

    x: Tensor
    rows: Tensor
    averaged: bool = True


def micros(step: int, late: bool) -> list[Micro]:
    """In step 1 all ranks use the seldom parameter, in step 5 one alone; in 2 and 3 two backwards pile up."""
    users = {1: range(8), 5: range(2, 4)}.get(step, range(0))
    rows = torch.tensor([row in users for row in range(8)])
    count = 2 if step in (2, 3) else 1
    batches = [torch.randn(8, 5, generator=_generator(10 * step + n), dtype=torch.float64) for n in range(count)]
    # With lag what has been averaged is not to be added to; without, both ways are right.
    paused = count == 2 and (step == 2 or late)
    return [Micro(x, rows, not paused or x is batches[-1]) for x in batches]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(model: nn.Module, micro: Micro, rank: int | None = None) -> Tensor:
    """Of the rank's share, or of all."""
    x, rows = (micro.x, micro.rows) if rank is None else (t.chunk(RANKS)[rank] for t in (micro.x, micro.rows))
    return model(x, rows).square().mean()


class Written(NamedTuple):
    """What a step did to a parameter: the gradient it went by, and what came of it."""

    gradient: Tensor
    after: Tensor


History = dict[tuple[int, str], Written]


class WritingSGD(torch.optim.SGD):
    """Writes down what each step is given, when it is made: nothing is waited for on account of the test."""

    one_by_one = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.1, momentum=0.9)
        self.history: History = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def now(self, number: int) -> None:
        """Hyper-parameters are those of the moment at which the step is asked for; the number is one of them."""
        for group in self.param_groups:
            group.update(number=number, lr=0.1 / (1 + number))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    key = group["number"], self._names[id(p)]
                    assert key not in self.history, f"stepped twice: {key}"
                    self.history[key] = Written(p.grad.detach().clone(), p.detach().clone())
        return done


def train(
    model: nn.Module, optimizer: WritingSGD, late: bool, rank: int, left_out: Callable[[int], bool] = lambda _: False
) -> dict[str, Tensor | None]:
    """All steps on a rank, but those that are left out; the gradients that were looked at."""
    seen: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        if left_out(step):
            continue
        optimizer.now(step)
        optimizer.zero_grad()
        for micro in micros(step, late):
            with paused(model, micro):
                loss_of(model, micro, rank).backward()
        if step == LOOKED_AT:
            hc.flush(model)
            seen = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return seen


def paused(model: nn.Module, micro: Micro) -> AbstractContextManager[None]:
    return nullcontext() if micro.averaged else hc.no_sync(model)


# ---- one rank ----


@cache
def one_rank(late: bool) -> History:
    """The whole batch on one rank. With lag as it is defined: a step goes by the gradients of the one before."""
    model = net()
    optimizer, before = WritingSGD(model), dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.now(step)
        now = gradients(model, micros(step, late))
        put(model, before if late else now)
        optimizer.step()
        before = now
    return optimizer.history


def gradients(model: nn.Module, parts: Sequence[Micro], rank: int | None = None) -> Gradients:
    model.zero_grad()
    for micro in parts:
        loss_of(model, micro, rank).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def put(model: nn.Module, found: Gradients) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = found.get(name)


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).abs().max()) / max(1e-300, float(true.abs().max()))


# ---- what rounding on the way may do ----


def growth(wire: str) -> float:
    """How far a sum of as many as there are ranks may be off, in parts of the sum of the sizes of what is summed.

    Each number is rounded when it sets out and whenever another is added to it; 16-bit floats by way of float32.
    """
    dtype = WIRES[wire]
    once = 1 + torch.finfo(dtype).eps / 2
    on_the_way = 1 if dtype == torch.float32 else 1 + torch.finfo(torch.float32).eps / 2
    return (once * on_the_way) ** RANKS - 1


def vanishing(wire: str, largest: float) -> float:
    """What the numbers of a sum lose at most where they are too small for the format to have all its digits.

    float16 is scaled so that the largest of the last mean comes to 2^5 or more; the others have the range they need.
    """
    if wire != "fp16":
        return float(torch.finfo(torch.float32).smallest_normal)
    spacing = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    return RANKS * spacing / 2 * largest / 2**5


def bounds(model: nn.Module, parts: Sequence[Micro], wire: str, largest: float) -> Tensor:
    """Of each element of the gradients, after all backwards of a step."""
    held, off = torch.zeros(RANKS, 1), torch.zeros(1)
    for micro in parts:
        held = held + torch.stack([in_a_row(model, gradients(model, [micro], rank)) for rank in range(RANKS)])
        if micro.averaged:
            off = off + growth(wire) * (held.abs().mean(0) + off) + vanishing(wire, largest)
            held = held.mean(0, keepdim=True)
    return off


def in_a_row(model: nn.Module, found: Gradients) -> Tensor:
    """Real numbers; zeros where there is no gradient."""
    all_of_it = [found.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
    return torch.cat([torch.view_as_real(g + 0j).flatten() for g in all_of_it])


# ---- distributed ----


def distributed(
    model: nn.Module, optimizer: Any, mesh: Mesh, algorithm: Algorithm, mode: Mode, groups: Names | None = None
) -> nn.Module:
    """As the pairing wants it, with what a message costs known: to measure it takes longer than the steps do."""
    own: dict[str, Any] = {
        "backward": {},
        "next forward": {"overlap": "next-forward", "optimizer": optimizer},
        "lag": {"lag": 1},
    }[mode.when]
    if algorithm.rings is not None:
        own["rings"] = algorithm.rings
    hc.distribute(model, mesh, wire=mode.wire, buckets=groups, **own)
    engine = engine_of(model)
    assert engine is not None
    engine.clock.link = LinkCost(1e-5, 1e-9)
    return model


def let_go(model: nn.Module, mesh: Mesh) -> None:
    """The next model has the channels, and the connections, that this one had. By all ranks together."""
    engine = engine_of(model)
    assert engine is not None
    if engine.rings is not None:
        engine.rings.close()
    mesh.world.engines -= 1


@contextmanager
def variables(**wanted: str) -> Iterator[None]:
    """Of the environment; an empty one is not set."""
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


def on_ranks(transport: str, algorithm: str, deadline: float, body: Callable[..., T], *arguments: Any) -> list[T]:
    """``body(mesh, algorithm, *arguments)`` on threads, or on the processes of the pool that all tests share."""
    if transport == "threads":
        chosen = EVERY[algorithm]
        with variables(HALOCLINE_LEVELS=chosen.on_node):
            return run_local(RANKS, lambda: body(Mesh(data=-1), chosen, *arguments), deadline)
    pool = mpi_pool() if transport == "mpi" else shared_pool(RANKS)
    return pool.run(in_fresh_world, transport, algorithm, deadline, body, *arguments, deadline=120.0)


def started_by_mpi() -> RankPool:
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    if mpiexec() is None:
        pytest.skip("needs mpiexec, such as that of the mpich wheel")
    return RankPool(RANKS, place=MpiPlace())


mpi_pool = cache(started_by_mpi)  # it takes seconds to start


def in_fresh_world(transport: str, algorithm: str, deadline: float, body: Callable[..., T], *arguments: Any) -> T:
    """On a process that is a rank, with connections of its own; without the library's own sockets over "gloo"."""
    close_world()
    wanted = {"HALOCLINE_WIRE": "0" if transport == "gloo" else "", "HALOCLINE_LEVELS": EVERY[algorithm].on_node}
    try:
        with variables(**wanted):
            hc.init(deadline=deadline)
            return body(Mesh(data=-1), EVERY[algorithm], *arguments)
    except BaseException:
        this_world().leave()
        raise
    finally:
        close_world()


def close_world() -> None:
    """The next mesh joins the ranks anew. By all ranks together."""
    if (world := joined_world()) is not None:
        world.close()
    forget()
