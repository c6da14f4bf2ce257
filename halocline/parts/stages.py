"""Which stage computes each recorded call, and what crosses the borders between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import MeshError, Refused, did_you_mean
from .record import ModelRecord, RecordedCall


@dataclass(frozen=True)
class ModelStage:
    """The calls of one stage, in order. ``receives`` are values of earlier stages, ``sends`` maps own values to the
    later stages that read them."""

    number: int
    calls: tuple[RecordedCall, ...]
    receives: tuple[tuple[int, int], ...]  # a value, and the stage that makes it
    sends: Mapping[int, tuple[int, ...]]
    inputs: tuple[int, ...]  # inputs of the model that it reads
    tensors: frozenset[str]  # names of parameters and buffers that it reads


@dataclass(frozen=True)
class Staged:
    """A record divided into stages."""

    record: ModelRecord
    stages: tuple[ModelStage, ...]
    loss_stage: int

    def writing(self) -> dict[int, RecordedCall]:
        """Stages that write to buffers, such as running statistics: of each the first call that does."""
        found: dict[int, RecordedCall] = {}
        for stage in self.stages:
            for call in stage.calls:
                if any(self.record.values[old].kind == "buffer" for old, _ in call.writes):
                    found.setdefault(stage.number, call)
        return found

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages read, with those stages."""
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.tensors:
                found.setdefault(name, []).append(stage.number)
        return {name: tuple(stages) for name, stages in sorted(found.items()) if len(stages) > 1}


def divide(record: ModelRecord, of_call: Sequence[int]) -> Staged:
    """The stages of a record; ``of_call`` has the stage of each call. Refused where values would flow backwards, or
    memory that is written to is shared between stages."""
    count = max(of_call) + 1
    for together in record.together:
        if len({of_call[call] for call in together}) > 1:
            first, last = (record.calls[call] for call in (min(together), max(together)))
            raise Refused(
                str(last), f"stage {of_call[last.number]}", f"it shares memory that is written to with {first}, which "
                f"runs in stage {of_call[first.number]}", "put both into one stage, or write out of place",
            )  # fmt: skip
    made = [of_call[value.made] if value.made >= 0 else -1 for value in record.values]
    received: list[dict[int, int]] = [{} for _ in range(count)]
    sends: list[dict[int, set[int]]] = [{} for _ in range(count)]
    for call in record.calls:
        stage = of_call[call.number]
        for value in call.reads:
            source = made[value]
            if source > stage:
                raise MeshError(
                    f"{call} runs in stage {stage} and reads what {record.calls[record.values[value].made]} makes in "
                    f"stage {source}: values flow to later stages only; put both into one stage, or order the parts as "
                    "the model runs them"
                )
            if 0 <= source < stage:
                received[stage][value] = source
                sends[source].setdefault(value, set()).add(stage)
    stages = []
    for number in range(count):
        calls = tuple(call for call in record.calls if of_call[call.number] == number)
        read = {value for call in calls for value in call.reads}
        stages.append(ModelStage(
            number, calls, tuple(sorted(received[number].items())),
            {value: tuple(sorted(to)) for value, to in sorted(sends[number].items())},
            tuple(n for n in record.inputs if n in read), frozenset(record.parameters_of(calls)),
        ))  # fmt: skip
    return Staged(record, tuple(stages), made[record.loss])


def cut_before(record: ModelRecord, names: Sequence[str]) -> list[int]:
    """The stage of each call where a new stage begins with the first call of each of these modules."""
    begins = []
    for name in names:
        first = next((call.number for call in record.calls if _inside(call.place, name)), None)
        if first is None:
            raise MeshError(f"no call of the model runs in module {name!r}{_known(record, name)}")
        begins.append(first)
    if begins != sorted(set(begins)) or 0 in begins:
        raise MeshError(
            "stages begin at modules in the order in which the model runs them, and not at its first; got "
            f"{list(names)}"
        )
    return [sum(call.number >= begin for begin in begins) for call in record.calls]


def cut_evenly(record: ModelRecord, count: int) -> list[int]:
    """Stages of about equally many calls with parameters; a start without measurements."""
    with_weights = [call.number for call in record.calls if any(record.parameter_of(n) for n in call.reads)]
    if len(with_weights) < count:
        raise MeshError(f"{len(with_weights)} calls have parameters, too few for {count} stages")
    begins = [with_weights[len(with_weights) * place // count] for place in range(1, count)]
    return [sum(call.number >= begin for begin in begins) for call in record.calls]


def by_names(record: ModelRecord, parts: Sequence[str]) -> list[int]:
    """The stage of each call by patterns of module names; of several that match, the last decides.

    A call outside all of them runs where the last of its operands is made; one without operands, where it is first
    read.
    """
    unused = next((p for p in parts if not any(_inside(call.place, p) for call in record.calls)), None)
    if unused is not None:
        raise MeshError(f"no call of the model runs in a module called {unused!r}{_known(record, unused)}")
    of_call: list[int] = []
    for call in record.calls:
        matching = [number for number, part in enumerate(parts) if _inside(call.place, part)]
        made = [of_call[record.values[n].made] for n in call.reads if record.values[n].made >= 0]
        of_call.append(matching[-1] if matching else max(made, default=-1))
    for call in reversed(record.calls):
        if of_call[call.number] < 0:
            readers = [of_call[c.number] for c in record.calls[call.number :] if set(c.reads) & set(call.makes)]
            of_call[call.number] = min((stage for stage in readers if stage >= 0), default=0)
    return of_call


def _inside(place: str, pattern: str) -> bool:
    """Does a module's path lie in one that the pattern matches?"""
    parts = place.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _known(record: ModelRecord, name: str) -> str:
    places = list(dict.fromkeys(call.place for call in record.calls))
    return did_you_mean(name, places) or f"; it runs in {', '.join(places[:6])}"
