"""Machine files: every shipped one is valid and says where its constants come from; slips are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halocline.plan.collectives import chosen_algorithm, exchange_seconds, group_of, latency_us, sum_seconds
from halocline.plan.machine import MachineError, load_machine, quantities, shipped

MACHINES = [
    "abci",
    "cpu",
    "dgx-a100",
    "eos",
    "juwels-booster",
    "lassen",
    "minsky",
    "perlmutter",
    "piz-daint",
    "summit",
]


def test_all_machines_are_shipped() -> None:
    assert shipped() == MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_a_shipped_machine_is_valid(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert {quantity.source for _, quantity in quantities(machine)} <= {"measured", "published", "assumed"}
    assert all(quantity.low < quantity.value < quantity.high for _, quantity in machine.assumed())


def broken(tmp_path: Path, change: Any) -> str:
    content = json.loads(Path(load_path("summit")).read_text())
    change(content)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(MachineError) as error:
        load_machine(str(path))
    return str(error.value)


def load_path(name: str) -> Path:
    import halocline.plan

    return Path(halocline.plan.__file__).parent / "machines" / f"{name}.json"


def test_slips_are_refused_by_name(tmp_path: Path) -> None:
    def milliseconds(content: Any) -> None:
        content["links"][0]["latency_us"]["value"] = 9e6

    def misspelt(content: Any) -> None:
        content["device"]["memory_gbytes"] = content["device"].pop("memory_gb")

    def without_range(content: Any) -> None:
        del content["device"]["efficiency"]["low"]

    def range_in_units_of_its_own(content: Any) -> None:
        content["device"]["launch_us"]["high"] = 9e6

    def inside_out(content: Any) -> None:
        content["links"].reverse()

    assert "links.0.latency_us: 9e+06 is outside" in broken(tmp_path, milliseconds)
    assert "device.memory_gbytes: unknown key" in broken(tmp_path, misspelt)
    assert "device.efficiency: an assumed value needs low and high" in broken(tmp_path, without_range)
    assert "device.launch_us: 9e+06 is outside" in broken(tmp_path, range_in_units_of_its_own)
    assert "it joins all" in broken(tmp_path, inside_out)
    with pytest.raises(MachineError, match=r"no machine 'sumit' \(did you mean summit\?\); it is abci"):
        load_machine("sumit")
    with pytest.raises(MachineError, match="halocline calibrate"):
        load_machine(str(tmp_path / "none.json"))


# Latencies of an all-reduce on Summit in microseconds, from NCCL's own tuning model: ring and tree, by protocol.
NCCL = {
    6: (13, 33, 42, 13, 26, 48),
    96: (248, 438, 972, 53, 94, 160),
    1536: (3944, 6918, 15852, 93, 162, 272),
    6144: (15771, 27654, 63468, 113, 196, 328),
    27600: (70841, 124206, 285180, 133, 230, 384),
}


@pytest.mark.parametrize("ranks", NCCL)
def test_latencies_are_those_of_nccl(ranks: int) -> None:
    group = group_of(load_machine("summit"), range(ranks))
    ours = [latency_us(group, algorithm, protocol) for algorithm in ("ring", "tree") for protocol in range(3)]
    assert [round(each) for each in ours] == pytest.approx(NCCL[ranks], abs=1)


def test_trees_win_at_scale_and_rings_with_bandwidth() -> None:
    summit = load_machine("summit")
    assert chosen_algorithm(summit, 1024, range(27600)).startswith("tree")
    assert chosen_algorithm(summit, 240_000_000, range(6)) == "ring Simple"
    assert sum_seconds(summit, 0, range(6)) == sum_seconds(summit, 100, [3]) == 0.0


def test_a_shared_port_serves_all_ranks_of_a_node() -> None:
    summit = load_machine("summit")
    inside, across = (exchange_seconds(summit, 0, [(peer, 10**9)]) for peer in (1, 6))
    assert inside == pytest.approx(9e-6 + 1 / 50, rel=1e-6)
    assert across == pytest.approx(3e-6 + 6 / 23, rel=1e-6)
    assert exchange_seconds(summit, 0, [(1, 10**9), (6, 10**9)]) == across, "levels run beside each other"
