"""Links of the pages outside the site lead somewhere; `mkdocs build --strict` checks those of the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s#]+)")


def broken(page: Path, text: str) -> list[str]:
    """The targets of relative links that do not exist, seen from the page's folder."""
    plain = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.M | re.S)
    return [target for target in LINK.findall(plain) if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found():
    text = "[one](README.md), [two](missing.md#part), [three](https://example.org/none.md), `[code](no.md)`"
    assert broken(ROOT / "README.md", text) == ["missing.md"]
