"""``halocline run``: a script on many ranks ends with the parameters, files and prints of plain Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_cases import SCRIPTS, largest_difference, run_here

from halocline.testing.pool import RankError, shared_pool

VOLUMES = SCRIPTS / "volumes.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of the script in plain Python."""
    folder = tmp_path_factory.mktemp("plain")
    done = subprocess.run(
        [sys.executable, VOLUMES], cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    return folder / "out", done.stdout


@pytest.mark.parametrize(("ranks", "cut"), [(2, {}), (3, {}), (2, {"depth": 2})], ids=["2", "3", "2 cut"])
def test_a_script_does_what_it_does_in_plain_python(
    plain: tuple[Path, str], tmp_path: Path, ranks: int, cut: dict[str, int]
) -> None:
    folder, text = plain
    outputs = shared_pool(ranks).run(run_here, VOLUMES, [], tmp_path, cut)
    assert outputs == [text] * ranks
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in folder.iterdir())
    saved, true = (torch.load(each / "m.pt") for each in (tmp_path / "out", folder))
    assert largest_difference(saved, true) < 1e-8
    seen, wanted = (json.loads((each / "seen.json").read_text()) for each in (tmp_path / "out", folder))
    assert largest_difference(seen, wanted) < 1e-8 and [row[0] for row in seen] == [4, 3] * 2


ORDINARY = sorted(Path(os.environ.get("HALOCLINE_SCRIPTS", "/nowhere")).glob("*.py"))


@pytest.mark.long
@pytest.mark.skipif(not ORDINARY, reason="HALOCLINE_SCRIPTS names no folder of scripts")
@pytest.mark.parametrize("script", ORDINARY, ids=lambda path: path.stem)
def test_a_script_of_a_folder_does_what_it_does_in_plain_python(tmp_path: Path, script: Path) -> None:
    """Scripts that take --double and --steps. All they save with torch is compared; float64 on one to three ranks."""
    seen = []
    for ranks in range(4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        ours = ["-m", "halocline.cli", "run", str(script), "--ranks", str(ranks), "--"]
        launch = ours if ranks else [str(script)]
        done = subprocess.run(
            [sys.executable, *launch, "--double", "--steps", "12"],
            cwd=folder, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        saved = {path.name: torch.load(path) for path in sorted(folder.iterdir())}
        seen.append((done.stdout, saved))
    assert seen[0][1] and all(printed == seen[0][0] for printed, _ in seen)
    for ranks in (1, 2, 3):
        apart = largest_difference(seen[ranks][1], seen[0][1])
        print(f"{script.stem} on {ranks}: {apart:.1e}")
        assert apart < 1e-8


@pytest.mark.long
def test_indexed_numbers_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    saved = []
    for ranks, cut in ((1, {}), (2, {}), (3, {}), (2, {"depth": 2})):
        folder = tmp_path / f"{ranks}{len(cut)}"
        folder.mkdir()
        shared_pool(ranks).run(run_here, VOLUMES, [], folder, cut, "indexed")
        saved.append(torch.load(folder / "out" / "m.pt"))
    assert all(largest_difference(each, saved[0]) < 1e-8 for each in saved[1:])


TRAIN = """
import torch, os
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(8, 3)
model = nn.Linear(3, 2)
"""
REFUSED = {
    "rank": ("import os\nprint(os.environ.get('RANK', 0))", r"os.environ\['RANK'\].*asks which rank it is"),
    "local rank": ("import os\n'LOCAL_RANK' in os.environ", r"LOCAL_RANK"),
    "joins": ("import torch.distributed as d\nd.init_process_group('gloo')", "torch.distributed.init_process_group"),
    "asks torch": ("import torch.distributed as d\nd.get_rank()", "torch.distributed.get_rank"),
    "sampler": (
        TRAIN + "from torch.utils.data import DistributedSampler\nDistributedSampler(x, 2, 0)",
        "DistributedSampler.*divides its work among ranks",
    ),
    "entropy": (
        TRAIN + "torch.seed()\nfor b in DataLoader(TensorDataset(x), 4, shuffle=True): pass",
        "DataLoader.*drawn different random numbers",
    ),
    "other data": (
        TRAIN + "import secrets\nx = x + secrets.randbelow(10**9)\nfor b in DataLoader(TensorDataset(x), 4): pass",
        "DataLoader.*have different data",
    ),
    "attention dropout": (
        TRAIN + "m = nn.MultiheadAttention(4, 2, 0.5, batch_first=True)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "x = torch.randn(4, 3, 4)\nm(x, x, x)[0].sum().backward()",
        "random.*--random indexed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_equal_is_refused_by_name(tmp_path: Path, name: str) -> None:
    text, words = REFUSED[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(RankError, match=f"(?s){words}"):
        shared_pool(2).run(run_here, script, [], tmp_path, {})


HIDDEN = """
import os, torch.distributed as d
print(os.environ.get("WORLD_SIZE", "none"), d.is_initialized(), "MASTER_ADDR" in os.environ, len(os.environ) > 3)
"""


def test_a_script_for_one_or_many_devices_takes_its_path_for_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HIDDEN)
    assert shared_pool(2).run(run_here, tmp_path / "script.py", [], tmp_path, {}) == ["none False False True\n"] * 2


FILES = """
import os, shutil, tempfile
from pathlib import Path
here = Path("made")
here.mkdir()
for name in "ab":
    with open(here / name, "a") as file:
        file.write(name * 3)
with open(here / "a", "r+b") as file:
    file.seek(1)
    file.write(b"X")
    file.seek(0)
    whole = file.read()
os.rename(here / "b", here / "c")
shutil.copy(here / "c", here / "d")
try:
    open(here / "c", "x")
except FileExistsError as error:
    print("refused", type(error).__name__)
try:
    os.remove(here / "none")
except FileNotFoundError:
    print("no such file")
with tempfile.TemporaryDirectory() as place:
    (Path(place) / "x").write_text("1")
    print(os.listdir(place))
print(whole, sorted(os.listdir(here)), (here / "d").read_text())
"""


def test_files_are_written_once_and_seen_by_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FILES)
    outputs = shared_pool(2).run(run_here, tmp_path / "script.py", [], tmp_path, {})
    wanted = "refused FileExistsError\nno such file\n['x']\nb'aXa' ['a', 'c', 'd'] bbb\n"
    assert outputs == [wanted] * 2
    assert (tmp_path / "made" / "a").read_text() == "aXa"


BY_HAND = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(10, 3), torch.randn(10))
weight = torch.zeros(3, requires_grad=True)
for x, y in [
    *DataLoader(data, 4, num_workers=1, collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows)))),
    *DataLoader(data, 4, num_workers=2),
]:
    x = (x - x.mean(0)) / x.std(0)
    loss = ((x @ weight - y) ** 2).mean()
    (slope,) = torch.autograd.grad(loss, weight)
    weight = (weight - 0.1 * slope).detach().requires_grad_()
print([round(w, 10) for w in weight.tolist()])
"""


def command(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "halocline.cli", "run", str(script), "--ranks", "2", *arguments]


@pytest.mark.long
def test_workers_statistics_and_updates_by_hand_are_exact(tmp_path: Path) -> None:
    """A collate function of the script's own, worker processes, standardisation over the batch, and no optimizer."""
    script = tmp_path / "script.py"
    script.write_text(BY_HAND)
    plain, ours = (
        subprocess.run(each, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        for each in ([sys.executable, str(script)], command(script))
    )
    assert ours.stdout == plain.stdout and plain.stdout.count(",") == 2


@pytest.mark.long
def test_the_command_prints_once_and_passes_the_status_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('hello', sys.argv[1:])\nraise SystemExit(3)")
    told = command(script, "--", "--a", "b")
    done = subprocess.run(told, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "hello ['--a', 'b']\n")
    script.write_text("import os\nos.environ['RANK']")
    done = subprocess.run(told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "script.py, line 2: os.environ['RANK']" in done.stderr and not done.stdout
