"""Which arrangement for so many devices: estimated for every mesh, recorded and replayed for the best few."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..arrangement import DATA, Arrangement
from ..errors import HaloclineError
from .candidate import MARGIN, Candidate, RefusedCut, is_plain, price
from .cost import Prices
from .estimate import Estimator
from .machine import Machine
from .meshes import NoPlan, factorizations, least_surface, meshes
from .model_cuts import model_cuts
from .options import ROOM, Option, options
from .pipelines import PipelineCandidate
from .recording import Subject
from .unrecordable import clear_recording_errors

__all__ = ["Candidate", "NoPlan", "RefusedCut", "chosen", "factorizations", "meshes", "price", "search"]

AT_LEAST = 2  # candidates that are recorded and fit, so that there is one to compare with
AT_MOST = 10  # candidates that are recorded
EVENTS = 10_000  # recorded in all, from which on no more than AT_LEAST candidates are recorded; one from twice that on
ALIKE = 2  # candidates with the same data axis and the same kinds of changes that are recorded; more of small networks
REFUSED = 4  # refused cuts of the same axes after which no more of them are tried
HOPELESS = 1.03  # times the best time from which on a candidate is not recorded, by its corrected estimate


def search(
    subject: Subject,
    machine: Machine,
    devices: int,
    batch: int | None = None,
    prices: Prices | None = None,
    device: torch.device | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
    speeds: Sequence[float] = (),
    input_bytes: int | None = None,
    refused: list[RefusedCut] | None = None,
    layout: str | None = None,
) -> list[Candidate]:
    """Candidates, the best first: those that fit by time for a sample, then the others by memory.

    ``input_bytes`` are those of one sample on disk, by default those of its tensors. A cut that the library refuses is
    skipped, and added to ``refused``; if all are, the first refusal is raised. With ``layout`` "auto" or "auto-memory"
    meshes with an axis ``model`` are searched too, and which weights it cuts in each layer.
    """
    prices = prices or Prices(machine.device)
    wanted = least_surface(meshes(subject, devices, batch), subject.volume)
    estimator = Estimator(subject, machine, prices.on(machine, devices))
    found = Findings(machine)
    every = options(estimator, wanted, batch, speeds, input_bytes)
    queue, left_out = worth_recording(worthwhile(every, estimator), machine), True

    def recorded(arrangement: Arrangement) -> Candidate | None:
        try:
            with clear_recording_errors():
                return price(subject, machine, arrangement, batch, prices, device, speeds, input_bytes)
        except HaloclineError as error:
            found.refused.append((arrangement, error))
            return None

    while queue or left_out:
        if not queue:  # tiles with too little work count where nothing else fits
            left_out = False
            if not any(each.fits for each in found.candidates):
                queue = [each for each in worth_recording(every, machine) if not found.has(each)]
            continue
        option = min(queue, key=found.corrected)
        queue.remove(option)
        if found.is_hopeless(option):
            continue
        candidate = recorded(option.arrangement)
        if candidate is None:
            continue
        found.add(option, candidate)
        tell(len(found.candidates), AT_MOST)
        if not (is_plain(option.arrangement) or estimator.overhead):
            estimator.learn(option.arrangement.sizes, option.local, candidate.recorded)
            found.estimates_change()
            every = options(estimator, wanted, batch, speeds, input_bytes)
            better = worthwhile(every, estimator) if left_out else every
            queue = [each for each in worth_recording(better, machine) if not found.has(each)]
    for cut in model_cuts(subject, machine, devices, batch, prices, layout) if layout is not None else ():
        if (candidate := recorded(cut.arrangement)) is not None:
            found.candidates.append(candidate)
    if refused is not None:
        refused += [RefusedCut(arrangement, str(error)) for arrangement, error in found.refused]
    return found.ranked(_by_memory if layout == "auto-memory" else _rank)


class Findings:
    """What was recorded so far, and what it says of the estimates of the rest."""

    def __init__(self, machine: Machine) -> None:
        self._room = machine.device.memory_gb.value * 1e9
        self.candidates: list[Candidate] = []
        self._memory = 1.0  # recorded over estimated: the least seen so far
        self._time: dict[tuple[object, ...], float] = {}  # the same of seconds, by kind of option
        self._events = 0
        self._recorded: Counter[tuple[object, ...]] = Counter()
        self.refused: list[tuple[Arrangement, HaloclineError]] = []

    def add(self, option: Option, candidate: Candidate) -> None:
        """Correct the estimates by a recorded candidate."""
        memory, seconds = candidate.recorded.memory / option.estimate.memory, candidate.seconds
        first = not self.candidates
        self._memory = memory if first else min(self._memory, memory)
        ratio, kind = seconds / option.estimate.seconds, _kind(option)
        self._time[kind] = min(self._time.get(kind, ratio), ratio)
        self._events += len(candidate.recorded.record.events)
        self.candidates.append(candidate)
        self._recorded[kind] += 1

    def ranked(self, key: Callable[[Candidate], tuple[float, float]]) -> list[Candidate]:
        """The candidates, the best first; raises the first refusal where there is none."""
        if not self.candidates:
            raise self.refused[0][1]
        return sorted(self.candidates, key=key)

    def has(self, option: Option) -> bool:
        """Was it recorded, or refused?"""
        tried = [*(each.arrangement for each in self.candidates), *(arrangement for arrangement, _ in self.refused)]
        return option.arrangement in tried

    def estimates_change(self) -> None:
        """Forget how far estimates were off: they are made anew."""
        self._time.clear()

    def corrected(self, option: Option) -> tuple[bool, float]:
        """Plain data parallel first; others by estimate, times what those of their kind took of theirs."""
        least = min([1.0, *self._time.values()])
        return not is_plain(option.arrangement), option.seconds_per_sample * self._time.get(_kind(option), least)

    def is_hopeless(self, option: Option) -> bool:
        """Would it not fit, be too slow, or be like those that were recorded?"""
        if sum(_axes_cut(each) == _axes_cut(option.arrangement) for each, _ in self.refused) >= REFUSED:
            return True
        if not self.candidates:
            return False
        fitting = [each.seconds_per_sample for each in self.candidates if each.fits]
        if len(self.candidates) >= AT_MOST or option.estimate.memory * self._memory > self._room:
            return True
        if len(fitting) < AT_LEAST and not (fitting and self._events >= 2 * EVENTS):
            return False
        alike = ALIKE + (self._events < EVENTS // 2)
        return (
            self._events >= EVENTS
            or self.corrected(option)[1] > HOPELESS * min(fitting)
            or self._recorded[_kind(option)] >= alike
        )


def _axes_cut(arrangement: Arrangement) -> list[str]:
    """The spatial axes that divide samples, and the axis that divides weights."""
    return [axis for axis, size in arrangement.sizes.items() if size > 1 and axis != DATA]


def _kind(option: Option) -> tuple[object, ...]:
    """Options that err alike: a recorded one corrects the estimates of the others."""
    arrangement = option.arrangement
    cut = len(_axes_cut(arrangement))
    return arrangement.sizes[DATA], cut, arrangement.multiple, bool(arrangement.recompute), bool(arrangement.gather)


def worthwhile(queue: Sequence[Option], estimator: Estimator) -> list[Option]:
    """Those whose tiles have the work that the machine's spatial METG asks for."""
    metg = estimator.machine.spatial_metg_us
    if metg is None:
        return list(queue)
    work = estimator.work_between_exchanges
    return [each for each in queue if work(each.arrangement.sizes, each.local) >= metg.value * 1e-6]


def worth_recording(queue: Sequence[Option], machine: Machine) -> list[Option]:
    """Plain data parallel first, then those that may fit, in the order of their estimates; else the leanest."""
    room = machine.device.memory_gb.value * 1e9
    plain = [option for option in queue if is_plain(option.arrangement)]
    fitting = [option for option in queue if option not in plain and option.estimate.memory <= ROOM * room]
    leanest = sorted(queue, key=lambda option: option.estimate.memory)[:2]
    return [*plain, *(fitting or [option for option in leanest if option not in plain])]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Those that fit first, by time; the others by memory."""
    return not candidate.fits, candidate.seconds_per_sample if candidate.fits else candidate.recorded.memory


def _by_memory(candidate: Candidate) -> tuple[float, float]:
    return candidate.recorded.memory, candidate.seconds_per_sample


def chosen(
    candidates: Sequence[Candidate],
    machine: Machine,
    least_memory: bool = False,
    pipelines: Sequence[PipelineCandidate] = (),
) -> Candidate:
    """The best that fits; plain data parallel unless something is predicted to be clearly better.

    With ``least_memory`` the one that takes least of it. Where none fits, NoPlan names a pipeline that does.
    """
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        said = _what_would_fit(min(candidates, key=lambda each: each.recorded.memory), machine)
        staged = next((each for each in pipelines if each.fits), None)
        raise NoPlan(said + ("" if staged is None else f"; or a pipeline: {staged} fits, see hc.pipeline"))
    if least_memory:
        return min(fitting, key=_by_memory)
    plain = [each for each in fitting if each.is_plain]
    best = fitting[0]
    if plain and best.seconds_per_sample > (1 - MARGIN) * plain[0].seconds_per_sample:
        return plain[0]
    return best


def _what_would_fit(leanest: Candidate, machine: Machine) -> str:
    """The limit, and the smallest change: so many devices, or so much memory on each."""
    step, room, devices = leanest.recorded, machine.device.memory_gb.value * 1e9, leanest.arrangement.ranks
    kept = step.memory - step.activations
    needed = f"{math.ceil(step.memory * ROOM / 1e8) / 10:g} GB a device would do"
    if kept < room:
        count = math.ceil(devices * step.activations * ROOM / (room - kept))
        more = f"{needed}, or about {count + count % 2:,} devices of this size"
    else:
        more = f"{needed}; more of this size would not, since weights, gradients and optimizer take {kept / 1e9:.1f} GB"
    return (
        f"no cut over {devices} devices fits: the leanest, {leanest}, needs {step.memory / 1e9:.1f} GB a device, and "
        f"{machine.device.name} has {machine.device.memory_gb.value:g}; use more devices or larger ones: {more}"
    )
