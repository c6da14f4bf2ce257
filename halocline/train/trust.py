"""Whether the code that a run's folder names may be executed: only if this user made the run, or says so.

``config.toml`` names Python code (``model``, ``loss``, ...), and ``code/`` holds a copy. Training marks the folder with
a keyed hash of both, by a secret in the user's home folder. A folder that another user made, or that was changed
since, has no such mark; commands refuse to execute what it names unless they are given ``--trust``.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError, MeshError
from ..world.secret import from_hex, user_secret
from .imports import CODE
from .log import write_whole
from .settings import Settings

MARK = "trust"  # file in the folder of a run
#: Modules of PyTorch that hold layers, losses and optimizers alone; others load files, or code.
_BUILT_IN = ("torch.nn:", "torch.nn.functional:", "torch.nn.modules.", "torch.optim:")


def code_of(settings: Settings) -> list[str]:
    """The Python code that settings name beyond PyTorch's own, as ``key = package.module:name``."""
    named = [("model", settings.model), ("loss", settings.loss), ("optimizer.name", settings.optimizer.name)]
    named += [("callbacks", each) for each in settings.callbacks] + [("metrics", each) for each in settings.metrics]
    return [f"{key} = {name!r}" for key, name in named if name and ":" in name and not name.startswith(_BUILT_IN)]


def mark_run(folder: Path, settings: Settings) -> None:
    """Mark a run as this user's own; without a home folder it stays unmarked. By one rank, once the code is copied."""
    with suppress(MeshError):  # a secret that others can read proves nothing
        if (secret := user_secret(os.environ)) is None:
            return
        write_whole(folder / MARK, secret.proof(*_facts(folder, settings)).hex() + "\n")


def check_trusted(folder: Path, settings: Settings, trust: bool) -> None:
    """Raise ConfigError if the run names code and was not made by this user, unless they ``trust`` it.

    Must be called before anything that the settings name is imported. A trusted folder that can be written is marked.
    """
    code = code_of(settings)
    if not code or _is_marked(folder, settings):
        return
    if not trust:
        more = f" and {len(code) - 1} more" if len(code) > 1 else ""
        raise ConfigError(
            f"{folder} names Python code ({code[0]}{more}), and was not made by this user as it is now; look at its "
            f"config.toml and {CODE}/, and give --trust to execute them"
        )
    if os.access(folder, os.W_OK):
        mark_run(folder, settings)


def _is_marked(folder: Path, settings: Settings) -> bool:
    """Has this user made the run, and is its code what it was then?"""
    try:
        secret = user_secret(os.environ)
        mark = (folder / MARK).read_bytes()[:256].decode(errors="replace").strip()
        return secret is not None and secret.proves(from_hex(mark), *_facts(folder, settings))
    except (OSError, MeshError):
        return False


def _facts(folder: Path, settings: Settings) -> tuple[str, ...]:
    """What the mark is about: the names of all code, its arguments, and the copies in the folder."""
    told = (settings.network, settings.loss_options, settings.optimizer.options)
    arguments = json.dumps(told, sort_keys=True, default=str)  # the same before and after they were written as TOML
    kept = folder / CODE
    files = sorted(path for path in kept.rglob("*") if path.is_file()) if kept.is_dir() else []
    copies = [f"{path.relative_to(kept)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return ("run", *code_of(settings), arguments, *copies)
