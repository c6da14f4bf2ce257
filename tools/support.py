"""Write docs/support.md from the rule table itself.

``python tools/support.py`` writes; ``--check`` fails where the page differs from the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.overrides import get_overridable_functions

from halocline.rules.table import entries, name_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
HEAD = """# What runs on cut tensors

Exact means: at most 1e-8 relative to one rank in float64, value and gradient, double backward included. Sizes need not
divide, halos may span several neighbours, and a rank's tile may be empty. Where an operation needs a whole axis (a
dense layer after `flatten`, for example) Halocline gathers the operand, logs the bytes once, and counts them.
`tools/support.py` writes this page from the rule table.
"""
WORDS = {
    "pointwise": "element by element, broadcasting, in place too",
    "window": "convolutions and transposed convolutions: any kernel, stride, dilation, padding, groups",
    "pool": "max, average and adaptive pools",
    "pad": "constant, reflect, replicate, circular; crops",
    "reduce": "sums, means, extremes, variances, norms over cut dims",
    "norm": "batch, instance, group, layer, RMS norm with statistics over all ranks",
    "loss": "averages over the whole global batch and volume",
    "view": "permutations, new and dropped dims, flips, expansion",
    "reshape": "merges and splits of dims; tiles change places where a cut cannot stay",
    "index": "slices and integers on any dim, cut or not; flips, rolls, differences",
    "lookup": "elements by positions held in tensors; the dims they point into are read whole",
    "assign": "writing into part of a tensor: each rank writes what falls into its tile",
    "scatter": "values sent to positions, into cut targets or summed over ranks into whole ones; counts",
    "join": "concatenation, stacking, splitting",
    "contract": "linear layers, matrix products, einsum; a cut contracted dim is summed over ranks",
    "softmax": "over a cut dim by a maximum and a sum over ranks",
    "scan": "running sums and products, extremes and where they stand: one value a tile passes between ranks",
    "attention": "queries keep their cut; dropout by global index; nn.MultiheadAttention",
    "fourier": "all transforms; of several cut dims one is whole at a time",
    "recurrent": "LSTM, GRU, RNN and their cells: time whole, batch or hidden units cut; packed sequences",
    "patches": "sliding patches and their sum",
    "control_flow": "torch.cond and torch.while_loop that run uncompiled",
    "matrix": "triangles, diagonals, cross and Kronecker products",
    "stack": "inverses, factors and solutions of stacks of matrices: those stay whole, the stack is cut",
    "order": "medians, quantiles, buckets, distances of all pairs",
    "whole_axis": "other functions of a whole dim: local where it is not cut, else gathered",
    "resample": "interpolation in all modes, both corner conventions",
    "pool_indices": "pools with indices, and unpooling",
    "grid": "sampling at given positions; the sampled tensor is gathered",
    "random": "drawn by global index: the same numbers for every cut",
    "foreach": "lists of tensors, one by one, for optimizers of cut leaves",
    "factory": "tensors made inside a model",
    "direct": "answers that need no rule: shapes, dtypes, gradients, hooks",
    "refused": "never run, each with its reason and what to do instead",
}


def families() -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for function, entry in entries().items():
        found.setdefault(entry.family, set()).add(name_of(function).removeprefix("Tensor."))
    order = [*WORDS, *sorted(set(found) - set(WORDS))]
    return {family: sorted(found[family]) for family in order if family in found}


def refused() -> list[str]:
    """Public torch functions that accept tensors and have no rule."""
    known = entries()
    names = {name for listed in families().values() for name in listed}
    missing = set()
    for home, functions in get_overridable_functions().items():
        if home in (torch, torch.nn.functional, torch.Tensor, torch.fft, torch.linalg, torch.special):
            missing |= {name_of(f) for f in functions if f not in known}
    return sorted(n for n in missing - names if not n.startswith("_") and not n.startswith("Tensor._"))


def summary() -> str:
    rows = [
        f"| [{family}](#{family}) | {len(names)} | {WORDS.get(family, '')} |" for family, names in families().items()
    ]
    table = "\n".join(["| family | torch functions | |", "|---|---|---|", *rows])
    return f"{table}\n\nEverything else ({len(refused())} functions of torch) is refused by name, never guessed."


def page() -> str:
    parts = [HEAD, summary(), ""]
    for family, names in families().items():
        parts += [f"## {family}", "", f"{WORDS.get(family, '')}.", "", ", ".join(f"`{n}`" for n in names), ""]
    parts += ["## Functions without a rule", "", "These raise `hc.NoRule`, which says where and what to do.", ""]
    return "\n".join([*parts, ", ".join(f"`{n}`" for n in refused()), ""])


def main() -> int:
    stale = not PAGE.exists() or PAGE.read_text() != page()
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif stale:
        print(f"{PAGE.relative_to(ROOT)} differs from the rule table; run python tools/support.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
