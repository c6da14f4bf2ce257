"""One rank of ``halocline run``: runs the script, and leaves its error for the launcher if it fails."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from ..errors import HaloclineError
from ..train.explain import explain
from ..train.heartbeat import follow_launcher
from ..train.launch import REQUEST, this_rank, write_rank_error
from . import end_at_once_on_failure


def run_here(request: dict[str, Any]) -> int:
    """Run the script in this process. Returns its exit status; its errors are printed as Python prints them."""
    return _run(request)[0]


def _run(request: dict[str, Any]) -> tuple[int, str]:
    """The script's exit status, and its error in one line."""
    from ..scripts import ScriptOptions, run_script
    from ..world import init

    script = Path(request["script"])
    options = ScriptOptions(request["cut"], request["numbers"], request["seed"])
    try:
        init(deadline=request["deadline"])
        run_script(script, request["arguments"], options)
    except SystemExit as ending:
        return _status(ending), ""
    except HaloclineError as error:
        if request["debug"]:
            traceback.print_exc()
        words = f"{_place(error, script)}{explain(error)}"
        print(f"halocline run: {words}", file=sys.stderr)
        return 2, words
    except Exception as error:  # noqa: BLE001 - the script may raise anything
        traceback.print_exception(_without_library(error, script))
        return 1, explain(error)
    return 0, ""


def _status(ending: SystemExit) -> int:
    """The exit status that Python would give."""
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1


def _place(error: BaseException, script: Path) -> str:
    """The line of the script in which an error came up."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
    return f"{script}, line {lines[-1]}: " if lines else ""


def _without_library(error: Exception, script: Path) -> Exception:
    """The error with the traceback that it has in plain Python: from the script on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return error.with_traceback(trace or error.__traceback__)


def main() -> None:
    """``python -m halocline.cli.run_rank FOLDER``, for the processes that ``halocline run`` starts."""
    folder, rank, _ = Path(sys.argv[1]), this_rank(), follow_launcher()
    status, words = _run(json.loads((folder / REQUEST).read_text()))
    if words:
        write_rank_error(folder, rank, words)
    raise SystemExit(status)


if __name__ == "__main__":
    end_at_once_on_failure(main)
