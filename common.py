"""What the five scripts share: metrics, processes, networks, options and run directories.

  Metrics    accuracy, likelihood, calibration, ensemble decomposition, out-of-distribution (OOD)
             detection, rejection, temperature scaling, regression by mixtures of Gaussians
  Processes  one process, or those that torchrun started: seeds, gathering, batch norm
  Networks   pretrained networks of torchvision, and networks of the user
  Options    the command line that all scripts share
  Files      checkpoints that are complete, finite and safe to read
  Runs       the run directory: checkpoints, cached results, reports
  Tables     mean and standard error over seeds; predictions as CSV

No loss, no training loop and nothing of one paper is here: those are in the scripts. Run as a
program, this file prints a table of finished runs:

  python common.py table runs/ddu/* [--metrics accuracy nll] [--sets glyphs] [--side-by-side]
"""

import argparse
import contextlib
import csv
import datetime
import errno
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import operator
import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models
from torchvision.transforms import v2
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows, where run directories are not locked
    fcntl = None


class UserError(ValueError):
    """An error that the user can fix; `launch` prints it as one line and exits with status 2."""


# ---- Metrics ------------------------------------------------------------------------------------
# N examples, K classes, M ensemble members, S samples of a posterior.
#   probs [N, K]      rows in [0, 1] that sum to 1; log_probs [N, K] are their logarithms
#   labels [N]        integers in 0..K-1
#   scores [N]        may be infinite; masks such as `positive` [N] are bool, or 0 and 1
# Every metric accepts lists, arrays and tensors of any float type, and returns a Python float that
# is computed in float64: entropies and likelihoods in nats, errors and areas as fractions. Wrong
# shapes, NaN, labels out of range and rows that do not sum to 1 raise a ValueError of one line.

TOLERANCE = 1e-3  # of the sum of a row of probabilities; float32 is off by about 1e-6


def _require(condition, message):
    if not condition:
        raise ValueError(message)


def _tensor(x, name, dims):
    """A detached float32 or float64 tensor of `dims` dimensions, not empty and without NaN."""
    if isinstance(x, (list, tuple)):
        x = np.asarray(x)
    x = torch.as_tensor(x).detach()
    if x.device.type == "mps":
        x = x.cpu()  # MPS has no float64
    fits = x.ndim == dims and x.numel() > 0
    _require(fits, f"{name}: expected {dims} dimensions, not empty; got {list(x.shape)}")
    _require(not x.isnan().any(), f"{name}: contains NaN")
    if x.is_floating_point() and x.element_size() < 8:
        return x.float()
    return x.double()


def _labels(labels, scores):
    """Labels as int64 [N], checked against the rows and classes of `scores` [..., N, K]."""
    number, classes = scores.shape[-2:]
    labels = torch.as_tensor(labels).to(scores.device)
    fits = labels.shape == (number,) and not labels.is_floating_point()
    _require(fits, f"labels: expected {number} integers, got {labels.dtype} {list(labels.shape)}")
    low, high = labels.long().aminmax()
    _require(0 <= low and high < classes, f"labels: expected 0..{classes - 1}, got {low}..{high}")
    return labels.long()


def _check_probs(probs, name="probs"):
    """Refuse rows that are not probabilities, such as logits."""
    low, high = probs.sum(-1).aminmax()
    fits = probs.min() >= 0 and low >= 1 - TOLERANCE and high <= 1 + TOLERANCE
    _require(fits, f"{name}: expected rows >= 0 that sum to 1 (a softmax in float32), got sums "
                   f"from {low:.5g} to {high:.5g}")


def _vector(x, name):
    return _tensor(x, name, 1).cpu().numpy()


def _mask(mask, values, name):
    mask = _vector(mask, name)
    fits = len(mask) == len(values) and np.isin(mask, (0, 1)).all()
    _require(fits, f"{name}: expected {len(values)} values, bool or 0 and 1")
    return mask == 1


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of rows whose largest score is the label's; of equal scores the first one counts."""
    return top_k_accuracy(probs, labels, 1)


def top_k_accuracy(probs: ArrayLike, labels: ArrayLike, k: int) -> float:
    """Fraction of rows whose label is among the k largest scores.

    The scores [N, K] may be of any kind (logits); equal scores are ranked by class index.
    """
    scores = _tensor(probs, "probs", 2)
    label = _labels(labels, scores)[:, None]                           # [N, 1]
    classes = torch.arange(scores.shape[1], device=scores.device)      # [K]
    label_score = scores.gather(1, label)                              # [N, 1]
    is_ahead = (scores > label_score) | ((scores == label_score) & (classes < label))
    return (is_ahead.sum(1) < k).double().mean().item()


def nll(log_probs: ArrayLike, labels: ArrayLike) -> float:
    """Negative log-likelihood -(1/N) sum_n log p_n[y_n], in nats."""
    log_probs = _tensor(log_probs, "log_probs", 2)
    return 0.0 - lpd(log_probs[None], labels)


def lpd(log_probs: ArrayLike, labels: ArrayLike) -> float:
    """Log predictive density (1/N) sum_n log (1/S) sum_s p_s(y_n) of an equal mixture, in nats.

    log_probs [S, N, K]; finite where the mean probability underflows.
    """
    log_probs = _tensor(log_probs, "log_probs", 3)
    labels = _labels(labels, log_probs)
    for sample in log_probs:
        _check_probs(sample.exp(), "exp(log_probs)")
    index = labels.expand(len(log_probs), -1)[:, :, None]              # [S, N, 1]
    label_log_probs = log_probs.gather(2, index).squeeze(2).double()   # [S, N]
    mixture = label_log_probs.logsumexp(0) - math.log(len(log_probs))  # [N]
    return mixture.mean().item()


def brier(probs: ArrayLike, labels: ArrayLike) -> float:
    """Brier score (1/N) sum_n sum_k (p_nk - [k = y_n])^2, 0..2: a sum over classes, not a mean."""
    probs = _tensor(probs, "probs", 2)
    _check_probs(probs)
    target = nn.functional.one_hot(_labels(labels, probs), probs.shape[1])  # [N, K]
    return (probs.double() - target).square().sum(1).mean().item()


def ece(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error sum_b n_b / N |accuracy_b - confidence_b|.

    The bins (b / bins, (b + 1) / bins] have equal widths. Edges are compared in the precision of
    `probs`, so that 0.2 is in bin 2 of 15 in float32 and in float64.
    """
    probs = _tensor(probs, "probs", 2)
    _check_probs(probs)
    confidence, predicted = probs.max(1)
    confidence = confidence.clamp(max=1).cpu().numpy()  # rows sum to 1 within the tolerance
    correct = (predicted == _labels(labels, probs)).cpu().numpy()
    inner_edges = (np.arange(1, bins) / bins).astype(confidence.dtype)
    bin_index = np.searchsorted(inner_edges, confidence, side="left")  # [N]
    counts = np.bincount(bin_index, minlength=bins)                    # [bins]
    divisor = np.maximum(counts, 1)                                    # empty bins: 0 / 1
    mean_confidence = np.bincount(bin_index, confidence, bins) / divisor
    accuracy_of_bin = np.bincount(bin_index, correct, bins) / divisor
    gaps = np.abs(accuracy_of_bin - mean_confidence)
    return float((gaps * counts).sum() / len(probs))


def prediction_metrics(log_probs: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Accuracy, likelihood and calibration of log_probs [N, K]: what every table begins with."""
    log_probs = _tensor(log_probs, "log_probs", 2)
    probs = log_probs.exp()
    return {"accuracy": accuracy(probs, labels), "nll": nll(log_probs, labels),
            "brier": brier(probs, labels), "ece15": ece(probs, labels)}


def entropy(probs: ArrayLike) -> Tensor:
    """Entropy -sum_k p_k log p_k of probs [N, K]: [N] in 0..log K nats, float64; 0 log 0 is 0."""
    probs = _tensor(probs, "probs", 2).double()
    _check_probs(probs)
    return torch.special.entr(probs).sum(-1)


def ensemble_uncertainty(log_probs: ArrayLike) -> dict[str, Tensor]:
    """Uncertainties of an ensemble, {name: [N]}, from the log probabilities [M, N, K] of members.

    With the mean prediction pi = (1/M) sum_m p_m, in nats, float64, never below 0:
      total      H(pi)
      aleatoric  (1/M) sum_m H(p_m)
      epistemic  total - aleatoric, the mutual information
    """
    log_probs = _tensor(log_probs, "log_probs", 3)
    blocks = []
    # In blocks of rows, because ten members of ImageNet would take 4 GB a tensor.
    rows = max(1, 2**22 // log_probs[:, 0].numel())
    for block in log_probs.split(rows, 1):
        log_p = block.double()                                         # [M, n, K]
        p = log_p.exp()
        _check_probs(p, "exp(log_probs)")
        pi = (log_p.logsumexp(0) - math.log(len(log_p))).exp()         # [n, K]
        total = torch.special.entr(pi).sum(-1)                         # [n]  H(pi)
        aleatoric = torch.special.entr(p).sum(-1).mean(0)              # [n]  mean_m H(p_m)
        blocks.append(torch.stack([total, aleatoric, total - aleatoric]))
    # Rounding may leave values just below 0.
    values = torch.cat(blocks, 1).clamp_min(0)                         # [3, N]
    return dict(zip(("total", "aleatoric", "epistemic"), values))


def _threshold_counts(scores, positive):
    """Positives and negatives with score >= t, at each distinct score t from the highest down."""
    scores = _vector(scores, "scores")
    positive = _mask(positive, scores, "positive")
    _require(positive.any() and not positive.all(), "positive: expected both classes, got only one")
    # np.unique sorts in ascending order, hence the minus.
    distinct, group = np.unique(-scores, return_inverse=True)
    true_positives = np.bincount(group[positive], minlength=len(distinct)).cumsum()
    false_positives = np.bincount(group[~positive], minlength=len(distinct)).cumsum()
    return true_positives, false_positives


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Area under the ROC curve: P(a positive scores higher than a negative) + P(equal) / 2."""
    tp, fp = _threshold_counts(scores, positive)
    tp_before = np.append(0, tp[:-1])
    new_fp = np.diff(fp, prepend=0)
    twice_area = new_fp @ (tp + tp_before)  # integers: exact
    return float(twice_area / (2 * tp[-1] * fp[-1]))


def average_precision(scores: ArrayLike, positive: ArrayLike) -> float:
    """Area under the steps of the precision-recall curve: sum_t (R_t - R_{t-1}) P_t."""
    tp, fp = _threshold_counts(scores, positive)
    precision = tp / (tp + fp)
    new_tp = np.diff(tp, prepend=0)  # proportional to R_t - R_{t-1}
    return float(new_tp @ precision / tp[-1])


def fpr_at_tpr(scores: ArrayLike, positive: ArrayLike, tpr: float = 0.95) -> float:
    """Smallest false positive rate of the thresholds with a true positive rate of at least tpr."""
    tp, fp = _threshold_counts(scores, positive)
    # Both rates grow as the threshold falls, so the first one that accepts enough is the best.
    first = np.argmax(tp / tp[-1] >= tpr)
    return float(fp[first] / fp[-1])


def ood_metrics(id_scores: ArrayLike, ood_scores: ArrayLike, *,
                larger_means: str) -> dict[str, float]:
    """How well a score separates in-distribution [N] from out-of-distribution [L] examples.

    larger_means: "ood" if large scores mean OOD (an uncertainty), "id" if they mean ID (a density).
    aupr_in and aupr_out are average precisions with ID and with OOD positive; fpr95 is the fraction
    of OOD accepted when 95 % of ID is.
    """
    _require(larger_means in ("ood", "id"), f"larger_means: expected ood or id, got {larger_means}")
    id_scores = _vector(id_scores, "id_scores")
    ood_scores = _vector(ood_scores, "ood_scores")
    # Equal scores must stay equal where only one side was rounded to float32.
    precision = min(id_scores.dtype, ood_scores.dtype)
    confidence = np.concatenate([id_scores.astype(precision), ood_scores.astype(precision)])
    if larger_means == "ood":
        confidence = -confidence
    is_id = np.arange(len(confidence)) < len(id_scores)
    return {"auroc": auroc(confidence, is_id),
            "aupr_in": average_precision(confidence, is_id),
            "aupr_out": average_precision(-confidence, ~is_id),
            "fpr95": fpr_at_tpr(confidence, is_id)}


def detection_metrics(inside: dict[str, Tensor], outside: dict[str, Tensor],
                      larger_means: dict[str, str]) -> dict[str, float]:
    """`ood_metrics` of several scores {score: [N]}, as {"auroc_<score>": ..., ...}.

    larger_means: {score: "ood" or "id"} for at least the scores of `inside`.
    """
    metrics = {}
    for score in inside:
        of_score = ood_metrics(inside[score], outside[score], larger_means=larger_means[score])
        for metric, value in of_score.items():
            metrics[f"{metric}_{score}"] = value
    return metrics


def rejection_curve(uncertainty: ArrayLike,
                    correct: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Errors that remain when the most uncertain predictions are replaced by the true label.

    Returns the rejected fraction 0, 1/N, ..., 1 and the remaining errors over N, both [N + 1]. Ties
    are rejected in random order: the curve is the expectation, a straight line across a tie.
    """
    uncertainty = _vector(uncertainty, "uncertainty")
    wrong = ~_mask(correct, uncertainty, "correct")
    # Equal uncertainties share their mean number of errors.
    _, group, size = np.unique(uncertainty, return_inverse=True, return_counts=True)
    wrong_in_order = np.repeat(np.bincount(group, wrong) / size, size)
    errors = np.append(0.0, np.cumsum(wrong_in_order))  # among the k most certain, k = 0..N
    rejected = np.arange(len(errors)) / len(wrong)
    return rejected, errors[::-1] / len(wrong)


def prediction_rejection_ratio(uncertainty: ArrayLike, correct: ArrayLike) -> float | None:
    """Malinin's (A_random - A) / (A_random - A_oracle), -1..1, with areas under `rejection_curve`.

    It equals 2 auroc(uncertainty, not correct) - 1. None if all or no predictions are correct.
    """
    uncertainty = _vector(uncertainty, "uncertainty")
    wrong = ~_mask(correct, uncertainty, "correct")
    if wrong.all() or not wrong.any():
        return None
    return 2 * auroc(uncertainty, wrong) - 1


TEMPERATURES = (0.1, 1e3)  # the limits of `fit_temperature`; published code of DDU: 0.1 and 10


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The temperature T that minimises the NLL of softmax(z_n / T), for logits z [N, K].

    The NLL is convex in 1 / T: T is the only root of its slope, by Brent's method on log T.
    It is 1 if no T makes a difference (constant rows), and limited to TEMPERATURES, with a warning
    where predictions are worse than guessing. If all predictions are correct, the root is 0,
    however few they are. A T below 1 is therefore limited, with a warning, to a mean confidence of
    1 - 1 / (N + 2), the accuracy that N correct predictions of N suggest by Laplace's rule of
    succession.
    """
    logits = _tensor(logits, "logits", 2)
    labels = _labels(labels, logits)
    _require(logits.isfinite().all(), "logits: expected finite numbers")
    z = logits.double() - logits.double().gather(1, labels[:, None])   # [N, K]  z_k - z_y
    highest = 1 - 1 / (len(z) + 2)

    def slope(log_t):
        """d NLL / d (1 / T) = mean_n of the expectation of z_k - z_y under softmax(z / T)."""
        probs = (z / math.exp(log_t)).softmax(1)
        return (probs * z).sum(1).mean().item()

    def excess(log_t):
        """Mean confidence of softmax(z / T), minus the highest one."""
        return (z / math.exp(log_t)).softmax(1).amax(1).mean().item() - highest

    low, high = map(math.log, TEMPERATURES)
    if slope(high) > 0:  # the flatter, the better
        warnings.warn(f"the temperature is at its limit, {TEMPERATURES[1]:g}: on these {len(z)} "
                      "validation examples the predictions are worse than guessing", stacklevel=2)
        return TEMPERATURES[1]
    if slope(high) == 0:
        return 1.0
    optimum = brentq(slope, low, high, xtol=1e-9) if slope(low) > 0 else low
    if optimum >= 0 or excess(optimum) <= 0:
        return math.exp(optimum)
    limited = brentq(excess, optimum, 0.0, xtol=1e-9) if excess(0.0) < 0 else 0.0
    warnings.warn(f"the temperature is {math.exp(limited):.2g}, not {math.exp(optimum):.2g}: "
                  f"{len(z)} validation examples cannot justify a mean confidence above "
                  f"{highest:.3g}", stacklevel=2)
    return math.exp(limited)


def _mixture(means, variances):
    """Means and variances [S, N] in float64, checked."""
    means = _tensor(means, "means", 2).double()
    variances = _tensor(variances, "variances", 2).to(means)
    fits = means.shape == variances.shape and variances.min() > 0
    _require(fits, f"variances: expected {list(means.shape)}, all above 0")
    return means, variances


def _targets(targets, means):
    targets = _tensor(targets, "targets", 1).to(means)
    _require(len(targets) == means.shape[1], f"targets: expected {means.shape[1]} values")
    return targets


class Moments(NamedTuple):
    """Mean and variances [N] of equal mixtures of Gaussians; total = aleatoric + epistemic."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    total: Tensor


def gaussian_mixture_moments(means: ArrayLike, variances: ArrayLike) -> Moments:
    """Moments of equal mixtures of S Gaussians, from their means and variances [S, N].

    aleatoric = mean_s v_s, epistemic = mean_s (m_s - mean)^2 (divided by S, not S - 1).
    """
    means, variances = _mixture(means, variances)
    aleatoric = variances.mean(0)
    epistemic = means.var(0, correction=0)
    return Moments(means.mean(0), aleatoric, epistemic, aleatoric + epistemic)


def mixture_lpd(means: ArrayLike, variances: ArrayLike, targets: ArrayLike) -> float:
    """Log predictive density (1/N) sum_n log (1/S) sum_s N(y_n; m_sn, v_sn), in nats."""
    means, variances = _mixture(means, variances)
    targets = _targets(targets, means)
    distance = (targets - means).square() / variances                  # [S, N]
    log_density = -(distance + variances.log() + math.log(2 * math.pi)) / 2
    mixture = log_density.logsumexp(0) - math.log(len(means))          # [N]
    return mixture.mean().item()


def regression_metrics(means: ArrayLike, variances: ArrayLike,
                       targets: ArrayLike) -> dict[str, float]:
    """Scores of regression by equal mixtures [S, N]: lpd, mae, rmse and the calibration error ece.

    mae and rmse are those of the mixture's mean, in the unit of the targets.

    The calibration error ece, 0..0.5, is the mean over 20 levels .01, ..., .99 of |level - fraction
    of targets with F_n(y_n) <= level|, with the distribution function of the mixture
    F_n(y) = (1/S) sum_s Phi((y - m_sn) / sqrt(v_sn)).
    """
    means, variances = _mixture(means, variances)
    targets = _targets(targets, means)
    error = means.mean(0) - targets                                    # [N]
    z = (targets - means) / variances.sqrt()                           # [S, N]
    cdf = torch.special.ndtr(z).mean(0).cpu().numpy()                  # [N]
    levels = np.linspace(0.01, 0.99, 20)
    fraction_below = np.searchsorted(np.sort(cdf), levels, side="right") / len(cdf)
    return {"lpd": mixture_lpd(means, variances, targets),
            "mae": error.abs().mean().item(),
            "rmse": error.square().mean().sqrt().item(),
            "ece": float(np.abs(fraction_below - levels).mean())}


def standard_error(values: ArrayLike) -> float | None:
    """Unbiased standard deviation of values [n] / sqrt(n); None for n = 1."""
    values = _vector(values, "values").astype(np.float64)
    return float(stats.sem(values)) if len(values) > 1 else None


# ---- Processes ----------------------------------------------------------------------------------
# A script that is started by torchrun runs in several processes; the process of rank 0 is called
# the main process. Small Python values are sent by gloo, gradients on GPUs by nccl.


def start(device: str = "auto") -> torch.device:
    """Choose this process's device, and join the other processes if torchrun started several.

    device: "auto" (a GPU, or the CPU of a machine without one), "cpu", "cuda" or "mps".
    """
    processes = _number_in_environment("WORLD_SIZE", 1)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: not found on this machine; use --device cpu")
    if device == "cuda":
        # Without torchrun, LOCAL_RANK may be left over from something else.
        index = _number_in_environment("LOCAL_RANK", 0) if processes > 1 else 0
        count = torch.cuda.device_count()
        if index >= count:
            raise UserError(f"--device cuda: process {index} needs a GPU of its own, and this "
                            f"machine has {count}; start fewer processes, or use --device cpu")
        device = f"cuda:{index}"
        torch.cuda.set_device(device)
        # All batches but the last have one shape, so the search for fast kernels pays.
        torch.backends.cudnn.benchmark = True
    if processes > 1 and not dist.is_initialized():
        _join_processes("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    return torch.device(device)


def _number_in_environment(name, default):
    """An environment variable that torchrun sets to a whole number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} is {text!r}, not a number: start several "
                        "processes by torchrun, or unset it")
    return int(text)


def _join_processes(backend):
    """Make the process group of all processes that torchrun started."""
    _number_in_environment("LOCAL_RANK", 0)
    try:
        # Processes start within minutes of each other. Later, one may wait for another for a day,
        # for example while that one fits or plots.
        store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=10)))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=datetime.timedelta(days=1))
    except (ValueError, RuntimeError) as error:  # among them those of torch.distributed
        raise UserError(f"the environment variable WORLD_SIZE is {os.environ['WORLD_SIZE']}, but "
                        f"the processes cannot be joined ({one_line(error)}): start several "
                        "processes by torchrun, or unset it") from None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent):
    """End this process when torchrun was killed: it would wait for the others for a day."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process of rank 0, which reads and writes files, fits and prints."""
    return rank() == 0


def print_on_main(text: str):
    """Print on the main process."""
    if is_main():
        print(text, flush=True)


@functools.lru_cache(maxsize=None)
def print_once(text: str):
    """Print on the main process what would otherwise be repeated for each network or set."""
    print_on_main(text)


def broadcast(value: object) -> object:
    """The main process's value (numbers, strings, bytes, CPU tensors) on all processes."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def on_main(work: Callable, *arguments):
    """Call work(*arguments) on the main process alone; every process gets its result or its error.

    The others wait meanwhile: `work` computes on gathered tensors or handles files, but calls
    nothing that all processes must call together, such as a loader or `on_main`.
    """
    result = None
    error = None
    if is_main():
        try:
            result = work(*arguments)
        except Exception as raised:
            error = as_user_error(raised)
            if error is None:
                raise
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def on_each_machine(work: Callable, *arguments):
    """Call work(*arguments) on one process of each machine, then on its other processes.

    This is for downloads: the first process of a machine writes the files that the others read. If
    a call raises a UserError, every process of every machine raises it.
    """
    if world_size() == 1:
        return work(*arguments)
    result = None
    error = None
    for turn_of_first in (True, False):
        if turn_of_first == (dist.get_node_local_rank(0) == 0):
            try:
                result = work(*arguments)
            except UserError as raised:
                error = raised
        # This also waits until the call has returned on all processes.
        errors = [None for _ in range(world_size())]
        dist.all_gather_object(errors, error)
        for other in errors:
            if other is not None:
                raise other
    return result


def derive_seed(*key: int) -> int:
    """A 63-bit seed from integers (seed, epoch, ...), well mixed: similar keys share nothing."""
    # NumPy pads keys with zeros; the length tells (1,) from (1, 0).
    state = np.random.SeedSequence([len(key)] + list(key)).generate_state(1, np.uint64)
    return int(state[0] >> 1)


def seed_all(*key: int):
    """Seed Python, NumPy and PyTorch on all devices from the integers `key`."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def progress(loader: object, epoch: int) -> tqdm:
    """The batches of an epoch, with a progress bar where the main process has a terminal."""
    hide = not (is_main() and sys.stderr.isatty())
    return tqdm(loader.epoch(epoch), f"epoch {epoch + 1}", len(loader), leave=False, disable=hide)


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _concatenate(parts):
    columns = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts]).cpu()
    return columns


def gather_rows(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collect on the main process what all processes computed for the examples of one set.

    batches: one dictionary {"index": row numbers [b], name: values [b, ...]} for each batch.
    Returns {name: [N, ...]} on the CPU, in the order of the set; {} on the other processes.
    """
    columns = _concatenate(batches)
    if world_size() > 1:
        parts = [None for _ in range(world_size())] if is_main() else None
        dist.gather_object(columns, parts)
        if not is_main():
            return {}
        columns = _concatenate(parts)
    index = columns.pop("index")
    order = index.argsort()
    if not torch.equal(index[order], torch.arange(len(index))):
        raise RuntimeError(f"rows are missing or occur twice among {len(index)}")
    return {name: column[order] for name, column in columns.items()}


def data_parallel(net: nn.Module, device: torch.device, compiled: bool = False) -> nn.Module:
    """Wrap `net` in DistributedDataParallel, with batch norm over the global batch.

    The number of processes then does not change the result of a training step, beyond rounding.
    """
    if compiled:
        return torch.compile(data_parallel(net, device))
    if world_size() == 1:
        return net
    use_global_batch_norm(net)
    device_ids = [device.index] if device.type == "cuda" else None
    # Buffers are equal on all processes already. PyTorch 2.14 renamed the option that copies them.
    options = {"broadcast_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        options = {"forward_sync_buffers": False}
    return DistributedDataParallel(net, device_ids=device_ids, **options)


def autocast(args) -> torch.autocast:
    """The context of a forward pass: it computes in bfloat16 with --amp bf16."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def try_batch(forward: Callable, train_set: object, args) -> None:
    """Refuse, before hours of training, a network that fails on a small batch.

    forward: the network, or a function that also makes a backward pass; it is called with images
    of zeros like those of `train_set`, an image set of data.py.
    """
    size = min(2, args.batch_size, len(train_set))  # two images reveal what more would
    images = torch.zeros(size, *train_set.shape, device=args.device)
    try:
        forward(images)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--model {args.model} fails on {size} image(s) of the shape "
                        f"{train_set.shape}: {one_line(error)}; use another --model, --image-size "
                        "or --batch-size") from None


# ---- Batch norm over processes ------------------------------------------------------------------
# Batch norm normalises each channel by its mean and variance over the batch. Where a batch is
# distributed over processes, these must be the statistics of the global batch: otherwise the number
# of processes would change what is learned. Through them, the loss of each process depends on the
# examples of all others. So the sums over a batch are added up over all processes, in the forward
# pass and in the backward pass.
#
# FoRDE differentiates once more, because its loss contains the gradient by the input. PyTorch's
# second derivative of batch norm takes 79 operations per layer and knows one process only. Here,
# both derivatives are written out, for one process and for several; the second one takes 18.
#
#   x [B, C, ...]   the input; B may be 0 on a process
#   n               the number of values of a channel in the global batch
#   x'              (x - mean) / std, with std = sqrt(variance + eps)
#   y               weight x' + bias, the output
#   g, d(g)         the gradient of a loss by y, and by x
#   v               the gradient by d(g) of a loss that contains d(g)
#   <.>             the mean over the n values of a channel, so that mean = <x>


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """View values [C] in a shape that broadcasts over x [B, C, ...]."""
    shape = [-1] + [1 for _ in x.shape[2:]]
    return values.view(shape)


def _sum_by_channel(x: Tensor) -> Tensor:
    """The sums [C] of x [B, C, ...], in float32 if x is bfloat16."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    return x.sum(dims, dtype=torch.promote_types(x.dtype, torch.float32))


def _scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor | None, mean: Tensor,
                     inv_std: Tensor) -> Tensor:
    """scale x' + shift in one operation, for constants [C]; without a shift, it is 0."""
    if x.numel() == 0:
        return torch.empty_like(x)  # not every kernel accepts an empty batch
    # Not F.batch_norm, which PyTorch 2.11 refuses to call with eps 0.
    return torch.native_batch_norm(x, scale, shift, mean, inv_std**-2, False, 0.0, 0.0)[0]


def _gradient_by_input(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inv_std: Tensor,
                       n: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d(g) = (weight / std) (g - <g> - x' <g x'>), and the sums [C] of g x' and of g.

    The sums are those over this process's examples: its share of the gradients by weight and bias.
    """
    native_backward = torch.ops.aten.native_batch_norm_backward
    wanted = (True, True, True)
    if world_size() == 1:
        return native_backward(g, x, weight, mean, None, mean, inv_std, True, 0.0, wanted)
    if x.numel() == 0:
        # The sums are 0. They are computed from g, because torch.compile would move a sum over
        # processes that does not depend on g into the forward pass of this process.
        d_g = g
        sum_gx = _sum_by_channel(g * x)
        sum_g = _sum_by_channel(g)
    else:
        # For a constant mean and std, the gradient by x is (weight / std) g.
        d_g, sum_gx, sum_g = native_backward(g, x, weight, mean, inv_std**-2, mean, inv_std, False,
                                             0.0, wanted)
    # Both depend on x, which subtracts (weight / std) (x' <g x'> + <g>).
    mean_gx, mean_g = all_reduce(torch.stack([sum_gx, sum_g])) / n
    scale = weight * inv_std
    d_g = d_g - _scale_and_shift(x, scale * mean_gx, scale * mean_g, mean, inv_std)
    return d_g, sum_gx, sum_g


class _GradientByInput(torch.autograd.Function):
    """d(g) of `_gradient_by_input`, which can be differentiated again.

    With k = <v g> - <v> <g> - <v x'> <g x'>, the gradient of a loss whose gradient by d(g) is v
      by g       is d(v), because d is linear and symmetric
      by weight  is n k / std
      by x       is -(<g x'> d(v) + <v x'> d(g) + k (weight / std) x') / std
    """

    @staticmethod
    def forward(ctx, g, x, weight, mean, inv_std, n):
        d_g, sum_gx, sum_g = _gradient_by_input(g, x, weight, mean, inv_std, n)
        ctx.save_for_backward(g, x, weight, mean, inv_std, d_g, sum_gx, sum_g)
        ctx.n = n
        ctx.mark_non_differentiable(sum_gx, sum_g)
        ctx.set_materialize_grads(False)
        return d_g, sum_gx, sum_g

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v, *_):
        g, x, weight, mean, inv_std, d_g, sum_gx, sum_g = ctx.saved_tensors
        d_v, sum_vx, sum_v = _gradient_by_input(v, x, weight, mean, inv_std, ctx.n)
        sums = [sum_gx, sum_g, sum_vx, sum_v, _sum_by_channel(v * g)]
        if world_size() > 1:
            sums = all_reduce(torch.stack(sums))                       # [5, C]
        sum_gx, sum_g, sum_vx, sum_v, sum_vg = sums
        # The gradient by weight, with sums in place of means.
        products = torch.addcmul(sum_v * sum_g, sum_vx, sum_gx)
        n_k = sum_vg - products / ctx.n                                # [C]
        grad_weight = n_k * inv_std

        # The gradient by x: its term with x' comes first, and the other two are added to it.
        scale = inv_std / -ctx.n                                       # -1 / (n std)
        grad_x = _scale_and_shift(x, scale * weight * grad_weight, None, mean, inv_std)
        grad_x.addcmul_(_by_channel(scale * sum_gx, x), d_v)
        grad_x.addcmul_(_by_channel(scale * sum_vx, x), d_g)
        # Every process has the whole gradient by the weight, and their gradients are added up.
        if world_size() > 1:
            grad_weight = grad_weight / world_size()
        return d_v, grad_x, grad_weight, None, None, None


class _BatchNormTraining(torch.autograd.Function):
    """y = weight x' + bias by the statistics of the global batch, which move the running ones."""

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps):
        n = x.numel() / x.shape[1]
        if world_size() == 1:
            y, mean, inv_std = torch.native_batch_norm(x, weight, bias, running_mean, running_var,
                                                       True, momentum, eps)
        else:
            # The number of values travels with the sums, because processes may differ in it.
            sums = torch.cat([_sum_by_channel(x), weight.new_full((1,), n)])
            n = all_reduce(sums)[-1]
            mean = sums[:-1] / n                                       # [C]
            # The variance needs the mean first, because <x^2> - <x>^2 would cancel.
            squares = (x - _by_channel(mean, x)).square()
            var = all_reduce(_sum_by_channel(squares)) / n             # [C]
            # As in PyTorch, the running variance is the unbiased one.
            unbiased = var * n / (n - 1).clamp_min(1)
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(unbiased, momentum)
            inv_std = (var + eps).rsqrt()
            y = _scale_and_shift(x, weight, bias, mean, inv_std)
        ctx.save_for_backward(x, weight, mean, inv_std)
        ctx.n = n
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, mean, inv_std = ctx.saved_tensors
        d_g, sum_gx, sum_g = _GradientByInput.apply(g, x, weight, mean, inv_std, ctx.n)
        if torch.is_grad_enabled():
            # With create_graph: these two sums could not be differentiated.
            return d_g, None, None, None, None, None, None
        return d_g, sum_gx, sum_g, None, None, None, None


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of the global batch over all processes, differentiable twice.

    x is [B, C, ...] with any number of dimensions; a process may have B = 0. The statistics are
    float32 if x is bfloat16, and the output has the dtype and the memory format of x. In eval mode
    it is PyTorch's batch norm, whose constant statistics need no other process.

    A backward pass with create_graph in training mode gives the gradient by x alone, and None by
    weight and bias: it is for losses that contain a gradient by the input. The backward pass of
    such a loss gives all gradients. To differentiate gradients by weights, use nn.BatchNorm2d.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if world_size() == 1 and x.numel() <= x.shape[1]:
            raise ValueError("batch norm needs more than one value per channel in training, got "
                             f"an input of shape {list(x.shape)}")
        if world_size() > 1:
            # PyTorch's batch norm, which the scripts have in one process, counts its batches.
            self.num_batches_tracked += 1
        return _BatchNormTraining.apply(x, self.weight, self.bias, self.running_mean,
                                        self.running_var, self.momentum, self.eps)


def use_global_batch_norm(net: nn.Module) -> None:
    """Make every batch norm in `net` a GlobalBatchNorm; parameters and buffers stay the same.

    Layers without weights or without a running average by a constant momentum have no such form:
    they stay as they are in one process, and are refused with several.
    """
    for module in net.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.affine and module.track_running_stats and module.momentum is not None:
            module.__class__ = GlobalBatchNorm
        elif world_size() > 1:
            raise UserError(f"{module}: only batch norm with weights and a running average can "
                            "share its statistics over processes; start one process")


# ---- Networks -----------------------------------------------------------------------------------
# A network is a backbone, which makes features [B, D] of images, and a head, the linear layer after
# it: one of the table NETWORKS of a script, or with --model torchvision/NAME one of torchvision's.

# What training code puts around a state dict: a key of a checkpoint, and prefixes of all names; in
# the checkpoint of an ensemble also the number of a network.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = re.compile(r"((module|model|net|backbone|_orig_mod)\.)*")
MEMBER = re.compile(r"([\w.]*?\b\d+\.)(backbone|head)\.")


def torchvision_name(model: str) -> str:
    """NAME of torchvision/NAME; a UserError if it is no image classifier with a linear head."""
    name = model.removeprefix("torchvision/")
    if name not in models.list_models(module=models, exclude="squeezenet*"):
        raise UserError(f"--model {model}: not an image classifier of torchvision that ends in a "
                        "linear layer; use resnet18, convnext_tiny, vit_b_16 or a relative")
    return name


def is_pretrained(args) -> bool:
    """Whether --model and --weights are those of a network that was trained elsewhere."""
    return args.model.startswith("torchvision/") and args.weights != "none"


def backbone_and_head(args, networks: dict[str, Callable], num_classes: int,
                      shape: Sequence[int],
                      epochs: int | None = None) -> tuple[nn.Module, nn.Linear]:
    """The network --model for images of `shape` (C, H, W), as (backbone, head).

    networks: the table NETWORKS. Its functions of (args, shape) return the backbone (a module, a
    list of layers, or layers by name) and D; or a classifier, whose head is replaced if it has
    other classes. For features [D, 1, 1] of --freeze, the backbone only flattens. epochs: how long
    this network will be trained [default: --epochs]; for 0 epochs, a new head is refused.
    """
    epochs = args.epochs if epochs is None else epochs
    if args.freeze and tuple(shape[1:]) == (1, 1):
        if epochs == 0:
            raise UserError("--freeze trains a new last layer, for one epoch or more")
        return nn.Flatten(), nn.Linear(shape[0], num_classes)
    if args.model.startswith("torchvision/"):
        return pretrained_network(args, num_classes, shape, epochs)
    if args.model not in networks:
        raise UserError(f"--model {args.model}: choose one of {', '.join(networks)}, or "
                        "torchvision/NAME")
    network = networks[args.model](args, shape)
    if isinstance(network, nn.Module):
        backbone, head = split_head(network, args.model, shape)
        return backbone, _fit_head(head, num_classes, args.model, epochs > 0)
    if not isinstance(network, tuple):
        raise UserError(f"--model {args.model}: its function must return a classifier, or the "
                        "layers before the head and the number of their features")
    backbone, dim = network
    if isinstance(backbone, dict):
        backbone = nn.Sequential(OrderedDict(backbone))
    elif not isinstance(backbone, nn.Module):
        backbone = nn.Sequential(*backbone)
    head = nn.Linear(dim, num_classes)
    split_head(nn.Sequential(backbone, head), args.model, shape)  # checks that the layers fit
    return backbone, head


def pretrained_network(args, num_classes: int, shape: Sequence[int],
                       epochs: int | None = None) -> tuple[nn.Module, nn.Linear]:
    """The network --model torchvision/NAME for images of `shape` (C, H, W), as (backbone, head).

    --weights are torchvision's (DEFAULT), random (none) or a file's; the head is new if they have
    other classes. The backbone also takes grey images, and resizes images to --image-size.
    """
    name = torchvision_name(args.model)
    if shape[0] not in (1, 3):
        raise UserError(f"--model {args.model} takes one or three channels, not {shape[0]}")
    epochs = args.epochs if epochs is None else epochs
    weights = args.weights or "DEFAULT"
    size = args.image_size or shape[-1]
    options = {}
    if name.startswith("vit_") and size % int(name[-2:]) == 0:  # vit_b_16 has patches of 16 pixels
        options["image_size"] = size
    if name in ("googlenet", "inception_v3"):
        # Weights of ImageNet need these networks' normalisation; only training from scratch
        # needs their auxiliary classifiers.
        options = {"transform_input": weights != "none", "aux_logits": False, "init_weights": True}
    net = models.get_model(name, num_classes=num_classes, **options)
    # --eval restores the weights from a checkpoint, which does not contain a frozen backbone.
    is_restored = args.eval and epochs > 0 and not args.freeze
    if weights == "DEFAULT" and not is_restored:
        _load_weights(net, on_each_machine(_download_weights, name), args)
    elif weights != "none" and not is_restored:
        _load_weights(net, read_state_dict(weights), args)
    backbone, head = split_head(net, args.model, (3, size, size))
    if tuple(shape) != (3, size, size):
        # A hook keeps torchvision's names, to which a layer before the network would add a prefix.
        backbone.register_forward_pre_hook(functools.partial(_fit_images, size))
    return backbone, _fit_head(head, num_classes, args.model, epochs > 0 or args.freeze)


def _fit_images(size: int, backbone: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Repeat grey images to three channels, and resize images to `size` pixels per side."""
    images = v2.functional.grayscale_to_rgb(inputs[0])
    return v2.functional.resize(images, [size, size], antialias=True)


def _fit_head(head: nn.Linear, num_classes: int, model: str, is_trained: bool) -> nn.Linear:
    """A head as it is if it has `num_classes`, or else a new one, which must be trained."""
    if head.out_features == num_classes:
        if not is_trained:
            print_once(f"{model}: output k of its head is taken for class k of the data; classes "
                       "in folders are counted in alphabetical order")
        return head
    if not is_trained:
        raise UserError(f"--model {model}: its head has {head.out_features} classes, the data have "
                        f"{num_classes}; train a new head, for one epoch or more")
    print_once(f"{model}: new head: {num_classes} classes instead of {head.out_features}")
    return nn.Linear(head.in_features, num_classes)


def split_head(net: nn.Module, model: str, shape: Sequence[int]) -> tuple[nn.Module, nn.Linear]:
    """Split a classifier of images of `shape` (C, H, W) into (backbone, head).

    The head is the linear layer that it ends in, and the backbone is `net` without it. One image,
    in eval mode, shows which layer makes the logits; a UserError if it is not linear.
    """
    calls = [(None, None, None)]  # linear layers with their inputs and outputs, in their order

    def record(layer, inputs, outputs):
        if isinstance(layer, nn.Linear):
            calls.append((layer, inputs[0], outputs))

    net.eval()
    try:
        with torch.no_grad(), nn.modules.module.register_module_forward_hook(record):
            logits = net(torch.linspace(-1, 1, math.prod(shape)).view(1, *shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"--model {model} fails on images {tuple(shape)}: {one_line(error)}; use "
                        "another --image-size, such as 224, or another --model") from None
    net.train()
    head, features, outputs = calls[-1]
    names = {layer: name for name, layer in net.named_modules()}
    if not names.get(head) or outputs is not logits or features.ndim != 2:
        raise UserError(f"--model {model}: its last layer is not a linear layer that makes logits "
                        "[B, K] of features [B, D]; let its function return the layers before the "
                        "head, and the number of their features")
    net.set_submodule(names[head], nn.Identity())
    if head.bias is None:
        head.bias = nn.Parameter(torch.zeros(head.out_features))
    return net, head


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file of torch.save, on the CPU; see `state_dict_in`."""
    return state_dict_in(load_tensors(path), path)


def state_dict_in(state: dict, path: str | Path) -> dict[str, Tensor]:
    """The state dict {name: tensor} in the content of the file `path`, without common PREFIXES.

    It may lie under one of STATE_DICT_KEYS. In the checkpoint of an ensemble, it is that of the
    first network. A UserError if the file has something else, or a weight that is not finite.
    """
    for key in STATE_DICT_KEYS:
        if isinstance(state.get(key), dict):
            state = state[key]
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path} is no state dict: {name!r} is no tensor; give a file of "
                            "torch.save(net.state_dict(), FILE)")
        if name.endswith("weight") and not value.is_floating_point():
            raise UserError(f"{path}: {name} holds integers (quantised?); give weights in float32")
    if not state or not all_finite(state):
        raise UserError(f"{path}: the state dict is empty, or a weight is not finite")
    prefix = PREFIXES.match(os.path.commonprefix(list(state)))[0]
    members = [match[1] for match in map(MEMBER.match, state) if match]
    if members:
        prefix = members[0]
        if len(set(members)) > 1:
            print_once(f"{path} holds {len(set(members))} networks; the first one is used")
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def _download_weights(name: str) -> dict[str, Tensor]:
    """The state dict of torchvision's default weights; get_model would unpickle any object."""
    weights = models.get_model_weights(name).DEFAULT
    try:
        return weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except Exception as error:  # of many types: no network, no space, a damaged file
        raise UserError(f"--weights DEFAULT: {weights.url} cannot be downloaded to "
                        f"{torch.hub.get_dir()}/checkpoints, or not be read from it "
                        f"({one_line(error)}); try again, or give a file") from None


def _load_weights(net: nn.Module, state: dict[str, Tensor], args) -> None:
    """Load a state dict of torchvision's or of a checkpoint; the head gets as many classes."""
    layers = net.named_modules()
    head_name = [name for name, layer in layers if isinstance(layer, nn.Linear)][-1]
    weights = OrderedDict()
    for old_name, value in state.items():
        name = PREFIXES.sub("", old_name, count=1)
        name = re.sub(r"^head\.", f"{head_name}.", name)  # in checkpoints of the scripts
        # DenseNet's weights still have old names: "denselayer1.norm.1" is now "norm1".
        name = re.sub(r"(denselayer\d+\.\w+)\.(\d)", r"\1\2", name)
        if name in weights:
            name = old_name  # of a second network: it will be left over
        if not name.startswith(("aux1.", "aux2.", "AuxLogits.")):
            weights[name] = value
    if all(name.startswith(f"{head_name}.") for name in weights):
        raise UserError(f"--weights {args.weights} holds a head alone, as --freeze trains it; give "
                        "the file of a whole network")
    if f"{head_name}.weight" in weights:
        classes = len(weights[f"{head_name}.weight"])
        has_bias = f"{head_name}.bias" in weights  # that of MaxViT has none
        head = nn.Linear(net.get_submodule(head_name).in_features, classes, has_bias)
        net.set_submodule(head_name, head)
    expected = net.state_dict()
    # Files of PyTorch 0.4 have no number of batches.
    missing = [name for name in expected if name not in weights and "num_batches" not in name]
    left_over = [name for name in weights if name not in expected]
    problem = None
    if missing or left_over:
        problem = f"{len(missing)} missing, {len(left_over)} left over: {(missing + left_over)[0]}"
    else:
        weights._metadata = expected._metadata  # MNASNet asks for the version of its layers
        try:
            net.load_state_dict(weights, strict=False)
        except RuntimeError as error:  # other shapes
            problem = one_line(error)
    if problem:
        raise UserError(f"--weights {args.weights or 'DEFAULT'} does not fit {args.model} "
                        f"({problem}); give the --model and --image-size that it was trained with")


# ---- Options ------------------------------------------------------------------------------------
# Every option has one role: that of the group to which it is added. A run directory relies on it:
# two commands with equal training options, on equal data, train the same networks, so the second
# one may continue or evaluate what the first one has trained. With others it must not.

ROLES = {
    "training": "These options identify a run: other values train other networks, in another run "
                "directory.",
    "evaluation": "These options may change between commands on one run directory, whose networks "
                  "are used again.",
    "runtime": "These options say where, how fast and how often the script runs, and what it "
               "writes. No result of a seed depends on them.",
}
# What --help begins with.
OF_DATASET = "Defaults depend on --dataset: name yours beside --help to see them."
MOST_USED = ("--dataset", "--model", "--weights", "--epochs", "--ood", "--predict", "--name",
             "--eval")


def at_least(low: float, kind: type = int) -> Callable:
    """An argparse type: a finite number of a kind (int or float), not below `low`."""
    return between(low, math.inf, kind)


def between(low: float, high: float, kind: type = float) -> Callable:
    """An argparse type: a finite number of a kind (int or float) in [low, high]."""
    limits = f"at least {low}" if high == math.inf else f"between {low} and {high}"

    def number(text):
        with contextlib.suppress(ValueError, OverflowError):  # no number, or one of 400 digits
            value = kind(text)
            if low <= value <= high and math.isfinite(value):
                return value
        noun = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text}: must be {noun}, {limits}")

    return number


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one; a mere flag has none."""

    def _get_help_string(self, action):
        if action.default is None or action.const:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The command line that all scripts share. A script adds its own options by their role:

        parser = Parser("ddu", __doc__, PRESETS, NETWORKS, batch_size=128)
        training = parser.training.add_argument
        training("--coeff", type=float, default=3.0, help="upper bound of the spectral norm")
        args = parser.parse(argv, run_name)

    script: its name, which is also that of the folder of its runs. networks: names for --model.
    presets: {data set: {option: default}}; "folder" is for the user's own images. A preset whose
    name begins with the flag of an option is added to that of the data set if the option is used:
    "--freeze", or "--model torchvision/NAME" for pretrained networks. defaults: of the shared
    options, where no preset sets them.
    """

    def __init__(self, script: str, doc: str | None, presets: dict[str, dict],
                 networks: dict[str, Callable], **defaults):
        # Under python -OO, a script has no docstring.
        super().__init__(prog=Path(sys.argv[0]).name, usage="%(prog)s [options]",
                         description=(doc or script).splitlines()[0],
                         epilog="Equations and differences from the paper: the top of the file.",
                         formatter_class=HelpFormatter, add_help=False)
        self.script = script
        self.presets = presets
        self.most_used = self.add_argument_group("the options that most people need", OF_DATASET)
        self.training = self.add_argument_group("training options", ROLES["training"])
        self.evaluation = self.add_argument_group("evaluation options", ROLES["evaluation"])
        self.runtime = self.add_argument_group("runtime options", ROLES["runtime"])
        names = [name for name in presets if not name.startswith("--") and name != "folder"]
        self.datasets = ", ".join(names)
        add_training_options(self.training.add_argument, self.datasets, ", ".join(networks))
        add_evaluation_options(self.evaluation.add_argument)
        add_runtime_options(self.runtime.add_argument)
        self.set_defaults(**defaults)

    def move(self, flag: str, role: str):
        """Give a shared option another role: move("--seed", "evaluation")."""
        action = self._option_string_actions[flag]
        for group in (self.training, self.evaluation, self.runtime):
            if action in group._group_actions:
                group._group_actions.remove(action)
        getattr(self, role)._group_actions.append(action)

    def error(self, message: str):
        if message.startswith("unrecognized arguments"):
            message += "; --help lists all options"
        raise UserError(message.removeprefix("argument "))

    def parse(self, argv: list[str] | None, run_name: Callable,
              options_of_file: Callable | None = None) -> argparse.Namespace:
        """The options: those of the command line, then of the preset, then the defaults.

        With --eval, options that were not typed are those of the run. run_name(args) names the run
        directory if --name does not. options_of_file(args) returns {option: value} of a file that
        an option names: these go before the preset. Starts the device. Adds to the options:
          explicit  the names of the options that were typed
          roles     {name: role} of all options
          run_dir   the run directory, which need not exist
        """
        self.initial = vars(self.parse_args([]))  # the defaults without any preset
        roles = {}
        for role in ROLES:
            for action in getattr(self, role)._group_actions:
                roles[action.dest] = role
        self.set_defaults(roles=roles)
        args = self._parse_with_presets(argv, {})
        # argparse sets no default where the namespace has a value, and None cannot be typed.
        nothing = argparse.Namespace(**dict.fromkeys(vars(args)))
        typed = vars(self.parse_args(argv, nothing))
        explicit = {name for name, value in typed.items() if value is not None}
        if "help" in explicit:
            for flag in MOST_USED:
                self.move(flag, "most_used")
            print(self.format_help(), flush=True)  # argparse's own would ignore a full disk
            self.exit()
        if args.eval and args.fresh:
            self.error("--eval evaluates a finished run, --fresh starts it over: choose one")
        if options_of_file is not None:
            args.explicit = explicit
            args = self._parse_with_presets(argv, options_of_file(args))
        name = args.name or run_name(args)
        if not re.fullmatch(r"\w[\w .+=,@-]{0,199}", name) or name.endswith(" "):
            self.error(f"--name {name!r}: give a short name of letters, digits and _.+=,@-, which "
                       "begins with a letter or a digit; not a path")
        run_dir = Path(args.out_dir, self.script, name)
        if args.eval and os.path.isdir(run_dir):
            args = _parse_with_stored(self, argv, run_dir)
        args.run_dir = run_dir
        args.explicit = explicit
        return _start_with(args)

    def _parse_with_presets(self, argv, stored):
        """Parse the command line, whose defaults are `stored` ones, then those of the presets."""
        self.set_defaults(**self.initial | stored)
        args = self.parse_args(argv)
        dataset = (args.preset or args.dataset).split(":")[0]  # folder:PATH
        if dataset not in self.presets or dataset.startswith("--"):
            self.error(f"--dataset or --preset {dataset}: choose one of {self.datasets}; or "
                       "--dataset folder:PATH for your own images")
        self.set_defaults(**_preset(self.presets, dataset, args) | stored)
        return self.parse_args(argv)


def _parse_with_stored(parser, argv, run_dir):
    """Parse the command line, whose defaults are the options of a run; refuse other types."""
    stored = read_options(run_dir)
    values = stored["evaluation"] | stored["training"]
    settings = [parser.initial, *parser.presets.values()]
    try:
        for action in parser._actions:
            name = action.dest
            value = values.get(name)
            kinds = {type(as_json(setting[name])) for setting in settings if name in setting}
            if action.type is not None and isinstance(value, (str, int, float)):
                values[name] = str(value)  # argparse checks defaults that are texts
            elif name in values and not kinds & {type(value), type(None)}:
                parser.error(f"{name} {value!r}")
        return parser._parse_with_presets(argv, values)
    except UserError as error:
        raise UserError(f"{run_dir}/options.json is damaged ({error}); {FRESH}") from None


def _preset(presets, dataset, args):
    """The preset of a data set, and those of the options in use."""
    preset = dict(presets[dataset])
    # The preset of ImageNet may be for a pretrained network already.
    if not preset.get("model", "").startswith("torchvision/"):
        if args.model.startswith("torchvision/"):
            preset |= presets.get("--model torchvision/NAME", {})
    for name, addition in presets.items():
        option = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and getattr(args, option, None):
            preset |= addition
    return preset


def _start_with(args):
    """Complete the options and start; all processes get the options of the main one."""
    args.dataset = args.dataset.rstrip("/")  # of a folder, from the shell's completion
    if args.image_size is None:
        args.image_size = default_image_size(args)
    device = start(args.device)
    # Without matplotlib a script runs to its end, but draws nothing.
    args.plot = args.plot and on_main(can_draw)
    # With --eval and without a shared disk, only the main process has read the run's options.
    args = broadcast(args)
    args.device = device
    if args.eval and on_main(os.path.isdir, args.run_dir):
        # Before data are read or downloaded, which `Run` then compares, too.
        on_main(lambda: check_same_run(args, read_options(args.run_dir), {}))
    if args.batch_size < world_size():
        raise UserError(f"--batch-size {args.batch_size}: this is the global batch size, which "
                        f"must be at least the number of processes, {world_size()}")
    return args


def add_training_options(training: Callable, datasets: str, networks: str):
    """The training options of all scripts."""
    flag = argparse.BooleanOptionalAction
    training("--dataset", metavar="NAME",
        help=f"data set, with the paper's settings for it: {datasets}; or folder:PATH for your own "
        "images in PATH/train/<class>/* and PATH/test/<class>/*")
    training("--preset", metavar="NAME", help="use the settings of another data set")
    training("--model", metavar="NAME",
        help=f"network: {networks}; or torchvision/NAME, with NAME as in torchvision.models")
    training("--weights", metavar="W",
        help="weights of torchvision/NAME: DEFAULT (if nothing is given) downloads them, none "
        "draws random ones, and FILE is a state dict of your own, or a checkpoint of any script")
    training("--freeze", action="store_true",
        help="train only the last layer of torchvision/NAME, on features that are computed once")
    training("--width", type=between(0.01, 64), default=1.0,
        help="factor on the number of channels; 1 is the paper's network")
    training("--image-size", type=between(1, 4096, int),
        help="side length in pixels to which images are resized (folders: 32; torchvision/NAME, "
        "with files or --weights DEFAULT: the size of its weights)")
    training("--limit-train", type=at_least(2), metavar="N",
        help="train on a subset of N examples, in which classes keep their proportions")
    training("--augment", action=flag, default=False, help="use random crops and flips")
    training("--seed", type=between(0, 2**31 - 1, int), default=1,
        help="random seed of initialisation, split, order and augmentation")
    training("--epochs", "-e", type=at_least(0), help="number of passes over the training set")
    training("--batch-size", "-b", type=at_least(1), help="global batch size (sum over processes)")
    training("--lr", type=at_least(0, float),
        help="highest learning rate, for any number of processes")
    training("--amp", choices=["off", "bf16"], default="off",
        help="bf16 runs the network in bfloat16 (automatic mixed precision)")
    training("--limit-steps", type=at_least(1), help="end each epoch after this number of steps")


def add_evaluation_options(evaluation: Callable):
    """The evaluation options of all scripts."""
    evaluation("--ood", nargs="*", metavar="NAME", default=[],
        help="out-of-distribution sets; folder:PATH is a folder of images, nonsense are patterns "
        "and noise")
    evaluation("--data-dir", default="data",
        help="data directory; missing sets are downloaded to it")


def add_runtime_options(runtime: Callable):
    """The runtime options of all scripts."""
    flag = argparse.BooleanOptionalAction
    runtime("-h", "--help", action="store_true", default=argparse.SUPPRESS,
        help="show the options, with the defaults of the chosen data set")
    runtime("--eval", action="store_true",
        help="evaluate a finished run without training; options that are not given are the run's")
    runtime("--predict", metavar="SET",
        help="write predictions.csv for a data set, folder:PATH or nonsense (patterns and noise)")
    runtime("--runs", type=at_least(1), default=1,
        help="number of repetitions with consecutive seeds, for mean and standard error")
    runtime("--name", help="name of the run directory, otherwise made from the training options")
    runtime("--out-dir", default="runs", help="results are written to OUT_DIR/<script>/<name>/")
    runtime("--fresh", action="store_true", help="start over, ignoring checkpoints")
    runtime("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")
    runtime("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto",
        help="auto is a GPU, or the CPU of a machine without one")
    runtime("--workers", type=between(0, 256, int), default=4,
        help="number of data loading workers, for images that are read from files")
    runtime("--compile", action=flag, default=False, help="compile the network (torch.compile)")


def default_image_size(args) -> int | None:
    """The side of images in pixels where --image-size is not given.

    With --model torchvision/NAME, it is that of torchvision's weights, from which a file of weights
    was probably fine-tuned; for random weights it is that of ResNet-18. None stands for the size of
    images in memory, which nothing resizes.
    """
    kind = args.dataset.split(":")[0].split("_")[0]  # imagenet_a, imagenet_o and imagenet_r, too
    sizes_of_files = {"folder": 32, "tiny": 64, "imagenet": 224}
    if not args.model.startswith("torchvision/"):
        return sizes_of_files.get(kind)
    name = torchvision_name(args.model)
    if args.weights == "none":
        name = "resnet18"
    if kind in sizes_of_files or args.weights in (None, "DEFAULT"):
        return models.get_model_weights(name).DEFAULT.transforms().crop_size[0]
    return None


def can_draw() -> bool:
    """Whether matplotlib can be imported; a line says why if not."""
    try:
        from matplotlib.figure import Figure  # noqa: F401
    except Exception as error:  # of any type, if it is installed and broken
        print(f"skipped: pictures, which need matplotlib ({one_line(error)}; pip install "
              "matplotlib)", flush=True)
        return False
    return True


def read_options(run_dir: Path) -> dict[str, dict]:
    """The options and fingerprints with which a run directory was made.

    {"training": {option: value}, "evaluation": {option: value}, "fingerprints": {noun: text}}
    """
    path = run_dir / "options.json"
    try:
        content = json.loads(path.read_text())
        return {name: {**content[name]} for name in ("training", "evaluation", "fingerprints")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is missing or damaged ({one_line(error)}); use --fresh to start "
                        "over") from None


def options(args, role: str) -> dict:
    """{name: value} of all options of a role, in the types of JSON."""
    return {name: as_json(getattr(args, name, None))
            for name, role_of_name in args.roles.items() if role_of_name == role}


def with_options(args, **changes):
    """A copy of parsed arguments with some options changed."""
    return argparse.Namespace(**vars(args) | changes)


def check_same_run(args, stored: dict[str, dict], fingerprints: dict[str, str]):
    """Refuse a run directory that was made with other training options, or from other data.

    With --eval, a folder of images may have moved: its fingerprint says whether it is the same.
    """
    differing = []
    for name, value in options(args, "training").items():
        stored_value = stored["training"].get(name)
        if args.eval and name == "dataset" and value.startswith("folder:"):
            if str(stored_value).startswith("folder:"):
                continue
        if stored_value != value:
            differing.append(f"{name} {stored_value} (not {value})")
    for noun, fingerprint_now in fingerprints.items():
        if stored["fingerprints"].get(noun) != fingerprint_now:
            differing.append(f"another {noun}")
    if differing:
        advice = "use another --name, or --fresh to start over"
        if args.eval:
            advice = "--eval needs the options and the data that it was made with"
        raise UserError(f"{args.run_dir} was made with {', '.join(differing)}; {advice}")


def refuse(args, table: list[tuple]):
    """Refuse options that were typed although they would have no effect.

    table: rows (whether it applies, names of options, why they have no effect), to which those of
    the shared options are added.
    """
    pretrained = args.model.startswith("torchvision/")
    proposal = ""
    if args.model in models.list_models(module=models):
        proposal = f" (did you mean --model torchvision/{args.model}?)"
    shared = [
        (not pretrained, ["weights", "freeze"], f"without --model torchvision/NAME{proposal}"),
        (pretrained, ["width"], f"with --model {args.model}"),
        (args.freeze, ["augment"], "with --freeze"),
    ]
    for applies, names, reason in shared + table:
        for name in sorted(args.explicit.intersection(names)):
            if applies:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} has no effect {reason}; remove this option")


def run_name(args, *additions: str | None) -> str:
    """The name of a run directory: "cifar10-resnet18-w0.5-frozen-seed1".

    It is made from the data set, the network, --width, --freeze, the additions of a script (None
    is skipped) and the seed, unless networks of several seeds share a directory.
    """
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    seed = f"seed{args.seed}" if args.roles["seed"] == "training" else None
    return join_name(set_name(args.dataset), args.model, width, frozen, *additions, seed)


def join_name(*words: str | None) -> str:
    """The name of a run directory, from texts and None (skipped): "cifar10-resnet18-w0.5"."""
    name = "-".join(str(word) for word in words if word is not None)
    return re.sub(r"[^\w.+-]+", "_", name)


def set_name(dataset: str) -> str:
    """The name of a data set as a part of a file name.

    That of folder:PATH is the last component of PATH; characters other than A-Z a-z 0-9 . _ -
    become "_".
    """
    if dataset.startswith("folder:"):
        dataset = os.path.basename(os.path.realpath(folder_path(dataset)))
    return re.sub(r"[^A-Za-z0-9._-]+", "_", dataset).lstrip(".") or "folder"


def folder_path(dataset: str) -> Path:
    """PATH of folder:PATH, in which ~ is the user's home."""
    path = dataset.removeprefix("folder:")
    if not path.strip():
        raise UserError(f"{dataset!r} has no path; write folder: and the path of a folder")
    return Path(path).expanduser()


# ---- Files --------------------------------------------------------------------------------------


def one_line(error: Exception) -> str:
    """An exception's message on one line, shortened; its type where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def as_json(value: object) -> object:
    """The types of JSON from dicts, lists, tensors, arrays, paths; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return as_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float, type(None))):
        return value
    return str(value)


def write(path: Path, content: str | bytes):
    """Write bytes or text to a temporary file, then rename it: `path` is complete or unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if isinstance(content, str):
        content = content.encode()
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or else a crash could leave an empty file after the rename
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path} ({error.strerror}); free some space, or choose "
                        "another place") from None


def to_bytes(state: dict) -> bytes:
    """A checkpoint (tensors and plain Python values) as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_tensors(path: str | Path, advice: str = "save or download it again") -> dict:
    """The dictionary of tensors and plain Python values in a file of torch.save, on the CPU.

    The main process reads the file for all. Nothing but tensors and plain values is unpickled
    (weights_only), and the checksums of the zip archive are verified. advice: what the UserError
    on a damaged file tells the user to do.
    """
    def read():
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None

    file = io.BytesIO(on_main(read))
    state = None
    try:
        # testzip names the first record with a wrong checksum. PyTorch 1.5 wrote no zip.
        damaged = zipfile.is_zipfile(file) and zipfile.ZipFile(file).testzip()
        file.seek(0)
        # torchvision's own training scripts keep their options in a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            if not damaged:
                state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types; PyTorch's own text proposes weights_only=False
        if as_user_error(error) is not None:
            raise  # out of memory: the file may be undamaged
        kind = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if kind:
            raise UserError(f"{path} holds an object of {kind[1]} (a whole pickled network?), "
                            "which can run any code when it is read; save tensors alone: "
                            "torch.save(net.state_dict(), FILE)") from None
    if not isinstance(state, dict):
        raise UserError(f"{path} is damaged, or holds no dictionary of tensors; {advice}")
    return state


def all_finite(value: object) -> bool:
    """Whether every number and tensor in nested dicts and lists is free of NaN and infinity."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, (float, np.floating)) or math.isfinite(value)


def fingerprint(net: nn.Module) -> str:
    """The hexadecimal SHA-256 of the weights and buffers of a network."""
    content = hashlib.sha256()
    for tensor in net.state_dict().values():
        flat = tensor.cpu().flatten().clone(memory_format=torch.contiguous_format)
        content.update(flat.view(torch.uint8).numpy())
    return content.hexdigest()


# ---- Runs ---------------------------------------------------------------------------------------

# What --fresh deletes. Temporary files, which a killed process leaves, are always deleted. The
# options come last: as long as they exist, they describe the other files.
RUN_FILES = (".*.tmp", "*.pt", "*.iterates", "*.csv", "*.png", "results.json", "options.json")
FRESH = "use --fresh to start over"


class Run:
    """A run directory OUT_DIR/<script>/<name>: checkpoints, cached results, tables, pictures.

    Its options.json holds the training options, and fingerprints of the training data. A command
    with others is refused, so whatever else is in the directory belongs to them, and a checkpoint
    need not say what it was made from. One command at a time uses the directory.

    Make a Run after all other checks, because this creates and locks the directory. All processes
    call its methods together, except `write`, `write_csv` and `save_figure`: these are for the main
    process alone.
    """

    def __init__(self, args, fingerprints: dict[str, str], summary: str = ""):
        """Open the directory args.run_dir, and print the summary, a line on the data.

        fingerprints: {noun: fingerprint}, see `Splits` of data.py. A command with others is
        refused, but for the noun "test data", which results.json holds.
        """
        self.args = args
        self.dir = args.run_dir
        self.fingerprints = fingerprints
        self.began = time.perf_counter()
        self.inputs = {}     # {checkpoint: what it depends on beside the options and the data}
        self.histories = {}  # {checkpoint: a row for each epoch}
        on_main(self._open)
        if summary:
            print_on_main(summary)
        training = options(args, "training")
        shown = [f"{name} {value}" for name, value in training.items() if value is not None]
        print_on_main(f"{self.dir.parent.name}: {', '.join(shown)}; {args.device.type}, "
                      f"{world_size()} process(es) of {torch.get_num_threads()} thread(s)")
        print_on_main(f"run directory {self.dir}")

    def _open(self):
        """Create and lock the directory; compare its options with those of this command."""
        if self.args.eval and self.args.epochs > 0 and not os.path.isdir(self.dir):
            raise UserError(f"no run in {self.dir}; train it first, without --eval")
        self._lock()
        identity = {noun: text for noun, text in self.fingerprints.items() if noun != "test data"}
        # Without the options, nobody knows what checkpoints were made with.
        if os.path.lexists(self.dir / "options.json") or any(self.dir.glob("*.pt")):
            check_same_run(self.args, read_options(self.dir), identity)
            if self.args.eval:
                return
        # The evaluation options are those of the last command that may train.
        content = {"training": options(self.args, "training"),
                   "evaluation": options(self.args, "evaluation"), "fingerprints": identity}
        self.write("options.json", json.dumps(content, indent=1))

    def _lock(self):
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.dir / ".lock", "a")  # locked until `report` closes it
            self.locked_file = os.fstat(self.lock.fileno())
            self._lock_file()
            for pattern in RUN_FILES if self.args.fresh else RUN_FILES[:1]:
                for path in self.dir.glob(pattern):
                    path.unlink()
        except BlockingIOError:
            raise UserError(f"{self.dir} is locked by another process; wait for it, or use another "
                            "--name") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.dir} ({error.strerror}); use another --out-dir "
                            "or --name") from None

    def _lock_file(self):
        """Lock the open file .lock, if the file system can."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            print(f"note: {self.dir} cannot be locked ({error.strerror}): start no second command "
                  "in it", flush=True)

    def resume(self, name: str, epochs: int, inputs: dict | None = None, **parts) -> list[dict]:
        """Restore `parts` from the checkpoint `name`; returns its history, a row for each epoch.

        parts: objects with a state_dict, such as net=... and optimiser=...; without a checkpoint
        they are not changed, and the history is []. inputs: what else the training depends on,
        such as {"base network": fingerprint(net)}; a checkpoint with other inputs is refused. With
        --eval, so is one of fewer than `epochs` epochs.
        """
        path = self.dir / f"{name}.pt"
        self.inputs[name] = broadcast(as_json(inputs))
        history = []
        if on_main(path.exists):
            state = load_tensors(path, FRESH)
            if state.get("inputs") != self.inputs[name]:
                nouns = " or ".join(inputs or ["inputs"])
                raise UserError(f"{path} was trained with other {nouns}; use another --name, or "
                                "--fresh to start over")
            try:
                for key, part in parts.items():
                    part.load_state_dict(state[key])
                history = [dict(row) for row in state["history"]]
            except Exception as error:  # a part is missing, or has other names or shapes
                raise UserError(f"{path} does not fit this network ({one_line(error)}); "
                                f"{FRESH}") from None
        if self.args.eval and len(history) < epochs:
            raise UserError(f"{path} has {len(history)} of {epochs} epochs; finish this run first")
        if not self.args.eval and len(history) >= epochs > 0:
            print_on_main(f"{name}: trained already; --fresh trains again")
        self.histories[name] = history
        return history

    def save(self, name: str, history: list[dict], **parts):
        """Save `parts` and the history as the checkpoint `name`, and print the last row.

        history: {"epoch": from 1, name: number, ...} for each epoch. NaN and infinity are refused.
        """
        state = {key: part.state_dict() for key, part in parts.items()}
        if not all_finite([history, state]):
            raise UserError(f"{name}: training diverged in epoch {len(history)}; the checkpoint "
                            "before it is kept; use a lower learning rate")
        state["history"] = as_json(history)
        state["inputs"] = self.inputs[name]
        # The log comes first: a kill between the two leaves no checkpoint without its log.
        on_main(self.write, f"{name}.csv", to_csv(history))
        on_main(lambda: self.write(f"{name}.pt", to_bytes(state)))
        shown = [f"{key} {value:.4g}" for key, value in history[-1].items()]
        print_on_main(f"{name}  {'  '.join(shown)}")

    def cached(self, name: str, inputs: dict, compute: Callable) -> dict:
        """Return compute(), {name: CPU tensor or plain value}, or what an earlier command saved.

        The saved values are used if their `inputs` are equal to these: a plain dictionary of all
        that compute() depends on beside the training options and data. All processes call
        compute(); the result of the main process is saved, and returned on all.
        """
        path = self.dir / f"{name}.pt"
        inputs = broadcast(as_json(inputs))
        if on_main(path.exists):
            state = load_tensors(path, FRESH)
            if state.get("inputs") == inputs:
                return state
        state = broadcast({**compute(), "inputs": inputs})
        if not all_finite(state):
            raise UserError(f"{name}: a value is not finite; use a lower learning rate")
        on_main(lambda: self.write(path.name, to_bytes(state)))
        return state

    def write(self, name: str, content: str | bytes):
        """Write bytes or text as a file of the directory."""
        try:
            is_same = os.path.samestat(self.locked_file, os.stat(self.dir / ".lock"))
        except OSError:
            is_same = False
        if not is_same:
            raise UserError(f"{self.dir} was removed or replaced while this command was running; "
                            "start it again, with another --name")
        write(self.dir / name, content)

    def write_csv(self, name: str, columns: dict):
        """Write a table {column: values [N]} as a CSV file of the directory."""
        columns = as_json(columns)
        rows = [dict(zip(columns, line)) for line in zip(*columns.values(), strict=True)]
        self.write(name, to_csv(rows))
        print(f"{self.dir / name}: {len(rows)} rows", flush=True)

    def save_figure(self, figure: object, name: str):
        """Write a matplotlib figure as a PNG file of the directory."""
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        self.write(name, buffer.getvalue())

    def report(self, rows: list[dict], columns: list[str], shown: list[dict] | None = None,
               **extra) -> list[dict]:
        """Write the rows to results.json and results.csv, and print the table; returns the rows.

        rows: {"method", "seed", "set", "against" (optional), "n", metric: value, ...}, where n is
        the number of examples of `set`. columns: the metrics that the table shows; shown: the rows
        that it shows, if not all; extra: what else results.json stores.
        """
        rows = as_json(rows)
        content = {"script": self.dir.parent.name, "columns": columns,
                   "config": options(self.args, "training") | options(self.args, "evaluation"),
                   "fingerprints": self.fingerprints, "seconds": time.perf_counter() - self.began,
                   "environment": environment(self.args.device), "rows": rows, **extra}
        on_main(self._store, as_json(content), as_json(shown or rows))
        return rows

    def _store(self, content, shown):
        self.write("results.json", json.dumps(content, indent=1))
        self.write("results.csv", to_csv(content["rows"]))
        if self.args.plot and any(self.histories.values()):
            self.save_figure(draw_histories(self.histories), "training.png")
        text = "\n\n".join(map(format_table, result_tables(shown, content["columns"])))
        print(f"\n{text}\n{explain_errors(shown)}\n\nresults, pictures and log files are in "
              f"{self.dir}", flush=True)
        self.lock.close()


def environment(device: torch.device) -> dict:
    """What is needed to repeat a number: commit, versions, device, processes, threads."""
    commit = None
    command = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"commit": commit, "python": platform.python_version(), "torch": torch.__version__,
            "device": name, "tf32_in_convolutions": torch.backends.cudnn.allow_tf32,
            "processes": world_size(), "threads": torch.get_num_threads()}


# ---- Tables -------------------------------------------------------------------------------------


def write_predictions(run: Run, dataset: object, log_probs: dict[str, Tensor], classes: tuple = (),
                      temperatures: dict[str, float] | None = None, extra: dict | None = None,
                      file: str = "predictions.csv"):
    """Write a CSV file that says what each example of a set is, and what is predicted for it.

    dataset: a set of data.py. log_probs: {method: [M, N, K]} of M members or samples (1 of a single
    network), after temperature scaling where `temperatures` {method: temperature} has the method.
    classes: the names of the K classes. extra: {column: values [N]} of the method alone.

    The columns are file (or index) and label (if known); then for each method the predicted class,
    confidence (the mean probability of that class), total, aleatoric and epistemic uncertainty in
    nats, and the temperature (1: probabilities are not scaled); then the extra ones. The columns of
    all methods but the first end with the method's name. The epistemic uncertainty of a single
    network is empty.
    """
    columns = example_columns(dataset, classes)
    first = next(iter(log_probs))
    for method, members in log_probs.items():
        ending = "" if method == first else f"_{method}"
        members = members.double()
        confidence, predicted = members.exp().mean(0).max(1)
        columns[f"predicted{ending}"] = class_names(predicted, classes)
        columns[f"confidence{ending}"] = confidence
        uncertainty = ensemble_uncertainty(members)
        if len(members) == 1:
            uncertainty["epistemic"] = [None for _ in predicted]
        for name, values in uncertainty.items():
            columns[f"{name}{ending}"] = values
        temperature = (temperatures or {}).get(method, 1.0)
        columns[f"temperature{ending}"] = [temperature for _ in predicted]
    run.write_csv(file, columns | (extra or {}))


def example_columns(dataset: object, classes: tuple = ()) -> dict:
    """File (or index) and label, if any is known, of each example of a set of data.py."""
    files = getattr(dataset, "files", None)
    columns = {"file": list(files)} if files else {"index": list(range(len(dataset)))}
    labels = dataset.labels
    if labels.is_floating_point():
        if not labels.isnan().all():
            columns["label"] = labels
    elif (labels >= 0).any():
        columns["label"] = class_names(labels, classes)
    return columns


def class_names(labels: Tensor, classes: tuple) -> list:
    """Class names of labels [N], or numbers where no name is known; None where it is -1."""
    names = dict(enumerate(classes))
    names[-1] = None
    return [names.get(label, label) for label in labels.tolist()]


KEYS = ("run", "method", "set", "against", "n")  # of a row; all else but the seed is a metric


def pool(rows: list[dict], metrics: list[str]) -> list[dict]:
    """Average the rows that differ only in their seed: a list of {column: text}."""
    groups = {}  # {key: rows}
    for row in rows:
        key = tuple(row.get(name) for name in KEYS)
        groups.setdefault(key, []).append(row)
    lines = []
    for key, group in groups.items():
        line = dict(zip(KEYS, key))
        seeds = {row.get("seed") for row in group}
        line["seeds"] = len(seeds)
        if len(group) > len(seeds):
            line["seeds"] = f"{len(seeds)} in {len(group)} runs"
        # Neither runs of one seed nor ensembles that share members are independent.
        members = sum([row.get("members") or [] for row in group], [])
        independent = len(group) == len(seeds) and len(set(members)) == len(members)
        for metric in metrics:
            digits = ".1f" if metric.endswith("_milli") else None
            line[metric] = pooled_text([row.get(metric) for row in group], independent, digits)
        lines.append(line)
    return lines


def pooled_text(values: list, independent: bool = True, digits: str | None = None) -> str | None:
    """The mean and, where it is defined, the standard error of numbers: "0.912 ± 0.004".

    None stands for a number that is missing, infinite or not a number; the text then says of how
    many values it is the mean: "0.912 ± 0.004 (2 of 3)". Texts and equal counts are not changed.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    text = " or ".join(dict.fromkeys(map(str, known)))  # of texts and equal counts
    is_count = isinstance(known[0], int) and len(set(known)) == 1
    if isinstance(known[0], (int, float)) and not is_count:
        mean = float(np.mean(known))
        if digits is None:
            digits = ".5g"
            if abs(mean) < 1000:
                digits = ".4f" if abs(mean) < 10 else ".1f"
        text = format(mean, digits)
        if len(known) > 1 and independent:
            text += f" ± {standard_error(known):{digits}}"
    if len(known) < len(values):
        text += f" ({len(known)} of {len(values)})"
    return text


def explain_errors(rows: list[dict]) -> str:
    """Lines that say what ± means, and how large the error of the test sample is."""
    lines = []
    if len({row.get("seed") for row in rows}) > 1:
        lines.append("±: standard error over networks with other seeds, for the same test examples")
    tests = [row for row in rows if row.get("accuracy") is not None and not row.get("against")]
    if tests:
        n = tests[0]["n"]
        accuracy_of_test = tests[0]["accuracy"]
        # By the rule of succession, because n correct predictions of n are not free of error.
        p = (accuracy_of_test * n + 1) / (n + 2)
        error = math.sqrt(p * (1 - p) / n)
        lines.append(f"{n} test examples: ± {100 * error:.1f} % for an accuracy of "
                     f"{100 * accuracy_of_test:.1f} % (standard error of the sample)")
    return "\n".join(lines)


def to_csv(rows: list[dict]) -> str:
    """CSV text of rows {column: value}, numbers with six significant digits; None is empty."""
    columns = dict.fromkeys(itertools.chain(*rows))  # in order of appearance
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(name) for name in columns]
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def _cells(rows):
    """The columns of rows {column: value} that are not empty: lists of texts, the name first."""
    columns = []
    for name in rows[0]:
        cells = ["" if row[name] is None else str(row[name]) for row in rows]
        if any(cells):
            columns.append([name] + cells)
    return columns


def format_table(rows: list[dict]) -> str:
    """Rows {column: value} as aligned text, without empty columns."""
    columns = _cells(rows)
    for cells in columns:
        width = max(map(len, cells))
        cells.insert(1, "".ljust(width, "-"))
        cells[:] = [cell.ljust(width) for cell in cells]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


def format_latex(rows: list[dict]) -> str:
    """Rows {column: value} as a tabular of LaTeX, without empty columns."""
    def escape(cell):
        cell = re.sub(r"([_%&#])", r"\\\1", cell)
        return re.sub("^-", "$-$", cell).replace("±", r"$\pm$")  # a minus, not a hyphen

    columns = _cells(rows)
    lines = [" & ".join(map(escape, line)) + r" \\" for line in zip(*columns)]
    alignment = "".ljust(len(columns), "l")
    lines.insert(0, rf"\begin{{tabular}}{{{alignment}}}")
    lines.insert(2, r"\hline")
    return "\n".join(lines + [r"\end{tabular}"])


def result_tables(rows: list[dict], metrics: list[str]) -> list[list[dict]]:
    """Pooled rows: those of predictions on one set, then those of comparisons of two sets."""
    single = [row for row in rows if not row.get("against")]
    pairs = [row for row in rows if row.get("against")]
    return [pool(group, metrics) for group in (single, pairs) if group]


def side_by_side(rows: list[dict], metrics: list[str]) -> list[dict]:
    """Pooled rows as papers print them: a line for each method, the data sets side by side.

    Methods are ordered by their numbers of members: "DE, K=1", "SWAG, K=1", "DE, K=5", ... Rows of
    a method on one set that differ in their number of examples have lines of their own.
    """
    def members(line):
        size = re.search(r"K=(\d+)\b", line["method"])
        return int(size[1]) if size else 0

    lines = {}  # {name of the line: line}
    empty = {}  # a line with all columns, in order of appearance
    for row in pool(rows, metrics):
        sets = "/".join(filter(None, (row["set"], row["against"])))
        column = " ".join(filter(None, (sets, row["run"])))
        cells = {f"{column} {metric}": row[metric] for metric in metrics}
        name = row["method"]
        if cells.keys() & lines.get(name, {}).keys():
            name = f"{row['method']} (n = {row['n']})"
        line = lines.setdefault(name, {"method": name})
        line |= cells
        empty |= dict.fromkeys(line)
    return [empty | line for line in sorted(lines.values(), key=members)]


def run_label(content: dict, contents: list[dict]) -> str | None:
    """The options in which a run differs from others of its script: "width=0.5 epochs=3".

    It begins with the name of the script if there are several: their rows are not pooled. It ends
    with a fingerprint of the training data where these differ although the options are equal.
    """
    peers = [other for other in contents if other["script"] == content["script"]]
    words = []
    if len(peers) < len(contents):
        words.append(content["script"])
    for name, value in content["config"].items():
        if name != "seed" and any(peer["config"].get(name) != value for peer in peers):
            words.append(f"{name}={value}")
    twins = [peer for peer in peers
             if peer["config"] | {"seed": 0} == content["config"] | {"seed": 0}]
    for noun, text in content["fingerprints"].items():
        if any(twin["fingerprints"].get(noun) != text for twin in twins):
            words.append(f"{noun}: {text[:8]}")
    return " ".join(words) or None


def column_label(content: dict, contents: list[dict]) -> str | None:
    """What tells a run from others of its data set: the network, or the options; None if alone."""
    sets = {row["set"] for row in content["rows"]}
    peers = [other for other in contents if sets & {row["set"] for row in other["rows"]}]
    labels = {run_label(peer, peers) for peer in peers}
    models = {peer["config"].get("model") for peer in peers}
    if len(labels) == 1:
        return None
    if len(models) == len(labels):
        return content["config"].get("model")
    return run_label(content, peers)


def join_pairs(rows: list[dict]) -> list[dict]:
    """The rows of a run that compare two sets, with the predictions on the first; the others."""
    key_of = operator.itemgetter("method", "set", "seed")
    pairs = [row for row in rows if row.get("against")]
    predictions = {key_of(row): row for row in rows if not row.get("against")}
    joined = [{**predictions.get(key_of(row), {}), **row} for row in pairs]
    for row in pairs:
        predictions.pop(key_of(row), None)
    return joined + list(predictions.values())


# What the rows of all scripts have; ms is the time of a prediction, bytes the size of the network.
SHARED_COLUMNS = ("accuracy", "nll", "ece15", "auroc_total", "auroc_epistemic", "auroc_density",
                  "ms", "bytes")


def chosen_rows(rows: list[dict], args) -> list[dict]:
    """The rows of --sets, or all but those of one kind of corruption; refuses unknown names."""
    metrics = set().union(*rows).difference(KEYS)
    sets = {row["set"] for row in rows}
    for option, names, known in (("metrics", args.metrics, metrics), ("sets", args.sets, sets)):
        for name in names or []:
            if rows and name not in known:
                raise UserError(f"--{option} {name}: not found in any row")
    if args.sets:
        rows = [row for row in rows if row["set"] in args.sets]
    else:
        rows = [row for row in rows if "kind" not in row]
    if not rows:
        raise UserError("no rows to show: give the directories of finished runs")
    return rows


def read_results(directory: str) -> dict | None:
    """The content of results.json in a run directory; None, and a line, if it cannot be shown."""
    kinds = {"script": str, "config": dict, "fingerprints": dict, "columns": list, "rows": list}
    try:
        content = json.loads(Path(directory, "results.json").read_text())
        result_tables(content["rows"], content["columns"])
        explain_errors(content["rows"])
        is_complete = all(isinstance(content[name], kind) for name, kind in kinds.items())
        if is_complete and all({"method", "set"} <= row.keys() for row in content["rows"]):
            return content
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    print(f"skipped: {directory} has no results.json of a finished run, or a damaged one",
          file=sys.stderr)
    return None


def table(argv: list[str] | None = None):
    """Tabulate finished runs; those of several scripts by method, set and OOD set."""
    parser = argparse.ArgumentParser(prog="common.py table", description=table.__doc__)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--metrics", nargs="+", help="columns [default: those that the runs print]")
    parser.add_argument("--sets", nargs="+", help="show only rows of these sets; those of one "
                        "kind of corruption are shown only if they are named")
    parser.add_argument("--side-by-side", action="store_true",
                        help="a row for each method, the data sets in columns")
    parser.add_argument("--format", choices=["text", "latex"], default="text")
    args = parser.parse_args(argv)
    contents = list(filter(None, map(read_results, args.runs)))
    one_script = len({content["script"] for content in contents}) == 1
    rows = []
    columns = {}  # a dictionary, because it keeps the order
    for content in contents:
        # Runs with the same label differ only in their seeds: their rows are pooled.
        label = run_label(content, contents)
        columns |= dict.fromkeys(content["columns"])
        rows_of_run = content["rows"]
        if args.side_by_side:
            label = column_label(content, contents)
        elif not one_script:
            rows_of_run = join_pairs(rows_of_run)
        rows += [{**row, "run": label} for row in rows_of_run]
    rows = chosen_rows(rows, args)
    metrics = args.metrics or (columns if one_script else SHARED_COLUMNS)
    if args.side_by_side:
        tables = [side_by_side(rows, metrics)]
    elif one_script:
        tables = result_tables(rows, metrics)
    else:
        tables = [pool(rows, metrics)]
    if args.format == "latex":
        texts = map(format_latex, tables)
    else:
        texts = [*map(format_table, tables), explain_errors(rows)]
    print("\n\n".join(texts), flush=True)


# ---- Pictures, and the start of a script --------------------------------------------------------


def make_figure(rows: int, columns: int, figsize: tuple, **options) -> tuple:
    """A matplotlib figure for a file, and its axes; the options are those of Figure.subplots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


# These six can be told apart by colour-blind people.
COLOURS = ("#4477AA", "#CCBB44", "#AA3377", "#228833", "#EE6677", "#66CCEE")


def colours(count: int) -> list:
    """`count` different colours."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps

    return list(colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def draw_histories(histories: dict[str, list[dict]]):
    """A figure of {checkpoint: a row for each epoch}: a panel for each number that was logged."""
    rows = itertools.chain(*histories.values())
    names = dict.fromkeys(itertools.chain(*rows))  # in order of appearance
    metrics = [name for name in names if name not in ("epoch", "seconds", "lr")]
    height = 3 + len(histories) / 15  # with the legend
    figure, _ = make_figure(1, len(metrics), figsize=(4 * len(metrics), height))
    for panel, metric in zip(figure.axes, metrics):
        panel.set_prop_cycle(color=colours(len(histories)))
        for name, history in histories.items():
            epochs = [row["epoch"] for row in history]
            panel.plot(epochs, [row.get(metric) for row in history], ".-", label=name)
        panel.set(xlabel="epoch", title=metric)
        panel.ticklabel_format(useOffset=False)
    figure.legend(handles=panel.lines, loc="outside lower center", ncols=3, frameon=False)
    return figure


def as_user_error(error: Exception) -> UserError | None:
    """The UserError that says what an exception means to the user; None for programming errors."""
    if isinstance(error, UserError):
        return error
    # PyTorch's allocator of CPU memory raises a RuntimeError; the second text is Windows's.
    text = f"{error} {error.__cause__}"
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if out_of_memory or "can't allocate memory" in text or "not enough memory" in text:
        return UserError("out of memory; use a smaller --batch-size or --width, --amp bf16, or a "
                         "device with more memory")
    # A data loading worker ends by a bus error, or says so itself, where /dev/shm is full.
    if re.search(r"shared memory object|out of shared memory|Bus error|</torch_", text):
        return UserError("data loading workers have too little shared memory (/dev/shm; Docker: "
                         "--shm-size); use --workers 0 or a smaller --batch-size")
    if "DataLoader worker" in text and "Caught" not in text:
        return UserError("a data loading worker was killed, probably because memory ran out; use "
                         "fewer --workers, or --workers 0")
    # Errors of standard output name no file.
    if isinstance(error, OSError) and error.filename is None:
        if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EBADF):
            return UserError(f"cannot print ({error.strerror}); what was saved is kept")
    return None


def launch(main: Callable):
    """Run main(). A UserError is printed as one line, with exit status 2.

    SIGINT and SIGTERM end the script at once, with one line and status 130 or 143. Warnings of our
    own files are printed as notes of one line.
    """
    script = Path(sys.argv[0]).name
    process = os.getpid()

    def stop(signum, frame):
        if is_main() and os.getpid() == process:  # data loading workers print nothing
            name = signal.Signals(signum).name
            print(f"{script}: stopped by {name}; the same command resumes from the last completed "
                  "epoch", file=sys.stderr, flush=True)
        os._exit(128 + signum)

    _replace_closed_streams()
    warnings.showwarning = _print_note
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        main()
    except Exception as error:
        message = as_user_error(error)
        if message is None:
            raise
        if isinstance(error, OSError):
            # What Python would print at its end has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"{script}: error: {' '.join(str(message).split())}")
    if world_size() > 1:
        dist.destroy_process_group()


def _replace_closed_streams():
    """Open standard output or standard error if the shell has closed it (2>&-).

    A checkpoint would otherwise get its number, 1 or 2, and the errors of C libraries with it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))
            if name == "stderr":
                sys.stderr = sys.stdout  # the last line says what went wrong


SHOW_WARNING = warnings.showwarning


def _print_note(message, category, filename, lineno, file=None, line=None):
    """Print a warning of this folder's files as a note; leave others to Python."""
    if Path(filename).resolve().parent == Path(__file__).resolve().parent:
        print(f"note: {one_line(message)}", flush=True)
    else:
        SHOW_WARNING(message, category, filename, lineno, file, line)


def _fail(message):
    """Print an error and end with status 2; under torchrun, so that it is printed last and once."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report is None:
        print(message, file=sys.stderr, flush=True)
        sys.exit(2)
    # torchrun prints the file of the process that failed first, and kills the others meanwhile.
    if int(os.environ["RANK"]) > 0:
        time.sleep(10)
    Path(report).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    os._exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] != ["table"]:
        _fail("usage: python common.py table RUN ... [--metrics ...] [--sets ...]; python "
              "common.py table --help says more")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # table ... | head
    launch(lambda: table(sys.argv[2:]))
