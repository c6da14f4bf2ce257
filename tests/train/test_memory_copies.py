"""Copies of the state in memory: bit for bit on whatever ranks are left, refused where a piece is gone."""

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from test_checkpoint_layouts import FIRST, SECOND, begun, bits, state, step

from halocline.testing import shared_pool
from halocline.train.checkpoints import CheckpointError
from halocline.train.log import read_log
from halocline.train.memory.client import HolderClient
from halocline.train.memory.copies import StateCopies
from halocline.train.memory.rooms import CopiedPiece, laid_out, read_table, view
from halocline.train.optimizers import load_optimizer

linux = pytest.mark.skipif(sys.platform != "linux", reason="copies in memory need Linux")


@contextlib.contextmanager
def nodes(count):
    """Processes that stand for the launchers of nodes: with each goes what its node has in memory."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


# ---- what a copy is ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_copy_gives_back_every_bit(dtype):
    tensors = [torch.randn(3, 5).to(dtype), torch.randn(()).to(dtype), torch.empty(0, 4, dtype=dtype)]
    name = str(dtype).removeprefix("torch.")
    pieces = [CopiedPiece(str(n), name, tuple(t.shape), tuple((0, s) for s in t.shape)) for n, t in enumerate(tensors)]
    head, placed, size = laid_out(pieces, {"a": [1, None]})
    memory = mmap.mmap(-1, size)
    memory[: len(head)] = head
    for piece, tensor in zip(placed, tensors, strict=True):
        view(memory, piece).copy_(tensor)
    found, tree = read_table(memory)
    assert found == placed and tree == {"a": [1, None]}
    assert all(torch.equal(view(memory, piece), tensor) for piece, tensor in zip(found, tensors, strict=True))


def test_a_table_that_is_damaged_is_an_error():
    memory = mmap.mmap(-1, 8192)
    memory[:8] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(CheckpointError, match="damaged"):
        read_table(memory)


# ---- the process that keeps them ----


@linux
def test_what_is_valid_outlives_the_rank_and_goes_with_the_node(tmp_path):
    with nodes(1) as [node]:
        first, size = HolderClient(tmp_path, 1 << 20, node.pid), 1 << 16
        first.room("7/here/0", size)[:4] = b"data"
        first.room("8/here/0", size)[:4] = b"half"
        first.valid("7/here/0", 7, 42)
        name, first_holder = first._name, first.holder
        first.close(end=False)
        again = HolderClient(tmp_path, 1 << 20, node.pid)
        assert again.rooms() == [("7/here/0", size, 7, 42)] and again.opened("7/here/0")[:4] == b"data"
        assert (again._name, again.holder) == (name, first_holder)
        again.ask(what="forget", step=8, invalid=True)
        assert again.rooms() == []
        with pytest.raises(CheckpointError, match=r"copies\.memory allows 1,048,576"):
            again.room("9/here/0", 1 << 20 | 1)
        with pytest.raises(CheckpointError, match="unknown request 'pickle'"):
            again.ask(what="pickle")
        with pytest.raises(CheckpointError, match="KeyError"):
            again.ask(what="open", key="never")
        node.kill()
        node.wait()
        end = time.monotonic() + 10
        while answers(again) and time.monotonic() < end:
            time.sleep(0.05)
        assert not answers(again)
        again.close(end=False)


def answers(client):
    try:
        return bool(client.ask(what="hello"))
    except CheckpointError as error:
        assert "does not answer" in str(error)  # noqa: PT017
        return False


@linux
def test_garbage_does_not_end_the_holder(tmp_path):
    with nodes(1) as [node]:
        client = HolderClient(tmp_path, 1 << 20, node.pid)
        for data in (
            b"\xff" * 100,
            b"[]",
            b'{"what": "room"}',
            b'{"what": "room", "key": 1, "size": -5}',
            b"[" * 60000,
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(f"\0{client._name}")
                stranger.send(data)
                stranger.settimeout(5)
                stranger.recv(1 << 16)
        assert client.ask(what="hello")["holder"] == client.holder
        client.close(end=True)


# ---- from ranks to other ranks ----


def copied(folder, sizes, layout, parents):
    """Three steps, each copied; returns the state in the end."""
    model, optimizer, mesh = begun(sizes, layout)
    copies = StateCopies(folder, mesh, 1 << 26, 30.0, parents[mesh.rank])
    for number in range(3):
        step(model, optimizer, mesh, number)
        copies.copy(number + 1, state(model, optimizer), {"step": number + 1, "some": [1.5, "text", (2, None)]})
        end = time.monotonic() + 30
        while copies.busy and time.monotonic() < end:
            time.sleep(0.002)
        assert not copies.busy and not copies.failed
    own = bits(model, optimizer)  # by all ranks together, so that all have copied
    copies.close(end=False)
    return own


def restored(folder, sizes, layout, parents, later):
    """The state that comes back, and the losses of three more steps; None if there is none."""
    model, optimizer, mesh = begun(sizes, layout)
    copies = StateCopies(folder, mesh, 1 << 26, 30.0, parents[mesh.rank])
    found = copies.load_latest(state(model, optimizer), later)
    copies.close(end=False)
    if found is None:
        return None
    assert found.step == 3 and found.state == {"step": 3, "some": [1.5, "text", (2, None)]}
    model.load_state_dict(found.tensors["model"])
    load_optimizer(optimizer, found.tensors["optimizer"])
    own = bits(model, optimizer)
    return own, [step(model, optimizer, mesh, number) for number in range(3, 6)]


def one_rank():
    model, optimizer, _ = begun({"data": 1}, {})
    return [step(model, optimizer, None, number) for number in range(6)]


@linux
@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "on", "lost", "new_sizes", "new_on"),
    [
        ({"model": 4}, [0, 1, 2, 3], [3], {"model": 3}, [0, 1, 2]),
        ({"model": 4}, [0, 1, 2, 3], [1], {"model": 4}, [0, 4, 2, 3]),
        ({"data": 2, "model": 2}, [0, 1, 0, 1], [0], {"data": 2, "model": 2}, [4, 1, 4, 1]),
        ({"data": 2, "model": 2}, [0, 0, 1, 1], [1], {"model": 2}, [0, 0]),
        ({"model": 2}, [0, 0], [], {"data": 2, "model": 2}, [0, 0, 0, 0]),
    ],
)
def test_the_state_comes_back_on_the_ranks_that_are_left(tmp_path, sizes, on, lost, new_sizes, new_on):
    with nodes(5) as there:
        pids = [each.pid for each in there]
        ranks, left = len(on), len(new_on)
        true = shared_pool(ranks).run(copied, tmp_path, sizes, FIRST, [pids[n] for n in on], deadline=60.0)[0]
        for index in lost:
            there[index].kill()
            there[index].wait()
        call = (tmp_path, new_sizes, SECOND, [pids[n] for n in new_on])
        assert shared_pool(left).run(restored, *call, 3, deadline=60.0) == [None] * left  # a checkpoint is as new
        wanted = one_rank()[3:]
        for own, losses in shared_pool(left).run(restored, *call, 2, deadline=60.0):
            assert all(torch.equal(a, b) for a, b in zip(own, true, strict=True)) and len(own) == len(true)
            assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-6


@linux
@pytest.mark.long
def test_two_neighbours_lost_at_once_leave_nothing_that_is_whole(tmp_path):
    with nodes(4) as there:
        pids = [each.pid for each in there]
        shared_pool(4).run(copied, tmp_path, {"model": 4}, FIRST, pids, deadline=60.0)
        for each in there[2:]:
            each.kill()
            each.wait()
        assert shared_pool(2).run(restored, tmp_path, {"model": 2}, FIRST, pids[:2], -1, deadline=60.0) == [None] * 2


# ---- in a run ----

CODE = """
import os, signal
from pathlib import Path

class Lost:
    def on_step(self, trainer, step, loss):
        if step == 7 and not Path("mark").exists() and trainer.mesh.rank == 1:
            Path("mark").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
@pytest.mark.long
def test_a_run_comes_back_from_memory_to_the_same_bits(tmp_path):
    (tmp_path / "lost_rank.py").write_text(CODE)
    sets = (
        "network.width=2", "data.arguments.size=16", "data.samples=4", "data.validation=0", "checkpoint_every=0",
        "steps=9", "deadline=30", "gradients.deterministic=true",
    )  # fmt: skip
    told = [word for each in sets for word in ("--set", each)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    base = [
        sys.executable,
        "-m",
        "halocline.cli",
        "train",
        "unet3d",
        "--ranks",
        "2",
        "--restarts",
        "1",
        "--json",
        *told,
    ]
    lost = ["--set", 'callbacks=["lost_rank:Lost"]', "--set", "copies.every=3"]
    for name, more in (("lost", lost), ("whole", [])):
        command = [*base, "--out", name, *more]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=170)
        assert done.returncode == 0, done.stderr.decode()
    restored_at = [entry["step"] for entry in read_log(tmp_path / "lost", "restored")]
    assert restored_at == [6]  # one step of nine was made twice, though no checkpoint was written
    one, other = ([entry["loss"] for entry in read_log(tmp_path / name, "step")] for name in ("lost", "whole"))
    assert one == other and len(one) == 9
    assert json.loads((tmp_path / "lost" / "result.json").read_text())["steps"] == 9


def test_a_run_that_was_started_alone_says_what_is_missing(tmp_path, monkeypatch):
    from halocline.train.memory import copies

    monkeypatch.setattr(copies, "this_rank_info", lambda: None)
    monkeypatch.setattr(copies.sys, "platform", "linux")
    with pytest.raises(CheckpointError, match="give --restarts, or start it with torchrun"):
        copies._check_possible(None)
