"""Scores of mixtures: common.py against uncertainty-toolbox, scipy, integrals and hand values."""

import json
import math

import common
import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn import metrics as sk
from uncertainty_toolbox import metrics as toolbox

SPEC_KEYS = (
    "lpd nll mae rmse mdae marpd r2 corr crps check interval ece ence z_score_var rms_cal ma_cal "
    "miscal_area rmv sharp cv aleatoric epistemic total"
).split()


def mixtures(s=5, n=80, seed=0, dtype=torch.float64):
    """Means and variances [S, N], targets [N]: members that disagree, targets of every rank."""
    generator = torch.Generator().manual_seed(seed)
    centre = 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    means = centre + torch.randn(s, n, generator=generator, dtype=torch.float64)
    variances = torch.rand(s, n, generator=generator, dtype=torch.float64) + 0.05
    targets = centre + 1.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return means.to(dtype), variances.to(dtype), targets.to(dtype)


def arrays(*tensors):
    return tuple(x.double().numpy() for x in tensors)


def columns(means, variances, targets):
    """(means [S], standard deviations [S], target) of each point."""
    return zip(means.T, np.sqrt(variances).T, targets)


def matched(means, variances):
    """Mean and standard deviation of each mixture, from its first two raw moments."""
    mean = means.mean(0)
    return mean, np.sqrt((variances + means**2).mean(0) - mean**2)


# ---- Log predictive density of classes ----


def log_probs(s, n, k, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(s, n, k, generator=generator, dtype=torch.float64)
    labels = torch.randint(k, (n,), generator=generator)
    return logits.log_softmax(-1).to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s,n,k", [(1, 1, 2), (4, 50, 7), (30, 900, 60)])  # the last: blocks
def test_lpd_is_the_log_of_the_mean_probability(s, n, k, dtype):
    log_p, labels = log_probs(s, n, k, dtype=dtype)
    p = log_p.double().exp().mean(0)
    expected = float(p[torch.arange(n), labels].log().mean())
    assert common.lpd(log_p, labels) == pytest.approx(expected, abs=1e-12)
    ours = common.lpd(log_p, labels)
    assert ours == pytest.approx(-common.nll(p.log(), labels), abs=1e-12) and type(ours) is float
    if s == 1:
        assert ours == -common.nll(log_p[0], labels)


def test_lpd_of_copies_and_of_permuted_members():
    log_p, labels = log_probs(6, 40, 5)
    own = -common.nll(log_p[2], labels)
    assert common.lpd(log_p[2:3].expand(9, -1, -1), labels) == pytest.approx(own, abs=1e-12)
    expected = common.lpd(log_p, labels)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        assert common.lpd(log_p[order], labels) == pytest.approx(expected, abs=1e-12)


def test_lpd_of_a_mixture_is_above_the_mean_over_members_and_is_no_mean_of_logits():
    log_p, labels = log_probs(6, 40, 5)
    ours = common.lpd(log_p, labels)
    assert ours > np.mean([common.lpd(log_p[i : i + 1], labels) for i in range(6)]) + 0.1
    assert abs(ours + common.nll(log_p.mean(0).log_softmax(-1), labels)) > 0.05


def test_lpd_does_not_underflow():
    logits = torch.tensor([[[2000.0, 0.0]], [[1500.0, 0.0]]])
    ours = common.lpd(logits.log_softmax(-1), torch.tensor([1]))
    assert ours == pytest.approx(-1500 - math.log(2), abs=1e-9)
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    assert common.lpd(certain, torch.tensor([0])) == pytest.approx(-math.log(2), abs=1e-15)
    assert common.lpd(certain[:1], torch.tensor([1])) == -math.inf


def test_brier_of_a_uniform_row_is_a_sum_over_classes():
    uniform = torch.full((3, 10), 0.1, dtype=torch.float64)
    assert common.brier(uniform, torch.tensor([0, 4, 9])) == pytest.approx(0.9, abs=1e-12)


# ---- Detection ----


def binary_scores(seed, decimals, share, n=500):
    generator = np.random.default_rng(seed)
    positive = generator.random(n) < share
    scores = generator.normal(size=n) + 1.5 * positive
    return (scores if decimals is None else scores.round(decimals)), positive


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize("seed,share", [(0, 0.2), (1, 0.5), (2, 0.8)])
def test_detection_error_is_the_minimum_over_thresholds(seed, share, decimals):
    scores, positive = binary_scores(seed, decimals, share)
    w = positive.mean()
    for tpr in (0.5, 0.95, 1.0):
        candidates = []
        for t in scores:
            hit, false = (scores >= t)[positive].mean(), (scores >= t)[~positive].mean()
            if hit >= tpr:
                candidates.append((1 - w) * (1 - hit) + w * false)
        ours = common.detection_error(scores, positive, tpr)
        assert ours == pytest.approx(min(candidates), abs=1e-12)
    ours = common.detection_error(scores, positive, 0.95)
    assert common.detection_error(scores, positive) == ours


def test_detection_error_by_hand():
    assert common.detection_error([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1]) == 0.0
    for p in (3, 4):  # the positives rank last: all negatives are accepted, at the weight p / 100
        ours = common.detection_error(np.arange(100), np.arange(100) < p)
        assert ours == pytest.approx(p / 100, abs=1e-12)
    assert common.detection_error(np.zeros(10), np.arange(10) < 3) == pytest.approx(0.3, abs=1e-15)
    # 19 of 20 positives, then 20 negatives: one miss at the weight 1/2
    scores, positive = np.arange(40, 0, -1), [1] * 19 + [0] * 20 + [1]
    assert common.detection_error(scores, positive) == pytest.approx(0.025, abs=1e-12)
    assert common.detection_error(scores, positive, 1.0) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize("seed,share", [(0, 0.2), (1, 0.5), (2, 0.8)])
def test_interpolated_fpr_lies_on_the_roc_curve(seed, share, decimals):
    scores, positive = binary_scores(seed, decimals, share)
    fpr, tpr, _ = sk.roc_curve(positive, scores)
    for level in (0.3, 0.95):
        ours = common.fpr_at_tpr(scores, positive, level, interpolate=True)
        assert ours == pytest.approx(np.interp(level, tpr, fpr), abs=1e-12)
    if decimals == 0:
        step = common.fpr_at_tpr(scores, positive)
        assert common.fpr_at_tpr(scores, positive, interpolate=True) < step - 1e-3


def test_interpolated_fpr_by_hand():
    assert common.fpr_at_tpr(np.zeros(8), np.arange(8) < 3, interpolate=True) == 0.95
    scores, positive = np.arange(40, 0, -1), [1] * 19 + [0] * 20 + [1]
    assert common.fpr_at_tpr(scores, positive, interpolate=True) == 1.0  # the end of the level
    assert common.fpr_at_tpr(scores, positive, 0.925, interpolate=True) == 0.0
    assert common.fpr_at_tpr([1, 0], [1, 0], 1.0, interpolate=True) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_swapping_the_two_sides_of_a_detection_turns_its_auroc_around(seed):
    scores, is_ood = binary_scores(seed, 1, 0.4)
    ours = common.ood_metrics(scores[~is_ood], scores[is_ood], larger_means="ood")["auroc"]
    swapped = common.ood_metrics(scores[is_ood], scores[~is_ood], larger_means="ood")["auroc"]
    assert ours + swapped == pytest.approx(1, abs=1e-14) and ours > 0.7


# ---- Moments and density ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s,n", [(1, 1), (5, 80), (900, 400)])  # the last: blocks
def test_moments_are_those_of_the_mixture(s, n, dtype):
    means, variances, targets = mixtures(s, n, dtype=dtype)
    ours = common.gaussian_mixture_moments(means, variances)
    assert all(x.shape == (n,) and x.dtype == torch.float64 for x in ours)
    m, v = arrays(means, variances)
    assert np.allclose(ours.mean, m.mean(0), atol=1e-12, rtol=0)
    assert np.allclose(ours.aleatoric, v.mean(0), atol=1e-12, rtol=0)
    assert np.allclose(ours.epistemic, m.var(0, ddof=0), atol=1e-12, rtol=0)
    assert np.allclose(ours.total.sqrt(), matched(m, v)[1], atol=1e-11, rtol=0)
    assert torch.equal(ours.total, ours.aleatoric + ours.epistemic)
    if s == 1:
        assert (ours.epistemic == 0).all()


def test_moments_by_hand():
    ours = common.gaussian_mixture_moments([[1.0], [3.0]], [[0.5], [1.5]])
    assert [x.item() for x in ours] == [2.0, 1.0, 1.0, 2.0]  # with S - 1 epistemic would be 2


@pytest.mark.parametrize("s,n", [(1, 1), (5, 80), (900, 400)])
def test_mixture_lpd_is_the_log_of_the_mean_density(s, n):
    means, variances, targets = mixtures(s, n)
    m, v, y = arrays(means, variances, targets)
    expected = np.log(norm.pdf(y, m, np.sqrt(v)).mean(0)).mean()
    assert common.mixture_lpd(means, variances, targets) == pytest.approx(expected, abs=1e-11)


def test_mixture_lpd_by_hand_and_without_underflow():
    half_log = math.log(2 * math.pi) / 2
    assert common.mixture_lpd([[0.0]], [[1.0]], [0.0]) == pytest.approx(-half_log, abs=1e-15)
    ours = common.mixture_lpd([[0.0], [9.0]], [[1.0], [4.0]], [100.0])
    assert ours == pytest.approx(-half_log - math.log(2) - math.log(2) - (91 / 2) ** 2 / 2)
    assert common.mixture_lpd([[0.0], [1.0]], [[1.0], [1.0]], [101.0]) < -4900  # not -inf


def test_density_of_the_mixture_is_not_that_of_the_matched_gaussian():
    means, variances, targets = mixtures()
    ours = common.regression_metrics(means, variances, targets)
    assert abs(ours["lpd"] + ours["nll"]) > 1e-2
    m, v, y = arrays(means, variances, targets)
    assert ours["nll"] == pytest.approx(-norm.logpdf(y, *matched(m, v)).mean(), abs=1e-11)
    ours = common.regression_metrics(means[:1], variances[:1], targets)
    assert ours["lpd"] == -ours["nll"]


# ---- CRPS ----


def mean_abs(d, v):
    sigma = np.sqrt(v)
    return 2 * sigma * norm.pdf(d / sigma) + d * (2 * norm.cdf(d / sigma) - 1)


@pytest.mark.parametrize("s", [1, 2, 3, 4, 5, 8])
def test_crps_equals_the_integral_over_the_distribution_function(s):
    means, variances, targets = arrays(*mixtures(s, 6, seed=s))
    expected = []
    for m, sd, y in columns(means, variances, targets):

        def square(x, step, m=m, sd=sd):
            return (norm.cdf((x - m) / sd).mean() - step) ** 2

        options = dict(epsabs=1e-11, limit=500)
        below = quad(square, min(y, m.min()) - 12, y, (0.0,), **options)[0]
        expected.append(below + quad(square, y, max(y, m.max()) + 12, (1.0,), **options)[0])
    ours = common.mixture_crps(means, variances, targets)
    assert ours == pytest.approx(np.mean(expected), abs=1e-9)


@pytest.mark.parametrize("s,n", [(1, 1), (2, 30), (7, 30), (400, 350)])  # the last: blocks
def test_crps_equals_the_sum_over_all_pairs(s, n):
    means, variances, targets = arrays(*mixtures(s, n))
    expected = mean_abs(targets - means, variances).mean(0)
    for m, v in zip(means, variances):
        expected = expected - mean_abs(means - m, variances + v).mean(0) / s / 2
    ours = common.mixture_crps(means, variances, targets)
    assert ours == pytest.approx(expected.mean(), abs=1e-12)


def test_crps_by_hand():
    at_the_mean = (math.sqrt(2) - 1) / math.sqrt(math.pi)
    assert common.mixture_crps([[3.0]], [[4.0]], [3.0]) == pytest.approx(2 * at_the_mean, abs=1e-15)
    narrow = [[1e-20], [1e-20]]  # two points at 0 and 1: the energy form of the CRPS
    assert common.mixture_crps([[0.0], [1.0]], narrow, [0.0]) == pytest.approx(0.25, abs=1e-9)
    assert common.mixture_crps([[0.0], [1.0]], narrow, [3.0]) == pytest.approx(2.25, abs=1e-9)
    far = common.mixture_crps([[0.0]], [[1.0]], [1e6])
    assert far == pytest.approx(1e6 - 1 / math.sqrt(math.pi), abs=1e-6)


def test_gaussian_crps_is_that_of_the_matched_gaussian():
    means, variances, targets = mixtures()
    mixture = common.mixture_crps(means, variances, targets)
    ours = common.gaussian_crps(means, variances, targets)
    assert abs(ours - mixture) > 1e-4
    mean, std = matched(*arrays(means, variances))
    assert ours == pytest.approx(toolbox.crps_gaussian(mean, std, targets.numpy()), abs=1e-12)
    one = means[:1], variances[:1], targets
    assert common.gaussian_crps(*one) == common.mixture_crps(*one)


# ---- Calibration ----


@pytest.mark.parametrize("s,n,seed", [(1, 40, 0), (3, 40, 1), (10, 60, 2)])
def test_regression_ece_equals_the_gaps_at_searched_quantiles(s, n, seed):
    means, variances, targets = arrays(*mixtures(s, n, seed))
    levels, below = np.linspace(0.01, 0.99, 20), np.zeros((n, 20))
    for i, (m, sd, y) in enumerate(columns(means, variances, targets)):
        ends = (m - 6 * sd).min(), (m + 6 * sd).max()
        for j, level in enumerate(levels):
            quantile = brentq(lambda x: norm.cdf((x - m) / sd).mean() - level, *ends, xtol=1e-12)
            below[i, j] = y <= quantile
    expected = np.abs(below.mean(0) - levels).mean()
    ours = common.regression_ece(means, variances, targets)
    assert ours == pytest.approx(expected, abs=1e-12) and ours > 0.01


def test_regression_ece_by_hand():
    assert common.regression_ece([[0.0]], [[1.0]], [99.0]) == pytest.approx(0.5, abs=1e-12)
    assert common.regression_ece([[0.0]], [[1.0]], [-99.0]) == pytest.approx(0.5, abs=1e-12)
    # at the median: 0 of the ten levels below 1/2 are reached, all of those above
    assert common.regression_ece([[2.0]], [[1.0]], [2.0]) == pytest.approx(
        np.minimum(np.linspace(0.01, 0.99, 20), np.linspace(0.99, 0.01, 20)).mean(), abs=1e-12
    )
    targets = norm.ppf((np.arange(1000) + 0.5) / 1000)  # its own quantiles: a gap of rounding only
    zeros, ones = np.zeros((1, 1000)), np.ones((1, 1000))
    assert common.regression_ece(zeros, ones, targets) < 1e-3
    assert common.regression_ece(zeros, 9 * ones, targets) > 0.1  # blocks of one level each
    wide = np.zeros((300, 1000)), np.ones((300, 1000)), targets  # several blocks of points
    assert common.regression_ece(*wide) < 1e-3


def test_a_target_on_the_quantile_counts_as_below_it():
    """One target at the quantile of the last level, 0.99: no other level is reached."""
    near = norm.ppf(0.99) + np.arange(-500, 500) * 2.0**-51
    on_it = near[torch.special.ndtr(torch.from_numpy(near)).numpy() == 0.99]
    assert len(on_it) > 0
    ours = common.regression_ece([[0.0]], [[1.0]], [on_it[0]])
    assert ours == pytest.approx(0.5 - 0.98 / 20, abs=1e-12)
    above = common.regression_ece([[0.0]], [[1.0]], [on_it[0] + 1e-6])
    assert above == pytest.approx(0.5, abs=1e-12)


def ence_by_loop(mean, std, target):
    """Chunks of ceil(N / 15), as torch.chunk cuts them."""
    order = sorted(range(len(std)), key=lambda i: std[i])
    size, terms = math.ceil(len(std) / 15), []
    for start in range(0, len(std), size):
        part = order[start : start + size]
        rmv = math.sqrt(sum(std[i] ** 2 for i in part) / len(part))
        rmse = math.sqrt(sum((target[i] - mean[i]) ** 2 for i in part) / len(part))
        terms.append(abs(rmv - rmse) / rmv)
    return sum(terms) / len(terms), len(terms)


@pytest.mark.parametrize(
    "n,chunks", [(1, 1), (14, 14), (15, 15), (16, 8), (29, 15), (31, 11), (150, 15), (196, 14)]
)
def test_ence_equals_a_loop_over_chunks(n, chunks):
    means, variances, targets = mixtures(4, n, seed=n)
    expected, found = ence_by_loop(*matched(*arrays(means, variances)), targets.numpy())
    assert found == chunks == len(torch.chunk(targets, 15))
    assert common.ence(means, variances, targets) == pytest.approx(expected, abs=1e-11)


def test_every_size_from_197_on_has_15_chunks_in_ence():
    sizes = [n for n in range(1, 4000) if math.ceil(n / math.ceil(n / 15)) != 15]
    assert max(sizes) == 196 and 16 in sizes


def test_ence_does_not_depend_on_row_order_under_ties():
    """One variance for all points: each chunk has the error of all."""
    targets = 2 * np.random.default_rng(0).normal(size=40)
    expected = abs(1 - math.sqrt((targets**2).mean()))
    for order in (np.arange(40), np.argsort(targets), np.argsort(-targets)):
        ours = common.ence(np.zeros((1, 40)), np.ones((1, 40)), targets[order])
        assert ours == pytest.approx(expected, abs=1e-12)


def test_spread_of_the_predicted_deviations():
    means, variances, targets = mixtures()
    mean, std = matched(*arrays(means, variances))
    z = (targets.numpy() - mean) / std
    ours = common.z_score_variance(means, variances, targets)
    assert ours == pytest.approx(z.var(ddof=1), abs=1e-11)
    assert common.rmv(means, variances) == pytest.approx(math.sqrt((std**2).mean()), abs=1e-12)
    expected = std.std(ddof=1) / std.mean()
    assert common.cv(means, variances) == pytest.approx(expected, abs=1e-12)
    assert common.rmv([[0.0, 5.0]], [[1.0, 7.0]]) == 2.0
    assert common.cv([[0.0, 5.0]], [[1.0, 9.0]]) == pytest.approx(math.sqrt(2) / 2, abs=1e-15)
    assert common.z_score_variance([[0.0, 0.0]], [[4.0, 1.0]], [2.0, -1.0]) == 2.0


# ---- The whole set ----


def toolbox_scores(mean, std, target):
    """uncertainty-toolbox's 14 numbers; its marpd is in percent."""
    scores = toolbox.prediction_error_metrics(mean, target)
    scores["marpd"] /= 100
    scores |= toolbox.get_all_average_calibration(mean, std, target, 100, verbose=False)
    scores |= toolbox.get_all_sharpness_metrics(std, verbose=False)
    return scores | toolbox.get_all_scoring_rule_metrics(mean, std, target, 99, True, False)


@pytest.mark.parametrize("s,n,seed", [(1, 30, 0), (1, 300, 1), (5, 2, 2), (5, 77, 3), (90, 500, 4)])
def test_the_matched_gaussian_scores_as_in_uncertainty_toolbox(s, n, seed):
    means, variances, targets = mixtures(s, n, seed)
    mean, std = matched(*arrays(means, variances))
    expected = toolbox_scores(mean, std, targets.numpy())
    ours = common.regression_metrics(means, variances, targets)
    assert len(expected) == 14 and set(expected) < set(ours)
    for name, value in expected.items():
        assert ours[name] == pytest.approx(float(value), rel=1e-10, abs=1e-11), name


@pytest.mark.parametrize("shift,scale", [(0.3, 1.0), (3.0, 1.0), (0.0, 0.05), (0.0, 40.0)])
def test_interval_calibration_of_bad_and_crossing_curves(shift, scale):
    """Biased, too narrow and too wide predictions: gaps of one sign, of both, of zero."""
    mean, variance, target = arrays(*mixtures(1, 200))
    mean, std = mean[0] + shift, scale * np.sqrt(variance[0])
    expected = toolbox_scores(mean, std, target)
    ours = common.regression_metrics(mean[None], std[None] ** 2, target)
    for name in ("rms_cal", "ma_cal", "miscal_area", "check", "interval", "sharp"):
        assert ours[name] == pytest.approx(float(expected[name]), rel=1e-10, abs=1e-11), name


def test_interval_calibration_by_hand():
    """All targets at the mean: everything is inside every interval, the gap is 1 - level."""
    ours = common.regression_metrics(np.zeros((1, 9)), np.ones((1, 9)), np.zeros(9))
    assert ours["ma_cal"] == pytest.approx(0.5, abs=1e-12)
    assert ours["miscal_area"] == pytest.approx(0.5, abs=1e-12)
    assert ours["rms_cal"] == pytest.approx(math.sqrt((np.linspace(0, 1, 100) ** 2).mean()))


def test_check_and_interval_score_are_means_over_levels():
    mean, variance, target = arrays(*mixtures(1, 40))
    mean, std, check, interval = mean[0], np.sqrt(variance[0]), [], []
    for q in [i / 100 for i in range(1, 100)]:
        error = target - norm.ppf(q, mean, std)
        check.append(np.where(error >= 0, q * error, (q - 1) * error).mean())
        low, high = norm.interval(q, mean, std)
        outside = np.maximum(low - target, 0) + np.maximum(target - high, 0)
        interval.append((high - low + 2 / (1 - q) * outside).mean())
    ours = common.regression_metrics(mean[None], variance, target)
    assert ours["check"] == pytest.approx(np.mean(check), abs=1e-12)
    assert ours["interval"] == pytest.approx(np.mean(interval), abs=1e-11)
    assert 2 * ours["check"] == pytest.approx(ours["crps"], rel=0.02)  # CRPS: over all levels


@pytest.mark.parametrize("s", [1, 6])
def test_regression_metrics_are_the_23_of_the_specification(s):
    means, variances, targets = mixtures(s)
    ours = common.regression_metrics(means, variances, targets)
    assert list(ours) == SPEC_KEYS and len(ours) == 23
    assert all(type(value) is float and math.isfinite(value) for value in ours.values())
    arguments = means, variances, targets
    assert ours["lpd"] == common.mixture_lpd(*arguments)
    assert ours["ece"] == common.regression_ece(*arguments)
    assert ours["crps"] == common.gaussian_crps(*arguments)
    assert ours["ence"] == common.ence(*arguments)
    assert ours["z_score_var"] == common.z_score_variance(*arguments)
    assert ours["rmv"] == ours["sharp"] == common.rmv(means, variances)
    assert ours["cv"] == common.cv(means, variances)
    moments = common.gaussian_mixture_moments(means, variances)
    for name in ("aleatoric", "epistemic", "total"):
        assert ours[name] == float(getattr(moments, name).mean())
    assert ours["total"] == pytest.approx(ours["rmv"] ** 2, rel=1e-12)
    assert ours["rmse"] ** 2 == pytest.approx(float((moments.mean - targets).square().mean()))


def assert_equal_scores(ours, expected, tolerance=1e-12, factors=None):
    for name, value in expected.items():
        factor = (factors or {}).get(name, 1)
        assert ours[name] == pytest.approx(factor * value, rel=tolerance, abs=tolerance), name


def all_scores(means, variances, targets):
    scores = common.regression_metrics(means, variances, targets)
    return scores | {"mixture_crps": common.mixture_crps(means, variances, targets)}


@pytest.mark.parametrize("copies", [2, 5, 200])
def test_copies_of_one_model_score_as_that_model(copies):
    means, variances, targets = mixtures(1, 90)
    ours = all_scores(means.expand(copies, -1), variances.expand(copies, -1), targets)
    assert_equal_scores(ours, all_scores(means, variances, targets))


def test_permuting_members_or_points_changes_nothing():
    means, variances, targets = mixtures(7, 90)
    expected = all_scores(means, variances, targets)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        rows = torch.randperm(7, generator=generator)
        assert_equal_scores(all_scores(means[rows], variances[rows], targets), expected)
        rows = torch.randperm(90, generator=generator)
        assert_equal_scores(all_scores(means[:, rows], variances[:, rows], targets[rows]), expected)


def test_repeating_the_mixture_changes_nothing():
    """Each component twice: the same distribution."""
    means, variances, targets = mixtures(3, 50)
    ours = all_scores(means.repeat(2, 1), variances.repeat(2, 1), targets)
    assert_equal_scores(ours, all_scores(means, variances, targets))


LENGTHS = "mae rmse mdae crps mixture_crps check interval rmv sharp".split()
AREAS = "aleatoric epistemic total".split()


@pytest.mark.parametrize("scale", [1e-3, 27.2, 1e5])
def test_a_change_of_unit(scale):
    means, variances, targets = mixtures(4, 90)
    expected = all_scores(means, variances, targets)
    ours = all_scores(scale * means, scale**2 * variances, scale * targets)
    factors = dict.fromkeys(LENGTHS, scale) | dict.fromkeys(AREAS, scale**2)
    for name, sign in (("lpd", -1), ("nll", 1)):  # densities are per unit
        assert ours.pop(name) == pytest.approx(expected.pop(name) + sign * math.log(scale))
    assert_equal_scores(ours, expected, 1e-10, factors)


def test_a_change_of_origin():
    """An energy far from 0 loses digits, but only those that float64 no longer holds."""
    means, variances, targets = mixtures(4, 90)
    for shift, tolerance in ((2.0, 1e-11), (-11000.0, 1e-8)):
        expected = all_scores(means, variances, targets)
        ours = all_scores(means + shift, variances, targets + shift)
        del expected["marpd"]  # relative to the size of the numbers
        assert_equal_scores(ours, expected, tolerance)


def test_a_reflection():
    means, variances, targets = mixtures(4, 90)
    ours = all_scores(-means, variances, -targets)
    assert_equal_scores(ours, all_scores(means, variances, targets))


def test_a_single_point_and_constant_targets():
    ours = common.regression_metrics([[1.0], [2.0]], [[1.0], [1.0]], [0.5])
    undefined = [name for name, value in ours.items() if value is None]
    assert undefined == ["r2", "corr", "z_score_var", "cv"]
    assert "null" in json.dumps(ours) and all(math.isfinite(x) for x in ours.values() if x)
    flat = common.regression_metrics([[1.0, 2.0, 4.0]], [[1.0, 1.0, 2.0]], [0.1, 0.1, 0.1])
    assert flat["r2"] is None and flat["corr"] is None and flat["cv"] is not None
    flat = common.regression_metrics([[0.1, 0.1, 0.1]], [[1.0, 1.0, 2.0]], [1.0, 2.0, 4.0])
    assert flat["corr"] is None and flat["r2"] < 0


def test_point_errors_by_hand():
    ours = common.regression_metrics([[0.0, 1.0, 3.0]], [[1.0, 1.0, 1.0]], [0.0, 3.0, 1.0])
    assert ours["mae"] == pytest.approx(4 / 3) and ours["mdae"] == 2.0
    assert ours["rmse"] == pytest.approx(math.sqrt(8 / 3))
    assert ours["marpd"] == pytest.approx((0 + 1 + 1) / 3)  # 0 / 0 is 0: exact
    assert ours["r2"] == pytest.approx(1 - 8 / (16 / 9 + 25 / 9 + 1 / 9))
    assert ours["corr"] == pytest.approx(np.corrcoef([0, 1, 3], [0, 3, 1])[0, 1])


# ---- Input ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_input_is_widened_first(dtype):
    narrow = mixtures(6, 50, dtype=dtype)
    narrow[1].clamp_(min=0.125)
    assert all_scores(*narrow) == all_scores(*(x.double() for x in narrow))


def test_input_types():
    means, variances, targets = mixtures(6, 50)
    expected = all_scores(means, variances, targets)
    assert all_scores(*arrays(means, variances, targets)) == expected
    assert all_scores(*(x.tolist() for x in (means, variances, targets))) == expected
    assert all_scores(means.clone().requires_grad_(), variances, targets) == expected
    strided = means.t().contiguous().t(), variances.t().contiguous().t(), targets
    assert_equal_scores(all_scores(*strided), expected)
    before = [x.clone() for x in (means, variances, targets)]
    all_scores(means, variances, targets)
    assert all(map(torch.equal, before, (means, variances, targets)))  # no argument is written to
    mixed = all_scores(means.float(), variances, targets.round().int())
    assert mixed == all_scores(means.float().double(), variances, targets.round())
    log_p, labels = log_probs(4, 30, 5)
    kept = log_p.clone()
    ours = common.lpd(log_p, labels)
    assert common.lpd(log_p.tolist(), labels.tolist()) == ours and torch.equal(kept, log_p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    means, variances, targets = mixtures(40, 3000)
    expected = all_scores(means, variances, targets)
    assert_equal_scores(all_scores(means.cuda(), variances.cuda(), targets.cuda()), expected, 1e-10)
    assert_equal_scores(all_scores(means.cuda(), variances, targets), expected, 1e-10)
    log_p, labels = log_probs(20, 300, 5)
    assert common.lpd(log_p.cuda(), labels) == pytest.approx(common.lpd(log_p, labels), abs=1e-12)


def changed(x, value):
    x = x.clone()
    x.reshape(-1)[3] = value
    return x


M, V, Y = mixtures(3, 20)
ON_MOMENTS = [common.gaussian_mixture_moments, common.rmv, common.cv]
ON_TARGETS = [common.mixture_lpd, common.mixture_crps, common.gaussian_crps, common.regression_ece]
ON_TARGETS += [common.ence, common.z_score_variance, common.regression_metrics]
ON_MIXTURES = [(f, ()) for f in ON_MOMENTS] + [(f, (Y,)) for f in ON_TARGETS]
LOG_P, LABELS = log_probs(3, 20, 4)

REFUSED = [
    *[(f, (changed(M, x), V, *y), "means: .*finite") for f, y in ON_MIXTURES
      for x in (math.nan, math.inf)],
    *[(f, (M, changed(V, x), *y), "variances: .*finite") for f, y in ON_MIXTURES
      for x in (math.nan, math.inf, -math.inf)],
    *[(f, (M, changed(V, x), *y), "variances: .*above 0") for f, y in ON_MIXTURES
      for x in (0.0, -1e-3)],
    *[(f, (M, V[:2], *y), r"variances: expected \[3, 20\]") for f, y in ON_MIXTURES],
    *[(f, (M, V[0], *y), r"variances: expected \[3, 20\]") for f, y in ON_MIXTURES],
    *[(f, (M[0], V[0], *y), r"means: expected \[S, N\]") for f, y in ON_MIXTURES],
    *[(f, (M[:0], V[:0], *y), r"means: expected \[S, N\]") for f, y in ON_MIXTURES],
    *[(f, (M[:, :0], V[:, :0], *(x[:0] for x in y)), r"means: expected") for f, y in ON_MIXTURES],
    *[(f, (M, V, Y[1:]), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, Y[:, None]), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, M), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, changed(Y, x)), "targets: .*finite") for f in ON_TARGETS
      for x in (math.nan, math.inf)],
    (common.lpd, (LOG_P[0], LABELS), r"\[S, N, K\]"),
    (common.lpd, (LOG_P[:0], LABELS), r"\[S, N, K\]"),
    (common.lpd, (LOG_P[:, :0], LABELS[:0]), r"\[S, N, K\]"),
    (common.lpd, (changed(LOG_P, math.nan), LABELS), "sum to 1"),
    (common.lpd, (LOG_P.exp(), LABELS), "sum to 1"),
    (common.lpd, (LOG_P, LABELS[1:]), "labels: expected"),
    (common.lpd, (LOG_P, LABELS + 4), r"expected 0\.\.3"),
    (common.lpd, (LOG_P, LABELS.double()), "integer"),
    *[(common.detection_error, ([0.1, 0.2], [0, 1], t), "tpr") for t in (0, 1.01, math.nan)],
    *[(common.detection_error, ([0.1, 0.2], [c, c]), "only one") for c in (0, 1)],
    (common.detection_error, ([0.1, math.nan], [0, 1]), "NaN"),
    (common.detection_error, ([], []), "non-empty"),
    (common.detection_error, ([0.1, 0.2, 0.3], [0, 1]), r"expected \[3\]"),
]  # fmt: skip


@pytest.mark.parametrize("metric,arguments,message", REFUSED)
def test_bad_input_is_refused_in_one_line(metric, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        metric(*arguments)
    assert "\n" not in str(refusal.value)
