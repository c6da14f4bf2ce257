"""Views, slices, joins and whole-axis functions on cut tensors against one rank; and views that must not lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranges import often
from torch import Tensor

import halocline as hc
from halocline.errors import Refused
from halocline.rules.families.reshape import groups
from halocline.testing.compare import Comparison, check_rule
from halocline.world import Mesh, run_local

SETUPS = often(7)
MESHES = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 5}, {"data": 2, "a": 2}, {"data": 2, "a": 3}, {"a": 1}]

VIEWS = """
x.permute(order)
x.permute(*order)
torch.permute(input=x, dims=order)
x.transpose(d, e)
torch.transpose(x, dim0=d, dim1=e)
x.swapaxes(d, e)
torch.swapdims(x, d, e)
x.movedim(d, e)
torch.moveaxis(x, dims, [-1 - i for i in range(len(dims))])
x.mT
x.mH
x.adjoint()
x.squeeze()
x.squeeze(d)
torch.squeeze(x, dim=dims)
x.unsqueeze(d)
torch.unsqueeze(x, -1)
x.expand(2, *stretched)
x.expand([-1 if size != 1 else 3 for size in shape])
torch.broadcast_to(x, stretched)
x.expand_as(torch.zeros(stretched))
x.view(remade)
x.view(*remade)
x.view(size=remade)
x.view_as(torch.zeros(remade))
x.unflatten(d, (-1, part))
x.flatten(f)
torch.flatten(x, f, -1)
x.reshape(remade)
x.reshape(-1, remade[-1])
torch.reshape(x, shape=remade)
x.reshape_as(torch.zeros(remade))
x.ravel()
x.contiguous().view(*shape[:f], -1)
x[index]
x[number]
x[f:, None]
x[..., ::2]
x[..., -1]
x.narrow(d, low, high - low)
torch.narrow(x, d, low, 1)
x.select(d, low)
torch.select(x, dim=d, index=-1)
x.split(k, d)
torch.split(x, [low, high - low, size - high], dim=d)
x.split_with_sizes([low, size - low], dim=d)
x.chunk(k, dim=d)
torch.chunk(x, k, d)
x.tensor_split(k, dim=d)
torch.tensor_split(x, (high, low), d)
x.unbind(d)
torch.unbind(x, dim=d)
list(x)
x.unfold(d, k, 2)
torch.atleast_3d(x)
"""

MOVED = """
x.flip(dims)
torch.flip(x, dims=dims)
x.flip(*dims)
torch.flipud(x)
x.fliplr()
x.roll(number, d)
torch.roll(x, shifts=[number + i for i in range(len(dims))], dims=dims)
torch.roll(x, -number)
x.repeat(2, *[1 + i % 2 for i in range(len(shape))])
x.repeat([k] * len(shape))
torch.tile(x, (2, 1))
x.repeat_interleave(k, dim=d)
torch.repeat_interleave(x, 2)
torch.stack([x, x * 2], d)
torch.cat([x, x * 2, x[:1]])
torch.cat((x, x.narrow(d, low, high - low)), dim=d)
torch.concat([x, x], axis=d)
torch.hstack((x, x))
torch.vstack([x, x])
torch.dstack([x, x])
x.index_select(d, torch.tensor([0, size - 1, 0]))
torch.gather(x, d, torch.zeros(shape, dtype=torch.long))
torch.diff(x, dim=d)
torch.diff(x, 2, d, prepend=x)
F.pixel_shuffle(x, 2)
F.pixel_unshuffle(x, 2)
torch.broadcast_tensors(x, torch.zeros(stretched))
"""

WHOLE_AXIS = """
x.softmax(d)
F.softmax(x, dim=d)
torch.softmax(x, d, dtype=torch.float64)
torch.log_softmax(x, dim=d)
F.log_softmax(x, d, dtype=torch.float64)
F.softmin(x, d)
torch.special.softmax(x, d)
x.cumsum(d)
torch.cumsum(x, axis=d)
torch.cumprod(x, dim=d)
x.logcumsumexp(d)
torch.cummax(x, d).values
x.sort(d)
torch.sort(x, dim=d, descending=True, stable=True).values
x.argsort(d)
torch.topk(x, low + 1, d).values
F.glu(x, d)
F.channel_shuffle(x, 2)
F.local_response_norm(x, 3)
"""


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def random_shape(random: Random) -> tuple[int, ...]:
    sizes = (1, 2, 3, 4, 4, 6, 8)
    return tuple(random.choice(sizes) for _ in range(random.randint(1, 4)))


def remade(random: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dims merged and split again, so that some cuts stay on a boundary and some do not."""
    sizes = list(shape)
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(sizes))
        if random.random() < 0.5 and place + 1 < len(sizes):
            sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        else:
            factor = random.choice([f for f in range(1, sizes[place] + 1) if sizes[place] % f == 0])
            sizes[place : place + 1] = [factor, sizes[place] // factor]
    return tuple(sizes)


def random_index(random: Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    items: list[Any] = []
    for size in shape:
        ends = [random.choice([None, random.randint(-size - 1, size + 1)]) for _ in range(2)]
        items.append(random.choice([random.randint(-size, size - 1), slice(*ends, random.choice([None, 1, 2, 3]))]))
    if random.random() < 0.4:
        first = random.randint(0, len(items))
        items[first : random.randint(first, len(items))] = [Ellipsis]
    if random.random() < 0.4:
        items.insert(random.randint(0, len(items)), None)
    return tuple(items)


def arguments(random: Random, shape: tuple[int, ...]) -> dict[str, Any]:
    """What the calls above speak of."""
    ndim = len(shape)
    d = random.randint(-ndim, ndim - 1)
    low, high = sorted(random.randint(0, shape[d] - 1) for _ in range(2))
    return {
        "shape": shape,
        "d": d,
        "e": random.randint(-ndim, ndim - 1),
        "f": random.randrange(ndim),
        "dims": random.sample(range(ndim), random.randint(1, ndim)),
        "order": random.sample(range(ndim), ndim),
        "size": shape[d],
        "low": low,
        "high": high,
        "k": random.randint(1, 3),
        "part": random.choice([p for p in range(1, shape[d] + 1) if shape[d] % p == 0]),
        "number": random.randint(-shape[0], shape[0] - 1),
        "stretched": [size if size != 1 else random.randint(1, 3) for size in shape],
        "remade": remade(random, shape),
        "index": random_index(random, shape),
    }


def random_cut(random: Random, shape: tuple[int, ...], mesh: dict[str, int]) -> tuple[dict[int, str], dict[int, Any]]:
    """As many axes as there are dims, on random dims; cut evenly or anywhere, so that tiles may be empty."""
    dims = random.sample(range(len(shape)), len(shape))
    cut = dict(zip(dims, mesh, strict=False))
    points = {
        dim: (0, *sorted(random.randint(0, shape[dim]) for _ in range(mesh[axis] - 1)), shape[dim])
        for dim, axis in cut.items()
        if random.random() < 0.5
    }
    return cut, points


def evaluated(call: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope = {"torch": torch, "F": F, **names}
    return eval(f"lambda x: {call}", scope)  # type: ignore[no-any-return]


def compare(call: str, random: Random, dtype: torch.dtype, second_order: bool) -> tuple[Comparison, str]:
    shape, mesh = random_shape(random), random.choice(MESHES)
    names = arguments(random, shape)
    cut, points = random_cut(random, shape, mesh)
    generator = torch.Generator().manual_seed(random.randrange(1000))
    x = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    second_order = second_order and len(cut) == len(mesh)  # a gradient that is read by hand must be cut on every axis
    found = check_rule(evaluated(call, names), x, cuts=[cut], points=[points], mesh=mesh, second_order=second_order)
    return found, f"{call} on {names} cut {cut} at {points} over {mesh}, {dtype}: {found}"


@pytest.mark.parametrize("call", lines(VIEWS) + lines(MOVED) + lines(WHOLE_AXIS))
def test_as_on_one_rank(call: str) -> None:
    random, verdicts = Random(call), Counter[str]()
    for setup in range(3 * SETUPS):
        found, words = compare(call, random, torch.float64, second_order=setup % 3 == 0)
        verdicts[found.verdict] += 1
        assert found.verdict in ("exact", "invalid"), words
        if verdicts["exact"] == SETUPS:
            return
    assert verdicts["exact"], f"{call}: torch itself refused all of these set-ups"


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int32, torch.bool])
def test_any_dtype(dtype: torch.dtype) -> None:
    random = Random(str(dtype))
    for call in lines(VIEWS)[::3] + lines(MOVED)[::3]:
        found, words = compare(call, random, dtype, second_order=False)
        assert found.verdict in ("exact", "invalid"), words


def written(call: str, names: dict[str, Any], through_view: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x * 1
        view = evaluated(call, names)(base)
        view = view if isinstance(view, Tensor) else view[-1]
        (view if through_view else base).mul_(2)
        return base, view + 0

    return body


@pytest.mark.parametrize("call", lines(VIEWS))
def test_views_never_lie(call: str) -> None:
    """A write through a view shows in its base, and a write to the base in its view; or it is refused."""
    random = Random(call)
    for setup in range(often(5)):
        shape, mesh = random_shape(random), random.choice(MESHES)
        names = arguments(random, shape)
        cut, points = random_cut(random, shape, mesh)
        body = written(call, names, through_view=setup % 2 == 0)
        found = check_rule(body, torch.randn(shape).double(), cuts=[cut], points=[points], mesh=mesh)
        assert found.verdict != "wrong", f"{call} on {names} cut {cut} at {points} over {mesh}"
        assert found.verdict != "refused" or ".clone()" in found.why


def on_two(function: Callable[[Tensor], Any], shape: tuple[int, ...], dim: int, **mesh: int) -> list[Any]:
    """``function`` on every rank, with a tensor whose ``dim`` is cut over axis a."""
    whole = torch.arange(math.prod(shape)).reshape(shape).double()
    sizes = mesh or {"a": 2}
    return run_local(math.prod(sizes.values()), lambda: function(hc.shard(whole, Mesh(**sizes), {dim: "a"})))


def test_write_to_a_moved_view_is_refused() -> None:
    def body(x: Tensor) -> None:
        for moved in (x.view(8, 3), x.view(8, 3).t(), x.view(8, 3).detach(), x.view(8, 3)[2:]):
            for write in (lambda y: y.add_(1), lambda y: F.relu(y, inplace=True), lambda y: y.mul_(y)):
                with pytest.raises(Refused, match=r"would change a copy.*\.clone\(\)"):
                    write(moved)
            moved.clone().add_(1)

    on_two(body, (4, 6), 1)


def test_view_of_a_changed_base_is_refused() -> None:
    def body(x: Tensor) -> None:
        moved, kept = x.view(8, 3), x.view(8, 3).clone()
        row = x[:, 4]
        moved + 1, row + 1
        x.mul_(2)
        for stale in (moved, row):
            with pytest.raises(Refused, match="base was changed in place"):
                stale + 1
        assert torch.equal(hc.gather(kept) * 2, hc.gather(x.view(8, 3)))

    on_two(body, (4, 6), 1)


def test_whole_copy_is_a_plain_tensor_otherwise() -> None:
    def body(x: Tensor) -> None:
        row = x[2]
        assert type(row + 1) is Tensor and type(F.relu(row)) is Tensor and type(row.clone()) is Tensor
        assert row.tolist() == np.asarray(row).tolist() == [12, 13, 14, 15, 16, 17]
        assert row[1].item() == 13 and [float(v) for v in row] == row.tolist()
        row[1:] += 1
        assert hc.gather(x)[2].tolist() == row.tolist() == [12, 14, 15, 16, 17, 18]
        assert hc.gather(x + row)[0, 0].item() == 12

    on_two(body, (4, 6), 0)


def gathered(function: Callable[[Tensor], Any], shape: tuple[int, ...], cut: dict[int, str], **mesh: int) -> int:
    found = check_rule(function, torch.randn(shape).double(), cuts=[cut], mesh=mesh)
    assert found.verdict == "exact"
    return found.gathered_bytes


def test_flatten_moves_only_what_it_must() -> None:
    """A cut that leads its merge stays; one behind it changes places: half of a tile, with two ranks."""
    cut = {0: "data", 2: "a"}
    kept = run_local(4, lambda: hc.shard(torch.zeros(2, 3, 4, 2, 2), Mesh(data=2, a=2), cut).flatten(1).sharding)
    assert kept[0].dims_by_axis() == {0: "data", 1: "a"}
    moved = check_rule(
        lambda x: x.flatten(1), torch.randn(2, 3, 4, 2, 2).double(), cuts=[cut], mesh={"data": 2, "a": 2}
    )
    assert moved.verdict == "exact" and moved.moved_bytes <= 3 * 2 * 2 * 2 * 8
    assert gathered(lambda x: x.flatten(1), (2, 1, 4, 2, 2), cut, data=2, a=2) == 0
    assert gathered(lambda x: x.view(2, 2, 2, 2, 2, 2), (2, 2, 4, 2, 2), cut, data=2, a=2) == 0
    assert gathered(lambda x: x.reshape(8, 3), (6, 4), {0: "a"}, a=3) == 0  # rows of another length: their rims move


def test_single_index_moves_only_its_row() -> None:
    assert gathered(lambda x: x[:, 5], (3, 8), {1: "a"}, a=4) == 3 * 8
    found = check_rule(lambda x: x[:, 2:7], torch.randn(3, 8).double(), cuts=[{1: "a"}], mesh={"a": 4})
    assert (found.verdict, found.gathered_bytes) == ("exact", 0)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((4, 6), (24,), [((0, 1), (0,))]),
        ((2, 1, 6, 5), (2, 3, 10), [((0,), (0,)), ((2, 3), (1, 2))]),
        ((6, 4), (8, 3), [((0, 1), (0, 1))]),
        ((2, 0, 3), (2, 0), [((0,), (0,)), ((1,), (1,))]),
        ((4, 0), (0,), []),
    ],
)
def test_groups(old: tuple[int, ...], new: tuple[int, ...], expected: list[Any]) -> None:
    assert [tuple(group) for group in groups(old, new)] == expected


REFUSED = """
x.view(torch.int64)
x.narrow(0, torch.tensor(1), 2)
x.repeat_interleave(torch.tensor([1, 2, 1, 2]), dim=0)
x.tensor_split(torch.tensor([1, 2]))
torch.cat([x, x], out=x)
F.one_hot(x.long())
torch.as_strided(x, (2, 2), (1, 1))
"""


@pytest.mark.parametrize("call", lines(REFUSED))
def test_refusals_say_what_to_do(call: str) -> None:
    def body(x: Tensor) -> str:
        with pytest.raises(Refused) as error:
            evaluated(call, {})(x)
        return error.value.remedy

    assert all(on_two(body, (4, 6), 0))


def test_torch_speaks_for_itself_where_a_call_makes_no_sense() -> None:
    def body(x: Tensor) -> None:
        for call in ("x[9]", "x.view(5, 5)", "x.permute(0)", "x.narrow(0, 3, 4)", "x[::-1]", "x.select(2, 0)"):
            with pytest.raises((IndexError, RuntimeError, ValueError)) as error:
                evaluated(call, {})(x)
            assert not isinstance(error.value, Refused)

    on_two(body, (4, 6), 0)
