"""Data for cut samples: stores, loading, staging, and tools that convert and describe files.

A :class:`Store` reads any box of a sample. A :class:`Loader` gives each rank of a mesh its own boxes of a batch, read
ahead of the step. :func:`stage` copies files to the storage of each node. ``docs/data.md`` has examples.
"""

from .._deprecated import renamed
from .loading.augment import Augmentation, AugmentationDraws, Crop, Flip, Rotate90, Shift, ViewChange
from .loading.fields import Field
from .loading.loader import Loader, LoaderReport
from .loading.order import Order
from .loading.pipeline import Batch
from .loading.values import At, Noise, Normalize, Recode, Scale, Value
from .staging import StageError, StageReport, stage
from .stores.derived import Labels, OneChannel
from .stores.generated import Generated
from .stores.hdf5 import HDF5
from .stores.nifti import Nifti
from .stores.npy import Npy
from .stores.open import open_store
from .stores.store import Store
from .stores.zarr import Zarr
from .tools.advise import advised_chunks
from .tools.convert import Wish, convert
from .tools.statistics import Statistics

__all__ = [
    "HDF5",
    "At",
    "Augmentation",
    "AugmentationDraws",
    "Batch",
    "Crop",
    "Field",
    "Flip",
    "Generated",
    "Labels",
    "Loader",
    "LoaderReport",
    "Nifti",
    "Noise",
    "Normalize",
    "Npy",
    "OneChannel",
    "Order",
    "Recode",
    "Rotate90",
    "Scale",
    "Shift",
    "StageError",
    "StageReport",
    "Statistics",
    "Store",
    "Value",
    "ViewChange",
    "Wish",
    "Zarr",
    "advised_chunks",
    "convert",
    "open_store",
    "stage",
]

__getattr__ = renamed(__name__, {"Dice": AugmentationDraws, "Move": ViewChange, "Report": LoaderReport})
