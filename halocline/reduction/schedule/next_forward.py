"""Sums that go on into the next forward: each is waited for by the layer that needs its parameters, and by no other.

When backward ends, gradients are still pending. ``optimizer.step()`` only records which gradient to apply with which
hyper-parameters, and defers the parameters. The first user of a deferred parameter waits for its bucket and makes the
step of that bucket, unless the communication thread has made it before. The result is bit for bit that of a
synchronous step.
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._torch_private import step_hooks, tracing, transforming
from ...world import CommThread
from ..buckets.plan import Goal
from ..transport.sum_queue import BucketSum, SumQueue, SumStep
from .deferred import can_be_deferred, defer, is_pending, pending, resolved, undefer
from .partial_step import (
    StepRequest,
    apart,
    can_step_in_thread,
    check_optimizer,
    copied,
    inner_of,
    make_step,
    make_step_in_thread,
)

if TYPE_CHECKING:
    from ..average import GradientAverage
    from ..backward_pass import BackwardPass

_LEARN_AGAIN = 4  # when forward needs each parameter is measured in one of so many steps, after the first ones


class NextForwardOverlap:
    """Between the end of a backward and the parameters' next use. ``optimizers`` are those whose steps may wait."""

    def __init__(self, engine: GradientAverage, optimizers: Sequence[Any]) -> None:
        self._engine = engine
        rings, world = engine.rings, engine.world
        thread = CommThread("halocline sums") if rings is None else rings.thread
        engine.use(SumQueue(thread, world, told=rings is not None))
        urgent_first = rings is not None and rings.urgent
        self.goal: Goal = "next forward" if urgent_first else "next forward, one by one"
        self._under_way: BackwardPass | None = None
        self._left: set[int] = set()  # buckets that nobody has waited for yet
        self._pending: dict[int, Tensor] = {}
        self._old: dict[int, Tensor] = {}  # gradients of earlier passes, which this one did not add to
        self._requests: dict[int, StepRequest] = {}
        self._thread_steps: dict[int, list[SumStep]] = {}  # by bucket: steps that the thread makes
        self._needs: dict[int, float] = {}
        self._began, self._stalled = 0.0, 0.0
        self._looked_at: tuple[BackwardPass, set[int]] | None = None
        for optimizer in optimizers:
            check_optimizer(optimizer)
            self._stand_before(optimizer)

    # What the engine asks ---------------------------------------------------------------------------------------------

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """Backward is over and all its sums have begun."""
        engine = self._engine
        assert ended.plan is not None
        self._under_way, self._left, self._looked_at = ended, set(range(len(ended.plan.buckets))), (ended, came)
        self._requests, self._thread_steps, self._needs, self._began = {}, {}, {}, 0.0
        self._learns = engine.clock.passes < 2 * _LEARN_AGAIN or engine.clock.passes % _LEARN_AGAIN == 0
        for number, bucket in enumerate(ended.plan.buckets):
            arrival = _BucketArrival(self, ended.sum_of(number))
            for index in bucket.indices:
                parameter = engine.parameters[index]
                # The same object, which the user may hold since an earlier pass, if it lies where the mean will.
                same = type(parameter.grad) is Tensor and bucket.holds(index, parameter.grad)
                found: Any = parameter.grad if same else bucket.gradient(index)
                if index not in came and parameter.grad is not None:
                    self._old[index] = parameter.grad
                # Of those that did not come here too: another rank may have had one.
                self._pending[index] = parameter.grad = pending(found, arrival)

    def take_means(self) -> None:
        """Nothing is pending: the optimizer steps as ever."""

    def before(self, index: int) -> None:
        """A gradient is about to be added to a parameter's: nothing may be pending any more."""
        self.finish()

    def finish(self) -> None:
        """Wait for all that is left: the sums go on by themselves, whatever the other ranks are at."""
        if self._under_way is None:
            return
        for number in sorted(self._left):
            self._settle(number)
        ended, self._under_way = self._under_way, None
        for parameter in self._engine.parameters:
            undefer(parameter)  # they are as they should be, and nobody has looked yet
        self._engine.clock.learn_needs(self._needs)
        ended.learn_link()
        self._pending, self._requests, self._old = {}, {}, {}

    def look_back(self) -> None:
        """What the last sums told of plans, at a point that all ranks come to."""
        seen, self._looked_at = self._looked_at, None
        if seen is not None:
            self._engine.look_back(*seen)

    # What the optimizer is asked --------------------------------------------------------------------------------------

    def _stand_before(self, optimizer: Any) -> None:
        """Its ``step`` is ours from here on. A method, for torch's schedulers look into it."""
        before = optimizer.step
        overlap = self

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # torch's schedulers ask
            if self is not optimizer:  # a copy of it
                return type(self).step(self, closure)
            return overlap._step(self, closure)

        if getattr(before, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        def reduce(self: Any, protocol: Any) -> Any:
            overlap.finish()  # a copy is to have the state after the step
            return self.__class__.__reduce_ex__(self, protocol)

        step._halocline = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        inner = inner_of(optimizer)
        inner.__reduce_ex__ = types.MethodType(reduce, inner)
        inner.register_state_dict_pre_hook(lambda _: self.finish())
        inner.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        numbers = {id(parameter): index for index, parameter in enumerate(self._engine.parameters)}
        theirs = [parameter for bucket in inner_of(optimizer).param_groups for parameter in bucket["params"]]
        asked_before = any(numbers.get(id(parameter)) in self._requests for parameter in theirs)
        if self._under_way is None or closure is not None or asked_before or step_hooks(inner_of(optimizer)):
            self.finish()
            return type(optimizer).step(optimizer, closure)
        now: list[StepRequest] = []
        whose: list[Tensor] = []
        for bucket in inner_of(optimizer).param_groups:
            settings = copied(bucket)
            for parameter in bucket["params"]:
                index, gradient = numbers.get(id(parameter), -1), parameter.grad
                if gradient is None:
                    continue
                order = StepRequest(optimizer, settings, gradient)
                if is_pending(gradient) and gradient is self._pending.get(index) and can_be_deferred(parameter):
                    self._requests[index] = order
                else:
                    whose.append(parameter)
                    now.append(order)
        if any(is_pending(order.gradient) for order in now):  # of a kind that cannot be deferred
            self._requests = {i: order for i, order in self._requests.items() if order.optimizer is not optimizer}
            self.finish()
            return type(optimizer).step(optimizer)
        make_step(whose, now)
        self._defer_parameters(optimizer)
        return None

    def _defer_parameters(self, optimizer: Any) -> None:
        ended = self._under_way
        assert ended is not None
        plan = ended.plan
        assert plan is not None
        waiting: dict[int, list[int]] = {}
        for index, order in self._requests.items():
            number = plan.home[index]
            if number in self._left and order.optimizer is optimizer:
                waiting.setdefault(number, []).append(index)
                defer(self._engine.parameters[index], partial(self._touched, index, number))
        queue = self._engine.queue
        if queue is not None and queue.told and plan.on_cpus and can_step_in_thread(optimizer):
            for number, indices in waiting.items():
                job = partial(self._step_in_thread, ended, number, indices)
                step = queue.after(ended.sum_of(number), plan.urgency(number), job, set(indices))
                self._thread_steps.setdefault(number, []).append(step)
        # A graph that was made with them before the step has not been for them since, as after any step.
        torch.autograd.graph.increment_version([self._engine.parameters[index] for index in self._requests])
        self._began = self._stalled = 0.0

    def _step_in_thread(self, ended: BackwardPass, number: int, indices: list[int]) -> None:
        """Make the requested steps of these parameters; the thread's job, once their bucket's sum is there."""
        means = ended.means(number, self._old)
        stepped = [index for index in indices if index in means]
        requests = [replace(self._requests[index], gradient=means[index]) for index in stepped]
        with apart():
            make_step_in_thread([self._engine.parameters[index] for index in stepped], requests)

    # What a parameter's first user asks -------------------------------------------------------------------------------

    def _touched(self, index: int, number: int) -> None:
        now = time.perf_counter()
        self._began = self._began or now
        self._needs.setdefault(index, now - self._began - self._stalled)
        if number in self._left:
            self._settle(number)
            self._stalled += time.perf_counter() - now

    def _settle(self, number: int) -> None:
        """Wait for a bucket, and make the steps that were asked for."""
        if transforming() or tracing() is not None:  # they look at all that their thread does
            with ThreadPoolExecutor(1) as other:
                other.submit(self._settle, number).result()
            return
        ended, engine = self._under_way, self._engine
        assert ended is not None
        assert ended.plan is not None
        bucket, thread_steps = ended.plan.buckets[number], self._thread_steps.get(number, ())
        had = ended.take(number)
        for step in thread_steps:
            step.wait()
        self._left.discard(number)
        stepped = set().union(*(step.indices for step in thread_steps))
        whose, orders = [], []
        for index in bucket.indices:
            parameter, order = engine.parameters[index], self._requests.get(index)
            shell = resolved(self._pending[index])
            mean = shell if index in had else self._old.get(index)
            if order is not None and mean is not None:
                undefer(parameter)
                if index not in stepped:
                    whose.append(parameter)
                    orders.append(StepRequest(order.optimizer, order.settings, mean))
            # A gradient that was let go of meanwhile, or replaced, is none of ours.
            if mean is not shell and parameter.grad is shell:
                parameter.grad = mean
        if whose:
            with apart():
                make_step(whose, orders)
        self._watch_for_needs(number)

    def _watch_for_needs(self, number: int) -> None:
        """To learn when the others of a bucket are needed; there is nothing left to do."""
        assert self._under_way is not None
        assert self._under_way.plan is not None
        for index in self._under_way.plan.buckets[number].indices if self._learns else ():
            if index in self._requests and index not in self._needs:
                defer(self._engine.parameters[index], partial(self._touched, index, number))


class _BucketArrival:
    """What pending gradients of a bucket call for their values. Holds only a weak reference to the model: Python's
    collector does not see that a parameter holds its gradient. A gradient that outlives its model waits for its sum."""

    def __init__(self, overlap: NextForwardOverlap, pending: BucketSum) -> None:
        self._deadlines, self._pending = weakref.ref(overlap), [pending]

    def __call__(self) -> None:
        overlap = self._deadlines()
        if overlap is not None:
            overlap.finish()
        elif self._pending:
            self._pending.pop().wait()
