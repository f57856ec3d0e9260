"""Metrics of common.py against scikit-learn, torchmetrics, SciPy, loops and values by hand."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

import common

FLOATS = [torch.float32, torch.float64]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_log_probs(m, n, k, seed=0, dtype=torch.float64):
    """log_probs [m, n, k], and labels from sharper rows of the first: not calibrated."""
    generator = seeded(seed)
    logits = 2 * torch.randn(m, n, k, generator=generator, dtype=torch.float64)
    label_probs = (1.5 * logits[0]).softmax(-1)
    labels = torch.multinomial(label_probs, 1, generator=generator)[:, 0]
    return logits.log_softmax(-1).to(dtype), labels


def random_probs(n=400, k=7, seed=0, dtype=torch.float32):
    log_probs, labels = random_log_probs(1, n, k, seed)
    return log_probs[0].exp().to(dtype), labels


# ---- Accuracy, Brier, likelihoods ---------------------------------------------------------------


def test_top_k_ranks_equal_scores_by_class_index():
    """Against a stable descending sort, on scores of three values: almost every row has ties."""
    scores = torch.randint(3, (300, 6), generator=seeded(0))
    labels = torch.randint(6, (300,), generator=seeded(1))
    order = np.argsort(-scores.numpy(), axis=1, kind="stable")
    for k in range(1, 7):
        among_first = order[:, :k] == labels.numpy()[:, None]
        expected = among_first.any(1).mean()
        assert common.top_k_accuracy(scores, labels, k) == pytest.approx(expected, abs=1e-12)
    assert common.accuracy(scores, labels) == common.top_k_accuracy(scores, labels, 1)
    assert common.accuracy([[-math.inf, 0.0], [math.inf, math.inf]], [1, 0]) == 1.0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("s, n, k", [(1, 1, 2), (4, 50, 7)])
def test_brier_and_likelihoods_equal_their_definitions(s, n, k, dtype):
    log_probs, labels = random_log_probs(s, n, k, dtype=dtype)
    probs = log_probs.double().exp()
    expected = ((probs[0].numpy() - np.eye(k)[labels]) ** 2).sum(1).mean()
    assert common.brier(log_probs[0].exp(), labels) == pytest.approx(expected, abs=1e-7)
    assert common.brier(probs[0], labels) == pytest.approx(expected, abs=1e-12)
    mean = probs.mean(0)
    expected = mean[torch.arange(n), labels].log().mean().item()
    assert common.lpd(log_probs, labels) == pytest.approx(expected, abs=1e-12)
    assert common.nll(mean.log(), labels) == pytest.approx(-expected, abs=1e-12)


def test_likelihoods_do_not_underflow():
    log_probs = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]]).log_softmax(-1)
    assert common.nll(log_probs, [0, 1]) == 0.0
    assert common.nll(log_probs, [1, 1]) == 1000.0
    assert math.copysign(1, common.nll([[0.0]], [0])) == 1  # 0, not -0
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    assert common.nll(certain[0], [0]) == 0.0
    assert common.nll(certain[0], [1]) == math.inf
    assert common.lpd(certain, [0]) == pytest.approx(-math.log(2), abs=1e-15)
    assert common.lpd(certain[:1], [1]) == -math.inf
    log_probs = torch.tensor([[[2000.0, 0.0]], [[1500.0, 0.0]]]).log_softmax(-1)
    assert common.lpd(log_probs, [1]) == pytest.approx(-1500 - math.log(2), abs=1e-9)


# ---- Calibration --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bins", [1, 10, 15, 25])
def test_ece_equals_a_loop_over_bins_that_are_right_closed_in_the_given_precision(bins, dtype):
    edges = torch.arange(bins + 1, dtype=torch.float64).div(bins).to(dtype)
    of_two_classes = edges[edges > 0.5]
    just_above = torch.nextafter(of_two_classes, torch.full_like(of_two_classes, 2))
    random = 0.5 + torch.rand(100, generator=seeded(0), dtype=dtype) / 2
    confidence = torch.cat([random, of_two_classes, just_above])
    correct = torch.rand(len(confidence), generator=seeded(1)) < 0.75  # gaps of both signs
    probs = torch.stack([confidence, (1 - confidence).clamp_min(0)], 1)
    confidence = confidence.clamp_max(1)  # above 1 by rounding: counts as 1
    expected = 0.0
    for b in range(bins):
        inside = (confidence > edges[b]) & (confidence <= edges[b + 1])
        gap = correct[inside].sum() - confidence[inside].double().sum()
        expected += gap.abs().item() / len(confidence)
    assert common.ece(probs, (~correct).long(), bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n, k, bins", [(1, 3, 15), (3000, 50, 15)])
def test_ece_matches_torchmetrics(n, k, bins):
    probs, labels = random_probs(n, k)
    labels = labels.where(probs.amax(1) < 0.6, labels % 2)  # gaps of both signs
    expected = tm.multiclass_calibration_error(probs, labels, k, n_bins=bins, norm="l1").item()
    assert common.ece(probs, labels, bins) == pytest.approx(expected, abs=2e-6)


# ---- Entropy and ensembles ----------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k", [(1, 4, 3), (5, 40, 10), (2, 520, 2**12)])  # the last: blocks
@pytest.mark.parametrize("dtype", FLOATS)
def test_ensemble_uncertainty_equals_entropies_and_divergences_of_scipy(m, n, k, dtype):
    log_probs, _ = random_log_probs(m, n, k, dtype=dtype)
    p = log_probs.double().exp().numpy()
    pi = p.mean(0)
    expected = {"total": stats.entropy(pi, axis=-1),
                "aleatoric": stats.entropy(p, axis=-1).mean(0),
                "epistemic": stats.entropy(p, pi[None], axis=-1).mean(0)}
    ours = common.ensemble_uncertainty(log_probs)
    assert list(ours) == list(expected)
    # Rows of float32 are normalised to 1e-7 only; the two ways of writing a KL differ by as much.
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for name, value in expected.items():
        assert ours[name].shape == (n,) and ours[name].dtype == torch.float64
        assert np.allclose(ours[name], value, atol=tolerance, rtol=0), name
    first = common.entropy(log_probs[0].double().exp())
    assert np.allclose(first, stats.entropy(p[0], axis=-1), atol=1e-12)


def test_ensembles_of_one_hot_and_of_equal_members():
    ours = common.ensemble_uncertainty(torch.eye(5, 8).log()[:, None])
    assert ours["epistemic"].item() == pytest.approx(math.log(5), abs=1e-12)
    assert ours["aleatoric"] == 0  # 0 log 0 = 0
    log_probs, _ = random_log_probs(1, 500, 20, dtype=torch.float32)
    epistemic = common.ensemble_uncertainty(log_probs.expand(6, -1, -1))["epistemic"]
    assert epistemic.min() >= 0 and epistemic.max() < 1e-6


# ---- Ranking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [8, 1, 0])  # ties: few, many, and most
@pytest.mark.parametrize("share", [0.2, 0.8])
def test_ranking_matches_scikit_learn(share, decimals):
    generator = np.random.default_rng(0)
    positive = generator.random(500) < share
    scores = (generator.normal(size=500) + 1.5 * positive).round(decimals)
    auroc = common.auroc(scores, positive)
    assert auroc == pytest.approx(sk.roc_auc_score(positive, scores), abs=1e-12)
    assert common.auroc(-scores, ~positive) == auroc
    expected = sk.average_precision_score(positive, scores)
    assert common.average_precision(scores, positive) == pytest.approx(expected, abs=1e-12)
    fpr, tpr, _ = sk.roc_curve(positive, scores, drop_intermediate=False)
    for level in (0.5, 0.8, 1.0):
        assert common.fpr_at_tpr(scores, positive, level) == fpr[tpr >= level].min()
    assert common.fpr_at_tpr(scores, positive) == fpr[tpr >= 0.95].min()


def test_ranking_by_hand():
    infinite = [-math.inf, -math.inf, 0.0, math.inf]
    assert common.auroc(infinite, [0, 1, 1, 1]) == (0.5 + 1 + 1) / 3
    # 19 of 20 positives, then 20 negatives: a true positive rate of exactly 0.95.
    scores = np.arange(40, 0, -1)
    positive = [1] * 19 + [0] * 20 + [1]
    assert common.fpr_at_tpr(scores, positive) == 0.0
    assert common.fpr_at_tpr(scores, positive, 0.96) == 1.0
    # Neighbouring float64 scores, also as Python floats, are no tie; in float32 they are.
    scores = [1.0, 1.0 + 1e-12]
    assert common.auroc(scores, [0, 1]) == common.auroc(np.array(scores), [0, 1]) == 1.0
    assert common.auroc(torch.tensor(scores, dtype=torch.float32), [0, 1]) == 0.5


@pytest.mark.parametrize("larger_means", ["ood", "id"])
def test_ood_metrics_conventions(larger_means):
    is_ood = np.arange(1000) >= 300
    uncertainty = np.random.default_rng(3).normal(size=1000).round(1) + is_ood
    scores = uncertainty if larger_means == "ood" else -uncertainty
    ours = common.ood_metrics(scores[:300], scores[300:], larger_means=larger_means)
    accepted = min(t for t in uncertainty if (uncertainty[:300] <= t).mean() >= 0.95)
    assert ours == pytest.approx({
        "auroc": sk.roc_auc_score(is_ood, uncertainty),
        "aupr_in": sk.average_precision_score(~is_ood, -uncertainty),
        "aupr_out": sk.average_precision_score(is_ood, uncertainty),
        "fpr95": (uncertainty[300:] <= accepted).mean()}, abs=1e-12)
    assert ours["auroc"] > 0.7 and ours["aupr_out"] > ours["aupr_in"] + 0.1
    # Scores that are equal but for their precision are ties.
    scores = torch.randn(500, generator=seeded(0), dtype=torch.float64)
    widest = common.ood_metrics(scores, scores, larger_means=larger_means)
    assert widest["auroc"] == 0.5
    for inside, outside in ((scores, scores.float()), (scores.float(), scores)):
        ours = common.ood_metrics(inside, outside, larger_means=larger_means)
        assert ours == pytest.approx(widest, abs=1e-12)


def test_the_metrics_of_a_table_have_the_names_of_its_columns():
    log_probs, labels = random_log_probs(1, 200, 5)
    log_probs = log_probs[0]
    probs = log_probs.exp()
    assert common.prediction_metrics(log_probs, labels) == {
        "accuracy": common.accuracy(probs, labels), "nll": common.nll(log_probs, labels),
        "brier": common.brier(probs, labels), "ece15": common.ece(probs, labels)}
    inside = {"total": probs[:90, 0], "density": probs[:90, 1]}
    outside = {"total": probs[90:, 0], "density": probs[90:, 1]}
    ours = common.detection_metrics(inside, outside, {"total": "ood", "density": "id"})
    for score, larger_means in (("total", "ood"), ("density", "id")):
        expected = common.ood_metrics(inside[score], outside[score], larger_means=larger_means)
        for metric, value in expected.items():
            assert ours.pop(f"{metric}_{score}") == value
    assert not ours


# ---- Rejection ----------------------------------------------------------------------------------


def rejection_by_loop(wrong):
    """(PRR, curve) of predictions listed from the most to the least certain, without ties."""
    n = len(wrong)
    errors = sum(wrong)
    curve = np.array([sum(wrong[:k]) for k in range(n, -1, -1)]) / n
    rejected = np.arange(n + 1)
    area = np.trapezoid(curve)
    random_area = np.trapezoid(errors / n * (1 - rejected / n))
    oracle_area = np.trapezoid(np.maximum(errors - rejected, 0) / n)
    return (random_area - area) / (random_area - oracle_area), curve


@pytest.mark.parametrize("uncertainty, correct", [
    ([0.2, 0.9, 0.1, 0.4, 0.5, 0.8], [1, 0, 1, 0, 1, 1]), ([0, 0, 0, 0, 0], [1, 0, 1, 1, 0]),
    ([3, 1, 1, 3, 3, 2], [1, 1, 0, 0, 1, 1]), ([-math.inf, math.inf, math.inf, 0], [1, 0, 1, 0])])
def test_tied_uncertainty_gives_the_expectation_over_all_orders(uncertainty, correct):
    """Every permutation of the rows, stably sorted, is one random order inside the ties."""
    n = len(correct)
    ratios = []
    curves = []
    for order in itertools.permutations(range(n)):
        by_certainty = sorted(order, key=lambda i: uncertainty[i])
        ratio, curve = rejection_by_loop([1 - correct[i] for i in by_certainty])
        ratios.append(ratio)
        curves.append(curve)
    ours = common.prediction_rejection_ratio(uncertainty, correct)
    assert ours == pytest.approx(np.mean(ratios), abs=1e-12)
    rejected, errors = common.rejection_curve(uncertainty, correct)
    assert np.allclose(errors, np.mean(curves, 0), atol=1e-12)
    assert (rejected == np.arange(n + 1) / n).all()
    for outcome in (True, False):  # nothing to rank
        assert common.prediction_rejection_ratio(uncertainty, [outcome] * n) is None


# ---- Temperature --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_temperature_is_the_optimum_and_scales_with_the_logits(scale):
    probs, labels = random_probs(2000, 10, seed=5, dtype=torch.float64)
    logits = scale * probs.log()
    temperature = common.fit_temperature(logits, labels)

    def nll_at(log_t):
        return common.nll((logits / math.exp(log_t)).log_softmax(-1), labels)

    found = minimize_scalar(nll_at, bounds=(-4, 4), method="bounded", options=dict(xatol=1e-10))
    assert temperature == pytest.approx(math.exp(found.x), rel=1e-6)
    assert temperature == pytest.approx(2 / 3 * scale, rel=0.1)  # labels come from logits x 1.5
    assert common.fit_temperature(7 * logits, labels) == pytest.approx(7 * temperature, rel=1e-8)
    assert common.fit_temperature(logits.float(), labels) == pytest.approx(temperature, rel=1e-5)


def test_temperature_has_limits():
    logits = 5 * torch.eye(4)
    labels = torch.arange(4)
    with pytest.warns(UserWarning, match="at its limit, 1000: on these .* worse than guessing"):
        assert common.fit_temperature(logits, labels.roll(1)) == 1e3  # always wrong
    assert common.fit_temperature(torch.ones(4, 4), labels) == 1.0  # no T matters
    # Among a million right predictions of small margins, there is no reason to stop earlier.
    many = (torch.eye(2) / 2).repeat(2**19, 1)
    assert common.fit_temperature(many, torch.arange(2**20) % 2) == pytest.approx(0.1)


@pytest.mark.parametrize("margin", [2.0, 20.0])
def test_few_validation_examples_that_are_all_right_do_not_make_predictions_certain(margin):
    """The optimum is T = 0, where every later error costs hundreds of nats, and densities tie."""
    labels = torch.arange(10) % 3
    logits = margin * torch.eye(3)[labels] + 0.1 * torch.randn(10, 3, generator=seeded(0))
    with pytest.warns(UserWarning, match="10 validation examples cannot justify"):
        temperature = common.fit_temperature(logits, labels)
    confidence = (logits / temperature).softmax(1).amax(1).mean().item()
    if margin < 20:
        assert confidence == pytest.approx(11 / 12, abs=1e-6)
    else:
        assert temperature == 1.0  # never a larger one
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # three errors tell the temperature
        common.fit_temperature(logits, (labels + (torch.arange(10) < 3)) % 3)


# ---- Regression by mixtures of Gaussians --------------------------------------------------------


def mixtures(s=5, n=80, seed=0, dtype=torch.float64):
    """Means and variances [S, N], targets [N]: members that disagree, targets of every rank."""
    generator = seeded(seed)
    centre = 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    means = centre + torch.randn(s, n, generator=generator, dtype=torch.float64)
    variances = torch.rand(s, n, generator=generator, dtype=torch.float64) + 0.05
    targets = centre + 1.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return means.to(dtype), variances.to(dtype), targets.to(dtype)


def as_arrays(*tensors):
    return [tensor.double().numpy() for tensor in tensors]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("s, n", [(1, 1), (5, 80)])
def test_moments_and_density_are_those_of_the_mixture(s, n, dtype):
    means, variances, targets = mixtures(s, n, dtype=dtype)
    ours = common.gaussian_mixture_moments(means, variances)
    log_density = common.mixture_lpd(means, variances, targets)
    m, v, y = as_arrays(means, variances, targets)
    mean = m.mean(0)
    second_moment = (v + m**2).mean(0)
    expected = {"mean": mean, "aleatoric": v.mean(0), "epistemic": m.var(0, ddof=0),
                "total": second_moment - mean**2}
    for name, value in expected.items():
        assert getattr(ours, name).dtype == torch.float64
        assert np.allclose(getattr(ours, name), value, atol=1e-11, rtol=0), name
    density = norm.pdf(y, m, np.sqrt(v)).mean(0)
    assert log_density == pytest.approx(np.log(density).mean(), abs=1e-11)
    small = common.mixture_lpd([[0.0], [9.0]], [[1.0], [4.0]], [100.0])  # does not underflow
    assert small == pytest.approx(norm.logpdf(100, 9, 2) - math.log(2), rel=1e-14)


def test_regression_ece_equals_the_gaps_at_searched_quantiles():
    means, variances, targets = as_arrays(*mixtures(4, 30))
    levels = np.linspace(0.01, 0.99, 20)
    is_below = np.zeros((30, 20))
    for i, (m, sd) in enumerate(zip(means.T, np.sqrt(variances.T))):
        for j, level in enumerate(levels):

            def excess(x, m=m, sd=sd, level=level):
                return norm.cdf((x - m) / sd).mean() - level

            is_below[i, j] = targets[i] <= brentq(excess, -99, 99, xtol=1e-12)
    expected = np.abs(is_below.mean(0) - levels).mean()
    assert expected > 0.01
    ours = common.regression_metrics(means, variances, targets)
    assert ours["ece"] == pytest.approx(expected, abs=1e-12)


def test_regression_metrics():
    means, variances, targets = mixtures()
    ours = common.regression_metrics(means, variances, targets)
    assert list(ours) == ["lpd", "mae", "rmse", "ece"]
    mean, y = as_arrays(means.mean(0), targets)
    assert ours["mae"] == pytest.approx(sk.mean_absolute_error(y, mean), rel=1e-12)
    assert ours["rmse"] == pytest.approx(sk.root_mean_squared_error(y, mean), rel=1e-12)
    assert ours["lpd"] == common.mixture_lpd(means, variances, targets)
    # An energy far from 0 loses digits, but only those that float64 no longer holds.
    shifted = common.regression_metrics(means - 11000, variances, targets - 11000)
    assert shifted == pytest.approx(ours, rel=1e-8, abs=1e-8)


def test_the_standard_error_is_unbiased_and_needs_two_values():
    assert common.standard_error([0.0, 2.0]) == 1.0  # sqrt(2) / sqrt(2)
    assert common.standard_error([0.0]) is None


# ---- Input --------------------------------------------------------------------------------------

PROBS, LABELS = random_probs(40, 4, dtype=torch.float64)
LOG_PROBS = PROBS.log()
SAMPLES, SAMPLE_LABELS = random_log_probs(4, 30, 5)
MEANS, VARIANCES, TARGETS = mixtures(6, 50)


def top_2(probs, labels):
    return common.top_k_accuracy(probs, labels, 2)


def ood(id_scores, ood_scores):
    return common.ood_metrics(id_scores, ood_scores, larger_means="id")


IS_ODD = LABELS % 2
SCORES = [
    (common.accuracy, PROBS, LABELS), (top_2, PROBS, LABELS), (common.brier, PROBS, LABELS),
    (common.ece, PROBS, LABELS), (common.nll, LOG_PROBS, LABELS),
    (common.lpd, SAMPLES, SAMPLE_LABELS), (common.fit_temperature, LOG_PROBS, LABELS),
    (common.auroc, PROBS[:, 0], IS_ODD), (common.average_precision, PROBS[:, 0], IS_ODD),
    (common.fpr_at_tpr, PROBS[:, 0], IS_ODD), (ood, PROBS[:, 0], PROBS[:, 1]),
    (common.prediction_rejection_ratio, PROBS[:, 0], IS_ODD),
    (common.regression_metrics, MEANS, VARIANCES, TARGETS), (common.standard_error, TARGETS)]
NAMES = [metric.__name__ for metric, *_ in SCORES]
CHANGES = [
    torch.Tensor.tolist, torch.Tensor.numpy,
    lambda x: x.clone().requires_grad_() if x.is_floating_point() else x.int(),
    lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2]]  # strides


def narrowed(x):
    return x.float() if x.is_floating_point() else x.to(torch.uint8)


@pytest.mark.parametrize("score", SCORES, ids=NAMES)
def test_input_types(score):
    """The same numbers in other types give the same Python floats; no argument is written to."""
    metric, *arguments = score
    before = [x.clone() for x in arguments]
    expected = metric(*arguments)
    values = expected.values() if isinstance(expected, dict) else [expected]
    assert all(type(value) is float for value in values)
    for change in CHANGES:
        ours = metric(*map(change, arguments))
        assert ours == pytest.approx(expected, rel=1e-12, abs=1e-12), change
    assert metric(*map(narrowed, arguments)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(map(torch.equal, before, arguments))
    if torch.cuda.is_available():
        on_gpu = [x.cuda() for x in arguments]
        for mixed in (on_gpu, [on_gpu[0], *arguments[1:]]):
            assert metric(*mixed) == pytest.approx(expected, rel=1e-8, abs=1e-10)


def refuses(metric, message, *arguments):
    with pytest.raises(ValueError, match=message) as refusal:
        metric(*arguments)
    assert "\n" not in str(refusal.value)


def changed(tensor, value):
    tensor = tensor.clone()
    tensor[3, 1] = value
    return tensor


def lpd_of_one(log_probs, labels):
    return common.lpd(log_probs[None], labels)


OF_PROBS = [common.brier, common.ece]
OF_LOG_PROBS = [common.nll, lpd_of_one]
OF_CLASSES = [*OF_PROBS, *OF_LOG_PROBS, common.accuracy, top_2, common.fit_temperature]


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_scores_and_labels_that_do_not_fit_are_refused(metric):
    inputs = LOG_PROBS if metric in OF_LOG_PROBS else PROBS
    refuses(metric, "NaN", changed(inputs, math.nan), LABELS)
    for wrong in (inputs[0], inputs[:0], inputs[:, :0]):
        refuses(metric, "dimensions, not empty", wrong, LABELS[:len(wrong)])
    for wrong in (LABELS[1:], LABELS[:, None], LABELS.float()):
        refuses(metric, "labels: expected 40 integers", inputs, wrong)
    for shift in (1, -1):
        refuses(metric, r"labels: expected 0\.\.3", inputs, LABELS + shift)


@pytest.mark.parametrize("metric", [*OF_PROBS, *OF_LOG_PROBS, common.entropy])
def test_rows_that_are_no_probabilities_are_refused(metric):
    others = [] if metric == common.entropy else [LABELS]
    wrong_sum = changed(PROBS, PROBS[3, 1] + 1e-2)
    negative = PROBS + torch.tensor([1.0, -1.0, 0.0, 0.0])
    wrong_rows = [wrong_sum, negative, changed(PROBS, math.inf), 5 * LOG_PROBS]
    if metric in OF_LOG_PROBS:
        wrong_rows = [PROBS, 5 * LOG_PROBS, wrong_sum.log(), changed(LOG_PROBS, math.inf)]
    for wrong in wrong_rows:
        refuses(metric, "sum to 1", wrong, *others)
    in_bfloat16 = torch.full((3, 3), 1 / 3, dtype=torch.bfloat16)  # the sum of a row is 1.002
    refuses(common.ece, "softmax in float32", in_bfloat16, [0, 1, 1])


BY_THRESHOLD = [common.auroc, common.average_precision, common.fpr_at_tpr]


@pytest.mark.parametrize("metric", [*BY_THRESHOLD, common.rejection_curve,
                                    common.prediction_rejection_ratio])
def test_scores_and_masks_that_do_not_fit_are_refused(metric):
    refuses(metric, "NaN", [0.0, math.nan], [0, 1])
    refuses(metric, "not empty", [], [])
    refuses(metric, "expected 3 values", [0.1, 0.2, 0.3], [0, 1])
    refuses(metric, "bool or 0 and 1", [0.1, 0.2], [0, 2])
    refuses(metric, "1 dimensions", [[0.1, 0.2]], [[0, 1]])
    if metric in BY_THRESHOLD:
        for only in (0, 1):
            refuses(metric, "only one", [0.1, 0.2], [only, only])


def test_shapes_and_values_out_of_range_are_refused():
    samples = LOG_PROBS[None]
    for metric, message, *arguments in [
            (common.lpd, "3 dimensions", LOG_PROBS, LABELS),
            (common.lpd, "3 dimensions, not empty", samples[:0], LABELS),
            (common.ensemble_uncertainty, "3 dimensions, not empty", LOG_PROBS),
            (common.ensemble_uncertainty, "NaN", changed(LOG_PROBS, math.nan)[None]),
            (common.ensemble_uncertainty, "sum to 1", PROBS[None]),
            (common.entropy, "NaN", changed(PROBS, math.nan)),
            (common.fit_temperature, "finite", changed(PROBS, math.inf), LABELS),
            (ood, "ood_scores", [0.0], []), (ood, "id_scores", [], [0.0]),
            (ood, "ood_scores: contains NaN", [0.0], [math.nan]),
            (common.standard_error, "NaN", [1.0, math.nan])]:
        refuses(metric, message, *arguments)
    with pytest.raises(ValueError, match="larger_means: expected ood or id"):
        common.ood_metrics([0.0], [1.0], larger_means="larger")


OF_TARGETS = [common.mixture_lpd, common.regression_metrics]


@pytest.mark.parametrize("metric", [common.gaussian_mixture_moments, *OF_TARGETS])
def test_mixtures_and_targets_that_do_not_fit_are_refused(metric):
    targets = [TARGETS] if metric in OF_TARGETS else []
    refuses(metric, "means: contains NaN", changed(MEANS, math.nan), VARIANCES, *targets)
    refuses(metric, "variances: contains NaN", MEANS, changed(VARIANCES, math.nan), *targets)
    for wrong in (0.0, -1e-3):
        refuses(metric, "all above 0", MEANS, changed(VARIANCES, wrong), *targets)
    refuses(metric, r"variances: expected \[6, 50\]", MEANS, VARIANCES[:2], *targets)
    refuses(metric, "means: .*not empty", MEANS[:0], VARIANCES[:0], *targets)
    if metric in OF_TARGETS:
        refuses(metric, "targets: expected 50 values", MEANS, VARIANCES, TARGETS[1:])
