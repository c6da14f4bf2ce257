"""Attention: queries and the dims before them keep their cuts, keys and values are brought to every query.

Each query needs all keys and values, and no other query. Where one axis cuts the tokens of all three, the plan chooses
between a gather of keys and values, a shuffle that cuts heads instead of tokens for the call, and a ring in which keys
and values go round (``blockwise_attention.py``). With a mask, with grouped heads or with dropout they are gathered;
what is dropped is drawn by global index, so that the call is then written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import nested_tensor_from_mask
from ...geometry import Blocks, Interval, Packed
from ...random.mode import WHERE_DRAWN
from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, RingSteps, Work, stretched
from ..table import composite, refuse, run_rule
from .blockwise_attention import BlockwiseAttention
from .random import dropped
from .view import shape


@composite(F.scaled_dot_product_attention)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Gathered, by heads or in a ring, as the plan chooses; with dropout it is written out."""
    if dropout_p <= 0:
        call = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
        return run_rule(F.scaled_dot_product_attention, _attention_rule, call, {})
    # Written out, so that what is dropped is drawn by global index.
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    # torch's own error, which the written-out form would not raise.
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    scores = _scores(query, key, scale)
    mask = torch.ones_like(scores, dtype=torch.bool).tril() if is_causal else attn_mask
    scores = _masked(scores, mask)
    weights = scores.softmax(-1)
    if mask is not None:  # as in torch, a query that sees nothing gets zeros
        weights = weights.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
    return dropped(weights, dropout_p) @ value


def _attention_rule(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Recipe:
    """Each query needs all keys and values. Where several heads share one of them, they are cut between those."""
    space = shape(F.scaled_dot_product_attention, query, key, value, attn_mask, 0.0, is_causal, enable_gqa=enable_gqa)
    rows, keys = len(space) - 2, key.shape[-2]
    reads = [Read(query, (*stretched(query.shape[:-1], space[:-1]), WHOLE))]
    reads += [Read(x, (*stretched(x.shape[:-2], space[:-2]), WHOLE, WHOLE)) for x in (key, value)]
    if enable_gqa:
        together = max(1, space[rows - 1] // key.shape[-3])
        reads = [_sharing_heads(read, together, rows - 1) for read in reads]
    if attn_mask is not None:
        reads.append(Read(attn_mask, (*stretched(attn_mask.shape[:-1], space[:-1]), WHOLE)))

    def local(
        work: Work, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any
    ) -> Tensor:
        """torch's own kernel. A causal mask of some rows only is written out, since torch counts rows from 0."""
        own, causal = work.box[rows], is_causal
        # torch's flag counts rows from 0; this rank's rows begin elsewhere.
        if is_causal and own.size != space[rows]:
            attn_mask, causal = _seen(own, keys, query.device), False
        options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)

    return Recipe(
        space=space,
        reads=tuple(reads),
        outputs=(Output(space, (*range(rows + 1), None)),),
        local=local,
        ring=_ring(query, key, value, rows, is_causal, scale) if attn_mask is None and not enable_gqa else None,
    )


def _sharing_heads(read: Read, together: int, dim: int) -> Read:
    """The same read, with the ``together`` query heads that share a key kept on one rank."""
    place = read.operand.ndim - 3
    links = list(read.links)
    links[place] = Link(dim, Blocks(together if read.operand.index == 0 else 1, together))
    return Read(read.operand, tuple(links))


def _ring(
    query: Operand, key: Operand, value: Operand, rows: int, is_causal: bool, scale: float | None
) -> RingSteps | None:
    """Keys and values may go round, or heads be cut instead of tokens, where all operands have the same heads."""
    # Heads that are shared or stretched cannot travel in equal pieces.
    if rows < 1 or not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return None
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    return RingSteps(1, rows, rows, rows - 1, lambda work: BlockwiseAttention(work.box[rows], is_causal, factor))


def _seen(rows: Interval, keys: int, device: torch.device) -> Tensor:
    """The causal mask of these rows: a query sees the keys up to its own place in the whole."""
    own = torch.arange(rows.lo, rows.hi, device=device)
    return torch.arange(keys, device=device) <= own.unsqueeze(1)


def _scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    return (query * (1 / sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask


@composite(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What nn.MultiheadAttention runs, made of linear layers and attention. Tokens come first, then the batch."""
    if static_k is not None or static_v is not None:
        raise refuse(F.multi_head_attention_forward, "static_k and static_v are cut as heads are", "leave them out")
    _check(query, key, embed_dim_to_check, num_heads, attn_mask, is_causal)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    batched = query.ndim == 3
    projected = _projected((query, key, value), weights, in_proj_bias, embed_dim_to_check // num_heads)
    # Without a batch, a batch of one.
    q, k, v = projected if batched else (x.unsqueeze(1) for x in projected)
    k, v, extra = _lengthened(k, v, bias_k, bias_v, add_zero_attn)
    heads = [x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v)]
    # Then the causal flag replaces the mask, and a ring needs no mask.
    plainly_causal = is_causal and key_padding_mask is None and not need_weights and not extra
    mask = None if plainly_causal else _merged(attn_mask, key_padding_mask, num_heads, extra, query.dtype)
    lost = dropout_p if training else 0.0
    seen: Tensor | None = None
    # The weights are asked for: the fused kernel does not return them.
    if need_weights:
        seen = dropped(_masked(_scores(heads[0], heads[1]), mask).softmax(-1), lost)
        mixed = seen @ heads[2]
    else:
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, lost, plainly_causal)
    result = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if seen is not None:
        seen = seen.mean(1) if average_attn_weights else seen
        seen = seen if batched else seen.squeeze(0)
    return result if batched else result.squeeze(1), seen


def _check(query: Tensor, key: Tensor, width: int, heads: int, mask: Tensor | None, is_causal: bool) -> None:
    """torch's own checks, which its Python code would make before any kernel runs."""
    if query.shape[-1] != width or width % heads:
        raise AssertionError(f"{query.shape[-1]} features do not make {heads} heads of a model of {width}")
    if query.ndim not in (2, 3) or key.ndim != query.ndim:
        raise AssertionError(f"query and key have {query.ndim} and {key.ndim} dims; 3 with a batch and 2 without")
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")


def _projected(inputs: Sequence[Tensor], weights: Any, bias: Tensor | None, width: int) -> Sequence[Tensor]:
    """Queries, keys and values; self-attention needs one product for all three. ``width``: features of a head."""
    query, key, value = inputs
    if isinstance(weights, ShardedTensor) and 0 in weights.sharding.dims_by_axis() and query is key and key is value:
        return run_rule(F.linear, _packed_rule, (query, weights, bias, width), {})
    if isinstance(weights, Tensor) and query is key and key is value:  # one product instead of three
        return F.linear(query, weights, bias).chunk(3, -1)
    parts = weights.chunk(3) if isinstance(weights, Tensor) else weights
    shifts = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, parts, shifts, strict=True)]


def _packed_rule(input: Operand, weight: Operand, bias: Operand | None, width: int) -> Recipe:
    """Three products with the parts of one weight. Its rows are cut by heads for the call, alike in all three parts."""
    lead, features, made = input.ndim - 1, input.shape[-1], weight.shape[0] // 3
    rows = Link(lead, Packed(3, made, width))
    reads = [Read(input, (*map(Link, range(lead)), Link(lead + 1))), Read(weight, (rows, Link(lead + 1)))]
    reads += [] if bias is None else [Read(bias, (rows,))]

    def local(work: Work, input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
        if bias is not None and work.box[-1].size < features and work.box[-1].lo > 0:
            weight, bias = weight + bias[:0].sum(), None
        return tuple(part.contiguous() for part in F.linear(input, weight, bias).chunk(3, -1))

    output = Output((*input.shape[:-1], made), tuple(range(lead + 1)))
    return Recipe(
        space=(*input.shape[:-1], made, features), reads=tuple(reads), outputs=(output,) * 3, local=local, combine="sum"
    )


def _lengthened(
    k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool
) -> tuple[Tensor, Tensor, int]:
    """Learned and zero keys behind the others, which every query sees; and how many."""
    ends: list[tuple[Tensor, Tensor]] = []
    if bias_k is not None and bias_v is not None:
        ends.append((bias_k.expand(1, k.shape[1], -1), bias_v.expand(1, v.shape[1], -1)))
    if add_zero_attn:
        ends.append((torch.zeros_like(k[:1]), torch.zeros_like(v[:1])))
    if not ends:
        return k, v, 0
    keys, values = zip(*ends, strict=True)
    return torch.cat([k, *keys]), torch.cat([v, *values]), len(ends)


def _merged(
    attn_mask: Tensor | None, padding: Tensor | None, heads: int, extra: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores of (batch, head, query, key)."""
    wide: list[Tensor] = []
    if attn_mask is not None:
        wide.append(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, heads)))
    if padding is not None:
        wide.append((padding if padding.ndim == 2 else padding.unsqueeze(0)).unsqueeze(1).unsqueeze(1))
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask
        for mask in wide
    ]
    added = [F.pad(mask, (0, extra)) for mask in added] if extra else added
    return reduce(torch.add, added) if added else None


def _nested(*args: Any, **kwargs: Any) -> bool:
    """Refuses the packing of padded batches."""
    raise refuse(
        "a nested tensor",
        "in eval mode nn.TransformerEncoder packs what is not padded, and leaves zeros in place of the rest",
        "make it with enable_nested_tensor=False, and zero what is padded yourself",
    )


WHERE_DRAWN[F.scaled_dot_product_attention] = attention
WHERE_DRAWN[F.multi_head_attention_forward] = multi_head_attention_forward

if nested_tensor_from_mask is not None:
    composite(nested_tensor_from_mask, family="refused")(_nested)
