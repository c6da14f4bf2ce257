"""Ranks, the mesh they are laid out on, and the movements between them."""

from .base import Receive, Send, Tape, World
from .capabilities import Capabilities
from .comm_thread import CommThread
from .crossing import (
    Arrival,
    CrossingRoute,
    GradientArrival,
    MoveAcross,
    PendingCrossing,
    cross,
    cross_back,
    send_gradient,
    send_tile,
)
from .dry import DryWorld
from .events import Averaged, Begun, Computed, Event, EventStream, Label, Redistributed, Summed, Traffic, Waited
from .joined import DEFAULT_DEADLINE
from .launcher import LOOPBACK, RankInfo, this_rank_info
from .local import LocalWorld, as_world, run_local
from .mesh import Mesh, forget, init, joined_world, this_world
from .movement import (
    AVERAGED,
    Bundle,
    KnownMove,
    MeanOfGradient,
    MoveBoxes,
    MovementFunction,
    MoveTogether,
    OwnFunction,
    Route,
    ScaleGradient,
    Sum,
    begin,
    exchange_messages,
    is_movement,
    pack,
    scaled,
    unpack,
)
from .mpi import MpiWorld
from .pending import PendingExchange, PendingSum
from .placement import place_buffers, place_parameter, placement_of, ranks_with_same
from .process import ProcessWorld
from .rendezvous import new_group, serve_store
from .sameness import SumToPlain, begin_comparison, worth_comparing
from .secret import SECRET, new_secret
from .submesh import SubWorld
from .tensor_bytes import in_host_memory, memory_of
from .text import broadcast_text

__all__ = [
    "AVERAGED",
    "DEFAULT_DEADLINE",
    "LOOPBACK",
    "SECRET",
    "Arrival",
    "Averaged",
    "Begun",
    "Bundle",
    "Capabilities",
    "CommThread",
    "Computed",
    "CrossingRoute",
    "DryWorld",
    "Event",
    "EventStream",
    "GradientArrival",
    "KnownMove",
    "Label",
    "LocalWorld",
    "MeanOfGradient",
    "Mesh",
    "MoveAcross",
    "MoveBoxes",
    "MoveTogether",
    "MovementFunction",
    "MpiWorld",
    "OwnFunction",
    "PendingCrossing",
    "PendingExchange",
    "PendingSum",
    "ProcessWorld",
    "RankInfo",
    "Receive",
    "Redistributed",
    "Route",
    "ScaleGradient",
    "Send",
    "SubWorld",
    "Sum",
    "SumToPlain",
    "Summed",
    "Tape",
    "Traffic",
    "Waited",
    "World",
    "as_world",
    "begin",
    "begin_comparison",
    "broadcast_text",
    "cross",
    "cross_back",
    "exchange_messages",
    "forget",
    "in_host_memory",
    "init",
    "is_movement",
    "joined_world",
    "memory_of",
    "new_group",
    "new_secret",
    "pack",
    "place_buffers",
    "place_parameter",
    "placement_of",
    "ranks_with_same",
    "run_local",
    "scaled",
    "send_gradient",
    "send_tile",
    "serve_store",
    "this_rank_info",
    "this_world",
    "unpack",
    "worth_comparing",
]
