"""What a hostile user does to a loader: it is right, or an error on every rank in the same step, and nothing leaks."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import halocline as hc
from halocline.data import Field, Generated, Loader, Normalize, Npy, ViewChange
from halocline.errors import BadSample, DataError, RankFailure
from halocline.testing import RankPool, run_local, shared_pool


def constant(sample, box):
    return np.full([i.size for i in box], sample, "f4")


def store(make=constant, samples=10, shape=(4,), dims="D", dtype="f4"):
    return Generated(make, samples, shape, dims, dtype)


def is_right(batch):
    return torch.equal(batch["x"].flatten(1)[:, 0], torch.tensor(batch.samples).float())


def told(body):
    """What a rank returns, or the error that it sees, and after how long."""

    def guarded():
        began = time.monotonic()
        try:
            found = body()
        except Exception as error:  # noqa: BLE001  looked at below
            found = error
        return found, time.monotonic() - began

    return guarded


# -- after an error, nothing that was not read or not looked at is handed out


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_what_was_not_a_number_once_is_not_handed_out_later(memory):
    make = lambda s, box: np.full([i.size for i in box], np.nan if s == 3 else s, "f4")  # noqa: E731
    with Loader({"x": store(make, 6)}, shuffle=False, memory=memory) as loader:
        for _ in range(3):
            with pytest.raises(BadSample, match="sample 3"):
                assert all(is_right(batch) for batch in loader)


def test_nor_after_its_step_was_prepared_and_given_up():
    make = lambda s, box: np.full([i.size for i in box], np.nan if s == 2 else s, "f4")  # noqa: E731
    with Loader({"x": store(make, 6)}, shuffle=False, prefetch=4) as loader:
        next(iter(loader))  # and the others are prepared
        with pytest.raises(BadSample, match="sample 2"):
            list(loader)


def test_memory_does_not_hand_out_what_it_could_not_read():
    failures = []

    def flaky(sample, box):
        if sample == 3 and not failures:
            failures.append(sample)
            raise OSError("for once")
        return constant(sample, box)

    def body():
        found = []
        with Loader({"x": store(flaky)}, hc.Mesh(data=2), batch=2, shuffle=False, memory=1 << 20) as loader:
            for _ in range(3):
                try:
                    for batch in loader:
                        found.append(torch.equal(hc.gather(batch["x"])[:, 0], torch.tensor(batch.samples).float()))
                except BadSample as error:
                    found.append(error.sample)
            return found, loader._pool.made

    for found, buffers in run_local(2, body):
        assert found == [True, 3, *[True] * 10]
        assert buffers == 4, "a step that fails gives its buffer back"


# -- ranks that do not do the same


def test_files_in_another_order_on_one_rank(tmp_path):
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    for number, path in enumerate(paths):
        np.save(path, np.full(4, number))

    def body():
        mesh = hc.Mesh(depth=2)
        mine = paths if mesh.rank == 0 else [paths[0], paths[2], paths[1], paths[3]]
        Loader({"x": Npy(mine, "D")}, mesh, cut={"D": "depth"})

    with pytest.raises(DataError, match="same order"):
        run_local(2, body)


@pytest.mark.parametrize(
    "options", [{"memory": 99}, {"prefetch": 3}, {"mean": 0.1}, {"on_bad_sample": "skip"}, {"epochs": 2}]
)
def test_other_options_on_one_rank(options):
    def body():
        mesh = hc.Mesh(data=2)
        mean = (options.get("mean", 0.0),) if mesh.rank else (0.0,)
        others = {name: value for name, value in options.items() if name != "mean" and mesh.rank}
        Loader({"x": Field(store(), values=[Normalize(mean, (1.0,))])}, mesh, **others)

    with pytest.raises(DataError, match="same arguments"):
        run_local(2, body)


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_rank_that_leaves_an_epoch_earlier(memory):
    """It would go on with other samples, and the numbers of two samples would be mixed."""

    def body():
        mesh = hc.Mesh(depth=2)
        loader = Loader({"x": store()}, mesh, cut={"D": "depth"}, shuffle=False, memory=memory)
        for _ in range(2):
            for step, _batch in enumerate(loader):
                if mesh.rank == 0 and step == 2:
                    break

    for error, _ in run_local(2, told(body), deadline=5):
        assert isinstance(error, DataError) and "different batches" in str(error)


class _Odd:
    def letters(self):
        return "D"

    def moves(self, sizes, dice):
        return [ViewChange("crop", "D", (0, 3 if dice._sample == 5 else 4))]


def test_a_step_that_cannot_begin_is_told_in_its_turn():
    def body():
        mesh, seen = hc.Mesh(depth=2), []
        loader = Loader({"x": store()}, mesh, cut={"D": "depth"}, shuffle=False, augment=[_Odd()])
        with pytest.raises(DataError, match="a batch has one size"):  # noqa: PT012  how far it comes is counted
            for batch in loader:
                seen.append(batch.samples)
                time.sleep(0.1 * mesh.rank)
        return len(seen)

    assert run_local(2, body, deadline=5) == [5, 5]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float16])
def test_numbers_too_large_are_told_alike_with_memory_and_without(policy, dtype):
    def make(sample, box):
        return np.where(np.arange(4)[slice(*box[0])] == 3, 70000 if sample == 2 else 1, 1).astype("i4")

    def body(memory):
        mesh = hc.Mesh(depth=2)
        field = Field(store(make, 4, dtype="i4"), dtype=dtype)
        loader = Loader({"x": field}, mesh, cut={"D": "depth"}, shuffle=False, memory=memory, on_bad_sample=policy)
        return [batch.samples for _ in range(2) for batch in loader]

    for memory in (0, 1 << 20):
        for found, seconds in run_local(2, told(functools.partial(body, memory)), deadline=5):
            assert seconds < 4
            if policy == "raise":
                assert isinstance(found, BadSample) and found.sample == 2
            else:
                assert found == [(0,), (1,), (3,)] * 2


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_transform_that_refuses_a_sample_on_one_rank(memory):
    def picky(tile, at):
        if at.box[0].lo and at.sample == 2:
            raise BadSample("here", at.sample, "all", "not to my taste")
        return tile

    def body():
        mesh = hc.Mesh(depth=2)
        field = Field(store(samples=4), values=[picky])
        loader = Loader({"x": field}, mesh, cut={"D": "depth"}, shuffle=False, memory=memory, on_bad_sample="skip")
        return [batch.samples for _ in range(2) for batch in loader]

    for found, _ in run_local(2, told(body), deadline=5):
        assert found == [(0,), (1,), (3,)] * 2


def _error_of_one_rank():
    mesh, began = hc.Mesh(depth=2), time.monotonic()
    try:
        with Loader({"x": store(samples=40)}, mesh, cut={"D": "depth"}) as loader:
            for step, _ in enumerate(loader):
                if step == 3 and mesh.rank == 0:
                    raise KeyError("of one rank")
    except (KeyError, RankFailure) as error:
        return type(error), time.monotonic() - began


@pytest.mark.long
def test_an_error_of_one_rank_is_not_kept_back():
    """Neither there, to close in order, nor on the others, who wait for its data."""
    pool = RankPool(2)  # of its own: one rank leaves it in anger
    try:
        found = pool.run(_error_of_one_rank)
    finally:
        pool.close()
    assert [kind for kind, _ in found] == [KeyError, RankFailure]
    assert all(seconds < 20 for _, seconds in found)


def _closed_twice(made):
    with Loader({"x": Generated(made, 4, (4,), "D")}, hc.Mesh(depth=2), cut={"D": "depth"}) as loader:
        steps = len(list(loader))
        loader.close()
        loader.close()
    with pytest.raises(DataError, match="closed"):
        next(iter(loader))
    return steps


@pytest.mark.long
def test_closing_twice_and_makers_without_a_name():
    """A partial's repr holds an address, which differs from process to process."""
    assert shared_pool(2).run(_closed_twice, functools.partial(constant)) == [4, 4]


# -- states


def test_a_state_knows_only_what_was_handed_out():
    """What is found ahead of the step depends on the speed of a rank; states of ranks must not."""
    make = lambda s, box: np.full([i.size for i in box], np.nan if s == 3 else s, "f4")  # noqa: E731
    with Loader({"x": store(make)}, shuffle=False, on_bad_sample="skip", prefetch=6) as loader:
        batches = iter(loader)
        next(batches)
        while 3 not in loader._pipeline.bad:
            time.sleep(0.01)
        assert loader.state_dict()["skipped"] == []
        assert [batch.samples[0] for batch in batches] == [1, 2, *range(4, 10)]
        assert loader.state_dict()["skipped"] == [3]


# -- interruptions and leaks


def test_an_interrupt_leaves_one_prefetcher():
    def slow(sample, box):
        time.sleep(0.03)
        return constant(sample, box)

    prefetchers = lambda: [thread.name for thread in threading.enumerate()].count("halocline-prefetcher")  # noqa: E731
    before = prefetchers()
    with Loader({"x": store(slow)}, memory=1 << 20) as loader:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                pass
        for _ in range(2):
            assert all(is_right(batch) for batch in loader)
            assert prefetchers() == before + 1


def test_loaders_that_nobody_closes():
    gc.collect()
    before = threading.active_count()
    for _ in range(5):
        next(iter(Loader({"x": store()})))
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.1)


@pytest.mark.long
def test_reader_processes_that_nobody_closes():
    loader = Loader({"x": store()}, readers=1, processes=True)
    (pid,), end = loader._readers.pids, time.monotonic() + 30
    assert all(is_right(batch) for batch in loader)
    del loader
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the process lives on"
        gc.collect()
        time.sleep(0.1)


@pytest.mark.long
def test_a_program_that_does_not_close_its_loader_ends_well(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, halocline as hc\n"
        "make = lambda s, box: np.full([i.size for i in box], s, 'f4')\n"
        "x = hc.data.Generated(make, 400, (4,), 'D')\n"
        "loader = hc.data.Loader({'x': x}, hc.Mesh(depth=2), cut={'D': 'depth'})\n"
        "next(iter(loader))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0


def test_views_that_are_kept_keep_their_numbers():
    kept, weight = [], torch.ones(4, requires_grad=True)
    with Loader({"x": store(samples=40)}, batch=2) as loader:
        for _ in range(3):
            for batch in loader:
                x, first = batch["x"], float(batch.samples[0])
                kept += [(x[0, 1:3], first), (torch.from_numpy(x.numpy()[0]), first)]
                kept.append(((x[0] * weight).sum(), first))
                del kept[:-7]
                for value, number in kept:
                    if value.requires_grad:
                        (value,) = torch.autograd.grad(value, weight, retain_graph=True)
                    assert (value == number).all()


# -- values


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_big_endian_numbers(memory):
    make = lambda s, box: constant(s, box).astype(">f4")  # noqa: E731
    with Loader({"x": store(make, dtype=">f4")}, memory=memory, batch=3) as loader:
        for _ in range(2):
            assert all(is_right(batch) for batch in loader)


def test_a_transform_may_return_a_conjugate():
    make = lambda s, box: np.full([i.size for i in box], 1 + 2j, "c8")  # noqa: E731
    field = Field(store(make, 1, dtype="c8"), values=[lambda tile, at: tile.conj()])
    (batch,) = Loader({"x": field}, epochs=1)
    assert (batch["x"] == 1 - 2j).all()


@pytest.mark.parametrize("change", [lambda t, at: t * 0.5, lambda t, at: t.long() * 2**40])
def test_a_transform_whose_result_does_not_fit_is_refused(change):
    make = lambda s, box: np.full([i.size for i in box], 3, "i4")  # noqa: E731
    with pytest.raises(DataError, match=r"would be rounded|cannot hold"):
        list(Loader({"x": Field(store(make, 1, dtype="i4"), torch.int32, values=[change])}))


# -- descriptions that make no sense are refused when they are given


@pytest.mark.parametrize("wrong", [{"rim": {"Q": 1}}, {"rim": {"D": -1}}, {"fill": 0.5}, {"fill": -1}])
def test_fields_that_make_no_sense(wrong):
    with pytest.raises(DataError, match=r"rim|fill"):
        Field(store(dtype="u1"), torch.uint8, **wrong)


@pytest.mark.parametrize("memory", [0, 1000])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_one_number_a_sample(memory, dtype):
    def body():
        field = Field(Generated(lambda s, box: s, 6, (), "", "i8"), dtype=dtype)
        with Loader({"x": store(samples=6), "y": field}, hc.Mesh(data=2), batch=3, memory=memory) as loader:
            return [hc.gather(batch["y"]).tolist() == list(batch.samples) for _ in range(3) for batch in loader]

    assert run_local(2, body) == [[True] * 6] * 2


@pytest.mark.parametrize(
    "other", [BadSample("\u6df1" * 600, 2, "\u5c64" * 300, "\u58de" * 600), ZeroDivisionError("2")]
)
def test_two_ranks_that_see_different_faults_of_one_sample_do_the_same(other):
    def picky(tile, at):
        if at.sample == 2:
            raise other if at.box[0].lo else BadSample("here", 2, "all", "not to my taste")
        return tile

    def body():
        field, mesh = Field(store(samples=4), values=[picky]), hc.Mesh(depth=2)
        loader = Loader({"x": field}, mesh, cut={"D": "depth"}, shuffle=False, on_bad_sample="skip")
        return [batch.samples for batch in loader]

    found = [found for found, _ in run_local(2, told(body), deadline=5)]
    if isinstance(other, BadSample):
        assert found == [[(0,), (1,), (3,)]] * 2
    else:
        assert all(isinstance(each, (DataError, ZeroDivisionError)) for each in found)
