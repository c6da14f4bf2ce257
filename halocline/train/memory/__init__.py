"""Copies of the newest state in memory, from which a run comes back without reading a checkpoint.

``holder`` is the process of each node that keeps them; ``client`` how ranks talk to it; ``copies`` what is copied,
and to which node; ``restore`` how ranks find the newest whole state and put it together; ``run`` when it is done.
"""

from .copies import StateCopies
from .run import RunCopies

__all__ = ["RunCopies", "StateCopies"]
