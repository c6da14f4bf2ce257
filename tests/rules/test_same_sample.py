"""hc.shard notices ranks that bring different samples, whatever the difference, and all ranks refuse alike."""

from collections.abc import Callable

import pytest
import torch

import halocline as hc
from halocline.rules.same_sample import fingerprint
from halocline.testing import shared_pool
from halocline.world import run_local


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(seed))


def one_element(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1, 2, 7, 3] += 1e-6
    return y


def two_swapped(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0, 0, 0, 0], y[0, 0, 0, 1] = x[0, 0, 0, 1], x[0, 0, 0, 0]
    return y


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another sample": lambda x: sample(1),
    "flipped in the last dim": lambda x: x.flip(-1),
    "flipped in another dim": lambda x: x.flip(2),
    "batch in another order": lambda x: x.flip(0),
    "one element": one_element,
    "two elements swapped": two_swapped,
    "another dtype": lambda x: x.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_is_refused_by_all_ranks(change: str) -> None:
    def body() -> str:
        mesh = hc.Mesh(height=2)
        x = sample() if mesh.rank == 0 else CHANGES[change](sample())
        with pytest.raises(hc.Refused) as caught:
            hc.shard(x, mesh, {2: "height"})
        return str(caught.value)

    for text in run_local(2, body):
        assert all(word in text for word in ("shard in ", "use_distributed_sampler=False", "seed", "hc.from_tile"))


def test_layout_and_place_in_memory_make_no_difference() -> None:
    x = sample()
    assert fingerprint(x) == fingerprint(x.contiguous(memory_format=torch.channels_last)) == fingerprint(x[:])
    assert fingerprint(x.to(torch.complex64)) == fingerprint(x.to(torch.complex64).conj().conj())
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.int64, torch.complex128):
        assert fingerprint(x.to(dtype)) == fingerprint(x.to(dtype).clone())
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
    assert fingerprint(torch.empty(0, 3)) != fingerprint(torch.empty(3, 0))


def bring(seeds: list[int], dims: dict[int, str]) -> str:
    mesh = hc.Mesh(data=2, height=2)
    try:
        hc.shard(sample(seeds[mesh.rank]), mesh, dims)
    except hc.Refused:
        return "refused"
    return "cut"


@pytest.mark.long
def test_replicas_may_bring_their_own_unless_the_batch_is_cut() -> None:
    pool, both = shared_pool(4), {0: "data", 2: "height"}
    assert pool.run(bring, [0, 0, 1, 1], {2: "height"}) == ["cut"] * 4
    assert pool.run(bring, [0, 0, 0, 1], {2: "height"}) == ["cut", "cut", "refused", "refused"]
    assert pool.run(bring, [0, 0, 0, 0], both) == ["cut"] * 4
    assert pool.run(bring, [0, 0, 1, 1], both) == ["refused"] * 4


def test_first_calls_are_compared_and_then_some() -> None:
    def body() -> tuple[int, int, int]:
        mesh = hc.Mesh(height=2)
        traffic, x = mesh.world.traffic, sample()
        for _ in range(64):
            hc.shard(x, mesh, {2: "height"})
        first, traffic.messages = traffic.messages, 0
        for _ in range(61):
            hc.shard(x, mesh, {2: "height"})
        later, traffic.messages = traffic.messages, 0
        for check in (False, False, True):
            hc.shard(x, mesh, {2: "height"}, check=check)
        return first, later, traffic.messages

    assert run_local(2, body) == [(64, 1, 1)] * 2


def test_unequal_tensors_can_be_cut_on_request() -> None:
    def body() -> None:
        mesh = hc.Mesh(height=2)
        hc.shard(sample(mesh.rank), mesh, {2: "height"}, check=False)

    run_local(2, body)


@pytest.mark.gpu
def test_devices_have_the_same_fingerprint() -> None:
    x = sample()
    assert fingerprint(x) == fingerprint(x.cuda())
