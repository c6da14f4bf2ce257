"""Peak memory from allocator events, against counts made by hand and by another method."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halocline.errors import HaloclineError
from halocline.testing import memory
from halocline.testing.memory import PeakMemory, peak_bytes
from halocline.testing.pool import shared_pool

KB = 256  # floats


class Ledger(TorchDispatchMode):
    """Counts storages as operations return them: blind to temporaries inside, so for simple programs only."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen[result.untyped_storage()] = result.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(self.seen.values())


def chain() -> torch.Tensor:
    x = torch.ones(100)
    for _ in range(5):
        x = x.exp().repeat(2).sin()
    return x


def fan() -> list[torch.Tensor]:
    parts = [torch.ones(n) for n in (10, 1000, 100)]
    del parts[1]
    return [part.clone() for part in parts]


def views() -> torch.Tensor:
    return torch.ones(4, 100).t()[10:20].clone()


def test_known_allocations() -> None:
    def work() -> torch.Tensor:
        a, b = torch.zeros(3 * KB), torch.zeros(2 * KB)
        del a
        return b + torch.zeros(KB).sum()

    assert peak_bytes(lambda: torch.zeros(KB)) == PeakMemory(1024, 1024)
    assert peak_bytes(lambda: torch.zeros(KB).exp()) == PeakMemory(2048, 1024)
    assert peak_bytes(lambda: None) == PeakMemory(0, 0)
    assert peak_bytes(work) == PeakMemory(5120, 2048)


@pytest.mark.parametrize("program", [chain, fan, views])
def test_agrees_with_a_count_of_storages(program: Callable[[], object]) -> None:
    with Ledger() as ledger:
        kept = program()
        end = ledger.now
    del kept
    assert peak_bytes(program) == PeakMemory(ledger.peak, end)


def test_what_lived_before_counts_below_zero_when_freed() -> None:
    old = [torch.zeros(3 * KB), torch.zeros(5 * KB)]

    def replace() -> torch.Tensor:
        old.pop()
        return torch.zeros(2 * KB)

    assert peak_bytes(replace) == PeakMemory(0, -3072)
    assert peak_bytes(lambda: (torch.zeros(KB), old.pop())) == PeakMemory(1024, 1024)  # popped, but returned alive


def test_blocks_freed_between_two_measurements_do_not_count() -> None:
    tenants: list[torch.Tensor] = []
    peak_bytes(lambda: tenants.extend(torch.zeros(64) for _ in range(50)))
    tenants.clear()
    tenants.extend(torch.zeros(60) for _ in range(50))
    assert peak_bytes(tenants.clear) == PeakMemory(0, -50 * 240)


def test_a_network_keeps_its_gradients_and_peaks_with_its_activations() -> None:
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1), nn.ReLU())
    x = torch.randn(1, 1, 16, 16, 16)
    parameters = sum(p.numel() * p.element_size() for p in net.parameters())
    activation = 4 * x.numel() * x.element_size()

    def step() -> None:
        net(x).square().mean().backward()

    first, second = peak_bytes(step), peak_bytes(step)
    assert (first.end, second.end) == (parameters, 0)
    assert peak_bytes(net.zero_grad) == PeakMemory(0, -parameters)
    assert first.peak > 3 * activation
    assert peak_bytes(lambda: net(x)).end == 2 * activation  # the rectifiers' outputs; the convolutions' are not saved
    with torch.no_grad():
        assert peak_bytes(lambda: net(x)).end == activation


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_other_threads_count() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        in_a_thread(lambda: kept.append(torch.zeros(3 * KB)))
        kept.append(torch.zeros(2 * KB))
        in_a_thread(lambda: kept.pop(0))
        torch.zeros(KB)

    assert peak_bytes(work) == PeakMemory(5120, 2048)
    assert peak_bytes(lambda: in_a_thread(kept.clear)) == PeakMemory(0, -2048)


IN_A_FRESH_PROCESS = """
import torch
from halocline.testing.memory import peak_bytes
old = [torch.zeros(1000), torch.zeros(3000)]
weight = torch.zeros(500, requires_grad=True)
loss = weight.exp().square().sum()  # keeps exp's result, 2000 bytes, for backward
steps = [lambda: old.pop() is None, lambda: None, old.clear, loss.backward]
print([peak_bytes(step).end for step in steps])
"""


@pytest.mark.long
def test_what_lived_before_the_first_use_counts_too() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout == "[-12000, 0, -4000, 0]\n"  # backward gives back what it takes for the gradient
    assert "profiler_start" not in done.stderr


def test_collectives_leave_nothing_behind() -> None:
    """A thread of gloo's is often the last to hold a tensor, and so the one that frees it."""
    for results in shared_pool(2).run(repeated_sums):
        assert set(results) == {PeakMemory(12000, 0)}


def repeated_sums() -> list[PeakMemory]:
    return [peak_bytes(lambda: dist.all_reduce(torch.ones(3000))) for _ in range(5)]


def test_an_allocator_that_does_not_report_is_an_error() -> None:
    with pytest.raises(HaloclineError, match="a known allocation was not reported"):
        memory._levels([{"name": "aten::empty", "ts": 1.0}])
    with pytest.raises(HaloclineError, match="only cpu and cuda"):
        peak_bytes(lambda: None, "meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_from_its_own_statistics() -> None:
    assert peak_bytes(lambda: torch.zeros(KB, device="cuda").exp(), "cuda") == PeakMemory(2048, 1024)
