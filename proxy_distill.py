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
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      proxy_distill.py --dataset imagenet --method base --seed 3   # two machines, R = 0 and 1

Expected:
  numbers, n = 3 seeds, mean +- standard error, two CPU cores, minutes each; accuracy, and AUROC of
    letters and of blended numbers by mutual information (EnD: by total uncertainty): reverse KL
    97.69 +- 0.09 %, 0.992 +- 0.005, 0.966 +- 0.001; EnD 97.61 +- 0.08 %, 0.979 +- 0.001, 0.941 +-
    0.005; EnD2's likelihood and the forward KL 0.1 %, that is, they do not train.
  imagenet, ResNet-50: not measured.

Differs from the published code (github.com/yandex-research/proxy-dirichlet-distillation):
  - The default loss is the paper's, rkl_proxy. The published ImageNet command has --loss proxy, the
    forward KL, whose gradient comes from the unlikely classes (K / 3 times the likely one's).
  - Offsets are 1 by default, and stored with the student; predictions never take them.
  - The published reverse KL counts the target's smoothing twice: its optimum has precision beta_0 +
    2 K. That is kept (--rkl-target published); --rkl-target paper has beta_0 + K.
  - The gradient is the closed form, right where autograd of the textbook form is noise; teachers'
    statistics are float64 and RMI >= 0 (there, identical members give negative precisions).
  - An ensemble's proxy is scored with the number of classes (there: the number of members), EPKL is
    a mean over pairs (there: a sum), RMI = EPKL - MI (there: the sum less MI).
  - PRR shares ties and is null without errors; metrics are over all processes, on all examples.
  - Images are resized in proportion (--resize square: as published, both sides to 256).
  - MIMO's members are averaged as probabilities (--mimo-average logits: as published).
"""

import argparse
import hashlib
import itertools
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import old_common as common
import old_data as data
from old_common import UserError

# ---- Arguments ----------------------------------------------------------------------------------

LOSSES = ("forward_kl", "dirichlet_likelihood", "proxy", "rkl_proxy")
PRESETS = {
    # published: ResNet-50, SGD 0.1 per 256 images, Nesterov 0.9, decay 1e-4, /10 at 30, 60, 80 of
    # 90 epochs; 8 GPUs with 256 images each; members 120 epochs, students 90, MIMO 150
    "": dict(model="resnet50", width=1.0, student_width=1.0, members=10, epochs=90, base_epochs=120,
             mimo_epochs=150, batch_size=2048, lr=0.8, base_lr=0.8, mimo_lr=1.6, opt="sgd",
             weight_decay=1e-4, schedule="step", warm_up=0.0, losses=["forward_kl", "rkl_proxy"],
             mimo=False, amp="off", compile=False, shift="none", shift_examples=0,
             cache_teachers=False, ood=[]),
    "imagenet": dict(ood=["imagenet_o", "imagenet_a", "imagenet_r"], shift="published", mimo=True),
    "tiny_imagenet": dict(model="resnet18", batch_size=256, lr=0.1, base_lr=0.1, mimo_lr=0.1,
                          shift="published"),
    "cifar100": dict(model="resnet18", batch_size=128, lr=0.1, base_lr=0.1, mimo_lr=0.1,
                     weight_decay=5e-4, ood=["svhn"], shift="published"),
    "cifar10": dict(model="resnet18", batch_size=128, lr=0.1, base_lr=0.1, mimo_lr=0.1,
                    weight_decay=5e-4, ood=["svhn", "cifar100"], shift="published"),
    "numbers": dict(model="convnet", width=0.25, student_width=0.125, members=5, epochs=6,
                    base_epochs=3, mimo_epochs=8, batch_size=128, lr=3e-3, base_lr=3e-3,
                    mimo_lr=3e-3, opt="adam", schedule="cosine", warm_up=0.2, losses=list(LOSSES),
                    cache_teachers=True, shift="computed", shift_examples=100,
                    ood=["numbers_letters", "numbers_ambiguous"]),
}
# The options that shape a network, by what it is; they guard its checkpoint.
COMMON_OPTIONS = ("dataset", "model", "batch_size", "opt", "momentum", "weight_decay", "no_decay",
                  "schedule", "warm_up", "augment", "label_smoothing", "amp", "limit_steps",
                  "limit_train")
OPTIONS = {"base": ("width", "base_epochs", "base_lr"),
           "mimo": ("width", "mimo_epochs", "mimo_lr", "mimo_members", "repetition_probability",
                    "batch_repetitions"),
           "distill": ("student_width", "epochs", "lr", "model_offset", "target_offset",
                       "rkl_target", "max_precision", "temperature", "anneal_epochs")}


def parse_args(argv=None):
    parser = common.Parser(prog="proxy_distill.py", description=__doc__.split("\n")[0],
                           epilog="Details, equations and differences: the top of this file.")
    common.add_common_arguments(parser, [d for d in PRESETS if d])
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--method", choices=["all", "base", "mimo", "distill"], default="all",
        help="all: members, students, table, what is done is kept; base: the member of --seed; "
        "distill: a student of --loss, from members that exist")
    add("--loss", choices=LOSSES, default="rkl_proxy", help="of --method distill: forward_kl "
        "(EnD), dirichlet_likelihood (EnD2), proxy (forward KL to it), rkl_proxy (the paper's)")
    add("--losses", nargs="*", choices=LOSSES, help="students of --method all")
    add("--mimo", action=flag, help="--method all: a MIMO network too")
    add("--model", help="resnet50, resnet18 (3x3 stem for images up to 64 pixels), convnet")
    add("--student-width", type=float, help="as --width, of the student")
    add("--members", type=int, help="M, of seeds --seed, --seed + 1, ... (paper: 10)")
    add("--ensemble-paths", "--ensemble_paths", nargs="*", metavar="FILE", help="members from "
        "state dicts: ours, torchvision's, or the published Lightning checkpoints")
    add("--base-epochs", type=int, help="of a member (paper: 120); --epochs is of a student (90)")
    add("--mimo-epochs", type=int, help="of a MIMO network (published: 150)")
    add("--base-lr", type=float, help="of a member (published: 0.1 per 256 images)")
    add("--mimo-lr", type=float, help="of a MIMO network (published: from the nominal batch)")
    add("--opt", choices=["sgd", "adam"], help="sgd with Nesterov momentum, or Adam")
    add("--momentum", type=float, default=0.9, help="of sgd")
    add("--weight-decay", "--weight_decay", "--wd", type=float, help="published: 1e-4")
    add("--no-decay", choices=["published", "norms", "none"], default="published",
        help="without decay: norms inside residual blocks (published), all norms and biases")
    add("--schedule", choices=["step", "cosine"], help="step: /10 at 30, 60, 80 of 90 epochs")
    add("--warm-up", type=float, help="share of the steps with a rising learning rate")
    add("--label-smoothing", type=float, default=0.0, help="of members and MIMO (published: 0)")
    add("--augment", action=flag, help="crop and flip (default: on, but for embedded sets)")
    add("--model-offset", "--model_offset", type=float, default=1.0, help="alpha = exp(z) + this "
        "(paper: 1; the published code's default: 0)")
    add("--target-offset", "--target_offset", type=float, default=1.0, help="added to the proxy")
    add("--rkl-target", choices=["published", "paper"], default="published", help="precision of "
        "the reverse KL's target: beta_0 + 2 K, or beta_0 + K (with --target-offset 1)")
    add("--max-precision", type=float, default=math.inf, help="cap of beta_0 (1e4 to 1e6 keep the "
        "scale of the logits near that of a classifier)")
    add("--temperature", type=float, default=1.0, help="of dirichlet_likelihood, first half of "
        "--anneal-epochs; then linear to 1")
    add("--anneal-epochs", type=int, default=0, help="0: no annealing (EnD2: 60 of 90)")
    add("--cache-teachers", action=flag, help="keep the members' statistics of every training "
        "image in a file: for views that do not change (--no-augment)")
    add("--mimo-members", "--ensemble_size", type=int, default=2, help="subnetworks of MIMO")
    add("--repetition-probability", "--repetition_probability", type=float, default=0.6,
        help="share of MIMO's rows in which all subnetworks see one image")
    add("--batch-repetitions", "--batch_repetitions", type=int, default=2, help="of MIMO")
    add("--limit-train", type=int, metavar="N", help="train on N images, evenly spaced")
    add_evaluation_arguments(add)
    add("--learning_rate", type=float, help=argparse.SUPPRESS)  # published, of what is trained
    add("--runs", type=int, default=1, help="repeat with the next members' seeds; mean and "
        "standard error")
    add("--save-interval", type=int, default=1, help="epochs between checkpoints")
    args = parser.parse_args(argv)
    if args.learning_rate is not None:
        setattr(args, {"base": "base_lr", "mimo": "mimo_lr"}.get(args.method, "lr"),
                args.learning_rate)
    del args.learning_rate
    return check_args(common.resolve_arguments(args, PRESETS, "numbers"))


def add_evaluation_arguments(add):
    add("--mimo-average", choices=["probs", "logits"], default="probs", help="published: logits")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH")
    add("--shift", choices=["none", "computed", "published"], help="also evaluate the corrupted "
        "test set, by severity: computed, or the CIFAR-C or ImageNet-C files")
    add("--shift-examples", type=int, metavar="N", help="test images a corruption; 0: all")
    add("--unreadable", choices=["refuse", "skip"], default="refuse", help="image files that do "
        "not decode: end at the first, or leave them out and name them on stderr (skip reads every "
        "file of the streamed folders once, before anything else)")
    add("--resize", choices=["side", "square"], default="side", help="image files, but for "
        "training: the shorter side to 256, or both (published); then the centre")
    add("--published-json", "--json_output", metavar="FILE", help="also write the metrics in the "
        "published layout, by row of the table")


def check_args(args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    if args.augment is None:
        args.augment = args.dataset not in data.EMBEDDED
    if args.ensemble_paths:
        args.members = len(args.ensemble_paths)
    for key in ("members", "mimo_members", "batch_repetitions", "save_interval", "runs"):
        if getattr(args, key) < 1:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1")
    if args.members < 2 and args.method in ("all", "distill"):
        raise UserError(f"--members {args.members}: an ensemble has at least 2")
    for key, low, high in (
            ("base_epochs", 0, 1e9), ("mimo_epochs", 0, 1e9), ("base_lr", 0, 1e9),
            ("mimo_lr", 0, 1e9), ("momentum", 0, 0.999), ("weight_decay", 0, 1e9),
            ("warm_up", 0, 0.9), ("label_smoothing", 0, 0.999), ("model_offset", 0, 1e9),
            ("target_offset", 0, 1e9), ("max_precision", 1e-6, math.inf), ("temperature", 1, 1e9),
            ("anneal_epochs", 0, 1e9), ("repetition_probability", 0, 1),
            ("shift_examples", 0, 1e9), ("student_width", 0.01, 1e3), ("limit_train", 1, 1e9)):
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{key.replace('_', '-')} {value}: must lie in [{low}, {high}]")
    if args.method == "all" and args.resume not in ("auto", "never"):
        raise UserError("--resume PATH is for one network; add --method base, mimo or distill")
    if args.cache_teachers and args.augment:
        raise UserError("--cache-teachers: augmented views change with every epoch; add "
                        "--no-augment")
    if args.temperature > 1 and (args.cache_teachers or not args.anneal_epochs):
        raise UserError("--temperature goes with --anneal-epochs and --no-cache-teachers")
    return args


# ---- Model --------------------------------------------------------------------------------------


def widen(t):
    """bf16 as float32; float32 and float64 as they are."""
    return t.float() if t.dtype == torch.bfloat16 else t


class Classifier(nn.Module):
    """Features and a linear head, computed in float32 even under autocast: logits reach ln 8e9.

    With `mimo` E > 1: E images stacked as channels in, E predictions [B, E, K] out.
    """

    def __init__(self, num_classes, mimo):
        super().__init__()
        self.num_classes, self.mimo = num_classes, mimo

    def forward(self, x):
        features = self.features(x)
        with torch.autocast(x.device.type, enabled=False):
            logits = self.fc(widen(features))
        return logits if self.mimo == 1 else logits.view(len(x), self.mimo, self.num_classes)


class ConvNet(Classifier):
    """Three convolutions and a linear layer, without global pooling: positions are kept."""

    def __init__(self, num_classes, in_channels, size, width=1.0, mimo=1, **_):
        super().__init__(num_classes, mimo)
        c, layers, c_in = max(1, round(32 * width)), [], in_channels * mimo
        for c_out in (c, 2 * c, 4 * c):
            layers += [nn.Conv2d(c_in, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out),
                       nn.ReLU(), nn.MaxPool2d(2)]
            c_in = c_out
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.fc = nn.Linear(c_in * (size // 8) ** 2, num_classes * mimo)

    def features(self, x):
        return self.layers(x)


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
        self.depth, self.downsample = len(shape), None
        nn.init.zeros_(getattr(self, f"bn{self.depth}").weight)
        # subsampled, then 1x1: on CPUs PyTorch 2.14's strided 1x1, channels last, writes out of
        # bounds in the backward pass
        self.subsample = nn.AvgPool2d(1, stride) if stride > 1 else nn.Identity()
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, c_out, 1, bias=False),
                                            nn.BatchNorm2d(c_out))

    def forward(self, x):
        h = x
        for i in range(1, self.depth + 1):
            h = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(F.relu(h) if i > 1 else h))
        return F.relu(h + (x if self.downsample is None else self.downsample(self.subsample(x))))


class ResNet(Classifier):
    """ResNet-18 or -50; images of more than 64 pixels take ImageNet's stem (7x7, max pool)."""

    def __init__(self, num_classes, in_channels, size, width=1.0, mimo=1, bottleneck=False):
        super().__init__(num_classes, mimo)
        c_in = c_stem = max(1, round(64 * width))
        large = size > 64
        self.conv1 = nn.Conv2d(in_channels * mimo, c_in, *((7, 2, 3) if large else (3, 1, 1)),
                               bias=False)
        self.bn1 = nn.BatchNorm2d(c_in)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        for group, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
            blocks, c = [], c_stem * 2**group
            for i in range(count):
                blocks.append(Block(c_in, c, 2 if group and not i else 1, bottleneck))
                c_in = 4 * c if bottleneck else c
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(c_in, num_classes * mimo)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))


def make_network(args, num_classes, shape, width, mimo=1):
    """A network for inputs of `shape` (C, H, W)."""
    networks = {"convnet": ConvNet, "resnet18": ResNet, "resnet50": ResNet}
    if args.model not in networks:
        raise UserError(f"--model {args.model}: use one of {', '.join(networks)}")
    more = {} if args.model == "convnet" else {"bottleneck": args.model == "resnet50"}
    return networks[args.model](num_classes, in_channels=shape[0], size=shape[-1], width=width,
                                mimo=mimo, **more)


def read_member(path, net):
    """Load a state dict (plain, ours, or a Lightning checkpoint's) into `net`."""
    if not Path(path).is_file():
        raise UserError(f"--ensemble-paths: no file {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # TorchScript archives, pickled code, damaged files: many types
        raise UserError(f"{path}: not a file of plain tensors ({common.one_line(error)}); save the "
                        "member's state_dict() with torch.save") from None
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    state = state if isinstance(state, dict) else {}
    state = {k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    own = net.state_dict()
    first = next(iter(own))
    prefix = min((k.removesuffix(first) for k in state if k.endswith(first)), key=len, default="")
    state = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    differing = sorted(k for k in {*own, *state}
                       if k not in own or k not in state or own[k].shape != state[k].shape)
    if differing:
        there = tuple(state[differing[0]].shape) if differing[0] in state else "nothing"
        here = tuple(own[differing[0]].shape) if differing[0] in own else "nothing"
        raise UserError(f"{path}: {len(differing)} tensors do not fit, {differing[0]} first: "
                        f"{there} there, {here} in --model; check --model, --width and the classes")
    net.load_state_dict(state)
    return net


# ---- Method -------------------------------------------------------------------------------------
# B rows, M members, K classes; z student logits [B, K]; all statistics and losses are float64.

LOG_ROOT = 0.5 * math.log(2 * math.pi)
EPS = 2.0**-23  # published code: in the precision, so that agreeing members have a finite one


def row_blocks(x, entries=2**15):
    """Slices of the rows of x [B, ...]: on a CPU a few at a time, so that intermediate results stay
    in its cache and take no fresh memory, which costs more than the arithmetic; else all."""
    if x.device.type != "cpu" or not len(x):
        return [slice(None)]
    step = max(1, entries * torch.get_num_threads() // x[0].numel())
    return [slice(start, start + step) for start in range(0, len(x), step)]


class Ensemble(NamedTuple):
    """What the losses and measures need of M predictions p_m [B, K]: sums over members."""

    log_probs: Tensor  # [B, K] ln pi, pi = (1/M) sum_m p_m
    mean_log: Tensor   # [B, K] (1/M) sum_m ln p_m
    data: Tensor       # [B] (1/M) sum_m H(p_m), nats
    rmi: Tensor        # [B] (1/M) sum_m KL(pi || p_m), nats


def ensemble_statistics(logits_of_members, temperature=1.0) -> Ensemble:
    """Statistics of members' logits [B, K]: of a list, or of an iterable, one member in memory at a
    time. No gradient reaches them."""
    blocks, members = [slice(None)], logits_of_members
    if isinstance(members, (list, tuple, Tensor)):
        blocks, first = row_blocks(members[0], 2**17), members[0]
        parts = lambda rows: (z[rows] for z in members)
    else:
        first = next(members := iter(members))
        parts = lambda rows: itertools.chain([first], members)
    found = Ensemble(*(torch.zeros_like(t, dtype=torch.float64)
                       for t in (first, first, first[:, 0], first[:, 0])))
    work = [torch.empty_like(found.log_probs[blocks[0]]) for _ in range(2)]
    for rows in blocks:
        sum_over_members(parts(rows), temperature, Ensemble(*(t[rows] for t in found)), work)
    return found


def sum_over_members(logits_of_members, temperature, found, work):
    """Fill `found`, an Ensemble of zeros; `work`: two [B, K] to overwrite."""
    m, (total, mean_log, data_nats, rmi) = 0, found
    z, e = (t[:len(total)] for t in work)
    for logits in logits_of_members:
        z.copy_(logits.detach())
        if temperature != 1:
            z /= temperature
        z -= z.amax(-1, keepdim=True)
        sums = torch.exp(z, out=e).sum(-1, keepdim=True)  # p = e / sums, ln p = z - ln sums
        total.addcmul_(e, 1 / sums)
        mean_log += z.sub_(sums.log())
        data_nats -= e.mul_(z).sum(-1).div_(sums[:, 0])
        m += 1
    data_nats /= m
    mean_log /= m
    pi = torch.div(total, m, out=e).clamp_min_(torch.finfo(torch.float64).tiny)
    log_pi = torch.log(pi, out=total)
    rmi.copy_(pi.mul_(torch.sub(log_pi, mean_log, out=z)).sum(-1)).clamp_min_(0)


def proxy_precision(ensemble, most=math.inf) -> Tensor:
    """beta_0 = (K - 1) / (2 RMI) [B]: a Dirichlet of mean pi and large concentrations has the RMI
    (K - 1) / (2 beta_0). Members that are certain of different classes are no such Dirichlet: five
    of a thousand classes with MI 1.6 nats have a proxy with 0.08."""
    k = ensemble.log_probs.shape[-1]
    return ((k - 1) / (2 * ensemble.rmi + EPS)).clamp_max(most)


def forward_kl_loss(logits, ensemble) -> Tensor:
    """EnD: KL(pi || softmax(z)) [B]."""
    log_q = logits.double().log_softmax(-1)
    return (ensemble.log_probs.exp() * (ensemble.log_probs - log_q)).sum(-1)


def dirichlet_likelihood_loss(logits, ensemble, offset=1.0, temperature=1.0) -> Tensor:
    """EnD2: -(1/M) sum_m ln Dir(p_m; alpha) [B], alpha = exp(z / T) + offset, times T^2.

    `ensemble`: of logits divided by T. differs: no 2^-23 inside the logarithm of p_m."""
    alpha = (logits.double() / temperature).exp() + offset
    value = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1)) \
        - ((alpha - 1) * ensemble.mean_log).sum(-1)
    return temperature**2 * value


def proxy_loss(logits, ensemble, precision, model_offset=1.0, target_offset=1.0) -> Tensor:
    """KL(Dir(pi beta_0 + t) || Dir(exp(z) + m)) [B], the forward divergence (published command)."""
    alpha = logits.double().exp() + model_offset
    beta = ensemble.log_probs.exp() * precision[:, None] + target_offset
    alpha_0, beta_0 = alpha.sum(-1), beta.sum(-1)
    spread = torch.digamma(beta) - torch.digamma(beta_0)[:, None]
    return torch.lgamma(beta_0) - torch.lgamma(beta).sum(-1) + torch.lgamma(alpha).sum(-1) \
        - torch.lgamma(alpha_0) + ((beta - alpha) * spread).sum(-1)


def rkl_proxy_loss(logits, ensemble, precision, model_offset=1.0, target_offset=1.0,
                   target="published", value=True) -> Tensor:
    """KL(Dir(exp(z) + m) || Dir(pi b + 1)) / b [B], up to a constant: the paper's loss.

    target "published": b = beta_0 + K t, which counts the smoothing t twice, as the published code;
    "paper": b = beta_0, whose target is the paper's pi beta_0 + 1, whatever t. Without
    `value` the rows are 0 and their gradient right, in a third of the time.
    """
    k = logits.shape[-1]
    b = precision + (k * target_offset if target == "published" else 0)
    return ReverseKL.apply(logits, ensemble.log_probs, b, model_offset, value)


class ReverseKL(torch.autograd.Function):
    """L = -sum_k pi_k (psi(alpha_k) - psi(alpha_0)) - h(alpha) / b with its closed-form gradient.

    h is the entropy of Dir(alpha). alpha = e + m with e = exp(z), and

        dL/dz_k = e_k { [psi1(alpha_k) (alpha_k - 1) - psi1(alpha_0) (alpha_0 - K)] / b
                        + psi1(alpha_0) - pi_k psi1(alpha_k) }.

    Value and gradient are written with what Stirling leaves of lnGamma, psi and psi1, so that
    nothing cancels however large alpha is; autograd is noise from z = 40 on.
    """

    @staticmethod
    def forward(ctx, logits, log_pi, b, offset, value):
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss = torch.zeros_like(b)
        for rows in row_blocks(logits):
            e, pi, b_ = logits[rows].double().exp(), log_pi[rows].exp(), b[rows, None]
            alpha = e + offset
            alpha_0 = alpha.sum(-1, keepdim=True)
            if gradient is not None:
                (psi1, rest), (psi1_0, rest_0) = trigamma(alpha), trigamma(alpha_0)
                own = rest.div_(b_).addcmul_(psi1, pi + 1 / b_, value=-1)
                own += (logits.shape[-1] * psi1_0 - rest_0) / b_ + psi1_0
                gradient[rows] = own.mul_(e)
            if value:
                entropy, log_means = dirichlet_entropy(alpha)
                loss[rows] = -torch.linalg.vecdot(pi, log_means) - entropy / b[rows]
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad):
        gradient, = ctx.saved_tensors
        return grad[:, None].to(gradient) * gradient, None, None, None, None


# psi, psi1 and lnGamma at x from Stirling's series at w = x + 6, in vector operations. The six
# terms between come in pairs i, 5 - i, with q = (x + i)(x + 5 - i) = x (x + 5) + i (5 - i).
PAIRS = (0, 4, 6)


def polynomial(t, *coefficients):
    """c_0 + c_1 t + c_2 t^2 + ..."""
    *rest, last = coefficients
    value = t * last
    for c in rest[:0:-1]:
        value.add_(c).mul_(t)
    return value.add_(rest[0])


def trigamma(x) -> tuple[Tensor, Tensor]:
    """(psi1(x), x psi1(x) - 1) for 0 < x < 1e150, both to a relative 1e-12.

    psi1(x) = sum_{i<6} 1 / (x + i)^2 + psi1(w), psi1(w) = 1/w + 1/2w^2 + 1/6w^3 - 1/30w^5 + ...;
    1/a^2 + 1/b^2 = v (v - 2 / (a + b)) with v = 1/a + 1/b."""
    twice, product, y = 2 * x + 5, x * (x + 5), 1 / (x + 6)
    t, half = y * y, 2 / twice
    psi1 = polynomial(t, 1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
    psi1.mul_(y).add_(0.5).mul_(t)
    for c in PAIRS:
        v = twice / (product + c)
        psi1.addcmul_(v, v - half)
    rest = (x * psi1).sub_(y, alpha=6)  # x / w - 1 = -6 / w
    return psi1.add_(y), rest


def digamma(x) -> tuple[Tensor, Tensor]:
    """(psi(x), lnGamma(x) - (x - 1) psi(x) + x) for 0 < x < 1e150, to 1e-13 of max(1, |value|).

    psi(x) = psi(w) - sum_{i<6} 1 / (x + i), lnGamma(x) = lnGamma(w) - sum_{i<6} ln(x + i); the
    multiples of ln w and x that Stirling's series have cancel by hand."""
    twice, product, w = 2 * x + 5, x * (x + 5), x + 6
    y = 1 / w
    t, ratio, v = y * y, torch.ones_like(x), 0.5 * y
    for c in PAIRS:
        q = product + c
        v += twice / q
        ratio *= q.mul_(t)  # prod (x + i) / w
    v += t * polynomial(t, 1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
    own = y * polynomial(t, 1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
    own.addcmul_(x - 1, v).add_(LOG_ROOT - 6)
    log_w = w.log_()
    own.add_(log_w, alpha=0.5).sub_(ratio.log_())
    return log_w - v, own


def dirichlet_entropy(alpha) -> tuple[Tensor, Tensor]:
    """(h(alpha) [B] = sum lnGamma(alpha_k) - lnGamma(alpha_0) - sum (alpha_k - 1)(psi(alpha_k) -
    psi(alpha_0)), nats; E ln p_k = psi(alpha_k) - psi(alpha_0) [B, K]) of Dir(alpha).

    sum_k alpha_k = alpha_0 is left out of both sides."""
    (psi, own), (psi_0, whole) = digamma(alpha), digamma(alpha.sum(-1, keepdim=True))
    entropy = (own.sum(-1) - whole[:, 0]) - (alpha.shape[-1] - 1) * psi_0[:, 0]
    return entropy, psi.sub_(psi_0)


# Uncertainties [B], larger is more uncertain; all in nats but confidence.
MEASURES = ("confidence", "total_uncertainty", "data_uncertainty", "mutual_information", "epkl",
            "rmi")


# Of one network's logits: energy -ln sum exp z, and -max z; larger is more out-of-distribution. Of
# a student with a precision they are that precision, a target; of a classifier they are free.
SCORES = ("energy", "max_logit")


class Outputs(NamedTuple):
    """What a model says about B inputs."""

    log_probs: Tensor  # [B, K] its prediction
    measures: dict     # {name of MEASURES, or of SCORES: [B], NaN where a model has none}
    precision: Tensor  # [B] alpha_0; beta_0 of an ensemble; of a softmax sum exp(z), untrained


def ensemble_outputs(ensemble) -> Outputs:
    """MI = H(pi) - mean H(p_m); EPKL = mean over all ordered pairs KL(p_i || p_j) = MI + RMI."""
    total, top = torch.empty_like(ensemble.data), ensemble.log_probs.amax(-1).exp_()
    for rows in row_blocks(ensemble.log_probs):
        log_pi = ensemble.log_probs[rows]
        total[rows] = -torch.linalg.vecdot(log_pi.exp(), log_pi)
    information = (total - ensemble.data).clamp_min(0)
    return Outputs(ensemble.log_probs, measures_of(top, total, ensemble.data, information,
                                                   information + ensemble.rmi, ensemble.rmi),
                   proxy_precision(ensemble))


def dirichlet_outputs(alpha, log_probs) -> Outputs:
    """Measures of Dir(alpha) with mean p = alpha / alpha_0; predictions are `log_probs`:

    E H = -sum p (psi(alpha + 1) - psi(alpha_0 + 1)), MI = H(p) - E H, EPKL = (K - 1) / alpha_0,
    RMI = EPKL - MI. differs: the confidence is that of the prediction (there: of the mean)."""
    alpha_0 = alpha.sum(-1)
    p = alpha / alpha_0[:, None]
    total = torch.special.entr(p).sum(-1)
    expected = -(p * (torch.digamma(alpha + 1) - torch.digamma(alpha_0 + 1)[:, None])).sum(-1)
    information, epkl = (total - expected).clamp_min(0), (alpha.shape[-1] - 1) / alpha_0
    return Outputs(log_probs, measures_of(log_probs.amax(-1).exp(), total, expected, information,
                                          epkl, (epkl - information).clamp_min(0)), alpha_0)


def softmax_outputs(logits) -> Outputs:
    """One network: total uncertainty alone. The measures of a Dirichlet exp(z) would depend on the
    logits' scale, which cross entropy leaves arbitrary; sum exp(z) is kept to be compared."""
    log_probs = logits.double().log_softmax(-1)
    total = torch.special.entr(log_probs.exp()).sum(-1)
    nothing = torch.full_like(total, math.nan)
    measures = measures_of(log_probs.amax(-1).exp(), total, *[nothing] * 4)
    return Outputs(log_probs, measures | scores_of(logits), logits.double().exp().sum(-1))


def measures_of(top, *rest) -> dict:
    return dict(zip(MEASURES, (1 - top, *rest)))


def scores_of(logits) -> dict:
    z = logits.double()
    return dict(zip(SCORES, (-z.logsumexp(-1), -z.amax(-1))))


def student_outputs(logits, offset=1.0) -> Outputs:
    """softmax(z) predicts, without the offset; Dir(exp(z) + offset) measures."""
    z = logits.double()
    outputs = dirichlet_outputs(z.exp() + offset, z.log_softmax(-1))
    return outputs._replace(measures=outputs.measures | scores_of(z))


def proxy_outputs(ensemble, target_offset=0.0) -> Outputs:
    """The ensemble's proxy Dir(pi beta_0 + t)."""
    alpha = ensemble.log_probs.exp() * proxy_precision(ensemble)[:, None] + target_offset
    return dirichlet_outputs(alpha, ensemble.log_probs)


def ensemble_among(logits_of_members, classes=None):
    """(Ensemble over all K classes, its log-probabilities [B, n] among `classes` [n], or all).

    paper: each member's logits are restricted to the classes before its softmax, then averaged."""
    own = []

    def members():
        for z in logits_of_members:
            if classes is not None:
                own.append(z[:, classes])
            yield z

    ensemble = ensemble_statistics(members())
    return ensemble, ensemble.log_probs if classes is None else ensemble_statistics(own).log_probs


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

    step: a tenth at epochs floor(30 E / 90), floor(60 E / 90), floor(80 E / 90), as published;
    cosine: down to zero. Both after a linear warm-up."""
    warm = warm_up * epochs * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    if schedule == "step":
        return 0.1 ** sum(step // steps >= e * epochs // 90 for e in (30, 60, 80))
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, epochs * steps - warm)))


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, world, batch_size=None, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`."""
    return data.Loader(dataset, batch_size or args.batch_size, world.device, seed=args.seed,
                       shuffle=train, augment="crop_flip" if train and args.augment else "none",
                       rank=world.rank, world_size=world.size, workers=args.workers,
                       channels_last=True)


def autocast(args, world):
    return torch.autocast(world.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def make_optimiser(net, kind, args):
    """SGD or Adam; --no-decay says which tensors have no weight decay."""
    named = list(net.named_parameters())
    free = {"published": lambda n, p: re.match(r"layer\d\.\d+\.bn\d", n),
            "norms": lambda n, p: p.ndim == 1, "none": lambda n, p: False}[args.no_decay]
    groups = [{"params": [p for n, p in named if not free(n, p)]},
              {"params": [p for n, p in named if free(n, p)], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    lr = {"base": args.base_lr, "mimo": args.mimo_lr, "distill": args.lr}[kind]
    if args.opt == "adam":
        return torch.optim.Adam(groups, lr, weight_decay=args.weight_decay)
    return torch.optim.SGD(groups, lr, momentum=args.momentum, nesterov=args.momentum > 0,
                           weight_decay=args.weight_decay)


def temperature_at(epoch, args) -> float:
    """Constant for half of --anneal-epochs, linear to 1 over the other half, then 1."""
    half = args.anneal_epochs / 2
    if not half or args.loss != "dirichlet_likelihood":
        return 1.0
    return args.temperature + (1 - args.temperature) * min(1.0, max(0.0, epoch / half - 1))


def distillation_loss(logits, ensemble, args, temperature) -> Tensor:
    """The rows [B] of --loss."""
    if args.loss == "forward_kl":
        return forward_kl_loss(logits, ensemble)
    if args.loss == "dirichlet_likelihood":
        return dirichlet_likelihood_loss(logits, ensemble, args.model_offset, temperature)
    precision = proxy_precision(ensemble, args.max_precision)
    if args.loss == "proxy":
        return proxy_loss(logits, ensemble, precision, args.model_offset, args.target_offset)
    return rkl_proxy_loss(logits, ensemble, precision, args.model_offset, args.target_offset,
                          args.rkl_target, value=False)


def batch_loss(model, kind, batch, epoch, step, teachers, args, world):
    """(sum of the losses of this process's rows over the global batch, what is logged as loss and
    as correct predictions)."""
    if kind == "mimo":
        images, labels, size = mimo_batch(batch, epoch, step, args, world)
    else:
        images, labels, size = batch.images, batch.labels, batch.global_size
    with autocast(args, world):
        logits = model(images)
    logits = widen(logits)
    if kind == "distill":
        temperature = temperature_at(epoch, args)
        ensemble = teachers.statistics(batch, temperature)
        loss = distillation_loss(logits, ensemble, args, temperature).sum() / size
        shown = forward_kl_loss(logits.detach(), ensemble).sum() / size
        agrees = logits.argmax(-1) == ensemble.log_probs.argmax(-1)
        return loss, shown, agrees.sum() / size
    size *= logits.shape[1] if logits.ndim == 3 else 1  # MIMO: rows and members
    logits, labels = logits.flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, labels, reduction="sum",
                           label_smoothing=args.label_smoothing) / size
    return loss, loss.detach(), (logits.argmax(-1) == labels).sum() / size


def mimo_batch(batch, epoch, step, args, world):
    """(images [b, E C, H, W], labels [b, E], global rows): this process's rows of the global batch,
    whose images all processes have."""
    images, labels = (common.concat_rows(t, world) for t in (batch.images, batch.labels))
    generator = torch.Generator().manual_seed(common.derive_seed(args.seed, epoch, step))
    rows = mimo_rows(len(images), args.batch_repetitions, args.repetition_probability,
                     args.mimo_members, generator).to(images.device)
    own = rows.tensor_split(world.size)[world.rank]
    return images[own].flatten(1, 2), labels[own], len(rows)


class Teachers:
    """The members, in eval mode, or their cached statistics of the training images."""

    def __init__(self, nets, args, world, cache=None):
        self.nets = [net.eval().requires_grad_(False) for net in nets]
        self.args, self.world, self.cache = args, world, cache

    @torch.no_grad()
    def logits(self, images):
        for net in self.nets:
            with autocast(self.args, self.world):
                yield net(images)

    def statistics(self, batch, temperature=1.0) -> Ensemble:
        if self.cache is not None:
            return self.cache.read(batch.index.cpu(), self.world.device)
        return ensemble_statistics(self.logits(batch.images), temperature)


class TeacherCache:
    """A memory-mapped float32 file of Ensemble's rows [N, 2 K + 2], one of each training image.

    `key` says what it is of (images, members); another key starts it anew. Rows are done in blocks
    that are noted in a file beside it, so that it goes on after a stop."""

    def __init__(self, path, key, dataset, world):
        self.path, self.k, self.n = Path(path), dataset.num_classes, len(dataset)
        self.blocks = torch.arange(self.n).split(2048)
        done, note = self.path.with_suffix(".done"), self.path.with_suffix(".json")
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not (note.exists() and note.read_text() == key and self.path.exists()):
                with open(self.path, "wb") as file:
                    file.truncate(4 * self.n * (2 * self.k + 2))
                done.write_bytes(bytes(len(self.blocks)))
                common.write_text(note, key)
        common.barrier(world)
        self.rows = np.memmap(self.path, np.float32, "r+", shape=(self.n, 2 * self.k + 2))
        self.done = np.memmap(done, np.uint8, "r+", shape=(len(self.blocks),))

    def fill(self, teachers, dataset, args, world, say):
        """Compute what is missing, every machine for itself; a process does every L-th block."""
        local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        todo = [b for b in range(len(self.blocks)) if not self.done[b]]
        if todo:
            say(f"teachers: {len(todo)} of {len(self.blocks)} blocks of {self.path}")
        alone = common.World(device=world.device)
        with common.StopSignals() as stop:
            for block in todo[local[0]::local[1]]:
                rows, start = dataset.select(self.blocks[block]), int(self.blocks[block][0])
                for batch in make_loader(rows, args, alone, 512).epoch():
                    e = ensemble_statistics(teachers.logits(batch.images))
                    values = torch.cat([e.log_probs, e.mean_log, e.data[:, None], e.rmi[:, None]],
                                       1)
                    self.rows[start + batch.index.cpu().numpy()] = values.float().cpu().numpy()
                self.rows.flush()
                self.done[block] = 1
                self.done.flush()
                if signum := stop.asked(alone):
                    raise common.Stopped(signum, "while the teachers' statistics were computed")
        common.barrier(world)

    def read(self, index, device) -> Ensemble:
        rows = torch.from_numpy(self.rows[index.numpy()]).to(device).double()
        log_probs, mean_log, rest = rows.split([self.k, self.k, 2], 1)
        return Ensemble(log_probs, mean_log, rest[:, 0], rest[:, 1])


def train(net, kind, train_set, run, args, world, teachers=None):
    """A member, a MIMO network or a student, resumed from this run's checkpoint if there is one."""
    epochs = {"base": args.base_epochs, "mimo": args.mimo_epochs, "distill": args.epochs}[kind]
    run.open()
    run.say(f"{kind}: {run.directory}")
    model = common.sync_batch_norm(net.to(world.device, memory_format=torch.channels_last), world)
    optimiser = make_optimiser(net, kind, args)
    full = optimiser.param_groups[0]["lr"]
    images = args.batch_size
    if kind == "mimo":  # published: as many rows as --batch-size, repetitions and members included
        images = max(world.size, images // (args.batch_repetitions * args.mimo_members))
    loader = make_loader(train_set, args, world, images, train=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    fresh = lambda: {"step": 0, **{k: torch.zeros(steps) for k in LOGGED}}
    progress = {"epoch": 0, **fresh()}
    if (state := run.load()) is not None:
        net.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        progress = state["progress"]
        if progress["epoch"] >= epochs:
            return
        run.say(f"{run.resume_from}: {progress['epoch']} of {epochs} epochs are done")
    if args.compile:
        model = torch.compile(model)
    model = common.data_parallel(model, world)

    def save(**progress):
        if not math.isfinite(torch.nn.utils.get_total_norm(net.parameters())):
            raise UserError(f"weights are no longer finite after epoch {progress['epoch']}; the "
                            "last good checkpoint is kept. Lower the learning rate")
        run.save(model=net.state_dict(), optimiser=optimiser.state_dict(), progress=progress)

    lr_at = lambda step: full * learning_rate(step, steps, epochs, args.schedule, args.warm_up)
    with common.StopSignals() as stop:
        for epoch in range(progress["epoch"], epochs):
            clock, first = common.Stopwatch(world.device), progress["step"]
            step, signum, logged = train_epoch(model, kind, optimiser, loader, epoch, steps, lr_at,
                                               progress, stop, teachers, args, world)
            common.check_finite(logged["loss"][:step], epoch * steps, lr_at)
            if step < steps:
                save(epoch=epoch, step=step, **logged)
                raise common.Stopped(signum, f"in epoch {epoch + 1} of {kind} after step {step}")
            seconds, seen = clock.seconds(), min(steps * images, len(train_set))
            run.log(epoch=epoch + 1, epochs=epochs, loss_nats=logged["loss"].mean().item(),
                    accuracy=logged["correct"].mean().item(), lr=lr_at(epoch * steps + steps - 1),
                    images_per_s=seen * (1 - first / steps) / seconds, seconds=seconds)
            progress, signum = fresh(), signum or stop.asked(world)
            if (epoch + 1) % args.save_interval == 0 or epoch + 1 == epochs or signum:
                save(epoch=epoch + 1, **progress)
            if signum:
                raise common.Stopped(signum, f"after epoch {epoch + 1} of {kind}")
        if not epochs and state is None:
            save(**progress)


# By step: mean cross entropy, of a student KL(pi || softmax z); correct predictions, of a student
# those that agree with the ensemble's.
LOGGED = ("loss", "correct")


def train_epoch(model, kind, optimiser, loader, epoch, steps, lr_at, progress, stop, teachers, args,
                world):
    """Steps progress["step"] to `steps` of an epoch; fewer if a stop is asked for."""
    model.train()
    share = float(world.is_main)  # what is from before an interruption counts once
    logged = {k: share * progress[k].to(world.device) for k in LOGGED}
    batches = common.progress(loader.epoch(epoch, start=progress["step"]), steps - progress["step"],
                              f"{kind} {epoch + 1}", args.quiet, world)
    for step, batch in zip(range(progress["step"], steps), batches):
        for group in optimiser.param_groups:
            group["lr"] = lr_at(epoch * steps + step)
        loss, shown, correct = batch_loss(model, kind, batch, epoch, step, teachers, args, world)
        optimiser.zero_grad(set_to_none=True)
        (loss * world.size).backward()  # DDP divides by the number of processes
        optimiser.step()
        logged["loss"][step], logged["correct"][step] = shown, correct
        if signum := stop.asked(world, step):
            break
    return step + 1, signum, {k: common.all_reduce(t, world).cpu() for k, t in logged.items()}


# ---- Evaluation ---------------------------------------------------------------------------------

# Per example and model, beside the measures; the first five are of the classes predicted from.
COLUMNS = ("log_prob", "correct", "top5", "brier", "top_prob", "precision", *MEASURES, *SCORES)


def columns_of(outputs, labels) -> Tensor:
    """[B, len(COLUMNS)] of a batch; labels [B] number the classes of `outputs.log_probs`. Where
    they are not among these only the measures have a meaning."""
    log_probs, nothing = outputs.log_probs, torch.full_like(outputs.precision, math.nan)
    probs, own = log_probs.exp(), labels.clamp_max(log_probs.shape[1] - 1)[:, None]
    log_prob = log_probs.gather(1, own)
    before = torch.arange(log_probs.shape[1], device=own.device) < own
    rank = ((log_probs > log_prob) | (log_probs == log_prob) & before).sum(-1)
    brier = probs.square().sum(-1) - 2 * log_prob[:, 0].exp() + 1
    first = log_probs.argmax(-1) == labels
    return torch.stack([log_prob[:, 0], first.double(), (rank < 5).double(), brier,
                        probs.max(-1).values, outputs.precision,
                        *(outputs.measures.get(m, nothing) for m in (*MEASURES, *SCORES))], 1)


SEVERITIES = (1, 2, 3, 4, 5)


class Models(NamedTuple):
    """What is evaluated together: the members' forward passes serve three rows of the table."""

    members: list    # networks
    students: dict   # {loss: (network, offset)}
    mimo: nn.Module | None


@torch.no_grad()
def outputs_of(models, images, args, world, classes=None) -> dict:
    """{row of the table: Outputs} of a batch, predicting among `classes`, or among all."""
    def forward(net, x=images):
        with autocast(args, world):
            return widen(net(x))

    def restricted(outputs):
        return outputs if classes is None else outputs._replace(
            log_probs=outputs.log_probs[:, classes].log_softmax(-1))

    found = {}
    if models.members:
        first = forward(models.members[0])
        found["single"] = restricted(softmax_outputs(first))
    if len(models.members) > 1:
        rest = (forward(net) for net in models.members[1:])
        ensemble, log_probs = ensemble_among(itertools.chain([first], rest), classes)
        rows = {"": ensemble_outputs(ensemble), "_proxy": proxy_outputs(ensemble),
                "_proxy_t1": proxy_outputs(ensemble, 1.0)}
        found |= {f"ensemble{k}": o._replace(log_probs=log_probs) for k, o in rows.items()}
    for loss, (net, offset) in models.students.items():
        logits = forward(net)
        found[f"student_{loss}"] = restricted(
            softmax_outputs(logits) if loss == "forward_kl" else student_outputs(logits, offset))
    if models.mimo is not None:
        logits = forward(models.mimo, images.repeat(1, models.mimo.mimo, 1, 1))
        heads = logits.view(len(images), models.mimo.mimo, -1).unbind(1)
        if args.mimo_average == "logits":
            found["mimo"] = restricted(softmax_outputs(torch.stack(heads).mean(0)))
        else:
            ensemble, log_probs = ensemble_among(heads, classes)
            found["mimo"] = ensemble_outputs(ensemble)._replace(log_probs=log_probs)
    return found


def predict(models, dataset, args, world, classes=None) -> dict:
    """{row of the table: [N, len(COLUMNS)]}, float64 on the CPU, exactly one row an example."""
    for net in (*models.members, *(net for net, _ in models.students.values()), models.mimo):
        if net is not None:
            net.eval()
    rows, index = {}, [torch.zeros(0, dtype=torch.long)]
    for batch in make_loader(dataset, args, world, max(512, args.batch_size)).epoch():
        for name, outputs in outputs_of(models, batch.images, args, world, classes).items():
            rows.setdefault(name, []).append(columns_of(outputs, batch.labels).cpu())
        index.append(batch.index.cpu())
    index = torch.cat(index)
    return {name: common.gather_rows(torch.cat(parts), index, len(dataset), world)
            for name, parts in rows.items()}


def predictive_metrics(columns, measures=MEASURES) -> dict:
    """Accuracy, NLL, calibration, Brier, PRR by measure, of [N, len(COLUMNS)]."""
    at = dict(zip(COLUMNS, columns.T))
    correct = at["correct"] > 0
    values = {"accuracy": at["correct"].mean().item(), "top5_accuracy": at["top5"].mean().item(),
              "nll": -at["log_prob"].mean().item(), "brier": at["brier"].mean().item(),
              **dict(zip(("ece15", "mce15"), calibration(at["top_prob"], correct)))}
    for measure in measures:
        if not at[measure].isnan().any():
            values[f"prr_{measure}"] = common.prediction_rejection_ratio(at[measure], correct)
    return values


def calibration(confidence, correct, bins=15) -> tuple[float, float]:
    """(ECE, MCE) from confidences [N], bins as `common.reliability`."""
    bars = common.reliability(confidence, correct, bins)
    gap = np.abs(bars.accuracy - bars.confidence)
    return float((bars.counts * gap).sum() / bars.counts.sum()), float(gap.max())


def published_calibration(confidence, correct) -> tuple[float, float]:
    """(ECE, MCE) in ten bins [a, b), and an eleventh for 1.0, as the published code."""
    bins = (10 * np.asarray(confidence)).astype(int)
    gaps = [(np.mean(bins == b), abs(np.mean(np.asarray(confidence)[bins == b])
                                     - np.mean(np.asarray(correct)[bins == b])))
            for b in np.unique(bins)]
    return float(sum(w * g for w, g in gaps)), float(max(g for _, g in gaps))


def ood_metrics(inside, outside) -> dict:
    """AUROC and FPR95 by measure and by score, out-of-distribution positive, of two
    [N, len(COLUMNS)]."""
    values = {}
    for measure in (*MEASURES, *SCORES):
        a, b = (c[:, COLUMNS.index(measure)] for c in (inside, outside))
        if not a.isnan().any():
            scored = common.ood_metrics(a, b, larger_means="ood")
            values |= {f"auroc_{measure}": scored["auroc"], f"fpr95_{measure}": scored["fpr95"]}
    return values


def rank_correlations(student, ensemble) -> dict:
    """Spearman correlation of a student's uncertainties with the ensemble's, example by example:
    whether the distribution was distilled."""
    values = {}
    for name in (*MEASURES[1:], "precision"):
        a, b = (c[:, COLUMNS.index(name)] for c in (student, ensemble))
        if not (a.isnan().any() or b.isnan().any()) and a.std() > 0 and b.std() > 0:
            values[f"spearman_{name}"] = float(stats.spearmanr(a, b).statistic)
    return values


@torch.no_grad()
def milliseconds(models, shape, batch_size, args, world) -> dict:
    """Time of a prediction by row of the table, ms an example, in batches; the shortest of five."""
    rows = {f"student_{loss}": (net,) for loss, (net, _) in models.students.items()}
    if models.members:
        rows |= {"single": models.members[:1], "ensemble": models.members}
    if models.mimo is not None:
        rows["mimo"] = (models.mimo,)

    def once(nets):
        like, (channels, *size) = next(nets[0].parameters()), shape
        x = like.new_zeros(batch_size, channels * nets[0].mimo, *size)
        x, clock = x.contiguous(memory_format=torch.channels_last), common.Stopwatch(world.device)
        for net in nets:
            with autocast(args, world):
                net(x)
        return clock.seconds()

    return {name: 1e3 / batch_size * min(once(nets) for _ in range(5))
            for name, nets in rows.items()}


def evaluate(models, sets, args, world) -> tuple[dict, dict]:
    """(metrics `<row>/<name>`, columns {set: {row: [N, C]}}) of all models on all sets; a corrupted
    test set's name is the pair (kind, severity)."""
    test = predict(models, sets["test"], args, world)
    columns, metrics = {"test": test}, {}
    for name, (dataset, classes) in sets["ood"].items():
        columns[name] = predict(models, dataset, args, world, classes)
    for kind in sets["kinds"]:
        for severity in SEVERITIES:
            columns[kind, severity] = predict(models, sets["shift"](kind, severity), args, world)
    batch_size = min(256, len(sets["test"]))
    seconds = milliseconds(models, sets["test"].shape, batch_size, args, world)
    for row, own in test.items():
        values = predictive_metrics(own)
        if row in seconds:
            values["ms_per_example"] = seconds[row]
        for i, name in enumerate(sets["ood"]):
            other, masked = columns[name][row], inside(sets, name)
            outside = ood_metrics(own, other)
            values |= {f"{name}_{k}": v for k, v in outside.items()} | (outside if not i else {})
            if masked is not None:
                values |= {f"{name}_masked_{k}": v
                           for k, v in ood_metrics(own[masked], other).items()}
            if labelled(sets, name):
                values |= {f"{name}_{k}": v for k, v in predictive_metrics(other).items()}
        if sets["kinds"]:
            values |= shift_metrics(sets["kinds"], columns, row)
        if row.startswith("student") and "ensemble" in test:
            values |= rank_correlations(own, test["ensemble"])
        metrics |= {f"{row}/{k}": v for k, v in values.items()}
    return metrics, columns


def labelled(sets, name) -> bool:
    """Whether the labels of an out-of-distribution set are classes that its images show: not
    ImageNet-O's, whose folders are named after classes that its images are not of."""
    dataset, classes = sets["ood"][name]
    return classes is not None and name != "imagenet_o" or \
        getattr(dataset, "label_probs", None) is not None


def inside(sets, name):
    """The test examples [N] (bool) of the classes that a set's folders name; None without."""
    classes = sets["ood"][name][1]
    mask = None if classes is None else torch.isin(sets["test"].labels, classes)
    return mask if mask is not None and mask.any() else None


def shift_metrics(kinds, columns, row) -> dict:
    """`c_<kind>_s<severity>_...`; `c_s<severity>_...` with all kinds of a severity pooled; `c_...`,
    their means over severities; where there are the published extra kinds, `c15_...` without them.
    """
    few, groups, values = ("accuracy", "nll", "ece15", "brier"), {"c": kinds}, {}
    for kind in kinds:
        for severity in SEVERITIES:
            own = predictive_metrics(columns[kind, severity][row], measures=())
            values |= {f"c_{kind}_s{severity}_{k}": own[k] for k in few}
    if extra := {*data.CIFAR_C_KINDS[15:]} & {*kinds}:
        groups["c15"] = [kind for kind in kinds if kind not in extra]
    for name, chosen in groups.items():
        for severity in SEVERITIES:
            pooled = torch.cat([columns[kind, severity][row] for kind in chosen])
            values |= {f"{name}_s{severity}_{k}": v for k, v in predictive_metrics(pooled).items()}
        values |= {f"{name}_{k}": float(np.mean([values[f"{name}_s{s}_{k}"] for s in SEVERITIES]))
                   for k in few}
    return values


ROWS = {"single": "single network", "ensemble": "ensemble", "ensemble_proxy": "its proxy",
        "student_forward_kl": "EnD (forward KL)",
        "student_dirichlet_likelihood": "EnD2 (likelihood)", "student_proxy": "proxy, forward KL",
        "student_rkl_proxy": "proxy, reverse KL (paper)", "mimo": "MIMO"}


def format_results(metrics, ood) -> str:
    """The table that a run prints, of `<row>/<metric>`."""
    header = ["", "accuracy %", "NLL nats", "ECE15 %", "PRR MI", "PRR total",
              *(f"{name} AUROC {short}" for name in ood for short in ("MI", "total")),
              "rank corr. precision", "ms"]
    rows = []
    for row, title in ROWS.items():
        if f"{row}/accuracy" not in metrics:
            continue
        cell = lambda key, digits=4, scale=1.0: "-" if (
            v := metrics.get(f"{row}/{key}")) is None else f"{scale * v:.{digits}f}"
        rows.append([title, cell("accuracy", 2, 100), cell("nll"), cell("ece15", 2, 100),
                     cell("prr_mutual_information", 3), cell("prr_total_uncertainty", 3),
                     *(cell(f"{name}_auroc_{m}") for name in ood
                       for m in ("mutual_information", "total_uncertainty")),
                     cell("spearman_precision", 3), cell("ms_per_example", 3)])
    return common.format_table(header, rows)


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#000000", "#BBBBBB"]


def plot_story(plt, path, columns):
    """Rejection curves by total uncertainty; precision of the students against the ensemble's."""
    columns = {row: own for row, own in columns.items() if row in ROWS}
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.4), constrained_layout=True)
    for (row, own), colour in zip(columns.items(), COLOURS):
        at = dict(zip(COLUMNS, own.T))
        rejected, error = common.rejection_curve(at["total_uncertainty"], at["correct"] > 0)
        axes[0].plot(100 * rejected, 100 * error, color=colour, label=ROWS[row])
    axes[0].set(xlabel="rejected as most uncertain, %", ylabel="errors left, % of all",
                xlim=(0, 100), yscale="log", ylim=(50 / len(at["correct"]), 130))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    ensemble, precision = columns.get("ensemble"), COLUMNS.index("precision")
    for (row, own), colour in zip(columns.items(), COLOURS):
        measured = row.startswith("student") and not own[:, precision].isnan().any()
        if ensemble is not None and measured:
            axes[1].plot(ensemble[:, precision], own[:, precision], ".", ms=2, color=colour,
                         rasterized=True)
    if ensemble is not None:
        low, high = np.quantile(ensemble[:, precision], [0.001, 0.999])
        axes[1].plot([low, high], [low, high], "k--", lw=1, label="equal")
        axes[1].set(xscale="log", yscale="log", xlabel="precision of the ensemble's proxy",
                    ylabel="precision of the student")
        axes[1].legend(loc="lower right")
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args, world) -> dict:
    """All sets of a run, before anything is trained."""
    with common.main_first(world):
        train = data.load(args.dataset, "train", args.data_dir, seed=args.seed, val_fraction=0.0,
                          limit=args.limit_train)
        test = data.match(data.load(args.dataset, "test", args.data_dir), train)
        ood = {}
        for name in args.ood:
            size = train.shape[-1] if name.startswith("folder:") else None
            try:
                own = data.match(data.load(name, "test", args.data_dir, image_size=size), train)
            except UserError as error:
                if not name.startswith("imagenet_"):
                    raise
                if world.is_main:
                    print(f"{name} skipped: {error}", flush=True)
                continue
            ood[Path(name.removeprefix("folder:")).name] = own, subset(own, train)
    # outside of the block above: the processes share the work
    train, test = from_files(train, args, world, training=True), from_files(test, args, world)
    ood = {name: (from_files(own, args, world), classes) for name, (own, classes) in ood.items()}
    kinds, shift = [], None
    if args.shift == "computed":
        some = test if not args.shift_examples else test.select(
            torch.arange(min(args.shift_examples, len(test))) * len(test)
            // min(args.shift_examples, len(test)))
        kinds = list(data.CORRUPTIONS)
        shift = lambda kind, severity: data.corrupted(some, kind, severity)
    elif args.shift == "published":
        name = f"{args.dataset}_c"
        kinds = data.corruption_kinds(name, args.data_dir)

        def shift(kind, severity):
            own = data.match(data.load_corrupted(name, kind, severity, args.data_dir), train)
            return from_files(own, args, world)

        if not kinds and world.is_main:
            print(f"{name} is not in {args.data_dir}: skipped", flush=True)
    return {"train": train, "test": test, "ood": ood, "kinds": kinds, "shift": shift}


def from_files(dataset, args, world, training=False):
    """A streamed set under --resize and --unreadable; sets in memory are as they are."""
    if not isinstance(dataset, data.StreamedSet):
        return dataset
    if args.resize == "square" and not training:
        dataset = dataset.squared()
    return readable(dataset, world) if args.unreadable == "skip" else dataset


def readable(dataset, world):
    """`dataset` without the image files that cannot be decoded, the same on all processes, which
    each try a part; the paths are named on stderr."""
    bad = torch.zeros(len(dataset), dtype=torch.uint8)
    own = torch.arange(world.rank, len(bad), world.size)
    bad[own] = dataset.unreadable(own).byte()
    keep = common.all_reduce(bad, world) == 0
    if world.is_main:
        for row in (~keep).nonzero()[:, 0].tolist():
            print(f"{dataset.dataset.paths[row]}: unreadable, skipped", file=sys.stderr, flush=True)
    if not keep.any():
        raise UserError(f"{dataset.name}: none of its {len(dataset)} files can be read")
    return dataset if keep.all() else dataset.select(keep)


def subset(dataset, train):
    """The classes [n] of a set among the training set's, by folder names; None if it has others."""
    known, own = getattr(train, "classes", ()), getattr(dataset, "classes", ())
    return torch.tensor([known.index(c) for c in own]) if own and {*own} <= {*known} else None


def run_name(args) -> str:
    width = f"-w{args.width:g}" if args.width != 1 else ""
    return args.name or f"{args.dataset}-{args.model}{width}"


def open_run(args, world, kind, what, **more):
    """The run directory of a network; its options, and what else shapes it."""
    keys = (*COMMON_OPTIONS, *OPTIONS[kind])
    return common.Run(args, "proxy_distill", f"{run_name(args)}/{what}",
                      {**{k: getattr(args, k) for k in keys}, "seed": args.seed, **more}, world)


def finish(net, kind, what, sets, args, world, teachers=None, **more):
    """Train a network, or read it where --eval: it must be complete."""
    run = open_run(args, world, kind, what, images=len(sets["train"]), **more)
    epochs = {"base": args.base_epochs, "mimo": args.mimo_epochs, "distill": args.epochs}[kind]
    if args.eval:
        state = run.load(required=True)
        if (done := state["progress"]["epoch"]) < epochs:
            raise UserError(f"{run.resume_from} has {done} of {epochs} epochs; finish it first "
                            "(the same command without --eval)")
        net.load_state_dict(state["model"])
    else:
        common.seed_all(args.seed, 1)
        train(net, kind, sets["train"], run, args, world, teachers)
    return net.to(world.device, memory_format=torch.channels_last).eval()


def new_network(args, sets, seed, width, mimo=1):
    common.seed_all(seed)
    return make_network(args, sets["train"].num_classes, sets["train"].shape, width, mimo)


def members_of(args, sets, world, make=True) -> list:
    """The M members: from --ensemble-paths, or of seeds from --seed on, trained where `make`."""
    nets = []
    for i in range(args.members):
        seed = args.seed + i
        net = new_network(args, sets, seed, args.width)
        if args.ensemble_paths:
            net = read_member(args.ensemble_paths[i], net)
            nets.append(net.to(world.device, memory_format=torch.channels_last).eval())
            continue
        own = common.with_options(args, seed=seed, eval=args.eval or not make,
                                  resume=args.resume if make else "auto")
        try:
            nets.append(finish(net, "base", f"base-seed{seed}", sets, own, world))
        except UserError as error:
            if make or args.eval:
                raise
            raise UserError(f"member {i + 1} of {args.members} is missing ({error}); train it "
                            f"with --method base --seed {seed}") from None
    return nets


def fingerprint(nets) -> str:
    """A hash of the members' weights: a student and a cache belong to them."""
    digest = hashlib.sha256()
    for net in nets:
        for value in net.state_dict().values():
            digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def images_key(dataset) -> str:
    """A hash of the rows of a set: of the files' paths, or how many there are."""
    paths = getattr(getattr(dataset, "dataset", None), "paths", [len(dataset)])
    return hashlib.sha256("\n".join(map(str, paths)).encode()).hexdigest()[:16]


def train_students(losses, members, sets, args, world) -> dict:
    """{loss: (network, offset)}, all from the same teachers."""
    whose, teachers = fingerprint(members), None
    if not args.eval:
        teachers = Teachers(members, args, world)
        if args.cache_teachers:
            key = (f"{args.dataset} {args.limit_train} {args.amp} {len(members)} {whose} "
                   f"{images_key(sets['train'])}\n")
            path = Path(args.out_dir) / "proxy_distill" / run_name(args) / \
                f"teachers-seed{args.seed}.f32"
            cache = TeacherCache(path, key, sets["train"], world)
            cache.fill(teachers, sets["train"], args, world, lambda text: print(text, flush=True)
                       if world.is_main and not args.quiet else None)
            teachers.cache = cache
    students = {}
    for loss in losses:
        own = common.with_options(args, loss=loss)
        net = new_network(args, sets, common.derive_seed(args.seed, 7) % 2**31, args.student_width)
        net = finish(net, "distill", f"student_{loss}-seed{args.seed}", sets, own, world, teachers,
                     loss=loss, ensemble=whose)
        students[loss] = net, args.model_offset
    return students


def run_all(args, world) -> dict:
    """The networks of --method, and what they are together."""
    sets, members, students, mimo = load_sets(args, world), [], {}, None
    if args.method == "base":
        net = new_network(args, sets, args.seed, args.width)
        members = [finish(net, "base", f"base-seed{args.seed}", sets, args, world)]
    if args.method in ("all", "distill"):
        members = members_of(args, sets, world, make=args.method == "all")
        losses = args.losses if args.method == "all" else [args.loss]
        students = train_students(losses, members, sets, args, world)
    if args.method == "mimo" or args.method == "all" and args.mimo:
        mimo = new_network(args, sets, args.seed, args.width, args.mimo_members)
        mimo = finish(mimo, "mimo", f"mimo-seed{args.seed}", sets, args, world)
    clock = common.Stopwatch(world.device)
    metrics, columns = evaluate(Models(members, students, mimo), sets, args, world)
    what = {"base": "base", "mimo": "mimo", "distill": f"student_{args.loss}", "all": "all"}
    config = {**vars(args), "eval": False, "resume": "auto"}
    run = common.Run(args, "proxy_distill",
                     f"{run_name(args)}/{what[args.method]}-seed{args.seed}", config, world)
    run.results(metrics, {"evaluate_s": clock.seconds()},
                n={name if isinstance(name, str) else "c_{}_s{}".format(*name):
                   len(next(iter(rows.values()))) for name, rows in columns.items()})
    if world.is_main:
        print(f"\n{run_name(args)}, seed {args.seed}\n\n"
              f"{format_results(metrics, sets['ood'])}\n", flush=True)
        if args.published_json:
            common.write_json(args.published_json,
                              published_results(columns, sets, args.dataset))
        if args.plot and (plt := common.pyplot()):
            plot_story(plt, run.directory / "story.png", columns["test"])
            run.say(f"picture in {run.directory}")
    return metrics


def run_seeds(args, world) -> dict:
    """--runs times `run_all`, each with members of its own, and the means."""
    runs = [run_all(common.with_options(args, seed=args.seed + i * args.members), world)
            for i in range(args.runs)]
    if args.runs == 1:
        return runs[0]
    values = {k: [run[k] for run in runs] for k in runs[0]}
    values = {k: v for k, v in values.items() if None not in v}  # no errors, no rejection ratio
    means = {k: float(np.mean(v)) for k, v in values.items()}
    run = common.Run(args, "proxy_distill", f"{run_name(args)}/{args.method}-seed{args.seed}-runs"
                     f"{args.runs}", {**vars(args), "eval": False, "resume": "auto"}, world)
    run.results(means, {}, standard_error={k: common.standard_error(v) for k, v in values.items()},
                values=runs)
    if world.is_main:
        print(f"mean of {args.runs} runs\n\n" + format_results(
            means, [Path(name.removeprefix("folder:")).name for name in args.ood]), flush=True)
    return means


# Names of MEASURES there.
PUBLISHED = dict(zip(MEASURES, ("confidence", "entropy_of_expected", "expected_entropy",
                                "mutual_information", "EPKL", "MKL")))


def published_results(columns, sets, dataset) -> dict:
    """{row: {domain: {name: value}}}, domains and names as the published code writes them, without
    what cannot be measured: accuracy where labels mean nothing, mutual information of a softmax."""
    found = {}
    for row, val in columns["test"].items():
        domains = {"imagenet_val": published_accuracy(val) | published_rejection(val)}
        for name in sets["ood"]:
            domains |= published_domain(name.replace("_", "-"), val, columns[name][row],
                                        inside(sets, name), labelled(sets, name))
        for kind in sets["kinds"]:
            for severity in SEVERITIES:
                title = f"{dataset.replace('_', '-')}-c-{kind}-{severity}"
                domains |= published_domain(title, val, columns[kind, severity][row], slice(None))
        found[row] = {domain: dict(sorted(domains[domain].items())) for domain in sorted(domains)}
    return found


def published_domain(name, val, own, mask, labels=True) -> dict:
    """{name: ..., name_masked: ..., name_with_val: ...} of one set beside `val`, both
    [N, len(COLUMNS)]: AUROC against all of val; against its rows `mask`, of the set's classes, if
    it has any; rejection where both are pooled."""
    accuracy = published_accuracy(own) if labels else {}
    found = {name: accuracy | published_auroc(val, own)}
    if mask is not None:
        found[f"{name}_masked"] = accuracy | published_auroc(val[mask], own)
    if labels:
        found[name] |= published_rejection(own)
        found[f"{name}_with_val"] = published_rejection(torch.cat([val, own]))
    return found


def published_accuracy(columns) -> dict:
    at = dict(zip(COLUMNS, columns.T))
    ece, mce = published_calibration(at["top_prob"].numpy(), (at["correct"] > 0).numpy())
    return {"acc1": at["correct"].mean().item(), "acc5": at["top5"].mean().item(), "ECE": ece,
            "MCE": mce, "brier": at["brier"].mean().item(), "NLL": -at["log_prob"].mean().item()}


def published_auroc(inside, outside) -> dict:
    scored = ood_metrics(inside, outside)
    return {name: scored[f"auroc_{measure}"] for measure, name in PUBLISHED.items()
            if f"auroc_{measure}" in scored}


def published_rejection(columns) -> dict:
    """`X_PRR` and `X_PR-AUC`, one minus the area under `common.rejection_curve`."""
    values, correct = {}, columns[:, COLUMNS.index("correct")] > 0
    for measure, name in PUBLISHED.items():
        own = columns[:, COLUMNS.index(measure)]
        if not own.isnan().any():
            _, error = common.rejection_curve(own, correct)
            values[f"{name}_PRR"] = common.prediction_rejection_ratio(own, correct)
            values[f"{name}_PR-AUC"] = 1 - float((error[1:] + error[:-1]).mean() / 2)
    return values


def main(argv=None) -> dict:
    args = parse_args(argv)
    world = common.start_world(args.device)
    common.check_batch(args, world)
    return run_seeds(args, world)


if __name__ == "__main__":
    common.run_script(main)
