"""Checkpoints: exact, on any number of ranks, whole or not at all, and never unpickled without limits."""

import hashlib
import math
import random
import resource
import shutil
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_run import bits, saved, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from halocline.errors import RankFailure
from halocline.testing.pool import shared_pool
from halocline.train.checkpoints import CheckpointError, Checkpoints, Mismatch
from halocline.train.export import export_weights, import_weights
from halocline.world import Mesh

# ---- states ----


def trained(optimizer: str = "adam", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1).to(torch.bfloat16))
    model.to(memory_format=torch.channels_last)
    groups = [{"params": model[:2].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    made: torch.optim.Optimizer = torch.optim.Adam(groups, lr=1e-3, betas=(0.8, 0.99))
    if optimizer == "sgd":
        made = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    for _ in range(2):
        made.zero_grad()
        model[2](model[:2](torch.randn(2, 2, 8, 8)).to(torch.bfloat16)).square().mean().backward()
        made.step()
    return model, made


def whole_state(seed: int = 0) -> dict[str, Any]:
    (model, adam), (_, sgd) = trained("adam", seed), trained("sgd", seed)
    return {
        "model": model.state_dict(),
        "adam": adam.state_dict(),
        "sgd": sgd.state_dict(),
        "rng": torch.get_rng_state(),
    }


def odd_state() -> dict[str, Any]:
    """What JSON alone would bend."""
    nan = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
    return {
        "floats": [0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf, nan, 1 / 3],
        "keys": {0: "a", "0": "b", (1, "x"): None, None: True, -3: {1: {}}},
        "$tuple": ((), (1, (2.5, [3])), torch.Size([2, 3])),
        "python": random.Random(3).getstate(),
        "numpy": (np.float64(0.1), np.arange(6, dtype=np.uint32).reshape(2, 3), np.bool_(True)),
        "tensors": {0: torch.tensor(2**62), "0": torch.empty(0, 3), "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        "strange": [torch.tensor([1 + 2j]).conj(), torch.randn(4, 6).t(), torch.tensor([float("nan"), -0.0])],
        "text": "ü\ud800\n",
        "large": 3**200,
    }


# ---- one process ----


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors, state = whole_state(), odd_state()
    with Checkpoints(tmp_path, None) as checkpoints:
        checkpoints.save(7, tensors, state, wait=True)
        loaded = checkpoints.load_latest(tensors)
    assert loaded is not None and (loaded.step, loaded.skipped) == (7, ())
    assert bits(loaded.tensors) == bits(tensors)
    assert list(loaded.state) == list(state)
    for name in state:
        assert bits(loaded.state[name]) == bits(state[name]), name
    assert loaded.tensors["model"]._metadata == tensors["model"]._metadata
    assert isinstance(loaded.tensors["model"], OrderedDict)


def test_a_new_model_and_optimizer_go_on_as_the_old_ones(tmp_path: Path) -> None:
    model, adam = trained(seed=1)
    other, fresh = trained(seed=2)
    fresh.state.clear()  # as one that has made no step
    with Checkpoints(tmp_path, Mesh(data=1)) as checkpoints:
        checkpoints.save(2, {"model": model.state_dict(), "adam": adam.state_dict()}, {}, wait=True)
        loaded = checkpoints.load_latest({"model": other.state_dict(), "adam": fresh.state_dict()})
    assert loaded is not None
    other.load_state_dict(loaded.tensors["model"])
    fresh.load_state_dict(loaded.tensors["adam"])
    assert bits(fresh.state_dict()) == bits(adam.state_dict())
    assert bits(dict(other.state_dict())) == bits(dict(model.state_dict()))


def test_nothing_there_is_none_and_makes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", None)
    assert checkpoints.load_latest({}) is None and checkpoints.steps() == []
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are: none"):
        checkpoints.load(3)


def test_training_may_change_the_tensors_while_they_are_written(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((200, 200), 1.0) for number in range(40)}
    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    under_way = checkpoints._pending is not None and not checkpoints._pending[1].done()
    loaded = checkpoints.load_latest(tensors)
    assert under_way, "it was written before save() returned"
    assert loaded is not None and all(bool((tensor == 1).all()) for tensor in loaded.tensors.values())


def test_the_newest_are_kept_and_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with saved(tmp_path, 1, 2, 3, 4, 5, keep=2) as checkpoints:
        assert checkpoints.steps() == [4, 5] == sorted(int(path.name[5:]) for path in tmp_path.iterdir())
        checkpoints.save(5, weights(6), {"again": True}, wait=True)
        assert checkpoints.load(5).state == {"again": True} and checkpoints.steps() == [4, 5]


def test_a_run_that_goes_back_does_not_save_behind_later_ones(tmp_path: Path) -> None:
    saved(tmp_path, 5, 9).close()
    with Checkpoints(tmp_path, None) as checkpoints, pytest.raises(CheckpointError, match="holds step-00000009, later"):
        checkpoints.save(6, weights(6), {})


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.train.checkpoints.files._LOCK_PATIENCE", 0.1)
    with saved(tmp_path, 1), Checkpoints(tmp_path, None) as second:
        assert second.load_latest() is not None  # reading is free
        with pytest.raises(CheckpointError, match="another run writes its checkpoints here"):
            second.save(2, weights(2), {})
    saved(tmp_path, 3).close()


def test_what_a_kill_left_is_put_right(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2).close()
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.old")
    for name in (".step-00000003.part", ".step-00000001.gone", ".step-00000001.old"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    Checkpoints(tmp_path, None).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.gpu
def test_tensors_of_a_device_are_copied_before_save_returns(tmp_path: Path) -> None:
    weight = torch.ones(1 << 20, device="cuda")
    with Checkpoints(tmp_path, None) as checkpoints:
        checkpoints.save(1, {"weight": weight, "rng": torch.cuda.get_rng_state()}, {})
        weight.zero_()
        loaded = checkpoints.load(1, {"weight": weight}).tensors
    assert loaded["weight"].device.type == "cpu" and bool((loaded["weight"] == 1).all())
    torch.cuda.set_rng_state(loaded["rng"])


# ---- what is refused ----


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"w": torch.zeros(51)}, r"tensors/w it has torch.float32 of \(50,\), and the run needs .* \(51,\)"),
        ({"w": torch.zeros(50, dtype=torch.float64)}, "needs torch.float64"),
        ({"v": torch.zeros(1)}, "tensors/v it has no such tensor"),
    ],
)
def test_another_model_is_an_error_and_not_damage(tmp_path: Path, template: dict[str, Any], words: str) -> None:
    with saved(tmp_path, 1, 2) as checkpoints, pytest.raises(Mismatch, match=words):
        checkpoints.load_latest(template)


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", torch.float32, torch.eye(2).to_sparse(), torch.empty(2, device="meta")]
)
def test_what_a_checkpoint_does_not_hold_is_named(tmp_path: Path, value: Any) -> None:
    with Checkpoints(tmp_path, None) as checkpoints, pytest.raises(CheckpointError, match="tensors/a/0 is "):
        checkpoints.save(1, {"a": [value]}, {})
    assert not list(tmp_path.iterdir())


def test_a_writer_that_does_not_end_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, None, deadline=0.1)
    monkeypatch.setattr("halocline.train.checkpoints.saving.write_tensors", lambda *_: time.sleep(0.4))
    checkpoints.save(1, weights(1), {})
    with pytest.raises(CheckpointError, match=r"still being written after 0.1 s"):
        checkpoints.wait()


# ---- several ranks ----


def digest(value: Any) -> str:
    return hashlib.blake2b(repr(bits(value)).encode()).hexdigest()


def checkpoints_here(folder: Path, **options: Any) -> Checkpoints:
    return Checkpoints(folder, Mesh(data=-1), **options)


def save_on_rank(folder: Path, steps: tuple[int, ...]) -> str:
    with checkpoints_here(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, whole_state(step), {"step": step, "betas": (0.9, 0.99)})
    return digest(whole_state(steps[-1]))


def load_on_rank(folder: Path) -> tuple[int, str, tuple[str, ...], Any]:
    with checkpoints_here(folder) as checkpoints:
        loaded = checkpoints.load_latest(whole_state(0))
    return loaded.step, digest(loaded.tensors), loaded.skipped, loaded.state


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_writing_and_any_number_resumes(tmp_path: Path, ranks: int) -> None:
    many, one = tmp_path / "many", tmp_path / "one"
    pool = shared_pool(ranks)
    assert len(set(pool.run(save_on_rank, many, (1, 2)))) == 1
    state = {"step": 2, "betas": (0.9, 0.99)}
    expected = (2, digest(whole_state(2)), (), state)
    assert len(list((many / "step-00000002").glob("__*.distcp"))) == ranks
    assert pool.run(load_on_rank, many) == [expected] * ranks
    with Checkpoints(many, None) as checkpoints:
        loaded = checkpoints.load_latest(whole_state(0))
        assert loaded is not None and (loaded.step, digest(loaded.tensors), loaded.state) == (2, expected[1], state)
    with Checkpoints(one, None) as checkpoints:
        checkpoints.save(2, whole_state(2), state, wait=True)
    assert pool.run(load_on_rank, one) == [expected] * ranks


def test_all_ranks_pass_over_the_same_damage(tmp_path: Path) -> None:
    shared_pool(2).run(save_on_rank, tmp_path, (1, 2))
    path = next((tmp_path / "step-00000002").glob("__1_*.distcp"))
    path.write_bytes(path.read_bytes()[::-1])
    outcomes = shared_pool(2).run(load_on_rank, tmp_path)
    assert outcomes[0] == outcomes[1] and outcomes[0][:2] == (1, digest(whole_state(1)))
    assert "step-00000002, __1_0.distcp: damaged" in outcomes[0][2][0]


def whole_dtensor() -> torch.Tensor:
    return torch.arange(42, dtype=torch.float64).reshape(7, 6)


def sharded() -> DTensor:
    return distribute_tensor(
        whole_dtensor(), init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [Shard(0)]
    )


def save_shards(folder: Path) -> None:
    with checkpoints_here(folder) as checkpoints:
        checkpoints.save(1, {"shards": nn.Parameter(sharded()), "whole": torch.ones(3)}, {})


def load_shards(folder: Path) -> bool:
    template = sharded()
    template.zero_()
    with checkpoints_here(folder) as checkpoints:
        loaded = checkpoints.load_latest({"shards": template}).tensors["shards"]
    return loaded.placements == template.placements and torch.equal(loaded.full_tensor(), whole_dtensor())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_shards_are_loaded_by_other_numbers_of_ranks(tmp_path: Path, ranks: int) -> None:
    shared_pool(2).run(save_shards, tmp_path)
    assert shared_pool(ranks).run(load_shards, tmp_path) == [True] * ranks
    assert torch.equal(Checkpoints(tmp_path, None).load(1).tensors["shards"], whole_dtensor())


def failing(folder: Path, how: str) -> list[str]:
    """What this rank hears, and what the rank makes of a save afterwards."""
    rank = torch.distributed.get_rank()
    tensors = {"a": torch.zeros(100_000 + (how == "differ" and rank)), "b": torch.ones(100_000)}
    heard = []
    with checkpoints_here(folder, deadline=20.0) as checkpoints:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "full" and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            checkpoints.save(1, tensors, {})
            heard.append("saving")
            checkpoints.wait()
        except CheckpointError as error:
            heard.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if how == "full":
            heard += [path.name for path in folder.iterdir()] if rank == 0 else []
            checkpoints.save(1, tensors, {}, wait=True)
    return heard


def test_a_full_disk_on_one_rank_is_told_to_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = shared_pool(2).run(failing, tmp_path, "full")
    assert first == second and first[0] == "saving" and len(first) == 2
    assert "step 1 was not saved: rank 1: File too large" in first[1]  # what the limit says in place of a full disk
    assert Checkpoints(tmp_path, None).load(1).step == 1


def test_an_unwritable_folder_is_told_to_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    first, second = shared_pool(2).run(failing, tmp_path / "file" / "run", "unwritable")
    assert first == second and "Not a directory" in first[0]


def test_ranks_that_save_different_things_are_told(tmp_path: Path) -> None:
    first, second = shared_pool(2).run(failing, tmp_path, "differ")
    assert first == second and "rank 1 has other tensors than rank 0" in first[0]


def save_alone(folder: Path) -> str:
    checkpoints = checkpoints_here(folder, deadline=1.0)
    if torch.distributed.get_rank() == 1:
        return "went on"
    try:
        checkpoints.save(1, weights(1), {})
    except RankFailure as error:
        return str(error)
    return "saved"


def test_a_rank_that_does_not_come_is_not_waited_for_forever(tmp_path: Path) -> None:
    first, _ = shared_pool(2).run(save_alone, tmp_path)
    assert "did not answer within 1 s" in first


# ---- weights alone ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("part", torch.arange(1000.0)[:3])
        self.register_buffer("turned", torch.randn(3, 4).t())


@pytest.mark.parametrize("name", ["weights.pt", "new/weights.safetensors"])
def test_weights_go_into_the_bare_model(tmp_path: Path, name: str) -> None:
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    torch.manual_seed(1)
    model, bare = Tied(), Tied()
    export_weights(model, tmp_path / name)
    bare.load_state_dict(import_weights(tmp_path / name))
    expected, found = model.state_dict(), bare.state_dict()
    assert list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]
    assert (tmp_path / name).stat().st_size < 4096 + 1024 * 4


class Compiled(nn.Module):
    """Names its weights as torch.compile does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def test_a_state_dict_is_exported_and_wrappers_are_left_off(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    export_weights(model.state_dict(), tmp_path / "a.pt")
    export_weights(Compiled(model), tmp_path / "b.pt")
    assert list(import_weights(tmp_path / "a.pt")) == list(import_weights(tmp_path / "b.pt")) == ["0.weight", "0.bias"]


def test_weights_that_cannot_be_written_or_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not weights")
    with pytest.raises(CheckpointError, match=r"file/a.pt: the weights cannot be written: "):
        export_weights({}, tmp_path / "file" / "a.pt")
    with pytest.raises(CheckpointError, match="file: the weights cannot be read: "):
        import_weights(tmp_path / "file")
    with pytest.raises(CheckpointError, match="extra is a int, and safetensors holds tensors only"):
        export_weights({"extra": 1}, tmp_path / "a.safetensors")
