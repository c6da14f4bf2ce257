"""Strangers at the ports of ranks: garbage, silence, floods and forged peers change no number and end no run."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from strangers import KINDS, Siege, stranger
from torch import nn

import halocline as hc
from benchmarks.chaos_run import listening_ports
from halocline.errors import MeshError
from halocline.testing import shared_pool
from halocline.world import Label
from halocline.world.connection import Connection
from halocline.world.listener import _HELLO, Listener, call, host_and_port
from halocline.world.rendezvous import BoundedStore
from halocline.world.secret import SECRET, SECRET_FILE, Secret, agree_on_secret, find_secret, new_secret
from halocline.world.transport_errors import TransportError

OURS, THEIRS = Secret(b"the secret of this job"), Secret(b"the secret of another job")


def door() -> Listener:
    return Listener("127.0.0.1", OURS, "rank 4")


def look_until(listener: Listener, caller: tuple[int, int], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while caller not in listener.callers and time.monotonic() < end:
        listener.look(0.01)


# ---- the door ----


def test_strangers_are_sent_away_and_counted_and_ranks_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.world.listener._GREETING", 0.05)
    listener = door()
    callers = [stranger(*host_and_port(listener.address, OURS, "rank 4"), kind) for kind in KINDS]
    rank, proof = call(listener.address, OURS, "rank 4", 3, 1, 5.0)
    look_until(listener, (3, 1))
    assert set(listener.callers) == {(3, 1)}
    rank.settimeout(5)
    assert rank.recv(64) == proof
    end = time.monotonic() + 10
    while listener.refused.total() < len(KINDS) and time.monotonic() < end:
        listener.look(0.01)
    assert listener.refused == {"silent": 3, "left": 2, "no proof": 3} or listener.refused.total() == len(KINDS)
    assert not listener._greeting
    for each in (*callers, rank, listener):
        each.close()


def test_another_jobs_rank_is_a_stranger_and_a_greeting_counts_once() -> None:
    listener = door()
    with pytest.raises(ConnectionError, match="not the address of a rank of this job"):
        call(listener.address, THEIRS, "rank 4", 3, 1, 5.0)
    with pytest.raises(ConnectionError, match="not the address of a rank of this job"):
        call(listener.address, OURS, "rank 5", 3, 1, 5.0)  # another rank's address, copied in the store
    place = listener.address.rpartition(" ")[0]
    forged = _HELLO.pack(bytes(16), 3, 1, THEIRS.proof("caller", place, bytes(16).hex(), 3, 1))
    real = _HELLO.pack(bytes(16), 3, 1, OURS.proof("caller", place, bytes(16).hex(), 3, 1))
    for greeting, there in ((forged, False), (real, True), (real, False)):
        with socket.create_connection(host_and_port(listener.address, OURS, "rank 4")) as caller:
            caller.sendall(greeting)
            look_until(listener, (3, 1), 0.2)
            admitted = listener.callers.pop((3, 1), None)
            assert (admitted is not None) == there
            if admitted is not None:
                admitted.close()
    assert listener.refused["no proof"] == 2
    listener.close()


def test_a_flood_of_silent_callers_keeps_no_rank_out() -> None:
    listener = door()
    where = host_and_port(listener.address, OURS, "rank 4")
    flood = [socket.create_connection(where) for _ in range(300)]
    rank, _ = call(listener.address, OURS, "rank 4", 0, 0, 5.0)
    look_until(listener, (0, 0))
    assert (0, 0) in listener.callers and len(listener._greeting) <= 128
    for each in (*flood, rank, listener):
        each.close()


def test_without_descriptors_strangers_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = door()
    silent = stranger(*host_and_port(listener.address, OURS, "rank 4"), "idles")
    listener.look(0.5)
    assert listener._greeting

    class Full:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    real, listener._socket = listener._socket, Full()
    listener._accept()
    assert not listener._greeting and listener.refused["crowd"] == 1
    listener._socket = real
    silent.close()
    listener.close()


# ---- a connection ----


@pytest.mark.parametrize(
    "header",
    [(7, 1 << 62, -1), (7, -1, -1), (7, (1 << 17) + 1, -1), (-2, 1 << 20, -1), (-4, 0, -1), (-9, 0, -1), (7, 8, 0)],
)
def test_a_header_that_no_rank_sends_ends_the_connection(header: tuple[int, int, int]) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    here = Connection(other, 1, largest=1 << 17)
    here.receive(7, memoryview(bytearray(8)))
    one.sendall(struct.pack("<qqq", *header))
    with pytest.raises(TransportError, match=r"connection closed: no rank sends the header|another size"):
        here.pump()
    one.close()


def test_nothing_is_believed_before_the_proof() -> None:
    for came, sound in ((b"p" * 32, True), (b"q" * 32, False)):
        one, other = socket.socketpair(socket.AF_UNIX)
        here, room = Connection(other, 1, proof=b"p" * 32), bytearray(4)
        arrival = here.receive(7, memoryview(room))
        one.sendall(came + struct.pack("<qqq", 7, 4, -1) + b"four")
        if sound:
            here.pump()
            assert arrival.done and room == b"four"
        else:
            with pytest.raises(TransportError, match="does not know the job's secret"):
                here.pump()
            assert not arrival.done and here.closed
        one.close()


# ---- the secret ----


def test_where_the_secret_comes_from(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert find_secret({SECRET: "0123456789abcdef"}) == Secret(b"0123456789abcdef")
    file = tmp_path / "key"
    file.write_text(new_secret())
    file.chmod(0o644)
    with pytest.raises(MeshError, match="chmod 600"):
        find_secret({SECRET_FILE: str(file)})
    file.chmod(0o600)
    assert find_secret({SECRET_FILE: str(file)}) == Secret(file.read_bytes())
    made = find_secret(home)
    assert made is not None and not made.chosen and made == find_secret(home)
    own = tmp_path / ".local/state/halocline/secret"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600 and [*own.parent.iterdir()] == [own]
    assert "secret" not in repr(made).replace("Secret", "") and made.key.decode() not in repr(made)
    assert find_secret({"HOME": "/proc/nowhere"}) is None and find_secret({}) is None
    for wrong in ({SECRET: "short"}, {SECRET_FILE: str(tmp_path / "none")}, {SECRET_FILE: str(tmp_path)}):
        with pytest.raises(MeshError):
            find_secret(wrong)
    own.unlink()
    own.symlink_to(file)
    assert find_secret(home) is None  # a link may lead to a file that others know


@pytest.mark.parametrize(
    ("secrets", "expected"),
    [
        ((new_secret(),) * 2, "same"),
        ((new_secret(), new_secret()), MeshError),
        ((new_secret(), ""), MeshError),
        ((new_secret(), "short"), MeshError),
        (("", ""), None),
    ],
)
def test_ranks_agree_on_a_secret_or_do_without(secrets: tuple[str, str], expected: object) -> None:
    store, answers = BoundedStore(dist.HashStore(), 5.0), {}

    def agree(rank: int) -> None:
        try:
            answers[rank] = agree_on_secret({SECRET: secrets[rank]}, rank, 2, store, "a test")
        except MeshError as error:
            answers[rank] = error

    other = threading.Thread(target=agree, args=(1,))
    other.start()
    with pytest.warns(RuntimeWarning, match="share no secret") if expected is None else nullcontext():
        agree(0)
    other.join(10)
    if expected == "same":
        assert answers == {0: Secret(secrets[0].encode()), 1: Secret(secrets[0].encode())}
    elif expected is None:
        assert answers == {0: None, 1: None}
    else:
        assert all(isinstance(each, MeshError) for each in answers.values())


# ---- ranks ----


def own_ports(world: object) -> list[tuple[str, int]]:
    """Ports of our own sockets, by the addresses that this rank left in the store."""
    return [listener._socket.getsockname()[:2] for listener in world._sockets._listeners]


def train(mesh: hc.Mesh, steps: int) -> list[float]:
    """A few steps of a cut network, whose halos travel on our sockets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1))
    model = hc.distribute(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x = torch.randn(1, 1, 8, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(hc.shard(x, mesh, {2: "depth"})) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def besieged(attack: bool) -> tuple[list[float], int, int]:
    mesh = hc.Mesh(data=1, depth=-1)
    world = mesh.world
    ports = own_ports(world)
    if not attack:
        return train(mesh, 10), 0, 0
    with Siege(ports) as siege:
        twin = world.duplicate()  # ranks meet anew while strangers call
        with Siege(own_ports(twin)):
            everyone = tuple(range(world.size))
            assert twin.sum(torch.ones(2), everyone, Label("sum", "a test")).tolist() == [world.size] * 2
            losses = train(mesh, 10)
        refused = twin._sockets.refused.total()
        twin.close()
    return losses, siege.calls, refused


def test_a_siege_changes_no_bit_of_a_training() -> None:
    pool = shared_pool(2)
    quiet, loud = pool.run(besieged, False), pool.run(besieged, True, deadline=60)
    assert [each[0] for each in quiet] == [each[0] for each in loud]
    assert all(calls > 20 for _, calls, _ in loud)


def ports_of_rank() -> list[tuple[str, int]]:
    hc.Mesh(data=-1).world.duplicate()
    return listening_ports(os.getpid())


def test_local_ranks_listen_on_loopback_only() -> None:
    for ports in shared_pool(2).run(ports_of_rank):
        assert ports and {host for host, _ in ports} == {"127.0.0.1"}


def pose_as_rank_0() -> str:
    """A stranger writes its own address over rank 0's in the store, which is open, and waits for callers."""
    world = hc.Mesh(data=-1).world.duplicate()
    transport, everyone = world._sockets, tuple(range(world.size))
    world.sum(torch.ones(1), everyone, Label("sum", "both are there"))
    with socket.create_server(("127.0.0.1", 0)) as trap:
        name = f"{transport._name}/1/0"
        address = transport._store.get(name).split()
        address[1] = str(trap.getsockname()[1])
        transport._store.set(name, " ".join(address))
        try:
            call(transport._store.get(name), transport._secret, name, 0, 0, 1.0)
        except ConnectionError as error:
            return str(error)
    return "called"


def test_a_forged_address_in_the_store_is_not_called() -> None:
    assert all("not the address of a rank" in text for text in shared_pool(2).run(pose_as_rank_0))
