"""Every block of code in the tutorials runs as it is printed, in order, in an empty folder."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from tutorials import Reader, available, blocks, notebook  # noqa: E402

PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if path.stem != "index"}


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_tutorial_runs(name, tmp_path):
    """As the notebook, whose cells are the blocks, and as a reader without Jupyter where that is not installed."""
    if all(find_spec(each) for each in ("jupytext", "nbclient", "ipykernel")):
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "tutorials.py"), written(name, tmp_path)],
                              capture_output=True, text=True, timeout=900)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        ready = [block for block in blocks(PAGES[name].read_text()) if block.does and available(block.needs)]
        assert f"{len(ready)} cells ran" in done.stdout
        return
    reader = Reader(tmp_path)
    for block in blocks(PAGES[name].read_text()):
        if block.does and available(block.needs):
            reader.follow(block)


def written(name, folder):
    """The path of a tutorial's notebook."""
    path = folder / f"{name}.ipynb"
    path.write_text(notebook(PAGES[name].read_text()))
    return str(path)


SMALL = """
```python title="one.py"
print(1)
```

```bash
python one.py
false | cat
```

```python
two = 2
```

<!-- needs: no-such-program -->
```bash
exit 1
```
"""


@pytest.mark.long
def test_a_notebook_stops_at_the_first_command_that_fails(tmp_path):
    pytest.importorskip("nbclient")
    (tmp_path / "bad.ipynb").write_text(notebook(SMALL))
    (tmp_path / "good.ipynb").write_text(notebook(SMALL.replace("false | cat", "true")))
    command = [sys.executable, str(ROOT / "tools" / "tutorials.py")]
    good = subprocess.run([*command, str(tmp_path / "good.ipynb")], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0 and "3 cells ran" in good.stdout, good.stderr[-2000:]
    bad = subprocess.run([*command, str(tmp_path / "bad.ipynb")], capture_output=True, text=True, timeout=120)
    assert bad.returncode and "CellExecutionError" in bad.stderr


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
