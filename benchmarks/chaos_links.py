"""Nodes of an emulated cluster for the trials of ``bench chaos``, and links that are cut, slow, or come back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

from halocline.world.secret import SECRET, new_secret

from .chaos_template import NAMESPACE
from .cluster import execute, missing, remove, remove_leftovers
from .topology import ShellCommand, Topology, setup_commands

NODES = 4
_PORT = 29500


class Links:
    """Four nodes in network namespaces of this machine, joined by a switch; made once for all trials."""

    def __init__(self) -> None:
        remove_leftovers()
        self._topology = Topology(NODES, rate="1gbit", owner=os.getpid())
        self._remove: Any = weakref.finalize(self, remove, self._topology)
        self._secret, self._starts = new_secret(), 0
        for command in setup_commands(self._topology):
            execute(command)

    @staticmethod
    def possible() -> bool:
        """May this process make network namespaces, and has it the programs?"""
        return not missing()

    def variables(self, ranks: int) -> list[dict[str, str]]:
        """The environment of each rank of a start, one rank a node, as torchrun would set it."""
        self._starts += 1
        port = str(_PORT + self._starts % 1000)
        common = {
            "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR", SECRET: self._secret,
        }  # fmt: skip
        own: list[Mapping[str, str]] = [
            {"RANK": str(rank), "GROUP_RANK": str(rank), NAMESPACE: self._topology.namespace(rank)}
            for rank in range(ranks)
        ]
        return [{**common, **each} for each in own]

    def cut(self, node: int) -> None:
        """Pull a node's cable at the switch: packets vanish, and nobody is told."""
        self._port(node, "down")

    def mend(self) -> None:
        """Put all cables in again."""
        for node in range(NODES):
            self._port(node, "up")

    def _port(self, node: int, state: str) -> None:
        execute(ShellCommand(("ip", "-n", self._topology.switch, "link", "set", f"n{node}r0", state)))

    def close(self) -> None:
        """Remove the namespaces."""
        self._remove()
