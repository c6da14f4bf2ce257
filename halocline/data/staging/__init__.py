"""Files of a shared file system on the storage of every node, each read from the source once in all."""

from .listing import StageError
from .stage import NodeReport, StageReport, stage

__all__ = ["NodeReport", "StageError", "StageReport", "stage"]
