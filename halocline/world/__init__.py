"""Ranks, the mesh they are laid out on, and the movements between them."""

from .base import Began, Exchange, Label, PendingSum, Receive, Send, Summed, Traffic, Waited, World
from .dry import DryWorld
from .joined import DEFAULT_DEADLINE
from .launcher import Place, this_place
from .local import LocalWorld, as_world, run_local
from .mesh import Mesh, forget, init, joined_world, this_world
from .movement import (
    AVERAGED,
    Bundle,
    Known,
    Move,
    MovementFunction,
    MoveTogether,
    OwnFunction,
    Route,
    Scale,
    Sum,
    begin,
    exchange_messages,
    is_movement,
    pack,
    scaled,
    unpack,
)
from .mpi import MpiWorld
from .process import ProcessWorld
from .rendezvous import new_group, serve_store
from .text import text_of

__all__ = [
    "AVERAGED",
    "DEFAULT_DEADLINE",
    "Began",
    "Bundle",
    "DryWorld",
    "Exchange",
    "Known",
    "Label",
    "LocalWorld",
    "Mesh",
    "Move",
    "MoveTogether",
    "MovementFunction",
    "MpiWorld",
    "OwnFunction",
    "PendingSum",
    "Place",
    "ProcessWorld",
    "Receive",
    "Route",
    "Scale",
    "Send",
    "Sum",
    "Summed",
    "Traffic",
    "Waited",
    "World",
    "as_world",
    "begin",
    "exchange_messages",
    "forget",
    "init",
    "is_movement",
    "joined_world",
    "new_group",
    "pack",
    "run_local",
    "scaled",
    "serve_store",
    "text_of",
    "this_place",
    "this_world",
    "unpack",
]
