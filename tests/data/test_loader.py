"""Batches that ranks read box by box, gathered, are those of one rank, bit for bit."""

from functools import cache

import numpy as np
import pytest
import torch
from data_sets import KINDS, MESHES, SAMPLES, SHAPE, assert_same, batches, fields, numbers, write
from hypothesis import given, settings
from hypothesis import strategies as st
from ranges import often

import halocline as hc
from halocline.data import Crop, Field, Flip, Generated, Loader, Noise, Normalize, Order, Rotate90, Scale, Shift
from halocline.errors import DataError
from halocline.testing import run_local

ONE = ({"data": 1}, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("samples")
    write(made)
    return made


AUGMENTATIONS = {
    "flip": [Flip("D", "W")],
    "rotate": [Rotate90("H", "W")],
    "half turn": [Rotate90("D", "H", half=True)],
    "crop": [Crop(D=5, W=3)],
    "centre": [Crop(D=6, H=4, centre=True)],
    "shift": [Shift(D=4, W=9)],
    "roll": [Shift(D=8, H=3, wrap=True)],
    "all": [Flip("D", "H"), Shift(D=3, wrap=True), Crop(D=6, H=5, W=5), Rotate90("H", "W"), Shift(H=2)],
}


def every_other(first, second):
    """All pairs, half of them for `make long`: of each row and each column half stay."""
    return [
        pytest.param(one, other, marks=pytest.mark.long if (row + column) % 2 else [])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


@pytest.fixture(scope="module")
def on_one_rank(folder):
    """The batches of one rank, asked for once."""

    @cache
    def found(kind, seed, augmentation=None):
        augment = AUGMENTATIONS[augmentation] if augmentation else ()
        ((expected, _),) = batches(lambda: fields(kind, folder), *ONE, batch=3, seed=seed, augment=augment)
        return expected

    return found


@pytest.mark.parametrize(("mesh", "kind"), every_other(MESHES, KINDS))
def test_every_store_and_cut(folder, on_one_rank, kind, mesh):
    for found, _ in batches(lambda: fields(kind, folder), *MESHES[mesh], batch=3, seed=1):
        assert_same(found, on_one_rank("generated", 1))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize(("memory", "mesh"), every_other([0, 1 << 20, 2500], ["2x2", "data x depth"]))
def test_every_augmentation_and_memory(folder, on_one_rank, name, memory, mesh):
    options = {"augment": AUGMENTATIONS[name], "batch": 3, "seed": 2, "memory": memory}
    for found, _ in batches(lambda: fields("hdf5", folder), *MESHES[mesh], **options):
        assert_same(found, on_one_rank("hdf5", 2, name))


def _numpy_says(moves, array):
    """The moves done to a whole sample with dims CDHW."""
    dims = "CDHW"
    for move in moves:
        axes = [dims.index(letter) for letter in move.letters]
        if move.what == "flip":
            array = np.flip(array, axes[0])
        elif move.what == "rotate":
            array = np.rot90(array, move.numbers[0], axes)
        elif move.what == "crop":
            array = array.take(range(*move.numbers), axes[0])
        elif move.what == "roll":
            array = np.roll(array, move.numbers[0], axes[0])
        else:
            array = _pushed(array, move.numbers[0], axes[0])
    return array


def _pushed(array, by, axis):
    found, size = np.zeros_like(array), array.shape[axis]
    for index in range(max(0, by), min(size, size + by)):
        found[(slice(None),) * axis + (index,)] = array.take(index - by, axis)
    return found


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_is_that_of_the_whole_sample(folder, name):
    from halocline.data.loading.augment import AugmentationDraws, drawn_moves

    (found, _), *_ = batches(lambda: fields("npy", folder), *ONE, augment=AUGMENTATIONS[name], batch=2, seed=7)
    data, drawn = numbers()["x"], set()
    for epoch, _, samples, whole in found:
        for place, sample in enumerate(samples):
            moves, _ = drawn_moves(AUGMENTATIONS[name], {"D": 9, "H": 8, "W": 8}, AugmentationDraws(7, epoch, sample))
            drawn.add(tuple(moves))
            assert (whole["x"][place].numpy() == _numpy_says(moves, data[sample])).all()
    assert len(drawn) > 1 or name == "centre", "the samples are all moved alike"


@pytest.mark.sweep
@settings(max_examples=often(40), deadline=None)
@given(st.data())
def test_random_settings(folder, data):
    """Any mix of augmentation, cut, rim, memory, batch size and order."""
    names = st.lists(st.sampled_from(["flip", "roll", "shift", "crop"]), max_size=3, unique=True)
    augment = [each for name in data.draw(names) for each in AUGMENTATIONS[name]]
    options = {
        "augment": augment,
        "batch": data.draw(st.integers(1, 8)),
        "seed": data.draw(st.integers(0, 5)),
        "shuffle": data.draw(st.booleans()),
        "values": (Scale(0.5, 1.0), Noise(0.1)) if data.draw(st.booleans()) else (),
    }
    values = options.pop("values")
    rim = {"D": data.draw(st.integers(0, 3)), "H": data.draw(st.integers(0, 1))}
    kind, mesh = data.draw(st.sampled_from(["hdf5", "npy", "generated"])), data.draw(st.sampled_from(sorted(MESHES)))
    (expected, _), *_ = batches(lambda: fields(kind, folder, values), *ONE, **options)
    memory = data.draw(st.sampled_from([0, 1000, 3000, 1 << 20]))
    for found, _ in batches(lambda: fields(kind, folder, values, rim), *MESHES[mesh], memory=memory, **options):
        assert_same(found, expected)


def test_the_first_epoch_reads_each_byte_once_and_the_second_none(folder):
    total = sum(array.nbytes for name, array in numbers().items() if name != "v")
    reports = [report for _, report in batches(lambda: {k: v for k, v in fields("hdf5", folder).items() if k != "v"},
                                               *MESHES["data x depth"], epochs=4, batch=2, memory=1 << 20)]  # fmt: skip
    assert sum(report.read_bytes for report in reports) == total
    assert all(report.held_share == 1 for report in reports)
    assert any(report.moved_bytes for report in reports), "samples change groups from epoch to epoch"


def test_nothing_moves_where_nothing_has_to(folder):
    for _, report in batches(lambda: fields("hdf5", folder), *MESHES["2x2"], epochs=3, batch=2, memory=1 << 20):
        assert report.moved_bytes == 0


def test_a_short_budget_leaves_a_share_on_disk(folder):
    for _, report in batches(lambda: fields("hdf5", folder), *MESHES["depth"], epochs=3, batch=2, memory=5000):
        assert 0 < report.held_share < 1 and report.held_bytes <= 5000


def test_fewer_samples_than_ranks_in_the_last_batch(folder):
    (found, _), *_ = batches(lambda: fields("npy", folder), *MESHES["data"], batch=4, epochs=1)
    assert [len(samples) for _, _, samples, _ in found] == [4, 3]
    (found, _), *_ = batches(lambda: fields("npy", folder), *MESHES["data"], batch=6, epochs=1)
    assert [len(samples) for _, _, samples, _ in found] == [6, 1]


def test_order_is_a_permutation_that_epoch_and_seed_decide():
    order = Order(100, 7, seed=3)
    assert sorted(order.permutation(0)) == list(range(100))
    assert order.permutation(0) == Order(100, 9, seed=3).permutation(0)
    assert order.permutation(0) != order.permutation(1) != Order(100, 7, seed=4).permutation(1)
    assert Order(100, 7, drop_last=True).steps == 14 and order.steps == 15
    assert sum(len(order.step(tick).samples) for tick in range(15, 30)) == 100


def test_resume_in_mid_epoch_on_another_mesh(folder):
    (expected, _), *_ = batches(lambda: fields("npy", folder), *ONE, batch=2, epochs=3, augment=[Flip("D")])

    def until_the_sixth_step():
        loader = Loader(fields("npy", folder), hc.Mesh(depth=2), cut={"D": "depth"}, batch=2, augment=[Flip("D")])
        with loader:
            for _ in range(2):
                for batch in loader:
                    if (batch.epoch, batch.step) == (1, 1):
                        return loader.state_dict()
        raise AssertionError("the epoch was too short")

    state, _ = run_local(2, until_the_sixth_step)
    assert (state["epoch"], state["step"]) == (1, 2)

    def the_rest():
        found = []
        loader = Loader(fields("npy", folder), hc.Mesh(data=2, depth=2), cut={"N": "data", "D": "depth"}, batch=2,
                        augment=[Flip("D")], memory=1 << 20)  # fmt: skip
        with loader:
            loader.load_state_dict(state)
            for _ in range(2):
                found += [(b.epoch, b.step, b.samples, {k: hc.gather(t).clone() for k, t in b.items()}) for b in loader]
        return found

    for found in run_local(4, the_rest):
        assert_same(found, expected[6:])


def test_a_state_of_other_data_is_refused(folder):
    with Loader(fields("npy", folder), batch=2) as loader, pytest.raises(DataError, match="batch=3"):
        loader.load_state_dict({**loader.state_dict(), "batch": 3})


def test_an_epoch_that_is_left_is_followed_by_the_next(folder):
    def body():
        seen = []
        with Loader(fields("npy", folder), hc.Mesh(data=2), cut={"N": "data"}, batch=2, memory=1 << 20) as loader:
            for stop in (1, 3, 9):
                for batch in loader:
                    seen.append((batch.epoch, batch.step))
                    if batch.step == stop:
                        break
        return seen

    assert run_local(2, body)[0] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), *((2, s) for s in range(4))]


def test_a_batch_that_is_kept_is_not_written_over(folder):
    with Loader(fields("npy", folder), batch=1, shuffle=False, epochs=3) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        data = torch.from_numpy(numbers()["x"]).float()
        for batch in kept:
            assert torch.equal(batch["x"][0], data[batch.samples[0]])
        made = loader.report.buffer_bytes
    assert made >= len(kept) * data[0].nbytes


def test_buffers_are_used_again(folder):
    with Loader(fields("npy", folder), batch=1, epochs=6, prefetch=2) as loader:
        for _ in range(6):
            for batch in loader:
                torch.sum(batch["x"])
                del batch
        assert loader._pool.made <= 4


def test_noise_is_by_global_index_and_new_in_each_epoch(folder):
    make = lambda: {"x": Field(fields("npy", folder)["x"].store, dtype=torch.float64, values=[Noise(1.0)])}  # noqa: E731
    (expected, _), *_ = batches(make, *ONE, batch=2)
    for found, _ in batches(make, *MESHES["2x2"], batch=2):
        assert_same(found, expected)
    data = torch.from_numpy(numbers()["x"]).double()
    drawn = {(e, s): whole["x"][i] - data[s] for e, _, samples, whole in expected for i, s in enumerate(samples)}
    assert not torch.equal(drawn[0, 1], drawn[1, 1]) and not torch.equal(drawn[0, 1], drawn[0, 2])
    everything = torch.stack(list(drawn.values()))
    assert abs(float(everything.mean())) < 0.02 and abs(float(everything.std()) - 1) < 0.02


def test_normalize_and_channels(folder):
    store = fields("hdf5", folder)["x"].store
    field = Field(store, dtype=torch.float64, channels=[1], values=[Normalize((2.0,), (4.0,))])
    (found, _), *_ = batches(lambda: {"x": field}, *ONE, batch=1, epochs=1, shuffle=False)
    for sample, (_, _, _, whole) in enumerate(found):
        assert torch.equal(whole["x"][0], (torch.from_numpy(numbers()["x"][sample, 1:]).double() - 2) / 4)


def test_channels_that_are_not_asked_for_are_not_read():
    asked = []

    def make(sample, box):
        asked.append(box[0])
        return np.zeros([i.size for i in box])

    store = Generated(make, 2, (5, 4), "CH")
    with Loader({"x": Field(store, channels=[3, 1, 2])}, epochs=1) as loader:
        assert next(iter(loader))["x"].shape == (1, 3, 4)
    assert {index for interval in asked for index in range(*interval)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "at least 1 sample"),
        ({"augment": [Crop(D=99)]}, "D has size 9"),
        ({"augment": [Rotate90("D", "H")]}, "quarter turn would change the shape"),
        ({"augment": [Flip("C")]}, "not space"),
        ({"augment": [Flip("T")]}, "no field has a dim T"),
        ({"on_bad_sample": "ignore"}, "one of raise, skip"),
        ({"cut": {"Z": "data"}}, "no field has a dim Z"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"readers": 0}, "readers=0"),
        ({"batch": 8, "drop_last": True}, "make no batch of 8"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, options, text):
    with pytest.raises(DataError, match=text):
        Loader(fields("npy", folder), **options)


def test_ranks_that_see_other_files_are_told(folder):
    def body():
        mesh = hc.Mesh(depth=2)
        samples = 5 + mesh.rank
        Loader({"x": Generated(lambda s, box: 0, samples, SHAPE, "CDHW")}, mesh, cut={"D": "depth"})

    with pytest.raises(DataError, match="describe their data differently"):
        run_local(2, body)


def test_labels_of_another_size_are_refused():
    stores = {
        "x": Generated(lambda s, b: 0, SAMPLES, (8, 8), "DH"),
        "y": Generated(lambda s, b: 0, SAMPLES, (4, 8), "DH"),
    }
    with pytest.raises(DataError, match="D has 4 in 'y'"):
        Loader(stores, cut={}, augment=[Flip("D")])


@pytest.mark.parametrize("make", [lambda: Flip("DH"), lambda: Shift(D=-1), lambda: Normalize((0.0,), (0.0,))])
def test_changes_that_make_no_sense(make):
    with pytest.raises(DataError):
        make()


def test_a_plane_of_which_a_field_has_one_dim():
    sizes = {"x": ((4, 4, 4), "DHW"), "y": ((4, 4), "HW")}
    fields = {name: Generated(lambda s, b: 0, 10, shape, dims) for name, (shape, dims) in sizes.items()}
    with pytest.raises(DataError, match="Rotate90 of D and H: 'y'"):
        Loader(fields, augment=[Rotate90("D", "H")])
