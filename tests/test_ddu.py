"""ddu.py against independent oracles: operators as dense matrices, networks written out a second
time, Gaussians by NumPy, SciPy, scikit-learn and 50-digit arithmetic; and its runs end to end."""

import argparse
import copy
import csv
import json
import math
import os
import time
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from conftest import (CPU, Child, assert_same_checkpoints, run_ddu, run_ddu_in_float64, start_ranks,
                      strict_json, wait_for)
from PIL import Image
from sklearn.covariance import EmpiricalCovariance, ledoit_wolf
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import common
import data
import ddu
from common import UserError

DETECTION = ("auroc", "aupr_in", "aupr_out", "fpr95")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def options(**changes):
    """The resolved options of --dataset cifar10, with `changes`."""
    return argparse.Namespace(**{**vars(ddu.parse_args(["--dataset", "cifar10", *CPU])), **changes})


def build(model, num_classes=10, shape=(3, 32, 32), device="cpu", seed=0, **changes):
    torch.manual_seed(seed)
    with torch.device(device):
        return ddu.make_network(options(model=model, device=torch.device(device), **changes),
                                num_classes, shape)


# ---- Arguments ----------------------------------------------------------------------------------


def test_a_data_set_alone_is_the_papers_recipe():
    args = ddu.parse_args(["--dataset", "cifar10", *CPU])
    recipe = dict(model="wide_resnet", depth=28, width=1.0, dropout=0.3, sn=True, mod=True,
                  coeff=3.0, power_iterations=1, opt="sgd", lr=0.1, momentum=0.9,
                  weight_decay=5e-4, batch_size=128, epochs=350, schedule="step", augment=True,
                  noise=0.0, priors=False, jitter=None, shrinkage=False, ensemble=1, runs=1,
                  ood=["svhn", "cifar100", "tiny_imagenet"])
    assert recipe.items() <= vars(args).items()
    moons = ddu.parse_args(["--dataset", "two_moons", *CPU])
    assert (moons.model, moons.coeff, moons.power_iterations) == ("fc_resnet", 0.65, 5)
    assert ddu.parse_args(["--dataset", "svhn", *CPU]).augment is False  # published: CIFAR only
    few = ddu.parse_args("--dataset mnist --active-learning density --device cpu".split())
    published = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                     num_ensemble=5, subsample=1000, lr=1e-3, batch_size=64, opt="adam", epochs=20,
                     model="resnet18", sn=False, mod=False)
    assert published.items() <= vars(few).items()
    spelt = ddu.parse_args("--dataset mnist -sn -mod --mom 0.8 --decay 1e-4 -b 64 -e 9 "
                           "--ood_dataset svhn -ambiguous --device cpu".split())
    given = dict(sn=True, mod=True, momentum=0.8, weight_decay=1e-4, batch_size=64, epochs=9,
                 ood=["svhn"], ambiguous=True)
    assert given.items() <= vars(spelt).items()


# ---- Spectral normalisation ---------------------------------------------------------------------


def dense_operator(conv, weight, size):
    """The matrix [Cout H' W', Cin H W] of a convolution with this weight."""
    def apply(x):
        return F.conv2d(x, weight.detach(), None, conv.stride, conv.padding, conv.dilation,
                        conv.groups)

    image = torch.zeros(1, conv.in_channels, size, size, dtype=weight.dtype)
    return torch.func.jacrev(apply)(image).reshape(apply(image).numel(), image.numel()).numpy()


def unit(x):
    return x / np.linalg.norm(x)


# of a convolution: kernel, stride, padding, dilation, groups
KINDS = {"3x3": (3, 1, 1), "3x3, stride 2": (3, 2, 1), "3x3, dilated": (3, 1, 1, 2),
         "3x3, depthwise": (3, 2, 1, 1, 4), "1x1": (1, 1), "1x1, stride 2": (1, 2)}


def spectral(kind, coeff=1.0, iterations=1, size=8):
    """(a layer of KINDS, or else linear, in float64 and as ever in training mode, its SoftSpectral,
    its raw weight)."""
    torch.manual_seed(0)
    shape, c_out = (4, size, size), 8 if "depthwise" in kind else 5
    layer = nn.Conv2d(4, c_out, *KINDS[kind], bias=False) if kind in KINDS else nn.Linear(4, c_out)
    ddu.spectral_normalise(layer.double(), shape if kind in KINDS else (4,), coeff, iterations)
    weight = layer.parametrizations.weight
    return layer, weight[0], weight.original


def scale_of(layer):
    """W_eff / W of the next forward, one number."""
    ratio = (layer.weight / layer.parametrizations.weight.original).detach().flatten()
    assert (ratio - ratio[0]).abs().max() < 1e-6
    return ratio[0].item()


@pytest.mark.parametrize("size, kind", [
    (8, "3x3"), (7, "3x3"), (1, "3x3"), (8, "3x3, stride 2"), (7, "3x3, stride 2"),
    (8, "3x3, dilated"), (7, "3x3, depthwise")])
def test_sigma_is_the_norm_of_the_true_operator(size, kind):
    """Its stride and zero padding included, by iterations v = A^T u, u = A v from the start."""
    conv, sn, raw = spectral(kind, 1e-3, 3, size)
    a, u = dense_operator(conv, raw, size), sn.u.flatten().numpy().copy()
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    y = conv(x)
    for _ in range(3):
        v = unit(a.T @ u)
        u = unit(a @ v)
    assert np.allclose(sn.v.flatten(), v, atol=1e-10) and np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = a / ((u @ a @ v) / 1e-3 + 1e-5)
    assert np.allclose(y.detach().flatten(1), x.flatten(1).numpy() @ effective.T, rtol=1e-9)
    exact = np.linalg.svd(a, compute_uv=False)[0]
    sigmas = [1e-3 * (1 / scale_of(conv) - 1e-5) for _ in range(60)]
    assert np.all(np.diff(sigmas) >= -1e-9 * exact)
    assert exact * (1 - 2e-3) <= sigmas[-1] <= exact * (1 + 1e-9)
    reshaped = np.linalg.norm(raw.detach().flatten(1).numpy(), 2)
    assert abs(sigmas[-1] / reshaped - 1) > 0.05  # what torch's spectral_norm would have found


@pytest.mark.parametrize("kind", ["1x1", "1x1, stride 2", "linear"])
def test_matrices_are_scaled_without_the_added_1e5(kind):
    layer, sn, raw = spectral(kind, 0.3)
    w, u = raw.detach().flatten(1).numpy(), sn.u.flatten().numpy()
    v = unit(w.T @ u)
    u = unit(w @ v)
    layer.weight  # a training forward's
    assert np.allclose(sn.u.flatten(), u, atol=1e-12)
    assert scale_of(layer.eval()) == pytest.approx(0.3 / (u @ w @ v), rel=1e-12)
    layer.train()
    for _ in range(200):
        effective = layer.weight.detach().flatten(1).numpy()
    assert np.linalg.norm(effective, 2) == pytest.approx(0.3, rel=1e-9)
    sn.coeff = 1000.0
    assert torch.equal(layer.weight, raw)


@pytest.mark.parametrize("kind, inactive", [("1x1", 1.0), ("3x3", 0.99999)])
def test_weights_are_never_inflated_and_zeros_stay_finite(kind, inactive):
    for scale in (1e-6, 0.1, 1.0, 100.0):
        conv, _, raw = spectral(kind)
        raw.data.mul_(scale)
        factors = [scale_of(conv) for _ in range(5)]
        assert max(factors) <= 1 and (factors[-1] < 0.1) == (scale == 100)
        assert scale > 1e-6 or factors[-1] == pytest.approx(inactive, abs=1e-7)
    conv, sn, raw = spectral(kind)
    nn.init.zeros_(raw)
    assert not conv(torch.ones(1, 4, 8, 8, dtype=torch.float64)).any()
    assert torch.isfinite(sn.u).all() and torch.isfinite(sn.v).all()


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("kind", ["3x3", "3x3, stride 2", "1x1", "linear"])
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(kind, active):
    layer, sn, raw = spectral(kind, 0.1 if active else 1000.0, size=5)
    x = torch.randn(*((3, 4) if kind == "linear" else (2, 4, 5, 5)), dtype=torch.float64)
    twin, images = copy.deepcopy(layer), torch.stack([x, 2 * x])
    separate = [torch.autograd.grad(twin(x).square().sum(),
                                    twin.parametrizations.weight.original)[0] for x in images]
    sum(layer(x).square().sum() for x in images).backward()  # two forwards before one backward
    assert torch.allclose(raw.grad, sum(separate), rtol=1e-12)
    gradient, = torch.autograd.grad(layer(x).square().sum(), raw)
    layer.eval()  # from here on u and v are those of that forward

    def loss(weight):
        changed = {"parametrizations.weight.original": weight}
        return torch.func.functional_call(layer, changed, x).square().sum()

    assert torch.equal(gradient, torch.autograd.grad(loss(raw), raw)[0])
    largest = gradient.abs().max().item()
    assert torch.autograd.gradcheck(loss, raw, eps=1e-5, rtol=1e-6, atol=1e-6 * largest)


def test_evaluation_leaves_the_iteration_alone_and_sigma_keeps_its_precision():
    conv, sn, _ = spectral("3x3", 0.1)
    x, before = torch.randn(1, 4, 8, 8, dtype=torch.float64), sn.u.clone()
    assert torch.equal(conv.eval()(x), conv(x)) and torch.equal(sn.u, before)
    conv.train()(x)
    assert not torch.equal(sn.u, before) and sn.u.norm().item() == pytest.approx(1)
    conv, other = conv.float(), copy.deepcopy(conv.float())
    with torch.autocast("cpu", torch.bfloat16):
        effective, y = conv.weight, conv.eval()(x.float())
    assert y.dtype == torch.bfloat16 and effective.dtype == torch.float32
    assert torch.equal(effective, other.weight)


@pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason="no torch.compile here")
def test_a_compiled_spectral_net_trains_like_the_plain_one():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    ddu.spectral_normalise(net, (2, 7, 7), 0.3)
    net.double().train()
    twin, x = copy.deepcopy(net), torch.randn(2, 2, 7, 7, dtype=torch.float64)
    compiled = torch.compile(twin, backend="eager")
    for _ in range(2):
        a, b = net(x), compiled(x)
        assert torch.allclose(a, b, rtol=1e-10)
        a.square().sum().backward()
        b.square().sum().backward()
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-9)
               for a, b in zip(net.parameters(), twin.parameters()))


# ---- Networks -----------------------------------------------------------------------------------

# classes, parameters, features; spectral layers, of which 1x1, and batch norms
SIZES = [("lenet", False, (1, 28, 28), 10, 44_426, 84, None),
         ("resnet18", True, (3, 32, 32), 10, 11_000_138, 512, (17, 0, 17)),
         ("resnet18", False, (1, 28, 28), 10, 11_172_810, 512, (20, 3, 20)),
         ("resnet50", False, (3, 32, 32), 100, 23_705_252, 2048, (53, 36, 53)),
         ("resnet50", True, (3, 32, 32), 100, 20_928_676, 2048, (49, 32, 49)),
         ("wide_resnet", False, (3, 32, 32), 100, 36_536_884, 640, (28, 3, 25)),
         ("wide_resnet", True, (3, 32, 32), 10, 36_220_634, 640, (25, 0, 25)),
         ("vgg16", False, (1, 28, 28), 10, 14_722_890, 512, (13, 0, 13))]


@pytest.mark.parametrize("model, mod, shape, classes, parameters, dim, counts", SIZES)
def test_sizes_of_the_networks_and_what_is_spectral(model, mod, shape, classes, parameters, dim,
                                                    counts):
    net = build(model, classes, shape, "meta", mod=mod, sn=False)
    logits, feature = net(torch.empty(2, *shape, device="meta"))
    assert logits.shape == (2, classes) and feature.shape == (2, dim)
    assert sum(p.numel() for p in net.parameters()) == parameters
    if counts is None:
        return
    net = build(model, classes, shape, "meta", mod=mod)
    layers, convs, norms = ([m for m in net.modules() if isinstance(m, kind)]
                            for kind in (ddu.SoftSpectral, nn.Conv2d, nn.BatchNorm2d))
    matrices = sum(m.v.shape[2:] == (1, 1) for m in layers)
    assert (len(layers), matrices, len(norms)) == counts and len(layers) == len(convs)
    assert not hasattr(net.head, "parametrizations")
    assert {m.momentum for m in norms} == {0.01 if model == "wide_resnet" else 0.1}
    if parameters == 36_220_634:  # published: 4,582,425, of which 25 are logged sigmas
        assert sum(m.u.numel() + m.v.numel() for m in layers) == 4_582_425 - 25


class Layers:
    """The convolutions and batch norms of a net in order, as plain functional calls."""

    def __init__(self, net, coeff, mod):
        self.convs = iter([m for m in net.modules() if isinstance(m, nn.Conv2d)])
        self.norms = iter([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)])
        self.coeff, self.mod = coeff, mod

    def conv(self, x, stride=1):
        layer = next(self.convs)
        w = layer.weight
        k = w.shape[-1]
        if hasattr(layer, "parametrizations"):
            sn, w = layer.parametrizations.weight[0], layer.parametrizations.weight.original
            sigma = (sn.u * F.conv2d(sn.v, w, None, 1 if k == 1 else stride, k // 2)).sum()
            w = w / (max(1, sigma.item() / self.coeff) + (1e-5 if k > 1 else 0))
        return F.conv2d(x, w, stride=stride, padding=k // 2)

    def norm(self, x):
        layer = next(self.norms)
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    def act(self, x):
        return F.leaky_relu(x, 0.01 if self.mod else 0.0)

    def shortcut(self, x, channels, stride, norm):
        if stride == 1 and x.shape[1] == channels:
            return x
        if not self.mod:
            x = self.conv(x, stride)
            return self.norm(x) if norm else x
        if stride == 2:
            x = x[:, :, ::2, ::2] if x.shape[2] % 2 else F.avg_pool2d(x, 2)
        return torch.cat([x, x.new_zeros(len(x), channels - x.shape[1], *x.shape[2:])], 1)


def reference_wide_resnet(p, x, per_stage):
    x = p.conv(x)
    for i in range(3 * per_stage):
        stride = 2 if i in (per_stage, 2 * per_stage) else 1
        h = p.conv(p.act(p.norm(x)), stride)
        h = p.conv(p.act(p.norm(h)))
        x = h + p.shortcut(x, h.shape[1], stride, norm=False)
    return p.act(p.norm(x)).mean((2, 3))


def reference_resnet(p, x, per_stage, strides):
    """`strides`: of the block's convolutions where the stage halves the map."""
    x = p.act(p.norm(p.conv(x)))
    halving = np.cumsum(per_stage)[:-1]
    for i in range(sum(per_stage)):
        h = x
        for j, s in enumerate(strides if i in halving else [1] * len(strides)):
            h = p.norm(p.conv(p.act(h) if j else h, s))
        x = p.act(h + p.shortcut(x, h.shape[1], 2 if i in halving else 1, norm=True))
    return x.mean((2, 3))


def reference_vgg(p, x, layout):
    """`layout`: a string, C for convolution, batch norm and activation, M for a max pool."""
    for letter in layout:
        x = p.act(p.norm(p.conv(x))) if letter == "C" else F.max_pool2d(x, 2)
    assert x.shape[2:] == (1, 1)
    return x.flatten(1)


REFERENCES = {
    "wrn-10": ("wide_resnet", dict(depth=10, width=0.125), (3, 32, 32), reference_wide_resnet, 1),
    "wrn-16, odd": ("wide_resnet", dict(depth=16, width=0.1), (1, 14, 14), reference_wide_resnet,
                    2),
    "resnet18": ("resnet18", dict(width=1 / 16), (1, 28, 28), reference_resnet, (2, 2, 2, 2),
                 (2, 1)),
    "resnet50": ("resnet50", dict(width=1 / 32), (1, 28, 28), reference_resnet, (3, 4, 6, 3),
                 (1, 2, 1)),
    "vgg16": ("vgg16", dict(width=1 / 16), (3, 32, 32), reference_vgg, "CCMCCMCCCMCCCMCCCM"),
    "vgg16, grey": ("vgg16", dict(width=1 / 16), (1, 28, 28), reference_vgg, "CCCCMCCCMCCCMCCCM"),
}


@pytest.mark.parametrize("sn", [False, True])
@pytest.mark.parametrize("mod", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_networks_equal_a_second_version_written_with_functions(name, mod, sn):
    model, changes, shape, reference, *structure = REFERENCES[name]
    net = build(model, 7, shape, seed=3, mod=mod, sn=sn, coeff=0.8, **changes).double().train()
    x = torch.randn(6, *shape, dtype=torch.float64)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for m in norms:
            m.momentum = 1.0
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, 0, 0.3)
        for _ in range(3):
            net(x)  # running statistics of these images: the net keeps telling them apart
        for m in norms:
            m.running_mean += 0.3 * m.running_var.sqrt() * torch.randn_like(m.running_mean)
            m.running_var *= torch.empty_like(m.running_var).uniform_(0.5, 1.5)
        logits, feature = net.eval()(x)
        expected = reference(Layers(net, 0.8, mod), x, *structure)
    assert any(isinstance(m, ddu.SoftSpectral) for m in net.modules()) == sn
    scale = expected.std(0).max()  # of what depends on the image
    assert scale > 0.01 * expected.abs().max() and (feature - expected).abs().max() < 1e-9 * scale
    assert torch.allclose(logits, expected @ net.head.weight.T + net.head.bias, rtol=1e-9)


def test_dropout_and_initialisation_of_wide_resnet():
    net = build("wide_resnet", 100, depth=10, width=0.5, sn=False)
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.05)
    assert not net.head.bias.any()
    for m in net.modules():  # fan-out: of the output channels
        if isinstance(m, nn.Conv2d) and m.weight.numel() > 20_000:
            fan_out = m.weight.shape[0] * m.weight[0, 0].numel()
            assert m.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    blocks = [m.body for m in net.modules() if isinstance(m, ddu.Residual)]
    assert len(blocks) == 3
    for body in blocks:  # dropout between the two convolutions
        assert [type(m) for m in body[-2:]] == [nn.Dropout, nn.Conv2d] and body[-2].p == 0.3


def test_lenet_equals_a_second_version():
    net, x = build("lenet", shape=(1, 28, 28), sn=False, mod=False), torch.randn(3, 1, 28, 28)
    logits, feature = net(x)
    weights = [(m.weight, m.bias) for m in net.extractor.modules() if hasattr(m, "weight")]
    for w, b in weights[:2]:
        x = F.max_pool2d(F.conv2d(x, w, b).relu(), 2)
    x = x.flatten(1)
    for w, b in weights[2:]:
        x = (x @ w.T + b).relu()
    assert len(weights) == 4 and torch.allclose(feature, x, atol=1e-5)
    assert torch.allclose(logits, net.head(x), atol=1e-5)


@pytest.mark.parametrize("sn", [True, False])
def test_fc_resnet_equals_a_second_version(sn):
    net = build("fc_resnet", 2, (2, 1, 1), sn=sn, coeff=0.65, power_iterations=5).double()
    x = torch.randn(5, 2, 1, 1, dtype=torch.float64)
    net.train()(x)
    _, feature = net.eval()(x)
    first, *rest = [m for m in net.extractor.modules() if isinstance(m, nn.Linear)]
    z = x.flatten(1) @ first.weight.T + first.bias
    for m in rest:
        z = z + (z @ m.weight.T + m.bias).relu()
    assert len(rest) == 4 and torch.allclose(feature, z, atol=1e-10) and z.shape == (5, 128)
    norms = [np.linalg.norm(m.weight.detach(), 2) for m in (first, *rest)]
    assert (max(norms) < 0.75) == sn


@pytest.mark.parametrize("name, last", [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")])
def test_torchvision_nets_give_the_input_of_their_last_linear_layer(tmp_path, name, last):
    import torchvision
    original = torchvision.models.get_model(name, weights=None).eval()
    path, seen, x = tmp_path / "weights.pt", [], torch.randn(2, 3, 32, 32)
    torch.save(original.state_dict(), path)
    args = options(model=f"torchvision/{name}", weights=str(path), sn=False, mod=False)
    net = ddu.make_network(args, 1000, (3, 32, 32)).eval()
    original.get_submodule(last).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        expected, (logits, feature) = original(x), net(x)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert torch.allclose(feature, seen[0], atol=1e-5)
    for classes, state in ((10, original.state_dict()), (1000, {})):
        torch.save(state, path)
        with pytest.raises(UserError, match=f"for {classes} classes"):
            ddu.make_network(args, classes, (3, 32, 32))


# ---- Gaussians ----------------------------------------------------------------------------------


def clusters(counts, dim, seed=0, spread=3.0):
    """(features [N, D] float64, labels [N]): correlated Gaussian classes, shuffled."""
    rng = np.random.default_rng(seed)
    mixing = lambda: np.eye(dim) + 0.5 * rng.normal(size=(dim, dim)) / dim**0.5
    rows = [rng.normal(size=(n, dim)) @ mixing() + spread * rng.normal(size=dim) for n in counts]
    labels = np.repeat(np.arange(len(counts)), counts)
    order = rng.permutation(len(labels))
    return torch.tensor(np.concatenate(rows)[order]), torch.tensor(labels[order])


def fit(z, y, **how):
    return ddu.fit_gaussians(z, y, int(y.max()) + 1, **how)


def log_densities(gaussians, points):
    """log N(z; mu_c, Sigma_c) [N, K], without priors."""
    scores = ddu.density_scores(gaussians, points)
    return scores["log_posterior"] + scores["density"][:, None]


def scipy_log_densities(z, y, points, jitter=0.0):
    """[N, K] by SciPy from numpy.cov of each class."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        cov = np.cov(rows.T) + jitter * np.eye(z.shape[1])
        gaussian = scipy.stats.multivariate_normal(rows.mean(0), cov)
        columns.append(gaussian.logpdf(points.double().numpy()))
    return np.stack(columns, 1)


def mean_variance(z, y):
    return np.mean([np.var(z[y == c].numpy(), axis=0, ddof=1).mean() for c in y.unique()])


IMBALANCED, SMALL = (120, 260, 150, 200), (50, 6, 9, 60)  # some have no more than 9 features


@pytest.mark.parametrize("counts, dim, dtype, offset, jitter", [
    (IMBALANCED, 16, torch.float64, 0.0, None), (IMBALANCED, 64, torch.float32, 0.0, None),
    (IMBALANCED, 8, torch.float64, 1e4, None), (SMALL, 9, torch.float64, 0.0, 1e-3),
    (SMALL, 9, torch.float64, 0.0, 0.5)])
def test_densities_and_posteriors_equal_scipy_in_float64(counts, dim, dtype, offset, jitter):
    z, y = clusters(counts, dim, spread=0.3)
    z = (z + offset).to(dtype)
    points = torch.cat([z[:40], offset + 3 * torch.randn(20, dim, dtype=dtype)])
    expected = scipy_log_densities(z, y, points, jitter or 0)
    for priors in (False, True):
        gaussians = fit(z, y, priors=priors, eps=jitter)
        joint = expected + (np.log(np.bincount(y) / len(y)) if priors else 0)
        scores, close = ddu.density_scores(gaussians, points), dict(rtol=1e-8, atol=1e-6)
        assert gaussians.eps == (jitter or 0) and scores["density"].dtype == torch.float64
        assert np.allclose(scores["density"], scipy.special.logsumexp(joint, 1), **close)
        posterior = scipy.special.softmax(joint, 1)
        assert np.allclose(scores["log_posterior"].exp(), posterior, atol=1e-6)
        entropies = scipy.stats.entropy(posterior, axis=1)
        assert np.allclose(scores["gmm_entropy"], entropies, atol=1e-6)
        assert dim == 64 or entropies.std() > 0.01


def test_singular_covariances_get_a_small_jitter_and_healthy_ones_none():
    z, y = clusters((40, 50, 60), 6)
    dead = torch.cat([z, torch.zeros(len(z), 2)], 1)  # no variance at all in the last two
    gaussians = fit(dead, y)
    assert gaussians.eps == pytest.approx(1e-12 * mean_variance(dead, y), rel=1e-9)
    points = dead[:20].clone()
    points[:10, 6:] = 1e-5
    alive = scipy_log_densities(z, y, points[:, :6])
    rest = scipy.stats.norm(0, math.sqrt(gaussians.eps)).logpdf(points[:, 6:]).sum(1)
    assert np.allclose(log_densities(gaussians, points), alive + rest[:, None], rtol=1e-7)
    for seed in range(20):  # rounding may leave a factor
        z, y = clusters((60, 50), 6, seed=seed)
        z[:, 5] = z[:, :3].sum(1)
        assert fit(z, y).eps == pytest.approx(1e-12 * mean_variance(z, y), rel=1e-9), seed
    scales = torch.tensor([1e-3, 1e-2, 1.0, 1.0, 10.0, 1e2], dtype=torch.float64)
    z, y = clusters((60, 50), 6)
    assert fit(z * scales, y).eps == 0  # badly scaled, not singular
    for dim in (3, 20):  # constant features
        scores = ddu.density_scores(fit(torch.zeros(24, dim), torch.arange(24) % 2),
                                    torch.ones(4, dim))
        assert all(torch.isfinite(s).all() for s in scores.values())


def test_what_has_no_covariance_is_refused_in_words():
    z, y = clusters((40, 5), 6)
    with pytest.raises(ValueError, match="singular"):
        fit(z, y, eps=0.0)
    with pytest.raises(ValueError, match="class 2 has 0"):
        ddu.fit_gaussians(z, y, 3)
    with pytest.raises(ValueError, match="class 1 has 1"):
        fit(z[:3], torch.tensor([0, 0, 1]))
    for bad in (math.nan, math.inf):
        z[3, 2] = bad
        with pytest.raises(ValueError, match="NaN"):
            fit(z, y)


def exact_log_densities(rows, eps, points):
    """log N(points; mean, covariance + eps I) of the rows' Gaussian, with 50 digits."""
    with mpmath.workdps(50):
        z, (n, dim) = mpmath.matrix(rows.tolist()), rows.shape
        mean = mpmath.ones(1, n) * z / n
        centred = z - mpmath.ones(n, 1) * mean
        covariance = centred.T * centred / (n - 1) + mpmath.mpf(eps) * mpmath.eye(dim)
        constant = mpmath.log(mpmath.det(covariance)) + dim * mpmath.log(2 * mpmath.pi)
        precision, offsets = covariance**-1, [mpmath.matrix([p]) - mean for p in points.tolist()]
        return [float(-((d * precision * d.T)[0] + constant) / 2) for d in offsets]


def test_classes_of_few_examples_are_exact():
    """n <= D = 8 and n > D together, eps 10^-12 of the variance, equal rows, scales to 10^-4."""
    z, y = clusters((2, 5, 8, 9, 30), 8, seed=2)
    z = z * torch.logspace(0, -4, 8, dtype=torch.float64)
    rows = (y == 2).nonzero().flatten()
    z[rows] = z[rows][[0, 1, 2, 3, 0, 1, 2, 3]]
    gaussians = fit(z, y)
    assert gaussians.eps == pytest.approx(1e-12 * mean_variance(z, y), rel=1e-9)
    assert [len(v) for v in gaussians.variances] == [1, 4, 3, 8, 8]
    first = torch.stack([z[y == c][0] for c in range(5)])
    points = torch.cat([first, first + 1e-6 * torch.randn_like(first), 5 * first])
    ours = log_densities(gaussians, points)
    for c in range(5):
        exact = exact_log_densities(z[y == c], gaussians.eps, points)
        assert np.allclose(ours[:, c], exact, rtol=1e-7, atol=1e-5), c


@pytest.mark.parametrize("counts, dim", [((40, 12, 60), 10), ((6, 9), 15)])
def test_shrinkage_is_ledoit_and_wolfs(counts, dim):
    """Their covariances have the divisor n, ours n - 1."""
    z, y = clusters(counts, dim)
    gaussians, points = fit(z, y, shrinkage=True), 4 * torch.randn(20, dim, dtype=torch.float64)
    ours = log_densities(gaussians, points)
    for c, n in enumerate(counts):
        cov, intensity = ledoit_wolf(z[y == c].numpy())
        peer = scipy.stats.multivariate_normal(z[y == c].mean(0), cov * n / (n - 1))
        assert 0 < intensity < 1 and np.allclose(ours[:, c], peer.logpdf(points), rtol=1e-9)
    assert gaussians.eps == 0  # nothing is singular any more


@pytest.mark.parametrize("counts, offset", [
    (IMBALANCED, 0.0), ((120, 6, 150), 0.0), (IMBALANCED, 1e5)])
def test_mahalanobis_scores_equal_scikit_learn(counts, offset):
    z, y = clusters(counts, 7, spread=1.0)
    gaussians = fit(z + offset, y, eps=1e-3)
    points = torch.cat([z[:60], 4 * torch.randn(40, 7, dtype=torch.float64)])
    scores = ddu.density_scores(gaussians, points + offset)
    z, y, points = z.numpy(), y.numpy(), points.numpy()
    means = np.stack([z[y == c].mean(0) for c in range(len(counts))])
    within = EmpiricalCovariance(assume_centered=True).fit(z - means[y])
    distances = np.stack([within.mahalanobis(points - m) for m in means], 1)
    relative = (EmpiricalCovariance().fit(z).mahalanobis(points)[:, None] - distances).max(1)
    own = [np.einsum("nd,de,ne->n", points - m, np.linalg.inv(
        np.cov(z[y == c].T) + 1e-3 * np.eye(7)), points - m) for c, m in enumerate(means)]
    close = dict(rtol=1e-6, atol=1e-6)
    assert np.allclose(scores["mahalanobis"], -distances.min(1), **close)
    assert np.allclose(scores["relative_mahalanobis"], relative, **close)
    assert np.allclose(scores["class_mahalanobis"], -np.min(own, 0), **close)


# ---- Scores, decisions, schedules ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_softmax_scores_equal_scipy(temperature):
    logits = torch.randn(50, 6) * 4
    scaled = logits.double().numpy() / temperature
    probs = scipy.special.softmax(scaled, 1)
    scores = ddu.softmax_scores(logits, temperature)
    assert np.allclose(scores["entropy"], scipy.stats.entropy(probs, axis=1), atol=1e-12)
    assert np.allclose(scores["max_prob"], probs.max(1), atol=1e-12)
    assert np.allclose(scores["energy"], scipy.special.logsumexp(scaled, 1), atol=1e-12)


def test_every_score_stands_on_its_side_of_detection():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(1, 1, 300).round(1), rng.normal(0, 1, 700).round(1)  # with ties
    is_id, both = np.arange(1000) < 300, np.concatenate([inside, outside])
    uncertain = {"entropy", "gmm_entropy", "predictive_entropy", "mutual_information"}
    confident = {"density", "energy", "max_prob", "class_mahalanobis", "mahalanobis",
                 "relative_mahalanobis"}
    assert ddu.SCORES.keys() == uncertain | confident
    for name in [*ddu.SCORES, "energy_scaled", "entropy_scaled"]:
        score = both * (-1 if name.removesuffix("_scaled") in uncertain else 1)
        metrics = ddu.detection_metrics({name: torch.tensor(inside)}, {name: torch.tensor(outside)})
        assert list(metrics) == [f"{m}_{name}" for m in DETECTION]
        expected = [roc_auc_score(is_id, score), average_precision_score(is_id, score),
                    average_precision_score(~is_id, -score)]
        assert list(metrics.values())[:3] == pytest.approx(expected, abs=1e-12)


def test_low_density_is_ood_whatever_the_entropy():
    density = torch.tensor([5.0, 5.0, -5.0, -5.0, 1.0])
    entropy = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    assert ddu.decide(density, entropy, 1.0, 0.5).tolist() == [0, 1, 2, 2, 0]


def test_learning_rates():
    args = options()
    for epoch, expected in {0: 0.1, 149: 0.1, 150: 0.01, 249: 0.01, 250: 0.001, 349: 0.001}.items():
        for step in (352 * epoch, 352 * epoch + 351):
            assert ddu.learning_rate(step, 352, args) == pytest.approx(expected, rel=1e-12)
    args = SimpleNamespace(schedule="one_cycle", lr=0.2, epochs=5)
    rates = np.array([ddu.learning_rate(step, 20, args) for step in range(100)])
    assert rates.argmax() == 20 and rates[20] == pytest.approx(0.2)
    assert np.allclose(np.diff(rates[:21]), 0.2 / 21) and rates[0] == pytest.approx(0.2 / 21)
    assert np.allclose(np.diff(rates[20:]), -0.2 / 80) and rates[99] == pytest.approx(0.2 / 80)
    args.schedule = "constant"
    assert ddu.learning_rate(77, 20, args) == 0.2


# ---- Runs ---------------------------------------------------------------------------------------

ROWS = {"train": 900, "test": 200, "ood": 200}


@pytest.fixture(scope="module", autouse=True)
def few_rows():
    """All sets are cut short in this process; val, as large as it comes, to an eighth."""
    load = data.load

    def load_few(name, split, *args, **more):
        dataset = load(name, split, *args, **more)
        return data.evenly(dataset, ROWS.get(split, -(-len(dataset) // 8) or None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", load_few)
        yield


@pytest.fixture
def small(small_data, tmp_path):
    """A run that takes a second: SN, batch norm, augmentation, momentum, and a last batch of one
    image, none for the second of two processes. 3 epochs of 4 steps, in runs/ddu/run."""
    return ["--dataset", "tiny_imagenet", "--data-dir", str(small_data), "--ood",
            f"folder:{small_data}/odd", "--model", "wide_resnet", "--depth", "10", "--width",
            "0.02", "-b", "36", "--epochs", "3", "--lr", "0.05", "--dropout", "0", "--image-size",
            "32", "--out-dir", str(tmp_path / "runs"), "--name", "run", "--no-plot", *CPU]


def row_of(rows, **keys):
    """The only row with these values, and where `set` is given with this `against` or none."""
    keys = {"against": None, **keys} if "set" in keys else keys
    [row] = [r for r in rows if keys.items() <= {"against": None, **r}.items()]
    return row


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def assert_close_rows(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"jitter"}:
            close = a[key] == b[key] or math.isclose(a[key], b[key], rel_tol=tolerance,
                                                     abs_tol=tolerance)
            assert close, (key, a[key], b[key])


@pytest.fixture(scope="module")
def story(few_rows, tmp_path_factory):
    """The default data set and network, narrow and short: (options, run directory, rows)."""
    out = tmp_path_factory.mktemp("story")
    options = ["--out-dir", str(out), "--width", "0.05", "--epochs", "2", "-b", "64",
               "--limit-steps", "4", *CPU]
    rows = ddu.main(options)
    return options, out / "ddu" / "dirty_glyphs-resnet18-sn3-w0.05-seed1", rows


def test_the_story_leaves_its_files_and_pictures(story):
    _, folder, rows = story
    pictures = {"uncertainty.png", "reliability.png"}
    assert {p.name for p in folder.iterdir()} == pictures | {
        "options.json", "seed1.jsonl", "seed1.pt", "results.json", "results.csv", ".lock"}
    for name in pictures:
        with Image.open(folder / name) as image:
            greys = set(image.convert("L").resize((64, 32)).tobytes())
            assert image.width > 500 and len(greys) > 10  # not a blank page
    results = strict_json(folder / "results.json")
    assert results["rows"] == rows and len(read_csv(folder / "results.csv")) == len(rows)
    assert results["seconds"].keys() >= {"train", "forward", "fit", "score", "total"}
    lines = [json.loads(line) for line in (folder / "seed1.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in lines] == [1, 2] and 2.0 < lines[0]["loss"] < 3.0
    assert {"accuracy", "lr", "examples_per_s", "seconds"} <= lines[0].keys()


def test_the_storys_rows(story):
    whole, clean, odd, far = "dirty_glyphs", "glyphs", "glyphs_ambiguous", "glyphs_letters"
    rows = {(r["set"], r.get("against")): r for r in story[2]}
    assert list(rows) == [(whole, None), (clean, None), (odd, None), (whole, far), (clean, far),
                          (clean, odd)]
    for (name, against), row in rows.items():
        assert (row["method"], row["seed"], row["n"]) == ("DDU", 1, 400 if name == whole else 200)
        shares = [row[f"fraction_{region}"] for region in ("clean", "ambiguous", "ood")]
        assert sum(shares) == pytest.approx(1)
        metrics = [f"{m}_{s}" for m in DETECTION for s in ddu.SCORES if s not in (
            "predictive_entropy", "mutual_information")] if against else [
            f"{m}{s}" for m in ("accuracy", "nll", "brier", "ece15", "mce15", "adaptive_ece15")
            for s in ("", "_scaled")]
        assert all(0 <= row[m] <= (math.inf if m[:3] in ("nll", "bri") else 1) for m in metrics)
    both = (rows[clean, None]["accuracy"] + rows[odd, None]["accuracy"]) / 2
    assert rows[whole, None]["accuracy"] == pytest.approx(both)
    assert rows[whole, None]["temperature"] != 1


def test_eval_repeats_the_storys_table_and_predicts_any_set(story, monkeypatch):
    options, folder, rows = story
    kept = (folder / "seed1.pt").read_bytes()
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    again = [*options, "--eval", "--no-plot", "-b", "16", "--predict", "glyphs_letters"]
    assert ddu.main(again) == rows and (folder / "seed1.pt").read_bytes() == kept
    letters = read_csv(folder / "predictions.csv")
    row = row_of(rows, set="dirty_glyphs", against="glyphs_letters")
    assert [r["index"] for r in letters] == [str(i) for i in range(200)]
    for region in ("clean", "ambiguous", "ood"):
        share = np.mean([r["decision"] == region for r in letters])
        assert share == pytest.approx(row[f"fraction_{region}"])
    for r in letters:
        assert float(r["epistemic"]) == -float(r["log_density"])
        assert (r["decision"] == "ood") == (float(r["log_density"]) < row["density_threshold"])


def test_the_storys_threshold_and_temperature_come_from_the_validation_set(story, monkeypatch):
    seen, evaluate = [], ddu.evaluate
    monkeypatch.setattr(ddu, "evaluate", lambda *a: seen.extend([a, evaluate(*a)]) or seen[1])
    ddu.main([*story[0], "--eval", "--no-plot", "--density-quantile", "0.2", "--jitter", "0.5"])
    (net, sets, args, _), found = seen
    val = ddu.forward(net, sets["val"], args)
    density = ddu.density_scores(found.gaussians, val.features)["density"]
    assert found.threshold == pytest.approx(np.quantile(density, 0.2)) and len(density) > 150
    assert found.gaussians.eps == 0.5
    assert found.temperature == common.fit_temperature(val.logits, val.labels)


def test_ensembles_average_probabilities():
    rng = np.random.default_rng(0)
    temperatures, labels = (0.7, 2.0), torch.tensor(rng.integers(0, 3, 40))
    logits = {k: rng.normal(size=(2, n, 3)) * 3 for k, n in (("test", 40), ("letters", 60))}
    # the mean of these two has class 0 first, the mean of their logits class 1
    logits["test"][:, 0] = np.log([[0.98, 0.01, 0.01], [0.001, 0.5, 0.499]])
    members = [ddu.Evaluated({k: ddu.Outputs(torch.tensor(v[m]), None, labels)
                              for k, v in logits.items()}, {}, None, t, 0.0)
               for m, t in enumerate(temperatures)]
    inside = SimpleNamespace(labels=labels)
    sets = {"test": {"test": inside}, "whole": "test", "ood": {"letters": None}}
    plain, detection = ddu.ensemble_rows(members, sets, seed=4)
    assert (plain["method"], plain["seed"], plain["n"]) == ("ensemble of 2", 4, 40)
    for suffix, scale in (("", (1, 1)), ("_scaled", temperatures)):
        probs = {k: scipy.special.softmax(v / np.reshape(scale, (2, 1, 1)), 2)
                 for k, v in logits.items()}
        mean = probs["test"].mean(0)
        accuracy = (mean.argmax(1) == labels.numpy()).mean()
        assert plain["accuracy" + suffix] == pytest.approx(accuracy)
        nll = -np.log(mean[np.arange(40), labels]).mean()
        assert plain["nll" + suffix] == pytest.approx(nll, rel=1e-9)
        total = {k: scipy.stats.entropy(p.mean(0), axis=1) for k, p in probs.items()}
        mutual = {k: total[k] - scipy.stats.entropy(p, axis=2).mean(0) for k, p in probs.items()}
        for name, score in (("predictive_entropy", total), ("mutual_information", mutual)):
            expected = roc_auc_score(np.arange(100) >= 40, [*score["test"], *score["letters"]])
            assert detection[f"auroc_{name}{suffix}"] == pytest.approx(expected, abs=1e-9)


def test_seven_and_more_sets_are_all_in_the_picture(monkeypatch):
    names, figures = [f"set_{i}" for i in range(8)], []
    scores = {n: {"density": torch.randn(50).double(), "entropy": torch.rand(50).double()}
              for n in names}
    monkeypatch.setattr(common, "save_figure", lambda plt, figure, path: figures.append(figure))
    sets = {"test": {"set_0": None}, "ood": dict.fromkeys(names[1:])}
    for threshold in (-2.0, 99.0):  # above all densities, too
        evaluated = ddu.Evaluated({}, scores, None, 1.0, threshold)
        ddu.plot_uncertainty(common.pyplot(), None, evaluated, sets, 0.35)
        texts = [t.get_text() for t in figures[-1].axes[0].get_legend().get_texts()]
        assert texts == [n.replace("_", " ") for n in names]


def test_small_classes_are_named_once_and_what_memory_cannot_hold_is_refused(capsys, monkeypatch):
    args, (z, y) = options(), clusters((50, 9, 60), 10)
    assert ddu.fit(z, y, 3, args).eps > 0
    [line] = capsys.readouterr().out.splitlines()[1:]  # after the options
    assert "class 1 has 9 examples for 10 features" in line and "--shrinkage" in line
    assert ddu.fit(z, y, 3, common.with_options(args, shrinkage=True)).eps == 0
    prior = ddu.fit(*clusters((50, 20), 10), 2, common.with_options(args, priors=True)).log_prior
    assert (70 * prior.exp()).tolist() == pytest.approx([50, 20])
    assert not capsys.readouterr().out
    monkeypatch.setattr(common, "device_memory", lambda _: 4 * 119 * 10)
    for classes, match in ((4, "class 3 of x has 0"), (3, "GB")):
        train = data.ImageSet("x", torch.zeros(119, 1, 1, 1), y, classes, (0.0,), (1.0,))
        with pytest.raises(UserError, match=match):
            ddu.check_gaussians(train, 10, args)


def test_outputs_are_those_of_eval_mode_without_augmentation():
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    dataset = data.ImageSet("x", images, torch.arange(40) % 10, 10, (0.5,) * 3, (0.25,) * 3)
    net = build("wide_resnet", depth=10, width=0.02, coeff=0.5).train()
    out = ddu.forward(net, dataset, options(augment=True))
    logits, features = net.eval()((images / 255 - 0.5) / 0.25)
    assert torch.allclose(out.logits, logits, atol=1e-5) and torch.equal(out.labels, dataset.labels)
    assert torch.allclose(out.features, features, atol=1e-5)


def test_killed_and_restarted_equals_uninterrupted(small, tmp_path):
    small, runs = [*small, "-b", "18", "--dropout", "0.3"], tmp_path / "runs" / "ddu"
    rows, path = ddu.main([*small, "--name", "calm"]), runs / "run" / "seed1.pt"
    child = Child(tmp_path, run_ddu, *small)
    wait_for(lambda: path.exists() or not child.process.is_alive(), what="epoch")
    time.sleep(0.05)  # into the next epoch
    child.process.kill()
    child.process.join()
    assert child.status < 0 and 0 < common.load_checkpoint(path)["epoch"] < 3, child.stderr
    assert ddu.main(small) == rows
    assert_same_checkpoints(path, runs / "calm" / "seed1.pt")
    [group] = common.load_checkpoint(path)["optimiser"]["param_groups"]
    found = (group["momentum"], group["weight_decay"], group["nesterov"], group["lr"])
    assert found == (0.9, 5e-4, False, pytest.approx(5e-4))  # divided by 10 twice


def finish(children):
    for child in children:
        assert child.wait().status == 0 and "Traceback" not in child.stderr, child.stderr
    return children


@pytest.mark.parametrize("more", [
    "--model vgg16 --width 0.05 --no-sn -b 34 --priors",  # 7 images in the last batch
    "--model wide_resnet --no-mod --ensemble 2"])  # one image in the last batch, for one process
def test_two_processes_that_share_no_disk_equal_one(small, small_data, tmp_path, more):
    """In float64, lest batch norm and leaky ReLU blow rounding up. A second start, which predicts
    three images, goes on from what the main process has saved, on both."""
    small, run = [*small, "--epochs", "1", *more.split()], run_ddu_in_float64
    (tmp_path / "few").mkdir()
    for i in range(3):
        os.link(small_data / "odd" / f"{i}.png", tmp_path / "few" / f"{i}.png")

    def each(rank):
        return ["--out-dir", str(tmp_path / f"machine{rank}")]

    finish([Child(tmp_path, run, *small, *each(9), rank=9),
            *start_ranks(tmp_path, 2, run, *small, each=each)])
    one, two = (tmp_path / f"machine{k}" / "ddu" / "run" for k in (9, 0))
    a, b = (torch.load(folder / "seed1.pt", weights_only=True)["net"] for folder in (one, two))
    worst = max((a[k].double() - b[k].double()).abs().max().item() for k in a)
    assert a.keys() == b.keys() and worst < 1e-10, worst
    kept, more = (two / "seed1.pt").read_bytes(), ["--predict", f"folder:{tmp_path}/few"]
    main, other = finish(start_ranks(tmp_path, 2, run, *small, *more, each=each))
    assert "DDU" in main.stdout and other.stdout == ""  # one process prints
    assert (two / "seed1.pt").read_bytes() == kept and len(read_csv(two / "predictions.csv")) == 3
    assert not list((tmp_path / "machine1").rglob("*.pt"))
    a, b = (strict_json(folder / "results.json") for folder in (one, two))
    assert [r["environment"]["processes"] for r in (a, b)] == [1, 2]
    assert_close_rows(a["rows"], b["rows"], 1e-4)


# ---- Own data -----------------------------------------------------------------------------------


def write_images(folder, count, tint, size=20):
    rng = np.random.default_rng(tint)
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 120, (size, size + i % 3, 3)) + tint
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


def test_own_folders(tmp_path):
    """Whatever they are called."""
    for c, name in enumerate(("cat", "dog", "eel")):
        write_images(tmp_path / "val" / "train" / name, 14, 60 * c)
        write_images(tmp_path / "val" / "test" / name, 4 + c, 60 * c)
    write_images(tmp_path / "odd", 6, 100)
    options = ["--dataset", f"folder:{tmp_path}/val", "--model", "resnet18", "--width", "0.05",
               "--epochs", "1", "-b", "16", "--image-size", "16", "--out-dir",
               str(tmp_path / "runs"), "--no-plot", *CPU]
    own, odd = ddu.main([*options, "--ood", f"folder:{tmp_path}/odd", "--predict",
                         f"folder:{tmp_path}/val/test"])
    assert (own["set"], own["n"], odd["set"], odd["against"]) == ("val", 15, "val", "odd")
    run = tmp_path / "runs" / "ddu" / "val-resnet18-sn3-mod-w0.05-seed1"
    predictions = read_csv(run / "predictions.csv")
    assert [p["label"] for p in predictions] == [*"0" * 4, *"1" * 5, *"2" * 6]
    assert predictions[5]["file"] == "dog/1.png"
    accuracy = np.mean([p["label"] == p["predicted"] for p in predictions])
    assert accuracy == pytest.approx(own["accuracy"])
    assert ddu.main([*options, "--ood"]) == [own]  # none
    [few] = ddu.main([*options, "--limit-steps", "1", "--active-learning", "random",
                      "--num-initial-samples", "6", "--max-training-samples", "6"])
    assert (few["set"], few["n"]) == ("val", 15)
    for image in (tmp_path / "val" / "train").rglob("*.png"):
        image.unlink() if int(image.stem) > 2 else None
    with pytest.raises(UserError, match="0.1 of 9 .* is no validation example"):
        ddu.main([*options, "--ood"])


@pytest.fixture
def features(tmp_path):
    """options(*names, **arrays): train.npz of two classes, near.npz like it, far.npz."""
    rng = np.random.default_rng(1)

    def draw(y):
        return rng.normal(size=(len(y), 3)) * [1, 2, 0.1] + 4 * y[:, None]

    labels = rng.integers(0, 2, 300)
    np.savez(tmp_path / "train.npz", features=draw(labels), labels=labels)
    np.savez(tmp_path / "near.npz", features=draw(rng.integers(0, 2, 200)))
    np.savez(tmp_path / "far.npz", features=draw(np.ones(50)) + 30)
    return lambda *names: ["--features", str(tmp_path / "train.npz"), "--out-dir",
                           str(tmp_path / "runs"), *CPU, "--score",
                           *(str(tmp_path / f"{name}.npz") for name in names)]


def test_features_of_ones_own(features, tmp_path):
    rows = ddu.main(features("near", "far"))
    train = np.load(tmp_path / "train.npz")
    kept, held_out = data.train_val_split(300, 1)
    z, y = (torch.tensor(train[k]) for k in ("features", "labels"))
    run = tmp_path / "runs" / "ddu" / "features-train-seed1"

    def log_density(points):
        return scipy.special.logsumexp(scipy_log_densities(z[kept], y[kept], points), 1)

    threshold = np.quantile(log_density(z[held_out]), 0.01)
    for name, against in (("near", None), ("far", "far")):
        expected = log_density(torch.tensor(np.load(tmp_path / f"{name}.npz")["features"]))
        scores = read_csv(run / f"scores_{name}.csv")
        assert np.allclose([float(s["density"]) for s in scores], expected, rtol=1e-9)
        assert [s["decision"] == "ood" for s in scores] == (expected < threshold).tolist()
        row = row_of(rows, set="near", against=against)
        assert row["density"] == pytest.approx(expected.mean())
        assert row["density_threshold"] == pytest.approx(threshold)
    assert row["auroc_density"] == 1 and row["fraction_ood"] == 1 and row["jitter"] == 0
    main, other = finish(start_ranks(tmp_path, 2, run_ddu, *features("near", "far"), "--name", "2"))
    assert "auroc_density" in main.stdout and other.stdout == ""
    assert strict_json(run.parent / "2" / "results.json")["rows"] == rows
    with pytest.raises(UserError, match="same name"):
        ddu.main(features("near", "near"))
    for name, arrays, match in (("near", dict(features=np.ones((4, 2))), "near.npz"),
                                ("train", {k: train[k][:9] for k in train}, "9 examples")):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(UserError, match=match):
            ddu.main(features("far" if name == "train" else "near"))


# ---- Two moons, active learning -----------------------------------------------------------------


def test_two_moons_is_a_run_like_any_other_also_of_ensembles(tmp_path):
    options = ["--dataset", "two_moons", "--epochs", "1", "--out-dir", str(tmp_path), *CPU]
    rows = ddu.main([*options, "--runs", "2", "--ensemble", "2"])
    assert [(r["method"], r["seed"]) for r in rows[::2]] == [
        (m, s) for s in (1, 2) for m in ("DDU", "ensemble of 2")]
    assert len({r["nll"] for r in rows[::2]}) == 4  # of different networks
    own, far = rows[:2]
    assert own["accuracy"] > 0.7 and far["against"] == "background" and own["n"] == 2000
    assert far["auroc_density"] > 0.95 > far["auroc_entropy"]
    [folder] = (tmp_path / "ddu").iterdir()
    assert {p.name for p in folder.glob("*.pt")} == {
        f"seed{s}{m}.pt" for s in (1, 2) for m in ("", "-member1")}
    assert (folder / "two_moons.png").stat().st_size > 20_000
    assert ddu.main([*options, "--ood", "--eval", "--no-plot"]) == [own]


@pytest.fixture
def few(small):
    """few(*more): active learning on the small set: 8, 10 and 12 labels, one step an epoch."""
    return lambda *more: [
        *small, "--epochs", "1", "--limit-steps", "1", "--num-initial-samples", "8",
        "--max-training-samples", "12", "--acquisition-batch-size", "2", "--num-ensemble", "2",
        "--active-learning", *more]


def test_active_learning_resumes_and_does_not_reuse_other_options(few, tmp_path, monkeypatch):
    options, folder = few("density", "random", "--runs", "2"), tmp_path / "runs" / "ddu" / "run"
    rows = ddu.main(options)
    results = strict_json(folder / "results.json")
    assert results["labels"] == [8, 10, 12] and results["rows"] == rows
    for row in rows:
        curve = results["curves"][row["method"]][row["seed"] - 1]
        assert row["accuracy"] == curve[-1] and len(curve) == 3 and row["n"] == 20
    states = {p.stem: torch.load(p, weights_only=True) for p in folder.glob("*-run?.pt")}
    labelled = [state["labelled"].tolist() for state in states.values()]
    assert [len({*row}) for row in labelled] == [12] * 4
    assert len({*map(tuple, labelled)}) == 4 and len({tuple(row[:8]) for row in labelled}) == 1
    state = states["density-run1"]
    torch.save({**state, "labelled": state["labelled"][:10], "accuracy": state["accuracy"][:1]},
               folder / "density-run1.pt")  # as if killed
    with pytest.raises(UserError, match="10 labels"):
        ddu.main([*options, "--eval"])
    assert ddu.main(options) == rows
    monkeypatch.setattr(ddu, "train", None)
    assert ddu.main([*options, "--eval"]) == rows
    for other in ("--opt sgd", "--power-iterations 2", "--jitter 1", "--shrinkage"):
        with pytest.raises(UserError, match="other options"):
            ddu.main([*options, *other.split()])


def test_active_learning_by_two_processes_that_share_no_disk_equals_one(few, tmp_path):
    options = few("density", "mi", "random", "--opt", "sgd", "--dropout", "0.3", "--shrinkage")
    rows = ddu.main(options)
    machine = lambda rank: ["--out-dir", str(tmp_path / f"machine{rank}")]
    finish(start_ranks(tmp_path, 2, run_ddu, *options, each=machine))
    results = strict_json(tmp_path / "machine0" / "ddu" / "run" / "results.json")
    assert results["rows"] == rows == ddu.main([*options, *machine(0), "--eval"])


def test_active_learning_takes_low_densities_and_high_uncertainties(few, monkeypatch):
    seen, step = [], ddu.acquisition_step

    def note(pool, test, labelled, acquisition, *rest):
        assert pool.shape == test.shape == (3, 32, 32)
        accuracy, score = step(pool, test, labelled, acquisition, *rest)
        seen.append((acquisition, labelled, score.clone()))
        score[labelled] = math.inf  # never again, whatever it is
        return accuracy, score

    monkeypatch.setattr(ddu, "acquisition_step", note)
    names = ["density", "entropy", "pe", "mi"]
    ddu.main([*few(*names), "--max-training-samples", "10"])
    assert [name for name, *_ in seen] == [name for name in names for _ in (8, 10)]
    for (name, before, score), (_, after, _) in zip(seen[::2], seen[1::2]):
        assert score.isfinite().all() and len(score) == 121
        score[before] = -math.inf
        assert {*after[8:].tolist()} == {*score.topk(2).indices.tolist()}
        left = score[score > -math.inf]
        assert left.unique().numel() > 100 if name == "density" else \
            -1e-6 <= left.min() and left.max() <= math.log(4) + 1e-6  # no ties


def test_a_story_of_active_learning_on_the_ambiguous_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(ddu, "train", lambda net, *_: net)  # the protocol, without training
    options = ["--dataset", "glyphs", "--model", "lenet", "--active-learning", "random",
               "-ambiguous", "--subsample", "50", "--out-dir", str(tmp_path), *CPU]
    for most, sizes in (("20", [20]), ("31", [20, 25, 30, 31])):  # 20: nothing to acquire
        rows, folder = ddu.main([*options, "--max-training-samples", most, "--name", most]), \
            tmp_path / "ddu" / most
        results = strict_json(folder / "results.json")
        assert results["labels"] == sizes and len(results["curves"]["random"][0]) == len(sizes)
    pool, test, start, odd = ddu.active_learning_pool(ddu.parse_args(options))
    assert len(pool) == 950 and odd.sum() == 900 and test.name == "glyphs"
    assert torch.bincount(pool.labels[start]).tolist() == [2] * 10
    labelled = torch.load(folder / "random-run0.pt", weights_only=True)["labelled"]
    assert torch.equal(labelled[:20], start) and (folder / "ambiguous_share.png").exists()
    assert rows[0]["ambiguous_share"] == pytest.approx(odd[labelled].double().mean().item())


@pytest.mark.parametrize("labels", [23, 6000])
def test_each_labelled_example_is_drawn_nearly_equally_often(monkeypatch, labels):
    seen = []
    pool = data.ImageSet("x", torch.arange(7000.0).view(-1, 1, 1, 1), torch.arange(7000) % 2, 2,
                         (0.0,), (1.0,))
    monkeypatch.setattr(ddu, "make_network", lambda *_: None)
    monkeypatch.setattr(ddu, "train", lambda net, dataset, *_: seen.append(dataset))
    monkeypatch.setattr(ddu, "forward", lambda net, dataset, args: ddu.Outputs(
        torch.zeros(len(dataset), 2), None, dataset.labels))
    labelled = torch.arange(labels) + 500
    ddu.acquisition_step(pool, pool, labelled, "random", (1, 0, labels), options(), None)
    counts = seen[0].images.flatten().long().bincount(minlength=7000)
    assert counts.sum() == max(5056, labels) == counts[labelled].sum()
    assert counts[labelled].min() >= counts[labelled].max() - 1 and counts[labelled].all()


# ---- Bad input ----------------------------------------------------------------------------------

GLYPHS = "--dataset glyphs --epochs 1 --limit-steps 1"
FAST = f"{GLYPHS} --model lenet --no-sn"
AL = f"{FAST} --active-learning random"
MISUSE = {
    f"{FAST} --ood nonsense": "nonsense", f"{FAST} --ood glyphs": "called glyphs",
    "--dataset imagenet_o": "imagenet_o", "--model nonsense": "nonsense",
    f"{GLYPHS} --model lenet -sn": "lenet", f"{GLYPHS} --model lenet --no-sn -mod": "lenet",
    f"{GLYPHS} --model torchvision/nonsense": "torchvision/nonsense",
    f"{GLYPHS} --model fc_resnet": "fc_resnet", "--dataset two_moons --model resnet18": "two_moons",
    "--dataset two_moons --ood svhn": "two_moons", "--dataset two_moons --predict glyphs": "glyphs",
    f"{GLYPHS} --model wide_resnet --depth 11": "depth 11", f"{FAST} --eval": "train first",
    "--features x.npz": "--score", "--score x.npz": "--features", "--jitter -1": "jitter",
    "--features x --score y": "no file x", "--features x --score y --runs 2": "are for networks",
    f"{FAST} --predict nonsense": "nonsense", f"{AL} --predict glyphs": "--predict",
    f"{AL} --ensemble 2": "--num-ensemble", f"{AL} --num-ensemble 1": "--num-ensemble",
    f"{AL} --model nonsense": "nonsense", "--dataset two_moons --augment": "--augment",
    f"{AL} --num-initial-samples 25": "samples 25", f"{AL} --num-initial-samples 10": "samples 10",
    f"{AL} --max-training-samples 10": "samples 10", f"{AL} --max-training-samples 9001": "9001",
    "--active-learning nonsense": "nonsense", f"{AL} density --jitter 0": "singular",
    "--active-learning random --dataset numbers --ambiguous": "ambiguous",
    "--dataset tiny_imagenet --model lenet --no-sn --no-mod": "28x28"}


@pytest.mark.parametrize("line", MISUSE)
def test_a_story_of_misuse_is_one_line(line, small_data, tmp_path, monkeypatch):
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    with pytest.raises(UserError, match=MISUSE[line]) as error:
        ddu.main([*line.split(), "--out-dir", str(tmp_path / "runs"), "--no-plot", "--data-dir",
                  str(small_data), *CPU])
    assert "\n" not in str(error.value)
    assert (tmp_path / "runs").exists() == ("--jitter 0" in line)  # no directory is claimed


@pytest.mark.parametrize("more", [
    "--model resnet50 --width 0.02 --amp bf16", "--model vgg16 --width 0.05 --no-sn --shrinkage",
    "--model resnet18 --width 0.05 --opt adam --lr 0.001 --priors --no-augment",
    "--model resnet50 --width 0.03 --no-mod --no-sn -b 54"])  # narrow strided 1x1 convolutions
def test_other_networks_and_options(small, tmp_path, more):
    rows = ddu.main([*small, *more.split(), "--epochs", "1", "--limit-steps", "2"])
    assert 0 <= row_of(rows, against="odd")["auroc_density"] <= 1
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    state = torch.load(tmp_path / "runs" / "ddu" / "run" / "seed1.pt", weights_only=True)["net"]
    assert all(v.dtype in (torch.float32, torch.int64) for v in state.values())


def test_a_pretrained_network_on_streamed_images(tmp_path):
    import torchvision
    for c, name in enumerate(("n01", "n02", "n03")):
        write_images(tmp_path / "imagenet" / "train" / name, 8, 60 * c, size=70)
        write_images(tmp_path / "imagenet" / "val" / name, 4, 60 * c, size=70)
    write_images(tmp_path / "odd", 5, 20, size=70)
    net = torchvision.models.resnet18(num_classes=3)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    rows = ddu.main(["--dataset", "imagenet", "--data-dir", str(tmp_path), "--model",
                     "torchvision/resnet18", "--weights", str(tmp_path / "net.pt"), "--image-size",
                     "72", "-b", "8", "--workers", "0", "--out-dir", str(tmp_path / "runs"),
                     "--ood", f"folder:{tmp_path}/odd", "--eval", "--no-plot", *CPU])
    assert row_of(rows, set="imagenet")["n"] == 12 and row_of(rows, against="odd")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(small, features):
    for options, more in (small, ["--eval"]), (features("near", "far"), ["--name", "again"]):
        rows = ddu.main([*options, "--device", "cuda"])
        assert_close_rows(rows, ddu.main([*options, "--device", "cuda", *more]), 1e-3)
