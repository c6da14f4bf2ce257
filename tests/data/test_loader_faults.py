"""Bad data: every rank raises the same in the same step, or leaves the same samples out. And reader processes."""

import logging

import h5py
import numpy as np
import pytest
import torch
from data_sets import MESHES, SAMPLES, assert_same, batches, fields, numbers, write

import halocline as hc
from halocline.data import HDF5, Field, Generated, Loader
from halocline.errors import BadSample, DataError
from halocline.geometry import slices
from halocline.testing import run_local, shared_pool

BAD = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("samples")
    write(made)
    return made


def _flip_a_byte(path):
    """In the middle of the first chunk of x."""
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 0xFF
    path.write_bytes(data)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def _drop_dataset(path):
    with h5py.File(path, "a") as file:
        del file["x"]


def _other_dtype(path):
    with h5py.File(path, "a") as file:
        data = file["x"][...]
        del file["x"]
        file["x"] = data.astype("f4")


def _other_shape(path):
    with h5py.File(path, "a") as file:
        data = file["x"][...]
        del file["x"]
        file["x"] = data[:-1]


FAULTS = [_flip_a_byte, _truncate, _drop_dataset, _other_dtype, _other_shape]


@pytest.fixture
def broken(tmp_path, request):
    write(tmp_path)
    request.param(tmp_path / f"one-{BAD}.h5")
    return tmp_path


@pytest.mark.parametrize("broken", FAULTS, indirect=True)
def test_all_ranks_raise_in_the_same_step(broken):
    seen = {}

    def body():
        mesh = hc.Mesh(data=2, depth=2)
        with Loader(fields("files", broken), mesh, cut={"N": "data", "D": "depth"}, batch=2, shuffle=False) as loader:
            steps = 0
            try:
                for _batch in loader:
                    steps += 1
            except BadSample as error:
                seen[mesh.rank] = steps, error.sample, str(error)
                return

    run_local(4, body)
    assert {entry[:2] for entry in seen.values()} == {(BAD // 2, BAD)}
    assert len(seen) == 4
    for _, _, text in seen.values():
        assert f"one-{BAD}.h5" in text and f"sample {BAD}" in text and "D[" in text


@pytest.mark.parametrize("broken", [_flip_a_byte, _truncate], indirect=True)
@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_all_ranks_leave_out_the_same_samples(broken, memory, caplog):
    caplog.set_level(logging.WARNING, "halocline.data")
    options = {"batch": 2, "on_bad_sample": "skip", "memory": memory, "seed": 3}
    (expected, report), *_ = batches(lambda: fields("files", broken), {"data": 1}, {}, **options)
    assert report.skipped == (BAD,)
    assert all(BAD not in samples for _, _, samples, _ in expected)
    for mesh in ("data x depth", "2x2", "data"):
        for found, report in batches(lambda: fields("files", broken), *MESHES[mesh], **options):
            assert_same(found, expected)
            assert report.skipped == (BAD,)
    assert f"one-{BAD}.h5" in caplog.text and "left out" in caplog.text


def test_a_batch_of_bad_samples_only_is_passed_over(tmp_path):
    write(tmp_path)
    _truncate(tmp_path / f"one-{BAD}.h5")
    for found, _ in batches(lambda: fields("files", tmp_path), *MESHES["depth"], batch=1, on_bad_sample="skip"):
        assert len(found) == 2 * (SAMPLES - 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers(value):
    def make(sample, box):
        data = np.ones((4, 6))
        data[3, 5] = value if sample == 2 else 1
        return data[slices(box)]

    def body():
        store = Generated(make, 4, (4, 6), "DH")
        for _ in Loader({"x": store}, hc.Mesh(depth=2), cut={"D": "depth"}, shuffle=False):
            pass

    with pytest.raises(BadSample, match=r"sample 2 .*1 of its values are NaN or infinite"):
        run_local(2, body)


def test_large_numbers_whose_sum_overflows_are_no_fault():
    store = Generated(lambda s, box: np.full([i.size for i in box], 3e38, "f4"), 2, (64,), "D", "float32")
    assert len(list(Loader({"x": store}, epochs=1))) == 2


def test_a_transform_that_fails_is_told_by_every_rank():
    def broken(tile, at):
        if at.box[0].lo:
            raise ZeroDivisionError("no such luck")
        return tile

    def body():
        store = Generated(lambda s, box: 1, 2, (4, 6), "DH")
        mesh = hc.Mesh(depth=2)
        try:
            list(Loader({"x": Field(store, values=[broken])}, mesh, cut={"D": "depth"}, on_bad_sample="skip"))
        except (DataError, ZeroDivisionError) as error:
            return str(error)

    first, second = run_local(2, body)
    assert "no such luck" in first and "rank 1" in first and second == "no such luck"


@pytest.mark.long
def test_reader_processes_read_the_same(folder):
    (expected, _), *_ = batches(lambda: fields("npy", folder), {"data": 1}, {}, batch=3)
    for memory in (0, 1 << 20):
        options = {"batch": 3, "readers": 1 + (memory == 0), "processes": True, "memory": memory}
        ((found, _),) = batches(lambda: fields("files", folder), {"data": 1}, {}, **options)
        assert_same(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("broken", [_flip_a_byte], indirect=True)
def test_reader_processes_tell_of_bad_samples(broken):
    loader = Loader(fields("files", broken), batch=1, shuffle=False, readers=1, processes=True)
    with loader, pytest.raises(BadSample, match=f"one-{BAD}.h5"):
        list(loader)


def test_a_reader_process_that_dies_is_an_error(folder):
    import os
    import signal

    with Loader(fields("files", folder), batch=1, readers=1, processes=True) as loader:
        (pid,) = loader._readers.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataError, match="reader process has died"):
            list(loader)


def _on_processes(folder, memory):
    import logging

    logging.disable(logging.WARNING)
    mesh = hc.Mesh(data=2, depth=2)
    found = []
    with Loader(fields("files", folder), mesh, cut={"N": "data", "D": "depth"}, batch=3, memory=memory) as loader:
        for _ in range(2):
            for b in loader:
                found.append((b.epoch, b.step, b.samples, {name: hc.gather(t).clone() for name, t in b.items()}))
    return found


def test_ranks_that_are_processes(folder):
    (expected, _), *_ = batches(lambda: fields("npy", folder), {"data": 1}, {}, batch=3)
    for memory in (0, 1 << 20):
        for found in shared_pool(4).run(_on_processes, folder, memory):
            assert_same(found, expected)


def _one_rank_sees_a_bad_file(folder):
    mesh = hc.Mesh(depth=2)
    path = str(folder / "all.h5")
    store = HDF5(path, "x", "NCDHW")
    if mesh.rank == 1:
        read = store.read_stored

        def failing(sample, box, out):
            if sample == BAD:
                raise OSError("the disk has gone")
            read(sample, box, out)

        store.read_stored = failing
    try:
        list(Loader({"x": store}, mesh, cut={"D": "depth"}, shuffle=False))
    except BadSample as error:
        return str(error)


def test_processes_raise_together(folder):
    first, second = shared_pool(2).run(_one_rank_sees_a_bad_file, folder)
    assert "the disk has gone" in first and "seen by rank 1" in first
    assert "the disk has gone" in second and f"sample {BAD}" in second


def test_batches_train_a_cut_network_as_one_rank_does(folder):
    """Value and gradient, through a whole step, in float64."""
    data = torch.from_numpy(numbers()["x"]).double()

    def network():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 3, 3, padding=1)
        ).double()

    def gradient(model, x, y):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    models = [network() for _ in range(4)]

    def body():
        mesh = hc.Mesh(data=2, depth=2)
        found = fields("hdf5", folder)
        chosen = {"x": Field(found["x"].store, dtype=torch.float64, rim={"D": 1}), "y": found["y"]}
        model = hc.distribute(models[mesh.rank], mesh)
        with Loader(chosen, mesh, cut={"N": "data", "D": "depth"}, batch=4, shuffle=False, epochs=1) as loader:
            batch = next(iter(loader))
            return gradient(model, batch["x"], batch["y"]).clone()

    reference = gradient(network(), data[:4], torch.from_numpy(numbers()["y"][:4]).long())
    for found in run_local(4, body):
        assert torch.allclose(found, reference, rtol=1e-10, atol=1e-12)
