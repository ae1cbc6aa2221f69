"""ByzFL: robust aggregators on the same updates."""

import sys

import byzfl
import numpy as np
import torch
from inputs import EXPECTED, folder_of

given, out = folder_of(sys.argv)
updates = torch.from_numpy(given["updates"])
np.savez(
    out,
    **{
        "median": byzfl.Median()(updates),
        "trimmed mean": byzfl.TrMean(f=EXPECTED)(updates),
        "Krum": byzfl.Krum(f=EXPECTED)(updates),
        "multi-Krum": byzfl.MultiKrum(f=EXPECTED)(updates),
        "geometric median": byzfl.GeometricMedian(nu=1e-6, T=1000)(updates),
    },
)
