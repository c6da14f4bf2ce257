"""Ranks, the mesh they are laid out on, and the movements between them."""

from .base import Exchange, Label, Receive, Send, Traffic, World
from .local import LocalWorld, run_local
from .mesh import Mesh, forget, init, this_world
from .movement import Move, Route, Scale, Sum
from .process import ProcessWorld

__all__ = [
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
    "Traffic",
    "World",
    "forget",
    "init",
    "run_local",
    "this_world",
]
