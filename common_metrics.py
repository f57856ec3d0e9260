"""Metrics."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

# ---- Metrics ----
# Arguments are whatever torch.as_tensor takes, on any device; scalars come back as Python floats.
# Sums over classes run where the tensor lives, in float64 (float32 on a device without it), block
# by block: no N x K temporary exists. The N numbers that remain go to the CPU, in float64. Half
# precision is widened first. NaN, empty or misshapen input, labels out of range and rows that are
# not probabilities are refused with a ValueError of one line: "Raises" names only what is special.

TOLERANCE = 1e-3  # how far the sum of a row of probabilities may be from 1; float32 errs by 1e-6


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _tensor(x) -> Tensor:
    """A detached float32 or float64 tensor: narrower floats, integers, lists widen without loss."""
    x = torch.as_tensor(x, dtype=torch.float64 if isinstance(x, (list, tuple)) else None).detach()
    if not x.is_floating_point():
        return _wide(x)
    return x.float() if x.element_size() < 4 else x


def _vector(x, name: str) -> np.ndarray:
    x = _tensor(x)
    _require(x.ndim == 1 and len(x) > 0, f"{name}: expected a non-empty [N], got {list(x.shape)}")
    x = x.cpu().numpy()
    _require(not np.isnan(x).any(), f"{name}: contains NaN")
    return x


def _vector_and_mask(x, x_name: str, mask, name: str) -> tuple[np.ndarray, np.ndarray]:
    x, mask = _vector(x, x_name), _vector(mask, name)
    _require(len(x) == len(mask), f"{name}: expected [{len(x)}] as {x_name}, got [{len(mask)}]")
    _require(bool(((mask == 0) | (mask == 1)).all()), f"{name}: expected bool, or 0 and 1")
    return x, mask == 1


def _matrix_and_labels(x, labels, name: str) -> tuple[Tensor, Tensor]:
    x, labels = _tensor(x), torch.as_tensor(labels)
    shape, dtype = list(x.shape), labels.dtype
    _require(x.ndim == 2 and x.numel() > 0, f"{name}: expected a non-empty [N, K], got {shape}")
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    _require(integer, f"labels: expected class indices of an integer type, got {dtype}")
    fits = labels.shape == x.shape[:1]
    _require(fits, f"labels: expected [{shape[0]}] as {name}, got {list(labels.shape)}")
    labels = labels.to(x.device, torch.int64)
    low, high = map(int, labels.aminmax())
    _require(0 <= low and high < shape[1], f"labels: expected 0..{shape[1] - 1}, got {low}..{high}")
    return x, labels


def _blocks(x: Tensor, *aligned: Tensor, wide: bool = True) -> Iterator[tuple[Tensor, ...]]:
    """Yield copies of blocks of rows of x, in float64 if `wide`, with what is aligned with them.

    All copies share one buffer, which the caller may overwrite: fresh memory costs more than the
    arithmetic. 8 MB stay in the cache of a CPU; a device wants larger blocks.
    """
    rows = max(1, (2**20 if x.device.type == "cpu" else 2**24) // x[0].numel())
    buffer = torch.empty_like(x[:rows])
    buffer = _wide(buffer) if wide else buffer
    for block, *others in zip(*(tensor.split(rows) for tensor in (x, *aligned))):
        yield buffer[: len(block)].copy_(block), *others


def _check_sums(sums: Tensor, name: str) -> None:
    """Refuse rows that are not normalised; their sums also find NaN, infinities and logits."""
    if not bool(((sums - 1).abs() <= TOLERANCE).all()):
        low, high = map(float, sums.aminmax())
        raise ValueError(
            f"{name}: expected rows that sum to 1 within {TOLERANCE:g} (softmax in float32, no NaN)"
            f", got sums from {low:.5g} to {high:.5g}"
        )


def _check_probs(probs: Tensor) -> None:
    low = float(probs.amin())  # NaN if there is one: left to the sums
    _require(not low < 0, f"probs: expected 0..1, got {low:.4g}")
    _check_sums(probs.sum(-1), "probs")


def _top_class(scores: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Largest score of each row, in the precision given, and whether it is the label's."""
    if scores.device.type == "cpu":  # numpy's argmax is vectorised, torch's is not on the CPU
        best = torch.from_numpy(scores.numpy().argmax(-1))
    else:
        best = scores.argmax(-1)
    top = scores.gather(1, best[:, None])[:, 0]  # NaN if there is one in the row
    return _vector(top, "probs"), (best == labels).cpu().numpy()


def _confidence(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    probs, labels = _matrix_and_labels(probs, labels, "probs")
    _check_probs(probs)
    confidence, correct = _top_class(probs, labels)
    return confidence.clip(max=1), correct


def accuracy(probs, labels) -> float:
    """Fraction of rows whose largest score is the label's; equal scores: the lowest class wins.

    Args: probs [N, K], scores of any kind (probabilities, logits); labels int [N].
    Returns: 0..1.
    """
    return float(_top_class(*_matrix_and_labels(probs, labels, "probs"))[1].mean())


def top_k_accuracy(probs, labels, k: int) -> float:
    """Fraction of rows whose label is among the k largest scores; k = 1 is `accuracy`.

    Args: probs [N, K], scores of any kind, equal ones ranked by class index; labels int [N].
    Returns: 0..1. Raises: ValueError unless k is in 1..K.
    """
    scores, labels = _matrix_and_labels(probs, labels, "probs")
    classes, label = torch.arange(scores.shape[1], device=scores.device), labels[:, None]
    _require(1 <= k <= len(classes), f"k: expected 1..{len(classes)}, got {k}")
    best, own = scores.topk(k).values, scores.gather(1, label)
    _require(not bool(best[:, 0].isnan().any()), "probs: contains NaN")  # NaN ranks first
    tied = (own == best[:, -1:])[:, 0]  # the label is the k-th or equals it: find its rank
    rows, own_tied, label = scores[tied], own[tied], label[tied]
    ahead = ((rows > own_tied) | ((rows == own_tied) & (classes < label))).sum(-1)
    return (int((own > best[:, -1:]).sum()) + int((ahead < k).sum())) / len(labels)


def nll(log_probs, labels) -> float:
    """Negative log-likelihood, -(1/N) sum_n log p_n[y_n], in nats.

    Args: log_probs [N, K], normalised (log_softmax, or log of mean probs); labels int [N].
    Returns: nats per example; inf only if the log-probability of a label was given as -inf.
    Raises: ValueError if exp of a row does not sum to 1, as for logits.
    """
    log_probs, labels = _matrix_and_labels(log_probs, labels, "log_probs")
    for (block,) in _blocks(log_probs, wide=False):
        _check_sums(block.exp_().sum(-1), "exp(log_probs)")
    own = _vector(log_probs.gather(1, labels[:, None])[:, 0], "log_probs")
    return 0.0 - float(own.mean(dtype=np.float64))


def brier(probs, labels) -> float:
    """Brier score, (1/N) sum_n sum_k (p_nk - [k = y_n])^2: the sum over classes, not the mean.

    Args: probs [N, K], rows in [0, 1] that sum to 1; labels int [N].
    Returns: 0 (certain and right) .. 2 (certain and wrong).
    """
    probs, labels = _matrix_and_labels(probs, labels, "probs")
    _check_probs(probs)
    squares = sum(float(block.square_().sum()) for (block,) in _blocks(probs))
    own = _vector(probs.gather(1, labels[:, None])[:, 0], "probs")
    return (squares - 2 * float(own.sum(dtype=np.float64))) / len(own) + 1


class Reliability(NamedTuple):
    """The bars of a reliability diagram, [bins] each; confidence and accuracy are means, or 0."""

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def reliability(confidence, correct, bins: int = 15) -> Reliability:
    """Count, mean confidence and accuracy in equal-width bins (b/bins, (b+1)/bins], b = 0, 1, ...

    Bins are left-open and right-closed, bin = ceil(bins c) - 1, and 0 goes to the first. Edges are
    compared in the precision of `confidence`: 0.2 closes bin 2 of 15 in float32 and in float64.

    Args: confidence [N] in [0, 1], up to 1e-6 above is 1; correct [N], bool or 0/1; bins >= 1.
    Returns: Reliability, an empty bin has 0 in all three. Raises: ValueError outside [0, 1].
    """
    confidence, correct = _vector_and_mask(confidence, "confidence", correct, "correct")
    _require(bins >= 1, f"bins: expected at least 1, got {bins}")
    low, high = confidence.min(), confidence.max()
    _require(0 <= low and high <= 1 + 1e-6, f"confidence: expected 0..1, got {low:.8g}..{high:.8g}")
    inner_edges = (np.arange(1, bins) / bins).astype(confidence.dtype)
    index = np.searchsorted(inner_edges, confidence, side="left")
    counts = np.bincount(index, minlength=bins)
    sums = (np.bincount(index, weights, bins) for weights in (confidence.clip(max=1), correct))
    return Reliability(counts, *(total / np.maximum(counts, 1) for total in sums))


def ece(probs, labels, bins: int = 15) -> float:
    """Expected calibration error, sum_b n_b/N |accuracy_b - confidence_b|, bins of `reliability`.

    Args: probs [N, K], rows in [0, 1] that sum to 1, the largest is the confidence; labels int [N].
    Returns: 0..1, a fraction.
    """
    bars = reliability(*_confidence(probs, labels), bins)
    return float((bars.counts * np.abs(bars.accuracy - bars.confidence)).sum() / bars.counts.sum())


def mce(probs, labels, bins: int = 15) -> float:
    """Maximum calibration error, max |accuracy_b - confidence_b| over non-empty bins; as `ece`."""
    bars = reliability(*_confidence(probs, labels), bins)
    return float(np.abs(bars.accuracy - bars.confidence).max())


def adaptive_ece(probs, labels, bins: int = 15) -> float:
    """Calibration error over equal-mass bins: rows sorted by confidence, cut as numpy.array_split.

    If `bins` does not divide N, the least confident bins hold one row more. Rows of equal
    confidence share their mean correctness, so that the result does not depend on their order.

    Args: probs [N, K], rows in [0, 1] that sum to 1; labels int [N]; bins >= 1. Returns: 0..1.
    """
    _require(bins >= 1, f"bins: expected at least 1, got {bins}")
    confidence, correct = _sort_sharing_ties(*_confidence(probs, labels))
    n, b = len(confidence), np.arange(bins + 1)
    gap = np.append(0.0, np.cumsum(correct - confidence))
    return float(np.abs(np.diff(gap[b * (n // bins) + np.minimum(b, n % bins)])).sum() / n)


def entropy(probs) -> Tensor:
    """Entropy, -sum_k p_k log p_k with 0 log 0 = 0.

    Args: probs [..., K], rows in [0, 1] that sum to 1.
    Returns: [...] in nats, 0..log K, on the same device, float64 (float32 where there is none).
    """
    probs = _tensor(probs)
    shape = list(probs.shape)
    _require(shape and probs.numel() > 0, f"probs: expected a non-empty [..., K], got {shape}")
    _check_probs(probs)
    rows = _blocks(probs.reshape(-1, shape[-1]))
    nats = [torch.special.entr(block, out=block).sum(-1) for (block,) in rows]
    return torch.cat(nats).reshape(shape[:-1])


def ensemble_uncertainty(log_probs) -> dict[str, Tensor]:
    """Uncertainties of an ensemble with mean prediction pi = (1/M) sum_m p_m, in O(M K) per row.

    total = H(pi); aleatoric = (1/M) sum_m H(p_m); epistemic = total - aleatoric, the mutual
    information; rmi = (1/M) sum_m KL(pi || p_m), the reverse one; epkl = (1/M^2) sum_ij
    KL(p_i || p_j), all ordered pairs, = epistemic + rmi. Differences are clamped at 0, so that
    0 <= epistemic <= total <= log K.

    Args: log_probs [M, N, K], normalised; -inf allowed: rmi and epkl are inf if a member excludes
        a class that another one does not.
    Returns: dict of [N] in nats, on the same device, float64 (float32 where there is none).
    Raises: ValueError if exp of a row does not sum to 1, as for logits.
    """
    log_probs = _tensor(log_probs)
    shape, parts = list(log_probs.shape), []
    _require(len(shape) == 3 and 0 not in shape, f"log_probs: expected [M, N, K], got {shape}")
    for (log_p,) in _blocks(log_probs.transpose(0, 1)):
        log_pi = log_p.logsumexp(1) - math.log(shape[0])
        p, pi = log_p.exp(), log_pi.exp()
        _check_sums(p.sum(-1), "exp(log_probs)")
        total, aleatoric = torch.special.entr(pi).sum(-1), torch.special.entr(p).sum(-1).mean(1)
        cross = -(pi * log_p.mean(1)).masked_fill(pi == 0, 0).sum(-1)  # mean_m of H(pi, p_m)
        parts.append(torch.stack([total, aleatoric, total - aleatoric, cross - total]).clamp_min(0))
    total, aleatoric, epistemic, rmi = torch.cat(parts, 1)
    names = ("total", "aleatoric", "epistemic", "rmi", "epkl")
    return dict(zip(names, (total, aleatoric, epistemic, rmi, epistemic + rmi)))


def _threshold_counts(scores, positive) -> tuple[np.ndarray, np.ndarray]:
    """Positives and negatives with score >= t, at each distinct score t from the highest down."""
    scores, positive = _vector_and_mask(scores, "scores", positive, "positive")
    _require(positive.any() and not positive.all(), "positive: expected both classes, got only one")
    order = np.argsort(scores)[::-1]
    scores, positive = scores[order], positive[order]
    last_of_tie = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    tp = np.cumsum(positive)[last_of_tie]
    return tp, last_of_tie + 1 - tp


def auroc(scores, positive) -> float:
    """Area under the ROC curve, P(positive scores higher than negative) + P(equal) / 2.

    Args: scores [N], larger means positive, +-inf allowed; positive [N], bool or 0/1.
    Returns: 0..1, 0.5 for constant scores. Raises: ValueError if only one class is present.
    """
    tp, fp = _threshold_counts(scores, positive)
    twice_area = np.diff(fp, prepend=0) @ (tp + np.append(0, tp[:-1]))  # integers: exact
    return float(twice_area / (2 * tp[-1] * fp[-1]))


def average_precision(scores, positive) -> float:
    """Area under the precision-recall steps, sum_t (recall_t - recall_{t-1}) precision_t.

    Args: scores [N], larger means positive, +-inf allowed; positive [N], bool or 0/1.
    Returns: 0..1, the fraction of positives for constant scores. Raises: as `auroc`.
    """
    tp, fp = _threshold_counts(scores, positive)
    return float(np.diff(tp, prepend=0) @ (tp / (tp + fp)) / tp[-1])


def fpr_at_tpr(scores, positive, tpr: float = 0.95) -> float:
    """Smallest false positive rate among thresholds score >= t with true positive rate >= tpr.

    Args: scores, positive as `auroc`; 0 < tpr <= 1. Thresholds are scores, without interpolation.
    Returns: 0..1, 1 for constant scores. Raises: as `auroc`.
    """
    _require(0 < tpr <= 1, f"tpr: expected 0 < tpr <= 1, got {tpr}")
    tp, fp = _threshold_counts(scores, positive)
    return float(fp[np.argmax(tp / tp[-1] >= tpr)] / fp[-1])


def ood_metrics(id_scores, ood_scores, *, larger_means: str) -> dict[str, float]:
    """Separation of in-distribution (ID) from out-of-distribution (OOD) examples by one score.

    Args: id_scores [N], ood_scores [L], +-inf allowed; larger_means "ood" for an uncertainty such
        as entropy, "id" for a confidence such as log density.
    Returns: fractions: auroc (either side positive, it is the same); aupr_in and aupr_out, average
        precision with ID and with OOD positive; fpr95, the OOD accepted when >= 95 % of ID is.
    """
    _require(larger_means in ("ood", "id"), f"larger_means: expected ood or id, got {larger_means}")
    id_scores, ood_scores = _vector(id_scores, "id_scores"), _vector(ood_scores, "ood_scores")
    confidence = np.concatenate([id_scores, ood_scores]) * (1 if larger_means == "id" else -1)
    is_id = np.arange(len(confidence)) < len(id_scores)
    return {
        "auroc": auroc(confidence, is_id),
        "aupr_in": average_precision(confidence, is_id),
        "aupr_out": average_precision(-confidence, ~is_id),
        "fpr95": fpr_at_tpr(confidence, is_id, 0.95),
    }


def _sort_sharing_ties(key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by key, ascending; equal keys share their mean value, the expectation over orders."""
    order = np.argsort(key)
    key, value = key[order].astype(np.float64), value[order].astype(np.float64)
    start = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    size = np.diff(np.append(start, len(key)))
    return key, np.repeat(np.add.reduceat(value, start) / size, size)


def rejection_curve(uncertainty, correct) -> tuple[np.ndarray, np.ndarray]:
    """Errors left, over N, when the most uncertain predictions are rejected, that is, put right.

    Ties are rejected in random order: the curve is the expectation, a straight line across a tie.

    Args: uncertainty [N], larger is rejected first, +-inf allowed; correct [N], bool or 0/1.
    Returns: rejected fraction 0, 1/N, ..., 1 and error, from the error rate to 0, both [N + 1].
    """
    uncertainty, correct = _vector_and_mask(uncertainty, "uncertainty", correct, "correct")
    _, wrong = _sort_sharing_ties(uncertainty, ~correct)
    errors = np.append(0.0, np.cumsum(wrong))  # among the k most certain, k = 0..N
    return np.arange(len(errors)) / len(wrong), errors[::-1] / len(wrong)


def prediction_rejection_ratio(uncertainty, correct) -> float | None:
    """Prediction rejection ratio (Malinin), (A_random - A) / (A_random - A_oracle).

    A is the area under `rejection_curve`; the oracle rejects all errors first; a random order gives
    the straight line from the error rate to 0. Equals 2 auroc(uncertainty, not correct) - 1.

    Args: as `rejection_curve`.
    Returns: 1 for the best order, 0 for a random or constant one, -1 for the worst; None (null in
        JSON) if all or no predictions are correct: no order is better than another.
    """
    _, error = rejection_curve(uncertainty, correct)
    if error[0] in (0, 1):
        return None
    area, random, oracle = (error[1:] + error[:-1]).mean() / 2, error[0] / 2, error[0] ** 2 / 2
    return float((random - area) / (random - oracle))


def aurc(uncertainty, correct) -> float:
    """Area under the risk-coverage curve, (1/N) sum_k error rate of the k most certain, k = 1..N.

    Args: as `rejection_curve`. Returns: 0..1, small is good, the error rate if all are tied.
    """
    rejected, error = rejection_curve(uncertainty, correct)
    return float((error[:-1] / (1 - rejected[:-1])).mean())


def _finite_logits(logits, labels) -> tuple[Tensor, Tensor]:
    logits, labels = _matrix_and_labels(logits, labels, "logits")
    low, high = logits.aminmax()  # both NaN if there is one
    _require(math.isfinite(low) and math.isfinite(high), "logits: expected finite numbers")
    return logits, labels


def fit_temperature(logits, labels) -> float:
    """Temperature T that minimises -(1/N) sum_n log softmax(z_n / T)[y_n], the NLL.

    It is convex in 1/T: its slope has one root, found on log T by Brent's method to 1e-9 relative.

    Args: logits z [N, K], finite; labels int [N].
    Returns: 1e-3..1e3; the lower end if every label has the largest logit, the upper one if the
        logits are worse than none; 1 if no T makes a difference (constant rows).
    """
    logits, labels = _finite_logits(logits, labels)

    def slope(log_t: float) -> float:  # d NLL / d(1/T) = mean_n of E_{softmax(z/T)}[z - z_y]
        total = 0.0
        for z, label in _blocks(logits, labels[:, None]):
            z -= z.gather(1, label)
            total += float((z / math.exp(log_t)).softmax(-1).mul_(z).sum())
        return total / len(labels)

    low, high = math.log(1e-3), math.log(1e3)
    if (at_high := slope(high)) >= 0:
        return 1e3 if at_high > 0 else 1.0
    return 1e-3 if slope(low) <= 0 else math.exp(brentq(slope, low, high, xtol=1e-9))


def fit_temperature_grid(logits, labels) -> float:
    """Temperature of the published grid 0.1, 0.2, ..., 10.0 with the smallest NLL; ties: the first.

    Args: logits [N, K], finite; labels int [N]. Returns: 0.1..10, where it stops if the optimum is
    beyond; otherwise within one step of `fit_temperature`.
    """
    logits, labels = _finite_logits(logits, labels)
    grid, total = np.arange(1, 101) / 10, np.zeros(100)
    for z, label in _blocks(logits, labels):
        total += [float(F.cross_entropy(z / t, label, reduction="sum")) for t in grid]
    return float(grid[total.argmin()])


def standard_error(values) -> float | None:
    """Standard error of the mean of n runs: unbiased standard deviation / sqrt(n).

    Args: values [n], finite. Returns: in their unit; None (null in JSON) for n = 1.
    """
    values = _vector(values, "values").astype(np.float64)
    _require(bool(np.isfinite(values).all()), "values: expected finite numbers")
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
