"""The process of which ranks are forked: one that is killed is replaced, one that cannot start is not tried again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halocline.train.template import RankTemplate

CODE = """
import os, socket, subprocess, sys
from halocline.train.template import RankTemplate, serve_ranks

def serve(channel, launcher):
    serve_ranks(channel, launcher, lambda: sys.exit(7))

def status(template):
    rank = template.start(["rank"], dict(os.environ), (0, 1, 2), ())
    return None if rank is None else rank.wait(60)

if __name__ == "__main__" and len(sys.argv) > 1:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel, int(sys.argv[2]))
elif __name__ == "__main__":
    found = []
    with RankTemplate(serve, "small_template") as template:
        for _ in range(2):
            found.append(status(template))
            template._process.kill()
            template._process.wait()
        found += [status(template), status(template)]
    with RankTemplate(serve, "no_such_module") as template:
        found.append(status(template))
        template._process.kill()
        template._process.wait()
        found += [status(template), status(template)]
    print(found)
"""


@pytest.mark.long
@pytest.mark.skipif(not RankTemplate.possible(), reason="ranks are not forked here")
def test_a_template_that_was_killed_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "small_template.py").write_text(CODE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "small_template"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=170)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[-1] == "[7, 7, 7, 7, 7, None, None]"
