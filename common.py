"""What the five scripts share: metrics, and the lines that make a run trustworthy.

  Metrics    accuracy, likelihood, calibration, ensemble decomposition, out-of-distribution (OOD)
             detection, rejection, temperature scaling, regression by mixtures of Gaussians
  Processes  one process, or those that torchrun started: seeds, gathering, batch norm
  Options    the command line that all scripts share, with a preset for each data set
  Runs       the run directory: checkpoints, epochs that resume, saved states, results
  Tables     mean and standard error over seeds; predictions as CSV

No model, no loss, nothing of one paper. As a program it tabulates the results of finished runs:

  python common.py table runs/ddu/* [--metrics accuracy nll] [--format text|markdown]
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
    # Errors of standard output name no file: a closed pipe (`| head`), a full device.
    if isinstance(error, OSError) and error.filename is None:
        if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EBADF):
            return UserError(f"cannot print ({error.strerror}); what was saved is kept")
    return None


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
      rmi        (1/M) sum_m KL(pi || p_m), the reverse mutual information
      epkl       (1/M^2) sum_ij KL(p_i || p_j) = epistemic + rmi
    rmi and epkl are infinite where a member excludes a class that another one does not.
    """
    log_probs = _tensor(log_probs, "log_probs", 3)
    # In blocks of rows: ten members of ImageNet would take 4 GB a tensor.
    rows = max(1, 2**22 // log_probs[:, 0].numel())
    blocks = [_uncertainty_of_block(block.double()) for block in log_probs.split(rows, 1)]
    total, aleatoric, epistemic, rmi = torch.cat(blocks, 1)
    return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic, "rmi": rmi,
            "epkl": epistemic + rmi}


def _uncertainty_of_block(log_p):
    """total, aleatoric, epistemic and rmi of log probabilities [M, n, K]: [4, n]."""
    p = log_p.exp()                                                    # [M, N, K]
    _check_probs(p, "exp(log_probs)")
    pi = (log_p.logsumexp(0) - math.log(len(log_p))).exp()             # [N, K]
    total = torch.special.entr(pi).sum(-1)                             # [N]  H(pi)
    aleatoric = torch.special.entr(p).sum(-1).mean(0)                  # [N]  mean_m H(p_m)
    cross_terms = (pi * log_p.mean(0)).masked_fill(pi == 0, 0)
    cross_entropy = -cross_terms.sum(-1)                               # [N]  mean_m H(pi, p_m)
    parts = torch.stack([total, aleatoric, total - aleatoric, cross_entropy - total])
    return parts.clamp_min(0)


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
    confidence = np.concatenate([id_scores, ood_scores])
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

    low, high = TEMPERATURES
    if slope(math.log(high)) > 0:
        return high  # worse than guessing: the flatter, the better
    if slope(math.log(high)) == 0:
        return 1.0
    if slope(math.log(low)) <= 0:
        return low  # no errors: the sharper, the better
    return math.exp(brentq(slope, math.log(low), math.log(high), xtol=1e-9))


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

# Inside `on_main` the main process behaves as if there were no other: what it calls there (a
# loader, another on_main) must not wait for processes that do not call it.
_alone = False


def start(device="auto"):
    """Choose this process's device, and join the other processes if torchrun started several.

    device: auto (a GPU if there is one), cpu, cuda or mps.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: not found on this machine; use --device cpu")
    if device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0))
        count = torch.cuda.device_count()
        if index >= count:
            raise UserError(f"--device cuda: process {index} needs a GPU of its own, and this "
                            f"machine has {count}; start fewer processes, or use --device cpu")
        device = f"cuda:{index}"
        torch.cuda.set_device(device)
        # The shapes of a script's batches hardly change, so the search for fast kernels pays.
        torch.backends.cudnn.benchmark = True
    if several and not dist.is_initialized():
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
    if _alone:
        return 0
    return int(os.environ.get("RANK", 0))


def world_size():
    """The number of processes."""
    if _alone or not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size()


def is_main():
    """Whether this is the process of rank 0, which reads and writes files, fits and prints."""
    return rank() == 0


def say(text):
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
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def on_main(work, *arguments):
    """Call work(*arguments) on the main process alone; every process gets its result.

    An error that the user can fix is raised on every process: none waits for one that has stopped.
    Inside, the main process behaves as if there were no other (`rank`, `world_size`, loaders).
    """
    global _alone
    before = _alone
    result = None
    error = None
    if is_main():
        _alone = True
        try:
            result = work(*arguments)
        except Exception as found:
            error = as_user_error(found)
            if error is None:
                raise
        finally:
            _alone = before
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def on_each_machine(work, *arguments):
    """Call work(*arguments) on one process of each machine, then on its other processes.

    For downloads and caches: the first call on a machine makes the files that the others read. If a
    call raises a UserError, every process of every machine raises it.
    """
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    result = None
    error = None
    for turn in ("first", "others"):
        if (turn == "first") == is_first:
            try:
                result = work(*arguments)
            except UserError as found:
                error = found
        # Gathering also waits until all processes have had this turn.
        errors = [other for other in gather_objects(error) if other is not None]
        if errors:
            raise errors[0]
    return result


def derive_seed(*key):
    """A 63-bit seed from integers (seed, epoch, ...), well mixed: similar keys share nothing."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state[0] >> 1)


def seed_all(*key):
    """Seed Python, NumPy and PyTorch on all devices from the integers `key`."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seeded_noise(shape, device, *key):
    """Standard normal numbers of a shape, drawn on the device: a function of the integers `key`."""
    generator = torch.Generator(device).manual_seed(derive_seed(*key))
    return torch.randn(*shape, generator=generator, device=device)


def all_reduce(tensor):
    """Sum a tensor over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_rows(batches):
    """Bring together the rows that all processes computed for one set.

    batches: for each batch a dictionary {"index": the rows of the set [b], name: values [b, ...]}.
    Returns {name: [N, ...]} on the CPU, in the order of the set, exactly one row for each example;
    on the processes other than the main one {}.
    """
    columns = {}
    for name in batches[0]:
        # A piece of a batch is empty where it has fewer examples than there are processes.
        parts = [batch[name] for batch in batches if len(batch["index"]) > 0]
        column = torch.cat(parts or [batches[0][name]]).cpu().contiguous()
        columns[name] = _gather_on_main(column)
    if not is_main():
        return {}
    index = columns.pop("index")
    order = index.argsort()
    if not torch.equal(index[order], torch.arange(len(index))):
        raise RuntimeError(f"rows are missing or occur twice among {len(index)}")
    return {name: column[order] for name, column in columns.items()}


def _gather_on_main(column):
    """The rows [b, ...] of all processes, by rank, on the main process."""
    lengths = gather_objects(len(column))
    if not is_main():
        dist.send(column, 0)
        return None
    parts = [column]
    for sender in range(1, len(lengths)):
        part = column.new_empty(lengths[sender], *column.shape[1:])
        dist.recv(part, sender)
        parts.append(part)
    return torch.cat(parts)


class _AllReduceSum(torch.autograd.Function):
    """Every process's loss depends on every process's x: the gradients are summed, too."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad):
        return _AllReduceSum.apply(grad)


def all_reduce_sum(x):
    """The sum of x over all processes, differentiable any number of times."""
    if world_size() == 1:
        return x
    return _AllReduceSum.apply(x)


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with the statistics of the global batch, on every device, differentiable twice.

    The statistics are computed in float32, also of bfloat16, and in two passes (the mean, then the
    centred second moment), because E[x^2] - E[x]^2 cancels. A process may have no image of a batch.
    """

    def forward(self, x):
        if not self.training or world_size() == 1:
            return super().forward(x)
        # The number of pixels travels with the sums, because processes may differ in it.
        pixels = self.weight.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([x.sum((0, 2, 3), dtype=pixels.dtype), pixels])
        total, count = all_reduce_sum(sums).split([x.shape[1], 1])
        mean = total / count                                           # [C]
        centred = x - mean[:, None, None]                              # [B, C, H, W]
        var = all_reduce_sum(centred.square().sum((0, 2, 3))) / count  # [C]
        with torch.no_grad():
            # As in PyTorch, the running variance is the unbiased one.
            unbiased = var * count / (count - 1).clamp_min(1)
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        normalised = centred * scale[:, None, None] + self.bias[:, None, None]
        return normalised.to(x.dtype)


def data_parallel(net, device):
    """Wrap `net` in DistributedDataParallel, with batch norm over the global batch.

    The number of processes then does not change the result of a training step, beyond rounding.
    """
    if world_size() == 1:
        return net
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            usual = module.affine and module.track_running_stats and module.momentum is not None
            if not (isinstance(module, nn.BatchNorm2d) and usual):
                raise UserError(f"{module}: only BatchNorm2d with weights and a running average "
                                "can share its statistics over processes; start one process")
            module.__class__ = GlobalBatchNorm2d  # parameters and buffers stay the same objects
    device_ids = [device.index] if device.type == "cuda" else None
    # Buffers are equal on all processes already. PyTorch 2.14 renamed the option that copies them.
    options = {"broadcast_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        options = {"forward_sync_buffers": False}
    return DistributedDataParallel(net, device_ids=device_ids, **options)


def check_layers(name, made, shape):
    """Check what a function of a table NETWORKS returned: layers [list or dict], and D.

    name: of the network; shape (C, H, W) of its images, of which the layers make D features.
    """
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], int)):
        raise UserError(f"--model {name}: its function must return the list of layers before the "
                        "head, and the number of their features")
    layers, dim = made
    modules = layers.values() if isinstance(layers, dict) else layers
    # In eval mode and on the CPU, no random number is drawn and no statistic of batch norm changes:
    # what is trained later does not depend on this check.
    body = nn.Sequential(*modules).eval()
    try:
        with torch.no_grad():
            found = list(body(torch.zeros(1, *shape)).shape)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--model {name} fails on images {tuple(shape)}: {one_line(error)}; use "
                        "another --model or --image-size") from None
    body.train()
    if found != [1, dim]:
        raise UserError(f"--model {name}: its layers make outputs {found} of one image, but its "
                        f"function returns {dim} as the number of features, which needs [1, {dim}]")
    return layers, dim


def autocast(args):
    """The precision of a forward pass: bfloat16 with --amp bf16."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


# ---- Options ------------------------------------------------------------------------------------


def between(low, high, kind=float):
    """An argparse type: a number of a kind (int or float) in [low, high]."""
    limits = f"between {low} and {high}"
    if high == math.inf:
        limits = f"at least {low}"

    def number(text):
        message = f"{text}: must be a number, {limits}"
        try:
            value = kind(text)
            is_finite = math.isfinite(value)
        except (ValueError, OverflowError):  # not a number, or an integer of 400 digits
            raise argparse.ArgumentTypeError(message) from None
        if not low <= value <= high or not is_finite:
            raise argparse.ArgumentTypeError(message)
        return value

    return number


def at_least(low, kind=int):
    """An argparse type: a finite number of a kind (int or float), not below `low`."""
    return between(low, math.inf, kind)


class Parser(argparse.ArgumentParser):
    """The command line that all scripts share, in six groups to which a script adds its options.

    presets: {data set: {option: value}}; the key "" holds what a preset does not say, "folder" is
    for the user's own images. modes: {option: {option: value}}, defaults that replace the preset's
    where the first option is given.

    The groups decide what identifies a run. Options of "data", "network", "training" and "method"
    do: another value needs another run directory. Options of "evaluation" and "run" do not: the
    former only change what is computed from trained networks, the latter where and how fast.
    """

    def __init__(self, doc, presets, default, modes=None):
        super().__init__(prog=Path(sys.argv[0]).name, description=doc.splitlines()[0],
                         epilog="Equations and differences from the paper: the top of the file.",
                         allow_abbrev=False, add_help=False)
        self.presets = presets
        self.default = default
        self.modes = modes or {}
        self.groups = {}
        for title in ("data", "network", "training", "method", "evaluation", "run"):
            self.groups[title] = self.add_argument_group(title)
        self._add_shared_options()

    def group(self, title):
        """An option group; call its `add_argument`."""
        return self.groups[title]

    def _add_shared_options(self):
        flag = argparse.BooleanOptionalAction
        names = ", ".join(name for name in self.presets if name not in ("", "folder"))
        self.add_argument("-h", "--help", action="store_true",
                          help="show the options, with the defaults of the chosen data set")
        add = self.groups["data"].add_argument
        add("--dataset", default=self.default, metavar="NAME",
            help=f"data set, with the paper's settings for it: {names}; or folder:PATH for your "
            "own images in PATH/train/<class>/* and PATH/test/<class>/*")
        add("--preset", metavar="NAME", help="use the settings of another data set")
        add("--image-size", type=between(1, 4096, int),
            help="side length of images that are read from files, in pixels (folders: 32)")
        add("--limit-train", type=at_least(2), metavar="N",
            help="train on N examples only, evenly spaced")
        add = self.groups["network"].add_argument
        add("--width", type=between(0.01, 64), default=1.0,
            help="factor on the number of channels; 1 is the paper's network")
        add = self.groups["training"].add_argument
        add("--seed", type=between(0, 2**31 - 1, int), default=1,
            help="random seed of initialisation, split, order and augmentation")
        add("--epochs", "-e", type=at_least(0), help="number of passes over the training set")
        add("--batch-size", "-b", type=at_least(1),
            help="global batch size (sum over processes)")
        add("--lr", type=at_least(0, float),
            help="learning rate at its highest, for any number of processes")
        add("--amp", choices=["off", "bf16"], default="off",
            help="bf16 runs the network in bfloat16 (automatic mixed precision)")
        add("--limit-steps", type=at_least(1), help="end each epoch after this number of steps")
        add = self.groups["evaluation"].add_argument
        add("--runs", type=at_least(1), default=1,
            help="number of repetitions with other seeds, for mean and standard error")
        add("--predict", metavar="SET",
            help="write predictions.csv for a data set or folder:PATH")
        add = self.groups["run"].add_argument
        add("--data-dir", default="data", help="data directory; missing sets are downloaded to it")
        add("--out-dir", default="runs", help="results are written to OUT_DIR/<script>/<name>/")
        add("--name", help="name of the run directory [default: made from the options]")
        add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto",
            help="auto is a GPU if there is one")
        add("--workers", type=between(0, 256, int), default=4,
            help="number of data loading workers, for images that are read from files")
        add("--compile", action=flag, default=False, help="compile the network (torch.compile)")
        add("--eval", action="store_true", help="evaluate a finished run without training")
        add("--fresh", action="store_true", help="start over, ignoring checkpoints")
        add("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")

    def error(self, message):
        raise UserError(message.removeprefix("argument "))

    def parse(self, argv=None):
        """Options from the command line, or else from the mode, the preset and the defaults.

        Starts the device. The result also has `explicit`, the names of the options that were
        given, and `identity`, those of the options that identify the run.
        """
        defaults = {}
        for action in self._actions:
            defaults[action.dest] = action.default
            # Parsing then gives exactly the options of the command line.
            action.default = argparse.SUPPRESS
        given = vars(self.parse_args(argv))
        preset = self._preset_of(given)
        # Later ones win: the defaults, all presets' common part, the preset, the mode.
        values = {**defaults, **self.presets[""], **self.presets[preset]}
        for mode, changes in self.modes.items():
            if given.get(mode):
                values.update(changes)
        if given.get("help"):
            self._print_help_with(values)
            self.exit()
        values.update(given)
        # The shell completes the names of folders with a slash.
        if values["dataset"].startswith("folder:"):
            values["dataset"] = values["dataset"].rstrip("/")
        del values["help"]
        args = argparse.Namespace(**values)
        args.explicit = set(given)
        args.identity = []  # not "evaluation" and "run"
        for title in ("data", "network", "training", "method"):
            args.identity += [action.dest for action in self.groups[title]._group_actions]
        if args.eval and args.fresh:
            self.error("--eval evaluates a finished run, --fresh starts it over: choose one")
        args.device = start(args.device)
        if args.batch_size < world_size():
            self.error(f"--batch-size {args.batch_size}: this is the global batch size, which must "
                       f"be at least the number of processes, {world_size()}")
        # Without matplotlib a script runs whole, but draws nothing.
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            say("skipped: pictures, which need matplotlib (pip install matplotlib)")
            args.plot = False
        return args

    def _preset_of(self, given):
        dataset = given.get("dataset", self.default)
        preset = given.get("preset", dataset)
        if preset.startswith("folder:"):
            preset = "folder"
        if dataset == "folder" or preset == "" or preset not in self.presets:
            option = "--preset" if "preset" in given else "--dataset"
            names = ", ".join(name for name in self.presets if name not in ("", "folder"))
            advice = "or --dataset folder:PATH for your own images"
            if os.path.isdir(preset):
                advice = f"or for your own images --dataset folder:{preset}"
            self.error(f"{option} {preset}: choose one of {names}; {advice}")
        return preset

    def _print_help_with(self, values):
        for action in self._actions:
            default = values[action.dest]
            if isinstance(action, argparse.BooleanOptionalAction):
                default = "on" if default else "off"
            if isinstance(default, list):
                default = " ".join(map(str, default))
            if default not in (None, "", False):
                action.help += f" [default: {default}]"
        self.print_help()


def options(args):
    """All options of parsed arguments, by name."""
    return {name: value for name, value in vars(args).items()
            if name not in ("explicit", "identity")}


def with_options(args, **changes):
    """A copy of parsed arguments with some options changed."""
    return argparse.Namespace(**{**vars(args), **changes})


def flag_of(name):
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def refuse(args, names, reason):
    """Refuse options that were given although they would have no effect."""
    for name in names:
        if name in args.explicit:
            raise UserError(f"{flag_of(name)} has no effect {reason}; remove this option")


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
    path = Path(path)
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


def load_checkpoint(path):
    """A dictionary of tensors and plain Python values, on the CPU.

    The main process reads the file for all. The checksums of the zip archive are verified, and
    nothing but tensors and plain values is unpickled (weights_only).
    """
    def read():
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None

    content = on_main(read)
    try:
        # testzip returns the name of the first file whose checksum is wrong.
        damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # of many types; PyTorch's own text proposes to switch off weights_only
        damaged = True
        state = None
    if damaged or not isinstance(state, dict):
        raise UserError(f"{path} is damaged, or is not a file of plain tensors; delete it to start "
                        "over, or give another file")
    return state


def load_arrays(path, names):
    """The arrays `names` of an .npz file, {name: array}."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = ", ".join(file) or "nothing"
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"file not found: {path}") from None
    except KeyError:
        raise UserError(f"{path} needs the arrays {', '.join(names)}; it has {found}") from None
    except Exception:  # NumPy raises many types for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None


def all_finite(value):
    """Whether every tensor in nested dicts and lists is free of NaN and infinity."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def digest(net):
    """A hexadecimal digest of the weights and buffers of a network."""
    content = hashlib.sha256()
    for tensor in net.state_dict().values():
        content.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return content.hexdigest()


# ---- Runs ---------------------------------------------------------------------------------------

# Options that identify a training run, but may have other values with --eval.
FREE_IN_EVAL = ("batch_size", "amp", "augment", "limit_steps")
# What a run directory holds; --fresh deletes these files.
RUN_FILES = ("*.pt", "*.jsonl", "*.csv", "*.png", "results.json", "options.json")
_locks = {}  # open files by folder: a run directory is locked until the process ends


def differences(there, here, free=()):
    """The names of options whose values differ."""
    names = {**there, **here}
    return [name for name in names if there.get(name) != here.get(name) and name not in free]


def as_flag(name, value):
    """An option as it is typed: "--epochs 5", "--no-sn"."""
    if value is None:
        return f"(no {flag_of(name)})"
    if value is True:
        return flag_of(name)
    if value is False:
        return flag_of(f"no_{name}")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return f"{flag_of(name)} {value}"


class Run:
    """A run directory OUT_DIR/<script>/<name> with checkpoints, logs, results and pictures.

    It belongs to one set of options and to one command at a time. The directory is created by the
    first call of `epochs`, `load` or `write`: a script makes its Run first, then checks everything
    else, and a refused start leaves nothing. Only the main process reads and writes: `write`,
    `write_csv` and `save_figure` are called on it alone, the other methods on all processes.
    """

    def __init__(self, args, script, name, identity=None):
        """identity: names of the options that identify the run [default: args.identity]."""
        name = args.name or name
        if not re.fullmatch(r"[^/\\\0]{1,200}", name) or name in (".", ".."):
            raise UserError(f"--name {name!r}: give a name, not a path")
        self.args = args
        self.script = script
        self.dir = Path(args.out_dir, script, name)
        names = args.identity if identity is None else identity
        self.config = as_json({option: getattr(args, option) for option in names})
        self.free = FREE_IN_EVAL if args.eval else ()
        self.writable = True
        self.claimed = False
        self.start = time.perf_counter()
        on_main(self._check_directory)
        shown = [f"{option} {getattr(args, option)}" for option in args.identity
                 if getattr(args, option) is not None]
        say(f"{script}: {', '.join(shown)}; {args.device.type}, {world_size()} process(es) of "
            f"{torch.get_num_threads()} thread(s)")
        say(f"run directory {self.dir}")

    def _check_directory(self):
        """Refuse a directory that was made with other options, or that --eval does not find."""
        path = self.dir / "options.json"
        if self.args.eval and self.args.epochs and not os.path.isdir(self.dir):
            raise UserError(f"no run in {self.dir}; train it first (the same command without "
                            "--eval)")
        if self.args.fresh:
            return
        try:
            there = json.loads(path.read_text())
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror}); use another --out-dir or "
                            "--name") from None
        except (ValueError, RecursionError):
            there = None
        if not isinstance(there, dict):
            raise UserError(f"{path} is damaged; use --fresh to start over")
        names = differences(there, self.config, self.free)
        if names:
            advice = "use another --name, or --fresh to start over"
            if self.args.eval:
                advice = "use these to evaluate it"
            flags = " ".join(as_flag(name, there.get(name)) for name in names)
            raise UserError(f"{self.dir} was made with other options: {flags}; {advice}")

    def claim(self):
        """Create and lock the directory, once; on the main process, before the first access."""
        if self.claimed or not self.writable:
            return
        if self.args.eval and self.dir.is_dir() and not os.access(self.dir, os.W_OK):
            say(f"skipped: writing to {self.dir}, which is read-only")
            self.writable = False
            return
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            # An earlier Run of this process may have locked the directory.
            file = _locks.get(self.dir.resolve()) or open(self.dir / ".lock", "a")
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._delete(".*.tmp")  # of a process that was killed
        except BlockingIOError:
            raise UserError(f"{self.dir} is locked by another process; wait for it, or use another "
                            "--name") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.dir} ({error.strerror}); use another --out-dir "
                            "or --name") from None
        _locks[self.dir.resolve()] = file
        # Another process may have finished its run here since the constructor's check.
        self._check_directory()
        if self.args.fresh:
            self._delete(*RUN_FILES)
        self.claimed = True
        # The options of a finished run stay: with --eval some of them may differ.
        if not (self.dir / "options.json").exists():
            self.write("options.json", json.dumps(self.config, indent=1))

    def _delete(self, *patterns):
        for pattern in patterns:
            for path in self.dir.glob(pattern):
                path.unlink()

    def write(self, name, content):
        """Write a file of the directory; on the main process."""
        self.claim()
        if self.writable:
            write(self.dir / name, content)

    def load(self, name, identity=None):
        """The state `name` that an earlier start saved, or None.

        identity: {name: value} of what it was made from [default: the options of the run]. A state
        that was made from anything else is None, too.
        """
        path = self.dir / f"{name}.pt"

        def exists():
            self.claim()  # also locks, so that no other process writes meanwhile
            return path.exists()

        if not on_main(exists):
            return None
        state = load_checkpoint(path)
        expected = as_json(self.config if identity is None else identity)
        found = state.get("identity")
        if not isinstance(found, dict):
            raise UserError(f"{path} is damaged; delete it to start over")
        if differences(found, expected, self.free):
            return None
        return state

    def save(self, name, identity=None, **state):
        """Save tensors and plain Python values as the state `name`; see `load`."""
        state["identity"] = as_json(self.config if identity is None else identity)

        def store():
            self.write(f"{name}.pt", to_bytes(state))

        on_main(store)

    def keep(self, name, identity, make, trains=True):
        """The state `name`: read if it was made from `identity`, or else made by make() and saved.

        make() is called on all processes and returns a dictionary; the main process's is saved.
        If it `trains`, --eval does not call it.
        """
        state = self.load(name, identity)
        if state is not None:
            return state
        if self.args.eval and trains:
            raise UserError(f"{self.dir / name}.pt was not found, or was made with other options; "
                            "finish this run first (the same command without --eval)")
        # What only the main process has (gathered rows, a fit) reaches the others here.
        state = broadcast(make())
        if not all_finite(state):
            raise UserError(f"{name}: a value is not finite; lower the learning rate")
        self.save(name, identity, **state)
        return state

    def epochs(self, total, name=None, train_set=None, identity=None, **parts):
        """Yield the epochs that are left to train; the body of the loop ends with `end_epoch`.

        parts: what the checkpoint `name` holds, objects with a state_dict. They are restored before
        the first epoch and saved after each. With the name None nothing is saved. A checkpoint of
        another training set, or of another network `net`, is refused.
        """
        self.parts = parts
        self.checkpoint = name
        self.identity = identity
        self.origin = origin_of(parts.get("net"), train_set)
        self.total_epochs = total
        self.history = []
        state = None
        if name is not None:
            state = self.load(name, identity)
        if state is not None:
            self._restore(state)
        first = len(self.history)
        if self.args.eval and first < total:
            raise UserError(f"{self.dir / str(name)}.pt has {first} of {total} epochs; finish this "
                            "run first (the same command without --eval)")
        # Without this line, a command that only evaluates again looks like a very fast one.
        if first >= total > 0 and not self.args.eval:
            say(f"{name}: trained already; --fresh trains again")
        # A resumed run starts here at the first epoch that is left; a finished one does nothing.
        for epoch in range(first, total):
            self.epoch_start = time.perf_counter()
            yield epoch
            if len(self.history) != epoch + 1:
                raise RuntimeError("the body of a loop over Run.epochs must call end_epoch once")

    def _restore(self, state):
        path = self.dir / f"{self.checkpoint}.pt"
        for what, here in self.origin.items():
            if state.get(what, here) != here:
                raise UserError(f"{path} was made with another {what.replace('_', ' ')}; use "
                                "another --name, or --fresh to start over")
        try:
            for key, part in self.parts.items():
                part.load_state_dict(state[key])
            self.history = [dict(row) for row in state["history"]]
        except Exception as error:  # a part is missing, or has other names or shapes
            raise UserError(f"{path} does not fit this network ({one_line(error)}); use --fresh to "
                            "start over") from None
        # The process may have been killed between a checkpoint and its log.
        on_main(self._write_log)

    def _write_log(self):
        lines = [json.dumps(as_json(row)) + "\n" for row in self.history]
        self.write(f"{self.checkpoint}.jsonl", "".join(lines))

    def end_epoch(self, loss, examples=0, advice="Lower --lr", **numbers):
        """End an epoch: check the loss and the weights, save the checkpoint, print a line.

        loss: mean over the epoch; examples: how many were seen, over all processes; advice: what
        helps if they are not finite; numbers: what else the log shows. Numbers may be tensors.
        """
        epoch = len(self.history) + 1
        row = {"epoch": epoch, "loss": float(loss)}
        for key, value in numbers.items():
            row[key] = float(value)
        seconds = max(time.perf_counter() - self.epoch_start, 1e-9)  # some clocks stand still
        row["seconds"] = seconds
        row["examples_per_s"] = float(examples) / seconds
        state = {key: part.state_dict() for key, part in self.parts.items()}
        if not math.isfinite(row["loss"]) or not all_finite(state):
            raise UserError(f"training diverged in epoch {epoch}: the loss or a weight is not "
                            f"finite; the checkpoint before it is kept. {advice}")
        self.history.append(row)
        if self.checkpoint is None:
            return
        # The history is part of the checkpoint, from which the log can be written again.
        self.save(self.checkpoint, self.identity, history=self.history, **state, **self.origin)
        on_main(self._write_log)
        shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "epoch")
        left = seconds * (self.total_epochs - epoch)
        say(f"{self.checkpoint} {epoch}/{self.total_epochs}  {shown}  {left:.0f} s left")

    def steps_per_epoch(self, loader):
        """The number of steps of an epoch: the batches of the loader, at most --limit-steps."""
        return min(len(loader), self.args.limit_steps or len(loader))

    def steps(self, loader, epoch):
        """Yield (step, batch) of an epoch; shows a progress bar on a terminal."""
        total = self.steps_per_epoch(loader)
        batches = itertools.islice(loader.epoch(epoch), total)
        show_bar = is_main() and sys.stderr.isatty()
        bar = tqdm(batches, f"epoch {epoch + 1}", total, leave=False, disable=not show_bar)
        start = time.perf_counter()
        for step, batch in enumerate(bar):
            yield step, batch
            if epoch == 0 and step == 9 and not show_bar:
                # Whoever waits for the first line of the log is told for how long.
                seconds = (time.perf_counter() - start) * total / 10
                if seconds > 60:
                    say(f"an epoch has {total} steps and takes about {seconds:.0f} s")

    def report(self, rows, columns, shown=None, **extra):
        """Write the rows to results.json and results.csv, and print the table; returns the rows.

        rows: {"method", "seed", "set", "against" (optional), "n", metric: value, ...}, where n is
        the number of examples of `set`. columns: the metrics that the table shows; shown: the rows
        that it shows [default: all]; extra: what else results.json stores.
        """
        rows = as_json(rows)
        on_main(self._report, rows, columns, as_json(shown or rows), extra)
        return rows

    def _report(self, rows, columns, shown, extra):
        content = {"script": self.script, "config": options(self.args), "columns": columns,
                   "seconds": time.perf_counter() - self.start,
                   "environment": environment(self.args.device), "rows": rows, **extra}
        self.write("results.json", json.dumps(as_json(content), indent=1))
        self.write("results.csv", to_csv(rows))
        say(f"\n{format_results(shown, columns)}\n")
        if self.writable:
            say(f"results, pictures and log files are in {self.dir}")

    def write_csv(self, name, columns):
        """Write a table {column: values [N]} as a CSV file of the directory."""
        values = [as_json(column) for column in columns.values()]
        rows = [dict(zip(columns, line)) for line in zip(*values, strict=True)]
        self.write(name, to_csv(rows))
        if self.writable:
            say(f"{self.dir / name}: {len(rows)} rows")

    def save_figure(self, figure, name):
        """Write a matplotlib figure as a PNG file of the directory, and free it."""
        from matplotlib import pyplot

        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        pyplot.close(figure)
        self.write(name, buffer.getvalue())


def origin_of(net, train_set):
    """What tells whether a checkpoint fits a network and a training set: {name: text}.

    The layers and their settings, the classes and the number of training examples.
    """
    origin = {}
    if net is not None:
        # One that several processes train is the same network.
        layers = str(net).replace(GlobalBatchNorm2d.__name__, "BatchNorm2d")
        origin["network"] = hashlib.sha256(layers.encode()).hexdigest()
    if train_set is not None:
        # Molecules have no classes.
        classes = " ".join(getattr(train_set, "classes", ()))
        origin["training_set"] = f"{len(train_set)} examples {classes}"
    return origin


def environment(device):
    """What is needed to repeat a number: commit, versions, device, processes, threads."""
    commit = ""
    command = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"commit": commit or None, "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "device": name,
            "tf32_in_convolutions": torch.backends.cudnn.allow_tf32,
            # `report` calls this inside `on_main`, where world_size() is 1.
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
            "threads": torch.get_num_threads()}


def device_memory(device):
    """The memory of a device in bytes; None where the system does not tell."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return total
    with contextlib.suppress(AttributeError, ValueError):  # Windows has neither name
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# ---- Tables -------------------------------------------------------------------------------------


def prediction_columns(dataset, log_probs, classes=()):
    """The columns of predictions.csv for a set: what each example is, and what is predicted.

    dataset: a set of data.py; log_probs [N, K], or [M, N, K] of an ensemble; classes: the names of
    the K classes. File or index; label if known; predicted class; confidence; total, aleatoric and
    epistemic uncertainty in nats (of a single network, the epistemic one is 0).
    """
    log_probs = torch.as_tensor(log_probs).double()
    if log_probs.ndim == 2:
        log_probs = log_probs[None]
    confidence, predicted = log_probs.exp().mean(0).max(1)
    uncertainty = ensemble_uncertainty(log_probs)
    columns = example_columns(dataset, classes)
    columns["predicted"] = class_names(predicted, classes)
    columns["confidence"] = confidence
    for name in ("total", "aleatoric", "epistemic"):
        columns[name] = uncertainty[name]
    return columns


def example_columns(dataset, classes=()):
    """File (or index) and label, if any is known, of each example of a set of data.py."""
    columns = {}
    files = getattr(dataset, "files", None)
    if files:
        columns["file"] = list(files)
    else:
        columns["index"] = list(range(len(dataset)))
    labels = dataset.labels
    if labels.is_floating_point():
        if not labels.isnan().all():
            columns["label"] = labels
    elif (labels >= 0).any():
        columns["label"] = class_names(labels, classes)
    return columns


def class_names(labels, classes):
    """Class names of labels [N], or numbers where there are no names; None where it is unknown."""
    names = []
    for label in labels.tolist():
        name = None
        if label >= 0:
            name = classes[label] if classes else label
        names.append(name)
    return names


KEYS = ("run", "method", "set", "against", "n")  # of a row; all else but the seed is a metric


def pool(rows, metrics):
    """Average the rows that differ only in their seed: a list of {column: text}."""
    groups = {}  # {key: {seed: row}}
    for row in rows:
        key = tuple(row.get(name) for name in KEYS)
        groups.setdefault(key, {})[row.get("seed")] = row
    lines = []
    for key, by_seed in groups.items():
        group = list(by_seed.values())
        line = dict(zip(KEYS, key))
        line["seeds"] = len(group)
        # Ensembles of different seeds that share members are not independent.
        members = sum((row.get("members") or [] for row in group), [])
        independent = len(set(members)) == len(members)
        for metric in metrics:
            values = [row[metric] for row in group if row.get(metric) is not None]
            line[metric] = pooled_text(values, independent)
        lines.append(line)
    return lines


def pooled_text(values, independent=True):
    """The mean and, where it is defined, the standard error of numbers: "0.912 ± 0.004"."""
    if not values:
        return None
    if not all(isinstance(value, (int, float)) for value in values):
        return str(values[0])
    if all(isinstance(value, int) and value == values[0] for value in values):
        return str(values[0])  # a count
    mean = float(np.mean(values))
    digits = ".4f" if abs(mean) < 1000 else ".5g"
    text = format(mean, digits)
    if len(values) > 1 and independent:
        text += f" ± {standard_error(values):{digits}}"
    return text


def to_csv(rows):
    """CSV text of rows {column: value}; None is an empty cell."""
    text = io.StringIO()
    columns = {name: None for row in rows for name in row}
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def format_table(rows, form="text"):
    """Rows {column: value} as a table in text or markdown, without empty columns."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    lines = [columns]
    for row in rows:
        lines.append(["" if row[name] is None else str(row[name]) for name in columns])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    if form == "markdown":
        return "\n".join("| " + " | ".join(line) + " |" for line in padded)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def format_results(rows, metrics, form="text"):
    """A table of the predictions on each set, then one of the comparisons of two sets."""
    single = [row for row in rows if not row.get("against")]
    pairs = [row for row in rows if row.get("against")]
    tables = [format_table(pool(part, metrics), form) for part in (single, pairs) if part]
    return "\n\n".join(tables)


def read_results(path):
    """The content of the results.json of a run; None if the file has none."""
    try:
        content = as_json(json.loads(Path(path, "results.json").read_text()))  # NaN is None
        pool(content["rows"], [])
        return {"script": str(content["script"]), "config": dict(content["config"]),
                "columns": [str(name) for name in content["columns"]], "rows": content["rows"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# Options in which the runs of one table may differ without a word in its "run" column.
NOT_SHOWN = ("seed", "runs", "name", "out_dir", "data_dir", "device", "workers", "compile", "eval",
             "fresh", "plot", "predict")


def run_label(content, contents):
    """The options in which a run differs from others of its script: "width=0.5 epochs=3".

    It begins with the name of the script if there are several: their rows are not pooled.
    """
    words = []
    if any(other["script"] != content["script"] for other in contents):
        words.append(content["script"])
    for name, value in content["config"].items():
        differs = any(other["config"].get(name) != value for other in contents
                      if other["script"] == content["script"])
        if differs and name not in NOT_SHOWN:
            words.append(f"{name}={value}")
    return " ".join(words) or None


LONGEST_LABEL = 40  # characters in the "run" column


def print_legend(labels):
    """If a label is too long for a column, number all and print what they mean: {label: name}."""
    names = {label: label for label in labels}
    if any(len(label or "") > LONGEST_LABEL for label in labels):
        for number, label in enumerate(names, 1):
            names[label] = f"run {number}"
            print(f"run {number}: {label}")
        print()
    return names


def table(argv=None):
    """`python common.py table RUN ...`: tabulate the results of finished runs."""
    parser = argparse.ArgumentParser(prog="common.py table", description=table.__doc__)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--metrics", nargs="+", help="columns [default: those that the runs print]")
    parser.add_argument("--sets", nargs="+", help="show only rows of these sets")
    parser.add_argument("--format", choices=["text", "markdown"], default="text")
    args = parser.parse_args(argv)
    contents = []
    for path in args.runs:
        content = read_results(path)
        if content is None:
            print(f"skipped: {path} is not the directory of a finished run", file=sys.stderr)
        else:
            contents.append(content)
    rows = []
    columns = []
    for content in contents:
        label = run_label(content, contents)
        columns += content["columns"]
        for row in content["rows"]:
            if not args.sets or row.get("set") in args.sets:
                rows.append({**row, "run": label})
    if not rows:
        raise UserError("no rows to show: check the names of the runs and of --sets")
    for name in args.metrics or []:
        if not any(name in row for row in rows):
            raise UserError(f"--metrics {name}: not found in any row")
    # Runs with the same label share it: their rows are pooled.
    names = print_legend([row["run"] for row in rows])
    rows = [{**row, "run": names[row["run"]]} for row in rows]
    metrics = args.metrics or list(dict.fromkeys(columns))
    print(format_results(rows, metrics, args.format))


# ---- Pictures, and the start of a script --------------------------------------------------------


def make_figure(rows, columns, **options):
    """A matplotlib figure for a file, and its axes; the options are those of plt.subplots."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    return pyplot.subplots(rows, columns, layout="constrained", **options)


# These six can be told apart by colour-blind people.
COLOURS = ("#4477AA", "#CCBB44", "#AA3377", "#228833", "#EE6677", "#66CCEE")


def colours(count):
    """`count` different colours."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps

    return colormaps["turbo"](np.linspace(0.05, 0.95, count))


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
        print(end="", flush=True)  # sys.stdout is None where it was closed
    except Exception as error:
        message = as_user_error(error)
        if message is None:
            raise
        if isinstance(error, OSError):
            # What Python would print at its end has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"{script}: error: {' '.join(str(message).split())}")
    if dist.is_available() and dist.is_initialized():
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
        _fail("usage: python common.py table RUN ... [--metrics ...] [--format ...]")
    launch(lambda: table(sys.argv[2:]))
