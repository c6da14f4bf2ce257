"""``torch.multinomial`` by global index: the same samples for every cut, of the right frequencies."""

import pytest
import torch
from torch import Tensor

import halocline as hc
from halocline.world import run_local

KIND = {"dtype": torch.float64}
CALLS = {
    "one": lambda w: torch.multinomial(w, 1),
    "several": lambda w: w.multinomial(4),
    "all": lambda w: torch.multinomial(w, 7, replacement=False),
    "with replacement": lambda w: torch.multinomial(w, 9, replacement=True),
    "by name": lambda w: torch.multinomial(input=w, num_samples=3, replacement=True),
}


def weights() -> Tensor:
    return torch.rand(6, 7, generator=torch.Generator().manual_seed(0), **KIND) + 0.1


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_cut_takes_the_samples_of_one_rank(name: str, dim: int) -> None:
    with hc.random.reproducible(5):
        true = CALLS[name](weights())
    assert true.dtype == torch.int64

    def body() -> Tensor:
        with hc.random.reproducible(5):
            return hc.gather(CALLS[name](hc.shard(weights(), hc.Mesh(rows=3), {dim: "rows"})))

    assert all(torch.equal(found, true) for found in run_local(3, body))


@pytest.mark.parametrize("replacement", [False, True])
def test_frequencies_are_those_of_the_weights(replacement: bool) -> None:
    line = torch.tensor([0.1, 0.0, 0.6, 0.3], **KIND)
    with hc.random.reproducible(1):
        first = torch.multinomial(line.expand(20000, 4), 2, replacement)
    found = torch.bincount(first[:, 0], minlength=4) / 20000
    assert (found - line).abs().max() < 0.02
    again = torch.bincount(first[:, 1], minlength=4) / 20000
    # Without replacement: the sum over first draws i of p_i p_j / (1 - p_i).
    expected = line * (line / (1 - line)).sum() - line * line / (1 - line)
    assert (again - (line if replacement else expected)).abs().max() < 0.02
    assert replacement or bool((first[:, 0] != first[:, 1]).all())


@pytest.mark.parametrize(
    ("line", "count", "message"),
    [
        ([0.5, -0.1], 1, "element < 0"),
        ([0.0, 0.0], 1, "invalid multinomial distribution"),
        ([1.0, 0.0], 2, "invalid multinomial distribution"),
        ([1.0, 1.0], 3, "cannot sample"),
        ([1.0, 1.0], 0, "cannot sample"),
    ],
)
def test_bad_weights_are_errors_as_in_torch(line: list[float], count: int, message: str) -> None:
    with hc.random.reproducible(1), pytest.raises(RuntimeError, match=message):
        torch.multinomial(torch.tensor(line), count)


def test_a_plain_tensor_without_the_mode_draws_as_torch_has_it() -> None:
    torch.manual_seed(3)
    first = torch.multinomial(weights(), 3)
    torch.manual_seed(3)
    assert torch.equal(first, torch.multinomial(weights(), 3))
