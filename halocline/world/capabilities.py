"""What worlds differ in, as data: the library asks for a capability, never for the class of a world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What the library may expect of a world. The defaults are those of a plain transport between processes."""

    #: As ``hc.init(transport=...)`` names it: "torch" or "mpi"; others are not joined by name.
    transport: str
    #: False: nothing arrives, received values mean nothing, and nothing can be timed.
    moves_data: bool = True
    #: Each rank is a process with memory and random generators of its own. False: ranks are threads of one process.
    separate_processes: bool = True
    #: Messages are matched by their tags. False: some are matched by the order in which both ranks post them.
    matches_tags: bool = True
    #: A rank that waits for a peer elsewhere in the program raises at once, not at the deadline.
    detects_divergence: bool = False
    #: ``wait_any`` tells which exchange is done first, and ``wake`` ends it. False: it waits for the oldest.
    waits_for_any: bool = False
    #: In a wide duplicate the most urgent message goes first over a link.
    priorities: bool = False
    #: Tensors on GPUs travel without a copy in host memory.
    device_memory: bool = False

    @property
    def measurable(self) -> bool:
        """Does timing a message say anything about the machine?"""
        return self.moves_data and self.separate_processes
