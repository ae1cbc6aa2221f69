"""SciPy, scikit-learn, statsmodels, POT and torchmetrics: lines, optima, distances and intervals."""

import sys

import numpy as np
import ot
import torch
from inputs import DECAY, KERNEL_SIGMA, folder_of, glm_targets
from scipy.stats import siegelslopes
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel
from statsmodels.genmod.families import Binomial, Gaussian, Poisson
from statsmodels.genmod.generalized_linear_model import GLM
from statsmodels.stats.weightstats import DescrStatsW
from torchmetrics.image.fid import FrechetInceptionDistance

given, out = folder_of(sys.argv)
one, other = (given[name].astype(np.float64) for name in ("one", "other"))
found = {}

lines: dict[str, list] = {"medians": [], "residuals": []}
for values in given["cloud"].astype(np.float64):
    ranks = values.argsort(kind="stable").argsort(kind="stable")
    slope, intercept = siegelslopes(values, ranks)
    lines["residuals"].append(intercept + slope * ranks)
    lines["medians"].append(np.median(values) + slope * (ranks - np.median(ranks)))
found |= {f"IRLS line, {intercept}": np.array(made) for intercept, made in lines.items()}

x, y = given["x"].reshape(-1, given["x"].shape[2]).astype(np.float64), given["y"].ravel()
fitted = LogisticRegression(C=1 / (len(y) * DECAY), fit_intercept=False, tol=1e-10, max_iter=10_000).fit(x, y)
found["logistic regression"] = fitted.coef_.ravel()

found["Fréchet distance by POT"] = (
    ot.gaussian.bures_wasserstein_distance(one.mean(0), other.mean(0), np.cov(one.T), np.cov(other.T)) ** 2
)


class Rows(torch.nn.Module):
    """An extractor that hands rows on."""

    num_features = one.shape[1]

    def forward(self, rows):
        """The same rows."""
        return rows


fid = FrechetInceptionDistance(feature=Rows(), normalize=True, input_img_size=(one.shape[1],)).set_dtype(torch.float64)
fid.update(torch.from_numpy(one), real=True)
fid.update(torch.from_numpy(other), real=False)
found["Fréchet distance by torchmetrics"] = fid.compute().numpy()

for name, kernel in {
    "linear": linear_kernel,
    "polynomial": lambda a, b: polynomial_kernel(a, b, degree=3, gamma=1.0, coef0=1.0),
    "Gaussian": lambda a, b: rbf_kernel(a, b, gamma=1 / (2 * KERNEL_SIGMA**2)),
}.items():
    found[f"MMD, {name}"] = kernel(one, one).mean() + kernel(other, other).mean() - 2 * kernel(one, other).mean()

samples = DescrStatsW(given["samples"].astype(np.float64))
low, high = samples.tconfint_mean(0.05)
found["interval"] = np.array([samples.mean, (high - low) / 2])

for name, target in glm_targets(given).items():
    family = {"gaussian": Gaussian, "binomial": Binomial, "poisson": Poisson}[name]()
    model = GLM(target.ravel(), np.column_stack([np.ones(len(x)), x]), family=family).fit(tol=1e-14, maxiter=200)
    found[f"GLM, {name}"] = np.concatenate([model.params, model.bse])
    found[f"GLM, {name}, deviance"] = np.array([model.deviance, model.null_deviance])
np.savez(out, **found)
