"""The tests that every store passes. A new kind of store inherits them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..data.stores.store import Store
from ..errors import BadSample, DataError
from ..geometry import Box, Interval, shape_of, slices, whole

Array = np.ndarray[Any, Any]

_SHAPES = {"NCDHW": (3, 2, 5, 7, 6), "NHWC": (2, 9, 8, 3), "NW": (4, 11)}


class StoreTests(ABC):
    """Tests for any store. A subclass whose name begins with ``Test`` says how its store is made, and inherits the
    tests.

        class TestMyStore(StoreTests):
            def make(self, array, dims, folder):
                np.save(folder / "x.npy", array)
                return MyStore(folder / "x.npy", dims)

    ``make`` gets an array with the samples along its first dim, ``dims`` that name all its dims ("NCDHW"), and an empty
    folder. It writes the array in whatever way is to be tested, and returns a store of it.
    """

    #: A store that cannot hold some of these names those that it can.
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "int16", "uint8", "int64", "bool")

    @abstractmethod
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        """Write ``array`` and open it as a store."""

    def test_whole_samples(self, tmp_path: Path) -> None:
        """Samples of several shapes come whole, with their dims in the order of ``store.dims``."""
        for number, (dims, shape) in enumerate(_SHAPES.items()):
            array = _numbers(shape, "float32")
            store = self.make(array, dims, _folder(tmp_path, number))
            assert len(store) == shape[0]
            assert sorted(store.dims) == sorted(dims.replace("N", ""))
            assert store.shape == _turned(array, dims, store)[0].shape
            assert store.sample_bytes == array[0].nbytes
            for sample in range(len(store)):
                _equal(store.read_new(sample), _turned(array, dims, store)[sample])

    def test_every_dtype(self, tmp_path: Path) -> None:
        """Every dtype that the store names is stored without loss."""
        for number, dtype in enumerate(self.dtypes):
            array = _numbers((2, 4, 5, 3), dtype)
            store = self.make(array, "NCHW", _folder(tmp_path, number))
            assert store.dtype.newbyteorder("=") == np.dtype(dtype)
            for sample in range(2):
                _equal(store.read_new(sample), _turned(array, "NCHW", store)[sample])

    def test_numbers_that_are_none_come_as_they_are(self, tmp_path: Path) -> None:
        """NaN, infinities, negative zero and denormals keep their bits."""
        array = np.array([[0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45]] * 2, np.float32)
        store = self.make(array, "NW", tmp_path)
        numbers = store.read_new(1).astype("float32")
        assert numbers.tobytes() == array[1].tobytes()

    def test_random_boxes_into_arrays_with_any_strides(self, tmp_path: Path) -> None:
        """Any box goes into arrays that are strided, reversed or transposed, and nothing beside the box is written."""
        dice = np.random.default_rng(7)
        for number, (dims, shape) in enumerate(_SHAPES.items()):
            array = _numbers(shape, "float32")
            store = self.make(array, dims, _folder(tmp_path, number))
            truth = _turned(array, dims, store)
            for _ in range(12):
                sample, box = int(dice.integers(len(store))), _random_box(dice, store.shape)
                for layout in LAYOUTS:
                    self._read_guarded(store, sample, box, layout, truth[sample][slices(box)])

    def _read_guarded(self, store: Store, sample: int, box: Box, layout: Layout, wanted: Array) -> None:
        """Nothing but the box of ``out`` may change."""
        memory, out = layout(shape_of(box), store.dtype)
        memory.view(np.uint8).fill(0xA5)
        before = memory.copy()
        store.read(sample, box, out)
        _equal(out, wanted)
        _overlay(before, memory, out)[...] = wanted
        assert memory.tobytes() == before.tobytes(), "something outside the box was written"

    def test_samples_of_one_number(self, tmp_path: Path) -> None:
        """A sample may have no dims at all."""
        array = _numbers((5,), "float32")
        store = self.make(array, "N", tmp_path)
        assert store.shape == ()
        for sample in range(5):
            _equal(store.read_new(sample), array[sample])
            out = np.zeros((), "float64")
            store.read(sample, (), out)
            _equal(out, array[sample].astype("float64"))

    def test_other_dtypes(self, tmp_path: Path) -> None:
        """Reads convert to any dtype that holds the stored numbers."""
        pairs = [("int16", "float32"), ("uint8", "int64"), ("float32", "float64"), ("float64", "float32")]
        for number, (stored, wanted) in enumerate(pairs):
            if stored not in self.dtypes:
                continue
            array = _numbers((2, 3, 6, 5), stored)
            store = self.make(array, "NCHW", _folder(tmp_path, number))
            for layout in LAYOUTS:
                _, out = layout(store.shape, np.dtype(wanted))
                store.read(1, _all(store), out)
                _equal(out, _turned(array, "NCHW", store)[1].astype(wanted))

    def test_integers_become_others_only_if_they_fit(self, tmp_path: Path) -> None:
        """A number too large for the wanted dtype is an error that names it; it never wraps round."""
        if "int16" not in self.dtypes:
            return
        array = np.arange(24, dtype="int16").reshape(2, 3, 4)
        array[1, 2, 1] = 300
        store = self.make(array, "NCW", tmp_path)
        out = np.empty(store.shape, "int8")
        store.read(0, _all(store), out)
        _equal(out, _turned(array, "NCW", store)[0].astype("int8"))
        with refused(BadSample, "300", "int8"):
            store.read(1, _all(store), out)
        _equal(store.read_new(1), _turned(array, "NCW", store)[1])

    def test_floats_become_no_integers(self, tmp_path: Path) -> None:
        """Floating-point numbers are never rounded to integers."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        for dtype in ("int32", "uint8", "bool"):
            with refused(DataError, "float32", dtype):
                store.read(0, _all(store), np.empty(store.shape, dtype))

    def test_empty_boxes(self, tmp_path: Path) -> None:
        """A box may hold nothing, anywhere in the sample."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        for lo, hi in ((0, 0), (2, 2), (3, 3)):
            box = (Interval(lo, hi), *map(whole, store.shape[1:]))
            assert store.read_new(1, box).shape == shape_of(box)

    def test_wrong_shapes_are_refused(self, tmp_path: Path) -> None:
        """An array of another shape than the box is an error that names its shape."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        for shape in ((2, 4), (4, 3), (3, 4, 1), (12,), ()):
            with refused(DataError, str(list(shape))):
                store.read(0, _all(store), np.empty(shape, "float32"))

    def test_boxes_that_leave_the_sample_are_refused(self, tmp_path: Path) -> None:
        """A box that reaches out of the sample is an error, not a shorter read."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        first, second = store.shape
        for box in ([(0, first + 1), (0, second)], [(-1, 1), (0, second)], [(first, first + 2), (0, 1)], [(0, 1)]):
            wrong = tuple(Interval(*pair) for pair in box)
            with refused(DataError, "box"):
                store.read(0, wrong, np.empty(shape_of(wrong), "float32"))

    def test_samples_that_are_not_there_are_refused(self, tmp_path: Path) -> None:
        """Negative and too large numbers of samples are errors."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        for sample in (-1, 2, 1 << 40):
            with refused(DataError, str(sample)):
                store.read(sample, _all(store), np.empty(store.shape, "float32"))

    def test_pickled(self, tmp_path: Path) -> None:
        """Also while it has files open, and without reading the data then."""
        array = _numbers((3, 2, 4, 5), "float32")
        store = self.make(array, "NCHW", tmp_path)
        store.read_new(1)
        other: Store = pickle.loads(pickle.dumps(store))
        assert (other.dims, other.shape, len(other), other.dtype) == (store.dims, store.shape, 3, store.dtype)
        for sample in range(3):
            _equal(other.read_new(sample), _turned(array, "NCHW", store)[sample])

    def test_two_threads_at_once(self, tmp_path: Path) -> None:
        """Threads may read at once; those of a loader do."""
        array = _numbers((6, 2, 16, 17), "float32")
        store = self.make(array, "NCHW", tmp_path)
        truth = _turned(array, "NCHW", store)

        def work(seed: int) -> None:
            dice = np.random.default_rng(seed)
            for _ in range(20):
                sample, box = int(dice.integers(6)), _random_box(dice, store.shape)
                _, out = _transposed(shape_of(box), np.dtype("float64"))
                store.read(sample, box, out)
                _equal(out, truth[sample][slices(box)].astype("float64"))

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(work, (1, 2)))  # raises what a thread has raised

    def test_closed_and_read_again(self, tmp_path: Path) -> None:
        """A closed store opens its files again when it is read."""
        array = _numbers((2, 3, 4), "float32")
        with self.make(array, "NCW", tmp_path) as store:
            store.read_new(0)
        store.close()
        _equal(store.read_new(1), _turned(array, "NCW", store)[1])

    def test_it_says_where_a_sample_lies(self, tmp_path: Path) -> None:
        """Errors name a sample's place, so every sample must have one."""
        store = self.make(_numbers((2, 3, 4), "float32"), "NCW", tmp_path)
        assert store.name
        assert all(store.where(sample) for sample in range(2))

    def test_chunks_are_named_in_the_order_of_the_dims(self, tmp_path: Path) -> None:
        """Chunk sizes have one entry for each dim."""
        store = self.make(_numbers((2, 3, 4, 5), "float32"), "NCHW", tmp_path)
        assert store.chunks is None or len(store.chunks) == len(store.dims)


Layout = Callable[[tuple[int, ...], "np.dtype[Any]"], tuple[Array, Array]]


def _plain(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    memory = np.empty(int(np.prod(shape)) + 6, dtype)
    return memory, memory[3:-3].reshape(shape)


def _strided(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    memory = np.empty([2 * size + 3 for size in shape], dtype)
    return memory, memory[tuple(slice(1, 1 + 2 * size, 2) for size in shape)]


def _backwards(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    memory = np.empty([size + 2 for size in shape], dtype)
    return memory, memory[tuple(slice(size, 0, -1) for size in shape)]


def _transposed(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    memory = np.empty([size + 1 for size in reversed(shape)], dtype)
    return memory, memory[tuple(slice(0, size) for size in reversed(shape))].transpose()


#: How the array that is given may lie in memory: each returns the memory, and the array in it.
LAYOUTS: tuple[Layout, ...] = (_plain, _strided, _backwards, _transposed)


def _overlay(copy: Array, memory: Array, view: Array) -> Array:
    """The elements of ``copy`` where ``view`` has its own in ``memory``."""
    offset = view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return np.ndarray(view.shape, view.dtype, copy, offset, view.strides)


def _numbers(shape: tuple[int, ...], dtype: str) -> Array:
    """The same random numbers for the same shape."""
    dice = np.random.default_rng(sum(shape))
    if np.dtype(dtype).kind == "f":
        return dice.standard_normal(shape).astype(dtype)
    return dice.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


def _turned(array: Array, dims: str, store: Store) -> Array:
    """The samples as the store should deliver them."""
    return array.transpose([dims.index(letter) for letter in "N" + store.dims])


def _random_box(dice: np.random.Generator, shape: tuple[int, ...]) -> Box:
    ends = (sorted(dice.integers(0, size + 1, 2).tolist()) for size in shape)
    return tuple(Interval(lo, hi) for lo, hi in ends)


def _all(store: Store) -> Box:
    return tuple(map(whole, store.shape))


def _folder(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir()
    return folder


def _equal(array: Array, wanted: Array) -> None:
    np.testing.assert_array_equal(array, wanted)


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise an error of that kind that says all the words; pytest is not needed for it."""
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} should be in: {said}"
