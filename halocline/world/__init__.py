"""Ranks, the mesh they are laid out on, and the movements between them."""

from .base import Began, Exchange, Label, Receive, Send, Summed, Traffic, Waited, World
from .dry import DryWorld
from .local import LocalWorld, as_world, run_local
from .mesh import Mesh, forget, init, this_world
from .movement import AVERAGED, Move, Route, Scale, Sum, scaled
from .process import ProcessWorld

__all__ = [
    "AVERAGED",
    "Began",
    "DryWorld",
    "Exchange",
    "Label",
    "LocalWorld",
    "Mesh",
    "Move",
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
    "forget",
    "init",
    "run_local",
    "scaled",
    "this_world",
]
