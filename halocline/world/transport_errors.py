"""Why a message cannot come or go: what transports raise, and worlds tell the user as a RankFailure."""

from __future__ import annotations


class TransportError(OSError):
    """A message from or to ``peer`` will not arrive."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Diverged(TransportError):
    """The peer sent another message than the one awaited, which proves that it is elsewhere in the program."""
