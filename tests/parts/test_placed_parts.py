"""``hc.place``: modules on parts of the mesh that may differ in axes and sizes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from pipelining import SEED, Case
from torch import Tensor, nn

import halocline as hc
from halocline.errors import MeshError
from halocline.world import run_local


class Two(nn.Module):
    """An encoder and a decoder, with a skip between them and work outside both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.decoder = nn.Sequential(nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.cat([self.encoder(x), x.square()], 1))


def placed_error(part: str, microbatches: int, schedule: str, cut: bool = True) -> float:
    torch.manual_seed(0)
    model = Two().double()
    x, y = torch.randn(4, 1, 7, 5, dtype=torch.float64), torch.randn(4, 2, 7, 5, dtype=torch.float64)
    one = copy.deepcopy(model)
    expected = F.mse_loss(one(x), y)
    expected.backward()

    def body() -> float:
        mesh = hc.Mesh(part=2, data=2)
        meshes = {"unequal": (mesh["part", 0], mesh["part", 1]["data", 0:1]),
                  "equal": (mesh["part", 0], mesh["part", 1]),
                  "reversed": (mesh["part", 1], mesh["part", 0])}[part]  # fmt: skip
        hc.random.seed(SEED)
        pipe = hc.place(copy.deepcopy(model), dict(zip(("encoder", "decoder"), meshes, strict=True)), loss=F.mse_loss,
                        example=(x, y), cuts=[{0: "data"}, {0: "data"}] if cut else [], microbatches=microbatches,
                        schedule=schedule)  # fmt: skip
        worst = abs(float(pipe.step(x, y)) - float(expected.detach()))
        named = dict(one.named_parameters())
        return max([worst, *(float((p.grad - named[n].grad).abs().max()) for n, p in pipe.named_parameters())])

    return max(run_local(4, body))


@pytest.mark.parametrize("part", ["equal", "unequal", "reversed"])
def test_modules_on_parts(part: str) -> None:
    assert placed_error(part, 1, "gpipe") <= 1e-8
    assert placed_error(part, 2, "zero-bubble") <= 1e-8
    assert placed_error(part, 2, "1f1b", cut=False) <= 1e-8


def refusal(parts: dict[str, int], **options: object) -> str:
    """What a refused placement over ``{pattern: part}`` says."""
    case = Case.of("chain", 2)

    def body() -> str:
        mesh = hc.Mesh(part=2)
        meshes = {name: mesh["part", place] for name, place in parts.items()}
        with pytest.raises(MeshError) as told:
            hc.place(case.model, meshes, loss=case.subject.loss, example=case.batch, **options)  # type: ignore[arg-type]
        return str(told.value)

    first, second = run_local(2, body)
    assert first == second
    return first


def test_refusals() -> None:
    assert "did you mean" in refusal({"a": 0, "dropp": 1})
    assert "values flow to later stages only" in refusal({"d": 0, "a": 1})
    assert "stand next to each other" in refusal({"a": 0, "b": 1, "c": 0})
    assert "takes {pattern: mesh}" in refusal({})
