"""The settings of a run: a few groups, each with a default. Plain data, which a program can make, too.

The comment behind each field is its documentation: ``tools/settings.py`` writes docs/settings.md from it. Files and
``--set`` are read by ``config``, and checked by pydantic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, model_validator, with_config

from ..errors import ConfigError as ConfigError
from ..errors import did_you_mean
from ..sizes import bytes_from

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
ScheduleName = Literal["constant", "linear", "cosine", "exponential"]
Policy = Literal["raise", "warn"]
NanPolicy = Literal["raise", "warn", "skip", "rollback"]

OPTIMIZERS = ("adam", "adamw", "sgd", "larc")

#: Letters of the data's dims, and the axes of the mesh that they are cut along.
AXES = {"N": "data", "C": "channels", "T": "time", "D": "depth", "H": "height", "W": "width"}


def _a_size(text: str) -> str:
    """A size such as "8GiB" that can be read."""
    bytes_from("data.memory", text)
    return text


def _without_none(arguments: dict[str, Any]) -> dict[str, Any]:
    """Settings are written as TOML, which has no None: a resumed run would go on without the argument."""
    for name, value in arguments.items():
        if value is None:
            raise ValueError(f"{name} = None: settings have no None; leave {name} out for its default")
    return arguments


Count = Annotated[int, Ge(1)]
CountOrNone = Annotated[int, Ge(0)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Beta = Annotated[float, Ge(0), Lt(1)]
Arguments = Annotated[dict[str, Any], AfterValidator(_without_none)]
Size = Annotated[str, AfterValidator(_a_size)]
Letter = Literal["N", "C", "T", "D", "H", "W"]

_strict = with_config({"extra": "forbid"})  # an unknown key is a mistake, in every group


@_strict
@dataclass(frozen=True)
class FieldSettings:
    """One field of the data: x goes into the network, y is what it should answer. A string is short for ``path``."""

    path: str | None = None  # a file, a folder of files, or a pattern such as "scans/*.nii.gz"; default: data.path
    dataset: str | None = None  # of an HDF5 file or a Zarr group; default: the field's name, x or y
    dims: str | None = None  # a letter for each dim, in the order in which the file stores them, such as "NCDHW"
    channel: bool | None = None  # add a channel dim of size 1; default: for x, if its dims have neither C nor T
    classes: bool | None = None  # read as class numbers (int64); default: for y, if integers without channels
    normalize: Literal["none", "standard", "minmax"] = "none"  # by the statistics that `halocline data stats` saved
    fill: float = 0  # value where a shift leaves nothing


@_strict
@dataclass(frozen=True)
class DataSettings:
    """The data of a run. For your own data give ``path``, or paths of x and y; a workload makes its data by
    ``arguments``."""

    path: str | None = None  # a file, a folder of files or a pattern; `data = "path"` is short for it
    x: FieldSettings = FieldSettings()  # what goes into the network
    y: FieldSettings = FieldSettings()  # what the network should answer
    validation: NotNegative = 0.1  # the last samples are held out: a share if less than 1, else how many; 0: none
    samples: Count = 64  # that a workload makes for training
    seed: int = 0  # of the data that a workload makes
    memory: Size = "0"  # a rank's memory for samples, kept from the first epoch on, such as "8GiB"
    readers: Count = 1  # boxes read at once
    prefetch: Count = 2  # batches prepared ahead of the step
    flip: str = ""  # letters of dims that are flipped at random, such as "DHW"
    rotate: str = ""  # two letters of a plane that is turned by multiples of 90 degrees, such as "HW"
    shift: dict[str, int] = field(default_factory=dict)  # the largest random shift by letter, such as {D = 4}
    wrap: bool = False  # shifts are periodic
    crop: dict[str, int] = field(default_factory=dict)  # size of a random crop by letter
    on_bad_sample: Literal["raise", "skip"] = "raise"  # for a sample that cannot be read
    arguments: Arguments = field(default_factory=dict)  # of the data that a workload makes

    @model_validator(mode="after")
    def _check(self) -> DataSettings:
        if self.validation >= 1 and self.validation != int(self.validation):
            raise ValueError(f"data.validation = {self.validation}: a share less than 1, or a whole number of samples")
        return self

    def held_out(self, samples: int) -> int:
        """The number of samples for validation, of so many; a share is at least one sample, if there are two."""
        if self.validation >= 1 or not self.validation:
            return int(self.validation)
        return min(max(1, round(self.validation * samples)), samples - 1)


@_strict
@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer. A string in place of this group is short for ``name``."""

    name: str = "adam"  # adam, adamw, sgd, larc, or a class such as "torch.optim:RMSprop"
    lr: Positive = 1e-3  # learning rate
    weight_decay: NotNegative = 0.0
    momentum: NotNegative = 0.9  # of sgd
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adam, adamw and larc
    trust: Positive = 0.002  # of larc: the largest step, as a share of the norm of a weight
    mode: Literal["clip", "scale"] = "clip"  # of larc
    options: Arguments = field(default_factory=dict)  # further arguments of the optimizer's class

    @model_validator(mode="after")
    def _check(self) -> OptimizerSettings:
        if self.name not in OPTIMIZERS and ":" not in self.name:
            known = ", ".join(OPTIMIZERS)
            told = f"optimizer.name = {self.name!r}{did_you_mean(self.name, OPTIMIZERS)}"
            raise ValueError(f"{told}: give {known}, or a class such as 'torch.optim:RMSprop'")
        return self


@_strict
@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate over a run: it rises over ``warmup`` steps, then falls towards ``final`` of itself.

    More workers mean larger batches, and those take larger rates: with ``base``, the rate is that of a batch of so many
    samples, and grows with the batch of a step. A string in place of this group is short for ``name``.
    """

    name: ScheduleName = "constant"
    warmup: CountOrNone = 0  # steps
    final: NotNegative = 0.0  # share of the learning rate at the end, of linear, cosine and exponential
    base: CountOrNone = 0  # samples of a step for which optimizer.lr is meant; 0: for any number
    scaling: Literal["linear", "sqrt"] = "linear"  # how the rate grows with the samples of a step over base


@_strict
@dataclass(frozen=True)
class GradientSettings:
    """How gradients are averaged over the ranks."""

    overlap: Literal["backward", "next-forward"] = "backward"  # how far sums may go on; the result is the same
    lag: Literal[0, 1] = 0  # 1: applied one step late, which is another algorithm
    wire: Literal["same", "fp32", "bf16", "fp16"] = "same"  # rounded on the way
    rings: str = "usual"  # how a sum travels: usual, flat, auto, levels
    deterministic: bool = False  # equal runs give equal bits: no measured time decides what is summed together

    @model_validator(mode="after")
    def _check(self) -> GradientSettings:
        if self.lag and self.overlap == "next-forward":
            raise ValueError("gradients.lag = 1 hides all sums already; leave gradients.overlap = 'backward'")
        if self.overlap == "next-forward" and self.wire == "fp16":
            raise ValueError("gradients.wire = 'fp16' goes with overlap = 'backward'; with next-forward use 'bf16'")
        known = ("usual", "flat", "auto", "levels", "doubling")
        if self.rings not in known and not self.rings.startswith("leaders:"):
            near = did_you_mean(self.rings, known)
            raise ValueError(
                f"gradients.rings = {self.rings!r}{near}: usual, flat, auto, levels, doubling or leaders:K"
            )
        return self

    def arguments(self, optimizer: Any) -> dict[str, Any]:
        """Keyword arguments of ``hc.distribute``."""
        ahead = {"overlap": self.overlap, "optimizer": optimizer} if self.overlap == "next-forward" else {}
        wire = None if self.wire == "same" else self.wire
        fixed = {"deterministic": True} if self.deterministic else {}
        return {"lag": self.lag, "wire": wire, "rings": self.rings, **fixed, **ahead}


@_strict
@dataclass(frozen=True)
class GuardSettings:
    """What is checked while training goes on, and whether it ends the run."""

    nan: NanPolicy = "raise"  # a loss that is NaN or infinite; skip the step, or roll back to the last checkpoint
    drift: Policy = "raise"  # ranks whose weights are no longer the same
    drift_every: CountOrNone = 50  # steps; 0: never
    slow: Annotated[float, Gt(1)] = 5.0  # times the median of the others: a rank that is named


@_strict
@dataclass(frozen=True)
class CopySettings:
    """Copies of the newest state in memory, of this node and the next, from which a run comes back."""

    every: CountOrNone = 0  # steps between copies; 0: none
    memory: Size | None = None  # most of a node's memory for them, such as "8GiB"; default: half of what is free


@_strict
@dataclass(frozen=True)
class Settings:
    """One run: a ``workload``, or ``model``, ``loss`` and ``data`` of your own."""

    workload: str | None = None  # a network with its data: cosmoflow, unet3d, ...
    scale: Literal["small", "full"] = "small"  # of a workload: for two cores, or as its paper has it
    model: str | None = None  # of your own: "package.module:name" of a class or function that gives a torch.nn.Module
    network: Arguments = field(default_factory=dict)  # arguments of the model's class or function
    weights: str | None = None  # a state_dict to start from: a .safetensors file, or one that torch.save wrote
    loss: str | None = None  # "package.module:name" of a function loss(output, y), or of a class or function giving one
    loss_options: Arguments = field(default_factory=dict)  # arguments of the loss
    metrics: list[str] = field(default_factory=lambda: ["auto"])  # what validation measures; see training.md
    class_names: list[str] = field(default_factory=list)  # for metrics by class, in the order of the class numbers
    callbacks: list[str] = field(default_factory=list)  # "package.module:Class", told of steps; see training.md
    data: DataSettings = DataSettings()
    mesh: dict[Letter, Count] = field(default_factory=dict)  # parts by letter, such as {N = 2, D = 2}; default: D, H, W
    model_parts: Count = 1  # ranks over which weights are cut, beside those of the mesh
    layout: dict[str, dict[str, str]] = field(default_factory=dict)  # which weights are cut; see model-axes.md
    plan: str | None = None  # a file of `halocline plan --out`, or "auto"; in place of mesh
    machine: str | None = None  # that a plan is made or priced for: a shipped one, or a file; default: here.json
    steps: Count = 100  # optimizer steps
    batch: Count = 1  # samples of a batch, over all ranks
    accumulate: Count = 1  # batches of a step
    split: CountOrNone = 1  # parts in which a batch is computed; 0: as few as fit in memory
    memory: str | None = None  # most memory of a rank, such as "2GiB", for split = 0; default: what is free
    precision: Precision = "fp32"  # in which the network computes
    clip: Positive | None = None  # largest global norm of the gradients
    seed: int = 0  # of weights, the order of samples, augmentation and dropout
    multiple: Count = 1  # samples are cut at multiples of this; give the network's total stride
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    gradients: GradientSettings = GradientSettings()
    guard: GuardSettings = GuardSettings()
    validate_every: CountOrNone = 0  # steps; 0: at the end
    log_every: Count = 1  # steps
    checkpoint_every: CountOrNone = 50  # steps; 0: at the end
    keep: Count = 3  # checkpoints, the newest good ones
    keep_every: CountOrNone = 0  # steps: checkpoints at multiples of it stay, too; 0: none
    cloud: str | None = None  # a URL of fsspec, such as "s3://bucket/run", to which every checkpoint is copied
    copies: CopySettings = CopySettings()
    trace: bool = False  # write trace.json of a few steps, for ui.perfetto.dev
    deadline: Positive | None = None  # seconds of any wait; default: at least 120 for ranks, 600 for storage

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.guard.nan in ("skip", "rollback") and (self.gradients.lag or self.gradients.overlap != "backward"):
            raise ValueError(
                f"guard.nan = {self.guard.nan!r} needs a step that ends before the next begins: leave gradients.lag "
                "and gradients.overlap at their defaults"
            )
        if (self.workload is None) == (self.model is None):
            raise ValueError("give workload = one of the known ones, or model = 'package.module:factory'; not both")
        if self.plan is not None and self.mesh:
            raise ValueError("plan and mesh: a plan makes its own mesh; leave one of them out")
        if self.plan is not None and self.model_parts > 1:
            raise ValueError("plan and model_parts: plans do not cut weights yet; give a mesh instead")
        if self.model_parts > 1 and self.precision == "fp16":
            raise ValueError("model_parts and precision = 'fp16': the loss's scaler knows whole weights; use bf16")
        has_data = self.data.path is not None or None not in (self.data.x.path, self.data.y.path)
        if self.model is not None and (self.loss is None or not has_data):
            raise ValueError(
                "a model of your own needs loss = 'package.module:function', and data = 'path.h5' or paths of both "
                "fields: data.x = 'images', data.y = 'labels'"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Nested dicts, as config.toml holds them."""
        return asdict(self)
