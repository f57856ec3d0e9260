"""ddu.py against independent oracles: operators as dense matrices, networks written out a second
time, Gaussians by NumPy, SciPy, scikit-learn and 50-digit arithmetic; and its runs end to end."""

import argparse
import ast
import copy
import csv
import io
import json
import math
import os
import time
from pathlib import Path
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

SCRIPT = "ddu"
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
                  noise=0.0, priors=False, jitter=None, shrinkage=False, ensemble=1, runs=1)
    assert {k: getattr(args, k) for k in recipe} == recipe
    assert args.ood == ["svhn", "cifar100", "tiny_imagenet"]
    moons = ddu.parse_args(["--dataset", "two_moons", *CPU])
    assert (moons.model, moons.coeff, moons.power_iterations) == ("fc_resnet", 0.65, 5)
    assert ddu.parse_args(["--dataset", "svhn", *CPU]).augment is False  # published: CIFAR only
    few = ddu.parse_args("--dataset mnist --active-learning density --device cpu".split())
    published = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                     num_ensemble=5, subsample=1000, lr=1e-3, batch_size=64, opt="adam", epochs=20,
                     model="resnet18", sn=False, mod=False)
    assert published.items() <= vars(few).items()
    args = ddu.parse_args("--seed 5 --dataset cifar100 --model resnet50 -sn -mod --coeff 2 --mom "
                          "0.8 --decay 1e-4 -b 64 -e 9 --lr 0.05 --opt sgd --ood_dataset svhn "
                          "--runs 5 --ensemble 5 --device cpu".split())
    given = dict(seed=5, model="resnet50", sn=True, mod=True, coeff=2.0, momentum=0.8, epochs=9,
                 weight_decay=1e-4, batch_size=64, lr=0.05, ood=["svhn"], runs=5, ensemble=5)
    assert given.items() <= vars(args).items()


# ---- Spectral normalisation ---------------------------------------------------------------------


def dense_operator(weight, size, stride):
    """The matrix [Cout H' W', Cin H W] of a convolution with padding k // 2, by its definition."""
    weight = np.asarray(weight.detach(), dtype=np.float64)
    c_out, c_in, k, _ = weight.shape
    out = (size + 2 * (k // 2) - k) // stride + 1
    matrix = np.zeros((c_out, out, out, c_in, size, size))
    for i, j, a, b in np.ndindex(out, out, k, k):
        y, x = i * stride + a - k // 2, j * stride + b - k // 2
        if 0 <= y < size and 0 <= x < size:
            matrix[:, i, j, :, y, x] = weight[:, :, a, b]
    return matrix.reshape(c_out * out * out, -1)


def unit(x):
    return x / np.linalg.norm(x)


def spectral(layer, shape, coeff=1.0, iterations=1):
    """(the layer in float64 and training mode, its SoftSpectral, its raw weight)."""
    ddu.spectral_normalise(layer, shape, coeff, iterations)
    layer.double().train()
    return layer, layer.parametrizations.weight[0], layer.parametrizations.weight.original


def spectral_conv(size, stride=1, kernel=3, coeff=1.0, iterations=1):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 5, kernel, stride, kernel // 2, bias=False)
    return spectral(conv, (4, size, size), coeff, iterations)


def spectral_linear(coeff=1.0):
    torch.manual_seed(0)
    return spectral(nn.Linear(4, 5), (4,), coeff)


def spectral_layers(net):
    return [m for m in net.modules() if isinstance(m, ddu.SoftSpectral)]


def scale_of(layer):
    """W_eff / W of the next forward, one number."""
    ratio = (layer.weight / layer.parametrizations.weight.original).detach().flatten()
    assert (ratio - ratio[0]).abs().max() < 1e-6
    return ratio[0].item()


@pytest.mark.parametrize("size, stride", [(8, 1), (7, 1), (8, 2), (7, 2)])
def test_sigma_is_the_norm_of_the_true_operator(size, stride):
    """Its stride and zero padding included, by iterations v = A^T u, u = A v from the start."""
    conv, sn, raw = spectral_conv(size, stride, coeff=1e-3, iterations=3)
    a, u = dense_operator(raw, size, stride), sn.u.flatten().numpy().copy()
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    y = conv(x)
    for _ in range(3):
        v = unit(a.T @ u)
        u = unit(a @ v)
    assert np.allclose(sn.v.flatten(), v, atol=1e-10) and np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = a / ((u @ a @ v) / 1e-3 + 1e-5)
    assert np.allclose(y.detach().flatten(1), x.flatten(1).numpy() @ effective.T, rtol=1e-9)
    exact = np.linalg.svd(a, compute_uv=False)[0]
    sigmas = [1e-3 * (1 / scale_of(conv) - 1e-5) for _ in range(20)]
    assert np.all(np.diff(sigmas) >= -1e-9 * exact)
    assert exact * (1 - 2e-3) <= sigmas[-1] <= exact * (1 + 1e-9)
    reshaped = np.linalg.norm(raw.detach().flatten(1).numpy(), 2)
    assert abs(sigmas[-1] / reshaped - 1) > 0.05  # what torch's spectral_norm would have found


def test_one_by_one_kernels_and_linear_layers_are_matrices_without_the_added_1e5():
    for layer, sn, raw in (spectral_conv(8, 1, 1, 0.3), spectral_conv(8, 2, 1, 0.3),
                           spectral_linear(0.3)):
        w, u = raw.detach().flatten(1).numpy(), sn.u.flatten().numpy()
        assert sn.u.numel() == 5 and sn.v.numel() == 4
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


def test_weights_are_never_inflated_and_zeros_stay_finite():
    for scale in (1e-6, 0.1, 1.0, 100.0):
        for kernel in (1, 3):
            conv, _, raw = spectral_conv(8, kernel=kernel)
            raw.data.mul_(scale)
            factors = [scale_of(conv) for _ in range(5)]
            assert max(factors) <= 1 and (factors[-1] < 0.1) == (scale == 100)
            if scale == 1e-6:
                assert factors[-1] == pytest.approx(1 if kernel == 1 else 0.99999, abs=1e-7)
    conv, sn, raw = spectral_conv(8)
    nn.init.zeros_(raw)
    assert not conv(torch.ones(1, 4, 8, 8, dtype=torch.float64)).any()
    assert torch.isfinite(sn.u).all() and torch.isfinite(sn.v).all()


LAYERS = {"3x3": lambda c: spectral_conv(5, coeff=c), "linear": spectral_linear,
          "stride 2": lambda c: spectral_conv(5, 2, coeff=c),
          "1x1": lambda c: spectral_conv(5, kernel=1, coeff=c)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("active", [True, False])
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(kind, active):
    layer, sn, raw = LAYERS[kind](0.1 if active else 1000.0)
    x = torch.randn(*((3, 4) if kind == "linear" else (2, 4, 5, 5)), dtype=torch.float64)
    twin, images = copy.deepcopy(layer), torch.stack([x, 2 * x])
    separate = [torch.autograd.grad(twin(x).square().sum(),
                                    twin.parametrizations.weight.original)[0] for x in images]
    sum(layer(x).square().sum() for x in images).backward()  # two forwards before one backward
    assert torch.allclose(raw.grad, sum(separate), rtol=1e-12)
    raw.grad = None
    layer(x).square().sum().backward()
    gradient, flat = raw.grad.flatten(), raw.data.view(-1)
    layer.eval()  # from here on u and v are those of that forward
    numeric = torch.zeros_like(gradient)
    with torch.no_grad():
        for i in range(len(flat)):
            for sign in (1, -1):
                flat[i] += sign * 1e-5
                numeric[i] += sign * layer(x).square().sum() / 2e-5
                flat[i] -= sign * 1e-5
    assert torch.allclose(gradient, numeric, rtol=1e-6, atol=1e-6 * numeric.abs().max().item())
    weight = raw.detach().clone().requires_grad_()
    constant = weight * (layer.weight / raw).detach()
    y = F.linear(x, constant, layer.bias) if kind == "linear" else \
        F.conv2d(x, constant, None, layer.stride, layer.padding)
    y.square().sum().backward()
    difference = (weight.grad.flatten() - gradient).norm() / gradient.norm()
    assert difference > 0.2 if active else difference < 1e-12


def test_evaluation_leaves_the_iteration_alone_and_sigma_keeps_its_precision():
    conv, sn, _ = spectral_conv(8, coeff=0.1)
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

# input channels, side, classes; parameters without and with -mod; feature dimension; spectral
# layers without -mod (of which 1x1) and with; batch norms without and with
SIZES = [("lenet", 1, 28, 10, 44_426, None, 84, None),
         ("resnet18", 3, 32, 10, 11_173_962, 11_000_138, 512, (20, 3, 17, 0, 20, 17)),
         ("resnet18", 1, 28, 10, 11_172_810, 10_998_986, 512, None),
         ("resnet50", 3, 32, 100, 23_705_252, 20_928_676, 2048, (53, 36, 49, 32, 53, 49)),
         ("wide_resnet", 3, 32, 10, 36_479_194, 36_220_634, 640, (28, 3, 25, 0, 25, 25)),
         ("wide_resnet", 3, 32, 100, 36_536_884, 36_278_324, 640, None),
         ("vgg16", 3, 32, 10, 14_724_042, 14_724_042, 512, (13, 0, 13, 0, 13, 13)),
         ("vgg16", 1, 28, 10, 14_722_890, 14_722_890, 512, None)]


@pytest.mark.parametrize("model, channels, side, classes, off, on, dim, counts", SIZES)
def test_sizes_of_the_networks_and_what_is_spectral(model, channels, side, classes, off, on, dim,
                                                    counts):
    found = []
    for mod, expected in ((False, off), (True, on)):
        if expected is None:
            continue
        net = build(model, classes, (channels, side, side), "meta", sn=False, mod=mod)
        assert sum(p.numel() for p in net.parameters()) == expected and not spectral_layers(net)
        logits, feature = net(torch.empty(2, channels, side, side, device="meta"))
        assert logits.shape == (2, classes) and feature.shape == (2, dim)
        if counts:
            net = build(model, classes, (channels, side, side), "meta", mod=mod)
            assert sum(p.numel() for p in net.parameters()) == expected
            layers = spectral_layers(net)
            assert len(layers) == sum(isinstance(m, nn.Conv2d) for m in net.modules())
            assert not hasattr(net.head, "parametrizations")
            found += [len(layers), sum(m.v.shape[2:] == (1, 1) for m in layers)]
            norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
            assert {m.momentum for m in norms} == {0.01 if model == "wide_resnet" else 0.1}
            found.append(len(norms))
    if counts:
        assert found == [counts[0], counts[1], counts[4], counts[2], counts[3], counts[5]]
    if model == "wide_resnet" and counts:  # published: 4,582,425, of which 25 are logged sigmas
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
            patches = F.unfold(sn.v, k, padding=k // 2, stride=1 if k == 1 else stride)[0]
            sigma = sn.u.flatten() @ (w.flatten(1) @ patches).flatten()
            w = w / (max(1, sigma.item() / self.coeff) + (1e-5 if k > 1 else 0))
        return F.conv2d(x, w, stride=stride, padding=k // 2)

    def norm(self, x):
        layer = next(self.norms)
        mean, var, weight, bias = (t[:, None, None] for t in (
            layer.running_mean, layer.running_var, layer.weight, layer.bias))
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def act(self, x):
        return torch.where(x > 0, x, (0.01 if self.mod else 0.0) * x)

    def shortcut(self, x, channels, stride, norm):
        b, c, side, _ = x.shape
        if stride == 1 and c == channels:
            return x
        if not self.mod:
            x = self.conv(x, stride)
            return self.norm(x) if norm else x
        half = side // 2
        if stride == 2:
            x = x[:, :, ::2, ::2] if side % 2 else x.reshape(b, c, half, 2, half, 2).mean((3, 5))
        return torch.cat([x, x.new_zeros(b, channels - c, *x.shape[2:])], 1)


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
    assert bool(spectral_layers(net)) == sn
    scale = expected.std(0).max()  # of what depends on the image
    assert scale > 0.01 * expected.abs().max() and (feature - expected).abs().max() < 1e-9 * scale
    assert torch.allclose(logits, expected @ net.head.weight.T + net.head.bias, rtol=1e-9)


def test_dropout_and_initialisation_of_wide_resnet():
    net = build("wide_resnet", 100, depth=10, width=0.5, sn=False)
    drops = [m for m in net.modules() if isinstance(m, nn.Dropout)]
    assert [m.p for m in drops] == [0.3] * 3
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.05)
    assert not net.head.bias.any()
    for m in net.modules():  # fan-out: of the output channels
        if isinstance(m, nn.Conv2d) and m.weight.numel() > 20_000:
            fan_out = m.weight.shape[0] * m.weight[0, 0].numel()
            assert m.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    block = next(m for m in net.modules() if isinstance(m, ddu.Residual))
    kinds = [type(m) for m in block.body]
    assert kinds.index(nn.Dropout) == len(kinds) - 2  # between the two convolutions


def test_lenet_and_fc_resnet_equal_a_second_version():
    net, x = build("lenet", shape=(1, 28, 28), sn=False, mod=False), torch.randn(3, 1, 28, 28)
    logits, feature = net(x)
    weights = [(m.weight, m.bias) for m in net.extractor.modules() if hasattr(m, "weight")]
    for w, b in weights[:2]:
        x = F.conv2d(x, w, b).clamp_min(0).unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    x = x.flatten(1)
    for w, b in weights[2:]:
        x = (x @ w.T + b).clamp_min(0)
    assert len(weights) == 4 and torch.allclose(feature, x, atol=1e-5)
    assert torch.allclose(logits, net.head(x), atol=1e-5)
    for sn in (True, False):
        net = build("fc_resnet", 2, (2, 1, 1), sn=sn, coeff=0.65, power_iterations=5).double()
        x = torch.randn(5, 2, 1, 1, dtype=torch.float64)
        net.train()(x)
        _, feature = net.eval()(x)
        first, *rest = [m for m in net.extractor.modules() if isinstance(m, nn.Linear)]
        z = x.flatten(1) @ first.weight.T + first.bias
        for m in rest:
            z = z + (z @ m.weight.T + m.bias).clamp_min(0)
        assert len(rest) == 4 and torch.allclose(feature, z, atol=1e-10)
        assert len(spectral_layers(net)) == 5 * sn and feature.shape == (5, 128)
        assert not sn or np.linalg.norm(first.weight.detach(), 2) < 0.66


def test_a_spectral_net_copies_saves_and_loads_after_a_training_step():
    settings = dict(depth=10, width=0.1, coeff=0.8)
    net, x = build("wide_resnet", **settings), torch.randn(2, 3, 32, 32)
    net.train()(x)[0].sum().backward()
    expected, file = net.eval()(x)[0], io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    loaded = build("wide_resnet", seed=9, **settings).eval()
    assert not torch.equal(loaded(x)[0], expected)
    loaded.load_state_dict(dict(torch.load(file, weights_only=True)))
    for twin in (loaded, copy.deepcopy(net)):
        assert torch.equal(twin(x)[0], expected)


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
    (tmp_path / "text.pt").write_text("no state dict")
    for change, classes in ((dict(model="torchvision/nobody"), 1000), ({}, 10),
                            (dict(weights="absent.pt"), 1000),
                            (dict(weights=str(tmp_path / "text.pt")), 1000)):
        with pytest.raises(UserError) as caught:
            ddu.make_network(argparse.Namespace(**{**vars(args), **change}), classes, (3, 32, 32))
        assert "\n" not in str(caught.value)


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


IMBALANCED = (120, 260, 150, 200)


@pytest.mark.parametrize("dim, dtype, offset", [
    (16, torch.float64, 0.0), (64, torch.float32, 0.0), (8, torch.float64, 1e4)])
def test_densities_and_posteriors_equal_scipy_in_float64(dim, dtype, offset):
    z, y = clusters(IMBALANCED, dim, spread=0.3)
    z = (z + offset).to(dtype)
    points = torch.cat([z[:40], offset + 3 * torch.randn(20, dim, dtype=dtype)])
    expected = scipy_log_densities(z, y, points)
    for priors in (False, True):
        gaussians = fit(z, y, priors=priors)
        joint = expected + (np.log(np.bincount(y) / len(y)) if priors else 0)
        scores, close = ddu.density_scores(gaussians, points), dict(rtol=1e-8, atol=1e-6)
        assert gaussians.eps == 0 and scores["density"].dtype == torch.float64
        assert np.allclose(scores["density"], scipy.special.logsumexp(joint, 1), **close)
        posterior = scipy.special.softmax(joint, 1)
        assert np.allclose(scores["log_posterior"].exp(), posterior, atol=1e-6)
        entropies = scipy.stats.entropy(posterior, axis=1)
        assert np.allclose(scores["gmm_entropy"], entropies, atol=1e-6)
        assert dim == 64 or entropies.std() > 0.01


def test_a_given_jitter_is_added_to_every_covariance():
    z, y = clusters((50, 6, 9, 60), 9)  # two classes with no more examples than features
    points = torch.cat([z[:30], 4 * torch.randn(20, 9, dtype=torch.float64)])
    for jitter in (1e-3, 0.5):
        gaussians = fit(z, y, eps=jitter)
        assert gaussians.eps == jitter
        assert np.allclose(log_densities(gaussians, points),
                           scipy_log_densities(z, y, points, jitter), rtol=1e-9, atol=1e-8)


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
        z = mpmath.matrix(rows.tolist())
        n, dim = z.rows, z.cols
        mean = [mpmath.fsum(z[i, d] for i in range(n)) / n for d in range(dim)]
        centred = mpmath.matrix(n, dim)
        for i in range(n):
            for d in range(dim):
                centred[i, d] = z[i, d] - mean[d]
        factor = mpmath.cholesky(centred.T * centred / (n - 1) + mpmath.mpf(eps) * mpmath.eye(dim))
        log_det = 2 * mpmath.fsum(mpmath.log(factor[d, d]) for d in range(dim))
        values = []
        for point in points.tolist():
            x, squared = [], mpmath.mpf(0)
            for d in range(dim):  # forward substitution
                x.append((mpmath.mpf(point[d]) - mean[d]
                          - mpmath.fsum(factor[d, e] * x[e] for e in range(d))) / factor[d, d])
                squared += x[d] ** 2
            values.append(float(-(squared + log_det + dim * mpmath.log(2 * mpmath.pi)) / 2))
    return values


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


def test_shrinkage_is_ledoit_and_wolfs():
    """Their covariances have the divisor n, ours n - 1."""
    for counts, dim in (((40, 12, 60), 10), ((6, 9), 15)):
        z, y = clusters(counts, dim)
        gaussians = fit(z, y, shrinkage=True)
        points, ours = 4 * torch.randn(20, dim, dtype=torch.float64), gaussians
        for c, n in enumerate(counts):
            cov, intensity = ledoit_wolf(z[y == c].numpy())
            centred = z[y == c] - z[y == c].mean(0)
            _, values = ddu.spectrum(centred)
            own = ddu.ledoit_wolf(centred, values * (n - 1) / n)
            assert own == pytest.approx(intensity, rel=1e-9) and 0 < own < 1
            peer = scipy.stats.multivariate_normal(z[y == c].mean(0), cov * n / (n - 1))
            assert np.allclose(log_densities(ours, points)[:, c], peer.logpdf(points), rtol=1e-9)
        assert gaussians.eps == 0  # nothing is singular any more


def test_affine_maps_of_the_features_shift_every_log_density_by_the_log_determinant():
    z, y = clusters(IMBALANCED, 8)
    rng = np.random.default_rng(4)
    a, b = torch.tensor(rng.normal(size=(8, 8))), torch.tensor(rng.normal(size=8) * 5)
    points = torch.cat([z[:50], torch.tensor(rng.normal(size=(50, 8)) * 9)])
    before = ddu.density_scores(fit(z, y), points)
    after = ddu.density_scores(fit(z @ a.T + b, y), points @ a.T + b)
    log_det = np.linalg.slogdet(a.numpy())[1]
    assert np.allclose(after["density"], before["density"] - log_det, atol=1e-8)
    for name in ("gmm_entropy", "class_mahalanobis", "mahalanobis", "relative_mahalanobis"):
        assert torch.allclose(after[name], before[name], rtol=1e-8, atol=1e-8), name


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
        sign = -1 if name.removesuffix("_scaled") in uncertain else 1
        metrics = ddu.detection_metrics({name: torch.tensor(inside)}, {name: torch.tensor(outside)})
        assert list(metrics) == [f"{m}_{name}" for m in DETECTION]
        expected = [roc_auc_score(is_id, sign * both), average_precision_score(is_id, sign * both),
                    average_precision_score(~is_id, -sign * both)]
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


def test_the_method_section_runs_alone():
    """Pasted under the script's own imports, without common and data, on a stranger's features."""
    source = Path(ddu.__file__).read_text()
    imports = [node for node in ast.parse(source).body if isinstance(node, (ast.Import,
                                                                            ast.ImportFrom))]
    lines = [ast.unparse(node) for node in imports if not {"common", "data"} & {
        getattr(node, "module", None), *(alias.name for alias in node.names)}]
    method = source[source.index("# ---- Method"):source.index("# ---- Training")]
    alone = {}
    exec("\n".join(lines) + "\n" + method, alone)
    z, y = clusters((40, 5, 30), 8)
    ours, theirs = (f(z, y, 3, priors=True, shrinkage=True) for f in (
        alone["fit_gaussians"], ddu.fit_gaussians))
    for name, score in alone["density_scores"](ours, z).items():
        assert torch.equal(score, ddu.density_scores(theirs, z)[name]), name
    logits = torch.randn(78, 3)
    scores = alone["softmax_scores"](logits, 2.0)
    assert torch.equal(scores["energy"], ddu.softmax_scores(logits, 2.0)["energy"])
    assert alone["decide"](scores["energy"], scores["entropy"], 0.5, 0.5).shape == (78,)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    alone["spectral_normalise"](net, (3, 4, 4), coeff=0.01)
    assert net.training  # as it was
    for _ in range(30):
        net(torch.randn(5, 3, 4, 4))
    assert np.linalg.norm(net[3].weight.detach(), 2) == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(ValueError, match="class 3 has 0"):
        alone["fit_gaussians"](z, y, 4)


# ---- Runs ---------------------------------------------------------------------------------------

ROWS = {"train": 900, "test": 200, "ood": 200}


@pytest.fixture(scope="module", autouse=True)
def few_rows():
    """All sets are cut short in this process; val, as large as it comes, to an eighth."""
    load = data.load

    def load_few(name, split, *args, **more):
        dataset = load(name, split, *args, **more)
        return data.evenly(dataset, ROWS.get(split, -(-len(dataset) // 8)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", load_few)
        yield


def small_options(data_dir, out):
    """A run that takes a second: SN, batch norm, augmentation, momentum, and a last batch of one
    image, none for the second of two processes. 3 epochs of 4 steps."""
    return ["--dataset", "tiny_imagenet", "--data-dir", str(data_dir), "--ood",
            f"folder:{data_dir}/odd", "--model", "wide_resnet", "--depth", "10", "--width", "0.02",
            "--batch-size", "36", "--epochs", "3", "--lr", "0.05", "--dropout", "0", "--image-size",
            "32", "--out-dir", str(out), "--name", "run", "--no-plot", *CPU]


@pytest.fixture
def small(small_data, tmp_path):
    return small_options(small_data, tmp_path / "runs")


def run_of(options):
    """The run directory of options with a name."""
    out, name = (options[options.index(flag) + 1] for flag in ("--out-dir", "--name"))
    return Path(out) / "ddu" / name


def with_options(options, **changes):
    """`options` with the value of --key replaced or added."""
    options = list(options)
    for key, value in changes.items():
        flag = "--" + key.replace("_", "-")
        if flag in options:
            options[options.index(flag) + 1] = str(value)
        else:
            options += [flag, str(value)]
    return options


def row_of(rows, **keys):
    """The only row with these values, and where `set` is given with this `against` or none."""
    keys = {"against": None, **keys} if "set" in keys else keys
    [row] = [r for r in rows if keys.items() <= {"against": None, **r}.items()]
    return row


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def assert_close_rows(ours, theirs, tolerance=1e-6):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, str) or value is None:
                assert value == b[key]
            elif key != "jitter":
                assert b[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


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
    options = {"ood": ["glyphs_letters"], "priors": False, "jitter": None, "weights": "DEFAULT",
               "density_quantile": 0.01, "entropy_threshold": 0.35, "lr": 0.1, "sn": True}
    assert options.items() <= results["config"].items()
    assert results["seconds"].keys() >= {"train", "forward", "fit", "score", "total"}
    lines = [json.loads(line) for line in (folder / "seed1.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in lines] == [1, 2] and 2.0 < lines[0]["loss"] < 3.0
    assert {"accuracy", "lr", "examples_per_s", "seconds"} <= lines[0].keys()


def test_the_storys_rows(story):
    rows = story[2]
    predictions = {(r["set"], r.get("against")): r for r in rows}
    whole, clean, odd, far = "dirty_glyphs", "glyphs", "glyphs_ambiguous", "glyphs_letters"
    assert list(predictions) == [(whole, None), (clean, None), (odd, None), (whole, far),
                                 (clean, far), (clean, odd)]
    for (name, against), row in predictions.items():
        assert row["method"] == "DDU" and row["seed"] == 1
        assert row["n"] == (400 if name == whole else 200)
        assert row["fraction_clean"] + row["fraction_ambiguous"] + row["fraction_ood"] == \
            pytest.approx(1)
        metrics = [f"{m}_{s}" for m in DETECTION for s in ddu.SCORES if s not in (
            "predictive_entropy", "mutual_information")] if against else [
            f"{m}{s}" for m in ("accuracy", "nll", "brier", "ece15", "mce15", "adaptive_ece15")
            for s in ("", "_scaled")]
        assert all(math.isfinite(row[m]) for m in metrics)
        assert all(0 <= row[m] <= 1 for m in metrics if m[:3] not in ("nll", "bri"))
    both = (predictions[clean, None]["accuracy"] + predictions[odd, None]["accuracy"]) / 2
    assert predictions[whole, None]["accuracy"] == pytest.approx(both)
    assert predictions[whole, None]["temperature"] != 1


def test_eval_repeats_the_storys_table_and_predicts_any_set(story, tmp_path, monkeypatch):
    options, folder, rows = story
    kept = (folder / "seed1.pt").read_bytes()
    rng = np.random.default_rng(0)
    for name in ("3", "other"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "mine" / name / f"{i}.png")
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    assert ddu.main([*options, "--eval", "--no-plot", "--predict", "glyphs_letters"]) == rows
    letters = read_csv(folder / "predictions.csv")
    row = row_of(rows, set="dirty_glyphs", against="glyphs_letters")
    assert [r["index"] for r in letters] == [str(i) for i in range(200)]
    for region in ("clean", "ambiguous", "ood"):
        share = np.mean([r["decision"] == region for r in letters])
        assert share == pytest.approx(row[f"fraction_{region}"])
    for r in letters:
        assert float(r["epistemic"]) == -float(r["log_density"])
        assert (r["decision"] == "ood") == (float(r["log_density"]) < row["density_threshold"])
    ddu.main([*options, "--eval", "--no-plot", "-b", "16", "--predict", f"folder:{tmp_path}/mine"])
    mine = read_csv(folder / "predictions.csv")
    assert [r["file"] for r in mine] == [f"{d}/{i}.png" for d in ("3", "other") for i in range(3)]
    assert {"label", "predicted", "confidence", "total", "aleatoric"} <= mine[0].keys()
    assert (folder / "seed1.pt").read_bytes() == kept


def test_the_storys_threshold_and_temperature_come_from_the_validation_set(story, monkeypatch):
    options, _, rows = story
    seen, evaluate = [], ddu.evaluate
    monkeypatch.setattr(ddu, "evaluate", lambda *a: seen.append(evaluate(*a)) or seen[-1])
    ddu.main([*options, "--eval", "--no-plot", "--density-quantile", "0.2", "--jitter", "0.5"])
    found = seen[0]
    density = found.scores["val"]["density"]
    assert found.threshold == pytest.approx(np.quantile(density, 0.2)) and len(density) > 150
    assert found.gaussians.eps == 0.5 and torch.equal(
        found.scores["val"]["density"],
        ddu.density_scores(found.gaussians, found.outputs["val"].features)["density"])
    assert found.temperature == common.fit_temperature(found.outputs["val"].logits,
                                                       found.outputs["val"].labels)


def test_a_story_of_ensembles_and_several_runs(story, tmp_path):
    """Its members have one validation split, and the number of its rows never matters."""
    options = [*with_options(story[0], out_dir=tmp_path, epochs=1, limit_steps=2), "--no-plot"]
    rows = ddu.main([*options, "--ensemble", "2", "--runs", "2"])
    methods = [(r["method"], r["seed"]) for r in rows]
    assert {m: methods.count(m) for m in methods} == {
        (m, s): 6 for m in ("DDU", "ensemble of 2") for s in (1, 2)}
    folder = tmp_path / "ddu" / story[1].name
    names = {p.name for p in folder.glob("*.pt")}
    assert names == {f"seed{s}{m}.pt" for s in (1, 2) for m in ("", "-member1")}
    for seed in (1, 2):
        own = row_of(rows, method="DDU", seed=seed, set="dirty_glyphs")
        both = row_of(rows, method="ensemble of 2", seed=seed, set="dirty_glyphs")
        assert own["accuracy"] != both["accuracy"] or own["nll"] != both["nll"]
        far = row_of(rows, method="ensemble of 2", seed=seed, set="glyphs",
                     against="glyphs_letters")
        assert all(0 <= far[f"{m}_{s}"] <= 1 for m in DETECTION
                   for s in ("predictive_entropy", "mutual_information_scaled"))
    single = ddu.main(options)  # the same networks: what counts for them is the same
    assert_close_rows(single, [r for r in rows if r["method"] == "DDU" and r["seed"] == 1])


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
        assert mean[0].argmax() == 0 or suffix
        accuracy = (mean.argmax(1) == labels.numpy()).mean()
        assert plain["accuracy" + suffix] == pytest.approx(accuracy)
        nll = -np.log(mean[np.arange(40), labels]).mean()
        assert plain["nll" + suffix] == pytest.approx(nll, rel=1e-9)
        total = {k: scipy.stats.entropy(p.mean(0), axis=1) for k, p in probs.items()}
        mutual = {k: total[k] - scipy.stats.entropy(p, axis=2).mean(0) for k, p in probs.items()}
        for name, score in (("predictive_entropy", total), ("mutual_information", mutual)):
            values = np.concatenate([score["test"], score["letters"]])
            expected = roc_auc_score(np.arange(100) >= 40, values)
            assert detection[f"auroc_{name}{suffix}"] == pytest.approx(expected, abs=1e-9)


def test_seven_and_more_sets_are_all_in_the_picture(tmp_path, monkeypatch):
    names = [f"set_{i}" for i in range(8)]
    scores = {n: {"density": torch.randn(50).double(), "entropy": torch.rand(50).double()}
              for n in (*names, "val")}
    figures = []
    monkeypatch.setattr(common, "save_figure", lambda plt, figure, path: figures.append(figure))
    sets = {"test": {"set_0": None}, "ood": dict.fromkeys(names[1:])}
    evaluated = ddu.Evaluated({}, scores, None, 1.0, -2.0)
    ddu.plot_uncertainty(common.pyplot(), tmp_path / "x.png", evaluated, sets, 0.35)
    texts = [t.get_text() for t in figures[0].axes[0].get_legend().get_texts()]
    assert texts == [n.replace("_", " ") for n in names]


def test_small_classes_are_named_once_and_what_memory_cannot_hold_is_refused(capsys, monkeypatch):
    args, (z, y) = options(), clusters((50, 19, 60), 10)
    ddu.fit(z, y, 3, args)
    [line] = capsys.readouterr().out.splitlines()[1:]  # after the options
    assert "class 1 has 19 examples for 10 features" in line and "--shrinkage" in line
    ddu.fit(z, y, 3, common.with_options(args, shrinkage=True))
    ddu.fit(*clusters((50, 20), 10), 2, args)
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match="class 3 has 0"):
        ddu.fit(z, y, 4, args)
    train = SimpleNamespace(labels=y, __len__=None)
    train = data.ImageSet("x", torch.zeros(129, 1, 1, 1), y, 3, (0.0,), (1.0,))
    monkeypatch.setattr(common, "device_memory", lambda _: 4 * 129 * 10)
    with pytest.raises(UserError, match="GB"):
        ddu.check_memory(train, 10, args)


def test_killed_and_restarted_equals_uninterrupted(small, tmp_path):
    options, calm = (with_options(small, batch_size=18, name=name) for name in ("run", "calm"))
    rows, folder = ddu.main(calm), run_of(options)
    child = Child(tmp_path, run_ddu, *options)
    wait_for(lambda: (folder / "seed1.pt").exists() or not child.process.is_alive(), what="epoch")
    time.sleep(0.05)  # into the next epoch
    child.process.kill()
    child.process.join()
    done = common.load_checkpoint(folder / "seed1.pt")["epoch"]
    assert child.status < 0 and 0 < done < 3, child.stderr
    assert ddu.main(options) == rows
    assert_same_checkpoints(folder / "seed1.pt", run_of(calm) / "seed1.pt")


def finish(children):
    for child in children:
        assert child.wait().status == 0 and "Traceback" not in child.stderr, child.stderr
    return children


@pytest.mark.parametrize("more", [
    "--model vgg16 --width 0.05 --no-sn -b 34 --priors",  # 7 images in the last batch
    "--model wide_resnet --no-mod --ensemble 2"])  # one image in the last batch, for one process
def test_two_processes_equal_one(small, tmp_path, more):
    """In float64, lest batch norm and leaky ReLU blow rounding up."""
    one, two = ([*with_options(small, name=name, epochs=1), *more.split()]
                for name in ("one", "two"))
    children = finish([Child(tmp_path, run_ddu_in_float64, *one, rank=9),
                       *start_ranks(tmp_path, 2, run_ddu_in_float64, *two)])
    assert "DDU" in children[1].stdout and children[2].stdout == ""  # one process prints
    a, b = (torch.load(run_of(o) / "seed1.pt", weights_only=True)["net"] for o in (one, two))
    worst = max((a[k].double() - b[k].double()).abs().max().item() for k in a)
    assert a.keys() == b.keys() and worst < 1e-10, worst
    a, b = (strict_json(run_of(o) / "results.json") for o in (one, two))
    assert [r["environment"]["processes"] for r in (a, b)] == [1, 2]
    assert_close_rows(a["rows"], b["rows"], 1e-4)


def test_two_processes_share_no_disk_and_predict_a_few_images(small, small_data, tmp_path):
    """Only the main process writes; a second start goes on from its checkpoint, on both."""
    def each(rank):
        return ["--out-dir", str(tmp_path / f"machine{rank}")]

    (tmp_path / "few").mkdir()
    for i in range(3):
        os.link(small_data / "odd" / f"{i}.png", tmp_path / "few" / f"{i}.png")
    finish(start_ranks(tmp_path, 2, run_ddu, *small, each=each))
    folder = tmp_path / "machine0" / "ddu" / "run"
    before = (folder / "seed1.pt").read_bytes()
    children = start_ranks(tmp_path, 2, run_ddu, *small, "--predict", f"folder:{tmp_path}/few",
                           each=each)
    finish(children)
    assert (folder / "seed1.pt").read_bytes() == before and "seed1 1/3" not in children[0].stdout
    assert len(read_csv(folder / "predictions.csv")) == 3
    assert not list((tmp_path / "machine1").rglob("*.pt"))


# ---- Own data -----------------------------------------------------------------------------------


def write_images(folder, count, tint, size=20):
    rng = np.random.default_rng(tint)
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 120, (size, size + i % 3, 3)) + tint
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


@pytest.fixture
def own(tmp_path):
    """(folder, options): three classes to train and to test on, and two sets of odd images."""
    for c, name in enumerate(("cat", "dog", "eel")):
        write_images(tmp_path / "pets" / "train" / name, 14, 60 * c)
        write_images(tmp_path / "pets" / "test" / name, 4 + c, 60 * c)
    write_images(tmp_path / "a" / "odd", 6, 100)
    write_images(tmp_path / "b" / "odd", 6, 130)
    return tmp_path, ["--dataset", f"folder:{tmp_path}/pets", "--model", "resnet18", "--width",
                      "0.05", "--epochs", "1", "-b", "16", "--image-size", "16", "--out-dir",
                      str(tmp_path / "runs"), "--data-dir", str(tmp_path / "none"), "--no-plot",
                      *CPU]


def test_own_folders_and_sets_that_are_not_there(own, capsys, monkeypatch):
    folder, options = own
    monkeypatch.setattr(data, "_torchvision", lambda name, *_: (_ for _ in ()).throw(
        data.Absent(f"{name}: not there")))  # and no attempt to download it
    rows = ddu.main(options)
    out = capsys.readouterr().out
    assert [out.count(f"left out: {name}") for name in ("svhn", "cifar100", "tiny_imagenet")] == \
        [1, 1, 1]
    assert [(r["set"], r["n"]) for r in rows] == [("pets", 15)]
    [run] = (folder / "runs" / "ddu").iterdir()
    assert run.name.startswith("folder_") or run.name.startswith("pets")
    assert str(folder).strip("/").replace("/", "_") not in run.name
    for name in ("tiny_imagenet", "svhn"):
        with pytest.raises(UserError, match=f"{name}: .*not there"):
            ddu.main([*options, "--ood", name])
    rows = ddu.main([*options, "--ood", f"folder:{folder}/a/odd", "--predict",
                     f"folder:{folder}/pets/test"])
    assert row_of(rows, set="pets", against="odd")["n"] == 15
    predictions = read_csv(run / "predictions.csv")
    assert [p["label"] for p in predictions] == [*"0" * 4, *"1" * 5, *"2" * 6]
    accuracy = np.mean([p["label"] == p["predicted"] for p in predictions])
    assert accuracy == pytest.approx(row_of(rows, set="pets")["accuracy"])
    assert ddu.main([*options, "--ood"])  # none


def test_sets_of_one_name_are_refused_before_training(own, monkeypatch):
    folder, options = own
    monkeypatch.setattr(ddu, "train", None)
    for name in ("test", "val", "pets"):
        write_images(folder / name, 2, 10) if name != "pets" else None
    for pair in ([f"folder:{folder}/a/odd", f"folder:{folder}/b/odd"], [f"folder:{folder}/test"],
                 [f"folder:{folder}/val"], [f"folder:{folder}/pets"]):
        with pytest.raises(UserError, match="called (odd|test|val|pets); rename"):
            ddu.main([*options, "--ood", *pair])


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
    threshold = np.quantile(scipy.special.logsumexp(
        scipy_log_densities(z[kept], y[kept], z[held_out]), 1), 0.01)
    for name, against in (("near", None), ("far", "far")):
        points = torch.tensor(np.load(tmp_path / f"{name}.npz")["features"])
        expected = scipy.special.logsumexp(scipy_log_densities(z[kept], y[kept], points), 1)
        scores = read_csv(run / f"scores_{name}.csv")
        assert np.allclose([float(s["density"]) for s in scores], expected, rtol=1e-9)
        assert [s["decision"] == "ood" for s in scores] == (expected < threshold).tolist()
        row = row_of(rows, set="near", against=against)
        assert row["density"] == pytest.approx(expected.mean())
        assert row["density_threshold"] == pytest.approx(threshold)
    assert row["auroc_density"] == 1 and row["fraction_ood"] == 1 and row["jitter"] == 0
    child = finish(start_ranks(tmp_path, 2, run_ddu, *features("near", "far"), "--name", "two"))
    assert "auroc_density" in child[0].stdout and child[1].stdout == ""
    assert strict_json(run.parent / "two" / "results.json")["rows"] == rows


def test_the_threshold_holds_on_fresh_data_even_with_few_examples_a_class(tmp_path, features):
    """By a quantile of the training densities 99 % of a fresh set were out of distribution."""
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(10, 64)) * 2
    for name, n in (("train", 900), ("near", 500), ("far", 100)):
        y = np.arange(n) % 10
        far = 4 if name == "far" else 0
        np.savez(tmp_path / f"{name}.npz", features=centres[y] + far + rng.normal(size=(n, 64)),
                 labels=y)
    auroc = []
    for more in ([], ["--shrinkage"]):
        rows = ddu.main([*features("near", "far"), *more, "--name", f"run{len(more)}"])
        assert row_of(rows, set="near")["fraction_ood"] < 0.1
        auroc.append(row_of(rows, against="far")["auroc_density"])
    assert auroc[1] >= auroc[0] > 0.8


BAD_FEATURES = [
    ({"labels": [0, 0, 0, 1] * 20 + [0] * 3 + [2]}, {}, "class 2 has"),
    ({"labels": [0, 0, 1, -1] * 21}, {}, "labels"), ({"labels": [0, 0, 1]}, {}, "labels"),
    ({"labels": [0.5, 0.5, 1.5, 1.5] * 21}, {}, "labels"), ({"labels": None}, {}, "labels"),
    ({"labels": [0, 1, 1, 10**12] * 21}, {}, "labels"),
    ({"features": [[math.nan, 1]] * 84}, {}, "NaN"), ({"features": [1.0] * 84}, {}, "features"),
    ({"features": [["a", "b"]] * 84}, {}, "numbers"), ({"features": np.zeros((0, 2))}, {}, "feat"),
    ({}, {"features": [[math.nan, 1]]}, "near.npz"), ({}, {"features": [[1, 2, 3]]}, "near.npz"),
    ({}, {"features": np.zeros((0, 2))}, "near.npz"), ({}, {"features": None}, "features"),
    (b"not an archive", {}, "train.npz"), ({}, b"", "near.npz")]


@pytest.mark.parametrize("train, near, named", BAD_FEATURES, ids=range(len(BAD_FEATURES)))
def test_bad_features(features, tmp_path, train, near, named):
    whole = {"train": {"features": np.random.randn(84, 2), "labels": [0, 0, 1, 1] * 21},
             "near": {"features": [[0.0, 1]]}}
    for name, change in (("train", train), ("near", near)):
        if isinstance(change, bytes):
            (tmp_path / f"{name}.npz").write_bytes(change)
        else:
            arrays = {k: v for k, v in {**whole[name], **change}.items() if v is not None}
            np.savez(tmp_path / f"{name}.npz", **(arrays or {"other": np.ones(2)}))
    with pytest.raises(UserError, match=named) as error:
        ddu.main(features("near"))
    assert "\n" not in str(error.value)


# ---- Two moons, active learning -----------------------------------------------------------------


def test_two_moons_is_a_run_like_any_other(tmp_path):
    options = ["--dataset", "two_moons", "--epochs", "1", "--out-dir", str(tmp_path), *CPU]
    rows = ddu.main([*options, "--runs", "2", "--ensemble", "2"])
    assert [(r["method"], r["seed"]) for r in rows[::2]] == [
        (m, s) for s in (1, 2) for m in ("DDU", "ensemble of 2")]
    own, far = rows[:2]
    assert own["accuracy"] > 0.7 and far["against"] == "background" and own["n"] == 2000
    assert far["auroc_density"] > 0.95 > far["auroc_entropy"]
    [folder] = (tmp_path / "ddu").iterdir()
    assert (folder / "two_moons.png").stat().st_size > 20_000
    none = ddu.main([*options, "--ood", "--eval", "--no-plot"])
    assert none == [{k: v for k, v in own.items()}]
    for wrong in (["--ood", "svhn"], ["--predict", "glyphs"]):
        with pytest.raises(UserError, match="two_moons"):
            ddu.main([*options, *wrong])


@pytest.fixture
def few(small_data, tmp_path):
    """few(*more): active learning on the small set: 8, 10 and 12 labels, one step an epoch."""
    return lambda *more: [
        "--dataset", "tiny_imagenet", "--data-dir", str(small_data), "--model", "resnet18",
        "--image-size", "32", "--width", "0.02", "--num-initial-samples", "8", "--max-training-samples", "12",
        "--acquisition-batch-size", "2", "--epochs", "1", "--limit-steps", "1", "--out-dir",
        str(tmp_path), "--name", "few", "--no-plot", *CPU, "--active-learning", *more]


def test_active_learning_resumes_and_does_not_reuse_other_options(few, tmp_path, monkeypatch):
    options = few("density", "random", "--runs", "2")
    rows = ddu.main(options)
    folder = tmp_path / "ddu" / "few"
    results = strict_json(folder / "results.json")
    assert results["labels"] == [8, 10, 12] and results["rows"] == rows
    for row in rows:
        curve = results["curves"][row["method"]][row["seed"] - 1]
        assert row["accuracy"] == curve[-1] and len(curve) == 3 and row["n"] == 20
    starts = {}
    for name in ("density", "random"):
        first, second = (torch.load(folder / f"{name}-run{r}.pt", weights_only=True)["labelled"]
                         for r in (0, 1))
        assert len(first.unique()) == len(second.unique()) == 12
        starts[name] = first[:8].tolist()
        assert torch.equal(first[:8], second[:8]) and not torch.equal(first, second)
    assert starts["density"] == starts["random"]  # drawn once for all
    path = folder / "density-run1.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "labelled": state["labelled"][:10], "accuracy": state["accuracy"][:1]},
               path)  # as if killed
    with pytest.raises(UserError, match="10 labels"):
        ddu.main([*options, "--eval"])
    assert ddu.main(options) == rows
    monkeypatch.setattr(ddu, "train", None)
    assert ddu.main([*options, "--eval"]) == rows
    for other in (["--opt", "sgd"], ["--power-iterations", "2"], ["--weight-decay", "0"]):
        with pytest.raises(UserError, match="other options"):
            ddu.main([*options, *other])


def test_active_learning_by_two_processes_equals_one(few, tmp_path):
    rows = ddu.main([*few("density", "mi", "random", "--num-ensemble", "2", "--opt", "sgd"),
                     "--dropout", "0.3"])
    finish(start_ranks(tmp_path, 2, run_ddu, *few(
        "density", "mi", "random", "--num-ensemble", "2", "--opt", "sgd"), "--dropout", "0.3",
        "--name", "two"))
    assert strict_json(tmp_path / "ddu" / "two" / "results.json")["rows"] == rows


def test_active_learning_takes_low_densities_and_high_uncertainties(few, monkeypatch):
    seen, step = [], ddu.acquisition_step

    def note(pool, test, labelled, acquisition, *rest):
        accuracy, score = step(pool, test, labelled, acquisition, *rest)
        seen.append((acquisition, labelled, score.clone()))
        return accuracy, score

    monkeypatch.setattr(ddu, "acquisition_step", note)
    names = ["density", "entropy", "pe", "mi"]
    ddu.main([*few(*names, "--num-ensemble", "2"), "--max-training-samples", "10"])
    scores = {}
    for (name, before, score), (other, after, _) in zip(seen, seen[1:]):
        assert score.isfinite().all() and len(score) == 121
        scores.setdefault(name, score)
        if name == other and len(after) > len(before):
            rest = score.clone()
            rest[before] = -math.inf
            assert after[len(before):].sort().values.tolist() == \
                rest.topk(2).indices.sort().values.tolist()
    assert list(scores) == names and scores["density"].unique().numel() > 100  # no ties
    for name in names[1:]:
        assert -1e-6 <= scores[name].min() and scores[name].max() <= math.log(4) + 1e-6


def test_a_story_of_active_learning_on_the_ambiguous_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(ddu, "train", lambda net, *_: net)  # the protocol, without training
    options = ["--dataset", "glyphs", "--model", "lenet", "--active-learning", "random",
               "-ambiguous", "--subsample", "50", "--out-dir", str(tmp_path), *CPU]
    for most, sizes in (("20", [20]), ("31", [20, 25, 30, 31])):  # 20: nothing to acquire
        rows = ddu.main([*options, "--max-training-samples", most, "--name", f"to{most}"])
        results = strict_json(tmp_path / "ddu" / f"to{most}" / "results.json")
        assert results["labels"] == sizes and len(results["curves"]["random"][0]) == len(sizes)
    args = ddu.parse_args(options)
    pool, test, start, odd = ddu.active_learning_pool(args)
    assert len(pool) == 950 and odd.sum() == 900 and test.name == "glyphs"
    assert torch.bincount(pool.labels[start]).tolist() == [2] * 10
    labelled = torch.load(tmp_path / "ddu" / "to31" / "random-run0.pt", weights_only=True)
    assert torch.equal(labelled["labelled"][:20], start)
    assert rows[0]["ambiguous_share"] == pytest.approx(
        odd[labelled["labelled"]].double().mean().item())
    assert (tmp_path / "ddu" / "to31" / "ambiguous_share.png").exists()


@pytest.mark.parametrize("labels", [23, 6000])
def test_each_labelled_example_is_drawn_nearly_equally_often(monkeypatch, labels):
    seen = []
    images = torch.arange(7000.0).view(-1, 1, 1, 1)
    pool = data.ImageSet("x", images, torch.arange(7000) % 2, 2, (0.0,), (1.0,))
    monkeypatch.setattr(ddu, "make_network", lambda *_: None)
    monkeypatch.setattr(ddu, "train", lambda net, dataset, *_: seen.append(dataset))
    monkeypatch.setattr(ddu, "forward", lambda net, dataset, args: ddu.Outputs(
        torch.zeros(len(dataset), 2), None, dataset.labels))
    ddu.acquisition_step(pool, pool, torch.arange(labels) + 500, "random", (1, 0, labels),
                         options(), None)
    counts = seen[0].images.flatten().long().bincount(minlength=7000)
    assert counts.sum() == max(5056, labels) and not counts[:500].any()
    assert counts[500:500 + labels].min() >= 1
    assert counts[500:500 + labels].max() - counts[500:500 + labels].min() <= 1


# ---- Bad input ----------------------------------------------------------------------------------

GLYPHS = "--dataset glyphs --epochs 1 --limit-steps 1"
FAST = f"{GLYPHS} --model lenet --no-sn"
AL = f"{FAST} --active-learning random"
MISUSE = {
    "--dataset nonsense": "nonsense", f"{FAST} --ood nonsense": "nonsense",
    f"{FAST} --ood folder:nowhere": "nowhere", "--dataset imagenet_o": "imagenet_o",
    f"{FAST} --ood glyphs_letters glyphs_letters": "called glyphs_letters",
    f"{FAST} --ood glyphs": "called glyphs", "--model nonsense": "nonsense",
    f"{GLYPHS} --model lenet -sn": "lenet", f"{GLYPHS} --model lenet --no-sn -mod": "lenet",
    f"{GLYPHS} --model torchvision/nonsense": "torchvision/nonsense",
    f"{GLYPHS} --model fc_resnet": "fc_resnet", "--dataset two_moons --model resnet18": "two_moons",
    f"{GLYPHS} --model wide_resnet --depth 11": "depth 11", "--depth -4": "depth",
    "--jitter foo": "jitter", "--jitter -1": "jitter", "--jitter nan": "jitter",
    "--dropout 1": "dropout", "--coeff 0": "coeff", "--coeff nan": "coeff",
    "--momentum -1": "momentum", "--weight-decay -1": "weight-decay", "--noise -1": "noise",
    "--density-quantile 1.5": "density-quantile", "--ensemble 0": "ensemble",
    "--power-iterations 0": "power-iterations", "--features x.npz": "--score",
    "--score x.npz": "--features", "--features x.npz --score y.npz": "x.npz",
    "--features x.npz --score a/y.npz b/y.npz": "x.npz", f"{FAST} --eval": "train first",
    f"{FAST} --predict nonsense --name p": "nonsense",
    f"{AL} --num-initial-samples 25": "num-initial-samples 25",
    f"{AL} --num-initial-samples 10": "num-initial-samples 10",
    f"{AL} --num-initial-samples 0": "num-initial-samples",
    f"{AL} --max-training-samples 10": "max-training-samples 10",
    f"{AL} --acquisition-batch-size 0": "acquisition-batch-size",
    f"{AL} --max-training-samples 9001": "9001", "--active-learning nonsense": "nonsense",
    "--active-learning random --dataset numbers --ambiguous": "ambiguous",
    "--device tpu": "tpu", "--name ../../x": "--name", "--width 1000000": "width",
    "--dataset numbers --model lenet --no-sn --no-mod --width 0": "width",
    "--dataset tiny_imagenet --model lenet --no-sn --no-mod": "28x28|tiny"}


@pytest.mark.parametrize("line", MISUSE)
def test_a_story_of_misuse_is_one_line_before_any_work(line, small_data, tmp_path, monkeypatch):
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    device = [] if "--device" in line else CPU
    with pytest.raises(UserError, match=MISUSE[line]) as error:
        ddu.main([*line.split(), "--out-dir", str(tmp_path / "runs"), "--no-plot", "--data-dir",
                  str(small_data), *device])
    assert "\n" not in str(error.value)


def test_misuse_as_a_program_leaves_everything_as_it_was(refused, small, tmp_path):
    ddu.main(with_options(small, epochs=1))
    err = refused(*with_options(small, epochs=2, lr=0.2), "--no-mod")
    assert "epochs 1 there, 2 now" in err and "lr 0.05 there" in err and "mod True there" in err
    (tmp_path / "file").write_text("kept")
    assert "cannot write" in refused(*with_options(small, out_dir=tmp_path / "file"))
    assert "nowhere" in refused(*with_options(small, data_dir=tmp_path / "nowhere"))
    assert "called odd" in refused(*small, "--ood", *[small[small.index("--ood") + 1]] * 2)


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(small):
    with pytest.raises(UserError, match="--lr"):
        ddu.main(with_options(small, lr=1e12, epochs=6, limit_steps=1))
    path = run_of(small) / "seed1.pt"
    if path.exists():
        assert common.all_finite(common.load_checkpoint(path))


@pytest.mark.parametrize("more", [
    "--model resnet50 --width 0.02 --amp bf16", "--model vgg16 --width 0.05 --no-sn --shrinkage",
    "--model resnet18 --width 0.05 --opt adam --lr 0.001 --priors --no-augment",
    "--model resnet50 --width 0.03 --no-mod --no-sn -b 54"])  # narrow strided 1x1 convolutions
def test_other_networks_and_options(small, more):
    rows = ddu.main([*small, *more.split(), "--epochs", "1", "--limit-steps", "2"])
    assert 0 <= row_of(rows, against="odd")["auroc_density"] <= 1
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    state = torch.load(run_of(small) / "seed1.pt", weights_only=True)["net"]
    assert all(v.dtype in (torch.float32, torch.int64) for v in state.values())


def test_a_pretrained_network_on_streamed_images(tmp_path):
    import torchvision
    for c, name in enumerate(("n01", "n02", "n03")):
        write_images(tmp_path / "imagenet" / "train" / name, 8, 60 * c, size=70)
        write_images(tmp_path / "imagenet" / "val" / name, 4, 60 * c, size=70)
    write_images(tmp_path / "odd", 5, 20, size=70)
    net = torchvision.models.resnet18(num_classes=3)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    options = ["--dataset", "imagenet", "--data-dir", str(tmp_path), "--model",
               "torchvision/resnet18", "--weights", str(tmp_path / "net.pt"), "--image-size", "72",
               "-b", "8", "--workers", "0", "--out-dir", str(tmp_path / "runs"), "--no-plot", *CPU]
    rows = ddu.main([*options, "--ood", f"folder:{tmp_path}/odd", "--eval"])  # nothing to train
    assert row_of(rows, set="imagenet")["n"] == 12 and row_of(rows, against="odd")


def test_real_data(real_data, tmp_path):
    rows = ddu.main(["--dataset", "fashion_mnist", "--data-dir", str(real_data), "--epochs", "1",
                     "--model", "lenet", "--no-sn", "--schedule", "one_cycle", "--out-dir",
                     str(tmp_path), "--no-plot", "-b", "16", *CPU])
    assert row_of(rows, set="fashion_mnist")["accuracy"] > 0.4
    assert row_of(rows, against="mnist")["auroc_density"] > 0.7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(small):
    small = with_options(small, device="cuda")
    assert_close_rows(ddu.main(small), ddu.main([*small, "--eval"]), 1e-3)
