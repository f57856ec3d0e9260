"""forde.py against independent oracles: the repulsion as plain loops over (i, j, b) in float64, the
networks written out a second time, and every known mistake as a wrong oracle that must differ."""

import argparse
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn

import common
import forde

ROOT = Path(__file__).parents[1]
WORLD, CLASSES, BATCH, SIDE = common.World(), 5, 8, 8
DIM = 3 * SIDE * SIDE


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_the_tested_file_is_this_repositorys():
    assert Path(forde.__file__).resolve() == ROOT.resolve() / "forde.py"


def options(**changes):
    """The resolved options of a miniature network, in float64 by `ensemble`, with `changes`."""
    args = forde.parse_args(["--dataset", "cifar10", "--model", "resnet9", "--width", "0.05"])
    new = dict(repulsion="input_gradient", kernel="pca", cauchy=0.0, members=4, chunk=0)
    return argparse.Namespace(**{**vars(args), **new, **changes})


def ensemble(args, seed=0, dtype=torch.float64):
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
    return nets.to(dtype)


def make_batch(seed=1, size=BATCH, dtype=torch.float64):
    torch.manual_seed(seed)
    x, y = torch.randn(size, 3, SIDE, SIDE, dtype=dtype), torch.arange(size) % CLASSES
    return SimpleNamespace(images=x, labels=y, global_size=size)


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


def same_pad(x, kernel, stride):
    """x padded by hand as XLA pads: ceil(n / stride) outputs, the odd zero at the end."""
    h, w = x.shape[2:]
    pads = []
    for n in (h, w):
        need = max((math.ceil(n / stride) - 1) * stride + kernel - n, 0)
        pads.append((need // 2, need - need // 2))
    out = x.new_zeros(*x.shape[:2], h + sum(pads[0]), w + sum(pads[1]))
    out[:, :, pads[0][0]:pads[0][0] + h, pads[1][0]:pads[1][0] + w] = x
    return out


def plain_conv(x, weight, stride=1):
    if weight.shape[-1] == 1:  # by its definition: PyTorch 2.14's strided 1x1 is unsafe on CPUs
        return torch.einsum("bchw,oc->bohw", x[:, :, ::stride, ::stride], weight[:, :, 0, 0])
    return F.conv2d(same_pad(x, weight.shape[-1], stride), weight, None, stride)


def plain_norm(x, weight, bias, constant=False):
    mean, square = x.mean((0, 2, 3)), x.square().mean((0, 2, 3))
    var = square - mean.square()
    if constant:  # no terms across the examples
        mean, var = mean.detach(), var.detach()
    c = lambda t: t[:, None, None]
    return c(weight) * (x - c(mean)) / c(var + 1e-5).sqrt() + c(bias)


def plain_network(p, x, constant=False):
    """The logits and features of a ResNet of basic blocks, from its parameters by name."""
    norm = lambda h, name: plain_norm(h, p[f"{name}.weight"], p[f"{name}.bias"], constant)
    h = F.relu(norm(plain_conv(x, p["stem.weight"]), "norm"))
    for k in range(4):
        stride, at = 2 if k else 1, f"blocks.{k}"
        z = F.relu(norm(plain_conv(h, p[f"{at}.conv1.weight"], stride), f"{at}.norm1"))
        z = norm(plain_conv(z, p[f"{at}.conv2.weight"]), f"{at}.norm2")
        if f"{at}.shortcut.0.weight" in p:
            h = norm(plain_conv(h, p[f"{at}.shortcut.0.weight"], stride), f"{at}.shortcut.1")
        h = F.relu(z + h)
    features = h.mean((2, 3))
    return features @ p["head.weight"].T + p["head.bias"], features


def plain_gradients(members, x, y, mistake=""):
    """Logits, and input gradients g [M, B, D] with their graph, one member after the other."""
    all_logits, all_g = [], []
    for p in members:
        z = x.clone().requires_grad_()
        logits = plain_network(p, z, mistake == "no cross terms")[0]
        score = logits[range(len(y)), y]
        if mistake == "log-probability":
            score = logits.log_softmax(1)[range(len(y)), y]
        elif mistake == "predicted class":
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
        vectors, values = random_basis()
        self.vectors, self.roots, kept = vectors, values.sqrt(), DIM
        if kernel == "pca truncated":
            kept = 60
            self.roots = torch.where(torch.arange(DIM) < kept, self.roots, 0.0)
        elif kernel == "identity":
            self.vectors = self.roots = None
        elif kernel.startswith("tuned"):
            a = self.args.alpha
            paper = not kernel.endswith("website")
            self.args.tuned_formula = "paper" if paper else "website"
            self.roots = (1 / (a / values + 1 - a) if paper else a * values + 1 - a).sqrt()
        self.kernel = forde.kernel_map(self.args.kernel, vectors[:, :kept], values[:kept],
                                       self.args.alpha, self.args.tuned_formula)

    def members(self):
        """The oracle's copies of the parameters, and the same in a flat list."""
        members = [{k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()}
                   for net in self.nets]
        return members, [p for member in members for p in member.values()]

    def oracle(self, mistake=""):
        """(cross entropy summed over members, R, their parameter gradients)."""
        members, flat = self.members()
        x, y = self.batch.images, self.batch.labels
        logits, g = plain_gradients(members, x, y, mistake)
        ce = sum(F.cross_entropy(f, y, label_smoothing=self.args.label_smoothing) for f in logits)
        r = plain_repulsion(g, self.vectors, self.roots, mistake=mistake)
        grads = [torch.autograd.grad(v, flat, retain_graph=True, allow_unused=True)
                 for v in (ce, r)]
        filled = [[torch.zeros_like(p) if t is None else t for t, p in zip(part, flat)]
                  for part in grads]
        return ce.item(), r.item(), *filled

    def step(self, repel=True, vectorise="loop", chunk=0):
        """(outputs of ensemble_step, parameter gradients)."""
        args = argparse.Namespace(**{**vars(self.args), "vectorise": vectorise, "chunk": chunk})
        size, particles = chunk or args.members, forde.PARTICLES[args.repulsion]
        self.nets.train()
        chunks = [forde.Members(self.nets[i:i + size], vectorise, particles, args.grad_of)
                  for i in range(0, args.members, size)]
        self.nets.zero_grad()
        out = forde.ensemble_step(chunks, self.batch, args, WORLD, self.kernel, repel)
        return out, [p.grad.clone() for p in self.nets.parameters()]

    def repulsion_gradients(self):
        return [a - b for a, b in zip(self.step()[1], self.step(False)[1])]


KERNELS = [("pca", 3), ("pca truncated", 3), ("identity", 4), ("tuned", 3), ("tuned website", 4)]
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
@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
@pytest.mark.parametrize("kernel, members", KERNELS)
def test_parameter_gradients_are_those_of_the_loops(kernel, members, vectorise, chunk):
    this = case(kernel, members)
    ce, r, ce_grads, r_grads = this.right
    (loss, value, median, logits), grads = this.step(vectorise=vectorise, chunk=chunk)
    assert loss.item() / BATCH == pytest.approx(ce, rel=1e-12)
    assert value.item() == pytest.approx(r, rel=1e-9)
    assert relative(grads, [a + b for a, b in zip(ce_grads, r_grads)]) < 1e-9
    alone = this.step(False, vectorise, chunk)[1]
    assert relative(alone, ce_grads) < 1e-9
    assert relative([a - b for a, b in zip(grads, alone)], r_grads) < 1e-9
    assert median > 0 and logits.shape == (members, BATCH, CLASSES)


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
def test_log_probability_option_in_channels_last_memory(vectorise):
    this = Case("pca", 3, grad_of="logprob", repulsion_coef=2.5)
    _, _, ce_grads, r_grads = this.oracle("log-probability")
    last = torch.channels_last
    this.nets = this.nets.to(memory_format=last)
    this.batch.images = this.batch.images.to(memory_format=last)
    grads = this.step(vectorise=vectorise)[1]
    assert relative(grads, [a + 2.5 * b for a, b in zip(ce_grads, r_grads)]) < 1e-9


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
@pytest.mark.parametrize("norm", [False, True])
def test_regression_repels_in_the_gradients_of_its_output(norm, vectorise, chunk):
    this = Case("identity", 4)
    this.args.__dict__.update(model="mlp", hidden=[6, 5], norm=norm, width=1.0, layers="torch")
    make = lambda: forde.make_network(this.args, 1, (2, 1, 1)).double()
    this.nets = nn.ModuleList(make() for _ in range(4))
    x, y = torch.randn(BATCH, 2, 1, 1, dtype=torch.float64), torch.randn(BATCH).double()
    this.batch = SimpleNamespace(images=x, labels=y, global_size=BATCH)
    members, flat = this.members()
    z = x.flatten(1).requires_grad_()
    outputs = []
    for p in members:
        h = z
        for k in range(2):
            h = h @ p[f"linears.{k}.weight"].T + p[f"linears.{k}.bias"]
            if norm:
                scale, offset = p[f"norms.{k}.weight"], p[f"norms.{k}.bias"]
                h = plain_norm(h[:, :, None, None], scale, offset)[:, :, 0, 0]
            h = h.relu()
        outputs.append((h @ p["head.weight"].T + p["head.bias"])[:, 0])
    g = torch.stack([torch.autograd.grad(f.sum(), z, create_graph=True)[0] for f in outputs])
    r, loss = plain_repulsion(g), sum((f - y).square().mean() / 0.02 for f in outputs)
    right = [torch.autograd.grad(v, flat, retain_graph=True, allow_unused=True,
                                 materialize_grads=True) for v in (loss, r)]
    (total, value, _, _), grads = this.step(True, vectorise, chunk)
    alone = this.step(False, vectorise, chunk)[1]
    assert value.item() == pytest.approx(r.item(), rel=1e-9)
    assert total.item() / BATCH == pytest.approx(loss.item(), rel=1e-12)
    assert relative(alone, right[0]) < 1e-9
    assert relative([a - b for a, b in zip(grads, alone)], right[1]) < 1e-8


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
def test_label_smoothing_touches_the_cross_entropy_only(vectorise):
    smooth, plain = Case("identity", 3, label_smoothing=0.2), Case("identity", 3)
    ce, _, ce_grads, r_grads = smooth.oracle()
    (loss, _, _, _), grads = smooth.step(vectorise=vectorise)
    assert loss.item() / BATCH == pytest.approx(ce, rel=1e-12)
    assert relative(grads, [a + b for a, b in zip(ce_grads, r_grads)]) < 1e-9
    assert relative(r_grads, plain.oracle()[3]) < 1e-12
    assert relative(ce_grads, plain.oracle()[2]) > 0.01


# Section 10 of the specification: the mistake, and the relative error of the repulsion's parameter
# gradient that it must at least make with the PCA kernel (M = 3) and the identity's (M = 4).
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
    this = case(kernel, members)
    if not hasattr(this, "own"):
        this.own = this.repulsion_gradients(), this.step()[0][1].item()
    (own, value), (_, wrong, _, grads) = this.own, this.oracle(mistake)
    assert relative(own, this.right[3]) < 1e-9
    assert relative(grads, own) > size
    if "not constant" in mistake:  # only the gradient is wrong
        assert wrong == pytest.approx(value, rel=1e-9)
    elif mistake == "no 1/B":
        assert wrong == pytest.approx(BATCH * value, rel=1e-9)
    elif mistake == "mean over members":
        assert wrong == pytest.approx(value / members, rel=1e-9)
    else:
        assert abs(wrong / value - 1) > 1e-4


def test_identity_kernel_does_not_see_the_order_of_pixels():
    this = case("identity", 4)
    assert relative(this.oracle("height, width, channels")[3], this.right[3]) < 1e-9


# ---- Repulsion ----------------------------------------------------------------------------------


def small_kernels(dim=12):
    """{name: (A of forde.py, vectors and roots of the oracle)} on 12 dimensions."""
    vectors, values = random_basis(dim)
    tuned = 1 / (0.4 / values + 0.6)
    some = torch.where(torch.arange(dim) < 5, values, 0)
    return {"identity": (None, None, None),
            "pca": (forde.kernel_map("pca", vectors, values), vectors, values.sqrt()),
            "pca truncated": (forde.kernel_map("pca", vectors[:, :5], values[:5]), vectors,
                              some.sqrt()),
            "tuned": (forde.kernel_map("tuned", vectors, values, 0.4), vectors, tuned.sqrt()),
            "website": (forde.kernel_map("tuned", vectors, values, 0.4, "website"), vectors,
                        (0.4 * values + 0.6).sqrt())}


def particles(members, batch=4, dim=12, spread=1.0):
    centre = torch.randn(batch, dim, dtype=torch.float64)
    return centre + spread * torch.randn(members, batch, dim, dtype=torch.float64)


def gradient_of(function, g):
    g = g.detach().clone().requires_grad_()
    value = function(g)
    return value.item(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("eps", [1e-24, 0.5])
@pytest.mark.parametrize("members", [2, 3, 4, 5])
@pytest.mark.parametrize("kernel", ["identity", "pca", "pca truncated", "tuned", "website"])
def test_repulsion_and_its_closed_form_are_the_loops(kernel, members, eps):
    a, vectors, roots = small_kernels()[kernel]
    g = particles(members)
    right, right_grad = gradient_of(lambda g: plain_repulsion(g, vectors, roots, eps), g)
    value, grad = gradient_of(lambda g: forde.repulsion(g, a, eps), g)
    closed, closed_grad, median = forde.repulsion_gradient(g, a, eps)
    assert value == pytest.approx(right, rel=1e-9) == closed.item()
    assert relative(grad, right_grad) < 1e-9 and relative(closed_grad, right_grad) < 1e-9
    s = forde.unit_rows(g, eps)[0] @ (torch.eye(12).double() if a is None else a)
    medians = [np.median([(s[i, b] - s[j, b]).square().sum().item() for i in range(members)])
               for j in range(members) for b in range(4)]
    assert median.item() == pytest.approx(np.mean(medians), rel=1e-9)


@pytest.mark.parametrize("kernel", ["identity", "pca", "tuned"])
def test_two_members_have_a_constant_value_but_a_force(kernel):
    a = small_kernels()[kernel][0]
    value, grad, _ = forde.repulsion_gradient(particles(2), a)
    assert value.item() == pytest.approx(2 * math.log(1.25) / 4, rel=1e-9)
    assert grad.norm(dim=-1).min() > 1e-3
    assert forde.repulsion(particles(2), a).item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("members", [2, 3, 10])
def test_equal_or_zero_members_are_at_the_maximum_without_a_force(members, zero):
    g = (0.0 if zero else 1.0) * particles(1).repeat(members, 1, 1)
    for a in (None, small_kernels()["pca"][0]):
        value, grad = gradient_of(lambda g: forde.repulsion(g, a), g)
        closed, closed_grad, median = forde.repulsion_gradient(g, a)
        assert value == pytest.approx(members * math.log(members) / 4, rel=1e-12) == closed.item()
        assert (grad == 0).all() and (closed_grad == 0).all() and median == 0


@pytest.mark.parametrize("members", [2, 3, 4, 7])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
def test_value_is_within_its_bounds(members, spread):
    for a, *_ in small_kernels().values():
        value = forde.repulsion(particles(members, spread=spread), a)
        assert 0 <= value <= members * math.log(members) / 4


def test_force_is_orthogonal_to_the_gradient_and_inverse_to_its_length():
    for a, *_ in small_kernels().values():
        g, scales = particles(4), torch.tensor([1e-3, 0.1, 7.0, 1e4]).double()[:, None, None]
        value, grad, median = forde.repulsion_gradient(g, a)
        assert ((grad * g).sum(-1)).abs().max() < 1e-12 * grad.norm() * g.norm()
        for c in (1e-3, 50.0, scales):
            again, scaled, same = forde.repulsion_gradient(c * g, a)
            assert again.item() == pytest.approx(value.item(), rel=1e-12)
            assert same.item() == pytest.approx(median.item(), rel=1e-12)
            assert relative(scaled * c, grad) < 1e-10


def test_common_factor_and_signs_of_the_basis_have_no_effect():
    vectors, values = random_basis(12)
    g = particles(4)
    value, grad, median = forde.repulsion_gradient(g, forde.kernel_map("pca", vectors, values))
    for factor, signs in ((50.0, 1.0), (0.02, 1.0), (1.0, (torch.randn(12) > 0) * 2.0 - 1)):
        a = forde.kernel_map("pca", vectors * signs, factor * values)
        again, same, scaled = forde.repulsion_gradient(g, a)
        assert again.item() == pytest.approx(value.item(), rel=1e-9)
        assert relative(same, grad) < 1e-9
        assert scaled.item() == pytest.approx(factor * median.item(), rel=1e-9)


def test_permuted_members_have_permuted_forces():
    order = torch.tensor([2, 0, 3, 1])
    for a, *_ in small_kernels().values():
        g = particles(4)
        value, grad, _ = forde.repulsion_gradient(g, a)
        again, permuted, _ = forde.repulsion_gradient(g[order], a)
        assert again.item() == pytest.approx(value.item(), rel=1e-12)
        assert relative(permuted, grad[order]) < 1e-12 < relative(permuted, grad)


def test_identity_kernel_does_not_see_a_rotation_and_pca_does():
    rotation, (vectors, values) = random_basis(12, 5)[0], random_basis(12)
    for a, same in ((None, True), (forde.kernel_map("pca", vectors, values), False)):
        g = particles(4)
        value, grad, _ = forde.repulsion_gradient(g, a)
        again, rotated, _ = forde.repulsion_gradient(g @ rotation, a)
        assert (abs(again / value - 1) < 1e-12) == same
        assert (relative(rotated, grad @ rotation) < 1e-12) == same


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
    assert (forde.median_bandwidth(0 * tiny) == 1e-12).all()


@pytest.mark.parametrize("kernel", ["identity", "pca"])
def test_distances_of_nearly_equal_members_keep_their_digits(kernel):
    a = small_kernels()[kernel][0]
    g = particles(4, spread=5e-4).float()
    narrow, wide = ((n if a is None else n @ a.to(n)) for n in
                    (forde.unit_rows(g)[0], forde.unit_rows(g.double())[0]))
    right, off = forde.squared_distances(wide), ~torch.eye(4, dtype=torch.bool)
    assert right[off].max() < 1e-4 * wide.square().sum(-1).min()
    error = (forde.squared_distances(narrow) / right - 1)[off].abs().max()
    gram = torch.einsum("ibd,jbd->ijb", narrow, narrow)
    norms = narrow.square().sum(-1)
    worse = ((norms[:, None] + norms - 2 * gram) / right - 1)[off].abs().max()
    assert error < 5e-3 and worse > 5 * error
    value, grad, _ = forde.repulsion_gradient(g, None if a is None else a.float())
    exact, right_grad, _ = forde.repulsion_gradient(g.double(), a)
    assert value.item() == pytest.approx(exact.item(), rel=1e-3)
    assert relative(grad.double(), right_grad) < 1e-2


def test_one_feature_has_no_force_and_two_have():
    for dim in (1, 2):  # a unit gradient of one feature is a sign
        value, grad = gradient_of(forde.repulsion, particles(4, dim=dim))
        closed = forde.repulsion_gradient(particles(4, dim=dim))[1]
        assert (grad.abs().max() > 1e-3, closed.abs().max() > 1e-3) == (dim == 2, dim == 2)


# ---- Unit rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-24, 0.3])
def test_unit_rows_add_eps_under_the_root(eps):
    g = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    n, length = forde.unit_rows(g, eps)
    right = torch.stack([row / (row @ row + eps).sqrt() for row in g])
    assert relative(n, right) < 1e-14
    assert relative(length[:, 0], (g.square().sum(1) + eps).sqrt()) < 1e-14
    v = torch.randn_like(g)
    assert relative(torch.autograd.grad(n, g, v)[0], torch.autograd.grad(right, g, v)[0]) < 1e-12


@pytest.mark.parametrize("tiny", [0.0, 1e-20])
def test_rows_without_length_are_constants_and_change_no_other(tiny):
    for a, vectors, roots in small_kernels().values():
        g = particles(4)
        g[1, 2] = tiny * torch.randn(12)
        dead = torch.zeros(4, 4, 1, dtype=torch.bool)
        dead[1, 2] = True
        right, right_grad = gradient_of(
            lambda g: plain_repulsion(torch.where(dead, torch.zeros_like(g), g), vectors, roots), g)
        value, grad = gradient_of(lambda g: forde.repulsion(g, a), g)
        closed, closed_grad, _ = forde.repulsion_gradient(g, a)
        assert value == pytest.approx(right, rel=1e-9) == closed.item()
        for t in (grad, closed_grad):
            assert t.isfinite().all() and (t[1, 2] == 0).all()
            assert relative(t, torch.where(dead, 0, right_grad)) < 1e-9


def test_rows_at_the_guard():
    g = torch.tensor([[0.9e-12, 0], [1.1e-12, 0]], dtype=torch.float64, requires_grad=True)
    n, length = forde.unit_rows(g)
    assert n[0, 0] == 0 and length[0] == math.inf
    assert n[1, 0].item() == pytest.approx(1.1 / math.sqrt(1.21 + 1), rel=1e-12)
    grad, = torch.autograd.grad(n.sum(), g)
    assert (grad[0] == 0).all() and grad[1, 1] > 1e11


# ---- Invariants of a step -----------------------------------------------------------------------


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
def test_bias_of_the_head_feels_no_repulsion(vectorise):
    this = case("pca", 3)
    names = [name for name, _ in this.nets.named_parameters()]
    with_r, without = this.step(True, vectorise)[1], this.step(False, vectorise)[1]
    changed = {n.split(".", 1)[1] for n, a, b in zip(names, with_r, without)
               if not torch.equal(a, b)}
    # neither do the offsets of the last block: the gradient has its ReLU's mask only
    assert changed == {n for n, _ in this.nets[0].named_parameters()} - {
        "head.bias", "blocks.3.norm2.bias", "blocks.3.shortcut.1.bias"}


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
@pytest.mark.parametrize("members", [3, 4])
def test_published_initialisation_starts_at_the_maximum_without_a_force(members, vectorise):
    this = Case("pca", members)
    torch.manual_seed(0)
    this.nets = nn.ModuleList(forde.make_network(this.args, CLASSES, (3, SIDE, SIDE))
                              for _ in range(members)).double()
    (_, value, median, logits), grads = this.step(True, vectorise)
    alone = this.step(False, vectorise)[1]
    assert value.item() / members == pytest.approx(math.log(members) / BATCH, rel=1e-12)
    assert median == 0 and (logits == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(grads, alone))
    assert sum(g.abs().sum() for g in grads) > 0


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
def test_a_step_moves_the_running_statistics_once(vectorise, chunk):
    this = Case("pca", 3)
    this.step(True, vectorise, chunk)
    for net in this.nets:
        h = F.conv2d(this.batch.images, net.stem.weight, padding=1)
        assert all(m.steps == 1 for m in forde.norms_of(net)) and len(forde.norms_of(net)) == 12
        assert relative(net.norm.running_mean, h.mean((0, 2, 3))) < 1e-9
        assert relative(net.norm.running_var, h.var((0, 2, 3), correction=0)) < 1e-9


# ---- Layers -------------------------------------------------------------------------------------


def wide(*shape, layout="contiguous"):
    """A random float64 leaf that requires a gradient, in channels-last memory or not."""
    last = layout == "channels_last" and len(shape) == 4
    t = torch.randn(*shape, dtype=torch.float64)
    return t.contiguous(memory_format=torch.channels_last if last else
                        torch.contiguous_format).requires_grad_()


LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (7, 7), (7, 10), (1, 2)])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_same_padding_is_xlas(kernel, stride, size, fused):
    conv = forde.Conv2d(2, 3, kernel, stride).double()
    conv.fused = fused
    x = wide(2, 2, *size)
    y, right = conv(x), plain_conv(x, conv.weight, stride)
    assert y.shape[2:] == tuple(-(-n // stride) for n in size)
    v = torch.randn_like(y)
    for a, b in zip((y, *torch.autograd.grad(y, (x, conv.weight), v)),
                    (right, *torch.autograd.grad(right, (x, conv.weight), v))):
        assert relative(a, b) < 1e-13
    with torch.no_grad():
        assert relative(conv(x), right) < 1e-13


@pytest.mark.parametrize("size", [(8, 8), (7, 10)])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_torch_padding_is_pytorchs(kernel, stride, size):
    conv = forde.Conv2d(2, 3, kernel, stride, same=False).double()
    reference = nn.Conv2d(2, 3, kernel, stride, padding=kernel // 2, bias=False).double()
    reference.load_state_dict(conv.state_dict())
    x = wide(2, 2, *size)
    assert relative(conv(x), reference(x)) < 1e-13
    if (kernel, stride, size) == (3, 2, (8, 8)):
        assert relative(plain_conv(x, conv.weight, 2), reference(x)) > 0.1


def input_gradient(layer):
    """The map from (x, further inputs, v) to the gradient of <layer(x, ...), v> in x."""
    return lambda x, *rest: torch.autograd.grad(layer(x, *rest[:-1]), x, rest[-1],
                                                create_graph=True)[0]


def check_derivatives(layer, plain, inputs, shape, layout):
    """First and second derivatives of `layer` against differences, and against those of `plain`."""
    torch.autograd.gradcheck(layer, inputs, check_undefined_grad=False)
    v, u = wide(*shape, layout=layout), torch.randn_like(inputs[0])
    torch.autograd.gradcheck(input_gradient(layer), (*inputs, v), check_undefined_grad=False)
    assert relative(layer(*inputs), plain(*inputs)) < 1e-13
    for f in (lambda layer: torch.autograd.grad(layer(*inputs), inputs, v),
              lambda layer: torch.autograd.grad(input_gradient(layer)(*inputs, v), (*inputs, v), u,
                                                allow_unused=True)):
        own, right = f(layer), f(plain)
        assert relative(*zip(*[(a, b) for a, b in zip(own, right) if b is not None])) < 1e-11
        assert all(a is None or not a.any() for a, b in zip(own, right) if b is None)


def plain_batch_norm(x, w, b):
    return F.batch_norm(x, None, None, w, b, True, 0.0, 1e-5)


def normalise(x, w, b):
    return forde.Normalise.apply(x, w, b, 1e-5)[0]


@LAYOUTS
@pytest.mark.parametrize("stride, padding", [(1, 1), (2, 0), (2, 1)])
@pytest.mark.parametrize("c_in, c_out", [(2, 3), (1, 1)])
def test_convolution_is_twice_differentiable(c_in, c_out, stride, padding, layout):
    stride, padding = (stride,) * 2, (padding,) * 2
    own = lambda x, w: forde.Convolve.apply(x, w, stride, padding)
    plain = lambda x, w: F.conv2d(x, w, None, stride, padding)
    x, w = wide(2, c_in, 5, 4, layout=layout), wide(c_out, c_in, 3, 3, layout=layout)
    check_derivatives(own, plain, (x, w), plain(x, w).shape, layout)


@LAYOUTS
@pytest.mark.parametrize("channels, height, width", [(3, 3, 2), (1, 3, 2), (3, 1, 1)])
def test_batch_norm_is_twice_differentiable(channels, height, width, layout):
    shape = 4, channels, height, width
    x, w, b = wide(*shape, layout=layout), wide(channels), wide(channels)
    check_derivatives(normalise, plain_batch_norm, (x, w, b), shape, layout)
    _, mean, invstd = forde.Normalise.apply(x, w, b, 1e-5)
    assert relative(mean, x.mean((0, 2, 3))) < 1e-13
    assert relative(invstd ** -2, x.var((0, 2, 3), correction=0) + 1e-5) < 1e-13


@LAYOUTS
@pytest.mark.parametrize("channels", [3, 1])
def test_forward_derivatives_and_their_gradients(channels, layout):
    x, t = wide(4, channels, 5, 5, layout=layout), wide(4, channels, 5, 5, layout=layout)
    w, b = wide(channels), wide(channels)
    filters = wide(2, channels, 3, 3)
    layers = [(lambda x, w, b: forde.Convolve.apply(x, w, (2, 2), (1, 1)),
               lambda x, w, b: F.conv2d(x, w, None, 2, 1), filters),
              (normalise, plain_batch_norm, w)]
    for own, plain, weight in layers:
        with forward_ad.dual_level():
            y = forward_ad.unpack_dual(own(forward_ad.make_dual(x, t), weight, b))
        right = torch.func.jvp(lambda x: plain(x, weight, b), (x,), (t,))
        assert relative(list(y), list(right)) < 1e-12
        cotangent = torch.randn_like(right[1])
        # <v, J t> has the gradients of <J^T v, t>
        back, = torch.autograd.grad(plain(x, weight, b), x, cotangent, create_graph=True)
        for at in (weight, t) if weight is filters else (weight, t, x):
            own_grad, = torch.autograd.grad(y.tangent, at, cotangent, retain_graph=True)
            right_grad, = torch.autograd.grad((back * t).sum(), at, retain_graph=True)
            assert relative(own_grad, right_grad) < 1e-11


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (6, 3)])
def test_batch_norm_is_the_librarys(shape, fused):
    layer, x = forde.BatchNorm(3).double(), 3 + 2 * wide(*shape)
    layer.fused = fused
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    parts = layer.weight, layer.bias
    assert relative(layer(x), F.batch_norm(x, None, None, *parts, True, 0.1, 1e-5)) < 1e-12
    layer.eval()
    right = F.batch_norm(x, layer.running_mean, layer.running_var, *parts, False, 0.1, 1e-5)
    assert relative(layer(x), right) < 1e-12


@pytest.mark.parametrize("published", [True, False])
def test_running_statistics(published):
    layer, reference = forde.BatchNorm(3, published).double(), nn.BatchNorm2d(3).double()
    means, variances = [], []
    for step in range(1, 5):
        x = step + step * torch.randn(4, 3, 2, 2, dtype=torch.float64)
        reference(x)
        layer(x)
        layer.track(*layer.batch_statistics, layer.count)
        means.append(x.mean((0, 2, 3)))
        variances.append(x.var((0, 2, 3), correction=0))
        weights = [0.1 * 0.9 ** (step - k - 1) / (1 - 0.9 ** step) for k in range(step)]
        right = [sum(w * t for w, t in zip(weights, rows)) for rows in (means, variances)]
        if not published:
            right = [reference.running_mean, reference.running_var]
        assert relative([layer.running_mean, layer.running_var], right) < 1e-12
    once = forde.BatchNorm(3).double()
    once(x)
    once.track(*once.batch_statistics, once.count)
    assert relative([once.running_mean, once.running_var], [means[-1], variances[-1]]) < 1e-12


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
def test_bf16_gives_finite_float32_gradients_near_the_right_ones(vectorise):
    this = Case("identity", 3, amp="bf16")
    this.nets, this.batch = this.nets.float(), make_batch(dtype=torch.float32)
    (_, value, _, logits), grads = this.step(vectorise=vectorise)
    this.args.amp = "off"
    (_, exact, _, _), right = this.step(vectorise=vectorise)
    assert logits.dtype == value.dtype == torch.float32
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    assert value != exact and value.item() == pytest.approx(exact.item(), rel=0.05)
    assert 0 < relative(grads, right) < 0.3


# ---- Model --------------------------------------------------------------------------------------


def count(model, classes, shape=(3, 32, 32), **changes):
    args = options(**{**dict(model=model, width=1.0), **changes})
    with torch.device("meta"):
        net = forde.make_network(args, classes, shape)
    return sum(p.numel() for p in net.parameters()), len(list(net.parameters()))


def test_parameter_counts():
    assert count("resnet18", 10) == (11_173_962, 62)
    assert count("resnet18", 100) == (11_220_132, 62)
    assert count("preact_resnet18", 200, (3, 64, 64)) == (11_269_640, 56)


class TorchBlock(nn.Module):
    def __init__(self, c_in, c_out, stride, pre):
        super().__init__()
        self.pre, change = pre, stride != 1 or c_in != c_out
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(c_in if pre else c_out), nn.BatchNorm2d(c_out)
        if change and pre:
            self.projection = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        elif change:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False),
                                          nn.BatchNorm2d(c_out))

    def forward(self, x):
        if self.pre:
            h = self.norm1(x).relu()
            skip = self.projection(h) if hasattr(self, "projection") else x
            return self.conv2(self.norm2(self.conv1(h)).relu()) + skip
        h = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (h + (self.shortcut(x) if hasattr(self, "shortcut") else x)).relu()


class TorchResNet(nn.Module):
    """The networks in PyTorch's layers, the parameters named as in forde.py."""

    def __init__(self, pre, stem, channels, depth, classes):
        super().__init__()
        self.pre, blocks, last = pre, [], stem
        self.stem = nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        for k, c in enumerate(channels):
            for i in range(depth[k]):
                blocks.append(TorchBlock(last, c, 2 if k > 0 and i == 0 else 1, pre))
                last = c
        self.norm = nn.BatchNorm2d(last if pre else stem)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(last, classes)

    def forward(self, x):
        x = self.stem(x)
        x = self.norm(self.blocks(x)).relu() if self.pre else self.blocks(self.norm(x).relu())
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("model, pre, depth", [
    ("resnet9", False, (1, 1, 1, 1)), ("resnet18", False, (2, 2, 2, 2)),
    ("resnet34", False, (3, 4, 6, 3)), ("preact_resnet18", True, (2, 2, 2, 2)),
    ("wrn_16_4", True, (2, 2, 2))])
def test_networks_are_those_of_pytorchs_layers(model, pre, depth):
    wide_net = model == "wrn_16_4"
    channels = (64, 128, 256, 512)[:len(depth)]
    with torch.device("meta"):
        full = TorchResNet(pre, 16 if wide_net else 64, channels, depth, 10)
    own = list(full.parameters())
    assert count(model, 10) == (sum(p.numel() for p in own), len(own))
    some = [round(c * 0.05) for c in channels]
    reference = TorchResNet(pre, 16 if wide_net else some[0], some, depth, CLASSES).double()
    net = forde.make_network(options(model=model, layers="torch"), CLASSES, (3, 8, 8)).double()
    net.load_state_dict({**net.state_dict(), **dict(reference.named_parameters())})
    x = make_batch().images
    assert relative(net(x)[0], reference(x)) < 1e-10
    for norm in forde.norms_of(net):
        norm.track(*norm.batch_statistics, norm.count)
    assert relative(net.eval()(x)[0], reference.eval()(x)) < 1e-9
    logits, features = net(x)
    assert relative(net.head(features), logits) < 1e-14


@pytest.mark.parametrize("norm", [True, False])
def test_mlp(norm):
    args = options(model="mlp", hidden=[6, 7], norm=norm, width=1.0)
    net = forde.make_network(args, 4, (5, 1, 1)).double()
    assert all((m.bias == 0).all() for m in net.linears) and (net.head.weight == 0).all()
    nn.init.normal_(net.head.weight)
    x = h = torch.randn(9, 5, 1, 1, dtype=torch.float64)
    h = h.flatten(1)
    for k in range(2):
        h = h @ net.linears[k].weight.T + net.linears[k].bias
        h = ((h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() if norm else h).relu()
    assert relative(list(net(x)), [h @ net.head.weight.T, h]) < 1e-12


@pytest.mark.parametrize("model", ["resnet18", "preact_resnet18", "wrn_16_4"])
def test_published_initialisation(model):
    net = forde.make_network(options(model=model, width=0.5), 10, (3, 32, 32))
    large = 0
    for name, p in net.named_parameters():
        if p.ndim == 4:
            unit = p * p[0].numel() ** 0.5
            assert 1.5 < unit.abs().max() <= 2.0001
            if p.numel() > 30_000:
                large += 1
                assert abs(unit.std() - 0.8796) < 0.012 and abs(unit.mean()) < 0.02
        else:
            assert (p == (1 if "norm" in name and "weight" in name or ".1.weight" in name else 0)
                    ).all(), name
    assert large > 4


def test_torch_layers_have_pytorchs_initialisation():
    net = forde.make_network(options(model="resnet18", layers="torch", width=0.5), 10, (3, 32, 32))
    w = net.blocks[-1].conv2.weight * (256 * 9) ** 0.5
    assert w.abs().max() <= 1.0001 and abs(w.std() - 3 ** -0.5) < 0.01  # uniform
    assert net.head.weight.any() and net.head.bias.any()


def test_learning_rate_table():
    args = options(epochs=300, lr=0.1, lr_ratio=0.01, schedule="published")
    table = {0: .1, 149: .1, 150: .1, 151: .099175, 210: .0505, 269: .001825, 270: .001, 299: .001}
    for epoch, lr in table.items():
        for step in (0, 1, 389):  # constant within an epoch
            assert forde.learning_rate(390 * epoch + step, 390, args) == pytest.approx(lr, rel=1e-9)
    tiny = options(epochs=150, lr=0.1, lr_ratio=0.001, schedule="published")
    assert forde.learning_rate(149 * 7, 7, tiny) == pytest.approx(1e-4)
    assert forde.learning_rate(105 * 7, 7, tiny) == pytest.approx(0.1 * (1 - 0.999 / 2))


def test_optimiser_is_nesterovs_with_decay_on_everything():
    args = options(members=2, lr=0.1, momentum=0.9, weight_decay=0.05)
    nets = ensemble(args)
    optimiser = forde.make_optimiser(nets, args)
    theta = [p.detach().clone() for p in nets.parameters()]
    v = [torch.zeros_like(p) for p in theta]
    for _ in range(3):
        grads = [torch.randn_like(p) for p in theta]
        for p, g in zip(nets.parameters(), grads):
            p.grad = g.clone()
        optimiser.step()
        for k, g in enumerate(grads):
            g = g + 0.05 * theta[k]
            v[k] = 0.9 * v[k] + g
            theta[k] = theta[k] - 0.1 * (0.9 * v[k] + g)
    assert relative(list(nets.parameters()), theta) < 1e-13


# ---- Kernels and bases --------------------------------------------------------------------------


def test_pca_is_numpys_and_can_be_truncated():
    x = np.random.default_rng(0).standard_normal((40, 9)) * np.arange(1, 10)[::-1] + 2
    vectors, values = forde.pca(torch.from_numpy(x.T @ x / 39))
    singular, right = np.linalg.svd(x)[1:]
    np.testing.assert_allclose(values, singular ** 2 / 39, rtol=1e-9)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(9), atol=1e-12)
    np.testing.assert_allclose(abs(vectors.numpy().T @ right.T), np.eye(9), atol=1e-9)
    some, few = forde.pca(torch.from_numpy(x.T @ x / 39), 4)
    assert torch.equal(some, vectors[:, :4]) and torch.equal(few, values[:4])


def test_pca_has_no_negative_eigenvalues():
    x = torch.randn(3, 20, dtype=torch.float64)  # rank 3 of 20
    values = forde.pca(x.T @ x)[1]
    assert (values >= 0).all() and (values[:3] > 1).all() and values[3:].max() < 1e-12


@pytest.mark.parametrize("formula", ["paper", "website"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 1.0])
def test_kernel_map_is_a_root_of_the_inverse_covariance(alpha, formula):
    vectors, values = random_basis(7)
    u, lam, one = vectors.numpy(), np.diag(values), np.eye(7)
    if formula == "paper":
        right = np.linalg.inv(alpha * np.linalg.inv(u @ lam @ u.T) + (1 - alpha) * one)
    else:
        right = alpha * u @ lam @ u.T + (1 - alpha) * one
    a = forde.kernel_map("tuned", vectors, values, alpha, formula)
    a = torch.eye(7).double() if a is None else a
    np.testing.assert_allclose(a @ a.T, right, rtol=1e-10, atol=1e-10)
    precision = forde.tuned_precision(values, alpha, formula)
    np.testing.assert_allclose(np.sort(precision)[::-1], np.linalg.eigvalsh(right)[::-1])
    pca = forde.kernel_map("pca", vectors, values, alpha, formula)  # whatever alpha is
    np.testing.assert_allclose(pca @ pca.T, u @ lam @ u.T, rtol=1e-10, atol=1e-10)
    assert forde.kernel_map("identity", vectors, values, alpha) is None


def test_tuned_formulas_differ_between_their_ends_only():
    values = random_basis(7)[1]
    for alpha, same in ((0.0, True), (0.2, False), (0.8, False), (1.0, True)):
        paper, website = (forde.tuned_precision(values, alpha, f) for f in ("paper", "website"))
        assert torch.allclose(paper, website) == same
        assert (paper <= website * (1 + 1e-12)).all()  # harmonic and arithmetic means
    assert (forde.tuned_precision(torch.zeros(2), 0.4) == 0).all()
    small = torch.tensor([1e-3, 1e-12], dtype=torch.float64)
    np.testing.assert_allclose(forde.tuned_precision(small, 0.0), 1.0)
    np.testing.assert_allclose(forde.tuned_precision(small, 1e-9),
                               1 / (1e-9 / small + 1 - 1e-9), rtol=1e-12)


def test_empcov_precision_is_numpys():
    x = np.random.default_rng(0).standard_normal((50, 6)) * np.arange(1, 7)
    c = np.cov(x.T)
    scale = np.linalg.eigvalsh(c).mean()
    right = np.linalg.inv(c / scale + 0.1 * np.eye(6))
    np.testing.assert_allclose(forde.empcov_precision(torch.from_numpy(c), 0.1), right, rtol=1e-9)


# ---- Other losses and repulsions ----------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_data_loss_is_summed_over_members_and_examples(smoothing):
    logits, y = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    right = 0.0
    for f in logits.numpy():
        log_p = f - np.log(np.exp(f).sum(1, keepdims=True))
        right += -(1 - smoothing) * log_p[range(4), y].sum() - smoothing * log_p.mean(1).sum()
    assert forde.data_loss(logits, y, smoothing).item() == pytest.approx(right, rel=1e-12)
    target = torch.randn(4, dtype=torch.float64)
    square = (logits[..., 0] - target).square().sum().item() / 0.02
    assert forde.data_loss(logits, target, smoothing).item() == pytest.approx(square, rel=1e-12)


def test_true_class_score():
    logits, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    picked = torch.tensor([logits[b, c] for b, c in enumerate(y)])
    assert torch.equal(forde.true_class_score(logits, y), picked)
    log_p = picked - logits.exp().sum(1).log()
    assert relative(forde.true_class_score(logits, y, "logprob"), log_p) < 1e-12
    assert torch.equal(forde.true_class_score(logits, torch.randn(4)), logits[:, 0])


def plain_rbf(points):
    """sum_i ln sum_j exp(-|p_i - sg(p_j)|^2 ln(M+1) / med), one median over all pairs; p [M, P]."""
    m = len(points)
    d = [[(points[i] - points[j].detach()).square().sum() for j in range(m)] for i in range(m)]
    middle = np.median([v.item() for row in d for v in row])
    h = middle / math.log(m + 1) + 1e-12
    return sum(torch.log(sum(torch.exp(-v / h) for v in row)) for row in d), h


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_rbf_repulsion_is_the_loops(members):
    points = [wide(members, 3, 2), wide(members, 4)]
    flat = torch.cat([p.flatten(1) for p in points], 1)
    right, h = plain_rbf(flat)
    value, grads = forde.rbf_repulsion(points)
    k, bandwidth, again = forde.rbf_weights(forde.rbf_distances(points))
    assert value.item() == pytest.approx(right.item(), rel=1e-12) == again.item()
    assert relative(grads, torch.autograd.grad(right, points)) < 1e-10
    assert bandwidth.item() == pytest.approx(h, rel=1e-12)
    kernel = [[math.exp(-(a - b).square().sum().item() / h) for b in flat] for a in flat]
    np.testing.assert_allclose(k.detach(), kernel, rtol=1e-10)


def test_equal_points_have_no_force_and_no_nan():
    value, (grad,) = forde.rbf_repulsion([torch.ones(4, 3)])
    assert value.item() == pytest.approx(4 * math.log(4)) and (grad == 0).all()


def test_cauchy_prior():
    z = wide(3, 4)
    value = forde.cauchy_prior(z, 0.3)
    right = sum(math.log(1 + 0.3 * v * v) for v in z.flatten().tolist())
    assert value.item() == pytest.approx(right, rel=1e-12)
    right = 0.6 * z / (1 + 0.3 * z.square())
    assert relative(torch.autograd.grad(value, z)[0], right) < 1e-12


def plain_lit(g):
    cos = lambda a, b: a @ b / (a.norm() * b.norm())
    pairs = [cos(g[i, b], g[j, b]).square() for b in range(g.shape[1]) for i in range(len(g))
             for j in range(i)]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_local_independence_is_the_mean_over_pairs(members):
    g = particles(members)
    right, right_grad = gradient_of(plain_lit, g)
    value, grad = gradient_of(forde.local_independence, g)
    assert value == pytest.approx(right, rel=1e-12)
    assert relative(grad, right_grad) < 1e-10
    g[0, 0] = 0
    assert gradient_of(forde.local_independence, g)[1].isfinite().all()


def plain_directions(logits, y, weight, number, smallest=False):
    """Projectors [B, F, F] on the leading directions of the M likelihood gradients, of those with
    more than 1e-6 of the largest eigenvalue: below, float32 has only rounding errors."""
    out = []
    for b in range(len(y)):
        rows = []
        for f in logits[:, b]:
            p = np.exp(f - f.max())
            rows.append((np.eye(len(f))[y[b]] - p / p.sum()) @ weight)
        _, size, right = np.linalg.svd(np.stack(rows), full_matrices=False)
        order = np.argsort(size)[:number] if smallest else np.argsort(-size)[:number]
        keep = right[[k for k in order if size[k] > 1e-3 * size.max()]]
        out.append(keep.T @ keep)
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("members, classes", [(8, 20), (3, 20), (8, 4)])
def test_feature_directions_are_the_leading_ones(members, classes, smallest):
    logits = torch.randn(members, 6, classes, dtype=torch.float64)
    features, y = torch.randn(members, 6, 9, dtype=torch.float64), torch.arange(6) % classes
    weight = torch.randn(classes, 9, dtype=torch.float64)
    own = forde.feature_directions(features, logits, y, weight, smallest=smallest)
    right = plain_directions(logits.numpy(), y, weight.numpy(), 5, smallest)
    assert own.shape[:2] == (6, 9)
    assert (own @ own.mT - right).norm() < 1e-8
    rank = min(members, classes - 1)  # residuals sum to 0: 8 members, 4 classes have 5 zeros
    rank = max(rank - (members - 5), 0) if smallest and members > 5 else min(rank, 5)
    assert (own.square().sum((1, 2)) - rank).abs().max() < 1e-8


def plain_feature_repulsion(features, project, c, published=False):
    m, size = features.shape[:2]
    total = 0.0
    for b in range(size):
        z = [project[b] @ f for f in features[:, b]]
        d = [[(z[i] - z[j].detach()).square().sum() for j in range(m)] for i in range(m)]
        med = [np.median([d[i][j].item() for i in range(m)]) for j in range(m)]
        h = [(v ** 2 if published else v) / math.log(m) + 1e-12 for v in med]
        for i in range(m):
            total = total + torch.log(sum(torch.exp(-d[i][j] / h[j]) for j in range(m)))
            total = total + sum(torch.log(1 + c * v ** 2) for v in features[i, b])
    return total / size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_feature_directions_of_no_length_are_dropped(dtype):
    logits, y = torch.randn(8, 6, 4, dtype=dtype), torch.arange(6) % 4
    features, weight = torch.randn(8, 6, 9, dtype=dtype), torch.randn(4, 9, dtype=dtype)
    # 8 gradients of rank 3: the five smallest eigenvalues are rounding errors
    assert not forde.feature_directions(features, logits, y, weight, smallest=True).any()
    same = logits[:1].repeat(8, 1, 1)
    kept = forde.feature_directions(features, same, y, weight)
    assert ((kept.square().sum(1) > 0.5).sum(1) == 1).all()
    assert not forde.feature_directions(features, logits, y, 0 * weight).any()


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("members", [3, 4])
def test_feature_repulsion_is_the_loops(members, published):
    features = torch.randn(members, 3, 7, dtype=torch.float64)
    directions = torch.linalg.qr(torch.randn(3, 7, 2, dtype=torch.float64))[0]
    project = directions @ directions.mT
    right, right_grad = gradient_of(
        lambda z: plain_feature_repulsion(z, project, 0.3, published), features)
    value, grad = gradient_of(
        lambda z: forde.feature_repulsion(z, directions, 0.3, published), features)
    assert value == pytest.approx(right, rel=1e-10)
    assert relative(grad, right_grad) < 1e-10


# ---- Steps of the baselines ---------------------------------------------------------------------


def baseline(repulsion, **changes):
    """A case of another repulsion than FoRDE's, members and oracle's outputs with graphs."""
    this = Case("identity", 4, repulsion=repulsion, repulsion_coef=0.7, **changes)
    members, flat = this.members()
    outputs = [plain_network(p, this.batch.images) for p in members]
    return this, members, flat, *(torch.stack(part) for part in zip(*outputs))


def cross_entropy(logits, y, smoothing=0.0):
    return sum(F.cross_entropy(f, y, label_smoothing=smoothing) for f in logits)


MODES = pytest.mark.parametrize("vectorise, chunk", [
    ("loop", 0), ("loop", 1), ("vmap", 0), ("vmap", 2), ("two_pass", 0), ("two_pass", 1)])


@MODES
def test_step_of_the_function_repulsion(vectorise, chunk):
    this, _, flat, logits, _ = baseline("function", cauchy=0.3)
    force = plain_rbf(logits.flatten(1))[0] / BATCH
    prior = torch.log(1 + 0.3 * logits ** 2).sum() / BATCH
    total = cross_entropy(logits, this.batch.labels) + 0.7 * (force + prior)
    (_, value, _, _), grads = this.step(True, vectorise, chunk)
    assert value.item() == pytest.approx(force.item(), rel=1e-9)
    assert relative(grads, torch.autograd.grad(total, flat)) < 1e-9


@MODES
def test_step_of_lit(vectorise, chunk):
    this, members, flat, logits, _ = baseline("lit")
    force = plain_lit(plain_gradients(members, this.batch.images, this.batch.labels)[1])
    total = cross_entropy(logits, this.batch.labels) + 0.7 * force
    (_, value, _, _), grads = this.step(True, vectorise, chunk)
    assert value.item() == pytest.approx(force.item(), rel=1e-9)
    assert relative(grads, torch.autograd.grad(total, flat)) < 1e-9


@MODES
@pytest.mark.parametrize("published", [False, True])
def test_step_of_the_feature_repulsion(published, vectorise, chunk):
    this, _, flat, logits, features = baseline("feature", cauchy=0.1, match_published=published)
    weight = this.nets[0].head.weight.detach().numpy()
    project = plain_directions(logits.detach().numpy(), this.batch.labels, weight, 5, published)
    force = plain_feature_repulsion(features, project, 0.1, published)
    total = cross_entropy(logits, this.batch.labels) + 0.7 * force
    (_, value, _, _), grads = this.step(True, vectorise, chunk)
    assert value.item() == pytest.approx(force.item(), rel=1e-9)
    assert relative(grads, torch.autograd.grad(total, flat)) < 1e-9


def test_weight_repulsion_is_the_loops_over_n():
    this, members, flat, _, _ = baseline("weight")
    points = torch.stack([torch.cat([p.flatten() for p in m.values()]) for m in members])
    right = plain_rbf(points)[0]
    grads = [torch.randn_like(p) for p in flat]
    for p, g in zip(this.nets.parameters(), grads):
        p.grad = g.clone()
    value = forde.finish_gradients(this.nets, this.args, 50, None)
    assert value.item() == pytest.approx(0.7 * right.item() / 50, rel=1e-12)
    added = [p.grad - g for p, g in zip(this.nets.parameters(), grads)]
    assert relative(added, [0.7 * g / 50 for g in torch.autograd.grad(right, flat)]) < 1e-9


def test_classifier_of_the_feature_repulsion_stays_shared():
    args = options(repulsion="feature", kernel="identity", cauchy=0.1, members=4, weight_decay=0.01)
    nets = forde.make_ensemble(args, WORLD, CLASSES, (3, SIDE, SIDE)).double()
    heads = [[net.head.weight, net.head.bias] for net in nets]
    with torch.no_grad():
        for parts in heads:
            for p, q in zip(parts, heads[0]):
                p.copy_(q.normal_() if p is q else q)
    optimiser = forde.make_optimiser(nets, args)
    chunks = [forde.Members(nets, "loop", "features")]
    for step in range(2):
        optimiser.zero_grad()
        forde.ensemble_step(chunks, make_batch(step), args, WORLD, None, True)
        before = [[p.grad.clone() for p in parts] for parts in heads]
        stem = nets[0].stem.weight.grad.clone()
        forde.finish_gradients(nets, args, 50, None)
        for parts in heads:
            for p, all_grads in zip(parts, zip(*before)):
                assert relative(p.grad, sum(all_grads) / 4) < 1e-12
        assert relative(before[1][0], before[0][0]) > 0.01
        assert torch.equal(nets[0].stem.weight.grad, stem)
        optimiser.step()
        assert all(torch.equal(p, q) for parts in heads for p, q in zip(parts, heads[0]))
    assert relative(nets[0].stem.weight, nets[1].stem.weight) > 0.1


def test_empcov_prior_takes_the_place_of_the_first_layers_decay():
    args = options(members=2, prior="empcov", repulsion="none", weight_decay=0.05, lr=0.1)
    nets = ensemble(args)
    x = torch.randn(60, 27, dtype=torch.float64)
    precision = forde.empcov_precision(x.T @ x, 0.1)
    for p in nets.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in nets.parameters()]
    optimiser = forde.make_optimiser(nets, args)
    forde.finish_gradients(nets, args, 50, precision)
    optimiser.step()
    for (name, p), q in zip(nets.named_parameters(), before):
        decay = (q.flatten(1) @ precision).view_as(q) if "stem" in name else q
        assert relative(p, q - 0.1 * 1.9 * 0.05 * decay) < 1e-12


# ---- Stein variational gradient descent ---------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("kernel", ["identity", "pca", "pca truncated"])
def test_stein_kernel_and_what_members_send(kernel, members):
    a, vectors, roots = small_kernels()[kernel]
    g = particles(members).requires_grad_()
    r = g if vectors is None else g @ vectors
    s = r / r.norm(dim=-1, keepdim=True) * (1 if roots is None else roots)
    k, back = forde.stein_kernel(g.detach(), a)
    for j in range(members):
        h = [np.median([(s[i, b] - s[j, b]).square().sum().item() for i in range(members)])
             / math.log(members) + 1e-12 for b in range(4)]
        for i in range(members):
            right = sum(torch.exp(-(s[i, b].detach() - s[j, b]).square().sum() / h[b])
                        for b in range(4)) / 4
            sent, = torch.autograd.grad(right, g, retain_graph=True)
            assert k[i, j].item() == pytest.approx(right.item(), rel=1e-10)
            assert relative(back[j, i], sent[j]) < 1e-9 if i != j else not back[j, i].any()


def stein_oracle(this, members, logits):
    """Parameter gradients by members: (1/M) [sum_j K_ij score_j - coef sum_j dK_ij/dtheta_j]."""
    m, args, y = len(members), this.args, this.batch.labels
    thetas = [list(p.values()) for p in members]
    loss = [F.cross_entropy(f, y, label_smoothing=args.label_smoothing) for f in logits]
    if args.repulsion == "function":
        loss = [v + torch.log(1 + args.cauchy * f ** 2).sum() / BATCH for v, f in zip(loss, logits)]
    decay = args.weight_decay
    if args.repulsion == "input_gradient":
        g = plain_gradients(members, this.batch.images, y)[1]
        points = g / g.norm(dim=-1, keepdim=True) @ this.vectors * this.roots  # [M, B, D]
        d = lambda i, j: (points[i].detach() - points[j]).square().sum(-1)
        h = [np.median(torch.stack([d(i, j) for i in range(m)]).detach(), 0) / math.log(m)
             for j in range(m)]
        kernel = lambda i, j: torch.exp(-d(i, j) / torch.from_numpy(h[j] + 1e-12)).mean()
        divisor = BATCH
    else:
        points = [logits[i].flatten() if args.repulsion == "function" else
                  torch.cat([p.flatten() for p in thetas[i]]) for i in range(m)]
        d = lambda i, j: (points[i].detach() - points[j]).square().sum()
        h = np.median([d(i, j).item() for i in range(m) for j in range(m)]) / math.log(m + 1)
        kernel = lambda i, j: torch.exp(-d(i, j) / (h + 1e-12))
        divisor = 50 if args.repulsion == "weight" else BATCH
    out = []
    take = lambda value, at: torch.autograd.grad(value, at, retain_graph=True, allow_unused=True,
                                                 materialize_grads=True)
    for i in range(m):
        if args.repulsion == "function":  # in output space, then through member i's Jacobian
            force = 0.0
            for j in range(m):
                k = kernel(i, j)
                force = force + k.item() * take(loss[j], logits)[0][j]
                force = force - args.repulsion_coef / divisor * take(k, logits)[0][j]
            part = take((logits[i] * force.detach()).sum() / m, thetas[i])
            out += [t + decay * p.detach() for t, p in zip(part, thetas[i])]
            continue
        total = [torch.zeros_like(p) for p in thetas[i]]
        for j in range(m):
            k = kernel(i, j)
            for t, score, p, sent in zip(total, take(loss[j], thetas[j]), thetas[j],
                                         take(k, thetas[j])):
                t += k.item() * (score + decay * p.detach())
                t -= args.repulsion_coef / divisor * sent
        out += [t / m for t in total]
    return out


def stein_gradients(this, vectorise):
    args, particles = this.args, forde.PARTICLES.get(this.args.repulsion, "none")
    chunks = [forde.Members(this.nets[i:i + 1], vectorise, particles) for i in range(4)]
    this.nets.train()
    loss, *_, logits = forde.stein_step(chunks, this.batch, args, WORLD, this.kernel, 50)
    return loss, logits, [p.grad for p in this.nets.parameters()]


def stein_case(repulsion, **changes):
    coef = 2000.0 if repulsion == "weight" else 20.0
    this = Case("pca" if repulsion == "input_gradient" else "identity", 4, repulsion=repulsion,
                repulsion_coef=coef, update="svgd", weight_decay=0.05, **changes)
    members, _ = this.members()
    logits = torch.stack([plain_network(p, this.batch.images)[0] for p in members])
    return this, members, logits


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "two_pass"])
@pytest.mark.parametrize("repulsion", ["input_gradient", "weight", "function"])
def test_stein_step_is_the_loops(repulsion, vectorise):
    this, members, logits = stein_case(repulsion)
    loss, own_logits, grads = stein_gradients(this, vectorise)
    assert loss.item() / BATCH == pytest.approx(cross_entropy(logits, this.batch.labels).item())
    assert relative(own_logits, logits) < 1e-10
    right = stein_oracle(this, members, logits)
    assert relative(grads, right) < 1e-9
    this.args.repulsion_coef = 0.0  # the force is a visible part of the gradient
    assert relative(stein_oracle(this, members, logits), right) > 0.01
    assert all(norm.steps == 1 for net in this.nets for norm in forde.norms_of(net))


@pytest.mark.parametrize("repulsion, changes", [
    ("input_gradient", dict(label_smoothing=0.3)), ("weight", dict(label_smoothing=0.3)),
    ("function", dict(label_smoothing=0.3)), ("function", dict(cauchy=0.3))])
def test_stein_step_has_the_smoothed_labels_and_the_prior(repulsion, changes):
    this, members, logits = stein_case(repulsion, **changes)
    assert relative(stein_gradients(this, "loop")[2], stein_oracle(this, members, logits)) < 1e-9


@pytest.mark.parametrize("repulsion", ["input_gradient", "weight", "function"])
def test_stein_optimiser_does_not_decay_again(repulsion):
    args = options(members=2, update="svgd", weight_decay=0.05, repulsion=repulsion)
    nets = ensemble(args)
    for p in nets.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in nets.parameters()]
    forde.finish_gradients(nets, args, 50, None)  # nor is the repulsion of weights added again
    forde.make_optimiser(nets, args).step()
    assert all(torch.equal(p, q) for p, q in zip(nets.parameters(), before))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("particles", ["input_gradient", "none"])
def test_compiled_gradients_are_the_eager_ones(particles):
    args = options(model="mlp", hidden=[12, 12], members=2)
    torch.manual_seed(0)
    nets = [forde.make_network(args, CLASSES, (3, SIDE, SIDE)).double() for _ in range(2)]
    for net in nets:
        torch.nn.init.normal_(net.head.weight)
    batch, results = make_batch(), []
    direction = torch.randn(2, BATCH, DIM).double() if particles == "input_gradient" else None
    for compiled in (False, True):
        members = forde.Members(nets, "two_pass", particles, compiled=compiled).train()
        members.zero_grad()
        logits, change = members(batch.images, batch.labels, direction)
        (logits.logsumexp(2).sum() + change.sum()).backward()
        results.append(torch.cat([p.grad.flatten() for p in members.parameters()]))
    assert results[0].norm() > 0 and relative(results[1], results[0]) < 1e-9
