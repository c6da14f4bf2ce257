"""A run that does nothing but save, and what the tests of checkpoints share.

The run resumes, says where, and says of each step that its checkpoint is complete. The script starts such a run for
each line that it reads (when to die, and the folder), once the one before has been killed: runs are forked, since the
import of torch would take longer than all the rest. Every tensor and the state hold the step's number, so that a
mixture would show.
"""

import os
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halocline.train.checkpoints import Checkpoints, Loaded


def bits(value: Any) -> Any:
    """Comparable, with the types and the bits of everything."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1)
        data = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
        return "tensor", str(value.dtype), tuple(value.shape), value.stride(), data.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return type(value), value.dtype, value.shape, value.tobytes()
    return (type(value), struct.pack(">d", value)) if isinstance(value, float) else (type(value), value)


def weights(step: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(step)), "b": torch.arange(step)}


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(folder, None, keep)
    for step in steps:
        checkpoints.save(step, weights(step), {"step": step})
    checkpoints.wait()
    return checkpoints


# ---- the run ----


def tensors_in(step: int) -> dict[str, object]:
    whole = torch.full((64, 64), float(step))
    return {"model": {"weight": whole, "bias": whole[0]}, "optimizer": {"state": {0: {"step": torch.tensor(step)}}}}


def check(loaded: Loaded) -> None:
    expected = tensors_in(loaded.step)
    assert loaded.state == {"step": loaded.step, "seen": (loaded.step, 0.1 * loaded.step)}
    assert torch.equal(loaded.tensors["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(loaded.tensors["model"]["bias"], expected["model"]["bias"])
    assert loaded.tensors["optimizer"] == expected["optimizer"]


def run(folder: Path, kill_at: int) -> None:
    """Save for ever; or until the operation of that number on a file, counted from the first save."""
    checkpoints = Checkpoints(folder, None, keep=2 if kill_at == 0 else 1)
    loaded = checkpoints.load_latest()
    step = 0
    if loaded is not None:
        check(loaded)
        step = loaded.step
    say(f"resumed {step}")
    if kill_at:
        die_at(kill_at)
    while True:
        step += 1
        for _ in range(1 + (kill_at > 0)):  # the second takes the place of the first
            checkpoints.save(step, tensors_in(step), {"step": step, "seen": (step, 0.1 * step)})
        if step % 3 == 0 or kill_at:  # else the next save waits for it
            checkpoints.wait()
        if checkpoints.completed:
            say(f"complete {checkpoints.completed}")


def die_at(number: int) -> None:
    left = [number]

    def count(event: str, _: object) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())  # at once and whole: two processes have this end of the pipe


def main() -> None:
    say("ready")
    for line in sys.stdin:
        kill_at, folder = line.rstrip("\n").split(" ", 1)
        child = os.fork()
        if child == 0:
            say(f"started {os.getpid()}")
            try:
                run(Path(folder), int(kill_at))
            finally:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
