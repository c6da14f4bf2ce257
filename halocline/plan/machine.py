"""A machine as data: devices, links between them, storage. Every constant says where it comes from.

Files are JSON, checked by pydantic. Units stand in the names; unknown keys and implausible values are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import HaloclineError, did_you_mean

Source = Literal["measured", "published", "assumed"]


class MachineError(HaloclineError, ValueError):
    """A machine file that cannot be read, or whose values cannot be meant."""


class Strict(BaseModel):
    """The base of all that a machine file holds: a misspelt name is an error, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantity(Strict):
    """A number with its origin. An assumed one has a range, which predictions carry on."""

    value: float = Field(gt=0)
    source: Source
    reference: str = ""
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_range(self) -> Quantity:
        low, high = self.low or self.value, self.high or self.value
        if self.source == "assumed" and (self.low is None or self.high is None):
            raise ValueError("an assumed value needs low and high")
        if not low <= self.value <= high:
            raise ValueError(f"low <= value <= high does not hold: {low:g}, {self.value:g}, {high:g}")
        return self


def between(least: float, most: float, hint: str) -> AfterValidator:
    """Questions a value outside [least, most]: most such values are slips of units."""

    def check(quantity: Quantity) -> Quantity:
        for value in (quantity.value, quantity.low, quantity.high):
            if value is not None and not least <= value <= most:
                raise ValueError(f"{value:g} is outside {least:g} to {most:g}: {hint}")
        return quantity

    return AfterValidator(check)


Tflops = Annotated[Quantity, between(1e-4, 1e4, "is it in TFLOP/s?")]
Gigabytes = Annotated[Quantity, between(0.1, 1e4, "is it in GB?")]
GigabytesPerSecond = Annotated[Quantity, between(1e-3, 1e5, "is it in GB/s (bytes, not bits)?")]
Microseconds = Annotated[Quantity, between(1e-2, 1e5, "is it in microseconds?")]
Share = Annotated[Quantity, between(1e-3, 1.0, "it is a share of the peak, from 0 to 1")]
Factor = Annotated[Quantity, between(0.5, 1e3, "it is a ratio of times, about 1 or more")]
WaitingShare = Annotated[Quantity, between(0.05, 20, "it is a ratio of times, about 1")]
Hours = Annotated[Quantity, between(1.0, 1e8, "is it in hours?")]
Gflop = Annotated[Quantity, between(1e-6, 1e5, "is it in GFLOP?")]


class MeasuredOperation(Strict):
    """One operation of torch, timed at these shapes; those in between are interpolated (:mod:`halocline.plan.curves`).

    ``options`` are the arguments that are no tensors. ``workspace_bytes`` is what it takes beside its results.
    """

    name: str
    dtype: Literal[
        "None", "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
    ]
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[bool | int | tuple[bool | int, ...] | None, ...]
    flops: float = Field(ge=0)
    bytes: int = Field(ge=0)
    us: float = Field(gt=0)
    workspace_bytes: int = Field(default=0, ge=0)


class Device(Strict):
    """One accelerator, or one CPU rank.

    An operation of w GFLOP reaches ``efficiency * w / (w + half_work_gflop)`` of the peak of its dtype: small local
    shapes never run at the speed of large ones. On a CPU the thread that computes also runs the program and the
    messages, so nothing hides behind anything else by itself.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_gb: Gigabytes
    memory_gb_per_s: GigabytesPerSecond
    peak_tflops: dict[Literal["float64", "float32", "bfloat16", "float16"], Tflops]
    efficiency: Share
    half_work_gflop: Gflop
    memory_efficiency: Share
    launch_us: Microseconds
    #: How fast a CPU touches memory that the allocator maps anew, which it does for each block of 32 MiB or more.
    fresh_gb_per_s: GigabytesPerSecond | None = None
    operations: tuple[MeasuredOperation, ...] = ()


class NodeLoad(Strict):
    """What changes with the number of ranks that run on a node, measured by `halocline calibrate`.

    ``arithmetic``, ``unfolding`` and ``memory`` are how many times longer an operation takes than alone, by what it is
    bound by. ``host_us`` is the time of the program itself for each operation. ``latency_us`` is what an exchange adds
    to ranks that compute between exchanges, ``sum_latency_us`` what a sum by the transport adds; ``waiting`` is the
    share of it that counts, below 1 where ranks share a core and one computes while another waits.
    """

    ranks: int = Field(ge=1)
    arithmetic: Factor
    unfolding: Factor
    memory: Factor
    host_us: Microseconds
    latency_us: Microseconds
    sum_latency_us: Microseconds
    waiting: WaitingShare


class NetworkLevel(Strict):
    """A level of the network: devices inside one group of ``devices`` reach each other over it.

    ``gb_per_s`` is one direction of one port; ``shared_by`` devices share that port. ``kind`` chooses the latencies of
    NCCL's own model; a bus between sockets counts as "pci", links between CPU processes are "socket".
    """

    name: str
    kind: Literal["nvlink", "pci", "network", "socket"]
    devices: int | None = Field(gt=1, description="devices that the level joins; null: all there are")
    gb_per_s: GigabytesPerSecond
    latency_us: Microseconds
    shared_by: int = Field(default=1, ge=1)


class Storage(Strict):
    """What a node reads from: its own disk, or its share of the file system."""

    name: str
    gb_per_s_per_node: GigabytesPerSecond


class FileSystem(Strict):
    """The file system that all nodes share, to which checkpoints go and from which samples are staged."""

    name: str
    gb_per_s: GigabytesPerSecond  # of all nodes together
    gb_per_s_per_node: GigabytesPerSecond  # at most


class Variation(Strict):
    """How unequal the steps of equal ranks are: a step lasts as long as that of the slowest.

    ``device_spread`` is the standard deviation of the devices' speed, as a share of it. ``host_us`` is the mean delay
    of a step by the host (operating system, framework, input), ``shared`` that by a network and a file system that
    other jobs use too, as a share of the step; both have exponential tails.
    """

    device_spread: Share
    host_us: Microseconds
    shared: Share | None = None


class Reliability(Strict):
    """How often nodes fail, and what a restart takes."""

    node_mtbf_hours: Hours
    restart_s: Annotated[Quantity, between(1.0, 1e5, "is it in seconds?")]


class Machine(Strict):
    """Nodes of equal devices, joined by levels of links from the innermost outwards."""

    name: str
    about: str
    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    device: Device
    links: tuple[NetworkLevel, ...] = Field(min_length=1)
    storage: Storage
    collectives: Literal["nccl", "gloo", "halocline"] = "nccl"
    #: Of the time that communication runs beside computation: what the computation loses by it.
    overlap_loss: Share | None = None
    loads: tuple[NodeLoad, ...] = ()
    #: Work between two exchanges of a cut sample below which less than half of the time is work, measured by
    #: `halocline taskbench --machine`. No smaller tile is worthwhile.
    spatial_metg_us: Microseconds | None = None
    #: What `halocline simulate` knows beyond a plan.
    variation: Variation | None = None
    file_system: FileSystem | None = None
    reliability: Reliability | None = None

    @model_validator(mode="after")
    def _levels_grow(self) -> Machine:
        sizes = [link.devices for link in self.links]
        if sizes[-1] is not None or None in sizes[:-1]:
            raise ValueError("the last link, and no other, has devices null: it joins all")
        known = [size for size in sizes if size is not None]
        if known != sorted(set(known)):
            raise ValueError(f"links go from the innermost outwards, each joining more devices; got {known}")
        return self

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def link_between(self, first: int, second: int) -> NetworkLevel:
        """The innermost level whose group holds both devices; devices are numbered node by node."""
        for link in self.links:
            if link.devices is None or first // link.devices == second // link.devices:
                return link
        raise AssertionError("the last link joins all")

    def load(self, ranks: int) -> NodeLoad | None:
        """Of a node when a run has so many ranks: the nearest that was measured. None for machines without loads."""
        here = min(ranks, self.devices_per_node)
        return min(self.loads, key=lambda load: abs(math.log(load.ranks / here)), default=None)

    def assumed(self, simulated: bool = False) -> Iterator[tuple[str, Quantity]]:
        """Constants that nobody has measured or published, with their paths; those of simulations where asked for."""
        for path, quantity in quantities(self):
            if quantity.source == "assumed" and (simulated or not path.startswith(SIMULATED)):
                yield path, quantity


#: Parts of a machine that only `halocline simulate` reads.
SIMULATED = ("variation.", "file_system.", "reliability.")


def quantities(model: BaseModel, path: str = "") -> Iterator[tuple[str, Quantity]]:
    """Every quantity below ``model`` with its dotted path."""
    for name, value in model:
        below = f"{path}.{name}" if path else name
        if isinstance(value, Quantity):
            yield below, value
        elif isinstance(value, BaseModel):
            yield from quantities(value, below)
        elif isinstance(value, dict):
            yield from ((f"{below}.{key}", each) for key, each in value.items())
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from quantities(each, f"{below}.{number}")


def shipped() -> list[str]:
    """Names of the machines that come with the package."""
    folder = resources.files(__package__) / "machines"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_machine(name: str) -> Machine:
    """A shipped machine by its name, or one from a file."""
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise MachineError(
                f"machine {name}: there is no such file; `halocline calibrate` writes one for this machine"
            )
        text, origin = path.read_bytes(), str(path)
    elif name in shipped():
        text, origin = (resources.files(__package__) / "machines" / f"{name}.json").read_bytes(), name
    else:
        hint = did_you_mean(str(name), shipped())
        raise MachineError(f"no machine {name!r}{hint}; it is {', '.join(shipped())}, or a file such as here.json")
    try:
        return Machine.model_validate(json.loads(text))
    except ValidationError as error:  # a ValueError, too
        raise MachineError(f"machine {origin}: {explain_validation(error)}") from None
    except (ValueError, RecursionError) as error:
        raise MachineError(f"machine {origin}: not JSON: {error}") from None


def explain_validation(error: ValidationError) -> str:
    """One line for each mistake: the key, what is wrong with it, and what was given."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        reason = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key or 'file'}: {reason}")
    return "; ".join(lines)
