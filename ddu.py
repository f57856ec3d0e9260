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
  blends of digits 0.966 +- 0.005 by the density, 0.721 +- 0.017 by the softmax entropy; of blends
  against digits 0.914 +- 0.007 and 0.995 +- 0.001 (mean +- standard error, n = 3).

Differences from the published code (github.com/omegafragger/DDU, commit f597744), "there":
  - -sn and -mod are on by default (there, off). Milestones scale with --epochs (there, 150 and
    250). dirty_mnist trains 100 epochs (there, 350) on Ambiguous-MNIST 1.0.0 (there, 0.6.0).
  - Densities include q(c) = n_c / N, as in the paper; there, they do not.
  - Class log densities stay in float64; there, float32, where the posteriors q(c|z) tie.
  - The jitter is relative to the variance of the features. The search there looks for the text of
    an error message that current PyTorch does not use (issues #4 and #8 there).
  - The temperature is the exact optimum; there, the best of 100 values.
  - Each image of Ambiguous-MNIST occurs ten times; here, never in training and validation both.
  - CIFAR-100 and SVHN have their own statistics; there, and with --load, those of CIFAR-10.
  - Members of an ensemble share a split, and processes the statistics of batch norm.
  - Active learning ranks log densities (there, densities, which underflow to ties) in the whole
    pool (there, 90 %). Ambiguous is what has several labels; there, an entropy above 1 nat.
  - m1, m2 there are energy, total of a softmax; density, gmm_entropy of Gaussians; epistemic,
    total of an ensemble. Decisions, --shrinkage and the acquisition `random` are new.
"""

import argparse
import math
import re
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.utils import parametrize

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of typing and torch.


class SoftSpectral(nn.Module):
    """Scale a weight down, never up, so that its spectral norm is at most `coeff`.

        W_eff = W / (max(1, sigma / coeff) + eps),   sigma = <u, A v>

    A is the linear operator of the layer: the convolution with its stride, zero padding, dilation
    and groups, of images of `input_shape` (C, H, W); eps is 1e-5, and 0 for 1x1 kernels. In
    training mode, every forward first updates the singular vectors u and v by one power iteration.
    The gradient flows through sigma, with u and v constant. They are buffers, so checkpoints
    contain them.
    """

    def __init__(self, layer, input_shape, coeff):
        super().__init__()
        self.coeff = coeff
        self.geometry = dict(groups=getattr(layer, "groups", 1))
        channels, *size = input_shape
        if isinstance(layer, nn.Linear) or layer.kernel_size == (1, 1):
            # The same matrix acts on every pixel, so one pixel gives the norm.
            size = [1, 1]
            self.eps = 0.0
        else:
            self.geometry |= dict(stride=layer.stride, padding=zero_padding(layer),
                                  dilation=layer.dilation)
            self.eps = 1e-5  # published code: added after the maximum
        v = torch.randn(1, channels, *size).to(layer.weight)           # [1, C_in, H, W]
        u = torch.randn_like(self.operator(v, layer.weight))           # [1, C_out, H', W']
        self.register_buffer("v", unit(v))
        self.register_buffer("u", unit(u))

    def operator(self, v, weight):
        """Apply A to an image v."""
        return F.conv2d(v, as_kernel(weight), **self.geometry)

    @torch.no_grad()
    def power_iteration(self, weight):
        """Set v = A^T u / |A^T u|, then u = A v / |A v|."""
        v = nn.grad.conv2d_input(self.v.shape, as_kernel(weight), self.u, **self.geometry)
        self.v.copy_(unit(v))
        u = self.operator(self.v, weight)
        self.u.copy_(unit(u))

    def forward(self, weight):
        with torch.autocast(weight.device.type, enabled=False):
            if self.training:
                self.power_iteration(weight)
            # Copies, because another forward may change u and v before the backward.
            u = self.u.clone()
            v = self.v.clone()
            sigma = (u * self.operator(v, weight)).sum()
            scale = torch.clamp(sigma / self.coeff, min=1.0) + self.eps
            return weight / scale


def unit(x):
    """x / |x|"""
    return x / x.norm().clamp_min(1e-12)


def as_kernel(weight):
    """A linear layer's weight [C_out, C_in] as that of a 1x1 convolution."""
    if weight.ndim == 2:
        return weight[:, :, None, None]
    return weight


def zero_padding(layer):
    """The padding of a convolution in pixels; raises ValueError where it is not symmetric zeros."""
    if layer.padding_mode != "zeros":
        raise ValueError(f"spectral normalisation needs zero padding, not {layer.padding_mode!r}")
    if layer.padding == "valid":
        return 0
    if layer.padding != "same":
        return layer.padding
    padding = []
    for kernel, dilation in zip(layer.kernel_size, layer.dilation):
        both_sides = dilation * (kernel - 1)
        if both_sides % 2:
            raise ValueError("spectral normalisation needs odd kernels where the padding is 'same'")
        padding.append(both_sides // 2)
    return tuple(padding)


def spectral_normalise(net, shape, coeff=3.0):
    """Give every convolution and linear layer of `net` a SoftSpectral weight.

    `shape` (C, H, W) of the images determines the input shapes of all layers. Batch norm is not
    normalised, as in the paper. Raises ValueError for padding other than zeros.
    """
    was_training = net.training
    input_shapes = {}

    def record_shape(module, inputs, output):
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


def fit_gaussians(features, labels, num_classes, shrinkage=False):
    """Algorithm 1: fit a Gaussian with a full covariance (divisor n_c - 1) to each class.

    features [N, D] of any float type; labels [N] in 0..num_classes-1; shrinkage: covariances of
    `ledoit_wolf`. Memory: 16 K D^2 bytes while fitting, 8 K D^2 afterwards. Raises ValueError if a
    class has fewer than two examples, a feature is not finite, or a covariance remains singular
    with the largest jitter. A jitter above 0 says that a covariance was singular: unknown inputs
    then have densities that are far too low, and so do known ones; use shrinkage, or more examples.
    """
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

    dim = features.shape[1]
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
    normal = MultivariateNormal(mean, scale_tril=factor, validate_args=False)
    return Gaussians(normal, torch.log(counts.double() / len(labels)), jitter)


def ledoit_wolf(covariance, centred):
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


def cholesky_with_jitter(covariance):
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


def class_log_densities(gaussians, features):
    """Compute log q(z|c) + log q(c) of features [N, D]: [N, K], float64, on the CPU."""
    blocks = []
    # In blocks of rows, because `log_prob` needs 8 N K D bytes.
    for z in features.split(256):
        z = z.to(gaussians.log_prior)  # float64, on the device of the Gaussians
        log_densities = gaussians.normal.log_prob(z[:, None])          # [256, K]
        blocks.append((log_densities + gaussians.log_prior).cpu())
    return torch.cat(blocks)


def log_density(gaussians, features):
    """Compute log q(z) = logsumexp_c [log q(z|c) + log q(c)] of features [N, D]: [N], float64."""
    return class_log_densities(gaussians, features).logsumexp(1)


def density_scores(log_densities):
    """Scores [N] from the features alone, given `class_log_densities` [N, K].

    density      log q(z) = logsumexp_c [log q(z|c) + log q(c)]
    gmm_entropy  entropy of q(c|z) in nats; not the entropy of the softmax
    """
    return {"density": log_densities.logsumexp(1), "gmm_entropy": softmax_entropy(log_densities)}


def softmax_entropy(logits):
    """Entropy of softmax(logits [N, K]), in nats [N]."""
    return torch.special.entr(logits.softmax(1)).sum(1)


def softmax_scores(logits, temperature=1.0):
    """Scores [N] of softmax(logits z [N, K] / temperature), float64.

    total     its entropy in nats, the total uncertainty of the prediction
    max_prob  its largest probability
    energy    logsumexp_c z_c
    """
    logits = logits.double() / temperature
    return {"total": softmax_entropy(logits), "max_prob": logits.softmax(1).amax(1),
            "energy": logits.logsumexp(1)}


# Large values of a score mean in-distribution ("id") or out-of-distribution ("ood"). The last one
# is that of an ensemble, its mutual information.
SCORES = {"density": "id", "gmm_entropy": "ood", "total": "ood", "max_prob": "id", "energy": "id",
          "epistemic": "ood"}
REGIONS = ("clean", "ambiguous", "ood")


def decide(density, entropy, density_threshold, entropy_threshold):
    """The index in REGIONS of every input [N]."""
    region = (entropy > entropy_threshold).long()
    # paper: the pseudo-code has the opposite sign, but a LOW density means OOD
    region[density < density_threshold] = 2
    return region


# ---- Model --------------------------------------------------------------------------------------


class Network(nn.Module):
    """A feature extractor and a linear head.

    Returns logits [B, K] and features z [B, D] of images [B, C, H, W].
    """

    def __init__(self, extractor, head):
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, x):
        z = self.extractor(x)
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
            # published code: images of odd size are subsampled, not averaged
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
    first = conv_bn_act(c_in, c, args, kernel=1)
    second = conv_bn_act(c, c, args, stride=stride)
    return first + second + [conv(c, c_out, kernel=1), nn.BatchNorm2d(c_out)]


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
    net = Network(*data.backbone_and_head(args, NETWORKS, num_classes, shape))
    if args.model == "wide_resnet":
        # published code: this initialisation, and a slow average of the batch statistics
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.01
        nn.init.zeros_(net.head.bias)
    if args.sn:
        try:
            spectral_normalise(net.extractor, shape, args.coeff)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"--model {args.model}: {common.one_line(error)}") from None
    return net.to(args.device, memory_format=torch.channels_last)


# The layers of the published networks under their names here: all but residual blocks, ...
PUBLISHED_LAYERS = {
    "lenet": {"conv1": "extractor.0", "conv2": "extractor.3", "fc1": "extractor.7",
              "fc2": "extractor.9", "fc3": "head"},
    "resnet18": {"conv1": "extractor.0", "bn1": "extractor.1", "fc": "head"},
    "resnet50": {"conv1": "extractor.0", "bn1": "extractor.1", "fc": "head"},
    "wide_resnet": {"conv1": "extractor.0", "bn1": "extractor.13", "linear": "head"},
    "vgg16": {"classifier": "head"} | {f"features.{i}": f"extractor.{i}" for i in range(44)},
}
# ... the layers of a residual block, ...
RESNET_BLOCK = {"conv1": "body.0", "bn1": "body.1", "conv2": "body.3", "bn2": "body.4",
                "conv3": "body.6", "bn3": "body.7", "shortcut.0": "shortcut.1",
                "shortcut.1": "shortcut.2"}
WIDE_BLOCK = {"bn1": "body.0", "conv1": "body.2", "bn2": "body.3", "conv2": "body.6",
              "shortcut": "shortcut.1"}
# ... the place of the first block, and the number of blocks in each stage.
PUBLISHED_BLOCKS = {"resnet18": (RESNET_BLOCK, 3, (2, 2, 2, 2)),
                    "resnet50": (RESNET_BLOCK, 3, (3, 4, 6, 3)),
                    "wide_resnet": (WIDE_BLOCK, 1, (4, 4, 4))}


def take_published_options(path, args):
    """Set the options that the name of a published file tells, and that were not given.

    Of an ensemble, all files must have been trained with the same ones, but for the seed: that of
    the first file splits off the validation images.
    """
    names = data.read_state_dict(path).keys()
    found = {"sn": any(name.endswith(".weight_orig") for name in names)}
    pattern = r"(_sn_(?P<coeff>[0-9.e-]+))?(?P<mod>_mod)?_(?P<seed>\d+)_\d+\.model$"
    name = re.search(pattern, str(path))
    if name is None:
        common.print_on_main(f"{path} does not tell --coeff, -mod and --seed: give them as trained")
    else:
        found["mod"] = name["mod"] is not None
        if name["coeff"]:
            found["coeff"] = float(name["coeff"])
        if path == args.load[0]:
            found["seed"] = int(name["seed"])
    for option, value in found.items():
        if path != args.load[0] and getattr(args, option) != value:
            raise UserError(f"{path} was trained with other options than {args.load[0]}: {option} "
                            f"{value:g}")
        if option not in args.given:
            setattr(args, option, value)


def load_published(path, net, model):
    """Give `net` the weights of a network that the published code has saved."""
    layers = dict(PUBLISHED_LAYERS[model])
    if model in PUBLISHED_BLOCKS:
        block_layers, place, depths = PUBLISHED_BLOCKS[model]
        for stage, depth in enumerate(depths, start=1):
            for block in range(depth):
                for theirs, ours in block_layers.items():
                    layers[f"layer{stage}.{block}.{theirs}"] = f"extractor.{place}.{ours}"
                place += 1
    weights = net.state_dict()
    state = {}
    for published, tensor in data.read_state_dict(path).items():
        layer, _, kind = published.rpartition(".")
        ours = layers.get(layer, layer)
        if kind == "weight_orig":
            kind = "parametrizations.weight.original"
        elif kind in ("weight_u", "weight_v"):
            kind = f"parametrizations.weight.0.{kind[-1]}"
            # published code: an image is a vector
            image = weights.get(f"{ours}.{kind}", tensor)
            if image.numel() == tensor.numel():
                tensor = tensor.view(image.shape)
        if kind != "weight_sigma":  # a log, which is never read
            state[f"{ours}.{kind}"] = tensor
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit --model {model} with these images, --width, --sn "
                        f"and --mod: {common.one_line(error)}") from None


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
        # paper: epochs 150 and 250 of 350
        milestones = args.milestones or [3 / 7 * args.epochs, 5 / 7 * args.epochs]
        for milestone in milestones:
            if step // steps_per_epoch >= max(1, round(milestone)):
                lr *= 0.1
    return lr


def make_optimiser(net, args):
    if args.opt == "adam":
        return torch.optim.Adam(net.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.SGD(net.parameters(), lr=args.lr, weight_decay=args.weight_decay,
                           momentum=0.9)


def train(net, train_set, args, seed, run=None, name=None):
    """Step 1: minimise the cross entropy; with a run, save and resume the checkpoint `name`."""
    optimiser = make_optimiser(net, args)
    # The order and the augmentation of the images depend only on the seed and the epoch.
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, workers=args.workers, channels_last=True,
                         augment="crop_flip" if args.augment else "none")
    # DistributedDataParallel, with batch norm over all processes.
    model = common.data_parallel(net, args.device, args.compile)
    history = []  # a row for each completed epoch
    if run is not None:
        # A checkpoint of other training images or pretrained weights is refused.
        made_from = data.origin(train_set, args)
        history = run.resume(name, args.epochs, made_from, net=net, optimiser=optimiser)
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        # Every epoch is seeded, so that a resumed run draws the same dropout masks.
        common.seed_all(seed, epoch, common.rank())
        model.train()
        totals = torch.zeros(3, device=args.device)  # loss, correct predictions, examples
        for step, batch in enumerate(common.progress(loader, epoch)):
            # A function of the step: a resumed run needs no state of a scheduler.
            lr = learning_rate(epoch * len(loader) + step, len(loader), args)
            for group in optimiser.param_groups:
                group["lr"] = lr
            with common.autocast(args):
                logits, _ = model(batch.images)
            loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")

            # DDP averages over processes: this is the mean over the global batch.
            mean_loss = loss * common.world_size() / batch.global_size
            optimiser.zero_grad()
            mean_loss.backward()
            optimiser.step()

            totals[0] += loss.detach()
            totals[1] += (logits.argmax(1) == batch.labels).sum()
            totals[2] += len(logits)
        loss, correct, examples = common.all_reduce(totals).tolist()
        history.append({"epoch": epoch + 1, "loss": loss / examples, "accuracy": correct / examples,
                        "lr": lr, "seconds": time.perf_counter() - start})
        if run is not None:
            run.save(name, history, made_from, net=net, optimiser=optimiser)
        elif not common.all_finite([history, net.state_dict()]):
            raise UserError(f"training diverged in epoch {epoch + 1}: use a lower --lr")


def make_member(train_set, args, run, seed, member):
    """Train or --load one member of an ensemble; the first one is the single network."""
    name = f"seed{seed}"
    if member > 0:
        name = f"seed{seed}-member{member}"
        seed = common.derive_seed(seed, member)
    common.seed_all(seed)
    net = make_network(args, train_set.num_classes, train_set.shape)
    if args.load:
        load_published(args.load[member], net, args.model)
    else:
        train(net, train_set, args, seed, run, name)
    return net


# ---- Evaluation ---------------------------------------------------------------------------------

# Unions of a clean and an ambiguous set: which rows of the test set each has.
PARTS = {
    "dirty_mnist": {"mnist": slice(10_000), "ambiguous_mnist": slice(10_000, None)},
    "dirty_glyphs": {"glyphs": slice(2_000), "glyphs_ambiguous": slice(2_000, None)},
}


class Outputs(NamedTuple):
    """The outputs of a network for one set, in the order of the set, on the CPU."""

    logits: Tensor    # [N, K] float32
    features: Tensor  # [N, D] float32
    labels: Tensor    # [N]
    ms: float         # time of the pass over the set, in milliseconds per example


class Fitted(NamedTuple):
    """What steps 2 and 3 fit to the outputs of one network."""

    gaussians: Gaussians
    val_density: Tensor       # [N_val]  log densities of the validation set, ascending
    density_threshold: float  # an input is OOD if its log density is lower
    entropy_threshold: float  # another one is ambiguous if its entropy is higher, in nats
    temperature: float        # of the softmax, chosen on the validation set


@torch.no_grad()
def forward(net, dataset, args):
    """The Outputs for a whole set in eval mode; None on all processes but the main one."""
    net.eval()
    loader = data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                         channels_last=True)
    start = time.perf_counter()
    batches = []
    for batch in loader.epoch():
        with common.autocast(args):
            logits, features = net(batch.images)
        batches.append({"index": batch.index, "logits": logits.float(),
                        "features": features.float()})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    ms = 1000 * (time.perf_counter() - start) / len(dataset)
    return Outputs(columns["logits"], columns["features"], dataset.labels, ms)


def forward_all(net, sets, args):
    """A data.Sets of the Outputs for all sets of a run; None where there is no set."""
    ood = {name: forward(net, dataset, args) for name, dataset in sets.ood.items()}
    predict = None if sets.predict is None else forward(net, sets.predict, args)
    return data.Sets(forward(net, sets.train, args), forward(net, sets.val, args),
                     forward(net, sets.test, args), ood, predict)


def fit_outputs(outputs, num_classes, args):
    """Step 2, and the thresholds and the temperature, which the validation set determines."""
    gaussians = fit(outputs.train.features, outputs.train.labels, num_classes, args)
    val_density = log_density(gaussians, outputs.val.features)
    val_entropy = softmax_entropy(outputs.val.logits.double())
    temperature = common.fit_temperature(outputs.val.logits, outputs.val.labels)
    return with_thresholds(gaussians, val_density, val_entropy, temperature, args)


def with_thresholds(gaussians, val_density, val_entropy, temperature, args):
    """The Fitted whose thresholds are quantiles of the densities and entropies of validation."""
    entropy_threshold = args.entropy_threshold
    if entropy_threshold is None:
        entropy_threshold = val_entropy.quantile(args.entropy_quantile).item()
    density_threshold = val_density.quantile(args.density_quantile).item()
    return Fitted(gaussians, val_density.sort().values, density_threshold, entropy_threshold,
                  temperature)


def fit(features, labels, num_classes, args):
    """`fit_gaussians` on the device, with a note where a class has too few examples."""
    device = "cpu" if args.device.type == "mps" else args.device  # MPS has no float64
    try:
        gaussians = fit_gaussians(features.to(device), labels.to(device), num_classes,
                                  args.shrinkage)
    except ValueError as error:
        raise UserError(str(error)) from None
    counts = labels.bincount(minlength=num_classes)
    if gaussians.jitter > 0 and not args.active_learning:
        print(f"note: a covariance is singular ({features.shape[1]} features; the smallest class, "
              f"{counts.argmin()}, has {counts.min()} examples), so {gaussians.jitter:.2g} was "
              "added to all variances; --shrinkage or more examples give better densities")
    return gaussians


def density_columns(density, entropy, fitted):
    """Log density, its percentile in the validation set, and the decision, for each input [N]."""
    region = decide(density, entropy, fitted.density_threshold, fitted.entropy_threshold)
    # The share of the validation set with a lower density: 0 is far out.
    below = torch.searchsorted(fitted.val_density, density).double()
    return {"log_density": density, "density_percentile": 100 * below / len(fitted.val_density),
            "decision": [REGIONS[r] for r in region]}


def by_set(outputs, parts):
    """{set: Outputs} of the `parts` {set: rows} of the test set, and of the OOD sets."""
    test = outputs.test
    found = {}
    for part, rows in parts.items():
        found[part] = Outputs(test.logits[rows], test.features[rows], test.labels[rows], test.ms)
    return found | outputs.ood


class Scored(NamedTuple):
    """The predictions of one method for a set, and their scores."""

    logits: Tensor         # [N, K]
    scaled_logits: Tensor  # [N, K]  at the temperatures that the validation set determines
    labels: Tensor         # [N]
    scores: dict           # {score: [N]}; <score>_scaled is that of the scaled logits


def score_network(outputs, fitted):
    """All scores of the Outputs of a network."""
    scores = density_scores(class_log_densities(fitted.gaussians, outputs.features))
    scores |= softmax_scores(outputs.logits)
    scaled = softmax_scores(outputs.logits, fitted.temperature)
    scores |= {f"{score}_scaled": values for score, values in scaled.items()}
    logits = outputs.logits.double()
    return Scored(logits, logits / fitted.temperature, outputs.labels, scores)


def score_ensemble(outputs, temperatures):
    """The scores of the mean probabilities of M networks, from their Outputs for a set."""
    log_means = []
    scores = {}
    own = torch.tensor(temperatures, dtype=torch.float64)[:, None, None]  # [M, 1, 1]
    for ending, temperature in (("", 1.0), ("_scaled", own)):
        each = stack_log_probs(outputs, temperature)                   # [M, N, K]
        # Logarithms of probabilities are logits: softmax gives the probabilities back.
        log_means.append(each.logsumexp(0) - math.log(len(outputs)))   # [N, K]
        parts = common.ensemble_uncertainty(each)
        for score in ("total", "epistemic"):
            scores[f"{score}{ending}"] = parts[score]
    return Scored(*log_means, outputs[0].labels, scores)


def stack_log_probs(outputs, temperature=1.0):
    """Log probabilities [M, N, K], float64, from the Outputs of M networks for one set.

    temperature: of all networks, or [M, 1, 1]
    """
    logits = torch.stack([of_network.logits for of_network in outputs]).double()
    logits /= temperature  # in place, because a copy for ImageNet takes gigabytes
    return logits.log_softmax(2)


def network_rows(names, scored, fitted, seed):
    """The rows of one network, from {set: Scored}."""
    rows = result_rows("DDU", seed, names, scored)
    for row in rows:
        # The fractions of the three regions, in the OOD set if the row has one.
        scores = scored[row.get("against", row["set"])].scores
        region = decide(scores["density"], scores["total"], fitted.density_threshold,
                        fitted.entropy_threshold)
        fractions = region.bincount(minlength=3) / len(region)
        row |= {f"fraction_{name}": fraction for name, fraction in zip(REGIONS, fractions)}
        row |= {"temperature": fitted.temperature, "jitter": fitted.gaussians.jitter,
                "density_threshold": fitted.density_threshold,
                "entropy_threshold": fitted.entropy_threshold}
    return rows


def result_rows(method, seed, names, scored):
    """A row for each test set, then one for each pair of sets that the scores should separate.

    names: the test set, then its clean and its ambiguous part, if it has them; scored
    {set: Scored} of these and of the OOD sets
    """
    rows = []
    for name in names:
        found = scored[name]
        row = {"method": method, "seed": seed, "set": name, "n": len(found.labels)}
        row |= prediction_metrics(found.logits, found.labels)
        scaled = prediction_metrics(found.scaled_logits, found.labels)
        rows.append(row | {f"{metric}_scaled": value for metric, value in scaled.items()})

    # OOD sets are compared with the whole test set and with its clean part; the
    # ambiguous part is compared with the clean one.
    ood = [name for name in scored if name not in names]
    pairs = list(product(names[:2], ood))
    if len(names) > 1:
        pairs.append(names[1:])
    for inside, outside in pairs:
        row = {"method": method, "seed": seed, "set": inside, "against": outside,
               "n": len(scored[inside].labels)}
        rows.append(row | detection_metrics(scored[inside].scores, scored[outside].scores))
    return rows


def prediction_metrics(logits, labels):
    """Accuracy, likelihood and calibration of softmax(logits [N, K]), of logits in float64."""
    log_probs = logits.log_softmax(1)
    probs = log_probs.exp()
    return {"accuracy": common.accuracy(probs, labels), "nll": common.nll(log_probs, labels),
            "brier": common.brier(probs, labels), "ece15": common.ece(probs, labels)}


def detection_metrics(inside, outside):
    """AUROC, AUPR-in, AUPR-out and FPR at 95 % TPR of every score, given {score: [N]}."""
    metrics = {}
    for score in inside:
        larger_means = SCORES[score.removesuffix("_scaled")]
        found = common.ood_metrics(inside[score], outside[score], larger_means=larger_means)
        for metric, value in found.items():
            metrics[f"{metric}_{score}"] = value  # for example auroc_density
    return metrics


def write_predictions(members, fitted, sets, run):
    """--predict: predictions.csv, with the log density of the first network and the decision."""
    outputs = [of_network.predict for of_network in members]
    log_probs = {"ddu": stack_log_probs(outputs)}
    columns = common.prediction_columns(sets.predict, log_probs, sets.train.classes)
    density = log_density(fitted.gaussians, outputs[0].features)
    entropy = softmax_entropy(outputs[0].logits.double())
    run.write_csv("predictions.csv", columns | density_columns(density, entropy, fitted))


# ---- Plots --------------------------------------------------------------------------------------


def plot_uncertainty(names, scored, fitted, run):
    """Figures 1 and 2 of the paper for the sets `names`: entropy, density, and both."""
    # OOD densities may be very low; they are clipped to the left edge of the picture.
    highest = max(scored[names[0]].scores["density"].max().item(), fitted.density_threshold)
    lowest = fitted.density_threshold - 1.5 * (highest - fitted.density_threshold)
    max_entropy = max(scored[name].scores["total"].max().item() for name in names)

    figure, (left, middle, right) = common.make_figure(1, 3, figsize=(13, 3.8))
    for name, colour in zip(names, common.colours(len(names))):
        style = dict(color=colour, alpha=0.6, label=name.replace("_", " "))
        entropies = scored[name].scores["total"].numpy()
        densities = scored[name].scores["density"].clamp(lowest, highest).numpy()
        fraction = np.full(len(entropies), 1 / len(entropies))
        left.hist(entropies, 40, range=(0, max_entropy), weights=fraction, **style)
        middle.hist(densities, 60, range=(lowest, highest), weights=fraction, **style)
        shown = np.linspace(0, len(entropies) - 1, 1500).astype(int)
        right.plot(densities[shown], entropies[shown], ".", ms=2.5, **style)
    # `decide` cuts the plane along these lines.
    for axis in (middle, right):
        axis.axvline(fitted.density_threshold, color="black", ls="--", lw=1)
    right.axhline(fitted.entropy_threshold, color="black", ls="--", lw=1)
    left.set(xlabel="softmax entropy (nats)", ylabel="fraction of the set", yscale="log")
    middle.set(xlabel="log density (lower ones at the left edge)", ylabel="fraction of the set")
    right.set(xlabel="log density", ylabel="softmax entropy (nats)",
              title="OOD on the left, ambiguous above")
    left.legend(frameon=False)
    run.save_figure(figure, "uncertainty.png")


def plot_reliability(outputs, temperature, run):
    """Accuracy against confidence on the test set, before and after temperature scaling."""
    figure, axis = common.make_figure(1, 1, figsize=(4, 3.8))
    axis.plot([0, 1], [0, 1], color="black", ls="--", lw=1)
    for colour, value in zip(common.COLOURS, [1.0, temperature]):
        probs = (outputs.logits.double() / value).softmax(1)
        confidence, predicted = probs.max(1)
        bars = common.reliability(confidence, predicted == outputs.labels)
        filled = bars.counts > 0
        error = common.ece(probs, outputs.labels)
        axis.plot(bars.confidence[filled], bars.accuracy[filled], ".-", color=colour,
                  label=f"temperature {value:.2f}: ECE {error:.3f}")
    axis.set(xlabel="mean confidence of a bin", ylabel="accuracy of the bin")
    axis.legend(loc="upper left", frameon=False)
    run.save_figure(figure, "reliability.png")


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


def run_features(args):
    """--features: fit and score features that were computed elsewhere, without a network."""
    train = data.read_features(args.features, labelled=True)
    files = {}
    for path in args.score:
        name = Path(path).stem
        if name in files:
            raise UserError(f"--score: two files are called {name}; rename one")
        files[name] = data.read_features(path, train.values.shape[1], classes=train.classes)
    gaussians, val = fit_features(train, args)
    # Without a softmax, the entropy of q(c|z) tells ambiguous inputs from clean ones.
    val_scores = density_scores(class_log_densities(gaussians, val))
    fitted = with_thresholds(gaussians, val_scores["density"], val_scores["gmm_entropy"], 1.0, args)

    # Nothing is trained here: other options need no other directory.
    others = vars(args).keys() - {"features", "seed"}
    run = common.Run(args, "ddu", f"features-{Path(args.features).stem}-seed{args.seed}", others)
    rows = []
    first = next(iter(files))
    for name, features in files.items():
        log_densities = class_log_densities(gaussians, features.values)
        scores = density_scores(log_densities)
        confidence, predicted = log_densities.softmax(1).max(1)        # of q(c|z)
        columns = common.example_columns(features, train.classes)
        columns["predicted"] = common.class_names(predicted, train.classes)
        columns["confidence"] = confidence
        columns["gmm_entropy"] = scores["gmm_entropy"]
        columns |= density_columns(scores["density"], scores["gmm_entropy"], fitted)
        run.write_csv(f"scores_{name}.csv", columns)

        row = {"method": "DDU", "seed": args.seed, "set": first, "n": len(files[first]),
               "jitter": gaussians.jitter,
               "fraction_ood": columns["decision"].count("ood") / len(features)}
        if name == first:
            inside = scores
        else:
            row["against"] = name
            row |= detection_metrics(inside, scores)
        rows.append(row)
    return run.report(rows, ["fraction_ood", "auroc_density", "auroc_gmm_entropy"])


def fit_features(train, args):
    """The Gaussians of own features, and the features [N_val, D] that determine thresholds.

    These are those of --validation, or a tenth of the training features, which is held out.
    """
    if args.validation:
        val = data.read_features(args.validation, train.values.shape[1]).values
        if torch.equal(val, train.values):
            raise UserError(f"--validation {args.validation} holds the training features: their "
                            "densities are too large for thresholds; give others, or no file")
    else:
        rows, val_rows = data.class_split(train.labels, args.seed)
        if len(val_rows) == 0:
            raise UserError(f"{args.features} has {len(train)} examples; at least 10 are needed "
                            "to hold a tenth out, or give --validation FILE.npz")
        val = train.values[val_rows]
        train = train.select(rows)  # which has all classes
    num_classes = int(train.labels.max()) + 1
    gaussians = fit(train.values, train.labels, num_classes, args)
    if gaussians.jitter > 0 and "shrinkage" not in args.given:
        print("note: the covariances are shrunk (--shrinkage); --no-shrinkage keeps them")
        args = common.with_options(args, shrinkage=True)
        gaussians = fit(train.values, train.labels, num_classes, args)
    return gaussians, val


# ---- Active learning ----------------------------------------------------------------------------


class Pool(NamedTuple):
    """What active learning starts from."""

    images: data.ImageSet  # P examples, whose labels are hidden until they are asked for
    start: Tensor          # rows that are labelled first
    ambiguous: Tensor      # [P] bool
    test: data.ImageSet


def active_learning_pool(args):
    """The pool of all runs; of dirty_mnist and dirty_glyphs it holds few clean examples."""
    generator = torch.Generator().manual_seed(args.seed)
    names = list(PARTS.get(args.dataset, [args.dataset]))
    images = data.load(names[0], "train", args.data_dir, val_fraction=0,
                       image_size=args.image_size)
    test = data.load(names[0], "test", args.data_dir, image_size=args.image_size)
    ambiguous = torch.zeros(len(images), dtype=torch.bool)
    if len(names) > 1:
        # published code: --subsample clean examples, drawn with repetition, and all ambiguous ones
        rows = torch.randint(len(images), (args.subsample,), generator=generator)
        clean = images.select(rows)
        other = data.load(names[1], "train", args.data_dir, val_fraction=0)
        images = data.concat("ambiguous_pool", clean, data.match(other, clean))
        ambiguous = images.label_probs.amax(1) < 1

    # The same number of labels in each class, and at least two, which a covariance needs.
    per_class, rest = divmod(args.num_initial_samples, images.num_classes)
    if rest or per_class < 2:
        raise UserError(f"--num-initial-samples {args.num_initial_samples}: must be a multiple of "
                        f"the {images.num_classes} classes, with at least two examples of each")
    if args.max_training_samples > len(images):
        raise UserError(f"--max-training-samples {args.max_training_samples}: the pool has only "
                        f"{len(images)} examples")
    order = torch.randperm(len(images), generator=generator)
    start = []
    for c in range(images.num_classes):
        rows = order[images.labels[order] == c]
        if len(rows) < per_class:
            raise UserError(f"--num-initial-samples {args.num_initial_samples}: class {c} has only "
                            f"{len(rows)} examples in the pool")
        start.append(rows[:per_class])
    return Pool(images, torch.cat(start), ambiguous, data.match(test, images))


def options_of(acquisition, args):
    """The options of an acquisition function, which determines --sn and --mod if neither is given.

    published commands: -sn -mod for the density, and neither for the others
    """
    if args.sn is not None:
        return args
    is_density = acquisition == "density"
    return common.with_options(args, sn=is_density, mod=is_density)


def acquisition_step(pool, labelled, acquisition, seed, args):
    """Train networks from scratch on the labelled rows of the pool, and choose the next rows.

    Returns {"accuracy": of the networks on the test set, "chosen": rows of the pool}.
    """
    if args.eval:
        raise UserError(f"{acquisition} has only {len(labelled)} labels; finish this run first "
                        "(the same command without --eval)")
    args = options_of(acquisition, args)
    # published code: an epoch has 5056 examples, each labelled one nearly equally often
    draws = torch.arange(max(5056, len(labelled)))
    train_set = pool.images.select(labelled[draws % len(labelled)])
    nets = []
    for member in range(args.ensemble if acquisition in ("pe", "mi") else 1):
        member_seed = common.derive_seed(seed, len(labelled), member)
        common.seed_all(member_seed)
        net = make_network(args, pool.images.num_classes, pool.images.shape)
        train(net, train_set, args, member_seed)
        nets.append(net)
    outputs = [forward(net, pool.test, args) for net in nets]
    test_probs = stack_log_probs(outputs).exp().mean(0)                # [N, K]
    accuracy = common.accuracy(test_probs, pool.test.labels)
    print(f"{acquisition}: {len(labelled)} labels, test accuracy {accuracy:.4f}", flush=True)

    # The rows with the highest scores are labelled, among those without a label.
    score = acquisition_score(nets, pool, labelled, acquisition, args)
    score[labelled] = -math.inf
    ranking = score.sort(descending=True, stable=True).indices
    return {"accuracy": accuracy, "chosen": ranking[:args.acquisition_batch_size]}


def acquisition_score(nets, pool, labelled, acquisition, args):
    """Scores [P] of the pool."""
    if acquisition == "random":
        return torch.rand(len(pool.images))
    outputs = [forward(net, pool.images, args) for net in nets]
    if acquisition == "density":
        z = outputs[0].features
        gaussians = fit(z[labelled], pool.images.labels[labelled], pool.images.num_classes, args)
        return -log_density(gaussians, z)
    parts = common.ensemble_uncertainty(stack_log_probs(outputs))
    if acquisition == "mi":
        return parts["epistemic"]
    # pe, or for a single network the entropy of its softmax
    return parts["total"]


def label_step_by_step(acquisition, pool, sizes, seed, args, run):
    """One run of active learning, whose steps are saved.

    Returns, at the `sizes`, the test accuracies and the shares of ambiguous labelled examples.
    """
    labelled = pool.start
    digest = data.digest(pool.images)
    accuracies = []
    shares = []
    for size in sizes:
        shares.append(pool.ambiguous[labelled].double().mean().item())
        step = partial(acquisition_step, pool, labelled, acquisition, seed, args)
        name = f"{acquisition}-seed{seed}-{size}"
        state = run.load_or_compute(name, {"labelled": labelled, "pool": digest}, step)
        accuracies.append(state["accuracy"])
        labelled = torch.cat([labelled, state["chosen"]])[:sizes[-1]]
    return accuracies, shares


def run_active_learning(args):
    """--active-learning: compare acquisition functions on one pool and first set of labels."""
    if args.model.startswith("torchvision/"):
        raise UserError("--active-learning trains networks from scratch: choose another --model "
                        f"than {args.model}")
    pool = active_learning_pool(args)
    for acquisition in args.active_learning:
        check_network(pool.images, options_of(acquisition, args))
    # Here the options of the evaluation, too, change what is labelled.
    run = common.Run(args, "ddu", run_name(args), evaluation_options=["active_learning"])
    last = args.max_training_samples
    sizes = list(range(args.num_initial_samples, last, args.acquisition_batch_size)) + [last]
    rows = []
    accuracies = defaultdict(list)  # {acquisition: [runs, steps]}
    shares = defaultdict(list)
    for seed in range(args.seed, args.seed + args.runs):
        for acquisition in args.active_learning:
            found, ambiguous = label_step_by_step(acquisition, pool, sizes, seed, args, run)
            accuracies[acquisition].append(found)
            shares[acquisition].append(ambiguous)
            rows.append({"method": acquisition, "seed": seed, "set": pool.test.name,
                         "n": len(pool.test), "labels": last, "accuracy": found[-1],
                         "accuracy_mean": np.mean(found), "ambiguous_share": ambiguous[-1]})
    if args.plot:
        plot_active_learning(sizes, accuracies, shares, run)
    columns = ["labels", "accuracy", "accuracy_mean", "ambiguous_share"]
    return run.report(rows, columns, sizes=sizes, accuracies=accuracies, ambiguous_shares=shares)


# ---- Options ------------------------------------------------------------------------------------

# A data set alone selects the paper's recipe for it: what its preset does not say is the default
# of `parse_args`, a WRN-28-10 with spectral normalisation.
# published code: figures 1 and 2 use ResNet-18 with spectral normalisation, without -mod
MNIST = dict(model="resnet18", mod=False, ood=["fashion_mnist"])
GLYPHS = dict(model="resnet18", mod=False, width=0.25, epochs=5, schedule="one_cycle",
              ood=["glyphs_letters"])
PRESETS = {
    "cifar10": dict(augment=True, ood=["svhn", "cifar100", "tiny_imagenet"]),
    "cifar100": dict(augment=True, ood=["svhn", "tiny_imagenet"]),
    "svhn": dict(ood=["cifar10", "cifar100"]),
    "tiny_imagenet": dict(model="resnet50", augment=True),
    # This network is pretrained, so there is no epoch of training.
    "imagenet": dict(model="torchvision/resnet50", sn=False, mod=False, epochs=0, batch_size=256,
                     ood=["imagenet_o"]),
    "mnist": MNIST,
    "fashion_mnist": dict(MNIST, ood=["mnist"]),
    "dirty_mnist": dict(MNIST, epochs=100),
    "glyphs": GLYPHS,
    "dirty_glyphs": GLYPHS,
    "numbers": GLYPHS,
    # Your own images: a small network that trains on two CPU cores in minutes.
    "folder": dict(model="resnet18", mod=False, width=0.25, epochs=20, batch_size=32, lr=0.01,
                   schedule="one_cycle", augment=True, ood=[], shrinkage=True,
                   entropy_threshold=None),
    # Your own network: a few careful epochs, or its last layer alone.
    "pretrained": dict(sn=False, mod=False, width=1.0, epochs=10, batch_size=32, lr=0.02,
                       weight_decay=5e-4, schedule="one_cycle", augment=True, shrinkage=True,
                       entropy_threshold=None),
    "frozen": dict(epochs=30, lr=0.01, weight_decay=0.05, augment=False),
}
# published code: active learning uses one recipe for all data sets, a ResNet-18
ACTIVE_LEARNING = dict(model="resnet18", sn=None, mod=None, opt="adam", lr=1e-3,
                       weight_decay=5e-4, batch_size=64, epochs=20, schedule="constant",
                       augment=False, ood=[], ensemble=5)
# These only change what is computed from trained networks, so they do not identify a run.
EVALUATION_OPTIONS = ("ood", "shrinkage", "density_quantile", "entropy_quantile",
                      "entropy_threshold", "ensemble", "score", "validation", "active_learning",
                      "num_initial_samples", "max_training_samples", "acquisition_batch_size",
                      "subsample")
USED_BY_FEATURES = ("features", "score", "validation", "seed", "shrinkage", "density_quantile",
                    "entropy_quantile", "entropy_threshold", "data_dir", "out_dir", "name",
                    "device", "fresh", "plot")
# Options of the published commands, and what to type instead.
PUBLISHED_WORDS = {
    "--dataset-root": "--data-dir",
    "--model-type": "nothing: all scores are computed, and those of an ensemble with --ensemble M",
    "--load-path": "--load FILE.model ..., or --eval for a run of this script",
    "--al-type": "--active-learning density (gmm), entropy (softmax), pe (ensemble)",
    "-mi": "--active-learning mi",
    "-ambiguous": "--dataset dirty_mnist",
    "--nesterov": "nothing: SGD without Nesterov's momentum, as the published default",
    "--mom": "nothing: the momentum is 0.9, as the published default",
    "--first-milestone": "--milestones FIRST SECOND",
    "--second-milestone": "--milestones FIRST SECOND",
}


def parse_args(argv=None):
    words = sys.argv[1:] if argv is None else argv
    for word in words:
        name = word.split("=")[0]
        if name in PUBLISHED_WORDS:
            raise UserError(f"{name}: of the published code; here it is {PUBLISHED_WORDS[name]}")
    parser = common.Parser("ddu", __doc__, PRESETS, NETWORKS, dataset="dirty_glyphs",
                           model="wide_resnet", epochs=350, batch_size=128, lr=0.1)
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument_group("ddu.py").add_argument
    add("-sn", "--sn", action=flag, default=True,
        help="use soft spectral normalisation in every layer but the head")
    add("--coeff", type=at_least(1e-6, float), default=3.0,
        help="upper bound on the spectral norm of a layer (paper: 3)")
    add("-mod", "--mod", action=flag, default=True,
        help="use leaky ReLU, and average pooling instead of 1x1 convolutions in shortcuts")
    add("--opt", choices=["sgd", "adam"], default="sgd",
        help="optimiser; Adam needs a learning rate near 1e-3 (paper: SGD with momentum 0.9)")
    add("--weight-decay", "--decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters (paper: 5e-4)")
    add("--schedule", choices=["step", "one_cycle", "constant"], default="step",
        help="'step' divides the learning rate by 10 at the milestones; 'one_cycle' is better for "
        "short runs")
    add("--milestones", type=at_least(1), nargs=2, metavar="EPOCH",
        help="epochs of --schedule step, otherwise 3/7 and 5/7 of all (paper: 150 and 250 of 350)")
    add("--augment", action=flag, default=False,
        help="use random crops and flips (published code: only for CIFAR)")
    add("--ood", "--ood_dataset", nargs="*", metavar="NAME", default=["svhn"],
        help="out-of-distribution sets; folder:PATH is a folder of images, nonsense are patterns "
        "and noise")
    add("--shrinkage", action=flag, default=False,
        help="shrink the covariances (Ledoit and Wolf), for few examples per class")
    add("--density-quantile", type=between(0, 1), default=0.01,
        help="an input is out-of-distribution if its log density is below this quantile of the "
        "validation set's")
    add("--entropy-threshold", type=at_least(0, float), default=0.35,
        help="other inputs are ambiguous if their softmax entropy (--features: the entropy of "
        "q(c|z)) is above this, in nats; your own data: above --entropy-quantile")
    add("--entropy-quantile", type=between(0, 1), default=0.95,
        help="quantile of the validation set's entropies that is the threshold for your own data")
    add("--ensemble", type=at_least(1), default=1, metavar="M",
        help="number of networks; for more than one, the ensemble is also evaluated (paper: 5)")
    add("--load", nargs="+", metavar="FILE",
        help="evaluate networks that the published code has trained; several are an ensemble")
    add("--features", metavar="NPZ", help="fit the Gaussians to your own features: a file with "
        "'features' [N, D] and 'labels' [N]")
    add("--score", nargs="+", default=[], metavar="NPZ",
        help="files to score with --features; the first one is in-distribution")
    add("--validation", metavar="NPZ", help="features that determine the thresholds of --features, "
        "otherwise a tenth of them, which is held out")
    add("--active-learning", nargs="+", metavar="NAME",
        choices=("density", "entropy", "pe", "mi", "random"),
        help="label a pool step by step, and compare acquisition functions: density, entropy, pe "
        "and mi (predictive entropy and mutual information of an ensemble), random")
    add("--num-initial-samples", type=at_least(2), default=20,
        help="active learning: number of labels at the start (published code: 20)")
    add("--max-training-samples", type=at_least(2), default=300,
        help="active learning: number of labels at the end (published code: 300)")
    add("--acquisition-batch-size", type=at_least(1), default=5,
        help="active learning: number of new labels in each step (published code: 5)")
    add("--subsample", type=at_least(1), default=1000,
        help="active learning: number of clean examples in a pool that also has ambiguous ones "
        "(published code: 1000)")
    args = parser.parse(argv)
    if args.active_learning:
        args.active_learning = list(dict.fromkeys(args.active_learning))
        for name, value in ACTIVE_LEARNING.items():
            if name not in args.given:
                setattr(args, name, value)
    if args.features and "entropy_threshold" not in args.given:
        args.entropy_threshold = None
    check_options(args)
    if args.load:
        args.ensemble = len(args.load)
        for path in args.load:
            take_published_options(path, args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if bool(args.features) != bool(args.score):
        raise UserError("--features TRAIN.npz and --score FILE.npz ... must be used together")
    if (args.features or args.active_learning) and common.world_size() > 1:
        raise UserError("--features and --active-learning run in one process: start without "
                        "torchrun")
    if args.max_training_samples < args.num_initial_samples:
        raise UserError(f"--max-training-samples {args.max_training_samples}: must be at least "
                        f"--num-initial-samples {args.num_initial_samples}")
    pretrained = args.model.startswith("torchvision/")
    if (pretrained or args.model == "lenet") and (args.sn or args.mod) and not args.load:
        raise UserError(f"--model {args.model} has neither spectral normalisation nor -mod; "
                        "add --no-sn --no-mod")
    if args.load and args.model not in PUBLISHED_LAYERS:
        raise UserError(f"--load: choose --model {', '.join(PUBLISHED_LAYERS)}")

    acquisitions = args.active_learning or []
    no_effect = [
        (args.features, args.given - set(USED_BY_FEATURES), "with --features"),
        (not args.features, ["validation"], "without --features"),
        (not acquisitions, ["num_initial_samples", "max_training_samples",
                            "acquisition_batch_size", "subsample"], "without --active-learning"),
        (acquisitions, ["ood", "predict", "limit_train", "load", "freeze", "density_quantile",
                        "entropy_threshold", "entropy_quantile"], "with --active-learning"),
        (acquisitions and "density" not in acquisitions, ["shrinkage"],
         "without --active-learning density"),
        (acquisitions and not {"pe", "mi"} & set(acquisitions), ["ensemble"],
         "without --active-learning pe or mi"),
        (args.dataset not in PARTS, ["subsample"], f"with --dataset {args.dataset}"),
        (args.load, ["epochs", "lr", "opt", "weight_decay", "schedule", "augment", "limit_steps",
                     "limit_train", "ensemble", "runs", "eval"], "with --load"),
        (args.schedule != "step", ["milestones"], f"with --schedule {args.schedule}"),
        (args.entropy_threshold is not None, ["entropy_quantile"], "with --entropy-threshold"),
        (not pretrained, ["weights", "freeze"], "without --model torchvision/NAME"),
        (args.freeze, ["augment"], "with --freeze"),
        (pretrained or args.model == "lenet", ["width"], f"with --model {args.model}"),
        (args.sn is False, ["coeff"], "without --sn"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args, seed):
    """All sets of a run; `seed` splits off the validation set."""
    for name in args.ood:
        if data.set_name(name) in PARTS.get(args.dataset, {}):
            raise UserError(f"--ood {name}: {args.dataset} has a part of this name; rename the set")
    statistics = None
    if args.load and args.dataset in ("cifar100", "svhn"):
        # published code: the statistics of CIFAR-10
        cifar10 = data.SOURCES["cifar10"]
        statistics = (cifar10.mean, cifar10.std)
    # A network that is not trained here has been trained elsewhere, probably on all training
    # images: a temperature and thresholds from a part of these would be too optimistic.
    is_trained = args.epochs > 0 or args.load or args.dataset in PARTS
    sets = data.load_sets(args.dataset, args.data_dir, seed=seed, image_size=args.image_size,
                          val_fraction=0.1 if is_trained else 0, limit_train=args.limit_train,
                          statistics=statistics, ood=args.ood, ood_required="ood" in args.given,
                          predict=args.predict,
                          preparation=data.preparation_of(args.model, args.weights,
                                                          args.image_size))
    if sets.val is None:
        test, val = data.train_val_split(len(sets.test), seed)
        sets = sets._replace(val=sets.test.select(val), test=sets.test.select(test))
        common.print_on_main("the thresholds and the temperature come from a tenth of the test "
                             "set, which is not evaluated, because the network is not trained here")
    elif args.dataset == "imagenet" and data.is_pretrained(args):
        common.print_on_main("note: the thresholds and the temperature are optimistic, because "
                             "they come from images that the pretrained network was trained on")
    if args.freeze:
        sets = data.frozen_features(sets, args)
    return sets


def check_network(train_set, args):
    """Refuse, before training, a network that fails on a batch, or Gaussians that do not fit."""
    net = make_network(args, train_set.num_classes, train_set.shape)
    # The last batch of an epoch is the smallest; two images show errors of shape.
    smallest = len(train_set) % args.batch_size or args.batch_size
    images = torch.zeros(min(smallest, 2), *train_set.shape).to(net.head.weight)
    try:
        net.train(args.epochs > 0)(images)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} images {train_set.shape}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None
    for path in args.load or []:
        load_published(path, net, args.model)
    counts = train_set.labels.bincount(minlength=train_set.num_classes)
    if counts.min() < 2:
        raise UserError(f"class {counts.argmin()} of {train_set.name} has {counts.min()} training "
                        "example(s), but its Gaussian needs two")
    needed = 16 * len(counts) * net.head.in_features**2  # covariances and Cholesky factors
    memory = common.device_memory(args.device)
    if memory and needed > memory:
        raise UserError(f"{len(counts)} Gaussians of {net.head.in_features} features need "
                        f"{needed / 1e9:.0f} GB, and the device has {memory / 1e9:.0f} GB; use a "
                        "smaller --width, or --device cpu")


def run_name(args):
    """The name of the run directory."""
    sn = f"sn{args.coeff:g}" if args.sn else None
    mod = "mod" if args.mod else None
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    al = "al" if args.active_learning else None
    loaded = Path(args.load[0]).stem if args.load else None
    name = data.set_name(args.dataset)
    return common.join_name(name, args.model, sn, mod, width, frozen, al, loaded,
                            f"seed{args.seed}")


def evaluate(members, sets, network_bytes, seed, args, run):
    """Steps 2 and 3: the rows of one seed, and the files of the first seed.

    members: for each network a data.Sets of Outputs, which only the main process has
    """
    fitted = fit_outputs(members[0], sets.train.num_classes, args)
    # The whole test set, and its clean and ambiguous part, if it has them.
    parts = {sets.test.name: slice(None)} | PARTS.get(args.dataset, {})
    names = list(parts)
    outputs = [by_set(of_network, parts) for of_network in members]
    start = time.perf_counter()
    scored = {name: score_network(out, fitted) for name, out in outputs[0].items()}
    examples = sum(len(out.labels) for out in outputs[0].values())
    scoring_ms = 1000 * (time.perf_counter() - start) / examples
    normal = fitted.gaussians.normal
    cost = {"ms": members[0].test.ms + scoring_ms,
            "bytes": network_bytes + normal.loc.nbytes + normal.scale_tril.nbytes
            + fitted.gaussians.log_prior.nbytes}
    rows = [row | cost for row in network_rows(names, scored, fitted, seed)]
    if len(members) > 1:
        temperatures = [common.fit_temperature(of_network.val.logits, of_network.val.labels)
                        for of_network in members]
        of_ensemble = {}
        for name in scored:
            of_set = [of_network[name] for of_network in outputs]
            of_ensemble[name] = score_ensemble(of_set, temperatures)
        cost = {"ms": sum(of_network.test.ms for of_network in members),
                "bytes": len(members) * network_bytes}
        method = f"ensemble of {len(members)}"
        rows += [row | cost for row in result_rows(method, seed, names, of_ensemble)]
    if seed == args.seed and args.predict:
        write_predictions(members, fitted, sets, run)
    if seed == args.seed and args.plot:
        # The parts of the test set if it has any, else the test set.
        plot_uncertainty(names[-2:] + list(sets.ood), scored, fitted, run)
        plot_reliability(members[0].test, fitted.temperature, run)
    return rows


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    if args.features:
        return run_features(args)
    if args.active_learning:
        return run_active_learning(args)

    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args, args.seed)
    check_network(sets.train, args)
    run = common.Run(args, "ddu", run_name(args), EVALUATION_OPTIONS)
    rows = []
    for seed in range(args.seed, args.seed + args.runs):
        if seed > args.seed:
            sets = load_sets(args, seed)  # another validation set
        # Algorithm 1: train a network, fit the Gaussians to its features, score all sets.
        members = []
        for member in range(args.ensemble):
            net = make_member(sets.train, args, run, seed, member)
            members.append(forward_all(net, sets, args))
        network_bytes = sum(tensor.nbytes for tensor in net.state_dict().values())
        rows += common.on_main(evaluate, members, sets, network_bytes, seed, args, run)
    # The columns of the table that is printed; results.csv has all of them.
    columns = ["accuracy", "nll", "ece15", "ece15_scaled", "fraction_ood", "auroc_density",
               "auroc_total", "auroc_epistemic"]
    return run.report(rows, columns)


if __name__ == "__main__":
    common.launch(main)
