#!/usr/bin/env bash
# torch 2.14.1
#
# KL, entropy and log density of torch.distributions.Dirichlet are differences of log-gamma values
# of about c ln c, for concentrations that sum to c. In float32 (the default) rounding outgrows them
# soon: from c = 10,000 on, the KL of two near distributions is noise of either sign.
# Seen, Dirichlet of c (0.2, 0.3, 0.5) and the same with concentrations 1 % larger:
#   c = 1e2  KL 5.46e-05 (float64: 5.04e-05), entropy -3.5420 (-3.5420)
#   c = 1e4  KL 5.65e-03 (4.97e-05),          entropy -8.125  (-8.126)
#   c = 1e6  KL 0.289    (4.97e-05),          entropy -14.0   (-12.73)
#   1,000 random pairs of c = 1e4 with KLs around 2.1e-03: median error 3.5e-03, negative for 24 %
# Why it matters: distilling an ensemble into a Dirichlet fits concentrations that are large exactly
# where members agree; in float32 the loss and the uncertainty of the most certain images are made
# of rounding errors. float64 is right to 1e-6 here.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.distributions import Dirichlet, kl_divergence

print("torch", torch.__version__)
seen = {}
for c in (1e2, 1e4, 1e6):
    for dtype in (torch.float32, torch.float64):
        a = c * torch.tensor([0.2, 0.3, 0.5], dtype=dtype)
        seen[c, dtype] = (kl_divergence(Dirichlet(a), Dirichlet(1.01 * a)).item(),
                          Dirichlet(a).entropy().item())
        print(f"c = {c:.0e}, {dtype}: KL %.3g, entropy %.5g" % seen[c, dtype])
assert abs(seen[1e2, torch.float32][0] / seen[1e2, torch.float64][0] - 1) < 0.5
assert seen[1e6, torch.float32][0] > 1000 * seen[1e6, torch.float64][0]
assert abs(seen[1e6, torch.float32][1] - seen[1e6, torch.float64][1]) > 0.5

torch.manual_seed(0)
a = 1e4 * torch.rand(1000, 3).softmax(1)
b = a * (1 + 0.001 * torch.randn(1000, 3))
low, high = [kl_divergence(Dirichlet(x), Dirichlet(y))
             for x, y in ((a, b), (a.double(), b.double()))]
negative = (low < 0).float().mean().item()
error = (low - high).abs().median().item()
print(f"1,000 pairs, c = 1e4: median KL {high.median().item():.1e}, median error of float32 "
      f"{error:.1e}, negative in float32 {negative:.0%}")
assert high.min() >= 0 and negative > 0.1 and error > high.median()
PY
