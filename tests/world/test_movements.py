"""Every movement against its adjoint, and integers bit for bit."""

import pytest
import torch
from torch import Tensor

import halocline as hc
from halocline.geometry import Interval, Partition
from halocline.tensor import Cut, Sharding, recut
from halocline.testing import check_adjoint
from halocline.world import Label, Route, Sum, run_local, scaled

MESHES = [{"a": 2, "b": 2}, {"a": 3, "b": 1}, {"a": 1, "b": 4}, {"a": 2, "b": 3}]
SHAPE = (7, 9)
UNEVEN = {2: (0, 1, 7), 3: (0, 5, 5, 7), 4: (0, 0, 2, 8, 9), 1: None}
DTYPES = [torch.float64, torch.complex128]


def cut(mesh: hc.Mesh, size: int, axis: str) -> Cut:
    points = UNEVEN[mesh.sizes[axis]]
    if points is None or points[-1] != size:
        return Cut(axis, Partition.even(size, mesh.sizes[axis]))
    return Cut(axis, Partition(points))


LAYOUTS = {
    "whole": lambda mesh: (None, None),
    "rows over a": lambda mesh: (cut(mesh, 7, "a"), None),
    "columns over a": lambda mesh: (None, cut(mesh, 9, "a")),
    "rows over b": lambda mesh: (cut(mesh, 7, "b"), None),
    "rows a, columns b": lambda mesh: (cut(mesh, 7, "a"), cut(mesh, 9, "b")),
    "rows b, columns a": lambda mesh: (cut(mesh, 7, "b"), cut(mesh, 9, "a")),
}


def sharding(mesh: hc.Mesh, layout: str) -> Sharding:
    return Sharding(mesh, SHAPE, LAYOUTS[layout](mesh))


def weight(mesh: hc.Mesh, layout: Sharding) -> float:
    """A value whole on some axes counts once, not once a rank of them."""
    return 1.0 / mesh.count(set(mesh.names) - layout.axes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_recuts_are_adjoint(mesh: dict[str, int], dtype: torch.dtype) -> None:
    """All pairs of layouts: halo-like moves, gathers, whole to cut, and shuffles between axes and dims."""
    for old in LAYOUTS:
        for new in LAYOUTS:

            def body(old=old, new=new):
                layout = hc.Mesh(**mesh)
                before, after = sharding(layout, old), sharding(layout, new)
                whole = torch.randn(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(1))
                x = whole[tuple(slice(i.lo, i.hi) for i in before.box)].clone().requires_grad_()
                moved = recut(before, after)(x, Label("recut", "test"))
                assert torch.equal(moved, whole[tuple(slice(i.lo, i.hi) for i in after.box)])
                y = torch.randn(moved.shape, dtype=dtype, generator=torch.Generator().manual_seed(2 + layout.rank))
                (pulled,) = torch.autograd.grad(moved, x, y, allow_unused=True)
                pulled = torch.zeros_like(x) if pulled is None else pulled
                forward = (moved.detach() * y.conj()).sum().real.item() * weight(layout, after)
                adjoint = (x.detach() * pulled.conj()).sum().real.item() * weight(layout, before)
                return forward, adjoint

            products = run_local(mesh["a"] * mesh["b"], body)
            forward, adjoint = (sum(p[k] for p in products) for k in (0, 1))
            assert forward == pytest.approx(adjoint, rel=1e-12, abs=1e-12), (old, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_sum_and_scale_are_adjoint(ranks: int, dtype: torch.dtype) -> None:
    def total(mesh: hc.Mesh, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x, Route(mesh.world, tuple(range(ranks)), Label("sum", "test")), (1.0, 1.0 / ranks))

    def enter(mesh: hc.Mesh, x: torch.Tensor) -> torch.Tensor:
        return scaled((1.0, float(ranks)), x)

    mesh = {"a": ranks}
    assert check_adjoint(total, lambda mesh: (4, 3), mesh, whole_target=True, dtype=dtype) < 1e-12
    assert check_adjoint(enter, lambda mesh: (4, 3), mesh, whole_source=True, dtype=dtype) < 1e-12


def test_check_adjoint_notices_a_wrong_factor() -> None:
    def forgetful(mesh: hc.Mesh, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x, Route(mesh.world, (0, 1), Label("sum", "test")), (1.0, 1.0))

    assert check_adjoint(forgetful, lambda mesh: (4,), {"a": 2}, whole_target=True) > 0.1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16], ids=str)
def test_other_dtypes_travel_bit_for_bit(dtype: torch.dtype) -> None:
    whole = (torch.arange(63).view(SHAPE) % 2 if dtype == torch.bool else torch.arange(63).view(SHAPE)).to(dtype)

    def body():
        mesh = hc.Mesh(a=2, b=2)
        x = hc.shard(whole, mesh, {0: "a", 1: "b"}, points={0: [0, 1, 7]})
        return hc.gather(hc.reshard(x, {0: "b"}))

    assert all(torch.equal(found, whole) for found in run_local(4, body))


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8])
def test_sums_have_the_same_bits_on_every_rank(ranks: int) -> None:
    def body():
        mesh = hc.Mesh(a=ranks)
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(mesh.rank)) * 10**mesh.rank
        everyone = tuple(range(ranks))
        return (
            mesh.world.sum(mine, everyone, Label("sum", "test")),
            mesh.world.maximum(mine, everyone, Label("max", "test")),
            mesh.world.broadcast(mine, everyone, Label("broadcast", "test")),
            mine,
        )

    found = run_local(ranks, body)
    parts = torch.stack([f[3] for f in found])
    for total, largest, first, _ in found:
        assert torch.equal(total, found[0][0]) and torch.equal(largest, parts.amax(0)) and torch.equal(first, parts[0])
    torch.testing.assert_close(found[0][0].double(), parts.double().sum(0), rtol=1e-5, atol=1e-2)


def test_only_what_is_needed_moves() -> None:
    """A 3-wide convolution asks each neighbour for one row, forth and, in backward, back."""

    def body():
        mesh = hc.Mesh(a=4)
        x = hc.shard(torch.zeros(1, 2, 16, 5, dtype=torch.float64), mesh, {2: "a"})
        mesh.world.traffic.clear()
        x.requires_grad_()
        torch.nn.functional.conv2d(x, torch.zeros(1, 2, 3, 3, dtype=torch.float64), padding=1)
        return mesh.world.traffic.moved_bytes, mesh.world.traffic.messages

    row = 2 * 5 * 8
    assert run_local(4, body) == [(row, 1), (2 * row, 2), (2 * row, 2), (row, 1)]


def test_interval_arithmetic_reads_well() -> None:
    assert Interval(0, 4).intersect(Interval(6, 9)).empty
    assert Partition.even(10, 3).points == (0, 4, 7, 10)
    assert Partition.even(2, 4).points == (0, 1, 2, 2, 2)
    assert Partition.weighted(10, [2, 1, 1]).points == (0, 5, 8, 10)


def test_operands_that_move_together_share_their_messages() -> None:
    """Two operands are re-cut for one sum: one message each way and rank, forward and backward."""

    def on_rank() -> tuple[int, int, Tensor]:
        mesh = hc.Mesh(a=2)
        x, y, z = (torch.arange(8.0, dtype=torch.float64).requires_grad_() for _ in range(3))
        cut = [hc.shard(t, mesh, {0: "a"}, points={0: (0, at, 8)}) for t, at in ((x, 4), (y, 3), (z, 6))]
        before = mesh.world.traffic.messages
        total = torch.addcmul(*cut)
        forward = mesh.world.traffic.messages - before
        total.square().sum().backward()
        assert all(t.grad is not None for t in (x, y, z))
        return forward, mesh.world.traffic.messages, torch.stack([t.grad for t in (x, y, z) if t.grad is not None])

    x, y, z = (torch.arange(8.0, dtype=torch.float64).requires_grad_() for _ in range(3))
    torch.addcmul(x, y, z).square().sum().backward()
    true = torch.stack([t.grad for t in (x, y, z) if t.grad is not None])
    for forward, _, gradients in run_local(2, on_rank):
        assert forward == 1
        assert torch.equal(gradients, true)
