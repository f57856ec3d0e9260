"""Metrics of common.py against scikit-learn, torchmetrics, brute-force loops and hand values."""

import itertools
import json
import math

import common
import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

BINARY = [(seed, decimals) for seed in range(4) for decimals in (None, 1, 0)]  # rounding makes ties


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
@pytest.mark.parametrize("n,k", [(1, 2), (1, 1), (400, 7), (3000, 1200)])  # the last: blocks
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


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_and_top_k_match_torchmetrics_and_scikit_learn(seed):
    probs, labels = random_probs(seed=seed)
    assert common.accuracy(probs, labels) == pytest.approx(
        float(tm.multiclass_accuracy(probs, labels, 7, average="micro")), abs=1e-6
    )
    for k in range(1, 7):
        ours = common.top_k_accuracy(probs, labels, k)
        theirs = tm.multiclass_accuracy(probs, labels, 7, average="micro", top_k=k)
        assert ours == pytest.approx(float(theirs), abs=1e-6)
        peer = sk.top_k_accuracy_score(labels.numpy(), probs.numpy(), k=k, labels=range(7))
        assert ours == pytest.approx(peer, abs=1e-12)
    assert common.top_k_accuracy(probs, labels, 7) == 1.0


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
@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("m,n,k", [(1, 4, 3), (2, 5, 2), (5, 40, 10), (3, 700, 600)])
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
    """(PRR, AURC, curve) of predictions listed from the most to the least certain, without ties."""
    n, errors = len(wrong), sum(wrong)
    kept = [sum(wrong[:k]) for k in range(n + 1)]
    curve = np.array(kept[::-1]) / n

    def area(y):
        return sum((a + b) / 2 for a, b in zip(y, y[1:])) / n

    random = area([errors / n * (1 - i / n) for i in range(n + 1)])
    oracle = area([max(errors - i, 0) / n for i in range(n + 1)])
    prr = (random - area(curve)) / (random - oracle)
    return prr, sum(kept[k] / k for k in range(1, n + 1)) / n, curve


@pytest.mark.parametrize("seed", range(4))
def test_rejection_equals_the_loop_and_twice_auroc_minus_one(seed):
    generator = np.random.default_rng(seed)
    uncertainty, correct = generator.normal(size=80), generator.random(80) < 0.8
    prr, aurc, curve = rejection_by_loop((~correct)[np.argsort(uncertainty)].tolist())
    assert common.prediction_rejection_ratio(uncertainty, correct) == pytest.approx(prr, abs=1e-12)
    assert common.aurc(uncertainty, correct) == pytest.approx(aurc, abs=1e-12)
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
    prr, aurc, curve = (sum(column) / len(outcomes) for column in zip(*outcomes))
    assert common.prediction_rejection_ratio(uncertainty, correct) == pytest.approx(prr, abs=1e-12)
    assert common.aurc(uncertainty, correct) == pytest.approx(aurc, abs=1e-12)
    assert np.allclose(common.rejection_curve(uncertainty, correct)[1], curve, atol=1e-12)


def test_prediction_rejection_ratio_by_hand():
    rank = np.arange(100)
    correct = rank >= 20
    for uncertainty, expected in ((-rank, 1), (rank, -1), (0 * rank, 0)):
        ours = common.prediction_rejection_ratio(uncertainty, correct)
        assert ours == pytest.approx(expected, abs=1e-12)
    assert common.prediction_rejection_ratio([0, 1], [1, 0]) == 1.0  # one error is enough
    generator = np.random.default_rng(0)
    tied, shuffle = np.arange(100) // 30, generator.permutation(100)
    assert common.prediction_rejection_ratio(tied, correct) == pytest.approx(
        common.prediction_rejection_ratio(tied[shuffle], correct[shuffle]), abs=1e-14
    )


@pytest.mark.parametrize("correct", [[True], [False], [True] * 5, [False] * 5])
def test_rejection_with_nothing_to_rank(correct):
    uncertainty = np.arange(len(correct))
    assert common.prediction_rejection_ratio(uncertainty, correct) is None
    assert common.prediction_rejection_ratio(np.zeros(len(correct)), correct) is None
    assert common.aurc(uncertainty, correct) == (0.0 if correct[0] else 1.0)


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


def test_temperature_of_one_is_left_alone_and_accuracy_is_unchanged():
    probs, labels = random_probs(500, 4, dtype=torch.float64)
    logits = probs.log()
    calibrated = logits / common.fit_temperature(logits, labels)
    assert common.fit_temperature(calibrated, labels) == pytest.approx(1.0, rel=1e-8)
    assert common.accuracy(calibrated, labels) == common.accuracy(logits, labels)


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
ON_CORRECT = [common.aurc, common.rejection_curve, common.prediction_rejection_ratio]
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


@pytest.mark.parametrize("metric,arguments,message", REFUSED)
def test_bad_input_is_refused_in_one_line(metric, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        metric(*arguments)
    assert "\n" not in str(refusal.value)


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
