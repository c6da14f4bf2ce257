"""Ranks, the mesh they are laid out on, and the movements between them."""

from .base import Began, Exchange, Label, PendingSum, Receive, Send, Summed, Traffic, Waited, World
from .dry import DryWorld
from .local import LocalWorld, as_world, run_local
from .mesh import Mesh, forget, init, this_world
from .movement import (
    AVERAGED,
    Bundle,
    Known,
    Move,
    MoveTogether,
    Route,
    Scale,
    Sum,
    begin,
    exchange_messages,
    pack,
    scaled,
    unpack,
)
from .mpi import MpiWorld
from .process import ProcessWorld

__all__ = [
    "AVERAGED",
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
    "MpiWorld",
    "PendingSum",
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
    "pack",
    "run_local",
    "scaled",
    "this_world",
    "unpack",
]
