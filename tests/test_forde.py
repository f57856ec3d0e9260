"""forde.py against independent oracles: the repulsion as plain loops over (i, j, b) in float64, the
networks written out a second time; then the script end to end."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_checkpoints, in_float64
from PIL import Image
from scipy.stats import entropy
from sklearn.metrics import accuracy_score, brier_score_loss, roc_auc_score, top_k_accuracy_score
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


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def options(**changes):
    """The options of a miniature network, as parse_args and with_method would resolve them."""
    return SimpleNamespace(**{**dict(
        model="resnet9", width=0.05, hidden=[6, 7], norm=True, members=4, chunk=0, amp="off",
        device=torch.device("cpu"), repulsion="input_gradient", alpha=1.0, cauchy=0.0,
        grad_of="logit", eps=1e-24, repulsion_coef=1.0, label_smoothing=0.0, lr=0.1, lr_ratio=0.01,
        momentum=0.9, weight_decay=5e-4, prior="isotropic", schedule="published", epochs=300),
        **changes})


def ensemble(args, classes=CLASSES, shape=(3, SIDE, SIDE)):
    """M members whose heads, scales and offsets are not those of the published initialisation."""
    nets = nn.ModuleList(forde.make_network(args, classes, shape) for _ in range(args.members))
    with torch.no_grad():
        for name, p in nets.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
            elif "head" in name:
                p.normal_(0, 0.5)
    return nets.double()


def make_batch(x=None, y=None):
    x = double(BATCH, 3, SIDE, SIDE) if x is None else x
    return data.Batch(x, torch.arange(BATCH) % CLASSES if y is None else y, None, BATCH)


def random_basis(dim=DIM):
    """Eigenvectors (the columns of a random orthogonal matrix) and eigenvalues, largest first."""
    values = (0.5 + torch.rand(dim, dtype=torch.float64)) / torch.arange(1, dim + 1) * 100
    return torch.linalg.qr(double(dim, dim))[0], values.sort(descending=True).values


def relative(a, b):
    """|a - b| / |b| of two tensors, or of two lists of tensors."""
    a, b = (torch.cat([t.detach().flatten() for t in ([x] if torch.is_tensor(x) else x)])
            for x in (a, b))
    return ((a - b).norm() / b.norm()).item()


# ---- Networks -----------------------------------------------------------------------------------


def plain_conv(x, weight, stride=1):
    """Padded by hand as XLA pads: ceil(n / stride) outputs, the odd zero at the end."""
    kernel = weight.shape[-1]
    if kernel == 1:
        return torch.einsum("bchw,oc->bohw", x[:, :, ::stride, ::stride], weight[:, :, 0, 0])
    pads = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
    out = x.new_zeros(*x.shape[:2], x.shape[2] + pads[0], x.shape[3] + pads[1])
    out[:, :, pads[0] // 2:pads[0] // 2 + x.shape[2], pads[1] // 2:pads[1] // 2 + x.shape[3]] = x
    return F.conv2d(out, weight, None, stride)


def plain_network(net, x):
    """(logits, features) of a residual network in training mode, from its parameters by name."""
    p = {name.removeprefix("extractor."): value for name, value in net.named_parameters()}
    blocks = [k for k, m in enumerate(net.extractor) if isinstance(m, forde.Residual)]
    basic = f"{blocks[0]}.before.0.weight" not in p  # one block a group; pre-activation: two

    def conv(h, at, stride=1):
        return plain_conv(h, p[f"{at}.weight"], stride)

    def norm(h, at):
        mean, square = h.mean((0, 2, 3)), h.square().mean((0, 2, 3))
        each = lambda t: t[:, None, None]
        unit = (h - each(mean)) / each(square - mean.square() + 1e-5).sqrt()
        return each(p[f"{at}.weight"]) * unit + each(p[f"{at}.bias"])

    x = norm(conv(x, 0), 1).relu() if basic else conv(x, 0)
    for number, k in enumerate(blocks):
        stride = 2 if number and (basic or number % 2 == 0) else 1
        h = x if basic else norm(x, f"{k}.before.0").relu()
        z = conv(norm(conv(h, f"{k}.body.0", stride), f"{k}.body.1").relu(), f"{k}.body.3")
        if f"{k}.shortcut.0.weight" in p:
            x = conv(h, f"{k}.shortcut.0", stride)
            x = norm(x, f"{k}.shortcut.1") if basic else x
        x = (x + norm(z, f"{k}.body.4")).relu() if basic else x + z
    features = (x if basic else norm(x, blocks[-1] + 1).relu()).mean((2, 3))
    return features @ p["head.weight"].T + p["head.bias"], features


@pytest.mark.parametrize("model", ["resnet9", "preact_resnet18", "wrn_16_4"])
def test_networks_are_those_written_out_to_their_second_derivatives(model):
    [net], batch, results = ensemble(options(model=model, members=1)), make_batch(), []
    for forward in (net, lambda x: plain_network(net, x)):
        x = batch.images.clone().requires_grad_()
        logits, features = forward(x)
        score = logits[range(BATCH), batch.labels].sum()
        g, = torch.autograd.grad(score, x, create_graph=True)
        second = torch.autograd.grad(g.square().sum(), list(net.parameters()),
                                     materialize_grads=True, allow_unused=True)
        results.append((logits, features, g, second))
    assert all(relative(own, right) < 1e-9 for own, right in zip(*results))


@pytest.mark.parametrize("size", [(8, 8), (7, 10), (1, 2)])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_same_padding_is_xlas(kernel, stride, size):
    layer, x = forde.Conv2d(2, 3, kernel, stride).double(), double(2, 2, *size)
    assert relative(layer(x), plain_conv(x, layer.weight, stride)) < 1e-13


@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (6, 3)])
def test_batch_norm_is_the_librarys_with_the_published_running_statistics(shape):
    layer, means, variances = forde.BatchNorm(3).double(), [], []
    nn.init.normal_(layer.weight)
    for step in range(1, 5):
        x = step + step * double(*shape)
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


@pytest.mark.parametrize("model, classes, side, parameters, tensors", [
    ("resnet18", 10, 32, 11_173_962, 62), ("resnet18", 100, 32, 11_220_132, 62),
    ("preact_resnet18", 200, 64, 11_269_640, 56), ("wrn_16_4", 10, 32, 2_748_890, 44)])
def test_parameter_counts(model, classes, side, parameters, tensors):
    with torch.device("meta"):
        net = forde.make_network(options(model=model, width=1.0), classes, (3, side, side))
    sizes = [p.numel() for p in net.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)


def test_mlp_and_the_published_initialisation():
    [net] = ensemble(options(model="mlp", width=1.0, members=1), 4, (5, 1, 1))
    x, p = double(9, 5, 1, 1), net.state_dict()
    h = x.flatten(1)
    for k in (1, 4):
        h = h @ p[f"extractor.{k}.weight"].T + p[f"extractor.{k}.bias"]
        h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        h = (h * p[f"extractor.{k + 1}.weight"] + p[f"extractor.{k + 1}.bias"]).relu()
    assert relative(list(net(x)), [h @ p["head.weight"].T + p["head.bias"], h]) < 1e-12
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


# ---- Method -------------------------------------------------------------------------------------


def plain_repulsion(g, matrix=None, eps=1e-24):
    """R by its equations, in loops; matrix [D, R] has the columns of U Lambda^(1/2)."""
    m, size = g.shape[:2]
    s = g / (g.square().sum(2, keepdim=True) + eps).sqrt()
    s = s if matrix is None else torch.stack([row @ matrix for row in s])
    kernels = torch.zeros(m, dtype=torch.float64)
    for j, b in itertools.product(range(m), range(size)):
        d = torch.stack([(s[i, b] - s[j, b].detach()).square().sum() for i in range(m)])
        h = np.median(d.detach()) / math.log(m) + 1e-12
        kernels = kernels + torch.exp(-d / h)
    return (kernels / size).log().sum() / size


def particles(members, batch=4, dim=12, spread=1.0):
    return double(batch, dim) + spread * double(members, batch, dim)


def gradient_of(function, g):
    g = g.detach().clone().requires_grad_()
    value = function(g)
    return value.item(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("eps, spread", [(1e-24, 1.0), (0.5, 1.0), (1e-24, 1e-5)])
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("kept", [None, 5, 12])
def test_repulsion_is_the_loops(kept, members, eps, spread):
    """At the small spread the floor of the bandwidth counts; the lengths of gradients never do."""
    a, g = None if kept is None else double(12, kept), particles(members, spread=spread)
    right, right_grad = gradient_of(lambda g: plain_repulsion(g, a, eps), g)
    value, grad = gradient_of(lambda g: forde.repulsion(g, a, eps), g)
    assert value == pytest.approx(right, rel=1e-9) and relative(grad, right_grad) < 1e-9
    assert 0 <= value <= members * math.log(members) / 4
    if eps < 0.1:
        scales = torch.logspace(-3, 3, members).double()[:, None, None]
        again, scaled = gradient_of(lambda g: forde.repulsion(g, a, eps), scales * g)
        assert again == pytest.approx(value, rel=1e-9) and relative(scaled * scales, grad) < 1e-9


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_equal_or_zero_members_are_at_the_maximum_without_a_force(length):
    for members in (2, 3, 10):
        g = length * particles(1).repeat(members, 1, 1)
        value, grad = gradient_of(forde.repulsion, g)
        assert value == pytest.approx(members * math.log(members) / 4, rel=1e-12)
        assert (grad == 0).all()


def test_distances_of_nearly_equal_members_keep_their_digits():
    narrow = forde.unit_rows(particles(4, spread=5e-4).float())  # from a Gram matrix: 1e-2
    right, off = forde.squared_distances(narrow.double()), ~torch.eye(4, dtype=torch.bool)
    assert (forde.squared_distances(narrow) / right - 1)[off].abs().max() < 1e-5


@pytest.mark.parametrize("length", [0.0, 1e-20])
def test_rows_without_length_are_constants_and_change_no_other(length):
    for a in (None, double(12, 12)):
        g, dead = particles(4), torch.zeros(4, 4, 1, dtype=torch.bool)
        g[1, 2], dead[1, 2] = length * torch.randn(12), True
        right, right_grad = gradient_of(
            lambda g: plain_repulsion(torch.where(dead, torch.zeros_like(g), g), a), g)
        value, grad = gradient_of(lambda g: forde.repulsion(g, a), g)
        assert value == pytest.approx(right, rel=1e-9)
        assert grad.isfinite().all() and (grad[1, 2] == 0).all()
        assert relative(grad, torch.where(dead, 0, right_grad)) < 1e-9


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 1.0])
def test_kernel_map_is_a_root_of_the_inverse_covariance(alpha):
    vectors, values = random_basis(7)
    u, lam = vectors.numpy(), np.diag(values)
    right = np.linalg.inv(alpha * np.linalg.inv(u @ lam @ u.T) + (1 - alpha) * np.eye(7))
    a = forde.kernel_map(vectors, values, alpha)
    np.testing.assert_allclose(a @ a.T, right, rtol=1e-10, atol=1e-10)


def plain_rbf(points):
    """sum_i ln sum_j exp(-|p_i - sg(p_j)|^2 ln(M+1) / med), one median over all pairs; p [M, P]."""
    m = len(points)
    d = [[(points[i] - points[j].detach()).square().sum() for j in range(m)] for i in range(m)]
    h = np.median([v.item() for row in d for v in row]) / math.log(m + 1) + 1e-12
    return sum(torch.log(sum(torch.exp(-v / h) for v in row)) for row in d)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_rbf_repulsion_is_the_loops(members):
    points = [double(members, *shape).requires_grad_() for shape in ((3, 2), (4,))]
    right = plain_rbf(torch.cat([p.flatten(1) for p in points], 1))
    value, grads = forde.rbf_repulsion(points)
    assert value.item() == pytest.approx(right.item(), rel=1e-12)
    assert relative(grads, torch.autograd.grad(right, points)) < 1e-10
    value, (grad,) = forde.rbf_repulsion([torch.ones(members, 3)])
    assert value.item() == pytest.approx(members * math.log(members)) and (grad == 0).all()


def plain_directions(logits, y, weight):
    """Squared projectors [B, F, F] on five leading directions of the likelihood gradients."""
    out = []
    for b, label in enumerate(y):
        p = logits[:, b].softmax(1).detach().numpy()
        rows = (np.eye(p.shape[1])[label] - p) @ weight.detach().numpy()
        _, size, right = np.linalg.svd(rows, full_matrices=False)
        fade = size[:5] ** 2 / (size[:5] ** 2 + 1e-4 * size[0] ** 2)
        out.append(right[:5].T * fade ** 2 @ right[:5])
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("members, classes", [(8, 20), (3, 20), (8, 4)])
def test_feature_directions_are_the_leading_ones(members, classes):
    logits, y, weight = double(members, 6, classes), torch.arange(6) % classes, double(classes, 9)
    own = forde.feature_directions(logits, y, weight)
    assert (own @ own.mT - plain_directions(logits, y, weight)).norm() < 1e-8
    assert not forde.feature_directions(logits, y, 0 * weight).any()


def test_feature_directions_keep_their_digits_in_float32():
    """A Gram matrix would square the condition: there the third direction was noise."""
    basis = torch.linalg.qr(double(20, 20))[0]
    weight = torch.cat([basis[:3] * torch.tensor([[1.0], [1.0], [3e-2]]), torch.zeros(17, 20)])
    logits, y = double(8, 6, 20), torch.arange(6) + 3
    wide = forde.feature_directions(logits, y, weight)
    narrow = forde.feature_directions(logits.float(), y, weight.float()).double()
    assert (wide.square().sum((1, 2)) > 2.2).all()
    assert (narrow @ narrow.mT - wide @ wide.mT).abs().max() < 1e-5


# ---- A step of training -------------------------------------------------------------------------


def plain_feature_repulsion(features, project, c):
    m, size = features.shape[:2]
    total = torch.log(1 + c * features ** 2).sum()
    for b in range(size):
        z = features[:, b]
        d = torch.stack([torch.stack([(z[i] - z[j].detach()) @ project[b] @ (z[i] - z[j].detach())
                                      for j in range(m)]) for i in range(m)])
        h = torch.from_numpy(np.median(d.detach(), axis=0) / math.log(m) + 1e-12)
        total = total + torch.log(torch.exp(-d / h).sum(1)).sum()
    return total / size


def plain_lit(g):
    pairs = [F.cosine_similarity(g[i], g[j]).square() for i in range(len(g)) for j in range(i)]
    return torch.stack(pairs).mean()


class Case:
    """A miniature ensemble and its batch, as forde.py and as the oracle have it."""

    def __init__(self, **changes):
        self.args = options(**changes)
        self.nets, self.batch = ensemble(self.args).train(), make_batch()
        (vectors, values), alpha = random_basis(), self.args.alpha
        self.kernel = forde.kernel_map(vectors, values, alpha) if alpha else None
        self.matrix = vectors / (alpha / values + 1 - alpha).sqrt() if alpha else None

    def oracle(self):
        """(cross entropy or squared error, R): each network alone, the rest in loops."""
        (_, y, *_), args, outputs = self.batch, self.args, []
        for net in self.nets:
            x = self.batch.images.clone().requires_grad_()
            logits, features = net(x)
            scores = logits.log_softmax(1) if args.grad_of == "logprob" else logits
            score = scores[:, 0] if y.is_floating_point() else scores[range(BATCH), y]
            g, = torch.autograd.grad(score.sum(), x, create_graph=True)
            outputs.append((logits, features, g.flatten(1)))
        logits, features, g = map(torch.stack, zip(*outputs))
        loss = sum((f[:, 0] - y).square().mean() / 0.02 if y.is_floating_point() else
                   F.cross_entropy(f, y, label_smoothing=args.label_smoothing) for f in logits)
        if args.repulsion == "input_gradient":
            return loss, plain_repulsion(g, self.matrix)
        if args.repulsion == "function":
            prior = torch.log(1 + args.cauchy * logits ** 2).sum()
            return loss, (plain_rbf(logits.flatten(1)) + prior) / BATCH
        if args.repulsion == "lit":
            return loss, plain_lit(g)
        project = plain_directions(logits, y, self.nets[0].head.weight)
        return loss, plain_feature_repulsion(features, project, args.cauchy)

    def step(self, chunk=0, repel=True):
        """(outputs of ensemble_step, parameter gradients)."""
        members, size = self.args.members, chunk or self.args.members
        chunks = [forde.Members(self.nets[i:i + size], forde.PARTICLES[self.args.repulsion],
                                self.args.grad_of) for i in range(0, members, size)]
        self.nets.zero_grad()
        out = forde.ensemble_step(chunks, self.batch, self.kernel, self.args, repel)
        return out, [p.grad.clone() for p in self.nets.parameters()]


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("changes", [
    dict(members=3), dict(alpha=0.0), dict(alpha=0.4, members=3),
    dict(members=3, grad_of="logprob", repulsion_coef=2.5, label_smoothing=0.2),
    dict(repulsion="function", repulsion_coef=0.7, cauchy=0.3),
    dict(repulsion="feature", repulsion_coef=0.7, cauchy=0.3),
    dict(repulsion="lit", repulsion_coef=0.7),
    dict(alpha=0.0, model="mlp", norm=False, hidden=[6, 5], width=1.0)], ids=str)
def test_a_step_is_that_of_the_loops(changes, chunk):
    this = Case(**changes)
    if this.args.model == "mlp":  # regression repels in the gradients of its output
        this.nets = ensemble(this.args, 1, (2, 1, 1))
        this.batch = make_batch(double(BATCH, 2, 1, 1), double(BATCH))
    loss, force = this.oracle()
    right = torch.autograd.grad(loss + this.args.repulsion_coef * force, [*this.nets.parameters()],
                                retain_graph=True)
    (total, value, logits), grads = this.step(chunk)
    assert total.item() / BATCH == pytest.approx(loss.item(), rel=1e-12)
    assert value.item() == pytest.approx(force.item(), rel=1e-9)
    assert relative(grads, right) < 1e-9 and logits.shape[:2] == (this.args.members, BATCH)
    alone = torch.autograd.grad(loss, [*this.nets.parameters()])
    assert relative(this.step(chunk, repel=False)[1], alone) < 1e-9
    forces = [[a - b for a, b in zip(both, loss)] for both, loss in ((grads, alone),
                                                                    (right, alone))]
    assert relative(*forces) < 1e-8


@pytest.mark.parametrize("chunk", [0, 1])
def test_published_initialisation_starts_at_the_maximum_without_a_force(chunk):
    this = Case(members=3)
    this.nets = nn.ModuleList(forde.make_network(this.args, CLASSES, (3, SIDE, SIDE))
                              for _ in range(3)).double()
    (_, value, logits), grads = this.step(chunk)
    assert value.item() / 3 == pytest.approx(math.log(3) / BATCH, rel=1e-12)
    assert (logits == 0).all() and sum(g.abs().sum() for g in grads) > 0
    for net in this.nets:  # a step moves the running statistics once
        h, norm = F.conv2d(this.batch.images, net.extractor[0].weight, padding=1), net.extractor[1]
        assert {int(m.num_batches_tracked) for m in net.modules()
                if isinstance(m, forde.BatchNorm)} == {1}
        assert relative(norm.running_mean, h.mean((0, 2, 3))) < 1e-9
        assert relative(norm.running_var, h.var((0, 2, 3), correction=0)) < 1e-9
    assert all(torch.equal(a, b) for a, b in zip(grads, this.step(chunk, repel=False)[1]))


def test_bf16_gives_finite_float32_gradients_near_the_right_ones():
    this = Case(alpha=0.0, members=3, amp="bf16")
    this.nets, this.batch = this.nets.float(), make_batch(this.batch.images.float())
    (_, value, logits), grads = this.step()
    this.args.amp = "off"
    (_, exact, _), right = this.step()
    assert logits.dtype == value.dtype == torch.float32
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    assert value != exact and value.item() == pytest.approx(exact.item(), rel=0.05)
    assert 0 < relative(grads, right) < 0.3


def with_random_gradients(nets):
    for p in nets.parameters():
        p.grad = torch.randn_like(p)
    return [p.grad.clone() for p in nets.parameters()]


def test_weight_repulsion_is_the_loops_over_n():
    args = options(repulsion="weight", repulsion_coef=0.7)
    nets = ensemble(args)
    right = plain_rbf(torch.stack([torch.cat([p.flatten() for p in n.parameters()]) for n in nets]))
    grads = with_random_gradients(nets)
    assert forde.finish_gradients(nets, args, 50, None, repel=False) == 0
    value = forde.finish_gradients(nets, args, 50, None, repel=True)
    assert value.item() == pytest.approx(right.item() / 50, rel=1e-12)
    added = [p.grad - g for p, g in zip(nets.parameters(), grads)]
    right = torch.autograd.grad(right, [*nets.parameters()])
    assert relative(added, [0.7 * g / 50 for g in right]) < 1e-9


def test_classifier_of_the_feature_repulsion_is_shared():
    args = options(repulsion="feature")
    nets = ensemble(args)
    right = dict(zip(dict(nets.named_parameters()), with_random_gradients(nets)))
    for end in ("head.weight", "head.bias"):
        mean = sum(right[f"{i}.{end}"] for i in range(4)) / 4
        right |= {f"{i}.{end}": mean for i in range(4)}
    forde.finish_gradients(nets, args, 50, None, True)
    assert all(relative(p.grad, right[name]) < 1e-12 for name, p in nets.named_parameters())


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
    optimiser = forde.make_optimiser(nets, args)
    theta = [p.detach().clone() for p in nets.parameters()]
    v = [torch.zeros_like(p) for p in theta]
    for _ in range(3):
        grads = with_random_gradients(nets)
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
    assert max(cycle) == cycle[20] == pytest.approx(0.1)
    assert [cycle[0], cycle[-1]] == pytest.approx([0.1 / 21, 0.1 / 80])


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


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """tiny(*options): the rows of a run of half a second, by (method, set[, against])."""
    keep_few(monkeypatch)

    def run(*more):
        rows = forde.main([*TINY, "--out-dir", str(tmp_path), *map(str, more)])
        return {tuple(row[k] for k in ("method", "set", "against") if k in row): row
                for row in rows}

    return run


def weights(folder, method="*", seed=1):
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
            seen.append((chunks[0].nets[0].extractor[1].weight.detach().clone(), batch.images)),
            step(chunks, batch, *rest))[1])
        rows, trained = forde.main(options), len(seen)
        again = forde.main([*options, "--eval", "--no-plot"])
    assert len(seen) == trained  # nothing was trained again
    return out, rows, again, seen


def test_the_story(story):
    out, rows, again, seen = story
    methods = ("deep_ensemble", "forde_pca", "forde_identity")
    [folder] = (out / "forde").glob("glyphs-*")
    results = json.loads((folder / "results.json").read_text())
    assert again == rows == results["rows"]
    assert len(rows) == 2 * 3 * 8  # seeds, methods; test, OOD, five severities, their mean
    names = {path.name for path in folder.iterdir()}
    assert {"shift.png", "results.csv", *(f"{m}-seed{s}.pt" for m in methods for s in (1, 2)),
            *(f"predictions-{m}-seed1.csv" for m in methods)} <= names
    for method in methods:
        own = [row for row in rows if row["method"] == method and row["seed"] == 1]
        for k in ("accuracy", "nll", "ece15", "ece15_by_kind", "gradient_distance"):
            assert own[-1][k] == pytest.approx(np.mean([row[k] for row in own[2:7]]))
        log = [json.loads(line) for line in open(folder / f"{method}-seed1.jsonl")]
        # one cycle of 18 steps: 300 images make nine batches of 32 an epoch
        assert [row["lr"] for row in log] == pytest.approx([0.1 * 10 / 14.4, 0.1 / 14.4])
        # with two members R is 2 ln(1.25) / B where they differ
        low, high = (0, 0) if method == "deep_ensemble" else (math.log(1.25), math.log(2))
        assert all(low - 1e-5 <= 32 * row["repulsion"] <= high + 1e-5 for row in log)
    steps = len(seen) // 6
    first, *others = (seen[k * steps:(k + 1) * steps] for k in range(6))
    for k, other in enumerate(others):  # the methods start alike and see the same batches
        same = k < 2
        assert torch.equal(first[0][0], other[0][0]) == same
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, other)) == same
    difference = results["paired"][0]
    assert difference["method"] == "forde_pca - deep_ensemble" and difference["seed"] == 1
    assert difference["nll"] == pytest.approx(rows[8]["nll"] - rows[0]["nll"])


def plain_metrics(p, y):
    """Metrics of member probabilities p [M, N, K], float64."""
    mean, classes = p.mean(0), np.arange(p.shape[2])
    wrong, loss = mean.argmax(1) != y, -np.log(mean[range(len(y)), y])
    total, aleatoric, votes = entropy(mean, axis=1), entropy(p, axis=2).mean(0), p.argmax(2)
    return {"accuracy": accuracy_score(y, mean.argmax(1)), "nll": loss.mean(),
            "nll_miss": loss[wrong].mean() if wrong.any() else None,
            "member_accuracy": (votes == y).mean(),
            "disagreement": np.mean([a != b for a, b in itertools.combinations(votes, 2)] or 0),
            "brier": brier_score_loss(y, mean, labels=classes),
            **{f"top{k}_accuracy": top_k_accuracy_score(y, mean, k=k, labels=classes)
               for k in (2, 3)},
            "total_mean": total.mean(), "aleatoric_mean": aleatoric.mean(),
            "epistemic_mean": (total - aleatoric).mean(),
            "epistemic_std": (total - aleatoric).std()}


@pytest.mark.parametrize("members, skill", [(1, 1.0), (3, 1.0), (4, -3.0), (2, 40.0)])
def test_predictive_metrics(members, skill):
    y, z = torch.randint(5, (60,)), 2 * double(members, 60, 5)
    z[:, range(60), y] += skill
    values = forde.predictive_metrics(z.log_softmax(2), y)
    for key, value in plain_metrics(z.softmax(2).numpy(), y.numpy()).items():
        assert values[key] == (None if value is None else pytest.approx(value, abs=1e-9)), key


def test_temperature_is_fitted_on_the_validation_set(monkeypatch):
    outputs = {name: (3 * double(2, 200, 5)).log_softmax(2) for name in ("test", "val")}
    monkeypatch.setattr(forde, "predict", lambda nets, dataset, args: outputs[dataset.name])
    y = torch.arange(200) % 5
    sets = {name: data.ImageSet(name, torch.zeros(200, 1, 1, 1), y, 5, (0.0,), (1.0,))
            for name in outputs}
    rows, _ = forde.evaluate(None, {**sets, "ood": {}, "shift": ("", [], None)},
                             SimpleNamespace(members=1, diversity_examples=1))
    mean = {name: log_probs.exp().mean(0).log() for name, log_probs in outputs.items()}
    temperature = common.fit_temperature(mean["val"], y)
    assert rows[0]["temperature"] == pytest.approx(temperature, rel=1e-6)
    scaled = F.cross_entropy(mean["test"] / temperature, y).item()
    assert rows[0]["nll_scaled"] == pytest.approx(scaled, rel=1e-6)


def test_the_storys_evaluation_is_that_of_the_saved_members(story):
    out, rows, *_ = story
    args = options(model="mlp", hidden=[128, 128], width=0.1, members=2)
    nets = ensemble(args, 10, (1, 28, 28)).eval()
    nets.load_state_dict(weights(out, "forde_pca", 2))
    test = data.load("glyphs", "test", limit=100)
    letters = data.match(data.load("glyphs_letters", "test", limit=100), test)
    some = data.evenly(test, 24)
    third = [data.corrupted(data.evenly(test, 5), kind, 3) for kind in [*data.CORRUPTIONS][:3]]
    unit = lambda s: (s.images.double() / 255 - s.mean[0]) / s.std[0]
    with torch.no_grad():
        p, q, shifted = (torch.stack([net(x)[0].softmax(1) for net in nets]).numpy() for x in (
            unit(test), unit(letters), torch.cat([unit(s) for s in third])))
    own = [row for row in rows if (row["method"], row["seed"]) == ("forde_pca", 2)]
    for key, value in plain_metrics(p, test.labels.numpy()).items():
        assert own[0][key] == (None if value is None else pytest.approx(value, abs=1e-5)), key
    uncertainty = np.concatenate([entropy(r.mean(0), axis=1) - entropy(r, axis=2).mean(0)
                                  for r in (p, q)])
    auroc = roc_auc_score(np.repeat([0, 1], 100), uncertainty)
    assert own[1]["auroc_epistemic"] == pytest.approx(auroc, abs=2e-3)
    x = unit(some).requires_grad_()
    g = [torch.autograd.grad(net(x)[0][range(24), some.labels].sum(), x)[0].flatten(1)
         for net in nets]
    assert own[0]["gradient_distance"] == pytest.approx(
        1 - F.cosine_similarity(*g).mean().item(), abs=1e-5)
    right = plain_metrics(shifted, torch.cat([s.labels for s in third]).numpy())
    assert own[4]["set"] == "glyphs_c_s3"
    assert own[4]["nll"] == pytest.approx(right["nll"], abs=1e-5)


def test_every_method_and_one_that_was_killed(tiny, tmp_path, monkeypatch):
    """Killed in the second step of the second method's second epoch: the same weights, bit for bit.
    All methods repel but the deep ensemble, and no two end alike."""
    every = ["--methods", *forde.METHODS, "--prior", "empcov", "--augment", "--val-fraction", 0.01,
             "--published-split", "--eval-every", 1]
    passes, moments = [], forde.second_moments
    monkeypatch.setattr(forde, "second_moments", lambda *a: (passes.append(a), moments(*a))[1])
    calm, real, steps = tiny(*every, "--name", "calm"), forde.learning_rate, []
    assert len(passes) == 2  # the basis, the prior's covariance: once for all methods

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
        name = f"{method}-seed1"
        assert_same_checkpoints(folder / f"calm/{name}.pt", folder / f"again/{name}.pt")
        log = [json.loads(line) for line in open(folder / f"calm/{name}.jsonl")]
        assert (log[-1]["repulsion"] == 0) == (method == "deep_ensemble")
        assert all(log[k]["val_nll"] > 0 for k in (0, 1)) and calm[method, "glyphs"]["temperature"]
        assert sum(distance(state, other) < 1e-6 for other in states.values()) == 1
        if method == "weight_rde":  # its prior is divided by the number of examples
            assert 0.2 < 75 * log[-1]["repulsion"] < math.log(3)


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
    in_float64(forde, monkeypatch.setattr)
    for name, text in (("a", a), ("b", b)):
        tiny("--name", name, "--epochs", 1, *text.split())
    assert distance(*(weights(tmp_path / "forde" / name) for name in "ab")) < 1e-5


def test_augmentation_is_of_training_alone(tiny, tmp_path):
    run = ["--methods", "deep_ensemble", "--epochs", 1, "--name"]
    rows = tiny(*run, "a", "--augment")
    assert tiny(*run, "a", "--no-augment", "--eval") == rows
    tiny(*run, "b", "--no-augment")
    assert distance(*(weights(tmp_path / "forde" / name) for name in "ab")) > 1e-3
    with pytest.raises(UserError, match="glyphs are not finite.*--lr"):
        tiny(*run, "c", "--lr", 1e38, "--limit-steps", 1)


SPREAD = [f"-b 15 --limit-steps 3 --augment --methods {' '.join(forde.METHODS)}",
          "-b 15 --limit-steps 3 --chunk 1 --prior empcov --grad-of logprob --methods forde_tuned"]


def few_in_float64(folder):
    """The rows of the runs SPREAD, in float64."""
    with pytest.MonkeyPatch.context() as patch:
        keep_few(patch)
        in_float64(forde, patch.setattr)
        return [forde.main([*TINY, "--epochs", "1", "--out-dir", str(folder), "--name", f"run{k}",
                            *text.split()]) for k, text in enumerate(SPREAD)]


def test_two_processes_equal_one(ranks, tmp_path):
    two = ranks(few_in_float64, tmp_path / "two")[0]
    for k, rows in enumerate(few_in_float64(tmp_path / "one")):
        one, other = (tmp_path / name / "forde" / f"run{k}" for name in ("one", "two"))
        for path in one.glob("*.pt"):
            a, b = (torch.load(p, weights_only=True)["net"] for p in (path, other / path.name))
            assert distance(b, a) < 1e-10, path.name
        environment = json.loads((other / "results.json").read_text())["environment"]
        assert environment["processes"] == 2
        for row, again in zip(rows, two[k], strict=True):
            assert row.keys() == again.keys()
            assert all(again[k] == pytest.approx(v, abs=1e-6) for k, v in row.items())


def test_more_processes_than_examples_is_refused(monkeypatch):
    monkeypatch.setattr(common, "world_size", lambda: 30)
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    args = forde.parse_args([*TINY, "-b", "30"])
    with pytest.raises(UserError, match=r"30 process\(es\) cannot share 20 "):
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
    alone = tiny("--dataset", "toy_regression", *short, "--lr", 1e-4, "--members", 1)
    assert alone["deep_ensemble", "toy_regression"]["far_std_mean"] == 0
    assert len([*tmp_path.glob("**/toy.png")]) == 3


def write_images(folder, count, side):
    folder.mkdir(parents=True)
    for k in range(count):
        pixels = np.random.default_rng(k).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png", compress_level=1)


def test_own_folder_and_ambiguous_digits(tiny, tmp_path):
    for part, label in itertools.product(("train", "test"), "ab"):
        write_images(tmp_path / "own" / part / label, 12 if part == "train" else 3, 8)
    rows = tiny("--dataset", f"folder:{tmp_path / 'own'}/", "--image-size", 8,
                "--methods", "forde_pca", "lit", "-b", 8)
    assert rows["forde_pca", "own"]["n"] == 6 and [*tmp_path.glob("forde/own-resnet9-*")]
    rows = tiny("--dataset", "dirty_glyphs", "--shift", "computed", "--shift-examples", 3,
                "--methods", "forde_identity")
    assert rows["forde_identity", "dirty_glyphs_computed_c"]["n"] == 5 * 3 * len(data.CORRUPTIONS)


def test_published_corruptions_and_a_part_of_them(tiny, small_data, tmp_path):
    (tmp_path / "tiny-imagenet-200").symlink_to(small_data / "tiny-imagenet-200")
    for kind, severity, label in itertools.product(("fog", "snow"), range(1, 6), range(4)):
        write_images(tmp_path / f"Tiny-ImageNet-C/{kind}/{severity}/n0000000{label}", 2, 64)
    rows = tiny("--dataset", "tiny_imagenet", "--data-dir", tmp_path, "--shift", "published",
                "--methods", "forde_identity", "--limit-train", 16, "--diversity-examples", 4)
    assert rows["forde_identity", "tiny_imagenet"]["n"] == 20
    assert rows["forde_identity", "tiny_imagenet_c_2of15_s5"]["n"] == 16
    assert rows["forde_identity", "tiny_imagenet_c_2of15"]["n"] == 80


def test_the_basis_and_the_covariance_are_numpys(tmp_path):
    """Second moments of the normalised images, not centred by pixel, whatever their order."""
    args = forde.parse_args([*TINY, "--out-dir", str(tmp_path)])
    (tmp_path / "forde").mkdir()
    x = torch.randint(256, (9, 3, 2, 2), dtype=torch.uint8)
    images = data.ImageSet("a", x, torch.zeros(9).long(), 5, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    vectors, values = forde.principal_components(images, args)
    x = next(data.Loader(images, 9).epoch()).images.double()
    np.testing.assert_allclose(vectors * values @ vectors.T, x.flatten(1).T @ x.flatten(1) / 8,
                               atol=1e-5)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(12), atol=1e-5)
    assert (values >= 0).all() and (values.diff() <= 0).all()
    patches = F.unfold(x, 3, padding=1).movedim(1, 2).flatten(0, 1)
    np.testing.assert_allclose(forde.second_moments(images, args, True), np.cov(patches.T),
                               atol=1e-5)
    forde.principal_components(images.select(torch.randperm(9)), args)
    assert len([*(tmp_path / "forde").glob("pca-*.pt")]) == 1


def test_a_basis_is_read_once_and_refused_before_training(tiny, tmp_path, monkeypatch):
    loaded, real = [], data.load
    monkeypatch.setattr(data, "load", lambda name, split, *a, **k: (
        loaded.append(split), real(name, split, *a, **k))[1])
    for name in ("a", "b"):
        tiny("--methods", "forde_pca", "--name", name)
    assert loaded.count("train") == 2  # once a start
    assert distance(weights(tmp_path / "forde/a"), weights(tmp_path / "forde/b")) == 0
    [basis] = (tmp_path / "forde").glob("pca-*.pt")
    tiny("--methods", "forde_pca", "--name", "c", "--pca", basis)
    for number, content in enumerate((b"no basis", (tmp_path / "forde/a/forde_pca-seed1.pt")
                                      .read_bytes())):
        bad = tmp_path / f"bad{number}.pt"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=bad.name):
            tiny("--methods", "deep_ensemble", "forde_pca", "--name", f"d{number}", "--pca", bad)
        assert not [*(tmp_path / "forde" / f"d{number}").glob("*.pt")]


def test_picture_has_error_bars_and_markers(tmp_path):
    plt, figures = common.pyplot(), []
    rows = [{"method": m, "seed": s, "set": name, "accuracy": 0.5 + 0.1 * s, "nll": 1.0 + s,
             "ece15": 0.1 * s} for m in ("lit", "weight_rde") for s in (1, 2)
            for name in ("a", *(f"a_c_s{k}" for k in range(1, 6)))]
    plot = SimpleNamespace(subplots=plt.subplots, close=figures.append)
    forde.plot_shift(plot, tmp_path / "shift.png", rows, "a", "a_c")
    bars = figures[0].axes[0].containers
    assert len(bars) == 2 and all(bar.has_yerr for bar in bars)
    assert len({bar.lines[0].get_marker() for bar in bars}) == 2
    assert np.allclose(bars[0].lines[0].get_ydata(), 0.65)
    assert np.allclose(bars[0].lines[2][0].get_segments()[0][:, 1], [0.6, 0.7])


# ---- Options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, named", [
    ("--compile", "--compile"), ("--members 4 --chunk 3", "--chunk 3"),
    ("--dataset features --width 1", "--features"), ("--features a.npz b.npz", "--features"),
    ("--dataset toy_regression --model resnet9", "resnet9"),
    ("--model mlp --dataset toy_regression --methods feature_rde", "feature_rde"),
    ("--model mlp --dataset toy_classification --shift computed", "--shift computed"),
    ("--model mlp --dataset toy_classification --ood glyphs_letters", "--ood"),
    ("--model mlp --dataset toy_classification --val-fraction 0.1", "--val-fraction"),
    ("--eval-every 1", "--val-fraction"), ("--val-fraction 0.00001", "validation"),
    ("--shift published", "--shift published"), ("--ood far.npz", "far.npz"),
    ("--methods forde_pca --pca nowhere.pt", "nowhere.pt"), ("--predict nonsense", "nonsense"),
    ("FEATURES --shift computed", "--shift computed"), ("FEATURES --augment", "--no-augment"),
    ("FEATURES --ood glyphs_letters", "glyphs_letters"), ("FEATURES --features a b", "no file a"),
    ("FEATURES --val-fraction 0.1", "--val-fraction")])
def test_misuse_is_refused_before_training(tiny, features, tmp_path, argv, named):
    more = argv.replace("FEATURES", " ".join(features)).split()
    with pytest.raises(UserError) as refused:
        tiny(*more)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert not [*tmp_path.glob("forde/*")] or "--pca" in argv  # no run directory is claimed


def test_presets_are_the_published_settings():
    def resolved(*argv):
        return vars(forde.parse_args([*argv, "--device", "cpu"]))

    paper = dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
                 lr=0.1, lr_ratio=0.01, momentum=0.9, weight_decay=5e-4, schedule="published",
                 width=1, eps=1e-24, alpha=0.4, augment=True, shift="published", val_fraction=0,
                 limit_train=None, ood=["svhn", "cifar10"])
    cifar10 = dict(paper, alpha=0.2, ood=["svhn", "cifar100"])
    tiny = dict(paper, model="preact_resnet18", epochs=150, lr_ratio=0.001, ood=["svhn"])
    for name, right in (("cifar100", paper), ("cifar10", cifar10), ("tiny_imagenet", tiny)):
        assert right.items() <= resolved("--dataset", name).items()
    for name, preset in forde.PRESETS.items():  # a key that "" lacks would be the default's
        assert preset.keys() <= forde.PRESETS[""].keys(), name
    args = forde.parse_args(["--dataset", "cifar10", "--device", "cpu"])
    assert [forde.with_method(args, m).cauchy for m in ("feature_rde", "function_rde", "lit")] == [
        1e-3, 1e-6, 0]
