"""A communication hook for DistributedDataParallel: its buckets travel by this library's sums."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..errors import MeshError
from ..world import CommThread, Label, this_world
from .buckets.bucket import Bucket
from .transport.compression import GradientCompression
from .transport.rings import rings_for
from .transport.sum_queue import BucketSum, FlatTransport, Transport

_LABEL = Label("DDP bucket", "backward", "gradients")


class DdpBuckets:
    """The buckets of one DistributedDataParallel, each with the scale of its last sum; a thread sums them in order."""

    def __init__(self, wire: str | None, rings: str | Sequence[int], parameters: list[Tensor]) -> None:
        self._world = this_world().duplicate()  # for the thread alone
        self._compression = GradientCompression(wire)
        made = rings_for(self._world, rings, parameters, measure=False)
        self._transport: Transport = made or FlatTransport(self._world, tuple(range(self._world.size)))
        self._thread = CommThread("halocline DDP buckets")
        self._buckets: dict[tuple[int, int, torch.dtype], Bucket] = {}

    def mean(self, index: int, gradients: Tensor) -> Future[Tensor]:
        """Begin the mean over all ranks of a bucket's gradients, which is written in their place."""
        future: Future[Tensor] = Future()
        self._thread.submit(partial(self._sum, index, gradients, future))
        return future

    def _sum(self, index: int, gradients: Tensor, future: Future[Tensor]) -> None:
        """In the thread."""
        try:
            with torch.no_grad():
                future.set_result(self._summed(index, gradients))
        except Exception as error:  # noqa: BLE001 - raised where backward waits for it
            future.set_exception(error)  # type: ignore[arg-type]

    def _summed(self, index: int, gradients: Tensor) -> Tensor:
        bucket = self._buckets.setdefault((index, gradients.numel(), gradients.dtype), Bucket([0], [gradients]))
        bucket.begin([gradients])
        bucket.put(0, gradients)
        share = 1.0 / self._world.size
        total = BucketSum(bucket, self._transport, self._compression, _LABEL, share, time.monotonic)
        total.begin()
        total.finish()
        return gradients.copy_(bucket.gradient(0))


def _hook(buckets: DdpBuckets, bucket: GradBucket) -> Future[Tensor]:
    """What DistributedDataParallel calls for each of its buckets."""
    return buckets.mean(bucket.index(), bucket.buffer())


def register_comm_hook(
    model: DistributedDataParallel, *, wire: str | None = None, rings: str | Sequence[int] = "flat"
) -> None:
    """Let the gradients of a DistributedDataParallel travel by this library's sums.

        model = DistributedDataParallel(Net())
        hc.register_comm_hook(model, wire="fp16")            # half the bytes, scaled so that nothing overflows

    ``wire`` and ``rings`` as in :func:`hc.distribute`. The mean is that of all ranks, as DDP's own. By all ranks
    together, before the first backward.
    """
    if not isinstance(model, DistributedDataParallel):
        raise MeshError(f"hc.register_comm_hook takes a DistributedDataParallel, not a {type(model).__name__}")
    size = this_world().size
    if model.process_group.size() != size:
        raise MeshError(
            f"hc.register_comm_hook: this model averages over {model.process_group.size()} ranks of {size}; "
            "leave process_group as it is"
        )
    model.register_comm_hook(DdpBuckets(wire, rings, list(model.parameters())), _hook)
