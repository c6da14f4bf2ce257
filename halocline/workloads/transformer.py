"""A decoder language model (as Mesh-TensorFlow and Megatron cut it) on synthetic text that needs memory.

The text lists pairs of a key and a value, then asks for the values of the keys again, in another order. Only the
answers count, so that the model has to look back over the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Field, Generated
from ..geometry import Box
from ..random.draw import Draw
from ..random.generator import GlobalBox
from .metrics import Confusion
from .workload import Batch, Workload, WorkloadSize

VOCABULARY = 32  # of the small size: half keys, half values
IGNORED = -100  # the class of tokens that do not count in the loss
SHAPES = ((1, 24),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of a small network that takes tokens of these shapes."""
    return {"vocabulary": VOCABULARY, "length": shapes[0][1], "width": 16, "heads": 4, "layers": 2}


class Attention(nn.Module):
    """Multi-head attention with a projection each for queries, keys and values, which are cut by heads."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each behind a layer norm and added to what came in."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm_hidden = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.fall(F.gelu(self.rise(self.norm_hidden(x))))


class Decoder(nn.Module):
    """Token and position embeddings, causal blocks, and scores of the next token: [N, T] to [N, vocabulary, T].

    The defaults are the sizes of GPT-2 medium.
    """

    def __init__(
        self, vocabulary: int = 50_304, length: int = 1024, width: int = 1024, heads: int = 16, layers: int = 24
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [N, T] to scores [N, vocabulary, T]."""
        x = self.tokens(tokens.long()) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores.transpose(1, 2)


def block_layout(axis: str) -> dict[str, dict[int, str]]:
    """Megatron's layout of blocks: heads and hidden units are cut, with two sums a block in each direction."""
    rows, columns = {0: axis}, {1: axis}
    layout = {f"*attention.{name}.{kind}": rows for name in ("query", "key", "value") for kind in ("weight", "bias")}
    layout |= {f"*rise.{kind}": rows for kind in ("weight", "bias")}
    return layout | {"*attention.out.weight": columns, "*fall.weight": columns}


def layout(axis: str = "model") -> dict[str, dict[int, str]]:
    """Blocks by heads and hidden units, both embeddings of tokens by the vocabulary."""
    return block_layout(axis) | {"tokens.weight": {0: axis}, "head.weight": {0: axis}}


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of the answers."""
    return F.cross_entropy(output, batch["y"], ignore_index=IGNORED)


@dataclass(frozen=True)
class Recall:
    """Makes texts: pairs of key and value in random order, then keys and their values once more.

    With ``answers`` it gives instead what is to be predicted at each token: the value where a key is asked for.
    """

    seed: int
    length: int
    vocabulary: int
    answers: bool

    def __call__(self, sample: int, box: Box) -> npt.NDArray[np.int64]:
        keys, pairs = self.vocabulary // 2, self.length // 4
        numbers = Draw(GlobalBox.all_of((3, keys)), torch.device("cpu"), (self.seed, sample)).uniform(torch.float64)
        chosen = numbers[0].argsort()[:pairs].numpy()
        values = keys + (numbers[1].numpy() * keys).astype(np.int64)
        asked = chosen[numbers[2, :pairs].argsort().numpy()]
        text = np.full(self.length, keys, dtype=np.int64)  # what is left over at the end repeats a value
        text[: 4 * pairs] = np.stack(
            [np.concatenate([chosen, asked]), values[np.concatenate([chosen, asked])]], 1
        ).ravel()
        if self.answers:
            truth = np.full(self.length, IGNORED, dtype=np.int64)
            truth[2 * pairs : 4 * pairs : 2] = values[asked]
            text = truth
        return text[box[0].lo : box[0].hi]


def texts(samples: int, seed: int = 0, length: int = 24, vocabulary: int = VOCABULARY) -> dict[str, Field]:
    """``x``: texts as token numbers; ``y``: the token to predict at each place, -100 where none is asked for."""
    made = [
        Generated(Recall(seed, length, vocabulary, kind), samples, (length,), "T", "int64") for kind in (False, True)
    ]
    return {"x": Field(made[0]), "y": Field(made[1])}


WORKLOAD = Workload(
    factory=Decoder,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=partial(Confusion, VOCABULARY),
    data=texts,
    small=WorkloadSize(
        network={"vocabulary": VOCABULARY, "length": 24, "width": 64, "heads": 4, "layers": 2},
        data={"length": 24},
        training={"batch": 32, "steps": 1500, "lr": 2e-3, "optimizer": "adam", "samples": 50_000, "cut": ()},
    ),
    full=WorkloadSize(
        network={},
        data={"length": 1024, "vocabulary": 50_304},
        training={"batch": 8, "steps": 100_000, "lr": 1.5e-4, "optimizer": "adam", "samples": 1_000_000, "cut": ()},
    ),
    tokens=VOCABULARY,
    layout=layout,
)
