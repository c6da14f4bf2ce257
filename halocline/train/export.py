"""Weights alone, in files that need nothing of this library to be read.

Unlike a checkpoint such a file has no optimizer state and no mesh: it is for inference, and for starting other runs.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..rules import gather
from ..tensor import ShardedTensor, unwrap
from .checkpoints.files import sync
from .checkpoints.peers import CheckpointError, reason

SAFETENSORS = ".safetensors"


def export_weights(model: nn.Module | Mapping[str, Any], path: Path | str) -> None:
    """Write a model's state_dict: a name ending in .safetensors chooses that format, any other ``torch.save``'s.

    The file appears whole or not at all. Prefixes of DDP and torch.compile are removed from names. DTensors and cut
    parameters are gathered: then all ranks must call this, otherwise any one rank may.
    """
    path = Path(path)
    weights = _whole(_state(model))
    if path.suffix == SAFETENSORS:
        save = _safetensors(path).save_file
        apart = {name: _own_memory(name, value, path) for name, value in weights.items()}
        _write(path, lambda part: save(apart, part, metadata={"format": "pt"}))
    else:
        _write(path, lambda part: torch.save(weights, part))


def import_weights(path: Path | str) -> dict[str, Any]:
    """The weights of a file that :func:`export_weights` wrote, in host memory, for ``model.load_state_dict``."""
    path = Path(path)
    library = _safetensors(path) if path.suffix == SAFETENSORS else None
    try:
        weights = (
            torch.load(path, map_location="cpu", weights_only=True) if library is None else library.load_file(path)
        )
        if not isinstance(weights, dict):
            raise CheckpointError(f"it holds a {type(weights).__name__}, not weights by name")
        return weights
    except Exception as error:
        raise CheckpointError(f"{path}: the weights cannot be read: {reason(error)}") from error


#: Keys under which other tools keep the weights in a file that holds more.
_NESTED = ("state_dict", "model_state_dict", "model")


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Load weights from a file into ``model``. CheckpointError unless names and shapes are the model's own.

    The file may hold more, with the weights under a key such as ``state_dict``. The error lists the first names that do
    not fit.
    """
    weights = import_weights(path)
    for name in _NESTED:
        if isinstance(weights.get(name), Mapping):
            weights = weights[name]
            break
    weights = {name.removeprefix("module."): value for name, value in weights.items()}  # DDP's prefix
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is not in the model" for name in weights if name not in own]
    wrong += [
        f"{name} is {list(weights[name].shape)} in the file and {list(value.shape)} in the model"
        for name, value in own.items()
        if name in weights and isinstance(value, Tensor) and weights[name].shape != value.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path} does not fit the model: {', '.join(wrong[:3])}{more}")
    model.load_state_dict(weights)


# ---- what is written ----


def _state(model: nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    """The state_dict without prefixes of DDP and torch.compile; a mapping as it is."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        return model
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor whole in host memory, in storage of its own; tied weights stay one tensor."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    whole = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            key = _identity(name, value)
            if key not in copies:
                own = value.detach()
                full = own.full_tensor() if isinstance(own, DTensor) else gather(own)
                copies[key] = full.resolve_conj().resolve_neg().to("cpu", copy=True)
            whole[name] = copies[key]
    return whole


def _identity(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor."""
    if isinstance(tensor, ShardedTensor):
        tile = unwrap(tensor)
        return tile.data_ptr() or name, tensor.dtype, tile.device, tensor.shape
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.data_ptr() or name, tensor.dtype, here.device, tensor.shape, tensor.stride(), tensor.is_conj()


def _own_memory(name: str, value: Any, path: Path) -> Tensor:
    """A contiguous copy: safetensors has neither shared memory nor strides, so tied weights are written twice."""
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{path}: {name} is a {type(value).__name__}, and safetensors holds tensors only; give the file another "
            "ending, such as .pt"
        )
    return value.clone(memory_format=torch.contiguous_format)


def _safetensors(path: Path) -> Any:
    """The module safetensors.torch; CheckpointError if it is not installed."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the package safetensors is not installed; install it, or give the file another ending (.pt)"
        ) from error


def _write(path: Path, save: Callable[[str], object]) -> None:
    """Call ``save`` with a temporary name, force the file to storage and rename it: readers never see half a file."""
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        save(part)
        mask = os.umask(0)
        os.umask(mask)
        Path(part).chmod(0o666 & ~mask)  # mkstemp lets only the owner read its files
        sync(Path(part))
        Path(part).replace(path)
    except Exception as error:
        if part:
            Path(part).unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the weights cannot be written: {reason(error)}") from error
