"""ddu.py: operators as dense matrices, Gaussians by SciPy, networks of torchvision, whole runs."""

import copy
import csv
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (Child, assert_equal_checkpoints, kill_after, run_ranks, run_script,
                      save_images)
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
    (convolution(5, 3, stride=2, padding=1), (4, 7, 7), None),
    (convolution(8, (3, 5), padding=2, dilation=(2, 1), groups=4), (4, 7, 6), None),
    (convolution(6, 1, groups=2, stride=2), (4, 8, 8), (4, 1, 1)),
    (nn.Linear(4, 5, False), (7, 4), (4,))], ids=str)
def test_sigma_is_the_norm_of_the_dense_operator(layer, shape, pixel):
    """Stride and zero padding included, by one power iteration in each forward."""
    layer, raw, sn = normalise_layer(layer, shape, 1e-3)
    eps = 0 if pixel else 1e-5  # of matrices, which act on a pixel or a token
    pixel = pixel or shape
    sn.coeff = math.inf
    basis = torch.eye(math.prod(pixel), dtype=torch.float64).view(-1, *pixel)
    a = (1 + eps) * layer.eval()(basis).detach().flatten(1).T.numpy()
    sn.coeff = 1e-3
    u = sn.u.flatten().numpy().copy()
    x = torch.randn(2, *shape, dtype=torch.float64)
    layer.train()(x)
    assert np.allclose(sn.v.flatten(), a.T @ u / np.linalg.norm(a.T @ u), atol=1e-10)
    for _ in range(200):
        layer(x)
    sigma = sn.u.flatten().numpy() @ a @ sn.v.flatten().numpy()
    assert 0.99 <= sigma / np.linalg.norm(a, 2) <= 1 + 1e-9
    effective = raw / (sigma / 1e-3 + eps)  # of eval mode, without a power iteration
    torch.testing.assert_close(layer.eval().weight, effective, rtol=1e-9, atol=0)


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


def test_batch_norm_behind_a_convolution_undoes_its_bound():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    nn.init.normal_(net[0].weight, std=5.0)
    x = torch.randn(64, 3, 8, 8)
    net[1].momentum = 1.0
    net(x)
    bounded = copy.deepcopy(net)
    assert ddu.spectral_normalise(bounded, (3, 8, 8), 3.0) == []
    bounded(x)  # a power iteration, and the statistics of the smaller outputs
    assert bounded.eval()[0].weight.norm() < 0.3 * net[0].weight.norm()
    torch.testing.assert_close(bounded(x), net.eval()(x), rtol=1e-3, atol=1e-3)


def test_convolutions_and_linear_layers_are_normalised_and_others_are_named():
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 6, 2),
                        nn.Flatten(2), nn.Conv1d(6, 8, 1), nn.Linear(56, 4))  # of tokens [B, 8, 56]
    assert ddu.spectral_normalise(net, (1, 9, 8), 0.01) == ["2.weight", "4.weight"]
    assert len(modules(net, ddu.SoftSpectral)) == 2
    assert net[1].num_batches_tracked == 0  # by the image that told the shapes


def gaussian_classes(counts, dim, seed=0):
    """Shuffled features [N, D], float64, of Gaussian classes with `counts` examples; labels [N]."""
    torch.manual_seed(seed)
    labels = torch.tensor(np.repeat(range(len(counts)), counts))[torch.randperm(sum(counts))]
    mixing = torch.eye(dim) + torch.randn(len(counts), dim, dim) / 2 / dim**0.5
    z = torch.randn(len(labels), 1, dim).double() @ mixing.double()[labels]
    return z[:, 0] + torch.randn(len(counts), dim)[labels], labels


def scipy_joint(z, y, points, shrinkage=False):
    """log N(z; mu_c, Sigma_c) + log n_c / N [N, K], in float64."""
    columns = []
    for c in range(int(y.max()) + 1):
        rows = z[y == c].double().numpy()
        covariance = np.cov(rows, rowvar=False)
        if shrinkage:  # scikit-learn has the divisor n
            covariance = sk_covariance.ledoit_wolf(rows)[0] * len(rows) / (len(rows) - 1)
        gaussian = stats.multivariate_normal(rows.mean(0), covariance)
        columns.append(gaussian.logpdf(points.double().numpy()) + np.log(len(rows) / len(z)))
    return np.stack(columns, 1)


@pytest.mark.parametrize("counts, dim, dtype, offset, shrinkage", [
    ((80, 90), 64, torch.float32, 0.0, False), ((50, 70), 8, torch.float64, 1e4, False),
    ((40, 9, 60), 15, torch.float32, 0.0, True)])
def test_densities_are_those_of_scipy_in_float64(counts, dim, dtype, offset, shrinkage):
    z, y = gaussian_classes(counts, dim)
    z = (z + offset).to(dtype)
    points = offset + 3 * torch.randn(600, dim, dtype=dtype)  # more than one block
    joint = scipy_joint(z, y, points, shrinkage)
    for ours in ddu.class_log_joints(z, y, len(counts), [points, points[:7]], shrinkage):
        assert np.allclose(ours, joint[:len(ours)], rtol=1e-8, atol=1e-6)


def test_unit_features_are_fitted_and_scored_at_length_one():
    z, y = gaussian_classes((80, 90), 6)
    unit_z = z / z.square().sum(1, keepdim=True).sqrt()
    [ours] = ddu.class_log_joints(z, y, 2, [3 * z], unit_features=True)
    assert np.allclose(ours, scipy_joint(unit_z, y, unit_z), rtol=1e-8)


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
    with pytest.raises(ValueError, match="it has no two different examples, or NaN"):
        ddu.fit_gaussian(torch.full((30, 5), 7.0), torch.tensor(0.5).log())


def test_an_input_without_a_density_is_unknown():
    density = torch.tensor([0.0, -9.0, math.nan])
    assert ddu.decide(density, torch.zeros(3), -1.0, 0.5).tolist() == [0, 2, 2]


def test_a_data_set_alone_is_the_papers_recipe():
    paper = dict(coeff=3.0, opt="sgd", lr=0.1, weight_decay=5e-4, batch_size=128, epochs=350,
                 schedule="step", augment=True, shrinkage=False)
    learning = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                    members=5, lr=1e-3, opt="adam", epochs=20, schedule="constant", subsample=1000)
    args = parse("--dataset cifar10")
    assert paper.items() <= vars(args).items()
    rates = [ddu.learning_rate(9 * epoch - 1, 9, 350, args) for epoch in (1, 150, 151, 250, 251)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert learning.items() <= vars(parse("--dataset dirty_mnist --active-learning pe")).items()


@pytest.mark.parametrize("line, is_trained", [
    ("--model torchvision/resnet18", True), ("--model torchvision/resnet18 --weights none", False),
    ("--model lenet --epochs 0", True), ("--model lenet", False),
    ("--model lenet --epochs 0 --weights seed1.pt", False)])  # as it was trained
def test_networks_that_come_trained_stay_as_they_are(line, is_trained):
    args = parse(f"--dataset mnist {line}")
    assert args.unit_features == is_trained
    assert args.sn != is_trained
    assert not args.augment  # digits are never mirrored


def build(model, num_classes, shape, device="cpu", depth=28, **options):
    """A network with random weights; `depth` is that of wide_resnet."""
    args = parse(f"--dataset cifar10 --model {model}")
    vars(args).update(options, device=torch.device(device))
    with pytest.MonkeyPatch.context() as patch, args.device:
        patch.setitem(ddu.NETWORKS, "wide_resnet", partial(ddu.wide_resnet, depth=depth))
        return ddu.make_network(args, num_classes, shape)


# Published numbers of parameters with -mod, of features, and of spectral layers.
@pytest.mark.parametrize("model, parameters, features, layers", [
    ("lenet", 44_426, 84, 4), ("wide_resnet", 36_220_346, 640, 25), ("vgg16", 14_722_890, 512, 13),
    ("resnet18", 10_998_986, 512, 17), ("resnet50", 20_743_114, 2048, 49)])
def test_networks_have_the_published_sizes(model, parameters, features, layers):
    net = build(model, 10, (1, 28, 28), "meta", mod=True, sn=True)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert len(modules(net, ddu.SoftSpectral)) == layers
    assert net.head.weight.shape == (10, features)


def randomise(net):
    """Give all parameters and running averages of a network random values, in float64."""
    torch.manual_seed(0)
    for tensor in net.double().eval().state_dict().values():
        if tensor.ndim > 1:
            nn.init.kaiming_normal_(tensor)
        elif tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)


@pytest.mark.parametrize("name, mod", [("resnet18", True), ("resnet50", False)])
def test_resnets_are_those_of_torchvision_with_a_stem_for_small_images(name, mod):
    theirs = models.get_model(name)
    theirs.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    theirs.maxpool = theirs.fc = nn.Identity()
    for block in modules(theirs, (models.resnet.BasicBlock, models.resnet.Bottleneck)):
        if mod and block.downsample is not None:
            conv, _ = block.downsample
            extra_channels = conv.out_channels - conv.in_channels
            block.downsample = ddu.PoolShortcut(conv.stride[0], extra_channels)
    for layer in modules(theirs, nn.ReLU):
        layer.__class__ = nn.LeakyReLU
        layer.negative_slope = 0.01 if mod else 0.0
    randomise(theirs)
    ours = build(name, 7, (1, 14, 14), mod=mod, sn=False).double().eval()
    values = theirs.state_dict().values()  # under other names, in the same order
    ours.backbone.load_state_dict(dict(zip(ours.backbone.state_dict(), values, strict=True)))
    x = torch.randn(3, 1, 14, 14, dtype=torch.float64)
    torch.testing.assert_close(ours(x)[1], theirs(x), rtol=1e-7, atol=1e-7)


def test_vgg16_for_small_images_is_that_of_torchvision_without_its_first_pool():
    with torch.device("meta"):
        theirs = models.vgg16_bn().features
    del theirs[6]
    ours = build("vgg16", 7, (1, 28, 28), "meta", mod=False, sn=False).backbone
    assert [type(layer) for layer in ours[:-2]] == [type(layer) for layer in theirs]


@pytest.mark.parametrize("mod", [False, True])
def test_wide_resnets_normalise_first_and_their_shortcuts_begin_before_that(mod):
    net = build("wide_resnet", 7, (1, 14, 14), depth=10, width=0.2, mod=mod, sn=False)
    randomise(net)
    images = torch.randn(3, 1, 14, 14, dtype=torch.float64)
    slope = 0.01 if mod else 0.0
    x = net.backbone[0](images)
    for block, stride in zip(modules(net, ddu.Residual), (1, 2, 2), strict=True):
        norms = modules(block, nn.BatchNorm2d)
        convolutions = modules(block, nn.Conv2d)
        h = F.conv2d(F.leaky_relu(norms[0](x), slope), convolutions[0].weight, None, stride, 1)
        h = F.conv2d(F.leaky_relu(norms[1](h), slope), convolutions[1].weight, None, 1, 1)
        if mod:
            pooled = x[:, :, ::2, ::2] if x.shape[-1] % 2 else F.avg_pool2d(x, stride)
            x = h + torch.cat([pooled, torch.zeros_like(h)[:, x.shape[1]:]], 1)
        else:
            x = h + F.conv2d(x, convolutions[2].weight, None, stride)
    expected = F.leaky_relu(net.backbone[-4](x), slope).mean((2, 3))
    torch.testing.assert_close(net(images)[1], expected, rtol=1e-9, atol=1e-9)
    assert {norm.momentum for norm in modules(net, nn.BatchNorm2d)} == {0.01}
    assert {dropout.p for dropout in modules(net, nn.Dropout)} == {0.3}


def test_normalised_weights_and_the_head_are_float32_under_amp():
    net = build("lenet", 10, (1, 28, 28), sn=True, coeff=0.01, mod=False).eval()
    weight = net.backbone[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.backbone[0].weight, weight)
        logits, _ = net(torch.randn(50, 1, 28, 28))
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


def expected_values(nets, splits, args):
    """{name: values [N]} for the test set, the OOD set and that of --predict."""
    z = expected_outputs(nets, splits.train)[1]
    joint_of = partial(scipy_joint, z, splits.train.labels, shrinkage=True)
    logits, z = expected_outputs(nets, splits.val)
    known = special.logsumexp(joint_of(z), 1)
    temperatures = [common.fit_temperature(torch.tensor(logits[:, member]), splits.val.labels)
                    for member in range(len(nets))]
    for dataset in (splits.test, *splits.ood, splits.predict):
        logits, z = expected_outputs(nets, dataset)
        joint = joint_of(z)
        density = special.logsumexp(joint, 1)
        values = {"label": dataset.labels.numpy(), "energy": -special.logsumexp(logits[:, 0], 1),
                  "log_density": density, "density": -density,
                  "gmm_entropy": stats.entropy(special.softmax(joint, 1), axis=1),
                  "density_percentile": 100 * (known < density[:, None]).mean(1)}
        for suffix, members in (("", 1), ("_ensemble", len(nets))):
            probs = special.softmax(logits[:, :members], 2)
            mean = probs.mean(1)
            scaled = special.softmax(logits / np.c_[temperatures], 2)[:, :members].mean(1)
            total = stats.entropy(mean, axis=1)
            aleatoric = stats.entropy(probs, axis=2).mean(1)
            of_networks = {
                "probs": mean, "predicted": mean.argmax(1), "confidence": mean.max(1),
                "one_minus_max": 1 - mean.max(1), "confidence_scaled": scaled.max(1),
                "probs_scaled": scaled, "total_scaled": stats.entropy(scaled, axis=1),
                "total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric}
            values |= {name + suffix: value for name, value in of_networks.items()}
        is_ambiguous = values["total_scaled"] > args.entropy_threshold
        values["decision"] = np.where(is_ambiguous, "ambiguous", "in_distribution")
        values["decision"][density < np.quantile(known, args.density_quantile)] = "ood"
        yield values


def expected_row(inside, outside, suffix, scores):
    """The metrics of a set, or of a set against another one."""
    labels = inside["label"]
    is_right = inside[f"predicted{suffix}"] == labels
    row = {"n": len(labels)}
    if suffix == "":
        for region in np.unique(outside["decision"]):
            row[f"fraction_{region}"] = (outside["decision"] == region).mean()
            if inside is outside:
                row[f"accuracy_{region}"] = is_right[inside["decision"] == region].mean()
    if inside is outside:
        nll, scaled = [sk.log_loss(labels, inside[probs + suffix], labels=range(10))
                       for probs in ("probs", "probs_scaled")]
        return row | {"accuracy": is_right.mean(), "nll": nll, "nll_scaled": scaled}
    is_out = len(labels) * [0] + len(outside["label"]) * [1]
    for score in scores:
        values = np.r_[inside[score + suffix], outside[score + suffix]]
        row[f"auroc_{score}"] = sk.roc_auc_score(is_out, values)
    return row


def test_rows_and_predictions_are_those_by_hand(tmp_path):
    line = ("--dataset dirty_glyphs --model resnet18 --no-mod --width .06 --batch-size 32 --lr .1 "
            "--schedule one_cycle --shrinkage --ood glyphs_letters --entropy-threshold 2.1 "
            "--density-quantile .2 --predict glyphs --epochs 2 --limit-steps 9 --members 2 "
            f"--name run --out-dir {tmp_path}")
    rows = ddu.main([*line.split(), "--device", "cpu"])
    root = tmp_path / "ddu" / "run"
    assert (root / "uncertainty.png").stat().st_size > 10_000
    splits = data.load_splits(parse(line), 1)
    nets = [ddu.make_network(parse(line), 10, splits.test.shape) for _ in range(2)]
    for net, name in zip(nets, ("seed1.pt", "seed1-member1.pt")):
        net.load_state_dict(common.load(root / name)["net"])
    test, letters, predicted = expected_values(nets, splits, parse(line))
    is_clean = ~splits.test.is_ambiguous.numpy()
    sets = {"dirty_glyphs": test, "glyphs_letters": letters,
            "glyphs": {name: values[is_clean] for name, values in test.items()},
            "glyphs_ambiguous": {name: values[~is_clean] for name, values in test.items()}}
    pairs = [("dirty_glyphs", None), ("dirty_glyphs", "glyphs_letters"), ("glyphs", None),
             ("glyphs", "glyphs_ambiguous"), ("glyphs", "glyphs_letters"),
             ("glyphs_ambiguous", None)]
    assert [(row["set"], row.get("against")) for row in rows] == 2 * pairs
    scores = ("density", "gmm_entropy", "total", "one_minus_max", "energy")
    methods = {"DDU": ("", scores), "ensemble of 2": ("_ensemble", ("total", "epistemic"))}
    for row in rows:
        outside = sets[row.get("against", row["set"])]
        by_hand = expected_row(sets[row["set"]], outside, *methods[row["method"]])
        assert {name: row[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-5)
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    assert len(lines[0]) == 15
    assert [row["decision"] for row in lines] == predicted["decision"].tolist()
    for name in lines[0].keys() - {"file", "decision"}:
        values = [float(row[name]) for row in lines]
        assert values == pytest.approx(predicted[name], rel=1e-5), name
    assert predicted["epistemic_ensemble"].max() > 1e-3  # the members differ


def folder_options(root, out, more=""):
    """The arguments of a run of a second on a folder of images."""
    return (f"--dataset folder:{root} --ood folder:{root}/unknown --width .05 --image-size 16 "
            f"--epochs 2 --batch-size 12 --weights none --name run --out-dir {out} {more}").split()


def test_a_run_on_ones_own_images_is_evaluated_killed_and_shared(image_folder, tmp_path):
    argv = folder_options(image_folder, tmp_path, "--members 2")
    rows = run_script("ddu", *argv, "--runs", 2)
    assert [row["seeds"] for row in rows] == 4 * [[1]] + 4 * [[2]]
    assert run_script("ddu", *argv, "--runs", 2, "--eval") == rows
    argv = folder_options(image_folder, tmp_path / "killed", "--members 2")
    paths = [tmp_path / "killed/ddu/run" / name for name in ("seed1.pt", "seed1-member1.pt")]
    for path in paths:  # which is written after the first of two epochs
        kill_after(Child(tmp_path, run_script, "ddu", *argv), path)
    assert run_script("ddu", *argv) == rows[:4]
    for path in paths:
        assert_equal_checkpoints(path, tmp_path / "ddu" / "run" / path.name)
    of_main, of_other = run_ranks(tmp_path, run_script, "ddu", *argv, "--fresh")
    assert of_other == []
    for row, expected in zip(run_script("ddu", *argv, "--eval"), of_main, strict=True):
        assert row.get("nll", 0) == pytest.approx(expected.get("nll", 0), rel=1e-4)


def test_a_network_of_torchvision_is_trained_and_evaluated(image_folder, tmp_path):
    argv = folder_options(image_folder, tmp_path, "--model torchvision/shufflenet_v2_x0_5 --amp")
    assert run_script("ddu", *argv) == run_script("ddu", *argv, "--eval")


def test_a_network_that_is_not_trained_gets_a_fitted_head(image_folder, tmp_path, monkeypatch):
    first = nn.Conv2d(3, 6, 5, bias=False)
    first.weight.data = torch.linspace(-1, 1, 450).mul(50).sin().view(6, 3, 5, 5)
    layers = [first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]  # as if it was trained
    monkeypatch.setitem(ddu.NETWORKS, "mine", lambda args, shape: (layers, 6))
    argv = folder_options(image_folder, tmp_path, "--model mine --epochs 0 --image-size 40")
    rows = run_script("ddu", *argv)
    splits = data.load_splits(parse(" ".join(argv)), 1)
    net = ddu.Network(nn.Sequential(*layers), nn.Linear(6, 3))
    z_train, z_test = [expected_outputs([net], part)[1] for part in (splits.train, splits.test)]
    regression = LogisticRegression(max_iter=10_000, tol=1e-10).fit(z_train, splits.train.labels)
    nll = sk.log_loss(splits.test.labels, regression.predict_proba(z_test))
    assert rows[0]["nll"] == pytest.approx(nll, rel=1e-4)
    assert rows[0]["accuracy"] > 0.4
    assert rows[0]["seeds"] == []
    assert run_script("ddu", *argv, "--eval") == rows


def test_fine_tuning_starts_at_a_head_that_is_fitted_once_and_keeps_the_running_averages(
        image_folder, tmp_path, monkeypatch):
    pretrained = build("resnet18", 10, (3, 16, 16), width=0.05, sn=False, mod=False)
    torch.save(pretrained.state_dict(), tmp_path / "ten_classes.pt")
    argv = folder_options(image_folder, tmp_path, "--model resnet18 --no-sn --lr 0 --epochs 1 "
                          f"--weights {tmp_path}/ten_classes.pt --no-augment")
    of_main, _ = run_ranks(tmp_path, run_script, "ddu", *argv)
    state = common.load(tmp_path / "ddu/run/seed1.pt")["net"]
    for name, value in pretrained.backbone.state_dict(prefix="backbone.").items():
        assert torch.equal(state[name], value), name  # the rate is 0
    splits = data.load_splits(parse(" ".join(argv)), 1)
    _, features = expected_outputs([pretrained], splits.train)
    head = nn.Linear(features.shape[1], 3)
    common.fit_head(head, features, splits.train.labels)
    torch.testing.assert_close(state["head.weight"], head.weight.data, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(common, "fit_head", None)
    assert run_script("ddu", *argv)[0]["nll"] == pytest.approx(of_main[0]["nll"], rel=1e-4)


@pytest.mark.parametrize("count, more", [
    (1, ""), (2, ""), (2, "--active-learning random density --num-initial-samples 9")])
def test_a_class_that_has_no_gaussian_is_named_before_training(count, more, tmp_path):
    save_images(tmp_path / "train", ("ant", "bee"), 12, 20)
    save_images(tmp_path / "train", ("rare",), count, 20)
    save_images(tmp_path / "test", ("ant", "bee", "rare"), 3, 20)
    save_images(tmp_path / "unknown", ("dog",), 3, 20)
    with pytest.raises(common.UserError, match="class rare has fewer than 3 training images"):
        run_script("ddu", *folder_options(tmp_path, tmp_path, more))
    assert not (tmp_path / "ddu").exists()


ACTIVE_OPTIONS = (
    "--dataset dirty_glyphs --width .05 --epochs 1 --limit-steps 1 --members 2 --subsample 90 "
    "--num-initial-samples 60 --acquisition-batch-size 4 --active-learning")


@pytest.mark.parametrize("acquisition", ddu.ACQUISITIONS)
def test_what_has_no_label_and_the_highest_scores_is_acquired(acquisition, monkeypatch):
    """With the published networks: -sn -mod for the density, and neither for the others."""
    args = ddu.options_of(acquisition, parse(f"{ACTIVE_OPTIONS} {acquisition} --shrinkage"))
    pool, labelled, test = ddu.load_pool(args)
    assert pool.labels[labelled].bincount().tolist() == 10 * [6]
    assert pool.is_ambiguous.tolist() == 90 * [False] + 600 * [True]
    assert (test.name, len(test)) == ("glyphs", 120)
    is_hidden = torch.ones(len(pool)).index_fill(0, labelled, 0).bool()
    nets = []
    train = ddu.train

    def note_network(net, train_set, *more):
        assert len(train_set) == 5056
        assert torch.equal(train_set.labels[60:120], pool.labels[labelled])
        nets.append(net)
        return train(net, train_set, *more)

    monkeypatch.setattr(ddu, "train", note_network)
    chosen = ddu.acquisition_step(pool, labelled, test, acquisition, args, 1)["chosen"]
    assert len(chosen.unique()) == 4
    assert is_hidden[chosen].all()
    heads = {net.head.weight.sum().item() for net in nets}
    assert len(heads) == (2 if acquisition in ("pe", "mi") else 1)
    for kind in (ddu.SoftSpectral, nn.LeakyReLU):
        assert bool(modules(nets[0], kind)) == (acquisition == "density")
    logits, z = expected_outputs(nets, pool)
    probs = special.softmax(logits, 2)
    score = stats.entropy(probs.mean(1), axis=1)
    if acquisition == "mi":
        score -= stats.entropy(probs, axis=2).mean(1)
    if acquisition == "density":
        joint = scipy_joint(z[labelled], pool.labels[labelled], z, shrinkage=True)
        score = -special.logsumexp(joint, 1)
    highest = np.sort(score[is_hidden])[:-5:-1]  # copies of an image tie
    assert acquisition == "random" or score[chosen] == pytest.approx(highest)


def test_own_images_are_labelled_until_there_are_no_more(image_folder, tmp_path):
    argv = folder_options(image_folder, tmp_path, "--active-learning random --limit-steps 1 "
                          "--num-initial-samples 20 --acquisition-batch-size 15")
    run_script("ddu", *argv)
    assert json.loads((tmp_path / "ddu/run/results.json").read_text())["sizes"] == [18, 33, 36]


def test_active_learning_resumes_and_reuses_steps_of_equal_options(tmp_path):
    line = (f"{ACTIVE_OPTIONS} density pe --model lenet --no-sn --no-mod --name run "
            f"--max-training-samples 66 --out-dir {tmp_path}")
    rows = run_script("ddu", *line.split(), "--runs", 2)
    _, first, _ = ddu.load_pool(parse(line))
    root = tmp_path / "ddu" / "run"
    for row, name in zip(rows, ("density-of1-seed1", "density-of1-seed2", "pe-of2-seed1",
                                "pe-of2-seed2"), strict=True):
        steps = [common.load(root / f"{name}-{size}.pt") for size in (60, 64, 66)]
        labelled = torch.cat([first, steps[0]["chosen"], steps[1]["chosen"][:2]])
        assert row["ambiguous_fraction"] == (labelled >= 90).double().mean().item()
        assert row["accuracy"] == steps[2]["accuracy"]
        assert row["accuracy_mean"] == np.mean([step["accuracy"] for step in steps])
    (root / "density-of1-seed1-64.pt").unlink()  # as if killed
    assert run_script("ddu", *line.split()) == rows[::2]
    for change in ("--members 3", "--max-training-samples 67", "--shrinkage", "--unit-features"):
        changed = [*line.split(), *change.split()]
        assert run_script("ddu", *changed) == run_script("ddu", *changed, "--name", change[2:])
        for path in (root.parent / change[2:]).glob("*.pt"):
            assert_equal_checkpoints(path, root / path.name)
    with pytest.raises(common.UserError, match="density: training diverged; use a lower learning"):
        run_script("ddu", *f"{line} --limit-steps 3 --lr 1e20 --name far".split())
