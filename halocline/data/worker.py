"""A reader process: takes jobs from its standard input, fills shared memory, answers with None or the error."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np
import torch

from ..errors import HaloclineError
from .jobs import Job
from .readers import read_message, write_message
from .store import Array, Store


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not get among the answers
    stores: dict[int, Store] = {}
    memories: dict[tuple[str, int, int], Array] = {}
    while True:
        try:
            number, store, place, job = read_message(sys.stdin.buffer)
        except EOFError:
            return
        if store is not None:
            stores[number] = store
        if place not in memories:
            memories[place] = _mapped(*place)
        write_message(answers, _outcome(job.received(memories[place], stores[number])))


def _mapped(path: str, size: int, number: int) -> Array:
    with open(path, "r+b") as file:  # noqa: PTH123  a name that only the kernel knows
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def _outcome(job: Job) -> Exception | None:
    try:
        job.run()
    except HaloclineError as error:
        return error
    except Exception as error:  # noqa: BLE001  told to the process that asked
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None


if __name__ == "__main__":
    main()
