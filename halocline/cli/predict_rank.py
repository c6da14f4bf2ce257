"""One rank of `halocline predict`: rank 0 shows progress and writes the result, a rank that fails leaves its error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..train.heartbeat import follow_launcher
from ..train.launch import REQUEST, RESULT, this_rank
from . import end_at_once_on_failure
from .local_ranks import work_as_rank
from .output import progress_bar, set_quiet
from .stopping import exit_on_sigterm


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """This process's part in a prediction; the result is the same on every rank. Called by all ranks together."""
    from ..train.predict import predict

    with exit_on_sigterm(), progress_bar() as bar:
        task = bar.add_task("samples", total=None, visible=False)  # shown with the first sample, not before an error
        run, source, out = Path(request.pop("run")), request.pop("source"), Path(request.pop("out"))

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        return predict(run, source, out, **request, progress=progress)


def main() -> None:
    """``python -m halocline.cli.predict_rank FOLDER``, for the processes that ``halocline predict`` starts."""
    follow_launcher()
    set_quiet(this_rank() != 0 or "--quiet" in sys.argv)
    work_as_rank(Path(sys.argv[1]), lambda: _answer_in(Path(sys.argv[1])))


def _answer_in(folder: Path) -> None:
    result = answer(json.loads((folder / REQUEST).read_text()))
    if this_rank() == 0:
        (folder / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    end_at_once_on_failure(main)
