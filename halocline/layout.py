"""Which parameters are cut over which mesh axes: patterns of names, applied to a model in place.

A cut parameter stays the same object, is a Parameter with a :class:`Sharding`, and holds this rank's tile alone. Models
built on the meta device are filled tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ._torch_private import initializer
from .errors import MeshError, Refused, ShardingError
from .geometry import slices
from .random import reproducible
from .reduction import is_dtensor
from .tensor import ShardedTensor, Sharding, become_cut, make_sharding
from .world import Mesh, placement_of

#: By pattern of parameter names (as fnmatch takes them): the mesh axis of each dim that is cut.
Layout = Mapping[str, Mapping[int, str]]
#: Layouts chosen by cost: of the least predicted time, and of the least memory.
AUTO_LAYOUTS = ("auto", "auto-memory")


def layout_of(model: nn.Module, mesh: Mesh, layout: Layout) -> dict[str, Sharding]:
    """The sharding of each parameter that ``layout`` cuts, by name. Of several patterns that match, the last decides.

    MeshError for a pattern that matches nothing, for dims that a parameter does not have, and for two names of one
    parameter that are cut differently.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    cuts: dict[str, Mapping[int, str]] = {}
    for pattern, dims in _checked(layout).items():
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise MeshError(f"layout: no parameter is called {pattern!r}; {_nearest(pattern, list(named))}")
        cuts |= dict.fromkeys(matching, dims)
    shardings = {name: _sharding(name, named[name], mesh, dims) for name, dims in cuts.items()}
    return _untied(named, {name: sharding for name, sharding in shardings.items() if sharding.axes})


def _checked(layout: Layout) -> Layout:
    if not isinstance(layout, Mapping) or not all(isinstance(dims, Mapping) for dims in layout.values()):
        raise MeshError(
            f"layout maps patterns of parameter names to {{dim: axis}}, such as {{'*.weight': {{0: 'model'}}}}; it was "
            f"given {layout!r}"
        )
    return layout


def _nearest(pattern: str, names: list[str]) -> str:
    near = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return f"the nearest are {', '.join(near)}" if near else "the model has none"


def _sharding(name: str, parameter: Tensor, mesh: Mesh, dims: Mapping[int, str]) -> Sharding:
    if is_dtensor(parameter) or placement_of(parameter):
        raise MeshError(
            f"layout: {name} lies on the ranks already (a DTensor, or placed); leave it out of the layout, "
            "or hand it to fully_shard in ignored_params"
        )
    try:
        return make_sharding(mesh, tuple(parameter.shape), dims)
    except (ShardingError, MeshError) as error:
        raise MeshError(
            f"layout: {name} of shape {list(parameter.shape)} cannot be cut as {dict(dims)}: {error}"
        ) from error


def _untied(named: Mapping[str, Tensor], shardings: dict[str, Sharding]) -> dict[str, Sharding]:
    """One name for each parameter; raises where its names are cut differently."""
    first: dict[int, str] = {}
    for name, parameter in named.items():
        other = first.setdefault(id(parameter), name)
        given = [shardings[each] for each in (other, name) if each in shardings]
        if len(given) == 2 and given[0] is not given[1]:
            raise MeshError(f"layout: {other} and {name} are one parameter, and are cut differently; cut both alike")
        if given:
            shardings[other] = given[0]
    return {name: sharding for name, sharding in shardings.items() if first[id(named[name])] == name}


def cut_parameters(model: nn.Module, shardings: Mapping[str, Sharding]) -> None:
    """Let each rank keep its tile of these parameters, which it holds whole, or as shapes on meta."""
    named = dict(model.named_parameters())
    for name, sharding in shardings.items():
        parameter = named[name]
        if parameter.is_meta:
            tile = torch.empty(sharding.tile_shape, dtype=parameter.dtype, device="meta")
        else:
            tile = parameter.detach()[slices(sharding.box)].clone(memory_format=torch.contiguous_format)
        become_cut(parameter, tile, sharding, name)


def fill_meta(model: nn.Module, shardings: Mapping[str, Sharding]) -> None:
    """Cut the parameters of a model built on meta, and fill them by their modules' ``reset_parameters``.

    Each rank has memory for its tiles alone, on torch's default device. Numbers are drawn by global index from the
    library's generator, so that every layout begins with the values that one rank draws under
    ``hc.random.reproducible``.
    """
    modules = {name: module for name, module in model.named_modules() if any(t.is_meta for t in _own_tensors(module))}
    for name, module in modules.items():
        if initializer(module) is None:
            raise Refused(
                "hc.distribute",
                name or type(module).__name__,
                f"its tensors are on the meta device, and a {type(module).__name__} has no reset_parameters to fill "
                "them with",
                "give the module that method, or build it on a real device",
            )
    device, named = torch.get_default_device(), dict(model.named_parameters())
    for name, sharding in shardings.items():
        if named[name].is_meta:
            tile = torch.empty(sharding.tile_shape, dtype=named[name].dtype, device=device)
            become_cut(named[name], tile, sharding, name)
    for module in modules.values():
        _materialize(module, device)
    with reproducible(), torch.no_grad():
        for module in modules.values():
            initializer(module)()  # type: ignore[misc]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Memory without values for what is on meta. Parameters stay the same objects."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            fresh = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)


def cut_share(model: nn.Module) -> float:
    """The share of the parameters' bytes that is cut, counted as one rank would hold them."""
    sizes = [(p.numel() * p.element_size(), isinstance(p, ShardedTensor)) for p in model.parameters()]
    return sum(size for size, cut in sizes if cut) / max(1, sum(size for size, _ in sizes))
