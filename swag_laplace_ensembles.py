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
  python swag_laplace_ensembles.py --eval      # the tables again, from what is kept
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      swag_laplace_ensembles.py --dataset cifar10 --methods swag --members 1 --seed 3   # a piece

Expected (two CPU cores, shared with other work; LPD in nats; mean +- standard error):
  glyphs, the default, seed 1 (4.5 minutes; figures of OMP_NUM_THREADS=1, 6.6 CPU minutes), accuracy
    and LPD for K = 1 (n = 5): DE 98.84 +- .15 %, -.0406 +- .0045; SWA 98.92, -.0380; SWAG 98.98,
    -.0381; LLLA 98.84, -.0406; LA-NF 98.84, -.0390; for K = 5 (n = 1): DE 99.6 %, -.0325; SWA 99.7,
    -.0301; SWAG 99.7, -.0303; LLLA 99.6, -.0325; LA-NF 99.6, -.0304. LPD minus DE's (1,000
    examples): SWAG +.0025 [.0016, .0033] at K = 1, +.0022 [.0015, .0027] at K = 5.
    With two threads one member trains worse: LPD of DE -.078 +- .030 and -.062, SWAG -.072, -.058.
  --methods ivon --members 3 (n = 3): glyphs 98.77 +- .49 %, -.043 +- .014; --dataset reviews (with
    --samples 4) 84.2 +- 1.4 %, -.247 +- .014; --dataset clusters MAE 120.0 +- .6 meV, +.55 +- .02.
  cifar10, sst2 and qm9, small (options in the README), LPD minus DE's for K = 1 and the largest K:
    LA-NF +.0069 [.0036, .0102] and -.0010 [-.0050, .0024] (cifar10, K = 3), LLLA +.0027 [.0019,
    .0036] and -.0007 [-.0019, .0003] (sst2, K = 3), +.0017 [.0004, .0034] and +.0001 [-.0012,
    .0021] (qm9, K = 2): points catch up. SWAG +.136, +.124; -.044, -.030; +.019, +.018: not so.
  cifar10, cifar100, sst2, qm9 at the paper's size: not measured.

Differs from the published code:
  - SWAG's vector holds what is trained; there it also held FRN's frozen epsilon, which sampling
    then moved by 70 times its size; here epsilon is a constant. Batch norm's statistics, where a
    network has them, are recomputed for every sample; there they were not.
  - One set of draws of a member serves every ensemble: the n-th draw of a member is its n-th
    sample. There each ensemble drew anew. What is kept of SWAG, MC dropout and IVON is the mixture
    of a member's first n draws, for each n that an ensemble needs, in float16 log-probabilities.
  - The 21 precisions of LLLA share one eigendecomposition and one set of samples (there fresh
    ones), and its covariance a symmetric root (there Cholesky's). The 15 of LA-NF are fitted at
    once, with the same base samples and batches.
  - LA-NF's sample s is one network for all of the test set; there, one for each batch.
  - IVON's cosine ends at 0 with the last step, and moves by step; there five epochs later and by
    epoch, so that a run of eight epochs ends at 31 % of the peak rate. The published clip_radius
    and betas are options. On two cores it needs a cold posterior: see IVON below.
  - --samples 1 is one draw; there IVON's mean, and MC dropout's network without dropout.
  - No early stopping: with the published settings it could end WRN-28-10 alone, after 100 epochs
    without a better validation loss. The best epoch's weights are kept, as there.
  - Metrics. FPR at 95 % and AUPR (in) take data of the training set's kind as the positive ones
    (there the others; the former was interpolated); average precision is by steps (there
    trapezoids: up to .004 apart). Bins of ECE and MCE are closed on the right (there on the left).
    cv has the unbiased standard deviation of the spreads (there divided by N); marpd is a fraction
    (there percent). Molecules have no `loss` (there a squared error). Equal ensembles count once.
  - SST-2's word pieces are made from its training sentences, unless --vocab gives those of
    bert-base-uncased (there); where GLUE withholds the labels of test.tsv, dev.tsv is tested on.
  - Random numbers depend on (seed, step) or (seed, sample) alone, not on what was drawn before.
  - Everything resumes and selects from local files; there, through a server.
  - Not here: SGD's iterates as samples, planar flows, LLLA's precision by marginal likelihood, a
    share of squared error in MAP's loss; Yahoo finance and Alchemy; mean confidence on OOD sets.
As published: validation data choose the MAP checkpoint, learning rates, and precisions alike.
"""

import argparse
import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import shutil
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

METHODS = {"map": "DE", "swa": "SWA", "swag": "SWAG", "mcdo": "MC dropout", "ivon": "IVON",
           "llla": "LLLA", "la_nf": "LA-NF"}
SWAG_LRS = [0.1, 0.05, 0.04, 0.03, 0.02, 0.01, *(i / 1000 for i in range(9, 0, -1)),
            *(i / 10000 for i in range(9, 4, -1)), 0.0001]
MOLECULE_LRS = [1e-6, *(i * 1e-7 for i in range(5, 0, -1)), *(i * 1e-8 for i in range(9, 0, -1)),
                *(i * 1e-9 for i in range(9, 0, -1)), *(i * 1e-10 for i in range(9, 4, -1)), 1e-10]
# IVON in short runs: a small h, so that most steps are clipped, as a sign method's are; and an
# effective sample size 170 (reviews) to 1000 (glyphs) times that of the data: a cold posterior, of
# temperature 1e-3 to 6e-3. Ten times warmer, glyphs lose five points of accuracy (one seed).
IVON = dict(ivon_lr=98.0, ivon_hess_init=0.01, ivon_ess=1e6, ivon_betas=[0.9, 0.999])
PRESETS = {
    # paper: 30 members of seeds 1-30, 30 ensembles of each K, 200 samples in total; published
    # settings throughout
    "": dict(model="wrn_16_4", depth=None, width=1.0, norm="frn", dropout=0.0, epochs=100,
             batch_size=128, lr=0.1, weight_decay=5e-4, opt="sgd", augment=False, y_var=4e-4,
             members=30, ensembles=[1, 2, 5, 10, 20], combinations=30, samples=200,
             val_samples=100, num_val=2000, methods=["map", "swa", "swag", "llla", "la_nf"],
             swag_epochs=100, swag_lrs=SWAG_LRS, swag_weight_decay=None, structure="full",
             flow_layers=10, flow_epochs=20, dropouts=[0.05, 0.1, 0.2], ivon_epochs=200,
             ivon_lr=0.2, ivon_hess_init=0.5, ivon_betas=[0.9, 0.99999], ivon_ess=None,
             ivon_clip=None, target="u0", eval_batch_size=2048, limit_train=None, limit_test=None,
             ood=[]),
    "cifar10": dict(ood=["svhn+cifar100"], augment=True),
    "cifar100": dict(ood=["svhn+cifar10"], augment=True),
    "sst2": dict(model="bert_256_4", dropout=0.5, batch_size=64, lr=5e-3, weight_decay=3e-3),
    "qm9": dict(model="painn", batch_size=100, lr=5e-4, weight_decay=0.01, opt="adamw", epochs=650,
                swag_lrs=MOLECULE_LRS),
    "mnist": dict(ood=["fashion_mnist"]),
    "fashion_mnist": dict(ood=["mnist"]),
    "glyphs": dict(depth=10, width=0.25, epochs=40, batch_size=32, weight_decay=1e-4, members=5,
                   ensembles=[1, 5], combinations=5, samples=20, val_samples=10, num_val=500,
                   limit_train=1000, swag_epochs=8, swag_lrs=[0.03, 0.01], dropouts=[0.1],
                   ivon_epochs=20, ivon_clip=5e-3, flow_epochs=5, ood=["glyphs_letters"],
                   limit_test=1000, eval_batch_size=100, **IVON),
    "reviews": dict(model="bert_256_4", depth=2, width=0.25, dropout=0.1, epochs=8, batch_size=64,
                    lr=2e-3, weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3],
                    combinations=3, samples=20, val_samples=20, methods=list(METHODS),
                    swag_epochs=8, swag_lrs=[0.03, 0.01], swag_weight_decay=1e-4, dropouts=[0.1],
                    ivon_epochs=12, ivon_clip=5e-4, flow_epochs=5, ood=["reviews_finance"],
                    eval_batch_size=100, **IVON),
    "clusters": dict(model="painn", width=0.25, epochs=24, batch_size=50, lr=2e-3,
                     weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3], combinations=3,
                     samples=30, val_samples=30, methods=list(METHODS), limit_train=2500,
                     swag_epochs=6, swag_lrs=[1e-6, 3e-7], dropouts=[0.01], ivon_epochs=24,
                     ivon_clip=2e-3, flow_epochs=5, ood=["clusters_large"], eval_batch_size=100,
                     **IVON),
}
# Published: WRN-28-10 has settings of its own.
LARGE = dict(epochs=200, swag_epochs=25, structure="diag", eval_batch_size=256)
NETWORKS = {"sst2": "bert_256_4", "reviews": "bert_256_4", "qm9": "painn", "clusters": "painn"}
above_0 = at_least(1e-12, float)


def precision(*words):
    """An argparse type: one of the words, or a number above 0."""
    return lambda text: text if text in words else above_0(text)


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, default="glyphs")
    add = parser.group("data")
    add("--num-val", type=at_least(1), help="validation images (published: 2000)")
    add("--limit-train", type=at_least(1), metavar="N", help="train on N examples, evenly spaced")
    add("--target", help="of qm9: a name of its 19 targets (paper: u0)")
    add("--vocab", metavar="FILE", help="of sst2: a WordPiece vocabulary, one a line (paper: that "
        "of bert-base-uncased); default: built from the training sentences")
    add = parser.group("network")
    add("--model", choices=["wrn_16_4", "wrn_28_10", "bert_256_4", "painn"], help="paper: all four")
    add("--depth", type=at_least(1), help="of a wide ResNet: 6 n + 4; layers of BERT, of PaiNN")
    add("--norm", choices=["frn", "bn"], help="of a wide ResNet (paper: frn)")
    add = parser.group("training")
    add("--dropout", type=between(0, 0.99), help="of MAP's network (published: 0, BERT .5)")
    add("--opt", choices=["sgd", "adamw"], help="of MAP: SGD with Nesterov momentum .9, or AdamW")
    add("--weight-decay", type=at_least(0, float), help="on everything that is trained")
    add("--augment", action=argparse.BooleanOptionalAction, help="MAP, IVON (published: CIFAR)")
    add("--y-var", type=above_0, help="of molecules: scales MAP's loss (published: 4e-4)")
    add = parser.group("SWAG iterates")
    add("--swag-epochs", type=at_least(2), help="R: epochs of SGD, iterates, rank (published: 100)")
    add("--swag-weight-decay", type=at_least(0, float), help="default: --weight-decay")
    add = parser.group("SWAG")
    add("--swag-lrs", nargs="+", type=above_0, metavar="LR", help="constant; validation chooses")
    add("--swag-scale", type=at_least(0, float), default=1.0, help="multiplies the covariance")
    add("--swag-covariance", choices=["both", "diagonal", "low_rank"], default="both", help="half "
        "of each (paper), or all of one")
    add = parser.group("Laplace")
    add("--structure", choices=["full", "diag"], help="of the Gauss-Newton matrix (paper: full, "
        "diag for wrn_28_10); molecules: full Hessian")
    add("--prior-precision", type=precision("grid"), default="grid", help="of LLLA: grid (21 "
        "values, validation chooses; paper), or a number")
    add = parser.group("flow")
    add("--flow-layers", type=at_least(1), help="T radial layers (paper: 1, 5, 10, 30; table 10)")
    add("--flow-epochs", type=at_least(0), help="over the cached features (published: 20)")
    add("--flow-precision", type=precision("grid", "llla"), default="grid", help="prior precision "
        "of LA-NF: grid (15 values, validation; published), llla (LLLA's), or a number")
    add = parser.group("MC dropout")
    add("--dropouts", nargs="+", type=between(1e-6, 0.99), metavar="P", help="validation chooses")
    add = parser.group("IVON")
    add("--ivon-epochs", type=at_least(0), help="published: 200")
    add("--ivon-lr", type=at_least(0, float), help="times hess_init + weight_decay (published: .2)")
    add("--ivon-hess-init", type=above_0, help="h at the start (published: .5)")
    add("--ivon-betas", type=between(0, 0.999999), nargs=2, help="of g, h (published: .9 .99999)")
    add("--ivon-weight-decay", type=above_0, default=2e-4, help="published: 2e-4")
    add("--ivon-ess", type=above_0, help="effective sample size (published: the training set's)")
    add("--ivon-clip", type=at_least(0, float), help="of (g + wd m) / (h + wd) (published: none)")
    add = parser.group("selection")
    add("--val-samples", type=at_least(1), help="by which validation chooses (published: 100)")
    add = parser.group("evaluation")
    add("--methods", nargs="+", choices=METHODS, help="what is made, with what it is made from")
    add("--members", type=at_least(1), help="M networks, of seeds SEED, SEED + 1, ... (paper: 30)")
    add("--ensembles", nargs="+", type=at_least(1), metavar="K", help="sizes (paper: 1 2 5 10 20)")
    add("--combinations", type=at_least(1), help="ensembles of each size (paper: 30)")
    add("--samples", type=at_least(1), help="S, posterior samples in all, whatever K (paper: 200)")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets; a+b: both as one")
    add("--shift", choices=["none", "computed", "published"], default="none", help="also the "
        "corrupted test set, all kinds of a severity pooled: computed, or the CIFAR-C files")
    add("--limit-test", type=at_least(1), metavar="N", help="test on N examples of each set")
    add("--eval-batch-size", type=at_least(1), help="published: 2048, 256 for wrn_28_10")
    model = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    model.add_argument("--model", nargs="?")
    large = model.parse_known_args(argv)[0].model == "wrn_28_10"
    return check_args(parser, parser.parse(argv, **(LARGE if large else {})))


def check_args(parser, args):
    """What the network, the data and the sizes of ensembles must have in common."""
    fit = NETWORKS.get(args.dataset, "wrn_16_4")
    if args.model[:3] != fit[:3]:
        parser.error(f"--model {args.model} is not for {args.dataset}; use {fit}")
    images = fit == "wrn_16_4"
    if args.depth and images and (args.depth < 10 or (args.depth - 4) % 6):
        parser.error(f"--depth {args.depth}: a wide ResNet has 6 n + 4 layers: 10, 16, 22, 28")
    if "ensembles" not in args.explicit:
        args.ensembles = [k for k in args.ensembles if k <= args.members]
    args.ensembles, args.methods = sorted({*args.ensembles}), list(dict.fromkeys(args.methods))
    if args.ensembles[-1] > args.members:
        parser.error(f"--ensembles {args.ensembles[-1]} is more than --members {args.members}")
    if args.ensembles[-1] > args.samples:
        parser.error(f"--samples {args.samples} is less than one a member for --ensembles "
                     f"{args.ensembles[-1]}")
    shifts = ["none"] + ["computed"] * images + ["published"] * (args.dataset == "cifar10")
    if args.shift not in shifts:
        parser.error(f"--shift {args.shift} is not for {args.dataset}; use {' or '.join(shifts)}")
    if args.model == "painn" and args.device.type == "mps":
        parser.error("--device mps has no float64, which molecules need; use --device cpu")
    if args.model == "painn" and args.structure != "full":
        parser.error(f"--structure {args.structure} is for classes; molecules take full")
    if args.target != "u0" and args.dataset != "qm9":
        parser.error(f"--target {args.target} is for qm9; {args.dataset} has one target")
    if args.vocab and args.dataset != "sst2":
        parser.error(f"--vocab is for sst2; {args.dataset} has its own")
    if args.swag_weight_decay is None:
        args.swag_weight_decay = args.weight_decay
    return args


# ---- Model --------------------------------------------------------------------------------------
# net(inputs) is (outputs, features): logits [B, C] and what the last layer, net.head, sees [B, D];
# of molecules (mean, variance) [B, 2] and the features of their atoms [A, D].


def widen(t):
    """bf16 as float32; float32 and float64 as they are."""
    return t.float() if t.dtype == torch.bfloat16 else t


class Network(nn.Module):
    """A feature extractor and a linear head, which is in float32 even under autocast."""

    def __init__(self, extractor, head):
        super().__init__()
        self.extractor, self.head = extractor, head

    def forward(self, inputs):
        features = widen(self.extractor(inputs))
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features), features


class FRN(nn.Module):
    """Filter response normalisation and its thresholded unit (Singh & Krishnan 2020), no batch:
    max(gamma x / sqrt(mean_HW x^2 + 1e-6) + beta, tau)."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))
        self.beta, self.tau = (nn.Parameter(torch.zeros(channels, 1, 1)) for _ in range(2))

    def forward(self, x):
        scale = self.gamma * (widen(x).square().mean((2, 3), keepdim=True) + 1e-6).rsqrt()
        # a relu between two shifts: its backward pass reads memory half as often as maximum's
        shifted = x * scale.to(x.dtype) + (self.beta - self.tau).to(x.dtype)
        return F.relu(shifted) + self.tau.to(x.dtype)


def norm_unit(channels, norm):
    return FRN(channels) if norm == "frn" else nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


class WideBlock(nn.Module):
    """Pre-activation block. Where channels change, the shortcut convolution sees norm1(x) too."""

    def __init__(self, c_in, c, stride, norm, dropout):
        super().__init__()
        conv = lambda c_in, kernel, stride=1: nn.Conv2d(c_in, c, kernel, stride, kernel // 2,
                                                        bias=False)
        self.norm = norm_unit(c_in, norm)
        self.body = nn.Sequential(conv(c_in, 3, stride), norm_unit(c, norm), nn.Dropout(dropout),
                                  conv(c, 3))
        # subsampled, then 1x1: on CPUs PyTorch 2.14's strided 1x1, channels last, writes out of
        # bounds in the backward pass
        self.shortcut = None if c_in == c and stride == 1 else nn.Sequential(
            nn.AvgPool2d(1, stride), conv(c_in, 1))

    def forward(self, x):
        h = self.norm(x)
        return self.body(h) + (x if self.shortcut is None else self.shortcut(h))


def wide_resnet(num_classes, channels, depth, widening, norm, width=1.0, dropout=0.0):
    """WRN-depth-widening: (depth - 4) / 6 blocks in each of three stages, strides 1, 2, 2."""
    c_in = max(4, round(16 * width))
    layers = [nn.Conv2d(channels, c_in, 3, 1, 1, bias=False)]
    for stage in range(3):
        c = max(4, round(16 * widening * width * 2**stage))
        for i in range((depth - 4) // 6):
            layers.append(WideBlock(c_in, c, 2 if stage and not i else 1, norm, dropout))
            c_in = c
    layers += [norm_unit(c_in, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(c_in, num_classes))


class Bert(nn.Module):
    """BERT (Devlin et al. 2019) with a pooler, from random weights; tokens [B, L], padding is 0.

    paper: 256 wide, 4 layers, 8 heads, 2048 hidden, 512 positions, dropout .5 in training.
    """

    def __init__(self, vocabulary, dim, layers, dropout):
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.positions, self.types = nn.Embedding(512, dim), nn.Embedding(2, dim)
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(
            dim, 8, 8 * dim, dropout, "gelu", 1e-12, batch_first=True) for _ in range(layers))
        for layer in self.layers:
            layer.dropout.p = 0.0  # within the feed-forward net BERT has none
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, tokens):
        n = len(tokens)
        if not n:  # a process's part of a short batch; attention refuses it
            tokens = F.pad(tokens, (0, 0, 0, 1), value=1)
        padding = tokens == 0
        x = self.words(tokens) + self.types.weight[0] + self.positions.weight[:tokens.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.pooler(x[:n, 0])


def bert(num_classes, vocabulary, dim, layers, dropout):
    net = Network(Bert(vocabulary, dim, layers, dropout), nn.Linear(dim, num_classes))
    for name, p in net.named_parameters():  # paper: N(0, .02); layer norms keep 1 and 0
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    nn.init.zeros_(net.extractor.words.weight[:1])
    return net


class PaiNNLayer(nn.Module):
    """A message and an update (Schuett et al. 2021, eqs. 7-9) of s [A, F] and v [A, 3, F].

    rbf [E, radial + 1]: the radial functions and a 1, for the bias, times the cutoff function.
    """

    def __init__(self, f, radial, dropout):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(f, f), nn.SiLU(), nn.Linear(f, 3 * f))
        self.filter = nn.Linear(radial, 3 * f)
        self.u, self.v = (nn.Linear(f, f, bias=False) for _ in range(2))
        self.update = nn.Sequential(nn.Linear(2 * f, f), nn.SiLU(), nn.Linear(f, 3 * f))
        self.dropout = nn.Dropout(dropout)

    def forward(self, s, v, edges, rbf, direction):
        sources, targets = edges
        weight = torch.cat([self.filter.weight, self.filter.bias[:, None]], 1)
        weight = self.dropout(F.linear(rbf, weight))
        vv, ss, vs = (self.message(s).index_select(0, sources) * weight).chunk(3, -1)
        s = s + sum_by(targets, ss, len(s))
        message = torch.addcmul(direction[:, :, None] * vs[:, None], v.index_select(0, sources),
                                vv[:, None])
        v = v + sum_by(targets, message, len(s))
        uv, vv = self.dropout(self.u(v)), self.dropout(self.v(v))
        # |Vv|: safe where it is zero, as at a lone atom
        length = (vv.square().sum(1) + 1e-30).sqrt()
        a_vv, a_sv, a_ss = self.update(torch.cat([length, s], -1)).chunk(3, -1)
        return s + a_ss + a_sv * (uv * vv).sum(1), v + uv * a_vv[:, None]


class PaiNN(nn.Module):
    """PaiNN with a Gaussian for each atom: mean sum_i (m_i std + mean + ref_i), variance
    sum_i (softplus(raw_i) + 1e-8)^2 std^2. `statistics`: (mean, std) an atom; `references` [101].
    """

    def __init__(self, statistics, references, f=128, layers=3, dropout=0.0, radial=20, cutoff=5.0):
        super().__init__()
        self.embedding = nn.Embedding(101, f, padding_idx=0)
        self.layers = nn.ModuleList(PaiNNLayer(f, radial, dropout) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(f, f // 2), nn.SiLU(), nn.Dropout(dropout))
        self.head, self.cutoff, self.radial = nn.Linear(f // 2, 2), cutoff, radial
        self.register_buffer("statistics", torch.tensor(statistics, dtype=torch.float64))
        self.register_buffer("references", references.double())

    def forward(self, molecules):
        r, edges = molecules.positions, (molecules.sources, molecules.targets)
        apart = r[edges[0]] - r[edges[1]]
        distance = apart.norm(dim=1, keepdim=True)
        n = torch.arange(1, self.radial + 1, dtype=r.dtype, device=r.device)
        rbf = (n * (math.pi / self.cutoff) * distance).sin() / distance
        cut = 0.5 * ((math.pi / self.cutoff * distance).cos() + 1) * (distance < self.cutoff)
        rbf = torch.cat([rbf, torch.ones_like(cut)], 1) * cut
        s = self.embedding(molecules.numbers)
        v = s.new_zeros(len(s), 3, s.shape[1])
        for layer in self.layers:
            s, v = layer(s, v, edges, rbf, apart / distance)
        features = widen(self.readout(s))
        with torch.autocast(features.device.type, enabled=False):
            known = self.statistics[0] + self.references[molecules.numbers]
            offset = sum_by(molecules.molecule, known, molecules.count)
            last = LastLayer(features, None, molecules.molecule, offset, self.statistics[1])
            return head_outputs(flat_head(self.head)[None], last)[0], features


def energy_statistics(molecules):
    """(mean, unbiased std) over molecules of (label - sum of references) / atoms, in eV."""
    sizes = molecules.sizes
    index = torch.arange(len(sizes)).repeat_interleave(sizes)
    own = molecules.labels - sum_by(index, molecules.references[molecules.numbers], len(sizes))
    std, mean = torch.std_mean(own / sizes)
    if not std > 0:
        raise UserError(f"{molecules.name}: all training molecules have the same target an atom; "
                        "there is nothing to learn, choose another --target")
    return mean.item(), std.item()


def make_network(args, train_set, dropout=0.0):
    """The network of --model for a training set, from random weights, on its device."""
    if args.model == "bert_256_4":
        net = bert(train_set.num_classes, len(train_set.vocab), 8 * max(1, round(32 * args.width)),
                   args.depth or 4, dropout)
    elif args.model == "painn":
        net = PaiNN(energy_statistics(train_set), train_set.references,
                    2 * max(1, round(64 * args.width)), args.depth or 3, dropout)
    else:
        depth, widening = {"wrn_16_4": (16, 4), "wrn_28_10": (28, 10)}[args.model]
        net = wide_resnet(train_set.num_classes, train_set.shape[0], args.depth or depth, widening,
                          args.norm, args.width, dropout)
    return net.to(args.device, memory_format=torch.channels_last)


# ---- Method -------------------------------------------------------------------------------------
# theta [P] of a last layer: the weight [C, D] row by row, then the bias [C] (molecules: C = 2, mean
# and spread). outputs [S, N, C]: log-probabilities; of molecules (mean, variance), [S, N, 2].


def swag_moments(iterates, floor=1e-8) -> tuple[Tensor, Tensor, Tensor]:
    """SWAG's (mean [P], variance d [P], deviations D [R, P]) of R iterates [R, P].

    d = max(mean of squared deviations, floor); deviations are from the final mean (the paper's; the
    original SWAG's are from running means). `iterates` is overwritten by D. R < 2: ValueError.
    """
    if len(iterates) < 2:
        raise ValueError(f"SWAG needs at least 2 iterates, got {len(iterates)}")
    mean = iterates.mean(0, dtype=torch.float64).to(iterates.dtype)
    deviations = iterates.sub_(mean)
    variance = torch.zeros_like(mean)
    for row in deviations:  # one row at a time: no second [R, P]
        variance.addcmul_(row, row, value=1 / len(deviations))
    return mean, variance.clamp_min_(floor), deviations


def swag_samples(mean, variance, deviations, diagonal_noise, low_rank_noise, scale=1.0) -> Tensor:
    """[S, P]: mean + sqrt(scale / 2) [sqrt(d) z_1 + D^T z_2 / sqrt(R - 1)].

    z_1 [S, P] and z_2 [S, R] standard normal, independent. Their covariance is
    scale (diag(d) / 2 + D^T D / (2 (R - 1))), about that of the iterates. With one of the noises
    None the other's part has all of it: scale diag(d), or scale D^T D / (R - 1).
    """
    terms = []
    if diagonal_noise is not None:
        terms.append(diagonal_noise.to(mean) * variance.sqrt())
    if low_rank_noise is not None:
        terms.append(low_rank_noise.to(mean) @ deviations / math.sqrt(len(deviations) - 1))
    return mean + math.sqrt(scale / len(terms)) * sum(terms)


def ivon_deviation(hessian, noise, ess, weight_decay) -> Tensor:
    """theta - m of a draw from IVON's N(m, 1 / (ess (h + weight_decay))), noise standard normal."""
    return noise * (ess * (hessian + weight_decay)).rsqrt()


def ivon_update(mean, momentum, hessian, grad, deviation, step, lr, ess, weight_decay, hess_init,
                betas=(0.9, 0.99999), clip=math.inf):
    """One step of IVON (Shen et al. 2024, algorithm 1), in place; all [P], step counts from 1.

    grad is at mean + deviation. h follows ess (h + wd) deviation grad, Price's estimate of the
    Hessian, with the correction that keeps h + wd positive. No weight moves by more than
    lr (hess_init + wd) clip.
    """
    b1, b2 = betas
    estimate = ess * (hessian + weight_decay) * deviation * grad
    change = (1 - b2) * (estimate - hessian)
    hessian.add_(change + change.square() / (2 * (hessian + weight_decay)))
    momentum.lerp_(grad, 1 - b1)
    direction = (momentum / (1 - b1**step) + weight_decay * mean) / (hessian + weight_decay)
    mean.sub_(lr * (hess_init + weight_decay) * direction.clamp_(-clip, clip))


class LastLayer(NamedTuple):
    """What the last layer sees, computed once: features x [N, D] of examples; of molecules [A, D]
    of atoms, with `molecule` [A], the sum `offset` [N] of what is known, and the scale in eV."""

    x: Tensor
    labels: Tensor | None
    molecule: Tensor | None = None
    offset: Tensor | None = None
    scale: Tensor | None = None


def sum_by(index, values, count) -> Tensor:
    """[count, ...]: the sums of the rows of `values` that have equal `index`."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


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


def data_loss(outputs, labels, y_var=1.0) -> Tensor:
    """Sum over examples: cross entropy; of molecules y_var [log v + (y - m)^2 / v] / 2."""
    if not labels.is_floating_point():
        return F.cross_entropy(outputs, labels, reduction="sum")
    mean, variance = outputs.unbind(-1)
    return y_var * 0.5 * (variance.log() + (labels - mean).square() / variance).sum()


def with_ones(x):
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def as_layout(rows) -> Tensor:
    """[C, D + 1, ...], the bias last in each class, as [P, ...] in the order of theta."""
    return torch.cat([rows[:, :-1].flatten(0, 1), rows[:, -1]])


def ggn_blocks(x, probs, block=2048, stripe=64) -> Tensor:
    """H = sum_n J_n^T (diag p_n - p_n p_n^T) J_n of logits W x + b, a SUM: [C, D + 1, C, D + 1],
    float64.

    No Jacobian is formed: the blocks of classes a < k are Gram matrices -sum_n p_a p_k x~ x~^T,
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
    """H = Q diag(values) Q^T: then every precision H + delta I is a shift of the values."""

    values: Tensor       # [P]
    basis: Tensor | None  # Q [P, P]; None for the identity


def decompose(structure, last, theta) -> Spectrum:
    """The spectrum of the curvature of the loss at theta [P]: "full" (in float64) or "diag".

    Of molecules the exact Hessian, whose values may be negative. Of classes: what shifts all alike
    is known to have the value 0, and is taken out first: by rounding it would have another one, and
    there the posterior is widest.
    """
    if last.offset is not None:
        wide = last._replace(x=last.x.double())
        return Spectrum(*torch.linalg.eigh(heteroscedastic_hessian(theta.double(), wide)))
    probs = head_outputs(theta[None], last)[0].exp()
    if structure == "diag":
        spread = probs * (1 - probs)
        return Spectrum(torch.cat([(spread.T @ last.x.square()).flatten(), spread.sum(0)]), None)
    blocks = ggn_blocks(last.x, probs)
    c, d1 = blocks.shape[:2]
    eye = torch.eye(c, dtype=blocks.dtype, device=blocks.device)
    contrasts = torch.linalg.qr(torch.cat([torch.ones_like(eye[:, :1]), eye[:, 1:]], 1)).Q
    mean, rest = contrasts[:, :1], contrasts[:, 1:]
    reduced = torch.einsum("ca,cidj,db->aibj", rest, blocks, rest).reshape([(c - 1) * d1] * 2)
    values, vectors = torch.linalg.eigh(reduced)
    vectors = torch.einsum("ca,aim->cim", rest, vectors.view(c - 1, d1, len(vectors)))
    null = mean[:, :, None] * torch.eye(d1).to(mean)
    basis = as_layout(torch.cat([vectors, null], 2)).to(last.x)
    return Spectrum(torch.cat([values.clamp_min(0), values.new_zeros(d1)]), basis)


def laplace_samples(theta, spectrum, delta, noise) -> Tensor:
    """[..., S, P] from N(theta, (H + delta I)^-1), noise [S, P] standard normal, by the symmetric
    root Q (values + delta)^-1/2 Q^T: whatever signs the eigenvectors have.

    delta is a number, or [G, 1, 1]. NaN where H + delta I is not positive definite (molecules).
    """
    scale = (spectrum.values + delta).to(noise)
    root = torch.where(scale > 0, scale, torch.nan).rsqrt()
    if spectrum.basis is None:
        return theta + noise * root
    basis = spectrum.basis.to(noise)
    return theta + (noise @ basis * root) @ basis.T


# Published grids: 10^-4 ... 10^4 in steps of 10^0.4; LA-NF's 15.
LAPLACE_GRID = tuple(10 ** (-4 + 0.4 * i) for i in range(21))
FLOW_GRID = (1, 5, 10, 20, 30, 40, 50, 70, 90, 100, 125, 150, 175, 200, 500)


def precision_scores(theta, spectrum, last, noise, grid=LAPLACE_GRID) -> list[float]:
    """Validation LPD of each delta, NaN where a delta has no posterior; one noise for all."""
    deltas = torch.tensor(grid, dtype=torch.float64, device=theta.device)[:, None, None]
    return [log_predictive_density(head_outputs(samples, last), last.labels)
            for samples in laplace_samples(theta, spectrum, deltas, noise)]


def apply_flow(flow, theta) -> tuple[Tensor, Tensor]:
    """(theta_T [..., P], sum of log |det dy/dx| [...]) of T radial layers y = x + beta h (x - x0).

    flow = centres x0 [..., T, P], a and b [..., T]; h = 1 / (alpha + |x - x0|) with
    alpha = softplus(a), beta = softplus(b) - alpha > -alpha: invertible.
    """
    centres, a, b = flow
    alphas, log_det = F.softplus(a), 0.0
    for centre, alpha, beta in zip(centres.unbind(-2), alphas.unbind(-1),
                                   (F.softplus(b) - alphas).unbind(-1)):
        offset = theta - centre
        r = offset.norm(dim=-1)
        h = 1 / (alpha + r)
        log_det = log_det + ((theta.shape[-1] - 1) * torch.log1p(beta * h)
                             + torch.log1p(beta * h - beta * h.square() * r))
        theta = theta + (beta * h)[..., None] * offset
    return theta, log_det


def negative_elbo(flow, theta, spectrum, base_delta, precision, noise, last, n) -> Tensor:
    """-ELBO [G] in nats, of G flows at once: log q(t) - log N(t; 0, I / precision)
    - (N / B) sum_b log p(y_b | t), t one draw of each: theta + root noise through the flow.

    flow's tensors [G, T, ...]; precision [G]; noise [1, P] for all or [G, P]; `last` has the B
    examples of the batch; n is N.
    """
    base = laplace_samples(theta, spectrum, base_delta, noise)
    t, log_det = apply_flow(flow, base)
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


def draws_by_member(k, samples, seed) -> dict:
    """{S': how many of the first S' draws each of k members gives, [k]}, at the published S' < S
    and at S. The n-th draw of a member is its n-th sample."""
    order = stratified_order(k, samples, seed)
    sizes = [n for n in SUBSAMPLES if n < samples] + [samples]
    return {n: order[:n].bincount(minlength=k).tolist() for n in sizes}


class Mixture(NamedTuple):
    """The first n samples of a member as one prediction: log of the mean probability [..., N, C]
    and the mean entropy of a sample [..., N], nats."""

    log_probs: Tensor
    entropy: Tensor


def running_mixtures(rows, sizes) -> Mixture:
    """Mixtures [len(sizes), N, C] of the first n rows, for n in sizes (ascending), of an iterable
    of log-probabilities [N, C]: in one pass, in float64."""
    found, log_sum, entropy = [], None, 0.0
    for count, row in enumerate(rows, 1):
        row = row.double()
        log_sum = row if log_sum is None else torch.logaddexp(log_sum, row)
        entropy = entropy + torch.special.entr(row.exp()).sum(-1)
        if count in sizes:
            found.append(Mixture(log_sum - math.log(count), entropy / count))
    return Mixture(*(torch.stack(parts) for parts in zip(*found)))


def ensemble_mixture(members, counts) -> Mixture:
    """What all samples of an ensemble together predict, of so many from each member, given
    {n: mixture [N, C] of its first n samples} of each."""
    kept, total = [(own[n], n) for own, n in zip(members, counts) if n], sum(counts)
    log_probs = [m.log_probs.double() + (math.log(n) - math.log(total)) for m, n in kept]
    entropy = sum(m.entropy.double() * n for m, n in kept) / total
    return Mixture(torch.stack(log_probs).logsumexp(0), entropy)


# ---- Training -----------------------------------------------------------------------------------


class Study(NamedTuple):
    """What every step needs. args.seed is the seed of the member at hand."""

    args: argparse.Namespace
    sets: dict    # "train", "val", those evaluated, by name, and "predicted" (--predict)
    tested: list  # names: the test set, then its shifted versions
    ood: list     # names
    run: common.Run
    costs: dict   # {method: {"train_s", "predict_s", "memory_mb": numbers of members and sets}}


class Diverged(UserError):
    """A loss or a weight is no longer finite."""


def make_loader(dataset, args, batch_size, shuffle=False, augment=False):
    """Batches of this process, on its device. batch[0] is what a network takes."""
    options = dict(seed=args.seed, shuffle=shuffle)
    if isinstance(dataset, (data.TextSet, data.MoleculeSet)):
        return data.SequenceLoader(dataset, batch_size, args.device, **options)
    return data.Loader(dataset, batch_size, args.device, **options, channels_last=True,
                       augment="crop_flip" if augment else "none", workers=args.workers)


def autocast(args):
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def seeded_noise(shape, device, *key) -> Tensor:
    """Standard normal numbers, drawn on the device, a function of the key (and of its kind)."""
    generator = torch.Generator(device).manual_seed(common.derive_seed(*key))
    return torch.randn(*shape, generator=generator, device=device)


def get_vector(net) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@torch.no_grad()
def set_vector(net, vector):
    parameters = list(net.parameters())
    for p, part in zip(parameters, vector.split([p.numel() for p in parameters])):
        p.copy_(part.view_as(p))


class Ivon:
    """IVON's state as an optimiser: the network holds a sample during a step, the mean after it."""

    def __init__(self, net, args, n):
        self.net, self.args, self.param_groups = net, args, [{"lr": args.ivon_lr}]
        self.scale = args.ivon_ess or n, args.ivon_weight_decay
        self.steps, mean = 0, get_vector(net)
        self.state = torch.stack([mean, 0 * mean, torch.full_like(mean, args.ivon_hess_init)])
        self.mean, self.momentum, self.hessian = self.state

    def deviation(self, *key) -> Tensor:
        """theta - mean of a draw; a function of (seed, key) alone, the same in all processes."""
        noise = seeded_noise(self.mean.shape, self.mean.device, self.args.seed, *key)
        return ivon_deviation(self.hessian, noise.to(self.mean), *self.scale)

    def perturb(self):
        self.steps += 1
        self.drawn = self.deviation(3, self.steps)
        set_vector(self.net, self.mean + self.drawn)

    def step(self):
        grad, args = torch.cat([p.grad.flatten() for p in self.net.parameters()]), self.args
        ivon_update(*self.state, grad, self.drawn, self.steps, self.param_groups[0]["lr"],
                    *self.scale, args.ivon_hess_init, args.ivon_betas,
                    math.inf if args.ivon_clip is None else args.ivon_clip)
        set_vector(self.net, self.mean)

    def state_dict(self):
        return {"state": self.state, "steps": self.steps}

    def load_state_dict(self, state):
        self.state.copy_(state["state"])
        self.steps = state["steps"]


def cosine(share):
    """Half a cosine from 1 to 0 as `share` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * share))


def ivon_schedule(epoch, epochs):
    """Linear from .2 in the first epochs, five or a quarter of all; then half a cosine that ends at
    0 with the last step (published code: five epochs later)."""
    warm_up = min(5, epochs // 4)
    if epoch < warm_up:
        return 0.2 + 0.8 * epoch / warm_up
    return cosine((epoch - warm_up) / (epochs - warm_up))


def train(study, net, identity, epochs, optimiser, lr_at, option, y_var=1.0, after=None, **parts):
    """Train a network, from its checkpoint if there is one; returns the seconds of all epochs.

    lr_at(epoch) is the rate of a fractional epoch, set by `option`; after(epoch) is called when an
    epoch is over, and returns what to log.
    """
    args, run, model = study.args, study.run, None
    for epoch in run.epochs(epochs, *identity, net=net, optimiser=optimiser, **parts):
        if model is None:  # of what is finished nothing is built
            loader = make_loader(study.sets["train"], args, args.batch_size, True,
                                 args.augment and option != "swag_lrs")
            steps = min(len(loader), args.limit_steps or len(loader))
            model = common.data_parallel(net, args.device)
            model = torch.compile(model) if args.compile else model
        common.seed_all(args.seed, 2, epoch, common.rank())  # dropout: whatever came before
        model.train()
        total, seen = torch.zeros((), device=args.device), 0
        for step, batch in run.steps(loader, epoch):
            for group in optimiser.param_groups:
                group["lr"] = lr_at(epoch + step / steps)
            if isinstance(optimiser, Ivon):
                optimiser.perturb()
            with autocast(args):
                outputs, _ = model(batch[0])
            loss = data_loss(outputs, batch.labels, y_var)
            net.zero_grad()
            # of the global mean: DDP divides by the number of processes
            (loss * common.world_size() / batch.global_size).backward()
            optimiser.step()
            total += loss.detach()
            seen += batch.global_size
        loss = common.all_reduce(total).item() / seen
        if not (math.isfinite(loss) and common.all_finite(net.state_dict())):
            raise Diverged(f"the loss or a weight of {identity[0]} is not finite in epoch "
                           f"{epoch + 1}; lower --{option.replace('_', '-')}")
        run.log(loss, lr=lr_at(epoch), examples=seen, **(after(epoch) if after else {}))
    return sum(row["seconds"] for row in run.history)


# Pieces: what a member's posteriors are made of. Each is read where it is there, and made and kept
# where it is not.


def on_main(work):
    """work() on the main process, as if there were no other; None on the others."""
    if not common.is_main():
        return None
    with common.alone():
        return work()


def identity(study, kind, *groups, **more) -> tuple[str, dict]:
    """(name, config) of a member's piece: its MAP network's options, those of `groups`, `more`."""
    args = study.args
    own = {k: v for k, v in common.options(args).items() if args.groups.get(k) in groups} | more
    text = json.dumps(common.plain(own), sort_keys=True).encode()
    digest = f"-{hashlib.sha256(text).hexdigest()[:10]}" * bool(own)
    return f"{kind}-seed{args.seed}{digest}", {**study.run.config, "seed": args.seed, **own}


@functools.cache
def contents(dataset) -> str:
    """A digest: what is kept of a set is not another's that has its name."""
    own = next(getattr(dataset, k) for k in ("images", "tokens", "positions", "paths")
               if hasattr(dataset, k))
    own = own.contiguous().numpy() if torch.is_tensor(own) else repr(own).encode()
    return hashlib.sha256(own).hexdigest()[:10]


def piece(study, identity, make, read=True):
    """What make() returns (a dict, on the main process alone): read, or made and kept."""
    name, run = identity[0], study.run
    path = run.dir / f"{name}.pt"
    if common.broadcast(path.exists() and (name in run.written or not study.args.fresh)):
        return on_main(lambda: run.load(*identity)) if read else None
    if study.args.eval:
        raise UserError(f"{path} is not made yet; first start the same command without --eval")
    made = make()
    run.save(*identity, **(made or {}))
    common.broadcast(None)  # until it is there: other processes read it too
    return made


def timed(study, work) -> tuple:
    """(work(), its seconds)"""
    before = study.run.seconds.get("posteriors", 0.0)
    with study.run.clock("posteriors"):
        found = work()
    return found, study.run.seconds["posteriors"] - before


def best(scores, values, option):
    """The value of the largest score, the first on ties; NaN and infinities are never it."""
    finite = [(score, -i) for i, score in enumerate(scores) if math.isfinite(score)]
    if not finite:
        raise UserError(f"no value of {option} gives a finite validation LPD; try others")
    return values[-max(finite)[1]]


class Sampler(NamedTuple):
    """A posterior over all weights: draw(s) gives `net` those of sample s = 0, 1, ..."""

    net: nn.Module
    draw: object = lambda s: None
    dropout: bool = False
    train_s: float = 0.0
    numbers: int = 0  # that a member's predictions need


def map_sampler(study, rate=None) -> Sampler:
    """The network of the epoch of the best validation LPD: MAP's recipe, from the seed, with MAP's
    rate of dropout or another."""
    args = study.args
    own = identity(study, "mcdo", rate=rate) if rate else identity(study, "map")
    common.seed_all(args.seed)
    net = make_network(args, study.sets["train"], rate or args.dropout)
    kept = copy.deepcopy(net)
    kept.register_buffer("val_lpd", torch.tensor(-1e30))
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    optimiser = torch.optim.AdamW(net.parameters(), **options) if args.opt == "adamw" else \
        torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True, **options)

    def after(_):
        lpd = validation_lpd(study, Sampler(net))
        if lpd > kept.val_lpd:  # a NaN is never better
            kept.load_state_dict({**net.state_dict(), "val_lpd": torch.tensor(lpd)})
        return {"val_lpd": lpd}

    seconds = train(study, net, own, args.epochs, optimiser,
                    lambda epoch: args.lr * cosine(int(epoch) / args.epochs), "lr", args.y_var,
                    after, best=kept)
    return Sampler(kept.eval(), train_s=seconds, numbers=len(get_vector(kept)))


def validation_lpd(study, sampler, samples=1) -> float:
    """On all processes."""
    val = study.sets["val"]
    found = predict(sampler, val, study.args, [samples])
    return common.broadcast(on_main(lambda: log_predictive_density(
        found["outputs"].transpose(0, 1) if "outputs" in found else found["log_probs"][None, :, -1],
        val.labels)))


def choose(study, method, option) -> tuple:
    """(the value of an option whose sampler has the best validation LPD, seconds of training all),
    on all processes."""
    args, values = study.args, getattr(study.args, option)

    def make():
        scores, seconds = [], 0.0
        for value in values:
            try:
                sampler = SAMPLERS[method](study, value)
                samples = 1 if method in POINTS else args.val_samples
                scores.append(validation_lpd(study, sampler, samples))
                seconds += sampler.train_s
            except Diverged as error:
                common.say(f"{value:g} is left out: {error}")
                scores.append(math.nan)
        value = best(scores, values, f"--{option.replace('_', '-')}")
        return {"value": value, "scores": scores, "train_s": seconds}

    own = identity(study, f"{method}-choice", *GROUPS[method])
    choice = common.broadcast(piece(study, own, make))
    return choice["value"], choice["train_s"]


def mcdo_sampler(study, rate=None) -> Sampler:
    """Of the network of the best dropout rate, by validation, or of another."""
    rate, total = (rate, None) if rate else choose(study, "mcdo", "dropouts")
    one = map_sampler(study, rate)
    return one._replace(draw=lambda s: common.seed_all(study.args.seed, 12, s, common.rank()),
                        dropout=True, train_s=total or one.train_s)


def ivon_sampler(study) -> Sampler:
    args = study.args
    common.seed_all(args.seed)
    net = make_network(args, study.sets["train"], args.dropout)
    ivon = Ivon(net, args, len(study.sets["train"]))
    seconds = train(study, net, identity(study, "ivon", *GROUPS["ivon"]), args.ivon_epochs, ivon,
                    lambda epoch: args.ivon_lr * ivon_schedule(epoch, args.ivon_epochs), "ivon_lr")

    def draw(s):
        set_vector(net, ivon.mean + ivon.deviation(21, s))
        refresh_batch_norm(net, study)

    return Sampler(net, draw, train_s=seconds, numbers=2 * len(ivon.mean))


def swag_iterates(study, lr) -> tuple[Tensor, float]:
    """([R, P] on the CPU, seconds): weights after each epoch of SGD at a constant rate, from MAP.

    Each is a file, written before the checkpoint that counts it: a run killed anywhere goes on."""
    args, run = study.args, study.run
    name, config = identity(study, f"swag-lr{lr:g}", "SWAG iterates", lr=lr)
    net = map_sampler(study).net
    optimiser = torch.optim.SGD(net.parameters(), lr, momentum=0.9,
                                weight_decay=args.swag_weight_decay)

    def after(epoch):
        run.save(f"{name}-{epoch}", config, weights=get_vector(net).cpu())
        return {}

    seconds = train(study, net, (name, config), args.swag_epochs, optimiser, lambda _: lr,
                    "swag_lrs", after=after)
    rows = [run.load(f"{name}-{epoch}", config) for epoch in range(args.swag_epochs)]
    if None in rows:
        raise UserError(f"{run.dir / name}-{rows.index(None)}.pt is missing; delete {name}.pt to "
                        "make all iterates of this rate anew")
    return torch.stack([row["weights"] for row in rows]), seconds


KEEP_GB = 50  # of a study's iterates; beyond it those of learning rates not chosen are deleted


def prune_iterates(study, chosen):
    args = study.args
    for lr in {*args.swag_lrs} - {*chosen} if common.is_main() and not args.eval else ():
        name, _ = identity(study, f"swag-lr{lr:g}", "SWAG iterates", lr=lr)
        files = list(study.run.dir.glob(f"{name}*.pt"))
        size = sum(file.stat().st_size for file in files) * len(args.swag_lrs)
        for file in files if size * args.members * args.runs > 1e9 * KEEP_GB else ():
            file.unlink()


def swag_sampler(study, lr=None, kind="swag") -> Sampler:
    """Draws in blocks of eight, at the rate that validation chose or another; of SWA the mean."""
    args, total, swag = study.args, None, kind == "swag"
    if lr is None:
        map_sampler(study)  # first: where it diverges no rate is to blame
        chosen = {own: choose(study, own, "swag_lrs") for own in ("swag", "swa")
                  if own in args.methods}
        prune_iterates(study, [own for own, _ in chosen.values()])
        lr, total = chosen[kind]
    rows, seconds = swag_iterates(study, lr)
    posterior = mean, _, deviations = swag_moments(rows.to(compute_device(args)))
    net, drawn = make_network(args, study.sets["train"]), {}

    def draw(s):
        block, row = divmod(s, 8)
        if swag and block not in drawn:
            noise = [seeded_noise((8, n), mean.device, args.seed, key, block)
                     if args.swag_covariance in ("both", part) else None
                     for n, key, part in ((len(mean), 13, "diagonal"),
                                          (len(deviations), 14, "low_rank"))]
            drawn.clear()
            drawn[block] = swag_samples(*posterior, *noise, args.swag_scale)
        set_vector(net, drawn[block][row] if swag else mean)
        refresh_batch_norm(net, study)

    return Sampler(net, draw, False, total or seconds,
                   len(mean) * (len(deviations) * swag + 1 + swag))


def batch_norms(net) -> list:
    return [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@torch.no_grad()
def refresh_batch_norm(net, study):
    """Running statistics of the weights that the network has now: means over the training set."""
    if not batch_norms(net):
        return
    if nn.BatchNorm2d in map(type, net.modules()):  # to have statistics of the global batch
        common.data_parallel(net, study.args.device)
    net.eval()
    for m in batch_norms(net):
        m.reset_running_stats()
        m.train()
    loader = make_loader(study.sets["train"], study.args, study.args.batch_size)
    for i, batch in enumerate(loader.epoch()):
        for m in batch_norms(net):
            m.momentum = 1 / (i + 1)  # equal weights
        with autocast(study.args):
            net(batch[0])
    net.eval()


POINTS, LAST_LAYER = ("map", "swa"), ("llla", "la_nf")
SAMPLERS = {"map": map_sampler, "swa": lambda study, lr=None: swag_sampler(study, lr, "swa"),
            "swag": swag_sampler, "mcdo": mcdo_sampler, "ivon": ivon_sampler}
# Which options shape a posterior, beside those of MAP training. The pieces of all are kept side by
# side in the run directory of their MAP networks.
GROUPS = {"map": (), "mcdo": ("MC dropout", "selection"), "ivon": ("IVON",),
          **dict.fromkeys(("swa", "swag"), ("SWAG iterates", "SWAG", "selection")),
          "llla": ("Laplace", "selection"), "la_nf": ("Laplace", "flow", "selection")}


def compute_device(args):
    """Where float64 is: the device, but on Apple's the CPU."""
    return torch.device("cpu") if args.device.type == "mps" else args.device


def make_features(study, part):
    """Keep what the last layer of the MAP network sees of a set."""
    args, dataset = study.args, study.sets[part]

    def make():
        net, index, parts = map_sampler(study).net, [], []
        for batch in make_loader(dataset, args, args.eval_batch_size).epoch():
            with torch.no_grad(), autocast(args):
                parts.append(net(batch[0])[1])
            index.append(batch.index.cpu())
        index = torch.cat(index)
        if isinstance(dataset, data.MoleculeSet):
            atoms = atoms_of(dataset)
            index = torch.cat([atoms[i] for i in index.tolist()])
        found = common.gather_rows(index, torch.cat(parts))
        return found and {"x": found[0]}

    own = identity(study, "features", part=part, of=contents(dataset))
    piece(study, own, make, read=False)


def atoms_of(dataset) -> tuple:
    """Of each molecule, where its atoms lie, int64."""
    return torch.arange(len(dataset.numbers)).split(dataset.sizes.tolist())


def read_features(study, part) -> LastLayer:
    """Of `make_features`, by a process that sees the main one's files."""
    dataset, train, device = study.sets[part], study.sets["train"], compute_device(study.args)
    with common.alone():
        own = identity(study, "features", part=part, of=contents(dataset))
        x = study.run.load(*own)["x"].to(device)
    if not isinstance(dataset, data.MoleculeSet):
        return LastLayer(x, dataset.labels.to(device))
    mean, std = torch.tensor(energy_statistics(train), dtype=torch.float64)
    molecule = torch.arange(len(dataset)).repeat_interleave(dataset.sizes)
    offset = sum_by(molecule, mean + train.references[dataset.numbers], len(dataset))
    return LastLayer(x, *(t.to(device) for t in (dataset.labels, molecule, offset, std)))


def take(last, rows, atoms=None) -> LastLayer:
    """The examples `rows` [B] of what a last layer sees; atoms: `atoms_of` molecules. All indices
    are made on the CPU, which waits for no device."""
    to_device = lambda index: index.to(last.x.device, non_blocking=True)
    labels = last.labels[on := to_device(rows)]
    if last.offset is None:
        return LastLayer(last.x[on], labels)
    own = [atoms[i] for i in rows.tolist()]
    molecule = torch.repeat_interleave(torch.tensor([len(part) for part in own]))
    return LastLayer(last.x[to_device(torch.cat(own))], labels, to_device(molecule),
                     last.offset[on], last.scale)


def laplace(study) -> tuple:
    """(theta, spectrum, delta, seconds) of LLLA, on the main process."""
    args, device = study.args, compute_device(study.args)
    theta = flat_head(map_sampler(study).net.head).detach().to(device)

    def make_spectrum():
        found, seconds = timed(study, lambda: decompose(
            args.structure, read_features(study, "train"), theta))
        return {**found._asdict(), "seconds": seconds}

    def make_choice():
        if args.prior_precision != "grid":
            return {"delta": args.prior_precision, "seconds": 0.0}
        noise = seeded_noise((args.val_samples, len(theta)), device, 0, 15)
        scores, seconds = timed(study, lambda: precision_scores(
            theta, spectrum, read_features(study, "val"), noise))
        delta = best(scores, LAPLACE_GRID, "LLLA's prior precision")
        return {"delta": delta, "scores": scores, "seconds": seconds}

    kept = piece(study, identity(study, "spectrum", structure=args.structure), make_spectrum)
    spectrum = Spectrum(*(None if kept[k] is None else kept[k].to(device)
                          for k in Spectrum._fields))
    choice = piece(study, identity(study, "llla-choice", *GROUPS["llla"]), make_choice)
    least = spectrum.values.min().item()
    if choice["delta"] <= -least:
        raise UserError(f"--prior-precision {choice['delta']:.4g}: there is no posterior, the "
                        f"Hessian has an eigenvalue of {least:.4g}; use grid, or a larger number")
    return theta, spectrum, choice["delta"], kept["seconds"] + choice["seconds"]


def fit_flow(study, theta, spectrum, base) -> tuple:
    """(tensors of the flow with the best prior precision, seconds), on the main process: Adam on
    the ELBOs of all precisions at once, with the same base samples and batches."""
    args, run, device = study.args, study.run, theta.device
    grid = {"grid": FLOW_GRID, "llla": (base,)}.get(args.flow_precision, (args.flow_precision,))
    p, layers, values = len(theta), args.flow_layers, torch.tensor(grid, device=device)
    generator = torch.Generator().manual_seed(common.derive_seed(args.seed, 16))
    flow = nn.ParameterList(  # published: U(-1, 1) / sqrt(P), all precisions from the same
        torch.empty(shape).uniform_(-p**-0.5, p**-0.5, generator=generator)
        .expand(len(grid), *shape).to(device).clone()
        for shape in ((layers, p), (layers,), (layers,)))
    optimiser = torch.optim.Adam(flow, 1e-3)
    last, n = read_features(study, "train"), len(study.sets["train"])
    atoms = atoms_of(study.sets["train"]) if last.offset is not None else None
    steps = min(-(-n // args.batch_size), args.limit_steps or n)
    for epoch in run.epochs(args.flow_epochs, *identity(study, "la_nf", *GROUPS["la_nf"]),
                            flow=flow, optimiser=optimiser):
        generator = torch.Generator().manual_seed(common.derive_seed(args.seed, 17, epoch))
        order = torch.randperm(n, generator=generator)
        noise = torch.randn(steps, p, generator=generator).to(theta)
        total = torch.zeros((), device=device)
        for step, rows in enumerate(order.split(args.batch_size)[:steps]):
            share = (epoch + step / steps) / args.flow_epochs
            optimiser.param_groups[0]["lr"] = 1e-3 * cosine(share)
            loss = negative_elbo(list(flow), theta, spectrum, base, values, noise[step:step + 1],
                                 take(last, rows, atoms), n)
            optimiser.zero_grad()
            loss.sum().backward()
            optimiser.step()
            total += loss.detach().mean()
        if not math.isfinite(total):
            raise UserError("LA-NF's ELBO is not finite; raise --flow-precision or "
                            "--prior-precision")
        run.log(total / steps, examples=n)
    seconds = sum(row["seconds"] for row in run.history)
    noise = seeded_noise((args.val_samples, p), device, 0, 18)
    val, samples = read_features(study, "val"), laplace_samples(theta, spectrum, base, noise)
    with torch.no_grad():
        scores = [log_predictive_density(head_outputs(apply_flow(
            [t[g:g + 1] for t in flow], samples)[0], val), val.labels) for g in range(len(grid))]
    # published code: the later of equal ones
    g = best(scores[::-1], range(len(grid))[::-1], "--flow-precision")
    return [t[g].detach() for t in flow], seconds


def make_heads(study, method):
    """S sampled last layers [S, P] of LLLA or LA-NF, on the main process."""
    theta, spectrum, delta, seconds = laplace(study)
    noise = seeded_noise((study.args.samples, len(theta)), theta.device, study.args.seed, 19)
    heads = laplace_samples(theta, spectrum, delta, noise)
    numbers = sum(t.numel() for t in (theta, *spectrum) if t is not None)
    if method == "la_nf":
        flow, own_s = fit_flow(study, theta, spectrum, delta)
        heads, _ = apply_flow([t[None] for t in flow], heads)
        seconds, numbers = seconds + own_s, numbers + sum(t.numel() for t in flow)
    return {"heads": heads.cpu(), "train_s": seconds, "numbers": numbers, "predict_s": 0.0}


def make_outputs(study, sampler, method, part):
    """What a sampler's draws say of a set, on the main process; of many draws in float16."""
    found, seconds = timed(study, lambda: predict(sampler, study.sets[part], study.args,
                                                  sizes_needed(method, study.args)))
    if found and method not in POINTS and "log_probs" in found:
        found["log_probs"] = found["log_probs"].clamp_min(-6e4).half()
    if not common.all_finite(found):
        raise UserError(f"{METHODS[method]}: predictions of {part} are not finite, a draw is too "
                        "far off; lower its learning rate, or narrow the posterior")
    return found and {**found, "train_s": sampler.train_s, "numbers": sampler.numbers,
                      "predict_s": seconds}


def make_member(study):
    """Make what a member's predictions are read from, for all methods: mixtures of draws of whole
    networks, sampled last layers and what they see; all that is there is kept."""
    for method in study.args.methods:
        last, sampler = method in LAST_LAYER, functools.cache(lambda: SAMPLERS[method](study))
        for part in [*study.sets][2:]:
            for own in ("train", "val", part) if last else ():
                make_features(study, own)
            make = (lambda: on_main(lambda: make_heads(study, method))) if last else (
                lambda: make_outputs(study, sampler(), method, part))
            piece(study, leaf(study, method, part), make, read=False)


# ---- Evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def predict(sampler, dataset, args, sizes=(1,)):
    """What a posterior's draws say of a set, in its order, on the main process (None elsewhere).

    {"log_probs" [N, len(sizes), C], "entropy" [N, len(sizes)]}: the mixture of the first n draws
    for n in sizes, ascending; of molecules {"outputs" [N, S, 2]}, S the last size.
    """
    net, draw, dropout = sampler[:3]
    loader, index = make_loader(dataset, args, args.eval_batch_size), []

    def rows():
        for s in range(sizes[-1]):
            draw(s)
            net.train(dropout)
            for module in batch_norms(net):
                module.eval()
            parts = []
            for batch in loader.epoch():
                with autocast(args):
                    parts.append(net(batch[0])[0])
                if not s:
                    index.append(batch.index)
            yield torch.cat(parts)

    if isinstance(dataset, data.MoleculeSet):
        columns = {"outputs": torch.stack(list(rows()), 1)}
    else:
        on = compute_device(args)
        found = running_mixtures((row.to(on).log_softmax(-1) for row in rows()), sizes)
        columns = {k: v.transpose(0, 1) for k, v in found._asdict().items()}
    gathered = common.gather_rows(torch.cat(index), *columns.values())
    return gathered and dict(zip(columns, gathered))


def combinations(args, method) -> list:
    """(K, seed, members counted from 0, {S': draws by member}) of all ensembles of all runs. Seeds
    of other members are others, so that tables of several runs count them all."""
    return [(k, seed + 10**6 * (args.seed - 1 + first), [first + m - 1 for m in chosen],
             {k: [1] * k} if method in POINTS else draws_by_member(k, args.samples, seed))
            for first in range(0, args.runs * args.members, args.members) for k in args.ensembles
            for seed, chosen in member_combinations(args.members, k, args.combinations)]


def sizes_needed(method, args) -> list:
    """After how many samples of a member its mixture is needed by some ensemble."""
    draws = [by for *_, own in combinations(args, method) for by in own.values()]
    return sorted({n for by in draws for n in by} - {0})


def member_of(study, m):
    return study._replace(args=common.with_options(study.args, seed=study.args.seed + m))


def leaf(study, method, part) -> tuple[str, dict]:
    """The piece that a member's predictions of a set are read from."""
    if method in LAST_LAYER:
        return identity(study, f"{method}-heads", *GROUPS[method], samples=study.args.samples)
    return identity(study, f"{method}-{part}", *GROUPS[method], of=contents(study.sets[part]),
                    sizes=sizes_needed(method, study.args))


def read_leaf(study, method, part) -> dict:
    """By a process that sees the main one's files; what it cost is noted."""
    with common.alone():
        kept = study.run.load(*leaf(study, method, part))
    costs = study.costs.setdefault(METHODS[method],
                                   {"train_s": {}, "predict_s": {}, "memory_mb": {}})
    costs["train_s"][study.args.seed] = kept["train_s"]
    costs["predict_s"].setdefault((study.args.seed, part), kept["predict_s"])
    costs["memory_mb"][study.args.seed] = 4e-6 * kept["numbers"]  # in float32
    return kept


def own_share(n) -> Tensor:
    """Which of n rows this process evaluates: the processes of the main one's machine, which see
    its files, share them."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if common.world_size() > 1 else 1
    return (torch.arange(n) * here // n == common.rank()).nonzero()[:, 0]


def member_mixtures(study, method, part, rows) -> dict:
    """{n: the mixture of a member's first n samples on the examples `rows`}."""
    sizes, kept = sizes_needed(method, study.args), read_leaf(study, method, part)
    if method in LAST_LAYER:
        last = read_features(study, part)
        last, heads = take(last, rows), kept["heads"][:sizes[-1]].to(last.x)
        stride = max(1, 2**25 // max(1, len(rows) * study.sets["train"].num_classes))
        found, seconds = timed(study, lambda: running_mixtures((
            row for some in heads.split(stride) for row in head_outputs(some, last)), sizes))
        study.costs[METHODS[method]]["predict_s"][study.args.seed, part] = seconds
    else:
        found = Mixture(*(kept[k][rows].transpose(0, 1) for k in Mixture._fields))
    return {n: Mixture(*(t[i].cpu() for t in found)) for i, n in enumerate(sizes)}


# What evaluation keeps of an ensemble for each example.
COLUMNS = ("lpd", "correct", "confidence", "brier", "entropy", "mutual_information")
MOLECULE_COLUMNS = ("lpd", "error", "pit", "std", "epistemic")


def example_values(mixture, labels) -> Tensor:
    """[N, 6]: COLUMNS of a mixture; labels below 0: unknown."""
    probs = mixture.log_probs.exp()
    known, entropy = labels.clamp(0, probs.shape[1] - 1)[:, None], torch.special.entr(probs).sum(1)
    confidence, predicted = probs.max(1)
    own = mixture.log_probs.gather(1, known)[:, 0]
    brier = probs.square().sum(1) - 2 * own.exp() + 1
    return torch.stack([own, (predicted == labels).double(), confidence, brier, entropy,
                        (entropy - mixture.entropy).clamp_min(0)], 1)


def evaluate_classes(study, method, part) -> tuple:
    """(values [E, N, 6] of all ensembles, {S': metrics} of each) on the main process: the examples
    are shared out."""
    args, dataset, ensembles = study.args, study.sets[part], combinations(study.args, method)
    rows = own_share(len(dataset))
    jobs = [(e, n, by) for e, (*_, draws) in enumerate(ensembles) for n, by in draws.items()
            if part in study.tested or n == max(draws)]
    values, labels = torch.zeros(len(rows), len(jobs), len(COLUMNS)).double(), dataset.labels[rows]
    if len(rows):
        members = [member_mixtures(member_of(study, m), method, part, rows)
                   for m in range(args.runs * args.members)]
        for j, (e, _, counts) in enumerate(jobs):
            whole = ensemble_mixture([members[m] for m in ensembles[e][2]], counts)
            values[:, j] = example_values(whole, labels)
    gathered = common.gather_rows(rows, values)
    if gathered is None:
        return None, None
    last, measured = {}, [{} for _ in ensembles]
    for (e, n, _), own in zip(jobs, gathered[0].unbind(1)):
        last[e], measured[e][n] = own, class_metrics(own)
    return torch.stack([*last.values()]), measured


def class_metrics(values) -> dict:
    """Metrics of one ensemble from its COLUMNS [N, 6]."""
    lpd, correct, confidence, brier, entropy, information = values.unbind(1)
    bars = common.reliability(confidence, correct)
    gaps = np.abs(bars.accuracy - bars.confidence)
    return {"accuracy": correct.mean(), "lpd": lpd.mean(), "nll": -lpd.mean(),
            "ece15": (bars.counts * gaps).sum() / len(lpd), "mce15": gaps.max(),
            "brier": brier.mean(), "confidence": confidence.mean(), "entropy": entropy.mean(),
            "mutual_information": information.mean()}


def member_outputs(study, method, part) -> Tensor:
    """outputs [S, N, 2] of all draws of a member on molecules."""
    kept = read_leaf(study, method, part)
    if method not in LAST_LAYER:
        return kept["outputs"].transpose(0, 1)
    last = read_features(study, part)
    found, seconds = timed(study, lambda: head_outputs(kept["heads"].to(last.x), last).cpu())
    study.costs[METHODS[method]]["predict_s"][study.args.seed, part] = seconds
    return found


def evaluate_molecules(study, method, part) -> tuple:
    """As `evaluate_classes`, values [E, N, 5]; the ensembles are shared out."""
    y, ensembles, own = study.sets[part].labels, combinations(study.args, method), []
    members = functools.cache(lambda m: member_outputs(member_of(study, m), method, part))
    for e in own_share(len(ensembles)).tolist():
        (*_, chosen, draws), measured = ensembles[e], {}
        for n, counts in draws.items():  # the last: all
            outputs = torch.cat([members(m)[:count] for m, count in zip(chosen, counts)])
            if part in study.tested:
                measured[n] = common.regression_metrics(*outputs.unbind(-1), y)
        mean, variance = outputs.unbind(-1)
        _, _, epistemic, total = common.gaussian_mixture_moments(mean, variance)
        pit = torch.special.ndtr((y - mean) / variance.sqrt()).mean(0)
        lpd = log_density(outputs, y).logsumexp(0) - math.log(len(outputs))
        values = [lpd, (mean.mean(0) - y).abs(), pit, total.sqrt(), epistemic.sqrt()]
        own.append((torch.stack(values, 1), measured))
    values, measured = zip(*(job for jobs in common.gather_objects(own) for job in jobs))
    return torch.stack(values), measured


def separation(inside, outside, score) -> dict:
    """How well one uncertainty tells two sets apart, larger on OOD."""
    found = common.ood_metrics(inside, outside, larger_means="ood")
    both = torch.cat([inside, outside])
    found["detection_error"] = common.detection_error(both, torch.arange(len(both)) >= len(inside))
    return {f"{name}_{score}": value for name, value in found.items()}


def evaluate(study) -> tuple:
    """(rows, {method: {set: values}}, rows by number of samples) of all methods and ensembles."""
    args, rows, by_samples, kept = study.args, [], [], {}
    whole = study.tested[0]
    evaluate_set, names = (evaluate_molecules, MOLECULE_COLUMNS) if args.model == "painn" else (
        evaluate_classes, COLUMNS)
    for method in args.methods:
        values, ensembles = kept.setdefault(method, {}), combinations(args, method)
        for part in (*study.tested, *study.ood):
            values[part], measured = evaluate_set(study, method, part)
            for e, (k, seed, chosen, draws) in enumerate(ensembles if common.is_main() else ()):
                row = {"method": f"{METHODS[method]}, K={k}", "seed": seed, "set": part, "K": k,
                       "n": len(study.sets[part]),
                       "members": " ".join(str(args.seed + m) for m in chosen)}
                if part in study.tested:
                    rows.append(row | measured[e].pop(max(draws)))
                    by_samples += [row | {"samples": n} | own for n, own in measured[e].items()]
                    continue
                rows.append(row | {"set": whole, "against": part})
                for i in (-2, -1)[:max(draws)]:  # total uncertainty; of several draws epistemic
                    rows[-1] |= separation(values[whole][e, :, i], values[part][e, :, i], names[i])
    return rows, kept, by_samples


RESAMPLES = 400


def bootstrap_weights(n, seed) -> Tensor:
    """[RESAMPLES + 1, N]: how often each example is drawn; once each in the first row."""
    drawn = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(RESAMPLES, n).scatter_add_(1, drawn, torch.ones(RESAMPLES, n))
    return torch.cat([torch.ones(1, n), counts]).double()


def weighted_auroc(inside, outside, inside_weights, outside_weights) -> Tensor:
    """AUROC [B] of scores [N] and [L], larger on OOD, of weighted examples [B, N] and [B, L]."""
    rank = torch.cat([inside, outside]).unique(return_inverse=True)[1]
    mass = inside_weights.new_zeros(len(inside_weights), int(rank.max()) + 1)
    below = mass.index_add(1, rank[:len(inside)], inside_weights)
    below = below.cumsum(1) - below / 2
    return (outside_weights * below[:, rank[len(inside):]]).sum(1) / (
        inside_weights.sum(1) * outside_weights.sum(1))


def weighted_metrics(values, names, weights) -> dict:
    """{metric: [B]} of one ensemble's values [N, V] on the test set, of weighted examples
    [B, N]."""
    n, column = values.shape[0], dict(zip(names, values.unbind(1)))
    mean = lambda name: weights @ column[name] / n
    if "pit" in column:
        levels = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)
        shares = weights @ (column["pit"][:, None] <= levels).double() / n
        return {"mae": mean("error"), "lpd": mean("lpd"), "ece": (shares - levels).abs().mean(1)}
    edges = torch.arange(1, 15).double() / 15
    bins = F.one_hot(torch.bucketize(column["confidence"].contiguous(), edges), 15)
    gaps = weights @ (bins * (column["correct"] - column["confidence"])[:, None])
    return {"accuracy": mean("correct"), "lpd": mean("lpd"), "ece15": gaps.abs().sum(1) / n}


def differences(study, kept) -> list:
    """Each method's difference to DE at the same K: means over the same ensembles, and the 95 %
    interval of a bootstrap over test examples that are paired, the same for all methods."""
    whole, found, rows = study.tested[0], {}, []
    names = MOLECULE_COLUMNS if study.args.model == "painn" else COLUMNS
    weights = {part: bootstrap_weights(len(study.sets[part]), i)
               for i, part in enumerate((whole, *study.ood))}
    for method, values in kept.items():
        for e, (k, *_) in enumerate(combinations(study.args, method)):
            own = weighted_metrics(values[whole][e], names, weights[whole])
            own |= {f"auroc_{names[-2]} {part}": weighted_auroc(
                values[whole][e, :, -2], values[part][e, :, -2], weights[whole], weights[part])
                for part in study.ood}
            found.setdefault((method, k), []).append(own)
    for (method, k), own in found.items():
        row = {"method": METHODS[method], "K": k, "ensembles": len(own)}
        for metric in own[0]:
            mean, de = (torch.stack([one[metric] for one in some]).mean(0)
                        for some in (own, found["map", k]))
            change = mean - de
            low, high = change[1:].quantile(torch.tensor([0.025, 0.975]).double()).tolist()
            row[metric] = {"difference": change[0].item(), "low": low, "high": high}
        rows += [row] * (method != "map")
    return rows


def write_predictions(study):
    """--predict: what the first of the largest ensembles says, by method, in predictions.csv; of
    several methods in predictions-<method>.csv."""
    args, part, dataset = study.args, "predicted", study.sets["predicted"]
    rows = torch.arange(len(dataset))
    for method in args.methods:
        path = study.run.dir / f"predictions{f'-{method}' * (len(args.methods) > 1)}.csv"
        *_, chosen, draws = next(
            own for own in combinations(args, method) if own[0] == args.ensembles[-1])
        if isinstance(dataset, data.MoleculeSet):
            outputs = torch.cat([member_outputs(member_of(study, m), method, part)[:count]
                                 for m, count in zip(chosen, draws[max(draws)])])
            found = common.gaussian_mixture_moments(*outputs.unbind(-1))
            table = {"index": rows, "label": dataset.labels, "predicted": found.mean} | {
                k: getattr(found, k).sqrt() for k in ("total", "aleatoric", "epistemic")}
            common.write(path, common.to_csv(table, zip(*(c.tolist() for c in table.values()))))
            common.say(f"predictions of {len(rows)} examples in {path}")
            continue
        members = [member_mixtures(member_of(study, m), method, part, rows) for m in chosen]
        whole = ensemble_mixture(members, draws[max(draws)])
        log_probs = whole.log_probs.log_softmax(1)  # of float16: their sum may be .002 off
        total = torch.special.entr(log_probs.exp()).sum(1)
        common.write_predictions(path, dataset, log_probs, total=total,
                                 aleatoric=whole.entropy,
                                 epistemic=(total - whole.entropy).clamp_min(0))


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#000000", "#4477AA", "#EE6677", "#CCBB44", "#228833", "#AA3377", "#66CCEE"]


def plot_study(plt, path, rows, panels, args):
    """The paper's question: each metric against K, by method; bars: one standard deviation over
    the ensembles, which share members. panels: (metric, OOD set or None)."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.8), squeeze=False,
                                constrained_layout=True)
    width = 0.3 / len(args.methods)
    for i, (method, colour) in enumerate(zip(args.methods, COLOURS)):
        for axis, (metric, against) in zip(axes[0], panels):
            found = [[row[metric] for row in rows if row["method"] == f"{METHODS[method]}, K={k}"
                      and row.get("against") == against and row["set"] == rows[0]["set"]]
                     for k in args.ensembles]
            axis.errorbar(np.arange(len(found)) + (i - (len(args.methods) - 1) / 2) * width,
                          [np.mean(own) for own in found], [np.std(own) for own in found],
                          fmt="o-", ms=4, lw=1, capsize=2, color=colour, label=METHODS[method])
            axis.set(xlabel="members K", ylabel=f"{metric} {against or ''}".replace("_", " "),
                     xticks=range(len(found)), xticklabels=args.ensembles,
                     xlim=(-0.5, len(found) - 0.5))  # one K stands in the middle
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args) -> tuple:
    """(all sets by name, names of the test set and its shifted versions, names of OOD sets)."""
    name = data.set_name(args.dataset)
    if name in ("train", "val", "predicted"):
        raise UserError(f"--dataset {args.dataset}: a part of this study is called {name}; rename "
                        "the folder")
    if args.model == "bert_256_4":
        load = lambda split, **more: data.load_text(args.dataset, split, args.data_dir, **more)
        train = load("train", vocab_file=args.vocab)
        val, test = load("val", like=train), load("test", like=train)
        if args.dataset == "sst2" and not data.sst2_has_test_labels(args.data_dir):
            common.say("sst2: test.tsv has no labels (GLUE): tested on dev.tsv, validated on "
                       f"{len(val)} rows of train.tsv")
    elif args.model == "painn":
        train, val, test = (data.load_molecules(args.dataset, split, args.data_dir,
                                                target=args.target)
                            for split in ("train", "val", "test"))
    else:
        train, val, test = image_sets(args)
    sets = {"train": data.evenly(train, args.limit_train), "val": val,
            name: data.evenly(test, args.limit_test)}
    if not sets["train"].labels.is_floating_point():
        counts = sets["train"].labels.bincount(minlength=train.num_classes)
        if empty := (counts == 0).nonzero().flatten().tolist():
            raise UserError(f"{name}: no training example of class {empty[0]}"
                            f"{f', nor of {len(empty) - 1} more' * (len(empty) > 1)}; raise "
                            "--limit-train")
    sets |= shifted_sets(sets[name], args)
    tested = [*sets][2:]
    ood = {k: data.evenly(own, args.limit_test)
           for k, own in data.ood_sets(args, train, taken=[*sets, "predicted"]).items()}
    predicted = {"predicted": data.predict_set(args, train)} if args.predict else {}
    sets |= ood | predicted
    data.check_shares(*sets.values(), limit=args.eval_batch_size)
    return sets, tested, [*ood]


def image_sets(args):
    """(train, val, test) with the published split, which no seed changes, and its statistics."""
    loaded = (data.load(args.dataset, split, args.data_dir, val_fraction=0.0,
                        image_size=args.image_size) for split in ("train", "test"))
    whole, test = (own.in_memory() if isinstance(own, data.StreamedSet) else own
                   for own in loaded)
    if args.num_val >= len(whole):
        raise UserError(f"--num-val {args.num_val}: {args.dataset} has {len(whole)} images")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    train = whole.select(order[args.num_val:])
    pixels = data.evenly(train, args.limit_train).images
    white = 255 if pixels.dtype == torch.uint8 else 1
    std, mean = torch.std_mean(pixels.float() / white, (0, 2, 3))
    std[std == 0] = 1  # an empty channel
    train = dataclasses.replace(train, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return train, data.match(whole.select(order[:args.num_val]), train), data.match(test, train)


def shifted_sets(test, args) -> dict:
    """{name_1 ... name_5: all kinds of corruption of a severity as one set}."""
    found, name, published = {}, f"{args.dataset}_c", args.shift == "published"
    kinds = data.corruption_kinds(name, args.data_dir) if published else [*data.CORRUPTIONS]
    label = data.corrupted_name(name, kinds) if published else "corrupted"
    for severity in range(1, 6) if kinds and args.shift != "none" else ():
        parts = [data.evenly(data.match(data.load_corrupted(
            name, kind, severity, args.data_dir), test), args.limit_test) if published else
            data.corrupted(test, kind, severity) for kind in kinds]
        found[f"{label}_{severity}"] = dataclasses.replace(
            test, images=torch.cat([p.images for p in parts]),
            labels=torch.cat([p.labels for p in parts]), label_probs=None, groups=None, files=())
    return found


def open_study(args) -> Study:
    """The sets and the run directory, which belongs to the options of the MAP networks: all that
    is made after them lies in it side by side."""
    sets, tested, ood = load_sets(args)
    name = f"{data.set_name(args.dataset)}-{args.model}{f'-d{args.depth}' if args.depth else ''}"
    after = {title for titles in GROUPS.values() for title in titles}
    groups = {k: "evaluation" if title in after or k == "seed" else title
              for k, title in args.groups.items()}
    net = make_network(args, sets["train"])  # first: what it refuses claims no directory
    run = common.Run(common.with_options(args, groups=groups), "swag_laplace_ensembles",
                     f"{name}{f'-w{args.width:g}' if args.width != 1 else ''}")
    study = Study(args, sets, tested, ood, run, {})
    on_main(lambda: check_room(study, len(get_vector(net)), net.head))
    return study


def check_room(study, p, head):
    """Before anything is trained: a full matrix and its eigenvectors (five copies at the worst
    moment) must fit in memory, and all files on the disk; what they need is printed."""
    args, last, methods = study.args, len(flat_head(head)), {*study.args.methods}
    full = args.structure == "full" and methods & {*LAST_LAYER}
    memory = common.device_memory(args.device)
    if full and memory and 40 * last**2 > 0.9 * memory:
        raise UserError(f"--structure full: {last} numbers of the last layer need about "
                        f"{40e-9 * last**2:.1f} GB, the device has {memory / 1e9:.1f} GB; use "
                        "--structure diag")
    members = args.members * args.runs
    grid = 4 * p * args.swag_epochs * len(args.swag_lrs) * bool(methods & {"swa", "swag"})
    chosen = grid if members * grid <= 1e9 * KEEP_GB else 2 * grid / len(args.swag_lrs)
    row = 0
    for method in methods - {*LAST_LAYER}:
        sizes, size = sizes_needed(method, args), 8 if method in POINTS else 2
        row += 16 * sizes[-1] if args.model == "painn" else \
            len(sizes) * (8 + study.sets["train"].num_classes * size)
    rows = sum(map(len, [*study.sets.values()][2:]))
    gb = {"networks": 16 * p * (1 + len(methods & {"mcdo", "ivon"})),
          "iterates": chosen + (grid - chosen) / members,  # of one member all rates at a time
          "outputs": rows * row, "last layers": 4 * last * (last if full else 1)}
    total = sum(gb.values()) * members / 1e9
    there = sum(f.stat().st_size for f in study.run.dir.glob("*.pt")) / 1e9
    free = shutil.disk_usage(study.run.dir).free / 1e9
    listed = ", ".join(f"{name} {own * members / 1e9:.3g}" for name, own in gb.items())
    said = f"{total:.3g} GB ({listed}); {there:.3g} GB are there, {free:.3g} GB free"
    common.say(f"files of this study: {said}")
    if total > there + free and not args.eval:
        raise UserError(f"{study.run.dir} needs {said}; make room, choose another --out-dir, or "
                        "fewer --members, --ensembles or --samples")


def report(study, rows, kept, by_samples):
    """The tables, results.json, the pictures and --predict, on the main process."""
    args, run = study.args, study.run
    columns = ["mae", "lpd", "ece", "auroc_std"] if args.model == "painn" else [
        "accuracy", "lpd", "ece15", "auroc_entropy"]
    for row in rows:
        if row["set"] == study.tested[0] and "against" not in row:
            costs = study.costs[row["method"].split(",")[0]]  # of the members read here
            row |= {k: f"{sum(by.values()) / len(costs['train_s']):.3g}" for k, by in costs.items()}
    compared = differences(study, kept) if "map" in args.methods else []
    run.report(rows, [*columns, "train_s", "predict_s", "memory_mb"], differences=compared,
               by_samples=by_samples)
    if compared:
        lines = [[f"{v['difference']:+.4f} [{v['low']:+.4f}, {v['high']:+.4f}]"
                  if isinstance(v, dict) else str(v) for v in row.values()] for row in compared]
        common.say("difference to DE with the same members, and its 95 % interval over test "
                   f"examples\n\n{common.format_table([*compared[0]], lines)}\n")
    if args.predict:
        write_predictions(study)
    if args.plot and (plt := common.pyplot()):
        panels = [(c, None) for c in columns[:3]] + [(columns[3], part) for part in study.ood]
        plot_study(plt, run.dir / "study.png", rows, panels, args)


def main(argv=None) -> list:
    args = parse_args(argv)
    study = open_study(args)
    for m in range(args.runs * args.members):
        make_member(member_of(study, m))
    with study.run.clock("evaluate"):
        found = evaluate(study)
    on_main(lambda: report(study, *found))
    return common.plain(found[0])


if __name__ == "__main__":
    common.launch(main)
