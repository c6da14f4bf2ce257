"""Nonsense in, a clear error out: what is wrong, where, and what would help."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from small_unet import SIDE, SmallUNet, subject
from torch import Tensor, nn
from typer.testing import CliRunner

import halocline as hc
from halocline.cli.app import app
from halocline.errors import PlanError, Refused
from halocline.plan.machine import Machine, MachineError, load_machine
from halocline.plan.search import NoPlan, chosen, search


def lean(machine: Machine, gigabytes: float) -> Machine:
    memory = machine.device.memory_gb.model_copy(update={"value": gigabytes})
    return machine.model_copy(update={"device": machine.device.model_copy(update={"memory_gb": memory})})


def test_more_ranks_than_voxels() -> None:
    with pytest.raises(
        NoPlan, match=r"2 x 2 x 2 voxels can be cut over 8 devices at most, .* batch of 1; plan for few"
    ):
        hc.plan(lambda: nn.Conv3d(1, 1, 1), (1, 1, 2, 2, 2), machine="summit", devices=16, batch=1)


class Branch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Conv3d(1, 1, 1), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "value":
            return self.layer(x) if float(x.mean()) > 0 else -self.layer(x)
        return self.layer(x).reshape(-1, 7) if self.kind == "shape" else self.layer(x.numpy())


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 1, 1), Branch(kind))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def test_a_network_that_needs_values_is_named_with_its_operation() -> None:
    with pytest.raises(Refused, match=r"item in first\.1: it needs a value, and a dry run has shapes only"):
        search(subject(make_model=lambda: Outer("value")), load_machine("summit"), 2)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", r"return self.layer\(x\).reshape\(-1, 7\) .* in Branch first\.1: .*shape"),
        ("numpy", r"return .* else self.layer\(x.numpy\(\)\) in Branch first\.1: .*check --shape"),
    ],
)
def test_a_network_that_torch_stops_is_named_with_its_line(kind: str, said: str) -> None:
    with pytest.raises(PlanError, match=f"the network cannot be recorded: {said}"):
        search(subject(make_model=lambda: Outer(kind)), load_machine("summit"), 2)


def test_a_slip_of_units_in_a_machine_file(tmp_path: Path) -> None:
    content = json.loads(load_machine("summit").model_dump_json())
    content["device"]["memory_gb"]["value"] = 16e9
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(MachineError, match=r"device.memory_gb: 1.6e\+10 is outside 0.1 to 10000: is it in GB\?"):
        hc.plan(SmallUNet, (1, 1, SIDE, SIDE, SIDE), machine=str(tmp_path / "mine.json"), devices=2)


def test_the_smallest_change_that_would_fit_does() -> None:
    """Both the number of devices and the memory that the message names."""
    machine, planned = load_machine("summit"), subject(optimizer=torch.optim.Adam)
    tight = lean(machine, min(each.recorded.memory for each in search(planned, machine, 2, 1)) / 2.2e9)
    with pytest.raises(NoPlan) as error:
        chosen(search(planned, tight, 2, 1), tight)
    told = re.search(r"larger ones: ([\d.]+) GB a device would do, or about ([\d,]+) devices", str(error.value))
    assert told is not None, str(error.value)
    devices = int(told[2].replace(",", ""))
    assert devices > 2 and chosen(search(planned, tight, devices, 1), tight).fits
    larger = lean(machine, float(told[1]))
    assert chosen(search(planned, larger, 2, 1), larger).fits


def test_no_number_of_devices_helps_where_weights_do_not_fit() -> None:
    tight = lean(load_machine("summit"), 1e-5)
    with pytest.raises(NoPlan, match="more of this size would not, since weights, gradients and optimizer take"):
        chosen(search(subject(), tight, 8), tight)


def test_a_plan_for_another_network(tmp_path: Path) -> None:
    plan = hc.plan(SmallUNet, (1, 1, SIDE, SIDE, SIDE), machine="summit", devices=1)
    with pytest.raises(PlanError, match="made for another network: this SmallUNet has other parameters"):
        plan.arrangement.check(SmallUNet(8))


def test_errors_are_one_line_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    words = ["plan", "unet3d", "--shape", "1,1,16,16,16", "--gpus", "2", "--machine", "perlmutter"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, "--compare", str(tmp_path / "plan.json")])
    assert shown.exit_code == 2 and "its version is None, and this release reads 1" in shown.output
