"""Hugging Face Accelerate, as docs/integrations.md says to use it: losses are those of plain PyTorch on one process."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halocline as hc

accelerator = Accelerator(cpu=True)
mesh = hc.Mesh(depth=-1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1)).double()
model = hc.distribute(model, mesh)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
optimizer = accelerator.prepare(optimizer)


def batch(step):
    x = torch.randn(2, 1, 7, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


losses = []
for step in range(4):
    x, y = batch(step)
    loss = F.cross_entropy(model(hc.shard(x, mesh, {2: "depth"})), hc.shard(y, mesh, {1: "depth"}))
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
accelerator.save(model.state_dict(), "weights.pt")

# Accelerate's loader gives each rank other samples; cutting those as one batch is refused.
loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(4, 1, 7, 5, 4, dtype=torch.float64))))
try:
    for (x,) in loader:
        model(hc.shard(x, mesh, {2: "depth"}))
    refused = ""
except hc.HaloclineError as error:
    refused = str(error)
if mesh.rank == 0:
    print(json.dumps({"losses": losses, "ranks": accelerator.num_processes, "refused": refused}))
"""


def plain_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(4):
        x = torch.randn(2, 1, 7, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.integration
def test_accelerate_starts_and_steps(tmp_path, package):
    package("accelerate")
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([sys.executable, *torchrun, "program.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    losses, weights = plain_losses()
    assert found["ranks"] == 2
    assert found["losses"] == pytest.approx(losses, rel=1e-8)
    saved = torch.load(tmp_path / "weights.pt")
    assert saved.keys() == weights.keys()
    assert all(torch.allclose(saved[name], value, rtol=1e-8, atol=1e-12) for name, value in weights.items())
    assert "the ranks 0, 1 bring different tensors" in found["refused"]
