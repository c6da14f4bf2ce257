"""Hooks of every kind, and autograd Functions of others, on cut tensors: what they see and do is one rank's."""

import pytest
import torch
import torch.nn.functional as F
from coexisting import MESHES, Network, agree, on_ranks, step
from torch import Tensor, nn

import halocline as hc

Seen = dict[str, Tensor]
HEIGHT_ONLY = {2: "height"}  # on the data axis each rank then holds a share of every gradient


def forward_hooks(model: Network, x: Tensor, y: Tensor) -> Seen:
    seen = {}
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model.norm.register_forward_hook(lambda module, args, out: seen.update(normed=out) or out.abs())
    model.register_forward_hook(lambda module, args, kwargs, out: out - out.mean(), with_kwargs=True)
    return {"loss": step(model, x, y), **seen}


def _watch(seen: Seen, name: str):
    def hook(module: nn.Module, inputs: tuple, outputs: tuple) -> None:
        seen.update({f"{name} in": inputs[0], f"{name} out": outputs[0]})

    return hook


def backward_hooks(model: Network, x: Tensor, y: Tensor) -> Seen:
    """On every module, one inside the other."""
    seen: Seen = {}
    for name, module in model.named_modules():
        module.register_full_backward_hook(_watch(seen, name))
    return {"loss": step(model, x.requires_grad_(), y), **seen}


def replacing_hooks(model: Network, x: Tensor, y: Tensor) -> Seen:
    model.deep.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] - inputs[0].mean(),))
    model.last.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
    model.up.register_full_backward_pre_hook(lambda module, outputs: None)
    return {"loss": step(model, x, y)}


class Gate(nn.Module):
    """A whole argument before the cut one, and two results of which one is whole."""

    def forward(self, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight.view(-1, 1, 1), (x * weight.view(-1, 1, 1)).mean()


def mixed_hooks(model: Network, x: Tensor, y: Tensor) -> Seen:
    seen, gate = {}, Gate()
    gate.register_full_backward_hook(
        lambda module, inputs, outputs: seen.update(weight=inputs[0], x=inputs[1], cut=outputs[0], whole=outputs[1])
    )
    out, mean = gate(model.last.bias.sigmoid(), model(x))
    (F.cross_entropy(out, y) + (out * mean).square().mean()).backward()
    return seen


class Pair(nn.Module):
    """One input and one output without a gradient."""

    def forward(self, x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (x + unused) * 3


def hooks_without_gradients(model: Network, x: Tensor, y: Tensor) -> Seen:
    seen, pair = {}, Pair()
    pair.register_full_backward_hook(
        lambda module, inputs, outputs: seen.update(x=inputs[0], unused=inputs[1], used=outputs[0], last=outputs[1])
    )
    out, aside = pair(model(x), model(x) * 0.5)
    seen["aside"] = aside.mean()
    F.cross_entropy(out, y).backward()
    assert seen.pop("last") is None
    return seen


def no_input_gradient(model: Network, x: Tensor, y: Tensor) -> Seen:
    seen: Seen = {}
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.update(out=outputs[0]))
    step(model, x, y)
    return seen


def tensor_hooks(model: Network, x: Tensor, y: Tensor) -> Seen:
    seen: Seen = {}
    x.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: seen.update(arrived=leaf.grad * 2))
    high = model.first(x)
    out = model(high[:, :2])
    high.retain_grad()
    torch.autograd.graph.register_multi_grad_hook(
        (high, out), lambda gradients: seen.update(high=gradients[0], out=gradients[1])
    )
    torch.autograd.graph.register_multi_grad_hook((x, out), lambda gradient: seen.update(any=gradient), mode="any")
    out.register_hook(lambda gradient: gradient * 3)
    F.cross_entropy(out, y).backward()
    return {**seen, "kept": high.grad}


def saved_elsewhere(model: Network, x: Tensor, y: Tensor) -> Seen:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        first = F.cross_entropy(model(x), y)
    first.backward()
    with torch.autograd.graph.save_on_cpu():
        second = F.cross_entropy(model(x), y)
    second.backward()
    return {"first": first, "second": second}


HOOKS = [
    forward_hooks,
    backward_hooks,
    replacing_hooks,
    mixed_hooks,
    hooks_without_gradients,
    tensor_hooks,
    saved_elsewhere,
    no_input_gradient,
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when")
@pytest.mark.parametrize("dims", [{0: "data", 2: "height"}, HEIGHT_ONLY], ids=str)
@pytest.mark.parametrize("run", HOOKS)
def test_hooks_equal_one_rank(run, dims: dict[int, str]) -> None:
    agree(run, MESHES[0], dims)


def test_a_hook_must_keep_the_cut() -> None:
    def body(mesh, x):
        layer = nn.Conv2d(2, 2, 1).double()
        layer.register_full_backward_hook(lambda module, inputs, outputs: (torch.ones(1, 2, 4, 4).double(),))
        hc.distribute(layer, mesh)(x.requires_grad_()).sum().backward()

    with pytest.raises(hc.Refused, match=r"for input 0, which is Sharding.* a gradient that is whole"):
        on_ranks(body)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_the_old_kind_are_refused() -> None:
    def body(mesh, x):
        layer = nn.Conv2d(2, 2, 1).double()
        layer.register_backward_hook(lambda module, inputs, outputs: None)
        hc.distribute(layer, mesh)(x)

    with pytest.raises(hc.Refused, match="register_full_backward_hook"):
        on_ranks(body)


@hc.trust
class Softened(torch.autograd.Function):
    """Saves its output; its backward needs the whole tensor."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y - (gradient * y).mean()


@hc.trust
class Weighted(torch.autograd.Function):
    """A cut and a whole input, a cut and a whole output."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, (x * weight).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        both = gradient + of_sum
        return both * weight, (both * x).sum((0, 2, 3)).view(-1, 1, 1)


def trusted(model: Network, x: Tensor, y: Tensor) -> Seen:
    out = Softened.apply(Softened.apply(model(x.requires_grad_()).tanh()))
    scaled, total = Weighted.apply(F.relu(out, inplace=False), model.last.bias.view(-1, 1, 1))
    (F.cross_entropy(scaled, y) + (scaled * total).mean() + total.square()).backward()
    return {"out": out}


def trusted_in_part(model: Network, x: Tensor, y: Tensor) -> Seen:
    """An output without a gradient: first the cut one, then the whole one."""
    for used in (0, 1):
        outputs = Weighted.apply(model(x), model.last.bias.view(-1, 1, 1))
        outputs[1 - used].abs().sum()
        outputs[used].square().mean().backward()
    return {}


def trusted_twice(model: Network, x: Tensor, y: Tensor) -> Seen:
    """Differentiated twice, the Function's backward included."""
    out = Softened.apply(model(x.requires_grad_()).tanh())
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    slope.square().mean().backward()
    return {"slope": slope}


@pytest.mark.parametrize("dims", [{0: "data", 2: "height"}, HEIGHT_ONLY], ids=str)
@pytest.mark.parametrize("run", [trusted, trusted_in_part, trusted_twice])
def test_trusted_functions_equal_one_rank(run, dims: dict[int, str]) -> None:
    agree(run, MESHES[0], dims)


@hc.trust
class Turned(torch.autograd.Function):
    """Right on one rank, where nobody asks how the gradient lies."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x + x.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.t() + gradient


def test_a_trusted_function_must_keep_the_cut() -> None:
    def body(mesh, _):
        both = hc.Mesh(a=2, b=2)
        x = hc.shard(torch.ones(4, 4), both, {0: "a", 1: "b"}).requires_grad_()
        Turned.apply(x).sum().backward()

    with pytest.raises(hc.Refused, match=r"Turned.*for input 0"):
        on_ranks(body, 4)
