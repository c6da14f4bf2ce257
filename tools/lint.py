"""Checks of the package's own rules that no linter knows; prints each offence and fails if there is one.

Private names of torch stand in ``_torch_private.py`` alone, and no class name is defined twice in the package.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "halocline"
PRIVATE = "_torch_private.py"
NAMED_TUPLE = {"_asdict", "_fields", "_replace"}  # Python's own


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Private names that the package itself defines: functions, classes, attributes, modules, slots."""
    names = {path.stem for path in trees} | NAMED_TUPLE
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                names.update(item.value for item in ast.walk(value) if isinstance(item, ast.Constant))
    return names


def torch_names(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Private names that are not the package's own, by import, by attribute, or inside a string given to getattr."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                parts = [*module.split("."), *(alias.name for alias in aliases)]
                if parts[0] == "torch" and any(is_private(part) for part in parts):
                    yield node.lineno, f"from {module} import {', '.join(alias.name for alias in aliases)}"
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.startswith("torch.") and any(is_private(part) for part in alias.name.split(".")):
                        yield node.lineno, f"import {alias.name}"
            case ast.Attribute(value=ast.Name(id="sys" | "atexit" | "threading")):
                pass  # sys._getframe and others are Python's
            case ast.Attribute(attr=name) if is_private(name) and name not in known:
                yield node.lineno, f".{name}"
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name) and name not in known:
                    yield node.lineno, f"getattr {name!r}"


def main() -> int:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    known, offences = own_names(trees), []
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        place = path.relative_to(ROOT).as_posix()
        if path.name != PRIVATE:
            offences += [f"{place}:{line}: a private name of torch: {what}" for line, what in torch_names(tree, known)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{place}:{node.lineno}")
    offences += [
        f"class {name} is defined {len(at)} times: {', '.join(at)}" for name, at in classes.items() if len(at) > 1
    ]
    print("\n".join(offences) or "package rules: kept")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
