"""Products summed over shared dims, joins and look-ups of tensors that are each cut in a way of their own."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranges import often
from test_view_rules import MESHES, lines, random_cut
from torch import nn

import halocline as hc
from halocline.testing.compare import check_rule
from halocline.world import Mesh, run_local

SETUPS = often(7)
SIZES = {"b": (1, 2, 4), "c": (1, 3), "i": (1, 4, 5), "j": (2, 3, 6), "k": (1, 3, 6), "o": (2, 5), "1": (1,), "0": (0,)}

#: The call, and the dims of each tensor by letters: the same letter is the same size.
CALLS = """
F.linear(x, y)                                  | bck ok
F.linear(x, y, z)                               | bk ok o
F.linear(input=x, weight=y, bias=z)             | bcik ok o
F.linear(x, y, z)                               | k ok o
F.linear(x, y)                                  | bk k
F.linear(x, y, z)                               | b0 o0 o
x @ y                                           | ik kj
x @ y                                           | bcik kj
x @ y                                           | bcik bckj
x @ y                                           | 1cik b1kj
x @ y                                           | k bckj
x @ y                                           | bcik k
x @ y                                           | i0 0j
torch.matmul(x, y)                              | cik bckj
torch.matmul(input=x, other=y)                  | ik kj
x.matmul(y)                                     | k k
torch.linalg.matmul(x, y)                       | ik kj
torch.mm(x, y)                                  | ik kj
x.bmm(y)                                        | bik bkj
torch.mv(x, y)                                  | ik k
torch.dot(x, y)                                 | k k
torch.vdot(x, y)                                | k k
torch.addmm(x, y, z, beta=2, alpha=3)           | j ik kj
x.addmm(mat1=y, mat2=z)                         | ij ik kj
torch.addmm(x, y, z, beta=0) + x                | ij ik kj
x.addmv(y, z)                                   | i ik k
torch.baddbmm(x, y, z)                          | bij bik bkj
torch.addbmm(x, y, z)                           | ij bik bkj
torch.outer(x, y)                               | i j
torch.inner(x, y)                               | ik bjk
torch.tensordot(x, y, 2)                        | ikj kjo
torch.tensordot(x, y, dims=([2, 0], [1, -1]))   | ikj oji
torch.einsum("ij,jk->ik", x, y)                 | ij jk
torch.einsum("ij,jk", [x, y])                   | ij jk
torch.einsum("bchw,oc->bohw", x, y)             | bcij oc
torch.einsum("bhid,bhjd->bhij", x, y)           | bcik bcjk
torch.einsum("...ij,...jk->...ik", x, y)        | 1bik bkj
torch.einsum("b...c,cd->b...d", x, y)           | bijk ko
torch.einsum("ii->i", x)                        | ii
torch.einsum("ii", x)                           | ii
torch.einsum("iij,j->i", x, y)                  | iij j
torch.einsum("ij->", x)                         | ij
torch.einsum("ba,b", x, y)                      | ij i
torch.einsum("ij,ij->i", x, y)                  | ij i1
torch.einsum("ijk,kl,lm->ijm", x, y, z)         | ijk kb bo
torch.einsum(x, [0, 1], y, [1, 2], [0, 2])      | ij jk
torch.cat([x, y, z], 1)                         | bic bjc bkc
torch.cat([x, y])                               | i j
torch.cat((x, y, torch.zeros(0).double()), -1)  | bi bj
torch.stack([x, y, z], dim=-1)                  | bij bij bij
torch.hstack((x, y))                            | bij bkj
F.cosine_similarity(x, y, dim=1)                | bji bj1
F.scaled_dot_product_attention(x, y, z)         | bcik bcjk bcjo
F.scaled_dot_product_attention(x, y, z, is_causal=True) | bik bjk bjo
F.scaled_dot_product_attention(x, y, y, z)      | bcik bcjk ij
torch.where(x > 0, x, y).transpose(0, 1) @ z    | ki ki kj
"""


def evaluated(call: str) -> Any:
    return eval(f"lambda x, y=None, z=None: {call}", {"torch": torch, "F": F})


def random_tensors(random: Random, letters: str, dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = {letter: random.choice(choices) for letter, choices in SIZES.items()}
    generator = torch.Generator().manual_seed(random.randrange(1000))
    shapes = [[sizes[letter] for letter in word] for word in letters.split()]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def checked(call: str, letters: str, random: Random, dtype: torch.dtype, second_order: bool) -> str:
    """The verdict, exact or invalid. The first tensor is cut; each other is cut in a way of its own or plain."""
    mesh, tensors = random.choice(MESHES), random_tensors(random, letters, dtype)
    placed = [random_cut(random, tuple(tensor.shape), mesh) for tensor in tensors]
    plain = [place > 0 and random.random() < 0.4 for place in range(len(tensors))]
    cuts = [None if left else cut for left, (cut, _) in zip(plain, placed, strict=True)]
    points = [None if left else at for left, (_, at) in zip(plain, placed, strict=True)]
    second_order = second_order and len(placed[0][0]) == len(mesh)  # a gradient that is read by hand is cut everywhere
    found = check_rule(evaluated(call), *tensors, cuts=cuts, points=points, mesh=mesh, second_order=second_order)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    assert found.verdict in ("exact", "invalid"), f"{call} on {shapes} cut {cuts} at {points} over {mesh}: {found}"
    return found.verdict


@pytest.mark.parametrize("line", lines(CALLS))
def test_as_on_one_rank(line: str) -> None:
    call, letters = line.split("|")
    random = Random(line)
    found = [checked(call.strip(), letters, random, torch.float64, setup % 3 == 0) for setup in range(SETUPS)]
    assert "exact" in found  # torch refusing every set-up would show nothing


@pytest.mark.parametrize("line", lines(CALLS)[6:44:3])
def test_complex(line: str) -> None:
    call, letters = line.split("|")
    random = Random(line)
    found = [checked(call.strip(), letters, random, torch.complex128, second_order=False) for _ in range(2)]
    assert "exact" in found


#: The call, the dims of the tensor and of the index, and how many rows the index chooses from.
LOOK_UPS = """
x.gather(1, index)                         | bji bki | 2
torch.gather(x, 0, index=index)            | jbi oci | 2
x.index_select(-1, index)                  | bij k   | 2
F.embedding(index, x)                      | jo bik  | 2
F.embedding(index, x, padding_idx=1)       | jo bik  | 2
F.one_hot(index, 5) * x.sum()              | bi bjk  | 5
"""


@pytest.mark.parametrize("line", lines(LOOK_UPS))
def test_look_ups(line: str) -> None:
    call, letters, rows = line.split("|")
    random, function = Random(line), eval(f"lambda x, index: {call}", {"torch": torch, "F": F})
    for _ in range(SETUPS):
        x, like = random_tensors(random, letters, torch.float64)
        index = torch.randint(0, int(rows), like.shape, generator=torch.Generator().manual_seed(3))
        mesh = random.choice(MESHES)
        cuts, points = zip(*(random_cut(random, tuple(t.shape), mesh) for t in (x, index)), strict=True)
        found = check_rule(function, x, index, cuts=cuts, points=points, mesh=mesh)
        assert found.verdict in ("exact", "invalid"), f"{call} of {x.shape}, {index.shape} cut {cuts}: {found}"


def test_bias_is_added_once() -> None:
    """Features cut over three ranks, of which the first and the last have none."""
    x, weight, bias = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    cut = {"cuts": [{1: "a"}], "mesh": {"a": 3}, "points": [{1: (0, 0, 4, 4)}, None, None]}
    assert check_rule(F.linear, x, weight, bias, **cut, tolerance=1e-6).verdict == "exact"


def test_dense_head_under_autocast() -> None:
    """A contraction over ranks keeps autocast's dtype, with the bias as without."""

    def body() -> list[torch.dtype]:
        mesh = Mesh(a=2)
        x, head = hc.shard(torch.ones(2, 4), mesh, {1: "a"}), hc.distribute(nn.Linear(4, 3), mesh)
        with torch.autocast("cpu", torch.bfloat16):
            return [head(x).dtype, F.linear(x, head.weight).dtype, (x @ head.weight.T).dtype]

    assert run_local(2, body) == [[torch.bfloat16] * 3] * 2


def test_attention_block_of_unchanged_modules() -> None:
    """Tokens cut over ranks: queries keep their cut, keys and values are gathered."""
    torch.manual_seed(0)
    project, out = (nn.Linear(6, size).double().requires_grad_(False) for size in (18, 6))

    def block(x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = project(x).reshape(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    found = check_rule(block, torch.randn(2, 7, 6).double(), cuts=[{0: "data", 1: "a"}], mesh={"data": 2, "a": 3})
    assert found.verdict == "exact", found
