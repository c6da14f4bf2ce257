"""A forecast of a rank's memory, from a dry run of one step before the first real one.

The step runs on meta tensors through the same executor as a real one, so it counts halos and gathered tensors too.
Where a network cannot run on meta tensors there is no forecast, and no refusal.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.loading.layout import BatchLayout
from ..distribute import distribute
from ..errors import ConfigError
from ..geometry import whole
from ..program import dry
from ..program.memory import peak_of
from ..sizes import bytes_from, free_memory, size_text
from ..tensor import wrap_with_halo
from ..world.launcher import node_info_of
from .guard import TrainingError
from .precision import Precision
from .settings import Settings
from .task import MeshLayout, TrainingTask, augmentations

_log = logging.getLogger("halocline.train")
_STATES = {"adam": 2, "adamw": 2, "larc": 2, "sgd": 1}  # tensors that an optimizer keeps per weight


@dataclass(frozen=True)
class Forecast:
    """Bytes that one rank needs for a step, by what needs them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    data: int

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.data

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size_text(value)}" for name, value in vars(self).items())
        return f"{size_text(self.total)} a rank ({parts})"


def forecast(settings: Settings, task: TrainingTask, layout: MeshLayout, rank: int, precision: Precision) -> Forecast:
    """The memory that one rank needs for a step, in bytes, from a dry run on meta tensors. Every rank may call it
    alone."""
    with dry(rank, layout.arrangement.ranks), torch.device("meta"):
        model = task.make_model().to(precision.dtype)
        weights = sum(weight.nbytes for weight in model.parameters())
        model = distribute(model, plan=layout.arrangement)
        batch, held = _batch(settings, task, layout)
        activations = peak_of(lambda: _step(model, task, batch, precision))
    states = _STATES.get(settings.optimizer.name, 2) * weights
    buffers = held * (settings.data.prefetch + 2) + bytes_from("data.memory", settings.data.memory)
    return Forecast(weights, weights, states, max(0, activations - weights), buffers)


def _step(model: nn.Module, task: TrainingTask, batch: Mapping[str, Tensor], precision: Precision) -> None:
    """One forward and backward, as ``training_step`` does them."""
    with precision.autocast():
        loss = task.loss(model(batch["x"]), batch)
    loss.backward()


def _batch(settings: Settings, task: TrainingTask, on: MeshLayout) -> tuple[dict[str, Tensor], int]:
    """A batch of this rank on meta tensors, and the bytes of its tiles."""
    moves, multiple = augmentations(settings.data), on.arrangement.multiple
    layout = BatchLayout(task.training, on.arrangement.mesh(), on.cut, moves, settings.seed, multiple, on.points)
    tensors, size = {}, 0
    for name, each in task.training.items():
        sharding = layout.sharding(name, layout.batch(settings.batch))
        tile = torch.empty(sharding.tile_shape, dtype=each.tensor_dtype, device="meta")
        size += tile.nbytes
        tensors[name] = wrap_with_halo(tile, tuple(map(whole, tile.shape)), sharding, {})
    return tensors, size


def room_needed(
    settings: Settings, task: TrainingTask, layout: MeshLayout, rank: int, precision: Precision
) -> Forecast | None:
    """The forecast; None where a dry run is impossible."""
    try:
        return forecast(settings, task, layout, rank, precision)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  a network may do what meta tensors cannot; the real step will tell
        _log.debug("no forecast of memory: %s", error)
        return None


def check_room(settings: Settings, task: TrainingTask, layout: MeshLayout, rank: int, precision: Precision) -> None:
    """Raise TrainingError if a step would not fit in memory. Does nothing where a dry run is impossible."""
    needed = room_needed(settings, task, layout, rank, precision)
    if needed is None:
        return
    room = available() if settings.memory is None else bytes_from("memory", settings.memory)
    _log.info("memory: %s; there are %s", needed, size_text(room))
    if needed.total > room:
        raise TrainingError(
            f"a step needs {needed}, and there are {size_text(room)}; cut over more ranks, take a smaller batch, "
            "split = 0, which computes it in parts, or precision = 'bf16'"
        )


def available() -> int:
    """Bytes that this rank may use: free memory of its GPU, or its share of the machine's."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    return free_memory() // node_info_of(os.environ).local_size
