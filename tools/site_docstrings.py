"""Prepare docstrings as Markdown for the site: roles of Sphinx, doctests and indented code become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")


def as_markdown(text: str) -> str:
    """A docstring as Markdown.

    >>> print(as_markdown("See :class:`Loader`.\\n\\n>>> 1 + 1\\n2\\n\\nMore."))
    See `Loader`.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    """
    lines, example = [], False
    for line in ROLE.sub(r"`\1`", text).splitlines():
        if line.lstrip().startswith(">>> ") and not example:
            lines.append("```pycon")
            example = True
        elif example and not line.strip():
            lines.append("```")
            example = False
        lines.append(line.strip() if example else line)
    return "\n".join([*lines, *(["```"] if example else [])])


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
