"""Public names that changed are still there for one release, with a warning."""

from __future__ import annotations

import importlib

import pytest

RENAMED = [
    ("halocline.data", "Report", "LoaderReport"),
    ("halocline.data", "Move", "ViewChange"),
    ("halocline.data", "Dice", "AugmentationDraws"),
    ("halocline.doctor", "Report", "DoctorReport"),
    ("halocline.workloads", "Scale", "WorkloadSize"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_gives_the_new_class(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(home, old) is getattr(home, new)
    assert new in home.__all__ and old not in home.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        home.Nothing  # noqa: B018
