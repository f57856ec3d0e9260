#!/usr/bin/env bash
# torch 2.14.1, bfloat16 on a CPU (seen on an x86-64 server with AVX-512 BF16)
#
# The weight gradient of nn.Conv2d(c, 2 c, 3, stride=2, padding=1) for feature maps of 1 x 1 pixel is
# wrong under torch.autocast("cpu", torch.bfloat16). Only the middle of such a kernel sees the pixel;
# the other eight positions see padding alone, and their gradient is exactly 0. In bfloat16 it is
# whatever the memory held before: it differs from call to call, and can be 1e30 or NaN. The
# gradient of the middle, and everything in float32, is right; so are stride 1 and maps of 2 x 2.
# Seen with 64 channels, 12 images, 40 equal calls: float32 one sum of absolute gradients, bfloat16
# three; largest gradient of the eight positions float32 0, bfloat16 not finite.
# Why it matters: ImageNet's ResNet-18 has such layers on images of 16 x 16 pixels. With mixed
# precision on a CPU, its training diverges at random, or, if the memory held small numbers, goes on
# with wrong steps, and no two runs are equal. Nothing is printed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import torch

print("torch", torch.__version__)


def weight_gradient(bfloat16, stride, side, channels=64):
    """The gradient of a convolution with equal weights and images in each call."""
    # Memory that is freed here has 1e30 in it.
    before = [torch.full((2 * channels, channels, 3, 3), 1e30) for _ in range(4)]
    del before
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(channels, 2 * channels, 3, stride, 1, bias=False)
    images = torch.randn(12, channels, side, side)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        y = conv(images)
    y.float().square().sum().backward()
    return conv.weight.grad


def padding_positions(gradient):
    """The gradients of the eight positions that only ever see padding."""
    return gradient.flatten(2)[..., [0, 1, 2, 3, 5, 6, 7, 8]]


different = {}
for name, bfloat16, stride, side in (("float32, stride 2, 1 x 1", False, 2, 1),
                                     ("bfloat16, stride 1, 1 x 1", True, 1, 1),
                                     ("bfloat16, stride 2, 2 x 2", True, 2, 2),
                                     ("bfloat16, stride 2, 1 x 1", True, 2, 1)):
    gradients = [weight_gradient(bfloat16, stride, side) for _ in range(40)]
    sums = {f"{gradient.double().abs().sum().item():.6g}" for gradient in gradients}
    different[name] = len(sums)
    line = f"{name}: {len(sums)} different sums of absolute gradients in 40 equal calls"
    if side == 1:
        largest = max(padding_positions(gradient).nan_to_num(torch.inf).abs().max().item()
                      for gradient in gradients)
        line += f"; largest gradient of a position that sees padding alone: {largest:.3g}"
        if name.startswith("float32"):
            assert largest == 0
    middle = torch.stack([gradient[..., 1, 1] for gradient in gradients])
    assert (middle == middle[0]).all()
    print(line)
assert different.pop("bfloat16, stride 2, 1 x 1") > 1
assert set(different.values()) == {1}
PY
