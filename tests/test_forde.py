"""forde.py against independent oracles: the repulsion as plain loops over (i, j, b) in float64, the
networks written out a second time, every known mistake as a wrong oracle that must differ; then the
script end to end."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import common
import data
import forde
from common import UserError

CLASSES, BATCH, SIDE = 5, 8, 8
DIM = 3 * SIDE * SIDE


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def options(**changes):
    """The options of a miniature network, as parse_args and with_method would resolve them."""
    return SimpleNamespace(**{**dict(
        model="resnet9", width=0.05, hidden=[6, 7], norm=True, members=4, chunk=0, amp="off",
        device=torch.device("cpu"), repulsion="input_gradient", kernel="pca", alpha=0.4, cauchy=0.0,
        grad_of="logit", eps=1e-24, repulsion_coef=1.0, label_smoothing=0.0, lr=0.1, lr_ratio=0.01,
        momentum=0.9, weight_decay=5e-4, prior="isotropic", schedule="published", epochs=300),
        **changes})


def ensemble(args, seed=0):
    """M members whose heads, scales and offsets are not those of the published initialisation."""
    torch.manual_seed(seed)
    nets = nn.ModuleList(forde.make_network(args, CLASSES, (3, SIDE, SIDE))
                         for _ in range(args.members))
    with torch.no_grad():
        for name, p in nets.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
            elif "head" in name:
                p.normal_(0, 0.5)
    return nets.double()


def make_batch(seed=1, size=BATCH):
    torch.manual_seed(seed)
    y = torch.arange(size) % CLASSES
    return data.Batch(torch.randn(size, 3, SIDE, SIDE).double(), y, torch.arange(size), size)


def random_basis(dim=DIM, seed=2):
    """Eigenvectors (the columns of a random orthogonal matrix) and eigenvalues, largest first."""
    torch.manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))[0]
    values = (0.5 + torch.rand(dim, dtype=torch.float64)) / torch.arange(1, dim + 1) * 100
    return vectors, values.sort(descending=True).values


def relative(a, b):
    """|a - b| / |b| of two lists of tensors (None: zero), or of two tensors."""
    if isinstance(b, torch.Tensor):
        a, b = [a], [b]
    zero = lambda t, like: torch.zeros_like(like) if t is None else t
    error = sum((zero(s, t) - t).square().sum() for s, t in zip(a, b, strict=True))
    return (error / sum(t.square().sum() for t in b)).sqrt().item()


# ---- Oracle -------------------------------------------------------------------------------------


def plain_conv(x, weight, stride=1):
    """Padded by hand as XLA pads: ceil(n / stride) outputs, the odd zero at the end."""
    kernel = weight.shape[-1]
    if kernel == 1:
        return torch.einsum("bchw,oc->bohw", x[:, :, ::stride, ::stride], weight[:, :, 0, 0])
    pads = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
    out = x.new_zeros(*x.shape[:2], x.shape[2] + pads[0], x.shape[3] + pads[1])
    out[:, :, pads[0] // 2:pads[0] // 2 + x.shape[2], pads[1] // 2:pads[1] // 2 + x.shape[3]] = x
    return F.conv2d(out, weight, None, stride)


def plain_norm(x, weight, bias, constant=False):
    mean, square = x.mean((0, 2, 3)), x.square().mean((0, 2, 3))
    var = square - mean.square()
    if constant:  # no terms across the examples
        mean, var = mean.detach(), var.detach()
    c = lambda t: t[:, None, None]
    return c(weight) * (x - c(mean)) / c(var + 1e-5).sqrt() + c(bias)


def plain_network(p, x, constant=False):
    """The logits and features of resnet9, from its parameters by name."""
    e = "extractor."
    norm = lambda h, at: plain_norm(h, p[f"{e}{at}.weight"], p[f"{e}{at}.bias"], constant)
    h = F.relu(norm(plain_conv(x, p[e + "0.weight"]), "1"))
    for k in range(3, 7):
        stride = 2 if k > 3 else 1
        z = F.relu(norm(plain_conv(h, p[f"{e}{k}.body.0.weight"], stride), f"{k}.body.1"))
        z = norm(plain_conv(z, p[f"{e}{k}.body.3.weight"]), f"{k}.body.4")
        if f"{e}{k}.shortcut.0.weight" in p:
            h = norm(plain_conv(h, p[f"{e}{k}.shortcut.0.weight"], stride), f"{k}.shortcut.1")
        h = F.relu(z + h)
    features = h.mean((2, 3))
    return features @ p["head.weight"].T + p["head.bias"], features


def plain_gradients(members, x, y, mistake=""):
    """Logits, and input gradients g [M, B, D] with their graph, one member after the other."""
    all_logits, all_g = [], []
    for p in members:
        z = x.clone().requires_grad_()
        logits = plain_network(p, z, mistake == "no cross terms")[0]
        score = {"log-probability": logits.log_softmax(1)}.get(mistake, logits)[range(len(y)), y]
        if mistake == "predicted class":
            score = logits.max(1).values
        elif mistake == "sum of logits":
            score = logits.sum(1)
        g = torch.autograd.grad(score.sum(), z, create_graph=True)[0]
        g = g.permute(0, 2, 3, 1) if mistake == "height, width, channels" else g
        all_logits.append(logits)
        all_g.append(g.reshape(len(y), -1))
    return torch.stack(all_logits), torch.stack(all_g)


def plain_repulsion(g, vectors=None, roots=None, eps=1e-24, mistake=""):
    """R by its equations, in loops; `roots`: of the eigenvalues, 0 where one is dropped."""
    m, b_total = g.shape[:2]
    s = {}
    for i in range(m):
        for b in range(b_total):
            r = g[i, b]
            if vectors is not None and mistake != "no rotation":
                r = (vectors if mistake == "U transposed" else vectors.T) @ r
            if roots is not None and mistake == "scale first":
                r = r * roots
            if mistake != "no unit length":
                r = r / (r @ r + eps).sqrt()
            if roots is not None and mistake != "scale first":
                r = r * (roots.square() if mistake == "eigenvalues, not roots" else roots)
            s[i, b] = r
    keep = (lambda t: t) if mistake == "second argument not constant" else torch.Tensor.detach
    d = {(i, j, b): (s[i, b] - keep(s[j, b])).square().sum()
         for i in range(m) for j in range(m) for b in range(b_total)}

    def median(values):
        values = sorted(values, key=lambda v: v.item())
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        value = low if mistake == "lower median" else (low + high) / 2
        return value if mistake == "bandwidth not constant" else value.detach()

    log_m = math.log(m + 1) if mistake == "ln(M+1)" else math.log(m)
    h = {}
    for j in range(m):
        for b in range(b_total):
            pairs = [(i, j) for i in range(m)]
            if mistake == "median over all pairs":
                pairs = [(i, k) for i in range(m) for k in range(m)]
            elif mistake == "median off the diagonal":
                pairs = [(i, j) for i in range(m) if i != j]
            factor = 0.5 if mistake == "factor 2 in the bandwidth" else 1.0
            h[j, b] = factor * median([d[i, k, b] for i, k in pairs]) / log_m + 1e-12
    total = 0.0
    for i in range(m):
        others = [j for j in range(m) if mistake != "no self-pair" or j != i]
        k = [sum(torch.exp(-d[i, j, b] / h[j, b]) for j in others) for b in range(b_total)]
        if mistake == "log of every example":
            total = total + sum(torch.log(v) for v in k) / b_total
        else:
            total = total + torch.log(sum(k) / b_total)
    total = total / (m if mistake == "mean over members" else 1)
    return total / (1 if mistake == "no 1/B" else b_total)


class Case:
    """A miniature ensemble, its batch and a kernel: as forde.py and as the oracle have it."""

    def __init__(self, kernel, members, **changes):
        self.args = options(members=members, kernel=kernel.split()[0], **changes)
        self.nets, self.batch = ensemble(self.args), make_batch()
        self.vectors, values = random_basis()
        self.roots, kept, self.kernel = values.sqrt(), DIM, None
        if kernel == "pca truncated":
            kept = 60
            self.roots = torch.where(torch.arange(DIM) < kept, self.roots, 0.0)
        elif kernel == "identity":
            self.vectors = self.roots = None
        elif kernel == "tuned":
            self.roots = (1 / (0.4 / values + 0.6)).sqrt()
        self.kernel = forde.make_kernel((random_basis()[0][:, :kept], values[:kept]), self.args)

    def members(self):
        """The oracle's copies of the parameters, and the same in a flat list."""
        members = [{k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()}
                   for net in self.nets]
        return members, [p for member in members for p in member.values()]

    def oracle(self, mistake=""):
        """(cross entropy summed over members, R, their parameter gradients)."""
        members, flat = self.members()
        logits, g = plain_gradients(members, self.batch.images, self.batch.labels, mistake)
        ce = cross_entropy(logits, self.batch.labels, self.args.label_smoothing)
        r = plain_repulsion(g, self.vectors, self.roots, mistake=mistake)
        grads = [torch.autograd.grad(v, flat, retain_graph=True, materialize_grads=True,
                                     allow_unused=True) for v in (ce, r)]
        return ce.item(), r.item(), *grads

    def step(self, repel=True, chunk=0):
        """(outputs of ensemble_step, parameter gradients)."""
        self.args.chunk, size = chunk, chunk or self.args.members
        particles = forde.PARTICLES[self.args.repulsion]
        self.nets.train()
        chunks = [forde.Members(self.nets[i:i + size], particles, self.args.grad_of)
                  for i in range(0, self.args.members, size)]
        self.nets.zero_grad()
        out = forde.ensemble_step(chunks, self.batch, self.kernel, self.args, repel)
        return out, [p.grad.clone() for p in self.nets.parameters()]


def cross_entropy(logits, y, smoothing=0.0):
    return sum(F.cross_entropy(f, y, label_smoothing=smoothing) for f in logits)


CASES = {}


def case(kernel, members):
    """A case with the oracle's right answer, made once."""
    if (kernel, members) not in CASES:
        made = Case(kernel, members)
        made.right = made.oracle()
        CASES[kernel, members] = made
    return CASES[kernel, members]


# ---- The step against the oracle ----------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("kernel, members", [
    ("pca", 3), ("pca truncated", 3), ("identity", 4), ("tuned", 3)])
def test_parameter_gradients_are_those_of_the_loops(kernel, members, chunk):
    this = case(kernel, members)
    ce, r, ce_grads, r_grads = this.right
    (loss, value, logits), grads = this.step(chunk=chunk)
    assert loss.item() / BATCH == pytest.approx(ce, rel=1e-12)
    assert value.item() == pytest.approx(r, rel=1e-9)
    alone = this.step(False, chunk)[1]
    assert relative(alone, ce_grads) < 1e-9
    assert relative([a - b for a, b in zip(grads, alone)], r_grads) < 1e-9
    assert logits.shape == (members, BATCH, CLASSES)


def test_log_probability_smoothing_and_coefficient():
    this = Case("pca", 3, grad_of="logprob", repulsion_coef=2.5, label_smoothing=0.2)
    _, _, ce_grads, r_grads = this.oracle("log-probability")
    assert relative(this.step()[1], [a + 2.5 * b for a, b in zip(ce_grads, r_grads)]) < 1e-9


def test_regression_repels_in_the_gradients_of_its_output():
    this = Case("identity", 4, model="mlp", norm=False, hidden=[6, 5], width=1.0)
    this.nets = nn.ModuleList(forde.make_network(this.args, 1, (2, 1, 1)) for _ in range(4))
    this.nets = this.nets.double()
    for net in this.nets:
        nn.init.normal_(net.head.weight)
    x, y = torch.randn(BATCH, 2, 1, 1).double(), torch.randn(BATCH).double()
    this.batch = data.Batch(x, y, torch.arange(BATCH), BATCH)
    members, flat = this.members()
    z, outputs = x.flatten(1).requires_grad_(), []
    for p in members:
        h = z
        for layer in ("extractor.1", "extractor.3"):
            h = (h @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]).relu()
        outputs.append((h @ p["head.weight"].T + p["head.bias"])[:, 0])
    g = torch.stack([torch.autograd.grad(f.sum(), z, create_graph=True)[0] for f in outputs])
    r, loss = plain_repulsion(g), sum((f - y).square().mean() / 0.02 for f in outputs)
    (total, value, _), grads = this.step()
    assert value.item() == pytest.approx(r.item(), rel=1e-9)
    assert total.item() / BATCH == pytest.approx(loss.item(), rel=1e-12)
    assert relative(grads, torch.autograd.grad(loss + r, flat)) < 1e-9


# The mistake, and the relative error of the repulsion's parameter gradient that it must at least
# make with the PCA kernel (M = 3) and the identity's (M = 4).
MISTAKES = [
    ("log-probability", 0.8, 0.5), ("predicted class", 0.9, 0.9), ("sum of logits", 1.0, 0.9),
    ("no cross terms", 0.8, 0.8), ("second argument not constant", 0.8, 0.8),
    ("bandwidth not constant", 0.5, 0.5), ("no 1/B", 6.9, 6.9), ("mean over members", 0.66, 0.74),
    ("no self-pair", 1.0, 1.0), ("lower median", None, 8e-3),
    ("median over all pairs", 0.02, 0.01), ("median off the diagonal", 0.02, 5e-3),
    ("factor 2 in the bandwidth", 0.2, 0.15), ("ln(M+1)", 0.04, 8e-3),
    ("log of every example", 0.05, 0.01), ("eigenvalues, not roots", 0.6, None),
    ("U transposed", 0.8, None), ("no rotation", 0.8, None), ("scale first", 0.4, None),
    ("height, width, channels", 0.8, None), ("no unit length", 1.5, 3.0)]
VISIBLE = [(m, k, n, s) for m, *sizes in MISTAKES
           for (k, n), s in zip((("pca", 3), ("identity", 4)), sizes) if s is not None]


@pytest.mark.parametrize("mistake, kernel, members, size", VISIBLE)
def test_a_mistake_would_be_seen(mistake, kernel, members, size):
    this = case(kernel, members)  # whose right answer is the script's: see above
    _, value, _, own = this.right
    _, wrong, _, grads = this.oracle(mistake)
    assert relative(grads, own) > size
    factor = {"no 1/B": BATCH, "mean over members": 1 / members}.get(mistake)
    if factor or "not constant" in mistake:  # only the gradient is wrong, or all by a factor
        assert wrong == pytest.approx((factor or 1) * value, rel=1e-9)
    else:
        assert abs(wrong / value - 1) > 1e-4


def test_bias_of_the_head_feels_no_repulsion():
    this = case("pca", 3)
    names = [name.split(".", 1)[1] for name, _ in this.nets.named_parameters()]
    pairs = zip(names, this.step()[1], this.step(False)[1])
    # neither do the offsets of the last block: the gradient has its ReLU's mask only
    assert {n for n, a, b in pairs if not torch.equal(a, b)} == {*names} - {
        "head.bias", "extractor.6.body.4.bias", "extractor.6.shortcut.1.bias"}


@pytest.mark.parametrize("chunk", [0, 1])
def test_published_initialisation_starts_at_the_maximum_without_a_force(chunk):
    this = Case("pca", 3)
    this.nets = nn.ModuleList(forde.make_network(this.args, CLASSES, (3, SIDE, SIDE))
                              for _ in range(3)).double()
    (_, value, logits), grads = this.step(chunk=chunk)
    assert value.item() / 3 == pytest.approx(math.log(3) / BATCH, rel=1e-12)
    assert (logits == 0).all() and sum(g.abs().sum() for g in grads) > 0
    for net in this.nets:  # a step moves the running statistics once
        h, norm = F.conv2d(this.batch.images, net.extractor[0].weight, padding=1), net.extractor[1]
        assert all(m.steps == 1 for m in net.modules() if isinstance(m, forde.BatchNorm))
        assert relative(norm.running_mean, h.mean((0, 2, 3))) < 1e-9
        assert relative(norm.running_var, h.var((0, 2, 3), correction=0)) < 1e-9
    assert all(torch.equal(a, b) for a, b in zip(grads, this.step(False, chunk)[1]))


# ---- Method -------------------------------------------------------------------------------------


def test_method_section_runs_pasted_alone():
    source = open(forde.__file__).read()
    section = source.split("# ---- Method ---")[1].split("# ---- Training ---")[0]
    imports = [line for line in source.split("# ---- Arguments")[0].splitlines()
               if line.startswith(("import ", "from ")) and "common" not in line
               and line != "import data"]
    alone = {}
    exec("\n".join([*imports, section.split("\n", 1)[1]]), alone)
    net = lambda x: (x.flatten(1) ** 2 @ torch.arange(12.0).view(4, 3), x)
    g = torch.stack([alone["input_gradient"](net, torch.randn(6, 1, 2, 2), torch.arange(6) % 3)[1]
                     for _ in range(3)])
    kernel = alone["kernel_map"](*alone["pca"](torch.eye(4)))
    assert torch.equal(alone["repulsion"](g, kernel), forde.repulsion(g, kernel))


def small_kernels(dim=12):
    """{name: (A of forde.py, vectors and roots of the oracle)} on 12 dimensions."""
    vectors, values = random_basis(dim)
    tuned, some = 1 / (0.4 / values + 0.6), torch.where(torch.arange(dim) < 5, values, 0)
    return {"identity": (None, None, None),
            "pca": (forde.kernel_map(vectors, values), vectors, values.sqrt()),
            "truncated": (forde.kernel_map(vectors[:, :5], values[:5]), vectors, some.sqrt()),
            "tuned": (forde.kernel_map(vectors, values, 0.4), vectors, tuned.sqrt())}


def particles(members, batch=4, dim=12, spread=1.0):
    centre = torch.randn(batch, dim, dtype=torch.float64)
    return centre + spread * torch.randn(members, batch, dim, dtype=torch.float64)


def gradient_of(function, g):
    g = g.detach().clone().requires_grad_()
    value = function(g)
    return value.item(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("eps", [1e-24, 0.5])
@pytest.mark.parametrize("members", [2, 3, 4, 5])
@pytest.mark.parametrize("kernel", ["identity", "pca", "truncated", "tuned"])
def test_repulsion_is_the_loops_and_has_their_invariants(kernel, members, eps):
    a, vectors, roots = small_kernels()[kernel]
    g = particles(members)
    right, right_grad = gradient_of(lambda g: plain_repulsion(g, vectors, roots, eps), g)
    value, grad = gradient_of(lambda g: forde.repulsion(g, a, eps), g)
    assert value == pytest.approx(right, rel=1e-9) and relative(grad, right_grad) < 1e-9
    assert 0 <= value <= members * math.log(members) / 4
    order = torch.randperm(members)
    again, permuted = gradient_of(lambda g: forde.repulsion(g, a, eps), g[order])
    assert again == pytest.approx(value, rel=1e-12) and relative(permuted, grad[order]) < 1e-10
    if eps < 0.1:
        assert ((grad * g).sum(-1)).abs().max() < 1e-12 * grad.norm() * g.norm()
        scales = torch.logspace(-3, 3, members).double()[:, None, None]
        again, scaled = gradient_of(lambda g: forde.repulsion(g, a, eps), scales * g)
        assert again == pytest.approx(value, rel=1e-12) and relative(scaled * scales, grad) < 1e-9
        if members == 2:  # the value is a constant, the force is none
            assert value == pytest.approx(2 * math.log(1.25) / 4, rel=1e-9)
            assert grad.norm(dim=-1).min() > 1e-3
    if a is not None:  # a common factor and the signs of the basis have no effect
        again, same = gradient_of(lambda g: forde.repulsion(
            g, 7 * a * torch.randn(a.shape[1]).sign(), eps), g)
        assert again == pytest.approx(value, rel=1e-9) and relative(same, grad) < 1e-9


@pytest.mark.parametrize("zero", [False, True])
def test_equal_or_zero_members_are_at_the_maximum_without_a_force(zero):
    for members in (2, 3, 10):
        g = (0.0 if zero else 1.0) * particles(1).repeat(members, 1, 1)
        for a in (None, small_kernels()["pca"][0]):
            value, grad = gradient_of(lambda g: forde.repulsion(g, a), g)
            assert value == pytest.approx(members * math.log(members) / 4, rel=1e-12)
            assert (grad == 0).all()


def test_bandwidth_is_the_median_with_the_self_distance_and_an_added_floor():
    for m in (2, 3, 4, 5, 10):
        d = torch.rand(m, m, 6, dtype=torch.float64)
        d[range(m), range(m)] = 0
        h = forde.median_bandwidth(d.requires_grad_())
        right = np.median(d.detach().numpy(), axis=0) / math.log(m) + 1e-12
        np.testing.assert_allclose(h, right, rtol=1e-14)
        assert not h.requires_grad
    tiny = torch.full((3, 3, 1), 3e-12 * math.log(3), dtype=torch.float64)
    np.testing.assert_allclose(forde.median_bandwidth(tiny), 4e-12, rtol=1e-9)  # clamped: 3e-12


def test_distances_of_nearly_equal_members_keep_their_digits():
    narrow = forde.unit_rows(particles(4, spread=5e-4).float())
    right, off = forde.squared_distances(narrow.double()), ~torch.eye(4, dtype=torch.bool)
    error = (forde.squared_distances(narrow) / right - 1)[off].abs().max()
    norms, gram = narrow.square().sum(-1), torch.einsum("ibd,jbd->ijb", narrow, narrow)
    worse = ((norms[:, None] + norms - 2 * gram) / right - 1)[off].abs().max()
    assert error < 1e-5 and worse > 1e3 * error


def test_one_feature_has_no_force_and_two_have():
    for dim in (1, 2):  # a unit gradient of one feature is a sign
        assert (gradient_of(forde.repulsion, particles(4, dim=dim))[1].abs().max() > 1e-3) == (
            dim == 2)


@pytest.mark.parametrize("tiny", [0.0, 1e-20])
def test_rows_without_length_are_constants_and_change_no_other(tiny):
    for a, vectors, roots in small_kernels().values():
        g, dead = particles(4), torch.zeros(4, 4, 1, dtype=torch.bool)
        g[1, 2], dead[1, 2] = tiny * torch.randn(12), True
        right, right_grad = gradient_of(
            lambda g: plain_repulsion(torch.where(dead, torch.zeros_like(g), g), vectors, roots), g)
        value, grad = gradient_of(lambda g: forde.repulsion(g, a), g)
        assert value == pytest.approx(right, rel=1e-9)
        assert grad.isfinite().all() and (grad[1, 2] == 0).all()
        assert relative(grad, torch.where(dead, 0, right_grad)) < 1e-9


def test_pca_is_numpys_and_can_be_truncated():
    x = np.random.default_rng(0).standard_normal((40, 9)) * np.arange(1, 10)[::-1] + 2
    vectors, values = forde.pca(torch.from_numpy(x.T @ x / 39))
    singular, right = np.linalg.svd(x)[1:]
    np.testing.assert_allclose(values, singular ** 2 / 39, rtol=1e-9)
    np.testing.assert_allclose(abs(vectors.numpy().T @ right.T), np.eye(9), atol=1e-9)
    some, few = forde.pca(torch.from_numpy(x.T @ x / 39), 4)
    assert torch.equal(some, vectors[:, :4]) and torch.equal(few, values[:4])
    rank_3 = x[:3].T @ x[:3]
    assert (forde.pca(torch.from_numpy(rank_3))[1] >= 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 1.0])
def test_kernel_map_is_a_root_of_the_inverse_covariance(alpha):
    vectors, values = random_basis(7)
    u, lam = vectors.numpy(), np.diag(values)
    right = np.linalg.inv(alpha * np.linalg.inv(u @ lam @ u.T) + (1 - alpha) * np.eye(7))
    a = forde.kernel_map(vectors, values, alpha)
    np.testing.assert_allclose(a @ a.T, right, rtol=1e-10, atol=1e-10)


def test_data_loss_is_summed_over_members_and_examples():
    logits, y = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    log_p = logits.log_softmax(2)
    right = -0.7 * log_p[:, range(4), y].sum() - 0.3 * log_p.mean(2).sum()
    assert forde.data_loss(logits, y, 0.3).item() == pytest.approx(right.item(), rel=1e-12)
    target = torch.randn(4, dtype=torch.float64)
    square = (logits[..., 0] - target).square().sum().item() / 0.02
    assert forde.data_loss(logits, target).item() == pytest.approx(square, rel=1e-12)


def plain_rbf(points):
    """sum_i ln sum_j exp(-|p_i - sg(p_j)|^2 ln(M+1) / med), one median over all pairs; p [M, P]."""
    m = len(points)
    d = [[(points[i] - points[j].detach()).square().sum() for j in range(m)] for i in range(m)]
    h = np.median([v.item() for row in d for v in row]) / math.log(m + 1) + 1e-12
    return sum(torch.log(sum(torch.exp(-v / h) for v in row)) for row in d)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_rbf_repulsion_is_the_loops(members):
    points = [torch.randn(members, *shape).double().requires_grad_() for shape in ((3, 2), (4,))]
    right = plain_rbf(torch.cat([p.flatten(1) for p in points], 1))
    value, grads = forde.rbf_repulsion(points)
    assert value.item() == pytest.approx(right.item(), rel=1e-12)
    assert relative(grads, torch.autograd.grad(right, points)) < 1e-10
    value, (grad,) = forde.rbf_repulsion([torch.ones(members, 3)])
    assert value.item() == pytest.approx(members * math.log(members)) and (grad == 0).all()


def plain_lit(g):
    cos = lambda a, b: a @ b / (a.norm() * b.norm())
    pairs = [cos(g[i, b], g[j, b]).square() for b in range(g.shape[1]) for i in range(len(g))
             for j in range(i)]
    return sum(pairs) / len(pairs)


def plain_directions(logits, y, weight, number):
    """Squared projectors [B, F, F] on the leading directions of the likelihood gradients."""
    out = []
    for b in range(len(y)):
        p = np.exp(logits[:, b])
        rows = (np.eye(p.shape[1])[y[b]] - p / p.sum(1, keepdims=True)) @ weight
        _, size, right = np.linalg.svd(rows, full_matrices=False)
        fade = size[:number] ** 2 / (size[:number] ** 2 + 1e-4 * size[0] ** 2)
        out.append(right[:number].T * fade ** 2 @ right[:number])
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("members, classes", [(8, 20), (3, 20), (8, 4)])
def test_feature_directions_are_the_leading_ones(members, classes):
    logits, y = torch.randn(members, 6, classes, dtype=torch.float64), torch.arange(6) % classes
    weight = torch.randn(classes, 9, dtype=torch.float64)
    own = forde.feature_directions(logits, y, weight)
    assert (own @ own.mT - plain_directions(logits.numpy(), y, weight.numpy(), 5)).norm() < 1e-8
    assert not forde.feature_directions(logits, y, 0 * weight).any()


def test_feature_directions_keep_their_digits_in_float32():
    """A Gram matrix would square the condition: there the third direction was noise."""
    basis = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))[0]
    weight = torch.cat([basis[:3] * torch.tensor([[1.0], [1.0], [3e-2]]), torch.zeros(17, 20)])
    logits, y = torch.randn(8, 6, 20, dtype=torch.float64), torch.arange(6) + 3
    wide = forde.feature_directions(logits, y, weight)
    narrow = forde.feature_directions(logits.float(), y, weight.float()).double()
    assert (wide.square().sum((1, 2)) > 2.2).all()
    assert (narrow @ narrow.mT - wide @ wide.mT).abs().max() < 1e-5


def plain_feature_repulsion(features, project, c):
    m, size = features.shape[:2]
    total = torch.log(1 + c * features ** 2).sum()
    for b in range(size):
        z = features[:, b]
        d = [[(z[i] - z[j].detach()) @ project[b] @ (z[i] - z[j].detach()) for j in range(m)]
             for i in range(m)]
        med = [np.median([d[i][j].item() for i in range(m)]) for j in range(m)]
        h = [v / math.log(m) + 1e-12 for v in med]
        total = total + sum(torch.log(sum(torch.exp(-d[i][j] / h[j]) for j in range(m)))
                            for i in range(m))
    return total / size


# ---- Steps of the baselines ---------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("name", ["function", "lit", "feature"])
def test_steps_of_the_other_repulsions(name, chunk):
    this = Case("identity", 4, repulsion=name, repulsion_coef=0.7, cauchy=0.3)
    members, flat = this.members()
    x, y = this.batch.images, this.batch.labels
    logits, features = (torch.stack(part) for part in zip(*(plain_network(p, x) for p in members)))
    if name == "function":
        prior = torch.log(1 + 0.3 * logits ** 2).sum()
        force = (plain_rbf(logits.flatten(1)) + prior) / BATCH
    elif name == "lit":
        force = plain_lit(plain_gradients(members, x, y)[1])
    else:
        weight = this.nets[0].head.weight.detach().numpy()
        project = plain_directions(logits.detach().numpy(), y, weight, 5)
        force = plain_feature_repulsion(features, project, 0.3)
    (_, value, _), grads = this.step(chunk=chunk)
    assert value.item() == pytest.approx(force.item(), rel=1e-9)
    right = torch.autograd.grad(cross_entropy(logits, y) + 0.7 * force, flat)
    assert relative(grads, right) < 1e-9


def test_weight_repulsion_is_the_loops_over_n():
    this = Case("identity", 4, repulsion="weight", repulsion_coef=0.7)
    members, flat = this.members()
    points = torch.stack([torch.cat([p.flatten() for p in m.values()]) for m in members])
    right, grads = plain_rbf(points), [torch.randn_like(p) for p in flat]
    for p, g in zip(this.nets.parameters(), grads):
        p.grad = g.clone()
    assert forde.finish_gradients(this.nets, this.args, 50, None, repel=False) == 0
    value = forde.finish_gradients(this.nets, this.args, 50, None, repel=True)
    assert value.item() == pytest.approx(right.item() / 50, rel=1e-12)
    added = [p.grad - g for p, g in zip(this.nets.parameters(), grads)]
    assert relative(added, [0.7 * g / 50 for g in torch.autograd.grad(right, flat)]) < 1e-9


def test_classifier_of_the_feature_repulsion_is_shared():
    args = options(repulsion="feature")
    nets = ensemble(args)
    for p in nets.parameters():
        p.grad = torch.randn_like(p)
    before, stem = [n.head.weight.grad.clone() for n in nets], nets[0].extractor[0].weight.grad
    untouched = stem.clone()
    forde.finish_gradients(nets, args, 50, None, True)
    assert all(relative(net.head.weight.grad, sum(before) / 4) < 1e-12 for net in nets)
    assert torch.equal(stem, untouched)


@pytest.mark.parametrize("prior", ["isotropic", "empcov"])
def test_optimiser_and_the_first_layers_prior(prior):
    """Nesterov's momentum with decay on everything; EmpCov in place of the first layer's decay."""
    args = options(members=2, prior=prior, repulsion="none", weight_decay=0.05)
    nets, x = ensemble(args), np.random.default_rng(0).standard_normal((60, 27))
    c, precision = np.cov(x.T), None
    if prior == "empcov":
        precision = forde.empcov_precision(torch.from_numpy(c))
        right = np.linalg.inv(c / np.linalg.eigvalsh(c).mean() + 0.1 * np.eye(27))
        np.testing.assert_allclose(precision, right, rtol=1e-9)
    optimiser, theta = forde.make_optimiser(nets, args), [p.detach().clone()
                                                          for p in nets.parameters()]
    v = [torch.zeros_like(p) for p in theta]
    for _ in range(3):
        grads = [torch.randn_like(p) for p in theta]
        for p, g in zip(nets.parameters(), grads):
            p.grad = g.clone()
        forde.finish_gradients(nets, args, 50, precision, True)
        optimiser.step()
        for k, ((name, _), g) in enumerate(zip(nets.named_parameters(), grads)):
            stem = prior == "empcov" and "extractor.0" in name
            decay = (theta[k].flatten(1) @ precision).view_as(theta[k]) if stem else theta[k]
            g = g + 0.05 * decay
            v[k] = 0.9 * v[k] + g
            theta[k] = theta[k] - 0.1 * (0.9 * v[k] + g)
    assert relative(list(nets.parameters()), theta) < 1e-12


def test_learning_rate_table():
    table = {0: .1, 149: .1, 150: .1, 151: .099175, 210: .0505, 269: .001825, 270: .001, 299: .001}
    for epoch, lr in table.items():
        for step in (0, 1, 389):  # constant within an epoch
            assert forde.learning_rate(390 * epoch + step, 390, options()) == pytest.approx(lr)
    cycle = [forde.learning_rate(k, 10, options(schedule="one_cycle", epochs=10)) for k in
             range(100)]
    assert max(cycle) == cycle[20] == pytest.approx(0.1) and min(cycle[0], cycle[-1]) < 0.005


# ---- Model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (7, 10), (1, 2)])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_same_padding_is_xlas(kernel, stride, size):
    layer, x = forde.Conv2d(2, 3, kernel, stride).double(), torch.randn(2, 2, *size).double()
    assert relative(layer(x), plain_conv(x, layer.weight, stride)) < 1e-13


@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (6, 3)])
def test_batch_norm_is_the_librarys_with_the_published_running_statistics(shape):
    layer, means, variances = forde.BatchNorm(3).double(), [], []
    nn.init.normal_(layer.weight)
    for step in range(1, 5):
        x = step + step * torch.randn(*shape, dtype=torch.float64)
        right = F.batch_norm(x, None, None, layer.weight, layer.bias, True)
        assert relative(layer(x), right) < 1e-12
        rows = x.movedim(1, 0).flatten(1)
        means.append(rows.mean(1))
        variances.append(rows.var(1, correction=0))
        weights = [0.1 * 0.9 ** (step - k - 1) / (1 - 0.9 ** step) for k in range(step)]
        right = [sum(w * t for w, t in zip(weights, rows)) for rows in (means, variances)]
        assert relative([layer.running_mean, layer.running_var], right) < 1e-12
    right = F.batch_norm(x, *right, layer.weight, layer.bias)
    assert relative(layer.eval()(x), right) < 1e-12


def count(model, classes, side):
    with torch.device("meta"):
        net = forde.make_network(options(model=model, width=1.0), classes, (3, side, side))
    return sum(p.numel() for p in net.parameters()), len(list(net.parameters()))


def test_parameter_counts():
    assert count("resnet18", 10, 32) == (11_173_962, 62)
    assert count("resnet18", 100, 32) == (11_220_132, 62)
    assert count("preact_resnet18", 200, 64) == (11_269_640, 56)
    assert count("wrn_16_4", 10, 32)[0] == 2_748_890


def plain_pre_activation(net, x):
    """preact_resnet18 or wrn_16_4 from its state, in training mode."""
    p = net.state_dict()
    norm = lambda h, at: F.relu(plain_norm(h, p[f"{at}.weight"], p[f"{at}.bias"]))
    blocks = [k for k, m in enumerate(net.extractor) if isinstance(m, forde.Residual)]
    x = plain_conv(x, p["extractor.0.weight"])
    for number, k in enumerate(blocks):
        at, stride = f"extractor.{k}", 2 if number and not number % 2 else 1
        h = norm(x, f"{at}.before.0")
        z = norm(plain_conv(h, p[f"{at}.body.0.weight"], stride), f"{at}.body.1")
        if f"{at}.shortcut.0.weight" in p:
            x = plain_conv(h, p[f"{at}.shortcut.0.weight"], stride)
        x = x + plain_conv(z, p[f"{at}.body.3.weight"])
    return norm(x, f"extractor.{blocks[-1] + 1}").mean((2, 3))


@pytest.mark.parametrize("model", ["preact_resnet18", "wrn_16_4"])
def test_pre_activation_networks(model):
    net = ensemble(options(model=model, members=1))[0]
    logits, features = net(make_batch().images)
    assert relative(features, plain_pre_activation(net, make_batch().images)) < 1e-10
    assert relative(net.head(features), logits) < 1e-14


def test_mlp_and_the_published_initialisation():
    net = forde.make_network(options(model="mlp", width=1.0), 4, (5, 1, 1)).double()
    nn.init.normal_(net.head.weight)
    x, p = torch.randn(9, 5, 1, 1, dtype=torch.float64), net.state_dict()
    h = x.flatten(1)
    for k in (1, 4):
        h = h @ p[f"extractor.{k}.weight"].T
        h = ((h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()).relu()
    assert relative(list(net(x)), [h @ net.head.weight.T, h]) < 1e-12
    net = forde.make_network(options(model="resnet18", width=0.5), 10, (3, 32, 32))
    for name, p in net.named_parameters():
        if p.ndim == 4:
            unit = p * p[0].numel() ** 0.5
            assert 1.5 < unit.abs().max() <= 2.0001
            if p.numel() > 30_000:
                assert abs(unit.std() - 0.8796) < 0.012 and abs(unit.mean()) < 0.02
        else:
            norm = name.endswith("weight") and "head" not in name
            assert (p == norm).all(), name


def test_bf16_gives_finite_float32_gradients_near_the_right_ones():
    this = Case("identity", 3, amp="bf16")
    this.nets, images = this.nets.float(), this.batch.images.float()
    this.batch = this.batch._replace(images=images)
    (_, value, logits), grads = this.step()
    this.args.amp = "off"
    (_, exact, _), right = this.step()
    assert logits.dtype == value.dtype == torch.float32
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    assert value != exact and value.item() == pytest.approx(exact.item(), rel=0.05)
    assert 0 < relative(grads, right) < 0.3


# ---- Runs ---------------------------------------------------------------------------------------

TINY = ("--model resnet9 --width 0.02 --members 3 --limit-train 76 -b 16 --epochs 2 --shift none "
        "--no-plot --diversity-examples 20 --device cpu --workers 0 --ood").split()


def keep_few(patch):
    """Test and OOD sets of a hundred images, three kinds of corruption."""
    load = data.load
    patch.setattr(data, "CORRUPTIONS", dict([*data.CORRUPTIONS.items()][:3]))

    def load_few(name, split, *rest, **more):
        limit = 100 if split in ("test", "ood") else more.pop("limit", None)
        return load(name, split, *rest, **{**more, "limit": limit})

    patch.setattr(data, "load", load_few)


def in_float64(patch):
    """Networks and batches in float64: what is left of a difference is not rounding."""
    make_network, epoch = forde.make_network, data.Loader.epoch
    patch.setattr(forde, "make_network", lambda *args: make_network(*args).double())
    patch.setattr(data.Loader, "epoch", lambda *args: (
        batch._replace(images=batch.images.double()) for batch in epoch(*args)))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """tiny(*options): the rows of a run of half a second, by (method, set[, against])."""
    keep_few(monkeypatch)

    def run(*more):
        rows = forde.main([*TINY, "--out-dir", str(tmp_path), *map(str, more)])
        return {tuple(row[k] for k in ("method", "set", "against") if k in row): row
                for row in rows}

    return run


def weights(folder, method="forde_identity", seed=1):
    [path] = folder.glob(f"**/{method}-seed{seed}.pt")
    return torch.load(path, weights_only=True)["net"]


def distance(a, b):
    """The largest relative difference of a tensor of two states."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).double().norm() / b[k].double().norm().clamp_min(1e-3)).item()
               for k in a)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The default command, narrow and short, its picture, and then --eval."""
    out, seen = tmp_path_factory.mktemp("story"), []
    options = (f"--out-dir {out} --width 0.1 --members 2 --limit-train 300 --epochs 2 "
               "--shift-examples 5 --diversity-examples 24 --device cpu --runs 2 "
               "--predict glyphs_letters").split()
    with pytest.MonkeyPatch.context() as patch:
        keep_few(patch)
        step = forde.ensemble_step
        patch.setattr(forde, "ensemble_step", lambda chunks, batch, *rest: (
            seen.append((chunks[0].nets[0].extractor[1].weight.detach().clone(), batch)),
            step(chunks, batch, *rest))[1])
        rows, first = forde.main(options), list(seen)
        again = forde.main([*options, "--eval", "--no-plot"])
    assert len(seen) == len(first)  # nothing was trained again
    return out, rows, again, first


def test_the_story(story):
    out, rows, again, seen = story
    methods = ("deep_ensemble", "forde_pca", "forde_identity")
    [folder] = (out / "forde").glob("glyphs-*")
    assert again == rows == json.loads((folder / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 3 * 8  # seeds, methods; test, OOD, five severities, their mean
    names = {path.name for path in folder.iterdir()}
    assert {"shift.png", "results.csv", *(f"{m}-seed{s}.pt" for m in methods for s in (1, 2)),
            *(f"predictions-{m}-seed1.csv" for m in methods)} <= names
    for row in rows:
        assert all(v is None or not isinstance(v, float) or math.isfinite(v) for v in row.values())
    for method in methods:
        own = [row for row in rows if row["method"] == method and row["seed"] == 1]
        for k in ("accuracy", "nll", "ece15", "ece15_by_kind", "gradient_distance"):
            assert own[-1][k] == pytest.approx(np.mean([row[k] for row in own[2:7]]))
        log = [json.loads(line) for line in open(folder / f"{method}-seed1.jsonl")]
        assert [row["epoch"] for row in log] == [1, 2]
        # with two members R is 2 ln(1.25) / B where they differ
        low, high = (0, 0) if method == "deep_ensemble" else (math.log(1.25), math.log(2))
        assert all(low - 1e-5 <= 32 * row["repulsion"] <= high + 1e-5 for row in log)
    steps = len(seen) // 6
    for seed in (0, 1):  # the methods start from the same members and see the same batches
        for other in (1, 2):
            for k in range(steps):
                a, b = seen[(3 * seed) * steps + k], seen[(3 * seed + other) * steps + k]
                assert torch.equal(a[1].images, b[1].images)
                assert k or torch.equal(a[0], b[0])
    assert not torch.equal(seen[0][0], seen[3 * steps][0])
    difference = json.loads((folder / "results.json").read_text())["paired"][0]
    assert difference["method"] == "forde_pca - deep_ensemble" and difference["seed"] == 1
    assert difference["nll"] == pytest.approx(rows[8]["nll"] - rows[0]["nll"])


def brute_force(p, y):
    """Metrics of member probabilities p [M, N, K], float64, in plain loops."""
    mean, n, m = p.mean(0), len(y), len(p)
    order = [sorted(range(p.shape[2]), key=lambda c: -row[c]) for row in mean]
    losses = [-math.log(mean[i, y[i]]) for i in range(n)]
    missed = [losses[i] for i in range(n) if order[i][0] != y[i]]
    h = lambda q: -sum(v * math.log(v) for v in q if v > 0)
    total, aleatoric = [h(q) for q in mean], [np.mean([h(q[i]) for q in p]) for i in range(n)]
    votes = p.argmax(2)
    differ = [votes[i] != votes[j] for i in range(m) for j in range(m) if i != j]
    epistemic = [a - b for a, b in zip(total, aleatoric)]
    return {"accuracy": np.mean([order[i][0] == y[i] for i in range(n)]), "nll": np.mean(losses),
            "nll_miss": np.mean(missed) if missed else None, "member_accuracy": np.mean(votes == y),
            "disagreement": np.mean(differ) if differ else 0.0,
            "brier": np.mean([((mean[i] - np.eye(p.shape[2])[y[i]])**2).sum() for i in range(n)]),
            **{f"top{k}_accuracy": np.mean([y[i] in order[i][:k] for i in range(n)])
               for k in (2, 3)},
            "total_mean": np.mean(total), "aleatoric_mean": np.mean(aleatoric),
            "epistemic_mean": np.mean(epistemic), "epistemic_std": np.std(epistemic)}


@pytest.mark.parametrize("members, skill", [(1, 1.0), (3, 1.0), (4, -3.0), (2, 40.0)])
def test_predictive_metrics(members, skill):
    y = torch.randint(5, (60,))
    z = 2 * torch.randn(members, 60, 5, dtype=torch.float64)
    z[:, range(60), y] += skill
    values = forde.predictive_metrics(z.log_softmax(2), y)
    for key, value in brute_force(z.softmax(2).numpy(), y.tolist()).items():
        assert values[key] == (None if value is None else pytest.approx(value, abs=1e-9)), key


def slow_distance(nets, images, labels):
    """Mean of 1 - cos over pairs of members and examples: one backward pass an example."""
    distances = []
    for x, y in zip(images, labels):
        gradients = []
        for net in nets:
            leaf = x[None].clone().requires_grad_()
            g = torch.autograd.grad(net.double().eval()(leaf)[0][0, y], leaf)[0].flatten()
            gradients.append(g / g.norm())
        distances += [1 - (a @ b).item() for i, a in enumerate(gradients) for b in gradients[:i]]
    return np.mean(distances)


def test_evaluation_is_that_of_the_saved_members(story):
    """Predictions, AUROC, pooled corruptions and diversity, from the checkpoint, by hand."""
    out, rows, *_ = story
    state = weights(out, "forde_pca", 2)
    nets = nn.ModuleList(forde.make_network(options(model="mlp", hidden=[128, 128], width=0.1), 10,
                                            (1, 28, 28)) for _ in range(2)).double().eval()
    nets.load_state_dict(state)
    test = data.load("glyphs", "test", limit=100)
    letters = data.match(data.load("glyphs_letters", "test", limit=100), test)
    unit = lambda s: (s.images.double() / 255 - s.mean[0]) / s.std[0]
    with torch.no_grad():
        p, q = (torch.stack([net(unit(s))[0].softmax(1) for net in nets]).numpy()
                for s in (test, letters))
    own = [row for row in rows if (row["method"], row["seed"]) == ("forde_pca", 2)]
    for key, value in brute_force(p, test.labels.tolist()).items():
        assert own[0][key] == (None if value is None else pytest.approx(value, abs=1e-5)), key
    h = lambda q: -(q * np.log(q)).sum(-1)
    a, b = (h(q.mean(0)) - h(q).mean(0) for q in (p, q))
    assert own[1]["auroc_epistemic"] == pytest.approx((b[:, None] > a).mean(), abs=2e-3)
    some = data.evenly(test, 24)
    assert own[0]["gradient_distance"] == pytest.approx(
        slow_distance(nets, unit(some), some.labels), abs=1e-5)
    third = [data.corrupted(data.evenly(test, 5), kind, 3)
             for kind in [*data.CORRUPTIONS][:3]]
    with torch.no_grad():
        p = torch.stack([net(torch.cat([unit(s) for s in third]))[0].softmax(1) for net in nets])
    right = brute_force(p.numpy(), torch.cat([s.labels for s in third]).tolist())
    assert own[4]["set"] == "glyphs_c_s3"
    assert own[4]["nll"] == pytest.approx(right["nll"], abs=1e-5)


def test_every_method_and_one_that_was_killed(tiny, tmp_path, monkeypatch):
    """Killed in the second step of the second method's second epoch: the same weights, bit for bit.
    All methods repel but the deep ensemble, and no two end alike."""
    every = ["--methods", *forde.METHODS, "--prior", "empcov", "--augment", "--val-fraction", 0.01,
             "--published-split", "--eval-every", 1]
    calm, real, steps = tiny(*every, "--name", "calm"), forde.learning_rate, []

    def killed(step, *rest):
        steps.append(step)
        if len(steps) == 14:
            raise KeyboardInterrupt
        return real(step, *rest)

    monkeypatch.setattr(forde, "learning_rate", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny(*every, "--name", "again")
    assert steps[-1] == 5
    assert tiny(*every, "--name", "again") == calm
    folder = tmp_path / "forde"
    states = {m: weights(folder / "calm", m) for m in forde.METHODS}
    for method, state in states.items():
        other = weights(folder / "again", method)
        assert all(torch.equal(state[k], other[k]) for k in state)
        log = [json.loads(line) for line in open(folder / f"calm/{method}-seed1.jsonl")]
        assert (log[-1]["repulsion"] == 0) == (method == "deep_ensemble")
        assert all(log[k]["val_nll"] > 0 for k in (0, 1)) and calm[method, "glyphs"]["temperature"]
        assert sum(distance(state, other) < 1e-6 for other in states.values()) == 1


@pytest.mark.parametrize("a, b", [
    ("--methods forde_tuned --alpha 1", "--methods forde_pca"),
    ("--methods forde_tuned --alpha 0", "--methods forde_identity"),
    ("--methods forde_pca --pca-components 784", "--methods forde_pca"),
    ("--methods forde_pca --chunk 1", "--methods forde_pca"),
    ("--methods feature_rde --chunk 1", "--methods feature_rde"),
    # the first step is from a head of zeros, where nothing repels
    ("--methods forde_identity --repulse-every 100", "--methods deep_ensemble"),
    ("--methods weight_rde --repulsion-coef 0", "--methods deep_ensemble")])
def test_options_that_are_another_method(tiny, tmp_path, monkeypatch, a, b):
    in_float64(monkeypatch)
    for name, text in (("a", a), ("b", b)):
        tiny("--name", name, "--epochs", 1, *text.split())
    state, other = (next((tmp_path / "forde" / name).glob("*.pt")) for name in "ab")
    state, other = (torch.load(path, weights_only=True)["net"] for path in (state, other))
    assert distance(state, other) < 1e-5


SPREAD = [f"--limit-steps 3 --augment --methods {' '.join(forde.METHODS)}",
          "--limit-steps 3 --chunk 1 --prior empcov --grad-of logprob --methods forde_tuned lit"]


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Folders of the runs SPREAD by one process and by two, in float64."""
    folder = tmp_path_factory.mktemp("spread")
    commands = [[*TINY, "--epochs", "1", "--name", f"run{k}", *text.split()]
                for k, text in enumerate(SPREAD)]
    two = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         __file__, *(json.dumps([*c, "--out-dir", str(folder / "two")]) for c in commands)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(forde.__file__).parent)})
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        keep_few(patch)
        rows = [forde.main([*c, "--out-dir", str(folder / "one")]) for c in commands]
    printed = two.communicate(timeout=300)[0]
    assert two.returncode == 0, printed[-3000:]
    return folder, rows, printed


def test_two_processes_equal_one(spread):
    folder, all_rows, printed = spread
    for k, rows in enumerate(all_rows):
        one, two = (folder / name / "forde" / f"run{k}" for name in ("one", "two"))
        for path in one.glob("*.pt"):
            a, b = (torch.load(p, weights_only=True)["net"] for p in (path, two / path.name))
            assert distance(b, a) < 1e-10, path.name
        results = json.loads((two / "results.json").read_text())
        assert results["environment"]["processes"] == 2
        for row, other in zip(rows, results["rows"], strict=True):
            assert row.keys() == other.keys()
            assert all(other[k] == pytest.approx(v, abs=1e-6) for k, v in row.items())
    assert printed.count("run directory") == 2


def test_more_processes_than_examples_is_refused(monkeypatch):
    monkeypatch.setattr(common, "world_size", lambda: 30)
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    args = forde.parse_args([*TINY, "-b", "30"])
    with pytest.raises(UserError, match="30 processes cannot share 20 example"):
        forde.load_sets(args, 1)


# ---- Features, toys, own data -------------------------------------------------------------------


@pytest.fixture
def features(tmp_path):
    """Options of a run on features; far.npz has labels that the training set has not."""
    rng = np.random.default_rng(0)
    for name, n, classes, centre in (("train", 140, 3, 0), ("test", 70, 3, 0), ("far", 50, 9, 6)):
        labels = np.arange(n) % classes
        x = rng.normal(size=(n, 6)) + 2 * np.eye(6)[labels % 6] + centre
        np.savez(tmp_path / f"{name}.npz", features=x, labels=labels)
    train, test = (str(tmp_path / f"{name}.npz") for name in ("train", "test"))
    return ["--dataset", "features", "--features", train, test, "--model", "mlp", "--hidden", "16",
            "16", "--lr", "0.05", "--width", "1"]


def test_features_and_their_ood_set_of_other_classes(tiny, features, tmp_path):
    far = tmp_path / "far.npz"
    rows = tiny(*features, "--methods", "forde_pca", "feature_rde", "--ood", far)
    assert rows["forde_pca", "test", "far"]["n"] == 50
    assert rows["forde_pca", "test", "far"]["auroc_epistemic"] > 0.5
    # another file of the same name: another basis
    with np.load(tmp_path / "train.npz") as old:
        np.savez(tmp_path / "train.npz", features=2 * old["features"], labels=old["labels"])
    tiny(*features, "--methods", "forde_pca", "--name", "other")
    assert len([*(tmp_path / "forde").glob("pca-*.pt")]) == 2


def test_toys(tiny, tmp_path):
    short = "--model mlp --members 3 --epochs 1 -b 200 --width 1 --lr 0.02 --plot".split()
    rows = tiny("--dataset", "toy_classification", *short)
    test = rows["forde_identity", "toy_classification"]
    assert test["accuracy"] > 0.3 and test["n"] == 100
    assert rows["forde_identity", "toy_classification", "far"]["epistemic_mean"] > 0
    rows = tiny("--dataset", "toy_regression", *short, "--lr", 1e-4)
    row = rows["forde_identity", "toy_regression"]
    assert row["rmse"] > 0 and row["far_std_mean"] > 0 and row["std_mean"] > 0
    assert len([*tmp_path.glob("**/toy.png")]) == 2


def test_own_folder_and_ambiguous_digits(tiny, tmp_path):
    for part, count in (("train", 24), ("test", 6)):
        for label in range(2):
            (tmp_path / "own" / part / str(label)).mkdir(parents=True)
            for k in range(count // 2):
                pixels = np.random.default_rng(k).integers(0, 255, (8, 8, 3), dtype=np.uint8)
                path = tmp_path / "own" / part / str(label) / f"{k}.png"
                Image.fromarray(pixels // 2 + 120 * np.uint8(label)).save(path)
    rows = tiny("--dataset", f"folder:{tmp_path / 'own'}", "--image-size", 8,
                "--methods", "forde_pca", "lit", "-b", 8)
    assert rows["forde_pca", "own"]["n"] == 6
    rows = tiny("--dataset", "dirty_glyphs", "--shift", "computed", "--shift-examples", 3,
                "--methods", "forde_identity")
    assert rows["forde_identity", "dirty_glyphs_computed_c"]["n"] == 5 * 3 * len(data.CORRUPTIONS)


def test_published_corruptions_and_a_part_of_them(tiny, tmp_path):
    """TinyImageNet's preset and layout, and two of the kinds of TinyImageNet-C."""
    places = [(f"tiny-imagenet-200/train/n{k}/images", 8) for k in range(2)]
    places += [("tiny-imagenet-200/val/images", 4), *(
        (f"Tiny-ImageNet-C/{kind}/{severity}/n{k}", 3) for kind in ("fog", "snow")
        for severity in range(1, 6) for k in range(2))]
    for number, (place, count) in enumerate(places):
        (tmp_path / place).mkdir(parents=True)
        for k in range(count):
            pixels = np.random.default_rng([number, k]).integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / place / f"{k}.png", compress_level=1)
    root = tmp_path / "tiny-imagenet-200"
    (root / "wnids.txt").write_text("n0\nn1\n")
    notes = "".join(f"{k}.png\tn{k % 2}\t0\t0\t63\t63\n" for k in range(4))
    (root / "val/val_annotations.txt").write_text(notes)
    rows = tiny("--dataset", "tiny_imagenet", "--data-dir", tmp_path, "--shift", "published",
                "--methods", "forde_identity", "--limit-train", 16, "--diversity-examples", 4)
    assert rows["forde_identity", "tiny_imagenet"]["n"] == 4
    assert rows["forde_identity", "tiny_imagenet_c_2of15_s5"]["n"] == 12
    assert rows["forde_identity", "tiny_imagenet_c_2of15"]["n"] == 60


def test_a_basis_is_read_once_and_refused_before_training(tiny, tmp_path, monkeypatch):
    loaded, real = [], data.load
    monkeypatch.setattr(data, "load", lambda name, split, *a, **k: (
        loaded.append(split), real(name, split, *a, **k))[1])
    for name in ("a", "b"):
        tiny("--methods", "forde_pca", "--name", name)
    assert loaded.count("train") == 2  # once a start
    assert distance(weights(tmp_path / "forde/a", "forde_pca"),
                    weights(tmp_path / "forde/b", "forde_pca")) == 0
    whole = data.load("glyphs", "train", val_fraction=0.0, limit=76)
    args = forde.parse_args([*TINY, "--out-dir", str(tmp_path)])
    forde.principal_components(whole.select(torch.randperm(76)), args)
    [basis] = (tmp_path / "forde").glob("pca-*.pt")  # the same for every order
    tiny("--methods", "forde_pca", "--name", "c", "--pca", basis)
    for number, content in enumerate((b"no basis", (tmp_path / "forde/a/forde_pca-seed1.pt")
                                      .read_bytes())):
        bad = tmp_path / f"bad{number}.pt"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=bad.name):
            tiny("--methods", "deep_ensemble", "forde_pca", "--name", f"d{number}", "--pca", bad)
        assert not [*(tmp_path / "forde" / f"d{number}").glob("*.pt")]


def test_picture_has_error_bars_and_markers(tmp_path):
    plt = common.pyplot()
    rows = [{"method": m, "seed": s, "set": name, "accuracy": 0.5 + 0.1 * s, "nll": 1.0 + s,
             "ece15": 0.1 * s} for m in ("lit", "weight_rde") for s in (1, 2)
            for name in ("a", *(f"a_c_s{k}" for k in range(1, 6)))]
    figures = []
    plot = SimpleNamespace(subplots=lambda *a, **k: figures.append(plt.subplots(*a, **k)) or
                           figures[-1], close=plt.close)
    forde.plot_shift(plot, tmp_path / "shift.png", rows, "a", "a_c")
    bars = figures[0][1][0].containers
    assert len(bars) == 2 and all(bar.has_yerr for bar in bars)
    assert len({bar.lines[0].get_marker() for bar in bars}) == 2


# ---- Options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, named", [
    ("--methods nonsense", "--methods"), ("--dataset kmnist", "kmnist"),
    ("--members 0", "--members"), ("--members 4 --chunk 3", "--chunk 3"),
    ("--alpha 2", "--alpha"), ("--compile", "--compile"), ("--hidden 16 0", "--hidden"),
    ("--dataset features --width 1", "--features"), ("--features a.npz b.npz", "--features"),
    ("--dataset toy_regression --model resnet9", "resnet9"),
    ("--model mlp --dataset toy_regression --methods feature_rde", "feature_rde"),
    ("--model mlp --dataset toy_classification --augment", "augment"),
    ("--model mlp --dataset toy_classification --shift computed", "--shift computed"),
    ("--model mlp --dataset toy_classification --ood glyphs_letters", "--ood"),
    ("--model mlp --dataset toy_classification --val-fraction 0.1", "--val-fraction"),
    ("--eval-every 1", "--val-fraction"),
    ("--val-fraction 0.00001", "--val-fraction"), ("--shift published", "--shift published"),
    ("--ood nonsense", "nonsense"), ("--ood far.npz", "far.npz"),
    ("--methods forde_pca --pca nowhere.pt", "nowhere.pt"), ("--eval", "train first"),
    ("FEATURES --shift computed", "--shift computed"), ("FEATURES --augment", "augment"),
    ("FEATURES --ood glyphs_letters", "glyphs_letters"), ("--predict nonsense", "nonsense"),
    ("FEATURES --ood nowhere.npz", "nowhere.npz"),
    ("FEATURES --val-fraction 0.1", "--val-fraction")])
def test_misuse_is_refused_before_training(tiny, features, tmp_path, argv, named):
    more = argv.replace("FEATURES", " ".join(features)).split()
    more = more if "shift" in argv or "--dataset" not in more else ["--shift", "none", *more]
    with pytest.raises(UserError) as refused:
        tiny(*more)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert not [*tmp_path.glob("forde/*/*.pt")]


def test_presets_are_the_published_settings():
    def resolved(*argv):
        return vars(forde.parse_args([*argv, "--device", "cpu"]))

    paper = dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
                 lr=0.1, lr_ratio=0.01, momentum=0.9, weight_decay=5e-4, schedule="published",
                 width=1, eps=1e-24, alpha=0.4, augment=True, shift="published", val_fraction=0,
                 limit_train=None, ood=["svhn", "cifar10"])
    commands = [line.split("forde.py")[1].split("#")[0].split() for line in
                forde.__doc__.replace("\\\n", "").splitlines() if "  python forde.py" in line
                or "torchrun" in line]
    assert len(commands) == 4
    found = [resolved(*command) for command in commands]
    assert [f["dataset"] for f in found] == ["glyphs", "cifar100", "glyphs", "cifar100"]
    assert all(paper.items() <= f.items() for f in found[1::2]) and found[2]["eval"]
    assert dict(paper, alpha=0.2, ood=["svhn", "cifar100"]).items() <= resolved(
        "--dataset", "cifar10").items()
    assert dict(model="preact_resnet18", epochs=150, lr_ratio=0.001).items() <= resolved(
        "--dataset", "tiny_imagenet").items()
    assert resolved("--dataset", "cifar10", "--width", "0.5")["width"] == 0.5
    for name, preset in forde.PRESETS.items():  # a key that "" lacks would be the default's
        assert preset.keys() <= forde.PRESETS[""].keys(), name
    args = forde.parse_args(["--dataset", "cifar10", "--device", "cpu"])
    assert [forde.with_method(args, m).cauchy for m in ("feature_rde", "function_rde", "lit")] == [
        1e-3, 1e-6, 0]


if __name__ == "__main__":  # under torchrun: the runs of `spread`
    in_float64(pytest.MonkeyPatch())
    keep_few(pytest.MonkeyPatch())
    common.launch(lambda: [forde.main(json.loads(command)) for command in sys.argv[1:]])
