"""Local posteriors in deep ensembles: SWAG, last-layer Laplace, and its refinement by a flow.

Jordahn, Jensen, Schmidt, Andersen, "On Local Posterior Structure in Deep Ensembles", AISTATS 2025,
PMLR 258:5032-5040, arXiv:2503.13296. Does an ensemble of posteriors predict better than one of
points? M networks theta_m (MAP) are trained, and each gets local posteriors q. Ensembles of K of
them average S samples, S // K of each:  p(y | x) = (1/S) sum_s p(y | x, theta_s).

  DE          theta_m itself, a point
  SWA, SWAG   R iterates w_r of SGD that starts at theta_m: their mean, also a point, and
              N(mean, diag(d) / 2 + D^T D / (2 (R - 1))), D_r = w_r - mean, d = mean_r D_r^2
  LLLA        N(theta, (H + delta I)^-1) of the last layer, H its generalised Gauss-Newton matrix
              (for molecules the Hessian)
  LA-NF       the Gaussian of LLLA through T radial flows, fitted by the ELBO
  MC dropout  a network that is trained, and sampled, with dropout

Usage:
  python swag_laplace_ensembles.py                        # dirty_glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 swag_laplace_ensembles.py --dataset cifar10   # the paper's WRN-16-4
  python swag_laplace_ensembles.py --eval --predict glyphs_letters     # a finished study again
  python swag_laplace_ensembles.py --members 1 --seed 3 --name apart   # one member, on any machine.
      Copy its files, apart/seed3-*, into the directory of a study, which then trains the others.

Expected (more in tests/RESULTS.md): `OMP_NUM_THREADS=1 python swag_laplace_ensembles.py --seed S`,
  5 core-minutes. LPD minus DE's for S = 1, 6, 11 (no common members), at K = 1 (left) and K = 5:
  LLLA   +.008 +- .005, +.023 +- .011, +.002 +- .007   -.021 +- .006, -.030 +- .011, -.034 +- .007
  LA-NF  +.054, +.036, +.024                           -.023, -.029, -.043
  SWAG   +.135, +.104, +.082                           +.072, +.050, +.040
  Posteriors of the last layer help one network and harm five; SWAG, which trains on, helps both.
  (+- 1.96 standard errors over test examples.)

Differences from the published code (called "published" below; "paper" is the article):
  - SWAG samples what is trained, and recomputes the statistics of batch norm for every sample;
    there it also samples FRN's frozen epsilon, moving it by 70 times its size.
  - The first S // K samples of a member serve all its ensembles; there, each ensemble draws anew.
    Equal ensembles count once, and K = 1 gives each member once.
  - The 21 precisions of LLLA share noise and one eigendecomposition, whose root of the covariance
    is symmetric (there: fresh noise, Cholesky's root); the 15 of LA-NF share noise and batches
    (there: fresh). A sample of LA-NF is one network for the whole set (there: for each batch).
  - No early stopping, which could only affect WRN-28-10. One sample of MC dropout has dropout, too.
  - AUPR (in) and FPR at 95 % TPR take the test set as positive (there: the OOD set); areas are sums
    of steps (there: trapezoids), bins of the ECE are closed on the right (there: left), and the two
    OOD sets of CIFAR are apart (there: one set).
  - Word pieces of SST-2 are made from its training sentences unless --vocab gives others.
  - Random numbers are functions of seed, step or sample (dropout masks: of the process, too), so a
    resumed run repeats them. Selection needs no server.
  - Not here: IVON; SGD's iterates as samples; Kronecker factors, marginal likelihood, probit,
    bridge and GLM predictions of LLLA; planar flows; a squared error in MAP's loss; scores by the
    number of samples; corrupted images, Yahoo finance, Alchemy; MCE and 20 scores of regression.
As published, validation data choose the MAP epoch, learning rates and precisions alike.
"""

import argparse
import copy
import dataclasses
import hashlib
import math
import random
import shutil
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

# In the published order. All methods are compared with DE, ensembles of MAP networks.
METHODS = {"map": "DE", "swa": "SWA", "swag": "SWAG", "llla": "LLLA", "la_nf": "LA-NF",
           "mcdo": "MC dropout"}
# These have one network per member instead of samples.
POINTS = ("map", "swa")

# published learning rates of SWAG, for images and texts, and for molecules
SWAG_LRS = [0.1, 0.05, 0.04, 0.03, 0.02, 0.01, 9e-3, 8e-3, 7e-3, 6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3,
            9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 1e-4]
MOLECULE_LRS = [1e-6, 5e-7, 4e-7, 3e-7, 2e-7, 1e-7, 9e-8, 8e-8, 7e-8, 6e-8, 5e-8, 4e-8, 3e-8, 2e-8,
                1e-8, 9e-9, 8e-9, 7e-9, 6e-9, 5e-9, 4e-9, 3e-9, 2e-9, 1e-9, 9e-10, 8e-10, 7e-10,
                6e-10, 5e-10, 1e-10]
GLYPHS = dict(model="wrn_10_4", width=0.25, epochs=40, batch_size=32, weight_decay=1e-4, members=5,
              ensembles=[1, 2, 5], samples=20, val_samples=10, num_val=500, limit_train=1000,
              limit_test=2000, swag_epochs=8, swag_lrs=[0.03, 0.01], ood=["glyphs_letters"])
PRESETS = {
    # What the other presets do not say: published settings. The paper trains 30 networks, of seeds
    # 1 to 30, and averages 30 ensembles of each size.
    "": dict(model="wrn_16_4", dropout=0.0, epochs=100, batch_size=128, lr=0.1, weight_decay=5e-4,
             opt="sgd", augment=False, num_val=2000, target="u0", swag_epochs=100,
             swag_lrs=SWAG_LRS, structure="full", flow_layers=10, val_samples=100, members=30,
             ensembles=[1, 2, 5, 10, 20], samples=200,
             methods=["map", "swa", "swag", "llla", "la_nf"], ood=[]),
    "cifar10": dict(augment=True, ood=["svhn", "cifar100"]),
    # The paper's larger network has settings of its own: --dataset cifar10 --preset this.
    "cifar10_wrn_28_10": dict(model="wrn_28_10", augment=True, epochs=200, swag_epochs=25,
                              structure="diag", ood=["svhn", "cifar100"]),
    "cifar100": dict(augment=True, ood=["svhn", "cifar10"]),
    "sst2": dict(model="bert_256_4", dropout=0.5, batch_size=64, lr=5e-3, weight_decay=3e-3),
    "qm9": dict(model="painn", batch_size=100, lr=5e-4, weight_decay=0.01, opt="adamw", epochs=650,
                swag_lrs=MOLECULE_LRS),
    "mnist": dict(ood=["fashion_mnist"]),
    "fashion_mnist": dict(ood=["mnist"]),
    "glyphs": GLYPHS,
    # Half of its training images are blends of two digits with a drawn label.
    "dirty_glyphs": GLYPHS,
    "reviews": dict(model="bert_256_2", width=0.25, dropout=0.1, epochs=8, batch_size=64, lr=2e-3,
                    weight_decay=1e-4, opt="adamw", members=3, ensembles=[1, 3], samples=20,
                    val_samples=20, swag_epochs=8, swag_lrs=[0.03, 0.01],
                    ood=["reviews_finance"]),
    "clusters": dict(model="painn", width=0.25, epochs=24, batch_size=50, lr=2e-3,
                     weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3], samples=30,
                     val_samples=30, limit_train=2500, swag_epochs=6, swag_lrs=[1e-6, 3e-7],
                     ood=["clusters_large"]),
    # Your own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(model="wrn_10_4", width=0.25, epochs=60, batch_size=32, weight_decay=1e-4,
                   augment=True, num_val=None, members=3, ensembles=[1, 3], samples=20,
                   val_samples=10, swag_epochs=8, swag_lrs=[0.03, 0.01]),
}

# The methods that use each option; without them it has no effect.
USED_BY = {
    "swag_epochs": ["swa", "swag"],
    "swag_lrs": ["swa", "swag"],
    "structure": ["llla", "la_nf"],
    "flow_layers": ["la_nf"],
    "val_samples": ["swa", "swag", "llla", "la_nf", "mcdo"],
    "samples": ["swag", "llla", "la_nf", "mcdo"],
}


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "dirty_glyphs")
    add = parser.group("data").add_argument
    add("--num-val", type=at_least(1),
        help="number of validation images, taken from the training set (published code: 2000)")
    add("--target", help="for qm9: the quantity to predict (paper: u0, the energy at 0 K)")
    add("--vocab", metavar="FILE",
        help="for sst2: a file with one word piece per line (paper: that of bert-base-uncased); "
        "without it, word pieces are made from the training sentences")

    add = parser.group("network").add_argument
    add("--model", help="network: " + ", ".join(NETWORKS) + " (paper: wrn_16_4 and wrn_28_10 for "
        "CIFAR, bert_256_4 for SST-2, painn for QM9)")

    add = parser.group("training").add_argument
    add("--dropout", type=between(0, 0.99),
        help="rate of dropout in the MAP networks (published: 0.5 for BERT, else 0)")
    add("--opt", choices=["sgd", "adamw"],
        help="optimiser of the MAP networks: SGD with Nesterov momentum 0.9, or AdamW (published: "
        "SGD, for molecules AdamW)")
    add("--weight-decay", type=at_least(0, float),
        help="weight decay of all parameters, also in SWAG's SGD (published: 5e-4; BERT 3e-3, "
        "molecules 0.01)")
    add("--augment", action=argparse.BooleanOptionalAction,
        help="train the MAP networks with random crops and flips (published: for CIFAR)")

    add = parser.group("method").add_argument
    add("--swag-epochs", type=at_least(2), metavar="R",
        help="epochs of SGD after the MAP network, and rank of SWAG (published: 100; wrn_28_10 25)")
    add("--swag-lrs", nargs="+", type=at_least(1e-12, float), metavar="LR",
        help="constant learning rates of this SGD, of which validation chooses one")
    add("--structure", choices=["full", "diag"],
        help="Gauss-Newton matrix of the last layer (for molecules the Hessian): all of it or its "
        "diagonal (paper: full; diag for wrn_28_10)")
    add("--flow-layers", type=at_least(1), metavar="T",
        help="number of radial flows of LA-NF (paper: 1, 5, 10 or 30; 10 in its tables)")
    add("--val-samples", type=at_least(1),
        help="number of posterior samples when a learning rate or precision is chosen "
        "(published: 100)")

    add = parser.group("evaluation").add_argument
    add("--methods", nargs="+", choices=METHODS, metavar="NAME",
        help="posteriors to compare: " + ", ".join(METHODS) + "; map is always there")
    add("--members", type=at_least(1), metavar="M",
        help="number of networks; their seeds start at --seed (paper: 30); --runs repeats all with "
        "the next M seeds")
    add("--ensembles", nargs="+", type=at_least(1), metavar="K",
        help="ensemble sizes K (paper: 1 2 5 10 20)")
    add("--samples", type=at_least(1), metavar="S",
        help="posterior samples of an ensemble, S // K of each of its members (paper: 200)")
    add("--ood", nargs="*", metavar="NAME",
        help="out-of-distribution sets; a+b is the union of two, folder:PATH a folder of images")
    add("--limit-test", type=at_least(1), metavar="N",
        help="number of examples of each set that is evaluated, evenly spaced")
    args = parser.parse(argv)
    check_options(args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    args.methods = [name for name in METHODS if name == "map" or name in args.methods]
    for option, methods in USED_BY.items():
        if not uses(args, *methods):
            common.refuse(args, [option], f"without --methods {' or '.join(methods)}")
    if args.dataset in data.TEXTS + data.MOLECULES:
        common.refuse(args, ["image_size", "num_val", "augment"], f"on {args.dataset}")
    if args.dataset in data.MOLECULES:
        common.refuse(args, ["structure"], "on molecules, whose Hessian is always full")
        if args.device.type == "mps":
            raise UserError("--device mps has no float64, which molecules need; use --device cpu")
    if args.dataset != "qm9":
        common.refuse(args, ["target"], f"on {args.dataset}, which has one target")
    if args.dataset != "sst2":
        common.refuse(args, ["vocab"], f"on {args.dataset}")

    args.ensembles = sorted(set(args.ensembles))
    too_large = [k for k in args.ensembles if k > args.members]
    if too_large == args.ensembles:
        raise UserError(f"--ensembles {args.ensembles[0]}: must not exceed --members "
                        f"{args.members}")
    if too_large and "ensembles" not in args.explicit:
        args.ensembles = sorted(set(args.ensembles + [args.members]))
    if too_large:
        # Members are sampled for them anyway, for a larger study later.
        common.say(f"skipped: ensembles of {', '.join(map(str, too_large))}, for which --members "
                   f"{args.members} are too few")
    if args.samples < args.ensembles[-1]:
        raise UserError(f"--samples {args.samples}: must be at least one for each member of "
                        f"--ensembles {args.ensembles[-1]}")


def uses(args, *methods):
    """Whether the study compares any of these methods."""
    return any(method in args.methods for method in methods)


# ---- Model --------------------------------------------------------------------------------------
# A network returns (outputs, features of its last layer `head`): for images and texts, logits
# [B, C] and [B, D]; for molecules, mean and variance of the energy [B, 2], and the features of all
# their atoms [A, D].


def widen(x):
    """bfloat16 as float32; float32 and float64 as they are."""
    if x.dtype == torch.bfloat16:
        return x.float()
    return x


class Network(nn.Module):
    """A feature extractor and a linear head, which is in float32 even under autocast."""

    def __init__(self, extractor, head):
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, inputs):
        features = widen(self.extractor(inputs))
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features), features


class FRN(nn.Module):
    """Filter response normalisation and its thresholded unit (Singh and Krishnan 2020).

        y = max(gamma x / sqrt(mean_HW x^2 + 1e-6) + beta, tau)
    """

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(channels, 1, 1))
        self.tau = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x):
        power = widen(x).square().mean((2, 3), keepdim=True)           # [B, C, 1, 1]
        scale = self.gamma * (power + 1e-6).rsqrt()
        # As relu(y - tau) + tau: its backward pass reads memory half as often as that of maximum.
        shifted = x * scale.to(x.dtype) + (self.beta - self.tau).to(x.dtype)
        return F.relu(shifted) + self.tau.to(x.dtype)


def batch_norm_relu(channels):
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


def conv(c_in, c_out, kernel, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)


class WideBlock(nn.Module):
    """A residual block. Where the shape changes, its shortcut convolution sees norm(x), too."""

    def __init__(self, c_in, c_out, stride, norm, dropout):
        super().__init__()
        self.norm = norm(c_in)
        self.body = nn.Sequential(conv(c_in, c_out, 3, stride), norm(c_out), nn.Dropout(dropout),
                                  conv(c_out, c_out, 3))
        self.shortcut = None
        if c_in != c_out or stride > 1:
            # Subsample first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on
            # CPUs.
            self.shortcut = nn.Sequential(nn.AvgPool2d(1, stride), conv(c_in, c_out, 1))

    def forward(self, x):
        h = self.norm(x)
        if self.shortcut is not None:
            x = self.shortcut(h)
        return self.body(h) + x


def wide_resnet(args, train_set, dropout, depth, widening, norm=FRN):
    """WRN-depth-widening: (depth - 4) / 6 blocks in each of three stages of strides 1, 2, 2."""
    c_in = max(4, round(16 * args.width))
    layers = [conv(train_set.shape[0], c_in, 3)]
    for stage in range(3):
        c_out = max(4, round(16 * widening * args.width * 2**stage))
        for index in range((depth - 4) // 6):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(WideBlock(c_in, c_out, stride, norm, dropout))
            c_in = c_out
    layers += [norm(c_in), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(c_in, train_set.num_classes))


class Bert(nn.Module):
    """BERT (Devlin et al. 2019) with its pooler, for tokens [B, L] padded with 0."""

    def __init__(self, vocabulary, dim, layers, dropout):
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.positions = nn.Embedding(512, dim)
        self.types = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.TransformerEncoderLayer(dim, 8, 8 * dim, dropout, "gelu", 1e-12,
                                               batch_first=True)
            layer.dropout.p = 0.0  # BERT has no dropout within its feed-forward layers
            self.layers.append(layer)
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, tokens):
        n = len(tokens)
        if n == 0:
            # The piece of a small batch that a process gets may be empty; attention refuses it.
            tokens = F.pad(tokens, (0, 0, 0, 1), value=1)
        padding = tokens == 0
        x = self.words(tokens) + self.types.weight[0]                  # [B, L, dim]
        x = x + self.positions.weight[:tokens.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.pooler(x[:n, 0])


def bert(args, train_set, dropout, layers):
    """BERT with random weights: 256 wide, 8 heads, 2048 hidden units (paper)."""
    dim = 8 * max(1, round(32 * args.width))
    extractor = Bert(len(train_set.vocab), dim, layers, dropout)
    net = Network(extractor, nn.Linear(dim, train_set.num_classes))
    # paper: weights N(0, 0.02^2), biases 0, layer norm unchanged
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    nn.init.zeros_(extractor.words.weight[:1])
    return net


class PaiNNLayer(nn.Module):
    """A message and an update (Schuett et al. 2021, equations 7 to 9).

    It changes the scalars s [A, F] and the vectors v [A, 3, F] of all atoms. rbf [E, radial + 1]:
    radial functions of the edges, and 1 for the bias, all times the cutoff function.
    """

    def __init__(self, features, radial, dropout):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(features, features), nn.SiLU(),
                                     nn.Linear(features, 3 * features))
        self.filter = nn.Linear(radial, 3 * features)
        self.u = nn.Linear(features, features, bias=False)
        self.v = nn.Linear(features, features, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * features, features), nn.SiLU(),
                                    nn.Linear(features, 3 * features))
        self.dropout = nn.Dropout(dropout)

    def forward(self, s, v, edges, rbf, direction):
        # Messages: each atom sums over its neighbours.
        sources, targets = edges
        weight = torch.cat([self.filter.weight, self.filter.bias[:, None]], 1)
        weight = self.dropout(F.linear(rbf, weight))                   # [E, 3 F]
        messages = self.message(s).index_select(0, sources) * weight
        vv, ss, vs = messages.chunk(3, -1)                             # each [E, F]
        s = s + sum_by(targets, ss, len(s))
        along = direction[:, :, None] * vs[:, None]                    # [E, 3, F]
        along = torch.addcmul(along, v.index_select(0, sources), vv[:, None])
        v = v + sum_by(targets, along, len(s))

        # Update of each atom.
        vector_u = self.dropout(self.u(v))                             # [A, 3, F]
        vector_v = self.dropout(self.v(v))
        # The gradient of |Vv| must be finite where Vv = 0, as at a lone atom.
        length = (vector_v.square().sum(1) + 1e-30).sqrt()             # [A, F]
        scales = self.update(torch.cat([length, s], -1))               # [A, 3 F]
        a_vv, a_sv, a_ss = scales.chunk(3, -1)
        s = s + a_ss + a_sv * (vector_u * vector_v).sum(1)
        v = v + vector_u * a_vv[:, None]
        return s, v


class PaiNN(nn.Module):
    """PaiNN with a Gaussian for the energy of each atom i, which add up to that of a molecule.

        E[y] = sum_i (std m_i + mean + reference_i)
        Var[y] = sum_i std^2 (softplus(u_i) + 1e-8)^2

    (m_i, u_i) is the output of the head for atom i; statistics: (mean, std) of energies per atom,
    see `energy_statistics`; references [101] of free atoms.
    """

    def __init__(self, statistics, references, features=128, layers=3, dropout=0.0, radial=20,
                 cutoff=5.0):
        super().__init__()
        self.embedding = nn.Embedding(101, features, padding_idx=0)
        self.layers = nn.ModuleList(PaiNNLayer(features, radial, dropout) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(features, features // 2), nn.SiLU(),
                                     nn.Dropout(dropout))
        self.head = nn.Linear(features // 2, 2)
        self.cutoff = cutoff
        self.radial = radial
        self.register_buffer("statistics", torch.tensor(statistics, dtype=torch.float64))
        self.register_buffer("references", references.double())

    def edge_features(self, distance):
        """sin(n pi d / cutoff) / d and 1, times the cutoff (cos(pi d / cutoff) + 1) / 2."""
        n = torch.arange(1, self.radial + 1, dtype=distance.dtype, device=distance.device)
        rbf = (n * (math.pi / self.cutoff) * distance).sin() / distance            # [E, radial]
        cut = 0.5 * ((math.pi / self.cutoff * distance).cos() + 1)                 # [E, 1]
        cut = cut * (distance < self.cutoff)
        return torch.cat([rbf, torch.ones_like(cut)], 1) * cut

    def forward(self, molecules):
        edges = (molecules.sources, molecules.targets)
        sources, targets = edges
        displacement = molecules.positions[sources] - molecules.positions[targets]  # [E, 3]
        distance = displacement.norm(dim=1, keepdim=True)                          # [E, 1]
        rbf = self.edge_features(distance)
        s = self.embedding(molecules.numbers)                                      # [A, F]
        v = s.new_zeros(len(s), 3, s.shape[1])
        for layer in self.layers:
            s, v = layer(s, v, edges, rbf, displacement / distance)
        features = widen(self.readout(s))
        mean, std = self.statistics
        known = mean + self.references[molecules.numbers]                          # [A]
        offset = sum_by(molecules.molecule, known, molecules.count)                # [B]
        last = LastLayer(features, None, molecules.molecule, offset, std)
        with torch.autocast(features.device.type, enabled=False):
            outputs = head_outputs(flat_head(self.head)[None], last)               # [1, B, 2]
        return outputs[0], features


def energy_statistics(molecules):
    """Mean and std of (label - sum of references) / number of atoms over a MoleculeSet, in eV."""
    index = torch.arange(len(molecules)).repeat_interleave(molecules.sizes)
    known = sum_by(index, molecules.references[molecules.numbers], len(molecules))
    std, mean = torch.std_mean((molecules.labels - known) / molecules.sizes)
    if not std > 0:
        raise UserError(f"{molecules.name}: all training molecules have the same target per atom; "
                        "there is nothing to learn, choose another --target")
    return mean.item(), std.item()


def painn(args, train_set, dropout):
    features = 2 * max(1, round(64 * args.width))
    return PaiNN(energy_statistics(train_set), train_set.references, features, dropout=dropout)


# Your own network is one more entry: a function of the options, the training set and a rate of
# dropout. It returns a module with a linear layer `head`, as described under the banner.
NETWORKS = {
    "wrn_10_4": partial(wide_resnet, depth=10, widening=4),
    "wrn_16_4": partial(wide_resnet, depth=16, widening=4),
    "wrn_16_4_bn": partial(wide_resnet, depth=16, widening=4, norm=batch_norm_relu),
    "wrn_28_10": partial(wide_resnet, depth=28, widening=10),
    "bert_256_2": partial(bert, layers=2),
    "bert_256_4": partial(bert, layers=4),
    "painn": painn,
}


def make_network(args, train_set, dropout):
    """The network --model for a training set, with random weights, on its device."""
    if args.model not in NETWORKS:
        raise UserError(f"--model {args.model}: choose one of {', '.join(NETWORKS)}")
    net = NETWORKS[args.model](args, train_set, dropout)
    outputs = 2 if isinstance(train_set, data.MoleculeSet) else train_set.num_classes
    head = getattr(net, "head", None)
    if not isinstance(head, nn.Linear) or head.out_features != outputs:
        raise UserError(f"--model {args.model}: its function must return Network(extractor, head), "
                        f"with a linear layer of {outputs} outputs as the head")
    return net.to(args.device, memory_format=torch.channels_last)


# ---- Method -------------------------------------------------------------------------------------
# To copy this section, copy these imports, too:
#   import math
#   import random
#   from typing import NamedTuple
#   import torch
#   import torch.nn.functional as F
#   from torch import Tensor
#
# theta [P] is a last layer as one vector: its weight [C, D] row by row, then its bias [C]. For
# molecules, C = 2: the mean and the spread of an atom's energy.
# outputs [S, N, C] of S samples are log probabilities; for molecules, mean and variance [S, N, 2].


def swag_moments(iterates, floor=1e-8):
    """SWAG's mean [P], variances d [P] and deviations D [R, P] of R iterates [R, P].

    d = max(mean_r D_r^2, floor), and D_r = w_r - mean, with the final mean as in the paper (in the
    original SWAG it is a running one). Overwrites `iterates` with D. Raises ValueError if R < 2.
    """
    if len(iterates) < 2:
        raise ValueError(f"SWAG needs at least 2 iterates, not {len(iterates)}")
    mean = iterates.mean(0, dtype=torch.float64).to(iterates.dtype)
    deviations = iterates.sub_(mean)
    variance = torch.zeros_like(mean)
    # One row at a time, so that no second [R, P] is needed.
    for row in deviations:
        variance.addcmul_(row, row, value=1 / len(deviations))
    return mean, variance.clamp_min_(floor), deviations


def swag_samples(mean, variance, deviations, noise, low_rank_noise):
    """Samples [S, P] = mean + (sqrt(d) z_1 + D^T z_2 / sqrt(R - 1)) / sqrt(2).

    The noises z_1 [S, P] and z_2 [S, R] are standard normal and independent. The covariance is
    diag(d) / 2 + D^T D / (2 (R - 1)), about that of the iterates. In a network with batch norm,
    recompute the running statistics on the training set for every sample.
    """
    diagonal = noise.to(mean) * variance.sqrt()
    low_rank = low_rank_noise.to(mean) @ deviations / math.sqrt(len(deviations) - 1)
    return mean + math.sqrt(0.5) * (diagonal + low_rank)


class LastLayer(NamedTuple):
    """The inputs of a network's last layer for N examples, and their labels.

    For molecules, these are the features of all their A atoms; an energy is a sum over atoms.
    """

    x: Tensor                       # [N, D] features; for molecules [A, D]
    labels: Tensor | None           # [N] int64; for molecules float64, in eV
    molecule: Tensor | None = None  # [A] which molecule an atom belongs to
    offset: Tensor | None = None    # [N] the known part of an energy, in eV
    scale: Tensor | None = None     # the unit of the network's energies, in eV


def sum_by(index, values, count):
    """Sum the rows of `values` that have the same `index` in 0..count-1: [count, ...]."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def flat_head(head):
    """theta [P] of a linear layer; for a posterior, detach it."""
    return torch.cat([head.weight.flatten(), head.bias])


def head_outputs(theta, last):
    """The outputs [S, N, C] of S last layers theta [S, P], in one matrix product."""
    s = len(theta)
    d = last.x.shape[1]
    c = theta.shape[1] // (d + 1)
    weight = theta[:, :-c].reshape(s * c, d)
    bias = theta[:, -c:].flatten()
    z = torch.addmm(bias, last.x, weight.T).view(-1, s, c).transpose(0, 1)     # [S, N or A, C]
    if last.offset is not None:
        return energy_outputs(z, last)
    return z.log_softmax(-1)


def energy_outputs(z, last):
    """Mean and variance [S, N, 2] of the energies of molecules, from z [S, A, 2] of their atoms."""
    variance = (F.softplus(z[..., 1]) + 1e-8).square()
    atoms = torch.stack([z[..., 0], variance], -1)                             # [S, A, 2]
    sums = sum_by(last.molecule, atoms.transpose(0, 1), len(last.offset))      # [N, S, 2]
    sums = sums.transpose(0, 1).double()
    mean = last.offset + last.scale * sums[..., 0]
    return torch.stack([mean, last.scale.square() * sums[..., 1]], -1)


def log_density(outputs, labels):
    """log p(y_n | theta_s) [S, N] in nats, of integer labels [N], or Gaussian, of float labels."""
    if not labels.is_floating_point():
        index = labels.expand(len(outputs), -1)[..., None]                     # [S, N, 1]
        return outputs.gather(-1, index)[..., 0]
    mean, variance = outputs.unbind(-1)
    distance = (labels - mean).square() / variance
    return -0.5 * (distance + variance.log() + math.log(2 * math.pi))


def log_predictive_density(outputs, labels):
    """LPD = mean_n log (1/S) sum_s p(y_n | theta_s), in nats: the log of a mean.

    outputs [S, N, C]; labels [N].
    """
    log_p = log_density(outputs, labels).double()                              # [S, N]
    mixture = log_p.logsumexp(0) - math.log(len(log_p))
    return mixture.mean().item()


def data_loss(outputs, labels, factor=1.0):
    """The loss of training, a sum over the batch: the cross entropy of logits [B, C].

    For molecules with mean m and variance v [B, 2]: factor (log v + (y - m)^2 / v) / 2.
    """
    if not labels.is_floating_point():
        return F.cross_entropy(outputs, labels, reduction="sum")
    mean, variance = outputs.unbind(-1)
    loss = variance.log() + (labels - mean).square() / variance
    return factor * 0.5 * loss.sum()


class Spectrum(NamedTuple):
    """A matrix H = Q diag(values) Q^T: H + delta I only shifts its eigenvalues."""

    values: Tensor        # [P]
    basis: Tensor | None  # Q [P, P]; None if H is diagonal


def diagonal_spectrum(theta, last):
    """The diagonal of the generalised Gauss-Newton matrix H, see `full_spectrum`."""
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    variance = probs * (1 - probs)
    of_weight = variance.T @ last.x.square()                                   # [C, D]
    return Spectrum(torch.cat([of_weight.flatten(), variance.sum(0)]), None)


def full_spectrum(theta, last):
    """The generalised Gauss-Newton matrix H of the cross entropy, a sum over examples (not a mean).

        H = sum_n (diag p_n - p_n p_n^T) (x) x~_n x~_n^T,   x~ = (x, 1)

    Adding the same to all logits changes no probability, so H has D + 1 zero eigenvalues. They are
    set exactly: the posterior is widest there, and rounding would decide its width. To this end H
    is diagonalised in the space of the contrasts (the rest of R^C), and its eigenvectors are
    carried back.
    """
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    c = probs.shape[1]
    d1 = last.x.shape[1] + 1
    # An orthonormal basis of R^C: first the shift (1, ..., 1) / sqrt(C), then the contrasts.
    start = torch.eye(c, dtype=torch.float64, device=probs.device)
    start[:, 0] = 1
    basis = torch.linalg.qr(start).Q                                           # [C, C]
    shift = basis[:, :1]
    contrasts = basis[:, 1:]
    h = contrast_ggn(last.x, probs, contrasts.to(probs))
    values, vectors = torch.linalg.eigh(h.flatten(0, 1).flatten(1))
    vectors = vectors.view(c - 1, d1, -1)
    vectors = torch.einsum("ca,adm->cdm", contrasts, vectors)  # [C, D + 1, (C - 1)(D + 1)]
    null = shift[:, :, None] * torch.eye(d1).to(shift)         # [C, D + 1, D + 1]
    table = torch.cat([vectors, null], 2)                      # [C, D + 1, P]
    # In theta's order: the weight row by row, then the bias.
    of_weight = table[:, :-1].flatten(0, 1)                    # [C D, P]
    of_bias = table[:, -1]                                     # [C, P]
    basis = torch.cat([of_weight, of_bias]).to(last.x)
    values = torch.cat([values.clamp_min(0), values.new_zeros(d1)])
    return Spectrum(values, basis)


def contrast_ggn(x, probs, contrasts, stripe=64):
    """V^T H V in float64, [C - 1, D + 1, C - 1, D + 1], for contrasts V [C, C - 1] between classes.

    No Jacobian is formed: the block of two contrasts a and b is the Gram matrix of the features,
    in which example n has the weight v_a^T (diag p_n - p_n p_n^T) v_b.
    """
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)               # [N, D + 1], with ones for the bias
    k = contrasts.shape[1]
    d1 = x.shape[1]
    h = torch.zeros(k, d1, k, d1, dtype=torch.float64, device=x.device)
    for x1, p in zip(x.split(8192), probs.split(8192)):                        # [n, D + 1], [n, C]
        means = p @ contrasts                                                  # [n, C - 1]
        for a in range(k):
            for b in range(a, k):
                weight = p @ (contrasts[:, a] * contrasts[:, b]) - means[:, a] * means[:, b]
                weighted = weight[:, None] * x1                                # [n, D + 1]
                # Gram matrices are symmetric: in stripes, about their upper half is enough.
                for i in range(0, d1, stripe):
                    h[a, i:i + stripe, b, i:] += x1[:, i:i + stripe].T @ weighted[:, i:]
    for a in range(k):
        for b in range(a, k):
            block = h[a, :, b].triu()
            block = block + block.triu(1).T
            h[a, :, b] = block
            h[b, :, a] = block
    return h


def molecule_spectrum(theta, last):
    """The Hessian in theta of `data_loss` for molecules, whose eigenvalues may be negative.

    Exact, in float64, by P backward passes: theta is short.
    """
    last = last._replace(x=last.x.double())

    def loss(theta):
        return data_loss(head_outputs(theta[None], last)[0], last.labels)

    hessian = torch.autograd.functional.hessian(loss, theta.double())          # [P, P]
    values, basis = torch.linalg.eigh(hessian)
    return Spectrum(values, basis)


def laplace_samples(theta, spectrum, delta, noise):
    """Samples [..., S, P] of N(theta, (H + delta I)^-1), for standard normal noise [S, P].

    They are theta + Q (values + delta)^-1/2 Q^T noise: the symmetric root does not depend on the
    signs of eigenvectors. delta is a number, or [G, 1, 1]. NaN if H + delta I is not positive.
    """
    scale = (spectrum.values + delta).to(noise)
    root = torch.where(scale > 0, scale, torch.nan).rsqrt()
    if spectrum.basis is None:
        return theta + noise * root
    basis = spectrum.basis.to(noise)
    return theta + (noise @ basis * root) @ basis.T


# The published grids of prior precisions: 10^-4 ... 10^4 in steps of 10^0.4; that of LA-NF.
LAPLACE_GRID = tuple(10 ** (-4 + 0.4 * i) for i in range(21))
FLOW_GRID = (1, 5, 10, 20, 30, 40, 50, 70, 90, 100, 125, 150, 175, 200, 500)


def precision_scores(theta, spectrum, last, noise, grid=LAPLACE_GRID):
    """The LPD of each prior precision of the grid, with the same noise; NaN: no posterior."""
    deltas = torch.tensor(grid, dtype=torch.float64, device=theta.device)
    scores = []
    for samples in laplace_samples(theta, spectrum, deltas[:, None, None], noise):
        outputs = head_outputs(samples, last)
        scores.append(log_predictive_density(outputs, last.labels))
    return scores


def initial_flows(count, layers, p, generator):
    """Centres [G, T, P], and a and b [G, T], of G equal flows: uniform in +- 1 / sqrt(P)."""
    bound = p**-0.5
    flows = []
    for shape in ((layers, p), (layers,), (layers,)):
        start = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        flows.append(start.expand(count, *shape).clone())
    return flows


def apply_flow(flow, theta):
    """Send theta [..., P] through T radial flows: theta_T and log |det d theta_T / d theta| [...].

        y = x + beta h (x - x_0),   h = 1 / (alpha + |x - x_0|)

    flow: the centres x_0 [..., T, P], and a and b [..., T], with alpha = softplus(a) and
    beta = softplus(b) - alpha > -alpha, so that each flow is invertible.
    """
    centres, a, b = flow
    alphas = F.softplus(a)
    betas = F.softplus(b) - alphas
    p = theta.shape[-1]
    log_det = 0.0
    for layer in range(a.shape[-1]):
        alpha = alphas[..., layer]
        beta = betas[..., layer]
        offset = theta - centres[..., layer, :]
        r = offset.norm(dim=-1)
        h = 1 / (alpha + r)
        across = (p - 1) * torch.log1p(beta * h)
        along = torch.log1p(beta * h - beta * h.square() * r)
        log_det = log_det + (across + along)
        theta = theta + (beta * h)[..., None] * offset
    return theta, log_det


def negative_elbo(flow, theta, spectrum, delta, precision, noise, last, n):
    """The negative ELBO [G] of G flows at once, in nats, from one sample t of each.

        log q(t) - log N(t; 0, I / precision) - (N / B) sum_b log p(y_b | t)

    q is N(theta, (H + delta I)^-1) through the flow, with the delta that Laplace's approximation
    has chosen; the prior's precision [G] is another one for each flow. Tensors of the flow
    [G, T, ...]; noise [1, P] for all or [G, P]; `last` holds the B examples of the batch; n is N.
    """
    p = noise.shape[1]
    log_2pi = math.log(2 * math.pi)
    base = laplace_samples(theta, spectrum, delta, noise)
    t, log_det_flow = apply_flow(flow, base)                                   # [G, P], [G]
    log_det_precision = (spectrum.values + delta).log().sum().to(t)
    log_base = 0.5 * (log_det_precision - noise.square().sum(-1) - p * log_2pi)
    log_q = log_base - log_det_flow
    log_prior = 0.5 * (p * (precision.log() - log_2pi) - precision * t.square().sum(-1))
    log_likelihood = log_density(head_outputs(t, last), last.labels).sum(1)
    return log_q - log_prior - n / len(last.labels) * log_likelihood


def member_combinations(members, k, count=30):
    """The published ensembles of k of M members, as sorted member numbers from 1.

    Ensemble i = 1, ..., count is Python's random.sample of 1..M with the seed of Cantor's pairing,
    (k + i)(k + i + 1) / 2 + i. Here k = 1 gives each member once, and equal ensembles count once.
    """
    if k == 1:
        return [[member] for member in range(1, members + 1)]
    found = []
    for i in range(1, count + 1):
        seed = (k + i) * (k + i + 1) // 2 + i
        chosen = sorted(random.Random(seed).sample(range(1, members + 1), k))
        if chosen not in found:
            found.append(chosen)
    return found


class Mixture(NamedTuple):
    """The mean prediction of some samples."""

    log_probs: Tensor  # [..., C]  log of the mean probability
    entropy: Tensor    # [...]     mean entropy of a sample, in nats


def running_mixtures(samples, sizes):
    """The Mixtures of the first n samples, for each n of `sizes`, in ascending order.

    samples: an iterable of log probabilities [..., C]. In one pass, which keeps no sample.
    """
    found = []
    log_sum = torch.tensor(-math.inf)
    entropy_sum = 0.0
    for count, log_probs in enumerate(samples, 1):
        log_probs = log_probs.double()
        log_sum = torch.logaddexp(log_sum, log_probs)
        entropy_sum = entropy_sum + torch.special.entr(log_probs.exp()).sum(-1)
        if count in sizes:
            found.append(Mixture(log_sum - math.log(count), entropy_sum / count))
    return found


def mix(mixtures):
    """The Mixture of K members with equally many samples each, from the Mixtures of each."""
    log_probs = torch.stack([mixture.log_probs for mixture in mixtures])       # [K, ..., C]
    entropy = torch.stack([mixture.entropy for mixture in mixtures])           # [K, ...]
    mean = log_probs.double().logsumexp(0) - math.log(len(mixtures))
    return Mixture(mean, entropy.mean(0))


# ---- Training -----------------------------------------------------------------------------------
# A study makes many pieces: networks, iterates, fitted posteriors, predictions. Each is stored
# under an explicit name (seed3-map, seed3-swag-lr0.01-4, seed3-llla-test, ...), with all options
# that shape it and the digest of the weights that it was made from. It is read if these agree, and
# made anew if not: a later option never retrains an early stage, and nothing stale is read.


class Part(NamedTuple):
    """One set of a study, unshuffled, as this process evaluates it."""

    dataset: data.ImageSet | data.TextSet | data.MoleculeSet
    loader: data.Loader | data.SequenceLoader
    rows: Tensor  # [b] this process's share of the examples, in the order of the loader
    digest: str   # of the examples


class Study(NamedTuple):
    """What every step needs."""

    args: argparse.Namespace
    run: common.Run
    sets: data.Sets
    parts: dict           # {name: Part}: train, val, test, ood-<name> for each OOD set, predict
    map_loader: data.Loader | data.SequenceLoader   # the training set, shuffled, and augmented
    swag_loader: data.Loader | data.SequenceLoader  # the training set, shuffled
    molecules: bool       # whether energies of molecules are predicted, not classes


class Diverged(UserError):
    """A loss or a weight is not finite."""


MAP_LOSS_FACTOR = 4e-4  # published code: 0.02^2, for molecules and MAP only
FLOW_EPOCHS = 20  # published code
DROPOUTS = (0.05, 0.1, 0.2)  # the rates of MC dropout, of which validation chooses one
# Each use of random numbers has a key of its own; LLLA and LA-NF share "samples".
STREAMS = {"epoch": 2, "dropout": 12, "swag": 13, "swag_low_rank": 14, "llla_val": 15,
           "flow_start": 16, "flow_epoch": 17, "la_nf_val": 18, "samples": 19}


def identity(study, seed, **made_from):
    """What a piece of a member is made from: the options of MAP training, and `made_from`."""
    return {**study.run.config, "seed": seed, "train": study.parts["train"].digest,
            "val": study.parts["val"].digest, **made_from}


def digest_of(tensors):
    """A digest of tensors, as `common.digest` is one of a network."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.contiguous().numpy())
    return content.hexdigest()


def cosine(share):
    """Half a cosine from 1 to 0, as `share` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * share))


def float64_device(args):
    """The device; the CPU instead of Apple's GPUs, which have no float64."""
    if args.device.type == "mps":
        return torch.device("cpu")
    return args.device


def get_vector(net):
    """All weights of a network as one vector [P]."""
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@torch.no_grad()
def set_vector(net, vector):
    """Set the weights of a network to a vector [P]."""
    first = 0
    for p in net.parameters():
        last = first + p.numel()
        p.copy_(vector[first:last].view_as(p))
        first = last


def parallel(net, args):
    """The network as training calls it: DDP, with batch norm over all processes."""
    model = common.data_parallel(net, args.device)
    if args.compile:
        model = torch.compile(model)
    return model


def train_epoch(study, model, optimiser, loader, seed, epoch, factor=1.0):
    """One epoch of minimising `data_loss`: the mean loss, and the number of examples."""
    args = study.args
    # The order and the augmentation of examples, and masks of dropout, depend on (seed, epoch).
    loader.seed = seed
    common.seed_all(seed, STREAMS["epoch"], epoch, common.rank())
    model.train()
    total = torch.zeros((), device=args.device)
    examples = 0
    for _, batch in study.run.steps(loader, epoch):
        with common.autocast(args):
            outputs, _ = model(batch[0])
        loss = data_loss(outputs, batch.labels, factor)

        # DDP averages gradients over processes: this is the mean over the global batch.
        mean_loss = loss * common.world_size() / batch.global_size
        optimiser.zero_grad()
        mean_loss.backward()
        optimiser.step()

        total += loss.detach()
        examples += batch.global_size
    mean = common.all_reduce(total).item() / examples
    if not (math.isfinite(mean) and common.all_finite(model.state_dict())):
        raise Diverged(f"seed {seed}: the loss or a weight is not finite in epoch {epoch + 1}; "
                       "lower the learning rate")
    return mean, examples


def train_map(study, seed, dropout):
    """Train theta_m; returns the network with the weights of the best epoch by validation."""
    args = study.args
    common.seed_all(seed)
    net = make_network(args, study.sets.train, dropout)
    best = copy.deepcopy(net)
    # A buffer, so that the checkpoint of the best network also holds its score.
    best.register_buffer("val_lpd", torch.tensor(-1e30))
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    if args.opt == "adamw":
        optimiser = torch.optim.AdamW(net.parameters(), **options)
    else:
        optimiser = torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True, **options)
    model = parallel(net, args)

    name = f"seed{seed}-map"
    if dropout > 0:
        name += f"-dropout{dropout:g}"
    # The loop starts at the first epoch that is left, and `run.end_epoch` saves and logs.
    made_from = identity(study, seed, rate=dropout)
    for epoch in study.run.epochs(args.epochs, name, study.sets.train, made_from, net=net,
                                  optimiser=optimiser, best=best):
        # published code: the learning rate is constant within an epoch
        lr = args.lr * cosine(epoch / args.epochs)
        for group in optimiser.param_groups:
            group["lr"] = lr
        loss, examples = train_epoch(study, model, optimiser, study.map_loader, seed, epoch,
                                     MAP_LOSS_FACTOR)
        val_lpd = validation_lpd(study, [net.eval()])
        if val_lpd > best.val_lpd:  # never if it is NaN
            state = net.state_dict()
            state["val_lpd"] = torch.tensor(val_lpd)
            best.load_state_dict(state)
        study.run.end_epoch(loss, examples, val_lpd=val_lpd, lr=lr)
    return best.eval()


# SWA and SWAG


def iterates_of(study, seed, weights, rate):
    """Name and identity of SGD at one rate; iterate r = 1, ..., R is the piece <name>-<r>."""
    made_from = identity(study, seed, weights=weights, rate=rate)
    return f"seed{seed}-swag-lr{rate:g}", made_from


def train_swag(study, seed, net, rate):
    """SGD from theta_m at a constant rate: the weights after each epoch are an iterate.

    Returns the digest of the last trained weights. As published, without augmentation.
    """
    args = study.args
    name, made_from = iterates_of(study, seed, common.digest(net), rate)
    net = copy.deepcopy(net)
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=0.9,
                                weight_decay=args.weight_decay)
    model = parallel(net, args)
    for epoch in study.run.epochs(args.swag_epochs, name, study.sets.train, made_from, net=net,
                                  optimiser=optimiser):
        loss, examples = train_epoch(study, model, optimiser, study.swag_loader, seed, epoch)
        # The iterate is written before the checkpoint that counts it.
        study.run.save(f"{name}-{epoch + 1}", made_from, weights=get_vector(net).cpu())
        study.run.end_epoch(loss, examples, lr=rate)
    return common.digest(net)


def read_posterior(study, seed, weights, rate):
    """SWAG's mean, variances and deviations at one rate, from the iterates that were kept."""
    name, made_from = iterates_of(study, seed, weights, rate)
    iterates = []
    for r in range(1, study.args.swag_epochs + 1):
        state = study.run.load(f"{name}-{r}", made_from)
        if state is None:
            raise UserError(f"{study.run.dir / name}-{r}.pt not found; delete {name}.pt to train "
                            "all iterates of this rate again")
        iterates.append(state["weights"])
    iterates = torch.stack(iterates)                                   # [R, P]
    return swag_moments(iterates.to(float64_device(study.args)))


def blank_network(study):
    """A network whose weights are about to be set."""
    net = make_network(study.args, study.sets.train, 0.0)
    if batch_norms(net):
        common.data_parallel(net, study.args.device)  # for batch statistics of the global batch
    return net


def batch_norms(net):
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in net.modules() if isinstance(module, kind)]


@torch.no_grad()
def refresh_batch_norm(study, net):
    """Set the running statistics of batch norm to the mean of the batch statistics.

    The batches are those of the training set.
    """
    layers = batch_norms(net)
    if not layers:
        return
    net.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    for count, batch in enumerate(study.parts["train"].loader.epoch(), 1):
        for layer in layers:
            layer.momentum = 1 / count  # all batches weigh the same
        with common.autocast(study.args):
            net(batch[0])


def swa_network(study, mean):
    """The network of the mean of the iterates."""
    net = blank_network(study)
    set_vector(net, mean)
    refresh_batch_norm(study, net)
    return net.eval()


def swag_networks(study, seed, posterior, samples):
    """Yield networks that are samples of SWAG's posterior."""
    mean, variance, deviations = posterior
    net = blank_network(study)
    # Eight samples at a time: the deviations, which are large, are read once for all of them.
    for first in range(0, samples, 8):
        block = first // 8
        noise = common.seeded_noise((8, len(mean)), mean.device, seed, STREAMS["swag"], block)
        low_rank_noise = common.seeded_noise((8, len(deviations)), mean.device, seed,
                                             STREAMS["swag_low_rank"], block)
        drawn = swag_samples(mean, variance, deviations, noise, low_rank_noise)    # [8, P]
        for weights in drawn[:samples - first]:
            set_vector(net, weights)
            refresh_batch_norm(study, net)
            yield net.eval()


def choose_rates(study, seed, net):
    """Run SGD at all rates; validation chooses that of SWA, by its network, and that of SWAG.

    The iterates of the other rates are deleted. Returns their rates as "swa" and "swag", the digest
    of theta_m as "weights", and those of the last trained weights as "digests" {rate: digest}.
    """
    args = study.args
    weights = common.digest(net)

    def make():
        common.on_main(say_what_is_repeated, study, seed)
        swa_lpds = []
        swag_lpds = []
        digests = {}
        for rate in args.swag_lrs:
            swa_lpd = math.nan
            swag_lpd = math.nan
            try:
                digests[rate] = train_swag(study, seed, net, rate)
                posterior = read_posterior(study, seed, weights, rate)
                swa_lpd = validation_lpd(study, [swa_network(study, posterior[0])])
                networks = swag_networks(study, seed, posterior, args.val_samples)
                swag_lpd = validation_lpd(study, networks, args.val_samples)
            except Diverged as error:
                common.say(f"skipped: SWAG at the rate {rate:g} ({error})")
            swa_lpds.append(swa_lpd)
            swag_lpds.append(swag_lpd)
        return {"weights": weights, "digests": digests, "swa_lpds": swa_lpds,
                "swag_lpds": swag_lpds}

    made_from = identity(study, seed, weights=weights, rates=args.swag_lrs,
                         epochs=args.swag_epochs, val_samples=args.val_samples)
    choice = study.run.keep(f"seed{seed}-swag-choice", made_from, make)
    rates = {}
    for method in ("swa", "swag"):
        lpds = choice[f"{method}_lpds"]
        # A method that is not compared gets a rate, too, so that it can join the study later
        # without another run of SGD; if all its LPDs are infinite, it stops nothing.
        if method in args.methods or any(map(math.isfinite, lpds)):
            rates[method] = args.swag_lrs[index_of_best(lpds, "--swag-lrs")]
    common.on_main(delete_iterates, study, seed, rates)
    return choice | rates


def say_what_is_repeated(study, seed):
    """Before iterates are made that an earlier choice has deleted, say so."""
    missing = []
    for rate in study.args.swag_lrs:
        if not (study.run.dir / f"seed{seed}-swag-lr{rate:g}.pt").exists():
            missing.append(f"{rate:g}")
    if missing and (study.run.dir / f"seed{seed}-swag-choice.pt").exists():
        print(f"note: seed {seed} chose SWAG's learning rate with other options, and deleted the "
              f"iterates of other rates; SGD now runs at {', '.join(missing)}", flush=True)


def delete_iterates(study, seed, chosen):
    """Delete the iterates of all rates but the chosen ones: all would take about 1 TB (paper)."""
    for rate in study.args.swag_lrs:
        if rate in chosen.values() or study.args.eval:
            continue
        name = f"seed{seed}-swag-lr{rate:g}"
        # The checkpoint goes first: it must not count iterates that are gone.
        for pattern in (f"{name}.pt", f"{name}-*.pt"):
            for path in study.run.dir.glob(pattern):
                path.unlink()


# LLLA and LA-NF: the main process fits them to features, which all processes compute.


class Head:
    """The last layer of theta_m: its inputs for each set, and the curvature of the loss there.

    Both are computed when they are first needed, and not at all if the study is finished.
    """

    def __init__(self, study, net):
        self.study = study
        self.net = net
        self.theta = flat_head(net.head).detach().to(float64_device(study.args))   # [P]
        self.weights = common.digest(net)
        self.cached = {}

    def inputs(self, part):
        """A LastLayer, None except on the main process; all processes call this together."""
        if part not in self.cached:
            self.cached[part] = last_layer(self.study, self.net, part)
        return self.cached[part]

    @cached_property
    def spectrum(self):
        """The Spectrum of the curvature on the training set; on the main process, after `inputs`."""
        return find_spectrum(self.study, self.theta, self.cached["train"])

    def noise(self, samples, *key):
        """Standard normal noise [samples, P], a function of the key."""
        return common.seeded_noise((samples, len(self.theta)), self.theta.device, *key)


def last_layer(study, net, part):
    """The LastLayer of a set, on the main process; None on the others."""
    dataset = study.parts[part].dataset
    device = float64_device(study.args)
    rows = study.parts[part].rows
    _, features = outputs_and_features(study, net, part)
    if study.molecules:
        # There is a row of features for each atom.
        rows = data.entries_of(rows, dataset.sizes)
    columns = common.gather_rows([{"index": rows, "x": features}])
    if not columns:
        return None
    x = columns["x"].to(device)
    labels = dataset.labels.to(device)
    if not study.molecules:
        return LastLayer(x, labels)
    train = study.sets.train
    mean, std = energy_statistics(train)
    molecule = torch.arange(len(dataset)).repeat_interleave(dataset.sizes)
    offset = sum_by(molecule, mean + train.references[dataset.numbers], len(dataset))
    scale = torch.tensor(std, dtype=torch.float64)
    return LastLayer(x, labels, molecule.to(device), offset.to(device), scale.to(device))


def find_spectrum(study, theta, last):
    """The Spectrum of the curvature at theta, on the CPU where the solver of a GPU fails."""
    if study.molecules:
        find = molecule_spectrum
    elif study.args.structure == "full":
        find = full_spectrum
    else:
        find = diagonal_spectrum
    try:
        return find(theta, last)
    except RuntimeError as error:  # out of memory, or the matrix is too large for the GPU's solver
        if theta.device.type == "cpu":
            raise
        print(f"note: the eigenvalues of a matrix of {len(theta)} columns are computed on the CPU "
              f"({common.one_line(error)})", flush=True)
    return to_device(find(theta.cpu(), to_device(last, "cpu")), theta.device)


def to_device(fields, device):
    """A NamedTuple of tensors, of which some may be None, on a device."""
    moved = []
    for tensor in fields:
        if tensor is not None:
            tensor = tensor.to(device)
        moved.append(tensor)
    return type(fields)(*moved)


def fit_laplace(study, seed, head):
    """LLLA: the prior precision that validation chooses, and S sampled last layers.

    Returns {"precision", "lpds" of the grid, "heads" [S, P]}.
    """
    args = study.args

    def make():
        # Called by all processes; only the main one keeps the result.
        head.inputs("train")
        head.inputs("val")
        return common.on_main(sample_laplace, study, seed, head)

    made_from = identity(study, seed, weights=head.weights, structure=args.structure,
                         val_samples=args.val_samples, samples=args.samples)
    return study.run.keep(f"seed{seed}-llla", made_from, make)


def sample_laplace(study, seed, head):
    """What `fit_laplace` returns, on the main process."""
    args = study.args
    # The same noise for all members.
    noise = head.noise(args.val_samples, 0, STREAMS["llla_val"])
    lpds = precision_scores(head.theta, head.spectrum, head.inputs("val"), noise)
    precision = LAPLACE_GRID[index_of_best(lpds, "LLLA's prior precision")]
    noise = head.noise(args.samples, seed, STREAMS["samples"])
    heads = laplace_samples(head.theta, head.spectrum, precision, noise)
    return {"precision": precision, "lpds": lpds, "heads": heads.cpu()}


def fit_flow(study, seed, head, laplace):
    """LA-NF: the samples of LLLA through a flow, whose prior precision validation chooses.

    Returns {"precision", "lpds" of the grid, "heads" [S, P]}.
    """
    args = study.args

    def make():
        # Called by all processes; only the main one keeps the result.
        head.inputs("train")
        head.inputs("val")
        return common.on_main(sample_flow, study, seed, head, laplace["precision"])

    made_from = identity(study, seed, weights=head.weights, structure=args.structure,
                         layers=args.flow_layers, base=laplace["precision"],
                         val_samples=args.val_samples, samples=args.samples)
    return study.run.keep(f"seed{seed}-la_nf", made_from, make)


def sample_flow(study, seed, head, delta):
    """What `fit_flow` returns, on the main process; delta is the prior precision of LLLA."""
    args = study.args
    val = head.inputs("val")
    flows = train_flows(study, seed, head, delta)
    # The same noise for all members.
    noise = head.noise(args.val_samples, 0, STREAMS["la_nf_val"])
    base = laplace_samples(head.theta, head.spectrum, delta, noise)
    lpds = []
    for g in range(len(FLOW_GRID)):
        heads, _ = apply_flow([tensor[g] for tensor in flows], base)
        outputs = head_outputs(heads, val)
        lpds.append(log_predictive_density(outputs, val.labels))
    # published code: the largest of equally good precisions (LLLA: the smallest)
    g = len(lpds) - 1 - index_of_best(lpds[::-1], "LA-NF's prior precision")
    noise = head.noise(args.samples, seed, STREAMS["samples"])
    base = laplace_samples(head.theta, head.spectrum, delta, noise)
    heads, _ = apply_flow([tensor[g] for tensor in flows], base)
    return {"precision": FLOW_GRID[g], "lpds": lpds, "heads": heads.cpu()}


def train_flows(study, seed, head, delta):
    """Minimise the negative ELBOs of all prior precisions at once, with the same noise and batches.

    Returns the centres [G, T, P], and a and b [G, T], of the G flows.
    """
    args = study.args
    theta = head.theta
    train = head.inputs("train")
    n = len(train.labels)
    generator = torch.Generator().manual_seed(common.derive_seed(seed, STREAMS["flow_start"]))
    flows = initial_flows(len(FLOW_GRID), args.flow_layers, len(theta), generator)
    flows = nn.ParameterList(flows).to(theta.device)
    precisions = torch.tensor(FLOW_GRID, device=theta.device)
    optimiser = torch.optim.Adam(flows, 1e-3)
    steps = min(math.ceil(n / args.batch_size), args.limit_steps or n)
    made_from = identity(study, seed, weights=head.weights, structure=args.structure,
                         layers=args.flow_layers, base=delta)
    # Their last completed epoch is read, as in `train_map`.
    for epoch in study.run.epochs(FLOW_EPOCHS, f"seed{seed}-flows", identity=made_from,
                                  flows=flows, optimiser=optimiser):
        # Batches and noise depend on (seed, epoch).
        epoch_seed = common.derive_seed(seed, STREAMS["flow_epoch"], epoch)
        generator = torch.Generator().manual_seed(epoch_seed)
        batches = torch.randperm(n, generator=generator).split(args.batch_size)
        noise = torch.randn(steps, len(theta), generator=generator).to(theta)      # [steps, P]
        total = torch.zeros((), device=theta.device)
        for step in range(steps):
            lr = 1e-3 * cosine((epoch + step / steps) / FLOW_EPOCHS)
            optimiser.param_groups[0]["lr"] = lr
            batch = take(study, train, batches[step])
            losses = negative_elbo(list(flows), theta, head.spectrum, delta, precisions,
                                   noise[step:step + 1], batch, n)                 # [G]
            optimiser.zero_grad()
            losses.sum().backward()
            optimiser.step()
            total += losses.detach().mean()
        study.run.end_epoch(total / steps, n, advice="Use fewer --flow-layers")
    return [tensor.detach() for tensor in flows]


def take(study, last, rows):
    """The LastLayer of the training examples `rows` [B], which are on the CPU."""
    device = last.x.device
    examples = rows.to(device, non_blocking=True)
    if not study.molecules:
        return LastLayer(last.x[examples], last.labels[examples])
    # Indices are made on the CPU, so that nothing waits for the device.
    sizes = study.sets.train.sizes
    atoms = data.entries_of(rows, sizes).to(device, non_blocking=True)
    molecule = torch.arange(len(rows)).repeat_interleave(sizes[rows])
    molecule = molecule.to(device, non_blocking=True)
    return LastLayer(last.x[atoms], last.labels[examples], molecule, last.offset[examples],
                     last.scale)


# MC dropout


def dropout_networks(seed, net, samples):
    """Yield the network with dropout, `samples` times; the masks depend on (seed, sample)."""
    net.train()
    # Dropout alone is random: batch norm keeps its statistics.
    for layer in batch_norms(net):
        layer.eval()
    for sample in range(samples):
        common.seed_all(seed, STREAMS["dropout"], sample, common.rank())
        yield net


def choose_dropout(study, seed):
    """Train a network at each rate of dropout; validation chooses one, by its samples.

    Returns {"rate", "weights": the digest of its network, "lpds" of all rates}.
    """
    args = study.args

    def make():
        lpds = []
        digests = []
        for rate in DROPOUTS:
            lpd = math.nan
            digest = None
            try:
                net = train_map(study, seed, rate)
                digest = common.digest(net)
                networks = dropout_networks(seed, net, args.val_samples)
                lpd = validation_lpd(study, networks, args.val_samples)
            except Diverged as error:
                common.say(f"skipped: MC dropout at the rate {rate:g} ({error})")
            lpds.append(lpd)
            digests.append(digest)
        chosen = index_of_best(lpds, "MC dropout's rate")
        return {"rate": DROPOUTS[chosen], "weights": digests[chosen], "lpds": lpds}

    made_from = identity(study, seed, rates=DROPOUTS, val_samples=args.val_samples)
    return study.run.keep(f"seed{seed}-mcdo-choice", made_from, make)


# ---- Evaluation ---------------------------------------------------------------------------------
# What a posterior predicts for a set, in the order of the set, for each n of `sizes`:
#   classes    {"log_probs" [N, sizes, C], "entropy" [N, sizes]}, the Mixture of its first n samples
#   molecules  {"samples" [N, S, 2]}, mean and variance of every sample


@torch.no_grad()
def outputs_and_features(study, net, part):
    """The outputs [b, C] and the features of a network for this process's share of a set.

    Outputs are log probabilities; for molecules, mean and variance.
    """
    outputs = []
    features = []
    for batch in study.parts[part].loader.epoch():
        with common.autocast(study.args):
            output, feature = net(batch[0])
        outputs.append(output)
        features.append(feature)
    outputs = torch.cat(outputs).to(float64_device(study.args))
    if not study.molecules:
        outputs = outputs.log_softmax(1)
    return outputs, torch.cat(features)


def summarise(study, samples, sizes):
    """Predictions from an iterable of the outputs [b, C] of the samples, in one pass."""
    if study.molecules:
        return {"samples": torch.stack(list(samples), 1)}                      # [b, S, 2]
    mixtures = running_mixtures(samples, sizes)
    log_probs = torch.stack([mixture.log_probs for mixture in mixtures], 1)    # [b, sizes, C]
    entropy = torch.stack([mixture.entropy for mixture in mixtures], 1)        # [b, sizes]
    return {"log_probs": log_probs.float(), "entropy": entropy}


def predict_networks(study, networks, part, sizes):
    """Predictions of an iterable of sampled networks; {} except on the main process."""
    samples = (outputs_and_features(study, net, part)[0] for net in networks)
    predictions = summarise(study, samples, sizes)
    predictions["index"] = study.parts[part].rows
    return common.gather_rows([predictions])


def validation_lpd(study, networks, samples=1):
    """The log predictive density of sampled networks on the validation set."""
    predictions = predict_networks(study, networks, "val", [samples])
    return common.on_main(lpd_of, predictions, study.sets.val.labels)


def lpd_of(predictions, labels):
    """The log predictive density of the predictions for one size."""
    outputs = predictions.get("samples", predictions.get("log_probs"))     # [N, S or 1, C]
    return log_predictive_density(outputs.transpose(0, 1), labels)


def index_of_best(scores, what):
    """The index of the largest score, of equal ones the first; NaN and infinity do not count."""
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        raise UserError(f"no value of {what} gives a finite validation LPD; try others")
    return scores.index(max(finite))


def sample_counts(args, method):
    """The numbers of samples of a member that ensembles need: S // K for each K."""
    if method in POINTS:
        return [1]
    return sorted({args.samples // k for k in args.ensembles})


def evaluated(study):
    """The names of the parts that are evaluated."""
    return [part for part in study.parts if part not in ("train", "val")]


def keep_predictions(study, seed, method, predict, **made_from):
    """Keep what a posterior predicts for each set that is evaluated: predict(part, sizes).

    Returns {part: (name, identity)}, by which `run.load` reads it.
    """
    sizes = sample_counts(study.args, method)
    kept = {}
    for part in evaluated(study):
        name = f"seed{seed}-{method}-{part}"
        examples = study.parts[part].digest
        of_part = identity(study, seed, sizes=sizes, examples=examples, **made_from)
        study.run.keep(name, of_part, partial(predict, part, sizes), trains=False)
        kept[part] = name, of_part
    return kept


def predict_map(study, seed, net):
    """What the MAP network predicts."""
    def predict(part, sizes):
        return predict_networks(study, [net], part, sizes)

    return keep_predictions(study, seed, "map", predict, weights=common.digest(net))


def predict_swa(study, seed, choice):
    """What the network of the mean of the iterates predicts."""
    rate = choice["swa"]

    def predict(part, sizes):
        mean, _, _ = read_posterior(study, seed, choice["weights"], rate)
        return predict_networks(study, [swa_network(study, mean)], part, sizes)

    return keep_predictions(study, seed, "swa", predict, weights=choice["digests"][rate],
                            rate=rate, epochs=study.args.swag_epochs)


def predict_swag(study, seed, choice):
    """What samples of SWAG's posterior predict."""
    rate = choice["swag"]

    def predict(part, sizes):
        posterior = read_posterior(study, seed, choice["weights"], rate)
        networks = swag_networks(study, seed, posterior, sizes[-1])
        return predict_networks(study, networks, part, sizes)

    return keep_predictions(study, seed, "swag", predict, weights=choice["digests"][rate],
                            rate=rate, epochs=study.args.swag_epochs)


def predict_heads(study, seed, method, head, fitted):
    """What the sampled last layers of LLLA or LA-NF predict."""
    heads = fitted["heads"]                                            # [S, P]

    def predict(part, sizes):
        last = head.inputs(part)
        if last is None:
            return {}
        predictions = summarise(study, head_samples(heads[:sizes[-1]], last), sizes)
        return {name: values.cpu() for name, values in predictions.items()}

    return keep_predictions(study, seed, method, predict, weights=head.weights,
                            heads=digest_of([heads]))


def head_samples(heads, last):
    """Yield the outputs [N, C] of sampled last layers [S, P]; eight at a time fit in memory."""
    for block in heads.to(last.x).split(8):
        yield from head_outputs(block, last)


def predict_dropout(study, seed, choice):
    """What the network of the chosen rate predicts with dropout."""
    def predict(part, sizes):
        net = train_map(study, seed, choice["rate"])
        return predict_networks(study, dropout_networks(seed, net, sizes[-1]), part, sizes)

    return keep_predictions(study, seed, "mcdo", predict, weights=choice["weights"])


def list_ensembles(args):
    """The seeds of the members of all ensembles: the published ones, for each run of M members."""
    found = []
    for k in args.ensembles:
        if k > args.members:
            continue
        for run in range(args.runs):
            first = args.seed + run * args.members
            for chosen in member_combinations(args.members, k):
                found.append([first + member - 1 for member in chosen])
    return found


class ClassPrediction(NamedTuple):
    """What an ensemble predicts for N examples: the mixture of all its samples."""

    log_probs: Tensor  # [N, C]  log of the mean probability
    entropy: Tensor    # [N]     mean entropy of a sample
    samples: int

    def uncertainties(self):
        """Total and epistemic uncertainty (mutual information) in nats, [N]."""
        found = {"total": torch.special.entr(self.log_probs.exp()).sum(1)}
        # That of a single sample would be rounding errors.
        if self.samples > 1:
            found["epistemic"] = (found["total"] - self.entropy).clamp_min(0)
        return found

    def scores(self, labels):
        """What is compared between methods, of each example [N]."""
        lpd = self.log_probs.gather(1, labels[:, None])[:, 0]
        correct = self.log_probs.argmax(1) == labels
        return {"lpd": lpd, "accuracy": correct.double()}

    def metrics(self, labels):
        probs = self.log_probs.exp()
        nll = common.nll(self.log_probs, labels)
        return {"accuracy": common.accuracy(probs, labels), "lpd": -nll, "nll": nll,
                "brier": common.brier(probs, labels), "ece15": common.ece(probs, labels)}

    def columns(self, dataset, classes):
        """The columns of predictions.csv; uncertainties are in nats."""
        columns = common.prediction_columns(dataset, self.log_probs, classes)
        columns["aleatoric"] = self.entropy
        columns["epistemic"] = (columns["total"] - self.entropy).clamp_min(0)
        return columns


class EnergyPrediction(NamedTuple):
    """What an ensemble predicts for N molecules: an equal mixture of Gaussians, in eV."""

    means: Tensor      # [S, N]
    variances: Tensor  # [S, N]

    def uncertainties(self):
        """Total and epistemic uncertainty, as standard deviations [N]."""
        moments = common.gaussian_mixture_moments(self.means, self.variances)
        found = {"std": moments.total.sqrt()}
        if len(self.means) > 1:
            found["epistemic"] = moments.epistemic.sqrt()
        return found

    def scores(self, labels):
        """What is compared between methods, of each molecule [N]."""
        outputs = torch.stack([self.means, self.variances], -1)        # [S, N, 2]
        lpd = log_density(outputs, labels).logsumexp(0) - math.log(len(outputs))
        return {"lpd": lpd, "mae": (self.means.mean(0) - labels).abs()}

    def metrics(self, labels):
        return common.regression_metrics(self.means, self.variances, labels)

    def columns(self, dataset, classes):
        """The columns of predictions.csv; uncertainties are standard deviations."""
        moments = common.gaussian_mixture_moments(self.means, self.variances)
        columns = common.example_columns(dataset)
        columns["predicted"] = moments.mean
        columns["total"] = moments.total.sqrt()
        columns["aleatoric"] = moments.aleatoric.sqrt()
        columns["epistemic"] = moments.epistemic.sqrt()
        return columns


def read_members(study, kept, method, part):
    """{seed: what a member's posterior predicts for a set}."""
    states = {}
    for seed, by_method in kept.items():
        name, made_from = by_method[method][part]
        states[seed] = study.run.load(name, made_from)
        if states[seed] is None:
            raise UserError(f"{study.run.dir / name}.pt could not be saved: the directory is "
                            "read-only; evaluate a copy of it")
    return states


def predict_ensemble(study, method, members):
    """The prediction of K members together, each with its share of the samples."""
    share = 1
    if method not in POINTS:
        share = study.args.samples // len(members)
    if study.molecules:
        samples = [member["samples"][:, :share] for member in members]
        samples = torch.cat(samples, 1)                                # [N, S, 2]
        means, variances = samples.transpose(0, 1).unbind(-1)
        return EnergyPrediction(means, variances)
    at = sample_counts(study.args, method).index(share)
    mixtures = []
    for member in members:
        mixtures.append(Mixture(member["log_probs"][:, at], member["entropy"][:, at]))
    log_probs, entropy = mix(mixtures)
    return ClassPrediction(log_probs, entropy, share * len(members))


def predictions_of(study, kept, method, part):
    """Yield (seeds of its members, prediction) of each ensemble of a method for a set."""
    states = read_members(study, kept, method, part)
    for seeds in list_ensembles(study.args):
        members = [states[seed] for seed in seeds]
        yield seeds, predict_ensemble(study, method, members)


def describe(study, method, seeds):
    """What a row is about. Ensembles are told apart by the seeds of their members."""
    return {"method": f"{METHODS[method]}, K={len(seeds)}", "seed": "+".join(map(str, seeds)),
            "members": seeds, "set": study.sets.test.name, "n": len(study.sets.test)}


def evaluate_method(study, kept, method):
    """The rows of all ensembles of a method, and their scores {(K, metric): [[N] of each]}."""
    labels = study.sets.test.labels
    rows = []
    scores = {}
    inside = []
    for seeds, prediction in predictions_of(study, kept, method, "test"):
        rows.append(describe(study, method, seeds) | prediction.metrics(labels))
        inside.append(prediction.uncertainties())
        for metric, values in prediction.scores(labels).items():
            scores.setdefault((len(seeds), metric), []).append(values)
    for name in study.sets.ood:
        outside = predictions_of(study, kept, method, f"ood-{name}")
        for uncertainties, (seeds, prediction) in zip(inside, outside):
            row = describe(study, method, seeds) | {"against": name}
            rows.append(row | detection_metrics(uncertainties, prediction.uncertainties()))
    return rows, scores


def detection_metrics(inside, outside):
    """AUROC, AUPR and FPR at 95 % TPR of the total and the epistemic uncertainty."""
    metrics = {}
    for name in inside:
        found = common.ood_metrics(inside[name], outside[name], larger_means="ood")
        for metric, value in found.items():
            metrics[f"{metric}_{name}"] = value  # for example auroc_total
    return metrics


class Difference(NamedTuple):
    """The difference to DE of the same members: mean over the ensembles of K and the examples."""

    method: str
    k: int
    metric: str
    mean: float
    interval: float  # 1.96 standard errors over the examples, which are paired


def compare(method, rows, scores, base):
    """The Differences of a method, given its scores and those of DE (`base`), by K and metric.

    Each row of the test set also gets the difference of its ensemble, as <metric>_minus_de.
    """
    differences = []
    for (k, metric), values in scores.items():
        change = torch.stack(values) - torch.stack(base[k, metric])    # [ensembles, N]
        of_k = [row for row in rows if len(row["members"]) == k and "against" not in row]
        for row, of_ensemble in zip(of_k, change, strict=True):
            row[f"{metric}_minus_de"] = of_ensemble.mean().item()
        of_examples = change.mean(0)                                   # [N]
        mean = of_examples.mean().item()
        interval = 1.96 * of_examples.std().item() / math.sqrt(len(of_examples))
        differences.append(Difference(METHODS[method], k, metric, mean, interval))
    return differences


def say_differences(differences):
    """Print a table for each metric, with a line for each method and a column for each K."""
    tables = {}  # {metric: {method: line}}
    for d in differences:
        lines = tables.setdefault(d.metric, {})
        line = lines.setdefault(d.method, {f"{d.metric} minus DE": d.method})
        line[f"K={d.k}"] = f"{d.mean:+.4f} ± {d.interval:.4f}"
    common.say("\ndifference to DE of the same members: mean ± 1.96 standard errors over the test "
               "examples")
    for lines in tables.values():
        common.say("\n" + common.format_table(list(lines.values())))


def write_predictions(study, kept):
    """--predict: predictions.csv of the first of the largest ensembles, for each method."""
    dataset = study.sets.predict
    seeds = max(list_ensembles(study.args), key=len)
    table = {"method": []}
    for method in study.args.methods:
        states = read_members(study, kept, method, "predict")
        prediction = predict_ensemble(study, method, [states[seed] for seed in seeds])
        columns = prediction.columns(dataset, getattr(study.sets.train, "classes", ()))
        table["method"] += [METHODS[method] for _ in range(len(dataset))]
        for name, values in common.as_json(columns).items():
            table.setdefault(name, []).extend(values)
    study.run.write_csv("predictions.csv", table)


# ---- Plots --------------------------------------------------------------------------------------


def plot_differences(study, differences):
    """The paper's question: the difference to DE of the same members, by their number K."""
    methods = list(dict.fromkeys(d.method for d in differences))
    metrics = list(dict.fromkeys(d.metric for d in differences))
    ks = list(dict.fromkeys(d.k for d in differences))
    figure, axes = common.make_figure(1, len(metrics), figsize=(4.5 * len(metrics), 3.8))
    for axis, metric in zip(axes, metrics):
        axis.axhline(0, color="black", lw=1, label="DE")
        for i, (method, colour) in enumerate(zip(methods, common.colours(len(methods)))):
            shown = [d for d in differences if d.method == method and d.metric == metric]
            # Methods stand side by side at each K.
            shift = 0.08 * (i - (len(methods) - 1) / 2)
            places = [place + shift for place in range(len(ks))]
            means = [d.mean for d in shown]
            intervals = [d.interval for d in shown]
            axis.errorbar(places, means, intervals, fmt="o-", ms=4, lw=1, capsize=2, color=colour,
                          label=method)
        axis.set(xlabel="number of members K", ylabel=f"{metric} minus that of DE")
        axis.set_xticks(range(len(ks)), ks)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle("bars: 1.96 standard errors over paired test examples", fontsize=9)
    study.run.save_figure(figure, "differences.png")


# ---- Main ---------------------------------------------------------------------------------------


def load_images(args):
    """Training, validation and test images with the published split, which no seed changes."""
    sets = data.load_sets(args.dataset, args.data_dir, val_fraction=0, image_size=args.image_size)
    train = in_memory(sets.train)
    val = in_memory(sets.val)
    if val is not None:
        common.refuse(args, ["num_val"], f"on {args.dataset}, which has a folder val")
    else:
        num_val = args.num_val or len(train) // 10
        if not 0 < num_val < len(train):
            raise UserError(f"--num-val {num_val}: {args.dataset} has {len(train)} training images")
        # published code: the first images of this permutation
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        val = train.select(order[:num_val])
        train = train.select(order[num_val:])
    train = data.evenly(train, args.limit_train)
    # Every channel has the mean and the standard deviation of the training images.
    pixels = train.images.float()
    if train.images.dtype == torch.uint8:
        pixels = pixels / 255
    std, mean = torch.std_mean(pixels, (0, 2, 3))
    std[std == 0] = 1  # a channel may be empty
    train = dataclasses.replace(train, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return train, data.match(val, train), data.match(in_memory(sets.test), train)


def in_memory(dataset):
    """A set of images in memory, decoded if it lies in files."""
    if isinstance(dataset, data.StreamedSet):
        return common.on_each_machine(dataset.in_memory)
    return dataset


def load_texts(args):
    """Training, validation and test sentences."""
    train = data.load_text(args.dataset, "train", args.data_dir, vocab_file=args.vocab)
    val = data.load_text(args.dataset, "val", args.data_dir, like=train)
    test = data.load_text(args.dataset, "test", args.data_dir, like=train)
    if args.dataset == "sst2" and not common.on_main(data.sst2_has_test_labels, args.data_dir):
        common.say("note: test.tsv of SST-2 has no labels (GLUE), so dev.tsv is the test set, and "
                   f"{len(val)} rows of train.tsv are the validation set")
    return data.evenly(train, args.limit_train), val, test


def load_molecules(args):
    """Training, validation and test molecules."""
    train = data.load_molecules(args.dataset, "train", args.data_dir, target=args.target)
    val = data.load_molecules(args.dataset, "val", args.data_dir, target=args.target)
    test = data.load_molecules(args.dataset, "test", args.data_dir, target=args.target)
    return data.evenly(train, args.limit_train), val, test


def load_sets(args):
    """All sets of a study, as data.Sets."""
    if args.dataset in data.TEXTS:
        train, val, test = load_texts(args)
    elif args.dataset in data.MOLECULES:
        train, val, test = load_molecules(args)
    else:
        train, val, test = load_images(args)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    if args.dataset not in data.MOLECULES:
        counts = train.labels.bincount(minlength=train.num_classes)
        if counts.min() == 0:
            raise UserError(f"{train.name}: no training example of class {int(counts.argmin())}; "
                            "raise --limit-train")
    ood = data.ood_sets(args.ood, train, args.data_dir, required="ood" in args.explicit)
    ood = {name: data.evenly(dataset, args.limit_test) for name, dataset in ood.items()}
    predict = None
    if args.predict:
        predict = data.predict_set(args.predict, train, args.data_dir)
    return data.Sets(train, val, data.evenly(test, args.limit_test), ood, predict)


def make_loader(dataset, args, batch_size, shuffle=False, augment="none"):
    """Batches of this process, on its device; batch[0] is what a network takes."""
    if isinstance(dataset, data.ImageSet):
        return data.Loader(dataset, batch_size, args.device, shuffle=shuffle, augment=augment,
                           workers=args.workers, channels_last=True)
    return data.SequenceLoader(dataset, batch_size, args.device, shuffle=shuffle)


def make_parts(sets, args):
    """{name: Part} of all sets of a study."""
    named = {"train": sets.train, "val": sets.val, "test": sets.test}
    for name, dataset in sets.ood.items():
        named[f"ood-{name}"] = dataset
    if sets.predict is not None:
        named["predict"] = sets.predict
    batch_size = 512 if args.device.type == "cuda" else 100
    data.check_sizes(*named.values(), limit=batch_size)
    parts = {}
    for name, dataset in named.items():
        loader = make_loader(dataset, args, batch_size)
        rows = torch.cat([batch.index.cpu() for batch in loader.epoch()])
        tensors = [value for value in vars(dataset).values() if torch.is_tensor(value)]
        parts[name] = Part(dataset, loader, rows, digest_of(tensors))
    return parts


def check_network(train_set, args):
    """Refuse, before training, a network that is impossible; on the main process."""
    # The smallest batch is the last one of an epoch; two examples show what more would.
    smallest = len(train_set) % args.batch_size or args.batch_size
    few = train_set.select(slice(min(smallest, 2)))
    batch = next(iter(make_loader(few, args, len(few)).epoch()))
    try:
        net = make_network(args, train_set, args.dropout)
        outputs, features = net.train()(batch[0])
        net.head(features)
        data_loss(outputs, batch.labels)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} example(s) of {train_set.name}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None
    if "mcdo" in args.methods and not any(isinstance(m, nn.Dropout) for m in net.modules()):
        raise UserError(f"--model {args.model} has no dropout; leave mcdo out of --methods")
    # The matrix of the last layer, its eigenvectors and copies of both, in float64.
    p = len(flat_head(net.head))
    needed = 40 * p**2
    memory = common.device_memory(torch.device("cpu"))
    is_full = args.structure == "full" and uses(args, "llla", "la_nf")
    if is_full and memory and needed > memory:
        raise UserError(f"the matrix of a last layer of {p} numbers needs {needed / 1e9:.0f} GB of "
                        f"memory, and there are {memory / 1e9:.0f} GB; use --structure diag")


def bytes_of_predictions(study, method):
    """The size of what a member's posterior predicts for all sets that are evaluated."""
    counts = sample_counts(study.args, method)
    if study.molecules:
        of_example = 16 * counts[-1]
    else:
        of_example = len(counts) * (4 * study.sets.train.num_classes + 8)
    examples = sum(len(study.parts[part].dataset) for part in evaluated(study))
    return examples * of_example


def check_room(study):
    """Print the disk space that the study needs; refuse to start if there is less."""
    args = study.args
    net = make_network(args, study.sets.train, args.dropout)
    weights = get_vector(net).nbytes
    # A checkpoint holds the network, that of its best epoch, and the state of the optimiser.
    of_member = 4 * weights
    iterates = 0
    if "mcdo" in args.methods:
        of_member += 4 * weights * len(DROPOUTS)
    if uses(args, "swa", "swag"):
        # Those of at most two rates are kept, but while a member chooses its rates, all are there.
        of_member += 2 * weights * args.swag_epochs
        iterates = weights * args.swag_epochs * len(args.swag_lrs)
    for method in args.methods:
        of_member += bytes_of_predictions(study, method)
    needed = of_member * args.members * args.runs + iterates

    there = sum(path.stat().st_size for path in study.run.dir.glob("*.pt"))
    folder = study.run.dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    sizes = (f"about {needed / 1e9:.3g} GB in {study.run.dir}, which has {there / 1e9:.3g} GB, and "
             f"{free / 1e9:.3g} GB are free")
    print(f"the files of this study take {sizes}", flush=True)
    if needed > there + free and not args.eval:
        raise UserError(f"the files of this study take {sizes}; make room, use another --out-dir, "
                        "or fewer --members, --swag-lrs or --swag-epochs")


def run_name(args):
    """The name of the run directory, which members of all seeds share."""
    name = [data.set_name(args.dataset), args.model]
    if args.width != 1:
        name.append(f"w{args.width:g}")
    return common.join_name(*name)


def open_study(args):
    """Load all sets, and check everything that could fail, before anything is trained."""
    # The run directory belongs to the options of MAP training. Members of all seeds lie in it side
    # by side, with what other options made of them.
    names = [name for name in args.identity if name != "seed" and name not in USED_BY]
    run = common.Run(args, "swag_laplace_ensembles", run_name(args), names)
    sets = load_sets(args)
    common.on_main(check_network, sets.train, args)
    # published code: MAP alone sees augmented images
    swag_loader = make_loader(sets.train, args, args.batch_size, shuffle=True)
    map_loader = swag_loader
    if args.augment:
        map_loader = make_loader(sets.train, args, args.batch_size, shuffle=True,
                                 augment="crop_flip")
    parts = make_parts(sets, args)
    molecules = args.dataset in data.MOLECULES
    study = Study(args, run, sets, parts, map_loader, swag_loader, molecules)
    common.on_main(check_room, study)
    return study


def evaluate(study, kept):
    """The rows and Differences of the study, and its files; on the main process."""
    args = study.args
    rows, base = evaluate_method(study, kept, "map")
    differences = []
    for method in args.methods[1:]:
        method_rows, scores = evaluate_method(study, kept, method)
        differences += compare(method, method_rows, scores, base)
        rows += method_rows
    if args.predict:
        write_predictions(study, kept)
    if args.plot and differences:
        plot_differences(study, differences)
    return rows, differences


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    study = open_study(args)
    kept = {}  # {seed: {method: {part: (file name, identity)}}}
    for seed in range(args.seed, args.seed + args.members * args.runs):
        # The network theta_m: by itself, a member of deep ensembles.
        net = train_map(study, seed, args.dropout)
        kept[seed] = {"map": predict_map(study, seed, net)}
        # SGD from theta_m, at rates that validation chooses: the mean of its iterates, and a
        # Gaussian over all weights.
        if uses(args, "swa", "swag"):
            choice = choose_rates(study, seed, net)
            if "swa" in args.methods:
                kept[seed]["swa"] = predict_swa(study, seed, choice)
            if "swag" in args.methods:
                kept[seed]["swag"] = predict_swag(study, seed, choice)
        # A Gaussian over the last layer, and that Gaussian through a flow, with prior precisions
        # that validation chooses.
        if uses(args, "llla", "la_nf"):
            head = Head(study, net)
            laplace = fit_laplace(study, seed, head)
            if "llla" in args.methods:
                kept[seed]["llla"] = predict_heads(study, seed, "llla", head, laplace)
            if "la_nf" in args.methods:
                refined = fit_flow(study, seed, head, laplace)
                kept[seed]["la_nf"] = predict_heads(study, seed, "la_nf", head, refined)
        # A network of its own with dropout, at a rate that validation chooses.
        if "mcdo" in args.methods:
            choice = choose_dropout(study, seed)
            kept[seed]["mcdo"] = predict_dropout(study, seed, choice)
    # Ensembles of K members, and their differences to deep ensembles of the same members.
    rows, differences = common.on_main(evaluate, study, kept)
    columns = ["accuracy", "lpd", "lpd_minus_de", "ece15", "auroc_total"]
    if study.molecules:
        columns = ["mae", "lpd", "lpd_minus_de", "ece", "auroc_std"]
    rows = study.run.report(rows, columns, differences=[d._asdict() for d in differences])
    if differences:
        say_differences(differences)
    return rows


if __name__ == "__main__":
    common.launch(main)
