"""Random functions: one generator for every cut, for plain tensors too, in recomputation, and from a saved state."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.testing import check_rule, relative_error, shared_pool
from halocline.world import run_local

CUTS = [
    ({"data": 2, "depth": 2}, {0: "data", 2: "depth"}, {}),
    ({"depth": 3}, {2: "depth"}, {2: (0, 0, 7, 10)}),
    ({"channels": 2, "height": 2}, {1: "channels", 3: "height"}, {3: (0, 1, 6)}),
]


def draws(function: Callable[..., object], *inputs: Tensor) -> object:
    with hc.random.reproducible(5):
        return function(*inputs)


def in_place(name: str, *args: object) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(x * 1, name)(*args)


#: What comes out bit for bit: integers, uniform numbers, masks.
SAME_BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "dropout in eval": nn.Dropout(0.5).eval(),
    "module": nn.Dropout(0.4, inplace=False),
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.3),
    "dropout1d without batch": lambda x: F.dropout1d(x[0, :, :, 0], 0.3),
    "dropout2d": nn.Dropout2d(0.3),
    "dropout2d in place": lambda x: nn.Dropout2d(0.3, inplace=True)(x * 1),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(-1), 0.3),
    "dropout3d without batch": lambda x: F.dropout3d(x, 0.3),
    "alpha_dropout": nn.AlphaDropout(0.3),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.3, True),
    "rrelu": nn.RReLU(),
    "rrelu in place": lambda x: nn.RReLU(inplace=True)(x * 1),
    "rrelu in eval": nn.RReLU().eval(),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randint_like of longs": lambda x: torch.randint_like(x, 9, dtype=torch.int64),
    "bernoulli": lambda x: torch.bernoulli((x > 0).to(x.dtype) * 0.3) * x,
    "bernoulli of one p": lambda x: torch.bernoulli(x, 0.2) * x,
    "bernoulli_": in_place("bernoulli_", 0.7),
    "bernoulli_ by a tensor": in_place("bernoulli_", torch.linspace(0, 1, 6)),
    "uniform_": in_place("uniform_", -1, 3),
    "random_": in_place("random_"),
    "random_ to": in_place("random_", 7),
    "random_ from, to": in_place("random_", -3, 7),
    "whole rand": lambda x: x + torch.rand(x.shape[2], 1, dtype=x.dtype),
    "whole randint": lambda x: x + torch.randint(-4, 9, (x.shape[1], 1, 1)),
    "whole randperm": lambda x: x.index_select(1, torch.randperm(x.shape[1])),
    "whole dropout": lambda x: F.dropout(torch.ones(6, dtype=x.dtype)) * x,
}
#: What goes through logarithms and cosines, whose last bit may depend on where a number lies in memory.
TO_ROUNDING: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(0.5, x.abs()),
    "normal of both": lambda x: torch.normal(x, torch.linspace(1, 2, 6, dtype=x.dtype)),
    "normal_": in_place("normal_", 1, 2),
    "log_normal_": in_place("log_normal_"),
    "exponential_": in_place("exponential_", 2.0),
    "cauchy_": in_place("cauchy_"),
    "geometric_": in_place("geometric_", 0.3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, 0.5, True, dim=-1) * x,
    "whole randn": lambda x: x + torch.randn(x.shape[3], dtype=x.dtype),
    "whole normal": lambda x: x * torch.normal(1.0, 2.0, (x.shape[2], 1), dtype=x.dtype),
}


@pytest.mark.parametrize("name", [*SAME_BITS, *TO_ROUNDING])
def test_equals_one_rank_for_every_cut(name: str) -> None:
    """Value and gradient."""
    function = (SAME_BITS | TO_ROUNDING)[name]
    for mesh, cut, points in CUTS:
        x = torch.randn(2, 4, 10, 6, dtype=torch.float64)
        found = check_rule(lambda x: draws(function, x), x, cuts=[cut], mesh=mesh, points=[points])
        assert found.verdict == "exact", (mesh, found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_for_every_cut(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 10, 6).to(dtype)
    true = {name: draws(function, x) for name, function in SAME_BITS.items()}

    def body(mesh: dict[str, int], cut: dict[int, str], points: dict[int, tuple[int, ...]]) -> None:
        layout = hc.Mesh(**mesh)
        for name, function in SAME_BITS.items():
            found = draws(function, hc.shard(x.clone(), layout, cut, points=points))
            assert torch.equal(hc.gather(found), true[name]), name

    for mesh, cut, points in CUTS:
        run_local(math.prod(mesh.values()), lambda mesh=mesh, cut=cut, points=points: body(mesh, cut, points))


def test_without_the_mode_a_cut_tensor_draws_the_same_and_a_plain_one_as_torch_has_it() -> None:
    x = torch.zeros(4, 3, 8)
    true = draws(torch.rand_like, x)

    def body() -> Tensor:
        hc.random.seed(5)
        cut = hc.shard(x, hc.Mesh(depth=2), {2: "depth"})
        return hc.gather(torch.rand_like(cut))

    assert all(torch.equal(found, true) for found in run_local(2, body))
    torch.manual_seed(3)
    plain = F.dropout(torch.ones(50))
    torch.manual_seed(3)
    assert torch.equal(F.dropout(torch.ones(50)), plain)


# ---- the state ----


def test_a_saved_state_goes_on_with_another_cut() -> None:
    x = torch.ones(4, 2, 6)

    def run(ranks: int, state: tuple[int, int] | None, steps: int) -> tuple[list[Tensor], tuple[int, int]]:
        def body() -> tuple[list[Tensor], tuple[int, int]]:
            hc.random.seed(9) if state is None else hc.random.set_state(state)
            cut = hc.shard(x, hc.Mesh(depth=ranks), {2: "depth"})
            return [hc.gather(F.dropout(cut)) for _ in range(steps)], hc.random.get_state()

        found = run_local(ranks, body)
        assert len({state for _, state in found}) == 1
        return found[0]

    true, end = run(3, None, 5)
    _, state = run(2, None, 2)
    assert state == (9, 2)
    rest, last = run(4, state, 3)
    assert last == end == (9, 5)
    assert all(torch.equal(a, b) for a, b in zip(rest, true[2:], strict=True))


def test_eval_draws_nothing() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout3d(), nn.AlphaDropout(), nn.RReLU()).eval()

    def body() -> None:
        cut = hc.shard(torch.ones(2, 2, 4, 4, 4), hc.Mesh(depth=2), {2: "depth"})
        before = hc.random.get_state(), torch.get_rng_state()
        assert torch.equal(hc.gather(model(cut)), torch.ones(2, 2, 4, 4, 4))
        assert hc.random.get_state() == before[0] and torch.equal(torch.get_rng_state(), before[1])

    run_local(2, body)


def test_distribute_gives_all_ranks_the_state_of_the_first() -> None:
    def body() -> tuple[int, int]:
        mesh = hc.Mesh(data=3)
        hc.random.set_state((2**64 - 5 - mesh.rank, mesh.rank))
        hc.distribute(nn.Linear(2, 2), mesh)
        return hc.random.get_state()

    assert run_local(3, body) == [(2**64 - 5, 0)] * 3


def unasked() -> list[tuple[int, int]]:
    hc.random.state._of_process.clear()
    states = [hc.random.get_state()]
    mesh = hc.Mesh(data=2)
    torch.manual_seed(30 + mesh.rank)
    hc.distribute(nn.Linear(2, 2), mesh)
    return [*states, hc.random.get_state()]


def test_unless_asked_ranks_begin_alike_and_distribute_takes_the_seed_of_torch() -> None:
    assert shared_pool(2).run(unasked) == [[(0, 0), (30, 0)]] * 2


def test_the_mode_ends_where_it_began() -> None:
    hc.random.seed(4)
    first = hc.random.get_state()
    with hc.random.reproducible(1):
        a = torch.rand(3)
        with hc.random.reproducible(1):
            assert torch.equal(torch.rand(3), a)
        b = torch.rand(3)
    assert hc.random.get_state() == first
    with hc.random.reproducible():
        c, state = torch.rand(3), hc.random.get_state()
    assert state == (4, 1) == hc.random.get_state()
    assert not torch.equal(a, b) and not torch.equal(a, c)


def test_torch_seeds_said_again_repeat_as_in_torch() -> None:
    def pair() -> Tensor:
        return torch.stack([torch.rand(4), torch.rand(4)])

    with hc.random.reproducible(2):
        torch.manual_seed(0)
        first, later = pair(), pair()
        torch.manual_seed(0)
        assert torch.equal(pair(), first)
        with torch.random.fork_rng(devices=[]):
            forked = pair()
        assert torch.equal(pair(), forked) and torch.equal(forked, later)
        torch.manual_seed(1)
        fresh = pair()
        assert hc.random.get_state() == (2, 6)
    assert torch.stack([*first, *later, *fresh]).unique().numel() == 24


def test_generators_of_ones_own_stay_in_use() -> None:
    true = torch.rand(5, generator=torch.Generator().manual_seed(1))
    with hc.random.reproducible(3):
        assert torch.equal(torch.rand(5, generator=torch.Generator().manual_seed(1)), true)
        assert hc.random.get_state() == (3, 0)


# ---- recomputation ----


class Block(nn.Module):
    def __init__(self, reentrant: bool | None, depth: int = 0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.inner = Block(reentrant, depth - 1) if depth else nn.Dropout(0.4)

    def body(self, x: Tensor) -> Tensor:
        x = F.dropout(self.convolution(x), 0.3)
        return F.dropout1d(self.inner(x), 0.2) + torch.randn_like(x) * x

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def trained(reentrant: bool | None, nested: int, ranks: int = 1, plain_too: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 12, dtype=torch.float64)
    model = nn.Sequential(Block(reentrant, nested), nn.Tanh(), Block(reentrant)).double()
    hc.random.seed(6)
    with hc.random.reproducible() if plain_too else nullcontext():
        mesh = hc.Mesh(depth=ranks)
        model = hc.distribute(model, mesh)
        torch.manual_seed(mesh.rank)  # torch's own streams may differ
        cut = hc.shard(x, mesh, {2: "depth"}).requires_grad_()
        for _ in range(2):
            model(cut).square().mean().backward()
            penalty = torch.autograd.grad(model(cut).square().mean(), cut)
        state = hc.random.get_state()
    gradients = [p.grad for p in model.parameters()]
    return [g.clone() for g in gradients] + [hc.gather(g) for g in (cut.grad, *penalty)] + [torch.tensor(state)]


def assert_same(found: list[Tensor], true: list[Tensor]) -> None:
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("nested", [0, 2])
def test_recomputation_draws_the_same(nested: int) -> None:
    assert_same(trained(False, nested), trained(None, nested))
    with hc.random.reproducible(6):  # reentrant checkpoints know no autograd.grad
        x = torch.randn(2, 2, 12, requires_grad=True)
        models = [Block(reentrant, nested) for reentrant in (None, True)]
        models[1].load_state_dict(models[0].state_dict())
        state = hc.random.get_state()
        gradients = []
        for model in models:
            hc.random.set_state(state)
            model(x).square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
    assert_same(*gradients)


@pytest.mark.parametrize("plain_too", [True, False])
def test_recomputation_on_ranks_draws_the_same(plain_too: bool) -> None:
    true = trained(None, 0)
    for found in shared_pool(2).run(trained, False, 0, 2, plain_too):
        assert_same(found, true)


def test_recomputation_on_threads_is_refused() -> None:
    def body() -> None:
        x = hc.shard(torch.ones(2, 2, 8), hc.Mesh(depth=2), {2: "depth"}).requires_grad_()
        loss = checkpoint(F.dropout, x * 2, use_reentrant=False).square().sum()
        with pytest.raises(hc.Refused, match="in backward"):
            loss.backward()

    run_local(2, body)


def test_new_numbers_in_backward_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(8, requires_grad=True)
    with hc.random.reproducible(1):
        checkpoint(F.dropout, x * 2, use_reentrant=False, preserve_rng_state=False).square().sum().backward()
    assert "draws new numbers in backward" in caplog.text


# ---- refusals ----


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.poisson(x),
        lambda x: torch.binomial(x, x),
    ],
)
def test_what_is_not_replaced_is_refused(call: Callable[[Tensor], Tensor]) -> None:
    with hc.random.reproducible(1), pytest.raises(hc.Refused, match="draws random numbers of torch"):
        call(torch.ones(2, 3, 4))

    def body() -> None:
        with pytest.raises(hc.Refused):
            call(hc.shard(torch.ones(2, 3, 4), hc.Mesh(depth=2), {2: "depth"}))

    run_local(2, body)


def test_modules_that_draw_inside_torch_are_refused() -> None:
    x = torch.ones(2, 3, 4)
    for module in (nn.LSTM(4, 4, 2, dropout=0.1), nn.GRU(4, 4, 2, dropout=0.1)):
        with hc.random.reproducible(1):
            module.eval()(x)
            module.train()
            with pytest.raises(hc.Refused, match="draws random numbers of torch"):
                module(x)


def test_attention_that_drops_draws_alike_on_one_rank_and_on_two() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    with hc.random.reproducible(3):
        plain = layer(x)

    def body() -> Tensor:
        model, mesh = copy.deepcopy(layer), hc.Mesh(a=2)
        with hc.random.reproducible(3):
            return hc.gather(hc.distribute(model, mesh)(hc.shard(x, mesh, {1: "a"})))

    for cut in run_local(2, body):
        assert relative_error(cut, plain) < 1e-12


def test_bad_arguments_are_refused() -> None:
    def body() -> None:
        x = hc.shard(torch.ones(2, 3, 4), hc.Mesh(depth=2), {2: "depth"})
        with pytest.raises(hc.Refused, match="generator"):
            x.normal_(generator=torch.Generator())
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
        with pytest.raises(NotImplementedError, match="int64"):
            x.long().normal_()

    run_local(2, body)


# ---- on a GPU, where backward runs in a thread of its own ----


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits() -> None:
    x = torch.randn(2, 4, 10, 6)
    functions = {
        name: f for name, f in SAME_BITS.items() if "tensor" not in name
    }  # that one brings its own, of the CPU
    true = {name: draws(function, x) for name, function in functions.items()}
    with torch.device("cuda"):
        for name, function in functions.items():
            assert torch.equal(draws(function, x.cuda()).cpu(), true[name]), name


@pytest.mark.gpu
def test_recomputation_on_a_gpu_draws_the_same() -> None:
    gradients = []
    for checkpointed in (None, False):
        torch.manual_seed(0)
        model, x = Block(checkpointed, 1).double().cuda(), torch.randn(2, 2, 12, dtype=torch.float64).cuda()
        with hc.random.reproducible(2):
            model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_same(*gradients)
