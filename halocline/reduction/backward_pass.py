"""One backward pass: gradients come, buckets go, and at the end everything is a mean.

``ready`` puts a gradient into its bucket; the bucket's last one starts its :class:`BucketSum`, at once or in the
engine's queue; ``take`` waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..world import Averaged, Label
from .buckets.bucket import Bucket, by_kind, is_shared
from .buckets.plan import BucketPlan
from .schedule.negotiation import Negotiation
from .transport.sparse import sparse_mean
from .transport.sum_queue import BucketSum, FlatTransport, Transport

if TYPE_CHECKING:
    from .average import GradientAverage

_BUCKET_BYTES = 25 << 20  # of a message where nothing is known yet


class BackwardPass:
    """Without a plan it only records which gradients come, and when."""

    def __init__(self, engine: GradientAverage, task: int, plan: BucketPlan | None) -> None:
        self.engine, self.task, self.plan = engine, task, plan
        self.graph = torch.is_grad_enabled()  # backward(create_graph=True)
        self.touched: set[int] = set()
        self.unplanned: set[int] = set()
        self.absent: set[int] = set()
        self.had: set[int] = set()  # came on some rank, as far as sums have told
        self.wants_another_plan = self.uneven = False
        self._share = 1.0 / len(engine.ranks)
        self._ready: dict[int, float] = {}
        self._clock = engine.world.events.clock
        self._started = self._clock()
        self._sums: dict[int, BucketSum | None] = {}
        self._negotiation: Negotiation | None = None
        #: Of plans that are not dynamic the engine has checked it.
        self._valid = plan is None or not plan.dynamic or plan.fits(engine.parameters)
        told = engine.queue is not None and engine.queue.told
        #: Gradients are copied into their buckets by the thread that begins the sums.
        self._copies_later = told and plan is not None and plan.on_cpus and not plan.dynamic
        if plan is not None and task >= 0:
            self._prepare(plan)

    def _prepare(self, plan: BucketPlan) -> None:
        for bucket in plan.buckets:
            bucket.begin(self.engine.parameters)
        if plan.dynamic:
            agreement, deadline = self.engine.agreement, self.engine.world.deadline
            self._negotiation = Negotiation(
                len(plan.buckets), agreement.control, self._start_agreed, self._valid, deadline
            )
            agreement.thread.submit(self._negotiation.run)

    # While backward runs ----------------------------------------------------------------------------------------------

    def ready(self, index: int) -> None:
        """This rank's gradient of a parameter lies in its ``.grad``."""
        self.touched.add(index)
        self._ready[index] = self._clock()
        plan = self.plan
        if plan is None or not self._valid:
            return
        number = plan.home.get(index)
        if number is None:
            if index not in plan.sparse:
                self.unplanned.add(index)
            return
        bucket, parameter = plan.buckets[number], self.engine.parameters[index]
        gradient = parameter.grad
        later = self._copies_later and not is_shared(gradient)
        if not bucket.put(index, gradient, None if later else self._share):
            parameter.grad = bucket.gradient(index)
        if bucket.missing:
            return
        if self._negotiation is not None:
            self._negotiation.ready(number)
        else:
            self._start_ready(len(plan.buckets) - 1)

    def _start_ready(self, upto: int, replan: bool = False) -> None:
        """In the planned order. The last goes when backward has ended, and tells whether this rank wants a new plan."""
        assert self.plan is not None
        number, queue = len(self._sums), self.engine.queue
        while number < upto and not self.plan.buckets[number].missing:
            bucket_sum = self._sum(number, self.engine.transport, self.engine.channel)
            bucket_sum.replan = replan and number == len(self.plan.buckets) - 1
            self._sums[number] = bucket_sum
            if queue is None:
                bucket_sum.begin()
            else:
                queue.add(bucket_sum)
            number += 1

    def _start_agreed(self, number: int) -> BucketSum:
        """In the agreement's thread. On rings after the sums of the pass before, which the queue may still hold."""
        engine = self.engine
        if engine.rings is not None and engine.queue is not None:
            return engine.queue.add(self._sum(number, engine.rings, "gradients"))
        transport = engine.rings or FlatTransport(engine.agreement.world, engine.ranks)
        bucket_sum = self._sum(number, transport, "gradients")
        bucket_sum.begin()
        return bucket_sum

    def _sum(self, number: int, transport: Transport, channel: str) -> BucketSum:
        assert self.plan is not None
        # Ranks that begin the buckets of one size in different orders must hear of it, and not add them up.
        label = Label(self.engine.name, f"backward, bucket {number}", channel, self.plan.urgency(number))
        return BucketSum(self.plan.buckets[number], transport, self.engine.compression, label, self._share, self._clock)

    # When it has ended ------------------------------------------------------------------------------------------------

    def end(self, pile: set[int]) -> None:
        """Backward is over: begin what is left to begin, and wait for nothing."""
        self.engine.clock.learn(self._ready)
        if self.plan is None:
            return
        self.unplanned |= {index for index in pile if index not in self.plan.home and index not in self.plan.sparse}
        self._fill(pile)
        if self._negotiation is not None:
            never = {n for n, bucket in enumerate(self.plan.buckets) if not self._came(bucket, pile)}
            self._negotiation.end(never)
        else:
            self._start_ready(len(self.plan.buckets), replan=bool(self.unplanned) or self._would_gain(self.plan))

    @property
    def goes_on(self) -> bool:
        """Have all its sums begun, so that they may be waited for later, on each rank when it likes?"""
        return self.plan is not None and self._negotiation is None

    def finish(self) -> bool:
        """All that was planned is a mean now; False if nothing was, and the ranks must settle it."""
        if self.plan is None:
            return False
        if self._negotiation is not None:
            self._sums = self._negotiation.agreed()
            if self._negotiation.invalid:
                self._take_back(set())
                self.engine.forget_plan()
                return False
        self._take_all()
        self.average_sparse()
        return True

    def _came(self, bucket: Bucket, pile: set[int]) -> bool:
        return any(index in self.touched or index in pile for index in bucket.indices)

    def _fill(self, pile: set[int]) -> None:
        """What did not come: what this rank holds already, which is a part of the mean all the same."""
        if self.plan is None or not self._valid:
            return
        for bucket in self.plan.buckets:
            absent = list(bucket.missing)
            for index in absent:
                bucket.put(index, self.engine.parameters[index].grad, came=index in pile)
            if absent:  # others are in the thread's hands
                bucket.fill(self._share)

    def _would_gain(self, plan: BucketPlan) -> bool:
        """Have the times moved so far that another plan is worth making?"""
        engine = self.engine
        if engine.explicit is not None or not engine.clock.time_to_look:
            return False
        return plan.worth_changing(engine.facts(self.touched | set(plan.home)), engine.parameters)

    def _take_all(self) -> None:
        """Wait in the order in which they went."""
        assert self.plan is not None
        waited = self._clock()
        summed = {number: each for number, each in self._sums.items() if each is not None}
        for number in summed:
            self._give(self.plan.buckets[number], self.take(number))
        self._take_back(set(summed))
        late = [each for each in summed.values() if each.done - waited > 1e-3]
        if len(late) > 1:  # they followed each other on the wire
            size = sum(each.bucket.bytes for each in late[1:])
            self.engine.clock.learn_link(len(late) - 1, size, late[-1].done - late[0].done)

    def sum_of(self, number: int) -> BucketSum:
        """A bucket's sum, which has begun or waits in the queue."""
        bucket_sum = self._sums[number]
        assert bucket_sum is not None
        return bucket_sum

    def take(self, number: int) -> set[int]:
        """Wait for a bucket's sum. Its memory holds means then, of all parameters that any rank had a gradient of."""
        bucket_sum, ranks = self.sum_of(number), len(self.engine.ranks)
        bucket_sum.wait()
        self._emit(number, bucket_sum)
        bucket = bucket_sum.bucket
        counts, replan = bucket.told(ranks)
        self.uneven |= any(0 < count < ranks for count in counts)
        self.wants_another_plan |= replan
        had = {index for index, count in zip(bucket.indices, counts, strict=True) if count}
        self.absent |= set(bucket.indices) - had
        self.had |= had
        return had

    def moment(self, index: int) -> tuple[float, int]:
        """When a gradient came here; of those that did not, in the order of parameters."""
        return self._ready.get(index, math.inf), index

    def means(self, number: int, old: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Of a bucket whose sum is there, by parameter: as ``take`` tells, and where no rank had one, the ``old``."""
        assert self.plan is not None
        bucket = self.plan.buckets[number]
        counts = bucket.told(len(self.engine.ranks)).counts
        had = {index for index, count in zip(bucket.indices, counts, strict=True) if count}
        return {i: bucket.gradient(i) if i in had else old[i] for i in bucket.indices if i in had or i in old}

    def learn_link(self) -> None:
        """From how long there was something on the wire, and how much in all."""
        sums = [each for each in self._sums.values() if each is not None and each.done]
        busy = until = 0.0
        for each in sorted(sums, key=lambda each: each.sent):
            busy += max(0.0, each.done - max(until, each.sent))
            until = max(until, each.done)
        self.engine.clock.learn_link(len(sums), sum(each.bucket.bytes for each in sums), busy)

    def _give(self, bucket: Bucket, had: set[int]) -> None:
        for index in bucket.indices:
            parameter = self.engine.parameters[index]
            if index in had and not bucket.holds(index, parameter.grad):
                parameter.grad = bucket.gradient(index)

    def average_sparse(self, among: set[int] | None = None) -> None:
        assert self.plan is not None
        engine = self.engine
        for index in self.plan.sparse:
            if among is not None and index not in among:
                continue
            parameter = engine.parameters[index]
            label = Label(f"{engine.name} of {engine.names[index]}", "backward", "gradients")
            mean = sparse_mean(parameter.grad, parameter.detach(), engine.world, engine.ranks, label)
            if mean is not None:
                parameter.grad = mean

    def _take_back(self, summed: set[int]) -> None:
        """Of all buckets but these, what this rank had put in is its own again."""
        for number, bucket in enumerate(self.plan.buckets if self.plan is not None and self._valid else []):
            if number not in summed:
                bucket.take_back(self._share, self.engine.parameters)

    def abandon(self, nested: bool) -> None:
        """Nobody will finish it. What went is brought to its end.

        If another pass runs inside this one, what has come stays on this rank. If it failed, its gradients are dropped:
        some of them are means already, and the user may have set them to zero while they travelled.
        """
        if self.plan is None:
            return
        if self._negotiation is not None:
            self._fill(set())
            self._negotiation.end(set())
            self._sums = self._negotiation.agreed()
        for bucket_sum in self._sums.values():
            if bucket_sum is not None:
                bucket_sum.wait()
        self._take_back({number for number, bucket_sum in self._sums.items() if bucket_sum is not None})
        for index in self.touched if not nested else ():
            home = self.plan.home.get(index)
            if home is not None and self.plan.buckets[home].holds(index, self.engine.parameters[index].grad):
                self.engine.parameters[index].grad = None

    def average_at_once(self, indices: Sequence[int]) -> None:
        """Of these parameters, which came on some rank: in messages that fill the wire, one after the other."""
        engine = self.engine
        assert self.plan is not None
        dense = [index for index in sorted(indices) if index not in self.plan.sparse]
        if self.plan.facts.graph:  # backward(create_graph=True)
            self._average_in_graph(dense)
        else:
            for kind in by_kind(dense, engine.parameters):
                for run in self._runs(kind):
                    self._average_bucket(run)
        self.average_sparse(set(indices))

    def _average_in_graph(self, indices: Sequence[int]) -> None:
        """Each by itself, as a part of the graph. What this rank lacks hangs on what it has, so that it takes part in
        the mean's backward whenever the others do."""
        engine = self.engine
        had = [p.grad for p in engine.parameters if p.grad is not None and p.grad.requires_grad]
        nothing = sum((gradient.reshape(-1)[:0].sum() for gradient in had), torch.zeros((), requires_grad=True))
        for index in indices:
            parameter, name = engine.parameters[index], engine.names[index]
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = engine.mean(mine if mine.requires_grad else mine + nothing.to(mine.dtype), name)

    def _runs(self, kind: list[int]) -> list[list[int]]:
        runs: list[list[int]] = [[]]
        filled = 0
        for index in kind:
            if filled >= _BUCKET_BYTES:
                runs.append([])
                filled = 0
            parameter = self.engine.parameters[index]
            runs[-1].append(index)
            filled += parameter.numel() * parameter.element_size()
        return runs

    def _average_bucket(self, indices: list[int]) -> None:
        engine = self.engine
        parameters = [engine.parameters[index] for index in indices]
        bucket = Bucket(indices, parameters)
        bucket.begin(engine.parameters)
        for index, parameter in zip(indices, parameters, strict=True):
            bucket.put(index, parameter.grad)
        bucket.fill(self._share)
        label = Label(engine.name, "backward", "gradients")  # the ranks have just agreed on whose gradients these are
        engine.world.begin_sum(bucket.seal(), engine.ranks, label).wait()
        for index, parameter in zip(indices, parameters, strict=True):
            parameter.grad = bucket.gradient(index)

    def _emit(self, number: int, bucket_sum: BucketSum) -> None:
        engine, world, bucket = self.engine, self.engine.world, bucket_sum.bucket
        if not world.events.listeners:
            return
        ready = max((self._ready[index] for index in bucket.indices if index in self._ready), default=self._started)
        world.emit(
            Averaged(
                next(world.events.numbers),
                world.number,
                bucket_sum.done,
                Label(engine.name, "backward", engine.channel),
                step=engine.steps,
                bucket=number,
                parameters=tuple(engine.names[index] for index in bucket.indices),
                bytes=bucket.bytes,
                ready=ready,
                sent=bucket_sum.sent,
            )
        )
