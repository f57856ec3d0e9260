"""Metrics of common.py against scikit-learn, torchmetrics, uncertainty-toolbox, SciPy, brute-force
loops, integrals and hand values."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

import common

FLOATS = [torch.float32, torch.float64]
DECIMALS = [None, 1, 0]  # scores are rounded to: ties


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_log_probs(m, n, k, seed=0, dtype=torch.float64):
    """log_probs [m, n, k], and labels from sharper rows of the first: not calibrated."""
    generator = seeded(seed)
    logits = 2 * torch.randn(m, n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((1.5 * logits[0]).softmax(-1), 1, generator=generator)[:, 0]
    return logits.log_softmax(-1).to(dtype), labels


def random_probs(n=400, k=7, seed=0, dtype=torch.float32):
    log_probs, labels = random_log_probs(1, n, k, seed)
    return log_probs[0].exp().to(dtype), labels


def with_confidence(confidence, correct):
    """Two-class rows whose largest probability (> 1/2) is given, right or wrong as given."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    return torch.stack([confidence, 1 - confidence], 1), 1 - torch.as_tensor(correct).long()


# ---- Accuracy, Brier, likelihoods ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n,k", [(1, 2), (400, 7), (300, 120)])
def test_brier_equals_its_definition(n, k, dtype):
    probs, labels = random_probs(n, k, dtype=dtype)
    expected = ((probs.double().numpy() - np.eye(k)[labels]) ** 2).sum(1).mean()
    assert common.brier(probs, labels) == pytest.approx(expected, abs=1e-9)


def test_top_k_ties_rank_by_class_index():
    """Against a stable descending sort, on scores of three values: almost every row has ties."""
    scores, labels = (torch.randint(high, size, generator=seeded(0))
                      for high, size in ((3, (300, 6)), (6, (300,))))
    order = np.argsort(-scores.numpy(), axis=1, kind="stable")
    for k in range(1, 7):
        expected = (order[:, :k] == labels.numpy()[:, None]).any(1).mean()
        assert common.top_k_accuracy(scores, labels, k) == pytest.approx(expected, abs=1e-12)
    assert common.top_k_accuracy(scores, labels, 1) == common.accuracy(scores, labels)
    assert common.accuracy([[-math.inf, 0.0], [math.inf, math.inf]], [1, 0]) == 1.0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("s,n,k", [(1, 1, 2), (4, 50, 7), (30, 90, 60)])
def test_lpd_is_the_log_of_the_mean_probability_and_nll_its_negative(s, n, k, dtype):
    log_p, labels = random_log_probs(s, n, k, dtype=dtype)
    p = log_p.double().exp().mean(0)
    expected = float(p[torch.arange(n), labels].log().mean())
    assert common.lpd(log_p, labels) == pytest.approx(expected, abs=1e-12)
    assert common.nll(p.log(), labels) == pytest.approx(-expected, abs=1e-12)
    if s == 1:
        assert common.lpd(log_p, labels) == -common.nll(log_p[0], labels)


def test_likelihoods_do_not_underflow():
    log_p = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]]).log_softmax(-1)
    assert common.nll(log_p, [0, 1]) == 0.0 and common.nll(log_p, [1, 1]) == 1000.0
    assert math.copysign(1, common.nll([[0.0]], [0])) == 1  # 0, not -0
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    assert common.nll(certain[0], [0]) == 0.0 and common.nll(certain[0], [1]) == math.inf
    assert common.lpd(certain, [0]) == pytest.approx(-math.log(2), abs=1e-15)
    assert common.lpd(certain[:1], [1]) == -math.inf
    log_p = torch.tensor([[[2000.0, 0.0]], [[1500.0, 0.0]]]).log_softmax(-1)
    assert common.lpd(log_p, [1]) == pytest.approx(-1500 - math.log(2), abs=1e-9)


# ---- Calibration ----


@pytest.mark.parametrize("bins", [1, 10, 15, 25])
def test_reliability_equals_a_loop_over_bins(bins):
    """Random confidences mixed with every bin edge, 0.5 and exactly 1."""
    generator = np.random.default_rng(0)
    edges = [b / bins for b in range(bins + 1) if 2 * b > bins]
    confidence = np.concatenate([generator.uniform(0.5, 1, 200), np.repeat(edges, 3), [1.0, 1.0]])
    correct, bars = generator.random(len(confidence)) < 0.75, []  # gaps of both signs
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        means = [x[inside].mean() if inside.any() else 0 for x in (confidence, correct)]
        bars.append([inside.sum(), *means])
    excess = (confidence == 1) * 1e-7  # is cut off
    ours = common.reliability(confidence + excess, correct, bins)
    assert np.allclose(np.array(ours).T, bars, atol=1e-12, rtol=0)


@pytest.mark.parametrize("n,k,bins", [(1, 3, 15), (3000, 50, 15), (3000, 4, 10)])
def test_calibration_matches_torchmetrics(n, k, bins):
    probs, labels = random_probs(n, k)
    labels = labels.where(probs.amax(1) < 0.6, labels % 2)  # gaps of both signs
    for ours, norm in ((common.ece, "l1"), (common.mce, "max")):
        theirs = tm.multiclass_calibration_error(probs, labels, k, n_bins=bins, norm=norm)
        assert ours(probs, labels, bins) == pytest.approx(float(theirs), abs=2e-6)
        assert (ours(probs, labels) == ours(probs, labels, bins)) == (bins == 15)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bins", [10, 15, 25])
def test_bins_are_right_closed_in_the_precision_given(bins, dtype):
    edges = torch.arange(bins + 1, dtype=torch.float64).div(bins).to(dtype)
    counts = common.reliability(edges, torch.ones(bins + 1), bins).counts
    assert counts.tolist() == [2] + [1] * (bins - 1)  # 0 joins the first bin, every edge closes one
    above = torch.nextafter(edges[:-1], torch.ones(bins, dtype=dtype))
    assert common.reliability(above, torch.ones(bins), bins).counts.tolist() == [1] * bins


@pytest.mark.parametrize("excess", [2e-7, 5e-4])
def test_a_confidence_a_hair_above_one_counts_as_one(excess):
    """Rounding, or rows that sum to 1 within the tolerance."""
    probs = torch.tensor([[1 + excess, 0.0], [0.7, 0.3]])
    for metric, expected in ((common.ece, 0.15), (common.adaptive_ece, 0.15), (common.mce, 0.3)):
        assert metric(probs, [0, 0]) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("n,bins", [(1, 15), (7, 15), (101, 10), (101, 1)])
def test_adaptive_ece_equals_array_split(n, bins):
    generator = np.random.default_rng(n)
    confidence, correct = generator.uniform(0.5, 1, n), generator.random(n) < 0.75
    parts = np.array_split((confidence - correct)[np.argsort(confidence)], bins)
    ours = common.adaptive_ece(*with_confidence(confidence, correct), bins)
    assert ours == pytest.approx(sum(abs(part.sum()) for part in parts) / n, abs=1e-12)


def test_adaptive_ece_does_not_depend_on_row_order_under_ties():
    probs, labels = with_confidence([0.6, 0.8, 0.8, 0.8, 0.8, 0.9], [0, 1, 1, 0, 0, 1])
    values = {common.adaptive_ece(probs[list(order)], labels[list(order)], 2)
              for order in itertools.permutations(range(6))}
    assert len(values) == 1  # three rows a bin: the four tied ones count 1/2 wherever the cut falls
    expected = (abs(0.6 + 0.8 + 0.8 - 0 - 0.5 - 0.5) + abs(0.8 + 0.8 + 0.9 - 0.5 - 0.5 - 1)) / 6
    assert values.pop() == pytest.approx(expected, abs=1e-12)


# ---- Entropy and ensembles ----


@pytest.mark.parametrize("m,n,k", [(1, 4, 3), (5, 40, 10), (2, 520, 2**12)])  # the last: in blocks
@pytest.mark.parametrize("dtype", FLOATS)
def test_ensemble_uncertainty_equals_entropies_and_divergences_of_scipy(m, n, k, dtype):
    log_p = random_log_probs(m, n, k, dtype=dtype)[0]
    p = log_p.double().exp().numpy()
    pi = p.mean(0)
    expected = {
        "total": stats.entropy(pi, axis=-1),
        "aleatoric": stats.entropy(p, axis=-1).mean(0),
        "epistemic": stats.entropy(p, pi[None], axis=-1).mean(0),
        "rmi": stats.entropy(pi[None], p, axis=-1).mean(0),
        "epkl": stats.entropy(p[:, None], p[None], axis=-1).mean((0, 1)),
    }
    ours = common.ensemble_uncertainty(log_p)
    assert list(ours) == list(expected)
    # float32 rows are normalised to 1e-7 only, where the two ways of writing a KL differ as much
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for name, value in expected.items():
        assert ours[name].shape == (n,) and ours[name].dtype == torch.float64
        assert np.allclose(ours[name], value, atol=tolerance, rtol=0), name
    ours = common.entropy(log_p.double().exp())
    assert ours.shape == (m, n) and np.allclose(ours, stats.entropy(p, axis=-1), atol=1e-12)


def test_ensemble_bounds_hold_in_float32_even_when_members_agree():
    same = random_log_probs(1, 500, 20, dtype=torch.float32)[0].expand(6, -1, -1)
    ours = common.ensemble_uncertainty(same)
    for name in ("epistemic", "rmi", "epkl"):
        assert ours[name].min() >= 0 and ours[name].max() < 1e-6


def test_ensemble_of_one_hot_members_has_only_epistemic_uncertainty():
    ours = common.ensemble_uncertainty(torch.eye(5, 8).log()[:, None])
    assert float(ours["epistemic"]) == pytest.approx(math.log(5), abs=1e-12)
    assert float(ours["total"]) == pytest.approx(math.log(5), abs=1e-12)
    assert ours["aleatoric"] == 0 and ours["rmi"] == math.inf and ours["epkl"] == math.inf
    agreed = common.ensemble_uncertainty(torch.eye(3).log()[[1, 1]][:, None])
    assert all(value == 0 for value in agreed.values())  # 0 log 0 = 0 in every term
    assert common.entropy([1.0, 0.0, 0.0, 0.0]) == 0.0


# ---- Ranking ----


@pytest.mark.parametrize("decimals", DECIMALS)
@pytest.mark.parametrize("seed,share", [(0, 0.2), (1, 0.3), (2, 0.8)])
def test_ranking_matches_scikit_learn(seed, share, decimals):
    generator = np.random.default_rng(seed)
    positive = generator.random(500) < share
    scores = generator.normal(size=500) + 1.5 * positive
    scores = scores if decimals is None else scores.round(decimals)
    auroc, w = sk.roc_auc_score(positive, scores), positive.mean()
    assert common.auroc(scores, positive) == pytest.approx(auroc, abs=1e-12)
    assert common.auroc(-scores, ~positive) == common.auroc(scores, positive)
    expected = sk.average_precision_score(positive, scores)
    assert common.average_precision(scores, positive) == pytest.approx(expected, abs=1e-12)
    fpr, tpr, _ = sk.roc_curve(positive, scores, drop_intermediate=False)
    for level, argument in ((0.5, [0.5]), (0.95, []), (0.8, [0.8]), (1.0, [1.0])):
        assert common.fpr_at_tpr(scores, positive, *argument) == fpr[tpr >= level].min()
        expected = ((1 - w) * (1 - tpr) + w * fpr)[tpr >= level].min()
        ours = common.detection_error(scores, positive, *argument)
        assert ours == pytest.approx(expected, abs=1e-12)


def test_ranking_by_hand():
    constant = np.zeros(8), np.arange(8) < 3
    assert common.auroc(*constant) == 0.5 and common.average_precision(*constant) == 3 / 8
    assert common.fpr_at_tpr(*constant) == 1.0 and common.detection_error(*constant) == 3 / 8
    infinite = [-math.inf, -math.inf, 0.0, math.inf]
    assert common.auroc(infinite, [0, 1, 1, 1]) == (0.5 + 1 + 1) / 3
    # 19 of 20 positives, then 20 negatives: a rate of 0.95 exactly, one miss at the weight 1/2
    scores, positive = np.arange(40, 0, -1), [1] * 19 + [0] * 20 + [1]
    assert common.fpr_at_tpr(scores, positive) == 0.0
    assert common.detection_error(scores, positive) == pytest.approx(0.025, abs=1e-12)
    assert common.detection_error(scores, positive, 1.0) == pytest.approx(0.5, abs=1e-12)


def test_scores_keep_their_precision():
    """Neighbouring float64 scores, also as Python floats, are no tie; in float32 they are."""
    scores = [1.0, 1.0 + 1e-12]
    assert common.auroc(scores, [0, 1]) == common.auroc(np.array(scores), [0, 1]) == 1.0
    assert common.auroc(torch.tensor(scores, dtype=torch.float32), [0, 1]) == 0.5


@pytest.mark.parametrize("larger_means", ["ood", "id"])
def test_ood_metrics_conventions(larger_means):
    is_ood = np.arange(1000) >= 300
    u = np.random.default_rng(3).normal(size=1000).round(1) + is_ood
    scores = u if larger_means == "ood" else -u
    ours = common.ood_metrics(scores[:300], scores[300:], larger_means=larger_means)
    accepted = min(t for t in u if (u[:300] <= t).mean() >= 0.95)
    assert ours == pytest.approx({
        "auroc": sk.roc_auc_score(is_ood, u),
        "aupr_in": sk.average_precision_score(~is_ood, -u),
        "aupr_out": sk.average_precision_score(is_ood, u),
        "fpr95": (u[300:] <= accepted).mean()}, abs=1e-12)
    assert ours["auroc"] > 0.7 and ours["aupr_out"] > ours["aupr_in"] + 0.1
    with pytest.raises(TypeError):  # the direction has no default
        common.ood_metrics([0.0], [1.0])


# ---- Rejection ----


def rejection_by_loop(wrong):
    """(PRR, curve) of predictions listed from the most to the least certain, without ties."""
    n, errors = len(wrong), sum(wrong)
    curve = np.array([sum(wrong[:k]) for k in range(n + 1)][::-1]) / n
    rejected = np.arange(n + 1)
    random, oracle = errors / n * (1 - rejected / n), np.maximum(errors - rejected, 0) / n
    random, oracle, own = (np.trapezoid(y) for y in (random, oracle, curve))
    return (random - own) / (random - oracle), curve


@pytest.mark.parametrize("uncertainty,correct", [
    ([0.2, 0.9, 0.1, 0.4, 0.5, 0.8], [1, 0, 1, 0, 1, 1]),  # no ties
    ([0, 0, 0, 0, 0], [1, 0, 1, 1, 0]), ([1, 2, 2, 2, 3], [1, 0, 1, 1, 0]),
    ([3, 1, 1, 3, 3, 2], [1, 1, 0, 0, 1, 1]), ([-math.inf, math.inf, math.inf, 0], [1, 0, 1, 0])])
def test_tied_uncertainty_gives_the_expectation_over_all_orders(uncertainty, correct):
    """Every permutation of the rows, stably sorted, is one random order inside the ties."""
    outcomes = []
    for order in itertools.permutations(range(len(correct))):
        wrong = [1 - correct[i] for i in sorted(order, key=lambda i: uncertainty[i])]
        outcomes.append(rejection_by_loop(wrong))
    prr, curve = (sum(column) / len(outcomes) for column in zip(*outcomes))
    assert common.prediction_rejection_ratio(uncertainty, correct) == pytest.approx(prr, abs=1e-12)
    rejected, errors = common.rejection_curve(uncertainty, correct)
    n = len(correct)
    assert np.allclose(errors, curve, atol=1e-12) and (rejected == np.arange(n + 1) / n).all()
    for outcome in (True, False):  # nothing to rank
        assert common.prediction_rejection_ratio(uncertainty, [outcome] * n) is None


# ---- Temperature ----


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_temperature_is_the_optimum_and_scales_with_the_logits(scale):
    probs, labels = random_probs(2000, 10, seed=5, dtype=torch.float64)
    logits = scale * probs.log()
    temperature = common.fit_temperature(logits, labels)
    found = minimize_scalar(
        lambda log_t: common.nll((logits / math.exp(log_t)).log_softmax(-1), labels),
        bounds=(-4, 4), method="bounded", options=dict(xatol=1e-10))
    assert temperature == pytest.approx(math.exp(found.x), rel=1e-6)
    assert temperature == pytest.approx(2 / 3 * scale, rel=0.1)  # labels come from logits x 1.5
    assert common.fit_temperature(7 * logits, labels) == pytest.approx(7 * temperature, rel=1e-8)
    assert common.fit_temperature(logits.float(), labels) == pytest.approx(temperature, rel=1e-5)


def test_temperature_saturates():
    eye, labels = 5 * torch.eye(4), torch.arange(4)
    assert common.fit_temperature(eye, labels) == 1e-3  # separable: sharper is better for ever
    assert common.fit_temperature(200 * eye, labels) == 1e-3
    assert common.fit_temperature(eye, labels.roll(1)) == 1e3  # always wrong: flatter is
    assert common.fit_temperature(torch.ones(4, 4), labels) == 1.0  # no T matters


# ---- Regression by mixtures of Gaussians ----

SPEC_KEYS = (
    "lpd nll mae rmse mdae marpd r2 corr crps check interval ece ence z_score_var rms_cal ma_cal "
    "miscal_area rmv sharp cv aleatoric epistemic total").split()


def mixtures(s=5, n=80, seed=0, dtype=torch.float64):
    """Means and variances [S, N], targets [N]: members that disagree, targets of every rank."""
    generator = seeded(seed)
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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("s,n", [(1, 1), (5, 80), (90, 40)])
def test_moments_and_density_are_those_of_the_mixture(s, n, dtype):
    means, variances, targets = mixtures(s, n, dtype=dtype)
    ours = common.gaussian_mixture_moments(means, variances)
    assert all(x.shape == (n,) and x.dtype == torch.float64 for x in ours)
    m, v, y = arrays(means, variances, targets)
    expected = m.mean(0), v.mean(0), m.var(0, ddof=0), matched(m, v)[1] ** 2
    assert np.allclose(torch.stack(ours), expected, atol=1e-11, rtol=0)
    expected = np.log(norm.pdf(y, m, np.sqrt(v)).mean(0)).mean()
    assert common.mixture_lpd(means, variances, targets) == pytest.approx(expected, abs=1e-11)
    ours = common.mixture_lpd([[0.0], [9.0]], [[1.0], [4.0]], [100.0])  # no underflow
    assert ours == pytest.approx(norm.logpdf(100, 9, 2) - math.log(2), rel=1e-14)


@pytest.mark.parametrize("s", [1, 2, 5])
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


@pytest.mark.parametrize("s,n,seed", [(1, 40, 0), (4, 30, 1)])
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


def test_a_target_on_the_quantile_counts_as_below_it():
    """One target at the quantile of the last level, 0.99: no other level is reached."""
    near = norm.ppf(0.99) + np.arange(-500, 500) * 2.0**-51
    on_it = near[torch.special.ndtr(torch.from_numpy(near)).numpy() == 0.99]
    ours = common.regression_ece([[0.0]], [[1.0]], [on_it[0]])
    assert ours == pytest.approx(0.5 - 0.98 / 20, abs=1e-12)
    above = common.regression_ece([[0.0]], [[1.0]], [on_it[0] + 1e-6])
    assert above == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("n,chunks", [(1, 1), (15, 15), (16, 8), (29, 15), (31, 11), (196, 14)])
def test_ence_equals_a_loop_over_chunks(n, chunks):
    """Chunks of ceil(N / 15) by standard deviation."""
    means, variances, targets = mixtures(4, n, seed=n)
    mean, std = map(torch.from_numpy, matched(*arrays(means, variances)))
    order, terms = std.argsort(), []
    for part in order.chunk(15):
        rmv, rmse = (x[part].square().mean().sqrt() for x in (std, targets - mean))
        terms.append(float((rmv - rmse).abs() / rmv))
    ours = common.regression_metrics(means, variances, targets)["ence"]
    assert len(terms) == chunks and ours == pytest.approx(np.mean(terms), abs=1e-11)


def test_ence_does_not_depend_on_row_order_under_ties():
    """One variance for all points: each chunk has the error of all."""
    targets = 2 * np.random.default_rng(0).normal(size=40)
    expected = abs(1 - math.sqrt((targets**2).mean()))
    for order in (np.arange(40), np.argsort(targets), np.argsort(-targets)):
        ours = common.regression_metrics(np.zeros((1, 40)), np.ones((1, 40)), targets[order])
        assert ours["ence"] == pytest.approx(expected, abs=1e-12)


def toolbox_scores(mean, std, target):
    """uncertainty-toolbox's 14 numbers; its marpd is in percent."""
    from uncertainty_toolbox import metrics as toolbox  # a GPU's machine may lack it
    scores = toolbox.prediction_error_metrics(mean, target)
    scores["marpd"] /= 100
    scores |= toolbox.get_all_average_calibration(mean, std, target, 100, verbose=False)
    scores |= toolbox.get_all_sharpness_metrics(std, verbose=False)
    return scores | toolbox.get_all_scoring_rule_metrics(mean, std, target, 99, True, False)


@pytest.mark.parametrize("s,n,shift,scale", [
    (1, 300, 0, 1), (5, 2, 0, 1), (90, 77, 0, 1), (1, 200, 3, 1), (1, 200, 0, 0.05),
    (1, 200, 0.3, 40)])
def test_regression_metrics_are_the_23_of_the_specification(s, n, shift, scale):
    """Also of biased, too narrow and too wide predictions: gaps of one sign, of both, of zero."""
    means, variances, targets = mixtures(s, n, seed=2)
    arguments = means + shift, scale**2 * variances, targets
    (mean, std), target = matched(*arrays(*arguments[:2])), targets.numpy()
    z, ours = (target - mean) / std, common.regression_metrics(*arguments)
    assert list(ours) == SPEC_KEYS and len(ours) == 23
    assert all(type(value) is float and math.isfinite(value) for value in ours.values())
    expected = toolbox_scores(mean, std, target)
    assert len(expected) == 14
    expected |= {"lpd": common.mixture_lpd(*arguments), "ece": common.regression_ece(*arguments),
                 "rmv": math.sqrt((std**2).mean()), "z_score_var": z.var(ddof=1),
                 "cv": std.std(ddof=1) / std.mean()}
    moments = common.gaussian_mixture_moments(*arguments[:2])
    expected |= {k: getattr(moments, k).mean() for k in ("aleatoric", "epistemic", "total")}
    for name, value in expected.items():
        assert ours[name] == pytest.approx(float(value), rel=1e-10, abs=1e-11), name
    assert (ours["lpd"] == pytest.approx(-ours["nll"], rel=1e-12)) == (s == 1)


def all_scores(means, variances, targets):
    scores = common.regression_metrics(means, variances, targets)
    return scores | {"mixture_crps": common.mixture_crps(means, variances, targets)}


def test_a_change_of_origin():
    """An energy far from 0 loses digits, but only those that float64 no longer holds."""
    means, variances, targets = mixtures(4, 90)
    ours, expected = (all_scores(means + shift, variances, targets + shift) | {"marpd": 0}
                      for shift in (-11000.0, 0.0))  # marpd: relative to the size of the numbers
    assert ours == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_a_single_point_and_constant_targets():
    ours = common.regression_metrics([[1.0], [2.0]], [[1.0], [1.0]], [0.5])
    undefined = [name for name, value in ours.items() if value is None]
    assert undefined == ["r2", "corr", "z_score_var", "cv"]
    assert "null" in json.dumps(ours) and all(math.isfinite(x) for x in ours.values() if x)
    flat = common.regression_metrics([[1.0, 2.0, 4.0]], [[1.0, 1.0, 2.0]], [0.1, 0.1, 0.1])
    assert flat["r2"] is None and flat["corr"] is None and flat["cv"] is not None
    flat = common.regression_metrics([[0.1, 0.1, 0.1]], [[1.0, 1.0, 2.0]], [1.0, 2.0, 4.0])
    assert flat["corr"] is None and flat["r2"] < 0


# ---- Input ----

PROBS, LABELS = random_probs(40, 4, dtype=torch.float64)
LOG_PROBS = PROBS.log()
M, V, Y = mixtures(6, 50)
SCORES = {
    "accuracy": (common.accuracy, PROBS, LABELS),
    "top_k_accuracy": (lambda p, y: common.top_k_accuracy(p, y, 2), PROBS, LABELS),
    "nll": (common.nll, LOG_PROBS, LABELS),
    "lpd": (common.lpd, *random_log_probs(4, 30, 5)),
    "brier": (common.brier, PROBS, LABELS),
    "ece": (common.ece, PROBS, LABELS),
    "mce": (common.mce, PROBS, LABELS),
    "adaptive_ece": (common.adaptive_ece, PROBS, LABELS),
    "entropy": (lambda p: float(common.entropy(p).mean()), PROBS),
    "ensemble": (lambda p: {k: float(v.mean()) for k, v in common.ensemble_uncertainty(p).items()},
                 random_log_probs(4, 30, 5)[0]),
    "auroc": (common.auroc, PROBS[:, 0], LABELS % 2),
    "prr": (common.prediction_rejection_ratio, PROBS[:, 0], LABELS % 2),
    "temperature": (common.fit_temperature, LOG_PROBS, LABELS),
    "regression": (all_scores, M, V, Y),
}
VARIANTS = {
    "lists": torch.Tensor.tolist,
    "arrays": torch.Tensor.numpy,
    "gradients": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x.int(),
    "strides": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2],
    "float32": lambda x: x.float() if x.is_floating_point() else x.to(torch.uint8),
}


@pytest.mark.parametrize("name", SCORES)
def test_input_types(name):
    """What holds the same numbers gives the same Python floats; no argument is written to."""
    metric, *arguments = SCORES[name]
    kept, expected = [x.clone() for x in arguments], metric(*arguments)
    assert {type(x) for x in (expected.values() if isinstance(expected, dict) else [expected])} == {
        float}
    for variant, change in VARIANTS.items():
        close = dict(rel=1e-5, abs=1e-6) if variant == "float32" else dict(rel=1e-12, abs=1e-12)
        assert metric(*map(change, arguments)) == pytest.approx(expected, **close), variant
    assert all(map(torch.equal, kept, arguments))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SCORES)
def test_a_gpu_gives_the_same(name):
    metric, *arguments = SCORES[name]
    moved, expected = [x.cuda() for x in arguments], metric(*arguments)
    for same in (moved, [moved[0], *arguments[1:]]):
        assert metric(*same) == pytest.approx(expected, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_input_is_widened_first(dtype):
    """Exact halves give the float64 result; a bfloat16 softmax whose rows miss 1 is refused."""
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])
    for metric in (common.accuracy, common.ece, common.brier):
        assert metric(probs.to(dtype), [0, 1, 1]) == metric(probs.double(), [0, 1, 1])
    assert torch.equal(common.entropy(probs.to(dtype)), common.entropy(probs.double()))
    scores = torch.randn(3000, generator=seeded(0)).to(dtype)
    positive = torch.arange(3000) % 3 == 0
    assert common.auroc(scores, positive) == common.auroc(scores.double(), positive)
    narrow = mixtures(6, 50, dtype=dtype)
    narrow[1].clamp_(min=0.125)
    assert all_scores(*narrow) == all_scores(*(x.double() for x in narrow))
    if dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="softmax in float32"):
            common.ece(torch.full((3, 3), 1 / 3, dtype=dtype), [0, 1, 1])


def changed(tensor, value):
    tensor = tensor.clone()
    tensor[3, 1] = value
    return tensor


def test_bad_input_is_refused_in_one_line():
    off_by_1e2, negative = changed(PROBS, PROBS[3, 1] + 1e-2), PROBS + torch.tensor([1.0, -1, 0, 0])
    in_probs = [common.brier, common.ece, common.mce, common.adaptive_ece]
    in_classes = [*in_probs, common.accuracy, lambda p, y: common.top_k_accuracy(p, y, 2),
                  common.fit_temperature, common.nll, lambda p, y: common.lpd(p[None], y)]
    by_threshold = [common.auroc, common.average_precision, common.fpr_at_tpr,
                    common.detection_error]
    with_mask = [*by_threshold, common.rejection_curve, common.prediction_rejection_ratio,
                 common.reliability]
    on_targets = [common.mixture_lpd, common.mixture_crps, common.regression_ece,
                  common.regression_metrics]
    on_mixtures = [(common.gaussian_mixture_moments, ()), *[(f, (Y,)) for f in on_targets]]
    ood = lambda *a: common.ood_metrics(*a[:2], larger_means=a[2])
    nan, inf = math.nan, math.inf
    cases = [
        *[(f, (changed(PROBS, nan), LABELS), "NaN|sum to 1|finite") for f in in_classes],
        *[(f, (rows, LABELS), "sum to 1") for f in in_probs
          for rows in (off_by_1e2, changed(PROBS, inf))],
        *[(f, (rows, LABELS), r"0\.\.1") for f in in_probs for rows in (negative, 5 * LOG_PROBS)],
        *[(f, (rows, LABELS), "sum to 1") for f in in_classes[-2:]
          for rows in (PROBS, 5 * LOG_PROBS)],
        *[(common.fit_temperature, (changed(PROBS, x), LABELS), "finite") for x in (inf, -inf)],
        *[(f, wrong, r"N, K\], non-empty") for f in in_classes for wrong in (
            (PROBS[0], LABELS[:1]), (PROBS[:0], LABELS[:0]), (PROBS[:, :0], LABELS))],
        *[(f, (PROBS, wrong), "labels: expected") for f in in_classes
          for wrong in (LABELS[1:], LABELS[:, None], LABELS.float(), LABELS > 0)],
        *[(f, (PROBS, LABELS + by), r"expected 0\.\.3") for f in in_classes for by in (1, -1)],
        *[(f, (PROBS, LABELS, 0), "bins") for f in (common.ece, common.mce, common.adaptive_ece)],
        *[(common.top_k_accuracy, (PROBS, LABELS, k), "k: expected") for k in (0, 5)],
        (common.lpd, (LOG_PROBS, LABELS), r"\[S, N, K\]"),
        (common.lpd, (LOG_PROBS[None][:0], LABELS), r"\[S, N, K\]"),
        *[(common.entropy, (p,), "sum to 1") for p in (changed(PROBS, nan), off_by_1e2)],
        (common.entropy, (negative,), r"0\.\.1"),
        *[(common.entropy, (p,), "non-empty") for p in (torch.tensor(1.0), torch.zeros(0, 3))],
        *[(common.ensemble_uncertainty, (p,), r"\[M, N, K\]")
          for p in (LOG_PROBS, LOG_PROBS[None, :0])],
        *[(common.ensemble_uncertainty, (p[None],), "sum to 1")
          for p in (changed(LOG_PROBS, nan), PROBS)],
        *[(f, ([0.0, nan], [0, 1]), "NaN") for f in with_mask],
        *[(f, ([], []), "non-empty") for f in with_mask],
        *[(f, ([0.1, 0.2, 0.3], [0, 1]), r"expected \[3\]") for f in with_mask],
        *[(f, ([0.1, 0.2], [0, 2]), "bool, or 0 and 1") for f in with_mask],
        *[(f, ([[0.1, 0.2]], [[0, 1]]), r"\[N\]") for f in with_mask],
        *[(f, ([0.1, 0.2], [c, c]), "only one") for f in by_threshold for c in (0, 1)],
        *[(f, ([0.1, 0.2], [0, 1], tpr), "tpr") for f in by_threshold[2:]
          for tpr in (0, 1.01, nan)],
        *[(common.reliability, ([c], [1]), r"0\.\.1") for c in (-1e-3, 1.001, inf)],
        (common.reliability, ([0.5], [1], 0), "bins"),
        (ood, ([0.0], [], "ood"), "ood_scores"),
        (ood, ([], [0.0], "ood"), "id_scores"),
        *[(ood, (*scores, "id"), "NaN") for scores in (([nan], [0.0]), ([0.0], [nan]))],
        (ood, ([0.0], [1.0], "larger"), "larger_means"),
        (common.standard_error, ([],), "non-empty"),
        *[(common.standard_error, ([1.0, x],), "NaN|finite") for x in (nan, inf)],
        *[(f, (changed(M, x), V, *y), "means: .*finite") for f, y in on_mixtures
          for x in (nan, inf)],
        *[(f, (M, changed(V, x), *y), "variances: .*finite") for f, y in on_mixtures
          for x in (nan, inf, -inf)],
        *[(f, (M, changed(V, x), *y), "variances: .*above 0") for f, y in on_mixtures
          for x in (0.0, -1e-3)],
        *[(f, (M, v, *y), r"variances: expected \[6, 50\]") for f, y in on_mixtures
          for v in (V[:2], V[0])],
        *[(f, (M[i], V[i], *y), r"means: expected \[S, N\]") for f, y in on_mixtures
          for i in (0, slice(0), (slice(None), slice(0)))],
        *[(f, (M, V, y), r"targets: expected \[50\]") for f in on_targets for y in (Y[1:], M)],
        *[(f, (M, V, Y + x), "targets: .*finite") for f in on_targets for x in (nan, inf)],
    ]
    for metric, arguments, message in cases:
        with pytest.raises(ValueError, match=message) as refusal:
            metric(*arguments)
        assert "\n" not in str(refusal.value), metric
