"""Gradients applied one step late: a step's sums have all of the next step to travel in.

After the backward of step t every parameter's ``.grad`` is the mean of step t - 1, and the optimizer goes by that. The
first step has none: it changes nothing. This is another algorithm than synchronous training, on purpose, and what it
does to the loss is for the user to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import MeshError
from ..buckets.plan import Goal
from ..transport.sum_queue import SumQueue

if TYPE_CHECKING:
    from ..average import GradientAverage
    from ..backward_pass import BackwardPass


class Lag:
    goal: Goal = "step after"

    def __init__(self, engine: GradientAverage) -> None:
        self._engine = engine
        if engine.rings is not None and not engine.compression.may_go_again:
            engine.use(SumQueue(engine.rings.thread, engine.world, told=True))
        self._under_way: tuple[BackwardPass, set[int]] | None = None
        self._held: dict[int, Tensor] = {}  # means of the last step, where they are there already
        self._given: dict[int, Tensor] = {}  # to the parameters, for this step

    def before(self, index: int) -> None:
        # The others are let go of: their memory is wanted for this step.
        self._given = {i: mean for i, mean in self._given.items() if self._engine.parameters[i].grad is mean}
        if index in self._given:
            raise MeshError(
                f"{self._engine.names[index]}: with lag=1, .grad holds the mean of the step before, and this step's "
                "gradient would be added to it; call optimizer.zero_grad(set_to_none=True) before backward"
            )

    def look_back(self) -> None:
        """It is done where the sums are taken."""

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """Its sums go on; those of the step before are waited for."""
        assert ended.plan is not None
        engine = self._engine
        for index in ended.plan.home:
            engine.parameters[index].grad = None
        sparse = {index: engine.parameters[index].grad for index in ended.plan.sparse}
        before, self._under_way = self._arrived(), (ended, came)
        self._hand_out(before)
        self._held = {index: mean for index, mean in sparse.items() if mean is not None}
        if engine.plan is ended.plan:
            engine.plan = ended.plan.twin(engine.parameters)

    def take_means(self) -> None:
        """There was no plan: the gradients of this step are means already, and wait here for the next."""
        given = self._given  # what is left of it in a parameter was applied already
        found = {i: p.grad for i, p in enumerate(self._engine.parameters) if p.grad is not given.get(i)}
        means = {i: mean for i, mean in found.items() if mean is not None}
        before, self._under_way = self._arrived(), None
        self._hand_out(before)
        self._held = means

    def finish(self) -> None:
        """Nothing that anybody may look at is under way."""

    def _arrived(self) -> dict[int, Tensor]:
        """The means of the step before."""
        means = dict(self._held)
        if self._under_way is not None:
            (ended, came), self._under_way = self._under_way, None
            assert ended.plan is not None
            for number, bucket in enumerate(ended.plan.buckets):
                had = ended.take(number)
                means.update({index: bucket.gradient(index) for index in bucket.indices if index in had})
            self._engine.look_back(ended, came)
        return means

    def _hand_out(self, means: dict[int, Tensor]) -> None:
        for index, parameter in enumerate(self._engine.parameters):
            parameter.grad = means.get(index)
        self._given = means

    # For checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The means that the next step will apply, by parameter. By all ranks together."""
        means = self._arrived()
        self._held = means
        return {self._engine.names[index]: mean.detach().clone() for index, mean in means.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        names = self._engine.names
        unknown = sorted(set(state) - set(names))
        if unknown:
            raise MeshError(f"a mean of {unknown[0]} was saved, and the model has no such parameter")
        if self._under_way is not None:
            self._arrived()  # of steps that are no longer ours
        found = {index: state[name] for index, name in enumerate(names) if name in state}
        like = self._engine.parameters
        self._held = {i: mean.detach().to(like[i].device, like[i].dtype).clone() for i, mean in found.items()}
