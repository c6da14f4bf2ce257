"""Random numbers by (seed, call, global index): the same for every cut, and in recomputation.

Random functions on sharded tensors always draw here. Inside :func:`reproducible` those on plain tensors do too: then an
untouched network on one rank draws what the cut one draws, and whole code draws the same on every rank.
"""

from .mode import reproducible
from .seeds import watch_draws
from .state import get_state, same_state, seed, set_state

__all__ = ["get_state", "reproducible", "same_state", "seed", "set_state", "watch_draws"]
