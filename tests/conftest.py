"""Shared by all tests: one thread a process, GPU tests only where there is one, the sweep's counts at the end."""

import sys

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the random sweep tried, with the ranges it drew from."""
    sweep = sys.modules.get("test_sweep")
    if sweep is None or not sweep.COUNTS:
        return
    import ranges

    bounds = {name: value for name, value in vars(ranges).items() if name.isupper() and isinstance(value, tuple)}
    terminalreporter.section("random sweep")
    terminalreporter.line(f"ranges: {bounds}")
    for family, counts in sweep.COUNTS.items():
        terminalreporter.line(f"{family}: {dict(sorted(counts.items()))}")
