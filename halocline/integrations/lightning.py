"""PyTorch Lightning as the one that runs the training: a strategy that cuts batches over the ranks.

strategy = HaloclineStrategy({"depth": 2}, cut={"x": {2: "depth"}, "y": {1: "depth"}})
Trainer(accelerator="cpu", devices=2, strategy=strategy).fit(module, DataLoader(...))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distribute import distribute, no_sync
from ..errors import HaloclineError, MeshError, ShardingError
from ..rules import shard
from ..world import Mesh

try:
    from lightning.fabric.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        LSFEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'halocline[lightning]'", name=error.name) from error

Cut = Mapping[int, str]
_MESH = "_halocline_lightning_mesh"  # in a module's __dict__: the mesh over which this strategy distributed it


class HaloclineStrategy(DDPStrategy):
    """Trains a LightningModule on batches that are cut over a mesh, with the result of one rank.

    ``axes`` are those of :class:`halocline.Mesh`. ``cut`` says how each tensor of a batch is cut, by its key in a dict
    or its place in a tuple; every rank then loads whole batches, in the same order, and keeps its part. Without ``cut``
    batches are taken as they come: from :class:`halocline.data.Loader`, which gives cut ones, or each rank's own
    samples on a mesh with the axis ``data`` alone, as with DDP. Further arguments are those of Lightning's
    ``DDPStrategy`` that concern processes, such as ``timeout``.
    """

    strategy_name = "halocline"

    def __init__(
        self, axes: Mapping[str, int] | None = None, cut: Mapping[str | int, Cut] | None = None, **processes: Any
    ) -> None:
        if processes.get("cluster_environment") is None and not _mpi_loads():
            processes["cluster_environment"] = _environment_without_mpi()
        super().__init__(**processes)
        self._axes, self._cut = dict(axes or {"data": -1}), cut
        self.mesh: Mesh | None = None  # once the processes have met

    @property
    def _splits_samples(self) -> bool:
        """Does each rank bring samples of its own?"""
        return self._cut is None and list(self._axes) == ["data"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For the sampler that Lightning puts into a DataLoader: all ranks of a cut batch draw the same samples."""
        return super().distributed_sampler_kwargs if self._splits_samples else {"num_replicas": 1, "rank": 0}

    def setup_environment(self) -> None:
        """Join the processes, and lay them out on the mesh."""
        super().setup_environment()
        self.mesh = Mesh(**self._axes)

    def setup(self, trainer: Any) -> None:
        """Prepare the module: for training, validation, test and prediction alike it is distributed."""
        super().setup(trainer)
        if trainer.state.fn != "fit":  # fitting called configure_ddp
            self.configure_ddp()

    def configure_ddp(self) -> None:
        """Distribute the module; it is not wrapped. A module that an earlier call distributed keeps its mesh."""
        assert self.mesh is not None, "Lightning sets up the processes first"
        kept = self.model.__dict__.get(_MESH)
        if kept is None:
            self.model: Any = distribute(self.model, self.mesh)
            self.model.__dict__[_MESH] = self.mesh
        elif list(kept.sizes.items()) == list(self.mesh.sizes.items()):
            self.mesh = kept
        else:
            raise MeshError(
                f"this module was distributed over {dict(kept.sizes)}, and the strategy has {dict(self.mesh.sizes)}; "
                "give the strategy the same axes, or make the module anew and load its checkpoint"
            )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device and keep this rank's part."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._cut is None:
            return moved
        if isinstance(moved, Mapping):
            self._check_keys(moved.keys())
            return {key: self._part(value, self._cut.get(key)) for key, value in moved.items()}
        if isinstance(moved, (tuple, list)):
            self._check_keys(range(len(moved)))
            return type(moved)(self._part(value, self._cut.get(place)) for place, value in enumerate(moved))
        return self._part(moved, self._cut.get(0))

    def _check_keys(self, keys: Any) -> None:
        missing = [key for key in self._cut or () if key not in keys]
        if missing:
            raise ShardingError(
                f"HaloclineStrategy(cut=...) names {missing[0]!r}, and the batch has {', '.join(map(repr, keys))}; "
                "name tensors by their key in a dict, or by their place in a tuple"
            )

    def _part(self, value: Any, cut: Cut | None) -> Any:
        assert self.mesh is not None, "Lightning sets up the processes before the first batch"
        return shard(value, self.mesh, dict(cut)) if cut and isinstance(value, Tensor) else value

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """A logged value over all ranks. On cut batches it is the value of the whole batch already, on every rank.

        Raises HaloclineError if it differs between ranks then: no sum or mean of such values means anything.
        """
        if self._splits_samples or not isinstance(tensor, Tensor) or not dist.is_initialized():
            return super().reduce(tensor, group, reduce_op)
        ends = torch.stack([tensor.detach(), -tensor.detach()]).double()
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if not torch.allclose(ends[0], -ends[1], rtol=1e-6, atol=0, equal_nan=True):
            raise HaloclineError(
                f"a logged value differs between ranks, from {(-ends[1]).min():g} to {ends[0].max():g}; on cut batches "
                "losses and metrics are global already: log one that is computed from the cut tensors, or gather them"
            )
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Is it true on all ranks, or on any?"""
        votes = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay local inside, for accumulation."""
        with no_sync(self.model):
            yield


def _mpi_loads() -> bool:
    """Can Lightning ask MPI whether it started this process? It ends with an error where mpi4py has no library."""
    try:
        from mpi4py import MPI  # noqa: F401
    except ModuleNotFoundError:
        return True  # without mpi4py Lightning does not ask
    except (ImportError, RuntimeError):
        return False
    return True


def _environment_without_mpi() -> ClusterEnvironment:
    """What Lightning would choose, in its order, if mpi4py were not installed."""
    for kind in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment):
        if kind.detect():
            return kind()
    return LightningEnvironment()
