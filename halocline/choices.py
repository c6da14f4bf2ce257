"""What the library decides by itself, as data that a mesh carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .errors import MeshError, did_you_mean

REMEDIES = ("gather", "shuffle", "ring")


@dataclass(frozen=True)
class Choices:
    """Sizes and ways that decide how a call runs, never what it gives. Every rank must have the same.

        mesh = hc.Mesh(hc.Choices(at={"head": hc.Choices(remedy="gather")}), depth=4)

    ``at`` holds choices for parts of a model by module path; inside a module those of the longest path that begins its
    own hold, in place of all others. `hc.distribute` makes the modules of these paths follow ``cut`` and ``recompute``.
    """

    #: Elements of a tile from which on a halo stays beside it; to a smaller one it is glued, which takes one call.
    halo_beside: int = 1 << 15
    #: What to do where a dim must be whole and is cut: "gather", "shuffle", "ring"; None takes what moves least.
    remedy: str | None = None
    #: Elements of what would go round a ring from which on their memory counts more than a message a rank.
    ring_from: int = 1 << 20
    #: Elements of a plain tensor, made inside a model and written into by cut values, from which on it becomes cut.
    cut_target: int = 1 << 15
    #: Ranks up to which statistics are combined in one sum of one row a rank; more take two smaller sums.
    one_sum_ranks: int = 8
    #: Bytes of a tile in which a sum that follows a product travels, while the next is computed; 0: in one piece.
    product_tile: int = 1 << 20
    #: A product over a cut shared dim waits with its sum over the ranks for the sums that are added to it.
    defer_sums: bool = False
    #: In ``at`` alone: how sharded tensors that enter the module are to lie, ``{dim: axis}`` as `hc.annotate` takes it.
    cut: Mapping[int, str] | None = None
    #: In ``at`` alone: the module keeps no activations for backward, which computes them again.
    recompute: bool = False
    at: Mapping[str, Choices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.remedy is not None and self.remedy not in REMEDIES:
            raise MeshError(
                f"no remedy {self.remedy!r}{did_you_mean(self.remedy, REMEDIES)}; it is {', '.join(REMEDIES)}"
            )

    def inside(self, path: str) -> Choices:
        """Those that hold in the module of this path."""
        around = [place for place in self.at if path == place or path.startswith(f"{place}.")]
        return self.at[max(around, key=len)] if around else self

    def __hash__(self) -> int:
        plain = tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("at", "cut"))
        return hash((plain, tuple(sorted(self.at)), tuple(sorted((self.cut or {}).items()))))

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self)]
        shown = [f"{name}={value!r}" for name, value in changed if value != getattr(DEFAULTS, name)]
        return f"Choices({', '.join(shown)})"


DEFAULTS = Choices()
