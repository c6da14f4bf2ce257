"""The code blocks of a tutorial: run in order as a reader would run them, or written as a notebook.

    python tools/tutorials.py docs/tutorials/refused.md            # run its blocks in a new folder
    python tools/tutorials.py docs/tutorials/*.md --notebooks OUT  # write OUT/NAME.ipynb, by jupytext
    python tools/tutorials.py OUT/refused.ipynb                    # execute a notebook, by nbclient

A block with a title is a file of that name. Blocks of ``bash`` are commands, those of ``python`` a program that goes on
from block to block. All others (``text``, ``toml`` without a title) are for reading. A line ``<!-- needs: gpu -->``
before a block says what a machine must have to run it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[\w -]+) -->\n)?^```(?P<kind>\w+)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
TITLE = re.compile(r'title="([^"]+)"')
DEADLINE = 300  # seconds for one block


@dataclass(frozen=True)
class Block:
    """One block of code: its language, its text, the file it is, and what it needs."""

    kind: str
    text: str
    title: str = ""
    needs: str = ""
    line: int = 0

    @property
    def does(self) -> str:
        """What a reader does with it: "write", "run", or "" for a block to read."""
        if self.title:
            return "write"
        return "run" if self.kind in ("bash", "python") else ""


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    for match in BLOCK.finditer(page):
        title = TITLE.search(match["rest"])
        line = page.count("\n", 0, match.start()) + 1
        yield Block(match["kind"], match["text"], title[1] if title else "", match["needs"] or "", line)


def available(needs: str) -> bool:
    """Has this machine what a block needs?"""
    if needs == "gpu":
        import torch

        return torch.cuda.is_available()
    if needs and shutil.which(needs) is None:
        return False
    # Slurm's commands may be installed where no cluster answers them.
    if needs not in ("srun", "sbatch"):
        return True
    return subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode == 0


#: What torch's own threads do now and then when a process with gloo ends, in scripts without Halocline too.
ABORT = "terminate called without an active exception"
AGAIN = 3  # times a command is run again for that


class Reader:
    """Follows a tutorial in a folder: writes its files, runs its commands, keeps its Python names between blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._program = folder, ""
        first = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self.environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", **os.environ, "PATH": os.pathsep.join(first)}

    def follow(self, block: Block) -> str:
        """Do what the block says. Returns what it printed; raises CalledProcessError if it fails."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            return ""
        if block.kind == "bash":
            return self._run(["bash", "-euo", "pipefail", "-c", block.text])
        # Each block is a process of its own that first runs, in silence, the blocks before it.
        quiet = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec({self._program!r})\n"
        told = self._run([sys.executable, "-c", quiet + block.text])
        self._program += block.text
        return told

    def _run(self, command: list[str], again: int = AGAIN) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=DEADLINE
        )
        if done.returncode and again and ABORT in done.stderr:
            return self._run(command, again - 1)
        if done.returncode:
            raise RuntimeError(f"{command[-1]}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def notebook_source(page: str) -> str:
    """A page as jupytext reads it: files are cells of ``%%writefile``, commands cells of ``%%bash``.

    The first command that fails ends a cell. What a cell needs stands in its metadata.
    """

    def cell(match: re.Match[str]) -> str:
        (block,) = blocks(match[0])
        if not block.does:
            return match[0]
        first = "%%bash -euo pipefail\n" if block.kind == "bash" else ""
        if block.title:
            folder = Path(block.title).parent
            first = f"%%writefile {block.title}\n"
            assert folder == Path(), "%%writefile makes no folder"
        needs = f' needs="{block.needs}"' if block.needs else ""
        return f"```python{needs}\n{first}{block.text}```"

    return BLOCK.sub(cell, page)


def notebook(page: str) -> str:
    """A page as a notebook, in JSON. Needs jupytext."""
    import jupytext

    return jupytext.writes(jupytext.reads(notebook_source(page), fmt="md"), fmt="ipynb")


def execute(text: str, folder: Path) -> Any:
    """Run a notebook's cells in a folder as Jupyter does; returns the notebook with what the cells printed.

    Cells that need what this machine has not are left out. Raises CellExecutionError where one fails. Needs nbclient.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    class Client(NotebookClient):  # type: ignore[misc]
        """Runs a cell again where torch aborted at the end of a process."""

        async def async_execute_cell(self, cell: Any, *args: Any, again: int = AGAIN, **kwargs: Any) -> Any:
            try:
                return await super().async_execute_cell(cell, *args, **kwargs)
            except CellExecutionError:
                said = "".join(output.get("text", "") for output in cell.outputs)
                if not again or not (ABORT in said or "SIGABRT" in said):
                    raise
            return await self.async_execute_cell(cell, *args, again=again - 1, **kwargs)

    book = nbformat.reads(text, as_version=4)
    book.cells = [cell for cell in book.cells if available(cell.metadata.get("needs", ""))]
    environment = {name: os.environ.get(name) for name in ("PATH", "OMP_NUM_THREADS", "COLUMNS")}
    os.environ |= {**Reader(folder).environment}
    try:
        Client(book, timeout=DEADLINE, resources={"metadata": {"path": str(folder)}}).execute()
    finally:
        for name, value in environment.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
    return book


def main() -> None:
    """Run the tutorials that are named, or write them as notebooks."""
    words = sys.argv[1:]
    if "--notebooks" in words:
        out = Path(words.pop(words.index("--notebooks") + 1))
        words.remove("--notebooks")
        out.mkdir(parents=True, exist_ok=True)
        for path in map(Path, words):
            (out / f"{path.stem}.ipynb").write_text(notebook(path.read_text()))
        return
    for path in map(Path, words):
        with tempfile.TemporaryDirectory() as name:
            if path.suffix == ".ipynb":
                book = execute(path.read_text(), Path(name))
                print(f"{path}: {sum(cell.cell_type == 'code' for cell in book.cells)} cells ran")
                continue
            reader = Reader(Path(name))
            for block in blocks(path.read_text()):
                if not available(block.needs):
                    print(f"{path}:{block.line}: needs {block.needs}, left out")
                elif block.does:
                    print(f"{path}:{block.line}: {block.does} {block.title or block.kind}")
                    print(reader.follow(block), end="", flush=True)


if __name__ == "__main__":
    main()
