"""Elements by positions held in tensors: read, written, scattered and counted as on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from layouts import compared, evaluated, lines, number
from torch import Tensor

import halocline as hc
from halocline.rules.families.subscript import is_mask
from halocline.testing.compare import check_rule
from halocline.world import Mesh, run_local

GENERATOR = torch.Generator().manual_seed(2)
NAMES = {
    "np": np,
    "i": torch.tensor([3, 0, -1]),
    "j": torch.tensor([[0, 4], [2, 2]]),
    "few": torch.tensor([True, False, True, True]),
    "plane": torch.rand(4, 6, generator=GENERATOR) > 0.5,
    "all_of": torch.rand(4, 6, 5, generator=GENERATOR) > 0.3,
    "down": torch.randint(0, 4, (3, 6, 4), generator=GENERATOR),
    "along": torch.randint(0, 6, (4, 5, 5), generator=GENERATOR),
    "across": torch.randint(0, 5, (4, 6, 5), generator=GENERATOR),
}

READ = """
x[i]
x[:, [1, 2, 5]]
x[..., [0, 1]]
x[[0, 2], [1, 1], [4, 0]]
x[i, :, i]
x[0, :, i]
x[:, j, j]
x[:, None, 2, i]
x[1:, ::2, i]
x[j[:, :1], 1:5]
x[np.array([0, 3]), np.int64(2)]
x[range(2)]
x[torch.tensor(1)]
x[: torch.tensor(2), torch.tensor(-1)]
x[few]
x[few, :, i]
x[:, [True, False, True, True, False, True]]
x[plane]
x[all_of]
x[True, ..., -1]
x[:, []]
x.masked_select(all_of)
x.take(j)
x.take_along_dim(across[:, :, :1], 2)
torch.take_along_dim(x, along[:1], dim=1)
x.take_along_dim(across)
x[(x[:, 0, 0] > 9).long()]
x[:, x.argmax(1)[0]]
x[y[:, 0, 0].abs().long(), 2]
y[:, 0][x.detach().abs().long() % 4] * x.mean()
torch.arange(27.0).double().reshape(9, 3)[x.detach().long() % 9] * x.mean()
"""

#: What is written into ``z``, a copy of x.
WRITTEN = """
z[0] = 1.5
z[1, 2, 3] = y.sum()
z[1:3] = y[0]
z[:, 2] = y[0, 0]
z[..., 1::2] = y[0, :, :2]
z[::2, None, 1:5] = y[:2, None, :4]
z[1:] = y[1:]
z[-1, 2:4] = y[1, 2:4] * 2
z[:, :, 3] = y.sum()
z[2:2] = y[0]
z[:3] = y[:1]
z[1] = z[0]
z[:, 1:] += y[:, :5]
z[i] = y[:3]
z[:, i] = y[:1, :3]
z[i, i] = y[:3, 0]
z[i, :, i] = y[:3, :, 0]
z[0, :, i] = y[0, :, :3]
z[2, i] = y[0, 0]
z[j[:, :1], i] = y[:2, :3]
z[..., i] = 7
z[plane] = 0.0
z[plane] = y[0, 0]
z[plane] = y.sum()
z[:, plane[0]] = y[:, :1]
z[plane] = y.flatten()[: int(plane.sum()) * 5].reshape(-1, 5)
z[all_of] = 3
z[z > 0] = 0
z[z[..., 0] > 0] = y[0, 0]
z[y > 0] = y.mean()
z.index_put_((i,), y[:3])
z.index_put_((i, torch.tensor([0, 0, 0])), y[:3, 0], True)
z.index_fill_(1, i, 2.0)
z.index_copy_(0, torch.tensor([1, 3, 0]), y[:3])
z.index_add_(1, torch.tensor([2, 0, 2]), y[:, :3], alpha=2)
z.copy_(y[:1])
z.scatter_(2, across, y)
z.scatter_add_(1, along, y[:, :5])
z.real[0] = y[0]
"""

MADE = """
x.index_put((i,), y[:3])
x.index_fill(2, i, 0.5)
x.index_copy(1, i.abs(), y[:, :3])
torch.index_add(x, 0, torch.tensor([2, 0, 2]), y[:3])
x.index_add(2, torch.tensor([2, 0, 2]), y[..., :3])
x.select_scatter(y[0], 0, 2)
torch.slice_scatter(x, y[1:], 0, 1)
torch.slice_scatter(x, y[:, :3], dim=1, step=2)
x.scatter(0, down, y[:3, :, :4])
torch.scatter(x, 1, along, y[:, :5])
x.scatter(2, across, 1.5)
x.scatter(dim=1, index=along, value=2.0)
x.scatter_add(0, down, y[:3, :, :4])
x.scatter_reduce(1, along, y[:, :5], "sum")
x.scatter_reduce(2, across, y, "mean", include_self=False)
torch.zeros(4, 6, 5).double().scatter_add(1, along, x[:, :5])
torch.zeros(9, 6, 5).double().index_add(0, i.abs(), x[1:])
torch.zeros(6).double().scatter_add(0, across.flatten(), x.flatten())
torch.zeros(6).double().scatter_add_(0, across.flatten(), x.flatten())
torch.zeros(6).double().index_add_(0, torch.tensor([0, 1, 5, 5]), x.sum((1, 2)), alpha=3)
"""

COUNTED = """
torch.histc(x.detach(), 7)
x.detach().histc(5, -1, 1)
torch.histc(torch.zeros_like(x), 3)
torch.bincount(across.flatten(), x.detach().flatten())
torch.bincount((x.detach()[:, 0, 0] * 3).abs().long())
torch.bincount(x.detach().abs().long().flatten(), minlength=9)
"""


def write(line: str) -> Callable[[Tensor, Tensor], Tensor]:
    def body(x: Tensor, y: Tensor) -> Tensor:
        scope = {**NAMES, "torch": torch, "z": x * 2, "y": y}
        exec(line, scope)
        return scope["z"]  # type: ignore[return-value]

    return body


@pytest.mark.parametrize("call", lines(READ) + lines(MADE))
def test_read(call: str) -> None:
    compared(call, evaluated(call, **NAMES), number(4, 6, 5), number(4, 6, 5, seed=1))


@pytest.mark.parametrize("line", lines(WRITTEN))
def test_written(line: str) -> None:
    compared(line, write(line), number(4, 6, 5), number(4, 6, 5, seed=1))


@pytest.mark.parametrize("call", lines(COUNTED))
def test_counted(call: str) -> None:
    for found in compared(call, evaluated(call, **NAMES), number(4, 6, 5), second_order=False):
        assert found.gathered_bytes == 0 or "bincount" in call


def random_index(random: Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Numbers, slices, positions and masks in any order, with new dims and an ellipsis."""
    index: list[Any] = []
    chosen = (random.choice((1, 2, 3)), 2)
    while sum(i.ndim if is_mask(i) else 1 for i in index) < len(shape):
        place = sum(i.ndim if is_mask(i) else 1 for i in index)
        size, generator = shape[place], torch.Generator().manual_seed(random.randrange(999))
        ends = [random.choice([None, random.randint(-size, size)]) for _ in range(2)]
        kinds: list[Any] = [slice(None), slice(*ends, random.choice([None, 2])), random.randint(-size, size - 1)]
        kinds += [torch.randint(-size, size, random.choice([chosen, (2,), (1, 1)]), generator=generator)] * 2
        kinds += [torch.rand(shape[place : place + random.randint(1, 2)], generator=generator) > 0.4]
        index.append(random.choice(kinds))
    if random.random() < 0.3:
        index.insert(random.randint(0, len(index)), None)
    if random.random() < 0.3:
        index[random.randint(0, len(index)) :] = [Ellipsis]
    return tuple(index)


@pytest.mark.parametrize("seed", range(40))
def test_any_index(seed: int) -> None:
    """Read and written at random. Where two values go to one place, torch itself does not say which stays."""
    random = Random(seed)
    shape = tuple(random.choice((1, 2, 4, 6)) for _ in range(random.randint(1, 4)))
    index, mesh = random_index(random, shape), random.choice(({"a": 2}, {"a": 3}, {"a": 2, "b": 2}))
    cut = dict(zip(random.sample(range(len(shape)), len(shape)), mesh, strict=False))
    places = torch.arange(math.prod(shape)).reshape(shape)
    try:
        taken = places[index]
    except IndexError:
        return

    def both(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x * 2
        if taken.unique().numel() == taken.numel():
            z[index] = y
        return [x[index], z]

    value = number(*taken.shape[random.randint(0, taken.ndim) :])
    cuts = [cut, {value.ndim - 1: "a"} if value.ndim and seed % 2 else None]
    found = check_rule(both, number(*shape), value, cuts=cuts, mesh=mesh)
    assert found.verdict == "exact", f"{index} of {shape}, {value.shape} cut {cuts} over {mesh}: {found}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex128, torch.bool, torch.float32])
def test_any_dtype(dtype: torch.dtype) -> None:
    """A value takes the dtype of what it is written into, as in torch."""
    kind = {"cuts": [{1: "a"}], "mesh": {"a": 3}, "tolerance": 1e-6}
    for line in ("z[1:3] = 1.7", "z[:, 2] = y[0, 0]", "z[i] = y[:3]", "z[all_of] = 1"):
        scope = {**NAMES, "y": number(4, 6, 5).to(dtype)}

        def body(x: Tensor, line: str = line, scope: dict[str, Any] = scope) -> Tensor:
            here = {**scope, "z": x.clone()}
            exec(line, here)
            return here["z"]

        assert check_rule(body, (3 * number(4, 6, 5)).to(dtype), **kind).verdict == "exact"


def on_two(body: Callable[[Tensor], Any], dim: int = 0) -> list[Any]:
    return run_local(2, lambda: body(hc.shard(number(4, 6, 5), Mesh(a=2), {dim: "a"})))


def test_a_write_shows_in_views_and_stays_in_place() -> None:
    def body(x: Tensor) -> None:
        view, same = x[1:], x
        x[2, 3] = 5.0
        assert same is x
        assert hc.gather(view)[1, 3, 0] == 5.0
        x[2][1] = 7.0  # the row had to move, and is written back
        assert hc.gather(x)[2, 1, 0] == 7.0

    on_two(body)


def test_nothing_of_the_target_moves() -> None:
    def body(x: Tensor) -> int:
        traffic = x.sharding.mesh.world.traffic
        traffic.clear()
        x[1:3, :2] = 2.0
        x[torch.tensor([0, 3, 3])] = x.new_zeros(3, 1, 1)
        x[plane] = 1.0
        return traffic.moved_bytes

    plane = NAMES["plane"]
    assert on_two(body) == [0, 0]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_list_with_slices_is_a_tuple() -> None:
    """As torch reads it, with a warning; MONAI's registration losses index so."""
    found = check_rule(lambda x: x[[slice(1, 3), slice(None), 2]], number(4, 6, 5), cuts=[{1: "a"}], mesh={"a": 2})
    assert found.verdict == "exact", found.why


REFUSED = """
x.__setitem__((slice(0, 2), x[0] > 0), torch.zeros(7).double()) | torch.where
x[0].fill_diagonal_(1.0)                                   | torch.eye
x[False]                                                   | if
x[True, i]                                                 | if
x[[i, i]]                                                  | say which
x.nonzero()                                                | hc.gather
torch.unique(x)                                            | hc.gather
"""


@pytest.mark.parametrize("line", lines(REFUSED))
def test_refusals_say_what_to_do(line: str) -> None:
    call, remedy = (part.strip() for part in line.split("|"))

    def body(x: Tensor) -> str:
        with pytest.raises(hc.Refused) as error:
            evaluated(call, **NAMES)(x)
        return error.value.remedy

    assert all(remedy in found for found in on_two(body, dim=1))


def test_torch_speaks_for_itself_where_a_call_makes_no_sense() -> None:
    def body(x: Tensor) -> None:
        for index, value in [((9,), 0.0), ((i,), x[0, 0, :2]), ((slice(None), 0, 0, 0), 0.0), ((x,), 0.0)]:
            with pytest.raises((IndexError, RuntimeError)) as error:
                x[index] = value
            assert not isinstance(error.value, hc.Refused)
        for wrong in (torch.tensor([4]), torch.tensor([-5])):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                x[wrong] = 0.0
        with pytest.raises(IndexError, match="mask"):
            x[torch.ones(3, dtype=torch.bool)]

    i = NAMES["i"]
    on_two(body)


def _into_zeros(x: Tensor) -> Tensor:
    """As networks write it that make their own output: a whole target."""
    out = torch.zeros(4, 6, 5, dtype=x.dtype)
    out[1:3, :, 2:] = x[:2, :, :3]
    out[x > 1] = 7.0
    return out * 2


@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 3}])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_whole_target_takes_in_the_gathered_value(dim: int, mesh: dict[str, int]) -> None:
    x = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = check_rule(_into_zeros, x, cuts=[{dim: "a"}], mesh=mesh, second_order=True)
    assert found.verdict == "exact", found
    assert found.gathered_bytes > 0
