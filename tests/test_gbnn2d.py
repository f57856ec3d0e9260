"""gbnn2d.py's Method and Model against brute force, closed forms and scikit-learn, in float64."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import ot
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm
from sklearn.cluster import KMeans
from sklearn.metrics import accuracy_score, log_loss
from sklearn.mixture import GaussianMixture
from torch import nn

import common
import data
import gbnn2d
from common import UserError

WORLD = common.World()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random_covariances(n, scale=1.0):
    a = scale**0.5 * torch.randn(n, 2, 2, dtype=torch.float64)
    s = a @ a.mT + 0.1 * scale * torch.eye(2)
    return torch.stack([s[:, 0, 0], s[:, 0, 1], s[:, 1, 1]], 1)


def matrix(s):
    return np.array([[s[0], s[1]], [s[1], s[2]]])


def cloud(n=3000):
    """Points of three Gaussians, and which one made each."""
    label = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 0], [4, 1], [-3, 5]], dtype=torch.float64)
    covariances = torch.tensor([[1.0, 0.3, 0.5], [0.4, -0.2, 0.6], [2.0, 0.9, 1.0]]).double()
    factors = gbnn2d.cholesky(covariances)
    noise = torch.randn(n, 2, dtype=torch.float64)
    x = torch.stack(gbnn2d.component_draws(centres[label], factors[label], noise), 1)
    return x, label, gbnn2d.Mixture(torch.full((3,), 1 / 3).double(), centres, covariances)


def exact_cells(x):
    """Every point its own cell: EM without binning."""
    return gbnn2d.Cells(torch.ones(len(x)).double(), x, torch.zeros(len(x), 3).double(),
                        torch.arange(len(x)).int(), torch.zeros(2).double(), torch.ones(2).double())


# ---- Sigma, outliers ----------------------------------------------------------------------------


def test_sigma_map_is_positive_and_round_trips():
    sigma = torch.logspace(-4, 2, 50).double()
    assert (gbnn2d.sigma_of(gbnn2d.rho_of(sigma)) / sigma - 1).abs().max() < 1e-9
    assert (gbnn2d.sigma_of(torch.linspace(-50, 50, 99)) > 0).all()
    published = gbnn2d.sigma_of(torch.tensor([math.log(1 - 3e-4) - 1e-3, 0.0]), "published")
    assert published[0] < 0 < published[1]


def test_outliers_are_large_in_magnitude():
    mu, gradient = 0.01 * torch.randn(1000), torch.rand(1000) * 1e-3
    mu[3], gradient[7] = -0.3, -5.0  # negative ones too
    mask = gbnn2d.outlier_mask(mu, gradient, 0.2, 0.01)
    assert mask[3] and mask[7] and mask.sum() == 11
    assert gbnn2d.outlier_mask(mu, gradient, 0.2, 0.0).sum() == 1
    assert gbnn2d.outlier_mask(mu, torch.ones(1000), 9.0, 0.01).all()  # ties: all of them
    assert gbnn2d.outlier_mask(mu[:50], gradient[:50].abs(), 9.0, 0.01).sum() == 1  # at least one


# ---- Gaussians in the plane ---------------------------------------------------------------------


def squared_distance(x, centres, covariances):
    """(x - c)^T S^-1 (x - c), by a solver."""
    return torch.stack([d @ torch.linalg.solve(torch.from_numpy(matrix(s)), d)
                        for d, s in zip(x - centres, covariances)])


def test_joint_density_and_distance_are_scipys():
    x, c, s = torch.randn(20, 2).double(), torch.randn(20, 2).double(), random_covariances(20)
    weights = torch.rand(20).double()
    mixture = gbnn2d.Mixture(weights / weights.sum(), c, s)
    right = np.stack([stats.multivariate_normal(c[k], matrix(s[k])).logpdf(x)
                      + math.log(mixture.weights[k]) for k in range(20)], 1)
    theta, peak = gbnn2d.natural_parameters(mixture)
    everyone = torch.arange(20).expand(20, 20)
    np.testing.assert_allclose(gbnn2d.log_joint(theta, gbnn2d.monomials(x), everyone, chunk=7),
                               right, rtol=1e-9)
    np.testing.assert_allclose(2 * (peak - torch.from_numpy(right).diagonal()),
                               squared_distance(x, c, s), rtol=1e-9)
    label = gbnn2d.assign(x, mixture, everyone).label
    np.testing.assert_allclose(gbnn2d.assign(x, mixture, everyone).squared,
                               squared_distance(x, c[label], s[label]), rtol=1e-9)


def test_quantile_is_chi_square_of_two():
    for level in (0.9, 0.95, 0.99):
        assert gbnn2d.chi_square_quantile(level) == pytest.approx(stats.chi2(2).ppf(level))
    assert gbnn2d.chi_square_quantile() == pytest.approx(5.991464547, abs=1e-9)


def test_wasserstein_is_the_general_formula():
    a, b = random_covariances(30), random_covariances(30)
    m, n = torch.randn(2, 30, 2).double()
    ours = gbnn2d.wasserstein(m, a, n, b)
    for i in range(30):
        p, q = matrix(a[i]), matrix(b[i])
        root = sqrtm(p)
        squared = ((m[i] - n[i]) ** 2).sum().item() + np.trace(
            p + q - 2 * np.real(sqrtm(root @ q @ root)))
        assert ours[i].item() == pytest.approx(math.sqrt(squared), rel=1e-9)
    assert torch.allclose(ours, gbnn2d.wasserstein(n, b, m, a), rtol=1e-12)
    assert gbnn2d.wasserstein(m, a, m, a).max() < 1e-7
    np.testing.assert_allclose(gbnn2d.wasserstein(m, a, n, a), (m - n).norm(dim=1), rtol=1e-6)
    np.testing.assert_allclose(gbnn2d.wasserstein(10 * m, 100 * a, 10 * n, 100 * b), 10 * ours,
                               rtol=1e-9)
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]],
                        dtype=torch.float64)
    full = lambda s: torch.stack([s[:, :2], s[:, 1:]], 1)
    turned = lambda s: (turn @ full(s) @ turn.T).flatten(1)[:, [0, 1, 3]]
    np.testing.assert_allclose(gbnn2d.wasserstein(m @ turn.T, turned(a), n @ turn.T, turned(b)),
                               ours, rtol=1e-9)
    third = torch.randn(30, 2).double()
    assert (ours <= gbnn2d.wasserstein(m, a, third, a) + gbnn2d.wasserstein(third, a, n, b)
            + 1e-9).all()
    zero, line = torch.zeros(1, 3).double(), torch.tensor([[1.0, 1.0, 1.0]]).double()
    assert gbnn2d.wasserstein(m[:1], zero, m[:1], line).item() == pytest.approx(math.sqrt(2))


# ---- The mixture --------------------------------------------------------------------------------


def test_cells_keep_all_moments():
    x = torch.cat([torch.randn(5000, 2).double(), 50 * torch.randn(20, 2).double()])
    x = x * torch.tensor([1e-2, 1e-5]) + torch.tensor([0.1, 1e-3])
    cells = gbnn2d.bin_points(x, bins=16, chunk=999)
    z = (x - cells.shift) / cells.scale
    assert cells.count.sum() == len(x)
    for c in (0, len(cells.count) // 2, len(cells.count) - 1):
        own = z[cells.index == c]
        assert len(own) == cells.count[c]
        np.testing.assert_allclose(cells.mean[c], own.mean(0), atol=1e-9)
        cov = np.cov(own.T.numpy(), bias=True).reshape(2, 2) if len(own) > 1 else np.zeros((2, 2))
        np.testing.assert_allclose(cells.scatter[c], cov[[0, 0, 1], [0, 1, 1]], atol=1e-9)


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_em_is_scikit_learns(steps):
    x, _, _ = cloud(1500)
    start = x[[0, 1, 2]] + 0.5
    near = gbnn2d.nearest(x, start, 1)
    first = gbnn2d.mixture_of(exact_cells(x), near, torch.ones(len(x), 1).double(), 3, 0.0)
    peer = GaussianMixture(3, reg_covar=0.0, max_iter=steps, tol=0.0, weights_init=first.weights,
                           means_init=first.centres, precisions_init=[
                               np.linalg.inv(matrix(s)) for s in first.covariances])
    peer.fit(x.numpy())
    ours, history = gbnn2d.fit_mixture(exact_cells(x), start, steps, reg=0.0, tolerance=-1.0)
    assert len(history) == steps and np.all(np.diff(history) > -1e-12)
    np.testing.assert_allclose(ours.weights, peer.weights_, rtol=1e-7)
    np.testing.assert_allclose(ours.centres, peer.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ours.covariances, peer.covariances_.reshape(3, 4)[:, [0, 1, 3]],
                               rtol=1e-6)


def test_em_with_counts_is_em_of_repeated_points():
    x, _, _ = cloud(300)
    times = torch.arange(300) % 4 + 1
    start = x[[0, 1, 2]]
    counted = exact_cells(x)._replace(count=times.double())
    a, b = (gbnn2d.fit_mixture(cells, start, 10, tolerance=-1.0)[0]
            for cells in (counted, exact_cells(x.repeat_interleave(times, 0))))
    for p, q in zip(a, b):
        np.testing.assert_allclose(p, q, rtol=1e-9)


def test_binned_em_is_close_to_exact_em():
    x, _, _ = cloud(20_000)
    cells = gbnn2d.bin_points(x, bins=256)
    start = (x[[0, 1, 2]] - cells.shift) / cells.scale
    _, binned = gbnn2d.fit_mixture(cells, start, 30)
    _, exact = gbnn2d.fit_mixture(exact_cells((x - cells.shift) / cells.scale), start, 30)
    assert len(cells.count) < 15_000 and abs(binned[-1] - exact[-1]) < 1e-4


def test_mixture_is_in_the_units_of_the_weights():
    x, _, true = cloud()
    x = x * torch.tensor([1e-2, 1e-6]) + torch.tensor([0.2, 1e-3])  # a fixed reg would swamp this
    mixture, cells, _ = gbnn2d.learn_mixture(x, 3, torch.Generator().manual_seed(0))
    order = mixture.centres[:, 0].argsort()
    right = true.centres[true.centres[:, 0].argsort()] * torch.tensor([1e-2, 1e-6])
    np.testing.assert_allclose(mixture.centres[order] - torch.tensor([0.2, 1e-3]).double(), right,
                               atol=2e-3)
    assert mixture.weights.sum().item() == pytest.approx(1, abs=1e-12)
    sharing = gbnn2d.assign_all(x, cells, mixture)
    assert 0.03 < len(sharing.rim) / len(x) < 0.07
    assigned = gbnn2d.assign(x, mixture, torch.arange(3).expand(len(x), 3))  # not streamed
    assert torch.equal(sharing.label.long(), assigned.label)
    assert torch.equal(sharing.rim, (assigned.squared > -2 * math.log(0.05)).nonzero()[:, 0])
    np.testing.assert_allclose(sharing.alpha, assigned.alpha[sharing.rim], rtol=1e-6)


def test_outside_fraction_of_the_generating_component():
    x, label, true = cloud(15_000)
    squared = gbnn2d.assign(x, true, label[:, None]).squared
    assert (squared > gbnn2d.chi_square_quantile()).double().mean().item() == pytest.approx(
        0.05, abs=3 * math.sqrt(0.05 * 0.95 / 15_000))


def test_assignment_is_by_posterior_and_alphas_are_of_the_first_two():
    x, _, mixture = cloud(200)
    mixture = mixture._replace(weights=torch.tensor([0.7, 0.2, 0.1]).double())
    everyone = torch.arange(3).expand(200, 3)
    assigned = gbnn2d.assign(x, mixture, everyone)
    joint = np.stack([stats.multivariate_normal(mixture.centres[k], matrix(mixture.covariances[k]))
                      .logpdf(x) + math.log(mixture.weights[k]) for k in range(3)], 1)
    order = np.argsort(-joint, 1)
    np.testing.assert_array_equal(assigned.label, order[:, 0])
    np.testing.assert_array_equal(assigned.second, order[:, 1])
    one, two = (np.exp(joint[np.arange(200), order[:, k]]) for k in (0, 1))
    np.testing.assert_allclose(assigned.alpha, one / (one + two), rtol=1e-9)


def test_kmeans_plus_plus_is_repeatable_and_spreads():
    x, _, _ = cloud()
    cells = exact_cells(x)
    a, b = (gbnn2d.kmeans_plus_plus(cells, 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b) and len(a.unique(dim=0)) == 5
    same = exact_cells(torch.ones(10, 2).double())
    assert len(gbnn2d.kmeans_plus_plus(same, 4, torch.Generator().manual_seed(0))) == 1


# ---- Merging ------------------------------------------------------------------------------------


def small_mixture(k=40, scale=1.0):
    weights = torch.rand(k).double() + 0.1
    return gbnn2d.Mixture(weights / weights.sum(), scale * torch.randn(k, 2).double(),
                          scale**2 * random_covariances(k, 0.01))


def moments(mixture):
    """Weight, mean, covariance of a whole mixture."""
    w, c, s = mixture
    mean = w @ c
    u, v = (c - mean).T
    outer = torch.stack([u * u, u * v, v * v], 1)
    return w.sum(), mean, w @ (s + outer)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0, math.inf])
def test_merging_keeps_the_moments_and_leaves_no_pair(tau):
    mixture, gradient = small_mixture(), torch.rand(40).double()
    merged, g, number = gbnn2d.merge_mixture(mixture, gradient, tau, tau_v=math.inf)
    k = len(merged.weights)
    assert k == {0.0: 40, math.inf: 1}.get(tau, k) and len(g) == k
    assert sorted(number.unique().tolist()) == list(range(k))
    for a, b in zip(moments(mixture), moments(merged)):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    for new in range(k):  # each is the moment match of its own members
        own = number == new
        w, c, s = (t[own] for t in mixture)
        total, mean, cov = moments(gbnn2d.Mixture(w / w.sum(), c, s))
        np.testing.assert_allclose(merged.weights[new], w.sum(), rtol=1e-11)
        np.testing.assert_allclose(merged.centres[new], mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(merged.covariances[new], cov, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(g[new], (w @ gradient[own]) / w.sum(), rtol=1e-9)
    for i, j in itertools.combinations(range(k), 2):
        assert gbnn2d.wasserstein(merged.centres[i], merged.covariances[i], merged.centres[j],
                                  merged.covariances[j]) >= tau


def test_merging_scales_with_the_data_and_respects_each_threshold():
    mixture, gradient = small_mixture(), torch.arange(40).double()
    _, _, one = gbnn2d.merge_mixture(mixture, gradient, 0.4, tau_v=math.inf)
    ten = gbnn2d.Mixture(mixture.weights, 10 * mixture.centres, 100 * mixture.covariances)
    assert torch.equal(one, gbnn2d.merge_mixture(ten, gradient, 4.0, tau_v=math.inf)[2])
    assert one.max() < 39
    assert gbnn2d.merge_mixture(mixture, gradient, 0.4, tau_g=0.5, tau_v=math.inf)[2].max() == 39
    assert gbnn2d.merge_mixture(mixture, gradient, 0.4, tau_v=0.0)[2].max() == 39


def test_the_closest_pair_merges_first():
    centres = torch.tensor([[0.0, 0], [1.0, 0], [1.4, 0]]).double()
    mixture = gbnn2d.Mixture(torch.ones(3).double() / 3, centres, torch.tensor(
        [[1e-4, 0, 1e-4]]).double().repeat(3, 1))
    merged, _, number = gbnn2d.merge_mixture(mixture, torch.zeros(3), 1.1, tau_v=math.inf)
    assert number.tolist() == [0, 1, 1] and len(merged.weights) == 2  # then 1.2 apart


# ---- KL -----------------------------------------------------------------------------------------


def test_kl_in_own_units_is_that_of_the_gaussians():
    base, shift, shape = random_covariances(6), 0.5 * torch.randn(6, 2).double(), \
        0.3 * torch.randn(6, 3).double()
    centres, factors = torch.randn(6, 2).double(), gbnn2d.cholesky(base)
    now_c, now_l = gbnn2d.moved(centres, factors, shift, shape)
    now = gbnn2d.covariances_of(now_l)
    total = 0.0
    for i in range(6):
        s0, s, d = matrix(base[i]), matrix(now[i]), (now_c[i] - centres[i]).numpy()
        inverse = np.linalg.inv(s0)
        total += 0.5 * (np.trace(inverse @ s) + d @ inverse @ d - 2
                        + math.log(np.linalg.det(s0) / np.linalg.det(s)))
    assert gbnn2d.plane_kl(shift, shape).item() == pytest.approx(total, rel=1e-10)
    assert gbnn2d.plane_kl(0 * shift, 0 * shape) == 0


def test_gaussian_kl_is_torchs():
    mu, sigma = torch.randn(9).double(), torch.rand(9).double() + 0.1
    p, q = torch.distributions.Normal(mu, sigma), torch.distributions.Normal(mu.flip(0) * 2, 0.7)
    right = torch.distributions.kl_divergence(p, q)
    np.testing.assert_allclose(gbnn2d.gaussian_kl(mu, sigma, mu.flip(0) * 2, torch.tensor(0.7)),
                               right, rtol=1e-6)


# ---- Shared weights -----------------------------------------------------------------------------


def tiny_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


def tiny_code(n, k=3, outliers=(0, 5), ellipse=(2, 9)):
    labels = torch.arange(n) % k
    labels[list(outliers)] = -1
    return {"labels": labels.short(), "outliers": torch.tensor(outliers),
            "outlier_mu": torch.tensor([0.5, -0.4]), "outlier_sigma": torch.tensor([0.01, 0.02]),
            "ellipse": torch.tensor(ellipse), "ellipse_second": torch.tensor([0, 1]).short(),
            "ellipse_alpha": torch.tensor([0.7, 0.6]), "centres": torch.tensor(
                [[0.1, 0.02], [-0.2, 0.03], [0.0, 0.01]]), "factors": torch.tensor(
                [[0.02, 0.004, 0.003], [0.01, 0.0, 0.002], [0.03, -0.002, 0.001]])}


def tiny_shared(**options):
    net = tiny_net()
    layout = gbnn2d.Layout(net)
    return gbnn2d.Shared(net, layout, tiny_code(layout.size), **options)


def test_layout_is_one_order_and_round_trips():
    net = tiny_net()
    layout = gbnn2d.Layout(net)
    assert layout.size == 4 * 9 + 3 * 16 and layout.names == {"0.weight", "3.weight"}
    flat = layout.flatten(dict(net.named_parameters()))
    for name, value in layout.split(flat).items():
        assert torch.equal(value, net.get_parameter(name))
    assert gbnn2d.Layout(net, ["0"]).size == 48
    with pytest.raises(UserError, match="--keep-layers"):
        gbnn2d.Layout(net, ["nothing"])


@pytest.mark.parametrize("draw, variance, correlation", [
    ("hier", lambda c, s: s[0] + c[1] ** 2 + s[2], lambda c, s, v: s[0] / v),
    ("shared", lambda c, s: s[0], lambda c, s, v: 1.0),
    ("perweight", lambda c, s: c[1] ** 2, lambda c, s, v: 0.0)])
def test_moments_of_the_draws(draw, variance, correlation):
    shared = tiny_shared(draw=draw)
    with torch.no_grad():
        draws = torch.stack([shared.draw() for _ in range(10_000)]).double()
    covariances = gbnn2d.covariances_of(shared.factors)
    for k in range(3):
        rows = [i for i in range(shared.layout.size) if shared.labels[i] == k and i not in (2, 9)]
        c, s = shared.centres[k].double(), covariances[k].double()
        v = float(variance(c, s))
        error = 4 * math.sqrt(v / 1e4)
        assert draws[:, rows].mean().item() == pytest.approx(c[0].item(), abs=error)
        assert draws[:, rows[0]].var().item() == pytest.approx(v, rel=0.06)
        pair = np.corrcoef(draws[:, rows[0]], draws[:, rows[1]])[0, 1]
        assert pair == pytest.approx(float(correlation(c, s, v)), abs=0.05)
        if draw == "shared":
            assert torch.equal(draws[:, rows[0]], draws[:, rows[1]])
    assert draws[:, 0].mean().item() == pytest.approx(0.5, abs=1e-3)  # outliers: their own
    assert draws[:, 5].std().item() == pytest.approx(0.02, rel=0.06)
    blended = 0.7 * shared.centres[2, 0] + 0.3 * shared.centres[0, 0]
    assert draws[:, 2].mean().item() == pytest.approx(blended.item(), abs=2e-3)


@pytest.mark.parametrize("blend", ["linear", "choose", "mean"])
def test_blends(blend):
    shared = tiny_shared(blend=blend)
    with torch.no_grad():
        draws = torch.stack([shared.draw() for _ in range(4000)])[:, 2].double()
    centre = 0.7 * shared.centres[2, 0] + 0.3 * shared.centres[0, 0]
    assert draws.mean().item() == pytest.approx(centre.item(), abs=3e-3)
    spread = draws.std().item()
    assert spread < 1e-8 if blend == "mean" else spread > 0.01
    if blend == "choose":  # a true mixture of two is wider than the blend
        assert spread > 0.04


def test_gradient_through_the_gather_is_the_loop():
    shared = tiny_shared().double()
    torch.manual_seed(3)
    target = torch.randn(shared.layout.size).double()
    with torch.no_grad():
        shared.shift.copy_(torch.randn(3, 2))
        shared.shape.copy_(0.1 * torch.randn(3, 3))

    def loss():
        torch.manual_seed(4)
        return ((shared.draw() - target) ** 2).sum()

    loss().backward()
    for parameter in (shared.shift, shared.shape, shared.outlier_shift, shared.outlier_scale):
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            step, at = 1e-6, flat[i].item()
            values = []
            for sign in (1, -1):
                flat[i] = at + sign * step
                with torch.no_grad():
                    values.append(loss().item())
            flat[i] = at
            assert grad[i].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4,
                                                   abs=1e-6)


def test_unused_components_get_no_gradient_and_kl_counts_latents_once():
    net = tiny_net()
    layout = gbnn2d.Layout(net)
    code = tiny_code(layout.size)
    code["labels"] = torch.where(code["labels"] == 2, 1, code["labels"]).short()
    code["ellipse_second"] = torch.tensor([0, 0]).short()
    shared = gbnn2d.Shared(net, layout, code)
    shared.draw().square().sum().backward()
    assert (shared.shift.grad[2] == 0).all() and (shared.shift.grad[:2] != 0).any()
    assert shared.kl() == 0
    with torch.no_grad():
        shared.shift += 0.1
    one, other = shared.kl().item(), tiny_shared()
    with torch.no_grad():
        other.shift += 0.1
    assert one == pytest.approx(other.kl().item()) == pytest.approx(3 * 0.01)


def test_a_step_changes_the_centres_and_not_the_prior():
    shared = tiny_shared()
    base = shared.centres.clone()
    optimiser = torch.optim.Adam([p for p in shared.parameters() if p.requires_grad], lr=0.01)
    (shared(torch.randn(5, 1, 4, 4)).square().sum() + shared.kl()).backward()
    optimiser.step()
    assert (shared.current()[0] - base).abs().max() > 1e-5 and torch.equal(shared.centres, base)
    assert shared.kl() > 0
    assert not any(p.requires_grad for n, p in shared.net.named_parameters()
                   if n in shared.layout.names)


def test_draws_differ_unless_there_is_no_spread():
    shared = tiny_shared().eval()
    x = torch.randn(2, 1, 4, 4)
    assert not torch.equal(shared(x), shared(x))
    shared.factors.zero_()
    shared.centres[:, 1] = 0
    shared.outlier_sigma.zero_()
    assert torch.equal(shared(x), shared(x))


def test_export_and_load_predict_the_same(tmp_path):
    args = gbnn2d.parse_args(["--width", "0.05", "--dataset", "glyphs"])
    net = gbnn2d.make_network(args, 10, (1, 28, 28))
    layout = gbnn2d.Layout(net)
    shared = gbnn2d.Shared(net, layout, tiny_code(layout.size)).eval()
    with torch.no_grad():
        shared.shift.normal_()
        shared.shape.normal_(0, 0.1)
        shared.outlier_scale.normal_()
    path = tmp_path / "small.pt"
    gbnn2d.export_shared(path, shared, args, 10, (1, 28, 28))
    loaded, _, classes, shape = gbnn2d.load_shared(path)
    assert (classes, shape) == (10, (1, 28, 28))
    x, outputs = torch.randn(3, 1, 28, 28), []
    for module in (shared, loaded):
        torch.manual_seed(7)
        with torch.no_grad():
            outputs.append(module(x))
    assert torch.equal(*outputs)
    report = gbnn2d.compression_report(shared)
    assert report["counts/trainable"] == 2 * 2 + 5 * 3
    assert report["counts/inliers"] + report["counts/outliers"] == report["counts/weights"]


def test_a_code_is_whole():
    """Every weight an inlier or an outlier; ellipse points are inliers outside their ellipse."""
    points, mixture = torch.cat([cloud(900)[0], 9 * torch.ones(30, 2).double()]), cloud(3)[2]
    outlier = torch.arange(930) >= 900
    inliers = (~outlier).nonzero().flatten()
    sharing = gbnn2d.assign_all(points[inliers], gbnn2d.bin_points(points[inliers]), mixture)
    code = gbnn2d.make_code(points, outlier, inliers, mixture, sharing)
    labels = code["labels"].long()
    assert (labels == -1).sum() == len(code["outliers"]) == 30 and labels.dtype == torch.int64
    assert not set(code["ellipse"].tolist()) & set(code["outliers"].tolist())
    s = gbnn2d.covariances_of(code["factors"].double())
    squared = squared_distance(points, code["centres"].double()[labels], s[labels])
    rim = (squared > gbnn2d.chi_square_quantile()) & ~outlier
    assert set(rim.nonzero().flatten().tolist()) == set(code["ellipse"].tolist()) != set()


def test_parameter_counts():
    args = gbnn2d.parse_args(["--dataset", "cifar100"])
    count = lambda model, k: gbnn2d.Layout(gbnn2d.make_network(
        gbnn2d.argparse.Namespace(**{**vars(args), "model": model}), k, (3, 32, 32))).size
    assert count("resnet18", 100) == 11_210_432 and count("resnet18", 10) == 11_164_352
    assert count("wide_resnet", 100) == 36_518_832
    large = gbnn2d.make_network(args, 1000, (3, 224, 224))
    assert gbnn2d.Layout(large).size == 11_678_912


# ---- More of the plane --------------------------------------------------------------------------


def test_wasserstein_is_pots():
    a, b = random_covariances(20), random_covariances(20)
    m, n = torch.randn(2, 20, 2).double()
    ours = gbnn2d.wasserstein(m, a, n, b)
    for i in range(20):
        p, q = matrix(a[i]), matrix(b[i])
        assert np.abs(p @ q - q @ p).max() > 1e-3  # they do not commute
        peer = ot.gaussian.bures_wasserstein_distance(m[i].numpy(), n[i].numpy(), p, q)
        assert ours[i].item() == pytest.approx(float(peer), rel=1e-9)


def test_merging_equal_components_keeps_the_weight():
    """Nearest neighbours of a doubled centre are its twin and itself, in any order."""
    one = small_mixture(12)
    twice = gbnn2d.Mixture(*(torch.cat([t, t]) for t in one))
    twice = twice._replace(weights=twice.weights / 2)
    merged, _, number = gbnn2d.merge_mixture(twice, torch.zeros(24), 1e-6, tau_v=math.inf)
    assert len(merged.weights) == 12 and torch.equal(number[:12], number[12:])
    np.testing.assert_allclose(merged.weights[number[:12]], one.weights, rtol=1e-12)
    np.testing.assert_allclose(merged.centres[number[:12]], one.centres, rtol=1e-12)
    np.testing.assert_allclose(merged.covariances[number[:12]], one.covariances, rtol=1e-12)


def test_nearest_distances_are_to_others_also_where_centres_are_equal():
    mixture = gbnn2d.Mixture(torch.full((3,), 1 / 3).double(), torch.zeros(3, 2).double(),
                             torch.tensor([[1.0, 0, 1], [4, 0, 4], [16, 0, 16]]).double())
    np.testing.assert_allclose(gbnn2d.nearest_distances(mixture), 2**0.5 * np.array([1, 1, 2]))


@pytest.mark.parametrize("k", [1, 2, 9, 40])
def test_one_component_is_left_of_any_number(k):
    merged, gradient, number = gbnn2d.merge_mixture(small_mixture(k), torch.rand(k), math.inf,
                                                    tau_v=math.inf)
    assert len(merged.weights) == len(gradient) == 1 and number.tolist() == [0] * k
    assert merged.weights.sum().item() == pytest.approx(1, abs=1e-12)


def test_kmeans_mixture_is_the_moments_of_each_centres_points():
    x, _, _ = cloud(500)
    x = x * torch.tensor([1e-2, 1e-4]) + torch.tensor([0.1, 1e-3])
    mixture, cells, history = gbnn2d.learn_mixture(x, 6, torch.Generator().manual_seed(0),
                                                   "kmeans", bins=2**11)
    assert history == [] and len(cells.count) > 480  # all but a few points have their own cell
    centres = gbnn2d.kmeans(cells, gbnn2d.kmeans_plus_plus(
        cells, 6, torch.Generator().manual_seed(0)))
    z = (x - cells.shift) / cells.scale
    label = torch.cdist(z, centres).argmin(1)
    for k in range(6):
        own = z[label == k]
        cov = np.cov(own.T.numpy(), bias=True) + 1e-6 * np.eye(2)
        cov = cov * np.outer(cells.scale, cells.scale)
        assert mixture.weights[k].item() == pytest.approx(len(own) / 500, abs=1e-12)
        np.testing.assert_allclose(mixture.centres[k], x[label == k].mean(0), rtol=1e-9)
        np.testing.assert_allclose(matrix(mixture.covariances[k]), cov, rtol=1e-8, atol=1e-18)


def test_kmeans_is_scikit_learns_from_the_same_start():
    x, _, _ = cloud(600)
    times = torch.arange(600) % 3 + 1
    cells = exact_cells(x)._replace(count=times.double())
    peer = KMeans(7, init=x[:7].numpy(), n_init=1, max_iter=100, tol=0.0).fit(
        x.numpy(), sample_weight=times.numpy())
    assert peer.n_iter_ > 3
    np.testing.assert_allclose(gbnn2d.kmeans(cells, x[:7], 100), peer.cluster_centers_, rtol=1e-9,
                               atol=1e-12)


def test_one_component_has_the_moments_of_the_points_whatever_the_bins():
    x, _, _ = cloud(900)
    cells = gbnn2d.bin_points(x, bins=3)
    everyone = torch.zeros(len(cells.count), 1).long()
    one = gbnn2d.mixture_of(cells, everyone, torch.ones(len(cells.count), 1).double(), 1, 0.0)
    z = ((x - cells.shift) / cells.scale).numpy()
    np.testing.assert_allclose(one.centres[0], z.mean(0), atol=1e-12)
    np.testing.assert_allclose(matrix(one.covariances[0]), np.cov(z.T, bias=True), rtol=1e-10)


def test_binned_em_of_twelve_is_close_to_scikit_learns():
    """Wide and narrow ones, the mixture scored on the points: within 1e-4 nats a point."""
    torch.manual_seed(2)
    n, centres, made_by = 20_000, 4 * torch.randn(12, 2).double(), torch.arange(20_000) % 12
    width = 0.3 + torch.rand(12, 2).double()
    x = centres[made_by] + torch.randn(n, 2).double() * width[made_by]
    cells = gbnn2d.bin_points(x, bins=1024)
    z = (x - cells.shift) / cells.scale
    start = (centres + 0.3 - cells.shift) / cells.scale
    mixture, history = gbnn2d.fit_mixture(cells, start, 40, tolerance=-1.0)
    first = gbnn2d.mixture_of(exact_cells(z), gbnn2d.nearest(z, start, 1),
                              torch.ones(n, 1).double(), 12, 1e-6)
    peer = GaussianMixture(12, reg_covar=1e-6, max_iter=40, tol=0.0, weights_init=first.weights,
                           means_init=first.centres, precisions_init=[
                               np.linalg.inv(matrix(s)) for s in first.covariances])
    right = peer.fit(z.numpy()).score(z.numpy())
    everyone = torch.arange(12).expand(n, 12)
    ours = gbnn2d.log_joint(gbnn2d.natural_parameters(mixture)[0], gbnn2d.monomials(z), everyone)
    assert ours.logsumexp(1).mean().item() == pytest.approx(right, abs=1e-4)
    assert history[-1] == pytest.approx(right, abs=1e-4) and history[-1] > history[0] + 1e-2


def test_kmeans_plus_plus_draws_by_count_times_squared_distance():
    x = torch.tensor([[0.0, 0], [1, 0], [3, 0], [0, 2]]).double()
    cells = exact_cells(x)._replace(count=torch.tensor([5.0, 1, 2, 4]).double())
    generator, pairs = torch.Generator().manual_seed(0), np.zeros((4, 4))
    for _ in range(6000):  # the set of two: P(i) P(j | i) + P(j) P(i | j)
        i, j = sorted(int((x == c).all(1).nonzero()) for c in
                      gbnn2d.kmeans_plus_plus(cells, 2, generator))
        pairs[i, j] += 1 / 6000
    count, squared = cells.count.numpy(), torch.cdist(x, x).square().numpy()
    both = count[:, None] / count.sum() * (count * squared) / (squared @ count)[:, None]
    np.testing.assert_allclose(pairs, np.triu(both + both.T), atol=4 * math.sqrt(0.25 / 6000))


def test_a_million_points_are_all_in_a_cell():
    """float32 points, whose quantiles are of a part of them: every index in range, none lost."""
    n = 1_000_003
    x = torch.randn(n, 2) * torch.tensor([0.03, 1e-4]) + torch.tensor([0.0, 1e-3])
    x[-1] = torch.tensor([9.0, 1.0])  # the last point, far outside
    cells = gbnn2d.bin_points(x, bins=64)
    assert cells.count.sum().item() == n and cells.index.shape == (n,)
    assert 0 <= cells.index.min() and cells.index.max() == len(cells.count) - 1
    assert torch.equal(torch.bincount(cells.index, minlength=len(cells.count)).double(),
                       cells.count)
    z = (x.double() - cells.shift) / cells.scale
    np.testing.assert_allclose(cells.count @ cells.mean / n, z.mean(0), atol=1e-9)
    np.testing.assert_allclose(z.std(0), 1, rtol=1e-9)


# ---- Labels -------------------------------------------------------------------------------------


def test_labels_must_fit_in_int16():
    x, k = cloud(30)[0], 32768
    mixture = gbnn2d.Mixture(torch.full((k,), 1 / k).double(), torch.randn(k, 2).double(),
                             torch.tensor([[1.0, 0, 1]]).double().repeat(k, 1))
    with pytest.raises(ValueError, match="32768 components"):
        gbnn2d.assign_all(x, gbnn2d.bin_points(x), mixture)
    most = gbnn2d.assign_all(x, gbnn2d.bin_points(x), gbnn2d.Mixture(*(t[:-1] for t in mixture)))
    assert most.label.dtype == torch.int16 and most.label.min() >= 0
    with pytest.raises(UserError, match="--k0"):
        gbnn2d.parse_args(["--k0", "32768"])
    assert gbnn2d.parse_args(["--k0", "32767"]).k0 == 32767


def test_compact_leaves_components_that_have_members():
    x, _, mixture = cloud(600)
    mixture = gbnn2d.Mixture(  # one is far away, one nowhere the most probable
        torch.tensor([0.3, 0.1, 0.3, 1e-9, 0.3]).double(), mixture.centres[[0, 0, 1, 1, 2]],
        mixture.covariances[[0, 0, 1, 1, 2]])
    mixture.centres[1] = 99.0
    compacted, sharing = gbnn2d.compact(x, gbnn2d.bin_points(x), mixture, 0.95)
    assert len(compacted.weights) == 3 and sharing.label.unique().tolist() == [0, 1, 2]
    np.testing.assert_allclose(compacted.weights, 1 / 3, rtol=1e-12)
    assert torch.equal(compacted.centres, mixture.centres[[0, 2, 4]])
    assert (sharing.second < 3).all()


# ---- Networks on data ---------------------------------------------------------------------------


def tiny_set(n=50, k=3):
    images = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8)
    return data.ImageSet("tiny", images, torch.arange(n) % k, k, (0.5,), (0.3,))


def tiny_args(*more):
    return gbnn2d.parse_args(["--device", "cpu", "--batch-size", "16", *more])


def tiny_field(*more):
    net = tiny_net()
    return gbnn2d.MeanField(net, gbnn2d.Layout(net), tiny_args(*more))


def test_gradient_is_in_the_order_of_the_weights():
    """Mean over batches of |gradient|, by autograd of the plain network."""
    field, train_set, args = tiny_field(), tiny_set(), tiny_args()
    with torch.no_grad():
        field.rho.fill_(-60)  # no noise
    ours = gbnn2d.gradient_magnitude(field, train_set, args, WORLD)
    net, total = tiny_net().eval(), 0
    net.load_state_dict(field.net.state_dict())
    batches = list(gbnn2d.make_loader(train_set, args, WORLD).epoch())
    for batch in batches:
        net.zero_grad()
        nn.functional.cross_entropy(net(batch.images), batch.labels).backward()
        total = total + torch.cat([p.grad.flatten().abs() for p in (net[0].weight, net[3].weight)])
    assert len(batches) == 4  # the last of 2 images
    np.testing.assert_allclose(ours, total / 4, rtol=1e-4, atol=1e-7)


def test_writing_back_rho_and_prior_are_in_the_order_of_the_weights():
    field = tiny_field("--sigma-init", "0.05", "--prior", "pretrained")
    x = torch.randn(5, 1, 4, 4)
    weights = torch.randn(field.layout.size)
    plain = tiny_net().eval()
    with torch.no_grad():
        plain[3].bias.copy_(field.net[3].bias)
        plain[0].weight.copy_(weights[:36].view(4, 1, 3, 3))
        plain[3].weight.copy_(weights[36:].view(3, 16))
        torch.testing.assert_close(field.eval()(x, weights), plain(x))
    rms = [field.net[i].weight.square().mean().sqrt().item() for i in (0, 3)]
    for part, start, stop in ((0, 0, 36), (1, 36, 84)):
        np.testing.assert_allclose(field.sigma.detach()[start:stop], 0.05 * rms[part], rtol=1e-4)
        np.testing.assert_allclose(field.prior_sd[start:stop], rms[part], rtol=1e-6)
    assert torch.equal(field.prior_mu, field.mu) and rms[0] != pytest.approx(rms[1], rel=0.1)


def test_prediction_leaves_running_statistics_alone():
    shared, args = tiny_shared().train(), tiny_args()
    before = {k: v.clone() for k, v in shared.net.state_dict().items()}
    gbnn2d.predict(shared, tiny_set(), args, WORLD, 2)
    assert all(torch.equal(v, before[k]) for k, v in shared.net.state_dict().items())


def test_refreshed_statistics_are_the_mean_over_batches_of_drawn_weights():
    shared, train_set, args = tiny_shared(), tiny_set(), tiny_args("--bn-batches", "3")
    shared.net[1].running_mean.fill_(77)
    gbnn2d.refresh_batch_norm(shared, train_set, args, WORLD)
    means, variances, loader = [], [], gbnn2d.make_loader(train_set, args, WORLD, train=True)
    for step, batch in zip(range(3), loader.epoch(0)):
        common.seed_all(args.seed, len(gbnn2d.STAGES), step)
        with torch.no_grad():
            h = nn.functional.conv2d(batch.images, shared.draw()[:36].view(4, 1, 3, 3))
        h = h.transpose(0, 1).flatten(1).double()
        means.append(h.mean(1))
        variances.append(h.var(1))
    norm = shared.net[1]
    np.testing.assert_allclose(norm.running_mean, torch.stack(means).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var, torch.stack(variances).mean(0), rtol=1e-4)
    assert norm.momentum == 0.1 and not norm.training and norm.num_batches_tracked == 3
    assert (means[0] - means[1]).abs().max() > 1e-3


@pytest.mark.parametrize("stage, fixed", [("stoch", False), ("final", True)])
def test_the_last_stage_trains_batch_norms_scale_only(stage, fixed):
    shared = tiny_shared()
    gbnn2d.set_training(shared, stage)
    norm = shared.net[1]
    mean, scale = norm.running_mean.clone(), norm.weight.detach().clone()
    optimiser = gbnn2d.make_optimiser(shared, stage, tiny_args("--lr-mu", "0.01"))
    shared(torch.randn(9, 1, 4, 4) + 1).square().sum().backward()
    optimiser.step()
    assert torch.equal(norm.running_mean, mean) == fixed
    assert (norm.weight - scale).abs().min() > 1e-4 and shared.training


def test_prediction_and_its_metrics_by_hand():
    """One draw for the whole set at a time; means of probabilities, of logits, and votes."""
    shared, test_set, args = tiny_shared().eval(), tiny_set(700), tiny_args()
    with torch.no_grad():
        shared.factors *= 30  # draws that disagree
        ours = gbnn2d.predict(shared, test_set, args, WORLD, 3)
        x = (test_set.images / 255.0 - 0.5) / 0.3
        logits = []
        for sample in range(3):
            common.seed_all(args.seed, 1000 + sample)
            logits.append(shared(x, shared.draw()).double())
    logits = torch.stack(logits)
    probs, labels = logits.softmax(2), test_set.labels
    votes = nn.functional.one_hot(logits.argmax(2), 3).double().mean(0)
    np.testing.assert_allclose(ours.probs, probs.mean(0), atol=1e-5)
    np.testing.assert_allclose(ours.logits, logits.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.votes, votes, atol=1e-12)
    np.testing.assert_allclose(ours.aleatoric, stats.entropy(probs, axis=2).mean(0), atol=1e-4)
    metrics = gbnn2d.predictive_metrics(ours, labels)
    single = [log_loss(labels, p) for p in probs]
    by_logits = logits.mean(0).softmax(1)
    assert metrics["nll"] == pytest.approx(log_loss(labels, probs.mean(0)), rel=1e-4)
    assert metrics["nll_samples"] == pytest.approx(np.mean(single), rel=1e-4)
    assert metrics["nll_logits"] == pytest.approx(log_loss(labels, by_logits), rel=1e-4)
    assert metrics["nll"] < metrics["nll_samples"] - 1e-3  # Jensen
    for kind, p in (("", probs.mean(0)), ("_logits", by_logits), ("_votes", votes)):
        right = accuracy_score(labels, p.argmax(1))
        assert metrics[f"accuracy{kind}"] == pytest.approx(right, abs=1e-12)
    one_hot = nn.functional.one_hot(labels, 3)
    assert metrics["brier"] == pytest.approx(
        (probs.mean(0) - one_hot).square().sum(1).mean().item(), rel=1e-4)
    assert abs(metrics["nll_logits"] - metrics["nll"]) > 1e-3
    assert abs(metrics["ece15_logits"] - metrics["ece15"]) > 1e-3


def test_scores_of_uncertainty_by_hand():
    draws = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]]).double()
    p = gbnn2d.Prediction(draws.mean(0), draws.log().mean(0), draws.round().mean(0),
                          torch.from_numpy(stats.entropy(draws, axis=2).mean(0)), 0.0)
    scores = gbnn2d.ood_scores(p)
    np.testing.assert_allclose(scores["entropy"], math.log(2))
    mutual = math.log(2) - stats.entropy([0.9, 0.1])
    np.testing.assert_allclose(scores["mutual_information"], [mutual, 0], atol=1e-12)
    np.testing.assert_allclose(scores["max_prob"], 0.5)
    assert gbnn2d.ood_scores(p, several=False).keys() == {"entropy", "max_prob"}


# ---- Codes --------------------------------------------------------------------------------------


def code_of(points, outlier, mixture):
    inliers = (~outlier).nonzero().flatten()
    x = points[inliers]
    sharing = gbnn2d.assign_all(x, gbnn2d.bin_points(x, 2048), mixture)
    return gbnn2d.make_code(points, outlier, inliers, mixture, sharing)


@pytest.mark.parametrize("draw", ["hier", "shared", "perweight"])
def test_all_outliers_are_the_mean_field_network(draw, monkeypatch):
    """The same noise, the same draws, bit for bit."""
    field = tiny_field("--sigma-init", "0.5")
    n = field.layout.size
    code = tiny_code(n, outliers=tuple(range(n)), ellipse=())
    code |= {"outlier_mu": field.mu.detach(), "outlier_sigma": field.sigma.detach(),
             "ellipse_second": torch.zeros(0).short(), "ellipse_alpha": torch.zeros(0)}
    shared = gbnn2d.Shared(field.net, field.layout, code, draw).eval()
    noise, x = torch.randn(n), torch.randn(5, 1, 4, 4)
    monkeypatch.setattr(torch, "randn_like", lambda t: noise if t.ndim == 1 else torch.ones(3, 2))
    assert torch.equal(shared(x), field.eval()(x))
    assert (shared.draw() - field.mu).abs().max() > 0.01


def test_a_component_for_each_weight_is_the_mean_field_network():
    field = tiny_field("--sigma-init", "0.01")
    with torch.no_grad():
        field.rho += 0.1 * torch.randn_like(field.rho)
    n = field.layout.size
    points = torch.stack([field.mu, field.sigma], 1).detach()
    order = torch.randperm(n)
    mixture = gbnn2d.Mixture(torch.full((n,), 1 / n).double(), points[order].double(),
                             torch.tensor([[1e-16, 0, 1e-16]]).double().repeat(n, 1))
    code = code_of(points, torch.zeros(n, dtype=torch.bool), mixture)
    assert torch.equal(order[code["labels"].long()], torch.arange(n))
    assert len(code["ellipse"]) == len(code["outliers"]) == 0
    shared = gbnn2d.Shared(field.net, field.layout, code, "shared").eval()
    x = torch.randn(5, 1, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(shared(x), field.eval()(x, field.mu), rtol=1e-4, atol=1e-5)
        shared.draw_mode = "hier"
        draws = torch.stack([shared.draw() for _ in range(4000)])
    np.testing.assert_allclose(draws.std(0) / field.sigma.detach(), 1, atol=0.06)
    assert gbnn2d.layer_report(shared, field.mu.detach())["quantisation/0.weight"] < 1e-6


def lenet_codes(*more):
    args = tiny_args("--dataset", "glyphs", "--model", "lenet", "--limit-steps", "1", "--k0", "30",
                     "--min-cluster", "40", *more)
    common.seed_all(1)
    net = gbnn2d.make_network(args, 3, (1, 28, 28))
    field = gbnn2d.MeanField(net, gbnn2d.Layout(net), args)
    with torch.no_grad():
        field.rho += 0.3 * torch.randn_like(field.rho)
        field.mu[:40:9] = torch.tensor([-0.3, 0.21, -0.21, 0.3, 0.7])
    images = torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8)
    train_set = data.ImageSet("tiny", images, torch.arange(20) % 3, 3, (0.5,), (0.3,))
    return field, gbnn2d.build_codes(field, train_set, args, WORLD)


@pytest.mark.parametrize("kind", ["em", "kmeans"])
def test_codes_are_whole_and_repeatable(kind):
    """Labels contiguous, each in use, outliers alike before and after merging; bit for bit."""
    more = "--tau-d", "2e-2", "--gmm", kind
    field, codes = lenet_codes(*more)
    again = lenet_codes(*more)[1]
    sizes, n = [], field.layout.size
    for name in ("clustered", "merged"):
        code, other = codes[name], again[name]
        labels, k = code["labels"].long(), len(code["centres"])
        sizes.append(k)
        assert labels.unique().tolist() == list(range(-1, k)) and len(labels) == n
        assert torch.equal((labels == -1).nonzero()[:, 0], code["outliers"])
        assert torch.equal(code["outliers"], codes["clustered"]["outliers"])
        assert torch.equal(code["outlier_mu"], field.mu.detach()[code["outliers"]])
        assert torch.equal(code["outlier_sigma"], field.sigma.detach()[code["outliers"]])
        assert (labels[code["ellipse"]] >= 0).all()
        assert (labels[code["ellipse"]] != code["ellipse_second"]).all()
        assert ((code["ellipse_alpha"] >= 0.5) & (code["ellipse_alpha"] <= 1)).all()
        weights, centres, covariances = code["mixture"]
        assert weights.sum().item() == pytest.approx(1, abs=1e-12) and len(weights) == k
        np.testing.assert_allclose(gbnn2d.covariances_of(code["factors"].double()), covariances,
                                   rtol=1e-5, atol=1e-12)
        assert all(torch.equal(code[key], other[key]) for key in gbnn2d.CODE)
        assert all(torch.equal(a, b) for a, b in zip(code["mixture"], other["mixture"]))
    assert 1 < sizes[1] < sizes[0] <= 30
    assert codes["report"] == again["report"]
    assert torch.bincount(codes["clustered"]["labels"].long() + 1)[1:].min() > 20
    large = field.mu.detach().abs() > 0.2
    assert large.sum() == 5 and (codes["merged"]["labels"][large] == -1).all()


@pytest.mark.parametrize("tau_d", [0.0, math.inf])
def test_extreme_thresholds(tau_d):
    codes = lenet_codes("--tau-d", str(tau_d), "--tau-v", "inf")[1]
    k = [len(codes[name]["centres"]) for name in ("clustered", "merged")]
    assert k[0] > 9 and k[1] == (k[0] if tau_d == 0 else 1)
    if tau_d == 0:
        assert all(torch.equal(codes["clustered"][key], codes["merged"][key])
                   for key in gbnn2d.CODE)


# ---- Reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, outliers, ellipses, k, trainable, percent", [
    (11_678_912, 23_013, 10_885, 2217, 57_111, 25.5), (11_210_432, 14_624, 260, 2387, 41_183, 25.3),
    (11_164_352, 123_310, 57, 1569, 254_465, 26.7)])
def test_the_published_counts(n, outliers, ellipses, k, trainable, percent):
    """ResNet-18 on ImageNet, CIFAR-100, CIFAR-10: trainable numbers; 2 bytes a weight, 12 an
    outlier, 20 a Gaussian, 10 an ellipse point are so many % of mean-field's bytes."""
    shared = SimpleNamespace(layout=SimpleNamespace(size=n, names=set()), outliers=range(outliers),
                             ellipse=range(ellipses), centres=range(k), net=nn.Identity())
    report = gbnn2d.compression_report(shared)
    assert report["counts/trainable"] == trainable
    assert 100 * report["compression/bytes_ratio_mean_field"] == pytest.approx(percent, abs=0.1)
    assert report["compression/bytes_ratio_deterministic"] == pytest.approx(
        2 * report["compression/bytes_ratio_mean_field"])


def test_compression_report_by_hand():
    report = gbnn2d.compression_report(tiny_shared())
    # batch norm: 4 numbers each of scale, offset, mean, variance, and a counter; 3 biases
    parts = {"labels": 84 * 2, "outlier_index": 2 * 4, "outlier_values": 2 * 8,
             "gaussians": 3 * 20, "ellipses": 2 * 10, "rest": 16 * 4 + 8 + 3 * 4}
    assert {k: report[f"compression/bytes_{k}"] for k in parts} == parts
    assert report["compression/bytes"] == 168 + 8 + 16 + 60 + 20 + 84
    assert report["compression/bytes_ratio_mean_field"] == pytest.approx(356 / (84 * 8 + 84))
    assert report["compression/bytes_ratio_deterministic"] == pytest.approx(356 / (84 * 4 + 84))
    counts = {"weights": 84, "outliers": 2, "ellipses": 2, "inliers": 82, "gaussians": 3,
              "trainable": 2 * 2 + 5 * 3}
    assert {k: report[f"counts/{k}"] for k in counts} == counts


def test_layer_report_by_hand():
    """Differences from the mean of the draws, also of blended weights and moved centres."""
    shared = tiny_shared()
    with torch.no_grad():
        shared.shift.normal_()
        shared.outlier_shift.normal_()
        centres, _, own, _ = shared.current()
    mu, mean, codes = torch.randn(84), torch.zeros(84), tiny_code(84)
    for i, label in enumerate(codes["labels"].tolist()):
        mean[i] = centres[label, 0] if label >= 0 else 0
    mean[[0, 5]] = own
    mean[2] = 0.7 * centres[2, 0] + 0.3 * centres[0, 0]
    mean[9] = 0.6 * centres[0, 0] + 0.4 * centres[1, 0]
    report = gbnn2d.layer_report(shared, mu)
    for name, part in (("0.weight", slice(0, 36)), ("3.weight", slice(36, 84))):
        right = (mu - mean)[part].square().mean().sqrt().item()
        assert report[f"quantisation/{name}"] == pytest.approx(right, rel=1e-5)
    assert report["outlier_share/0.weight"] == pytest.approx(2 / 36)
    assert report["outlier_share/3.weight"] == 0 and len(report) == 4


def test_the_file_is_as_large_as_the_report_says(tmp_path):
    args = tiny_args("--dataset", "glyphs", "--width", "0.25")
    net = gbnn2d.make_network(args, 10, (1, 28, 28))
    layout = gbnn2d.Layout(net)
    n = layout.size
    code = tiny_code(n, outliers=range(n // 100), ellipse=range(n // 100, n // 50))
    few = len(code["outliers"])
    code |= {"outliers": torch.arange(few), "outlier_mu": torch.randn(few),
             "outlier_sigma": torch.rand(few), "ellipse": torch.arange(few, 2 * few),
             "ellipse_second": torch.zeros(few).short(), "ellipse_alpha": torch.rand(few),
             "centres": torch.randn(500, 2), "factors": torch.rand(500, 3)}
    shared = gbnn2d.Shared(net, layout, code)
    gbnn2d.export_shared(tmp_path / "a.pt", shared, args, 10, (1, 28, 28))
    size = (tmp_path / "a.pt").stat().st_size
    report = gbnn2d.compression_report(shared)
    assert size == pytest.approx(report["compression/bytes"], rel=0.05)
    assert report["compression/bytes_ratio_deterministic"] < 0.6


def test_a_network_without_covered_layers_is_refused():
    with pytest.raises(UserError, match="no convolution or linear"):
        gbnn2d.Layout(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()))
    net = tiny_net()
    with pytest.raises(UserError, match="no convolution or linear"):
        gbnn2d.Layout(net, ["0", "3"])
    said = gbnn2d.Layout(net, ["0"]).describe()
    assert said.startswith("1 layers with 48 weights are shared; kept whole: 0.weight, 1.weight")
