"""Scripts run on the ranks of a pool, and read back."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halocline.scripts import ScriptOptions, run_script

SCRIPTS = Path(__file__).parent / "scripts"


def run_here(script: Path, arguments: Sequence[str], folder: Path, cut: dict[str, int], numbers: str = "torch") -> str:
    """What the script prints on this rank; it runs in ``folder``."""
    before, dtype, output = Path.cwd(), torch.get_default_dtype(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output):
            run_script(script, arguments, ScriptOptions(cut, numbers))
    finally:
        os.chdir(before)
        torch.set_default_dtype(dtype)
    return output.getvalue()


def largest_difference(a: Any, b: Any) -> float:
    """Between two saved structures; infinite where they are not alike."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return max(map(largest_difference, a, b), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    return 0.0 if type(a) is type(b) and a == b else float("inf")
