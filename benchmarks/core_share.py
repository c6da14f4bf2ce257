"""Ranks confined to a share of a core each, as on a machine whose cores are slower: by the kernel's cpu controller."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from .topology import ClusterError

ROOT = Path("/sys/fs/cgroup")
PERIOD = 10_000  # microseconds: short, so that a rank is slow rather than stopped for long


class CoreShare:
    """One control group for each rank of a pool, there between ``__enter__`` and ``__exit__``. Takes root."""

    def __init__(self, share: float | Sequence[float], ranks: int) -> None:
        """``share`` of every rank, or by rank."""
        self.shares = [share] * ranks if isinstance(share, float | int) else list(share)
        self._groups = [_parent() / f"halocline-{os.getpid()}-{rank}" for rank in range(ranks)]

    def __enter__(self) -> CoreShare:
        try:
            for group, share in zip(self._groups, self.shares, strict=True):
                quota = max(1000, round(share * PERIOD))  # the kernel takes no less than a millisecond
                group.mkdir()
                if (group / "cpu.max").exists():
                    (group / "cpu.max").write_text(f"{quota} {PERIOD}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                    (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            self.__exit__()
            raise ClusterError(f"cannot confine ranks to a share of a core: {error}; leave --cores out") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Ranks must have ended: a group with processes in it stays."""
        for group in self._groups:
            with suppress(OSError):
                group.rmdir()

    @property
    def members(self) -> list[tuple[str]]:
        """By rank: the file in which :func:`enter` writes its process."""
        return [(str(group / "cgroup.procs"),) for group in self._groups]


def enter(members: str) -> None:
    """On a rank: this process, with all its threads, is confined from here on."""
    Path(members).write_text(str(os.getpid()))


def _parent() -> Path:
    """Where groups with a quota of processor time can be made: the one tree of cgroup v2, or v1's tree for cpu."""
    return ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT
