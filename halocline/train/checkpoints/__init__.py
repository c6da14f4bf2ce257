"""Checkpoints of a run: written in the background, whole or not there at all, and verified before they are used.

``saving`` has the class that a run uses; ``files`` the folders, checksums and the lock; ``store`` tensors in the format
of torch.distributed.checkpoint; ``tree`` everything else as JSON; ``peers`` how ranks agree.
"""

from .files import CHECKPOINTS, Folder
from .peers import CheckpointError, Mismatch
from .saving import Checkpoints, Loaded
from .tree import named_tensors

__all__ = ["CHECKPOINTS", "CheckpointError", "Checkpoints", "Folder", "Loaded", "Mismatch", "named_tensors"]
