#!/usr/bin/env bash
# blitz-bayesian-pytorch 0.2.8 on torch 2.14.1
#
# A Bayesian layer of blitz registers its mean twice: weight_mu, and weight_sampler.mu, another
# parameter on the same memory. Training moves the second; prediction with the mean weights, after
# freeze_(), reads the first. Any .to(), .double() or .cuda() copies the two apart, so that from
# then on freeze_() predicts with the initial means, without a word.
# Seen, for y = 3 x + 2 learned with 500 steps (mean squared error of sampled / of frozen weights):
#   as built (float32): 4e-07 / 7e-08
#   after .double():    4e-07 / 7.7; weight_mu 0.15, weight_sampler.mu 3.00
# The number of parameters is also twice that of the layer (8 tensors for weight and bias).
# Why it matters: on a GPU "the network at its posterior mean" is an untrained network, and the
# gain of averaging samples over it looks enormous.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6
"$work/venv/bin/pip" install --quiet --no-deps blitz-bayesian-pytorch==0.2.8
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from blitz.modules import BayesianLinear
from blitz.utils import variational_estimator
from torch import nn

print(*[f"{name} {version(name)}" for name in ("torch", "blitz-bayesian-pytorch")])


@variational_estimator
class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = BayesianLinear(1, 1)

    def forward(self, x):
        return self.layer(x)


errors = {}
for dtype in (torch.float32, torch.float64):
    torch.manual_seed(0)
    net = Line().to(dtype)
    x = torch.linspace(-1, 1, 64, dtype=dtype)[:, None]
    y = 3 * x + 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    sampled = (net(x) - y).square().mean().item()
    net.freeze_()
    frozen = (net(x) - y).square().mean().item()
    errors[dtype] = sampled, frozen
    print(f"{dtype}: error of sampled weights {sampled:.1e}, of frozen weights {frozen:.1e}; "
          f"weight_mu {net.layer.weight_mu.item():.2f}, "
          f"weight_sampler.mu {net.layer.weight_sampler.mu.item():.2f}, "
          f"{len(list(net.parameters()))} parameters")
assert max(errors[torch.float32]) < 1e-4
assert errors[torch.float64][0] < 1e-4 and errors[torch.float64][1] > 1
assert len(list(net.parameters())) == 8
PY
