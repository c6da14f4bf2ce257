"""Parameter gradients averaged over ranks while backward runs: law 3's last step, behind one small interface.

The first backward is recorded: which gradients come, in which order, and when. In one exchange the ranks agree on that
and on what a sum costs, and each makes the same plan (``buckets``). From then on gradients lie in their bucket's
memory, and a bucket's sum begins when its last gradient is there, in the planned order: no rank is special, and nothing
but the sums is sent. Where ranks take different paths, they agree which buckets may go (``schedule.negotiation``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .._torch_private import after_backward, backward_number, is_captured, passes_inside_each_other
from ..errors import MeshError
from ..world import Label, Route, Sum, World
from .at_once import average_at_once, average_sparse
from .backward_pass import BackwardPass
from .buckets.cutting import LinkCost
from .buckets.plan import FORWARD, BucketPlan, Goal, GradientFacts
from .hooks import ParameterHooks
from .owners import AveragedMark, is_averaged, mark_averaged, refuse_unaveraged
from .schedule.clock import Clock, FixedClock, measured_link
from .schedule.control import Control, Doubling
from .schedule.negotiation import Agreement
from .schedule.overlap import Overlap
from .transport.compression import GradientCompression
from .transport.leases import lease
from .transport.rings import Rings
from .transport.sum_queue import FlatTransport, SumQueue, Transport

_log = logging.getLogger("halocline")
_REGULAR = 64  # passes in a row in which all ranks took one path, after which they stop negotiating
#: Engines of a world that may sum while backward runs. Further engines sum when it has ended, all in one order.
_CHANNELS = 16
_DEFERRED = 16  # passes after a nested one in which no sum begins during backward

#: By autograd's number of a backward pass: the engines that take part in it. Weak, since a failed pass never ends.
_open_passes: dict[int, weakref.WeakSet[GradientAverage]] = {}


class GradientAverage:
    """Averages the gradients of ``parameters`` over ``ranks`` (by default all) in each backward pass.

    Made by all ranks together, with the same parameters in the same order. ``autograd.grad`` of a parameter returns the
    mean too. ``buckets`` (lists of parameter indices) replace planned ones. ``deterministic``: bucket plans depend on
    sizes and order alone, not on measured times, so that results are equal bit for bit from run to run.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        world: World,
        buckets: Sequence[Sequence[int]] | None = None,
        control: Callable[[World, str], Control] = Doubling,
        compression: GradientCompression | None = None,
        rings: Rings | None = None,
        deterministic: bool = False,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.world, self.ranks = world, tuple(range(world.size)) if ranks is None else ranks
        self.compression, self.rings = compression or GradientCompression(), rings
        self.transport: Transport = rings or FlatTransport(world, self.ranks)
        self.active = True
        self.partners: list[GradientAverage] = []  # engines of the same model for parameters that fewer ranks share
        self.model: weakref.ref[nn.Module] | None = None  # set if these are all parameters of a model
        self.patient = False  # if set, sums begin only when backward has ended
        self.queue: SumQueue | None = None  # set by ``use``: a thread begins the sums
        self.overlap: Overlap | None = None  # takes over when backward has ended; None: all sums are waited for
        world.engines += 1
        self.number = world.engines
        self.name = f"gradient average {world.engines}"  # in labels, so that ranks never mix up two models
        self._channel = None
        if parameters and not rings:
            self._channel = lease(world, "channel", "gradients {}".format, _CHANNELS, self.ranks)
        if self._channel is not None:
            weakref.finalize(self, self._channel.release).atexit = False
        self.plan: BucketPlan | None = None
        self.explicit = buckets
        self._deterministic = deterministic
        self.clock = self._new_clock()
        self.steps = 0
        self._make_control = control
        self._agreement: Agreement | None = None
        self._open: BackwardPass | None = None
        self._asked = (-1, False)  # a backward pass, and whether it is an ``autograd.grad``
        self._pile: set[int] = set()  # parameters whose gradients piled up unaveraged
        self._hooks: list[ParameterHooks] = []
        self._deferred = 0  # passes left in which no sum begins during backward
        self._regular = 0  # passes in a row in which all ranks took one path
        self._exchanged = 0  # messages sent to agree on plans
        for parameter in self.parameters:
            self._watch(parameter)

    @property
    def channel(self) -> str:
        """The channel of the world on which planned sums go, in an order of their own."""
        return "gradients" if self._channel is None else str(self._channel.thing)

    def use(self, queue: SumQueue) -> None:
        """From now on add sums to ``queue``, whose thread begins them."""
        self.queue = queue
        if self._channel is not None:
            self._channel.queue = queue
        weakref.finalize(self, queue.dismiss).atexit = False

    def _watch(self, parameter: Tensor) -> None:
        """Hook the next parameter."""
        index = len(self._hooks)
        if is_averaged(parameter):
            raise MeshError(
                f"{self.names[index]} is averaged already, by another hc.distribute or hc.average_gradients; "
                "distribute one module that holds everything shared"
            )
        mark_averaged(parameter, AveragedMark(weakref.ref(self)))
        self._hooks.append(ParameterHooks(self, index, parameter))

    def let_go(self) -> None:
        """Give the memory of gradients back, between steps, once they are None."""
        for engine in (self, *self.partners):
            if engine.plan is not None:
                engine.plan.let_go()

    def returns_gradients(self, index: int) -> bool:
        """A gradient was computed. Is its pass an ``autograd.grad``, which returns gradients and accumulates none?"""
        task = backward_number()
        if self._open is not None and self._open.task != task:
            self._abandon(index)  # before this gradient is added to one that may be travelling
        if task != self._asked[0]:
            # Looked up in every pass: a change of dtype or device gives the parameter another node.
            self._asked = task, is_captured(get_gradient_edge(self.parameters[index]).node)
        if self.overlap is not None and not self._asked[1]:
            self.overlap.before(index)
        return self._asked[1]

    def _abandon(self, index: int) -> None:
        """Close a pass that failed, or inside which this one runs (reentrant checkpoints)."""
        left, self._open = self._open, None
        assert left is not None
        nested = passes_inside_each_other() > (0 if self.parameters[index].is_cuda else 1)
        if left.task in _open_passes:
            _open_passes[left.task].discard(self)
        left.abandon(nested)
        if nested:
            self._pile |= left.touched
        elif left.touched:
            _log.warning("%s: the last backward pass raised an error; its gradients are dropped", self.name)
            for used in (self._channel, None if self._agreement is None else self._agreement.lease):
                if used is not None:
                    used.spoiled = True
            for hooks, parameter in zip(self._hooks, self.parameters, strict=True):
                hooks.put_back(parameter)
        self._deferred = _DEFERRED

    def adopt(self, added: Sequence[tuple[str, Tensor]]) -> None:
        """Average further parameters, the same on every rank. The plan is made anew."""
        for name, parameter in added:
            self.names.append(name)
            self.parameters.append(parameter)
            self._watch(parameter)
        self.forget_plan()

    def forget_plan(self) -> None:
        """Record the next backward and make a new plan; all ranks call it at the same point."""
        link = self.clock.link
        self.plan, self.clock, self._regular = None, self._new_clock(), 0
        self.clock.link = link

    def _new_clock(self) -> Clock:
        sizes = [parameter.nbytes for parameter in self.parameters]
        return FixedClock(sizes) if self._deterministic else Clock(len(sizes))

    def __deepcopy__(self, memo: object) -> None:
        """A copied or loaded model (a moving average of weights, for instance) has no engine: None."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def mean(self, gradient: Tensor, name: str) -> Tensor:
        """The mean of a gradient over the ranks, differentiable: it is its own adjoint. By all ranks together."""
        share = 1.0 / len(self.ranks)
        route = Route(self.world, self.ranks, Label(f"{self.name} of {name}", "autograd.grad", "gradients"))
        return Sum.apply(gradient, route, (share, share))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients pile up on each rank; the next backward outside averages them with its own."""
        engines = [self, *self.partners]
        before = [engine.active for engine in engines]
        try:
            for engine in engines:
                engine.active = False
            yield
        finally:
            for engine, active in zip(engines, before, strict=True):
                engine.active = active

    # One backward pass ----------------------------------------------------------------------------------------------

    def accumulated(self, index: int) -> None:
        """This rank's gradient of a parameter was added to its ``.grad``. Called by :class:`ParameterHooks`."""
        if not self.active:
            self._hooks[index].refuse_share(self.names[index])
            self._pile.add(index)
            return
        if self._open is None:
            self._begin()
        self._open.ready(index)  # type: ignore[union-attr]

    def _begin(self) -> None:
        task = backward_number()
        if self.plan is not None and not self.plan.dynamic and not self.plan.fits(self.parameters):
            self.forget_plan()
        # Under create_graph gradients are differentiated themselves, and cannot lie in a bucket.
        unordered = self._channel is None and self.rings is None
        deferred = self.plan is None or self.patient or unordered or self._deferred > 0 or torch.is_grad_enabled()
        plan = None if deferred or not self.plan.buckets else self.plan  # type: ignore[union-attr]
        self._open = BackwardPass(self, task, plan)
        if task not in _open_passes:
            _open_passes[task] = weakref.WeakSet()
            after_backward(lambda: _finish_all(task))
        _open_passes[task].add(self)

    def _end(self) -> set[int]:
        """Begin the sums that are left; returns the parameters whose gradients came on this rank."""
        ended = self._open
        assert ended is not None
        pile = {index for index in self._pile if self.parameters[index].grad is not None}
        self._pile = set()
        gone = [index for index in ended.touched if self.parameters[index].grad is None]
        if gone:
            raise MeshError(
                f"the gradient of {self.names[gone[0]]} is gone before the ranks averaged it; let go of it after "
                "backward, or in a hook of register_post_accumulate_grad_hook"
            )
        ended.end(pile)
        # Only now, since the other ranks wait for the sums that have begun here.
        refuse_unaveraged(self.model() if self.model is not None else None)
        return ended.touched | pile

    def _finish(self, came: set[int]) -> BackwardPass:
        """Turn gradients into means, or hand the running sums to ``overlap``."""
        ended, self._open = self._open, None
        assert ended is not None
        self.steps += 1
        if self.overlap is not None:
            self.overlap.look_back()
            if ended.goes_on:
                assert ended.plan is not None
                average_sparse(self, ended.plan.sparse)
                self.overlap.take_over(ended, came)
                return ended
        if ended.finish():
            self.look_back(ended, came)
        else:
            ended.had |= self._settle(came, self._everybody())
        if self.overlap is not None:
            self.overlap.take_means()
        return ended

    def _run_hooks(self, ended: BackwardPass, came: set[int]) -> None:
        """Run users' hooks in the order in which gradients came, also for gradients that only other ranks had."""
        if not any(self._hooks):
            return
        if self.overlap is not None:
            self.overlap.finish()
        came = self._everybody() if self.overlap is not None else came | ended.had
        with torch.set_grad_enabled(ended.graph):
            for index in sorted(came, key=ended.moment):
                if self.parameters[index].grad is not None:
                    self._hooks[index].run(self.parameters[index])

    def look_back(self, ended: BackwardPass, came: set[int]) -> None:
        """Keep or change the plan by what the sums of a pass told. By all ranks, which were told the same."""
        plan = ended.plan
        assert plan is not None
        if ended.wants_another_plan or (ended.absent and not plan.dynamic and not plan.complete):
            planned = set(plan.home) | set(plan.sparse)
            ended.had |= self._settle((came | planned) - ended.absent, self._everybody() - planned)
        elif ended.uneven:
            self._go_by_agreement()
        if self.plan is not None and self.plan.dynamic:
            self._regular = 0 if ended.uneven else self._regular + 1
            if self._regular >= _REGULAR:  # the ranks take one path again, and need not negotiate
                self.forget_plan()

    def _everybody(self) -> set[int]:
        return set(range(len(self.parameters)))

    def _settle(self, came: set[int], left: set[int]) -> set[int]:
        """Agree on which gradients ``came``, average those in ``left`` at once, and plan the next pass.

        By all ranks together. Returns the parameters of which any rank had a gradient.
        """
        if self.clock.link is None:
            self.clock.link = measured_link(self.world, self.ranks)
        before = self.world.traffic.messages
        facts = self.facts(came).agreed(self.world, self.ranks, self.name)
        self._exchanged += self.world.traffic.messages - before
        plan = self._planned(facts)
        came_now = [index for index in facts.came if index in left]
        average_at_once(self, facts, came_now, plan if self._deterministic else None)
        if self._deferred:
            self._deferred -= 1
        elif not plan.dynamic or len(self.ranks) == self.world.size:
            self.plan = plan
            if plan.dynamic:
                self._prepare_agreement()
        return set(facts.came)

    def _planned(self, facts: GradientFacts) -> BucketPlan:
        goal: Goal = "end of backward" if self.overlap is None else self.overlap.goal
        if self.rings is not None and goal in FORWARD:
            self.rings.expect(facts.link.per_byte)
        return BucketPlan.of(facts, self.parameters, self.explicit, goal)

    def facts(self, came: set[int]) -> GradientFacts:
        """The facts as this rank alone knows them; ``came`` are the parameters that count as ready."""
        every = range(len(self.parameters))
        ready = [self.clock.times[index] if index in came else -1.0 for index in every]
        gradients = [parameter.grad for parameter in self.parameters]
        known = set() if self.plan is None else set(self.plan.sparse)  # their gradients may be None by now
        sparse = [i in known or (each is not None and each.is_sparse) for i, each in enumerate(gradients)]
        graph = any(gradient is not None and gradient.requires_grad for gradient in gradients)
        lacking = [index not in came for index in every]
        return GradientFacts(ready, lacking, sparse, self.clock.needs, graph, self.clock.link or LinkCost())

    # Where ranks take different paths ---------------------------------------------------------------------------------

    def _go_by_agreement(self) -> None:
        """Negotiate from now on: all ranks saw in the sums that only some ranks had a gradient."""
        if self.plan is None or self.plan.dynamic:
            return
        if len(self.ranks) < self.world.size:
            # Negotiation needs a duplicated world, which all ranks must make together: without, each pass is settled.
            self.plan = None
            return
        self.plan = self._planned(replace(self.plan.facts, lacking=[True] * len(self.parameters)))
        self._prepare_agreement()

    def _prepare_agreement(self) -> None:
        self._regular = 0
        if self._agreement is None:
            self._agreement = Agreement(self.world, self._make_control, f"{self.name}: who may go")
            weakref.finalize(self, self._agreement.lease.release).atexit = False

    @property
    def control_messages(self) -> int:
        """Messages that this rank has sent to agree on plans and buckets; sums are not counted."""
        return self._exchanged + (0 if self._agreement is None else self._agreement.world.traffic.messages)

    @property
    def agreement(self) -> Agreement:
        """The world and thread in which ranks negotiate; there while the plan is dynamic."""
        assert self._agreement is not None
        return self._agreement


def _finish_all(task: int) -> None:
    """End a backward pass in all engines that took part, in the order of their making: the same on every rank."""
    engines = sorted(_open_passes.pop(task, ()), key=lambda engine: engine.number)
    engines = [engine for engine in engines if engine._open is not None and engine._open.task == task]
    came = [engine._end() for engine in engines]
    ended = [engine._finish(some) for engine, some in zip(engines, came, strict=True)]
    for engine, backward_pass, some in zip(engines, ended, came, strict=True):
        engine._run_hooks(backward_pass, some)


ENGINE = "_halocline_average"  # the attribute of a model that holds its engine


def engine_of(model: nn.Module) -> GradientAverage | None:
    """The engine that averages this model's gradients, if it was distributed."""
    engine = model.__dict__.get(ENGINE)
    return engine if isinstance(engine, GradientAverage) else None
