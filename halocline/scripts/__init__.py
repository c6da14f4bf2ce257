"""Ordinary single-device scripts on many ranks, unmodified: ``halocline run``."""

from .session import ScriptOptions, run_script

__all__ = ["ScriptOptions", "run_script"]
