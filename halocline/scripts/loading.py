"""DataLoaders of a script: each rank loads its share of every batch, and the batches are those of one device.

The script's own sampler chooses the samples of a batch, on all ranks alike, and each rank loads those of its tile.
Where that cannot be exact (samples drawn with random numbers, batches put together by a function of the script's own,
iterable data sets), every rank loads whole batches, and they are cut afterwards.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..errors import Refused
from ..rules.same_sample import fingerprint
from ..tree import tensors_in
from ..world import Label
from ..world.agreement import extremes
from .batches import BatchCutter, described, empty_share, number_of
from .first_rank import FirstRank
from .patches import Patches

_LABEL = Label("batch", "a DataLoader")


class LoadedShare(NamedTuple):
    """What a rank has loaded of a batch."""

    samples: Any  # a list of samples; once collated, a structure of tensors
    total: int  # samples of the whole batch
    whole: bool  # are these all of them?
    empty: bool  # is the share empty, and the sample here only for its structure?
    sample: int  # a number that depends on one sample, which all ranks have loaded; 0 if none was compared


class ShareOfDataset(Dataset[Any]):
    """A data set that is asked for a batch by its indices, and loads this rank's share."""

    def __init__(self, dataset: Any, share: Callable[[int], range]) -> None:
        self._dataset, self._share, self._calls = dataset, share, 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[Any]) -> LoadedShare:
        """The share; the whole batch if the samples draw random numbers, or hold what is no tensor."""
        count, share = len(indices), self._share(len(indices))
        before = generator_states()
        samples = self._load([indices[place] for place in share] or [indices[0]])
        if generator_states() != before or not all(map(_is_numeric, samples)):
            set_generator_states(before)
            return LoadedShare(self._load(indices), count, True, False, 0)
        self._calls += 1
        compared = samples[0] if 0 in share or self._calls > 1 else self._load([indices[0]])[0]
        number = _fingerprint(compared) if self._calls == 1 else 0
        return LoadedShare(samples, count, False, not share, number)

    def _load(self, indices: Sequence[Any]) -> list[Any]:
        if callable(getattr(self._dataset, "__getitems__", None)):
            return self._dataset.__getitems__(list(indices))
        return [self._dataset[index] for index in indices]


class Collated:
    """A collate function that leaves the rest of :class:`LoadedShare` as it is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, loaded: LoadedShare) -> LoadedShare:
        batch = self._collate(loaded.samples)
        return loaded._replace(samples=empty_share(batch) if loaded.empty else batch)


def generator_states() -> tuple[bytes, Any, Any]:
    """The states of the generators of torch, Python and numpy."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), _numpy_state(numpy)


def _numpy_state(numpy: Any) -> Any:
    """NumPy's global state in a form that can be compared; None where the script has not imported NumPy."""
    if numpy is None:
        return None
    name, words, *rest = numpy.random.get_state()
    return name, words.tobytes(), *rest


def set_generator_states(states: tuple[bytes, Any, Any]) -> None:
    """Go back to the states of :func:`generator_states`."""
    torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    random.setstate(states[1])
    if states[2] is not None:
        import numpy

        name, words, *rest = states[2]
        numpy.random.set_state((name, numpy.frombuffer(words, dtype=numpy.uint32), *rest))


def _is_numeric(sample: Any) -> bool:
    """Does the sample become tensors alone, if torch collates it?"""
    if isinstance(sample, dict):
        return all(map(_is_numeric, sample.values()))
    if isinstance(sample, (tuple, list)):
        return all(map(_is_numeric, sample))
    return isinstance(sample, (Tensor, int, float)) or type(sample).__module__ == "numpy"


def _fingerprint(sample: Any) -> int:
    """A number of one sample's values, by which ranks notice that their data differ."""
    return number_of(repr([fingerprint(tensor) for tensor in tensors_in(default_collate([sample]))]).encode())


class Loading:
    """Iterates DataLoaders for all ranks together."""

    def __init__(self, cutter: BatchCutter, first: FirstRank, plain: Callable[..., Any]) -> None:
        self._cutter, self._first, self._plain = cutter, first, plain
        self._inner: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of a loader, cut."""
        shares = loader.batch_sampler is not None and loader.collate_fn is default_collate
        shares = shares and hasattr(loader.dataset, "__getitem__")
        batches = iter(self._plain(self._of_shares(loader) if shares else loader))
        while True:
            try:
                with self._first.alone():  # a data set may write files of its own
                    batch = next(batches)
            except StopIteration:
                batch = None
            loaded = batch if shares and batch is not None else LoadedShare(batch, 0, True, False, 0)
            self._compare(loaded, ended=batch is None)
            if batch is None:
                return
            whole, count = loaded.samples, loaded.total
            yield self._cutter.whole(whole) if loaded.whole else self._cutter.tiles(whole, count)

    def _of_shares(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader over this rank's shares, kept as long as the script's own."""
        if loader not in self._inner:
            with self._first.alone():
                self._inner[loader] = DataLoader(
                    ShareOfDataset(loader.dataset, self._cutter.share),
                    batch_sampler=loader.batch_sampler,
                    num_workers=loader.num_workers,
                    collate_fn=Collated(loader.collate_fn),  # type: ignore[arg-type]
                    pin_memory=loader.pin_memory,
                    timeout=loader.timeout,
                    worker_init_fn=loader.worker_init_fn,
                    multiprocessing_context=loader.multiprocessing_context,
                    generator=loader.generator,
                    prefetch_factor=loader.prefetch_factor,
                    persistent_workers=loader.persistent_workers,
                )
        return self._inner[loader]

    def _compare(self, loaded: LoadedShare, ended: bool) -> None:
        """Raise on all ranks unless they have loaded shares of one batch, and their generators stand alike."""
        facts = {
            "have drawn different random numbers": number_of(torch.get_rng_state().numpy().tobytes()),
            "have come to different ends of their data": int(ended),
            "draw random numbers for some samples of a batch and not for others": int(loaded.whole),
            "have batches of different sizes": loaded.total,
            "have samples of different shapes": number_of(described(loaded.samples).encode()) * (not loaded.whole),
            "have different data": loaded.sample,
        }
        numbers = torch.tensor(list(facts.values()), dtype=torch.int64)
        least, most = extremes(self._cutter.mesh.world, numbers, _LABEL)
        for words, low, high in zip(facts, least.tolist(), most.tolist(), strict=True):
            if low != high:
                raise Refused(
                    "DataLoader",
                    "the script",
                    f"the ranks {words}, so that their batches are not those of one device",
                    "seed the generators of torch, numpy and Python with fixed numbers, and make no data from the time "
                    "or from the system's entropy",
                )


def share_loaders(patches: Patches, cutter: BatchCutter, first: FirstRank) -> None:
    """From now on, DataLoaders give batches that are cut."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        loading = Loading(cutter, first, plain)

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return loading.iterate(loader) if first.together else plain(loader)

        return iterate

    patches.replace(DataLoader, "__iter__", make)
