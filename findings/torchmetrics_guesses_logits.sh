#!/usr/bin/env bash
# torchmetrics 1.9.0 and torch-uncertainty 0.13.0, on torch 2.14.1 and lightning 2.6.6
#
# torchmetrics takes values for logits as soon as one value of an update lies outside [0, 1], and
# then squashes that whole update (softmax over classes, or sigmoid). Seen:
# 1. Ten members give the right class the probability 1. Their mean, summed as p / 10 in float32, is
#    1.0000001, so that the ensemble gets a second softmax: ECE 0.768 instead of 0.
# 2. torch-uncertainty hands entropies (0 to ln 10) to it, a batch at a time. Known images have
#    entropies below 1 and are kept; the others differ in one image of a hundred, which is above 1
#    and pulls its whole batch up to at least sigmoid(0) = 0.5. AUROC of the same images: 0.511 in
#    batches of one, 1.000 in batches of 100. FPR95 beside it, from the plain scores: 0.943.
# Why it matters: a calibration error depends on the last bit of a mean, and a detector that finds
# 1 % of the images looks perfect. Clamp probabilities to 1, and bring scores into [0, 1] by one
# increasing function before they are counted.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    torchmetrics==1.9.0 lightning==2.6.6 torch-uncertainty==0.13.0 timm==1.0.31 rich==15.0.0 \
    scikit-learn==1.9.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import logging
from importlib.metadata import version

logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine
from torchmetrics.functional.classification import multiclass_calibration_error

print(*[f"{name} {version(name)}" for name in ("torch", "torchmetrics", "torch-uncertainty")])

member = torch.eye(10)[torch.zeros(100, dtype=torch.long)]  # 100 images of class 0, all certain
labels = torch.zeros(100, dtype=torch.long)
ensemble = sum(member / 10 for _ in range(10))
ece = [multiclass_calibration_error(p, labels, num_classes=10).item() for p in (member, ensemble)]
print(f"largest probability 1 + {ensemble.max().item() - 1:.1e}; "
      f"ECE of a member {ece[0]:.3f}, of ten of them {ece[1]:.3f}")
assert 0 < ensemble.max() - 1 < 1e-6
assert ece[0] == 0 and abs(ece[1] - 0.768) < 0.001

torch.manual_seed(0)


def logits(n):
    """Of ten classes: the first is larger than the others by 5 to 9."""
    z = torch.zeros(n, 10)
    z[:, 0] = torch.empty(n).uniform_(5, 9)
    return z


known, other = logits(2000), logits(2000)
other[::100, 0] = 1  # the only images that differ


def detection(batch_size):
    routine = ClassificationRoutine(nn.Identity(), num_classes=10, loss=None, eval_ood=True,
                                    ood_criterion="entropy")
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False,
                      enable_model_summary=False, enable_checkpointing=False)
    sets = [TensorDataset(z, torch.zeros(len(z), dtype=torch.long)) for z in (known, other)]
    tables = trainer.test(routine, [DataLoader(s, batch_size) for s in sets], verbose=False)
    row = {name: value for table in tables for name, value in table.items()}
    return row["ood/AUROC"], row["ood/FPR95"]


seen = {batch_size: detection(batch_size) for batch_size in (1, 100)}
for batch_size, (auroc, fpr95) in seen.items():
    print(f"batches of {batch_size}: AUROC {auroc:.3f}, FPR95 {fpr95:.3f}")
assert abs(seen[1][0] - 0.51) < 0.02 and seen[100][0] > 0.999
assert seen[1][1] == seen[100][1] > 0.9
PY
