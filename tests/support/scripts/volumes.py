"""An ordinary script: uneven last batches, all kinds of noise, files, arrays, a frozen layer, weights by hand."""

import argparse
import csv
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
np.random.seed(3)


class Volumes(Dataset):
    """Seven volumes; the last two samples of each epoch make a batch that is smaller than the others."""

    def __init__(self, noisy):
        self.volumes, self.noisy = torch.randn(7, 1, 6, 4, 4), noisy

    def __len__(self):
        return len(self.volumes)

    def __getitem__(self, index):
        volume = self.volumes[index]
        if self.noisy:
            volume = volume + 0.1 * torch.randn(()) + 0.01 * np.random.rand()
        return {"x": volume, "y": int(volume.mean() > 0), "weight": float(1 + index)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.drop, self.head = nn.Dropout3d(0.3), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = F.alpha_dropout(self.drop(F.relu(self.norm(self.conv(x)))), 0.1, self.training)
        x = x + 0.1 * torch.randn_like(x) * torch.bernoulli(torch.sigmoid(x)) + torch.empty_like(x).uniform_(-0.1, 0.1)
        return self.head(x.mean((2, 3, 4))) * self.scale


folder = Path(args.out)
try:
    os.mkdir(folder)
except FileExistsError:
    print("there already")
model = Net()
model.head.bias.requires_grad_(False)
temperature = torch.ones((), requires_grad=True)
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [temperature], "lr": 1e-2}], lr=1e-2)
seen = []
for epoch in range(args.steps // 4):
    for noisy in (False, True):
        loader = DataLoader(Volumes(noisy), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for batch in loader:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(batch["x"]) / temperature, batch["y"], reduction="none")
            loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen.append((len(batch["x"]), round(loss.item(), 9), losses.detach().numpy().round(9).tolist()))
with open(folder / "losses.csv", "w", newline="") as file:
    csv.writer(file).writerows([row[:2] for row in seen])
(folder / "seen.json").write_text(json.dumps(seen))
np.save(folder / "weights.npy", model.head.weight.detach().numpy())
again = list(csv.reader(open(folder / "losses.csv")))
print("rows", len(again), "first", again[0], "files", sorted(os.listdir(folder)))
torch.save(
    {"model": model.state_dict(), "temperature": temperature, "logits": model.eval()(batch["x"])}, folder / "m.pt"
)
print(losses.detach(), batch["weight"])
