"""Neural operators of neuraloperator 2.0.0 in two and three dims: Fourier, U-shaped, tensorised and spherical ones.

Each spectral layer transforms the whole field, keeps its lowest modes and multiplies them by complex weights, which
opt_einsum contracts. A field that is cut in space is therefore brought together one dim at a time.

Fields are longer along one dim than along the others, and not all sizes are powers of two: a mistake in the order of
dims or in the size of a tile shows.
"""

from __future__ import annotations

from . import Zoo, ZooEntry

PLANE, CUBE, SPHERE = (2, 3, 32, 24), (1, 2, 16, 12, 12), (2, 3, 16, 32)
# Few channels: what is checked is the spectral part.
NARROW = {"in_channels": 3, "out_channels": 2, "hidden_channels": 8, "n_layers": 2}
SOLID = {"in_channels": 2, "out_channels": 1, "hidden_channels": 6, "n_layers": 2}
# Weights stay factors of a tensor decomposition and are never multiplied out.
FACTORS = {"rank": 0.5, "implementation": "factorized"}
U_SHAPED = {
    "in_channels": 3,
    "out_channels": 2,
    "hidden_channels": 8,
    "lifting_channels": 16,
    "projection_channels": 16,
    "n_layers": 4,
    "channel_mlp_skip": "linear",
    "uno_out_channels": [8, 12, 12, 8],
}
# The field shrinks and grows again, by its modes.
SHRINKS = (1.0, 0.5, 1.0, 2.0)

ENTRIES = (
    ZooEntry("FNO-2D", lambda n: n.FNO(n_modes=(12, 10), **NARROW), (PLANE,)),
    ZooEntry("FNO-3D", lambda n: n.FNO(n_modes=(8, 6, 6), **SOLID), (CUBE,)),
    ZooEntry("FNO-2D(padded)", lambda n: n.FNO(n_modes=(12, 10), domain_padding=0.25, **NARROW), (PLANE,)),
    ZooEntry("FNO-2D(finer)", lambda n: n.FNO(n_modes=(12, 10), resolution_scaling_factor=[2, 1], **NARROW), (PLANE,)),
    ZooEntry("FNO-2D(group norm)", lambda n: n.FNO(n_modes=(12, 10), norm="group_norm", **NARROW), (PLANE,)),
    ZooEntry("FNO-2D(separable)", lambda n: n.FNO(n_modes=(12, 10), separable=True, **NARROW), (PLANE,)),
    ZooEntry(
        "UNO-2D",
        lambda n: n.UNO(uno_n_modes=[[8, 8]] * 4, uno_scalings=[[s, s] for s in SHRINKS], **U_SHAPED),
        (PLANE,),
    ),
    ZooEntry(
        "UNO-3D",
        lambda n: n.UNO(
            uno_n_modes=[[6, 4, 4]] * 4, uno_scalings=[[s] * 3 for s in SHRINKS], **{**U_SHAPED, "in_channels": 2}
        ),
        ((1, 2, 32, 24, 24),),
    ),
    ZooEntry(
        "TFNO-2D(Tucker)", lambda n: n.TFNO(n_modes=(12, 10), factorization="tucker", **FACTORS, **NARROW), (PLANE,)
    ),
    ZooEntry("TFNO-2D(CP)", lambda n: n.TFNO(n_modes=(12, 10), factorization="cp", **FACTORS, **NARROW), (PLANE,)),
    ZooEntry("TFNO-2D(TT)", lambda n: n.TFNO(n_modes=(12, 10), factorization="tt", **FACTORS, **NARROW), (PLANE,)),
    ZooEntry("TFNO-3D", lambda n: n.TFNO(n_modes=(8, 6, 6), factorization="tucker", **FACTORS, **SOLID), (CUBE,)),
    ZooEntry("SFNO", lambda n: n.SFNO(n_modes=(8, 16), **NARROW), (SPHERE,)),
)
ZOO = Zoo("neuralop", "neuralop.models", ENTRIES, extra="zoo-neuralop", alone=("neuraloperator", "torch-harmonics"))
