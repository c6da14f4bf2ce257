"""Draw docs/pictures/*.d2 as SVG with D2 (``pip install pyd2lang-native``); ``--check`` compares them by their source.

Each SVG ends with a hash of the text that it was drawn from, so that a check needs no D2.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def mark(source: str) -> str:
    return f"<!-- drawn from {hashlib.sha256(source.encode()).hexdigest()} -->\n"


def main() -> int:
    stale = []
    for path in sorted(PICTURES.glob("*.d2")):
        source, out = path.read_text("utf-8"), path.with_suffix(".svg")
        if "--check" not in sys.argv:
            import d2

            out.write_text(d2.compile(source) + mark(source), "utf-8")
        elif not out.exists() or not out.read_text("utf-8").endswith(mark(source)):
            stale.append(out.name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run tools/pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
