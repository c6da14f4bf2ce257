"""Files that somebody else wrote, or a disk has changed: each gives one clear error, and nothing outside its folder."""

import json
import os
import pickle
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_run import saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halocline.data.staging.listing import File, Listing, StageError, is_below
from halocline.errors import HaloclineError
from halocline.plan.machine import load_machine
from halocline.plan.plan_file import read_plan
from halocline.train.checkpoints import CheckpointError, Folder
from halocline.train.checkpoints.files import MANIFEST, METADATA, STATE, facts, read_manifest, write_manifest
from halocline.train.checkpoints.inspect import verify_checkpoint
from halocline.train.checkpoints.store import Stored
from halocline.train.checkpoints.tree import assembled, leaves
from halocline.train.checkpoints.wire import from_bytes, to_bytes
from halocline.train.config import load_settings, read_settings
from halocline.train.inputs import Input

COUNT = int(os.environ.get("HALOCLINE_FUZZ", "40"))  # inputs a test; thousands by hand
many = settings(
    max_examples=COUNT, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["$tensor", "../x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def mutated(whole: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    """The bytes with some of them changed, and the end cut off."""
    data = bytearray(whole)
    for place, value in changes:
        if data:
            data[place % len(data)] = value
    return bytes(data[: max(0, len(data) - cut)])


MUTATIONS = st.tuples(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6), st.sampled_from([0, 0, 1, 7, 999])
)


def refused(call: object, *arguments: object, **more: object) -> None:
    """Either it works, or it raises an error of the library's own."""
    with suppress(HaloclineError):
        call(*arguments, **more)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, 3).close()
    return folder / "step-00000003"


def copy_of(good: Path, tmp_path: Path, name: str, data: bytes, resign: bool) -> Folder:
    """A checkpoint with one file replaced; resigned, its manifest vouches for it."""
    folder = Folder(tmp_path)
    path = folder.path(3)
    path.mkdir(exist_ok=True)
    for file in good.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / name).write_bytes(data)
    if resign and name != MANIFEST:
        content = read_manifest(good, 3)
        write_manifest(path, {**content, "files": {**content["files"], name: facts(path / name)}})
    return folder


@many
@given(st.sampled_from([MANIFEST, METADATA, STATE, "__0_0.distcp"]), MUTATIONS, st.booleans())
def test_checkpoints(tmp_path: Path, good: Path, name: str, change: tuple, resign: bool) -> None:
    data = mutated((good / name).read_bytes(), *change)
    folder = copy_of(good, tmp_path, name, data, resign)
    found = verify_checkpoint(folder, 3)
    if data != (good / name).read_bytes() and not resign:
        assert found.problems
    path = folder.path(3)
    with suppress(HaloclineError):
        files = read_manifest(path, 3)["files"]
        tree = None
        with suppress(ValueError, KeyError):
            tree = json.loads((path / STATE).read_bytes())["tree"]
        if tree is not None:
            stored = Stored(path, files)
            refused(stored.targets, leaves(tree), {})
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000003"}


@many
@given(JSON)
def test_states_of_checkpoints(tree: object) -> None:
    with suppress(CheckpointError, ValueError, KeyError, TypeError, AttributeError):  # all reported by _attempt
        leaves(tree)
        assembled(tree, {})


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_tables_that_would_run_code(good: Path, tmp_path: Path) -> None:
    for harmful in (Harm(tmp_path / "harm"), eval, os.system, [Harm(tmp_path / "harm")]):
        folder = copy_of(good, tmp_path, METADATA, pickle.dumps(harmful), resign=True)
        assert verify_checkpoint(folder, 3).problems
    assert not (tmp_path / "harm").exists()


@many
@given(st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), JSON))
def test_messages_between_ranks(data: bytes) -> None:
    with suppress(ValueError):
        to_bytes(from_bytes(data))


@many
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode) | MUTATIONS)
def test_settings(tmp_path: Path, data: object) -> None:
    text = b'workload = "unet3d"\nsteps = 3\n[optimizer]\nlr = 0.1\n[data]\nsamples = 4\n'
    content = data if isinstance(data, bytes) else mutated(text, *data)
    (tmp_path / "config.toml").write_bytes(content)
    refused(load_settings, tmp_path / "config.toml")
    refused(read_settings, tmp_path)


@many
@given(st.dictionaries(st.sampled_from([*vars(Input)["__dataclass_fields__"], "x"]), JSON) | JSON)
def test_descriptions_of_inputs(tmp_path: Path, content: object) -> None:
    (tmp_path / "input.json").write_text(json.dumps(content))
    refused(Input.read, tmp_path)


@many
@given(JSON | MUTATIONS)
def test_machine_files(tmp_path: Path, content: object) -> None:
    file, shipped = tmp_path / "machine.json", Path(load_machine.__code__.co_filename).parent / "machines/summit.json"
    is_change = isinstance(content, tuple)
    file.write_bytes(mutated(shipped.read_bytes(), *content) if is_change else json.dumps(content).encode())
    refused(load_machine, str(file))


def test_files_nested_without_end(tmp_path: Path) -> None:
    deep = "[" * 100_000
    for name, call in (("m.json", load_machine), ("p.json", read_plan), ("config.toml", load_settings)):
        (tmp_path / name).write_text(f"x = {deep}" if name.endswith("toml") else deep)
        with pytest.raises(HaloclineError):
            call(str(tmp_path / name) if name == "m.json" else tmp_path / name)
    (tmp_path / "input.json").write_text(deep)
    for call in (Input.read, read_settings):
        with pytest.raises(HaloclineError):
            call(tmp_path)
    with pytest.raises(StageError):
        Listing.decoded(zlib.compress(deep.encode()))
    with pytest.raises(ValueError, match="no message"):
        from_bytes(deep.encode())


@many
@given(JSON)
def test_plan_files(tmp_path: Path, content: object) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(content))
    refused(read_plan, tmp_path / "plan.json")


@many
@given(
    st.binary(max_size=60)
    | st.builds(lambda value: zlib.compress(json.dumps(value).encode()), JSON)
    | st.builds(
        lambda path: Listing("/x", (File(path, 3, 4),), ()).encoded(),
        st.sampled_from(["../evil.txt", "/etc/x", "a/../../x", "", ".", "a\0b", ".halocline-stage/x", "ok/x"]),
    )
)
def test_listings_of_files_to_stage(data: bytes) -> None:
    try:
        listing = Listing.decoded(data)
    except StageError:
        return
    assert all(is_below(file.path) and file.size >= 0 for file in listing.files)
