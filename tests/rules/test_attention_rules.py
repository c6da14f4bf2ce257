"""Attention with cut tokens, heads and batches: torch's functions and modules, unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import lines, number
from torch import Tensor, nn

import halocline as hc
from halocline.testing.compare import check_rule
from halocline.world import Mesh, run_local

MASK = torch.rand(7, 5, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[:, 0] = True

DIRECT = """
F.scaled_dot_product_attention(q, k, v)
F.scaled_dot_product_attention(q, k, v, scale=0.3)
F.scaled_dot_product_attention(q, k, v, is_causal=True)
F.scaled_dot_product_attention(q, k, v, mask)
F.scaled_dot_product_attention(q, k, v, mask.double())
F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)
(q @ k.transpose(-2, -1)).masked_fill(~mask, -1e9).softmax(-1) @ v
"""
#: Cuts of (batch, heads, tokens, features), and the mesh.
CUTS: list[tuple[dict[int, str], dict[str, int]]] = [
    ({0: "a"}, {"a": 3}),
    ({1: "a"}, {"a": 3}),
    ({2: "a"}, {"a": 5}),
    ({0: "b", 2: "a"}, {"a": 2, "b": 2}),
    ({2: "a", 3: "b"}, {"a": 3, "b": 2}),
]


@pytest.mark.parametrize("call", lines(DIRECT))
def test_attention(call: str) -> None:
    function = eval(f"lambda q, k, v: {call}", {"torch": torch, "F": F, "mask": MASK})
    inputs = number(2, 4, 7, 6), number(2, 4, 5, 6, seed=1), number(2, 4, 5, 6, seed=2)
    for setup, (cut, mesh) in enumerate(CUTS):
        other = cut if setup % 2 == 0 else None
        found = check_rule(function, *inputs, cuts=[cut, other, other], mesh=mesh)
        assert found.verdict == "exact", f"{call} cut {cut}, {other} over {mesh}: {found}"


def frozen(module: nn.Module) -> Any:
    """A module whose parameters are left out of the comparison."""
    return module.double().requires_grad_(False)


CAUSAL = torch.triu(torch.ones(7, 7), 1).bool()
PADDED = torch.zeros(3, 7).bool()
PADDED[:, 5:] = True

#: Of nn.MultiheadAttention: how it is made, and how it is called.
MODULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "without weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "other widths": ({"kdim": 6, "vdim": 6}, {"need_weights": False}),
    "masked": ({"bias": False}, {"attn_mask": CAUSAL}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "padded": ({}, {"key_padding_mask": PADDED, "attn_mask": CAUSAL}),
    "mask for each head": ({}, {"attn_mask": number(6, 7, 7), "need_weights": False}),
    "extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDED}),
    "zero key": ({"add_zero_attn": True}, {"need_weights": False}),
    "batch first": ({"batch_first": True}, {"need_weights": False}),
}


@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention(name: str) -> None:
    torch.manual_seed(0)
    made, called = MODULES[name]
    module = frozen(nn.MultiheadAttention(6, 2, **made))
    across = name not in ("self", "causal")

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        if made.get("batch_first"):
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        found = module(x, y, y * 2, **called) if across else module(x, x, x, **called)
        return [part for part in found if part is not None]

    for cut, mesh in [({0: "a"}, {"a": 3}), ({1: "a"}, {"a": 4}), ({0: "a", 1: "b"}, {"a": 2, "b": 2})]:
        other = cut if len(mesh) == 2 or name in ("masked", "padded") else None
        found = check_rule(run, number(7, 3, 6), number(7, 3, 6, seed=1), cuts=[cut, other], mesh=mesh)
        assert found.verdict == "exact", f"{name} cut {cut}, {other}: {found}"


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(norm_first: bool) -> None:
    torch.manual_seed(0)
    options = {"dim_feedforward": 8, "batch_first": True, "norm_first": norm_first}
    encode = frozen(nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, **options), 2, enable_nested_tensor=False))
    decode = frozen(nn.TransformerDecoderLayer(6, 2, **options))
    encode.eval(), decode.eval()

    def run(x: Tensor, y: Tensor) -> Tensor:
        return decode(y, encode(x, src_key_padding_mask=PADDED), tgt_mask=CAUSAL, tgt_is_causal=True)

    for cut, mesh in [({1: "a"}, {"a": 3}), ({0: "b", 1: "a"}, {"a": 2, "b": 2})]:
        found = check_rule(run, number(3, 7, 6), number(3, 7, 6, seed=1), cuts=[cut, cut], mesh=mesh)
        assert found.verdict == "exact", f"cut {cut}: {found}"


def without(function: Callable[..., Any], *inputs: Tensor, cut: dict[int, str], **mesh: int) -> None:
    """As on one rank, where what is dropped is drawn by the library too."""

    def drawn(*tensors: Tensor) -> Any:
        with hc.random.reproducible(5):
            return function(*tensors)

    found = check_rule(drawn, *inputs, cuts=[cut] * len(inputs), mesh=mesh)
    assert found.verdict == "exact", found


@pytest.mark.parametrize(("causal", "shared"), [(False, 1), (True, 1), (True, 2)])
def test_dropped_attention(causal: bool, shared: int) -> None:
    """Written out on one rank, since torch's own draws from a stream of its own."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if isinstance(q, hc.ShardedTensor):
            return F.scaled_dot_product_attention(q, k, v, None, 0.4, causal, enable_gqa=shared > 1)
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(7, 5).tril().bool(), float("-inf")) if causal else scores
        return F.dropout(scores.softmax(-1), 0.4) @ v

    inputs = number(2, 4, 7, 6), number(2, 4 // shared, 5, 6, seed=1), number(2, 4 // shared, 5, 6, seed=2)
    for cut in ({2: "a"}, {0: "a"}, {1: "a"}):
        without(run, *inputs, cut=cut, a=2)


def test_dropout_of_a_module_is_drawn_by_global_index() -> None:
    module = nn.MultiheadAttention(6, 2, dropout=0.5)

    def body() -> list[Tensor]:
        mesh = Mesh(a=2)
        part = hc.distribute(nn.MultiheadAttention(6, 2, dropout=0.5), mesh)
        part.load_state_dict(module.state_dict())
        found = []
        for dim in (0, 1):
            with hc.random.reproducible(3):
                x = hc.shard(number(4, 4, 6).float(), mesh, {dim: "a"})
                found += [hc.gather(t).detach() for t in part(x, x, x)]
        return found

    for out, weights, other, again in run_local(2, body):
        assert (weights == 0).any()
        torch.testing.assert_close(out, other)
        torch.testing.assert_close(weights, again)


def test_refusals() -> None:
    def body() -> None:
        x = hc.shard(number(4, 2, 6), Mesh(a=2), {0: "a"})
        weight = torch.zeros(18, 6).double(), None, None, None, False, 0.0, torch.zeros(6, 6).double(), None
        with pytest.raises(hc.Refused, match="static_k"):
            F.multi_head_attention_forward(x, x, x, 6, 2, *weight, static_k=x)
        with pytest.raises(AssertionError):
            F.multi_head_attention_forward(x, x, x, 8, 2, *weight)
        with pytest.raises(RuntimeError, match="is_causal"):
            F.multi_head_attention_forward(x, x, x, 6, 2, *weight, is_causal=True)
        encoder = frozen(nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1)).eval()
        with pytest.raises(hc.Refused, match="enable_nested_tensor=False"):
            encoder(x, src_key_padding_mask=torch.zeros(4, 2).bool())

    run_local(2, body)
