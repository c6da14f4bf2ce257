"""Print how large the house is: lines a room, shares of docstrings and comments, functions; fail on a long file.

``--files`` lists every file. Code lines are those that are neither blank, nor comment, nor docstring.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("halocline", "benchmarks", "tests", "tools")
LIMIT = 400
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Size:
    """Of one file, or of several."""

    files: int = 0
    lines: int = 0
    docstrings: int = 0
    comments: int = 0
    code: int = 0
    functions: list[int] = field(default_factory=list)

    def __add__(self, other: Size) -> Size:
        return Size(*(getattr(self, name) + getattr(other, name) for name in Size.__dataclass_fields__))

    def row(self, name: str) -> str:
        shares = [f"{part / max(1, self.code):5.2f}" for part in (self.docstrings, self.comments)]
        return f"{name:24}{self.files:6}{self.lines:8}{self.code:8}{shares[0]:>10}{shares[1]:>9}  {self._lengths()}"

    def _lengths(self) -> str:
        if len(self.functions) < 2:
            return "-"
        p90 = statistics.quantiles(self.functions, n=10, method="inclusive")[-1]
        return f"{statistics.median(self.functions):g} / {p90:g} / {max(self.functions)}"


def docstring_lines(tree: ast.Module) -> set[int]:
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | Function)]
    texts = [node.body[0] for node in owners if ast.get_docstring(node, clean=False) is not None]
    return {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}


def comment_count(source: str) -> int:
    """Comments on a line of their own, and those behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT and not token.string.startswith("# type:") for token in tokens)


def measure(path: Path) -> Size:
    source = path.read_text("utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    documented = docstring_lines(tree)
    bare = [number for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    lengths = [node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, Function)]
    code = len(set(bare) - documented)
    return Size(1, len(lines), len(documented), comment_count(source), code, lengths)


def called_once(folder: Path) -> tuple[int, int]:
    """Private functions whose name stands in the folder's code once beside its definition; and all of them."""
    defined, named = set(), Counter()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.FunctionDef(name=name) if name.startswith("_") and not name.endswith("__"):
                    defined.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    named[name] += 1
    return sum(named[name] == 1 for name in defined), len(defined)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*"


def main() -> int:
    sizes = {path: measure(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    rooms: dict[str, Size] = {}
    heads = f"{'room':24}{'files':>6}{'lines':>8}{'code':>8}{'docstring':>10}{'comment':>9}"
    print(f"{heads}  lines a function: median / p90 / most")
    for path, size in sizes.items():
        rooms[room_of(path)] = rooms.get(room_of(path), Size()) + size
        rooms[path.relative_to(ROOT).parts[0]] = rooms.get(path.relative_to(ROOT).parts[0], Size()) + size
        if "--files" in sys.argv:
            print(size.row(path.relative_to(ROOT).as_posix()))
    for name, size in sorted(rooms.items()):
        print(size.row(name))
    once, private = called_once(ROOT / "halocline")
    print(f"private functions called once: {once} of {private}")
    too_long = [path.relative_to(ROOT).as_posix() for path, size in sizes.items() if size.lines > LIMIT]
    if too_long:
        print(f"over {LIMIT} lines: {', '.join(too_long)}", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
