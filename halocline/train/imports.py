"""The user's own Python code: imported by name, called with arguments from the settings, copied into the run.

Settings name code as ``package.module:name``. The copy is what `predict` uses later, so that it does not depend on the
folder in which the network was trained.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, did_you_mean

CODE = "code"  # in the folder of a run: the user's modules, as they were when it was trained

Made = TypeVar("Made")


def named(key: str, target: str) -> Callable[..., Any]:
    """Import the callable that ``package.module:name`` names, also from the working directory. ``key`` is the setting
    that names it, for errors."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key} = {target!r}: give package.module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _no_bytecode():
            member = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = _remedy(module, error) or did_you_mean(name, vars(sys.modules[module]) if module in sys.modules else ())
        raise ConfigError(f"{key} = {target!r} cannot be imported: {error}{hint}") from error
    if not callable(member):
        raise ConfigError(f"{key} = {target!r} is {type(member).__name__}, and cannot be called")
    if _is_standard(module) or _is_standard(getattr(member, "__module__", None) or ""):
        raise ConfigError(f"{key} = {target!r} is a part of Python itself, not of a network's code; it is not called")
    return member


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Inside, imports write no ``__pycache__``: compiled code in a run's folder would be code that its mark does not
    cover (:mod:`halocline.train.trust`)."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _is_standard(module: str) -> bool:
    """Is it a module of Python itself, such as os or subprocess? A user's module may have the same name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module.partition(".")[0] in sys.stdlib_module_names
    path, packages = Path(file).resolve(), Path(sysconfig.get_path("purelib")).resolve()
    return path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve()) and not path.is_relative_to(packages)


def _remedy(module: str, error: Exception) -> str:
    """What to do about a failed import."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    first = module.partition(".")[0]
    if error.name == first:
        return f"; run from the folder that holds {first}.py, or install the package"
    return f"; pip install {error.name}" if error.name else ""


def called(key: str, maker: Callable[..., Made], *given: Any, **arguments: Any) -> Made:
    """Call ``maker(*given, **arguments)``. ConfigError, which names the setting ``key``, for unknown arguments."""
    name = getattr(maker, "__name__", type(maker).__name__)
    try:
        expected = inspect.signature(maker)
    except (TypeError, ValueError):  # written in C
        return maker(*given, **arguments)
    try:
        expected.bind(*given, **arguments)
    except TypeError as error:
        allowed = ", ".join(list(expected.parameters)[len(given) :]) or "no arguments"
        raise ConfigError(f"{key} = {arguments}: {error}; {name} takes {allowed}") from error
    return maker(*given, **arguments)


def is_installed(path: Path) -> bool:
    """Does the file belong to Python or to an installed package?"""
    return any(path.is_relative_to(folder) for folder in _installed())


def _installed() -> list[Path]:
    """The folders of Python itself and of installed packages."""
    folders = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    return [Path(folder).resolve() for folder in folders if folder not in ("", sys.prefix, sys.base_prefix)]


def keep_code(folder: Path, target: str) -> None:
    """Copy the user's modules into the run's folder, so that `predict` can make the network anywhere.

    These are all modules imported from the folder that holds the module of ``target`` (``package.module:name``).
    Installed packages are not copied. Called on one rank, once the network has been made.
    """
    main, kept = target.partition(":")[0], folder / CODE
    shutil.rmtree(kept, ignore_errors=True)
    source = _source(sys.modules.get(main))
    if source is None:
        return
    root = _root(source, main)
    for name, module in list(sys.modules.items()):
        path = _source(module)
        if path is None or _root(path, name) != root or is_installed(path):
            continue
        copy = kept / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _source(module: Any) -> Path | None:
    """The module's file, if it is the user's own code."""
    name, source = getattr(module, "__name__", ""), getattr(module, "__file__", None) or ""
    if not source.endswith(".py") or name.partition(".")[0] in ("__main__", __name__.partition(".")[0]):
        return None
    path = Path(source).resolve()
    return None if is_installed(path) else path


def _root(path: Path, name: str) -> Path:
    """The folder from which a module of that name was imported."""
    levels = name.count(".") + (path.name == "__init__.py")
    return path.parents[min(levels, len(path.parents) - 1)]


def use_code(folder: Path) -> None:
    """From now on prefer modules that :func:`keep_code` copied over others of the same name."""
    if (folder / CODE).is_dir():
        sys.path.insert(0, str((folder / CODE).resolve()))
