"""ddu.py against independent oracles: operators as dense matrices, networks written out a second
time, Gaussians by NumPy, SciPy, scikit-learn and 50-digit arithmetic, file layouts by hand."""

import argparse
import copy
import io
import json
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import common
import data
import ddu

ROOT = Path(__file__).parents[1]
DETECTION = ("auroc", "aupr_in", "aupr_out", "fpr95")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_the_tested_file_is_this_repositorys():
    assert Path(ddu.__file__).resolve() == ROOT.resolve() / "ddu.py"


def options(**changes):
    """The resolved options of --dataset cifar10, with `changes`."""
    return argparse.Namespace(**{**vars(ddu.parse_args(["--dataset", "cifar10"])), **changes})


def build(model, num_classes=10, shape=(3, 32, 32), device="cpu", seed=0, **changes):
    torch.manual_seed(seed)
    with torch.device(device):
        return ddu.make_network(options(model=model, **changes), num_classes, shape)


def parameter_count(net):
    return sum(p.numel() for p in net.parameters())


def spectral_layers(net):
    return [m for m in net.modules() if isinstance(m, ddu.SoftSpectral)]


# ---- Arguments ----------------------------------------------------------------------------------


def test_cifar10_alone_is_the_papers_recipe():
    args = ddu.parse_args(["--dataset", "cifar10"])
    recipe = dict(model="wide_resnet", depth=28, width=1.0, dropout=0.3, sn=True, mod=True,
                  coeff=3.0, power_iterations=1, opt="sgd", lr=0.1, momentum=0.9, nesterov=False,
                  weight_decay=5e-4, batch_size=128, epochs=350, schedule="step",
                  first_milestone=150, second_milestone=250, augment=True, noise=0.0,
                  priors="none", jitter="auto", ensemble=1, runs=1, amp="off")
    assert {k: getattr(args, k) for k in recipe} == recipe
    assert args.ood[0] == "svhn"


def test_published_flags_are_accepted():
    args = ddu.parse_args("--seed 5 --dataset cifar100 --model resnet50 -sn -mod --coeff 2 "
                          "--mom 0.8 --decay 1e-4 -b 64 --lr 0.05 --opt sgd --nesterov "
                          "--first-milestone 10 --second-milestone 20 --ood_dataset svhn "
                          "--runs 5 --ensemble 5".split())
    given = dict(seed=5, dataset="cifar100", model="resnet50", sn=True, mod=True, coeff=2.0,
                 momentum=0.8, weight_decay=1e-4, batch_size=64, lr=0.05, opt="sgd", nesterov=True,
                 first_milestone=10, second_milestone=20, ood=["svhn"], runs=5, ensemble=5)
    assert {k: getattr(args, k) for k in given} == given


def test_switches_can_be_turned_off_and_explicit_values_win_over_presets():
    args = ddu.parse_args("--dataset cifar10 --no-sn --no-mod --no-augment --epochs 35".split())
    assert (args.sn, args.mod, args.augment) == (False, False, False)
    assert (args.first_milestone, args.second_milestone) == (15, 25)  # 150 and 250 of 350, scaled
    moons = ddu.parse_args(["--dataset", "two_moons"])
    assert (moons.model, moons.coeff, moons.power_iterations) == ("fc_resnet", 0.65, 5)
    assert (moons.opt, moons.lr, moons.epochs, moons.batch_size) == ("adam", 1e-3, 150, 64)
    assert ddu.parse_args(["--dataset", "svhn"]).augment is False  # published: CIFAR only


@pytest.mark.parametrize("line", [
    "--jitter -1", "--jitter nan", "--jitter inf", "--jitter some", "--runs 0", "--ensemble 0",
    "--dropout 1", "--coeff 0", "--coeff -3", "--density-quantile 2", "--weight-decay -1",
    "--noise -0.1", "--features train.npz", "--score test.npz", "--model lenet -sn",
    "--model lenet --no-sn -mod", "--power-iterations 0", "--dataset cifar10 --depth 27",
    "--dataset cifar10 --depth 4"])
def test_options_that_cannot_work_are_refused(line):
    with pytest.raises(common.UserError) as caught:
        ddu.parse_args(line.split())
    assert "\n" not in str(caught.value)


def test_networks_that_do_not_exist_or_do_not_fit_are_refused():
    with pytest.raises(common.UserError, match="resnet19"):
        build("resnet19")
    with pytest.raises(common.UserError, match="28x28"):
        build("lenet", sn=False, mod=False)


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


def spectral_conv(size, stride=1, kernel=3, coeff=1.0, iterations=1, c_in=4, c_out=5, seed=0):
    torch.manual_seed(seed)
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
    return ddu.spectral_normalise(conv, (c_in, size, size), coeff, iterations).double()


def shrinkage(layer):
    """W_eff / W of the next forward, one number."""
    ratio = (layer.effective_weight() / layer.weight).detach().flatten()
    assert (ratio - ratio[0]).abs().max() < 1e-6
    return ratio[0].item()


GEOMETRIES = [(8, 1), (7, 1), (8, 2), (7, 2)]


@pytest.mark.parametrize("size, stride", GEOMETRIES)
def test_sigma_rises_to_the_norm_of_the_true_operator(size, stride):
    conv = spectral_conv(size, stride, coeff=1e-3)
    exact = np.linalg.norm(dense_operator(conv.weight, size, stride), 2)
    sigmas = [1e-3 * (1 / shrinkage(conv) - 1e-5) for _ in range(50)]
    assert np.all(np.diff(sigmas) >= -1e-9 * exact)
    assert exact * (1 - 2e-3) <= sigmas[-1] <= exact * (1 + 1e-9)
    reshaped = np.linalg.norm(conv.weight.detach().flatten(1).numpy(), 2)
    assert abs(sigmas[-1] / reshaped - 1) > 0.05  # what torch's spectral_norm would have found
    effective = dense_operator(conv.eval().effective_weight(), size, stride)
    assert 1e-3 * (1 - 1.1e-5) <= np.linalg.norm(effective, 2) <= 1e-3 * (1 + 2e-3)


@pytest.mark.parametrize("size, stride", GEOMETRIES)
@pytest.mark.parametrize("iterations", [1, 3])
def test_training_forward_iterates_v_then_u_from_the_given_start(size, stride, iterations):
    conv = spectral_conv(size, stride, coeff=0.1, iterations=iterations).float()
    a = dense_operator(conv.weight, size, stride)
    u = start = conv.u.double().flatten().numpy()
    x = torch.randn(2, 4, size, size)
    y = conv(x)
    for _ in range(iterations):
        v = unit(a.T @ u)
        u = unit(a @ v)
    assert np.allclose(conv.v.flatten(), v, atol=1e-5)
    assert np.allclose(conv.u.flatten(), u, atol=1e-5)
    assert not np.allclose(unit(a @ unit(a.T @ unit(a @ v))), u, atol=1e-4)  # one more would show
    assert abs(conv.u.flatten().numpy() @ start) < 0.999
    expected = (u @ a @ v) / 0.1 + 1e-5
    assert shrinkage(conv.eval()) == pytest.approx(1 / expected, rel=1e-5)
    assert np.allclose(y.detach().flatten(1), x.flatten(1).numpy() @ (a / expected).T, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_convolution_is_a_matrix_at_any_stride(stride):
    conv = spectral_conv(8, stride, kernel=1, coeff=0.3)
    w = conv.weight.detach().flatten(1).numpy()
    assert conv.u.numel() == 5 and conv.v.numel() == 4
    u = conv.u.flatten().numpy()
    v = unit(w.T @ u)
    u = unit(w @ v)
    conv(torch.randn(1, 4, 8, 8, dtype=torch.float64))
    assert np.allclose(conv.v.flatten(), v, atol=1e-12)
    assert np.allclose(conv.u.flatten(), u, atol=1e-12)
    assert shrinkage(conv.eval()) == pytest.approx(0.3 / (u @ w @ v), rel=1e-12)


def test_active_pointwise_layers_reach_the_coefficient_exactly():
    conv = spectral_conv(8, kernel=1, coeff=3.0)
    linear = ddu.SpectralLinear(6, 4, 3.0, 1).double()
    for layer in (conv, linear):
        with torch.no_grad():
            layer.weight.mul_(50)
        for _ in range(300):
            effective = layer.effective_weight().detach().flatten(1).numpy()
        assert np.linalg.norm(effective, 2) == pytest.approx(3.0, rel=1e-9)


def test_inactive_layers_shrink_by_a_hundred_thousandth_or_not_at_all():
    for conv in (spectral_conv(8, coeff=1000.0), spectral_conv(7, 2, coeff=1000.0)):
        assert shrinkage(conv) == pytest.approx(0.99999, abs=1e-7)
    for layer in (spectral_conv(8, kernel=1, coeff=1000.0), ddu.SpectralLinear(6, 4, 1000.0, 1)):
        assert torch.equal(layer.effective_weight(), layer.weight)


@pytest.mark.parametrize("kernel", [1, 3])
def test_weights_are_never_inflated(kernel):
    factors = []
    for scale in (1e-6, 1e-3, 0.1, 0.5, 1.0, 2.0, 100.0):
        conv = spectral_conv(8, kernel=kernel, coeff=1.0)
        with torch.no_grad():
            conv.weight.mul_(scale)
        for _ in range(5):
            factors.append(shrinkage(conv))
    assert max(factors) <= 1 and min(factors) < 0.1
    assert max(factors) == pytest.approx(1 if kernel == 1 else 0.99999, abs=1e-7)


def test_a_zero_weight_stays_finite():
    conv = spectral_conv(8)
    nn.init.zeros_(conv.weight)
    assert not conv(torch.ones(1, 4, 8, 8, dtype=torch.float64)).any()
    assert torch.isfinite(conv.u).all() and torch.isfinite(conv.v).all()


def test_a_large_coefficient_gives_the_plain_net_up_to_the_added_1e5():
    spectral = build("wide_resnet", depth=10, width=0.1, mod=False, coeff=1000.0).double().eval()
    plain = build("wide_resnet", depth=10, width=0.1, mod=False, sn=False).double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    plain.load_state_dict({k: v for k, v in spectral.state_dict().items()
                           if not k.endswith((".u", ".v"))})
    gap = (spectral(x)[0] - plain(x)[0]).abs().max()
    assert 0 < gap < 1e-3
    with torch.no_grad():
        for m in plain.modules():
            if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3):
                m.weight.div_(1 + 1e-5)
    assert torch.allclose(spectral(x)[0], plain(x)[0], rtol=1e-10, atol=1e-10)


LAYERS = {"3x3": lambda c: spectral_conv(5, coeff=c),
          "stride 2": lambda c: spectral_conv(5, 2, coeff=c),
          "1x1": lambda c: spectral_conv(5, kernel=1, coeff=c),
          "linear": lambda c: ddu.SpectralLinear(4, 5, c, 1).double()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("active", [True, False])
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(kind, active):
    torch.manual_seed(1)
    layer = LAYERS[kind](0.1 if active else 1000.0)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64) if kind != "linear" else \
        torch.randn(3, 4, dtype=torch.float64)
    layer(x)
    loss = layer(x).square().sum()
    loss.backward()  # of a training forward
    gradient, flat = layer.weight.grad.flatten(), layer.weight.data.view(-1)
    layer.eval()  # from here on u and v are those of that forward
    numeric = torch.zeros_like(gradient)
    with torch.no_grad():
        for i in range(len(flat)):
            for sign in (1, -1):
                flat[i] += sign * 1e-5
                numeric[i] += sign * layer(x).square().sum() / 2e-5
                flat[i] -= sign * 1e-5
    assert torch.allclose(gradient, numeric, rtol=1e-6, atol=1e-6 * numeric.abs().max().item())
    constant = (layer.effective_weight() / layer.weight).detach()
    weight = layer.weight.detach().clone().requires_grad_()
    y = F.linear(x, weight * constant, layer.bias) if kind == "linear" else \
        F.conv2d(x, weight * constant, None, layer.stride, layer.padding)
    y.square().sum().backward()
    difference = (weight.grad.flatten() - gradient).norm() / gradient.norm()
    assert difference > 0.2 if active else difference < 1e-12


def test_two_forwards_may_precede_a_backward():
    conv = spectral_conv(8, coeff=0.1)
    images, gradients = torch.randn(2, 1, 4, 8, 8, dtype=torch.float64), []
    twin = copy.deepcopy(conv)
    for x in images:
        gradients.append(torch.autograd.grad(twin(x).square().sum(), twin.weight)[0])
    sum(conv(x).square().sum() for x in images).backward()
    assert torch.allclose(conv.weight.grad, sum(gradients), rtol=1e-12)


def test_evaluation_leaves_the_iteration_alone_and_training_moves_it():
    net = build("wide_resnet", depth=10, width=0.1, coeff=0.8)
    x = torch.randn(2, 3, 32, 32)
    net(x)
    buffers = lambda: [b.clone() for m in spectral_layers(net) for b in (m.u, m.v)]
    before = buffers()
    net.eval()
    first, second = net(x), net(x)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(map(torch.equal, before, buffers()))
    net.train()(x)
    assert not any(map(torch.equal, before, buffers()))
    assert all(b.norm().item() == pytest.approx(1, abs=1e-5) for b in buffers())


def test_operator_shapes_follow_the_layers_input_size():
    even, odd = spectral_conv(8, 2), spectral_conv(7, 2)
    assert even.v.numel() == 4 * 8 * 8 and even.u.numel() == 5 * 4 * 4
    assert odd.v.numel() == 4 * 7 * 7 == 196 and odd.u.numel() == 5 * 4 * 4
    net = build("resnet18", shape=(1, 28, 28), width=1 / 16, mod=False)
    sides = {m.v.shape[-1] for m in spectral_layers(net) if m.kernel_size == (3, 3)}
    assert sides == {28, 14, 7, 4}
    assert net.training


def test_iteration_and_sigma_keep_float32_under_autocast():
    conv = spectral_conv(8, coeff=0.1).float()
    other, x = copy.deepcopy(conv), torch.randn(1, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        effective, y = conv.effective_weight(), conv.eval()(x)
    assert y.dtype == torch.bfloat16 and effective.dtype == torch.float32
    assert torch.equal(effective, other.effective_weight())
    assert torch.equal(conv.u, other.u) and torch.equal(conv.v, other.v)


def test_norms_at_initialisation_of_full_width_layers_are_the_measured_ones():
    net = build("wide_resnet", depth=10)  # the layers of WRN-28-10, a block a stage
    sigmas = {}
    for name, m in net.named_modules():
        if isinstance(m, ddu.SoftSpectral):
            with torch.no_grad():
                for _ in range(6):
                    m.effective_weight()
                assert shrinkage(m.eval()) == pytest.approx(0.99999, abs=1e-7)  # 3 clips none
            sigmas[name] = (m.u * F.conv2d(m.v, m.weight, None, m.stride, m.padding)).sum().item()
    assert sigmas.pop("stem") == pytest.approx(1.78, abs=0.08)
    for name, sigma in sigmas.items():
        assert sigma == pytest.approx(1.73 if name.endswith("conv1") else 2.625, abs=0.08), name
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(2 / 10), rel=0.05)
    assert not net.head.bias.any()
    second = net.blocks[0].conv2.weight
    assert second.std().item() == pytest.approx(math.sqrt(2 / (9 * 160)), rel=0.01)


# ---- Networks -----------------------------------------------------------------------------------

# input channels, side, classes; parameters without and with -mod; feature dimension
SIZES = [("lenet", 1, 28, 10, 44_426, None, 84),
         ("resnet18", 3, 32, 10, 11_173_962, 11_000_138, 512),
         ("resnet18", 3, 32, 100, 11_220_132, 11_046_308, 512),
         ("resnet18", 1, 28, 10, 11_172_810, 10_998_986, 512),
         ("resnet50", 3, 32, 10, 23_520_842, 20_744_266, 2048),
         ("resnet50", 3, 32, 100, 23_705_252, 20_928_676, 2048),
         ("resnet50", 1, 28, 10, 23_519_690, 20_743_114, 2048),
         ("wide_resnet", 3, 32, 10, 36_479_194, 36_220_634, 640),
         ("wide_resnet", 3, 32, 100, 36_536_884, 36_278_324, 640),
         ("vgg16", 3, 32, 10, 14_724_042, 14_724_042, 512),
         ("vgg16", 3, 32, 100, 14_770_212, 14_770_212, 512),
         ("vgg16", 1, 28, 10, 14_722_890, 14_722_890, 512)]


@pytest.mark.parametrize("model, channels, side, classes, off, on, dim", SIZES)
def test_parameter_counts_and_feature_dimensions(model, channels, side, classes, off, on, dim):
    for mod, expected in ((False, off), (True, on)):
        if expected:
            net = build(model, classes, (channels, side, side), "meta", sn=False, mod=mod)
            assert parameter_count(net) == expected
            logits, feature = net(torch.empty(2, channels, side, side, device="meta"))
            assert logits.shape == (2, classes) and feature.shape == (2, dim)


# per network: spectral layers without -mod (of which 1x1), with -mod, batch norms without and with
COUNTS = [("wide_resnet", 28, 3, 25, 0, 25, 25), ("resnet18", 20, 3, 17, 0, 20, 17),
          ("resnet50", 53, 36, 49, 32, 53, 49), ("vgg16", 13, 0, 13, 0, 13, 13)]


@pytest.mark.parametrize("model, off, pointwise_off, on, pointwise_on, bn_off, bn_on", COUNTS)
def test_every_convolution_and_nothing_else_is_spectral(
        model, off, pointwise_off, on, pointwise_on, bn_off, bn_on):
    for mod, layers, pointwise, norms in ((False, off, pointwise_off, bn_off),
                                          (True, on, pointwise_on, bn_on)):
        net, plain = (build(model, device="meta", sn=sn, mod=mod) for sn in (True, False))
        spectral = spectral_layers(net)
        assert len(spectral) == layers == sum(isinstance(m, nn.Conv2d) for m in net.modules())
        assert sum(m.kernel_size == (1, 1) for m in spectral) == pointwise
        assert sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) == norms
        assert type(net.head) is nn.Linear and not spectral_layers(plain)
        assert parameter_count(net) == parameter_count(plain)
    if model == "wide_resnet":  # published: 4,582,425, of which 25 are the logged sigmas
        assert sum(m.u.numel() + m.v.numel() for m in spectral) == 4_582_425 - 25


def test_pool_shortcut_averages_even_maps_and_subsamples_odd_ones():
    x = torch.randn(2, 3, 7, 7)
    assert torch.equal(ddu.PoolShortcut(2, 0)(x), x[:, :, ::2, ::2])
    assert torch.equal(ddu.PoolShortcut(1, 0)(x), x)
    even = x[..., :6, :6]
    y = ddu.PoolShortcut(2, 5)(even)
    assert y.shape == (2, 8, 3, 3) and not y[:, 3:].any()
    assert torch.allclose(y[:, :3], even.reshape(2, 3, 3, 2, 3, 2).mean((3, 5)))


def test_dropout_of_wide_resnet_lies_between_the_convolutions():
    net = build("wide_resnet", depth=16, width=0.1, sn=False)
    assert [m.p for m in net.modules() if isinstance(m, nn.Dropout)] == [0.3] * 6
    block, x = net.blocks[1], torch.randn(2, 16, 8, 8)
    for norm in (block.norm1, block.norm2):
        norm.eval()
    torch.manual_seed(5)
    y = block(x)
    torch.manual_seed(5)
    h = F.dropout(block.act(block.norm2(block.conv1(block.act(block.norm1(x))))), 0.3)
    assert torch.allclose(y, block.conv2(h) + x, atol=1e-6)


def test_momenta_and_slope_and_initialisation():
    wide, other = (build(m, width=0.1, device="meta") for m in ("wide_resnet", "resnet18"))
    for net, momentum in ((wide, 0.01), (other, 0.1)):
        norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        assert {(m.momentum, m.eps) for m in norms} == {(momentum, 1e-5)}
        slopes = {m.negative_slope for m in net.modules() if isinstance(m, nn.LeakyReLU)}
        assert slopes == {0.01} and not any(isinstance(m, nn.ReLU) for m in net.modules())
    assert all(m.bias is None for m in wide.modules() if isinstance(m, nn.Conv2d))
    head = build("wide_resnet", 100, depth=10, width=0.5, sn=False).head.weight
    assert head.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.02)


# The networks once more, as plain functional calls on a state dict `p`.


def reference_conv(p, name, x, coeff, stride=1):
    w = p[name + ".weight"]
    k = w.shape[-1]
    if name + ".u" in p:
        u, v = p[name + ".u"].flatten(), p[name + ".v"]
        image = (w.flatten(1) @ F.unfold(v, k, padding=k // 2, stride=1 if k == 1 else stride)[0])
        w = w / (max(1, (u @ image.flatten()).item() / coeff) + (1e-5 if k > 1 else 0))
    return F.conv2d(x, w, stride=stride, padding=k // 2)


def reference_norm(p, name, x):
    mean, var, weight, bias = (p[f"{name}.{k}"][:, None, None]
                               for k in ("running_mean", "running_var", "weight", "bias"))
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def reference_act(x, mod):
    return torch.where(x > 0, x, (0.01 if mod else 0.0) * x)


def reference_pool(x, stride, channels):
    b, c, side, _ = x.shape
    half = side // 2
    if stride == 2:
        x = x[:, :, ::2, ::2] if side % 2 else x.reshape(b, c, half, 2, half, 2).mean((3, 5))
    return torch.cat([x, x.new_zeros(b, channels - c, *x.shape[2:])], 1)


def reference_shortcut(p, name, x, channels, stride, mod, coeff):
    if mod:
        return reference_pool(x, stride, channels)
    names = {w.ndim: k.removesuffix(".weight") for k, w in p.items()
             if k.startswith(name) and k.endswith(".weight")}
    x = reference_conv(p, names[4], x, coeff, stride)
    return reference_norm(p, names[1], x) if 1 in names else x


def reference_head(p, feature):
    return feature @ p["head.weight"].T + p["head.bias"], feature


def reference_wide_resnet(p, x, per_stage, mod, coeff):
    x = reference_conv(p, "stem", x, coeff)
    for i in range(3 * per_stage):
        name, stride = f"blocks.{i}", 2 if i in (per_stage, 2 * per_stage) else 1
        h = reference_act(reference_norm(p, name + ".norm1", x), mod)
        h = reference_conv(p, name + ".conv1", h, coeff, stride)
        h = reference_act(reference_norm(p, name + ".norm2", h), mod)
        h = reference_conv(p, name + ".conv2", h, coeff)
        if stride == 2 or h.shape[1] != x.shape[1]:
            x = reference_shortcut(p, name + ".shortcut", x, h.shape[1], stride, mod, coeff)
        x = h + x
    return reference_head(p, reference_act(reference_norm(p, "norm", x), mod).mean((2, 3)))


def reference_resnet(p, x, per_stage, strides, mod, coeff):
    """`strides`: of the block's convolutions where the stage halves the map."""
    x = reference_act(reference_norm(p, "norm", reference_conv(p, "stem", x, coeff)), mod)
    halving = np.cumsum(per_stage)[:-1]
    for i in range(sum(per_stage)):
        h, name = x, f"blocks.{i}"
        for j, s in enumerate(strides if i in halving else [1] * len(strides)):
            h = reference_act(h, mod) if j else h
            h = reference_conv(p, f"{name}.convs.{j}", h, coeff, s)
            h = reference_norm(p, f"{name}.norms.{j}", h)
        stride = 2 if i in halving else 1
        if stride == 2 or h.shape[1] != x.shape[1]:
            x = reference_shortcut(p, name + ".shortcut", x, h.shape[1], stride, mod, coeff)
        x = reference_act(h + x, mod)
    return reference_head(p, x.mean((2, 3)))


def reference_vgg(p, x, layout, mod, coeff):
    """`layout`: a string, C for convolution, batch norm and activation, M for a max pool."""
    i = 0
    for letter in layout:
        if letter == "C":
            x = reference_conv(p, f"layers.{i}", x, coeff)
            x = reference_act(reference_norm(p, f"layers.{i + 1}", x), mod)
        else:
            x = F.max_pool2d(x, 2)
        i += 3 if letter == "C" else 1
    assert x.shape[2:] == (1, 1)
    return reference_head(p, x.flatten(1))


REFERENCES = {
    "wrn-10": ("wide_resnet", dict(depth=10, width=0.1), (3, 32, 32), reference_wide_resnet, 1),
    "wrn-10, wider stage 1": ("wide_resnet", dict(depth=10, width=0.125), (3, 32, 32),
                              reference_wide_resnet, 1),
    "wrn-16, odd map": ("wide_resnet", dict(depth=16, width=0.1), (1, 14, 14),
                        reference_wide_resnet, 2),
    "resnet18": ("resnet18", dict(width=1 / 16), (3, 32, 32), reference_resnet,
                 (2, 2, 2, 2), (2, 1)),
    "resnet18, grey": ("resnet18", dict(width=1 / 16), (1, 28, 28), reference_resnet,
                       (2, 2, 2, 2), (2, 1)),
    "resnet50, grey": ("resnet50", dict(width=1 / 32), (1, 28, 28), reference_resnet,
                       (3, 4, 6, 3), (1, 2, 1)),
    "vgg16": ("vgg16", dict(width=1 / 16), (3, 32, 32), reference_vgg, "CCMCCMCCCMCCCMCCCM"),
    "vgg16, grey": ("vgg16", dict(width=1 / 16), (1, 28, 28), reference_vgg, "CCCCMCCCMCCCMCCCM"),
}


@pytest.mark.parametrize("sn", [False, True])
@pytest.mark.parametrize("mod", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_networks_equal_a_second_version_written_with_functions(name, mod, sn):
    model, changes, shape, reference, *structure = REFERENCES[name]
    net = build(model, 7, shape, seed=3, mod=mod, sn=sn, coeff=0.8, **changes).double()
    x = torch.randn(16, *shape, dtype=torch.float64)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for m in norms:
            m.momentum = 1.0
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, 0, 0.3)
        for m in spectral_layers(net):
            m.weight.mul_(2)  # so that the coefficient clips
        for _ in range(4):
            net(x)  # running statistics of these images: the net keeps telling them apart
        for m in norms:
            m.running_mean += 0.3 * m.running_var.sqrt() * torch.randn_like(m.running_mean)
            m.running_var *= torch.empty_like(m.running_var).uniform_(0.5, 1.5)
        net.eval()
        clipped = [shrinkage(m) < 0.99 for m in spectral_layers(net)]
        outputs = net(x)
        expected = reference(net.state_dict(), x, *structure, mod, 0.8)
    assert bool(clipped) == sn and sum(clipped) >= len(clipped) / 2
    for ours, theirs in zip(outputs, expected):
        scale = theirs.std(0).max()  # of what depends on the image
        assert scale > 0.01 * theirs.abs().max() and (ours - theirs).abs().max() < 1e-9 * scale


def test_lenet_equals_a_second_version_written_with_functions():
    net, images = build("lenet", shape=(1, 28, 28), sn=False, mod=False), torch.randn(3, 1, 28, 28)
    p, x = net.state_dict(), images
    for name in ("conv1", "conv2"):
        x = F.conv2d(x, p[name + ".weight"], p[name + ".bias"]).clamp_min(0)
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    assert x.shape[1:] == (16, 4, 4)
    x = x.flatten(1)
    for name in ("fc1", "fc2"):
        x = (x @ p[name + ".weight"].T + p[name + ".bias"]).clamp_min(0)
    logits, feature = net(images)
    assert torch.allclose(feature, x, atol=1e-5) and feature.min() == 0
    assert torch.allclose(logits, reference_head(p, x)[0], atol=1e-5)


@pytest.mark.parametrize("sn", [False, True])
def test_fc_resnet_normalises_all_matrices_but_the_head(sn):
    net = build("fc_resnet", 2, (2, 1, 1), sn=sn, coeff=0.65, power_iterations=5).double()
    x = torch.randn(5, 2, dtype=torch.float64)
    net(x)
    logits, feature = net.eval()(x)
    p = {k: v.numpy() for k, v in net.state_dict().items()}
    assert p["first.weight"].shape == (128, 2)

    def linear(name, z):
        w = p[name + ".weight"]
        if sn:
            w = w / max(1, p[name + ".u"].ravel() @ w @ p[name + ".v"].ravel() / 0.65)
        return z @ w.T + p[name + ".bias"]

    z = linear("first", x.numpy())
    for i in range(4):
        z = z + np.maximum(linear(f"layers.{i}", z), 0)
    assert np.allclose(feature.detach(), z, atol=1e-10)
    assert np.allclose(logits.detach(), z @ p["head.weight"].T + p["head.bias"], atol=1e-10)
    assert len(spectral_layers(net)) == 5 * sn and type(net.head) is nn.Linear
    if sn:
        assert shrinkage(net.first) < 0.99


def test_logits_are_the_heads_value_of_the_feature():
    for model, changes in {"wide_resnet": dict(depth=10, width=0.1), "resnet18": dict(width=0.05),
                           "resnet50": dict(width=0.05), "vgg16": dict(width=0.05)}.items():
        logits, feature = (net := build(model, **changes).eval())(torch.randn(2, 3, 32, 32))
        assert torch.equal(logits, net.head(feature)) and feature.requires_grad


def test_a_spectral_net_copies_pickles_saves_and_loads_after_a_training_step():
    settings = dict(depth=10, width=0.1, coeff=0.8)
    net, x = build("wide_resnet", **settings), torch.randn(2, 3, 32, 32)
    net(x)[0].sum().backward()
    expected = net.eval()(x)[0]
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    loaded = build("wide_resnet", seed=9, **settings).eval()
    assert not torch.equal(loaded(x)[0], expected)
    state = torch.load(file, weights_only=True)
    assert {"stem.weight", "stem.u", "stem.v"} <= state.keys()
    loaded.load_state_dict(dict(state), strict=True)  # without PyTorch's version metadata
    for twin in (loaded, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x)[0], expected)
    with pytest.raises(RuntimeError, match="stem.u"):
        loaded.load_state_dict({k: v for k, v in state.items() if k != "stem.u"})


def test_resumed_training_equals_uninterrupted_training():
    def start(seed):
        net = build("resnet18", shape=(1, 16, 16), seed=seed, width=1 / 16, coeff=0.8)
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def steps(net, optimiser, data):
        for x in data:
            optimiser.zero_grad()
            F.cross_entropy(net(x)[0], torch.arange(4)).backward()
            optimiser.step()

    torch.manual_seed(2)
    data = torch.randn(6, 4, 1, 16, 16)
    net, optimiser = start(0)
    steps(net, optimiser, data[:3])
    file = io.BytesIO()
    torch.save([net.state_dict(), optimiser.state_dict()], file)
    steps(net, optimiser, data[3:])
    file.seek(0)
    (other, again), state = start(1), torch.load(file, weights_only=True)
    other.load_state_dict(state[0])
    again.load_state_dict(state[1])
    steps(other, again, data[3:])
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values()):
        assert torch.equal(a, b), name
    assert shrinkage(net.stem.eval()) < 0.99


@pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason="no torch.compile here")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_spectral_net_trains_like_the_plain_one(backend):
    net = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    ddu.spectral_normalise(net, (2, 7, 7), 0.3).double()
    twin, x = copy.deepcopy(net), torch.randn(2, 2, 7, 7, dtype=torch.float64)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    for _ in range(3):
        a, b = net(x), compiled(x)
        assert torch.allclose(a, b, rtol=1e-10)
        a.square().sum().backward()
        b.square().sum().backward()
    for a, b in zip(net.parameters(), twin.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-9) and a.grad.abs().max() > 0
    for a, b in zip(spectral_layers(net), spectral_layers(twin)):
        assert torch.allclose(a.u, b.u, rtol=1e-9) and torch.allclose(a.v, b.v, rtol=1e-9)
    assert torch.allclose(net.eval()(x), compiled.eval()(x), rtol=1e-10)


@pytest.mark.parametrize("name, last, image", [("resnet18", "fc", 32),
                                               ("mobilenet_v3_small", "classifier.3", 32)])
def test_torchvision_nets_give_the_input_of_their_last_linear_layer(tmp_path, name, last, image):
    import torchvision
    torch.manual_seed(0)
    original = torchvision.models.get_model(name, weights=None).eval()
    path = tmp_path / "weights.pt"
    torch.save(original.state_dict(), path)
    args = ddu.parse_args(["--dataset", "imagenet", "--model", f"torchvision/{name}",
                           "--weights", str(path)])
    net, seen = ddu.make_network(args, 1000, (3, image, image)).eval(), []
    original.get_submodule(last).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 3, image, image)
    with torch.no_grad():
        expected, (logits, feature) = original(x), net(x)
    assert torch.equal(logits, expected) and torch.equal(feature, seen[0])
    assert net.head.in_features == feature.shape[1] and not spectral_layers(net)
    with pytest.raises(common.UserError, match="1000"):
        ddu.make_network(args, 10, (3, image, image))


def test_torchvision_mistakes_are_one_line(tmp_path):
    (tmp_path / "text.pt").write_text("no state dict")
    for name, weights in (("resnet_of_nobody", "DEFAULT"), ("shufflenet_v2_x0_5", "absent.pt"),
                          ("shufflenet_v2_x0_5", "text.pt")):
        args = options(model=f"torchvision/{name}", weights=str(tmp_path / weights))
        with pytest.raises(common.UserError, match=name) as caught:
            ddu.make_network(args, 1000, (3, 64, 64))
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


def moments_of(z, y, batches=1):
    moments = ddu.ClassMoments(torch.bincount(y), z.shape[1])
    for part in torch.arange(len(z)).tensor_split(batches):
        moments.update(z[part], y[part])
    return moments


def fit(z, y, batches=1, **how):
    return ddu.fit_gaussians(moments_of(z, y, batches), **how)


def scipy_log_densities(z, y, points, jitter=0.0):
    """[N, K] by SciPy from numpy.cov of each class."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        cov = np.cov(rows.T) + jitter * np.eye(z.shape[1])
        gaussian = scipy.stats.multivariate_normal(rows.mean(0), cov)
        columns.append(gaussian.logpdf(points.double().numpy()))
    return np.stack(columns, 1)


IMBALANCED = (120, 260, 150, 200)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments_and_log_densities_equal_numpy_and_scipy(dim, dtype):
    z, y = clusters(IMBALANCED, dim)
    z = z.to(dtype)
    moments = moments_of(z, y, batches=7)
    full, thin = moments.covariances()
    assert not thin and len(full) == 4
    for c in range(4):
        rows = z[y == c].double().numpy()
        assert np.allclose(moments.mean[c], rows.mean(0), rtol=1e-11, atol=1e-12)
        assert np.allclose(full[c], np.cov(rows.T), rtol=1e-10, atol=1e-11)
    gaussians = ddu.fit_gaussians(moments)
    points = torch.cat([z[:40], 3 * torch.randn(20, dim)])
    ours = ddu.class_log_densities(gaussians, points)
    assert ours.dtype == torch.float64 and gaussians.jitter == 0
    expected = scipy_log_densities(z, y, points)
    assert np.allclose(ours, expected, rtol=1e-10, atol=1e-7)
    density = ddu.density_scores(gaussians, points)["density"]
    assert np.allclose(density, scipy.special.logsumexp(expected, 1), rtol=1e-10, atol=1e-7)


def test_priors_are_left_out_uniform_or_the_class_frequencies():
    z, y = clusters(IMBALANCED * 2 + (180, 90), 5, spread=0.3)
    scores = {priors: ddu.density_scores(fit(z, y, priors=priors), z)
              for priors in ("none", "uniform", "empirical")}
    gap = scores["none"]["density"] - scores["uniform"]["density"]
    assert np.allclose(gap, 2.302585092994046, atol=1e-9)
    log_densities = scipy_log_densities(z, y, z)
    joint = log_densities + np.log(np.bincount(y) / len(y))
    assert np.allclose(scores["empirical"]["density"], scipy.special.logsumexp(joint, 1), atol=1e-8)
    for priors, values in zip(scores, (log_densities, log_densities, joint)):
        posterior = scipy.stats.entropy(scipy.special.softmax(values, 1), axis=1)
        assert np.allclose(scores[priors]["gmm_entropy"], posterior, atol=1e-8)
        assert posterior.std() > 0.1


def test_streaming_order_and_batches_change_nothing_even_far_from_zero():
    z, y = clusters((60, 40, 9, 12), 12)
    z = z + 1e4
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    whole = fit(z, y, jitter=0.01)
    at = ddu.class_log_densities(whole, z)
    for other in (fit(z, y, batches=50, jitter=0.01), fit(z[order], y[order], jitter=0.01),
                  fit(z[order], y[order], batches=11, jitter=0.01)):
        assert torch.allclose(other.mean, whole.mean, rtol=1e-12)
        assert torch.allclose(ddu.class_log_densities(other, z), at, rtol=1e-9, atol=1e-7)
    assert np.allclose(at, scipy_log_densities(z, y, z, 0.01), rtol=1e-8, atol=1e-6)


def test_affine_maps_of_the_features_shift_every_log_density_by_the_log_determinant():
    z, y = clusters(IMBALANCED, 8)
    rng = np.random.default_rng(4)
    a, b = torch.tensor(rng.normal(size=(8, 8))), torch.tensor(rng.normal(size=8) * 5)
    before, after = fit(z, y), fit(z @ a.T + b, y)
    points = torch.cat([z[:50], torch.tensor(rng.normal(size=(50, 8)) * 9)])
    ours = [ddu.density_scores(g, p) for g, p in ((before, points), (after, points @ a.T + b))]
    assert before.jitter == after.jitter == 0
    log_det = np.linalg.slogdet(a.numpy())[1]
    assert np.allclose(ours[1]["density"], ours[0]["density"] - log_det, atol=1e-8)
    for name in ("gmm_entropy", "class_mahalanobis", "mahalanobis", "relative_mahalanobis"):
        assert torch.allclose(ours[1][name], ours[0][name], rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize("jitter", [1e-3, 0.5])
def test_a_given_jitter_is_added_to_every_covariance(jitter):
    z, y = clusters((50, 6, 9, 60), 9)  # two classes in the dual form
    gaussians = fit(z, y, jitter=jitter)
    assert gaussians.jitter == jitter
    points = torch.cat([z[:30], 4 * torch.randn(20, 9, dtype=torch.float64)])
    assert np.allclose(ddu.class_log_densities(gaussians, points),
                       scipy_log_densities(z, y, points, jitter), rtol=1e-9, atol=1e-8)


def test_dead_features_get_the_smallest_jitter_that_factorises():
    z, y = clusters((40, 50, 60), 6)
    z = torch.cat([z, torch.zeros(len(z), 2)], 1)  # no variance at all in the last two
    gaussians = fit(z, y)
    variances = [np.var(z[y == c].numpy(), axis=0, ddof=1).mean() for c in range(3)]
    assert gaussians.jitter == pytest.approx(1e-12 * np.mean(variances), rel=1e-9)
    points = z[:20].clone()
    points[:10, 6:] = 1e-5
    alive = scipy_log_densities(z[:, :6], y, points[:, :6])
    dead = scipy.stats.norm(0, math.sqrt(gaussians.jitter)).logpdf(points[:, 6:]).sum(1)
    assert np.allclose(ddu.class_log_densities(gaussians, points), alive + dead[:, None],
                       rtol=1e-7, atol=1e-5)
    scores = ddu.density_scores(gaussians, points)
    assert all(torch.isfinite(s).all() for s in scores.values())
    assert scores["density"][10:].min() > scores["density"][:10].max()


def test_a_dependent_feature_is_singular_though_rounding_may_leave_a_factor():
    for seed in range(20):
        z, y = clusters((60, 50), 6, seed=seed)
        z[:, 5] = z[:, :3].sum(1)
        gaussians = fit(z, y)
        variances = [np.var(z[y == c].numpy(), axis=0, ddof=1).mean() for c in (0, 1)]
        assert gaussians.jitter == pytest.approx(1e-12 * np.mean(variances), rel=1e-9), seed
    scales = torch.tensor([1e-9, 1e-3, 1.0, 1.0, 1e4, 1e9], dtype=torch.float64)
    assert fit(clusters((60, 50), 6)[0] * scales, y).jitter == 0  # badly scaled, not singular


def test_the_jitter_is_one_for_all_classes():
    z, y = clusters((60, 60), 4)
    # class 1 has rank 3 and a huge scale, so that rounding alone needs much jitter
    z[y == 1] = 1e8 * z[y == 1]
    z[y == 1, 3] = z[y == 1, :3].sum(1)
    gaussians = fit(z, y)
    assert 1 < gaussians.jitter < 1e8
    healthy = z[y == 0][:20]
    expected = scipy_log_densities(z[y == 0], y[y == 0], healthy, gaussians.jitter)[:, 0]
    assert np.allclose(ddu.class_log_densities(gaussians, healthy)[:, 0], expected, rtol=1e-10)
    with pytest.raises(np.linalg.LinAlgError):  # the step below does not factorise
        np.linalg.cholesky(np.cov(z[y == 1].numpy().T))


def test_constant_features_still_fit():
    y = torch.arange(24) % 2
    for dim in (3, 20):  # full and dual form
        scores = ddu.density_scores(fit(torch.zeros(24, dim), y), torch.ones(4, dim))
        assert all(torch.isfinite(s).all() for s in scores.values())


def test_jitter_zero_is_refused_where_a_covariance_is_singular():
    z, y = clusters((40, 5), 6)
    with pytest.raises(common.UserError, match="class 1"):
        fit(z, y, jitter=0.0)
    z, y = clusters((40, 40), 6)
    z[:, 2] = 0
    with pytest.raises(common.UserError, match="jitter"):
        fit(z, y, jitter=0.0)


def exact_log_densities(rows, eps, points):
    """log N(points; mean, covariance + eps I) of the rows' Gaussian, with 60 digits."""
    with mpmath.workdps(60):
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


@pytest.mark.parametrize("counts", [(2, 5, 9), (10, 11, 3, 40)])
def test_the_dual_form_is_exact(counts):
    """Classes with n <= D = 10 (dual) and n > D (Cholesky) together, eps 1e-12 of the variance."""
    z, y = clusters(counts, 10, seed=2)
    z = z * torch.logspace(0, -4, 10, dtype=torch.float64)  # variances from 1 to 1e-8
    if max(counts) < 11:  # equal rows lower the rank further
        z[y == 2] = z[y == 2][[0, 1, 2, 3, 0, 1, 2, 3, 0]]
    gaussians = fit(z, y, batches=3)
    variances = [np.var(z[y == c].numpy(), axis=0, ddof=1).mean() for c in range(len(counts))]
    assert gaussians.jitter == pytest.approx(1e-12 * np.mean(variances), rel=1e-9)
    for c, n in enumerate(counts):
        assert len(gaussians.basis[c]) <= n - 1 if n <= 10 else gaussians.eigenvalues[c] is None
    first = torch.stack([z[y == c][0] for c in range(len(counts))])
    near = first + 1e-6 * torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
    points = torch.cat([first, near, 5 * near])
    ours = ddu.class_log_densities(gaussians, points)
    for c in range(len(counts)):
        exact = exact_log_densities(z[y == c], gaussians.jitter, points)
        assert np.allclose(ours[:, c], exact, rtol=1e-8, atol=1e-6), c


def test_moments_refuse_what_has_no_covariance():
    with pytest.raises(common.UserError, match="class 2 has 1"):
        ddu.ClassMoments(torch.tensor([3, 4, 1]), 2)
    with pytest.raises(common.UserError, match="class 0 has 0"):
        ddu.ClassMoments(torch.tensor([0, 4]), 2)
    moments = ddu.ClassMoments(torch.tensor([2, 2]), 2)
    for bad in (math.nan, math.inf):
        with pytest.raises(common.UserError, match="NaN"):
            moments.update(torch.tensor([[0.0, bad]]), torch.tensor([0]))
    moments.update(torch.ones(2, 2), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="counts"):
        moments.reduce(common.World())


class Threads:
    """The collective operations of common.py, between threads."""

    def __init__(self, size):
        self.barrier, self.slots = threading.Barrier(size, timeout=30), [None] * size

    def exchange(self, tensor, world):
        self.slots[world.rank] = tensor.clone()
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything

    def all_reduce(self, tensor, world):
        return tensor.copy_(torch.stack(self.exchange(tensor, world)).sum(0))

    def concat_rows(self, rows, world):
        return torch.cat(self.exchange(rows, world))


def test_moments_of_several_processes_equal_those_of_one(monkeypatch):
    z, y = clusters((60, 40, 8, 12), 12)  # the last two in the dual form
    z = z + 100
    # one process has no example of class 0, one has none of any
    parts = [torch.arange(50), torch.arange(50, 120)[y[50:120] != 0], torch.arange(0)]
    parts.append(torch.tensor(sorted(set(range(120)) - set(torch.cat(parts).tolist()))))
    threads = Threads(4)
    monkeypatch.setattr(common, "all_reduce", threads.all_reduce)
    monkeypatch.setattr(common, "concat_rows", threads.concat_rows)

    def process(rank):
        moments = ddu.ClassMoments(torch.bincount(y), 12)
        for batch in parts[rank].split(17):
            moments.update(z[batch], y[batch])
        return moments.reduce(common.World(rank=rank, size=4))

    with ThreadPoolExecutor(4) as pool:
        merged = list(pool.map(process, range(4)))
    one = fit(z, y, jitter=0.01)
    expected = ddu.class_log_densities(one, z)
    for moments in merged:
        for c, covariance in moments.covariances()[0].items():
            assert np.allclose(covariance, np.cov(z[y == c].numpy().T), rtol=1e-9, atol=1e-10)
        assert moments.count.tolist() == [60, 40, 8, 12]
        both = ddu.fit_gaussians(moments, jitter=0.01)
        assert torch.allclose(ddu.class_log_densities(both, z), expected, rtol=1e-9, atol=1e-8)
        assert torch.allclose(both.within, one.within, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("counts, offset", [
    (IMBALANCED, 0.0), ((120, 6, 150), 0.0), (IMBALANCED, 1e5)])
def test_mahalanobis_scores_equal_scikit_learn(counts, offset):
    z, y = clusters(counts, 7, spread=1.0)
    gaussians = fit(z + offset, y, jitter=1e-3)
    points = torch.cat([z[:60], 4 * torch.randn(40, 7, generator=torch.Generator().manual_seed(0))])
    scores = ddu.density_scores(gaussians, points + offset)
    z, y, points = z.numpy(), y.numpy(), points.numpy()
    means = np.stack([z[y == c].mean(0) for c in range(len(counts))])
    within = EmpiricalCovariance(assume_centered=True).fit(z - means[y])
    distances = np.stack([within.mahalanobis(points - m) for m in means], 1)
    relative = (EmpiricalCovariance().fit(z).mahalanobis(points)[:, None] - distances).max(1)
    exact = dict(rtol=1e-8, atol=1e-8)
    assert np.allclose(scores["mahalanobis"], -distances.min(1), **exact)
    assert np.allclose(scores["relative_mahalanobis"], relative, **exact)
    own = []
    for c, m in enumerate(means):
        precision = np.linalg.inv(np.cov(z[y == c].T) + 1e-3 * np.eye(7))
        own.append(np.einsum("nd,de,ne->n", points - m, precision, points - m))
    assert np.allclose(scores["class_mahalanobis"], -np.min(own, 0), rtol=1e-7, atol=1e-7)


def test_moments_take_a_batch_of_no_rows():
    z, y = clusters((20, 4), 6)
    moments = moments_of(z, y)
    mean = moments.mean.clone()
    moments.update(z[:0], y[:0])
    assert torch.equal(moments.mean, mean) and moments.count.tolist() == [20, 4]


def test_gaussians_survive_a_move_and_a_file():
    z, y = clusters((20, 4), 6)
    gaussians, file = fit(z, y), io.BytesIO()
    torch.save(gaussians.to("cpu")._asdict(), file)
    file.seek(0)
    again = ddu.Gaussians(**torch.load(file, weights_only=True))
    before, after = ddu.density_scores(gaussians, z), ddu.density_scores(again, z)
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- Scores, decisions, schedules ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.5])
def test_softmax_scores_equal_scipy(temperature):
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * 4
    scaled = logits.double().numpy() / temperature
    probs = scipy.special.softmax(scaled, 1)
    scores = ddu.softmax_scores(logits, temperature)
    assert np.allclose(scores["entropy"], scipy.stats.entropy(probs, axis=1), atol=1e-12)
    assert np.allclose(scores["max_prob"], probs.max(1), atol=1e-12)
    assert np.allclose(scores["energy"], scipy.special.logsumexp(scaled, 1), atol=1e-12)


def test_the_networks_entropy_and_the_gaussians_entropy_have_their_own_names():
    z, y = clusters((30, 30, 30), 4, spread=0.5)
    logits = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    outputs = ddu.Outputs(logits, y, ddu.density_scores(fit(z, y), z))
    scores = ddu.all_scores(outputs, temperature=2.0)
    own = scipy.stats.entropy(scipy.special.softmax(logits.double().numpy(), 1), axis=1)
    scaled = scipy.stats.entropy(scipy.special.softmax(logits.double().numpy() / 2, 1), axis=1)
    posterior = scipy.stats.entropy(scipy.special.softmax(scipy_log_densities(z, y, z), 1), axis=1)
    expected = {"entropy": own, "entropy_scaled": scaled, "gmm_entropy": posterior}
    for name, expected in expected.items():
        assert np.allclose(scores[name], expected, atol=1e-8), name
    assert np.abs(own - posterior).max() > 0.1
    assert scores.keys() == {"density", "gmm_entropy", "class_mahalanobis", "mahalanobis",
                             "relative_mahalanobis", "entropy", "max_prob", "energy",
                             "entropy_scaled", "max_prob_scaled", "energy_scaled"}


CONFIDENCES = ["density", "energy", "max_prob", "class_mahalanobis", "mahalanobis",
               "relative_mahalanobis", "energy_scaled", "max_prob_scaled"]
UNCERTAINTIES = ["entropy", "gmm_entropy", "entropy_scaled", "predictive_entropy",
                 "mutual_information", "predictive_entropy_scaled", "mutual_information_scaled"]


@pytest.mark.parametrize("name", CONFIDENCES + UNCERTAINTIES)
def test_detection_counts_confidences_and_uncertainties_on_their_sides(name):
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(1, 1, 300).round(1), rng.normal(0, 1, 700).round(1)  # with ties
    metrics = ddu.detection_metrics({name: torch.tensor(inside)}, {name: torch.tensor(outside)})
    assert list(metrics) == [f"{m}_{name}" for m in DETECTION]
    scores, is_id = np.concatenate([inside, outside]), np.arange(1000) < 300
    confidence = scores if name in CONFIDENCES else -scores
    expected = [roc_auc_score(is_id, confidence), average_precision_score(is_id, confidence),
                average_precision_score(~is_id, -confidence)]
    assert list(metrics.values())[:3] == pytest.approx(expected, abs=1e-12)
    assert (metrics[f"auroc_{name}"] > 0.6) == (name in CONFIDENCES)
    flat = ddu.detection_metrics({name: torch.zeros(300)}, {name: torch.zeros(700)})
    assert [flat[f"{m}_{name}"] for m in DETECTION] == pytest.approx([0.5, 0.3, 0.7, 1.0])


def test_every_score_tells_far_features_and_flat_logits_from_the_training_sets():
    z, y = clusters((80, 80, 80), 5)
    gaussians = fit(z, y)
    centre = z.mean(0)
    far = centre + 30 * F.normalize(torch.randn(100, 5, dtype=torch.float64), dim=1)
    sharp, flat = 9 * F.one_hot(y, 3).float(), 0.1 * torch.randn(100, 3)
    outputs = [ddu.all_scores(ddu.Outputs(logits, y, ddu.density_scores(gaussians, f)))
               for logits, f in ((sharp, z), (flat, far))]
    metrics = ddu.detection_metrics(*outputs)
    for name in ("density", "class_mahalanobis", "mahalanobis", "entropy", "max_prob", "energy"):
        assert metrics[f"auroc_{name}"] > 0.99, name


def test_low_density_is_ood_whatever_the_entropy():
    density = torch.tensor([5.0, 5.0, -5.0, -5.0, 1.0])
    entropy = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    assert ddu.decide(density, entropy, 1.0, 0.5).tolist() == [0, 1, 2, 2, 0]


def test_acquisition_ranks_log_densities_that_underflow():
    z, y = clusters([2] * 4 + [5] * 6, 64)
    gaussians = fit(z, y, priors="empirical")
    pool = z[:30].repeat(10, 1) + 0.5 * torch.randn(300, 64, dtype=torch.float64,
                                                    generator=torch.Generator().manual_seed(0))
    joint = ddu.class_log_densities(gaussians, pool).numpy() + np.log(np.bincount(y) / len(y))
    assert not torch.tensor(joint).float().exp().any()  # all tie in the published code
    expected = np.argsort(scipy.special.logsumexp(joint, 1), kind="stable")[:7]
    picked = ddu.acquire(-ddu.density_scores(gaussians, pool)["density"], 7)
    assert picked.tolist() == expected.tolist() != list(range(7))


def test_acquisition_takes_the_largest_scores_and_breaks_ties_by_index():
    scores = torch.tensor([0.1, 0.7, 0.3, 0.7, 0.9, 0.7])
    assert ddu.acquire(scores, 4).tolist() == [4, 1, 3, 5]
    assert ddu.acquire(torch.zeros(50), 3).tolist() == [0, 1, 2]
    assert len(ddu.acquire(scores, 0)) == 0


def test_step_schedule_is_the_papers():
    args = options()
    for epoch, expected in {0: 0.1, 149: 0.1, 150: 0.01, 249: 0.01, 250: 0.001, 349: 0.001}.items():
        for step in (352 * epoch, 352 * epoch + 351):
            assert ddu.learning_rate(step, 352, args) == pytest.approx(expected, rel=1e-12)


def test_one_cycle_rises_for_a_fifth_of_the_steps_and_falls_to_zero():
    args = SimpleNamespace(schedule="one_cycle", lr=0.2, epochs=5)
    rates = np.array([ddu.learning_rate(step, 20, args) for step in range(100)])
    assert rates.argmax() == 20 and rates[20] == pytest.approx(0.2)
    assert np.allclose(np.diff(rates[:21]), 0.2 / 21) and rates[0] == pytest.approx(0.2 / 21)
    assert np.allclose(np.diff(rates[20:]), -0.2 / 80) and rates[99] == pytest.approx(0.2 / 80)


# ---- Evaluation ---------------------------------------------------------------------------------


def test_processes_without_an_image_of_the_last_batch_take_part_in_the_evaluation(monkeypatch):
    net = build("lenet", 3, (1, 28, 28), sn=False, mod=False)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8, generator=generator)
    images = data.ImageSet("three", pixels, torch.tensor([2, 0, 1]), 3, (0.1,), (0.3,))
    z, y = clusters((4, 5, 6), 84)
    gaussians, args = fit(z, y, jitter=0.1), options(model="lenet")
    alone = ddu.evaluate_set(net, gaussians, images, args, common.World())
    threads = Threads(4)
    monkeypatch.setattr(common, "concat_rows", threads.concat_rows)
    with ThreadPoolExecutor(4) as pool:
        worlds = [common.World(rank=rank, size=4) for rank in range(4)]
        results = list(pool.map(
            lambda world: ddu.evaluate_set(net, gaussians, images, args, world), worlds))
    for result in results:
        assert torch.allclose(result.logits, alone.logits, atol=1e-5)
        for name, score in alone.scores.items():
            assert torch.allclose(result.scores[name], score, rtol=1e-5), name


def test_ensembles_average_probabilities():
    rng = np.random.default_rng(0)
    # the mean of these two has class 0 first, the mean of their logits class 1
    disagreement = np.log([[[0.98, 0.01, 0.01]], [[0.001, 0.5, 0.499]]])
    sizes = {"part": 40, "letters": 60}
    logits = {k: rng.normal(size=(2, n, 3)) * 3 for k, n in sizes.items()}
    logits["part"] = np.concatenate([disagreement, logits["part"][:, 1:]], 1)
    logits["test"], temperatures = logits["part"], (0.7, 2.0)
    labels = {k: rng.integers(0, 3, v.shape[1]) for k, v in logits.items()}
    labels["test"] = labels["part"] = np.append(0, labels["part"][1:])
    outputs = [{k: ddu.Outputs(torch.tensor(v[m]), torch.tensor(labels[k]), {})
                for k, v in logits.items()} for m in (0, 1)]
    members = [({"temperature": t}, out) for t, out in zip(temperatures, outputs)]
    metrics = ddu.evaluate_ensemble(members, {"test": {"part": None}, "ood": {"letters": None}})
    for suffix, scale in (("", (1, 1)), ("_scaled", temperatures)):
        probs = {k: scipy.special.softmax(v / np.reshape(scale, (2, 1, 1)), 2)
                 for k, v in logits.items()}
        mean = probs["test"].mean(0)
        assert mean[0].argmax() == 0 or suffix
        accuracy = (mean.argmax(1) == labels["test"]).mean()
        assert metrics["test/accuracy" + suffix] == pytest.approx(accuracy)
        nll = -np.log(mean[np.arange(40), labels["test"]]).mean()
        assert metrics["test/nll" + suffix] == pytest.approx(nll, rel=1e-6)
        total = {k: scipy.stats.entropy(p.mean(0), axis=1) for k, p in probs.items()}
        mutual = {k: total[k] - scipy.stats.entropy(p, axis=2).mean(0) for k, p in probs.items()}
        for name, score in (("predictive_entropy", total), ("mutual_information", mutual)):
            values = np.concatenate([score["test"], score["letters"]])
            is_ood = np.arange(100) >= 40
            expected = [roc_auc_score(is_ood, values), average_precision_score(~is_ood, -values),
                        average_precision_score(is_ood, values)]
            ours = [metrics[f"letters/{m}_{name}{suffix}"] for m in DETECTION[:3]]
            assert ours == pytest.approx(expected, abs=1e-9)


def published_metrics(start, ensemble):
    """A value of its own for every metric that an evaluation gives."""
    names = UNCERTAINTIES[3:] if ensemble else CONFIDENCES + UNCERTAINTIES[:3]
    keys = [f"test/{k}{s}" for k in ("accuracy", "ece15", "nll") for s in ("", "_scaled")]
    keys += [f"svhn/{m}_{n}" for m in DETECTION for n in names]
    return {k: start + i for i, k in enumerate(keys)}


PUBLISHED_KEYS = ["accuracy", "ece", "m1_auroc", "m1_auprc", "m2_auroc", "m2_auprc",
                  "t_ece", "t_m1_auroc", "t_m1_auprc", "t_m2_auroc", "t_m2_auprc"]
PUBLISHED = {
    "softmax": ["test/accuracy", "test/ece15", "svhn/auroc_energy", "svhn/aupr_in_energy",
                "svhn/auroc_entropy", "svhn/aupr_out_entropy", "test/ece15_scaled",
                "svhn/auroc_energy_scaled", "svhn/aupr_in_energy_scaled",
                "svhn/auroc_entropy_scaled", "svhn/aupr_out_entropy_scaled"],
    "gmm": ["test/accuracy", "test/ece15", "svhn/auroc_density", "svhn/aupr_in_density",
            "svhn/auroc_gmm_entropy", "svhn/aupr_out_gmm_entropy", "test/ece15_scaled",
            "svhn/auroc_density", "svhn/aupr_in_density",
            "svhn/auroc_gmm_entropy", "svhn/aupr_out_gmm_entropy"],
    "ensemble": ["test/accuracy", "test/ece15", "svhn/auroc_mutual_information",
                 "svhn/aupr_out_mutual_information", "svhn/auroc_predictive_entropy",
                 "svhn/aupr_out_predictive_entropy", "test/ece15_scaled",
                 "svhn/auroc_mutual_information_scaled", "svhn/aupr_out_mutual_information_scaled",
                 "svhn/auroc_predictive_entropy_scaled", "svhn/aupr_out_predictive_entropy_scaled"],
}


def test_published_results_have_the_published_layout():
    args = options(runs=3)
    runs = [{"single": published_metrics(100 * r**2, False),
             "ensemble": published_metrics(7 * r, True)} for r in range(3)]
    files = ddu.published_results(runs, "cifar10", "svhn", args)
    stem = "res_wide_resnet_sn_3.0_mod_1"
    assert list(files) == [f"{stem}_{kind}_cifar10_svhn.json" for kind in PUBLISHED]
    for kind, content in zip(PUBLISHED, files.values()):
        assert list(content) == ["mean", "std", "values", "info"]
        source = "ensemble" if kind == "ensemble" else "single"
        for part in ("mean", "std", "values"):
            assert list(content[part]) == PUBLISHED_KEYS
        for key, metric in zip(PUBLISHED_KEYS, PUBLISHED[kind]):
            values = [run[source][metric] for run in runs]
            assert content["values"][key] == values, (kind, key)
            assert content["mean"][key] == pytest.approx(np.mean(values))
            assert content["std"][key] == pytest.approx(np.std(values, ddof=1) / 3**0.5)
        assert content["info"]["coeff"] == 3.0 and content["info"].keys() == vars(args).keys()


def test_one_published_run_has_no_standard_error_and_is_strict_json():
    runs = [{"single": published_metrics(0.5, False), "ensemble": None}]
    files = ddu.published_results(runs, "cifar10", "svhn", options())
    assert [name.split("_")[-3] for name in files] == ["softmax", "gmm"]
    for content in files.values():
        content = json.loads(json.dumps(common.to_json(content), allow_nan=False))
        assert content["std"] == dict.fromkeys(PUBLISHED_KEYS)
        assert all(len(v) == 1 for v in content["values"].values())


@pytest.mark.parametrize("line, stem", [
    ("--no-sn --no-mod", "wide_resnet_1"), ("--no-sn -mod", "wide_resnet_mod_1"),
    ("-sn --no-mod", "wide_resnet_sn_3.0_1"), ("-sn -mod --coeff 3", "wide_resnet_sn_3.0_mod_1"),
    ("-sn --no-mod --seed 12 --model resnet50 --coeff 0.5", "resnet50_sn_0.5_12")])
def test_published_stem(line, stem):
    assert ddu.published_stem(ddu.parse_args(["--dataset", "cifar10", *line.split()])) == stem


def test_a_stem_is_a_file_name():
    assert "/" not in ddu.published_stem(options(model="torchvision/resnet50"))
