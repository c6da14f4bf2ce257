"""Options that hold several numbers, such as ``--cut depth=2,height=2`` and ``--speeds 2,1``."""

from __future__ import annotations

from typing import TypeVar

from ..errors import ConfigError

Number = TypeVar("Number", int, float)


def parse_numbers(option: str, text: str, kind: type[Number], hint: str) -> list[Number]:
    """Numbers with commas between them. ConfigError with the hint if one is none."""
    try:
        return [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {hint}") from error


def parse_sizes(option: str, text: str, example: str) -> dict[str, int]:
    """Names with whole numbers, in the order given. ConfigError with the example if it is anything else."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        sizes = {name.strip(): int(size) for name, _, size in pairs}
    except ValueError as error:
        raise ConfigError(f"{option} {text}: give names and whole numbers, such as {example}") from error
    if len(sizes) < len(pairs):  # a dict keeps the last of two
        raise ConfigError(f"{option} {text}: a name is named twice; name each once, such as {example}")
    return sizes


def parse_cut(text: str, option: str = "--cut") -> dict[str, int]:
    """Ranks by axis, such as ``depth=2,height=2``. ConfigError if it is anything else."""
    return parse_sizes(option, text, "depth=2,height=2")
