#!/usr/bin/env bash
# torch 2.14.1
#
# torch.cdist differentiates the distance, not its square, and at distance 0 sets all derivatives to
# 0. For the smooth kernel k(x, y) = exp(-|x - y|^2 / 2) written with cdist(x, y)**2 the first
# derivative at x = y is right, and every second derivative is 0, without a warning.
# Seen, d^2 k / dx dx at x = y in two dimensions (exact: -1 on the diagonal):
#   cdist(x, y)**2            [[0, 0], [0, 0]]
#   ((x - y)**2).sum(-1)      [[-1, 0], [0, -1]]
# and the trace of d^2 k / dx dy over the 5 x 5 pairs of one set of points, of which the 5 on the
# diagonal are exactly 2: 0 there with cdist, agreement to 1e-12 everywhere else.
# Why it matters: kernels of repulsive ensembles, Stein discrepancies and Gaussian processes with
# gradients use just these derivatives, and compare each particle with itself. gradgradcheck on
# random points passes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import torch

print("torch", torch.__version__)


def by_cdist(x, y):
    return torch.exp(-torch.cdist(x, y).square() / 2)


def by_differences(x, y):
    return torch.exp(-(x[:, None] - y).square().sum(-1) / 2)


x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
hessians, traces = {}, {}
for kernel in (by_cdist, by_differences):
    point = x[:1]
    hessian = torch.autograd.functional.hessian(lambda a: kernel(a, point).sum(), point)
    hessians[kernel] = hessian.view(2, 2)

    def trace(i, j):
        a = x[i:i + 1].clone().requires_grad_()
        b = x[j:j + 1].clone().requires_grad_()
        gradient, = torch.autograd.grad(kernel(a, b).sum(), a, create_graph=True)
        return sum(torch.autograd.grad(g, b, retain_graph=True)[0][0, d]
                   for d, g in enumerate(gradient[0]))

    traces[kernel] = torch.stack([torch.stack([trace(i, j) for j in range(5)]) for i in range(5)])
    print(kernel.__name__, "Hessian", hessians[kernel].tolist(),
          "diagonal of traces", traces[kernel].diagonal().tolist())
assert (hessians[by_cdist] == 0).all()
assert torch.equal(hessians[by_differences], -torch.eye(2, dtype=torch.float64))
gap = (traces[by_cdist] - traces[by_differences]).abs()
print(f"difference of the traces: diagonal {gap.diagonal().max():.1f}, "
      f"elsewhere {(gap - gap.diag().diag()).max():.0e}")
assert (gap.diagonal() == 2).all() and (gap - gap.diag().diag()).max() < 1e-12
points = [x.clone().requires_grad_(), x.flip(1).clone().requires_grad_()]
assert torch.autograd.gradgradcheck(by_cdist, points)
PY
