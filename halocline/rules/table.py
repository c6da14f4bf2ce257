"""The one table of rules: torch function -> how it runs on sharded tensors.

A *rule* maps the call (tensors replaced by operands) to a recipe. A *composite* is written with other torch functions.
A *direct* entry answers from the tile and its sharding alone (shape, dtype, hooks). What is not here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from ..errors import NoRule, Refused
from ..tensor import here

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class RuleEntry:
    """What the table holds for one torch function: ``kind`` is rule, composite or direct, ``run`` the function that
    was registered.

    ``family`` is for documents; ``by_value`` says whether numbers among the arguments change the plan.
    """

    kind: str
    run: Callable[..., Any]
    family: str
    by_value: bool = True  # do numbers among the arguments change the plan?


_TABLE: dict[Any, RuleEntry] = {}
# The executor registers itself, since families must not import it.
_executor: list[Callable[..., Any]] = []


def _register(
    kind: str, functions: tuple[Any, ...], family: str | None, by_value: bool = True
) -> Callable[[Function], Function]:
    """A decorator that enters a function into the table under each of ``functions``."""

    def keep(run: Function) -> Function:
        for function in functions:
            _TABLE[function] = RuleEntry(kind, run, family or run.__module__.rpartition(".")[2], by_value)
        return run

    return keep


def rule(*functions: Any, family: str | None = None, by_value: bool = True) -> Callable[[Function], Function]:
    """Register ``def f(<the torch function's own parameters>) -> Recipe`` for these torch functions.

    With ``by_value`` False, numbers among the arguments are handed on and do not change the recipe.
    """
    return _register("rule", functions, family, by_value)


def composite(*functions: Any, family: str | None = None) -> Callable[[Function], Function]:
    """Register a Python function of the same signature that is itself made of torch functions."""
    return _register("composite", functions, family)


def direct(*functions: Any, family: str = "direct") -> Callable[[Function], Function]:
    """Register a Python function that answers from this rank's tile and its sharding alone."""
    return _register("direct", functions, family)


def run_rule(function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_value: bool = True) -> Any:
    """Run the rule ``describe`` under the name of ``function``: what a composite calls beside torch functions.

    The executor does it; families reach it here, so that none of them imports what communicates.
    """
    return _executor[0](function, describe, args, kwargs, by_value)


#: The same object for the same pair: plans are kept by it.
_bound = cache(partial)


def run_for(function: Any, describe: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``describe(function, *args, **kwargs)``, a rule that several functions share."""
    return _executor[0](function, _bound(describe, function), args, kwargs, True)


def executed_by(run: Function) -> Function:
    """Register the executor, of which there is one."""
    _executor[:] = [run]
    return run


def forget_rule(function: Any) -> None:
    """Take a function out of the table, for tests."""
    _TABLE.pop(function, None)


def entry_for(function: Any) -> RuleEntry:
    """What the table has for a function; an error in four parts if nothing."""
    entry = _TABLE.get(function)
    if entry is None:
        raise NoRule(
            name_of(function),
            here(),
            "no rule says how it acts on a cut tensor",
            "call it on hc.gather(x), write it with functions that have rules, or add one with @hc.rule",
        )
    return entry


def entries() -> dict[Any, RuleEntry]:
    """A copy of the whole table, for documents and checks."""
    return dict(_TABLE)


def name_of(function: Any) -> str:
    """A function's name as users write it; of an attribute ``Tensor.name``."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        owner = function.__self__
        return f"Tensor.{getattr(owner, '__name__', None) or owner.fget.__name__}"
    return name


def refuse(function: Any, why: str, remedy: str) -> Refused:
    """The four-part error; the caller raises it."""
    name = function if isinstance(function, str) else name_of(function)
    return Refused(name, here(), why, remedy)
