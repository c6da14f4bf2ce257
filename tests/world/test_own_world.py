"""A transport of the user's own, proved with the library's own tests; the worked example of docs/adding-a-world.md."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import halocline as hc
from halocline.errors import RankFailure
from halocline.testing import WorldTests, shared_pool
from halocline.world import Capabilities, Label, World, as_world, in_host_memory, memory_of, this_world
from halocline.world.base import Incoming, Outgoing

T = TypeVar("T")


class FolderWorld(World):
    """Ranks that share a folder. A message is a file in it, which its receiver removes."""

    capabilities = Capabilities("folder")

    def __init__(self, rank: int, size: int, folder: Path, deadline: float) -> None:
        super().__init__(rank, size, deadline)
        folder.mkdir(exist_ok=True)
        self._folder, self._duplicates = folder, 0
        self._sent: Counter[tuple[int, int, int]] = Counter()

    def _file(self, source: int, target: int, tag: int) -> Path:
        """Of the next message from one rank to another with this tag: both count alike."""
        self._sent[source, target, tag] += 1
        return self._folder / f"{source} to {target}, tag {tag}, message {self._sent[source, target, tag]}"

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        for peer, message, tag in sends:
            file = self._file(self.rank, peer, tag)
            part = file.with_name(file.name + " being written")
            part.write_bytes(memory_of(in_host_memory(message, fill=True)))
            part.rename(file)  # it is there whole, or not at all
        return [(peer, buffer, self._file(peer, self.rank, tag)) for peer, buffer, tag in receives]

    def complete(self, posted: Any, label: Label) -> None:
        end = time.monotonic() + self.deadline
        for peer, buffer, file in posted:
            while not file.exists():
                self._check(peer, end, label)
                time.sleep(1e-3)
            host = in_host_memory(buffer)
            if buffer.numel():
                memory_of(host)[:] = file.read_bytes()
            file.unlink()
            if host is not buffer:
                buffer.copy_(host)

    def _check(self, peer: int, end: float, label: Label) -> None:
        has_left = (self._folder / f"rank {peer} has left").exists()
        if has_left or time.monotonic() > end:
            why = "has left" if has_left else f"sent nothing within {self.deadline:g} s"
            raise RankFailure(f"rank {self.rank}, {self.called(label)}: rank {peer} {why}. Look at its output first")

    def leave(self) -> None:
        (self._folder / f"rank {self.rank} has left").touch()

    def _duplicate(self, wide: bool) -> FolderWorld:
        self._duplicates += 1
        return FolderWorld(self.rank, self.size, self._folder / f"duplicate {self._duplicates}", self.deadline)


def in_folder(folder: Path, body: Callable[..., T], deadline: float, *arguments: Any) -> T:
    """On a rank of the pool, whose own world only says which rank it is."""
    pool = this_world()
    return body(FolderWorld(pool.rank, pool.size, folder, deadline), *arguments)


class TestFolderWorld(WorldTests):
    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        with tempfile.TemporaryDirectory() as folder:
            return shared_pool(self.size).run(in_folder, Path(folder) / "world", body, deadline, *arguments)

    def run_while_one_dies(self, body: Callable[..., T], *arguments: Any, deadline: float) -> list[T]:
        with tempfile.TemporaryDirectory() as folder:
            told = shared_pool(self.size).outcomes(in_folder, Path(folder) / "world", body, deadline, *arguments)
        return [outcome.value for outcome in told if outcome.kind == "value"]


def train_in_it(world: World) -> list[float]:
    """A convolution cut over the ranks, and averaged gradients."""
    with as_world(world):
        mesh = hc.Mesh(width=-1)
        torch.manual_seed(1)
        model = hc.distribute(torch.nn.Conv1d(1, 2, 3, padding=1).double(), mesh)
        x = hc.shard(torch.arange(24.0, dtype=torch.float64).view(1, 1, 24), mesh, {2: "width"})
        model(x).square().mean().backward()
        return [value for p in model.parameters() for value in p.grad.flatten().tolist()]


def test_a_model_trains_in_it() -> None:
    torch.manual_seed(1)
    model = torch.nn.Conv1d(1, 2, 3, padding=1).double()
    model(torch.arange(24.0, dtype=torch.float64).view(1, 1, 24)).square().mean().backward()
    true = torch.cat([p.grad.flatten() for p in model.parameters()])
    for found in TestFolderWorld().run(train_in_it):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), true, rtol=1e-12, atol=1e-12)


def test_the_page_shows_this_world() -> None:
    source = inspect.getsource(FolderWorld)
    assert len(source.splitlines()) <= 80
    assert source in (Path(__file__).parents[2] / "docs" / "adding-a-world.md").read_text()
