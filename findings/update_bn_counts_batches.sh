#!/usr/bin/env bash
# torch 2.14.1
#
# torch.optim.swa_utils.update_bn, meant for weight averages such as SWA and SWAG, averages the
# statistics of batches, each with the same weight, however small, and takes for the variance the
# mean of the variances within batches, without that between them.
# Seen, 130 values in batches of 128 and 2 (the last two are around 10, the others around 0):
#   running mean 5.04 (all values: 0.16), running variance 0.007 (1.56)
# and with 1,000 values in ascending order in batches of 10: running variance 1.1e-05 (0.086)
# Why it matters: the last batch is almost never full (80 of 128 for CIFAR-10, 96 for MNIST),
# and a loader for evaluation, in order of class, gives normalisation another scale than the
# training. Uncertainty of weight samples then contains an error of batch norm. Weigh by images.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

print("torch", torch.__version__)


def statistics(values, batch_size):
    net = nn.Sequential(nn.BatchNorm1d(1))
    update_bn(DataLoader(values, batch_size), net)
    return net[0].running_mean.item(), net[0].running_var.item()


torch.manual_seed(0)
values = torch.cat([torch.zeros(128, 1), torch.full((2, 1), 10.0)]) + 0.1 * torch.randn(130, 1)
mean, variance = statistics(values, 128)
print(f"128 + 2 values: running mean {mean:.3f} (all values {values.mean():.3f}), "
      f"variance {variance:.4f} ({values.var():.4f})")
batches = values.split(128)
assert abs(mean - sum(b.mean() for b in batches) / 2) < 1e-4 and mean > 4.9 > 0.2 > values.mean()
assert abs(variance - sum(b.var() for b in batches) / 2) < 1e-4

ordered = torch.rand(1000, 1).sort(0).values
mean, variance = statistics(ordered, 10)
print(f"1,000 values in ascending order: variance {variance:.2e} (all values {ordered.var():.4f})")
assert variance < 0.001 and ordered.var() > 0.08
PY
