"""The loader: batches of samples that are cut over a mesh. Every rank reads its own boxes and no others.

    loader = hc.data.Loader({"x": volumes, "y": labels}, mesh, batch=4, cut={"N": "data", "D": "depth"})
    for epoch in range(10):
        for batch in loader:
            loss = criterion(model(batch["x"]), batch["y"])

The samples of a step, and their values after augmentation, are the same for every mesh. A :class:`Loader` owns the
reading threads or processes, the buffers, and a duplicate of the mesh's world in which the loaders of all ranks
exchange samples; :meth:`Loader.close` ends them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from ...arrangement import Arranged
from ...errors import DataError
from ...geometry import shape_of
from ...sizes import bytes_from
from ...world import Label, Mesh
from ...world.agreement import extremes
from ..stores.store import SAMPLES, Store
from .augment import Augmentation
from .buffers import Pool
from .cache import SampleCache
from .fields import Field, as_fields
from .layout import BatchLayout
from .order import Order
from .pipeline import ALONE, Batch, DeviceCopier, Pipeline
from .prefetcher import Prefetcher
from .readers import make_readers

_log = logging.getLogger("halocline.data")
_LABEL = Label("description of the data", "hc.data")
_POLICIES = ("raise", "skip")


@dataclass(frozen=True)
class LoaderReport:
    """What this rank has done since the loader was made. Times in seconds, sizes in bytes."""

    steps: int
    waited: float  # for data, but for the first batch
    wait_share: float  # of the time between the first batch and the last
    read_bytes: int  # from stores
    moved_bytes: int  # from other ranks' memory
    held_bytes: int
    held_share: float  # of all samples, once each was read; the rest stays on disk
    buffer_bytes: int
    skipped: tuple[int, ...]


class Loader:
    """Batches for all ranks of a mesh; each rank reads its own boxes. Iterating gives the next epoch.

        fields = {"x": hc.data.HDF5("train.h5", "volumes", "NCDHW"), "y": hc.data.HDF5("train.h5", "labels", "NDHW")}
        mesh = hc.Mesh(data=2, depth=2)
        with hc.data.Loader(fields, mesh, batch=4, cut={"N": "data", "D": "depth"}, memory="8GiB") as loader:
            for batch in loader:
                loss = F.cross_entropy(model(batch["x"]), batch["y"])

    ``cut`` maps letters of dims (N for the batch) to axes of the mesh; the default cuts the batch along ``data``.
    ``memory`` (bytes, or a string such as "32GiB") is host memory of each rank, in which samples stay from the first
    epoch on. ``readers`` boxes are read at once: of HDF5 and NIfTI by processes, of all else by threads, unless
    ``processes`` says otherwise. ``prefetch`` batches are prepared ahead of the step. ``multiple``: cuts lie at
    multiples of it (give the network's total stride); ``points`` gives the cuts by letter. ``on_bad_sample``: "raise",
    or "skip" to leave a sample that cannot be read out on every rank. ``device``: where batches are copied to. All
    ranks make their loaders together, with the same arguments. ``plan`` (of ``hc.plan``) stands for mesh, cut, multiple
    and points.
    """

    def __init__(
        self,
        fields: Mapping[str, Store | Field],
        mesh: Mesh | None = None,
        *,
        plan: Arranged | None = None,
        batch: int = 1,
        cut: Mapping[str, str] | None = None,
        augment: Sequence[Augmentation] = (),
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        epochs: int | None = None,
        multiple: int = 1,
        points: Mapping[str, Sequence[int]] | None = None,
        memory: int | str = 0,
        prefetch: int = 2,
        readers: int = 1,
        processes: bool | None = None,
        on_bad_sample: str = "raise",
        device: torch.device | str | None = None,
    ) -> None:
        self.fields, seed = as_fields(fields), int(seed)
        if plan is not None:
            if mesh is not None or cut is not None or points is not None:
                raise DataError("a plan holds mesh, cut and points; leave these out, or the plan")
            arranged = plan.arrangement
            mesh, cut, points = arranged.mesh(), arranged.cut_letters(), arranged.letter_points()
            multiple = arranged.multiple
        mesh, memory = mesh or Mesh(data=-1), bytes_from("memory", memory)
        if cut is not None:
            _check_cut(cut, mesh)
        if cut is None:
            cut = {SAMPLES: "data"} if "data" in mesh.sizes else {}
        if on_bad_sample not in _POLICIES:
            raise DataError(f"on_bad_sample={on_bad_sample!r}: it is one of {', '.join(_POLICIES)}")
        if prefetch < 1:
            raise DataError(f"prefetch={prefetch}: at least one batch must be prepared ahead")
        samples = len(next(iter(self.fields.values())).store)
        self.order = Order(samples, batch, seed, shuffle, drop_last)
        self.layout = BatchLayout(self.fields, mesh, cut, augment, seed, multiple, points)
        self._copier = None if device is None else DeviceCopier(torch.device(device))
        self._check_same(mesh, augment, [memory, prefetch, epochs, on_bad_sample])
        self._readers = make_readers(readers, [each.source for each in self.fields.values()], processes)
        shared = self._readers.shared
        pinned = device is not None and torch.device(device).type == "cuda" and not shared
        self._pool = Pool(prefetch + 2, self._largest(), shared=shared, pinned=pinned)
        self._cache = self._make_cache(memory) if memory else None
        # The prefetchers of all ranks talk beside the training step, and must not mix with its messages.
        self._world = mesh.world.duplicate() if mesh.size > 1 else mesh.world
        self._pipeline = Pipeline(
            self.layout, self.order, self._pool, self._readers, self._cache, self._world, on_bad_sample, self._copier
        )
        self._prefetch, self._last = prefetch, None if epochs is None else epochs * self.order.steps
        self._prefetcher: Prefetcher | None = None
        self._tick, self._resumed = 0, True  # the next step; a new loader stands at a beginning
        self._steps, self._waited, self._began, self._now = 0, 0.0, 0.0, 0.0  # for the report
        self._closed, self._agreed = False, False  # has every rank raised what ended the last prefetcher?

    # -- what is read, and by whom

    def _largest(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Room for a full batch on this rank."""
        me = self.layout.mesh.coordinates
        most = max(piece.size for piece in self.layout.batch(self.order.batch).pieces())
        return {
            name: ((most, *shape_of(self.layout.needed(name, me))), each.array_dtype)
            for name, each in self.fields.items()
        }

    def _make_cache(self, memory: int) -> SampleCache:
        """The cache, with a warning on rank 0 if it cannot hold all samples."""
        layout = self.layout
        cache = SampleCache(
            self.fields, layout.home, layout.batch_axis, self.order, memory, shared=self._readers.shared
        )
        if cache.share < 1 and layout.mesh.rank == 0:
            _log.warning(
                "%.0f %% of the samples fit into the given memory; the others are read from disk in every epoch. Give "
                "more memory=..., or more ranks",
                100 * cache.share,
            )
        return cache

    def _check_same(self, mesh: Mesh, augment: Sequence[Augmentation], options: list[Any]) -> None:
        """All ranks must mean the same data: a rank that sees other files would read other samples."""
        if mesh.size == 1:
            return
        stores = [_description(name, each) for name, each in self.fields.items()]
        changes = [(type(each).__name__, sorted(getattr(each, "__dict__", {}).items())) for each in augment]
        what = [stores, self.order, dict(self.layout.grid.cuts), changes, options]
        text = re.sub(r"\b0x[0-9a-f]+", "", repr(what))  # addresses of objects, which each process has of its own
        word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        least, most = extremes(mesh.world, torch.tensor([word]), _LABEL)
        if least != most:
            here = "; ".join(
                f"{name}: {len(f.source)} of {list(f.source.shape)} in {f.source.name}"
                for name, f in self.fields.items()
            )
            raise DataError(
                f"the ranks describe their data differently: rank {mesh.rank} has {here}; "
                "check that all see the same files in the same order, with the same arguments"
            )

    # -- batches

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.order.steps

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._tick // self.order.steps

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch; after ``load_state_dict`` the rest of the interrupted epoch."""
        if not self._resumed:
            # An epoch that was left early is not finished: the next one begins.
            self._go_to(-(-self._tick // self.order.steps) * self.order.steps)
        self._resumed = False
        end = (self.epoch + 1) * self.order.steps
        if self._last is not None and self._tick >= self._last:
            raise DataError(f"all {self._last // self.order.steps} epochs have been read")
        while self._tick < end:
            batch = self._next()
            if batch is not None:
                yield batch
            del batch  # its memory is free as soon as the caller drops it

    def _next(self) -> Batch | None:
        """The batch of the next step, from the prefetcher; None where all its samples are bad."""
        if self._closed:
            raise DataError("this loader was closed; make another one")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._pipeline, self._tick, self._prefetch, self._last)
            # A loader that is dropped without close() still ends its thread.
            self._forgotten = weakref.finalize(self, self._prefetcher.end)
            self._agreed = False
        try:
            batch = self._prefetcher.get(self._tick)
        except BaseException as error:
            if self._prefetcher.over:  # and not, say, interrupted
                self._agreed = isinstance(error, DataError)
                self._stop()
            raise
        self._now = time.perf_counter()
        if self._steps:
            self._waited += self._prefetcher.waited
        else:  # the first batch has nothing to hide behind, and is not counted
            self._began = self._now
        self._steps, self._tick = self._steps + 1, self._tick + 1
        if batch is not None and self._copier is not None:
            for tensor in batch.values():
                self._copier.received(tensor)
        return batch

    def _go_to(self, tick: int) -> None:
        """Make ``tick`` the next step; what was prepared for other steps is dropped."""
        if tick != self._tick:
            self._stop()
        self._tick = tick

    def _stop(self) -> None:
        """End the prefetcher. Waits until it rests at the same step as those of the other ranks."""
        if self._prefetcher is not None:
            prefetcher, self._prefetcher = self._prefetcher, None
            self._forgotten.detach()
            prefetcher.stop(self._world.deadline or ALONE)

    def close(self) -> None:
        """End the readers and free all memory. All ranks call it at the same step."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stop()
        finally:
            self._readers.close()
            if self._world is not self.layout.mesh.world:
                self._world.close()
            for each in self.fields.values():
                each.source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._agreed:
            self._pipeline.leave()  # an error of this rank alone: the others should hear of it, and this one not wait
        self.close()

    def __repr__(self) -> str:
        """<Loader: 24 samples in 6 batches of 4; x (CDHW 1 x 64 x 64 x 64, float32) cut D over depth>"""
        cuts = {letter: cut.axis for letter, cut in self.layout.grid.cuts.items()}
        if self.layout.batch_axis:
            cuts = {SAMPLES: self.layout.batch_axis, **cuts}
        fields = ", ".join(
            f"{name} ({each.dims or 'a number'} {' x '.join(map(str, self.layout.shape(name)))}, "
            f"{str(each.tensor_dtype).removeprefix('torch.')})"
            for name, each in self.fields.items()
        )
        over = ", ".join(f"{letter} over {axis}" for letter, axis in cuts.items())
        count, batch = self.order.samples, self.order.batch
        return f"<Loader: {count} samples in {len(self)} batches of {batch}; {fields}; cut {over or 'nowhere'}>"

    # -- where it stands

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; small, and good for any mesh."""
        epoch, step = divmod(self._tick, self.order.steps)
        order = self.order
        return {
            "epoch": epoch,
            "step": step,
            "seed": order.seed,
            "samples": order.samples,
            "batch": order.batch,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
            "skipped": sorted(sample for sample, tick in list(self._pipeline.bad.items()) if tick < self._tick),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where another loader stopped, on any mesh."""
        for name in ("seed", "samples", "batch", "shuffle", "drop_last"):
            if state[name] != getattr(self.order, name):
                raise DataError(
                    f"this state is of data with {name}={state[name]}; here it is {getattr(self.order, name)}"
                )
        self._stop()  # what is prepared knows nothing of this state
        self._go_to(state["epoch"] * self.order.steps + state["step"])
        self._pipeline.bad |= dict.fromkeys(state["skipped"], -1)
        self._resumed = True

    @property
    def report(self) -> LoaderReport:
        """What this rank has read, moved and waited for until now."""
        counts, cache = self._pipeline.counts, self._cache
        return LoaderReport(
            steps=self._steps,
            waited=self._waited,
            wait_share=self._waited / (self._now - self._began) if self._now > self._began else 0.0,
            read_bytes=counts.read_bytes,
            moved_bytes=counts.moved_bytes,
            held_bytes=0 if cache is None else cache.nbytes,
            held_share=0.0 if cache is None else cache.share,
            buffer_bytes=self._pool.nbytes,
            skipped=tuple(counts.skipped),
        )


def _check_cut(cut: Mapping[str, str], mesh: Mesh) -> None:
    """Letters of dims on the left, axes of the mesh on the right."""
    if not isinstance(cut, Mapping):
        raise DataError(f"cut={cut!r}: give letters of dims and axes of the mesh, such as {{'D': 'depth'}}")
    for letter, axis in cut.items():
        if letter in mesh.sizes and axis not in mesh.sizes:
            turned = {value: key for key, value in cut.items()}
            raise DataError(f"cut={dict(cut)}: it maps letters of dims to axes of the mesh; write cut={turned}")


def _description(name: str, each: Field) -> list[Any]:
    """All that decides which numbers a field delivers, in a form that is the same on all ranks."""
    store = each.source
    stored = [store.identity, store.dims, store.shape, str(store.dtype), len(store)]
    return [name, *stored, str(each.dtype), dict(each.rim), each.fill, *map(_value, each.values)]


def _value(value: Any) -> str:
    """A transform as text that is equal on all ranks."""
    return repr(value) if is_dataclass(value) else getattr(value, "__qualname__", type(value).__qualname__)
