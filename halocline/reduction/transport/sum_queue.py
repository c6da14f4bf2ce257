"""Sums of buckets, and the queue in which a thread begins and finishes them while the rank computes."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from ...errors import RankFailure
from ...world import CommThread, Label, World
from ...world.comm_thread import stop_at_exit
from ..buckets.bucket import Bucket
from .compression import GradientCompression

WIDTH = 2  # sums under way at once: the transport is busy with one while another starts
_GRACE = 5.0  # seconds beyond the deadline, so that the communication thread reports first
_CHECK = 0.005  # seconds between checks when the program ends


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> None:
        """Block until it is done; raises after the world's deadline."""


class Transport(Protocol):
    """Sums a tensor over ranks in place. All ranks must begin their sums in the same order."""

    def begin(self, tensor: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        """Start a sum. A transport that notices its end calls ``done`` when the sum is done or has failed."""


class FlatTransport:
    """The world's own all-reduce over ``ranks``. It never calls ``done``."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self._world, self._ranks = world, ranks

    def begin(self, tensor: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        return self._world.begin_sum(tensor, self._ranks, label)


class BucketSum:
    """One bucket on its way to its mean; ``share`` is one over the number of ranks.

    Holds no engine, because a gradient that outlives its model holds its sum.
    """

    def __init__(
        self,
        bucket: Bucket,
        transport: Transport,
        compression: GradientCompression,
        label: Label,
        share: float,
        clock: Callable[[], float],
    ) -> None:
        self.bucket, self._transport, self._compression, self._label = bucket, transport, compression, label
        self._share, self._clock = share, clock
        self.replan = False  # sent with the sum: this rank asks for new buckets
        self.sent = self.done = 0.0  # times by the clock
        self.error: BaseException | None = None
        self.over: threading.Event | None = None  # given by the queue, if the sum is in one
        self.steps: list[SumStep] = []  # jobs that wait for this sum
        self.thread: weakref.ref[CommThread] | None = None  # of the queue: begins and finishes the sum
        self.deadline = 0.0
        self.message: Tensor | None = None
        self._pending: Pending | None = None

    @property
    def begun(self) -> bool:
        """Is it in the transport's hands?"""
        return self._pending is not None

    def begin(self, done: Callable[[], None] | None = None) -> None:
        """Scale the gradients, compress them, and hand them to the transport."""
        self.sent = self._clock()
        self.bucket.fill(self._share)
        self.message = self._compression.compress(self.bucket, self.replan)
        self._pending = self._transport.begin(self.message, self._label, done)

    def finish(self) -> None:
        """Wait for the transport, and put the mean into the bucket's memory."""
        pending, message = self._pending, self.message
        self._pending = self.message = None  # they hold memory that the next pass needs
        if pending is not None and message is not None:
            pending.wait()
            if not self._compression.restore(self.bucket, message):
                self._transport.begin(self.bucket.memory, self._label).wait()
            self.done = self._clock()

    def wait(self) -> None:
        """Block until the bucket holds the mean. RankFailure after the deadline."""
        if self.over is None:
            self.finish()
            return
        # Each sum before it in the queue has the deadline too.
        while not self.over.wait(self.deadline + _GRACE):
            thread = self.thread() if self.thread is not None else None
            if self.begun or thread is None or not thread.alive:
                raise RankFailure(f"{self._label}: the sum did not end within {self.deadline:g} s")
        if self.error is not None:
            raise self.error


class SumStep:
    """A job that the thread runs when a bucket's sum is done: the optimizer's step of some of its parameters."""

    def __init__(self, job: Callable[[], None], indices: set[int], waits_for: BucketSum, urgency: float) -> None:
        self._job: Callable[[], None] | None = job
        self.indices, self._sum, self.urgency = indices, waits_for, urgency
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """In the thread. Does nothing if the sum has failed."""
        job, self._job = self._job, None  # so that what the job refers to can be freed
        try:
            if self._sum.error is None and job is not None:
                job()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Block until the job has run; only after its sum is done. Raises the job's error."""
        if not self._done.wait(self._sum.deadline + _GRACE):
            raise RankFailure(f"a step of the optimizer did not end within {self._sum.deadline:g} s")
        if self._error is not None:
            raise self._error


class SumQueue:
    """The sums of one engine, begun in the order in which they are added.

    Where the transport calls back when a sum is done (``told``), the thread begins each at once. Elsewhere at most
    ``WIDTH`` are under way, since a sum that has begun cannot be overtaken, and the thread waits for them in order.
    """

    def __init__(self, thread: CommThread, world: World, told: bool) -> None:
        self._thread, self._world, self.told = thread, world, told
        self._lock = threading.Lock()
        self._waiting: deque[BucketSum] = deque()
        self._under_way: list[BucketSum] = []
        self._error: BaseException | None = None
        stop_at_exit(self, SumQueue._drain)

    @property
    def idle(self) -> bool:
        """Is no sum under way or still to begin?"""
        return not self._waiting and not self._under_way

    def dismiss(self) -> None:
        """The engine is gone: the thread ends when its work is done. Called by finalizers, in any thread."""
        self._thread.dismiss()

    def add(self, bucket_sum: BucketSum) -> BucketSum:
        """Queue a sum behind those added before. From any thread."""
        bucket_sum.over, bucket_sum.deadline = threading.Event(), self._world.deadline
        bucket_sum.thread = weakref.ref(self._thread)
        with self._lock:
            if self.told:
                self._under_way.append(bucket_sum)
                self._thread.submit(partial(self._begin, bucket_sum))
            else:
                self._waiting.append(bucket_sum)
                self._begin_next()
                self._thread.submit(self._finish_first)
        return bucket_sum

    def after(self, bucket_sum: BucketSum, urgency: float, job: Callable[[], None], indices: set[int]) -> SumStep:
        """Run ``job`` in the thread when the sum is done. New sums and more urgent jobs come first."""
        step = SumStep(job, indices, bucket_sum, urgency)
        assert bucket_sum.over is not None
        with self._lock:
            over = bucket_sum.over.is_set()
            if not over:
                bucket_sum.steps.append(step)
        if over:
            self._thread.submit(step.run, urgency)
        return step

    def _begin_next(self) -> None:
        """Begin waiting sums up to ``WIDTH``. With the lock held, so that all ranks begin in one order."""
        while self._waiting and len(self._under_way) < WIDTH:
            self._under_way.append(self._waiting.popleft())
            self._try(self._under_way[-1].begin)

    def _drain(self) -> None:
        """At the end of the program, wait for sums that have begun: other ranks need this rank's part."""
        until = time.monotonic() + self._world.deadline
        while self._under_way and self._error is None and time.monotonic() < until:
            time.sleep(_CHECK)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _begin(self, bucket_sum: BucketSum) -> None:
        """With a transport that calls back: possibly before ``begin`` returns, so finishing is a job of its own."""
        self._try(partial(bucket_sum.begin, partial(self._thread.submit, partial(self._finish, bucket_sum))))
        if not bucket_sum.begun:
            self._end(bucket_sum)

    def _finish(self, bucket_sum: BucketSum) -> None:
        if bucket_sum.begun:
            self._try(bucket_sum.finish)
            self._end(bucket_sum)

    def _finish_first(self) -> None:
        """With a transport that does not call back: one such job for each sum."""
        first = self._under_way[0]
        self._try(first.finish)
        self._end(first)

    def _try(self, work: Callable[[], None]) -> None:
        """After the first error nothing more begins; each sum raises it where it is waited for."""
        if self._error is None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                self._error = error

    def _end(self, bucket_sum: BucketSum) -> None:
        assert bucket_sum.over is not None
        with self._lock:
            self._under_way.remove(bucket_sum)
            self._begin_next()
            bucket_sum.error = self._error
            bucket_sum.over.set()
            steps, bucket_sum.steps = bucket_sum.steps, []
        for step in steps:
            self._thread.submit(step.run, step.urgency)
