"""The loop around the step: batches, learning rate, log, guard, validation, checkpoints.

Every rank runs the same loop, and every decision that could differ between ranks (to stop, to save, a failed disk) is
agreed on first. For a loop of your own, ``hc.distribute``, ``hc.data.Loader`` and ``training_step`` are enough; nothing
here is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import random
from ..data import Loader
from ..data.loading.pipeline import Batch
from ..distribute import lagged_gradients, load_lagged_gradients
from ..sizes import bytes_from
from ..world import Label, init, this_world
from ..world.agreement import agree, gather_rows
from .callbacks import Callbacks
from .changes import changed, check_optimizer
from .checkpoints import CHECKPOINTS, Checkpoints, named_tensors
from .config import CONFIG, write_settings
from .distributed import distributed
from .export import load_weights
from .forecast import Forecast, room_needed
from .guard import Guard
from .imports import keep_code
from .log import RunLog
from .memory import RunCopies
from .optimizers import learning_rate, load_optimizer
from .pictures import Examples, memory_used
from .planning import run_plan
from .precision import Precision, this_device
from .recovery import BufferCopy, Rollback
from .result import Result
from .settings import Settings
from .signals import StopRequest
from .splitting import PartsCheck, part_size, steps_of
from .step import evaluating, exhausted, training_step
from .task import START, augmentations, make_layout, make_task, planned_layout, tables_of
from .trace import STEPS, Tracer, merge
from .trust import mark_run
from .work import StepWork

Listener = Callable[[str, dict[str, Any]], None]
_STOP = Label("stop", "the training loop", "control")
_RANKS = Label("memory of ranks", "the training loop", "control")


class Trainer:
    """One run in a folder of its own; resumes an earlier run that it finds there. Made by all ranks together.

    ``tell(kind, values)`` is called with steps, validations and notes, for a progress display. ``lock`` is a descriptor
    by which this rank's launcher holds the lock on the run's checkpoints. If any rank fails during set-up, all ranks
    raise.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        tell: Listener = lambda kind, values: None,
        lock: int | None = None,
    ) -> None:
        self.settings, self.folder, self._tell = settings, folder, tell
        init(settings.deadline)
        world = this_world()
        self._device = device = this_device()
        self._precision = Precision(settings.precision, device, settings.guard.nan == "skip")
        task = agree(world, lambda: make_task(settings, self._precision.dtype), START)
        self._plan = run_plan(settings, task, self._precision, world, folder)
        self._layout = (
            make_layout(settings, task.letters, world.size)
            if self._plan is None
            else planned_layout(self._plan.arrangement)
        )
        self.mesh = self._layout.arrangement.mesh()
        self._task = task
        part = part_size(settings, task, self._layout, world, self._precision)
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)  # else dropout would continue the numbers of an earlier run of this process
        # Tables may be larger than a rank's memory: each rank makes its own rows, by global index.
        with torch.device("meta") if tables_of(settings) else nullcontext():
            made = task.make_model()
        self.model = self._precision.placed(made)
        self._check_parts = PartsCheck(self.model, settings, part, self._precision)
        if task.loss_module is not None:
            self._precision.placed(task.loss_module)
        if settings.weights is not None:
            agree(world, lambda: load_weights(self.model, settings.weights or ""), START)
        self._callbacks = agree(world, lambda: Callbacks(settings.callbacks), START)
        self.optimizer = distributed(self.model, settings, self._layout.arrangement, device)
        self.loader = self._loader(task.training, part, shuffle=True, device=device)
        self._validation = self._loader(task.validation, part, False, device) if task.validation else None
        self._guard = Guard(settings.guard, self.model, self.mesh, self._note)
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, self.mesh, settings.keep, keep_every=settings.keep_every, deadline=settings.deadline,
            lock=lock, cloud=settings.cloud)  # fmt: skip
        self._copies = RunCopies(settings, folder, self.mesh, self._note, self._write)
        self._roll_back = Rollback(self.checkpoints, self.model, self.optimizer)
        self.checkpoints.claim()  # before anything of another run in this folder is touched
        self._log = RunLog(folder) if self.mesh.rank == 0 else None
        if self._log is not None:
            write_settings(settings, folder / CONFIG)
            task.input.write(folder)
            if settings.model is not None:
                keep_code(folder, settings.model)
            mark_run(folder, settings)
        self._tracer = Tracer(folder, self.mesh.rank, STEPS if settings.trace else range(0), self.mesh.world)
        self.step, self.stop = 0, StopRequest()
        self.samples: list[int] = []  # numbers of those of the last step
        self._work = StepWork(self.mesh.world)
        self._data_waited = 0.0  # seconds that the loader had waited when the last step ended

    def _loader(self, fields: Any, batch: int, shuffle: bool, device: torch.device) -> Loader:
        """A loader over ``fields``, cut as the layout says; training batches are shuffled and augmented."""
        data = self.settings.data
        return Loader(
            fields,
            self.mesh,
            batch=batch,
            cut=self._layout.cut,
            augment=augmentations(data) if shuffle else (),
            seed=self.settings.seed,
            shuffle=shuffle,
            multiple=self._layout.arrangement.multiple,
            points=self._layout.points,
            memory=bytes_from("data.memory", data.memory),
            readers=data.readers,
            prefetch=data.prefetch,
            on_bad_sample=data.on_bad_sample,
            device=device if device.type == "cuda" else None,
        )

    def forecast(self) -> Forecast | None:
        """The memory that this rank needs for a step; None where a dry run is impossible."""
        return room_needed(self.settings, self._task, self._layout, self.mesh.rank, self._precision)

    def train(self) -> Result:
        """Train to the end, or until a signal asks to stop. By all ranks together."""
        with self.stop:
            return exhausted(self.steps())

    def steps(self) -> Generator[None, bool | None, Result]:
        """The same, step by step: the caller may do other work after each step, and sends True to stop the run.

        It yields once before it begins; from then on closing it closes the run.
        """
        try:
            with ExitStack() as opened:
                # They close in an orderly way, and after an error without waiting for a lost rank.
                for each in (self.checkpoints, self.loader, self._validation):
                    if each is not None:
                        opened.enter_context(each)
                yield
                result = yield from self._run()
                self._copies.end()
                return result
        finally:
            self._tracer.close()
            if self._log is not None:
                self._log.close()

    def _run(self) -> Generator[None, bool | None, Result]:
        """Resume, make all steps that are left, then save, validate and write what the report needs.

        The last checkpoint is written before the last validation, so that an error there loses nothing.
        """
        if self._log is not None and self._log.no_board:
            self._note(self._log.no_board)
        self._write("data", text=self._task.words)
        if self._plan is not None:
            predicted = self._plan.predicted.model_dump()
            self._write("plan", plan=str(self._plan), machine=self._plan.machine, predicted=predicted)
        self._write("choices", values=asdict(self.mesh.choices))
        self._tell("data", {"text": self._task.words})
        self.resume()
        self._write("start", step=self.step, ranks=self.mesh.size)
        self._callbacks("on_start", self)
        result, groups = Result(self.step), self._tracer.waits(self._groups())
        while not result.stopped and self._next_step(groups, result):
            if not result.stopped and (yield):
                self.save(wait=True)
                result.stopped, result.preempted = True, self.stop.preempted
        if not result.stopped:
            self.save(wait=True)  # before validation, whose errors must not lose the weights
            result.metrics = self.validate(last=True)
        result.steps = self.step
        self._callbacks("on_end", self, result)
        self._tracer.close()
        self._write_ranks()
        if self.mesh.rank == 0:
            merge(self.folder, self.mesh.size)
        return result

    def _next_step(self, groups: Iterator[list[Batch]], result: Result) -> bool:
        """One step, and what comes after it; False if none is left."""
        with random.reproducible():  # not across steps, between which another run may have its turn
            batches = next(groups, None)
            if batches is None:
                return False
            with self._tracer.step(self.step):
                loss = self._one_step(batches)
            batches.clear()  # releases their memory for the next ones
            result.losses.append(loss)
            self._callbacks("on_step", self, self.step - 1, loss)
            if self._after_step():
                result.stopped, result.preempted = True, self.stop.preempted
        return True

    def _groups(self) -> Iterator[list[Batch]]:
        """The batches of each step that is left, epoch after epoch."""
        stream = steps_of(self.loader, self.settings.batch, self.settings.accumulate)
        while self.step < self.settings.steps:
            yield next(stream)

    def _one_step(self, batches: list[Batch]) -> float:
        """One optimizer step; returns its loss. Times and waits go to log and guard."""
        settings, traffic = self.settings, self.mesh.world.traffic
        rate = learning_rate(self.step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        began, waited = time.perf_counter(), dict(traffic.waited)
        before = BufferCopy(self.model) if settings.guard.nan == "skip" else None
        self._check_parts(batches, self._task.loss)
        with self._work:
            loss = training_step(
                self.model, batches, self._task.loss, self.optimizer, self._precision, settings.clip
            ).item()
        seconds = time.perf_counter() - began
        hidden = {name: seconds - waited.get(name, 0.0) for name, seconds in dict(traffic.waited).items()}
        self.samples = [int(number) for batch in batches for number in batch.samples]
        self._write_step(loss, rate, seconds, hidden, len(self.samples))
        if self._precision.skipped:
            self._guard.overflowed(self.step, self._precision.scale)
            if before is not None:
                before.restore()
        if not self._guard.look(self.step, loss, seconds - sum(hidden.values())) and settings.guard.nan == "rollback":
            self._note(f"step {self.step}: back to the weights of step {self._roll_back(self.step)}")
        self.step += 1
        return loss

    def _write_step(self, loss: float, rate: float, seconds: float, hidden: dict[str, float], samples: int) -> None:
        """Log a step. ``hidden`` are the seconds that this rank waited, by channel."""
        report = self.loader.report
        data, self._data_waited = report.waited - self._data_waited, report.waited
        entry = {
            "step": self.step,
            "loss": loss,
            "lr": rate,
            "seconds": seconds + data,
            "data": data,
            "halo": sum(shown for name, shown in hidden.items() if not name.startswith("gradients")),
            "gradients": sum(shown for name, shown in hidden.items() if name.startswith("gradients")),
            "samples_per_second": samples / max(1e-9, seconds + data),
            **self._work.rates(seconds + data, data + sum(hidden.values())),
        }
        if self._precision.name == "fp16":
            entry["scale"] = self._precision.scale
        if self._precision.name == "fp16" or self.settings.guard.nan == "skip":
            entry["skipped"] = int(self._precision.skipped)
        last = self.step == self.settings.steps - 1
        if last or self.step % self.settings.log_every == 0:
            self._write("step", **entry)
        self._tell("step", entry)

    def _write(self, kind: str, **values: Any) -> None:
        """An entry of the log, on rank 0."""
        if self._log is not None:
            self._log.write(kind, **values)

    def _note(self, text: str) -> None:
        """A remark for the terminal and the log."""
        self._write("note", text=text)
        self._tell("note", {"text": text})

    def _after_step(self) -> bool:
        """Validate, save and decide whether to stop, the same on every rank. Raises the error of a failed save."""
        settings = self.settings
        if settings.validate_every and self.step % settings.validate_every == 0 and self.step < settings.steps:
            self.validate()
        own = (self.stop.asked, self.stop.preempted, self.checkpoints.failed, *self._copies.flags)
        stop, self.stop.preempted, failed, *copies = self._agreed(*own)
        if failed:
            self.checkpoints.raise_failure()
        if stop:
            self.save(wait=True)
            return True
        if settings.checkpoint_every and self.step % settings.checkpoint_every == 0 and self.step < settings.steps:
            self.save()
        self._copies.after_step(self.step, copies, lambda: (self._tensors(), self._state()))
        return False

    @torch.no_grad()
    def validate(self, last: bool = False) -> dict[str, float]:
        """Loss and metrics over all validation samples, the same on every rank and for every mesh.

        Writes examples for the report: at the ``last`` validation all, before it the predictions alone. By all ranks
        together.
        """
        if self._validation is None:
            return {}
        examples = Examples()
        meter = self._task.make_meter() if self._task.make_meter is not None else None
        total, count = 0.0, 0
        with evaluating(self.model):
            for batch in self._validation:
                with self._precision.autocast():
                    output = self.model(batch["x"])
                    loss = self._task.loss(output, batch)
                total, count = total + float(loss) * len(batch.samples), count + len(batch.samples)
                if meter is not None:
                    meter.update(output, batch)
                examples.add(output, batch)
        metrics = {"loss": total / max(1, count), **(meter.result() if meter is not None else {})}
        if self.mesh.rank == 0:
            examples.write(self.folder, None if last else self.step)
        self._write("validation", step=self.step, **metrics)
        self._tell("validation", {"step": self.step, **metrics})
        self._callbacks("on_validation", self, metrics)
        return metrics

    def _write_ranks(self) -> None:
        """Log memory and tile of every rank, for the report. By all ranks together."""
        used = gather_rows(self.mesh.world, torch.tensor(memory_used(self._device), dtype=torch.float64), _RANKS)
        if self._log is None:
            return
        layout, dims = self.loader.layout, self._task.training["x"].dims
        for rank, memory in enumerate(used.tolist()):
            where = self.mesh.coordinates_of(rank)
            tile = {letter: list(i) for letter, i in zip(dims, layout.tile("x", where), strict=True)}
            self._log.write("rank", rank=rank, memory=memory, coordinates=where, tile=tile, shape=layout.shape("x"))

    # -- checkpoints

    def _tensors(self) -> dict[str, Any]:
        """The state that is saved as tensors."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _state(self) -> dict[str, Any]:
        """The rest of it. By all ranks together."""
        told = {"step": self.step, "settings": self.settings.as_dict(), "loader": self.loader.state_dict()}
        state = {**told, "random": list(random.get_state()), "scaler": self._precision.state_dict()}
        if self.settings.gradients.lag:
            state["lagged"] = lagged_gradients(self.model)
        return state

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint in the background, or with ``wait`` at once. By all ranks together.

        A state that is not sound (NaN, or different between ranks) is not saved; the guard raises or warns.
        """
        tensors = self._tensors()
        if not self._guard.may_save(self.step, named_tensors(tensors)):
            return
        began = time.perf_counter()
        self.checkpoints.save(self.step, tensors, self._state(), wait=wait)
        told = {"step": self.step, "waited": time.perf_counter() - began}  # for the save before, and for the copy
        self._write("checkpoint", **told)
        self._tell("checkpoint", told)

    def resume(self) -> None:
        """Load the newest state, whatever mesh it is of: copies in memory, or the newest good checkpoint in the folder.

        By all ranks together.
        """
        tensors = self._tensors()
        checkpoint = self._copies.newest(tensors, self.checkpoints) or self.checkpoints.load_latest(tensors)
        if checkpoint is None:
            return
        told = checkpoint.state.get("settings", self.settings.as_dict())  # older versions did not save them
        check_optimizer(told, self.settings)
        self.model.load_state_dict(checkpoint.tensors["model"])
        load_optimizer(self.optimizer, checkpoint.tensors["optimizer"])
        if self.settings.gradients.lag:
            load_lagged_gradients(self.model, checkpoint.state.get("lagged", {}))
        self.step = checkpoint.state["step"]
        self.loader.load_state_dict(checkpoint.state["loader"])
        random.set_state((checkpoint.state["random"][0], checkpoint.state["random"][1]))
        self._precision.load_state_dict(checkpoint.state["scaler"])
        self._tell("resumed", {"step": self.step})
        if words := changed(told, self.settings):
            self._note(f"other settings from step {self.step} on: {words}")

    def _agreed(self, *flags: bool) -> list[bool]:
        """Each flag, true on all ranks if it is true on one: signals and failing disks may reach one rank alone."""
        if self.mesh.size == 1:
            return list(flags)
        raised = self.mesh.world.maximum(torch.tensor(flags).float(), tuple(range(self.mesh.size)), _STOP)
        return [bool(flag) for flag in raised.tolist()]
