"""Runs a script as ``__main__`` on this rank, with everything in place that makes its ranks act as one device."""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..random import reproducible
from ..random import seed as seed_numbers
from ..rules import gather
from ..tensor import ShardedTensor
from ..world import Mesh
from .batches import SPATIAL_DIMS, BatchCutter
from .draws import ScriptFunctions
from .files import share_files
from .first_rank import FirstRank
from .loading import share_loaders
from .models import share_models
from .patches import Patches
from .rank_guard import guard_rank


@dataclass(frozen=True)
class ScriptOptions:
    """How a script runs on its ranks.

    ``numbers``: "torch" draws the random numbers of plain Python; "indexed" those of ``hc.random.reproducible``, for
    which no rank draws more than its tile. ``seed`` is for scripts that set none.
    """

    cut: dict[str, int] = field(default_factory=dict)
    numbers: str = "torch"
    seed: int = 0

    def mesh(self) -> Mesh:
        """The mesh: ranks that the cut leaves over are data parallel. Raises ConfigError."""
        unknown = [axis for axis in self.cut if axis not in SPATIAL_DIMS]
        if unknown:
            raise ConfigError(f"--cut {unknown[0]}: a script's samples are cut along {', '.join(SPATIAL_DIMS)}")
        return Mesh(data=-1, **self.cut)


def run_script(path: Path, arguments: Sequence[str], options: ScriptOptions) -> None:
    """Run the script. By all ranks together; raises what the script raises, SystemExit included."""
    mesh = options.mesh()
    _seed(options.seed)
    before = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with Patches() as patches:
            if options.numbers == "indexed":
                _index_numbers(options.seed, patches)
            first = _share(patches, mesh, options) if mesh.size > 1 else None
            try:
                runpy.run_path(str(path), run_name="__main__")
            finally:
                if first is not None:
                    first.ended = True
    finally:
        sys.argv, sys.path[:] = before


def _share(patches: Patches, mesh: Mesh, options: ScriptOptions) -> FirstRank:
    """Let the ranks act as one device."""
    first, cutter = FirstRank(mesh.world), BatchCutter(mesh)
    share_files(patches, first)
    share_loaders(patches, cutter, first)
    models = share_models(patches, cutter)
    patches.replace(ShardedTensor, "__repr__", lambda plain: _shown)
    patches.enter_context(ScriptFunctions(options.numbers == "torch", models.adopt))
    guard_rank(patches)
    return first


def _shown(tensor: ShardedTensor, **_: Any) -> str:
    """A cut tensor as a script prints it."""
    return repr(gather(tensor))


def _index_numbers(seed: int, patches: Patches) -> None:
    """Draw by (seed, call, global index) from now on."""
    for owner in (torch, torch.random):
        patches.replace(owner, "manual_seed", _seeding_both)
    patches.enter_context(reproducible(seed))


def _seeding_both(plain: Any) -> Any:
    """``torch.manual_seed`` for the library's generator, too."""

    def manual_seed(seed: int) -> Any:
        seed_numbers(int(seed))
        return plain(seed)

    return manual_seed


def _seed(seed: int) -> None:
    """Let the generators of all ranks begin alike."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
