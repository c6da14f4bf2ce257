"""Tensors written and read by the parts of torch.distributed.checkpoint, which know about shards and other meshes.

Its ``save`` and ``load`` are not called: they warn where there is one process, and ``load`` unpickles without limits.
The order of the calls to planner, writer and reader is the one that their documentation promises.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from .files import METADATA, Facts, facts
from .peers import CheckpointError, Mismatch, Peers

_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # a layout by its name
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _Writer(FileSystemWriter):
    """Torch's writer, whose metadata does not name the folder."""

    def storage_meta(self) -> StorageMeta:
        # The folder is renamed in the end, and a pickled path is a class of the Python that wrote it.
        return StorageMeta(save_id=self.save_id)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], peers: Peers, finish: Callable[[dict[str, Facts]], None]
) -> None:
    """Write tensors, each rank its share; then call ``finish`` on rank 0 with size and checksum of all files.

    Called by all ranks together, in their background threads.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # The writer would sync a file before its last bytes have left Python's buffer; ``facts`` syncs them after.
    writer = _Writer(folder, sync_files=False, per_thread_copy_ahead=0)
    written: list[Metadata] = []

    def planned() -> SavePlan:
        planner.set_up_planner(dict(tensors), writer.storage_meta(), peers.is_first)
        writer.set_up_storage_writer(peers.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def shared_out(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        written.append(metadata)
        return writer.prepare_global_plan(plans)

    plan = peers.centrally(planned, shared_out)

    def put() -> tuple[list[Any], dict[str, Facts]]:
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: facts(folder / name, durable=True) for name in sorted(names)}

    def completed(parts: list[tuple[list[Any], dict[str, Facts]]]) -> list[None]:
        files = {name: told for _, named in parts for name, told in named.items()}
        _check_shared(folder, files)
        writer.finish(written[0], [results for results, _ in parts])
        finish({**files, METADATA: facts(folder / METADATA, durable=True)})
        return [None] * peers.size

    peers.centrally(put, completed)


def _check_shared(folder: Path, files: Mapping[str, Facts]) -> None:
    """On rank 0: raise if it does not see the files of other ranks."""
    for name, told in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != told["size"]:
            raise CheckpointError(
                f"{folder}: rank 0 does not see {name} as another rank wrote it; checkpoints need a folder that all "
                "nodes share"
            )


# ---- reading ----


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates the classes of tensor metadata only, so that a checkpoint cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Only dtypes and the classes listed above; anything else is refused, and named."""
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, torch.dtype) or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"it asks for {module}.{name}, which tensors do not need and which may run code; refused")


class _Reader(FileSystemReader):
    """Torch's reader, with metadata read by :class:`_Unpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, unpickled with :class:`_Unpickler`. CheckpointError names the file if it is damaged."""
        where = f"{self.path}, {METADATA}"
        try:
            with (Path(self.path) / METADATA).open("rb") as source:
                metadata = _Unpickler(source).load()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"{where}: it cannot be read ({type(error).__name__}: {error})") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{where}: it is a {type(metadata).__name__}, not the metadata of a checkpoint")
        return metadata


class Stored:
    """The tensors of one checkpoint, described by its metadata and read on demand.

    The metadata was verified by checksum, but may come from elsewhere: entries that are no tensors, or name files
    outside the checkpoint, are refused.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._tensors: dict[str, TensorStorageMetadata] = {}
        try:
            self._check_entries(files)
        except (AttributeError, TypeError, ValueError) as error:  # pieces of the right classes, put together wrongly
            raise CheckpointError(f"{folder}, {METADATA}: it is not the table of a checkpoint ({error})") from error

    def _check_entries(self, files: Collection[str]) -> None:
        """Raise CheckpointError for an entry that is no tensor, or is in none of these files."""
        folder = self.folder
        for name, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # other objects would be unpickled without limits
                raise CheckpointError(f"{folder}, {METADATA}: {name} is not a tensor")
            self._tensors[name] = entry
        for info in self._metadata.storage_data.values():
            if info.relative_path not in files or getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{folder}, {METADATA}: {info.relative_path!a} is no file of this checkpoint")

    def targets(self, strides: Mapping[str, list[int] | None], template: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Empty tensors to read into: shards where the template has DTensors, else whole, in host memory.

        ``strides`` has the names in the state's tree; both sides are checked against the stored tensors.
        """
        elsewhere = {name for name in self._tensors if "@" in name}  # parts of ranks at other places of the mesh
        lost = sorted(name for name in set(strides) - set(self._tensors) if "@" in name)
        if lost:
            raise Mismatch(
                f"{self.folder}: it has no {lost[0]}; load it on a mesh with as many ranks on each such axis"
            )
        if set(strides) != set(self._tensors) - (elsewhere - set(strides)):
            raise CheckpointError(f"{self.folder}: its state and its tensors do not belong together")
        for name, tensor in template.items():
            self._check(name, tensor)
        return {name: self._room(name, stride, template.get(name)) for name, stride in strides.items()}

    def _check(self, name: str, tensor: Tensor) -> None:
        """Raise Mismatch unless the stored tensor has the dtype and shape of the run's."""
        stored = self._tensors.get(name)
        has = "no such tensor" if stored is None else f"{stored.properties.dtype} of {tuple(stored.size)}"
        wants = f"{tensor.dtype} of {tuple(tensor.shape)}"
        if has != wants:
            raise Mismatch(
                f"{self.folder}: for {name} it has {has}, and the run needs {wants}; resume with the model and "
                "optimizer that were saved, or start anew in another folder"
            )

    def _room(self, name: str, stride: list[int] | None, like: Tensor | None) -> Tensor:
        """An empty tensor for one stored tensor: sharded as ``like``, or whole with the saved stride."""
        stored = self._tensors[name]
        if isinstance(like, DTensor):
            return torch.empty_like(like.detach())
        if stride is None:
            return torch.empty(stored.size, dtype=stored.properties.dtype)
        return torch.empty_strided(stored.size, stride, dtype=stored.properties.dtype)

    def read(self, targets: dict[str, Tensor], is_first: bool) -> None:
        """Read the tensors into ``targets``; each rank reads what it needs, and none communicates."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, is_first)
        self._reader.set_up_storage_reader(self._metadata, is_first)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        # A global plan of this rank alone: ranks need not agree on what each of them reads.
        plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
