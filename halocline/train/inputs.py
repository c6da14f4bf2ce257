"""A description of a network's input, kept with the run, so that `predict` does not need the training data.

It holds dims, channels, dtype and normalisation: whatever other samples must share for the network to make sense of
them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..data import Field, Normalize, Store
from ..data.stores.contents import contents
from ..data.stores.derived import OneChannel
from ..data.stores.open import files_of, open_store
from ..errors import ConfigError, DataError
from .log import write_whole

INPUT = "input.json"


@dataclass(frozen=True)
class Input:
    """The field x of the training, as much of it as other samples must share.

    Written by training, read by `predict`, which opens other samples by it and refuses those that do not fit.
    """

    dims: str  # of a sample as the network takes it, such as "CDHW"
    channels: int | None  # how many, if there is a C
    channel_added: bool  # the files have no C
    stored: str | None  # dims as the files store them, if the settings or a convention said so
    dataset: str | None
    dtype: str  # torch's name
    mean: tuple[float, ...]  # of the normalisation; empty: none
    std: tuple[float, ...]
    letters: str  # dims that are cut first where the mesh does not say

    @classmethod
    def of(
        cls, field: Field, letters: str, added: bool = False, stored: str | None = None, dataset: str | None = None
    ) -> Input:
        """Describe the network's input as training saw it."""
        store, normal = field.store, next((each for each in field.values if isinstance(each, Normalize)), None)
        return cls(
            dims=store.dims,
            channels=store.size("C") if "C" in store.dims else None,
            channel_added=added,
            stored=stored,
            dataset=dataset,
            dtype=str(field.tensor_dtype).removeprefix("torch."),
            mean=normal.mean if normal is not None else (),
            std=normal.std if normal is not None else (),
            letters=letters,
        )

    def write(self, folder: Path) -> None:
        """Save it in the run's folder. By rank 0."""
        write_whole(folder / INPUT, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Input:
        """The description that training saved. ConfigError if it cannot be read."""
        try:
            told: dict[str, Any] = json.loads((folder / INPUT).read_text())
            return cls(**{**told, "mean": tuple(told["mean"]), "std": tuple(told["std"])})
        except FileNotFoundError as error:
            raise ConfigError(f"{folder} was not trained: it has no {INPUT}; name the folder of another run") from error
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{folder / INPUT} cannot be read ({error}); `halocline train {folder}` writes it again"
            ) from error

    # -- samples for it

    def open(self, path: str, dims: str | None = None, dataset: str | None = None) -> Store:
        """Open the samples at ``path``. Dataset and dims are those of the training, unless given or in the file."""
        paths, _ = files_of(path)
        there = {each.name: each for each in contents(paths[0])}
        if dataset is None and len(there) > 1 and self.dataset in there:
            dataset = self.dataset
        content = there.get(dataset.strip("/") if dataset is not None else next(iter(there), ""))
        if dims is None and content is not None and content.dims is None:
            dims = self._dims_for(len(content.shape))
        return open_store(path, dims, dataset)

    def _dims_for(self, count: int) -> str | None:
        """Dims of an array of so many: those of the training's files, or of the network, with N or without."""
        usual = self.dims.removeprefix("C") if self.channel_added else self.dims
        for dims in (self.stored, (self.stored or "").replace("N", ""), f"N{usual}", usual, f"N{self.dims}", self.dims):
            if dims and len(dims) == count:
                return dims
        return None

    def field(self, store: Store) -> Field:
        """Samples of any size as the network was trained on them; refused if they have other dims or channels."""
        if "C" in self.dims and "C" not in store.dims and self.channels == 1:
            store = OneChannel(store)
        if store.dims != self.dims:
            raise DataError(
                f"{store.name} has dims {store.dims}, and the network was trained on {self.dims}; name the dims in "
                "the order in which the file stores them with --dims, or convert the file (halocline data convert)"
            )
        if self.channels is not None and store.size("C") != self.channels:
            raise DataError(
                f"{store.name} has {store.size('C')} channels, and the network was trained on {self.channels}; if its "
                f"dims are not {store.dims}, name them with --dims"
            )
        values = [Normalize(self.mean, self.std)] if self.std else []
        return Field(store, dtype=getattr(torch, self.dtype), values=values)
