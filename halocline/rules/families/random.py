"""Random functions: each tile draws the numbers of its own box of the whole, so that every cut draws the same.

The numbers of an element follow from seed, call and global place (``halocline/random``). The ranks need to agree on
nothing but the count of calls, which is that of the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...random.functions import KERNELS, Kernel
from ...random.generator import GlobalBox
from ...random.mode import WRITTEN_OUT
from ...tensor import ShardedTensor
from ..recipe import Recipe, Work
from ..table import composite, refuse, rule
from .pointwise import elementwise


def _register(function: Any, kernel: Kernel) -> None:
    """Register a random function: elementwise, with numbers drawn for this rank's box of the whole."""

    def describe(*args: Any, **kwargs: Any) -> Recipe:
        if kwargs.get("generator") is not None:
            raise refuse(function, "a generator of torch's would draw the same numbers for every tile", "leave it out")
        recipe = elementwise(function, args, kwargs, kernel.inplace or bool(kwargs.get("inplace")))

        def local(work: Work, *tiles: Any, **named: Any) -> Tensor:
            # The numbers of this box, as a draw of the whole tensor would have them.
            return kernel.run(GlobalBox(recipe.space, work.box), *tiles, **named)

        # New tensors have no gradient, on idle ranks too.
        outputs = tuple(replace(output, constant=kernel.new) for output in recipe.outputs)
        return replace(recipe, local=local, outputs=outputs)

    rule(function, family="random")(describe)


for _function, _kernel in KERNELS.items():
    _register(_function, _kernel)
for _function, _written in WRITTEN_OUT.items():
    composite(_function, family="random")(_written)


@rule(torch.poisson, torch.binomial)
def refused(*args: Any, **kwargs: Any) -> Recipe:
    """The recipe of a function whose numbers would differ between ranks."""
    raise refuse("poisson or binomial", "their numbers take an unknown count of draws", "hc.gather first")


def dropped(input: Tensor, p: float) -> Tensor:
    """Dropout inside composites (attention, recurrent networks), where torch's kernel would draw by itself.

    A whole tensor on its way through cut work is as large on one rank, and loses the same elements there.
    """
    if p == 0 or isinstance(input, ShardedTensor):
        return F.dropout(input, p) if p else input
    return KERNELS[F.dropout].run(GlobalBox.all_of(tuple(input.shape)), input, p)
