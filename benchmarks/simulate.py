"""``bench simulate``: simulated steps, held against the same steps on an emulated cluster.

Ranks outnumber cores, so computing is emulated: each layer sleeps for as long as the device of a described machine
would compute, and gradients are averaged truly, over links of a given rate. The links are calibrated by sums of two
sizes; no step is part of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from halocline.plan.api import mean_square
from halocline.plan.cost import Key, Prices, key_of
from halocline.plan.machine import Machine, load_machine
from halocline.plan.recording import Subject, record_step
from halocline.simulate import Scenario, simulate
from halocline.simulate.step import Recordings
from halocline.workloads import WORKLOADS

from . import simulate_ranks as on_ranks
from .cluster import Cluster
from .machine import Others
from .machine import describe as describe_run
from .simulate_ranks import TAG, SleepingLayer, SleepingNetwork

DEADLINE = 120.0
COMPUTE = 0.25  # seconds of a step, to which the predicted times are scaled
SMALL, LARGE = 4, 1 << 20  # bytes of the sums that calibrate the links
TARGET = 0.10
#: Networks of a few megabytes, so that gradients take from a part to a multiple of the computing.
NETWORKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "unet3d": ((1, 1, 32, 32, 32), {"width": 8}),
    "cosmoflow": ((1, 4, 64, 64, 64), {"width": 4, "size": 64}),
    "tiramisu": ((1, 16, 64, 96), {"growth": 8, "first": 16}),
}
Say = Callable[[str], None]


def measure_simulate(
    nodes: Sequence[int], rates: Sequence[str], repeat: int, say: Say = lambda text: None
) -> dict[str, Any]:
    """Every network on every number of nodes at every rate: measured, simulated, and the error."""
    torch.set_num_threads(1)
    networks = {name: sleeping_layers(name) for name in NETWORKS}
    rows, others = [], []
    for count in nodes:
        with Cluster(nodes=count, rate=rates[0], collective_timeout=DEADLINE) as cluster:
            watch = Others(cluster.run)
            for rate in rates:
                cluster.set_rate(rate)
                machine = calibrated(cluster.run(on_ranks.sums_on_ranks, (SMALL, LARGE), 5, deadline=DEADLINE), count)
                for name, layers in networks.items():
                    say(f"{name} on {count} nodes at {rate}")
                    cluster.run(on_ranks.prepare, name, layers, deadline=DEADLINE)
                    turns = [max(cluster.run(on_ranks.timed_steps, name, 3, deadline=DEADLINE)) for _ in range(repeat)]
                    cluster.run(on_ranks.forget, name, deadline=DEADLINE)
                    rows.append(row(name, count, rate, turns, simulated(name, layers, machine, count)))
            others.append(watch.share())
    errors = [abs(each["error"]) for each in rows]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "targets": {"median_error": TARGET},
        "cases": rows,
        "machine": describe_run(max((share for share in others if share is not None), default=None)),
    }


def sleeping_layers(name: str) -> tuple[SleepingLayer, ...]:
    """The network's modules with parameters, each with the time that a described device would compute for it."""
    shape, arguments = NETWORKS[name]
    factory, device = WORKLOADS[name].factory, load_machine("minsky").device
    subject = Subject(lambda: factory(**arguments), mean_square, (shape,))
    prices = Prices(device)
    seconds: dict[str, float] = defaultdict(float)
    total = 0.0
    for event in record_step(subject, {"data": 1}, 1, warm=0).record.operations:
        if event.phase == "forward":
            seconds[event.place] += prices.seconds(event)
        total += prices.seconds(event)
    model = subject.meta_model()
    owners = [(path, module) for path, module in model.named_modules() if list(module.parameters(recurse=False))]
    forward = sum(seconds[path] for path, _ in owners) or 1.0
    scale = COMPUTE / 3 / forward  # backward takes twice as long
    return tuple(
        SleepingLayer(
            scale * seconds[path],
            2 * scale * seconds[path],
            tuple(tuple(weight.shape) for weight in module.parameters(recurse=False)),
        )
        for path, module in owners
    )


def calibrated(sums: Sequence[Sequence[float]], nodes: int) -> Machine:
    """A machine of CPU ranks whose links have the latency and rate that sums of two sizes show."""
    small, large = max(each[0] for each in sums), max(each[1] for each in sums)
    steps = 2 * (nodes - 1)
    per_byte = max(1e-12, (large - small) / (steps * (LARGE - SMALL) / nodes))

    def known(value: float) -> dict[str, Any]:
        return {"value": value, "source": "measured", "reference": "bench simulate"}

    link = {
        "name": "emulated link", "kind": "socket", "devices": None, "gb_per_s": known(1e-9 / per_byte),
        "latency_us": known(small / steps * 1e6),
    }  # fmt: skip
    device = load_machine("minsky").device.model_dump()
    machine = {
        "name": "emulated", "about": "network namespaces", "nodes": nodes, "devices_per_node": 1,
        "device": {**device, "kind": "cpu"}, "links": [link], "collectives": "gloo",
        "storage": {"name": "none", "gb_per_s_per_node": known(1.0)},
    }  # fmt: skip
    return Machine.model_validate(machine)


def simulated(name: str, layers: tuple[SleepingLayer, ...], machine: Machine, nodes: int) -> dict[str, Any]:
    """The step as `halocline simulate` has it, with the sleeping times as measured operations."""
    subject = Subject(lambda: SleepingNetwork(layers), lambda output: output.sum(), ((1, 1, 1),))
    recordings = Recordings(measured=sleeping_prices(subject, layers))
    found = simulate(Scenario(name, subject, machine, nodes, input_bytes=0), nodes, recordings=recordings)
    return {"predicted_s": found.seconds, "exposed_s": found.exposed, "sums": found.gradient_messages}


def sleeping_prices(subject: Subject, layers: tuple[SleepingLayer, ...]) -> dict[Key, float]:
    """The marks of layers take the time that those sleep; all else takes next to none on a small tensor."""
    prices: dict[Key, float] = {}
    for event in record_step(subject, {"data": 1}, 1, warm=0, plain=True).record.operations:
        marked = event.name in ("add", "sub") and event.shapes and event.shapes[0][0] >= TAG
        if marked and len(event.shapes[0]) == 1:
            layer = layers[event.shapes[0][0] - TAG]
            prices[key_of(event)] = max(1e-9, layer.forward_s if event.name == "add" else layer.backward_s)
    return prices


def row(name: str, nodes: int, rate: str, turns: Sequence[float], found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    measured = median(turns)
    return {
        "case": f"{name}, {nodes} nodes at {rate}",
        "nodes": nodes,
        "rate": rate,
        "measured_s": measured,
        "spread": (max(turns) - min(turns)) / measured,
        **found,
        "error": found["predicted_s"] / measured - 1,
    }
