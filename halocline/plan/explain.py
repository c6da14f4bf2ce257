"""What was compared, what it costs, and what another cut loses by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..arrangement import fingerprint
from .candidate import MARGIN, Candidate, RefusedCut
from .machine import Machine
from .pipelines import PipelineCandidate
from .plan_file import Alternative, Plan, PlannedPipeline, PlannedStage, Prediction, machine_fingerprint
from .recording import Subject


def prediction(candidate: Candidate) -> Prediction:
    """The predicted step, as a plan holds it."""
    line, step = candidate.timeline, candidate.recorded
    return Prediction(
        seconds=candidate.seconds,
        low_seconds=candidate.low_seconds or candidate.seconds,
        high_seconds=candidate.high_seconds or candidate.seconds,
        seconds_per_sample=candidate.seconds_per_sample,
        compute=line.compute,
        exposed=dict(line.exposed),
        communication=dict(line.communication),
        memory={
            "weights": step.weights,
            "gradients": step.gradients,
            "optimizer": step.optimizer,
            "activations": step.activations,
        },
        input=candidate.input_seconds,
        fits=candidate.fits,
        binds=candidate.binds,
    )


def as_plan(
    network: str,
    subject: Subject,
    machine: Machine,
    best: Candidate,
    candidates: Sequence[Candidate],
    refused: Sequence[RefusedCut] = (),
    speeds: Sequence[float] = (),
    input_bytes: int | None = None,
    pipelines: Sequence[PipelineCandidate] = (),
) -> Plan:
    """The plan that takes ``best``, with the others and why they lost, or were refused; ``pipelines`` beside it."""
    arrangement = best.arrangement
    return Plan(
        network=network,
        fingerprint=fingerprint(subject.meta_model()),
        shapes=subject.shapes,
        dtype=str(subject.dtype).removeprefix("torch."),
        batch=best.samples,
        mesh_sizes=dict(arrangement.sizes),
        points=dict(arrangement.points),
        multiple=arrangement.multiple,
        choices=arrangement.choices,
        gather=arrangement.gather,
        recompute=arrangement.recompute,
        layout={name: dict(dims) for name, dims in arrangement.layout.items()},
        machine=machine.name,
        machine_fingerprint=machine_fingerprint(machine),
        assumed={
            path: (quantity.low or quantity.value, quantity.high or quantity.value)
            for path, quantity in machine.assumed()
        },
        predicted=prediction(best),
        alternatives=tuple(
            Alternative(
                arrangement=str(each), mesh=dict(each.sizes), predicted=prediction(each), lost_by=lost_by(best, each)
            )
            for each in candidates
            if each is not best
        ),
        refused={str(each.arrangement): each.reason for each in refused},
        pipelines=tuple(planned_pipeline(each) for each in pipelines),
        speeds=tuple(speeds),
        input_bytes=input_bytes,
    )


def planned_pipeline(candidate: PipelineCandidate) -> PlannedPipeline:
    """A pipeline, as a plan holds it."""
    cut = candidate.cut
    return PlannedPipeline(
        mesh_sizes={"stage": candidate.stages, "data": candidate.replicas},
        schedule=candidate.schedule,
        microbatches=candidate.microbatches,
        begins=cut.begins,
        cost=cut.cost,
        stages=tuple(PlannedStage(**vars(stage)) for stage in cut.stages),
        seconds=candidate.seconds,
        seconds_per_sample=candidate.seconds_per_sample,
        memory_bytes=candidate.memory,
        fits=candidate.fits,
    )


def lost_by(best: Candidate, rival: Candidate) -> str:
    """Why ``rival`` is not taken: the term by which it loses most."""
    if not rival.fits:
        return f"{rival} does not fit: it needs {rival.recorded.memory / 1e9:.1f} GB a device."
    ours, theirs = (terms(prediction(each), each.samples) for each in (best, rival))
    losses = {name: seconds - ours.get(name, 0.0) for name, seconds in theirs.items()}
    worst = max(losses, key=lambda name: losses[name])
    ratio = rival.seconds_per_sample / best.seconds_per_sample
    if ratio <= 1:
        reason = "the difference is within the margin" if ratio > 1 - MARGIN else "the search did not record it"
        return f"{rival} is predicted to take {ratio:.2f} of the time of {best}: {reason}."
    most = f"most of it by {worst} (+{losses[worst] * 1e3:.3g} ms)"
    return f"{rival} takes {ratio:.2f} times as long a sample as {best}; {most}."


WAITS = ("halo", "statistics", "gradients")


def terms(predicted: Prediction, samples: int) -> dict[str, float]:
    """Seconds for a sample, by cause; they add up to those of the step."""
    kinds = [*WAITS, *(kind for kind in predicted.exposed if kind not in WAITS)]
    waits = {f"waiting for {kind}": predicted.exposed.get(kind, 0.0) for kind in kinds}
    step = predicted.compute + sum(waits.values())
    waits["waiting for input"] = max(0.0, predicted.input - step)
    return {name: seconds / samples for name, seconds in {"compute": predicted.compute, **waits}.items()}


@dataclass(frozen=True)
class Difference:
    """One term of two plans: seconds for a sample, or bytes of a device."""

    term: str
    first: float
    second: float


def difference(first: Plan, second: Plan) -> list[Difference]:
    """Two plans term by term; the terms of time add up to the time for a sample."""
    times = [terms(plan.predicted, plan.batch) for plan in (first, second)]
    names = list(dict.fromkeys([*times[0], *times[1]]))
    memory = [plan.predicted.memory for plan in (first, second)]
    parts = list(dict.fromkeys([*memory[0], *memory[1]]))
    return [
        Difference("seconds a sample", *(plan.predicted.seconds_per_sample for plan in (first, second))),
        *(Difference(name, *(each.get(name, 0.0) for each in times)) for name in names),
        Difference("bytes of a device", *(float(sum(each.values())) for each in memory)),
        *(Difference(part, *(float(each.get(part, 0)) for each in memory)) for part in parts),
    ]


def difference_text(first: Plan, second: Plan) -> str:
    """Which of two plans is faster for a sample, and by which term."""
    slower, faster = sorted((first, second), key=lambda plan: -plan.predicted.seconds_per_sample)
    ratio = slower.predicted.seconds_per_sample / faster.predicted.seconds_per_sample
    if ratio < 1.0005:
        return f"{first} and {second} take the same time for a sample."
    times = [terms(plan.predicted, plan.batch) for plan in (faster, slower)]
    losses = {name: seconds - times[0].get(name, 0.0) for name, seconds in times[1].items()}
    worst = max(losses, key=lambda name: losses[name])
    return f"{slower} takes {ratio:.2f} times as long a sample as {faster}; most by {worst}."
