"""Refuses scripts that ask which rank they are: such a script does different things on different ranks.

The variables of launchers are hidden from a script, so that code for one or many devices takes its path for one. A
script that asks for its own rank, or joins ranks by itself, is refused by name.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, MutableMapping
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ..errors import Refused
from .patches import Patches

_RANKS = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "PMIX_RANK"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    )
)
_HIDDEN = frozenset(
    (
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
        *("SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    )
)
#: Code of these packages works for all ranks.
_INSIDERS = ("halocline", "torch", "subprocess")
_PASSING = ("os", "collections.abc", "_collections_abc", __name__)  # whose functions only pass the question on
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_REFUSED = (
    *("init_process_group", "get_rank", "get_world_size", "new_group", "all_reduce", "all_gather", "broadcast"),
    *("reduce", "reduce_scatter", "all_to_all", "barrier", "gather", "scatter", "send", "recv", "all_gather_object"),
)
_REMEDY = "remove it, or start the script with torchrun instead of halocline run"


def _asker() -> str:
    """Who asks: "library" for torch and this one, "package" for another installed one, else "script"."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") in _PASSING:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDERS:
        return "library"
    return "package" if frame.f_code.co_filename.startswith(_INSTALLED) else "script"


class GuardedEnvironment(MutableMapping[str, str]):
    """``os.environ`` as a script on one device would find it."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def _visible(self, name: str) -> bool:
        """Would the variable be there on one device?"""
        return name not in _HIDDEN and name not in _RANKS

    def __getitem__(self, name: str) -> str:
        if not self._visible(name):
            asker = _asker()
            if asker == "script" and name in _RANKS:
                raise _refusal(f"os.environ[{name!r}]", "the script asks which rank it is, and would act by it")
            if asker != "library":
                raise KeyError(name)
        return self._plain[name]

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def __setitem__(self, name: str, value: str) -> None:
        self._plain[name] = value

    def __delitem__(self, name: str) -> None:
        del self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._plain if self._visible(name)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def copy(self) -> dict[str, str]:
        """A dict of what is visible."""
        return {name: self._plain[name] for name in self}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _refusal(operation: str, why: str) -> Refused:
    return Refused(operation, "the script", why, _REMEDY)


def guard_rank(patches: Patches) -> None:
    """From now on, a script cannot tell its rank."""
    patches.replace(os, "environ", GuardedEnvironment)
    patches.replace(dist, "is_initialized", _hidden)
    for name in _REFUSED:
        patches.replace(dist, name, partial(_guarded, name=f"torch.distributed.{name}"))
    for kind in (DistributedSampler, DistributedDataParallel):
        patches.replace(kind, "__init__", partial(_guarded, name=kind.__name__))


def _guarded(plain: Any, name: str) -> Any:
    """A function that scripts may not call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _asker() != "library":
            raise _refusal(name, "the script divides its work among ranks by itself, which halocline run does")
        return plain(*args, **kwargs)

    return call


def _hidden(plain: Any) -> Any:
    """Have ranks joined? Not as far as a script can see."""

    def is_initialized() -> bool:
        return _asker() == "library" and bool(plain())

    return is_initialized
