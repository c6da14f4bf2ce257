"""A plan in words and as JSON: what was compared, what it costs, and what another cut loses by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .machine import Machine
from .search import Candidate


def row(candidate: Candidate) -> dict[str, Any]:
    line, step = candidate.timeline, candidate.recorded
    return {
        "mesh": dict(candidate.sizes),
        "seconds": line.seconds,
        "seconds_per_sample": candidate.seconds_per_sample,
        "compute": line.compute,
        "exposed": dict(line.exposed),
        "communication": dict(line.communication),
        "memory": {
            "weights": step.weights,
            "gradients": step.gradients,
            "optimizer": step.optimizer,
            "activations": step.activations,
        },
        "fits": candidate.fits,
        "binds": candidate.binds,
    }


def plan_document(target: str, machine: Machine, best: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """All that was found, for a file or ``--json``."""
    return {
        "network": target,
        "machine": machine.name,
        "assumed": {path: [quantity.low, quantity.high] for path, quantity in machine.assumed()},
        "plan": row(best),
        "candidates": [row(each) for each in candidates],
    }


def plan_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


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
