"""Files that a script writes: rank 0 writes them, and all ranks see them written at the same point of the script.

A file that a script opens for writing is a real one on rank 0; other ranks write to a file of their own, which is
discarded. Functions that change folders run on rank 0, and all ranks get their outcome, exceptions included.
"""

from __future__ import annotations

import builtins
import copy
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import remove_hooks
from ..rules import gather
from ..tree import map_tensors
from .first_rank import FirstRank
from .patches import Patches

_CHANGES = {
    os: ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link", "truncate", "chmod", "utime"),
    shutil: ("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "make_archive", "unpack_archive"),
    tempfile: ("mkdtemp",),
    builtins: ("input",),
}
_SPECIAL = ("/dev/", "/proc/", "/sys/")


def share_files(patches: Patches, first: FirstRank) -> None:
    """From now on, what the script writes is written once."""
    private = Path(tempfile.mkdtemp(prefix="halocline-run-"))
    patches.callback(shutil.rmtree, private, ignore_errors=True)
    opened = Opening(first, private, builtins.open)
    for owner in (builtins, io):
        patches.replace(owner, "open", lambda plain: opened)
    for module, names in _CHANGES.items():
        for name in names:
            patches.replace(module, name, lambda plain: _on_first(plain, first))
    patches.replace(torch, "save", lambda plain: _save(plain, first))


def _on_first(plain: Callable[..., Any], first: FirstRank) -> Callable[..., Any]:
    """A function that rank 0 runs for all ranks; where it concerns the user's caches, each rank for itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        is_path = args and isinstance(args[0], (str, os.PathLike))
        if not first.together or (is_path and _is_no_output(args[0])):
            return plain(*args, **kwargs)
        return first.call(plain, *args, **kwargs)

    return run


def _is_no_output(path: Any) -> bool:
    """Is this no output of the script: a descriptor, a device, or a file below a hidden folder of the user's home?

    Libraries keep caches there, which one rank may find and another not.
    """
    if not isinstance(path, (str, os.PathLike)):
        return True
    whole = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - a link may lead anywhere
    if str(whole).startswith(_SPECIAL):
        return True
    try:
        return whole.relative_to(Path.home()).parts[0].startswith(".")
    except (ValueError, IndexError):
        return False


def _save(plain: Callable[..., Any], first: FirstRank) -> Callable[..., Any]:
    """``torch.save``: cut tensors are gathered, and rank 0 writes what a single device would."""

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not first.together:
            plain(obj, f, *args, **kwargs)
            return
        whole = _unmarked(gather(obj))
        if isinstance(f, (str, os.PathLike)):
            first.call(plain, whole, f, *args, **kwargs)
        else:  # a file that is open, on every rank its own
            plain(whole, f, *args, **kwargs)

    return save


def _unmarked(value: Any) -> Any:
    """Parameters and modules in a structure without the marks and hooks that this library has put on them."""
    if isinstance(value, Mapping) and any(isinstance(item, nn.Module) for item in value.values()):
        return {key: _unmarked(item) for key, item in value.items()}
    if isinstance(value, nn.Module):
        twin = copy.deepcopy(value)
        for module in twin.modules():
            remove_hooks(module, lambda hook: str(getattr(hook, "__module__", "")).startswith("halocline."))
            _drop_marks(module)
            for parameter in module.parameters(recurse=False):
                _drop_marks(parameter)
        return twin
    return map_tensors(_unmarked_leaf, value)


def _unmarked_leaf(tensor: Tensor) -> Tensor:
    """Without the attributes that Halocline sets, which would be pickled, and read where it is not installed."""
    if not any(name.startswith("_halocline") for name in vars(tensor)):
        return tensor
    bare = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(bare, tensor.requires_grad)
    return bare.requires_grad_(tensor.requires_grad)


def _drop_marks(thing: Any) -> None:
    """Remove the attributes that this library has set."""
    for name in [name for name in vars(thing) if name.startswith("_halocline")]:
        del vars(thing)[name]


class Opening:
    """``open`` for a script on many ranks. Reading stays as it is."""

    def __init__(self, first: FirstRank, private: Path, plain: Callable[..., Any]) -> None:
        self._first, self._private, self._plain, self._count = first, private, plain, 0

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or not self._first.together or _is_no_output(file):
            return self._plain(file, mode, *args, **kwargs)
        copy = None if self._first.is_first else self._copied(file, mode)
        opened: list[Any] = []
        # Rank 0 first: if it fails there, all ranks raise.
        self._first.call(lambda: opened.append(self._open(file, mode, *args, **kwargs)))
        return opened[0] if copy is None else self._open(copy, mode, *args, **kwargs)

    def _copied(self, file: Any, mode: str) -> Path:
        """A file of this rank's own, with the contents of the shared one if the mode keeps them."""
        self._count += 1
        copy = self._private / str(self._count)
        if set(mode) & set("ar") and os.path.exists(file):  # noqa: PTH110 - anything that open takes
            with self._plain(file, "rb") as source, self._plain(copy, "wb") as target:
                shutil.copyfileobj(source, target)
        return copy

    def _open(
        self,
        file: Any,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """As Python's own ``open``, on a file whose ``close`` waits for all ranks."""
        raw = SharedFile(file, "".join(sorted(set(mode) - set("bt"))), closefd, opener)
        raw.first = self._first
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)


class SharedFile(io.FileIO):
    """A file that a script writes: once it is closed, all ranks can read what rank 0 wrote."""

    first: FirstRank | None = None

    def close(self) -> None:
        """Close it, and wait for all ranks."""
        was_open = not self.closed
        super().close()
        if was_open and self.first is not None and self.first.together:
            self.first.wait()
