"""Public names and options are frozen in a file, and documented. ``python tools/public.py`` writes the file."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import public  # noqa: E402


def test_the_public_names_are_the_frozen_ones():
    frozen = public.FROZEN.read_text().splitlines()
    now = public.lines()
    assert sorted(set(frozen) - set(now)) == [], "gone: deprecate first (docs/versioning.md)"
    assert sorted(set(now) - set(frozen)) == [], "new: run python tools/public.py, and name it in the changelog"


def test_every_public_name_is_documented():
    assert public.undocumented() == []


def test_a_changed_parameter_shows():
    def before(x, *, cut=None):
        """One."""

    def after(x, *, cuts=None):
        """Other."""

    assert public.parameters(before) == "(x, *, cut=)" != public.parameters(after)


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text().split()
    assert len(words) <= 900
