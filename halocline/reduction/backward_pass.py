"""One backward pass: gradients come, buckets go, and at the end everything is a mean."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..world import Averaged, Label, World
from .buckets.bucket import Bucket, by_kind, is_shared
from .buckets.plan import BucketPlan
from .schedule.negotiation import Negotiation
from .transport.comm_thread import CommThread
from .transport.rings import Pending
from .transport.sparse import sparse_mean
from .transport.sum_queue import Begin, QueuedSum, Tell

if TYPE_CHECKING:
    from .average import GradientAverage

_BUCKET_BYTES = 25 << 20  # of a message where nothing is known yet


class BackwardPass:
    """Without a plan it only writes down what comes."""

    def __init__(self, engine: GradientAverage, task: int, plan: BucketPlan | None) -> None:
        self.engine, self.task, self.plan = engine, task, plan
        self.graph = torch.is_grad_enabled()  # backward(create_graph=True)
        self.touched: set[int] = set()
        self.unplanned: set[int] = set()
        self.absent: set[int] = set()
        self.had: set[int] = set()  # came on some rank, as far as sums have told
        self.wants_another_plan = self.uneven = self._anew = False
        self._share = 1.0 / engine.world.size
        self._ready: dict[int, float] = {}
        self._started = time.perf_counter()
        self._sums: dict[int, Pending | None] = {}
        self._sent: dict[int, float] = {}
        self._done: dict[int, float] = {}
        self._negotiation: Negotiation | None = None
        #: Of others the engine has seen to it.
        self._valid = plan is None or not plan.dynamic or plan.fits(engine.parameters)
        #: Gradients are left to the thread to copy.
        self._leaves_copying = (
            isinstance(engine.queue, CommThread) and plan is not None and plan.on_cpus and not plan.dynamic
        )
        if plan is not None and task >= 0:
            self._prepare(plan)

    def _prepare(self, plan: BucketPlan) -> None:
        for bucket in plan.buckets:
            bucket.begin(self.engine.parameters)
        if plan.dynamic:
            self._negotiation = Negotiation(
                len(plan.buckets),
                self.engine.agreement.control,
                self._begin_beside,
                self._valid,
                self.engine.world.deadline,
            )

    # While backward runs ----------------------------------------------------------------------------------------------

    def arrived(self, index: int) -> None:
        self.touched.add(index)
        self._ready[index] = time.perf_counter()
        if self.plan is None or not self._valid:
            return
        number = self.plan.home.get(index)
        if number is None:
            if index not in self.plan.sparse:
                self.unplanned.add(index)
            return
        bucket, parameter = self.plan.buckets[number], self.engine.parameters[index]
        gradient = parameter.grad
        at_once = not self._leaves_copying or is_shared(gradient)
        held = bucket.put(index, gradient)
        if at_once:
            bucket.fill(self._share)
        if not held:
            parameter.grad = bucket.given(index)
        if bucket.missing:
            return
        if self._negotiation is not None:
            self._negotiation.ready(number)
        else:
            self._begin_those_ready(len(self.plan.buckets) - 1)

    def _begin_those_ready(self, upto: int) -> None:
        """In the planned order. The last goes when backward has ended, for it says what there is to say."""
        assert self.plan is not None
        number = len(self._sums)
        while number < upto and not self.plan.buckets[number].missing:
            self._sums[number] = self._begin_sum(number)
            number += 1

    def _begin_sum(self, number: int) -> Pending:
        begin = self._sum_of(number, self.engine.world)
        return begin(None) if self.engine.queue is None else self.engine.queue.add(begin)

    def _begin_beside(self, number: int) -> Pending:
        """Where the thread may still have sums of the pass before to begin on the same rings: after those."""
        begin, line = self._sum_of(number, self.engine.agreement.world), self.engine.queue
        return line.add(begin) if isinstance(line, CommThread) else begin(None)

    def _sum_of(self, number: int, world: World) -> Begin:
        """Begins it. It does not keep the engine: a gradient that is under way keeps its sum."""
        assert self.plan is not None
        engine, sent, bucket, share = self.engine, self._sent, self.plan.buckets[number], self._share
        anew = self._anew and number == len(self.plan.buckets) - 1
        # Ranks that begin the buckets of one size in different orders must hear of it, and not add them up.
        place = f"backward, bucket {number}"
        channel = engine.channel if world is engine.world else "gradients"  # worlds beside are an engine's own
        label = Label(engine.name, place, channel, self.plan.urgency(number))
        wire, carry = engine.compression, engine.carrier_of(world, label)

        def begin(tell: Tell | None) -> Pending:
            sent[number] = time.perf_counter()
            bucket.fill(share)
            return wire.begin(bucket, lambda tensor: carry(tensor, tell), anew)

        return begin

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
            self._anew = self._wish()
            self._begin_those_ready(len(self.plan.buckets))

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

    def _wish(self) -> bool:
        """For other buckets: where one came that none was planned for, or the times have moved."""
        assert self.plan is not None
        return bool(self.unplanned) or self._would_gain(self.plan)

    def _would_gain(self, plan: BucketPlan) -> bool:
        engine = self.engine
        if engine.explicit is not None or not engine.clock.time_to_look:
            return False
        return plan.worth_changing(engine.facts(self.touched | set(plan.home)), engine.parameters)

    def _take_all(self) -> None:
        """Wait in the order in which they went."""
        assert self.plan is not None
        waited = time.perf_counter()
        moments: list[tuple[float, int]] = []
        for number, pending in self._sums.items():
            if pending is not None:
                self._give(self.plan.buckets[number], self.take(number))
                moments.append((self._done[number], self.plan.buckets[number].bytes))
        self._take_back({number for number, pending in self._sums.items() if pending is not None})
        late = [(moment, size) for moment, size in moments if moment - waited > 1e-3]
        if len(late) > 1:  # they followed each other on the wire
            self.engine.clock.learn_link(len(late) - 1, sum(size for _, size in late[1:]), late[-1][0] - late[0][0])

    def pending(self, number: int) -> Pending:
        """A bucket's sum, which has begun."""
        found = self._sums[number]
        assert found is not None
        return found

    def take(self, number: int) -> set[int]:
        """Wait for a bucket's sum. Its memory holds means then, of all parameters that any rank had a gradient of."""
        assert self.plan is not None
        bucket, ranks, pending = self.plan.buckets[number], self.engine.world.size, self.pending(number)
        pending.wait()
        self._done[number] = pending.done if isinstance(pending, QueuedSum) else time.perf_counter()
        self._write(number, self._done[number])
        counts, anew = bucket.told(ranks)
        self.uneven |= any(0 < count < ranks for count in counts)
        self.wants_another_plan |= anew
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
        counts = bucket.told(self.engine.world.size).counts
        had = {index for index, count in zip(bucket.indices, counts, strict=True) if count}
        return {i: bucket.given(i) if i in had else old[i] for i in bucket.indices if i in had or i in old}

    def learn_link(self) -> None:
        """From how long there was something on the wire, and how much in all."""
        assert self.plan is not None
        busy = until = 0.0
        for number in sorted(self._done, key=self._sent.__getitem__):
            busy += max(0.0, self._done[number] - max(until, self._sent[number]))
            until = max(until, self._done[number])
        size = sum(self.plan.buckets[number].bytes for number in self._done)
        self.engine.clock.learn_link(len(self._done), size, busy)

    def _give(self, bucket: Bucket, had: set[int]) -> None:
        for index in bucket.indices:
            parameter = self.engine.parameters[index]
            if index in had and not bucket.holds(index, parameter.grad):
                parameter.grad = bucket.given(index)

    def average_sparse(self, among: set[int] | None = None) -> None:
        assert self.plan is not None
        engine = self.engine
        for index in self.plan.sparse:
            if among is not None and index not in among:
                continue
            parameter = engine.parameters[index]
            label = Label(f"{engine.name} of {engine.names[index]}", "backward", "gradients")
            found = sparse_mean(parameter.grad, parameter.detach(), engine.world, label)
            if found is not None:
                parameter.grad = found

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
        for pending in self._sums.values():
            if pending is not None:
                pending.wait()
        self._take_back({number for number, pending in self._sums.items() if pending is not None})
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
        engine.world.begin_sum(bucket.seal(), engine.everyone, label).wait()
        for index, parameter in zip(indices, parameters, strict=True):
            parameter.grad = bucket.given(index)

    def _write(self, number: int, done: float) -> None:
        engine, world = self.engine, self.engine.world
        if not world.events.listeners or self.plan is None:
            return
        bucket = self.plan.buckets[number]
        ready = max((self._ready[index] for index in bucket.indices if index in self._ready), default=self._started)
        world.emit(
            Averaged(
                next(world.events.numbers),
                world.number,
                done,
                Label(engine.name, "backward", engine.channel),
                step=engine.steps,
                bucket=number,
                parameters=tuple(engine.names[index] for index in bucket.indices),
                bytes=bucket.bytes,
                ready=ready,
                sent=self._sent[number],
            )
        )
