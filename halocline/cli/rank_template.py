"""``python -m halocline.cli.rank_template SOCKET LAUNCHER``: imports what ranks need, then forks them."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

from ..train.template import serve_ranks
from . import end_at_once_on_failure
from .train_rank import main as run


def preload() -> None:
    """Import what every rank would, sooner or later. Nothing is computed: that could start threads."""
    import torch

    from ..train import config, forecast, trainer  # noqa: F401

    torch.compiler.disable(preload)  # imports what optimizers import at their first step
    with suppress(Exception):  # which need not be installed
        import torch.utils.tensorboard


def serve(channel: socket.socket, launcher: int) -> None:
    """Import, then fork ranks until the launcher goes."""
    preload()
    serve_ranks(channel, launcher, lambda: end_at_once_on_failure(run))


def main() -> None:
    """In an interpreter of its own."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel, int(sys.argv[2]))


if __name__ == "__main__":
    main()
