"""Dropout inside composites: from the library's own numbers, whether what it meets is still cut or has become whole.

Composites (attention, recurrent networks) drop elements in their middle, where torch's kernel would draw by itself.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...random.functions import KERNELS
from ...random.generator import GlobalBox
from ...tensor import ShardedTensor


def dropped(input: Tensor, p: float) -> Tensor:
    """A whole tensor on its way through cut work is as large on one rank, and loses the same elements there."""
    if p == 0 or isinstance(input, ShardedTensor):
        return F.dropout(input, p) if p else input
    return KERNELS[F.dropout].run(GlobalBox.all_of(tuple(input.shape)), input, p)
