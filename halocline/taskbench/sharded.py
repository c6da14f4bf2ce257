"""Task graphs through a rule on a sharded tensor.

A row is a tensor that is cut along its columns, and a convolution with one-hot weights brings each task its inputs; the
executor fetches the halos.

A convolution expresses every pattern whose offsets are the same for all columns: ``nearest`` and both stencils as they
are, ``fft`` by its dilation, ``stencil_1d_periodic`` behind a circular pad, ``dom`` and ``random_nearest`` as a part of
their window. ``tree``, ``spread`` and ``all_to_all`` have no such offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules import from_tile
from ..tensor import unwrap
from ..world import Mesh, World, as_world, memory_of
from .execute import Fault, GraphRun
from .graph import TaskBenchError, TaskGraph
from .schedule import TaskInput

EXPRESSED = (
    "no_comm", "stencil_1d", "stencil_1d_periodic", "dom", "fft", "nearest", "random_nearest", "stencil_3d",
)  # fmt: skip
AXES = ("depth", "height", "width")


@dataclass(frozen=True)
class OneHotWindow:
    """A convolution whose output channels are the elements at ``offsets``, and the channel of each offset."""

    call: Callable[[Tensor], Tensor]
    offsets: dict[int, int]
    channels: int


class ShardedRun(GraphRun):
    """A graph whose rows are sharded tensors of (elements of an output, 1, columns...), on a world."""

    def __init__(self, graph: TaskGraph, world: World, fault: Fault | None = None) -> None:
        super().__init__(graph, world.size, world.rank, fault)
        if reason := unfit_for_rule(graph, world.size):
            raise TaskBenchError(reason)
        sides = _sides(graph)
        parts = sides if graph.width == world.size else (world.size, *[1] * (len(sides) - 1))
        with as_world(world):
            mesh = Mesh(**dict(zip(AXES, parts, strict=False)))
        cut = {2 + dim: axis for dim, axis in enumerate(mesh.names)}
        elements, local = 2 * self.pairs, [side // part for side, part in zip(sides, parts, strict=True)]
        # Outputs of a task lie side by side in memory, though they are the first dim of the tensor.
        self._tiles = [torch.zeros(*local, elements, dtype=torch.float64) for _ in range(2)]
        self._memory = [memory_of(tile) for tile in self._tiles]
        self._rows = [
            from_tile(tile.movedim(-1, 0).unsqueeze(1), mesh, cut, shape=(elements, 1, *sides)) for tile in self._tiles
        ]
        self._windows = {phase: self._window(phase) for phase in {graph.phase(step) for step in range(graph.steps)}}
        self._brought: Tensor | None = None

    def _window(self, phase: int) -> OneHotWindow:
        """The convolution whose halo is the pattern, with a channel for each neighbour: no two inputs are added."""
        graph = self.graph
        if graph.pattern == "stencil_3d":
            return _faces(*graph.grid[1:])
        reach = {"no_comm": 0, "nearest": graph.radix // 2, "random_nearest": graph.radix // 2}.get(graph.pattern, 1)
        dilation = 1 << phase if graph.pattern == "fft" else 1
        weight = torch.eye(2 * reach + 1, dtype=torch.float64).unsqueeze(1)
        offsets = {dilation * (at - reach): at for at in range(2 * reach + 1)}
        if graph.pattern == "stencil_1d_periodic":
            return OneHotWindow(lambda row: F.conv1d(F.pad(row, (1, 1), "circular"), weight), offsets, len(weight))
        return OneHotWindow(
            lambda row: F.conv1d(row, weight, None, 1, dilation * reach, dilation), offsets, len(weight)
        )

    def begin(self, step: int) -> None:
        """The whole convolution: its halo exchange has no other work to hide behind."""
        if step:
            with torch.no_grad():
                brought = self._windows[self.graph.phase(step)].call(self._rows[(step - 1) % 2])
            # As bytes by column and offset.
            self._brought = unwrap(brought).movedim((0, 1), (-1, -2)).contiguous()

    def execute(self, step: int, iterations: int) -> None:
        window, size, width = self._windows[self.graph.phase(step)], self.graph.output_bytes, self.graph.width
        memory = memory_of(self._brought) if self._brought is not None else memoryview(b"")
        first, offsets, channels = self.own.start, window.offsets, window.channels

        def bytes_of(column: int, each: TaskInput) -> memoryview:
            offset = each.column - column
            channel = offsets[offset if offset in offsets else offset - width if offset > 0 else offset + width]
            at = ((column - first) * channels + channel) * size
            return memory[at : at + size]

        self.run_tasks(step, iterations, bytes_of, self._memory[step % 2])


def unfit_for_rule(graph: TaskGraph, ranks: int) -> str:
    """Why no convolution on so many ranks expresses a graph; empty if one does."""
    if graph.pattern not in EXPRESSED:
        return f"no rule expresses {graph.pattern}; a convolution does {', '.join(EXPRESSED)}"
    if _sides(graph)[0] % ranks and graph.width != ranks:
        return f"{ranks} ranks do not divide the {_sides(graph)[0]} columns of {graph.pattern}"
    return ""


def _sides(graph: TaskGraph) -> tuple[int, ...]:
    """The sizes of a row as a tensor: three dims for ``stencil_3d``, else one."""
    return graph.grid if graph.pattern == "stencil_3d" else (graph.width,)


def _faces(height: int, width: int) -> OneHotWindow:
    """The element itself and its six neighbours, in a window of 3 x 3 x 3."""
    weight = torch.zeros(7, 1, 3, 3, 3, dtype=torch.float64)
    offsets: dict[int, int] = {}
    places = [(1, 1, 1), (0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2)]
    for channel, (plane, line, cell) in enumerate(places):
        weight[channel, 0, plane, line, cell] = 1.0
        offsets.setdefault((plane - 1) * height * width + (line - 1) * width + cell - 1, channel)
    return OneHotWindow(lambda row: F.conv3d(row, weight, None, 1, 1), offsets, len(weight))
