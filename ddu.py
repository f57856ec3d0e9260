"""Deep Deterministic Uncertainty: one softmax network, one Gaussian per class on its features.

Mukhoti, Kirsch, van Amersfoort, Torr, Gal, "Deep Deterministic Uncertainty: A New Simple
Baseline", CVPR 2023, arXiv:2102.11582. Algorithm 1 of the paper:

  1. Train a classifier by cross entropy, as usual. Residual connections make its feature
     extractor z = f(x) sensitive to changes of the input; soft spectral normalisation
     (coefficient 3) keeps it smooth.
  2. Fit one Gaussian per class, q(z|c) = N(z; mu_c, Sigma_c), to the training features, in
     eval mode and without augmentation. No out-of-distribution (OOD) data are needed.
  3. The log density log q(z) = log sum_c q(z|c) q(c) measures epistemic uncertainty: it is
     low for OOD inputs. Where it is high, the entropy of the softmax measures aleatoric
     uncertainty: it is high for ambiguous inputs.

Usage:
  python ddu.py                                         # dirty_glyphs, offline, two CPU cores
  torchrun --nproc_per_node 8 ddu.py --dataset cifar10  # the paper's WRN-28-10, 350 epochs
  python ddu.py --dataset folder:images --model torchvision/resnet18   # your images and network
  python ddu.py --features train.npz --score test.npz ood.npz          # your own features

Expected (more in tests/RESULTS.md): `python ddu.py --runs 3`: AUROC of letters against digits and
  blends of digits 0.963 +- 0.003 by the density, 0.719 +- 0.013 by the softmax entropy; of blends
  against digits 0.912 +- 0.003 and 0.994 +- 0.000 (mean +- standard error, n = 3).

Where the method is: step 1: `spectral_normalise` and `train`; step 2: `fit_gaussians`; step 3:
`log_density`, `softmax_entropy`, `decide`; acquisition functions: `acquisition_score`.

Differences from the published code (github.com/omegafragger/DDU, commit f597744):
  - Defaults. Published: no -sn, no -mod, milestones 150 and 250. Here: both are on, and milestones
    scale with --epochs. Active learning uses -sn -mod for the density alone, as published.
  - Densities. Published: without q(c), in float32, where the posteriors q(c|z) tie. Here: with
    q(c) = n_c / N, as in the paper, in float64.
  - Jitter. Published: found by the text of an error message that PyTorch no longer prints (issues
    #4 and #8). Here: relative to the variance of the features.
  - Temperature. Published: the best of 100 values. Here: the exact optimum, limited by the number
    of validation images. Entropies are compared with the threshold after scaling.
  - Ambiguous-MNIST contains each image ten times. Published: its copies are in training and
    validation. Here: never in both. dirty_mnist trains 100 epochs on version 1.0.0 (published: 350
    on 0.6.0).
  - Statistics of CIFAR-100 and SVHN. Published: those of CIFAR-10. Here: their own.
  - Active learning. Published: densities, which underflow to ties, of 90 % of the pool. Here: log
    densities of the whole pool. Published: an example is ambiguous if a network's entropy exceeds
    1 nat. Here: if it has several labels.
  - Names. Published: m1 and m2. Here: density and gmm_entropy (Gaussians), energy and total
    (softmax), epistemic and total (ensemble). New: decisions, --shrinkage, acquisition `random`.
"""

import argparse
import math
import time
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.utils import parametrize

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs warnings and those of typing and torch.


class SoftSpectral(nn.Module):
    """Scale a weight down, never up, so that its spectral norm is at most `coeff`.

        W_eff = W / (max(1, sigma / coeff) + eps),   sigma = <u, A v>

    A is the linear operator of the layer: the convolution with its stride, zero padding, dilation
    and groups, of images of `input_shape` (C, H, W); eps is 1e-5, and 0 for 1x1 kernels. In
    training mode, every forward first updates the singular vectors u and v by one power iteration.
    The gradient flows through sigma, with u and v constant. They are buffers, so checkpoints
    contain them.
    """

    def __init__(self, layer: nn.Module, input_shape: tuple, coeff: float):
        super().__init__()
        self.coeff = coeff
        self.geometry = dict(groups=getattr(layer, "groups", 1))
        channels, *size = input_shape
        if isinstance(layer, nn.Linear) or layer.kernel_size == (1, 1):
            # The same matrix acts on every pixel, so one pixel gives the norm.
            size = [1, 1]
            self.eps = 0.0
        else:
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                raise ValueError("spectral normalisation needs zero padding by a number of pixels")
            self.geometry |= dict(stride=layer.stride, padding=layer.padding,
                                  dilation=layer.dilation)
            self.eps = 1e-5  # published code: added after the maximum
        v = torch.randn(1, channels, *size).to(layer.weight)           # [1, C_in, H, W]
        u = torch.randn_like(self.operator(v, layer.weight))           # [1, C_out, H', W']
        self.register_buffer("v", unit(v))
        self.register_buffer("u", unit(u))

    def operator(self, v: Tensor, weight: Tensor) -> Tensor:
        """Apply A to an image v."""
        return F.conv2d(v, as_kernel(weight), **self.geometry)

    @torch.no_grad()
    def power_iteration(self, weight: Tensor):
        """Set v = A^T u / |A^T u|, then u = A v / |A v|."""
        v = nn.grad.conv2d_input(self.v.shape, as_kernel(weight), self.u, **self.geometry)
        self.v.copy_(unit(v))
        u = self.operator(self.v, weight)
        self.u.copy_(unit(u))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            if self.training:
                self.power_iteration(weight)
            # Copies, because another forward may change u and v before the backward.
            u = self.u.clone()
            v = self.v.clone()
            sigma = (u * self.operator(v, weight)).sum()
            scale = torch.clamp(sigma / self.coeff, min=1.0) + self.eps
            return weight / scale


def unit(x: Tensor) -> Tensor:
    """x / |x|"""
    return x / x.norm().clamp_min(1e-12)


def as_kernel(weight: Tensor) -> Tensor:
    """A linear layer's weight [C_out, C_in] as that of a 1x1 convolution."""
    if weight.ndim == 2:
        return weight[:, :, None, None]
    return weight


def spectral_normalise(net: nn.Module, shape: tuple, coeff: float = 3.0):
    """Give every convolution and linear layer of `net` a SoftSpectral weight.

    `shape` (C, H, W) of the images determines the input shapes of all layers. Batch norm is not
    normalised, as in the paper. Raises ValueError for padding other than zeros, or given by a word.
    """
    was_training = net.training
    input_shapes = {}

    def record_shape(module: nn.Module, inputs: tuple, output: Tensor):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            input_shapes[module] = inputs[0].shape[1:]

    net.eval()  # so that the zeros do not enter the running averages of batch norm
    any_weight = next(net.parameters())
    with nn.modules.module.register_module_forward_hook(record_shape):
        net(torch.zeros(1, *shape).to(any_weight))
    net.train(was_training)

    for layer, input_shape in input_shapes.items():
        parametrisation = SoftSpectral(layer, input_shape, coeff)
        # unsafe=True skips PyTorch's test call, which would do a power iteration.
        parametrize.register_parametrization(layer, "weight", parametrisation, unsafe=True)


class Gaussians(NamedTuple):
    """q(z) = sum_c q(c) N(z; mu_c, Sigma_c + jitter I) of K classes, in float64."""

    normal: MultivariateNormal  # a batch of K, each of dimension D
    log_prior: Tensor           # [K]  log q(c), q(c) = n_c / N
    jitter: float


def fit_gaussians(features: Tensor, labels: Tensor, num_classes: int,
                  shrinkage: bool | None = None) -> Gaussians:
    """Algorithm 1: fit a Gaussian with a full covariance (divisor n_c - 1) to each class.

    features [N, D] of any float type; labels [N] in 0..num_classes-1. shrinkage: True for the
    covariances of `ledoit_wolf`, False for the paper's; None shrinks them, with a warning, if a
    class has fewer than 2 D examples or a singular covariance: otherwise all inputs but the
    training examples have densities that are far too low. Memory: 16 K D^2 bytes while fitting,
    8 K D^2 afterwards. Raises ValueError if a class has fewer than two examples, a feature is not
    finite, or a covariance remains singular with the largest jitter.
    """
    counts = count_examples(features, labels, num_classes)             # [K]  n_c
    dim = features.shape[1]
    automatic = shrinkage is None
    if automatic and counts.min() < 2 * dim:
        warnings.warn(f"the smallest class has {counts.min()} examples of {dim} features: the "
                      "covariances are shrunk (Ledoit and Wolf)", stacklevel=2)
        shrinkage = True
    mean = torch.empty(num_classes, dim, dtype=torch.float64, device=features.device)
    covariance = mean.new_empty(num_classes, dim, dim)
    for c in range(num_classes):
        z = features[labels == c].double()                             # [n_c, D]
        mean[c] = z.mean(0)                                            # mu_c
        centred = z - mean[c]
        covariance[c] = centred.T @ centred / (len(z) - 1)             # Sigma_c
        if shrinkage:
            covariance[c] = ledoit_wolf(covariance[c], centred)
    factor, jitter = cholesky_with_jitter(covariance)
    if jitter > 0 and automatic and not shrinkage:
        warnings.warn("the covariance of a class is singular: the covariances are shrunk (Ledoit "
                      "and Wolf)", stacklevel=2)
        return fit_gaussians(features, labels, num_classes, shrinkage=True)
    if jitter > 0:
        warnings.warn(f"the covariance of a class is singular: {jitter:.2g} is added to all "
                      "variances; shrinkage or more examples give better densities", stacklevel=2)
    normal = MultivariateNormal(mean, scale_tril=factor, validate_args=False)
    prior = counts.double() / len(labels)                              # [K]  q(c)
    return Gaussians(normal, prior.log(), jitter)


def count_examples(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The number n_c of examples of each class [K]; raises ValueError if no Gaussian fits them."""
    if labels.shape != features.shape[:1]:
        raise ValueError(f"{len(features)} rows of features, but labels {list(labels.shape)}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels must be in 0..{num_classes - 1}")
    if not features.isfinite().all():
        raise ValueError("features contain NaN or infinity: has the network diverged?")
    counts = labels.bincount(minlength=num_classes)                    # [K]  n_c
    if counts.min() < 2:
        raise ValueError(f"class {counts.argmin()} has {counts.min()} example(s), but a covariance "
                         "needs two")
    return counts


def ledoit_wolf(covariance: Tensor, centred: Tensor) -> Tensor:
    """Ledoit and Wolf (2004): (1 - rho) Sigma + rho m I, with m the mean variance.

    rho in 0..1 is the estimated squared error of Sigma over its squared distance from m I.
    covariance [D, D] of centred examples [n, D].
    """
    n, dim = centred.shape
    identity = torch.eye(dim).to(covariance)
    target = covariance.diagonal().mean() * identity
    sample = covariance * (n - 1) / n  # divisor n, as in Ledoit and Wolf
    squared_norms = centred.square().sum(1)                            # [n]
    error = (squared_norms.square().mean() - sample.square().sum()) / n
    distance = (sample - sample.diagonal().mean() * identity).square().sum()
    rho = (error / distance.clamp_min(1e-300)).clamp(0, 1)
    return (1 - rho) * covariance + rho * target


def cholesky_with_jitter(covariance: Tensor) -> tuple[Tensor, float]:
    """Find the smallest jitter with which every covariance has a Cholesky factor.

    Returns the factors of Sigma_c + jitter I [K, D, D] and the jitter. Overwrites the diagonals of
    covariance [K, D, D].
    """
    diagonal = covariance.diagonal(dim1=1, dim2=2)                     # [K, D], a view
    variance = diagonal.clone()
    # The rounding error of a pivot is at most about D eps times the diagonal element
    # (Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.3).
    rounding = variance.shape[1] * torch.finfo(variance.dtype).eps
    factors = torch.empty_like(covariance)
    # published code: the smallest jitter that works; relative to the mean variance.
    for relative in (0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2):
        jitter = relative * variance.mean()
        diagonal.copy_(variance + jitter)
        all_regular = True
        # One class after another, because a batch would need another 8 K D^2 bytes.
        for c, matrix in enumerate(covariance):
            factors[c], failed = torch.linalg.cholesky_ex(matrix)
            # A pivot, the square of a diagonal element of the factor, is the variance of a
            # feature given the ones before it. In a singular matrix it can be a rounding
            # error instead of 0.
            pivots = factors[c].diagonal().square()
            is_regular = (failed == 0) & (pivots > rounding * matrix.diagonal()).all()
            all_regular = is_regular & all_regular
        if all_regular:
            return factors, jitter.item()
    raise ValueError("the covariance of a class is singular: its features are constant, exact "
                     "functions of each other, or too large")


def class_log_densities(gaussians: Gaussians, features: Tensor) -> Tensor:
    """Compute log q(z|c) + log q(c) of features [N, D]: [N, K], float64, on the CPU."""
    blocks = []
    # In blocks of rows, because `log_prob` needs 8 N K D bytes.
    for z in features.split(256):
        z = z.to(gaussians.log_prior)  # float64, on the device of the Gaussians
        log_densities = gaussians.normal.log_prob(z[:, None])          # [256, K]
        blocks.append((log_densities + gaussians.log_prior).cpu())
    return torch.cat(blocks)


def log_density(gaussians: Gaussians, features: Tensor) -> Tensor:
    """Compute log q(z) = logsumexp_c [log q(z|c) + log q(c)] of features [N, D]: [N], float64."""
    return class_log_densities(gaussians, features).logsumexp(1)


def density_scores(log_densities: Tensor) -> dict[str, Tensor]:
    """Scores [N] from the features alone, given `class_log_densities` [N, K].

    density      log q(z) = logsumexp_c [log q(z|c) + log q(c)]
    gmm_entropy  entropy of q(c|z) in nats; not the entropy of the softmax
    """
    return {"density": log_densities.logsumexp(1), "gmm_entropy": softmax_entropy(log_densities)}


def softmax_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits [N, K]), in nats [N]."""
    return torch.special.entr(logits.softmax(1)).sum(1)


def softmax_scores(logits: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Scores [N] of softmax(logits z [N, K] / temperature), float64.

    total     its entropy in nats, the total uncertainty of the prediction
    max_prob  its largest probability
    energy    logsumexp_c z_c
    """
    logits = logits.double() / temperature
    return {"total": softmax_entropy(logits), "max_prob": logits.softmax(1).amax(1),
            "energy": logits.logsumexp(1)}


REGIONS = ("in_distribution", "ambiguous", "ood")


def decide(density: Tensor, entropy: Tensor, density_threshold: float,
           entropy_threshold: float) -> Tensor:
    """The index in REGIONS of every input [N], from its log density and its softmax entropy."""
    region = (entropy > entropy_threshold).long()
    # The pseudo-code of the paper has the opposite sign, but a LOW density means OOD.
    region[density < density_threshold] = 2
    return region


# ---- Model --------------------------------------------------------------------------------------


class Network(nn.Module):
    """A feature extractor, the backbone, and a linear head.

    forward returns the logits [B, K] and the features z [B, D] of images [B, C, H, W].
    """

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x):
        z = self.backbone(x)
        return self.head(z), z


class Residual(nn.Module):
    """A residual block: after(body(x) + shortcut(x))."""

    def __init__(self, body, shortcut, after=nn.Identity()):
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.after = after

    def forward(self, x):
        return self.after(self.body(x) + self.shortcut(x))


class PoolShortcut(nn.Module):
    """The shortcut of -mod: average pooling, then channels of zeros."""

    def __init__(self, stride, extra_channels):
        super().__init__()
        self.stride = stride
        self.extra_channels = extra_channels

    def forward(self, x):
        if self.stride > 1:
            # As in the published code, images of odd size are subsampled, not averaged.
            kernel = 1 if x.shape[-1] % 2 else self.stride
            x = F.avg_pool2d(x, kernel, self.stride)
        return F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))


def activation(args):
    return nn.LeakyReLU(0.01) if args.mod else nn.ReLU()


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)


def conv_bn_act(c_in, c_out, args, kernel=3, stride=1):
    return [conv(c_in, c_out, kernel, stride), nn.BatchNorm2d(c_out), activation(args)]


def make_shortcut(c_in, c_out, stride, args, batch_norm=False):
    """Identity if the shape stays the same, else pooling (-mod) or a 1x1 convolution."""
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    if args.mod:
        return PoolShortcut(stride, c_out - c_in)
    # Subsample first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
    layers = nn.Sequential(nn.AvgPool2d(1, stride), conv(c_in, c_out, kernel=1))
    if batch_norm:
        layers.append(nn.BatchNorm2d(c_out))
    return layers


# Each of the following functions builds the feature extractor of one network, for
# images of `shape` (C, H, W): it returns a list of layers and the number of features.


def lenet(args, shape):
    """LeNet-5, for grey images of 28x28 pixels."""
    layers = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
              nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
              nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return layers, 84


def vgg16(args, shape):
    """VGG-16 with batch norm; on small images, the first of its five max pools is skipped."""
    layers = []
    c_in = shape[0]
    for stage, (width, depth) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        c_out = max(1, round(width * args.width))
        for _ in range(depth):
            layers += conv_bn_act(c_in, c_out, args)
            c_in = c_out
        if stage > 0 or shape[-1] >= 32:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


def resnet(args, shape, block, expansion, depths):
    """A ResNet with the stem for CIFAR: a 3x3 convolution of stride 1, no max pool."""
    width = max(1, round(64 * args.width))  # channels of the stem, doubled in every stage
    layers = conv_bn_act(shape[0], width, args)
    c_in = width
    for stage, depth in enumerate(depths):
        c_out = expansion * width * 2**stage
        for index in range(depth):
            # Every stage but the first one starts by halving the resolution.
            stride = 2 if stage > 0 and index == 0 else 1
            body = nn.Sequential(*block(c_in, c_out, stride, args))
            shortcut = make_shortcut(c_in, c_out, stride, args, batch_norm=True)
            layers.append(Residual(body, shortcut, activation(args)))
            c_in = c_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


def basic_block(c_in, c_out, stride, args):
    first = conv_bn_act(c_in, c_out, args, stride=stride)
    return first + [conv(c_out, c_out), nn.BatchNorm2d(c_out)]


def bottleneck_block(c_in, c_out, stride, args):
    c = c_out // 4
    layers = conv_bn_act(c_in, c, args, kernel=1)
    layers += conv_bn_act(c, c, args, stride=stride)
    return layers + [conv(c, c_out, kernel=1), nn.BatchNorm2d(c_out)]


def wide_resnet(args, shape, depth=28):
    """WRN-28-10, with batch norm and activation before each convolution."""
    layers = [conv(shape[0], 16)]
    c_in = 16
    for stage in range(3):
        c_out = max(1, round(160 * args.width)) * 2**stage
        for index in range((depth - 4) // 6):
            stride = 2 if stage > 0 and index == 0 else 1
            body = nn.Sequential(
                nn.BatchNorm2d(c_in), activation(args), conv(c_in, c_out, stride=stride),
                nn.BatchNorm2d(c_out), activation(args), nn.Dropout(0.3), conv(c_out, c_out))
            # The shortcut starts at the raw input, before batch norm and activation.
            layers.append(Residual(body, make_shortcut(c_in, c_out, stride, args)))
            c_in = c_out
    layers += [nn.BatchNorm2d(c_in), activation(args), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


# To add a network, add its function here.
NETWORKS = {
    "lenet": lenet,
    "resnet18": partial(resnet, block=basic_block, expansion=1, depths=(2, 2, 2, 2)),
    "resnet50": partial(resnet, block=bottleneck_block, expansion=4, depths=(3, 4, 6, 3)),
    "wide_resnet": wide_resnet,
    "vgg16": vgg16,
}


def make_network(args, num_classes, shape):
    """The network --model for images of `shape` (C, H, W), on its device."""
    net = Network(*common.backbone_and_head(args, NETWORKS, num_classes, shape))
    if args.model == "wide_resnet":
        # As in the published code: this initialisation, and slow running averages of batch norm.
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.01
        nn.init.zeros_(net.head.bias)
    if args.sn:
        try:
            spectral_normalise(net.backbone, shape, args.coeff)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"--model {args.model}: {error}") from None
    return net.to(args.device, memory_format=torch.channels_last)


# ---- Training -----------------------------------------------------------------------------------


def learning_rate(step, steps_per_epoch, args):
    """The learning rate at a step, counted from the start of training."""
    if args.schedule == "one_cycle":
        # The rate rises linearly in the first fifth of the steps, then falls linearly to zero.
        total = args.epochs * steps_per_epoch
        warm_up = 0.2 * total
        if step < warm_up:
            return args.lr * ((step + 1) / (warm_up + 1))
        return args.lr * ((total - step) / (total - warm_up))
    lr = args.lr
    if args.schedule == "step":
        # The paper divides the rate by 10 after epochs 150 and 250 of 350.
        milestones = args.milestones or [3 / 7 * args.epochs, 5 / 7 * args.epochs]
        for milestone in milestones:
            if step // steps_per_epoch >= max(1, round(milestone)):
                lr *= 0.1
    return lr


def make_optimiser(net, args):
    """SGD with momentum 0.9, or Adam."""
    settings = dict(lr=args.lr, weight_decay=args.weight_decay)
    if args.opt == "adam":
        return torch.optim.Adam(net.parameters(), **settings)
    return torch.optim.SGD(net.parameters(), momentum=0.9, **settings)


@torch.no_grad()
def validate(net, val_set, args):
    """Accuracy and NLL of a network for the held-out images, in eval mode."""
    net.eval()
    totals = torch.zeros(2, device=args.device)  # NLL, correct predictions
    for batch in data.evaluation_loader(val_set, args).epoch():
        with common.autocast(args):
            logits, _ = net(batch.images)
        totals[0] += F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        totals[1] += (logits.argmax(1) == batch.labels).sum()
    nll, accuracy = (common.all_reduce(totals) / len(val_set)).tolist()
    return {"val_accuracy": accuracy, "val_nll": nll}


def train(net, train_set, val_set, args, seed, run=None, name=None):
    """Step 1: minimise the cross entropy; the log also reports on `val_set`, if it is not None."""
    optimiser = make_optimiser(net, args)
    augment = "crop_flip" if args.augment else "none"
    # The order and the augmentation of the images depend only on the seed and the epoch.
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         augment=augment, limit_steps=args.limit_steps, workers=args.workers,
                         channels_last=True)
    # With several processes this is DistributedDataParallel, with batch norm over all of them.
    model = common.data_parallel(net, args.device, args.compile)
    history = []  # one row for each completed epoch
    if run is not None:
        history = run.resume(name, args.epochs, net=net, optimiser=optimiser)
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        # Every epoch has a seed of its own, so that a resumed run draws the same dropout masks.
        common.seed_all(seed, epoch, common.rank())
        model.train()
        totals = torch.zeros(3, device=args.device)  # loss, correct predictions, examples
        for step, batch in enumerate(common.progress(loader, epoch)):
            # The rate is a function of the step, so that no state of a scheduler must be saved.
            lr = learning_rate(epoch * len(loader) + step, len(loader), args)
            for group in optimiser.param_groups:
                group["lr"] = lr
            with common.autocast(args):
                logits, _ = model(batch.images)
            loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")

            # DDP averages gradients over processes: this is the mean loss of the global batch.
            mean_loss = loss * common.world_size() / batch.global_size
            optimiser.zero_grad()
            mean_loss.backward()
            optimiser.step()

            totals[0] += loss.detach()
            totals[1] += (logits.argmax(1) == batch.labels).sum()
            totals[2] += len(logits)
        loss, correct, examples = common.all_reduce(totals).tolist()
        row = {"epoch": epoch + 1, "loss": loss / examples, "train_accuracy": correct / examples}
        if val_set is not None:
            row |= validate(net, val_set, args)
        history.append(row | {"lr": lr, "seconds": time.perf_counter() - start})
        if run is not None:
            run.save(name, history, net=net, optimiser=optimiser)


def train_member(splits, args, seed, member, run):
    """A trained member of an ensemble, of which the first one is the single network of DDU."""
    name = f"seed{seed}"
    if member > 0:
        name = f"seed{seed}-member{member}"
        seed = common.derive_seed(seed, member)
    common.seed_all(seed)
    net = make_network(args, splits.train.num_classes, splits.train.shape)
    train(net, splits.train, splits.val, args, seed, run, name)
    return net


# ---- Evaluation ---------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The parts of a data set that is the union of a clean and an ambiguous one."""

    clean: str
    ambiguous: str
    clean_rows: int  # the first rows of the test set are the clean ones


PARTS = {
    "dirty_mnist": Parts("mnist", "ambiguous_mnist", 10_000),
    "dirty_glyphs": Parts("glyphs", "glyphs_ambiguous", 2_000),
}
# What large values of a score mean: in-distribution ("id") or out-of-distribution ("ood").
LARGER_MEANS = {
    "density": "id", "gmm_entropy": "ood",                             # of the Gaussians
    "total": "ood", "max_prob": "id", "energy": "id",                  # of the softmax
    "total_scaled": "ood", "max_prob_scaled": "id", "energy_scaled": "id",
    "epistemic": "ood", "epistemic_scaled": "ood",                     # of an ensemble
}


class Outputs(NamedTuple):
    """What a network returns for the examples of a set, on the CPU."""

    logits: Tensor    # [N, K] float32
    features: Tensor  # [N, D] float32
    labels: Tensor    # [N]
    ms: float         # time of the pass over the set, in milliseconds per example

    def select(self, rows: slice):
        """The Outputs for some of the examples."""
        return Outputs(self.logits[rows], self.features[rows], self.labels[rows], self.ms)


class Thresholds(NamedTuple):
    """What `decide` compares with; the validation set determines both."""

    density: float  # an input is OOD if its log density is lower
    entropy: float  # another one is ambiguous if its entropy is higher, in nats


class Predictions(NamedTuple):
    """What a method predicts for the examples of a set, in float64."""

    labels: Tensor            # [N]
    log_probs: Tensor         # [N, K]
    scaled_log_probs: Tensor  # [N, K]  after temperature scaling
    scores: dict              # {score: [N]}; <score>_scaled is that after temperature scaling


@torch.no_grad()
def compute_outputs(net, dataset, args):
    """The Outputs for a whole set in eval mode; None on all processes but the main one."""
    net.eval()
    start = time.perf_counter()
    batches = []
    for batch in data.evaluation_loader(dataset, args).epoch():
        with common.autocast(args):
            logits, features = net(batch.images)
        batches.append({"index": batch.index, "logits": logits.float(),
                        "features": features.float()})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    ms = 1000 * (time.perf_counter() - start) / len(dataset)
    return Outputs(columns["logits"], columns["features"], dataset.labels, ms)


def outputs_of_splits(nets, splits, args):
    """{set: Outputs of each network}, of "train", "val", "test", the OOD sets and "predict"."""
    datasets = {"val": splits.val, "test": splits.test} | splits.ood
    if splits.predict is not None:
        datasets["predict"] = splits.predict
    # The Gaussians are fitted to the features of the first network alone.
    outputs = {"train": [compute_outputs(nets[0], splits.train, args)]}
    for name, dataset in datasets.items():
        outputs[name] = [compute_outputs(net, dataset, args) for net in nets]
    return outputs


def fit(features, labels, num_classes, args):
    """`fit_gaussians` on the device."""
    device = "cpu" if args.device.type == "mps" else args.device  # MPS has no float64
    try:
        return fit_gaussians(features.to(device), labels.to(device), num_classes, args.shrinkage)
    except ValueError as error:
        raise UserError(str(error)) from None


def choose_thresholds(val_density, val_entropy, args):
    """Quantiles of the log densities and entropies [N_val] of the validation set."""
    n = len(val_density)
    if n < 100:
        # By order statistics, the fraction of known inputs below the k-th lowest of n densities
        # has the distribution Beta(k, n + 1 - k).
        k = 1 + args.density_quantile * (n - 1)
        low, high = beta.interval(0.95, k, n + 1 - k)
        warnings.warn(f"the thresholds come from only {n} held-out examples: of known inputs like "
                      f"them, between {100 * low:.1f} and {100 * high:.1f} % will be called ood "
                      f"(--density-quantile {args.density_quantile:g})")
    entropy_threshold = args.entropy_threshold
    if entropy_threshold is None:
        entropy_threshold = val_entropy.quantile(args.entropy_quantile).item()
    return Thresholds(val_density.quantile(args.density_quantile).item(), entropy_threshold)


def predict_by_ddu(outputs, gaussians, temperature):
    """Predictions of one network: its softmax, and the densities of its features."""
    scores = density_scores(class_log_densities(gaussians, outputs.features))
    scores |= softmax_scores(outputs.logits)
    for score, values in softmax_scores(outputs.logits, temperature).items():
        scores[f"{score}_scaled"] = values
    logits = outputs.logits.double()
    return Predictions(outputs.labels, logits.log_softmax(1),
                       (logits / temperature).log_softmax(1), scores)


def predict_by_ensemble(outputs, temperatures):
    """Predictions of M networks, given their Outputs: the mean of their probabilities."""
    log_means = {}
    scores = {}
    for ending, divisors in (("", 1.0), ("_scaled", temperatures)):
        log_probs = stack_log_probs(outputs, divisors)                 # [M, N, K]
        log_means[ending] = log_probs.logsumexp(0) - math.log(len(outputs))
        uncertainty = common.ensemble_uncertainty(log_probs)
        for score in ("total", "epistemic"):
            scores[f"{score}{ending}"] = uncertainty[score]
    return Predictions(outputs[0].labels, log_means[""], log_means["_scaled"], scores)


def stack_log_probs(outputs, temperatures=1.0):
    """Log probabilities [M, N, K], float64, of M networks at their temperatures, for one set."""
    logits = torch.stack([of_network.logits for of_network in outputs]).double()
    # In place, because another copy for ImageNet takes gigabytes.
    logits /= torch.tensor(temperatures, dtype=torch.float64).view(-1, 1, 1)
    return logits.log_softmax(2)


def tested_sets(outputs, splits, args):
    """{set: Outputs of each network} of the test set, of its parts and of the OOD sets."""
    tested = {splits.test.name: outputs["test"]}
    if args.dataset in PARTS:
        parts = PARTS[args.dataset]
        clean = slice(parts.clean_rows)
        ambiguous = slice(parts.clean_rows, None)
        tested[parts.clean] = [of_network.select(clean) for of_network in outputs["test"]]
        tested[parts.ambiguous] = [of_network.select(ambiguous) for of_network in outputs["test"]]
    return tested | {name: outputs[name] for name in splits.ood}


def metrics_before_and_after_scaling(predictions):
    """Accuracy, likelihood and calibration; the names of those after scaling end in _scaled."""
    metrics = common.prediction_metrics(predictions.log_probs, predictions.labels)
    scaled = common.prediction_metrics(predictions.scaled_log_probs, predictions.labels)
    for metric, value in scaled.items():
        metrics[f"{metric}_scaled"] = value
    return metrics


def result_rows(method, seed, predictions, splits, args):
    """A row for each test set, then one for each pair of sets that the scores should separate.

    predictions: {set: Predictions} of the test set, of its parts and of the OOD sets
    """
    # The whole test set and its clean part are compared with the OOD sets, and
    # the clean part with the ambiguous one.
    labelled = [name for name in predictions if name not in splits.ood]
    pairs = [(splits.test.name, name) for name in splits.ood]
    if args.dataset in PARTS:
        parts = PARTS[args.dataset]
        pairs += [(parts.clean, name) for name in splits.ood]
        pairs.append((parts.clean, parts.ambiguous))

    rows = []
    for name in labelled:
        of_set = predictions[name]
        row = {"method": method, "seed": seed, "set": name, "n": len(of_set.labels)}
        rows.append(row | metrics_before_and_after_scaling(of_set))
    for inside, outside in pairs:
        row = {"method": method, "seed": seed, "set": inside, "against": outside,
               "n": len(predictions[inside].labels)}
        rows.append(row | common.detection_metrics(predictions[inside].scores,
                                                   predictions[outside].scores, LARGER_MEANS))
    return rows


def region_metrics(predictions, thresholds):
    """What `decide` says of a set: for each region its share, its size, and the accuracy in it."""
    region = decide(predictions.scores["density"], predictions.scores["total_scaled"], *thresholds)
    is_correct = predictions.log_probs.argmax(1) == predictions.labels  # [N]
    metrics = {}
    for number, name in enumerate(REGIONS):
        is_inside = region == number
        metrics[f"fraction_{name}"] = is_inside.double().mean().item()
        metrics[f"n_{name}"] = int(is_inside.sum())
        metrics[f"accuracy_{name}"] = None
        if is_inside.any():
            metrics[f"accuracy_{name}"] = is_correct[is_inside].double().mean().item()
    return metrics


def add_decisions(rows, predictions, thresholds):
    """Add the metrics of regions to the rows; to those of pairs, the shares of the second set."""
    for row in rows:
        if "against" not in row:
            row |= region_metrics(predictions[row["set"]], thresholds)
        else:
            regions = region_metrics(predictions[row["against"]], thresholds)
            row |= {f"against_fraction_{name}": regions[f"fraction_{name}"] for name in REGIONS}


def print_decisions(row):
    """Print how many images of a test set are in each region, and the accuracy in it."""
    print(f"\nseed {row['seed']}, decisions on the {row['n']} test images of {row['set']}:")
    for name in REGIONS:
        line = f"  {name:16}{row[f'n_{name}']:6} images"
        if row[f"accuracy_{name}"] is not None:
            line += f", of which {row[f'accuracy_{name}']:.1%} are classified correctly"
        print(line, flush=True)


def decision_columns(density, entropy, val_density, thresholds):
    """Log density, its percentile in the validation set, and the decision, for each input [N]."""
    region = decide(density, entropy, *thresholds)
    # The fraction of the validation set with a lower density: 0 is far out of distribution.
    below = torch.searchsorted(val_density.sort().values, density).double()
    return {"log_density": density, "density_percentile": 100 * below / len(val_density),
            "decision": [REGIONS[r] for r in region]}


def write_predictions(outputs, splits, gaussians, temperatures, val_density, thresholds, run):
    """--predict: predictions.csv of the first network, with its decisions, and of the ensemble.

    outputs: of each network for the predicted set; probabilities are those after scaling
    """
    first = predict_by_ddu(outputs[0], gaussians, temperatures[0])
    log_probs = {"ddu": first.scaled_log_probs[None]}                  # {method: [M, N, K]}
    scales = {"ddu": temperatures[0]}
    if len(outputs) > 1:
        log_probs["ensemble"] = stack_log_probs(outputs, temperatures)
        scales["ensemble"] = np.mean(temperatures)
    decisions = decision_columns(first.scores["density"], first.scores["total_scaled"],
                                 val_density, thresholds)
    common.write_predictions(run, splits.predict, log_probs, splits.train.classes, scales,
                             decisions)


# ---- Plots --------------------------------------------------------------------------------------


def plot_uncertainty(predictions, thresholds, splits, args, run):
    """Figures 1 and 2 of the paper: entropy, density, and both, of the test and the OOD sets."""
    names = list(predictions)
    if args.dataset in PARTS:
        names.remove(splits.test.name)  # its parts are drawn instead
    all_densities = torch.cat([predictions[name].scores["density"] for name in names])
    highest = max(all_densities.max().item(), thresholds.density)
    # OOD densities may be very low; they are clipped to the left edge of the picture.
    lowest = thresholds.density - 1.5 * (highest - thresholds.density)
    lowest = max(lowest, min(all_densities.min().item(), thresholds.density))
    all_entropies = torch.cat([predictions[name].scores["total_scaled"] for name in names])
    entropy_range = (all_entropies.min().item(), all_entropies.max().item())

    figure, (left, middle, right) = common.make_figure(1, 3, figsize=(13, 3.8))
    for name, colour in zip(names, common.colours(len(names))):
        style = dict(color=colour, alpha=0.6, label=name.replace("_", " "))
        entropies = predictions[name].scores["total_scaled"].numpy()
        densities = predictions[name].scores["density"].clamp(lowest, highest).numpy()
        fraction = np.full(len(entropies), 1 / len(entropies))
        left.hist(entropies, 40, range=entropy_range, weights=fraction, **style)
        middle.hist(densities, 60, range=(lowest, highest), weights=fraction, **style)
        shown = np.linspace(0, len(entropies) - 1, 1500).astype(int)
        right.plot(densities[shown], entropies[shown], ".", ms=2.5, **style)
    # `decide` cuts the plane along these lines.
    for axis in (middle, right):
        axis.axvline(thresholds.density, color="black", ls="--", lw=1)
    right.axhline(thresholds.entropy, color="black", ls="--", lw=1)
    left.set(xlabel="softmax entropy (nats)", ylabel="fraction of the set", yscale="log")
    middle.set(xlabel="log density (lower ones at the left edge)", ylabel="fraction of the set")
    right.set(xlabel="log density", ylabel="softmax entropy (nats)",
              title="decisions: left ood, above ambiguous")
    left.legend(frameon=False)
    run.save_figure(figure, "uncertainty.png")


def plot_active_learning(sizes, accuracies, shares, run):
    """Test accuracy and share of ambiguous examples against labels: {acquisition: [runs, steps]}.

    A line is the mean over the runs, and its band one standard error.
    """
    panels = {"test accuracy": accuracies}
    if any(np.any(share) for share in shares.values()):
        panels["ambiguous share of the labelled examples"] = shares
    figure, axes = common.make_figure(1, len(panels), figsize=(5.5 * len(panels), 3.8),
                                      squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items()):
        for colour, (acquisition, values) in zip(common.colours(len(curves)), curves.items()):
            values = np.array(values)                                  # [runs, steps]
            mean = values.mean(0)
            axis.plot(sizes, mean, color=colour, label=acquisition)
            if len(values) > 1:
                error = values.std(0, ddof=1) / math.sqrt(len(values))
                axis.fill_between(sizes, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
        axis.set(xlabel="labels", title=title)
    axes[0, 0].legend(frameon=False)
    run.save_figure(figure, "active_learning.png")


# ---- Own features -------------------------------------------------------------------------------


def read_all_features(args):
    """The data.Features to fit, and {name: data.Features} of the files to score."""
    train = data.read_features(args.features, labelled=True)
    if len(train) < 10:
        raise UserError(f"{args.features} has {len(train)} examples; at least 10 are needed")
    tested = {}
    for path in args.score:
        name = Path(path).stem
        if name in tested:
            raise UserError(f"--score: two files have the name {name}; rename one")
        tested[name] = data.read_features(path, train.values.shape[1], classes=train.classes)
    return train, tested


def run_features(args):
    """--features: fit and score features that were computed elsewhere, without a network."""
    train, tested = read_all_features(args)
    # A tenth of the features is held out, because fitted ones have densities that are too large.
    fitted, held_out = data.class_split(train.labels, args.seed)
    num_classes = int(train.labels.max()) + 1
    gaussians = fit(train.values[fitted], train.labels[fitted], num_classes, args)
    val_logits = class_log_densities(gaussians, train.values[held_out])
    # The posteriors q(c|z) of Gaussians in many dimensions are nearly 0 or 1, also where they are
    # wrong: like the logits of a network, log q(z|c) + log q(c) is divided by a temperature.
    temperature = common.fit_temperature(val_logits, train.labels[held_out])
    val_density = val_logits.logsumexp(1)
    thresholds = choose_thresholds(val_density, softmax_entropy(val_logits / temperature), args)

    # Nothing is trained, so a run of features has no fingerprints.
    dim = train.values.shape[1]
    run = common.Run(args, {}, f"{args.features}: {num_classes} classes, {len(fitted):,} fitted "
                               f"and {len(held_out):,} held-out rows of {dim} features")
    rows = []
    scores = {}
    inside = Path(args.score[0]).stem
    for name, features in tested.items():
        report_copies(name, features, train)
        logits = class_log_densities(gaussians, features.values)       # [N, K]
        scores[name] = density_scores(logits)
        log_probs = (logits / temperature).log_softmax(1)
        columns = decision_columns(scores[name]["density"], softmax_entropy(log_probs),
                                   val_density, thresholds)
        common.write_predictions(run, features, {"ddu": log_probs[None]}, train.classes,
                                 {"ddu": temperature}, columns, f"scores_{name}.csv")
        row = {"method": "DDU", "seed": args.seed, "set": name, "n": len(features),
               "temperature": temperature, "jitter": gaussians.jitter,
               "fraction_ood": columns["decision"].count("ood") / len(features)}
        known = (features.labels >= 0) & (features.labels < num_classes)
        if known.any():
            of_known = Predictions(features.labels[known], logits[known].log_softmax(1),
                                   log_probs[known], {})
            row |= {"n_labelled": int(known.sum())} | metrics_before_and_after_scaling(of_known)
        rows.append(row)
        if name != inside:
            row = {"method": "DDU", "seed": args.seed, "set": inside, "against": name,
                   "n": len(tested[inside])}
            rows.append(row | common.detection_metrics(scores[inside], scores[name], LARGER_MEANS))
    return run.report(rows, ["accuracy", "nll_scaled", "ece15_scaled", "fraction_ood",
                             "auroc_density", "auroc_gmm_entropy"])


def report_copies(name, features, train):
    """Warn of rows that are also training features: their densities are too large."""
    train_rows = set(map(bytes, train.values.numpy()))
    copies = sum(bytes(row) in train_rows for row in features.values.numpy())
    if copies:
        warnings.warn(f"{copies} of the {len(features)} rows of {name} are training features: "
                      "their densities are too large, and scores against them mislead")


# ---- Active learning ----------------------------------------------------------------------------


class Pool(NamedTuple):
    """What active learning starts from."""

    images: data.ImageSet   # P examples, whose labels are hidden until they are asked for
    labelled_first: Tensor  # the rows that have labels at the start
    ambiguous: Tensor       # [P] bool
    test: data.ImageSet


def load_pool(args):
    """The pool of all seeds; that of dirty_mnist and dirty_glyphs has few clean examples."""
    generator = torch.Generator().manual_seed(args.seed)
    parts = PARTS.get(args.dataset)
    clean_name = parts.clean if parts else args.dataset
    images = data.load(clean_name, "train", args.data_dir, image_size=args.image_size)
    test = data.load(clean_name, "test", args.data_dir, image_size=args.image_size)
    ambiguous = torch.zeros(len(images), dtype=torch.bool)
    if parts:
        # published: --subsample clean examples, drawn with repetition, and all ambiguous ones
        rows = torch.randint(len(images), (args.subsample,), generator=generator)
        clean = images.select(rows)
        added = data.load(parts.ambiguous, "train", args.data_dir)
        images = data.concat("ambiguous_pool", clean, data.convert_like(added, clean))
        ambiguous = images.label_probs.amax(1) < 1

    # Every class begins with the same number of labels, and at least two for a covariance.
    per_class, rest = divmod(args.num_initial_samples, images.num_classes)
    if rest or per_class < 2:
        raise UserError(f"--num-initial-samples {args.num_initial_samples}: must be a multiple of "
                        f"the {images.num_classes} classes, with at least two examples of each")
    if args.max_training_samples > len(images):
        raise UserError(f"--max-training-samples {args.max_training_samples}: the pool has only "
                        f"{len(images)} examples")
    order = torch.randperm(len(images), generator=generator)
    labelled = []
    for c in range(images.num_classes):
        rows = order[images.labels[order] == c]
        if len(rows) < per_class:
            raise UserError(f"--num-initial-samples {args.num_initial_samples}: class {c} has only "
                            f"{len(rows)} examples in the pool")
        labelled.append(rows[:per_class])
    return Pool(images, torch.cat(labelled), ambiguous, data.convert_like(test, images))


def options_of(acquisition, args):
    """The options of one acquisition function: what it does not use has no effect on it.

    It also determines --sn and --mod if neither is given. The published commands use -sn -mod for
    the density, and neither for the others.
    """
    is_density = acquisition == "density"
    changes = {"shrinkage": args.shrinkage and is_density}
    if acquisition not in ("pe", "mi"):
        changes["ensemble"] = 1
    if args.sn is None:
        changes["sn"] = is_density
        changes["mod"] = is_density
    return common.with_options(args, **changes)


def acquisition_step(pool, labelled, acquisition, seed, args):
    """Train networks from scratch on the labelled rows of the pool, and choose the next rows.

    Returns {"accuracy": of the networks on the test set, "chosen": rows of the pool}.
    """
    if args.eval:
        raise UserError(f"{acquisition} has only {len(labelled)} labels; finish this run first "
                        "(the same command without --eval)")
    # published: an epoch has 5056 examples, each labelled one nearly equally often
    draws = torch.arange(max(5056, len(labelled)))
    train_set = pool.images.select(labelled[draws % len(labelled)])
    nets = []
    for member in range(args.ensemble):
        member_seed = common.derive_seed(seed, len(labelled), member)
        common.seed_all(member_seed)
        net = make_network(args, pool.images.num_classes, pool.images.shape)
        train(net, train_set, None, args, member_seed)
        nets.append(net)
    test_log_probs = log_probs_of(nets, pool.test, args)               # [M, N, K]
    if not test_log_probs.isfinite().all():
        raise UserError(f"{acquisition}, {len(labelled)} labels: training diverged; use a lower "
                        "--lr")
    accuracy = common.accuracy(test_log_probs.exp().mean(0), pool.test.labels)
    print(f"{acquisition}: {len(labelled)} labels, test accuracy {accuracy:.4f}", flush=True)

    # The rows with the highest scores are labelled, among those without a label.
    score = acquisition_score(nets, pool, labelled, acquisition, args)
    score[labelled] = -math.inf
    ranking = score.sort(descending=True, stable=True).indices
    return {"accuracy": accuracy, "chosen": ranking[:args.acquisition_batch_size]}


def log_probs_of(nets, dataset, args):
    """Log probabilities [M, N, K] of M networks for a set."""
    return stack_log_probs([compute_outputs(net, dataset, args) for net in nets])


def acquisition_score(nets, pool, labelled, acquisition, args):
    """Scores [P] of the pool."""
    if acquisition == "random":
        return torch.rand(len(pool.images))
    if acquisition == "density":
        z = compute_outputs(nets[0], pool.images, args).features
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few labels make singular covariances, as published
            gaussians = fit(z[labelled], pool.images.labels[labelled], pool.images.num_classes,
                            args)
        return -log_density(gaussians, z)
    uncertainty = common.ensemble_uncertainty(log_probs_of(nets, pool.images, args))
    if acquisition == "mi":
        return uncertainty["epistemic"]
    # The entropy of the mean prediction, for "pe" of an ensemble, for "entropy" of one network.
    return uncertainty["total"]


def label_step_by_step(acquisition, pool, sizes, seed, args, run):
    """One run of active learning, whose steps are cached.

    Returns, at the `sizes`, the test accuracies and the shares of ambiguous labelled examples.
    """
    args = options_of(acquisition, args)
    labelled = pool.labelled_first
    accuracies = []
    shares = []
    for size in sizes:
        shares.append(pool.ambiguous[labelled].double().mean().item())
        inputs = {"labelled": labelled, "ensemble": args.ensemble, "shrinkage": args.shrinkage,
                  "test data": data.fingerprint(pool.test)}
        step = partial(acquisition_step, pool, labelled, acquisition, seed, args)
        state = run.cached(f"{acquisition}-seed{seed}-{size}", inputs, step)
        accuracies.append(state["accuracy"])
        labelled = torch.cat([labelled, state["chosen"]])[:sizes[-1]]
    return accuracies, shares


def run_active_learning(args):
    """--active-learning: compare acquisition functions on one pool and first set of labels."""
    if args.model.startswith("torchvision/"):
        raise UserError("--active-learning trains networks from scratch: choose another --model "
                        f"than {args.model}")
    pool = load_pool(args)
    for acquisition in args.active_learning:
        check_network(pool.images, options_of(acquisition, args))
    fingerprints = {"training data": data.fingerprint(pool.images),
                    "test data": data.fingerprint(pool.test)}
    splits = data.Splits(pool.images, None, pool.test, {}, None, fingerprints)
    run = common.Run(args, fingerprints, splits.summary())
    last = args.max_training_samples
    sizes = list(range(args.num_initial_samples, last, args.acquisition_batch_size)) + [last]
    rows = []
    accuracies = defaultdict(list)  # {acquisition: [runs, steps]}
    shares = defaultdict(list)
    for seed in range(args.seed, args.seed + args.runs):
        for acquisition in args.active_learning:
            accuracy, share = label_step_by_step(acquisition, pool, sizes, seed, args, run)
            accuracies[acquisition].append(accuracy)
            shares[acquisition].append(share)
            rows.append({"method": acquisition, "seed": seed, "set": pool.test.name,
                         "n": len(pool.test), "labels": last, "accuracy": accuracy[-1],
                         "accuracy_mean": np.mean(accuracy), "ambiguous_share": share[-1]})
    if args.plot:
        plot_active_learning(sizes, accuracies, shares, run)
    columns = ["labels", "accuracy", "accuracy_mean", "ambiguous_share"]
    return run.report(rows, columns, sizes=sizes, accuracies=accuracies, ambiguous_shares=shares)


# ---- Options ------------------------------------------------------------------------------------

# --dataset alone chooses the paper's setting for a data set. What its preset does not contain is
# the default of `parse_args`: a WRN-28-10 with spectral normalisation. Figures 1 and 2 of the
# paper use a ResNet-18 with spectral normalisation, without -mod.
MNIST = dict(model="resnet18", mod=False, ood=["fashion_mnist"])
GLYPHS = dict(model="resnet18", mod=False, width=0.25, epochs=5, schedule="one_cycle",
              ood=["glyphs_letters"])
PRESETS = {
    "cifar10": dict(augment=True, ood=["svhn", "cifar100", "tiny_imagenet"]),
    "cifar100": dict(augment=True, ood=["svhn", "tiny_imagenet"]),
    "svhn": dict(ood=["cifar10", "cifar100"]),
    "tiny_imagenet": dict(model="resnet50", augment=True),
    # This network is pretrained, and not trained here.
    "imagenet": dict(model="torchvision/resnet50", sn=False, mod=False, epochs=0, batch_size=256,
                     ood=["imagenet_o"]),
    "mnist": MNIST,
    "fashion_mnist": dict(MNIST, ood=["mnist"]),
    "dirty_mnist": dict(MNIST, epochs=100),
    "glyphs": GLYPHS,
    "dirty_glyphs": GLYPHS,
    "numbers": GLYPHS,
    # The user's own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(model="resnet18", mod=False, width=0.25, epochs=20, batch_size=32, lr=0.01,
                   schedule="one_cycle", augment=True, ood=[], shrinkage=True,
                   density_quantile=0.05, entropy_threshold=None),
    # The following are added to the preset of the data set if the option is used.
    "--model torchvision/NAME": dict(sn=False, mod=False, width=1.0, epochs=10, batch_size=32,
                                     lr=0.02, weight_decay=5e-4, schedule="one_cycle",
                                     augment=True, shrinkage=True, entropy_threshold=None),
    "--freeze": dict(epochs=30, lr=0.01, weight_decay=0.05, augment=False),
    # The published code has one recipe of active learning for all data sets.
    "--active-learning": dict(model="resnet18", sn=None, mod=None, opt="adam", lr=1e-3,
                              weight_decay=5e-4, batch_size=64, epochs=20, schedule="constant",
                              augment=False, ood=[], ensemble=5, num_initial_samples=20,
                              max_training_samples=300, acquisition_batch_size=5, subsample=1000),
    "--features": dict(shrinkage=None, density_quantile=0.05, entropy_threshold=None),
}


def parse_args(argv=None):
    """The options; each is added to the group of its role (see ROLES in common.py)."""
    parser = common.Parser("ddu", __doc__, PRESETS, NETWORKS, dataset="dirty_glyphs",
                           model="wide_resnet", epochs=350, batch_size=128, lr=0.1, ood=["svhn"])
    flag = argparse.BooleanOptionalAction
    training = parser.training.add_argument
    training("-sn", "--sn", action=flag, default=True,
        help="use soft spectral normalisation in every layer but the head")
    training("--coeff", type=at_least(1e-6, float), default=3.0,
        help="upper bound on the spectral norm of a layer (paper: 3)")
    training("-mod", "--mod", action=flag, default=True,
        help="use leaky ReLU, and average pooling instead of 1x1 convolutions in shortcuts")
    training("--opt", choices=["sgd", "adam"], default="sgd",
        help="optimiser; Adam needs a learning rate near 1e-3 (paper: SGD with momentum 0.9)")
    training("--weight-decay", "--decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters (paper: 5e-4)")
    training("--schedule", choices=["step", "one_cycle", "constant"], default="step",
        help="'step' divides the learning rate by 10 at the milestones; 'one_cycle' is better for "
        "short runs")
    training("--milestones", type=at_least(1), nargs=2, metavar="EPOCH",
        help="epochs of --schedule step, otherwise 3/7 and 5/7 of all (paper: 150 and 250 of 350)")
    training("--features", metavar="NPZ",
        help="fit the Gaussians to your own features instead of training a network: a file with "
        "'features' [N, D] and 'labels' [N]")
    training("--num-initial-samples", type=at_least(2),
        help="active learning: number of labels at the start (published code: 20)")
    training("--acquisition-batch-size", type=at_least(1),
        help="active learning: number of new labels in each step (published code: 5)")
    training("--subsample", type=at_least(1),
        help="active learning: number of clean examples in a pool that also has ambiguous ones "
        "(published code: 1000)")

    evaluation = parser.evaluation.add_argument
    evaluation("--ensemble", type=at_least(1), default=1, metavar="M",
        help="number of networks; more than one are also evaluated as an ensemble (paper: 5)")
    evaluation("--shrinkage", action=flag, default=False,
        help="shrink the covariances (Ledoit and Wolf), for few examples per class; for --features "
        "the default depends on their number")
    evaluation("--density-quantile", type=between(0, 1), default=0.01,
        help="an input is out-of-distribution if its log density is below this quantile of the "
        "validation set's")
    evaluation("--entropy-threshold", type=at_least(0, float), default=0.35,
        help="other inputs are ambiguous if their softmax entropy (--features: the entropy of "
        "q(c|z)) is above this, in nats; your own data: above --entropy-quantile")
    evaluation("--entropy-quantile", type=between(0, 1), default=0.95,
        help="quantile of the validation set's entropies that is the threshold for your own data")
    evaluation("--score", nargs="+", default=[], metavar="NPZ",
        help="files to score with --features; the first one is in-distribution")
    evaluation("--active-learning", nargs="+", metavar="NAME",
        choices=("density", "entropy", "pe", "mi", "random"),
        help="label a pool step by step, and compare acquisition functions: density, entropy, pe "
        "and mi (predictive entropy and mutual information of an ensemble), random")
    evaluation("--max-training-samples", type=at_least(2),
        help="active learning: number of labels at the end (published code: 300)")
    args = parser.parse(argv, run_name)
    if args.active_learning:
        args.active_learning = list(dict.fromkeys(args.active_learning))  # each one once
    check_options(args)
    return args


def run_name(args):
    """The name of the run directory."""
    if args.features:
        return common.join_name("features", Path(args.features).stem, f"seed{args.seed}")
    sn = f"sn{args.coeff:g}" if args.sn else None
    mod = "mod" if args.mod else None
    active_learning = "al" if args.active_learning else None
    return common.run_name(args, sn, mod, active_learning)


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if bool(args.features) != bool(args.score):
        raise UserError("--features TRAIN.npz and --score FILE.npz ... must be used together")
    if (args.features or args.active_learning) and common.world_size() > 1:
        raise UserError("--features and --active-learning run in one process: start without "
                        "torchrun")
    if args.active_learning and args.max_training_samples < args.num_initial_samples:
        raise UserError(f"--max-training-samples {args.max_training_samples}: must be at least "
                        f"--num-initial-samples {args.num_initial_samples}")
    has_no_variant = args.model.startswith("torchvision/") or args.model == "lenet"
    if has_no_variant and (args.sn or args.mod):
        raise UserError(f"--model {args.model} has neither spectral normalisation nor -mod; "
                        "add --no-sn --no-mod")

    acquisitions = args.active_learning or []
    of_networks = common.options(args, "training").keys() - {"features", "seed"}
    common.refuse(args, [
        (args.features, of_networks | {"ood", "ensemble", "active_learning", "runs", "predict",
                                       "workers", "compile", "eval"}, "with --features"),
        (not acquisitions, ["num_initial_samples", "max_training_samples",
                            "acquisition_batch_size", "subsample"], "without --active-learning"),
        (acquisitions, ["ood", "predict", "limit_train", "freeze", "density_quantile",
                        "entropy_threshold", "entropy_quantile"], "with --active-learning"),
        (acquisitions and "density" not in acquisitions, ["shrinkage"],
         "without --active-learning density"),
        (acquisitions and not {"pe", "mi"} & set(acquisitions), ["ensemble"],
         "without --active-learning pe or mi"),
        (args.dataset not in PARTS, ["subsample"], f"with --dataset {args.dataset}"),
        (args.schedule != "step", ["milestones"], f"with --schedule {args.schedule}"),
        (args.entropy_threshold is not None, ["entropy_quantile"], "with --entropy-threshold"),
        (args.model == "lenet", ["width"], "with --model lenet"),
        (args.sn is False, ["coeff"], "without --sn"),
    ])
    if args.features:
        for name in of_networks:  # so that the log does not show their defaults
            setattr(args, name, None)


# ---- Main ---------------------------------------------------------------------------------------


def load_splits(args, seed):
    """The training, validation, test and OOD sets of one seed, which splits off the validation set.

    A network that is not trained here has been trained elsewhere, probably on all training images:
    a temperature and thresholds from a part of these would be too optimistic. They then come from a
    tenth of the test set.
    """
    if args.dataset in PARTS:
        parts = PARTS[args.dataset]
        for name in args.ood:
            if common.set_name(name) in (parts.clean, parts.ambiguous):
                raise UserError(f"--ood {name}: {args.dataset} has a part of this name; rename the "
                                "set")
    is_trained = args.epochs > 0 or args.dataset in PARTS
    splits = data.load_splits(args, seed, val_fraction=0.1 if is_trained else 0)
    if splits.val is None:
        test_rows, val_rows = data.train_val_split(len(splits.test), seed)
        val = splits.test.select(val_rows)
        splits = splits._replace(val=val, test=splits.test.select(test_rows))
        common.print_on_main("the thresholds and the temperature come from a tenth of the test "
                             "set, which is not evaluated, because the network is not trained here")
    return splits


def check_network(train_set, args):
    """Refuse, before training, a network that fails on a batch, or a class without a Gaussian."""
    net = make_network(args, train_set.num_classes, train_set.shape)
    common.try_batch(net.train(args.epochs > 0), train_set, args)
    counts = train_set.labels.bincount(minlength=train_set.num_classes)
    if counts.min() < 2:
        smallest = int(counts.argmin())
        if train_set.classes:
            smallest = train_set.classes[smallest]
        raise UserError(f"class {smallest} of {train_set.name} has {counts.min()} training "
                        "example(s), but its Gaussian needs two")


def evaluate(outputs, splits, network_bytes, seed, args, run):
    """Steps 2 and 3: the rows of one seed, and the files of the first seed.

    outputs: see `outputs_of_splits`. On the main process alone.
    """
    # Step 2, and what the validation set determines.
    train_outputs = outputs["train"][0]
    gaussians = fit(train_outputs.features, train_outputs.labels, splits.train.num_classes, args)
    temperatures = [common.fit_temperature(of_network.logits, of_network.labels)
                    for of_network in outputs["val"]]
    val_scores = predict_by_ddu(outputs["val"][0], gaussians, temperatures[0]).scores
    thresholds = choose_thresholds(val_scores["density"], val_scores["total_scaled"], args)

    # Step 3, for the test set, its parts and the OOD sets.
    tested = tested_sets(outputs, splits, args)
    start = time.perf_counter()
    predictions = {name: predict_by_ddu(of_networks[0], gaussians, temperatures[0])
                   for name, of_networks in tested.items()}
    examples = sum(len(of_set.labels) for of_set in predictions.values())
    scoring_ms = 1000 * (time.perf_counter() - start) / examples
    rows = result_rows("DDU", seed, predictions, splits, args)
    for row in rows:
        row |= {"temperature": temperatures[0], "jitter": gaussians.jitter,
                "density_threshold": thresholds.density, "entropy_threshold": thresholds.entropy,
                "ms": splits.backbone_ms + outputs["test"][0].ms + scoring_ms,
                "bytes": splits.backbone_bytes + network_bytes + gaussians.normal.loc.nbytes
                + gaussians.normal.scale_tril.nbytes + gaussians.log_prior.nbytes}
    add_decisions(rows, predictions, thresholds)
    print_decisions(rows[0])

    if args.ensemble > 1:
        by_ensemble = {name: predict_by_ensemble(of_networks, temperatures)
                       for name, of_networks in tested.items()}
        cost = {"ms": splits.backbone_ms + sum(of_network.ms for of_network in outputs["test"]),
                "bytes": splits.backbone_bytes + args.ensemble * network_bytes}
        for row in result_rows(f"ensemble of {args.ensemble}", seed, by_ensemble, splits, args):
            rows.append(row | cost)
    if seed == args.seed and args.predict:
        write_predictions(outputs["predict"], splits, gaussians, temperatures,
                          val_scores["density"], thresholds, run)
    if seed == args.seed and args.plot:
        plot_uncertainty(predictions, thresholds, splits, args, run)
    return rows


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    if args.features:
        return run_features(args)
    if args.active_learning:
        return run_active_learning(args)

    # The run directory is made after all checks: a command that is refused leaves nothing.
    splits = load_splits(args, args.seed)
    check_network(splits.train, args)
    run = common.Run(args, splits.fingerprints, splits.summary())
    rows = []
    for seed in range(args.seed, args.seed + args.runs):
        if seed > args.seed:
            splits = load_splits(args, seed)  # another validation set
        # Algorithm 1: train, fit the Gaussians to the features, score all sets.
        nets = [train_member(splits, args, seed, member, run) for member in range(args.ensemble)]
        network_bytes = sum(tensor.nbytes for tensor in nets[0].state_dict().values())
        outputs = outputs_of_splits(nets, splits, args)
        rows += common.on_main(evaluate, outputs, splits, network_bytes, seed, args, run)
    # The columns of the table that is printed; results.csv has all of them.
    columns = ["accuracy", "nll", "ece15", "ece15_scaled", "against_fraction_ood", "auroc_density",
               "auroc_total", "auroc_epistemic"]
    return run.report(rows, columns)


if __name__ == "__main__":
    common.launch(main)
