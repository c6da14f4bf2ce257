"""Tensors made inside a model: right wherever they are used, and cut like the activation they are as large as."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import check_rule, relative_error
from halocline.world import run_local

KIND = {"dtype": torch.float64}
CUTS = [({"depth": 2, "height": 2}, {2: "depth", 3: "height"}), ({"data": 2, "depth": 3}, {0: "data", 2: "depth"})]


def coordinates(x: Tensor) -> Tensor:
    """As CoordConv has them: a channel for each spatial dim, from -1 to 1."""
    lines = [torch.linspace(-1, 1, size, dtype=x.dtype, device=x.device) for size in x.shape[2:]]
    grid = torch.stack(torch.meshgrid(*lines, indexing="ij")).expand(x.shape[0], -1, -1, -1)
    return F.conv2d(torch.cat([x, grid], 1), torch.ones(2, x.shape[1] + 2, 3, 3, **KIND), padding=1)


def positions(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[2], device=x.device).view(1, 1, -1, 1)
    return x * torch.sin(rows / x.shape[2]) + (rows % 2 == 0)


def checkerboard(x: Tensor) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(x.size(2)), torch.arange(x.size(3)), indexing="ij")
    return torch.where((rows + columns) % 2 == 0, x, torch.zeros(1, **KIND))


def hidden(x: Tensor) -> Tensor:
    """A recurrent state of other channels."""
    state = x.new_zeros(x.shape[0], 4, *x.shape[2:])
    for _ in range(2):
        state = torch.tanh(state + F.conv2d(x, torch.ones(4, 2, 3, 3, **KIND), padding=1))
    return state


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x + torch.zeros(x.shape, **KIND),
    "ones in a convolution": lambda x: F.conv2d(x * torch.ones(x.shape, **KIND), torch.ones(1, 2, 3, 3, **KIND)),
    "full": lambda x: x * torch.full(x.size(), 0.5, **KIND),
    "zeros_like": lambda x: torch.cat([x, torch.zeros_like(x), torch.ones_like(x[:, :1])], 1),
    "empty_like": lambda x: torch.empty_like(x).fill_(2) * x,
    "coordinates": coordinates,
    "arange": positions,
    "linspace": lambda x: x * torch.linspace(0, 1, x.shape[3], **KIND),
    "checkerboard": checkerboard,
    "eye": lambda x: x @ torch.eye(x.shape[3], **KIND),
    "new_zeros": lambda x: x.new_zeros(x.shape) + x,
    "new_ones, sizes by themselves": lambda x: x.new_ones(*x.shape) * x,
    "new_full": lambda x: x.new_full((x.shape[0], 1, *x.shape[2:]), 3) * x,
    "new_full of space": lambda x: x.new_full(x.shape[2:], 3) * x,
    "new_empty": lambda x: x.new_empty(x.shape).zero_() + x,
    "new_zeros of another size": lambda x: x + x.new_zeros(x.shape[3]),
    "new_tensor": lambda x: x * x.new_tensor([[1.0], [2.0]]).view(1, 2, 1, 1),
    "hidden state": hidden,
    "one_hot": lambda x: F.one_hot((x > 0).long().sum(1), 3) * 0.5,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("mesh", "cut"), CUTS, ids=str)
def test_right_in_use(use: str, mesh: dict[str, int], cut: dict[int, str]) -> None:
    x = torch.randn(2, 2, 7, 5, **KIND)
    found = check_rule(USES[use], x, cuts=[cut], mesh=mesh)
    assert found.verdict == "exact", found


@pytest.mark.parametrize(
    ("shape", "cut_dims"),
    [
        ((4, 2, 9, 5), {0, 2}),
        ((4, 8, 9, 5), {0, 2}),
        ((1, 8, 9, 5), {2}),
        ((4, 9, 5), {0, 1}),
        ((9, 5), {0}),
        ((9, 6), None),
        ((4, 2), None),
        ((), None),
    ],
    ids=str,
)
def test_cut_as_its_maker(shape: tuple[int, ...], cut_dims: set[int] | None) -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2, depth=2)
        x = hc.shard(torch.ones(4, 2, 9, 5), mesh, {0: "data", 2: "depth"})
        new = x.new_ones(shape, dtype=torch.float16)
        assert new.shape == shape and new.dtype == torch.float16
        if cut_dims is None:
            assert not isinstance(new, hc.ShardedTensor)
            return
        assert set(new.sharding.dims_by_axis()) == cut_dims
        assert tuple(hc.unwrap(new).shape) == new.sharding.tile_shape
        assert torch.equal(hc.gather(new), torch.ones(shape, dtype=torch.float16))

    run_local(4, body)


def test_a_cut_tensor_is_not_copied_as_a_whole_one() -> None:
    def body() -> None:
        mesh = hc.Mesh(depth=2)
        x = hc.shard(torch.ones(4, 2, 9), mesh, {2: "depth"})
        with pytest.raises(hc.Refused, match="new_tensor"):
            x.new_tensor(x)

    run_local(2, body)


class Autoencoder(nn.Module):
    """Variational: noise in the latent space, coordinates, dropout of every kind, and interpolation back up."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv3d(4, 4, 3, stride=2, padding=1), nn.BatchNorm3d(4), nn.RReLU())
        self.drop = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Dropout3d(0.2))
        self.mean, self.spread = nn.Conv3d(4, 3, 1), nn.Conv3d(4, 3, 3, padding=1)
        self.code = nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(6, 3))
        self.decode = nn.Conv3d(3, 1, 3, padding=1)

    def place(self, x: Tensor) -> Tensor:
        lines = [torch.linspace(-1, 1, size, dtype=x.dtype, device=x.device) for size in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*lines, indexing="ij"))
        return torch.cat([x, grid.expand(x.shape[0], -1, -1, -1, -1)], 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.drop(self.encode(self.place(x)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        latent = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        latent = latent + self.code(latent.mean((2, 3, 4)))[..., None, None, None]  # whole from here to there
        up = F.interpolate(latent, x.shape[2:], mode="trilinear", align_corners=False)
        waves = torch.sin(torch.arange(x.shape[2], dtype=x.dtype)).view(-1, 1, 1)
        return self.decode(up * waves) + x.new_full(x.shape, 0.1), mean, spread


def train(model: nn.Module, x: Tensor, steps: int = 5) -> Tensor:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        noisy = x + 0.1 * torch.rand_like(x) * torch.randn(x.shape[2], 1, 1, dtype=x.dtype)
        out, mean, spread = model(noisy)
        loss = F.mse_loss(out, x) + 1e-2 * (mean.square() + spread.exp() - spread - 1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


NETWORK_CUTS = [
    ({"data": 2, "depth": 2}, {}),
    ({"depth": 3}, {}),
    ({"depth": 3}, {2: (0, 2, 9, 11)}),
    ({"depth": 2, "height": 2}, {3: (0, 5, 6)}),
    ({"data": 1, "width": 2}, {}),
]


@pytest.mark.parametrize(("sizes", "points"), NETWORK_CUTS, ids=str)
def test_an_autoencoder_trains_as_on_one_rank(sizes: dict[str, int], points: dict[int, tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    model, x = Autoencoder().double(), torch.randn(2, 1, 11, 6, 8, **KIND)
    true = copy.deepcopy(model)
    with hc.random.reproducible(3):
        curve = train(true, x)
        state = hc.random.get_state()

    def body() -> tuple[Tensor, dict[str, Tensor], tuple[int, int]]:
        mesh = hc.Mesh(**sizes)
        dims = {dim: axis for dim, axis in enumerate(["data", "", "depth", "height", "width"]) if axis in sizes}
        mine = hc.distribute(copy.deepcopy(model), mesh)
        with hc.random.reproducible(3):
            found = train(mine, hc.shard(x, mesh, dims, points=points))
            return found, mine.state_dict(), hc.random.get_state()

    for found, weights, end in run_local(math.prod(sizes.values()), body):
        assert relative_error(found, curve) < 1e-9 and end == state
        for name, weight in true.state_dict().items():
            assert relative_error(weights[name], weight, 1e-3) < 1e-7, name
