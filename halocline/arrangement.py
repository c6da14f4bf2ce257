"""How a network and its samples lie on the ranks: what a plan decides, as plain data, applied to a model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .choices import Choices
from .errors import MeshError, PlanError, did_you_mean
from .rules import cut_like, shard
from .rules.annotate import annotate
from .rules.checkpoint_halos import keep_halos
from .tensor import ShardedTensor, Sharding
from .tree import map_tensors
from .world import Mesh, this_world

#: Letters of dims, and the mesh axis that cuts each. Axes of other kinds (of a model, of stages) join here.
AXIS_OF_LETTER = {"N": "data", "D": "depth", "H": "height", "W": "width"}
DATA = "data"


def axis_meant(name: str, axes: Iterable[str]) -> str:
    """A hint at the axis that was meant by a name, for an error message: the axis of a letter, or one spelt alike.

    >>> axis_meant("D", ["data", "depth"]), axis_meant("dept", ["data", "depth"])
    (' (write depth: D is the letter of files)', ' (did you mean depth?)')
    """
    known = list(axes)
    axis = AXIS_OF_LETTER.get(name, "")
    return f" (write {axis}: {name} is the letter of files)" if axis in known else did_you_mean(name, known)


class Arranged(Protocol):
    """Anything that holds an arrangement: a plan, or an arrangement itself."""

    @property
    def arrangement(self) -> Arrangement: ...


@dataclass(frozen=True)
class Arrangement:
    """Mesh, cut points, choices, and the modules that gather or recompute.

    ``points`` are by mesh axis; an axis without points is cut as evenly as can be, at multiples of ``multiple``. From
    the modules of ``gather`` on, samples are whole on every rank of the spatial axes. The modules of ``recompute`` keep
    no activations, but what they receive from other ranks. ``fingerprint`` is that of the network it is for.
    ``layout`` names the parameters that are cut, as :func:`halocline.distribute` takes it.
    """

    sizes: Mapping[str, int]
    points: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    multiple: int = 1
    choices: Choices = field(default_factory=Choices)
    gather: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    fingerprint: str | None = None
    layout: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def arrangement(self) -> Arrangement:
        """Itself, so that a plan and an arrangement are used alike."""
        return self

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Such as "data=4 depth=2": axes of one rank are left out."""
        words = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1] or ["one device"]
        words += [f"{axis} at {','.join(map(str, at[1:-1]))}" for axis, at in self.points.items()]
        words += [f"at multiples of {self.multiple}"] if self.multiple > 1 else []
        words += [f"gather {name}" for name in self.gather]
        words += [f"recompute {name}" for name in self.recompute]
        words += [f"cut {name} {dict(dims)}" for name, dims in self.layout.items()]
        return " ".join(words)

    def mesh(self) -> Mesh:
        """The mesh over the ranks of this run. Calls give equal meshes."""
        ranks = this_world().size
        if ranks != self.ranks:
            raise PlanError(
                f"the plan {self} is for {self.ranks} ranks, and this run has {ranks}; start {self.ranks} ranks, or "
                "make a plan for this number"
            )
        return Mesh(self.choices, **self.sizes)

    def cut(self, letters: str) -> dict[int, str]:
        """Which mesh axis cuts which dim of a tensor with these dims, such as "NCDHW"."""
        return {
            dim: AXIS_OF_LETTER[letter]
            for dim, letter in enumerate(letters)
            if AXIS_OF_LETTER.get(letter, "") in self.sizes
        }

    def cut_letters(self) -> dict[str, str]:
        """The mesh axis of each letter, as :class:`halocline.data.Loader` takes it."""
        return {letter: axis for letter, axis in AXIS_OF_LETTER.items() if axis in self.sizes}

    def letter_points(self) -> dict[str, tuple[int, ...]]:
        """Cut points by letter, as :class:`halocline.data.Loader` takes them."""
        return {letter: self.points[axis] for letter, axis in AXIS_OF_LETTER.items() if axis in self.points}

    def shard(self, tensor: Tensor, letters: str) -> Tensor:
        """A tensor that every rank holds whole, cut as planned; ``letters`` names its dims, such as "NCDHW"."""
        if len(letters) != tensor.ndim:
            raise PlanError(f"a tensor of {tensor.ndim} dims needs as many letters, and {letters!r} has {len(letters)}")
        dims = self.cut(letters)
        points = {dim: self.points[axis] for dim, axis in dims.items() if axis in self.points}
        return shard(tensor, self.mesh(), dims, points=points, multiple=self.multiple)

    def check(self, model: nn.Module) -> None:
        """Raise unless ``model`` is the network that was planned for."""
        if self.fingerprint is not None and fingerprint(model) != self.fingerprint:
            raise PlanError(
                f"the plan {self} was made for another network: this {type(model).__name__} has other parameters; plan "
                "for this one, with the arguments it has here"
            )
        missing = [path for path in (*self.gather, *self.recompute) if path not in dict(model.named_modules())]
        if missing:
            raise PlanError(f"the plan names the module {missing[0]!r}, which {type(model).__name__} does not have")

    def apply(self, model: nn.Module) -> None:
        """Let the named modules gather and recompute. Called once, before :func:`halocline.distribute` returns."""
        for path in self.gather:
            model.get_submodule(path).register_forward_pre_hook(_gather_sample, with_kwargs=True)
        for path in self.recompute:
            _recompute(model.get_submodule(path))


def apply_choices(model: nn.Module, choices: Choices) -> None:
    """Let the modules that ``choices.at`` names cut and recompute. Called once, by :func:`halocline.distribute`."""
    if choices.cut is not None or choices.recompute:
        raise MeshError("Choices of cut and recompute are for a module: hc.Choices(at={'encoder.3': hc.Choices(...)})")
    for path, own in choices.at.items():
        if own.cut is None and not own.recompute:
            continue
        module = dict(model.named_modules()).get(path)
        if module is None:
            raise MeshError(f"Choices name the module {path!r}, which {type(model).__name__} does not have")
        if own.cut is not None:
            module.register_forward_pre_hook(_EnteringCut(own.cut), with_kwargs=True)
        if own.recompute:
            _recompute(module)


def _recompute(module: nn.Module) -> None:
    module.forward = _Recomputed(module, module.forward)


class _EnteringCut:
    """A hook before forward: sharded tensors that enter a module take a cut of the module's own."""

    def __init__(self, dims: Mapping[int, str]) -> None:
        self.dims = dims

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(self._recut, (args, kwargs))

    def _recut(self, tensor: Tensor) -> Tensor:
        return annotate(tensor, self.dims) if isinstance(tensor, ShardedTensor) else tensor


def fingerprint(model: nn.Module) -> str:
    """The same for networks with the same names and shapes of parameters."""
    text = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gather_sample(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A hook before forward: samples become whole on every rank that shares them; the batch stays cut."""
    return map_tensors(_with_whole_samples, (args, kwargs))


def _with_whole_samples(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor
    old = tensor.sharding
    cuts = [cut if cut is not None and cut.axis == DATA else None for cut in old.cuts]
    return cut_like(tensor, Sharding(old.mesh, old.shape, cuts))


class _Recomputed:
    """A module's forward under torch's checkpoint: exchanges nothing again, and updates running statistics once."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        context = partial(_contexts, self.module)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first, again = keep_halos()
    return first, _recomputing(module, again)


@contextmanager
def _recomputing(module: nn.Module, halos: AbstractContextManager[None]) -> Iterator[None]:
    norms: list[Any] = [part for part in module.modules() if getattr(part, "track_running_stats", False)]
    tracked = [norm for norm in norms if norm.training]
    for norm in tracked:
        norm.track_running_stats = False  # in training it normalises by the batch either way
    try:
        with halos:
            yield
    finally:
        for norm in tracked:
            norm.track_running_stats = True
