"""One backward pass: gradients come, buckets go, and at the end everything is a mean.

``ready`` puts a gradient into its bucket; the bucket's last one starts its :class:`BucketSum`, at once or in the
engine's queue; ``take`` waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..world import Averaged, Label
from .at_once import average_sparse
from .buckets.bucket import is_shared
from .buckets.plan import BucketPlan
from .schedule.negotiation import Negotiation
from .transport.sum_queue import BucketSum, FlatTransport, Transport

if TYPE_CHECKING:
    from .average import GradientAverage


class BackwardPass:
    """The gradients and sums of one backward pass of one engine.

    With a plan, buckets are summed while backward runs. Without one (``plan=None``) the pass only records which
    gradients come, and when. ``task`` is autograd's number of the pass.
    """

    def __init__(self, engine: GradientAverage, task: int, plan: BucketPlan | None) -> None:
        self.engine, self.task, self.plan = engine, task, plan
        self.graph = torch.is_grad_enabled()  # backward(create_graph=True)
        self.touched: set[int] = set()  # parameters whose gradient came on this rank
        self.unplanned: set[int] = set()  # those of them that the plan does not know
        self.absent: set[int] = set()  # parameters of which no rank had a gradient, as far as sums have told
        self.had: set[int] = set()  # parameters of which some rank had one
        self.wants_another_plan = self.uneven = False
        self._share = 1.0 / len(engine.ranks)
        self._ready: dict[int, float] = {}
        self._clock = engine.world.events.clock
        self._started = self._clock()
        self._sums: dict[int, BucketSum | None] = {}  # by bucket; None: no rank had a gradient
        self._negotiation: Negotiation | None = None
        self._valid = True  # whether the parameters still fit the plan; if it is not dynamic the engine has checked
        self._copies_later = False  # whether the thread that begins sums copies gradients into their buckets
        if plan is None:
            return
        told = engine.queue is not None and engine.queue.told
        self._copies_later = told and plan.on_cpus and not plan.dynamic
        for bucket in plan.buckets:
            bucket.begin(engine.parameters)
        if plan.dynamic:
            self._valid = plan.fits(engine.parameters)
            agreement, deadline = engine.agreement, engine.world.deadline
            buckets = len(plan.buckets)
            self._negotiation = Negotiation(buckets, agreement.control, self._start_agreed, self._valid, deadline)
            agreement.thread.submit(self._negotiation.run)

    # While backward runs ----------------------------------------------------------------------------------------------

    def ready(self, index: int) -> None:
        """This rank's gradient of a parameter lies in its ``.grad``. Called in autograd's thread."""
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
            self._start_ready(plan, len(plan.buckets) - 1)

    def _start_ready(self, plan: BucketPlan, upto: int, replan: bool = False) -> None:
        """Start sums in the planned order, up to the first bucket that misses a gradient.

        The last bucket goes when backward has ended, since it tells whether this rank wants a new plan.
        """
        number, queue = len(self._sums), self.engine.queue
        while number < upto and not plan.buckets[number].missing:
            bucket_sum = self._sum(number, self.engine.transport, self.engine.channel)
            bucket_sum.replan = replan and number == len(plan.buckets) - 1
            self._sums[number] = bucket_sum
            if queue is None:
                bucket_sum.begin()
            else:
                queue.add(bucket_sum)
            number += 1

    def _start_agreed(self, number: int) -> BucketSum:
        """Start a bucket that the ranks have agreed on. In the agreement's thread."""
        engine = self.engine
        if engine.rings is not None and engine.queue is not None:
            # Behind the sums of the pass before, which the queue may still hold.
            return engine.queue.add(self._sum(number, engine.rings, "gradients"))
        transport = engine.rings or FlatTransport(engine.agreement.world, engine.ranks)
        bucket_sum = self._sum(number, transport, "gradients")
        bucket_sum.begin()
        return bucket_sum

    def _sum(self, number: int, transport: Transport, channel: str) -> BucketSum:
        assert self.plan is not None
        # The label names the bucket: ranks that begin equal-sized buckets in different orders raise, not mix them up.
        label = Label(self.engine.name, f"backward, bucket {number}", channel, self.plan.urgency(number))
        return BucketSum(self.plan.buckets[number], transport, self.engine.compression, label, self._share, self._clock)

    # When it has ended ------------------------------------------------------------------------------------------------

    def end(self, pile: set[int]) -> None:
        """Backward is over: start what is left to start, and wait for nothing.

        ``pile`` are parameters whose gradients piled up in passes without averaging.
        """
        engine, plan = self.engine, self.plan
        engine.clock.learn(self._ready)
        if plan is None:
            return
        self.unplanned |= {index for index in pile if index not in plan.home and index not in plan.sparse}
        self._fill(plan, pile)
        if self._negotiation is not None:
            came = self.touched | pile
            self._negotiation.end({n for n, bucket in enumerate(plan.buckets) if came.isdisjoint(bucket.indices)})
            return
        replan = bool(self.unplanned)
        if not replan and engine.explicit is None and engine.clock.time_to_look:
            replan = plan.worth_changing(engine.facts(self.touched | set(plan.home)), engine.parameters)
        self._start_ready(plan, len(plan.buckets), replan)

    @property
    def goes_on(self) -> bool:
        """Have all its sums begun, so that each rank may wait for them whenever it likes?"""
        return self.plan is not None and self._negotiation is None

    def finish(self) -> bool:
        """Wait for all sums and set ``.grad`` to the means. False if there was no valid plan: the ranks must settle."""
        plan = self.plan
        if plan is None:
            return False
        if self._negotiation is not None:
            self._sums = self._negotiation.agreed()
            if self._negotiation.invalid:
                self._take_back(plan)
                self.engine.forget_plan()
                return False
        waited = self._clock()
        sums = {number: each for number, each in self._sums.items() if each is not None}
        for number in sums:
            bucket, had = plan.buckets[number], self.take(number)
            for index in bucket.indices:
                parameter = self.engine.parameters[index]
                if index in had and not bucket.holds(index, parameter.grad):
                    parameter.grad = bucket.gradient(index)
        self._take_back(plan)
        late = [each for each in sums.values() if each.done - waited > 1e-3]
        if len(late) > 1:  # they followed each other on the link
            size = sum(each.bucket.bytes for each in late[1:])
            self.engine.clock.learn_link(len(late) - 1, size, late[-1].done - late[0].done)
        average_sparse(self.engine, plan.sparse)
        return True

    def _fill(self, plan: BucketPlan, pile: set[int]) -> None:
        """Complete the buckets with what this rank's ``.grad`` hold already: it is a part of the mean all the same."""
        for bucket in plan.buckets if self._valid else ():
            absent = list(bucket.missing)
            for index in absent:
                bucket.put(index, self.engine.parameters[index].grad, came=index in pile)
            if absent:  # complete buckets are in the hands of the thread
                bucket.fill(self._share)

    def sum_of(self, number: int) -> BucketSum:
        """A bucket's sum, which has begun or waits in the queue."""
        bucket_sum = self._sums[number]
        assert bucket_sum is not None
        return bucket_sum

    def take(self, number: int) -> set[int]:
        """Wait for a bucket's sum, and return the parameters of which any rank had a gradient: the bucket's memory
        holds their means then. RankFailure after the deadline."""
        bucket_sum = self.sum_of(number)
        bucket_sum.wait()
        self._emit(number, bucket_sum)
        bucket = bucket_sum.bucket
        had, uneven, replan = bucket.report(len(self.engine.ranks))
        self.uneven |= uneven
        self.wants_another_plan |= replan
        self.absent |= set(bucket.indices) - had
        self.had |= had
        return had

    def moment(self, index: int) -> tuple[float, int]:
        """Sort key: when a gradient came on this rank; those that did not come last, in the order of parameters."""
        return self._ready.get(index, math.inf), index

    def means(self, number: int, old: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The means of a bucket whose sum is done, by parameter; where no rank had a gradient, the one in ``old``."""
        bucket = self.sum_of(number).bucket
        had = bucket.report(len(self.engine.ranks)).had
        return {i: bucket.gradient(i) if i in had else old[i] for i in bucket.indices if i in had or i in old}

    def learn_link(self) -> None:
        """Tell the clock for how long the link was busy with these sums, and with how many bytes."""
        sums = [each for each in self._sums.values() if each is not None and each.done]
        busy = until = 0.0
        for each in sorted(sums, key=lambda each: each.sent):
            busy += max(0.0, each.done - max(until, each.sent))
            until = max(until, each.done)
        self.engine.clock.learn_link(len(sums), sum(each.bucket.bytes for each in sums), busy)

    def _take_back(self, plan: BucketPlan) -> None:
        """Undo the scaling in buckets that were not summed: their gradients are this rank's own again."""
        for number, bucket in enumerate(plan.buckets if self._valid else ()):
            if self._sums.get(number) is None:
                bucket.take_back(self._share, self.engine.parameters)

    def abandon(self, nested: bool) -> None:
        """Nobody will finish this pass: bring the sums that began to their end.

        If another pass runs inside this one (``nested``), gradients stay on this rank. If it failed, they are dropped:
        some are means already, and the user may have set them to zero while they travelled.
        """
        plan = self.plan
        if plan is None:
            return
        if self._negotiation is not None:
            self._fill(plan, set())
            self._negotiation.end(set())
            self._sums = self._negotiation.agreed()
        for bucket_sum in self._sums.values():
            if bucket_sum is not None:
                bucket_sum.wait()
        self._take_back(plan)
        for index in self.touched if not nested else ():
            home = plan.home.get(index)
            if home is not None and plan.buckets[home].holds(index, self.engine.parameters[index].grad):
                self.engine.parameters[index].grad = None

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
