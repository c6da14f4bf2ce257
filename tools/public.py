"""The public names of the package and the options of its commands, frozen in tests/public_names.txt.

``python tools/public.py`` writes the file; ``--check`` fails where it differs, or where a public name has no docstring.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "public_names.txt"

#: Public modules: all of their ``__all__``, or the names that are listed.
MODULES: dict[str, tuple[str, ...]] = {
    "halocline": (),
    "halocline.data": (),
    "halocline.train": (),
    "halocline.testing": (),
    "halocline.random": (),
    "halocline.simulate": (),
    "halocline.doctor": (),
    "halocline.workloads": (),
    "halocline.zoo": ("NoSuchNetwork", "NotInstalled", "Zoo", "ZooEntry"),
    "halocline.errors": (
        "BadSample", "ConfigError", "DataError", "HaloclineError", "MeshError", "NoRule", "PlanError", "RankFailure",
        "Refused", "ShardingError", "SizeError",
    ),
    "halocline.geometry": (
        "Access", "Adaptive", "Box", "Concatenated", "Interval", "Mirror", "Partition", "Same", "Transposed", "Window",
    ),
    "halocline.rules": ("Local", "Reduced", "Reduction", "RingSteps", "RingWork", "Work", "entries", "forget_rule"),
    "halocline.world": (
        "Capabilities", "DryWorld", "Event", "LocalWorld", "MpiWorld", "PendingExchange", "PendingSum", "ProcessWorld",
        "Receive", "Send", "Traffic", "World",
    ),
    "halocline.reduction": ("Rings",),
    "halocline.plan.api": ("load_plan", "plan"),
    "halocline.integrations": ("MLflow", "WandB", "monai_bundle"),
}  # fmt: skip


def names_of(module: str) -> list[str]:
    """The public names of a module."""
    listed = MODULES[module] or tuple(importlib.import_module(module).__all__)
    return sorted(listed, key=str.lower)


def public() -> Iterator[tuple[str, str, Any]]:
    """Module, name and object of every public name."""
    for module in MODULES:
        room = importlib.import_module(module)
        for name in names_of(module):
            yield module, name, getattr(room, name)


def parameters(member: Any) -> str:
    """The names of a callable's parameters, in parentheses; "" for anything else."""
    if not callable(member) or isinstance(member, ModuleType):
        return ""
    try:
        listed = inspect.signature(member).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    words, keyword = [], False
    for each in listed:
        if each.kind is each.KEYWORD_ONLY and not keyword:
            words.append("*")
        keyword = keyword or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{mark}{each.name}" + ("" if each.default is each.empty else "="))
    return f"({', '.join(words)})"


def commands(command: Any = None, path: str = "halocline") -> Iterator[tuple[str, Any]]:
    """Every command of ``halocline`` with its full name, without the benchmarks, which are no part of the package."""
    if command is None:
        from halocline.cli.app import app

        command = typer.main.get_command(app)
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        if path != "halocline" or name != "bench":
            yield from commands(each, f"{path} {name}")


def lines() -> list[str]:
    """The frozen file: a line for each name and each command."""
    listed = [f"{module}.{name}{parameters(member)}" for module, name, member in public()]
    for path, command in commands():
        options = [word for each in command.params for word in (*each.opts, *each.secondary_opts)]
        listed.append(" ".join([path, *options]))
    return listed


def undocumented() -> list[str]:
    """Public classes, functions and modules, and options, that say nothing of themselves."""
    silent = [
        f"{module}.{name}"
        for module, name, member in public()
        if (inspect.isclass(member) or inspect.isroutine(member) or inspect.ismodule(member))
        and not (inspect.getdoc(member) or "").strip()
    ]
    for path, command in commands():
        silent += [] if command.help else [path]
        silent += [f"{path} {each.opts[0]}" for each in command.params if not getattr(each, "help", "")]
    return silent


def main() -> int:
    """Write the file, or compare with it."""
    text = "\n".join(lines()) + "\n"
    silent = undocumented()
    for name in silent:
        print(f"{name} has no docstring or help")
    if "--check" not in sys.argv:
        FROZEN.write_text(text)
        return bool(silent)
    frozen = FROZEN.read_text() if FROZEN.exists() else ""
    for line in sorted(set(frozen.splitlines()) ^ set(text.splitlines())):
        print(f"{'gone' if line in frozen.splitlines() else 'new'}: {line}")
    if frozen != text:
        print(f"the public names differ from {os.path.relpath(FROZEN, ROOT)}; if you mean it, run tools/public.py")
    return bool(silent) or frozen != text


if __name__ == "__main__":
    sys.exit(main())
