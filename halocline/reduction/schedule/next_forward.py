"""Sums that go on into the next forward: only the layer that needs a bucket's parameters waits for its sum.

When backward ends, gradients are still pending. ``optimizer.step()`` only records which gradient to apply with which
hyper-parameters, and defers the parameters. The first reader of a deferred parameter waits for its bucket and makes the
step of that bucket, unless the communication thread has made it before. The result is bit for bit that of a
synchronous step.
"""

from __future__ import annotations

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

_LEARN_AGAIN = 4  # after the first steps, one step in four measures when forward needs each parameter


class NextForwardOverlap:
    """The :class:`Overlap` that holds a step's state between the end of backward and the parameters' next use.

    ``optimizers`` are those whose steps may be deferred; their ``step`` methods are replaced.
    """

    def __init__(self, engine: GradientAverage, optimizers: Sequence[Any]) -> None:
        self._engine = engine
        rings, world = engine.rings, engine.world
        thread = CommThread("halocline sums") if rings is None else rings.thread
        engine.use(SumQueue(thread, world, told=rings is not None))
        urgent_first = rings is not None and rings.urgent
        self.goal: Goal = "next forward" if urgent_first else "next forward, one by one"
        self._under_way: BackwardPass | None = None
        self._left: set[int] = set()  # buckets that were not waited for yet
        self._pending: dict[int, Tensor] = {}  # by parameter: its ``.grad`` while it is summed
        self._old: dict[int, Tensor] = {}  # gradients of earlier passes that this pass did not add to
        self._requests: dict[int, StepRequest] = {}  # by parameter: the optimizer step to make
        self._thread_steps: dict[int, list[SumStep]] = {}  # by bucket: steps that the thread makes
        self._needs: dict[int, float] = {}  # by parameter: when forward first read it, without stalls
        self._began, self._stalled = 0.0, 0.0  # of the forward: its first read; seconds that it waited since
        self._to_review: tuple[BackwardPass, set[int]] | None = None
        for optimizer in optimizers:
            check_optimizer(optimizer)
            self._replace_step(optimizer)

    # Called by the engine ---------------------------------------------------------------------------------------------

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """Make the gradients of all buckets pending: backward is over and all its sums have begun."""
        engine = self._engine
        assert ended.plan is not None
        self._under_way, self._left, self._to_review = ended, set(range(len(ended.plan.buckets))), (ended, came)
        self._requests, self._thread_steps, self._needs, self._began = {}, {}, {}, 0.0
        self._learns = engine.clock.passes < 2 * _LEARN_AGAIN or engine.clock.passes % _LEARN_AGAIN == 0
        for number, bucket in enumerate(ended.plan.buckets):
            arrival = _BucketArrival(self, ended.sum_of(number))
            for index in bucket.indices:
                parameter = engine.parameters[index]
                # Keep the object, which the user may hold since an earlier pass, if it lies where the mean will.
                same = type(parameter.grad) is Tensor and bucket.holds(index, parameter.grad)
                gradient: Any = parameter.grad if same else bucket.gradient(index)
                if index not in came and parameter.grad is not None:
                    self._old[index] = parameter.grad
                # Even if no gradient came on this rank: another rank may have had one.
                self._pending[index] = parameter.grad = pending(gradient, arrival)

    def take_means(self) -> None:
        """Nothing is pending: the optimizer steps as usual."""

    def before(self, index: int) -> None:
        """Finish, since no gradient may be pending when another is added to it."""
        self.finish()

    def finish(self) -> None:
        """Wait for all sums and make all requested steps. Each rank may call it at any time: sums go on by
        themselves."""
        if self._under_way is None:
            return
        for number in sorted(self._left):
            self._settle(number)
        ended, self._under_way = self._under_way, None
        for parameter in self._engine.parameters:
            undefer(parameter)  # only watched for needs: their steps are made
        self._engine.clock.learn_needs(self._needs)
        ended.learn_link()
        self._pending, self._requests, self._old = {}, {}, {}

    def look_back(self) -> None:
        """Let the engine review its plan by the last pass, at a point that all ranks reach."""
        seen, self._to_review = self._to_review, None
        if seen is not None:
            self._engine.look_back(*seen)

    # Called by the optimizer ------------------------------------------------------------------------------------------

    def _replace_step(self, optimizer: Any) -> None:
        """Give an optimizer a ``step`` that defers. A bound method, since torch's schedulers look into it."""
        before = optimizer.step
        overlap = self

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # read by torch's schedulers
            if self is not optimizer:  # a copy of the optimizer
                return type(self).step(self, closure)
            return overlap._step(self, closure)

        if getattr(before, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        def reduce(self: Any, protocol: Any) -> Any:
            overlap.finish()  # a copy gets the state after the step
            return self.__class__.__reduce_ex__(self, protocol)

        step._halocline = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        inner = inner_of(optimizer)
        inner.__reduce_ex__ = types.MethodType(reduce, inner)
        inner.register_state_dict_pre_hook(lambda _: self.finish())
        inner.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Record requests for pending gradients; step the other parameters now, or all if any cannot be deferred."""
        numbers = {id(parameter): index for index, parameter in enumerate(self._engine.parameters)}
        theirs = [parameter for bucket in inner_of(optimizer).param_groups for parameter in bucket["params"]]
        asked_before = any(numbers.get(id(parameter)) in self._requests for parameter in theirs)
        if self._under_way is None or closure is not None or asked_before or step_hooks(inner_of(optimizer)):
            self.finish()
            return type(optimizer).step(optimizer, closure)
        now: list[StepRequest] = []
        step_now: list[Tensor] = []
        for bucket in inner_of(optimizer).param_groups:
            settings = copied(bucket)
            for parameter in bucket["params"]:
                index, gradient = numbers.get(id(parameter), -1), parameter.grad
                if gradient is None:
                    continue
                request = StepRequest(optimizer, settings, gradient)
                if is_pending(gradient) and gradient is self._pending.get(index) and can_be_deferred(parameter):
                    self._requests[index] = request
                else:
                    step_now.append(parameter)
                    now.append(request)
        if any(is_pending(request.gradient) for request in now):  # of parameters that cannot be deferred
            self._requests = {i: each for i, each in self._requests.items() if each.optimizer is not optimizer}
            self.finish()
            return type(optimizer).step(optimizer)
        make_step(step_now, now)
        self._defer_parameters(optimizer)
        return None

    def _defer_parameters(self, optimizer: Any) -> None:
        """Defer the parameters of this optimizer's requests, and queue their steps in the thread where it can step."""
        ended = self._under_way
        assert ended is not None
        plan = ended.plan
        assert plan is not None
        waiting: dict[int, list[int]] = {}
        for index, request in self._requests.items():
            number = plan.home[index]
            if number in self._left and request.optimizer is optimizer:
                waiting.setdefault(number, []).append(index)
                defer(self._engine.parameters[index], partial(self._read, index, number))
        queue = self._engine.queue
        if queue is not None and queue.told and plan.on_cpus and can_step_in_thread(optimizer):
            for number, indices in waiting.items():
                job = partial(self._step_in_thread, ended, number, indices)
                step = queue.after(ended.sum_of(number), plan.urgency(number), job, set(indices))
                self._thread_steps.setdefault(number, []).append(step)
        # As any step does: a graph that was made with the parameters before the step must not be used after it.
        torch.autograd.graph.increment_version([self._engine.parameters[index] for index in self._requests])
        self._began = self._stalled = 0.0

    def _step_in_thread(self, ended: BackwardPass, number: int, indices: list[int]) -> None:
        """Make the requested steps of these parameters: the thread's job, once their bucket's sum is done."""
        means = ended.means(number, self._old)
        stepped = [index for index in indices if index in means]
        requests = [replace(self._requests[index], gradient=means[index]) for index in stepped]
        with apart():
            make_step_in_thread([self._engine.parameters[index] for index in stepped], requests)

    # Called by a parameter's first reader ----------------------------------------------------------------------------

    def _read(self, index: int, number: int) -> None:
        """A deferred parameter is read: note when, and settle its bucket."""
        clock = self._engine.world.events.clock
        now = clock()
        self._began = self._began or now
        self._needs.setdefault(index, now - self._began - self._stalled)
        if number in self._left:
            self._settle(number)
            self._stalled += clock() - now

    def _settle(self, number: int) -> None:
        """Wait for a bucket's sum, and make the requested steps of its parameters."""
        if transforming() or tracing() is not None:  # transforms and traces would record what happens in this thread
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
        parameters, requests = [], []
        for index in bucket.indices:
            parameter, request = engine.parameters[index], self._requests.get(index)
            gradient = resolved(self._pending[index])
            mean = gradient if index in had else self._old.get(index)
            if request is not None and mean is not None:
                undefer(parameter)
                if index not in stepped:
                    parameters.append(parameter)
                    requests.append(replace(request, gradient=mean))
            # Leave a ``.grad`` that the user has dropped or replaced meanwhile.
            if mean is not gradient and parameter.grad is gradient:
                parameter.grad = mean
        if parameters:
            with apart():
                make_step(parameters, requests)
        for index in bucket.indices if self._learns else ():
            if index in self._requests and index not in self._needs:  # only to learn when it is read
                defer(engine.parameters[index], partial(self._read, index, number))


class _BucketArrival:
    """What the pending gradients of a bucket call for their values.

    Holds only a weak reference to the overlap, and so to the model: Python's collector does not see that a parameter
    holds its gradient. A gradient that outlives its model waits for its sum itself.
    """

    def __init__(self, overlap: NextForwardOverlap, pending: BucketSum) -> None:
        self._overlap, self._pending = weakref.ref(overlap), [pending]

    def __call__(self) -> None:
        overlap = self._overlap()
        if overlap is not None:
            overlap.finish()
        elif self._pending:
            self._pending.pop().wait()
