"""What stopped the recording of a step, told with the module and the line where it happened."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from ..errors import HaloclineError, PlanError, first_line


@contextmanager
def clear_recording_errors() -> Iterator[None]:
    """Errors of torch inside become a :class:`PlanError` that names module and line."""
    try:
        yield
    except HaloclineError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError) as error:
        place = _place(error)
        if place is None:
            raise
        raise PlanError(
            f"the network cannot be recorded: {place}: {first_line(error)}; a step is recorded on tensors without "
            "values, one sample at a time: check --shape, and that its operations run on the meta device"
        ) from error


def _place(error: Exception) -> str | None:
    """The innermost module that was running, by its path, with the line of its own code."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    running = [(module, frame, line) for frame, line in frames if (module := _module_of(frame)) is not None]
    own = [entry for entry in running if not entry[1].f_code.co_filename.endswith("torch/nn/modules/module.py")]
    if not own:
        return None
    root = running[0][0]
    module, frame, line = own[-1]
    path = next((name for name, each in root.named_modules() if each is module), "")
    name = f"{type(module).__name__} {path}" if path else type(module).__name__
    code = traceback.extract_tb(error.__traceback__)
    source = next((s.line for s in code if s.filename == frame.f_code.co_filename and s.lineno == line), None)
    return f"{source or 'forward'} in {name}"


def _module_of(frame: FrameType) -> nn.Module | None:
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, nn.Module) else None
