"""Local posteriors in deep ensembles: SWAG, last-layer Laplace and its refinement by a flow.

Jordahn, Jensen, Schmidt, Andersen, "On Local Posterior Structure in Deep Ensembles", AISTATS 2025,
PMLR 258:5032-5040, arXiv:2503.13296. The study: train M networks (MAP, theta_m), give each a local
posterior q_m, and ask whether an ensemble of posteriors predicts better than one of points,

    p(y | x) = (1/S) sum_s p(y | x, theta_s),  theta_s from (1/K) sum_k q_k,  S = 200 in total.

  SWA, SWAG   R iterates w_r of SGD from theta_m, one an epoch: N(mean, diag(d)/2 + D D^T/(2(R-1))),
              D = w_r - mean, d = mean D^2. SWA is the mean alone (Izmailov 2018, Maddox 2019).
  LLLA        N(theta, (H + delta I)^-1) of the last layer, H its generalised Gauss-Newton matrix
              (molecules: its Hessian); delta by validation (Daxberger et al. 2021).
  LA-NF       that Gaussian through T radial flows, fitted by the ELBO (Kristiadi et al. 2022).
  MC dropout and IVON (Shen et al. 2024), the side methods, train networks of their own.

Usage:
  python swag_laplace_ensembles.py             # glyphs (--dataset reviews, clusters: two cores too)
  torchrun --nproc_per_node 8 swag_laplace_ensembles.py --dataset cifar10   # the paper's column
  python swag_laplace_ensembles.py --eval      # the table again, from the checkpoints
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      swag_laplace_ensembles.py --dataset cifar10 --method swag --seed 3   # one piece, two machines

Expected:
  glyphs, three members, two CPU cores, 3.6 minutes; accuracy and LPD of K = 1 (mean +- standard
    error of the members), then of the ensemble K = 3: DE 97.93 +- 0.66 %, -0.107 +- 0.028 nats,
    98.90 %, -0.095; SWAG 99.03 +- 0.23 %, -0.056 +- 0.009, 99.50 %, -0.051; LLLA 97.90 +- 0.67 %,
    -0.107 +- 0.028, 99.00 %, -0.095; LA-NF 98.17 +- 0.49 %, -0.082 +- 0.023, 99.10 %, -0.072.
  cifar10, cifar100, sst2, qm9 at the paper's size: not measured. The paper's tables were not at
    hand to be checked, and are not repeated.

Differs from the published code:
  - SWAG's vector holds what is trained; there it also held FRN's frozen epsilon, which sampling
    then moved by 70 times its size (--match-published). Batch norm's statistics, where a network
    has them, are recomputed for every sample; there they were not.
  - One cache of 200 predictions a member serves every ensemble: the n-th draw of a member is its
    n-th sample. There each ensemble drew anew.
  - The 21 precisions of LLLA share one eigendecomposition and one set of samples; there, fresh
    ones. The 15 of LA-NF are fitted at once, with the same base samples and batches.
  - LA-NF's sample s is one network for all of the test set; there, one for each batch.
  - Early stopping works after --min-epochs whenever patience runs out (there: only if it ran out in
    that very epoch, later).
  - OOD metrics: in FPR at 95 % and AUPR (in) the data of the training set's kind are the positive
    ones; there it was the others, and the former was interpolated.
  - Everything resumes and selects from local files; there, through a server.
  As published: validation data choose the MAP checkpoint, learning rates, and precisions alike.
"""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import old_common as common
import old_data as data
from old_common import UserError

# ---- Arguments ----------------------------------------------------------------------------------

METHODS = {"map": "DE", "swa": "SWA", "swag": "SWAG", "mcdo": "MC dropout", "ivon": "IVON",
           "llla": "LLLA", "la_nf": "LA-NF"}
SWAG_LRS = [0.1, 0.05, 0.04, 0.03, 0.02, 0.01, *(i / 1000 for i in range(9, 0, -1)),
            *(i / 10000 for i in range(9, 4, -1)), 0.0001]
MOLECULE_LRS = [1e-6, *(i * 1e-7 for i in range(5, 0, -1)), *(i * 1e-8 for i in range(9, 0, -1)),
                *(i * 1e-9 for i in range(9, 0, -1)), *(i * 1e-10 for i in range(9, 4, -1)), 1e-10]
PRESETS = {
    # paper: 30 members of seeds 1-30, 30 ensembles of each K, 200 samples in total; published
    # settings throughout
    "": dict(model="wrn_16_4", depth=None, width=1.0, norm="frn", dropout=0.0, epochs=100,
             batch_size=128, lr=0.1, weight_decay=5e-4, opt="sgd", patience=100, min_epochs=100,
             members=30, ensembles=[1, 2, 5, 10, 20], combinations=30, samples=200, val_samples=100,
             methods=["map", "swa", "swag", "llla", "la_nf"], num_val=2000, swag_epochs=100,
             swag_lrs=SWAG_LRS, swag_weight_decay=None, dropouts=[0.05, 0.1, 0.2], ivon_epochs=200,
             ivon_lr=0.2, ivon_hess_init=0.5, structure="full", flow_layers=10, flow_epochs=20,
             flow_lr=1e-3, mse_steps=[0, 0], y_var=4e-4, target="u0", cutoff=5.0, shift="none",
             ood=[], amp="off", compile=False, eval_batch_size=2048),
    "cifar10": dict(ood=["svhn+cifar100"]),
    "cifar100": dict(ood=["svhn+cifar10"]),
    "sst2": dict(model="bert_256_4", dropout=0.5, batch_size=64, lr=5e-3, weight_decay=3e-3),
    "qm9": dict(model="painn", batch_size=100, lr=5e-4, weight_decay=0.01, opt="adamw", epochs=650,
                patience=50, min_epochs=650, swag_lrs=MOLECULE_LRS),
    "mnist": dict(model="wrn_16_4", ood=["fashion_mnist"]),
    "fashion_mnist": dict(model="wrn_16_4", ood=["mnist"]),
    "glyphs": dict(depth=10, width=0.25, epochs=6, batch_size=32, lr=0.2, weight_decay=1e-4,
                   members=3, ensembles=[1, 3], combinations=3, samples=12, val_samples=12,
                   methods=list(METHODS), num_val=500, limit_train=3000, swag_epochs=6,
                   swag_lrs=[0.03, 0.01], dropouts=[0.1], ivon_epochs=8, ivon_lr=0.4,
                   ivon_hess_init=5.0, flow_epochs=5, ood=["glyphs_letters"], limit_test=1000,
                   eval_batch_size=100),
    "reviews": dict(model="bert_256_4", depth=2, width=0.25, dropout=0.1, epochs=8, batch_size=64,
                    lr=2e-3, weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3],
                    combinations=3, samples=20, val_samples=20, methods=list(METHODS),
                    swag_epochs=8, swag_lrs=[0.03, 0.01], swag_weight_decay=1e-4, dropouts=[0.1],
                    ivon_epochs=6, flow_epochs=5, ood=["reviews_finance"],
                    eval_batch_size=100),
    "clusters": dict(model="painn", width=0.25, epochs=24, batch_size=50, lr=2e-3,
                     weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3], combinations=3,
                     samples=30, val_samples=30, methods=list(METHODS), limit_train=2500,
                     swag_epochs=6, swag_lrs=[1e-6, 3e-7], dropouts=[0.01], ivon_epochs=24,
                     ivon_lr=0.01, ivon_hess_init=20.0, flow_epochs=5, ood=["clusters_large"],
                     eval_batch_size=100),
}
MODELS = {  # where a network has settings of its own: published
    "wrn_28_10": dict(epochs=200, swag_epochs=25, structure="diag", eval_batch_size=256),
}
TEXTS, MOLECULES = ("sst2", "reviews"), ("qm9", "clusters")
# The options that shape a piece, by what it is; they guard its checkpoint.
COMMON_OPTIONS = ("dataset", "model", "depth", "width", "norm", "batch_size", "num_val", "amp",
                  "limit_train", "limit_steps", "target", "cutoff", "vocab", "batch_by")
PIECE_OPTIONS = {
    "map": ("epochs", "lr", "weight_decay", "opt", "patience", "min_epochs", "augment", "mse_steps",
            "y_var", "dropout"),
    "ivon": ("dropout", "ivon_epochs", "ivon_lr", "ivon_hess_init", "ivon_weight_decay", "ivon_ess",
             "augment"),
    "swag": ("swag_epochs", "swag_weight_decay", "match_published"),
    "llla": ("structure", "prior_precision", "val_samples"),
    "la_nf": ("structure", "prior_precision", "val_samples", "flow", "flow_layers", "flow_epochs",
              "flow_lr", "flow_precision"),
}
PIECE_OPTIONS["mcdo"] = PIECE_OPTIONS["map"]


def parse_args(argv=None):
    parser = common.Parser(prog="swag_laplace_ensembles.py", description=__doc__.split("\n")[0],
                           epilog="Details, equations and differences: the top of this file.")
    common.add_common_arguments(parser, [d for d in PRESETS if d])
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--method", choices=["all", *METHODS], default="all", help="all: the study, what is done "
        "is kept; otherwise one piece, of --seed, and what it is made from")
    add("--methods", nargs="+", choices=METHODS, help="of --method all")
    add("--members", type=int, help="M networks, of seeds 1 to M (paper: 30)")
    add("--ensembles", help="sizes K, separated by commas (paper: 1,2,5,10,20)")
    add("--combinations", type=int, help="ensembles of each size (paper: 30)")
    add("--samples", type=int, help="S, posterior samples in total, whatever K (paper: 200)")
    add("--val-samples", type=int, help="samples by which validation chooses (published: 100)")
    add("--model", choices=["wrn_16_4", "wrn_28_10", "bert_256_4", "painn"], help="paper: all four")
    add("--depth", type=int, help="of a wide ResNet (6 n + 4), layers of BERT, rounds of PaiNN")
    add("--dropout", type=float, help="of MAP's network in training (published: 0, BERT .5)")
    add("--norm", choices=["frn", "bn"], help="of a wide ResNet (paper: frn, without batch "
        "statistics)")
    add("--opt", choices=["sgd", "adamw"], help="of MAP: SGD with Nesterov momentum .9, or AdamW")
    add("--weight-decay", type=float, help="on everything that is trained")
    add("--patience", type=int, help="epochs without a better validation loss that end MAP's "
        "training, after --min-epochs")
    add("--min-epochs", type=int, help="of MAP")
    add("--num-val", type=int, help="validation images (published: 2000)")
    add("--augment", action=flag, help="crop and flip for MAP (default: on for CIFAR)")
    add("--limit-train", type=int, metavar="N", help="train on N examples, evenly spaced")
    add("--limit-test", type=int, metavar="N", help="test on N examples of each set")
    add("--swag-epochs", type=int, help="R: epochs of SGD, iterates, rank (published: 100)")
    add("--swag-lrs", help="constant learning rates, separated by commas; validation chooses")
    add("--swag-weight-decay", type=float, help="default: --weight-decay")
    add("--swag-scale", type=float, default=1.0, help="multiplies SWAG's covariance")
    add("--keep-grid", action="store_true", help="keep the iterates of learning rates not chosen")
    add("--structure", choices=["full", "kron", "diag"], help="of the Gauss-Newton matrix (paper: "
        "full, diag for wrn_28_10); molecules: full Hessian")
    add("--prior-precision", default="grid", help="of LLLA: grid (21 values, validation), marglik, "
        "or a number")
    add("--predictive", choices=["mc", "glm_mc", "probit", "bridge"], default="mc", help="of LLLA: "
        "sample weights, sample logits, or a closed form")
    add("--flow", choices=["radial", "planar"], default="radial", help="of LA-NF (paper: radial)")
    add("--flow-layers", type=int, help="T (paper: 1, 5, 10, 30; main table 10)")
    add("--flow-epochs", type=int, help="over the cached features (published: 20)")
    add("--flow-lr", type=float, help="of Adam (published: 1e-3)")
    add("--flow-precision", default="grid", help="prior precision of LA-NF: grid (15 values, "
        "validation), llla (LLLA's), or a number")
    add("--dropouts", help="rates of MC dropout, separated by commas; validation chooses")
    add("--ivon-epochs", type=int, help="published: 200")
    add("--ivon-lr", type=float, help="published: 0.2")
    add("--ivon-hess-init", type=float, help="published: 0.5")
    add("--ivon-weight-decay", type=float, default=2e-4, help="published: 2e-4")
    add("--ivon-ess", type=float, help="effective sample size (published: the training set's)")
    add("--mse-steps", type=int, nargs=2, metavar=("W", "D"), help="molecules: squared error for W "
        "steps, then linearly to the likelihood in D (published: 0 0)")
    add("--y-var", type=float, help="molecules: MAP's likelihood is scaled by it (published: 4e-4)")
    add("--target", help="of QM9: a name of its 19 targets (paper: u0)")
    add("--cutoff", type=float, help="of PaiNN, in angstrom (paper: 5)")
    add("--vocab", metavar="FILE", help="WordPiece vocabulary, one a line (paper: that of "
        "bert-base-uncased); default: built from the training sentences")
    add("--batch-by", choices=["length", "random", "padded"], default="length", help="sentences of "
        "near length together; at random; at random and padded to 268 (published)")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets; a+b: both as one")
    add("--shift", choices=["none", "computed", "published"], help="also evaluate the corrupted "
        "test set, all kinds of a severity pooled: computed, or the CIFAR-C files")
    add("--eval-batch-size", type=int, help="published: 2048, 256 for wrn_28_10")
    add("--save-interval", type=int, default=1, help="epochs between checkpoints")
    add("--match-published", action="store_true", help="SWAG also samples FRN's epsilon")
    args = parser.parse_args(argv)
    preset = {"": {**PRESETS[""], **MODELS.get(args.model, {})}}
    preset |= {k: v for k, v in PRESETS.items() if k}
    return check_args(common.resolve_arguments(args, preset, "glyphs"))


def number_list(args, key, kind, low, high):
    """Replace an option "a,b,c" by its list of numbers."""
    value, name = getattr(args, key), f"--{key.replace('_', '-')}"
    try:
        values = [kind(v) for v in value.split(",")] if isinstance(value, str) else list(value)
    except ValueError:
        example = "1,5" if kind is int else "0.1,0.05"
        raise UserError(f"{name} {value}: numbers separated by commas, as in {example}") from None
    if not values or not all(low <= v <= high for v in values):
        raise UserError(f"{name} {value}: must lie in [{low:g}, {high:g}]")
    setattr(args, key, list(dict.fromkeys(values)))


def check_args(args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    if args.dataset not in PRESETS or not args.dataset:
        known = ", ".join(name for name in PRESETS if name)
        raise UserError(f"--dataset {args.dataset}: use one of {known}")
    number_list(args, "ensembles", int, 1, 10**6)
    number_list(args, "swag_lrs", float, 1e-12, 1e3)
    number_list(args, "dropouts", float, 1e-6, 0.99)
    args.ensembles, args.methods = sorted(args.ensembles), list(dict.fromkeys(args.methods))
    if args.augment is None:
        args.augment = args.dataset in ("cifar10", "cifar100")
    if args.swag_weight_decay is None:
        args.swag_weight_decay = args.weight_decay
    for key in ("members", "combinations", "samples", "val_samples", "num_val", "limit_train",
                "limit_test", "swag_epochs", "flow_layers", "eval_batch_size", "save_interval",
                "depth", "patience"):
        if getattr(args, key) is not None and getattr(args, key) < 1:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1")
    for key, low, high in (
            ("weight_decay", 0, 1e9), ("swag_weight_decay", 0, 1e9), ("swag_scale", 0, 1e9),
            ("flow_epochs", 0, 1e9), ("flow_lr", 0, 1e9), ("ivon_epochs", 0, 1e9),
            ("ivon_lr", 0, 1e9), ("ivon_hess_init", 1e-12, 1e9), ("ivon_weight_decay", 1e-12, 1e9),
            ("ivon_ess", 1e-12, 1e12), ("y_var", 1e-12, 1e9), ("cutoff", 0.1, 1e3),
            ("min_epochs", 0, 1e9), ("dropout", 0, 0.99)):
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{key.replace('_', '-')} {value}: must lie in [{low:g}, {high:g}]")
    for key, words in (("prior_precision", ("grid", "marglik")), ("flow_precision",
                                                                  ("grid", "llla"))):
        check_precision(getattr(args, key), f"--{key.replace('_', '-')}", words)
    if min(args.mse_steps) < 0:
        raise UserError(f"--mse-steps {min(args.mse_steps)}: must be at least 0")
    if args.vocab and args.dataset != "sst2":
        raise UserError(f"--vocab is for sst2; {args.dataset} has its own")
    if args.swag_epochs < 2:
        raise UserError("--swag-epochs 1: a covariance needs at least two iterates")
    check_study(args)
    return args


def check_precision(value, name, words):
    try:
        good = value in words or 0 < float(value) < math.inf
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{name} {value}: use {', '.join(words)}, or a number above 0")


def check_study(args):
    """What the network, the data and the sizes of ensembles must have in common."""
    kind = {"bert_256_4": "text", "painn": "molecules"}.get(args.model, "images")
    own = next((name for name, sets in (("text", TEXTS), ("molecules", MOLECULES))
                if args.dataset in sets), "images")
    if kind != own:
        fit = {"text": "bert_256_4", "molecules": "painn", "images": "wrn_16_4"}[own]
        raise UserError(f"--model {args.model} is for {kind}, {args.dataset} is {own}; use {fit}")
    if args.depth is not None and own == "images" and (args.depth < 10 or (args.depth - 4) % 6):
        raise UserError(f"--depth {args.depth}: a wide ResNet has 6 n + 4 layers: 10, 16, 22, 28")
    if args.method == "all" and max(args.ensembles) > args.members:
        raise UserError(f"--ensembles {max(args.ensembles)} is more than --members {args.members}")
    if args.method not in ("map", "mcdo", "ivon") and args.resume not in ("auto", "never"):
        raise UserError("--resume PATH is for one training: --method map, mcdo or ivon")
    if args.method == "all" and max(args.ensembles) > args.samples:
        raise UserError(f"--samples {args.samples} is less than one a member for --ensembles "
                        f"{max(args.ensembles)}")
    if args.shift == "published" and args.dataset != "cifar10" or own != "images" and \
            args.shift != "none":
        raise UserError(f"--shift {args.shift} is not for {args.dataset}; use none"
                        f"{' or computed' * (own == 'images')}")
    if own == "molecules" and args.structure != "full":
        raise UserError(f"--structure {args.structure} is for classes; molecules take full")
    if own == "molecules" and args.predictive != "mc":
        raise UserError(f"--predictive {args.predictive} is for classes; molecules take mc")


# ---- Model --------------------------------------------------------------------------------------
# net(inputs) is logits [B, C], of molecules (mean, variance) [B, 2]; net.features(inputs) is what
# the last layer, net.head, sees: [B, D], of molecules [atoms, D].


def widen(t):
    """bf16 as float32; float32 and float64 as they are."""
    return t.float() if t.dtype == torch.bfloat16 else t


def logits_of(head, features):
    """The last layer in float32, even under autocast."""
    with torch.autocast(features.device.type, enabled=False):
        return head(widen(features))


class FilterResponse(torch.autograd.Function):
    """y = max(gamma x r + beta, tau), r = (mean_HW x^2 + eps)^-1/2, with a backward pass that reads
    memory five times less often than autograd's own; eps has no gradient."""

    @staticmethod
    def forward(ctx, x, gamma, beta, tau, eps):
        r = (widen(x).square().mean((2, 3)) + eps).rsqrt()
        scale, low = (gamma * r).to(x.dtype)[:, :, None, None], tau.to(x.dtype)[:, None, None]
        y = torch.addcmul(beta.to(x.dtype)[:, None, None], x, scale)
        y = torch.maximum(y, low, out=y)
        ctx.save_for_backward(x, y, gamma, tau, r)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, gamma, tau, r = ctx.saved_tensors
        inside = grad * (y > tau.to(y.dtype)[:, None, None])
        below = (widen(grad.sum((2, 3))) - (own := widen(inside.sum((2, 3))))).sum(0)
        along = widen((inside * x).sum((2, 3)))  # [N, C]
        pull = (-gamma * r**3 * along / (x.shape[2] * x.shape[3])).to(x.dtype)[:, :, None, None]
        grad_x = inside.mul_((gamma * r).to(x.dtype)[:, :, None, None]).addcmul_(x, pull)
        return grad_x, (along * r).sum(0), own.sum(0), below, None


class FRN(nn.Module):
    """Filter response normalisation and its thresholded unit (Singh & Krishnan 2020), no batch:
    max(gamma x / sqrt(mean_HW x^2 + |eps|) + beta, tau). eps is a frozen parameter (published)."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta, self.tau = (nn.Parameter(torch.zeros(channels)) for _ in range(2))
        self.eps = nn.Parameter(torch.full((channels,), 1e-6), requires_grad=False)

    def forward(self, x):
        return FilterResponse.apply(x, self.gamma, self.beta, self.tau, self.eps.abs())


class BatchNormReLU(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(x))


class WideBlock(nn.Module):
    """Pre-activation block. Where channels change, the shortcut convolution sees norm1(x) too."""

    def __init__(self, c_in, c, stride, norm, dropout):
        super().__init__()
        self.norm1, self.norm2 = norm(c_in), norm(c)
        self.conv1 = nn.Conv2d(c_in, c, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c, c, 3, 1, 1, bias=False)
        self.dropout = common.Dropout(dropout)
        # subsampled, then 1x1: on CPUs PyTorch 2.14's strided 1x1, channels last, writes out of
        # bounds in the backward pass
        self.subsample = nn.AvgPool2d(1, stride) if stride > 1 else nn.Identity()
        same = c_in == c and stride == 1
        self.shortcut = None if same else nn.Conv2d(c_in, c, 1, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        rest = x if self.shortcut is None else self.shortcut(self.subsample(h))
        return rest + self.conv2(self.dropout(self.norm2(self.conv1(h))))


class WideResNet(nn.Module):
    """WRN-depth-widen: (depth - 4) / 6 blocks in each of three stages, strides 1, 2, 2."""

    def __init__(self, num_classes, in_channels, depth, widen_factor, norm, width=1.0, dropout=0.0):
        super().__init__()
        norm = {"frn": FRN, "bn": BatchNormReLU}[norm]
        c_in = max(4, round(16 * width))
        self.stem = nn.Conv2d(in_channels, c_in, 3, 1, 1, bias=False)
        blocks = []
        for stage, stride in enumerate((1, 2, 2)):
            c = max(4, round(16 * widen_factor * width * 2**stage))
            for i in range((depth - 4) // 6):
                blocks.append(WideBlock(c_in, c, stride if not i else 1, norm, dropout))
                c_in = c
        self.blocks, self.norm = nn.Sequential(*blocks), norm(c_in)
        self.head = nn.Linear(c_in, num_classes)

    def features(self, x):
        return self.norm(self.blocks(self.stem(x))).mean((2, 3))

    def forward(self, x):
        return logits_of(self.head, self.features(x))


class SelfAttention(nn.Module):
    """Scaled dot-product attention over the tokens that are not padding."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = common.Dropout(dropout)

    def forward(self, x, real):
        b, length, dim = x.shape
        q, k, v = (layer(x).view(b, length, self.heads, dim // self.heads).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        if self.dropout.p and self.dropout.training:  # a mask that is drawn for the global batch
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min)
            mixed = self.dropout(scores.softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, real[:, None, None])
        return self.out(mixed.transpose(1, 2).reshape(b, length, dim))


class EncoderLayer(nn.Module):
    """BERT's: attention and a feed-forward net, each with a residual and a layer norm after it."""

    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.attention = SelfAttention(dim, heads, dropout)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-12) for _ in range(2))
        self.dropout = common.Dropout(dropout)

    def forward(self, x, real):
        x = self.norm1(x + self.dropout(self.attention(x, real)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """BERT (Devlin et al. 2019) with a pooler, from random weights; tokens [B, L], padding is 0.

    paper: 256 wide, 4 layers, 8 heads, 2048 hidden, 512 positions, dropout .5 in training.
    """

    def __init__(self, num_classes, vocabulary, dim=256, layers=4, heads=8, hidden=2048,
                 dropout=0.5):
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.positions, self.types = nn.Embedding(512, dim), nn.Embedding(2, dim)
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-12), common.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, hidden, dropout)
                                    for _ in range(layers))
        self.pooler, self.head = nn.Linear(dim, dim), nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.words.weight[0])

    def features(self, tokens):
        real = tokens != 0
        x = self.words(tokens) + self.types.weight[0] + self.positions.weight[:tokens.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, real)
        return self.dropout(self.pooler(x[:, 0]).tanh())

    def forward(self, tokens):
        return logits_of(self.head, self.features(tokens))


class GraphDropout(common.Dropout):
    """common.Dropout for rows that are atoms or edges: `rows` is (first, total), where they lie
    among those of the global batch."""

    rows = None

    def forward(self, x):
        if not self.training or self.p == 0 or self.rows is None:
            return F.dropout(x, self.p, self.training)
        first, total = self.rows
        mask = F.dropout(x.new_ones(total, *x.shape[1:]), self.p)
        return x * mask[first:first + len(x)]


def sum_by(index, values, count):
    """[count, ...]: the sums of the rows of `values` that have equal `index`."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


class PaiNNLayer(nn.Module):
    """A message and an update (Schuett et al. 2021, eqs. 7-9), s [A, F], v [A, 3, F], None for 0.

    rbf [E, radial + 1]: the radial functions and a 1, for the bias, times the cutoff function.
    """

    def __init__(self, f, radial, dropout):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(f, f), nn.SiLU(), nn.Linear(f, 3 * f))
        self.filter = nn.Linear(radial, 3 * f)
        self.u, self.v = (nn.Linear(f, f, bias=False) for _ in range(2))
        self.update = nn.Sequential(nn.Linear(2 * f, f), nn.SiLU(), nn.Linear(f, 3 * f))
        self.filter_dropout, self.dropout = GraphDropout(dropout), GraphDropout(dropout)

    def forward(self, s, v, edges, rbf, direction):
        sources, targets = edges
        weight = torch.cat([self.filter.weight, self.filter.bias[:, None]], 1)
        weight = self.filter_dropout(F.linear(rbf, weight))
        vv, ss, vs = (self.message(s).index_select(0, sources) * weight).chunk(3, -1)
        s = s + sum_by(targets, ss, len(s))
        message = direction[:, :, None] * vs[:, None]
        if v is not None:
            message = torch.addcmul(message, v.index_select(0, sources), vv[:, None])
        message = sum_by(targets, message, len(s))
        v = message if v is None else v + message
        uv, vv = self.dropout(self.u(v)), self.dropout(self.v(v))
        # |Vv|: safe where it is zero, as at a lone atom
        length = (vv.square().sum(1) + 1e-30).sqrt()
        a_vv, a_sv, a_ss = self.update(torch.cat([length, s], -1)).chunk(3, -1)
        return s + a_ss + a_sv * (uv * vv).sum(1), v + uv * a_vv[:, None]


class PaiNN(nn.Module):
    """PaiNN with a Gaussian for each atom: mean sum_i (m_i std + mean + ref_i), variance
    sum_i (softplus(raw_i) + 1e-8)^2 std^2. `statistics`: (mean, std) an atom; `references` [101].
    """

    def __init__(self, statistics, references, f=128, layers=3, radial=20, cutoff=5.0, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(101, f, padding_idx=0)
        self.layers = nn.ModuleList(PaiNNLayer(f, radial, dropout) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(f, f // 2), nn.SiLU(), GraphDropout(dropout))
        self.head, self.cutoff, self.radial = nn.Linear(f // 2, 2), cutoff, radial
        self.register_buffer("statistics", torch.tensor(statistics, dtype=torch.float64))
        self.register_buffer("references", references.double())

    def features(self, molecules):
        for layer in self.layers:
            layer.filter_dropout.rows = molecules.edge_rows
        for module in (*(layer.dropout for layer in self.layers), self.readout[-1]):
            module.rows = molecules.atom_rows
        z, r = molecules.numbers, molecules.positions
        edges = molecules.sources, molecules.targets
        offset = r[edges[0]] - r[edges[1]]
        distance = offset.norm(dim=1, keepdim=True)
        n = torch.arange(1, self.radial + 1, dtype=r.dtype, device=r.device)
        rbf = (n * (math.pi / self.cutoff) * distance).sin() / distance
        cut = 0.5 * ((math.pi / self.cutoff * distance).cos() + 1) * (distance < self.cutoff)
        rbf = torch.cat([rbf, torch.ones_like(cut)], 1) * cut
        s, v = self.embedding(z), None
        for layer in self.layers:
            s, v = layer(s, v, edges, rbf, offset / distance)
        return self.readout(s)

    def offsets(self, molecules):
        """[B], float64: what does not depend on the weights: mean and reference of each atom."""
        atoms = self.statistics[0] + self.references[molecules.numbers]
        return sum_by(molecules.molecule, atoms, molecules.count)

    def forward(self, molecules):
        last = LastLayer(widen(self.features(molecules)), None, molecules.molecule,
                         self.offsets(molecules), self.statistics[1])
        with torch.autocast(last.x.device.type, enabled=False):
            return head_outputs(flat_head(self.head)[None], last)[0]


def make_network(args, train_set, dropout):
    """The network of --model for a training set."""
    if args.model == "bert_256_4":
        dim = 8 * max(1, round(32 * args.width))
        return Bert(train_set.num_classes, len(train_set.vocab), dim, args.depth or 4, 8, 8 * dim,
                    dropout)
    if args.model == "painn":
        return PaiNN(energy_statistics(train_set), train_set.references,
                     2 * max(1, round(64 * args.width)), args.depth or 3, cutoff=args.cutoff,
                     dropout=dropout)
    depth, widen_factor = {"wrn_16_4": (16, 4), "wrn_28_10": (28, 10)}[args.model]
    return WideResNet(train_set.num_classes, train_set.shape[0], args.depth or depth, widen_factor,
                      args.norm, args.width, dropout)


def energy_statistics(molecules):
    """(mean, unbiased std) over molecules of (label - sum of references) / atoms, in eV."""
    sizes = molecules.sizes
    index = torch.arange(len(sizes)).repeat_interleave(sizes)
    own = molecules.labels - sum_by(index, molecules.references[molecules.numbers], len(sizes))
    std, mean = torch.std_mean(own / sizes)
    return mean.item(), std.item()


# ---- Method -------------------------------------------------------------------------------------
# theta [P] of a last layer: the weight [C, D] row by row, then the bias [C] (molecules: C = 2, mean
# and spread). outputs [S, N, C]: log-probabilities; of molecules (mean, variance), [S, N, 2].


def swag_moments(iterates, floor=1e-8) -> tuple[Tensor, Tensor, Tensor]:
    """SWAG's (mean [P], variance d [P], deviations D [R, P]) of R iterates [R, P].

    d = max(mean of squared deviations, floor); deviations are from the final mean (the paper's; the
    original SWAG's are from running means). `iterates` is overwritten by D. R < 2 is refused.
    """
    if len(iterates) < 2:
        raise UserError(f"SWAG needs at least 2 iterates, got {len(iterates)}")
    mean = iterates.mean(0, dtype=torch.float64).to(iterates.dtype)
    deviations = iterates.sub_(mean)
    variance = torch.zeros_like(mean)
    for row in deviations:  # one row at a time: no second [R, P]
        variance.addcmul_(row, row, value=1 / len(deviations))
    return mean, variance.clamp_min_(floor), deviations


def swag_samples(mean, variance, deviations, diagonal_noise, low_rank_noise, scale=1.0) -> Tensor:
    """[S, P]: mean + sqrt(scale / 2) [sqrt(d) z_1 + D^T z_2 / sqrt(R - 1)].

    z_1 [S, P] and z_2 [S, R] standard normal, independent. Their covariance is
    scale (diag(d) / 2 + D^T D / (2 (R - 1))), about that of the iterates.
    """
    spread = diagonal_noise * variance.sqrt()
    spread.addmm_(low_rank_noise, deviations, alpha=1 / math.sqrt(len(deviations) - 1))
    return spread.mul_(math.sqrt(scale / 2)).add_(mean)


def ivon_deviation(hessian, noise, ess, weight_decay) -> Tensor:
    """theta - m of a draw from IVON's N(m, 1 / (ess (h + weight_decay))), noise standard normal."""
    return noise * (ess * (hessian + weight_decay)).rsqrt()


def ivon_update(mean, momentum, hessian, grad, deviation, step, lr, ess, weight_decay, hess_init,
                betas=(0.9, 0.99999)):
    """One step of IVON (Shen et al. 2024, algorithm 1), in place; all [P], step counts from 1.

    grad is at mean + deviation. h follows ess (h + wd) deviation grad, Price's estimate of the
    Hessian, with the correction that keeps h + wd positive.
    """
    b1, b2 = betas
    estimate = ess * (hessian + weight_decay) * deviation * grad
    change = (1 - b2) * (estimate - hessian)
    hessian.add_(change + change.square() / (2 * (hessian + weight_decay)))
    momentum.lerp_(grad, 1 - b1)
    direction = momentum / (1 - b1**step) + weight_decay * mean
    mean.sub_(lr * (hess_init + weight_decay) * direction / (hessian + weight_decay))


class LastLayer(NamedTuple):
    """What the last layer sees, computed once: features x [N, D] of examples; of molecules [A, D]
    of atoms, with `molecule` [A], the sum `offset` [N] of what is known, and the scale in eV."""

    x: Tensor
    labels: Tensor | None
    molecule: Tensor | None = None
    offset: Tensor | None = None
    scale: Tensor | None = None


def flat_head(head) -> Tensor:
    """theta [P] of a linear layer."""
    return torch.cat([head.weight.flatten(), head.bias])


def head_outputs(theta, last) -> Tensor:
    """outputs [S, N, C] of S last layers theta [S, P], in one matrix product."""
    s, d = len(theta), last.x.shape[1]
    classes = theta.shape[1] // (d + 1)
    weight, bias = theta[:, :-classes].reshape(s * classes, d), theta[:, -classes:].flatten()
    z = torch.addmm(bias, last.x, weight.T).view(-1, s, classes).transpose(0, 1)
    if last.offset is None:
        return z.log_softmax(-1)
    atoms = torch.stack([z[..., 0], (F.softplus(z[..., 1]) + 1e-8).square()], -1)
    sums = sum_by(last.molecule, atoms.transpose(0, 1), len(last.offset)).transpose(0, 1).double()
    return torch.stack([last.offset + last.scale * sums[..., 0],
                        last.scale.square() * sums[..., 1]], -1)


def log_density(outputs, labels) -> Tensor:
    """log p(y_n | theta_s) [S, N] in nats: of integer labels, or of float labels, Gaussian."""
    if not labels.is_floating_point():
        return outputs.gather(-1, labels.expand(len(outputs), -1)[..., None])[..., 0]
    mean, variance = outputs.unbind(-1)
    return -0.5 * (variance.log() + (labels - mean).square() / variance + math.log(2 * math.pi))


def log_predictive_density(outputs, labels) -> float:
    """LPD = mean_n log (1/S) sum_s p(y_n | theta_s): the log of a mean, not a mean of logs."""
    log_p = log_density(outputs, labels).double()
    return (log_p.logsumexp(0) - math.log(len(log_p))).mean().item()


def with_ones(x):
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def as_layout(rows) -> Tensor:
    """[C, D + 1, ...], the bias last in each class, as [P, ...] in the order of theta."""
    return torch.cat([rows[:, :-1].flatten(0, 1), rows[:, -1]])


def ggn_blocks(x, probs, block=2048, stripe=64) -> Tensor:
    """`ggn_full` as [C, D + 1, C, D + 1], float64.

    No Jacobian is formed: the blocks of classes c < k are Gram matrices -sum_n p_c p_k x~ x~^T,
    x~ = (x, 1), half of which are computed, in stripes, and those of a class with itself make all
    rows of blocks sum to zero: exactly, for the sums over blocks are in float64.
    """
    (n, d1), c = (len(x), x.shape[1] + 1), probs.shape[1]
    h = x.new_zeros(c, d1, c, d1)
    for rows in torch.arange(n, device=x.device).split(block):
        x1, p = with_ones(x[rows]), probs[rows]
        for a in range(c - 1):
            pairs = -p[:, a, None] * p[:, a + 1:]
            weighted = (x1[:, :, None] * pairs[:, None]).flatten(1)  # [n, (D + 1) (C - 1 - a)]
            for i in range(0, d1, stripe):
                part = x1[:, i:i + stripe].T @ weighted[:, i * pairs.shape[1]:]
                h[a, i:i + stripe, a + 1:, i:] += part.view(
                    len(part), -1, pairs.shape[1]).transpose(1, 2)
    h = h.double()
    for a in range(c):
        for i in range(0, d1, stripe):  # below the stripes: by symmetry
            own = h[a, i:i + stripe, a + 1:, i + stripe:]
            h[a, i + stripe:, a + 1:, i:i + stripe] = own.permute(2, 1, 0)
        h[a + 1:, :, a] = h[a, :, a + 1:].transpose(0, 1)
        h[a, :, a] = 0
        h[a, :, a] = -h[a].sum(1)
    return h


def ggn_full(x, probs, block=2048) -> Tensor:
    """H = sum_n J_n^T (diag p_n - p_n p_n^T) J_n [P, P], float64, of logits W x + b: a SUM."""
    return as_layout(as_layout(ggn_blocks(x, probs, block)).permute(1, 2, 0)).T


def ggn_factors(x, probs) -> tuple[Tensor, Tensor]:
    """Kronecker factors (B [C, C], A [D, D]): H of the weights ~ B x A, of the biases B.

    B = sum_n (diag p_n - p_n p_n^T), A = (1/N) sum_n x_n x_n^T.
    """
    return torch.diag(probs.sum(0)) - probs.T @ probs, x.T @ x / len(x)


def ggn_diagonal(x, probs) -> Tensor:
    """The diagonal [P] of `ggn_full`."""
    spread = probs * (1 - probs)
    return torch.cat([(spread.T @ x.square()).flatten(), spread.sum(0)])


def heteroscedastic_hessian(theta, last) -> Tensor:
    """Hessian [P, P] in theta [P] of sum_n [log v_n + (y_n - m_n)^2 / v_n] / 2 of molecules.

    Exact, in closed form for all molecules at once: with r = y - m and gradients g of m and v,
    g_m g_m^T / v + r (g_m g_v^T + g_v g_m^T) / v^2 + (r^2/v^3 - 1/(2 v^2)) g_v g_v^T
    + (1/v - r^2/v^2) hess(v) / 2. It need not be positive definite.
    """
    x1, n, s = with_ones(last.x), len(last.offset), last.scale.to(last.x)
    u = last.x @ theta[:-2].view(2, -1)[1] + theta[-1]
    a, slope = F.softplus(u) + 1e-8, u.sigmoid()
    m, v = head_outputs(theta[None], last)[0].unbind(-1)
    r = (last.labels - m).to(x1)
    v = v.to(x1)
    g_m = s * sum_by(last.molecule, x1, n)
    g_v = 2 * s.square() * sum_by(last.molecule, (a * slope)[:, None] * x1, n)
    curved = (1 / v - r.square() / v.square())[last.molecule] * s.square()
    curved = curved * (slope.square() + a * slope * (1 - slope))
    mm = g_m.T @ (g_m / v[:, None])
    mv = g_m.T @ (g_v * (r / v.square())[:, None])
    vv = g_v.T @ (g_v * (r.square() / v**3 - 0.5 / v.square())[:, None])
    vv = vv + x1.T @ (x1 * curved[:, None])
    blocks = torch.stack([torch.stack([mm, mv], 1), torch.stack([mv.T, vv], 1)])
    return as_layout(as_layout(blocks).permute(1, 2, 0)).T


class Spectrum(NamedTuple):
    """H = Q diag(values) Q^T: then every precision H + delta I is a shift of the values.

    bases: () where Q = I, (Q,) [P, P], or (Q_B, Q_A) where Q is their Kronecker product.
    """

    values: Tensor  # [P]
    bases: tuple


def decompose(structure, last, theta) -> Spectrum:
    """The spectrum of the curvature at theta [P]: "full", "kron" or "diag".

    Of molecules the exact Hessian, in float64, whose values may be negative.
    """
    if last.offset is not None:
        wide = last._replace(x=last.x.double())
        return Spectrum(*_eigh(heteroscedastic_hessian(theta.double(), wide)))
    probs = head_outputs(theta[None], last)[0].exp()
    if structure == "full":
        return full_spectrum(ggn_blocks(last.x, probs), last.x.dtype)
    if structure == "diag":
        return Spectrum(ggn_diagonal(last.x, probs), ())
    (b, (q_b,)), (a, (q_a,)) = (_eigh(m) for m in ggn_factors(last.x, probs))
    b, a = b.clamp_min(0), a.clamp_min(0)
    return Spectrum(torch.cat([torch.outer(b, a).flatten(), b]), (q_b, q_a))


def full_spectrum(blocks, dtype) -> Spectrum:
    """Eigenpairs of a full GGN [C, D + 1, C, D + 1]: values in float64, vectors in dtype.

    What shifts all classes alike is known to have the value 0, and is taken out first: by rounding
    it would have another one, and there the posterior is widest.
    """
    c, d1 = blocks.shape[:2]
    eye = torch.eye(c, dtype=blocks.dtype, device=blocks.device)
    contrasts = torch.linalg.qr(torch.cat([torch.ones_like(eye[:, :1]), eye[:, 1:]], 1)).Q
    mean, rest = contrasts[:, :1], contrasts[:, 1:]
    reduced = torch.einsum("ca,cidj,db->aibj", rest, blocks, rest).reshape([(c - 1) * d1] * 2)
    values, vectors = torch.linalg.eigh(reduced)
    vectors = torch.einsum("ca,aim->cim", rest, vectors.view(c - 1, d1, -1))
    null = mean[:, :, None] * torch.eye(d1).to(mean)
    q = as_layout(torch.cat([vectors, null], 2)).to(dtype)
    return Spectrum(torch.cat([values.clamp_min(0), values.new_zeros(d1)]), (q,))


def _eigh(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return values, (vectors,)


def rotate(spectrum, v) -> Tensor:
    """Q v, of rows v [S, P]."""
    if len(spectrum.bases) < 2:
        return v @ spectrum.bases[0].T if spectrum.bases else v
    q_b, q_a = spectrum.bases
    c, d = len(q_b), len(q_a)
    weight = q_b @ v[:, :c * d].view(-1, c, d) @ q_a.T
    return torch.cat([weight.flatten(1), v[:, c * d:] @ q_b.T], 1)


def laplace_samples(theta, spectrum, delta, noise) -> Tensor:
    """[S, P] from N(theta, (H + delta I)^-1), noise [S, P] standard normal.

    NaN where H + delta I is not positive definite (molecules).
    """
    scale = (spectrum.values + delta).to(noise)
    return theta + rotate(Spectrum(None, tuple(q.to(noise) for q in spectrum.bases)),
                          noise * torch.where(scale > 0, scale, torch.nan).rsqrt())


def log_marginal_likelihood(log_lik, theta, spectrum, delta) -> Tensor:
    """Laplace's evidence log p(D | delta), of delta [...]: log_lik - (log det(H + delta I)
    - P log delta + delta |theta|^2) / 2, log_lik summed over the data at theta."""
    delta = torch.as_tensor(delta, dtype=torch.float64, device=theta.device)
    values = spectrum.values.double()
    log_det = (values + delta[..., None]).log().sum(-1)
    return log_lik - (log_det - len(values) * delta.log()
                      + delta * theta.double().square().sum()) / 2


def marginal_precision(log_lik, theta, spectrum, steps=1000, lr=0.1, start=40.0) -> float:
    """delta that maximises the evidence: Adam on log delta (published: 1000 steps, .1, from 40).

    UserError where an indefinite Hessian (molecules) leaves no evidence."""
    log_delta = torch.tensor(math.log(start), dtype=torch.float64, device=theta.device,
                             requires_grad=True)
    optimiser = torch.optim.Adam([log_delta], lr)
    for _ in range(steps):
        optimiser.zero_grad()
        (-log_marginal_likelihood(log_lik, theta, spectrum, log_delta.exp())).backward()
        optimiser.step()
    return proper(log_delta.exp().item(), spectrum)


def proper(delta, spectrum) -> float:
    """delta, if H + delta I is positive definite; else UserError."""
    least = -spectrum.values.min().item()
    if not delta > least:
        raise UserError(f"--prior-precision: at {delta:.4g} there is no posterior, the Hessian has "
                        f"an eigenvalue of {-least:.4g}; use grid, or a larger number")
    return delta


# Published grids: 10^-4 ... 10^4 in steps of 10^0.4; LA-NF's 15.
LAPLACE_GRID = tuple(10 ** (-4 + 0.4 * i) for i in range(21))
FLOW_GRID = (1, 5, 10, 20, 30, 40, 50, 70, 90, 100, 125, 150, 175, 200, 500)


def precision_scores(theta, spectrum, last, noise, grid=LAPLACE_GRID) -> list[float]:
    """Validation LPD of each delta, -inf where a delta has no posterior; one noise for all."""
    scores = []
    for delta in grid:
        samples = laplace_samples(theta, spectrum, delta, noise)
        score = log_predictive_density(head_outputs(samples, last), last.labels)
        scores.append(score if math.isfinite(score) else -math.inf)
    return scores


def posterior_covariance(spectrum, delta, d) -> Tensor:
    """(H + delta I)^-1 of the full structure as [C, D + 1, C, D + 1], float64."""
    q, p = spectrum.bases[0].double(), len(spectrum.values)
    c = p // (d + 1)
    root = torch.cat([q[:c * d].view(c, d, p), q[c * d:, None]], 1)
    root = root * (spectrum.values.double() + delta).rsqrt()
    return torch.einsum("cip,kjp->cikj", root, root)


def functional_covariance(spectrum, delta, x, sigma=None) -> Tensor:
    """Covariance [N, C, C] of the logits W x + b under N(., (H + delta I)^-1), float64.

    sigma: `posterior_covariance` where it is at hand already (full structure).
    """
    x = x.double()
    values, d = spectrum.values.to(x) + delta, x.shape[1]
    c = len(values) // (d + 1)
    if len(spectrum.bases) == 1:
        sigma = posterior_covariance(spectrum, delta, d) if sigma is None else sigma
        left = torch.einsum("ni,cikj->nckj", with_ones(x), sigma)
        return torch.einsum("nckj,nj->nck", left, with_ones(x))
    rotated = x if not spectrum.bases else x @ spectrum.bases[1].to(x)
    spread = rotated.square() @ (1 / values[:c * d].view(c, d)).T + 1 / values[c * d:]
    if not spectrum.bases:
        return torch.diag_embed(spread)
    q_b = spectrum.bases[0].to(x)
    return (q_b * spread[:, None]) @ q_b.T


def predict_closed(kind, logits, covariance, noise=None) -> Tensor:
    """Log-probabilities of logits ~ N(logits [N, C], covariance [N, C, C]): [S, N, C], S = 1.

    "glm_mc" samples them with noise [S, N, C]; "probit" (MacKay 1992) is softmax(f / sqrt(1 + pi/8
    var f)); "bridge" (Hobbhahn et al. 2022) the mean of a Dirichlet with alpha_c = (1 - 2/C +
    e^f_c sum_k e^-f_k / C^2) / var f_c, after f is conditioned on sum_c f_c = 0.
    """
    if kind == "glm_mc":
        # a shift of all logits, whose variance may be huge, is nothing to a softmax: taken out
        logits, noise = logits.to(covariance), noise.to(covariance)
        eye = torch.eye(covariance.shape[1]).to(covariance)
        centre = eye - 1 / len(eye)
        covariance = centre @ covariance @ centre
        floor = 1e-6 * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
        root = torch.linalg.cholesky(covariance + floor[:, None, None] * eye)
        return (logits + torch.einsum("nck,snk->snc", root, noise)).log_softmax(-1)
    if kind == "probit":
        variance = covariance.diagonal(dim1=1, dim2=2)
        return (logits / (1 + math.pi / 8 * variance).sqrt()).log_softmax(-1)[None]
    c, rows = logits.shape[1], covariance.sum(2)
    total = rows.sum(1, keepdim=True)
    f = logits - rows * logits.sum(1, keepdim=True) / total
    variance = (covariance - rows[:, :, None] * rows[:, None] / total[..., None]
                ).diagonal(dim1=1, dim2=2).clamp_min(1e-12)
    log_sum = f + (-f).logsumexp(1, keepdim=True) - 2 * math.log(c)
    constant = torch.full_like(log_sum, 1 - 2 / c).log()
    return (torch.logaddexp(constant, log_sum) - variance.log()).log_softmax(-1)[None]


def radial_layer(theta, centre, a, b) -> tuple[Tensor, Tensor]:
    """y = x + beta h (x - x0), h = 1 / (alpha + |x - x0|), and log |det dy/dx| [...].

    theta, centre [..., P]; alpha = softplus(a), beta = softplus(b) - alpha > -alpha: invertible.
    """
    alpha = F.softplus(a)
    beta = F.softplus(b) - alpha
    offset = theta - centre
    r = offset.norm(dim=-1)
    h = 1 / (alpha + r)
    log_det = ((theta.shape[-1] - 1) * torch.log1p(beta * h)
               + torch.log1p(beta * h - beta * h.square() * r))
    return theta + (beta * h)[..., None] * offset, log_det


def planar_layer(theta, u, w, b) -> tuple[Tensor, Tensor]:
    """y = x + u^ tanh(w.x + b), and log |det dy/dx|; u^ moves u so that w.u^ > -1: invertible."""
    wu, ww = (w * u).sum(-1, keepdim=True), w.square().sum(-1, keepdim=True)
    u = u + (F.softplus(wu) - 1 - wu) * w / ww
    t = ((w * theta).sum(-1) + b).tanh()
    return theta + u * t[..., None], torch.log((1 + (1 - t.square()) * (w * u).sum(-1)).abs())


def apply_flow(kind, parameters, theta) -> tuple[Tensor, Tensor]:
    """(theta_T, sum of log-determinants) through T layers; parameters [..., T, P] or [..., T]."""
    layer, total = {"radial": radial_layer, "planar": planar_layer}[kind], 0.0
    for step in zip(*(p.unbind(p.ndim - 1 - vector) for p, vector in zip(
            parameters, {"radial": (1, 0, 0), "planar": (1, 1, 0)}[kind]))):
        theta, log_det = layer(theta, *step)
        total = total + log_det
    return theta, total


def flow_shapes(kind, layers, p) -> list[tuple]:
    """Shapes of a flow's parameters: P + 2 numbers a radial layer, 2 P + 1 a planar one."""
    vectors, scalars = {"radial": (1, 2), "planar": (2, 1)}[kind]
    return [(layers, p)] * vectors + [(layers,)] * scalars


def negative_elbo(kind, parameters, theta, spectrum, base_delta, precision, noise, last, n):
    """-ELBO [G] in nats, of G flows at once: log q(t) - log N(t; 0, I / precision)
    - (N / B) sum_b log p(y_b | t), t one draw of each: theta + root noise through the flow.

    parameters [G, T, ...]; precision [G]; noise [1, P] for all or [G, P]; `last` has the B examples
    of the batch; n is N.
    """
    base = laplace_samples(theta, spectrum, base_delta, noise)
    t, log_det = apply_flow(kind, parameters, base)
    log_q = 0.5 * ((spectrum.values + base_delta).log().sum().to(t) - noise.square().sum(-1)
                   - noise.shape[1] * math.log(2 * math.pi)) - log_det
    log_prior = 0.5 * (noise.shape[1] * (precision / (2 * math.pi)).log()
                       - precision * t.square().sum(-1))
    log_lik = log_density(head_outputs(t, last), last.labels).sum(1)
    return log_q - log_prior - n / len(last.labels) * log_lik


def member_combinations(members, k, count) -> list[tuple[int, list[int]]]:
    """Published rule of ensembles.csv: (seed, sorted members) of ensembles i = 1 ... count of k.

    seed = (k + i)(k + i + 1)/2 + i, Cantor's pairing; Python's random.sample of 1 ... members. Here
    k = 1 gives each member once, and equal ensembles are given once.
    """
    if k == 1:
        return [(i, [i]) for i in range(1, members + 1)]
    found = {}
    for i in range(1, count + 1):
        seed = (k + i) * (k + i + 1) // 2 + i
        chosen = sorted(random.Random(seed).sample(range(1, members + 1), k))
        found.setdefault(tuple(chosen), seed)
    return [(seed, list(chosen)) for chosen, seed in found.items()]


def stratified_order(k, samples, seed) -> Tensor:
    """Which of k members each of S draws comes from, int64 [S]: floor(S/k) random permutations,
    then S mod k distinct members. Any prefix of a multiple of k holds each member equally often."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(k, generator=generator) for _ in range(-(-samples // k))]
    return torch.cat(order)[:samples]


# Published sizes at which an ensemble is evaluated.
SUBSAMPLES = (5, 10, 15, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200)


def mixture_prefixes(outputs, sizes) -> dict:
    """{S: log-probabilities [N, C] of the mixture of the first S rows} of outputs [S', N, C].

    The log of the mean of probabilities, in one pass over the rows, in float64.
    """
    found, running, done = {}, None, 0
    for size in sorted(sizes):
        part = outputs[done:size].double().logsumexp(0)
        running = part if running is None else torch.logaddexp(running, part)
        found[size], done = running - math.log(size), size
    return found


def data_loss(outputs, labels, mse_share=0.0, y_var=1.0) -> Tensor:
    """Sum over examples: cross entropy; of molecules, with lam = mse_share and no constant,
    lam (y - m)^2 + (1 - lam) y_var [log v + (y - m)^2 / v] / 2."""
    if not labels.is_floating_point():
        return F.cross_entropy(outputs, labels, reduction="sum")
    mean, variance = outputs.unbind(-1)
    squared = (labels - mean).square()
    nll = 0.5 * (variance.log() + squared / variance)
    return (mse_share * squared + (1 - mse_share) * y_var * nll).sum()


def mse_share(step, constant, decay) -> float:
    """lam at a step from 0: 1 for `constant` steps, then linearly to 0 over `decay`."""
    return 1.0 if step < constant else max(0.0, 1 - (step - constant) / max(1, decay - 1)) * (
        decay > 0)


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, world, batch_size=None, train=False, augment=False):
    """Batches of this process, on its device; shuffled only where `train`. batch[0] is what a
    network takes."""
    options = dict(seed=args.seed, shuffle=train, rank=world.rank, world_size=world.size)
    batch_size = batch_size or args.batch_size
    if isinstance(dataset, data.TextSet):
        return data.SequenceLoader(dataset, batch_size, world.device, **options,
                                   by_length=args.batch_by == "length",
                                   pad_to=268 if args.batch_by == "padded" else 0)
    if isinstance(dataset, data.MoleculeSet):
        return data.SequenceLoader(dataset, batch_size, world.device, **options,
                                   cutoff=args.cutoff)
    return data.Loader(dataset, batch_size, world.device, **options, channels_last=True,
                       augment="crop_flip" if augment else "none", workers=args.workers)


def autocast(args, world):
    return torch.autocast(world.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def sampled_parameters(net, published=False) -> list:
    """The tensors that a posterior over all weights has; published: FRN's frozen epsilon too."""
    return [p for p in net.parameters() if p.requires_grad or published]


def get_vector(parameters) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


@torch.no_grad()
def set_vector(parameters, vector):
    for p, part in zip(parameters, vector.split([p.numel() for p in parameters])):
        p.copy_(part.view_as(p))


class Ivon:
    """IVON's state as an optimiser: the network holds a sample during a step, the mean after it."""

    def __init__(self, net, args, n):
        self.parameters, self.seed = sampled_parameters(net), args.seed
        self.param_groups = [{"lr": args.ivon_lr}]
        self.fixed = dict(ess=args.ivon_ess or n, weight_decay=args.ivon_weight_decay)
        self.hess_init, self.step_count = args.ivon_hess_init, 0
        self.mean = get_vector(self.parameters)
        self.momentum = torch.zeros_like(self.mean)
        self.hessian = torch.full_like(self.mean, args.ivon_hess_init)

    def deviation(self, *key) -> Tensor:
        """theta - mean of a draw; a function of (seed, key) alone, the same in all processes."""
        generator = torch.Generator().manual_seed(common.derive_seed(self.seed, *key))
        noise = torch.randn(len(self.mean), generator=generator).to(self.mean)
        return ivon_deviation(self.hessian, noise, **self.fixed)

    def perturb(self):
        self.step_count += 1
        self.drawn = self.deviation(3, self.step_count)
        set_vector(self.parameters, self.mean + self.drawn)

    def step(self):
        grad = torch.cat([p.grad.flatten() for p in self.parameters])
        ivon_update(self.mean, self.momentum, self.hessian, grad, self.drawn, self.step_count,
                    self.param_groups[0]["lr"], hess_init=self.hess_init, **self.fixed)
        set_vector(self.parameters, self.mean)

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            p.grad = None

    def state_dict(self):
        return {"mean": self.mean, "momentum": self.momentum, "hessian": self.hessian,
                "step": self.step_count}

    def load_state_dict(self, state):
        for name in ("mean", "momentum", "hessian"):
            getattr(self, name).copy_(state[name])
        self.step_count = state["step"]


class BestCopy:
    """The weights of the epoch with the smallest validation NLL; a NaN is never better."""

    def __init__(self, net, val, args, world):
        self.net, self.val, self.args, self.world = net, val, args, world
        self.state = {"nll": math.inf, "epoch": 0, "weights": None}

    def after_epoch(self, epoch):
        own = -log_predictive_density(predict_net(self.net, self.val, self.args, self.world),
                                      self.val.labels)
        if own < self.state["nll"]:
            weights = {k: v.detach().cpu().clone() for k, v in self.net.state_dict().items()}
            self.state = {"nll": own, "epoch": epoch, "weights": weights}
        return {"val_nll_nats": own}

    def finished(self, epoch):
        waited = epoch - self.state["epoch"]
        return epoch >= self.args.min_epochs and waited >= self.args.patience


class Iterates:
    """SWAG's iterates, a row of float32 an epoch in a file: written before the checkpoint that
    counts it, so that a run killed anywhere goes on from rows that are whole."""

    def __init__(self, net, path, rows, published, seed, world):
        self.parameters, self.path, self.world = sampled_parameters(net, published), path, world
        self.seed = seed
        self.shape, self.state = (rows, sum(p.numel() for p in self.parameters)), {}

    def after_epoch(self, epoch):
        row = get_vector(self.parameters).float().cpu().numpy()
        if self.world.is_main:
            if epoch > 1:
                self.check(self.whole())
            rows = np.memmap(self.path, np.float32, "w+" if epoch == 1 else "r+", shape=self.shape)
            rows[epoch - 1] = row
            rows.flush()
        return {}

    def whole(self):
        return self.path.exists() and self.path.stat().st_size == 4 * math.prod(self.shape)

    def check(self, whole):
        if not whole:
            raise UserError(f"{self.path} is absent or incomplete (without --keep-grid only the "
                            "chosen rates are kept); make it anew with --method swag --seed "
                            f"{self.seed} --keep-grid --resume never")

    def finished(self, _):
        return False

    def read(self) -> Tensor:
        """[R, P] on the CPU of every process, whose disks need not be shared."""
        whole = b"1" if self.world.is_main and self.whole() else None
        self.check(common.broadcast_bytes(whole, self.world))
        rows = torch.empty(self.shape)
        if self.world.is_main:
            rows = torch.from_numpy(np.fromfile(self.path, np.float32).reshape(self.shape))
        if self.world.size > 1:
            torch.distributed.broadcast(rows, 0)
        return rows


class Last:
    """Keeps nothing: the last weights are the result."""

    state: dict = {}

    def after_epoch(self, _):
        return {}

    def finished(self, _):
        return False


class Diverged(UserError):
    """A loss or a weight is no longer finite."""


class Recipe(NamedTuple):
    """How a network is trained."""

    kind: str
    epochs: int
    optimiser: object
    lr_at: object          # of a global step and the steps of an epoch
    augment: bool = False
    y_var: float = 1.0
    mse_steps: tuple = (0, 0)


def cosine(epoch, epochs):
    """Published: half a cosine to 0 at the end, a step an epoch, no warm-up."""
    return 0.5 * (1 + math.cos(math.pi * epoch / max(1, epochs)))


def ivon_share(step, steps, epochs, warm_up=5):
    """Published: linear from .2 over 5 epochs, then a cosine whose end lies 5 epochs too late."""
    epoch = step // steps
    if epoch < min(warm_up, epochs // 4):
        return 0.2 + 0.8 * epoch / min(warm_up, epochs // 4)
    return cosine(epoch - min(warm_up, epochs // 4), epochs)


def make_recipe(kind, net, n, args, lr=None) -> Recipe:
    """The published recipe of a kind of training: map and mcdo, swag (constant `lr`), ivon."""
    weights = sampled_parameters(net)
    if kind == "ivon":
        return Recipe(kind, args.ivon_epochs, Ivon(net, args, n), lambda step, steps:
                      args.ivon_lr * ivon_share(step, steps, args.ivon_epochs), args.augment)
    if kind == "swag":
        optimiser = torch.optim.SGD(weights, lr, momentum=0.9, weight_decay=args.swag_weight_decay)
        return Recipe(kind, args.swag_epochs, optimiser, lambda step, steps: lr)
    if args.opt == "adamw":
        optimiser = torch.optim.AdamW(weights, args.lr, weight_decay=args.weight_decay)
    else:
        optimiser = torch.optim.SGD(weights, args.lr, momentum=0.9, nesterov=True,
                                    weight_decay=args.weight_decay)
    return Recipe(kind, args.epochs, optimiser,
                  lambda step, steps: args.lr * cosine(step // steps, args.epochs), args.augment,
                  args.y_var, tuple(args.mse_steps))


def train(net, recipe, keeper, train_set, run, args, world):
    """Train by a recipe, resumed from the run's checkpoint if there is one; keeper.state is what is
    kept beside the last weights."""
    state = run.load()
    run.open()
    run.say(f"{recipe.kind}: {run.directory}")
    optimiser, epochs = recipe.optimiser, recipe.epochs
    model = common.sync_batch_norm(net, world)
    loader = make_loader(train_set, args, world, train=True, augment=recipe.augment)
    steps = min(len(loader), args.limit_steps or len(loader))
    fresh = lambda: {"step": 0, "loss": torch.zeros(steps)}
    progress = {"epoch": 0, "done": False, **fresh()}
    if state is not None:
        net.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        keeper.state, progress = state["keeper"], state["progress"]
        if progress["done"]:
            if run.resume_from != run.checkpoint:  # finished elsewhere: kept here too
                run.save(**{k: state[k] for k in ("model", "optimiser", "keeper", "progress")})
            return
        run.say(f"{run.resume_from}: {progress['epoch']} of {epochs} epochs are done")
    if args.compile:
        model = torch.compile(model)
    model = common.data_parallel(model, world)

    def save(**progress):
        if not math.isfinite(torch.nn.utils.get_total_norm(net.parameters())):
            raise Diverged(f"weights are no longer finite after epoch {progress['epoch']}; the "
                           "last good checkpoint is kept. Lower the learning rate")
        run.save(model=net.state_dict(), optimiser=optimiser.state_dict(), keeper=keeper.state,
                 progress=progress)

    lr_at = lambda step: recipe.lr_at(step, steps)
    with common.StopSignals() as stop:
        for epoch in range(progress["epoch"], epochs):
            clock, first = common.Stopwatch(world.device), progress["step"]
            step, signum, losses = train_epoch(model, recipe, loader, epoch, steps, lr_at, progress,
                                               stop, args, world)
            try:
                common.check_finite(losses[:step], epoch * steps, lr_at)
            except UserError as error:
                option = {"ivon": "--ivon-lr", "swag": "--swag-lrs"}.get(recipe.kind, "--lr")
                raise Diverged(str(error).replace("--lr", option)) from None
            if step < steps:
                save(epoch=epoch, done=False, step=step, loss=losses)
                raise common.Stopped(signum, f"in epoch {epoch + 1} of {recipe.kind} after step "
                                     f"{step}")
            seconds, seen = clock.seconds(), min(steps * args.batch_size, len(train_set))
            run.log(epoch=epoch + 1, epochs=epochs, loss=losses.mean().item(),
                    **keeper.after_epoch(epoch + 1), lr=lr_at(epoch * steps + steps - 1),
                    examples_per_s=seen * (1 - first / steps) / seconds, seconds=clock.seconds())
            progress, signum = {"epoch": epoch + 1, **fresh()}, signum or stop.asked(world)
            done = epoch + 1 == epochs or keeper.finished(epoch + 1)
            if (epoch + 1) % args.save_interval == 0 or done or signum:
                save(**progress, done=done)
            if done:
                break
            if signum:
                raise common.Stopped(signum, f"after epoch {epoch + 1} of {recipe.kind}")
        if not epochs and state is None:
            keeper.after_epoch(0)
            save(**progress | {"done": True})


def train_epoch(model, recipe, loader, epoch, steps, lr_at, progress, stop, args, world):
    """Steps progress["step"] to `steps` of an epoch; fewer if a stop is asked for."""
    model.train()
    optimiser, perturb = recipe.optimiser, getattr(recipe.optimiser, "perturb", lambda: None)
    random_net = any(m.p for m in model.modules() if isinstance(m, common.Dropout))
    losses = float(world.is_main) * progress["loss"].to(world.device)  # counted once
    batches = common.progress(loader.epoch(epoch, start=progress["step"]), steps - progress["step"],
                              f"{recipe.kind} {epoch + 1}", args.quiet, world)
    for step, batch in zip(range(progress["step"], steps), batches):
        now = epoch * steps + step
        for group in optimiser.param_groups:
            group["lr"] = lr_at(now)
        if random_net:
            common.seed_all(args.seed, 2, now)
            common.Dropout.global_rows = batch.global_size
        perturb()
        optimiser.zero_grad(set_to_none=True)
        with autocast(args, world):
            outputs = widen(model(batch[0]))
        loss = data_loss(outputs, batch.labels, mse_share(now, *recipe.mse_steps),
                         recipe.y_var) / batch.global_size
        (loss * world.size).backward()  # DDP divides by the number of processes
        optimiser.step()
        losses[step] += loss.detach()
        if signum := stop.asked(world, step):
            break
    return step + 1, signum, common.all_reduce(losses, world).cpu()


@torch.no_grad()
def refresh_batch_norm(net, train_set, args, world):
    """Running statistics of the weights that the network has now: means over the training set."""
    net = common.sync_batch_norm(net, world)
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.train()
    for i, batch in enumerate(make_loader(train_set, args, world).epoch()):
        for m in norms:  # equal weights, as torch's update_bn has them
            m.momentum = 1 / (i + 1)
        with autocast(args, world):
            net(batch[0])
    for m, momentum in zip(norms, momenta):
        m.momentum = momentum
        m.eval()


# The pieces of one member: how they are made, in files, and what they predict, outputs [S, N, C].


@torch.no_grad()
def predict_net(net, dataset, args, world, samples=1, draw=None, dropout=False) -> Tensor:
    """outputs [S, N, C] on the CPU of every process: draw(s) sets the weights of sample s."""
    net.eval()
    for module in net.modules():
        if isinstance(module, common.Dropout):
            module.train(dropout)
    loader = make_loader(dataset, args, world, args.eval_batch_size)
    rows, index = [], []
    for s in range(samples):
        if draw is not None:
            draw(s)
        parts = []
        for batch in loader.epoch():
            common.Dropout.global_rows = batch.global_size
            with autocast(args, world):
                own = widen(net(batch[0]))
            parts.append(own if isinstance(dataset, data.MoleculeSet) else own.log_softmax(-1))
            if not s:
                index.append(batch.index)
        rows.append(torch.cat(parts))
    rows = common.gather_rows(torch.stack(rows, 1), torch.cat(index), len(dataset), world)
    return rows.transpose(0, 1)


@torch.no_grad()
def last_layer(net, dataset, args, world) -> LastLayer:
    """The features of a set, in its order, on the device of every process."""
    net.eval()
    if isinstance(dataset, data.MoleculeSet):  # atoms are ragged: each process takes them all
        world = world._replace(rank=0, size=1)
    parts, index, offsets = [], [], []
    for batch in make_loader(dataset, args, world, args.eval_batch_size).epoch():
        with autocast(args, world):
            parts.append(widen(net.features(batch[0])))
        index.append(batch.index)
        if isinstance(dataset, data.MoleculeSet):
            offsets.append(net.offsets(batch[0]))
    x, labels = torch.cat(parts), dataset.labels.to(world.device)
    if offsets:  # this loader keeps the set's order
        sizes = dataset.sizes.to(world.device)
        molecule = torch.arange(len(sizes), device=world.device).repeat_interleave(sizes)
        return LastLayer(x, labels, molecule, torch.cat(offsets), net.statistics[1])
    x = common.gather_rows(x, torch.cat(index), len(dataset), world)
    return LastLayer(x.to(world.device), labels)


def take(last, index, sizes=None) -> LastLayer:
    """The examples `index` [B] of what a last layer sees; sizes [N]: atoms of each molecule."""
    if last.offset is None:
        return LastLayer(last.x[index], last.labels[index])
    own = sizes[index]
    starts = (sizes.cumsum(0) - sizes)[index]
    molecule = torch.arange(len(index), device=own.device).repeat_interleave(own)
    atoms = torch.arange(len(molecule), device=own.device)
    atoms = atoms + (starts - (own.cumsum(0) - own)).repeat_interleave(own)
    return LastLayer(last.x[atoms], last.labels[index], molecule, last.offset[index], last.scale)


def seeded_noise(shape, device, *key) -> Tensor:
    """Standard normal numbers, a function of the key alone, whatever the device."""
    generator = torch.Generator().manual_seed(common.derive_seed(*key))
    return torch.randn(*shape, generator=generator).to(device)


def read_note(path, world):
    """What `common.write_json` wrote, of the main process, on all; None if absent or damaged."""
    content = path.read_bytes() if world.is_main and path.exists() else None
    try:
        note = json.loads(common.broadcast_bytes(content, world) or "null")
    except ValueError:
        return None
    return note if isinstance(note, dict) else None


def digest(tensors) -> str:
    """A hash of tensors' values."""
    found = hashlib.sha256()
    for value in tensors:
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def best(found, option):
    """The (score, ...) of the largest score, the first on ties; NaN and -inf are never it."""
    scored = [f for f in found if math.isfinite(f[0])]
    if not scored:
        raise UserError(f"no value of {option} gives a finite validation LPD; try others")
    return max(scored, key=lambda f: f[0])


class Member:
    """One network of the study and what is made from it. Every piece is a run directory: it is
    trained where it is missing (with --eval: refused), read where it is there."""

    def __init__(self, seed, sets, args, world):
        self.args = common.with_options(args, seed=seed)
        self.seed, self.sets, self.world, self.made, self.seconds = seed, sets, world, {}, {}

    def run(self, kind, what, **more):
        """The run directory of a piece: its options, and what else shapes it."""
        keys = (*COMMON_OPTIONS, *PIECE_OPTIONS[kind], "seed")
        args = self.args
        if args.method != "all" and kind != {"swa": "swag"}.get(args.method, args.method):
            args = common.with_options(args, resume="auto")  # what a piece is made from is kept
        config = {**{k: getattr(args, k) for k in keys}, **more}
        return common.Run(args, "swag_laplace_ensembles",
                          f"{run_name(args)}/{what}-seed{self.seed}", config, self.world)

    def once(self, name, make):
        """make() at the first call, its result at the others."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def network(self, dropout=None):
        """A new network, from this seed's random weights; with MAP's dropout, or another."""
        common.seed_all(self.seed)
        rate = self.args.dropout if dropout is None else dropout
        net = make_network(self.args, self.sets["train"], rate)
        return net.to(self.world.device, memory_format=torch.channels_last)

    def finished(self, kind, net, recipe, keeper, run):
        """Train a network unless it is trained; the seconds of its epochs are noted."""
        if not self.args.eval:
            train(net, recipe, keeper, self.sets["train"], run, self.args, self.world)
            run.resume_from, run.fresh = run.checkpoint, False
        state = run.load(required=True)
        progress = state["progress"]
        if not progress["done"]:
            raise UserError(f"{run.checkpoint} has {progress['epoch']} of {recipe.epochs} epochs; "
                            "finish it first (the same command without --eval)")
        self.seconds[kind] = self.seconds.get(kind, 0.0) + sum(r["seconds"] for r in run.history)
        net.load_state_dict(state["keeper"].get("weights") or state["model"])
        recipe.optimiser.load_state_dict(state["optimiser"])
        return net.eval(), state["keeper"]

    def trained(self, kind, what, dropout=None):
        """A network trained by MAP's recipe, with this dropout rate, at its best epoch."""
        net, args = self.network(dropout), self.args
        recipe = make_recipe(kind, net, len(self.sets["train"]), args)
        keeper = BestCopy(net, self.sets["val"], args, self.world)
        more = {} if dropout is None else {"dropout": dropout}
        return self.finished(kind, net, recipe, keeper, self.run(kind, what, **more))[0]

    def map(self):
        return self.once("map", lambda: self.trained("map", "map"))

    def fingerprint(self):
        """A hash of the MAP weights: what is made from them belongs to them."""
        return self.once("fingerprint", lambda: digest(self.map().state_dict().values()))

    def mcdo(self):
        """(validation LPD, rate, network) of the best dropout rate."""
        def scored(rate):
            net = self.trained("mcdo", f"mcdo-p{rate:g}", rate)
            outputs = self.predict_dropout(net, self.sets["val"], self.args.val_samples)
            return log_predictive_density(outputs, self.sets["val"].labels), rate, net

        return self.once("mcdo", lambda: best([scored(rate) for rate in self.args.dropouts],
                                              "--dropouts"))

    def predict_dropout(self, net, dataset, samples):
        draw = lambda s: common.seed_all(self.seed, 12, s)
        return predict_net(net, dataset, self.args, self.world, samples, draw, samples > 1)

    def ivon(self):
        def make():
            net, args = self.network(), self.args
            recipe = make_recipe("ivon", net, len(self.sets["train"]), args)
            net, _ = self.finished("ivon", net, recipe, Last(), self.run("ivon", "ivon"))
            refresh_batch_norm(net, self.sets["train"], args, self.world)
            return net, recipe.optimiser
        return self.once("ivon", make)

    def swag(self):
        """{"swag" or "swa": (validation LPD, learning rate)}, and `iterates` for each."""
        def make():
            found = {"swag": [], "swa": []}
            for lr in self.args.swag_lrs:
                for kind, score in self.swag_scores(lr).items():
                    found[kind].append((score, lr))
            chosen = {kind: best(scores, "--swag-lrs") for kind, scores in found.items()}
            kept = {lr for _, lr in chosen.values()}
            for lr in self.args.swag_lrs:
                path = self.iterates(self.map(), lr).path
                if lr not in kept and not self.args.keep_grid and self.world.is_main:
                    path.unlink(missing_ok=True)
            return chosen
        return self.once("swag", make)

    def swag_run(self, lr):
        return self.run("swag", f"swag-lr{lr:g}", lr=lr, map=self.fingerprint())

    def iterates(self, net, lr):
        return Iterates(net, self.swag_run(lr).directory / "iterates.f32", self.args.swag_epochs,
                        self.args.match_published, self.seed, self.world)

    def swag_scores(self, lr):
        """Validation LPD of SWAG and of SWA at a learning rate, kept beside the iterates."""
        args, run = self.args, self.swag_run(lr)
        net = self.network()
        net.load_state_dict(self.map().state_dict())
        recipe = make_recipe("swag", net, len(self.sets["train"]), args, lr)
        path = run.directory / f"val-{args.val_samples}-{args.swag_scale:g}.json"
        note = None if run.fresh else read_note(path, self.world)
        known = note.get("scores") if note and note.get("config") == run.config else None
        if known == dict.fromkeys(("swag", "swa")):  # null: this rate diverged
            return dict.fromkeys(known, math.nan)
        try:
            self.finished("swag", net, recipe, self.iterates(net, lr), run)
            scores = known or self.swag_validation(lr)
        except Diverged as error:
            run.say(f"learning rate {lr:g} is left out: {error}")
            scores = dict.fromkeys(("swag", "swa"), math.nan)
        if self.world.is_main and scores != known:
            common.write_json(path, {"config": run.config, "scores": scores})
        return {kind: math.nan if score is None else score for kind, score in scores.items()}

    def swag_validation(self, lr):
        posterior, val = self.swag_posterior(lr), self.sets["val"]
        return {kind: log_predictive_density(self.predict_swag(posterior, val, samples), val.labels)
                for kind, samples in (("swag", self.args.val_samples), ("swa", 0))}

    def swag_posterior(self, lr):
        """(network, its sampled tensors, mean, variance, deviations) on the device."""
        net = self.network()
        net.load_state_dict(self.map().state_dict())
        rows = self.iterates(net, lr).read().to(self.world.device)
        return (net, sampled_parameters(net, self.args.match_published), *swag_moments(rows))

    def predict_swag(self, posterior, dataset, samples):
        """Of `samples` draws, in blocks of eight; 0: of the mean, SWA."""
        net, parameters, mean, variance, deviations = posterior
        drawn = {}

        def draw(s):
            if not samples:
                vector = mean
            else:
                block, row = divmod(s, 8)
                if block not in drawn:
                    drawn.clear()
                    drawn[block] = swag_samples(
                        mean, variance, deviations,
                        seeded_noise((8, len(mean)), mean.device, self.seed, 13, block),
                        seeded_noise((8, len(deviations)), mean.device, self.seed, 14, block),
                        self.args.swag_scale)
                vector = drawn[block][row]
            set_vector(parameters, vector.to(parameters[0]))
            refresh_batch_norm(net, self.sets["train"], self.args, self.world)

        return predict_net(net, dataset, self.args, self.world, max(1, samples), draw)

    def features(self, name):
        """What the MAP network's last layer sees of a set."""
        return self.once(f"features {name}", lambda: last_layer(
            self.map(), self.sets[name], self.args, self.world))

    def llla(self):
        """(theta, spectrum, delta): the last layer's Laplace approximation."""
        return self.once("llla", self.fit_llla)

    def fit_llla(self):
        args, run = self.args, self.run("llla", "llla", map=self.fingerprint())
        theta, device = flat_head(self.map().head).detach(), self.world.device
        if args.eval or run.load() is not None:
            state = run.load(required=True)
            spectrum = Spectrum(state["values"].to(device),
                                tuple(q.to(device) for q in state["bases"]))
            self.seconds["llla"] = run.history[0]["seconds"]
            return theta, spectrum, state["delta"]
        run.open()
        clock = common.Stopwatch(device)
        with torch.no_grad():
            train_features, val = self.features("train"), self.features("val")
            spectrum = decompose(args.structure, train_features, theta)
            noise = seeded_noise((args.val_samples, len(theta)), device, 0, 15)
            scores = precision_scores(theta, spectrum, val, noise)
            log_lik = log_density(head_outputs(theta[None], train_features),
                                  train_features.labels).double().sum()
        if args.prior_precision == "marglik":
            delta = marginal_precision(log_lik, theta, spectrum)
        elif args.prior_precision == "grid":
            delta = best(list(zip(scores, LAPLACE_GRID)), "LLLA's prior precision")[1]
        else:
            delta = proper(float(args.prior_precision), spectrum)
        run.log(epoch=1, epochs=1, delta=delta, val_lpd=max(scores), seconds=clock.seconds())
        run.save(values=spectrum.values, bases=list(spectrum.bases), delta=delta, scores=scores)
        self.seconds["llla"] = clock.seconds()
        return theta, spectrum, delta

    def la_nf(self):
        """(parameters [T, ...] of the flow with the best prior precision, that precision)."""
        return self.once("la_nf", self.fit_flow)

    def fit_flow(self):
        args, world = self.args, self.world
        theta, spectrum, base = self.llla()
        grid = {"grid": FLOW_GRID, "llla": (base,)}.get(args.flow_precision)
        precision = torch.tensor(grid or (float(args.flow_precision),), device=world.device)
        run = self.run("la_nf", f"la_nf-t{args.flow_layers}", map=self.fingerprint())
        shapes = flow_shapes(args.flow, args.flow_layers, len(theta))
        generator = torch.Generator().manual_seed(common.derive_seed(self.seed, 16))
        bound, g = 1 / math.sqrt(len(theta)), len(precision)
        parameters = [torch.empty(shape).uniform_(-bound, bound, generator=generator)
                      .expand(g, *shape).to(world.device).clone().requires_grad_()
                      for shape in shapes]
        optimiser = torch.optim.Adam(parameters, args.flow_lr)
        epoch, state = 0, run.load(required=args.eval)
        if state is not None:
            epoch = state["epoch"]
            optimiser.load_state_dict(state["optimiser"])
            with torch.no_grad():
                for p, saved in zip(parameters, state["parameters"]):
                    p.copy_(saved)
        if args.eval and epoch < args.flow_epochs:
            raise UserError(f"{run.checkpoint} has {epoch} of {args.flow_epochs} epochs; finish it "
                            "first (the same command without --eval)")
        if state is None or epoch < args.flow_epochs:
            run.open()
            run.say(f"la_nf: {run.directory}")
            self.train_flow(parameters, optimiser, precision, epoch, run)
        self.seconds["la_nf"] = sum(row["seconds"] for row in run.history)
        return self.best_flow(parameters, precision)

    def train_flow(self, parameters, optimiser, precision, start, run):
        """Adam on the ELBOs of all precisions at once, a cosine over all steps, batches of cached
        features; a checkpoint an epoch."""
        args, (theta, spectrum, base) = self.args, self.llla()
        last, n = self.features("train"), len(self.sets["train"])
        sizes = getattr(self.sets["train"], "sizes", torch.zeros(0)).to(theta.device)
        steps = -(-n // args.batch_size)
        total = max(1, steps * args.flow_epochs)
        save = lambda epoch: run.save(parameters=[p.detach() for p in parameters], epoch=epoch,
                                      optimiser=optimiser.state_dict())
        if not args.flow_epochs:
            save(0)
        with common.StopSignals() as stop:
            for epoch in range(start, args.flow_epochs):
                clock, sums = common.Stopwatch(theta.device), 0.0
                generator = torch.Generator().manual_seed(
                    common.derive_seed(self.seed, 17, epoch))
                order = torch.randperm(n, generator=generator).to(theta.device)
                noise = torch.randn(steps, len(theta), generator=generator).to(theta)
                for step, index in enumerate(order.split(args.batch_size)):
                    share = (epoch * steps + step) / total
                    optimiser.param_groups[0]["lr"] = args.flow_lr * cosine(share, 1)
                    loss = negative_elbo(
                        args.flow, parameters, theta, spectrum, base, precision,
                        noise[step:step + 1], take(last, index, sizes), n)
                    optimiser.zero_grad()
                    loss.sum().backward()
                    optimiser.step()
                    sums = sums + loss.detach()
                elbo = -(sums / steps)
                if not bool(elbo.isfinite().all()):
                    raise UserError("LA-NF's ELBO is not finite; lower --flow-lr, or raise "
                                    "--prior-precision if LLLA has no posterior there")
                run.log(epoch=epoch + 1, epochs=args.flow_epochs, elbo_nats=elbo.mean().item(),
                        seconds=clock.seconds())
                save(epoch + 1)
                if epoch + 1 < args.flow_epochs and (signum := stop.asked(self.world)):
                    raise common.Stopped(signum, f"after epoch {epoch + 1} of la_nf")

    @torch.no_grad()
    def best_flow(self, parameters, precision):
        """([T, ...] parameters, precision) of the best validation LPD, the later on ties."""
        (theta, spectrum, base), val = self.llla(), self.features("val")
        noise = seeded_noise((self.args.val_samples, len(theta)), theta.device, 0, 18)
        samples, found = laplace_samples(theta, spectrum, base, noise), []
        for g, value in enumerate(precision.tolist()):
            own = [p[g].detach() for p in parameters]
            moved, _ = apply_flow(self.args.flow, [p[None] for p in own], samples)
            found.append((log_predictive_density(head_outputs(moved, val), val.labels), value, own))
        _, value, own = best(found[::-1], "--flow-precision")
        return own, value

    @torch.no_grad()
    def predict_last(self, dataset, samples, flow=False):
        """outputs [S, N, C] of sampled last layers, or of a closed form, from the MAP features."""
        args, (theta, spectrum, delta) = self.args, self.llla()
        last = last_layer(self.map(), dataset, args, self.world)
        if not flow and args.predictive != "mc":
            return self.predict_closed(last, samples).cpu()
        noise = seeded_noise((samples, len(theta)), theta.device, self.seed, 19)
        weights = laplace_samples(theta, spectrum, delta, noise)
        if flow:
            weights, _ = apply_flow(args.flow, [p[None] for p in self.la_nf()[0]], weights)
        width = samples * self.sets["train"].num_classes if last.offset is None else 0
        return in_rows(lambda part: head_outputs(weights, part), last, width)

    def predict_closed(self, last, samples):
        theta, spectrum, delta = self.llla()
        sigma = posterior_covariance(spectrum, delta, last.x.shape[1]) if len(
            spectrum.bases) == 1 else None
        noise = seeded_noise((len(last.labels), samples, self.sets["train"].num_classes),
                             theta.device, self.seed, 20)
        closed = self.args.predictive

        def part_of(part):
            covariance = functional_covariance(spectrum, delta, part.x, sigma)
            logits = self.map().head(part.x)
            own = noise[part_of.row:part_of.row + len(logits)].transpose(0, 1)
            part_of.row += len(logits)
            return predict_closed(closed, logits, covariance, own).float()

        part_of.row = 0
        classes = self.sets["train"].num_classes
        return in_rows(part_of, last, max(samples * classes, classes**2 * last.x.shape[1]))

    def stamp(self, method):
        """What identifies a finished piece: its outputs are made anew where this changes."""
        if method == "map":
            return self.fingerprint()
        if method in ("swa", "swag"):
            return [self.fingerprint(), self.swag()[method]]
        if method == "mcdo":
            _, rate, net = self.mcdo()
            return [rate, digest(net.state_dict().values())]
        if method == "ivon":
            return digest([self.ivon()[1].mean])
        _, spectrum, delta = self.llla()
        flow = digest(self.la_nf()[0]) if method == "la_nf" else ""
        return [self.fingerprint(), delta, digest([spectrum.values]), flow]

    def predict(self, method, dataset, samples) -> Tensor:
        """outputs [S, N, C] of this member by a method."""
        args, world = self.args, self.world
        if method == "map":
            return predict_net(self.map(), dataset, args, world)
        if method in ("swa", "swag"):
            posterior = self.once(f"{method} moments", lambda: self.swag_posterior(
                self.swag()[method][1]))
            return self.predict_swag(posterior, dataset, samples if method == "swag" else 0)
        if method == "mcdo":
            return self.predict_dropout(self.mcdo()[2], dataset, samples)
        if method == "ivon":
            net, state = self.ivon()
            def draw(s):
                moved = state.deviation(21, s) if samples > 1 else 0.0
                set_vector(state.parameters, state.mean + moved)
                refresh_batch_norm(net, self.sets["train"], args, world)
            return predict_net(net, dataset, args, world, samples, draw)
        return self.predict_last(dataset, samples, flow=method == "la_nf")


def in_rows(outputs_of, last, width, numbers=2**26) -> Tensor:
    """[S, N, C] on the CPU, from blocks of so many examples that `numbers` hold `width` of each."""
    if last.offset is not None:
        return outputs_of(last).cpu()
    blocks = torch.arange(len(last.labels), device=last.x.device).split(max(1, numbers // width))
    return torch.cat([outputs_of(take(last, index)).cpu() for index in blocks], 1)


def refuse_large(args, train_set, world):
    """A full matrix and its eigenvectors must fit: five copies at the worst moment."""
    laplace = {"llla", "la_nf"} & {*(args.methods if args.method == "all" else [args.method])}
    if args.structure != "full" or not laplace:
        return
    p = len(flat_head(make_network(args, train_set, 0.0).head))
    needed, memory = 5 * 8 * p**2, common.device_memory(world)
    if needed > 0.9 * memory:
        raise UserError(f"--structure full: {p} numbers of the last layer need about "
                        f"{needed / 1e9:.1f} GB, the device has {memory / 1e9:.1f} GB; use "
                        "--structure kron or diag")


# ---- Evaluation ---------------------------------------------------------------------------------


class Outputs:
    """outputs [S, N, C] of every (method, member, set), in files that are made once and mapped into
    memory: each ensemble is rows of them."""

    def __init__(self, members, sets, args, world):
        self.members, self.sets, self.args, self.world = members, sets, args, world
        self.seconds = {}

    def samples(self, method) -> int:
        closed = method == "llla" and self.args.predictive not in ("mc", "glm_mc")
        return 1 if method in ("map", "swa") or closed else self.args.samples

    def key(self, method):
        """What the outputs of a method depend on beside the weights of the pieces."""
        names = {"swag": ("swag_scale", "swag_lrs", "val_samples"), "swa": ("swag_lrs",),
                 "mcdo": ("dropouts", "val_samples"), "llla": ("predictive",)}.get(method, ())
        options = (self.samples(method), self.args.limit_test, self.args.shift,
                   self.args.eval_batch_size if method == "mcdo" else 0,
                   *(getattr(self.args, name) for name in names))
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]

    def path(self, method, seed, name):
        kind = {"swa": "swag"}.get(method, method)
        what = f"la_nf-t{self.args.flow_layers}" if kind == "la_nf" else kind
        folder = Path(self.args.out_dir) / "swag_laplace_ensembles" / run_name(self.args)
        return folder / f"outputs-{what}-seed{seed}" / f"{method}-{name}-{self.key(method)}.npy"

    def make(self, method, seed):
        """Have the files of all sets: a piece is trained or read, and predicts."""
        member = self.members[seed]
        stamp = common.to_json(member.stamp(method))
        for name, dataset in self.sets["evaluated"].items():
            path = self.path(method, seed, name)
            note = read_note(path.with_suffix(".json"), self.world) or {}
            whole = b"1" if self.world.is_main and self.whole(path, method, dataset) else None
            whole = common.broadcast_bytes(whole, self.world) is not None
            if not whole or note.get("stamp") != stamp:
                clock = common.Stopwatch(self.world.device)
                outputs = member.predict(method, dataset, self.samples(method))
                note = {"stamp": stamp, "seconds": clock.seconds()}
                if self.world.is_main:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.with_suffix(".json").unlink(missing_ok=True)
                    common.save_array(path, outputs.numpy())
                    common.write_json(path.with_suffix(".json"), note)
            self.seconds[method, seed, name] = note.get("seconds", 0.0)

    def whole(self, path, method, dataset) -> bool:
        """Whether a file has the rows that it should have."""
        try:
            shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        except (OSError, ValueError, EOFError):
            return False
        return shape[:2] == (self.samples(method), len(dataset))

    def read(self, method, seed, name) -> np.ndarray:
        return np.load(self.path(method, seed, name), mmap_mode="r", allow_pickle=False)

    def ensemble(self, method, chosen, order_seed, name, rows):
        """outputs [S, n, C] of an ensemble on the examples `rows`, in the stratified order."""
        k, own = len(chosen), self.samples(method)
        order = stratified_order(k, k if own == 1 else own, order_seed)
        parts = [self.read(method, seed, name)[:, rows] for seed in chosen]
        found = torch.empty(len(order), *parts[0].shape[1:],
                            dtype=getattr(torch, parts[0].dtype.name))
        for i, part in enumerate(parts):
            at = order == i
            found[at] = torch.from_numpy(np.array(part[:int(at.sum())]))
        return found


def predictions(store, method, chosen, order_seed, name, numbers=2**25):
    """({S: mixture log-probabilities [N, C]}, aleatoric entropy [N]) of an ensemble; of molecules
    outputs [S, N, 2] and None. In blocks of examples."""
    dataset = store.sets["evaluated"][name]
    if isinstance(dataset, data.MoleculeSet):
        return store.ensemble(method, chosen, order_seed, name, slice(None)), None
    s = len(chosen) if store.samples(method) == 1 else store.args.samples
    sizes = sorted({n for n in SUBSAMPLES if n < s} | {s})
    rows = max(1, numbers // (s * store.sets["train"].num_classes))
    prefixes, aleatoric = {n: [] for n in sizes}, []
    for start in range(0, len(dataset), rows):
        outputs = store.ensemble(method, chosen, order_seed, name, slice(start, start + rows))
        for n, part in mixture_prefixes(outputs, sizes).items():
            prefixes[n].append(part)
        aleatoric.append(torch.special.entr(outputs.exp()).sum(-1).mean(0))
    return {n: torch.cat(parts) for n, parts in prefixes.items()}, torch.cat(aleatoric).double()


def class_metrics(log_probs, labels) -> dict:
    """Metrics of mixture log-probabilities [N, C]."""
    probs = log_probs.exp()
    return {"accuracy": common.accuracy(probs, labels), "lpd": -common.nll(log_probs, labels),
            "ece15": common.ece(probs, labels), "mce15": common.mce(probs, labels),
            "brier": common.brier(probs, labels), "confidence": probs.amax(1).mean().item(),
            "entropy": common.entropy(probs).mean().item()}


def ood_scores(inside, outside) -> dict:
    """Separation of two sets by one uncertainty, larger on OOD; ID counts as positive."""
    own = common.ood_metrics(inside, outside, larger_means="ood")
    both = torch.cat([inside, outside])
    positive = torch.arange(len(both)) >= len(inside)
    return {**own, "detection_error": common.detection_error(both, positive)}


def evaluate_ensemble(store, method, chosen, order_seed) -> list[dict]:
    """Rows of metrics of one ensemble: of each set, and of the test set by number of samples."""
    rows, test_scores = [], {}
    for name, dataset in store.sets["evaluated"].items():
        found, aleatoric = predictions(store, method, chosen, order_seed, name)
        molecules, has_labels = aleatoric is None, name not in store.sets["ood"]
        if molecules:
            mean, variance = found.double().unbind(-1)
            values = common.regression_metrics(mean, variance, dataset.labels)
            rows += [{"set": name, "samples": n, **common.regression_metrics(
                mean[:n], variance[:n], dataset.labels)} for n in SUBSAMPLES if n < len(found)]
            _, _, epistemic, total = common.gaussian_mixture_moments(mean, variance)
            scores = {"": total.sqrt(), "_epistemic": epistemic.sqrt()}
        else:
            last = found[max(found)]
            entropy = common.entropy(last.exp())
            scores = {"": entropy, "_mutual_information": (entropy - aleatoric).clamp_min(0)}
            values = class_metrics(last, dataset.labels) if has_labels else {
                "confidence": last.exp().amax(1).mean().item(), "entropy": entropy.mean().item()}
            values["mutual_information"] = scores["_mutual_information"].mean().item()
            rows += [{"set": name, "samples": n, **class_metrics(part, dataset.labels)}
                     for n, part in found.items() if has_labels and n != max(found)]
        if name == "test":
            test_scores = scores
        elif not has_labels:
            for suffix, own in scores.items():
                if len(chosen) > 1 or suffix == "" or store.samples(method) > 1:
                    values |= {f"{k}{suffix}": v for k, v in
                               ood_scores(test_scores[suffix], own).items()}
        samples = len(found) if molecules else max(found)
        rows.append({"set": name, "samples": samples, **values})
    return rows


def evaluate_study(store, args) -> list[dict]:
    """The rows of all methods, sizes and combinations."""
    rows = []
    for method in args.methods:
        for k in args.ensembles:
            for order_seed, chosen in member_combinations(args.members, k, args.combinations):
                seeds = [args.seed - 1 + i for i in chosen]
                for row in evaluate_ensemble(store, method, seeds, order_seed):
                    rows.append({"method": method, "K": k, "ensemble_seed": order_seed,
                                 "members": " ".join(map(str, seeds)), **row})
    return rows


def summarise(rows, sets, args) -> tuple[dict, dict, dict]:
    """(means, standard deviations, numbers of ensembles) over the ensembles of each method and K:
    `<method>_k<K>/<metric>` of the test set, `.../auroc_<set>`, `.../<shift>_<metric>`."""
    values = {}
    final = {}
    for row in rows:  # the row of all samples is the last of its ensemble and set
        final[row["method"], row["K"], row["members"], row["set"]] = row
    for (method, k, _, name), row in final.items():
        short = name.removeprefix(f"{args.dataset}_")
        for key, value in row.items():
            if key in ("method", "K", "ensemble_seed", "members", "set", "samples"):
                continue
            full = key if name == "test" else f"{key}_{short}" if name in sets["ood"] else \
                f"{short}_{key}"
            values.setdefault(f"{method}_k{k}/{full}", []).append(value)
    means = {key: float(np.mean(v)) for key, v in values.items() if None not in v}
    spread = {key: float(np.std(v, ddof=1)) if len(v) > 1 else None
              for key, v in values.items() if None not in v}
    return means, spread, {key: len(v) for key, v in values.items()}


CLASS_COLUMNS = (("accuracy", "accuracy %", 100, 2), ("lpd", "LPD nats", 1, 4),
                 ("ece15", "ECE15 %", 100, 2))
MOLECULE_COLUMNS = (("mae", "MAE meV", 1000, 2), ("lpd", "LPD nats", 1, 3),
                    ("ece", "ECE %", 100, 2))


def table_columns(metrics, sets, args):
    """(metric, title, factor, digits) of the printed table."""
    columns = list(MOLECULE_COLUMNS if args.dataset in MOLECULES else CLASS_COLUMNS)
    for name in sets["ood"]:
        short = name.removeprefix(f"{args.dataset}_")
        columns.append((f"auroc_{short}", f"AUROC {short}", 1, 4))
    return columns


def format_results(metrics, seconds, sets, args) -> str:
    """The table that a run prints, of `<method>_k<K>/<metric>`."""
    columns, rows = table_columns(metrics, sets, args), []
    for k in args.ensembles:
        for method in args.methods:
            cell = lambda key, scale, digits: "-" if (
                v := metrics.get(f"{method}_k{k}/{key}")) is None else f"{scale * v:.{digits}f}"
            train_s, predict_s = seconds[method]
            rows.append([METHODS[method], k, *(cell(key, scale, digits)
                                               for key, _, scale, digits in columns),
                         f"{train_s:.1f}", f"{predict_s:.2f}"])
    return common.format_table(["", "K", *(title for _, title, _, _ in columns),
                                "own training s", "prediction s"], rows)


def paper_table(metrics, args, latex=False) -> str:
    """The paper's main table for this data set: rows K and method, the best of each K in bold
    after rounding to three decimals (all that are equal). Markdown, or LaTeX."""
    columns = MOLECULE_COLUMNS if args.dataset in MOLECULES else CLASS_COLUMNS
    titles = [title.split()[0] for _, title, _, _ in columns]
    scale = {"mae": 1000}
    lines = []
    for k in args.ensembles:
        values = {m: [round(scale.get(key, 1) * metrics[f"{m}_k{k}/{key}"], 3)
                      for key, *_ in columns] for m in args.methods}
        tops = [(min if key in ("mae", "ece15", "ece") else max)(v[i] for v in values.values())
                for i, (key, *_) in enumerate(columns)]
        bold = r"\textbf{%.3f}" if latex else "**%.3f**"
        lines += [[str(k), METHODS[m], *((bold if v == top else "%.3f") % v
                                         for v, top in zip(own, tops))]
                  for m, own in values.items()]
    if latex:
        body = "".join(" & ".join(line) + r" \\" + "\n" for line in lines)
        return (rf"\begin{{tabular}}{{rl{'r' * len(columns)}}}" + "\n" + " & ".join(
            ["$K$", "", *titles]) + r" \\ \hline" + f"\n{body}" + r"\end{tabular}" + "\n")
    rule = ["---:", "---", *["---:"] * len(columns)]
    return "".join("| " + " | ".join(line) + " |\n" for line in [["K", "", *titles], rule, *lines])


def combinations_text(args) -> str:
    """The ensembles of a study, as the published ensembles.csv: tab-separated."""
    lines = ["K\tensemble_id\tseed\tmodel_ids"]
    for k in args.ensembles:
        for i, (seed, chosen) in enumerate(
                member_combinations(args.members, k, args.combinations), 1):
            members = ",".join(str(args.seed - 1 + m) for m in chosen)
            lines.append(f"{k}\t{i}\t{seed}\t{members}")
    return "\n".join(lines) + "\n"


def csv_text(rows) -> str:
    """Rows of different keys as CSV; what a row lacks is empty."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#000000", "#4477AA", "#EE6677", "#CCBB44", "#228833", "#AA3377", "#66CCEE"]


def plot_study(plt, path, metrics, spread, sets, args):
    """The paper's question: each metric against K, by method; bars: one standard deviation over
    the ensembles, which share members."""
    columns = table_columns(metrics, sets, args)
    figure, axes = plt.subplots(1, len(columns), figsize=(4 * len(columns), 3.8),
                                constrained_layout=True)
    width = 0.3 / max(1, len(args.methods))
    for i, (method, colour) in enumerate(zip(args.methods, COLOURS)):
        for axis, (key, title, scale, _) in zip(axes, columns):
            ks = [k for k in args.ensembles if f"{method}_k{k}/{key}" in metrics]
            values = [scale * metrics[f"{method}_k{k}/{key}"] for k in ks]
            errors = [scale * (spread[f"{method}_k{k}/{key}"] or 0.0) for k in ks]
            at = [args.ensembles.index(k) + (i - len(args.methods) / 2) * width for k in ks]
            axis.errorbar(at, values, errors, fmt="o-", ms=4, lw=1, capsize=2, color=colour,
                          label=METHODS[method])
            axis.set(xlabel="members K", ylabel=title, xticks=range(len(args.ensembles)),
                     xticklabels=args.ensembles)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def evenly(dataset, limit):
    """At most `limit` rows, evenly spaced."""
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.select(torch.arange(limit) * len(dataset) // limit)


def image_sets(args):
    """(train, val, test) with the published split, which no seed changes, and its statistics."""
    whole = data.load(args.dataset, "train", args.data_dir, val_fraction=0.0)
    if args.num_val >= len(whole):
        raise UserError(f"--num-val {args.num_val}: {args.dataset} has {len(whole)} images")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    train = evenly(whole.select(order[args.num_val:]), args.limit_train)
    pixels = train.images.float() / 255
    std, mean = torch.std_mean(pixels, (0, 2, 3))
    train = dataclasses.replace(train, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    match = lambda dataset: dataclasses.replace(dataset, mean=train.mean, std=train.std)
    return train, match(whole.select(order[:args.num_val])), match(
        data.load(args.dataset, "test", args.data_dir))


def ood_set(names, train, args):
    """The test parts of `a` or `a+b`, in the training set's terms."""
    if isinstance(train, data.TextSet):
        return data.load_text(names, "test", args.data_dir, like=train)
    if isinstance(train, data.MoleculeSet):
        return data.load_molecules(names, "test", args.data_dir)
    parts = [data.match(data.load(name, "test", args.data_dir), train)
             for name in names.split("+")]
    if len(parts) == 1:
        return parts[0]
    return data.ImageSet(names, torch.cat([p.images for p in parts]), torch.cat(
        [p.labels for p in parts]), train.num_classes, train.mean, train.std)


def load_sets(args, world) -> dict:
    """All sets of a study: train, val, and `evaluated`: test, OOD and shifted sets by name."""
    with common.main_first(world):
        if args.dataset in TEXTS:
            load = lambda split, **more: data.load_text(
                args.dataset, split, args.data_dir, **more)
            train = evenly(load("train", vocab_file=args.vocab), args.limit_train)
            val, test = load("val", like=train), load("test", like=train)
            if args.dataset == "sst2" and not data.sst2_has_test_labels(args.data_dir):
                if world.is_main and not args.quiet:
                    print("sst2: test.tsv has no labels (GLUE): tested on dev.tsv, validated on "
                          f"{len(val)} rows of train.tsv", flush=True)
        elif args.dataset in MOLECULES:
            more = {"target": args.target} if args.dataset == "qm9" else {}
            train, val, test = (data.load_molecules(args.dataset, split, args.data_dir, **more)
                                for split in ("train", "val", "test"))
            train = evenly(train, args.limit_train)
        else:
            train, val, test = image_sets(args)
        evaluated = {"test": evenly(test, args.limit_test)}
        ood = [name.replace("+", "_") for name in args.ood]
        evaluated |= {name.replace("+", "_"): evenly(ood_set(name, train, args), args.limit_test)
                      for name in args.ood}
        evaluated |= shifted_sets(evaluated["test"], args, world)
    for part, own in (("training", train), ("validation", val), *evaluated.items()):
        if not len(own):
            raise UserError(f"{args.dataset}: the {part} set is empty; more data is needed")
    check_classes(train)
    refuse_large(args, train, world)
    return {"train": train, "val": val, "ood": ood, "evaluated": evaluated}


def check_classes(train):
    """Refuse a training set without examples of a class: its column would be arbitrary."""
    if train.labels.is_floating_point():
        return
    counts = train.labels.bincount(minlength=train.num_classes)
    if empty := (counts == 0).nonzero().flatten().tolist():
        raise UserError(f"{train.name}: no training example of class {empty[0]}"
                        f"{f', nor of {len(empty) - 1} more' * (len(empty) > 1)}; raise "
                        "--limit-train")


def shifted_sets(test, args, world) -> dict:
    """{c_level_0 ... 4: all kinds of corruption of a severity as one set}."""
    if args.shift == "none":
        return {}
    name = f"{args.dataset}_c"
    published = args.shift == "published"
    kinds = data.corruption_kinds(name, args.data_dir) if published else list(data.CORRUPTIONS)
    if not kinds and world.is_main:
        print(f"{name} is not in {args.data_dir}: skipped", flush=True)
    found = {}
    for severity in range(1, 6) if kinds else ():
        parts = [evenly(data.match(data.load_corrupted(name, kind, severity, args.data_dir), test),
                        args.limit_test) if published else data.corrupted(test, kind, severity)
                 for kind in kinds]
        found[f"c_level_{severity - 1}"] = dataclasses.replace(
            test, images=torch.cat([p.images for p in parts]),
            labels=torch.cat([p.labels for p in parts]), label_probs=None, groups=None)
    return found


def run_name(args) -> str:
    depth = f"-d{args.depth}" if args.depth else ""
    width = f"-w{args.width:g}" if args.width != 1 else ""
    return args.name or f"{args.dataset}-{args.model}{depth}{width}"


def refuse_missing(members, args):
    """--eval: name every piece that is not finished, and the command that makes the first."""
    problems = {}
    for seed, member in members.items():
        for method in args.methods:
            try:
                member.stamp(method)
            except UserError as error:
                if "other options" in str(error):
                    raise
                problems.setdefault(method, []).append(seed)
    if problems:
        listed = "; ".join(f"{method} of seeds {', '.join(map(str, seeds))}"
                           for method, seeds in problems.items())
        method, (seed, *_) = next(iter(problems.items()))
        raise UserError(f"not finished: {listed}. Make one with --dataset {args.dataset} --method "
                        f"{method} --seed {seed}, or all with the same command without --eval")


def open_run(args, world, what):
    config = {**vars(args), "eval": False, "resume": "auto"}
    return common.Run(args, "swag_laplace_ensembles", f"{run_name(args)}/{what}", config, world)


def seconds_by_method(store, members, methods) -> dict:
    """{method: (training, prediction of all sets)}, seconds a member."""
    own = {"swa": "swag"}
    return {m: (float(np.mean([member.seconds.get(own.get(m, m), 0.0)
                               for member in members.values()])),
                sum(v for (method, *_), v in store.seconds.items() if method == m) / len(members))
            for m in methods}


def run_study(args, world) -> dict:
    """--method all: what is missing is made; every ensemble is evaluated, the table written."""
    sets = load_sets(args, world)
    members = {seed: Member(seed, sets, args, world)
               for seed in range(args.seed, args.seed + args.members)}
    store = Outputs(members, sets, args, world)
    if args.eval:
        refuse_missing(members, args)
    for seed, member in members.items():
        for method in args.methods:
            store.make(method, seed)
        member.made.clear()
    clock = common.Stopwatch(world.device)
    found = None
    if world.is_main:
        rows = evaluate_study(store, args)
        found = json.dumps(common.to_json([rows, *summarise(rows, sets, args)])).encode()
    rows, metrics, spread, n = json.loads(common.broadcast_bytes(found, world))
    seconds = seconds_by_method(store, members, args.methods)
    run = open_run(args, world, f"study-m{args.members}")
    run.results(metrics, {"evaluate_s": clock.seconds(), **{f"{m}_train_s": s for m, (s, _) in
                                                            seconds.items()},
                          **{f"{m}_predict_s": s for m, (_, s) in seconds.items()}},
                standard_deviation=spread, n=n)
    if world.is_main:
        common.write_text(run.directory / "rows.csv", csv_text(rows))
        common.write_text(run.directory / "ensembles.csv", combinations_text(args))
        common.write_text(run.directory / "table.md", paper_table(metrics, args))
        common.write_text(run.directory / "table.tex", paper_table(metrics, args, latex=True))
        print(f"\n{run_name(args)}, {args.members} members\n\n"
              f"{format_results(metrics, seconds, sets, args)}\n", flush=True)
        if args.plot and (plt := common.pyplot()):
            plot_study(plt, run.directory / "study.png", metrics, spread, sets, args)
            run.say(f"picture and tables in {run.directory}")
    return metrics


def run_piece(args, world) -> dict:
    """--method X: one piece of one member, and what it predicts alone."""
    args = common.with_options(args, methods=[args.method], ensembles=[1], members=1)
    sets = load_sets(args, world)
    member = Member(args.seed, sets, args, world)
    store = Outputs({args.seed: member}, sets, args, world)
    store.make(args.method, args.seed)
    found = None
    if world.is_main:
        rows = evaluate_study(store, args)
        found = json.dumps(common.to_json(summarise(rows, sets, args)[0])).encode()
    metrics = json.loads(common.broadcast_bytes(found, world))
    seconds = seconds_by_method(store, {args.seed: member}, args.methods)
    open_run(args, world, f"{args.method}-alone-seed{args.seed}").results(
        metrics, {"train_s": seconds[args.method][0], "predict_s": seconds[args.method][1]})
    if world.is_main:
        print(f"\n{run_name(args)}, seed {args.seed}\n\n"
              f"{format_results(metrics, seconds, sets, args)}\n", flush=True)
    return metrics


def main(argv=None) -> dict:
    args = parse_args(argv)
    world = common.start_world(args.device)
    common.check_batch(args, world)
    return (run_study if args.method == "all" else run_piece)(args, world)


if __name__ == "__main__":
    common.run_script(main)
