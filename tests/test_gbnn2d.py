"""gbnn2d.py's Method and Model against brute force, closed forms and scikit-learn, in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm
from sklearn.mixture import GaussianMixture
from torch import nn

import common
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
