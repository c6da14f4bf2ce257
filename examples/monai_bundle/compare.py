"""A bundle's network on whole volumes that are cut over ranks, beside MONAI's sliding windows; for torchrun."""

from pathlib import Path

import nibabel
import torch
from monai.inferers import sliding_window_inference

import halocline as hc
from halocline.integrations import monai_bundle


def read(path: Path) -> torch.Tensor:
    return torch.tensor(nibabel.load(path).get_fdata(), dtype=torch.float64)


def dice(found: torch.Tensor, true: torch.Tensor) -> float:
    """Mean over organ and lesion."""
    both = [((found == k), (true == k)) for k in (1, 2)]
    return sum(float(2 * (a & b).sum() / (a.sum() + b.sum())) for a, b in both) / 2


@torch.no_grad()
def main() -> None:
    mesh = hc.Mesh(depth=-1)
    plain = monai_bundle("bundle").double().eval()
    model = hc.distribute(monai_bundle("bundle").double().eval(), mesh)
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for path in sorted(Path("scans").glob("*.nii.gz")):
        volume, true = read(path)[None, None], read(Path("labels") / path.name)
        cut = hc.gather(model(hc.shard(volume, mesh, {2: "depth"})))  # every rank computes its part of the whole
        if mesh.rank:
            continue
        whole = plain(volume)
        found = {f"whole, cut over {mesh.size} ranks": cut}
        for side in (24, 16):
            for overlap in (0, 0.5):
                found[f"windows of {side}, overlap {overlap}"] = sliding_window_inference(
                    volume, (side,) * 3, 4, plain, overlap, mode="gaussian"
                )
        for name, one in found.items():
            error = float((one - whole).abs().max() / whole.abs().max())
            other = float((one.argmax(1) != whole.argmax(1)).double().mean())
            rows.setdefault(name, []).append((error, 100 * other, dice(one.argmax(1)[0], true)))
    if mesh.rank == 0:
        print("compared with the whole volume on one rank    largest error   other class   Dice")
        for name, values in rows.items():
            error, other = (max(value[k] for value in values) for k in (0, 1))
            print(f"{name:45s} {error:13.1e} {other:11.2f} %   {sum(v[2] for v in values) / len(values):.3f}")


if __name__ == "__main__":
    main()
