"""ddu.py: operators as dense matrices, Gaussians by SciPy and scikit-learn; networks, runs."""

import copy
import csv
import gc
import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from scipy import special, stats
from sklearn import covariance as sk_covariance, metrics as sk
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


def spectral(layer, shape, coeff):
    """A layer with new weights in float64; its raw weight, its SoftSpectral."""
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
    layer, raw, sn = spectral(layer, shape, 1e-3)
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
    assert np.allclose(sn.v.flatten(), v, atol=1e-10) and np.allclose(sn.u.flatten(), u, atol=1e-10)
    effective = raw / ((u @ a @ v) / 1e-3 + eps)  # of eval mode, without a power iteration
    torch.testing.assert_close(layer.eval().weight, effective, rtol=1e-9, atol=0)
    layer.train()
    sigmas = [1e-3 * ((raw / layer.weight).mean().item() - eps) for _ in range(200)]
    assert 0.99 <= sigmas[-1] / np.linalg.norm(a, 2) <= 1 + 1e-9


@pytest.mark.parametrize("coeff", [0.1, 1000.0])  # active or not: weights are never inflated
def test_the_gradient_flows_through_sigma_but_not_through_u_and_v(coeff):
    layer, raw, sn = spectral(convolution(5, 3, padding=1, stride=2), (4, 5, 5), coeff)
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
    assert len(modules(net, ddu.SoftSpectral)) == 2 and net.training
    assert net[1].num_batches_tracked == 0  # by the image that told the shapes
    weight = net.eval()[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net[0].weight, weight)  # float32 here, too


def clusters(counts, dim, seed=0):  # float64 [N, D], labels [N]: Gaussian classes, shuffled
    torch.manual_seed(seed)
    labels = torch.tensor(np.repeat(range(len(counts)), counts))[torch.randperm(sum(counts))]
    mixing = torch.eye(dim) + torch.randn(len(counts), dim, dim) / 2 / dim**0.5
    z = torch.randn(len(labels), 1, dim).double() @ mixing.double()[labels]
    return z[:, 0] + torch.randn(len(counts), dim)[labels], labels


def ledoit_wolf(z):
    """That of scikit-learn, whose covariances have the divisor n."""
    return sk_covariance.ledoit_wolf(z)[0] * len(z) / (len(z) - 1)


def scipy_joint(z, y, points, covariance=partial(np.cov, rowvar=False)):
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
    z, y = clusters(counts, dim)
    z = (z + offset).to(dtype)
    points = offset + 3 * torch.randn(90, dim, dtype=dtype)
    joint = scipy_joint(z, y, points, *[ledoit_wolf] * shrinkage)
    for ours in ddu.class_log_densities(z, y, len(counts), [points, points[:7]], shrinkage):
        assert np.allclose(ours, joint[:len(ours)], rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("count, factor", [(4, 1), (30, 0)])  # few rows; a feature that is always 0
def test_singular_covariances_get_the_smallest_jitter_that_helps_and_others_none(count, factor):
    for seed in range(20):
        z, y = clusters((count, 40), 5, seed)
        z[y == 0, 4] *= factor
        for c in (0, 1):
            gaussian = ddu.fit_gaussian(z[y == c], torch.tensor(0.5).log())
            added = gaussian.factor @ gaussian.factor.T - z[y == c].T.cov()
            jitter = [1e-12, 0][c] * z[y == c].var(0).mean().item()
            assert added.diagonal().mean().item() == pytest.approx(jitter, rel=0.02, abs=1e-15)


def test_what_has_no_covariance_is_refused():
    z, y = clusters((20, 30, 1), 4)
    with pytest.raises(ValueError, match=r"class 2 has 1 example\(s\); a covariance needs two"):
        ddu.class_log_densities(z, y, 3, [z])
    z[y > 0] = 7.0
    with pytest.raises(ValueError, match="singular: its examples are equal, or NaN"):
        ddu.class_log_densities(z, y.clamp(max=1), 2, [z])
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="singular"):
        ddu.fit_gaussian(z[:1], torch.tensor(0.0))


def test_matrices_of_one_class_are_alive_at_a_time(monkeypatch):
    z, y = clusters(range(10, 22), 9)
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
    assert len(seen) == 12 and max(seen) <= 3 * 81  # a covariance, its factor, that before it
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
    for more in ("--runs 2", "--ensemble 2"):
        with pytest.raises(SystemExit):  # the same network, several times
            parse(f"--epochs 0 {more}")
    assert capsys.readouterr().err.count("--epochs 0 evaluates one network") == 2
    for acquisition, sn in (("density", True), ("random", False)):
        options = ddu.options_of(acquisition, parse(f"--active-learning {acquisition} --no-mod"))
        assert (options.sn, options.mod) == (sn, False)


def build(model, num_classes, shape, device="cpu", depth=28, **options):
    """A network with random weights; `depth` is that of wide_resnet."""
    args = parse(f"--dataset cifar10 --model {model}")
    vars(args).update(options, device=torch.device(device))
    with pytest.MonkeyPatch.context() as patch, args.device:
        patch.setitem(ddu.NETWORKS, "wide_resnet", partial(ddu.wide_resnet, depth=depth))
        return ddu.make_network(args, num_classes, shape)


# Published numbers of parameters (-mod), features and spectral layers; the length of features and a
# logit: plain, -sn, -sn -mod (networks written a second time, with functions, gave the same).
FORWARDS = [
    ("lenet", {}, (1, 28, 28), 44_426, 84, 4, [(16.748361, 3.8099619)]),
    ("wide_resnet", dict(depth=16, width=0.1), (1, 14, 14), 36_220_346, 640, 25,
     [(2.6941003, 0.82872159), (2.7197841, 0.79908289), (2.420558, 0.64312307)]),
    ("resnet18", dict(width=1 / 16), (1, 28, 28), 10_998_986, 512, 17,
     [(3.4063411, -0.73999031), (3.4062169, -0.73996681), (2.7762346, -0.75607367)]),
    ("resnet50", dict(width=1 / 32), (1, 28, 28), 20_743_114, 2048, 49,
     [(7.4615572, -0.073524603), (7.4600515, -0.07326728), (9.6872917, -0.071216704)]),
    ("vgg16", dict(width=1 / 16), (3, 32, 32), 14_724_042, 512, 13, [(4.8408545, -0.087205688)]),
    ("vgg16", dict(width=1 / 16), (1, 28, 28), 14_722_890, 512, 13,
     [(4.1647977, -1.1368259), (4.1648155, -1.1370273), (4.1946453, -1.1067056)])]


@pytest.mark.parametrize("model, options, shape, parameters, dim, layers, expected", FORWARDS)
def test_networks_are_those_of_the_paper(model, options, shape, parameters, dim, layers, expected):
    def fixed(shape):  # normal numbers
        return torch.tensor(np.random.RandomState(math.prod(shape)).normal(size=shape))

    whole = build(model, 10, shape, "meta", mod=True, sn=True)
    assert sum(p.numel() for p in whole.parameters()) == parameters
    assert len(modules(whole.backbone, ddu.SoftSpectral)) == layers
    assert whole.head.weight.shape == (10, dim) and not hasattr(whole.head, "parametrizations")
    for (mod, sn), numbers in zip([(False, False), (False, True), (True, True)], expected):
        net = build(model, 7, shape, mod=mod, sn=sn, coeff=0.8, **options).double().train()
        norms = modules(net, nn.BatchNorm2d)
        with torch.no_grad():
            for tensor in net.state_dict().values():
                scale = (2 / tensor[0].numel())**0.5 if tensor.ndim > 1 else 1 / 3
                tensor.copy_(scale * fixed(tensor.shape))
            for norm in norms:
                assert norm.momentum == (0.01 if model == "wide_resnet" else 0.1)
                norm.momentum = 1.0
                norm.weight += 1
            for dropout in modules(net, nn.Dropout):
                assert dropout.p == 0.3
                dropout.p = 0.0
            for _ in range(3):
                net(fixed((6, *shape)))  # running statistics of these images, power iterations
            for norm in norms:
                norm.running_mean += 0.3 * norm.running_var.sqrt()
            logits, features = net.eval()(fixed((6, *shape)))
        assert (features[0].norm().item(), logits[1, 3].item()) == pytest.approx(numbers, rel=1e-6)


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
def outputs_by_hand(nets, dataset):
    """Logits [N, M, K] in float64, and features [N, D] of the first network, in eval mode."""
    images = torch.cat([batch.images for batch in data.Loader(dataset).epoch()])
    logits, features = zip(*[net.eval()(images) for net in nets])
    return torch.stack(logits, 1).double().numpy(), features[0]


def scores_by_hand(logits, temperatures):  # logits [N, M, K] of an ensemble
    probs = special.softmax(logits, 2)
    total = stats.entropy(probs.mean(1), axis=1)
    return {"probs": probs.mean(1), "total": total,
            "probs_scaled": special.softmax(logits / np.c_[temperatures], 2).mean(1),
            "epistemic": total - stats.entropy(probs, axis=2).mean(1)}


def predict_by_hand(nets, splits, args):
    """{method: a dictionary of arrays} for the test set, the OOD set and that of --predict."""
    fitted = outputs_by_hand(nets, splits.train)[1], splits.train.labels
    logits, features = outputs_by_hand(nets, splits.val)
    known = special.logsumexp(scipy_joint(*fitted, features, ledoit_wolf), 1)
    temperatures = [common.fit_temperature(torch.tensor(logits[:, member]), splits.val.labels)
                    for member in range(len(nets))]
    results = []
    for dataset in (splits.test, *splits.ood, splits.predict):
        logits, features = outputs_by_hand(nets, dataset)
        joint = scipy_joint(*fitted, features, ledoit_wolf)
        density = special.logsumexp(joint, 1)
        ours, of_all = [scores_by_hand(logits[:, :count], temperatures[:count])
                        | {"labels": dataset.labels.numpy()} for count in (1, len(nets))]
        del ours["epistemic"]
        entropy = stats.entropy(ours["probs_scaled"], axis=1)
        region = np.where(entropy > args.entropy_threshold, "ambiguous", "in_distribution")
        region[density < np.quantile(known, args.density_quantile)] = "ood"
        ours |= {"region": region, "total_scaled": entropy, "density": -density,
                 "gmm_entropy": stats.entropy(special.softmax(joint, 1), axis=1),
                 "percentile": 100 * (known < density[:, None]).mean(1),
                 "max_prob": -ours["probs"].max(1), "energy": -special.logsumexp(logits[:, 0], 1)}
        results.append(dict(zip(METHODS, (ours, of_all))))
    return results


def row_by_hand(inside, outside):
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
    for score in inside.keys() & {"density", "gmm_entropy", "total", "max_prob", "energy",
                                  "epistemic"}:
        is_out = len(labels) * [0] + len(outside["labels"]) * [1]
        row[f"auroc_{score}"] = sk.roc_auc_score(is_out, np.r_[inside[score], outside[score]])
    return row


METHODS = ("DDU", "ensemble of 2")
PAIRS = [("dirty_glyphs", None), ("dirty_glyphs", "glyphs_letters"), ("glyphs", None),
         ("glyphs", "glyphs_ambiguous"), ("glyphs", "glyphs_letters"), ("glyphs_ambiguous", None)]
STORY = ("--dataset dirty_glyphs --model resnet18 --no-mod --width .06 --batch-size 32 --lr .1 "
         "--schedule one_cycle --shrinkage --ood glyphs_letters --entropy-threshold 2.1 "
         "--density-quantile .2 --predict glyphs --name run")
LEARN = ("--dataset dirty_glyphs --width .05 --epochs 1 --limit-steps 1 --ensemble 2 --subsample "
         "90 --num-initial-samples 60 --acquisition-batch-size 4 --active-learning")


def check_rows(rows, line, paths):
    """Those of the checkpoints `paths`; returns the predictions for the set of --predict."""
    splits = data.load_splits(parse(line), 1)
    nets = [ddu.make_network(parse(STORY), 10, splits.test.shape) for _ in paths]
    for net, path in zip(nets, paths):
        net.load_state_dict(common.load(path)["net"])
    test, letters, predicted = predict_by_hand(nets, splits, parse(line))
    assert [(row["method"], row["set"], row.get("against")) for row in rows] == [
        (method, *pair) for method in METHODS[:len(nets)] for pair in PAIRS]
    clean = {image.numpy().tobytes() for image in data.load("glyphs", "test").images}
    is_clean = np.array([image.numpy().tobytes() in clean for image in splits.test.images])
    for row in rows:
        whole = test[row["method"]]
        named = {"dirty_glyphs": whole, "glyphs_letters": letters[row["method"]],
                 "glyphs": {name: values[is_clean] for name, values in whole.items()},
                 "glyphs_ambiguous": {name: values[~is_clean] for name, values in whole.items()}}
        by_hand = row_by_hand(named[row["set"]], named[row.get("against", row["set"])])
        assert {name: row[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-5)
    return predicted.values()


def test_rows_and_predictions_are_those_by_hand(tmp_path):
    """Of an ensemble, and of its first network as --weights: then on a part of the test set."""
    line = f"{STORY} --epochs 2 --limit-steps 9 --ensemble 2 --out-dir {tmp_path}"
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
            "total": ours["total_scaled"], "confidence": ours["probs_scaled"].max(1),
            "confidence_ensemble": of_all["probs_scaled"].max(1)}.items():
        assert [float(row[name]) for row in lines] == pytest.approx(values, rel=1e-5), name
    line = f"{STORY} --epochs 0 --weights {root}/seed1.pt --out-dir {tmp_path}/again"
    rows = run_script("ddu", *line.split())
    check_rows(rows, line, [root / "seed1.pt"])
    assert rows[0]["n"] == 216  # 24 chose the temperature and the thresholds


def command(root, out, more=""):
    """The arguments of a run on a folder of images, of a second."""
    return (f"--dataset folder:{root} --ood folder:{root}/unknown --width .05 --image-size 16 "
            f"--epochs 2 --batch-size 12 --weights none --name run --out-dir {out} {more}").split()


def test_a_run_on_ones_own_images_is_evaluated_killed_and_shared(image_folder, tmp_path):
    argv = command(image_folder, tmp_path, "--ensemble 2")
    rows = run_script("ddu", *argv, "--runs", 2)
    assert [row["seeds"] for row in rows] == 4 * [[1]] + 4 * [[2]]
    assert run_script("ddu", *argv, "--runs", 2, "--eval") == rows
    names = ["train", "val", "test", "predict", image_folder.name]
    for name in names:
        shutil.copytree(image_folder / "unknown", tmp_path / name)
    others = [f"folder:{tmp_path}/{name}" for name in names]
    _, *pairs = run_script("ddu", *argv, "--runs", 1, "--ensemble", 1, "--eval", "--ood", *others)
    assert pairs == [rows[1] | {"against": name} for name in names]
    argv = command(image_folder, tmp_path / "killed", "--ensemble 2")
    paths = [tmp_path / "killed/ddu/run" / name for name in ("seed1.pt", "seed1-member1.pt")]
    for path in paths:  # which is written after the first of two epochs
        kill_after(Child(tmp_path, run_script, "ddu", *argv), path)
    assert run_script("ddu", *argv) == rows[:4]
    for path in paths:
        assert_equal_checkpoints(path, tmp_path / "ddu" / "run" / path.name)
    of_main, of_other = run_ranks(tmp_path, run_script, "ddu", *argv, "--fresh")
    assert of_other == [] and len(of_main) == 4 and of_main != rows[:4]
    for row, expected in zip(run_script("ddu", *argv, "--eval"), of_main, strict=True):
        assert row.get("nll", 0) == pytest.approx(expected.get("nll", 0), rel=1e-4)


@pytest.mark.parametrize("name, more", [("shufflenet_v2_x0_5", "--amp"), ("vit_b_16", "--sn")])
def test_networks_of_torchvision(name, more, image_folder, tmp_path, monkeypatch, capsys):
    if more == "--sn":  # a small vit_b_16
        monkeypatch.setattr(models, "get_model", lambda *_, **__: models.VisionTransformer(
            16, 4, 2, 2, 24, 48))
    argv = command(image_folder, tmp_path, f"--model torchvision/{name} {more}")
    assert run_script("ddu", *argv) == run_script("ddu", *argv, "--eval")
    assert ("tion: class_token, encoder.pos_" in capsys.readouterr().out) == (more == "--sn")


@pytest.mark.parametrize("acquisition", ddu.ACQUISITIONS)
def test_what_has_no_label_and_the_highest_scores_is_acquired(acquisition, monkeypatch):
    """With the published networks: -sn -mod for the density, and neither for the others."""
    args = ddu.options_of(acquisition, parse(f"{LEARN} {acquisition} --shrinkage"))
    images, labelled, test = ddu.load_pool(args)
    assert images.labels[labelled].bincount().tolist() == 10 * [6]
    assert images.is_ambiguous.tolist() == 90 * [False] + 600 * [True]
    is_hidden = torch.ones(len(images)).index_fill(0, labelled, 0).bool()
    labels = images.labels.where(~is_hidden, (images.labels + 1) % 10)  # the others are false
    nets = []
    train = ddu.train

    def note_network(net, train_set, *more):
        assert len(train_set) == 5056 and torch.equal(train_set.labels[:60], labels[labelled])
        nets.append(net)
        return train(net, train_set, *more)

    monkeypatch.setattr(ddu, "train", note_network)
    pool = ddu.Pool(replace(images, labels=labels), labelled, test)
    chosen = ddu.acquisition_step(pool, labelled, acquisition, args, 1)["chosen"]
    assert len(chosen.unique()) == 4 and is_hidden[chosen].all()
    assert len(nets) == (2 if acquisition in ("pe", "mi") else 1)
    assert len(nets) == 1 or not torch.equal(nets[0].head.weight, nets[1].head.weight)
    for kind in (ddu.SoftSpectral, nn.LeakyReLU):
        assert bool(modules(nets[0], kind)) == (acquisition == "density")
    logits, z = outputs_by_hand(nets, images)
    score = scores_by_hand(logits, [1.0])["epistemic" if acquisition == "mi" else "total"]
    if acquisition == "density":
        score = -special.logsumexp(scipy_joint(z[labelled], labels[labelled], z, ledoit_wolf), 1)
    highest = np.sort(score[is_hidden])[:-5:-1]  # copies of an image tie
    assert acquisition == "random" or score[chosen] == pytest.approx(highest)


@pytest.mark.parametrize("first, last, sizes", [(25, 32, [20, 25, 30, 32]), (5, 12, [10, 12]),
                                                (40, 3, [40]), (5, 800, [*range(10, 651, 5)])])
def test_the_numbers_of_labels_are_those_of_the_labelled_images(first, last, sizes, tmp_path,
                                                                monkeypatch):
    monkeypatch.setattr(ddu, "label_step_by_step", lambda *more: ([1.0], []))
    [row] = run_script("ddu", *f"{LEARN} random --num-initial-samples {first} --subsample 50 "
                       f"--acquisition-batch-size 5 --max-training-samples {last} --name run "
                       f"--out-dir {tmp_path}".split())
    found = json.loads((tmp_path / "ddu" / "run" / "results.json").read_text())["sizes"]
    assert found == sizes and row["labels"] == sizes[-1]


def test_active_learning_resumes_and_reuses_steps_of_equal_options(tmp_path, monkeypatch):
    line = (f"{LEARN} density pe --model lenet --no-sn --no-mod --max-training-samples 66 --name "
            f"run --out-dir {tmp_path}")
    rows = run_script("ddu", *line.split(), "--runs", 2)
    pool = ddu.load_pool(parse(line))
    root = tmp_path / "ddu" / "run"
    for row, name in zip(rows, ("density-of1-seed1", "density-of1-seed2", "pe-of2-seed1",
                                "pe-of2-seed2"), strict=True):
        steps = [common.load(root / f"{name}-{size}.pt") for size in (60, 64, 66)]
        labelled = torch.cat([pool.labelled_first, steps[0]["chosen"], steps[1]["chosen"][:2]])
        assert row["ambiguous_fraction"] == (labelled >= 90).double().mean().item()
        accuracies = [step["accuracy"] for step in steps]
        assert [row["accuracy"], row["accuracy_mean"]] == [accuracies[2], np.mean(accuracies)]
    (root / "density-of1-seed1-64.pt").unlink()  # as if killed
    with pytest.raises(common.UserError, match="64 labels have not been .*without --eval"):
        run_script("ddu", *line.split(), "--eval")
    assert run_script("ddu", *line.split()) == rows[::2]
    for change in ("--ensemble 3", "--max-training-samples 67", "--shrinkage"):
        changed = [*line.split(), *change.split()]
        assert run_script("ddu", *changed) == run_script("ddu", *changed, "--name", change[2:])
        for path in (root.parent / change[2:]).glob("*.pt"):
            assert_equal_checkpoints(path, root / path.name)
    with pytest.raises(common.UserError, match="density: training diverged; use a lower learning"):
        run_script("ddu", *f"{line} --limit-steps 3 --lr 1e20 --name far".split())
    monkeypatch.setattr(ddu, "load_pool", lambda _: pool._replace(test=pool.test.select([0, 1])))
    with pytest.raises(common.UserError, match="was made with data"):
        run_script("ddu", *line.split())
