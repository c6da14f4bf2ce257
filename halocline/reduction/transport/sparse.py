"""The mean of sparse gradients: rows that were touched travel, and no others."""

from __future__ import annotations

import torch
from torch import Tensor

from ...world import Label, Receive, Send, World


def sparse_mean(gradient: Tensor | None, like: Tensor, world: World, label: Label) -> Tensor | None:
    """Of every rank's rows, in the order of ranks; None where no rank has a gradient."""
    mine = _rows(gradient)
    counts = _counts(-1 if mine is None else mine.values().shape[0], world, label)
    if max(counts) < 0:
        return None
    shape = torch.Size(like.shape)
    if max(counts) == 0:  # somebody had a gradient, and nobody a row
        return torch.zeros_like(like).to_sparse(1)
    indices = torch.zeros(0, dtype=torch.int64) if mine is None else mine.indices().reshape(-1)
    values = like.new_zeros(0) if mine is None else mine.values().reshape(-1)
    row = max(1, like.numel() // max(1, shape[0]))
    rows_of = _gathered(indices, [max(0, count) for count in counts], world, label, " rows")
    values_of = _gathered(values, [max(0, count) * row for count in counts], world, label, " values")
    where, what = torch.cat(rows_of).view(1, -1), torch.cat(values_of).view(-1, *shape[1:]) / world.size
    return torch.sparse_coo_tensor(where.to(like.device), what, shape, check_invariants=False).coalesce()


def _rows(gradient: Tensor | None) -> Tensor | None:
    """With one sparse dim, as embeddings make it, each row once."""
    if gradient is None:
        return None
    found = gradient.detach()
    if not found.is_sparse:
        found = found.to_sparse(1)
    elif found.sparse_dim() != 1:
        found = found.to_dense().to_sparse(1)
    return found.coalesce()


def _counts(mine: int, world: World, label: Label) -> list[int]:
    """How many rows each rank has; -1 of a rank that has no gradient."""
    counts = torch.zeros(world.size, dtype=torch.int64, device="cpu")
    counts[world.rank] = mine + 1
    everyone = tuple(range(world.size))
    return (world.maximum(counts, everyone, label) - 1).tolist()


def _gathered(mine: Tensor, sizes: list[int], world: World, label: Label, what: str) -> list[Tensor]:
    """Every rank's part. Empty ones are not sent."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    sends = [Send(peer, mine.contiguous()) for peer in others if sizes[world.rank]]
    receives = [Receive(peer, sizes[peer]) for peer in others if sizes[peer]]
    named = label._replace(operation=label.operation + what)
    arrived = iter(world.begin(sends, receives, mine, tuple(range(world.size)), named).wait())
    parts = {receive.peer: part for receive, part in zip(receives, arrived, strict=True)}
    parts[world.rank] = mine
    return [parts[rank] for rank in sorted(parts) if sizes[rank]]
