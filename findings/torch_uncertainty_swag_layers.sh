#!/usr/bin/env bash
# torch-uncertainty 0.13.0 on torch 2.14.1
#
# SWAG's low-rank part is one combination of the deviations of all weights: one vector of noise for
# the whole network. torch-uncertainty's SWAG draws that noise anew for every parameter tensor, so
# weights of different layers (even weight and bias of one layer) are sampled independently,
# whatever the iterates did. Its default scale of 1 also adds the diagonal and the low-rank part
# without the halves of the paper, so that samples vary twice as much as the iterates.
# Seen, for two layers of one weight each, both +1 and -1 in turn in 100 iterates (variance 1):
#   correlation of the two weights in 4,000 samples: 0.011 (by the paper's formula: 0.5)
#   variances of the samples: 1.95 and 1.98 (by the paper's formula: 1)
# Why it matters: what is called SWAG there is block-diagonal, without an option for the full one,
# and its spread, which sets how uncertain the predictions are, needs scale=0.5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    torchmetrics==1.9.0 lightning==2.6.6 torch-uncertainty==0.13.0 timm==1.0.31 rich==15.0.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from torch import nn
from torch_uncertainty.methods import SWAG

print(*[f"{name} {version(name)}" for name in ("torch", "torch-uncertainty")])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
swag = SWAG(net, cycle_start=0, cycle_length=1, max_num_models=100, num_estimators=1)
for epoch in range(1, 101):
    for p in net.parameters():
        p.data.fill_((-1) ** epoch)  # both layers alike
    swag.update_wrapper(epoch)


def sample(scale):
    nets = [swag.sample(scale) for _ in range(4000)]
    weights = torch.tensor([[p.item() for p in n.parameters()] for n in nets])  # [4000, 2]
    return weights.T.corrcoef()[0, 1].item(), weights.var(0)


correlation, variance = sample(swag.scale)
print(f"default scale {swag.scale}: correlation {correlation:.3f}, variances {variance.tolist()}")
assert swag.scale == 1.0 and abs(correlation) < 0.06
assert (variance - 2).abs().max() < 0.2

correlation, variance = sample(0.5)
print(f"scale 0.5: correlation {correlation:.3f}, variances {variance.tolist()}")
assert abs(correlation) < 0.06 and (variance - 1).abs().max() < 0.1
PY
