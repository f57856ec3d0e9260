"""forde.py against independent oracles: the repulsion as plain loops over (i, j, b) in float64, the
networks written out a second time, and every known mistake as a wrong oracle that must differ."""

import argparse
import math
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
    """Section "Method" of forde.py as loops; `roots`: of the eigenvalues, 0 where one is dropped."""
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
    ("median over all pairs", 0.05, 0.01), ("median off the diagonal", 0.05, 5e-3),
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
    assert changed == {n for n, _ in this.nets[0].named_parameters()} - {
        "head.bias", "blocks.3.norm2.bias", "blocks.3.shortcut.1.bias"}  # these shift it, no more


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
