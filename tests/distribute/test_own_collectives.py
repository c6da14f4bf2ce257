"""Models that sum over all ranks by themselves: switched off on cut inputs where it is known how, else refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halocline as hc
from halocline.testing.pool import shared_pool

KIND = {"dtype": torch.float64}


class Quantizer(nn.Module):
    """Moving averages of counts and sums by code, as MONAI's vector quantizer keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.ddp_sync = True
        self.codes = nn.Embedding(4, 2, **KIND).requires_grad_(False)
        self.register_buffer("sizes", torch.zeros(4, **KIND))
        self.register_buffer("sums", self.codes.weight.data.clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.permute(0, 2, 1).reshape(-1, 2)
        nearest = (flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes.weight.t()).argmin(1)
        chosen = nn.functional.one_hot(nearest, 4).to(x.dtype)
        with torch.no_grad():
            count, total = chosen.sum(0), chosen.t() @ flat
            if self.ddp_sync and dist.is_initialized():
                dist.all_reduce(tensor=count)
                dist.all_reduce(tensor=total)
            self.sizes.mul_(0.5).add_(count * 0.5)
            self.sums.data.mul_(0.5).add_(total * 0.5)
            self.codes.weight.data.copy_(self.sums / (self.sizes.unsqueeze(1) + 1))
        return x + (self.codes(nearest).reshape(x.shape[0], -1, 2).permute(0, 2, 1) - x).detach()


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv1d(2, 2, 3, padding=1, **KIND), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


class Sums(nn.Module):
    """A sum over all ranks that nothing can switch off."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
        return x * mean


def model(inner: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(inner())


def sample() -> Tensor:
    return torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1), **KIND)


def quantized() -> list[Tensor]:
    hc.init(10.0)
    mesh = hc.Mesh(rows=2)
    net = hc.distribute(model(Quantizer), mesh)
    for _ in range(2):
        found = net(hc.shard(sample(), mesh, {2: "rows"}))
        found.square().sum().backward()
    assert net.inner.ddp_sync and copy.deepcopy(net).inner.ddp_sync
    return [hc.gather(found).detach(), net.inner.sizes, net.inner.sums, net.first.weight.grad]


def test_a_known_sum_is_switched_off_on_cut_inputs() -> None:
    net = model(Quantizer)
    for _ in range(2):
        found = net(sample())
        found.square().sum().backward()
    true = [found.detach(), net.inner.sizes, net.inner.sums, net.first.weight.grad]
    for rank in shared_pool(2).run(quantized, deadline=60.0):
        for one, other in zip(rank, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def local_batches() -> tuple[Tensor, Tensor]:
    hc.init(10.0)
    mesh = hc.Mesh(data=2)
    net = hc.distribute(model(Quantizer), mesh)
    net(sample()[mesh.rank : mesh.rank + 1])
    return net.inner.sizes, net.inner.sums


def test_on_local_batches_it_stays_on() -> None:
    net = model(Quantizer)
    net(sample())
    for sizes, sums in shared_pool(2).run(local_batches, deadline=60.0):
        torch.testing.assert_close(sizes, net.inner.sizes)
        torch.testing.assert_close(sums, net.inner.sums)


def refused() -> str:
    hc.init(10.0)
    mesh = hc.Mesh(rows=2)
    net = hc.distribute(model(Sums), mesh)
    net(sample())  # a local batch
    with pytest.raises(hc.Refused) as caught:
        net(hc.shard(sample(), mesh, {2: "rows"}))
    return str(caught.value)


def test_others_are_refused() -> None:
    for text in shared_pool(2).run(refused, deadline=60.0):
        assert "talked to all ranks by itself" in text and "switch" in text
