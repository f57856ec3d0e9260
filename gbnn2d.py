"""Stochastic weight sharing: a Bayesian network whose weights share a few Gaussians in the plane.

Lin, Guan, Jing, Botterweck, Patane, "Stochastic Weight Sharing for Bayesian Neural Networks",
AISTATS 2025, arXiv:2505.17856:

  1. Train a network on n examples, then a mean-field posterior N(mu_i, sigma_i^2) over its
     weights, by the mean cross entropy + 0.1 KL / n, with the prior N(0, s^2) of each layer.
  2. Cover the points (mu_i, sigma_i) with K Gaussians N(c_k, S_k). Outliers (|mu| > 0.2, one of
     the largest 1 % of the gradients, a component of at most 20) keep a Gaussian of their own.
  3. Merge components that are closer than tau_d in Wasserstein-2 distance.
  4. Train centres, covariances and outliers by the same loss, with the KL from where they began.
     A draw is w_i = m + s eps_i, with one (m, s) ~ N(c_k, S_k) for all weights of component k. A
     weight outside the 95 % ellipse of its component is a blend of its two most probable ones.

The file is small: two bytes per weight, the label k. Memory is not saved, as a prediction draws all
weights: with ResNet-18 the file has 22 MB, but one image needs 316 MB (deterministic: 45 and 56).

Usage:
  python gbnn2d.py                                           # glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 gbnn2d.py --dataset cifar100   # the published ResNet-18
  python gbnn2d.py --load 2DGBNNs.pth --dataset cifar100     # a file of the authors, or of a run
  python gbnn2d.py --dataset folder:images --model torchvision/resnet18   # your images and network
  With --weights FILE of the authors' first or second stage, the stages after it follow.

Expected (more in tests/RESULTS.md), n = 3: 572 Gaussians merge into 120; accuracy 99.77 +- 0.11 %,
  ECE 1.1 +- 0.2 % (deterministic: 99.72 +- 0.08, 0.24 +- 0.02), 64 % of the deterministic bytes.

Where the method is: step 1: `MeanField`, `train`; step 2: `outlier_mask`, `fit_mixture`, `assign`;
step 3: `merge_mixture`; step 4: `SharedGaussians`, `fill_in`.

Differences from the published code (github.com/gfhvbjk/Anonymous, commit ad31235):
  - Last stage. Published: it cannot learn, as drawn weights are detached and the optimiser makes no
    step; its KL is divided by 256. Here: it learns, with 0.1 KL / n.
  - Mean-field stage. Published: no KL, sigma = log(0.0003 + e^rho), at times negative, SGD with
    weight decay, random biases. Here: 0.1 KL / n (--stoch-kl), softplus, Adam, fixed biases.
  - Epochs. Published: the best one on the test set counts. Here: the last one.
  - Batch norm. Published: it drifts in all stages and in the test. Here: its statistics are fixed
    after the first stage; norms and biases train on (--lr-mu).
  - Outliers. Published: by the signed gradient of one batch. Here: by magnitudes of an epoch.
  - Mixture. Published: k-means of all weights, not scaled. Here: EM without the outliers.
  - Merging. Published: after each epoch, in the order of indices, by plain averages, with a W2 that
    is wrong for small covariances, and bounds on variances (0.001) and gradient norms. Here: once,
    the closest pair first, moments matched; tau_v bounds a difference, as in the paper.
  - Draws. Published: w = m (--draw equal); ellipse points are constants (WRN) or m (ResNet-18).
  - Predictions. Published: mean logits (columns *_logits, ece10), the mode of sampled labels
    (accuracy_mode), FPR at 85 % TPR. Here: mean probabilities of the same draws for all batches.
  - Networks, images. Published: ResNet-18 for CIFAR has biases in convolutions, the statistics of
    CIFAR-100, zero padding, on CIFAR-10 rotations; OOD sets have their own statistics. Here: no.
"""

import hashlib
import math
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import KDTree
from torch import Generator, Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of math, scipy, torch and typing.

# Step 1: every weight gets a Gaussian of its own.


def weight_shapes(net: nn.Module) -> dict[str, torch.Size]:
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

    def __init__(self, net: nn.Module, posterior: nn.Module):
        super().__init__()
        self.net = net
        self.posterior = posterior.to(next(net.parameters()))
        self.shapes = weight_shapes(net)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name not in self.shapes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """{name: weight} of a vector [N], without a copy."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), vector.split(sizes))
        return {name: part.view(shape) for (name, shape), part in parts}

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, too, weights are drawn in the precision of the posterior.
        with torch.autocast(x.device.type, enabled=False):
            w = self.posterior()
        return functional_call(self.net, self.split(w), (x,))


class MeanField(nn.Module):
    """The posterior w_i = mu_i + sigma_i eps_i, with the prior N(0, s^2) of each layer.

    mu starts at the weights of the trained `net`, and sigma at `sigma_init` times s, the root mean
    square of the weights of the layer.
    """

    def __init__(self, net: nn.Module, sigma_init: float = 0.01):
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
    def sigma(self) -> Tensor:
        return F.softplus(self.rho)

    def forward(self) -> Tensor:
        """Draw w [N]."""
        return self.mu + self.sigma * torch.randn_like(self.mu)

    def kl(self) -> Tensor:
        """KL of the posterior from the prior, in nats."""
        return gaussian_kl(self.mu, self.sigma, self.prior_sd)


def inverse_softplus(sigma: Tensor) -> Tensor:
    """rho with softplus(rho) = sigma > 0, exact also far below 1."""
    return sigma + (-torch.expm1(-sigma)).log()


def gaussian_kl(mu: Tensor, sigma: Tensor, prior_sd: Tensor) -> Tensor:
    """The sum of KL(N(mu_i, sigma_i^2) || N(0, prior_sd_i^2)), in nats."""
    posterior = Normal(mu, sigma, validate_args=False)
    prior = Normal(torch.zeros_like(mu), prior_sd, validate_args=False)
    return kl_divergence(posterior, prior).sum()


def outlier_mask(mu: Tensor, gradient: Tensor, tau_w: float = 0.2,
                 fraction: float = 0.01) -> Tensor:
    """Weights [N] that keep a Gaussian of their own: |mu| > tau_w, or a large gradient magnitude.

    Large is at least the k-th largest, k = max(1, floor(fraction N)); a fraction of 0 is for none.
    """
    mask = mu.abs() > tau_w
    if fraction > 0:
        count = max(1, int(fraction * len(gradient)))
        mask = mask | (gradient >= gradient.topk(count).values[-1])
    return mask


# Step 2: the points (mu_i, sigma_i) of the other weights are covered by K Gaussians in the plane.


class GaussianMixture(NamedTuple):
    """sum_k pi_k N(c_k, S_k) of K Gaussians in the plane, float64."""

    proportion: Tensor  # [K]        pi_k, sum 1
    centre: Tensor      # [K, 2]     c_k
    covariance: Tensor  # [K, 2, 2]  S_k


def select(mixture: GaussianMixture, keep: Tensor) -> GaussianMixture:
    """The components `keep` (a mask [K]) of a mixture."""
    return GaussianMixture(*[tensor[keep] for tensor in mixture])


# Points are treated in blocks, so that memory does not grow with the number of weights:
BLOCK = 2**15       # each point with the few components that are nearest to it
DENSE_BLOCK = 2**9  # each point with all components
NEAREST = 16        # components that EM considers for a point
CANDIDATES = 8      # components among which the most probable one of a point is searched


def nearest(x: Tensor, centre: Tensor, count: int) -> Tensor:
    """The indices [n, count] of the centres [K, 2] that are nearest to points [n, 2].

    The axes are divided by the spread of the centres: mu and sigma differ by orders of magnitude.
    """
    scale = centre.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    count = min(count, len(centre))
    tree = KDTree((centre / scale).numpy())
    _, index = tree.query((x / scale).numpy(), count, workers=-1)
    return torch.from_numpy(index).view(len(x), count)


def mahalanobis_squared(x: Tensor, mixture: GaussianMixture,
                        k: Tensor | slice = slice(None)) -> Tensor:
    """Squared Mahalanobis distances [n, J] of points [n, 2] from components k [n, J], or all."""
    precision = torch.linalg.inv(mixture.covariance)[k]                # [n, J, 2, 2] or [K, 2, 2]
    u, v = (x[:, None] - mixture.centre[k]).unbind(2)                  # [n, J]
    mixed = 2 * precision[..., 0, 1] * u * v
    return precision[..., 0, 0] * u * u + mixed + precision[..., 1, 1] * v * v


def log_joint(x: Tensor, mixture: GaussianMixture, k: Tensor | slice = slice(None)) -> Tensor:
    """log pi_k N(x; c_k, S_k) [n, J] of points [n, 2] and the components k [n, J], or all."""
    log_volume = 0.5 * torch.logdet(mixture.covariance)                # [K]
    log_scale = mixture.proportion.log() - log_volume - math.log(2 * math.pi)
    return log_scale[k] - 0.5 * mahalanobis_squared(x, mixture, k)


def kmeans_plus_plus(x: Tensor, k: int, generator: Generator) -> Tensor:
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


def em_step(x: Tensor, k: Tensor, mixture: GaussianMixture,
            ridge: Tensor) -> tuple[GaussianMixture, float]:
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
    return GaussianMixture(sums[:, 0] / len(x), centre, covariance), log_likelihood


def fit_mixture(x: Tensor, k: int, generator: Generator, iterations: int = 30,
                most: int = 1_000_000) -> tuple[GaussianMixture, list[float]]:
    """Fit at most k Gaussians to points x [n, 2], float64, by EM from k-means++.

    `most` points, drawn once, are enough. Returns the mixture, in the units of x, and the
    mean log-likelihood before each iteration, in nats per point (a lower bound: of each point
    only the NEAREST components count).
    """
    sample = x[torch.randperm(len(x), generator=generator)[:most]]
    # The ridge must be above the rounding errors of the moments, and those of float32 in x.
    spread = torch.maximum(sample.std(0), 1e-6 * sample.abs().amax(0))
    spread = torch.where(spread > 0, spread, 1.0)
    mean = sample.mean(0)
    sample = sample - mean
    seeds = sample[:100_000]  # k-means++ takes time k n
    centre = seeds[kmeans_plus_plus(seeds / spread, k, generator)]     # [K, 2]
    ridge = 1e-6 * spread.square().diag()
    k = len(centre)
    covariance = spread.square().diag() / k
    mixture = GaussianMixture(x.new_full((k,), 1 / k), centre, covariance.expand(k, 2, 2))
    history = []
    for step in range(iterations):
        if step % 5 == 0:  # components move little in a few steps
            neighbours = nearest(sample, mixture.centre, NEAREST)      # [n, J]
        mixture, log_likelihood = em_step(sample, neighbours, mixture, ridge)
        history.append(log_likelihood)
    mixture = mixture._replace(centre=mixture.centre + mean)
    return select(mixture, mixture.proportion > 0), history


def outside_ellipses(x: Tensor, mixture: GaussianMixture, k: Tensor) -> Tensor:
    """The rows of points x [n, 2] that lie outside the 95 % ellipse of their component k [n]."""
    limit = -2 * math.log1p(-0.95)  # the quantile of chi-square with 2 degrees of freedom
    rows = []
    for block in torch.arange(len(x)).split(BLOCK):
        squared = mahalanobis_squared(x[block], mixture, k[block, None])[:, 0]
        rows.append(block[squared > limit])
    return torch.cat(rows)


def assign(x: Tensor, mixture: GaussianMixture) -> Tensor:
    """The most probable component [n] of each point x [n, 2].

    It is that of the CANDIDATES nearest, or for a point outside its ellipse that of all.
    """
    labels = []
    for block in x.split(BLOCK):
        k = nearest(block, mixture.centre, CANDIDATES)                 # [b, J]
        best = log_joint(block, mixture, k).argmax(1, keepdim=True)
        labels.append(k.gather(1, best)[:, 0])
    labels = torch.cat(labels)
    for rows in outside_ellipses(x, mixture, labels).split(DENSE_BLOCK):
        labels[rows] = log_joint(x[rows], mixture).argmax(1)
    return labels


class SharedWeights(NamedTuple):
    """N weights that refer to K Gaussians in the plane, but for outliers, which have their own."""

    label: Tensor          # [N] int32     the component of each weight; -1: an outlier
    outlier: Tensor        # [n_out]       which weights are outliers
    outlier_mu: Tensor     # [n_out]
    outlier_sigma: Tensor  # [n_out]
    ellipse_point: Tensor  # [n_ell]       which weights are outside their component's ellipse
    second: Tensor         # [n_ell]       the other component of the blend
    alpha: Tensor          # [n_ell]       the weight of the own component in the blend
    centre: Tensor         # [K, 2]        c_k
    factor: Tensor         # [K, 2, 2]     L_k, lower triangular, with S_k = L_k L_k^T


def second_components(x: Tensor, mixture: GaussianMixture, k: Tensor) -> tuple[Tensor, Tensor]:
    """The blend of points x [n, 2] with the components k [n]: the second component, and alpha.

    The second is the most probable component but k; alpha = pi_k N(x; k) / (pi_k N(x; k) +
    pi_second N(x; second)), the posterior of k among the two, is its weight.
    """
    joint = log_joint(x, mixture)                                      # [n, K]
    own = joint.gather(1, k[:, None])[:, 0]
    best, second = joint.scatter(1, k[:, None], -math.inf).max(1)
    return second, (own - best).sigmoid()


def encode(points: Tensor, label: Tensor, mixture: GaussianMixture) -> SharedWeights:
    """The SharedWeights of points [N, 2] with the components label [N], where -1 is an outlier."""
    inliers = (label >= 0).nonzero()[:, 0]
    ellipse_point = inliers[outside_ellipses(points[inliers], mixture, label[inliers])]
    second = []
    alpha = []
    for rows in ellipse_point.split(DENSE_BLOCK):
        block_second, block_alpha = second_components(points[rows], mixture, label[rows])
        second.append(block_second)
        alpha.append(block_alpha)
    outlier = (label < 0).nonzero()[:, 0]
    mu, sigma = points.float().T
    return SharedWeights(label.int(), outlier, mu[outlier], sigma[outlier], ellipse_point,
                         torch.cat(second), torch.cat(alpha).float(), mixture.centre.float(),
                         torch.linalg.cholesky(mixture.covariance).float())


# Step 3: close components merge.


def wasserstein(centre_a: Tensor, covariance_a: Tensor, centre_b: Tensor,
                covariance_b: Tensor) -> Tensor:
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


def merge_distances(k: int, mixture: GaussianMixture, gradient: Tensor, tau_g: float,
                    tau_v: float) -> Tensor:
    """W2 [K] of component k from all; infinite where they may not merge."""
    _, centre, covariance = mixture
    distance = wasserstein(centre[k], covariance[k], centre, covariance)
    variance = covariance.diagonal(dim1=1, dim2=2).mean(1)             # [K]  tr S / 2
    too_different = (gradient - gradient[k]).abs() >= tau_g
    too_different |= (variance - variance[k]).abs() >= tau_v
    too_different[k] = True
    return distance.masked_fill(too_different, math.inf)


def merge_mixture(mixture: GaussianMixture, gradient: Tensor, tau_d: float,
                  tau_g: float = math.inf, tau_v: float = 1e-3) -> GaussianMixture:
    """Merge the closest two components again and again, while they are closer than tau_d.

    Two may merge if their W2 < tau_d, their gradients [K] (mean magnitudes of the members) differ
    by less than tau_g and their variances tr S / 2 by less than tau_v. Moments are matched: the
    mean and covariance of the whole mixture stay.
    """
    # A merge changes the distances from one component alone. So the closest partner is searched
    # anew only for the merged component, and for those whose partner was one of the two. Another
    # component may now be closest to the merged one; that pair is known from the merged one's side.
    mixture = GaussianMixture(*[tensor.clone() for tensor in mixture])
    gradient = gradient.clone()
    distance = torch.full_like(mixture.proportion, math.inf)           # [K]  W2 from the partner
    partner = torch.zeros_like(gradient, dtype=torch.long)             # [K]
    changed = torch.ones_like(gradient, dtype=torch.bool)              # [K]
    while True:
        for k in changed.nonzero()[:, 0].tolist():
            distances = merge_distances(k, mixture, gradient, tau_g, tau_v)
            partner[k] = distances.argmin()
            distance[k] = distances[partner[k]]
        i = int(distance.argmin())
        if distance[i] >= tau_d:
            return select(mixture, mixture.proportion > 0)
        j = int(partner[i])
        kept = min(i, j)
        gone = max(i, j)
        merge_pair(mixture, gradient, kept, gone)
        distance[gone] = math.inf
        changed = (distance < tau_d) & ((partner == kept) | (partner == gone))
        changed[kept] = True


def merge_pair(mixture: GaussianMixture, gradient: Tensor, kept: int, gone: int):
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


def compress(mu: Tensor, sigma: Tensor, gradient: Tensor, options: CompressionOptions,
             generator: Generator) -> tuple[SharedWeights, SharedWeights, dict]:
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
        raise ValueError(f"no Gaussian has more than {options.min_cluster} weights; {k0} Gaussians "
                         "are too many")
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


def keep_components(label: Tensor, mixture: GaussianMixture,
                    least: int) -> tuple[Tensor, GaussianMixture]:
    """Labels [N] and mixture without components of fewer than `least` members, labelled -1."""
    inliers = (label >= 0).nonzero()[:, 0]
    members = label[inliers].bincount(minlength=len(mixture.proportion))
    keep = members >= least
    number = torch.where(keep, keep.cumsum(0) - 1, -1)                 # [K]  the new label of each
    label = label.index_copy(0, inliers, number[label[inliers]])
    proportion, centre, covariance = select(mixture, keep)
    return label, GaussianMixture(proportion / proportion.sum(), centre, covariance)


# Step 4: the shared Gaussians are drawn and trained.


class SharedGaussians(nn.Module):
    """The posterior w_i = m + s eps_i of SharedWeights, (m, s) ~ N(c_k, S_k) drawn once per k.

    With `equal`, the published draw: w_i = m for all members of a component. The parameters are
    offsets from the fitted Gaussians, in units of their spread, so that one learning rate suits
    all: c + L shift, L M with M lower triangular, mu + sigma outlier_shift, and
    sigma exp(outlier_stretch).
    """

    def __init__(self, weights: SharedWeights, equal: bool = False):
        super().__init__()
        self.equal = equal
        for name, tensor in weights._asdict().items():
            self.register_buffer(name, tensor)
        self.shift = nn.Parameter(torch.zeros_like(self.centre))
        # of each component log M_00, M_10, log M_11
        self.stretch = nn.Parameter(self.centre.new_zeros(len(self.centre), 3))
        self.outlier_shift = nn.Parameter(torch.zeros_like(self.outlier_mu))
        self.outlier_stretch = nn.Parameter(torch.zeros_like(self.outlier_mu))

    def forward(self) -> Tensor:
        """Draw w [N]."""
        weights = self.weights()
        noise = torch.randn_like(weights.centre)                       # [K, 2]
        drawn = weights.centre + torch.einsum("kpq,kq->kp", weights.factor, noise)
        m, s = drawn.unbind(1)
        if self.equal:
            s = torch.zeros_like(s)
        eps = torch.randn_like(weights.label, dtype=m.dtype)
        return fill_in(weights, m, s, eps)

    def weights(self) -> SharedWeights:
        """The SharedWeights as they are now."""
        start = SharedWeights(**dict(self.named_buffers()))
        centre = start.centre + torch.einsum("kpq,kq->kp", start.factor, self.shift)
        outlier_mu = start.outlier_mu + start.outlier_sigma * self.outlier_shift
        outlier_sigma = start.outlier_sigma * self.outlier_stretch.exp()
        return start._replace(centre=centre, factor=start.factor @ self.triangle(),
                              outlier_mu=outlier_mu, outlier_sigma=outlier_sigma)

    def triangle(self) -> Tensor:
        """M [K, 2, 2]."""
        matrix = torch.diag_embed(self.stretch[:, ::2].exp())
        matrix[:, 1, 0] = self.stretch[:, 1]
        return matrix

    def kl(self) -> Tensor:
        """KL of the Gaussians from their initial values, each counted once, in nats:

            sum_k 1/2 [tr M M^T + |shift|^2 - 2 - ln det M M^T], and the outliers' KL
        """
        squares = self.triangle().square().sum((1, 2))
        squares = squares + self.shift.square().sum(1)
        log_determinant = self.stretch[:, 0] + self.stretch[:, 2]  # of M
        shared = 0.5 * squares - 1 - log_determinant
        unit = torch.ones_like(self.outlier_shift)
        return shared.sum() + gaussian_kl(self.outlier_shift, self.outlier_stretch.exp(), unit)


def fill_in(weights: SharedWeights, m: Tensor, s: Tensor, eps: Tensor) -> Tensor:
    """The weights w_i = mean + deviation eps_i [N], for the draws m, s [K] of the components.

    Three groups have (mean, deviation) of their own, as rows of one table: the members of a
    component its (m, s), each ellipse point the blend of its two components, and each outlier its
    (mu, sigma). Differentiable.
    """
    own = weights.label[weights.ellipse_point].long()                  # [n_ell]
    second = weights.second
    mean = torch.cat([m, m[second].lerp(m[own], weights.alpha), weights.outlier_mu])
    deviation = torch.cat([s, s[second].lerp(s[own], weights.alpha), weights.outlier_sigma])
    rows = torch.arange(len(m), len(mean), device=m.device, dtype=weights.label.dtype)
    apart = torch.cat([weights.ellipse_point, weights.outlier])
    row = weights.label.index_copy(0, apart, rows)                     # [N]
    # index_select: the gradient of mean[row] would be sorted, which is slow for many weights.
    return mean.index_select(0, row) + deviation.index_select(0, row) * eps


def storage(weights: SharedWeights, rest: int) -> dict[str, float]:
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
        stage = read_stage(args.weights)
        net = published_network(stage.state, args.weights, args, num_classes, shape)
        load_state(net, stage.state, args.weights)
    else:
        backbone, head = common.backbone_and_head(args, NETWORKS, num_classes, shape)
        net = nn.Sequential(OrderedDict(backbone=backbone, head=head))
    return net.to(args.device, memory_format=torch.channels_last)


# The networks of the published code, in its files of the first two stages and of the last one.


class Layout(NamedTuple):
    """A published network, which is told from the others by one of its batch norms."""

    batch_norm: str         # its weight, a vector; the length determines --width
    channels: int           # that length at --width 1
    model: str              # --model
    statistics: tuple       # mean and standard deviation of the images in training
    last_statistics: tuple  # the same in the predictions of the last stage


CIFAR100 = ((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047))
CIFAR = ((0.49137, 0.48235, 0.44667), (0.24706, 0.24353, 0.26157))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LAYOUTS = (
    Layout("conv1.1.weight", 64, "resnet18", CIFAR100, CIFAR100),
    Layout("layer1.0.bn1.weight", 64, "resnet18", IMAGENET, IMAGENET),
    Layout("block1.layer.0.bn2.weight", 160, "wide_resnet", CIFAR, CIFAR100),
)
# Parts of published names, and ours: those of the ResNet-18 for CIFAR differ.
OUR_NAMES = {"conv1.0.": "conv1.", "conv1.1.": "bn1.", "residual_function.0.": "conv1.",
             "residual_function.1.": "bn1.", "residual_function.3.": "conv2.",
             "residual_function.4.": "bn2.", "shortcut.": "downsample.", "conv2_x": "layer1",
             "conv3_x": "layer2", "conv4_x": "layer3", "conv5_x": "layer4", "backbone.fc.": "head."}


def is_published(args):
    """Whether --weights is a file of the published code, not of torchvision."""
    return args.weights is not None and not args.model.startswith("torchvision/")


def find_layout(state, path):
    """The Layout of a published state dict, and its --width."""
    for layout in LAYOUTS:
        names = (layout.batch_norm, "fc.bias")
        if all(getattr(state.get(name), "ndim", 0) == 1 for name in names):
            return layout, len(state[layout.batch_norm]) / layout.channels
    names = ", ".join(layout.batch_norm for layout in LAYOUTS)
    raise UserError(f"{path}: no published network, fc.bias is missing or all of {names}")


def with_our_names(state):
    """A published state dict with the names of our networks."""
    renamed = {}
    for published_name, tensor in state.items():
        name = f"backbone.{published_name}"
        for published_part, our_part in OUR_NAMES.items():
            name = name.replace(published_part, our_part)
        renamed[name] = tensor
    return renamed


class PublishedStage(NamedTuple):
    """A file of the published stage 0 or 1, with our names."""

    state: dict  # the state dict, with mu as weights
    rho: dict    # {weight: tensor}; empty in stage 0
    layout: Layout
    width: float


def read_stage(path):
    """The PublishedStage in a file of the published code."""
    state = {}
    rho = {}
    for name, tensor in common.read_state_dict(path).items():
        if name.endswith("weight_sigma"):
            rho[name.removesuffix("_sigma")] = tensor
        elif not name.endswith(("prior_mu", "prior_bias_mu", "bias_sigma")):
            state[name.removesuffix("_mu")] = tensor
    layout, width = find_layout(state, path)
    return PublishedStage(with_our_names(state), with_our_names(rho), layout, width)


def published_network(state, path, args, num_classes, shape):
    """A network of --model and --width, but of the depth, biases and outputs of a state dict.

    Names and shapes of what is not random (biases and norms) are enough. The state dict is not
    loaded.
    """
    outputs = len(state["head.bias"])
    if outputs < num_classes:
        raise UserError(f"{path} has {outputs} classes, but the data have {num_classes}")
    if args.model == "wide_resnet":
        blocks = {name.split(".")[3] for name in state if name.startswith("backbone.block1.")}
        layers, dim = wide_resnet(args, shape, depth=6 * len(blocks) + 4)
    else:
        layers, dim = resnet18(args, shape)
    backbone = nn.Sequential(OrderedDict(layers))
    net = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(dim, outputs)))
    if "backbone.conv1.bias" in state:  # then all convolutions have one
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
    return net


def load_state(net, state, path):
    """Load the state dict of a file; a UserError if names, shapes or values cannot be right."""
    for name, tensor in state.items():
        if not common.all_finite(tensor):
            raise UserError(f"{path}: a value of {name} is not finite")
        if name.endswith("running_var") and (tensor < 0).any():
            raise UserError(f"{path}: a value of {name} is negative")
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit this network and image size: "
                        f"{common.one_line(error)}") from None


def published_sigma(net, args):
    """The sigma [N] of a file --weights of the published stage 1; None of other files."""
    if not is_published(args):
        return None
    rho = read_stage(args.weights).rho
    if not rho:
        return None
    shapes = weight_shapes(net)
    wrong = [name for name in shapes if name not in rho or rho[name].shape != shapes[name]]
    if wrong:
        raise UserError(f"{args.weights}: the sigma of {wrong[0]} is missing, or has another shape")
    rho = torch.cat([rho[name].flatten() for name in shapes])
    # published code: this can be negative, which is the same Gaussian as that of its magnitude
    return (0.0003 + rho.exp()).log().abs().clamp_min(1e-8)


# ---- Training -----------------------------------------------------------------------------------


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


# Numbers of the steps: random numbers depend on the seed and on these.
TRAINING_STAGES = {"deterministic": 0, "mean-field": 1, "final": 3}
COMPRESSION = 2
PREDICTED_LABELS = 5


def train(module, stage, seed, epochs, train_set, args, run, kl_weight=0.0, inputs=None):
    """Minimise the mean cross entropy + kl_weight KL / n, for one of the TRAINING_STAGES.

    module: the deterministic network, or a RandomNetwork, whose posterior has the KL. inputs: what
    the stage depends on beside options and data, see `Run.resume`.
    """
    name = f"seed{seed}-{stage}"
    optimiser = make_optimiser(module, args)
    full_rates = [group["lr"] for group in optimiser.param_groups]
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, workers=args.workers, channels_last=True,
                         augment="reflect_crop_flip" if args.augment else "none")
    # With several processes this is DistributedDataParallel, with batch norm over all of them.
    model = common.data_parallel(module, args.device)
    history = run.resume(name, epochs, inputs, net=module, optimiser=optimiser)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        # Batch statistics would hide how a draw shifts the activations: later stages fix them.
        model.train(stage == "deterministic")
        totals = torch.zeros(4, device=args.device)  # loss, KL, correct predictions, examples
        for step, batch in enumerate(common.progress(loader, epoch)):
            # Every step is seeded: all processes draw the same weights, and so does a resumed run.
            common.seed_all(seed, TRAINING_STAGES[stage], epoch, step)
            factor = lr_factor((epoch + (step + 0.5) / len(loader)) / epochs, args.warm_up)
            for group, full_rate in zip(optimiser.param_groups, full_rates):
                group["lr"] = full_rate * factor
            with common.autocast(args):
                logits = model(batch.images)  # a RandomNetwork draws its weights
            loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
            loss = loss / batch.global_size
            kl = module.posterior.kl() / len(train_set) if kl_weight > 0 else loss.new_zeros(())
            # DDP averages over processes: each has its part of the loss, and the whole KL.
            objective = loss * common.world_size() + kl_weight * kl
            optimiser.zero_grad()
            objective.backward()
            optimiser.step()
            totals[0] += loss.detach()
            totals[1] += kl.detach() / common.world_size()
            totals[2] += (logits.argmax(1) == batch.labels).sum()
            totals[3] += len(logits)
        loss, kl, correct, examples = common.all_reduce(totals).tolist()
        history.append({"epoch": epoch + 1, "loss": loss / len(loader),
                        "kl_per_example": kl / len(loader), "train_accuracy": correct / examples,
                        "lr": optimiser.param_groups[-1]["lr"],
                        "seconds": time.perf_counter() - start})
        run.save(name, history, net=module, optimiser=optimiser)


def gradient_magnitude(field, seed, train_set, args):
    """The mean over the batches of an epoch of |d mean cross entropy / d mu|, [N]."""
    loader = data.Loader(train_set, args.batch_size, args.device, workers=args.workers,
                         limit_steps=args.limit_steps, channels_last=True)
    field.eval()
    mu = field.posterior.mu
    total = torch.zeros_like(mu)
    for step, batch in enumerate(common.progress(loader, epoch=0)):
        common.seed_all(seed, COMPRESSION, step)
        with common.autocast(args):
            logits = field(batch.images)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum") / batch.global_size
        [gradient] = torch.autograd.grad(loss, mu)
        total += common.all_reduce(gradient).abs()
    return total / len(loader)


def initial_gaussians(count, args):
    """The number of Gaussians before merging: --k0, or fewer where a preset's are too many.

    count: the number N of weights. More than N / 21 Gaussians cannot all have enough members.
    """
    most = count // (CompressionOptions().min_cluster + 1)
    if args.k0 <= most:
        return args.k0
    if "k0" in args.explicit:
        raise UserError(f"--k0 {args.k0}: the network has only {count} weights to compress, "
                        f"enough for at most {most} Gaussians")
    fewer = max(2, count // 64)
    common.print_once(f"--k0 is {fewer}, not {args.k0}: only {count} weights are compressed")
    return fewer


def compress_weights(posterior, gradient, seed, args):
    """Steps 2 and 3: plain dictionaries of the SharedWeights, and numbers about them."""
    options = CompressionOptions(k0=initial_gaussians(len(gradient), args), tau_w=args.tau_w,
                                 grad_frac=args.grad_frac, tau_d=args.tau_d)
    generator = torch.Generator().manual_seed(common.derive_seed(seed, COMPRESSION))
    mu = posterior.mu.detach().cpu()
    sigma = posterior.sigma.detach().cpu()
    try:
        clustered, merged, numbers = compress(mu, sigma, gradient.cpu(), options, generator)
    except ValueError as error:
        raise UserError(f"{error}; change --tau-w, --grad-frac or --k0") from None
    return {"clustered": clustered._asdict(), "merged": merged._asdict(), "numbers": numbers}


def compress_once(field, seed, train_set, args, run):
    """Steps 2 and 3: the SharedWeights "clustered" and "merged", computed or read."""
    def compute():
        gradient = gradient_magnitude(field, seed, train_set, args)
        return common.on_main(compress_weights, field.posterior, gradient, seed, args)

    inputs = {"mean-field network": common.fingerprint(field)}
    state = run.cached(f"seed{seed}-mixture", inputs, compute)
    return {name: SharedWeights(**state[name]) for name in ("clustered", "merged")}


# ---- Evaluation ---------------------------------------------------------------------------------

LARGER_MEANS = {"total": "ood", "epistemic": "ood"}  # large values of a score


class Predictions(NamedTuple):
    """What the draws of the weights say of N examples, float64, on the CPU."""

    log_probs: Tensor  # [N, K]  log of the mean of probabilities
    logits: Tensor     # [N, K]  mean of logits
    aleatoric: Tensor  # [N]     mean entropy of a draw, in nats
    mode: Tensor       # [N]     the most frequent of labels that are sampled, one from each draw
    ms: float          # time of the pass over the set, in milliseconds per example


@torch.no_grad()
def predict(module, dataset, seed, args):
    """The Predictions for a whole set in eval mode; None on all processes but the main one."""
    module.eval()
    samples = 1
    if isinstance(module, RandomNetwork):
        samples = args.mc
    generator = torch.Generator().manual_seed(common.derive_seed(seed, PREDICTED_LABELS))
    uniform = torch.rand(samples, len(dataset), generator=generator)   # [S, N]
    start = time.perf_counter()
    batches = []
    for batch in data.evaluation_loader(dataset, args).epoch():
        index = batch.index.cpu()
        draws = []
        # Every batch gets the same draws, so that a set is read once, and neither the size of the
        # batches nor the number of processes matters.
        for sample in range(samples):
            common.seed_all(seed, 1000 + sample)
            with common.autocast(args):
                logits = module(batch.images)
            draws.append(logits)
        means = mean_prediction(torch.stack(draws).cpu().double(), uniform[:, index])
        batches.append({"index": index, **means})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    return Predictions(**columns, ms=1000 * (time.perf_counter() - start) / len(dataset))


def mean_prediction(logits, uniform):
    """The tensors of Predictions, from S draws with logits [S, N, K], and uniform [S, N]."""
    log_probs = logits.log_softmax(2)
    mean = log_probs.logsumexp(0) - math.log(len(logits))              # [N, K]
    probs = log_probs.exp()
    entropies = torch.special.entr(probs).sum(2)                       # [S, N]
    # A label is sampled where the cumulative probability passes a uniform number.
    below = probs.cumsum(2)[:, :, :-1] < uniform[:, :, None]           # [S, N, K - 1]
    return {"log_probs": mean, "logits": logits.mean(0), "aleatoric": entropies.mean(0),
            "mode": below.sum(2).mode(0).values}


def uncertainties(predictions):
    """Total uncertainty [N], the entropy of the mean, and its epistemic part, in nats."""
    total = common.entropy(predictions.log_probs.exp())
    return {"total": total, "epistemic": (total - predictions.aleatoric).clamp_min(0)}


def label_metrics(predictions, labels):
    """Metrics of the mean probabilities; and of the mean logits and the mode, as published."""
    metrics = {}
    log_probs_of_logits = predictions.logits.log_softmax(1)
    for ending, log_probs in (("", predictions.log_probs), ("_logits", log_probs_of_logits)):
        of_mean = common.prediction_metrics(log_probs, labels)
        of_mean["ece10"] = common.ece(log_probs.exp(), labels, bins=10)
        for name, value in of_mean.items():
            metrics[f"{name}{ending}"] = value
    metrics["accuracy_mode"] = (predictions.mode == labels).double().mean().item()
    return metrics


def evaluate(method, module, splits, size, seed, args):
    """The rows of one network; size: the columns about storage."""
    test = predict(module, splits.test, seed, args)
    ood = {}
    for name, dataset in splits.ood.items():
        ood[name] = predict(module, dataset, seed, args)
    return common.on_main(result_rows, method, splits, test, ood, size, seed, args)


def result_rows(method, splits, test, ood, size, seed, args):
    """A row for the test set, and one for each OOD set, from their Predictions."""
    if not common.all_finite([test, ood]):
        cause = "its file is damaged"
        if not args.load:
            cause = "training diverged; use lower learning rates"
        raise UserError(f"the outputs of the {method} network are not finite: {cause}")
    row = {"method": method, "seed": seed, "set": splits.test.name, "n": len(splits.test)}
    ms = splits.backbone_ms + test.ms
    rows = [row | label_metrics(test, splits.test.labels) | {"ms": ms} | size]
    inside = uncertainties(test)
    if method == "deterministic" or args.mc == 1:
        del inside["epistemic"], rows[0]["accuracy_mode"]
    for against, predictions in ood.items():
        outside = uncertainties(predictions)
        rows.append(row | {"against": against}
                    | common.detection_metrics(inside, outside, LARGER_MEANS))
    return rows


def write_predictions(predictions, splits, args, run):
    """--predict: predictions.csv, from {method: Predictions} for the set."""
    log_probs = {method: means.log_probs[None] for method, means in predictions.items()}
    final = predictions["final"]
    classes = splits.train.classes
    if final.log_probs.shape[1] > len(classes):
        classes = ()  # of a published network with more outputs; their numbers are the names
    # The parts of the uncertainty come from all draws, of which Predictions have the means.
    parts = {}
    if args.mc > 1:
        parts = {"aleatoric": final.aleatoric, "epistemic": uncertainties(final)["epistemic"]}
    common.write_predictions(run, splits.predict, log_probs, classes, extra=parts)


# ---- Plots --------------------------------------------------------------------------------------


def plot_sharing(posterior, planes, rows, run):
    """Which weights share a Gaussian, in the plane of (mu, sigma), and what the networks cost.

    planes: {name: SharedWeights} before and after merging; rows: the results of all stages
    """
    figure, axes = common.make_figure(1, 3, figsize=(12.5, 4.2), width_ratios=(3, 3, 2))
    points = torch.stack([posterior.mu, posterior.sigma], 1).detach().cpu().numpy()
    low, high = np.quantile(points, [0.002, 0.998], axis=0)
    clustered, merged = [len(weights.centre) for weights in planes.values()]
    titles = [f"{len(points):,} weights share {clustered} Gaussians (colours)",
              f"{merged} are left when close ones have merged"]
    for axis, weights, title in zip(axes, planes.values(), titles):
        draw_components(axis, points, weights)
        axis.set(title=title, xlabel="mean mu of a weight", xlim=(low[0], high[0]),
                 ylim=(low[1], high[1]))
    axes[0].set(ylabel="its standard deviation sigma")
    axes[0].legend(loc="upper right", markerscale=5)
    draw_sizes(axes[2], rows)
    run.save_figure(figure, "plane.png")


def draw_components(axis, points, weights):
    """Points [N, 2], in one of six colours for each component, and the ellipses of 95 %."""
    shown = np.linspace(0, len(points) - 1, 60_000).astype(int)
    label = weights.label.numpy()[shown]
    for number, colour in enumerate(common.colours(6)):
        rows = shown[(label >= 0) & (label % 6 == number)]
        axis.plot(*points[rows].T, ".", ms=1.2, color=colour, rasterized=True)
    axis.plot(*points[shown[label < 0]].T, ".", ms=1.5, color="black", label="outliers")
    # The ellipse that holds 95 % is the image under L of a circle of radius sqrt(5.991).
    angle = torch.linspace(0, 2 * math.pi, 50)
    circle = math.sqrt(5.991) * torch.stack([angle.cos(), angle.sin()])  # [2, 50]
    ellipses = weights.centre[:, :, None] + weights.factor @ circle    # [K, 2, 50]
    u, v = ellipses.permute(1, 2, 0).numpy()                           # [50, K]
    axis.plot(u, v, color="black", lw=0.5)


def draw_sizes(axis, rows):
    """Bars of the bytes of three networks, with their accuracies on the test set."""
    names = {"final": "shared\nGaussians", "deterministic": "a number\nper weight",
             "mean-field": "a Gaussian\nper weight"}
    for row in rows:
        if row["method"] in names and "accuracy" in row:
            megabytes = row["bytes"] / 1e6
            axis.barh(names[row["method"]], megabytes, color=common.colours(1)[0])
            text = f" {megabytes:.2g} MB, accuracy {row['accuracy']:.1%}"
            axis.text(0, names[row["method"]], text, va="center", size=9,
                      bbox=dict(facecolor="white", alpha=0.8, lw=0, pad=1))
    axis.set(title="size of the network", xlabel="MB")


# ---- Compressed networks ------------------------------------------------------------------------

FORMAT = "unsure-gbnn2d-7"


class CompressedFile(NamedTuple):
    """What --load takes from a file of this script, or of the published last stage."""

    options: dict           # {option: value} that the file decides
    weights: SharedWeights
    rest: dict              # {name: tensor} of the network that is not drawn
    statistics: tuple       # mean and standard deviation of the inputs
    # Of a published file:
    layout: Layout | None = None
    counts: dict = {}       # its outliers and ellipse points, which SharedWeights count otherwise
    # Of a file of this script:
    classes: list = []
    shape: list = []        # (C, H, W)
    backbone: str | None = None  # the fingerprint of a frozen backbone, if features are the inputs


def rest_of(module):
    """{name: tensor} of a RandomNetwork's network that is not drawn: biases, norms, buffers."""
    state = module.net.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if name not in module.shapes}


def rest_bytes(module):
    return sum(tensor.nbytes for tensor in rest_of(module).values())


def write_compressed(file_name, shared, splits, args, run):
    """Write the shared weights as they are now, and all else that --load needs; returns the bytes.

    A frozen backbone is not written: its fingerprint shows whether --load has the same one.
    """
    weights = {}
    for name, tensor in shared.posterior.weights()._asdict().items():
        if name in ("label", "second"):
            tensor = tensor.short()
        elif not tensor.is_floating_point():
            tensor = tensor.int()
        weights[name] = tensor.detach().cpu()
    train_set = splits.train
    content = common.to_bytes({
        "format": FORMAT, "options": common.options(args, "training"), "weights": weights,
        "rest": rest_of(shared), "statistics": [list(train_set.mean), list(train_set.std)],
        "classes": list(train_set.classes), "shape": list(train_set.shape),
        "frozen backbone": splits.fingerprints.get("frozen backbone")})
    run.write(file_name, content)
    return len(content)


def read_file(args):
    """The CompressedFile --load; a UserError of one line if it is damaged."""
    state = common.load_tensors(args.load)
    try:
        if state.get("format") == FORMAT:
            return read_own_file(state)
        return read_published_file(state, args)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"--load {args.load} is damaged, or no compressed network of this version: "
                        f"{error.args[0]} is missing") from None
    except Exception as error:  # parts have other types or sizes
        raise UserError(f"--load {args.load} is damaged: {common.one_line(error)}") from None


def read_own_file(state):
    """A file of `write_compressed`."""
    stored = SharedWeights(**state["weights"])
    weights = stored._replace(label=stored.label.int(), outlier=stored.outlier.long(),
                              ellipse_point=stored.ellipse_point.long(),
                              second=stored.second.long())
    check_shared_weights(weights)
    mean, std = state["statistics"]
    return CompressedFile(dict(state["options"]), weights, state["rest"], (tuple(mean), tuple(std)),
                          classes=state["classes"], shape=state["shape"],
                          backbone=state["frozen backbone"])


# The training options that --load uses, beside those of the file.
USED_BY_LOAD = {"dataset", "preset", "weights", "image_size", "seed", "batch_size", "amp"}
# Two names of other published scripts.
OTHER_NAMES = {"centers": "centers_guide", "outliers_posterior_simga": "outliers_posterior_sigma"}


def read_published_file(state, args):
    """A file 2DGBNNs.pth of the published last stage."""
    layout, width = find_layout(state["state_dict_no_weight"], args.load)
    parts = dict(state["params_dict_indices"])
    for name, value in state["params_guide"].items():
        parts[OTHER_NAMES.get(name, name)] = value
    unknown = set(common.options(args, "training")) - USED_BY_LOAD
    options = dict.fromkeys(unknown) | dict(model=layout.model, width=width, freeze=False,
                                            draw="equal")
    if layout.model == "wide_resnet":
        options["mc"] = 30
    weights = published_weights(parts, layout.model)
    check_shared_weights(weights)
    counts = {"outliers": len(parts["outliers_indices"]),
              "ellipse_points": len(parts["ellipse_outdices"])}
    return CompressedFile(options, weights, with_our_names(state["state_dict_no_weight"]),
                          layout.last_statistics, layout, counts)


def published_weights(parts, model):
    """The SharedWeights of a published file.

    The published scripts set ellipse points to constants. That of the WRN draws them so: here they
    are outliers with sigma 0. That of ResNet-18 overwrites them by the draw of the own component:
    here their alpha is 1.
    """
    points = torch.tensor(parts["ellipse_outdices"], dtype=torch.long)
    outlier = parts["outliers_indices"]
    mu = parts["outliers_posterior_loc"]
    sigma = parts["outliers_posterior_sigma"]
    if model == "wide_resnet":
        kept = ~torch.isin(outlier, points)
        outlier = torch.cat([outlier[kept], points])
        mu = torch.cat([mu[kept], ellipse_constants(parts)])
        sigma = torch.cat([sigma[kept], torch.zeros(len(points))])
    points = points[~torch.isin(points, outlier)]
    label = parts["filtered_labels"].int().index_fill(0, outlier, -1)
    return SharedWeights(label, outlier, mu, sigma, points, torch.zeros_like(points),
                         torch.ones(len(points)), parts["centers_guide"],
                         parts["scale_tril_posterior"])


def ellipse_constants(parts):
    """The constants [E] of ellipse points, from the two components and values that each has.

    These are alpha_1 c_1 + alpha_2 c_2 with alpha = softmax of the two values, but without the
    second term unless both values are above e^12.
    """
    pairs = []
    for name in ("ellipse_outdices_dict", "ellipse_outdices_value_dict"):
        try:
            numbers = [parts[name][point] for point in parts["ellipse_outdices"]]
            pairs.append(torch.tensor(numbers, dtype=torch.float64).view(len(numbers), 2))
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{name} does not have two numbers for each of "
                             "ellipse_outdices") from None
    component, value = pairs                                           # [E, 2]
    terms = value.softmax(1) * parts["centers_guide"][component.long(), 0]
    terms[:, 1] *= (value > math.exp(12)).all(1)
    return terms.sum(1).float()


def check_shared_weights(weights):
    """Refuse SharedWeights of a file whose shapes or values cannot be right."""
    n = len(weights.label)
    outliers = len(weights.outlier)
    points = len(weights.ellipse_point)
    k = len(weights.centre)
    shapes = SharedWeights((n,), (outliers,), (outliers,), (outliers,), (points,), (points,),
                           (points,), (k, 2), (k, 2, 2))
    for name, tensor, shape in zip(weights._fields, weights, shapes):
        if tensor.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected {shape}")
        if not common.all_finite(tensor):
            raise ValueError(f"a value of {name} is not finite")
    if (weights.outlier_sigma < 0).any():
        raise ValueError("the sigma of an outlier is negative")
    for name, first, last in (("label", -1, k - 1), ("second", 0, k - 1), ("outlier", 0, n - 1),
                              ("ellipse_point", 0, n - 1)):
        index = getattr(weights, name)
        if ((index < first) | (index > last)).any():
            raise ValueError(f"{name} has a number that is not in {first}..{last}")
    if not torch.equal((weights.label < 0).nonzero()[:, 0], weights.outlier.sort().values):
        raise ValueError("other outliers than weights without a component")
    if (weights.label[weights.ellipse_point] < 0).any():
        raise ValueError("an ellipse point has no component")


def with_statistics(splits, statistics):
    """The Splits with inputs that are normalised by the (mean, std) of a file."""
    mean, std = statistics

    def changed(dataset):
        return None if dataset is None else replace(dataset, mean=mean, std=std)

    ood = {name: changed(dataset) for name, dataset in splits.ood.items()}
    return splits._replace(train=changed(splits.train), test=changed(splits.test), ood=ood,
                           predict=changed(splits.predict))


def load_network(file, splits, args):
    """The RandomNetwork of a CompressedFile, for these sets; a UserError if they do not fit."""
    shape = splits.train.shape
    num_classes = splits.train.num_classes
    made_for = (file.classes, file.shape)
    if file.layout is None and made_for != (list(splits.train.classes), list(shape)):
        raise UserError(f"--load {args.load} was made for other classes or another image size, "
                        f"those of --dataset {file.options['dataset']}")
    if file.backbone != splits.fingerprints.get("frozen backbone"):
        raise UserError(f"--load {args.load} was trained on the features of another backbone: "
                        "give the --weights (and, if they are random, the --seed) of its training")
    if file.layout is not None or is_published(args):
        net = published_network(file.rest, args.load, args, num_classes, shape)
        outputs = net.head.out_features
        if outputs > num_classes:
            common.print_on_main(f"the network has {outputs} outputs, the data have {num_classes} "
                                 "classes")
    else:
        # No weights are read (eval, and more than 0 epochs), because the file has them.
        net = make_network(common.with_options(args, eval=True, epochs=1), num_classes, shape)
    count = sum(shape.numel() for shape in weight_shapes(net).values())
    if len(file.weights.label) != count:
        raise UserError(f"--load {args.load} has {len(file.weights.label)} weights, {args.model} "
                        f"for images of {shape[-1]} pixels per side {count}; give the --dataset or "
                        "the --image-size that it was made for")
    net = net.to(args.device, memory_format=torch.channels_last)
    shared = RandomNetwork(net, SharedGaussians(file.weights, args.draw == "equal"))
    with torch.no_grad():
        load_state(net, file.rest | shared.split(shared.posterior()), args.load)
    return shared


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
    # The following are added to the preset of the data set if the option is used. A pretrained
    # network gets a few careful epochs, or with --freeze a new last layer.
    "--model torchvision/NAME": dict(SMALL, width=1.0, epochs=5, stoch_epochs=2, final_epochs=2,
                                     batch_size=32, lr=0.01, k0=6000, augment=True, mc=10),
    "--freeze": dict(epochs=30, stoch_epochs=20, final_epochs=20, lr_rho=5e-2, lr_final=0.03,
                     weight_decay=0.05, tau_w=1.0, k0=64, mc=20, augment=False),
}


def w2_threshold(text):
    """The argparse type of --tau-d."""
    if text == "auto":
        return text
    return at_least(0, float)(text)


def network_name(text):
    """The argparse type of -net: the name here of a network of the published code."""
    return {"wrn": "wide_resnet"}.get(text, text)


def parse_args(argv=None):
    """The options; each is added to the group of its role (see ROLES in common.py)."""
    parser = common.Parser("gbnn2d", __doc__, PRESETS, NETWORKS, dataset="glyphs",
                           model="resnet18", epochs=200, batch_size=128, lr=0.1, ood=["svhn"])
    default = CompressionOptions()
    training = parser.training.add_argument
    training("-net", dest="model", type=network_name, metavar="NAME",
        help="--model, as in the published code: wrn is wide_resnet")
    training("-dataset", dest="dataset", metavar="NAME",
        help="--dataset, as in the published code")
    training("--stoch-epochs", type=at_least(0), default=20,
        help="number of epochs of the mean-field (stochastic) stage (published: up to 200)")
    training("--final-epochs", type=at_least(0), default=20,
        help="number of epochs of the last stage (published: up to 200)")
    training("--lr-mu", type=at_least(0, float), default=1e-5,
        help="learning rate of mu in the mean-field stage, and of norms and biases in both stages "
        "(published: 1e-5)")
    training("--lr-rho", type=at_least(0, float), default=1e-3,
        help="learning rate of rho, with sigma = softplus(rho) (published: 1e-3)")
    training("--lr-final", type=at_least(0, float), default=0.1,
        help="learning rate of Gaussians and outliers in the last stage; 0.1 moves one by about "
        "a tenth of its standard deviation per step")
    training("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of the deterministic network (published: 5e-4)")
    training("--warm-up", type=between(0, 0.9), default=0.0,
        help="share of the steps of each stage in which the learning rate rises; then it falls as "
        "a cosine (published: 0)")
    training("--stoch-kl", type=at_least(0, float), default=0.1,
        help="weight of the KL term of the mean-field stage; with 1 the posterior collapses onto "
        "the prior (published: 0)")
    training("--beta", type=at_least(0, float), default=0.1,
        help="weight of the KL term of the last stage, which is KL / n (published: KL / 256)")
    training("--tau-w", type=at_least(1e-9, float), default=default.tau_w,
        help="weights with a larger |mu| are outliers (paper: 0.2)")
    training("--grad-frac", type=between(0, 0.9), default=default.grad_frac,
        help="share of the weights that are outliers by their gradients (paper: 0.01; the counts "
        "that it publishes fit 0.001)")
    training("--k0", type=between(0, 10_000, int), default=default.k0,
        help="number of Gaussians before merging; 0: one per 500 weights, at most 2048 "
        "(published: 6000 for WRN-28-10, 256 for ResNet-18)")
    training("--tau-d", type=w2_threshold, default=default.tau_d, metavar="DISTANCE",
        help="Wasserstein-2 distance, not squared, below which Gaussians merge; 'auto' is a "
        "quarter of the median sigma of all weights but outliers (published: 3.873e-4)")
    training("--draw", choices=["hier", "equal"], default="hier",
        help="(m, s) is drawn once for each Gaussian; hier (hierarchical): each weight gets its "
        "own noise, w = m + s eps; equal: all its weights are equal, w = m (published)")

    evaluation = parser.evaluation.add_argument
    evaluation("--mc", type=at_least(1), default=30,
        help="number of draws of the weights in a prediction (published: 30 to 60)")
    evaluation("--load", metavar="FILE",
        help="evaluate a compressed network, on its data set unless --dataset is given: a file "
        "seedN-compressed.pt of a run directory, or 2DGBNNs.pth of the published code")
    args = parser.parse(argv, run_name, options_of_file)
    check_options(args)
    return args


def options_of_file(args):
    """{option: value} that a file of --load, or of --weights by the published code, decides."""
    if args.load:
        file = read_file(args)
        if file.layout is not None and "dataset" not in args.explicit:
            raise UserError(f"--load {args.load}: this published file does not name its data set; "
                            "add --dataset")
        return file.options
    if not is_published(args):
        return {}
    # Training starts after the stage that the file holds.
    stage = read_stage(args.weights)
    model = stage.layout.model
    if "model" in args.explicit and args.model != model:
        raise UserError(f"--weights {args.weights} are those of --model {model}")
    options = dict(model=model, width=stage.width, epochs=0)
    if stage.rho:
        if "epochs" in args.explicit:
            raise UserError("--epochs has no effect with the weights of a mean-field network; "
                            "remove this option")
        options["stoch_epochs"] = 0
    return options


def run_name(args):
    """The name of the run directory; that of --load has a part of the file's SHA-256."""
    if args.load:
        digest = hashlib.sha256(Path(args.load).read_bytes()).hexdigest()[:8]
        return common.join_name("loaded", Path(args.load).stem, digest,
                                common.set_name(args.dataset), f"seed{args.seed}")
    return common.run_name(args)


def check_options(args):
    """Refuse options that would have no effect."""
    is_stage = is_published(args) and not args.load
    if is_stage:
        # The shared rule, that only networks of torchvision have --weights, does not hold here.
        args = common.with_options(args, explicit=args.explicit - {"weights"})
    of_training = set(common.options(args, "training"))
    common.refuse(args, [
        (True, ["compile"], "on networks whose weights are drawn"),
        (args.load, of_training - USED_BY_LOAD | {"runs", "eval"}, "with --load"),
        (is_stage, ["width"], "on a network that has been trained"),
        (args.epochs == 0, ["lr", "weight_decay"], "with --epochs 0"),
        (args.stoch_epochs == 0, ["stoch_kl", "lr_rho"], "with --stoch-epochs 0"),
        (args.final_epochs == 0, ["beta", "lr_final"], "with --final-epochs 0"),
    ])


# ---- Main ---------------------------------------------------------------------------------------

# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "auroc_total", "auroc_epistemic", "gaussians", "outliers",
           "ellipse_points", "bytes", "file_bytes", "bytes_vs_mean_field",
           "bytes_vs_deterministic"]
# For a published file, those that its script prints come first.
PUBLISHED_COLUMNS = ["outliers", "ellipse_points", "gaussians", "accuracy_mode", "accuracy_logits",
                     "nll_logits", "ece15_logits", "ece10_logits"] + COLUMNS[:5]


def load_splits(args):
    """All sets of a run; all training images are for training."""
    splits = data.load_splits(args, args.seed, val_fraction=0)
    if is_published(args):
        splits = with_statistics(splits, read_stage(args.weights).layout.statistics)
    return splits


def check_network(train_set, args):
    """Refuse, before training, a network that fails on a batch, or too large a --k0."""
    net = make_network(args, train_set.num_classes, train_set.shape)
    published_sigma(net, args)
    common.try_batch(net.train(args.epochs > 0), train_set, args)
    count = sum(shape.numel() for shape in weight_shapes(net).values())
    initial_gaussians(count, args)


def run_seed(seed, splits, args, run):
    """All steps for one seed; returns the rows."""
    train_set = splits.train
    # Step 1: a deterministic network, then a mean-field posterior. Norms and biases train on.
    common.seed_all(seed)
    net = make_network(args, train_set.num_classes, train_set.shape)
    train(net, "deterministic", seed, args.epochs, train_set, args, run)
    field = RandomNetwork(net, MeanField(net))
    n = len(field.posterior.mu)
    rest = rest_bytes(field) + splits.backbone_bytes
    rows = evaluate("deterministic", net, splits, {"bytes": 4 * n + rest}, seed, args)
    predictions = {}
    if args.predict and seed == args.seed:
        predictions["deterministic"] = predict(net, splits.predict, seed, args)
    sigma = published_sigma(net, args)
    if sigma is not None:
        field.posterior.rho.data.copy_(inverse_softplus(sigma))
    inputs = {"deterministic network": common.fingerprint(field)}
    train(field, "mean-field", seed, args.stoch_epochs, train_set, args, run,
          kl_weight=args.stoch_kl, inputs=inputs)
    rows += evaluate("mean-field", field, splits, {"bytes": 8 * n + rest}, seed, args)

    # Steps 2 and 3: a mixture over all weights, whose close components merge.
    planes = compress_once(field, seed, train_set, args, run)
    for name, weights in planes.items():
        shared = RandomNetwork(net, SharedGaussians(weights, args.draw == "equal"))
        size = storage(weights, rest)
        rows += evaluate(name, shared, splits, size, seed, args)

    # Step 4: the shared Gaussians are trained.
    inputs = {"shared Gaussians": common.fingerprint(shared)}
    train(shared, "final", seed, args.final_epochs, train_set, args, run, kl_weight=args.beta,
          inputs=inputs)
    name = f"seed{seed}-compressed.pt"
    size["file_bytes"] = common.on_main(write_compressed, name, shared, splits, args, run)
    rows += evaluate("final", shared, splits, size, seed, args)
    if predictions:
        predictions = {"final": predict(shared, splits.predict, seed, args)} | predictions
        common.on_main(write_predictions, predictions, splits, args, run)
    if seed == args.seed and args.plot:
        common.on_main(plot_sharing, field.posterior, planes, rows, run)
    return rows


def run_loaded(args):
    """--load: evaluate a compressed network of this script, or one of the published code."""
    file = read_file(args)
    splits = data.load_splits(args, args.seed, val_fraction=0, reads_train=False)
    splits = with_statistics(splits, file.statistics)
    shared = load_network(file, splits, args)
    size = storage(shared.posterior.weights(), rest_bytes(shared) + splits.backbone_bytes)
    size["file_bytes"] = common.on_main(Path(args.load).stat).st_size
    size |= file.counts
    method = "loaded"
    columns = COLUMNS
    if file.layout is not None:
        method = "published"
        columns = PUBLISHED_COLUMNS
    elif args.dataset != file.options["dataset"]:
        common.print_on_main(f"this network was trained on {file.options['dataset']}")
    run = common.Run(args, splits.fingerprints, splits.summary())
    rows = evaluate(method, shared, splits, size, args.seed, args)
    if args.predict:
        predictions = {"final": predict(shared, splits.predict, args.seed, args)}
        common.on_main(write_predictions, predictions, splits, args, run)
    return run.report(rows, columns)


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    if args.load:
        return run_loaded(args)

    # The run directory is made after all checks: a command that is refused leaves nothing.
    splits = load_splits(args)
    check_network(splits.train, args)
    run = common.Run(args, splits.fingerprints, splits.summary())
    rows = []
    for seed in range(args.seed, args.seed + args.runs):
        rows += run_seed(seed, splits, args, run)
    return run.report(rows, COLUMNS)


if __name__ == "__main__":
    common.launch(main)
