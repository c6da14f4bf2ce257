"""The command line. One file a command; they alone know typer, rich and matplotlib."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run ``halocline``."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"halocline: the commands need {error.name}; install them with: pip install 'halocline[cli]'")
    app()
