"""The range of a prediction: the same record, priced with every assumed constant at its better or worse end."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from .machine import Machine, Quantity

Described = TypeVar("Described", bound=BaseModel)

#: Ends of the names of constants that are better when they are small: latencies, work below which a device idles, what
#: ranks take from each other, and how unequal they are.
SMALL_IS_BETTER = (
    *("_us", "_gflop", "overlap_loss", "arithmetic", "unfolding", "memory", "waiting"),
    *("spread", "shared", "restart_s"),
)


def at_end(machine: Machine, better: bool) -> Machine:
    """The machine with every assumed constant at the end of its range at which steps are shorter, or longer.

    The memory of a device stays: whether a plan fits is decided by its value.
    """
    return _moved(machine, better) if any(machine.assumed()) else machine


def _moved(model: Described, better: bool) -> Described:
    return model.model_copy(update={name: _at_end(name, value, better) for name, value in model})


def _at_end(name: str, value: object, better: bool) -> object:
    """Assumed quantities at the end of their range where a step takes least, or most; measured ones as they are.

    The size of memory stays: it decides what fits, and not how long it takes.
    """
    if isinstance(value, Quantity):
        low, high = value.low or value.value, value.high or value.value
        if value.source != "assumed" or name == "memory_gb":
            return value
        return value.model_copy(update={"value": low if better == name.endswith(SMALL_IS_BETTER) else high})
    if isinstance(value, BaseModel):
        return _moved(value, better)
    if isinstance(value, dict):
        return {key: _at_end(name, each, better) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_at_end(name, each, better) for each in value)
    return value
