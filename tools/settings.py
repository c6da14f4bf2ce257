"""Write docs/settings.md from the settings' own classes: every key with its type, default and meaning.

python tools/settings.py            # write it
python tools/settings.py --check    # is it up to date?
"""

import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from halocline.train.settings import Settings

OUT = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings of a run

Every setting of `halocline train`, as keys of a TOML file or with `--set key=value`. Only `workload`, or `model`,
`loss` and `data`, must be given. [training.md](training.md) says how they go together. `tools/settings.py` writes this
page.
"""


def comments(kind: type) -> dict[str, str]:
    """What is said of each field: the comment at the end of its line."""
    source = inspect.getsource(kind)
    found = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            line = source.splitlines()[node.end_lineno - 1]
            found[node.target.id] = line.partition("  # ")[2].strip()
    return found


def default_of(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    if value is None or value in ({}, [], ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def type_of(hint: Any) -> str:
    words = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    words = re.sub(r"typing\.|collections\.abc\.", "", words).replace(" | None", "")
    words = re.sub(r"Optional\[(.*)\]", r"\1", words)
    literal = re.fullmatch(r"Literal\[(.*)\]", words)
    if literal:
        return ", ".join(f"`{word.strip().strip(chr(34) + chr(39))}`" for word in literal.group(1).split(","))
    names = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "list[str]": "list of text",
    }
    if words.startswith("dict"):
        return "table"
    return names.get(words, "two numbers" if words.startswith("tuple") else words)


def table(kind: type, prefix: str) -> list[str]:
    told, rows, inner, hints = comments(kind), [], [], get_type_hints(kind)
    for field in fields(kind):
        value = field.default if field.default is not MISSING else None
        if is_dataclass(value):
            inner += section(type(value), f"{prefix}{field.name}", told[field.name])
            continue
        cells = (f"`{prefix}{field.name}`", type_of(hints[field.name]), default_of(field), told[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return ["| key | value | default | |", "|---|---|---|---|", *rows, "", *inner]


def section(kind: type, name: str, more: str) -> list[str]:
    words = " ".join((inspect.getdoc(kind) or "").split()).replace("``", "`")
    return [
        f"## {name}",
        "",
        " ".join(filter(None, [words, f"({more})" if more else ""])),
        "",
        *table(kind, f"{name}."),
    ]


def page() -> str:
    return HEAD + "\n" + "\n".join(table(Settings, "")).rstrip() + "\n"


def main() -> None:
    if "--check" not in sys.argv:
        OUT.write_text(page())
    elif not OUT.exists() or OUT.read_text() != page():
        sys.exit(f"{OUT.name} is not up to date: run python tools/settings.py")


if __name__ == "__main__":
    main()
