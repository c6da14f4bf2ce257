"""A LightningModule trained in float64, on one process or cut over two; writes what it found as JSON.

python lightning_program.py OUT plain|cut [RESUME.ckpt]    # every kind of training below, in one program
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

import halocline as hc

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
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1))
        self.losses, self.differ = [], differ

    def training_step(self, batch, number):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.losses.append(loss.item())
        self.log("loss", self.global_rank + loss if self.differ else loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", F.cross_entropy(self.net(batch["x"]), batch["y"]), sync_dist=True, batch_size=2)

    def test_step(self, batch, number):
        self.log("test", F.cross_entropy(self.net(batch["x"]), batch["y"]), sync_dist=True, batch_size=2)

    def predict_step(self, batch, number):
        found = self.net(batch["x"])
        return hc.gather(found) if isinstance(found, hc.ShardedTensor) else found

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer_for(kind, folder, epochs=2, callbacks=(), **more):
    """A Trainer over two processes, or with kind "plain" one without Halocline."""
    strategy = "auto"
    if kind != "plain":
        from halocline.integrations import HaloclineStrategy

        strategy = HaloclineStrategy(*CUTS[kind])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    return Trainer(accelerator="cpu", devices=1 if kind == "plain" else 2, strategy=strategy, max_epochs=epochs,
                   limit_train_batches=3, limit_val_batches=1, gradient_clip_val=0.5, default_root_dir=folder,
                   callbacks=list(callbacks), **{"use_distributed_sampler": False, **quiet, **more})  # fmt: skip


def data():
    return DataLoader(Volumes(), 2)


def fitted(trainer, module, path=None):
    trainer.fit(module, data(), data(), ckpt_path=path)
    weights = module.state_dict()
    return {"losses": module.losses, "ranks": trainer.world_size, "keys": list(weights),
            "validation": float(trainer.callback_metrics["validation"]),
            "weight": weights["net.0.weight"].flatten().tolist()}  # fmt: skip


def whole_path(kind, folder):
    """Fit with a checkpoint after each epoch, a logger and a monitor; then validate, test, predict with the same."""
    kept = ModelCheckpoint(folder, "best-{epoch}", monitor="validation", save_top_k=2)
    module = Module().double()
    logger = CSVLogger(folder, "log")
    trainer = trainer_for(kind, folder, callbacks=[kept, LearningRateMonitor()], logger=logger, log_every_n_steps=1)
    found = fitted(trainer, module)
    found["checkpoints"] = sorted(path.name for path in Path(folder).glob("best-*.ckpt"))
    (found["validated"],) = trainer.validate(module, data(), verbose=False)
    (found["tested"],) = trainer.test(module, data(), verbose=False)
    found["predicted"] = torch.cat(trainer.predict(module, data())).flatten().tolist()
    return found


def resumed(kind, folder, path):
    return fitted(trainer_for(kind, folder), Module().double(), path)


def predicted_alone(kind, folder, path):
    """From a checkpoint, by a trainer that never fitted."""
    found = trainer_for(kind, folder).predict(Module().double(), data(), ckpt_path=path)
    return torch.cat(found).flatten().tolist()


def refusals(folder):
    found = {}
    try:
        trainer_for("depth", folder, use_distributed_sampler=True).fit(Module(differ=True).double(), data(), data())
    except hc.HaloclineError as error:
        found["differ"] = str(error)
    module = Module().double()
    trainer_for("depth", folder, 1).fit(module, data(), data())
    try:
        trainer_for("data", folder).validate(module, data(), verbose=False)
    except hc.HaloclineError as error:
        found["other mesh"] = str(error)
    return found


def main(out, kind, *resume):
    warnings.simplefilter("ignore")
    out = Path(out)
    name = "plain" if kind == "plain" else "depth"
    folder = str(out.with_suffix(""))
    found = {"depth": whole_path(name, folder)}
    first = str(Path(folder) / "best-epoch=0.ckpt")
    found["resume"] = resumed(name, folder, first)
    found["alone"] = predicted_alone(name, folder, first)
    found["accumulate"] = fitted(trainer_for(name, folder, accumulate_grad_batches=2), Module().double())
    if kind == "plain":
        found["data"] = found["depth"]
        found["resume from cut"] = resumed(name, folder, resume[0])
    else:
        found["data"] = fitted(trainer_for("data", folder), Module().double())
        found |= refusals(folder)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
