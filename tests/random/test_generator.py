"""The counter generator: fixed for good, fair in every bit, and true to its distributions; and what drawing costs."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import halocline as hc
from halocline.geometry import Interval
from halocline.random.generator import GlobalBox, bits, keys
from halocline.testing import peak_bytes

CPU = torch.device("cpu")


def by_hand(seed: int, call: int, index: int) -> int:
    """The generator again, in Python's own integers."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    key = 0
    for part in (seed, call, 0):
        key = mix((key ^ part) + step & mask)
    z = mix(key + index * step & mask)
    z = (z + mix(key + step & mask)) * 0xD6E8FEB86659FD93 & mask
    return z ^ z >> 32


def test_the_generator_is_fixed() -> None:
    """A saved run goes on with its own numbers in every later version."""
    shape = (5, 3_000_000_000, 7)
    box = (Interval(3, 5), Interval(2_999_999_990, 3_000_000_000), Interval(0, 7))
    found = bits(shape, box, keys(2**63 + 11, 40, 0), CPU)
    for (i, j, k), value in zip(torch.cartesian_prod(*map(torch.arange, found.shape)), found.flatten(), strict=True):
        index = int(((i + 3) * shape[1] + j + 2_999_999_990) * 7 + k)
        assert int(value) % 2**64 == by_hand(2**63 + 11, 40, index)


def words(seed: int = 1, call: int = 0, count: int = 1 << 16) -> Tensor:
    return bits((count,), GlobalBox.all_of((count,)).box, keys(seed, call, 0), CPU)


def flips(one: Tensor, other: Tensor) -> Tensor:
    """How often each of the 64 bits differs."""
    return torch.stack([((one ^ other) >> bit & 1).double().mean() for bit in range(64)])


def test_every_bit_is_fair_and_nothing_is_correlated() -> None:
    """Standard deviations of these means are 0.002 (65,536 words)."""
    one = words()
    assert one.unique().numel() == one.numel()
    others = {"zero": torch.zeros_like(one), "neighbour": one.roll(1), "row below": one.roll(256)}
    others |= {"next call": words(call=1), "next seed": words(seed=2), "far call": words(call=1 << 40)}
    for name, other in others.items():
        assert (flips(one, other) - 0.5).abs().max() < 0.01, name


def test_distributions() -> None:
    """Against the true distribution function: Kolmogorov's distance times sqrt(n) is above 1.95 once in a thousand."""
    n = 1 << 17
    x = torch.empty(n, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    truth: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
        "uniform": (lambda: torch.rand(n, dtype=torch.float64), lambda v: v),
        "uniform, float32": (lambda: torch.rand(n).double(), lambda v: v),
        "normal": (lambda: torch.randn_like(x), normal.cdf),
        "normal, float32": (lambda: torch.randn(n).double(), normal.cdf),
        "exponential": (lambda: x.exponential_(2.0), lambda v: 1 - torch.exp(-2 * v)),
        "cauchy": (lambda: x.cauchy_(), lambda v: torch.atan(v) / math.pi + 0.5),
    }
    for name, (draw, cdf) in truth.items():
        with hc.random.reproducible(7):
            sample = draw().sort().values
        distance = (cdf(sample) - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
        assert distance * math.sqrt(n) < 1.95, name


def test_moments_of_the_discrete_ones() -> None:
    n = 1 << 17
    with hc.random.reproducible(8):
        x = torch.ones(n)
        assert abs(F.dropout(x, 0.3).mean() - 1) < 0.01
        assert abs(torch.bernoulli(x * 0.2).mean() - 0.2) < 0.005
        assert abs(torch.empty(n).geometric_(0.25).mean() - 4) < 0.05
        kept = F.alpha_dropout(torch.randn(n), 0.3, True)
        assert abs(kept.mean()) < 0.02 and abs(kept.var() - 1) < 0.03
        counts = torch.randint(-3, 7, (n,)).add(3).bincount(minlength=10)
        assert (counts / n - 0.1).abs().max() < 0.005 and counts.numel() == 10
        order = torch.randperm(1000)
        assert torch.equal(order.sort().values, torch.arange(1000)) and not torch.equal(order, torch.arange(1000))
        complex_ = torch.randn(n, dtype=torch.complex128)
        assert abs(complex_.abs().square().mean() - 1) < 0.02 and abs((complex_.real * complex_.imag).mean()) < 0.01
        assert torch.rand(n, dtype=torch.bfloat16).max() < 1 and torch.rand(n, dtype=torch.float16).max() < 1
        assert torch.empty(n, dtype=torch.int8).random_().min() == 0


def test_dropout_saves_a_mask_alone() -> None:
    saved: list[Tensor] = []
    x = torch.ones(64, 1024, requires_grad=True)
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hc.random.reproducible(1), pack:
        F.dropout(x * 1)
    assert sum(t.numel() * t.element_size() for t in saved if t.ndim) == x.numel()


def test_drawing_needs_little_memory_besides() -> None:
    x = torch.ones(1 << 20)
    with hc.random.reproducible(1):
        peak = peak_bytes(lambda: F.dropout(x)).peak
    assert peak < 2.5 * x.numel() * 4  # the result, the mask, a portion in work
