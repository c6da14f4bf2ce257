"""Switch it on: for the GPU for good, for anything else while asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import HaloclineError
from .replace import install
from .sizes import NEVER, Sizes, forced


def keep_fast() -> None:
    """From now on, work on a GPU that is too large for torch's fast kernels goes to them in chunks."""
    if torch.backends.cuda.is_built():
        install("CUDA")


@contextmanager
def chunked(elements: int | None) -> Iterator[None]:
    """Inside, kernels get at most about ``elements`` elements at a time, on the CPU too; with None nothing is cut.

    Results and gradients are the same to rounding. For tests, measurements and cards with less memory: the sizes
    that suit the card are found by themselves. It holds for the whole process, since backward has threads of its own.
    """
    if elements is not None and elements < 1:
        raise HaloclineError(f"hc.chunked({elements}): give a positive number of elements, or None")
    keep_fast()
    install("CPU")
    with forced(NEVER if elements is None else Sizes(elements, elements)):
        yield
