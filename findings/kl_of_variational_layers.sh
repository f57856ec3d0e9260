#!/usr/bin/env bash
# bayesian-torch 0.5.0 and torch-uncertainty 0.13.0, on torch 2.14.1
#
# The loss of a variational network is -log likelihood + KL(q || prior) / N with the KL summed over
# all weights. bayesian-torch's get_kl_loss averages over the weights of a tensor and adds these
# means; its argument prior_variance is used as a standard deviation. torch-uncertainty's KLDiv
# (the KL of its ELBOLoss) divides by the number of Bayesian layers.
# Seen: bayesian-torch, 5,500 weights in two layers, prior_variance=0.25:
#   2.470; by torch.distributions 6,807 with standard deviation 0.25, 10,219 with variance 0.25
# torch-uncertainty, layers of 400 weights: 1668 for one, 1674, 1674, 1675 for two, four and eight,
#   whose KL is 3,348, 6,697 and 13,403.
# Why it matters: with the textbook weight 1 / N the prior is a thousand times too weak, or the
# weaker the deeper the network, and the posterior's widths, which are the uncertainty, follow.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    torchmetrics==1.9.0 lightning==2.6.6 torch-uncertainty==0.13.0 timm==1.0.31 rich==15.0.0
"$work/venv/bin/pip" install --quiet --no-deps bayesian-torch==0.5.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from bayesian_torch.layers import LinearReparameterization
from bayesian_torch.models.dnn_to_bnn import get_kl_loss
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch_uncertainty.layers.bayesian import BayesLinear
from torch_uncertainty.losses.bayesian import KLDiv

print(*[f"{name} {version(name)}" for name in ("torch", "bayesian-torch", "torch-uncertainty")])
torch.manual_seed(0)
net = nn.Sequential(LinearReparameterization(100, 50, prior_variance=0.25, bias=False),
                    LinearReparameterization(50, 10, prior_variance=0.25, bias=False))
posteriors = [Normal(m.mu_weight.detach(), nn.functional.softplus(m.rho_weight.detach()))
              for m in net]
reported = get_kl_loss(net).item()
kls = {std: [kl_divergence(q, Normal(0.0, std)) for q in posteriors] for std in (0.25, 0.5)}
sums = {std: sum(kl.sum().item() for kl in of_layers) for std, of_layers in kls.items()}
means = sum(kl.mean().item() for kl in kls[0.25])
print(f"bayesian-torch {reported:.3f}; sums for prior std 0.25: {sums[0.25]:.0f}, "
      f"std 0.5: {sums[0.5]:.0f}; means per tensor, added, for std 0.25: {means:.3f}")
assert abs(reported / means - 1) < 1e-4 and sums[0.25] > 2000 * reported

seen = {}
for depth in (1, 2, 4, 8):
    torch.manual_seed(0)
    net = nn.Sequential(*[BayesLinear(20, 20, bias=False) for _ in range(depth)])
    kl = KLDiv(net)
    reported, added = [], []
    for _ in range(50):
        net(torch.zeros(1, 20))
        reported.append(kl().item())
        added.append(sum(m.log_variational_posterior.item() - m.log_prior.item() for m in net))
    seen[depth] = sum(reported) / 50, sum(added) / 50
    print(f"torch-uncertainty, {depth} layers: {seen[depth][0]:.0f}, "
          f"the layers' KL added {seen[depth][1]:.0f}")
for depth, (reported, added) in seen.items():
    assert abs(reported * depth / added - 1) < 1e-3 and abs(reported / seen[1][0] - 1) < 0.02
PY
