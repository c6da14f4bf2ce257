"""Run by test_data_memory: reads a sample larger than its buffers and budget, and says how much memory that took."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from halocline.data import HDF5, Crop, Generated, Loader, Zarr
from halocline.geometry import Interval

SIDE = 320  # of the crops; three buffers of them and the budget are less than a sample
BUDGET = 160_000_000


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text).group(1))


class Peak:
    """The most that is resident while it is watched, above what was there before."""

    def __enter__(self) -> "Peak":
        self._start, self.bytes, self._done = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            self.bytes = max(self.bytes, anonymous() - self._start)
            time.sleep(0.002)


def main(kind: str, path: str) -> None:
    torch.set_num_threads(1)
    large = HDF5(path, "x", "NCDHW") if kind == "hdf5" else Zarr(path, "NCDHW")
    small = Generated(lambda s, box: np.full([i.size for i in box], s, "f4"), 8, (5000, 1000), "HW", "float32")
    large.read_new(0, tuple(Interval(0, 1) for _ in large.shape))  # which imports what the format needs
    crop = [Crop(D=SIDE, H=SIDE, W=SIDE)]
    with (
        Peak() as peak,
        Loader({"x": large}, augment=crop, epochs=2, prefetch=1) as boxes,
        Loader({"y": small}, memory=BUDGET, epochs=2, prefetch=1) as kept,
    ):
        for loader in (boxes, kept, kept, boxes):
            for batch in loader:
                torch.sum(next(iter(batch.values())))
                del batch
        reports = boxes.report, kept.report
    buffers = sum(report.buffer_bytes for report in reports)
    found = {"peak": peak.bytes, "buffers": buffers, "held": reports[1].held_bytes, "budget": BUDGET}
    print(json.dumps({**found, "sample": large.sample_bytes}))


main(*sys.argv[1:])
