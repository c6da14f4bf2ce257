"""Views of a sample: any sequence of flips, turns, crops and shifts, against numpy doing them to the whole."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.errors import ShardingError
from halocline.geometry import Interval, SampleView, slices


@st.composite
def changes(draw: st.DrawFn):
    """A source, its view after some changes, and numpy's idea of the same."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    source = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    whole, view = source, SampleView.of(shape)
    for _ in range(draw(st.integers(0, 6))):
        whole, view = _change(draw, whole, view)
    return source, whole, view


def _change(draw, whole, view):
    dim = draw(st.integers(0, whole.ndim - 1))
    size = whole.shape[dim]
    what = draw(st.sampled_from(["flip", "crop", "shift", "roll", "rotate", "take"]))
    if what == "flip":
        return np.flip(whole, dim), view.flip(dim)
    if what == "crop":
        lo = draw(st.integers(0, size))
        hi = draw(st.integers(lo, size))
        return whole.take(range(lo, hi), dim), view.crop(dim, lo, hi)
    if what == "shift":
        by = draw(st.integers(-size - 1, size + 1))
        return _shifted(whole, by, dim), view.shift(dim, by)
    if what == "roll" and size:
        by = draw(st.integers(-9, 9))
        return np.roll(whole, by, dim), view.roll(dim, by)
    if what == "take" and size:
        indices = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
        return whole.take(indices, dim), view.take(dim, indices)
    if what == "rotate" and whole.ndim > 1:
        other = draw(st.sampled_from([d for d in range(whole.ndim) if d != dim]))
        turns = draw(st.integers(-3, 5))
        return np.rot90(whole, turns, (dim, other)), view.rotate(dim, other, turns)
    return whole, view


def _shifted(whole, by, dim):
    found = np.zeros_like(whole)
    for index in range(whole.shape[dim]):
        if 0 <= index + by < whole.shape[dim]:
            found[(slice(None),) * dim + (index + by,)] = whole.take(index, dim)
    return found


def _shown(source, view, box, within):
    """What the pieces say, put together; and how often each element was written."""
    target = np.zeros([interval.size for interval in box], source.dtype)
    times = np.zeros_like(target)
    for part in within:
        for piece in view.pieces(box, part):
            place = target[slices(piece.place)][tuple(slice(None, None, step) for step in piece.steps)]
            place.transpose(np.argsort(view.order))[...] = source[slices(piece.source)]
            times[slices(piece.place)] += 1
    return target, times


@settings(max_examples=300, deadline=None)
@given(changes(), st.data())
def test_a_box_of_a_view_is_that_box_of_the_changed_whole(changed, data):
    source, whole, view = changed
    assert view.shape == whole.shape
    box = tuple(Interval(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in whole.shape)
    cuts = [data.draw(st.integers(0, n)) for n in source.shape]
    holders = list(product(*([Interval(0, cut), Interval(cut, n)] for cut, n in zip(cuts, source.shape, strict=True))))
    for within in ([None], holders):
        target, times = _shown(source, view, box, within)
        assert (target == whole[slices(box)]).all()
        assert times.max(initial=0) <= 1, "an element was written twice"
    assert view.fills(box) == bool((target == 0).any()) or not target.size


def test_a_crop_or_index_outside_is_refused():
    with pytest.raises(ShardingError, match="leaves dim 0 of size 4"):
        SampleView.of((4,)).crop(0, 2, 5)
    with pytest.raises(ShardingError, match="index 4"):
        SampleView.of((4,)).take(0, [4])
