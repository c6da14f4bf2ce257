"""Sharded tensors that a user's own autograd Function made.

Such a Function runs on sharded tensors, so its node stands in the graph of the shells, while gradients travel through
the tiles. This module joins the two: the shell's tile hangs on the Function's node. Before the node runs, arriving
gradients become sharded tensors with true values; after it, its results become tiles again. Its backward then computes
what it computes on one rank.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction  # reentrant: gives what autograd gave its inputs

from .._torch_private import autograd_state, function_of, identity_functions, no_torch_function, take_place
from ..errors import Refused
from ..world import Label, OwnFunction, Route, Sum
from .leaf import mean_over_whole_axes
from .place import here
from .sharded import ShardedTensor, unwrap, wrap
from .sharding import Sharding

_BRIDGE, _INPUTS = "_halocline_joint", "_halocline_inputs"

Gradients = tuple[Tensor | None, ...]


class Joined(OwnFunction):
    """The tile of a shell, hung on the shell's own node: the identity, forward and backward."""

    @staticmethod
    def forward(ctx: Any, shell: Any):  # type: ignore[no-untyped-def]
        """The tile, as a new node behind the shell's own."""
        return shell._tile.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The gradient as it is."""
        return gradient


def settle(shell: ShardedTensor) -> None:
    """Make the shell an alias of a tile whose gradient goes where that of the shell goes, as every shell is."""
    with torch.enable_grad():
        alias = wrap(Joined.apply(shell), shell.sharding)
    shell._tile = alias._tile
    take_place(shell, alias)


class AutogradBridge:
    """How the outputs and inputs of a node lie. Of its inputs, None: they lie as the gradients that it gives."""

    def __init__(self, function: type, inputs: dict[int, Sharding] | None) -> None:
        self.name, self.outputs = function.__name__, dict[int, Sharding]()
        self.identity = issubclass(function, identity_functions())
        self.inputs = self.outputs if self.identity else inputs
        self.ends = False  # is the last of its hooks in place?

    def arriving(self, gradients: Gradients) -> Gradients:
        """As the Function's backward is to see them."""
        return tuple(None if g is None else self._true(index, g) for index, g in enumerate(gradients))

    def _true(self, index: int, gradient: Tensor) -> Tensor:
        """A gradient as the Function's backward expects it: sharded, and the mean over
        the axes on which it is whole.
        """
        sharding = self.outputs.get(index)
        gradient = unwrap(gradient)  # a reentrant checkpoint that follows hands out sharded ones
        if sharding is not None:
            return wrap(mean_over_whole_axes(gradient, sharding), sharding)
        mesh = next(iter(self.outputs.values())).mesh
        share = 1.0 / mesh.size  # of a plain output each rank holds a share
        route = Route(mesh.world, tuple(range(mesh.size)), Label(f"gradient of {self.name}", here()))
        return Sum.apply(gradient, route, (share, share))

    def with_zeros(self, gradients: Gradients, _: Any = None) -> Gradients:
        """Where an output got no gradient, torch has filled in zeros of the tile's size."""
        known = self.outputs
        return tuple(wrap(g, known[i]) if i in known and type(g) is Tensor else g for i, g in enumerate(gradients))

    def leaving(self, gradients: Gradients, _: Any) -> Gradients:
        """As autograd is to see them: tiles."""
        return tuple(None if g is None else self._tile(index, g) for index, g in enumerate(gradients))

    def _tile(self, index: int, gradient: Tensor) -> Tensor:
        """A gradient that backward gave, as a tile; refused where its cut differs from that of its input."""
        lies = getattr(gradient, "sharding", None)
        wanted = self.inputs.get(index) if self.inputs is not None else lies
        if lies is not wanted:
            raise Refused(
                self.name,
                here(),
                f"for input {index}, which is {wanted or 'whole'}, backward gives a gradient that is {lies or 'whole'}",
                "bring it to the cut of that input with hc.shard, hc.reshard or hc.gather",
            )
        return unwrap(gradient)


def join(shell: ShardedTensor, node: Any) -> None:
    """Hang the tile of ``shell`` on the node that made it, or say why not."""
    bridge = node_of(shell, node)
    if not bridge.ends:
        bridge.ends = True
        node.register_hook(bridge.leaving)  # after those of torch, which are to see sharded tensors
    settle(shell)


def node_of(shell: ShardedTensor, node: Any) -> AutogradBridge:
    """What is known of the node that made ``shell``; refused if it is of a Function of which nothing is known."""
    function = function_of(node)
    known = function is not None and issubclass(function, (*identity_functions(), CheckpointFunction))
    if function is None or not (known or _INPUTS in node.__dict__):
        raise Refused(
            node.name().removesuffix("Backward"),
            here(),
            "an autograd Function made this tensor, and its backward would see this rank's tile alone",
            "write it with torch functions, or, if its forward and backward are, say so with hc.trust",
        )
    bridge: AutogradBridge | None = node.__dict__.get(_BRIDGE)
    if bridge is None:
        bridge = node.__dict__[_BRIDGE] = AutogradBridge(function, node.__dict__.get(_INPUTS))
        # Once for each node, however many outputs it has.
        node.register_prehook(bridge.arriving)
        if bridge.identity:
            node.register_hook(bridge.with_zeros)  # before those of torch
    with no_torch_function():
        bridge.outputs[shell.output_nr] = shell.sharding
    return bridge


Function = TypeVar("Function", bound=type[torch.autograd.Function])


def trust(function: Function) -> Function:
    """Let an autograd Function of one's own work on cut tensors. Also as a decorator.

    Its forward and backward must be written with torch functions: these run by their rules, so that ``backward`` sees
    the true gradient, cut as the output is. For each input it must give a gradient cut as that input is.
    """
    # The class itself is changed, so that calls by its name are trusted too.
    apply_it, differentiate = function.apply, function.backward

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """The Function's own ``apply``; its node then knows how its inputs were cut."""
        result = apply_it.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
        tensors = [value for value in args if isinstance(value, Tensor)]
        cut = {index: t.sharding for index, t in enumerate(tensors) if isinstance(t, ShardedTensor)}
        for output in (result if isinstance(result, tuple) else (result,)) if cut else ():
            node: Any = autograd_state(output)[0] if isinstance(output, ShardedTensor) else None
            if function_of(node) is cls:
                node.__dict__[_INPUTS] = cut
                node_of(output, node)
        return result

    def backward(ctx: Any, *gradients: Any) -> Any:
        bridge: AutogradBridge | None = ctx.__dict__.get(_BRIDGE)
        return differentiate(ctx, *(gradients if bridge is None else bridge.with_zeros(gradients)))

    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return function
