"""What operations, exchanges and steps are predicted to cost, and where the figures come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_unet import subject
from torch import Tensor, nn

from halocline.errors import HaloclineError
from halocline.plan.calibrate import describe, measure_device
from halocline.plan.calibrate_ranks import fitted_factors
from halocline.plan.collectives import exchange_seconds, sum_seconds
from halocline.plan.cost import Prices, bound_of, event_of, key_of
from halocline.plan.curves import Curves, placed
from halocline.plan.machine import Machine, MeasuredOperation, load_machine
from halocline.plan.measure import Catalogue, workspace_of
from halocline.plan.probes import probes
from halocline.plan.recording import Subject, record_step
from halocline.plan.replay import Replay, replay
from halocline.program import dry
from halocline.program.memory import peak_of
from halocline.world.events import Begun, Computed, Label, Waited

CPU = torch.device("cpu")


def convolution(channels: int, side: int, batch: int = 1, kernel: int = 3) -> Computed:
    volume, weight = (batch, channels, side, side, side), (channels, channels, *[kernel] * 3)
    flops = 2.0 * math.prod(volume) * math.prod(weight[1:])
    pad = (kernel // 2,) * 3
    options = (None, None, None, (1, 1, 1), pad, (1, 1, 1), False, (0, 0, 0), 1)
    moved = 4 * (2 * math.prod(volume) + math.prod(weight))
    return Computed(0, 0, 0.0, "convolution", "", "forward", (volume, weight), torch.float32, flops, moved, options)


def true_seconds(event: Computed) -> float:
    """A device that calls, reads and multiplies."""
    return 5e-6 + event.bytes / 2e10 + event.flops / 3e10


def curves_over(events: list[Computed]) -> Curves:
    return Curves((event, true_seconds(event), 2 * event.bytes) for event in events)


def test_operations_between_measured_ones_are_interpolated() -> None:
    curves = curves_over([convolution(channels, side) for channels in (4, 8, 16, 32) for side in (8, 12, 20, 28)])
    for asked in (convolution(8, 16), convolution(16, 24), convolution(12, 24)):
        assert curves.seconds(asked) == pytest.approx(true_seconds(asked), rel=0.05)
        assert curves.workspace(asked) == pytest.approx(2 * asked.bytes, rel=0.01)


def test_larger_operations_than_were_measured_follow_the_fitted_terms() -> None:
    curves = curves_over([convolution(channels, side) for channels in (4, 8, 16) for side in (8, 12, 16, 20)])
    assert curves.seconds(convolution(16, 40)) == pytest.approx(true_seconds(convolution(16, 40)), rel=0.1)


def test_kernels_of_torch_are_told_apart() -> None:
    """Below 2^20 elements a volume of one sample goes to other kernels than above; each has its own curve."""
    below, above = placed(convolution(8, 48)), placed(convolution(8, 64))
    assert below.kind != above.kind and below.kind[:3] == above.kind[:3]
    assert curves_over([convolution(8, side) for side in (8, 16, 24)]).seconds(convolution(8, 64)) is not None


def test_what_was_never_measured_falls_back_to_the_roofline() -> None:
    event = convolution(8, 16)._replace(name="fft_r2c")
    machine = load_machine("summit")
    assert curves_over([convolution(8, side) for side in (8, 12, 16)]).seconds(event) is None
    assert Prices(machine.device).seconds(event) == Prices(machine.device).roofline(event)


def quantity(value: float) -> dict[str, Any]:
    return {"value": value, "source": "measured"}


def machine_here(**changes: Any) -> Machine:
    """A machine of two CPU ranks, as ``calibrate`` would describe one."""
    operations = []
    for side in (8, 12, 16, 24):
        event = convolution(8, side)
        facts = {"shapes": event.shapes, "options": event.options, "flops": event.flops, "bytes": event.bytes}
        operations.append({"name": event.name, "dtype": "float32", "us": 1e6 * true_seconds(event), **facts})
    device = {
        "name": "one thread",
        "kind": "cpu",
        "memory_gb": quantity(8),
        "memory_gb_per_s": quantity(20),
        "peak_tflops": {"float32": quantity(0.1), "float64": quantity(0.05)},
        "efficiency": quantity(0.3),
        "half_work_gflop": quantity(0.001),
        "memory_efficiency": quantity(1.0),
        "launch_us": quantity(2),
        "operations": operations,
    }
    loads = [
        {"ranks": ranks, "arithmetic": quantity(ranks), "unfolding": quantity(3 * ranks), "memory": quantity(2 * ranks)}
        | {"latency_us": quantity(100 * ranks), "sum_latency_us": quantity(1000 * ranks)}
        | {"host_us": quantity(10), "waiting": quantity(1 / ranks)}
        for ranks in (1, 2)
    ]
    link = {"latency_us": 5.0, "gb_per_s": 1.0, "overlap_loss": 0.5}
    return Machine.model_validate({**describe(device, link, loads, 1e9, ranks=2), **changes})


def test_a_machine_with_measured_operations_survives_its_file() -> None:
    machine = machine_here()
    again = Machine.model_validate_json(machine.model_dump_json())
    assert again == machine
    measured: MeasuredOperation = machine.device.operations[0]
    assert key_of(event_of(measured)) == key_of(convolution(8, 8))


def test_ranks_of_a_node_slow_each_other() -> None:
    machine = machine_here()
    alone, pair = (Prices(machine.device).on(machine, ranks) for ranks in (1, 2))
    multiply, unfold = convolution(8, 16, batch=2), convolution(8, 16)
    read = multiply._replace(name="relu", flops=0.0)
    host = 10e-6
    assert [bound_of(each) for each in (multiply, unfold, read)] == ["arithmetic", "unfolding", "memory"]
    plain = Prices(machine.device)
    for event, factor in ((multiply, 1), (unfold, 3), (read, 2)):
        assert alone.seconds(event) == pytest.approx(factor * plain.seconds(event) + host)
        assert pair.seconds(event) == pytest.approx(2 * factor * plain.seconds(event) + host)
    assert pair.by_bound([unfold, read]) == pytest.approx(
        {"arithmetic": 0.0, "unfolding": 6 * plain.seconds(unfold), "memory": 4 * plain.seconds(read)}
    )
    assert Prices(machine.device).on(machine, 2, speed=2.0).seconds(read) == pytest.approx(pair.seconds(read) / 2)
    load = machine.load(2)
    assert exchange_seconds(machine, 0, [(1, 10**6)], load) == pytest.approx(200e-6 + 1e-3)
    assert sum_seconds(machine, 10**6, (0, 1), load) == pytest.approx(2000e-6 + 1e-3)


def test_hidden_communication_still_costs_where_the_processor_does_it() -> None:
    machine = machine_here()
    prices = Prices(machine.device)
    halo = Begun(1, 0, 0.0, Label("conv3d", ""), ((1, 10**6),), (), torch.float32)
    work = Computed(2, 0, 0.0, "relu", "", "forward", ((1,),), torch.float32, 0.0, 10**9)
    wait = Waited(3, 0, 0.0, halo.label, 1, 0.0)
    travel = exchange_seconds(machine, 0, halo.sends)
    line = replay([halo, work, wait], 0, machine, prices)
    assert line.seconds == pytest.approx(prices.seconds(work) + 0.5 * travel)
    assert line.exposed["halo"] == pytest.approx(0.5 * travel)


def test_waiting_counts_less_where_ranks_share_a_core() -> None:
    machine = machine_here()
    halo = Begun(1, 0, 0.0, Label("conv3d", ""), ((1, 10**6),), (), torch.float32)
    wait = Waited(2, 0, 0.0, halo.label, 1, 0.0)
    prices = Prices(machine.device).on(machine, 2)
    travel = exchange_seconds(machine, 0, halo.sends, prices.load)
    assert replay([halo, wait], 0, machine, prices).seconds == pytest.approx(travel / 2)


def test_factors_of_a_steps_terms_are_fitted_past_disturbed_steps() -> None:
    draw = np.random.default_rng(0)
    terms = draw.uniform(0.01, 0.1, (15, 5))
    true = np.array([1.3, 1.2, 1.6, 1.1, 0.9])
    seconds = terms @ true
    asked = draw.uniform(0.01, 0.1, (20, 5))
    assert asked @ fitted_factors(terms, seconds) == pytest.approx(asked @ true, rel=0.06)
    seconds[[3, 8, 11]] *= 2  # another program ran meanwhile
    assert asked @ fitted_factors(terms, seconds) == pytest.approx(asked @ true, rel=0.12)


def test_gradients_are_planned_from_predicted_times() -> None:
    """The same record whatever the host's clock says: times are the replay's, and bytes are all there."""
    machine, sizes = machine_here(), {"data": 2, "depth": 1, "height": 1, "width": 1}

    def recorded() -> tuple[list[float], list[int]]:
        pricing = Replay(1, machine, Prices(machine.device).on(machine, 2))
        step = record_step(subject(optimizer=torch.optim.Adam), sizes, 1, 1, pricing=pricing)
        return [event.time for event in step.record.events], [event.bytes for event in step.record.sums]

    times, sums = recorded()
    assert (times, sums) == recorded() and times == sorted(times) and times[-1] > 0 and sums


def test_memory_counts_what_a_step_makes_and_its_workspace() -> None:
    state, made = torch.empty(1000, device="meta"), []

    def step() -> None:
        state.add_(1)  # made elsewhere
        made.append(state + 1)
        made.append(state * 2)

    with dry(0, 1):
        assert peak_of(step) == 8000
        assert peak_of(step, lambda function, args, result: 500) == 8500


def test_workspace_is_what_an_operation_takes_beside_its_result() -> None:
    with dry(0, 1), Catalogue() as catalogue:
        F.conv3d(torch.empty(1, 8, 32, 32, 32, device="meta"), torch.empty(8, 8, 3, 3, 3, device="meta"), padding=1)
    (call,) = catalogue.calls.values()
    unfolded = 4 * 8 * 27 * 32**3  # what torch's kernel for small volumes copies to
    assert workspace_of(call, CPU) == pytest.approx(unfolded, rel=0.1)


def test_probes_are_drawn_alike_and_can_be_recorded() -> None:
    first, again = (list(probes(4, torch.float32)) for _ in range(2))
    assert [(s.shapes, mesh, batch) for s, mesh, batch in first] == [(s.shapes, m, b) for s, m, b in again]
    for drawn, mesh, batch in first:
        assert record_step(drawn, mesh, batch, warm=0).record.operations


@pytest.mark.long
def test_a_device_is_measured_without_the_shapes_that_are_judged() -> None:
    sizes = {"data": 1, "depth": 1, "height": 1, "width": 1}
    step = record_step(subject(optimizer=torch.optim.Adam), sizes, 1, warm=0)
    judged = {key_of(event) for event in step.record.operations}
    device = measure_device(CPU, lambda what, share: None, without=judged, seconds=5.0)
    measured = {key_of(event_of(MeasuredOperation.model_validate(row))) for row in device["operations"]}
    assert len(measured) > 100 and not measured & judged


class Mixed(nn.Module):
    """A frozen layer, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv3d(4, 64, 3, padding=1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(1000))
        self.head = nn.Conv3d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x)).float()


def mixed(**changes: Any) -> Subject:
    return Subject(Mixed, lambda output: output.square().mean(), ((1, 4, 16, 16, 16),), **changes)


UNCUT = {"data": 1, "depth": 1, "height": 1, "width": 1}


def test_memory_holds_samples_frozen_weights_and_buffers() -> None:
    step = record_step(mixed(), UNCUT, 1)
    assert step.weights == 4 * (64 * 4 * 27 + 64 + 1000 + 64 + 1) and step.gradients == 4 * 65
    assert step.activations > 4 * 16**3 * (4 + 64), "the sample, and what the frozen layer makes"


def test_gradients_lie_in_their_buckets_on_meta_tensors_too() -> None:
    """A gradient whose bucket holds it is no memory of its own: all meta tensors have the same address."""

    def large() -> nn.Module:
        return nn.Sequential(nn.Flatten(), *(nn.Linear(512, 512, bias=False) for _ in range(4)))

    drawn = Subject(large, lambda output: output.square().mean(), ((1, 1, 512),))
    step = record_step(drawn, {"data": 1, "width": 1}, 1)
    assert step.activations < 3 * 4 * 512**2, "two gradients on their way, not all four"


@pytest.mark.parametrize("depth", [1, 2])
def test_autocast_is_recorded_as_it_would_run(depth: int) -> None:
    casting = mixed(around=lambda: torch.autocast("cpu", torch.bfloat16))
    step = record_step(casting, {**UNCUT, "depth": depth}, 1)
    convolutions = [event.dtype for event in step.record.operations if "convolution" in event.name]
    assert convolutions and set(convolutions) == {torch.bfloat16}
    assert step.gradients == 4 * 65, "parameters stay in float32"


def test_a_dtype_without_a_peak_may_still_be_copied() -> None:
    machine = load_machine("summit")
    peaks = {name: peak for name, peak in machine.device.peak_tflops.items() if name != "float64"}
    prices = Prices(machine.device.model_copy(update={"peak_tflops": peaks}))
    copy = Computed(0, 0, 0.0, "cat", "", "forward", ((8,),), torch.float64, 8.0, 128)
    assert prices.seconds(copy) > 0
    with pytest.raises(HaloclineError, match="no peak for float64"):
        prices.seconds(convolution(8, 16)._replace(dtype=torch.float64))
