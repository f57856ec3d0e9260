"""Ensemble distribution distillation with proxy-Dirichlet targets, at a thousand classes.

Ryabinin, Malinin, Gales, "Scaling Ensemble Distribution Distillation to Many Classes with Proxy
Targets", NeurIPS 2021, arXiv:2105.06987. Method:

  1. Train M networks; p_m are their predictions, pi = (1/M) sum_m p_m.
  2. Their spread, RMI = (1/M) sum_m KL(pi || p_m), gives the precision of a Dirichlet with mean pi:
     beta_0 = (K - 1) / (2 RMI), the proxy of the ensemble (Stirling's approximation).
  3. A student with Dirichlet parameters alpha = exp(z) + 1 minimises the REVERSE Kullback-Leibler
     divergence KL(Dir(alpha) || Dir(pi beta_0 + 1)), divided by beta_0: each class weighs as much
     as the ensemble believes in it, so that a thousand unlikely classes do not drown one likely.
  4. The student predicts softmax(z); alpha tells data uncertainty from the ensemble's disagreement.

Usage:
  python proxy_distill.py                    # numbers (1000 classes), the whole story, two cores
  torchrun --nproc_per_node 8 proxy_distill.py --dataset imagenet --method distill --members 10
  python proxy_distill.py --eval             # the table again, from the checkpoints
  python proxy_distill.py --dataset imagenet --eval --ensemble-paths seed0.ckpt seed1.ckpt \
      --student-path student.ckpt            # the published checkpoints, as they are

Expected:
  numbers under noise, the default with --seed 1, 6 and 11 (n = 3, mean +- standard error; 4.3 CPU
    minutes each, one thread), accuracy, NLL: a single network 91.0 +- 0.5 %, 0.304 +- 0.008; the
    ensemble of five 96.1 +- 0.1 %, 0.244 +- 0.004; students of EnD 92.8 +- 0.3 %, 0.290 +- 0.008,
    of the reverse KL 92.2 +- 0.4 %, 0.347 +- 0.009 (AUROC of letters by epistemic uncertainty
    0.995, as the ensemble's; rank correlation of precision 0.65), of EnD2 and the forward KL 0.1 %:
    not trained.
  cifar10, 10,000 images, ResNet-18 of width 0.125, 30 epochs (options in the README), n = 1,
    accuracy and NLL: one network 65.8 %, 0.972; ensemble 68.6 %, 0.876; EnD 66.4 %, 0.923; reverse
    KL 66.8 %, 0.935.
  imagenet, ResNet-50, the published checkpoints: not measured.

Differs from the published code (github.com/yandex-research/proxy-dirichlet-distillation):
  - The default loss is the paper's, rkl_proxy. The published ImageNet command has --loss proxy, the
    forward KL, whose gradient comes from the unlikely classes (K / 3 times the likely one's).
  - Offsets are 1 by default (there: 0), and stored with the student; predictions never take them
    (there: accuracy and calibration without, confidence with the offset of the command).
  - The published reverse KL counts the target's smoothing twice: its optimum has precision beta_0 +
    2 K. That is kept (--rkl-target published); --rkl-target paper has beta_0 + K.
  - Values and gradients are right where the textbook form is noise; nothing is added inside
    logarithms and gamma functions (there: 2^-23); nothing is changed in place (there: the precision
    that is logged); teachers' statistics are float64 and RMI >= 0 (there, identical members give
    negative precisions). --temperature is EnD2's; the published code has none.
  - An ensemble's proxy is scored with the number of classes (there: the number of members), EPKL is
    a mean over pairs (there: a sum), RMI = EPKL - MI (there: the sum less MI).
  - A softmax network has no MI, EPKL, RMI (there: those of Dir(exp(z)), whose scale is arbitrary).
  - PRR shares ties and is null without errors (there: order of rows, division by zero); ECE has 15
    bins (a, b] (there: 10, [a, b)); metrics are over all processes, on all examples.
  - One rule of learning rates: --lr 0.1 is per 256 images, as the published --learning_rate: the
    rate is --lr x batch / 256, and is printed. Batches are global (there: a GPU's). Students have
    no AdamW; --opt adam is Adam, with the schedule.
  - Statistics of batch norm are of the global batch (there: of each GPU's 256 images).
  - The step schedule has no milestone before the second epoch (there: one epoch is at 0.001 lr).
  - Images are resized in proportion, by Pillow (--resize square: both sides to 256, as published
    with OpenCV); those of ImageNet-C are enlarged and cropped again by --resize square alone. Means
    over corruptions are ours (there: none); no PRR is of a set pooled with val (there: one each).
  - Training is in float32, or with --amp in bfloat16 but for the head (there: float16).
  - MIMO's members are averaged as probabilities (there: logits), and measured as an ensemble.
  - The last network counts (there: the last one, or the best on a part of val).
"""

import argparse
import hashlib
import itertools
import math
import re
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

LOSSES = ("forward_kl", "dirichlet_likelihood", "proxy", "rkl_proxy")
PRESETS = {
    # published: ResNet-50, SGD 0.1 per 256 images, Nesterov 0.9, decay 1e-4, /10 at 30, 60, 80 of
    # 90 epochs; 8 GPUs with 256 images each; members 120 epochs, students 90, MIMO 150 and 4,096
    "": dict(model="resnet50", members=10, epochs=90, base_epochs=120, mimo_epochs=150, lr=0.1,
             batch_size=2048, mimo_batch_size=4096, opt="sgd", weight_decay=1e-4, schedule="step",
             warm_up=0.0, losses=["forward_kl", "rkl_proxy"], mimo=False, augment=True, noise=0,
             cache_teachers=False, ood=[], shift="none", shift_examples=0),
    "imagenet": dict(ood=["imagenet_o", "imagenet_a", "imagenet_r"], shift="published", mimo=True),
    "tiny_imagenet": dict(model="resnet18", batch_size=256, mimo_batch_size=512, shift="published"),
    **{name: dict(model="resnet18", batch_size=128, mimo_batch_size=256, lr=0.2, weight_decay=5e-4,
                  ood=ood, shift="published")
       for name, ood in (("cifar10", ["svhn", "cifar100"]), ("cifar100", ["svhn"]))},
    "numbers": dict(model="convnet", width=0.25, members=5, epochs=8, other_epochs=2,
                    base_epochs=5, mimo_epochs=8, batch_size=128, mimo_batch_size=256, lr=6e-3,
                    opt="adam", schedule="cosine", warm_up=0.2, losses=list(LOSSES),
                    augment=False, cache_teachers=True, noise=4, shift="computed",
                    shift_examples=40, ood=["numbers_letters", "numbers_ambiguous"]),
}

# The groups of options that shape one kind of network; all kinds share data, network, training.
OWN = {"base": "members", "mimo": "MIMO", "distill": "distillation"}


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "numbers")
    flag = argparse.BooleanOptionalAction
    add = parser.group("data")
    add("--limit-train", type=at_least(1), metavar="N", help="train on N images, evenly spaced")
    add("--noise", type=between(0, 5, int), metavar="SEVERITY", help="Gaussian noise of this "
        "severity on all images, for sets in memory (numbers: 4, else it is too easy; paper: 0)")
    add = parser.group("network")
    add("--model", choices=["convnet", "resnet18", "resnet50"],
        help="resnets have a 3x3 stem for images up to 64 pixels (paper: resnet50)")
    add = parser.group("training")
    add("--learning_rate", dest="lr", default=argparse.SUPPRESS, type=at_least(0, float),
        help="--lr: per 256 images; the rate is --lr x batch size / 256 (published: 0.1)")
    add("--opt", choices=["sgd", "adam"], help="sgd: Nesterov momentum 0.9 (published)")
    add("--weight-decay", "--weight_decay", "--wd", type=at_least(0, float), help="on all but the "
        "norms inside residual blocks (published: 1e-4)")
    add("--schedule", choices=["step", "cosine"], help="step: /10 at 30, 60, 80 of 90 epochs")
    add("--warm-up", type=between(0, 0.9), help="share of the steps with a rising learning rate")
    add("--augment", action=flag, help="crop and flip (published: on; embedded sets: off)")
    add("--label-smoothing", type=between(0, 0.999), default=0.0, help="of members and MIMO (0)")
    add = parser.group("evaluation")
    add("--method", choices=["all", "base", "mimo", "distill"], default="all",
        help="all: members, students, table, what is done is kept; base: the member of --seed; "
        "mimo: such a network; distill: a student of --loss, from members that exist")
    add("--members", type=at_least(1), help="M, of seeds --seed, --seed + 1, ... (paper: 10)")
    add("--losses", nargs="*", choices=LOSSES, help="students of --method all")
    add("--loss", choices=LOSSES, default="rkl_proxy", help="of --method distill: forward_kl "
        "(EnD), dirichlet_likelihood (EnD2), proxy (forward KL to it), rkl_proxy (the paper's)")
    add("--mimo", action=flag, help="--method all: a MIMO network too")
    add("--ensemble-paths", "--ensemble_paths", nargs="+", default=[], metavar="FILE",
        help="members from files: ours, torchvision's or the published Lightning checkpoints")
    add("--student-path", metavar="FILE", help="with --eval: a student from such a file")
    add("--mimo-path", metavar="FILE", help="with --eval: a MIMO network from such a file")
    add("--logits", nargs="+", default=[], metavar="NPZ", help="evaluate saved logits, no network: "
        "files of --predict, the first in-distribution, with labels; the others are OOD sets")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH")
    add("--shift", choices=["none", "computed", "published"], help="also evaluate the corrupted "
        "test set, by severity: computed, or the CIFAR-C or ImageNet-C files")
    add("--shift-examples", type=at_least(0), metavar="N", help="test images a corruption; 0: all")
    add("--resize", choices=["side", "square"], default="side", help="image files, but for "
        "training: the shorter side to 256, or both (published); then the centre")
    add = parser.group("members")
    add("--base-epochs", type=at_least(0), help="of a member (paper: 120); --epochs: a student's, "
        "or those of the one network that --method base or mimo trains, as --batch-size")
    add = parser.group("distillation")
    add("--other-epochs", type=at_least(0), help="of students by dirichlet_likelihood and proxy "
        "(default: --epochs; numbers: 2, there they do not train)")
    add("--student-width", type=at_least(0.01, float), help="--width of students (default: same)")
    add("--model-offset", "--model_offset", type=at_least(0, float), default=1.0,
        help="alpha = exp(z) + this (paper: 1; the published code's default: 0)")
    add("--target-offset", "--target_offset", type=at_least(0, float), default=1.0,
        help="added to the proxy's concentrations (paper: 1)")
    add("--rkl-target", choices=["published", "paper"], default="published", help="precision of "
        "the reverse KL's target: beta_0 + 2 K, or beta_0 + K (with --target-offset 1)")
    add("--max-precision", type=at_least(1e-6, float), help="cap of beta_0 (1e4 to 1e6 keep the "
        "scale of the logits near that of a classifier)")
    add("--temperature", type=at_least(1, float), default=1.0, help="of dirichlet_likelihood, in "
        "the first half of --anneal-epochs; then linear to 1")
    add("--anneal-epochs", type=at_least(0), default=0, help="0: no annealing (EnD2: 60 of 90)")
    add = parser.group("MIMO")
    add("--mimo-epochs", type=at_least(0), help="(published: 150)")
    add("--mimo-batch-size", type=at_least(1), help="rows a step, repetitions and members included "
        "(published: 4096, of 1024 images)")
    add("--mimo-members", "--ensemble_size", type=at_least(1), default=2, help="subnetworks")
    add("--repetition-probability", "--repetition_probability", type=between(0, 1), default=0.6,
        help="share of rows in which all subnetworks see one image (published: 0.6)")
    add("--batch-repetitions", "--batch_repetitions", type=at_least(1), default=2, help="(2)")
    add = parser.group("run")
    add("--cache-teachers", action=flag, help="compute the members' statistics of every training "
        "image once: for views that do not change (--no-augment)")
    return check_args(parser, parser.parse(argv))


def check_args(parser, args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    if args.ensemble_paths:
        args.members = len(args.ensemble_paths)
    args.losses = [args.loss] if args.method == "distill" else args.losses
    files = [*args.ensemble_paths, *filter(None, (args.student_path, args.mimo_path)), *args.logits]
    missing = common.broadcast([path for path in files if not Path(path).is_file()])
    refusals = {
        f"no file {', '.join(missing[:1])}; check the paths": missing,
        "--ensemble-paths is for --method all and distill, which use members; leave it out":
            args.ensemble_paths and args.method in ("base", "mimo"),
        "--student-path and --mimo-path are evaluated, not trained; add --eval":
            (args.student_path or args.mimo_path) and not args.eval,
        "--device mps has no float64, which the losses need; use --device cpu":
            args.device.type == "mps",
        f"--image-size {args.image_size}: convnet halves its sides three times; give at least 8":
            args.model == "convnet" and (args.image_size or 8) < 8,
        f"--members {args.members}: an ensemble has at least 2":
            args.members < 2 and args.method in ("all", "distill") and not args.eval,
        "--cache-teachers: augmented views change with every epoch; add --no-augment or "
        "--no-cache-teachers": args.cache_teachers and args.augment and not args.eval,
        "--logits are evaluated as they are; leave --predict out": args.logits and args.predict,
        "--runs: files are of one run; leave it out":
            args.runs > 1 and files and (args.eval or args.logits),
        "--temperature goes with --anneal-epochs and --no-cache-teachers":
            args.temperature > 1 and (args.cache_teachers or not args.anneal_epochs),
        "--mimo-batch-size is below --mimo-members x --batch-repetitions":
            args.mimo_batch_size < args.mimo_members * args.batch_repetitions}
    for text, wrong in refusals.items():
        if wrong:
            parser.error(text)
    return args


# ---- Model --------------------------------------------------------------------------------------


class Head(nn.Linear):
    """Logits [B, K]; with `mimo` E > 1 of E images stacked as channels, [B, E, K].

    In float32 even under autocast: logits reach ln 8e9."""

    def __init__(self, dim, num_classes, mimo):
        super().__init__(dim, num_classes * mimo)
        self.mimo = mimo

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            logits = super().forward(x.to(self.weight.dtype))
        return logits if self.mimo == 1 else logits.unflatten(1, (self.mimo, -1))


class Block(nn.Module):
    """A residual block: basic (3x3, 3x3), or bottleneck (1x1, 3x3 with the stride, 1x1).

    Named as torchvision's, whose state dicts fit; the last norm starts at zero (published).
    """

    def __init__(self, c_in, c, stride, bottleneck):
        super().__init__()
        c_out = 4 * c if bottleneck else c
        shape = [(c_in, c, 1, 1), (c, c, 3, stride), (c, c_out, 1, 1)] if bottleneck else \
                [(c_in, c, 3, stride), (c, c, 3, 1)]
        for i, (a, b, kernel, step) in enumerate(shape, 1):
            self.add_module(f"conv{i}", nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(b))
        self.depth, self.downsample = len(shape), nn.Sequential()
        nn.init.zeros_(getattr(self, f"bn{self.depth}").weight)
        if stride != 1 or c_in != c_out:
            # subsampled, then 1x1: on CPUs PyTorch 2.14's strided 1x1, channels last, writes out of
            # bounds in the backward pass
            self.downsample = nn.Sequential(OrderedDict({
                "subsample": nn.AvgPool2d(1, stride),
                "0": nn.Conv2d(c_in, c_out, 1, bias=False), "1": nn.BatchNorm2d(c_out)}))

    def forward(self, x):
        h = x
        for i in range(1, self.depth + 1):
            h = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(F.relu(h) if i > 1 else h))
        return F.relu(h + self.downsample(x))


def convnet(channels, size, width):
    """Three convolutions and a linear layer, without global pooling: positions are kept."""
    c = max(1, round(32 * width))
    layers = {f"stage{i}": nn.Sequential(nn.Conv2d(a, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
                                         nn.ReLU(), nn.MaxPool2d(2))
              for i, (a, b) in enumerate(((channels, c), (c, 2 * c), (2 * c, 4 * c)), 1)}
    return {**layers, "flatten": nn.Flatten()}, 4 * c * (size // 8) ** 2


def resnet(channels, size, width, bottleneck):
    """ResNet-18 or -50; images of more than 64 pixels take ImageNet's stem (7x7, max pool)."""
    c_in = c_stem = max(1, round(64 * width))
    stem, pool = ((7, 2, 3), nn.MaxPool2d(3, 2, 1)) if size > 64 else ((3, 1, 1), nn.Identity())
    layers = {"conv1": nn.Conv2d(channels, c_in, *stem, bias=False), "bn1": nn.BatchNorm2d(c_in),
              "relu": nn.ReLU(), "maxpool": pool}
    for group, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
        blocks, c = [], c_stem * 2**group
        for i in range(count):
            blocks.append(Block(c_in, c, 2 if group and not i else 1, bottleneck))
            c_in = 4 * c if bottleneck else c
        layers[f"layer{group + 1}"] = nn.Sequential(*blocks)
    return {**layers, "avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}, c_in


def make_network(model, num_classes, shape, width=1.0, mimo=1):
    """A network for images of `shape` (C, H, W); `mimo` of them stacked."""
    channels, size = shape[0] * mimo, shape[-1]
    layers, dim = convnet(channels, size, width) if model == "convnet" else \
        resnet(channels, size, width, model == "resnet50")
    net = nn.Sequential(OrderedDict(layers, fc=Head(dim, num_classes, mimo)))
    for module in net.modules() if model != "convnet" else ():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


# Lightning 1.5 keeps options in a dict of its own class; 1.4 has callbacks' classes as keys. An
# ordinary dict stands for these names, and no other name of theirs is known.
LIGHTNING = [(OrderedDict, f"pytorch_lightning.{name}") for name in (
    "utilities.parsing.AttributeDict", "callbacks.model_checkpoint.ModelCheckpoint",
    "callbacks.early_stopping.EarlyStopping", "callbacks.lr_monitor.LearningRateMonitor")]


def load_weights(net, path) -> dict:
    """Put a file's state dict (plain, ours, or a Lightning checkpoint's) into `net`; all that the
    file holds: tensors and plain values, anything else is refused, not run."""
    with torch.serialization.safe_globals(LIGHTNING):
        found = state = common.load_checkpoint(path)
    for key in ("state_dict", "net", "model"):
        state = state[key] if isinstance(state.get(key), dict) else state
    state = {k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    first = next(iter(net.state_dict()))
    prefix = min((k.removesuffix(first) for k in state if k.endswith(first)), key=len, default="")
    state = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit --model, --width and the classes "
                        f"({common.one_line(error)})") from None
    return found


# ---- Method -------------------------------------------------------------------------------------
# B rows, M members, K classes; z student logits [B, K]; all statistics and losses are float64.

EPS = 2.0**-23  # published code: in the precision, so that agreeing members have a finite one
LARGE = 1e3     # from here on the asymptotic series are exact to float64


class Ensemble(NamedTuple):
    """What the losses and measures need of M predictions p_m [B, K]."""

    log_probs: Tensor  # [B, K] ln pi, pi = (1/M) sum_m p_m
    mean_log: Tensor   # [B, K] (1/M) sum_m ln p_m
    data: Tensor       # [B] (1/M) sum_m H(p_m), nats
    rmi: Tensor        # [B] (1/M) sum_m KL(pi || p_m), nats


def ensemble_statistics(logits_of_members, temperature=1.0) -> Ensemble:
    """Statistics of members' finite logits [B, K], given as any iterable: one member in memory at a
    time. No gradient reaches them."""
    sums = None
    for count, logits in enumerate(logits_of_members, 1):
        log_p = (logits.detach().double() / temperature).log_softmax(-1)
        p = log_p.exp()
        own = p, log_p, -torch.linalg.vecdot(p, log_p)
        sums = own if sums is None else [a + b for a, b in zip(sums, own)]
    pi, mean_log, data_nats = (total / count for total in sums)
    log_pi = pi.clamp_min(torch.finfo(torch.float64).tiny).log()
    rmi = torch.linalg.vecdot(log_pi.exp(), log_pi - mean_log).clamp_min(0)
    return Ensemble(log_pi, mean_log, data_nats, rmi)


def proxy_precision(ensemble, most=math.inf) -> Tensor:
    """beta_0 = (K - 1) / (2 RMI) [B]: a Dirichlet of mean pi and large concentrations has the RMI
    (K - 1) / (2 beta_0). Members that are certain of different classes are no such Dirichlet: five
    of a thousand classes with MI 1.6 nats have a proxy with 0.08."""
    k = ensemble.log_probs.shape[-1]
    return ((k - 1) / (2 * ensemble.rmi + EPS)).clamp_max(most)


def forward_kl_loss(logits, ensemble) -> Tensor:
    """EnD: KL(pi || softmax(z)) [B], nats."""
    log_q = logits.double().log_softmax(-1)
    return (ensemble.log_probs.exp() * (ensemble.log_probs - log_q)).sum(-1)


def dirichlet_likelihood_loss(logits, ensemble, offset=1.0, temperature=1.0) -> Tensor:
    """EnD2: -(1/M) sum_m ln Dir(p_m; alpha) [B], alpha = exp(z / T) + offset, times T^2.

    `ensemble`: of logits divided by T, too."""
    alpha = (logits.double() / temperature).exp() + offset
    value = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1)) \
        - ((alpha - 1) * ensemble.mean_log).sum(-1)
    return temperature**2 * value


def annealed_temperature(epoch, start, epochs) -> float:
    """EnD2's T: `start` for the first half of `epochs`, linear to 1 over the other half, then 1."""
    half = epochs / 2
    return start + (1 - start) * min(1.0, max(0.0, epoch / half - 1)) if half else 1.0


def proxy_loss(logits, ensemble, precision, model_offset=1.0, target_offset=1.0) -> Tensor:
    """KL(Dir(pi beta_0 + t) || Dir(exp(z) + m)) [B], the forward divergence (published command)."""
    alpha = logits.double().exp() + model_offset
    beta = ensemble.log_probs.exp() * precision[:, None] + target_offset
    alpha_0, beta_0 = alpha.sum(-1), beta.sum(-1)
    spread = torch.digamma(beta) - torch.digamma(beta_0)[:, None]
    return torch.lgamma(beta_0) - torch.lgamma(beta).sum(-1) + torch.lgamma(alpha).sum(-1) \
        - torch.lgamma(alpha_0) + ((beta - alpha) * spread).sum(-1)


def rkl_proxy_loss(logits, ensemble, precision, model_offset=1.0, target_offset=1.0,
                   target="published") -> Tensor:
    """KL(Dir(exp(z) + m) || Dir(pi b + 1)) / b [B], up to a constant: the paper's loss,

        L = -sum_k pi_k (psi(alpha_k) - psi(alpha_0)) - h(alpha) / b,    alpha = e + m, e = exp(z),

    where h is the entropy of Dir(alpha). target "published": b = beta_0 + K t, which counts the
    smoothing t twice; "paper": b = beta_0, whose target is the paper's pi beta_0 + 1, whatever t.
    The gradient is the closed form (once differentiable),

        dL/dz_k = e_k {[psi1(alpha_k) (alpha_k - 1) - psi1(alpha_0) (alpha_0 - K)] / b
                       + psi1(alpha_0) - pi_k psi1(alpha_k)}.

    What cancels for large alpha is left out of both; autograd of L is noise from z = 40 on.
    """
    with torch.no_grad():
        e, pi, k = logits.double().exp(), ensemble.log_probs.exp(), logits.shape[-1]
        b = (precision + (k * target_offset if target == "published" else 0))[:, None]
        alpha = e + model_offset
        entropy, log_means = dirichlet_entropy(alpha)
        value = -torch.linalg.vecdot(pi, log_means) - entropy / b[:, 0]
        psi1, rest = trigamma(alpha)
        psi1_0, rest_0 = trigamma(alpha.sum(-1, keepdim=True))
        gradient = e * ((rest - psi1 - rest_0 + k * psi1_0) / b + psi1_0 - pi * psi1)
    z = logits.double()
    return value + (gradient * (z - z.detach())).sum(-1)


def trigamma(x) -> tuple[Tensor, Tensor]:
    """(psi1(x), x psi1(x) - 1) for x > 0; the second is 1/2x + 1/6x^2 - ... where x is large."""
    psi1, y = torch.polygamma(1, x), 1 / x
    return psi1, torch.where(x > LARGE, y * (1 / 2 + y * (1 / 6 - y * y / 30)), x * psi1 - 1)


def dirichlet_entropy(alpha) -> tuple[Tensor, Tensor]:
    """(h(alpha) [B] = sum lnGamma(alpha_k) - lnGamma(alpha_0) - sum (alpha_k - 1)(psi(alpha_k) -
    psi(alpha_0)), nats; E ln p_k = psi(alpha_k) - psi(alpha_0) [B, K]) of Dir(alpha).

    From lnGamma(x) - (x - 1) psi(x) + x of each alpha_k and of alpha_0, by Stirling's series where
    x is large: sum_k alpha_k = alpha_0 is left out of both sides."""
    def part(x, psi):
        y = 1 / x
        series = (x.log() + 1 + math.log(2 * math.pi)) / 2 - y * (1 / 3 + y * (1 / 12 + y / 90))
        return torch.where(x > LARGE, series, torch.lgamma(x) - (x - 1) * psi + x)

    alpha_0 = alpha.sum(-1, keepdim=True)
    psi, psi_0 = torch.digamma(alpha), torch.digamma(alpha_0)
    entropy = part(alpha, psi).sum(-1) - part(alpha_0, psi_0)[:, 0]
    return entropy - (alpha.shape[-1] - 1) * psi_0[:, 0], psi - psi_0


# Uncertainties [B], larger is more uncertain: 1 - max p; entropies and divergences in nats. The
# epistemic one is the mutual information MI.
MEASURES = ("confidence", "total", "aleatoric", "epistemic", "epkl", "rmi")
# Of one network's logits: energy -ln sum exp z, and -max z; larger is more out-of-distribution. Of
# a student with a precision they are that precision, a target; of a classifier they are free.
SCORES = ("energy", "max_logit")


class Outputs(NamedTuple):
    """What a model says about B inputs."""

    log_probs: Tensor      # [B, K] its prediction
    measures: dict         # {name of MEASURES, SCORES: [B]}, those that the model has
    log_precision: Tensor  # [B] ln alpha_0; ln beta_0 of an ensemble; of a softmax, ln sum exp(z)


def ensemble_outputs(ensemble) -> Outputs:
    """MI = H(pi) - mean H(p_m); EPKL = mean over all ordered pairs KL(p_i || p_j) = MI + RMI."""
    log_pi = ensemble.log_probs
    total = -torch.linalg.vecdot(log_pi.exp(), log_pi)
    information = (total - ensemble.data).clamp_min(0)
    values = (1 - log_pi.amax(-1).exp(), total, ensemble.data, information,
              information + ensemble.rmi, ensemble.rmi)
    return Outputs(log_pi, dict(zip(MEASURES, values)), proxy_precision(ensemble).log())


def dirichlet_outputs(alpha, log_probs) -> Outputs:
    """Measures of Dir(alpha) with mean p = alpha / alpha_0; predictions are `log_probs`:

    E H = -sum p (psi(alpha + 1) - psi(alpha_0 + 1)), MI = H(p) - E H, EPKL = (K - 1) / alpha_0,
    RMI = EPKL - MI. The confidence is that of the prediction."""
    alpha_0 = alpha.sum(-1)
    p = alpha / alpha_0[:, None]
    total = torch.special.entr(p).sum(-1)
    expected = -(p * (torch.digamma(alpha + 1) - torch.digamma(alpha_0 + 1)[:, None])).sum(-1)
    information, epkl = (total - expected).clamp_min(0), (alpha.shape[-1] - 1) / alpha_0
    values = (1 - log_probs.amax(-1).exp(), total, expected, information, epkl,
              (epkl - information).clamp_min(0))
    return Outputs(log_probs, dict(zip(MEASURES, values)), alpha_0.log())


def softmax_outputs(logits) -> Outputs:
    """One network: total uncertainty alone. The measures of a Dirichlet exp(z) would depend on the
    logits' scale, which cross entropy leaves arbitrary; ln sum exp(z) is kept to be compared."""
    z = logits.double()
    log_probs, log_sum, top = z.log_softmax(-1), z.logsumexp(-1), z.amax(-1)
    total = torch.special.entr(log_probs.exp()).sum(-1)
    values = (1 - (top - log_sum).exp(), total, -log_sum, -top)
    return Outputs(log_probs, dict(zip((*MEASURES[:2], *SCORES), values)), log_sum)


def student_outputs(logits, offset=1.0) -> Outputs:
    """softmax(z) predicts, without the offset; Dir(exp(z) + offset) measures (z at most 600)."""
    plain = softmax_outputs(logits)
    alpha = logits.double().clamp_max(600).exp() + offset
    outputs = dirichlet_outputs(alpha, plain.log_probs)
    return outputs._replace(measures=plain.measures | outputs.measures)


def proxy_outputs(ensemble, target_offset=0.0) -> Outputs:
    """The ensemble's proxy Dir(pi beta_0 + t)."""
    alpha = ensemble.log_probs.exp() * proxy_precision(ensemble)[:, None] + target_offset
    return dirichlet_outputs(alpha, ensemble.log_probs)


def mimo_rows(n, repetitions, probability, members, generator) -> Tensor:
    """Which of n images each of E subnetworks sees: [n r, E].

    n r rows of images, permuted; of the first int(n r (1 - p)) rows each subnetwork has an order of
    its own, in the others all see the same image.
    """
    rows = torch.arange(n).repeat(repetitions)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    own = int(len(rows) * (1 - probability))
    columns = [torch.cat([rows[:own][torch.randperm(own, generator=generator)], rows[own:]])
               for _ in range(members)]
    return torch.stack(columns, 1)


def learning_rate(step, steps, epochs, schedule="step", warm_up=0.0) -> float:
    """Share of the full rate at a step of all `epochs` of `steps` each.

    step: a tenth at epochs floor(30 E / 90), floor(60 E / 90), floor(80 E / 90), as published, but
    never in the first; cosine: down to zero. Both after a linear warm-up."""
    warm = warm_up * epochs * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    if schedule == "step":
        return 0.1 ** sum(step // steps >= max(1, e * epochs // 90) for e in (30, 60, 80))
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, epochs * steps - warm)))


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, batch_size, train=False):
    """Batches of this process (for MIMO of all), shuffled and augmented only where `train`."""
    return data.Loader(dataset, batch_size, args.device, seed=args.seed, shuffle=train,
                       augment="crop_flip" if train and args.augment else "none",
                       workers=args.workers, channels_last=True,
                       whole=train and args.kind == "mimo")


def autocast(args):
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def make_optimiser(net, args):
    """SGD with Nesterov momentum, or Adam; no decay of norms inside residual blocks (published)."""
    free = {name for name, _ in net.named_parameters() if re.match(r"layer\d\.\d+\.bn\d", name)}
    groups = [dict(params=[p for name, p in net.named_parameters() if (name in free) == exempt],
                   weight_decay=0.0 if exempt else args.weight_decay) for exempt in (False, True)]
    return torch.optim.Adam(groups) if args.opt == "adam" else \
        torch.optim.SGD(groups, momentum=0.9, nesterov=True)


def digest(values) -> str:
    """A hash of tensors and plain values, in order."""
    found = hashlib.sha256()
    for value in values:
        found.update(value.cpu().contiguous().numpy().tobytes() if isinstance(value, Tensor)
                     else f"{value}\n".encode())
    return found.hexdigest()


class Teachers:
    """The members in eval mode; `cached`: their statistics of all training images, or None."""

    def __init__(self, members, args):
        self.members, self.args, self.cached = members, args, None
        self.identity = digest(value for net in members for value in net.state_dict().values())

    @torch.no_grad()
    def statistics(self, batch, temperature=1.0) -> Ensemble:
        if self.cached is None:
            with autocast(self.args):
                return ensemble_statistics((net(batch.images) for net in self.members), temperature)
        log_probs, *rest = (column[batch.index].double() for column in self.cached)
        return Ensemble(log_probs.log_softmax(-1), *rest)

    def fill_cache(self, dataset, run):
        """Compute, or read, the statistics of all training images, once for all students: in half
        precision from a gigabyte on (ImageNet: 5 GB)."""
        half = len(dataset) * dataset.num_classes > 1.25e8
        config = {"ensemble": self.identity, "images": digest([len(dataset), *dataset.files])}
        name = f"teachers-{self.identity[:12]}"
        if (state := run.load(name, config)) is None:
            parts = []
            for batch in make_loader(dataset, self.args, 512).epoch():
                parts.append([batch.index.cpu(), *(
                    t.to(torch.float16 if half and t.ndim == 2 else torch.float32).cpu()
                    for t in self.statistics(batch))])
            rows = common.gather_rows(*map(torch.cat, zip(*parts)))
            run.save(name, config, **dict(zip(Ensemble._fields, rows or ())))
            state = run.load(name, config)
        self.cached = [state[key].to(self.args.device) for key in Ensemble._fields]


def distillation_loss(logits, ensemble, args, temperature=1.0) -> Tensor:
    """The rows [B] of --loss."""
    if args.loss == "forward_kl":
        return forward_kl_loss(logits, ensemble)
    if args.loss == "dirichlet_likelihood":
        return dirichlet_likelihood_loss(logits, ensemble, args.model_offset, temperature)
    precision = proxy_precision(ensemble, args.max_precision or math.inf)
    offsets = args.model_offset, args.target_offset
    if args.loss == "proxy":
        return proxy_loss(logits, ensemble, precision, *offsets)
    return rkl_proxy_loss(logits, ensemble, precision, *offsets, args.rkl_target)


def batch_loss(model, batch, epoch, step, teachers, args):
    """(losses of this process's rows; which of them are right: of a student, agree with the
    ensemble; rows of the global batch)."""
    images, labels, size = batch.images, batch.labels, batch.global_size
    if args.kind == "mimo":
        images, labels, size = mimo_batch(batch, epoch, step, args)
    with autocast(args):
        logits = model(images)
    if args.kind == "distill":
        temperature = annealed_temperature(epoch, args.temperature, args.anneal_epochs) \
            if args.loss == "dirichlet_likelihood" else 1.0
        ensemble = teachers.statistics(batch, temperature)
        rows = distillation_loss(logits, ensemble, args, temperature)
        return rows, logits.argmax(-1) == ensemble.log_probs.argmax(-1), size
    logits, labels = logits.flatten(0, -2), labels.flatten()  # MIMO: rows and subnetworks
    rows = F.cross_entropy(logits, labels, reduction="none", label_smoothing=args.label_smoothing)
    return rows, logits.argmax(-1) == labels, size


def mimo_batch(batch, epoch, step, args):
    """(images [b, E C, H, W], labels [b, E], global rows x E): this process's rows of the global
    batch, whose images all processes have."""
    generator = torch.Generator().manual_seed(common.derive_seed(args.seed, epoch, step))
    rows = mimo_rows(batch.global_size, args.batch_repetitions, args.repetition_probability,
                     args.mimo_members, generator)
    own = rows.tensor_split(common.world_size())[common.rank()].to(args.device, non_blocking=True)
    return batch.images[own].flatten(1, 2), batch.labels[own], rows.numel()


def train(net, train_set, args, run, teachers=None):
    """A member, a MIMO network or a student, by `args.kind`; goes on after the last whole epoch."""
    images, full = args.batch_size, args.lr * args.batch_size / 256
    if args.kind == "mimo":  # published: rows, with repetitions and members
        images //= args.batch_repetitions * args.mimo_members
    optimiser, loader = make_optimiser(net, args), make_loader(train_set, args, images, train=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    common.say(f"learning rate {full:g} = --lr {args.lr:g} x {args.batch_size} / 256")
    model = common.data_parallel(net, args.device)
    model = torch.compile(model) if args.compile else model
    for epoch in run.epochs(args.epochs, name="network", net=net, optimiser=optimiser):
        totals = torch.zeros(3, dtype=torch.float64, device=args.device)
        model.train()
        for step, batch in run.steps(loader, epoch):
            for group in optimiser.param_groups:
                group["lr"] = full * learning_rate(epoch * steps + step, steps, args.epochs,
                                                   args.schedule, args.warm_up)
            rows, right, size = batch_loss(model, batch, epoch, step, teachers, args)
            optimiser.zero_grad()
            # of the global mean: DDP divides by the number of processes
            (rows.sum() * common.world_size() / size).backward()
            optimiser.step()
            totals += torch.stack([rows.detach().double().sum(), right.sum().double(),
                                   totals.new_full((), len(rows))])
        loss, right, count = common.all_reduce(totals)
        run.log(loss / count, accuracy=right / count, lr=optimiser.param_groups[0]["lr"],
                examples=min(steps * images, len(train_set)))


# ---- Evaluation ---------------------------------------------------------------------------------

ROWS = {"single": "single network", "ensemble": "ensemble", "ensemble_proxy": "its proxy",
        "ensemble_proxy_t1": "its proxy + 1", "student_forward_kl": "EnD (forward KL)",
        "student_dirichlet_likelihood": "EnD2 (likelihood)", "student_proxy": "proxy, forward KL",
        "student_rkl_proxy": "proxy, reverse KL", "mimo": "MIMO"}


class Models(NamedTuple):
    """What is evaluated together: the members' forward passes serve four rows of the table."""

    members: list = []
    others: dict = {}       # {"student_<loss>", "mimo": network}
    offset: float = 1.0     # of the students


class SavedSet(NamedTuple):
    """What --predict saved of a set: `passes`'s logits [N, ...] by name."""

    name: str
    labels: Tensor
    logits: dict
    offset: float


@torch.no_grad()
def passes(models, dataset, args):
    """Yield (index [b], {"members" [b, M, K], "student_<loss>" [b, K], "mimo" [b, E, K]: logits},
    labels [b]) of this process's part of a set, un-augmented; the networks are in eval mode."""
    if isinstance(dataset, SavedSet):
        own = torch.arange(len(dataset.labels)).tensor_split(common.world_size())[common.rank()]
        for rows in own.split(512):
            yield rows, {k: z[rows] for k, z in dataset.logits.items()}, dataset.labels[rows]
        return
    for batch in make_loader(dataset, args, max(512, args.batch_size)).epoch():
        x, found = batch.images, {}
        with autocast(args):
            if models.members:
                found["members"] = torch.stack([net(x) for net in models.members], 1)
            for name, net in models.others.items():
                found[name] = net(x if net.fc.mimo == 1 else x.repeat(1, net.fc.mimo, 1, 1))
        yield batch.index, found, batch.labels


def outputs_of(logits, offset, classes=None) -> dict:
    """{row of the table: Outputs} of `passes`'s logits, predicting among `classes` [n], or all.

    paper: each member's logits are restricted to the classes before its softmax, then averaged."""
    found = {}
    for name, z in logits.items():
        if name == "members":
            found["single"] = softmax_outputs(z[:, 0])
            if z.shape[1] > 1:
                own = ensemble_statistics(z.unbind(1))
                found |= {"ensemble": ensemble_outputs(own), "ensemble_proxy": proxy_outputs(own),
                          "ensemble_proxy_t1": proxy_outputs(own, 1.0)}
        elif name == "mimo":
            found[name] = ensemble_outputs(ensemble_statistics(z.unbind(1) if z.ndim == 3 else [z]))
        else:
            found[name] = softmax_outputs(z) if name == "student_forward_kl" else \
                student_outputs(z, offset)
    found = {row: found[row] for row in ROWS if row in found}
    if classes is None:
        return found
    some = outputs_of({name: z[..., classes] for name, z in logits.items()}, offset)
    return {row: outputs._replace(log_probs=some[row].log_probs) for row, outputs in found.items()}


def columns_of(outputs, labels) -> dict:
    """{name: [B]}: what the metrics need. `labels` [B] number the classes predicted from; where
    they are not among these only the measures and the precision (its ln) have a meaning."""
    log_probs = outputs.log_probs
    probs, own = log_probs.exp(), labels.clamp(0, log_probs.shape[1] - 1)[:, None]
    log_prob = log_probs.gather(1, own)[:, 0]
    top = log_probs.topk(min(5, log_probs.shape[1])).indices == labels[:, None]
    first = log_probs.argmax(1) == labels
    return {"log_prob": log_prob, "correct": first.double(), "top5": top.any(1).double(),
            "brier": probs.square().sum(1) - 2 * log_prob.exp() + 1, "top_prob": probs.amax(1),
            "precision": outputs.log_precision, **outputs.measures}


def score(models, dataset, args, classes=None) -> dict:
    """{row of the table: {name: column [N]}} of a set, in its order, on the main process; empty on
    the others."""
    rows, names, index = {}, {}, []
    for at, logits, labels in passes(models, dataset, args):
        for row, outputs in outputs_of(logits, models.offset, classes).items():
            own = columns_of(outputs, labels)
            names[row] = [*own]
            rows.setdefault(row, []).append(torch.stack([*own.values()], 1).cpu())
        index.append(at.cpu())
    gathered = common.gather_rows(torch.cat(index), *map(torch.cat, rows.values()))
    found = {row: dict(zip(names[row], own.T)) for row, own in zip(rows, gathered or ())}
    if lost := [ROWS[row] for row, own in found.items() if own["log_prob"].isnan().any()]:
        raise UserError(f"{lost[0]}: logits on {dataset.name} are not finite, it has diverged; "
                        "train it again with a lower --lr")
    return found


def predictive_metrics(own) -> dict:
    """Accuracy, NLL, calibration (15 bins), Brier, PRR by measure, of one row's columns."""
    bars = common.reliability(own["top_prob"], own["correct"], 15)
    gap = np.abs(bars.accuracy - bars.confidence)
    means = {name: column.mean().item() for name, column in own.items()}
    return {"accuracy": means["correct"], "top5_accuracy": means["top5"],
            "nll": -means["log_prob"], "brier": means["brier"],
            "ece15": float(bars.counts @ gap / bars.counts.sum()), "mce15": float(gap.max()),
            **{f"prr_{m}": common.prediction_rejection_ratio(own[m], own["correct"])
               for m in MEASURES if m in own}}


def detection_metrics(inside, outside) -> dict:
    """AUROC and FPR95 by measure and score, OOD positive, of two sets' columns."""
    values = {}
    for measure in (*MEASURES, *SCORES):
        if measure in inside:
            scored = common.ood_metrics(inside[measure], outside[measure], larger_means="ood")
            values |= {f"{key}_{measure}": scored[key] for key in ("auroc", "fpr95")}
    return values


def rank_correlations(student, ensemble) -> dict:
    """Spearman correlation of a student's uncertainties with the ensemble's, example by example:
    whether the distribution was distilled."""
    return {f"spearman_{name}": float(stats.spearmanr(student[name], ensemble[name]).statistic)
            for name in (*MEASURES[1:], "precision") if name in student and name in ensemble
            and student[name].std() > 0 and ensemble[name].std() > 0}


@torch.no_grad()
def milliseconds(models, dataset, args) -> dict:
    """Time of a prediction by row of the table, ms an example, in batches; the shortest of five."""
    nets = {"single": models.members[:1], "ensemble": models.members,
            **{name: [net] for name, net in models.others.items()}}
    found = {}
    for row, own in nets.items():
        for _ in range(5 if own else 0):
            n, (channels, *size) = min(256, len(dataset)), dataset.shape
            x = torch.zeros(n, channels * own[0].fc.mimo, *size, device=args.device)
            x = x.to(own[0].fc.weight.dtype, memory_format=torch.channels_last)
            start = time.perf_counter()
            with autocast(args):
                torch.stack([net(x) for net in own]).sum().item()  # waits for the device
            seconds = time.perf_counter() - start
            found[row] = min(found.get(row, math.inf), 1e3 * seconds / n)
    return found


def evaluate(models, sets, args):
    """(rows of the report, {row of the table: columns} of the test set): each model on the test
    set, against each OOD set (and on it, where its labels mean something), on corrupted sets."""
    seconds, test = milliseconds(models, sets.test, args), score(models, sets.test, args)
    rows, name, n = [], sets.test.name, len(sets.test.labels)
    for row, own in test.items():
        values = predictive_metrics(own) | {"ms_per_example": seconds.get(row)}
        if row.startswith("student") and "ensemble" in test:
            values |= rank_correlations(own, test["ensemble"])
        rows.append({"method": row, "set": name, "n": n, **values})
    for other, (dataset, classes) in sets.ood.items():
        same = torch.isin(sets.test.labels, torch.tensor([]) if classes is None else classes)
        # ImageNet-O's folders are named after classes that its images are not of
        labelled = classes is not None and other != "imagenet_o" or \
            getattr(dataset, "label_probs", None) is not None
        for row, own in score(models, dataset, args, classes).items():
            if labelled:
                rows.append({"method": row, "set": other, "n": len(dataset.labels),
                             **predictive_metrics(own)})
            rows.append({"method": row, "set": name, "against": other, "n": n,
                         **detection_metrics(test[row], own)})
            if same.any():  # published: "masked"
                inside = {key: column[same] for key, column in test[row].items()}
                rows.append({"method": row, "set": f"{name}, its classes", "against": other,
                             "n": int(same.sum()), **detection_metrics(inside, own)})
    return rows + shift_rows(models, sets, args), test


def shift_rows(models, sets, args) -> list:
    """Rows of each corruption and severity, and means over the kinds at each severity and over all;
    of the 15 kinds that published tables average, too."""
    rows, (name, kinds), few = [], sets.shift, args.shift_examples or None
    for kind, severity in itertools.product(kinds, data.SEVERITIES):
        if args.shift == "computed":
            dataset = data.corrupted(data.evenly(sets.test, few), kind, severity)
        else:
            dataset = data.load_corrupted(f"{args.dataset}_c", kind, severity, args.data_dir)
            dataset = prepared(data.match(data.evenly(dataset, few), sets.test), args, 1)
        for row, own in score(models, dataset, args).items():
            rows.append({"method": row, "set": f"{name} {kind} {severity}",
                         "n": len(dataset.labels), **predictive_metrics(own)})
    standard = [kind for kind in kinds if kind in data.CIFAR_C_KINDS[:15]]
    groups = [kinds] + [standard] * (15 == len(standard) < len(kinds))
    severities = [*((severity,) for severity in data.SEVERITIES), data.SEVERITIES]
    methods = dict.fromkeys(row["method"] for row in rows)
    for method, group, some in itertools.product(methods, groups, severities):
        names = {f"{name} {kind} {severity}" for kind in group for severity in some}
        own = [row for row in rows if row["method"] == method and row["set"] in names]
        rows.append({"method": method, "set": f"{name} mean of {len(group)} kinds"
                     + f" {some[0]}" * (len(some) == 1),
                     **{key: float(np.mean([row[key] for row in own]))
                        for key in ("accuracy", "nll", "ece15", "brier")}})
    return rows


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#BBBBBB", "#CCBB44", "#AA3377", "#66CCEE", "#000000",
           "#999933"]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1, 1, 1))]  # curves that coincide show through


def plot_story(plt, path, columns):
    """Rejection curves by total uncertainty; precision of the students against the ensemble's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), constrained_layout=True)
    ensemble = columns.get("ensemble")
    for i, (row, own) in enumerate(columns.items()):
        if row == "ensemble_proxy_t1":
            continue
        rejected, error = common.rejection_curve(own["total"], own["correct"])
        left.plot(100 * rejected, 100 * error, color=COLOURS[i], ls=DASHES[i % 4],
                  lw=3.2 - 0.3 * i, label=ROWS[row])
        if ensemble and row.startswith("student") and row != "student_forward_kl":
            right.plot(ensemble["precision"], own["precision"], ".", ms=2, color=COLOURS[i])
    left.set(xlabel="rejected as most uncertain, %", ylabel="errors left, % of all",
             xlim=(0, 100), yscale="log", ylim=(50 / (len(error) - 1), 130))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    if ensemble:
        ends = np.quantile(ensemble["precision"], [0.001, 0.999])
        right.plot(ends, ends, "k--", lw=1, label="equal")
        right.set(xlabel="ln precision of the ensemble's proxy", ylabel="ln precision of a student")
        right.legend(loc="lower right")
    else:
        right.remove()
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


class Sets(NamedTuple):
    """All sets of a run, loaded before anything is trained."""

    train: object = None      # not with --eval
    test: object = None
    ood: dict = {}            # {name: (set, the test set's classes [n] that its folders name)}
    predicted: object = None  # of --predict
    shift: tuple = ("", ())   # name of the corrupted test set, its kinds


def load_sets(args) -> Sets:
    """Refuses what could not be evaluated."""
    if args.logits:
        test, *ood = saved = [*map(saved_set, args.logits)]
        if test.labels.min() < 0:
            raise UserError(f"{args.logits[0]}: the first file is to have labels; give another")
        if len({own.name for own in saved}) < len(saved):
            raise UserError("--logits: two files have the same name; rename one")
        shapes = [{name: z.shape[1:] for name, z in own.logits.items()} for own in saved]
        if shapes != shapes[:1] * len(saved):
            raise UserError("--logits: the files hold logits of different networks; predict again")
        return Sets(test=test, ood={own.name: (own, None) for own in ood})
    options = dict(data_dir=args.data_dir, val_fraction=0.0, image_size=args.image_size)
    train = None if args.eval else data.load(args.dataset, "train", **options,
                                             limit=args.limit_train)
    test = data.load(args.dataset, "test", **options)
    like, (name, kinds) = train or test, (f"{args.dataset}_c", [])
    if args.shift == "computed" and isinstance(test, data.StreamedSet):
        raise UserError("--shift computed is for sets in memory; use --shift none or published")
    if args.shift == "computed":
        name, kinds = f"{test.name}_computed", [*data.CORRUPTIONS]
    elif args.shift == "published" and name in data.CORRUPTED:
        kinds = data.corruption_kinds(name, args.data_dir)
        name = data.corrupted_name(name, kinds)
    if "shift" in args.explicit and args.shift != "none" and not kinds:
        raise UserError(f"--shift published: {name} is not there; use --shift none or computed")
    if args.cache_teachers and train and (gb := 4e-9 * len(train) * train.num_classes) > 6:
        raise UserError(f"--cache-teachers: {gb:.1f} GB; add --no-cache-teachers")
    ood = {}
    for i, (other, own) in enumerate(data.ood_sets(args, like).items(), 2):
        classes = [like.classes.index(c) for c in own.classes if c in like.classes]
        whole = classes and len(classes) == len(own.classes)
        ood[other] = prepared(own, args, i), torch.tensor(classes) if whole else None
    predicted = args.predict and prepared(data.predict_set(args, like), args, 1)
    data.check_shares(train, test, predicted, *(own for own, _ in ood.values()))
    data.check_shares(test, limit=kinds and args.shift_examples or math.inf)
    return Sets(train and prepared(train, args, 0), prepared(data.match(test, like), args, 1), ood,
                predicted, (name, kinds))


def prepared(dataset, args, seed):
    """A set under --noise; of files, under --resize."""
    streamed = isinstance(dataset, data.StreamedSet)
    if args.noise and streamed:
        raise UserError(f"--noise: {dataset.name} is streamed; use --noise 0")
    if args.noise:
        noisy = data.corrupted(dataset, "gaussian_noise", args.noise, seed)
        return replace(noisy, name=dataset.name)
    if streamed and args.resize == "square" and seed:
        return replace(dataset, resize=[round(dataset.shape[-1] * 256 / 224)] * 2)
    return dataset


def saved_set(path) -> SavedSet:
    """A file of --predict."""
    head = common.load_arrays(path, ("names", "labels", "offset"))
    logits = common.load_arrays(path, head["names"].tolist())
    if any(len(z) != len(head["labels"]) or not np.isfinite(z).all() for z in logits.values()):
        raise UserError(f"{path}: logits must be finite, a row for each of the labels")
    logits = {name: torch.as_tensor(z) for name, z in logits.items()}
    return SavedSet(Path(path).stem.removeprefix("logits_"), torch.as_tensor(head["labels"]),
                    logits, float(head["offset"]))


def run_name(args) -> str:
    width = f"-w{args.width:g}" * (args.width != 1)
    return args.name or f"{data.set_name(args.dataset)}-{args.model}{width}"


def network_args(args, kind, seed, **more):
    """The options that shape one network of `kind`, with --epochs and --batch-size its own."""
    others = {title for other, title in OWN.items() if other != kind}
    own = {k: v for k, v in vars(args).items() if args.groups.get(k) not in others}
    for key in ("epochs", "batch_size"):
        value, alone = own.pop(f"{kind}_{key}", None), kind == args.method and key in args.explicit
        own[key] = own[key] if value is None or alone else value
    if kind == "distill":
        own["width"], other = own.pop("student_width") or args.width, own.pop("other_epochs")
        if more["loss"] in ("dirichlet_likelihood", "proxy") and other is not None:
            own["epochs"] = other
    more |= {"kind": kind}
    groups = {**args.groups, **dict.fromkeys(more, "network")}  # they identify it
    return argparse.Namespace(**{**own, **more, "seed": seed, "groups": groups, "name": None})


def network(args, sets, kind, seed, path=None, teachers=None, **more):
    """(network, its options): read from `path` (ours, torchvision's, Lightning's); trained, where
    its last epoch is not there yet; or, with --eval, and as a teacher of --method distill, one that
    its own run has completed."""
    own = network_args(args, kind, seed, **more)
    common.seed_all(seed, [*OWN].index(kind))
    net = make_network(args.model, sets.test.num_classes, sets.test.shape, own.width,
                       args.mimo_members if kind == "mimo" else 1)
    net = net.to(args.device, memory_format=torch.channels_last)
    name = f"{run_name(args)}-{f'student_{own.loss}' if kind == 'distill' else kind}-seed{seed}"
    if not (path or args.eval or (args.method, kind) == ("distill", "base")):
        own.name = name
        train(net, sets.train, own, common.Run(own, "proxy_distill", name), teachers)
        return net.eval().requires_grad_(False), vars(own)
    finished = Path(args.out_dir, "proxy_distill", name, "network.pt")
    if not path and not common.broadcast(finished.is_file()):
        first = "the same command without --eval" if args.eval else f"--method base --seed {seed}"
        raise UserError(f"no {finished}; train first: {first}")
    found = load_weights(net, path or finished)
    config = found.get("hyper_parameters", found.get("config", {}))
    if not path:  # how it was trained is its own affair: another batch size changes nothing here
        here = common.plain(common.options(own, without=("training", "evaluation", "run")))
        common.check_same({k: config.get(k) for k in here}, here, finished, evaluating=False)
        if found["epoch"] < own.epochs:
            raise UserError(f"{finished} has {found['epoch']} of {own.epochs} epochs; first finish "
                            "it, or give the epochs that it was trained for")
    return net.eval().requires_grad_(False), config


def networks_of(args, sets, run) -> Models:
    """The networks of --method and this seed, trained or read; with --eval those of files alone, if
    there are any."""
    if args.logits:
        return Models(offset=sets.test.offset)
    files = args.eval and any((args.ensemble_paths, args.student_path, args.mimo_path))
    members, others, offset = [], {}, args.model_offset
    if args.ensemble_paths or args.method != "mimo" and not files:
        seeds = range(args.seed, args.seed + (1 if args.method == "base" else args.members))
        paths = args.ensemble_paths or [None] * len(seeds)
        members = [network(args, sets, "base", *own)[0] for own in zip(seeds, paths)]
    if args.student_path:
        net, own = network(args, sets, "distill", args.seed, args.student_path, loss=args.loss)
        others[f"student_{own.get('loss_type', own.get('loss', args.loss))}"] = net
        offset = float(own.get("model_offset", offset))
    elif args.method in ("all", "distill") and not files:  # all students have the same teachers
        teachers = Teachers(members, args)
        if args.cache_teachers and args.losses and not args.eval:
            teachers.fill_cache(sets.train, run)
        for loss in args.losses:
            others[f"student_{loss}"], _ = network(args, sets, "distill", args.seed, None, teachers,
                                                   loss=loss, ensemble=teachers.identity)
    if args.mimo_path or not files and args.method in ("mimo", *["all"] * args.mimo):
        others["mimo"], _ = network(args, sets, "mimo", args.seed, args.mimo_path)
    return Models(members, others, offset)


def predict(models, dataset, run, args):
    """predictions.csv of the best model there is, and all logits in logits_<set>.npz."""
    rows = []
    for index, logits, labels in passes(models, dataset, args):
        found = outputs_of(logits, models.offset)
        best = [row for row in ("single", "mimo", "ensemble", *(f"student_{x}" for x in LOSSES))
                if row in found][-1]
        measures = {k: v for k, v in found[best].measures.items() if k != "confidence"}
        rows.append([t.cpu() for t in (index, labels, found[best].log_probs, *measures.values(),
                                       *logits.values())])
    rows = common.gather_rows(*map(torch.cat, zip(*rows)))
    if rows is not None:
        labels, log_probs, *rest = rows
        common.write_predictions(run.dir / "predictions.csv", dataset, log_probs,
                                 **dict(zip(measures, rest)))
        common.save_arrays(run.dir / f"logits_{dataset.name}.npz", names=[*logits], labels=labels,
                           offset=models.offset, **dict(zip(logits, rest[len(measures):])))


def main(argv=None) -> list:
    args = parse_args(argv)
    sets = load_sets(args)
    what = f"student_{args.loss}" if args.method == "distill" else args.method
    name = f"{run_name(args)}-results-{'logits' if args.logits else what}-seed{args.seed}"
    name = args.name if args.name and args.method == "all" else name
    # --eval: networks may be there, trained one by one, where this directory is not yet
    exists = common.broadcast(Path(args.out_dir, "proxy_distill", name).is_dir())
    step = args.members if args.method in ("all", "distill") else 1
    seeds = range(args.seed, args.seed + args.runs * step, step)
    # refuse networks that are not there before the directory has its options
    for seed in seeds if args.eval and not exists or args.method == "distill" else ():
        own = common.with_options(args, seed=seed, losses=args.losses if args.eval else [])
        networks_of(own, sets, None)
    run = common.Run(common.with_options(args, name=name, eval=args.eval and exists),
                     "proxy_distill", name)
    rows = []
    for seed in seeds:
        own = common.with_options(args, seed=seed)
        models = networks_of(own, sets, run)
        with run.clock("evaluate"):
            found, columns = evaluate(models, sets, own)
        rows += [{"method": ROWS[row.pop("method")], "seed": seed, **row} for row in found]
        if seed == args.seed and sets.predicted:
            predict(models, sets.predicted, run, own)
        if seed == args.seed and columns and args.plot and (plt := common.pyplot()):
            plot_story(plt, run.dir / "story.png", columns)
    columns = ["accuracy", "nll", "spearman_precision", "auroc_epistemic", "auroc_total"]
    columns += ["ece15", "prr_total", "ms_per_example"] * (args.runs == 1)  # in 120 characters
    shown = [row for row in rows if row["set"] == sets.test.name]
    return run.report(rows, columns, shown)


if __name__ == "__main__":
    common.launch(main)
