"""A LightningModule trained in float64, on one process or cut over two; writes what it found as JSON.

python lightning_program.py OUT plain|plain-accumulate|depth|data|accumulate|differ
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from halocline.errors import HaloclineError

CUTS = {
    "depth": ({"depth": 2}, {"x": {2: "depth"}, "y": {1: "depth"}}),
    "data": ({"data": 2}, {"x": {0: "data"}, "y": {0: "data"}}),
}


class Volumes(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(1, 6, 5, 4, generator=generator, dtype=torch.float64)
        return {"x": x, "y": (x[0] > 0).long()}


class Module(LightningModule):
    def __init__(self, differ=False):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1))
        self.losses, self.differ = [], differ

    def training_step(self, batch, number):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.losses.append(loss.item())
        self.log("loss", self.global_rank + loss if self.differ else loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", F.cross_entropy(self.net(batch["x"]), batch["y"]), sync_dist=True, batch_size=2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def strategy(kind):
    if kind.startswith("plain"):
        return "auto"
    from halocline.integrations import HaloclineStrategy

    return HaloclineStrategy(*CUTS.get(kind, CUTS["depth"]))


def main(out, kind):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Module(kind == "differ").double()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    steps = 2 if "accumulate" in kind else 1
    trainer = Trainer(accelerator="cpu", devices=1 if kind.startswith("plain") else 2, strategy=strategy(kind),
                      max_epochs=2, limit_train_batches=3, limit_val_batches=1, accumulate_grad_batches=steps,
                      gradient_clip_val=0.5, use_distributed_sampler=kind == "differ", **quiet)  # fmt: skip
    found = {}
    try:
        trainer.fit(module, DataLoader(Volumes(), 2), DataLoader(Volumes(), 2))
    except HaloclineError as error:
        found["error"] = str(error)
    weights = module.state_dict()
    found |= {"losses": module.losses, "ranks": trainer.world_size, "keys": list(weights)}
    found["validation"] = float(trainer.callback_metrics.get("validation", 0))
    found["weight"] = weights["net.0.weight"].flatten().tolist()
    if trainer.global_rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
