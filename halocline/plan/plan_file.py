"""A plan as one JSON file: which network, how it lies on the ranks, and what a step was predicted to take."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from ..arrangement import AXIS_OF_LETTER, DATA, Arrangement
from ..choices import Choices
from ..errors import PlanError
from ..parts import StageCut
from ..parts.cutting import StageForecast
from ..world import Mesh
from .machine import Machine, Strict, explain_validation
from .recording import volume_of

VERSION = 1  # of the format


class Prediction(Strict):
    """What a step takes: seconds and bytes of the slowest rank, by cause."""

    seconds: float  # with reading, where that takes longer
    low_seconds: float  # with every assumed constant of the machine at its better end
    high_seconds: float
    seconds_per_sample: float
    compute: float
    exposed: dict[str, float]  # waiting that computation does not hide, by what is waited for
    communication: dict[str, float]  # hidden or not
    memory: dict[str, int]  # bytes: weights, gradients, optimizer, activations
    input: float = 0.0  # to read the samples of a step, which happens beside it
    fits: bool
    binds: str

    @property
    def memory_bytes(self) -> int:
        """Of one device, in all."""
        return sum(self.memory.values())


class Alternative(Strict):
    """A cut that was compared, and the term by which it lost."""

    arrangement: str
    mesh: dict[str, int]
    predicted: Prediction
    lost_by: str


class PlannedStage(Strict):
    """One stage of a pipeline, with what is predicted of it for one micro-batch."""

    first: str
    last: str
    calls: int
    seconds: float
    received: int  # bytes
    parameters: int  # bytes
    activations: int  # bytes of all micro-batches in flight
    forward: float  # of the seconds


class PlannedPipeline(Strict):
    """A mesh of stages and data, as ``hc.pipeline`` takes it.

    best = plan.pipelines[0]
    pipe = hc.pipeline(Net(), hc.Mesh(**best.mesh_sizes), microbatches=best.microbatches, schedule=best.schedule,
                       stages=best.cut, loss=criterion, example=(x, y), cuts=[{0: "data"}, {0: "data"}])
    """

    mesh_sizes: dict[str, int]
    schedule: str
    microbatches: int
    begins: tuple[int, ...]
    cost: float
    stages: tuple[PlannedStage, ...]
    seconds: float
    seconds_per_sample: float
    memory_bytes: int  # of the fullest device
    fits: bool

    @property
    def cut(self) -> StageCut:
        """Where the model is cut."""
        return StageCut(self.begins, self.cost, tuple(StageForecast(**stage.model_dump()) for stage in self.stages))

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.mesh_sizes.items())


class Plan(Strict):
    """How to train one network on so many devices of one machine; made by ``hc.plan`` or ``halocline plan``.

    plan = hc.plan(Net, (1, 1, 256, 256, 256), machine="perlmutter", devices=64)
    model = hc.distribute(Net(), plan=plan)
    loss = criterion(model(plan.shard(x, "NCDHW")), plan.shard(y, "NDHW"))
    """

    version: Literal[1] = 1
    network: str
    fingerprint: str = Field(description="of names and shapes of the network's parameters")
    shapes: tuple[tuple[int, ...], ...] = Field(description="of one sample of each input, with a batch of one")
    dtype: str
    batch: int = Field(ge=1, description="samples of a step, over all ranks")
    mesh_sizes: dict[str, int]
    points: dict[str, tuple[int, ...]] = Field(default_factory=dict, description="where each mesh axis cuts; else even")
    multiple: int = Field(default=1, ge=1, description="even cuts lie at multiples of it")
    choices: Choices = Field(default_factory=Choices)
    gather: tuple[str, ...] = Field(default=(), description="modules from which on samples are whole on each rank")
    recompute: tuple[str, ...] = Field(default=(), description="modules that compute their activations again")
    layout: dict[str, dict[int, str]] = Field(default_factory=dict, description="parameters that are cut, by pattern")
    machine: str
    machine_fingerprint: str
    assumed: dict[str, tuple[float, float]] = Field(description="constants that nobody measured, with their ranges")
    predicted: Prediction
    alternatives: tuple[Alternative, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict, description="cuts that the library refuses, and why")
    pipelines: tuple[PlannedPipeline, ...] = Field(default=(), description="meshes of stages and data, the best first")
    speeds: tuple[float, ...] = Field(default=(), description="relative speeds of unequal devices, by rank")
    input_bytes: int | None = Field(default=None, ge=0, description="of one sample on disk; null: of its tensors")

    @model_validator(mode="after")
    def _fits_its_mesh(self) -> Plan:
        axes = [*AXIS_OF_LETTER.values(), *(axis for dims in self.layout.values() for axis in dims.values())]
        unknown = [axis for axis in self.mesh_sizes if axis not in axes]
        if unknown or not self.mesh_sizes:
            raise ValueError(f"mesh_sizes: no axis {unknown[0] if unknown else ''!r}; axes are {', '.join(axes)}")
        empty = [axis for axis, size in self.mesh_sizes.items() if size < 1]
        if empty:
            raise ValueError(f"mesh_sizes.{empty[0]}: {self.mesh_sizes[empty[0]]} ranks; an axis has one or more")
        if self.batch % self.mesh_sizes.get(DATA, 1):
            raise ValueError(f"batch: {self.batch} samples do not divide over {self.mesh_sizes[DATA]} ranks of data")
        volume = volume_of(self.shapes[0]) if self.shapes else {}
        for axis, at in self.points.items():
            size = self.mesh_sizes.get(axis, 1)
            rises = all(low < high for low, high in pairwise(at))
            if len(at) != size + 1 or not rises or at[0] != 0 or at[-1] != volume.get(axis):
                raise ValueError(
                    f"points.{axis}: {list(at)} does not cut {volume.get(axis, 'no')} voxels into {size} parts: give "
                    "0, where each part ends, and the size"
                )
        if self.speeds and len(self.speeds) != self.arrangement.ranks:
            raise ValueError(f"speeds: {len(self.speeds)} of them for {self.arrangement.ranks} ranks")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"speeds: {list(self.speeds)} are to be positive numbers")
        return self

    @property
    def arrangement(self) -> Arrangement:
        """What :func:`halocline.distribute` follows."""
        return Arrangement(
            self.mesh_sizes,
            self.points,
            self.multiple,
            self.choices,
            self.gather,
            self.recompute,
            self.fingerprint,
            self.layout,
        )

    def __str__(self) -> str:
        return str(self.arrangement)

    def mesh(self) -> Mesh:
        """The planned mesh over the ranks of this run."""
        return self.arrangement.mesh()

    def shard(self, tensor: Tensor, letters: str) -> Tensor:
        """A tensor that every rank holds whole, cut as planned; ``letters`` names its dims, such as "NCDHW"."""
        return self.arrangement.shard(tensor, letters)

    def is_for(self, machine: Machine) -> bool:
        """Was it priced on this machine, as it is described now?"""
        return self.machine_fingerprint == machine_fingerprint(machine)

    def to_json(self) -> str:
        """The text of the file."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: Path | str) -> None:
        """Write the file."""
        Path(path).write_text(self.to_json(), "utf-8")


def machine_fingerprint(machine: Machine) -> str:
    """Changes with any constant of the machine."""
    return hashlib.sha256(machine.model_dump_json().encode()).hexdigest()[:16]


def read_plan(path: Path | str) -> Plan:
    """The plan that a file holds."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(
            f"plan {path}: it cannot be read: {error.strerror}; `halocline plan --out` writes one"
        ) from None
    return parse_plan(text, str(path))


def parse_plan(text: str | bytes, origin: str) -> Plan:
    """A plan from the text of a file; ``origin`` is named in errors."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and content.get("version") != VERSION:
            raise PlanError(
                f"plan {origin}: its version is {content.get('version')!r}, and this release reads {VERSION}; make the "
                "plan again with `halocline plan --out`"
            )
        return Plan.model_validate(content)
    except ValidationError as error:  # a ValueError, too
        raise PlanError(f"plan {origin}: {explain_validation(error)}; make the plan again") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"plan {origin}: not JSON: {error}; `halocline plan --out` writes a plan") from None
