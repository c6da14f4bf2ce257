"""The spatial METG: that of ``stencil_3d`` through a rule, with faces as bytes, for the description of a machine."""

from __future__ import annotations

import json
from pathlib import Path

from ..plan.machine import Machine, load_machine
from .graph import TaskBenchError
from .measure import TaskBenchResult, TaskBenchSettings

PATTERN = "stencil_3d"


def write_spatial_metg(path: Path, settings: TaskBenchSettings, result: TaskBenchResult) -> None:
    """Set ``spatial_metg_us`` in a machine file, with how it was measured. Raises if it was not."""
    load_machine(str(path))  # refuses what is no machine, before it is changed
    measured = [(each.runtime, each.metg) for each in result.curves if each.pattern == PATTERN and each.metg]
    chosen = next((each for each in measured if each[0].startswith("tensor")), next(iter(measured), None))
    if chosen is None or chosen[1] is None:
        raise TaskBenchError(
            f"--machine {path}: METG of {PATTERN} was not measured, or no task was large enough; give "
            "--pattern stencil_3d --runtime tensor"
        )
    faces = f"{settings.ranks} ranks, faces of {settings.output_bytes:,} bytes"
    reference = f"halocline taskbench --pattern {PATTERN} --runtime {chosen[0]}, {faces}"
    content = json.loads(path.read_text("utf-8"))
    content["spatial_metg_us"] = {"value": chosen[1] * 1e6, "source": "measured", "reference": reference}
    Machine.model_validate(content)
    path.write_text(json.dumps(content) + "\n", "utf-8")
