"""The images of DistFL's Table 2 alone: python benchmarks/full_scale/carried.py --seeds 0 --out build/data

The file of CIFAR-10 has the form of the whole one, with black images where no client of these seeds has any, and takes
8 MB in place of 93.  PIEBALD_DATA=build/data is enough for the rows `distfl vgg` and `distfl resnet` of these seeds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from piebald.data.sets.download import prepared

sys.path.insert(0, str(Path(__file__).parents[1] / "distfl"))


def training_images(seed: int) -> set[int]:
    """Positions of the training images that the federation of a seed has."""
    import federations

    with mock.patch.object(federations, "pooled", wraps=federations.pooled) as pooled:
        federations.planted([20] * 5, tests=2000, seed=seed)
    return {position for rows in pooled.call_args.args[0] for position in rows}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that PIEBALD_DATA is to name")
    options = parser.parse_args()
    target = options.out / "cifar10"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(prepared("cifar10", "cifar10_test1k.npz"), target / "cifar10_test1k.npz")
    kept = sorted(set().union(*map(training_images, options.seeds)))
    with np.load(prepared("cifar10", "cifar10_train.npz")) as whole:
        images = np.zeros_like(whole["r_train"])
        images[kept] = whole["r_train"][kept]
        others = {name: whole[name] for name in whole.files if name != "r_train"}
    np.savez_compressed(target / "cifar10_train.npz", r_train=images, **others)


if __name__ == "__main__":
    main()
