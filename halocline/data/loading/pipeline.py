"""Prepares the batch of one step: starts its reads, and later agrees on errors, exchanges samples and builds
tensors.

One thread on each rank starts and finishes the steps in order, so that all ranks exchange the same things in turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import BadSample, DataError
from ...geometry import Box, Partition, shape_of, whole
from ...tensor import unwrap, wrap_with_halo
from ...world import World
from ..stores.seen import parts_of
from ..stores.store import Array
from .agree import agreed
from .buffers import BufferLease, Memory, Pool
from .cache import SampleCache
from .exchange import SampleExchange
from .jobs import TileJob, transform
from .layout import BatchLayout
from .order import Order, Step
from .readers import Readers

_log = logging.getLogger("halocline.data")
ALONE = 600.0  # seconds that a read may take where no other rank waits
_LAST_READS = 5.0  # seconds for those of a step that is given up


@dataclass
class Batch(Mapping[str, Tensor]):
    """Tensors by field, cut over the mesh; and which samples they are of which epoch and step."""

    epoch: int
    step: int
    samples: tuple[int, ...]
    tensors: dict[str, Tensor]
    tick: int

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass
class Counts:
    """What was done so far on this rank."""

    read_bytes: int = 0  # handed to stores, as they lie there
    moved_bytes: int = 0  # fetched from other ranks' memory
    skipped: list[int] = field(default_factory=list)


@dataclass
class Started:
    """A step whose reads are under way: its buffer, the arrays to fill, and the reads to wait for."""

    tick: int
    step: Step
    lease: BufferLease
    targets: dict[tuple[int, str], Array]
    reads: list[tuple[int, Future[None]]] = field(default_factory=list)
    from_disk: bool = False  # does any rank read?
    fresh: list[int] = field(default_factory=list)  # samples that come into memory now
    looked_at: list[tuple[str, int]] = field(default_factory=list)
    error: Exception | None = None  # why it could not begin: raised in its turn, as on the other ranks


class Pipeline:
    """Makes batches: ``start`` begins the reads of a step, ``finish`` waits for them and gives the batch.

    Only the prefetcher's thread uses it. ``finish`` communicates, so that all ranks must finish the same steps in the
    same order.
    """

    def __init__(
        self,
        layout: BatchLayout,
        order: Order,
        pool: Pool,
        readers: Readers,
        cache: SampleCache | None,
        world: World,
        policy: str,
        copier: DeviceCopier | None = None,
    ) -> None:
        self._layout, self._order, self._pool, self._readers = layout, order, pool, readers
        self._cache, self._world, self._policy, self._copier = cache, world, policy, copier
        self._me = layout.mesh.coordinates
        self._checked: set[tuple[str, int]] = set()
        self.bad: dict[int, int] = {}  # and at which tick each was found
        self.counts = Counts()

    def leave(self) -> None:
        """This rank prepares nothing more: the others should not wait for it."""
        if self._world is not self._layout.mesh.world:
            self._world.leave()

    def start(self, tick: int) -> Started:
        """Take a buffer and begin to read."""
        started = Started(tick, self._order.step(tick), BufferLease(self._pool), {})
        try:
            self._begin(started)
        except Exception as error:  # noqa: BLE001  raised when the steps before it are done
            started.error = error
        return started

    def _begin(self, started: Started) -> None:
        """Submit the reads of a step: this rank's own boxes, and samples that come into its cache."""
        step = started.step
        started.targets = self._rooms(step, started.lease)
        mine = self._layout.positions(len(step.samples), self._me)
        for position, sample in enumerate(step.samples):
            if self._cache is not None and self._cache.keeps(sample):
                if self._cache.first_time(sample):
                    started.from_disk = True
                    started.fresh.append(sample)
                    self._read_home(started, position)
            else:
                started.from_disk = True
                if mine.lo <= position < mine.hi:
                    self._read_own(started, position)

    def _rooms(self, step: Step, lease: BufferLease) -> dict[tuple[int, str], Array]:
        """An array in the buffer for each position of the batch that is this rank's, and each field."""
        mine = self._layout.positions(len(step.samples), self._me)
        targets: dict[tuple[int, str], Array] = {}
        for name, each in self._layout.fields.items():
            shape = shape_of(self._layout.needed(name, self._me))
            room = lease.array(name, (mine.size, *shape), each.array_dtype)
            targets |= {(mine.lo + place, name): room[place, ...] for place in range(mine.size)}
        return targets

    def _read_own(self, started: Started, position: int) -> None:
        """This rank's box of a sample, straight into the batch."""
        step, sample = started.step, started.step.samples[position]
        views = self._layout.views(step.epoch, sample)
        for name, each in self._layout.fields.items():
            box, target = self._layout.needed(name, self._me), started.targets[position, name]
            at = self._layout.at(name, sample, step.epoch, box)
            fill = each.fill if views[name].fills(box) else None
            job = TileJob(each.source, sample, target, parts_of(views[name], box, target), at, fill, values=each.values)
            # Without augmentation every epoch reads the same numbers: one look is enough.
            job.check = self._layout.augmented or (name, sample) not in self._checked
            started.looked_at.append((name, sample))
            self._submit(started, position, job, started.lease.buffer.memory)

    def _read_home(self, started: Started, position: int) -> None:
        """The part of a sample that this rank will hold, as it lies on disk."""
        sample = started.step.samples[position]
        if self._cache is None or not self._cache.at_home(sample):
            return
        for name, each in self._layout.fields.items():
            box, tile, memory = self._cache.new_tile(sample, name)
            at = self._layout.at(name, sample, started.step.epoch, box)
            job = TileJob(each.source, sample, tile, [(box, tile)], at, into=each.array_dtype)
            self._submit(started, position, job, memory)

    def _submit(self, started: Started, position: int, job: TileJob, memory: Memory) -> None:
        """Hand a job to the readers, unless its sample is known to be bad."""
        if started.step.samples[position] in self.bad:
            return
        size = job.store.dtype.itemsize
        self.counts.read_bytes += sum(target.size * size for _, target in job.parts)
        started.reads.append((position, self._readers.submit(job, memory)))

    def finish(self, started: Started) -> Batch | None:
        """The batch, when all of it is there; None where all its samples are bad."""
        try:
            if started.error is not None:
                raise started.error
            batch = self._finished(started)
        except BaseException:
            self.abandon(started)
            raise
        started.lease.close()
        return batch

    def abandon(self, started: Started) -> None:
        """Undo a step that failed, or that comes after one that did. Afterwards no reader writes into its memory."""
        reads = [future for _, future in started.reads]
        for future in reads:
            future.cancel()
        if self._cache is not None:
            self._cache.forget(started.fresh)
        # A reader that hangs may still write: its buffer must not be used again.
        if wait(reads, _LAST_READS).not_done:
            started.lease.lose()
        else:
            started.lease.close()

    def _finished(self, started: Started) -> Batch | None:
        """Wait for the reads, agree on bad samples, fetch cached samples, and build the batch.

        All ranks take the same path.
        """
        step = started.step
        errors = _errors(started.reads, self._world.deadline or ALONE)
        # Whether any rank reads is known to all, so that all take part in the agreement or none does.
        if started.from_disk:
            self._judge(started, errors)
            self._checked.update(started.looked_at)  # what lies on disk does not change
        late: dict[int, BaseException] = {}
        if self._cache is not None and any(self._cache.keeps(sample) for sample in step.samples):
            late = self._fetch(started, self._good(step))
        transforms = any(each.values for each in self._layout.fields.values())
        if not started.from_disk or (self._cache is not None and transforms):
            self._judge(started, late)
        good = self._good(step)
        return self._batch(started, good) if good else None

    def _good(self, step: Step) -> list[int]:
        return [position for position, sample in enumerate(step.samples) if sample not in self.bad]

    def _judge(self, started: Started, errors: Mapping[int, BaseException]) -> None:
        """Raise, or leave the samples out from now on; the same on every rank."""
        step = started.step
        raised = agreed(self._world, errors, self._order.batch, started.tick)
        for position, error in sorted(raised.items()):
            sample = step.samples[position]
            if self._policy == "raise" or not isinstance(error, BadSample):
                raise error
            if sample not in self.bad:
                self.bad[sample] = started.tick
                self.counts.skipped.append(sample)
                _log.warning("a bad sample is left out on all ranks: %s (%d so far)", error, len(self.bad))
                if self._cache is not None:
                    self._cache.drop(sample)

    def _fetch(self, started: Started, good: list[int]) -> dict[int, BaseException]:
        """What is held in memory, transformed; and where that went wrong."""
        assert self._cache is not None
        errors: dict[int, BaseException] = {}
        step = started.step
        exchange = SampleExchange(self._cache, self._layout, step, good)
        self.counts.moved_bytes += exchange.run(started.targets, self._world)
        for (position, name), target in started.targets.items():
            sample = step.samples[position]
            if sample not in self.bad and self._cache.keeps(sample):
                box = self._layout.needed(name, self._me)
                at = self._layout.at(name, sample, step.epoch, box)
                try:
                    transform(target, self._layout.fields[name].values, at)
                except Exception as error:  # noqa: BLE001  told to all ranks
                    errors.setdefault(position, error)
        return errors

    def _batch(self, started: Started, good: list[int]) -> Batch:
        """The good samples of a step as tensors; each group of ranks may have lost a different number of samples."""
        step = started.step
        pieces = self._layout.batch(len(step.samples)).pieces()
        # Each group of ranks may have lost a different number of samples.
        kept = [sum(piece.lo <= position < piece.hi for position in good) for piece in pieces]
        mine = self._layout.positions(len(step.samples), self._me)
        rows = [position - mine.lo for position in good if mine.lo <= position < mine.hi]
        tensors = {}
        for name in self._layout.fields:
            wide = started.lease.tensor(name)
            if len(rows) < mine.size:
                wide = wide[rows]
            tensors[name] = self._placed(name, wide, Partition.from_sizes(kept))
        samples = tuple(step.samples[position] for position in good)
        return Batch(step.epoch, step.number, samples, tensors, started.tick)

    def _placed(self, name: str, wide: Tensor, batch: Partition) -> Tensor:
        """What was read, as a tensor of the mesh that knows its rim."""
        each, layout = self._layout.fields[name], self._layout
        if self._copier is not None:
            wide = self._copier(wide, each.tensor_dtype)
        wide = wide.to(each.tensor_dtype)
        tile, read = layout.tile(name, self._me), layout.needed(name, self._me)
        own: Box = tuple(i.shift(-all_of.lo) for i, all_of in zip(tile, read, strict=True))
        reach = {1 + each.dims.index(letter): width for letter, width in each.rim.items()}
        return wrap_with_halo(wide, (whole(wide.shape[0]), *own), layout.sharding(name, batch), reach)


class DeviceCopier:
    """Copies batches to a GPU from pinned memory, on a stream of its own beside the step that runs.

    The prefetcher's thread copies and waits for the copy, so that the host's buffer is free afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if self._stream is None:
            return tensor.to(self._device).to(dtype)
        with torch.cuda.stream(self._stream):  # all of it: another stream's work would not be waited for
            copy = tensor.to(self._device, non_blocking=True).to(dtype)
        self._stream.synchronize()
        return copy

    def received(self, tensor: Tensor) -> None:
        """It is used on the caller's stream from now on: no copy may take its memory before that is done with it."""
        if self._stream is not None:
            unwrap(tensor).record_stream(torch.cuda.current_stream(self._device))


def _errors(reads: list[tuple[int, Future[None]]], deadline: float) -> dict[int, BaseException]:
    """Wait for all reads, so that none writes into the buffer any more; their errors by position."""
    errors: dict[int, BaseException] = {}
    end = time.monotonic() + deadline
    for position, future in reads:
        try:
            error = future.exception(max(0.0, end - time.monotonic()))
        except TimeoutError:
            error = DataError(f"a read has taken more than the {deadline:g} s that a rank may wait; is the disk there?")
        if error is not None:
            errors.setdefault(position, error)
    return errors
