"""Gradients applied one step late: a step's sums have all of the next step to travel in.

After the backward of step t every parameter's ``.grad`` is the mean of step t - 1, and the optimizer applies that. The
first step has none and changes nothing. This is a different algorithm from synchronous training, on purpose: the user
must check what it does to the loss.
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
    """The :class:`Overlap` of ``lag=1``: keeps one backward's sums under way during the next step."""

    goal: Goal = "step after"

    def __init__(self, engine: GradientAverage) -> None:
        self._engine = engine
        if engine.rings is not None and not engine.compression.may_go_again:
            engine.use(SumQueue(engine.rings.thread, engine.world, told=True))
        self._under_way: tuple[BackwardPass, set[int]] | None = None
        self._kept: dict[int, Tensor] = {}  # means of the last step that have arrived, by parameter
        self._applied: dict[int, Tensor] = {}  # means that are the parameters' ``.grad`` in this step

    def before(self, index: int) -> None:
        """Raise if a gradient of this step would be added to a mean of the step before."""
        # References to means that the user has dropped go, too: this step needs their memory.
        self._applied = {i: mean for i, mean in self._applied.items() if self._engine.parameters[i].grad is mean}
        if index in self._applied:
            raise MeshError(
                f"{self._engine.names[index]}: with lag=1, .grad holds the mean of the step before, and this step's "
                "gradient would be added to it; call optimizer.zero_grad(set_to_none=True) before backward"
            )

    def look_back(self) -> None:
        """Nothing: plans are reviewed when sums have arrived."""

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """Let the sums of this pass go on, and wait for those of the step before."""
        assert ended.plan is not None
        engine = self._engine
        for index in ended.plan.home:
            engine.parameters[index].grad = None
        sparse = {index: engine.parameters[index].grad for index in ended.plan.sparse}
        before, self._under_way = self._arrived(), (ended, came)
        self._apply(before)
        self._kept = {index: mean for index, mean in sparse.items() if mean is not None}
        if engine.plan is ended.plan:
            engine.plan = ended.plan.twin(engine.parameters)

    def take_means(self) -> None:
        """There was no plan: the gradients of this step are means already, and are kept for the next step."""
        gradients = {i: parameter.grad for i, parameter in enumerate(self._engine.parameters)}
        # A mean that is still a parameter's ``.grad`` was applied already.
        new = {i: grad for i, grad in gradients.items() if grad is not None and grad is not self._applied.get(i)}
        before, self._under_way = self._arrived(), None
        self._apply(before)
        self._kept = new

    def finish(self) -> None:
        """Nothing: no ``.grad`` is ever pending."""

    def _arrived(self) -> dict[int, Tensor]:
        """The means of the step before; waits for its sums."""
        means = dict(self._kept)
        if self._under_way is not None:
            (ended, came), self._under_way = self._under_way, None
            assert ended.plan is not None
            for number, bucket in enumerate(ended.plan.buckets):
                had = ended.take(number)
                means.update({index: bucket.gradient(index) for index in bucket.indices if index in had})
            self._engine.look_back(ended, came)
        return means

    def _apply(self, means: dict[int, Tensor]) -> None:
        """Make these means the parameters' ``.grad``."""
        for index, parameter in enumerate(self._engine.parameters):
            parameter.grad = means.get(index)
        self._applied = means

    # For checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The means that the next step will apply, by name of parameter. By all ranks together: waits for sums."""
        self._kept = self._arrived()
        return {self._engine.names[index]: mean.detach().clone() for index, mean in self._kept.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the means of a checkpoint's :meth:`state` as those of the step before. By all ranks together."""
        names = self._engine.names
        unknown = sorted(set(state) - set(names))
        if unknown:
            raise MeshError(f"a mean of {unknown[0]} was saved, and the model has no such parameter")
        if self._under_way is not None:
            self._arrived()  # dropped: of a step that the checkpoint replaces
        means = {index: state[name] for index, name in enumerate(names) if name in state}
        like = self._engine.parameters
        self._kept = {i: mean.detach().to(like[i].device, like[i].dtype).clone() for i, mean in means.items()}
