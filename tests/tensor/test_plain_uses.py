"""What users do with a cut tensor as with any other: compare, print, iterate, optimize it, write into out=."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

KIND = {"dtype": torch.float64}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **KIND)


def on_two(body: Callable[[Tensor], Any]) -> Any:
    first, second = run_local(2, lambda: body(hc.shard(drawn(4, 6), hc.Mesh(rows=2), {1: "rows"})))
    assert first == second
    return first


def test_cut_tensors_compare() -> None:
    other = drawn(4, 6)
    other[3, 5] += 1e-9

    def body(x: Tensor) -> list[bool]:
        value = float(drawn(4, 6)[2, 4])
        asked = [torch.equal(x, x), x.equal(drawn(4, 6)), torch.equal(drawn(4, 6), x), torch.equal(x, other)]
        asked += [torch.equal(x, x[:2]), torch.equal(x / 0 * 0, x / 0 * 0), torch.allclose(x, other)]
        return [*asked, x.allclose(other, rtol=0, atol=1e-12), value in x, value + 1 in x]

    assert on_two(body) == [True, True, True, False, False, False, True, False, True, False]


def test_cut_tensors_print_without_values() -> None:
    assert on_two(lambda x: f"{x}".startswith("ShardedTensor(tile [4, 3]"))
    with pytest.raises(TypeError, match="unsupported format string"):
        on_two(lambda x: f"{x:.2f}")


@pytest.mark.parametrize("dim", [0, 1])
def test_cut_tensors_iterate_both_ways(dim: int) -> None:
    for use in (lambda x: [row * 2 for row in x], reversed):
        found = check_rule(use, drawn(4, 6), cuts=[{dim: "rows"}], mesh={"rows": 2})
        assert found.verdict == "exact", (found.why, found.error)


@pytest.mark.parametrize("cut", [True, False])
def test_out_takes_the_result(cut: bool) -> None:
    def use(x: Tensor) -> list[Tensor]:
        out = torch.empty_like(x) if cut else torch.empty(x.shape, **KIND)
        same = torch.maximum(x.detach(), x.detach().cos(), out=out)
        assert same is out
        flipped = torch.flip(x.detach(), (0,)) if cut else torch.cumsum(x.detach(), 1, out=torch.empty(4, 6, **KIND))
        return [out, flipped, x]

    found = check_rule(use, drawn(4, 6), cuts=[{1: "rows"}], mesh={"rows": 2})
    assert found.verdict == "exact", (found.why, found.error)


def test_out_has_no_gradient_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="don't support"):
        on_two(lambda x: torch.add(x.requires_grad_(), 1, out=torch.empty_like(x)))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, f: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, nesterov=True, foreach=f),
    "Adam": lambda p, f: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=f),
    "AdamW": lambda p, f: torch.optim.AdamW(p, 0.1, maximize=True, foreach=f),
    "RMSprop": lambda p, f: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True, foreach=f),
    "Adagrad": lambda p, f: torch.optim.Adagrad(p, 0.1, foreach=f),
    "Adadelta": lambda p, f: torch.optim.Adadelta(p, 0.1, foreach=f),
    "Adamax": lambda p, f: torch.optim.Adamax(p, 0.1, foreach=f),
    "NAdam": lambda p, f: torch.optim.NAdam(p, 0.1, foreach=f),
    "RAdam": lambda p, f: torch.optim.RAdam(p, 0.1, foreach=f),
    "Rprop": lambda p, f: torch.optim.Rprop(p, 0.1, foreach=f),
    "ASGD": lambda p, f: torch.optim.ASGD(p, 0.1, foreach=f),
}


def trained(name: str, foreach: bool, mesh: hc.Mesh | None) -> list[Tensor]:
    leaves = [drawn(4, 3), drawn(3, 5, seed=1)]
    if mesh is not None:
        leaves = [hc.shard(leaf, mesh, {dim: "rows"}) for dim, leaf in enumerate(leaves)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    optimizer = OPTIMIZERS[name](leaves, foreach)
    for _ in range(3):
        optimizer.zero_grad()
        ((leaves[0].sin().sum() * leaves[1]) ** 2).sum().backward()
        torch.nn.utils.clip_grad_norm_(leaves, 3.0, foreach=foreach)
        torch.nn.utils.clip_grad_value_(leaves, 1.0, foreach=foreach)
        optimizer.step()
    return [hc.gather(leaf).detach() for leaf in leaves]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_cut_leaves(name: str, foreach: bool) -> None:
    true = trained(name, False, None)
    for found in run_local(2, lambda: trained(name, foreach, hc.Mesh(rows=2))):
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_are_no_operand_to_cut(caplog: pytest.LogCaptureFixture) -> None:
    """They are whole on every rank; a buffer of that size is worth a word."""

    def program() -> None:
        mesh = hc.Mesh(height=2)
        x = hc.shard(torch.ones(1, 1, 1024, 2), mesh, {2: "height"})
        layer = hc.distribute(torch.nn.Linear(2048, 256), mesh)
        layer(x.flatten(1))
        torch.nn.functional.linear(x.flatten(1), torch.ones(256, 2048))

    run_local(2, program)
    assert [record.message.split(":")[0] for record in caplog.records if "lies whole" in record.message] == [
        "linear in code outside the model"
    ]
