"""What the five scripts share: metrics, and the plain functions that make a run trustworthy.

  Metrics    accuracy, likelihood, calibration, ensemble decomposition, out-of-distribution (OOD)
             detection, rejection, temperature scaling, regression by mixtures of Gaussians
  Processes  one process, or those that torchrun started: seeds, gathering, batch norm
  Options    the command line that all scripts share
  Files      checkpoints that are whole, finite and safe to read
  Runs       the run directory: checkpoints of training, saved results of computations, reports
  Tables     mean and standard error over seeds; predictions as CSV

No model, no loss, no loop: those are in the scripts. As a program, this file tabulates finished
runs:

  python common.py table runs/ddu/* [--metrics accuracy nll] [--sets glyphs] [--side-by-side]
"""

import argparse
import contextlib
import csv
import datetime
import errno
import hashlib
import importlib.util
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
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
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
# Lists, arrays and tensors of any float type are accepted. Metrics are Python floats, computed in
# float64: entropies and likelihoods in nats, errors and areas as fractions. Wrong shapes, NaN,
# labels out of range and rows that do not sum to 1 raise a ValueError of one line.

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


def _labels(labels, like):
    """Labels as int64 [N], checked against the rows and classes of `like` [..., N, K]."""
    number, classes = like.shape[-2:]
    labels = torch.as_tensor(labels).to(like.device)
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


def _mask(mask, like, name):
    mask = _vector(mask, name)
    fits = len(mask) == len(like) and np.isin(mask, (0, 1)).all()
    _require(fits, f"{name}: expected {len(like)} values, bool or 0 and 1")
    return mask == 1


def accuracy(probs, labels):
    """Fraction of rows whose largest score is the label's; of equal scores the first one counts."""
    return top_k_accuracy(probs, labels, 1)


def top_k_accuracy(probs, labels, k):
    """Fraction of rows whose label is among the k largest scores.

    The scores [N, K] may be of any kind (logits); equal scores are ranked by class index.
    """
    scores = _tensor(probs, "probs", 2)
    label = _labels(labels, scores)[:, None]                           # [N, 1]
    classes = torch.arange(scores.shape[1], device=scores.device)      # [K]
    label_score = scores.gather(1, label)                              # [N, 1]
    is_ahead = (scores > label_score) | ((scores == label_score) & (classes < label))
    return (is_ahead.sum(1) < k).double().mean().item()


def nll(log_probs, labels):
    """Negative log-likelihood -(1/N) sum_n log p_n[y_n], in nats."""
    log_probs = _tensor(log_probs, "log_probs", 2)
    return 0.0 - lpd(log_probs[None], labels)


def lpd(log_probs, labels):
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


def brier(probs, labels):
    """Brier score (1/N) sum_n sum_k (p_nk - [k = y_n])^2, 0..2: a sum over classes, not a mean."""
    probs = _tensor(probs, "probs", 2)
    _check_probs(probs)
    target = nn.functional.one_hot(_labels(labels, probs), probs.shape[1])  # [N, K]
    return (probs.double() - target).square().sum(1).mean().item()


class Reliability(NamedTuple):
    """The bars of a reliability diagram, arrays [bins]; the means of an empty bin are 0."""

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def reliability(confidence, correct, bins=15):
    """Count, mean confidence and accuracy in the equal-width bins (b / bins, (b + 1) / bins].

    confidence [N] in [0, 1]; 0 belongs to the first bin. Edges are compared in the precision of
    `confidence`, so that 0.2 is in bin 2 of 15 in float32 and in float64.
    """
    confidence = _vector(confidence, "confidence")
    correct = _mask(correct, confidence, "correct")
    fits = confidence.min() >= 0 and confidence.max() <= 1 + 1e-6
    _require(fits, "confidence: expected values in 0..1")
    inner_edges = (np.arange(1, bins) / bins).astype(confidence.dtype)
    bin_index = np.searchsorted(inner_edges, confidence, side="left")  # [N]
    counts = np.bincount(bin_index, minlength=bins)                    # [bins]
    divisor = np.maximum(counts, 1)                                    # empty bins: 0 / 1
    confidence_sum = np.bincount(bin_index, confidence.clip(max=1), bins)
    correct_sum = np.bincount(bin_index, correct, bins)
    return Reliability(counts, confidence_sum / divisor, correct_sum / divisor)


def ece(probs, labels, bins=15):
    """Expected calibration error sum_b n_b / N |accuracy_b - confidence_b|; see `reliability`."""
    probs = _tensor(probs, "probs", 2)
    _check_probs(probs)
    confidence, predicted = probs.max(1)
    confidence = confidence.clamp(max=1)  # rows sum to 1 within the tolerance
    bars = reliability(confidence, predicted == _labels(labels, probs), bins)
    gaps = np.abs(bars.accuracy - bars.confidence)
    return float((gaps * bars.counts).sum() / len(probs))


def entropy(probs):
    """Entropy -sum_k p_k log p_k of probs [N, K]: [N] in 0..log K nats, float64; 0 log 0 is 0."""
    probs = _tensor(probs, "probs", 2).double()
    _check_probs(probs)
    return torch.special.entr(probs).sum(-1)


def ensemble_uncertainty(log_probs):
    """Uncertainties of an ensemble, {name: [N]}, from the log probabilities [M, N, K] of members.

    With the mean prediction pi = (1/M) sum_m p_m, in nats, float64, never below 0:
      total      H(pi)
      aleatoric  (1/M) sum_m H(p_m)
      epistemic  total - aleatoric, the mutual information
    """
    log_probs = _tensor(log_probs, "log_probs", 3)
    totals = []
    aleatorics = []
    # In blocks of rows, because ten members of ImageNet would take 4 GB a tensor.
    rows = max(1, 2**22 // log_probs[:, 0].numel())
    for block in log_probs.split(rows, 1):
        log_p = block.double()                                         # [M, n, K]
        p = log_p.exp()
        _check_probs(p, "exp(log_probs)")
        pi = (log_p.logsumexp(0) - math.log(len(log_p))).exp()         # [n, K]
        totals.append(torch.special.entr(pi).sum(-1))                  # [n]  H(pi)
        aleatorics.append(torch.special.entr(p).sum(-1).mean(0))       # [n]  mean_m H(p_m)
    total = torch.cat(totals)
    aleatoric = torch.cat(aleatorics)
    parts = {"total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric}
    # Rounding may leave values just below 0.
    return {name: values.clamp_min(0) for name, values in parts.items()}


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


def auroc(scores, positive):
    """Area under the ROC curve: P(a positive scores higher than a negative) + P(equal) / 2."""
    tp, fp = _threshold_counts(scores, positive)
    tp_before = np.append(0, tp[:-1])
    new_fp = np.diff(fp, prepend=0)
    twice_area = new_fp @ (tp + tp_before)  # integers: exact
    return float(twice_area / (2 * tp[-1] * fp[-1]))


def average_precision(scores, positive):
    """Area under the steps of the precision-recall curve: sum_t (R_t - R_{t-1}) P_t."""
    tp, fp = _threshold_counts(scores, positive)
    precision = tp / (tp + fp)
    new_tp = np.diff(tp, prepend=0)  # proportional to R_t - R_{t-1}
    return float(new_tp @ precision / tp[-1])


def fpr_at_tpr(scores, positive, tpr=0.95):
    """Smallest false positive rate of the thresholds with a true positive rate of at least tpr."""
    tp, fp = _threshold_counts(scores, positive)
    # Both rates grow as the threshold falls, so the first one that accepts enough is the best.
    first = np.argmax(tp / tp[-1] >= tpr)
    return float(fp[first] / fp[-1])


def ood_metrics(id_scores, ood_scores, *, larger_means):
    """How well a score separates in-distribution [N] from out-of-distribution [L] examples.

    larger_means: "ood" if large scores mean OOD (an uncertainty), "id" if they mean ID (a density).
    auroc is the same whichever side is positive; aupr_in and aupr_out are average precisions with
    ID and with OOD positive; fpr95 is the fraction of OOD accepted when 95 % of ID is.
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


def rejection_curve(uncertainty, correct):
    """Errors that remain when the most uncertain predictions are rejected, that is, put right.

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


def prediction_rejection_ratio(uncertainty, correct):
    """Malinin's (A_random - A) / (A_random - A_oracle), -1..1, with areas under `rejection_curve`.

    It equals 2 auroc(uncertainty, not correct) - 1. None if all or no predictions are correct.
    """
    uncertainty = _vector(uncertainty, "uncertainty")
    wrong = ~_mask(correct, uncertainty, "correct")
    if wrong.all() or not wrong.any():
        return None
    return 2 * auroc(uncertainty, wrong) - 1


TEMPERATURES = (1e-3, 1e3)  # the limits of `fit_temperature`


def fit_temperature(logits, labels):
    """The temperature T that minimises the NLL of softmax(z_n / T), for logits z [N, K].

    The NLL is convex in 1 / T: T is the only root of its slope, found by Brent's method on log T.
    Limited to TEMPERATURES; 1 if no T makes a difference (constant rows).
    """
    logits = _tensor(logits, "logits", 2)
    labels = _labels(labels, logits)
    _require(logits.isfinite().all(), "logits: expected finite numbers")
    z = logits.double() - logits.double().gather(1, labels[:, None])   # [N, K]  z_k - z_y

    def slope(log_t):
        """d NLL / d (1 / T) = mean_n of the expectation of z_k - z_y under softmax(z / T)."""
        probs = (z / math.exp(log_t)).softmax(1)
        return (probs * z).sum(1).mean().item()

    low, high = map(math.log, TEMPERATURES)
    if slope(high) > 0:
        return TEMPERATURES[1]  # worse than guessing: the flatter, the better
    if slope(high) == 0:
        return 1.0
    if slope(low) <= 0:
        return TEMPERATURES[0]  # no errors: the sharper, the better
    return math.exp(brentq(slope, low, high, xtol=1e-9))


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


def gaussian_mixture_moments(means, variances):
    """Moments of equal mixtures of S Gaussians, from their means and variances [S, N].

    aleatoric = mean_s v_s, epistemic = mean_s (m_s - mean)^2 (divided by S, not S - 1).
    """
    means, variances = _mixture(means, variances)
    aleatoric = variances.mean(0)
    epistemic = means.var(0, correction=0)
    return Moments(means.mean(0), aleatoric, epistemic, aleatoric + epistemic)


def mixture_lpd(means, variances, targets):
    """Log predictive density (1/N) sum_n log (1/S) sum_s N(y_n; m_sn, v_sn), in nats."""
    means, variances = _mixture(means, variances)
    targets = _targets(targets, means)
    distance = (targets - means).square() / variances                  # [S, N]
    log_density = -(distance + variances.log() + math.log(2 * math.pi)) / 2
    mixture = log_density.logsumexp(0) - math.log(len(means))          # [N]
    return mixture.mean().item()


def regression_ece(means, variances, targets):
    """Calibration error of regression, 0..0.5: the mean gap between quantiles and observations.

    At 20 levels .01, ..., .99 the gap is |level - fraction of targets with F_n(y_n) <= level|, with
    the distribution function F_n(y) = (1/S) sum_s Phi((y - m_sn) / sqrt(v_sn)) of the mixture.
    """
    means, variances = _mixture(means, variances)
    z = (_targets(targets, means) - means) / variances.sqrt()          # [S, N]
    cdf = torch.special.ndtr(z).mean(0).cpu().numpy()                  # [N]
    levels = np.linspace(0.01, 0.99, 20)
    fraction_below = np.searchsorted(np.sort(cdf), levels, side="right") / len(cdf)
    return float(np.abs(fraction_below - levels).mean())


def regression_metrics(means, variances, targets):
    """Scores of regression by equal mixtures [S, N]: lpd, mae, rmse, ece (`regression_ece`).

    mae and rmse are those of the mixture's mean, in the unit of the targets.
    """
    means, variances = _mixture(means, variances)
    error = means.mean(0) - _targets(targets, means)
    return {"lpd": mixture_lpd(means, variances, targets),
            "mae": error.abs().mean().item(),
            "rmse": error.square().mean().sqrt().item(),
            "ece": regression_ece(means, variances, targets)}


def standard_error(values):
    """Unbiased standard deviation of values [n] / sqrt(n); None for n = 1."""
    values = _vector(values, "values").astype(np.float64)
    if len(values) == 1:
        return None
    return float(values.std(ddof=1) / math.sqrt(len(values)))


# ---- Processes ----------------------------------------------------------------------------------
# Without torchrun there is one process. With it there are several: the one of rank 0 is the main
# process. Small Python values travel by gloo, gradients on GPUs by nccl.


def start(device="auto"):
    """Choose this process's device, and join the other processes if torchrun started several.

    device: auto (a GPU if there is one), cpu, cuda or mps.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: not found on this machine; use --device cpu")
    if device == "cuda":
        index = dist.get_node_local_rank(0)
        count = torch.cuda.device_count()
        if index >= count:
            raise UserError(f"--device cuda: process {index} needs a GPU of its own, and this "
                            f"machine has {count}; start fewer processes, or use --device cpu")
        device = f"cuda:{index}"
        torch.cuda.set_device(device)
        # The shapes of a script's batches hardly change, so the search for fast kernels pays.
        torch.backends.cudnn.benchmark = True
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        # One process may wait for another for a day, for example while that one fits or plots.
        dist.init_process_group(backend, timeout=datetime.timedelta(days=1))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    return torch.device(device)


def _end_with_parent(parent):
    """End this process when torchrun was killed: it would wait for the others for a day."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def rank():
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    """Whether this is the process of rank 0, which reads and writes files, fits and prints."""
    return rank() == 0


def print_on_main(text):
    """Print on the main process."""
    if is_main():
        print(text, flush=True)


def broadcast(value):
    """The main process's value (numbers, strings, bytes, CPU tensors) on all processes."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def gather_objects(value):
    """The values of all processes, by rank, on all processes."""
    values = [value for _ in range(world_size())]
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def on_main(work, *arguments):
    """Call work(*arguments) on the main process alone; every process gets its result or its error.

    The others wait meanwhile: `work` computes on gathered tensors or handles files, but calls
    nothing that all processes must call together, such as a loader or `on_main`.
    """
    result = None
    error = None
    if is_main():
        try:
            result = work(*arguments)
        except Exception as found:
            error = as_user_error(found)
            if error is None:
                raise
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def on_each_machine(work, *arguments):
    """Call work(*arguments) on one process of each machine, then on its other processes.

    For downloads and caches: the first call on a machine makes the files that the others read. If a
    call raises a UserError, every process of every machine raises it.
    """
    is_first = dist.get_node_local_rank(0) == 0
    result = None
    error = None
    for turn_of_first in (True, False):
        if is_first == turn_of_first:
            try:
                result = work(*arguments)
            except UserError as found:
                error = found
        # Gathering also waits until all processes have had this turn.
        for other in gather_objects(error):
            if other is not None:
                raise other
    return result


def derive_seed(*key):
    """A 63-bit seed from integers (seed, epoch, ...), well mixed: similar keys share nothing."""
    # NumPy pads keys with zeros; the length tells (1,) from (1, 0).
    state = np.random.SeedSequence([len(key)] + list(key)).generate_state(1, np.uint64)
    return int(state[0] >> 1)


def seed_all(*key):
    """Seed Python, NumPy and PyTorch on all devices from the integers `key`."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def progress(loader, epoch):
    """The batches of an epoch, with a progress bar where the main process has a terminal."""
    hide = not (is_main() and sys.stderr.isatty())
    return tqdm(loader.epoch(epoch), f"epoch {epoch + 1}", len(loader), leave=False, disable=hide)


def all_reduce(tensor):
    """Sum a tensor over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _concatenate(parts):
    columns = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts]).cpu()
    return columns


def gather_rows(batches):
    """Bring together the rows that all processes computed for one set, on the main process.

    batches: for each batch a dictionary {"index": the rows of the set [b], name: values [b, ...]}.
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


class AllReduceSum(torch.autograd.Function):
    """The sum of x over all processes. Each loss depends on every x: gradients are summed, too."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad):
        return AllReduceSum.apply(grad)


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of the global batch, on every device, differentiable twice.

    x is [B, C, ...], where B may be 0. The statistics are computed in float32, also of bfloat16,
    and in two passes (the mean, then the variance), because E[x^2] - E[x]^2 cancels.
    """

    def _check_input_dim(self, x):
        pass  # any number of dimensions

    def forward(self, x):
        if not self.training or world_size() == 1:
            return super().forward(x)
        rows = x.movedim(1, -1)                                        # [B, ..., C]
        others = list(range(rows.ndim - 1))
        # The number of values travels with the sums, because processes may differ in it.
        values = self.weight.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([rows.sum(others, dtype=values.dtype), values])
        total, count = AllReduceSum.apply(sums).split([x.shape[1], 1])
        mean = total / count                                           # [C]
        centred = rows - mean                                          # [B, ..., C]
        var = AllReduceSum.apply(centred.square().sum(others)) / count  # [C]
        with torch.no_grad():
            # As in PyTorch, the running variance is the unbiased one.
            unbiased = var * count / (count - 1).clamp_min(1)
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        normalised = centred * (self.weight * torch.rsqrt(var + self.eps)) + self.bias
        return normalised.movedim(-1, 1).to(x.dtype)


def data_parallel(net, device, compiled=False):
    """Wrap `net` in DistributedDataParallel, with batch norm over the global batch.

    The number of processes then does not change the result of a training step, beyond rounding.
    """
    if compiled:
        return torch.compile(data_parallel(net, device))
    if world_size() == 1:
        return net
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if not (module.affine and module.track_running_stats and module.momentum is not None):
                raise UserError(f"{module}: only batch norm with weights and a running average can "
                                "share its statistics over processes; start one process")
            module.__class__ = GlobalBatchNorm  # parameters and buffers stay the same objects
    device_ids = [device.index] if device.type == "cuda" else None
    # Buffers are equal on all processes already. PyTorch 2.14 renamed the option that copies them.
    options = {"broadcast_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        options = {"forward_sync_buffers": False}
    return DistributedDataParallel(net, device_ids=device_ids, **options)


def autocast(args):
    """The precision of a forward pass: bfloat16 with --amp bf16."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


# ---- Options ------------------------------------------------------------------------------------


def at_least(low, kind=int):
    """An argparse type: a finite number of a kind (int or float), not below `low`."""
    return between(low, math.inf, kind)


def between(low, high, kind=float):
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


# A run is identified by the values of its options: other values need another run directory. Not by
# these, which say where and how fast it runs and what is written, nor by those that a script names
# as options of its evaluation. --eval --name takes all but NOT_STORED from options.json.
NOT_STORED = {"out_dir", "name", "device", "eval", "fresh", "plot", "predict"}
NOT_IDENTITY = NOT_STORED | {"data_dir", "workers", "compile", "runs"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one; a mere flag has none."""

    def _get_help_string(self, action):
        if action.default is None or action.const:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The command line that all scripts share, to which a script adds its own options.

    script: its name, which is also that of the folder of its runs; networks: names for --model.
    presets: {data set: {option: default}}; "folder" is for the user's own images, "pretrained" is
    added by --model torchvision/NAME to those with another network, and "frozen" by --freeze.
    defaults: of the shared options, where no preset says anything else.
    """

    def __init__(self, script, doc, presets, networks, **defaults):
        super().__init__(prog=Path(sys.argv[0]).name, description=doc.splitlines()[0],
                         epilog="Equations and differences from the paper: the top of the file.",
                         formatter_class=HelpFormatter, add_help=False)
        self.script = script
        self.presets = presets
        others = ("folder", "pretrained", "frozen")
        self.names = ", ".join(name for name in presets if name not in others)
        add_training_options(self, self.names, ", ".join(networks))
        add_run_options(self)
        self.set_defaults(**defaults)

    def error(self, message):
        if message.startswith("unrecognized arguments"):
            message += "; --help lists all options"
        raise UserError(message.removeprefix("argument "))

    def parse(self, argv=None):
        """The options: those of the command line, then of the preset, then the defaults.

        Starts the device. `args.given` names the options of the command line.
        """
        args = self.parse_args(argv)
        nothing = argparse.Namespace(**dict.fromkeys(vars(args)))
        # argparse sets no default where the namespace has a value, and None cannot be typed.
        typed = vars(self.parse_args(argv, nothing))
        given = {name for name, value in typed.items() if value is not None}
        self.set_defaults(**self._chosen_defaults(args))
        args = self.parse_args(argv)
        if "help" in given:
            print(self.format_help(), flush=True)  # argparse's own would ignore a full disk
            self.exit()
        if args.eval and args.fresh:
            self.error("--eval evaluates a finished run, --fresh starts it over: choose one")
        device = start(args.device)
        # Where no disk is shared, only the main process has the run of --eval --name.
        args = broadcast(args)
        args.device = device
        args.given = given
        args.dataset = args.dataset.rstrip("/")  # of a folder, from the shell's completion
        if args.batch_size < world_size():
            self.error(f"--batch-size {args.batch_size}: this is the global batch size, which must "
                       f"be at least the number of processes, {world_size()}")
        # Without matplotlib a script runs whole, but draws nothing.
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            print_on_main("skipped: pictures, which need matplotlib (pip install matplotlib)")
            args.plot = False
        return args

    def _chosen_defaults(self, args):
        """The defaults {option: value} of the run, or of the data set and the network."""
        if args.eval and args.name:
            folder = Path(args.out_dir, self.script, args.name)
            if os.path.isdir(folder):
                return read_options(folder)
        preset = args.dataset if args.preset is None else args.preset
        preset = preset.split(":")[0]  # folder:PATH
        if preset not in self.presets or preset in ("pretrained", "frozen"):
            self.error(f"--dataset or --preset {preset}: choose one of {self.names}; or --dataset "
                       "folder:PATH for your own images")
        values = dict(self.presets[preset])
        has_pretrained = values.get("model", "").startswith("torchvision/")
        if args.model.startswith("torchvision/") and not has_pretrained:
            values.update(self.presets["pretrained"])
        if args.freeze:
            values.update(self.presets["frozen"])
        return values


def add_training_options(parser, datasets, networks):
    add = parser.add_argument_group("data, network and training, in all scripts").add_argument
    add("--dataset", metavar="NAME",
        help=f"data set, with the paper's settings for it: {datasets}; or folder:PATH for "
        "your own images in PATH/train/<class>/* and PATH/test/<class>/*")
    add("--preset", metavar="NAME", help="use the settings of another data set")
    add("--image-size", type=between(1, 4096, int),
        help="side length in pixels, of images from files (folders: 32) and for torchvision/NAME "
        "(files and --weights DEFAULT: the size of torchvision's weights)")
    add("--limit-train", type=at_least(2), metavar="N",
        help="train on N examples only, in which the classes keep their shares")
    add("--model", metavar="NAME",
        help=f"network: {networks}; or torchvision/NAME, with NAME as in torchvision.models")
    add("--weights", metavar="W",
        help="weights of torchvision/NAME: DEFAULT (if nothing is given) downloads them, none "
        "draws random ones, and FILE is a state dict of your own")
    add("--freeze", action="store_true",
        help="train only the last layer of torchvision/NAME, on features that are computed once")
    add("--width", type=between(0.01, 64), default=1.0,
        help="factor on the number of channels; 1 is the paper's network")
    add("--seed", type=between(0, 2**31 - 1, int), default=1,
        help="random seed of initialisation, split, order and augmentation")
    add("--epochs", "-e", type=at_least(0), help="number of passes over the training set")
    add("--batch-size", "-b", type=at_least(1), help="global batch size (sum over processes)")
    add("--lr", type=at_least(0, float),
        help="learning rate at its highest, for any number of processes")
    add("--amp", choices=["off", "bf16"], default="off",
        help="bf16 runs the network in bfloat16 (automatic mixed precision)")
    add("--limit-steps", type=at_least(1), help="end each epoch after this number of steps")


def add_run_options(parser):
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument_group("the run, in all scripts").add_argument
    add("-h", "--help", action="store_true", default=argparse.SUPPRESS,
        help="show the options, with the defaults of the chosen data set")
    add("--runs", type=at_least(1), default=1,
        help="number of repetitions with other seeds, for mean and standard error")
    add("--predict", metavar="SET", help="write predictions.csv for a data set, "
        "folder:PATH or nonsense (patterns and noise)")
    add("--data-dir", default="data", help="data directory; missing sets are downloaded to it")
    add("--out-dir", default="runs", help="results are written to OUT_DIR/<script>/<name>/")
    add("--name", help="name of the run directory, otherwise made from the options; --eval --name "
        "takes all options from it")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto",
        help="auto is a GPU if there is one")
    add("--workers", type=between(0, 256, int), default=4,
        help="number of data loading workers, for images that are read from files")
    add("--compile", action=flag, default=False, help="compile the network (torch.compile)")
    add("--eval", action="store_true", help="evaluate a finished run without training")
    add("--fresh", action="store_true", help="start over, ignoring checkpoints")
    add("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")


def read_options(folder):
    """The options {name: value} with which a run directory was made."""
    path = folder / "options.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is missing or damaged ({one_line(error)}); use --fresh to start "
                        "over") from None


def options(args):
    """All options of parsed arguments, by name."""
    return {name: value for name, value in vars(args).items() if name != "given"}


def with_options(args, **changes):
    """A copy of parsed arguments with some options changed."""
    return argparse.Namespace(**{**vars(args), **changes})


def refuse(args, names, reason):
    """Refuse options that were given although they would have no effect."""
    for name in sorted(args.given.intersection(names)):
        flag = name.replace("_", "-")
        raise UserError(f"--{flag} has no effect {reason}; remove this option")


def join_name(*parts):
    """The name of a run directory, from texts and None (skipped): "cifar10-resnet18-w0.5"."""
    name = "-".join(str(part) for part in parts if part is not None)
    return re.sub(r"[^\w.+-]+", "_", name)


# ---- Files --------------------------------------------------------------------------------------


def one_line(error):
    """An exception's message on one line, shortened; its type where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def as_json(value):
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


def write(path, content):
    """Write bytes or text to a temporary file, then rename it: `path` is whole, or not changed."""
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


def to_bytes(state):
    """A checkpoint (tensors and plain Python values) as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_tensors(path):
    """The dictionary of tensors and plain Python values in a file of torch.save, on the CPU.

    The main process reads the file for all. Nothing but tensors and plain values is unpickled
    (weights_only), and the checksums of the zip archive are verified.
    """
    def read():
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None

    file = io.BytesIO(on_main(read))
    state = None
    try:
        # testzip names the first record with a wrong checksum; before PyTorch 1.6 there was no zip.
        damaged = zipfile.is_zipfile(file) and zipfile.ZipFile(file).testzip()
        file.seek(0)
        # torchvision's own training scripts keep their options in a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            if not damaged:
                state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types; PyTorch's own text proposes weights_only=False
        if as_user_error(error) is not None:
            raise  # out of memory: the file may be whole
        kind = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if kind:
            raise UserError(f"{path} holds an object of {kind[1]} (a whole pickled network?), "
                            "which can run any code when it is read; save tensors alone: "
                            "torch.save(net.state_dict(), FILE)") from None
    if not isinstance(state, dict):
        raise UserError(f"{path} is damaged, or holds no dictionary of tensors; a checkpoint of "
                        "this script is replaced by --fresh")
    return state


def all_finite(value):
    """Whether every number and tensor in nested dicts and lists is free of NaN and infinity."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, (float, np.floating)) or math.isfinite(value)


def digest(net):
    """A hexadecimal digest of the weights and buffers of a network."""
    content = hashlib.sha256()
    for tensor in net.state_dict().values():
        flat = tensor.cpu().flatten().clone(memory_format=torch.contiguous_format)
        content.update(flat.view(torch.uint8).numpy())
    return content.hexdigest()


# ---- Runs ---------------------------------------------------------------------------------------

# These options identify a run, but only act on its training: with --eval they may differ.
ONLY_TRAINING = {"augment", "batch_size", "limit_steps"}
# What --fresh deletes; the first are left by a process that was killed, and always deleted. The
# options come last: while they are there, they fit the other files.
RUN_FILES = (".*.tmp", "*.pt", "*.csv", "*.png", "results.json", "options.json")


class Run:
    """A run directory OUT_DIR/<script>/<name> with checkpoints, results and pictures.

    It belongs to one set of options (see NOT_IDENTITY) and one command at a time. Make it after all
    other checks, because this creates and locks the directory. All processes call its methods
    together, but `write`, `write_csv` and `save_figure`: these are for the main process alone.
    """

    def __init__(self, args, script, name, evaluation_options=()):
        """evaluation_options: what the script lets differ between commands in one directory."""
        name = args.name or name
        if not re.fullmatch(r"\w[\w .+=,@-]{0,199}", name) or name.endswith(" "):
            raise UserError(f"--name {name!r}: give a short name of letters, digits and _.+=,@-, "
                            "which begins with a letter or a digit; not a path")
        self.args = args
        self.script = script
        self.dir = Path(args.out_dir, script, name)
        self.began = time.perf_counter()
        self.histories = {}  # {checkpoint: a row for each epoch}
        not_identity = NOT_IDENTITY.union(evaluation_options)
        self.identity = on_main(self._open, not_identity)  # the options that identify it
        shown = [f"{name} {value}" for name, value in self.identity.items() if value is not None]
        print_on_main(f"{script}: {', '.join(shown)}; {args.device.type}, {world_size()} "
                      f"process(es) of {torch.get_num_threads()} thread(s)")
        print_on_main(f"run directory {self.dir}")

    def _open(self, not_identity):
        """Create and lock the directory, check its options; returns those that identify the run."""
        exists = os.path.isdir(self.dir)
        if self.args.eval and self.args.epochs > 0 and not exists:
            raise UserError(f"no run in {self.dir}; train it first, without --eval")
        is_evaluation = self.args.eval and exists
        # A finished run may lie where nothing can be written: it can still be evaluated.
        self.writable = not is_evaluation or os.access(self.dir, os.W_OK)
        if self.writable:
            self._lock()
        elif self.args.predict:
            raise UserError(f"{self.dir} is read-only; --predict needs a copy of it")
        else:
            print(f"skipped: writing to {self.dir}, which is read-only", flush=True)
        here = {name: value for name, value in as_json(options(self.args)).items()
                if name not in NOT_STORED}
        there = here
        # Without the options, nobody knows what checkpoints were made with.
        if os.path.exists(self.dir / "options.json") or any(self.dir.glob("*.pt")):
            there = read_options(self.dir)
        names = (there.keys() | here.keys()) - not_identity
        advice = "use another --name, or --fresh to start over"
        if self.args.eval:
            names -= ONLY_TRAINING
            advice = "use these to evaluate it"
        differing = [name for name in sorted(names) if there.get(name) != here.get(name)]
        if differing:
            shown = ", ".join(f"{name} {there.get(name)}" for name in differing)
            raise UserError(f"{self.dir} was made with other options: {shown}; {advice}")
        if not is_evaluation:
            self.write("options.json", json.dumps(here, indent=1))
        # With --eval, too, results.json names the options of the training.
        return {name: there[name] for name in there if name not in not_identity}

    def _lock(self):
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.dir / ".lock", "a")  # locked until `report` closes it
            if fcntl:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for pattern in RUN_FILES if self.args.fresh else RUN_FILES[:1]:
                for path in self.dir.glob(pattern):
                    path.unlink()
        except BlockingIOError:
            raise UserError(f"{self.dir} is locked by another process; wait for it, or use another "
                            "--name") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.dir} ({error.strerror}); use another --out-dir "
                            "or --name") from None

    def _origin(self, made_from):
        """What a file is made from: `made_from`, as JSON, and the options of the run."""
        return {**broadcast(as_json(made_from)), "options": self.identity}

    def resume(self, name, epochs, made_from, **parts):
        """Restore `parts` from the checkpoint `name`; returns its history, a row for each epoch.

        parts: objects with a state_dict, such as net=... and optimiser=...; without a checkpoint
        they are not changed, and the history is []. made_from: {plural noun: value} of what the
        training depends on beside the options. A checkpoint with other values is refused, and with
        --eval one of fewer than `epochs` epochs.
        """
        path = self.dir / f"{name}.pt"
        history = []
        made_from = self._origin(made_from)
        if on_main(path.exists):
            state = load_tensors(path)
            found = state.get("made_from") or {}
            nouns = [noun for noun in made_from if found.get(noun) != made_from[noun]]
            if nouns:
                raise UserError(f"{path} was made from other {' or '.join(nouns)}; use another "
                                "--name, or --fresh to start over")
            try:
                for key, part in parts.items():
                    part.load_state_dict(state[key])
                history = [dict(row) for row in state["history"]]
            except Exception as error:  # a part is missing, or has other names or shapes
                raise UserError(f"{path} does not fit this network ({one_line(error)}); use "
                                "--fresh to start over") from None
        if self.args.eval and len(history) < epochs:
            raise UserError(f"{path} has {len(history)} of {epochs} epochs; finish this run first")
        if not self.args.eval and len(history) >= epochs > 0:
            print_on_main(f"{name}: trained already; --fresh trains again")
        self.histories[name] = history
        return history

    def save(self, name, history, made_from, **parts):
        """Save `parts` and the history as the checkpoint `name`, and print the last row.

        history: {"epoch": from 1, name: number, ...} for each epoch. NaN and infinity are refused.
        """
        state = {key: part.state_dict() for key, part in parts.items()}
        if not all_finite([history, state]):
            raise UserError(f"{name}: training diverged in epoch {len(history)}; the checkpoint "
                            "before it is kept; use a lower learning rate")
        state.update(history=as_json(history), made_from=self._origin(made_from))
        # The log comes first: a kill between the two leaves no checkpoint without its log.
        on_main(self.write, f"{name}.csv", to_csv(history))
        on_main(lambda: self.write(f"{name}.pt", to_bytes(state)))
        shown = [f"{key} {value:.4g}" for key, value in history[-1].items()]
        print_on_main(f"{name}  {'  '.join(shown)}")

    def load_or_compute(self, name, made_from, compute):
        """The values `name`, {name: CPU tensor or plain value}: read, or else computed and saved.

        They are read if they were made from the same `made_from`, {name: value}, with the same
        options. All processes call compute(); the main process's result is saved, and returned.
        """
        path = self.dir / f"{name}.pt"
        made_from = self._origin(made_from)
        if on_main(path.exists):
            state = load_tensors(path)
            found = dict(state.get("made_from") or {})
            if self.args.eval and "initial weights" not in made_from:
                found.pop("initial weights", None)  # their file is gone: see data.origin
            if found == made_from:
                return state
        state = broadcast({**compute(), "made_from": made_from})
        if not all_finite(state):
            raise UserError(f"{name}: a value is not finite; use a lower learning rate")
        on_main(lambda: self.write(path.name, to_bytes(state)))
        return state

    def write(self, name, content):
        """Write bytes or text as a file of the directory."""
        if self.writable:
            write(self.dir / name, content)

    def write_csv(self, name, columns):
        """Write a table {column: values [N]} as a CSV file of the directory."""
        columns = as_json(columns)
        rows = [dict(zip(columns, line)) for line in zip(*columns.values(), strict=True)]
        self.write(name, to_csv(rows))
        if self.writable:
            print(f"{self.dir / name}: {len(rows)} rows", flush=True)

    def save_figure(self, figure, name):
        """Write a matplotlib figure as a PNG file of the directory."""
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        self.write(name, buffer.getvalue())

    def report(self, rows, columns, shown=None, **extra):
        """Write the rows to results.json and results.csv, and print the table; returns the rows.

        rows: {"method", "seed", "set", "against" (optional), "n", metric: value, ...}, where n is
        the number of examples of `set`. columns: the metrics that the table shows; shown: the rows
        that it shows, if not all; extra: what else results.json stores.
        """
        rows = as_json(rows)
        content = {"script": self.script, "config": {**options(self.args), **self.identity},
                   "columns": columns, "seconds": time.perf_counter() - self.began,
                   "environment": environment(self.args.device), "rows": rows, **extra}

        def store():
            self.write("results.json", json.dumps(as_json(content), indent=1))
            self.write("results.csv", to_csv(rows))
            if self.args.plot and any(self.histories.values()):
                self.save_figure(draw_histories(self.histories), "training.png")
            text = format_results(rows if shown is None else as_json(shown), columns)
            print(f"\n{text}\n", flush=True)
            if self.writable:
                print(f"results, pictures and log files are in {self.dir}", flush=True)
                self.lock.close()

        on_main(store)
        return rows


def environment(device):
    """What is needed to repeat a number: commit, versions, device, processes, threads."""
    commit = None
    command = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"commit": commit, "python": platform.python_version(), "torch": torch.__version__,
            "device": name, "tf32_in_convolutions": torch.backends.cudnn.allow_tf32,
            "processes": world_size(), "threads": torch.get_num_threads()}


def device_memory(device):
    """The memory of a device in bytes; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with contextlib.suppress(AttributeError, ValueError):  # Windows has neither name
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# ---- Tables -------------------------------------------------------------------------------------


def prediction_columns(dataset, log_probs, classes=()):
    """The columns of predictions.csv for a set: what each example is, and what is predicted.

    dataset: a set of data.py; log_probs {method: [M, N, K]} of M members or samples (1 of a single
    network); classes: the names of the K classes. After file (or index) and label (if known) come,
    for each method, predicted class, confidence, and total, aleatoric and epistemic uncertainty in
    nats; the columns of all methods but the first end with its name. The epistemic uncertainty of
    a single network is empty.
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
    return columns


def example_columns(dataset, classes=()):
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


def class_names(labels, classes):
    """Class names of labels [N], or numbers where there are no names; None where it is -1."""
    names = dict(enumerate(classes))
    names[-1] = None
    return [names.get(label, label) for label in labels.tolist()]


KEYS = ("run", "method", "set", "against", "n")  # of a row; all else but the seed is a metric


def pool(rows, metrics):
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


def pooled_text(values, independent=True, digits=None):
    """The mean and, where it is defined, the standard error of numbers: "0.912 ± 0.004".

    None stands for a number that is missing, infinite or not a number; the text then says how many
    values it is made from: "0.912 ± 0.004 (2 of 3)". Texts and equal counts are shown as they are.
    """
    found = [value for value in values if value is not None]
    if not found:
        return None
    text = " or ".join(dict.fromkeys(map(str, found)))  # of texts and equal counts
    is_count = isinstance(found[0], int) and len(set(found)) == 1
    if isinstance(found[0], (int, float)) and not is_count:
        mean = float(np.mean(found))
        if digits is None:
            digits = ".5g"
            if abs(mean) < 1000:
                digits = ".4f" if abs(mean) < 10 else ".1f"
        text = format(mean, digits)
        if len(found) > 1 and independent:
            text += f" ± {standard_error(found):{digits}}"
    if len(found) < len(values):
        text += f" ({len(found)} of {len(values)})"
    return text


def to_csv(rows):
    """CSV text of rows {column: value}, numbers with six significant digits; None is empty."""
    columns = dict.fromkeys(itertools.chain(*rows))  # in order of appearance
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([six_digits(row.get(name)) for name in columns])
    return text.getvalue()


def six_digits(value):
    return f"{value:.6g}" if isinstance(value, float) else value


def format_table(rows, style="text"):
    """Rows {column: value} as aligned text, or for LaTeX (style "latex"), without empty columns."""
    columns = []
    for name in rows[0]:
        cells = ["" if row[name] is None else str(row[name]) for row in rows]
        if any(cells):
            columns.append([name] + cells)
    if style == "latex":
        return as_latex(columns)
    for cells in columns:
        width = max(map(len, cells))
        cells.insert(1, "".ljust(width, "-"))
        cells[:] = [cell.ljust(width) for cell in cells]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


def as_latex(columns):
    """Columns of cells, the first of each its name, as a tabular of LaTeX."""
    def escape(cell):
        cell = re.sub(r"([_%&#])", r"\\\1", cell)
        return re.sub("^-", "$-$", cell).replace("±", r"$\pm$")  # a minus, not a hyphen

    lines = [" & ".join(map(escape, line)) + r" \\" for line in zip(*columns)]
    lines.insert(1, r"\hline")
    alignment = "".ljust(len(columns), "l")
    text = "\n".join(lines)
    return f"\\begin{{tabular}}{{{alignment}}}\n{text}\n\\end{{tabular}}"


def format_results(rows, metrics, style="text"):
    """A table of the predictions on each set, then one of the comparisons of two sets."""
    single = [row for row in rows if not row.get("against")]
    pairs = [row for row in rows if row.get("against")]
    tables = [format_table(pool(part, metrics), style) for part in (single, pairs) if part]
    return "\n\n".join(tables)


def side_by_side(rows, metrics):
    """Pooled rows as papers print them: a line for each method, the data sets side by side.

    Methods are ordered by their numbers of members: "DE, K=1", "SWAG, K=1", "DE, K=5", ...
    """
    def members(line):
        found = re.search(r"K=(\d+)$", line["method"])
        return int(found[1]) if found else 0

    lines = {}  # {method: line}
    empty = {}  # a line with all columns, in order of appearance
    for row in pool(rows, metrics):
        line = lines.setdefault(row["method"], {"method": row["method"]})
        where = "/".join(filter(None, (row["set"], row["against"])))
        where = " ".join(filter(None, (where, row["run"])))
        line |= {f"{where} {metric}": row[metric] for metric in metrics}
        empty |= dict.fromkeys(line)
    return [empty | line for line in sorted(lines.values(), key=members)]


def run_label(content, contents):
    """The options in which a run differs from others of its script: "width=0.5 epochs=3".

    It begins with the name of the script if there are several: their rows are not pooled.
    """
    configs = [other["config"] for other in contents if other["script"] == content["script"]]
    words = []
    if len(configs) < len(contents):
        words.append(content["script"])
    # Where the data lie may be all that differs: two sets of one name.
    hidden = NOT_IDENTITY - {"data_dir"} | {"seed"}
    for name, value in content["config"].items():
        if name not in hidden and any(config.get(name) != value for config in configs):
            words.append(f"{name}={value}")
    return " ".join(words) or None


def column_label(content, contents):
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


def join_pairs(rows):
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


def chosen_rows(rows, args):
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


def table(argv=None):
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
    contents = []
    for directory in args.runs:
        try:
            found = json.loads(Path(directory, "results.json").read_text())
            contents.append({name: found[name] for name in ("script", "config", "columns", "rows")})
        except (OSError, ValueError, KeyError, TypeError):
            print(f"skipped: {directory} is not the directory of a finished run", file=sys.stderr)
    one_script = len({content["script"] for content in contents}) == 1
    rows = []
    columns = {}  # a dictionary, because it keeps the order
    for content in contents:
        # Runs with the same label differ only in their seeds: their rows are pooled.
        label = run_label(content, contents)
        columns |= dict.fromkeys(content["columns"])
        of_run = content["rows"]
        if args.side_by_side:
            label = column_label(content, contents)
        elif not one_script:
            of_run = join_pairs(of_run)
        rows += [{**row, "run": label} for row in of_run]
    rows = chosen_rows(rows, args)
    metrics = args.metrics or (columns if one_script else SHARED_COLUMNS)
    if args.side_by_side:
        text = format_table(side_by_side(rows, metrics), args.format)
    elif one_script:
        text = format_results(rows, metrics, args.format)
    else:
        text = format_table(pool(rows, metrics), args.format)
    print(text, flush=True)


# ---- Pictures, and the start of a script --------------------------------------------------------


def make_figure(rows, columns, figsize, **options):
    """A matplotlib figure for a file, and its axes; the options are those of Figure.subplots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


# These six can be told apart by colour-blind people.
COLOURS = ("#4477AA", "#CCBB44", "#AA3377", "#228833", "#EE6677", "#66CCEE")


def colours(count):
    """`count` different colours."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps

    return colormaps["turbo"](np.linspace(0.05, 0.95, count))


def draw_histories(histories):
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


def as_user_error(error):
    """The UserError that says what an exception means to the user; None for programming errors."""
    if isinstance(error, UserError):
        return error
    # PyTorch's allocator of CPU memory raises a RuntimeError; the second text is Windows's.
    text = str(error)
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if out_of_memory or "can't allocate memory" in text or "not enough memory" in text:
        return UserError("out of memory; use a smaller --batch-size or --width, --amp bf16, or a "
                         "device with more memory")
    # Errors of standard output name no file.
    if isinstance(error, OSError) and error.filename is None:
        if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EBADF):
            return UserError(f"cannot print ({error.strerror}); what was saved is kept")
    return None


def launch(main):
    """Run main(). A UserError is printed as one line, with exit status 2.

    SIGINT and SIGTERM end the script at once, with one line and status 130 or 143.
    """
    script = Path(sys.argv[0]).name
    own = os.getpid()

    def stop(signum, frame):
        if is_main() and os.getpid() == own:  # data loading workers print nothing
            name = signal.Signals(signum).name
            print(f"{script}: stopped by {name}; the same command resumes from the last completed "
                  "epoch", file=sys.stderr, flush=True)
        os._exit(128 + signum)

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
