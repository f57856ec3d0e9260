"""Metrics of common.py against scikit-learn, torchmetrics, uncertainty-toolbox, SciPy, brute-force
loops, integrals and hand values."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm
from uncertainty_toolbox import metrics as toolbox

import common

BINARY = [(seed, decimals) for seed in range(3) for decimals in (None, 1, 0)]  # rounding makes ties


def random_probs(n=400, k=7, seed=0, scale=2.0, dtype=torch.float32):
    """Softmax rows whose labels are drawn from a sharper softmax: neither calibrated nor random."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64) * scale
    labels = torch.multinomial((1.5 * logits).softmax(-1), 1, generator=generator)[:, 0]
    return logits.softmax(-1).to(dtype), labels


def with_confidence(confidence, correct, dtype=torch.float64):
    """Two-class rows whose largest probability (> 1/2) is given, right or wrong as given."""
    confidence = torch.as_tensor(confidence, dtype=dtype)
    return torch.stack([confidence, 1 - confidence], 1), 1 - torch.as_tensor(correct).long()


def binary_scores(seed, decimals, n=500, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.3
    scores = torch.randn(n, generator=generator, dtype=dtype) + positive
    return (scores if decimals is None else scores.round(decimals=decimals)), positive


# ---- Accuracy, NLL, Brier ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n,k", [(1, 2), (1, 1), (400, 7), (300, 120)])
def test_scores_of_predictions_match_scikit_learn(n, k, dtype):
    probs, labels = random_probs(n, k, dtype=dtype)
    p, y, rows = probs.double().numpy(), labels.numpy(), np.arange(n)
    assert common.accuracy(probs, labels) == sk.accuracy_score(y, p.argmax(1))
    one_hot = np.eye(k)[y]
    expected = ((p - one_hot) ** 2).sum(1).mean()
    assert common.brier(probs, labels) == pytest.approx(expected, abs=1e-9)
    expected = -np.log(p[rows, y]).mean()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert common.nll(probs.log(), labels) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    if k > 1 and dtype == torch.float64:
        peer = sk.log_loss(y, p, labels=range(k))
        assert common.nll(probs.log(), labels) == pytest.approx(peer, rel=1e-9)


def test_top_k_ties_rank_by_class_index():
    """Against a stable descending sort, on scores of three values: almost every row has ties."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(3, (300, 6), generator=generator)
    labels = torch.randint(6, (300,), generator=generator)
    order = np.argsort(-scores.numpy(), axis=1, kind="stable")
    for k in range(1, 7):
        expected = (order[:, :k] == labels.numpy()[:, None]).any(1).mean()
        assert common.top_k_accuracy(scores, labels, k) == pytest.approx(expected, abs=1e-12)
    assert common.top_k_accuracy(scores, labels, 1) == common.accuracy(scores, labels)
    assert common.accuracy(torch.zeros(3, 4), torch.tensor([0, 1, 0])) == 2 / 3
    infinite = torch.tensor([[-math.inf, 0.0], [math.inf, math.inf]])
    assert common.accuracy(infinite, torch.tensor([1, 0])) == 1.0


def test_nll_does_not_underflow():
    logits = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]])
    assert common.nll(logits.log_softmax(-1), torch.tensor([0, 1])) == 0.0
    assert common.nll(logits.log_softmax(-1), torch.tensor([1, 1])) == 1000.0
    assert math.copysign(1, common.nll(torch.zeros(1, 1), torch.tensor([0]))) == 1  # 0, not -0
    certain = torch.tensor([[0.0, -math.inf]])
    assert common.nll(certain, torch.tensor([0])) == 0.0
    assert common.nll(certain, torch.tensor([1])) == math.inf


def test_brier_by_hand():
    probs = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.25, 0.25]])
    assert common.brier(probs[:1], torch.tensor([0])) == 0.0
    assert common.brier(probs[1:2], torch.tensor([2])) == 2.0
    expected = (0 + 2 + 0.375) / 3
    assert common.brier(probs, torch.tensor([0, 2, 0])) == pytest.approx(expected, abs=1e-15)


# ---- Calibration ----


def bars_by_loop(confidence, correct, bins):
    """(count, mean confidence, accuracy) of each bin (lo, hi], edges b / bins."""
    bars = []
    for b in range(bins):
        inside = [
            (c, ok)
            for c, ok in zip(confidence, correct)
            if (c > b / bins or (b == 0 and c == 0)) and c <= (b + 1) / bins
        ]
        count = max(len(inside), 1)
        sums = [sum(column) for column in zip(*inside)] or [0, 0]
        bars.append((len(inside), sums[0] / count, sums[1] / count))
    return bars


@pytest.mark.parametrize("bins", [1, 10, 15, 25])
@pytest.mark.parametrize("seed", range(2))
def test_calibration_equals_a_loop_over_bins(bins, seed):
    """Random confidences mixed with every bin edge, 0.5 and exactly 1."""
    generator = np.random.default_rng(seed)
    edges = [b / bins for b in range(bins + 1) if 2 * b > bins]
    confidence = np.concatenate([generator.uniform(0.5, 1, 200), np.repeat(edges, 3), [1.0, 1.0]])
    correct = generator.random(len(confidence)) < 0.75  # gaps of both signs
    bars = bars_by_loop(confidence, correct, bins)
    probs, labels = with_confidence(confidence, correct)
    n = len(confidence)
    expected = sum(count / n * abs(acc - conf) for count, conf, acc in bars)
    assert common.ece(probs, labels, bins) == pytest.approx(expected, abs=1e-12)
    expected = max(abs(acc - conf) for _, conf, acc in bars)
    assert common.mce(probs, labels, bins) == pytest.approx(expected, abs=1e-12)
    if bins != 15:
        assert common.ece(probs, labels) == common.ece(probs, labels, 15)
        assert common.ece(probs, labels) != common.ece(probs, labels, bins)
    ours = common.reliability(confidence, correct, bins)
    assert np.allclose(np.array(ours).T, bars, atol=1e-12, rtol=0)


@pytest.mark.parametrize("n,k", [(1, 3), (400, 7), (3000, 50)])
def test_calibration_matches_torchmetrics(n, k):
    probs, labels = random_probs(n, k)
    labels = labels.where(probs.amax(1) < 0.6, labels % 2)  # gaps of both signs
    for ours, norm in ((common.ece, "l1"), (common.mce, "max")):
        theirs = tm.multiclass_calibration_error(probs, labels, k, n_bins=15, norm=norm)
        assert ours(probs, labels, 15) == pytest.approx(float(theirs), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [10, 15, 25])
def test_bins_are_right_closed_in_the_precision_given(bins, dtype):
    edges = torch.arange(bins + 1, dtype=torch.float64).div(bins).to(dtype)
    counts = common.reliability(edges, torch.ones(bins + 1), bins).counts
    assert counts.tolist() == [2] + [1] * (bins - 1)  # 0 joins the first bin, every edge closes one
    above = torch.nextafter(edges[:-1], torch.ones(bins, dtype=dtype))
    assert common.reliability(above, torch.ones(bins), bins).counts.tolist() == [1] * bins
    if bins == 15:
        for confidence, expected in ((0.2, 2), (1.0, 14), (0.0, 0), (1 / 15, 0), (1 + 1e-7, 14)):
            counts = common.reliability(torch.tensor([confidence], dtype=dtype), [True]).counts
            assert counts.argmax() == expected and counts.sum() == 1


def test_reliability_reports_means_and_zero_for_empty_bins():
    bars = common.reliability([0.55, 0.65, 1 + 1e-7], [1, 0, 1], 2)
    assert bars.counts.tolist() == [0, 3]
    assert bars.confidence == pytest.approx([0, 2.2 / 3], abs=1e-12)  # the excess over 1 is cut off
    assert bars.accuracy == pytest.approx([0, 2 / 3])


@pytest.mark.parametrize("excess", [2e-7, 5e-4])
def test_a_confidence_a_hair_above_one_counts_as_one(excess):
    """Rounding, or rows that sum to 1 within the tolerance."""
    probs = torch.tensor([[1 + excess, 0.0], [0.7, 0.3]])
    assert probs[0, 0] > 1
    for metric, expected in ((common.ece, 0.15), (common.adaptive_ece, 0.15), (common.mce, 0.3)):
        assert metric(probs, torch.tensor([0, 0])) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("n,bins", [(1, 15), (7, 15), (60, 15), (101, 10), (101, 1)])
def test_adaptive_ece_equals_array_split(n, bins):
    generator = np.random.default_rng(n)
    confidence, correct = generator.uniform(0.5, 1, n), generator.random(n) < 0.75
    order = np.argsort(confidence)
    parts = np.array_split(np.stack([confidence[order], correct[order]]), bins, axis=1)
    expected = sum(abs(part[0].sum() - part[1].sum()) for part in parts) / n
    ours = common.adaptive_ece(*with_confidence(confidence, correct), bins)
    assert ours == pytest.approx(expected, abs=1e-12)


def test_adaptive_ece_does_not_depend_on_row_order_under_ties():
    confidence, correct = [0.6, 0.8, 0.8, 0.8, 0.8, 0.9], [0, 1, 1, 0, 0, 1]
    values = set()
    for order in itertools.permutations(range(6)):
        probs, labels = with_confidence(confidence, correct)
        values.add(common.adaptive_ece(probs[list(order)], labels[list(order)], 2))
    assert len(values) == 1  # three rows a bin: the four tied ones count 1/2 wherever the cut falls
    expected = (abs(0.6 + 0.8 + 0.8 - 0 - 0.5 - 0.5) + abs(0.8 + 0.8 + 0.9 - 0.5 - 0.5 - 1)) / 6
    assert values.pop() == pytest.approx(expected, abs=1e-12)


# ---- Entropy and ensembles ----


def test_entropy_by_hand_and_against_the_definition():
    certain, uniform = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.full((4,), 0.25)
    assert common.entropy(certain) == 0.0
    assert float(common.entropy(uniform)) == pytest.approx(math.log(4), abs=1e-15)
    probs = torch.stack([random_probs(50, 9, seed=s)[0] for s in range(3)]).double()
    ours = common.entropy(probs)
    assert ours.shape == (3, 50) and ours.dtype == torch.float64
    assert torch.allclose(ours, -(probs * probs.log()).sum(-1), atol=1e-12, rtol=0)


def random_ensemble(m, n, k, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(m, n, k, generator=generator, dtype=dtype)).log_softmax(-1)


@pytest.mark.parametrize("m,n,k", [(1, 4, 3), (2, 5, 2), (5, 40, 10), (3, 70, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ensemble_uncertainty_equals_loops_over_members_and_pairs(m, n, k, dtype):
    log_p = random_ensemble(m, n, k, dtype=dtype)
    ours, log_p = common.ensemble_uncertainty(log_p), log_p.double()
    p = log_p.exp()
    pi = p.mean(0)
    pairs = [(p[i] * (log_p[i] - log_p[j])).sum(-1) for i in range(m) for j in range(m)]
    expected = {
        "total": -(pi * pi.log()).sum(-1),
        "aleatoric": sum(-(p[i] * log_p[i]).sum(-1) for i in range(m)) / m,
        "epistemic": sum((p[i] * (log_p[i] - pi.log())).sum(-1) for i in range(m)) / m,
        "rmi": sum((pi * (pi.log() - log_p[i])).sum(-1) for i in range(m)) / m,
        "epkl": sum(pairs) / m**2,
    }
    assert list(ours) == list(expected)
    # float32 rows are normalised to 1e-7 only, where the two ways of writing a KL differ as much
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for name, value in expected.items():
        assert ours[name].shape == (n,)
        assert torch.allclose(ours[name], value, atol=tolerance, rtol=0), name


def test_ensemble_bounds_hold_in_float32_even_when_members_agree():
    same = random_ensemble(1, 500, 20, dtype=torch.float32).expand(6, -1, -1)
    ours = common.ensemble_uncertainty(same)
    for name in ("epistemic", "rmi", "epkl"):
        assert ours[name].min() >= 0 and ours[name].max() < 1e-6
    ours = common.ensemble_uncertainty(random_ensemble(6, 500, 20, dtype=torch.float32))
    assert (ours["epistemic"] <= ours["total"]).all() and ours["total"].max() <= math.log(20) + 1e-6
    assert (ours["epistemic"] <= math.log(6) + 1e-6).all() and (ours["epistemic"] > 0.1).any()


def test_ensemble_of_one_hot_members_has_only_epistemic_uncertainty():
    ours = common.ensemble_uncertainty(torch.eye(5, 8).log()[:, None])
    assert float(ours["epistemic"]) == pytest.approx(math.log(5), abs=1e-12)
    assert float(ours["total"]) == pytest.approx(math.log(5), abs=1e-12)
    assert ours["aleatoric"] == 0 and ours["rmi"] == math.inf and ours["epkl"] == math.inf
    agreed = common.ensemble_uncertainty(torch.eye(3).log()[[1, 1]][:, None])
    assert all(value == 0 for value in agreed.values())  # 0 log 0 = 0 in every term


# ---- Ranking ----


@pytest.mark.parametrize("seed,decimals", BINARY)
def test_ranking_matches_scikit_learn(seed, decimals):
    scores, positive = binary_scores(seed, decimals)
    s, t = scores.numpy(), positive.numpy()
    assert common.auroc(scores, positive) == pytest.approx(sk.roc_auc_score(t, s), abs=1e-12)
    expected = sk.average_precision_score(t, s)
    assert common.average_precision(scores, positive) == pytest.approx(expected, abs=1e-12)
    fpr, tpr, _ = sk.roc_curve(t, s, drop_intermediate=False)
    for level in (0.5, 0.8, 0.95, 1.0):
        assert common.fpr_at_tpr(scores, positive, level) == fpr[tpr >= level].min()
    assert common.fpr_at_tpr(scores, positive) == fpr[tpr >= 0.95].min()
    if decimals is None:  # average precision is the step sum, not the trapezoid
        precision, recall, _ = sk.precision_recall_curve(t, s)
        assert abs(sk.auc(recall, precision) - common.average_precision(scores, positive)) > 1e-5


@pytest.mark.parametrize("seed,decimals", BINARY)
def test_auroc_equals_the_count_over_pairs_and_is_symmetric(seed, decimals):
    scores, positive = binary_scores(seed, decimals, n=120)
    pairs = scores[positive][:, None] - scores[~positive]
    expected = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
    assert common.auroc(scores, positive) == pytest.approx(float(expected), abs=1e-14)
    assert common.auroc(-scores, ~positive) == common.auroc(scores, positive)
    assert common.auroc(-scores, positive) == pytest.approx(1 - float(expected), abs=1e-14)


def test_ranking_by_hand():
    scores, positive = [4.0, 3.0, 2.0, 1.0], [1, 0, 1, 0]
    assert common.auroc(scores, positive) == 0.75
    assert common.average_precision(scores, positive) == (1 + 2 / 3) / 2
    assert common.fpr_at_tpr(scores, positive) == 0.5
    assert common.fpr_at_tpr(scores, positive, 0.5) == 0.0
    constant = np.zeros(8), np.arange(8) < 3
    assert common.auroc(*constant) == 0.5 and common.average_precision(*constant) == 3 / 8
    assert common.fpr_at_tpr(*constant) == 1.0
    infinite = [-math.inf, -math.inf, 0.0, math.inf]
    assert common.auroc(infinite, [0, 1, 1, 1]) == (0.5 + 1 + 1) / 3
    # 19 of 20 positives is a rate of 0.95 exactly: the threshold that finds them is enough
    assert common.fpr_at_tpr(np.arange(40, 0, -1), [1] * 19 + [0] * 20 + [1]) == 0.0


def test_scores_keep_their_precision():
    """Neighbouring float64 scores, also as Python floats, are no tie; in float32 they are."""
    scores = [1.0, 1.0 + 1e-12]
    assert common.auroc(scores, [0, 1]) == common.auroc(np.array(scores), [0, 1]) == 1.0
    assert common.auroc(torch.tensor(scores, dtype=torch.float32), [0, 1]) == 0.5


@pytest.mark.parametrize("larger_means", ["ood", "id"])
def test_ood_metrics_conventions(larger_means):
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(1000, generator=generator, dtype=torch.float64).round(decimals=1).numpy()
    is_ood = np.arange(1000) >= 300
    u += is_ood
    scores = u if larger_means == "ood" else -u
    ours = common.ood_metrics(scores[:300], scores[300:], larger_means=larger_means)
    assert ours["auroc"] == pytest.approx(sk.roc_auc_score(is_ood, u), abs=1e-12)
    assert ours["aupr_out"] == pytest.approx(sk.average_precision_score(is_ood, u), abs=1e-12)
    assert ours["aupr_in"] == pytest.approx(sk.average_precision_score(~is_ood, -u), abs=1e-12)
    accepted = min(t for t in u if (u[:300] <= t).mean() >= 0.95)
    assert ours["fpr95"] == (u[300:] <= accepted).mean()
    assert ours["auroc"] > 0.7 and ours["aupr_out"] > ours["aupr_in"] + 0.1
    other = {"ood": "id", "id": "ood"}[larger_means]
    flipped = common.ood_metrics(scores[:300], scores[300:], larger_means=other)
    assert flipped["auroc"] == pytest.approx(1 - ours["auroc"], abs=1e-12)


def test_ood_metrics_of_constant_and_infinite_scores():
    ours = common.ood_metrics(np.zeros(10), np.zeros(30), larger_means="id")
    assert ours == {"auroc": 0.5, "aupr_in": 0.25, "aupr_out": 0.75, "fpr95": 1.0}
    ours = common.ood_metrics(np.zeros(10), np.full(30, -np.inf), larger_means="id")
    assert ours == {"auroc": 1.0, "aupr_in": 1.0, "aupr_out": 1.0, "fpr95": 0.0}


# ---- Rejection ----


def rejection_by_loop(wrong):
    """(PRR, curve) of predictions listed from the most to the least certain, without ties."""
    n, errors = len(wrong), sum(wrong)
    kept = [sum(wrong[:k]) for k in range(n + 1)]
    curve = np.array(kept[::-1]) / n

    def area(y):
        return sum((a + b) / 2 for a, b in zip(y, y[1:])) / n

    random = area([errors / n * (1 - i / n) for i in range(n + 1)])
    oracle = area([max(errors - i, 0) / n for i in range(n + 1)])
    prr = (random - area(curve)) / (random - oracle)
    return prr, curve


@pytest.mark.parametrize("seed", range(2))
def test_rejection_equals_the_loop_and_twice_auroc_minus_one(seed):
    generator = np.random.default_rng(seed)
    uncertainty, correct = generator.normal(size=80), generator.random(80) < 0.8
    prr, curve = rejection_by_loop((~correct)[np.argsort(uncertainty)].tolist())
    assert common.prediction_rejection_ratio(uncertainty, correct) == pytest.approx(prr, abs=1e-12)
    rejected, error = common.rejection_curve(uncertainty, correct)
    assert np.allclose(error, curve, atol=1e-15) and np.array_equal(rejected, np.arange(81) / 80)
    tied = uncertainty.round(0)  # the identity with AUROC holds for ties as well
    expected = 2 * sk.roc_auc_score(~correct, tied) - 1
    assert common.prediction_rejection_ratio(tied, correct) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "uncertainty,correct",
    [
        ([0, 0, 0, 0, 0], [1, 0, 1, 1, 0]),
        ([1, 2, 2, 2, 3], [1, 0, 1, 1, 0]),
        ([3, 1, 1, 3, 3, 2], [1, 1, 0, 0, 1, 1]),
        ([-math.inf, math.inf, math.inf, 0], [1, 0, 1, 0]),
    ],
)
def test_tied_uncertainty_gives_the_expectation_over_all_orders(uncertainty, correct):
    """Every permutation of the rows, stably sorted, is one random order inside the ties."""
    outcomes = []
    for order in itertools.permutations(range(len(correct))):
        wrong = [1 - correct[i] for i in sorted(order, key=lambda i: uncertainty[i])]
        outcomes.append(rejection_by_loop(wrong))
    prr, curve = (sum(column) / len(outcomes) for column in zip(*outcomes))
    assert common.prediction_rejection_ratio(uncertainty, correct) == pytest.approx(prr, abs=1e-12)
    assert np.allclose(common.rejection_curve(uncertainty, correct)[1], curve, atol=1e-12)


@pytest.mark.parametrize("correct", [[True], [False], [True] * 5, [False] * 5])
def test_rejection_with_nothing_to_rank(correct):
    uncertainty = np.arange(len(correct))
    assert common.prediction_rejection_ratio(uncertainty, correct) is None
    assert common.prediction_rejection_ratio(np.zeros(len(correct)), correct) is None


# ---- Temperature ----


def nll_at(logits, labels, temperature):
    return common.nll((logits.double() / temperature).log_softmax(-1), labels)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_temperature_is_the_optimum_and_scales_with_the_logits(scale):
    probs, labels = random_probs(2000, 10, seed=5, dtype=torch.float64)
    logits = scale * probs.log()
    temperature = common.fit_temperature(logits, labels)
    found = minimize_scalar(
        lambda log_t: nll_at(logits, labels, math.exp(log_t)),
        bounds=(-4, 4),
        method="bounded",
        options=dict(xatol=1e-10),
    )
    assert temperature == pytest.approx(math.exp(found.x), rel=1e-6)
    assert temperature == pytest.approx(2 / 3 * scale, rel=0.1)  # labels come from logits x 1.5
    assert nll_at(logits, labels, temperature) < nll_at(logits, labels, 1.0)
    for s in (0.1, 7.0):
        scaled = common.fit_temperature(s * logits, labels)
        assert scaled == pytest.approx(s * temperature, rel=1e-8)
    float32 = common.fit_temperature(logits.float(), labels)
    assert float32 == pytest.approx(temperature, rel=1e-5) and isinstance(float32, float)


def test_temperature_saturates():
    eye, labels = 5 * torch.eye(4), torch.arange(4)
    assert common.fit_temperature(eye, labels) == 1e-3  # separable: sharper is better for ever
    assert common.fit_temperature(200 * eye, labels) == 1e-3
    assert common.fit_temperature(eye, labels.roll(1)) == 1e3  # always wrong: flatter is
    assert common.fit_temperature(torch.ones(4, 4), labels) == 1.0  # no T matters
    probs, labels = random_probs(300, 5, dtype=torch.float64)
    assert 10 < common.fit_temperature(20 * probs.log(), labels) < 20


# ---- Standard error ----


def test_standard_error():
    values = [0.91, 0.93, 0.9, 0.95, 0.92]
    expected = np.std(values, ddof=1) / math.sqrt(5)
    assert common.standard_error(values) == pytest.approx(expected, rel=1e-12)
    assert common.standard_error(torch.tensor([1.0, 3.0])) == 1.0
    assert common.standard_error([2, 2, 2]) == 0.0
    assert json.dumps(common.standard_error([0.5])) == "null"


# ---- Input ----

PROBS, LABELS = random_probs(40, 4)
LOG_PROBS = PROBS.log()
SCALARS = {
    "accuracy": lambda p, y: common.accuracy(p, y),
    "top_k_accuracy": lambda p, y: common.top_k_accuracy(p, y, 2),
    "nll": lambda p, y: common.nll(p.log(), y),
    "brier": lambda p, y: common.brier(p, y),
    "ece": lambda p, y: common.ece(p, y),
    "mce": lambda p, y: common.mce(p, y),
    "adaptive_ece": lambda p, y: common.adaptive_ece(p, y),
    "entropy": lambda p, y: common.entropy(p).mean().item(),
    "ensemble": lambda p, y: common.ensemble_uncertainty(p.log()[None])["total"].mean().item(),
    "auroc": lambda p, y: common.auroc(p[:, 0], y == 0),
    "prr": lambda p, y: common.prediction_rejection_ratio(p[:, 0], y == 0),
    "temperature": lambda p, y: common.fit_temperature(p.log(), y),
}


@pytest.mark.parametrize("name", SCALARS)
def test_input_types(name):
    """Strides, gradients, integer types and float64 change nothing; out comes a Python float."""
    metric = SCALARS[name]
    expected = metric(PROBS, LABELS)
    assert type(expected) is float
    assert metric(PROBS.t().contiguous().t(), LABELS) == pytest.approx(expected, rel=1e-6)
    assert metric(PROBS.double(), LABELS.to(torch.uint8)) == pytest.approx(expected, rel=1e-5)
    assert metric(PROBS.clone().requires_grad_(), LABELS.int()) == expected
    before = PROBS.clone()
    metric(before, LABELS)
    assert torch.equal(before, PROBS)  # no argument is written to


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(name):
    probs, labels = random_probs(3000, 200)
    expected = SCALARS[name](probs, labels)
    assert SCALARS[name](probs.cuda(), labels.cuda()) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert SCALARS[name](probs.cuda(), labels) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_numpy_and_lists_are_accepted():
    p, y = PROBS.double().numpy(), LABELS.numpy()
    expected = common.ece(PROBS.double(), LABELS)
    assert common.ece(p, y) == common.ece(p.tolist(), y.tolist()) == expected
    assert common.accuracy([[0, 1], [1, 0]], [1, 1]) == 0.5  # votes, one-hot
    assert common.brier([[0, 1], [1, 0]], [1, 1]) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype):
    """Exact halves give the float64 result; a bfloat16 softmax whose rows miss 1 is refused."""
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])
    labels = torch.tensor([0, 1, 1])
    for metric in (common.accuracy, common.ece, common.brier):
        assert metric(probs.to(dtype), labels) == metric(probs.double(), labels)
    assert torch.equal(common.entropy(probs.to(dtype)), common.entropy(probs.double()))
    scores = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    positive = torch.arange(3000) % 3 == 0
    assert common.auroc(scores, positive) == common.auroc(scores.double(), positive)
    if dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="softmax in float32"):
            common.ece(torch.full((3, 3), 1 / 3, dtype=dtype), labels)


def changed(tensor, value):
    tensor = tensor.clone()
    tensor[3, 1] = value
    return tensor


NAN_PROBS, NAN_SCORES = changed(PROBS, math.nan), torch.tensor([0.0, math.nan])
OFF_BY_1E2, NEGATIVE = changed(PROBS, PROBS[3, 1] + 1e-2), PROBS + torch.tensor([1.0, -1.0, 0, 0])
IN_PROBS = [common.brier, common.ece, common.mce, common.adaptive_ece]
IN_SCORES = [common.accuracy, lambda p, y: common.top_k_accuracy(p, y, 2)]
TEMPERATURES = [common.fit_temperature]
BY_CLASS = IN_PROBS + IN_SCORES + TEMPERATURES + [common.nll]
ON_TWO_CLASSES = [common.auroc, common.average_precision, common.fpr_at_tpr]
ON_CORRECT = [common.rejection_curve, common.prediction_rejection_ratio]
ON_CORRECT += [common.reliability]

REFUSED = [
    *[(f, (NAN_PROBS, LABELS), "NaN|sum to 1|finite") for f in BY_CLASS],
    *[(f, (OFF_BY_1E2, LABELS), "sum to 1") for f in IN_PROBS],
    *[(f, (NEGATIVE, LABELS), r"0\.\.1") for f in IN_PROBS],
    *[(f, (5 * LOG_PROBS, LABELS), r"0\.\.1") for f in IN_PROBS],
    *[(common.nll, (rows, LABELS), "sum to 1") for rows in (PROBS, 5 * LOG_PROBS)],
    *[(f, (changed(PROBS, math.inf), LABELS), "sum to 1|finite") for f in IN_PROBS + TEMPERATURES],
    *[(f, (changed(LOG_PROBS, -math.inf), LABELS), "finite") for f in TEMPERATURES],
    *[(f, (PROBS[0], LABELS[:1]), r"\[N, K\]") for f in BY_CLASS],
    *[(f, (PROBS[:0], LABELS[:0]), "non-empty") for f in BY_CLASS],
    *[(f, (PROBS[:, :0], LABELS), "non-empty") for f in BY_CLASS],
    *[(f, (PROBS, LABELS[1:]), "labels: expected") for f in BY_CLASS],
    *[(f, (PROBS, LABELS[:, None]), "labels: expected") for f in BY_CLASS],
    *[(f, (PROBS, LABELS.float()), "integer") for f in BY_CLASS],
    *[(f, (PROBS, LABELS > 0), "integer") for f in BY_CLASS],
    *[(f, (PROBS, LABELS + 1), r"expected 0\.\.3") for f in BY_CLASS],
    *[(f, (PROBS, LABELS - 1), r"expected 0\.\.3") for f in BY_CLASS],
    *[(f, (PROBS, LABELS, 0), "bins") for f in (common.ece, common.mce, common.adaptive_ece)],
    *[(common.top_k_accuracy, (PROBS, LABELS, k), "k: expected") for k in (0, 5)],
    (common.entropy, (NAN_PROBS,), "sum to 1"),
    (common.entropy, (NEGATIVE,), r"0\.\.1"),
    (common.entropy, (OFF_BY_1E2,), "sum to 1"),
    (common.entropy, (torch.tensor(1.0),), "non-empty"),
    (common.entropy, (torch.zeros(0, 3),), "non-empty"),
    (common.ensemble_uncertainty, (LOG_PROBS,), r"\[M, N, K\]"),
    (common.ensemble_uncertainty, (LOG_PROBS[None, :0],), r"\[M, N, K\]"),
    (common.ensemble_uncertainty, (changed(LOG_PROBS, math.nan)[None],), "sum to 1"),
    (common.ensemble_uncertainty, (PROBS[None],), "sum to 1"),
    *[(f, (NAN_SCORES, [0, 1]), "NaN") for f in ON_TWO_CLASSES + ON_CORRECT],
    *[(f, ([], []), "non-empty") for f in ON_TWO_CLASSES + ON_CORRECT],
    *[(f, ([0.1, 0.2, 0.3], [0, 1]), r"expected \[3\]") for f in ON_TWO_CLASSES + ON_CORRECT],
    *[(f, ([0.1, 0.2], [0, 2]), "bool, or 0 and 1") for f in ON_TWO_CLASSES + ON_CORRECT],
    *[(f, ([[0.1, 0.2]], [[0, 1]]), r"\[N\]") for f in ON_TWO_CLASSES + ON_CORRECT],
    *[(f, ([0.1, 0.2], [c, c]), "only one") for f in ON_TWO_CLASSES for c in (0, 1)],
    *[(common.fpr_at_tpr, ([0.1, 0.2], [0, 1], tpr), "tpr") for tpr in (0, 1.01, math.nan)],
    *[(common.reliability, ([c], [1]), r"0\.\.1") for c in (-1e-3, 1.001, math.inf)],
    (common.reliability, ([0.5], [1], 0), "bins"),
    (common.standard_error, ([],), "non-empty"),
    (common.standard_error, ([math.nan],), "NaN"),
    (common.standard_error, ([1.0, math.inf],), "finite"),
]


@pytest.mark.parametrize(
    "id_scores,ood_scores,larger_means,message",
    [
        ([0.0], [], "ood", "ood_scores"),
        ([], [0.0], "ood", "id_scores"),
        ([math.nan], [0.0], "id", "NaN"),
        ([0.0], [math.nan], "id", "NaN"),
        ([0.0], [1.0], "larger", "larger_means"),
    ],
)
def test_ood_metrics_refuses(id_scores, ood_scores, larger_means, message):
    with pytest.raises(ValueError, match=message):
        common.ood_metrics(id_scores, ood_scores, larger_means=larger_means)
    with pytest.raises(TypeError):  # the direction has no default
        common.ood_metrics([0.0], [1.0])


# ---- Regression by mixtures of Gaussians ----

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
@pytest.mark.parametrize("s,n,k", [(1, 1, 2), (4, 50, 7), (30, 90, 60)])
def test_lpd_is_the_log_of_the_mean_probability(s, n, k, dtype):
    log_p, labels = log_probs(s, n, k, dtype=dtype)
    p = log_p.double().exp().mean(0)
    expected = float(p[torch.arange(n), labels].log().mean())
    assert common.lpd(log_p, labels) == pytest.approx(expected, abs=1e-12)
    ours = common.lpd(log_p, labels)
    assert ours == pytest.approx(-common.nll(p.log(), labels), abs=1e-12) and type(ours) is float
    if s == 1:
        assert ours == -common.nll(log_p[0], labels)


def test_lpd_does_not_underflow():
    logits = torch.tensor([[[2000.0, 0.0]], [[1500.0, 0.0]]])
    ours = common.lpd(logits.log_softmax(-1), torch.tensor([1]))
    assert ours == pytest.approx(-1500 - math.log(2), abs=1e-9)
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    assert common.lpd(certain, torch.tensor([0])) == pytest.approx(-math.log(2), abs=1e-15)
    assert common.lpd(certain[:1], torch.tensor([1])) == -math.inf


# ---- Detection ----


def detection_scores(seed, decimals, share, n=500):
    generator = np.random.default_rng(seed)
    positive = generator.random(n) < share
    scores = generator.normal(size=n) + 1.5 * positive
    return (scores if decimals is None else scores.round(decimals)), positive


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize("seed,share", [(0, 0.2), (2, 0.8)])
def test_detection_error_is_the_minimum_over_thresholds(seed, share, decimals):
    scores, positive = detection_scores(seed, decimals, share)
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
@pytest.mark.parametrize("seed,share", [(0, 0.2), (2, 0.8)])
def test_interpolated_fpr_lies_on_the_roc_curve(seed, share, decimals):
    scores, positive = detection_scores(seed, decimals, share)
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


# ---- Moments and density ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s,n", [(1, 1), (5, 80), (90, 40)])
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


@pytest.mark.parametrize("s,n", [(1, 1), (5, 80), (90, 40)])
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


@pytest.mark.parametrize("s,n", [(1, 1), (2, 30), (7, 30), (40, 35)])
def test_crps_equals_the_sum_over_all_pairs(s, n):
    means, variances, targets = arrays(*mixtures(s, n))
    expected = mean_abs(targets - means, variances).mean(0)
    for m, v in zip(means, variances):
        expected = expected - mean_abs(means - m, variances + v).mean(0) / s / 2
    ours = common.mixture_crps(means, variances, targets)
    assert ours == pytest.approx(expected.mean(), abs=1e-12)


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


@pytest.mark.parametrize("s,n,seed", [(1, 300, 1), (5, 2, 2), (90, 77, 4)])
def test_the_matched_gaussian_scores_as_in_uncertainty_toolbox(s, n, seed):
    means, variances, targets = mixtures(s, n, seed)
    mean, std = matched(*arrays(means, variances))
    expected = toolbox_scores(mean, std, targets.numpy())
    ours = common.regression_metrics(means, variances, targets)
    assert len(expected) == 14 and set(expected) < set(ours)
    for name, value in expected.items():
        assert ours[name] == pytest.approx(float(value), rel=1e-10, abs=1e-11), name


@pytest.mark.parametrize("shift,scale", [(3.0, 1.0), (0.0, 0.05), (0.3, 40.0)])
def test_interval_calibration_of_bad_and_crossing_curves(shift, scale):
    """Biased, too narrow and too wide predictions: gaps of one sign, of both, of zero."""
    mean, variance, target = arrays(*mixtures(1, 200))
    mean, std = mean[0] + shift, scale * np.sqrt(variance[0])
    expected = toolbox_scores(mean, std, target)
    ours = common.regression_metrics(mean[None], std[None] ** 2, target)
    for name in ("rms_cal", "ma_cal", "miscal_area", "check", "interval", "sharp"):
        assert ours[name] == pytest.approx(float(expected[name]), rel=1e-10, abs=1e-11), name


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


@pytest.mark.parametrize("copies", [2, 20])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_input_is_widened_first(dtype):
    narrow = mixtures(6, 50, dtype=dtype)
    narrow[1].clamp_(min=0.125)
    assert all_scores(*narrow) == all_scores(*(x.double() for x in narrow))


def test_input_types_of_mixtures():
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
def test_a_gpu_gives_the_same_of_mixtures():
    means, variances, targets = mixtures(40, 3000)
    expected = all_scores(means, variances, targets)
    assert_equal_scores(all_scores(means.cuda(), variances.cuda(), targets.cuda()), expected, 1e-10)
    assert_equal_scores(all_scores(means.cuda(), variances, targets), expected, 1e-10)
    log_p, labels = log_probs(20, 300, 5)
    assert common.lpd(log_p.cuda(), labels) == pytest.approx(common.lpd(log_p, labels), abs=1e-12)


def with_entry(x, value):
    x = x.clone()
    x.reshape(-1)[3] = value
    return x


M, V, Y = mixtures(3, 20)
ON_MOMENTS = [common.gaussian_mixture_moments, common.rmv, common.cv]
ON_TARGETS = [common.mixture_lpd, common.mixture_crps, common.gaussian_crps, common.regression_ece]
ON_TARGETS += [common.ence, common.z_score_variance, common.regression_metrics]
ON_MIXTURES = [(f, ()) for f in ON_MOMENTS] + [(f, (Y,)) for f in ON_TARGETS]
LOG_P, CLASSES = log_probs(3, 20, 4)

REFUSED_MIXTURES = [
    *[(f, (with_entry(M, x), V, *y), "means: .*finite") for f, y in ON_MIXTURES
      for x in (math.nan, math.inf)],
    *[(f, (M, with_entry(V, x), *y), "variances: .*finite") for f, y in ON_MIXTURES
      for x in (math.nan, math.inf, -math.inf)],
    *[(f, (M, with_entry(V, x), *y), "variances: .*above 0") for f, y in ON_MIXTURES
      for x in (0.0, -1e-3)],
    *[(f, (M, V[:2], *y), r"variances: expected \[3, 20\]") for f, y in ON_MIXTURES],
    *[(f, (M, V[0], *y), r"variances: expected \[3, 20\]") for f, y in ON_MIXTURES],
    *[(f, (M[0], V[0], *y), r"means: expected \[S, N\]") for f, y in ON_MIXTURES],
    *[(f, (M[:0], V[:0], *y), r"means: expected \[S, N\]") for f, y in ON_MIXTURES],
    *[(f, (M[:, :0], V[:, :0], *(x[:0] for x in y)), r"means: expected") for f, y in ON_MIXTURES],
    *[(f, (M, V, Y[1:]), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, Y[:, None]), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, M), r"targets: expected \[20\]") for f in ON_TARGETS],
    *[(f, (M, V, with_entry(Y, x)), "targets: .*finite") for f in ON_TARGETS
      for x in (math.nan, math.inf)],
    (common.lpd, (LOG_P[0], CLASSES), r"\[S, N, K\]"),
    (common.lpd, (LOG_P[:0], CLASSES), r"\[S, N, K\]"),
    (common.lpd, (LOG_P[:, :0], CLASSES[:0]), r"\[S, N, K\]"),
    (common.lpd, (with_entry(LOG_P, math.nan), CLASSES), "sum to 1"),
    (common.lpd, (LOG_P.exp(), CLASSES), "sum to 1"),
    (common.lpd, (LOG_P, CLASSES[1:]), "labels: expected"),
    (common.lpd, (LOG_P, CLASSES + 4), r"expected 0\.\.3"),
    (common.lpd, (LOG_P, CLASSES.double()), "integer"),
    *[(common.detection_error, ([0.1, 0.2], [0, 1], t), "tpr") for t in (0, 1.01, math.nan)],
    *[(common.detection_error, ([0.1, 0.2], [c, c]), "only one") for c in (0, 1)],
    (common.detection_error, ([0.1, math.nan], [0, 1]), "NaN"),
    (common.detection_error, ([], []), "non-empty"),
    (common.detection_error, ([0.1, 0.2, 0.3], [0, 1]), r"expected \[3\]"),
]  # fmt: skip


def test_bad_input_is_refused_in_one_line():
    for metric, arguments, message in REFUSED + REFUSED_MIXTURES:
        with pytest.raises(ValueError, match=message) as refusal:
            metric(*arguments)
        assert "\n" not in str(refusal.value), metric
