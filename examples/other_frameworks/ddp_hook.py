"""Plain DistributedDataParallel whose gradients travel in half precision, by this library's sums.

Run it with ``torchrun --nproc-per-node 2 ddp_hook.py``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halocline as hc

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
hc.register_comm_hook(model, wire="fp16")  # the only line of this library
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(100):
    loss = (model(x)[:, 0] - x.sum(1).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
