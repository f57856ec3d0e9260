#!/usr/bin/env bash
# pytorch-ood 0.4.0 beside scikit-learn 1.9.1, on torch 2.14.1
#
# pytorch-ood measures AUPR by trapezoids down to the point (recall 0, precision 1); scikit-learn's
# average precision takes steps. Where scores tie, the trapezoid is a line that no threshold can
# reach: a detector that gives every image the same score gets (1 + share of positives) / 2.
# Seen, constant score, 9,000 known and 1,000 other images: AUPR of the other ones 0.55 (average
#   precision 0.10), of the known ones 0.95 (0.90); half and half 0.75 (0.50); AUROC 0.5 throughout
# Seen, confidence of a certain network (float32 softmax, 57 % of the known and 22 % of the others
#   exactly 1): AUPR of the known images 0.751, average precision 0.672; AUROC 0.703
# Why it matters: float32 confidences pile up at exactly 1, so that a sharper network can get a
# better AUPR for telling less, and values are not comparable with papers that used the average
# precision of scikit-learn or torchmetrics.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    scikit-learn==1.9.1 pytorch-ood==0.4.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from pytorch_ood.metrics.functional import aupr, auroc
from sklearn.metrics import average_precision_score

print(*[f"{name} {version(name)}" for name in ("torch", "pytorch-ood", "scikit-learn")])


def compare(scores, num_known, positive):
    """AUPR, average precision and AUROC of scores that are larger for the other, last images."""
    labels = (torch.arange(len(scores)) >= num_known).long().neg()  # -1: out of distribution
    is_positive, sign = (labels < 0, 1) if positive == "ood" else (labels == 0, -1)
    return (aupr(scores, labels, positive).item(),
            average_precision_score(is_positive, sign * scores), auroc(scores, labels).item())


for known, other, positive in ((9000, 1000, "ood"), (9000, 1000, "id"), (1000, 1000, "ood")):
    area, steps, roc = compare(torch.zeros(known + other), known, positive)
    share = (other if positive == "ood" else known) / (known + other)
    print(f"constant score, positive {positive}, {share:.0%}: "
          f"AUPR {area:.3f}, average precision {steps:.3f}, AUROC {roc:.3f}")
    assert abs(area - (1 + share) / 2) < 1e-9 and abs(steps - share) < 1e-9 and roc == 0.5

torch.manual_seed(0)
margins = torch.cat([18 + 8 * torch.randn(5000), 12 + 6 * torch.randn(5000)])
confidence = torch.stack([margins, torch.zeros(10000)], 1).softmax(1).max(1).values
ones = (confidence == 1).view(2, -1).float().mean(1).tolist()
area, steps, roc = compare(-confidence, 5000, "id")
print(f"confidence exactly 1: {ones[0]:.0%} of known, {ones[1]:.0%} of other images; "
      f"positive id: AUPR {area:.3f}, average precision {steps:.3f}, AUROC {roc:.3f}")
assert area - steps > 0.05
PY
