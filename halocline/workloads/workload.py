"""What a workload is: a network, its data, its loss and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ..data import Field

Arguments = Mapping[str, Any]
Batch = Mapping[str, Tensor]


class Meter(Protocol):
    """Sums over batches, global whatever the cut; what they come to is asked for at the end."""

    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch. Every rank calls it."""

    def result(self) -> dict[str, float]:
        """The metrics by name, the same on every rank."""


@dataclass(frozen=True)
class WorkloadSize:
    """One size of a workload: arguments of the network and of the data, and how it is trained."""

    network: Arguments = field(default_factory=dict)
    data: Arguments = field(default_factory=dict)
    training: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """A network that commands know by name, and all that training it takes.

    ``data(samples, seed, **arguments)`` makes synthetic fields, of which "x" goes into the network. ``small`` trains in
    minutes on two cores; ``full`` is what the paper trained. ``shapes`` and ``fit`` are for checks of any shape.
    """

    factory: Callable[..., nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    fit: Callable[[Sequence[Sequence[int]]], dict[str, Any]]
    loss: Callable[[Tensor, Batch], Tensor]
    meter: Callable[[], Meter]
    data: Callable[..., dict[str, Field]]
    small: WorkloadSize
    full: WorkloadSize
    #: Inputs are whole numbers below this in a check; None: they are real numbers.
    tokens: int | None = None
    #: ``layout(axis)`` cuts its parameters over a mesh axis, as ``hc.distribute`` takes it; None: it has none.
    layout: Callable[[str], dict[str, dict[int, str]]] | None = None
    #: Parameters that only sparse lookups use: cut by rows over the axis of samples, wherever that is cut.
    tables: tuple[str, ...] = ()
