"""Print the lines of every Python file and the lengths of functions; fail where a file is too long."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("halocline", "tests", "tools")
LIMIT = 400


def function_lengths(source: str) -> list[int]:
    """Lines of each function from `def` to its last line, docstring included."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f.end_lineno - f.lineno + 1 for f in functions]


def median_and_p90(lengths: list[int]) -> str:
    if len(lengths) < 2:
        return "too few functions to measure"
    return f"median {statistics.median(lengths):g}, p90 {statistics.quantiles(lengths, n=10, method='inclusive')[-1]:g}"


def measure(folder: str) -> dict[str, int]:
    """Print one folder's figures and return the lines of each of its files."""
    sources = {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted((ROOT / folder).rglob("*.py"))}
    lines = {name: len(source.splitlines()) for name, source in sources.items()}
    lengths = [length for source in sources.values() for length in function_lengths(source)]
    for name, count in lines.items():
        print(f"{count:6} {name}")
    print(f"{sum(lines.values()):6} {folder}, {len(lines)} files; lines a function: {median_and_p90(lengths)}\n")
    return lines


def main() -> int:
    lines = {name: count for folder in FOLDERS for name, count in measure(folder).items()}
    print(f"{sum(lines.values()):6} total, {len(lines)} files")
    too_long = [name for name, count in lines.items() if count > LIMIT]
    if too_long:
        print(f"over {LIMIT} lines: {', '.join(too_long)}", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
