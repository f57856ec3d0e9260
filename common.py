"""common.py: metrics, and the few lines that make a run trustworthy. No model, no loss.

  Metrics    accuracy, NLL, Brier, calibration, ensemble decomposition, OOD detection, rejection,
             temperature, regression by mixtures of Gaussians: float64 inside, Python floats out.
  Processes  one process, or those that torchrun started: seeds, gathering, batch statistics.
  Options    the command line that all scripts share; presets are defaults, types do the checking.
  Runs       the run directory: atomic checkpoints, epochs that resume, rows, reports, errors.

As a program it makes one table of the results of any runs:
  python common.py table runs/ddu/* [--metrics accuracy nll] [--format text|markdown|latex|csv]
"""

import argparse
import contextlib
import csv
import datetime
import inspect
import io
import json
import math
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import brentq
from scipy.special import erf, ndtri
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

try:
    import fcntl
    import resource
except ImportError:  # Windows: no locks of run directories there, no peak memory in results.json
    fcntl = resource = None


class UserError(ValueError):
    """A mistake that the user can mend; `launch` shows it as one line, exit status 2."""


# ---- Metrics ------------------------------------------------------------------------------------
# probs [N, K] have rows in [0, 1] that sum to 1, log_probs [N, K] are their logarithms, labels [N]
# are integers in 0..K-1; scores and uncertainties [N] may be infinite, masks such as `positive` [N]
# are bool or 0/1. Regression is by equal mixtures of S Gaussians: means [S, N], variances > 0
# [S, N], targets [N]. Lists, arrays and tensors of any float type will do. NaN, empty or misshapen
# input, labels out of range, rows that are not probabilities: a ValueError of one line. Entropies
# and likelihoods are in nats, errors and areas are fractions.

TOLERANCE = 1e-3  # how far the sum of a row of probabilities may be from 1; float32 errs by 1e-6


def _require(condition, message):
    if not condition:
        raise ValueError(message)


def _tensor(x, axes, name) -> Tensor:
    """A detached float32 or float64 tensor [*axes]: a letter is any size but 0, a number itself."""
    x = torch.as_tensor(x, dtype=torch.float64 if isinstance(x, (list, tuple)) else None).detach()
    x = x.cpu() if x.device.type == "mps" else x  # which has no float64
    fits = x.ndim == len(axes) and x.numel() > 0 and all(
        isinstance(axis, str) or axis == size for axis, size in zip(axes, x.shape))
    axes = ", ".join(map(str, axes))
    _require(fits, f"{name}: expected [{axes}], non-empty, got {list(x.shape)}")
    narrow = x.is_floating_point() and x.element_size() < 8
    return x.to(torch.float32 if narrow else torch.float64)


def _with_labels(x, labels, name, axes="NK") -> tuple[Tensor, Tensor]:
    x, labels = _tensor(x, axes, name), torch.as_tensor(labels)
    n, k = x.shape[-2:]
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    _require(whole, f"labels: expected class indices of an integer type, got {labels.dtype}")
    labels = _tensor(labels, [n], "labels").long().to(x.device)
    low, high = map(int, labels.aminmax())
    _require(0 <= low and high < k, f"labels: expected 0..{k - 1}, got {low}..{high}")
    return x, labels


def _check_probs(probs, name="probs"):
    """Refuse rows that are no probabilities; their sums also find NaN, infinities and logits."""
    low = float(probs.amin())  # NaN if there is one: left to the sums
    _require(not low < 0, f"{name}: expected 0..1, got {low:.4g}")
    low, high = map(float, probs.sum(-1).aminmax())
    _require(abs(low - 1) <= TOLERANCE and abs(high - 1) <= TOLERANCE,
             f"{name}: expected rows that sum to 1 within {TOLERANCE:g} (softmax in float32, no "
             f"NaN), got sums from {low:.5g} to {high:.5g}")


def _vector(x, name, size="N") -> np.ndarray:
    x = _tensor(x, [size], name).cpu().numpy()
    _require(not np.isnan(x).any(), f"{name}: contains NaN")
    return x


def _with_mask(x, x_name, mask, name) -> tuple[np.ndarray, np.ndarray]:
    x = _vector(x, x_name)
    mask = _vector(mask, name, len(x))
    _require(bool(((mask == 0) | (mask == 1)).all()), f"{name}: expected bool, or 0 and 1")
    return x, mask == 1


def _sort_sharing_ties(key, value) -> tuple[np.ndarray, np.ndarray]:
    """Sort by key, ascending; equal keys share their mean value, the expectation over orders."""
    key = key.astype(np.float64)
    distinct, group, size = np.unique(key, return_inverse=True, return_counts=True)
    return np.repeat(distinct, size), np.repeat(np.bincount(group, value) / size, size)


def _confidence(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    """Largest probability of each row, in the precision given, and whether it is the label's."""
    probs, labels = _with_labels(probs, labels, "probs")
    _check_probs(probs)
    confidence, predicted = probs.max(1)
    return _vector(confidence, "probs").clip(max=1), (predicted == labels).cpu().numpy()


def accuracy(probs, labels) -> float:
    """Fraction of rows whose largest score is the label's; equal scores: the lowest class wins."""
    return top_k_accuracy(probs, labels, 1)


def top_k_accuracy(probs, labels, k: int) -> float:
    """Fraction of rows whose label is among the k in 1..K largest scores, which may be of any kind
    (logits); equal ones are ranked by class index."""
    scores, labels = _with_labels(probs, labels, "probs")
    classes, label = torch.arange(scores.shape[1], device=scores.device), labels[:, None]
    _require(1 <= k <= len(classes), f"k: expected 1..{len(classes)}, got {k}")
    _require(not bool(scores.isnan().any()), "probs: contains NaN")
    own = scores.gather(1, label)
    ahead = (scores > own) | ((scores == own) & (classes < label))
    return float((ahead.sum(1) < k).double().mean())


def nll(log_probs, labels) -> float:
    """Negative log-likelihood -(1/N) sum_n log p_n[y_n], nats; inf only where a label has -inf."""
    return 0.0 - lpd(_tensor(log_probs, "NK", "log_probs")[None], labels)


def lpd(log_probs, labels) -> float:
    """Log predictive density (1/N) sum_n log (1/S) sum_s p_s(y_n) of an equal mixture, log_probs
    [S, N, K], in nats: finite where the mean probability underflows. S = 1 is -`nll`."""
    log_probs, labels = _with_labels(log_probs, labels, "log_probs", "SNK")
    for sample in log_probs:
        _check_probs(sample.exp(), "exp(log_probs)")
    own = log_probs.gather(2, labels.expand(len(log_probs), -1)[..., None])[..., 0].double()
    return float((own.logsumexp(0) - math.log(len(own))).mean())


def brier(probs, labels) -> float:
    """Brier score (1/N) sum_n sum_k (p_nk - [k = y_n])^2, 0..2: sum over classes, not mean."""
    probs, labels = _with_labels(probs, labels, "probs")
    _check_probs(probs)
    error = probs.double() - nn.functional.one_hot(labels, probs.shape[1])
    return float(error.square().sum(1).mean())


# The bars of a reliability diagram, arrays [bins]; confidence and accuracy are means, or 0.
Reliability = namedtuple("Reliability", "counts confidence accuracy")


def reliability(confidence, correct, bins: int = 15) -> Reliability:
    """Count, mean confidence and accuracy in equal-width bins (b/bins, (b+1)/bins], b = 0, 1, ...;
    0 goes to the first. Edges are compared in the precision of `confidence` [N] in [0, 1]: 0.2
    closes bin 2 of 15 in float32 and float64."""
    confidence, correct = _with_mask(confidence, "confidence", correct, "correct")
    _require(bins >= 1, f"bins: expected at least 1, got {bins}")
    low, high = confidence.min(), confidence.max()
    _require(0 <= low and high <= 1 + 1e-6, f"confidence: expected 0..1, got {low:.8g}..{high:.8g}")
    inner_edges = (np.arange(1, bins) / bins).astype(confidence.dtype)
    index = np.searchsorted(inner_edges, confidence, side="left")
    counts = np.bincount(index, minlength=bins)
    sums = (np.bincount(index, weights, bins) for weights in (confidence.clip(max=1), correct))
    return Reliability(counts, *(total / np.maximum(counts, 1) for total in sums))


def ece(probs, labels, bins: int = 15) -> float:
    """Expected calibration error sum_b n_b/N |accuracy_b - confidence_b|, bins of `reliability`."""
    bars = reliability(*_confidence(probs, labels), bins)
    return float((bars.counts * np.abs(bars.accuracy - bars.confidence)).sum() / bars.counts.sum())


def mce(probs, labels, bins: int = 15) -> float:
    """Maximum calibration error, max |accuracy_b - confidence_b| over non-empty bins; as `ece`."""
    bars = reliability(*_confidence(probs, labels), bins)
    return float(np.abs(bars.accuracy - bars.confidence).max())


def adaptive_ece(probs, labels, bins: int = 15) -> float:
    """Calibration error over equal-mass bins: rows sorted by confidence, cut as numpy.array_split.
    Rows of equal confidence share their mean correctness: their order does not matter."""
    _require(bins >= 1, f"bins: expected at least 1, got {bins}")
    confidence, correct = _sort_sharing_ties(*_confidence(probs, labels))
    gaps = np.array_split(correct - confidence, bins)
    return float(sum(abs(gap.sum()) for gap in gaps) / len(confidence))


def entropy(probs) -> Tensor:
    """-sum_k p_k log p_k with 0 log 0 = 0, of probs [..., K]: [...] in 0..log K, float64."""
    shape = torch.as_tensor(probs).shape
    probs = _tensor(probs, ["..."] * (len(shape) - 1) + ["K"], "probs").double()
    _check_probs(probs)
    return torch.special.entr(probs).sum(-1)


def ensemble_uncertainty(log_probs) -> dict[str, Tensor]:
    """Uncertainties [N] of an ensemble log_probs [M, N, K], mean prediction pi = (1/M) sum_m p_m:
    total = H(pi); aleatoric = (1/M) sum_m H(p_m); epistemic = total - aleatoric, the mutual
    information; rmi = (1/M) sum_m KL(pi || p_m), the reverse one; epkl = (1/M^2) sum_ij
    KL(p_i || p_j), all ordered pairs, = epistemic + rmi. Nats, float64, differences clamped at 0;
    rmi and epkl are inf if a member excludes a class that another one does not."""
    log_probs = _tensor(log_probs, "MNK", "log_probs")
    rows, parts = max(1, 2**22 // log_probs[:, 0].numel()), []  # ten members of ImageNet in blocks
    for log_p in log_probs.split(rows, 1):
        log_p = log_p.double()
        p = log_p.exp()
        _check_probs(p, "exp(log_probs)")
        log_pi = log_p.logsumexp(0) - math.log(len(log_p))
        pi = log_pi.exp()
        total, aleatoric = torch.special.entr(pi).sum(-1), torch.special.entr(p).sum(-1).mean(0)
        cross = -(pi * log_p.mean(0)).masked_fill(pi == 0, 0).sum(-1)  # mean_m of H(pi, p_m)
        parts.append(torch.stack([total, aleatoric, total - aleatoric, cross - total]).clamp_min(0))
    total, aleatoric, epistemic, rmi = torch.cat(parts, 1)
    return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic, "rmi": rmi,
            "epkl": epistemic + rmi}


def _threshold_counts(scores, positive, tpr=1) -> tuple[np.ndarray, np.ndarray]:
    """Positives and negatives with score >= t, at each distinct score t from the highest down."""
    _require(0 < tpr <= 1, f"tpr: expected 0 < tpr <= 1, got {tpr}")
    scores, positive = _with_mask(scores, "scores", positive, "positive")
    _require(positive.any() and not positive.all(), "positive: expected both classes, got only one")
    distinct, group = np.unique(-scores, return_inverse=True)
    return tuple(np.bincount(group[mask], minlength=len(distinct)).cumsum()
                 for mask in (positive, ~positive))


def auroc(scores, positive) -> float:
    """Area under the ROC curve, P(positive scores higher than negative) + P(equal) / 2."""
    tp, fp = _threshold_counts(scores, positive)
    twice_area = np.diff(fp, prepend=0) @ (tp + np.append(0, tp[:-1]))  # integers: exact
    return float(twice_area / (2 * tp[-1] * fp[-1]))


def average_precision(scores, positive) -> float:
    """Area under the precision-recall steps, sum_t (recall_t - recall_{t-1}) precision_t."""
    tp, fp = _threshold_counts(scores, positive)
    return float(np.diff(tp, prepend=0) @ (tp / (tp + fp)) / tp[-1])


def fpr_at_tpr(scores, positive, tpr: float = 0.95) -> float:
    """Smallest false positive rate among thresholds score >= t with true positive rate >= tpr."""
    tp, fp = _threshold_counts(scores, positive, tpr)
    return float(fp[np.argmax(tp / tp[-1] >= tpr)] / fp[-1])


def detection_error(scores, positive, tpr: float = 0.95) -> float:
    """Smallest (1 - w) (1 - TPR) + w FPR among thresholds score >= t with TPR >= tpr; w is the
    fraction of positives: the weights of ood-metrics."""
    tp, fp = _threshold_counts(scores, positive, tpr)
    rate, w = tp / tp[-1], tp[-1] / (tp[-1] + fp[-1])
    return float(((1 - w) * (1 - rate) + w * fp / fp[-1])[rate >= tpr].min())


def ood_metrics(id_scores, ood_scores, *, larger_means: str) -> dict[str, float]:
    """Separation of in-distribution [N] from out-of-distribution [L] examples by one score, larger
    for "ood" (an uncertainty) or "id" (a log density). auroc is the same whichever side is
    positive; aupr_in and aupr_out are average precisions with ID and with OOD positive; fpr95 is
    the share of OOD accepted when >= 95 % of ID is."""
    _require(larger_means in ("ood", "id"), f"larger_means: expected ood or id, got {larger_means}")
    id_scores, ood_scores = _vector(id_scores, "id_scores"), _vector(ood_scores, "ood_scores")
    confidence = np.concatenate([id_scores, ood_scores]) * (1 if larger_means == "id" else -1)
    is_id = np.arange(len(confidence)) < len(id_scores)
    return {"auroc": auroc(confidence, is_id), "aupr_in": average_precision(confidence, is_id),
            "aupr_out": average_precision(-confidence, ~is_id),
            "fpr95": fpr_at_tpr(confidence, is_id, 0.95)}


def rejection_curve(uncertainty, correct) -> tuple[np.ndarray, np.ndarray]:
    """Rejected fraction 0, 1/N, ..., 1 and errors left over N, both [N + 1], when the most
    uncertain predictions are rejected, that is, put right. Ties are rejected in random order: the
    curve is the expectation, a straight line across a tie."""
    uncertainty, correct = _with_mask(uncertainty, "uncertainty", correct, "correct")
    _, wrong = _sort_sharing_ties(uncertainty, ~correct)
    errors = np.append(0.0, np.cumsum(wrong))  # among the k most certain, k = 0..N
    return np.arange(len(errors)) / len(wrong), errors[::-1] / len(wrong)


def prediction_rejection_ratio(uncertainty, correct) -> float | None:
    """Malinin's (A_random - A) / (A_random - A_oracle), -1..1; A is the area under
    `rejection_curve`, the oracle rejects all errors first, a random order gives a straight line:
    2 auroc(uncertainty, not correct) - 1. None if all or no predictions are correct."""
    uncertainty, correct = _with_mask(uncertainty, "uncertainty", correct, "correct")
    return 2 * auroc(uncertainty, ~correct) - 1 if 0 < correct.sum() < len(correct) else None


def fit_temperature(logits, labels) -> float:
    """Temperature T that minimises the NLL of softmax(z_n / T) of finite logits z [N, K], convex
    in 1/T: the one root of its slope, by Brent's method on log T to 1e-9. Cut to 1e-3..1e3; 1 if no
    T makes a difference (constant rows)."""
    z, labels = _with_labels(logits, labels, "logits")
    _require(bool(z.isfinite().all()), "logits: expected finite numbers")
    z = z.double() - z.gather(1, labels[:, None])

    def slope(log_t):  # d NLL / d(1/T) = mean_n of E_{softmax(z/T)}[z - z_y]
        return float(((z / math.exp(log_t)).softmax(1) * z).sum(1).mean())

    low, high = math.log(1e-3), math.log(1e3)
    if (at_high := slope(high)) >= 0:
        return 1e3 if at_high > 0 else 1.0
    return 1e-3 if slope(low) <= 0 else math.exp(brentq(slope, low, high, xtol=1e-9))


# Mean and variance of mixtures of Gaussians, tensors [N]; total = aleatoric + epistemic.
Moments = namedtuple("Moments", "mean aleatoric epistemic total")


def _mixture(means, variances, *targets) -> list[Tensor]:
    """The arguments as float64 tensors on one device, checked."""
    means = _tensor(means, "SN", "means")
    found = [means, _tensor(variances, means.shape, "variances")]
    found += [_tensor(y, means.shape[1:], "targets") for y in targets]
    for name, x in zip(("means", "variances", "targets"), found):
        _require(bool(x.isfinite().all()), f"{name}: expected finite numbers")
    low = float(found[1].min())
    _require(low > 0, f"variances: expected numbers above 0, got {low:.4g}")
    return [x.to(means.device, torch.float64) for x in found]


def gaussian_mixture_moments(means, variances) -> Moments:
    """mean_s m_s, mean_s v_s and mean_s (m_s - mean)^2, divided by S: the variance is the sum."""
    means, variances = _mixture(means, variances)
    aleatoric, epistemic = variances.mean(0), means.var(0, correction=0)
    return Moments(means.mean(0), aleatoric, epistemic, aleatoric + epistemic)


def mixture_lpd(means, variances, targets) -> float:
    """(1/N) sum_n log (1/S) sum_s N(y_n; m_sn, v_sn), nats, log(2 pi) / 2 included."""
    m, v, y = _mixture(means, variances, targets)
    log_density = -((y - m).square() / v + v.log() + math.log(2 * math.pi)) / 2
    return float((log_density.logsumexp(0) - math.log(len(m))).mean())


def _mean_abs(difference, variance) -> Tensor:
    """E|X|, X ~ N(difference, variance)."""
    std = variance.sqrt()
    z = difference / std
    return std * (math.sqrt(2 / math.pi) * (-z * z / 2).exp() + z * torch.erf(z / math.sqrt(2)))


def mixture_crps(means, variances, targets) -> float:
    """Continuous ranked probability score of the mixture, mean_n E|X - y_n| - E|X - X'| / 2, X and
    X' independent: mean_s A(y - m_s, v_s) - mean_st A(m_s - m_t, v_s + v_t) / 2 with A(d, v) =
    E|N(d, v)| (Grimit et al. 2006). Time O(N S^2), memory O(N S)."""
    m, v, y = _mixture(means, variances, targets)
    pairs = sum(_mean_abs(m - m.roll(lag, 0), v + v.roll(lag, 0)).mean() for lag in range(len(m)))
    return float(_mean_abs(y - m, v).mean() - pairs / len(m) / 2)


def regression_ece(means, variances, targets) -> float:
    """Mean over 20 levels .01, ..., .99 of |level - share of targets at or below that quantile of
    the mixture|, that is, F(y) = (1/S) sum_s Phi((y - m_s) / sqrt(v_s)) <= level. 0..0.5."""
    m, v, y = _mixture(means, variances, targets)
    cdf = torch.special.ndtr((y - m) / v.sqrt()).mean(0).cpu().numpy()
    levels = np.linspace(0.01, 0.99, 20)
    below = np.searchsorted(np.sort(cdf), levels, side="right") / len(y)
    return float(np.abs(below - levels).mean())


def ence(std, error) -> float:
    """Expected normalised calibration error, mean_b |RMV_b - RMSE_b| / RMV_b (root mean variance)
    over chunks of ceil(N / 15) points sorted by standard deviation. Points of equal deviation share
    their mean squared error: their order does not matter."""
    std, square = _sort_sharing_ties(_vector(std, "std"), _vector(error, "error") ** 2)
    start = np.arange(0, len(std), -(-len(std) // 15))
    variance, square = (np.add.reduceat(x, start) for x in (std**2, square))
    return float(np.abs(1 - np.sqrt(square / variance)).mean())


def regression_metrics(means, variances, targets) -> dict[str, float | None]:
    """All scores of regression by an equal mixture, 23 numbers, in O(N S); None where undefined.
    Of the mixture: lpd, ece (`regression_ece`) and the means over n of aleatoric, epistemic and
    total variance. Of the Gaussian with its moments m, s^2: ence; z_score_var, the variance of
    (y - m) / s; cv, standard deviation of s / mean of s (both unbiased); rmv = sharp, the root of
    mean s^2; and what uncertainty-toolbox reports: nll; mae, rmse, mdae (median); marpd, mean of
    2 |y - m| / (|y| + |m|), 0..2 and not percent as there, 0 / 0 = 0; r2, corr; crps; check and
    interval score, means over the levels .01, ..., .99; rms_cal, ma_cal, miscal_area: root mean
    square, mean and area of the gaps between 100 levels 0..1 of central intervals and the share of
    targets inside."""
    mixture, moments = (means, variances, targets), gaussian_mixture_moments(means, variances)
    deviation = moments.total.sqrt().cpu()
    y = _mixture(*mixture)[2].cpu().numpy()
    mean, std = moments.mean.cpu().numpy(), deviation.numpy()
    gaussian, z = (mean[None], std[None] ** 2), (y - mean) / std
    rmv, several = math.sqrt(float(deviation.square().mean())), len(y) > 1
    error, size = np.abs(y - mean), np.abs(y) + np.abs(mean)
    square, spread = (error**2).mean(), np.ptp(y) > 0
    level = np.linspace(0.01, 0.99, 99)[:, None]
    above, half = z - ndtri(level), ndtri(0.5 + level / 2)  # quantiles, central intervals
    outside = np.maximum(np.abs(z) - half, 0)
    inside = np.linspace(0, 1, 100)
    needed = np.sort(erf(np.abs(z) / math.sqrt(2)))  # the smallest interval that holds the target
    gap = np.searchsorted(needed, inside, side="right") / len(z) - inside
    ends = np.abs(gap[:-1]) + np.abs(gap[1:])
    crossing = gap[:-1] * gap[1:] < 0  # two triangles instead of a trapezoid
    square_ends = np.where(crossing, gap[:-1] ** 2 + gap[1:] ** 2, ends**2)
    return {
        "lpd": mixture_lpd(*mixture),
        "nll": -mixture_lpd(*gaussian, y),
        "mae": float(error.mean()),
        "rmse": math.sqrt(square),
        "mdae": float(np.median(error)),
        "marpd": float((2 * error / np.where(size > 0, size, 1)).mean()),
        "r2": float(1 - square / y.var()) if spread else None,
        "corr": float(np.corrcoef(mean, y)[0, 1]) if spread and np.ptp(mean) > 0 else None,
        "crps": mixture_crps(*gaussian, y),
        "check": float((std * np.maximum(level * above, (level - 1) * above)).mean()),
        "interval": float((std * (2 * half + 2 / (1 - level) * outside)).mean()),
        "ece": regression_ece(*mixture),
        "ence": ence(std, error),
        "z_score_var": float(z.var(ddof=1)) if several else None,
        "rms_cal": math.sqrt((gap**2).mean()),
        "ma_cal": float(np.abs(gap).mean()),
        "miscal_area": float((square_ends / np.where(ends > 0, ends, 1)).mean() / 2),
        "rmv": rmv,
        "sharp": rmv,
        "cv": float(deviation.std() / deviation.mean()) if several else None,
        **{name: float(getattr(moments, name).mean()) for name in Moments._fields[1:]},
    }


def standard_error(values) -> float | None:
    """Unbiased standard deviation of finite values [n] / sqrt(n); None for n = 1."""
    values = _vector(values, "values").astype(np.float64)
    _require(bool(np.isfinite(values).all()), "values: expected finite numbers")
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


# ---- Processes ----------------------------------------------------------------------------------

_alone = False


def start(device="auto") -> torch.device:
    """This process's device: auto (a GPU if there is one), cpu, cuda, mps, or cuda:N for a single
    process. Joins the process group if torchrun started several: small things travel by gloo,
    gradients on GPUs by nccl, and a process may wait for another for a day."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: use auto, cpu, cuda, cuda:N or mps")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has none; use --device cpu")
    if device.startswith("cuda"):
        local = int(os.environ.get("LOCAL_RANK", 0))
        index = local if several or device == "cuda" else int(device[5:])
        if index >= (count := torch.cuda.device_count()):
            raise UserError(f"--device {device}: GPU {index} is asked for, this machine has "
                            f"{count}; start fewer processes or use --device cpu")
        device = f"cuda:{index}"
        torch.cuda.set_device(index)
    if several and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(days=1))
    return torch.device(device)


@contextlib.contextmanager
def alone():
    """Inside, this process works as if there were no other: for jobs that are shared out."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    return 0 if _alone else int(os.environ.get("RANK", 0))


def world_size() -> int:
    together = dist.is_available() and dist.is_initialized() and not _alone
    return dist.get_world_size() if together else 1


def is_main() -> bool:
    return rank() == 0


def broadcast(value):
    """The main process's value (numbers, strings, bytes, CPU tensors) on all processes."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def gather_objects(value) -> list:
    """The values of all processes, by rank, on all processes."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def main_first(work):
    """work() by one process of each machine (a download, a cache), then by the others. Its
    UserError is raised after all had their turn: who waits for others must not wait for ever."""
    failed = None
    for first in (True, False):
        if first == (int(os.environ.get("LOCAL_RANK", 0)) == 0):
            try:
                done = work()
            except UserError as error:
                failed = error
        gather_objects(None)  # waits for all
    if failed:
        raise failed
    return done


def derive_seed(*key) -> int:
    """A 63-bit seed from integers (seed, epoch, ...), well mixed: neighbours share nothing."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def seed_all(*key):
    """Seed Python, NumPy and torch (all devices) from integers."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def all_reduce(tensor) -> Tensor:
    """Sum `tensor` over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_rows(index, *columns) -> list | None:
    """What each process computed for the rows `index` [b] of a set: on the main process alone (the
    others get None), each column [b, ...] as [N, ...] on the CPU, in the set's order, exactly one
    row an example however many processes there are."""
    parts = [[t.cpu().contiguous()] for t in (index, *columns)]
    lengths = gather_objects(len(index))
    if not is_main():
        for [tensor] in parts:
            dist.send(tensor, 0)
        return None
    for sender, length in list(enumerate(lengths))[1:]:
        for part in parts:
            part.append(part[0].new_empty(length, *part[0].shape[1:]))
            dist.recv(part[-1], sender)
    index = torch.cat(parts[0])
    order = index.argsort()
    if not torch.equal(index[order], torch.arange(len(index))):
        raise RuntimeError(f"rows are missing or came twice among {len(index)}")
    return [torch.cat(part)[order] for part in parts[1:]]


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad):  # every process's loss depends on every process's x
        return _AllReduceSum.apply(grad)


def all_reduce_sum(x) -> Tensor:
    """The sum of x over all processes, differentiable any number of times."""
    return _AllReduceSum.apply(x) if world_size() > 1 else x


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the global batch, differentiable twice, also on CPUs, which SyncBatchNorm
    refuses. Two passes (mean, then centred second moment): float32 does not cancel, and is what
    the statistics of bfloat16 are computed in."""

    def forward(self, x):
        if not self.training or world_size() == 1:
            return super().forward(x)
        count = self.weight.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([x.sum((0, 2, 3), dtype=count.dtype), count])
        mean, count = all_reduce_sum(sums).split([x.shape[1], 1])
        mean = mean / count
        centred = x - mean[:, None, None]
        var = all_reduce_sum(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def data_parallel(net, device, twice=False):
    """`net` under DistributedDataParallel with batch statistics of the global batch: the number of
    processes does not change the result. twice: its gradients are differentiated again."""
    if world_size() == 1:
        return net
    if device.type == "cuda" and not twice:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
    parameters = inspect.signature(DistributedDataParallel).parameters  # renamed in torch 2.14
    sync = next(p for p in ("forward_sync_buffers", "broadcast_buffers") if p in parameters)
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(net, device_ids=ids, **{sync: False})


# ---- Options ------------------------------------------------------------------------------------


def between(low, high, kind=float):
    """An argparse type: a number of `kind` in [low, high]."""
    limits = f"at least {low}" if high == math.inf else f"between {low} and {high}"

    def number(text):
        with contextlib.suppress(ValueError, OverflowError):
            if low <= (value := kind(text)) <= high and not math.isinf(value):
                return value
        raise argparse.ArgumentTypeError(f"{text}: must be a number, {limits}")
    return number


def at_least(low, kind=int):
    """An argparse type: a finite number of `kind`, not below `low`."""
    return between(low, math.inf, kind)


class Parser(argparse.ArgumentParser):
    """The command line that all scripts share; errors are a UserError. Options that only evaluation
    reads stand in the group "evaluation", those that say where and how fast in "run"; all others
    identify what is trained. `presets`: {"": for all data sets, name: what differs there}."""

    def __init__(self, doc, presets, default):
        super().__init__(prog=Path(sys.argv[0]).name, description=doc.split("\n")[0],
                         epilog="Details, equations, differences: the top of the script.",
                         allow_abbrev=False, add_help=False)
        self.presets, self.default, self.groups = presets, default, {}
        for title in ("data", "network", "training", "method", "evaluation", "run"):
            self.group(title)
        self.add_argument("-h", "--help", action="store_true", help="with this data set's values")
        add, flag = self.group("data"), argparse.BooleanOptionalAction
        add("--dataset", default=default, metavar="NAME", help="alone it is the paper's setting: "
            f"{', '.join(filter(None, presets))}; or folder:PATH with {{train,test}}/<class>/*")
        add("--preset", metavar="NAME", help="another's settings (folder:PATH takes cifar10's)")
        add("--image-size", type=between(1, 4096, int), help="side of images read from files")
        self.group("network")("--width", type=between(0.01, 64), default=1.0,
                              help="multiplies the channels; 1 is the paper's network")
        add = self.group("training")
        add("--seed", type=between(0, 2**31 - 1, int), default=1, help="of initialisation, split, "
            "order, augmentation")
        add("--epochs", "-e", type=at_least(0), help="passes over the training set")
        add("--batch-size", "-b", type=at_least(1), help="GLOBAL, whatever the number of processes")
        add("--lr", type=at_least(0, float), help="initial; keep it if the number of GPUs changes")
        add("--amp", choices=["off", "bf16"], default="off", help="bf16: autocast the network")
        add("--limit-steps", type=at_least(1), help="end each epoch after so many steps")
        add = self.group("evaluation")
        add("--runs", type=at_least(1), default=1, help="with the next seeds: mean, standard error")
        add("--predict", metavar="SET", help="write predictions.csv: any set, folder:PATH or .npz")
        add = self.group("run")
        add("--data-dir", default="data", help="where data sets lie or are downloaded to")
        add("--out-dir", default="runs", help="run directories are made in OUT_DIR/<script>/")
        add("--name", help="of the run directory (made from the options)")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
        add("--workers", type=between(0, 256, int), default=4, help="processes that decode images")
        add("--compile", action=flag, default=False, help="torch.compile the network")
        add("--eval", action="store_true", help="evaluate the finished run of these options")
        add("--fresh", action="store_true", help="start anew even if there is a checkpoint")
        add("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")

    def group(self, title):
        """The `add_argument` of a group."""
        group = self.groups.get(title) or self.add_argument_group(title)
        return self.groups.setdefault(title, group).add_argument

    def error(self, message):
        raise UserError(message.replace("argument ", "", 1))

    def parse(self, argv=None, **defaults):
        """Options from the command line, else `defaults`, else the data set's preset; the device
        is started and what differs from the script's own defaults is printed."""
        argv = sys.argv[1:] if argv is None else argv
        known = self.parse_known_args(argv)[0]
        preset = known.preset or re.sub("^folder:.*", "cifar10", known.dataset)
        if preset not in self.presets or not preset:
            self.error(f"{'--preset' if known.preset else '--dataset'} {preset}: choose from "
                       f"{', '.join(filter(None, self.presets))}, or --dataset folder:PATH")
        own = {**{action.dest: action.default for action in self._actions}, **self.presets[""]}
        standard = {**own, **self.presets[self.default]}
        self.set_defaults(**{**own, **self.presets[preset], **defaults})
        for action in self._actions:
            if isinstance(action, argparse.BooleanOptionalAction):
                action.help += " (on)" if action.default else " (off)"
            elif action.nargs != 0 and action.default not in (None, []):
                action.help += " (%(default)s)"
        if known.help:
            self.print_help()
            self.exit()
        args = self.parse_args(argv)
        marks = argparse.Namespace(**dict.fromkeys(vars(args), self))  # overwritten where given
        given = self.parse_args(argv, marks)
        args.explicit = tuple(k for k, v in vars(given).items() if v is not self)
        args.groups = {action.dest: title for title, group in self.groups.items()
                       for action in group._group_actions}
        if args.eval and args.fresh:
            self.error("--eval reads a finished run, --fresh starts anew: give one of them")
        args.device = start(args.device)
        if args.batch_size < world_size():
            self.error(f"--batch-size {args.batch_size} is global and smaller than the number of "
                       f"processes ({world_size()})")
        shown = [f"{k} {v}" for k, v in plain(options(args)).items()
                 if k not in ("device", "preset") and v != plain(standard[k])]
        preset = [f"preset {preset}"] if preset != known.dataset else []
        say(f"{self.prog}: {', '.join([*preset, *shown]) or 'defaults'}; {args.device.type}, "
            f"{world_size()} process(es) of {torch.get_num_threads()} threads")
        return args


def options(args, without=()) -> dict:
    """All options of parsed arguments, but those of the groups `without`."""
    return {k: v for k, v in vars(args).items() if args.groups.get(k, "run") not in without
            and k not in ("explicit", "groups", "help")}


def with_options(args, **changes):
    """A copy of parsed arguments with some changed."""
    return argparse.Namespace(**{**vars(args), **changes})


# ---- Runs ---------------------------------------------------------------------------------------

FREE_IN_EVAL = ("batch_size", "amp", "augment", "limit_steps")  # --eval may have them otherwise
_locks = {}


def say(text):
    """Print on the main process."""
    if is_main():
        print(text, flush=True)


def one_line(error) -> str:
    """An exception's message on one line, shortened; its type where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def plain(value):
    """JSON's types from dicts, lists, tensors, arrays, paths; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def write(path, content):
    """Bytes or text into a temporary file, then in the place of `path`: whole, or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path} ({error.strerror}); make room, or choose another "
                        "place") from None


def check_writable(path):
    """Refuse a path that could not be written, before the work whose result it shall hold."""
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {path}: give a file name in a folder that exists and that "
                        "you may write to")


def to_bytes(state) -> bytes:
    """A checkpoint (tensors and plain Python) as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_checkpoint(path) -> dict:
    """Any file of tensors and plain Python, on the CPU; read by the main process alone. Each byte
    is checked (the zip's checksums), nothing is unpickled."""
    try:
        content = Path(path).read_bytes() if is_main() else None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    content = broadcast(content)
    try:
        damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()
        state = None if damaged else torch.load(io.BytesIO(content), "cpu", weights_only=True)
    except Exception:  # many kinds; torch's own text proposes to switch the safety off
        state = None
    if not isinstance(state, dict):
        raise UserError(f"{path} is damaged, or is not a file of plain tensors; delete it to start "
                        "anew, or give another")
    return state


def load_arrays(path, names) -> dict:
    """The arrays `names` of an .npz file; UserError if it is absent, damaged, or lacks one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except KeyError:
        lacking = min({*names} - {*file.files})
        raise UserError(f"{path} has no array {lacking!r}; it needs {', '.join(names)}") from None
    except Exception:  # numpy raises many kinds for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None


def save_arrays(path, **arrays):
    """Tensors or arrays as an .npz file, atomically."""
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.asarray(array) for name, array in arrays.items()})
    write(path, buffer.getvalue())


def all_finite(value) -> bool:
    """Whether every tensor in nested dicts and lists is free of NaN and infinity."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(all_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def check_same(there, here, path, evaluating):
    """Refuse what was made with other options."""
    free = FREE_IN_EVAL if evaluating else ()
    differ = [f"{k} {there.get(k)} there, {here.get(k)} now" for k in {**there, **here}
              if there.get(k) != here.get(k) and k not in free]
    if differ:
        raise UserError(f"{path} was made with other options: {'; '.join(differ)}; use another "
                        "--name, or --fresh to start anew")


def claim(folder, config, args):
    """Make a run directory, keep other processes out of it until this one ends, and mark it with
    the options that it belongs to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locks.get(folder.resolve()) or open(folder / ".lock", "a")
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left_over in folder.glob(".*.tmp"):
            left_over.unlink()
    except BlockingIOError:
        raise UserError(f"{folder} is in use by another process; wait for it, or choose another "
                        "--name") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); choose another --out-dir "
                        "or --name") from None
    _locks[folder.resolve()] = file
    path = folder / "options.json"
    if args.fresh or not path.exists():
        return write(path, json.dumps(config, indent=1))
    try:
        there = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} is damaged; --fresh starts anew") from None
    check_same(there, config, folder, args.eval)


class Run:
    """A run directory: options.json, checkpoints, their logs, results.json and .csv, pictures. It
    belongs to one command at a time and to one set of options. Only the main process reads and
    writes. A piece (a checkpoint, a fit) is stored with the options that identify it."""

    def __init__(self, args, script, name):
        name = args.name or re.sub(r"[^\w.+-]+", "_", name)
        if not re.fullmatch(r"[^/\\\0]{1,200}", name) or name in (".", ".."):
            raise UserError(f"--name {name!r}: give one name, not a path")
        self.args, self.script, self.dir = args, script, Path(args.out_dir, script, name)
        self.config = plain(options(args, without=("evaluation", "run")))
        self.seconds, self.history, self.written, self.start = {}, [], set(), time.perf_counter()
        if args.eval and args.epochs and not broadcast(self.dir.is_dir()):
            raise UserError(f"no run in {self.dir}; train first (the same command without --eval)")
        if is_main():
            claim(self.dir, self.config, args)
        say(f"run directory {self.dir}")

    def load(self, name, config=None) -> dict | None:
        """The piece `name` that an earlier start of the same options saved, or None."""
        path = self.dir / f"{name}.pt"
        usable = path.exists() and (name in self.written or not self.args.fresh)
        if not broadcast(usable):
            return None
        state, here = load_checkpoint(path), plain(self.config if config is None else config)
        check_same(state.get("config", {}), here, path, self.args.eval)
        return state

    def save(self, name, config=None, **state):
        """Save a piece: tensors and plain Python, identified by `config`."""
        self.written.add(name)
        if is_main():
            state["config"] = plain(self.config if config is None else config)
            write(self.dir / f"{name}.pt", to_bytes(state))

    def epochs(self, total, name="last", config=None, **parts):
        """Yield the epochs that are left, exactly: `parts` (what has a state_dict) are read before
        the first of them, and saved after each. The loop's body calls `log`."""
        first, self.history, path = 0, [], self.dir / f"{name}.pt"
        if state := self.load(name, config):
            try:
                first, self.history = state["epoch"], state["history"]
                for key, part in parts.items():
                    part.load_state_dict(state[key])
            except Exception as error:  # a part is missing, or has other names and shapes
                raise UserError(f"{path} does not fit ({one_line(error)}); --fresh starts anew"
                                ) from None
        if self.args.eval and first < total:
            raise UserError(f"{path} has {first} of {total} epochs; first finish it (the same "
                            "command without --eval)")
        for epoch in range(first, total):
            with self.clock("train"):
                start = time.perf_counter()
                yield epoch
                seconds = time.perf_counter() - start
            row = {"epoch": epoch + 1, **self.history.pop(), "seconds": seconds}
            row["examples_per_s"] = row.pop("examples", 0) / seconds
            self.history.append(row)
            state = {key: part.state_dict() for key, part in parts.items()}
            if not all_finite(state):
                raise UserError(f"weights or statistics are not finite after epoch {epoch + 1}; "
                                f"the checkpoint before it is kept. Lower --lr")
            self.save(name, config, epoch=epoch + 1, history=self.history, **state)
            if is_main():
                lines = "".join(json.dumps(plain(row)) + "\n" for row in self.history)
                write(self.dir / f"{name}.jsonl", lines)
            shown = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "epoch")
            say(f"{name} {epoch + 1}/{total}  {shown}  {seconds * (total - epoch - 1):.0f} s left")

    def log(self, loss, **row):
        """Note an epoch: numbers or tensors, `examples` of them; a loss not finite ends the run."""
        row = {k: float(torch.as_tensor(v).detach()) for k, v in {"loss": loss, **row}.items()}
        if not math.isfinite(row["loss"]):
            raise UserError(f"loss {row['loss']} in epoch {len(self.history) + 1}; the checkpoint "
                            "before it is kept. Lower --lr")
        self.history.append(row)

    def steps(self, loader, epoch):
        """(step, batch) of an epoch, at most --limit-steps; a progress bar on a terminal."""
        steps, batches = min(len(loader), self.args.limit_steps or len(loader)), loader.epoch(epoch)
        if is_main() and sys.stderr.isatty():
            from tqdm import tqdm
            batches = tqdm(batches, f"epoch {epoch + 1}", steps, leave=False)
        return zip(range(steps), batches)

    @contextlib.contextmanager
    def clock(self, part):
        """Add the wall seconds of the block to `self.seconds[part]`."""
        start = time.perf_counter()
        yield
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[part] = self.seconds.get(part, 0) + time.perf_counter() - start

    def report(self, rows, metrics=None, shown=None, **extra):
        """Write rows {"method", "seed", "set", "against" (optional), "n", metric: value, ...} as
        results.json and results.csv; print the table of the columns `metrics` (all) of the rows
        `shown` (all), mean +- standard error over seeds. Returns the rows."""
        rows = plain(rows)
        if not is_main():
            return rows
        self.seconds["total"] = time.perf_counter() - self.start
        content = plain({"script": self.script, "config": options(self.args), "seconds":
                         self.seconds, "environment": environment(self.args.device), **extra})
        write(self.dir / "results.json", json.dumps({**content, "rows": rows}, indent=1))
        header = list(dict.fromkeys(key for row in rows for key in row))
        write(self.dir / "results.csv", to_csv(header, [[r.get(k) for k in header] for r in rows]))
        print(f"\n{tables(plain(shown or rows), metrics)}\n", flush=True)
        return rows


def environment(device) -> dict:
    """What a reader needs to repeat a number: commit, versions, device, threads, processes; and the
    peak memory in GB: the allocator's on a GPU, the resident set elsewhere, if known."""
    commit, folder = "", Path(__file__).resolve().parent
    command = ["git", "-C", folder, "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # no git
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device)
    else:
        name, unit = platform.machine(), 1 if sys.platform == "darwin" else 1024
        peak = resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"commit": commit or None, "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "processes": world_size(),
            "threads": torch.get_num_threads(), "device": name,
            "peak_memory_gb": peak and peak / 1e9}


def device_memory(device) -> int | None:
    """Bytes of memory of a device, where the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    with contextlib.suppress(AttributeError, ValueError):  # Windows has neither
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def write_predictions(path, dataset, log_probs, **columns):
    """predictions.csv, a line an example: index or file, label if known, predicted class,
    confidence, total, aleatoric and epistemic uncertainty (nats), and the method's own `columns`
    [N], which may replace these. dataset: a set of data.py, or None where there are neither files
    nor labels; log_probs [N, K], or [M, N, K] of an ensemble."""
    files, labels = getattr(dataset, "files", None), getattr(dataset, "labels", None)
    log_probs = torch.as_tensor(log_probs).double()
    log_probs = log_probs if log_probs.ndim == 3 else log_probs[None]
    confidence, predicted = log_probs.exp().mean(0).max(1)
    parts = ensemble_uncertainty(log_probs)
    table = {"file" if files else "index": files or range(len(predicted))}
    if labels is not None and bool((labels >= 0).any()):  # -1 where a label is not known
        table["label"] = labels
    table |= {"predicted": predicted, "confidence": confidence, "total": parts["total"],
              "aleatoric": parts["aleatoric"], "epistemic": parts["epistemic"], **columns}
    cells = [c.tolist() if hasattr(c, "tolist") else list(c) for c in table.values()]
    write(path, to_csv(list(table), zip(*cells)))
    say(f"predictions of {len(predicted)} examples in {path}")


# ---- Tables -------------------------------------------------------------------------------------

KEYS = ("run", "method", "set", "against", "n")  # of a row; the seed aside, all else is a metric


def pool(rows, metrics=None) -> tuple[list, list]:
    """(header, lines) of a table: mean +- standard error over the seeds of the other keys."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row.get(k) for k in KEYS), {})[row.get("seed")] = row
    found = dict.fromkeys(k for row in rows for k in row if k not in (*KEYS, "seed"))
    metrics = [m for m in metrics or found if m in found]
    keys = [k for k in KEYS if any(row.get(k) is not None for row in rows)]
    lines = []
    for group, by_seed in groups.items():
        line = [value for k, value in zip(KEYS, group) if k in keys] + [len(by_seed)]
        for metric in metrics:
            values = [row[metric] for row in by_seed.values() if row.get(metric) is not None]
            whole = all(isinstance(value, (int, float)) for value in values)
            line.append((float(np.mean(values)), standard_error(values)) if values and whole
                        else (values[0] if values else None))
        lines.append(line)
    return [*keys, "seeds", *metrics], lines


def tables(rows, metrics=None, form="text") -> str:
    """Predictions by set, then comparisons of a set against another, each with its own columns."""
    parts = [r for r in rows if not r.get("against")], [r for r in rows if r.get("against")]
    return "\n\n".join(format_table(*pool(part, metrics), form) for part in parts if part)


def to_csv(header, lines) -> str:
    """CSV text; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def format_table(header, lines, form="text") -> str:
    """A table as text, markdown, latex or csv; cells (mean, standard error), strings or None."""
    if form == "csv":  # a column of its own for each standard error
        pairs = {i for line in lines for i, cell in enumerate(line) if isinstance(cell, tuple)}
        split = [[part for i, cell in enumerate(line) for part in (
            cell or (None, None) if i in pairs else (cell,))] for line in lines]
        names = [n for i, h in enumerate(header) for n in ((h, f"{h}_se") if i in pairs else (h,))]
        return to_csv(names, split).rstrip()
    sign = " $\\pm$ " if form == "latex" else " ± "

    def text(cell):
        if isinstance(cell, tuple):
            return sign.join(f"{v:.4f}" if abs(v) < 1000 else f"{v:.5g}"
                             for v in cell if v is not None)
        return "" if cell is None else str(cell)

    cells = [[text(cell) for cell in line] for line in [header, *lines]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    start, middle, end = {"text": ("", "  ", ""), "markdown": ("| ", " | ", " |"),
                          "latex": ("", " & ", r" \\")}[form]
    rows = [start + middle.join(c.ljust(w) for c, w in zip(line, widths)) + end for line in cells]
    if form == "latex":
        columns = r"\begin{tabular}{" + "l" * len(header) + "}"
        rows = [row.replace("_", r"\_") for row in rows]
        return "\n".join([columns, rows[0], r"\hline", *rows[1:], r"\end{tabular}"])
    rule = "-" * len(rows[0]) if form == "text" else f"| {' | '.join('-' * w for w in widths)} |"
    return "\n".join(row.rstrip() for row in [rows[0], rule, *rows[1:]])


def table(argv=None):
    """`python common.py table RUN ...`: one table of the results of any runs."""
    parser = argparse.ArgumentParser(prog="common.py table", description=table.__doc__)
    parser.add_argument("runs", nargs="+", help="run directories, or results.json files")
    parser.add_argument("--metrics", nargs="+", help="columns (default: all)")
    parser.add_argument("--sets", nargs="+", help="rows of these sets alone")
    parser.add_argument("--format", choices=["text", "markdown", "latex", "csv"], default="text")
    args = parser.parse_args(argv)
    contents, without = [], []
    for path in map(Path, args.runs):
        try:
            path = path / "results.json" if path.is_dir() else path
            content = json.loads(path.read_text())
            contents.append(({"script": content["script"], **content["config"]}, content["rows"]))
        except (OSError, ValueError, KeyError, TypeError):  # unfinished, or a cache beside the runs
            without.append(f"{path} is not the results of a run (finish it first)")
    if not contents:
        raise UserError(without[0])
    for line in without:
        print(f"left out: {line}", file=sys.stderr)
    aside = {"seed", "runs", "name", "out_dir", "data_dir", "device", "workers", "compile", "eval",
             "fresh", "plot", "predict"}
    scripts = {config["script"] for config, _ in contents}
    values = lambda k, script: {json.dumps(config.get(k)) for config, _ in contents
                                if k == "script" or config["script"] == script}
    varied = [k for k in dict.fromkeys(k for config, _ in contents for k in config)
              if k not in aside and any(len(values(k, script)) > 1 for script in scripts)]
    rows = [{**row, "run": " ".join(f"{k}={config[k]}" for k in varied if k in config) or None}
            for config, part in contents for row in part
            if not args.sets or row.get("set") in args.sets]
    for flag, asked, known in (("sets", args.sets, {row.get("set") for row in rows}),
                               ("metrics", args.metrics, {k for row in rows for k in row})):
        if unknown := {*(asked or ())} - known:
            raise UserError(f"--{flag} {min(unknown)}: no row has it")
    print(tables(rows, args.metrics, args.format))


# ---- Pictures, and the start of a script --------------------------------------------------------


def pyplot():
    """matplotlib.pyplot for files, or None after one line that says how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError:
        say("no pictures: matplotlib is not installed (pip install matplotlib)")
        return None
    pyplot.switch_backend("Agg")
    return pyplot


def save_figure(plt, figure, path):
    """Write a figure and free it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    plt.close(figure)
    write(path, buffer.getvalue())


def launch(main):
    """Run main(); a UserError is one line and exit status 2, a signal one line and 128 + it."""
    own = os.getpid()

    def stop(signum, _):  # at once: what the last epoch saved is whole
        if is_main() and os.getpid() == own:  # the processes that decode images say nothing
            print(f"{Path(sys.argv[0]).name}: stopped by {signal.Signals(signum).name}; the same "
                  "command goes on after the last whole epoch", file=sys.stderr, flush=True)
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    try:
        main()
    except UserError as error:
        message = f"{Path(sys.argv[0]).name}: error: {' '.join(str(error).split())}"
        sys.stdout.flush()
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun prints this file last; it kills the processes that sleep, which say nothing
            time.sleep(0 if int(os.environ["RANK"]) == 0 else 10)
            Path(report).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
            os._exit(2)
        print(message, file=sys.stderr, flush=True)
        sys.exit(2)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] != ["table"]:
        sys.exit("usage: python common.py table RUN ... [--metrics ...] [--format ...]")
    launch(lambda: table(sys.argv[2:]))
