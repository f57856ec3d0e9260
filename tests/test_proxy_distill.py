"""proxy_distill.py: equations against mpmath and brute force; networks, training, rows, runs."""

import csv
import math
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (Child, assert_equal_checkpoints, kill_after, run_ranks, run_script,
                      save_images)
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import nn
from torchvision import models

import common
import data
import proxy_distill as pd

# Functions of arrays of mpmath's numbers.
exp = np.frompyfunc(mpmath.exp, 1, 1)
log = np.frompyfunc(mpmath.log, 1, 1)
digamma = np.frompyfunc(mpmath.digamma, 1, 1)
loggamma = np.frompyfunc(mpmath.loggamma, 1, 1)


def exact_dirichlet_kl(a, b):
    """KL(Dir(a) || Dir(b)) of concentrations [K]."""
    log_norm_a = loggamma(a.sum()) - loggamma(a).sum()
    log_norm_b = loggamma(b.sum()) - loggamma(b).sum()
    expected_log = digamma(a) - digamma(a.sum())
    return log_norm_a - log_norm_b + ((a - b) * expected_log).sum()


def exact_loss(loss, z, p, m, t):
    """A loss of one image, from a student's logits z [K] and the predictions p [M, K]."""
    pi = p.mean(0)
    alpha = exp(z) + m
    if loss == "forward_kl":
        return (pi * log(pi * exp(z).sum() / exp(z))).sum()
    if loss == "dirichlet_likelihood":
        log_norm = loggamma(alpha.sum()) - loggamma(alpha).sum()
        return -(log_norm + ((alpha - 1) * log(p)).sum(1)).mean()
    rmi = (pi * log(pi / p)).sum(1).mean()
    beta_0 = (len(z) - 1) / (2 * rmi + mpmath.mpf(2)**-23)
    if loss == "proxy":
        return exact_dirichlet_kl(pi * beta_0 + t, alpha)
    b = beta_0 + len(z) * t
    return exact_dirichlet_kl(alpha, pi * b + 1) / b


def random_member_logits(b=2, k=4, spread=0.5):
    """Logits [3, B, K]: a normal vector that all members share, and one of each."""
    torch.manual_seed(0)
    return 2 * torch.randn(b, k).double() + spread * torch.randn(3, b, k).double()


def loss_and_gradient(loss, z, ensemble, m=1.0, t=1.0):
    z = z.clone().requires_grad_()
    losses = pd.LOSSES[loss](z, ensemble, m, t)
    return losses.detach(), torch.autograd.grad(losses.sum(), z)[0]


@pytest.mark.parametrize("loss", pd.LOSSES)
@pytest.mark.parametrize("m, t, spread, largest", [(1, 1, 0.5, 2), (0.3, 0.7, 0.5, 2),
                                                   (1, 0.2, 0, 12), (1, 1, 0.5, 20)])
def test_losses_and_their_gradients_are_those_of_mpmath(loss, m, t, spread, largest):
    """Offsets 1 and others, members that agree, a logit far above the optimum."""
    members = random_member_logits(spread=spread)
    z = torch.randn(2, 4).double()
    z[:, 1] = largest
    losses, gradient = loss_and_gradient(loss, z, pd.ensemble_statistics(members), m, t)
    step = mpmath.mpf("1e-20")
    with mpmath.workdps(60):
        x = z[1].numpy().astype(object)
        p = exp(members[:, 1].numpy().astype(object))
        exact = partial(exact_loss, loss, p=p / p.sum(1, keepdims=True), m=m, t=t)
        slopes = [float((exact(x + step * axis) - exact(x - step * axis)) / (2 * step))
                  for axis in np.eye(4, dtype=int)]
        assert losses[1].item() == pytest.approx(float(exact(x)))
    assert gradient[1].tolist() == pytest.approx(slopes, 1e-5, 1e-6 * max(map(abs, slopes)))


@pytest.mark.parametrize("t", [1, 0, 2.5])
def test_the_optimum_of_the_reverse_kl_is_the_mean_prediction_with_precision_b(t):
    ensemble = pd.ensemble_statistics(random_member_logits(k=40))
    b = pd.proxy_precision(ensemble) + 40 * t
    z = ensemble.log_probs + b.log()[:, None]  # softmax(z) = pi, sum exp(z) = b
    losses, gradient = loss_and_gradient("rkl_proxy", z, ensemble, 1, t)
    np.testing.assert_allclose(torch.cat([losses[:, None], gradient], 1), 0, atol=1e-10)


@pytest.mark.parametrize("loss", pd.LOSSES)
@pytest.mark.parametrize("size, m", [(50.0, 1), (2000.0, 1), (2000.0, 0)])
def test_a_logit_beyond_the_clamp_has_a_gradient_that_pulls_it_back(loss, size, m):
    z = torch.tensor([[size, 0, 1], [-size, size, 3]])
    _, scores = pd.student_predictions(z)
    assert all(values.isfinite().all() for values in scores.values())
    ensemble = pd.ensemble_statistics(random_member_logits(k=3))
    losses, gradient = loss_and_gradient(loss, z, ensemble, m)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()  # in float32
    assert gradient[0, 0] > 0
    assert gradient[1, 1] > 0
    assert gradient[1, 0] < 0 or m == 1


@pytest.mark.parametrize("loss", pd.LOSSES)
@pytest.mark.parametrize("m, t", [(1, 1), (0, 1), (1, 0.1)])
def test_members_with_probability_0_give_finite_losses_and_scores(loss, m, t):
    logits = torch.zeros(2, 1, 40)
    logits[0, 0, 0] = logits[1, 0, 1] = 1000  # all other probabilities are 0
    logits[:, :, 39] = 0 if loss == "dirichlet_likelihood" else -math.inf
    ensemble = pd.ensemble_statistics(logits)
    _, scores = pd.ensemble_predictions(ensemble)
    assert scores["rmi"].item() == pytest.approx(1000 / 2 - math.log(2))
    assert scores["epistemic"].item() == pytest.approx(math.log(2))
    _, scores_of_proxy = pd.proxy_predictions(ensemble)
    assert all(values.isfinite().all() for values in scores_of_proxy.values())
    losses, gradient = loss_and_gradient(loss, torch.randn(1, 40), ensemble, m, t)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("spread", [0.5, 0])  # 0: members agree
def test_uncertainties_of_an_ensemble_are_loops_over_pairs_of_members(spread):
    logits = random_member_logits(b=50, spread=spread)
    p = logits.softmax(-1).numpy()
    pi = p.mean(0)
    total = stats.entropy(pi, axis=-1)
    aleatoric = stats.entropy(p, axis=-1).mean(0)
    epkl = np.mean([stats.entropy(a, b, axis=-1) for a in p for b in p], 0)
    rmi = np.mean([stats.entropy(pi, a, axis=-1) for a in p], 0)
    ensemble = pd.ensemble_statistics(logits.requires_grad_())
    predictions = common.Predictions(*pd.ensemble_predictions(ensemble))
    expected = [1 - pi.max(-1), total, aleatoric, total - aleatoric, epkl, rmi]
    np.testing.assert_allclose(torch.stack([*predictions.scores.values()]), expected, 1e-9, 1e-14)
    proxy = common.Predictions(*pd.proxy_predictions(ensemble))
    np.testing.assert_allclose(proxy.scores["epkl"], 2 * rmi + 2.0**-23, rtol=1e-7)
    for found in (predictions, proxy):
        np.testing.assert_allclose(found.log_probs, np.log(pi), rtol=1e-9)
        np.testing.assert_allclose(found.scores["total"], total, rtol=1e-9)
        assert all((values >= 0).all() for values in found.scores.values())


def test_members_that_agree_have_no_epistemic_uncertainty_at_all():
    """Not one of 1e-18, whose AUROC would be that of rounding errors."""
    logits = 3 * torch.randn(200, 40)
    _, scores = pd.ensemble_predictions(pd.ensemble_statistics(logits.expand(3, -1, -1)))
    for name in ("epistemic", "rmi", "epkl"):
        assert scores[name].count_nonzero() == 0


def test_a_student_of_vast_precision_has_no_epistemic_uncertainty_at_all():
    _, scores = pd.student_predictions(torch.randn(200, 10) + 40)
    assert scores["epistemic"].count_nonzero() == 0
    assert scores["rmi"].count_nonzero() == 0


@pytest.mark.parametrize("alpha", [[2.5, 1.5, 6.0], [0.3, 40.0]])
def test_uncertainties_of_a_student_are_integrals_over_the_marginals_of_its_dirichlet(alpha):
    mean = np.array(alpha) / sum(alpha)
    marginals = [stats.beta(a, sum(alpha) - a) for a in alpha]
    log_p = np.array([marginal.expect(np.log) for marginal in marginals])
    p_log_p = np.array([marginal.expect(lambda p: p * np.log(p)) for marginal in marginals])
    total = stats.entropy(mean)
    expected = [1 - mean.max(), total, -p_log_p.sum(), total + p_log_p.sum(),
                (p_log_p - mean * log_p).sum(), (mean * (np.log(mean) - log_p)).sum()]
    _, scores = pd.student_predictions(torch.tensor([alpha]).double().log())
    np.testing.assert_allclose([*scores.values()], np.c_[expected], rtol=1e-6)


@pytest.mark.parametrize("n, subnetworks, more", [(128, 2, ()), (70, 2, (3, 0.5)), (99, 3, (1, 0))])
def test_each_subnetwork_sees_each_image_equally_often_and_shares_a_fraction(n, subnetworks, more):
    rows = pd.mimo_rows(n, subnetworks, *more)
    repetitions, shared = more or (2, 0.6)
    count = int(n * repetitions * (1 - shared))  # published: 102 of 256 rows
    for column in rows.T:
        assert column.bincount(minlength=n).tolist() == n * [repetitions]
    is_shared = (rows == rows[:, :1]).all(1)
    assert is_shared[count:].all()
    assert is_shared[:count].sum() < count / 10


def study_arguments(images, out, more=""):
    """The command line of a study on a folder of images, which takes a second."""
    words = (f"--dataset folder:{images} --ood folder:{images}/unknown --width .1 --members 2 "
             "--member-epochs 2 --epochs 2 --mimo 2 --mimo-epochs 2 --batch-size 12 --lr .3 "
             f"--noise 1 --augment --name run --out-dir {out} {more}")
    return words.split()


def parse_options(more=""):
    """The options of a study by the paper's loss, with other offsets than the paper's."""
    words = ("--losses rkl_proxy --batch-size 4 --opt sgd --weight-decay .01 --model-offset .5 "
             f"--target-offset .7 --no-augment --workers 0 --device cpu {more}")
    return pd.parse_args(study_arguments("images", "runs", words))


@pytest.mark.parametrize("name, decayed, free", [("resnet18", 30, 32), ("resnet50", 65, 96)])
def test_resnets_are_those_of_torchvision_whose_last_batch_norms_start_at_zero(name, decayed, free):
    ours = pd.make_network(parse_options(f"--model {name} --width 1"), 1000, (3, 96, 96)).eval()
    for block in ours.modules():
        if isinstance(block, pd.Residual):
            assert (block.body[-1].weight == 0).all()
            assert (block.body[1].weight == 1).all()
    assert ours.backbone[0].weight.std().item() == pytest.approx((2 / 64 / 49) ** 0.5, rel=0.05)
    theirs = models.get_model(name).eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    layers, _ = pd.NETWORKS[name](parse_options(), (3, 64, 64))  # of small images
    assert layers[0].kernel_size == (3, 3)
    groups = pd.make_optimiser(ours, parse_options()).param_groups
    assert [(len(group["params"]), group["weight_decay"], group["nesterov"])
            for group in groups] == [(decayed, 0.01, True), (free, 0, True)]
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x[:, :, :32, :32]).dtype == torch.float32


def test_learning_rates():
    args = Namespace(lr=0.1, batch_size=2048, schedule="step")
    rates = [pd.learning_rate(7 * epoch, 7, 120, args) for epoch in (0, 39.9, 40, 79.9, 80, 106)]
    assert rates == pytest.approx([0.8, 0.8, 0.08, 0.08, 0.008, 0.0008])
    assert pd.learning_rate(6, 7, 1, args) == 0.8  # not a thousandth of it
    args.schedule = "cosine"
    rates = [pd.learning_rate(step, 10, 10, args) for step in range(100)]
    np.testing.assert_allclose(rates[:20], 0.8 * np.arange(1, 21) / 21)
    np.testing.assert_allclose(rates[20:], 0.4 + 0.4 * np.cos(np.pi * np.arange(80) / 80))


def grey_images(name, **more):
    """Twelve images, of one grey each."""
    images = torch.arange(40, 208, 14, dtype=torch.uint8).view(12, 1, 1, 1).expand(-1, 1, 8, 8)
    return replace(data.ImageSet(name, images, torch.arange(12) % 3, 3, (0.0,), (1.0,)), **more)


def make_recording_network(args, num_classes, shape):
    """A linear network that records the images [b, D] that it sees, their rows and its logits."""
    def record(net, inputs, logits):
        x = inputs[0].flatten(1)
        rows = ((255 * x.view(-1, 64).mean(1) - 40) / 14).round().long()  # in spite of noise
        net.seen.append((x, rows, logits.detach()))
    net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))
    net.register_forward_hook(record)
    net.seen = []
    return net


class RecordingOptimiser:
    """It changes nothing, and records the gradient of the weights, the rate and the seed."""

    def __init__(self, net, steps):
        self.weight = next(net.parameters())
        self.steps = steps
        self.param_groups = [{}, {}]

    def zero_grad(self):
        self.weight.grad = None

    def step(self):
        [lr] = {group["lr"] for group in self.param_groups}
        self.steps.append((self.weight.grad.clone(), lr, torch.initial_seed()))


def gradient_of_weights(loss_of, x, logits):
    """Of a linear layer with inputs x [b, D], from a loss that is a function of its logits."""
    z = logits.clone().requires_grad_()
    [by_z] = torch.autograd.grad(loss_of(z), z)
    return by_z.flatten(1).T @ x


@pytest.fixture
def recorded_training(monkeypatch):
    """Sets with noise, four networks after two epochs, and (gradient, rate, seed) of each step."""
    steps = []
    monkeypatch.setattr(pd, "make_network", make_recording_network)
    monkeypatch.setattr(pd, "make_optimiser", lambda net, args: RecordingOptimiser(net, steps))
    ood = [grey_images("one"), grey_images("two")]
    sets = data.Splits(grey_images("train"), None, grey_images("test"), ood, None)
    monkeypatch.setattr(data, "load_splits", lambda *_, **__: sets)
    run = Namespace(resume=lambda *_, **__: [], save=lambda *_, **__: None)
    splits = pd.load_splits(parse_options())
    networks = pd.train_networks(splits.train, parse_options(), 5, run)
    assert list(networks) == [("member", 0), ("member", 1), ("mimo", 0), ("student_rkl_proxy", 0)]
    return splits, list(networks.values()), steps


def test_no_noise_and_no_order_is_used_twice(recorded_training):
    """In no epoch of any network, in no set, nor in computed corruptions."""
    splits, (first, second, mimo, student), steps = recorded_training
    assert len({seed for _, _, seed in steps}) == 4 * 2  # of networks and epochs: for dropout, too
    computed = data.corrupted(grey_images("test"), "gaussian_noise", 1)
    noisy = [dataset.images.flatten(1) / 255 for dataset in (splits.test, *splits.ood, computed)]
    orders = []
    for net in (first, second, student):
        for epoch in (net.seen[:3], net.seen[3:6]):
            images, numbers, _ = [torch.cat(column) for column in zip(*epoch)]
            noisy.append(images)
            orders.append(tuple(numbers.tolist()))
    of_mimo = torch.cat([x for x, _, _ in mimo.net.seen]).view(-1, 64)  # each image 2 E times
    noisy = torch.cat([*noisy, of_mimo.unique(dim=0)])
    assert len(noisy) == (4 + 6 + 2) * 12
    assert len(noisy.unique(dim=0)) == len(noisy)
    assert len(set(orders)) == 6


def test_each_step_minimises_the_loss_of_what_a_network_sees(recorded_training):
    """Members see labels, and what the student sees; MIMO has 2 --batch-size labels in a step."""
    _, (first, second, mimo, student), steps = recorded_training
    seen = [*first.seen[:6], *second.seen[:6], *mimo.net.seen]
    for (x, numbers, logits), (gradient, *_) in zip(seen, steps):
        expected = gradient_of_weights(
            lambda z: F.cross_entropy(z.view(-1, 3), numbers % 3), x, logits)
        torch.testing.assert_close(gradient, expected)
    for number, (x, _, logits) in enumerate(student.seen, 6):
        of_members = [net.seen[number] for net in (first, second)]
        assert torch.equal(x, of_members[0][0])
        assert torch.equal(x, of_members[1][0])
        ensemble = pd.ensemble_statistics(torch.stack([z for _, _, z in of_members]))
        expected = gradient_of_weights(
            lambda z: pd.rkl_proxy_loss(z, ensemble, 0.5, 0.7).mean(), x, logits)
        torch.testing.assert_close(steps[number + 18][0], expected)
    loader = pd.make_loader(grey_images("train"), 0, parse_options("--augment"), 1)
    assert loader.augment == "crop_flip"
    rates = [pd.learning_rate(step, 3, 2, parse_options()) for step in range(6)]
    of_mimo = [2 * pd.learning_rate(step, 6, 2, parse_options()) for step in range(12)]
    assert [lr for _, lr, _ in steps] == [*rates, *rates, *of_mimo, *rates]


def test_rows_are_those_of_scikit_learn_and_labels_of_imagenet_a_are_among_its_classes(monkeypatch):
    """Logits are restricted before the softmax; uncertainties are those of all classes."""
    keys = [("member", 0), ("member", 1), ("mimo", 0), ("student_rkl_proxy", 0),
            ("student_forward_kl", 0)]
    names = [*keys[:2], ("proxy", 0), ("ensemble", 0), *keys[2:]]
    seeds = [[7], [8], [7, 8], [7, 8], [7], [7, 8], [7, 8]]
    classes_of = {"imagenet": tuple("abcde"), "imagenet_a": ("b", "d"), "imagenet_o": ("b", "d")}
    test, *ood = [grey_images(name, labels=torch.arange(90) % len(classes), classes=classes)
                  for name, classes in classes_of.items()]
    outputs = [dict(zip(keys, [2 * torch.randn(90, *shape, 5) for shape in ((), (), (2,), (), ())]))
               for _ in classes_of]
    results = [pd.predict(of_set) for of_set in outputs]
    assert [list(of_set) for of_set in results] == [names] * 3
    splits = data.Splits(test, None, test, ood, None)
    of_sets = iter(outputs)
    monkeypatch.setattr(pd, "train_networks", lambda *_: None)
    monkeypatch.setattr(pd, "compute_outputs", lambda *_: next(of_sets))
    args = parse_options("--dataset imagenet --no-plot --shift none")
    rows = pd.run_seed(splits, args, 7, None)
    found = [(row["set"], row.get("against")) for row in rows]
    pairs = [("imagenet", None), ("imagenet", "imagenet_a"), ("imagenet", "imagenet_o")]
    assert found == 7 * pairs + 7 * [("imagenet_a", None)]  # folders of ImageNet-O are no labels
    blocks = [rows[0:21:3], rows[21:], rows[1:21:3], rows[2:21:3]]
    for number, dataset, classes in ((0, test, [0, 1, 2, 3, 4]), (1, ood[0], [1, 3])):
        one, two, mimo, *students = [z[..., classes].double().softmax(-1)
                                     for z in outputs[number].values()]
        probs = [one, two, (one + two) / 2, (one + two) / 2, mimo.mean(1), *students]
        for row, pair, name, seed, p in zip(blocks[number], blocks[3], names, seeds, probs,
                                            strict=True):
            kind, _ = name
            inside, outside = results[number][name], results[2][name]
            assert row["method"] == pair["method"] == pd.METHODS[kind]
            assert row["seeds"] == pair["seeds"] == seed
            assert ("prr_rmi" in row) == (kind not in ("member", "student_forward_kl"))
            wrong = p.argmax(1) != dataset.labels
            assert row["accuracy"] == pytest.approx(1 - wrong.double().mean().item())
            assert row["nll"] == pytest.approx(F.nll_loss(p.log(), dataset.labels).item())
            for score, values in inside.scores.items():
                assert row[f"prr_{score}"] == pytest.approx(2 * roc_auc_score(wrong, values) - 1)
                if number == 0:
                    both = torch.cat([values, outside.scores[score]])
                    auroc = roc_auc_score(90 * [0] + 90 * [1], both)
                    assert pair[f"auroc_{score}"] == pytest.approx(auroc)


@pytest.mark.parametrize("shift", ["published", "computed"])
def test_rows_of_corruptions_are_means_over_the_copies(shift, monkeypatch):
    """A rejection ratio that one copy does not have has no mean."""
    args = parse_options(f"--shift {shift}")
    logits = torch.randint(256, (2, 12, 1, 1, 3), dtype=torch.uint8)
    logits[1] = 255 * F.one_hot(grey_images("").labels, 3).view(12, 1, 1, 3)  # no error
    sets = [grey_images("test", images=images, std=(0.1,)) for images in logits]
    copies = [data.Corruption("c", "fog", 1, sets[0]), data.Corruption("c", "snow", 1, sets[1])]
    kinds_asked = []

    def corrupted_sets(test_set, args, kinds):
        kinds_asked.extend(kinds)
        return copies

    monkeypatch.setattr(data, "corrupted_sets", corrupted_sets)
    splits = data.Splits(None, None, sets[0], [], None)
    test_results = pd.predict({("member", 0): torch.randn(12, 3)})
    row, pair = pd.evaluate_shift({("member", 0): nn.Flatten()}, test_results, splits, args, 7)
    assert tuple(kinds_asked) == data.CIFAR_C_KINDS[:15]  # of 19: published tables have these
    if shift == "published":  # whose files have no noise yet
        sets = [pd.with_noise(dataset, args, 2) for dataset in sets]
    nll = [F.cross_entropy(dataset.images.flatten(1) / 25.5, dataset.labels) for dataset in sets]
    assert row["nll"] == pytest.approx(np.mean(nll), rel=1e-5)
    assert row["prr_total"] is None
    assert row["seeds"] == pair["seeds"] == [7]
    assert (row["set"], row["n"]) == ("c", 24)
    assert (pair["set"], pair["against"], pair["n"]) == ("test", "c", 12)


def test_a_batch_that_mimo_cannot_divide_is_refused(capsys):
    with pytest.raises(SystemExit):
        pd.parse_args(["--mimo", "3"])
    assert "--batch-size must be divisible by --mimo" in capsys.readouterr().err


@pytest.fixture(scope="module")
def study(image_folder, tmp_path_factory):
    """The rows of a study with all losses, those of --eval, and its directory."""
    out = tmp_path_factory.mktemp("study")
    more = f"--losses {' '.join(pd.LOSSES)} --predict folder:{image_folder}/test --shift computed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CORRUPTIONS", dict(list(data.CORRUPTIONS.items())[:2]))
        argv = study_arguments(image_folder, out, more)
        rows = pd.main([*argv, "--device", "cpu"])  # with a picture
        again = run_script("proxy_distill", *study_arguments(image_folder, out, "--eval"))
    return rows, again, out / "proxy_distill" / "run"


def test_a_study_has_rows_of_all_methods_and_eval_repeats_them(study):
    rows, again, root = study
    assert again == rows
    assert (root / "uncertainty.png").stat().st_size > 10_000
    test = rows[0]["set"]
    pairs = [(test, None, 15), (test, "unknown_noise1", 15), (f"{test}_computed", None, 150),
             (test, f"{test}_computed", 15)]
    found = {(row["method"], row["set"], row.get("against"), row["n"]) for row in rows}
    assert found == {(method, *pair) for method in [*pd.METHODS.values()][:-1] for pair in pairs}


def test_predictions_are_those_of_the_last_student_and_of_the_ensemble(study, image_folder,
                                                                       tmp_path):
    """For images as they are, although those of the run have noise."""
    _, _, root = study
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    assert len(lines) == 15
    columns = "predicted confidence one_minus_max total aleatoric epistemic epkl rmi".split()
    assert list(lines[0]) == ["file", "label", *columns, *[f"{name}_ensemble" for name in columns]]
    words = (f"--noise 0 --losses --mimo 0 --ensemble-paths {root}/member-seed1.pt "
             f"{root}/member-seed2.pt --student-path {root}/student_rkl_proxy-of2-seed1.pt")
    argv = study_arguments(image_folder, tmp_path, words)
    accuracy = {row["method"]: row["accuracy"]
                for row in run_script("proxy_distill", *argv) if "nll" in row}
    correct = [line["label"] == line["predicted"] for line in lines]
    assert np.mean(correct) == pytest.approx(accuracy["student of --student-path"])
    correct = [line["label"] == line["predicted_ensemble"] for line in lines]
    assert np.mean(correct) == pytest.approx(accuracy["ensemble"])


def test_a_run_that_is_killed_three_times_ends_with_equal_weights(study, image_folder, tmp_path):
    argv = study_arguments(image_folder, tmp_path, "--losses rkl_proxy")
    root = tmp_path / "proxy_distill" / "run"
    names = ["member-seed2.pt", "mimo2-seed1.pt", "student_rkl_proxy-of2-seed1.pt"]
    for name in names:  # which is written after the first of two epochs
        kill_after(Child(tmp_path, run_script, "proxy_distill", *argv), root / name)
    run_script("proxy_distill", *argv)
    for name in names:
        assert_equal_checkpoints(root / name, study[2] / name)


def test_two_processes_train_the_networks_that_one_evaluates(image_folder, tmp_path):
    argv = study_arguments(image_folder, tmp_path, "--runs 2")
    rows, _ = run_ranks(tmp_path, run_script, "proxy_distill", *argv)
    again = run_script("proxy_distill", *argv, "--eval")
    assert [row.get("nll", 0) for row in again] == pytest.approx(
        [row.get("nll", 0) for row in rows], rel=1e-4)
    assert {row["seeds"][0] for row in rows} == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def files_of_networks(study, tmp_path_factory):
    """Two members and a student: a checkpoint, and state dicts of torch.compile and Lightning."""
    _, _, root = study
    names = ["member-seed1.pt", "member-seed2.pt", "student_rkl_proxy-of2-seed1.pt"]
    folder = tmp_path_factory.mktemp("files")
    files = [folder / name for name in names]
    first, second, student = [torch.load(root / name, weights_only=True)["net"] for name in names]
    torch.save({"net": first}, files[0])
    torch.save({f"_orig_mod.module.{name}": second[name] for name in second}, files[1])
    torch.save({"state_dict": {f"model.{name}": student[name] for name in student}}, files[2])
    return files


def test_files_of_networks_are_evaluated_like_the_networks_of_a_run(study, files_of_networks,
                                                                    image_folder, tmp_path):
    rows, _, _ = study
    first, second, student = files_of_networks
    argv = study_arguments(image_folder, tmp_path, f"--ensemble-paths {first} {second} --losses "
                           f"--mimo 0 --student-path {student}")
    found = [row for row in run_script("proxy_distill", *argv) if "nll" in row]
    assert len(found) == 5
    assert found[-1]["method"] == "student of --student-path"
    assert {row["nll"] for row in found} <= {row.get("nll") for row in rows}
    assert all(row["seeds"] == [] for row in found)


@pytest.mark.parametrize("changed", [1, 2])
def test_another_content_of_a_file_is_refused(changed, files_of_networks, image_folder, tmp_path):
    files = [tmp_path / path.name for path in files_of_networks]
    for file, path in zip(files, files_of_networks):
        shutil.copy(path, file)
    argv = study_arguments(image_folder, tmp_path, f"--ensemble-paths {files[0]} {files[1]} "
                           f"--losses --mimo 0 --student-path {files[2]}")
    run_script("proxy_distill", *argv)
    shutil.copy(files[0], files[changed])
    with pytest.raises(common.UserError, match=f"content of .*{files[changed].name}"):
        run_script("proxy_distill", *argv)


def test_one_file_three_times_is_no_repetition(files_of_networks, image_folder, tmp_path):
    """Its row has no standard error, and members that are equal do not disagree."""
    first, *_ = files_of_networks
    argv = study_arguments(image_folder, tmp_path, f"--ensemble-paths {first} {first} {first} "
                           "--losses --mimo 0")
    rows = run_script("proxy_distill", *argv)
    single = [row for row in rows if row["method"] == "single network" and "nll" in row]
    [line] = common.pool(single, ["nll"])
    assert "±" not in line["nll"]
    [pair] = [row for row in rows if row["method"] == "ensemble" and "against" in row]
    assert pair["auroc_epistemic"] == 0.5  # all are 0


def test_a_student_of_files_and_a_mimo_network_have_their_own_seeds_or_none():
    args = parse_options("--ensemble-paths a.pt b.pt --mimo 2")
    assert pd.list_seeds(("student_rkl_proxy", 0), args, 5) == []
    assert pd.list_seeds(("ensemble", 0), args, 5) == []
    assert pd.list_seeds(("mimo", 0), args, 5) == [5]


@pytest.mark.parametrize("option", ["--ensemble-paths", "--student-path"])
def test_a_last_layer_of_other_classes_is_refused(option, files_of_networks, image_folder,
                                                  tmp_path):
    save_images(tmp_path / "two" / "train", ("ant", "bee"), 4, 40)
    save_images(tmp_path / "two" / "test", ("ant", "bee"), 2, 40)
    argv = study_arguments(tmp_path / "two", tmp_path, f"--ood --losses --mimo 0 --members 1 "
                           f"{option} {files_of_networks[0]}")
    with pytest.raises(common.UserError, match="no trained last layer of 2 classes"):
        run_script("proxy_distill", *argv)


def test_a_network_that_nothing_trained_is_refused(image_folder, tmp_path):
    argv = study_arguments(image_folder, tmp_path, "--member-epochs 0 --mimo 0 --losses")
    with pytest.raises(common.UserError, match="no trained last layer of 3 classes"):
        run_script("proxy_distill", *argv)


def test_a_student_that_nothing_trains_is_refused(capsys):
    with pytest.raises(SystemExit):
        pd.parse_args(["--epochs", "0"])
    assert "a student needs" in capsys.readouterr().err


@pytest.mark.parametrize("dataset, is_augmented", [("numbers", False), ("cifar10", True),
                                                   ("folder:images", True)])
def test_networks_of_torchvision_do_not_see_mirrored_digits(dataset, is_augmented):
    args = pd.parse_args(["--dataset", dataset, "--model", "torchvision/resnet18"])
    assert args.augment == is_augmented


@pytest.mark.parametrize("first, second", [("--members 2 --mimo 2", "--members 4 --mimo 4"),
                                           ("--student-path a.pt", "--student-path b.pt")])
def test_runs_with_other_networks_are_not_averaged(first, second, tmp_path, capsys):
    directories = []
    for seed, words in enumerate((first, second), 1):
        args = pd.parse_args(f"--out-dir {tmp_path} --seed {seed} {words}".split())
        run = common.Run(args, "train", "test")
        rows = [{"method": "ensemble", "seeds": [seed], "set": "numbers", "n": 9, "nll": seed / 4}]
        run.report(rows, ["nll"])
        directories.append(str(run.dir))
    capsys.readouterr()
    common.main(directories)
    _, *lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2
    assert words.split()[-1] in lines[1]


@pytest.mark.parametrize("more", ["", "--model torchvision/resnet18"])
def test_noise_works_on_images_of_files_and_leaves_those_of_predict(more, image_folder):
    """It is new in each epoch."""
    words = f"--dataset folder:{image_folder} --noise 1 --predict folder:{image_folder}/test"
    words += f" --image-size 96 --workers 0 --device cpu --no-augment {more}"
    args = pd.parse_args(words.split())
    splits = pd.load_splits(args)
    clean = data.load_splits(args, args.seed, num_val=0)
    assert isinstance(clean.train, data.ImageFiles)
    assert torch.equal(splits.predict[0], clean.predict[0])
    assert splits.test.name.endswith("_noise1")
    difference = (splits.test[0].double() - clean.test[0].double()) / 255
    assert difference.std().item() == pytest.approx(data.CORRUPTIONS["gaussian_noise"][1][0],
                                                    rel=0.2)
    epochs = []
    for epoch in (0, 1, 1):
        batch = next(pd.make_loader(splits.train, epoch, args, 5).epoch(0))
        epochs.append(batch.images)
    assert torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("model", ["torchvision/mobilenet_v3_small", "attention"])
def test_networks_of_torchvision_and_of_ones_own(model, image_folder, tmp_path, monkeypatch):
    """Their files, too, make the same ensemble."""
    transformer = partial(models.VisionTransformer, 32, 8, 2, 2, 24, 48, num_classes=24)
    monkeypatch.setitem(pd.NETWORKS, "attention", lambda args, shape: ([transformer()], 24))
    argv = study_arguments(image_folder, tmp_path, f"--model {model} --weights none --mimo 0 --amp "
                           "--image-size 32 --limit-steps 1 --member-epochs 1 --epochs 1")
    rows = run_script("proxy_distill", *argv)
    members = sorted((tmp_path / "proxy_distill" / "run").glob("member*.pt"))
    again = run_script("proxy_distill", *argv, "--name", "files", "--ensemble-paths", *members)
    without_seeds = [row | {"seeds": []} for row in rows]
    assert again == without_seeds
