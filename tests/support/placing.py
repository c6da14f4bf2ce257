"""How the rule tests cut a sample at random."""

from collections.abc import Sequence
from random import Random


def place(
    random: Random, shape: Sequence[int], dims: Sequence[int]
) -> tuple[dict[int, str], dict[str, int], dict[int, list[int]]]:
    """Cuts, mesh and points: one or two of ``dims`` cut over up to five ranks, anywhere; tiles may be empty."""
    chosen = random.sample(dims, min(len(dims), random.choice((1, 1, 2))))
    ranks = [random.randint(1, 5)] if len(chosen) == 1 else [2, random.randint(2, 3)]
    mesh = dict(zip("ab", ranks, strict=False))
    cuts = dict(zip(chosen, mesh, strict=True))
    points = {
        dim: [0, *sorted(random.randint(0, shape[dim]) for _ in range(mesh[axis] - 1)), shape[dim]]
        for dim, axis in cuts.items()
        if random.random() < 0.5
    }
    return cuts, mesh, points
