"""Questions to torch that belong to planning a call, such as "which shape has this result?".

They are not part of the user's program, so records of a program leave them out, and no dispatch mode sees them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .._torch_private import disable_dispatch_modes

_now = threading.local()


def planning() -> bool:
    """Is a call being planned in this thread? Records of a program leave out what torch is asked meanwhile."""
    return getattr(_now, "planning", False)


@contextmanager
def planned() -> Iterator[None]:
    """Inside, no dispatch mode sees what torch is asked, and :func:`planning` is true."""
    before, _now.planning = planning(), True
    try:
        with disable_dispatch_modes():
            yield
    finally:
        _now.planning = before
