"""Write small CT-like NIfTI volumes with an organ and a lesion in each, and their labels: imagesTr/ and labelsTr/."""

import sys
from pathlib import Path

import nibabel
import numpy as np

VOLUMES, SHAPE = 12, (32, 24, 20)  # width, height, depth
AFFINE = np.array([[-0.8, 0, 0, 120], [0, 0.8, 0, -90], [0, 0, 2.5, 40], [0, 0, 0, 1]])  # voxels to millimetres


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    for number in range(VOLUMES):
        centre = np.array(SHAPE) / 2 + rng.uniform(-3, 3, 3)
        organ = (((places - centre) / (0.3 * np.array(SHAPE))) ** 2).sum(-1) < 1
        lesion = (((places - centre - rng.uniform(-2, 2, 3)) / 3.5) ** 2).sum(-1) < 1
        label = organ.astype(np.uint8) + (organ & lesion)  # 0 background, 1 organ, 2 lesion
        image = (np.array([-100, 60, 200])[label] + rng.normal(0, 30, SHAPE)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(image, AFFINE), folder / "imagesTr" / f"case_{number:03d}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, AFFINE), folder / "labelsTr" / f"case_{number:03d}.nii.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
