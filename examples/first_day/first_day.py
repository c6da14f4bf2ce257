"""The path of a first day: own NIfTI volumes, trained on by two ranks, reported, and predicted in another folder.

    python first_day.py [FOLDER] [--monai | --plain]

With MONAI installed its U-Net and DiceCELoss are trained (monai.toml), else a network of plain PyTorch (run.toml).
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel
import numpy as np

HERE = Path(__file__).resolve().parent


def halocline(folder: Path, *words: str) -> dict:
    """Run a command in a folder; it ends with one JSON object."""
    command = [sys.executable, "-m", "halocline.cli", *words, "--json"]
    print("$ halocline", *words)
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=540)
    return json.loads(done.stdout.splitlines()[-1])


def main(place: Path, monai: bool) -> dict:
    training, elsewhere = place / "training", place / "elsewhere"
    training.mkdir(parents=True)
    for name in ("make_volumes.py", "network.py", "run.toml", "monai.toml"):
        shutil.copy(HERE / name, training)
    subprocess.run([sys.executable, "make_volumes.py"], cwd=training, check=True, timeout=120)
    name = "monai" if monai else "run"
    trained = halocline(training, "train", f"{name}.toml", "--ranks", "2", "--out", "run")
    halocline(training, "report", "run")
    (elsewhere / "scans").mkdir(parents=True)
    for number in (10, 11):  # volumes that were held out
        shutil.copy(training / "imagesTr" / f"case_{number:03d}.nii.gz", elsewhere / "scans")
    truth = {path.name: nibabel.load(path).get_fdata() for path in (training / "labelsTr").iterdir()}
    shutil.move(training / "run", elsewhere / "run")
    shutil.rmtree(training)  # neither the data nor the code of the training is there
    halocline(elsewhere, "predict", "run", "scans", "segmentations", "--classes", "--ranks", "2")
    return {"metrics": trained["metrics"], "right": compared(elsewhere, truth)}


def compared(folder: Path, truth: dict) -> dict[str, float]:
    """The share of voxels that are right, by file; the affine must be that of the scan."""
    right = {}
    for path in sorted((folder / "segmentations").iterdir()):
        answer, scan = nibabel.load(path), nibabel.load(folder / "scans" / path.name)
        if not np.array_equal(answer.affine, scan.affine):
            raise SystemExit(f"{path} has another affine than the scan")
        right[path.name] = float((answer.get_fdata() == truth[path.name]).mean())
    return right


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    has_monai = importlib.util.find_spec("monai") is not None
    use_monai = "--monai" in sys.argv or (has_monai and "--plain" not in sys.argv)
    folder = Path(words[0]) if words else Path(tempfile.mkdtemp(prefix="first-day-"))
    found = main(folder, use_monai)
    for key, value in {**found["metrics"], **found["right"]}.items():
        print(f"{key:20s} {value:.4f}")
    print(f"all of it is in {folder}; the report is {folder / 'elsewhere' / 'run' / 'report.html'}")
