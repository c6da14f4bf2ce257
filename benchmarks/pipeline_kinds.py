"""``bench pipeline --kinds``: a recommender on two kinds of ranks, placed by cost, against all on one kind.

Four slow ranks with memory and one fast rank without enough for the table, as shares of a core each. The table of
``ctr`` is cut by rows over the slow ranks wherever they hold it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import halocline as hc
from halocline.parts import RankKind, place_by_cost
from halocline.testing.pool import RankPool
from halocline.workloads.ctr import TABLE, ClickNet

from .core_share import CoreShare, enter
from .machine import Others, describe

DEADLINE = 120.0
WAYS: dict[str, tuple[str, ...] | None] = {"by cost": None, "all slow": ("slow",), "all fast": ("fast",)}

Say = Callable[[str], None]


@dataclass(frozen=True)
class KindsCase:
    """The network, and the ranks of each kind with their shares of a core, memory and price for an hour."""

    fields: int = 8
    categories: int = 50_000
    width: int = 16
    hidden: int = 2048
    batch: int = 1024
    microbatches: int = 4
    slow: int = 4
    slow_share: float = 0.15
    fast_share: float = 1.0
    fast_memory: str = "64MiB"
    slow_price: float = 0.05
    fast_price: float = 0.6

    @property
    def ranks(self) -> int:
        return self.slow + 1


@dataclass(frozen=True)
class KindsTrial:
    """What is measured."""

    repeat: int = 5
    case: KindsCase = field(default_factory=KindsCase)


@dataclass(frozen=True)
class KindSteps:
    """Of one rank: what was chosen, predicted and measured."""

    kinds: tuple[str, ...]
    predicted_s: float
    price: float  # predicted, of a thousand steps
    seconds: tuple[float, ...]
    explained: str
    fits: bool
    loss: float


def batch_of(case: KindsCase) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(1)
    x = torch.randint(case.categories, (case.batch, case.fields), generator=own)
    return x, torch.randint(2, (case.batch,), generator=own).float()


def steps_of_kinds(case: KindsCase, only: tuple[str, ...] | None, repeat: int) -> KindSteps:
    """On a rank: place the network, and time its steps with the optimizer's."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.manual_seed(0)
    model, (x, y) = ClickNet(case.fields, case.categories, case.width, case.hidden), batch_of(case)
    mesh = hc.Mesh(data=case.ranks)
    kinds = {"slow": RankKind(mesh["data", 0 : case.slow], None, case.slow_price),
             "fast": RankKind(mesh["data", case.slow : case.ranks], case.fast_memory, case.fast_price)}  # fmt: skip
    told: dict[str, Any] = {
        "microbatches": case.microbatches,
        "cuts": [{0: "data"}] * 2,
        "layout": {TABLE: {0: "data"}},
    }
    loss_of = F.binary_cross_entropy_with_logits
    pipe = place_by_cost(model, kinds, loss=loss_of, example=(x, y), only=only, **told)
    parameters = list(pipe.parameters())
    optimizer = torch.optim.Adagrad(parameters, lr=0.02) if parameters else None
    seconds, loss = [], 0.0
    for turn in range(repeat + 2):
        dist.barrier()
        began = time.perf_counter()
        if optimizer is not None:
            optimizer.zero_grad()
        loss = float(pipe.step(x, y))
        if optimizer is not None:
            optimizer.step()
        seconds += [time.perf_counter() - began] if turn >= 2 else []
    taken = pipe.choices[0]
    return KindSteps(taken.names, taken.seconds, taken.price, tuple(seconds), pipe.explain(), taken.fits, loss)


def measure_kinds(trial: KindsTrial, tell: Say) -> dict[str, Any]:
    """The placement by cost, and all on each kind: predicted and measured."""
    case, found = trial.case, dict[str, dict[str, Any]]()
    shares = [case.slow_share] * case.slow + [case.fast_share]
    with CoreShare(shares, case.ranks) as confined, RankPool(case.ranks, collective_timeout=DEADLINE) as pool:
        pool.run(enter, per_rank=confined.members)
        others = Others(pool.run)
        for way, only in WAYS.items():
            by_rank = pool.run(steps_of_kinds, case, only, trial.repeat, deadline=DEADLINE)
            seconds = median(max(rank.seconds[n] for rank in by_rank) for n in range(trial.repeat))
            first = by_rank[0]
            found[way] = {"kinds": first.kinds, "step_s": seconds, "predicted_s": first.predicted_s,
                          "fits": first.fits, "loss": first.loss}  # fmt: skip
            if only is None:
                explained = first.explained
            tell(f"{way}: {' then '.join(first.kinds)}, {seconds:.3f} s, predicted {first.predicted_s:.3f} s")
        share = others.share()
    allowed = [found[way]["step_s"] for way in ("all slow", "all fast") if found[way]["fits"]]
    return {"case": asdict(case), "ways": found, "speedup": min(allowed) / found["by cost"]["step_s"],
            "explained": explained, "machine": describe(share)}  # fmt: skip


def kind_lines(result: dict[str, Any]) -> dict[str, str]:
    """A line of the table for each way."""
    return {
        f"{way} ({' then '.join(each['kinds'])})": f"{each['step_s']:.3f} s a step, predicted {each['predicted_s']:.3f}"
        + ("" if each["fits"] else "; does not fit the fast rank's memory")
        for way, each in result["ways"].items()
    }
