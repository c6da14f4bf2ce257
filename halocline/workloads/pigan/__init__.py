"""Physics-informed GANs over subdomains (Yang et al. 2019): random Darcy flow learnt from sensors and its equation."""

from .game import Game, GameSettings, PiganRank
from .networks import RandomField, induced_source
from .players import Player, make_players
from .truth import DarcyFlow, FlowSettings

__all__ = [
    "DarcyFlow",
    "FlowSettings",
    "Game",
    "GameSettings",
    "PiganRank",
    "Player",
    "RandomField",
    "induced_source",
    "make_players",
]
