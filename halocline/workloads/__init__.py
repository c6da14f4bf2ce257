"""Scientific workloads: networks as their papers have them, in plain PyTorch, with data that anyone can make."""

from .._deprecated import renamed
from . import (
    cosmoflow,
    ctr,
    deepcam,
    deeplab,
    disruption,
    mlperf_cosmoflow,
    resnet,
    seismic,
    stemdl,
    tiramisu,
    transformer,
    unet3d,
    vit3d,
)
from .workload import Meter, Workload, WorkloadSize

WORKLOADS = {
    "unet3d": unet3d.WORKLOAD,
    "cosmoflow": cosmoflow.WORKLOAD,
    "mlperf_cosmoflow": mlperf_cosmoflow.WORKLOAD,
    "tiramisu": tiramisu.WORKLOAD,
    "deeplab": deeplab.WORKLOAD,
    "deepcam": deepcam.WORKLOAD,
    "stemdl": stemdl.WORKLOAD,
    "resnet50": resnet.RESNET50,
    "resnet101": resnet.RESNET101,
    "transformer": transformer.WORKLOAD,
    "vit3d": vit3d.WORKLOAD,
    "disruption": disruption.WORKLOAD,
    "disruption_conv": disruption.CONVOLUTIONAL,
    "seismic": seismic.WORKLOAD,
    "ctr": ctr.WORKLOAD,
}

__all__ = ["WORKLOADS", "Meter", "Workload", "WorkloadSize"]

__getattr__ = renamed(__name__, {"Scale": WorkloadSize})
