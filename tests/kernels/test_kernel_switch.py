"""When kernels are replaced, how sizes are found, and how results lie in memory."""

from __future__ import annotations

import copy
import json
import pickle
import random
import sys
import threading
from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import same
from torch import Tensor, nn
from typer.testing import CliRunner

import halocline as hc
from halocline.cli.app import app
from halocline.geometry import Interval, chunks_of, cut_at, shape_of, whole
from halocline.kernels import replace
from halocline.kernels.sizes import DEFAULTS, NEVER, Sizes, read_table, sizes, write_table
from halocline.kernels.tune import tune
from halocline.world import run_local

chunked_module = sys.modules["halocline.kernels.chunked"]


def test_views_that_span_too_much_are_large() -> None:
    """A gradient may be a small part of a joined tensor."""
    wide = torch.randn(1, 8, 6, 6, dtype=torch.float64)
    part, before = wide[:, ::7], replace.taken()
    true = F.pad(part, [1, 1, 1, 1], mode="replicate")
    with hc.chunked(150):
        same([F.pad(part, [1, 1, 1, 1], mode="replicate")], [true])
    assert replace.taken() == before + 1


def test_nothing_goes_another_way_afterwards() -> None:
    x = torch.randn(1, 2, 8)
    before = replace.taken()
    with hc.chunked(4):
        F.conv1d(x, torch.ones(1, 2, 1))
        assert replace.taken() == before + 1
    with hc.chunked(None):
        F.conv1d(x, torch.ones(1, 2, 1))
    F.conv1d(x, torch.ones(1, 2, 1))
    assert replace.taken() == before + 1


def test_whoever_asked_last_is_served_whatever_the_order_of_leaving() -> None:
    device = torch.device("cpu")
    first, second = hc.chunked(10), hc.chunked(20)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sizes(device, "convolution") == (20, 20)
    second.__exit__(None, None, None)
    assert sizes(device, "convolution") == NEVER


@pytest.fixture
def sights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if the CPU were the GPU: how often kernels would have been replaced. Above 100 elements it matters."""
    found: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(chunked_module, "_matters", lambda tensor, least: tensor.numel() > 100)
    monkeypatch.setattr(chunked_module, "_GPU", torch.device("cpu"))
    monkeypatch.setattr(chunked_module, "installed", lambda key: bool(found))
    monkeypatch.setattr(chunked_module, "keep_fast", lambda: found.append(1))
    return found


class Grows(nn.Module):
    """Its inputs do not tell how large it becomes."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        if times < 0:
            raise ValueError("no such thing")
        return x.repeat(times).sum()


def test_a_model_is_watched_until_its_inputs_are_known(sights: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    seen = chunked_module.LargeTensorMode.__torch_dispatch__
    monkeypatch.setattr(
        chunked_module.LargeTensorMode, "__torch_dispatch__", lambda *args: (looked.append(1), seen(*args))[1]
    )
    model = hc.distribute(Grows())
    model(torch.zeros(10))
    assert looked and not sights
    looked.clear()
    model(torch.zeros(10))
    assert not looked  # known
    model(torch.zeros(10), times=20)
    assert looked and sights == [1]  # another argument, another kind; replaced before backward
    looked.clear()
    model(torch.zeros(500))
    assert not looked  # nothing is left to watch


def test_a_forward_that_failed_has_shown_nothing(sights: list[int]) -> None:
    model = hc.distribute(Grows())
    with pytest.raises(ValueError, match="no such"):
        model(torch.zeros(10), times=-1)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    model(torch.zeros(10), times=50)
    assert sights == [1]


def test_copies_are_watched_by_themselves(sights: list[int]) -> None:
    model = hc.distribute(nn.Conv1d(1, 1, 1))
    model(torch.zeros(1, 1, 4))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.zeros(1, 1, 4))
    assert not sights
    model(torch.zeros(1, 1, 400))
    assert sights == [1]


def network() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Conv2d(2, 1, 1))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(("rows", "replaced"), [(8, False), (60, True)])
def test_on_a_mesh_kernels_are_replaced_when_a_tile_needs_it(sights: list[int], rows: int, replaced: bool) -> None:
    x, untrained = torch.linspace(-1, 1, rows * 4, dtype=torch.float64).reshape(1, 1, rows, 4), network()

    def train(mesh: hc.Mesh | None) -> list[Tensor]:
        model = copy.deepcopy(untrained)
        model = hc.distribute(model, mesh) if mesh else model
        for _ in range(2):  # watched, then not
            y = model(x if mesh is None else hc.shard(x, mesh, {2: "rows"}))
            (y * y).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    true = train(None)
    for found in run_local(2, lambda: train(hc.Mesh(rows=2))):
        for mine, other in zip(found, true, strict=True):
            torch.testing.assert_close(mine, other)
    assert bool(sights) == replaced


def test_a_distributed_model_is_compiled_whole(sights: list[int]) -> None:
    """The hooks are no break in its graph, and kernels are replaced when it is compiled."""
    model = hc.distribute(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()))
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(1, 1, 6, 6)
    for _ in range(2):
        assert torch.equal(compiled(x), nn.Sequential.forward(model, x))
    assert len(graphs) == 1 and sights


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("channels", [1, 3])
def test_results_are_laid_out_as_torch_s(channels: int, last: bool) -> None:
    """What is compiled relies on it."""
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, channels, 8, 8).to(memory_format=layout).requires_grad_()
    model = nn.Conv2d(channels, 4, 3, padding=1).to(memory_format=layout)

    def strides() -> list[tuple[int, ...]]:
        y = model(x)
        found = torch.autograd.grad(y.sum(), [x, model.weight])
        pools = [F.max_pool2d(x, 2), F.interpolate(x, scale_factor=2, mode="bilinear")]
        return [tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in (y, *found, *pools)]

    true = strides()
    with hc.chunked(40):
        assert strides() == true


def test_what_torch_refuses_is_refused() -> None:
    x, weight = torch.randn(1, 2, 9), torch.randn(2, 2, 3)
    with hc.chunked(4):
        with pytest.raises(RuntimeError):
            torch.convolution(x, weight, None, [1], [-1], [1], False, [0], 1)
        with pytest.raises(RuntimeError):
            F.conv_transpose1d(x, weight, output_padding=1)
        assert F.conv1d(torch.randn(2, 0, 9), torch.randn(2, 0, 3)).numel() == 0


def test_threads_compute_while_chunks_come_and_go() -> None:
    """Kernels are replaced once and stay: only their limits change."""
    x, weight = torch.randn(1, 2, 6, 6, dtype=torch.float64), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    true, wrong = F.max_pool2d(F.conv2d(x, weight), 2), []

    def work() -> None:
        for _ in range(300):
            found = F.max_pool2d(F.conv2d(x, weight), 2)
            if float((found - true).abs().max()) > 1e-12:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with hc.chunked(30):
            pass
    assert not wrong


def test_chunks_of_no_size_are_refused() -> None:
    with pytest.raises(hc.HaloclineError, match="positive"), hc.chunked(0):
        pass


def test_one_channel_too_large_for_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel would read other memory."""
    monkeypatch.setattr("halocline.kernels.channels.LARGEST", 100)
    with hc.chunked(50), pytest.raises(hc.Refused, match="cut the sample"):
        F.max_pool3d(torch.zeros(1, 2, 8, 8, 8), 2)


def test_chunks_cover_the_box_and_are_small_enough() -> None:
    rng = random.Random(0)
    for _ in range(300):
        box = tuple(Interval(lo, lo + rng.randrange(1, 9)) for lo in (rng.randrange(5) for _ in range(3)))
        halo, most = rng.randrange(3), rng.randrange(1, 200)

        def elements(part: tuple[Interval, ...], halo: int = halo) -> int:
            return prod(size + halo for size in shape_of(part))

        found = chunks_of(box, (0, 1, 2), elements, most)
        assert sum(prod(shape_of(part)) for part in found) == prod(shape_of(box))
        assert all(elements(part) <= most or set(shape_of(part)) == {1} for part in found)
        assert len(set(found)) == len(found)
    assert cut_at(whole(5), [0, 2, 5, 9]) == [Interval(0, 2), Interval(2, 5)]


def test_measured_sizes_are_kept_in_a_file(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "chunks.json"  # type: ignore[operator]
    write_table(path, "card a", {"convolution": Sizes(1000, 500)})
    write_table(path, "card b", {"channels": Sizes(2000, 700)})
    assert read_table(path) == {"card a": {"convolution": (1000, 500)}, "card b": {"channels": (2000, 700)}}
    assert [p.name for p in path.parent.iterdir()] == ["chunks.json"]
    for broken in ("", "[]", '{"card": 5}'):
        path.write_text(broken)
        assert read_table(path) == {}
    path.write_text(json.dumps({"card": {"convolution": [10, 20], "channels": [1], "transposed": [20, 10]}}))
    assert read_table(path) == {"card": {"transposed": (20, 10)}}  # a chunk larger than the whole makes no sense
    assert sizes(torch.device("cpu"), "convolution").whole > DEFAULTS["convolution"].whole


def test_tuning_takes_what_is_fastest() -> None:
    """On made-up times: chunks of a quarter are fastest for all, and gain nothing below the limit."""
    largest = 4096

    def seconds(operation: Callable[[], object]) -> float:
        before = replace.taken()
        operation()
        if replace.taken() == before:
            return 1.0
        return 0.99 if sizes(torch.device("cpu"), "convolution").chunk == largest // 4 else 3.0

    found = dict(tune(torch.device("cpu"), seconds, largest, (largest, largest // 2, largest // 4)))
    assert set(found) == set(DEFAULTS)
    assert all(found[family] == (largest, largest // 4) for family in found if family != "norm"), found
    assert found["norm"] == (1 << 26, 1 << 26)  # spreading was never faster


def test_tune_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["tune", "--json"])
    assert result.exit_code == 2
    assert "GPU" in json.loads(result.stdout.splitlines()[-1])["error"]
