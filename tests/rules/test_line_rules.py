"""Functions along a dim, of matrices, of patches, of pairs; and losses: as on one rank, and without gathering."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import compared, evaluated, lines, number
from torch import Tensor

import halocline as hc
from halocline.testing.compare import check_rule
from halocline.world import Mesh, run_local

#: Along cut dims too, these pass one value a tile.
UNGATHERED = """
x.softmax(1)
F.softmax(x, dim=0)
torch.softmax(x, 1, torch.float64)
F.softmax(x, 2, 3, torch.float64)
x.log_softmax(-1)
F.log_softmax(x, 1, dtype=torch.float64)
F.softmin(x, 1)
F.normalize(x)
F.normalize(x, 1, dim=0)
F.cosine_similarity(x, x.exp())
x.cumsum(0)
torch.cumsum(x, 1, dtype=torch.float64)
x.cumprod(1)
torch.cumprod(x, dim=-1)
(x > 0).cumsum(1) * x
x.prod()
x.prod(1)
torch.prod(x, 0, keepdim=True)
x.max(1)
torch.max(x, dim=0, keepdim=True)
x.min(axis=2)
(x * x.argmax(1, keepdim=True))
(x * torch.argmin(x, 0, True))
x.aminmax(dim=1)
torch.aminmax(x)
torch.where(x > 0, x, float("nan")).nanmean(1)
x.nansum(1)
torch.special.logsumexp(x, 1)
torch.std_mean(x, 1)
x.tril()
x.triu(1)
(x * 1).tril_(-1)
torch.special.entr(x.exp()) + torch.special.expit(x) + torch.special.i1(x)
torch.cross(x[:3], 2 * x[1:].exp(), dim=0)
torch.linalg.cross(x[..., :3], 2 * x[..., 2:].exp())
x.rot90()
torch.rot90(x, 2, (1, 2))
torch.rot90(x, 3, (2, 0))
torch.trapezoid(x, dim=1)
torch.cumulative_trapezoid(x, dx=2, dim=1)
torch.trapezoid(x, x.exp().cumsum(1), dim=1)
torch.trapz(x, torch.arange(6.0) ** 2, dim=1)
torch.dist(x, x.exp(), 3)
F.pairwise_distance(x, x.exp())
torch.linalg.vecdot(x, x.exp(), dim=1)
"""

CALLS = """
x.logcumsumexp(1)
x.diagonal()
torch.diagonal(x, 1, 1, 2)
x.diagonal(-2, 2, 0)
x.diag_embed()
x.diag_embed(2, 0, 2)
torch.diag_embed(x, -1, dim1=2, dim2=0)
x[0].diag(1)
x[:, 0, 0].diag(-1)
torch.diagflat(x)
x[0].trace()
torch.kron(x, x[0])
x.median()
x.median(1)
x.nanmedian(dim=0, keepdim=True)
(x * 2).round().mode(1).values * x.mean()
x.kthvalue(2, 0)
x.msort()
x.quantile(0.3)
x.quantile(torch.tensor([0.3, 0.6]).double(), 1, keepdim=True)
torch.nanquantile(x, 0.5, dim=0)
torch.quantile(x, torch.tensor([0.3, 0.6]).double(), keepdim=True)
torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()) * x
torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]).double(), x.detach(), right=True) * x
torch.searchsorted(x.detach().sort(-1).values, y.detach()) * x
torch.isin(x.round(), torch.tensor([0.0, 1.0]).double()) * x
torch.cdist(x, y)
torch.cdist(x1=x, x2=y[0], p=1)
torch.linalg.inv(x[:, :5])
torch.linalg.det(x[:, :5])
x[:, :5].inverse()
torch.linalg.solve(x[:, :5], y[:, :5])
torch.linalg.solve(x[:, :5], y[:, 0])
torch.linalg.solve(x[:, :5], y[0, :5], left=False)
torch.linalg.svdvals(x)
torch.linalg.eigh(x[:, :5] + x[:, :5].mT).eigenvalues
torch.linalg.slogdet(x[:, :5]).logabsdet
torch.linalg.multi_dot([x[0], y[0].T, x[1]])
torch.matrix_exp(x[:, :5] / 9)
torch.addr(x[0], y[0, :, 0], y[0, 0], beta=2)
F.bilinear(x, y, torch.arange(50.0).double().reshape(2, 5, 5), torch.ones(2).double())
torch.column_stack((x[0], y[1], x[0, :, 0]))
torch.meshgrid(x[:, 0, 0], y[0, :, 0], indexing="ij")
torch.meshgrid(x[:, 0, 0], y[0, :, 0], x[0, 0], indexing="xy")
torch.hsplit(x, 2)
x.vsplit([1, 3])
x.dsplit(5)
torch.gradient(x)
torch.gradient(x, spacing=0.5, dim=1, edge_order=2)
F.unfold(x, 3)
F.unfold(x, (3, 2), padding=1, stride=2)
F.unfold(x.unsqueeze(1), 3, dilation=2, padding=(2, 1), stride=(1, 3))
F.unfold(x[:, None], 2, stride=2)
F.fold(F.unfold(x, 3, padding=1), (6, 5), 3, padding=1)
F.fold(F.unfold(x, (2, 4), stride=(2, 4)), (6, 5), (2, 4), stride=(2, 4))
F.fold(F.unfold(x, (3, 2), 2, (2, 1), (1, 3)), (6, 5), (3, 2), 2, (2, 1), (1, 3))
F.fold(F.unfold(x, (1, 2), stride=(3, 2)), (6, 5), (1, 2), stride=(3, 2))
"""

LOSSES = """
F.gaussian_nll_loss(x, y, y.exp())
F.gaussian_nll_loss(x, y, y[..., :1].exp(), full=True, reduction="none")
F.gaussian_nll_loss(x, y, y[..., 0].exp(), reduction="sum")
F.gaussian_nll_loss(x, y, torch.full((4, 6, 5), 0.3).double())
F.margin_ranking_loss(x, y, y.detach().sign(), margin=0.2)
F.hinge_embedding_loss(x, y.detach().sign())
F.cosine_embedding_loss(x[0], y[0], y[0, :, 0].detach().sign(), margin=0.1)
F.triplet_margin_loss(x, y, x.exp(), swap=True)
F.triplet_margin_with_distance_loss(x, y, x.exp(), reduction="none")
F.multilabel_soft_margin_loss(x, y.sigmoid(), torch.arange(5.0).double())
F.multi_margin_loss(x.flatten(0, 1), torch.arange(24) % 5, p=2, weight=torch.arange(5.0).double())
F.multilabel_margin_loss(x[0], torch.tensor([[0, 1, -1, 2, 2]] * 6))
"""


@pytest.mark.parametrize("call", lines(UNGATHERED))
def test_along_a_cut_dim_nothing_is_gathered(call: str) -> None:
    for found in compared(call, evaluated(call), number(4, 6, 5)):
        assert found.gathered_bytes == 0


@pytest.mark.parametrize("call", lines(CALLS) + lines(LOSSES))
def test_as_on_one_rank(call: str) -> None:
    once = any(name in call for name in ("median", "mode", "cdist", "margin_loss", "linalg", "isin", "gaussian"))
    compared(call, evaluated(call), number(4, 6, 5), number(4, 6, 5, seed=1), second_order=not once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_over_a_cut_dim_in_few_bits(dtype: torch.dtype) -> None:
    x = (4 * number(4, 60)).to(dtype)
    for function in (torch.softmax, torch.log_softmax):
        found = check_rule(lambda x, f=function: f(x, 1), x, cuts=[{1: "a"}], mesh={"a": 3}, tolerance=2e-2)
        assert found.verdict == "exact", found


def test_the_first_of_equals_is_found() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [0.0] * 6]).double()
    for function in (torch.max, torch.min, torch.argmax):
        found = check_rule(lambda x, f=function: f(x, 1), x, cuts=[{1: "a"}], mesh={"a": 4})
        assert found.verdict == "exact", found


def windows(x: Tensor, size: int) -> Tensor:
    """(batch, depth, height, width, channels) -> (windows, tokens, channels), as Swin does it."""
    batch, *space, channels = x.shape
    split = x.view(batch, *(n for extent in space for n in (extent // size, size)), channels)
    return split.permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(-1, size**3, channels)


def back(rows: Tensor, size: int, shape: Any) -> Tensor:
    batch, *space, channels = shape
    split = rows.view(batch, *(extent // size for extent in space), size, size, size, channels)
    return split.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous().view(shape)


def shifted_windows(x: Tensor) -> Tensor:
    """A shifted window block: rolled, cut into windows, mixed in each, put back."""
    shape = x.shape
    rows = windows(x.roll((-1, -1, -1), (1, 2, 3)), 2)
    mixed = F.scaled_dot_product_attention(rows, rows, rows)
    return x + back(mixed, 2, shape).roll((1, 1, 1), (1, 2, 3))


def test_windows_keep_a_cut_between_them() -> None:
    """Uneven too: three ranks with one, two and one row of windows."""
    for mesh, at in (({"a": 2}, None), ({"a": 3}, {1: (0, 2, 6, 8)})):
        x = number(1, 8, 4, 6, 3)
        found = check_rule(shifted_windows, x, cuts=[{1: "a"}], mesh=mesh, points=[at], second_order=True)
        assert (found.verdict, found.gathered_bytes) == ("exact", 0), found


@pytest.mark.parametrize("cut", [{1: "a"}, {2: "a"}, {3: "a"}, {0: "b", 2: "a"}])
def test_windows_of_several_samples_change_places(cut: dict[int, str]) -> None:
    """Where a cut lies behind others in a merge, tiles are exchanged: what comes out is cut, and no larger."""
    mesh = {"a": 2, "b": 2} if "b" in cut.values() else {"a": 2}
    found = check_rule(shifted_windows, number(2, 4, 4, 6, 3), cuts=[cut], mesh=mesh, second_order=True)
    assert (found.verdict, found.gathered_bytes if len(mesh) == 1 else 0) == ("exact", 0), found

    def body() -> tuple[int, int]:
        x = hc.shard(number(2, 4, 4, 6, 3), Mesh(**mesh), cut)
        return windows(x, 2)._tile.numel(), x._tile.numel()

    assert all(after == before * (2 if "b" in mesh else 1) for after, before in run_local(2 * len(mesh), body))


REARRANGED = """
x.reshape(2, 2, 6, 5).permute(0, 2, 1, 3).reshape(12, 10)
x.unflatten(1, (3, 2)).permute(0, 1, 3, 2).flatten(0, 1)
x.unflatten(1, (3, 2)).permute(1, 0, 2, 3).flatten(2)
x.unflatten(1, (2, 3)).mean((2, 3))
x.unsqueeze(1).expand(-1, 3, -1, -1).reshape(12, 6, 5)
x.permute(2, 0, 1).reshape(10, 12)
x.flatten().reshape(8, 15).transpose(0, 1).reshape(6, -1)
x.reshape(4, 30).reshape(2, 2, 3, 10).amax((1, 3))
"""


@pytest.mark.parametrize("call", lines(REARRANGED))
def test_rearranged(call: str) -> None:
    """What einops writes with torch: splits, permutations and merges."""
    compared(call, evaluated(call), number(4, 6, 5), setups=3)


REFUSED = """
F.ctc_loss(x, y, y, y)
torch.gradient(x, spacing=(torch.arange(4.0),), dim=0)
torch.isin(1.0, x)
torch.searchsorted(x, 1.0)
F.multi_margin_loss(x[0, :, 0], torch.tensor(1))
torch.stft(x[0], 4, center=False, align_to_window=True, return_complex=True)
torch.atleast_2d(x, y)
torch.cummax(x, 0, out=(x, y))
"""


@pytest.mark.parametrize("call", lines(REFUSED))
def test_refusals_say_what_to_do(call: str) -> None:
    def body() -> str:
        x = hc.shard(number(4, 6, 5), Mesh(a=2), {1: "a"})
        with pytest.raises(hc.Refused) as error:
            evaluated(call)(x, x)
        return error.value.remedy

    assert all(run_local(2, body))
