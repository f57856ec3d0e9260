"""Stochastic weight sharing: a Bayesian network whose weights share a few Gaussians in the plane.

Lin, Guan, Jing, Botterweck, Patane, "Stochastic Weight Sharing for Bayesian Neural Networks",
AISTATS 2025, arXiv:2505.17856. Method:

  1. Train a network on n examples, then a mean-field posterior N(mu_i, sigma_i^2) over its
     weights, by the mean cross entropy + 0.1 KL / n, with the prior N(0, s^2) of each layer.
  2. Cover the points (mu_i, sigma_i) with K Gaussians N(c_k, S_k). Outliers (|mu| > 0.2, one of
     the largest 1 % of the gradients, a component of at most 20) keep a Gaussian of their own. A
     point outside the 95 % ellipse of its component blends its two most probable components.
  3. Merge components that are closer than tau_d in Wasserstein-2 distance.
  4. Train centres, covariances and outliers by the same loss, with the KL from where they began.
     A weight is w_i = m + s eps_i, (m, s) ~ N(c_k, S_k); it costs the two bytes of its label k.

Usage:
  python gbnn2d.py                                           # glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 gbnn2d.py --dataset cifar100   # the published ResNet-18
  python gbnn2d.py --load 2DGBNNs.pth --dataset cifar100     # a file of the authors, or of a run
  python gbnn2d.py --dataset folder:images --model torchvision/resnet18   # your images and network
  With --weights FILE of the authors' first or second stage, the stages after it follow.

Expected (more in tests/RESULTS.md): `--runs 3`: 565 Gaussians merge into 104; accuracy 99.75 %
  (deterministic: 99.77), ECE 1.3 +- 0.3 % (0.3 +- 0.1), 63 % of the deterministic network's bytes.

Differences from the published code (github.com/gfhvbjk/Anonymous, commit ad31235), "there":
  - The last stage there cannot learn: drawn weights are detached, and the optimiser makes no step.
  - The first two stages there keep the epoch that is best on the test set, and the last one saves
    all, with their test accuracies; here, the last epoch counts.
  - Mean-field stage there: no KL (--stoch-kl 0), sigma = log(0.0003 + e^rho), at times negative
    (here softplus), SGD (here Adam), weight decay 5e-4 on mu and rho, and random biases.
  - Mixture there: k-means of all weights, not scaled; nearest centres (here EM without outliers).
  - Outliers there: by the signed gradient of one batch (here the mean magnitude of an epoch's).
  - Merging there: after each epoch, in the order of indices, by plain averages, with a clamped W2
    that is wrong for small covariances; variances below 0.001, and gradient norms times learning
    rates below 0.15. Here: once, the closest pair first, moments matched, bounds on differences
    as in the paper, of which that on gradients is off.
  - --draw equal is the draw there: w = m. Ellipse points there are blends of centres, the second
    of which counts above a density of e^12 only; the scripts for ResNet-18 overwrite them.
  - Predictions here: mean probabilities, with the same draws for all batches; accuracy_mode, ece10
    and *_logits are as published. Draws there: --mc, 30 of WRN, 100 for OOD. FPR there: 85 % TPR.
  - Last stage there: batches of 256, mean cross entropy + KL / 256. Batch norm there drifts, in
    the test, too; here it is fixed after the first stage; norms and biases train on (--lr-mu).
  - ResNet-18 for CIFAR there has biases in convolutions, WRN Kaiming's initialisation. Images
    there have the statistics of CIFAR-100 for ResNet-18 on any CIFAR, (125.3, 123.0, 113.9) and
    (63.0, 62.1, 66.7) for WRN, crops padded with zeros for ResNet-18, rotations on CIFAR-10; MNIST
    has three channels, OOD sets their own statistics. Lengths of stages and attention are ours.
"""

import argparse
import math
import time
from collections import OrderedDict
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


def weight_shapes(net):
    """{name: shape} of the weights of convolutions, linear layers and attention, in one order."""
    shapes = {}
    for name, parameter in net.named_parameters():
        layer = net.get_submodule(name.rpartition(".")[0])
        is_random = isinstance(layer, (nn.Conv2d, nn.Linear, nn.MultiheadAttention))
        if is_random and name.endswith("weight"):
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
        # Under autocast, too, weights are drawn in the precision of the posterior.
        with torch.autocast(x.device.type, enabled=False):
            w = self.posterior()
        return functional_call(self.net, self.split(w), (x,))


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
            scale.append(rms.expand_as(weight))
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
        return gaussian_kl(self.mu, self.sigma, self.prior_sd).sum()


def inverse_softplus(sigma):
    """rho with softplus(rho) = sigma > 0, exact also far below 1."""
    return sigma + (-torch.expm1(-sigma)).log()


def gaussian_kl(mu, sigma, prior_sd):
    """KL(N(mu, sigma^2) || N(0, prior_sd^2)) in nats, element by element."""
    variance_ratio = (sigma / prior_sd).square()
    offset = mu / prior_sd
    return 0.5 * (variance_ratio - 1 - variance_ratio.log() + offset.square())


def outlier_mask(mu, gradient, tau_w=0.2, fraction=0.01):
    """Weights [N] that keep a Gaussian of their own: |mu| > tau_w, or a large gradient magnitude.

    Large is at least the k-th largest, k = max(1, floor(fraction N)); a fraction of 0 is for none.
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


BLOCK = 2**15    # points that are treated at a time
FEW = 2**9       # the same, with all components


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


def squared_distances(x, mixture, k=slice(None)):
    """Squared Mahalanobis distances [n, J] of points [n, 2] from components k [n, J], or all."""
    precision = torch.linalg.inv(mixture.covariance)[k]                # [n, J, 2, 2] or [K, 2, 2]
    u, v = (x[:, None] - mixture.centre[k]).unbind(2)                  # [n, J]
    mixed = 2 * precision[..., 0, 1] * u * v
    return precision[..., 0, 0] * u * u + mixed + precision[..., 1, 1] * v * v


def log_joint(x, mixture, k=slice(None)):
    """log pi_k N(x; c_k, S_k) [n, J] of points [n, 2] and the components k [n, J], or all."""
    log_volume = 0.5 * torch.logdet(mixture.covariance)                # [K]
    log_scale = mixture.proportion.log() - log_volume - math.log(2 * math.pi)
    return log_scale[k] - 0.5 * squared_distances(x, mixture, k)


def kmeans_plus_plus(x, k, generator):
    """At most k different rows of points x [n, 2], far from each other.

    The probability of each is proportional to its squared distance from the nearest one before.
    """
    rows = [torch.randint(len(x), (), generator=generator)]
    distance = torch.full_like(x[:, 0], math.inf)                      # [n]
    for draw in torch.rand(k - 1, generator=generator, dtype=x.dtype):
        distance = torch.minimum(distance, (x - x[rows[-1]]).square().sum(1))
        total = distance.cumsum(0)
        if total[-1] == 0:
            break  # every point has been drawn
        row = torch.searchsorted(total, draw * total[-1], right=True)
        rows.append(row.clamp_max(len(x) - 1))
    return torch.stack(rows)


def em_step(x, k, mixture, ridge):
    """One step of EM on points [n, 2], with responsibilities for their components k [n, J] alone.

    ridge [2, 2] is added to the covariances. Returns the new mixture, and the mean log-likelihood
    of the old one (a lower bound: of each point only its J components count).
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
    # The ridge must be above the rounding errors of the moments, and those of float32 in x.
    spread = torch.maximum(sample.std(0), 1e-6 * sample.abs().amax(0))
    spread = torch.where(spread > 0, spread, 1.0)
    mean = sample.mean(0)
    sample = sample - mean
    few = sample[:100_000]
    centre = few[kmeans_plus_plus(few / spread, k, generator)]         # [K, 2]
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
    mixture = mixture._replace(centre=mixture.centre + mean)
    return select(mixture, mixture.proportion > 0), history


def outside_ellipses(x, mixture, k):
    """The rows of points x [n, 2] that lie outside the 95 % ellipse of their component k [n]."""
    limit = -2 * math.log1p(-0.95)  # the quantile of chi-square with 2 degrees of freedom
    rows = []
    for block in torch.arange(len(x)).split(BLOCK):
        squared = squared_distances(x[block], mixture, k[block, None])[:, 0]
        rows.append(block[squared > limit])
    return torch.cat(rows)


def assign(x, mixture):
    """The most probable component [n] of each point x [n, 2].

    It is that of the eight nearest, or for a point outside its ellipse that of all components.
    """
    labels = []
    for block in x.split(BLOCK):
        k = nearest(block, mixture.centre, 8)                          # [b, J]
        best = log_joint(block, mixture, k).argmax(1, keepdim=True)
        labels.append(k.gather(1, best)[:, 0])
    labels = torch.cat(labels)
    for rows in outside_ellipses(x, mixture, labels).split(FEW):
        labels[rows] = log_joint(x[rows], mixture).argmax(1)
    return labels


class SharedWeights(NamedTuple):
    """N weights that refer to K Gaussians in the plane, but for outliers, which have their own."""

    label: Tensor          # [N] int32     the component of each weight; -1: an outlier
    outlier: Tensor        # [n_out]       which weights are outliers
    outlier_mu: Tensor     # [n_out]
    outlier_sigma: Tensor  # [n_out]
    ellipse_point: Tensor  # [n_ell]       which weights are outside their component's ellipse
    second: Tensor         # [n_ell]       the component that they blend with their own
    alpha: Tensor          # [n_ell]       the posterior of their own among the two
    centre: Tensor         # [K, 2]        c_k
    factor: Tensor         # [K, 2, 2]     L_k, lower triangular, with S_k = L_k L_k^T


def second_components(x, mixture, k):
    """The most probable component [n] but k [n] of points x [n, 2], and alpha, k's posterior."""
    joint = log_joint(x, mixture)                                      # [n, K]
    own = joint.gather(1, k[:, None])[:, 0]
    best, second = joint.scatter(1, k[:, None], -math.inf).max(1)
    return second, (own - best).sigmoid()


def encode(points, label, mixture):
    """The SharedWeights of points [N, 2] with the components label [N], where -1 is an outlier."""
    inliers = (label >= 0).nonzero()[:, 0]
    ellipse_point = inliers[outside_ellipses(points[inliers], mixture, label[inliers])]
    second = []
    alpha = []
    for rows in ellipse_point.split(FEW):
        block_second, block_alpha = second_components(points[rows], mixture, label[rows])
        second.append(block_second)
        alpha.append(block_alpha)
    outlier = (label < 0).nonzero()[:, 0]
    mu, sigma = points.float().T
    return SharedWeights(label.int(), outlier, mu[outlier], sigma[outlier], ellipse_point,
                         torch.cat(second), torch.cat(alpha).float(), mixture.centre.float(),
                         torch.linalg.cholesky(mixture.covariance).float())


# Step 3: close components merge.


def wasserstein(centre_a, covariance_a, centre_b, covariance_b):
    """The Wasserstein-2 distance (not squared) of Gaussians in the plane, in closed form:

        W2^2 = |c_a - c_b|^2 + tr S_a + tr S_b - 2 sqrt(tr(S_a S_b) + 2 sqrt(det S_a det S_b))
    """
    trace = (covariance_a + covariance_b).diagonal(dim1=-2, dim2=-1).sum(-1)
    determinants = torch.linalg.det(covariance_a) * torch.linalg.det(covariance_b)
    product_trace = (covariance_a * covariance_b).sum((-2, -1))  # both are symmetric
    # Rounding makes the determinant of a singular covariance, or the trace part, negative.
    root = (product_trace + 2 * determinants.clamp_min(0).sqrt()).sqrt()
    squared_offset = (centre_a - centre_b).square().sum(-1)
    return (squared_offset + (trace - 2 * root).clamp_min(0)).sqrt()


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
    mean and covariance of the whole mixture stay. Memory: 16 K^2 bytes at first, then half.
    """
    mixture = Mixture(*[tensor.clone() for tensor in mixture])
    gradient = gradient.clone()
    table = []
    for k in range(len(gradient)):
        table.append(merge_distances(k, mixture, gradient, tau_g, tau_v))
    table = torch.stack(table)                                         # [K, K]
    closest = table.amin(1)                                            # [K]
    # Before every pass table[i, j] is the W2 of i and j, or infinite, and closest[i] its minimum
    # over j.
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


AUTO_TAU_D = 0.25  # --tau-d auto is this share of the median sigma


class CompressionOptions(NamedTuple):
    """The numbers of steps 2 and 3; by default those published for WRN-28-10, without tau_g."""

    k0: int = 6000                 # Gaussians before merging; 0: N / 500, at most 2048
    tau_w: float = 0.2             # weights with a larger |mu| are outliers
    grad_frac: float = 0.01        # share of the weights that are outliers by their gradient
    min_cluster: int = 20          # components of at most this many weights dissolve into outliers
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
    inliers = points[~is_outlier]                                      # [n, 2]
    k0 = options.k0 or min(2048, max(2, len(mu) // 500))
    if len(inliers) < max(2, k0):
        raise ValueError(f"only {len(inliers)} of {len(mu)} weights are not outliers, too few for "
                         f"{k0} Gaussians")
    mixture, log_likelihood = fit_mixture(inliers, k0, generator)
    label = torch.full((len(mu),), -1)                                 # [N], -1 is an outlier
    label[~is_outlier] = assign(inliers, mixture)

    # The published code, too, makes outliers of the members of small components.
    label, mixture = keep_components(label, mixture, options.min_cluster + 1)
    if len(mixture.proportion) == 0:
        raise ValueError(f"no Gaussian has more than {options.min_cluster} weights; there are too "
                         f"many Gaussians ({k0})")
    before = encode(points, label, mixture)

    shared = label >= 0                                                # [N]
    members = label[shared].bincount()                                 # [K]
    mean_gradient = label[shared].bincount(gradient[shared].double()) / members
    tau_d = options.tau_d
    if tau_d == "auto":
        tau_d = AUTO_TAU_D * sigma[shared].median().item()
    mixture = merge_mixture(mixture, mean_gradient, tau_d, options.tau_g, options.tau_v)
    label[shared] = assign(points[shared], mixture)
    label, mixture = keep_components(label, mixture, 1)
    after = encode(points, label, mixture)
    return before, after, {"k0": k0, "tau_d": tau_d, "em_log_likelihood": log_likelihood}


def keep_components(label, mixture, least):
    """Labels [N] and mixture without components of fewer than `least` members, labelled -1."""
    inliers = (label >= 0).nonzero()[:, 0]
    members = label[inliers].bincount(minlength=len(mixture.proportion))
    keep = members >= least
    number = torch.where(keep, keep.cumsum(0) - 1, -1)                 # [K]  the new label of each
    label = label.index_copy(0, inliers, number[label[inliers]])
    proportion, centre, covariance = select(mixture, keep)
    return label, Mixture(proportion / proportion.sum(), centre, covariance)


# Step 4: the shared Gaussians are drawn and trained.


class SharedGaussians(nn.Module):
    """The posterior w_i = m + s eps_i of SharedWeights, (m, s) ~ N(c_k, S_k) drawn once per k.

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
        eps = torch.randn_like(weights.label, dtype=m.dtype)
        return fill_in(weights, m, s, eps)

    def weights(self):
        """The SharedWeights as they are now."""
        start = SharedWeights(**dict(self.named_buffers()))
        centre = start.centre + torch.einsum("kpq,kq->kp", start.factor, self.shift)
        outlier_mu = start.outlier_mu + start.outlier_sigma * self.outlier_shift
        outlier_sigma = start.outlier_sigma * self.outlier_stretch.exp()
        return start._replace(centre=centre, factor=start.factor @ self.triangle(),
                              outlier_mu=outlier_mu, outlier_sigma=outlier_sigma)

    def triangle(self):
        """M [K, 2, 2]."""
        matrix = torch.diag_embed(self.stretch[:, ::2].exp())
        matrix[:, 1, 0] = self.stretch[:, 1]
        return matrix

    def kl(self):
        """KL of the Gaussians from their initial values, each counted once, in nats:

            sum_k 1/2 [tr M M^T + |shift|^2 - 2 - ln det M M^T], and the outliers' KL
        """
        squares = self.triangle().square().sum((1, 2))
        squares = squares + self.shift.square().sum(1)
        log_determinant = self.stretch[:, 0] + self.stretch[:, 2]  # of M
        shared = 0.5 * squares - 1 - log_determinant
        outliers = gaussian_kl(self.outlier_shift, self.outlier_stretch.exp(), 1)
        return shared.sum() + outliers.sum()


def fill_in(weights, m, s, eps):
    """The weights w_i = m + s eps_i [N] for the draws m, s [K] of the components; differentiable.

    An ellipse point is a mean of the weights that its two components give it. Outliers first get
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


def storage(weights, rest):
    """Counts and bytes of SharedWeights beside `rest` bytes that are not shared."""
    n = len(weights.label)
    outliers = len(weights.outlier)
    ellipse_points = len(weights.ellipse_point)
    gaussians = len(weights.centre)
    total = 2 * n                 # labels, int16
    total += 12 * outliers        # index, mu, sigma
    total += 10 * ellipse_points  # index, second component (int16), alpha
    total += 24 * gaussians       # centre, factor
    total += rest
    return {"weights": n, "outliers": outliers, "ellipse_points": ellipse_points,
            "gaussians": gaussians, "bytes": total, "bytes_vs_mean_field": total / (8 * n + rest),
            "bytes_vs_deterministic": total / (4 * n + rest)}


# ---- Model --------------------------------------------------------------------------------------


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)


class Residual(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.stride = stride
        self.conv1 = conv(c_in, c_out, stride=stride)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = None
        if stride > 1 or c_in != c_out:
            self.downsample = nn.Sequential(conv(c_in, c_out, kernel=1), nn.BatchNorm2d(c_out))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        if self.downsample is not None:
            # Subsampled first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds.
            x = self.downsample(F.avg_pool2d(x, 1, self.stride))
        return F.relu(self.bn2(self.conv2(h)) + x)


class PreActivation(nn.Module):
    """A residual block of a wide ResNet: batch norm and activation precede each convolution."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.stride = stride
        self.bn1 = nn.BatchNorm2d(c_in)
        self.conv1 = conv(c_in, c_out, stride=stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out)
        self.convShortcut = None
        if stride > 1 or c_in != c_out:
            self.convShortcut = conv(c_in, c_out, kernel=1)

    def forward(self, x):
        h = F.relu(self.bn1(x))
        if self.convShortcut is not None:
            x = self.convShortcut(F.avg_pool2d(h, 1, self.stride))  # as in Residual
        return self.conv2(F.relu(self.bn2(self.conv1(h)))) + x


def channels(count, args):
    return max(1, round(count * args.width))


# Each of the following functions builds a network without its head, for images of `shape` (C, H,
# W): it returns its layers (a list, or by names as in torchvision) and the number of features.


def lenet(args, shape):
    """LeNet-5, for images of 28x28 pixels."""
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
    layers = {"conv1": conv(shape[0], width), "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    if shape[-1] > 64:
        layers["conv1"] = conv(shape[0], width, kernel=7, stride=2)
        layers["maxpool"] = nn.MaxPool2d(3, 2, 1)
    c_in = width
    for stage in range(4):
        c_out = width * 2**stage
        # Every stage but the first one starts by halving the resolution.
        first = Residual(c_in, c_out, stride=2 if stage > 0 else 1)
        layers[f"layer{stage + 1}"] = nn.Sequential(first, Residual(c_out, c_out, stride=1))
        c_in = c_out
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return layers, c_in


def wide_resnet(args, shape, depth=28):
    """WRN-28-10."""
    layers = {"conv1": conv(shape[0], 16)}
    c_in = 16
    width = channels(160, args)  # of the first stage, doubled in every stage
    for stage in range(3):
        c_out = width * 2**stage
        blocks = []
        for index in range((depth - 4) // 6):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(PreActivation(c_in, c_out, stride))
            c_in = c_out
        layers[f"block{stage + 1}"] = nn.Sequential(OrderedDict(layer=nn.Sequential(*blocks)))
    layers |= {"bn1": nn.BatchNorm2d(c_in), "relu": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1),
               "flatten": nn.Flatten()}
    return layers, c_in


# To add a network, add its function here.
NETWORKS = {"lenet": lenet, "resnet18": resnet18, "wide_resnet": wide_resnet}


def make_network(args, num_classes, shape):
    """The network --model for images of `shape` (C, H, W), on its device."""
    if is_published(args):
        state, _ = read_stage(args.weights)
        net = published_network(state, args.weights, args, num_classes, shape)
    else:
        backbone, head = data.backbone_and_head(args, NETWORKS, num_classes, shape)
        net = nn.Sequential(OrderedDict(backbone=backbone, fc=head))
    return net.to(args.device, memory_format=torch.channels_last)


def is_published(args):
    """Whether --weights is a file of the published code, not of torchvision."""
    return args.weights is not None and not args.model.startswith("torchvision/")


CIFAR100 = ((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047))
CIFAR = ((0.49137, 0.48235, 0.44667), (0.24706, 0.24353, 0.26157))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Of each published network: a tensor, --model, the tensor's length at --width 1, and mean and
# standard deviation of the images in training. All of them have an fc.bias.
PUBLISHED = {"conv1.1.weight": ("resnet18", 64, CIFAR100),
             "layer1.0.bn1.weight": ("resnet18", 64, IMAGENET),
             "block1.layer.0.bn2.weight": ("wide_resnet", 160, CIFAR)}
# The layers of the published ResNet-18 for CIFAR have names of their own.
CIFAR_NAMES = {".conv1.": ".residual_function.0.", ".bn1.": ".residual_function.1.",
               ".conv2.": ".residual_function.3.", ".bn2.": ".residual_function.4.",
               "downsample": "shortcut", "conv1.": "conv1.0.", "bn1.": "conv1.1.",
               "layer1": "conv2_x", "layer2": "conv3_x", "layer3": "conv4_x", "layer4": "conv5_x"}


def published_model(state, path):
    """(--model, --width, (mean, std) in training) of a published state dict."""
    for name, (model, full_width, statistics) in PUBLISHED.items():
        if all(getattr(state.get(part), "ndim", 0) == 1 for part in (name, "fc.bias")):
            return model, len(state[name]) / full_width, statistics
    raise UserError(f"{path}: no published network, fc.bias is missing or all of "
                    f"{', '.join(PUBLISHED)}")


def published_network(state, path, args, num_classes, shape, has_weights=True):
    """The network of a published state dict, which determines width, depth and classes.

    has_weights: whether those of convolutions and linear layers are in the state dict, too.
    """
    model, width, _ = published_model(state, path)
    outputs = len(state["fc.bias"])
    if outputs < num_classes:
        raise UserError(f"{path} has {outputs} classes, but the data have {num_classes}")
    args = common.with_options(args, width=width)
    if model == "wide_resnet":
        blocks = {name.split(".")[2] for name in state if name.startswith("block1.")}
        layers, dim = wide_resnet(args, shape, depth=6 * len(blocks) + 4)
    else:
        layers, dim = resnet18(args, shape)
    backbone = nn.Sequential(OrderedDict(layers))
    net = nn.Sequential(OrderedDict(backbone=backbone, fc=nn.Linear(dim, outputs)))
    has_biases = "conv1.bias" in state or "conv1.0.bias" in state  # in all convolutions
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d) and has_biases:
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))

    expected = {}  # {name there: tensor here}
    for name, tensor in net.state_dict().items():
        there = name.removeprefix("backbone.")
        if "conv1.1.weight" in state:
            for ours, theirs in CIFAR_NAMES.items():
                there = there.replace(ours, theirs)
        if has_weights or name not in weight_shapes(net):
            expected[there] = tensor
    shapes = {(name, tensor.shape) for name, tensor in expected.items()}
    shapes_there = {(name, tensor.shape) for name, tensor in state.items()}
    wrong = sorted({name for name, _ in shapes ^ shapes_there})
    if wrong:
        raise UserError(f"{path}: missing, left over or of another shape than in a published "
                        f"{model}: {', '.join(wrong[:4])}")
    for name, tensor in expected.items():
        tensor.copy_(state[name])
    return net


def read_stage(path):
    """The state dict in a file of the published stage 0 or 1, and in stage 1 that with rho."""
    rest = {}
    mu = {}
    rho = {}
    for name, tensor in data.read_state_dict(path).items():
        if name.endswith("weight_sigma"):
            rho[name.removesuffix("_sigma")] = tensor
        elif name.endswith("weight_mu"):
            mu[name.removesuffix("_mu")] = tensor
        elif not name.endswith(("prior_mu", "prior_bias_mu", "bias_sigma")):
            rest[name.removesuffix("_mu")] = tensor
    if not rho:
        return rest, {}
    return rest | mu, rest | rho


def published_sigma(args, train_set):
    """The sigma [N] in a file --weights of the published stage 1; None of other files."""
    with_rho = is_published(args) and read_stage(args.weights)[1]
    if not with_rho:
        return None
    net = published_network(with_rho, args.weights, args, train_set.num_classes, train_set.shape)
    rho = MeanField(net).mu.detach()  # the weights of `net` as a vector, which are rho here
    # published code: this can be negative, which is the same Gaussian as that of its magnitude
    return (0.0003 + rho.exp()).log().abs().clamp_min(1e-8)


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
        return torch.optim.SGD(module.parameters(), args.lr, momentum=0.9, nesterov=True,
                               weight_decay=args.weight_decay)
    posterior = module.posterior
    rest = [parameter for parameter in module.net.parameters() if parameter.requires_grad]
    if isinstance(posterior, MeanField):
        groups = [{"params": rest + [posterior.mu], "lr": args.lr_mu},
                  {"params": [posterior.rho], "lr": args.lr_rho}]
    else:
        groups = [{"params": rest, "lr": args.lr_mu},
                  {"params": list(posterior.parameters()), "lr": args.lr_final}]
    return torch.optim.Adam(groups)


def train(module, stage, seed, train_set, args, run, made_from):
    """Minimise mean cross entropy + kl_weight KL / n, from the last completed epoch on."""
    name = f"seed{seed}-{stage.name}"
    optimiser = make_optimiser(module, args)
    full_rates = [group["lr"] for group in optimiser.param_groups]
    augment = "reflect_crop_flip" if args.augment else "none"
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, workers=args.workers, channels_last=True,
                         augment=augment)
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
            factor = lr_factor((epoch + (step + 0.5) / len(loader)) / stage.epochs, args.warm_up)
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
        history.append({"epoch": epoch + 1, "loss": loss / len(loader),
                        "kl_per_example": kl / len(loader), "accuracy": correct / examples,
                        "lr": optimiser.param_groups[-1]["lr"],
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
    mu = posterior.mu.detach().cpu()
    sigma = posterior.sigma.detach().cpu()
    try:
        clustered, merged, numbers = compress(mu, sigma, gradient.cpu(), options, generator)
    except ValueError as error:
        raise UserError(f"{error}; change --tau-w, --grad-frac or --k0") from None
    return {"clustered": clustered._asdict(), "merged": merged._asdict(), "numbers": numbers}


def compress_once(field, seed, train_set, args, run, made_from):
    """Steps 2 and 3: the SharedWeights "clustered" and "merged", computed or read."""
    def compute():
        gradient = gradient_magnitude(field, seed, train_set, args)
        return common.on_main(compress_weights, field.posterior, gradient, seed, args)

    made_from = made_from | {"mean-field weights": common.digest(field)}
    state = run.load_or_compute(f"seed{seed}-mixture", made_from, compute)
    return {name: SharedWeights(**state[name]) for name in ("clustered", "merged")}


# ---- Evaluation ---------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What the draws of the weights say of N examples, float64, on the CPU."""

    log_probs: Tensor  # [N, K]  log of the mean of probabilities
    logits: Tensor     # [N, K]  mean of logits
    aleatoric: Tensor  # [N]     mean entropy of a draw, in nats
    mode: Tensor       # [N]     the most frequent of labels that are sampled, one from each draw
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
    generator = torch.Generator().manual_seed(common.derive_seed(seed, 5))
    uniform = torch.rand(samples, len(dataset), generator=generator)   # [S, N]
    start = time.perf_counter()
    batches = []
    for batch in loader.epoch():
        index = batch.index.cpu()
        drawn = []
        # Every batch gets the same draws, so that a set is read once, and neither the size of the
        # batches nor the number of processes matters.
        for sample in range(samples):
            common.seed_all(seed, 1000 + sample)
            with common.autocast(args):
                logits = module(batch.images)
            drawn.append(logits)
        means = mean_prediction(torch.stack(drawn).cpu().double(), uniform[:, index])
        batches.append({"index": index, **means})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    return Prediction(**columns, ms=1000 * (time.perf_counter() - start) / len(dataset))


def mean_prediction(logits, uniform):
    """The tensors of a Prediction, from S draws with logits [S, N, K], and uniform [S, N]."""
    log_probs = logits.log_softmax(2)
    mean = log_probs.logsumexp(0) - math.log(len(logits))              # [N, K]
    probs = log_probs.exp()
    entropies = torch.special.entr(probs).sum(2)                       # [S, N]
    # A label is sampled where the cumulative probability passes a uniform number.
    below = probs.cumsum(2)[:, :, :-1] < uniform[:, :, None]           # [S, N, K - 1]
    return {"log_probs": mean, "logits": logits.mean(0), "aleatoric": entropies.mean(0),
            "mode": below.sum(2).mode(0).values}


def uncertainties(prediction):
    """Total uncertainty [N], the entropy of the mean, and its epistemic part, in nats."""
    total = common.entropy(prediction.log_probs.exp())
    return {"total": total, "epistemic": (total - prediction.aleatoric).clamp_min(0)}


def label_metrics(log_probs, labels):
    """Accuracy, likelihood and calibration of one prediction for each example [N, K]."""
    probs = log_probs.exp()
    return {"accuracy": common.accuracy(probs, labels), "nll": common.nll(log_probs, labels),
            "brier": common.brier(probs, labels), "ece15": common.ece(probs, labels),
            "ece10": common.ece(probs, labels, bins=10)}


def prediction_metrics(prediction, labels):
    """Metrics of the mean probabilities; and of the mean logits and the mode, as published."""
    metrics = label_metrics(prediction.log_probs, labels)
    for name, value in label_metrics(prediction.logits.log_softmax(1), labels).items():
        metrics[f"{name}_logits"] = value
    metrics["accuracy_mode"] = (prediction.mode == labels).double().mean().item()
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
        cause = "its file is damaged"
        if not args.load:
            cause = "training diverged; use lower learning rates"
        raise UserError(f"the outputs of the {method} network are not finite: {cause}")
    row = {"method": method, "seed": seed, "set": test_set.name, "n": len(test_set)}
    metrics = prediction_metrics(test, test_set.labels)
    rows = [row | metrics | {"ms": test.ms} | size]
    inside = uncertainties(test)
    if method == "deterministic" or args.mc == 1:
        del inside["epistemic"], rows[0]["accuracy_mode"]
    for against, prediction in ood.items():
        outside = uncertainties(prediction)
        comparison = row | {"against": against}
        for name in inside:
            found = common.ood_metrics(inside[name], outside[name], larger_means="ood")
            for metric, value in found.items():
                comparison[f"{metric}_{name}"] = value  # for example auroc_total
        rows.append(comparison)
    return rows


def write_predictions(predictions, sets, args, run):
    """--predict: predictions.csv, from {method: Prediction} for the set."""
    log_probs = {method: found.log_probs[None] for method, found in predictions.items()}
    final = predictions["final"]
    classes = sets.train.classes
    if final.log_probs.shape[1] > len(classes):
        classes = ()  # of a published network with more outputs; their numbers are the names
    columns = common.prediction_columns(sets.predict, log_probs, classes)
    # The parts of the uncertainty come from all draws, of which a Prediction has the means.
    if args.mc > 1:
        columns["aleatoric"] = final.aleatoric
        columns["epistemic"] = uncertainties(final)["epistemic"]
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------


def plot_plane(posterior, planes, size, run):
    """The plane of (mu, sigma) with the Gaussians {name: SharedWeights}, clustered and merged."""
    figure, axes = common.make_figure(1, 2, figsize=(12, 4.8), sharex=True, sharey=True)
    points = torch.stack([posterior.mu, posterior.sigma], 1).detach().cpu().numpy()
    low, high = np.quantile(points, [0.001, 0.999], axis=0)
    shown = np.linspace(0, len(points) - 1, 50_000).astype(int)
    for axis, (name, weights) in zip(axes, planes.items()):
        draw_plane(axis, points[shown], shown, weights)
        axis.set(title=f"{name}: {len(weights.centre)} Gaussians", xlabel="mu", ylabel="sigma",
                 xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    axes[0].legend(loc="upper center", ncols=3, markerscale=6)
    figure.suptitle(f"{size['bytes_vs_mean_field']:.0%} of the bytes of the mean-field network")
    run.save_figure(figure, "plane.png")


def draw_plane(axis, points, rows, weights):
    """Points [n, 2], the weights `rows`, with the 95 % ellipses of the Gaussians."""
    is_outlier = weights.label[rows].numpy() < 0
    is_ellipse_point = np.isin(rows, weights.ellipse_point.numpy())
    inlier_colour, outlier_colour, point_colour, ellipse_colour = common.colours(4)
    for mask, colour, name in ((~is_outlier, inlier_colour, "inliers"),
                               (is_outlier, outlier_colour, "outliers"),
                               (is_ellipse_point, point_colour, "ellipse points")):
        axis.plot(*points[mask].T, ".", ms=1.2, color=colour, label=name, rasterized=True)
    # The ellipse that holds 95 % is the image under L of a circle of radius sqrt(5.991).
    angle = torch.linspace(0, 2 * math.pi, 50)
    circle = math.sqrt(5.991) * torch.stack([angle.cos(), angle.sin()])  # [2, 50]
    ellipses = weights.centre[:, :, None] + weights.factor @ circle    # [K, 2, 50]
    u, v = ellipses.permute(1, 2, 0).numpy()                           # [50, K]
    axis.plot(u, v, color=ellipse_colour, lw=0.6)


# ---- Compressed networks ------------------------------------------------------------------------

FORMAT = "unsure-gbnn2d-6"
# What --load takes from the file, unless it is given: a file of --weights may have moved.
STORED_OPTIONS = ("model", "width", "draw", "freeze", "weights", "image_size")


def rest_of(module):
    """{name: tensor} of a RandomNetwork's network that is not drawn: biases, norms, buffers."""
    state = module.net.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if name not in module.shapes}


def rest_bytes(module):
    return sum(tensor.nbytes for tensor in rest_of(module).values())


def write_compressed(file_name, shared, train_set, args, run):
    """Write the shared weights as they are now, the rest, and class names; returns the bytes."""
    weights = {}
    for name, tensor in shared.posterior.weights()._asdict().items():
        if name in ("label", "second"):
            tensor = tensor.short()
        elif not tensor.is_floating_point():
            tensor = tensor.int()
        weights[name] = tensor.detach().cpu()
    options = {option: getattr(args, option) for option in STORED_OPTIONS}
    content = common.to_bytes({
        "format": FORMAT, "dataset": args.dataset, "classes": list(train_set.classes),
        "shape": list(train_set.shape), "weights": weights, "rest": rest_of(shared),
        "options": options})
    run.write(file_name, content)
    return len(content)


def decompress(state, train_set, args):
    """The network of a compressed file; raises errors of several types where parts do not fit."""
    if [state["classes"], state["shape"]] != [list(train_set.classes), list(train_set.shape)]:
        raise ValueError("it was made for other classes or another image size, those of --dataset "
                         f"{state['dataset']}")
    weights = {}
    for name, tensor in state["weights"].items():
        if not tensor.is_floating_point():
            tensor = tensor.long()
        weights[name] = tensor
    args = common.with_options(args, eval=True)  # torchvision's weights are not loaded first
    net = make_network(args, train_set.num_classes, train_set.shape)
    shared = network_of(net, SharedWeights(**weights), args)
    net.load_state_dict(state["rest"] | shared.split(shared.posterior()))
    return shared


def network_of(net, weights, args):
    """The RandomNetwork of SharedWeights from a file; raises an error where they do not fit."""
    count = sum(shape.numel() for shape in weight_shapes(net).values())
    if len(weights.label) != count:
        raise ValueError(f"it has {len(weights.label)} weights, {args.model} for these images "
                         f"{count}")
    outlier = weights.outlier.sort().values
    if not torch.equal((weights.label < 0).nonzero()[:, 0], outlier):
        raise ValueError("other outliers than weights without a component")
    posterior = SharedGaussians(weights, args.draw == "equal")
    posterior()  # on a CPU, where an index that is too large does not kill the process
    return RandomNetwork(net, posterior)


PUBLISHED_PARTS = ("state_dict_no_weight", "params_guide", "params_dict_indices")
# Two names of other published scripts.
OTHER_NAMES = {"centers": "centers_guide", "outliers_posterior_simga": "outliers_posterior_sigma"}


def read_published(state, train_set, args):
    """The network of a file of the published last stage; raises errors like `decompress`."""
    rest = state["state_dict_no_weight"]
    indices = state["params_dict_indices"]
    net = published_network(rest, args.load, args, train_set.num_classes, train_set.shape,
                            has_weights=False)
    outputs = len(rest["fc.bias"])
    if outputs > train_set.num_classes:
        common.print_on_main(f"note: the network has {outputs} outputs, the data have "
                             f"{train_set.num_classes} classes")
    guide = {OTHER_NAMES.get(name, name): value for name, value in state["params_guide"].items()}
    check_published(guide | indices, net)
    mu = guide["outliers_posterior_loc"]
    sigma = guide["outliers_posterior_sigma"]
    centre = guide["centers_guide"]
    outlier = indices["outliers_indices"]
    rows = torch.tensor(indices["ellipse_outdices"], dtype=torch.long)  # [E]
    if args.model == "wide_resnet":
        # WRN's script replaces ellipse points by constants: here, outliers with sigma 0.
        kept = ~torch.isin(outlier, rows)
        outlier = torch.cat([outlier[kept], rows])
        mu = torch.cat([mu[kept], published_blend(centre, indices)])
        sigma = torch.cat([sigma[kept], torch.zeros(len(rows))])
        rows = rows[:0]
    # ResNet's scripts overwrite these constants: alpha = 1 has no effect either.
    label = indices["filtered_labels"].int().index_fill(0, outlier, -1)
    weights = SharedWeights(label, outlier, mu, sigma, rows, torch.zeros_like(rows),
                            torch.ones(len(rows)), centre, guide["scale_tril_posterior"])
    return network_of(net, weights, args)


def check_published(parts, net):
    """Refuse parts of a published file that are missing, or have other shapes or values."""
    n = sum(shape.numel() for shape in weight_shapes(net).values())
    k = len(parts.get("centers_guide", ()))
    o = len(parts.get("outliers_indices", ()))
    shapes = {"centers_guide": (k, 2), "scale_tril_posterior": (k, 2, 2),
              "outliers_posterior_loc": (o,), "outliers_posterior_sigma": (o,),
              "outliers_indices": (o,), "filtered_labels": (n,)}
    missing = [name for name in list(shapes) + ["ellipse_outdices"] if name not in parts]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    for name, shape in shapes.items():
        found = tuple(getattr(parts[name], "shape", ()))
        if found != shape:
            raise ValueError(f"{name} has the shape {found}, expected {shape}")
    if not common.all_finite(parts):
        raise ValueError("a value is not finite")
    if (parts["outliers_posterior_sigma"] < 0).any():
        raise ValueError("a value of outliers_posterior_sigma is negative")
    largest = int(parts["filtered_labels"].max())
    if largest >= k:
        raise ValueError(f"filtered_labels has {largest}, expected at most {k - 1}")


def published_blend(centre, indices):
    """alpha_1 c_1 + alpha_2 c_2 [E] of ellipse points, the second where both values > e^12."""
    rows = indices["ellipse_outdices"]
    k = [indices["ellipse_outdices_dict"][row] for row in rows]
    k = torch.tensor(k, dtype=torch.long).view(-1, 2)                  # [E, 2]
    values = [indices["ellipse_outdices_value_dict"][row] for row in rows]
    values = torch.tensor(values, dtype=torch.float64).view(-1, 2)     # [E, 2]
    parts = values.softmax(1) * centre[k, 0]                           # [E, 2]
    parts[:, 1] *= (values > torch.tensor(12.0).exp()).all(1)
    return parts.sum(1).float()


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
    # These easy images allow a distance at which most Gaussians merge, half of the median sigma.
    # On CIFAR-10 that loses accuracy, which the last stage does not restore.
    "glyphs": dict(SMALL, width=0.125, epochs=3, stoch_epochs=2, final_epochs=4, lr_rho=5e-2,
                   k0=700, tau_d=6.3e-3, mc=20, ood=["glyphs_letters"]),
    # Your own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(SMALL, width=0.25, epochs=20, batch_size=32, lr=0.05, lr_rho=5e-2, augment=True,
                   mc=20, ood=[]),
    # Your own network: a few careful epochs, or its last layer alone.
    "pretrained": dict(SMALL, width=1.0, epochs=5, stoch_epochs=2, final_epochs=2, batch_size=32,
                       lr=0.01, k0=6000, augment=True, mc=10),
    "frozen": dict(epochs=30, stoch_epochs=20, final_epochs=20, lr_rho=5e-2, lr_final=0.03,
                   weight_decay=0.05, tau_w=1.0, k0=64, mc=20, augment=False),
}
# These only change what is computed from trained networks, so they do not identify a run.
EVALUATION_OPTIONS = ("mc", "ood", "load")
USED_BY_LOAD = ("load", "dataset", "preset", "image_size", "weights", "seed", "batch_size", "amp",
                "mc", "ood", "predict", "data_dir", "out_dir", "name", "device", "workers",
                "fresh", "plot")


def w2_threshold(text):
    """The argparse type of --tau-d."""
    if text == "auto":
        return text
    return at_least(0, float)(text)


def network_name(text):
    """The argparse type of -net: the name here of a network of the published code."""
    return {"wrn": "wide_resnet"}.get(text, text)


def parse_args(argv=None):
    parser = common.Parser("gbnn2d", __doc__, PRESETS, NETWORKS, dataset="glyphs",
                           model="resnet18", epochs=200, batch_size=128, lr=0.1)
    add = parser.add_argument_group("gbnn2d.py").add_argument
    add("-net", dest="model", type=network_name, metavar="NAME",
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
        help="weight of the KL term of the last stage, which is KL / n (published: KL / 256)")
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
        help="out-of-distribution sets; folder:PATH is a folder of images, nonsense are patterns "
        "and noise")
    add("--load", metavar="FILE", help="evaluate a compressed network on its data set: a file "
        "seedN-compressed.pt of a run directory, or 2DGBNNs.pth of the published code")
    args = parser.parse(argv)
    if is_published(args) and not args.load:
        skip_stages(args)
    check_options(args)
    return args


def skip_stages(args):
    """--weights with a file of the published stages 0 or 1: the later stages are left."""
    state, with_rho = read_stage(args.weights)
    model, args.width, _ = published_model(state, args.weights)
    if model != args.model:
        raise UserError(f"--weights {args.weights} are those of --model {model}")
    if "epochs" not in args.given:
        args.epochs = 0
    if with_rho:
        common.refuse(args, ["epochs"], "with the weights of a mean-field network")
        if "stoch_epochs" not in args.given:
            args.stoch_epochs = 0


def check_options(args):
    """Refuse options that would have no effect."""
    pretrained = args.model.startswith("torchvision/")
    no_effect = [
        (True, ["compile"], "on networks whose weights are drawn"),
        (args.load, args.given - set(USED_BY_LOAD), "with --load"),
        (not pretrained, ["freeze"], "without --model torchvision/NAME"),
        (args.freeze, ["augment"], "with --freeze"),
        (pretrained or args.weights, ["width"], "on a network that has been trained"),
        (args.epochs == 0, ["lr", "weight_decay"], "with --epochs 0"),
        (args.stoch_epochs == 0, ["stoch_kl", "lr_rho"], "with --stoch-epochs 0"),
        (args.final_epochs == 0, ["beta", "lr_final"], "with --final-epochs 0"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


# ---- Main ---------------------------------------------------------------------------------------

# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "auroc_total", "auroc_epistemic", "gaussians", "outliers",
           "ellipse_points", "bytes", "file_bytes", "bytes_vs_mean_field",
           "bytes_vs_deterministic"]
# For a published file, those that its script prints come first.
PUBLISHED_COLUMNS = ["outliers", "ellipse_points", "gaussians", "accuracy_mode", "accuracy_logits",
                     "nll_logits", "ece15_logits", "ece10_logits"] + COLUMNS[:5]


def load_sets(args, statistics=None, train_part="train"):
    """All sets of a run; all training images are for training."""
    if is_published(args):
        state, _ = read_stage(args.weights)
        _, _, statistics = published_model(state, args.weights)
    preparation = data.preparation_of(args.model, args.weights, args.image_size)
    sets = data.load_sets(args.dataset, args.data_dir, val_fraction=0, image_size=args.image_size,
                          preparation=preparation, limit_train=args.limit_train,
                          statistics=statistics, ood=args.ood, ood_required="ood" in args.given,
                          predict=args.predict, train_part=train_part)
    if args.freeze:
        sets = data.frozen_features(sets, args)
    return sets


def check_network(train_set, args):
    """Refuse, before training, a network or a --k0 that is impossible; lower that of a preset."""
    net = make_network(args, train_set.num_classes, train_set.shape)
    published_sigma(args, train_set)
    # The last batch of an epoch is the smallest; two images show errors of shape.
    smallest = len(train_set) % args.batch_size or args.batch_size
    images = torch.zeros(min(smallest, 2), *train_set.shape).to(next(net.parameters()))
    net.train(args.epochs > 0)
    try:
        net(images)
        shapes = weight_shapes(net)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} images {train_set.shape}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None
    count = sum(shape.numel() for shape in shapes.values())
    most = count // (CompressionOptions().min_cluster + 1)
    if args.k0 > most and "k0" in args.given:
        raise UserError(f"--k0 {args.k0}: the network has only {count} weights to compress, "
                        f"enough for at most {most} Gaussians")
    if args.k0 > most:
        args.k0 = max(2, count // 64)
        common.print_on_main(f"note: --k0 {args.k0}, as there are only {count} weights to compress")


def run_name(args):
    """The name of the run directory."""
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    return common.join_name(data.set_name(args.dataset), args.model, width, frozen,
                            f"seed{args.seed}")


def run_seed(seed, sets, args, run):
    """All steps for one seed; returns the rows."""
    # Step 1: a deterministic network, then a mean-field posterior. Norms and biases train on.
    common.seed_all(seed)
    origin = data.origin(sets.train, args)
    net = make_network(args, sets.train.num_classes, sets.train.shape)
    train(net, Stage("deterministic", 0, args.epochs, 0.0), seed, sets.train, args, run, origin)
    field = RandomNetwork(net, MeanField(net))
    n = len(field.posterior.mu)
    rest = rest_bytes(field)
    rows = evaluate("deterministic", net, sets, {"bytes": 4 * n + rest}, seed, args)
    predictions = {}
    if args.predict and seed == args.seed:
        predictions["deterministic"] = predict(net, sets.predict, seed, args)
    sigma = published_sigma(args, sets.train)
    if sigma is not None:
        field.posterior.rho.data.copy_(inverse_softplus(sigma))
    stage = Stage("mean-field", 1, args.stoch_epochs, args.stoch_kl)
    made_from = origin | {"deterministic weights": common.digest(field)}
    train(field, stage, seed, sets.train, args, run, made_from)
    rows += evaluate("mean-field", field, sets, {"bytes": 8 * n + rest}, seed, args)

    # Steps 2 and 3: a mixture over all weights, whose close components merge.
    planes = compress_once(field, seed, sets.train, args, run, origin)
    for name, weights in planes.items():
        shared = RandomNetwork(net, SharedGaussians(weights, args.draw == "equal"))
        size = storage(weights, rest)
        rows += evaluate(name, shared, sets, size, seed, args)

    # Step 4: the shared Gaussians are trained.
    stage = Stage("final", 3, args.final_epochs, args.beta)
    made_from = origin | {"shared Gaussians": common.digest(shared)}
    train(shared, stage, seed, sets.train, args, run, made_from)
    name = f"seed{seed}-compressed.pt"
    size["file_bytes"] = common.on_main(write_compressed, name, shared, sets.train, args, run)
    rows += evaluate("final", shared, sets, size, seed, args)
    if predictions:
        predictions = {"final": predict(shared, sets.predict, seed, args)} | predictions
        common.on_main(write_predictions, predictions, sets, args, run)
    if seed == args.seed and args.plot:
        common.on_main(plot_plane, field.posterior, planes, size, run)
    return rows


def sets_of_file(state, is_ours, args):
    """The sets for the network of a file, whose options `args` gets."""
    missing = [part for part in PUBLISHED_PARTS if part not in state]
    if missing and not is_ours:
        raise UserError(f"--load {args.load}: no compressed network of this version; for one of "
                        f"the published code, {', '.join(missing)} is missing")
    content = state.get("options" if is_ours else "state_dict_no_weight")
    if not isinstance(content, dict):
        raise UserError(f"--load {args.load} is damaged: its options or its network are missing")
    if is_ours:
        for name in STORED_OPTIONS:
            if name in content and name not in args.given:
                setattr(args, name, content[name])
        return load_sets(args)
    common.refuse(args, ["weights"], "with a published file")
    args.model, args.width, statistics = published_model(content, args.load)
    args.draw = "equal"
    if args.model == "wide_resnet":
        # published code: its test has other statistics than its training, and 30 draws
        statistics = CIFAR100
        if "mc" not in args.given:
            args.mc = 30
    return load_sets(args, statistics, "test")  # the training images are not read


def run_loaded(args):
    """--load: evaluate a compressed network of this script, or one of the published code."""
    state = common.load_tensors(args.load)
    is_ours = state.get("format") == FORMAT
    sets = sets_of_file(state, is_ours, args)
    read = decompress if is_ours else read_published
    try:
        shared = read(state, sets.train, args)
    except UserError:
        raise
    except Exception as error:  # parts are missing, or have other types or sizes
        raise UserError(f"--load {args.load} does not fit: {common.one_line(error)}") from None
    size = storage(shared.posterior.weights(), rest_bytes(shared))
    size["file_bytes"] = common.on_main(Path(args.load).stat).st_size
    if not is_ours:
        indices = state["params_dict_indices"]
        size["outliers"] = len(indices["outliers_indices"])
        size["ellipse_points"] = len(indices["ellipse_outdices"])
    name = common.join_name("loaded", Path(args.load).stem, common.digest(shared)[:8],
                            f"seed{args.seed}")
    run = common.Run(args, "gbnn2d", name, EVALUATION_OPTIONS)
    method = "loaded" if is_ours else "published"
    rows = evaluate(method, shared, sets, size, args.seed, args)
    if args.predict:
        predictions = {"final": predict(shared, sets.predict, args.seed, args)}
        common.on_main(write_predictions, predictions, sets, args, run)
    columns = COLUMNS if is_ours else PUBLISHED_COLUMNS
    return run.report(rows, columns)


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
    for seed in range(args.seed, args.seed + args.runs):
        rows += run_seed(seed, sets, args, run)
    return run.report(rows, COLUMNS)


if __name__ == "__main__":
    common.launch(main)
