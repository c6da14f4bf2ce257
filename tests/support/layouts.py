"""How the rule tests cut tensors of three dims: evenly, unevenly, over one axis or two, with empty tiles among them."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from halocline.testing.compare import Comparison, check_rule

#: Cut, mesh and points of a tensor of (4, 6, 5).
LAYOUTS: list[tuple[dict[int, str], dict[str, int], dict[int, tuple[int, ...]]]] = [
    ({0: "a"}, {"a": 5}, {}),
    ({1: "a"}, {"a": 2}, {1: (0, 1, 6)}),
    ({2: "a"}, {"a": 3}, {2: (0, 4, 4, 5)}),
    ({1: "a"}, {"a": 4}, {1: (0, 0, 5, 5, 6)}),
    ({0: "b", 1: "a"}, {"b": 2, "a": 2}, {}),
    ({2: "a", 1: "b"}, {"a": 2, "b": 3}, {1: (0, 4, 5, 6)}),
    ({0: "a", 2: "b"}, {"a": 2, "b": 2}, {0: (0, 4, 4)}),
]


def number(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def evaluated(call: str, **names: Any) -> Callable[..., Any]:
    return eval(f"lambda x, y=None: {call}", {"torch": torch, "F": F, **names})  # type: ignore[no-any-return]


def compared(
    words: str, function: Callable[..., Any], *inputs: torch.Tensor, setups: int = 2, second_order: bool = True
) -> list[Comparison]:
    """On some of the layouts, by ``words`` at random: the first input cut, others cut alike, otherwise, or whole."""
    random, found = Random(words), []
    for setup, (cut, mesh, points) in enumerate(random.sample(LAYOUTS, setups)):
        others = [random.choice([(cut, points), (cut, {}), (None, None)]) for _ in inputs[1:]]
        cuts, at = zip((cut, points), *others, strict=True)
        twice = second_order and setup == 0
        result = check_rule(function, *inputs, cuts=cuts, points=at, mesh=mesh, second_order=twice)
        assert result.verdict == "exact", f"{words} cut {cuts} at {at} over {mesh}: {result}"
        found.append(result)
    return found
