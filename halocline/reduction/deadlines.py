"""Sums that go on into the next forward: each is waited for by the layer that needs its parameters, and by no other.

When backward ends, gradients are still under way (late). ``optimizer.step()`` writes down what is to be done: which
gradient, with which hyper-parameters. The parameters are due from then on, and the first to touch one waits for the
group it is in and makes the step of that group; or the clerk has made it before. What is computed is what a synchronous
step computes, bit by bit.
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch_private import step_hooks, tracing, transforming
from .clerk import Beside, Clerk
from .late import can_be_due, is_late, late, make_due, no_longer_due, no_longer_late
from .line import Line, Waiting
from .part_step import (
    Order,
    apart,
    can_step_beside,
    check_optimizer,
    copied,
    inner_of,
    make_step,
    make_step_beside,
)
from .plan import Goal

if TYPE_CHECKING:
    from .average import GradientAverage
    from .passes import Pass
    from .rings import Pending

_LEARN_AGAIN = 4  # steps: when parameters are needed is looked at in every such, after the first


class Deadlines:
    """Between the end of a backward and the parameters' next use. ``optimizers`` are those whose steps may wait."""

    def __init__(self, engine: GradientAverage, optimizers: Sequence[Any]) -> None:
        self._engine = engine
        engine.use(Clerk(engine.world) if engine.rings is not None else Line(engine.world))
        urgent_first = engine.rings is not None and engine.rings.urgent
        self.goal: Goal = "next forward" if urgent_first else "next forward, one by one"
        self._under_way: Pass | None = None
        self._left: set[int] = set()  # groups that nobody has waited for yet
        self._late: dict[int, Tensor] = {}
        self._old: dict[int, Tensor] = {}  # gradients of earlier passes, which this one did not add to
        self._orders: dict[int, Order] = {}
        self._beside: dict[int, list[Beside]] = {}  # by group: steps that the clerk makes
        self._needs: dict[int, float] = {}
        self._began, self._stalled = 0.0, 0.0
        self._looked_at: tuple[Pass, set[int]] | None = None
        for optimizer in optimizers:
            check_optimizer(optimizer)
            self._stand_before(optimizer)

    # What the engine asks ---------------------------------------------------------------------------------------------

    def take_over(self, ended: Pass, came: set[int]) -> None:
        """Backward is over and all its sums have begun."""
        engine = self._engine
        assert ended.plan is not None
        self._under_way, self._left, self._looked_at = ended, set(range(len(ended.plan.groups))), (ended, came)
        self._orders, self._beside, self._needs, self._began = {}, {}, {}, 0.0
        self._learns = engine.clock.passes < 2 * _LEARN_AGAIN or engine.clock.passes % _LEARN_AGAIN == 0
        for number, group in enumerate(ended.plan.groups):
            arrival = _Arrival(self, ended.pending(number))
            for index in group.indices:
                parameter = engine.parameters[index]
                # The very object, which somebody may have kept from an earlier pass, if it lies where the mean will.
                same = type(parameter.grad) is Tensor and group.holds(index, parameter.grad)
                found: Any = parameter.grad if same else group.given(index)
                if index not in came and parameter.grad is not None:
                    self._old[index] = parameter.grad
                # Of those that did not come here too: another rank may have had one.
                self._late[index] = parameter.grad = late(found, arrival)

    def take_means(self) -> None:
        """Nothing is late: the optimizer may step as ever."""

    def before(self, index: int) -> None:
        """A gradient is about to be added to a parameter's: nothing may be late any more."""
        self.finish()

    def finish(self) -> None:
        """Wait for all that is left: the sums go on by themselves, whatever the other ranks are at."""
        if self._under_way is None:
            return
        for number in sorted(self._left):
            self._settle(number)
        ended, self._under_way = self._under_way, None
        for parameter in self._engine.parameters:
            no_longer_due(parameter)  # they are as they should be, and nobody has looked yet
        self._engine.clock.learn_needs(self._needs)
        ended.learn_link()
        self._late, self._orders, self._old = {}, {}, {}

    def look_back(self) -> None:
        """What the last sums told of plans, at a point that all ranks come to."""
        seen, self._looked_at = self._looked_at, None
        if seen is not None:
            self._engine.look_back(*seen)

    # What the optimizer is asked --------------------------------------------------------------------------------------

    def _stand_before(self, optimizer: Any) -> None:
        """Its ``step`` is ours from here on. A method, for torch's schedulers look into it."""
        before = optimizer.step
        deadlines = self

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # torch's schedulers ask
            if self is not optimizer:  # a copy of it
                return type(self).step(self, closure)
            return deadlines._step(self, closure)

        if getattr(before, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        def reduce(self: Any, protocol: Any) -> Any:
            deadlines.finish()  # whoever copies it wants its state as it should be
            return self.__class__.__reduce_ex__(self, protocol)

        step._halocline = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        inner = inner_of(optimizer)
        inner.__reduce_ex__ = types.MethodType(reduce, inner)
        inner.register_state_dict_pre_hook(lambda _: self.finish())
        inner.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        numbers = {id(parameter): index for index, parameter in enumerate(self._engine.parameters)}
        theirs = [parameter for group in inner_of(optimizer).param_groups for parameter in group["params"]]
        asked_before = any(numbers.get(id(parameter)) in self._orders for parameter in theirs)
        if self._under_way is None or closure is not None or asked_before or step_hooks(inner_of(optimizer)):
            self.finish()
            return type(optimizer).step(optimizer, closure)
        now: list[Order] = []
        whose: list[Tensor] = []
        for group in inner_of(optimizer).param_groups:
            settings = copied(group)
            for parameter in group["params"]:
                index, gradient = numbers.get(id(parameter), -1), parameter.grad
                if gradient is None:
                    continue
                order = Order(optimizer, settings, gradient)
                if is_late(gradient) and gradient is self._late.get(index) and can_be_due(parameter):
                    self._orders[index] = order
                else:
                    whose.append(parameter)
                    now.append(order)
        if any(is_late(order.gradient) for order in now):  # of a kind that cannot be due
            self._orders = {i: order for i, order in self._orders.items() if order.optimizer is not optimizer}
            self.finish()
            return type(optimizer).step(optimizer)
        make_step(whose, now)
        self._make_due(optimizer)
        return None

    def _make_due(self, optimizer: Any) -> None:
        assert self._under_way is not None
        plan = self._under_way.plan
        assert plan is not None
        waiting: dict[int, list[int]] = {}
        for index, order in self._orders.items():
            number = plan.home[index]
            if number in self._left and order.optimizer is optimizer:
                waiting.setdefault(number, []).append(index)
                make_due(self._engine.parameters[index], partial(self._touched, index, number))
        if isinstance(self._engine.line, Clerk) and plan.on_cpus and can_step_beside(optimizer):
            for number, indices in waiting.items():
                self._have_stepped(self._engine.line, number, indices)
        # A graph that was made with them before the step has not been for them since, as after any step.
        torch.autograd.graph.increment_version([self._engine.parameters[index] for index in self._orders])
        self._began = self._stalled = 0.0

    def _have_stepped(self, clerk: Clerk, number: int, indices: list[int]) -> None:
        """By the clerk, as soon as the group's sum is there."""
        ended, engine, old, orders = self._under_way, self._engine, self._old, self._orders
        assert ended is not None
        pending = ended.pending(number)
        assert isinstance(pending, Waiting)

        def step() -> None:
            means = ended.means(number, old)
            those = [index for index in indices if index in means]
            with apart():
                make_step_beside(
                    [engine.parameters[index] for index in those],
                    [Order(orders[index].optimizer, orders[index].settings, means[index]) for index in those],
                )

        assert ended.plan is not None
        job = clerk.after(pending, ended.plan.urgency(number), step, set(indices))
        self._beside.setdefault(number, []).append(job)

    # What a parameter's first user asks -------------------------------------------------------------------------------

    def _touched(self, index: int, number: int) -> None:
        now = time.perf_counter()
        self._began = self._began or now
        self._needs.setdefault(index, now - self._began - self._stalled)
        if number in self._left:
            self._settle(number)
            self._stalled += time.perf_counter() - now

    def _settle(self, number: int) -> None:
        """Wait for a group, and make the steps that were asked for."""
        if transforming() or tracing() is not None:  # they look at all that their thread does
            with ThreadPoolExecutor(1) as other:
                other.submit(self._settle, number).result()
            return
        ended, engine = self._under_way, self._engine
        assert ended is not None
        assert ended.plan is not None
        group, beside = ended.plan.groups[number], self._beside.get(number, ())
        had = ended.take(number)
        for job in beside:
            job.wait()
        self._left.discard(number)
        stepped = set().union(*(job.indices for job in beside))
        whose, orders = [], []
        for index in group.indices:
            parameter, order = engine.parameters[index], self._orders.get(index)
            shell = no_longer_late(self._late[index])
            mean = shell if index in had else self._old.get(index)
            if order is not None and mean is not None:
                no_longer_due(parameter)
                if index not in stepped:
                    whose.append(parameter)
                    orders.append(Order(order.optimizer, order.settings, mean))
            # A gradient that was let go of meanwhile, or replaced, is none of ours.
            if mean is not shell and parameter.grad is shell:
                parameter.grad = mean
        if whose:
            with apart():
                make_step(whose, orders)
        self._watch_for_needs(number)

    def _watch_for_needs(self, number: int) -> None:
        """To learn when the others of a group are needed; there is nothing left to do."""
        assert self._under_way is not None
        assert self._under_way.plan is not None
        for index in self._under_way.plan.groups[number].indices if self._learns else ():
            if index in self._orders and index not in self._needs:
                make_due(self._engine.parameters[index], partial(self._touched, index, number))


class _Arrival:
    """Of a group's late gradients. It does not keep the model: that a parameter keeps its gradient is nothing that
    Python's collector sees. A gradient that outlives its model waits for its sum alone."""

    def __init__(self, deadlines: Deadlines, pending: Pending) -> None:
        self._deadlines, self._pending = weakref.ref(deadlines), [pending]

    def __call__(self) -> None:
        deadlines = self._deadlines()
        if deadlines is not None:
            deadlines.finish()
        elif self._pending:
            self._pending.pop().wait()
