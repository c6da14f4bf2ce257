"""A run that follows a plan: read from a file or made at the start, checked against the run, and saved with it.

A plan decides the mesh, the cuts and the choices of the executor. It holds for one network, sample size and number of
ranks: a plan for another run is refused, one for another machine or batch is priced anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arrangement import DATA
from ..data.loading.layout import BatchLayout
from ..errors import ConfigError, PlanError
from ..plan.api import repriced
from ..plan.cost import Prices
from ..plan.explain import as_plan
from ..plan.machine import Machine, MachineError, load_machine
from ..plan.plan_file import Plan, parse_plan, read_plan
from ..plan.recording import LETTERS, Subject, TargetShape
from ..plan.search import RefusedCut, chosen, search
from ..program import dry
from ..world import Mesh, World
from ..world.agreement import agree
from ..world.text import broadcast_text
from .optimizers import make_optimizer
from .precision import Precision
from .settings import Settings
from .task import START, TrainingTask, augmentations

PLAN = "plan.json"  # in the run's folder
AUTO = "auto"
HERE = "here.json"  # what `halocline calibrate` writes
_LONGEST = 1 << 16  # bytes of a plan without its alternatives


def run_plan(settings: Settings, task: TrainingTask, precision: Precision, world: World, folder: Path) -> Plan | None:
    """The plan that the settings ask for, the same on every rank; None if they ask for none.

    By all ranks together: rank 0 reads or makes the plan, saves it in the run's folder, and sends it to the others.
    """
    if settings.plan is None:
        return None

    def prepare() -> Plan | None:
        if world.rank != 0:
            return None
        try:
            plan = _plan(settings, subject_of(settings, task, precision), world.size)
        except (PlanError, MachineError) as error:
            raise ConfigError(f"plan = {settings.plan!r}: {error}") from error
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / PLAN)
        return plan

    made = agree(world, prepare, START)
    text = "" if made is None else made.model_copy(update={"alternatives": (), "refused": {}}).model_dump_json()
    told = broadcast_text(world, 0, text, START, _LONGEST) if world.size > 1 else text
    return parse_plan(told, "of rank 0")


def _plan(settings: Settings, subject: Subject, ranks: int) -> Plan:
    """Make a plan, or read and check the one that the settings name. On rank 0. Raises PlanError.

    A plan for another network, sample size, number of ranks or batch that its data axis does not divide is refused; one
    for another machine or batch is priced anew, which changes its predictions and not its cuts.
    """
    if settings.plan == AUTO:
        if settings.machine is None and not Path(HERE).is_file():
            raise PlanError(
                "on which machine? Give --machine, such as perlmutter, or run `halocline calibrate`, which measures "
                f"this one and writes {HERE}"
            )
        machine = load_machine(settings.machine or HERE)
        refused: list[RefusedCut] = []
        candidates = search(subject, machine, ranks, settings.batch, Prices(machine.device), refused=refused)
        name = settings.workload or settings.model or "network"
        return as_plan(name, subject, machine, chosen(candidates, machine), candidates, refused)
    plan = read_plan(settings.plan or "")
    plan.arrangement.check(subject.meta_model())
    if plan.arrangement.ranks != ranks:
        raise PlanError(
            f"it is for {plan.arrangement.ranks} ranks, and this run has {ranks}; start that many, or use plan = 'auto'"
        )
    if plan.shapes != subject.shapes:
        raise PlanError(
            f"it is for samples of {list(plan.shapes[0])}, and the data have {list(subject.shapes[0])}; plan with this "
            "--shape"
        )
    if settings.batch % plan.mesh_sizes.get(DATA, 1):
        raise PlanError(
            f"its data axis has {plan.mesh_sizes[DATA]} ranks, which do not divide batch = {settings.batch}"
        )
    here = load_machine(settings.machine) if settings.machine else _known_machine(plan)
    if here is not None and not (plan.is_for(here) and plan.batch == settings.batch):
        return repriced(plan.model_copy(update={"batch": settings.batch}), subject, here)
    return plan


def _known_machine(plan: Plan) -> Machine | None:
    """The machine that the plan was made for, if its description is found and has not changed."""
    try:
        machine = load_machine(HERE if plan.machine == "here" else plan.machine)
    except MachineError:
        return None
    return machine if plan.is_for(machine) else None


def subject_of(settings: Settings, task: TrainingTask, precision: Precision) -> Subject:
    """What a planner records: the run's own training step with its loss, targets, precision and optimizer.

    LARC is recorded as the Adam that it wraps.
    """
    with dry(0, 1):
        layout = BatchLayout(task.training, Mesh(data=1), {"N": DATA}, augmentations(settings.data), settings.seed)
    shapes = {name: (1, *layout.shape(name)) for name in task.training}
    letters = {name: "N" + each.dims for name, each in task.training.items()}
    if letters["x"] != LETTERS.get(len(shapes["x"])):
        raise PlanError(f"x has dims {letters['x']}; plans are made for {', '.join(LETTERS.values())}; give a mesh")
    names = [name for name in task.training if name != "x"]
    targets = tuple(TargetShape(shapes[name], letters[name], task.training[name].tensor_dtype) for name in names)

    def loss(output: Any, *tensors: Tensor) -> Tensor:
        return task.loss(output, dict(zip(names, tensors, strict=True)))

    def optimizer(weights: list[nn.Parameter]) -> Any:
        if settings.optimizer.name == "larc":
            return torch.optim.Adam(weights)
        return make_optimizer(nn.ParameterList(weights), settings.optimizer)

    return Subject(task.make_model, loss, (shapes["x"],), precision.dtype, optimizer, targets, precision.autocast)
