"""A zoo through the check. The networks of others are not needed here: a small zoo of our own stands in for them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from test_cli import run
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from halocline.cli import zoo as zoo_command
from halocline.testing.check import NetworkReport
from halocline.testing.pool import Outcome, RankError, RankPool, shared_pool
from halocline.testing.task import BadUsage, make_inputs, make_keywords, make_model, make_task
from halocline.testing.zoo import ZooReport, check_zoo
from halocline.zoo import ZOOS, NoSuchNetwork, NotInstalled, Zoo, ZooEntry, find_zoo, prepare

# ---- a zoo; ranks import it from here ----


def unheard_of(x: Tensor) -> Tensor:
    """A function that no rule can cover."""
    if has_torch_function((x,)):
        return handle_torch_function(unheard_of, (x,), x)
    return x.exp()


class Net(nn.Module):
    """A convolution, then what ``kind`` says; a whole-number input and a keyword choose a row of a table."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.table = kind, nn.Conv3d(1, 2, 3, padding=1), nn.Embedding(4, 2)
        nn.init.zeros_(self.table.weight)

    def forward(self, volume: Tensor, step: Tensor, mask: Tensor, *, label: Tensor, sign: int) -> dict[str, Any]:
        y = self.first(volume) + (self.table(step) + self.table(label)).view(1, 2, 1, 1, 1)
        y = y.masked_fill(mask.bool(), 0.0) * sign
        return {"y": getattr(self, self.kind)(y), "nothing": None}

    def exact(self, y: Tensor) -> Tensor:
        return y

    def refused(self, y: Tensor) -> Tensor:
        return unheard_of(y)

    def vacuous(self, y: Tensor) -> Tensor:
        return y * 0

    def wrong(self, y: Tensor) -> Tensor:
        return y * (1 + dist.get_rank()) if dist.is_initialized() else y

    def broken(self, y: Tensor) -> Tensor:
        return y.view(-1, 7)


def network(kind: str, dtype: str = "float64") -> ZooEntry:
    mask = (torch.arange(8 * 6 * 5) % 5 == 0).view(1, 1, 8, 6, 5).to(torch.uint8)
    keywords = {"label": torch.tensor([1]), "sign": -1}
    return ZooEntry(kind, lambda nn: Net(kind), ((1, 1, 8, 6, 5), torch.tensor([2]), mask), keywords, dtype)


def single() -> ZooEntry:
    """Fails in float64, as some networks do."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv3d(1, 2, 3)

        def forward(self, volume: Tensor) -> Tensor:
            assert volume.dtype == torch.float32
            return self.first(volume).relu()

    return ZooEntry("a/single", lambda nn: Single(), ((1, 1, 8, 6, 5),), dtype="float32")


KINDS = ("exact", "vacuous", "wrong", "broken", "refused")
ZOO = Zoo("mine", "torch.nn", (*map(network, KINDS[:-1]), single(), network(KINDS[-1])))
ABSENT = Zoo("absent", "no_such_package", ZOO.entries, extra="zoo-absent", alone=("one", "two"))
NO_ZOO = 3


@pytest.fixture(scope="module")
def report() -> ZooReport:
    heard: list[str] = []
    found = check_zoo(
        "test_zoo:ZOO", pool=shared_pool(2), done=lambda count, name, one: heard.append(f"{count} {name} {one.verdict}")
    )
    assert heard[0] == "1 of 6 exact exact"
    assert len(heard) == 6
    return found


def test_each_network_has_its_verdict(report: ZooReport) -> None:
    assert {name: one.verdict for name, one in report.networks.items()} == {
        **{kind: kind for kind in KINDS},
        "a/single": "exact",
    }
    assert report.counts == {"exact": 2, "gathered": 0, "refused": 3, "wrong": 1}
    assert (report.ranks, report.cut) == (2, {"depth": 2})


def test_what_proves_nothing_says_why(report: ZooReport) -> None:
    assert "nothing to compare" in report.networks["vacuous"].why
    assert "fails on one rank, before any cut" in report.networks["broken"].why
    (refusal,) = report.networks["refused"].refusals
    assert refusal["operation"] == "unheard_of"


def test_a_network_that_fails_in_float64_is_held_to_the_rounding_of_float32(report: ZooReport) -> None:
    found = report.networks["a/single"]
    assert found.dtype == "float32"
    assert 0 < found.gradient_error <= found.tolerance < 1e-3


def test_the_report_is_json(report: ZooReport) -> None:
    shown = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert {key: shown[key] for key in report.counts} == report.counts
    one = shown["networks"]["exact"]
    assert (one["verdict"], one["gathered_bytes"], one["refusals"]) == ("exact", 0, [])
    assert one["moved_bytes"] > 0


def test_a_crash_of_the_ranks_is_wrong() -> None:
    class Failing:
        def run(self, *_: object, **__: object) -> None:
            raise RankError([Outcome(0, "hung"), Outcome(1, "error", error=ValueError("not here"))])

    found = check_zoo("test_zoo:ZOO", only=["exact"], pool=cast(RankPool, Failing()))
    assert found.counts["wrong"] == 1
    assert "rank 1 raised ValueError: not here" in found.networks["exact"].why


# ---- entries ----


def test_zoos_are_listed_without_their_packages() -> None:
    counts = {name: len(set(find_zoo(name).names)) for name in ZOOS}
    assert counts["monai"] == len(find_zoo("monai").entries) == 49
    assert counts["transformers"] == len(find_zoo("transformers").entries) >= 14
    assert counts["neuralop"] == len(find_zoo("neuralop").entries) == 13
    assert counts["losses"] == len(find_zoo("losses").entries) == 63
    assert {len(entry.shapes[0]) for entry in find_zoo("monai").entries} == {5}
    assert {len(entry.shapes[0]) for entry in find_zoo("transformers").entries} == {4}


def test_parameters_of_zeros_are_refilled() -> None:
    layer = nn.BatchNorm3d(3)
    prepare(layer)
    assert bool(layer.bias.all()) and bool((layer.weight == 1).all())


def test_every_rank_makes_the_same_from_the_name_alone() -> None:
    task = make_task("test_zoo:ZOO/exact", cut={"depth": 2}, dtype="float32")
    volume, step, mask = make_inputs(task)
    assert (volume.dtype, step.dtype, mask.dtype) == (torch.float32, torch.int64, torch.uint8)
    assert [bool(task.dims(index)) for index in range(3)] == [True, False, True]
    assert torch.equal(volume, make_inputs(task)[0])
    assert set(make_keywords(task)) == {"label", "sign"}
    weights = [next(make_model(task).parameters()) for _ in range(2)]
    assert torch.equal(*weights)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "monai/Unet",
        {},
        NoSuchNetwork,
        r"no network 'Unet' in the zoo monai \(did you mean UNet\?\); it has UNet, BasicUNet",
    ),
    (
        "mona/UNet",
        {},
        NoSuchNetwork,
        r"no zoo 'mona' \(did you mean monai\?\); it is monai, transformers, neuralop, losses, or package.module:zoo",
    ),
    ("test_zoo:NO_ZOO/x", {}, NoSuchNetwork, "must be a halocline.zoo.Zoo"),
    ("test_zoo:ZOO/exact", {"shapes": [[1, 1, 8, 8, 8]]}, BadUsage, "inputs of its own"),
]


@pytest.mark.parametrize(("target", "options", "kind", "message"), BAD)
def test_bad_usage_says_what_is_allowed(
    target: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_task(target, **options)


def test_a_missing_package_says_how_to_install_it() -> None:
    alone = "pip install -c constraints.txt --no-deps one two"
    with pytest.raises(NotInstalled, match=rf"pip install -c constraints.txt -e '.\[zoo-absent\]' && {alone}"):
        check_zoo("test_zoo:ABSENT", pool=shared_pool(2))


# ---- the command ----


def canned(**verdicts: str) -> ZooReport:
    found = {
        name: NetworkReport(f"mine/{name}", verdict, 0.0, 0.0, "weight", [], 0.5, 1, 0, 2, {"depth": 2})
        for name, verdict in verdicts.items()
    }
    return ZooReport("mine", 2, {"depth": 2}, found)


def test_the_command_counts_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = canned(one="exact", two="refused", three="vacuous", four="gathered")
    report.networks["two"].refusals.append(
        {"operation": "sort", "place": "head[0]", "why": "it needs all", "remedy": "gather first"}
    )
    report.networks["three"].why = "no gradient"
    report.networks["four"].gathers["view in head"] = 3
    monkeypatch.setattr(zoo_command, "find_zoo", lambda _: SimpleNamespace(names=list(report.networks)))
    monkeypatch.setattr(zoo_command, "check_zoo", lambda *_, **__: report)
    code, out, _ = run("check", "--zoo", "mine")
    assert code == 0
    for text in (
        "two: refused: sort in head[0]: it needs all; gather first",
        "three: vacuous: no gradient",
        "four: gathered: view in head (3)",
        "1 exact, 1 gathered, 2 refused, 0 wrong",
    ):
        assert text in out


def test_one_wrong_network_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object, done: Any, **__: object) -> ZooReport:
        report = canned(one="exact", two="wrong")
        done("1 of 2", "one", report.networks["one"])
        return report

    monkeypatch.setattr(zoo_command, "check_zoo", check)
    code, out, err = run("check", "--zoo", "mine", "--only", "one", "--only", "two", "--json")
    found = json.loads(out.splitlines()[-1])
    assert (code, found["wrong"], found["networks"]["two"]["verdict"]) == (1, 1, "wrong")
    assert err == "1 of 2, one: exact (0 s)\n"


def test_names_are_listed() -> None:
    code, out, _ = run("check", "--zoo", "monai", "--list")
    assert (code, out.splitlines()) == (0, find_zoo("monai").names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a network, such as unet3d, or a zoo, such as --zoo monai"),
        (["unet3d", "--only", "UNet"], "--only and --list go with a zoo"),
        (["unet3d", "--zoo", "monai"], "name one network, or a zoo with --only"),
        (["--zoo", "monai", "--shape", "1,1,8,8,8"], "leave out --shape and --args"),
        (["--zoo", "zoos"], "no zoo 'zoos'"),
        (["--zoo", "test_zoo:ABSENT"], "pip install -c constraints.txt -e '.[zoo-absent]'"),
        (["--zoo", "test_zoo:ZOO", "--cut", "time=2"], "its axes are data, depth, height, width"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    code, out, err = run("check", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
