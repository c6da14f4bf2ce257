"""Scientific workloads: networks as their papers have them, in plain PyTorch, with data that anyone can make."""

from typing import Any
from warnings import warn

from . import cosmoflow, deeplab, resnet, stemdl, tiramisu, unet3d
from .workload import Meter, Workload, WorkloadSize

WORKLOADS = {
    "unet3d": unet3d.WORKLOAD,
    "cosmoflow": cosmoflow.WORKLOAD,
    "tiramisu": tiramisu.WORKLOAD,
    "deeplab": deeplab.WORKLOAD,
    "stemdl": stemdl.WORKLOAD,
    "resnet50": resnet.RESNET50,
    "resnet101": resnet.RESNET101,
}

__all__ = ["WORKLOADS", "Meter", "Workload", "WorkloadSize"]


def __getattr__(name: str) -> Any:
    if name != "Scale":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn("halocline.workloads.Scale is now halocline.workloads.WorkloadSize", DeprecationWarning, stacklevel=2)
    return WorkloadSize
