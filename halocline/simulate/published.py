"""Published runs that the simulator is held against. What is published is here; what is simulated is not.

A rate at the smallest published scale may fit the pace of the devices on a network (``fit``). Nothing is taken from a
run's own efficiency.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import PlanError
from ..plan.api import mean_square
from ..plan.recording import Subject
from ..workloads import WORKLOADS
from .levers import Levers
from .scenario import OPTIMIZER

Kind = Literal["efficiency", "rate"]
CLIMATE = (1, 16, 768, 1152)
CUBE = (1, 4, 128, 128, 128)
STEMDL: Mapping[str, Any] = {"layers": (2, 2, 3, 4, 3, 2, 2)}


@dataclass(frozen=True)
class Fit:
    """Samples a second and device at the smallest published scale; ``recalled``: known to some five per cent."""

    devices: int
    local: int
    rate: float
    recalled: bool = False


@dataclass(frozen=True)
class PublishedRun:
    """One published figure. ``tolerance`` is absolute for an efficiency and relative for a rate."""

    name: str
    machine: str
    network: str
    shape: tuple[int, ...]
    devices: int
    local: int
    value: float
    tolerance: float
    source: str
    kind: Kind = "efficiency"
    base: int = 1
    mixed: bool = False  # float16 by autocast
    arguments: Mapping[str, Any] = field(default_factory=dict)
    levers: Levers = field(default_factory=Levers)
    fit: Fit | None = None


def network_subject(network: str, shape: tuple[int, ...], arguments: Mapping[str, Any], mixed: bool) -> Subject:
    """A built-in network at its published size, as the runs trained it."""
    around: Any = (lambda: torch.autocast("cpu", torch.float16)) if mixed else nullcontext
    factory = WORKLOADS[network].factory
    return Subject(lambda: factory(**arguments), mean_square, (shape,), torch.float32, OPTIMIZER, (), around)


BITS, TREE = Levers(control="bits"), Levers(control="tree", rings="hybrid")
DEEPCAM_A100 = Fit(16, 8, 40.9)
MLPERF = "MLPerf HPC, logs"

RUNS = (
    PublishedRun(
        "FC-DenseNet, 27,600 of Summit", "summit", "stemdl", (1, 1024, 512, 512), 27_600, 1, 0.93, 0.03,
        "Laanait et al. 2019", mixed=True, arguments=STEMDL, levers=BITS.with_(wire="fp16"),
    ),
    PublishedRun(
        "DeepLabv3+, 27,360 of Summit", "summit", "deeplab", CLIMATE, 27_360, 1, 0.907, 0.03, "Kurth et al. 2018",
        levers=TREE, fit=Fit(1, 1, 0.87, recalled=True),
    ),
    PublishedRun(
        "Tiramisu, 5,300 of Piz Daint", "piz-daint", "tiramisu", CLIMATE, 5_300, 1, 0.79, 0.05, "Kurth et al. 2018",
        levers=TREE,
    ),
    PublishedRun(
        "DeepCAM, 128 to 1,024 of Piz Daint", "piz-daint", "deepcam", CLIMATE, 1_024, 2, 0.928, 0.03, MLPERF, base=128,
        fit=Fit(128, 2, 2.39),
    ),
    PublishedRun(
        "ResNet-50, 256 of Minsky", "minsky", "resnet50", (1, 3, 224, 224), 256, 32, 0.95, 0.03, "Cho et al. 2017",
        levers=Levers(rings="levels"),
    ),
    PublishedRun(
        "CosmoFlow, 128 to 1,024 of DGX-A100", "dgx-a100", "mlperf_cosmoflow", CUBE, 1_024, 1, 0.933, 0.03, MLPERF,
        base=128, mixed=True, levers=BITS, fit=Fit(128, 1, 67.2),
    ),
    PublishedRun(
        "DeepCAM, 2 on each of 512 DGX-A100", "dgx-a100", "deepcam", CLIMATE, 512, 2, 27.6, 0.10, MLPERF, "rate",
        mixed=True, fit=DEEPCAM_A100,
    ),
    PublishedRun(
        "DeepCAM, 1 on each of 2,048 DGX-A100", "dgx-a100", "deepcam", CLIMATE, 2_048, 1, 20.8, 0.10, MLPERF, "rate",
        mixed=True, fit=DEEPCAM_A100,
    ),
)  # fmt: skip

#: Steps of a sum over 256 ranks in one ring, over 4 x 64 and over 4 x 8 x 8 (Cho et al. 2017).
RING_STEPS = {(256,): 510, (4, 64): 132, (4, 8, 8): 34}
#: Step with a coordinator over step with bit vectors, at 6,000 GPUs of Summit (Romero et al. 2022).
COORDINATION = (6_000, 2.0, 0.25)
ALWAYS = 0.93  # what a trivial predictor answers

#: What a built-in network is simulated with unless told otherwise: one sample of its paper or benchmark.
FULL_SHAPES = {
    "stemdl": (1, 1024, 512, 512),
    "deeplab": CLIMATE,
    "tiramisu": CLIMATE,
    "deepcam": CLIMATE,
    "mlperf_cosmoflow": CUBE,
    "cosmoflow": CUBE,
    "unet3d": (1, 1, 128, 128, 128),
    "transformer": (1, 1024),
    "vit3d": (1, 1, 128, 128, 128),
    "resnet50": (1, 3, 224, 224),
    "resnet101": (1, 3, 224, 224),
    "disruption": (1, 22, 2_000),
    "disruption_conv": (1, 22, 2_000),
    "seismic": (1, 1, 4_096, 4_096),
}
_SIZES = ("size", "channels_in", "patterns")  # arguments that follow from the shape of a sample


def full_subject(network: str, shape: tuple[int, ...] | None, arguments: Mapping[str, Any], mixed: bool) -> Subject:
    """A built-in network at its full width, for samples of ``shape``."""
    if network not in FULL_SHAPES:
        raise PlanError(
            f"{network} cannot be simulated: which rows of its tables travel depends on values, and plans see shapes "
            f"alone; simulate one of {', '.join(sorted(FULL_SHAPES))}"
        )
    chosen = shape or FULL_SHAPES[network]
    fitted = {name: value for name, value in WORKLOADS[network].fit((chosen,)).items() if name in _SIZES}
    default = STEMDL if network == "stemdl" else {}
    return network_subject(network, chosen, {**default, **fitted, **arguments}, mixed)
