"""A bundle of MONAI on whole volumes: exact where they are cut, and beside MONAI's sliding windows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halocline as hc
from halocline.testing import run_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "monai_bundle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, package):
    """A copy of the example, with a bundle trained in it."""
    package("monai")
    place = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("monai") / "example")
    told = followed(place, sys.executable, "-W", "ignore", "make_bundle.py")
    assert float(re.search(r"loss ([\d.]+)", told)[1]) < 0.7
    return place


def followed(place, *command):
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def value_and_gradients(model, x):
    answer = hc.gather(model(x))
    answer.square().mean().backward()
    return [answer.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_a_bundle_runs_cut_as_it_runs_whole(folder):
    from halocline.integrations import monai_bundle

    x = torch.randn(1, 1, 24, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = monai_bundle(folder / "bundle").double()
    stored = torch.load(folder / "bundle/models/model.pt")
    assert all(torch.equal(value.to(stored[name].dtype), stored[name]) for name, value in plain.state_dict().items())
    answer = plain(x)
    answer.square().mean().backward()
    true = [answer.detach(), *(parameter.grad for parameter in plain.parameters())]

    def on_rank():
        mesh = hc.Mesh(depth=2)
        model = hc.distribute(monai_bundle(folder / "bundle").double(), mesh)
        return value_and_gradients(model, hc.shard(x, mesh, {2: "depth"}))

    for found in run_local(2, on_rank):
        for one, other in zip(found, true, strict=True):
            assert (one - other).abs().max() <= 1e-8 * other.abs().max().clamp(min=1e-3)


@pytest.mark.integration
def test_the_example_compares_whole_volumes_with_windows(folder):
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = followed(folder, *torchrun, "compare.py")
    rows = [
        re.split(r"  +", line.replace(" %", "").strip())
        for line in told.splitlines()
        if line.startswith(("whole", "windows"))
    ]
    assert len(rows) == 5 and rows[0][0] == "whole, cut over 2 ranks"
    assert float(rows[0][1]) <= 1e-8 and float(rows[0][2]) == 0
    assert all(float(row[1]) > 1e-3 for row in rows[1:])  # windows are another computation


@pytest.mark.integration
def test_training_starts_from_the_bundle_and_predicts(folder):
    import nibabel

    cli = [sys.executable, "-W", "ignore", "-m", "halocline.cli"]
    followed(folder, *cli, "train", "run.toml", "--ranks", "2", "--out", "run", "--quiet")
    log = (folder / "run" / "log.jsonl").read_text()
    first = float(re.search(r'"loss": ([\d.e+-]+)', log)[1])
    assert first < 0.8  # a new network starts at about 1.8
    followed(folder, *cli, "predict", "run", "scans", "segmentations", "--classes", "--ranks", "2")
    right = [
        (nibabel.load(path).get_fdata() == nibabel.load(folder / "labels" / path.name).get_fdata()).mean()
        for path in sorted((folder / "segmentations").iterdir())
    ]
    assert len(right) == 4 and min(right) > 0.9


@pytest.mark.integration
def test_what_a_bundle_lacks_is_said(folder):
    from halocline.integrations import monai_bundle

    with pytest.raises(hc.HaloclineError, match=r"no 'network_deff' \(did you mean network_def\?\)"):
        monai_bundle(folder / "bundle", network="network_deff")
    with pytest.raises(hc.HaloclineError, match=r"other\.pt is missing; give weights"):
        monai_bundle(folder / "bundle", weights="other.pt")
    with pytest.raises(hc.HaloclineError, match=r"scans is no bundle: it has no configs/inference\.json"):
        monai_bundle(folder / "scans")
    with pytest.raises(hc.HaloclineError, match="'inferer' of the bundle is a"):
        monai_bundle(folder / "bundle", network="inferer")
