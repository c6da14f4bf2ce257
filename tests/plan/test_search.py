"""Plans: what is compared, what is taken and why, and what is said where nothing can be planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_unet import subject
from torch import Tensor, nn
from typer.testing import CliRunner

from halocline.arrangement import Arrangement
from halocline.cli.app import app
from halocline.errors import Refused
from halocline.plan import search as search_module
from halocline.plan.collectives import sum_seconds
from halocline.plan.cost import Prices, key_of
from halocline.plan.estimate import Estimator
from halocline.plan.gathering import ChainLayer, Gathered, best_gathers
from halocline.plan.machine import Machine, load_machine
from halocline.plan.plan_file import read_plan
from halocline.plan.recompute import BlockKind, least_work, packs
from halocline.plan.recording import busiest_rank, record_step
from halocline.plan.replay import replay
from halocline.plan.search import NoPlan, RefusedCut, chosen, factorizations, meshes, price, search
from halocline.tensor import unwrap
from halocline.world.events import Begun, Computed, Label, Summed, Waited


def test_every_factorization_once() -> None:
    found = [tuple(sizes.values()) for sizes in factorizations(12, ["a", "b", "c"])]
    assert len(found) == len(set(found)) == 18
    assert all(a * b * c == 12 for a, b, c in found)


def test_the_busiest_rank_has_the_largest_tile_and_then_most_neighbours() -> None:
    sizes = {"data": 1, "depth": 3, "height": 3, "width": 1}
    volume = {"depth": 12, "height": 12, "width": 12}
    middle = busiest_rank(Arrangement(sizes), volume)
    inner, corner = (record_step(subject(), sizes, 1, rank).record for rank in (middle, 0))
    assert inner.messages > corner.messages and middle == 4
    pair = {"data": 1, "depth": 2, "height": 1, "width": 1}
    assert busiest_rank(Arrangement(pair, multiple=8), {**volume, "depth": 12}) == 0, "tiles of 8 and 4"
    assert busiest_rank(Arrangement(pair, {"depth": (0, 4, 12)}), volume) == 1


def test_the_slowest_rank_of_an_uneven_cut_is_priced() -> None:
    machine, sizes = load_machine("perlmutter"), {"data": 1, "depth": 2, "height": 1, "width": 1}
    cut = Arrangement(sizes, {"depth": (0, 18, 24)})
    found = price(subject(), machine, cut, 1, Prices(machine.device))
    recorded = [record_step(subject(), sizes, 1, rank, arrangement=cut) for rank in range(2)]
    assert found.recorded.record.rank == 0
    assert found.recorded.activations == recorded[0].activations > recorded[1].activations


class LateLayers(nn.Module):
    """A classifier whose late layers have hardly any work."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, 2, padding=1))
        self.late = nn.Sequential(nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 16, 3, 2, padding=1), nn.Conv3d(16, 4, 3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.late(self.early(x)).mean((2, 3, 4)))


NETWORKS = {  # what is planned, and the modules whose input is smaller than the sample
    "U-Net": (subject(), ["norm", "up"]),
    "U-Net, uneven": (subject(shapes=((1, 1, 20, 12, 24),)), ["norm", "up"]),
    "classifier": (subject(make_model=LateLayers), ["late.0", "late.2"]),
}


@pytest.mark.parametrize(
    ("network", "machine", "batch"),
    [
        pytest.param("U-Net", "summit", 4, marks=pytest.mark.long),
        pytest.param("U-Net, uneven", "eos", 1, marks=pytest.mark.long),
        pytest.param("classifier", "summit", 1, marks=pytest.mark.long),
        pytest.param("U-Net", "summit", None, marks=pytest.mark.trial),
        pytest.param("U-Net", "eos", None, marks=pytest.mark.trial),
        pytest.param("U-Net", "summit", 1, marks=pytest.mark.trial),
        pytest.param("U-Net", "eos", 4, marks=pytest.mark.trial),
        pytest.param("U-Net, uneven", "summit", 4, marks=pytest.mark.trial),
        pytest.param("classifier", "eos", 4, marks=pytest.mark.trial),
    ],
)
def test_thinned_candidates_hold_the_best(network: str, machine: str, batch: int | None) -> None:
    """The search's answer is within 1 % of the best of all candidates, each recorded and replayed."""
    (planned, modules), described = NETWORKS[network], load_machine(machine)
    best = search(planned, described, 8, batch)[0]
    everything = [
        price(planned, described, replace(Arrangement(sizes), **changes), batch, Prices(described.device))
        for sizes in meshes(planned, 8, batch)
        for changes in [{}, {"multiple": 2}, *({"gather": (module,)} for module in modules)]
    ]
    assert best.seconds_per_sample <= 1.01 * min(each.seconds_per_sample for each in everything)


def test_late_layers_are_gathered_where_they_have_no_work() -> None:
    candidates = search(subject(make_model=LateLayers), load_machine("summit"), 8, 1)
    best, cut = candidates[0], next(each for each in candidates if not each.arrangement.gather)
    assert best.arrangement.gather and best.seconds < cut.seconds


def test_the_best_spans_of_a_chain_are_gathered() -> None:
    def layer(place: str, voxels: int, cut: float, whole: float, able: bool = True) -> ChainLayer:
        return ChainLayer(place, able, voxels, cut, whole, enter=1.0, kept=10)

    down = [layer("first", 64, 5, 50, able=False), layer("down", 8, 5, 4), layer("bottom", 1, 5, 1)]
    up = [layer("up", 8, 5, 4.5), layer("leave", 64, 5, 50, able=False), layer("head", 1, 5, 0.5)]
    assert best_gathers(down) == Gathered(("down",), 4.0, 20)
    assert best_gathers([*down, *up]) == Gathered(("down", "head"), 4.5 + 3.5, 40), "a span ends where a skip joins"
    assert best_gathers([layer("down", 8, 5, 4.5)]) == Gathered(), "gathering itself takes longer"


def test_equal_blocks_are_folded_in_the_search_for_recomputation() -> None:
    assert all(sum(packs(count)) == count for count in range(1, 40))
    kinds = [BlockKind(1.0, 1000, tuple(f"early.{n}" for n in range(50))), BlockKind(0.4, 500, ("late.0", "late.1"))]
    pairs = [(early, late) for early in range(51) for late in range(3) if early or late]

    def least(wanted: float) -> float:
        return min(a + 0.4 * b for a, b in pairs if 1000 * a + 500 * b - 1000 >= wanted)

    for wanted in (100, 1_000, 7_300, 30_000, 48_000):
        found = least_work(kinds, wanted)
        assert found is not None and found.freed >= wanted and len(set(found.paths)) == len(found.paths)
        eight_packs_rounded = (wanted + 1000) * (1 + 8 / 400) - 1000
        assert least(wanted) <= found.seconds + 1e-9 and found.seconds <= least(eight_packs_rounded) + 1e-9
    assert least_work(kinds, 51_000) is None


def test_plain_data_parallel_stays_unless_clearly_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_machine("summit")
    candidates = search(subject(), machine, 4)
    assert str(chosen(candidates, machine)) == "data=4"
    monkeypatch.setattr(search_module, "MARGIN", -10.0)
    assert chosen(candidates, machine) is candidates[0]


def lean(machine: Machine, gigabytes: float) -> Machine:
    memory = machine.device.memory_gb.model_copy(update={"value": gigabytes})
    return machine.model_copy(update={"device": machine.device.model_copy(update={"memory_gb": memory})})


def test_memory_is_a_hard_limit() -> None:
    machine = load_machine("summit")
    plain, *others = sorted(search(subject(), machine, 8), key=lambda each: -each.recorded.memory)
    between = (plain.recorded.memory + others[-1].recorded.memory) / 2e9
    cut = chosen(search(subject(), lean(machine, between), 8), machine)
    assert cut.fits and cut.recorded.memory < plain.recorded.memory
    with pytest.raises(NoPlan, match=r"the leanest, .*, needs 0\.0 GB a device, .* has 1e-05; use more devices"):
        chosen(search(subject(), lean(machine, 1e-5), 8), lean(machine, 1e-5))


def test_more_ranks_than_voxels() -> None:
    tiny = subject(shapes=((1, 1, 2, 2, 2),))
    with pytest.raises(NoPlan, match=r"2 x 2 x 2 voxels .* over 8 devices at most, and the data axis must divide"):
        meshes(tiny, 27, 1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.mean() > 0 else -self.layer(x)


def test_a_model_that_cannot_be_recorded_is_named() -> None:
    with pytest.raises(Refused, match="it needs a value, and a dry run has shapes only"):
        record_step(subject(make_model=Branches), {"data": 1, "depth": 2, "height": 1, "width": 1}, 1)


class RefusesWidth(nn.Module):
    """Stands for an operation whose rule refuses a cut of one dim."""

    def __init__(self, refused: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.layer, self.refused = nn.Conv3d(1, 1, 3, padding=1), refused

    def forward(self, x: Tensor) -> Tensor:
        if any(unwrap(x).shape[dim] != x.shape[dim] for dim in self.refused):
            raise Refused("some_operation", "layer", "it needs whole samples", "cut another dim")
        return self.layer(x)


def test_a_refused_cut_is_skipped_with_its_reason() -> None:
    machine, refused = load_machine("summit"), list[RefusedCut]()
    found = search(subject(make_model=RefusesWidth), machine, 4, 1, refused=refused)
    assert found and all(each.sizes["width"] == 1 for each in found)
    assert refused and all(each.arrangement.sizes["width"] > 1 for each in refused)
    assert "some_operation in layer: it needs whole samples" in refused[0].reason
    with pytest.raises(Refused, match="it needs whole samples"):
        search(subject(make_model=lambda: RefusesWidth((2, 3, 4))), machine, 4, 1)


def test_a_refused_cut_is_shown_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--shape", "1,1,16,16,16", "--gpus", "2", "--machine", "summit", "--batch", "1", "--why-not", "width=2"]
    monkeypatch.syspath_prepend(Path(__file__).parent)
    status, shown = run("test_search:RefusesWidth", *words, "--out", str(tmp_path / "plan.json"))
    assert status == 0 and "Refused: width=2: some_operation in layer: it needs whole samples" in shown, shown
    assert "width=2 is refused: some_operation in layer" in shown
    assert "width=2" in read_plan(tmp_path / "plan.json").refused


def test_shares_by_speed_lie_at_multiples_of_the_stride() -> None:
    """Aligned and unaligned shares are both candidates; the better by price is taken."""
    machine, planned = load_machine("summit"), subject(shapes=((1, 1, 24, 24, 48),))
    found = [each for each in search(planned, machine, 2, 1, speeds=(2.0, 1.0)) if each.arrangement.points]
    points = [at for each in found for at in each.arrangement.points.values()]
    assert any(at[1] % 2 == 0 for at in points), "the network halves its samples once"
    assert found[0].seconds == min(each.seconds for each in found)


def test_a_pooled_sample_does_not_make_a_stride() -> None:
    machine = load_machine("summit")
    planned = subject(make_model=Excited)
    estimator = Estimator(planned, machine, Prices(machine.device))
    assert estimator.stride == 2
    weight = next(each.event.shapes[1] for each in estimator.of_samples if each.event.shapes[1:2] == ((1, 4, 3, 3, 3),))
    local = estimator._local(
        next(each.event for each in estimator.of_samples if each.event.shapes[1:2] == (weight,)), (2.0, 1.0, 1.0), 1
    )
    assert local.shapes[1] == weight and local.shapes[0] == (1, 4, 6, 12, 12), "samples are cut, weights are not"


class Excited(nn.Module):
    """Squeeze and excitation after one halving, and a convolution to one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.excite = nn.Conv3d(1, 4, 3, 2, 1), nn.Conv3d(4, 4, 1)
        self.leave = nn.Conv3d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.leave(x * self.excite(x.mean((2, 3, 4), keepdim=True)).sigmoid())


# ---- replay ----


def computed(number: int, gigabytes: float) -> Computed:
    return Computed(number, 0, 0.0, "relu", "", "forward", ((1,),), torch.float32, 0.0, int(gigabytes * 1e9))


def test_communication_hides_behind_computation() -> None:
    machine = load_machine("summit")
    prices = Prices(machine.device)
    second = prices.seconds(computed(0, 900))
    halo = Begun(1, 0, 0.0, Label("conv3d", ""), ((1, 10**9),), (), torch.float32)
    wait = Waited(2, 0, 0.0, halo.label, 1, 0.0)
    travel = 9e-6 + 1 / 50

    exposed = replay([halo, wait, computed(3, 900)], 0, machine, prices)
    hidden = replay([halo, computed(3, 900), wait], 0, machine, prices)
    assert exposed.seconds == pytest.approx(second + travel) and exposed.exposed["halo"] == pytest.approx(travel)
    assert hidden.seconds == pytest.approx(second) and hidden.exposed["halo"] == 0
    left = replay([halo], 0, machine, prices)
    assert left.seconds == pytest.approx(travel), "what nobody waits for still ends the step"


def test_a_sum_is_priced_over_its_own_ranks() -> None:
    machine = load_machine("summit")  # six devices a node

    def seconds(*ranks: int) -> float:
        total = Summed(1, 0, 0.0, Label("gradients", "", "gradients"), ranks, 10**6, torch.float32)
        return replay([total], 0, machine, Prices(machine.device)).seconds

    assert seconds(0, 1) == sum_seconds(machine, 10**6, [0, 1]) < sum_seconds(machine, 10**6, [0, 6]) == seconds(0, 6)


# ---- the command ----


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


SMALL = ["unet3d", "--shape", "1,1,16,16,16", "--gpus", "2", "--machine", "perlmutter"]


def test_the_command_explains_its_choice(tmp_path: Path) -> None:
    status, shown = run(*SMALL, "--why-not", "depth=2", "--out", str(tmp_path / "plan.json"))
    assert status == 0 and "Take data=2." in shown and "depth=2 takes" in shown
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["mesh_sizes"] == {"data": 2, "depth": 1, "height": 1, "width": 1}
    assert written["assumed"]["device.efficiency"][0] < 0.6 < written["assumed"]["device.efficiency"][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "sumit"], "no machine 'sumit'"),
        (["--gpus", "100000"], "perlmutter has 7,168 devices"),
        (["--shape", "1,1,16,16,16"], "unet3d takes one input of 5 dims"),
        (["--dtype", "float8"], "no dtype 'float8'"),
        (["--why-not", "time=2"], "no axis 'time'"),
        (["--why-not", "depth=3"], "does not divide 2 devices"),
    ],
)
def test_nonsense_is_one_clear_line(arguments: list[str], said: str) -> None:
    status, shown = run(*SMALL, *arguments)
    assert status == 2 and said in shown


def test_a_sample_is_a_batch_of_one() -> None:
    status, shown = run("unet3d", "--shape", "2,1,16,16,16")
    assert status == 2 and "the shape of one sample begins with 1" in shown


@pytest.mark.long
def test_operations_are_timed_at_their_own_shapes(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    assert CliRunner().invoke(app, ["calibrate", "--ranks", "1", "--seconds", "4", "--out", str(out)]).exit_code == 0
    assert load_machine(str(out)).device.peak_tflops["float32"].source == "measured"
    machine = load_machine(str(out))
    prices, sizes = Prices(machine.device), {"data": 1, "depth": 2, "height": 1, "width": 1}
    candidate = price(subject(), machine, Arrangement(sizes), None, prices, torch.device("cpu"))
    keys = {key_of(event) for event in candidate.recorded.record.operations}
    assert keys <= set(prices.measured) and all(seconds > 0 for seconds in prices.measured.values())


@pytest.mark.long
def test_tiles_below_the_spatial_metg_are_left_out_unless_nothing_else_fits() -> None:
    plain = load_machine("perlmutter")

    def cut_candidates(machine: Machine, memory: float | None = None) -> list[bool]:
        device = machine.device
        if memory is not None:
            device = device.model_copy(update={"memory_gb": device.memory_gb.model_copy(update={"value": memory})})
        small = machine.model_copy(update={"device": device})
        return [not each.is_plain for each in search(subject(), small, 4)]

    metg = {"value": 1e5, "source": "measured", "reference": "a test"}
    slow = Machine.model_validate({**plain.model_dump(), "spatial_metg_us": metg})
    quick = Machine.model_validate({**plain.model_dump(), "spatial_metg_us": {**metg, "value": 0.01}})
    assert any(cut_candidates(plain)) and cut_candidates(quick) == cut_candidates(plain)
    assert not any(cut_candidates(slow))
    needed = min(each.recorded.memory for each in search(subject(), plain, 4)) / 1e9
    assert any(cut_candidates(slow, 1.01 * needed)), "too little memory for whole samples: a cut is all there is"
