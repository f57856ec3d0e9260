#!/usr/bin/env bash
# laplace-torch 0.3 on torch 2.14.1 (scikit-learn 1.9.1 for its iris data)
#
# Adding one number to all logits changes no probability, and no data can say anything about it: the
# Hessian is 0 there and the posterior as wide as the prior. laplace-torch's default prediction
# (link_approx="probit") divides each logit by its own standard deviation and so counts this
# spread as uncertainty about the class. Seen, iris, last layer, full covariance, precision 0.1:
#   NLL of the network 0.047; "mc" 0.102; "probit" 0.295, its mean confidence 0.75 ("mc" 0.92)
#   the same formula on the same samples, each less its mean over classes: 0.088
# and with the prior's precision chosen by the library's marginal likelihood: probit 0.167, mc 0.077
# Why it matters: predictions of one posterior differ by a direction that has no effect; a
# comparison of Laplace with ensembles is one of link functions, and the weaker the prior, the more
# (precision 0.01: 0.700 and 0.251). Use "mc", or centre the logits' covariance first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    scikit-learn==1.9.1 torchmetrics==1.9.0 laplace-torch==0.3
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from laplace import Laplace
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

print(*[f"{name} {version(name)}" for name in ("torch", "laplace-torch", "scikit-learn")])
torch.manual_seed(0)
x, y = (torch.tensor(a) for a in load_iris(return_X_y=True))
x = (x - x.mean(0)) / x.std(0, correction=0)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


def nll(p):
    return nn.functional.nll_loss(p.log(), y).item()


def probit(samples):
    """The formula for logits [S, N, C], from the moments of samples."""
    return (samples.mean(0) / (1 + torch.pi / 8 * samples.var(0)).sqrt()).softmax(-1)


def compare(laplace):
    samples = laplace.functional_samples(x, n_samples=4000)
    default, mc = laplace(x), laplace(x, link_approx="mc", n_samples=4000)
    assert torch.equal(default, laplace(x, link_approx="probit"))
    centred = samples - samples.mean(-1, keepdim=True)
    assert torch.allclose(samples.softmax(-1), centred.softmax(-1))
    values = [nll(p) for p in (default, mc, probit(samples), probit(centred))]
    confidence = [p.max(1).values.mean().item() for p in (default, mc)]
    print("probit %.3f, mc %.3f, formula on samples %.3f, on centred samples %.3f; " % tuple(values)
          + "confidence %.2f, %.2f" % tuple(confidence))
    return values


print(f"network: {nll(net(x).softmax(-1)):.3f}")
for precision in (1.0, 0.1, 0.01):
    laplace = Laplace(net, "classification", subset_of_weights="last_layer",
                      hessian_structure="full", prior_precision=precision)
    laplace.fit(DataLoader(TensorDataset(x, y), 50))
    print(f"prior precision {precision}: ", end="")
    default, mc, by_samples, by_centred = compare(laplace)
    if precision == 0.1:
        assert abs(default - by_samples) < 0.01
        assert default > 2 * mc and abs(by_centred - mc) < 0.03
laplace.optimize_prior_precision()
print(f"by marginal likelihood, {laplace.prior_precision.item():.2f}: ", end="")
default, mc, by_samples, by_centred = compare(laplace)
assert default > 1.5 * mc
PY
