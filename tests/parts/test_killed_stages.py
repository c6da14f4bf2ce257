"""A rank of a stage dies in a step: all others say so in time, and the run goes on from its checkpoint."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelining import SEED, Chain, one_rank

import halocline as hc
from halocline.errors import RankFailure
from halocline.parts.replay import StageProgram
from halocline.testing import shared_pool

DEADLINE = 5.0
STEPS = 3


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (6, 3)) for _ in range(STEPS)]  # type: ignore[misc]


def trained(folder: str, dies: int, at: int, schedule: str) -> tuple[list[float], str, float]:
    """Losses of the steps that this rank made, its error, and the seconds to it. Rank ``dies`` ends its process in the
    ``at``-th forward of its stage."""
    hc.init(deadline=DEADLINE)
    hc.random.seed(SEED)
    torch.manual_seed(0)
    pipe = hc.pipeline(Chain().double(), hc.Mesh(stage=3), loss=F.mse_loss, example=batches()[0], microbatches=4,
                       schedule=schedule, stages=["b", "d"])  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    file, step = Path(folder) / "state.pt", 0
    if file.exists():
        saved = torch.load(file)
        pipe.load_state_dict(saved["model"])
        pipe.load_optimizer_state_dict(optimizer, saved["optimizer"])
        hc.random.set_state(saved["random"])
        step = saved["step"]
    forwards, losses, began = 0, [], time.monotonic()
    own = StageProgram.run

    def run(self: StageProgram, *args: Any) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards == at and hc.Mesh(stage=3).rank == dies:
            os._exit(9)
        return own(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageProgram, "run", run)
        try:
            for number in range(step, STEPS):
                optimizer.zero_grad()
                began = time.monotonic()
                losses.append(float(pipe.step(*batches()[number])))
                optimizer.step()
                state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer),
                         "random": hc.random.get_state(), "step": number + 1}  # fmt: skip
                if pipe.lane == 0:
                    torch.save(state, file.with_suffix(".part"))
                    file.with_suffix(".part").rename(file)
        except RankFailure as error:
            return losses, str(error), time.monotonic() - began
    return losses, "", 0.0


def alone() -> list[float]:
    torch.manual_seed(0)
    model, losses = Chain().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hc.random.seed(SEED)
    with hc.random.reproducible():
        for batch in batches():
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(*(tensor.chunk(4) for tensor in batch), strict=True):
                share = F.mse_loss(model(x), y) / 4
                share.backward()
                total += float(share.detach())
            optimizer.step()
            losses.append(total)
    return losses


@pytest.mark.long
@pytest.mark.parametrize(("dies", "schedule"), [(0, "1f1b"), (1, "1f1b"), (2, "zero-bubble")])
def test_a_killed_stage_is_named_and_the_run_goes_on(tmp_path: Path, dies: int, schedule: str) -> None:
    pool, expected = shared_pool(3), alone()
    outcomes = pool.outcomes(trained, str(tmp_path), dies, 7, schedule, deadline=60)  # in the second step
    assert outcomes[dies].kind == "died"
    for outcome in outcomes:
        if outcome.rank != dies:
            losses, said, seconds = outcome.value
            assert losses == pytest.approx(expected[:1], rel=1e-9)
            assert f"no word from rank {dies}" in said or f"connection to rank {dies} closed" in said
            assert seconds < DEADLINE + 5
    for losses, said, _ in pool.run(trained, str(tmp_path), -1, 0, schedule, deadline=60):
        assert not said
        assert losses == pytest.approx(expected[1:], rel=1e-9)


def test_one_rank_is_the_reference() -> None:
    """The losses above are those of the untouched model."""
    torch.manual_seed(0)
    model = Chain().double()
    assert float(one_rank(copy.deepcopy(model), F.mse_loss, batches()[0], 4)) == pytest.approx(alone()[0], rel=1e-12)
