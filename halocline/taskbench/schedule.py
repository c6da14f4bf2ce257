"""Who runs which task, and what ranks send each other for a row: one message from a rank to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .graph import TaskBenchError, TaskGraph

HERE = -1  # as the source of an input: an output of this rank


@dataclass(frozen=True)
class TaskInput:
    """Where an input lies: the place of its column in a message, by its number among those received, or here."""

    column: int
    source: int
    place: int


@dataclass(frozen=True)
class PlannedRow:
    """One rank's part of a row: its tasks with their inputs, and columns of the row before by peer."""

    tasks: tuple[tuple[int, tuple[TaskInput, ...]], ...]
    sends: tuple[tuple[int, tuple[int, ...]], ...]
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    moves: bool  # does any rank send?


def own_columns(width: int, ranks: int, rank: int) -> range:
    """Of a rank: as even a share of neighbouring columns as can be."""
    return range(-(-width * rank // ranks), -(-width * (rank + 1) // ranks))


def plan_rows(graph: TaskGraph, ranks: int, rank: int) -> list[PlannedRow]:
    """One rank's part of every row. Rows with equal edges share one object."""
    if graph.width < ranks:
        raise TaskBenchError(f"a graph of width {graph.width} leaves some of {ranks} ranks without a task")
    known: dict[tuple[object, ...], PlannedRow] = {}
    rows = []
    for step in range(graph.steps):
        key = (step > 0, graph.phase(step), graph.columns(step), graph.columns(max(0, step - 1)))
        if key not in known:
            known[key] = _plan(graph, step, ranks, rank)
        rows.append(known[key])
    return rows


def _plan(graph: TaskGraph, step: int, ranks: int, rank: int) -> PlannedRow:
    """What this rank sends, receives and computes in one row.

    An output that several tasks of a rank need crosses once. Senders and receivers list columns in one order, so that
    a message needs no header.
    """
    owner = _owners(graph.width, ranks)
    crossing: dict[tuple[int, int], set[int]] = {}  # columns by sender and receiver
    mine = []
    for column in graph.columns(step):
        needed = graph.dependencies(step, column)
        if owner[column] == rank:
            mine.append((column, needed))
        for each in needed:
            if owner[each] != owner[column]:
                crossing.setdefault((owner[each], owner[column]), set()).add(each)
    sends = tuple((to, tuple(sorted(crossing[by, to]))) for by, to in sorted(crossing) if by == rank)
    receives = tuple((by, tuple(sorted(crossing[by, to]))) for by, to in sorted(crossing) if to == rank)
    number = {peer: at for at, (peer, _) in enumerate(receives)}
    first = own_columns(graph.width, ranks, rank).start

    def find(column: int) -> TaskInput:
        if owner[column] == rank:
            return TaskInput(column, HERE, column - first)
        source = number[owner[column]]
        return TaskInput(column, source, receives[source][1].index(column))

    tasks = tuple((column, tuple(map(find, needed))) for column, needed in mine)
    return PlannedRow(tasks, sends, receives, bool(crossing))


@lru_cache(maxsize=64)
def _owners(width: int, ranks: int) -> tuple[int, ...]:
    """The rank of each column: neighbours share one, as even as they can."""
    return tuple(rank for rank in range(ranks) for _ in own_columns(width, ranks, rank))
