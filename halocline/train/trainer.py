"""The loop round the step: batches, learning rate, log, guard, validation, checkpoints. Thin on purpose.

Whoever has a loop of his own uses ``hc.distribute``, ``hc.data.Loader`` and ``training_step``, and needs none of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import random
from ..data import Loader
from ..data.loading.pipeline import Batch
from ..distribute import distribute
from ..world import Label, init, this_world
from .checkpoints import Checkpoints
from .config import CONFIG, write_settings
from .forecast import check_room
from .guard import Guard
from .log import RunLog
from .optimizers import make_optimizer, rate_at
from .pictures import Examples, memory_used
from .precision import Precision
from .settings import Settings
from .sizes import bytes_from
from .step import training_step
from .task import augmentations, make_mesh, make_task
from .trace import STEPS, Tracer, merge

Listener = Callable[[str, dict[str, Any]], None]
CHECKPOINTS = "checkpoints"
_STOP = Label("stop", "the training loop", "control")
_RANKS = Label("memory of ranks", "the training loop", "control")


@dataclass
class Result:
    """What came of a run, the same on every rank."""

    steps: int
    losses: list[float] = field(default_factory=list)  # of the steps made in this run
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False  # by a signal, after a checkpoint


class Trainer:
    """One run in a folder of its own. Made on every rank; what is there of an earlier run is gone on with."""

    def __init__(self, settings: Settings, folder: Path, tell: Listener = lambda kind, values: None) -> None:
        self.settings, self.folder, self._tell = settings, folder, tell
        init(settings.deadline)
        world = this_world()
        self._device = device = this_device()
        self._precision = Precision(settings.precision, device)
        task = make_task(settings, self._precision.dtype)
        self.mesh, self._cut = make_mesh(settings, task.letters, world.size)
        self._task = task
        check_room(settings, task, self.mesh, self._cut, self._precision)
        torch.manual_seed(settings.seed)
        self.model = distribute(self._precision.placed(task.make_model()), self.mesh)
        self.optimizer = make_optimizer(self.model, settings.optimizer)
        self.loader = self._loader(task.training, settings.batch, shuffle=True, device=device)
        self._validation = self._loader(task.validation, settings.batch, False, device) if task.validation else None
        self._guard = Guard(settings.guard, self.model, self.mesh)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, self.mesh, keep=settings.keep)
        self._log = RunLog(folder) if self.mesh.rank == 0 else None
        if self.mesh.rank == 0:
            write_settings(settings, folder / CONFIG)
        self._tracer = Tracer(folder, self.mesh.rank, STEPS if settings.trace else range(0), self.mesh.world)
        self.step = 0
        self._stop_asked = False

    def _loader(self, fields: Any, batch: int, shuffle: bool, device: torch.device) -> Loader:
        data = self.settings.data
        return Loader(
            fields,
            self.mesh,
            batch=batch,
            cut=self._cut,
            augment=augmentations(data) if shuffle else (),
            seed=self.settings.seed,
            shuffle=shuffle,
            multiple=self.settings.multiple,
            memory=bytes_from("data.memory", data.memory),
            readers=data.readers,
            prefetch=data.prefetch,
            on_bad_sample=data.on_bad_sample,
            device=device if device.type == "cuda" else None,
        )

    # -- the loop

    def train(self) -> Result:
        before = signal.signal(signal.SIGTERM, self._ask_to_stop) if _in_main_thread() else None
        try:
            with ExitStack() as opened:  # which close in their own way after an error: nobody waits for a lost rank
                for each in (self.checkpoints, self.loader, self._validation):
                    if each is not None:
                        opened.enter_context(each)
                return self._run()
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
            self._tracer.close()
            if self._log is not None:
                self._log.close()

    def _run(self) -> Result:
        self.resume()
        result = Result(self.settings.steps)
        with random.reproducible():
            for batches in self._tracer.waits(self._groups()):
                with self._tracer.step(self.step):
                    loss = self._one_step(batches)
                result.losses.append(loss)
                if self._after_step():
                    result.stopped = True
                    break
        if not result.stopped:
            result.metrics = self.validate(last=True)
            self.save(wait=True)
        self._tracer.close()
        self._write_ranks()
        if self.mesh.rank == 0:
            merge(self.folder, self.mesh.size)
        return result

    def _groups(self) -> Iterator[list[Batch]]:
        """The batches of each step that is left."""
        stream = self._endless()
        while self.step < self.settings.steps:
            yield [next(stream) for _ in range(self.settings.accumulate)]

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def _one_step(self, batches: list[Batch]) -> float:
        settings, traffic = self.settings, self.mesh.world.traffic
        rate = settings.optimizer.lr * rate_at(self.step, settings.steps, settings.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        began, waited = time.perf_counter(), dict(traffic.waited)
        loss = training_step(
            self.model, batches, self._task.loss, self.optimizer, self._precision, settings.clip
        ).item()
        seconds = time.perf_counter() - began
        hidden = {name: seconds - waited.get(name, 0.0) for name, seconds in dict(traffic.waited).items()}
        self._write_step(loss, rate, seconds, hidden, sum(len(batch.samples) for batch in batches))
        self._guard.look(self.step, loss, seconds - sum(hidden.values()))
        self.step += 1
        return loss

    def _write_step(self, loss: float, rate: float, seconds: float, hidden: dict[str, float], samples: int) -> None:
        report = self.loader.report
        data, self._data_waited = report.waited - getattr(self, "_data_waited", 0.0), report.waited
        entry = {
            "step": self.step,
            "loss": loss,
            "lr": rate,
            "seconds": seconds + data,
            "data": data,
            "halo": sum(shown for name, shown in hidden.items() if not name.startswith("gradients")),
            "gradients": sum(shown for name, shown in hidden.items() if name.startswith("gradients")),
            "samples_per_second": samples / max(1e-9, seconds + data),
        }
        if self._log is not None and self.step % self.settings.log_every == 0:
            self._log.write("step", **entry)
        self._tell("step", entry)

    def _after_step(self) -> bool:
        """Validation, a checkpoint, and whether somebody asked to stop; the same on every rank."""
        settings = self.settings
        if settings.validate_every and self.step % settings.validate_every == 0 and self.step < settings.steps:
            self.validate()
        if self._agreed_to_stop():
            self.save(wait=True)
            return True
        if settings.checkpoint_every and self.step % settings.checkpoint_every == 0 and self.step < settings.steps:
            self.save()
        return False

    # -- what is measured

    @torch.no_grad()
    def validate(self, last: bool = False) -> dict[str, float]:
        """Loss and metrics over all validation samples, whole and cut; at last, what a report shows of them too."""
        if self._validation is None:
            return {}
        examples = Examples() if last else None
        meter = self._task.make_meter() if self._task.make_meter is not None else None
        self.model.eval()
        total, count = 0.0, 0
        for batch in self._validation:
            with self._precision.autocast():
                output = self.model(batch["x"])
                loss = self._task.loss(output, batch)
            total, count = total + float(loss) * len(batch.samples), count + len(batch.samples)
            if meter is not None:
                meter.update(output, batch)
            if examples is not None:
                examples.add(output, batch)
        self.model.train()
        found = {"loss": total / max(1, count), **(meter.result() if meter is not None else {})}
        if examples is not None and self.mesh.rank == 0:
            examples.write(self.folder)
        if self._log is not None:
            self._log.write("validation", step=self.step, **found)
        self._tell("validation", {"step": self.step, **found})
        return found

    def _write_ranks(self) -> None:
        """Memory and tile of every rank, for the report."""
        used = torch.zeros(self.mesh.size, dtype=torch.float64)
        used[self.mesh.rank] = memory_used(self._device)
        used = self.mesh.world.maximum(used, tuple(range(self.mesh.size)), _RANKS)
        if self._log is None:
            return
        layout, dims = self.loader.layout, self._task.training["x"].dims
        for rank, memory in enumerate(used.tolist()):
            where = self.mesh.coordinates_of(rank)
            tile = {letter: list(i) for letter, i in zip(dims, layout.tile("x", where), strict=True)}
            self._log.write("rank", rank=rank, memory=memory, coordinates=where, tile=tile, shape=layout.shape("x"))

    # -- checkpoints

    def _tensors(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, wait: bool = False) -> None:
        state = {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "random": list(random.get_state()),
            "scaler": self._precision.state_dict(),
        }
        self.checkpoints.save(self.step, self._tensors(), state, wait=wait)
        self._tell("checkpoint", {"step": self.step})

    def resume(self) -> None:
        """Go on from the newest good checkpoint in the folder, on whatever mesh it was written."""
        found = self.checkpoints.load_latest(self._tensors())
        if found is None:
            return
        self.model.load_state_dict(found.tensors["model"])
        self.optimizer.load_state_dict(found.tensors["optimizer"])
        self.step = found.state["step"]
        self.loader.load_state_dict(found.state["loader"])
        random.set_state((found.state["random"][0], found.state["random"][1]))
        self._precision.load_state_dict(found.state["scaler"])
        self._tell("resumed", {"step": self.step})

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    def _agreed_to_stop(self) -> bool:
        """A signal may reach one rank alone, and between any two steps; all stop after the same."""
        if self.mesh.size == 1:
            return self._stop_asked
        asked = torch.tensor([float(self._stop_asked)])
        return bool(self.mesh.world.maximum(asked, tuple(range(self.mesh.size)), _STOP))


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def this_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
