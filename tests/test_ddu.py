"""ddu.py: operators as dense matrices, Gaussians by SciPy and scikit-learn; networks, runs."""

import copy
import csv
import gc
import json
import math
import shutil
from argparse import Namespace
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from scipy import optimize, special, stats
from sklearn import covariance as sk_covariance, metrics as sk
from torch import nn
from torchvision import models

import common
import data
import ddu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def few_glyphs():
    """In this process, embedded sets have few images."""
    with pytest.MonkeyPatch.context() as patch:
        for name, prints in list(data.EMBEDDED.items()):
            if prints is not None:
                few = prints._replace(train_rows=600, test_rows=200)
                patch.setitem(data.EMBEDDED, name, few)
        data.load_embedded.cache_clear()
        yield
    data.load_embedded.cache_clear()


def parse(line):
    return ddu.parse_args([*line.split(), "--device", "cpu"])


def modules(net, kind):
    return [module for module in net.modules() if isinstance(module, kind)]


# ---- Spectral normalisation ---------------------------------------------------------------------


def convolution(kernel_size=3, channels=5, **options):
    return nn.Conv2d(4, channels, kernel_size, bias=False, **options)


def spectral(layer, coeff, shape=(4, 8, 8)):
    """A layer with new weights in float64 and in training mode, and its SoftSpectral."""
    layer = copy.deepcopy(layer)
    layer.reset_parameters()
    ddu.spectral_normalise(layer, shape, coeff)
    layer.double()
    return layer, layer.parametrizations.weight[0]


def raw_weight(layer):
    return layer.parametrizations.weight.original


def scale_of(layer):
    """W_eff / W of the next forward, one number."""
    ratio = (layer.weight / raw_weight(layer)).detach().flatten()
    assert (ratio - ratio[0]).abs().max() < 1e-6
    return ratio[0].item()


def dense_operator(layer, shape):
    """The matrix of a convolution of images of `shape`, with its raw weight: its basis images."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    images = F.conv2d(basis, raw_weight(layer).detach(), None, layer.stride, layer.padding,
                      layer.dilation, layer.groups)
    return images.flatten(1).T.numpy()


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("size, layer", [
    ((8, 8), convolution(padding=1)), ((1, 1), convolution(padding=1)), ((6, 5), convolution()),
    ((7, 7), convolution(padding=1, stride=2)),
    ((7, 6), convolution(padding=1, stride=2, channels=8, groups=4)),
    ((7, 8), convolution((3, 5), padding=(2, 2), dilation=(2, 1)))])
def test_sigma_of_a_convolution_is_the_norm_of_its_dense_operator(size, layer):
    """Stride and zero padding included, by iterations v = A^T u, u = A v from the start."""
    shape = (4, *size)
    conv, sn = spectral(layer, 1e-3, shape)
    a = dense_operator(conv, shape)
    u = sn.u.flatten().numpy().copy()
    x = torch.randn(2, *shape, dtype=torch.float64)
    for _ in range(3):
        y = conv(x)
        v = unit(a.T @ u)
        u = unit(a @ v)
    assert np.allclose(sn.v.flatten(), v, atol=1e-10) and np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = a / ((u @ a @ v) / 1e-3 + 1e-5)
    assert np.allclose(y.detach().flatten(1), x.flatten(1).numpy() @ effective.T, rtol=1e-9)
    exact = np.linalg.svd(a, compute_uv=False)[0]
    sigmas = [1e-3 * (1 / scale_of(conv) - 1e-5) for _ in range(150)]
    assert np.all(np.diff(sigmas) >= -1e-9 * exact)
    assert exact * (1 - 2e-3) <= sigmas[-1] <= exact * (1 + 1e-9)
    reshaped = np.linalg.norm(raw_weight(conv).detach().flatten(1).numpy(), 2)
    assert abs(sigmas[-1] / reshaped - 1) > 0.05  # what torch's spectral_norm would have found


@pytest.mark.parametrize("layer, shape", [
    (convolution(1, stride=2), (4, 8, 8)), (convolution(1, channels=6, groups=2), (4, 8, 8)),
    (nn.Linear(4, 5), (4,)), (nn.Linear(4, 5), (7, 4))], ids=str)  # the last one sees tokens
def test_matrices_are_scaled_to_the_coefficient_without_the_added_1e5(layer, shape):
    layer, sn = spectral(layer, 0.3, shape)
    x = torch.randn(2, *shape, dtype=torch.float64)
    for _ in range(200):
        y = layer(x)
    raw = raw_weight(layer).detach()
    blocks = raw.flatten(1).split(len(raw) // getattr(layer, "groups", 1))  # A has them apart
    exact = max(np.linalg.norm(block.numpy(), 2) for block in blocks)
    assert scale_of(layer) == pytest.approx(0.3 / exact, rel=1e-9)
    torch.testing.assert_close(layer.eval()(x), y)
    sn.coeff = 1000.0
    assert torch.equal(layer.train().weight, raw_weight(layer))  # never inflated
    nn.init.zeros_(raw_weight(layer))
    assert not layer.weight.any() and sn.u.isfinite().all() and sn.v.isfinite().all()


@pytest.mark.parametrize("coeff", [0.1, 1000.0])  # active or not
@pytest.mark.parametrize("layer, shape", [(convolution(padding=1, stride=2), (4, 5, 5)),
                                          (nn.Linear(4, 5), (3, 4))], ids=str)
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(layer, shape, coeff):
    layer, sn = spectral(layer, coeff, shape)
    raw = raw_weight(layer)
    x = torch.randn(2, *shape, dtype=torch.float64)
    value = layer(x).square().sum()
    frozen = copy.deepcopy(layer.eval())  # with u and v of that forward
    layer.train()(x)  # changes them before the backward
    gradient, = torch.autograd.grad(value, raw)

    def loss(weight):
        changed = {"parametrizations.weight.original": weight}
        return torch.func.functional_call(frozen, changed, x).square().sum()

    assert torch.equal(gradient, torch.autograd.grad(loss(raw), raw)[0])
    largest = gradient.abs().max().item()
    assert torch.autograd.gradcheck(loss, raw, eps=1e-5, rtol=1e-6, atol=1e-6 * largest)


class Mixed(nn.Module):
    """Layers that have a spectral norm here, and others that have none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 6, 2)
        self.temporal = nn.Conv1d(6, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        tokens = self.temporal(self.up(self.norm(self.conv(x))).flatten(2)).mT     # [B, T, 8]
        return self.linear(self.attention(tokens, tokens, tokens)[0])


def test_convolutions_and_linear_layers_are_normalised_and_others_are_named():
    net = Mixed()
    others = ddu.spectral_normalise(net, (1, 9, 8), 0.01)
    assert others == ["up.weight", "temporal.weight", "attention.in_proj_weight",
                      "attention.out_proj.weight"]
    assert {id(layer) for layer in modules(net, ddu.SoftSpectral)} == {
        id(layer.parametrizations.weight[0]) for layer in (net.conv, net.linear)}
    assert net.training and net.norm.num_batches_tracked == 0 and net.norm.running_mean.sum() == 0
    x = torch.randn(2, 1, 9, 8)
    before = net.eval().state_dict()
    before = {name: value.clone() for name, value in before.items()}
    assert torch.equal(net(x), net(x))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)  # no power iteration
    for _ in range(60):
        net.train()(x).sum().backward()
    assert torch.linalg.matrix_norm(net.linear.weight, 2).item() == pytest.approx(0.01, rel=1e-4)
    # The weights and their norms are float32 under autocast, too.
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.eval().conv.weight, net.conv.weight.float())
        inside = net.conv.weight
    assert torch.equal(inside, net.conv.weight)


# ---- Gaussians ----------------------------------------------------------------------------------


def clusters(counts, dim, seed=0, spread=3.0):
    """(features [N, D] float64, labels [N]): correlated Gaussian classes, shuffled."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in counts:
        mixing = np.eye(dim) + 0.5 * rng.normal(size=(dim, dim)) / dim**0.5
        rows.append(rng.normal(size=(n, dim)) @ mixing + spread * rng.normal(size=dim))
    labels = np.repeat(np.arange(len(counts)), counts)
    order = rng.permutation(len(labels))
    return torch.tensor(np.concatenate(rows)[order]), torch.tensor(labels[order])


def fit(z, y, shrinkage=False):
    return ddu.ClassGaussians(z, y, int(y.max()) + 1, shrinkage)


def ledoit_wolf(z):
    """That of scikit-learn, whose covariances have the divisor n."""
    return sk_covariance.ledoit_wolf(z)[0] * len(z) / (len(z) - 1)


def scipy_joint(z, y, points, covariance=partial(np.cov, rowvar=False)):
    """log N(z; mu_c, Sigma_c) + log n_c / N [N, K], by SciPy in float64."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        gaussian = stats.multivariate_normal(rows.mean(0), covariance(rows))
        columns.append(gaussian.logpdf(points.double().numpy()) + np.log(len(rows) / len(z)))
    return np.stack(columns, 1)


@pytest.mark.parametrize("dim, dtype, offset", [
    (16, torch.float64, 0.0), (64, torch.float32, 0.0), (8, torch.float64, 1e4)])
def test_densities_are_those_of_scipy_in_float64(dim, dtype, offset):
    z, y = clusters((120, 260, 150, 200), dim, spread=0.3)
    z = (z + offset).to(dtype)
    points = torch.cat([z[:300], offset + 3 * torch.randn(20, dim, dtype=dtype)])
    joint = scipy_joint(z, y, points)
    for ours, rows in zip(ddu.class_log_densities(fit(z, y), [points, points[:7]]), (320, 7)):
        assert ours.dtype == torch.float64
        assert np.allclose(ours, joint[:rows], rtol=1e-8, atol=1e-6)
    density = special.logsumexp(joint, 1)
    assert np.allclose(ddu.log_density(fit(z, y), points), density, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("counts, dim", [((40, 12, 60), 10), ((6, 9), 15)])
def test_shrinkage_is_ledoit_and_wolfs(counts, dim):
    z, y = clusters(counts, dim)
    points = 4 * torch.randn(20, dim, dtype=torch.float64)
    ours = ddu.class_log_densities(fit(z, y, shrinkage=True), [points])[0]
    assert np.allclose(ours, scipy_joint(z, y, points, ledoit_wolf), rtol=1e-9)


def exact_log_density(z, y, point, jitters):
    """log sum_c q(c) N(point; mu_c, Sigma_c + jitter_c I), by mpmath from inverses."""
    total = 0
    with mpmath.workdps(50):
        for c, jitter in enumerate(jitters):
            rows = z[y == c].numpy().astype(object) * mpmath.mpf(1)
            centred = rows - rows.mean(0)
            sigma = mpmath.matrix(centred.T @ centred / (len(rows) - 1))
            sigma += jitter * mpmath.eye(z.shape[1])
            offset = mpmath.matrix(point.numpy() - rows.mean(0))
            power = (offset.T * mpmath.inverse(sigma) * offset)[0] / 2
            norm = mpmath.sqrt(mpmath.det(2 * mpmath.pi * sigma))
            total += mpmath.mpf(len(rows)) / len(z) * mpmath.exp(-power) / norm
        return float(mpmath.log(total))


@pytest.mark.parametrize("dead", [False, True])
def test_singular_covariances_get_the_smallest_jitter_that_helps_and_others_none(dead):
    """Of few rows, or with a feature that is always 0; then there is no rounding error."""
    for seed in range(10):
        z, y = clusters((3 if not dead else 30, 40), 5, seed)
        z[y == 0, 4] *= not dead
        gaussians = fit(z, y)
        jitters = [1e-12 * z[y == 0].var(0).mean().item(), 0]
        added = [(gaussian.factor @ gaussian.factor.T - z[y == c].T.cov()).diagonal().mean().item()
                 for c, gaussian in enumerate(gaussians)]
        assert added == pytest.approx(jitters, rel=0.02, abs=1e-15)
        near = z[0] + 1e-6 * torch.randn(5).double()
        found = ddu.log_density(gaussians, near[None]).item()
        assert found == pytest.approx(exact_log_density(z, y, near, jitters), rel=1e-3)


def test_what_has_no_covariance_is_refused_when_its_turn_comes():
    z, y = clusters((20, 30), 4)
    with pytest.raises(ValueError, match=r"class 2 has 0 example\(s\); a covariance needs two"):
        ddu.ClassGaussians(z, y, 3)
    with pytest.raises(ValueError, match=r"class 1 has 1 example\(s\)"):
        ddu.ClassGaussians(z[:3], torch.tensor([0, 0, 1]), 2)
    z[y == 1] = 7.0
    for value in (7.0, math.nan):
        z[0] = value
        gaussians = iter(fit(z, y))
        if value == 7.0:
            next(gaussians)  # class 0 is fitted without class 1
        with pytest.raises(ValueError, match="singular: a feature is constant, or NaN"):
            next(gaussians)


def test_matrices_of_one_class_are_alive_at_a_time_and_float64_copies_of_4096_rows(monkeypatch):
    z, y = clusters(range(10, 22), 9)
    sets = [z.float(), torch.randn(9001, 9)]
    seen = []
    cholesky = ddu.cholesky_with_jitter
    log_prob = ddu.Gaussian.log_prob

    def count_entries(covariance):
        factor = cholesky(covariance)
        tensors = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor]
        seen.append(sum(t.numel() for t in tensors if t.shape[-2:] == (9, 9)))
        return factor

    monkeypatch.setattr(ddu, "cholesky_with_jitter", count_entries)
    monkeypatch.setattr(ddu.Gaussian, "log_prob", lambda gaussian, block: log_prob(
        gaussian, block[:4096]))  # longer ones would not fit into their place
    ours = ddu.class_log_densities(fit(z, y), sets)
    assert len(seen) == 12 and max(seen) <= 3 * 81  # a covariance, its factor, that before it
    for found, points in zip(ours, sets):
        assert np.allclose(found[::97], scipy_joint(z, y, points[::97]), rtol=1e-6)


# ---- Scores and decisions -----------------------------------------------------------------------


def test_low_density_is_ood_whatever_the_entropy():
    density = torch.tensor([5.0, 5.0, -5.0, -5.0, 1.0]).double()
    entropy = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    assert ddu.decide(density, entropy, 1.0, 0.5).tolist() == [0, 1, 2, 2, 0]
    assert ddu.REGIONS == ("in_distribution", "ambiguous", "ood")


def test_learning_rates():
    args = Namespace(schedule="step", lr=0.1)
    steps = [352 * epoch + place for epoch in (0, 149, 150, 249, 250, 349) for place in (0, 351)]
    rates = [ddu.learning_rate(step, 352, 350, args) for step in steps]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 4, rel=1e-12)
    assert ddu.learning_rate(6, 7, 1, args) == 0.1  # not a hundredth of it
    args = Namespace(schedule="one_cycle", lr=0.2)
    rates = [ddu.learning_rate(step, 20, 5, args) for step in range(100)]
    assert np.allclose(rates[:20], 0.2 * np.arange(1, 21) / 21)
    assert np.allclose(rates[20:], 0.2 * np.arange(80, 0, -1) / 80)
    assert ddu.learning_rate(9, 2, 5, Namespace(schedule="constant", lr=0.3)) == 0.3


def test_a_data_set_alone_is_the_papers_recipe():
    paper = dict(model="wide_resnet", width=1.0, sn=True, mod=True, coeff=3.0, opt="sgd", lr=0.1,
                 weight_decay=5e-4, batch_size=128, epochs=350, schedule="step", augment=True,
                 shrinkage=False, ensemble=1, ood=["svhn", "cifar100", "tiny_imagenet"])
    learning = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                    ensemble=5, lr=1e-3, batch_size=64, opt="adam", epochs=20, model="resnet18",
                    sn=None, mod=None, schedule="constant", augment=False, subsample=1000)
    trained = dict(sn=False, mod=False, epochs=0, augment=False, shrinkage=False)
    own = dict(sn=False, epochs=10, augment=True, shrinkage=True, lr=0.02)
    typed = dict(sn=False, mod=True, lr=0.5, epochs=350)
    for line, expected in {
            "--dataset cifar10": paper, "--dataset dirty_mnist --active-learning pe": learning,
            "--dataset imagenet --model torchvision/resnet18": trained,
            "--dataset cifar10 --model torchvision/resnet18": own,
            "--dataset cifar100 --no-sn -mod --lr .5": typed}.items():
        assert expected.items() <= vars(parse(line)).items(), line


@pytest.mark.parametrize("line, words", [
    ("--epochs 0 --runs 2", "--epochs 0 evaluates one network"),
    ("--epochs 0 --ensemble 2", "--epochs 0 evaluates one network"),
    ("--active-learning random", "--active-learning runs in one process")])
def test_what_would_repeat_one_network_is_refused(line, words, monkeypatch, capsys):
    monkeypatch.setattr(common, "world_size", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        parse(line)
    assert words in capsys.readouterr().err


# ---- Networks -----------------------------------------------------------------------------------


def build(model, num_classes, shape, device="cpu", depth=28, **options):
    """A network with random weights; `depth` is that of wide_resnet."""
    args = Namespace(**{**dict(model=model, device=torch.device(device), width=1.0, coeff=3.0,
                               weights="DEFAULT"), **options})
    with pytest.MonkeyPatch.context() as patch, args.device:
        patch.setitem(ddu.NETWORKS, "wide_resnet", partial(ddu.wide_resnet, depth=depth))
        return ddu.make_network(args, num_classes, shape)


# --model, --mod, --sn, image (C, H, W) and classes; numbers of parameters and of features; and how
# many layers are spectral, how many of them as matrices. Those of the published networks.
SIZES = [("lenet", False, False, (1, 28, 28), 10, 44_426, 84, (0, 0)),
         ("resnet18", True, True, (3, 32, 32), 10, 11_000_138, 512, (17, 0)),
         ("resnet18", False, True, (1, 28, 28), 10, 11_172_810, 512, (20, 3)),
         ("resnet50", True, True, (3, 32, 32), 100, 20_928_676, 2048, (49, 32)),
         ("wide_resnet", True, True, (3, 32, 32), 10, 36_220_634, 640, (25, 0)),
         ("wide_resnet", False, True, (3, 32, 32), 100, 36_536_884, 640, (28, 3)),
         ("vgg16", False, True, (1, 28, 28), 10, 14_722_890, 512, (13, 0))]


@pytest.mark.parametrize("model, mod, sn, shape, classes, parameters, dim, counts", SIZES)
def test_sizes_of_the_networks_and_what_is_spectral(model, mod, sn, shape, classes, parameters, dim,
                                                    counts):
    net = build(model, classes, shape, "meta", mod=mod, sn=sn)
    assert (net.head.in_features, net.head.out_features) == (dim, classes)
    assert sum(p.numel() for p in net.parameters()) == parameters
    layers = modules(net, ddu.SoftSpectral)
    assert (len(layers), sum(layer.v.shape[2:] == (1, 1) for layer in layers)) == counts
    assert len(layers) == (len(modules(net, nn.Conv2d)) if sn else 0)
    assert not hasattr(net.head, "parametrizations")
    momentum = {norm.momentum for norm in modules(net, nn.BatchNorm2d)}
    assert momentum <= {0.01 if model == "wide_resnet" else 0.1}  # none without batch norm
    if parameters == 36_220_634:  # published: 4,582,425, of which 25 are logged sigmas
        assert sum(sn.u.numel() + sn.v.numel() for sn in layers) == 4_582_425 - 25
    # oneDNN writes out of bounds in the weight gradient of these on CPUs.
    assert not [c for c in modules(net, nn.Conv2d) if c.kernel_size == (1, 1) != c.stride]


# The length of the first image's features, and one logit of the second: plain, -sn, -sn -mod.
# Networks written a second time, with functions, gave the same.
FORWARDS = [
    ("lenet", {}, (1, 28, 28), [(16.748361, 3.8099619)]),
    ("wide_resnet", dict(depth=16, width=0.1), (1, 14, 14),
     [(2.6941003, 0.82872159), (2.7197841, 0.79908289), (2.420558, 0.64312307)]),
    ("resnet18", dict(width=1 / 16), (1, 28, 28),
     [(3.4063411, -0.73999031), (3.4062169, -0.73996681), (2.7762346, -0.75607367)]),
    ("resnet50", dict(width=1 / 32), (1, 28, 28),
     [(7.4615572, -0.073524603), (7.4600515, -0.07326728), (9.6872917, -0.071216704)]),
    ("vgg16", dict(width=1 / 16), (3, 32, 32),
     [(4.8408545, -0.087205688), (4.841167, -0.087125033), (4.9725395, -0.1127752)]),
    ("vgg16", dict(width=1 / 16), (1, 28, 28),
     [(4.1647977, -1.1368259), (4.1648155, -1.1370273), (4.1946453, -1.1067056)])]


def fixed(shape):
    """Normal numbers that depend on the shape alone."""
    random = np.random.RandomState(math.prod(shape))
    return torch.tensor(random.normal(size=shape))


@pytest.mark.parametrize("model, options, shape, expected", FORWARDS)
def test_networks_compute_what_those_of_the_paper_do(model, options, shape, expected):
    for (mod, sn), numbers in zip([(False, False), (False, True), (True, True)], expected):
        net = build(model, 7, shape, mod=mod, sn=sn, coeff=0.8, **options).double().train()
        norms = modules(net, nn.BatchNorm2d)
        with torch.no_grad():
            for tensor in net.state_dict().values():
                scale = (2 / tensor[0].numel())**0.5 if tensor.ndim > 1 else 1 / 3
                tensor.copy_(scale * fixed(tensor.shape))
            for norm in norms:
                norm.momentum = 1.0
                norm.weight += 1
            for dropout in modules(net, nn.Dropout):
                dropout.p = 0.0
            images = fixed((6, *shape))
            for _ in range(3):
                net(images)  # running statistics of these images, and power iterations
            for norm in norms:
                norm.running_mean += 0.3 * norm.running_var.sqrt()
            logits, features = net.eval()(images)
        found = (features[0].norm().item(), logits[1, 3].item())
        assert found == pytest.approx(numbers, rel=1e-6), (mod, sn)


def test_dropout_and_initialisation_of_wide_resnet():
    net = build("wide_resnet", 100, (3, 32, 32), depth=10, width=0.5, sn=False, mod=True)
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.05)
    assert not net.head.bias.any()
    for block in modules(net, ddu.Residual):  # dropout between the two convolutions
        dropout, conv = block.body[-2:]
        assert type(dropout) is nn.Dropout and dropout.p == 0.3
        fan_out = conv.weight.shape[0] * conv.weight[0, 0].numel()  # of the output channels
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)


@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_training_is_a_loop_over_shuffled_batches(opt):
    """Each epoch has its own order, crops and dropout masks, and weighs its images the same."""
    args = parse(f"--dataset cifar10 --width .02 --opt {opt} --batch-size 16 --epochs 2 --lr .01 "
                 "--weight-decay .1 --schedule one_cycle")
    train_set = data.load("glyphs", "train").select(slice(40))
    net = build("wide_resnet", 10, train_set.shape, depth=10, width=0.05, sn=True, mod=True)
    twin = copy.deepcopy(net)
    rows = []
    run = Namespace(resume=lambda *_, **__: [], save=lambda name, history, **parts: rows.append(
        (name, history[-1], sorted(parts))))
    ddu.train(net, train_set, args, 5, run, "net")
    if opt == "sgd":
        optimiser = torch.optim.SGD(twin.parameters(), momentum=0.9, weight_decay=0.1)
    else:
        optimiser = torch.optim.Adam(twin.parameters(), weight_decay=0.1)
    loader = data.Loader(train_set, 16, seed=5, shuffle=True, augment="crop_flip")
    for epoch in range(2):
        common.seed_all(5, epoch, 0)
        losses = []
        for step, batch in enumerate(loader.epoch(epoch), 3 * epoch):
            optimiser.param_groups[0]["lr"] = ddu.learning_rate(step, 3, 2, args)
            logits, _ = twin(batch.images)
            loss = F.cross_entropy(logits, batch.labels, reduction="none")
            optimiser.zero_grad()
            loss.mean().backward()
            optimiser.step()
            losses += zip(loss.tolist(), (logits.argmax(1) == batch.labels).tolist())
        mean_loss, accuracy = np.mean(losses, 0)
        expected = {"epoch": epoch + 1, "loss": mean_loss, "train_accuracy": accuracy,
                    "lr": ddu.learning_rate(3 * epoch + 2, 3, 2, args)}
        assert rows[epoch] == ("net", pytest.approx(expected, rel=1e-5), ["net", "optimiser"])
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=0)
