"""A process that has imported the library, of which the commands of ``bench chaos`` are forked.

What runs then is ``halocline train`` as on a command line, with its own launcher and ranks. Each is in a session of its
own, by which a trial finds its processes, whatever becomes of them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from halocline.train.template import serve_ranks

from .cluster import enter_namespace

NAMESPACE = "HALOCLINE_NAMESPACE"  # variable by which a command gets into the network of a node


def serve(channel: socket.socket, parent: int) -> None:
    """Import what commands and ranks need, then fork commands until the parent goes."""
    from halocline.cli import app  # noqa: F401
    from halocline.cli.rank_template import preload

    preload()
    serve_ranks(channel, parent, _command)


def _command() -> None:
    """In the fork: run ``halocline`` with the arguments of this process."""
    from halocline.cli import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if NAMESPACE in os.environ:
        enter_namespace(os.environ[NAMESPACE])
    main()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as told:
        serve(told, int(sys.argv[2]))
