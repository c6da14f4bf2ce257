"""Linear regression in plain NumPy, data parallel: the gradients travel by ``hc.all_reduce``.

Run it with ``torchrun --nproc-per-node 2 numpy_sum.py``, or alone. The result does not depend on the number of ranks.
"""

import numpy as np

import halocline as hc

mesh = hc.Mesh(data=-1)
numbers = np.random.default_rng(0)
x, true = numbers.normal(size=(240, 8)), numbers.normal(size=8)
y = x @ true
mine = slice(mesh.rank, None, mesh.size)  # this rank's samples

weight = np.zeros(8)
for _ in range(200):
    error = x[mine] @ weight - y[mine]
    gradient, loss = hc.all_reduce([x[mine].T @ error, np.array(error @ error)])  # sums over all ranks, in one message
    weight -= 0.1 * 2 * gradient / len(x)
if mesh.rank == 0:
    print(f"loss {loss / len(x):.3e}, largest error of a weight {np.abs(weight - true).max():.3e}")
