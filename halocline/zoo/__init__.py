"""Networks that others wrote, unchanged: proof that ordinary networks run cut.

    halocline check --zoo monai --ranks 2

Each zoo needs the package of its networks, which is imported only when a network is built. Entries are data: every rank
builds the network whose name it is told, from the same seed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HaloclineError, did_you_mean

Input = tuple[int, ...] | Tensor
ZOOS = {name: f"halocline.zoo.{name}:ZOO" for name in ("monai", "transformers", "neuralop", "losses")}


class NoSuchNetwork(HaloclineError, LookupError):
    """A zoo, or a network in it, that is not there. The message says which are."""


class NotInstalled(HaloclineError, ImportError):
    """The package of a zoo's networks is missing."""


@dataclass(frozen=True)
class ZooEntry:
    """A network (or a loss, a metric) and what goes into it.

    ``build`` gets the zoo's package and returns the network. An input is a shape, for normal numbers, or a tensor; the
    first input is the volume to cut. ``dtype`` is float32 for what fails in float64 even uncut.
    """

    name: str
    build: Callable[[Any], nn.Module]
    inputs: tuple[Input, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all inputs."""
        return tuple(tuple(one.shape) if isinstance(one, Tensor) else one for one in self.inputs)


@dataclass(frozen=True)
class Zoo:
    """A collection of networks from one package.

    ``library`` is the module that ``ZooEntry.build`` is given, ``extra`` the optional dependency to install for it.
    ``alone`` are packages to install without their own dependencies, which the networks do not need.
    """

    name: str
    library: str
    entries: tuple[ZooEntry, ...]
    extra: str = ""
    alone: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of all networks, in order."""
        return [entry.name for entry in self.entries]

    def __getitem__(self, name: str) -> ZooEntry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        hint = did_you_mean(name, self.names)
        raise NoSuchNetwork(f"no network {name!r} in the zoo {self.name}{hint}; it has {', '.join(self.names)}")

    def package(self) -> ModuleType:
        """The imported package, or an error that says how to install it."""
        try:
            return importlib.import_module(self.library)
        except ImportError as error:
            raise NotInstalled(f"the zoo {self.name} needs {self.library} ({error}){self._how()}") from error

    def _how(self) -> str:
        """The command that installs the package, for the error."""
        if not self.extra:
            return ""
        alone = f" && pip install -c constraints.txt --no-deps {' '.join(self.alone)}" if self.alone else ""
        return f"; install it with: pip install -c constraints.txt -e '.[{self.extra}]'{alone}"

    def build(self, name: str) -> nn.Module:
        """A network by its name, with noise in parameters that start at zero."""
        return prepare(self[name].build(self.package()))


def find_zoo(name: str) -> Zoo:
    """A zoo of the library by its name, or a user's own by ``package.module:zoo``.

    Raises NoSuchNetwork where there is none, or where what is there is not a Zoo.
    """
    try:
        zoo = load(ZOOS.get(name, name))
    except (ImportError, AttributeError, ValueError) as error:
        hint = did_you_mean(name, ZOOS)
        raise NoSuchNetwork(
            f"no zoo {name!r}{hint}; it is {', '.join(ZOOS)}, or package.module:zoo ({error})"
        ) from error
    if not isinstance(zoo, Zoo):
        raise NoSuchNetwork(f"{name} is a {type(zoo).__name__}; it must be a halocline.zoo.Zoo")
    return zoo


def load(place: str) -> Any:
    """The object that ``package.module:name`` names, as seen from the current folder.

    Raises ImportError, AttributeError or ValueError where it is not there.
    """
    module, _, attribute = place.partition(":")
    folder = str(Path.cwd())
    # As ``python -m`` does, so that a user's own module is found.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module), attribute)


def split(target: str) -> tuple[str, str] | None:
    """Zoo and network of ``zoo/network``; None if the target is no such thing.

    >>> split("monai/UNet"), split("unet3d")
    (('monai', 'UNet'), None)
    """
    zoo, slash, network = target.partition("/")
    return (zoo, network) if slash else None


def entry_of(target: str) -> ZooEntry | None:
    """The entry of ``zoo/network``; None for targets that are no such thing."""
    parts = split(target)
    return find_zoo(parts[0])[parts[1]] if parts else None


def draw(inputs: Sequence[Input], generator: torch.Generator) -> list[Tensor]:
    """The inputs of a network: normal numbers for shapes, copies of tensors."""
    return [one.clone() if isinstance(one, Tensor) else torch.randn(one, generator=generator) for one in inputs]


def prepare(network: nn.Module) -> nn.Module:
    """Put small noise into parameters that start at zero: behind them gradients
    vanish, and any two runs would agree.
    """
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(std=0.02)
    return network
