"""The ranges of the random sweep, in one place: what is drawn, and for how many set-ups."""

import os

KERNEL = (1, 7)
STRIDE = (1, 4)
DILATION = (1, 3)
PADDING = (0, 7)
SIZE = (1, 40)
SECOND_SIZE = (1, 9)  # further spatial dims are short: they only have to be there, and may be cut as well
RANKS = (1, 5)
CHANNELS = (1, 4)
BATCH = (1, 3)
PAD = (-3, 9)
RESIZED = (1, 90)
FACTORS = (0.3, 0.5, 1 / 3, 1, 1.1, 1.5, 2, 2.1, 2.5, 3)

#: Which share of the random set-ups is drawn: `make long` draws 0.8, and 2 is for a thorough run.
OFTEN = float(os.environ.get("HALOCLINE_SWEEP", "0.4"))


def often(count: int) -> int:
    """Of ``count`` random set-ups, those that this run draws."""
    return max(1, round(count * OFTEN))


#: Set-ups of each family; half in float64, half in float32.
EXAMPLES = {
    family: often(count)
    for family, count in {
        "convolution": 350,
        "transposed": 300,
        "pool": 300,
        "adaptive pool": 125,
        "pad": 250,
        "norm": 200,
        "interpolation": 150,
        "pool indices": 100,
        "grid_sample": 50,
        "dropout": 50,
    }.items()
}

#: float32 results are compared with float32 on one rank: sums in another order differ by rounding.
TOLERANCE = {"float64": 1e-8, "float32": 2e-4}

#: At least this share of the set-ups torch itself accepts must be exact, the rest refused; never wrong.
EXACT_SHARE = {
    "convolution": 0.99,
    "transposed": 0.99,
    "pool": 0.99,
    "adaptive pool": 0.99,
    "pad": 0.95,
    "norm": 0.95,
    "interpolation": 0.95,
    "pool indices": 0.99,
    "grid_sample": 0.99,
    "dropout": 0.99,
}
