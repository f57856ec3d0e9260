"""Stochastic weight sharing: a Bayesian network whose weights share a few Gaussians in the plane.

Lin, Guan, Jing, Botterweck, Patane, "Stochastic Weight Sharing for Bayesian Neural Networks",
AISTATS 2025, arXiv:2505.17856. Method:

  1. Train a network on n examples, then a mean-field posterior N(mu_i, sigma_i^2) over its
     weights, with the prior N(0, s^2) of each layer. Its loss, the mean cross entropy
     + 0.1 KL / n, gives a cold posterior.
  2. Cover the points (mu_i, sigma_i) with K Gaussians N(c_k, S_k) in the plane. Outliers (|mu| >
     0.2, or a gradient among the largest 1 %) keep a Gaussian of their own, and so do the members
     of components of at most 20 weights. A point outside the 95 % ellipse of its component (an
     "ellipse point") blends its two most probable components.
  3. Merge components that are closer than tau_d in Wasserstein-2 distance.
  4. Train centres, covariances and outliers by the same loss, with the KL from where they began.
     A weight is w_i = m + s eps_i, (m, s) ~ N(c_k, S_k); it costs the two bytes of its label k.

Usage:
  python gbnn2d.py                                           # glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 gbnn2d.py --dataset cifar100   # the published ResNet-18
  python gbnn2d.py --eval --predict glyphs_letters           # evaluate again, predict another set
  python gbnn2d.py --load runs/gbnn2d/NAME/seed1-compressed.pt --dataset glyphs

Expected (more in tests/RESULTS.md): `python gbnn2d.py --runs 3`, 130 seconds per seed on one core:
  576 Gaussians merge into 116. Accuracy 99.80 +- 0.03 % (deterministic: 99.77 +- 0.04 %), ECE 1.3
  +- 0.2 % (0.2 +- 0.1 %), bytes 32 % of mean-field and 64 % of the deterministic network's.
  Merging raises the bytes from 29.5 %: more weights are ellipse points, at ten bytes each.

Differences from the published code (github.com/gfhvbjk/Anonymous):
  - Its last stage cannot learn: sampled weights are detached, and the optimiser makes no step.
  - Mean-field stage: a KL term (published: none, --stoch-kl 0), sigma = softplus(rho) from 1 % of
    the layer's weights (there log(0.0003 + e^rho), which can be negative), Adam instead of SGD.
  - The mixture is fitted by EM without the outliers (there k-means in raw units, with them), and
    labels are the most probable components (there the nearest centres).
  - Merging: once, the closest pair first, moments matched, W2 in closed form, thresholds on
    differences, as in the paper. There: after each epoch, in the order of indices, by plain
    averages; W2 is clamped, wrong for small covariances; tau_g and tau_v bound values instead.
  - Last stage: KL times 0.1 (there 1); what is shared moves in units of its own spread.
  - A weight is m + s eps; --draw shared is the published draw, all members of a component equal.
  - Ellipse points blend drawn weights, by posteriors that sum to 1. There: centres, and a second
    component counts only above a density of e^12, so that the weight shrinks.
  - Outliers by the mean magnitude of an epoch's gradients (there the signed gradient of a batch).
  - The network stays in eval mode after it is trained: its batch norm statistics are fixed (there
    they drift, also in the test), and dropout is off. Norms and biases train on with --lr-mu.
  - Attention is shared, too. OOD sets are normalised like the training set, MNIST has one channel,
    CIFAR-10 is not rotated, crops reflect the border, and the lengths of the stages are ours.
  - Predictions are mean probabilities over draws; rows also have metrics of the published mean
    logits. OOD sets have as many draws as the test set (there 100), FPR is at 95 % TPR (there 85).
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import KDTree
from torch import Tensor, nn
from torch.func import functional_call

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of math, scipy, torch and typing.

# Step 1: every weight gets a Gaussian of its own.

RANDOM_LAYERS = (nn.Conv2d, nn.Linear, nn.MultiheadAttention)


def weight_shapes(net):
    """{name: shape} of the weights of convolutions, linear layers and attention, in one order."""
    shapes = {}
    for name, parameter in net.named_parameters():
        layer = net.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, RANDOM_LAYERS) and name.endswith("weight"):
            shapes[name] = parameter.shape
    if not shapes:
        raise ValueError("the network has no convolution, linear layer or attention")
    return shapes


class RandomNetwork(nn.Module):
    """A network whose N weights w = posterior() are drawn anew for each forward pass.

    These are the `weight_shapes`, as a vector [N]; in `net` they are frozen and no longer used.
    Biases, norms and embeddings stay parameters of `net`. The posterior, a module with forward()
    and kl() like `MeanField`, moves to the device and the float type of `net`. Batch norm should
    be in eval mode: the statistics of a batch would hide how a draw shifts the activations.
    """

    def __init__(self, net, posterior):
        super().__init__()
        self.net = net
        self.posterior = posterior.to(next(net.parameters()))
        self.shapes = weight_shapes(net)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name not in self.shapes)

    def split(self, vector):
        """{name: weight} of a vector [N], without a copy."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), vector.split(sizes))
        return {name: part.view(shape) for (name, shape), part in parts}

    def forward(self, x):
        return functional_call(self.net, self.split(self.posterior()), (x,))


class MeanField(nn.Module):
    """The posterior w_i = mu_i + sigma_i eps_i, with the prior N(0, s^2) of each layer.

    mu starts at the weights of the trained `net`, and sigma at `sigma_init` times s, the root mean
    square of the weights of the layer.
    """

    def __init__(self, net, sigma_init=0.01):
        super().__init__()
        mu = []
        scale = []
        for name in weight_shapes(net):
            weight = net.get_parameter(name).detach().flatten()
            rms = weight.square().mean().sqrt().clamp_min(1e-8)
            mu.append(weight)
            scale.append(rms.expand(len(weight)))
        self.mu = nn.Parameter(torch.cat(mu))
        self.register_buffer("prior_sd", torch.cat(scale))
        self.rho = nn.Parameter(inverse_softplus(sigma_init * self.prior_sd))

    @property
    def sigma(self):
        return F.softplus(self.rho)

    def forward(self):
        """Draw w [N]."""
        return self.mu + self.sigma * torch.randn_like(self.mu)

    def kl(self):
        """KL of the posterior from the prior, in nats."""
        return gaussian_kl(self.mu, self.sigma, 0, self.prior_sd).sum()


def inverse_softplus(sigma):
    """rho with softplus(rho) = sigma > 0, exact also far below 1."""
    return sigma + (-torch.expm1(-sigma)).log()


def gaussian_kl(mu, sigma, prior_mu, prior_sigma):
    """KL(N(mu, sigma^2) || N(prior_mu, prior_sigma^2)) in nats, element by element."""
    variance_ratio = (sigma / prior_sigma).square()
    offset = (mu - prior_mu) / prior_sigma
    return 0.5 * (variance_ratio - 1 - variance_ratio.log() + offset.square())


def outlier_mask(mu, gradient, tau_w=0.2, fraction=0.01):
    """Weights [N] that keep a Gaussian of their own: |mu| > tau_w, or a large gradient magnitude.

    A gradient is large if it is at least the k-th largest, k = max(1, floor(fraction N));
    a fraction of 0 switches this off.
    """
    mask = mu.abs() > tau_w
    if fraction > 0:
        count = max(1, int(fraction * len(gradient)))
        mask = mask | (gradient >= gradient.topk(count).values[-1])
    return mask


# Step 2: the points (mu_i, sigma_i) of the other weights are covered by K Gaussians in the plane.


class Mixture(NamedTuple):
    """sum_k pi_k N(c_k, S_k) of K Gaussians in the plane, float64."""

    proportion: Tensor  # [K]        pi_k, sum 1
    centre: Tensor      # [K, 2]     c_k
    covariance: Tensor  # [K, 2, 2]  S_k


def select(mixture, keep):
    """The components `keep` (a mask [K]) of a Mixture."""
    return Mixture(*[tensor[keep] for tensor in mixture])


BLOCK = 2**15  # points that are treated at a time


def nearest(x, centre, count):
    """The indices [n, count] of the centres [K, 2] that are nearest to points [n, 2].

    The axes are divided by the spread of the centres: mu and sigma differ by orders of magnitude.
    """
    scale = centre.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    count = min(count, len(centre))
    tree = KDTree((centre / scale).numpy())
    _, found = tree.query((x / scale).numpy(), count, workers=-1)
    return torch.from_numpy(found).view(len(x), count)


def squared_distances(x, mixture, k):
    """Squared Mahalanobis distances [n, J] of points [n, 2] from the components k [n, J]."""
    precision = torch.linalg.inv(mixture.covariance)[k]                # [n, J, 2, 2]
    offset = x[:, None] - mixture.centre[k]                            # [n, J, 2]
    return torch.einsum("njp,njpq,njq->nj", offset, precision, offset)


def log_joint(x, mixture, k):
    """log pi_k N(x; c_k, S_k) [n, J] of points [n, 2] and the components k [n, J]."""
    log_volume = 0.5 * torch.logdet(mixture.covariance)                # [K]
    log_scale = mixture.proportion.log() - log_volume - math.log(2 * math.pi)
    return log_scale[k] - 0.5 * squared_distances(x, mixture, k)


def kmeans_plus_plus(x, k, generator):
    """At most k different rows of points x [n, 2], far from each other.

    Each is drawn with a probability proportional to the squared distance from the nearest one
    before it.
    """
    row = torch.randint(len(x), (), generator=generator)
    rows = [row]
    distance = (x - x[row]).square().sum(1)                            # [n]
    for draw in torch.rand(k - 1, generator=generator, dtype=x.dtype):
        total = distance.cumsum(0)
        if total[-1] == 0:
            break  # every point has been drawn
        row = torch.searchsorted(total, draw * total[-1], right=True)
        row = row.clamp_max(len(x) - 1)
        rows.append(row)
        distance = torch.minimum(distance, (x - x[row]).square().sum(1))
    return torch.stack(rows)


def em_step(x, k, mixture, ridge):
    """One step of EM on points [n, 2].

    Each point has responsibilities only for its components k [n, J]. ridge [2, 2] is added to
    the covariances. Returns the new mixture, and the mean log-likelihood of the old one (a lower
    bound: of each point only its J components count).
    """
    sums = x.new_zeros(len(mixture.proportion), 7)  # of responsibilities times 1, x and x x^T
    log_likelihood = 0.0
    for block, near in zip(x.split(BLOCK), k.split(BLOCK)):
        joint = log_joint(block, mixture, near)                        # [b, J]
        log_likelihood += joint.logsumexp(1).sum().item() / len(x)
        responsibility = joint.softmax(1)
        products = block[:, :, None] * block[:, None]                  # [b, 2, 2]
        ones = torch.ones_like(block[:, :1])
        moments = torch.cat([ones, block, products.flatten(1)], 1)     # [b, 7]
        weighted = responsibility[:, :, None] * moments[:, None]       # [b, J, 7]
        sums.index_add_(0, near.flatten(), weighted.flatten(0, 1))
    mass = sums[:, :1].clamp_min(1e-300)
    centre = sums[:, 1:3] / mass
    second = (sums[:, 3:] / mass).view(-1, 2, 2)
    first = centre[:, :, None] * centre[:, None]
    covariance = second - first + ridge
    return Mixture(sums[:, 0] / len(x), centre, covariance), log_likelihood


def fit_mixture(x, k, generator, iterations=30, most=1_000_000):
    """Fit at most k Gaussians to points x [n, 2], float64, by EM from k-means++.

    `most` points, drawn once, are enough. Returns the mixture, in the units of x, and the
    mean log-likelihood before each iteration, in nats per point (a lower bound: of each point
    only the 16 nearest components count).
    """
    sample = x[torch.randperm(len(x), generator=generator)[:most]]
    spread = sample.std(0)
    spread = torch.where(spread > 0, spread, 1.0)
    few = sample[:100_000]
    centre = few[kmeans_plus_plus(few / spread, k, generator)]         # [K, 2]
    # Moments about zero are safe in float64: the ridge is far above their rounding errors.
    ridge = 1e-6 * spread.square().diag()
    k = len(centre)
    covariance = spread.square().diag() / k
    proportion = x.new_full((k,), 1 / k)
    mixture = Mixture(proportion, centre, covariance.expand(k, 2, 2))
    history = []
    for step in range(iterations):
        if step % 5 == 0:
            neighbours = nearest(sample, mixture.centre, 16)           # [n, J]
        mixture, log_likelihood = em_step(sample, neighbours, mixture, ridge)
        history.append(log_likelihood)
    return select(mixture, mixture.proportion > 0), history


def assign(x, mixture):
    """The most probable component [n] of each point x [n, 2], one of its eight nearest."""
    labels = []
    for block in x.split(BLOCK):
        k = nearest(block, mixture.centre, 8)                          # [b, J]
        best = log_joint(block, mixture, k).argmax(1, keepdim=True)
        labels.append(k.gather(1, best)[:, 0])
    return torch.cat(labels)


class SharedWeights(NamedTuple):
    """N weights that refer to K Gaussians in the plane, but for outliers, which have their own."""

    label: Tensor          # [N] int32     the component of each weight; -1: an outlier
    outlier: Tensor        # [n_out]       which weights are outliers
    outlier_mu: Tensor     # [n_out]
    outlier_sigma: Tensor  # [n_out]
    ellipse_point: Tensor        # [n_blend]     which weights are outside their component's ellipse
    second: Tensor         # [n_blend]     the component that they blend with their own
    alpha: Tensor          # [n_blend]     the posterior of their own among the two
    centre: Tensor         # [K, 2]        c_k
    factor: Tensor         # [K, 2, 2]     L_k, lower triangular, with S_k = L_k L_k^T


def second_components(x, mixture, k):
    """The most probable component [n] of points x [n, 2] other than k [n], and the posterior of k."""
    others = nearest(x, mixture.centre, 8)                             # [n, J]
    joint = log_joint(x, mixture, others)
    joint = joint.masked_fill(others == k[:, None], -math.inf)
    best, position = joint.max(1)
    second = others.gather(1, position[:, None])[:, 0]
    own = log_joint(x, mixture, k[:, None])[:, 0]
    return second, (own - best).sigmoid()


def encode(points, label, mixture, level=0.95):
    """The SharedWeights of points [N, 2] with the components label [N], where -1 is an outlier."""
    limit = -2 * math.log1p(-level)  # the quantile of chi-square with 2 degrees of freedom
    ellipse_point = []
    second = []
    alpha = []
    inliers = (label >= 0).nonzero()[:, 0]
    for rows in inliers.split(BLOCK):
        squared = squared_distances(points[rows], mixture, label[rows, None])[:, 0]
        rows = rows[squared > limit]
        block_second, block_alpha = second_components(points[rows], mixture, label[rows])
        ellipse_point.append(rows)
        second.append(block_second)
        alpha.append(block_alpha)
    outlier = (label < 0).nonzero()[:, 0]
    outlier_mu, outlier_sigma = points[outlier].float().unbind(1)
    return SharedWeights(label.int(), outlier, outlier_mu, outlier_sigma, torch.cat(ellipse_point),
                         torch.cat(second), torch.cat(alpha).float(), mixture.centre.float(),
                         torch.linalg.cholesky(mixture.covariance).float())


# Step 3: close components merge.


def wasserstein(centre_a, covariance_a, centre_b, covariance_b):
    """The Wasserstein-2 distance (not squared) of Gaussians in the plane, in closed form:

        W2^2 = |c_a - c_b|^2 + tr S_a + tr S_b - 2 sqrt(tr(S_a S_b) + 2 sqrt(det S_a det S_b))
    """
    trace = (covariance_a + covariance_b).diagonal(dim1=-2, dim2=-1).sum(-1)
    determinants = determinant(covariance_a) * determinant(covariance_b)
    product_trace = (covariance_a * covariance_b).sum((-2, -1))  # both are symmetric
    root = (product_trace + 2 * determinants.sqrt()).sqrt()
    squared_offset = (centre_a - centre_b).square().sum(-1)
    return (squared_offset + (trace - 2 * root).clamp_min(0)).sqrt()


def determinant(matrix):
    """Of positive semidefinite matrices [..., 2, 2]; rounding does not make it negative."""
    product = matrix[..., 0, 0] * matrix[..., 1, 1]
    return (product - matrix[..., 0, 1] * matrix[..., 1, 0]).clamp_min(0)


def merge_distances(k, mixture, gradient, tau_g, tau_v):
    """W2 [K] of component k from all; infinite where they may not merge."""
    _, centre, covariance = mixture
    distance = wasserstein(centre[k], covariance[k], centre, covariance)
    variance = covariance.diagonal(dim1=1, dim2=2).mean(1)             # [K]  tr S / 2
    too_different = (gradient - gradient[k]).abs() >= tau_g
    too_different |= (variance - variance[k]).abs() >= tau_v
    too_different[k] = True
    return distance.masked_fill(too_different, math.inf)


def merge_mixture(mixture, gradient, tau_d, tau_g=math.inf, tau_v=1e-3):
    """Merge the closest two components again and again, while they are closer than tau_d.

    Two may merge if their W2 < tau_d, their gradients [K] (mean magnitudes of the members) differ
    by less than tau_g and their variances tr S / 2 by less than tau_v. Moments are matched: the
    mean and covariance of the whole mixture stay. Memory: 8 K^2 bytes.
    """
    mixture = Mixture(*[tensor.clone() for tensor in mixture])
    gradient = gradient.clone()
    table = []
    for k in range(len(gradient)):
        table.append(merge_distances(k, mixture, gradient, tau_g, tau_v))
    table = torch.stack(table)                                         # [K, K]
    closest = table.amin(1)                                            # [K]
    # Before every pass, closest[i] = min_j table[i, j], and table[i, j] is the distance of i and j.
    while closest.min() < tau_d:
        kept = int(closest.argmin())
        gone = int(table[kept].argmin())
        merge_pair(mixture, gradient, kept, gone)
        # Rows whose closest component was one of the two look for another one.
        stale = (closest == table[kept]) | (closest == table[gone])
        stale &= closest < math.inf
        distance = merge_distances(kept, mixture, gradient, tau_g, tau_v)
        table[gone] = math.inf
        table[:, gone] = math.inf
        table[kept] = distance
        table[:, kept] = distance
        closest = torch.minimum(closest, distance)
        closest[stale] = table[stale].amin(1)
    return select(mixture, mixture.proportion > 0)


def merge_pair(mixture, gradient, kept, gone):
    """Replace component `kept` by the Gaussian with the moments of both, and move `gone` away."""
    proportion, centre, covariance = mixture
    total = proportion[kept] + proportion[gone]
    p = proportion[kept] / total
    q = proportion[gone] / total
    offset = centre[kept] - centre[gone]                               # [2]
    between = p * q * torch.outer(offset, offset)                      # [2, 2]
    within = p * covariance[kept] + q * covariance[gone]               # [2, 2]
    covariance[kept] = within + between
    centre[kept] = p * centre[kept] + q * centre[gone]
    gradient[kept] = p * gradient[kept] + q * gradient[gone]
    proportion[kept] = total
    proportion[gone] = 0
    centre[gone] = math.inf


# --tau-d auto is this share of the median sigma
AUTO_TAU_D = 0.25


class CompressionOptions(NamedTuple):
    """The numbers of steps 2 and 3; by default those published for WRN-28-10, without tau_g."""

    k0: int = 6000                 # Gaussians before merging; 0: N / 500, at most 2048
    tau_w: float = 0.2             # weights with a larger |mu| are outliers
    grad_frac: float = 0.01        # share of the weights that are outliers by their gradient
    min_cluster: int = 20          # components of at most this many weights dissolve into outliers
    level: float = 0.95            # of the ellipses
    tau_d: float | str = 3.873e-4  # components merge below this W2; "auto": see AUTO_TAU_D
    tau_g: float = math.inf        # and below this difference of mean gradient magnitudes
    tau_v: float = 1e-3            # and below this difference of variances tr S / 2


def compress(mu, sigma, gradient, options, generator):
    """Steps 2 and 3 for the posteriors N(mu_i, sigma_i^2) of N weights.

    gradient [N]: the magnitude |dL/dmu_i| of each weight, not the signed gradient. All tensors and
    the generator are on the CPU. Returns the SharedWeights before and after merging, and
    {name: number} about both. Raises ValueError where too few weights are left.
    """
    if gradient.min() < 0:
        raise ValueError("the gradient of a weight is negative, but its magnitude is needed")
    points = torch.stack([mu, sigma], 1).double()                      # [N, 2]
    is_outlier = outlier_mask(mu, gradient, options.tau_w, options.grad_frac)
    inliers = (~is_outlier).nonzero()[:, 0]
    k0 = options.k0 or min(2048, max(2, len(mu) // 500))
    if len(inliers) < max(2, k0):
        raise ValueError(f"only {len(inliers)} of {len(mu)} weights are not outliers, too few for "
                         f"{k0} Gaussians")
    mixture, log_likelihood = fit_mixture(points[inliers], k0, generator)
    label = torch.full((len(mu),), -1)                                 # [N], -1 is an outlier
    label[inliers] = assign(points[inliers], mixture)

    # The published code, too, makes outliers of the members of small components.
    label, mixture = keep_components(label, mixture, options.min_cluster + 1)
    if len(mixture.proportion) == 0:
        raise ValueError(f"no Gaussian has more than {options.min_cluster} weights; there are too "
                         f"many Gaussians ({k0})")
    before = encode(points, label, mixture, options.level)

    rows = (label >= 0).nonzero()[:, 0]
    members = label[rows].bincount()
    mean_gradient = label[rows].bincount(gradient[rows].double()) / members
    tau_d = options.tau_d
    if tau_d == "auto":
        tau_d = AUTO_TAU_D * sigma[rows].median().item()
    mixture = merge_mixture(mixture, mean_gradient, tau_d, options.tau_g, options.tau_v)
    label[rows] = assign(points[rows], mixture)
    label, mixture = keep_components(label, mixture, 1)
    after = encode(points, label, mixture, options.level)
    return before, after, {"k0": k0, "tau_d": tau_d, "em_log_likelihood": log_likelihood}


def keep_components(label, mixture, least):
    """Labels [N] and mixture without the components of fewer than `least` members.

    These members get the label -1.
    """
    inliers = (label >= 0).nonzero()[:, 0]
    members = label[inliers].bincount(minlength=len(mixture.proportion))
    keep = members >= least
    number = torch.where(keep, keep.cumsum(0) - 1, -1)                 # [K]  the new label of each
    label = label.index_copy(0, inliers, number[label[inliers]])
    proportion, centre, covariance = select(mixture, keep)
    return label, Mixture(proportion / proportion.sum(), centre, covariance)


# Step 4: the shared Gaussians are drawn and trained.


class SharedGaussians(nn.Module):
    """The posterior w_i = m + s eps_i of SharedWeights, (m, s) ~ N(c_k, S_k) drawn once for each k.

    With `equal`, the published draw: w_i = m for all members of a component. The parameters are
    offsets from the fitted Gaussians, in units of their spread, so that one learning rate suits
    all: c + L shift, L M with M lower triangular, mu + sigma outlier_shift, and
    sigma exp(outlier_stretch).
    """

    def __init__(self, weights, equal=False):
        super().__init__()
        self.equal = equal
        for name, tensor in weights._asdict().items():
            self.register_buffer(name, tensor)
        self.shift = nn.Parameter(torch.zeros_like(self.centre))
        # of each component log M_00, M_10, log M_11
        self.stretch = nn.Parameter(self.centre.new_zeros(len(self.centre), 3))
        self.outlier_shift = nn.Parameter(torch.zeros_like(self.outlier_mu))
        self.outlier_stretch = nn.Parameter(torch.zeros_like(self.outlier_mu))

    def forward(self):
        """Draw w [N]."""
        weights = self.weights()
        noise = torch.randn_like(weights.centre)                       # [K, 2]
        drawn = weights.centre + torch.einsum("kpq,kq->kp", weights.factor, noise)
        m, s = drawn.unbind(1)
        if self.equal:
            s = torch.zeros_like(s)
        eps = torch.randn(len(weights.label), dtype=m.dtype, device=m.device)
        return fill_in(weights, m, s, eps)

    def weights(self):
        """The SharedWeights as they are now."""
        start = SharedWeights(*[getattr(self, name) for name in SharedWeights._fields])
        centre = start.centre + torch.einsum("kpq,kq->kp", start.factor, self.shift)
        outlier_mu = start.outlier_mu + start.outlier_sigma * self.outlier_shift
        outlier_sigma = start.outlier_sigma * self.outlier_stretch.exp()
        return start._replace(centre=centre, factor=start.factor @ self.triangle(),
                              outlier_mu=outlier_mu, outlier_sigma=outlier_sigma)

    def triangle(self):
        """M [K, 2, 2]."""
        log_first, below, log_second = self.stretch.unbind(1)
        rows = [log_first.exp(), torch.zeros_like(below), below, log_second.exp()]
        return torch.stack(rows, 1).view(-1, 2, 2)

    def kl(self):
        """KL of the Gaussians from their initial values, each counted once, in nats:

            sum_k 1/2 [tr M M^T + |shift|^2 - 2 - ln det M M^T], and the outliers' KL
        """
        squares = self.triangle().square().sum((1, 2))
        squares = squares + self.shift.square().sum(1)
        log_determinant = self.stretch[:, 0] + self.stretch[:, 2]  # of M
        shared = 0.5 * squares - 1 - log_determinant
        outliers = gaussian_kl(self.outlier_shift, self.outlier_stretch.exp(), 0, 1)
        return shared.sum() + outliers.sum()


def fill_in(weights, m, s, eps):
    """The weights w_i = m + s eps_i [N] for the draws m, s [K] of the components; differentiable.

    A blended weight is a mean of the weights that its two components give it. Outliers first get
    what component 0 gives them, and then mu + sigma eps_i of their own.
    """
    # index_select: the gradient of m[label] would be sorted, which is slow for many weights.
    label = weights.label.clamp_min(0)
    drawn = m.index_select(0, label) + s.index_select(0, label) * eps
    rows = weights.ellipse_point
    second = weights.second
    other = m.index_select(0, second) + s.index_select(0, second) * eps[rows]
    blend = other + weights.alpha * (drawn[rows] - other)
    drawn = drawn.index_copy(0, rows, blend)
    own = weights.outlier_mu + weights.outlier_sigma * eps[weights.outlier]
    return drawn.index_copy(0, weights.outlier, own)


def storage(n, outliers, ellipse_points, gaussians, rest):
    """Counts and bytes of n shared weights beside `rest` bytes that are not shared."""
    total = 2 * n               # labels, int16
    total += 12 * outliers      # index, mu, sigma
    total += 10 * ellipse_points  # index, second component (int16), alpha
    total += 24 * gaussians     # centre, factor
    total += rest
    return {"weights": n, "outliers": outliers, "ellipse_points": ellipse_points,
            "gaussians": gaussians, "bytes": total, "bytes_vs_mean_field": total / (8 * n + rest),
            "bytes_vs_deterministic": total / (4 * n + rest)}


# ---- Model --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block of ResNet-18: relu(body(x) + shortcut(x))."""

    def __init__(self, body, shortcut):
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)


def conv_bn_relu(c_in, c_out, kernel=3, stride=1):
    return [conv(c_in, c_out, kernel, stride), nn.BatchNorm2d(c_out), nn.ReLU()]


def make_shortcut(c_in, c_out, stride, batch_norm=False):
    """Identity if the shape stays the same, else a 1x1 convolution."""
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    # Subsample first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
    layers = nn.Sequential(nn.AvgPool2d(1, stride), conv(c_in, c_out, kernel=1))
    if batch_norm:
        layers.append(nn.BatchNorm2d(c_out))
    return layers


class PreActivationBlock(nn.Module):
    """A residual block of a wide ResNet: body(h) + shortcut, with h = ReLU(BN(x))."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(c_in), nn.ReLU())
        self.body = nn.Sequential(*conv_bn_relu(c_in, c_out, stride=stride), conv(c_out, c_out))
        self.projection = None
        if stride > 1 or c_in != c_out:
            self.projection = make_shortcut(c_in, c_out, stride)

    def forward(self, x):
        h = self.before(x)
        if self.projection is None:
            return self.body(h) + x
        return self.body(h) + self.projection(h)


def channels(count, args):
    return max(1, round(count * args.width))


# Each of the following functions builds one network without its head, for images of `shape`
# (C, H, W): it returns a list of layers and the number of features.


def lenet(args, shape):
    """LeNet-5, for images of 28x28 pixels."""
    if tuple(shape[1:]) != (28, 28):
        raise UserError(f"--model lenet needs images of 28x28 pixels, not {shape[1]}x{shape[2]}")
    c1 = channels(6, args)
    c2 = channels(16, args)
    hidden = channels(120, args)
    dim = channels(84, args)
    layers = [nn.Conv2d(shape[0], c1, 5), nn.ReLU(), nn.MaxPool2d(2),
              nn.Conv2d(c1, c2, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
              nn.Linear(16 * c2, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU()]
    return layers, dim


def resnet18(args, shape):
    """ResNet-18; images of more than 64 pixels get the stem for ImageNet."""
    width = channels(64, args)  # of the stem, doubled in every stage
    if shape[-1] > 64:
        layers = conv_bn_relu(shape[0], width, kernel=7, stride=2)
        layers.append(nn.MaxPool2d(3, 2, 1))
    else:
        layers = conv_bn_relu(shape[0], width)
    c_in = width
    # Every stage but the first one starts by halving the resolution.
    for index, stride in enumerate([1, 1, 2, 1, 2, 1, 2, 1]):
        c_out = width * 2 ** (index // 2)
        body = conv_bn_relu(c_in, c_out, stride=stride)
        body += [conv(c_out, c_out), nn.BatchNorm2d(c_out)]
        shortcut = make_shortcut(c_in, c_out, stride, batch_norm=True)
        layers.append(Residual(nn.Sequential(*body), shortcut))
        c_in = c_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


def wide_resnet(args, shape, depth=28):
    """WRN-28-10, with batch norm and activation before each convolution."""
    layers = [conv(shape[0], 16)]
    c_in = 16
    width = channels(160, args)  # of the first stage, doubled in every stage
    for stage in range(3):
        c_out = width * 2**stage
        for index in range((depth - 4) // 6):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(PreActivationBlock(c_in, c_out, stride))
            c_in = c_out
    layers += [nn.BatchNorm2d(c_in), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


# To add a network, add its function here.
NETWORKS = {"lenet": lenet, "resnet18": resnet18, "wide_resnet": wide_resnet}


def make_network(args, num_classes, shape):
    """The network --model for images of `shape` (C, H, W), on its device."""
    backbone, head = data.backbone_and_head(args, NETWORKS, num_classes, shape)
    return nn.Sequential(backbone, head).to(args.device, memory_format=torch.channels_last)


# ---- Training -----------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of training."""

    name: str         # of the network that it trains
    number: int       # seeds the draws
    epochs: int
    kl_weight: float


def lr_factor(progress, warm_up):
    """The factor on the learning rates at `progress` (0 to 1) of a stage."""
    if progress < warm_up:
        return progress / warm_up
    progress = (progress - warm_up) / (1 - warm_up)
    return 0.5 * (1 + math.cos(math.pi * progress))


def make_optimiser(module, args):
    """SGD for the deterministic network; else Adam with a group for each learning rate."""
    if not isinstance(module, RandomNetwork):
        # The published code, too, has Nesterov momentum and decays all parameters.
        return torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9, nesterov=True,
                               weight_decay=args.weight_decay)
    groups = {}
    for name, parameter in module.named_parameters():
        rate = args.lr_final
        if name == "posterior.mu" or name.startswith("net."):  # those of `net` are norms and biases
            rate = args.lr_mu
        elif name == "posterior.rho":
            rate = args.lr_rho
        if parameter.requires_grad:
            groups.setdefault(rate, []).append(parameter)
    return torch.optim.Adam([{"params": group, "lr": rate} for rate, group in groups.items()])


def train(module, stage, seed, train_set, args, run, made_from):
    """Minimise the mean cross entropy + kl_weight KL / n; resumes from the last completed epoch."""
    name = f"seed{seed}-{stage.name}"
    optimiser = make_optimiser(module, args)
    full_rates = [group["lr"] for group in optimiser.param_groups]
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, workers=args.workers, channels_last=True,
                         augment="reflect_crop_flip" if args.augment else "none")
    steps = len(loader)
    model = common.data_parallel(module, args.device)  # DDP, with batch norm over all processes
    history = run.resume(name, stage.epochs, made_from, net=module, optimiser=optimiser)
    for epoch in range(len(history), stage.epochs):
        start = time.perf_counter()
        # Batch statistics would hide how a draw shifts the activations: later stages fix them.
        model.train(stage.name == "deterministic")
        totals = torch.zeros(4, device=args.device)  # loss, KL, correct predictions, examples
        for step, batch in enumerate(common.progress(loader, epoch)):
            # Every step is seeded: all processes draw the same weights, and so does a resumed run.
            common.seed_all(seed, stage.number, epoch, step)
            factor = lr_factor((epoch + (step + 0.5) / steps) / stage.epochs, args.warm_up)
            for group, full_rate in zip(optimiser.param_groups, full_rates):
                group["lr"] = full_rate * factor
            with common.autocast(args):
                logits = model(batch.images)
            total = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
            loss = total / batch.global_size
            kl = torch.zeros_like(loss)
            if stage.kl_weight > 0:
                kl = module.posterior.kl() / len(train_set)
            optimiser.zero_grad()
            # DDP averages over processes: each has its part of the loss, and the whole KL.
            (loss * common.world_size() + stage.kl_weight * kl).backward()
            optimiser.step()
            totals[0] += loss.detach()
            totals[1] += kl.detach() / common.world_size()
            totals[2] += (logits.argmax(1) == batch.labels).sum()
            totals[3] += len(logits)
        loss, kl, correct, examples = common.all_reduce(totals).tolist()
        history.append({"epoch": epoch + 1, "loss": loss / steps, "kl_per_example": kl / steps,
                        "accuracy": correct / examples, "lr": optimiser.param_groups[-1]["lr"],
                        "seconds": time.perf_counter() - start})
        run.save(name, history, made_from, net=module, optimiser=optimiser)


def gradient_magnitude(field, seed, train_set, args):
    """The mean over the batches of an epoch of |d mean cross entropy / d mu|, [N]."""
    loader = data.Loader(train_set, args.batch_size, args.device, workers=args.workers,
                         limit_steps=args.limit_steps, channels_last=True)
    field.eval()
    mu = field.posterior.mu
    total = torch.zeros_like(mu)
    for step, batch in enumerate(common.progress(loader, epoch=0)):
        common.seed_all(seed, 2, step)
        with common.autocast(args):
            logits = field(batch.images)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum") / batch.global_size
        [gradient] = torch.autograd.grad(loss, mu)
        total += common.all_reduce(gradient).abs()
    return total / len(loader)


def compress_weights(posterior, gradient, seed, args):
    """Steps 2 and 3: plain dictionaries of the SharedWeights, and numbers about them."""
    options = CompressionOptions(k0=args.k0, tau_w=args.tau_w, grad_frac=args.grad_frac,
                                 tau_d=args.tau_d)
    generator = torch.Generator().manual_seed(common.derive_seed(seed, 2))
    try:
        clustered, merged, numbers = compress(
            posterior.mu.detach().cpu(), posterior.sigma.detach().cpu(), gradient.cpu(), options,
            generator)
    except ValueError as error:
        raise UserError(f"{error}; change --tau-w, --grad-frac or --k0") from None
    return {"clustered": clustered._asdict(), "merged": merged._asdict(), "numbers": numbers}


# ---- Evaluation ---------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What the draws of the weights say of N examples, float64, on the CPU."""

    log_probs: Tensor  # [N, K]  log of the mean of probabilities
    logits: Tensor     # [N, K]  mean of logits
    aleatoric: Tensor  # [N]     mean entropy of a draw, in nats
    ms: float          # time of the pass over the set, in milliseconds per example


@torch.no_grad()
def predict(module, dataset, seed, args):
    """The Prediction for a whole set in eval mode; None on all processes but the main one."""
    module.eval()
    samples = 1
    if isinstance(module, RandomNetwork):
        samples = args.mc
    loader = data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                         channels_last=True)
    start = time.perf_counter()
    batches = []
    for batch in loader.epoch():
        drawn = []
        # Every batch is predicted with the same draws, so that a set is read once, and neither the
        # size of the batches nor the number of processes matters.
        for sample in range(samples):
            common.seed_all(seed, 1000 + sample)
            with common.autocast(args):
                logits = module(batch.images)
            drawn.append(logits)
        means = mean_prediction(torch.stack(drawn).cpu().double())
        batches.append({"index": batch.index.cpu(), **means})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    return Prediction(**columns, ms=1000 * (time.perf_counter() - start) / len(dataset))


def mean_prediction(logits):
    """The tensors of a Prediction, from S draws with logits [S, N, K]."""
    log_probs = logits.log_softmax(2)
    mean = log_probs.logsumexp(0) - math.log(len(logits))              # [N, K]
    entropies = torch.special.entr(log_probs.exp()).sum(2)             # [S, N]
    return {"log_probs": mean, "logits": logits.mean(0), "aleatoric": entropies.mean(0)}


# What large values of a score mean: in-distribution ("id") or out-of-distribution ("ood").
SCORES = {"total": "ood", "max_prob": "id", "epistemic": "ood"}


def ood_scores(prediction):
    """The SCORES [N] of the mean probabilities: total, their entropy, and epistemic, in nats."""
    probs = prediction.log_probs.exp()
    entropy = torch.special.entr(probs).sum(1)
    return {"total": entropy, "max_prob": probs.amax(1),
            "epistemic": (entropy - prediction.aleatoric).clamp_min(0)}


def prediction_metrics(prediction, labels):
    """Metrics of the mean probabilities, and of the mean logits (published)."""
    metrics = {}
    mean_logits = prediction.logits.log_softmax(1)
    for suffix, log_probs in (("", prediction.log_probs), ("_logits", mean_logits)):
        probs = log_probs.exp()
        metrics[f"accuracy{suffix}"] = common.accuracy(probs, labels)
        metrics[f"nll{suffix}"] = common.nll(log_probs, labels)
        metrics[f"brier{suffix}"] = common.brier(probs, labels)
        metrics[f"ece15{suffix}"] = common.ece(probs, labels)
    return metrics


def evaluate(method, module, sets, size, seed, args):
    """The rows of one network; size: the columns about storage."""
    test = predict(module, sets.test, seed, args)
    ood = {}
    for name, dataset in sets.ood.items():
        ood[name] = predict(module, dataset, seed, args)
    return common.on_main(make_rows, method, sets.test, test, ood, size, seed, args)


def make_rows(method, test_set, test, ood, size, seed, args):
    """A row for the test set, and one for each OOD set."""
    if not common.all_finite([test, ood]):
        raise UserError(f"the outputs of the {method} network are not finite: training diverged; "
                        "use lower learning rates")
    row = {"method": method, "seed": seed, "set": test_set.name, "n": len(test_set)}
    metrics = prediction_metrics(test, test_set.labels)
    rows = [row | metrics | {"ms": test.ms} | size]
    inside = ood_scores(test)
    names = ["total", "max_prob"]
    if method != "deterministic" and args.mc > 1:
        names.append("epistemic")
    for against, prediction in ood.items():
        outside = ood_scores(prediction)
        metrics = {}
        for name in names:
            found = common.ood_metrics(inside[name], outside[name], larger_means=SCORES[name])
            for metric, value in found.items():
                metrics[f"{metric}_{name}"] = value  # for example auroc_total
        rows.append({**row, "against": against, **metrics})
    return rows


def write_predictions(predictions, dataset, classes, args, run):
    """--predict: predictions.csv, from {method: Prediction} for the set."""
    log_probs = {name: found.log_probs[None] for name, found in predictions.items()}
    columns = common.prediction_columns(dataset, log_probs, classes)
    # The parts of the uncertainty come from all draws, of which a Prediction has the means.
    ending = ""
    for name, prediction in predictions.items():
        if name != "deterministic" and args.mc > 1:
            columns[f"aleatoric{ending}"] = prediction.aleatoric
            columns[f"epistemic{ending}"] = ood_scores(prediction)["epistemic"]
        ending = "_deterministic"
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------


def plot_plane(posterior, shared, size, run):
    """The plane of (mu, sigma) before and after merging, and the bytes of the networks."""
    figure, axes = common.make_figure(1, 3, figsize=(15, 4.6), width_ratios=[2, 2, 1])
    axes[1].sharex(axes[0])
    axes[1].sharey(axes[0])
    points = torch.stack([posterior.mu, posterior.sigma], 1).detach().cpu().numpy()
    low, high = np.quantile(points, [0.001, 0.999], axis=0)
    margin = 0.1 * (high - low)
    low -= margin
    high += margin
    some = np.linspace(0, len(points) - 1, 50_000).astype(int)
    for axis, title, weights in zip(axes, ("before merging", "after merging"), shared):
        draw_plane(axis, points[some], some, weights)
        axis.set(title=f"{title}: {len(weights.centre)} Gaussians", xlabel="mu", ylabel="sigma",
                 xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    axes[0].legend(loc="upper center", ncols=3, markerscale=6)

    bytes_mean_field = size["bytes"] / size["bytes_vs_mean_field"]
    bytes_deterministic = size["bytes"] / size["bytes_vs_deterministic"]
    names = ["mean-field", "deterministic", "shared"]
    sizes = np.array([bytes_mean_field, bytes_deterministic, size["bytes"]])
    bars = axes[2].bar(names, sizes / 1e3, color=common.colours(3))
    axes[2].bar_label(bars, fmt="%.0f")
    axes[2].tick_params(axis="x", labelsize=8)
    axes[2].set(ylabel="kilobytes", title=f"{size['bytes_vs_mean_field']:.0%} of mean-field,\n"
                f"{size['bytes_vs_deterministic']:.0%} of deterministic")
    run.save_figure(figure, "plane.png")


def draw_plane(axis, points, rows, weights):
    """Points [n, 2], the weights `rows`, with the 95 % ellipses of the Gaussians."""
    from matplotlib.collections import EllipseCollection

    is_outlier = weights.label[rows].numpy() < 0
    is_ellipse_point = np.isin(rows, weights.ellipse_point.numpy())
    inlier_colour, outlier_colour, point_colour, ellipse_colour = common.colours(4)
    for mask, colour, name in ((~is_outlier, inlier_colour, "inliers"),
                               (is_outlier, outlier_colour, "outliers"),
                               (is_ellipse_point, point_colour, "ellipse points")):
        axis.plot(*points[mask].T, ".", ms=1.2, color=colour, label=name, rasterized=True)
    factor = weights.factor.double()
    variances, axes = np.linalg.eigh((factor @ factor.mT).numpy())
    # An ellipse that holds 95 % has half axes of sqrt(5.99) standard deviations.
    heights, widths = 2 * np.sqrt(-2 * math.log(0.05) * variances).T
    angles = np.degrees(np.arctan2(axes[:, 1, 1], axes[:, 0, 1]))
    axis.add_collection(EllipseCollection(
        widths, heights, angles, units="xy", offsets=weights.centre.numpy(),
        offset_transform=axis.transData, facecolors="none", edgecolors=ellipse_colour, lw=0.6,
        zorder=3))


# ---- Compressed networks ------------------------------------------------------------------------

FORMAT = "unsure-gbnn2d-6"
# What --load takes from the file, not from the command line.
STORED_OPTIONS = ("model", "width", "draw", "weights", "freeze")


def rest_of(module):
    """{name: tensor} of a RandomNetwork's network that is not drawn: biases, norms, buffers."""
    state = module.net.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if name not in module.shapes}


def rest_bytes(module):
    return sum(tensor.nbytes for tensor in rest_of(module).values())


def size_of(weights, rest):
    """The columns about the storage of SharedWeights beside `rest` bytes."""
    return storage(len(weights.label), len(weights.outlier), len(weights.ellipse_point),
                   len(weights.centre), rest)


def write_compressed(file_name, shared, train_set, args, run):
    """Write a compressed file: the shared weights as they are now, the rest, and class names."""
    weights = {}
    for name, tensor in shared.posterior.weights()._asdict().items():
        if name in ("label", "second"):
            tensor = tensor.short()
        elif not tensor.is_floating_point():
            tensor = tensor.int()
        weights[name] = tensor.detach().cpu()
    options = {option: getattr(args, option) for option in STORED_OPTIONS}
    state = {"format": FORMAT, "dataset": args.dataset, "classes": list(train_set.classes),
             "shape": list(train_set.shape), "weights": weights, "rest": rest_of(shared),
             "options": options}
    run.write(file_name, common.to_bytes(state))


def decompress(state, args):
    """The network of a compressed file; raises an error of any type if parts do not fit."""
    weights = {}
    for name, tensor in state["weights"].items():
        if not tensor.is_floating_point():
            tensor = tensor.long()
        weights[name] = tensor
    posterior = SharedGaussians(SharedWeights(**weights), args.draw == "equal")
    posterior()  # on the CPU this checks all indices: on a GPU a wrong one kills the process
    net = make_network(args, len(state["classes"]), state["shape"])
    shared = RandomNetwork(net, posterior)
    shared.split(weights["label"])
    missing, unexpected = net.load_state_dict(state["rest"], strict=False)
    if set(missing) != set(shared.shapes) or unexpected:
        raise ValueError("other norms or biases than those of the network")
    return shared


def run_loaded(args):
    """--load: evaluate a compressed network."""
    state = common.load_tensors(args.load)
    if state.get("format") != FORMAT:
        raise UserError(f"--load {args.load}: not a compressed network of this version")
    sets = load_sets(args)
    classes = list(sets.train.classes)
    shape = list(sets.train.shape)
    if [state["classes"], state["shape"]] != [classes, shape]:
        raise UserError(f"--load {args.load}: made for other classes or another image size, those "
                        f"of --dataset {state['dataset']}")
    try:
        args = common.with_options(args, **state["options"])
        shared = decompress(state, args)
    except Exception as error:  # parts are missing, or have other types or sizes
        raise UserError(f"--load {args.load} does not fit this network: "
                        f"{common.one_line(error)}") from None
    # Files of one name, and other seeds, have directories of their own.
    stem = Path(args.load).stem
    digest = common.digest(shared)[:8]
    name = common.join_name("loaded", stem, digest, f"seed{args.seed}")
    run = common.Run(args, "gbnn2d", name, EVALUATION_OPTIONS)
    size = size_of(shared.posterior.weights(), rest_bytes(shared))
    rows = evaluate("loaded", shared, sets, size, args.seed, args)
    if args.predict:
        predictions = {"loaded": predict(shared, sets.predict, args.seed, args)}
        common.on_main(write_predictions, predictions, sets.predict, sets.train.classes, args, run)
    return run.report(rows, COLUMNS)


# ---- Options ------------------------------------------------------------------------------------

# Small networks: shorter stages, higher rates with a warm-up, --k0 and --tau-d from the weights.
SMALL = dict(stoch_epochs=5, final_epochs=5, lr_mu=1e-4, lr_rho=1e-2, warm_up=0.2, k0=0,
             tau_d="auto")
MNIST = dict(SMALL, model="lenet", epochs=10, lr=0.05)
PRESETS = {
    "cifar10": dict(augment=True, mc=60, ood=["svhn", "cifar100"]),
    "cifar100": dict(augment=True, mc=40),
    "svhn": dict(augment=True, ood=["cifar10"]),
    "imagenet": dict(augment=True, epochs=90, batch_size=256, weight_decay=1e-4,
                     ood=["imagenet_o"]),
    "mnist": dict(MNIST, ood=["fashion_mnist"]),
    "fashion_mnist": dict(MNIST, ood=["mnist"]),
    # These easy images allow a distance at which most Gaussians merge, half of the median sigma. On
    # CIFAR-10 that loses accuracy, which the last stage does not restore.
    "glyphs": dict(SMALL, width=0.125, epochs=3, stoch_epochs=2, final_epochs=4, lr_rho=5e-2,
                   k0=700, tau_d=6.3e-3, mc=20, ood=["glyphs_letters"]),
    # Your own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(SMALL, width=0.25, epochs=20, batch_size=32, lr=0.05, lr_rho=5e-2, augment=True,
                   mc=20, ood=[]),
    # Your own network: a few careful epochs, or its last layer alone.
    "pretrained": dict(SMALL, width=1.0, epochs=5, batch_size=32, lr=0.01, augment=True, mc=20),
    "frozen": dict(epochs=50, batch_size=64, lr=0.1, augment=False),
}
# These only change what is computed from trained networks, so they do not identify a run.
EVALUATION_OPTIONS = ("mc", "ood", "load")
USED_WITH_LOAD = ("load", "dataset", "preset", "image_size", "seed", "batch_size", "amp", "mc",
                  "ood", "predict", "data_dir", "out_dir", "name", "device", "workers", "fresh",
                  "plot", "weights")


def w2_threshold(text):
    """The argparse type of --tau-d."""
    if text == "auto":
        return text
    return at_least(0, float)(text)


def published_model(text):
    """The argparse type of -net: the name here of a network of the published code."""
    return {"wrn": "wide_resnet"}.get(text, text)


def parse_args(argv=None):
    parser = common.Parser("gbnn2d", __doc__, PRESETS, NETWORKS, dataset="glyphs",
                           model="resnet18", epochs=200, batch_size=128, lr=0.1)
    add = parser.add_argument_group("gbnn2d.py").add_argument
    add("-net", dest="model", type=published_model, metavar="NAME",
        help="--model, as in the published code: wrn is wide_resnet")
    add("-dataset", dest="dataset", metavar="NAME", help="--dataset, as in the published code")
    add("--stoch-epochs", type=at_least(0), default=20,
        help="number of epochs of the mean-field (stochastic) stage (published: up to 200)")
    add("--final-epochs", type=at_least(0), default=20,
        help="number of epochs of the last stage (published: up to 200)")
    add("--lr-mu", type=at_least(0, float), default=1e-5, help="learning rate of mu in the "
        "mean-field stage, and of norms and biases in both stages (published: 1e-5)")
    add("--lr-rho", type=at_least(0, float), default=1e-3,
        help="learning rate of rho, with sigma = softplus(rho) (published: 1e-3)")
    add("--lr-final", type=at_least(0, float), default=0.1,
        help="learning rate of Gaussians and outliers in the last stage; 0.1 moves one by about "
        "a tenth of its standard deviation per step")
    add("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of the deterministic network (published: 5e-4)")
    add("--warm-up", type=between(0, 0.9), default=0.0, help="share of the steps of each stage in "
        "which the learning rate rises; then it falls as a cosine (published: 0)")
    add("--augment", action=argparse.BooleanOptionalAction, default=False,
        help="use random crops and flips (published: for CIFAR)")
    add("--stoch-kl", type=at_least(0, float), default=0.1,
        help="weight of the KL term of the mean-field stage; with 1 the posterior collapses onto "
        "the prior (published: 0)")
    add("--beta", type=at_least(0, float), default=0.1,
        help="weight of the KL term of the last stage (published: 1)")
    add("--tau-w", type=at_least(1e-9, float), default=0.2,
        help="weights with a larger |mu| are outliers (paper: 0.2)")
    add("--grad-frac", type=between(0, 0.9), default=0.01, help="share of the weights that are "
        "outliers by their gradients (paper: 0.01; the counts that it publishes fit 0.001)")
    add("--k0", type=between(0, 10_000, int), default=6000,
        help="number of Gaussians before merging; 0: one per 500 weights, at most 2048 "
        "(published: 6000 for WRN-28-10, 256 for ResNet-18)")
    add("--tau-d", type=w2_threshold, default=3.873e-4, metavar="DISTANCE",
        help="Wasserstein-2 distance, not squared, below which Gaussians merge; 'auto' is a "
        "quarter of the median sigma of all weights but outliers (published: 3.873e-4)")
    add("--draw", choices=["hier", "equal"], default="hier",
        help="(m, s) is drawn once for each Gaussian; hier (hierarchical): each weight gets its "
        "own noise, w = m + s eps; equal: all its weights are equal, w = m (published)")
    add("--mc", type=at_least(1), default=30,
        help="number of draws of the weights in a prediction (published: 30 to 60)")
    add("--ood", nargs="*", metavar="NAME", default=["svhn"],
        help="out-of-distribution sets; folder:PATH is a folder of images")
    add("--load", metavar="FILE", help="evaluate a compressed network, a file seedN-compressed.pt "
        "of a run directory, on its data set")
    args = parser.parse(argv)
    check_options(args)
    return args


def check_options(args):
    """Refuse options that would have no effect."""
    pretrained = args.model.startswith("torchvision/")
    no_effect = [
        (True, ["compile"], "on networks whose weights are drawn"),
        (args.load, args.given - set(USED_WITH_LOAD), "with --load"),
        (not pretrained and not args.load, ["weights"], "without --model torchvision/NAME"),
        (not pretrained, ["freeze"], "without --model torchvision/NAME"),
        (args.freeze, ["augment"], "with --freeze"),
        (pretrained, ["width"], f"with --model {args.model}"),
        (args.epochs == 0, ["lr", "weight_decay"], "with --epochs 0"),
        (args.stoch_epochs == 0, ["stoch_kl", "lr_rho"], "with --stoch-epochs 0"),
        (args.final_epochs == 0, ["beta", "lr_final"], "with --final-epochs 0"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


# ---- Main ---------------------------------------------------------------------------------------

# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "auroc_total", "auroc_epistemic", "gaussians",
           "outliers", "ellipse_points", "bytes", "bytes_vs_mean_field", "bytes_vs_deterministic"]


def load_sets(args):
    """All sets of a run; all training images are for training."""
    sets = data.load_sets(args.dataset, args.data_dir, val_fraction=0, image_size=args.image_size,
                          limit_train=args.limit_train, ood=args.ood,
                          ood_required="ood" in args.given, predict=args.predict)
    return sets


def check_network(train_set, args):
    """Refuse, before training, a network or a number of Gaussians that is impossible."""
    net = make_network(args, train_set.num_classes, train_set.shape)
    # The smallest batch is the last one of an epoch; two images suffice to find errors of shape.
    smallest = len(train_set) % args.batch_size or args.batch_size
    images = torch.zeros(min(smallest, 2), *train_set.shape).to(next(net.parameters()))
    net.train(args.epochs > 0)
    try:
        net(images)
        shapes = weight_shapes(net)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} images {train_set.shape}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None
    count = sum(shape.numel() for shape in shapes.values())
    most = count // (CompressionOptions().min_cluster + 1)
    if args.k0 > most:
        raise UserError(f"--k0 {args.k0}: the network has only {count} weights to compress, "
                        f"enough for at most {most} Gaussians")
    common.print_on_main(f"{len(shapes)} layers with {count:,} weights are random; biases, norms "
                         "and embeddings are not")


def run_name(args):
    """The name of the run directory."""
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    return common.join_name(data.set_name(args.dataset), args.model, width, frozen,
                            f"seed{args.seed}")


def run_seed(seed, sets, args, run):
    """All steps for one seed: (rows, numbers about the mixture)."""
    # Step 1: a deterministic network, then a mean-field posterior over its weights.
    common.seed_all(seed)
    made_from = data.origin(sets.train, args)
    net = make_network(args, sets.train.num_classes, sets.train.shape)
    train(net, Stage("deterministic", 0, args.epochs, 0.0), seed, sets.train, args, run, made_from)
    field = RandomNetwork(net, MeanField(net))
    rest = rest_bytes(field)
    n = len(field.posterior.mu)
    rows = evaluate("deterministic", net, sets, {"bytes": 4 * n + rest}, seed, args)
    predictions = {}
    if args.predict and seed == args.seed:
        predictions["deterministic"] = predict(net, sets.predict, seed, args)
    # The norms and biases of `net` are trained further in each stage.
    stage = Stage("mean-field", 1, args.stoch_epochs, args.stoch_kl)
    origin = made_from | {"deterministic weights": common.digest(net)}
    train(field, stage, seed, sets.train, args, run, origin)
    rows += evaluate("mean-field", field, sets, {"bytes": 8 * n + rest}, seed, args)

    # Steps 2 and 3: a mixture over all weights, whose close components merge.
    def make_mixture():
        gradient = gradient_magnitude(field, seed, sets.train, args)
        return common.on_main(compress_weights, field.posterior, gradient, seed, args)

    origin = made_from | {"mean-field weights": common.digest(field)}
    state = run.load_or_compute(f"seed{seed}-mixture", origin, make_mixture)
    clustered = SharedWeights(**state["clustered"])
    merged = SharedWeights(**state["merged"])
    equal = args.draw == "equal"
    unmerged = RandomNetwork(net, SharedGaussians(clustered, equal))
    rows += evaluate("clustered", unmerged, sets, size_of(clustered, rest), seed, args)
    shared = RandomNetwork(net, SharedGaussians(merged, equal))
    size = size_of(merged, rest)  # training does not change it
    rows += evaluate("merged", shared, sets, size, seed, args)

    # Step 4: the shared Gaussians are trained.
    stage = Stage("final", 3, args.final_epochs, args.beta)
    origin = made_from | {"shared Gaussians": common.digest(shared)}
    train(shared, stage, seed, sets.train, args, run, origin)
    rows += evaluate("final", shared, sets, size, seed, args)
    common.on_main(write_compressed, f"seed{seed}-compressed.pt", shared, sets.train, args, run)
    if predictions:
        predictions = {"final": predict(shared, sets.predict, seed, args)} | predictions
        common.on_main(write_predictions, predictions, sets.predict, sets.train.classes, args, run)
    if seed == args.seed and args.plot:
        common.on_main(plot_plane, field.posterior, (clustered, merged), size, run)
    return rows, state["numbers"]


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    if args.load:
        return run_loaded(args)

    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args)
    check_network(sets.train, args)
    run = common.Run(args, "gbnn2d", run_name(args), EVALUATION_OPTIONS)
    rows = []
    numbers = {}
    for seed in range(args.seed, args.seed + args.runs):
        more, numbers[seed] = run_seed(seed, sets, args, run)
        rows += more
    return run.report(rows, COLUMNS, numbers=numbers)


if __name__ == "__main__":
    common.launch(main)
