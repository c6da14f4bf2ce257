"""Weights alone, for the bare model: no ranks, no optimizer, nothing of this library is needed to read them."""

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

from .checkpoints.peers import CheckpointError, reason

SAFETENSORS = ".safetensors"


def export_weights(model: nn.Module | Mapping[str, Any], path: Path | str) -> None:
    """Write a model's state_dict: as safetensors where the name ends so, else for ``torch.load(weights_only=True)``.

    The file appears whole or not at all. Wrappers of DDP and torch.compile are left off the names. DTensors are
    gathered: all ranks must call this then; else any one may.
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
    """What :func:`export_weights` wrote, in host memory, for ``model.load_state_dict``."""
    path = Path(path)
    load: Callable[[Path], dict[str, Any]] = _load_torch
    if path.suffix == SAFETENSORS:
        load = _safetensors(path).load_file
    try:
        return load(path)
    except Exception as error:
        raise CheckpointError(f"{path}: the weights cannot be read: {reason(error)}") from error


#: Under which name others keep the weights in a file that holds more.
_NESTED = ("state_dict", "model_state_dict", "model")


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Weights from a file into ``model``; names and shapes must be the model's own."""
    weights = import_weights(path)
    for name in _NESTED:
        if isinstance(weights.get(name), Mapping):
            weights = weights[name]
            break
    weights = {name.removeprefix("module."): value for name, value in weights.items()}  # of DDP
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


def _load_torch(path: Path) -> dict[str, Any]:
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict):
        raise CheckpointError(f"it holds a {type(weights).__name__}, not weights by name")
    return weights


# ---- what is written ----


def _state(model: nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        return model
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor whole in host memory, without what else lies in its storage; tied ones stay one."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    whole = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            key = _identity(name, value)
            whole[name] = copies[key] = copies[key] if key in copies else _host_copy(value)
    return whole


def _identity(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """The same for two names of one tensor."""
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.data_ptr() or name, tensor.dtype, here.device, tensor.shape, tensor.stride(), tensor.is_conj()


def _host_copy(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    full = own.full_tensor() if isinstance(own, DTensor) else own
    return full.resolve_conj().resolve_neg().to("cpu", copy=True)


def _own_memory(name: str, value: Any, path: Path) -> Tensor:
    """Safetensors knows neither shared memory nor strides: tied weights are written under each of their names."""
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{path}: {name} is a {type(value).__name__}, and safetensors holds tensors only; give the file another "
            "ending, such as .pt"
        )
    return value.clone(memory_format=torch.contiguous_format)


def _safetensors(path: Path) -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the package safetensors is not installed; install it, or give the file another ending (.pt)"
        ) from error


def _write(path: Path, save: Callable[[str], object]) -> None:
    """Under a name of its own first, so that nobody finds half a file."""
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        save(part)
        _settle(Path(part))
        Path(part).replace(path)
    except Exception as error:
        if part:
            Path(part).unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the weights cannot be written: {reason(error)}") from error


def _settle(part: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    part.chmod(0o666 & ~mask)  # mkstemp's files are the owner's alone
    with part.open("rb") as written:
        os.fsync(written.fileno())
