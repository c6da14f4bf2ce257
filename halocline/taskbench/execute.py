"""A rank's part of task graphs, row by row: exchange, check inputs, compute, write outputs.

Every output is its row and column, over and over. A task compares all bytes of its inputs with what they have to be, so
that a runtime which loses, repeats or mixes up messages fails.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..world import memory_of
from .graph import PAIR, TaskBenchError, TaskGraph
from .kernels import Kernel, make_kernel
from .schedule import HERE, PlannedRow, TaskInput, own_columns, plan_rows

Fault = tuple[int, int]  # the step and column of a task that is given a wrong input on purpose
InputBytes = Callable[[int, TaskInput], object]  # of a task, by its column
_STRUCT = struct.Struct("<dd")


def output_pair(step: int, column: int) -> bytes:
    """What a task writes, over and over. Counted from 1: memory that was never written is zero, and no output."""
    return _STRUCT.pack(step + 1, column + 1)


class TaskExchange(ABC):
    """The messages of one row, which are begun and waited for again and again with the same tensors."""

    @abstractmethod
    def begin(self) -> None:
        """Start sends and receives."""

    @abstractmethod
    def wait(self) -> Sequence[memoryview]:
        """The bytes that came, in the order of the receives; sent tensors may change from then on."""


#: Makes an exchange from the number of a graph, messages by peer, and the elements to be received by peer.
MakeExchange = Callable[[int, Sequence[tuple[int, Tensor]], Sequence[tuple[int, int]]], TaskExchange]


class GraphRun(ABC):
    """One rank's part of one graph on one runtime."""

    def __init__(self, graph: TaskGraph, ranks: int, rank: int, fault: Fault | None = None) -> None:
        self.graph = graph
        self.rows = plan_rows(graph, ranks, rank)
        self.pairs = graph.output_bytes // PAIR
        self.kernel: Kernel = make_kernel(graph.kernel)
        self.own = own_columns(graph.width, ranks, rank)
        self._fault = fault

    @abstractmethod
    def begin(self, step: int) -> None:
        """Start to bring the inputs of a row."""

    @abstractmethod
    def execute(self, step: int, iterations: int) -> None:
        """Wait for the inputs of a row, and run its tasks."""

    def run_tasks(self, step: int, iterations: int, bytes_of: InputBytes, outputs: memoryview) -> None:
        """Check the inputs of each task, compute, and write its output among the ``outputs`` of this rank.

        ``bytes_of`` finds an input of a column.
        """
        graph, size, first, pairs = self.graph, self.graph.output_bytes, self.own.start, self.pairs
        bytes_of = self._spoiled(step, bytes_of)
        balanced = graph.kernel != "load_imbalance"
        expected: dict[int, bytes] = {}
        for column, inputs in self.rows[step].tasks:
            for each in inputs:
                wanted = expected.get(each.column)
                if wanted is None:
                    wanted = expected[each.column] = output_pair(step - 1, each.column) * pairs
                if bytes_of(column, each) != wanted:
                    raise self._wrong(step, column, each.column, bytes_of(column, each))
            self.kernel(iterations if balanced else round(graph.share(step, column) * iterations))
            at = (column - first) * size
            outputs[at : at + size] = output_pair(step, column) * pairs

    def _spoiled(self, step: int, bytes_of: InputBytes) -> InputBytes:
        """``bytes_of``, but for the task of the fault, which is given another of its inputs in place of each."""
        if self._fault is None or self._fault[0] != step or self._fault[1] not in self.own:
            return bytes_of
        inputs = dict(self.rows[step].tasks).get(self._fault[1], ())
        if len(inputs) < 2:
            raise TaskBenchError(f"task {self._fault} of {self.graph.pattern} has no two inputs to mix up")

        def mixed_up(column: int, each: TaskInput) -> object:
            wrong = column == (self._fault or (0, 0))[1]
            return bytes_of(column, inputs[(inputs.index(each) + 1) % len(inputs)] if wrong else each)

        return mixed_up

    def _wrong(self, step: int, column: int, awaited: int, found: object) -> TaskBenchError:
        """The error of a task whose input is another task's output, which the bytes themselves name."""
        row, other = (number - 1 for number in _STRUCT.unpack_from(bytes(found)))  # type: ignore[call-overload]
        return TaskBenchError(
            f"{self.graph.pattern}, graph {self.graph.number}: task (step {step}, column {column}) needs the output of "
            f"(step {step - 1}, column {awaited}) and was given that of (step {row:g}, column {other:g}): the runtime "
            "lost or mixed up a dependency"
        )


class MessageRun(GraphRun):
    """A graph whose rows travel as messages, made by ``make``.

    Rows alternate between two buffers, since tasks read one row while they write the next.
    """

    def __init__(self, graph: TaskGraph, ranks: int, rank: int, make: MakeExchange, fault: Fault | None = None) -> None:
        super().__init__(graph, ranks, rank, fault)
        self._make = make
        elements = 2 * self.pairs
        self._buffers = [torch.zeros(max(1, len(self.own)), elements, dtype=torch.float64) for _ in range(2)]
        self._memory = [memory_of(buffer) for buffer in self._buffers]
        self._exchanges: dict[tuple[int, int], tuple[TaskExchange, Callable[[], object]]] = {}
        for step, row in enumerate(self.rows):
            if row.moves and (id(row), step % 2) not in self._exchanges:
                self._exchanges[id(row), step % 2] = self._exchange(row, self._buffers[(step - 1) % 2])

    def _exchange(self, row: PlannedRow, before: Tensor) -> tuple[TaskExchange, Callable[[], object]]:
        """An exchange of columns of ``before``, and what copies those that do not lie side by side."""
        sends, copies = [], []
        for peer, columns in row.sends:
            places = [column - self.own.start for column in columns]
            if places == list(range(places[0], places[-1] + 1)):
                sends.append((peer, before[places[0] : places[-1] + 1].view(-1)))
            else:
                index, packed = torch.tensor(places), torch.empty(len(places), before.shape[1], dtype=before.dtype)
                copies.append(partial(torch.index_select, before, 0, index, out=packed))
                sends.append((peer, packed.view(-1)))
        receives = [(peer, len(columns) * before.shape[1]) for peer, columns in row.receives]

        def pack() -> None:
            for copy in copies:
                copy()

        return self._make(self.graph.number, sends, receives), pack

    def begin(self, step: int) -> None:
        row = self.rows[step]
        if row.moves:
            exchange, pack = self._exchanges[id(row), step % 2]
            pack()
            exchange.begin()

    def execute(self, step: int, iterations: int) -> None:
        row, size = self.rows[step], self.graph.output_bytes
        messages = self._exchanges[id(row), step % 2][0].wait() if row.moves else ()
        before = self._memory[(step - 1) % 2]

        def bytes_of(column: int, each: TaskInput) -> memoryview:
            whole = before if each.source == HERE else messages[each.source]
            at = each.place * size
            return whole[at : at + size]

        self.run_tasks(step, iterations, bytes_of, self._memory[step % 2])


def run_graphs(runs: Sequence[GraphRun], iterations: int) -> float:
    """Seconds for all rows of all graphs on this rank. Graphs hide each other's messages."""
    began = time.perf_counter()
    for step in range(max(run.graph.steps for run in runs)):
        at_work = [run for run in runs if step < run.graph.steps]
        for run in at_work:
            run.begin(step)
        for run in at_work:
            run.execute(step, iterations)
    return time.perf_counter() - began
