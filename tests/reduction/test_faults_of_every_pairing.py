"""A rank that raises, dies, stalls, differs or has no numbers: all others hear of it, and nobody goes by wrong ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from pairings import (
    ALGORITHMS,
    EVERY,
    GROUPS,
    MODES,
    RANKS,
    STEPS,
    TOLERANCE,
    Algorithm,
    History,
    Mode,
    WritingSGD,
    bounds,
    distributed,
    gradients,
    in_a_row,
    in_fresh_world,
    let_go,
    loss_of,
    micros,
    net,
    one_rank,
    paused,
    relative,
    some,
    started_by_mpi,
    train,
    variables,
)
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import halocline as hc
from halocline._torch_private import default_store
from halocline.testing import RankPool
from halocline.world import Mesh, joined, run_local

CULPRIT = 1
WHEN = 4  # the step: groups are planned by then, and have been used
DEADLINE = 2.0
EXACT = [name for name, mode in MODES.items() if mode.wire is None]


class Lost(Exception):
    """A rank's own error."""


# ---- what the culprit does ----

held: list[object] = []  # torch lets go of a leaf's node where nobody holds it
Trouble = Callable[[nn.Module], bool]  # in the step in which it happens; is the step left out?


def in_backward(do: Callable[[], object]) -> Trouble:
    """Once, when the first groups have gone and others have not."""

    def prepare(model: Any) -> bool:
        left = iter([do])
        node = get_gradient_edge(model.wide.weight).node  # hooks on a parameter run when backward has ended
        held.append(node)
        node.register_prehook(lambda _: next(left, lambda: None)())
        return False

    return prepare


def in_forward(do: Callable[[], object]) -> Trouble:
    """When sums of the step before may be under way, and some of its parameters have been stepped."""

    def prepare(model: Any) -> bool:
        model.again.register_forward_pre_hook(lambda *_: do())
        return False

    return prepare


def lose() -> None:
    raise Lost


def die() -> None:
    os._exit(7)


def stall() -> None:
    time.sleep(2.5 * DEADLINE)


def widen(model: Any) -> bool:
    """It computes with four outputs from here on, the others with three."""
    model.last.weight.data, model.last.bias.data = torch.ones(4, 97).double(), torch.ones(4).double()
    return False


TROUBLES: dict[str, Trouble] = {
    "raises in backward": in_backward(lose),
    "raises in forward": in_forward(lose),
    "dies in backward": in_backward(die),
    "dies in forward": in_forward(die),
    "stalls in backward": in_backward(stall),
    "has other sizes": widen,
    "leaves a step out": lambda _: True,
}


# ---- on the ranks ----


class Met(NamedTuple):
    """What a rank said of it, after how many seconds, and the steps that it has made."""

    said: str
    seconds: float
    history: History


def meet(mesh: Mesh, algorithm: Algorithm, mode: str, trouble: str) -> Met:
    """Train; in one step one rank is in trouble. Whoever got through has looked at all there is."""
    model, chosen, began = net(), MODES[mode], [time.monotonic()]
    optimizer = WritingSGD(model)
    distributed(model, optimizer, mesh, algorithm, chosen, GROUPS)

    def in_trouble(step: int) -> bool:
        began.append(time.monotonic()) if step == WHEN else None
        return step == WHEN and mesh.rank == CULPRIT and TROUBLES[trouble](model)

    said = "nothing"
    try:
        train(model, optimizer, chosen.late, mesh.rank, in_trouble)
        hc.lagged_gradients(model) if chosen.late else hc.flush(model)
    except (hc.RankFailure, Lost) as error:
        said = f"{type(error).__name__}: {error}"
    return Met(said, time.monotonic() - began[-1], optimizer.history)


def meet_in_processes(mesh: Mesh, algorithm: Algorithm, mode: str, trouble: str) -> Met:
    """The words of earlier troubles, in the store that these processes share, are not to be heard again."""
    store = default_store()
    assert store is not None
    store.delete_key(f"halocline/failed/{mesh.rank}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "_GRACE", 0.3)
        return meet(mesh, algorithm, mode, trouble)


def meet_in_threads(algorithm: str, mode: str, trouble: str) -> list[Met]:
    """An error of its own ends a rank's thread, as it would a program."""
    found: dict[int, Met] = {}

    def body() -> None:
        mesh = Mesh(data=-1)
        found[mesh.rank] = meet(mesh, EVERY[algorithm], mode, trouble)
        if "Lost" in found[mesh.rank].said:
            raise Lost

    with variables(HALOCLINE_LEVELS=EVERY[algorithm].on_node), suppress(Lost):
        run_local(RANKS, body, DEADLINE)
    return [found[rank] for rank in range(RANKS)]


# ---- what is to come of it ----


def check_met(mets: Mapping[int, Met], case: Case) -> None:
    """By rank, of those that are left."""
    trouble = case.trouble
    for rank, met in mets.items():
        if rank == CULPRIT:
            assert trouble == "leaves a step out" or met.said.startswith(("Lost", "RankFailure")), met.said
            assert met.said.startswith("Lost") == trouble.startswith("raises"), met.said
            continue
        assert met.said.startswith("RankFailure"), (rank, met.said)
        assert met.seconds < DEADLINE + 6, (rank, met)
        # Threads have no store in which to say where they stopped: each knows the one that it waits for.
        if trouble.startswith(("raises", "dies")) or (trouble.startswith("stalls") and case.transport != "threads"):
            assert f"rank {CULPRIT}" in met.said, (rank, met.said)
    assert set(mets) >= set(range(RANKS)) - {CULPRIT}
    if trouble != "leaves a step out":  # what nobody can notice: it is paired with the others' next
        check_numbers([met.history for met in mets.values()], MODES[case.mode])


def check_numbers(histories: Sequence[History], mode: Mode) -> None:
    """Steps that were made were right: the same on all ranks that made them, and as on one rank."""
    true = one_rank(mode.late)
    for history in histories:
        assert set(history) <= set(true)
        assert {step for step, _ in history} >= set(range(mode.late, WHEN - 1)), sorted(history)
        for key, written in history.items():
            assert all(torch.equal(written.after, other[key].after) for other in histories if key in other), key
            assert mode.wire is not None or relative(written.gradient, true[key].gradient) <= TOLERANCE, key


# ---- the ranks ----


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """Of this module: nobody else is to have processes in which something has failed."""
    made: dict[str, RankPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def pool_for(transport: str, pools: dict[str, RankPool]) -> RankPool:
    kind = transport if transport in ("mpi", "threads") else "torch"
    if kind not in pools:
        pools[kind] = started_by_mpi() if kind == "mpi" else RankPool(1 if kind == "threads" else RANKS)
    pools[kind].renew()
    return pools[kind]


# ---- another model from the beginning ----


def refusals(mesh: Mesh, algorithm: Algorithm) -> list[str]:
    """In all modes; and a model that is right can be distributed after it."""
    said = []
    for mode in MODES.values():
        model = net()
        if mesh.rank == CULPRIT:
            model.last = nn.Linear(97, 4).double()
        try:
            distributed(model, WritingSGD(model), mesh, algorithm, mode)
        except hc.MeshError as error:
            said.append(str(error))
    distributed(net(), None, mesh, algorithm, MODES["backward, as they are"])
    return said


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_model_is_refused_by_all(algorithm: str, pools: dict[str, RankPool]) -> None:
    for said in pool_for("sockets", pools).run(in_fresh_world, "sockets", algorithm, 20.0, refusals):
        assert len(said) == len(MODES)
        assert all("the ranks bring different Nets" in text for text in said)


# ---- what is no number, on one rank alone ----

POISON = {3: float("nan"), 4: float("inf")}  # by step
PLACE = (3, 5)  # of the wide weight


def poisoned(mesh: Mesh, algorithm: Algorithm, modes: Sequence[str]) -> list[list[Tensor]]:
    """The gradients of all steps in a row, in each mode. No step is made by them."""
    return [_poisoned(mesh, algorithm, MODES[mode]) for mode in modes]


def _poisoned(mesh: Mesh, algorithm: Algorithm, mode: Mode) -> list[Tensor]:
    model, step, found = net(), 0, []

    def poison(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if mesh.rank != CULPRIT or step not in POISON:
            return None
        changed = gradients[0].clone()
        changed[PLACE] = POISON[step]
        return (changed,)

    distributed(model, WritingSGD(model), mesh, algorithm, mode, GROUPS)
    node = get_gradient_edge(model.wide.weight).node  # a hook on the parameter would see the mean
    node.register_prehook(poison)
    for step in range(STEPS):
        model.zero_grad()
        for micro in micros(step, mode.late):
            with paused(model, micro):
                loss_of(model, micro, mesh.rank).backward()
        hc.flush(model)
        found.append(in_a_row(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    let_go(model, mesh)
    return found


def check_poisoned(found: Sequence[Tensor], mode: Mode) -> None:
    """Where one rank had no number, and there alone, none has; from the next step on all are right again."""
    model = net()
    largest = max(float(row[row.isfinite()].abs().max()) for row in found)
    for step, row in enumerate(found):
        if step < mode.late:
            assert not row.any()
            continue
        parts = micros(step - mode.late, mode.late)
        off = bounds(model, parts, mode.wire, largest) if mode.wire is not None else torch.zeros(1)
        true = gradients(model, parts)
        true["wide.weight"][PLACE] += POISON.get(step - mode.late, 0.0)
        wanted = in_a_row(model, true)
        assert torch.equal(row[~wanted.isfinite()].nan_to_num(7.0), wanted[~wanted.isfinite()].nan_to_num(7.0))
        assert ((row - wanted).abs() <= off + TOLERANCE)[wanted.isfinite()].all(), f"step {step}"


def check_no_numbers(transport: str, algorithm: str, modes: Sequence[str], pools: dict[str, RankPool]) -> None:
    pool = pool_for(transport, pools)
    found = pool.run(in_fresh_world, transport, algorithm, 20.0, poisoned, modes)
    for number, mode in enumerate(modes):
        first, *others = [rows[number] for rows in found]
        check_poisoned(first, MODES[mode])
        same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        assert all(all(map(same, first, other)) for other in others), mode


@pytest.mark.long
@pytest.mark.parametrize("algorithm", list(ALGORITHMS)[::3])
def test_all_ranks_see_what_is_no_number(algorithm: str, pools: dict[str, RankPool]) -> None:
    place = list(ALGORITHMS).index(algorithm)
    check_no_numbers("sockets", algorithm, list(MODES)[place % 5 :: 5], pools)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", some(list(ALGORITHMS)))
@pytest.mark.parametrize("transport", ["sockets", "gloo", "mpi"])
def test_all_ranks_see_what_is_no_number_in_all_modes(
    transport: str, algorithm: str, pools: dict[str, RankPool]
) -> None:
    check_no_numbers(transport, algorithm, list(MODES), pools)


# ---- ranks in trouble ----


class Case(NamedTuple):
    transport: str
    algorithm: str
    mode: str
    trouble: str


def check_case(case: Case, pools: dict[str, RankPool]) -> None:
    if case.transport == "threads":
        (found,) = pool_for(case.transport, pools).run(meet_in_threads, *case[1:], deadline=30.0)
        mets = dict(enumerate(found))
    else:
        pool = pool_for(case.transport, pools)
        arguments = (*case[:2], DEADLINE, meet_in_processes, *case[2:])
        outcomes = pool.outcomes(in_fresh_world, *arguments, deadline=30.0)
        mets = {outcome.rank: outcome.value for outcome in outcomes if outcome.kind == "value"}
        assert all(outcome.kind in ("value", "died") for outcome in outcomes), outcomes
    assert (CULPRIT in mets) is not case.trouble.startswith("dies")
    check_met(mets, case)


def rotated(transport: str, algorithms: Iterable[str], modes: Sequence[str], troubles: Sequence[str]) -> list[Case]:
    """Every algorithm in every mode, each with the next trouble of those given."""
    following = cycle(troubles)
    return [Case(transport, algorithm, mode, next(following)) for algorithm in algorithms for mode in modes]


WIRED = [name for name, mode in MODES.items() if mode.wire is not None]
MARKS = {"mpi": [pytest.mark.trial]}  # its ranks ask for messages in a loop: on a busy machine they miss deadlines
ALIVE = [trouble for trouble in TROUBLES if not trouble.startswith("dies")]
DEADLY = [trouble for trouble in TROUBLES if trouble.startswith("dies")]
SHORT = [
    *rotated("threads", ALGORITHMS, EXACT, ["raises in backward", "raises in forward"])[::3],
    Case("sockets", "flat", "backward, as they are", "raises in backward"),
    Case("sockets", "levels", "next forward, as they are", "raises in backward"),
    Case("sockets", "doubling", "lag, as they are", "has other sizes"),
    Case("sockets", "(2, 2)", "next forward, bf16", "dies in forward"),
]
LONG = [
    *rotated("sockets", ALGORITHMS, EXACT, ALIVE),
    *rotated("sockets", ALGORITHMS, EXACT, DEADLY),
    *rotated("sockets", ["flat", "levels", "leaders:1"], WIRED, [*DEADLY, "raises in backward"]),
    *rotated("gloo", ALGORITHMS, EXACT, [*DEADLY, "raises in backward", "has other sizes"]),
    *rotated("mpi", ALGORITHMS, ["next forward, as they are", "lag, bf16"], ALIVE),
    *rotated("mpi", ["flat", "(2, 2)", "doubling"], ["backward, as they are"], DEADLY),
    *rotated("threads", ["flat", "(4,)", "leaders:2"], EXACT, [each for each in ALIVE if "raises" not in each]),
]


@pytest.mark.parametrize("case", SHORT, ids="; ".join)
def test_all_others_hear_of_it(case: Case, pools: dict[str, RankPool]) -> None:
    check_case(case, pools)


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS.get(c.transport, ())) for c in some(LONG)], ids="; ".join)
def test_all_others_hear_of_it_in_other_pairings(case: Case, pools: dict[str, RankPool]) -> None:
    check_case(case, pools)


def test_steps_by_wrong_numbers_are_noticed() -> None:
    """Of the check itself: one rank's gradient less, or another's weights."""
    right = one_rank(False)
    for wrong in ("gradient", "after"):
        changed = {**right, (2, "last.bias"): right[2, "last.bias"]._replace(**{wrong: torch.ones(3).double()})}
        with pytest.raises(AssertionError, match=r"last\.bias"):
            check_numbers([right, changed], MODES["backward, as they are"])
