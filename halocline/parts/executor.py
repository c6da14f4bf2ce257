"""Runs the actions of one lane: the one reader of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..world import Arrival, CrossingRoute, GradientArrival, PendingExchange, World, send_gradient, send_tile
from .actions import FORWARD, INPUT, WEIGHT, Action, PipelineSchedule
from .borders import Border
from .replay import StageProgram, StageRun


@dataclass
class Microbatches:
    """What a step hands to the executor: inputs by micro-batch and stage, and where random numbers begin."""

    key: str  # of the step, the same on all ranks
    inputs: Callable[[int, int], Mapping[int, Tensor]]
    seed: int
    first_draw: int
    draws: int  # of one micro-batch
    scale: float  # of each micro-batch's loss in backward


@dataclass
class LaneRun:
    """What a lane made of a step: the losses of its micro-batches, and the most that it held in flight."""

    losses: list[Tensor] = field(default_factory=list)
    in_flight: int = 0


class LaneExecutor:
    """The stages of one lane. Every rank of the lane runs the same actions; messages to other lanes never block.

    The receives of the next action are posted before the present one is computed.
    """

    def __init__(
        self, schedule: PipelineSchedule, lane: int, programs: Mapping[int, StageProgram], borders: Sequence[Border],
        loss: tuple[int, int], world: World, device: torch.device,
    ) -> None:  # fmt: skip
        """``programs`` by stage; ``loss`` is the loss's stage and value."""
        self._actions, self._programs = schedule.lanes[lane], programs
        self._before = {s: [b for b in borders if b.target == s] for s in programs}
        self._after = {s: [b for b in borders if b.source == s] for s in programs}
        self._loss, self._me, self._device = loss, world.rank, device
        self._splits = schedule.splits

    def run(self, batch: Microbatches, tensors: Mapping[str, Tensor]) -> LaneRun:
        """One step: gradients add up in the parameters' ``.grad``, unaveraged."""
        return _Step(self, batch, tensors).run()


class _Step:
    """The state of one step on one rank.

    An action waits only for its own receives, each at most for the world's deadline. A forward's sends are waited for
    in the backward of the same micro-batch, whose gradients prove that they have been taken; those of gradients at the
    end of the step. So activations of ``in_flight`` micro-batches are held, and no more.
    """

    def __init__(self, lane: LaneExecutor, batch: Microbatches, tensors: Mapping[str, Tensor]) -> None:
        self._lane, self._batch, self._tensors = lane, batch, tensors
        self._runs: dict[tuple[int, int], StageRun] = {}
        self._arriving: dict[Action, list[tuple[Border, Arrival | GradientArrival]]] = {}
        self._own: dict[tuple[str, int, int, int], Tensor] = {}  # what this rank sends itself
        self._sends: dict[tuple[int, int], list[PendingExchange]] = {}
        self._routes: dict[tuple[int, int, bool], CrossingRoute] = {}  # by value, target and direction
        self._result = LaneRun()

    def run(self) -> LaneRun:
        """All actions in order. RankFailure where another rank is gone or late."""
        actions = self._lane._actions
        for action in actions[:2]:
            self._post(action)
        for place, action in enumerate(actions):
            if action.kind == FORWARD:
                self._forward(action)
            elif action.kind == WEIGHT:
                self._runs.pop(action[::2]).backward_weights()
            else:
                self._backward(action)
            # After the action's own messages have gone, while those that the next one waits for are on their way.
            for ahead in actions[place + 2 : place + 3]:
                self._post(ahead)
        for sends in self._sends.values():
            for send in sends:
                send.wait()
        return self._result

    def _post(self, action: Action) -> None:
        """Ask for what the action will wait for."""
        if action in self._arriving or action.kind == WEIGHT:
            return
        if action.kind == FORWARD:
            found = [(b, Arrival(self._route(b, action))) for b in self._lane._before[action.stage]]
            self._arriving[action] = list(found)
        else:
            back = [b for b in self._lane._after[action.stage] if b.needs_gradient]
            self._arriving[action] = [(b, GradientArrival(self._route(b, action, True), b.scale)) for b in back]

    def _forward(self, action: Action) -> None:
        """Wait for the tiles that the stage receives, compute, and begin to send the tiles that later stages read."""
        stage, microbatch = action.stage, action.microbatch
        program, batch, arrived = self._lane._programs[stage], self._batch, {}
        for border, arrival in self._arriving.pop(action):
            pending = arrival.finish(self._own.pop(("on", border.value, stage, microbatch), None))
            assert pending.tensor is not None
            arrived[border.value] = pending.tensor, border.new
            self._keep_sends(stage, microbatch, pending.sends)
        first = batch.first_draw + microbatch * batch.draws
        given = batch.inputs(microbatch, stage)
        run, _ = program.run(arrived, given, self._tensors, first, batch.seed, self._lane._splits)
        self._runs[stage, microbatch] = run
        self._result.in_flight = max(self._result.in_flight, len(self._runs))
        for border in self._lane._after[stage]:
            tile = run.outputs[border.value].detach()
            self._send(("on", border.value, border.target, microbatch), border, tile)
            self._keep_sends(stage, microbatch, send_tile(self._route(border, action), tile))
        if stage == self._lane._loss[0]:
            self._result.losses.append(run.outputs[self._lane._loss[1]].detach())

    def _backward(self, action: Action) -> None:
        """Wait for the gradients of sent tiles, add up, run autograd, and begin to send those of received tiles."""
        stage, microbatch = action.stage, action.microbatch
        run, gradients = self._runs[stage, microbatch], {}
        if stage == self._lane._loss[0]:
            loss = self._lane._loss[1]
            gradients[loss] = torch.full_like(run.outputs[loss], self._batch.scale)
        for border, arrival in self._arriving.pop(action):
            came = arrival.finish(self._own.pop(("back", border.value, border.target, microbatch), None)).tensor
            assert came is not None
            gradients[border.value] = gradients[border.value] + came if border.value in gradients else came
        received = run.backward_inputs(gradients) if action.kind == INPUT else run.backward(gradients)
        if action.kind != INPUT:
            del self._runs[stage, microbatch]
        for border in self._lane._before[stage]:
            if border.needs_gradient:
                gradient = received[border.value].contiguous()
                self._send(("back", border.value, stage, microbatch), border, gradient)
                sends = send_gradient(self._route(border, action, True), gradient)
                self._keep_sends(stage, -1 - microbatch, sends)
        for send in self._sends.pop((stage, microbatch), ()):  # taken by now: their gradients have come
            send.wait()

    def _send(self, key: tuple[str, int, int, int], border: Border, tensor: Tensor) -> None:
        """Keep what this rank needs itself on the other side."""
        if border.crossing.kept and any(rank == self._lane._me for rank, _ in border.crossing.kept):
            self._own[key] = tensor

    def _keep_sends(self, stage: int, microbatch: int, sends: list[PendingExchange]) -> None:
        if sends:
            self._sends.setdefault((stage, microbatch), []).extend(sends)

    def _route(self, border: Border, action: Action, back: bool = False) -> CrossingRoute:
        """The way of a value, or of its gradient, for the action's micro-batch."""
        key = border.value, border.target, back
        made = self._routes.get(key)
        if made is None:
            made = self._routes[key] = border.route(self._batch.key, back, self._lane._device)
        return made._replace(turn=action.microbatch)
