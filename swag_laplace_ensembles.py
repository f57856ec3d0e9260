"""Local posteriors in deep ensembles: SWAG, last-layer Laplace, and its refinement by a flow.

Jordahn, Jensen, Schmidt, Andersen, "On Local Posterior Structure in Deep Ensembles", AISTATS 2025,
arXiv:2503.13296. Does an ensemble of posteriors predict better than a deep ensemble? M networks
theta_m (MAP) are trained, and each gets local posteriors q (`fit_member`). Ensembles of K of them
(`member_combinations`) average S samples, S // K of each (`combine_members`):

  p(y | x) = (1 / S) sum_s p(y | x, theta_s)

  DE          theta_m itself, a point
  SWA, SWAG   R iterates w_r of SGD that starts at theta_m: their mean, also a point, and
              N(mean, diag(d) / 2 + D^T D / (2 (R - 1))), D_r = w_r - mean, d = mean_r D_r^2
              (`swag_moments`, `swag_samples`, `fit_swag`)
  LLLA        N(theta, (H + delta I)^-1) of the last layer, H its generalised Gauss-Newton matrix
              (for molecules the Hessian): `full_spectrum`, `laplace_samples`, `fit_llla`
  LA-NF       the Gaussian of LLLA through T radial flows, fitted by the ELBO (`apply_flow`,
              `negative_elbo`, `fit_la_nf`)
  MC dropout  a network that is trained, and sampled, with dropout (`fit_mcdo`)

Usage:
  python swag_laplace_ensembles.py                        # dirty_glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 swag_laplace_ensembles.py --dataset cifar10   # the paper's WRN-16-4
  python swag_laplace_ensembles.py --map-paths FILE.pt ...                  # published networks
  python swag_laplace_ensembles.py --members 1 --seed 3     # one member, on any machine: its files
      seed3-* go into the directory of a study, which then trains the others

Expected (more in tests/RESULTS.md): LPD minus that of DE of the same members, mean of --seed 1, 6
  and 11, K = 1 and 5: SWA +.020, +.012; SWAG +.053, +.005; LLLA +.031, -.012; LA-NF +.051, -.015.

Differences from the published code:
  - SWAG's variances. Published: differences of squares in float32, which changes logits by up to
    0.4 %. Here: means of squared deviations. Published: FRN's frozen epsilon is sampled, too, and
    moves by 70 times its size. Here: only what is trained is sampled.
  - Batch norm. Published: its statistics stay those of theta_m. Here: they are computed again on
    the training set, for SWA and for every sample of SWAG.
  - Samples. Published: each ensemble draws anew, and noise is fresh for each prior precision.
    Here: the first S // K samples of a member serve all its ensembles, and precisions share noise
    (those of LA-NF also batches). Equal ensembles count once, and K = 1 gives each member once.
  - LLLA. Published: Cholesky's root of the covariance. Here: the symmetric root.
  - MC dropout. Published: a single sample has no dropout. Here: it has.
  - AUPR (in) and FPR at 95 % TPR. Published: the OOD set is positive. Here: the test set.
  - SST-2. Published: BERT's word pieces. Here: those of the training sentences, unless --vocab
    gives BERT's. Without labels in test.tsv (GLUE), dev.tsv is the test set.
  - Not here: IVON, SGD's iterates as samples, other predictions of LLLA, planar flows, corrupted
    images, Yahoo finance, Alchemy, early stopping, which only affects WRN-28-10.
"""

import argparse
import copy
import itertools
import math
import os
import random
import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of math, random, typing and torch.
#
# theta [P] is a last layer as one vector: its weight [C, D] row by row, then its bias [C].
# outputs [S, N, C] of S samples are log probabilities. Where energies of molecules are predicted
# (energies=True), C is 2: theta gives the mean and the spread of an atom's energy, and outputs
# are the mean and the variance of a molecule's.


def swag_moments(iterates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SWAG's mean [P], variances d [P] and deviations D [R, P] of R iterates [R, P].

    d = max(mean_r D_r^2, 1e-8), and D_r = w_r - mean, with the final mean as in the paper (in the
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
    return mean, variance.clamp_min_(1e-8), deviations


def swag_samples(mean: Tensor, variance: Tensor, deviations: Tensor, noise: Tensor,
                 low_rank_noise: Tensor) -> Tensor:
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

    The energy of a molecule is a sum over its atoms, so x has a row for each of all A atoms.
    """

    x: Tensor                       # [N, D] features; for energies [A, D]
    labels: Tensor | None           # [N] int64; for energies float64, in eV
    energies: bool = False          # whether energies are predicted, not classes
    molecule: Tensor | None = None  # [A] which molecule an atom belongs to
    offset: Tensor | None = None    # [N] the known part of an energy, in eV
    scale: Tensor | None = None     # the unit of the network's energies, in eV


def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Sum the rows of `values` that have the same `index` in 0..count-1: [count, ...]."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def flat_head(head: nn.Linear) -> Tensor:
    """theta [P] of a linear layer; for a posterior, detach it."""
    return torch.cat([head.weight.flatten(), head.bias])


def head_outputs(theta: Tensor, last: LastLayer) -> Tensor:
    """The outputs [S, N, C] of S last layers theta [S, P], in one matrix product."""
    samples = len(theta)
    dim = last.x.shape[1]
    classes = theta.shape[1] // (dim + 1)
    weight = theta[:, :-classes].reshape(samples * classes, dim)
    bias = theta[:, -classes:].flatten()
    z = F.linear(last.x, weight, bias).view(-1, samples, classes).transpose(0, 1)
    if last.energies:
        return energy_outputs(z, last)
    return z.log_softmax(-1)


def energy_outputs(z: Tensor, last: LastLayer) -> Tensor:
    """Mean and variance [S, N, 2] of energies of molecules, from z [S, A, 2] of their atoms."""
    variance = (F.softplus(z[..., 1]) + 1e-8).square()
    atoms = torch.stack([z[..., 0], variance], -1)                             # [S, A, 2]
    sums = sum_by(last.molecule, atoms.transpose(0, 1), len(last.offset))      # [N, S, 2]
    sums = sums.transpose(0, 1).double()
    mean = last.offset + last.scale * sums[..., 0]
    return torch.stack([mean, last.scale.square() * sums[..., 1]], -1)


def log_likelihood(outputs: Tensor, labels: Tensor, energies: bool = False) -> Tensor:
    """log p(y_n | theta_s) [S, N] in nats: categorical; of energies, Gaussian."""
    if not energies:
        index = labels.expand(len(outputs), -1)[..., None]                     # [S, N, 1]
        return outputs.gather(-1, index)[..., 0]
    mean, variance = outputs.unbind(-1)
    distance = (labels - mean).square() / variance
    return -0.5 * (distance + variance.log() + math.log(2 * math.pi))


def log_predictive_density(outputs: Tensor, labels: Tensor, energies: bool = False) -> float:
    """LPD = mean_n log (1/S) sum_s p(y_n | theta_s), in nats: the log of a mean.

    outputs [S, N, C]; labels [N].
    """
    log_p = log_likelihood(outputs, labels, energies).double()                 # [S, N]
    mixture = log_p.logsumexp(0) - math.log(len(log_p))
    return mixture.mean().item()


def summed_loss(outputs: Tensor, labels: Tensor, energies: bool = False,
                factor: float = 1.0) -> Tensor:
    """The loss of training, a sum over the batch: the cross entropy of logits [B, C].

    Of energies with mean m and variance v [B, 2]: factor (log v + (y - m)^2 / v) / 2.
    """
    if not energies:
        return F.cross_entropy(outputs, labels, reduction="sum")
    mean, variance = outputs.unbind(-1)
    loss = variance.log() + (labels - mean).square() / variance
    return factor * 0.5 * loss.sum()


class Spectrum(NamedTuple):
    """A matrix H = Q diag(values) Q^T: adding delta I only shifts its eigenvalues."""

    values: Tensor        # [P]
    basis: Tensor | None  # Q [P, P]; None if H is diagonal


def symmetric_spectrum(h: Tensor) -> Spectrum:
    """The Spectrum of a symmetric matrix."""
    try:
        return Spectrum(*torch.linalg.eigh(h))
    except RuntimeError:  # the solvers of GPUs fail for about 25,000 columns
        values, vectors = torch.linalg.eigh(h.cpu())
        return Spectrum(values.to(h.device), vectors.to(h.device))


def diagonal_spectrum(theta: Tensor, last: LastLayer) -> Spectrum:
    """The diagonal of the generalised Gauss-Newton matrix H, see `full_spectrum`."""
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    variance = probs * (1 - probs)
    of_weight = variance.T @ last.x.square()                                   # [C, D]
    return Spectrum(torch.cat([of_weight.flatten(), variance.sum(0)]), None)


def full_spectrum(theta: Tensor, last: LastLayer) -> Spectrum:
    """The generalised Gauss-Newton matrix H of the cross entropy, a sum over examples, no mean.

        H = sum_n (diag p_n - p_n p_n^T) (x) x~_n x~_n^T,   x~ = (x, 1)

    (x) is the Kronecker product. No Jacobian is formed: the block of the classes a and b is the
    Gram matrix of the features, in which example n has the weight p_a ([a = b] - p_b). Sums and
    eigenvalues are float64. Adding the same to all logits changes no probability, so H has D + 1
    eigenvalues 0 (negative ones are rounding errors). In these directions the posterior is as wide
    as the prior, which is harmless.
    """
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    classes = probs.shape[1]
    x = torch.cat([last.x, last.x.new_ones(len(last.x), 1)], 1)                # [N, D + 1]
    dim = x.shape[1]
    blocks = torch.zeros(classes, dim, classes, dim, dtype=torch.float64, device=x.device)
    for x_rows, p in zip(x.split(4096), probs.split(4096)):  # because a copy of x may not fit
        for a in range(classes):
            for b in range(a, classes):
                weight = p[:, a] * (float(a == b) - p[:, b])                   # [n]
                blocks[a, :, b] += (weight[:, None] * x_rows).T @ x_rows
    for a in range(classes):
        for b in range(a):
            blocks[a, :, b] = blocks[b, :, a]
    # In theta's order: the weights of all classes, then their biases.
    index = torch.arange(classes * dim, device=x.device).view(classes, dim)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    h = blocks.view(classes * dim, classes * dim)[order][:, order]
    values, vectors = symmetric_spectrum(h)
    return Spectrum(values.clamp_min(0), vectors)


def energy_spectrum(theta: Tensor, last: LastLayer) -> Spectrum:
    """The Hessian in theta of `summed_loss` for energies, whose eigenvalues may be negative.

    Exact, in float64, by P backward passes: theta is short.
    """
    last = last._replace(x=last.x.double())

    def loss(theta: Tensor) -> Tensor:
        return summed_loss(head_outputs(theta[None], last)[0], last.labels, energies=True)

    return symmetric_spectrum(torch.autograd.functional.hessian(loss, theta.double()))


def laplace_samples(theta: Tensor, spectrum: Spectrum, prior_precision: float | Tensor,
                    noise: Tensor) -> Tensor:
    """Samples [..., S, P] of N(theta, (H + delta I)^-1), for standard normal noise [S, P].

    delta is the prior precision, a number or [G, 1, 1]. The samples are
    theta + Q (values + delta)^-1/2 Q^T noise: the symmetric root does not depend on the signs of
    eigenvectors. NaN if H + delta I is not positive.
    """
    precision = (spectrum.values + prior_precision).to(noise)
    root = torch.where(precision > 0, precision, torch.nan).rsqrt()
    if spectrum.basis is None:
        return theta + noise * root
    basis = spectrum.basis.to(noise)
    return theta + (noise @ basis * root) @ basis.T


# The published grids of prior precisions: 10^-4 ... 10^4 in steps of 10^0.4; that of LA-NF.
LAPLACE_GRID = tuple(10 ** (-4 + 0.4 * i) for i in range(21))
FLOW_GRID = (1, 5, 10, 20, 30, 40, 50, 70, 90, 100, 125, 150, 175, 200, 500)


def precision_scores(theta: Tensor, spectrum: Spectrum, last: LastLayer,
                     noise: Tensor) -> list[float]:
    """The LPD of each prior precision of LAPLACE_GRID, with the same noise; NaN: no posterior."""
    precisions = torch.tensor(LAPLACE_GRID, dtype=torch.float64, device=theta.device)
    scores = []
    for samples in laplace_samples(theta, spectrum, precisions[:, None, None], noise):
        outputs = head_outputs(samples, last)
        scores.append(log_predictive_density(outputs, last.labels, last.energies))
    return scores


def initial_flows(count: int, layers: int, dim: int, generator: torch.Generator) -> list[Tensor]:
    """Centres [G, T, P], and a and b [G, T], of G equal flows: uniform in +- 1 / sqrt(P)."""
    bound = dim**-0.5
    flows = []
    for shape in ((layers, dim), (layers,), (layers,)):
        start = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        flows.append(start.expand(count, *shape).clone())
    return flows


def apply_flow(flow: list[Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
    """Send theta [..., P] through T radial flows: theta_T and log |det d theta_T / d theta| [...].

        y = x + beta h (x - x_0),   h = 1 / (alpha + |x - x_0|)

    flow: the centres x_0 [..., T, P], and a and b [..., T], with alpha = softplus(a) and
    beta = softplus(b) - alpha > -alpha, so that each flow is invertible.
    """
    centres, a, b = flow
    alphas = F.softplus(a)
    betas = F.softplus(b) - alphas
    dim = theta.shape[-1]
    log_det = 0.0
    for centre, alpha, beta in zip(centres.unbind(-2), alphas.unbind(-1), betas.unbind(-1)):
        offset = theta - centre
        r = offset.norm(dim=-1)
        h = 1 / (alpha + r)
        across = (dim - 1) * torch.log1p(beta * h)
        along = torch.log1p(beta * h - beta * h.square() * r)
        log_det = log_det + (across + along)
        theta = theta + (beta * h)[..., None] * offset
    return theta, log_det


def negative_elbo(flow: list[Tensor], theta: Tensor, spectrum: Spectrum, base_precision: float,
                  prior_precision: Tensor, noise: Tensor, last: LastLayer, n: int) -> Tensor:
    """The negative ELBO [G] of G flows at once, in nats, from one sample t of each.

        log q(t) - log N(t; 0, I / prior_precision) - (N / B) sum_b log p(y_b | t)

    q is N(theta, (H + base_precision I)^-1) through the flow, with the precision that Laplace's
    approximation has chosen; the prior's precision [G] is another one for each flow. Tensors of
    the flow [G, T, ...]; noise [1, P] for all or [G, P]; `last` holds the B examples of the batch;
    n is N.
    """
    dim = noise.shape[1]
    log_2pi = math.log(2 * math.pi)
    base = laplace_samples(theta, spectrum, base_precision, noise)
    t, log_det_flow = apply_flow(flow, base)                                   # [G, P], [G]
    log_det_precision = (spectrum.values + base_precision).log().sum().to(t)
    log_base = 0.5 * (log_det_precision - noise.square().sum(-1) - dim * log_2pi)
    log_q = log_base - log_det_flow
    weighted_norm = prior_precision * t.square().sum(-1)
    log_prior = 0.5 * (dim * (prior_precision.log() - log_2pi) - weighted_norm)
    log_p = log_likelihood(head_outputs(t, last), last.labels, last.energies).sum(1)
    return log_q - log_prior - n / len(last.labels) * log_p


def member_combinations(members: int, k: int) -> list[list[int]]:
    """The published ensembles of k of M members, as sorted member numbers from 1.

    Ensemble i = 1, ..., 30 is Python's random.sample of 1..M with the seed of Cantor's pairing,
    (k + i)(k + i + 1) / 2 + i. Here k = 1 gives each member once, and equal ensembles count once.
    """
    if k == 1:
        return [[member] for member in range(1, members + 1)]
    combinations = []
    for i in range(1, 31):
        seed = (k + i) * (k + i + 1) // 2 + i
        chosen = sorted(random.Random(seed).sample(range(1, members + 1), k))
        if chosen not in combinations:
            combinations.append(chosen)
    return combinations


class RunningMixture:
    """The mean prediction of the samples so far, none of which is kept."""

    def __init__(self):
        self.count = 0
        self.log_sum = torch.tensor(-math.inf)
        self.entropy_sum = 0.0

    def add(self, log_probs: Tensor) -> None:
        """One more sample [..., C]."""
        log_probs = log_probs.double()
        self.count += 1
        self.log_sum = torch.logaddexp(self.log_sum, log_probs)
        self.entropy_sum = self.entropy_sum + torch.special.entr(log_probs.exp()).sum(-1)

    def log_probs(self) -> Tensor:
        """The log of the mean probability [..., C]."""
        return self.log_sum - math.log(self.count)

    def entropy(self) -> Tensor:
        """The mean entropy of a sample [...], in nats."""
        return self.entropy_sum / self.count


# ---- Model --------------------------------------------------------------------------------------
# A network returns (outputs, features of its last layer `head`): for images and texts, logits
# [B, C] and [B, D]; for molecules, mean and variance of the energy [B, 2], and the features of all
# their atoms [A, D].


def widen(x):
    """bfloat16 as float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Network(nn.Module):
    """A backbone, which makes features, and a linear head, in float32 even under autocast."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs):
        features = widen(self.backbone(inputs))
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
    return nn.Sequential(OrderedDict(bn=nn.BatchNorm2d(channels), relu=nn.ReLU()))


def conv(c_in, c_out, kernel, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)


class WideBlock(nn.Module):
    """A residual block. Where the shape changes, its shortcut convolution sees norm_1(x), too."""

    def __init__(self, c_in, c_out, stride, norm, dropout):
        super().__init__()
        self.stride = stride
        self.norm_1 = norm(c_in)
        self.conv_1 = conv(c_in, c_out, 3, stride)
        self.norm_2 = norm(c_out)
        self.dropout = nn.Dropout(dropout)
        self.conv_2 = conv(c_out, c_out, 3)
        self.conv_shortcut = None
        if c_in != c_out or stride > 1:
            self.conv_shortcut = conv(c_in, c_out, 1)

    def forward(self, x):
        h = self.norm_1(x)
        if self.conv_shortcut is not None:
            # The strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
            x = self.conv_shortcut(F.avg_pool2d(h, 1, self.stride))
        return self.conv_2(self.dropout(self.norm_2(self.conv_1(h)))) + x


def wide_resnet(args, shape, depth, widening, norm=FRN):
    """WRN-depth-widening: (depth - 4) / 6 blocks in each of three stages of strides 1, 2, 2."""
    c_in = max(4, round(16 * args.width))
    layers = {"conv_1": conv(shape[0], c_in, 3)}
    for stage in range(3):
        blocks = nn.Sequential()
        c_out = max(4, round(16 * widening * args.width * 2**stage))
        for index in range((depth - 4) // 6):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(WideBlock(c_in, c_out, stride, norm, args.dropout))
            c_in = c_out
        layers[f"block_{stage + 1}"] = blocks
    layers |= {"norm_1": norm(c_in), "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return layers, c_in


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
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())

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


def bert(args, train_set, layers):
    """BERT with random weights: 256 wide, 8 heads, 2048 hidden units (paper)."""
    dim = 8 * max(1, round(32 * args.width))
    backbone = Bert(len(train_set.vocab), dim, layers, args.dropout)
    # published code: weights N(0, 0.02^2), biases 0, but for the head, which PyTorch initialises
    for name, parameter in backbone.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    nn.init.zeros_(backbone.words.weight[:1])
    return Network(backbone, nn.Linear(dim, train_set.num_classes))


class PaiNNLayer(nn.Module):
    """A message and an update (Schuett et al. 2021, equations 7 to 9).

    It changes the scalars s [A, F] and the vectors v [A, 3, F] of all atoms. rbf [E, radial + 1]:
    radial functions of the edges, and 1 for the bias, all times the cutoff function.
    """

    def __init__(self, features, radial, dropout):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(features, features), nn.SiLU(), nn.Dropout(dropout),
                                     nn.Linear(features, 3 * features))
        self.filter = nn.Linear(radial, 3 * features)
        self.u = nn.Linear(features, features, bias=False)
        self.v = nn.Linear(features, features, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * features, features), nn.SiLU(),
                                    nn.Dropout(dropout), nn.Linear(features, 3 * features))
        self.dropout = nn.Dropout(dropout)

    def forward(self, s, v, molecules, rbf, direction):
        # Messages: each atom sums over its neighbours.
        weight = torch.cat([self.filter.weight, self.filter.bias[:, None]], 1)
        weight = self.dropout(F.linear(rbf, weight))                   # [E, 3 F]
        messages = self.message(s).index_select(0, molecules.sources) * weight
        vv, ss, vs = messages.chunk(3, -1)                             # each [E, F]
        s = s + sum_by(molecules.targets, ss, len(s))
        along = direction[:, :, None] * vs[:, None]                    # [E, 3, F]
        along = torch.addcmul(along, v.index_select(0, molecules.sources), vv[:, None])
        v = v + sum_by(molecules.targets, along, len(s))

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

    def known_energies(self, numbers, molecule, count):
        """What is known of the energies [count] of molecules before training, in eV."""
        known = self.statistics[0] + self.references[numbers]                      # [A]
        return sum_by(molecule, known, count)

    def forward(self, molecules):
        starts = molecules.positions[molecules.sources]
        displacement = starts - molecules.positions[molecules.targets]             # [E, 3]
        distance = displacement.norm(dim=1, keepdim=True)                          # [E, 1]
        rbf = self.edge_features(distance)
        s = self.embedding(molecules.numbers)                                      # [A, F]
        v = s.new_zeros(len(s), 3, s.shape[1])
        for layer in self.layers:
            s, v = layer(s, v, molecules, rbf, displacement / distance)
        features = widen(self.readout(s))
        offset = self.known_energies(molecules.numbers, molecules.molecule, molecules.count)
        last = LastLayer(features, None, True, molecules.molecule, offset, self.statistics[1])
        with torch.autocast(features.device.type, enabled=False):
            outputs = head_outputs(flat_head(self.head)[None], last)               # [1, B, 2]
        return outputs[0], features


def energy_statistics(molecules):
    """Mean and std of (label - sum of references) / number of atoms over a MoleculeSet, in eV."""
    index = torch.arange(len(molecules)).repeat_interleave(molecules.sizes)
    known = sum_by(index, molecules.references[molecules.numbers], len(molecules))
    std, mean = torch.std_mean((molecules.labels - known) / molecules.sizes)
    if not std > 0:
        raise UserError(f"{molecules.name}: all training molecules have the same energy per atom; "
                        "a network can learn nothing from them")
    return mean.item(), std.item()


def painn(args, train_set):
    features = 2 * max(1, round(64 * args.width))
    return PaiNN(energy_statistics(train_set), train_set.references, features,
                 dropout=args.dropout)


# To add a network for images, add a function here. It returns the layers before the head and the
# number of their features, or a whole classifier that ends in a linear layer; where it has
# dropout, MC dropout sets the rate args.dropout.
NETWORKS = {
    "wrn_10_4": partial(wide_resnet, depth=10, widening=4),
    "wrn_16_4": partial(wide_resnet, depth=16, widening=4),
    "wrn_16_4_bn": partial(wide_resnet, depth=16, widening=4, norm=batch_norm_relu),
    "wrn_28_10": partial(wide_resnet, depth=28, widening=10),
}
# These are functions of the training set, and return a module that has a linear layer `head`.
SEQUENCE_NETWORKS = {
    "bert_256_2": partial(bert, layers=2),
    "bert_256_4": partial(bert, layers=4),
    "painn": painn,
}


def make_network(args, train_set):
    """The network --model for a training set, with random weights, on its device."""
    if args.dataset in data.TEXTS + data.MOLECULES:
        if args.model not in SEQUENCE_NETWORKS:
            raise UserError(f"--model {args.model}: choose one of {', '.join(SEQUENCE_NETWORKS)}")
        net = SEQUENCE_NETWORKS[args.model](args, train_set)
    else:
        net = Network(*common.backbone_and_head(args, NETWORKS, train_set.num_classes,
                                                train_set.shape))
    return net.to(args.device, memory_format=torch.channels_last)



# ---- Published networks -------------------------------------------------------------------------
# The authors' files (data.dtu.dk, project 236885) hold {"cfg", "state_dict"}; the configuration is
# made of objects of OmegaConf. Files are mapped into memory, because they may have 5 GB.


class ConfigNode:
    """Stands for the classes of OmegaConf: keeps an object's state, and runs none of its code."""

    def __setstate__(self, state):
        self.state = state

    def value(self, *names):
        """The value that the names lead to; None if the configuration does not have it."""
        node = self
        for name in names:
            content = node.state["_content"]
            if not isinstance(content, dict) or name not in content:
                return None
            node = content[name]
        return node.state.get("_val")


def empty_dict(*_):
    return {}


# What may stand in these files beside tensors, and what it becomes. Nothing else is unpickled.
OMEGACONF = ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode", "base.Metadata",
             "base.ContainerMetadata")
ALLOWED = [(ConfigNode, f"omegaconf.{name}") for name in OMEGACONF]
ALLOWED += [(empty_dict, "collections.defaultdict"), dict, list, int, Any]
# Classes of the authors' code, and what these posteriors are called here.
PUBLISHED_CLASSES = {"MAP": "map", "SWA": "swa", "SWAG": "swag", "LastLayerLaplace": "llla",
                     "PosteriorRefinedLastLayerLaplace": "la_nf"}
NOT_READ = {"MonteCarloDropout": "MC dropout", "IVONFromScratch": "IVON"}


class Published(NamedTuple):
    """A published network or posterior."""

    path: str
    name: str           # of the posterior: map, swa, swag, llla, la_nf10
    seed: int
    state: dict         # {name: tensor}
    config: ConfigNode
    checksums: list     # of all records of the file


def read_published(path):
    """The Published of a file, after its checksums are verified, record by record."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            checksums = [record.CRC for record in archive.infolist()]
        if damaged:
            raise ValueError(f"wrong checksum of {damaged}")
        with torch.serialization.safe_globals(ALLOWED):
            file = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        config = file["cfg"]
        kind = config.value("inference", "init", "_target_").split(".")[-1]
        state = file["state_dict"]
        name = PUBLISHED_CLASSES.get(kind, kind) + str(state.get("num_transforms", ""))
        seed = config.value("seed")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except Exception as error:  # of many types
        # PyTorch's text has escape codes, and proposes to run any code that the file holds.
        unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if unsafe:
            reason = f"it holds an object of {unsafe[1]}"
        elif "Weights only load failed" in str(error):
            reason = "it is not plain tensors"
        else:
            reason = common.one_line(error)
        raise UserError(f"{path} is damaged, or is not a published network, SWA, SWAG, LLLA or "
                        f"LA-NF ({reason})") from None
    if kind not in PUBLISHED_CLASSES:
        raise UserError(f"{path} holds {NOT_READ.get(kind, kind)}, which is not read here; give "
                        "files of MAP, SWA, SWAG, LLLA and LA-NF")
    return Published(str(path), name, seed, state, config, checksums)


def configured_options(args):
    """{"dataset", "model"}, as far as the first file of --map-paths says them."""
    if not args.map_paths:
        return {}
    config = read_published(args.map_paths[0]).config
    depth, widening, norm, dim, layers = [
        config.value("model", "backbone", name)
        for name in ("depth", "widen_factor", "norm_type", "hidden_size", "n_layers")]
    dataset = str(config.value("data", "name")).lower()
    model = "painn" if dataset in data.MOLECULES else None
    if depth:
        ending = "_bn" if norm == "bn" else ""
        model = f"wrn_{depth}_{widening}{ending}"
    elif dim:
        model = f"bert_{dim}_{layers}"
    options = {}
    if dataset in PRESETS:
        options["dataset"] = dataset
    if model in NETWORKS | SEQUENCE_NETWORKS:
        options["model"] = model
    return options


# What names of parameters here become in published files, as regular expressions, in this order.
WRN_NAMES = {r"^(backbone\.block_\d)\.": r"\1.layer.", r"^head\.": "head.fc."}
BERT_NAMES = {
    r"^head\.": "head.fc.", r"^backbone\.": "backbone.model.", r"\.pooler\.0": ".pooler.dense",
    r"\.words": ".embeddings.word_embeddings", r"\.positions": ".embeddings.position_embeddings",
    r"\.types": ".embeddings.token_type_embeddings", r"\.norm\.": ".embeddings.LayerNorm.",
    r"\.layers": ".encoder.layer", r"self_attn\.out_proj": "attention.output.dense",
    r"norm1": "attention.output.LayerNorm", r"linear1": "intermediate.dense",
    r"linear2": "output.dense", r"norm2": "output.LayerNorm",
}
PAINN_NAMES = {
    r"^embedding": "backbone.0.atom_embedding", r"^readout": "backbone.1.partial_readout_network",
    r"^head": "head.head.readout_network",
    r"^layers\.(\d+)\.message": r"backbone.0.message_blocks.\1.scalar_network",
    r"^layers\.(\d+)\.filter": r"backbone.0.message_blocks.\1.rbf_network.0",
    r"^layers\.(\d+)\.(update|u|v)\.": r"backbone.0.update_blocks.\1.\2.",
    r"\.update\.": ".scalar_vector_network.", r"\.u\.": ".U.0.", r"\.v\.": ".V.0.",
}
# FRN's constant epsilon, and what is a function of the rest; what is not trained.
UNUSED = re.compile(r"\.eps$|radial_basis|prediction_finalizer")
BUFFERS = re.compile(r"\.running_|\.num_batches|radial_basis|head\.head\.[^r]")


def take(name, names, tensors):
    """Take the tensor that a network here calls `name` out of {published name: tensor}."""
    if name == "statistics":
        return torch.stack([tensors.pop("head.head.mean"), tensors.pop("head.head.std")])
    if name == "references":  # PaiNN's have an element more here
        return F.pad(tensors.pop("head.head.atom_refs").squeeze(1), (0, 1))
    published = name
    for pattern, replacement in names.items():
        published = re.sub(pattern, replacement, published)
    if "in_proj_" in name:  # here, query, key and value of BERT are one matrix
        kinds = []
        for kind in ("query", "key", "value"):
            kinds.append(published.replace("self_attn.in_proj_", f"attention.self.{kind}."))
        return torch.cat([tensors.pop(kind) for kind in kinds])
    if name.endswith((".gamma", ".beta", ".tau")):
        return tensors.pop(published).squeeze(0)  # [1, C, 1, 1]
    return tensors.pop(published)


def checked(name, tensor, *shape):
    """A tensor of a published file, if it has this shape and finite real numbers."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} holds integers")
    if not tensor.isfinite().all():
        raise ValueError(f"{name}: a value is not finite")
    return tensor


def published_tensors(file):
    """{published name: tensor} of the network in a file of MAP, SWA or SWAG."""
    names = [name for name in file.state if name != "iterates"]
    return {name.removeprefix("model."): file.state[name] for name in names}


def state_of(net, tensors):
    """The state dict of `net` from tensors by their published names; ValueError if one is left."""
    names = WRN_NAMES
    if isinstance(net, PaiNN):
        names = PAINN_NAMES
    elif isinstance(net.backbone, Bert):
        names = BERT_NAMES
    tensors = dict(tensors)
    state = {}
    for name, initial in net.state_dict().items():
        state[name] = take(name, names, tensors)
        if initial.is_floating_point():
            checked(name, state[name], *initial.shape)
    left = [name for name in tensors if not UNUSED.search(name)]
    if left:
        raise ValueError(f"{left[0]} is left over")
    return state


def load_published(net, file):
    """Give `net` the weights of a published network; returns it."""
    net.load_state_dict(state_of(net, published_tensors(file)))
    return net.eval()


def published_iterates(net, file):
    """SWAG's iterates [R, P] in the order of the parameters of `net`, without FRN's epsilons."""
    tensors = published_tensors(file)
    # In an iterate, all parameters follow each other as in the file.
    names = [name for name in tensors if not BUFFERS.search(name)]
    sizes = [tensors[name].numel() for name in names]
    iterates = []
    for column in file.state["iterates"].T:                            # [number of parameters]
        for name, values in zip(names, column.split(sizes)):
            tensors[name] = values.view(tensors[name].shape)
        state = state_of(net, tensors)
        vector = torch.cat([state[name].flatten() for name, _ in net.named_parameters()])
        iterates.append(vector)
    return torch.stack(iterates)


def published_laplace(theta, file):
    """(H [P, P] or its diagonal [P], whether H may be indefinite, prior precision) of LLLA."""
    state = file.state.get("llla_inference", file.state)
    size = len(theta)
    mean = checked("mean", state["mean"], size).to(theta)
    if not torch.allclose(mean, theta, rtol=1e-4, atol=1e-6):
        raise ValueError(f"other weights than those of seed {file.seed} in --map-paths")
    laplace = state["llla"]
    is_hessian = "H_nll" in laplace  # of molecules, whose H includes the prior
    h = laplace["H_nll" if is_hessian else "H"]
    shape = (size, size) if h.ndim == 2 else (size,)
    precision = float(laplace["prior_precision"])
    if not 0 < precision < math.inf:
        raise ValueError(f"the prior precision is {precision}")
    return checked("H", h, *shape), is_hessian, precision


def published_flow(theta, file):
    """The flow of a file of LA-NF: centres [T, P], a and b [T]."""
    tensors = file.state["guide_state_dict"]
    flow = []
    for kind, size in (("x0", len(theta)), ("alpha_prime", 1), ("beta_prime", 1)):
        names = [f"transform.{layer}.{kind}" for layer in range(file.state["num_transforms"])]
        layers = [checked(name, tensors[name], size) for name in names]
        flow.append(torch.stack(layers).squeeze(-1).to(theta.device))
    return flow


def check_published(net, published):
    """Refuse published files that do not fit `net`, or have a value that is not finite."""
    for (name, seed), file in published.items():
        try:
            load_published(net, published["map", seed])
            theta = flat_head(net.head).detach()
            if name in ("swa", "swag"):
                swag_moments(published_iterates(net, file))
            elif name != "map":
                published_laplace(theta, file)
            if name.startswith("la_nf"):
                published_flow(theta, file)
        except torch.OutOfMemoryError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise UserError(f"{file.path} lacks a part of a published {name}, or does not fit "
                            f"--model, --dataset or --vocab ({common.one_line(error)})") from None


# ---- Training -----------------------------------------------------------------------------------

MAP_LOSS_FACTOR = 4e-4  # published code: 0.02^2, for energies and MAP only
# Each use of random numbers has a key of its own; LLLA and LA-NF share "samples".
STREAMS = {"epoch": 2, "dropout": 12, "swag": 13, "swag_low_rank": 14, "llla_val": 15,
           "flow_start": 16, "flow_epoch": 17, "la_nf_val": 18, "samples": 19}


class Diverged(UserError):
    """A loss or a weight is not finite."""


class Study(NamedTuple):
    """What every step needs: the options, the run directory, and all sets with their loaders."""

    args: argparse.Namespace
    run: Any            # common.Run, None until all is checked
    splits: data.Splits
    seeds: list         # of the members
    published: dict     # {(posterior, seed): Published}
    energies: bool      # whether energies are predicted, or classes
    loaders: dict       # {split: loader}: train, val, test, ood-<name>, predict; and for training
                        # map and swag, of which only the first one augments, as published
    fingerprints: dict  # {split: fingerprint} of the sets that are evaluated


def make_study(args, splits, published):
    """The Study of these options and sets, without its run."""
    seeds = sorted(seed for name, seed in published if name == "map")
    if not args.map_paths:
        seeds = list(range(args.seed, args.seed + args.members * args.runs))
    evaluated = {"test": splits.test}
    for name, dataset in splits.ood.items():
        evaluated[f"ood-{name}"] = dataset
    if splits.predict is not None:
        evaluated["predict"] = splits.predict
    fingerprints = {split: data.fingerprint(dataset) for split, dataset in evaluated.items()}
    loaders = {}
    for split, dataset in ({"train": splits.train, "val": splits.val} | evaluated).items():
        loaders[split] = make_evaluation_loader(dataset, args, is_train=split == "train")
    loaders["swag"] = make_loader(splits.train, args)
    loaders["map"] = loaders["swag"]
    if args.augment:
        loaders["map"] = make_loader(splits.train, args, augment="crop_flip")
    return Study(args, None, splits, seeds, published, args.dataset in data.MOLECULES, loaders,
                 fingerprints)


def has_images(args):
    return args.dataset not in data.TEXTS + data.MOLECULES


def make_loader(train_set, args, **options):
    """Shuffled batches for training; batch[0] is what a network takes."""
    options |= {"shuffle": True, "limit_steps": args.limit_steps}
    if has_images(args):
        return data.Loader(train_set, args.batch_size, args.device, workers=args.workers,
                           channels_last=True, **options)
    return data.SequenceLoader(train_set, args.batch_size, args.device, **options)


def make_evaluation_loader(dataset, args, is_train):
    """Batches of all examples of a set.

    Training images are shuffled, always alike, because the statistics of batch norm are means over
    batches: in folders, images are sorted by class.
    """
    batch_size = 512 if args.device.type == "cuda" else 100
    if has_images(args):
        return data.evaluation_loader(dataset, args, batch_size, shuffle=is_train)
    return data.SequenceLoader(dataset, batch_size, args.device)


class Outputs(NamedTuple):
    """What a network makes of this process's examples of a set."""

    rows: Tensor             # [b]
    outputs: Tensor          # [b, C] log probabilities; of energies, mean and variance
    features: Tensor | None  # [b, D]; of molecules [a, D]
    seconds: float


@torch.no_grad()
def compute_outputs(study, net, split):
    """The Outputs of a network for a set."""
    start = time.perf_counter()
    batches = []
    for batch in study.loaders[split].epoch():
        with common.autocast(study.args):
            outputs, features = net(batch[0])
        batches.append((batch.index, outputs, features))
    rows, outputs, features = map(torch.cat, zip(*batches))
    if not study.energies:
        outputs = outputs.log_softmax(1)
    return Outputs(rows.cpu(), outputs, features, time.perf_counter() - start)


def summarise(study, samples, counts):
    """What samples predict for a set, in its order, on the main process, and their "seconds".

    samples: Outputs, one sample after another. For classes {"log_probs_<n>": [N, C], the mean
    prediction of the first n samples, "entropy_<n>": [N], their mean entropy} for each n of
    `counts`; for energies {"samples": [N, S, 2]}, mean and variance of every sample.
    """
    columns = {}
    seconds = []
    outputs = []  # of energies
    mixture = RunningMixture()
    for sample in samples:
        columns["index"] = sample.rows
        seconds.append(sample.seconds)
        if study.energies:
            outputs.append(sample.outputs)
            continue
        mixture.add(sample.outputs)
        if mixture.count in counts:
            columns[f"log_probs_{mixture.count}"] = mixture.log_probs().float()
            columns[f"entropy_{mixture.count}"] = mixture.entropy()
    if study.energies:
        columns["samples"] = torch.stack(outputs, 1)                   # [b, S, 2]
    return common.gather_rows([columns]) | {"seconds": seconds}


def validate(study, samples, count):
    """{"val_nll", and for classes "val_accuracy"} of the mean of `count` samples."""
    return common.on_main(validation_metrics, study, summarise(study, samples, [count]), count)


def validation_metrics(study, predictions, count):
    labels = study.splits.val.labels
    if study.energies:
        outputs = predictions["samples"].transpose(0, 1)               # [S, N, 2]
        return {"val_nll": -log_predictive_density(outputs, labels, energies=True)}
    log_probs = predictions[f"log_probs_{count}"]                      # [N, C]
    accuracy = (log_probs.argmax(1) == labels).double().mean().item()
    return {"val_accuracy": accuracy, "val_nll": -log_predictive_density(log_probs[None], labels)}


def train_epoch(study, model, optimiser, stage, seed, epoch, factor=1.0):
    """Minimise `summed_loss` for an epoch; returns {"loss", and for classes "train_accuracy"}."""
    args = study.args
    loader = study.loaders[stage]
    # The order and the augmentation of examples, and masks of dropout, depend on (seed, epoch).
    loader.seed = seed
    common.seed_all(seed, STREAMS["epoch"], epoch, common.rank())
    model.train()
    totals = torch.zeros(3, dtype=torch.float64, device=args.device)  # loss, correct, examples
    for batch in common.progress(loader, epoch):
        with common.autocast(args):
            outputs, _ = model(batch[0])
        loss = summed_loss(outputs, batch.labels, study.energies, factor)

        # DDP averages gradients over processes: this is the mean over the global batch.
        mean_loss = loss * common.world_size() / batch.global_size
        optimiser.zero_grad()
        mean_loss.backward()
        optimiser.step()

        totals[0] += loss.detach()
        if not study.energies:
            totals[1] += (outputs.argmax(1) == batch.labels).sum()
        totals[2] += len(outputs)
    loss, correct, examples = common.all_reduce(totals).tolist()
    row = {"loss": loss / examples}
    if not (math.isfinite(loss) and flat_weights(model).isfinite().all()):
        raise Diverged(f"seed {seed}: the loss or a weight is not finite in epoch {epoch + 1}; "
                       "lower the learning rate")
    if not study.energies:
        row["train_accuracy"] = correct / examples
    return row


def flat_weights(net):
    """All weights of a network as one vector [P]."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train_map(study, seed, dropout):
    """Train theta_m; returns the network with the weights of the best epoch by validation."""
    args = common.with_options(study.args, dropout=dropout)
    common.seed_all(seed)
    net = make_network(args, study.splits.train)
    best = copy.deepcopy(net)
    if args.opt == "adamw":
        optimiser = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay)
    else:
        optimiser = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, nesterov=True,
                                    weight_decay=args.weight_decay)
    model = common.data_parallel(net, args.device, args.compile)
    name = f"seed{seed}-map"
    if dropout != study.args.dropout:
        name += f"-dropout{dropout:g}"
    history = study.run.resume(name, args.epochs, net=net, optimiser=optimiser, best=best)
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        # published code: the learning rate is constant within an epoch
        lr = 0.5 * args.lr * (1 + math.cos(math.pi * epoch / args.epochs))
        optimiser.param_groups[0]["lr"] = lr
        row = {"epoch": epoch + 1}
        row |= train_epoch(study, model, optimiser, "map", seed, epoch, MAP_LOSS_FACTOR)
        row |= validate(study, [compute_outputs(study, net.eval(), "val")], 1)
        if row["val_nll"] < min([old["val_nll"] for old in history], default=math.inf):
            best.load_state_dict(net.state_dict())
        history.append(row | {"lr": lr, "seconds": time.perf_counter() - start})
        study.run.save(name, history, net=net, optimiser=optimiser, best=best)
    return best.eval()


# ---- Posteriors ---------------------------------------------------------------------------------
# One member is one page: `fit_member`. Beside the checkpoints of training, its files are what
# `run.cached` stores, with all that they depend on beside the training options and data.

FLOW_EPOCHS = 20  # published code
DROPOUTS = (0.05, 0.1, 0.2)  # the rates of MC dropout, of which validation chooses one
# In the published order.
LABELS = {"map": "DE", "swa": "SWA", "swag": "SWAG", "llla": "LLLA", "la_nf": "LA-NF",
          "mcdo": "MC dropout"}
POINTS = ("map", "swa")  # one network, which no number of samples changes
SAMPLED = [method for method in LABELS if method not in POINTS]


class Posterior(NamedTuple):
    """A posterior around theta_m, as `predict` needs it."""

    name: str                  # in the names of files: map, swa, swag, llla, la_nf10, mcdo
    inputs: dict               # what its samples depend on, beside theta_m and the training
    draw: Callable             # draw(split, count) yields the Outputs of `count` samples
    more_bytes: int = 0        # to predict, beside a network ...
    bytes_per_sample: int = 0  # ... and for each sample


class Member:
    """A trained network theta_m, and what its posteriors share."""

    def __init__(self, study, seed, net):
        self.study = study
        self.seed = seed
        self.net = net
        self.fingerprint = common.fingerprint(net)
        self.theta = flat_head(net.head).detach()  # [P]
        self.passes = {}  # {split: Outputs} of theta_m

    def outputs(self, split):
        """The Outputs of theta_m for a set, computed once."""
        if split not in self.passes:
            self.passes[split] = compute_outputs(self.study, self.net, split)
        return self.passes[split]

    def gather_last_layer(self, split):
        """The LastLayer of a whole set, on the main process; None on the others."""
        outputs = self.outputs(split)
        dataset = self.study.loaders[split].dataset
        rows = outputs.rows
        if self.study.energies:
            rows = data.entries_of(rows, dataset.sizes)  # features have a row for each atom
        columns = common.gather_rows([{"index": rows, "x": outputs.features}])
        if not columns:
            return None
        return last_layer(self.net, columns["x"].to(self.theta.device), dataset)

    @cached_property
    def last_layers(self):
        """The LastLayers of the training and the validation set, see `gather_last_layer`."""
        return self.gather_last_layer("train"), self.gather_last_layer("val")

    @cached_property
    def spectrum(self):
        """The Spectrum of the loss at theta on the training set; on the main process."""
        train, _ = self.last_layers
        if train.energies:
            return energy_spectrum(self.theta, train)
        if self.study.args.structure == "full":
            return full_spectrum(self.theta, train)
        return diagonal_spectrum(self.theta, train)

    def noise(self, samples, *key):
        """Standard normal noise [samples, P] for last layers, a function of the key."""
        return seeded_noise((samples, len(self.theta)), self.theta.device, *key)

    def cached(self, name, inputs, compute):
        """`run.cached` for the file seed<seed>-<name>, which also depends on theta_m."""
        inputs = inputs | {"network": self.fingerprint}
        return self.study.run.cached(f"seed{self.seed}-{name}", inputs, compute)


def seeded_noise(shape, device, *key):
    """Standard normal numbers, drawn on the device: a function of the integers `key`."""
    generator = torch.Generator(device).manual_seed(common.derive_seed(*key))
    return torch.randn(*shape, generator=generator, device=device)


def last_layer(net, x, dataset):
    """The LastLayer of the examples of a set, whose features are x."""
    labels = dataset.labels.to(x.device)
    if not isinstance(net, PaiNN):
        return LastLayer(x, labels)
    molecule = torch.arange(len(dataset)).repeat_interleave(dataset.sizes).to(x.device)
    offset = net.known_energies(dataset.numbers.to(x.device), molecule, len(dataset))
    return LastLayer(x, labels, True, molecule, offset, net.statistics[1])


def posterior_names(args):
    """The posteriors of a study, as their files are called: with T flows, LA-NF is la_nf<T>."""
    names = []
    for method in args.methods:
        if method == "la_nf":
            names += [f"la_nf{layers}" for layers in args.flow_layers]
        else:
            names.append(method)
    return names


def fit_member(member):
    """Fit all posteriors around theta_m, and predict each set by each of them."""
    study = member.study
    for name in posterior_names(study.args):
        file = study.published.get((name, member.seed))
        if name == "map":
            posterior = Posterior("map", {}, partial(draw_map, member))
        elif file is not None:
            posterior = load_posterior(member, file)
        elif name in ("swa", "swag"):
            posterior = fit_swag(member, name)
        elif name == "mcdo":
            posterior = fit_mcdo(member)
        else:
            posterior = heads_posterior(member, name, fit_heads(member, name))
        for split in study.fingerprints:
            predict(member, posterior, split)


def draw_map(member, split, count):
    yield member.outputs(split)


def predict(member, posterior, split):
    """Store what a posterior predicts for a set: see `summarise`.

    Also "bytes", of the network with what belongs to the posterior, and of each sample.
    """
    study = member.study
    counts = {1}  # of samples of a member, S // K for each S and K
    if posterior.name not in POINTS:
        counts = {samples // k for samples, k in itertools.product(study.args.samples,
                                                                   study.args.ensembles)}
    counts = sorted(counts - {0})

    def compute():
        predictions = summarise(study, posterior.draw(split, counts[-1]), counts)
        network_bytes = sum(tensor.nbytes for tensor in member.net.state_dict().values())
        sizes = [network_bytes + posterior.more_bytes, posterior.bytes_per_sample]
        return predictions | {"bytes": sizes}

    inputs = posterior.inputs | {"examples": study.fingerprints[split], "counts": counts}
    member.cached(f"{posterior.name}-{split}", inputs, compute)


def choose(scores, what):
    """The key of the largest validation LPD that is finite, of equal ones the first."""
    finite = {choice: lpd for choice, lpd in scores.items() if math.isfinite(lpd)}
    if not finite:
        raise UserError(f"no value of {what} gives a finite validation LPD; try others")
    return max(finite, key=finite.get)


def choose_precision(member, name, scores):
    """The prior precision of the largest validation LPD, with a note at an end of the grid."""
    label = LABELS[name.rstrip("0123456789")]
    precision = choose(scores, f"the prior precision of {label}")
    if precision in (min(scores), max(scores)):
        print(f"note: seed{member.seed}-{name}: the chosen prior precision {precision:g} is an "
              "end of its grid; a better one may lie beyond", flush=True)
    return precision


# Posteriors over all weights: their samples are networks.


def fit_swag(member, name):
    """SWA or SWAG: run SGD at each learning rate, and choose one by the validation LPD.

    Both are scored at each rate, so that the other one can join the study without another SGD.
    """
    args = member.study.args
    inputs = {"swag_epochs": args.swag_epochs}
    scores = {"swa": {}, "swag": {}}  # {method: {rate: LPD}} of the rates so far
    for number, rate in enumerate(args.swag_lrs, 1):
        state = member.cached(f"swag-lpds-{rate:g}", inputs | {"val_samples": args.val_samples},
                              partial(score_rate, member, rate))
        for method, lpd in state["lpds"].items():
            scores[method][rate] = lpd
        if not args.eval:
            common.on_main(delete_iterates, member, args.swag_lrs[:number], scores)
    rate = choose(scores[name], "--swag-lrs")
    if not args.eval and not common.on_main(iterates_path(member, rate).exists):
        train_swag(member, rate)  # they were deleted in favour of a rate that is not compared now
    return swag_posterior(member, name, inputs | {"rate": rate}, args.swag_epochs,
                          partial(read_iterates, member, rate))


def swag_posterior(member, name, inputs, rank, read):
    """The Posterior of SWA or SWAG; read() returns the iterates [R, P]."""
    more_bytes = 0
    if name == "swag":  # variances and deviations
        more_bytes = (1 + rank) * sum(parameter.nbytes for parameter in member.net.parameters())
    return Posterior(name, inputs, partial(draw_swag, member, name, read), more_bytes)


def draw_swag(member, name, read, split, count):
    """Yield the Outputs of SWA's mean, or of samples of SWAG."""
    study = member.study
    moments = swag_moments(read())
    vectors = swag_vectors(member.seed, moments, count)
    if name == "swa":
        vectors = moments[:1]
    net = copy.deepcopy(member.net).eval()
    common.use_global_batch_norm(net)
    for vector in vectors:
        set_weights(net, vector)
        refresh_batch_norm(study, net)
        yield compute_outputs(study, net, split)


def score_rate(member, rate):
    """{"lpds": {method: validation LPD}} of SWA and SWAG at a learning rate, if finite."""
    study = member.study
    samples = study.args.val_samples
    try:
        train_swag(member, rate)
    except Diverged as error:
        common.print_on_main(f"skipped: SWAG at the rate {rate:g} ({error})")
        return {"lpds": {}}
    read = partial(read_iterates, member, rate)
    lpds = {}
    for name, count in (("swa", 1), ("swag", samples)):
        metrics = validate(study, draw_swag(member, name, read, "val", count), count)
        if math.isfinite(metrics["val_nll"]):
            lpds[name] = -metrics["val_nll"]
    return {"lpds": lpds}


def train_swag(member, rate):
    """SGD from theta_m at a constant rate; the weights after each epoch are an iterate."""
    study = member.study
    args = study.args
    net = copy.deepcopy(member.net)
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=0.9,
                                weight_decay=args.weight_decay)
    model = common.data_parallel(net, args.device, args.compile)
    path = iterates_path(member, rate)
    history = study.run.resume(path.stem, args.swag_epochs, {"network": member.fingerprint},
                               net=net, optimiser=optimiser)
    for epoch in range(len(history), args.swag_epochs):
        start = time.perf_counter()
        row = {"epoch": epoch + 1}
        row |= train_epoch(study, model, optimiser, "swag", member.seed, epoch)
        # The iterate is written before the checkpoint that counts it.
        common.on_main(write_iterate, path, net, epoch)
        history.append(row | {"lr": rate, "seconds": time.perf_counter() - start})
        study.run.save(path.stem, history, net=net, optimiser=optimiser)


def iterates_path(member, rate):
    """The file of the iterates at a rate: the weights after each epoch, one after another."""
    return member.study.run.dir / f"seed{member.seed}-swag-lr{rate:g}.iterates"


def write_iterate(path, net, number):
    """Write the weights of `net` as iterate `number`, from 0."""
    vector = flat_weights(net).cpu()
    try:
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.seek(number * vector.nbytes)
            file.write(vector.numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); free some space, or choose "
                        "another place") from None


def read_iterates(member, rate):
    """The first R iterates [R, P] at a rate."""
    path = iterates_path(member, rate)
    size = sum(parameter.nbytes for parameter in member.net.parameters())
    iterates = []
    for number in range(member.study.args.swag_epochs):
        content = common.on_main(read_bytes, path, number * size, size)
        iterates.append(torch.frombuffer(bytearray(content), dtype=member.theta.dtype))
    return torch.stack(iterates).to(member.theta.device)


def read_bytes(path, start, size):
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(size)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); use --fresh to start over"
                        ) from None
    if len(content) < size:
        raise UserError(f"{path} ends after {start // size} iterates; use --fresh to start over")
    return content


def delete_iterates(member, rates, scores):
    """Of these rates, keep the iterates of the best of SWA and SWAG: all take 1 TB (paper)."""
    best = [max(of_rates, key=of_rates.get) for of_rates in scores.values() if of_rates]
    for rate in rates:
        if rate not in best:
            # The checkpoint goes first: it must not count iterates that do not exist.
            path = iterates_path(member, rate)
            path.with_name(f"{path.stem}.pt").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def batch_norms(net):
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in net.modules() if isinstance(module, kind)]


@torch.no_grad()
def set_weights(net, vector):
    """Give `net` the weights [P]."""
    parameters = list(net.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, weights in zip(parameters, vector.split(sizes)):
        parameter.copy_(weights.view_as(parameter))


@torch.no_grad()
def refresh_batch_norm(study, net):
    """Set the statistics of batch norm to their means over all batches of the training set."""
    layers = batch_norms(net)
    if not layers:
        return
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    for count, batch in enumerate(study.loaders["train"].epoch(), 1):
        for layer in layers:
            layer.momentum = 1 / count  # all batches weigh the same
        with common.autocast(study.args):
            net(batch[0])
    net.eval()


def swag_vectors(seed, moments, samples):
    """Yield samples [P] of SWAG's posterior, which depend on (seed, sample)."""
    mean, variance, deviations = moments
    # Eight samples at a time: the deviations, which are large, are read once for all of them.
    for block in range(math.ceil(samples / 8)):
        noise = seeded_noise((8, len(mean)), mean.device, seed, STREAMS["swag"], block)
        low_rank_noise = seeded_noise((8, len(deviations)), mean.device, seed,
                                      STREAMS["swag_low_rank"], block)
        drawn = swag_samples(mean, variance, deviations, noise, low_rank_noise)    # [8, P]
        yield from drawn[:samples - 8 * block]


def fit_mcdo(member):
    """MC dropout: train a network with dropout at each rate, and choose one by validation."""
    study = member.study
    scores = {}  # {rate: LPD}
    for rate in DROPOUTS:
        state = member.cached(f"mcdo-lpd-{rate:g}", {"val_samples": study.args.val_samples},
                              partial(score_dropout, member, rate))
        if "lpd" in state:
            scores[rate] = state["lpd"]
    rate = choose(scores, "MC dropout's rate")
    net = train_map(study, member.seed, rate)
    inputs = {"rate": rate, "network with dropout": common.fingerprint(net)}
    return Posterior("mcdo", inputs, partial(draw_mcdo, member, net))


def score_dropout(member, rate):
    """{"lpd": validation LPD} of MC dropout at a rate, if it is finite."""
    count = member.study.args.val_samples
    try:
        net = train_map(member.study, member.seed, rate)
    except Diverged as error:
        common.print_on_main(f"skipped: MC dropout at the rate {rate:g} ({error})")
        return {}
    lpd = -validate(member.study, draw_mcdo(member, net, "val", count), count)["val_nll"]
    return {"lpd": lpd} if math.isfinite(lpd) else {}


def draw_mcdo(member, net, split, count):
    """Yield the Outputs of a network with dropout, whose masks differ."""
    net.train()
    # Dropout alone is random: batch norm keeps its statistics.
    for layer in batch_norms(net):
        layer.eval()
    for sample in range(count):
        common.seed_all(member.seed, STREAMS["dropout"], sample, common.rank())
        yield compute_outputs(member.study, net, split)


# Posteriors over the last layer: their samples are vectors, `heads` [S, P]. The main process fits
# them to the features that all processes have computed.


def fit_heads(member, name):
    """LLLA or LA-NF of a member: {"precision" of the prior, "heads": S last layers [S, P]}."""
    args = member.study.args
    fit = fit_llla
    if name != "llla":
        layers = int(name.removeprefix("la_nf"))
        fit = partial(fit_la_nf, laplace=fit_heads(member, "llla"), layers=layers)

    def compute():
        return common.on_main(fit, member, *member.last_layers)

    inputs = {"structure": args.structure, "val_samples": args.val_samples,
              "samples": args.samples[-1]}
    return member.cached(name, inputs, compute)


def fit_llla(member, train, val):
    """LLLA: choose the precision of the prior, and draw S last layers; on the main process."""
    args = member.study.args
    # The same noise for all members.
    noise = member.noise(args.val_samples, 0, STREAMS["llla_val"])
    scores = precision_scores(member.theta, member.spectrum, val, noise)
    precision = choose_precision(member, "llla", dict(zip(LAPLACE_GRID, scores)))
    noise = member.noise(args.samples[-1], member.seed, STREAMS["samples"])
    heads = laplace_samples(member.theta, member.spectrum, precision, noise)
    return {"precision": precision, "heads": heads.cpu()}


def heads_posterior(member, name, state):
    """The Posterior whose samples are the last layers state["heads"] [S, P]."""
    inputs = state["inputs"] | {"precision": state["precision"]}
    heads = state["heads"]
    return Posterior(name, inputs, partial(draw_heads, member, heads),
                     bytes_per_sample=heads[0].nbytes)


def draw_heads(member, heads, split, count):
    """Yield the Outputs of last layers; the features are computed once for all of them."""
    outputs = member.outputs(split)
    dataset = member.study.loaders[split].dataset.select(outputs.rows)
    last = last_layer(member.net, outputs.features, dataset)
    seconds = outputs.seconds  # counted once
    for eight in heads[:count].to(last.x).split(8):  # which fit in memory
        start = time.perf_counter()
        log_probs = head_outputs(eight, last)
        seconds += time.perf_counter() - start
        for sample in log_probs:
            yield Outputs(outputs.rows, sample, None, seconds)
            seconds = 0.0


def fit_la_nf(member, train, val, laplace, layers):
    """LA-NF: train a flow for each precision of the prior, of which validation chooses one.

    The samples of LLLA, `laplace`, are sent through the chosen flow. On the main process.
    """
    theta = member.theta
    base_precision = laplace["precision"]
    flows = train_flows(member, train, base_precision, layers)
    # The same noise for all members.
    noise = member.noise(member.study.args.val_samples, 0, STREAMS["la_nf_val"])
    base = laplace_samples(theta, member.spectrum, base_precision, noise)
    scores = {}
    # published code: the largest of equally good precisions (LLLA: the smallest)
    for precision in reversed(FLOW_GRID):
        heads, _ = apply_flow(flows[precision], base)
        outputs = head_outputs(heads, val)
        scores[precision] = log_predictive_density(outputs, val.labels, val.energies)
    precision = choose_precision(member, f"la_nf{layers}", scores)
    heads, _ = apply_flow(flows[precision], laplace["heads"].to(theta))
    return {"precision": precision, "heads": heads.cpu()}


def train_flows(member, train, base_precision, layers):
    """Minimise the negative ELBOs of all prior precisions, with the same noise and batches.

    Returns {prior precision: (centres [T, P], a and b [T])}.
    """
    args = member.study.args
    theta = member.theta
    n = len(train.labels)
    start_seed = common.derive_seed(member.seed, STREAMS["flow_start"])
    generator = torch.Generator().manual_seed(start_seed)
    flows = initial_flows(len(FLOW_GRID), layers, len(theta), generator)
    flows = [tensor.to(theta.device).requires_grad_() for tensor in flows]
    precisions = torch.tensor(FLOW_GRID, device=theta.device)
    optimiser = torch.optim.Adam(flows, 1e-3)
    steps = min(math.ceil(n / args.batch_size), args.limit_steps or n)
    for epoch in range(FLOW_EPOCHS):
        # Batches and noise depend on (seed, epoch).
        epoch_seed = common.derive_seed(member.seed, STREAMS["flow_epoch"], epoch)
        generator = torch.Generator().manual_seed(epoch_seed)
        batches = torch.randperm(n, generator=generator).split(args.batch_size)
        noise = torch.randn(steps, len(theta), generator=generator).to(theta)      # [steps, P]
        total = torch.zeros((), device=theta.device)
        for step in range(steps):
            progress = (epoch + step / steps) / FLOW_EPOCHS
            optimiser.param_groups[0]["lr"] = 0.5e-3 * (1 + math.cos(math.pi * progress))
            batch = select_examples(train, batches[step], member.study.splits.train)
            losses = negative_elbo(flows, theta, member.spectrum, base_precision, precisions,
                                   noise[step:step + 1], batch, n)                 # [G]
            optimiser.zero_grad()
            losses.sum().backward()
            optimiser.step()
            total += losses.detach().mean()
        if not total.isfinite():
            raise UserError(f"seed {member.seed}: the flows of LA-NF diverged in epoch "
                            f"{epoch + 1}; use fewer --flow-layers")
    print(f"seed{member.seed}-la_nf{layers}  mean negative ELBO of the last epoch "
          f"{total.item() / steps:.6g}", flush=True)
    trained = [tensor.detach() for tensor in flows]                                # [G, T, ...]
    return dict(zip(FLOW_GRID, zip(*trained)))


def select_examples(last, rows, dataset):
    """The LastLayer of the examples `rows` [B] of a set, which are on the CPU."""
    device = last.x.device
    examples = rows.to(device, non_blocking=True)
    if not last.energies:
        return LastLayer(last.x[examples], last.labels[examples])
    # Indices are made on the CPU, so that nothing waits for the device.
    atoms = data.entries_of(rows, dataset.sizes).to(device, non_blocking=True)
    molecule = torch.arange(len(rows)).repeat_interleave(dataset.sizes[rows])
    molecule = molecule.to(device, non_blocking=True)
    return LastLayer(last.x[atoms], last.labels[examples], True, molecule, last.offset[examples],
                     last.scale)


def load_posterior(member, file):
    """The Posterior of a published file."""
    inputs = {"published": file.checksums}
    if file.name in ("swa", "swag"):
        rank = file.state["iterates"].shape[1]
        return swag_posterior(member, file.name, inputs, rank,
                              partial(published_iterates, member.net, file))
    inputs["samples"] = member.study.args.samples[-1]
    compute = partial(common.on_main, published_heads, member, file)
    return heads_posterior(member, file.name, member.cached(file.name, inputs, compute))


def published_heads(member, file):
    """{"precision", "heads": [S, P]} of a published LLLA or LA-NF; on the main process."""
    h, is_hessian, precision = published_laplace(member.theta, file)
    h = h.double().to(member.theta.device)
    spectrum = Spectrum(h, None)
    if h.ndim == 2:
        spectrum = symmetric_spectrum(h)
    if not is_hessian:
        spectrum = spectrum._replace(values=spectrum.values.clamp_min(0))  # below is rounding
    noise = member.noise(member.study.args.samples[-1], member.seed, STREAMS["samples"])
    heads = laplace_samples(member.theta, spectrum, precision, noise)
    if file.name != "llla":
        heads, _ = apply_flow(published_flow(member.theta, file), heads)
    return {"precision": precision, "heads": heads.cpu()}


# ---- Evaluation ---------------------------------------------------------------------------------
# Predictions are stored for each member, posterior and set; all else is computed from them, on the
# main process.


class Ensemble(NamedTuple):
    """Members that are averaged, with equally many samples of each."""

    label: str               # the name of their posterior in tables
    seeds: tuple             # of the members
    samples: int             # S, in all
    samples_per_member: int  # S // K


def list_ensembles(study, name):
    """The Ensembles of a posterior: the published members for each size K and S, for each run."""
    args = study.args
    ensembles = []
    for k in args.ensembles:
        if k > args.members:
            continue
        sizes = [k] if name in POINTS else [s for s in args.samples if s >= k]
        for samples in sizes:
            label = label_of(args, name, samples)
            for run in range(args.runs):
                seeds_of_run = study.seeds[run * args.members:(run + 1) * args.members]
                for numbers in member_combinations(args.members, k):
                    seeds = tuple(seeds_of_run[number - 1] for number in numbers)
                    ensembles.append(Ensemble(label, seeds, samples, samples // k))
    return ensembles


def label_of(args, name, samples):
    """The name of a posterior in tables, with T and S if the study compares several."""
    label = LABELS[name.rstrip("0123456789")]
    if name.startswith("la_nf") and len(args.flow_layers) > 1:
        label += f", T={name.removeprefix('la_nf')}"
    if name not in POINTS and len(args.samples) > 1:
        label += f", S={samples}"
    return label


class ClassPrediction(NamedTuple):
    """What an ensemble predicts for N examples: the mixture of all its samples."""

    log_probs: Tensor  # [N, C]  log of the mean probability
    entropy: Tensor    # [N]     mean entropy of a sample, in nats
    samples: int

    def uncertainties(self):
        """Total, aleatoric and epistemic uncertainty (mutual information) in nats, [N]."""
        total = torch.special.entr(self.log_probs.exp()).sum(1)
        uncertainties = {"total": total, "aleatoric": self.entropy}
        # That of a single sample would be rounding errors.
        if self.samples > 1:
            uncertainties["epistemic"] = (total - self.entropy).clamp_min(0)
        return uncertainties

    def scores(self, labels):
        """What is compared between methods, of each example [N]."""
        lpd = self.log_probs.gather(1, labels[:, None])[:, 0]
        correct = self.log_probs.argmax(1) == labels
        return {"lpd": lpd, "accuracy": correct.double()}

    def metrics(self, labels):
        metrics = common.prediction_metrics(self.log_probs, labels)
        return metrics | {"lpd": -metrics["nll"]}


class EnergyPrediction(NamedTuple):
    """What an ensemble predicts for N molecules: an equal mixture of Gaussians, in eV."""

    means: Tensor      # [S, N]
    variances: Tensor  # [S, N]

    def uncertainties(self):
        """Total, aleatoric and epistemic uncertainty, as standard deviations [N]."""
        moments = common.gaussian_mixture_moments(self.means, self.variances)
        uncertainties = {"total": moments.total.sqrt(), "aleatoric": moments.aleatoric.sqrt()}
        if len(self.means) > 1:
            uncertainties["epistemic"] = moments.epistemic.sqrt()
        return uncertainties

    def scores(self, labels):
        """What is compared between methods, of each molecule [N]."""
        outputs = torch.stack([self.means, self.variances], -1)        # [S, N, 2]
        log_p = log_likelihood(outputs, labels, energies=True)         # [S, N]
        lpd = log_p.logsumexp(0) - math.log(len(outputs))
        return {"lpd": lpd, "mae_milli": 1000 * (self.means.mean(0) - labels).abs()}

    def metrics(self, labels):
        metrics = common.regression_metrics(self.means, self.variances, labels)
        return {"mae_milli": 1000 * metrics["mae"], **metrics}  # published: of energies, meV


def read_predictions(study, name, split):
    """{seed: the predictions of a member}, which `predict` has just made or checked."""
    predictions = {}
    for seed in study.seeds:
        path = study.run.dir / f"seed{seed}-{name}-{split}.pt"
        predictions[seed] = torch.load(path, map_location="cpu", weights_only=True)
    return predictions


def combine_members(study, predictions, ensemble):
    """The prediction of an ensemble, from the predictions of all members."""
    n = ensemble.samples_per_member
    members = [predictions[seed] for seed in ensemble.seeds]
    if study.energies:
        samples = torch.cat([member["samples"][:, :n] for member in members], 1)   # [N, S, 2]
        means, variances = samples.transpose(0, 1).unbind(-1)                      # [S, N]
        return EnergyPrediction(means, variances)
    log_probs = torch.stack([member[f"log_probs_{n}"] for member in members])      # [K, N, C]
    mean = log_probs.double().logsumexp(0) - math.log(len(members))
    entropy = torch.stack([member[f"entropy_{n}"] for member in members]).mean(0)
    return ClassPrediction(mean, entropy, n * len(members))


def describe(study, ensemble):
    """What a row is about. Ensembles are told apart by the seeds of their members."""
    test = study.splits.test
    return {"method": f"{ensemble.label}, K={len(ensemble.seeds)}",
            "seed": "+".join(map(str, ensemble.seeds)), "members": ensemble.seeds,
            "set": test.name, "n": len(test)}


def cost(study, predictions, ensemble):
    """Milliseconds per example, and bytes, to predict by an ensemble."""
    n = ensemble.samples_per_member
    seconds = 0.0
    size = study.splits.backbone_bytes
    for seed in ensemble.seeds:
        seconds += sum(predictions[seed]["seconds"][:n])
        network_bytes, bytes_per_sample = predictions[seed]["bytes"]
        size += network_bytes + n * bytes_per_sample
    ms = study.splits.backbone_ms + 1000 * seconds / len(study.splits.test)
    return {"ms": ms, "bytes": size}


class Difference(NamedTuple):
    """The difference to DE of the same members: mean over the ensembles of K and the examples."""

    method: str
    k: int
    metric: str
    mean: float
    interval: float  # 1.96 standard errors over the examples, which are paired


def evaluate(study):
    """The rows of all ensembles, and their Differences to DE."""
    rows = []
    scores_of_de = {}  # {seeds: {metric: [N]}}
    changes = {}       # {(method, K, metric): [[N] of each ensemble]}
    labels = study.splits.test.labels
    for name in posterior_names(study.args):
        predictions = read_predictions(study, name, "test")
        uncertainties = {}  # {Ensemble: {kind: [N]}}
        for ensemble in list_ensembles(study, name):
            prediction = combine_members(study, predictions, ensemble)
            uncertainties[ensemble] = prediction.uncertainties()
            row = describe(study, ensemble) | prediction.metrics(labels)
            row |= cost(study, predictions, ensemble)
            scores = prediction.scores(labels)
            if name == "map":
                scores_of_de[ensemble.seeds] = scores
            else:
                for metric, values in scores.items():
                    change = values - scores_of_de[ensemble.seeds][metric]
                    row[f"{metric}_minus_de"] = change.mean().item()
                    key = (ensemble.label, len(ensemble.seeds), metric)
                    changes.setdefault(key, []).append(change)
            rows.append(row)
        rows += detection_rows(study, name, uncertainties)
    rows.sort(key=lambda row: len(row["members"]))  # as published: K, and within it the methods
    differences = []
    for key, of_ensembles in changes.items():
        of_examples = torch.stack(of_ensembles).mean(0)                # [N]
        interval = 1.96 * of_examples.std().item() / math.sqrt(len(of_examples))
        differences.append(Difference(*key, of_examples.mean().item(), interval))
    return rows, differences


def detection_rows(study, name, inside):
    """How well uncertainties tell OOD sets from the test set: those of all ensembles, `inside`."""
    rows = []
    for names in ood_unions(study.args.ood).values():
        sets = [data.name_of_other(set_name) for set_name in names]
        if not study.splits.ood.keys() >= set(sets):
            continue  # one is missing, which has been printed
        predictions = [read_predictions(study, name, f"ood-{set_name}") for set_name in sets]
        for ensemble, of_test in inside.items():
            of_sets = [combine_members(study, of_set, ensemble).uncertainties()
                       for of_set in predictions]
            larger_means = {"total": "ood", "epistemic": "ood"}
            of_test = {kind: of_test[kind] for kind in larger_means if kind in of_test}
            outside = {}
            for kind in of_test:
                outside[kind] = torch.cat([of_set[kind] for of_set in of_sets])
            row = describe(study, ensemble) | {"against": "+".join(sets)}
            rows.append(row | common.detection_metrics(of_test, outside, larger_means))
    return rows


def ood_unions(names):
    """{OOD set: the names of its parts}: a+b is a union, but folder:a+b a folder."""
    unions = {}
    for name in names:
        unions[name] = [name] if name.startswith("folder:") else name.split("+")
    return unions


def print_differences(differences):
    """Print a table for each metric, with a line for each method and a column for each K."""
    empty = {f"K={d.k}": None for d in differences}
    tables = {}  # {metric: {method: line}}
    for d in differences:
        lines = tables.setdefault(d.metric, {})
        line = lines.setdefault(d.method, {f"{d.metric} minus DE": d.method} | empty)
        digits = 1 if d.metric.endswith("_milli") else 4
        line[f"K={d.k}"] = f"{d.mean:+.{digits}f} ± {d.interval:.{digits}f}"
    common.print_on_main("\ndifference to DE of the same members: mean ± 1.96 standard errors "
                         "over the test examples")
    for lines in tables.values():
        common.print_on_main("\n" + common.format_table(list(lines.values())))


def write_predictions(study):
    """--predict: predictions.csv of the first of the largest ensembles, for each method."""
    dataset = study.splits.predict
    columns = {}    # {column: [N]}
    log_probs = {}  # {method: [1, N, C]}
    for name in posterior_names(study.args):
        ensembles = list_ensembles(study, name)
        largest = max(ensembles, key=lambda ensemble: (len(ensemble.seeds), ensemble.samples))
        prediction = combine_members(study, read_predictions(study, name, "predict"), largest)
        # The columns of DE have no ending, as those of the first method in all scripts.
        ending = "" if name == "map" else f"_{name}"
        if study.energies:
            columns[f"predicted{ending}"] = prediction.means.mean(0)
        else:
            log_probs[name] = prediction.log_probs[None]
        for kind, values in prediction.uncertainties().items():
            columns[f"{kind}{ending}"] = values
    if study.energies:
        study.run.write_csv("predictions.csv", common.example_columns(dataset) | columns)
    else:
        common.write_predictions(study.run, dataset, log_probs, study.splits.train.classes,
                                 extra=columns)


# ---- Plots --------------------------------------------------------------------------------------


def plot_differences(differences, run):
    """The paper's question: the difference to DE of the same members, by their number K."""
    methods = list(dict.fromkeys(d.method for d in differences))
    metrics = list(dict.fromkeys(d.metric for d in differences))
    ks = list(dict.fromkeys(d.k for d in differences))
    figure, axes = common.make_figure(1, len(metrics), figsize=(4.5 * len(metrics), 3.8))
    for axis, metric in zip(axes, metrics):
        axis.axhline(0, color="black", lw=1, label="DE")
        for i, (method, colour) in enumerate(zip(methods, common.colours(len(methods)))):
            shown = [d for d in differences if (d.method, d.metric) == (method, metric)]
            # Methods stand side by side at each K.
            places = [ks.index(d.k) + 0.08 * (i - len(methods) / 2) for d in shown]
            axis.errorbar(places, [d.mean for d in shown], [d.interval for d in shown], fmt="o-",
                          ms=4, lw=1, capsize=2, color=colour, label=method)
        title = metric.replace("lpd", "LPD")
        axis.set(xlabel="number of members K", ylabel=f"{title} minus that of DE")
        axis.set_xticks(range(len(ks)), ks)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle("bars: 1.96 standard errors over paired test examples", fontsize=9)
    run.save_figure(figure, "differences.png")


# ---- Options ------------------------------------------------------------------------------------

# published learning rates of SWAG, for images and texts, and for molecules
SWAG_LRS = [0.1, 0.05, 0.04, 0.03, 0.02, 0.01, 9e-3, 8e-3, 7e-3, 6e-3, 5e-3, 4e-3, 3e-3, 2e-3,
            1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 1e-4]
MOLECULE_LRS = [1e-6, 5e-7, 4e-7, 3e-7, 2e-7, 1e-7, 9e-8, 8e-8, 7e-8, 6e-8, 5e-8, 4e-8, 3e-8, 2e-8,
                1e-8, 9e-9, 8e-9, 7e-9, 6e-9, 5e-9, 4e-9, 3e-9, 2e-9, 1e-9, 9e-10, 8e-10, 7e-10,
                6e-10, 5e-10, 1e-10]
# A data set alone selects the paper's settings for it: what its preset does not say is the default
# of `parse_args`.
GLYPHS = dict(model="wrn_10_4", width=0.25, epochs=40, batch_size=32, weight_decay=1e-4, members=5,
              ensembles=[1, 2, 5], samples=[20], val_samples=10, num_val=500, limit_train=1000,
              limit_test=2000, swag_epochs=8, swag_lrs=[0.03, 0.01], ood=["glyphs_letters"])
PRESETS = {
    "cifar10": dict(augment=True, ood=["svhn+cifar100"]),
    # The paper's larger network has settings of its own: --dataset cifar10 --preset this.
    "cifar10_wrn_28_10": dict(model="wrn_28_10", augment=True, epochs=200, swag_epochs=25,
                              structure="diag", ood=["svhn+cifar100"]),
    "cifar100": dict(augment=True, ood=["svhn+cifar10"]),
    "sst2": dict(model="bert_256_4", dropout=0.5, batch_size=64, lr=5e-3, weight_decay=3e-3),
    "qm9": dict(model="painn", batch_size=100, lr=5e-4, weight_decay=0.01, opt="adamw", epochs=650,
                swag_lrs=MOLECULE_LRS),
    "glyphs": GLYPHS,
    # Half of its training images are blends of two digits with a drawn label.
    "dirty_glyphs": GLYPHS,
    "reviews": dict(model="bert_256_2", width=0.25, dropout=0.1, epochs=8, batch_size=64, lr=2e-3,
                    weight_decay=1e-4, opt="adamw", members=3, ensembles=[1, 3], samples=[20],
                    val_samples=20, swag_epochs=8, swag_lrs=[0.03, 0.01],
                    ood=["reviews_finance"]),
    "clusters": dict(model="painn", width=0.25, epochs=24, batch_size=50, lr=2e-3,
                     weight_decay=0.01, opt="adamw", members=3, ensembles=[1, 3], samples=[30],
                     val_samples=30, limit_train=2500, swag_epochs=6, swag_lrs=[1e-6, 3e-7],
                     ood=["clusters_large"]),
    # The user's own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(model="wrn_10_4", width=0.25, epochs=60, batch_size=32, weight_decay=1e-4,
                   augment=True, num_val=None, members=3, ensembles=[1, 3], samples=[20],
                   val_samples=10, swag_epochs=8, swag_lrs=[0.03, 0.01]),
    # The following are added to the preset of the data set if the option is used: the user's own
    # network gets a few careful epochs, or a new last layer alone, which is wide.
    "--model torchvision/NAME": dict(width=1.0, epochs=10, batch_size=32, lr=0.02,
                                     weight_decay=5e-4, augment=True, structure="diag",
                                     swag_lrs=[3e-3, 1e-3], methods=["map", "llla", "la_nf"]),
    "--freeze": dict(epochs=30, lr=0.01, weight_decay=0.05, augment=False, swag_lrs=[0.03, 0.01]),
}


def parse_args(argv=None):
    """The options; each is added to the group of its role (see ROLES in common.py).

    The run directory belongs to the options of MAP training: members of all seeds lie in it side
    by side, so --seed is an option of the evaluation.
    """
    parser = common.Parser("swag_laplace_ensembles", __doc__, PRESETS,
                           NETWORKS | SEQUENCE_NETWORKS, dataset="dirty_glyphs", model="wrn_16_4",
                           epochs=100, batch_size=128, lr=0.1)
    parser.move("--seed", "evaluation")
    training = parser.training.add_argument
    training("--num-val", type=at_least(1), default=2000,
        help="number of validation images, taken from the training set (published code: 2000)")
    training("--vocab", metavar="FILE",
        help="for sst2: a file with one word piece per line (paper: that of bert-base-uncased), "
        "instead of word pieces of the training sentences")
    training("--dropout", type=between(0, 0.99), default=0.0,
        help="rate of dropout in the MAP networks (published: 0.5 for BERT, else 0)")
    training("--opt", choices=["sgd", "adamw"], default="sgd",
        help="optimiser of the MAP networks: SGD with Nesterov momentum 0.9, or AdamW (published: "
        "SGD, for molecules AdamW)")
    training("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters, also in SWAG's SGD (published: 5e-4; BERT 3e-3, "
        "molecules 0.01)")

    evaluation = parser.evaluation.add_argument
    evaluation("--members", type=at_least(1), default=30, metavar="M",
        help="number of networks; their seeds start at --seed (paper: 30); --runs repeats all with "
        "the next M seeds")
    evaluation("--methods", nargs="+", choices=LABELS, metavar="NAME",
        default=["map", "swa", "swag", "llla", "la_nf"],
        help="posteriors to compare: " + ", ".join(LABELS) + "; map is always among them")
    evaluation("--ensembles", nargs="+", type=at_least(1), default=[1, 2, 5, 10, 20], metavar="K",
        help="ensemble sizes K (paper: 1 2 5 10 20)")
    evaluation("--samples", nargs="+", type=at_least(1), default=[200], metavar="S",
        help="samples of an ensemble, S // K of each of its members (paper: 200); several numbers "
        "give rows for each")
    evaluation("--swag-epochs", type=at_least(2), default=100, metavar="R",
        help="epochs of SGD after the MAP network, and rank of SWAG (published: 100; wrn_28_10 25)")
    evaluation("--swag-lrs", nargs="+", type=at_least(1e-12, float), default=SWAG_LRS,
        metavar="LR", help="constant learning rates of this SGD, of which validation chooses one")
    evaluation("--structure", choices=["full", "diag"], default="full",
        help="Gauss-Newton matrix of the last layer (for molecules the Hessian): all of it or its "
        "diagonal (paper: full; diag for wrn_28_10)")
    evaluation("--flow-layers", nargs="+", type=at_least(1), default=[10], metavar="T",
        help="number of radial flows of LA-NF; several are compared (paper: 1, 5, 10 and 30)")
    evaluation("--val-samples", type=at_least(1), default=100,
        help="number of samples when a learning rate or precision is chosen (published: 100)")
    evaluation("--limit-test", type=at_least(2), metavar="N",
        help="number of examples of each set that is evaluated")
    evaluation("--map-paths", nargs="+", default=[], metavar="FILE",
        help="published MAP networks, which are the members instead of trained ones; the first "
        "file also says the default of --dataset and --model")
    evaluation("--posterior-paths", nargs="+", default=[], metavar="FILE",
        help="published SWA, SWAG, LLLA and LA-NF of these networks, which are then not fitted")

    args = parser.parse(argv, run_name, configured_options)
    check_options(args)
    return args


def run_name(args):
    """The name of the run directory, which members of all seeds share."""
    published = "published" if args.map_paths else None
    return common.run_name(args, published)


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    args.methods = [name for name in LABELS if name == "map" or name in args.methods]
    for name in ("samples", "ensembles", "flow_layers"):
        setattr(args, name, sorted(set(getattr(args, name))))
    is_pretrained = args.model.startswith("torchvision/")
    is_molecules = args.dataset in data.MOLECULES
    uses_swag = uses(args, "swa", "swag")
    common.refuse(args, [
        (not uses_swag, ["swag_epochs", "swag_lrs"], "without --methods swa or swag"),
        (not uses(args, "llla", "la_nf"), ["structure"], "without --methods llla or la_nf"),
        (not uses(args, "la_nf"), ["flow_layers"], "without --methods la_nf"),
        (args.methods == ["map"], ["val_samples"], "without a method other than map"),
        (not uses(args, *SAMPLED), ["samples"], f"without --methods {' or '.join(SAMPLED)}"),
        (not has_images(args), ["image_size", "num_val", "augment"], f"on {args.dataset}"),
        (data.has_val_folder(args.dataset), ["num_val"], "with a folder val"),
        (is_molecules, ["structure"], "on molecules, whose Hessian is always full"),
        (args.dataset != "sst2", ["vocab"], f"on {args.dataset}"),
        (is_pretrained, ["dropout"], f"with --model {args.model}"),
        (args.map_paths, ["seed", "members", "runs", "epochs", "lr", "opt", "dropout", "augment",
                          "num_val"], "with --map-paths"),
        (not args.map_paths, ["posterior_paths"], "without --map-paths"),
    ])
    if args.device.type == "mps":
        raise UserError("--device mps has no float64, which all posteriors need; use --device cpu")
    if args.map_paths:
        args.members = len(args.map_paths)
        args.runs = 1
        if is_pretrained:
            raise UserError(f"--model {args.model}: --map-paths are networks of "
                            f"{', '.join(NETWORKS | SEQUENCE_NETWORKS)}")
    if "mcdo" in args.methods and (args.map_paths or is_pretrained):
        raise UserError("--methods mcdo trains networks with several rates of dropout, which "
                        "neither --map-paths nor torchvision/NAME allow; remove it")
    is_fixed = is_pretrained and args.weights != "none" and args.epochs == 0
    if is_fixed and args.members * args.runs > 1:
        raise UserError("--epochs 0: all members would be the same network; use --members 1 "
                        "and no --runs")
    if len({f"{rate:g}" for rate in args.swag_lrs}) < len(args.swag_lrs):
        raise UserError("--swag-lrs: two rates have the same first six digits; give different ones")
    check_ensembles(args)


def check_ensembles(args):
    """Skip ensembles that are too large for --members; each member must give a sample."""
    too_large = [k for k in args.ensembles if k > args.members]
    if too_large == args.ensembles:
        raise UserError(f"--ensembles {args.ensembles[0]}: must not exceed --members "
                        f"{args.members}")
    if too_large and "ensembles" not in args.explicit:
        args.ensembles = sorted(set(args.ensembles + [args.members]))
    if too_large:
        # Members are sampled for them anyway, for a larger study later.
        common.print_on_main(f"skipped: ensembles of {', '.join(map(str, too_large))}, for which "
                             f"--members {args.members} are too few")
    largest = max(set(args.ensembles) - set(too_large))
    if uses(args, *SAMPLED) and args.samples[-1] < largest:
        raise UserError(f"--samples {args.samples[-1]}: must be at least one for each member of "
                        f"--ensembles {largest}")


def uses(args, *methods):
    """Whether the study compares any of these methods."""
    return any(method in args.methods for method in methods)


# ---- Main ---------------------------------------------------------------------------------------


def load_splits(args):
    """All sets of a study, as data.Splits."""
    names = []  # of OOD sets
    for parts in ood_unions(args.ood).values():
        names += [part for part in parts if part not in names]
    if not has_images(args):
        splits = load_sequences(args, names)
    else:
        # No seed changes the validation images, as published, or features of random networks.
        splits = data.load_splits(common.with_options(args, seed=0), seed=0, ood=names,
                                  split=partial(split_images, num_val=args.num_val),
                                  statistics=pixel_statistics)
    ood = {name: data.stratified_subset(dataset, args.limit_test)
           for name, dataset in splits.ood.items()}
    return splits._replace(test=data.stratified_subset(splits.test, args.limit_test), ood=ood)


def split_images(dataset, num_val):
    """(training rows, validation rows); the copies of an image, which are a group, stay together.

    Published: the first images of this permutation, in which each is a group of its own.
    """
    n = len(dataset)
    num_val = num_val or n // 10
    if not 0 < num_val < n:
        raise UserError(f"--num-val {num_val}: {dataset.name} has {n} training images")
    if dataset.files:  # the user's own images: classes keep their shares
        return data.class_split(dataset.labels, 0, num_val / n)
    groups = torch.arange(n)
    if dataset.groups is not None:
        _, groups = dataset.groups.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(groups.max()) + 1, generator=generator)
    place = order.argsort()[groups]                                    # [N]
    rows = place.argsort(stable=True)
    # The group of the last of them is not split.
    is_val = place[rows] <= place[rows[num_val - 1]]
    return rows[~is_val], rows[is_val]


def pixel_statistics(dataset):
    """(mean, std) of each channel of the training images."""
    if not hasattr(dataset, "images"):  # they are read from files
        return dataset.mean, dataset.std
    pixels = dataset.images.float()
    if dataset.images.dtype == torch.uint8:
        pixels = pixels / 255
    std, mean = torch.std_mean(pixels, (0, 2, 3))
    std[std == 0] = 1  # a channel may be empty
    return tuple(mean.tolist()), tuple(std.tolist())


def load_sequences(args, ood_names):
    """The Splits of sentences or molecules."""
    if args.dataset in data.TEXTS:
        train = data.load_text(args.dataset, "train", args.data_dir, vocab_file=args.vocab)
        read = partial(data.load_text, args.dataset, data_dir=args.data_dir, reference=train)
    else:
        read = partial(data.load_molecules, args.dataset, data_dir=args.data_dir)
        train = read("train")
    if args.dataset == "sst2" and not common.on_main(data.sst2_has_test_labels, args.data_dir):
        common.print_on_main("note: test.tsv of SST-2 has no labels (GLUE), so dev.tsv is the test "
                             "set, and rows of train.tsv are the validation set; for labels, write "
                             "those of huggingface.co/datasets/SetFit/sst2 as sentence<TAB>label")
    if args.dataset == "sst2" and not args.vocab:
        common.print_on_main("note: word pieces are made from the training sentences; BERT's are "
                             "vocab.txt of huggingface.co/google-bert/bert-base-uncased (--vocab)")
    val = read("val")
    test = read("test")
    fingerprints = data.fingerprints(args, test, train, val)
    train = data.stratified_subset(train, args.limit_train)
    ood = data.ood_sets(ood_names, train, args.data_dir, required="ood" in args.explicit)
    predicted = None
    if args.predict:
        predicted = data.predict_set(args.predict, train, args.data_dir)
    return data.Splits(train, val, test, ood, predicted, fingerprints)


def read_all_published(args):
    """{(posterior, seed): Published} of the files of --map-paths and --posterior-paths."""
    published = {}
    for path in args.map_paths + args.posterior_paths:
        file = read_published(path)
        key = (file.name, file.seed)
        if (file.name == "map") != (path in args.map_paths) or key in published:
            raise UserError(f"{path} holds {file.name} of seed {file.seed}; --map-paths takes a "
                            "MAP network of each seed, --posterior-paths a posterior of each kind")
        published[key] = file
    names = posterior_names(args)
    for (name, seed), file in published.items():
        if ("map", seed) not in published or name not in names:
            raise UserError(f"{file.path} holds {name} of seed {seed}, which has no network in "
                            "--map-paths, or is not among --methods and --flow-layers")
    flows = [name for name in names if name.startswith("la_nf")]
    for flow, (name, seed) in itertools.product(flows, published):
        # A flow that is fitted here belongs to the matrix that is computed here.
        if name == "llla" and (flow, seed) not in published:
            raise UserError(f"{published[name, seed].path}: with a published LLLA, LA-NF has to be "
                            f"published, too; give the file of {flow}, or remove la_nf from "
                            "--methods")
    return published


def check_network(train_set, args):
    """Refuse, before training, a network that fails; returns one."""
    net = make_network(args, train_set)
    if has_images(args):
        common.try_batch(net.train(args.epochs > 0), train_set, args)
    if "mcdo" in args.methods and not any(isinstance(m, nn.Dropout) for m in net.modules()):
        raise UserError(f"--model {args.model} has no dropout; remove mcdo from --methods")
    return net


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    splits = load_splits(args)
    published = read_all_published(args)
    check_published(check_network(splits.train, args), published)
    study = make_study(args, splits, published)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    run = common.Run(args, splits.fingerprints, splits.summary())
    study = study._replace(run=run)
    for seed in study.seeds:
        # The network theta_m; then each posterior is fitted to it, and predicts each set.
        if args.map_paths:
            net = load_published(make_network(args, splits.train), published["map", seed])
        else:
            net = train_map(study, seed, args.dropout)
        fit_member(Member(study, seed, net))
    # Ensembles of K members, and their differences to deep ensembles of the same members.
    rows, differences = common.on_main(evaluate, study)
    if args.predict:
        common.on_main(write_predictions, study)
    if args.plot and differences:
        common.on_main(plot_differences, differences, run)
    columns = ["accuracy", "lpd", "lpd_minus_de", "ece15", "auroc_total"]
    if study.energies:
        columns = ["mae_milli", "lpd", "lpd_minus_de", "ece", "auroc_total"]
    rows = run.report(rows, columns, differences=[d._asdict() for d in differences])
    if differences:
        print_differences(differences)
    return rows


if __name__ == "__main__":
    common.launch(main)
