"""Averages after backward, outside any bucket plan: of steps without a plan, sparse gradients, and gradients that are
differentiated themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..world import Label
from .buckets.bucket import Bucket, by_kind
from .buckets.plan import BucketPlan, GradientFacts
from .transport.sparse import sparse_mean
from .transport.sum_queue import BucketSum

if TYPE_CHECKING:
    from .average import GradientAverage

_BUCKET_BYTES = 25 << 20  # of one message: enough to fill any link


def average_at_once(
    engine: GradientAverage, facts: GradientFacts, indices: Sequence[int], plan: BucketPlan | None = None
) -> None:
    """Average these parameters' gradients, one message after another. By all ranks, which agreed on ``facts``.

    With ``plan`` the messages are its buckets, summed as later passes sum them. On three ranks and more an element's
    place in a message decides in which order it is added, so a pass gives the same bits with a plan and before it.
    """
    dense = sorted(index for index in indices if not facts.sparse[index])
    if plan is not None and not facts.graph:
        dense = sorted(set(dense) - _average_as_planned(engine, plan, set(dense)))
    if facts.graph:
        _average_in_graph(engine, dense)
    else:
        for kind in by_kind(dense, engine.parameters):
            runs: list[list[int]] = [[]]
            filled = 0
            for index in kind:
                if filled >= _BUCKET_BYTES:
                    runs.append([])
                    filled = 0
                runs[-1].append(index)
                filled += engine.parameters[index].nbytes
            for run in runs:
                _average_bucket(engine, run)
    average_sparse(engine, [index for index in indices if facts.sparse[index]])


def average_sparse(engine: GradientAverage, indices: Iterable[int]) -> None:
    """Average sparse gradients, each by itself and in the order of parameters. By all ranks together."""
    for index in sorted(indices):
        parameter = engine.parameters[index]
        label = Label(f"{engine.name} of {engine.names[index]}", "backward", "gradients")
        mean = sparse_mean(parameter.grad, parameter.detach(), engine.world, engine.ranks, label)
        if mean is not None:
            parameter.grad = mean


def _average_in_graph(engine: GradientAverage, indices: Sequence[int]) -> None:
    """Average each gradient as a part of its own graph, for ``backward(create_graph=True)``."""
    had = [p.grad for p in engine.parameters if p.grad is not None and p.grad.requires_grad]
    # A gradient that this rank lacks is zeros that depend on those it has, so that this rank takes part in the mean's
    # backward whenever the others do.
    nothing = sum((gradient.reshape(-1)[:0].sum() for gradient in had), torch.zeros((), requires_grad=True))
    for index in indices:
        parameter, name = engine.parameters[index], engine.names[index]
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = engine.mean(mine if mine.requires_grad else mine + nothing.to(mine.dtype), name)


def _average_as_planned(engine: GradientAverage, plan: BucketPlan, indices: set[int]) -> set[int]:
    """Average those of the plan's buckets all of whose gradients are to be averaged; returns their parameters."""
    averaged: set[int] = set()
    for number, planned in enumerate(plan.buckets):
        if not indices.issuperset(planned.indices):
            continue
        bucket = _filled(engine, planned.indices)
        label = Label(engine.name, f"backward, bucket {number}", engine.channel, plan.urgency(number))
        share, clock = 1.0 / len(engine.ranks), engine.world.events.clock
        under_way = BucketSum(bucket, engine.transport, engine.compression, label, share, clock)
        if engine.queue is None:
            under_way.begin()
        else:  # behind the sums of the pass before, which it may still hold
            engine.queue.add(under_way)
        under_way.wait()
        _point_at(engine, bucket)
        averaged |= set(planned.indices)
    return averaged


def _average_bucket(engine: GradientAverage, indices: list[int]) -> None:
    bucket = _filled(engine, indices)
    bucket.fill(1.0 / len(engine.ranks))
    label = Label(engine.name, "backward", "gradients")
    engine.world.begin_sum(bucket.seal(), engine.ranks, label).wait()
    _point_at(engine, bucket)


def _filled(engine: GradientAverage, indices: Sequence[int]) -> Bucket:
    """A new bucket that is given this rank's gradients, not scaled yet."""
    bucket = Bucket(indices, engine.parameters)
    bucket.begin(engine.parameters)
    for index in indices:
        bucket.put(index, engine.parameters[index].grad)
    return bucket


def _point_at(engine: GradientAverage, bucket: Bucket) -> None:
    """Make the means in a bucket's memory the parameters' gradients."""
    for index in bucket.indices:
        engine.parameters[index].grad = bucket.gradient(index)
