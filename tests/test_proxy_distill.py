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
@pytest.mark.parametrize("m, t, spread, largest", [(0.3, 0.7, 0.5, 20), (1, 0.2, 0, 12)])
def test_losses_and_their_gradients_are_those_of_mpmath(loss, m, t, spread, largest):
    """Also of members that agree, and of a logit far above the optimum."""
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


@pytest.mark.parametrize("loss", pd.LOSSES)
@pytest.mark.parametrize("size, m", [(50.0, 1), (2000.0, 0)])
def test_a_logit_beyond_the_clamp_has_a_gradient_that_pulls_it_back(loss, size, m):
    z = torch.tensor([[size, 0, 1], [-size, size, 3]])
    _, scores = pd.student_predictions(z)
    assert torch.stack([*scores.values()]).isfinite().all()
    ensemble = pd.ensemble_statistics(random_member_logits(k=3))
    losses, gradient = loss_and_gradient(loss, z, ensemble, m)
    assert torch.cat([losses[:, None], gradient], 1).isfinite().all()  # in float32
    assert gradient[[0, 1], [0, 1]].min() > 0
    assert gradient[1, 0] < 0 or m == 1


@pytest.mark.parametrize("loss", pd.LOSSES)
@pytest.mark.parametrize("m, t", [(0, 1), (1, 0.1)])
def test_members_with_probability_0_give_finite_losses_and_scores(loss, m, t):
    logits = torch.zeros(2, 1, 40)
    logits[0, 0, 0] = logits[1, 0, 1] = 1000  # all other probabilities are 0
    logits[:, :, 39] = 0 if loss == "dirichlet_likelihood" else -math.inf
    ensemble = pd.ensemble_statistics(logits)
    _, scores = pd.ensemble_predictions(ensemble)
    assert scores["rmi"].item() == pytest.approx(1000 / 2 - math.log(2))
    assert scores["epistemic"].item() == pytest.approx(math.log(2))
    _, scores_of_proxy = pd.proxy_predictions(ensemble)
    assert torch.stack([*scores_of_proxy.values()]).isfinite().all()
    losses, gradient = loss_and_gradient(loss, torch.randn(1, 40), ensemble, m, t)
    assert torch.cat([losses[:, None], gradient], 1).isfinite().all()


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
    log_probs, scores = pd.ensemble_predictions(ensemble)
    expected = [1 - pi.max(-1), total, aleatoric, total - aleatoric, epkl, rmi]
    np.testing.assert_allclose(torch.stack([*scores.values()]), expected, 1e-9, 1e-14)
    log_probs_of_proxy, scores_of_proxy = pd.proxy_predictions(ensemble)
    np.testing.assert_allclose(scores_of_proxy["epkl"], 2 * rmi + 2.0**-23, rtol=1e-7)
    np.testing.assert_allclose(scores_of_proxy["total"], total, rtol=1e-9)
    for found in (log_probs, log_probs_of_proxy):
        np.testing.assert_allclose(found, np.log(pi), rtol=1e-9)
    assert min(values.min() for values in (*scores.values(), *scores_of_proxy.values())) >= 0


def test_what_rounding_leaves_of_an_epistemic_uncertainty_is_zero():
    """It would get an AUROC: of members that agree, of a student of vast precision."""
    logits = 3 * torch.randn(200, 40)
    for _, scores in (pd.ensemble_predictions(pd.ensemble_statistics(logits.expand(3, -1, -1))),
                      pd.student_predictions(logits + 60)):
        assert torch.stack([scores["epistemic"], scores["rmi"]]).count_nonzero() == 0


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


@pytest.mark.parametrize("n, subnetworks, more", [(128, 2, ()), (99, 3, (3, 0.5))])
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
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --width .1 --members 2 "
            "--member-epochs 2 --epochs 2 --mimo 2 --mimo-epochs 2 --batch-size 12 --lr .3 "
            f"--augment --name run --out-dir {out} {more}").split()


def parse_options(more=""):
    """The options of a study by the paper's loss, with other offsets than the paper's."""
    words = ("--losses rkl_proxy --batch-size 4 --opt sgd --weight-decay .01 --model-offset .5 "
             f"--target-offset .7 --noise 1 --workers 0 --device cpu {more}")
    return pd.parse_args(study_arguments("images", "runs", words))


@pytest.mark.parametrize("name, decayed, free", [("resnet18", 30, 32), ("resnet50", 65, 96)])
def test_resnets_are_those_of_torchvision_whose_last_batch_norms_start_at_zero(name, decayed, free):
    ours = pd.make_network(parse_options(f"--model {name} --width 1"), 1000, (3, 96, 96)).eval()
    for block in ours.modules():
        if isinstance(block, pd.Residual):
            assert (block.body[-1].weight == 0).all()
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
    args = Namespace(lr=0.8, schedule="step")
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


def test_each_network_is_trained_as_by_a_plain_loop(monkeypatch):
    """Members see labels, and what the student sees; MIMO has 2 --batch-size labels in a step."""
    def loss_of_member(net, batch):
        return F.cross_entropy(net(batch.images), batch.labels)

    def loss_of_mimo(net, batch):
        rows = pd.mimo_rows(len(batch.labels), 2)
        return F.cross_entropy(net(batch.images[rows]).flatten(0, 1), batch.labels[rows].flatten())

    def loss_of_student(net, batch):
        logits = net(batch.images)
        members = torch.stack([member.eval()(batch.images) for member in (first, second)])
        return pd.rkl_proxy_loss(logits, pd.ensemble_statistics(members), 0.5, 0.7).mean()

    monkeypatch.setitem(pd.NETWORKS, "convnet", lambda args, shape: (
        [nn.Flatten(), nn.Dropout(0.2)], math.prod(shape)))
    args = parse_options()
    run = Namespace(resume=lambda *_, **__: [], save=lambda *_, **__: None)
    networks = pd.train_networks(grey_images("train"), args, 5, run)
    first, second, mimo, student = networks.values()
    for net, key, parts, loss_of in (
            (first, (5, 0), 1, loss_of_member), (second, (6, 0), 1, loss_of_member),
            (mimo, (5, 1), 2, loss_of_mimo), (student, (5, 2), 1, loss_of_student)):
        seed = common.derive_seed(*key)
        common.seed_all(seed)
        expected = pd.make_network(args, 3 * parts, (parts, 8, 8))
        if net is mimo:
            expected = pd.MIMO(expected, 2)
        sgd = torch.optim.SGD(expected.parameters(), momentum=0.9, nesterov=True, weight_decay=0.01)
        for epoch in range(2):
            noise_seed = common.derive_seed(seed, epoch)
            noisy = data.corrupted(grey_images("train"), "gaussian_noise", 1, noise_seed)
            loader = data.Loader(noisy, 4 // parts, seed=seed, shuffle=True, augment="crop_flip")
            common.seed_all(seed, epoch, 0)
            for step, batch in enumerate(loader.epoch(epoch), epoch * len(loader)):
                sgd.param_groups[0]["lr"] = parts * pd.learning_rate(step, len(loader), 2, args)
                sgd.zero_grad()
                loss_of(expected, batch).backward()
                sgd.step()
        torch.testing.assert_close(net.state_dict(), expected.state_dict())


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
    splits = data.Splits(test, None, test, ood, None)
    of_sets = iter(outputs)
    monkeypatch.setattr(pd, "train_networks", lambda *_: None)
    monkeypatch.setattr(pd, "compute_outputs", lambda *_: next(of_sets))
    rows = pd.run_seed(splits, parse_options("--dataset imagenet --no-plot --shift none"), 7, None)
    against = [row.get("against") for row in rows]
    assert against == 7 * [None, "imagenet_a", "imagenet_o"] + 7 * [None]  # of ImageNet-A alone
    blocks = [rows[0:21:3], rows[21:]]
    for number, dataset, classes in ((0, test, [0, 1, 2, 3, 4]), (1, ood[0], [1, 3])):
        one, two, mimo, *students = [z[..., classes].double().softmax(-1)
                                     for z in outputs[number].values()]
        probs = [one, two, (one + two) / 2, (one + two) / 2, mimo.mean(1), *students]
        for row, name, seed, p in zip(blocks[number], names, seeds, probs, strict=True):
            wrong = p.argmax(1) != dataset.labels
            assert row["method"] == pd.METHODS[name[0]]
            assert row["seeds"] == seed
            assert ("prr_rmi" in row) == (name[0] not in ("member", "student_forward_kl"))
            assert row["accuracy"] == pytest.approx(1 - wrong.double().mean().item())
            assert row["nll"] == pytest.approx(F.nll_loss(p.log(), dataset.labels).item())
            for score, values in results[number][name].scores.items():
                assert row[f"prr_{score}"] == pytest.approx(2 * roc_auc_score(wrong, values) - 1)
    for pair, name in zip(rows[2:21:3], names, strict=True):
        both = torch.cat([results[number][name].scores["total"] for number in (0, 2)])
        assert pair["auroc_total"] == pytest.approx(roc_auc_score(90 * [0] + 90 * [1], both))


def test_rejection_ratio_by_hand():
    # Errors while 0, ..., 4 are kept: 0 0 1 1 2; at random 0 .5 1 1.5 2; at best 0 0 0 1 2.
    correct = torch.tensor([False, True, True, False])
    uncertainty = torch.tensor([0.2, 0.1, 0.3, 0.4])
    assert pd.prediction_rejection_ratio(uncertainty, correct) == (4 - 3) / (4 - 2)
    assert pd.prediction_rejection_ratio(torch.ones(4), correct) == 0
    assert pd.prediction_rejection_ratio(uncertainty, correct & False) is None


@pytest.mark.parametrize("shift", ["published", "computed"])
def test_rows_of_corruptions_are_means_over_the_copies(shift, monkeypatch):
    """A rejection ratio that one copy does not have has no mean."""
    args = parse_options(f"--shift {shift}")
    logits = torch.randint(256, (2, 12, 1, 1, 3), dtype=torch.uint8)
    logits[1] = 255 * F.one_hot(grey_images("").labels, 3).view(12, 1, 1, 3)  # no error
    sets = [grey_images("c", images=images, std=(0.1,)) for images in logits]

    def corrupted_sets(test_set, args, kinds):
        assert kinds == data.CIFAR_C_KINDS[:15]  # of 19: published tables have these
        return enumerate(sets)

    monkeypatch.setattr(data, "corrupted_sets", corrupted_sets)
    splits = data.Splits(None, None, replace(sets[0], name="test"), [], None)
    test_results = pd.predict({("member", 0): torch.randn(12, 3)})
    row, pair = pd.evaluate_shift({("member", 0): nn.Flatten()}, test_results, splits, args, 7)
    if shift == "published":  # whose files have no noise yet
        sets = [pd.with_noise(dataset, args, 2) for dataset in sets]
    nll = [F.cross_entropy(dataset.images.flatten(1) / 25.5, dataset.labels) for dataset in sets]
    assert row["nll"] == pytest.approx(np.mean(nll), rel=1e-5)
    assert row["prr_total"] is None
    found = [(line["set"], line.get("against"), line["n"]) for line in (row, pair)]
    assert found == [("c", None, 24), ("test", "c", 12)]


@pytest.fixture(scope="module")
def study(image_folder, tmp_path_factory):
    """The rows of a study with all losses, its directory, and the rows of --eval."""
    out = tmp_path_factory.mktemp("study")
    more = f"--losses {' '.join(pd.LOSSES)} --predict folder:{image_folder}/test --shift computed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CORRUPTIONS", dict(list(data.CORRUPTIONS.items())[:2]))
        rows = pd.main([*study_arguments(image_folder, out, more), "--device", "cpu"])
        again = run_script("proxy_distill", *study_arguments(image_folder, out, "--eval"))
    return rows, out / "proxy_distill" / "run", again


def test_a_study_has_rows_and_predictions_of_all_methods_and_eval_repeats_them(study):
    rows, root, again = study
    assert again == rows
    assert (root / "uncertainty.png").stat().st_size > 10_000
    test = rows[0]["set"]
    shifted = f"{test}_computed"
    pairs = [(test, None, 15), (test, "unknown", 15), (shifted, None, 150), (test, shifted, 15)]
    found = {(row["method"], row["set"], row.get("against"), row["n"]) for row in rows}
    assert found == {(method, *pair) for method in [*pd.METHODS.values()][:-1] for pair in pairs}
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    columns = "predicted confidence one_minus_max total aleatoric epistemic epkl rmi".split()
    assert list(lines[0]) == ["file", "label", *columns, *[f"{name}_ensemble" for name in columns]]
    accuracy = {row["method"]: row["accuracy"] for row in rows if row["n"] == 15 and "nll" in row}
    for method, column in (("proxy, reverse KL", "predicted"), ("ensemble", "predicted_ensemble")):
        correct = [line["label"] == line[column] for line in lines]
        assert np.mean(correct) == pytest.approx(accuracy[method])


def test_a_run_that_is_killed_three_times_ends_with_equal_weights(study, image_folder, tmp_path):
    argv = study_arguments(image_folder, tmp_path, "--losses rkl_proxy")
    root = tmp_path / "proxy_distill" / "run"
    names = ["member-seed2.pt", "mimo2-seed1.pt", "student_rkl_proxy-of2-seed1.pt"]
    for name in names:  # which is written after the first of two epochs
        kill_after(Child(tmp_path, run_script, "proxy_distill", *argv), root / name)
    run_script("proxy_distill", *argv)
    for name in names:
        assert_equal_checkpoints(root / name, study[1] / name)


def test_two_processes_train_the_networks_that_one_evaluates(image_folder, tmp_path):
    argv = study_arguments(image_folder, tmp_path, "--runs 2")
    rows, _ = run_ranks(tmp_path, run_script, "proxy_distill", *argv)
    again = run_script("proxy_distill", *argv, "--eval")
    for row, same in zip(rows, again, strict=True):
        assert row.get("nll", 0) == pytest.approx(same.get("nll", 0), rel=1e-4)
    assert {row["seeds"][0] for row in rows} == {1, 2, 3, 4}


def test_files_of_networks_are_evaluated_like_the_networks_of_a_run(study, image_folder, tmp_path):
    """Without seeds; a file of another content is refused."""
    rows, root, _ = study
    files = [shutil.copy(root / name, tmp_path) for name in (
        "member-seed1.pt", "member-seed2.pt", "student_rkl_proxy-of2-seed1.pt")]
    argv = study_arguments(image_folder, tmp_path, f"--ensemble-paths {files[0]} {files[1]} "
                           f"--losses --mimo 0 --student-path {files[2]}")
    found = [row for row in run_script("proxy_distill", *argv) if "nll" in row]
    assert len(found) == 5
    assert found[-1]["method"] == "student of --student-path"
    assert {row["nll"] for row in found} <= {row.get("nll") for row in rows}
    assert all(row["seeds"] == [] for row in found)
    for changed in files[2], files[1]:
        shutil.copy(files[0], changed)
        with pytest.raises(common.UserError, match=f"content of .*{changed}"):
            run_script("proxy_distill", *argv)


def test_a_student_of_files_and_a_mimo_network_have_their_own_seeds_or_none():
    args = parse_options("--ensemble-paths a.pt b.pt --mimo 2")
    assert pd.list_seeds(("student_rkl_proxy", 0), args, 5) == []
    assert pd.list_seeds(("ensemble", 0), args, 5) == []
    assert pd.list_seeds(("mimo", 0), args, 5) == [5]


@pytest.mark.parametrize("words", ["--ensemble-paths {}", "--student-path {}", "--member-epochs 0"])
def test_a_last_layer_that_nothing_trained_for_these_classes_is_refused(words, study, tmp_path):
    save_images(tmp_path / "two" / "train", ("ant", "bee"), 4, 40)
    save_images(tmp_path / "two" / "test", ("ant", "bee"), 2, 40)
    more = f"--ood --losses --mimo 0 --members 1 {words.format(study[1] / 'member-seed1.pt')}"
    argv = study_arguments(tmp_path / "two", tmp_path, more)
    with pytest.raises(common.UserError, match="no trained last layer of 2 classes"):
        run_script("proxy_distill", *argv)


@pytest.mark.parametrize("words", ["--mimo 3", "--epochs 0", "--members 1"])
def test_batches_that_mimo_cannot_divide_and_untrained_students_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        pd.parse_args(words.split())
    assert "error: " in capsys.readouterr().err


def test_networks_of_torchvision_do_not_see_mirrored_digits():
    for dataset, is_augmented in (("numbers", False), ("cifar10", True)):
        args = pd.parse_args(["--dataset", dataset, "--model", "torchvision/resnet18"])
        assert args.augment == is_augmented


@pytest.mark.parametrize("more", ["", "--model torchvision/resnet18"])
def test_noise_works_on_images_of_files_and_leaves_those_of_predict(more, image_folder):
    test = f"folder:{image_folder}/test"
    words = f"--dataset folder:{image_folder} --noise 1 --predict {test} --ood {test}"
    args = pd.parse_args(f"{words} --image-size 96 --workers 0 --device cpu {more}".split())
    splits = pd.load_splits(args)
    clean = data.load_splits(args, args.seed, num_val=0)
    assert isinstance(clean.train, data.ImageFiles)
    assert torch.equal(splits.predict[0], clean.predict[0])
    assert splits.test.name.endswith("_noise1")
    deviation = ((splits.test[0].double() - clean.test[0].double()) / 255).std().item()
    assert deviation == pytest.approx(data.CORRUPTIONS["gaussian_noise"][1][0], rel=0.2)
    assert not torch.equal(splits.test[0], splits.ood[0][0])


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
    assert again == [row | {"seeds": []} for row in rows]
