"""Breast cancer (Wisconsin, 1995), from scikit-learn: a small real table with two classes, always available."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.sets.dataset import DataSet


def breast_cancer() -> DataSet:
    """569 tumours: x [569, 30] float32, standard scores of all rows; 2 classes; no published test part.

    Ten measures of cell nuclei, each as mean, standard error and mean of the three largest values.
    """
    from sklearn.datasets import load_breast_cancer

    stored = load_breast_cancer()
    x = (stored.data - stored.data.mean(0)) / stored.data.std(0)
    return DataSet(
        name="breast_cancer",
        x=torch.from_numpy(x.astype(np.float32)),
        y=torch.from_numpy(1 - stored.target.astype(np.int64)),  # the positive class comes second
        classes=["benign", "malignant"],
        features=[str(name) for name in stored.feature_names],
        source="scikit-learn's load_breast_cancer, UCI Breast Cancer Wisconsin (Diagnostic)",
        licence="CC BY 4.0",
        citation="W. Wolberg, O. Mangasarian, N. Street, W. Street, Breast Cancer Wisconsin (Diagnostic), UCI, 1995, "
        "https://doi.org/10.24432/C5DW2B",
    )
