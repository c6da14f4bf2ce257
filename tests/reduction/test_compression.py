"""Gradients that travel in fewer bits than they have."""

from __future__ import annotations

import pytest
import torch
from averaging import check_equal, drawn, part, small_model, trained
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.testing import shared_pool
from halocline.world import Mesh, run_local

ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
wide_model = drawn(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double())


def after_a_few(
    wire: str | None, scale: float = 1.0, ranks: int = 2, **ways: object
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the fourth step on the first rank, and the true ones; the same bits on all ranks."""

    def gradients(model: nn.Module, cut: bool, mesh: Mesh | None = None) -> list[Tensor]:
        for step in range(4):
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            (scale * model(part(x, mesh) if mesh else x).square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        return gradients(hc.distribute(wide_model(), mesh, wire=wire, **ways), True, mesh)  # type: ignore[arg-type]

    found = run_local(ranks, run)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0], gradients(wide_model(), False)


@pytest.mark.parametrize("rings", ["flat", "levels", "doubling"])
@pytest.mark.parametrize("wire", ROUNDING)
def test_a_mean_is_off_by_its_rounding_and_no_more(wire: str, rings: str) -> None:
    found, true = after_a_few(wire, ranks=4, rings=rings)
    for a, b in zip(found, true, strict=True):
        # Of each rank's share and of each partial sum; the parts may be larger than the mean.
        assert 0 < float((a - b).abs().max()) < 8 * ROUNDING[wire] * float(b.abs().max()) * 4


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_half_precision_is_scaled_into_its_range(scale: float) -> None:
    """Its own range ends at 6e-8 and at 65504."""
    found, true = after_a_few("fp16", scale)
    for a, b in zip(found, true, strict=True):
        assert float((a - b).abs().max()) < 8 * 2.0**-11 * float(b.abs().max())


def test_a_sum_that_leaves_the_range_goes_again_as_it_was() -> None:
    """A step whose gradients are a million times those before."""

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = hc.distribute(wide_model(), mesh, wire="fp16")
        for step, scale in enumerate((1.0, 1.0, 1.0, 1e6, 1.0)):
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            (scale * model(part(x, mesh)).square().mean()).backward()
            if scale > 1:
                large = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return large

    model = wide_model()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (1e6 * model(x).square().mean()).backward()
    check_equal(run_local(2, run), [p.grad for p in model.parameters() if p.grad is not None])


def test_what_is_not_a_number_stays_so() -> None:
    def run() -> bool:
        mesh = Mesh(data=2)
        model = hc.distribute(wide_model(), mesh, wire="fp16")
        for step in range(4):
            model.zero_grad()
            x = torch.ones(4, 6, dtype=torch.float64) * (float("nan") if step == 3 and mesh.rank == 0 else 1.0)
            model(x).square().mean().backward()
        return all(bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None)

    assert run_local(2, run) == [True, True]


def test_no_wider_than_the_gradients_are() -> None:
    """float32 gradients over a wire of float32 are as they were."""

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return trained(hc.distribute(small_model().float(), mesh, wire="fp32"), lambda x: part(x.float(), mesh))

    def plain() -> list[Tensor]:
        mesh = Mesh(data=2)
        return trained(hc.distribute(small_model().float(), mesh), lambda x: part(x.float(), mesh))

    for a, b in zip(run_local(2, run)[0], run_local(2, plain)[0], strict=True):
        assert torch.equal(a, b)


def on_processes(wire: str, rings: str) -> tuple[int, int, float]:
    """Bytes handed to the transport in a step, and those of the gradients; how far off."""
    mesh = Mesh(data=-1)
    torch.manual_seed(0)
    model = hc.distribute(nn.Linear(200, 200), mesh, wire=wire, rings=rings)
    x = torch.randn(4 * mesh.size, 200, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        mesh.world.traffic.clear()
        model.zero_grad()
        model(part(x, mesh)).square().mean().backward()
    engine = engine_of(model)
    assert engine is not None
    alone = nn.Linear(200, 200)
    alone.load_state_dict(model.state_dict())
    alone(x).square().mean().backward()
    assert alone.weight.grad is not None and model.weight.grad is not None
    off = (alone.weight.grad - model.weight.grad).abs().max() / alone.weight.grad.abs().max()
    return mesh.world.traffic.summed_bytes, sum(4 * p.numel() for p in model.parameters()), float(off)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_of_the_bytes_between_processes(wire: str) -> None:
    for sent, size, off in shared_pool(2).run(on_processes, wire, "flat"):
        assert size / 2 <= sent < 0.51 * size
        assert 0 < off < 4 * ROUNDING[wire]


def test_what_it_refuses() -> None:
    with pytest.raises(hc.MeshError, match="bf16"):
        hc.distribute(small_model(), Mesh(data=1), wire="int8")
