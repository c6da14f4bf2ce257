"""Sums for others: ``hc.all_reduce`` of arrays, and the communication hook of DistributedDataParallel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halocline as hc
from halocline.testing.pool import shared_pool
from halocline.world import run_local, this_world

EXAMPLES = Path(__file__).parents[2] / "examples" / "other_frameworks"


class Foreign:
    """An array of another framework: all that is known of it is DLPack."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


def arrays(rank: int) -> list[Any]:
    numbers = np.random.default_rng(rank)
    return [
        numbers.normal(size=(3, 4)),
        numbers.normal(size=5).astype(np.float32),
        numbers.integers(0, 9, 6),
        torch.from_numpy(numbers.normal(size=(2, 2))).T,
        Foreign(torch.from_numpy(numbers.normal(size=3))),
        numbers.normal(size=2) + 1j * numbers.normal(size=2),
    ]


def values(array: Any) -> Any:
    return np.asarray(torch.from_dlpack(array)) if isinstance(array, (Foreign, torch.Tensor)) else array


def reduced(op: str, rings: str = "flat") -> list[Any]:
    mine = arrays(this_world().rank)
    kept = [array for array in mine if op == "sum" or values(array).dtype.kind in ("f" if op == "max" else "fc")]
    found = hc.all_reduce(kept, op, rings=rings)
    assert [type(array) for array in found] == [torch.Tensor if isinstance(a, Foreign) else type(a) for a in kept]
    assert all(np.array_equal(values(a), values(b)) for a, b in zip(mine, arrays(this_world().rank), strict=True))
    return [values(array) for array in found]


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_arrays_of_any_kind_are_reduced(op: str) -> None:
    function = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
    by_rank = [[values(array) for array in arrays(rank)] for rank in range(3)]
    true = [function(np.stack(each), axis=0) for each in zip(*by_rank, strict=True)]
    true = [
        t
        for t, a in zip(true, by_rank[0], strict=True)
        if op == "sum" or a.dtype.kind in ("f" if op == "max" else "fc")
    ]
    for found in run_local(3, lambda: reduced(op)):
        for one, other in zip(found, true, strict=True):
            assert one.dtype == other.dtype or op == "mean"
            assert np.allclose(one, other, rtol=1e-6 if one.dtype == np.float32 else 1e-14)


def test_sums_over_rings_are_the_same() -> None:
    flat, rings = shared_pool(2).run(reduced, "sum"), shared_pool(2).run(reduced, "sum", "levels")
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(flat[0], rings[1], strict=True))


def rounded(wire: str | None) -> tuple[float, int]:
    world = this_world()
    array = 1e6 * (1 + np.arange(1000, dtype=np.float32) / 1000) * (1 + world.rank)
    true = 1e6 * (1 + np.arange(1000, dtype=np.float32) / 1000) * 3
    off = float(np.abs(hc.all_reduce(array, wire=wire) / true - 1).max())
    return off, world.traffic.summed_bytes


def test_a_wire_rounds_and_does_not_overflow() -> None:
    (_, whole), (half, bytes_half), (brain, _) = (
        run_local(2, lambda wire=wire: rounded(wire))[0] for wire in (None, "fp16", "bf16")
    )
    assert 1e-5 < half < 1e-3  # far beyond the range of float16
    assert 1e-4 < brain < 1e-2
    assert bytes_half < 0.52 * whole


def test_what_has_no_sum_is_refused() -> None:
    def refusals() -> list[str]:
        said = []
        cases = [("sum", [1.0]), ("mean", np.arange(3)), ("max", np.ones(2, complex)), ("least", np.ones(2))]
        for op, array in cases:
            with pytest.raises(hc.HaloclineError) as found:
                hc.all_reduce(array if op != "sum" else ["text"], op)
            said.append(str(found.value))
        with pytest.raises(hc.MeshError, match="other shapes"):
            hc.all_reduce(np.ones(2 + this_world().rank))
        return said

    said = run_local(2, refusals)[0]
    assert "no __dlpack__" in said[0] and "int64" in said[1] and "no max" in said[2] and "not 'least'" in said[3]


def trained(wire: str | None, hooked: bool, rings: str = "flat") -> list[torch.Tensor]:
    hc.init()
    rank = this_world().rank
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    if hooked:
        hc.register_comm_hook(model, wire=wire, rings=rings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_ddp_hook_gives_the_mean_of_ddp() -> None:
    pool = shared_pool(2)
    true, ours, rounded = (pool.run(trained, *case)[1] for case in ((None, False), (None, True), ("fp16", True)))
    assert max(float((a - b).abs().max()) for a, b in zip(true, ours, strict=True)) < 1e-14
    off = max(float((a - b).abs().max()) for a, b in zip(true, rounded, strict=True))
    assert 0 < off < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(("name", "words"), [("numpy_sum.py", "loss 1"), ("ddp_hook.py", "loss 0.")])
def test_the_examples_run(name: str, words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ") and done.stdout.count("loss ") == 1
