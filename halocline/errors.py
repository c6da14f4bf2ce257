"""The library's own errors. Each message says what happened, where, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HaloclineError(Exception):
    """Base of every error the library raises on purpose."""


class MeshError(HaloclineError, ValueError):
    """A mesh that does not fit its ranks, an unknown axis, or tensors of two meshes in one operation."""


class ShardingError(HaloclineError, ValueError):
    """A sharding that makes no sense: a dim cut twice, an axis used twice, tiles that do not tile the sample."""


class Refused(HaloclineError, RuntimeError):
    """An operation the library will not run on a cut tensor, because the answer could differ from one rank's.

    The message has four parts: which operation, where in the model, why, and what to do.
    """

    def __init__(self, operation: str, place: str, why: str, remedy: str) -> None:
        self.operation, self.place, self.why, self.remedy = operation, place, why, remedy
        super().__init__(f"{operation} in {place}: {why}; {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.place, self.why, self.remedy)


class NoRule(Refused):
    """A torch function for which no rule is registered."""


class RankFailure(HaloclineError, RuntimeError):
    """Another rank died, hung past the deadline, or took another path through the program."""


class DataError(HaloclineError, ValueError):
    """Data that are not as they were described, or a description that makes no sense."""


class SizeError(HaloclineError, ValueError):
    """A size of memory that cannot be understood."""


class BadSample(DataError):
    """A sample that cannot be read, or holds what it must not. Names the file, the sample and the box."""

    def __init__(self, where: str, sample: int, box: str, reason: str) -> None:
        self.where, self.sample, self.box, self.reason = where, sample, box, reason
        super().__init__(f"sample {sample} ({where}), box {box}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.where, self.sample, self.box, self.reason)


class ConfigError(HaloclineError, ValueError):
    """A setting that is unknown, of another type, or out of range. Names the key, the value and what is allowed."""


class PlanError(HaloclineError, ValueError):
    """A plan that cannot be made, read or followed. Says why, and what would help."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is spelt most like this one, for an error message; "" if none is.

    >>> did_you_mean("sumit", ["summit", "lassen"]), did_you_mean("x", ["summit"])
    (' (did you mean summit?)', '')
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
