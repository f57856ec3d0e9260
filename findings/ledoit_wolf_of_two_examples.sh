#!/usr/bin/env bash
# scikit-learn 1.9.1
#
# Ledoit-Wolf shrinkage is meant for covariances of few examples. The fewer there are, the more it
# should shrink, but for very few it shrinks less and less, and for two not at all: both are equally
# far from their mean, so that their outer products are equal, and the estimate of how noisy the
# covariance is, which is the spread of these products, is exactly 0.
# Seen, mean coefficient (1: all of the target) in 64 dimensions, all with the same variance:
#   examples               2      3      5      10     50
#   Ledoit-Wolf            0.00   0.34   0.60   0.80   0.96
#   OAS                    0.68   0.76   0.84   0.92   0.98
# and for two images of a digit, of 64 pixels: coefficient 0, rank 1 of 64, without a warning.
# With assume_centered=True the same happens to one example.
# Why it matters: Gaussians per class on features are fitted just like this in few-shot tasks and in
# the first rounds of active learning. With two images a class, the singular covariance that
# shrinkage is to prevent comes back: every other image is infinitely far away. OAS has no such gap.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import warnings
from importlib.metadata import version

import numpy as np
from sklearn.covariance import OAS, LedoitWolf
from sklearn.datasets import load_digits

print(*[f"{name} {version(name)}" for name in ("scikit-learn", "numpy", "scipy")])
rng = np.random.default_rng(0)
seen = {}
for examples in (2, 3, 5, 10, 50):
    sets = rng.normal(size=(100, examples, 64))
    for estimator in (LedoitWolf, OAS):
        values = [estimator().fit(x).shrinkage_ for x in sets]
        seen[estimator, examples] = np.mean(values)
    print(f"{examples} examples: Ledoit-Wolf {abs(seen[LedoitWolf, examples]):.2f}, "
          f"OAS {seen[OAS, examples]:.2f}")
assert abs(seen[LedoitWolf, 2]) < 1e-9 and 0.25 < seen[LedoitWolf, 3] < 0.4
assert seen[LedoitWolf, 3] < seen[LedoitWolf, 5] < seen[LedoitWolf, 10] < seen[LedoitWolf, 50]
assert min(seen[OAS, examples] for examples in (2, 3, 5, 10, 50)) > 0.6

x, y = load_digits(return_X_y=True)
for digit in range(10):
    pair = x[y == digit][:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = LedoitWolf().fit(pair)
    sign, log_determinant = np.linalg.slogdet(OAS().fit(pair).covariance_)
    rank = np.linalg.matrix_rank(fitted.covariance_)
    print(f"two images of {digit}: coefficient {abs(fitted.shrinkage_):.0e}, rank {rank}; "
          f"with OAS {np.linalg.matrix_rank(OAS().fit(pair).covariance_)}; "
          f"{len(caught)} warnings")
    assert abs(fitted.shrinkage_) < 1e-9 and rank == 1 and not caught
    assert sign == 1 and np.isfinite(log_determinant)
one = LedoitWolf(assume_centered=True).fit(x[:1])
print(f"one example, assume_centered: coefficient {abs(one.shrinkage_):.0e}")
assert abs(one.shrinkage_) < 1e-9
PY
