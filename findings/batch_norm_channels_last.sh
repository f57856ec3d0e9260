#!/usr/bin/env bash
# torch 2.14.1, on CPUs
#
# In training mode, batch norm adds up the pixels of a channels_last batch one after the other in
# float32, for the mean and for the variance. A contiguous batch with the same values is summed
# precisely. Rounding errors of millions of additions do not cancel: they all go one way.
# Seen with one thread (two threads have half the pixels each, and about a third of the error),
# images of 224 x 224:
#   running variance of normal values, relative error   contiguous   channels_last
#     32 images                                          below 1e-07  -0.1 %
#     256 images                                         below 1e-07  -2.3 %
#   output for 32 images that have -2.1 everywhere (exact: 0)   3e-06        1.00
# -2.1 is black after the usual normalisation of ImageNet: the mean comes out as -2.07, and the
# variance, which is 0, as 0.0007, so that the error of the mean is divided by almost nothing.
# torch.var of the same channels_last tensor is right to 1e-07.
# Why it matters: channels_last is recommended for speed. A density or a distance in feature space
# then depends on the memory format and on the number of threads, and a channel with little
# variance (a dead one, a black border) becomes a constant of order 1.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn

print("torch", torch.__version__)
formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

torch.manual_seed(0)
errors = {}
for images in (32, 256):
    x = torch.randn(images, 2, 224, 224)
    exact = x.double().var((0, 2, 3))
    for name, memory_format in formats.items():
        batch = x.contiguous(memory_format=memory_format)
        norm = nn.BatchNorm2d(2, momentum=1.0)
        norm(batch)
        error = norm.running_var.double() / exact - 1
        of_var = batch.var((0, 2, 3)).double() / exact - 1
        errors[images, name] = error
        print(f"{images} images, {name}: relative errors of the running variance "
              f"{error[0]:.1e}, {error[1]:.1e}; of torch.var {of_var.abs().max():.0e}")
        assert of_var.abs().max() < 1e-6
for images in (32, 256):
    assert errors[images, "contiguous"].abs().max() < 1e-6
assert (errors[32, "channels_last"] < -5e-4).all()
assert (errors[256, "channels_last"] < -0.01).all()

x = torch.full((32, 2, 224, 224), -2.1)
outputs = {}
for name, memory_format in formats.items():
    norm = nn.BatchNorm2d(2, momentum=1.0)
    outputs[name] = norm(x.contiguous(memory_format=memory_format)).abs().max().item()
    print(f"-2.1 everywhere, {name}: mean {norm.running_mean[0]:.4f}, "
          f"variance {norm.running_var[0]:.1e}, output {outputs[name]:.1e}")
assert outputs["contiguous"] < 1e-4 and outputs["channels_last"] > 0.5
PY
