"""Wrong labels on some clients: one file for each kind of noise, one line for each in `NOISES`."""

from __future__ import annotations

from fednoro.data.noise.flips import (
    HIDN,
    Flips,
    PairFlip,
    Symmetric,
    Transition,
    flip_labels,
    pair_flip,
    read_matrix,
    symmetric,
    transition,
)
from fednoro.data.noise.from_file import FromFile, observed_from_file
from fednoro.data.noise.noise_model import Context, Noise, NoiseModel, NoNoise

NOISES: dict[str, type[NoiseModel]] = {
    "none": NoNoise,
    "h_idn": HIDN,
    "symmetric": Symmetric,
    "pair_flip": PairFlip,
    "transition": Transition,
    "from_file": FromFile,
}

__all__ = [
    "HIDN",
    "NOISES",
    "Context",
    "Flips",
    "FromFile",
    "NoNoise",
    "Noise",
    "NoiseModel",
    "PairFlip",
    "Symmetric",
    "Transition",
    "flip_labels",
    "observed_from_file",
    "pair_flip",
    "read_matrix",
    "symmetric",
    "transition",
]
