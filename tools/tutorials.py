"""The code blocks of a tutorial: run in order as a reader would run them, or written as a notebook.

    python tools/tutorials.py docs/tutorials/refused.md            # run its blocks in a new folder
    python tools/tutorials.py docs/tutorials/*.md --notebooks OUT  # write OUT/NAME.ipynb, by jupytext

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
    return not needs or shutil.which(needs) is not None


#: What torch's own threads do now and then when a process with gloo ends, in scripts without Halocline too.
ABORT = "terminate called without an active exception"


class Reader:
    """Follows a tutorial in a folder: writes its files, runs its commands, keeps its Python names between blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._program = folder, ""
        first = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self._environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", **os.environ, "PATH": os.pathsep.join(first)}

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

    def _run(self, command: list[str], again: bool = True) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=DEADLINE
        )
        if done.returncode and again and ABORT in done.stderr:
            return self._run(command, again=False)
        if done.returncode:
            raise RuntimeError(f"{command[-1]}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def notebook_source(page: str) -> str:
    """A page as jupytext reads it: files are cells of ``%%writefile``, commands cells of ``%%bash``."""

    def cell(match: re.Match[str]) -> str:
        (block,) = blocks(match[0])
        if not block.does:
            return match[0]
        first = f"%%writefile {block.title}\n" if block.title else "%%bash\n" if block.kind == "bash" else ""
        return f"```python\n{first}{block.text}```"

    return BLOCK.sub(cell, page)


def notebook(page: str) -> str:
    """A page as a notebook, in JSON. Needs jupytext."""
    import jupytext

    return jupytext.writes(jupytext.reads(notebook_source(page), fmt="md"), fmt="ipynb")


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
            reader = Reader(Path(name))
            for block in blocks(path.read_text()):
                if not available(block.needs):
                    print(f"{path}:{block.line}: needs {block.needs}, left out")
                elif block.does:
                    print(f"{path}:{block.line}: {block.does} {block.title or block.kind}")
                    print(reader.follow(block), end="", flush=True)


if __name__ == "__main__":
    main()
