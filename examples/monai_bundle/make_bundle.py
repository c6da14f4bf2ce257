"""Write a small MONAI bundle, trained by MONAI alone, and scans that it has not seen: bundle/, scans/, labels/."""

import json
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.bundle import ConfigParser
from monai.losses import DiceCELoss

SHAPE = (48, 48, 48)
CONFIG = {
    "imports": ["$import torch"],
    "network_def": {
        "_target_": "monai.networks.nets.UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 3,
        "channels": [8, 16, 32],
        "strides": [2, 2],
        "norm": "batch",
    },
    "network": "$@network_def.to('cpu')",
    "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [24, 24, 24], "overlap": 0.25},
}


def volume(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy organ with a lesion in it, and its labels: 0 background, 1 organ, 2 lesion."""
    rng = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    centre = np.array(SHAPE) / 2 + rng.uniform(-4, 4, 3)
    organ = (((places - centre) / (0.3 * np.array(SHAPE))) ** 2).sum(-1) < 1
    lesion = (((places - centre - rng.uniform(-4, 4, 3)) / 6) ** 2).sum(-1) < 1
    label = organ.astype(np.uint8) + (organ & lesion)
    return np.array([-1, 0.3, 1])[label] + rng.normal(0, 1, SHAPE), label


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    parser = ConfigParser(CONFIG)
    network, loss = parser.get_parsed_content("network_def"), DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(steps):
        image, label = (torch.tensor(part)[None, None].float() for part in volume(step))
        error = loss(network(image), label)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    print(f"trained for {steps} steps, loss {error.item():.3f}")
    for name in ("configs", "models"):
        Path("bundle", name).mkdir(parents=True, exist_ok=True)
    Path("bundle/configs/inference.json").write_text(json.dumps(CONFIG, indent=4))
    torch.save(network.state_dict(), "bundle/models/model.pt")
    for number in range(4):
        image, label = volume(1000 + number)
        for folder, values in (("scans", image.astype(np.float32)), ("labels", label)):
            Path(folder).mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), f"{folder}/case_{number}.nii.gz")


if __name__ == "__main__":
    main()
