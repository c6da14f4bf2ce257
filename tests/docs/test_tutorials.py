"""Every block of code in the tutorials runs as it is printed, in order, in an empty folder."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from tutorials import Reader, available, blocks, notebook  # noqa: E402

PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if path.stem != "index"}


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_tutorial_runs(name, tmp_path):
    reader = Reader(tmp_path)
    for block in blocks(PAGES[name].read_text()):
        if block.does and available(block.needs):
            reader.follow(block)


@pytest.mark.parametrize("name", PAGES)
def test_every_fence_is_seen(name):
    page = PAGES[name].read_text()
    assert len(list(blocks(page))) == page.count("\n```") // 2  # an unclosed or indented block would be left out
    assert any(block.does == "run" for block in blocks(page))


def test_the_list_names_every_tutorial():
    listed = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert [name for name in PAGES if f"({name}.md)" not in listed] == []


def test_a_failing_block_is_an_error(tmp_path):
    (wrong,) = blocks("```bash\ntrue\nfalse | cat\n```\n")
    with pytest.raises(RuntimeError, match="ended with 1"):
        Reader(tmp_path).follow(wrong)


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_has_the_same_blocks(name):
    pytest.importorskip("jupytext")
    page = PAGES[name].read_text()
    cells = [cell for cell in json.loads(notebook(page))["cells"] if cell["cell_type"] == "code"]
    wanted = [block for block in blocks(page) if block.does]
    assert len(cells) == len(wanted)
    for cell, block in zip(cells, wanted, strict=True):
        assert "".join(cell["source"]).endswith(block.text.rstrip("\n"))
