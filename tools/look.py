"""Open every page of the built site in Chromium, and report what a reader would trip over.

    make docs && python tools/look.py --shots shots            # needs chromedriver and chromium; pictures as PNG
    python tools/look.py site/install.html                     # some pages only

Each page is opened 360 and 1400 pixels wide, in light and in dark colours. Reported: a page that scrolls sideways, an
element that sticks out of the page, images that do not load or have no text for readers who cannot see them, text on a
background of nearly its own colour, headings or paragraphs that overlap, errors in the console. Exit status 1 if any.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTHS, SCHEMES, HEIGHT = (360, 1400), ("light", "dark"), 900
PORT, DEADLINE = 9517, 60
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--allow-file-access-from-files",
)  # fmt: skip
SEARCH = """
const field = document.querySelector(".md-search__input");
field.focus();
field.value = "halo";
field.dispatchEvent(new Event("keyup"));
"""
FOUND = 'return document.querySelectorAll(".md-search-result__item").length'
FAULTS = (Path(__file__).parent / "look.js").read_text()


class Browser:
    """Chromium, by chromedriver's own protocol: JSON over HTTP on this machine."""

    def __init__(self, profile: str) -> None:
        self._scheme = ""
        self._url = f"http://127.0.0.1:{PORT}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}
        self._url += "/" + self._ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return json.loads(answer.read())["value"]

    def tell(self, command: str, **values: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("/goog/cdp/execute", {"cmd": command, "params": values})

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Show a page at a width, as a reader who prefers a colour scheme sees it."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._ask("/url", {"url": page.resolve().as_uri()})
        if self._scheme != scheme:  # the page keeps the colours of the first visit
            self.run("localStorage.clear()")
            self._ask("/refresh", {})
            self._scheme = scheme

    def run(self, script: str) -> Any:
        """The value of a script's ``return``."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page."""
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """Errors that the console has got since the last call."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start chromedriver and a browser; both end with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(["chromedriver", f"--port={PORT}", "--log-level=OFF"], stdout=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + DEADLINE
            while True:
                try:
                    found = Browser(profile)
                    break
                except OSError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.2)
            yield found
            urllib.request.urlopen(urllib.request.Request(found._url, method="DELETE"), timeout=DEADLINE).close()
        finally:
            driver.terminate()
            driver.wait(DEADLINE)


def search(chromium: Browser, page: Path) -> list[str]:
    """Search for a word as a reader does who opened the page from a file."""
    chromium.tell("Emulation.setFocusEmulationEnabled", enabled=True)  # the page fetches its index at the first focus
    chromium.open(page, WIDTHS[-1], "light")
    chromium.run(SEARCH)
    give_up = time.monotonic() + DEADLINE
    while not chromium.run(FOUND):
        if time.monotonic() > give_up:
            return [f"{page}: a search finds nothing"]
        time.sleep(0.2)
    return []


def main() -> int:
    """Look at all pages, or at those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--shots", type=Path, help="folder for a picture of each page")
    parser.add_argument("--whole", action="store_true", help="pictures of whole pages, not of what is seen first")
    asked = parser.parse_args()
    site = ROOT / "site"
    pages = asked.pages or [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    if asked.shots:
        asked.shots.mkdir(parents=True, exist_ok=True)
    faults = 0
    with browser() as chromium:
        for page in pages:
            for scheme in SCHEMES:
                for width in WIDTHS:
                    chromium.open(page, width, scheme)
                    found = chromium.run(FAULTS) + [f"console: {each}" for each in chromium.errors()]
                    for fault in found:
                        print(f"{page}, {width} px, {scheme}: {fault}", flush=True)
                    faults += len(found)
                    if asked.shots:
                        name = "-".join(page.resolve().relative_to(site.resolve()).with_suffix("").parts)
                        chromium.picture(asked.shots / f"{name}-{width}-{scheme}.png", asked.whole)
        if not asked.pages:
            found = search(chromium, site / "index.html")
            for fault in found:
                print(fault, flush=True)
            faults += len(found)
    print(f"{len(pages)} pages at {len(WIDTHS)} widths in {len(SCHEMES)} schemes: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
