"""proxy_distill.py against textbook forms, mpmath and brute force; its files; its runs."""

import csv
import itertools
import json
import math
import os
import re
import sys
import warnings
from argparse import Namespace
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torchvision
from conftest import assert_same_checkpoints, run_in_float64, snapshot, start_ranks
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

OFFSETS = [(1, 1), (0, 0), (1, 0)]  # of model and target
ALL = [(loss, m, t) for loss in pd.LOSSES for m, t in OFFSETS]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def members(m=5, b=6, k=7, spread=0.5):
    """Logits [M, B, K]: a shared normal and each member's own."""
    return 2 * torch.randn(b, k).double() + spread * torch.randn(m, b, k).double()


def gradient(loss, z, ensemble, m=1, t=1):
    """The rows of a loss [B], and dL_i/dz_i [B, K]."""
    z = z.detach().clone().requires_grad_()
    args = Namespace(model_offset=m, target_offset=t)
    rows = pd.distillation_loss(z, ensemble, loss, args)
    return rows.detach(), torch.autograd.grad(rows.sum(), z)[0]


# ---- Method: statistics and losses --------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 6])
def test_streamed_statistics_are_the_stacked_ones(m):
    z = members(m=m, b=9, k=11).requires_grad_()
    ours = pd.ensemble_statistics(member for member in z)
    log_p = log_softmax(z.detach().numpy(), -1)
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
    for out in (pd.ensemble_outputs(same), pd.proxy_outputs(same), pd.student_outputs(9 * z)):
        for name in pd.MEASURES:
            assert (out.measures[name] >= 0).all()  # not -1e-16
    gap = torch.zeros(3, 2, 40)
    for member, row, label in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (2, 0, 2), (2, 1, 1)):
        gap[member, row, label] = 1000.0  # the others have probability 0
    certain = pd.ensemble_statistics(gap)
    pi = np.array([2 / 3, 1 / 3])
    assert certain.rmi[0].item() == pytest.approx((pi * np.log(pi)).sum() + 1000 * 4 / 9, rel=1e-9)
    for loss, m, t in ALL:
        for ensemble, k, b in ((same, 1000, 50), (certain, 40, 2)):
            if loss == "proxy" and not t and ensemble is certain:
                continue  # a target of concentrations 0 is at no finite distance
            rows, grad = gradient(loss, torch.randn(b, k).to(dtype), ensemble, m, t)
            assert rows.isfinite().all() and grad.isfinite().all() and grad.dtype == dtype


def test_forward_kl_and_likelihood_are_the_definitions():
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


@pytest.mark.parametrize("t", [0, 1, 1.5])
def test_the_optima_are_the_targets(t):
    """Of the reverse KL (m = 1): softmax(z) = pi, sum exp(z) = beta_0 + K t; of the forward one
    (m = t): the proxy, where it is 0."""
    ensemble = pd.ensemble_statistics(members())
    precision = pd.proxy_precision(ensemble)[:, None]
    best = ensemble.log_probs + (precision + 7 * t).log()
    rows, grad = gradient("rkl_proxy", best, ensemble, 1, t)
    worse, _ = gradient("rkl_proxy", best + 0.3 * torch.randn_like(best), ensemble, 1, t)
    assert grad.abs().max() < 1e-8 and (worse > rows).all()
    rows, grad = gradient("proxy", ensemble.log_probs + precision.log(), ensemble, t, t)
    assert rows.abs().max() < 1e-9 and grad.abs().max() < 1e-9


def test_the_closed_form_of_the_reverse_kl_is_its_derivative():
    ensemble = pd.ensemble_statistics(members())
    z = torch.randn(6, 7).double().requires_grad_()
    for m, t in OFFSETS + [(0.3, 2.0)]:
        assert torch.autograd.gradcheck(lambda z: pd.rkl_proxy_loss(z, ensemble, m, t), z)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        loss = pd.rkl_proxy_loss(z, ensemble).square().sum()
        first, = torch.autograd.grad(loss, z, create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("z", [(-40,) * 4, (22, 20, 3, -40), (16, 12, 3, 2.5), (0, 0, 0, 0), None])
def test_the_reverse_kl_is_exact_wherever_a_target_can_be(z, offset):
    """Against mpmath; None: a thousand classes, at the precision of members that agree."""
    if z is None:
        z = torch.cat([torch.tensor([22.0, 18.0, 9.0]), 3 * torch.randn(997)])
    z = torch.as_tensor(z).double()
    k = len(z)
    ensemble = pd.ensemble_statistics(members(b=1, k=k, spread=0.5 if z.max() < 20 else 1e-4))
    rows, grad = gradient("rkl_proxy", z[None], ensemble, offset)
    b = (pd.proxy_precision(ensemble) + k).item()
    with mpmath.workdps(60):
        pi = [mpmath.mpf(p) for p in ensemble.log_probs[0].exp().tolist()]
        alpha = [mpmath.exp(x) + offset for x in z.tolist()]
        total = mpmath.fsum(alpha)
        means = [mpmath.digamma(a) - mpmath.digamma(total) for a in alpha]
        entropy = mpmath.fsum(map(mpmath.loggamma, alpha)) - mpmath.loggamma(total)
        entropy -= mpmath.fsum((a - 1) * mean for a, mean in zip(alpha, means))
        value = -mpmath.fsum(p * mean for p, mean in zip(pi, means)) - entropy / b
        rest = mpmath.psi(1, total) * (1 - (total - k) / b)
        slopes = [float((a - offset) * (mpmath.psi(1, a) * ((a - 1) / b - p) + rest))
                  for a, p in zip(alpha, pi)]
    assert rows.item() == pytest.approx(float(value), rel=1e-7)
    np.testing.assert_allclose(grad[0], slopes, rtol=1e-6, atol=1e-6 * max(map(abs, slopes)))


def test_logits_that_no_target_asks_for_are_brought_down():
    """The textbook form is noise from logits of 40 on, and infinite from 710 on."""
    ensemble = pd.ensemble_statistics(members(b=3, k=4))
    z = torch.tensor([[60.0, 0.0, 1.0, -2.0], [5000.0, 40.0, 0.0, 0.0], [60.0, 60.0, 59.0, -40.0]])
    rows, grad = gradient("rkl_proxy", z, ensemble)
    assert rows.isfinite().all() and grad.abs().max() < 2
    assert (grad.sum(1) > 0).all()
    at_limit, slope = gradient("rkl_proxy", z.clamp_max(pd.LARGEST_LOGIT), ensemble)
    assert torch.equal(rows, at_limit) and torch.equal(grad, slope)


def test_the_tail_outweighs_the_head_except_in_the_reverse_kl():
    """Of a student at z = 0: the pull of all unlikely classes over that of the likely one. It grows
    with the classes for the likelihood and the forward divergence, which therefore collapse."""
    ratios = {loss: [] for loss in pd.LOSSES}
    for k in (10, 1000, 10_000):
        head = torch.linspace(0.93, 0.97, 5).double()
        p = ((1 - head) / (k - 1))[:, None, None].repeat(1, 1, k)
        p[:, 0, 0] = head
        ensemble = pd.ensemble_statistics(p.log())
        for loss in pd.LOSSES:
            _, grad = gradient(loss, torch.zeros(1, k).double(), ensemble)
            ratios[loss].append((grad[0, 1:].abs().sum() / grad[0, 0].abs()).item())
    assert ratios["forward_kl"] == pytest.approx([1, 1, 1])
    assert ratios["rkl_proxy"] == pytest.approx([0.766, 0.7645, 0.7645], rel=1e-3)
    for loss in ("dirichlet_likelihood", "proxy"):
        assert ratios[loss][0] > 5 and ratios[loss][1] > 300 and ratios[loss][2] > 2000
    for function in (pd.dirichlet_likelihood_loss, pd.proxy_loss):
        assert re.search(r"collapses.*ten classes", " ".join(function.__doc__.split()))


@pytest.mark.parametrize("loss, m, t", ALL)
def test_losses_change_nothing_and_leave_autocast(loss, m, t):
    logits = members()
    z = torch.randn(6, 7).double()
    ensemble = pd.ensemble_statistics(logits)
    rows, grad = gradient(loss, z, ensemble, m, t)
    again, grad_again = gradient(loss, z, ensemble, m, t)
    assert torch.equal(again, rows) and torch.equal(grad_again, grad)
    one = pd.Ensemble(*[column[2:3] for column in ensemble])
    alone, grad_alone = gradient(loss, z[2:3], one, m, t)
    np.testing.assert_allclose(alone, rows[2:3], rtol=1e-12)
    np.testing.assert_allclose(grad_alone, grad[2:3], rtol=1e-10, atol=1e-14)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = gradient(loss, z.float(), pd.ensemble_statistics(logits.float()), m, t)
    np.testing.assert_allclose(inside, rows, rtol=1e-4, atol=1e-5)
    assert inside.dtype == torch.float64


# ---- Method: uncertainties, schedule, MIMO ------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.5, 5.0])
def test_ensemble_measures_are_loops_over_pairs(spread):
    z = members(m=4, b=8, k=6, spread=spread)
    out = pd.ensemble_outputs(pd.ensemble_statistics(z))
    p = softmax(z.numpy(), -1)
    pi = p.mean(0)
    got = out.measures
    right = {"one_minus_max": 1 - pi.max(-1), "total": stats.entropy(pi, axis=-1),
             "aleatoric": stats.entropy(p, axis=-1).mean(0),
             "epistemic": stats.entropy(pi, axis=-1) - stats.entropy(p, axis=-1).mean(0),
             "epkl": np.mean([stats.entropy(a, b, axis=-1) for a in p for b in p], 0),
             "rmi": np.mean([stats.entropy(pi, a, axis=-1) for a in p], 0)}
    assert got.keys() == right.keys() == set(pd.MEASURES)
    for name, value in right.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(out.log_precision.exp(), 5 / (2 * got["rmi"] + 2.0**-23))


@pytest.mark.parametrize("alpha", [[2.5, 1.5, 6.0, 3.0], [1.0] * 10, [0.3, 40.0]])
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


def test_the_proxy_is_scored_with_the_number_of_classes():
    ensemble = pd.ensemble_statistics(members(k=1000))
    out = pd.proxy_outputs(ensemble)
    np.testing.assert_allclose(out.measures["epkl"], 2 * ensemble.rmi, rtol=1e-5)
    np.testing.assert_allclose(out.log_precision.exp(), 999 / (2 * ensemble.rmi), rtol=1e-5)
    assert torch.equal(out.log_probs, ensemble.log_probs)


def test_a_student_is_the_dirichlet_whose_mean_it_predicts():
    z = 3 * torch.randn(40, 8).double()
    out = pd.student_outputs(z)
    plain = pd.softmax_outputs(z)
    assert set(plain.measures) == {"one_minus_max", "total"}  # a softmax has no more
    for own in (out, plain):
        np.testing.assert_allclose(own.log_probs, log_softmax(z.numpy(), -1), rtol=1e-12)
        np.testing.assert_allclose(own.log_precision.exp(), z.exp().sum(-1), rtol=1e-12)
        p = softmax(z, -1)
        np.testing.assert_allclose(own.measures["total"], stats.entropy(p, axis=-1), rtol=1e-9)
        one_minus_max = own.measures["one_minus_max"]
        np.testing.assert_allclose(one_minus_max, 1 - p.max(-1), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(out.measures["epkl"], 7 / z.exp().sum(-1), rtol=1e-12)
    # exp overflows at 709; out-of-distribution inputs of large nets reach it
    z = torch.tensor([[800.0, 0.0, -5.0], [2000.0, 1999.0, 0.0], [-900.0, -800.0, -999.0]])
    for out in (pd.softmax_outputs(z), pd.student_outputs(z)):
        values = list(out.measures.values()) + [out.log_probs, out.log_precision]
        assert all(value.isfinite().all() for value in values)


def test_learning_rates():
    def rate(epoch, epochs, step=0):
        return 0.8 * pd.learning_rate(epoch * 7 + step, 7, epochs, "step")

    for epoch, right in ((0, 0.8), (39, 0.8), (40, 0.08), (79, 0.08), (80, 0.008), (105, 0.008),
                         (106, 0.0008), (119, 0.0008)):
        assert rate(epoch, 120) == pytest.approx(right) == rate(epoch, 120, step=6)
    assert rate(0, 1) == rate(0, 2) == rate(0, 3) == 0.8  # not a thousandth of it
    rates = [pd.learning_rate(step, 10, 10, "cosine") for step in range(100)]
    np.testing.assert_allclose(np.diff(rates[:20]), 1 / 21)  # linear, not from zero
    right = [0.5 * (1 + math.cos(math.pi * step / 80)) for step in range(80)]
    np.testing.assert_allclose(rates[20:], right, rtol=1e-12)


@pytest.mark.parametrize("n, r, p, e", [(128, 2, 0.6, 2), (10, 1, 0.0, 3), (8, 3, 1.0, 2),
                                        (5, 2, 0.5, 2)])
def test_mimo_rows(n, r, p, e):
    def draw(seed):
        return pd.mimo_rows(n, e, torch.Generator().manual_seed(seed), r, p)

    rows = draw(0)
    own = int(n * r * (1 - p))
    assert rows.shape == (n * r, e) and torch.equal(draw(3), draw(3))
    for column in rows.T:
        assert torch.equal(column.sort().values, torch.arange(n).repeat_interleave(r))
    assert (rows[own:] == rows[own:, :1]).all()
    if (n, p) == (128, 0.6):  # published: 256 rows, 102 shuffled, 154 shared
        assert own == 102 and (rows[:102, 0] == rows[:102, 1]).sum() < 10


def test_mimo_pairs_images_with_their_labels_and_repeats_a_single_image():
    labels = torch.arange(8)
    images = labels[:, None, None, None].expand(8, 3, 2, 2).float()
    rows = pd.mimo_rows(8, 2, torch.Generator().manual_seed(1), shared=0.3)
    x, y = pd.mimo_batch(data.Batch(images, labels, labels, 8), rows)
    assert y.shape == (16, 2) and not torch.equal(y[:, 0], y[:, 1])
    assert torch.equal(x, y[:, :, None, None, None].expand(16, 2, 3, 2, 2).float())
    mimo = pd.MIMO(torch.nn.Flatten(), 2)
    assert torch.equal(mimo(images), torch.stack([images.flatten(1)] * 2, 1))
    assert torch.equal(mimo(x), x.flatten(2))


# ---- Model, files -------------------------------------------------------------------------------


def network(model="resnet50", classes=1000, size=224, channels=3, width=1.0):
    args = Namespace(model=model, width=width, device=torch.empty(0).device)
    return pd.make_network(args, classes, (channels, size, size))


def mimo_network(model, classes, size, subnetworks, channels=3, width=1.0):
    args = Namespace(model=model, width=width, device=torch.empty(0).device)
    return pd.make_mimo(args, classes, (channels, size, size), subnetworks)


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_parameters_and_residual_branches():
    with torch.device("meta"):
        one = network()
        assert count(one) == 25_557_032 and count(network("resnet18")) == 11_689_512
        assert count(mimo_network("resnet50", 1000, 224, 2)) == 27_615_440
    groups = pd.make_optimiser(one, Namespace(opt="sgd", weight_decay=1e-4)).param_groups
    sizes = {}
    for group in groups:
        numbers = [p.numel() for p in group["params"]]
        sizes[group["weight_decay"]] = (len(numbers), sum(numbers))
        assert group["momentum"] == 0.9 and group["nesterov"]
    assert sizes == {1e-4: (65, 25_511_720), 0.0: (96, 45_312)}
    net = network("resnet18", 5, 32)
    blocks = [module for module in net.modules() if isinstance(module, pd.BasicBlock)]
    assert len(blocks) == 8 and all((block.bn2.weight == 0).all() for block in blocks)
    weight = net.layer2[0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.05)


@pytest.mark.parametrize("model, size", [("convnet", 16), ("resnet50", 96)])
def test_output_shapes_and_a_head_in_float32(model, size):
    x = torch.randn(2, 1, size, size)
    net = network(model, 7, size, 1, 0.25).eval()
    mimo = mimo_network(model, 7, size, 3, 1, 0.25).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert net(x).shape == (2, 7) and net(x).dtype == torch.float32
        assert mimo(x).shape == (2, 3, 7) and mimo(x).dtype == torch.float32
    plain = mimo(x)
    with torch.no_grad():  # subnetwork e has the e-th block of K outputs
        mimo.net.fc.weight[7:14] = 0
        mimo.net.fc.bias[7:14] = 5
    changed = mimo(x)
    assert (changed[:, 1] == 5).all() and torch.allclose(changed[:, 0], plain[:, 0])


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
    args = Namespace(model=model, width=width, device=torch.device("cpu"))
    like = Namespace(num_classes=classes, shape=(channels, size, size))
    return pd.read_network(path, kind, like, args)


@pytest.mark.parametrize("style", ["1.4", "1.5"])
def test_lightnings_files_load_and_predict_what_torchvisions_networks_do(tmp_path, style):
    theirs = torchvision.models.resnet50(num_classes=20).eval()
    for name, value in theirs.state_dict().items():
        if ("bn" in name or "downsample.1" in name) and value.is_floating_point():
            value.uniform_(0.5, 1.5)
    path = tmp_path / "student.ckpt"
    save_as_lightning(path, theirs, style, loss_type="rkl_proxy", model_offset=0.5)
    resnet = dict(model="resnet50", classes=20, size=96, channels=3, width=1.0)
    ours, kind = read(path, "student", **resnet)
    assert kind == "student_rkl_proxy"
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        right = theirs(x)
        logits = ours(x)
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-4 * right.abs().max())
    torch.save(dict(reversed(theirs.state_dict().items())), path)  # torchvision's own, any order
    ours, kind = read(path, **resnet)
    assert kind is None and torch.equal(ours.conv1.weight, theirs.conv1.weight)


class Hostile:
    """What a pickle could run."""

    def __reduce__(self):
        return os.mkdir, (Hostile.folder,)


def test_other_files_are_refused_in_one_line_and_run_nothing(tmp_path):
    path = tmp_path / "member.pt"
    net = network("convnet", 5, 16, 1, 0.1)
    state = net.state_dict()
    Hostile.folder = str(tmp_path / "ran")
    save_as_lightning(path, net, "1.4", more=Hostile())
    hostile = path.read_bytes()
    without = {k: v for k, v in state.items() if k != "fc.bias"}
    for content, match in (
            (hostile, "plain tensors"), (b"not a checkpoint", "plain tensors"),
            ({"state_dict": state, "hyper_parameters": Hostile()}, "plain tensors"),
            (network("convnet", 6, 16, 1, 0.1).state_dict(), "not fit.*mismatch for fc.weight"),
            (without, "Missing key.*fc.bias"),
            ({**state, "fc.scale": torch.ones(1)}, "Unexpected key.*fc.scale"),
            ({"state_dict": torch.ones(2)}, "does not fit")):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(UserError, match=f"{path}.*{match}") as error:
            read(path)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()
    save_as_lightning(path, net, "1.5")
    with pytest.raises(Exception):  # outside of read_network, Lightning's names are unknown again
        torch.load(path, weights_only=True)


# ---- Evaluation ---------------------------------------------------------------------------------


def test_metrics_are_scikit_learns_and_torchmetrics():
    z = 2 * torch.randn(500, 12).double()
    labels = torch.distributions.Categorical(logits=0.6 * z).sample()  # a colder truth
    p = softmax(z.numpy(), -1)
    out = pd.student_outputs(z)
    own = pd.columns_of(out.log_probs, out, labels)
    values = pd.prediction_metrics(own)
    y = labels.numpy()
    classes = np.arange(12)
    assert values["accuracy"] == (p.argmax(1) == y).mean()
    assert values["top5_accuracy"] == top_k_accuracy_score(y, p, k=5, labels=classes)
    assert values["nll"] == pytest.approx(log_loss(y, p, labels=classes), rel=1e-9)
    assert values["brier"] == pytest.approx(((p - np.eye(12)[y]) ** 2).sum(1).mean(), rel=1e-9)
    right = multiclass_calibration_error(torch.tensor(p), labels, 12, 15, "l1").item()
    assert values["ece15"] == pytest.approx(right, abs=1e-6)
    wrong = p.argmax(1) != y
    for name in pd.MEASURES:
        right = 2 * roc_auc_score(wrong, own[name]) - 1
        assert values[f"prr_{name}"] == pytest.approx(right)
    out = pd.softmax_outputs(1e4 * torch.eye(6).double())
    values = pd.prediction_metrics(pd.columns_of(out.log_probs, out, torch.arange(6)))
    # Without errors there is no rejection ratio.
    assert values["ece15"] == 0 and values["accuracy"] == 1 and values["prr_total"] is None


def saved(logits, labels, classes=None):
    """What `score` finds for a set with these logits."""
    outputs = pd.all_outputs(logits)
    some = outputs
    if classes is not None:
        some = pd.all_outputs({name: z[..., classes] for name, z in logits.items()})
    return {row: pd.columns_of(some[row].log_probs, outputs[row], labels) for row in outputs}


def test_rows_compare_the_sets_that_they_name():
    """On the test set, against an OOD set, against it within the two classes that it has."""
    def draw(n, scale):
        return {"student_rkl_proxy": scale * torch.randn(n, 5),
                "members": scale * torch.randn(n, 3, 5)}

    test = Namespace(name="test", labels=torch.arange(60) % 5, classes=tuple("abcde"))
    odd = Namespace(name="odd", labels=torch.arange(40) % 2, classes=("b", "d"))
    classes = pd.known_classes(odd, test)
    assert classes.tolist() == [1, 3]
    inside = draw(60, 3.0)
    outside = draw(40, 1.0)
    columns = saved(inside, test.labels)
    rows = pd.test_rows("test", columns, {"single": 0.1})
    rows += pd.ood_rows(odd, saved(outside, odd.labels, classes), classes, test, columns)
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    own = pd.student_outputs(inside["student_rkl_proxy"])
    other = pd.student_outputs(outside["student_rkl_proxy"])
    within = torch.isin(test.labels, classes)
    for kept, name in ((within | True, "test"), (within, "test, its classes")):
        row = by["student_rkl_proxy", name, "odd"]
        assert row["n"] == kept.sum() and "auroc_epistemic" not in by["single", name, "odd"]
        for measure in pd.MEASURES:
            a = own.measures[measure][kept]
            b = other.measures[measure]
            right = roc_auc_score([0] * len(a) + [1] * 40, torch.cat([a, b]))
            assert row[f"auroc_{measure}"] == pytest.approx(right)
            limit = min(t for t in a if (a <= t).double().mean() >= 0.95)
            assert row[f"fpr95_{measure}"] == pytest.approx((b <= limit).double().mean().item())
        assert row["auroc_precision"] == pytest.approx(row["auroc_epkl"])
        z = torch.cat([inside["members"][kept, 0], outside["members"][:, 0]])
        right = roc_auc_score([0] * kept.sum() + [1] * 40, -z.logsumexp(1))
        assert by["single", name, "odd"]["auroc_precision"] == pytest.approx(right)
    ensemble = pd.ensemble_outputs(pd.ensemble_statistics(inside["members"].unbind(1)))
    student = by["student_rkl_proxy", "test", None]
    for name in pd.MEASURES[1:]:
        right = stats.spearmanr(own.measures[name], ensemble.measures[name]).statistic
        assert student[f"spearman_{name}"] == pytest.approx(right)
    right = stats.spearmanr(own.log_precision, ensemble.log_precision).statistic
    assert student["spearman_precision"] == pytest.approx(right)
    few = outside["student_rkl_proxy"][:, classes]  # the labels number these classes
    right = (few.argmax(1) == odd.labels).double().mean().item()
    assert by["student_rkl_proxy", "odd", None]["accuracy"] == pytest.approx(right)
    odd.name = "imagenet_o"  # its labels mean nothing
    rows = pd.ood_rows(odd, saved(outside, odd.labels), classes, test, columns)
    assert all(row["set"] != "imagenet_o" for row in rows)
    odd.classes = ("b", "unknown")
    assert pd.known_classes(odd, test) is None


def test_a_subset_of_classes_is_that_of_its_logits():
    """Of an ensemble: of each member's, before its softmax; uncertainties are of all classes."""
    classes = torch.tensor([2, 3, 7, 11, 12, 20, 29])
    logits = {"members": torch.randn(40, 3, 30), "mimo": torch.randn(40, 2, 30),
              "student_rkl_proxy": torch.randn(40, 30), "student_forward_kl": torch.randn(40, 30)}
    own = saved(logits, torch.arange(40) % 7, classes)
    whole = pd.all_outputs(logits)
    few = {name: z[..., classes].double().softmax(-1) for name, z in logits.items()}
    right = {"single": few["members"][:, 0], "mimo": few["mimo"].mean(1),
             "ensemble": few["members"].mean(1), "ensemble_proxy": few["members"].mean(1),
             "student_rkl_proxy": few["student_rkl_proxy"],
             "student_forward_kl": few["student_forward_kl"]}
    assert own.keys() == right.keys()
    for name, p in right.items():
        np.testing.assert_allclose(own[name]["max_prob"], p.amax(1), rtol=1e-9, err_msg=name)
        for measure, value in whole[name].measures.items():
            assert torch.equal(own[name][measure], value)
    assert set(pd.all_outputs({"members": logits["members"][:, :1]})) == {"single"}


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A --data-dir like ImageNet's, and the same as the user's own images: 3 classes, 37 training
    and 11 test images; A, O and R with a part of the classes; of C fog, snow without severity 3,
    and a folder that is no corruption."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    counts = {"imagenet/train": (13, 12, 12), "imagenet/val": (4, 4, 3), "imagenet-a": (0, 3, 0),
              "imagenet-r": (3, 3, 0), "imagenet-o": (0, 0, 9), "own/train": (13, 12, 12),
              "own/test": (4, 4, 3)}
    for kind, severity in itertools.product(("fog", "snow"), range(1, 6)):
        if (kind, severity) != ("snow", 3):
            counts[f"imagenet-c/{kind}/{severity}"] = (1, 1, 1)
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


def weights(path):
    return torch.load(path, weights_only=True)["net"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(rows):
    return [{k: v for k, v in row.items() if k != "ms_per_example"} for row in rows]


def same_rows(a, b, **close):
    """Whether the rows agree, numbers as pytest.approx has it."""
    for x, y in zip(timeless(a), timeless(b), strict=True):
        if x.keys() != y.keys():
            return False
        for key, value in y.items():
            if x[key] != value and x[key] != pytest.approx(value, **close):
                return False
    return True


def test_the_whole_study_and_its_evaluation(small, images, tmp_path, capsys, monkeypatch):
    some = dict(itertools.islice(data.CORRUPTIONS.items(), 2))
    monkeypatch.setattr(data, "CORRUPTIONS", some)
    options = small(f"run --losses {' '.join(pd.LOSSES)} --shift computed --shift-examples 4 "
                    f"{MIMO} --predict folder:{images}/own/test --plot")
    rows = pd.main(options)
    root = tmp_path / "proxy_distill/run"
    said, table = capsys.readouterr().out.split("\n\n", 1)
    # Of students, which see no labels, the log tells the agreement with the ensemble.
    for line in said.splitlines():
        if line.startswith(("member", "mimo")):
            assert " accuracy " in line and "agreement" not in line
        if line.startswith("student"):
            assert " agreement " in line and "accuracy" not in line
    assert "member-seed2 2/2" in said and "student_proxy-of2-seed1 2/2" in said
    table = table.split("\n\nresults")[0]
    assert max(map(len, table.splitlines())) <= 120
    with Image.open(root / "rejection.png") as image:
        assert image.width > 500 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 10
    assert json.loads((root / "results.json").read_text())["rows"] == rows
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    for method in pd.ROWS.values():
        plain = by[method, "own", None]
        against = by[method, "own", "imagenet-o"]
        soft = method in ("single network", "EnD (forward KL)")  # a softmax has no epistemic one
        assert ("auroc_epistemic" in against) == ("prr_epistemic" in plain) == (not soft)
        assert {"accuracy", "nll", "brier", "ece15", "prr_total"} <= plain.keys()
        assert {"auroc_total", "fpr95_one_minus_max"} <= against.keys() and plain["n"] == 11
        parts = [by[method, f"own_computed {kind} 5", None] for kind in some]
        mean = by[method, "own_computed mean of 2 kinds 5", None]
        assert mean["nll"] == pytest.approx((parts[0]["nll"] + parts[1]["nll"]) / 2)
        assert parts[0]["n"] == 4
    assert by["ensemble", "own", None]["nll"] == by["its proxy", "own", None]["nll"]
    files = sorted(path.name for path in root.glob("*.pt"))
    assert files == ["member-seed1.pt", "member-seed2.pt", "mimo2-seed1.pt",
                     *[f"student_{loss}-of2-seed1.pt" for loss in sorted(pd.LOSSES)]]
    kept = {name: (root / name).read_bytes() for name in files}
    odd = f"folder:{images}/imagenet-o/n02"  # files in no folder of a class: no labels
    for more in (["--eval", "--batch-size", "7", "--augment", "--predict", odd], []):
        again = pd.main(options + more)
        assert same_rows(again, rows, rel=1e-3, abs=1e-4)
    assert kept == {name: (root / name).read_bytes() for name in files}
    # The predictions are those of the last student.
    lines = list(csv.DictReader((root / "predictions.csv").open()))
    right = by["proxy, reverse KL", "own", None]["accuracy"]
    columns = {"file", "label", "predicted", "confidence", "total", "aleatoric", "epistemic"}
    assert len(lines) == 11 and columns | {"epkl"} <= lines[0].keys()
    assert np.mean([line["label"] == line["predicted"] for line in lines]) == pytest.approx(right)
    assert float(lines[0]["epistemic"]) > 0 and float(lines[0]["confidence"]) > 1 / 3
    for line in lines:
        assert float(line["one_minus_max"]) == pytest.approx(1 - float(line["confidence"]))


def test_killed_again_and_again_equals_uninterrupted(small, tmp_path, monkeypatch):
    more = f"{MIMO} --member-epochs 3"
    pd.main(small(f"calm {more}"))
    steps = common.Run.steps
    calls = itertools.count(1)

    def killed(self, loader, epoch):
        for found in steps(self, loader, epoch):
            if next(calls) % 6 == 0:  # in all epochs of all kinds of networks
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(common.Run, "steps", killed)
    kills = 0
    while kills < 20:
        try:
            pd.main(small(f"run {more}"))
            break
        except KeyboardInterrupt:
            kills += 1
    assert 4 < kills < 20
    root = tmp_path / "proxy_distill"
    for name in ("member-seed1", "member-seed2", "mimo2-seed1", "student_rkl_proxy-of2-seed1"):
        assert_same_checkpoints(root / f"run/{name}.pt", root / f"calm/{name}.pt")


run_proxy_distill_in_float64 = partial(run_in_float64, "proxy_distill")


def test_two_processes_that_share_no_disk_equal_one(small, tmp_path):
    """All of it: members, the cache of the teachers, students, MIMO's shuffled rows, evaluation;
    the second has nothing of the last batch, of one image."""
    more = f"--batch-size 18 --lr .1 {MIMO} --losses rkl_proxy forward_kl"
    start_ranks(tmp_path, 1, run_proxy_distill_in_float64, *small(f"one {more}"))[0].value()

    def elsewhere(rank):
        return ["--out-dir", f"{tmp_path}/elsewhere"] if rank else []

    for child in start_ranks(tmp_path, 2, run_proxy_distill_in_float64, *small(f"two {more}"),
                             each=elsewhere):
        child.value()
    root = tmp_path / "proxy_distill"
    for name in ("member-seed1", "member-seed2", "mimo2-seed1", "student_rkl_proxy-of2-seed1",
                 "student_forward_kl-of2-seed1"):
        two = weights(root / f"two/{name}.pt")
        one = weights(root / f"one/{name}.pt")
        assert all(value.dtype in (torch.float64, torch.int64) for value in one.values())
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10)
    found = [json.loads((root / name / "results.json").read_text()) for name in ("one", "two")]
    assert same_rows(found[1]["rows"], found[0]["rows"], rel=1e-8, abs=1e-8)
    assert found[1]["environment"]["processes"] == 2 and not list(tmp_path.glob("elsewhere/**/*"))


def loaded_for_mimo(*argv):
    """The number of images that this process loaded for each batch of MIMO."""
    found = []
    real = pd.mimo_batch

    def recorded(batch, rows):
        images, labels = real(batch, rows)
        found.append((len(batch.images), batch.global_size, len(images), rows.numel()))
        return images, labels

    pd.mimo_batch = recorded
    sys.argv = ["proxy_distill.py", *argv]
    common.launch(pd.main)
    return found


def test_each_process_loads_its_share_of_the_images_of_mimo(small, ranks):
    options = given(small(f"run {MIMO}"), "--losses", "--members", 1, without=["--epochs"])
    found = ranks(loaded_for_mimo, *options)
    for own in found:
        # Half of the 8 images, and half of their 16 rows of two subnetworks.
        assert own[:4] == [(4, 8, 8, 32)] * 4 and len(own) == 10
    # The last of five batches has 5 images.
    assert [own[4] for own in found] == [(3, 5, 5, 20), (2, 5, 5, 20)]


def test_all_sets_are_noisy(small, images):
    more = f"run --predict folder:{images}/own/test --noise"
    clean = pd.load_sets(pd.parse_args(small(f"{more} 0")))
    noisy = pd.load_sets(pd.parse_args(small(f"{more} 2")))
    pairs = [(clean.train, noisy.train), (clean.test, noisy.test), (clean.predict, noisy.predict),
             (clean.ood["imagenet-o"], noisy.ood["imagenet-o"])]
    for a, b in pairs:
        assert a.name == b.name and (a.images != b.images).float().mean() > 0.5
    assert clean.val is None and len(clean.train) == 37


def test_training_is_plain_sgd_on_augmented_images(small, tmp_path):
    options = given(small(), "--members", 1, "--losses", "--member-epochs", 3, "--augment",
                    "--weight-decay", 0.05, "--limit-train", 30, without=["--epochs"])
    pd.main(options)
    common.seed_all(1, 0)
    net = network("convnet", 3, 32, width=0.1)
    train = pd.load_sets(pd.parse_args(options)).train
    optimiser = torch.optim.SGD(net.parameters(), 1, 0.9, weight_decay=0.05, nesterov=True)
    loader = data.Loader(train, 16, seed=1, shuffle=True, augment="crop_flip", channels_last=True)
    losses = []
    for step, batch in enumerate(itertools.chain.from_iterable(map(loader.epoch, range(3)))):
        optimiser.param_groups[0]["lr"] = pd.learning_rate(step, 2, 3, "cosine") / 32
        optimiser.zero_grad()
        loss = cross_entropy(net(batch.images), batch.labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item() * len(batch.labels) / 30)
    log = (tmp_path / "proxy_distill/run/member-seed1.jsonl").read_text()
    logged = [json.loads(line)["loss"] for line in log.splitlines()]
    assert logged == pytest.approx([a + b for a, b in zip(losses[::2], losses[1::2])])
    torch.testing.assert_close(weights(tmp_path / "proxy_distill/run/member-seed1.pt"),
                               dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_cached_teachers_are_the_members(small, monkeypatch):
    """With and without the cache, and whatever the batches that filled it."""
    cached = pd.main(small("cached"))
    monkeypatch.setattr(pd, "CACHE_BYTES", 0)
    online = pd.main(small("online"))
    assert same_rows(cached, online, rel=1e-4, abs=1e-5)
    args = pd.parse_args(small("run --augment"))
    assert pd.make_teachers([], pd.load_sets(args).train, args).cached is None


def test_teachers_are_left_alone_and_what_diverged_is_refused(small, tmp_path):
    """No gradient and no batch statistics reach the members; a student belongs to its ensemble."""
    pd.main(small("run --members 2 --augment"))
    root = tmp_path / "proxy_distill/run"
    member = root / "member-seed1.pt"
    before = member.read_bytes()
    pd.main(small("run --members 2 --augment --losses rkl_proxy proxy"))
    assert member.read_bytes() == before
    students = [root / f"student_{loss}-of2-seed1.pt" for loss in ("rkl_proxy", "proxy")]
    state = torch.load(member, weights_only=True)
    state["net"]["fc.weight"] *= 2
    torch.save(state, member)  # other teachers: their student is trained again
    kept = students[0].read_bytes()
    pd.main(small("run --members 2 --augment"))
    assert students[0].read_bytes() != kept
    state["net"]["fc.weight"] *= math.inf
    torch.save(state, member)
    with pytest.raises(UserError, match="single network.*not finite"):
        pd.main(given(small("run --augment --eval"), "--losses", without=["--losses"]))


def test_members_of_several_commands_are_the_members_of_one(small, tmp_path):
    """Trained one by one, with seeds from 0, and given as files: the same study."""
    whole = pd.main(small("whole --seed 0 --members 3"))
    for seed in (0, 1, 2):
        pd.main(given(small(f"m{seed} --seed {seed}"), "--members", 1, "--losses",
                      without=["--epochs"]))
    paths = [str(tmp_path / f"proxy_distill/m{seed}/member-seed{seed}.pt") for seed in (2, 0, 1)]
    again = pd.main(given(small("again --seed 0"), "--ensemble-paths", *paths))
    assert timeless(again) == timeless(whole)
    root = tmp_path / "proxy_distill"
    assert equal(weights(root / "again/student_rkl_proxy-of3-seed0.pt"),
                 weights(root / "whole/student_rkl_proxy-of3-seed0.pt"))


def test_a_single_member_predicts(small, images, tmp_path):
    """Where no ensemble and no student was asked for, --predict is by the network itself."""
    options = given(small(f"run --predict folder:{images}/own/test"), "--members", 1, "--losses",
                    without=["--members", "--epochs", "--losses"])
    rows = pd.main(options)
    assert {row["method"] for row in rows} == {"single network"}
    lines = list(csv.DictReader((tmp_path / "proxy_distill/run/predictions.csv").open()))
    assert len(lines) == 11 and {float(line["epistemic"]) for line in lines} == {0}


def test_the_forward_kl_overflows_at_targets_of_concentration_0():
    """Members of 1000 classes that are certain of different ones: why --target-offset 0 is refused,
    which the reverse KL allows."""
    ensemble = pd.ensemble_statistics(40 * torch.randn(3, 4, 1000))
    z = torch.zeros(4, 1000)
    rows, grad = gradient("proxy", z, ensemble, 1, 0)
    assert rows.min() > 1e30 and not grad.isfinite().all()
    for loss, t in (("proxy", 1), ("rkl_proxy", 0)):
        rows, grad = gradient(loss, z, ensemble, 1, t)
        assert rows.isfinite().all() and grad.isfinite().all()


def test_a_student_of_unknown_loss_is_named(small, tmp_path, capsys):
    """The state dict alone does not tell the loss; our files do."""
    pd.main(small())
    student = tmp_path / "proxy_distill/run/student_rkl_proxy-of2-seed1.pt"
    bare = tmp_path / "bare.pt"
    torch.save(weights(student), bare)
    capsys.readouterr()
    for path, said in ((student, False), (bare, True)):
        files = given(small(f"{path.stem} --eval"), "--student-path", path,
                      without=["--losses", "--members", "--member-epochs"])
        rows = pd.main(files)
        assert {row["method"] for row in rows} == {"proxy, reverse KL"}
        assert (f"{path} does not name its loss" in capsys.readouterr().out) == said


def test_files_say_what_they_are(small, tmp_path):
    """A member is no student, and a student no member; Lightning's files may tell it, too."""
    pd.main(small(f"run {MIMO} --model-offset 0.5"))
    root = tmp_path / "proxy_distill"
    member = root / "run/member-seed1.pt"
    student = root / "run/student_rkl_proxy-of2-seed1.pt"
    mimo = root / "run/mimo2-seed1.pt"
    lightning = tmp_path / "student.ckpt"
    net = network("convnet", 3, 32, width=0.1)
    net.load_state_dict(weights(student))
    save_as_lightning(lightning, net, "1.5", loss_type="proxy", model_offset=0.5)
    before = snapshot(root)
    files = given(small("files --eval"), without=["--losses", "--members", "--member-epochs"])
    for argv, said in (
            (["--student-path", member], "member, not a student; give it with --ensemble-paths"),
            (["--mimo-path", student], "is a student, not a mimo; give it with --student-path"),
            (["--student-path", mimo], "is a mimo, not a student; give it with --mimo-path"),
            (["--ensemble-paths", member, student, "--losses"], "is a student, not a member"),
            (["--ensemble-paths", member, lightning, "--losses"], "is a student, not a member")):
        argv = given(files, *argv, without=["--epochs"] if "--losses" in argv else [])
        with pytest.raises(UserError, match=re.escape(said)):
            pd.main(argv)
    assert snapshot(root) == before
    # The file of a student says which loss it has.
    rows = pd.main(given(files, "--student-path", lightning))
    assert {row["method"] for row in rows} == {"proxy, forward KL"}
    again = pd.main(given(files, "--name", "again", "--student-path", student))
    assert {row["method"] for row in again} == {"proxy, reverse KL"}
    for a, b in zip(rows, again):
        assert timeless([{**a, "method": ""}]) == timeless([{**b, "method": ""}])


def test_published_files_are_evaluated_and_teach(small, tmp_path):
    """Lightning's files of the same weights: the same rows, the same student."""
    rows = pd.main(small(f"run {MIMO} --model-offset 0.5"))
    root = tmp_path / "proxy_distill"
    for what in ("member-seed1", "member-seed2", "student_rkl_proxy-of2-seed1", "mimo2-seed1"):
        net = network("convnet", 3, 32, width=0.1)
        if what.startswith("mimo"):
            net = mimo_network("convnet", 3, 32, 2, width=0.1).net
        state = weights(root / f"run/{what}.pt")
        net.load_state_dict({key.removeprefix("net."): value for key, value in state.items()})
        options = dict(loss_type="rkl_proxy", model_offset=0.5) if "student" in what else {}
        save_as_lightning(tmp_path / what, net, "1.5", **options)
    paths = [f"{tmp_path}/member-seed2", f"{tmp_path}/member-seed1"]
    files = given(small("files --eval"), without=["--losses", "--members", "--member-epochs"])
    again = pd.main(given(files, "--ensemble-paths", *paths, "--mimo-path",
                          tmp_path / "mimo2-seed1", "--student-path",
                          tmp_path / "student_rkl_proxy-of2-seed1"))

    def key(row):
        return row["method"], row.get("against") or ""

    assert timeless(sorted(again, key=key)) == timeless(sorted(rows, key=key))
    pd.main(given(small("taught --model-offset 0.5"), "--ensemble-paths", *paths))
    assert equal(weights(root / "taught/student_rkl_proxy-of2-seed1.pt"),
                 weights(root / "run/student_rkl_proxy-of2-seed1.pt"))


def without_name(argv):
    return given(argv, without=["--name"])


def test_other_files_have_a_run_directory_of_their_own(small, tmp_path):
    """They never replace the results of a finished run; their order makes no difference."""
    run = without_name(small())
    rows = pd.main(run)
    root = tmp_path / "proxy_distill"
    first = root / "own-convnet-w0.1-seed1"
    paths = [f"{first}/member-seed{seed}.pt" for seed in (1, 2)]
    pd.main(given(without_name(small()), "--ensemble-paths", *paths))
    taught, = set(root.iterdir()) - {first}
    assert re.fullmatch(r"own-convnet-w0.1-of_[0-9a-f]{8}-seed1", taught.name)
    before = snapshot(root)
    # The same command with --eval is the same table, in any order of the files.
    for order in (paths, paths[::-1]):
        again = pd.main(given(without_name(small("run --eval")), "--ensemble-paths", *order))
        assert timeless(again) == timeless(rows)
    kept = snapshot(root)
    for name in before:
        if not name.endswith(("results.json", "results.csv")):
            assert kept[name] == before[name]
    # Evaluated alone, whatever the options of training are, they have another directory.
    alone = given(small("run --eval"), "--opt", "adam", "--lr", 7, "--ensemble-paths", *paths[::-1],
                  without=["--name", "--members", "--member-epochs", "--losses", "--epochs"])
    found = pd.main([*alone, "--losses"])
    assert {row["method"] for row in found} == {"single network", "ensemble", "its proxy"}
    student = str(first / "student_rkl_proxy-of2-seed1.pt")
    assert len(pd.main([*alone, "--student-path", student])) > len(found)
    assert len(list(root.iterdir())) == 4
    now = snapshot(root)
    assert all(now[name] == content for name, content in kept.items())
    with pytest.raises(UserError, match="made with other options: --lr 0.5"):
        pd.main([*run, "--lr", "7"])


def test_a_study_grows_in_its_directory(small, tmp_path):
    """Other losses, more members, MIMO: what is there already stays."""
    pd.main(small("run --losses forward_kl"))
    root = tmp_path / "proxy_distill/run"
    before = {path.name: path.read_bytes() for path in root.glob("*.pt")}
    assert len(before) == 3
    pd.main(small(f"run --losses rkl_proxy --members 3 {MIMO}"))
    for name, content in before.items():
        assert (root / name).read_bytes() == content
    assert {path.name for path in root.glob("*.pt")} - set(before) == {
        "member-seed3.pt", "student_rkl_proxy-of3-seed1.pt", "mimo2-seed1.pt"}


def test_own_networks_are_one_entry(small, tmp_path, monkeypatch):
    def mine(args, shape):
        width = round(10 * args.width)
        return [torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
                torch.nn.Linear(4 * shape[0], width), torch.nn.Dropout(0.2)], width

    monkeypatch.setitem(pd.NETWORKS, "mine", mine)
    monkeypatch.setattr(sys, "argv", ["own.py", *small(f"run {MIMO} --width 1 --model mine")])
    common.launch(pd.main)
    state = weights(tmp_path / "proxy_distill/run/student_rkl_proxy-of2-seed1.pt")
    assert state["2.weight"].shape == (10, 12) and state["fc.weight"].shape == (3, 10)


@pytest.mark.parametrize("more, seeds", [
    ("--losses rkl_proxy --model-offset 0 --target-offset 0 --lr 1e-3", {1}),
    ("--losses forward_kl dirichlet_likelihood --model resnet18 --width 0.05 --amp bf16 --augment "
     "--opt adam --lr .01 --schedule step --runs 2", {1, 3})])  # members of its own in each run
def test_options(small, more, seeds):
    rows = pd.main(small(f"run --member-epochs 1 --epochs 1 {more}"))
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
    assert {row["seed"] for row in rows} == seeds


def test_batches_are_as_small_and_as_large_as_asked_for(small, images, monkeypatch):
    sizes = []
    real = data.Loader.__init__

    def recorded(self, dataset, batch_size, *args, **options):
        sizes.append(batch_size)
        real(self, dataset, batch_size, *args, **options)

    monkeypatch.setattr(data.Loader, "__init__", recorded)
    more = f"{MIMO} --predict folder:{images}/own/test --batch-size"
    pd.main(small(f"few {more} 3"))
    assert set(sizes) == {3, 1}  # MIMO's batches have half the images, each twice
    sizes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_at_once = pd.main(small(f"all {more} 1000000000"))
    assert set(sizes) == {37, 18}
    # The learning rate is that of a batch of all 37 images.
    assert timeless(all_at_once) == timeless(pd.main(small(f"whole {more} 37")))


def test_constants_have_no_rank_correlation():
    columns = {name: torch.ones(5).double() for name in pd.MEASURES + ("precision",)}
    other = {name: torch.arange(5).double() for name in columns}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pd.rank_correlations(columns, other) == {}
    assert len(pd.rank_correlations(other, other)) == len(columns) - 1


def test_streamed_folders(images, tmp_path):
    options = (f"--dataset imagenet --data-dir {images} --out-dir {tmp_path} --name run --model "
               "convnet --width .05 --members 2 --member-epochs 1 --epochs 1 --batch-size 19 "
               "--lr .1 --workers 0 --losses rkl_proxy --device cpu --no-plot").split()
    rows = pd.main([*options, "--shift-examples", "2"])
    by = {(row["method"], row["set"], row.get("against")): row for row in rows}
    for method in ("single network", "its proxy", "proxy, reverse KL"):
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
    plain = [row for row in rows if "_c" not in row["set"]]
    assert same_rows(pd.main([*options, "--eval", "--shift", "none"]), plain)
    broken = images / "imagenet/val/n02/9.png"
    broken.write_bytes(b"not an image")
    try:
        with pytest.raises(UserError, match=str(broken)):
            pd.main([*options, "--eval", "--shift", "none"])
    finally:
        broken.unlink()
    for more, said in (("--shift computed", "in memory"), ("--noise 2", "not in memory")):
        with pytest.raises(UserError, match=said):  # before anything is trained
            pd.main([*options, "--name", "refused", *more.split()])
    assert not list(tmp_path.glob("proxy_distill/refused*"))


@pytest.mark.parametrize("argv, said", [
    ("--members 1", "add --losses"), ("--ood none", "none"), ("--method base", "--method"),
    ("--loss proxy", "--loss"), ("--losses rkl", "rkl"), ("--eval", "without --eval"),
    ("--ensemble-paths no.pt no.pt", "--members has no effect with --ensemble-paths"),
    ("--student-path {file}", "add --eval"), ("--eval --student-path {file}", "--members has no"),
    ("--mimo 1", "at least 2"),
    ("--mimo 3 --batch-size 2", "--batch-size 2 for 37 training images: --mimo 3"),
    ("--mimo 4 --limit-train 2", "--batch-size 2 for 2 training images: --mimo 4 needs at least 4"),
    ("--losses proxy rkl_proxy --target-offset 0", "--target-offset 0"),
    ("--mimo-epochs 3", "without --mimo"), ("--shift published", "--shift"),
    ("--shift-examples 3", "without --shift"), ("--model nothing", "convnet, resnet18, resnet50"),
    ("--image-size 7", "8 x 8 pixels"),
    ("--image-size 8 --batch-size 36 --model resnet18", "--batch-size")])
def test_misuse_is_one_line(small, tmp_path, argv, said):
    file = tmp_path / "file"
    file.write_text("no network")
    with pytest.raises(UserError, match=re.escape(said)) as error:
        pd.main(small("run " + argv.format(file=file)))
    assert "\n" not in str(error.value) and not (tmp_path / "proxy_distill").exists()


@pytest.mark.parametrize("offset", ["--model-offset", "--target-offset"])
def test_offsets_are_of_students(small, offset):
    options = given(small(), "--losses", offset, 0.5, without=["--losses", "--epochs"])
    with pytest.raises(UserError, match=f"{offset} has no effect without --losses"):
        pd.main(options)


@pytest.mark.parametrize("argv, said", [
    ("--ensemble-paths no.pt no2.pt", "no.pt cannot be read"),
    ("--ensemble-paths {file} {file} --runs 2", "--runs"),
    ("--ensemble-paths {file}", "at least 2"),
    ("--ensemble-paths {file} {file}", "plain tensors"),
    ("--eval --student-path {file}", "plain tensors"),
    ("--eval --student-path {file} --losses proxy", "--losses has no effect")])
def test_misuse_of_files_is_one_line(small, tmp_path, argv, said):
    file = tmp_path / "file"
    file.write_text("no network")
    options = given(small(), *argv.format(file=file).split(),
                    without=["--members", "--member-epochs", "--losses"])
    with pytest.raises(UserError, match=re.escape(said)) as error:
        pd.main(options)
    assert "\n" not in str(error.value) and not (tmp_path / "proxy_distill").exists()


def test_presets():
    """lr .8 for a batch of 2,048, as in the published command; own images train in minutes."""
    args = pd.parse_args(["--dataset", "imagenet", "--device", "cpu"])
    assert args.lr * args.batch_size / 256 == pytest.approx(0.8)
    assert (args.member_epochs, args.epochs, args.mimo_epochs) == (120, 90, 150)
    assert (args.weight_decay, args.model_offset, args.target_offset) == (1e-4, 1, 1)
    assert args.losses == ["forward_kl", "rkl_proxy"] and args.members == 10
    own = pd.parse_args(["--dataset", "folder:anywhere", "--device", "cpu"])
    assert (own.model, own.batch_size, own.augment, own.ood) == ("convnet", 16, True, [])
    assert own.epochs == own.member_epochs == 40 and own.width < 1
    args = pd.parse_args(["--device", "cpu"])
    assert args.dataset == "numbers" and args.losses == list(pd.LOSSES)
    # The published spellings.
    args = pd.parse_args("--wd 0.1 --model_offset 0 --target_offset 0.5 --device cpu".split())
    assert (args.weight_decay, args.model_offset, args.target_offset) == (0.1, 0, 0.5)
