"""Hugging Face Accelerate, as docs/integrations.md says to use it: losses are those of one process."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import halocline as hc

accelerator = Accelerator(cpu=True)
mesh = hc.Mesh(depth=-1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1)).double()
model = hc.distribute(model, mesh)
optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), 1e-2))
losses = []
for step in range(4):
    x = torch.randn(2, 1, 7, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    cut, truth = hc.shard(x, mesh, {2: "depth"}), hc.shard((x[:, 0] > 0).long(), mesh, {1: "depth"})
    loss = F.cross_entropy(model(cut), truth)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
if mesh.rank == 0:
    print(json.dumps({"losses": losses, "ranks": accelerator.num_processes}))
"""


@pytest.mark.long
def test_accelerate_starts_and_steps(tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "program.py").write_text(PROGRAM)
    found = {}
    for ranks in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run([sys.executable, *torchrun, "program.py"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[ranks] = json.loads(done.stdout.splitlines()[-1])
    assert found[2]["ranks"] == 2
    assert found[2]["losses"] == pytest.approx(found[1]["losses"], rel=1e-8)
