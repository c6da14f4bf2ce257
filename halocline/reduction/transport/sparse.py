"""The mean of sparse gradients: only rows that some rank has touched travel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...world import Label, Receive, Send, World


def sparse_mean(
    gradient: Tensor | None, like: Tensor, world: World, ranks: tuple[int, ...], label: Label
) -> Tensor | None:
    """The mean over ``ranks`` of their sparse gradients, added in the order of ranks; None where no rank has one.

    ``like`` is the parameter. By all ranks together.
    """
    mine = _rows(gradient)
    counts = _counts(-1 if mine is None else mine.values().shape[0], world, ranks, label)
    if max(counts) < 0:
        return None
    shape = torch.Size(like.shape)
    if max(counts) == 0:  # some rank had a gradient, and none a row
        return torch.zeros_like(like).to_sparse(1)
    indices = torch.zeros(0, dtype=torch.int64) if mine is None else mine.indices().reshape(-1)
    values = like.new_zeros(0) if mine is None else mine.values().reshape(-1)
    row = max(1, like.numel() // max(1, shape[0]))
    rows_of = _gathered(indices, [max(0, count) for count in counts], world, ranks, label, " rows")
    values_of = _gathered(values, [max(0, count) * row for count in counts], world, ranks, label, " values")
    where, what = torch.cat(rows_of).view(1, -1), torch.cat(values_of).view(-1, *shape[1:]) / len(ranks)
    return torch.sparse_coo_tensor(where.to(like.device), what, shape, check_invariants=False).coalesce()


def _rows(gradient: Tensor | None) -> Tensor | None:
    """The gradient with one sparse dim, as embeddings make it, and each row once."""
    if gradient is None:
        return None
    rows = gradient.detach()
    if not rows.is_sparse:
        rows = rows.to_sparse(1)
    elif rows.sparse_dim() != 1:
        rows = rows.to_dense().to_sparse(1)
    return rows.coalesce()


def _counts(mine: int, world: World, ranks: tuple[int, ...], label: Label) -> list[int]:
    """The number of rows of each rank; -1 for a rank without a gradient."""
    counts = torch.zeros(len(ranks), dtype=torch.int64, device="cpu")
    counts[ranks.index(world.rank)] = mine + 1
    return (world.maximum(counts, ranks, label) - 1).tolist()


def _gathered(
    mine: Tensor, sizes: list[int], world: World, ranks: tuple[int, ...], label: Label, what: str
) -> list[Tensor]:
    """Every rank's part, in the order of ranks. Empty parts are neither sent nor returned."""
    size_of = dict(zip(ranks, sizes, strict=True))
    others = [rank for rank in ranks if rank != world.rank]
    sends = [Send(peer, mine.contiguous()) for peer in others if size_of[world.rank]]
    receives = [Receive(peer, size_of[peer]) for peer in others if size_of[peer]]
    named = label._replace(operation=label.operation + what)
    arrived = iter(world.begin(sends, receives, mine, ranks, named).wait())
    parts = {receive.peer: part for receive, part in zip(receives, arrived, strict=True)}
    parts[world.rank] = mine
    return [parts[rank] for rank in sorted(parts) if size_of[rank]]
