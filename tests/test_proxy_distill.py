"""proxy_distill.py's Method, Model, Evaluation against textbook forms, mpmath and brute force."""

import itertools
import math
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch
import torchvision
from scipy import stats
from scipy.special import log_softmax, softmax
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score, top_k_accuracy_score
from torch import nn
from torch.distributions import Dirichlet, kl_divergence
from torchmetrics.functional.classification import multiclass_calibration_error

import common
import data
import proxy_distill as pd
from common import UserError

WORLD = common.World()
ALL = [(loss, m, t) for loss in pd.LOSSES for m, t in ((1, 1), (0, 0), (1, 0))]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def members(m=5, b=6, k=7, spread=0.5):
    """Logits [M, B, K]: a shared normal and each member's own."""
    return 2 * torch.randn(b, k).double() + spread * torch.randn(m, b, k).double()


def loss_rows(loss, z, ensemble, m=1.0, t=1.0, most=math.inf, **more):
    precision = pd.proxy_precision(ensemble, most)
    if loss == "forward_kl":
        return pd.forward_kl_loss(z, ensemble)
    if loss == "dirichlet_likelihood":
        return pd.dirichlet_likelihood_loss(z, ensemble, m)
    return getattr(pd, f"{loss}_loss")(z, ensemble, precision, m, t, **more)


def gradient(loss, z, ensemble, *args, **more):
    """(rows [B], dL_i/dz_i [B, K])"""
    z = z.detach().clone().requires_grad_()
    rows = loss_rows(loss, z, ensemble, *args, **more)
    return rows.detach(), torch.autograd.grad(rows.sum(), z)[0]


def head_and_tail(k):
    """Five members with .93 to .97 on class 0, the rest uniform."""
    p = torch.tensor([0.93, 0.94, 0.95, 0.96, 0.97]).double()[:, None, None]
    return torch.cat([p, ((1 - p) / (k - 1)).expand(5, 1, k - 1)], -1).log()


def pair_loop(p):
    """(MI, EPKL, RMI) of one input from probabilities [M, K], by loops."""
    kl = lambda a, b: sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)
    entropy = lambda a: -sum(x * math.log(x) for x in a if x > 0)
    m, mean = len(p), p.mean(0)
    return (entropy(mean) - sum(map(entropy, p)) / m,
            sum(kl(a, b) for a in p for b in p) / m**2, sum(kl(mean, a) for a in p) / m)


# ---- Teachers' statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_streamed_statistics_are_the_stacked_ones(temperature, m):
    z = members(m=m, b=9, k=11)
    given = z.clone()
    ours = pd.ensemble_statistics((member for member in z), temperature)
    assert torch.equal(z, given)
    log_p = log_softmax(z.numpy() / temperature, -1)
    p = np.exp(log_p)
    pi = p.mean(0)
    right = (np.log(pi), log_p.mean(0), -(p * log_p).sum(-1).mean(0),
             (pi * (np.log(pi) - log_p)).sum(-1).mean(0))
    for a, b in zip(ours, right):
        assert a.dtype == torch.float64
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_no_gradient_reaches_the_members():
    z = members().requires_grad_()
    for given in ([*z], iter([*z])):
        assert not any(part.requires_grad for part in pd.ensemble_statistics(given))


def test_half_precision_members_are_widened_first():
    z = members(k=50).bfloat16()
    for a, b in zip(pd.ensemble_statistics(z, 3.0), pd.ensemble_statistics(z.double(), 3.0)):
        assert torch.equal(a, b)


def test_precision_inverts_the_rmi_and_has_a_cap():
    e = pd.ensemble_statistics(members(b=20))
    beta = pd.proxy_precision(e)
    np.testing.assert_allclose(beta, (7 - 1) / (2 * e.rmi), rtol=1e-5)
    near = pd.ensemble_statistics(0.02 * torch.randn(3, 4, 1000).double())
    p, total = near.log_probs.exp(), pd.proxy_precision(near)[:, None]
    assert (p * total).min() > 1000  # all concentrations large: then its proxy has the RMI again
    rmi = (p * (p.log() - (p * total).digamma() + total.digamma())).sum(-1)
    np.testing.assert_allclose(rmi, near.rmi, rtol=1e-3)
    middle = beta.median()
    assert torch.equal(pd.proxy_precision(e, middle), beta.minimum(middle))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_identical_members_have_a_finite_precision(dtype):
    z = (4 * torch.randn(50, 1000)).to(dtype)
    e = pd.ensemble_statistics([z] * 5)
    assert (e.rmi >= 0).all() and e.rmi.max() < 1e-13
    beta = pd.proxy_precision(e)
    np.testing.assert_allclose(beta, 999 * 2.0**23, rtol=1e-6)
    student = torch.randn(50, 1000).to(dtype)
    for loss, m, t in ALL:
        rows, grad = gradient(loss, student, e, m, t)
        assert rows.isfinite().all() and grad.isfinite().all() and grad.dtype == dtype, (loss, m)


@pytest.mark.parametrize("gap", [200.0, 1000.0])  # the second: probabilities of 0 in float64
def test_one_hot_members_stay_finite(gap):
    z = torch.zeros(3, 2, 40)
    z[0, :, 1] = z[1, :, 1] = z[2, 0, 2] = z[2, 1, 1] = gap
    e = pd.ensemble_statistics(z)
    assert all(part.isfinite().all() for part in e)
    # row 0: pi = (2/3, 1/3); two members have ln p = -gap for class 2, one for class 1
    pi = np.array([2 / 3, 1 / 3])
    assert e.rmi[0].item() == pytest.approx(
        (pi * np.log(pi)).sum() + gap * (2 / 3 * 1 / 3 + 1 / 3 * 2 / 3), rel=1e-9)
    assert e.rmi[1].item() == pytest.approx(0, abs=1e-12)
    for loss, m, t in ALL:
        if loss == "proxy" and not t and gap > 700:
            continue  # a target of concentrations 0 is at no finite distance
        rows, grad = gradient(loss, torch.randn(2, 40).double(), e, m, t)
        assert rows.isfinite().all() and grad.isfinite().all(), (loss, m, t)
    assert all(m.isfinite().all() for m in pd.proxy_outputs(e).measures.values())


# ---- Losses -------------------------------------------------------------------------------------


def test_forward_kl_is_the_definition():
    e, z = pd.ensemble_statistics(members()), torch.randn(6, 7).double()
    pi = e.log_probs.exp()
    rows, grad = gradient("forward_kl", z, e)
    right = [stats.entropy(p, q) for p, q in zip(pi.numpy(), softmax(z.numpy(), -1))]
    np.testing.assert_allclose(rows, right, rtol=1e-10)
    np.testing.assert_allclose(grad, z.softmax(-1) - pi, rtol=1e-9, atol=1e-12)
    assert grad.sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_likelihood_is_torchs_log_density(m):
    logits, z = members(), torch.randn(6, 7).double()
    e, q = pd.ensemble_statistics(logits), Dirichlet(z.exp() + m)
    right = -torch.stack([q.log_prob(p) for p in logits.softmax(-1)]).mean(0)
    np.testing.assert_allclose(pd.dirichlet_likelihood_loss(z, e, m), right, rtol=1e-10)
    # no floor inside the logarithm: a confident member's tail counts in full
    sharp = 40 * logits
    right = -torch.stack([(z.exp() + m - 1) @ torch.zeros(7).double()
                          + torch.lgamma((z.exp() + m).sum(-1))
                          - torch.lgamma(z.exp() + m).sum(-1)
                          + ((z.exp() + m - 1) * p).sum(-1) for p in sharp.log_softmax(-1)]).mean(0)
    np.testing.assert_allclose(
        pd.dirichlet_likelihood_loss(z, pd.ensemble_statistics(sharp), m), right, rtol=1e-10)


def test_temperature_divides_both_logits_and_multiplies_by_its_square():
    logits, z, temperature = members(), torch.randn(6, 7).double(), 2.5
    q = Dirichlet((z / temperature).exp() + 1)
    right = -temperature**2 * torch.stack(
        [q.log_prob(p) for p in (logits / temperature).softmax(-1)]).mean(0)
    e = pd.ensemble_statistics(logits, temperature)
    np.testing.assert_allclose(pd.dirichlet_likelihood_loss(z, e, 1.0, temperature), right,
                               rtol=1e-10)


def test_temperature_schedule():
    args = SimpleNamespace(temperature=10.0, anneal_epochs=60, loss="dirichlet_likelihood")
    at = {e: pd.temperature_at(e, args) for e in (0, 15, 30, 31, 45, 59, 60, 61, 89)}
    assert at[0] == at[15] == at[30] == 10 and at[60] == at[61] == at[89] == 1
    assert at[31] == pytest.approx(9.7) and at[45] == pytest.approx(5.5)
    assert at[59] == pytest.approx(1.3)
    args.anneal_epochs = 0
    assert pd.temperature_at(5, args) == 1.0
    args.anneal_epochs, args.loss = 60, "rkl_proxy"
    assert pd.temperature_at(0, args) == 1.0


@pytest.mark.parametrize("m, t", [(1, 1), (0, 1), (0.5, 2)])
def test_proxy_is_torchs_forward_kl(m, t):
    e, z = pd.ensemble_statistics(members()), torch.randn(6, 7).double()
    beta = e.log_probs.exp() * pd.proxy_precision(e)[:, None] + t
    right = kl_divergence(Dirichlet(beta), Dirichlet(z.exp() + m))
    np.testing.assert_allclose(loss_rows("proxy", z, e, m, t), right, rtol=1e-9)


def test_proxy_vanishes_at_its_optimum():
    e = pd.ensemble_statistics(members())
    z = e.log_probs + pd.proxy_precision(e).log()[:, None]
    rows, grad = gradient("proxy", z, e)
    assert rows.abs().max() < 1e-9 and grad.abs().max() < 1e-9
    assert gradient("proxy", z + 0.1, e)[0].min() > 1e-4


@pytest.mark.parametrize("target, t, total", [("published", 1, 2), ("published", 0, 1),
                                              ("paper", 1, 1)])
def test_rkl_optimum_and_its_precision(target, t, total):
    k, e = 50, pd.ensemble_statistics(members(k=50))
    beta = pd.proxy_precision(e)
    b = beta + (total - 1) * k
    z = e.log_probs + b.log()[:, None]
    rows, grad = gradient("rkl_proxy", z, e, 1, t, target=target)
    assert grad.abs().max() < 1e-12
    np.testing.assert_allclose((z.exp() + 1).sum(-1), beta + total * k, rtol=1e-12)
    for _ in range(5):
        worse, slope = gradient("rkl_proxy", z + 0.3 * torch.randn_like(z), e, 1, t, target=target)
        assert (worse > rows).all() and slope.abs().max() > 1e-4


@pytest.mark.parametrize("t", [0.0, 1.0, 2.0])
def test_the_papers_target_has_precision_beta_0_whatever_the_offset(t):
    """--rkl-target paper is b = beta_0, so that b > 0 where members disagree: beta_0 < K."""
    e = pd.ensemble_statistics(members(k=50, spread=2.0))
    beta = pd.proxy_precision(e)
    assert beta.max() < 50
    grad = gradient("rkl_proxy", e.log_probs + beta.log()[:, None], e, 1, t, target="paper")[1]
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("m, t, target", [
    (1, 1, "published"), (0, 1, "published"), (0.5, 1.5, "published"), (1, 0, "published"),
    (1, 1, "paper"), (0, 1, "paper")])
def test_rkl_is_torchs_reverse_kl(m, t, target):
    e, z = pd.ensemble_statistics(members()), torch.randn(6, 7).double().requires_grad_()
    b = pd.proxy_precision(e) + (7 * t if target == "published" else 0)
    textbook = kl_divergence(Dirichlet(z.exp() + m),
                             Dirichlet(e.log_probs.exp() * b[:, None] + 1)) / b
    right, = torch.autograd.grad(textbook.sum(), z)
    rows, grad = gradient("rkl_proxy", z, e, m, t, target=target)
    np.testing.assert_allclose(grad, right, rtol=1e-7, atol=1e-10)
    # the rows differ by what no student changes
    rest = textbook.detach() - rows
    other = torch.randn(6, 7).double()
    moved = kl_divergence(Dirichlet(other.exp() + m),
                          Dirichlet(e.log_probs.exp() * b[:, None] + 1)) / b \
        - loss_rows("rkl_proxy", other, e, m, t, target=target)
    np.testing.assert_allclose(moved, rest, rtol=1e-8, atol=1e-10)
    assert grad.sum(-1).abs().min() > 1e-3  # rows do not sum to 0


def test_rkl_gradient_is_that_of_central_differences():
    e = pd.ensemble_statistics(members(b=2, k=4))
    for m, target in itertools.product((0.0, 1.0), ("published", "paper")):
        weight = torch.tensor([1.0, -3.0]).double()  # each row's gradient is its own
        function = lambda z: weight * loss_rows("rkl_proxy", z, e, m, 1.0, target=target)
        z = (2 * torch.randn(2, 4).double()).requires_grad_()
        assert torch.autograd.gradcheck(function, z, eps=1e-5, atol=1e-7, rtol=1e-6)


def test_rkl_without_its_value_has_the_same_gradient():
    e, z = pd.ensemble_statistics(members()), torch.randn(6, 7).double()
    rows, grad = gradient("rkl_proxy", z, e)
    nothing, same = gradient("rkl_proxy", z, e, value=False)
    assert torch.equal(grad, same) and (nothing == 0).all() and (rows != 0).all()
    assert torch.equal(loss_rows("rkl_proxy", z, e), rows)  # where no gradient is asked for


def exact_rkl(z, pi, b, offset):
    """L and dL/dz of one row with 60 digits."""
    mp = mpmath.mp
    pi, b = [mp.mpf(p) for p in pi], mp.mpf(b)

    def value(*z):
        alpha = [mp.exp(x) + offset for x in z]
        alpha_0, psi = mp.fsum(alpha), lambda x: mp.digamma(x)
        entropy = mp.fsum(mp.loggamma(a) for a in alpha) - mp.loggamma(alpha_0) \
            - mp.fsum((a - 1) * (psi(a) - psi(alpha_0)) for a in alpha)
        return -mp.fsum(p * (psi(a) - psi(alpha_0)) for p, a in zip(pi, alpha)) - entropy / b

    z = [mp.mpf(x) for x in z]
    slopes = [mp.diff(lambda x, i=i: value(*z[:i], x, *z[i + 1:]), z[i]) for i in range(len(z))]
    return float(value(*z)), [float(s) for s in slopes]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("z", [(60, 0, 1, -2), (-40, -40, -40, -40), (60, 60, 59, -40),
                               (22, 20, 3, -40), (30, 16, 3, 2.5), (0, 0, 0, 0)])
def test_rkl_is_exact_at_extreme_logits(z, offset):
    e = pd.ensemble_statistics(members(b=1, k=4))
    z = torch.tensor([z]).double()
    rows, grad = gradient("rkl_proxy", z, e, offset, 1.0)
    with mpmath.workdps(80):
        value, slopes = exact_rkl(z[0].tolist(), e.log_probs[0].exp().tolist(),
                                  (pd.proxy_precision(e) + 4).item(), offset)
    assert rows.item() == pytest.approx(value, rel=1e-11)
    np.testing.assert_allclose(grad[0], slopes, rtol=1e-8, atol=1e-9 * max(map(abs, slopes)))


def test_rkl_is_bounded_where_the_forward_kl_is_not():
    e = pd.ensemble_statistics(members(k=1000, b=4))
    z = torch.zeros(4, 1000).double()
    z[:, 3] = 60
    rows, grad = gradient("rkl_proxy", z, e)
    assert rows.isfinite().all() and 1 < grad.abs().max() < 2
    assert gradient("proxy", z, e)[1].abs().max() > 1e25
    low = torch.full((4, 1000), -40.0).double()
    rows, grad = gradient("rkl_proxy", low, e)
    assert rows.isfinite().all() and grad.abs().max() < 1e-6
    assert (pd.student_outputs(low, 1.0).precision == 1000).all()


TABLE = [  # K, loss, m, t, loss value, gradient of the head, of one tail class, their ratio
    (10, "forward_kl", 1, 1, 1.994, -0.850, 0.0944, 1.00),
    (10, "dirichlet_likelihood", 0, 0, -12.8, -2.778, 2.407, 7.80),
    (10, "proxy", 1, 1, 51.8, -2.492, 2.606, 9.41),
    (10, "rkl_proxy", 1, 1, 2.555, -0.561, 0.0478, 0.766),
    (1000, "forward_kl", 1, 1, 6.364, -0.949, 9.50e-4, 1.00),
    (1000, "dirichlet_likelihood", 0, 0, -5905, -7.433, 2.458, 330),
    (1000, "dirichlet_likelihood", 1, 0, -3266, -7.126, 2.765, 388),
    (1000, "proxy", 0, 0, 3802, -7.433, 2.464, 331),
    (1000, "proxy", 1, 1, 6320, -7.122, 2.685, 377),
    (1000, "rkl_proxy", 0, 0, 7.511, -1.562, 9.18e-4, 0.587),
    (1000, "rkl_proxy", 1, 1, 7.205, -0.612, 4.68e-4, 0.765),
    (10000, "dirichlet_likelihood", 0, 0, -8.21e4, -9.736, 2.436, 2502),
    (10000, "rkl_proxy", 1, 1, 9.518, -0.613, 4.68e-5, 0.765)]


@pytest.mark.parametrize("k, loss, m, t, value, head, tail, ratio", TABLE)
def test_gradients_of_head_and_tail(k, loss, m, t, value, head, tail, ratio):
    """Measured with the published code; its likelihood has 2^-23 inside the logarithm."""
    rows, grad = gradient(loss, torch.zeros(1, k).double(), pd.ensemble_statistics(
        head_and_tail(k)), m, t)
    close = dict(rel=4e-3 if loss == "dirichlet_likelihood" and k > 10 else 1.5e-3)
    if (k, loss) == (10000, "dirichlet_likelihood"):
        close = dict(rel=0.02)
    assert rows.item() == pytest.approx(value, **close)
    assert grad[0, 0].item() == pytest.approx(head, **close)
    assert grad[0, 1].item() == pytest.approx(tail, **close)
    assert (grad[0, 1:].abs().sum() / -grad[0, 0]).item() == pytest.approx(ratio, **close)


def test_rkl_weighs_classes_the_same_at_any_number_of_them():
    for k, ratio in zip((10, 100, 1000, 10000), (0.7656, 0.7646, 0.7645, 0.7645)):
        grad = gradient("rkl_proxy", torch.zeros(1, k).double(),
                        pd.ensemble_statistics(head_and_tail(k)))[1][0]
        assert (grad[1:].sum() / -grad[0]).item() == pytest.approx(ratio, abs=6e-5)


@pytest.mark.parametrize("loss, m, t", ALL)
def test_invariances_of_the_losses(loss, m, t):
    logits, z = members(), torch.randn(6, 7).double()
    e = pd.ensemble_statistics(logits)
    rows, grad = gradient(loss, z, e, m, t)
    close = dict(rtol=1e-7, atol=1e-9)
    again = gradient(loss, z, e, m, t)  # the first call changed nothing
    assert torch.equal(again[0], rows) and torch.equal(again[1], grad)
    for other in (logits.flip(0), logits + 7.0, logits + torch.randn(5, 6, 1).double()):
        same = gradient(loss, z, pd.ensemble_statistics(other), m, t)
        np.testing.assert_allclose(same[0], rows, **close)
        np.testing.assert_allclose(same[1], grad, **close)
    order = torch.randperm(7)
    turned = gradient(loss, z[:, order], pd.ensemble_statistics(logits[..., order]), m, t)
    np.testing.assert_allclose(turned[0], rows, **close)
    np.testing.assert_allclose(turned[1], grad[:, order], **close)
    shifted = loss_rows(loss, z + 1, e, m, t)
    if loss == "forward_kl":
        np.testing.assert_allclose(shifted, rows, **close)
    else:
        assert (shifted - rows).abs().min() > 1e-3
    assert rows.shape == (6,)
    for i in range(6):  # a batch is its rows, one by one
        one = gradient(loss, z[i:i + 1], pd.ensemble_statistics(logits[:, i:i + 1]), m, t)
        np.testing.assert_allclose(one[0], rows[i:i + 1], **close)
        np.testing.assert_allclose(one[1], grad[i:i + 1], **close)


@pytest.mark.parametrize("loss, m, t", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_leave_autocast(loss, m, t, dtype):
    logits, z = members(k=100).float(), 5 * torch.randn(6, 100)
    right = gradient(loss, z, pd.ensemble_statistics(logits), m, t)
    with torch.autocast("cpu", dtype):
        rows, grad = gradient(loss, z, pd.ensemble_statistics(logits), m, t)
    assert rows.dtype == torch.float64
    np.testing.assert_allclose(rows, right[0], rtol=1e-6)
    np.testing.assert_allclose(grad, right[1], rtol=1e-6)
    wide = gradient(loss, z.double(), pd.ensemble_statistics(logits.double()), m, t)
    np.testing.assert_allclose(rows, wide[0], rtol=1e-12)
    np.testing.assert_allclose(grad, wide[1], rtol=1e-6)


@pytest.mark.parametrize("loss", pd.LOSSES)
def test_the_options_reach_the_loss(loss):
    args = SimpleNamespace(loss=loss, model_offset=0.7, target_offset=1.3, max_precision=9.0,
                           rkl_target="paper")  # each differs from the default
    e, temperature = pd.ensemble_statistics(members(), 2.0), 2.0
    assert pd.proxy_precision(e).max() > 9
    z = torch.randn(6, 7).double().requires_grad_()
    ours = pd.distillation_loss(z, e, args, temperature)
    if loss == "dirichlet_likelihood":
        right = pd.dirichlet_likelihood_loss(z, e, 0.7, 2.0)
    elif loss == "rkl_proxy":
        right = loss_rows(loss, z, e, 0.7, 1.3, 9.0, target="paper")
    else:
        right = loss_rows(loss, z, e, 0.7, 1.3, 9.0)
    grads = (torch.autograd.grad(rows.sum(), z)[0] for rows in (ours, right))
    assert torch.equal(*grads)


@pytest.mark.parametrize("loss, low, high", [
    ("forward_kl", 1.4, 2.0), ("rkl_proxy", 0.9, 1.6), ("dirichlet_likelihood", 3e3, 5e3),
    ("proxy", 2e3, 4e3)])
def test_sizes_of_gradients_on_ordinary_teachers(loss, low, high):
    """What a learning rate for cross entropy meets, at a thousand classes."""
    e = pd.ensemble_statistics(members(k=1000, b=20))
    grad = gradient(loss, torch.randn(20, 1000).double(), e)[1]
    assert low < grad.abs().sum(-1).mean().item() < high


def test_a_batch_without_rows():
    """The last batch of an epoch, where there are more processes than images."""
    for make in (list, iter):
        e = pd.ensemble_statistics(make([torch.zeros(0, 7)] * 3))
        assert e.log_probs.shape == (0, 7) and e.rmi.shape == (0,)
        for loss in pd.LOSSES:
            rows, grad = gradient(loss, torch.zeros(0, 7), e)
            assert rows.shape == (0,) and grad.shape == (0, 7)


def test_a_small_student_follows_the_reverse_kl_only():
    """400 classes, 32 examples, a linear student of 8 random features; means over 3 seeds."""
    agreement, correlation = {}, {}
    for seed in range(3):
        torch.manual_seed(seed)
        spread = torch.logspace(-1, 0.3, 32).double()[:, None]
        logits, x = members(b=32, k=400, spread=spread), torch.randn(32, 8).double()
        e = pd.ensemble_statistics(logits)
        for loss in pd.LOSSES:
            w = torch.zeros(8, 400, dtype=torch.float64, requires_grad=True)
            optimiser = torch.optim.Adam([w], 0.05)
            more = {"value": False} if loss == "rkl_proxy" else {}
            for _ in range(250):
                optimiser.zero_grad()
                loss_rows(loss, x @ w, e, **more).mean().backward()
                optimiser.step()
            z = (x @ w).detach()
            agreement[loss, seed] = (z.argmax(-1) == e.log_probs.argmax(-1)).double().mean().item()
            correlation[loss, seed] = stats.spearmanr((z.exp() + 1).sum(-1),
                                                      pd.proxy_precision(e)).statistic
    mean = lambda values, loss: np.mean([values[loss, seed] for seed in range(3)])
    plain, reverse = mean(agreement, "forward_kl"), mean(agreement, "rkl_proxy")
    assert plain > 0.8 and abs(reverse - plain) <= 0.05
    assert mean(agreement, "dirichlet_likelihood") < plain - 0.1
    assert mean(agreement, "proxy") < plain - 0.1
    assert mean(correlation, "rkl_proxy") > max(0.3, mean(correlation, "forward_kl") + 0.2)


# ---- Special functions --------------------------------------------------------------------------


def test_trigamma_and_what_is_left_of_it():
    x = torch.cat([torch.logspace(-18, 60, 160, dtype=torch.float64), torch.arange(1, 40) / 2])
    with mpmath.workdps(90):
        exact = [mpmath.psi(1, mpmath.mpf(v)) for v in x.tolist()]
        left = [float(v * p - 1) for v, p in zip(x.tolist(), exact)]
    psi1, rest = pd.trigamma(x)
    np.testing.assert_allclose(psi1, np.array(exact, float), rtol=1e-12)
    np.testing.assert_allclose(rest, left, rtol=1e-12)


def test_digamma_and_its_part_of_the_entropy():
    x = torch.cat([torch.logspace(-18, 60, 160, dtype=torch.float64), torch.arange(1, 40) / 2])
    with mpmath.workdps(90):
        exact = [mpmath.mpf(v) for v in x.tolist()]
        psi = [float(mpmath.digamma(v)) for v in exact]
        part = [float(mpmath.loggamma(v) - (v - 1) * mpmath.digamma(v) + v) for v in exact]
    for ours, right in zip(pd.digamma(x), (psi, part)):
        np.testing.assert_allclose(ours, right, rtol=1e-13, atol=1e-13)


def test_rows_in_blocks_are_the_rows():
    """More entries than a block has, and a number of rows that no block divides."""
    logits, z = members(m=3, b=103, k=1000).float(), torch.randn(103, 1000)
    assert len(pd.row_blocks(z)) > 2
    e = pd.ensemble_statistics(logits)
    rows, grad = gradient("rkl_proxy", z, e)
    for i in (0, 31, 32, 102):
        one = pd.ensemble_statistics(member[i:i + 1] for member in logits)
        alone, slope = gradient("rkl_proxy", z[i:i + 1], one)
        np.testing.assert_allclose(rows[i], alone[0], rtol=1e-12)
        np.testing.assert_allclose(grad[i], slope[0], rtol=1e-6, atol=1e-9)
    whole, streamed = (pd.ensemble_statistics(z) for z in (logits, iter(logits)))
    for a, b in zip(whole, streamed):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1, 15, 17, 1e3, 1e8, 1e12, 1e20])
def test_dirichlet_entropy_is_exact(scale):
    alpha = scale * (0.5 + torch.rand(3, 6).double())
    alpha[1, 0], alpha[2, 3] = 1.0, 50.0  # mixed sizes too
    ours, log_means = pd.dirichlet_entropy(alpha)
    np.testing.assert_allclose(log_means, alpha.digamma() - alpha.sum(-1, True).digamma(),
                               rtol=1e-12, atol=1e-12)
    with mpmath.workdps(80):
        for row, value in zip(alpha.tolist(), ours.tolist()):
            a = [mpmath.mpf(x) for x in row]
            total = mpmath.fsum(a)
            exact = mpmath.fsum(map(mpmath.loggamma, a)) - mpmath.loggamma(total) - mpmath.fsum(
                (x - 1) * (mpmath.digamma(x) - mpmath.digamma(total)) for x in a)
            assert value == pytest.approx(float(exact), rel=1e-12, abs=1e-12)
    if scale <= 1e8:  # scipy cancels beyond
        np.testing.assert_allclose(ours, [stats.dirichlet(a).entropy() for a in alpha.numpy()],
                                   rtol=1e-6)


# ---- Measures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.5, 5.0])
def test_ensemble_measures_are_loops_over_pairs(spread):
    z = members(m=4, b=8, k=6, spread=spread)
    out = pd.ensemble_outputs(pd.ensemble_statistics(z))
    p = softmax(z.numpy(), -1)
    np.testing.assert_allclose(out.log_probs.exp(), p.mean(0), rtol=1e-12)
    np.testing.assert_allclose(out.measures["confidence"], 1 - p.mean(0).max(-1), rtol=1e-9)
    np.testing.assert_allclose(out.measures["total_uncertainty"],
                               stats.entropy(p.mean(0), axis=-1), rtol=1e-12)
    np.testing.assert_allclose(out.measures["data_uncertainty"],
                               stats.entropy(p, axis=-1).mean(0), rtol=1e-12)
    for i in range(8):
        values = [out.measures[m][i].item() for m in ("mutual_information", "epkl", "rmi")]
        np.testing.assert_allclose(values, pair_loop(p[:, i]), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(out.precision, 5 / (2 * out.measures["rmi"] + 2.0**-23), rtol=1e-9)


def test_measures_are_ordered_and_bounded():
    z = torch.cat([members(m=5, b=100, k=1000, spread=s).float() for s in (0.0, 1e-4, 0.5, 20.0)],
                  1)
    e = pd.ensemble_statistics(z)
    m = pd.ensemble_outputs(e).measures
    assert (m["mutual_information"] >= 0).all() and (m["rmi"] >= 0).all()
    assert (m["mutual_information"] <= math.log(5) + 1e-12).all()
    assert (m["mutual_information"] <= m["epkl"]).all() and (m["total_uncertainty"] >= 0).all()
    for out in (pd.proxy_outputs(e), pd.proxy_outputs(e, 1.0), pd.student_outputs(z[0]),
                pd.student_outputs(z[0], 0.0)):
        m = out.measures
        assert (m["mutual_information"] >= 0).all() and (m["rmi"] >= 0).all()
        assert (m["mutual_information"] <= m["epkl"] + 1e-12).all()
        assert (m["data_uncertainty"] <= m["total_uncertainty"] + 1e-9).all()


def test_members_certain_of_different_classes_differ_by_ln_m():
    e = pd.ensemble_statistics(200 * torch.eye(5, 30)[:, None])
    m = pd.ensemble_outputs(e).measures
    assert m["mutual_information"].item() == pytest.approx(1.609438, abs=1e-6)
    assert m["data_uncertainty"].item() == pytest.approx(0, abs=1e-12)


def test_a_strongly_disagreeing_ensemble_is_a_bad_fit():
    """Each of 5 members has 12 on a class of its own, 0 on the other 999."""
    e = pd.ensemble_statistics(12 * torch.eye(5, 1000)[:, None])
    names = ("mutual_information", "rmi", "epkl")
    own, proxy = (out.measures for out in (pd.ensemble_outputs(e), pd.proxy_outputs(e)))
    np.testing.assert_allclose([own[n].item() for n in names], [1.60, 7.94, 9.54], atol=6e-3)
    np.testing.assert_allclose([proxy[n].item() for n in names], [0.076, 15.81, 15.88], atol=6e-3)
    assert pd.proxy_outputs(e).precision.item() == pytest.approx(62.9, abs=0.05)


@pytest.mark.parametrize("k, information", [(2, 0.193147), (10, 0.373617), (1000, 0.422284)])
def test_flat_dirichlet_by_hand(k, information):
    out = pd.dirichlet_outputs(torch.ones(1, k).double(), torch.full((1, k), -math.log(k)).double())
    m = {name: value.item() for name, value in out.measures.items()}
    assert m["total_uncertainty"] == pytest.approx(math.log(k), rel=1e-12)
    assert m["mutual_information"] == pytest.approx(information, abs=1e-6)
    assert m["epkl"] == pytest.approx((k - 1) / k, rel=1e-12)
    assert m["confidence"] == pytest.approx(1 - 1 / k) and out.precision.item() == k


def test_dirichlet_measures_are_those_of_draws():
    """400,000 draws; within five standard errors of the mean."""
    alpha = torch.tensor([2.5, 1.5, 6.0, 3.0]).double()
    n, out = 400_000, pd.dirichlet_outputs(alpha[None], torch.zeros(1, 4).double())
    p = Dirichlet(alpha).sample((n,))
    q, mean = p.flip(0), alpha / alpha.sum()
    data_nats = torch.special.entr(p).sum(-1)
    total = torch.special.entr(mean).sum(-1)
    found = {"data_uncertainty": data_nats, "mutual_information": total - data_nats,
             "epkl": (p * (p / q).log()).sum(-1), "rmi": (mean * (mean / p).log()).sum(-1)}
    for name, draws in found.items():
        error = 5 * draws.std().item() / math.sqrt(n / 2)  # n / 2: pairs are used twice
        assert error < 0.03
        assert out.measures[name].item() == pytest.approx(draws.mean().item(), abs=error), name
    assert out.measures["total_uncertainty"].item() == pytest.approx(total.item(), rel=1e-12)


def test_dirichlet_measures_agree_with_the_closed_form_of_the_rmi():
    alpha = torch.cat([torch.rand(20, 30), 1e4 * torch.rand(20, 30)]).double() + 1e-6
    m = pd.dirichlet_outputs(alpha, alpha.log()).measures
    p, total = alpha / alpha.sum(-1, keepdim=True), alpha.sum(-1)
    rmi = (p * (p.log() - alpha.digamma() + total.digamma()[:, None])).sum(-1)
    np.testing.assert_allclose(m["rmi"], rmi, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(m["epkl"], 29 / total, rtol=1e-12)
    np.testing.assert_allclose(m["epkl"] - m["mutual_information"], m["rmi"], rtol=1e-12)


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_the_proxy_is_scored_with_the_number_of_classes(t):
    e = pd.ensemble_statistics(members(k=1000, b=50))
    out = pd.proxy_outputs(e, t)
    alpha = e.log_probs.exp() * pd.proxy_precision(e)[:, None] + t
    np.testing.assert_allclose(out.precision, alpha.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(out.measures["epkl"], 999 / (999 / (2 * e.rmi) + 1000 * t),
                               rtol=1e-5)  # t = 0: twice the ensemble's RMI
    assert torch.equal(out.log_probs, e.log_probs)
    np.testing.assert_allclose(out.measures["confidence"], 1 - e.log_probs.exp().max(-1).values)


def test_ordinary_members_and_their_proxy():
    """Means over 400 rows of the ordinary setting, as the paper's approximation has them."""
    e = pd.ensemble_statistics(members(k=1000, b=400))
    own, proxy = (out.measures for out in (pd.ensemble_outputs(e), pd.proxy_outputs(e)))
    assert own["rmi"].mean().item() == pytest.approx(0.099, abs=2e-3)
    assert proxy["rmi"].mean().item() == pytest.approx(0.129, abs=3e-3)
    assert own["mutual_information"].mean().item() == pytest.approx(0.094, abs=2e-3)
    assert proxy["mutual_information"].mean().item() == pytest.approx(0.069, abs=2e-3)


def test_student_predicts_without_the_offset_and_measures_with_it():
    z = 3 * torch.randn(40, 8).double()
    labels = torch.randint(8, (40,))
    found = {m: pd.student_outputs(z, m) for m in (0.0, 1.0, 5.0)}
    for m, out in found.items():
        np.testing.assert_allclose(out.log_probs, log_softmax(z.numpy(), -1), rtol=1e-12)
        np.testing.assert_allclose(out.precision, z.exp().sum(-1) + 8 * m, rtol=1e-12)
        p = (z.exp() + m) / (z.exp() + m).sum(-1, keepdim=True)
        np.testing.assert_allclose(out.measures["total_uncertainty"],
                                   stats.entropy(p.numpy(), axis=-1), rtol=1e-10)
        np.testing.assert_allclose(out.measures["epkl"], 7 / out.precision, rtol=1e-12)
        np.testing.assert_allclose(out.measures["confidence"], 1 - softmax(z.numpy(), -1).max(-1),
                                   rtol=1e-9, atol=1e-15)
    plain = pd.predictive_metrics(pd.columns_of(pd.softmax_outputs(z), labels))
    for out in found.values():
        values = pd.predictive_metrics(pd.columns_of(out, labels))
        for name in ("accuracy", "top5_accuracy", "nll", "brier", "ece15", "mce15",
                     "prr_confidence"):
            assert values[name] == plain[name], name


def test_a_softmax_has_a_total_uncertainty_alone():
    z = torch.randn(5, 9)
    out = pd.softmax_outputs(z)
    np.testing.assert_allclose(out.measures["total_uncertainty"],
                               stats.entropy(softmax(z.double().numpy(), -1), axis=-1), rtol=1e-10)
    np.testing.assert_allclose(out.precision, z.double().exp().sum(-1), rtol=1e-12)
    assert all(out.measures[m].isnan().all() for m in pd.MEASURES[2:])
    assert out.measures["confidence"].isfinite().all()
    assert out.log_probs.dtype == torch.float64


# ---- Networks -----------------------------------------------------------------------------------


def network(model="resnet50", classes=1000, size=224, mimo=1, channels=3, width=1.0):
    return pd.make_network(SimpleNamespace(model=model), classes, (channels, size, size), width,
                           mimo)


def parameters(net):
    return sum(p.numel() for p in net.parameters())


def test_parameter_counts():
    with torch.device("meta"):
        one, two, three = (network(mimo=e) for e in (1, 2, 3))
        small = network("resnet18")
    assert parameters(one) == 25_557_032 and parameters(two) == 27_615_440
    assert parameters(three) - parameters(two) == parameters(two) - parameters(one) == 2_058_408
    assert parameters(small) == 11_689_512
    with pytest.raises(UserError, match="--model vgg"):
        network("vgg")


@pytest.mark.parametrize("model, size, channels", [("convnet", 16, 1), ("resnet18", 32, 3),
                                                   ("resnet50", 96, 3)])
@pytest.mark.parametrize("mimo", [1, 2, 3])
def test_output_shapes_and_dtype(model, size, channels, mimo):
    net = network(model, 7, size, mimo, channels, 0.25).eval()
    x = torch.randn(2, channels * mimo, size, size)
    shape = (2, 7) if mimo == 1 else (2, mimo, 7)
    plain = net(x)
    assert plain.shape == shape
    with torch.autocast("cpu", torch.bfloat16):
        logits, features = net(x), net.features(x)
    assert logits.dtype == torch.float32 and features.dtype == torch.bfloat16
    assert torch.equal(logits, net.fc(features.float()).view(shape))
    # head e is the e-th block of K rows
    if mimo > 1:
        with torch.no_grad():
            net.fc.weight[7:14], net.fc.bias[7:14] = 0, 5
        assert (net(x)[:, 1] == 5).all() and torch.allclose(net(x)[:, 0], plain[:, 0])


@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_residual_branches_start_at_zero(model):
    net, last = network(model, 5, 32), "bn3" if model == "resnet50" else "bn2"
    blocks = [m for m in net.modules() if isinstance(m, pd.Block)]
    assert len(blocks) == (16 if model == "resnet50" else 8)
    for block in blocks:
        assert (getattr(block, last).weight == 0).all() and (block.bn1.weight == 1).all()
    weight = net.layer2[0].conv1.weight
    fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
    assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


def random_torchvision(model, classes=1000):
    net = getattr(torchvision.models, model)(num_classes=classes).eval()
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if "bn" in name or "downsample.1" in name:
                if value.is_floating_point():
                    value.uniform_(0.5, 1.5)
    return net


def test_torchvisions_resnet50_loads_and_predicts_the_same(tmp_path):
    theirs = random_torchvision("resnet50")
    torch.save(theirs.state_dict(), tmp_path / "member.pt")
    ours = pd.read_member(tmp_path / "member.pt", network(size=96)).eval()
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        right, logits = theirs(x), ours(x)
    assert right.std() > 0.01
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-4 * right.abs().max())


@pytest.mark.parametrize("wrap", [
    lambda s: {"state_dict": {f"model.{k}": v for k, v in s.items()}, "epoch": 89,
               "pytorch-lightning_version": "1.5.3"},
    lambda s: {"state_dict": {**{f"model.{k}": v for k, v in s.items()},
                              "criterion.weight": torch.ones(2)}},
    lambda s: {"model": s, "config": {}, "progress": {"epoch": 3}},
    lambda s: {f"module.{k}": v for k, v in s.items()}], ids=["lightning", "loss", "ours", "ddp"])
def test_wrapped_state_dicts_load(tmp_path, wrap):
    theirs = random_torchvision("resnet18", 20)
    torch.save(wrap(theirs.state_dict()), tmp_path / "member.ckpt")
    ours = pd.read_member(tmp_path / "member.ckpt", network("resnet18", 20))
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


class Code:
    """What a pickle brings along."""


def test_wrong_members_are_refused_in_one_line(tmp_path):
    path = tmp_path / "member.pt"
    good = network("convnet", 5, 16, channels=1, width=0.1)
    state = good.state_dict()

    def refused(content, match, net=good):
        torch.save(content, path) if not isinstance(content, bytes) else path.write_bytes(content)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises(UserError, match=match) as error:
            pd.read_member(path, net)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

    with pytest.raises(UserError, match="no file"):
        pd.read_member(path, good)
    refused(network("convnet", 6, 16, channels=1, width=0.1).state_dict(),
            r"2 tensors do not fit, fc.bias first: \(6,\) there, \(5,\)")
    refused({k: v for k, v in state.items() if k != "fc.bias"}, "1 tensors.*nothing there")
    refused({**state, "fc.scale": torch.ones(1)}, "fc.scale first.*nothing in --model")
    refused({**state, "code": Code()}, "not a file of plain tensors")
    refused(b"not a checkpoint", "not a file of plain tensors")
    refused({}, "do not fit")


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)], {0: torch.ones(3)}, None,
                                     {"fc.bias": 3.0}, {"state_dict": torch.ones(2)}])
def test_files_of_something_else_are_refused(tmp_path, content):
    net = network("convnet", 5, 16, channels=1, width=0.1)
    if isinstance(content, dict) and "fc.bias" in content:
        content = {**net.state_dict(), **content}
    torch.save(content, tmp_path / "member.pt")
    with pytest.raises(UserError):
        pd.read_member(tmp_path / "member.pt", net)


def test_the_order_of_a_state_dict_does_not_matter(tmp_path):
    theirs = network("resnet18", 5, 32, width=0.1)
    backwards = dict(reversed(list(theirs.state_dict().items())))
    torch.save({f"model.{k}": v for k, v in backwards.items()}, tmp_path / "member.pt")
    ours = pd.read_member(tmp_path / "member.pt", network("resnet18", 5, 32, width=0.1))
    assert torch.equal(ours.conv1.weight, theirs.conv1.weight)


# ---- Training's parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("no_decay, decayed, free, elements", [
    ("published", 65, 96, 45_312), ("norms", 54, 107, 54_120), ("none", 161, 0, 0)])
def test_decay_groups_of_resnet50(no_decay, decayed, free, elements):
    with torch.device("meta"):
        net = network()
    args = SimpleNamespace(no_decay=no_decay, opt="sgd", base_lr=0.8, mimo_lr=1.6, lr=0.4,
                           momentum=0.9, weight_decay=1e-4)
    for kind, lr in (("base", 0.8), ("mimo", 1.6), ("distill", 0.4)):
        groups = pd.make_optimiser(net, kind, args).param_groups
        size = {g["weight_decay"]: (len(g["params"]), sum(p.numel() for p in g["params"]))
                for g in groups}
        assert size[1e-4] == (decayed, 25_557_032 - elements)
        assert size.get(0.0, (0, 0)) == (free, elements)
        assert all(g["lr"] == lr and g["momentum"] == 0.9 and g["nesterov"] for g in groups)
    args.opt = "adam"
    adam = pd.make_optimiser(net, "distill", args)
    assert isinstance(adam, torch.optim.Adam) and adam.param_groups[0]["lr"] == 0.4
    assert adam.param_groups[0]["weight_decay"] == 1e-4


def test_learning_rate_milestones():
    rate = lambda epoch, epochs, steps=7, more=0: 0.8 * pd.learning_rate(
        epoch * steps + more, steps, epochs)
    for epoch, right in ((0, 0.8), (39, 0.8), (40, 0.08), (79, 0.08), (80, 0.008), (105, 0.008),
                         (106, 0.0008), (119, 0.0008)):
        assert rate(epoch, 120) == pytest.approx(right) == rate(epoch, 120, more=6)
    for epochs, milestones in ((90, (30, 60, 80)), (150, (50, 100, 133))):
        found = [e for e in range(1, epochs) if rate(e, epochs) < 0.5 * rate(e - 1, epochs)]
        assert tuple(found) == milestones


def test_warm_up_and_cosine():
    rates = [pd.learning_rate(s, 10, 10, "cosine", 0.2) for s in range(100)]
    np.testing.assert_allclose(np.diff(rates[:20]), 1 / 21)  # linear, not from zero
    assert rates[0] == pytest.approx(1 / 21) and rates[20] == 1
    right = [0.5 * (1 + math.cos(math.pi * s / 80)) for s in range(80)]
    np.testing.assert_allclose(rates[20:], right, rtol=1e-12)
    assert pd.learning_rate(5, 10, 90, "step", 0.0) == 1
    assert pd.learning_rate(5, 10, 90, "step", 0.1) == pytest.approx(6 / 91)


@pytest.mark.parametrize("n, r, p, e", [(128, 2, 0.6, 2), (10, 1, 0.0, 3), (8, 3, 1.0, 2),
                                        (100, 4, 0.25, 3), (5, 2, 0.5, 1)])
def test_mimo_rows(n, r, p, e):
    draw = lambda seed: pd.mimo_rows(n, r, p, e, torch.Generator().manual_seed(seed))
    rows = draw(0)
    own = int(n * r * (1 - p))
    assert rows.shape == (n * r, e)
    for column in rows.T:
        assert torch.equal(column.sort().values, torch.arange(n).repeat_interleave(r))
    assert (rows[own:] == rows[own:, :1]).all()
    if own and e > 1:  # as many chance hits as permutations have
        hits = sum((draw(s)[:own, 0] == draw(s)[:own, 1]).double().mean().item() for s in range(20))
        assert 0.0 <= hits / 20 < 5 / n + 0.1
    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    if own < n * r - 3:
        assert not torch.equal(rows[own:, 0].sort().values, rows[own:, 0])


def test_mimo_shares_by_the_published_numbers():
    rows = pd.mimo_rows(128, 2, 0.6, 2, torch.Generator().manual_seed(1))
    assert (rows[102:, 0] == rows[102:, 1]).sum() == 154
    assert (rows[:102, 0] == rows[:102, 1]).sum() < 10


def mimo_args(e):
    return SimpleNamespace(seed=0, batch_repetitions=2, repetition_probability=0.5, mimo_members=e,
                           amp="off", label_smoothing=0.0)


def test_label_loss_is_smoothed_and_over_the_global_batch():
    net, labels = network("convnet", 5, 8, 1, 1, 0.1).eval(), torch.randint(5, (6,))
    batch = data.Batch(torch.randn(6, 1, 8, 8), labels, torch.arange(6), 20)
    args = SimpleNamespace(amp="off", label_smoothing=0.1)
    loss, _, right = pd.batch_loss(net, "base", batch, 0, 0, None, args, WORLD)
    logits = net(batch.images).double()
    target = 0.9 * nn.functional.one_hot(labels, 5) + 0.1 / 5
    assert loss.item() == pytest.approx(-(target * logits.log_softmax(-1)).sum().item() / 20)
    assert right.item() == pytest.approx((logits.argmax(-1) == labels).sum().item() / 20)


def test_mimo_batch_keeps_images_and_labels_together():
    images = torch.arange(6.0)[:, None, None, None] + torch.zeros(6, 2, 1, 1)
    images[:, 1] += 100
    batch = data.Batch(images, torch.arange(6), torch.arange(6), 6)
    x, labels, size = pd.mimo_batch(batch, 0, 0, mimo_args(3), WORLD)
    assert x.shape == (12, 6, 1, 1) and labels.shape == (12, 3) and size == 12
    for member in range(3):  # channels member by member
        assert torch.equal(x[:, 2 * member, 0, 0], labels[:, member].float())
        assert torch.equal(x[:, 2 * member + 1, 0, 0], labels[:, member] + 100.0)
    again = pd.mimo_batch(batch, 0, 1, mimo_args(3), WORLD)[1]
    assert not torch.equal(labels, again)


@pytest.mark.parametrize("e", [1, 2, 3])
def test_mimo_loss_is_the_mean_over_rows_and_members(e):
    net = network("convnet", 5, 8, e, 1, 0.1).eval()
    batch = data.Batch(torch.randn(6, 1, 8, 8), torch.randint(5, (6,)), torch.arange(6), 6)
    loss, shown, right = pd.batch_loss(net, "mimo", batch, 0, 0, None, mimo_args(e), WORLD)
    x, labels, _ = pd.mimo_batch(batch, 0, 0, mimo_args(e), WORLD)
    logits = net(x).view(12, e, 5)
    total = hits = 0.0
    for row, own in zip(logits.double(), labels):
        for z, y in zip(row, own):
            total -= z.log_softmax(-1)[y].item() / (12 * e)
            hits += float(z.argmax() == y) / (12 * e)
    assert loss.item() == pytest.approx(total, rel=1e-6) == shown.item()
    assert right.item() == pytest.approx(hits)


def small_parts(loss="rkl_proxy", **changes):
    """(student, teachers, batches, args): convnets on noise, 5 classes."""
    args = pd.parse_args(["--amp", "off", "--loss", loss, "--no-cache-teachers"])
    args = common.with_options(args, **changes)
    make = lambda: network("convnet", 5, 8, 1, 1, 0.1)
    teachers = pd.Teachers([make().train() for _ in range(3)], args, WORLD)
    batches = [data.Batch(torch.randn(8, 1, 8, 8) + 1, torch.randint(5, (8,)), torch.arange(8), 8)
               for _ in range(10)]
    return make(), teachers, batches, args


def test_teachers_do_not_change_and_the_student_trains():
    student, teachers, batches, args = small_parts()
    before = [{k: v.clone() for k, v in net.state_dict().items()} for net in teachers.nets]
    start = {k: v.clone() for k, v in student.eval().state_dict().items()}
    progress = {"step": 0, **{k: torch.zeros(10) for k in pd.LOGGED}}
    loader = SimpleNamespace(epoch=lambda epoch, start: iter(batches[start:]))
    optimiser = pd.make_optimiser(student, "distill", args)
    pd.train_epoch(student, "distill", optimiser, loader, 0, 10, lambda step: 1e-2, progress,
                   SimpleNamespace(asked=lambda *_: 0), teachers, args, WORLD)
    for net, state in zip(teachers.nets, before):
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
        assert not net.training and all(p.grad is None for p in net.parameters())
    assert student.training
    moved = {k for k, v in student.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == {*start}  # weights, and running statistics


@pytest.mark.parametrize("loss, temperature", [("rkl_proxy", 1.0), ("forward_kl", 1.0),
                                               ("dirichlet_likelihood", 3.0)])
def test_distillation_batch_is_the_mean_of_rows_without_labels(loss, temperature):
    student, teachers, (batch, *_), args = small_parts(
        loss, temperature=temperature, anneal_epochs=4)
    student.eval()
    batch = batch._replace(global_size=20)  # this process has 8 of 20
    ours, shown, agrees = pd.batch_loss(student, "distill", batch, 0, 0, teachers, args, WORLD)
    with torch.no_grad():
        e = pd.ensemble_statistics([net(batch.images) for net in teachers.nets], temperature)
    z = student(batch.images)
    right = pd.distillation_loss(z, e, args, temperature).sum() / 20
    grads = [torch.autograd.grad(value, student.fc.weight)[0] for value in (ours, right)]
    np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-9)
    assert grads[0].abs().max() > 1e-4
    same = pd.batch_loss(student, "distill", batch._replace(labels=batch.labels * 0), 0, 0,
                         teachers, args, WORLD)[1]
    assert shown.item() == same.item()
    assert agrees.item() == pytest.approx(
        (z.argmax(-1) == e.log_probs.argmax(-1)).sum().item() / 20)


# ---- Evaluation ---------------------------------------------------------------------------------


def column(own, name):
    return own[:, pd.COLUMNS.index(name)]


def columns(start=None, **values):
    """[N, len(COLUMNS)]: `start` (or NaN) with some replaced."""
    if start is None:
        start = torch.full((len(next(iter(values.values()))), len(pd.COLUMNS)), math.nan).double()
    found = start.clone()
    for name, value in values.items():
        column(found, name).copy_(torch.as_tensor(value))
    return found


def scored(n=500, k=12, scale=2.0):
    """(probabilities, labels drawn from a colder truth, columns) of a student."""
    z = scale * torch.randn(n, k).double()
    labels = torch.distributions.Categorical(logits=0.6 * z).sample()
    return softmax(z.numpy(), -1), labels, pd.columns_of(pd.student_outputs(z), labels)


def test_metrics_are_scikit_learns_and_torchmetrics():
    p, labels, own = scored()
    values = pd.predictive_metrics(own)
    y, classes = labels.numpy(), np.arange(12)
    assert values["accuracy"] == pytest.approx(accuracy_score(y, p.argmax(-1)))
    assert values["top5_accuracy"] == pytest.approx(
        top_k_accuracy_score(y, p, k=5, labels=classes))
    assert values["nll"] == pytest.approx(log_loss(y, p, labels=classes), rel=1e-9)
    assert values["brier"] == pytest.approx(((p - np.eye(12)[y]) ** 2).sum(-1).mean(), rel=1e-12)
    for name, norm in (("ece15", "l1"), ("mce15", "max")):
        right = multiclass_calibration_error(torch.from_numpy(p), labels, 12, n_bins=15, norm=norm)
        assert values[name] == pytest.approx(right.item(), abs=1e-6)
    wrong = p.argmax(-1) != y
    for name in pd.MEASURES:
        measure = column(own, name).numpy()
        assert values[f"prr_{name}"] == pytest.approx(2 * roc_auc_score(wrong, measure) - 1)
    plain = pd.predictive_metrics(columns(own, epkl=math.nan, rmi=math.nan))
    assert values.keys() - plain.keys() == {"prr_epkl", "prr_rmi"}


def test_labels_that_are_no_class_count_as_wrong():
    out = pd.softmax_outputs(torch.randn(4, 3))
    own = pd.columns_of(out, torch.tensor([3, 7, 100, out.log_probs[3].argmax()]))
    assert column(own, "correct").tolist() == [0, 0, 0, 1]


def test_equal_scores_rank_by_class():
    """As common.top_k_accuracy: a network that says nothing is not right in its first five."""
    z, labels = torch.zeros(12, 12), torch.arange(12)
    z[6:, 3:9] = 1.0
    own = pd.columns_of(pd.softmax_outputs(z), labels)
    values = pd.predictive_metrics(own)
    assert values["accuracy"] == pytest.approx(common.accuracy(z, labels))
    assert values["top5_accuracy"] == pytest.approx(common.top_k_accuracy(z, labels, 5))


def test_rejection_by_hand():
    wrong = np.arange(100) < 20
    half = pd.student_outputs(torch.zeros(100, 2))  # predicts class 0 with probability 1/2
    own = pd.columns_of(half, torch.from_numpy(wrong).long())
    prr = lambda own=own, **more: pd.predictive_metrics(columns(own, **more))
    order = np.arange(100.0)
    assert prr(epkl=-order)["prr_epkl"] == pytest.approx(1.0)
    assert prr(epkl=order)["prr_epkl"] == pytest.approx(-1.0)
    assert prr(epkl=np.ones(100))["prr_epkl"] == pytest.approx(0.0)
    tied = np.floor(order / 7) % 3
    shuffle = np.random.default_rng(0).permutation(100)
    own = columns(own, epkl=tied)
    assert pd.predictive_metrics(own)["prr_epkl"] == pytest.approx(
        pd.predictive_metrics(own[shuffle])["prr_epkl"], rel=1e-12)
    for label in (0, 1):  # no errors, or nothing else: null
        values = prr(pd.columns_of(half, torch.full((100,), label)), epkl=order)
        assert values["prr_epkl"] is None and values["accuracy"] == 1 - label
        assert values["ece15"] == pytest.approx(0.5)


def bin_loop(confidence, correct, index):
    """(ECE, MCE) with bin `index(c)`, by a loop."""
    groups = {}
    for c, right in zip(confidence, correct):
        groups.setdefault(index(c), []).append((c, float(right)))
    gaps = [(len(g) / len(confidence), abs(np.mean([c for c, _ in g])
                                           - np.mean([r for _, r in g]))) for g in groups.values()]
    return sum(w * g for w, g in gaps), max(g for _, g in gaps)


POINTS = np.array([0.0, 0.05, 0.1, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95,
                   0.999, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("correct", [
    np.arange(19) % 3 == 0, np.ones(19) > 0, np.ones(19) < 0, np.arange(19) == 18])
def test_calibration_on_borders(correct):
    edges = [i / 10 for i in range(11)]
    published = bin_loop(POINTS, correct, lambda c: max(b for b in range(11) if edges[b] <= c))
    np.testing.assert_allclose(pd.published_calibration(POINTS, correct), published, rtol=1e-12)
    for bins in (10, 15):  # ours: (a, b]
        right = bin_loop(POINTS, correct,
                         lambda c: next(b for b in range(bins) if c <= (b + 1) / bins))
        np.testing.assert_allclose(pd.calibration(POINTS, correct, bins), right, rtol=1e-12)


def test_certain_predictions_are_calibrated_if_right():
    z = 1e4 * torch.eye(6).double()[[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 4])
    sure = pd.columns_of(pd.softmax_outputs(z), labels)
    assert (column(sure, "confidence") == 0).all()
    values = pd.predictive_metrics(sure)
    assert values["ece15"] == pytest.approx(0.1) and values["mce15"] == pytest.approx(0.1)
    assert values["accuracy"] == 0.9 and values["nll"] == pytest.approx(1e3)
    assert values["brier"] == pytest.approx(0.2)
    assert values["prr_confidence"] == pytest.approx(0.0)  # all tied
    assert pd.predictive_metrics(sure[:9])["ece15"] == 0.0
    found = pd.published_calibration(1 - column(sure, "confidence").numpy(),
                                     (column(sure, "correct") > 0).numpy())
    np.testing.assert_allclose(found, (0.1, 0.1))


def of_pixels(*nets, students=None, mimo=None, average="probs", classes=None, x=None):
    """`outputs_of` networks `Fixed` on random images."""
    args = SimpleNamespace(amp="off", mimo_average=average)
    x = torch.randn(200, 1, 2, 2) if x is None else x
    return x, pd.outputs_of(pd.Models([*nets], students or {}, mimo), x, args, WORLD, classes)


def test_a_subset_of_classes_is_that_of_its_logits():
    """Of an ensemble: of each member's, before its softmax."""
    classes = torch.tensor([2, 3, 7, 11, 12, 20, 29])
    nets, two = [Fixed(30) for _ in range(3)], Fixed(30, 2)
    students = {"rkl_proxy": (Fixed(30), 1.0), "forward_kl": (Fixed(30), 1.0)}
    x, own = of_pixels(*nets, students=students, mimo=two, classes=classes)
    _, whole = of_pixels(*nets, students=students, mimo=two, x=x)
    _, logits = of_pixels(mimo=two, classes=classes, average="logits", x=x)
    with torch.no_grad():
        z, heads = [net(x) for net in nets], two(torch.cat([x, x], 1))
        right = {"single": z[0][:, classes].softmax(-1),
                 "mimo": heads[..., classes].softmax(-1).mean(1),
                 **{f"student_{k}": net(x)[:, classes].softmax(-1)
                    for k, (net, _) in students.items()}}
    for name in ("ensemble", "ensemble_proxy", "ensemble_proxy_t1"):
        right[name] = sum(m[:, classes].softmax(-1) for m in z) / 3
    assert own.keys() == right.keys()
    for name, p in right.items():
        np.testing.assert_allclose(own[name].log_probs.exp(), p, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(own[name].log_probs.exp().sum(-1), 1, rtol=1e-12)
        for measure, value in whole[name].measures.items():  # uncertainties are of all classes
            np.testing.assert_array_equal(own[name].measures[measure], value)
        assert torch.equal(own[name].precision, whole[name].precision)
    np.testing.assert_allclose(logits["mimo"].log_probs.exp(),
                               heads.mean(1)[:, classes].softmax(-1), rtol=1e-9)
    after = whole["ensemble"].log_probs.exp()[:, classes]  # restricted after the mean: another
    assert (after / after.sum(-1, keepdim=True) - right["ensemble"]).abs().max() > 0.01


def test_a_set_of_one_class_is_always_right():
    _, own = of_pixels(Fixed(30), Fixed(30), mimo=Fixed(30, 2), classes=torch.tensor([17]))
    for out in own.values():
        values = pd.predictive_metrics(pd.columns_of(out, torch.zeros(200).long()))
        assert values["accuracy"] == values["top5_accuracy"] == 1
        assert values["nll"] == pytest.approx(0, abs=1e-12) == values["brier"] == values["ece15"]
        assert values["prr_total_uncertainty"] is None


def test_metrics_of_a_subset_are_of_its_own_probabilities():
    """Right and wrong are of the restricted prediction; so must be what is beside them."""
    classes = torch.tensor([2, 3, 7, 11, 12, 20, 29])
    x, own = of_pixels(Fixed(30), Fixed(30), classes=classes)
    for out in own.values():
        labels = torch.distributions.Categorical(logits=out.log_probs).sample()
        values, p = pd.predictive_metrics(pd.columns_of(out, labels)), out.log_probs.exp()
        right = multiclass_calibration_error(p, labels, 7, n_bins=15)
        assert values["ece15"] == pytest.approx(right.item(), abs=1e-6)
        assert values["accuracy"] == (p.argmax(-1) == labels).double().mean().item()
        assert values["nll"] == pytest.approx(log_loss(labels, p.numpy(), labels=np.arange(7)))
        brier = ((p - nn.functional.one_hot(labels, 7)) ** 2).sum(-1).mean().item()
        assert values["brier"] == pytest.approx(brier, rel=1e-9)


def test_ood_scores_are_scikit_learns():
    inside, outside = scored(300)[2], scored(200, scale=0.5)[2]
    values, swapped = pd.ood_metrics(inside, outside), pd.ood_metrics(outside, inside)
    same, is_ood = pd.ood_metrics(inside, inside), np.arange(500) >= 300
    for name in pd.MEASURES:
        a, b = (column(c, name).numpy() for c in (inside, outside))
        right = roc_auc_score(is_ood, np.append(a, b))
        assert right > 0.6 or name not in ("confidence", "total_uncertainty")
        assert values[f"auroc_{name}"] == pytest.approx(right)
        assert swapped[f"auroc_{name}"] == pytest.approx(1 - right)
        assert same[f"auroc_{name}"] == pytest.approx(0.5)
        limit = min(t for t in a if np.mean(a <= t) >= 0.95)
        assert values[f"fpr95_{name}"] == pytest.approx(np.mean(b <= limit))
    softmax_in = columns(confidence=[0.1, 0.2], total_uncertainty=[0.3, 0.1])
    assert set(pd.ood_metrics(softmax_in, softmax_in)) == {
        f"{s}_{m}" for s in ("auroc", "fpr95") for m in ("confidence", "total_uncertainty")}


def test_epkl_is_a_mean_and_rmi_what_the_mutual_information_leaves():
    """Scale does not change the AUROC of EPKL; RMI from the published sum over pairs is another."""
    parts = [members(m=5, b=60, k=8, spread=s) for s in (0.5, 0.7)]
    inside, outside = (pd.columns_of(pd.ensemble_outputs(pd.ensemble_statistics(z)),
                                     torch.zeros(60).long()) for z in parts)
    values = pd.ood_metrics(inside, outside)
    mi, epkl, rmi = np.array([pair_loop(p) for z in parts
                              for p in z.softmax(-1).transpose(0, 1).numpy()]).T
    is_ood = np.arange(120) >= 60
    assert values["auroc_epkl"] == pytest.approx(roc_auc_score(is_ood, 25 * epkl))
    assert values["auroc_rmi"] == pytest.approx(roc_auc_score(is_ood, rmi))
    assert values["auroc_rmi"] != pytest.approx(roc_auc_score(is_ood, 25 * epkl - mi))


def published_parts():
    """(columns, sets): 60 test examples of 4 classes, a set of classes 1 and 3, one without labels,
    ImageNet-O, a corruption; `single` a softmax."""
    def draw(n, k):
        z = torch.randn(n, k).double()
        labels = torch.randint(k, (n,))
        outputs = {"single": pd.softmax_outputs(z), "student_rkl_proxy": pd.student_outputs(z)}
        return {row: pd.columns_of(out, labels) for row, out in outputs.items()}

    two = torch.tensor([1, 3])
    columns = {"test": draw(60, 4), "imagenet_a": draw(20, 2), "svhn": draw(15, 4),
               "imagenet_o": draw(10, 2), **{("fog", s): draw(60, 4) for s in pd.SEVERITIES}}
    sets = {"test": SimpleNamespace(labels=torch.arange(60) % 4), "kinds": ["fog"],
            "ood": {"imagenet_a": (None, two), "svhn": (None, None), "imagenet_o": (None, two)}}
    return columns, sets


def test_the_published_layout():
    columns, sets = published_parts()
    found = pd.published_results(columns, sets, "imagenet")["student_rkl_proxy"]
    names = ("confidence", "entropy_of_expected", "expected_entropy", "mutual_information", "EPKL",
             "MKL")
    accuracy = {"acc1", "acc5", "ECE", "MCE", "brier", "NLL"}
    rejection = {f"{x}_{k}" for x in names for k in ("PRR", "PR-AUC")}
    scored = {"imagenet-a": True, "svhn": False, "imagenet-o": False,
              **{f"imagenet-c-fog-{s}": True for s in pd.SEVERITIES}}
    wanted = {"imagenet_val": accuracy | rejection}
    for name, labels in scored.items():
        wanted[name] = {*names} | (accuracy | rejection if labels else set())
        if name != "svhn":
            wanted[f"{name}_masked"] = {*names} | (accuracy if labels else set())
        if labels:
            wanted[f"{name}_with_val"] = rejection
    assert {k: {*v} for k, v in found.items()} == wanted
    assert list(found) == sorted(found) and all(list(v) == sorted(v) for v in found.values())

    val, own = (columns[n]["student_rkl_proxy"] for n in ("test", "imagenet_a"))
    masked = val[torch.arange(60) % 2 == 1]  # of classes 1 and 3
    pooled = torch.cat([val, own])
    auroc = lambda a, b, m: roc_auc_score(np.arange(len(a) + len(b)) >= len(a),
                                          np.append(column(a, m), column(b, m)))
    for measure, name in zip(pd.MEASURES, names):
        assert found["imagenet-a"][name] == pytest.approx(auroc(val, own, measure))
        assert found["imagenet-a_masked"][name] == pytest.approx(auroc(masked, own, measure))
        for title, rows in (("imagenet-a", own), ("imagenet-a_with_val", pooled),
                            ("imagenet_val", val)):
            right = column(rows, "correct").numpy()[np.argsort(-column(rows, measure).numpy())]
            errors = np.append(np.cumsum((1 - right)[::-1])[::-1], 0) / len(right)
            area = np.trapezoid(errors, dx=1 / len(right))
            assert found[title][f"{name}_PR-AUC"] == pytest.approx(1 - area)
            wrong = column(rows, "correct") == 0
            assert found[title][f"{name}_PRR"] == pytest.approx(
                2 * roc_auc_score(wrong, column(rows, measure)) - 1)
    assert found["imagenet-a_masked"]["acc1"] == found["imagenet-a"]["acc1"] == pytest.approx(
        column(own, "correct").mean().item())
    for s in pd.SEVERITIES:  # all classes: the mask is everything
        assert found[f"imagenet-c-fog-{s}_masked"]["EPKL"] == found[f"imagenet-c-fog-{s}"]["EPKL"]
    plain = pd.published_results(columns, sets, "imagenet")["single"]
    assert {k for k in plain["imagenet_val"] if k.endswith("_PRR")} == {
        "confidence_PRR", "entropy_of_expected_PRR"}


def test_rank_correlations_are_those_of_ranks():
    rng = np.random.default_rng(0)
    draw = lambda: {name: np.round(rng.random(40), 1) for name in (*pd.MEASURES, "precision")}
    one, other = draw(), draw()
    one["epkl"], other["rmi"] = np.full(40, math.nan), np.ones(40)
    values = pd.rank_correlations(columns(**one), columns(**other))
    assert set(values) == {f"spearman_{n}" for n in (
        "total_uncertainty", "data_uncertainty", "mutual_information", "precision")}
    for name in ("total_uncertainty", "data_uncertainty", "mutual_information", "precision"):
        right = np.corrcoef(stats.rankdata(one[name]), stats.rankdata(other[name]))[0, 1]
        assert values[f"spearman_{name}"] == pytest.approx(right)
    up = columns(precision=np.arange(9.0))
    down = columns(precision=-np.exp(np.arange(9.0)))
    assert pd.rank_correlations(up, down)["spearman_precision"] == pytest.approx(-1)


class Fixed(nn.Module):
    """A network whose logits are a linear map of its pixels: [B, K], or [B, E, K]."""

    def __init__(self, k, mimo=1):
        super().__init__()
        self.mimo, self.k = mimo, k
        self.w = nn.Parameter(torch.randn(4 * mimo, k * mimo).double())

    def forward(self, x):
        z = x.flatten(1).double() @ self.w
        return z if self.mimo == 1 else z.view(len(x), self.mimo, self.k)


@pytest.mark.parametrize("average", ["probs", "logits"])
def test_rows_of_the_table(average):
    nets, two, student, plain = [Fixed(6) for _ in range(3)], Fixed(6, 2), Fixed(6), Fixed(6)
    args = SimpleNamespace(amp="off", mimo_average=average)
    models = pd.Models(nets, {"rkl_proxy": (student, 1.0), "proxy": (student, 0.25),
                              "forward_kl": (plain, 1.0)}, two)
    x = torch.randn(5, 1, 2, 2)
    found = pd.outputs_of(models, x, args, WORLD)
    assert set(found) == {*pd.ROWS, "ensemble_proxy_t1"} - {"student_dirichlet_likelihood"}
    probs = {name: out.log_probs.exp() for name, out in found.items()}
    with torch.no_grad():
        z, heads = [net(x) for net in nets], two(torch.cat([x, x], 1))
        e = pd.ensemble_statistics(z)
        for name, t in (("ensemble_proxy", 0), ("ensemble_proxy_t1", 6)):
            np.testing.assert_allclose(found[name].precision, pd.proxy_precision(e) + t, rtol=1e-9)
        for name, net in (("single", nets[0]), ("student_rkl_proxy", student)):
            measures = found[name].measures
            np.testing.assert_allclose(measures["energy"], -net(x).exp().sum(-1).log(), rtol=1e-9)
            np.testing.assert_allclose(measures["max_logit"], -net(x).max(-1).values, rtol=1e-9)
        right = {"single": z[0].softmax(-1), "ensemble": sum(m.softmax(-1) for m in z) / 3,
                 "ensemble_proxy": sum(m.softmax(-1) for m in z) / 3,
                 "student_rkl_proxy": student(x).softmax(-1),
                 "student_forward_kl": plain(x).softmax(-1),
                 "mimo": heads.softmax(-1).mean(1) if average == "probs" else
                 heads.mean(1).softmax(-1)}
        for name, p in right.items():
            np.testing.assert_allclose(probs[name], p, rtol=1e-10, err_msg=name)
        for name, offset in (("student_rkl_proxy", 1.0), ("student_proxy", 0.25)):
            np.testing.assert_allclose(found[name].precision, student(x).exp().sum(-1) + 6 * offset)
    assert found["student_forward_kl"].measures["epkl"].isnan().all()
    assert found["single"].measures["epkl"].isnan().all()
    assert found["mimo"].measures["epkl"].isnan().all() == (average == "logits")
    alone = pd.outputs_of(pd.Models(nets[:1], {}, None), x, args, WORLD)
    assert set(alone) == {"single"}


def test_evaluated_examples_are_one_row_each_in_order():
    class Set(SimpleNamespace):
        def __len__(self):
            return 700

    x = torch.randn(700, 1, 2, 2)
    labels = torch.randint(6, (700,))
    order = torch.randperm(700)
    batches = [data.Batch(x[i], labels[i], i, len(i)) for i in order.split(256)]
    args, nets = SimpleNamespace(amp="off", batch_size=8, mimo_average="probs"), [Fixed(6).train()]
    loader = pd.make_loader
    try:
        pd.make_loader = lambda *_: SimpleNamespace(epoch=lambda: batches)
        own = pd.predict(pd.Models(nets, {}, None), Set(), args, WORLD)["single"]
    finally:
        pd.make_loader = loader
    assert not nets[0].training
    right = pd.columns_of(pd.softmax_outputs(nets[0](x).detach()), labels)
    np.testing.assert_allclose(own, right, rtol=1e-12)
