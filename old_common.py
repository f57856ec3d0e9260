"""common.py: metrics, and the few lines that make a run trustworthy.

Shared by the five scripts; no model, no loss, nothing of one paper. Three parts:

  Metrics      accuracy, NLL, Brier, calibration, ensemble decomposition, OOD detection, rejection,
               temperature, regression by mixtures of Gaussians: pure functions on tensors, Python
               floats out, `ValueError` on bad input.
  Processes    torchrun or a single process in one code path; seeding; exact sharded evaluation;
               batch norm and dropout that do not depend on the number of processes.
  Runs         the shared command line, the run directory, atomic checkpoints, results, signals.
"""

import argparse
import contextlib
import inspect
import io
import json
import math
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.optimize import brentq
from scipy.special import erf, ndtri
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class UserError(ValueError):
    """A mistake that the user can mend; `run_script` shows it as one line, exit status 2."""


# ---- Metrics ------------------------------------------------------------------------------------
# Arguments are whatever torch.as_tensor takes, on any device; scalars come back as Python floats.
# Sums over classes run where the tensor lives, in float64 (float32 on a device without it), in
# blocks of rows: no N x K copy in float64 exists. The N numbers that remain go to the CPU, in
# float64. Half precision is widened first. NaN, empty or misshapen input, labels out of range,
# rows that are not probabilities and variances of 0 are refused with a ValueError of one line;
# "Raises" names others.

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


def _sort_sharing_ties(key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by key, ascending; equal keys share their mean value, the expectation over orders."""
    order = np.argsort(key)
    key, value = key[order].astype(np.float64), value[order].astype(np.float64)
    start = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    size = np.diff(np.append(start, len(key)))
    return key, np.repeat(np.add.reduceat(value, start) / size, size)


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


def lpd(log_probs, labels) -> float:
    """Log predictive density of an equal mixture, (1/N) sum_n log (1/S) sum_s p_s(y_n), in nats.

    From the log-probabilities: finite where the mean probability underflows. S = 1 is -`nll`.

    Args: log_probs [S, N, K], normalised; labels int [N].
    Returns: nats per example, large is good. Raises: as `nll`.
    """
    log_probs = _tensor(log_probs)
    shape = list(log_probs.shape)
    _require(len(shape) == 3 and 0 not in shape, f"log_probs: expected [S, N, K], got {shape}")
    labels = _matrix_and_labels(log_probs[0], labels, "log_probs")[1]
    for (block,) in _blocks(log_probs.transpose(0, 1), wide=False):
        _check_sums(block.exp_().sum(-1), "exp(log_probs)")
    own = _wide(log_probs.gather(2, labels.expand(shape[0], -1)[..., None])[..., 0])
    mixture = _vector(own.logsumexp(0) - math.log(shape[0]), "log_probs")
    return float(mixture.mean(dtype=np.float64))


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
    0 <= epistemic <= total <= log K up to rounding.

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


def fpr_at_tpr(scores, positive, tpr: float = 0.95, interpolate: bool = False) -> float:
    """Smallest false positive rate among thresholds score >= t with true positive rate >= tpr.

    Args: scores, positive as `auroc`; 0 < tpr <= 1. Thresholds are scores; with `interpolate` the
        ROC points are joined by straight lines, as in ood-metrics: where several points have this
        true positive rate, the largest of their false positive rates, at tpr = 1 always 1.
    Returns: 0..1; for constant scores 1, or tpr if interpolated. Raises: as `auroc`.
    """
    _require(0 < tpr <= 1, f"tpr: expected 0 < tpr <= 1, got {tpr}")
    tp, fp = _threshold_counts(scores, positive)
    if interpolate:
        return float(np.interp(tpr, np.append(0, tp) / tp[-1], np.append(0, fp) / fp[-1]))
    return float(fp[np.argmax(tp / tp[-1] >= tpr)] / fp[-1])


def detection_error(scores, positive, tpr: float = 0.95) -> float:
    """Smallest (1 - w) (1 - TPR) + w FPR among thresholds score >= t with TPR >= tpr.

    w is the fraction of positives. These are the weights of ood-metrics; the fraction of all rows
    misclassified has them the other way round, and is the same for equally many of both classes.

    Args: scores, positive as `auroc`; 0 < tpr <= 1.
    Returns: 0..1, w for constant scores. Raises: as `auroc`.
    """
    _require(0 < tpr <= 1, f"tpr: expected 0 < tpr <= 1, got {tpr}")
    tp, fp = _threshold_counts(scores, positive)
    rate, w = tp / tp[-1], tp[-1] / (tp[-1] + fp[-1])
    return float(((1 - w) * (1 - rate) + w * fp / fp[-1])[rate >= tpr].min())


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
    Returns: T, cut to 1e-3..1e3: the lower end if every label has the largest logit, the upper one
        if the logits are worse than none; 1 if no T makes a difference (constant rows).
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


class Moments(NamedTuple):
    """Mean and variance of mixtures of Gaussians, [N] each; total = aleatoric + epistemic."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    total: Tensor


def _finite_range(x: Tensor, name: str) -> tuple[float, float]:
    low, high = map(float, x.aminmax())  # both NaN if there is one
    _require(math.isfinite(low) and math.isfinite(high), f"{name}: expected finite numbers")
    return low, high


def _gaussians(means, variances, *targets) -> tuple[Tensor, ...]:
    """The arguments as tensors on one device, checked."""
    means, variances, *targets = map(_tensor, (means, variances, *targets))
    shape = list(means.shape)
    _require(len(shape) == 2 and 0 not in shape, f"means: expected [S, N], got {shape}")
    fits = variances.shape == means.shape
    _require(fits, f"variances: expected {shape} as means, got {list(variances.shape)}")
    for x in targets:
        _require(list(x.shape) == shape[1:], f"targets: expected {shape[1:]}, got {list(x.shape)}")
        _finite_range(x, "targets")
    _finite_range(means, "means")
    low = _finite_range(variances, "variances")[0]
    _require(low > 0, f"variances: expected numbers above 0, got {low:.4g}")
    return means, *(x.to(means.device) for x in (variances, *targets))


def _columns(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of [S, N] and [N] along N, in float64; they may share memory with the arguments."""
    columns = max(1, (2**17 if tensors[0].device.type == "cpu" else 2**24) // len(tensors[0]))
    for block in zip(*(x.split(columns, -1) for x in tensors)):
        yield tuple(map(_wide, block))


def gaussian_mixture_moments(means, variances) -> Moments:
    """Moments of the equal mixture (1/S) sum_s N(m_s, v_s).

    mean = mean_s m_s; aleatoric = mean_s v_s; epistemic = mean_s (m_s - mean)^2, divided by S and
    not S - 1, so that total = aleatoric + epistemic is the variance of the mixture.

    Args: means [S, N], finite; variances [S, N], > 0.
    Returns: Moments on the same device, float64 (float32 where there is none).
    """
    parts = []
    for m, v in _columns(*_gaussians(means, variances)):
        mean, aleatoric = m.mean(0), v.mean(0)
        epistemic = (m - mean).square_().mean(0)
        parts.append(torch.stack([mean, aleatoric, epistemic, aleatoric + epistemic]))
    return Moments(*torch.cat(parts, 1))


def mixture_lpd(means, variances, targets) -> float:
    """Log density of the equal mixture, (1/N) sum_n log (1/S) sum_s N(y_n; m_sn, v_sn), in nats.

    Not the density of the Gaussian with the moments of the mixture unless S = 1.

    Args: means [S, N], finite; variances [S, N], > 0; targets y [N], finite.
    Returns: nats per example, log(2 pi) / 2 included, large is good; it depends on the unit of y.
    """
    means, variances, targets = _gaussians(means, variances, targets)
    total = 0.0
    for m, v, y in _columns(means, variances, targets):
        total += float(((y - m).square_().div_(v) + v.log()).mul_(-0.5).logsumexp(0).sum())
    return total / len(targets) - math.log(len(means)) - math.log(2 * math.pi) / 2


def _mean_abs_sum(difference: Tensor, variance: Tensor) -> float:
    """Sum of E|X|, X ~ N(difference, variance), over all elements."""
    std = variance.sqrt()
    z = difference / std
    mean_abs = (z * z).mul_(-0.5).exp_().mul_(math.sqrt(2 / math.pi))
    return float(mean_abs.add_(torch.erf(z / math.sqrt(2)).mul_(z)).mul_(std).sum())


def mixture_crps(means, variances, targets) -> float:
    """Continuous ranked probability score of the equal mixture, mean_n E|X - y_n| - E|X - X'| / 2.

    X and X' are independent draws. With A(d, v) = E|N(d, v)|, in closed form (Grimit et al. 2006),
    the score of a point is mean_s A(y - m_s, v_s) - mean_st A(m_s - m_t, v_s + v_t) / 2. Each of
    the S (S - 1) / 2 pairs is evaluated: time O(N S^2), memory O(N S).

    Args: means [S, N], finite; variances [S, N], > 0; targets y [N], finite.
    Returns: 0.., small is good, in the unit of y: mean over n of the integral over x of
        (F(x) - [x >= y])^2, F the distribution function of the mixture.
    """
    means, variances, targets = _gaussians(means, variances, targets)
    s, total = len(means), 0.0
    for m, v, y in _columns(means, variances, targets):
        total += _mean_abs_sum(y - m, v) / s
        total -= float(v.sqrt().sum()) / math.sqrt(math.pi) / s**2  # the pairs of s with itself
        for lag in range(1, s // 2 + 1):  # each pair once: s with s + lag, cyclically
            pairs = _mean_abs_sum(m - m.roll(lag, 0), v + v.roll(lag, 0))
            total -= pairs / s**2 / (2 if 2 * lag == s else 1)  # half a turn meets each pair twice
    return total / len(targets)


def _matched(means, variances, targets) -> tuple[Tensor, Tensor, Tensor]:
    """The Gaussian with the moments of each mixture, as a mixture of one: [1, N], [1, N], [N]."""
    means, variances, targets = _gaussians(means, variances, targets)
    moments = gaussian_mixture_moments(means, variances)
    return moments.mean[None], moments.total[None], _wide(targets)


def _matched_arrays(means, variances, targets) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation and target [N], float64 on the CPU, as `_matched`."""
    mean, variance, targets = (x.cpu().numpy() for x in _matched(means, variances, targets))
    return mean[0].astype(np.float64), np.sqrt(variance[0].astype(np.float64)), targets


def gaussian_crps(means, variances, targets) -> float:
    """CRPS of the Gaussian with the moments of the mixture; `mixture_crps` if S = 1. Time O(N S).

    Args: means [S, N], finite; variances [S, N], > 0; targets [N], finite. Returns: 0.., small is
    good, in the unit of the targets.
    """
    return mixture_crps(*_matched(means, variances, targets))


def regression_ece(means, variances, targets) -> float:
    """Quantile calibration error, mean over 20 levels of |level - fraction of targets below it|.

    Levels 0.01 to 0.99, evenly spaced. y is at or below the quantile of the mixture exactly if its
    distribution function F(y) = (1/S) sum_s Phi((y - m_s) / sqrt(v_s)) is at most the level: exact,
    and no quantile is searched for.

    Args: means [S, N], finite; variances [S, N], > 0; targets [N], finite. Returns: 0..0.5.
    """
    means, variances, targets = _gaussians(means, variances, targets)
    cdf = [
        torch.special.ndtr((y - m) / v.sqrt()).mean(0)
        for m, v, y in _columns(means, variances, targets)
    ]
    levels = np.linspace(0.01, 0.99, 20)
    below = np.searchsorted(np.sort(torch.cat(cdf).cpu().numpy()), levels, side="right")
    return float(np.abs(below / len(targets) - levels).mean())


def ence(means, variances, targets) -> float:
    """Expected normalised calibration error, mean_b |RMV_b - RMSE_b| / RMV_b over equal-mass bins.

    Points are sorted by the standard deviation of their mixture and cut into chunks of ceil(N / 15)
    (the last one may be shorter: 15 chunks for N >= 197, fewer for some smaller N). RMV is the root
    mean variance of a chunk. Points of equal variance share their mean squared error, so that the
    result does not depend on their order.

    Args: means [S, N], finite; variances [S, N], > 0; targets [N], finite. Returns: 0..
    """
    mean, std, targets = _matched_arrays(means, variances, targets)
    std, error = _sort_sharing_ties(std, (targets - mean) ** 2)
    start = np.arange(0, len(std), -(-len(std) // 15))
    variance, error = (np.add.reduceat(x, start) for x in (std**2, error))
    return float(np.abs(1 - np.sqrt(error / variance)).mean())


def z_score_variance(means, variances, targets) -> float | None:
    """Unbiased variance of (y - mean) / std of the mixtures; 1 is calibrated; None for N = 1.

    Args: means [S, N], finite; variances [S, N], > 0; targets y [N], finite.
    """
    mean, std, targets = _matched_arrays(means, variances, targets)
    return float(((targets - mean) / std).var(ddof=1)) if len(std) > 1 else None


def rmv(means, variances) -> float:
    """Root mean variance sqrt(mean_n total_n), the sharpness. Args: as `gaussian_mixture_moments`.

    Returns: in the unit of the means.
    """
    return math.sqrt(float(gaussian_mixture_moments(means, variances).total.mean()))


def cv(means, variances) -> float | None:
    """Coefficient of variation of the standard deviations of the mixtures, unbiased std / mean.

    Args: as `gaussian_mixture_moments`. Returns: 0 if all points have one variance; None for N = 1.
    """
    std = gaussian_mixture_moments(means, variances).total.sqrt()
    return float(std.std() / std.mean()) if len(std) > 1 else None


def _point_errors(mean: np.ndarray, target: np.ndarray) -> dict[str, float | None]:
    error, size = np.abs(target - mean), np.abs(target) + np.abs(mean)
    square, spread = (error**2).mean(), np.ptp(target) > 0
    relative = np.divide(2 * error, size, out=np.zeros_like(error), where=size > 0)  # 0 / 0 = 0
    return {
        "mae": float(error.mean()),
        "rmse": math.sqrt(square),
        "mdae": float(np.median(error)),
        "marpd": float(relative.mean()),
        "r2": float(1 - square / target.var()) if spread else None,
        "corr": float(np.corrcoef(mean, target)[0, 1]) if spread and np.ptp(mean) > 0 else None,
    }


def _interval_calibration(z: np.ndarray) -> dict[str, float]:
    """Gaps between 100 levels 0..1 and the fraction of targets in the central interval of each."""
    levels = np.linspace(0, 1, 100)
    needed = np.sort(erf(np.abs(z) / math.sqrt(2)))  # the smallest level that holds the target
    gap = np.searchsorted(needed, levels, side="right") / len(z) - levels
    left, right = gap[:-1], gap[1:]
    size = np.abs(left) + np.abs(right)
    crossing = left * right < 0  # two triangles instead of a trapezoid
    height = np.where(crossing, (left**2 + right**2) / np.where(crossing, size, 1), size)
    return {
        "rms_cal": math.sqrt((gap**2).mean()),
        "ma_cal": float(np.abs(gap).mean()),
        "miscal_area": float(height.mean() / 2),
    }


def _quantile_scores(z: np.ndarray, std: np.ndarray) -> dict[str, float]:
    """Check and interval score of Gaussians, means over the levels 0.01, 0.02, ..., 0.99."""
    check, interval = [], []
    for q in np.linspace(0.01, 0.99, 99):
        above = z - ndtri(q)
        check.append(std @ np.maximum(q * above, (q - 1) * above))
        half = ndtri(0.5 + q / 2)
        interval.append(std @ (2 * half + 2 / (1 - q) * np.maximum(np.abs(z) - half, 0)))
    return {"check": float(np.mean(check) / len(z)), "interval": float(np.mean(interval) / len(z))}


def regression_metrics(means, variances, targets) -> dict[str, float | None]:
    """All scores of regression by an equal mixture of S Gaussians per point, in O(N S).

    Of the mixture: lpd (`mixture_lpd`), ece (`regression_ece`) and the means over n of aleatoric,
    epistemic and total variance. Of the Gaussian with the moments of the mixture: ence,
    z_score_var, rmv, cv, and what uncertainty-toolbox reports: nll (log(2 pi) / 2 included; nats);
    mae, rmse, mdae (median); marpd, mean of 2 |y - m| / (|y| + |m|), 0..2 and not percent as there,
    0 / 0 = 0; r2, corr; gaussian_crps as crps; check and interval score, means over the levels 0.01
    to 0.99; rms_cal, ma_cal, miscal_area: root mean square, mean, and area of the gaps between 100
    levels 0..1 of central intervals and the fraction of targets inside; sharp, equal to rmv.

    The 24th number of the published code, its `loss`, is left out: at test time it is the mean
    squared error, rmse^2. `mixture_crps` is left out: it takes O(N S^2).

    Args: means [S, N], finite; variances [S, N], > 0; targets y [N], finite.
    Returns: 23 floats, in the unit of y or its square where they have one; None (null in JSON)
        where undefined: z_score_var and cv for N = 1, r2 and corr for constant targets, corr for
        constant means.
    """
    moments = gaussian_mixture_moments(means, variances)
    matched = _matched(means, variances, targets)
    mean, std, y = _matched_arrays(*matched)
    z = (y - mean) / std
    return {
        "lpd": mixture_lpd(means, variances, targets),
        "nll": -mixture_lpd(*matched),
        **_point_errors(mean, y),
        "crps": gaussian_crps(*matched),
        **_quantile_scores(z, std),
        "ece": regression_ece(means, variances, targets),
        "ence": ence(*matched),
        "z_score_var": z_score_variance(*matched),
        **_interval_calibration(z),
        "rmv": rmv(*matched[:2]),
        "sharp": rmv(*matched[:2]),
        "cv": cv(*matched[:2]),
        **{name: float(getattr(moments, name).mean()) for name in Moments._fields[1:]},
    }


def standard_error(values) -> float | None:
    """Standard error of the mean of n runs: unbiased standard deviation / sqrt(n).

    Args: values [n], finite. Returns: in their unit; None (null in JSON) for n = 1.
    """
    values = _vector(values, "values").astype(np.float64)
    _require(bool(np.isfinite(values).all()), "values: expected finite numbers")
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


# ---- Processes ----------------------------------------------------------------------------------


class World(NamedTuple):
    """This process among `size`: global `rank`, `local_rank` on its machine, its device."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_world(device="auto") -> World:
    """Join the process group that torchrun describes (RANK, LOCAL_RANK, WORLD_SIZE), if any.

    `device`: auto (a GPU if there is one), cpu, cuda, or cuda:N (single process). CPU tensors
    travel by gloo and GPU tensors by nccl, so small decisions never wait for the GPU.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device {device}: not a device; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda":
        index = chosen.index if chosen.index is not None and size == 1 else local_rank
        if index >= torch.cuda.device_count():
            raise UserError(f"--device {device}: GPU {index} is asked for, this machine has "
                            f"{torch.cuda.device_count()}; start fewer processes or use "
                            "--device cpu")
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise UserError(f"--device {device}: use auto, cpu, cuda or cuda:N")
    if size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    return World(rank, local_rank, size, chosen)


@contextlib.contextmanager
def main_first(world):
    """Let one process of each machine do the block (a download, a cache) before the others."""
    if world.local_rank:
        barrier(world)
    try:
        yield
    finally:  # after an error too: the others then meet the same one, and say so
        if not world.local_rank:
            barrier(world)


def barrier(world):
    """Wait for all processes."""
    if world.size > 1:
        dist.barrier()


def broadcast_bytes(content, world):
    """The main process's bytes, or None, on all processes."""
    if world.size == 1:
        return content
    length = torch.tensor(-1 if content is None else len(content))
    dist.broadcast(length, 0)
    if length < 0:
        return None
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if world.is_main:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def data_parallel(net, world):
    """`net` under DistributedDataParallel; its buffers are equal on all ranks already."""
    if world.size == 1:
        return net
    parameters = inspect.signature(DistributedDataParallel).parameters  # renamed in torch 2.14
    sync = next(p for p in ("forward_sync_buffers", "broadcast_buffers") if p in parameters)
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(net, device_ids=ids, **{sync: False})


def derive_seed(seed, *counters) -> int:
    """One 63-bit seed from (seed, epoch, step, rank, ...), well mixed: neighbours share nothing."""
    return int(np.random.SeedSequence([seed, *counters]).generate_state(1, np.uint64)[0] >> 1)


def seed_all(seed, *counters):
    """Seed Python, NumPy and torch (all devices) from (seed, *counters); the same on all ranks."""
    value = derive_seed(seed, *counters)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def all_reduce(tensor, world) -> Tensor:
    """Sum `tensor` over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_rows(rows, index, n, world) -> Tensor:
    """Put the rows [b, ...] that each process computed for examples `index` [b] in their places.

    Returns [n, ...] on the CPU of every process, exactly one row an example however many processes
    there are; raises RuntimeError if an example is missing or came twice.
    """
    rows, index = concat_rows(rows.cpu(), world), concat_rows(index.cpu(), world)
    if len(index) != n or not torch.equal(index.sort().values, torch.arange(n)):
        raise RuntimeError(f"evaluation returned {len(index)} rows for {n} examples")
    placed = torch.empty_like(rows)
    placed[index] = rows
    return placed


def concat_rows(rows, world) -> Tensor:
    """The rows [b, ...] of all processes, in rank order; b may differ from process to process."""
    if world.size == 1:
        return rows
    counts = torch.zeros(world.size, dtype=torch.long)
    counts[world.rank] = len(rows)
    dist.all_reduce(counts)
    padded = torch.cat([rows, rows.new_zeros(int(counts.max()) - len(rows), *rows.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded)
    return torch.cat([g[:n] for g, n in zip(gathered, counts.tolist())])


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):  # every process's loss depends on every process's x
        return _AllReduceSum.apply(grad)

    @staticmethod
    def vmap(info, in_dims, x):
        return _AllReduceSum.apply(x), in_dims[0]


def all_reduce_sum(x) -> Tensor:
    """The sum of x over all processes, differentiable any number of times, also under vmap."""
    return _AllReduceSum.apply(x)


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the global batch on any device, differentiable twice.

    torch's SyncBatchNorm refuses CPU tensors; this is the same function for gloo processes. Two
    passes (mean, then centred second moment), so float32 does not cancel.
    """

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        count = all_reduce_sum(x.new_tensor(x.numel() / x.shape[1]))
        mean = all_reduce_sum(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        var = all_reduce_sum(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var * (count / (count - 1)), momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


def sync_batch_norm(net, world):
    """Give `net` batch statistics over the global batch: world size must not change the result."""
    if world.size == 1:
        return net
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
    return net


class Dropout(nn.Dropout):
    """Dropout whose mask is drawn for the global batch; each process uses its own rows of it.

    With the same seed on all ranks the masks do not depend on the number of processes. The training
    loop sets `global_rows`, the size of the global batch, which is cut as numpy.array_split does.
    """

    global_rows = 0

    def forward(self, x):
        if not self.training or self.p == 0 or not dist.is_initialized():
            return super().forward(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        total = Dropout.global_rows or len(x) * size
        first = rank * (total // size) + min(rank, total % size)
        # in the memory order of x, as a single process would draw it
        ones = x.new_empty_strided((total, *x.shape[1:]), x.stride()).fill_(1)
        return x * F.dropout(ones, self.p)[first:first + len(x)]


# ---- Runs ---------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_common_arguments(parser, datasets):
    """The options that all five scripts spell alike. None means: take it from PRESETS[dataset]."""
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--dataset", default=None, metavar="NAME",
        help=f"training set; alone it reproduces the paper's setting for it: {', '.join(datasets)}")
    add("--data-dir", default="data", help="where data sets lie or are downloaded to")
    add("--out-dir", default="runs", help="run directories are made under OUT_DIR/<script>/")
    add("--name", default=None, help="name of the run directory (default: made from the options)")
    add("--seed", type=int, default=1, help="seed of initialisation, split, order and augmentation")
    add("--epochs", "-e", type=int, help="passes over the training set")
    add("--batch-size", "-b", type=int,
        help="GLOBAL batch size B: the same whatever the number of processes, which must divide it")
    add("--lr", type=float, help="initial learning rate; keep it when the number of GPUs changes")
    add("--width", type=float, help="multiplies the network's channels; 1 is the paper's network")
    add("--amp", choices=["off", "bf16"], help="bf16: autocast the network")
    add("--compile", action=flag, help="torch.compile the network (pays on GPUs after a minute)")
    add("--workers", type=int, default=4, help="decoding processes for streamed image folders")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--eval", action="store_true", help="evaluate the finished run of these options")
    add("--resume", default="auto", metavar="{auto,never,PATH}",
        help="auto: go on from this run's own checkpoint; never: start anew; PATH: from there")
    add("--limit-steps", type=int, metavar="N", help="end each epoch after N steps")
    add("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")
    add("--quiet", action="store_true", help="print the final table only")


def resolve_arguments(args, presets, default_dataset):
    """Fill options left at None from `presets`: {"": for all, dataset: what differs there}."""
    args.dataset = args.dataset or default_dataset
    preset = {**presets[""], **presets.get(args.dataset, {})}
    for key, value in preset.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    positive = {"epochs": 0, "batch_size": 1, "limit_steps": 1, "width": 0.01, "lr": 0.0}
    for key, least in positive.items():
        value = getattr(args, key)
        if value is not None and not (least <= value < math.inf):
            raise UserError(f"--{key.replace('_', '-')} {value}: must be at least {least}")
    if not 0 <= args.seed < 2**31:
        raise UserError(f"--seed {args.seed}: must be between 0 and 2**31 - 1")
    return args


def check_batch(args, world):
    """Refuse a global batch that does not divide by the number of processes."""
    if args.batch_size % world.size:
        raise UserError(f"--batch-size {args.batch_size} is the global batch and does not divide "
                        f"by {world.size} processes; use a multiple of {world.size}")


def one_line(error) -> str:
    """An exception's message on one line, shortened; its type where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def _replacing(path):
    """Open a temporary file beside `path`; on success sync it and put it in the place of `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path, text):
    """Write a text file atomically: a reader sees the old one or the new one, whole."""
    with _replacing(path) as file:
        file.write(text.encode())


def load_arrays(path, names) -> dict:
    """The arrays `names` of an .npz file; UserError if it is absent, damaged, or lacks one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except KeyError as error:
        raise UserError(f"{path} has no array {error}; it needs {', '.join(names)}") from None
    except Exception:  # numpy raises many kinds for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None


def save_arrays(path, arrays):
    """Write {name: tensor} as an .npz file, atomically."""
    with _replacing(path) as file:
        np.savez(file, **{name: np.asarray(array) for name, array in arrays.items()})


def save_array(path, array):
    """Write one array as an .npy file, atomically; np.load maps it into memory."""
    with _replacing(path) as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def to_json(value):
    """Plain JSON of nested dicts, lists, numbers, tensors, paths; NaN and inf become null."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def write_json(path, value):
    """Write `value` as strict JSON, atomically."""
    write_text(path, json.dumps(to_json(value), indent=1, allow_nan=False) + "\n")


def save_checkpoint(path, state):
    """Write tensors and plain Python atomically: if killed, `path` is whole, old or new."""
    with _replacing(path) as file:
        torch.save(state, file)


def load_checkpoint(path, same=None, world=World()):
    """Read a checkpoint to the CPU; raise UserError if it is absent, damaged, or of other options.

    `same`: the options that must equal those stored under "config". The main process reads; the
    others, perhaps on a machine that does not share the disk, get the bytes from it.
    """
    path = Path(path)
    content = path.read_bytes() if world.is_main and path.is_file() else None
    if (content := broadcast_bytes(content, world)) is None:
        raise UserError(f"no checkpoint at {path}; train first (the same command without --eval)")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{path} cannot be read as a checkpoint ({one_line(error)}); delete it "
                        "to start anew") from None
    if not isinstance(state, dict) or "config" not in state:
        raise UserError(f"{path} is not a checkpoint of this project; give another path or "
                        "delete it")
    if same is not None:
        saved, now = state["config"], to_json(same)
        differing = sorted(k for k in {*saved, *now} if saved.get(k) != now.get(k))
        if differing:
            shown = ", ".join(f"{k} ({saved.get(k)} there, {now.get(k)} now)" for k in differing)
            raise UserError(f"{path} was made with other options: {shown}; use the same options, "
                            "another --name, or --resume never")
    return state


class Stopped(Exception):
    """Raised after a requested stop, once the state is saved; `run_script` exits 128 + signal."""

    def __init__(self, signum, where):
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} {where}; the same command goes on from there")
        self.status = 128 + signum


class StopSignals:
    """SIGTERM and SIGINT ask for a stop after the step; a second SIGINT stops at once.

    Several processes agree before they stop, every 10 steps, by a CPU tensor: no GPU sync.
    """

    def __enter__(self):
        self.signum, self.previous = 0, {}
        for signum in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
                self.previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_):
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _note(self, signum, _frame):
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

    def asked(self, world, step=0) -> int:
        """The signal that asks for a stop (0: none), agreed on by all processes."""
        if world.size > 1:
            if step % 10:
                return 0
            agreed = torch.tensor(self.signum)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            return int(agreed)
        return self.signum


class Run:
    """A run directory: args.json, log.jsonl (an object an epoch), last.pt, results.json, pictures.

    Only the main process writes. `config` holds the options that make the result; it is stored in
    every checkpoint and compared on loading.
    """

    def __init__(self, args, script, name, config, world):
        self.directory = Path(args.out_dir) / script / name
        self.config, self.world, self.quiet = to_json(config), world, args.quiet
        self.checkpoint = self.directory / "last.pt"
        own = args.resume in ("auto", "never")
        self.resume_from = self.checkpoint if own else Path(args.resume)
        self.fresh = args.resume == "never" and not args.eval
        self.history = []

    def open(self):
        """Make the directory, and args.json unless there is a checkpoint to go on from."""
        problem = None
        if self.world.is_main:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                if self.fresh or not self.checkpoint.exists():
                    write_json(self.directory / "args.json", self.config)
            except OSError as error:
                problem = error.strerror.encode()
        if (problem := broadcast_bytes(problem, self.world)) is not None:
            raise UserError(f"cannot write to {self.directory} ({problem.decode()}); choose "
                            "another --out-dir or --name")

    def say(self, text):
        """Print on the main process, unless --quiet."""
        if self.world.is_main and not self.quiet:
            print(text, flush=True)

    def load(self, required=False):
        """The state to go on from, or None. Its config must equal this run's."""
        own = self.resume_from == self.checkpoint
        there = broadcast_bytes(b"1" if self.checkpoint.exists() else None, self.world) is not None
        if own and not required and (self.fresh or not there):
            return None
        state = load_checkpoint(self.resume_from, same=self.config, world=self.world)
        self.history = state.get("history", [])
        return state

    def log(self, epoch, epochs, **row):
        """Note an epoch for log.jsonl (written with the next checkpoint) and print it."""
        row = {"epoch": epoch, **row, "peak_memory_gb": peak_memory_gb(self.world)}
        self.history.append(row)
        left = row["seconds"] * (epochs - epoch)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in ("epoch", "seconds"))
        self.say(f"epoch {epoch}/{epochs}  {shown}  {left:.0f} s left")

    def save(self, **state):
        """Write last.pt and log.jsonl; both tell of the same epochs."""
        if self.world.is_main:
            lines = "".join(json.dumps(to_json(row)) + "\n" for row in self.history)
            write_text(self.directory / "log.jsonl", lines)
            save_checkpoint(self.checkpoint,
                            {"config": self.config, "history": self.history, **state})

    def results(self, metrics, timing, **more):
        """Write results.json and return its content."""
        content = to_json({"config": self.config, "metrics": metrics, "timing": timing,
                           "environment": environment(self.world), **more})
        self.open()
        if self.world.is_main:
            write_json(self.directory / "results.json", content)
        return content


def environment(world) -> dict:
    """What a reader needs to repeat a number: commit, versions, device, processes."""
    here = Path(__file__).resolve().parent

    def git(*words):
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "-uno"))
    except OSError:
        commit, dirty = None, None
    cuda = world.device.type == "cuda"
    return {"commit": commit, "uncommitted_changes": dirty, "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "processes": world.size,
            "device": torch.cuda.get_device_name(world.device) if cuda else platform.machine(),
            "threads": torch.get_num_threads(), "peak_memory_gb": peak_memory_gb(world)}


class Stopwatch:
    """Wall seconds since it was made; waits for the GPU when read."""

    def __init__(self, device):
        self.device, self.start = device, time.perf_counter()

    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start


def device_memory(world) -> int:
    """Bytes of memory of the process's device."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_gb(world) -> float:
    """Peak memory in GB: the allocator's on a GPU, the process's resident set on a CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def check_finite(losses, first_step, lr_at):
    """Raise UserError for the first non-finite loss of an epoch, by step: one sync an epoch."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise UserError(f"loss {losses[i].item()} at step {first_step + i} with learning rate "
                        f"{lr_at(first_step + i):g}; the last good checkpoint is kept. Lower --lr")


def progress(batches, total, label, quiet, world):
    """tqdm on the main process of a terminal; otherwise the batches as they are."""
    if quiet or not world.is_main or not sys.stderr.isatty():
        return batches
    from tqdm import tqdm
    return tqdm(batches, total=total, desc=label, leave=False)


def format_table(header, rows) -> str:
    """Plain text table: first column left, the others right; None is an empty cell."""
    cells = [[("" if c is None else str(c)) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                       for i, (c, w) in enumerate(zip(row, widths))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def pyplot():
    """matplotlib.pyplot for files, or None after one line that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save_figure(plt, figure, path):
    """Write a figure and free it."""
    figure.savefig(path, dpi=150)
    plt.close(figure)


def with_options(args, **changes):
    """A copy of parsed arguments with some changed."""
    return argparse.Namespace(**{**vars(args), **changes})


def run_script(main):
    """Run main(); a UserError is one line and exit status 2, a requested stop 128 + signal."""
    status = 0
    try:
        main()
    except (UserError, Stopped) as problem:
        kind = "" if isinstance(problem, Stopped) else "error: "
        print(f"{Path(sys.argv[0]).name}: {kind}{' '.join(str(problem).split())}", file=sys.stderr)
        status = getattr(problem, "status", 2)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(status)
