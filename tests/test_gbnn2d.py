"""gbnn2d.py: Method and Model against brute force, closed forms, scikit-learn and POT in float64,
and its story end to end."""

import itertools
import json
import math

import numpy as np
import ot
import pytest
import torch
import torchvision
from conftest import CPU, Child, run_gbnn2d_in_float64, start_ranks, wait_for
from PIL import Image
from sklearn.cluster import KMeans
from sklearn.metrics import log_loss
from sklearn.mixture import GaussianMixture
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal, kl_divergence

import common
import data
import gbnn2d
from common import UserError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def full(s):
    """Matrices [..., 2, 2] of (S_00, S_01, S_11) [..., 3]."""
    return s[..., [0, 1, 1, 2]].reshape(*s.shape[:-1], 2, 2)


def random_mixture(k):
    weights, a = torch.rand(k).double() + 0.1, 0.1 * torch.randn(k, 2, 2).double()
    covariances = (a @ a.mT + 1e-3 * torch.eye(2)).flatten(1)[:, [0, 1, 3]]
    return gbnn2d.Mixture(weights / weights.sum(), torch.randn(k, 2).double(), covariances)


def cloud(n=3000):
    """Points of three Gaussians, and the centres of these."""
    centres = torch.tensor([[-3.0, 5], [0, 0], [4, 1]]).double()
    covariances = torch.tensor([[2.0, 0.9, 1.0], [1.0, 0.3, 0.5], [0.4, -0.2, 0.6]]).double()
    return MultivariateNormal(centres, full(covariances)).sample((n // 3,)).flatten(0, 1), centres


def exact_cells(x, count=None):
    """Every point its own cell: EM without binning."""
    count = torch.ones(len(x)).double() if count is None else count.double()
    return gbnn2d.Cells(count, gbnn2d.monomials(x), torch.arange(len(x)).int(),
                        torch.zeros(2).double(), torch.ones(2).double())


def squared_distance(x, centres, covariances):
    """(x - c)^T S^-1 (x - c) [n], by a solver."""
    return ((x - centres) * torch.linalg.solve(full(covariances), x - centres)).sum(1)


def scikit_learns(points, start, steps, reg):
    """Its mixture after so many steps of EM from the mixture `start`."""
    return GaussianMixture(len(start.weights), reg_covar=reg, max_iter=steps, tol=0.0,
                           weights_init=start.weights, means_init=start.centres,
                           precisions_init=np.linalg.inv(full(start.covariances))).fit(points)


# ---- Sigma, outliers, KL ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softplus", "published"])
def test_sigma_maps_round_trip(kind):
    sigma = torch.logspace(-4, 0.8, 50).double()
    rho = gbnn2d.rho_of(sigma, kind)
    assert (gbnn2d.sigma_of(rho, kind) / sigma - 1).abs().max() < 1e-9
    single = gbnn2d.sigma_of(gbnn2d.rho_of(sigma.float(), kind), kind)
    assert (single / sigma - 1).abs().max() < 1e-3
    low = gbnn2d.sigma_of(torch.tensor([math.log(1 - 3e-4) - 1e-3]), kind)
    assert (low > 0) == (kind == "softplus")


def test_outliers_are_large_in_magnitude():
    mu, gradient = 0.01 * torch.randn(1000), torch.rand(1000) * 1e-3
    mu[3], gradient[7] = -0.3, -5.0  # negative ones too
    mask = gbnn2d.outlier_mask(mu, gradient, 0.2, 0.01)
    assert mask[3] and mask[7] and mask.sum() == 11
    assert gbnn2d.outlier_mask(mu, gradient, 0.2, 0.0).sum() == 1
    assert gbnn2d.outlier_mask(mu, torch.ones(1000), 9.0, 0.01).all()  # ties: all of them
    assert gbnn2d.outlier_mask(mu[:50], gradient[:50].abs(), 9.0, 0.01).sum() == 1  # at least one


def test_kl_terms_are_those_of_the_gaussians():
    here, there = ((torch.randn(9).double(), torch.rand(9).double() + 0.1) for _ in range(2))
    np.testing.assert_allclose(gbnn2d.gaussian_kl(*here, *there),
                               kl_divergence(Normal(*here), Normal(*there)), rtol=1e-9)
    code, moves = tiny_code(30), [0.5 * torch.randn(s).double() for s in ((3, 2), (3, 3), 2, 2)]
    planes, outliers = zip(*(
        (MultivariateNormal(c.centres, full(gbnn2d.covariances_of(c.factors))),
         Normal(c.outlier_mu, c.outlier_sigma)) for c in (gbnn2d.move(code, *moves), code)))
    right = kl_divergence(*planes).sum() + kl_divergence(*outliers).sum()
    assert gbnn2d.moved_kl(*moves).item() == pytest.approx(right.item(), rel=1e-9)
    assert gbnn2d.moved_kl(*(0 * m for m in moves)) == 0


# ---- The mixture --------------------------------------------------------------------------------


def test_densities_distances_and_the_two_best_are_those_of_the_gaussians():
    x, mixture = torch.randn(20, 2).double(), random_mixture(20)
    planes = MultivariateNormal(mixture.centres, full(mixture.covariances))
    right = planes.log_prob(x[:, None]) + mixture.weights.log()
    theta, _ = gbnn2d.natural_parameters(mixture)
    everyone = torch.arange(20).expand(20, 20)
    np.testing.assert_allclose(gbnn2d.log_joint(theta, gbnn2d.monomials(x), everyone, chunk=7),
                               right, rtol=1e-9)
    label, second, alpha, squared = gbnn2d.two_best(x, mixture, everyone)
    top, best = right.topk(2)
    assert torch.equal(torch.stack([label, second], 1), best)
    np.testing.assert_allclose(alpha, top.softmax(1)[:, 0], rtol=1e-9)
    np.testing.assert_allclose(squared, squared_distance(
        x, mixture.centres[label], mixture.covariances[label]), rtol=1e-8)


def test_cells_keep_all_moments():
    """Also of far points, float32 ones, and of more points than the quantiles look at."""
    x = torch.cat([torch.randn(400_000, 2), 50 * torch.randn(21, 2)])
    x = x * torch.tensor([1e-2, 1e-5]) + torch.tensor([0.1, 1e-3])
    cells = gbnn2d.bin_points(x, bins=16, chunk=99_999)
    z = (x.double() - cells.shift) / cells.scale
    assert torch.equal(torch.bincount(cells.index).double(), cells.count)
    sums = torch.zeros(len(cells.count), 6).double()
    sums.index_add_(0, cells.index, gbnn2d.monomials(z))
    np.testing.assert_allclose(cells.moments, sums / cells.count[:, None], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 50])
def test_em_is_scikit_learns(steps):
    """Also with counts, which are repeated points."""
    x, _ = cloud(600)
    times = torch.arange(600) % 4 + 1
    cells, start = exact_cells(x, times), x[[0, 300, 500]] + 0.5
    first, none = gbnn2d.fit_mixture(cells, start, 0, reg=0.0)
    peer = scikit_learns(x.repeat_interleave(times, 0), first, steps, 0.0)
    ours, history = gbnn2d.fit_mixture(cells, start, steps, reg=0.0, tolerance=-1.0)
    assert none == [] and len(history) == steps and np.all(np.diff(history) > -1e-12)
    np.testing.assert_allclose(ours.weights, peer.weights_, rtol=1e-7)
    np.testing.assert_allclose(ours.centres, peer.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(full(ours.covariances), peer.covariances_, rtol=1e-6)


def test_binned_and_sparse_em_of_twelve_is_close_to_scikit_learns():
    """Wide and narrow ones, six of them known to a cell: within 1e-4 nats a point."""
    centres, width = 4 * torch.randn(12, 2).double(), 0.3 + torch.rand(12, 2).double()
    x = (centres + torch.randn(1667, 12, 2).double() * width).flatten(0, 1)
    cells = gbnn2d.bin_points(x)
    z, start = ((p - cells.shift) / cells.scale for p in (x, centres + 0.3))
    _, history = gbnn2d.fit_mixture(cells, start, 40, neighbours=6, tolerance=-1.0)
    first, _ = gbnn2d.fit_mixture(exact_cells(z), start, 0)
    right = scikit_learns(z, first, 40, 1e-6).score(z)
    assert history[-1] == pytest.approx(right, abs=1e-4) and history[-1] > history[0] + 1e-2


def test_mixture_and_labels_are_in_the_units_of_the_weights():
    x, centres = cloud()
    scale, shift = torch.tensor([1e-2, 1e-6]).double(), torch.tensor([0.2, 1e-3]).double()
    x = x * scale + shift  # a fixed reg would swamp this
    cells = gbnn2d.bin_points(x)
    start = gbnn2d.kmeans_plus_plus(cells, 3, torch.Generator().manual_seed(0))
    mixture, _ = gbnn2d.fit_mixture(cells, gbnn2d.kmeans(cells, start))
    mixture = gbnn2d.rescale(mixture, cells.shift, cells.scale)
    found = mixture.centres[mixture.centres[:, 0].argsort()]
    np.testing.assert_allclose((found - shift) / scale, centres, atol=0.2)
    assert mixture.weights.sum().item() == pytest.approx(1, abs=1e-12)
    labels, rim, second, alpha = gbnn2d.assign(x, cells, mixture, chunk=700)
    label, next_one, posterior, squared = gbnn2d.two_best(x, mixture,
                                                          torch.arange(3).expand(len(x), 3))
    assert labels.dtype == torch.int16 and torch.equal(labels.long(), label)
    assert torch.equal(rim, (squared > -2 * math.log(0.05)).nonzero()[:, 0])
    assert 0.03 < len(rim) / len(x) < 0.07 and torch.equal(second, next_one[rim])
    np.testing.assert_allclose(alpha, posterior[rim], rtol=1e-6)


def test_kmeans_is_scikit_learns_and_its_start_spreads():
    x, _ = cloud(600)
    times = torch.arange(600) % 3 + 1
    peer = KMeans(7, init=x[::90], n_init=1, max_iter=100, tol=0.0).fit(x, sample_weight=times)
    cells = exact_cells(x, times)
    np.testing.assert_allclose(gbnn2d.kmeans(cells, x[::90], 100), peer.cluster_centers_, rtol=1e-9,
                               atol=1e-12)
    x = torch.tensor([[0.0, 0], [1, 0], [3, 0], [0, 2]]).double()
    cells, generator = exact_cells(x, torch.tensor([5, 1, 2, 4])), torch.Generator().manual_seed(0)
    pairs = np.zeros((4, 4))
    for _ in range(3000):  # the set of two: P(i) P(j | i) + P(j) P(i | j)
        i, j = sorted(int((x == c).all(1).nonzero()) for c in
                      gbnn2d.kmeans_plus_plus(cells, 2, generator))
        pairs[i, j] += 1 / 3000
    count, squared = cells.count.numpy(), torch.cdist(x, x).square().numpy()
    both = count[:, None] / count.sum() * (count * squared) / (squared @ count)[:, None]
    np.testing.assert_allclose(pairs, np.triu(both + both.T), atol=4 * math.sqrt(0.25 / 3000))
    same = exact_cells(torch.ones(10, 2).double())
    assert len(gbnn2d.kmeans_plus_plus(same, 4, generator)) == 1


def test_labels_must_fit_in_int16():
    x, mixture = cloud(30)[0], random_mixture(32768)
    with pytest.raises(ValueError, match="32768 components"):
        gbnn2d.assign(x, gbnn2d.bin_points(x), mixture)
    labels = gbnn2d.assign(x, gbnn2d.bin_points(x), gbnn2d.Mixture(*(t[1:] for t in mixture)))[0]
    assert labels.min() >= 0


# ---- Merging ------------------------------------------------------------------------------------


def test_wasserstein_is_the_general_formula():
    (_, m, a), (_, n, b) = random_mixture(20), random_mixture(20)
    a, b = 100 * a, 100 * b
    ours = gbnn2d.wasserstein(m, a, n, b)
    for w2, *gaussians, p, q in zip(ours, m.numpy(), n.numpy(), *(full(s).numpy() for s in (a, b))):
        assert np.abs(p @ q - q @ p).max() > 1e-3  # they do not commute
        peer = ot.gaussian.bures_wasserstein_distance(*gaussians, p, q)
        assert w2.item() == pytest.approx(float(peer), rel=1e-9)
    assert torch.equal(ours, gbnn2d.wasserstein(n, b, m, a))
    assert gbnn2d.wasserstein(m, a, m, a).max() < 1e-7
    np.testing.assert_allclose(gbnn2d.wasserstein(m, a, n, a), (m - n).norm(dim=1), rtol=1e-6)
    np.testing.assert_allclose(gbnn2d.wasserstein(1e-4 * m, 1e-8 * a, 1e-4 * n, 1e-8 * b),
                               1e-4 * ours, rtol=1e-9)
    zero, line = torch.zeros(1, 3).double(), torch.tensor([[1.0, 1.0, 1.0]]).double()
    assert gbnn2d.wasserstein(m[:1], zero, m[:1], line).item() == pytest.approx(math.sqrt(2))


def brute_force_merge(mixture, gradient, tau_d, tau_g, tau_v):
    """All pairs by POT, the closest one that may merge first; sums of raw moments are those of all
    members: for each component left ((mean, covariance, gradient), weight, members)."""
    arrays = (t.numpy() for t in (*mixture[:2], full(mixture.covariances), gradient))
    parts = [[w * c, w * (s + np.outer(c, c)), w * g, w, [k]]
             for k, (w, c, s, g) in enumerate(zip(*arrays))]
    while True:
        found = [(c / w, s / w - np.outer(c, c) / w**2, g / w) for c, s, g, w, _ in parts]
        pairs = [(ot.gaussian.bures_wasserstein_distance(m, n, s, t), i, j)
                 for (i, (m, s, g)), (j, (n, t, h)) in itertools.combinations(enumerate(found), 2)
                 if abs(g - h) < tau_g and abs(np.trace(s - t)) / 2 < tau_v]
        w2, i, j = min(pairs, default=(tau_d, 0, 0))
        if w2 >= tau_d:
            return [(own, *part[3:]) for own, part in zip(found, parts)]
        parts[i] = [a + b for a, b in zip(parts[i], parts.pop(j))]


@pytest.mark.parametrize("tau_d, tau_g, tau_v, k", [
    (0.0, math.inf, math.inf, 24), (0.4, math.inf, math.inf, None), (0.6, 0.3, math.inf, None),
    (0.6, math.inf, 0.01, None), (math.inf, math.inf, math.inf, 1)])
def test_merging_is_the_closest_pair_of_all_first(tau_d, tau_g, tau_v, k):
    mixture, gradient = random_mixture(24), torch.rand(24).double()
    right = brute_force_merge(mixture, gradient, tau_d, tau_g, tau_v)
    merged, g, number, heights = gbnn2d.merge_mixture(mixture, gradient, tau_d, tau_g, tau_v)
    assert len(heights) == 24 - len(g) and all(height < tau_d for height in heights)
    assert len(right) == len(g) == (k or len(g)) and (k or 2 < len(g) < 23)
    for new, (wanted, weight, members) in enumerate(right):  # numbered by their first members
        assert (number == new).nonzero().flatten().tolist() == sorted(members)
        assert merged.weights[new].item() == pytest.approx(weight, rel=1e-11)
        for ours, own in zip((merged.centres, full(merged.covariances), g), wanted):
            np.testing.assert_allclose(ours[new], own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("centres, variances, tau_d, number", [
    # two narrow ones make one that is as wide as the third: closer to it than the fourth is
    ([[-0.05, 0], [0.05, 0], [0, 0.12], [0.15, 0.12]], [1e-8, 1e-8, 0.0025, 0.0025], 0.16,
     [0, 0, 0, 1]),
    # the last two make one that is closer to that of the first two than the third is
    ([[-0.95, 0], [0.95, 0], [0, -2.3], [-1, 2.05], [1, 2.05]], [1e-8, 1e-8, 0.9025, 1e-8, 1e-8],
     2.5, [0, 0, 1, 0, 0]),
    ([[0, 0], [1, 0], [2, 0], [3, 0]], [1e-8] * 4, 1.1, [0, 0, 1, 1]),  # ties, in order
    ([[0, 0], [1, 0], [0, 0], [1, 0]], [1e-8] * 4, 1e-6, [0, 1, 0, 1])])  # equal ones
def test_who_merges_with_whom(centres, variances, tau_d, number):
    covariances = torch.tensor([[v, 0, 1e-8] for v in variances]).double()
    weights = torch.ones(len(centres)).double() / len(centres)
    mixture = gbnn2d.Mixture(weights, torch.tensor(centres).double(), covariances)
    found = gbnn2d.merge_mixture(mixture, torch.zeros(len(centres)), tau_d, tau_v=math.inf)[2]
    assert found.tolist() == number


# ---- Codes and draws ----------------------------------------------------------------------------


def tiny_code(n):
    """Three Gaussians, two outliers and two ellipse points, float64."""
    labels = torch.arange(n) % 3
    labels[[0, 5]] = -1
    numbers = [torch.tensor(values).double() for values in (
        [0.5, -0.4], [0.01, 0.02], [0.7, 0.6], [[0.1, 0.02], [-0.2, 0.03], [0.0, 0.01]],
        [[0.02, 0.004, 0.003], [0.01, 0.0, 0.002], [0.03, -0.002, 0.001]])]
    return gbnn2d.Code(labels.short(), torch.tensor([0, 5]), *numbers[:2], torch.tensor([2, 9]),
                       torch.tensor([0, 1]).short(), *numbers[2:])


def lenet_weights(n=44_190):
    mu = 0.05 * torch.randn(n)
    mu[:40:9] = torch.tensor([-0.3, 0.21, -0.21, 0.3, 0.7])
    return mu.clamp(-0.19, 0.19).where(torch.arange(n) >= 40, mu), 1e-3 * torch.randn(n).exp()


@pytest.mark.parametrize("kind", ["em", "kmeans"])
def test_codes_are_whole_and_repeatable(kind):
    """Labels contiguous, each in use, outliers alike before and after merging; bit for bit; ellipse
    points are the inliers outside their ellipse; components of few members dissolved."""
    mu, sigma = lenet_weights()
    gradient = torch.rand(len(mu))
    one, other = (gbnn2d.share_weights(
        mu, sigma, gradient, torch.Generator().manual_seed(1), k0=60, min_cluster=100, tau_d=3e-3,
        kind=kind) for _ in range(2))
    points = torch.stack([mu, sigma], 1)
    for code, again in zip(one[:2], other[:2]):
        assert all(torch.equal(a, b) for a, b in zip(code, again))
        labels = code.labels.long()
        assert labels.unique().tolist() == list(range(-1, len(code.centres)))
        assert torch.equal((labels == -1).nonzero()[:, 0], code.outliers)
        assert torch.equal(code.outliers, one[0].outliers) and code.labels.dtype == torch.int16
        assert torch.equal(points[code.outliers], torch.stack(code[2:4], 1))
        few = (labels >= 0).nonzero()[::7, 0]
        centres, factors = (t.double()[labels[few]] for t in code[-2:])
        squared = squared_distance(points[few].double(), centres, gbnn2d.covariances_of(factors))
        rim = torch.isin(few, code.ellipse)
        assert ((squared > 5.9915) == rim).double().mean() > 0.9999 and rim.any()
        assert (labels[code.ellipse] != code.ellipse_second).all()
        assert ((code.ellipse_alpha >= 0.5) & (code.ellipse_alpha <= 1)).all()
    assert 1 < len(one[1].centres) < len(one[0].centres) <= 60
    assert one[2] == other[2] and one[2]["tau_d"] == 3e-3
    assert torch.bincount(one[0].labels.long() + 1)[1:].min() > 90
    assert (one[0].labels[mu.abs() > 0.2] == -1).all() and (mu.abs() > 0.2).sum() == 5


def test_thresholds():
    mu, sigma = lenet_weights(5000)
    share = lambda gradient=torch.rand(5000), **options: gbnn2d.share_weights(
        mu, sigma, gradient, torch.Generator(), **options)
    same, merged, _ = share(tau_d=0.0)
    assert all(torch.equal(a, b) for a, b in zip(same, merged))
    everything = dict(tau_d=math.inf, tau_v=math.inf, fraction=0.0)
    assert len(share(**everything)[1].centres) == 1
    signs = share((mu > 0).float(), tau_g=0.5, **everything)[1]  # a member's gradient: 0 or 1
    assert 2 <= len(signs.centres) <= 3
    code, _, numbers = share(k0=40, min_cluster=2)
    centres, covariances = code.centres, gbnn2d.covariances_of(code.factors.double())
    w2 = gbnn2d.wasserstein(centres[:, None], covariances[:, None], centres, covariances)
    closest = w2.fill_diagonal_(math.inf).amin(1)
    assert numbers["tau_d"] == pytest.approx(closest.quantile(0.05).item(), rel=1e-3)
    for options in (dict(k0=6000), dict(tau_w=0.0), dict(fraction=1.0), dict(min_cluster=9999)):
        with pytest.raises(ValueError) as error:
            share(**options)
        assert "\n" not in str(error.value)


def test_a_component_for_each_weight_is_every_weight():
    mu, sigma = torch.randn(300), torch.rand(300) + 0.1
    points = torch.stack([mu, sigma], 1)
    mixture = gbnn2d.Mixture(torch.full((300,), 1 / 300).double(), points.double(),
                             torch.tensor([[1e-12, 0, 1e-12]]).double().repeat(300, 1))
    code, _ = gbnn2d.encode(points, torch.arange(300), gbnn2d.bin_points(points), mixture)
    assert torch.equal(code.labels.long(), torch.arange(300)) and not len(code.ellipse)
    torch.testing.assert_close(gbnn2d.draw_weights(code, "shared"), mu, rtol=1e-4, atol=1e-5)
    draws = torch.stack([gbnn2d.draw_weights(code) for _ in range(4000)])
    np.testing.assert_allclose(draws.std(0) / sigma, 1, atol=0.06)


@pytest.mark.parametrize("draw, variance, correlation", [
    ("hier", lambda c, s: s[0] + c[1] ** 2 + s[2], lambda c, s, v: s[0] / v),
    ("shared", lambda c, s: s[0], lambda c, s, v: 1.0),
    ("perweight", lambda c, s: c[1] ** 2, lambda c, s, v: 0.0)])
def test_moments_of_the_draws(draw, variance, correlation):
    code = tiny_code(60)
    draws = torch.stack([gbnn2d.draw_weights(code, draw) for _ in range(10_000)])
    for k, (c, s) in enumerate(zip(code.centres, gbnn2d.covariances_of(code.factors))):
        pair, v = draws[:, [12 + k, 15 + k]], float(variance(c, s))  # members of k
        assert pair[:, 0].mean().item() == pytest.approx(c[0].item(), abs=0.04 * v**0.5)
        assert pair[:, 0].var().item() == pytest.approx(v, rel=0.06)
        assert pair.T.corrcoef()[0, 1] == pytest.approx(float(correlation(c, s, v)), abs=0.05)
    assert draws[:, 5].std().item() == pytest.approx(0.02, rel=0.06)  # outliers: their own
    np.testing.assert_allclose(draws.mean(0), gbnn2d.mean_weights(code), atol=2e-3)
    blended = 0.7 * code.centres[2, 0] + 0.3 * code.centres[0, 0]
    assert gbnn2d.mean_weights(code)[[0, 2]].tolist() == pytest.approx([0.5, blended.item()])


def test_blends_of_ellipse_points():
    code, spread = tiny_code(60), {}
    for blend in ("linear", "choose", "mean"):
        draws = torch.stack([gbnn2d.draw_weights(code, "hier", blend) for _ in range(4000)])[:, 2]
        assert draws.mean().item() == pytest.approx(gbnn2d.mean_weights(code)[2].item(), abs=3e-3)
        spread[blend] = draws.std().item()
    assert spread["mean"] < 1e-8 < 0.01 < spread["linear"] < 0.04 < spread["choose"]


def test_gradients_reach_what_was_moved():
    """By central differences; a component that no weight refers to gets none."""
    code = tiny_code(60)
    code = code._replace(labels=torch.where(code.labels == 2, 1, code.labels),
                         ellipse_second=torch.zeros(2).short())
    target = torch.randn(60).double()

    def loss(*moves):
        torch.manual_seed(4)
        return (gbnn2d.draw_weights(gbnn2d.move(code, *moves)) - target).square().sum()

    moves = [(0.1 * torch.randn(s).double()).requires_grad_() for s in ((3, 2), (3, 3), 2, 2)]
    assert torch.autograd.gradcheck(loss, moves, atol=1e-6)
    gradients = torch.autograd.grad(loss(*moves), moves)
    assert all((g[:2] != 0).any() for g in gradients)
    assert (gradients[0][2] == 0).all() and (gradients[1][2] == 0).all()


@pytest.mark.parametrize("n, outliers, ellipses, k, trainable, percent", [
    (11_678_912, 23_013, 10_885, 2217, 57_111, 25.5), (11_210_432, 14_624, 260, 2387, 41_183, 25.3),
    (11_164_352, 123_310, 57, 1569, 254_465, 26.7)])
def test_the_published_counts(n, outliers, ellipses, k, trainable, percent):
    """Of ResNet-18 on ImageNet, CIFAR-100, CIFAR-10; then the bytes of a tiny one, by hand."""
    report = gbnn2d.storage(gbnn2d.Code(*map(range, (n, outliers, 0, 0, ellipses, 0, 0, k, 0))), 0)
    assert report["trainable"] == trainable and report["inliers"] == n - outliers
    assert 100 * report["of_mean_field"] == pytest.approx(percent, abs=0.1)
    tiny = gbnn2d.storage(tiny_code(84), 84)
    assert tiny["bytes"] == 2 * 84 + 12 * 2 + 20 * 3 + 10 * 2 + 84
    assert tiny["of_deterministic"] == pytest.approx(356 / (84 * 4 + 84))


# ---- Networks -----------------------------------------------------------------------------------


def parse(*argv):
    return gbnn2d.parse_args([*CPU, *argv])


def tiny_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


@pytest.mark.parametrize("model, classes, side, size", [
    ("resnet18", 100, 32, 11_210_432), ("resnet18", 10, 32, 11_164_352), ("lenet", 10, 28, 44_490),
    ("resnet18", 1000, 224, 11_678_912), ("wide_resnet", 100, 32, 36_518_832)])
def test_parameter_counts(model, classes, side, size):
    args, shape = parse("--dataset", "cifar100", "--model", model), (3, side, side)
    args.device = "meta"
    with torch.device("meta"):
        assert gbnn2d.Layout(gbnn2d.make_network(args, classes, shape)).size == size
        args.width = 0.5
        assert 3.5 < size / gbnn2d.Layout(gbnn2d.make_network(args, classes, shape)).size < 4.1


def test_layout_is_one_order_and_covers_attention():
    net = tiny_net()
    layout = gbnn2d.Layout(net)
    assert layout.shapes == {"0.weight": (4, 1, 3, 3), "3.weight": (3, 16)} and layout.size == 84
    vit = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=3).eval()
    field = gbnn2d.MeanField(vit, gbnn2d.Layout(vit), parse())
    layer = "encoder.layers.encoder_layer_0."
    assert [*field.layout.shapes] == [
        "conv_proj.weight", layer + "self_attention.in_proj_weight",
        layer + "self_attention.out_proj.weight", layer + "mlp.0.weight", layer + "mlp.3.weight",
        "heads.head.weight"]  # no embedding, no token
    weights, x = torch.randn(field.layout.size), torch.randn(2, 3, 8, 8)
    with torch.no_grad():  # where attention takes its fast path
        drawn = field.eval()(x, weights)
        for name, part in field.layout.split(weights).items():
            vit.get_parameter(name).copy_(part)
        torch.testing.assert_close(drawn, vit(x))


def test_mean_field_is_in_the_order_of_the_weights():
    net = tiny_net()
    args = parse("--sigma-init", "0.05", "--prior", "pretrained", "--sigma-map", "published")
    field = gbnn2d.MeanField(net, gbnn2d.Layout(net), args).eval()
    for layer, part in ((net[0], slice(0, 36)), (net[3], slice(36, 84))):
        rms = layer.weight.detach().square().mean().sqrt().expand(part.stop - part.start)
        np.testing.assert_allclose(field.sigma.detach()[part], 0.05 * rms, rtol=1e-4)
        np.testing.assert_allclose(field.prior_sd[part], rms, rtol=1e-6)
        assert all(torch.equal(t[part], layer.weight.flatten()) for t in (field.mu, field.prior_mu))
    x = torch.randn(5, 1, 4, 4)
    assert not torch.equal(field(x), field(x))
    assert [name for name, p in field.named_parameters() if p.requires_grad] == [
        "mu", "rho", "net.1.weight", "net.1.bias", "net.3.bias"]


def tiny_set(n=50, low=0, high=256):
    images = torch.randint(low, high, (n, 1, 4, 4), dtype=torch.uint8)
    return data.ImageSet("tiny", images, torch.arange(n) % 3, 3, (0.5,), (0.3,))


def test_a_step_of_training_by_hand(tmp_path):
    """Its gradient; Adam's first step is as long as the rate, here after the warm-up."""
    net, train_set = tiny_net(), tiny_set(32)
    args = parse("-b", "40", "--warm-up", "0.2", "--lr-mu", "1e-3", "--lr-rho", "1e-2",
                 "--out-dir", str(tmp_path))
    field = gbnn2d.MeanField(net, gbnn2d.Layout(net), args).eval()
    names = ("mu", "rho", "net.3.bias")
    before = [field.get_parameter(name).detach().clone() for name in names]
    [batch], kl = gbnn2d.make_loader(train_set, args).epoch(), field.kl() / 32
    common.seed_all(args.seed, 1, 0, 0)
    loss = nn.functional.cross_entropy(field(batch.images), batch.labels) + 0.3 * kl
    wanted = torch.autograd.grad(loss, [field.get_parameter(name) for name in names])
    run = common.Run(args, "gbnn2d", "run")
    gbnn2d.train(field, "stoch", 1, 0.3, train_set, run, args)
    rate = 0.5 * (1 + math.cos(math.pi * (0.5 - 0.2) / 0.8))
    for name, old, gradient, lr in zip(names, before, wanted, (1e-3, 1e-2, 1e-3)):
        now = field.get_parameter(name)
        torch.testing.assert_close(now.grad, gradient, rtol=1e-4, atol=1e-6)
        assert (now - old).abs().median().item() == pytest.approx(lr * rate, rel=1e-3)
    assert run.history[0]["kl_nats"] == pytest.approx(kl.item())


def test_gradient_is_the_mean_magnitude_of_batches():
    net, args, train_set = tiny_net(), parse("-b", "16", "--sigma-init", "1e-9"), tiny_set()
    layout = gbnn2d.Layout(net)
    ours = gbnn2d.gradient_magnitude(gbnn2d.MeanField(net, layout, args), train_set, args)
    total, batches = 0, list(gbnn2d.make_loader(train_set, args).epoch())
    net.eval().requires_grad_(True)
    for batch in batches:
        loss = nn.functional.cross_entropy(net(batch.images), batch.labels)
        gradients = torch.autograd.grad(loss, [net[0].weight, net[3].weight])
        total = total + torch.cat([g.flatten().abs() for g in gradients])
    assert len(batches) == 4  # the last of 2 images
    np.testing.assert_allclose(ours, total / 4, rtol=1e-4, atol=1e-7)


def test_prediction_and_its_metrics_by_hand():
    """One draw for the whole set at a time; means of probabilities, of logits, and votes."""
    net, test_set, args = tiny_net(), tiny_set(700), parse("--mc", "3")
    shared = gbnn2d.Shared(net, gbnn2d.Layout(net), tiny_code(84), args)
    shared.factors *= 30  # draws that disagree
    p = gbnn2d.predict(shared, test_set, args)
    x, logits = (test_set.images / 255.0 - 0.5) / 0.3, []
    for sample in range(3):
        common.seed_all(args.seed, 1000 + sample)
        with torch.no_grad():
            logits.append(shared(x, shared.draw()).double())
    logits, labels = torch.stack(logits), test_set.labels
    probs, aleatoric = logits.softmax(2), Categorical(logits=logits).entropy().mean(0)
    metrics, scores = gbnn2d.predictive_metrics(p, labels, 10), gbnn2d.uncertainties(p)
    total = Categorical(probs.mean(0)).entropy()
    np.testing.assert_allclose(p.votes, nn.functional.one_hot(logits.argmax(2), 3).double().mean(0))
    np.testing.assert_allclose(p.logits, logits.mean(0), rtol=1e-4, atol=1e-4)
    for found, right in ((p.log_probs.exp(), probs.mean(0)), (p.aleatoric, aleatoric),
                         (scores["max_prob"], 1 - probs.mean(0).max(1).values),
                         (scores["entropy"], total),
                         (scores["mutual_information"], total - aleatoric)):
        np.testing.assert_allclose(found, right, atol=1e-5)
    for name, right in (("nll", log_loss(labels, probs.mean(0))),
                        ("nll_samples", np.mean([log_loss(labels, own) for own in probs])),
                        ("nll_logits", log_loss(labels, logits.mean(0).softmax(1)))):
        assert metrics[name] == pytest.approx(right, rel=1e-4)
    assert metrics["nll"] < metrics["nll_samples"] - 1e-3  # Jensen
    assert metrics["ece10"] != metrics["ece15"] != metrics["ece15_logits"]


def test_a_confident_mistake_has_no_cap_and_doubt_is_outside():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    net[1].weight.data = torch.tensor([[75.0], [0.0], [0.0]]).expand(3, 16)
    net[1].bias.data = torch.zeros(3)
    sets = {"test": tiny_set(9, 255), "ood": {"grey": tiny_set(9, 127, 128)}}
    (row, against), _ = gbnn2d.evaluate("deterministic", net, sets, parse())
    assert row["nll"] == pytest.approx(2000 * 2 / 3) == row["nll_samples"]
    assert against["auroc_entropy"] == against["auroc_max_prob"] == 1


# ---- Runs ---------------------------------------------------------------------------------------

METHODS = ["deterministic", "mean-field", "clustered", "merged", "final"]


def options(folder, *more):
    """All stages in a few seconds: LeNet, a few steps a stage."""
    return ["--dataset", "glyphs", "--model", "lenet", "--width", "1", "--epochs", "2",
            "--stoch-epochs", "1", "--final-epochs", "2", "--limit-steps", "5", "--k0", "40",
            "--mc", "2", "--lr-final", "0.05", *CPU, "--no-plot", "--out-dir",
            str(folder), "--name", "run", *more]


def by_method(rows):
    return {row["method"]: row for row in rows if "nll" in row}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """(folder, rows) of a whole run."""
    folder = tmp_path_factory.mktemp("story")
    rows = gbnn2d.main(options(folder, "--plot", "--predict", "glyphs", "--export",
                               str(folder / "small.pt"), "--ece-bins", "10"))
    return folder, rows


def test_the_story_leaves_its_rows_and_files(story):
    folder, rows = story
    root, found, final = folder / "gbnn2d" / "run", by_method(rows), by_method(rows)["final"]
    assert {"options.json", "results.json", "results.csv", "plane.png", "weights.png",
            "predictions.csv", "seed1-compressed.pt", *(f"seed1-{s}.pt" for s in gbnn2d.STAGES)} \
        <= {path.name for path in root.iterdir()}
    results = json.loads((root / "results.json").read_text())
    assert results["rows"] == rows and [*found] == METHODS
    for row in found.values():
        assert {"accuracy", "ece15", "ece10", "brier", "nll_logits", "accuracy_votes"} <= {*row}
        assert row["nll"] <= row["nll_samples"] + 1e-9
    against = [row for row in rows if row.get("against") == "glyphs_letters"]
    assert ["auroc_entropy" in row for row in against] == [True] * 5
    assert ["auroc_mutual_information" in row for row in against] == [False] + [True] * 4
    assert final["inliers"] + final["outliers"] == final["weights"] == 44_190
    size = (folder / "small.pt").stat().st_size
    assert size == final["bytes_file"] == pytest.approx(final["bytes"], rel=0.1)
    numbers = results["numbers"]["1"]
    assert all(len(numbers[name]) == 5 for name in ("sigma_over_prior", "quantisation_rms",
                                                    "outlier_share"))
    table = np.genfromtxt(root / "predictions.csv", delimiter=",", names=True)
    assert len(table) == 2000 and (table["aleatoric"] > table["epistemic"]).all()
    np.testing.assert_allclose(table["aleatoric"] + table["epistemic"], table["total"])


def test_eval_and_load_repeat_the_story(story):
    folder, rows = story
    assert gbnn2d.main(options(folder, "--eval", "--ece-bins", "10")) == rows
    loaded = gbnn2d.main(["--load", str(folder / "small.pt"), *CPU, "--mc", "2", "--out-dir",
                          str(folder), "--eval"])
    results = json.loads((folder / "gbnn2d" / "loaded-small" / "results.json").read_text())
    assert (results["config"]["model"], results["config"]["width"]) == ("lenet", 1)  # the file's
    assert loaded[0]["accuracy"] == by_method(rows)["final"]["accuracy"]
    assert loaded[0]["nll"] == pytest.approx(by_method(rows)["final"]["nll"], abs=1e-6)
    assert [row.get("against") for row in loaded] == [None, "glyphs_letters"]


def test_the_last_stage_learns(tmp_path):
    """What the published trainer cannot: the loss of the shared network falls."""
    rows = by_method(gbnn2d.main(options(
        tmp_path, "--epochs", "4", "--limit-steps", "15", "--ood", "--final-epochs", "8", "--tau-d",
        "2e-2", "--mc", "4", "--lr-rho", "1e-3")))
    state = state_of(tmp_path, "run", "final")
    assert rows["final"]["nll"] < 0.97 * rows["merged"]["nll"], rows
    assert state["history"][-1]["loss"] < 0.97 * state["history"][0]["loss"], state["history"]
    assert state["net"]["moves.0"].abs().max() > 1e-3


def own_folder(folder):
    """--dataset of 4 x 12 noisy greys in train and in test, made below `folder`."""
    rng = np.random.default_rng(0)
    for split, k in itertools.product(("train", "test"), range(4)):
        place = folder / "own" / split / f"c{k}"
        place.mkdir(parents=True)
        for i, grey in enumerate(rng.integers(60 * k, 60 * k + 60, (12, 32, 32, 3), np.uint8)):
            Image.fromarray(grey).save(place / f"{i}.png")
    return f"folder:{folder / 'own'}"


def state_of(folder, name, stage):
    return torch.load(folder / "gbnn2d" / name / f"seed1-{stage}.pt", weights_only=True)


def test_two_processes_equal_one_and_a_killed_run_goes_on_bit_equal(tmp_path):
    """In float64; and batch norm's statistics stay as stage det left them."""
    argv = options(tmp_path, "--dataset", own_folder(tmp_path), "--model", "resnet18", "--width",
                   "0.02", "-b", "20", "--ood", "--mc", "1", "--epochs", "1", "--final-epochs", "4",
                   "--workers", "0")
    work = (run_gbnn2d_in_float64, *argv, "--name")
    killed = Child(tmp_path, *work, "killed", rank=7)
    wait_for((tmp_path / "gbnn2d/killed/seed1-final.pt").exists)
    killed.process.kill()
    assert killed.wait().status == -9 and state_of(tmp_path, "killed", "final")["epoch"] < 4
    for child in (Child(tmp_path, *work, "killed", rank=8), Child(tmp_path, *work, "one", rank=9),
                  *start_ranks(tmp_path, 2, *work, "two")):
        assert child.wait().status == 0, child.stderr
    det = state_of(tmp_path, "one", "det")["net"]
    for stage in ("det", "stoch", "final"):
        one, two, again = (state_of(tmp_path, n, stage)["net"] for n in ("one", "two", "killed"))
        for key, value in one.items():
            assert torch.equal(value, again[key]), (stage, key)
            torch.testing.assert_close(value, two[key], rtol=1e-7, atol=1e-7)
            if "running" in key:
                assert torch.equal(value, det[key.removeprefix("net.")]) and value.any()
    one, two = (state_of(tmp_path, n, "gmm")["merged"]["labels"] for n in ("one", "two"))
    results = json.loads((tmp_path / "gbnn2d/killed/results.json").read_text())
    assert torch.equal(one, two) and "gmm" not in results["seconds"]  # it has the killed run's


@pytest.mark.parametrize("more", [
    "--draw shared --blend mean --gmm kmeans --stoch-kl 0 --sigma-map published",
    "--draw perweight --blend choose --prior-sd 0.05 --no-train-bn --keep-layers 0 --amp bf16",
    "--stage gmm --epochs 0 --grad-frac 0 --runs 2 --predict glyphs"])
def test_options(tmp_path, more):
    rows = gbnn2d.main(options(tmp_path, "--ood", "--epochs", "1", "--mc", "1", *more.split()))
    assert all(math.isfinite(row["nll"]) for row in rows)
    assert len(rows) == (8 if "--runs" in more else 5)
    if "--stage gmm" in more:
        (tmp_path / "gbnn2d/run/seed1-gmm.pt").unlink()
        with pytest.raises(UserError, match="no stage gmm"):
            gbnn2d.main(options(tmp_path, "--ood", "--epochs", "1", *more.split(), "--eval"))
    if "--predict" in more:  # of the first run; epistemic: not -1e-17, of a single draw
        table = np.genfromtxt(tmp_path / "gbnn2d/run/predictions.csv", delimiter=",", names=True)
        assert (table["label"] == table["predicted"]).mean() == rows[3]["accuracy"]
        assert table["epistemic"].min() >= 0


def test_published_flags_and_presets():
    args = gbnn2d.parse_args("-net wide_resnet -dataset cifar10 -lr 0.2 -b 64".split())
    assert (args.model, args.dataset, args.lr) == ("wide_resnet", "cifar10", 0.2)
    published = dict(model="resnet18", width=1, tau_w=0.2, grad_frac=0.01, tau_d=3.873e-4, mc=40,
                     min_cluster=20, epochs=200, batch_size=128, lr=0.1, k0=6000, stoch_kl=0.1)
    assert published.items() <= vars(gbnn2d.parse_args(["--dataset", "cifar100"])).items()
    assert gbnn2d.parse_args("--dataset cifar100 --gmm kmeans".split()).k0 == 256
    assert gbnn2d.parse_args(["--dataset", "imagenet"]).ece_bins == 10


@pytest.mark.parametrize("argv, said", [
    ("--tau-w 0", "--tau-w"), ("--grad-frac 1", "--grad-frac"), ("--tau-d nan", "--tau-d"),
    ("--k0 40000", "--k0"), ("--k0 30000", "--k0"), ("--mc 0", "--mc"),
    ("--chi2-level 1", "--chi2-level"), ("--compile", "--compile"), ("--model nothing", "--model"),
    ("--depth 11 --model wide_resnet", "--depth"), ("--load nowhere.pt", "nowhere.pt"),
    ("--runs 2 --export a.pt", "--runs"), ("--export nowhere/a.pt", "nowhere"),
    ("--load a.pt --export b.pt", "--export"),
    ("--export a.pt --stage det", "--export"), ("--keep-layers nothing", "--keep-layers"),
    ("--keep-layers 0 3 7 9 11", "no convolution or linear"), ("--tau-d word", "--tau-d"),
    ("--model torchvision/nothing", "--model torchvision/nothing"),
    ("--model torchvision/resnet18 --weights absent.pt", "absent.pt")])
def test_misuse_is_one_line_before_anything_is_trained(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        gbnn2d.main(options(tmp_path, *argv.split()))
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("*.pt"))


def test_a_set_smaller_than_the_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "world_size", lambda: 50)
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    with pytest.raises(UserError, match=r"own: 50 process\(es\) cannot share 48 "):
        gbnn2d.main(options(tmp_path, "--dataset", own_folder(tmp_path), "--ood"))


def test_what_is_no_export_of_the_story_is_refused(story, tmp_path):
    folder, _ = story
    whole = torch.load(folder / "small.pt", weights_only=True)
    code, path = whole["code"], tmp_path / "other.pt"
    wrong = [{**whole, "format": "other"}, {k: v for k, v in whole.items() if k != "rest"},
             {**whole, "code": {**code, "labels": code["labels"][:-1]}},
             {**whole, "code": {**code, "ellipse_second": code["ellipse_second"] + 40}},
             {**whole, "code": {k: v for k, v in code.items() if k != "factors"}},
             {**whole, "config": {**whole["config"], "dataset": "fashion_mnist"}}]
    content = (folder / "small.pt").read_bytes()
    for state in (*wrong, content[:-1000], content[:5000] + b"x" + content[5001:], b""):
        path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
        with pytest.raises(UserError, match="other.pt") as error:
            gbnn2d.main(["--load", str(path), *CPU, "--out-dir", str(tmp_path)])
        assert "\n" not in str(error.value)


def test_pretrained_networks(tmp_path):
    """A state dict is stage det; GoogLeNet's two other heads are left out."""
    net = torchvision.models.googlenet(weights=None, num_classes=4, init_weights=False)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    net = gbnn2d.torchvision_network("googlenet", str(tmp_path / "net.pt"), 4, (3, 32, 32))
    assert net.train()(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    assert not any("aux" in name for name in gbnn2d.Layout(net).shapes)
    net = torchvision.models.shufflenet_v2_x0_5(weights=None, num_classes=4)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    rows = gbnn2d.main(options(
        tmp_path, "--model", "torchvision/shufflenet_v2_x0_5", "--weights",
        str(tmp_path / "net.pt"), "--dataset", own_folder(tmp_path), "--ood", "-b", "8", "--mc",
        "1", "--limit-steps", "1", "--final-epochs", "1", "--workers", "0", "--tau-w", "1"))
    assert [*by_method(rows)] == METHODS and by_method(rows)["final"]["weights"] == 337_936
    assert not (tmp_path / "gbnn2d/run/seed1-det.pt").exists()
    content = (tmp_path / "net.pt").read_bytes()
    (tmp_path / "net.pt").write_bytes(content[:50_000] + b"x" + content[50_001:])
    with pytest.raises(UserError, match="net.pt is damaged"):
        gbnn2d.torchvision_network("shufflenet_v2_x0_5", str(tmp_path / "net.pt"), 4, (3, 32, 32))
