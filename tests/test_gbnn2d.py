"""gbnn2d.py: Method and Model against brute force, closed forms, scikit-learn and POT in float64,
and its story end to end."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
import torchvision
from PIL import Image
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.metrics import log_loss
from sklearn.mixture import GaussianMixture
from torch import nn

import common
import data
import gbnn2d
from common import UserError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def matrix(s):
    return np.array([[s[0], s[1]], [s[1], s[2]]])


def random_covariances(n, scale=1.0):
    a = scale**0.5 * torch.randn(n, 2, 2).double()
    s = a @ a.mT + 0.1 * scale * torch.eye(2)
    return torch.stack([s[:, 0, 0], s[:, 0, 1], s[:, 1, 1]], 1)


def random_mixture(k=40, scale=1.0):
    weights = torch.rand(k).double() + 0.1
    return gbnn2d.Mixture(weights / weights.sum(), scale * torch.randn(k, 2).double(),
                          scale**2 * random_covariances(k, 0.01))


def cloud(n=3000):
    """Points of three Gaussians, which one made each, and the three."""
    label = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 0], [4, 1], [-3, 5]]).double()
    covariances = torch.tensor([[1.0, 0.3, 0.5], [0.4, -0.2, 0.6], [2.0, 0.9, 1.0]]).double()
    l00, l10, l11 = gbnn2d.cholesky(covariances)[label].T
    a, b = torch.randn(2, n).double()
    x = centres[label] + torch.stack([l00 * a, l10 * a + l11 * b], 1)
    return x, label, gbnn2d.Mixture(torch.full((3,), 1 / 3).double(), centres, covariances)


def exact_cells(x, count=None):
    """Every point its own cell: EM without binning."""
    count = torch.ones(len(x)).double() if count is None else count.double()
    return gbnn2d.Cells(count, gbnn2d.monomials(x), torch.arange(len(x)).int(),
                        torch.zeros(2).double(), torch.ones(2).double())


def joint_densities(x, mixture):
    """log pi_k N(x_n; c_k, S_k) [n, K], by scipy."""
    return np.stack([stats.multivariate_normal(c, matrix(s)).logpdf(x) + math.log(w)
                     for w, c, s in zip(*mixture)], 1)


def squared_distance(x, centres, covariances):
    """(x - c)^T S^-1 (x - c) [n], by a solver."""
    return torch.stack([d @ torch.linalg.solve(torch.from_numpy(matrix(s)), d)
                        for d, s in zip(x - centres, covariances)])


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
    mu, sigma = torch.randn(9).double(), torch.rand(9).double() + 0.1
    normal = torch.distributions.Normal
    right = torch.distributions.kl_divergence(normal(mu, sigma), normal(mu.flip(0) * 2, 0.7))
    np.testing.assert_allclose(gbnn2d.gaussian_kl(mu, sigma, mu.flip(0) * 2, torch.tensor(0.7)),
                               right, rtol=1e-6)
    code, moves = tiny_code(30), [0.5 * torch.randn(s).double() for s in ((3, 2), (3, 3), 2, 2)]
    code = code._replace(**{n: v.double() for n, v in code._asdict().items()
                            if v.is_floating_point()})
    now, total = gbnn2d.move(code, *moves), 0.0
    full = lambda c: torch.stack([torch.from_numpy(matrix(s))
                                  for s in gbnn2d.covariances_of(c.factors)])
    plane = torch.distributions.MultivariateNormal
    total = torch.distributions.kl_divergence(plane(now.centres, full(now)),
                                              plane(code.centres, full(code))).sum()
    total += torch.distributions.kl_divergence(*(
        normal(c.outlier_mu, c.outlier_sigma) for c in (now, code))).sum()
    assert gbnn2d.moved_kl(*moves).item() == pytest.approx(total.item(), rel=1e-9)
    assert gbnn2d.moved_kl(*(0 * m for m in moves)) == 0


# ---- The mixture --------------------------------------------------------------------------------


def test_densities_distances_and_the_two_best_are_scipys():
    x, mixture = torch.randn(20, 2).double(), random_mixture(20)
    right = joint_densities(x, mixture)
    theta, _ = gbnn2d.natural_parameters(mixture)
    everyone = torch.arange(20).expand(20, 20)
    np.testing.assert_allclose(gbnn2d.log_joint(theta, gbnn2d.monomials(x), everyone, chunk=7),
                               right, rtol=1e-9)
    label, second, alpha, squared = gbnn2d.two_best(x, mixture, everyone)
    order = np.argsort(-right, 1)
    np.testing.assert_array_equal(torch.stack([label, second], 1), order[:, :2])
    one, two = np.exp(np.take_along_axis(right, order[:, :2], 1)).T
    np.testing.assert_allclose(alpha, one / (one + two), rtol=1e-9)
    np.testing.assert_allclose(squared, squared_distance(
        x, mixture.centres[label], mixture.covariances[label]), rtol=1e-8)


def test_cells_keep_all_moments():
    """Also of far points, float32 ones, and of more points than the quantiles look at."""
    x = torch.cat([torch.randn(400_000, 2), 50 * torch.randn(21, 2)])
    x = x * torch.tensor([1e-2, 1e-5]) + torch.tensor([0.1, 1e-3])
    cells = gbnn2d.bin_points(x, bins=16, chunk=99_999)
    z = (x.double() - cells.shift) / cells.scale
    assert torch.equal(torch.bincount(cells.index).double(), cells.count)
    for c in (0, len(cells.count) // 2, len(cells.count) - 1):
        own = gbnn2d.monomials(z[cells.index == c])
        assert len(own) == cells.count[c] > 0
        np.testing.assert_allclose(cells.moments[c], own.mean(0), rtol=1e-9, atol=1e-9)
    one = gbnn2d.mixture_of(cells, torch.zeros(len(cells.count), 1).long(),
                            torch.ones(len(cells.count), 1).double(), 1, 0.0)
    np.testing.assert_allclose(one.centres[0], z.mean(0), atol=1e-9)
    np.testing.assert_allclose(matrix(one.covariances[0]), np.cov(z.T, bias=True), rtol=1e-7)


@pytest.mark.parametrize("steps", [1, 50])
def test_em_is_scikit_learns(steps):
    """Also with counts, which are repeated points."""
    x, _, _ = cloud(600)
    times = torch.arange(600) % 4 + 1
    start, all_points = x[[0, 1, 2]] + 0.5, x.repeat_interleave(times, 0)
    first, none = gbnn2d.fit_mixture(exact_cells(x, times), start, 0, reg=0.0)
    peer = GaussianMixture(3, reg_covar=0.0, max_iter=steps, tol=0.0, weights_init=first.weights,
                           means_init=first.centres, precisions_init=[
                               np.linalg.inv(matrix(s)) for s in first.covariances])
    peer.fit(all_points.numpy())
    ours, history = gbnn2d.fit_mixture(exact_cells(x, times), start, steps, reg=0.0, tolerance=-1.0)
    assert none == [] and len(history) == steps and np.all(np.diff(history) > -1e-12)
    np.testing.assert_allclose(ours.weights, peer.weights_, rtol=1e-7)
    np.testing.assert_allclose(ours.centres, peer.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ours.covariances, peer.covariances_.reshape(3, 4)[:, [0, 1, 3]],
                               rtol=1e-6)


def test_binned_em_of_twelve_is_close_to_scikit_learns():
    """Wide and narrow ones, the mixture scored on the points: within 1e-4 nats a point."""
    n, centres, made_by = 20_000, 4 * torch.randn(12, 2).double(), torch.arange(20_000) % 12
    width = 0.3 + torch.rand(12, 2).double()
    x = centres[made_by] + torch.randn(n, 2).double() * width[made_by]
    cells = gbnn2d.bin_points(x)
    z, start = ((p - cells.shift) / cells.scale for p in (x, centres + 0.3))
    mixture, history = gbnn2d.fit_mixture(cells, start, 40, tolerance=-1.0)
    first, _ = gbnn2d.fit_mixture(exact_cells(z), start, 0)
    peer = GaussianMixture(12, reg_covar=1e-6, max_iter=40, tol=0.0, weights_init=first.weights,
                           means_init=first.centres, precisions_init=[
                               np.linalg.inv(matrix(s)) for s in first.covariances])
    right = peer.fit(z.numpy()).score(z.numpy())
    ours = gbnn2d.log_joint(gbnn2d.natural_parameters(mixture)[0], gbnn2d.monomials(z),
                            torch.arange(12).expand(n, 12))
    assert ours.logsumexp(1).mean().item() == pytest.approx(right, abs=1e-4)
    assert history[-1] == pytest.approx(right, abs=1e-4) and history[-1] > history[0] + 1e-2


def test_mixture_and_labels_are_in_the_units_of_the_weights():
    x, _, true = cloud()
    scale, shift = torch.tensor([1e-2, 1e-6]).double(), torch.tensor([0.2, 1e-3]).double()
    x = x * scale + shift  # a fixed reg would swamp this
    mixture, cells, _ = gbnn2d.learn_mixture(x, 3, torch.Generator().manual_seed(0))
    order, right = mixture.centres[:, 0].argsort(), true.centres[true.centres[:, 0].argsort()]
    np.testing.assert_allclose((mixture.centres[order] - shift) / scale, right, atol=0.2)
    assert mixture.weights.sum().item() == pytest.approx(1, abs=1e-12)
    labels, rim, second, alpha = gbnn2d.assign(x, cells, mixture, chunk=700)
    label, next_one, posterior, squared = gbnn2d.two_best(x, mixture,
                                                          torch.arange(3).expand(len(x), 3))
    assert labels.dtype == torch.int16 and torch.equal(labels.long(), label)
    assert torch.equal(rim, (squared > -2 * math.log(0.05)).nonzero()[:, 0])
    assert 0.03 < len(rim) / len(x) < 0.07 and torch.equal(second, next_one[rim])
    np.testing.assert_allclose(alpha, posterior[rim], rtol=1e-6)


def test_kmeans_is_scikit_learns_and_its_start_spreads():
    x, _, _ = cloud(600)
    times = torch.arange(600) % 3 + 1
    peer = KMeans(7, init=x[:7].numpy(), n_init=1, max_iter=100, tol=0.0).fit(
        x.numpy(), sample_weight=times.numpy())
    cells = exact_cells(x, times)
    np.testing.assert_allclose(gbnn2d.kmeans(cells, x[:7], 100), peer.cluster_centers_, rtol=1e-9,
                               atol=1e-12)
    mixture, history = gbnn2d.fit_mixture(cells, torch.from_numpy(peer.cluster_centers_), 0)
    own, times = x[peer.labels_ == 2].numpy(), times[peer.labels_ == 2]
    np.testing.assert_allclose(matrix(mixture.covariances[2]),
                               np.cov(own.T, bias=True, fweights=times) + 1e-6 * np.eye(2))
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
    x, k = cloud(30)[0], 32768
    mixture = gbnn2d.Mixture(torch.full((k,), 1 / k).double(), torch.randn(k, 2).double(),
                             torch.tensor([[1.0, 0, 1]]).double().repeat(k, 1))
    with pytest.raises(ValueError, match="32768 components"):
        gbnn2d.assign(x, gbnn2d.bin_points(x), mixture)
    labels = gbnn2d.assign(x, gbnn2d.bin_points(x), gbnn2d.Mixture(*(t[1:] for t in mixture)))[0]
    assert labels.min() >= 0


# ---- Merging ------------------------------------------------------------------------------------


def test_wasserstein_is_the_general_formula():
    a, b = random_covariances(20), random_covariances(20)
    m, n = torch.randn(2, 20, 2).double()
    ours = gbnn2d.wasserstein(m, a, n, b)
    for i in range(20):
        p, q = matrix(a[i]), matrix(b[i])
        assert np.abs(p @ q - q @ p).max() > 1e-3  # they do not commute
        peer = ot.gaussian.bures_wasserstein_distance(m[i].numpy(), n[i].numpy(), p, q)
        assert ours[i].item() == pytest.approx(float(peer), rel=1e-9)
    assert torch.equal(ours, gbnn2d.wasserstein(n, b, m, a))
    assert gbnn2d.wasserstein(m, a, m, a).max() < 1e-7
    np.testing.assert_allclose(gbnn2d.wasserstein(m, a, n, a), (m - n).norm(dim=1), rtol=1e-6)
    np.testing.assert_allclose(gbnn2d.wasserstein(1e-4 * m, 1e-8 * a, 1e-4 * n, 1e-8 * b),
                               1e-4 * ours, rtol=1e-9)
    zero, line = torch.zeros(1, 3).double(), torch.tensor([[1.0, 1.0, 1.0]]).double()
    assert gbnn2d.wasserstein(m[:1], zero, m[:1], line).item() == pytest.approx(math.sqrt(2))


def brute_force_merge(mixture, gradient, tau_d, tau_g, tau_v):
    """All pairs by POT, the closest one that may merge first, moments from the members."""
    members = [[k] for k in range(len(gradient))]
    while True:
        best, joined = (tau_d, None), [moments(mixture, own, gradient) for own in members]
        for i in range(len(members)):
            for j in range(i + 1, len(members)):
                (_, m, s, g), (_, n, t, h) = joined[i], joined[j]
                w2 = ot.gaussian.bures_wasserstein_distance(m, n, s, t)
                if w2 < best[0] and abs(g - h) < tau_g and abs(np.trace(s - t)) / 2 < tau_v:
                    best = w2, (i, j)
        if best[1] is None:
            return joined, members
        members[best[1][0]] += members.pop(best[1][1])


def moments(mixture, own, gradient):
    """(weight, mean, covariance, mean gradient) of the components `own` together."""
    w, c, s = (t[own].numpy() for t in mixture)
    mean = w @ c / w.sum()
    total = sum(v * (matrix(t) + np.outer(d, d)) for v, t, d in zip(w, s, c - mean)) / w.sum()
    return w.sum(), mean, total, w @ gradient[own].numpy() / w.sum()


@pytest.mark.parametrize("tau_d, tau_g, tau_v, k", [
    (0.0, math.inf, math.inf, 24), (0.4, math.inf, math.inf, None), (0.6, 0.3, math.inf, None),
    (0.6, math.inf, 0.01, None), (math.inf, math.inf, math.inf, 1)])
def test_merging_is_the_closest_pair_of_all_first(tau_d, tau_g, tau_v, k):
    mixture, gradient = random_mixture(24), torch.rand(24).double()
    right, members = brute_force_merge(mixture, gradient, tau_d, tau_g, tau_v)
    merged, g, number, heights = gbnn2d.merge_mixture(mixture, gradient, tau_d, tau_g, tau_v)
    assert len(heights) == 24 - len(g) and all(height < tau_d for height in heights)
    assert len(right) == len(g) == (k or len(g)) and (k or 2 < len(g) < 23)
    for new, own in enumerate(members):  # numbered by their first members
        assert (number == new).nonzero().flatten().tolist() == sorted(own)
        np.testing.assert_allclose(merged.weights[new], right[new][0], rtol=1e-11)
        np.testing.assert_allclose(merged.centres[new], right[new][1], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(matrix(merged.covariances[new]), right[new][2], rtol=1e-9,
                                   atol=1e-12)
        np.testing.assert_allclose(g[new], right[new][3], rtol=1e-9)


def test_a_merged_component_finds_the_partners_that_its_parents_had_not():
    """Two narrow ones make one that is as wide as the third: closer to it than the fourth is. The
    old merging knew only its parents' partners, and merged the third and the fourth."""
    centres = torch.tensor([[-0.05, 0], [0.05, 0], [0, 0.12], [0.15, 0.12]]).double()
    covariances = torch.tensor([[1e-8, 0, 1e-8]] * 2 + [[0.0025, 0, 1e-8]] * 2).double()
    mixture = gbnn2d.Mixture(torch.ones(4).double() / 4, centres, covariances)
    assert gbnn2d.merge_mixture(mixture, torch.zeros(4), 0.2)[2].tolist() == [0, 0, 0, 1]


def test_equal_components_and_ties_merge_in_order():
    one = random_mixture(12)
    twice = gbnn2d.Mixture(*(torch.cat([t, t]) for t in one))
    merged, _, number, _ = gbnn2d.merge_mixture(gbnn2d.select(twice, torch.arange(24)),
                                                torch.zeros(24), 1e-6)
    assert number.tolist() == [*range(12)] * 2
    for a, b in zip(merged, one):
        np.testing.assert_allclose(a, b, rtol=1e-11)
    grid = gbnn2d.Mixture(torch.ones(4).double() / 4, torch.tensor(
        [[0.0, 0], [1, 0], [2, 0], [3, 0]]).double(), torch.full((4, 3), 1e-4).double())
    assert gbnn2d.merge_mixture(grid, torch.zeros(4), 1.1)[2].tolist() == [0, 0, 1, 1]


# ---- Codes and draws ----------------------------------------------------------------------------


def tiny_code(n, k=3, outliers=(0, 5), ellipse=(2, 9)):
    labels = torch.arange(n) % k
    labels[list(outliers)] = -1
    few, rim = len(outliers), len(ellipse)
    return gbnn2d.Code(
        labels.short(), torch.tensor(outliers), torch.tensor([0.5, -0.4] * few)[:few],
        torch.tensor([0.01, 0.02] * few)[:few], torch.tensor(ellipse),
        torch.tensor([0, 1] * rim)[:rim].short(), torch.tensor([0.7, 0.6] * rim)[:rim],
        torch.tensor([[0.1, 0.02], [-0.2, 0.03], [0.0, 0.01]]),
        torch.tensor([[0.02, 0.004, 0.003], [0.01, 0.0, 0.002], [0.03, -0.002, 0.001]]))


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
    options = dict(k0=60, min_cluster=100, tau_d=3e-3, kind=kind)
    one, other = (gbnn2d.share_weights(mu, sigma, gradient, torch.Generator().manual_seed(1),
                                       **options) for _ in range(2))
    points, sizes = torch.stack([mu, sigma], 1), []
    for code, again in zip(one[:2], other[:2]):
        assert all(torch.equal(a, b) for a, b in zip(code, again))
        labels, k = code.labels.long(), len(code.centres)
        sizes.append(k)
        assert labels.unique().tolist() == list(range(-1, k)) and code.labels.dtype == torch.int16
        assert torch.equal((labels == -1).nonzero()[:, 0], code.outliers)
        assert torch.equal(code.outliers, one[0].outliers)
        assert torch.equal(points[code.outliers], torch.stack(code[2:4], 1))
        few = (labels >= 0).nonzero()[::7, 0]
        covariances = gbnn2d.covariances_of(code.factors.double())[labels[few]]
        squared = squared_distance(points[few].double(), code.centres.double()[labels[few]],
                                   covariances)
        rim = torch.isin(few, code.ellipse)
        assert ((squared > 5.9915) == rim).double().mean() > 0.9999 and rim.any()
        assert (labels[code.ellipse] != code.ellipse_second).all()
        assert ((code.ellipse_alpha >= 0.5) & (code.ellipse_alpha <= 1)).all()
    assert 1 < sizes[1] < sizes[0] <= 60 and one[2] == other[2] and one[2]["tau_d"] == 3e-3
    assert torch.bincount(one[0].labels.long() + 1)[1:].min() > 90
    assert (one[0].labels[mu.abs() > 0.2] == -1).all() and (mu.abs() > 0.2).sum() == 5


def test_thresholds_at_their_ends():
    mu, sigma = lenet_weights(5000)
    share = lambda **options: gbnn2d.share_weights(mu, sigma, torch.rand(5000), torch.Generator(),
                                                   **options)
    same, merged, _ = share(tau_d=0.0)
    assert all(torch.equal(a, b) for a, b in zip(same, merged))
    assert len(share(tau_d=math.inf, tau_v=math.inf)[1].centres) == 1
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
    draws = torch.stack([gbnn2d.draw_weights(code, draw) for _ in range(10_000)]).double()
    for k, s in enumerate(gbnn2d.covariances_of(code.factors).double()):
        rows = [i for i in range(60) if code.labels[i] == k and i not in (2, 9)]
        c = code.centres[k].double()
        v = float(variance(c, s))
        assert draws[:, rows[0]].mean().item() == pytest.approx(c[0].item(), abs=0.04 * v**0.5)
        assert draws[:, rows[0]].var().item() == pytest.approx(v, rel=0.06)
        pair = np.corrcoef(draws[:, rows[0]], draws[:, rows[1]])[0, 1]
        assert pair == pytest.approx(float(correlation(c, s, v)), abs=0.05)
    assert draws[:, 5].std().item() == pytest.approx(0.02, rel=0.06)  # outliers: their own
    np.testing.assert_allclose(draws.mean(0), gbnn2d.mean_weights(code), atol=2e-3)
    blended = 0.7 * code.centres[2, 0] + 0.3 * code.centres[0, 0]
    assert gbnn2d.mean_weights(code)[[0, 2]].tolist() == pytest.approx([0.5, blended.item()])


def test_blends_of_ellipse_points():
    code = tiny_code(60)
    spread = {}
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
    code = code._replace(**{n: v.double() for n, v in code._asdict().items()
                            if v.is_floating_point()})
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
    """ResNet-18 on ImageNet, CIFAR-100, CIFAR-10: trainable numbers; 2 bytes a weight, 12 an
    outlier, 20 a Gaussian, 10 an ellipse point are so many % of mean-field's bytes."""
    code = gbnn2d.Code(*map(range, (n, outliers, 0, 0, ellipses, 0, 0, k, 0)))
    report = gbnn2d.storage(code, 0)
    assert report["trainable"] == trainable and report["inliers"] == n - outliers
    assert 100 * report["of_mean_field"] == pytest.approx(percent, abs=0.1)
    by_hand = gbnn2d.storage(tiny_code(84), 84)
    assert by_hand["bytes"] == 168 + 24 + 60 + 20 + 84
    assert by_hand["of_deterministic"] == pytest.approx(356 / (84 * 4 + 84))


def test_the_method_runs_pasted_alone():
    source = Path(gbnn2d.__file__).read_text()
    head = source[source.index("import argparse"):source.index("import common")]
    method = source[source.index("# ---- Method"):source.index("# ---- Training")]
    alone = {}
    exec(compile(head + method, "alone", "exec"), alone)
    mu, sigma = lenet_weights(5000)
    clustered, merged, _ = alone["share_weights"](mu, sigma, torch.rand(5000),
                                                  torch.Generator().manual_seed(0))
    assert len(merged.centres) < len(clustered.centres) == 10
    drawn = alone["draw_weights"](merged)
    assert (drawn - mu).abs().mean() < mu.abs().mean()
    assert alone["storage"](merged, 0)["of_mean_field"] < 0.35


# ---- Networks -----------------------------------------------------------------------------------


def parse(*argv):
    return gbnn2d.parse_args(["--device", "cpu", *argv])


def tiny_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


def test_parameter_counts():
    def count(model, classes, side=32, width=1.0):
        args = common.with_options(parse("--dataset", "cifar100"), model=model, width=width,
                                   device="meta")
        with torch.device("meta"):
            return gbnn2d.Layout(gbnn2d.make_network(args, classes, (3, side, side))).size
    assert count("resnet18", 100) == 11_210_432 and count("resnet18", 10) == 11_164_352
    assert count("wide_resnet", 100) == 36_518_832 and count("resnet18", 1000, 224) == 11_678_912
    assert count("lenet", 10, 28) == 44_490 > 3.5 * count("lenet", 10, 28, 0.5)


def test_layout_is_one_order_and_covers_attention():
    net = tiny_net()
    layout = gbnn2d.Layout(net)
    assert layout.shapes == {"0.weight": (4, 1, 3, 3), "3.weight": (3, 16)} and layout.size == 84
    flat = torch.cat([net[0].weight.flatten(), net[3].weight.flatten()])
    assert all(torch.equal(net.get_parameter(name), part)
               for name, part in layout.split(flat).items())
    assert layout.rest == ["1.weight", "1.bias", "3.bias"]
    vit = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=3).eval()
    field = gbnn2d.MeanField(vit, gbnn2d.Layout(vit), parse())
    attention = "encoder.layers.encoder_layer_0.self_attention."
    assert {attention + "in_proj_weight", attention + "out_proj.weight"} < {*field.layout.shapes}
    assert "class_token" in field.layout.rest and "encoder.pos_embedding" in field.layout.rest
    weights, x = torch.randn(field.layout.size), torch.randn(2, 3, 8, 8)
    with torch.no_grad():  # where attention takes its fast path
        drawn = field.eval()(x, weights)
        for name, part in field.layout.split(weights).items():
            vit.get_parameter(name).copy_(part)
        torch.testing.assert_close(drawn, vit(x))
    for keep in (["nothing"], ["0", "3"]):
        with pytest.raises(UserError):
            gbnn2d.Layout(net, keep)


def test_mean_field_is_in_the_order_of_the_weights():
    net = tiny_net()
    args = parse("--sigma-init", "0.05", "--prior", "pretrained", "--sigma-map", "published")
    field = gbnn2d.MeanField(net, gbnn2d.Layout(net), args).eval()
    rms = [net[i].weight.square().mean().sqrt().item() for i in (0, 3)]
    for own, part in zip(rms, (slice(0, 36), slice(36, 84))):
        np.testing.assert_allclose(field.sigma.detach()[part], 0.05 * own, rtol=1e-4)
        np.testing.assert_allclose(field.prior_sd[part], own, rtol=1e-6)
    x, weights = torch.randn(5, 1, 4, 4), torch.randn(84)
    drawn = field(x, weights)
    with torch.no_grad():
        net[0].weight.copy_(weights[:36].view(4, 1, 3, 3))
        net[3].weight.copy_(weights[36:].view(3, 16))
    torch.testing.assert_close(drawn, net(x))
    assert not torch.equal(field(x), field(x))
    assert [name for name, p in field.named_parameters() if p.requires_grad] == [
        "mu", "rho", "net.1.weight", "net.1.bias", "net.3.bias"]


def tiny_set(n=50, k=3):
    images = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8)
    return data.ImageSet("tiny", images, torch.arange(n) % k, k, (0.5,), (0.3,))


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
    before = {k: v.clone() for k, v in shared.state_dict().items()}
    p = gbnn2d.predict(shared, test_set, args)
    assert all(torch.equal(v, before[k]) for k, v in shared.state_dict().items())
    x, logits = (test_set.images / 255.0 - 0.5) / 0.3, []
    for sample in range(3):
        common.seed_all(args.seed, 1000 + sample)
        with torch.no_grad():
            logits.append(shared(x, shared.draw()).double())
    logits, labels = torch.stack(logits), test_set.labels
    probs = logits.softmax(2)
    np.testing.assert_allclose(p.log_probs.exp(), probs.mean(0), atol=1e-5)
    np.testing.assert_allclose(p.logits, logits.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(p.votes, nn.functional.one_hot(logits.argmax(2), 3).double().mean(0))
    aleatoric = stats.entropy(probs, axis=2).mean(0)
    np.testing.assert_allclose(p.aleatoric, aleatoric, atol=1e-4)
    metrics, scores = gbnn2d.predictive_metrics(p, labels, 10), gbnn2d.uncertainties(p)
    assert metrics["nll"] == pytest.approx(log_loss(labels, probs.mean(0)), rel=1e-4)
    assert metrics["nll_samples"] == pytest.approx(
        np.mean([log_loss(labels, own) for own in probs]), rel=1e-4)
    assert metrics["nll_logits"] == pytest.approx(log_loss(labels, logits.mean(0).softmax(1)),
                                                  rel=1e-4)
    assert metrics["nll"] < metrics["nll_samples"] - 1e-3  # Jensen
    assert metrics["ece10"] != metrics["ece15"] != metrics["ece15_logits"]
    total = stats.entropy(probs.mean(0), axis=1)
    np.testing.assert_allclose(scores["entropy"], total, atol=1e-4)
    np.testing.assert_allclose(scores["mutual_information"], total - aleatoric, atol=1e-4)
    np.testing.assert_allclose(scores["max_prob"], 1 - probs.mean(0).max(1).values, atol=1e-5)


def test_nll_has_no_cap():
    """Of a confident mistake, thousands of nats."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(net[1].weight)
    net[1].bias.data = torch.tensor([2000.0, 0.0, 0.0])
    p = gbnn2d.predict(net, tiny_set(9), parse())
    metrics = gbnn2d.predictive_metrics(p, tiny_set(9).labels)
    assert metrics["nll"] == pytest.approx(2000 * 2 / 3) == metrics["nll_samples"]


# ---- Runs ---------------------------------------------------------------------------------------

METHODS = ["deterministic", "mean-field", "clustered", "merged", "final"]


def options(folder, *more):
    """All stages in a few seconds: LeNet, a few steps a stage."""
    return ["--dataset", "glyphs", "--model", "lenet", "--width", "1", "--epochs", "2",
            "--stoch-epochs", "1", "--final-epochs", "2", "--limit-steps", "5", "--k0", "40",
            "--mc", "2", "--lr-final", "0.05", "--device", "cpu", "--no-plot", "--out-dir",
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
    root = folder / "gbnn2d" / "run"
    assert {"options.json", "results.json", "results.csv", "plane.png", "weights.png",
            "predictions.csv", "seed1-compressed.pt", *(f"seed1-{s}.pt" for s in gbnn2d.STAGES)} \
        <= {path.name for path in root.iterdir()}
    results, found = json.loads((root / "results.json").read_text()), by_method(rows)
    assert results["rows"] == rows and [*found] == METHODS
    for row in found.values():
        assert {"accuracy", "nll", "ece15", "ece10", "brier", "nll_logits",
                "accuracy_votes"} <= {*row}
        assert row["nll"] <= row["nll_samples"] + 1e-9
    against = [row for row in rows if row.get("against") == "glyphs_letters"]
    assert len(against) == 5 and all("auroc_entropy" in row for row in against)
    assert ["auroc_mutual_information" in row for row in against] == [False] + [True] * 4
    final = found["final"]
    assert final["inliers"] + final["outliers"] == final["weights"] == 44_190
    size = (folder / "small.pt").stat().st_size
    assert size == final["bytes_file"] == pytest.approx(final["bytes"], rel=0.1)
    numbers = results["numbers"]["1"]
    assert {*numbers["sigma_over_prior"]} == {*numbers["quantisation_rms"]} and len(
        numbers["outlier_share"]) == 5
    lines = (root / "predictions.csv").read_text().splitlines()
    assert lines[0].startswith("index,label,predicted") and len(lines) > 1000


def test_eval_and_load_repeat_the_story(story):
    folder, rows = story
    kept = {p: p.read_bytes() for p in (folder / "gbnn2d" / "run").glob("*.pt")}
    again = gbnn2d.main(options(folder, "--eval", "--ece-bins", "10"))
    assert again == rows and all(p.read_bytes() == content for p, content in kept.items()
                                 if "compressed" not in p.name)
    loaded = gbnn2d.main(["--load", str(folder / "small.pt"), "--device", "cpu", "--mc", "2",
                          "--out-dir", str(folder)])
    assert (folder / "gbnn2d" / "loaded-small" / "results.json").exists()
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


def own_folder(folder, classes=4, images=12):
    """Images of `classes` greys in train and test."""
    rng = np.random.default_rng(0)
    for k, split, i in itertools.product(range(classes), ("train", "test"), range(images)):
        place = folder / "own" / split / f"c{k}"
        place.mkdir(parents=True, exist_ok=True)
        grey = rng.integers(60 * k, 60 * k + 60, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(grey).save(place / f"{i}.png")


def child(folder, *argv, processes=1):
    """The script in float64, as a process or by torchrun."""
    script = folder / "double.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(gbnn2d.__file__).parent)!r})\n"
        "import common, gbnn2d\nmake, outputs = gbnn2d.make_network, gbnn2d.outputs\n"
        "gbnn2d.make_network = lambda *a: make(*a).double()\n"
        "gbnn2d.outputs = lambda m, b, *a: outputs(m, b._replace(images=b.images.double()), *a)\n"
        "share = gbnn2d.share_weights\ndef once(*a, **k):\n"
        "    print('shared once', flush=True)\n    return share(*a, **k)\n"
        "gbnn2d.share_weights = once\n"
        "if __name__ == '__main__':\n    common.launch(gbnn2d.main)\n")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(script), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def state_of(folder, name, stage):
    return torch.load(folder / "gbnn2d" / name / f"seed1-{stage}.pt", weights_only=True)


def test_two_processes_equal_one_and_a_killed_run_goes_on_bit_equal(tmp_path):
    """And batch norm's statistics stay as stage det left them."""
    own_folder(tmp_path)
    more = ["--dataset", f"folder:{tmp_path / 'own'}", "--model", "resnet18", "--width", "0.02",
            "-b", "20", "--ood", "--mc", "1", "--epochs", "1", "--workers", "0"]
    one, two = (child(tmp_path, *options(tmp_path, *more, "--name", str(n)), processes=n)
                for n in (1, 2))
    killed = child(tmp_path, *options(tmp_path, *more, "--name", "killed"))
    for line in killed.stdout:
        if line.startswith("seed1-final 1/2"):
            killed.kill()
            break
    assert killed.wait() == -9 and state_of(tmp_path, "killed", "final")["epoch"] == 1
    again = child(tmp_path, *options(tmp_path, *more, "--name", "killed"))
    for process in (one, two, again):
        out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out[-3000:]
        assert out.count("shared once") == (process is not again)  # it has the killed run's
    det = state_of(tmp_path, "1", "det")["net"]
    for stage in ("det", "stoch", "final"):
        first, second, third = (state_of(tmp_path, n, stage)["net"] for n in ("1", "2", "killed"))
        for key, value in first.items():
            assert torch.equal(value, third[key]), (stage, key)
            torch.testing.assert_close(value, second[key], rtol=1e-7, atol=1e-7)
            if "running" in key:
                assert torch.equal(value, det[key.removeprefix("net.")]) and value.any()
    a, b = (state_of(tmp_path, n, "gmm") for n in ("1", "2"))
    assert torch.equal(a["merged"]["labels"], b["merged"]["labels"])


@pytest.mark.parametrize("more", [
    "--draw shared --blend mean --gmm kmeans --stoch-kl 0 --sigma-map published --runs 2",
    "--draw perweight --blend choose --prior-sd 0.05 --no-train-bn --keep-layers 0 --amp bf16",
    "--stage gmm --epochs 0 --grad-frac 0"])
def test_options(tmp_path, more):
    rows = gbnn2d.main(options(tmp_path, "--ood", "--epochs", "1", "--mc", "1", *more.split()))
    assert all(math.isfinite(row["nll"]) for row in rows)
    assert len(rows) == (10 if "--runs" in more else 4 if "--stage" in more else 5)


def test_published_flags_and_presets():
    args = gbnn2d.parse_args("-net wide_resnet -dataset cifar10 -lr 0.2 -b 64".split())
    assert (args.model, args.dataset, args.lr) == ("wide_resnet", "cifar10", 0.2)
    published = dict(model="resnet18", width=1, tau_w=0.2, grad_frac=0.01, tau_d=3.873e-4, mc=40,
                     min_cluster=20, epochs=200, batch_size=128, lr=0.1, k0=6000, stoch_kl=0.1)
    assert published.items() <= vars(gbnn2d.parse_args(["--dataset", "cifar100"])).items()
    assert gbnn2d.parse_args("--dataset cifar100 --gmm kmeans".split()).k0 == 256
    assert gbnn2d.parse_args(["--dataset", "imagenet"]).ece_bins == 10


@pytest.mark.parametrize("argv, said", [
    ("--tau-w -1", "--tau-w"), ("--tau-w 0", "--tau-w"), ("--grad-frac 1", "--grad-frac"),
    ("--k0 40000", "--k0"), ("--k0 30000", "--k0"), ("--tau-d nan", "--tau-d"), ("--mc 0", "--mc"),
    ("--chi2-level 1", "--chi2-level"), ("--compile", "--compile"), ("--model nothing", "--model"),
    ("--depth 11 --model wide_resnet", "--depth"), ("--load nowhere.pt", "nowhere.pt"),
    ("--runs 2 --export a.pt", "--runs"), ("--export nowhere/a.pt", "nowhere"),
    ("--export a.pt --stage det", "--export"), ("--keep-layers nothing", "--keep-layers"),
    ("--keep-layers 0 3 7 9 11", "no convolution or linear"), ("--tau-d word", "--tau-d"),
    ("--model torchvision/nothing", "--model torchvision/nothing"),
    ("--model torchvision/resnet18 --weights absent.pt", "absent.pt"), ("--eval", "train first")])
def test_misuse_is_one_line_before_anything_is_trained(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        gbnn2d.main([*options(tmp_path), "--name", "misuse", *argv.split()])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.pt"))


def test_files_that_are_no_exports(story, tmp_path):
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
            gbnn2d.main(["--load", str(path), "--device", "cpu", "--out-dir", str(tmp_path)])
        assert "\n" not in str(error.value)


def test_pretrained_networks(tmp_path):
    """A state dict is stage det; GoogLeNet's two other heads are left out."""
    net = torchvision.models.googlenet(weights=None, num_classes=4, init_weights=False)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    net = gbnn2d.torchvision_network("googlenet", str(tmp_path / "net.pt"), 4, (3, 32, 32))
    assert net.train()(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    assert not any("aux" in name for name in gbnn2d.Layout(net).shapes)
    own_folder(tmp_path)
    name = "shufflenet_v2_x0_5"
    net = getattr(torchvision.models, name)(weights=None, num_classes=4)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    rows = gbnn2d.main(options(
        tmp_path, "--model", f"torchvision/{name}", "--weights", str(tmp_path / "net.pt"),
        "--dataset", f"folder:{tmp_path / 'own'}", "--ood", "-b", "8", "--mc", "1", "--limit-steps",
        "1", "--final-epochs", "1", "--workers", "0", "--tau-w", "1"))
    assert [*by_method(rows)] == METHODS and by_method(rows)["final"]["weights"] == 337_936
    assert not (tmp_path / "gbnn2d/run/seed1-det.pt").exists()
