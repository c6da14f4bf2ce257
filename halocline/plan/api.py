"""``hc.plan``: a plan for a network, from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..layout import AUTO_LAYOUTS
from ..parts.record import meta_copy
from ..tree import tensors_in
from .cost import Prices
from .explain import as_plan
from .machine import Machine, MachineError, load_machine
from .pipelines import pipelines
from .plan_file import Plan, read_plan
from .recording import LETTERS, Subject, TargetShape
from .search import RefusedCut, chosen, price, search

Shape = Sequence[int]


def plan(
    model: nn.Module | Callable[[], nn.Module],
    *shapes: Shape,
    machine: str | Machine,
    devices: int,
    batch: int | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Sequence[TargetShape] = (),
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = torch.optim.Adam,
    dtype: torch.dtype | None = None,
    speeds: Sequence[float] = (),
    input_bytes: int | None = None,
    layout: str | None = None,
    stages: str | None = None,
) -> Plan:
    """Which cut of this network over ``devices`` devices of ``machine``, and what a step will take.

        plan = hc.plan(Net, (1, 1, 256, 256, 256), machine="perlmutter", devices=64)

    ``model`` is a module or a function that makes one; ``shapes`` are those of one sample of each input, with a batch
    of one. ``machine`` is the name of a shipped machine, or a file. ``batch`` counts the samples of a step over all
    ranks; by default one on each rank of the data axis. ``loss(outputs, *targets)`` is by default the mean square of
    all outputs. ``speeds`` are the relative speeds of unequal devices, by rank. ``input_bytes`` are those of one sample
    on disk, by default those of its tensors. ``layout="auto"`` also searches meshes with an axis ``model``, and which
    weights it cuts, layer by layer; with ``"auto-memory"`` the plan is the one that takes least memory.
    ``stages="auto"`` adds ``plan.pipelines``: meshes of stages and data, with where the network is cut. Nothing is
    computed.
    """
    if batch is not None and batch < 1:
        raise PlanError(f"a step has one sample or more, not batch={batch}")
    subject = make_subject(model, shapes, loss, targets, optimizer, dtype)
    described = load_machine(machine) if isinstance(machine, str) else machine
    check_devices(described, devices)
    check_layout(layout)
    check_stages(stages, batch)
    prices = Prices(described.device)
    refused: list[RefusedCut] = []
    told = {"speeds": speeds, "input_bytes": input_bytes, "refused": refused, "layout": layout}
    candidates = search(subject, described, devices, batch, prices, **told)  # type: ignore[arg-type]
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "network")
    staged = pipelines(subject, described, devices, batch, prices) if stages else []
    best = chosen(candidates, described, layout == "auto-memory", staged)
    return as_plan(name, subject, described, best, candidates, refused, speeds, input_bytes, staged)


def load_plan(path: Path | str, machine: str | Machine | None = None, model: Any = None, **training: Any) -> Plan:
    """The plan of a file; priced anew if it was made for another machine than ``machine``.

    For that it needs ``model``, and the other arguments of ``hc.plan`` that say how it is trained.
    """
    read = read_plan(path)
    described = load_machine(machine) if isinstance(machine, str) else machine
    if described is None or read.is_for(described):
        return read
    if model is None:
        raise PlanError(
            f"plan {path}: it was priced on {read.machine}, and to price it on {described.name} the network is needed: "
            "give model="
        )
    check_devices(described, read.arrangement.ranks)
    training = {"dtype": getattr(torch, read.dtype), **training}
    return repriced(read, make_subject(model, read.shapes, **training), described)


def repriced(plan: Plan, subject: Subject, machine: Machine) -> Plan:
    """The same plan with what a step takes on another machine. Alternatives are dropped: they were for the first."""
    plan.arrangement.check(subject.meta_model())
    if plan.shapes != subject.shapes:
        raise PlanError(
            f"the plan {plan} is for samples of {[list(shape) for shape in plan.shapes]}, and these are "
            f"{[list(shape) for shape in subject.shapes]}; plan with this shape"
        )
    told = plan.speeds, plan.input_bytes
    candidate = price(subject, machine, plan.arrangement, plan.batch, Prices(machine.device), None, *told)
    return as_plan(plan.network, subject, machine, candidate, [], (), *told)


def make_subject(
    model: nn.Module | Callable[[], nn.Module],
    shapes: Sequence[Shape],
    loss: Callable[..., Tensor] | None = None,
    targets: Sequence[TargetShape] = (),
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = torch.optim.Adam,
    dtype: torch.dtype | None = None,
) -> Subject:
    """What is to be planned, from the arguments of ``hc.plan``."""
    if not shapes or any(len(shape) not in LETTERS or shape[0] != 1 for shape in shapes[:1]):
        raise PlanError(
            f"hc.plan takes the shape of one sample with a batch of one and channels, such as (1, 1, 64, 64, 64); it "
            f"was given {list(shapes)}"
        )
    make = (lambda: meta_copy(model)) if isinstance(model, nn.Module) else model
    first = next((p.dtype for p in model.parameters()), None) if isinstance(model, nn.Module) else None
    return Subject(
        make,
        loss or mean_square,
        tuple(tuple(shape) for shape in shapes),
        dtype or first or torch.float32,
        optimizer,
        tuple(targets),
    )


def check_layout(layout: str | None) -> None:
    """Raise unless it is one that the search knows."""
    if layout is not None and layout not in AUTO_LAYOUTS:
        raise PlanError(f"layout {layout!r}: a plan chooses it by itself; it is {' or '.join(AUTO_LAYOUTS)}, or None")


def check_stages(stages: str | None, batch: int | None) -> None:
    """Raise unless pipelines can be searched as asked."""
    if stages is not None and stages != "auto":
        raise PlanError(f"stages {stages!r}: a plan cuts stages by itself; it is 'auto', or None")
    if stages and batch is None:
        raise PlanError("stages='auto': a pipeline divides the batch of a step into micro-batches; give batch")


def check_devices(machine: Machine, devices: int) -> None:
    """Raise if the machine has fewer."""
    if devices < 1:
        raise PlanError(f"a plan is for one device or more, not {devices}")
    if devices > machine.devices:
        raise MachineError(
            f"{machine.name} has {machine.devices:,} devices, and {devices:,} were asked for; plan for fewer"
        )


def mean_square(outputs: Any) -> Tensor:
    """A loss for any network: the mean squares of its outputs, added up."""
    floating = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    if not floating:
        raise PlanError("the network gives no tensor of floating-point numbers; give loss=")
    return torch.stack([tensor.square().mean() for tensor in floating]).sum()
