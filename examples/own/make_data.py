"""Write rings.h5: noisy volumes with a shell in each, and where the shell is."""

import sys
from pathlib import Path

import h5py
import numpy as np

SAMPLES, SIZE = 24, 16


def main(path: Path) -> None:
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*[np.arange(SIZE)] * 3, indexing="ij"))
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (SAMPLES, 1, SIZE, SIZE, SIZE), "f4", chunks=(1, 1, SIZE // 4, SIZE, SIZE))
        y = file.create_dataset("y", (SAMPLES, SIZE, SIZE, SIZE), "u1", chunks=(1, SIZE // 4, SIZE, SIZE))
        for sample in range(SAMPLES):
            centre, radius = rng.uniform(5, SIZE - 5, 3), rng.uniform(3, 5)
            distance = np.sqrt(((places - centre[:, None, None, None]) ** 2).sum(0))
            shell = np.abs(distance - radius) < 1
            x[sample, 0] = shell + 0.3 * rng.standard_normal(shell.shape)
            y[sample] = shell


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "rings.h5"))
