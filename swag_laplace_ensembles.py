"""Local posteriors in deep ensembles: SWAG, last-layer Laplace, and its refinement by a flow.

Jordahn, Jensen, Schmidt, Andersen, "On Local Posterior Structure in Deep Ensembles", AISTATS 2025,
arXiv:2503.13296. Does an ensemble of posteriors predict better than one of points? M networks
theta_m (MAP) are trained, and each gets local posteriors q. Ensembles of K of them average S
samples, S // K of each:  p(y | x) = (1 / S) sum_s p(y | x, theta_s).

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
  python swag_laplace_ensembles.py --dataset cifar10 --map-paths FILE.pt ...  # published networks
  python swag_laplace_ensembles.py --members 1 --seed 3 --name apart  # one member, on any machine;
      its files apart/seed3-* go into the directory of a study, which then trains the others

Expected (more in tests/RESULTS.md): LPD minus that of DE of the same members, mean of --seed 1, 6
  and 11, K = 1 and 5: SWA +.023, +.006; SWAG +.057, -.004; LLLA +.033, -.014; LA-NF +.047, -.017.

Differences from the published code ("there"):
  - SWAG samples what is trained; there, also FRN's frozen epsilon, which it moves by 70 times its
    size. It recomputes the statistics of batch norm for every sample; there, they stay.
  - The first S // K samples of a member serve all its ensembles; there, each draws anew. Equal
    ensembles count once, and K = 1 gives each member once.
  - The 21 precisions of LLLA share noise and an eigendecomposition, whose root of the covariance
    is symmetric (there, fresh noise, Cholesky's root); the 15 of LA-NF share noise and batches
    (there, fresh). A sample of LA-NF is one network for the whole set (there, for each batch).
  - One sample of MC dropout has dropout, too. No early stopping, which only affects WRN-28-10.
  - AUPR (in) and FPR at 95 % TPR take the test set as positive (there, the OOD set); areas are
    sums of steps (there, trapezoids), bins of the ECE are closed on the right (there, left).
  - Word pieces are made from the training sentences, unless --vocab gives BERT's. Without labels
    in SST-2's test.tsv (GLUE), dev.tsv is the test set, and 2,000 rows of train.tsv validate.
  - Images that are copies with other labels stay together when validation images are taken.
  - Not here: IVON; SGD's iterates as samples; marginal likelihood, probit, bridge and GLM
    predictions of LLLA; planar flows; a squared error in MAP's loss; corrupted images, Yahoo
    finance, Alchemy; MCE and 20 scores of regression. As there, validation data choose all.
"""

import argparse
import contextlib
import copy
import itertools
import math
import random
import re
import time
from collections import OrderedDict
from dataclasses import replace
from functools import cache, cached_property, partial
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


def swag_moments(iterates):
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

    The energy of a molecule is a sum over its atoms, so x has a row for each of all A atoms.
    """

    x: Tensor                       # [N, D] features; for energies [A, D]
    labels: Tensor | None           # [N] int64; for energies float64, in eV
    energies: bool = False          # whether energies are predicted, not classes
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
    z = F.linear(last.x, weight, bias).view(-1, s, c).transpose(0, 1)          # [S, N or A, C]
    if last.energies:
        return energy_outputs(z, last)
    return z.log_softmax(-1)


def energy_outputs(z, last):
    """Mean and variance [S, N, 2] of energies of molecules, from z [S, A, 2] of their atoms."""
    variance = (F.softplus(z[..., 1]) + 1e-8).square()
    atoms = torch.stack([z[..., 0], variance], -1)                             # [S, A, 2]
    sums = sum_by(last.molecule, atoms.transpose(0, 1), len(last.offset))      # [N, S, 2]
    sums = sums.transpose(0, 1).double()
    mean = last.offset + last.scale * sums[..., 0]
    return torch.stack([mean, last.scale.square() * sums[..., 1]], -1)


def log_density(outputs, labels, energies=False):
    """log p(y_n | theta_s) [S, N] in nats: categorical; of energies, Gaussian."""
    if not energies:
        index = labels.expand(len(outputs), -1)[..., None]                     # [S, N, 1]
        return outputs.gather(-1, index)[..., 0]
    mean, variance = outputs.unbind(-1)
    distance = (labels - mean).square() / variance
    return -0.5 * (distance + variance.log() + math.log(2 * math.pi))


def log_predictive_density(outputs, labels, energies=False):
    """LPD = mean_n log (1/S) sum_s p(y_n | theta_s), in nats: the log of a mean.

    outputs [S, N, C]; labels [N].
    """
    log_p = log_density(outputs, labels, energies).double()                    # [S, N]
    mixture = log_p.logsumexp(0) - math.log(len(log_p))
    return mixture.mean().item()


def data_loss(outputs, labels, energies=False, factor=1.0):
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


def eigh(h):
    """Eigenvalues and eigenvectors of a symmetric matrix."""
    try:
        return torch.linalg.eigh(h)
    except RuntimeError:  # the solvers of GPUs fail for about 25,000 columns
        values, vectors = torch.linalg.eigh(h.cpu())
        return values.to(h.device), vectors.to(h.device)


def diagonal_spectrum(theta, last):
    """The diagonal of the generalised Gauss-Newton matrix H, see `full_spectrum`."""
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    variance = probs * (1 - probs)
    of_weight = variance.T @ last.x.square()                                   # [C, D]
    return Spectrum(torch.cat([of_weight.flatten(), variance.sum(0)]), None)


def full_spectrum(theta, last):
    """The generalised Gauss-Newton matrix H of the cross entropy, a sum over examples, no mean.

        H = sum_n L_n (x) x~_n x~_n^T,   L_n = diag p_n - p_n p_n^T,   x~ = (x, 1)
          = (V (x) I) H' (V (x) I)^T,    H' = sum_n V^T L_n V (x) x~_n x~_n^T

    (x) is the Kronecker product. The columns of V [C, C - 1] are an orthonormal basis of the
    contrasts between classes, the rest of R^C beside (1, ..., 1): adding the same to all logits
    changes no probability, so L_n (1, ..., 1) = 0. H therefore has the eigenvalues of the smaller
    H', and D + 1 times 0. These are exact zeros here: the posterior is widest there, and rounding
    would decide its width.
    """
    probs = head_outputs(theta[None], last)[0].exp()                           # [N, C]
    c = probs.shape[1]
    d1 = last.x.shape[1] + 1
    # An orthonormal basis of R^C: first the shift (1, ..., 1) / sqrt(C), then V.
    start = torch.eye(c, dtype=torch.float64, device=probs.device)
    start[:, 0] = 1
    basis = torch.linalg.qr(start).Q                                           # [C, C]
    shift = basis[:, :1]
    contrasts = basis[:, 1:]
    h = contrast_ggn(last.x, probs, contrasts.to(probs))
    values, vectors = eigh(h.flatten(0, 1).flatten(1))
    vectors = vectors.to(last.x).view(c - 1, d1, -1)
    vectors = torch.einsum("ca,adm->cdm", contrasts.to(last.x), vectors)
    null = shift.to(last.x)[:, :, None] * torch.eye(d1).to(last.x)
    table = torch.cat([vectors, null], 2)                      # [C, D + 1, P]
    # In theta's order: the weight row by row, then the bias.
    basis = torch.cat([table[:, :-1].flatten(0, 1), table[:, -1]])
    values = torch.cat([values.clamp_min(0), values.new_zeros(d1)])
    return Spectrum(values, basis)


def contrast_ggn(x, probs, contrasts, stripe=64):
    """H' of `full_spectrum` in float64, [C - 1, D + 1, C - 1, D + 1], for its V [C, C - 1].

    No Jacobian is formed: the block of two contrasts a and b is the Gram matrix of the features,
    in which example n has the weight v_a^T (diag p_n - p_n p_n^T) v_b.
    """
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)               # [N, D + 1], with ones for the bias
    k = contrasts.shape[1]
    d1 = x.shape[1]
    h = torch.zeros(k, d1, k, d1, dtype=torch.float64, device=x.device)
    rows = 8192 if x.is_cuda else 1024  # which stay in a CPU's cache
    for x1, p in zip(x.split(rows), probs.split(rows)):                        # [n, D + 1], [n, C]
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


def energy_spectrum(theta, last):
    """The Hessian in theta of `data_loss` for energies, whose eigenvalues may be negative.

    Exact, in float64, by P backward passes: theta is short.
    """
    last = last._replace(x=last.x.double())

    def loss(theta):
        return data_loss(head_outputs(theta[None], last)[0], last.labels, energies=True)

    hessian = torch.autograd.functional.hessian(loss, theta.double())          # [P, P]
    return Spectrum(*eigh(hessian))


def laplace_samples(theta, spectrum, prior_precision, noise):
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


def precision_scores(theta, spectrum, last, noise):
    """The LPD of each prior precision of LAPLACE_GRID, with the same noise; NaN: no posterior."""
    precisions = torch.tensor(LAPLACE_GRID, dtype=torch.float64, device=theta.device)
    scores = []
    for samples in laplace_samples(theta, spectrum, precisions[:, None, None], noise):
        outputs = head_outputs(samples, last)
        scores.append(log_predictive_density(outputs, last.labels, last.energies))
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
    for centre, alpha, beta in zip(centres.unbind(-2), alphas.unbind(-1), betas.unbind(-1)):
        offset = theta - centre
        r = offset.norm(dim=-1)
        h = 1 / (alpha + r)
        across = (p - 1) * torch.log1p(beta * h)
        along = torch.log1p(beta * h - beta * h.square() * r)
        log_det = log_det + (across + along)
        theta = theta + (beta * h)[..., None] * offset
    return theta, log_det


def negative_elbo(flow, theta, spectrum, base_precision, prior_precision, noise, last, n):
    """The negative ELBO [G] of G flows at once, in nats, from one sample t of each.

        log q(t) - log N(t; 0, I / prior_precision) - (N / B) sum_b log p(y_b | t)

    q is N(theta, (H + base_precision I)^-1) through the flow, with the precision that Laplace's
    approximation has chosen; the prior's precision [G] is another one for each flow. Tensors of
    the flow [G, T, ...]; noise [1, P] for all or [G, P]; `last` holds the B examples of the batch;
    n is N.
    """
    p = noise.shape[1]
    log_2pi = math.log(2 * math.pi)
    base = laplace_samples(theta, spectrum, base_precision, noise)
    t, log_det_flow = apply_flow(flow, base)                                   # [G, P], [G]
    log_det_precision = (spectrum.values + base_precision).log().sum().to(t)
    log_base = 0.5 * (log_det_precision - noise.square().sum(-1) - p * log_2pi)
    log_q = log_base - log_det_flow
    squared_distance = prior_precision * t.square().sum(-1)
    log_prior = 0.5 * (p * (prior_precision.log() - log_2pi) - squared_distance)
    log_likelihood = log_density(head_outputs(t, last), last.labels, last.energies).sum(1)
    return log_q - log_prior - n / len(last.labels) * log_likelihood


def member_combinations(members, k):
    """The published ensembles of k of M members, as sorted member numbers from 1.

    Ensemble i = 1, ..., 30 is Python's random.sample of 1..M with the seed of Cantor's pairing,
    (k + i)(k + i + 1) / 2 + i. Here k = 1 gives each member once, and equal ensembles count once.
    """
    if k == 1:
        return [[member] for member in range(1, members + 1)]
    found = []
    for i in range(1, 31):
        seed = (k + i) * (k + i + 1) // 2 + i
        chosen = sorted(random.Random(seed).sample(range(1, members + 1), k))
        if chosen not in found:
            found.append(chosen)
    return found


class Mixture(NamedTuple):
    """The mean prediction of some samples."""

    log_probs: Tensor  # [..., C]  log of the mean probability
    entropy: Tensor    # [...]     mean entropy of a sample, in nats
    samples: int


class RunningMixture:
    """The Mixture of the samples so far, none of which is kept."""

    def __init__(self):
        self.count = 0
        self.log_sum = torch.tensor(-math.inf)
        self.entropy_sum = 0.0

    def add(self, log_probs):
        """One more sample [..., C]."""
        log_probs = log_probs.double()
        self.count += 1
        self.log_sum = torch.logaddexp(self.log_sum, log_probs)
        self.entropy_sum = self.entropy_sum + torch.special.entr(log_probs.exp()).sum(-1)

    def mixture(self):
        mean = self.log_sum - math.log(self.count)
        return Mixture(mean, self.entropy_sum / self.count, self.count)


# ---- Model --------------------------------------------------------------------------------------
# A network returns (outputs, features of its last layer `head`): for images and texts, logits
# [B, C] and [B, D]; for molecules, mean and variance of the energy [B, 2], and the features of all
# their atoms [A, D].


def widen(x):
    """bfloat16 as float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    extractor = Bert(len(train_set.vocab), dim, layers, args.dropout)
    # published code: weights N(0, 0.02^2), biases 0, but for the head, which PyTorch initialises
    for name, parameter in extractor.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    nn.init.zeros_(extractor.words.weight[:1])
    return Network(extractor, nn.Linear(dim, train_set.num_classes))


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
        raise UserError(f"{molecules.name}: all training molecules have the same target per atom; "
                        "there is nothing to learn, choose another --target")
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
    if isinstance(train_set, (data.TextSet, data.MoleculeSet)):
        if args.model not in SEQUENCE_NETWORKS:
            raise UserError(f"--model {args.model}: choose one of {', '.join(SEQUENCE_NETWORKS)}")
        net = SEQUENCE_NETWORKS[args.model](args, train_set)
    else:
        net = Network(*data.backbone_and_head(args, NETWORKS, train_set.num_classes,
                                              train_set.shape))
    return net.to(args.device, memory_format=torch.channels_last)


# ---- Published checkpoints ----------------------------------------------------------------------
# The authors' files (data.dtu.dk, project 236885) hold {"cfg", "state_dict"}; the configuration is
# made of objects of OmegaConf.


class ConfigNode:
    """Stands for the classes of OmegaConf: keeps an object's state, and runs none of its code."""

    def __setstate__(self, state):
        self.state = state

    def value(self, *names):
        """The value that the names lead to."""
        node = self
        for name in names:
            node = node.state["_content"][name]
        return node.state["_val"]


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


class Published(NamedTuple):
    """A published network or posterior."""

    path: str
    title: str      # map, swa, swag, llla, la_nf10
    seed: int
    state: dict
    identity: list  # name, size and time of the last change of the file


def read_published(path):
    """The Published of a file. Its tensors are read where they are needed: it may have 5 GB."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            file = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        status = Path(path).stat()
        target = file["cfg"].value("inference", "init", "_target_")
        title = PUBLISHED_CLASSES[target.split(".")[-1]]
        if title == "la_nf":
            title += str(file["state_dict"]["num_transforms"])
        return Published(path, title, file["cfg"].value("seed"), file["state_dict"],
                         [Path(path).name, status.st_size, status.st_mtime_ns])
    except Exception as error:  # of many types
        raise UserError(f"{path} is not a published network, SWA, SWAG, LLLA or LA-NF "
                        f"({type(error).__name__}: {common.one_line(error)})") from None


# Parts of the published names, and what they are called here; they are replaced in this order.
PUBLISHED_NAMES = {
    "head.fc": "head", "backbone.block": "extractor.block", ".layer.": ".",
    "backbone.conv_1": "extractor.conv_1", "backbone.norm_1": "extractor.norm_1",
    # BERT
    "backbone.model.": "extractor.", "encoder": "layers", "embeddings.": "", "word_": "words.",
    "position_": "positions.", "token_type_": "types.", "pooler.dense": "pooler.0",
    "attention.self.query.": "self_attn.in_proj_", "attention.self.key.": "self_attn.in_proj_",
    "attention.self.value.": "self_attn.in_proj_", "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1", "intermediate.dense": "linear1",
    "output.dense": "linear2", "output.LayerNorm": "norm2", "LayerNorm": "norm",
    # PaiNN
    "backbone.0.atom_embedding": "embedding", "backbone.0.message_blocks": "layers",
    "backbone.0.update_blocks": "layers", "scalar_vector_network": "update",
    "scalar_network": "message", "rbf_network.0": "filter", "U.0": "u", "V.0": "v",
    "backbone.1.partial_readout_network": "readout", "head.head.readout_network": "head",
    "head.head.mean": "statistics", "head.head.std": "statistics",
    "head.head.atom_refs": "references",
}
# FRN's constant epsilon, and what is a function of the rest; what is not trained.
UNUSED = re.compile(r"\.eps$|radial_basis|prediction_finalizer")
BUFFERS = re.compile(r"\.running_|\.num_batches|radial_basis|head\.head\.[^r]")


def published_tensors(file):
    """{published name: tensor} of the network in a file of MAP, SWA or SWAG."""
    names = [name for name in file.state if name != "iterates"]
    return {name.removeprefix("model."): file.state[name] for name in names}


def state_here(net, tensors):
    """Tensors by their published names as a state dict of `net`, without what is UNUSED."""
    parts = {}  # {name here: tensors}
    for name, tensor in tensors.items():
        if UNUSED.search(name):
            continue
        for theirs, ours in PUBLISHED_NAMES.items():
            name = name.replace(theirs, ours)
        tensor = tensor.flatten()
        if name == "references":
            tensor = F.pad(tensor, (0, 1))  # of 100 elements; here, of 101
        parts.setdefault(name, []).append(tensor)
    # Query, key and value are one matrix here; mean and std are one tensor.
    state = {name: torch.cat(tensors) for name, tensors in parts.items()}
    for name, like in net.state_dict().items():
        if name in state:
            state[name] = state[name].view(like.shape)
    return state


def load_published(net, file):
    """Give `net` the weights of a published network; returns it."""
    try:
        net.load_state_dict(state_here(net, published_tensors(file)))
    except RuntimeError as error:
        raise UserError(f"{file.path} does not fit --model, --dataset or --vocab: "
                        f"{common.one_line(error)}") from None
    return net.eval()


@contextlib.contextmanager
def reading(file):
    """Say of errors in this block that the Published does not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UserError(f"{file.path} lacks a part of a published {file.title}, or belongs to "
                        f"another network ({type(error).__name__}: {common.one_line(error)})"
                        ) from None


def published_iterates(net, file):
    """SWAG's iterates [R, P] in the order of the parameters of `net`, without FRN's epsilons."""
    load_published(copy.deepcopy(net), file)  # refuses a file that does not fit
    # The places of all parameters in an iterate, which follow each other as in the file.
    places = {}
    count = 0
    for name, tensor in published_tensors(file).items():
        if not BUFFERS.search(name):
            places[name] = torch.arange(count, count + tensor.numel())
            count += tensor.numel()
    with reading(file):
        iterates = file.state["iterates"]                              # [count, R]
        if iterates.ndim != 2 or len(iterates) != count:
            raise ValueError(f"iterates {list(iterates.shape)} of {count} parameters")
        here = state_here(net, places)
        order = torch.cat([here[name].flatten() for name, _ in net.named_parameters()])    # [P]
        return iterates[order].T.contiguous()


def published_flow(file, device):
    """The flow of a file of LA-NF: centres [T, P], a and b [T]."""
    flow = []
    for name in ("x0", "alpha_prime", "beta_prime"):
        tensors = []
        for layer in range(file.state["num_transforms"]):
            tensors.append(file.state["guide_state_dict"][f"transform.{layer}.{name}"])
        flow.append(torch.stack(tensors).squeeze(-1).to(device))
    return flow


# ---- Training -----------------------------------------------------------------------------------

MAP_LOSS_FACTOR = 4e-4  # published code: 0.02^2, for energies and MAP only
# Each use of random numbers has a key of its own; LLLA and LA-NF share "samples".
STREAMS = {"epoch": 2, "dropout": 12, "swag": 13, "swag_low_rank": 14, "llla_val": 15,
           "flow_start": 16, "flow_epoch": 17, "la_nf_val": 18, "samples": 19}


class Diverged(UserError):
    """A loss or a weight is not finite."""


class Study:
    """What every step needs: the options, the run directory, and all sets with their loaders."""

    def __init__(self, args, run, sets, published):
        self.args = args
        self.run = run
        self.sets = sets            # data.Sets
        self.published = published  # {(title, seed): Published}
        self.seeds = sorted(seed for title, seed in published if title == "map")  # of the members
        if not args.map_paths:
            self.seeds = list(range(args.seed, args.seed + args.members * args.runs))
        self.energies = args.dataset in data.MOLECULES  # or classes are predicted
        # The training set, shuffled. published code: MAP alone sees augmented images
        shuffled = partial(make_loader, sets.train, args, args.batch_size, shuffle=True,
                           limit_steps=args.limit_steps)
        self.swag_loader = shuffled()
        self.map_loader = self.swag_loader
        if args.augment:
            self.map_loader = shuffled(augment="crop_flip")
        parts = {"train": sets.train, "val": sets.val, "test": sets.test}
        for name, dataset in sets.ood.items():
            parts[f"ood-{name}"] = dataset
        if sets.predict is not None:
            parts["predict"] = sets.predict
        self.loaders = {}  # {name of a part: its loader, unshuffled}
        batch_size = 512 if args.device.type == "cuda" else 100
        for part, dataset in parts.items():
            self.loaders[part] = make_loader(dataset, args, batch_size)
        self.evaluated = [part for part in parts if part not in ("train", "val")]
        # What networks are made from, beside the options.
        self.origin = data.origin(sets.train, args)
        self.origin["validation examples"] = data.digest(sets.val)


def make_loader(dataset, args, batch_size, **options):
    """Batches of this process, on its device; batch[0] is what a network takes."""
    if isinstance(dataset, (data.TextSet, data.MoleculeSet)):
        return data.SequenceLoader(dataset, batch_size, args.device, **options)
    return data.Loader(dataset, batch_size, args.device, workers=args.workers, channels_last=True,
                       **options)


class Pass(NamedTuple):
    """What a network makes of this process's examples of a set."""

    rows: Tensor      # [b]
    outputs: Tensor   # [b, C] log probabilities; of energies, mean and variance
    features: Tensor  # [b, D]; of molecules [a, D]
    seconds: float


@torch.no_grad()
def forward(study, net, part):
    """The Pass of a network over a set."""
    start = time.perf_counter()
    batches = []
    for batch in study.loaders[part].epoch():
        with common.autocast(study.args):
            outputs, features = net(batch[0])
        batches.append((batch.index, outputs, features))
    rows, outputs, features = map(torch.cat, zip(*batches))
    if not study.energies:
        outputs = outputs.log_softmax(1)
    return Pass(rows.cpu(), outputs, features, time.perf_counter() - start)


def network_samples(study, networks, part):
    """Yield (rows, outputs) of each network of an iterable, see `Pass`."""
    for net in networks:
        own = forward(study, net, part)
        yield own.rows, own.outputs


def summarise(study, samples, counts):
    """What samples predict for a set, in its order, from an iterable of (rows, outputs).

    For classes "log_probs_<n>" [N, C] and "entropy_<n>" [N], the Mixture of the first n samples
    for each n of `counts`; for energies "samples" [N, S, 2], mean and variance of every sample. {}
    except on the main process.
    """
    predictions = {}
    energies = []
    running = RunningMixture()
    for rows, outputs in samples:
        if study.energies:
            energies.append(outputs)
            continue
        running.add(outputs)
        if running.count in counts:
            mixture = running.mixture()
            predictions[f"log_probs_{running.count}"] = mixture.log_probs.float()
            predictions[f"entropy_{running.count}"] = mixture.entropy
    if study.energies:
        predictions["samples"] = torch.stack(energies, 1)
    predictions["index"] = rows
    return common.gather_rows([predictions])


def validation_lpd(study, networks, samples=1):
    """The log predictive density of sampled networks on the validation set."""
    predictions = summarise(study, network_samples(study, networks, "val"), [samples])
    return common.on_main(lpd_of, study, predictions, samples)


def lpd_of(study, predictions, samples):
    """The log predictive density of what `samples` samples predict for the validation set."""
    if study.energies:
        outputs = predictions["samples"].transpose(0, 1)               # [S, N, 2]
    else:
        outputs = predictions[f"log_probs_{samples}"][None]            # [1, N, C]
    return log_predictive_density(outputs, study.sets.val.labels, study.energies)


def train_epoch(study, model, optimiser, loader, seed, epoch, factor=1.0):
    """Minimise `data_loss` for an epoch; returns its mean."""
    args = study.args
    # The order and the augmentation of examples, and masks of dropout, depend on (seed, epoch).
    loader.seed = seed
    common.seed_all(seed, STREAMS["epoch"], epoch, common.rank())
    model.train()
    total = torch.zeros((), device=args.device)
    examples = 0
    for batch in common.progress(loader, epoch):
        with common.autocast(args):
            outputs, _ = model(batch[0])
        loss = data_loss(outputs, batch.labels, study.energies, factor)

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
    return mean


def train_map(study, seed, dropout):
    """Train theta_m; returns the network with the weights of the best epoch by validation."""
    args = common.with_options(study.args, dropout=dropout)
    common.seed_all(seed)
    net = make_network(args, study.sets.train)
    best = copy.deepcopy(net)
    if args.opt == "adamw":
        optimiser = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay)
    else:
        optimiser = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, nesterov=True,
                                    weight_decay=args.weight_decay)
    model = common.data_parallel(net, args.device, args.compile)
    name = f"seed{seed}-map"
    if dropout > 0:
        name += f"-dropout{dropout:g}"
    history = study.run.resume(name, args.epochs, study.origin, net=net, optimiser=optimiser,
                               best=best)
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        # published code: the learning rate is constant within an epoch
        lr = 0.5 * args.lr * (1 + math.cos(math.pi * epoch / args.epochs))
        optimiser.param_groups[0]["lr"] = lr
        loss = train_epoch(study, model, optimiser, study.map_loader, seed, epoch, MAP_LOSS_FACTOR)
        val_lpd = validation_lpd(study, [net.eval()])
        if val_lpd > max([row["val_lpd"] for row in history], default=-math.inf):
            best.load_state_dict(net.state_dict())
        history.append({"epoch": epoch + 1, "loss": loss, "val_lpd": val_lpd, "lr": lr,
                        "seconds": time.perf_counter() - start})
        study.run.save(name, history, study.origin, net=net, optimiser=optimiser, best=best)
    return best.eval()


# ---- Posteriors ---------------------------------------------------------------------------------
# A member of the study is a network theta_m, and the posteriors around it, each a small class:
#
#   posterior.samples(part, count)   yields (rows, outputs) of `count` samples, see `Pass`
#   posterior.made_from              what its samples are a function of, beside theta_m
#
# Files of all members lie side by side; <set> is test, ood-<name> or predict:
#
#   file                   made by           made from
#   seed3-map              train_map         the options, the training and the validation set
#   seed3-swag-lr0.01      train_sgd         seed3-map; after epoch r it also writes ...-lr0.01-r
#   seed3-swag-lpds-0.01   score_sgd_rate    the iterates seed3-swag-lr0.01-1, -2, ...
#   seed3-llla             fit_laplace       seed3-map
#   seed3-la_nf10          fit_flow          seed3-map, seed3-llla
#   seed3-map-dropout0.1   train_map         as seed3-map
#   seed3-mcdo-lpd-0.1     MCDropout         seed3-map-dropout0.1
#   seed3-swag-<set>       keep_predictions  the posterior and the set
#
# All but checkpoints of training are read by `Member.keep` if they were made from the same, and
# are made anew if not: a later option never retrains an early stage, and nothing stale is read.

FLOW_EPOCHS = 20  # published code
DROPOUTS = (0.05, 0.1, 0.2)  # the rates of MC dropout, of which validation chooses one


class Member:
    """A trained network theta_m, and what the posteriors around it share."""

    def __init__(self, study, seed, net):
        self.study = study
        self.args = study.args
        self.seed = seed
        self.net = net
        self.digest = common.digest(net)
        self.theta = flat_head(net.head).detach()  # [P]
        self.forward = cache(partial(forward, study, net))  # the Pass over a part, made once
        self.sgd_rates = set()  # at which SWAG's SGD is complete

    def keep(self, name, compute, **made_from):
        """The values seed<seed>-<name>: read if they were made from the same, or else computed."""
        made_from |= {"network": self.digest, **self.study.origin}
        return self.study.run.load_or_compute(f"seed{self.seed}-{name}", made_from, compute)

    @cached_property
    def gathered(self):
        """The LastLayers of the training and the validation set, on the main process."""
        return gather_last_layer(self, "train"), gather_last_layer(self, "val")

    def fit(self, fit, *arguments):
        """fit(member, train, val, *arguments) on the main process, with LastLayers of the sets.

        All processes compute the features, and get the result.
        """
        return common.on_main(fit, self, *self.gathered, *arguments)

    @cached_property
    def spectrum(self):
        """The Spectrum of the loss at theta on the training set; within `fit`."""
        train, _ = self.gathered
        if train.energies:
            return energy_spectrum(self.theta, train)
        if self.args.structure == "full":
            return full_spectrum(self.theta, train)
        return diagonal_spectrum(self.theta, train)

    def noise(self, samples, *key):
        """Standard normal noise [samples, P] for last layers, a function of the key."""
        return seeded_noise((samples, len(self.theta)), self.theta.device, *key)


def seeded_noise(shape, device, *key):
    """Standard normal numbers, drawn on the device: a function of the integers `key`."""
    generator = torch.Generator(device).manual_seed(common.derive_seed(*key))
    return torch.randn(*shape, generator=generator, device=device)


def gather_last_layer(member, part):
    """The LastLayer of a whole set, on the main process; None on the others."""
    dataset = member.study.loaders[part].dataset
    own = member.forward(part)
    rows = own.rows
    if member.study.energies:
        rows = data.entries_of(rows, dataset.sizes)  # there are features of each atom
    columns = common.gather_rows([{"index": rows, "x": own.features}])
    if not columns:
        return None
    return last_layer(member.net, columns["x"].to(member.theta.device), dataset)


def last_layer(net, x, dataset):
    """The LastLayer of the examples of a set, whose features are x."""
    labels = dataset.labels.to(x.device)
    if not isinstance(dataset, data.MoleculeSet):
        return LastLayer(x, labels)
    molecule = torch.arange(len(dataset)).repeat_interleave(dataset.sizes).to(x.device)
    offset = net.known_energies(dataset.numbers.to(x.device), molecule, len(dataset))
    return LastLayer(x, labels, True, molecule, offset, net.statistics[1])


def finite_only(lpds):
    """The entries of {choice: validation LPD} that are finite."""
    return {choice: lpd for choice, lpd in lpds.items() if math.isfinite(lpd)}


def choose(lpds, what):
    """The key of the largest validation LPD, of equal ones the first."""
    if not lpds:
        raise UserError(f"no value of {what} gives a finite validation LPD; try others")
    return max(lpds, key=lpds.get)


def choose_precision(member, title, lpds):
    """The prior precision of the largest validation LPD, with a note at an end of the grid."""
    label = LABELS[title.rstrip("0123456789")]
    precision = choose(finite_only(lpds), f"the prior precision of {label}")
    if precision in (min(lpds), max(lpds)):
        print(f"note: seed{member.seed}-{title}: the chosen prior precision {precision:g} is an "
              "end of its grid; a better one may lie beyond", flush=True)
    return precision


# Posteriors over all weights: their samples are networks.


class NetworkPosterior:
    """What posteriors over all weights share: `networks(count)` yields samples."""

    shares_pass = False     # whether one pass of theta_m over a set serves all samples
    more_bytes = (0, 0)     # to predict, beside a network: once, and for each sample

    def __init__(self, member, **made_from):
        self.member = member
        self.made_from = made_from

    def samples(self, part, count):
        return network_samples(self.member.study, self.networks(count), part)


class MAP(NetworkPosterior):
    """The point theta_m; its ensembles are deep ensembles, with which others are compared."""

    shares_pass = True

    def samples(self, part, count):
        own = self.member.forward(part)
        return [(own.rows, own.outputs)]


class SWA(NetworkPosterior):
    """The mean of SGD's iterates, a point; find_iterates() returns them, [R, P]."""

    def __init__(self, member, find_iterates, **made_from):
        super().__init__(member, **made_from)
        self.find_iterates = find_iterates

    @cached_property
    def moments(self):
        """SWAG's mean, variances and deviations."""
        return swag_moments(self.find_iterates())

    def networks(self, count):
        return networks_at(self.member, self.moments[:1])


class SWAG(SWA):
    """The Gaussian through SGD's iterates."""

    def networks(self, count):
        return networks_at(self.member, swag_vectors(self.member.seed, self.moments, count))

    @property
    def more_bytes(self):
        _, variance, deviations = self.moments
        return variance.nbytes + deviations.nbytes, 0


def choose_sgd_rate(member, title):
    """The learning rate of SGD at which SWA or SWAG has the best validation LPD.

    Both are scored at each rate, so that the other one can join the study without another SGD.
    """
    args = member.args
    lpds = {"swa": {}, "swag": {}}  # of the rates so far
    for number, rate in enumerate(args.swag_lrs, 1):
        found = member.keep(f"swag-lpds-{rate:g}", partial(score_sgd_rate, member, rate),
                            rate=rate, epochs=args.swag_epochs, val_samples=args.val_samples)
        for method, lpd in found["lpds"].items():
            lpds[method][rate] = lpd
        if not args.eval:
            common.on_main(delete_iterates, member, args.swag_lrs[:number], lpds)
    return choose(lpds[title], "--swag-lrs")


def score_sgd_rate(member, rate):
    """{"lpds": {method: validation LPD}} of SWA and SWAG at a learning rate, if finite."""
    study = member.study
    samples = study.args.val_samples
    try:
        moments = swag_moments(sgd_iterates(member, rate))
    except Diverged as error:
        common.print_on_main(f"skipped: SWAG at the rate {rate:g} ({error})")
        return {"lpds": {}}
    swa = validation_lpd(study, networks_at(member, moments[:1]))
    vectors = swag_vectors(member.seed, moments, samples)
    swag = validation_lpd(study, networks_at(member, vectors), samples)
    return {"lpds": finite_only({"swa": swa, "swag": swag})}


def sgd_iterates(member, rate):
    """The iterates [R, P] at a learning rate; SGD runs first, if it has not."""
    if rate not in member.sgd_rates:
        train_sgd(member, rate)
        member.sgd_rates.add(rate)
    iterates = []
    for r in range(1, member.args.swag_epochs + 1):
        path = member.study.run.dir / f"seed{member.seed}-swag-lr{rate:g}-{r}.pt"
        iterates.append(common.load_tensors(path)["weights"])
    return torch.stack(iterates).to(member.args.device)


def train_sgd(member, rate):
    """SGD from theta_m at a constant rate; the weights after each epoch are an iterate.

    As published, without augmentation.
    """
    study = member.study
    args = study.args
    net = copy.deepcopy(member.net)
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=0.9,
                                weight_decay=args.weight_decay)
    model = common.data_parallel(net, args.device, args.compile)
    name = f"seed{member.seed}-swag-lr{rate:g}"
    made_from = {**study.origin, "networks": member.digest}
    history = study.run.resume(name, args.swag_epochs, made_from, net=net, optimiser=optimiser)
    for epoch in range(len(history), args.swag_epochs):
        start = time.perf_counter()
        loss = train_epoch(study, model, optimiser, study.swag_loader, member.seed, epoch)
        # The iterate is written before the checkpoint that counts it.
        vector = torch.cat([p.detach().flatten() for p in net.parameters()])       # [P]
        iterate = common.to_bytes({"weights": vector.cpu()})
        common.on_main(study.run.write, f"{name}-{epoch + 1}.pt", iterate)
        history.append({"epoch": epoch + 1, "loss": loss, "lr": rate,
                        "seconds": time.perf_counter() - start})
        study.run.save(name, history, made_from, net=net, optimiser=optimiser)


def delete_iterates(member, rates, lpds):
    """Of these rates, keep the iterates of the best of SWA and SWAG: all take 1 TB (paper)."""
    best = [max(of_rates, key=of_rates.get) for of_rates in lpds.values() if of_rates]
    for rate in rates:
        name = f"seed{member.seed}-swag-lr{rate:g}"
        if rate in best:
            continue
        # The checkpoint goes first: it must not count iterates that are gone.
        folder = member.study.run.dir
        (folder / f"{name}.pt").unlink(missing_ok=True)
        for path in folder.glob(f"{name}-*.pt"):
            path.unlink()


def batch_norms(net):
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in net.modules() if isinstance(module, kind)]


@torch.no_grad()
def networks_at(member, vectors):
    """Yield the networks of vectors of weights [P].

    The statistics of batch norm become the means over all batches of the training set.
    """
    study = member.study
    net = copy.deepcopy(member.net).eval()
    layers = batch_norms(net)
    if layers:
        common.data_parallel(net, study.args.device)  # for batch statistics of the global batch
    sizes = [p.numel() for p in net.parameters()]
    for vector in vectors:
        for p, weights in zip(net.parameters(), vector.split(sizes)):
            p.copy_(weights.view_as(p))
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        batches = study.loaders["train"].epoch() if layers else ()
        for count, batch in enumerate(batches, 1):
            for layer in layers:
                layer.momentum = 1 / count  # all batches weigh the same
            with common.autocast(study.args):
                net(batch[0])
        yield net.eval()


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


class MCDropout(NetworkPosterior):
    """A network that is trained and sampled with dropout, at the rate that validation chooses."""

    def __init__(self, member):
        self.member = member
        # The network that is trained with dropout at a rate: it is trained, or read, once.
        self.train = cache(partial(train_map, member.study, member.seed))
        lpds = {}
        for rate in DROPOUTS:
            found = member.keep(f"mcdo-lpd-{rate:g}", partial(self.score, rate), rate=rate,
                                val_samples=member.args.val_samples)
            lpds |= found["lpds"]
        rate = choose(lpds, "MC dropout's rate")
        self.net = self.train(rate)
        self.made_from = {"rate": rate, "trained": common.digest(self.net)}

    def score(self, rate):
        """{"lpds": {rate: validation LPD}}, if it is finite."""
        count = self.member.args.val_samples
        try:
            self.net = self.train(rate)
        except Diverged as error:
            common.print_on_main(f"skipped: MC dropout at the rate {rate:g} ({error})")
            return {"lpds": {}}
        lpd = validation_lpd(self.member.study, self.networks(count), count)
        return {"lpds": finite_only({rate: lpd})}

    def networks(self, count):
        self.net.train()
        # Dropout alone is random: batch norm keeps its statistics.
        for layer in batch_norms(self.net):
            layer.eval()
        for sample in range(count):
            common.seed_all(self.member.seed, STREAMS["dropout"], sample, common.rank())
            yield self.net


# Posteriors over the last layer: their samples are vectors, `heads` [S, P]. The main process fits
# them to the features that all processes have computed.


class HeadPosterior:
    """LLLA and LA-NF: features of theta_m are computed once per set, for all samples.

    compute() returns {"precision": of the prior, "heads"}; its result is stored as `title`.
    """

    shares_pass = True

    def __init__(self, member, title, compute, **made_from):
        made_from["samples"] = member.args.samples[-1]
        fitted = member.keep(title, compute, **made_from)
        self.member = member
        self.precision = fitted["precision"]
        self.heads = fitted["heads"]
        self.more_bytes = (0, self.heads[0].nbytes)
        self.made_from = made_from | {"precision": self.precision}

    def samples(self, part, count):
        own = self.member.forward(part)
        dataset = self.member.study.loaders[part].dataset.select(own.rows)
        last = last_layer(self.member.net, own.features, dataset)
        for heads in self.heads[:count].to(last.x).split(8):  # eight at a time fit in memory
            for outputs in head_outputs(heads, last):
                yield own.rows, outputs


def fit_laplace(member, train, val):
    """LLLA: choose the precision of the prior, and draw S last layers."""
    args = member.args
    # The same noise for all members.
    noise = member.noise(args.val_samples, 0, STREAMS["llla_val"])
    scores = precision_scores(member.theta, member.spectrum, val, noise)
    lpds = dict(zip(LAPLACE_GRID, scores))
    precision = choose_precision(member, "llla", lpds)
    noise = member.noise(args.samples[-1], member.seed, STREAMS["samples"])
    heads = laplace_samples(member.theta, member.spectrum, precision, noise)
    return {"precision": precision, "heads": heads.cpu()}


def fit_flow(member, train, val, laplace, layers):
    """LA-NF: train a flow for each precision, choose one, and send LLLA's samples through it."""
    theta = member.theta
    flows = train_flows(member, train, laplace.precision, layers)
    # The same noise for all members.
    noise = member.noise(member.args.val_samples, 0, STREAMS["la_nf_val"])
    base = laplace_samples(theta, member.spectrum, laplace.precision, noise)
    lpds = {}
    # published code: the largest of equally good precisions (LLLA: the smallest)
    for precision in reversed(FLOW_GRID):
        heads, _ = apply_flow(flows[precision], base)
        outputs = head_outputs(heads, val)
        lpds[precision] = log_predictive_density(outputs, val.labels, val.energies)
    precision = choose_precision(member, f"la_nf{layers}", lpds)
    heads, _ = apply_flow(flows[precision], laplace.heads.to(theta))
    return {"precision": precision, "heads": heads.cpu()}


def train_flows(member, train, base_precision, layers):
    """Minimise the negative ELBOs of all prior precisions, with the same noise and batches.

    Returns {prior precision: (centres [T, P], a and b [T])}.
    """
    study = member.study
    args = study.args
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
            share = (epoch + step / steps) / FLOW_EPOCHS
            optimiser.param_groups[0]["lr"] = 0.5e-3 * (1 + math.cos(math.pi * share))
            batch = take(study, train, batches[step])
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
    trained = {}
    for number, precision in enumerate(FLOW_GRID):
        trained[precision] = [tensor[number].detach() for tensor in flows]
    return trained


def take(study, last, rows):
    """The LastLayer of the training examples `rows` [B], which are on the CPU."""
    device = last.x.device
    examples = rows.to(device, non_blocking=True)
    if not study.energies:
        return LastLayer(last.x[examples], last.labels[examples])
    # Indices are made on the CPU, so that nothing waits for the device.
    sizes = study.sets.train.sizes
    atoms = data.entries_of(rows, sizes).to(device, non_blocking=True)
    molecule = torch.arange(len(rows)).repeat_interleave(sizes[rows])
    molecule = molecule.to(device, non_blocking=True)
    return LastLayer(last.x[atoms], last.labels[examples], True, molecule, last.offset[examples],
                     last.scale)


def draw_published(member, file):
    """The last layers of a published LLLA or LA-NF; on the main process."""
    with reading(file):
        state = file.state.get("llla_inference", file.state)
        if not torch.allclose(state["mean"].to(member.theta), member.theta, rtol=1e-4, atol=1e-6):
            raise ValueError(f"other weights than those of seed {file.seed} in --map-paths")
        laplace = state["llla"]
        h = laplace.get("H_nll", laplace["H"])  # of molecules, H includes the prior
        values = h.double().to(member.theta.device)
        basis = None
        if h.ndim == 2:
            values, basis = eigh(values)
        if "H_nll" not in laplace:
            values = values.clamp_min(0)  # below is rounding
        noise = member.noise(member.args.samples[-1], member.seed, STREAMS["samples"])
        precision = float(laplace["prior_precision"])
        heads = laplace_samples(member.theta, Spectrum(values, basis), precision, noise)
        if file.title != "llla":
            heads, _ = apply_flow(published_flow(file, heads.device), heads)
        return {"precision": precision, "heads": heads.cpu()}


# In the published order.
LABELS = {"map": "DE", "swa": "SWA", "swag": "SWAG", "llla": "LLLA", "la_nf": "LA-NF",
          "mcdo": "MC dropout"}
POINTS = ("map", "swa")  # one network, which no number of samples changes


def list_titles(args):
    """The posteriors of a study, as their files are called: with T flows, LA-NF is la_nf<T>."""
    titles = []
    for method in args.methods:
        if method == "la_nf":
            titles += [f"la_nf{layers}" for layers in args.flow_layers]
        else:
            titles.append(method)
    return titles


def find_posterior(member, title):
    """A posterior around theta_m: a published one, or one that is fitted, now or earlier."""
    args = member.args
    file = member.study.published.get((title, member.seed))
    if title == "map":
        return MAP(member)
    if title == "mcdo":
        return MCDropout(member)
    if title in ("swa", "swag"):
        kind = SWA if title == "swa" else SWAG
        if file is not None:
            return kind(member, partial(published_iterates, member.net, file), file=file.identity)
        rate = choose_sgd_rate(member, title)
        find = partial(sgd_iterates, member, rate)
        return kind(member, find, rate=rate, epochs=args.swag_epochs)
    if file is not None:
        draw = partial(common.on_main, draw_published, member, file)
        return HeadPosterior(member, title, draw, file=file.identity)
    fitted = {"structure": args.structure, "val_samples": args.val_samples}
    if title == "llla":
        return HeadPosterior(member, title, partial(member.fit, fit_laplace), **fitted)
    laplace = find_posterior(member, "llla")
    layers = int(title.removeprefix("la_nf"))
    fit = partial(member.fit, fit_flow, laplace, layers)
    return HeadPosterior(member, title, fit, base=laplace.made_from, **fitted)


def keep_predictions(member, posterior, title, part):
    """Store what a posterior predicts for a set, in its order, or find it stored.

    Beside what `summarise` returns, this is "cost" [2, 2]: seconds and bytes, of what is computed
    once and of each sample.
    """
    study = member.study
    counts = {1}  # of samples of a member, S // K for each S and K
    if title not in POINTS:
        counts = {s // k for s, k in itertools.product(study.args.samples, study.args.ensembles)}
    counts = sorted(counts - {0})

    def compute():
        if not common.on_main(lambda: study.run.writable):
            raise UserError(f"{study.run.dir} is read-only, and lacks predictions; evaluate a "
                            "copy of it")
        once = 0.0
        if posterior.shares_pass:
            once = member.forward(part).seconds
        start = time.perf_counter()
        predictions = summarise(study, posterior.samples(part, counts[-1]), counts)
        seconds = (once, (time.perf_counter() - start) / counts[-1])
        more, of_sample = posterior.more_bytes
        network = sum(tensor.nbytes for tensor in member.net.state_dict().values())
        cost = torch.tensor([seconds, (network + more, of_sample)], dtype=torch.float64)
        return {**predictions, "cost": cost}

    digest = data.digest(study.loaders[part].dataset)
    member.keep(f"{title}-{part}", compute, examples=digest, counts=counts, **posterior.made_from)


# ---- Evaluation ---------------------------------------------------------------------------------
# Predictions are stored for each member, posterior and set; all else is computed from them, on the
# main process.


class Ensemble(NamedTuple):
    """Members that are averaged, with equally many samples of each."""

    label: str    # the name of their posterior in tables
    seeds: tuple  # of the members
    samples: int  # S, in all
    share: int    # S // K, of each member


def list_ensembles(study, title):
    """The Ensembles of a posterior: the published members for each size K and S, for each run."""
    args = study.args
    found = []
    for k in args.ensembles:
        if k > args.members:
            continue
        sizes = [k] if title in POINTS else [s for s in args.samples if s >= k]
        for samples in sizes:
            label = label_of(args, title, samples)
            for run in range(args.runs):
                own = study.seeds[run * args.members:(run + 1) * args.members]
                for chosen in member_combinations(args.members, k):
                    seeds = tuple(own[member - 1] for member in chosen)
                    found.append(Ensemble(label, seeds, samples, samples // k))
    return found


def label_of(args, title, samples):
    """The name of a posterior in tables, with T and S if the study compares several."""
    label = LABELS[title.rstrip("0123456789")]
    if title.startswith("la_nf") and len(args.flow_layers) > 1:
        label += f", T={title.removeprefix('la_nf')}"
    if title not in POINTS and len(args.samples) > 1:
        label += f", S={samples}"
    return label


class ClassPrediction(Mixture):
    """What an ensemble predicts for N examples: the mixture of all its samples."""

    def uncertainties(self):
        """Total, aleatoric and epistemic uncertainty (mutual information) in nats, [N]."""
        found = {"total": torch.special.entr(self.log_probs.exp()).sum(1),
                 "aleatoric": self.entropy}
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


class EnergyPrediction(NamedTuple):
    """What an ensemble predicts for N molecules: an equal mixture of Gaussians, in eV."""

    means: Tensor      # [S, N]
    variances: Tensor  # [S, N]

    def uncertainties(self):
        """Total, aleatoric and epistemic uncertainty, as standard deviations [N]."""
        moments = common.gaussian_mixture_moments(self.means, self.variances)
        found = {"total": moments.total.sqrt(), "aleatoric": moments.aleatoric.sqrt()}
        if len(self.means) > 1:
            found["epistemic"] = moments.epistemic.sqrt()
        return found

    def scores(self, labels):
        """What is compared between methods, of each molecule [N]."""
        outputs = torch.stack([self.means, self.variances], -1)        # [S, N, 2]
        log_p = log_density(outputs, labels, energies=True)            # [S, N]
        lpd = log_p.logsumexp(0) - math.log(len(outputs))
        return {"lpd": lpd, "mae_milli": 1000 * (self.means.mean(0) - labels).abs()}

    def metrics(self, labels):
        metrics = common.regression_metrics(self.means, self.variances, labels)
        return {"mae_milli": 1000 * metrics["mae"], **metrics}  # published: of energies, meV


def read_members(study, title, part):
    """{seed: the predictions of a member}, which `keep_predictions` has just made or checked."""
    members = {}
    for seed in study.seeds:
        path = study.run.dir / f"seed{seed}-{title}-{part}.pt"
        members[seed] = torch.load(path, map_location="cpu", weights_only=True)
    return members


def predict_together(study, members, ensemble):
    """The prediction of an ensemble, from the predictions of all members."""
    share = ensemble.share
    chosen = [members[seed] for seed in ensemble.seeds]
    if study.energies:
        samples = [member["samples"][:, :share] for member in chosen]
        means, variances = torch.cat(samples, 1).transpose(0, 1).unbind(-1)    # [S, N]
        return EnergyPrediction(means, variances)
    log_probs = torch.stack([member[f"log_probs_{share}"] for member in chosen])   # [K, N, C]
    mean = log_probs.double().logsumexp(0) - math.log(len(chosen))
    entropy = torch.stack([member[f"entropy_{share}"] for member in chosen]).mean(0)
    return ClassPrediction(mean, entropy, share * len(chosen))


def describe(study, ensemble):
    """What a row is about. Ensembles are told apart by the seeds of their members."""
    test = study.sets.test
    return {"method": f"{ensemble.label}, K={len(ensemble.seeds)}",
            "seed": "+".join(map(str, ensemble.seeds)), "members": ensemble.seeds,
            "set": test.name, "n": len(test)}


def cost(members, ensemble, n):
    """Milliseconds per example, of n, and bytes, to predict by an ensemble."""
    once_and_samples = torch.tensor([1.0, ensemble.share], dtype=torch.float64)
    total = sum(members[seed]["cost"] @ once_and_samples for seed in ensemble.seeds)
    return {"ms": 1000 * total[0].item() / n, "bytes": round(total[1].item())}


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
    de = {}       # {seeds: {metric: [N]}}
    changes = {}  # {(method, K, metric): [[N] of each ensemble]}
    labels = study.sets.test.labels
    for title in list_titles(study.args):
        members = read_members(study, title, "test")
        uncertainties = {}  # {Ensemble: {kind: [N]}}
        for ensemble in list_ensembles(study, title):
            prediction = predict_together(study, members, ensemble)
            uncertainties[ensemble] = prediction.uncertainties()
            row = describe(study, ensemble) | prediction.metrics(labels)
            row |= cost(members, ensemble, len(labels))
            scores = prediction.scores(labels)
            if title == "map":
                de[ensemble.seeds] = scores
            else:
                for metric, values in scores.items():
                    change = values - de[ensemble.seeds][metric]
                    row[f"{metric}_minus_de"] = change.mean().item()
                    key = (ensemble.label, len(ensemble.seeds), metric)
                    changes.setdefault(key, []).append(change)
            rows.append(row)
        rows += detection_rows(study, title, uncertainties)
    rows.sort(key=lambda row: len(row["members"]))  # as published: K, and within it the methods
    differences = []
    for key, of_ensembles in changes.items():
        of_examples = torch.stack(of_ensembles).mean(0)                # [N]
        interval = 1.96 * of_examples.std().item() / math.sqrt(len(of_examples))
        differences.append(Difference(*key, of_examples.mean().item(), interval))
    return rows, differences


def detection_rows(study, title, inside):
    """How well uncertainties tell OOD sets from the test set: those of all ensembles, `inside`."""
    rows = []
    for parts in ood_parts(study.args.ood).values():
        parts = [data.set_name(part) for part in parts]
        if not study.sets.ood.keys() >= set(parts):
            continue  # a part was not found, which has been printed
        members = [read_members(study, title, f"ood-{part}") for part in parts]
        for ensemble, uncertainties in inside.items():
            outside = []
            for of_part in members:
                outside.append(predict_together(study, of_part, ensemble).uncertainties())
            row = describe(study, ensemble) | {"against": "+".join(parts)}
            for kind in ("total", "epistemic"):
                if kind not in uncertainties:
                    continue
                others = torch.cat([of_part[kind] for of_part in outside])
                found = common.ood_metrics(uncertainties[kind], others, larger_means="ood")
                for metric, value in found.items():
                    row[f"{metric}_{kind}"] = value  # for example auroc_total
            rows.append(row)
    return rows


def ood_parts(names):
    """{OOD set: the names of its parts}: a+b is a union, but folder:a+b a folder."""
    parts = {}
    for name in names:
        parts[name] = [name] if name.startswith("folder:") else name.split("+")
    return parts


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
    dataset = study.sets.predict
    predictions = {}  # {title: prediction}
    for title in list_titles(study.args):
        ensembles = list_ensembles(study, title)
        largest = max(ensembles, key=lambda each: (len(each.seeds), each.samples))
        members = read_members(study, title, "predict")
        predictions[title] = predict_together(study, members, largest)
    if study.energies:
        columns = common.example_columns(dataset)
    else:
        log_probs = {title: own.log_probs[None] for title, own in predictions.items()}
        columns = common.prediction_columns(dataset, log_probs, study.sets.train.classes)
    for title, own in predictions.items():
        # The columns of DE have no ending, as those of the first method in all scripts.
        ending = "" if title == "map" else f"_{title}"
        if study.energies:
            columns[f"predicted{ending}"] = own.means.mean(0)
        for name, values in own.uncertainties().items():
            columns[f"{name}{ending}"] = values
    study.run.write_csv("predictions.csv", columns)


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
    # Your own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(model="wrn_10_4", width=0.25, epochs=60, batch_size=32, weight_decay=1e-4,
                   augment=True, num_val=None, members=3, ensembles=[1, 3], samples=[20],
                   val_samples=10, swag_epochs=8, swag_lrs=[0.03, 0.01]),
    # Your own network: a few careful epochs, or its last layer alone, which is wide.
    "pretrained": dict(width=1.0, epochs=10, batch_size=32, lr=0.02, weight_decay=5e-4,
                       augment=True, structure="diag", swag_lrs=[3e-3, 1e-3],
                       methods=["map", "llla", "la_nf"]),
    "frozen": dict(epochs=30, lr=0.01, weight_decay=0.05, augment=False, swag_lrs=[0.03, 0.01]),
}
SAMPLED = [method for method in LABELS if method not in POINTS]
# The run directory belongs to the options of MAP training: members of all seeds lie in it side
# by side, with the posteriors that these options made of them.
EVALUATION_OPTIONS = ("seed", "members", "methods", "ensembles", "samples", "ood", "limit_test",
                      "swag_epochs", "swag_lrs", "structure", "flow_layers", "val_samples",
                      "map_paths", "posterior_paths")


def parse_args(argv=None):
    parser = common.Parser("swag_laplace_ensembles", __doc__, PRESETS,
                           list(NETWORKS | SEQUENCE_NETWORKS), dataset="dirty_glyphs",
                           model="wrn_16_4", epochs=100, batch_size=128, lr=0.1)
    add = parser.add_argument_group("swag_laplace_ensembles.py").add_argument
    add("--num-val", type=at_least(1), default=2000,
        help="number of validation images, taken from the training set (published code: 2000)")
    add("--target", default="u0", help="for qm9: the quantity to predict (paper: u0)")
    add("--vocab", metavar="FILE",
        help="for sst2: a file with one word piece per line (paper: that of bert-base-uncased), "
        "instead of word pieces of the training sentences")
    add("--dropout", type=between(0, 0.99), default=0.0,
        help="rate of dropout in the MAP networks (published: 0.5 for BERT, else 0)")
    add("--opt", choices=["sgd", "adamw"], default="sgd",
        help="optimiser of the MAP networks: SGD with Nesterov momentum 0.9, or AdamW (published: "
        "SGD, for molecules AdamW)")
    add("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters, also in SWAG's SGD (published: 5e-4; BERT 3e-3, "
        "molecules 0.01)")
    add("--augment", action=argparse.BooleanOptionalAction, default=False,
        help="train the MAP networks with random crops and flips (published: for CIFAR)")
    add("--swag-epochs", type=at_least(2), default=100, metavar="R",
        help="epochs of SGD after the MAP network, and rank of SWAG (published: 100; wrn_28_10 25)")
    add("--swag-lrs", nargs="+", type=at_least(1e-12, float), default=SWAG_LRS, metavar="LR",
        help="constant learning rates of this SGD, of which validation chooses one")
    add("--structure", choices=["full", "diag"], default="full",
        help="Gauss-Newton matrix of the last layer (for molecules the Hessian): all of it or its "
        "diagonal (paper: full; diag for wrn_28_10)")
    add("--flow-layers", nargs="+", type=at_least(1), default=[10], metavar="T",
        help="number of radial flows of LA-NF; several are compared (paper: 1, 5, 10 and 30)")
    add("--val-samples", type=at_least(1), default=100,
        help="number of samples when a learning rate or precision is chosen (published: 100)")
    add("--methods", nargs="+", choices=LABELS, metavar="NAME",
        default=["map", "swa", "swag", "llla", "la_nf"],
        help="posteriors to compare: " + ", ".join(LABELS) + "; map is always there")
    add("--members", type=at_least(1), default=30, metavar="M",
        help="number of networks; their seeds start at --seed (paper: 30); --runs repeats all with "
        "the next M seeds")
    add("--ensembles", nargs="+", type=at_least(1), default=[1, 2, 5, 10, 20], metavar="K",
        help="ensemble sizes K (paper: 1 2 5 10 20)")
    add("--samples", nargs="+", type=at_least(1), default=[200], metavar="S",
        help="samples of an ensemble, S // K of each of its members (paper: 200); several numbers "
        "give rows for each")
    add("--ood", nargs="*", default=[], metavar="NAME",
        help="out-of-distribution sets; a+b is the union of two, folder:PATH a folder of images, "
        "nonsense images of no class")
    add("--limit-test", type=at_least(2), metavar="N",
        help="number of examples of each set that is evaluated")
    add("--map-paths", nargs="+", default=[], metavar="FILE",
        help="published MAP networks, which are the members instead of trained ones")
    add("--posterior-paths", nargs="+", default=[], metavar="FILE",
        help="published SWA, SWAG, LLLA and LA-NF of these networks, which are then not fitted")
    args = parser.parse(argv)
    check_options(args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    args.methods = [name for name in LABELS if name == "map" or name in args.methods]
    for name in ("samples", "ensembles", "flow_layers"):
        setattr(args, name, sorted(set(getattr(args, name))))
    check_effects(args)
    if args.map_paths:
        args.members = len(args.map_paths)
        args.runs = 1
    if args.device.type == "mps":
        raise UserError("--device mps has no float64, which all posteriors need; use --device cpu")

    too_large = [k for k in args.ensembles if k > args.members]
    if too_large == args.ensembles:
        raise UserError(f"--ensembles {args.ensembles[0]}: must not exceed --members "
                        f"{args.members}")
    if too_large and "ensembles" not in args.given:
        args.ensembles = sorted(set(args.ensembles + [args.members]))
    if too_large:
        # Members are sampled for them anyway, for a larger study later.
        common.print_on_main(f"skipped: ensembles of {', '.join(map(str, too_large))}, for which "
                             f"--members {args.members} are too few")
    largest = max(set(args.ensembles) - set(too_large))
    if uses(args, *SAMPLED) and args.samples[-1] < largest:
        raise UserError(f"--samples {args.samples[-1]}: must be at least one for each member of "
                        f"--ensembles {largest}")
    if len({f"{rate:g}" for rate in args.swag_lrs}) < len(args.swag_lrs):
        raise UserError("--swag-lrs: two rates have the same first six digits; give different ones")
    if "mcdo" in args.methods and (args.map_paths or args.model.startswith("torchvision/")):
        raise UserError("--methods mcdo trains networks with several rates of dropout, which "
                        "neither --map-paths nor torchvision/NAME allow; leave it out")
    if args.epochs == 0 and args.members * args.runs > 1 and data.is_pretrained(args):
        raise UserError("--epochs 0: all members would be the same network; use --members 1 "
                        "and no --runs")


def check_effects(args):
    """Refuse options that were given and would have no effect."""
    is_sequence = args.dataset in data.TEXTS + data.MOLECULES
    is_pretrained = args.model.startswith("torchvision/")
    no_effect = [
        (not uses(args, "swa", "swag"), ["swag_epochs", "swag_lrs"],
         "without --methods swa or swag"),
        (not uses(args, "llla", "la_nf"), ["structure"], "without --methods llla or la_nf"),
        (not uses(args, "la_nf"), ["flow_layers"], "without --methods la_nf"),
        (args.methods == ["map"], ["val_samples"], "without a method other than map"),
        (not uses(args, *SAMPLED), ["samples"], f"without --methods {' or '.join(SAMPLED)}"),
        (is_sequence, ["image_size", "num_val", "augment"], f"on {args.dataset}"),
        (args.dataset in data.MOLECULES, ["structure"],
         "on molecules, whose Hessian is always full"),
        (args.dataset != "qm9", ["target"], f"on {args.dataset}, which has one target"),
        (args.dataset != "sst2", ["vocab"], f"on {args.dataset}"),
        (not is_pretrained, ["weights", "freeze"], "without --model torchvision/NAME"),
        (is_pretrained, ["width", "dropout"], f"with --model {args.model}"),
        (args.freeze, ["augment"], "with --freeze"),
        (args.map_paths, ["seed", "members", "runs", "epochs", "lr", "opt", "dropout", "augment",
                          "num_val"], "with --map-paths"),
        (not args.map_paths, ["posterior_paths"], "without --map-paths"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


def uses(args, *methods):
    """Whether the study compares any of these methods."""
    return any(method in args.methods for method in methods)


# ---- Main ---------------------------------------------------------------------------------------


def load_images(args):
    """Training, validation and test images with the published split, which no seed changes."""
    preparation = data.preparation_of(args.model, args.weights, args.image_size)
    train, val, test, _, _ = data.load_sets(args.dataset, args.data_dir, val_fraction=0,
                                            image_size=args.image_size, preparation=preparation)
    if val is not None:
        common.refuse(args, ["num_val"], f"on {args.dataset}, which has a folder val")
    else:
        train, val = split_images(train, args.num_val or len(train) // 10)
    if preparation is None and isinstance(train, data.ImageSet):
        # Each channel has the mean and the standard deviation of the training images.
        pixels = train.images.float()
        if train.images.dtype == torch.uint8:
            pixels = pixels / 255
        std, mean = torch.std_mean(pixels, (0, 2, 3))
        std[std == 0] = 1  # a channel may be empty
        train = replace(train, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    train = data.limit_train(train, args.limit_train)
    return train, data.match(val, train), data.match(test, train)


def split_images(dataset, num_val):
    """Training and validation images; the copies of an image, which are a group, stay together."""
    n = len(dataset)
    if not 0 < num_val < n:
        raise UserError(f"--num-val {num_val}: {dataset.name} has {n} training images")
    if dataset.files:  # your own images: classes keep their shares
        train, val = data.class_split(dataset.labels, 0, num_val / n)
        return dataset.select(train), dataset.select(val)
    groups = torch.arange(n)
    if getattr(dataset, "groups", None) is not None:
        _, groups = dataset.groups.unique(return_inverse=True)
    # published code: the first images of this permutation, in which each is a group of its own
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(groups.max()) + 1, generator=generator)
    place = order.argsort()[groups]                                    # [N]
    rows = place.argsort(stable=True)
    # The group of the last of them is not split.
    is_val = place[rows] <= place[rows[num_val - 1]]
    return dataset.select(rows[~is_val]), dataset.select(rows[is_val])


def load_texts(args):
    """Training, validation and test sentences."""
    train = data.load_text(args.dataset, "train", args.data_dir, vocab_file=args.vocab)
    val = data.load_text(args.dataset, "val", args.data_dir, like=train)
    test = data.load_text(args.dataset, "test", args.data_dir, like=train)
    if args.dataset == "sst2" and not common.on_main(data.sst2_has_test_labels, args.data_dir):
        common.print_on_main("note: test.tsv of SST-2 has no labels (GLUE), so dev.tsv is the test "
                             f"set, and {len(val)} rows of train.tsv are the validation set; for "
                             "labels, write those of huggingface.co/datasets/SetFit/sst2 as "
                             "sentence<TAB>label")
    if args.dataset == "sst2" and not args.vocab:
        common.print_on_main("note: word pieces are made from the training sentences; BERT's are "
                             "vocab.txt of huggingface.co/google-bert/bert-base-uncased (--vocab)")
    return data.limit_train(train, args.limit_train), val, test


def load_sets(args):
    """All sets of a study, as data.Sets."""
    if args.dataset in data.TEXTS:
        train, val, test = load_texts(args)
    elif args.dataset in data.MOLECULES:
        read = partial(data.load_molecules, args.dataset, data_dir=args.data_dir,
                       target=args.target)
        train = data.limit_train(read("train"), args.limit_train)
        val = read("val")
        test = read("test")
    else:
        train, val, test = load_images(args)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    names = []
    for parts in ood_parts(args.ood).values():
        names += [part for part in parts if part not in names]
    ood = data.ood_sets(names, train, args.data_dir, required="ood" in args.given)
    ood = {name: data.evenly(dataset, args.limit_test) for name, dataset in ood.items()}
    predict = None
    if args.predict:
        predict = data.predict_set(args.predict, train, args.data_dir)
    sets = data.Sets(train, val, data.evenly(test, args.limit_test), ood, predict)
    if args.freeze:
        sets = data.frozen_features(sets, args)
    return sets


def read_all_published(args):
    """{(title, seed): Published} of the files of --map-paths and --posterior-paths."""
    found = {}
    for path in args.map_paths + args.posterior_paths:
        file = read_published(path)
        key = (file.title, file.seed)
        if (file.title == "map") != (path in args.map_paths) or key in found:
            raise UserError(f"{path} holds {file.title} of seed {file.seed}; --map-paths takes a "
                            "MAP network of each seed, --posterior-paths a posterior of each kind")
        found[key] = file
    titles = list_titles(args)
    for (title, seed), file in found.items():
        if ("map", seed) not in found or title not in titles:
            raise UserError(f"{file.path} holds {title} of seed {seed}, which has no network in "
                            "--map-paths, or is not among --methods and --flow-layers")
    flows = [title for title in titles if title.startswith("la_nf")]
    for flow, (title, seed) in itertools.product(flows, found):
        # A flow that is fitted here belongs to the matrix that is computed here.
        if title == "llla" and (flow, seed) not in found:
            raise UserError(f"{found[title, seed].path}: with a published LLLA, LA-NF has to be "
                            f"published, too; give the file of {flow}, or leave la_nf out of "
                            "--methods")
    return found


def check_network(train_set, published, args):
    """Refuse, before training, a network that is impossible."""
    # The smallest batch is the last one of an epoch; two examples show what more would.
    smallest = len(train_set) % args.batch_size or args.batch_size
    few = train_set.select(slice(max(min(smallest, 2), common.world_size())))
    batch = next(iter(make_loader(few, args, len(few)).epoch()))
    try:
        net = make_network(args, train_set)
        outputs, features = net.train()(batch[0])
        net.head(features)
        data_loss(outputs, batch.labels, args.dataset in data.MOLECULES)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} example(s) of {train_set.name}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None
    for file in published.values():
        if file.title == "map":
            load_published(net, file)
    if "mcdo" in args.methods and not any(isinstance(m, nn.Dropout) for m in net.modules()):
        raise UserError(f"--model {args.model} has no dropout; leave mcdo out of --methods")
    # The matrix of the last layer, its eigenvectors and copies of both, in float64.
    needed = 40 * len(flat_head(net.head))**2
    memory = common.device_memory(torch.device("cpu")) or math.inf
    if args.structure == "full" and uses(args, "llla", "la_nf") and needed > memory:
        raise UserError(f"the Gauss-Newton matrix of the last layer needs {needed / 1e9:.0f} GB, "
                        f"and there are {memory / 1e9:.0f} GB; use --structure diag")


def run_name(args):
    """The name of the run directory, which members of all seeds share."""
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    published = "published" if args.map_paths else None
    return common.join_name(data.set_name(args.dataset), args.model, width, frozen, published)


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    sets = load_sets(args)
    published = read_all_published(args)
    check_network(sets.train, published, args)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    run = common.Run(args, "swag_laplace_ensembles", run_name(args), EVALUATION_OPTIONS)
    study = Study(args, run, sets, published)
    for seed in study.seeds:
        # The network theta_m; then each posterior is fitted to it, and predicts each set.
        if args.map_paths:
            net = load_published(make_network(args, sets.train), published["map", seed])
        else:
            net = train_map(study, seed, args.dropout)
        member = Member(study, seed, net)
        for title in list_titles(args):
            posterior = find_posterior(member, title)
            for part in study.evaluated:
                keep_predictions(member, posterior, title, part)
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
