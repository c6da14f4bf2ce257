"""Samples too large to be read whole: every rank reads its own boxes, once."""

from .augment import Augmentation, Crop, Dice, Flip, Move, Rotate90, Shift
from .fields import Field
from .generated import Generated
from .hdf5 import HDF5
from .loader import Loader, Report
from .npy import Npy
from .order import Order
from .pipeline import Batch
from .store import Store
from .values import At, Noise, Normalize, Recode, Scale, Value
from .zarr import Zarr

__all__ = [
    "HDF5",
    "At",
    "Augmentation",
    "Batch",
    "Crop",
    "Dice",
    "Field",
    "Flip",
    "Generated",
    "Loader",
    "Move",
    "Noise",
    "Normalize",
    "Npy",
    "Order",
    "Recode",
    "Report",
    "Rotate90",
    "Scale",
    "Shift",
    "Store",
    "Value",
    "Zarr",
]
