"""The rules themselves, one file for each family of torch functions.

Importing a file registers its rules. No file here imports anything that communicates; an import contract checks it.
"""

from . import (  # noqa: F401
    adaptive_pool,
    assign,
    attention,
    contract,
    factory,
    foreach,
    fourier,
    grid,
    index,
    join,
    loss,
    margin,
    matrix,
    norm,
    order,
    pad,
    patches,
    pointwise,
    pool,
    pool_indices,
    random,
    recurrent,
    reduce,
    resample,
    reshape,
    scan,
    scatter,
    softmax,
    stack,
    view,
    whole_axis,
    window,
)
