"""What was compared, what it costs, and what another cut loses by."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrangement import fingerprint
from .machine import Machine
from .plan_file import Alternative, Plan, Prediction, machine_fingerprint
from .recording import Subject
from .search import Candidate


def prediction(candidate: Candidate) -> Prediction:
    """The predicted step, as a plan holds it."""
    line, step = candidate.timeline, candidate.recorded
    return Prediction(
        seconds=line.seconds,
        low_seconds=line.seconds,
        high_seconds=line.seconds,
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
        fits=candidate.fits,
        binds=candidate.binds,
    )


def as_plan(network: str, subject: Subject, machine: Machine, best: Candidate, candidates: Sequence[Candidate]) -> Plan:
    """The plan that takes ``best``, with the others and why they lost."""
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
    )


def lost_by(best: Candidate, rival: Candidate) -> str:
    """Why ``rival`` is not taken: the term by which it loses most."""
    if not rival.fits:
        return f"{rival} does not fit: it needs {rival.recorded.memory / 1e9:.1f} GB a device."
    losses = {name: theirs - ours for (name, ours), (_, theirs) in zip(_terms(best), _terms(rival), strict=True)}
    worst = max(losses, key=lambda name: losses[name])
    ratio = rival.seconds_per_sample / best.seconds_per_sample
    if ratio <= 1:
        return f"{rival} is predicted to take {ratio:.2f} of the time of {best}: the difference is within the margin."
    most = f"most of it by {worst} (+{losses[worst] * 1e3:.3g} ms)"
    return f"{rival} takes {ratio:.2f} times as long a sample as {best}; {most}."


def _terms(candidate: Candidate) -> list[tuple[str, float]]:
    """Seconds for a sample, by cause."""
    line = candidate.timeline
    waits = [(f"waiting for {kind}", line.exposed.get(kind, 0.0)) for kind in ("halo", "statistics", "gradients")]
    return [(name, seconds / candidate.samples) for name, seconds in [("compute", line.compute), *waits]]
