"""ddu.py against independent oracles: operators as dense matrices, the sizes of the published
networks, Gaussians by NumPy, SciPy and scikit-learn; and its runs end to end."""

import copy
import csv
import dataclasses
import math
import re
import shutil
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
import torchvision
from conftest import (CPU, Child, assert_same_checkpoints, refusal, run_ddu, run_ddu_in_float64,
                      start_ranks, strict_json, wait_for)
from PIL import Image
from sklearn.covariance import ledoit_wolf
from torch import nn

import common
import data
import ddu

# Notes on few held-out images.
pytestmark = pytest.mark.filterwarnings("ignore:the thresholds come", "ignore:the temperature is")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def parse(line):
    return ddu.parse_args([*line.split(), *CPU])


def options(**changes):
    """The resolved options of --dataset cifar10, with `changes`."""
    return common.with_options(parse("--dataset cifar10"), **changes)


def build(model, num_classes=10, shape=(3, 32, 32), device="cpu", depth=28, **changes):
    """A network with random weights; `depth` is that of wide_resnet."""
    args = options(model=model, device=torch.device(device), **changes)
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        patch.setitem(ddu.NETWORKS, "wide_resnet", partial(ddu.wide_resnet, depth=depth))
        return ddu.make_network(args, num_classes, shape)


def modules(net, kind):
    return [module for module in net.modules() if isinstance(module, kind)]


# ---- Options ------------------------------------------------------------------------------------

FEATURES = "--features a.npz --score b.npz"


def test_a_data_set_alone_is_the_papers_recipe():
    recipe = dict(model="wide_resnet", width=1.0, sn=True, mod=True, coeff=3.0, opt="sgd", lr=0.1,
                  weight_decay=5e-4, batch_size=128, epochs=350, schedule="step", augment=True,
                  shrinkage=False, ensemble=1, runs=1, ood=["svhn", "cifar100", "tiny_imagenet"])
    learning = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                    ensemble=5, lr=1e-3, batch_size=64, opt="adam", epochs=20, model="resnet18",
                    sn=None, mod=None, schedule="constant", augment=False, subsample=1000)
    spelt = dict(sn=True, mod=True, weight_decay=1e-4, batch_size=64, epochs=9, augment=False,
                 ood=["svhn"], entropy_threshold=0.35, density_quantile=0.01)
    for line, expected in {
            "--dataset cifar10": recipe, "--dataset dirty_mnist --active-learning pe": learning,
            "--dataset mnist -sn -mod --decay 1e-4 -b 64 -e 9 --ood svhn": spelt}.items():
        assert expected.items() <= vars(parse(line)).items(), line


LEARN = "--active-learning random"
WITHOUT_EFFECT = {
    "": ["--num-initial-samples 30", "--milestones 2 3"],
    "--no-sn": ["--coeff 2"],
    "--dataset folder:x --entropy-threshold 1": ["--entropy-quantile 0.9"],
    "--model lenet --no-sn": ["--width 2"],
    LEARN: ["--ood svhn", "--predict glyphs", "--ensemble 3", "--shrinkage"],
    f"{LEARN} --dataset glyphs": ["--subsample 9"],
    FEATURES: ["--no-sn", "--ood", "--predict glyphs", "--runs 2", LEARN, "--eval"]}


@pytest.mark.parametrize("setting", WITHOUT_EFFECT)
def test_options_without_effect_are_refused(setting):
    parse(setting)
    for option in WITHOUT_EFFECT[setting]:
        name = option.split()[0].replace("--no-", "--")
        text = refusal(parse, f"{setting} {option}")
        assert re.match(f"{name} has no effect with.*; remove this option$", text), text


def test_what_runs_in_one_process_is_refused_in_two(monkeypatch):
    monkeypatch.setattr(common, "world_size", lambda: 2)
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    for line in (FEATURES, LEARN):
        assert "one process" in refusal(parse, line)


# ---- Spectral normalisation ---------------------------------------------------------------------


def convolution(kernel_size=3, channels=5, **options):
    return nn.Conv2d(4, channels, kernel_size, bias=False, **options)


def spectral(layer, coeff, size=8):
    """A layer with new weights in float64 and in training mode, and its SoftSpectral."""
    layer = copy.deepcopy(layer).double()
    layer.reset_parameters()
    shape = (4,) if isinstance(layer, nn.Linear) else (4, size, size)
    ddu.spectral_normalise(layer, shape, coeff)
    return layer, layer.parametrizations.weight[0]


def raw_weight(layer):
    return layer.parametrizations.weight.original


def scale_of(layer):
    """W_eff / W of the next forward, one number."""
    ratio = (layer.weight / raw_weight(layer)).detach().flatten()
    assert (ratio - ratio[0]).abs().max() < 1e-6
    return ratio[0].item()


def dense_operator(conv, weight, size):
    """The matrix [Cout H' W', Cin H W] of a convolution with this weight: its basis images."""
    pixels = conv.in_channels * size**2
    basis = torch.eye(pixels, dtype=weight.dtype).view(pixels, -1, size, size)
    images = F.conv2d(basis, weight.detach(), None, conv.stride, conv.padding, conv.dilation,
                      conv.groups)
    return images.flatten(1).T.numpy()


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("size, layer", [
    (8, convolution(padding=1)), (1, convolution(padding=1)), (6, convolution()),
    (7, convolution(padding=1, stride=2)),
    (7, convolution(padding=1, stride=2, channels=8, groups=4)),
    (7, convolution((3, 5), padding=(2, 2), dilation=(2, 1)))])
def test_sigma_is_the_norm_of_the_true_operator(size, layer):
    """Its stride and zero padding included, by iterations v = A^T u, u = A v from the start."""
    conv, sn = spectral(layer, 1e-3, size)
    a = dense_operator(conv, raw_weight(conv), size)
    u = sn.u.flatten().numpy().copy()
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    for _ in range(3):
        y = conv(x)
        v = unit(a.T @ u)
        u = unit(a @ v)
    assert np.allclose(sn.v.flatten(), v, atol=1e-10) and np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = a / ((u @ a @ v) / 1e-3 + 1e-5)
    assert np.allclose(y.detach().flatten(1), x.flatten(1).numpy() @ effective.T, rtol=1e-9)
    exact = np.linalg.svd(a, compute_uv=False)[0]
    sigmas = [1e-3 * (1 / scale_of(conv) - 1e-5) for _ in range(180)]
    assert np.all(np.diff(sigmas) >= -1e-9 * exact)
    assert exact * (1 - 2e-3) <= sigmas[-1] <= exact * (1 + 1e-9)
    reshaped = np.linalg.norm(raw_weight(conv).detach().flatten(1).numpy(), 2)
    assert abs(sigmas[-1] / reshaped - 1) > 0.05  # what torch's spectral_norm would have found


@pytest.mark.parametrize("layer", [convolution(1, stride=2), nn.Linear(4, 5)])
def test_matrices_are_scaled_without_the_added_1e5(layer):
    layer, sn = spectral(layer, 0.3)
    w = raw_weight(layer).detach().flatten(1).numpy()
    v = unit(w.T @ sn.u.flatten().numpy())
    u = unit(w @ v)
    layer.weight  # a training forward's
    assert np.allclose(sn.u.flatten(), u, atol=1e-12)
    assert scale_of(layer.eval()) == pytest.approx(0.3 / (u @ w @ v), rel=1e-12)
    layer.train()
    for _ in range(200):
        effective = layer.weight.detach().flatten(1).numpy()
    assert np.linalg.norm(effective, 2) == pytest.approx(0.3, rel=1e-9)
    sn.coeff = 1000.0
    assert torch.equal(layer.weight, raw_weight(layer))  # never inflated
    nn.init.zeros_(raw_weight(layer))
    assert not layer.weight.any() and sn.u.isfinite().all() and sn.v.isfinite().all()


@pytest.mark.parametrize("coeff", [0.1, 1000.0])  # active or not
@pytest.mark.parametrize("layer", [convolution(padding=1, stride=2), nn.Linear(4, 5)])
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(layer, coeff):
    layer, _ = spectral(layer, coeff, size=5)
    raw = raw_weight(layer)
    shape = (2, 4) if raw.ndim == 2 else (2, 4, 5, 5)
    x = torch.randn(shape, dtype=torch.float64)
    gradient, = torch.autograd.grad(layer(x).square().sum(), raw)
    layer.eval()  # from here on u and v are those of that forward

    def loss(weight):
        changed = {"parametrizations.weight.original": weight}
        return torch.func.functional_call(layer, changed, x).square().sum()

    assert torch.equal(gradient, torch.autograd.grad(loss(raw), raw)[0])
    largest = gradient.abs().max().item()
    assert torch.autograd.gradcheck(loss, raw, eps=1e-5, rtol=1e-6, atol=1e-6 * largest)


# ---- Networks -----------------------------------------------------------------------------------

# --model, --mod, --sn, image (C, H, W) and classes; numbers of parameters and of features; and how
# many layers are spectral, how many of them see images of one pixel
SIZES = [("lenet", False, False, (1, 28, 28), 10, 44_426, 84, (0, 0)),
         ("resnet18", True, True, (3, 32, 32), 10, 11_000_138, 512, (17, 0)),
         ("resnet18", False, True, (1, 28, 28), 10, 11_172_810, 512, (20, 3)),
         ("resnet50", True, True, (3, 32, 32), 100, 20_928_676, 2048, (49, 32)),
         ("wide_resnet", True, True, (3, 32, 32), 10, 36_220_634, 640, (25, 0)),
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


@pytest.mark.parametrize("model, changes, shape, expected", FORWARDS)
def test_networks_compute_what_they_did(model, changes, shape, expected):
    for (mod, sn), numbers in zip([(False, False), (False, True), (True, True)], expected):
        net = build(model, 7, shape, mod=mod, sn=sn, coeff=0.8, **changes).double().train()
        with torch.no_grad():
            for tensor in net.state_dict().values():
                scale = (2 / tensor[0].numel())**0.5 if tensor.ndim > 1 else 1 / 3
                tensor.copy_(scale * fixed(tensor.shape))
            norms = modules(net, nn.BatchNorm2d)
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
    net = build("wide_resnet", 100, depth=10, width=0.5, sn=False)
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.05)
    assert not net.head.bias.any()
    for block in modules(net, ddu.Residual):  # dropout between the two convolutions
        dropout, conv = block.body[-2:]
        assert type(dropout) is nn.Dropout and dropout.p == 0.3
        fan_out = conv.weight.shape[0] * conv.weight[0, 0].numel()  # of the output channels
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)


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
    return ddu.fit_gaussians(z, y, int(y.max()) + 1, shrinkage)


def scipy_joint(z, y, points):
    """log N(z; mu_c, Sigma_c) + log n_c / N [N, K], by SciPy from numpy.cov of each class."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        gaussian = scipy.stats.multivariate_normal(rows.mean(0), np.cov(rows.T))
        columns.append(gaussian.logpdf(points.double().numpy()) + np.log(len(rows) / len(z)))
    return np.stack(columns, 1)


@pytest.mark.parametrize("dim, dtype, offset", [
    (16, torch.float64, 0.0), (64, torch.float32, 0.0), (8, torch.float64, 1e4)])
def test_densities_and_posteriors_equal_scipy_in_float64(dim, dtype, offset):
    z, y = clusters((120, 260, 150, 200), dim, spread=0.3)
    z = (z + offset).to(dtype)
    points = torch.cat([z[:300], offset + 3 * torch.randn(20, dim, dtype=dtype)])
    joint = scipy_joint(z, y, points)
    gaussians = fit(z, y)
    ours = ddu.class_log_densities(gaussians, points)
    assert gaussians.jitter == 0 and ours.dtype == torch.float64
    assert np.allclose(ours, joint, rtol=1e-8, atol=1e-6)
    scores = ddu.density_scores(ours)
    density = scipy.special.logsumexp(joint, 1)
    assert np.allclose(scores["density"], density, rtol=1e-8, atol=1e-6)
    entropies = scipy.stats.entropy(scipy.special.softmax(joint, 1), axis=1)
    assert np.allclose(scores["gmm_entropy"], entropies, atol=1e-6)
    assert dim == 64 or entropies.std() > 0.01


def test_singular_covariances_get_a_small_jitter_and_healthy_ones_none():
    z, y = clusters((40, 50, 60), 6)
    dead = torch.cat([z, torch.zeros(len(z), 2)], 1)  # no variance at all in the last two
    with pytest.warns(match="singular: .* is added to all variances; shrinkage or more examples"):
        gaussians = fit(dead, y)
    variances = [np.var(dead[y == c].numpy(), axis=0, ddof=1).mean() for c in range(3)]
    assert gaussians.jitter == pytest.approx(1e-12 * np.mean(variances), rel=1e-9)
    points = dead[:20].clone()
    points[:10, 6:] = 1e-5
    rest = scipy.stats.norm(0, math.sqrt(gaussians.jitter)).logpdf(points[:, 6:]).sum(1)
    expected = scipy_joint(z, y, points[:, :6]) + rest[:, None]
    assert np.allclose(ddu.class_log_densities(gaussians, points), expected, rtol=1e-7)
    with pytest.warns(match="of a class is singular: the covariances are shrunk") as notes:
        assert ddu.fit_gaussians(dead, y, 3).jitter == 0 and len(notes) == 1
    scales = torch.tensor([1e-3, 1e-2, 1.0, 1.0, 10.0, 1e2], dtype=torch.float64)
    assert fit(z * scales, y).jitter == 0  # badly scaled, not singular


def test_what_has_no_covariance_is_refused_in_words():
    z, y = clusters((40, 5), 6)
    huge = z.clone()
    huge[3, 2] = 1e200
    for features, labels, classes, words in [
            (z, y + 1, 2, "labels must be in 0..1"), (z, y[:5], 2, "features, but labels [5]"),
            (z, y, 3, "class 2 has 0"), (0 * z, y, 2, "singular: its features are constant"),
            (huge, y, 2, "too large"), (huge * math.nan, y, 2, "NaN or infinity")]:
        text = refusal(ddu.fit_gaussians, features, labels, classes, False, kind=ValueError)
        assert words in text


@pytest.mark.parametrize("counts, dim", [((40, 12, 60), 10), ((6, 9), 15)])
def test_shrinkage_is_ledoit_and_wolfs(counts, dim):
    """Their covariances have the divisor n, ours n - 1."""
    z, y = clusters(counts, dim)
    gaussians = fit(z, y, shrinkage=True)
    points = 4 * torch.randn(20, dim, dtype=torch.float64)
    ours = ddu.class_log_densities(gaussians, points) - gaussians.log_prior
    for c, n in enumerate(counts):
        covariance, intensity = ledoit_wolf(z[y == c].numpy())
        peer = scipy.stats.multivariate_normal(z[y == c].mean(0), covariance * n / (n - 1))
        assert 0 < intensity < 1 and np.allclose(ours[:, c], peer.logpdf(points), rtol=1e-9)


# ---- Scores, decisions, schedules ---------------------------------------------------------------


def test_softmax_scores_equal_scipy():
    logits = torch.randn(50, 6) * 4
    for temperature in (1.0, 2.5):
        scaled = logits.double().numpy() / temperature
        probs = scipy.special.softmax(scaled, 1)
        scores = ddu.softmax_scores(logits, temperature)
        assert np.allclose(scores["total"], scipy.stats.entropy(probs, axis=1), atol=1e-12)
        assert np.allclose(scores["max_prob"], probs.max(1), atol=1e-12)
        assert np.allclose(scores["energy"], scipy.special.logsumexp(scaled, 1), atol=1e-12)


def test_large_values_of_certainties_and_small_ones_of_uncertainties_mean_in_distribution():
    sides = dict.fromkeys(("density", "max_prob", "energy"), "id")
    sides |= dict.fromkeys(("gmm_entropy", "total", "epistemic"), "ood")
    assert {score.removesuffix("_scaled") for score in ddu.LARGER_MEANS} == sides.keys()
    for score, side in ddu.LARGER_MEANS.items():
        assert side == sides[score.removesuffix("_scaled")]


def test_low_density_is_ood_whatever_the_entropy():
    density = torch.tensor([5.0, 5.0, -5.0, -5.0, 1.0]).double()
    entropy = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    assert ddu.decide(density, entropy, 1.0, 0.5).tolist() == [0, 1, 2, 2, 0]
    val_density = torch.tensor([-6.0, 0.0, 1.0, 2.0]).double()
    columns = ddu.decision_columns(density, entropy, val_density, ddu.Thresholds(0.0, 0.5))
    assert columns["density_percentile"].tolist() == [100, 100, 25, 25, 50]
    assert columns["decision"] == ["in_distribution", "ambiguous", "ood", "ood", "in_distribution"]


def test_thresholds_interpolate_and_a_note_says_what_few_images_mean():
    """Of 36 images the 1 % quantile was the minimum, and called clean what it should have told."""
    val_density = torch.arange(36).double()
    args = options(density_quantile=0.01, entropy_quantile=0.8, entropy_threshold=None)
    with pytest.warns(match="come from only 36 held-out examples: of known inputs") as found:
        thresholds = ddu.choose_thresholds(val_density, torch.linspace(0, 1, 11), args)
    assert thresholds == pytest.approx((0.35, 0.8))
    # By 20,000 simulations of 36 uniform draws, between 0.4 and 10.7 % are below the quantile.
    assert "between 0.2 and 11.5 % will be called ood" in str(found[0].message)
    args = options(density_quantile=0.05, entropy_threshold=0.5)
    assert ddu.choose_thresholds(torch.arange(100).double(), None, args) == (4.95, 0.5)


def test_learning_rates():
    args = options()
    steps = [352 * epoch + place for epoch in (0, 149, 150, 249, 250, 349) for place in (0, 351)]
    found = [ddu.learning_rate(step, 352, args) for step in steps]
    assert found == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 4, rel=1e-12)
    args = options(schedule="one_cycle", lr=0.2, epochs=5)
    rates = np.array([ddu.learning_rate(step, 20, args) for step in range(100)])
    assert rates.argmax() == 20 and rates[20] == pytest.approx(0.2)
    assert np.allclose(np.diff(rates[:21]), 0.2 / 21) and rates[0] == pytest.approx(0.2 / 21)
    assert np.allclose(np.diff(rates[20:]), -0.2 / 80) and rates[99] == pytest.approx(0.2 / 80)


def test_ensembles_average_probabilities():
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(2, 40, 3))                           # [M, N, K]
    # The mean of these two has class 0 first, the mean of their logits class 1.
    logits[:, 0] = np.log([[0.98, 0.01, 0.01], [0.001, 0.5, 0.499]])
    outputs = [ddu.Outputs(torch.tensor(member), None, None, 1.0) for member in logits]
    temperatures = [0.7, 3.0]
    predictions = ddu.predict_by_ensemble(outputs, temperatures)
    for ending, divisors, log_probs in (("", [1.0, 1.0], predictions.log_probs),
                                        ("_scaled", temperatures, predictions.scaled_log_probs)):
        # published code: each member by its own temperature, then the mean of the probabilities
        probs = scipy.special.softmax(logits / np.reshape(divisors, (2, 1, 1)), 2)
        mean = probs.mean(0)
        assert np.allclose(log_probs.exp(), mean, rtol=1e-9)
        total = scipy.stats.entropy(mean, axis=1)
        epistemic = total - scipy.stats.entropy(probs, axis=2).mean(0)
        assert np.allclose(predictions.scores[f"total{ending}"], total, rtol=1e-9)
        assert np.allclose(predictions.scores[f"epistemic{ending}"], epistemic, atol=1e-9)


# ---- Runs ---------------------------------------------------------------------------------------

LOAD = data.load
ROWS = {"train": 1100, "test": 200, "ood": 200}


@pytest.fixture(scope="module", autouse=True)
def few_rows():
    """In this process, embedded sets are cut short."""
    def load_few(name, split, *args, **more):
        dataset = LOAD(name, split, *args, **more)
        if name not in data.EMBEDDED:
            return dataset
        both = name == "dirty_glyphs" and split == "test"
        limit = 400 if both else ROWS[split]
        return dataset.select(torch.arange(limit) * len(dataset) // limit)

    few_parts = ddu.Parts("glyphs", "glyphs_ambiguous", 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", load_few)
        patch.setitem(ddu.PARTS, "dirty_glyphs", few_parts)
        yield


def row_of(rows, **keys):
    """The only row with these values; `against` is None where it is not given."""
    keys = {"against": None, **keys}
    [row] = [r for r in rows if keys.items() <= {"against": None, **r}.items()]
    return row


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def column(rows, name):
    return np.array([float(row[name]) for row in rows])


def assert_close_rows(ours, theirs, tolerance=0.0):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"jitter", "ms"}:
            if isinstance(a[key], float):
                assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), key
            else:
                assert a[key] == b[key], key


@pytest.fixture(scope="module")
def story(few_rows, tmp_path_factory):
    """The default data set and network, narrow and short: (options, run directory, rows)."""
    out = tmp_path_factory.mktemp("story")
    options = ["--out-dir", str(out), "--width", "0.1", "--epochs", "4", "-b", "64", *CPU]
    rows = ddu.main(options)
    return options, out / "ddu" / "dirty_glyphs-resnet18-w0.1-sn3-seed1", rows


def test_the_story_leaves_its_files_and_its_pictures(story):
    _, folder, rows = story
    assert {path.name for path in folder.iterdir()} == {
        "options.json", "seed1.csv", "seed1.pt", "results.json", "results.csv", ".lock",
        "uncertainty.png", "training.png"}
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            greys = set(image.convert("L").resize((64, 32)).tobytes())
            assert image.width > 500 and len(greys) > 10, picture  # not a blank page
    assert strict_json(folder / "results.json")["rows"] == rows


def test_the_storys_rows(story):
    whole, clean, odd, far = "dirty_glyphs", "glyphs", "glyphs_ambiguous", "glyphs_letters"
    rows = {(row["set"], row.get("against")): row for row in story[2]}
    assert list(rows) == [(whole, None), (clean, None), (odd, None), (whole, far), (clean, far),
                          (clean, odd)]
    for (name, against), row in rows.items():
        assert (row["method"], row["seed"], row["n"]) == ("DDU", 1, 400 if name == whole else 200)
        if against:
            fractions = [row[f"against_fraction_{region}"] for region in ddu.REGIONS]
            assert sum(fractions) == pytest.approx(1)
            continue
        correct = 0
        for region in ddu.REGIONS:  # fractions had the noise of float32
            assert row[f"fraction_{region}"] == row[f"n_{region}"] / row["n"]
            correct += row[f"n_{region}"] * (row[f"accuracy_{region}"] or 0) / row["n"]
        assert correct == pytest.approx(row["accuracy"])
    mean = (rows[clean, None]["accuracy"] + rows[odd, None]["accuracy"]) / 2
    assert rows[whole, None]["accuracy"] == pytest.approx(mean)
    # paper: density finds letters, where entropy fails; entropy finds ambiguous digits
    assert rows[whole, far]["auroc_density"] > rows[whole, far]["auroc_total"] + 0.2
    assert rows[clean, odd]["auroc_total"] > rows[clean, odd]["auroc_density"]
    # ten Gaussians of 48 features, and float32 weights
    net = common.load_tensors(story[1] / "seed1.pt")["net"]
    gaussians = 8 * (10 * 48 * 48 + 10 * 48 + 10)
    assert rows[whole, None]["bytes"] == gaussians + sum(t.nbytes for t in net.values())


def test_eval_repeats_the_storys_table_and_predicts_any_set(story, monkeypatch, capsys):
    options, folder, rows = story
    seen = []
    fit_temperature = common.fit_temperature
    monkeypatch.setattr(common, "fit_temperature",
                        lambda *args: seen.append(args) or fit_temperature(*args))
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    assert_close_rows(ddu.main([*options, "--eval", "--no-plot", "--predict", "glyphs_letters"]),
                      rows)
    [(logits, labels)] = seen
    row = row_of(rows, set="dirty_glyphs")
    assert len(labels) > 100 and row["temperature"] == fit_temperature(logits, labels) != 1
    # The held-out examples of the last epoch's log are these.
    last = read_csv(folder / "seed1.csv")[-1]
    assert float(last["val_accuracy"]) == pytest.approx(common.accuracy(logits, labels), abs=1e-6)
    assert float(last["val_nll"]) == pytest.approx(
        F.cross_entropy(logits, labels).item(), rel=1e-4)
    letters = read_csv(folder / "predictions.csv")
    pair = row_of(rows, set="dirty_glyphs", against="glyphs_letters")
    assert [letter["index"] for letter in letters] == [str(i) for i in range(200)]
    # The fractions, and the probabilities and the entropy that decides, are those after scaling.
    decisions = np.array([letter["decision"] for letter in letters])
    far_out = column(letters, "log_density") < row["density_threshold"]
    ambiguous = column(letters, "total") > row["entropy_threshold"]
    expected = np.where(far_out, "ood", np.where(ambiguous, "ambiguous", "in_distribution"))
    assert decisions.tolist() == expected.tolist()
    for region in ddu.REGIONS:
        assert np.mean(decisions == region) == pytest.approx(pair[f"against_fraction_{region}"])
    assert column(letters, "temperature") == pytest.approx(row["temperature"], rel=1e-5)
    assert {letter["epistemic"] for letter in letters} == {""}  # nothing in nats, of one network
    # What a region promises: how many of its images are right.
    report = capsys.readouterr().out
    line = (f"  in_distribution {row['n_in_distribution']:6} images, of which "
            f"{row['accuracy_in_distribution']:.1%} are classified correctly")
    assert "seed 1, decisions on the 400 test images of dirty_glyphs:" in report and line in report


@pytest.mark.parametrize("far", [{}, {"far": torch.full((50,), -1e6)}])
def test_the_panel_of_densities_is_filled_and_far_ones_are_at_its_left_edge(far):
    """It was half empty, and its title spoke of OOD sets where there were none."""
    figures = []
    run = SimpleNamespace(save_figure=lambda figure, name: figures.append(figure))
    densities = {"x": torch.linspace(90, 110, 50)} | far
    predictions = {name: ddu.Predictions(None, None, None, {
        "density": density.double(), "total_scaled": torch.linspace(0, 1, 50).double()})
        for name, density in densities.items()}
    splits = SimpleNamespace(test=SimpleNamespace(name="x"), ood=dict.fromkeys(far))
    ddu.plot_uncertainty(predictions, ddu.Thresholds(92.0, 0.5), splits, options(), run)
    middle = figures[0].axes[1]
    left, right = middle.get_xlim()
    assert middle.get_title() == ""
    if far:
        assert left < 92 - 1.4 * (110 - 92) and middle.patches[60].get_height() > 0.99
    else:
        assert 88 < left < 90 and 110 < right < 112


def test_what_could_not_be_fitted_after_training_is_refused_before_it():
    args = options(model="resnet18", width=0.05)
    images = torch.zeros(119, 1, 8, 8)
    train = data.ImageSet("x", images, torch.arange(119) % 3, 3, (0.0,), (1.0,))
    ddu.check_network(train, args)
    fourth = dataclasses.replace(train, num_classes=4, classes=("ant", "bee", "cow", "dog"))
    text = refusal(ddu.check_network, fourth, args)
    assert text == "class dog of x has 0 training example(s), but its Gaussian needs two"


@pytest.fixture
def base(small_data, tmp_path):
    """A run that takes a second: SN, batch norm, augmentation, momentum, and a last batch of one
    image, none for the second of two processes. 3 epochs of 4 steps, in runs/ddu/run."""
    return ["--dataset", "tiny_imagenet", "--data-dir", str(small_data), "--model", "resnet18",
            "--width", "0.03", "-b", "36", "--epochs", "3", "--lr", "0.05", "--image-size", "32",
            "--out-dir", str(tmp_path / "runs"), "--name", "run", "--no-plot", *CPU]


@pytest.fixture
def small(base, small_data):
    """The same with an OOD set."""
    return [*base, "--ood", f"folder:{small_data}/odd"]


def test_killed_and_restarted_equals_uninterrupted(small, tmp_path):
    small = [*small, "-b", "18", "--model", "wide_resnet", "--limit-steps", "2"]  # it has dropout
    runs = tmp_path / "runs" / "ddu"
    rows = ddu.main([*small, "--name", "calm"])
    path = runs / "run" / "seed1.pt"
    child = Child(tmp_path, run_ddu, *small)
    wait_for(lambda: path.exists() or not child.process.is_alive(), what="epoch")
    time.sleep(0.05)  # into the next epoch
    child.process.kill()
    child.process.join()
    assert child.status < 0 and len(common.load_tensors(path)["history"]) < 3, child.stderr
    assert_close_rows(ddu.main(small), rows)
    assert_same_checkpoints(path, runs / "calm" / "seed1.pt")


def test_two_processes_that_share_no_disk_equal_one(small, tmp_path):
    """In float64, lest batch norm and leaky ReLU blow rounding up."""
    small = [*small, "--epochs", "1", "--no-mod", "--ensemble", "2"]

    def each(rank):
        return ["--out-dir", str(tmp_path / f"machine{rank}")]

    children = [Child(tmp_path, run_ddu_in_float64, *small, *each(9), rank=9),
                *start_ranks(tmp_path, 2, run_ddu_in_float64, *small, each=each)]
    for child in children:
        assert child.wait().status == 0 and "Traceback" not in child.stderr, child.stderr
    one = tmp_path / "machine9" / "ddu" / "run"
    two = tmp_path / "machine0" / "ddu" / "run"
    ours = common.load_tensors(one / "seed1.pt")["net"]
    theirs = common.load_tensors(two / "seed1.pt")["net"]
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-10), key
    ours = strict_json(one / "results.json")
    theirs = strict_json(two / "results.json")
    assert_close_rows(ours["rows"], theirs["rows"], 1e-4)


# ---- Own data and own networks ------------------------------------------------------------------


def write_images(folder, count, tint, size=20):
    rng = np.random.default_rng(tint)
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(tint, tint + 120, (size, size + i % 3, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Three classes of 130 training images, of which 13 validate; the folder has a name of ours."""
    folder = tmp_path_factory.mktemp("own") / "dirty_glyphs"
    for c, name in enumerate(("cat", "dog", "eel")):
        write_images(folder / "train" / name, 44 - (c > 0), 60 * c)
        write_images(folder / "test" / name, 4 + c, 60 * c + 1)
    return folder


@pytest.fixture
def own_run(own, tmp_path):
    return ["--dataset", f"folder:{own}", "--out-dir", str(tmp_path / "runs"), "--name", "run",
            "--no-plot", *CPU]


# Each evaluation option of a run, and a value that changes its result.
CHANGES = {"ood": "--ood nonsense", "data_dir": "--data-dir DATA", "ensemble": "--ensemble 1",
           "shrinkage": "--no-shrinkage", "density_quantile": "--density-quantile 0.5",
           "entropy_threshold": "--entropy-threshold 0.01",
           "entropy_quantile": "--entropy-quantile 0.5"}


@pytest.fixture(scope="module")
def evaluated(own, small_data, tmp_path_factory):
    """(options, folder of runs, rows, predictions) of an ensemble and a published OOD set."""
    out = tmp_path_factory.mktemp("evaluated")
    line = ("--width 0.05 --epochs 1 --limit-steps 2 --ensemble 2 --ood tiny_imagenet --no-plot "
            f"--dataset folder:{own} --data-dir {small_data} --out-dir {out}").split()
    line += [*CPU, "--predict", f"folder:{own}/test", "--name"]
    rows = ddu.main([*line, "base"])
    return line, out / "ddu", rows, read_csv(out / "ddu" / "base" / "predictions.csv")


def test_own_images_have_names_of_classes_and_predictions_of_an_ensemble(evaluated):
    *_, rows, predictions = evaluated
    assert [(row["method"], row["set"], row.get("against"), row["n"]) for row in rows] == [
        ("DDU", "dirty_glyphs", None, 15), ("DDU", "dirty_glyphs", "tiny_imagenet", 15),
        ("ensemble of 2", "dirty_glyphs", None, 15),
        ("ensemble of 2", "dirty_glyphs", "tiny_imagenet", 15)]
    assert [p["label"] for p in predictions] == ["cat"] * 4 + ["dog"] * 5 + ["eel"] * 6
    assert predictions[5]["file"] == "dog/1.png"
    for row, ending in zip(rows[::2], ("", "_ensemble")):
        right = [p["label"] == p[f"predicted{ending}"] for p in predictions]
        assert np.mean(right) == pytest.approx(row["accuracy_scaled"])
    assert column(predictions, "epistemic_ensemble").max() > 1e-3  # the members differ
    # The decision is that of the network whose entropy stands beside it.
    is_ood = column(predictions, "log_density") < rows[0]["density_threshold"]
    is_ambiguous = column(predictions, "total") > rows[0]["entropy_threshold"]
    expected = np.where(is_ood, "ood", np.where(is_ambiguous, "ambiguous", "in_distribution"))
    # The file has six digits.
    is_clear = ~np.isclose(column(predictions, "total"), rows[0]["entropy_threshold"], rtol=1e-4)
    decisions = np.array([p["decision"] for p in predictions])
    assert (decisions == expected)[is_clear].all() and is_clear.sum() > 5


@pytest.mark.parametrize("option", CHANGES)
def test_a_changed_evaluation_option_gives_the_result_of_a_fresh_directory(
        evaluated, option, small_data, tmp_path):
    line, runs, rows, _ = evaluated
    # Those of active learning and of --features have tests of their own.
    others = {"score", "active_learning", "max_training_samples"}
    assert set(common.options(options(), "evaluation")) == CHANGES.keys() | others
    if option == "data_dir":
        shutil.copytree(small_data, tmp_path / "other")
        images = tmp_path / "other" / "tiny-imagenet-200" / "val" / "images"
        shutil.copy(images / "val_3.png", images / "val_0.png")
    change = CHANGES[option].replace("DATA", str(tmp_path / "other")).split()
    again = ddu.main([*line, "base", "--eval", *change])
    assert_close_rows(again, ddu.main([*line, option, *change]))
    predictions = read_csv(runs / "base" / "predictions.csv")
    assert predictions == read_csv(runs / option / "predictions.csv")
    assert [{**row, "ms": 0} for row in again] != [{**row, "ms": 0} for row in rows]


@pytest.mark.parametrize("padding", [dict(padding=1, padding_mode="circular"),
                                     dict(padding="same")])
def test_padding_whose_norm_would_be_wrong_is_refused_before_there_is_a_directory(
        own_run, tmp_path, monkeypatch, padding):
    def mine(args, shape):
        return [nn.Conv2d(shape[0], 4, 3, **padding), nn.AdaptiveAvgPool2d(1), nn.Flatten()], 4

    monkeypatch.setitem(ddu.NETWORKS, "mine", mine)
    text = refusal(ddu.main, [*own_run, "--model", "mine"])
    assert text.startswith("--model mine: spectral normalisation needs zero padding by a number")
    assert not (tmp_path / "runs").exists()


SHUFFLENET = "torchvision/shufflenet_v2_x0_5"


def test_own_images_by_the_frozen_backbone_of_a_network_of_other_classes(own, own_run, tmp_path):
    """The user's file has 1000 classes; only a new head is trained."""
    net = torchvision.models.shufflenet_v2_x0_5(num_classes=1000)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    options = [*own_run, "--model", SHUFFLENET, "--weights", str(tmp_path / "net.pt"), "--freeze",
               "--image-size", "33", "--epochs", "1", "--limit-train", "36", "--workers", "0"]
    [row] = ddu.main([*options, "--predict", f"folder:{own}/test"])
    # The time and the memory of the frozen backbone are part of those of a prediction.
    weights = sum(tensor.nbytes for tensor in net.state_dict().values())
    gaussians = 8 * (3 * 1024 * 1024 + 3 * 1024 + 3)
    assert row["bytes"] == pytest.approx(weights - 997 * 4 * 1025 + gaussians, rel=1e-3)
    folder = tmp_path / "runs" / "ddu" / "run"
    state = common.load_tensors(folder / "seed1.pt")["net"]
    assert state["head.weight"].shape == (3, 1024) and len(state) == 2
    rows = read_csv(folder / "predictions.csv")
    assert np.mean([r["label"] == r["predicted"] for r in rows]) == pytest.approx(row["accuracy"])
    # Other weights in a file of the same name.
    net.conv1[0].weight.data.mul_(1.1)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert "another file of --weights" in refusal(ddu.main, [*options, "--eval"])


def test_a_pretrained_network_on_streamed_images(tmp_path, capsys):
    for c, name in enumerate(("n01", "n02", "n03")):
        write_images(tmp_path / "imagenet" / "train" / name, 4, 60 * c, size=70)
        write_images(tmp_path / "imagenet" / "val" / name, 4, 60 * c, size=70)
    write_images(tmp_path / "odd", 5, 20, size=70)
    net = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    rows = ddu.main(["--dataset", "imagenet", "--data-dir", str(tmp_path), "--model",
                     SHUFFLENET, "--weights", str(tmp_path / "net.pt"), "--image-size", "72",
                     "-b", "8", "--workers", "0", "--out-dir", str(tmp_path / "runs"),
                     "--ood", f"folder:{tmp_path}/odd", "--eval", "--no-plot", *CPU])
    # The network has seen all training images: the thresholds come from a tenth of the test set.
    assert row_of(rows, set="imagenet")["n"] == 11
    assert 0 <= row_of(rows, against="odd")["auroc_density"] <= 1
    assert "come from a tenth of the test set, which is not evaluated" in capsys.readouterr().out


@pytest.fixture
def features(tmp_path, monkeypatch):
    """Options for train.npz of two classes; near.npz is like it, far.npz is not."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    classes = np.array(["ash", "oak"])

    def draw(y):
        return rng.laplace(size=(len(y), 3)) * [1, 2, 0.1] + 0.4 * y[:, None]

    for name, count in (("train", 1100), ("near", 200)):
        labels = rng.integers(0, 2, count)
        files = np.array([f"{i}.png" for i in range(count)])
        np.savez(f"{name}.npz", features=draw(labels), labels=classes[labels], names=files)
    np.savez("far.npz", features=draw(np.ones(50)) + 30)
    return ["--features", "train.npz", "--out-dir", "runs", *CPU, "--score"]


def test_features_of_ones_own(features, tmp_path, capsys):
    """Their confidence was 0.99 on average for rows of which half were wrong: now it is scaled."""
    rows = ddu.main([*features, "near.npz", "far.npz"])
    assert capsys.readouterr().out.startswith(
        "train.npz: 2 classes, 990 fitted and 110 held-out rows of 3 features\nddu: seed 1, ")
    run = tmp_path / "runs" / "ddu" / "features-train-seed1"
    train = np.load("train.npz")
    z = torch.tensor(train["features"])
    y = torch.tensor(train["labels"] == "oak").long()
    kept, held_out = data.class_split(y, 1)
    val_joint = scipy_joint(z[kept], y[kept], z[held_out])
    val_density = scipy.special.logsumexp(val_joint, 1)
    threshold = np.quantile(val_density, 0.05)
    temperature = common.fit_temperature(val_joint, y[held_out])
    assert temperature > 1.1
    for name in ("near", "far"):
        arrays = np.load(f"{name}.npz")
        joint = scipy_joint(z[kept], y[kept], torch.tensor(arrays["features"]))
        density = scipy.special.logsumexp(joint, 1)
        posterior = scipy.special.softmax(joint / temperature, 1)
        scores = read_csv(run / f"scores_{name}.csv")
        assert column(scores, "log_density") == pytest.approx(density, rel=1e-5)  # six digits
        assert column(scores, "confidence") == pytest.approx(posterior.max(1), rel=1e-5)
        assert column(scores, "temperature") == pytest.approx(temperature, rel=1e-5)
        names = np.array(["ash", "oak"])[posterior.argmax(1)]
        assert [score["predicted"] for score in scores] == names.tolist()
        percentile = 100 * (val_density < density[:, None]).mean(1)
        assert column(scores, "density_percentile") == pytest.approx(percentile, rel=1e-5)
        assert [s["decision"] == "ood" for s in scores] == (density < threshold).tolist()
        row = row_of(rows, set=name)
        assert row["fraction_ood"] == np.mean(density < threshold)
        if name == "near":
            assert scores[7]["file"] == "7.png" and row["n_labelled"] == 200
            label_probs = posterior[np.arange(200), (arrays["labels"] == "oak").astype(int)]
            assert row["nll_scaled"] == pytest.approx(-np.log(label_probs).mean())
    far = row_of(rows, set="near", against="far")
    assert far["n"] == 200 and far["auroc_density"] == 1


def test_scored_rows_that_were_fitted_are_told(features, recwarn):
    train = np.load("train.npz")["features"]
    near = np.load("near.npz")["features"]
    np.savez("both.npz", features=np.concatenate([near[:80], train[100:220]]))
    ddu.main([*features, "both.npz", "near.npz"])
    [note] = [str(note.message) for note in recwarn if "training features" in str(note.message)]
    assert note.startswith("120 of the 200 rows of both are training features: their densities")


def test_singular_features_are_shrunk_so_that_noise_is_ood(features):
    """39 examples a class of 64 features. The densities were near -1e13, and noise was clean."""
    rng = np.random.default_rng(0)
    labels = np.arange(156) % 4
    centres = 3 * rng.normal(size=(4, 64))
    np.savez("train.npz", features=centres[labels] + rng.normal(size=(156, 64)), labels=labels)
    np.savez("near.npz", features=centres[labels] + rng.normal(size=(156, 64)))
    np.savez("far.npz", features=8 * rng.normal(size=(156, 64)))
    with pytest.warns(match="smallest class has 35 examples of 64 features: the covariances are"):
        rows = ddu.main([*features, "near.npz", "far.npz"])
    assert row_of(rows, set="far")["fraction_ood"] == 1
    assert row_of(rows, against="far")["auroc_density"] == 1
    near = row_of(rows, set="near")
    assert near["fraction_ood"] < 0.3 and near["jitter"] == 0
    with pytest.warns(match="singular: .* is added to all variances") as found:
        ddu.main([*features, "near.npz", "--no-shrinkage"])
    assert not any("are shrunk" in str(note.message) for note in found)


def test_features_that_cannot_be_fitted_or_scored_are_one_line(features, tmp_path, recwarn):
    train = dict(np.load("train.npz"))
    (tmp_path / "other").mkdir()
    np.savez("other/near.npz", features=np.ones((4, 3)))
    gap = dict(train, labels=2 * (train["labels"] == "oak"))
    few = {name: array[:9] for name, array in train.items()}
    for arrays, more, words in [
            (train, "other/near.npz", "two files have the name near"),
            (gap, "", "class 1 has 0 example"), (few, "", "at least 10 are needed")]:
        np.savez("train.npz", **arrays)
        assert words in refusal(ddu.main, [*features, "near.npz", *more.split()])
    assert not recwarn.list and not (tmp_path / "runs").exists()


# ---- Active learning ----------------------------------------------------------------------------


@pytest.fixture
def few(base):
    """Active learning on the small set: 8 and 10 labels, one step an epoch."""
    return [*base, "--epochs", "1", "--limit-steps", "1", "--num-initial-samples", "8",
            "--max-training-samples", "10", "--acquisition-batch-size", "2", "--active-learning"]


def test_active_learning_resumes_and_does_not_reuse_other_options(few, tmp_path, monkeypatch):
    options = [*few, "density", "random", "--runs", "2"]
    folder = tmp_path / "runs" / "ddu" / "run"
    rows = ddu.main([*options, "--plot"])
    results = strict_json(folder / "results.json")
    assert results["rows"] == rows and len(rows) == 4
    labelled = []
    for row in rows:
        curve = results["accuracies"][row["method"]][row["seed"] - 1]
        assert row["accuracy"] == curve[-1] and len(curve) == 2 and row["n"] == 20
        assert row["accuracy_mean"] == pytest.approx(np.mean(curve))
        state = common.load_tensors(folder / f"{row['method']}-seed{row['seed']}-10.pt")
        labelled.append(state["inputs"]["labelled"])
        assert len(set(labelled[-1])) == 10
        # published code: all runs and acquisition functions begin with the same rows of one pool
        assert labelled[-1][:8] == labelled[0][:8] and labelled[-1] not in labelled[:-1]
    assert (folder / "active_learning.png").exists()
    (folder / "density-seed1-10.pt").unlink()  # as if killed
    assert "10 labels" in refusal(ddu.main, [*options, "--eval"])
    assert_close_rows(ddu.main(options), rows)
    assert "made with sn None (not True)" in refusal(ddu.main, [*options, "--sn"])
    with monkeypatch.context() as patch:
        patch.setattr(ddu, "train", None)
        assert ddu.main([*options, "--eval"]) == rows
    diverging = [*few, "entropy", "--name", "far", "--lr", "1e20", "--limit-steps", "3"]
    assert "training diverged; use a lower --lr" in refusal(ddu.main, diverging)


@pytest.mark.parametrize("change", ["--active-learning random pe", "--max-training-samples 60",
                                    "--shrinkage", "--ensemble 3"])
def test_changed_options_of_active_learning_give_the_result_of_a_fresh_directory(few, change,
                                                                                 tmp_path):
    line = [*few, *("density pe --ensemble 2 --num-initial-samples 40 --max-training-samples 50 "
                    "--acquisition-batch-size 10").split()]
    ddu.main(line)
    changed = [*line, *change.split()]
    assert_close_rows(ddu.main(changed), ddu.main([*changed, "--name", "fresh"]))
    for path in (tmp_path / "runs/ddu/fresh").glob("*.pt"):
        same = common.load_tensors(tmp_path / "runs/ddu/run" / path.name)
        assert torch.equal(common.load_tensors(path)["chosen"], same["chosen"])


def test_a_changed_test_set_changes_the_accuracies_of_active_learning(own, own_run, tmp_path):
    """Those of the old 15 images were repeated for the new 10."""
    shutil.copytree(own, tmp_path / "own")
    line = [*own_run, "--dataset", f"folder:{tmp_path}/own", "--active-learning", "random",
            "--epochs", "1", "--limit-steps", "1", "--width", "0.05", "--num-initial-samples", "6",
            "--max-training-samples", "8"]
    [row] = ddu.main(line)
    for image in (tmp_path / "own/test/eel").glob("[1-5].png"):
        image.unlink()
    [again] = ddu.main(line)
    [fresh] = ddu.main([*line, "--fresh"])
    assert (row["n"], again["n"]) == (15, 10)
    assert again == fresh and again["accuracy"] != row["accuracy"]


def test_active_learning_takes_low_densities_and_high_uncertainties(few, monkeypatch):
    """With the published networks: -sn -mod for the density, and neither for the others."""
    seen = []
    step = ddu.acquisition_score

    def note_score(nets, pool, labelled, acquisition, args):
        assert bool(modules(nets[0], ddu.SoftSpectral)) == (acquisition == "density")
        assert bool(modules(nets[0], nn.LeakyReLU)) == (acquisition == "density")
        assert len(nets) == (2 if acquisition in ("pe", "mi") else 1)
        score = step(nets, pool, labelled, acquisition, args)
        members = [ddu.compute_outputs(net, pool.images, args) for net in nets]
        probs = np.stack([member.logits.double().softmax(1) for member in members])
        expected = scipy.stats.entropy(probs.mean(0), axis=1)
        if acquisition == "mi":
            expected = expected - scipy.stats.entropy(probs, axis=2).mean(0)
        if acquisition == "density":
            z = members[0].features
            gaussians = fit(z[labelled], pool.images.labels[labelled])
            expected = -ddu.class_log_densities(gaussians, z).logsumexp(1)
            assert expected.unique().numel() > 100  # no ties
        assert len(score) == 121 and np.allclose(score, expected, rtol=1e-9, atol=1e-12)
        seen.append((acquisition, labelled, score.clone()))
        score[labelled] = math.inf  # never again, whatever it is
        return score

    monkeypatch.setattr(ddu, "acquisition_score", note_score)
    names = ["density", "entropy", "pe", "mi"]
    ddu.main([*few, *names, "--ensemble", "2"])
    assert [name for name, *_ in seen] == [name for name in names for _ in (8, 10)]
    for (_, before, score), (_, after, _) in zip(seen[::2], seen[1::2]):
        score[before] = -math.inf
        assert set(after[8:].tolist()) == set(score.topk(2).indices.tolist())


def test_active_learning_with_ambiguous_examples_counts_them_by_their_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(ddu, "train", lambda *_: None)  # the protocol, without training
    options = ["--active-learning", "random", "--model", "lenet", "--out-dir", str(tmp_path), *CPU]
    [row] = ddu.main([*options, "--max-training-samples", "31", "--name", "31"])
    results = strict_json(tmp_path / "ddu" / "31" / "results.json")
    sizes = [20, 25, 30, 31]
    assert results["sizes"] == sizes and len(results["accuracies"]["random"][0]) == 4
    pool = ddu.load_pool(ddu.parse_args(options))
    assert pool.ambiguous.tolist() == [False] * 1000 + [True] * 1100
    assert pool.test.name == "glyphs" and len(pool.test) == 200
    assert torch.bincount(pool.images.labels[pool.labelled_first]).tolist() == [2] * 10
    [shares] = results["ambiguous_shares"]["random"]
    for size, share in zip(sizes, shares):
        state = common.load_tensors(tmp_path / "ddu" / "31" / f"random-seed1-{size}.pt")
        labelled = torch.tensor(state["inputs"]["labelled"])
        assert torch.equal(labelled[:20], pool.labelled_first) and len(labelled) == size
        assert share == pytest.approx(pool.ambiguous[labelled].double().mean().item())
    assert 0.2 < share < 0.8 and row["ambiguous_share"] == share


# ---- Bad input ----------------------------------------------------------------------------------

FAST = "--dataset glyphs --model lenet --epochs 1 --limit-steps 1"
LEARN_FAST = f"--dataset glyphs --model lenet {LEARN}"
MISUSE = {
    f"{FAST} --no-sn --ood glyphs": "called glyphs", f"{FAST} -sn": "lenet",
    f"{FAST} --no-sn -mod": "lenet", "--features x.npz": "--score", "--score x.npz": "--features",
    "--features x --score y": "not found: x",
    f"{LEARN_FAST} --num-initial-samples 25": "samples 25",
    f"{LEARN_FAST} --max-training-samples 10": "samples 10",
    f"{LEARN_FAST} --max-training-samples 9001": "9001",
    "--dataset dirty_glyphs --ood folder:x/glyphs_ambiguous": "rename the set",
    f"{LEARN} --model torchvision/resnet18": "from scratch",
    "--dataset tiny_imagenet --model lenet --no-sn --no-mod": "--model lenet fails on images"}


@pytest.mark.parametrize("line", MISUSE)
def test_a_story_of_misuse_is_one_line(line, small_data, tmp_path, monkeypatch):
    monkeypatch.setattr(ddu.torch.optim.SGD, "step", None)  # no training
    argv = [*line.split(), "--out-dir", str(tmp_path / "runs"), "--data-dir", str(small_data)]
    text = refusal(ddu.main, [*argv, "--no-plot", *CPU])
    assert re.search(MISUSE[line], text), text
    assert not (tmp_path / "runs").exists()


def test_other_options(small, tmp_path):
    more = "--amp bf16 --opt adam --lr 0.001 --schedule constant --no-augment --shrinkage"
    rows = ddu.main([*small, *more.split(), "--epochs", "1", "--limit-steps", "2"])
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert len(numbers) > 40 and all(math.isfinite(number) for number in numbers)
    state = common.load_tensors(tmp_path / "runs" / "ddu" / "run" / "seed1.pt")["net"]
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(small, features):
    for options, more in ((small, ["--eval"]), ([*features, "near.npz"], ["--name", "again"])):
        rows = ddu.main([*options, "--device", "cuda"])
        assert_close_rows(rows, ddu.main([*options, "--device", "cuda", *more]), 1e-3)
