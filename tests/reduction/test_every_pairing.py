"""Gradients are those of one rank by every way in which sums travel, in every mode and every world."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from pairings import (
    ALGORITHMS,
    EVERY,
    GROUPS,
    LOOKED_AT,
    MODES,
    OTHERS,
    STEPS,
    TOLERANCE,
    Algorithm,
    Gradients,
    History,
    Mode,
    WritingSGD,
    bounds,
    distributed,
    gradients,
    in_a_row,
    let_go,
    micros,
    mpi_pool,
    net,
    on_ranks,
    one_rank,
    put,
    relative,
    some,
    train,
)
from ranges import OFTEN
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.world import Label, LocalWorld, Mesh

# ---- on the ranks ----


class Report(NamedTuple):
    """Of a rank and a pairing. The first alone sends all it has seen."""

    bits: str
    history: History | None
    groups: int


def report(mesh: Mesh, algorithm: Algorithm, mode: Mode) -> Report:
    model = net()
    optimizer = WritingSGD(model)
    distributed(model, optimizer, mesh, algorithm, mode, GROUPS)
    looked_at = train(model, optimizer, mode.late, mesh.rank)
    hc.flush(model)
    history = optimizer.history
    check_what_users_see(model, history, looked_at)
    engine = engine_of(model)
    assert engine is not None and engine.plan is not None
    found = Report(bits_of(history), history if mesh.rank == 0 else None, len(engine.plan.buckets))
    let_go(model, mesh)
    return found


def check_what_users_see(model: nn.Module, history: History, looked_at: dict[str, Tensor | None]) -> None:
    """The gradients and parameters that anybody may read are those that the optimizer had and made."""
    last = {name: written.after for (_, name), written in sorted(history.items())}
    assert all(torch.equal(p, last[name]) for name, p in model.named_parameters())
    given = {name: written.gradient for (step, name), written in history.items() if step == LOOKED_AT}
    assert {name for name, gradient in looked_at.items() if gradient is not None} == set(given)
    assert all(torch.equal(gradient, given[name]) for name, gradient in looked_at.items() if gradient is not None)


def bits_of(history: History) -> str:
    digest = hashlib.sha256()
    for key, written in sorted(history.items()):
        digest.update(repr(key).encode())
        for tensor in written:
            digest.update(torch.view_as_real(tensor.to(torch.complex128)).numpy().tobytes())
    return digest.hexdigest()


def reports(mesh: Mesh, algorithm: Algorithm, modes: Sequence[str]) -> list[Report]:
    return [report(mesh, algorithm, MODES[mode]) for mode in modes]


# ---- next to one rank ----


def check_exact(found: History, late: bool) -> None:
    true = one_rank(late)
    assert set(found) == set(true)  # a parameter that nobody used is not stepped
    for key, written in true.items():
        assert relative(found[key].gradient, written.gradient) <= TOLERANCE, key
        assert relative(found[key].after, written.after) <= TOLERANCE, key


def check_rounded(found: History, mode: Mode) -> None:
    """Along the way that the ranks went: each gradient next to one rank's at the same weights, and a step by it."""
    assert mode.wire is not None
    model = net()
    optimizer, rounded = WritingSGD(model), 0
    largest = max(float(written.gradient.abs().max()) for written in found.values())
    due: list[tuple[Gradients, Tensor]] = [({}, torch.zeros(1))] if mode.late else []
    for step in range(STEPS):
        optimizer.now(step)
        parts = micros(step, mode.late)
        off = bounds(model, parts, mode.wire, largest)
        due.append((gradients(model, parts), off))
        true, off = due.pop(0)
        given = {name: written.gradient for (number, name), written in found.items() if number == step}
        assert set(given) == set(true)
        error = (in_a_row(model, given) - in_a_row(model, true)).abs()
        assert (error <= off + TOLERANCE).all(), f"step {step}"
        rounded += bool((error > TOLERANCE).any())
        put(model, given)
        optimizer.step()
    assert rounded > 1  # it did travel in fewer bits
    for key, written in optimizer.history.items():
        assert relative(found[key].after, written.after) <= TOLERANCE, key


def check(found: Sequence[Sequence[Report]], modes: Sequence[str]) -> None:
    """By rank and mode."""
    for number, name in enumerate(modes):
        first, *others = [reports[number] for reports in found]
        assert first.history is not None and first.groups > 2, name
        assert all(other.bits == first.bits for other in others), f"{name}: ranks differ"
        if MODES[name].wire is None:
            check_exact(first.history, MODES[name].late)
        else:
            check_rounded(first.history, MODES[name])


# ---- the pairings ----


class Pairings(NamedTuple):
    transport: str
    algorithm: str
    modes: list[str]


def some_modes(place: int) -> list[str]:
    """One or two for each algorithm, so that among all of them there is every mode."""
    return list(MODES)[place :: len(ALGORITHMS)]


#: float32 on the wire is what the others are, in more bits.
MOST = [name for name, mode in MODES.items() if mode.wire != "fp32"]
USUAL = ("unsaid", "levels", "doubling", "leaders:2")
SHORT = [
    *(Pairings("sockets", algorithm, MOST) for algorithm in USUAL),
    *(Pairings("threads", algorithm, some_modes(place)) for place, algorithm in enumerate(ALGORITHMS) if place % 2),
    *(Pairings("gloo", algorithm, some_modes(place)) for place, algorithm in enumerate(USUAL)),
]
LONG = [
    *(Pairings("sockets", algorithm, MOST) for algorithm in ALGORITHMS if algorithm not in USUAL),
    *some(
        [
            *(Pairings("sockets", algorithm, [name for name in MODES if name not in MOST]) for algorithm in ALGORITHMS),
            *(Pairings("sockets", algorithm, list(MODES)) for algorithm in OTHERS),
            *(Pairings("mpi", algorithm, list(MODES)) for algorithm in (EVERY if OFTEN >= 4 else ["unsaid"])),
            *(Pairings("gloo", algorithm, list(MODES)) for algorithm in ALGORITHMS),
            *(Pairings("threads", algorithm, list(MODES)) for algorithm in EVERY),
        ]
    ),
]


def name_of(case: Pairings) -> str:
    return f"{case.transport}, {case.algorithm}"


@pytest.fixture(scope="module", autouse=True)
def ended_with_the_module() -> Iterator[None]:
    yield
    mpi_pool.cache_clear()  # its processes go with it


def check_on_ranks(pairings: Pairings) -> None:
    transport, algorithm, modes = pairings
    check(on_ranks(transport, algorithm, 20.0, reports, modes), modes)


@pytest.mark.parametrize("pairings", SHORT, ids=name_of)
def test_ranks_train_as_one(pairings: Pairings) -> None:
    check_on_ranks(pairings)


@pytest.mark.long
@pytest.mark.parametrize("pairings", LONG, ids=name_of)
def test_ranks_train_as_one_in_all_other_pairings(pairings: Pairings) -> None:
    check_on_ranks(pairings)


@pytest.mark.parametrize(("mode", "factor"), [("lag, as they are", 1 + 1e-9), ("backward, bf16", 1 + 2**-4)])
def test_a_sum_that_is_slightly_wrong_is_noticed(mode: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checks themselves: by little more than they allow for."""
    right = LocalWorld.complete_sum

    def wrong(world: LocalWorld, posted: Any, label: Label) -> None:
        right(world, posted, label)
        posted[0].mul_(factor)

    monkeypatch.setattr(LocalWorld, "complete_sum", wrong)
    with pytest.raises(AssertionError, match=r"step|phases|weight|bias"):
        check_on_ranks(Pairings("threads", "flat", [mode]))


def test_what_is_refused() -> None:
    """A sum that leaves the range of float16 goes again, by all ranks together: not while each is somewhere else."""
    model = net()
    with pytest.raises(hc.MeshError, match="bf16"):
        distributed(model, WritingSGD(model), Mesh(data=1), ALGORITHMS["levels"], Mode("next forward", "fp16"))
