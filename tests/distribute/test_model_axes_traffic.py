"""What cut parameters cost: sums and bytes of a transformer block, and the memory of weights and optimizer."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch

import halocline as hc
from halocline.program import Record, dry, record
from halocline.tensor import ShardedTensor
from halocline.testing import shared_pool
from halocline.testing.memory import count_every_thread, peak_bytes
from halocline.workloads.transformer import Decoder, block_layout, layout

WIDTH, LENGTH, BATCH = 512, 512, 8


IN_ONE_PIECE = hc.Choices(product_tile=0)


def recorded(layers: int, sizes: dict[str, int], choices: hc.Choices = IN_ONE_PIECE) -> tuple[Record, Record]:
    """Forward and backward of a decoder on one rank of a dry world."""
    with dry(0, prod(sizes.values())):
        with torch.device("meta"):
            model = Decoder(vocabulary=512, length=LENGTH, width=WIDTH, heads=8, layers=layers)
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        mesh = hc.Mesh(choices, **sizes)
        hc.distribute(model, mesh, layout=block_layout("model"), deterministic=True)
        x = hc.shard(tokens, mesh, {0: "data"}) if "data" in sizes else tokens
        outputs: list[torch.Tensor] = []
        forward = record(lambda: outputs.append(model(x)), mesh)
        return forward, record(lambda: outputs[0].square().mean().backward(), mesh)


def of_blocks(found: Record) -> Counter[tuple[int, tuple[int, ...]]]:
    """Bytes and ranks of the sums inside blocks."""
    return Counter((each.bytes, each.ranks) for each in found.sums if "blocks" in each.label.place)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_block_has_two_sums_in_each_direction(parts: int) -> None:
    """Megatron's count, each of one activation of the block, over the ranks of axis model alone."""
    size = BATCH // 2 * LENGTH * WIDTH * 4
    for layers in (1, 3):
        for found in recorded(layers, {"data": 2, "model": parts}):
            assert of_blocks(found) == {(size, tuple(range(parts))): 2 * layers}
            assert not any("blocks" in each.label.place for each in found.exchanges if each.label.channel == "moves" and
                           "reduction" not in each.label.operation)  # fmt: skip


@pytest.mark.parametrize("parts", [2, 4])
def test_so_has_a_block_whose_activations_are_plain(parts: int) -> None:
    """On a mesh of axis model alone: sums of results forward, sums of gradients of what enters the cut weights back."""
    size = BATCH * LENGTH * WIDTH * 4
    for layers in (1, 3):
        for found in recorded(layers, {"model": parts}):
            assert of_blocks(found) == {(size, tuple(range(parts))): 2 * layers}


@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2, "model": 2}])
def test_tiles_carry_the_bytes_of_one_piece(sizes: dict[str, int]) -> None:
    pieces, tiles = (recorded(2, sizes, choices) for choices in (IN_ONE_PIECE, hc.Choices(product_tile=1 << 20)))
    for whole, parts in zip(pieces, tiles, strict=True):
        counts = [of_blocks(each) for each in (whole, parts)]
        assert len({sum(size * count for (size, _), count in each.items()) for each in counts}) == 1
        assert counts[1].total() > counts[0].total()


def built() -> float:
    """The peak of memory while a model on meta is cut and filled, in tiles."""
    count_every_thread()
    mesh = hc.Mesh(model=2)
    with torch.device("meta"):
        model = Decoder(vocabulary=8192, length=64, width=512, heads=8, layers=6)
    peak = peak_bytes(lambda: hc.distribute(model, mesh, layout=layout())).peak
    return peak / sum(hc.unwrap(p).numel() * p.element_size() for p in model.parameters())


@pytest.mark.long
def test_a_model_on_meta_never_has_more_than_its_tiles() -> None:
    assert all(share <= 1.2 for share in shared_pool(2).run(built, deadline=60.0))


@pytest.mark.parametrize("parts", [2, 4])
def test_weights_and_optimizer_take_their_share(parts: int) -> None:
    with dry(0, parts):
        with torch.device("meta"):
            model = Decoder(vocabulary=8192, length=64, width=512, heads=8, layers=4)
        one = sum(p.numel() * p.element_size() for p in model.parameters())
        hc.distribute(model, hc.Mesh(model=parts), layout=layout())
        mine = sum(hc.unwrap(p).numel() * p.element_size() for p in model.parameters())
        assert mine <= 1.05 * one / parts
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert sum(hc.unwrap(m).numel() * m.element_size() for m in moments) <= 1.05 * 2 * one / parts
        assert any(isinstance(m, ShardedTensor) for m in moments)
