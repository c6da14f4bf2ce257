"""The parameters and buffers that one lane of ranks holds, under the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import MeshError
from ..layout import Layout
from ..reduction import ENGINE
from ..row_tables import LOOKS_UP, looks_up_rows
from ..world import placement_of


class PartOfModel(nn.Module):
    """Modules without a forward, as deep as the model's, that hold some of its parameters and buffers."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        persistent = set(model.state_dict(keep_vars=True))
        self._tables = {path for path, module in model.named_modules() if looks_up_rows(module)}
        for name, parameter in model.named_parameters():
            if name in names:
                self._home(name).register_parameter(name.rpartition(".")[2], parameter)
        for name, buffer in model.named_buffers():
            if name in names:
                self._home(name).register_buffer(name.rpartition(".")[2], buffer, persistent=name in persistent)

    def _home(self, name: str) -> nn.Module:
        home: nn.Module = self
        path = name.rpartition(".")[0]
        for step in path.split(".") if path else ():
            if step not in dict(home.named_children()):
                home.add_module(step, nn.Module())
            home = home.get_submodule(step)
        if path in self._tables:
            home.__dict__[LOOKS_UP] = True
        return home

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def check_model(model: nn.Module) -> None:
    """Raise for models whose parameters lie on the ranks already, or have no values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise MeshError(f"{name} is on the meta device; a pipeline takes a model with values, built on every rank")
        if placement_of(tensor) or type(tensor).__name__ == "DTensor":
            raise MeshError(f"{name} is placed or cut already; give the pipeline the plain model, and a layout")
    if model.__dict__.get(ENGINE) is not None:
        raise MeshError(f"this {type(model).__name__} is distributed already; a pipeline does that by itself")


def layout_for(part: nn.Module, model: nn.Module, layout: Layout) -> Layout:
    """Those patterns of a layout that match parameters of this part; all must match one of the model's."""
    from fnmatch import fnmatchcase

    every, own = ([name for name, _ in m.named_parameters()] for m in (model, part))
    wrong = next((p for p in layout if not any(fnmatchcase(name, p) for name in every)), None)
    if wrong is not None:
        raise MeshError(f"layout: no parameter is called {wrong!r}; they are {', '.join(every[:6])}")
    return {p: dims for p, dims in layout.items() if any(fnmatchcase(name, p) for name in own)}


def put_back(model: nn.Module, part: PartOfModel) -> None:
    """Let the model show this part's parameters, and the shapes of all others, whose memory is freed."""
    own, twins = part.tensors(), dict[int, Tensor]()
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for module in model.modules():
        slots = [*module.named_parameters(recurse=False, remove_duplicate=False),
                 *module.named_buffers(recurse=False, remove_duplicate=False)]  # fmt: skip
        for name, tensor in slots:
            full = names.get(id(tensor))
            if full is None:  # put here already, under another name
                continue
            if full not in own and id(tensor) not in twins:
                twin = torch.empty_like(tensor, device="meta")
                twins[id(tensor)] = nn.Parameter(twin, False) if isinstance(tensor, nn.Parameter) else twin
            shown = own[full] if full in own else twins[id(tensor)]
            if shown is not tensor:
                setattr(module, name, shown)
