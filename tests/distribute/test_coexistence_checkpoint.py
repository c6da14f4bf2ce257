"""Activation checkpointing of every kind gives one rank's gradients; with kept halos it exchanges nothing twice."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from coexisting import MESHES, Network, agree, on_ranks, sample
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import halocline as hc
from halocline.world import run_local

plain = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)
keeping = functools.partial(checkpoint, use_reentrant=False, context_fn=hc.keep_halos)


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Convolutions are kept, the rest is computed again."""
    kept = operation is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(
    checkpoint,
    use_reentrant=False,
    context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
)


def whole_model(save, model: Network, x: Tensor, y: Tensor) -> None:
    # In eval mode: a norm in training mode would count its statistics twice, with or without a cut.
    F.cross_entropy(save(model.eval(), x.requires_grad_()), y).backward()


def blocks(save, model: Network, x: Tensor, y: Tensor) -> None:
    """What follows the checkpoint writes into its result."""
    model.eval()
    high = F.relu(save(lambda h: model.norm(model.first(h)), x.requires_grad_()), inplace=True)
    low = (
        save(lambda h, *, pool: model.up(model.deep(pool(h))), high, pool=model.pool)
        if save is not reentrant
        else (save(lambda h: model.up(model.deep(model.pool(h))), high))
    )
    F.cross_entropy(model.last(torch.cat([high, low], 1)), y).backward()


def nested(save, model: Network, x: Tensor, y: Tensor) -> None:
    def outer(h: Tensor) -> Tensor:
        high = save(lambda g: F.relu(model.norm(model.first(g))), h)
        return model.last(torch.cat([high, save(lambda g: model.up(save(model.deep, model.pool(g))), high)], 1))

    model.eval()
    F.cross_entropy(save(outer, x.requires_grad_()), y).backward()


KINDS = {"plain": plain, "reentrant": reentrant, "keeping": keeping, "selective": selective}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the forward of the outer one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("run", "mesh"), [(whole_model, MESHES[1]), (blocks, MESHES[0]), (nested, {"height": 2})])
def test_checkpoints_equal_one_rank(run, mesh: dict[str, int], kind: str) -> None:
    agree(functools.partial(run, KINDS[kind]), mesh)


def test_checkpoints_where_every_rank_holds_a_share() -> None:
    """The input is whole on the data axis."""
    for kind in (plain, reentrant, keeping):
        agree(functools.partial(blocks, kind), MESHES[0], {2: "height"})


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_without_a_gradient(kind: str) -> None:
    def run(model: Network, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def both(h: Tensor) -> tuple[Tensor, Tensor]:
            high = model.norm(model.first(h))
            return high, model.deep(high)

        high, low = KINDS[kind](both, x.requires_grad_())
        low.square().mean().backward()
        return {"aside": high.abs().mean()}

    agree(lambda model, x, y: run(model.eval(), x, y), MESHES[0])


@pytest.mark.parametrize("again", [False, True])
def test_checkpoint_sequential(again: bool) -> None:
    def run(model: Network, x: Tensor, y: Tensor) -> None:
        parts = nn.Sequential(model.first, model.norm, nn.ReLU(), *model.deep, model.up).eval()
        checkpoint_sequential(parts, 3, x.requires_grad_(), use_reentrant=again).square().mean().backward()

    agree(run, MESHES[0])


def test_checkpoints_saved_on_the_cpu() -> None:
    def run(model: Network, x: Tensor, y: Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(reentrant(model.eval(), x.requires_grad_()), y)
        loss.backward()

    agree(run, MESHES[0])


def test_a_whole_argument_of_a_reentrant_checkpoint_is_refused() -> None:
    """Inside it is a leaf, of which nobody knows that its gradient goes on to an averaged one."""

    def body(mesh: hc.Mesh, x: Tensor) -> None:
        layer = hc.distribute(nn.Conv2d(2, 2, 1).double(), mesh)
        reentrant(lambda h, scale: h * scale, layer(x), layer.bias.sum()).sum().backward()

    with pytest.raises(hc.Refused, match="nobody averages its gradient"):
        on_ranks(body)


def _traffic(save) -> list[tuple[int, int, dict[str, Tensor]]]:
    """Messages of the forward and of the backward, and the gradients."""

    def body() -> tuple[int, int, dict[str, Tensor]]:
        mesh, (model, x, _) = hc.Mesh(height=2), sample()
        hc.distribute(model, mesh)
        traffic = mesh.world.traffic
        before = traffic.messages
        total = save(model, hc.shard(x, mesh, {2: "height"})).square().mean()
        forward = traffic.messages
        total.backward()
        return forward - before, traffic.messages - forward, {name: p.grad for name, p in model.named_parameters()}

    return run_local(2, body)


def test_kept_halos_are_not_exchanged_again() -> None:
    true = _traffic(lambda model, x: model(x))
    kept = _traffic(keeping)
    twice = _traffic(lambda model, x: keeping(lambda h: keeping(model, h), x))
    again = _traffic(plain)
    for rank in range(2):
        assert kept[rank][:2] == true[rank][:2] == twice[rank][:2]  # as if nothing were checkpointed
        assert again[rank][1] >= true[rank][1] + 4  # three convolutions and a norm
        for name, gradient in true[rank][2].items():
            assert torch.equal(kept[rank][2][name], gradient)


def test_a_graph_kept_for_a_second_backward() -> None:
    def run(model: Network, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(keeping(model.eval(), x.requires_grad_()), y)
        loss.backward(retain_graph=True)
        loss.backward()

    agree(run, MESHES[0])


def test_a_recomputation_that_communicates_otherwise_is_refused() -> None:
    def body(mesh: hc.Mesh, x: Tensor) -> None:
        calls, kernel = [], torch.ones(2, 2, 3, 3, dtype=torch.float64)

        def fickle(h: Tensor) -> Tensor:
            calls.append(1)
            size = 3 if len(calls) == 1 else 5
            return F.conv2d(h, F.pad(copy.copy(kernel), [(size - 3) // 2] * 4), padding=size // 2).tanh()

        keeping(fickle, x.requires_grad_()).sum().backward()

    with pytest.raises(hc.Refused, match="communicates otherwise"):
        on_ranks(body)
