"""Tests against the packages of others: `make integrations` installs all of them, and then none may be missing."""

import importlib
import os

import pytest


@pytest.fixture(scope="session")
def package():
    """Import a package by name. Where it is missing the test is skipped, but fails under `make integrations`."""

    def imported(name):
        if os.environ.get("HALOCLINE_INTEGRATIONS") == "1":
            return importlib.import_module(name)
        return pytest.importorskip(name)

    return imported
