"""Make a model one of the mesh: same weights everywhere, gradients averaged, places known by name."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch_private import BatchNormBase
from .arrangement import Arranged, apply_choices
from .errors import MeshError, Refused
from .kernels import SizeWatch
from .layout import Layout, cut_parameters, fill_meta, layout_of
from .model_hooks import NewParameters, SameInputs, SharedBuffers
from .own_collectives import watch_collectives
from .random import same_state, watch_draws
from .reduction import (
    ENGINE,
    GradientAverage,
    GradientCompression,
    Lag,
    NextForwardOverlap,
    is_dtensor,
    parameters_to_average,
    rings_for,
    settle_own,
    share_weights,
)
from .row_tables import row_tables, step_on_tiles
from .rules.annotate import remember_mesh
from .rules.families.norm import STATISTICS
from .tensor import ShardedTensor, Sharding, watch
from .world import Label, Mesh, place_buffers, placement_of, this_rank_info

Model = TypeVar("Model", bound=nn.Module)


class _Alone:
    """Nobody: the model is on one device. A copy belongs nowhere, as that of any distributed model."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def distribute(
    model: Model,
    mesh: Mesh | None = None,
    *,
    plan: Arranged | None = None,
    batch_statistics: str = "global",
    averaging: str = "own",
    buckets: Sequence[Sequence[str]] | None = None,
    overlap: str = "backward",
    optimizer: Any = None,
    lag: int = 0,
    wire: str | None = None,
    rings: str | Sequence[int] = "usual",
    deterministic: bool | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    layout: Layout | str | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Model:
    """The same module with the same state_dict, made part of ``mesh``.

        mesh = hc.Mesh(data=2, depth=2)
        model = hc.distribute(Net(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = criterion(model(hc.shard(x, mesh, {0: "data", 2: "depth"})), y)
        loss.backward()                                      # gradients are averaged over all ranks
        optimizer.step()

    ``plan``, instead of a mesh, is what ``hc.plan`` returned or ``hc.load_plan`` read: it makes the mesh
    (``plan.mesh()`` gives it), and ``plan.shard(x, "NCDHW")`` cuts tensors for it.

    Without either, for one device: on plain tensors nothing changes but that GPU work on operands too large for the
    fast kernels (2^31 elements) goes to them in chunks. On a mesh each rank's tiles are treated so too. Kernels are
    replaced, for the whole process, when the first such operand comes in sight; the log says so.

    Rank 0's parameters and buffers go to every rank, and after each backward every parameter's gradient is its mean
    over all ranks. ``batch_statistics``: batch norm over the whole global batch ("global"), or over each data
    replica's batch as DDP has it ("replica").

    Gradients travel while backward runs, in buckets that follow from when they are ready and what a message costs.
    ``buckets`` (lists of parameter names) replaces those; ``groups`` is its deprecated name.

    What is not there when backward ends is waited for, unless ``overlap="next-forward"``: then it goes on into the next
    forward, and each layer waits for its own. ``optimizer`` (or several) is to be handed in for it, since its step is
    made in parts, each just before it is needed; the result is the same. ``lag=1`` instead applies every gradient one
    step late, the first step none: another algorithm, that hides all communication.

    ``wire``: "bf16" or "fp16" (scaled) rounds gradients on the way, to half the bytes, "fp32" those of float64; None
    sends them as they are. ``rings``: how a sum travels: "flat" as torch does it; "levels" over nodes and the ranks of
    each, or factors such as (2, 4); "auto" what was measured to be fastest for its size. As is "usual", sums go flat;
    those that go on after backward over levels, between CPUs, where the most urgent can go first.

    ``deterministic``: what is summed together follows from sizes and the order in which gradients come, and not from
    measured times, so that equal runs give equal bits on any number of ranks. By default where all parameters are
    float64.

    ``layout`` cuts parameters too, by patterns of their names: ``{"encoder.*.weight": {0: "model"}}`` lets each rank of
    axis ``model`` hold its rows of these weights, of their gradients and of the optimizer's state; the last pattern
    that matches decides. A model built on the meta device is filled tile by tile. ``layout="auto"`` chooses by
    predicted cost which weights are cut over the axes that cut no input, at least half of their bytes;
    ``"auto-memory"`` by the peak of memory. ``inputs`` are what the model will be called with, by position or by name,
    cut as they will be.

    A model may come in DistributedDataParallel, or with ``fully_shard`` (FSDP2) on it, over all ranks: the gradients
    of their parameters are left to them. With ``averaging="external"`` so are all others, to whoever the caller has
    take that mean.
    """
    if not isinstance(model, nn.Module) or not isinstance(mesh, Mesh | None):
        raise MeshError(
            f"hc.distribute takes a torch.nn.Module, then a mesh: hc.distribute(model, mesh); it was given a "
            f"{type(model).__name__} and a {type(mesh).__name__}"
        )
    if batch_statistics not in ("global", "replica"):
        raise MeshError(f"batch_statistics is 'global' or 'replica', not {batch_statistics!r}")
    if averaging not in ("own", "external"):
        raise MeshError(f"averaging is 'own' or 'external', not {averaging!r}")
    _check_overlap(overlap, optimizer, lag, averaging)
    if wire == "fp16" and overlap == "next-forward":
        raise MeshError("what leaves the range of fp16 is sent again by all ranks together; with next-forward use bf16")
    if model.__dict__.get(ENGINE) is not None:
        raise MeshError(f"this {type(model).__name__} is distributed already; distribute a model once")
    _check_initialized(model)
    if plan is not None:
        if mesh is not None:
            raise MeshError("hc.distribute takes a mesh or a plan, which makes its own mesh; leave one of them out")
        plan.arrangement.check(model)
        mesh, layout = plan.arrangement.mesh(), plan.arrangement.layout if layout is None else layout
        plan.arrangement.apply(model)
    if mesh is None:
        _check_alone()
        model.__dict__[ENGINE] = _Alone()
        _watch_sizes(model)
        return model
    apply_choices(model, mesh.choices)
    _watch_sizes(model)
    place_buffers(model)
    if isinstance(layout, str):
        layout = _chosen_layout(model, mesh, layout, inputs)
    shardings = layout_of(model, mesh, layout or {})
    _check_same_model(model, mesh, shardings)
    same_state(mesh.world)
    _share_and_cut(model, mesh, shardings)
    watch(model)
    remember_mesh(model, mesh)
    by_rows = row_tables(model, shardings)  # their ranks may look up different samples
    cut_axes = frozenset(axis for name, sharding in shardings.items() if name not in by_rows for axis in sharding.axes)
    if by_rows:
        step_on_tiles()
    if mesh.size > 1:
        watch_draws(model, mesh, cut_axes)
    if cut_axes:
        model.register_forward_pre_hook(SameInputs(mesh, cut_axes), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, BatchNormBase):
            setattr(module, STATISTICS, batch_statistics)
    averaged, placed = parameters_to_average(model, mesh, averaging)
    if lag and any(placement_of(parameter) for parameter in model.parameters()):
        raise MeshError("lag=1 takes parameters that are whole on all axes; place_parameter has placed others")
    indices = _as_indices(_renamed(buckets, groups), [name for name, _ in averaged])
    ahead = overlap == "next-forward"
    tensors = [parameter for _, parameter in averaged]
    fixed = all(t.dtype == torch.float64 for t in tensors) if deterministic is None else deterministic
    travels = rings_for(mesh.world, rings, tensors, goes_on=bool(lag) or ahead, urgent=ahead, measure=not fixed)
    engine = GradientAverage(
        averaged, mesh.world, indices, compression=GradientCompression(wire), rings=travels, deterministic=fixed
    )
    model.__dict__[ENGINE] = engine
    engine.partners = [
        GradientAverage(some, mesh.world, compression=GradientCompression(wire), deterministic=fixed, ranks=ranks)
        for ranks, some in placed.items()
    ]
    if lag:
        engine.overlap = Lag(engine)
    elif overlap == "next-forward":
        _settle_before_forward(model)
        engine.overlap = NextForwardOverlap(engine, optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
    if averaging == "own":
        engine.model = weakref.ref(model)
        model.register_forward_pre_hook(NewParameters(engine))
    if next(model.buffers(), None) is not None:
        model.register_forward_pre_hook(SharedBuffers(mesh), with_kwargs=True)
    watch_collectives(model)
    return model


def _check_initialized(model: nn.Module) -> None:
    lazy = next((name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise Refused(
            "hc.distribute",
            lazy,
            "this parameter of a lazy module has no shape yet, so ranks cannot agree on its values",
            "call the model once on a small plain tensor on every rank before hc.distribute",
        )


def _check_overlap(overlap: str, optimizer: Any, lag: int, averaging: str) -> None:
    if overlap not in ("backward", "next-forward"):
        raise MeshError(f"overlap is 'backward' or 'next-forward', not {overlap!r}")
    if lag not in (0, 1):
        raise MeshError(f"lag is 0 or 1, not {lag!r}")
    if overlap == "next-forward" and optimizer is None:
        raise MeshError("overlap='next-forward' makes the optimizer's step in parts: hand it in with optimizer=...")
    if overlap == "backward" and optimizer is not None:
        raise MeshError("an optimizer is handed in for overlap='next-forward' alone")
    if (lag or overlap == "next-forward") and averaging == "external":
        raise MeshError(
            "lag and overlap='next-forward' are ways in which the library averages; averaging is 'external'"
        )
    if lag and overlap == "next-forward":
        raise MeshError("with lag=1 nothing is waited for in the next forward; leave overlap as it is")


def _settle_before_forward(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise MeshError("overlap='next-forward': a scripted module reads its parameters past Python")
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(settle_own, prepend=True)


def flush(model: nn.Module) -> None:
    """Wait for all gradients that are under way, and make the optimizer steps that were asked for.

    Whoever touches a parameter or a gradient in Python does so by himself; this is for those who reach them otherwise:
    an alias of a parameter's memory made before, a scripted module, the optimizer's ``state``.
    """
    engine = model.__dict__.get(ENGINE)
    if engine is None:
        raise MeshError("hc.flush wants a model that hc.distribute returned")
    if isinstance(engine, GradientAverage) and engine.overlap is not None:
        engine.overlap.finish()


def _lag_of(model: nn.Module) -> Lag:
    engine = model.__dict__.get(ENGINE)
    if not isinstance(engine, GradientAverage) or not isinstance(engine.overlap, Lag):
        raise MeshError("this model was not distributed with lag=1")
    return engine.overlap


def lagged_gradients(model: nn.Module) -> dict[str, Tensor]:
    """With ``lag=1``: what the next step will apply, by parameter, for a checkpoint. By all ranks together."""
    return _lag_of(model).state()


def load_lagged_gradients(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Go on where :func:`lagged_gradients` was asked; with nothing in it, the next step applies none."""
    _lag_of(model).load(state)


def _watch_sizes(model: nn.Module) -> None:
    watch = SizeWatch()
    model.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True)
    model.register_forward_hook(watch.after, with_kwargs=True, always_call=True)


def _check_alone() -> None:
    started = this_rank_info()
    ranks = started.size if started is not None and started.by == "torchrun" else 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
    if ranks > 1:
        raise MeshError(
            f"hc.distribute(model) without a mesh is for one device, and this is one of {ranks} ranks; "
            "give it a mesh, such as hc.Mesh(data=-1)"
        )


Buckets = Sequence[Sequence[str]]


def _renamed(buckets: Buckets | None, groups: Buckets | None) -> Buckets | None:
    if groups is not None:
        warnings.warn("hc.distribute(groups=...) is called buckets=... now", DeprecationWarning, stacklevel=3)
    return groups if buckets is None else buckets


def _as_indices(buckets: Buckets | None, names: list[str]) -> list[list[int]] | None:
    if buckets is None:
        return None
    unknown = [name for bucket in buckets for name in bucket if name not in names]
    if unknown:
        raise MeshError(f"buckets: no averaged parameter is called {unknown[0]!r}; they are {', '.join(names)}")
    return [[names.index(name) for name in bucket] for bucket in buckets]


def average_gradients(tensors: Iterable[Tensor], mesh: Mesh) -> None:
    """Average the gradients of leaves that belong to no distributed model: a learned scale, the weight of a loss."""
    leaves = list(tensors)
    if any(not (leaf.is_leaf and leaf.requires_grad) for leaf in leaves):
        raise MeshError("hc.average_gradients wants leaves that require a gradient")
    engine = GradientAverage([(f"leaf {index}", leaf) for index, leaf in enumerate(leaves)], mesh.world)
    for leaf in leaves:
        leaf._halocline_engine = engine  # type: ignore[attr-defined]


def _chosen_layout(model: nn.Module, mesh: Mesh, kind: str, inputs: Sequence[Any] | Mapping[str, Any] | None) -> Layout:
    # The planner stands above this module: it distributes the models that it records.
    choose = import_module(".plan.auto_layout", __package__).choose_for
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs or ()), {})
    chosen: Layout = choose(model, mesh, kind, args, kwargs).layout
    return chosen


def _share_and_cut(model: nn.Module, mesh: Mesh, shardings: Mapping[str, Sharding]) -> None:
    """Rank 0's values on every rank, of which each keeps its tile. By all ranks together."""
    if mesh.world.capabilities.moves_data and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        fill_meta(model, shardings)
    shared = [t for t in (*model.parameters(), *model.buffers()) if not (is_dtensor(t) or isinstance(t, ShardedTensor))]
    share_weights(shared, mesh)
    here = dict(model.named_parameters())
    cut_parameters(model, {name: s for name, s in shardings.items() if not isinstance(here[name], ShardedTensor)})


def _check_same_model(model: nn.Module, mesh: Mesh, shardings: Mapping[str, Sharding]) -> None:
    """Every rank must bring the same parameter and buffer names, shapes and dtypes, choices and layout."""
    named = [*model.named_parameters(), *model.named_buffers()]
    layout = {name: sharding.dims_by_axis() for name, sharding in shardings.items()}
    text = "\n".join([f"{mesh.choices} {layout}", *(f"{name} {_shape_of(t)} {t.dtype}" for name, t in named)])
    # On the CPU by name: the user may have set another default device.
    mine = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32, device="cpu")
    everyone, label = tuple(range(mesh.size)), Label("model check", "distribute")
    differs = (mine != mesh.world.broadcast(mine, everyone, label)).any().view(1).to(torch.uint8)
    if mesh.world.maximum(differs, everyone, label).item():
        raise MeshError(
            f"rank {mesh.rank}: the ranks bring different {type(model).__name__}s "
            f"(this one has {len(named)} parameters and buffers, {len(layout)} of them cut, and {mesh.choices}); build "
            "the same model on every rank, on a mesh with the same choices, with the same layout"
        )


def _shape_of(tensor: Tensor) -> str:
    """What must be the same on all ranks: the parts of a cut parameter may have different shapes."""
    placement = placement_of(tensor)
    return f"{placement}" if "cut" in placement.values() else f"{tuple(tensor.shape)} {placement}"


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients pile up on each rank unaveraged; the first backward outside averages the pile."""
    average: GradientAverage | _Alone | None = model.__dict__.get(ENGINE)
    if average is None:
        raise MeshError("hc.no_sync wants a model that hc.distribute returned")
    if isinstance(average, _Alone):
        yield
        return
    if not average.parameters and not average.partners:
        raise MeshError("hc.no_sync finds no parameter that the library averages; ask whoever averages them to wait")
    with average.paused():
        yield
