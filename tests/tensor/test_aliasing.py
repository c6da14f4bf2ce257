"""A result shares memory with its operand exactly where it does on one rank, for every layout and every cut."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

#: Functions that view, copy, or do either as strides allow; and writes after each.
CALLS = """
x.contiguous() | x.clone() | x.reshape(x.shape) | x.reshape(-1) | x.flatten() | x.flatten(1) | x.flatten(2) | x.ravel()
x.view_as(x) | x.to(x.dtype) | x.double() | x.type_as(x) | x.float() | x.detach() | x.data | x.detach().contiguous()
x.expand(x.shape) | x.transpose(2, 3) | x.permute(0, 2, 3, 1) | x.transpose(2, 3).contiguous() | x.squeeze(0)
x.unsqueeze(0) | x.movedim(1, 2) | x.mT | x.real | x.conj() | x.positive() | x.resolve_conj() | torch.atleast_3d(x)
x.roll(0, 2) | x.roll(1, 2) | x.roll(0, 3) | x.flip(2) | x.flip(()) | x.repeat(1, 1, 1, 1) | x.tile((1,))
x.rot90(0, (2, 3)) | torch.cat([x], 2)
x.repeat_interleave(1, 1) | F.pixel_shuffle(x, 1) | F.pixel_unshuffle(x, 1) | F.channel_shuffle(x, 1)
F.pad(x, (0, 0)) | F.pad(x, (0, 0, -1, -1)) | F.interpolate(x, scale_factor=1) | F.max_pool2d(x, 1) | torch.stack([x])
F.interpolate(x, scale_factor=1, mode="bilinear") | F.adaptive_avg_pool2d(x, (None, None)) | torch.vstack([x])
torch.chunk(x, 1)[0] | x.split(4, 2)[0] | x.chunk(2, 2)[1] | x.chunk(2, 1)[1] | x.unbind(1)[0] | x.unbind(2)[0]
x[:] | x[...] | x[:, :, :4] | x[:, :, 2:6] | x[:, :, 4:] | x[:, :, ::2] | x[:, 1] | x[:, :, 3] | x[:, :, :, 2] | x[0]
x[:, :, 5, 2] | x[None] | x[:, :, [0, 1]] | x[:, [0, 1]] | x.narrow(2, 0, 8) | x.narrow(2, 1, 4) | x.select(2, 3)
x.index_select(2, torch.arange(8)) | x + 0 | x * 1 | x.nan_to_num() | F.dropout(x, 0.0) | F.dropout(x, 0.5, False)
nn.Identity()(x) | F.relu(x, inplace=True) | F.layer_norm(x, (6,)) | x.unfold(2, 2, 2) | x.unflatten(1, (2, 2))
x.diagonal(0, 2, 3) | torch.broadcast_tensors(x, x)[0] | x.to(memory_format=torch.channels_last) | x.cumsum(2)
x.contiguous(memory_format=torch.channels_last) | torch.einsum("bchw->bhwc", x) | x @ torch.eye(6).double()
x.permute(0, 2, 3, 1).reshape(-1, 4) | x.permute(0, 2, 3, 1).flatten(1, 2) | x.transpose(1, 2).reshape(1, 8, 24)
x.reshape(4, 8, 6) | x.reshape(1, 32, 6) | F.fold(F.unfold(x, 1), (8, 6), 1) | torch.zeros_like(x).copy_(x)
"""
WRITES = {"to the result": "y.mul_(2)", "to the operand": "root.mul_(2)", "to a part": "y[..., :1] += 1"}
LAYOUTS = ("contiguous", "channels last", "crop from the left", "crop from the middle", "transposed")


def calls() -> list[str]:
    return [call.strip() for line in CALLS.strip().splitlines() for call in line.split("|")]


def operand(layout: str, cut: dict[int, str], mesh: hc.Mesh | None) -> tuple[Tensor, Tensor]:
    """The tensor that was cut, and the view of it that is called x."""
    sizes = {"crop from the left": (12, 6), "crop from the middle": (12, 6), "transposed": (6, 8)}.get(layout, (8, 6))
    root = torch.randn(1, 4, *sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if layout == "channels last":
        root = root.contiguous(memory_format=torch.channels_last)
    if mesh is not None:
        placed = {{2: 3, 3: 2}.get(dim, dim): axis for dim, axis in cut.items()} if layout == "transposed" else cut
        root = hc.shard(root, mesh, placed, points={2: (0, 5, 12)} if sizes[0] == 12 and 2 in cut else None)
    if layout == "transposed":
        return root, root.transpose(2, 3)
    start = {"crop from the left": 0, "crop from the middle": 2}.get(layout)
    return root, root if start is None else root[:, :, start : start + 8]


def after(call: str, write: str, layout: str, cut: dict[int, str], mesh: hc.Mesh | None) -> list[Tensor]:
    """All three tensors after the write."""
    root, x = operand(layout, cut, mesh)
    names = {"torch": torch, "F": F, "nn": nn, "x": x, "root": root}
    names["y"] = eval(call, names)
    exec(write, names)
    return [hc.gather(value.detach()).clone() for value in (root, x, names["y"])]


def verdict(call: str, write: str, layout: str, cut: dict[int, str]) -> str:
    try:
        true = after(call, write, layout, cut, None)
    except RuntimeError:  # torch refuses it on one rank
        return "impossible"

    def on_rank() -> list[Tensor] | None:
        try:
            return after(call, write, layout, cut, hc.Mesh(a=2))
        except hc.HaloclineError:
            return None

    ranks = run_local(2, on_rank)
    if any(rank is None for rank in ranks):
        return "refused" if all(rank is None for rank in ranks) else "refused on one rank"
    errors = [relative_error(a, b) for rank in ranks for a, b in zip(rank or (), true, strict=True)]
    return "right" if max(errors) < 1e-12 else f"wrong: {errors}"


def test_one_write() -> None:
    """Every call once; layouts, cuts and writes by turns."""
    choices = list(product(WRITES.values(), ({2: "a"}, {1: "a"}, {3: "a"}), LAYOUTS))
    tried = [(call, *choices[7 * number % len(choices)]) for number, call in enumerate(calls())]
    answers = {(call, write, layout, *cut): verdict(call, write, layout, cut) for call, write, cut, layout in tried}
    assert not {case: answer for case, answer in answers.items() if answer.startswith(("wrong", "refused on"))}
    assert sum(answer == "right" for answer in answers.values()) > 0.8 * len(answers)


@pytest.mark.trial
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_write(layout: str) -> None:
    tried = list(product(calls(), WRITES.values(), ({2: "a"}, {1: "a"}, {3: "a"})))
    answers = {(call, write, *cut): verdict(call, write, layout, cut) for call, write, cut in tried}
    assert not {case: answer for case, answer in answers.items() if answer.startswith(("wrong", "refused on"))}


def moved_rows(mesh: hc.Mesh | None, mode: type[torch.no_grad] | type[torch.inference_mode]) -> list[Tensor]:
    """Rows that moved: written to, with a base that lives on or not, and read after other memory was written."""
    _, x = operand("contiguous", {2: "a"}, mesh)
    with mode():
        y = x * 2
        y[:, :, 0].mul_(3)
        row = y[:, :, 1]
        F.relu(row, True)
        row[:, 0] = 4
        for number, part in enumerate(y.unbind(2)):
            part.mul_(number)
        temporary = (x * 2)[:, :, 0]
        temporary.mul_(2)
        kept = [(x + number)[:, :, 3] for number in range(4)]
        for _ in range(8):  # in the memory of those bases, perhaps
            (x * 3).relu_()
        return [y, temporary, *kept]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_that_moved(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    true = moved_rows(None, mode)
    for rank in run_local(2, lambda: [hc.gather(value) for value in moved_rows(hc.Mesh(a=2), mode)]):
        assert all(torch.equal(a, b) for a, b in zip(rank, true, strict=True))


def overlapping(mesh: hc.Mesh) -> Tensor:
    _, x = operand("contiguous", {2: "a"}, mesh)
    y = x * 2
    one, other = y[:, 1:, 3], y[:, :2, 3]
    one.mul_(2)
    return other * 1


def test_a_row_is_not_used_after_a_write_to_another_copy_of_it() -> None:
    def on_rank() -> None:
        with pytest.raises(hc.Refused, match="its base was changed in place"):
            overlapping(hc.Mesh(a=2))

    run_local(2, on_rank)


@pytest.mark.parametrize("used", ["root", "before", "after"])
def test_what_may_show_a_write_is_not_used_after_it(used: str) -> None:
    """With channels last, torch alone knows whether this reshape is a view."""

    def on_rank() -> None:
        root, _ = operand("channels last", {2: "a"}, hc.Mesh(a=2))
        before = root[:, :2]
        flat = root.permute(0, 2, 3, 1).unsqueeze(0).reshape(-1, 4)
        after = root.permute(0, 2, 3, 1)
        flat.mul_(2)
        with pytest.raises(hc.Refused, match="the memory formats torch chooses"):
            hc.gather({"root": root, "before": before, "after": after}[used])

    run_local(2, on_rank)
