#!/usr/bin/env bash
# torchvision 0.29.1 on torch 2.14.1
#
# Two layers of well-known classifiers have a first derivative only. The gradient with
# create_graph=True succeeds; the backward pass after it fails and names neither layer nor cure:
#   vit_b_32            "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward
#                       is not implemented" - the fused attention, the CPU's default
#   mobilenet_v3_small  "derivative for aten::hardsigmoid_backward is not implemented"
# Seen: under sdpa_kernel(SDPBackend.MATH) ViT is differentiated twice; MobileNetV3 is not until its
# Hardsigmoid is replaced by relu6(x + 3) / 6, the same function (Hardswish, beside it, has both
# derivatives). resnet18, convnext_tiny and swin_t need nothing: swin_t writes its attention out.
# Why it matters: losses on input gradients (repulsion in FoRDE, gradient penalties, double
# backpropagation) fail for some architectures, and the first forward passes look fine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import contextlib

import torch
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

print("torch", torch.__version__, "torchvision", torchvision.__version__)


def twice(net):
    """The error of a loss on the input gradient, or None."""
    x = torch.rand(1, 3, 224, 224, requires_grad=True)
    gradient, = torch.autograd.grad(net(x).logsumexp(1).sum(), x, create_graph=True)
    try:
        gradient.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


def replace_hardsigmoids(net):
    for module in net.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Hardsigmoid):
                setattr(module, name, ShiftedReLU6())


class ShiftedReLU6(nn.Module):
    def forward(self, x):
        return nn.functional.relu6(x + 3) / 6


seen = {}
for name in ("resnet18", "convnext_tiny", "swin_t", "vit_b_32", "mobilenet_v3_small"):
    for how in ("default", "MATH", "MATH, without Hardsigmoid"):
        torch.manual_seed(0)
        net = torchvision.models.get_model(name).eval()
        if "without" in how:
            replace_hardsigmoids(net)
        with contextlib.nullcontext() if how == "default" else sdpa_kernel(SDPBackend.MATH):
            seen[name, how] = twice(net)
        print(f"{name}, {how}: {seen[name, how] or 'differentiated twice'}")
        if seen[name, how] is None:
            break
flash = "_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
assert all(seen[name, "default"] is None for name in ("resnet18", "convnext_tiny", "swin_t"))
assert flash in seen["vit_b_32", "default"] and seen["vit_b_32", "MATH"] is None
for how in ("default", "MATH"):
    assert "hardsigmoid_backward is not implemented" in seen["mobilenet_v3_small", how]
assert seen["mobilenet_v3_small", "MATH, without Hardsigmoid"] is None
x = torch.linspace(-5, 5, 21, dtype=torch.float64) + 0.01
assert torch.autograd.gradgradcheck(nn.functional.hardswish, x.requires_grad_())
assert torch.allclose(ShiftedReLU6()(x), nn.functional.hardsigmoid(x))
PY
