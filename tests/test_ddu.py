"""ddu.py: operators as dense matrices, Gaussians by SciPy and scikit-learn; networks of
torchvision, whole runs a second time by hand.
"""

import copy
import csv
import gc
import json
import math
import shutil
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (Child, assert_equal_checkpoints, kill_after, run_ranks, run_script,
                      save_images)
from PIL import Image
from scipy import special, stats
from sklearn import covariance as sk_covariance, metrics as sk
from sklearn.linear_model import LogisticRegression
from torch import nn
from torchvision import models

import common
import data
import ddu


@pytest.fixture(scope="module", autouse=True)
def few_glyphs():
    """In this process, embedded sets have few images."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("glyphs", "glyphs_ambiguous", "glyphs_letters"):
            few = data.EMBEDDED[name]._replace(train_rows=300, test_rows=120)
            patch.setitem(data.EMBEDDED, name, few)
        data.load_embedded.cache_clear()
        yield
    data.load_embedded.cache_clear()


def parse(line):
    return ddu.parse_args([*line.split(), "--device", "cpu"])


def modules(net, kind):
    return [module for module in net.modules() if isinstance(module, kind)]


convolution = partial(nn.Conv2d, 4, bias=False)


def normalise_layer(layer, shape, coeff):
    """A normalised layer with new weights in float64, its raw weight, and its SoftSpectral."""
    torch.manual_seed(0)
    layer.reset_parameters()
    ddu.spectral_normalise(layer, shape, coeff)
    parametrization = layer.double().parametrizations.weight
    return layer, parametrization.original, parametrization[0]


@pytest.mark.parametrize("layer, shape, pixel", [
    (convolution(5, 3, padding=1), (4, 8, 8), None),
    (convolution(5, 3, stride=2, padding=1), (4, 7, 7), None),
    (convolution(8, (3, 5), padding=2, stride=2, groups=4), (4, 7, 6), None),
    (convolution(5, 3, dilation=(2, 1)), (4, 7, 8), None),
    (convolution(6, 1, groups=2, stride=2), (4, 8, 8), (4, 1, 1)),
    (nn.Linear(4, 5, False), (4,), (4,)), (nn.Linear(4, 5, False), (7, 4), (4,))], ids=str)
def test_sigma_is_the_norm_of_the_dense_operator(layer, shape, pixel):
    """Stride and zero padding included, by iterations v = A^T u, u = A v from the start."""
    layer, raw, sn = normalise_layer(layer, shape, 1e-3)
    eps = 0 if pixel else 1e-5  # of matrices, which act on a pixel or a token
    pixel = pixel or shape
    sn.coeff = math.inf
    basis = torch.eye(math.prod(pixel), dtype=torch.float64).view(-1, *pixel)
    a = (1 + eps) * layer.eval()(basis).detach().flatten(1).T.numpy()
    sn.coeff = 1e-3
    u = sn.u.flatten().numpy().copy()
    for _ in range(3):
        layer.train()(torch.randn(2, *shape, dtype=torch.float64))
        v = a.T @ u / np.linalg.norm(a.T @ u)
        u = a @ v / np.linalg.norm(a @ v)
    assert np.allclose(sn.v.flatten(), v, atol=1e-10)
    assert np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = raw / ((u @ a @ v) / 1e-3 + eps)  # of eval mode, without a power iteration
    torch.testing.assert_close(layer.eval().weight, effective, rtol=1e-9, atol=0)
    layer.train()
    sigmas = [1e-3 * ((raw / layer.weight).mean().item() - eps) for _ in range(200)]
    assert 0.99 <= sigmas[-1] / np.linalg.norm(a, 2) <= 1 + 1e-9


@pytest.mark.parametrize("coeff", [0.1, 1000.0])  # active or not: weights are never inflated
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(coeff):
    layer, raw, sn = normalise_layer(convolution(5, 3, padding=1, stride=2), (4, 5, 5), coeff)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    value = layer(x).square().sum()
    convolve = partial(F.conv2d, stride=2, padding=1)
    sigma = (sn.u.clone() * convolve(sn.v.clone(), raw)).sum()
    layer(x)  # changes u and v before the backward
    effective = raw / ((sigma / coeff).clamp(min=1) + 1e-5)
    gradients = [torch.autograd.grad(loss, raw)[0]
                 for loss in (value, convolve(x, effective).square().sum())]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_convolutions_and_linear_layers_are_normalised_and_others_are_named():
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 6, 2),
                        nn.Flatten(2), nn.Conv1d(6, 8, 1), nn.Linear(56, 4))  # of tokens [B, 8, 56]
    assert ddu.spectral_normalise(net, (1, 9, 8), 0.01) == ["2.weight", "4.weight"]
    assert len(modules(net, ddu.SoftSpectral)) == 2
    assert net.training
    assert net[1].num_batches_tracked == 0  # by the image that told the shapes
    weight = net.eval()[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net[0].weight, weight)  # float32 here, too


def gaussian_classes(counts, dim, seed=0):
    """Shuffled features [N, D], float64, of Gaussian classes with `counts` examples; labels [N]."""
    torch.manual_seed(seed)
    labels = torch.tensor(np.repeat(range(len(counts)), counts))[torch.randperm(sum(counts))]
    mixing = torch.eye(dim) + torch.randn(len(counts), dim, dim) / 2 / dim**0.5
    z = torch.randn(len(labels), 1, dim).double() @ mixing.double()[labels]
    return z[:, 0] + torch.randn(len(counts), dim)[labels], labels


def shrunk_covariance(z):
    """The covariance of scikit-learn's Ledoit and Wolf, which has the divisor n there."""
    return sk_covariance.ledoit_wolf(z)[0] * len(z) / (len(z) - 1)


sample_covariance = partial(np.cov, rowvar=False)


def scipy_joint(z, y, points, covariance=sample_covariance):
    """log N(z; mu_c, Sigma_c) + log n_c / N [N, K], in float64."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        gaussian = stats.multivariate_normal(rows.mean(0), covariance(rows))
        columns.append(gaussian.logpdf(points.double().numpy()) + np.log(len(rows) / len(z)))
    return np.stack(columns, 1)


@pytest.mark.parametrize("counts, dim, dtype, offset, shrinkage", [
    ((120, 260, 150), 16, torch.float64, 0.0, False), ((80, 90), 64, torch.float32, 0.0, False),
    ((50, 70), 8, torch.float64, 1e4, False), ((40, 9, 60), 15, torch.float32, 0.0, True)])
def test_densities_are_those_of_scipy_in_float64(counts, dim, dtype, offset, shrinkage):
    z, y = gaussian_classes(counts, dim)
    z = (z + offset).to(dtype)
    points = offset + 3 * torch.randn(90, dim, dtype=dtype)
    joint = scipy_joint(z, y, points, shrunk_covariance if shrinkage else sample_covariance)
    for ours in ddu.class_log_densities(z, y, len(counts), [points, points[:7]], shrinkage):
        assert np.allclose(ours, joint[:len(ours)], rtol=1e-8, atol=1e-6)


def test_unit_features_are_fitted_and_scored_at_length_one():
    z, y = gaussian_classes((80, 90), 6)
    lengths = z.square().sum(1, keepdim=True).sqrt()
    expected = scipy_joint(z / lengths, y, z / lengths)
    [ours] = ddu.class_log_densities(z, y, 2, [3 * z], unit_features=True)
    assert np.allclose(ours, expected, rtol=1e-8)


@pytest.mark.parametrize("count, factor", [(4, 1), (30, 0)])  # few rows; a feature that is always 0
def test_singular_covariances_get_the_smallest_jitter_that_helps_and_others_none(count, factor):
    for seed in range(20):
        z, y = gaussian_classes((count, 40), 5, seed)
        z[y == 0, 4] *= factor
        for c in (0, 1):
            gaussian = ddu.fit_gaussian(z[y == c], torch.tensor(0.5).log())
            added = gaussian.factor @ gaussian.factor.T - z[y == c].T.cov()
            jitter = [1e-12, 0][c] * z[y == c].var(0).mean().item()
            assert added.diagonal().mean().item() == pytest.approx(jitter, rel=0.02, abs=1e-15)


@pytest.mark.parametrize("counts", [(20, 30, 1), (20, 30, 0), (20, 30, 5)])
def test_a_class_without_two_different_examples_has_no_gaussian(counts):
    z, y = gaussian_classes(counts, 4)
    z[y == 2] = 7.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of PyTorch, for the covariance of one example
        with pytest.raises(ValueError, match="it has no two different examples, or NaN"):
            ddu.class_log_densities(z, y, 3, [z])


def test_matrices_of_one_class_are_alive_at_a_time(monkeypatch):
    z, y = gaussian_classes(range(10, 22), 9)
    points = torch.randn(9001, 9)  # more than one block
    cholesky = ddu.cholesky_with_jitter
    seen = []

    def count_entries(covariance):
        factor = cholesky(covariance)
        tensors = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor]
        seen.append(sum(t.numel() for t in tensors if t.shape[-2:] == (9, 9)))
        return factor

    monkeypatch.setattr(ddu, "cholesky_with_jitter", count_entries)
    _, ours = ddu.class_log_densities(z, y, 12, [z.float(), points])
    assert len(seen) == 12
    assert max(seen) <= 3 * 81  # a covariance, its factor, that before it
    assert np.allclose(ours[::97], scipy_joint(z, y, points[::97]), rtol=1e-6)


def test_a_data_set_alone_is_the_papers_recipe(capsys):
    paper = dict(coeff=3.0, opt="sgd", lr=0.1, weight_decay=5e-4, batch_size=128, epochs=350,
                 schedule="step", augment=True, shrinkage=False)
    learning = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                    ensemble=5, lr=1e-3, opt="adam", epochs=20, schedule="constant", subsample=1000)
    args = parse("--dataset cifar10")
    assert paper.items() <= vars(args).items()
    rates = [ddu.learning_rate(9 * epoch - 1, 9, 350, args) for epoch in (1, 150, 151, 250, 251)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert learning.items() <= vars(parse("--dataset dirty_mnist --active-learning pe")).items()


def test_a_network_that_is_not_trained_is_evaluated_once(capsys):
    for more in ("--runs 2", "--ensemble 2"):
        with pytest.raises(SystemExit):  # the same network, several times
            parse(f"--epochs 0 {more}")
    assert capsys.readouterr().err.count("--epochs 0 evaluates one network") == 2


def test_the_density_alone_is_acquired_with_sn_and_mod():
    for acquisition in ("density", "random"):
        options = ddu.options_of(acquisition, parse(f"--active-learning {acquisition}"))
        assert options.sn == (acquisition == "density")
        assert options.mod == (acquisition == "density")
        options = ddu.options_of(acquisition, parse(f"--active-learning {acquisition} --no-mod"))
        assert options.mod is False


@pytest.mark.parametrize("dataset, flips", [("folder:images", True), ("cifar10", True),
                                            ("mnist", False), ("svhn", False), ("numbers", False)])
def test_pretrained_networks_stay_as_they_are_and_digits_are_never_mirrored(dataset, flips):
    args = parse(f"--dataset {dataset} --model torchvision/resnet18")
    assert args.epochs == 0
    assert args.unit_features
    assert not args.sn
    assert args.augment == flips


def test_a_network_that_its_function_has_trained_has_the_recipe_of_pretrained_ones():
    assert parse("--dataset folder:images --model lenet --epochs 0").unit_features
    assert not parse("--dataset folder:images --model lenet --epochs 0").sn
    assert parse("--dataset folder:images --model lenet").sn
    assert parse("--dataset folder:images --epochs 0 --weights seed1.pt").sn  # as it was trained
    assert parse("--dataset folder:images --model torchvision/resnet18 --weights none").epochs == 20


def build(model, num_classes, shape, device="cpu", depth=28, **options):
    """A network with random weights; `depth` is that of wide_resnet."""
    args = parse(f"--dataset cifar10 --model {model}")
    vars(args).update(options, device=torch.device(device))
    with pytest.MonkeyPatch.context() as patch, args.device:
        patch.setitem(ddu.NETWORKS, "wide_resnet", partial(ddu.wide_resnet, depth=depth))
        return ddu.make_network(args, num_classes, shape)


# Published numbers of parameters with -mod, of features, and of spectral layers.
SIZES = [("lenet", (1, 28, 28), 44_426, 84, 4), ("wide_resnet", (1, 28, 28), 36_220_346, 640, 25),
         ("resnet18", (1, 28, 28), 10_998_986, 512, 17),
         ("resnet50", (1, 28, 28), 20_743_114, 2048, 49),
         ("vgg16", (3, 32, 32), 14_724_042, 512, 13), ("vgg16", (1, 28, 28), 14_722_890, 512, 13)]


@pytest.mark.parametrize("model, shape, parameters, features, layers", SIZES)
def test_networks_have_the_published_sizes(model, shape, parameters, features, layers):
    net = build(model, 10, shape, "meta", mod=True, sn=True)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert len(modules(net.backbone, ddu.SoftSpectral)) == layers
    assert net.head.weight.shape == (10, features)
    assert not hasattr(net.head, "parametrizations")


def randomise(net):
    """Give all parameters and running averages of a network random values, in float64."""
    torch.manual_seed(0)
    net.double().eval()
    for name, tensor in net.state_dict().items():
        if tensor.ndim > 1:
            nn.init.kaiming_normal_(tensor)
        elif name.endswith(("running_var", "weight")):
            nn.init.uniform_(tensor, 0.5, 1.5)
        elif tensor.is_floating_point():
            nn.init.uniform_(tensor, -0.2, 0.2)


def copy_in_order(ours, theirs):
    """Load the state of another network, whose tensors have other names but the same order."""
    ours.double().eval()
    values = theirs.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))


class PooledShortcut(nn.Module):
    """The shortcut of -mod into twice (or, without a stride, four times) as many channels."""

    def __init__(self, stride, channels):
        super().__init__()
        self.stride = stride
        self.channels = channels

    def forward(self, x):
        if x.shape[-1] % 2 == 1:
            x = x[:, :, ::self.stride, ::self.stride]
        elif self.stride == 2:
            x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
        zeros = x.new_zeros(len(x), self.channels - x.shape[1], *x.shape[2:])
        return torch.cat([x, zeros], 1)


def modify(net):
    """Change a ResNet of torchvision as -mod does."""
    for block in [*net.layer1, *net.layer2, *net.layer3, *net.layer4]:
        block.relu = nn.LeakyReLU(0.01)
        if block.downsample is not None:
            convolution, norm = block.downsample
            block.downsample = PooledShortcut(convolution.stride[0], norm.num_features)
    net.relu = nn.LeakyReLU(0.01)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("mod", [False, True])
def test_resnets_are_those_of_torchvision_with_a_stem_for_small_images(name, mod):
    theirs = models.get_model(name, num_classes=7)
    theirs.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    if mod:
        modify(theirs)
    randomise(theirs)
    ours = build(name, 7, (1, 14, 14), mod=mod, sn=False)
    copy_in_order(ours, theirs)
    x = torch.randn(3, 1, 14, 14, dtype=torch.float64)  # sides 14, 7, 4 and 2
    expected = theirs(x)
    scale = expected.abs().max()
    torch.testing.assert_close(ours(x)[0] / scale, expected / scale, rtol=0, atol=1e-9)


@pytest.mark.parametrize("side", [32, 28])
def test_vgg16_is_that_of_torchvision(side):
    theirs = models.vgg16_bn().features
    if side == 28:
        del theirs[6]  # the first max pool
    randomise(theirs)
    for layer in modules(theirs, nn.Conv2d):
        layer.bias = None  # batch norm follows
    ours = build("vgg16", 7, (3, side, side), mod=False, sn=False)
    ours.double().eval()
    copy_in_order(ours.backbone, theirs)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    expected = theirs(x).mean((2, 3))
    torch.testing.assert_close(ours(x)[1], expected, rtol=1e-9, atol=1e-9)


def wide_resnet_by_hand(state, x, mod):
    """The features of a WRN of depth 10, from the tensors of its backbone in their order."""
    tensors = iter(state.values())

    def norm_and_activation(x):
        weight, bias, mean, var, _ = [next(tensors) for _ in range(5)]
        x = F.batch_norm(x, mean, var, weight, bias)
        return F.leaky_relu(x, 0.01 if mod else 0.0)

    x = F.conv2d(x, next(tensors), padding=1)
    for stride in (1, 2, 2):
        body = F.conv2d(norm_and_activation(x), next(tensors), padding=1, stride=stride)
        body = F.conv2d(norm_and_activation(body), next(tensors), padding=1)
        if mod:
            shortcut = PooledShortcut(stride, body.shape[1])(x)
        else:
            shortcut = F.conv2d(x, next(tensors), stride=stride)
        x = body + shortcut
    return norm_and_activation(x).mean((2, 3))


@pytest.mark.parametrize("mod", [False, True])
def test_wide_resnets_are_those_of_functions(mod):
    net = build("wide_resnet", 7, (1, 14, 14), depth=10, width=0.2, mod=mod, sn=False)
    randomise(net)
    x = torch.randn(3, 1, 14, 14, dtype=torch.float64)
    expected = wide_resnet_by_hand(net.backbone.state_dict(), x, mod)
    torch.testing.assert_close(net(x)[1], expected, rtol=1e-9, atol=1e-9)
    assert {norm.momentum for norm in modules(net, nn.BatchNorm2d)} == {0.01}
    assert {dropout.p for dropout in modules(net, nn.Dropout)} == {0.3}


def test_the_head_computes_in_float32_under_amp():
    net = build("lenet", 10, (1, 28, 28), sn=False, mod=False)
    with torch.autocast("cpu", torch.bfloat16):
        logits, features = net(torch.randn(50, 1, 28, 28))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(features, net.head.weight, net.head.bias))
    assert len(logits[:, 0].unique()) == 50  # bfloat16 has few numbers


def test_training_is_a_loop_over_shuffled_batches():
    args = parse("--dataset cifar10 --batch-size 16 --epochs 2 --schedule one_cycle")
    train_set = data.load("glyphs", "train").select(slice(40))
    net = build("wide_resnet", 10, train_set.shape, depth=10, width=0.05, sn=True, mod=True)
    first = modules(net, ddu.Residual)[1].body[2].parametrizations.weight.original  # [16, 8, 3, 3]
    assert first.std().item() == pytest.approx((2 / 9 / 16) ** 0.5, rel=0.1)
    rates = [ddu.learning_rate(step, 3, 2, args) for step in range(6)]
    assert rates == pytest.approx(0.1 * np.r_[1 / 2.2, 2 / 2.2, np.arange(4, 0, -1) / 4.8])
    twin = copy.deepcopy(net)
    history = ddu.train(net, train_set, args, 5)
    optimiser = torch.optim.SGD(twin.parameters(), momentum=0.9, weight_decay=5e-4)
    loader = data.Loader(train_set, 16, seed=5, shuffle=True, augment="crop_flip")
    for epoch, row in enumerate(history):
        common.seed_all(5, epoch, 0)
        of_images = []
        for step, batch in enumerate(loader.epoch(epoch), 3 * epoch):
            optimiser.param_groups[0]["lr"] = rates[step]
            logits, _ = twin(batch.images)
            losses = F.cross_entropy(logits, batch.labels, reduction="none")
            optimiser.zero_grad()
            losses.mean().backward()
            optimiser.step()
            of_images += zip(losses.tolist(), (logits.argmax(1) == batch.labels).tolist())
        assert [row["loss"], row["train_accuracy"]] == pytest.approx(np.mean(of_images, 0))
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=0)


@torch.no_grad()
def expected_outputs(nets, dataset):
    """Logits [N, M, K] in float64, and features [N, D] of the first network, in eval mode."""
    images = torch.cat([batch.images for batch in data.Loader(dataset).epoch()])
    logits, features = zip(*[net.eval()(images) for net in nets])
    return torch.stack(logits, 1).double().numpy(), features[0]


def expected_scores(logits, temperatures):
    """Probabilities and uncertainties, from logits [N, M, K] of an ensemble."""
    probs = special.softmax(logits, 2)
    total = stats.entropy(probs.mean(1), axis=1)
    return {"probs": probs.mean(1), "total": total,
            "probs_scaled": special.softmax(logits / np.c_[temperatures], 2).mean(1),
            "epistemic": total - stats.entropy(probs, axis=2).mean(1)}


def expected_predictions(nets, splits, args):
    """{method: a dictionary of arrays} for the test set, the OOD set and that of --predict."""
    fitted = expected_outputs(nets, splits.train)[1], splits.train.labels
    logits, features = expected_outputs(nets, splits.val)
    known = special.logsumexp(scipy_joint(*fitted, features, shrunk_covariance), 1)
    temperatures = [common.fit_temperature(torch.tensor(logits[:, member]), splits.val.labels)
                    for member in range(len(nets))]
    results = []
    for dataset in (splits.test, *splits.ood, splits.predict):
        logits, features = expected_outputs(nets, dataset)
        joint = scipy_joint(*fitted, features, shrunk_covariance)
        density = special.logsumexp(joint, 1)
        ours, of_all = [expected_scores(logits[:, :count], temperatures[:count])
                        | {"labels": dataset.labels.numpy()} for count in (1, len(nets))]
        del ours["epistemic"]
        entropy = stats.entropy(ours["probs_scaled"], axis=1)
        region = np.where(entropy > args.entropy_threshold, "ambiguous", "in_distribution")
        region[density < np.quantile(known, args.density_quantile)] = "ood"
        ours |= {"region": region, "total_scaled": entropy, "density": -density,
                 "gmm_entropy": stats.entropy(special.softmax(joint, 1), axis=1),
                 "percentile": 100 * (known < density[:, None]).mean(1),
                 "one_minus_max": 1 - ours["probs"].max(1), "energy": -special.logsumexp(logits[:, 0], 1)}
        results.append(dict(zip(METHODS, (ours, of_all))))
    return results


def expected_row(inside, outside):
    """The metrics of a set, or of a set against another one."""
    labels = inside["labels"]
    is_right = inside["probs"].argmax(1) == labels
    row = {"n": len(labels)}
    for region in np.unique(outside.get("region", [])):
        row[f"fraction_{region}"] = (outside["region"] == region).mean()
        if inside is outside:
            row[f"accuracy_{region}"] = is_right[inside["region"] == region].mean()
    if inside is outside:
        nll, scaled = [sk.log_loss(labels, inside[probs], labels=range(10))
                       for probs in ("probs", "probs_scaled")]
        return row | {"accuracy": is_right.mean(), "nll": nll, "nll_scaled": scaled}
    for score in inside.keys() & {"density", "gmm_entropy", "total", "one_minus_max", "energy",
                                  "epistemic"}:
        is_out = len(labels) * [0] + len(outside["labels"]) * [1]
        row[f"auroc_{score}"] = sk.roc_auc_score(is_out, np.r_[inside[score], outside[score]])
    return row


METHODS = ("DDU", "ensemble of 2")
PAIRS = [("dirty_glyphs", None), ("dirty_glyphs", "glyphs_letters"), ("glyphs", None),
         ("glyphs", "glyphs_ambiguous"), ("glyphs", "glyphs_letters"), ("glyphs_ambiguous", None)]
ENSEMBLE_OPTIONS = (
    "--dataset dirty_glyphs --model resnet18 --no-mod --width .06 --batch-size 32 --lr .1 "
    "--schedule one_cycle --shrinkage --ood glyphs_letters --entropy-threshold 2.1 "
    "--density-quantile .2 --predict glyphs --name run")
ACTIVE_OPTIONS = (
    "--dataset dirty_glyphs --width .05 --epochs 1 --limit-steps 1 --ensemble 2 --subsample 90 "
    "--num-initial-samples 60 --acquisition-batch-size 4 --active-learning")


def check_rows(rows, line, paths):
    """Those of the checkpoints `paths`; returns the predictions for the set of --predict."""
    splits = data.load_splits(parse(line), 1)
    nets = [ddu.make_network(parse(ENSEMBLE_OPTIONS), 10, splits.test.shape) for _ in paths]
    for net, path in zip(nets, paths):
        net.load_state_dict(common.load(path)["net"])
    test, letters, predicted = expected_predictions(nets, splits, parse(line))
    assert [(row["method"], row["set"], row.get("against")) for row in rows] == [
        (method, *pair) for method in METHODS[:len(nets)] for pair in PAIRS]
    clean = {image.numpy().tobytes() for image in data.load("glyphs", "test").images}
    is_clean = np.array([image.numpy().tobytes() in clean for image in splits.test.images])
    for row in rows:
        whole = test[row["method"]]
        sets = {"dirty_glyphs": whole, "glyphs_letters": letters[row["method"]],
                "glyphs": {name: values[is_clean] for name, values in whole.items()},
                "glyphs_ambiguous": {name: values[~is_clean] for name, values in whole.items()}}
        by_hand = expected_row(sets[row["set"]], sets[row.get("against", row["set"])])
        assert {name: row[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-5)
    return predicted.values()


def test_rows_and_predictions_are_those_by_hand(tmp_path):
    """Of an ensemble, and of its first network as --weights: then on a part of the test set."""
    line = f"{ENSEMBLE_OPTIONS} --epochs 2 --limit-steps 9 --ensemble 2 --out-dir {tmp_path}"
    root = tmp_path / "ddu" / "run"
    ours, of_all = check_rows(ddu.main([*line.split(), "--device", "cpu"]), line,
                              [root / "seed1.pt", root / "seed1-member1.pt"])
    assert (root / "uncertainty.png").stat().st_size > 10_000
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    assert [row["decision"] for row in lines] == ours["region"].tolist()
    assert of_all["epistemic"].max() > 1e-3  # the members differ
    for name, values in {
            "label": ours["labels"], "predicted": ours["probs"].argmax(1),
            "log_density": -ours["density"], "density_percentile": ours["percentile"],
            "total": ours["total"], "total_scaled": ours["total_scaled"],
            "confidence": ours["probs"].max(1), "confidence_scaled": ours["probs_scaled"].max(1),
            "total_ensemble": of_all["total"], "epistemic_ensemble": of_all["epistemic"],
            "confidence_ensemble": of_all["probs"].max(1)}.items():
        assert [float(row[name]) for row in lines] == pytest.approx(values, rel=1e-5), name
    line = f"{ENSEMBLE_OPTIONS} --epochs 0 --weights {root}/seed1.pt --out-dir {tmp_path}/again"
    rows = run_script("ddu", *line.split())
    check_rows(rows, line, [root / "seed1.pt"])
    assert rows[0]["n"] == 216  # 24 chose the temperature and the thresholds


def folder_options(root, out, more=""):
    """The arguments of a run of a second on a folder of images."""
    return (f"--dataset folder:{root} --ood folder:{root}/unknown --width .05 --image-size 16 "
            f"--epochs 2 --batch-size 12 --weights none --name run --out-dir {out} {more}").split()


def test_a_run_on_ones_own_images_is_evaluated_killed_and_shared(image_folder, tmp_path):
    argv = folder_options(image_folder, tmp_path, "--ensemble 2")
    rows = run_script("ddu", *argv, "--runs", 2)
    assert [row["seeds"] for row in rows] == 4 * [[1]] + 4 * [[2]]
    assert run_script("ddu", *argv, "--runs", 2, "--eval") == rows
    names = ["train", "val", "test", "predict", image_folder.name]
    for name in names:
        shutil.copytree(image_folder / "unknown", tmp_path / name)
    others = [f"folder:{tmp_path}/{name}" for name in names]
    _, *pairs = run_script("ddu", *argv, "--runs", 1, "--ensemble", 1, "--eval", "--ood", *others)
    assert pairs == [rows[1] | {"against": name} for name in names]
    argv = folder_options(image_folder, tmp_path / "killed", "--ensemble 2")
    paths = [tmp_path / "killed/ddu/run" / name for name in ("seed1.pt", "seed1-member1.pt")]
    for path in paths:  # which is written after the first of two epochs
        kill_after(Child(tmp_path, run_script, "ddu", *argv), path)
    assert run_script("ddu", *argv) == rows[:4]
    for path in paths:
        assert_equal_checkpoints(path, tmp_path / "ddu" / "run" / path.name)
    of_main, of_other = run_ranks(tmp_path, run_script, "ddu", *argv, "--fresh")
    assert of_other == []
    assert len(of_main) == 4
    assert of_main != rows[:4]
    for row, expected in zip(run_script("ddu", *argv, "--eval"), of_main, strict=True):
        assert row.get("nll", 0) == pytest.approx(expected.get("nll", 0), rel=1e-4)


@pytest.mark.parametrize("name, more", [("shufflenet_v2_x0_5", "--amp"), ("vit_b_16", "--sn")])
def test_networks_of_torchvision(name, more, image_folder, tmp_path, monkeypatch, capsys):
    if more == "--sn":  # a small vit_b_16
        monkeypatch.setattr(models, "get_model", lambda *_, **__: models.VisionTransformer(
            16, 4, 2, 2, 24, 48))
    argv = folder_options(image_folder, tmp_path, f"--model torchvision/{name} {more}")
    assert run_script("ddu", *argv) == run_script("ddu", *argv, "--eval")
    assert ("tion: class_token, encoder.pos_" in capsys.readouterr().out) == (more == "--sn")


@pytest.fixture
def own_network(monkeypatch):
    """--model mine: a convolution of fixed weights, as of somebody's pretrained network."""
    def mine(args, shape):
        convolution = nn.Conv2d(shape[0], 6, 5, bias=False)
        values = torch.linspace(-1, 1, convolution.weight.numel()).mul(50).sin()
        convolution.weight.data = values.view_as(convolution.weight)
        layers = [convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return layers, 6

    monkeypatch.setitem(ddu.NETWORKS, "mine", mine)


def test_a_network_that_is_not_trained_gets_a_fitted_head(own_network, image_folder, tmp_path,
                                                          monkeypatch):
    """Its features of the training set are computed once."""
    computed = []
    compute_outputs = ddu.compute_outputs

    def note_set(nets, dataset, args):
        computed.append(dataset)
        outputs = compute_outputs(nets, dataset, args)
        if len(computed) > 1:
            assert torch.equal(outputs.logits[0], nets[0].head(outputs.features))
        return outputs

    monkeypatch.setattr(ddu, "compute_outputs", note_set)
    argv = folder_options(image_folder, tmp_path, "--model mine --epochs 0 --image-size 40")
    rows = run_script("ddu", *argv)
    assert len(computed) == 4  # training, validation, test and OOD
    train, _, test, _ = computed
    features = [compute_outputs([build_own(train.shape)], part, parse("")).features.numpy()
                for part in (train, test)]
    regression = LogisticRegression(max_iter=10_000, tol=1e-10).fit(features[0], train.labels)
    probs = regression.predict_proba(features[1])
    assert rows[0]["nll"] == pytest.approx(sk.log_loss(test.labels, probs), rel=1e-4)
    assert rows[0]["accuracy"] > 0.4
    assert rows[0]["seeds"] == []
    assert run_script("ddu", *argv, "--eval") == rows


def build_own(shape):
    layers, dim = ddu.NETWORKS["mine"](None, shape)
    return ddu.Network(nn.Sequential(*layers), nn.Linear(dim, 3))


def test_two_processes_fit_one_head_to_images_in_files(image_folder, tmp_path):
    argv = folder_options(image_folder, tmp_path, "--epochs 0 --image-size 72 --workers 0 --seed 3 "
                          "--model torchvision/shufflenet_v2_x0_5")
    expected = run_script("ddu", *argv)
    of_main, of_other = run_ranks(tmp_path, run_script, "ddu", *argv, "--name", "shared")
    assert of_other == []
    for row, other in zip(of_main, expected, strict=True):
        for name in row.keys() - {"method", "seeds", "set", "against"}:
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name


def test_fine_tuning_starts_at_a_fitted_head_and_keeps_the_running_averages(image_folder,
                                                                          tmp_path):
    pretrained = build("resnet18", 10, (3, 16, 16), width=0.05, sn=False, mod=False)
    torch.save(pretrained.state_dict(), tmp_path / "ten_classes.pt")
    argv = folder_options(image_folder, tmp_path, "--model resnet18 --no-sn --lr 0 --epochs 1 "
                          f"--weights {tmp_path}/ten_classes.pt --no-augment")
    run_script("ddu", *argv)
    state = common.load(tmp_path / "ddu/run/seed1.pt")["net"]
    for name, value in pretrained.backbone.state_dict(prefix="backbone.").items():
        assert torch.equal(state[name], value), name  # the rate is 0
    splits = data.load_splits(parse(" ".join(argv)), 1)
    _, features = expected_outputs([pretrained], splits.train)
    head = nn.Linear(features.shape[1], 3)
    common.fit_head(head, features, splits.train.labels)
    torch.testing.assert_close(state["head.weight"], head.weight.data, rtol=1e-3, atol=1e-4)


def test_the_head_is_not_fitted_again_when_training_resumes(image_folder, tmp_path, monkeypatch):
    pretrained = build("resnet18", 10, (3, 16, 16), width=0.05, sn=False, mod=False)
    torch.save(pretrained.state_dict(), tmp_path / "ten_classes.pt")
    argv = folder_options(image_folder, tmp_path, "--model resnet18 --no-sn "
                          f"--weights {tmp_path}/ten_classes.pt")
    rows = run_script("ddu", *argv)
    monkeypatch.setattr(common, "fit_head", None)
    assert run_script("ddu", *argv) == rows


def test_rows_with_and_without_shrinkage_are_not_pooled(image_folder, tmp_path, capsys):
    argv = folder_options(image_folder, tmp_path, "--epochs 1 --name run-seed1")
    with_shrinkage = run_script("ddu", *argv)
    folders = [tmp_path / "ddu/run-seed1", tmp_path / "ddu/run-seed2"]
    shutil.copytree(*folders)
    without = run_script("ddu", *argv, "--name", "run-seed2", "--eval", "--no-shrinkage")
    assert without[1]["auroc_density"] != with_shrinkage[1]["auroc_density"]
    capsys.readouterr()
    common.main([str(folder) for folder in folders])
    text = capsys.readouterr().out
    assert "shrinkage True" in text
    assert "shrinkage False" in text
    assert "±" not in text


@pytest.mark.parametrize("fault, more", [("one image", ""), ("equal images", ""),
                                         ("two images", ""), ("nine images", "--limit-train 4")])
def test_a_class_that_has_no_gaussian_is_named_before_training(fault, more, tmp_path):
    save_images(tmp_path / "train", ("ant", "bee"), 12, 20)
    save_images(tmp_path / "test", ("ant", "bee", "rare"), 3, 20)
    save_images(tmp_path / "unknown", ("dog",), 3, 20)
    rare = tmp_path / "train" / "rare"
    rare.mkdir()
    count = {"one image": 1, "two images": 2}.get(fault, 9)
    for number in range(count):
        pixels = np.full((20, 20, 3), 7, np.uint8)
        if fault != "equal images":
            pixels[0] = number
        Image.fromarray(pixels).save(rare / f"{number}.png")
    with pytest.raises(common.UserError, match="class .* has fewer than 3 training images, or"):
        run_script("ddu", *folder_options(tmp_path, tmp_path, more))
    assert not (tmp_path / "ddu").exists()


@pytest.mark.parametrize("acquisition", ddu.ACQUISITIONS)
def test_what_has_no_label_and_the_highest_scores_is_acquired(acquisition, monkeypatch):
    """With the published networks: -sn -mod for the density, and neither for the others."""
    args = ddu.options_of(acquisition, parse(f"{ACTIVE_OPTIONS} {acquisition} --shrinkage"))
    pool, labelled, test = ddu.load_pool(args)
    assert pool.labels[labelled].bincount().tolist() == 10 * [6]
    assert pool.is_ambiguous.tolist() == 90 * [False] + 600 * [True]
    assert (test.name, len(test)) == ("glyphs", 120)
    is_hidden = torch.ones(len(pool)).index_fill(0, labelled, 0).bool()
    labels = pool.labels.where(~is_hidden, (pool.labels + 1) % 10)  # the others are false
    pool = replace(pool, labels=labels)
    nets = []
    train = ddu.train

    def note_network(net, train_set, *more):
        assert len(train_set) == 5056
        assert torch.equal(train_set.labels[:60], labels[labelled])
        nets.append(net)
        return train(net, train_set, *more)

    monkeypatch.setattr(ddu, "train", note_network)
    chosen = ddu.acquisition_step(pool, labelled, test, acquisition, args, 1)["chosen"]
    assert len(chosen.unique()) == 4
    assert is_hidden[chosen].all()
    assert len(nets) == (2 if acquisition in ("pe", "mi") else 1)
    assert len(nets) == 1 or not torch.equal(nets[0].head.weight, nets[1].head.weight)
    for kind in (ddu.SoftSpectral, nn.LeakyReLU):
        assert bool(modules(nets[0], kind)) == (acquisition == "density")
    logits, z = expected_outputs(nets, pool)
    score = expected_scores(logits, [1.0])["epistemic" if acquisition == "mi" else "total"]
    if acquisition == "density":
        joint = scipy_joint(z[labelled], labels[labelled], z, shrunk_covariance)
        score = -special.logsumexp(joint, 1)
    highest = np.sort(score[is_hidden])[:-5:-1]  # copies of an image tie
    assert acquisition == "random" or score[chosen] == pytest.approx(highest)


@pytest.mark.parametrize("first, last, sizes", [(25, 32, [20, 25, 30, 32]), (5, 12, [10, 12]),
                                                (40, 3, [40]), (5, 800, [*range(10, 651, 5)])])
def test_the_numbers_of_labels_are_those_of_the_labelled_images(first, last, sizes, tmp_path,
                                                                monkeypatch):
    monkeypatch.setattr(ddu, "label_step_by_step", lambda *more: ([1.0], []))
    line = (f"{ACTIVE_OPTIONS} random --num-initial-samples {first} --subsample 50 --name run "
            f"--acquisition-batch-size 5 --max-training-samples {last} --out-dir {tmp_path}")
    [row] = run_script("ddu", *line.split())
    found = json.loads((tmp_path / "ddu" / "run" / "results.json").read_text())["sizes"]
    assert found == sizes
    assert row["labels"] == sizes[-1]


def test_active_learning_resumes_and_reuses_steps_of_equal_options(tmp_path, monkeypatch):
    line = (f"{ACTIVE_OPTIONS} density pe --model lenet --no-sn --no-mod --name run "
            f"--max-training-samples 66 --out-dir {tmp_path}")
    rows = run_script("ddu", *line.split(), "--runs", 2)
    pool, first, test = ddu.load_pool(parse(line))
    root = tmp_path / "ddu" / "run"
    for row, name in zip(rows, ("density-of1-seed1", "density-of1-seed2", "pe-of2-seed1",
                                "pe-of2-seed2"), strict=True):
        steps = [common.load(root / f"{name}-{size}.pt") for size in (60, 64, 66)]
        labelled = torch.cat([first, steps[0]["chosen"], steps[1]["chosen"][:2]])
        assert row["ambiguous_fraction"] == (labelled >= 90).double().mean().item()
        accuracies = [step["accuracy"] for step in steps]
        assert [row["accuracy"], row["accuracy_mean"]] == [accuracies[2], np.mean(accuracies)]
    (root / "density-of1-seed1-64.pt").unlink()  # as if killed
    with pytest.raises(common.UserError, match="-64.pt is missing; run without --eval"):
        run_script("ddu", *line.split(), "--eval")
    assert run_script("ddu", *line.split()) == rows[::2]
    for change in ("--ensemble 3", "--max-training-samples 67", "--shrinkage", "--unit-features"):
        changed = [*line.split(), *change.split()]
        assert run_script("ddu", *changed) == run_script("ddu", *changed, "--name", change[2:])
        for path in (root.parent / change[2:]).glob("*.pt"):
            assert_equal_checkpoints(path, root / path.name)
    with pytest.raises(common.UserError, match="density: training diverged; use a lower learning"):
        run_script("ddu", *f"{line} --limit-steps 3 --lr 1e20 --name far".split())
    changed = replace(pool, labels=9 - pool.labels)
    monkeypatch.setattr(ddu, "load_pool", lambda _: (changed, first, test))
    with pytest.raises(common.UserError, match="was made with data"):
        run_script("ddu", *line.split())


def test_a_pool_of_ones_own_images_is_like_their_training_set(image_folder, tmp_path):
    line = f"--dataset folder:{image_folder} --active-learning random --model torchvision/resnet18"
    pool, labelled, test = ddu.load_pool(parse(f"{line} --num-initial-samples 7"))
    assert pool.labels[labelled].bincount().tolist() == [2, 2, 2]  # 7 / 3 is rounded down
    for images in (pool, test):
        assert images.shape == (3, 224, 224)
        assert (images.mean, images.std) == data.IMAGENET
    shutil.copytree(image_folder, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "test" / "ant")
    with pytest.raises(common.UserError, match="class"):
        ddu.load_pool(parse(f"--dataset folder:{tmp_path}/images --active-learning random"))


@pytest.mark.parametrize("first", ["--num-initial-samples 1", "--num-initial-samples 6"])
def test_densities_need_two_different_labelled_images_of_each_class(first, tmp_path):
    save_images(tmp_path / "train", ("ant", "bee"), 3, 20)
    save_images(tmp_path / "test", ("ant", "bee"), 3, 20)
    for number in (1, 2):
        shutil.copy(tmp_path / "train/bee/0.png", tmp_path / f"train/bee/{number}.png")
    line = (f"--dataset folder:{tmp_path} --active-learning random density {first} "
            f"--out-dir {tmp_path}")
    with pytest.raises(common.UserError, match="class .* has fewer than . training images, or"):
        run_script("ddu", *line.split())
    assert not (tmp_path / "ddu").exists()  # nothing was trained


def test_an_input_without_a_density_is_unknown():
    density = torch.tensor([0.0, -9.0, math.nan])
    assert ddu.decide(density, torch.zeros(3), -1.0, 0.5).tolist() == [0, 2, 2]
