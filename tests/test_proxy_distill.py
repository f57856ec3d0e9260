"""proxy_distill.py against textbook forms, mpmath and brute force; its files; its runs."""

import csv
import itertools
import json
import math
import os
import re
import sys
from argparse import Namespace

import mpmath
import numpy as np
import pytest
import torch
import torchvision
from conftest import run_proxy_distill, start_ranks
from PIL import Image
from scipy import stats
from scipy.special import log_softmax, softmax, xlogy
from sklearn.metrics import log_loss, roc_auc_score, top_k_accuracy_score
from torch.distributions import Dirichlet
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_calibration_error

import common
import data
import proxy_distill as pd
from common import UserError

ALL = [(loss, m, t) for loss in pd.LOSSES for m, t in ((1, 1), (0, 0), (1, 0))]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def members(m=5, b=6, k=7, spread=0.5):
    """Logits [M, B, K]: a shared normal and each member's own."""
    return 2 * torch.randn(b, k).double() + spread * torch.randn(m, b, k).double()


def loss_rows(loss, z, ensemble, m=1, t=1, target="published", most=None, temperature=1.0):
    options = Namespace(loss=loss, model_offset=m, target_offset=t, rkl_target=target,
                        max_precision=most)
    return pd.distillation_loss(z, ensemble, options, temperature)


def gradient(loss, z, ensemble, *options):
    """(rows [B], dL_i/dz_i [B, K])"""
    z = z.detach().clone().requires_grad_()
    rows = loss_rows(loss, z, ensemble, *options)
    return rows.detach(), torch.autograd.grad(rows.sum(), z)[0]


# ---- Method: statistics, losses -----------------------------------------------------------------


@pytest.mark.parametrize("m, temperature", [(1, 1.0), (6, 4.0)])
def test_streamed_statistics_are_the_stacked_ones(m, temperature):
    z = members(m=m, b=9, k=11).requires_grad_()
    ours = pd.ensemble_statistics((member for member in z), temperature)
    log_p = log_softmax(z.detach().numpy() / temperature, -1)
    p = np.exp(log_p)
    pi = p.mean(0)
    right = (np.log(pi), log_p.mean(0), stats.entropy(p, axis=-1).mean(0),
             stats.entropy(pi[None], p, axis=-1).mean(0))
    for a, b in zip(ours, right):
        assert a.dtype == torch.float64 and not a.requires_grad
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    half = members(k=50).bfloat16()  # widened first
    for a, b in zip(pd.ensemble_statistics(half), pd.ensemble_statistics(half.double())):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_members_that_agree_or_are_certain_stay_finite(dtype):
    z = (4 * torch.randn(50, 1000)).to(dtype)
    same = pd.ensemble_statistics([z] * 5)
    assert (same.rmi >= 0).all() and same.rmi.max() < 1e-13
    np.testing.assert_allclose(pd.proxy_precision(same), 999 * 2.0**23, rtol=1e-6)
    for out in (pd.ensemble_outputs(same), pd.proxy_outputs(same), pd.student_outputs(9 * z, 0.0)):
        assert (torch.stack([out.measures[m] for m in pd.MEASURES]) >= 0).all()  # not -1e-16
    gap = torch.zeros(3, 2, 40)
    gap[0, :, 1] = gap[1, :, 1] = gap[2, 0, 2] = gap[2, 1, 1] = 1000.0  # probabilities of 0
    certain = pd.ensemble_statistics(gap)
    pi = np.array([2 / 3, 1 / 3])
    assert certain.rmi[0].item() == pytest.approx((pi * np.log(pi)).sum() + 1000 * 4 / 9, rel=1e-9)
    for (loss, m, t), (e, k, b) in itertools.product(ALL, ((same, 1000, 50), (certain, 40, 2))):
        if loss == "proxy" and not t and e is certain:
            continue  # a target of concentrations 0 is at no finite distance
        rows, grad = gradient(loss, torch.randn(b, k).to(dtype), e, m, t)
        assert rows.isfinite().all() and grad.isfinite().all() and grad.dtype == dtype, (loss, m)


def test_forward_kl_and_likelihood_are_the_definitions():
    logits, z = members(), torch.randn(6, 7).double()
    e = pd.ensemble_statistics(logits)
    pi = e.log_probs.exp()
    rows, grad = gradient("forward_kl", z, e)
    np.testing.assert_allclose(rows, stats.entropy(pi.T, z.softmax(-1).T), rtol=1e-10)
    np.testing.assert_allclose(grad, z.softmax(-1) - pi, rtol=1e-9, atol=1e-12)
    # 40: no floor inside the logarithm, a confident member's tail counts in full
    for m, temperature, scale in ((0.0, 1.0, 1), (1.0, 1.0, 40), (0.7, 2.5, 1)):
        sharp = scale * logits / temperature
        q = Dirichlet((z / temperature).exp() + m)
        right = -temperature**2 * torch.stack([q.log_prob(p) for p in sharp.softmax(-1)]).mean(0)
        e = pd.ensemble_statistics(scale * logits, temperature)
        ours = loss_rows("dirichlet_likelihood", z, e, m, temperature=temperature)
        np.testing.assert_allclose(ours, right, rtol=1e-10)


@pytest.mark.parametrize("t, target, most", [
    (1, "published", None), (1.5, "published", 9.0), (2, "paper", None)])
def test_options_of_the_proxy_are_in_the_losses_optima(t, target, most):
    """Of the reverse KL (m = 1): softmax(z) = pi, alpha_0 = b + K; of the forward one
    (m = t), where it is 0: the target."""
    e = pd.ensemble_statistics(members())
    total = pd.proxy_precision(e).clamp_max(most or math.inf)[:, None]
    assert (total == 9).any() if most else (total > 9).any()
    best = e.log_probs + (total + (7 * t if target == "published" else 0)).log()
    rows, grad = gradient("rkl_proxy", best, e, 1, t, target, most)
    worse = loss_rows("rkl_proxy", best + 0.3 * torch.randn_like(best), e, 1, t, target, most)
    assert grad.abs().max() < 1e-8 and (worse > rows).all()
    rows, grad = gradient("proxy", e.log_probs + total.log(), e, t, t, target, most)
    assert rows.abs().max() < 1e-9 and grad.abs().max() < 1e-9


def exact_entropy(alpha):
    """(h(alpha), E ln p_k) of a Dirichlet, by mpmath from the definition."""
    total = mpmath.fsum(alpha)
    means = [mpmath.digamma(a) - mpmath.digamma(total) for a in alpha]
    norm = mpmath.fsum(map(mpmath.loggamma, alpha)) - mpmath.loggamma(total)
    return norm - mpmath.fsum((a - 1) * mean for a, mean in zip(alpha, means)), means


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("z", [(60, 0, 1, -2), (-40,) * 4, (60, 60, 59, -40), (22, 20, 3, -40),
                               (30, 16, 3, 2.5), (0, 0, 0, 0), None])
def test_rkl_is_exact_at_extreme_logits_and_a_thousand_classes(z, offset):
    z = torch.cat([torch.tensor([45.0, 40.0, 30.0]), 3 * torch.randn(997)]) if z is None \
        else torch.tensor(z)
    e = pd.ensemble_statistics(members(b=1, k=len(z)))
    rows, grad = gradient("rkl_proxy", z.double()[None], e, offset)
    k, b, psi1 = len(z), (pd.proxy_precision(e) + len(z)).item(), lambda x: mpmath.psi(1, x)
    with mpmath.workdps(60):
        pi = [mpmath.mpf(p) for p in e.log_probs[0].exp().tolist()]
        alpha = [mpmath.exp(x) + offset for x in z.tolist()]
        entropy, means = exact_entropy(alpha)
        value = -mpmath.fsum(p * mean for p, mean in zip(pi, means)) - entropy / b
        total = mpmath.fsum(alpha)
        rest = psi1(total) * (1 - (total - k) / b)
        slopes = [float((a - offset) * (psi1(a) * ((a - 1) / b - p) + rest))
                  for a, p in zip(alpha, pi)]
    assert rows.item() == pytest.approx(float(value), rel=1e-11)
    np.testing.assert_allclose(grad[0], slopes, rtol=1e-7, atol=1e-7 * max(map(abs, slopes)))


def test_trigamma_and_entropy_where_the_textbook_forms_are_noise():
    x = torch.cat([torch.logspace(-12, 60, 100, dtype=torch.float64), torch.arange(1, 40) / 2,
                   torch.tensor([999.0, 1001.0]).double()])
    with mpmath.workdps(90):
        exact = [mpmath.psi(1, mpmath.mpf(v)) for v in x.tolist()]
        left = [float(v * p - 1) for v, p in zip(x.tolist(), exact)]
    psi1, rest = pd.trigamma(x)
    np.testing.assert_allclose(psi1, np.array(exact, float), rtol=1e-8)
    np.testing.assert_allclose(rest, left, rtol=1e-7)
    for scale in (1e-3, 1.0, 300.0, 1e3, 1e8, 1e20):
        alpha = scale * (0.5 + torch.rand(3, 6).double())
        alpha[1, 0], alpha[2, 3] = 1.0, 50.0  # mixed sizes too
        ours, log_means = pd.dirichlet_entropy(alpha)
        with mpmath.workdps(80):
            exact, means = zip(*(exact_entropy([*map(mpmath.mpf, a)]) for a in alpha.tolist()))
        np.testing.assert_allclose(ours, np.array(exact, float), rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(log_means, np.array(means, float), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss, m, t", ALL)
def test_losses_change_nothing_and_leave_autocast(loss, m, t):
    logits, z = members(), torch.randn(6, 7).double()
    e = pd.ensemble_statistics(logits)
    rows, grad = gradient(loss, z, e, m, t)
    again = gradient(loss, z, e, m, t)
    assert torch.equal(again[0], rows) and torch.equal(again[1], grad)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradient(loss, z.float(), pd.ensemble_statistics(logits.float()), m, t)
    np.testing.assert_allclose(inside[0], rows, rtol=1e-4, atol=1e-5)
    assert inside[0].dtype == torch.float64


# ---- Method: measures, schedules ----------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.5, 5.0])
def test_ensemble_measures_are_loops_over_pairs(spread):
    z = members(m=4, b=8, k=6, spread=spread)
    out = pd.ensemble_outputs(pd.ensemble_statistics(z))
    p = softmax(z.numpy(), -1)
    pi, got = p.mean(0), out.measures
    right = {"confidence": 1 - pi.max(-1), "total": stats.entropy(pi, axis=-1),
             "aleatoric": stats.entropy(p, axis=-1).mean(0),
             "epistemic": stats.entropy(pi, axis=-1) - stats.entropy(p, axis=-1).mean(0),
             "epkl": np.mean([stats.entropy(a, b, axis=-1) for a in p for b in p], 0),
             "rmi": np.mean([stats.entropy(pi, a, axis=-1) for a in p], 0)}
    assert got.keys() == right.keys() == {*pd.MEASURES}
    for name, value in right.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(out.log_precision.exp(), 5 / (2 * got["rmi"] + 2.0**-23))


def test_dirichlet_measures_are_integrals_over_its_marginals():
    for alpha in ([2.5, 1.5, 6.0, 3.0], [1.0] * 10, [0.3, 40.0]):
        alpha = np.array(alpha)
        mean, marginals = alpha / alpha.sum(), [stats.beta(a, alpha.sum() - a) for a in alpha]
        log_p, p_log_p = (np.array([own.expect(f) for own in marginals])
                          for f in (np.log, lambda p: xlogy(p, p)))
        total, data_nats = stats.entropy(mean), -p_log_p.sum()
        right = {"total": total, "aleatoric": data_nats, "epistemic": total - data_nats,
                 "epkl": (p_log_p - mean * log_p).sum(), "confidence": 1 - mean.max(),
                 "rmi": (mean * (np.log(mean) - log_p)).sum()}
        out = pd.dirichlet_outputs(torch.tensor(alpha)[None], torch.tensor(np.log(mean))[None])
        assert out.log_precision.exp().item() == pytest.approx(alpha.sum())
        assert {k: v.item() for k, v in out.measures.items()} == pytest.approx(right, rel=1e-6)


def test_the_proxy_is_scored_with_the_number_of_classes():
    e = pd.ensemble_statistics(members(k=1000))
    for t in (0.0, 1.0):
        out = pd.proxy_outputs(e, t)
        np.testing.assert_allclose(out.measures["epkl"], 999 / (999 / (2 * e.rmi) + 1000 * t),
                                   rtol=1e-5)  # t = 0: twice the ensemble's RMI
        assert torch.equal(out.log_probs, e.log_probs)


def test_student_predicts_without_the_offset_and_measures_with_it():
    z = 3 * torch.randn(40, 8).double()
    for m in (0.0, 1.0, 5.0):
        out = pd.student_outputs(z, m)
        np.testing.assert_allclose(out.log_probs, log_softmax(z.numpy(), -1), rtol=1e-12)
        np.testing.assert_allclose(out.log_precision.exp(), z.exp().sum(-1) + 8 * m, rtol=1e-12)
        p = (z.exp() + m) / (z.exp() + m).sum(-1, keepdim=True)
        np.testing.assert_allclose(out.measures["total"], stats.entropy(p.numpy(), axis=-1))
        np.testing.assert_allclose(out.measures["confidence"], 1 - softmax(z.numpy(), -1).max(-1),
                                   rtol=1e-9, atol=1e-15)
    plain = pd.softmax_outputs(z)
    assert {*plain.measures} == {"confidence", "total", *pd.SCORES}  # a softmax has no more
    np.testing.assert_allclose(plain.measures["total"], stats.entropy(softmax(z, -1), axis=-1))
    np.testing.assert_allclose(plain.log_precision, -plain.measures["energy"])
    # exp overflows at 709; out-of-distribution inputs of large nets reach it
    z = torch.tensor([[800.0, 0.0, -5.0], [2000.0, 1999.0, 0.0], [1.0, 2.0, 3.0]])
    for out in (pd.softmax_outputs(z), pd.student_outputs(z), pd.student_outputs(z, 0.0)):
        assert all(v.isfinite().all() for v in (*out.measures.values(), *out[::2]))


def test_learning_rate_and_temperature():
    rate = lambda epoch, epochs, more=0: 0.8 * pd.learning_rate(epoch * 7 + more, 7, epochs)
    for epoch, right in ((0, 0.8), (39, 0.8), (40, 0.08), (79, 0.08), (80, 0.008), (105, 0.008),
                         (106, 0.0008), (119, 0.0008)):
        assert rate(epoch, 120) == pytest.approx(right) == rate(epoch, 120, more=6)
    assert rate(0, 1) == rate(0, 2) == rate(0, 3) == 0.8  # not a thousandth of it
    rates = [pd.learning_rate(s, 10, 10, "cosine", 0.2) for s in range(100)]
    np.testing.assert_allclose(np.diff(rates[:20]), 1 / 21)  # linear, not from zero
    right = [0.5 * (1 + math.cos(math.pi * s / 80)) for s in range(80)]
    np.testing.assert_allclose(rates[20:], right, rtol=1e-12)
    at = [pd.annealed_temperature(e, 10.0, 60) for e in (0, 15, 30, 31, 45, 60, 89)]
    np.testing.assert_allclose(at, [10, 10, 10, 9.7, 5.5, 1, 1])
    assert pd.annealed_temperature(5, 10.0, 0) == 1.0


@pytest.mark.parametrize("n, r, p, e", [(128, 2, 0.6, 2), (10, 1, 0.0, 3), (8, 3, 1.0, 2),
                                        (5, 2, 0.5, 1)])
def test_mimo_rows(n, r, p, e):
    draw = lambda seed: pd.mimo_rows(n, r, p, e, torch.Generator().manual_seed(seed))
    rows, own = draw(0), int(n * r * (1 - p))
    assert rows.shape == (n * r, e) and torch.equal(draw(3), draw(3))
    for column in rows.T:
        assert torch.equal(column.sort().values, torch.arange(n).repeat_interleave(r))
    assert (rows[own:] == rows[own:, :1]).all()
    if (n, p) == (128, 0.6):  # published: 256 rows, 102 shuffled, 154 shared
        assert own == 102 and (rows[:102, 0] == rows[:102, 1]).sum() < 10


def test_mimo_pairs_images_with_their_labels():
    labels = torch.arange(8)
    images = labels[:, None, None, None].expand(8, 3, 2, 2).float()
    args = Namespace(seed=1, mimo_members=2, batch_repetitions=2, repetition_probability=0.3,
                     device="cpu")
    x, y, size = pd.mimo_batch(data.Batch(images, labels, labels, 8), 0, 0, args)
    assert size == 32 and y.shape == (16, 2) and not torch.equal(y[:, 0], y[:, 1])
    assert torch.equal(x, y.float().repeat_interleave(3, 1)[..., None, None].expand(16, 6, 2, 2))
    assert not torch.equal(y, pd.mimo_batch(data.Batch(images, labels, labels, 8), 1, 0, args)[1])


def test_annealing_divides_all_logits_and_smoothing_is_of_members():
    args = Namespace(kind="distill", loss="dirichlet_likelihood", temperature=5.0, anneal_epochs=4,
                     model_offset=0.5, amp="off", device=torch.device("cpu"), label_smoothing=0.1)
    teachers, z = pd.Teachers([torch.nn.Identity()], args), torch.randn(6, 7)
    batch = data.Batch(z, torch.zeros(6).long(), torch.arange(6), 6)
    for epoch, t in ((0, 5.0), (3, 3.0), (4, 1.0)):
        rows, _, _ = pd.batch_loss(lambda x: 2 * x, batch, epoch, 0, teachers, args)
        right = pd.dirichlet_likelihood_loss(2 * z, pd.ensemble_statistics([z], t), 0.5, t)
        np.testing.assert_allclose(rows, right, rtol=1e-12)
    args.kind, log_p = "base", z.log_softmax(1)
    rows, _, _ = pd.batch_loss(lambda x: x, batch, 0, 0, None, args)
    np.testing.assert_allclose(rows, -0.9 * log_p[:, 0] - 0.1 * log_p.mean(1), rtol=1e-5)


# ---- Model, files -------------------------------------------------------------------------------


def network(model="resnet50", classes=1000, size=224, mimo=1, channels=3, width=1.0):
    return pd.make_network(model, classes, (channels, size, size), width, mimo)


def test_parameters_and_residual_branches():
    count = lambda net: sum(p.numel() for p in net.parameters())
    with torch.device("meta"):
        one, two, small = network(), network(mimo=2), network("resnet18")
    assert count(one) == 25_557_032 and count(two) == 27_615_440 and count(small) == 11_689_512
    groups = pd.make_optimiser(one, Namespace(opt="sgd", weight_decay=1e-4)).param_groups
    size = {g["weight_decay"]: (len(g["params"]), sum(p.numel() for p in g["params"]))
            for g in groups}
    assert size == {1e-4: (65, 25_511_720), 0.0: (96, 45_312)}
    assert all(g["momentum"] == 0.9 and g["nesterov"] for g in groups)
    net = network("resnet18", 5, 32)
    assert all((b.bn2.weight == 0).all() for b in net.modules() if isinstance(b, pd.Block))
    weight = net.layer2[0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.05)


def test_output_shapes_and_a_head_in_float32():
    for (model, size), mimo in itertools.product((("convnet", 16), ("resnet50", 96)), (1, 3)):
        net = network(model, 7, size, mimo, 1, 0.25).eval()
        x = torch.randn(2, mimo, size, size)
        plain = net(x)
        assert plain.shape == ((2, 7) if mimo == 1 else (2, mimo, 7))
        with torch.autocast("cpu", torch.bfloat16):
            assert net(x).dtype == torch.float32
    with torch.no_grad():  # head e is the e-th block of K rows
        net.fc.weight[7:14], net.fc.bias[7:14] = 0, 5
    assert (net(x)[:, 1] == 5).all() and torch.allclose(net(x)[:, 0], plain[:, 0])


LIGHTNING = "pytorch_lightning.utilities.parsing", "pytorch_lightning.callbacks.model_checkpoint"


def save_as_lightning(path, net, style, **options):
    """A checkpoint as Lightning 1.4 or 1.5 writes it, with classes of its own module names."""
    modules = {name: type(sys)(name) for name in ("pytorch_lightning", *LIGHTNING)}
    attributes = type("AttributeDict", (dict,), {"__module__": LIGHTNING[0]})
    callback = type("ModelCheckpoint", (), {"__module__": LIGHTNING[1]})
    modules[LIGHTNING[0]].AttributeDict = attributes
    modules[LIGHTNING[1]].ModelCheckpoint = callback
    state = {"epoch": 89, "pytorch-lightning_version": f"{style}.3", "optimizer_states": [],
             "state_dict": {f"model.{k}": v for k, v in net.state_dict().items()},
             "callbacks": {callback if style == "1.4" else "ModelCheckpoint{'monitor': 'val_acc1'}":
                           {"best_model_score": torch.tensor(0.7), "best_model_path": "a.ckpt"}},
             "hyper_parameters": attributes(options) if style == "1.5" else options}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        torch.save(state, path)


@pytest.mark.parametrize("style", ["1.4", "1.5"])
def test_lightnings_files_load_and_predict_what_torchvisions_networks_do(tmp_path, style):
    theirs = torchvision.models.resnet50(num_classes=20).eval()
    for name, value in theirs.state_dict().items():
        if ("bn" in name or "downsample.1" in name) and value.is_floating_point():
            value.uniform_(0.5, 1.5)
    path = tmp_path / "member.ckpt"
    save_as_lightning(path, theirs, style, loss_type="rkl_proxy", model_offset=1.0)
    ours = network(classes=20, size=96)
    found = pd.load_weights(ours, path)
    assert len(found["state_dict"]) == 320 and found["hyper_parameters"]["model_offset"] == 1.0
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        right, logits = theirs(x), ours.eval()(x)
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-4 * right.abs().max())
    torch.save(dict(reversed(theirs.state_dict().items())), path)  # torchvision's own, any order
    pd.load_weights(ours, path)
    assert torch.equal(ours.conv1.weight, theirs.conv1.weight)


class Hostile:
    """What a pickle could run."""

    def __reduce__(self):
        return os.mkdir, (Hostile.folder,)


def test_other_files_are_refused_in_one_line_and_run_nothing(tmp_path):
    path, net = tmp_path / "member.pt", network("convnet", 5, 16, channels=1, width=0.1)
    state, Hostile.folder = net.state_dict(), str(tmp_path / "ran")
    save_as_lightning(path, net, "1.4", more=Hostile())
    for content, match in (
            (path.read_bytes(), "plain tensors"), (b"not a checkpoint", "plain tensors"),
            ({"state_dict": state, "hyper_parameters": Hostile()}, "plain tensors"),
            (network("convnet", 6, 16, channels=1, width=0.1).state_dict(),
             "does not fit.*size mismatch for fc.weight"),
            ({k: v for k, v in state.items() if k != "fc.bias"}, "Missing key.*fc.bias"),
            ({**state, "fc.scale": torch.ones(1)}, "Unexpected key.*fc.scale"),
            ({"state_dict": torch.ones(2)}, "does not fit")):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(UserError, match=f"{path}.*{match}") as error:
            pd.load_weights(net, path)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()
    save_as_lightning(path, net, "1.5")
    with pytest.raises(Exception):  # outside of load_weights Lightning's names are unknown again
        torch.load(path, weights_only=True)


# ---- Evaluation ---------------------------------------------------------------------------------


def test_metrics_are_scikit_learns_and_torchmetrics():
    z = 2 * torch.randn(500, 12).double()
    labels = torch.distributions.Categorical(logits=0.6 * z).sample()  # a colder truth
    p, own = softmax(z.numpy(), -1), pd.columns_of(pd.student_outputs(z), labels)
    values, y, classes = pd.predictive_metrics(own), labels.numpy(), np.arange(12)
    assert values["accuracy"] == (p.argmax(1) == y).mean()
    assert values["top5_accuracy"] == top_k_accuracy_score(y, p, k=5, labels=classes)
    assert values["nll"] == pytest.approx(log_loss(y, p, labels=classes), rel=1e-9)
    assert values["brier"] == pytest.approx(((p - np.eye(12)[y]) ** 2).sum(1).mean(), rel=1e-9)
    for key, norm in (("ece15", "l1"), ("mce15", "max")):
        right = multiclass_calibration_error(torch.tensor(p), labels, 12, 15, norm).item()
        assert values[key] == pytest.approx(right, abs=1e-6)
    wrong = p.argmax(1) != y
    for name in pd.MEASURES:
        right = 2 * roc_auc_score(wrong, own[name]) - 1
        assert values[f"prr_{name}"] == pytest.approx(right)
    sure = pd.columns_of(pd.softmax_outputs(1e4 * torch.eye(6).double()), torch.arange(6))
    values = pd.predictive_metrics(sure)  # no errors: no rejection ratio
    assert values["ece15"] == 0 and values["accuracy"] == 1 and values["prr_total"] is None


def test_rows_compare_the_sets_that_they_name():
    """Of saved logits: on the test set, against an OOD set, against it within two classes."""
    def saved(name, n, k, scale):
        logits = {"student_rkl_proxy": scale * torch.randn(n, 5),
                  "members": scale * torch.randn(n, 3, 5)}
        return pd.SavedSet(name, torch.arange(n) % k, logits, 0.5)

    test, odd, classes = saved("test", 60, 5, 3.0), saved("odd", 40, 2, 1.0), torch.tensor([1, 3])
    sets = pd.Sets(test=test, ood={"odd": (odd, classes)})
    rows, _ = pd.evaluate(pd.Models(offset=0.5), sets, Namespace(shift="none", shift_examples=0))
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    own, other = (pd.student_outputs(s.logits["student_rkl_proxy"], 0.5) for s in (test, odd))
    within = torch.isin(test.labels, classes)
    for kept, name in ((within | True, "test"), (within, "test, its classes")):
        row = by["student_rkl_proxy", name, "odd"]
        assert row["n"] == kept.sum() and "auroc_epistemic" not in by["single", name, "odd"]
        for measure in (*pd.MEASURES, *pd.SCORES):
            a, b = own.measures[measure][kept], other.measures[measure]
            right = roc_auc_score([0] * len(a) + [1] * 40, torch.cat([a, b]))
            assert row[f"auroc_{measure}"] == pytest.approx(right)
            limit = min(t for t in a if (a <= t).double().mean() >= 0.95)
            assert row[f"fpr95_{measure}"] == pytest.approx((b <= limit).double().mean().item())
    ensemble = pd.ensemble_outputs(pd.ensemble_statistics(test.logits["members"].unbind(1)))
    for name in (*pd.MEASURES[1:], "precision"):
        a, b = (out.measures.get(name, out.log_precision) for out in (own, ensemble))
        right = stats.spearmanr(a, b).statistic
        assert by["student_rkl_proxy", "test", None][f"spearman_{name}"] == pytest.approx(right)
    few = odd.logits["student_rkl_proxy"][:, classes]  # the labels number these classes
    right = (few.argmax(1) == odd.labels).double().mean().item()
    assert by["student_rkl_proxy", "odd", None]["accuracy"] == pytest.approx(right)


def test_a_subset_of_classes_is_that_of_its_logits():
    """Of an ensemble: of each member's, before its softmax; uncertainties are of all classes."""
    classes = torch.tensor([2, 3, 7, 11, 12, 20, 29])
    logits = {"members": torch.randn(40, 3, 30), "mimo": torch.randn(40, 2, 30),
              "student_rkl_proxy": torch.randn(40, 30), "student_forward_kl": torch.randn(40, 30)}
    own, whole = pd.outputs_of(logits, 1.0, classes), pd.outputs_of(logits, 1.0)
    assert {*own} == {*pd.ROWS} - {"student_proxy", "student_dirichlet_likelihood"}
    few = {name: z[..., classes].double().softmax(-1) for name, z in logits.items()}
    right = {"single": few["members"][:, 0], "mimo": few["mimo"].mean(1),
             **dict.fromkeys(("ensemble", "ensemble_proxy", "ensemble_proxy_t1"),
                             few["members"].mean(1)),
             **{name: p for name, p in few.items() if name.startswith("student")}}
    for name, p in right.items():
        np.testing.assert_allclose(own[name].log_probs.exp(), p, rtol=1e-9, err_msg=name)
        for measure, value in whole[name].measures.items():
            assert torch.equal(own[name].measures[measure], value)
    assert {*pd.outputs_of({"members": logits["members"][:, :1]}, 1.0)} == {"single"}


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A --data-dir like ImageNet's: 3 classes, 37 training and 11 test images; A, O and R with a
    part of the classes; of C fog, snow without severity 3, and a folder that is no corruption."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    counts = {"imagenet/train": (13, 12, 12), "imagenet/val": (4, 4, 3), "imagenet-a": (0, 3, 0),
              "imagenet-r": (3, 3, 0), "imagenet-o": (0, 0, 9),
              **{f"imagenet-c/{kind}/{severity}": (1, 1, 1) for kind in ("fog", "snow")
                 for severity in range(1, 6) if (kind, severity) != ("snow", 3)}}
    for (place, row), label in itertools.product(counts.items(), range(3)):
        for i in range(row[label]):
            path = root / place / f"n0{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 120, (40, 48, 3)) + 60 * (np.arange(3) == label)
            Image.fromarray(pixels.astype(np.uint8)).save(path, compress_level=1)
    (root / "imagenet-c/notes/1").mkdir(parents=True)
    return root


@pytest.fixture
def small(images, tmp_path):
    """small("NAME --more options"): the arguments of the whole story in a second or two."""
    options = (f"--dataset folder:{images}/imagenet --ood folder:{images}/imagenet-o "
               "--model convnet --width .1 --members 2 --base-epochs 2 --epochs 2 --mimo-epochs 2 "
               "--batch-size 16 --mimo-batch-size 32 --lr .5 --no-augment --cache-teachers "
               "--noise 1 --shift none --device cpu --no-plot --losses rkl_proxy "
               f"--out-dir {tmp_path} --name ")
    return lambda more: (options + more).split()


@pytest.fixture
def weights(tmp_path):
    """weights("NAME-base-seed1"): of that network."""
    return lambda name: torch.load(tmp_path / "proxy_distill" / name / "network.pt",
                                   weights_only=True)["net"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(rows):
    return [{k: v for k, v in row.items() if k != "ms_per_example"} for row in rows]


def same_rows(a, b, **close):
    """Whether the rows agree in what both have, numbers as pytest.approx has it."""
    return all(x.get(k) == v or x.get(k) == pytest.approx(v, **close)
               for x, y in zip(timeless(a), timeless(b), strict=True) for k, v in y.items())


def test_the_story_its_evaluation_and_its_saved_logits(small, images, tmp_path, capsys,
                                                       monkeypatch):
    some = dict(itertools.islice(data.CORRUPTIONS.items(), 2))
    monkeypatch.setattr(data, "CORRUPTIONS", some)
    options = small(f"run --losses {' '.join(pd.LOSSES)} --shift computed --shift-examples 4 "
                    f"--mimo --predict folder:{images}/imagenet/val")
    rows, root = pd.main([*options, "--plot"]), tmp_path / "proxy_distill/run"
    said, table = capsys.readouterr().out.split("\n\n", 1)
    assert "learning rate 0.03125 = --lr 0.5 x 16 / 256" in said
    assert "learning rate 0.0625 = --lr 0.5 x 32 / 256" in said
    assert max(map(len, table.splitlines())) <= 120
    with Image.open(root / "story.png") as image:
        assert image.width > 500 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 10
    assert json.loads((root / "results.json").read_text())["rows"] == rows
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    for method in pd.ROWS.values():
        plain, against = by[method, "imagenet", None], by[method, "imagenet", "imagenet-o"]
        soft = method in ("single network", "EnD (forward KL)")  # a softmax has no epistemic one
        assert ("auroc_epistemic" in against) == ("prr_epistemic" in plain) == (not soft)
        assert {"accuracy", "nll", "brier", "ece15", "prr_total"} <= plain.keys()
        assert {"auroc_total", "fpr95_confidence"} <= against.keys() and plain["n"] == 11
        parts = [by[method, f"imagenet_computed {kind} 5", None] for kind in some]
        mean = by[method, "imagenet_computed mean of 2 kinds 5", None]
        assert mean["nll"] == pytest.approx((parts[0]["nll"] + parts[1]["nll"]) / 2)
        assert parts[0]["n"] == 4
    assert by["ensemble", "imagenet", None]["nll"] == by["its proxy", "imagenet", None]["nll"]
    kept = {p: p.read_bytes() for p in root.parent.rglob("network.pt")}
    assert len(kept) == 7
    odd = f"folder:{images}/imagenet-o/n02"  # files in no folder of a class: no labels
    for more in (f"--eval --batch-size 7 --augment --no-cache-teachers --predict {odd}", ""):
        assert same_rows(pd.main([*options, *more.split()]), rows, rel=1e-3, abs=1e-4)
    assert kept == {p: p.read_bytes() for p in kept}
    lines = [*csv.DictReader((root / "predictions.csv").open())]  # of the last of the students
    right = by["proxy, reverse KL", "imagenet", None]["accuracy"]
    assert len(lines) == 11 and {"total", "aleatoric", "epistemic", "epkl"} <= lines[0].keys()
    assert np.mean([line["label"] == line["predicted"] for line in lines]) == pytest.approx(right)
    score = lambda *names: pd.main([
        "--logits", *(f"{root}/logits_{name}.npz" for name in names), "--out-dir", str(tmp_path),
        "--device", "cpu"])
    again = score("val", "n02")
    rows = [{**by[method, "imagenet", None], "set": "val"} for method in pd.ROWS.values()]
    assert same_rows(again[:9], rows, abs=1e-5)
    assert [(row["against"], row["n"]) for row in again[9:]] == [("n02", 11)] * 9
    common.save_arrays(root / "logits_other.npz", names=["mimo"], labels=[-1], offset=1.0,
                       mimo=torch.zeros(1, 2, 3))
    for names, match in ((["val", "val"], "same name"), (["val", "other"], "different networks"),
                         (["n02"], "have labels")):
        with pytest.raises(UserError, match=match):
            score(*names)


def test_killed_again_and_again_equals_uninterrupted(small, weights, monkeypatch):
    more = "--mimo --epochs 3"
    pd.main(small(f"calm {more}"))
    real, calls = pd.batch_loss, itertools.count(1)

    def killed(*rest):
        if next(calls) % 6 == 0:  # in all epochs of all kinds of networks
            raise KeyboardInterrupt
        return real(*rest)

    monkeypatch.setattr(pd, "batch_loss", killed)
    kills = 0
    while kills < 20:
        try:
            pd.main(small(f"run {more}"))
            break
        except KeyboardInterrupt:
            kills += 1
    assert 5 < kills < 20
    for what in ("base-seed1", "base-seed2", "mimo-seed1", "student_rkl_proxy-seed1"):
        assert equal(weights(f"run-{what}"), weights(f"calm-{what}")), what


def test_two_processes_that_share_no_disk_equal_one(small, weights, tmp_path):
    """All of it: members, the cache of the teachers, students, MIMO's shuffled rows, evaluation,
    one more student; the second has nothing of the last batch, of one image."""
    more = "--batch-size 18 --opt sgd --lr .1 --mimo --losses rkl_proxy dirichlet_likelihood"
    one = pd.main(small(f"one {more}"))
    each = lambda rank: ["--out-dir", f"{tmp_path}/elsewhere"] * rank
    for more in (more, f"{more} --method distill --loss forward_kl"):
        for child in start_ranks(tmp_path, 2, run_proxy_distill, *small(f"two {more}"), each=each):
            child.value()
    for what in ("base-seed1", "base-seed2", "mimo-seed1", "student_rkl_proxy-seed1",
                 "student_dirichlet_likelihood-seed1"):
        torch.testing.assert_close(weights(f"two-{what}"), weights(f"one-{what}"), rtol=1e-4,
                                   atol=1e-4)
    two = json.loads((tmp_path / "proxy_distill/two/results.json").read_text())["rows"]
    for a, b in zip(one, two, strict=True):
        assert a["method"] == b["method"] and a["n"] == b["n"]
        assert b.get("nll", 0) == pytest.approx(a.get("nll", 0), abs=1e-3)
    assert weights("two-student_forward_kl-seed1") and not [*tmp_path.glob("elsewhere/**/*.pt")]


def test_all_sets_are_noisy_and_mimo_sees_an_image_twice(small, images, monkeypatch):
    more = f"--predict folder:{images}/imagenet/val --noise"
    clean, noisy = (pd.load_sets(pd.parse_args(small(f"run {more} {n}"))) for n in (0, 2))
    for a, b in zip(*([*s[:2], s.predicted, s.ood["imagenet-o"][0]] for s in (clean, noisy))):
        assert a.name == b.name and (a.images != b.images).float().mean() > 0.5
    net, args = network("convnet", 3, 32, 2, 3, 0.1).eval(), pd.parse_args(small("run"))
    (_, logits, _), = pd.passes(pd.Models(others={"mimo": net}), clean.test, args)
    batch, = data.Loader(clean.test, 99).epoch()
    with torch.no_grad():
        right = net(torch.cat([batch.images, batch.images], 1))
    np.testing.assert_allclose(logits["mimo"], right, atol=1e-6)
    monkeypatch.setattr(common, "world_size", lambda: 5)
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    with pytest.raises(UserError, match="5 process.* cannot share 4 of its 11"):
        pd.load_sets(pd.parse_args(small("run --shift computed --shift-examples 4")))


def test_training_is_plain_sgd_on_augmented_images(small, weights, tmp_path):
    options = small("run --method base --epochs 3 --augment --no-cache-teachers --opt sgd "
                    "--weight-decay .05 --schedule cosine --warm-up .3 --limit-train 30")
    pd.main(options)
    common.seed_all(1, 0)
    net, train = network("convnet", 3, 32, 1, 3, 0.1), pd.load_sets(pd.parse_args(options)).train
    optimiser = torch.optim.SGD(net.parameters(), 1, 0.9, weight_decay=0.05, nesterov=True)
    loader = data.Loader(train, 16, seed=1, shuffle=True, augment="crop_flip", channels_last=True)
    log, losses = tmp_path / "proxy_distill/run-base-seed1/network.jsonl", []
    for step, batch in enumerate(itertools.chain.from_iterable(map(loader.epoch, range(3)))):
        optimiser.param_groups[0]["lr"] = pd.learning_rate(step, 2, 3, "cosine", 0.3) / 32
        optimiser.zero_grad()
        loss = cross_entropy(net(batch.images), batch.labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item() * len(batch.labels) / 30)
    logged = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert logged == pytest.approx([a + b for a, b in zip(losses[::2], losses[1::2])])
    torch.testing.assert_close(weights("run-base-seed1"), dict(net.state_dict()), rtol=1e-4,
                               atol=1e-6)


def test_cached_teachers_are_the_members_and_what_is_damaged_or_huge_is_refused(
        small, tmp_path, monkeypatch):
    cached = pd.main(small("run"))
    online = pd.main(small("online --no-cache-teachers"))
    for a, b in zip(cached, online, strict=True):
        assert b.get("nll", 0) == pytest.approx(a.get("nll", 0), rel=1e-4)
    path = next(tmp_path.glob("proxy_distill/run/teachers-*.pt"))
    assert common.load_checkpoint(path)["mean_log"].dtype == torch.float32  # half for gigabytes
    path.write_bytes(path.read_bytes()[:-2000])  # it was filled up with zeros and believed
    with pytest.raises(UserError, match="damaged"):
        pd.main(small("run --losses forward_kl"))
    huge = type("Huge", (), {"num_classes": 21_000, "__len__": lambda self: 14_000_000})()
    monkeypatch.setattr(data, "load", lambda *_, **__: huge)
    with pytest.raises(UserError, match="1176.0 GB"):
        pd.load_sets(pd.parse_args(small("run")))


def test_teachers_are_left_alone_and_what_diverged_is_refused(small, tmp_path):
    """No gradient and no batch statistics reach the members; a student belongs to its ensemble."""
    for seed in "12":
        pd.main(small(f"r=1 --method base --seed {seed}"))
    paths = [tmp_path / f"proxy_distill/r=1-base-seed{seed}/network.pt" for seed in "12"]
    before = [path.read_bytes() for path in paths]
    with pytest.raises(UserError, match="has 2 of 3 epochs; first finish it"):
        pd.main(small("r=1 --method distill --base-epochs 3"))
    with pytest.raises(UserError, match="no .*r=1-base-seed3"):  # of the second run
        pd.main(small("r=1 --method distill --runs 2"))
    assert len([*tmp_path.glob("proxy_distill/*")]) == 4  # two members, two tables
    student = small("r=1 --method distill --batch-size 12 --no-cache-teachers")
    pd.main(student)  # with another batch size than its members had
    assert before == [path.read_bytes() for path in paths]
    pd.main(small("r=1 --method base --lr 2 --fresh"))
    with pytest.raises(UserError, match="ensemble"):
        pd.main(student)
    state = torch.load(paths[0], weights_only=True)
    state["net"]["fc.weight"] *= math.inf
    torch.save(state, paths[0])
    with pytest.raises(UserError, match="single network.*diverged"):
        pd.main(small("r=1 --method base --lr 2 --eval"))


def test_published_files_are_evaluated_and_teach(small, weights, tmp_path):
    """Lightning's files of the same weights: the same rows, the same student."""
    rows = pd.main(small("run --mimo --model-offset 0.5"))
    for what, mimo in (("base-seed1", 1), ("base-seed2", 1), ("student_rkl_proxy-seed1", 1),
                       ("mimo-seed1", 2)):
        net = network("convnet", 3, 32, mimo, 3, 0.1)
        net.load_state_dict(weights(f"run-{what}"))
        save_as_lightning(tmp_path / what, net, "1.5", loss_type="rkl_proxy", model_offset=0.5)
    members = f"--ensemble-paths {tmp_path}/base-seed1 {tmp_path}/base-seed2"
    student = f"--eval --student-path {tmp_path}/student_rkl_proxy-seed1"
    again = pd.main(small(f"files {members} {student} --mimo-path {tmp_path}/mimo-seed1"))
    key = lambda row: (row["method"], row.get("against") or "")
    assert timeless(sorted(again, key=key)) == timeless(sorted(rows, key=key))
    assert {row["method"] for row in pd.main(small(f"alone {student}"))} == {"proxy, reverse KL"}
    pd.main(small(f"taught {members} --model-offset 0.5"))
    assert equal(*(weights(f"{n}-student_rkl_proxy-seed1") for n in ("run", "taught")))


@pytest.mark.parametrize("more, seeds", [
    ("--losses rkl_proxy proxy --rkl-target paper --max-precision 1e4 --student-width .2 "
     "--model-offset 0 --target-offset 0 --opt sgd --lr 1e-3", {1}),
    ("--losses forward_kl dirichlet_likelihood --model resnet18 --width 0.05 --amp bf16 --augment "
     "--label-smoothing 0.1 --opt adam --lr .01 --temperature 5 --anneal-epochs 2 "
     "--no-cache-teachers --runs 2", {1, 3}),  # members of its own in each run
    ("--method base --runs 2", {1, 2})])
def test_options(small, more, seeds):
    rows = pd.main(small(f"run --base-epochs 1 --epochs 1 {more}"))
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    assert {row["seed"] for row in rows} == seeds


def test_streamed_folders(images, tmp_path):
    options = (f"--dataset imagenet --data-dir {images} --out-dir {tmp_path} --name run --model "
               "convnet --width .05 --members 2 --base-epochs 1 --epochs 1 --batch-size 19 --lr .1 "
               "--workers 0 --losses rkl_proxy --no-mimo --device cpu --no-plot "
               "--shift-examples 2").split()
    rows, plain = pd.main(options), [*options, "--eval", "--shift", "none"]
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    for method in ("single network", "its proxy + 1", "proxy, reverse KL"):
        assert by[method, "imagenet", None]["n"] == 11
        for name, n, same in (("imagenet_a", 3, 4), ("imagenet_r", 6, 8)):
            assert by[method, name, None]["n"] == n
            assert by[method, "imagenet, its classes", name]["n"] == same
        assert (method, "imagenet_o", None) not in by  # its labels mean nothing
        assert by[method, "imagenet", "imagenet_o"]["n"] == 11
    shifts = {name for _, name, _ in by if "_c" in name}  # a part is never reported as the whole
    assert "imagenet_c_1of15 fog 5" in shifts and not any("snow" in s for s in shifts)
    assert "imagenet_c_1of15 mean of 1 kinds" in shifts
    assert by["single network", "imagenet_c_1of15 fog 5", None]["n"] == 2
    assert timeless(pd.main(plain)) == timeless([r for r in rows if "_c" not in r["set"]])
    square = pd.main([*plain, "--resize", "square"])
    assert square[0]["n"] == 11 and square[0]["nll"] != rows[0]["nll"]
    broken = images / "imagenet/val/n02/9.png"
    broken.write_bytes(b"not an image")
    try:
        with pytest.raises(UserError, match=str(broken)):
            pd.main(plain)
    finally:
        broken.unlink()
    for more, said in (("--shift computed", "in memory"), ("--noise 2", "streamed")):
        with pytest.raises(UserError, match=said):  # before anything is trained
            pd.main([*options, "--name", "refused", *more.split()])
    assert not list(tmp_path.glob("proxy_distill/refused*/*.pt"))


@pytest.mark.parametrize("argv, said", [
    ("--members 1", "--members"), ("--augment", "--no-cache-teachers"), ("--ood none", "none"),
    ("--temperature 5", "--anneal-epochs"), ("--repetition-probability 2", "between 0 and 1"),
    ("--ensemble-paths no.pt no.pt", "no file no.pt"), ("--eval", "without --eval"),
    ("--method base --ensemble-paths {file}", "--ensemble-paths"),
    ("--student-path {file}", "--eval"), ("--method distill", "--method base --seed 1"),
    ("--mimo-batch-size 3", "--mimo-batch-size"), ("--logits {file}", "npz"),
    ("--logits {file} --predict numbers", "--predict"), ("--shift published", "--shift"),
    ("--logits {file} --runs 2", "--runs"), ("--image-size 7", "convnet"),
    ("--eval --student-path {file}", "plain tensors")])
def test_misuse_is_one_line(small, tmp_path, argv, said):
    file = tmp_path / "file"
    file.write_text("no network")
    with pytest.raises(UserError, match=re.escape(said)) as error:
        pd.main(small("run " + argv.format(file=file)))
    assert "\n" not in str(error.value) and not (tmp_path / "proxy_distill").exists()


def test_one_rule_of_learning_rates_and_the_published_settings():
    """--learning_rate 0.1 is .8 for a batch of 2,048, as in the published command, and 1.6 for
    MIMO's 4,096 rows, of 1,024 images."""
    args = pd.parse_args(["--dataset", "imagenet", "--learning_rate", "0.1", "--device", "cpu"])
    found = {kind: pd.network_args(args, kind, 1, loss="rkl_proxy") for kind in pd.OWN}
    assert {kind: (own.lr * own.batch_size / 256, own.epochs) for kind, own in found.items()} == {
        "base": (pytest.approx(0.8), 120), "mimo": (pytest.approx(1.6), 150),
        "distill": (pytest.approx(0.8), 90)}
    mimo = found["mimo"]
    assert mimo.batch_size // (mimo.mimo_members * mimo.batch_repetitions) == 1024
    assert (args.weight_decay, args.model_offset, args.target_offset) == (1e-4, 1, 1)
    assert args.loss == "rkl_proxy" and args.members == 10 and args.mimo
    own = pd.parse_args(["--method", "mimo", "--lr", ".2", "--batch-size", "512", "--epochs", "3"])
    own = pd.network_args(own, "mimo", 1)
    assert (own.lr, own.batch_size, own.epochs) == (0.2, 512, 3)
    args = pd.parse_args(["--student-width", ".5", "--device", "cpu"])
    found = [pd.network_args(args, "distill", 1, loss=loss) for loss in ("rkl_proxy", "proxy")]
    assert [(own.width, own.epochs) for own in found] == [(0.5, 8), (0.5, 2)]
    assert pd.network_args(args, "base", 1).width == 0.25
