"""One page that shows a run: curves, predictions, time, memory and the mesh, in a single file without scripts.

``run`` reads the folder, ``sections`` decide what to show, ``charts``, ``images``, ``mesh`` and ``answers`` draw it,
and ``page`` puts it together.
"""

from .report import RunReport, write_report

__all__ = ["RunReport", "write_report"]
