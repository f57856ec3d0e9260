"""forde.py against independent oracles: the repulsion as plain loops over (i, j, b) in float64, the
networks written out a second time; then the script end to end."""

import copy
import csv
import itertools
import json
import math
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, assert_same_checkpoints, in_float64, refusal
from PIL import Image
from scipy.stats import entropy
from sklearn.metrics import roc_auc_score
from torch import nn
from torchvision import models

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
    """The options of a miniature network, as parse_args would resolve them."""
    values = dict(model="resnet9", width=0.05, hidden=[6, 7], members=4, chunk=0, amp="off",
                  device=torch.device("cpu"), grad_of="logit", repulsion_coef=1.0, lr=0.1,
                  lr_ratio=0.01, weight_decay=5e-4, schedule="published", epochs=300,
                  weights=None, freeze=False, image_size=None, eval=False)
    return SimpleNamespace(**{**values, **changes})


def ensemble(args, classes=CLASSES, shape=(3, SIDE, SIDE)):
    """M members whose heads, scales and offsets are not those of the published initialisation."""
    nets = [forde.make_network(args, classes, shape) for _ in range(args.members)]
    for net in nets:
        for p in net.parameters():
            if p.ndim == 1:
                p.data.add_(0.3 * torch.randn_like(p))
        net[1].weight.data.normal_(0, 0.5)
    return nn.ModuleList(nets).double()


def make_batch():
    x = double(BATCH, 3, SIDE, SIDE)
    return data.Batch(x, torch.arange(len(x)) % CLASSES, None, len(x))


def random_basis(dim=DIM):
    """Eigenvectors (the columns of a random orthogonal matrix) and eigenvalues, largest first."""
    values = (0.5 + torch.rand(dim, dtype=torch.float64)) / torch.arange(1, dim + 1) * 100
    return torch.linalg.qr(double(dim, dim))[0], values.sort(descending=True).values


def flat(tensors):
    if torch.is_tensor(tensors):
        tensors = [tensors]
    return torch.cat([t.detach().flatten() for t in tensors])


def relative(a, b):
    """|a - b| / |b| of two tensors, or of two lists of tensors."""
    return ((flat(a) - flat(b)).norm() / flat(b).norm()).item()


# ---- Networks -----------------------------------------------------------------------------------


def plain_conv(x, weight, stride=1):
    """Padded by hand as XLA pads: ceil(n / stride) outputs, the odd zero at the end."""
    kernel = weight.shape[-1]
    if kernel == 1:
        return torch.einsum("bchw,oc->bohw", x[:, :, ::stride, ::stride], weight[:, :, 0, 0])
    pads = []
    for n in reversed(x.shape[2:]):  # F.pad begins with the last axis
        zeros = max((math.ceil(n / stride) - 1) * stride + kernel - n, 0)
        pads += [zeros // 2, zeros - zeros // 2]
    return F.conv2d(F.pad(x, pads), weight, None, stride)


def plain_network(net, x):
    """The logits of a residual network in training mode, from its parameters by name."""
    backbone, head = net
    p = dict(backbone.named_parameters())
    blocks = [k for k, m in enumerate(backbone)
              if isinstance(m, (forde.BasicBlock, forde.PreActivationBlock))]
    basic = isinstance(backbone[blocks[0]], forde.BasicBlock)  # one per group; the other has two

    def conv(h, at, stride=1):
        return plain_conv(h, p[f"{at}.weight"], stride)

    def norm(h, at):
        return F.batch_norm(h, None, None, p[f"{at}.weight"], p[f"{at}.bias"], True)

    x = conv(x, 0)
    if basic:
        x = norm(x, 1).relu()
    for number, k in enumerate(blocks):
        stride = 2 if number and (basic or number % 2 == 0) else 1
        h = x if basic else norm(x, f"{k}.before.0").relu()
        z = conv(norm(conv(h, f"{k}.body.0", stride), f"{k}.body.1").relu(), f"{k}.body.3")
        if basic:
            if f"{k}.shortcut.0.weight" in p:
                x = norm(conv(h, f"{k}.shortcut.0", stride), f"{k}.shortcut.1")
            x = (x + norm(z, f"{k}.body.4")).relu()
        else:
            if f"{k}.projection.weight" in p:
                x = conv(h, f"{k}.projection", stride)
            x = x + z
    if not basic:
        x = norm(x, blocks[-1] + 1).relu()
    return x.mean((2, 3)) @ head.weight.T + head.bias


@pytest.mark.parametrize("model", ["resnet9", "preact_resnet18"])
def test_networks_are_those_written_out_to_their_second_derivatives(model):
    [net] = ensemble(options(model=model, members=1))
    batch = make_batch()
    results = []
    for forward in (net, lambda x: plain_network(net, x)):
        logits, g = forde.input_gradient(forward, batch.images, batch.labels)
        second = torch.autograd.grad(g.square().sum(), list(net.parameters()),
                                     materialize_grads=True, allow_unused=True)
        results.append((logits, g, second))
    assert all(relative(own, right) < 1e-9 for own, right in zip(*results))


def derivatives(forward, x, parameters):
    """The output of a layer, the gradients of a function of it, and those of its gradient by x."""
    x = x.detach().requires_grad_()
    y = forward(x)
    first = torch.autograd.grad(y.sin().sum(), [x, *parameters], retain_graph=True)
    g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    loss = g.square().sum() + 3 * g.sin().sum() + (y * y.cos()).sum()
    return [y, *first, g, *torch.autograd.grad(loss, [x, *parameters])]


@pytest.mark.parametrize("options, size", [
    (dict(kernel_size=3, padding=1), (8, 7)), (dict(kernel_size=3, stride=2, padding=1), (8, 7)),
    (dict(kernel_size=7, stride=2, padding=3, bias=False), (9, 10)),
    (dict(kernel_size=(1, 3), stride=(1, 3)), (5, 7)), (dict(kernel_size=1, stride=2), (5, 8))])
def test_convolutions_differentiate_as_torchs_do(options, size):
    layer = nn.Conv2d(2, 3, **options).double()
    peer = copy.deepcopy(layer)
    forde.ease_second_derivatives(nn.Sequential(layer))
    assert type(layer) is forde.Conv2d
    x = double(2, 2, *size)
    for own, right in zip(*(derivatives(each, x, list(each.parameters()))
                            for each in (layer, peer)), strict=True):
        assert relative(own, right) < 1e-12


def test_convolutions_of_other_kinds_are_left_alone():
    layers = [nn.Conv2d(2, 4, 3, padding="same"), nn.Conv2d(2, 4, 3, padding_mode="reflect"),
              nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, dilation=2)]
    forde.ease_second_derivatives(nn.Sequential(*layers))
    assert all(type(layer) is nn.Conv2d for layer in layers)


def test_no_wrong_second_derivative_by_weights():
    layer = forde.SameConv2d(2, 2).double()
    with pytest.raises(RuntimeError, match="not have been used"):
        loss = layer(double(2, 2, 4, 4)).square().sum()
        torch.autograd.grad(loss, layer.weight, create_graph=True)


@pytest.mark.parametrize("model, classes, side, parameters, tensors", [
    ("resnet18", 100, 32, 11_220_132, 62), ("preact_resnet18", 200, 64, 11_269_640, 56),
    ("wrn_16_4", 10, 32, 2_748_890, 44)])
def test_parameter_counts(model, classes, side, parameters, tensors):
    net = forde.make_network(options(model=model, width=1.0), classes, (3, side, side))
    sizes = [p.numel() for p in net.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)


def test_mlp_and_the_published_initialisation():
    [net] = ensemble(options(model="mlp", width=1.0, members=1), 4, (5, 1, 1))
    x, p = double(9, 5, 1, 1), net.state_dict()
    h = x.flatten(1)
    for k in (1, 4):
        h = h @ p[f"backbone.{k}.weight"].T + p[f"backbone.{k}.bias"]
        h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        h = (h * p[f"backbone.{k + 1}.weight"] + p[f"backbone.{k + 1}.bias"]).relu()
    assert relative(net(x), h @ p["head.weight"].T + p["head.bias"]) < 1e-12

    net = forde.make_network(options(model="resnet18", width=0.5), 10, (3, 32, 32))
    assert not net[1].weight.any()
    for name, p in net[0].named_parameters():
        if p.ndim == 4:
            unit = p * p[0].numel() ** 0.5
            assert 1.5 < unit.abs().max() <= 2.0001
            if p.numel() > 30_000:
                assert abs(unit.std() - 0.8796) < 0.012 and abs(unit.mean()) < 0.02
        else:
            assert (p == name.endswith("weight")).all(), name


def test_a_network_of_ones_own_keeps_its_weights(tiny, tmp_path, monkeypatch):
    """Heads are drawn anew: members that start equal would stay equal. Layers that cannot be
    differentiated twice are refused before training."""
    def build(args, shape, first=nn.Identity):
        layer = nn.Linear(math.prod(shape), 9)
        nn.init.constant_(layer.weight, 0.01)
        return [first(2), nn.Flatten(), layer, nn.Softplus(), nn.Dropout(0.1)], 9

    monkeypatch.setitem(forde.NETWORKS, "mine", build)
    monkeypatch.setitem(forde.NETWORKS, "once", partial(build, first=nn.CrossMapLRN2d))
    nets = forde.make_ensemble(options(model="mine"), 1, CLASSES, (3, SIDE, SIDE))
    assert all((net[0][2].weight == 0.01).all() for net in nets)
    assert not any(torch.equal(a[1].weight, b[1].weight)
                   for a, b in itertools.combinations(nets, 2))
    run = ["--methods", "forde_pca", "--model"]
    assert re.search("fails on 2 image.*differentiation", refusal(tiny, *run, "once"))
    assert "must be trained" in refusal(tiny, *run, "mine", "--epochs", 0)
    assert not [*tmp_path.glob("forde/*")]


def test_a_pretrained_network_keeps_its_weights(tiny, tmp_path):
    """Of a file with other classes; it trains in chunks, and its members are not equal."""
    path = tmp_path / "net.pt"
    saved = models.shufflenet_v2_x0_5(num_classes=7).state_dict()
    torch.save({"state_dict": saved}, path)
    args = options(model="torchvision/shufflenet_v2_x0_5", weights=str(path), members=2)
    nets = forde.make_ensemble(args, 1, CLASSES, (3, 32, 32))
    for net in nets:
        state = net[0].state_dict()
        assert len(state) == len(saved) - 2
        assert all(torch.equal(value, saved[name]) for name, value in state.items())
    assert not torch.equal(nets[0][1].weight, nets[1][1].weight)
    rows = tiny("--model", args.model, "--weights", path, "--methods", "forde_identity", "--chunk",
                1, "--members", 2, "--limit-steps", 2, "--epochs", 1,
                without=["--width", "0.02"])
    assert rows["forde_identity", "glyphs"]["gradient_distance"] > 0.01
    [folder] = tmp_path.glob("forde/*")
    [row] = history(folder, "forde_identity")
    assert 2 * math.log(1.25) / 16 - 1e-5 <= row["repulsion"] < 2 * math.log(2) / 16


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


def repulsion(g, matrix=None, eps=1e-24):
    """R of forde.py, by the functions of its Method section."""
    s = forde.unit_rows(g, eps)
    if matrix is not None:
        s = s @ matrix
    return forde.repulsion(forde.log_kernel(s))


def particles(members, batch=4, dim=12, spread=1.0):
    return double(batch, dim) + spread * double(members, batch, dim)


def gradient_of(function, g):
    g = g.detach().clone().requires_grad_()
    value = function(g)
    return value.item(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("members, kept, eps, spread", [
    (2, None, 1e-24, 1.0), (3, 5, 0.5, 1.0), (3, None, 1e-24, 1e-5)])
def test_repulsion_is_the_loops(members, kept, eps, spread):
    """At the small spread the floor of the bandwidth counts; the lengths of gradients never do."""
    a, g = None if kept is None else double(12, kept), particles(members, spread=spread)
    right, right_grad = gradient_of(lambda g: plain_repulsion(g, a, eps), g)
    value, grad = gradient_of(lambda g: repulsion(g, a, eps), g)
    assert value == pytest.approx(right, rel=1e-9) and relative(grad, right_grad) < 1e-9
    assert 0 <= value <= members * math.log(members) / 4
    if eps < 0.1:
        scales = torch.logspace(-3, 3, members).double()[:, None, None]
        again, scaled = gradient_of(lambda g: repulsion(g, a, eps), scales * g)
        assert again == pytest.approx(value, rel=1e-9) and relative(scaled * scales, grad) < 1e-9


@pytest.mark.parametrize("length, members", [(0.0, 2), (1.0, 10)])
def test_equal_or_zero_members_are_at_the_maximum_without_a_force(length, members):
    """Those that are nearly equal keep the digits of their distances."""
    value, grad = gradient_of(repulsion, length * particles(1).repeat(members, 1, 1))
    assert value == pytest.approx(members * math.log(members) / 4, rel=1e-12)
    assert (grad == 0).all()
    value, grad = gradient_of(forde.rbf_repulsion, length * torch.ones(members, 3))
    assert value == pytest.approx(members * math.log(members)) and (grad == 0).all()
    narrow = forde.unit_rows(particles(4, spread=5e-4).float())  # from a Gram matrix: 1e-2
    right = forde.pairwise_squared_distances(narrow.double())
    off = ~torch.eye(4, dtype=torch.bool)
    assert (forde.pairwise_squared_distances(narrow) / right - 1)[off].abs().max() < 1e-5


@pytest.mark.parametrize("length", [0.0, 1e-20])
def test_rows_without_length_are_constants_and_change_no_other(length):
    for a in (None, double(12, 12)):
        g, dead = particles(4), torch.zeros(4, 4, 1, dtype=torch.bool)
        g[1, 2], dead[1, 2] = length * torch.randn(12), True
        right, right_grad = gradient_of(
            lambda g: plain_repulsion(torch.where(dead, torch.zeros_like(g), g), a), g)
        value, grad = gradient_of(lambda g: repulsion(g, a), g)
        assert value == pytest.approx(right, rel=1e-9)
        assert grad.isfinite().all() and (grad[1, 2] == 0).all()
        assert relative(grad, torch.where(dead, 0, right_grad)) < 1e-9


def test_the_identity_holds_without_variance_in_a_direction():
    """Other metrics are those of the loops: test_a_step_is_that_of_the_loops."""
    vectors, values = random_basis(7)
    values[-1] = 0
    a = forde.metric_root(vectors, values, 0.0)
    np.testing.assert_allclose(a @ a.T, np.eye(7), atol=1e-10)


def plain_rbf(points):
    """sum_i ln sum_j exp(-|p_i - sg(p_j)|^2 ln(M+1) / med), one median over all pairs; p [M, P]."""
    m = len(points)
    d = [[(points[i] - points[j].detach()).square().sum() for j in range(m)] for i in range(m)]
    h = np.median([v.item() for row in d for v in row]) / math.log(m + 1) + 1e-12
    return sum(torch.log(sum(torch.exp(-v / h) for v in row)) for row in d)


# ---- A step of training -------------------------------------------------------------------------


NUM_TRAIN = 50


class Case:
    """A miniature ensemble and its batch, as forde.py and as the oracle have it."""

    def __init__(self, method="forde_tuned", alpha=1.0, **changes):
        self.method = method
        self.args = options(**changes)
        self.nets = ensemble(self.args).train()
        self.batch = make_batch()
        vectors, values = random_basis()
        self.A = forde.metric_root(vectors, values, alpha) if alpha else None
        self.matrix = vectors / (alpha / values + 1 - alpha).sqrt() if alpha else None

    def oracle(self):
        """(cross entropy, R): each network alone, the rest in loops."""
        y = self.batch.labels
        logits, gradients = [], []
        for net in self.nets:
            x = self.batch.images.clone().requires_grad_()
            f = net(x)
            scores = f.log_softmax(1) if self.args.grad_of == "logprob" else f
            g, = torch.autograd.grad(scores[range(BATCH), y].sum(), x, create_graph=True)
            logits.append(f)
            gradients.append(g.flatten(1))
        loss = sum(F.cross_entropy(f, y) for f in logits)
        if self.method == "forde_tuned":
            return loss, plain_repulsion(torch.stack(gradients), self.matrix)
        if self.method == "weight_rde":
            weights = [nn.utils.parameters_to_vector(net.parameters()) for net in self.nets]
            return loss, plain_rbf(torch.stack(weights)) / NUM_TRAIN
        if self.method == "lit":
            pairs = itertools.combinations(gradients, 2)
            return loss, torch.stack([F.cosine_similarity(*pair) ** 2 for pair in pairs]).mean()
        z = torch.stack(logits)
        prior = torch.log(1 + 1e-6 * z ** 2).sum()
        return loss, (plain_rbf(z.flatten(1)) + prior) / BATCH

    def step(self, chunk=0, method=None):
        """(what the step returns, parameter gradients)."""
        self.args.chunk = chunk
        self.nets.zero_grad()
        out = forde.ensemble_step(self.nets, self.batch, method or self.method, self.A, NUM_TRAIN,
                                  self.args)
        return out, [p.grad.clone() for p in self.nets.parameters()]


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("changes", [
    dict(alpha=0.4), dict(grad_of="logprob", repulsion_coef=2.5),
    dict(method="function_rde", repulsion_coef=0.7), dict(method="lit", repulsion_coef=0.7),
    dict(method="weight_rde", repulsion_coef=0.7), dict(method="weight_rde", members=3),
    dict(alpha=0.0, model="mlp", width=1.0)], ids=str)
def test_a_step_is_that_of_the_loops(changes, chunk):
    this = Case(**changes)
    loss, force = this.oracle()
    right = torch.autograd.grad(loss + this.args.repulsion_coef * force, [*this.nets.parameters()],
                                retain_graph=True)
    (total, R, logits), grads = this.step(chunk)
    assert total.item() / BATCH == pytest.approx(loss.item(), rel=1e-12)
    assert R.item() == pytest.approx(force.item(), rel=1e-9)
    assert relative(grads, right) < 1e-9 and logits.shape[:2] == (this.args.members, BATCH)
    alone = torch.autograd.grad(loss, [*this.nets.parameters()])
    (total, R, logits), without = this.step(chunk, "deep_ensemble")
    assert total.item() / BATCH == pytest.approx(loss.item(), rel=1e-12) and R == 0
    assert relative(without, alone) < 1e-9 and logits.shape[:2] == (this.args.members, BATCH)


def test_chunks_draw_the_dropout_masks_of_their_first_pass():
    """Gradients are those of the unchunked step, which draws the same masks once."""
    results = []
    for chunk in (0, 1):
        this = Case(alpha=0.0, model="mlp", members=2)
        for net in this.nets:
            net[0].append(nn.Dropout(0.5))
        torch.manual_seed(1)
        results.append(this.step(chunk)[1])
        torch.manual_seed(0)
    assert relative(*results) < 1e-12


@pytest.mark.parametrize("chunk", [0, 1])
def test_published_initialisation_starts_at_the_maximum_without_a_force(chunk):
    """The running statistics move once, also in two passes, of which the first has no graph."""
    this = Case(members=3)
    nets = [forde.make_network(this.args, CLASSES, (3, SIDE, SIDE)) for _ in range(3)]
    this.nets = nn.ModuleList(nets).double()
    forde.set_momentum(this.nets, 0.25)
    (_, value, logits), grads = this.step(chunk)
    assert value.item() / 3 == pytest.approx(math.log(3) / BATCH, rel=1e-12)
    assert (logits == 0).all() and sum(g.abs().sum() for g in grads) > 0
    for net in this.nets:
        h = F.conv2d(this.batch.images, net[0][0].weight, padding=1)
        assert relative(net[0][1].running_mean, 0.25 * h.mean((0, 2, 3))) < 1e-9
        assert relative(net[0][1].running_var, 0.75 + 0.25 * h.var((0, 2, 3))) < 1e-9
    assert all(torch.equal(a, b) for a, b in zip(grads, this.step(chunk, "deep_ensemble")[1]))


def test_learning_rate_table():
    table = {0: .1, 149: .1, 150: .1, 151: .099175, 210: .0505, 269: .001825, 270: .001, 299: .001}
    for epoch, lr in table.items():
        for step in (0, 1, 389):  # constant within an epoch
            assert forde.learning_rate(390 * epoch + step, 390, options()) == pytest.approx(lr)


# ---- Runs ---------------------------------------------------------------------------------------

TINY = ("--model resnet9 --width 0.02 --members 3 --limit-train 76 -b 16 --epochs 2 --no-plot "
        "--device cpu --workers 0 --shift none --ood").split()
MLP = ["--model", "mlp", "--hidden", 30]


def keep_few(patch):
    """Test and OOD sets of a hundred images, three kinds of corruption."""
    load = data.load
    patch.setattr(data, "CORRUPTIONS", dict([*data.CORRUPTIONS.items()][:3]))
    patch.setattr(forde, "DIVERSITY_EXAMPLES", 24)

    def load_few(name, split, *rest, **more):
        dataset = load(name, split, *rest, **more)
        return data.stratified_subset(dataset, 100) if split in ("test", "ood") else dataset

    patch.setattr(data, "load", load_few)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """tiny(*options): the rows of a run of half a second, by (method, set[, against])."""
    keep_few(monkeypatch)

    def run(*more, without=()):
        argv = [word for word in TINY if word not in without]
        rows = forde.main([*argv, "--out-dir", str(tmp_path), *map(str, more)])
        return {tuple(row[k] for k in ("method", "set", "against") if k in row): row
                for row in rows}

    return run


def history(folder, method):
    return torch.load(folder / f"{method}-seed1.pt", weights_only=True)["history"]


def without_times(rows):
    return {key: {k: v for k, v in row.items() if k != "ms"} for key, row in rows.items()}


def weights(folder, method="*", seed=1):
    [path] = [p for p in folder.glob(f"**/{method}-seed{seed}.pt") if "basis" not in p.name]
    return torch.load(path, weights_only=True)["net"]


def distance(a, b):
    """The largest relative difference of a tensor of two states, but for the counts of steps."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).double().norm() / b[k].double().norm().clamp_min(1e-3)).item()
               for k in a if "num_batches" not in k)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The default command, narrow and short, its picture, and then --eval."""
    out = tmp_path_factory.mktemp("story")
    seen = []  # before each step: the first layer of the first member, and the images
    argv = (f"--out-dir {out} --width 0.1 --members 2 --limit-train 300 --epochs 2 "
            "--shift-examples 5 --device cpu --runs 2 --predict glyphs_letters").split()
    with pytest.MonkeyPatch.context() as patch:
        keep_few(patch)
        step = forde.ensemble_step

        def watched(nets, batch, *rest):
            seen.append((copy.deepcopy(nets[0].backbone[1]), batch.images))
            return step(nets, batch, *rest)

        patch.setattr(forde, "ensemble_step", watched)
        rows = forde.main(argv)
        trained = len(seen)
        again = forde.main([*argv, "--eval", "--no-plot"])
    assert len(seen) == trained  # nothing was trained again
    return out, rows, again, seen


def test_the_story(story):
    out, rows, again, seen = story
    methods = ("deep_ensemble", "forde_pca", "forde_identity")
    [folder] = (out / "forde").glob("glyphs-*")
    results = json.loads((folder / "results.json").read_text())
    assert again == results["rows"]
    assert [{**row, "ms": 0} for row in again] == [{**row, "ms": 0} for row in rows]
    # seeds; methods and two differences; test, val and OOD set, five severities and three kinds at
    # each of them, their mean
    assert len(rows) == 2 * (3 + 2) * (3 + 5 * (1 + 3) + 1)
    names = {path.name for path in folder.iterdir()}
    assert {"results.csv", *(f"{m}-seed{s}.pt" for m in methods for s in (1, 2))} <= names
    # The seeds' validation sets differ, and so do the images that they train on.
    assert {path.name for path in folder.glob("basis*")} == {"basis-seed1.pt", "basis-seed2.pt"}
    for name in ("shift.png", "training.png"):
        pixels = np.asarray(Image.open(folder / name).convert("L"))
        assert len(pixels) > 200 and 0.5 < (pixels > 250).mean() < 0.99
    with open(folder / "predictions.csv") as file:  # a deep ensemble's columns come last
        header, *lines = csv.reader(file)
    assert len(lines) == 100 and header[1:3] == ["predicted", "confidence"]
    assert header[7] == "predicted_forde_identity" and header[-2] == "epistemic_deep_ensemble"
    by = {(row["method"], row["seed"], row["set"], row.get("against")): row for row in rows}
    pairs = [key for key in by if key[0] == "forde_pca - deep_ensemble"]
    assert len(pairs) == 2 * 24
    for key in pairs:
        own, base = by["forde_pca", *key[1:]], by["deep_ensemble", *key[1:]]
        for metric in set(forde.COLUMNS) & own.keys():
            assert by[key][metric] == pytest.approx(own[metric] - base[metric])
    for method in methods:
        own = [row for row in rows if row["method"] == method and row["seed"] == 1]
        pooled = [row for row in own if "severity" in row and "kind" not in row]
        for k in ("accuracy", "nll", "ece15", "gradient_distance", "epistemic_mean"):
            assert own[-1][k] == pytest.approx(np.mean([row[k] for row in pooled]))
        for row in pooled:
            kinds = [other for other in own if other.get("severity") == row["severity"]][1:]
            assert {other["set"] for other in kinds} == {
                f"glyphs_c_{kind}_s{row['severity']}" for kind in [*data.CORRUPTIONS][:3]}
            assert row["nll"] == pytest.approx(np.mean([other["nll"] for other in kinds]))
            assert row["ms"] > 0 and row["bytes"] > 4 * 2 * 28 * 28 * 12
        log = history(folder, method)
        # one cycle of 18 steps: 300 images make nine batches of 32 an epoch
        assert [row["lr"] for row in log] == pytest.approx([0.1 * 10 / 14.4, 0.1 / 14.4])
        # with two members R is 2 ln(1.25) / B where they differ
        R = [32 * row["repulsion"] for row in log if method != "deep_ensemble"]
        assert all(2 * math.log(1.25) - 1e-4 <= r <= 2 * math.log(2) + 1e-4 for r in R)
        assert all(("repulsion" in row) == (method != "deep_ensemble") for row in log)
        val = by[method, 1, "val", None]
        assert log[-1]["val_accuracy"] == pytest.approx(val["accuracy"], abs=1e-6)
        assert log[-1]["val_nll"] == pytest.approx(val["nll"], abs=1e-5)
    steps = len(seen) // 6
    first, *others = (seen[k * steps:(k + 1) * steps] for k in range(6))
    for k, other in enumerate(others):  # the methods start alike and see the same batches
        same = k < 2
        assert torch.equal(first[0][0].weight, other[0][0].weight) == same
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, other)) == same
    # published: hidden_t = 0.9 hidden_(t-1) + 0.1 statistic_t, divided by 1 - 0.9^t
    mean, var = torch.zeros(13), torch.zeros(13)
    for layer, images in first:
        h = layer(images.flatten(1)).detach()
        mean, var = 0.9 * mean + 0.1 * h.mean(0), 0.9 * var + 0.1 * h.var(0)
    state = torch.load(folder / "deep_ensemble-seed1.pt", weights_only=True)["net"]
    for name, value in (("mean", mean), ("var", var)):
        assert relative(state[f"0.backbone.2.running_{name}"], value / (1 - 0.9 ** steps)) < 1e-5


def plain_metrics(p, y):
    """Metrics of member probabilities p [M, N, K], float64; the others are in test_metrics.py."""
    mean = p.mean(0)
    wrong = mean.argmax(1) != y
    loss = -np.log(mean[range(len(y)), y])
    total, aleatoric, votes = entropy(mean, axis=1), entropy(p, axis=2).mean(0), p.argmax(2)
    return {"nll": loss.mean(), "nll_miss": loss[wrong].mean(),
            "accuracy": 1 - wrong.mean(), "member_accuracy": (votes == y).mean(),
            "disagreement": (votes[0] != votes[1]).mean(),
            "top2_accuracy": (np.argsort(mean)[:, -2:] == y[:, None]).any(1).mean(),
            "total_mean": total.mean(), "aleatoric_mean": aleatoric.mean(),
            "epistemic_mean": (total - aleatoric).mean(),
            "epistemic_std": (total - aleatoric).std()}


def test_temperature_is_fitted_on_the_validation_set():
    y = torch.arange(200) % 5
    val, test = (forde.Outputs((3 * double(2, 200, 5)).log_softmax(2), y, 0.1) for _ in range(2))
    row, *_ = forde.clean_rows("test", test, val, {}, 0.5, {"method": "lit", "seed": 1})
    temperature = common.fit_temperature(val.log_probs.exp().mean(0).log(), y)
    assert row["temperature"] == pytest.approx(temperature, rel=1e-6)
    scaled = F.cross_entropy(test.log_probs.exp().mean(0).log() / temperature, y).item()
    assert row["nll_scaled"] == pytest.approx(scaled, rel=1e-6)


def test_the_storys_evaluation_is_that_of_the_saved_members(story):
    out, rows, *_ = story
    args = options(model="mlp", hidden=[128, 128], width=0.1, members=2)
    nets = ensemble(args, 10, (1, 28, 28)).eval()
    nets.load_state_dict(weights(out, "forde_pca", 2))
    test = data.stratified_subset(data.load("glyphs", "test"), 100)
    letters = data.stratified_subset(data.load("glyphs_letters", "test"), 100)

    def unit(own):
        return (own.images.double() / 255 - test.mean[0]) / test.std[0]

    with torch.no_grad():
        p, q = (torch.stack([net(unit(own)).softmax(1) for net in nets]).numpy()
                for own in (test, letters))
    own = [row for row in rows if (row["method"], row["seed"]) == ("forde_pca", 2)]
    for key, value in plain_metrics(p, test.labels.numpy()).items():
        assert own[0][key] == pytest.approx(value, abs=1e-5), key
    uncertainty = np.concatenate([entropy(r.mean(0), axis=1) - entropy(r, axis=2).mean(0)
                                  for r in (p, q)])
    auroc = roc_auc_score(np.repeat([0, 1], 100), uncertainty)
    assert own[2]["auroc_epistemic"] == pytest.approx(auroc, abs=2e-3)
    some = data.stratified_subset(test, 24)
    x = unit(some).requires_grad_()
    g = [torch.autograd.grad(net(x)[range(24), some.labels].sum(), x)[0].flatten(1)
         for net in nets]
    assert own[0]["gradient_distance"] == pytest.approx(
        1 - F.cosine_similarity(*g).mean().item(), abs=1e-5)


def test_every_method_and_one_that_was_killed(tiny, tmp_path, monkeypatch):
    """Killed in the second step of the second method's second epoch: the same weights, bit for bit.
    All methods repel but the deep ensemble, and no two end alike."""
    every = ["--methods", *forde.METHODS, "--augment", "--val-fraction", 0.01, "--limit-steps", 2,
             *MLP]
    calm, real, steps = tiny(*every, "--name", "calm"), forde.learning_rate, []

    def killed(step, *rest):
        steps.append(step)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return real(step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(forde, "learning_rate", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny(*every, "--name", "again")
    assert steps[-1] == 3
    assert without_times(tiny(*every, "--name", "again")) == without_times(calm)
    folder = tmp_path / "forde"
    states = {m: weights(folder / "calm", m) for m in forde.METHODS}
    for method, state in states.items():
        name = f"{method}-seed1"
        assert_same_checkpoints(folder / f"calm/{name}.pt", folder / f"again/{name}.pt")
        assert calm[method, "glyphs"]["temperature"] and calm[method, "val"]["n"] > 0
        assert sum(distance(state, other) < 1e-6 for other in states.values()) == 1
    # the prior of weight-RDE is divided by the number of examples
    R = 75 * history(folder / "calm", "weight_rde")[-1]["repulsion"]
    assert 3 * 0.2 < R < 3 * math.log(3)
    for alpha, method in enumerate(("forde_identity", "forde_pca")):
        tiny(*every, "--methods", "forde_tuned", "--alpha", alpha, "--name", f"{alpha}")
        assert distance(weights(folder / f"{alpha}"), states[method]) < 1e-4


def test_logged_repulsion_is_the_mean_of_the_steps(tiny, tmp_path, monkeypatch):
    """It is R: not divided by members, not multiplied by --repulsion-coef."""
    R = []

    def watched(log_k, repulsion=forde.repulsion):
        R.append(repulsion(log_k))
        return R[-1]

    monkeypatch.setattr(forde, "repulsion", watched)
    tiny("--epochs", 1, "--methods", "forde_identity", "--repulsion-coef", 5, *MLP)
    assert len(R) == 4 and R[0].item() == pytest.approx(3 * math.log(3) / 16)
    [row] = history(next(tmp_path.glob("forde/*")), "forde_identity")
    assert row["repulsion"] == pytest.approx(np.mean([value.item() for value in R]))


def test_one_basis_serves_all_seeds_that_train_on_the_same_images(tiny, tmp_path, monkeypatch):
    run = ["--methods", "forde_pca", "forde_tuned", "--val-fraction", 0, "--limit-steps", 1,
           "--epochs", 1, "--name", "a", *MLP]
    tiny(*run)
    [path] = tmp_path.glob("forde/a/basis*.pt")
    assert torch.load(path, weights_only=True)["eigenvectors"].dtype == torch.float32
    monkeypatch.setattr(forde, "pca", lambda *_: pytest.fail("computed again"))
    tiny(*run, "--runs", 2)


def test_one_member_has_no_epistemic_uncertainty_to_detect_with(tiny):
    """Its area would be that of ties, 0.5."""
    rows = tiny("--members", 1, "--methods", "deep_ensemble", "--epochs", 1, *MLP, "--ood",
                "glyphs_letters", without=["--ood"])
    row = rows["deep_ensemble", "glyphs", "glyphs_letters"]
    assert "auroc_total" in row and not any(name.startswith("auroc_epi") for name in row)


def test_cifar10_is_normalised_as_published_or_as_the_weights_want(monkeypatch):
    images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)

    def fake(name, split, *_, transform=None, **more):
        mean, std = (transform.mean, transform.std) if transform else ((0.5,) * 3, (0.3,) * 3)
        return data.ImageSet(name, images, torch.arange(20) % 10, 10, mean, std)

    monkeypatch.setattr(data, "load", fake)
    for model, std in (("resnet18", 0.247), ("torchvision/resnet18 --weights none", 0.229)):
        options = f"--dataset cifar10 --ood --model {model}".split()
        splits = forde.load_splits(forde.parse_args([*options, *CPU]), 1)
        assert splits.train.std[0] == splits.test.std[0] == std


def test_augmentation_is_of_training_alone(tiny, tmp_path, monkeypatch):
    run = [*MLP, "--methods", "forde_pca", "--epochs", 1, "--limit-steps", 2, "--name"]
    for name, option in (("a", "--augment"), ("b", "--no-augment")):
        make = Mock(wraps=data.Loader)
        with monkeypatch.context() as patch:
            patch.setattr(data, "Loader", make)
            tiny(*run, name, option)
        loaders = [call.kwargs for call in make.call_args_list]
        augment = {(each.get("shuffle", False), each.get("augment", "none")) for each in loaders}
        assert augment == {(True, "crop_flip" if name == "a" else "none"), (False, "none")}
    assert distance(*(weights(tmp_path / "forde" / name) for name in "ab")) > 1e-3
    with pytest.raises(UserError, match="diverged.*learning rate"):
        tiny(*run, "c", "--lr", 1e38, "--limit-steps", 1)


SPREAD = ["--members 2 --augment --methods forde_pca",
          "--model mlp --hidden 30 --methods weight_rde function_rde lit",
          "--model mlp --hidden 30 --chunk 2 --grad-of logprob --methods forde_tuned weight_rde"]


def few_in_float64(folder):
    """The rows of the runs SPREAD, in float64."""
    with pytest.MonkeyPatch.context() as patch:
        keep_few(patch)
        in_float64(forde, patch.setattr)
        return [forde.main([*TINY, "-b", "15", "--limit-steps", "2", "--epochs", "1", "--out-dir",
                            str(folder), "--name", f"run{k}", *text.split()])
                for k, text in enumerate(SPREAD)]


def test_two_processes_equal_one(ranks, tmp_path):
    two = ranks(few_in_float64, tmp_path / "two")[0]
    for k, rows in enumerate(few_in_float64(tmp_path / "one")):
        one, other = (tmp_path / name / "forde" / f"run{k}" for name in ("one", "two"))
        for path in one.glob("*_*-seed1.pt"):
            a, b = (torch.load(p, weights_only=True)["net"] for p in (path, other / path.name))
            assert distance(b, a) < 1e-10, path.name
        assert json.loads((other / "results.json").read_text())["environment"]["processes"] == 2
        for row, again in zip(rows, two[k], strict=True):
            assert row.keys() == again.keys()
            assert all(again[k] == pytest.approx(v, abs=1e-6) for k, v in row.items() if k != "ms")


def test_the_basis_is_numpys():
    """Second moments of the normalised images, not centred by pixel."""
    args = forde.parse_args([*TINY])
    x = torch.randint(256, (9, 3, 2, 2), dtype=torch.uint8)
    images = data.ImageSet("a", x, torch.zeros(9).long(), 5, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    basis = forde.compute_basis(images, args)
    vectors, values = basis["eigenvectors"], basis["eigenvalues"]
    x = next(data.Loader(images, 9).epoch()).images.double().flatten(1)
    np.testing.assert_allclose(vectors * values @ vectors.T, x.T @ x / 8, atol=1e-5)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(12), atol=1e-5)
    assert (values >= 0).all() and (values.diff() <= 0).all()


# ---- Options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, named", [
    ("--compile", "--compile"), ("--shift published", "--shift published"),
    ("--shift-examples 3", "--shift-examples"), ("--hidden 3", "--hidden"),
    ("--lr-ratio 0.1", "--lr-ratio"), ("--methods forde_pca --alpha 0.1", "--alpha"),
    ("--methods deep_ensemble --repulsion-coef 2", "--repulsion-coef"),
    ("--members 1", "one particle cannot repel"),
    ("--model torchvision/resnet18 --weights none --freeze", "--freeze"),
    ("--model torchvision/resnet18 --weights none --epochs 0", "which must be trained"),
    ("--limit-train 1", "--limit-train"), ("FOLDER --val-fraction 0.1", "a part val")])
def test_misuse_is_refused_before_training(tiny, tmp_path, argv, named):
    if "FOLDER" in argv:
        (tmp_path / "mine" / "val" / "a").mkdir(parents=True)
        argv = argv.replace("FOLDER", f"--dataset folder:{tmp_path}/mine")
    assert named in refusal(tiny, *argv.split())
    assert not [*tmp_path.glob("forde/*")]  # no run directory is made


def test_presets_are_the_published_settings():
    paper = dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
                 lr=0.1, lr_ratio=0.01, weight_decay=5e-4, schedule="published", width=1,
                 alpha=0.4, augment=True, shift="published", val_fraction=0, limit_train=None,
                 ood=["svhn", "cifar10"])
    cifar10 = dict(paper, alpha=0.2, ood=["svhn", "cifar100"])
    tiny = dict(paper, model="preact_resnet18", epochs=150, lr_ratio=0.001, ood=["svhn"])
    gray = dict(paper, augment=False, shift="computed", ood=["fashion_mnist"])
    for name, right in (("cifar100", paper), ("cifar10", cifar10), ("tiny_imagenet", tiny),
                        ("mnist", gray)):
        assert right.items() <= vars(forde.parse_args(["--dataset", name, *CPU])).items()
