"""The path of a first day, as examples/first_day has it: train on NIfTI volumes, report, predict in another folder."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_day"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "monai"])
def test_the_path_of_a_first_day(kind, tmp_path, monkeypatch):
    if kind == "monai":
        pytest.importorskip("monai")
    pytest.importorskip("nibabel")
    spec = importlib.util.spec_from_file_location("first_day_example", EXAMPLE / "first_day.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(tmp_path, kind == "monai")
    metrics = found["metrics"]
    assert {"dice", "dice/background", "dice/organ", "dice/lesion", "iou/lesion"} <= metrics.keys()
    assert metrics["dice"] > 0.8 and metrics["dice/lesion"] > 0.5
    assert len(found["right"]) == 2 and min(found["right"].values()) > 0.95
    page = (tmp_path / "elsewhere" / "run" / "report.html").read_text()
    assert "By class" in page and "lesion" in page and "for validation (data.validation = 0.2)" in page
    assert not [path.name for path in (tmp_path / "elsewhere").iterdir() if path.name.startswith(".")]
    assert "first_day_example" not in sys.modules
