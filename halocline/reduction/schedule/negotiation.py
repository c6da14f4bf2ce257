"""Which buckets may go where ranks take different paths through the model: agreed in a thread while backward runs.

Each rank has two bits per bucket: *ready*, and *will not come* (set when its backward has ended). One AND over all
ranks says which buckets all ranks are done with; those that some rank had are summed, in one order. A ready bit that
another rank did not have yet is offered again in the next round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...errors import RankFailure
from ...world import CommThread, World
from ..transport.leases import MOST, lease
from ..transport.sum_queue import BucketSum
from .control import Control, packed, unpacked


class Negotiation:
    """The agreement of one backward pass; :meth:`run` is the thread's job.

    ``begin_sum(number)`` starts the sum of a bucket, in the thread. ``valid``: this rank's parameters fit the plan.
    """

    def __init__(
        self, buckets: int, control: Control, begin_sum: Callable[[int], BucketSum], valid: bool, deadline: float
    ) -> None:
        self._buckets, self._control, self._begin_sum = buckets, control, begin_sum
        self._valid, self._deadline = valid, deadline
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._never: set[int] = set()
        self._ended = False
        self._offered = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.sums: dict[int, BucketSum | None] = {}  # None: no rank had a gradient
        self.invalid = False

    def ready(self, bucket: int) -> None:
        """All gradients of a bucket are there on this rank."""
        with self._changed:
            self._done.add(bucket)
            self._changed.notify_all()

    def end(self, never: set[int]) -> None:
        """Backward is over on this rank: buckets in ``never`` got no gradient, all others are complete."""
        with self._changed:
            self._done, self._never, self._ended = set(range(self._buckets)), never, True
            self._changed.notify_all()

    def agreed(self) -> dict[int, BucketSum | None]:
        """Wait for the end: the sum of each bucket, or None if no rank had a gradient. RankFailure after the
        deadline."""
        if not self._over.wait(self._deadline + 5):
            raise RankFailure(f"the ranks did not agree on their gradients within {self._deadline:g} s")
        if self._error is not None:
            raise self._error
        return self.sums

    def run(self) -> None:
        """Negotiate until every bucket is decided. In the agreement's thread."""
        try:
            while len(self.sums) < self._buckets and not self.invalid:
                self._round(*self._news())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            self._error = error
        self._over.set()

    def _news(self) -> tuple[set[int], set[int]]:
        """This rank's complete buckets and those that will not come, once there is something new to offer."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or len(self._done) > self._offered, self._deadline):
                raise RankFailure(f"backward did not end within {self._deadline:g} s")
            self._offered = len(self._done)
            return set(self._done), set(self._never)

    def _round(self, done: set[int], never: set[int]) -> None:
        """One AND over all ranks, and the sums that it allows. The first bit says that no rank's parameters changed."""
        every = range(self._buckets)
        mine = [self._valid, *(bucket in done for bucket in every), *(bucket in never for bucket in every)]
        valid, *bits = unpacked(self._control.agree(packed(mine), torch.bitwise_and), 1 + 2 * self._buckets)
        if not valid:
            self._control.agree(packed([not self._valid]), torch.bitwise_or)
            self.invalid = True
            return
        for bucket in every:
            if bits[bucket] and bucket not in self.sums:
                nobody = bits[self._buckets + bucket]
                self.sums[bucket] = None if nobody else self._begin_sum(bucket)


class Agreement:
    """A duplicated world and its thread, in which ranks agree while backward runs. Made by all ranks together."""

    def __init__(self, world: World, control: Callable[[World, str], Control], name: str) -> None:
        leased = lease(world, "duplicated world", lambda _: (world.duplicate(), CommThread("halocline agreement")))
        assert leased is not None, f"more than {MOST} models whose ranks take different paths"
        self.lease = leased
        self.world: World = leased.thing[0]
        self.thread: CommThread = leased.thing[1]
        self.world.traffic.clear()
        self.control = control(self.world, name)
