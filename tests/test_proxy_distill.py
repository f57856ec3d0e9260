"""proxy_distill.py against textbook forms, mpmath and brute force; its files; its runs. More of
the Method is checked in test_copy_paste.py."""

import csv
import itertools
import json
import math
import os
import re
import sys
from argparse import Namespace
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torchvision
from conftest import assert_same_checkpoints, refusal, run_in_float64, snapshot, start_ranks
from PIL import Image
from scipy import stats
from scipy.special import log_softmax, softmax, xlogy
from sklearn.metrics import roc_auc_score
from torch.distributions import Dirichlet, kl_divergence
from torch.nn.functional import cross_entropy

import common
import data
import proxy_distill as pd


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def members(m=5, b=6, k=7, spread=0.5):
    """Logits [M, B, K]: a shared normal and each member's own."""
    return 2 * torch.randn(b, k).double() + spread * torch.randn(m, b, k).double()


def gradient(loss, z, ensemble, m=1, t=1):
    """The rows of a loss [B], and dL_i/dz_i [B, K]."""
    z = z.detach().clone().requires_grad_()
    rows = pd.distillation_loss(loss, z, ensemble, m, t)
    return rows.detach(), torch.autograd.grad(rows.sum(), z)[0]


# ---- Method: statistics and losses --------------------------------------------------------------


def test_members_that_agree_or_are_certain_stay_finite():
    z = 4 * torch.randn(50, 1000).bfloat16()
    same = pd.ensemble_statistics([z] * 5)
    assert (same.rmi >= 0).all() and same.rmi.max() < 1e-13
    np.testing.assert_allclose(pd.proxy_precision(same), 999 * 2.0**23, rtol=1e-6)
    for out in (pd.ensemble_outputs(same), pd.proxy_outputs(same), pd.student_outputs(9 * z)):
        for name in pd.MEASURES[:-1]:
            assert (out.measures[name] >= 0).all()  # not -1e-16
    gap = torch.zeros(3, 2, 40)
    for member, row, label in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (2, 0, 2), (2, 1, 1)):
        gap[member, row, label] = 1000.0  # the others have probability 0
    certain = pd.ensemble_statistics(gap)
    pi = np.array([2 / 3, 1 / 3])
    assert certain.rmi[0].item() == pytest.approx((pi * np.log(pi)).sum() + 1000 * 4 / 9, rel=1e-9)
    for loss, (m, t) in itertools.product(pd.LOSSES, [(1, 1), (0, 0), (1, 0)]):
        for ensemble, k, b in ((same, 1000, 50), (certain, 40, 2)):
            if loss == "proxy" and not t and ensemble is certain:
                continue  # a target of concentrations 0 is at no finite distance
            rows, grad = gradient(loss, torch.randn(b, k).bfloat16(), ensemble, m, t)
            assert rows.isfinite().all() and grad.isfinite().all()


def test_forward_divergences_and_likelihood_are_the_definitions():
    logits = members()
    z = torch.randn(6, 7).double()
    ensemble = pd.ensemble_statistics(logits)
    pi = ensemble.log_probs.exp()
    rows, grad = gradient("forward_kl", z, ensemble)
    np.testing.assert_allclose(rows, stats.entropy(pi.T, z.softmax(-1).T), rtol=1e-10)
    np.testing.assert_allclose(grad, z.softmax(-1) - pi, rtol=1e-9, atol=1e-12)
    # 40: no floor inside the logarithm, so that the tail of a confident member counts in full
    for m, scale in ((0.0, 1), (1.0, 40), (0.7, 1)):
        student = Dirichlet(z.exp() + m)
        sharp = scale * logits
        right = -torch.stack([student.log_prob(p) for p in sharp.softmax(-1)]).mean(0)
        rows, _ = gradient("dirichlet_likelihood", z, pd.ensemble_statistics(sharp), m)
        np.testing.assert_allclose(rows, right, rtol=1e-10)
    rows, _ = gradient("proxy", z, ensemble, 0.3, 0.7)
    target = Dirichlet(pi * pd.proxy_precision(ensemble)[:, None] + 0.7)
    np.testing.assert_allclose(rows, kl_divergence(target, Dirichlet(z.exp() + 0.3)), rtol=1e-10)


def exact_reverse_kl(z, ensemble, b, offset):
    """The textbook loss and its gradient, by mpmath."""
    with mpmath.workdps(40):
        target = [mpmath.mpf(p) * b + 1 for p in ensemble.log_probs[0].exp().tolist()]
        alpha = [mpmath.exp(x) + offset for x in z.tolist()]
        total = mpmath.fsum(alpha)
        means = [mpmath.digamma(a) - mpmath.digamma(total) for a in alpha]
        value = mpmath.loggamma(total) - mpmath.fsum(map(mpmath.loggamma, alpha))
        value += mpmath.fsum(map(mpmath.loggamma, target)) - mpmath.loggamma(mpmath.fsum(target))
        value += mpmath.fsum((a - t) * mean for a, t, mean in zip(alpha, target, means))
        rest = mpmath.psi(1, total) * (mpmath.fsum(target) - total)
        slopes = [float((a - offset) * (mpmath.psi(1, a) * (a - t) + rest) / b)
                  for a, t in zip(alpha, target)]
    return float(value / b), slopes


@pytest.mark.parametrize("above, offset, t, rtol", [(0, 1, 1, 1e-8), (15, 1, 1, 3e-6),
                                                    (5, 0, 0.7, 1e-8), (5, 0.3, 0, 1e-8)])
def test_the_reverse_kl_is_that_of_mpmath_where_training_goes(above, offset, t, rtol):
    """A thousand classes, the largest logit that far above the optimum; members that agree or not.

    At 15 above ln b the gradient has lost a few digits; beyond, logits are clamped.
    """
    for spread in (0.5, 1e-4):
        ensemble = pd.ensemble_statistics(members(b=1, k=1000, spread=spread))
        b = pd.proxy_precision(ensemble).item() + 1000 * t
        z = 3 * torch.randn(1000).double() - 5
        z[3] = math.log(b) + above
        rows, grad = gradient("rkl_proxy", z[None], ensemble, offset, t)
        value, slopes = exact_reverse_kl(z, ensemble, b, offset)
        assert rows.item() == pytest.approx(value, rel=1e-6)
        np.testing.assert_allclose(grad[0], slopes, rtol=rtol, atol=rtol * max(map(abs, slopes)))


def test_the_optimum_has_the_precision_b():
    """With m = 1, exp(z) = pi b: the loss is 0, and its gradient too."""
    ensemble = pd.ensemble_statistics(members(k=40))
    b = pd.proxy_precision(ensemble) + 40
    rows, grad = gradient("rkl_proxy", ensemble.log_probs + b.log()[:, None], ensemble)
    np.testing.assert_allclose(rows, 0, atol=1e-10)
    np.testing.assert_allclose(grad, 0, atol=1e-10)


@pytest.mark.parametrize("loss", ["rkl_proxy", "proxy"])
@pytest.mark.parametrize("size", [50.0, 2000.0])
def test_a_diverging_step_keeps_a_direction(loss, size):
    """Logits that float64 cannot exponentiate have finite gradients, which pull them back."""
    ensemble = pd.ensemble_statistics(members(b=3, k=4))
    z = torch.tensor([[size, 0.0, 1.0, -2.0], [size, -size, size / 2, 0.0], [-size, -size, 0, 1]])
    for m in (1, 0):
        rows, grad = gradient(loss, z, ensemble, m)
        assert rows.isfinite().all() and grad.isfinite().all()
        assert (grad[:2, 0] > 0).all()


# ---- Method: uncertainties, schedule, MIMO ------------------------------------------------------


def test_ensemble_measures_are_loops_over_pairs():
    """Members are taken one by one, and widened first."""
    z = members(m=4, b=8, k=6).bfloat16().requires_grad_()
    ensemble = pd.ensemble_statistics(member for member in z)
    out = pd.ensemble_outputs(ensemble)
    p = softmax(z.detach().double().numpy(), -1)
    pi = p.mean(0)
    got = out.measures
    right = {"one_minus_max": 1 - pi.max(-1), "total": stats.entropy(pi, axis=-1),
             "aleatoric": stats.entropy(p, axis=-1).mean(0),
             "epistemic": stats.entropy(pi, axis=-1) - stats.entropy(p, axis=-1).mean(0),
             "epkl": np.mean([stats.entropy(a, b, axis=-1) for a in p for b in p], 0),
             "rmi": np.mean([stats.entropy(pi, a, axis=-1) for a in p], 0)}
    assert got.keys() == right.keys() == set(pd.MEASURES[:-1]) and out.log_precision is None
    for name, value in right.items():
        assert not got[name].requires_grad
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-14, err_msg=name)
    precision = pd.proxy_outputs(ensemble).log_precision.exp()
    np.testing.assert_allclose(precision, 5 / (2 * right["rmi"]), rtol=1e-5)


@pytest.mark.parametrize("alpha", [[2.5, 1.5, 6.0, 3.0], [0.3, 40.0]])
def test_dirichlet_measures_are_integrals_over_its_marginals(alpha):
    alpha = np.array(alpha)
    mean = alpha / alpha.sum()
    marginals = [stats.beta(a, alpha.sum() - a) for a in alpha]
    log_p = np.array([own.expect(np.log) for own in marginals])
    p_log_p = np.array([own.expect(lambda p: xlogy(p, p)) for own in marginals])
    total = stats.entropy(mean)
    aleatoric = -p_log_p.sum()
    right = {"total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric,
             "epkl": (p_log_p - mean * log_p).sum(), "one_minus_max": 1 - mean.max(),
             "rmi": (mean * (np.log(mean) - log_p)).sum()}
    out = pd.dirichlet_outputs(torch.tensor(alpha)[None], torch.tensor(np.log(mean))[None])
    assert out.log_precision.exp().item() == pytest.approx(alpha.sum())
    assert {k: v.item() for k, v in out.measures.items()} == pytest.approx(right, rel=1e-6)


def test_a_student_is_the_dirichlet_whose_mean_it_predicts():
    z = 3 * torch.randn(40, 8).double()
    out = pd.student_outputs(z)
    plain = pd.softmax_outputs(z)
    # A softmax is no Dirichlet distribution: no precision, and no epistemic uncertainty.
    assert set(plain.measures) == {"one_minus_max", "total", "energy"}
    assert plain.log_precision is None and "energy" not in out.measures
    np.testing.assert_allclose(out.log_precision.exp(), z.exp().sum(-1), rtol=1e-12)
    np.testing.assert_allclose(-plain.measures["energy"], z.exp().sum(-1).log(), rtol=1e-12)
    for own in (out, plain):
        np.testing.assert_allclose(own.log_probs, log_softmax(z.numpy(), -1), rtol=1e-12)
        right = stats.entropy(softmax(z, -1), axis=-1)
        np.testing.assert_allclose(own.measures["total"], right, rtol=1e-9)
    # exp overflows at 709; out-of-distribution inputs of large nets reach it
    z = torch.tensor([[800.0, 0.0, -5.0], [2000.0, 1999.0, 0.0], [-900.0, -800.0, -999.0]])
    for out in (pd.softmax_outputs(z), pd.student_outputs(z)):
        values = list(out.measures.values()) + [out.log_probs]
        assert all(value.isfinite().all() for value in values)


def test_lr_factors():
    for epoch, right in ((0, 1), (39, 1), (40, 0.1), (79, 0.1), (80, 0.01), (105, 0.01),
                         (106, 1e-3), (119, 1e-3)):
        assert pd.lr_factor(7 * epoch + 6, 7, 120, "step") == pytest.approx(right)
    assert pd.lr_factor(0, 7, 1, "step") == 1  # not a thousandth of it
    rates = [pd.lr_factor(step, 10, 10, "cosine") for step in range(100)]
    np.testing.assert_allclose(np.diff(rates[:20]), 1 / 21)  # linear, not from zero
    right = [0.5 * (1 + math.cos(math.pi * step / 80)) for step in range(80)]
    np.testing.assert_allclose(rates[20:], right, rtol=1e-12)


@pytest.mark.parametrize("n, r, p, e", [(128, 2, 0.6, 2), (5, 3, 0.5, 2), (10, 1, 0.0, 3)])
def test_mimo_rows(n, r, p, e):
    rows = pd.mimo_rows(n, e, torch.Generator().manual_seed(0), r, p)
    own = int(n * r * (1 - p))
    assert rows.shape == (n * r, e)
    for column in rows.T:
        assert torch.equal(column.sort().values, torch.arange(n).repeat_interleave(r))
    assert (rows[own:] == rows[own:, :1]).all()
    if n == 128:  # published: 256 rows, 102 shuffled, 154 shared
        assert own == 102 and (rows[:102, 0] == rows[:102, 1]).sum() < 10

# ---- Model, files -------------------------------------------------------------------------------


def arguments(model, width=1.0, mimo=0):
    """The options that a network depends on."""
    return Namespace(model=model, width=width, mimo=mimo, mimo_epochs=1, epochs=1, freeze=False,
                     weights=None, image_size=None, eval=False, device=torch.empty(0).device)


def network(model, classes=1000, size=224, channels=3, width=1.0):
    return pd.make_network(arguments(model, width), classes, (channels, size, size), 1)


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_parameters_and_residual_branches():
    with torch.device("meta"):
        one = network("resnet50")
        assert count(one) == 25_557_032 and count(network("resnet18")) == 11_689_512
        mimo = pd.make_mimo(arguments("resnet50", mimo=2), 1000, (3, 224, 224))
        assert count(mimo) == 27_615_440
    groups = pd.make_optimiser(one, Namespace(opt="sgd", weight_decay=1e-4)).param_groups
    sizes = {}
    for group in groups:
        numbers = [p.numel() for p in group["params"]]
        sizes[group["weight_decay"]] = (len(numbers), sum(numbers))
        assert group["momentum"] == 0.9 and group["nesterov"]
    assert sizes == {1e-4: (65, 25_511_720), 0.0: (96, 45_312)}
    assert (network("resnet18", 5, 32).backbone.layer4[1].bn2.weight == 0).all()


LIGHTNING = "pytorch_lightning.utilities.parsing", "pytorch_lightning.callbacks.model_checkpoint"


def save_as_lightning(path, net, style, **options):
    """A checkpoint as Lightning 1.4 or 1.5 writes it, with classes of its own module names."""
    modules = {name: type(sys)(name) for name in ("pytorch_lightning", *LIGHTNING)}
    attributes = type("AttributeDict", (dict,), {"__module__": LIGHTNING[0]})
    callback = type("ModelCheckpoint", (), {"__module__": LIGHTNING[1]})
    modules[LIGHTNING[0]].AttributeDict = attributes
    modules[LIGHTNING[1]].ModelCheckpoint = callback
    key = callback if style == "1.4" else "ModelCheckpoint{'monitor': 'val_acc1'}"
    state = {"epoch": 89, "pytorch-lightning_version": f"{style}.3", "optimizer_states": [],
             "state_dict": {f"model.{k}": v for k, v in net.state_dict().items()},
             "callbacks": {key: {"best_model_score": torch.tensor(0.7)}},
             "hyper_parameters": attributes(options) if style == "1.5" else options}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        torch.save(state, path)


def read(path, kind="member", model="convnet", classes=5, size=16, channels=1, width=0.1):
    like = Namespace(num_classes=classes, shape=(channels, size, size))
    splits = Namespace(train=like, fingerprints={})
    return pd.read_network(path, kind, splits, arguments(model, width))


@pytest.mark.parametrize("style, model", [("1.4", "resnet18"), ("1.5", "resnet50")])
def test_lightnings_files_load_and_predict_what_torchvisions_networks_do(tmp_path, style, model):
    theirs = getattr(torchvision.models, model)(num_classes=20).eval()
    for name, value in theirs.state_dict().items():
        if ("bn" in name or "downsample.1" in name) and value.is_floating_point():
            value.uniform_(0.5, 1.5)
    path = tmp_path / "student.ckpt"
    save_as_lightning(path, theirs, style, loss_type="rkl_proxy")
    resnet = dict(model=model, classes=20, size=96, channels=3, width=1.0)
    ours, kind = read(path, "student", **resnet)
    assert kind == "student_rkl_proxy"
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        right = theirs(x)
        np.testing.assert_allclose(ours(x), right, rtol=1e-4, atol=1e-4 * right.abs().max())
    if model == "resnet18":  # torchvision's own file, too
        torch.save(theirs.state_dict(), path)
        ours, kind = read(path, **resnet)
        assert kind is None and torch.equal(ours.backbone.conv1.weight, theirs.conv1.weight)


class Hostile:
    """What a pickle could run."""

    def __reduce__(self):
        return os.mkdir, (Hostile.folder,)


def test_other_files_are_refused_in_one_line_and_run_nothing(tmp_path):
    path = tmp_path / "member.pt"
    net = network("convnet", 5, 16, 1, width=0.1)
    state = net.state_dict()
    Hostile.folder = str(tmp_path / "ran")
    save_as_lightning(path, net, "1.4", more=Hostile())
    assert "tensors" in refusal(read, path)
    without = {k: v for k, v in state.items() if k != "head.bias"}
    other = network("convnet", 6, 16, 1, width=0.1).state_dict()
    for content, match in ((other, "not fit.*mismatch for head.weight"),
                           (without, "Missing key.*head.bias"),
                           ({"state_dict": torch.ones(2)}, "does not fit")):
        torch.save(content, path)
        assert re.search(f"{path}.*{match}", refusal(read, path))
    assert not (tmp_path / "ran").exists()
    save_as_lightning(path, net, "1.5")
    with pytest.raises(Exception):  # outside of read_network, Lightning's names are unknown again
        torch.load(path, weights_only=True)


def test_members_of_torchvision_with_their_own_heads(tmp_path):
    """State dicts of a user's training script; a head with other classes is no trained member."""
    theirs = torchvision.models.mobilenet_v3_small(num_classes=5).eval()
    path = tmp_path / "member.pt"
    torch.save({"model": theirs.state_dict()}, path)
    options = dict(model="torchvision/mobilenet_v3_small", size=32, channels=3)
    ours, _ = read(path, **options)
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x))
    said = refusal(partial(read, path, classes=6, **options))
    assert f"{path} does not fit" in said and "5 classes" in said


# ---- Evaluation ---------------------------------------------------------------------------------


def as_logits(by_network, labels):
    return pd.Logits(by_network, labels, dict.fromkeys(by_network, 2.0), 0.5)


def test_metrics_are_those_of_the_outputs():
    z = 2 * torch.randn(500, 12).double()
    labels = torch.distributions.Categorical(logits=0.6 * z).sample()  # a colder truth
    student, = pd.predict(as_logits({"student_rkl_proxy": z}, labels), 1)
    values, = pd.prediction_rows("test", [student])
    top5 = (z.topk(5).indices == labels[:, None]).any(1).double().mean()
    assert values["top5_accuracy"] == pytest.approx(top5)
    assert values["nll"] == pytest.approx(cross_entropy(z, labels).item(), rel=1e-6)
    for name in pd.MEASURES[:-1]:
        right = 2 * roc_auc_score(z.argmax(1) != labels, student.scores[name]) - 1
        assert values[f"prr_{name}"] == pytest.approx(right)


def test_published_calibration_errors_are_those_of_its_bins():
    """[a, b), and a bin of its own for 1; a confidence on a border counts above it."""
    confidence = np.array([0.0, 0.05, 0.1, 0.1, 0.25, 0.35, 0.95, 1.0, 1.0, 0.5, 0.59])
    correct = np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1.0])
    parts = []
    gaps = []
    for members in ([0, 1], [2, 3], [4], [5], [9, 10], [6], [7, 8]):  # of a bin
        gaps.append(abs(confidence[members].mean() - correct[members].mean()))
        parts.append(len(members) / 11 * gaps[-1])
    found = pd.published_calibration(confidence, correct)
    assert found["ece10"] == pytest.approx(sum(parts))
    assert found["mce10"] == pytest.approx(max(gaps))


def test_published_calibration_errors_round_confidences_to_float32():
    """There, a confidence of 1 - 1e-11 has the bin of 1: its gap is not added to that of 0.93."""
    logits = torch.tensor([[math.log(0.93 / 0.07), 0.0], [25.0, 0.0]]).repeat_interleave(1000, 0)
    labels = torch.ones(2000, dtype=torch.long)
    labels[:990] = 0
    labels[1000:1970] = 0
    found, = pd.prediction_rows("test", pd.predict(as_logits({"member0": logits}, labels), 1))
    assert found["ece10"] == pytest.approx((0.06 + 0.03) / 2, abs=1e-6)
    assert found["mce10"] == pytest.approx(0.06, abs=1e-6)


def draw(n, k, scale=1.0):
    """Logits of three members, of a Dirichlet student and of EnD."""
    names = ["member0", "member1", "member2", "student_rkl_proxy", "student_forward_kl"]
    return {name: scale * torch.randn(n, k) for name in names}


def keyed(rows):
    """{(method, set, against): row}; of the single networks the first."""
    by = {}
    for row in rows:
        by.setdefault((row["method"], row["set"], row.get("against")), row)
    return by


def test_rows_compare_the_sets_that_they_name():
    """On the test set, against an OOD set, against it within the two classes that it has."""
    test = Namespace(name="test", labels=torch.arange(60) % 5, classes=tuple("abcde"))
    odd = Namespace(name="odd", labels=torch.arange(40) % 2, classes=("b", "d"))
    classes = pd.known_classes(odd, test)
    assert classes.tolist() == [1, 3]
    inside = draw(60, 5, 3.0)
    outside = draw(40, 5)
    tested = pd.predict(as_logits(inside, test.labels), 7)
    networks = {name: torch.nn.Linear(3, 2) for name in inside}
    frozen = Namespace(backbone_ms=1.5, backbone_bytes=10)
    costs = pd.cost_of_networks(networks, as_logits(inside, test.labels), frozen)
    rows = pd.test_rows("test", tested, costs)
    of_odd = pd.predict_among(classes, as_logits(outside, odd.labels), 7)
    rows += pd.ood_rows(odd, of_odd, classes, test, tested)
    by = keyed(rows)
    own = pd.student_outputs(inside["student_rkl_proxy"])
    other = pd.student_outputs(outside["student_rkl_proxy"])
    within = torch.isin(test.labels, classes)
    for kept, name in ((within | True, "test"), (within, "test, its classes")):
        row = by["proxy, reverse KL", name, "odd"]
        assert row["n"] == kept.sum()
        for measure in pd.MEASURES[:-1]:
            both = torch.cat([own.measures[measure][kept], other.measures[measure]])
            right = roc_auc_score([0] * int(kept.sum()) + [1] * 40, both)
            assert row[f"auroc_{measure}"] == pytest.approx(right)
    # Each single network has a row of its own, by its seed; an ensemble takes all of them.
    seeds = [row["seed"] for row in rows if row["method"] == "single network"]
    assert seeds == [7, 8, 9] * 4 and by["ensemble", "test", None]["seed"] == 7
    for method, ms, size in (("ensemble", 8, 106), ("proxy, reverse KL", 4, 42)):
        row = by[method, "test", None]  # the backbone of --freeze is counted once
        assert (row["ms"], row["bytes"]) == (ms, size)
    few = outside["student_rkl_proxy"][:, classes]  # the labels number these classes
    right = (few.argmax(1) == odd.labels).double().mean().item()
    assert by["proxy, reverse KL", "odd", None]["accuracy"] == pytest.approx(right)
    # Rejection among the images of both sets ("_with_val").
    wrong = torch.cat([inside["student_rkl_proxy"].argmax(1) != test.labels,
                       few.argmax(1) != odd.labels])
    total = torch.cat([own.measures["total"], other.measures["total"]])
    pair = by["proxy, reverse KL", "test", "odd"]
    assert pair["prr_both_total"] == pytest.approx(2 * roc_auc_score(wrong, total) - 1)


def test_digits_are_never_read_as_classes_of_cifar():
    """Ambiguous-MNIST knows the probabilities of its labels, but they are those of digits."""
    test = Namespace(name="cifar10", labels=torch.arange(60) % 10, classes=tuple("abcdefghij"))
    odd = Namespace(name="ambiguous_mnist", labels=test.labels, classes=data.DIGITS,
                    label_probs=torch.full((60, 10), 0.1))
    assert pd.known_classes(odd, test) is None
    tested = pd.predict(as_logits(draw(60, 10), test.labels), 1)
    rows = pd.ood_rows(odd, tested, None, test, tested)
    assert {(row["set"], row["against"]) for row in rows} == {("cifar10", "ambiguous_mnist")}


def test_nonsense_has_no_right_labels():
    """It has the classes of the training images, but its images belong to none of them."""
    test = Namespace(name="test", labels=torch.arange(60) % 5, classes=tuple("abcde"))
    odd = data.nonsense(Namespace(shape=(1, 8, 8), num_classes=5, mean=(0.5,), std=(0.5,),
                                  classes=test.classes))
    assert odd.classes == test.classes and pd.known_classes(odd, test) is None


def test_students_are_correlated_with_the_ensemble_and_its_proxy():
    # Of EnD: its sum of exp(z), and no epistemic uncertainty.
    *_, ensemble, proxy, student, soft = pd.predict(
        as_logits(draw(60, 5, 3.0), torch.arange(60) % 5), 1)
    pairs = {measure: (student.scores[measure], ensemble.scores[measure])
             for measure in pd.MEASURES[1:-1]}
    for own, wanted in (
            (student, pairs | {"precision": (student.log_precision, proxy.log_precision)}),
            (soft, {"precision": (-soft.scores["energy"], proxy.log_precision),
                    "total": (soft.scores["total"], ensemble.scores["total"])})):
        right = {f"spearman_{m}": stats.spearmanr(*pair).statistic for m, pair in wanted.items()}
        assert pd.rank_correlations(own, ensemble, proxy) == pytest.approx(right)


def test_a_subset_of_classes_is_that_of_its_logits():
    """Of an ensemble: of each member's, before its softmax; uncertainties are of all classes."""
    classes = torch.tensor([2, 3, 7, 11])
    logits = {**draw(450, 13), "mimo": torch.randn(450, 2, 13)}
    labels = torch.arange(450) % 4
    few = {name: z[..., classes].double().softmax(-1) for name, z in logits.items()}
    mean = sum(few[f"member{m}"] for m in range(3)) / 3
    right = [few["member0"], few["member1"], few["member2"], mean, mean,
             few["student_rkl_proxy"], few["student_forward_kl"], few["mimo"].mean(1)]
    found = pd.predict_among(classes, as_logits(logits, labels), 1)
    whole = pd.predict(as_logits(logits, labels), 1)
    for own, of_all, p in zip(found, whole, right, strict=True):
        np.testing.assert_allclose(own.log_probs.exp(), p, rtol=1e-5)
        assert own.networks == of_all.networks
        for measure, value in of_all.scores.items():
            np.testing.assert_array_equal(own.scores[measure], value)


def test_means_over_corruptions():
    kinds = list(data.CIFAR_C_KINDS)
    rows = {}
    for number, key in enumerate(itertools.product(kinds, data.SEVERITIES)):
        own = {"method": "MIMO", "seed": 3, "n": 4, "nll": float(number), "prr_total": 0.5}
        if key == ("fog", 2):
            own["prr_total"] = None
        rows[key] = [{**own, "set": f"c {key}"}, {**own, "set": "test", "against": f"c {key}"}]
    by = keyed(pd.shift_rows(rows, "c", kinds))
    every = np.arange(95).reshape(19, 5)
    for count in (19, 15):
        row = by["MIMO", f"c_mean_of_{count}", None]
        assert (row["nll"], row["n"], row["prr_total"]) == (every[:count].mean(), 4, None)
        row = by["MIMO", "test", f"c_mean_of_{count}_s2"]
        assert (row["nll"], row["seed"]) == (every[:count, 1].mean(), 3)
        assert by["MIMO", f"c_mean_of_{count}_s3", None]["prr_total"] == 0.5


# ---- Runs ---------------------------------------------------------------------------------------


def save_images(root, counts):
    """Pictures of three classes, by their mean colour: counts {folder: number of each class}."""
    rng = np.random.default_rng(0)
    for (place, row), label in itertools.product(counts.items(), range(3)):
        for i in range(row[label]):
            path = root / place / f"n0{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 120, (40, 48, 3)) + 60 * (np.arange(3) == label)
            Image.fromarray(pixels.astype(np.uint8)).save(path, compress_level=1)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A --data-dir like ImageNet's, and the same as the user's own images: 3 classes, 37 training
    and 11 test images; A, O and R with a part of the classes; of C fog, snow without severity 3,
    and a folder that is no corruption."""
    root = tmp_path_factory.mktemp("images")
    counts = {"imagenet/train": (13, 12, 12), "imagenet/val": (4, 4, 3), "imagenet-a": (0, 3, 0),
              "imagenet-r": (3, 3, 0), "imagenet-o": (0, 0, 9), "own/train": (13, 12, 12),
              "own/test": (4, 4, 3)}
    for kind, severity in itertools.product(("fog", "snow"), range(1, 6)):
        if (kind, severity) != ("snow", 3):
            counts[f"imagenet-c/{kind}/{severity}"] = (1, 1, 1)
    save_images(root, counts)
    (root / "imagenet-c/notes/1").mkdir(parents=True)
    return root


@pytest.fixture
def small(images, tmp_path):
    """small("NAME --more options"): the arguments of the whole study in a second or two."""
    options = (f"--dataset folder:{images}/own --ood folder:{images}/imagenet-o "
               "--model convnet --width .1 --members 2 --member-epochs 2 --epochs 2 "
               "--batch-size 16 --lr .5 --no-augment --noise 1 --opt sgd --device cpu --no-plot "
               f"--losses rkl_proxy --out-dir {tmp_path} --name ")
    return lambda more="run": (options + more).split()


def given(argv, *more, without=("--members", "--member-epochs")):
    """Arguments without some options, each of which has one value, and with others."""
    argv = list(argv)
    for name in without:
        if name in argv:
            at = argv.index(name)
            del argv[at:at + 2]
    return argv + [str(word) for word in more]


MIMO = "--mimo 2 --mimo-epochs 2"
STUDENT = "student_rkl_proxy-2epochs-m1-t1-of2-seed1"


def weights(path):
    return torch.load(path, weights_only=True)["net"]


def checkpoints(root):
    return {path.name: path.read_bytes() for path in root.glob("*.pt")}


def timeless(rows):
    return [{k: v for k, v in row.items() if k not in ("ms", "members")} for row in rows]


def assert_same_rows(rows, expected, **tolerance):
    for row, right in zip(timeless(rows), timeless(expected), strict=True):
        assert row.keys() == right.keys()
        for name, value in right.items():
            assert row[name] == value or row[name] == pytest.approx(value, **tolerance), name


def test_the_whole_study_and_its_evaluation(small, images, tmp_path, capsys, monkeypatch):
    some = dict(itertools.islice(data.CORRUPTIONS.items(), 2))
    monkeypatch.setattr(data, "CORRUPTIONS", some)
    options = small(f"run --losses {' '.join(pd.LOSSES)} --shift computed --shift-examples 4 "
                    f"{MIMO} --predict folder:{images}/own/test")
    rows = pd.main([*options, "--plot"])
    root = tmp_path / "proxy_distill/run"
    said, table = capsys.readouterr().out.split("\n\n", 1)
    # Of students, which see no labels, the log tells what shows a collapse.
    for line in said.splitlines():
        if line.startswith(("member", "mimo")):
            assert " train_accuracy " in line and "agreement" not in line
        if line.startswith("student"):
            assert re.search(" agreement .* log_precision .* log_precision_of_proxy ", line)
    assert said.count("\nstudent") == 8 and "member-seed2  epoch 2" in said
    # The table shows the test set, alone and against OOD sets.
    assert "computed" not in table and "own_noise1" in table
    for picture in ("uncertainty.png", "training.png"):
        with Image.open(root / picture) as image:
            colours = set(image.convert("L").resize((64, 32)).tobytes())
            assert image.width > 500 and len(colours) > 10
    by = keyed(rows)
    for method in pd.METHODS.values():
        plain = by[method, "own_noise1", None]
        against = by[method, "own_noise1", "imagenet-o_noise1"]
        soft = method in ("single network", pd.METHODS["student_forward_kl"])  # no epistemic one
        assert ("auroc_epistemic" in against) == ("prr_epistemic" in plain) == (not soft)
        assert {"accuracy", "nll", "brier", "ece15", "prr_total", "ms", "bytes"} <= plain.keys()
        assert {"auroc_total", "aupr_in_total", "fpr95_one_minus_max"} <= against.keys()
        assert plain["n"] == 11 and "prr_both_total" not in against
        assert by[method, "own_noise1_computed_c_mean_of_2_s5", None]["n"] == 4
        against = by[method, "own_noise1", "own_noise1_computed_c_mean_of_2"]
        assert 0 <= against["auroc_total"] <= 1
    same = [by[name, "own_noise1", None]["nll"] for name in ("ensemble", "proxy of the ensemble")]
    assert same[0] == same[1]
    # The predictions are those of the last student, and beside them the ensemble's.
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    right = by["proxy, reverse KL", "own_noise1", None]["accuracy"]
    assert {"file", "epkl", "predicted_ensemble", "epistemic_ensemble"} <= lines[0].keys()
    assert np.mean([line["label"] == line["predicted"] for line in lines]) == pytest.approx(right)
    for line in lines:
        total, aleatoric, epistemic = (float(line[k]) for k in ("total", "aleatoric", "epistemic"))
        assert epistemic > 0 and total == pytest.approx(aleatoric + epistemic, rel=1e-4)
    odd = f"folder:{images}/imagenet-o/n02"  # files in no folder of a class: no labels
    again = pd.main([*options, "--eval", "--predict", odd])
    assert_same_rows(again, rows, rel=1e-3, abs=1e-4)


def test_killed_again_and_again_equals_uninterrupted(small, tmp_path, monkeypatch):
    pd.main(small(f"calm {MIMO}"))
    progress = common.progress
    calls = itertools.count(1)

    def killed(loader, epoch):
        for batch in progress(loader, epoch):
            if next(calls) % 6 == 0:  # in all epochs of all kinds of networks
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(common, "progress", killed)
    for kills in range(20):
        try:
            pd.main(small(f"run {MIMO}"))
            break
        except KeyboardInterrupt:
            pass
    assert 3 < kills < 19
    root = tmp_path / "proxy_distill"
    names = checkpoints(root / "calm")
    assert len(names) == 4
    for name in names:
        assert_same_checkpoints(root / "run" / name, root / "calm" / name)


run_proxy_distill_in_float64 = partial(run_in_float64, "proxy_distill")


def test_two_processes_that_share_no_disk_equal_one(small, tmp_path):
    """Members, noise, students, evaluation; the second has nothing of the last batch, of one image.

    Not MIMO: each process shuffles the rows of its own images."""
    more = "--batch-size 18 --lr .1 --member-epochs 1"
    start_ranks(tmp_path, 1, run_proxy_distill_in_float64, *small(f"one {more}"))[0].value()

    def elsewhere(rank):
        return ["--out-dir", f"{tmp_path}/elsewhere"] if rank else []

    for child in start_ranks(tmp_path, 2, run_proxy_distill_in_float64, *small(f"two {more}"),
                             each=elsewhere):
        child.value()
    root = tmp_path / "proxy_distill"
    names = checkpoints(root / "one")
    assert len(names) == 3
    for name in names:
        two = weights(root / "two" / name)
        one = weights(root / "one" / name)
        assert all(value.dtype in (torch.float64, torch.int64) for value in one.values())
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10)
    found = [json.loads((root / name / "results.json").read_text()) for name in ("one", "two")]
    assert_same_rows(found[1]["rows"], found[0]["rows"], rel=1e-8, abs=1e-8)
    assert found[1]["environment"]["processes"] == 2 and not list(tmp_path.glob("elsewhere/**/*"))


def test_all_sets_are_noisy_and_no_noise_is_used_twice(small, images):
    """That of training images is drawn anew in each epoch, for each kind of network and seed."""
    more = f"run --shift computed --predict folder:{images}/own/test --noise"
    clean = pd.load_splits(pd.parse_args(small(f"{more} 0")))
    args = pd.parse_args(small(f"{more} 2"))
    noisy = pd.load_splits(args)
    assert torch.equal(noisy.train.images, clean.train.images) and noisy.train.name == "own"
    shifted = data.corrupted_sets(noisy.test, args).read("gaussian_noise", 2)
    noises = [shifted.images.double() - noisy.test.images.double()]
    for a, b in ((clean.test, noisy.test),
                 (clean.ood["imagenet-o"], noisy.ood["imagenet-o_noise2"])):
        assert b.name == f"{a.name}_noise2" and (a.images != b.images).float().mean() > 0.5
        noises.append(b.images.double() - a.images.double())
    for kind, seed, epoch in (("member", 1, 0), ("member", 1, 1), ("member", 2, 0),
                              ("student", 1, 0), ("mimo", 1, 0)):
        images_of_epoch = [pd.epoch_loader(noisy.train, 9, kind, seed, epoch, args).images
                           for _ in range(2)]
        assert torch.equal(*images_of_epoch)  # a resumed run draws the same
        noises.append(images_of_epoch[0].double() - clean.train.images.double())
    for a, b in itertools.combinations(noises, 2):
        both = torch.stack([noise[:9].flatten() for noise in (a, b)])
        assert abs(torch.corrcoef(both)[0, 1]) < 0.05
    assert torch.equal(noisy.predict.images, noisy.test.images)  # both are what is predicted


def test_teachers_see_the_same_images_as_the_student(small, monkeypatch):
    """Augmented and under the same noise, in every step."""
    args = pd.parse_args(small("run --epochs 1 --augment"))
    splits = pd.load_splits(args)
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, x):
            seen.append(x)
            return super().forward(x.flatten(1))

    def make_spy(*_):
        return Spy(3 * 32 * 32, 3)

    monkeypatch.setattr(pd, "make_network", make_spy)
    run = Namespace(resume=lambda *_, **__: [], save=lambda *_, **__: None)
    pd.train_student("rkl_proxy", [make_spy(), make_spy()], splits, 1, args, run)
    loader = pd.epoch_loader(splits.train, 16, "student", 1, 0, args)
    right = [batch.images for batch in loader.epoch(0) for _ in range(3)]
    assert len(seen) == len(right) == 9 and all(map(torch.equal, seen, right))


def test_training_is_plain_sgd_on_augmented_images(small, tmp_path):
    options = given(small(), "--members", 1, "--losses", "--member-epochs", 3, "--augment",
                    "--weight-decay", 0.05, "--limit-train", 30, "--noise", 0, without=["--epochs"])
    pd.main(options)
    common.seed_all(1, 0)
    net = network("convnet", 3, 32, width=0.1)
    train = pd.load_splits(pd.parse_args(options)).train
    optimiser = torch.optim.SGD(net.parameters(), 1, 0.9, weight_decay=0.05, nesterov=True)
    loader = data.Loader(train, 16, seed=1, shuffle=True, augment="crop_flip", channels_last=True)
    for step, batch in enumerate(itertools.chain.from_iterable(map(loader.epoch, range(3)))):
        optimiser.param_groups[0]["lr"] = pd.lr_factor(step, 2, 3, "cosine") / 32
        optimiser.zero_grad()
        cross_entropy(net(batch.images), batch.labels).backward()
        optimiser.step()
    state = torch.load(tmp_path / "proxy_distill/run/member-seed1.pt", weights_only=True)
    torch.testing.assert_close(state["net"], dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_members_that_changed_are_other_teachers(small, tmp_path):
    pd.main(small("run"))
    path = tmp_path / "proxy_distill/run/member-seed2.pt"
    state = torch.load(path, weights_only=True)
    state["net"]["head.weight"] *= 2
    torch.save(state, path)
    assert "was trained with other kind or features or teachers" in refusal(pd.main, small("run"))
    state["net"]["head.weight"] *= math.inf
    torch.save(state, path)
    said = refusal(pd.main, given(small("run --eval"), "--losses", without=["--losses"]))
    assert re.search("single network.*not finite", said)


def test_other_training_images_are_noticed(small, tmp_path):
    root = tmp_path / "data"
    save_images(root, {"train": (6, 6, 6), "test": (2, 2, 2)})
    options = small(f"run --dataset folder:{root} --limit-steps 1")
    pd.main(options)
    save_images(root, {"train": (7, 6, 6)})  # other pixels, too
    assert "was made with another training data" in refusal(pd.main, options)


def test_options_of_students_train_no_member_again(small, tmp_path):
    """Other losses, offsets, epochs, more members, MIMO: files that exist stay, side by side."""
    pd.main(small("run"))
    root = tmp_path / "proxy_distill/run"
    kept = checkpoints(root)
    changes = {"--target-offset 0 --losses rkl_proxy forward_kl":
                   {"student_rkl_proxy-2epochs-m1-t0-of2-seed1.pt",
                    "student_forward_kl-2epochs-of2-seed1.pt"},
               f"--members 3 {MIMO} --epochs 1 --model-offset 0.5":
                   {"member-seed3.pt", "mimo2-2epochs-seed1.pt",
                    "student_rkl_proxy-1epochs-m0.5-t1-of3-seed1.pt"}}
    for more, expected in changes.items():
        pd.main(small(f"run {more}"))
        now = checkpoints(root)
        assert now.keys() - kept.keys() == expected
        assert all(now[name] == content for name, content in kept.items())
        kept = now
    # These options are among the inputs of a checkpoint, in case that one is renamed.
    names = [f"student_rkl_proxy-2epochs-m1-t{t}-of2-seed1.pt" for t in (0, 1)]
    (root / names[0]).rename(root / names[1])
    assert "was trained with other" in refusal(pd.main, small("run"))
    assert "was made with lr 0.5 (not 7.0)" in refusal(pd.main, small("run --lr 7"))


def without_training(argv, *more):
    """Arguments without the options of training, which have no effect on files, and with others."""
    training = ("--losses", "--members", "--member-epochs", "--epochs", "--lr", "--opt")
    argv = given(argv, *more, without=training)
    argv.remove("--no-augment")
    return argv


def test_files_say_what_they_are(small, tmp_path, capsys):
    """A member is no student, and a student no member; Lightning's files may tell it, too."""
    pd.main(small())
    root = tmp_path / "proxy_distill"
    member = root / "run/member-seed1.pt"
    student = root / f"run/{STUDENT}.pt"
    bare = tmp_path / "bare.pt"
    torch.save(weights(student), bare)
    before = snapshot(root)
    files = without_training(small("files"))
    for argv, said in (
            (["--student-path", member], "a member, not a student; members are given with --ens"),
            (["--ensemble-paths", member, bare, member, "--losses"], "hold the same network"),
            (["--ensemble-paths", member, student, "--losses"], "is a student_rkl_proxy, not a")):
        assert said in refusal(pd.main, given(files, *argv))
    assert snapshot(root) == before
    capsys.readouterr()
    rows = pd.main(given(files, "--student-path", bare))  # a state dict does not say its loss
    assert {row["method"] for row in rows} == {"proxy, reverse KL"}
    assert f"{bare} does not name" in capsys.readouterr().out
    pair = [member, root / "run/member-seed2.pt"]
    rows = pd.main(given(files, "--name", "pair", "--losses", "--ensemble-paths", *pair))
    assert {row["method"] for row in rows} == {"single network", "ensemble",
                                               "proxy of the ensemble"}


def test_other_files_have_a_run_directory_of_their_own(small, tmp_path):
    """They never replace the results of a finished run; their order makes no difference."""
    run = given(small(), without=["--name"])
    rows = pd.main(run)
    root = tmp_path / "proxy_distill"
    first = root / "own-convnet-w0.1-seed1"
    paths = [f"{first}/member-seed{seed}.pt" for seed in (1, 2)]
    pd.main(given(run, "--ensemble-paths", *paths))
    taught = root / f"own-convnet-w0.1-files_of_{first.name}-seed1"
    assert set(root.iterdir()) == {first, taught}
    # The same command with --eval is the same table, in any order of the files.
    again = pd.main(given(run, "--eval", "--ensemble-paths", *paths[::-1]))
    assert timeless(again) == timeless(rows)
    # Which file is which: seeds of files are not known.
    by = {row["seed"]: row["members"] for row in again if row["method"] == "single network"}
    assert all(re.fullmatch(f"member-seed{seed}.pt [0-9a-f]{{8}}", by[seed][0]) for seed in (1, 2))
    assert {tuple(row["members"]) for row in rows} >= {(1,), (2,), (1, 2)}
    # Other files of that name are other networks.
    state = torch.load(paths[0], weights_only=True)
    state["net"]["head.weight"] *= 2
    torch.save(state, paths[0])
    said = refusal(pd.main, given(run, "--ensemble-paths", *paths))
    assert "another networks in files" in said


TORCHVISION = "--model torchvision/mobilenet_v3_small --weights none --image-size 32"


@pytest.mark.parametrize("more", ["--lr 0.01 --limit-steps 1", "--freeze"])
def test_networks_of_torchvision(small, images, tmp_path, more):
    """Members and students are whole networks, or with --freeze heads on features."""
    options = given(small(f"run {TORCHVISION} {more} --predict folder:{images}/own/test"),
                    without=["--width", "--noise", "--member-epochs", "--epochs"])
    options.remove("--no-augment")
    rows = pd.main([*options, "--member-epochs", "1", "--epochs", "1"])
    root = tmp_path / "proxy_distill/run"
    assert len(list(csv.DictReader((root / "predictions.csv").open()))) == 11
    assert keyed(rows)["proxy, reverse KL", "own", None]["n"] == 11
    state = weights(root / "member-seed1.pt")
    assert ("backbone.features.0.0.weight" in state) == ("freeze" not in more)
    # The same members, given as files.
    paths = list(root.glob("member*.pt"))
    pd.main(given(options, "--name", "again", "--epochs", 1, "--ensemble-paths", *paths))
    student, = root.glob("student*.pt")
    again = weights(tmp_path / "proxy_distill/again" / student.name)
    assert all(torch.equal(again[key], value) for key, value in weights(student).items())
    if more == "--freeze":  # other training images would standardise the features otherwise
        other = given(options, "--name", "other", "--limit-train", 30, "--ensemble-paths", *paths)
        assert "other images" in refusal(pd.main, other)


def test_copies_of_one_network_are_no_ensemble():
    """Without training, all members would be the pretrained network."""
    argv = ["--model", "torchvision/resnet18", "--device", "cpu", "--member-epochs", "0"]
    assert "would be the same network" in refusal(pd.parse_args, argv)
    assert "would be the same network" in refusal(pd.parse_args, [*argv, "--losses"])
    assert pd.parse_args([*argv, "--losses", "--members", "1"]).members == 1
    assert pd.parse_args([*argv, "--weights", "none"]).members == 3


def test_options(small):
    rows = pd.main(small("run --member-epochs 1 --epochs 1 --losses forward_kl --model resnet18 "
                         "--width 0.05 --amp bf16 --augment --opt adam --lr .01 --schedule step "
                         "--limit-steps 1 --runs 2"))
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
    assert {row["seed"] for row in rows} == {1, 2, 3, 4}  # other members in each run


def test_a_batch_is_at_most_the_training_set(small):
    """And so is the learning rate, which is proportional to it."""
    args = pd.parse_args(small(f"run --batch-size {10**9}"))
    assert pd.batch_size_of(pd.load_splits(args).train, args) == 37


STREAMED = ("--dataset imagenet --model convnet --width .05 --members 2 --member-epochs 1 "
            "--epochs 1 --batch-size 19 --lr .1 --workers 0 --losses rkl_proxy --device cpu "
            "--no-plot")


def test_streamed_folders(images, tmp_path):
    options = f"{STREAMED} --data-dir {images} --out-dir {tmp_path} --name run".split()
    rows = pd.main([*options, "--shift-examples", "2", "--image-size", "64"])
    by = keyed(rows)
    for method in ("single network", "proxy of the ensemble", "proxy, reverse KL"):
        assert by[method, "imagenet", None]["n"] == 11
        for name, n, same in (("imagenet_a", 3, 4), ("imagenet_r", 6, 8)):
            assert by[method, name, None]["n"] == n
            assert by[method, "imagenet, its classes", name]["n"] == same
            assert "prr_both_total" in by[method, "imagenet", name]
        assert (method, "imagenet_o", None) not in by  # its labels mean nothing
        assert by[method, "imagenet", "imagenet_o"]["n"] == 11
        assert by[method, "imagenet_c_1of19_fog_s5", None]["n"] == 2
        assert "auroc_total" in by[method, "imagenet", "imagenet_c_1of19_mean_of_1"]
    assert not any("snow" in name for _, name, _ in by)  # a part is never reported as the whole
    plain = [row for row in rows if "_c_" not in row["set"] + row.get("against", "")]
    again = pd.main([*options, "--eval", "--shift", "none", "--image-size", "64"])
    assert_same_rows(again, plain)
    refused = [*options, "--name", "refused", "--noise", "2"]
    assert "in memory" in refusal(pd.main, refused)  # before anything is trained
    assert not list(tmp_path.glob("proxy_distill/refused*"))


def test_the_published_evaluation_squeezes_all_images_but_those_of_training(images):
    line = f"{STREAMED} --data-dir {images} --ood imagenet_a --shift published"
    args = pd.parse_args([*line.split(), "--published-evaluation"])
    sets = pd.load_splits(args)
    shifted = data.corrupted_sets(sets.test, args).read("fog", 1)
    shifted = pd.for_evaluation(shifted, 2, args)
    plain = pd.load_splits(pd.parse_args(line.split()))
    assert sets.train.resize == plain.train.resize == 256
    for dataset in (sets.test, sets.ood["imagenet_a"], shifted):
        assert dataset.resize == [256, 256] and dataset.shape == (3, 224, 224)
        with Image.open(dataset.root / dataset.files[0]) as image:
            small = image.resize((256, 256), Image.Resampling.BILINEAR)
        right = np.asarray(small)[16:240, 16:240].transpose(2, 0, 1)
        assert np.array_equal(dataset[0].numpy(), right)


def test_published_networks_need_no_training_images(images, tmp_path):
    (tmp_path / "data/imagenet").mkdir(parents=True)
    (tmp_path / "data/imagenet/val").symlink_to(images / "imagenet/val")
    line = f"{STREAMED} --data-dir {tmp_path}/data --ood --shift none".split()
    assert "imagenet/train" in refusal(pd.load_splits, pd.parse_args(line))
    args = pd.parse_args(["--dataset", "imagenet", "--data-dir", f"{tmp_path}/data", "--workers",
                          "0", "--ensemble-paths", "a.ckpt", "b.ckpt", "--losses", "--ood"])
    whole = pd.load_splits(pd.parse_args(given(line, "--data-dir", images)))
    sets = pd.load_splits(args)
    assert sets.train.classes == sets.test.classes == whole.test.classes
    assert (sets.test.mean, sets.test.std) == (whole.test.mean, whole.test.std)


@pytest.mark.parametrize("argv, said", [
    ("--members 1", "add --losses"), ("--members 0", "add --mimo"),
    ("--ensemble-paths no.pt no.pt", "--member-epochs has no effect with --ensemble-paths"),
    ("files --student-path {file} --losses proxy", "--losses has no effect with --student"),
    ("--mimo 1", "at least"),
    ("--mimo 3 --batch-size 2", "--batch-size 2 for 37 training images: --mimo 3"),
    ("--losses proxy rkl_proxy --target-offset 0", "--target-offset 0"),
    ("--mimo-epochs 3", "without --mimo"), ("--shift-examples 3", "without --shift"),
    ("--published-evaluation", "of --dataset imagenet"), ("--image-size 4", "it needs 8 x 8"),
    ("files --losses --ensemble-paths a.tar.gz b.pt", "unpack it"),
    ("files --student-path {file} --lr 3", "--lr has no effect without a network to train"),
    ("files --ensemble-paths {file} {file} --runs 2", "--runs"),
    ("files --ensemble-paths {file}", "at least 2"),
    ("files --losses --model-offset 0.5", "--model-offset has no effect without --losses"),
    ("--losses forward_kl --model-offset 0.5", "--model-offset has no effect on the loss"),
    ("--losses dirichlet_likelihood --target-offset 2", "--target-offset has no effect"),
    ("files --student-path {file} --epochs 3", "--epochs has no effect with --student-path"),
    ("files --student-path {file}", "is damaged")])
def test_misuse_is_one_line(small, tmp_path, argv, said):
    """Of files, without the options of training; before anything is trained or made."""
    file = tmp_path / "file"
    file.write_text("no network")
    words = argv.format(file=file).split()
    options = small() + words
    if words[0] == "files":
        options = without_training(small(), *words[1:])
    assert said in refusal(pd.main, options)
    assert not (tmp_path / "proxy_distill").exists()


def test_presets():
    """lr .8 for a batch of 2,048, as in the published command; and the published spellings."""
    args = pd.parse_args("--dataset imagenet --wd 0.1 --model_offset 0 --target_offset 0.5 "
                         "--device cpu".split())
    expected = dict(lr=0.1, batch_size=2048, member_epochs=120, epochs=90, mimo_epochs=150,
                    weight_decay=0.1, model_offset=0, target_offset=0.5, members=10,
                    losses=["forward_kl", "rkl_proxy"])
    assert expected.items() <= vars(args).items()
