"""Copies of checkpoints wherever fsspec reaches: s3://, gs://, abfs://, sftp://, memory://, ...

A run writes its checkpoints to a local folder; in the background each is then copied, its manifest last, which makes
the copy valid. A run that finds a newer checkpoint there than in its folder brings it back first.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .files import MANIFEST, STEP_NAME, Folder, problems, read_manifest, surplus
from .inspect import CheckpointInfo, describe, verify_checkpoint
from .peers import CheckpointError, reason


def is_url(place: str | Path) -> bool:
    """Is this a place that fsspec finds, not a path?"""
    return "://" in str(place)


class CloudFolder:
    """A folder of checkpoints behind a URL. One process uses it at a time: rank 0 of a run, or a command."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise ConfigError(f"{url}: it needs fsspec; install it with: pip install 'halocline[cloud]'") from error
        self.url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"{url} cannot be reached: {error}") from error
        self._root = str(root).rstrip("/")

    def path(self, step: int) -> str:
        """Where a checkpoint lies."""
        return f"{self._root}/step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, the oldest first."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        names = [str(name).rstrip("/").rpartition("/")[2] for name in self._files.ls(self._root, detail=False)]
        found = sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)
        return [step for step in found if self._files.exists(f"{self.path(step)}/{MANIFEST}")]

    def upload(self, folder: Folder, step: int) -> None:
        """Copy a finished checkpoint. CheckpointError names the place if that fails."""
        source, target = folder.path(step), self.path(step)
        try:
            if self._files.exists(f"{target}/{MANIFEST}"):
                self._files.rm_file(f"{target}/{MANIFEST}")  # first: what is being replaced is not valid
            self._files.makedirs(target, exist_ok=True)
            for file in sorted(source.iterdir(), key=lambda file: file.name == MANIFEST):
                self._files.put_file(str(file), f"{target}/{file.name}")
        except Exception as error:  # each kind of storage has errors of its own
            raise CheckpointError(f"{self.url}: step {step} was not copied there: {reason(error)}") from error

    def download(self, folder: Folder, step: int) -> None:
        """Bring a checkpoint into a local folder; CheckpointError if it is damaged. With the folder's lock held."""
        part = folder.part(step)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            self._fetch(step, part)
            if wrong := problems(part, read_manifest(part, step)["files"]):
                raise CheckpointError("; ".join(wrong))
            folder.publish(step)
        except CheckpointError as error:
            raise CheckpointError(f"{self.url}: {error}") from error
        except Exception as error:
            raise CheckpointError(f"{self.url}: step {step} cannot be read: {reason(error)}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _fetch(self, step: int, target: Path) -> None:
        """Copy the manifest, then the files that it names, and no others."""
        self._files.get_file(f"{self.path(step)}/{MANIFEST}", str(target / MANIFEST))
        for name in read_manifest(target, step)["files"]:
            if self._files.exists(f"{self.path(step)}/{name}"):
                self._files.get_file(f"{self.path(step)}/{name}", str(target / name))

    def bring_newest(self, folder: Folder) -> None:
        """Bring the newest good checkpoint into a local folder, if it is newer than all that are there."""
        newest = max(folder.steps(), default=-1)
        for step in reversed([step for step in self.steps() if step > newest]):
            try:
                self.download(folder, step)
            except CheckpointError as error:
                warnings.warn(f"checkpoint passed over: {error}", RuntimeWarning, stacklevel=2)
            else:
                return

    # ---- as the commands see it ----

    def describe(self, step: int) -> CheckpointInfo:
        """A checkpoint by its manifest; other files are not read."""
        with tempfile.TemporaryDirectory(prefix="halocline-cloud-") as name:
            local = Folder(Path(name))
            local.path(step).mkdir()
            self._files.get_file(f"{self.path(step)}/{MANIFEST}", str(local.path(step) / MANIFEST))
            return self._as_it_lies(describe(local, step))

    def verify(self, step: int) -> CheckpointInfo:
        """A checkpoint with every file read and compared."""
        with tempfile.TemporaryDirectory(prefix="halocline-cloud-") as name:
            local = Folder(Path(name))
            local.path(step).mkdir()
            with suppress(CheckpointError):  # of a manifest that is damaged, which is found again
                self._fetch(step, local.path(step))
            return self._as_it_lies(verify_checkpoint(local, step), str(local.root))

    def _as_it_lies(self, info: CheckpointInfo, local: str = "") -> CheckpointInfo:
        """The facts of a copy, with size, time and place of the original."""
        there = [each for each in self._files.ls(self.path(info.step), detail=True) if each["type"] == "file"]
        told = tuple(words.replace(local, self.url) if local else words for words in info.problems)
        return replace(
            info, path=f"{self.url}/step-{info.step:08d}", size=sum(int(each["size"] or 0) for each in there),
            files=len(there), written=_written(there) or info.written, problems=told,
        )  # fmt: skip

    def remove(self, steps: Collection[int]) -> None:
        """Remove checkpoints, each one's manifest first."""
        for step in steps:
            self._files.rm_file(f"{self.path(step)}/{MANIFEST}")
            self._files.rm(self.path(step), recursive=True)

    def retain(self, keep: int, every: int) -> None:
        """Keep the newest, and those at multiples of ``every`` steps."""
        self.remove(surplus(self.steps(), keep, (), every))


def _written(files: list[dict[str, Any]]) -> float:
    """The time of the newest file, where the storage tells."""
    times = [each.get("mtime") or each.get("created") or each.get("LastModified") for each in files]
    told = [time.timestamp() if hasattr(time, "timestamp") else time for time in times if time is not None]
    return max((float(each) for each in told if isinstance(each, (int, float))), default=0.0)
