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
  python ddu.py --eval --predict glyphs_letters         # evaluate again, predict another set
  python ddu.py --features train.npz --score test.npz ood.npz    # on your own features

Expected (more in tests/RESULTS.md): `OMP_NUM_THREADS=1 python ddu.py --runs 3`, 100 seconds per
  seed on a CPU core: AUROC of letters against digits and blends of digits 0.966 +- 0.001 by the
  density, 0.688 +- 0.007 by the softmax entropy (mean +- standard error, n = 3).

Differences from the published code (github.com/omegafragger/DDU, commit f597744):
  - Densities include q(c) = n_c / N, as in the paper; the published evaluation leaves it out.
  - Class log densities stay in float64. The published evaluation rounds them to float32, where
    the posteriors of the Gaussians tie.
  - The jitter is relative to the variance of the features. The published search looks for the
    text of an error message that current PyTorch does not use (issues #4 and #8 there).
  - The OOD threshold is a quantile of the validation densities; there it is chosen by eye.
  - The temperature is the exact optimum, not the best of 100 grid points.
  - Ambiguous-MNIST repeats each image ten times; here no image is in both the training and the
    validation set. CIFAR-100 and SVHN are normalised by their own statistics, not by CIFAR-10's.
  - Active learning ranks log densities (densities underflow to ties), needs no validation set,
    knows the ambiguous examples from their labels, and sees each label in each epoch.
  - The members of an ensemble are networks like the single one, trained on the same split; there,
    they are plain networks on different splits.
  - The last, smaller batch of an epoch is used; there, it is dropped. --shrinkage is new.
"""

import argparse
import math
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

# ---- Arguments ----------------------------------------------------------------------------------

# published code: figures 1 and 2 use ResNet-18 with spectral normalisation, without -mod
MNIST = dict(model="resnet18", mod=False, ood=["fashion_mnist"])
GLYPHS = dict(model="resnet18", mod=False, width=0.25, epochs=5, schedule="one_cycle",
              ood=["glyphs_letters"])
PRESETS = {
    # The defaults of every preset, the paper's recipe: WRN-28-10 with spectral
    # normalisation; the learning rate is divided by 10 after epochs 150 and 250.
    "": dict(model="wide_resnet", sn=True, mod=True, coeff=3.0, opt="sgd", lr=0.1,
             weight_decay=5e-4, batch_size=128, epochs=350, schedule="step", augment=False,
             ood=["svhn"]),
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
                   schedule="one_cycle", augment=True, ood=[], shrinkage=True),
}
# published code: active learning uses one recipe for all data sets, a plain ResNet-18
ACTIVE_LEARNING = dict(model="resnet18", sn=False, mod=False, opt="adam", lr=1e-3,
                       weight_decay=5e-4, batch_size=64, epochs=20, schedule="constant",
                       augment=False, ood=[], ensemble=5)
# Unions of a clean and an ambiguous set: which rows of the test set each has.
PARTS = {
    "dirty_mnist": {"mnist": slice(10_000), "ambiguous_mnist": slice(10_000, None)},
    "dirty_glyphs": {"glyphs": slice(2_000), "glyphs_ambiguous": slice(2_000, None)},
}

ACQUISITIONS = ("density", "entropy", "pe", "mi", "random")


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "dirty_glyphs",
                           modes={"active_learning": ACTIVE_LEARNING})
    flag = argparse.BooleanOptionalAction
    add = parser.group("network").add_argument
    add("--model", help="lenet, resnet18, resnet50, wide_resnet, vgg16, or torchvision/NAME for a "
        "pretrained network, with NAME as in torchvision.models.get_model")
    add("--weights", default="DEFAULT",
        help="weights of torchvision/NAME: DEFAULT downloads them; or a file with a state dict")
    add("-sn", "--sn", action=flag,
        help="use soft spectral normalisation in every layer but the head")
    add("--coeff", type=at_least(1e-6, float),
        help="upper bound on the spectral norm of a layer (paper: 3)")
    add("-mod", "--mod", action=flag,
        help="use leaky ReLU, and average pooling instead of 1x1 convolutions in shortcuts")

    add = parser.group("training").add_argument
    add("--opt", choices=["sgd", "adam"],
        help="optimiser; Adam needs a learning rate near 1e-3 (paper: SGD with momentum 0.9)")
    add("--weight-decay", "--decay", type=at_least(0, float),
        help="weight decay of all parameters (paper: 5e-4)")
    add("--schedule", choices=["step", "one_cycle", "constant"],
        help="'step' divides the learning rate by 10 after 3/7 and 5/7 of the epochs (paper); "
        "'one_cycle' is better for short runs")
    add("--augment", action=flag,
        help="use random crops and flips (published code: only for CIFAR)")

    add = parser.group("evaluation").add_argument
    add("--ood", "--ood_dataset", nargs="*", metavar="NAME",
        help="out-of-distribution sets; folder:PATH is a folder of images")
    add("--shrinkage", action=flag, default=False,
        help="shrink the covariances (Ledoit and Wolf), for few examples per class")
    add("--density-quantile", type=between(0, 1), default=0.01,
        help="an input is out-of-distribution if its log density is below this quantile of the "
        "validation set's")
    add("--entropy-threshold", type=at_least(0, float), default=0.35,
        help="other inputs are ambiguous if their softmax entropy (--features: the entropy of "
        "q(c|z)) is above this, in nats")
    add("--ensemble", type=at_least(1), default=1, metavar="M",
        help="number of networks; for more than one, the ensemble is also evaluated (paper: 5)")
    add("--score", nargs="+", default=[], metavar="NPZ",
        help="files to score with --features; the first one is in-distribution")
    add("--active-learning", nargs="+", choices=ACQUISITIONS, metavar="NAME",
        help="label a pool step by step, and compare acquisition functions: density, entropy, pe "
        "and mi (predictive entropy and mutual information of an ensemble), random")

    add = parser.group("method").add_argument
    add("--features", metavar="NPZ", help="fit the Gaussians to your own features: a file with "
        "'features' [N, D] and 'labels' [N], a tenth of which is held out")
    add("--num-initial-samples", type=at_least(2), default=20,
        help="active learning: number of labels at the start (published code: 20)")
    add("--max-training-samples", type=at_least(2), default=300,
        help="active learning: number of labels at the end (published code: 300)")
    add("--acquisition-batch-size", type=at_least(1), default=5,
        help="active learning: number of new labels in each step (published code: 5)")
    args = parser.parse(argv)
    check_options(args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if bool(args.features) != bool(args.score):
        raise UserError("--features TRAIN.npz and --score FILE.npz ... must be used together")
    if args.features:
        unused = [name for name in args.identity if name not in ("features", "seed")]
        unused += ["active_learning", "ensemble", "eval", "ood", "predict", "runs"]
        common.refuse(args, unused, "with --features")
        args.identity = ["features", "seed"]
    if args.active_learning:
        common.refuse(args, ["ood", "predict", "density_quantile", "entropy_threshold",
                             "limit_train"], "with --active-learning")
        if "density" not in args.active_learning:
            common.refuse(args, ["shrinkage"], "without --active-learning density")
        if not {"pe", "mi"} & set(args.active_learning):
            common.refuse(args, ["ensemble"], "without --active-learning pe or mi")
    else:
        common.refuse(args, ["num_initial_samples", "max_training_samples",
                             "acquisition_batch_size"], "without --active-learning")
    if (args.features or args.active_learning) and common.world_size() > 1:
        raise UserError("--features and --active-learning run in one process: start without "
                        "torchrun")
    if args.max_training_samples < args.num_initial_samples:
        raise UserError(f"--max-training-samples {args.max_training_samples}: must be at least "
                        f"--num-initial-samples {args.num_initial_samples}")
    pretrained = args.model.startswith("torchvision/")
    if not pretrained:
        common.refuse(args, ["weights"], "without --model torchvision/NAME")
    if pretrained or args.model == "lenet":
        common.refuse(args, ["width"], f"with --model {args.model}")
        if args.sn or args.mod:
            raise UserError(f"--model {args.model} has neither spectral normalisation nor -mod; "
                            "add --no-sn --no-mod")
    if not args.sn:
        common.refuse(args, ["coeff"], "without --sn")


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
    if tuple(shape) != (1, 28, 28):
        raise UserError(f"--model lenet needs grey images of 28x28 pixels, not {tuple(shape)}")
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


def resnet18(args, shape):
    return resnet(args, shape, basic_block, expansion=1, depths=(2, 2, 2, 2))


def resnet50(args, shape):
    return resnet(args, shape, bottleneck_block, expansion=4, depths=(3, 4, 6, 3))


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
NETWORKS = {"lenet": lenet, "resnet18": resnet18, "resnet50": resnet50, "wide_resnet": wide_resnet,
            "vgg16": vgg16}


def make_network(args, num_classes, shape):
    """The network --model for images of `shape` (C, H, W), on its device."""
    if args.model.startswith("torchvision/"):
        net = torchvision_network(args, num_classes)
    elif args.model in NETWORKS:
        made = NETWORKS[args.model](args, shape)
        layers, dim = common.check_layers(args.model, made, shape)
        net = Network(nn.Sequential(*layers), nn.Linear(dim, num_classes))
    else:
        names = ", ".join(NETWORKS)
        raise UserError(f"--model {args.model}: choose one of {names}, torchvision/NAME")

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


def torchvision_network(args, num_classes):
    """A pretrained classifier, whose features are the inputs of its last linear layer."""
    from torchvision import models

    name = args.model.removeprefix("torchvision/")
    state = None
    weights = "DEFAULT"
    if args.weights != "DEFAULT":
        state = common.load_checkpoint(args.weights)
        weights = None

    def read():
        try:
            net = models.get_model(name, weights=weights, num_classes=num_classes)
            if state is not None:
                net.load_state_dict(state)
            linear_layers = [n for n, layer in net.named_modules() if isinstance(layer, nn.Linear)]
            return net, linear_layers[-1]
        except Exception as error:  # unknown name, no download, no linear layer, other shapes
            raise UserError(f"--model {args.model} --weights {args.weights}: "
                            f"{common.one_line(error)}; give the name of a classifier of "
                            f"torchvision for {num_classes} classes, and its weights") from None

    net, last = common.on_each_machine(read)
    head = net.get_submodule(last)
    net.set_submodule(last, nn.Identity())
    return Network(net, head)


# ---- Method -------------------------------------------------------------------------------------
# To copy this section, copy these imports, too:
#   from typing import NamedTuple
#   import torch
#   import torch.nn.functional as F
#   from torch import Tensor, nn
#   from torch.distributions import MultivariateNormal
#   from torch.nn.utils import parametrize


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

    def record_shape(layer, inputs, output):
        input_shapes[layer] = inputs[0].shape[1:]

    hooks = []
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            hooks.append(module.register_forward_hook(record_shape))
    net.eval()  # so that the zeros do not enter the running averages of batch norm
    any_weight = next(net.parameters())
    net(torch.zeros(1, *shape).to(any_weight))
    net.train(was_training)
    for hook in hooks:
        hook.remove()

    for layer, input_shape in input_shapes.items():
        parametrisation = SoftSpectral(layer, input_shape, coeff)
        # unsafe=True skips PyTorch's test call, which would do a power iteration.
        parametrize.register_parametrization(layer, "weight", parametrisation, unsafe=True)


class Gaussians(NamedTuple):
    """q(z) = sum_c q(c) N(z; mu_c, Sigma_c + jitter I) of K classes, in float64."""

    normal: MultivariateNormal  # a batch of K, each of dimension D
    log_prior: Tensor           # [K]  log q(c), q(c) = n_c / N
    jitter: float


# published code: the smallest jitter that works; relative to the mean variance.
JITTERS = (0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)


def fit_gaussians(features, labels, num_classes, shrinkage=False):
    """Algorithm 1: fit a Gaussian with a full covariance (divisor n_c - 1) to each class.

    features [N, D] of any float type; labels [N] in 0..num_classes-1; shrinkage: covariances of
    `ledoit_wolf`. Memory: 16 K D^2 bytes while fitting, 8 K D^2 afterwards. Raises ValueError if a
    class has fewer than two examples, a feature is not finite, or a covariance remains singular
    with all JITTERS. A jitter above 0 says that a covariance was singular: unknown inputs then have
    densities that are far too low, and so do known ones; use shrinkage, or more examples.
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
    for relative in JITTERS:
        jitter = relative * variance.mean()
        diagonal.copy_(variance + jitter)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        # A pivot, the square of a diagonal element of the factor, is the variance of a
        # feature given the ones before it. In a singular matrix it can be a rounding
        # error instead of 0.
        pivots = factor.diagonal(dim1=1, dim2=2).square()
        singular = pivots <= rounding * diagonal
        if not failed.any() and not singular.any():
            return factor, jitter.item()
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
    """Scores [N] of softmax(logits [N, K] / temperature), float64; the entropy is in nats."""
    logits = logits.double() / temperature
    return {"entropy": softmax_entropy(logits), "max_prob": logits.softmax(1).amax(1),
            "energy": logits.logsumexp(1)}


# Large values of a score mean in-distribution ("id") or out-of-distribution ("ood"). The last two
# are those of an ensemble: the entropy of its mean, and the mutual information.
SCORES = {"density": "id", "gmm_entropy": "ood", "entropy": "ood", "max_prob": "id", "energy": "id",
          "total": "ood", "epistemic": "ood"}
REGIONS = ("clean", "ambiguous", "ood")


def decide(density, entropy, density_threshold, entropy_threshold):
    """The index in REGIONS of every input [N]."""
    region = (entropy > entropy_threshold).long()
    # paper: the pseudo-code has the opposite sign, but a LOW density means OOD
    region[density < density_threshold] = 2
    return region


# ---- Training -----------------------------------------------------------------------------------


def learning_rate(step, steps_per_epoch, args):
    """The learning rate at a step, counted from the start of training."""
    if args.schedule == "constant":
        return args.lr
    if args.schedule == "step":
        lr = args.lr
        for milestone in (150 / 350, 250 / 350):  # paper: epochs 150 and 250 of 350
            if step // steps_per_epoch >= max(1, round(args.epochs * milestone)):
                lr *= 0.1
        return lr
    # one_cycle: a linear warm-up in the first fifth of the steps, then linearly to zero
    total = args.epochs * steps_per_epoch
    warm_up = 0.2 * total
    if step < warm_up:
        return args.lr * ((step + 1) / (warm_up + 1))
    return args.lr * ((total - step) / (total - warm_up))


def make_optimiser(net, args):
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    if args.opt == "adam":
        return torch.optim.Adam(net.parameters(), **options)
    return torch.optim.SGD(net.parameters(), momentum=0.9, **options)


def train(net, train_set, args, seed, run, name=None):
    """Step 1: minimise the cross entropy.

    With the `name` of a checkpoint, training resumes from its last completed epoch.
    """
    optimiser = make_optimiser(net, args)
    # The order and the augmentation of the images depend only on the seed and the epoch.
    augment = "crop_flip" if args.augment else "none"
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         augment=augment, workers=args.workers, channels_last=True)
    steps = run.steps_per_epoch(loader)
    model = common.data_parallel(net, args.device)  # DDP, with batch norm over all processes
    if args.compile:
        model = torch.compile(model)

    # Checkpoints contain the network and the optimiser. The loop starts at the first
    # epoch that is left, and `run.end_epoch` saves and logs.
    for epoch in run.epochs(args.epochs, name, train_set, net=net, optimiser=optimiser):
        # Every epoch is seeded, so that a resumed run draws the same dropout masks.
        common.seed_all(seed, epoch, common.rank())
        model.train()
        totals = torch.zeros(3, device=args.device)  # loss, correct predictions, examples
        for step, batch in run.steps(loader, epoch):
            # A function of the step: a resumed run needs no state of a scheduler.
            lr = learning_rate(epoch * steps + step, steps, args)
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
        run.end_epoch(loss / examples, accuracy=correct / examples, lr=lr, examples=examples)


def train_member(train_set, args, run, seed, member):
    """Train one member of an ensemble; the first one is the single network."""
    name = f"seed{seed}"
    if member > 0:
        name = f"seed{seed}-member{member}"
        seed = common.derive_seed(seed, member)
    common.seed_all(seed)
    net = make_network(args, train_set.num_classes, train_set.shape)
    train(net, train_set, args, seed, run, name)
    return net


# ---- Evaluation ---------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """The outputs of a network for one set, in the order of the set, on the CPU."""

    logits: Tensor    # [N, K] float32
    features: Tensor  # [N, D] float32
    labels: Tensor    # [N]


class Fitted(NamedTuple):
    """What steps 2 and 3 fit to the outputs of one network."""

    gaussians: Gaussians
    val_density: Tensor  # [N_val]  log densities of the validation set, ascending
    threshold: float     # an input is OOD if its log density is lower
    temperature: float   # of the softmax, chosen on the validation set


@torch.no_grad()
def forward(net, dataset, args):
    """The Outputs for a whole set in eval mode; None on all processes but the main one."""
    net.eval()
    loader = data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                         channels_last=True)
    batches = []
    for batch in loader.epoch():
        with common.autocast(args):
            logits, features = net(batch.images)
        batches.append({"index": batch.index, "logits": logits.float(),
                        "features": features.float()})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    return Outputs(columns["logits"], columns["features"], dataset.labels)


def forward_all(net, sets, args):
    """A data.Sets of the Outputs for all sets of a run; None where there is no set."""
    ood = {name: forward(net, dataset, args) for name, dataset in sets.ood.items()}
    predict = None
    if sets.predict is not None:
        predict = forward(net, sets.predict, args)
    return data.Sets(forward(net, sets.train, args), forward(net, sets.val, args),
                     forward(net, sets.test, args), ood, predict)


def fit_outputs(outputs, num_classes, args):
    """Step 2, and the threshold and the temperature, which the validation set determines."""
    gaussians = fit(outputs.train.features, outputs.train.labels, num_classes, args)
    val_density = validation_densities(gaussians, outputs.val.features, args)
    threshold = val_density.quantile(args.density_quantile).item()
    temperature = common.fit_temperature(outputs.val.logits, outputs.val.labels)
    if temperature in common.TEMPERATURES:
        reason = "the network makes no error on the validation set"
        if temperature > 1:
            reason = "the network is no better than guessing"
        print(f"note: the temperature {temperature:g} is a limit of the search: {reason}")
    return Fitted(gaussians, val_density, threshold, temperature)


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
        print(f"note: a covariance is singular (class {counts.argmin()} has {counts.min()} "
              f"examples, {features.shape[1]} features), so {gaussians.jitter:.2g} was added to "
              "all variances; --shrinkage or more examples give better densities")
    return gaussians


def validation_densities(gaussians, features, args):
    """The log densities of the validation set, ascending, with a note where they are few."""
    log_densities = class_log_densities(gaussians, features)
    if len(features) < 1 / max(args.density_quantile, 1e-9):
        print(f"note: the {args.density_quantile:.3g} quantile of {len(features)} validation "
              "examples is about their minimum, a rough threshold for OOD inputs")
    return density_scores(log_densities)["density"].sort().values


def density_columns(density, entropies, val_density, args):
    """Log density, its percentile in the validation set, and the decision, for each input [N]."""
    threshold = val_density.quantile(args.density_quantile)
    region = decide(density, entropies, threshold, args.entropy_threshold)
    # The share of the validation set with a lower density: 0 is far out.
    below = torch.searchsorted(val_density, density).double()
    percentile = 100 * below / len(val_density)
    return {"log_density": density, "density_percentile": percentile,
            "decision": [REGIONS[r] for r in region]}


def all_scores(outputs, fitted):
    """All scores [N] of a set; <score>_scaled is that of the softmax at the temperature."""
    scores = density_scores(class_log_densities(fitted.gaussians, outputs.features))
    scores |= softmax_scores(outputs.logits)
    scaled = softmax_scores(outputs.logits, fitted.temperature)
    for name, values in scaled.items():
        scores[f"{name}_scaled"] = values
    return scores


def by_set(outputs, names):
    """{set: Outputs} of the test set, of its clean and ambiguous part, and of the OOD sets.

    names: of the test set, then of its parts, if it has them
    """
    found = {names[0]: outputs.test}
    for part in names[1:]:
        rows = PARTS[names[0]][part]
        found[part] = Outputs(*[column[rows] for column in outputs.test])
    return found | outputs.ood


def network_rows(names, outputs, scores, fitted, args, seed):
    """The rows of one network, from {set: Outputs} and {set: {score: [N]}}."""
    rows = result_rows("DDU", seed, names, outputs, scores)
    for row in rows:
        if "against" not in row:
            out = outputs[row["set"]]
            metrics = prediction_metrics(out.logits.double() / fitted.temperature, out.labels)
            row |= {f"{metric}_scaled": value for metric, value in metrics.items()}
        # The fractions of the three regions, in the OOD set if the row has one.
        of_set = scores[row.get("against", row["set"])]
        region = decide(of_set["density"], of_set["entropy"], fitted.threshold,
                        args.entropy_threshold)
        fractions = region.bincount(minlength=3) / len(region)
        row |= {f"fraction_{name}": fraction for name, fraction in zip(REGIONS, fractions)}
        row["temperature"] = fitted.temperature
        row["density_threshold"] = fitted.threshold
        row["jitter"] = fitted.gaussians.jitter
    return rows


def ensemble_rows(names, members, seed):
    """The rows of an ensemble, from {set: Outputs} of each network; it averages probabilities."""
    outputs = {}
    scores = {}
    for name in members[0]:
        of_set = [of_network[name] for of_network in members]
        each = stack_log_probs(of_set)                                 # [M, N, K]
        log_probs = each.logsumexp(0) - math.log(len(members))         # [N, K]  log mean_m p_m
        # Logarithms of probabilities are logits: softmax gives the probabilities back.
        outputs[name] = of_set[0]._replace(logits=log_probs)
        parts = common.ensemble_uncertainty(each)
        scores[name] = {"total": parts["total"], "epistemic": parts["epistemic"]}
    return result_rows(f"ensemble of {len(members)}", seed, names, outputs, scores)


def stack_log_probs(outputs):
    """Log probabilities [M, N, K], float64, from the Outputs of M networks for one set."""
    return torch.stack([of_network.logits.double().log_softmax(1) for of_network in outputs])


def result_rows(method, seed, names, outputs, scores):
    """A row for each test set, then one for each pair of sets that the scores should separate.

    names: the test set, then its clean and its ambiguous part, if it has them; outputs
    {set: Outputs} and scores {set: {score: [N]}} of these and of the OOD sets
    """
    rows = []
    for name in names:
        out = outputs[name]
        row = {"method": method, "seed": seed, "set": name, "n": len(out.labels)}
        rows.append(row | prediction_metrics(out.logits, out.labels))

    # OOD sets are compared with the whole test set and with its clean part; the
    # ambiguous part is compared with the clean one.
    pairs = []
    for inside in names[:2]:
        for outside in outputs:
            if outside not in names:
                pairs.append((inside, outside))
    if len(names) > 1:
        pairs.append((names[1], names[2]))
    for inside, outside in pairs:
        row = {"method": method, "seed": seed, "set": inside, "against": outside,
               "n": len(outputs[inside].labels)}
        rows.append(row | detection_metrics(scores[inside], scores[outside]))
    return rows


def prediction_metrics(logits, labels):
    """Accuracy, likelihood and calibration of softmax(logits [N, K])."""
    log_probs = logits.double().log_softmax(1)
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


def write_predictions(members, fitted, sets, args, run):
    """--predict: predictions.csv, with the log density of the first network and the decision.

    The epistemic uncertainty is, of a single network, 1 - density_percentile / 100; of an ensemble,
    the mutual information in nats.
    """
    outputs = [of_network.predict for of_network in members]
    columns = common.prediction_columns(sets.predict, stack_log_probs(outputs), sets.train.classes)
    scores = all_scores(outputs[0], fitted)
    columns |= density_columns(scores["density"], scores["entropy"], fitted.val_density, args)
    if len(members) == 1:
        columns["epistemic"] = 1 - columns["density_percentile"] / 100
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------


def plot_uncertainty(names, scores, fitted, args, run):
    """Figures 1 and 2 of the paper for the sets `names`: entropy, density, and both."""
    # OOD densities may be very low; they are clipped to the left edge of the picture.
    highest = max(scores[names[0]]["density"].max().item(), fitted.threshold)
    lowest = fitted.threshold - 1.5 * (highest - fitted.threshold)
    most = max(scores[name]["entropy"].max().item() for name in names)

    figure, (left, middle, right) = common.make_figure(1, 3, figsize=(13, 3.8))
    for name, colour in zip(names, common.colours(len(names))):
        style = dict(color=colour, alpha=0.6, label=name.replace("_", " "))
        entropies = scores[name]["entropy"].numpy()
        densities = scores[name]["density"].clamp(lowest, highest).numpy()
        fraction = np.full(len(entropies), 1 / len(entropies))
        left.hist(entropies, 40, range=(0, most), weights=fraction, **style)
        middle.hist(densities, 60, range=(lowest, highest), weights=fraction, **style)
        some = np.linspace(0, len(entropies) - 1, 1500).astype(int)
        right.plot(densities[some], entropies[some], ".", ms=2.5, **style)
    # `decide` cuts the plane along these lines.
    middle.axvline(fitted.threshold, color="black", ls="--", lw=1)
    right.axvline(fitted.threshold, color="black", ls="--", lw=1)
    right.axhline(args.entropy_threshold, color="black", ls="--", lw=1)
    left.set(xlabel="softmax entropy (nats)", ylabel="fraction of the set", yscale="log")
    middle.set(xlabel="log density (lower ones at the left edge)", ylabel="fraction of the set")
    right.set(xlabel="log density", ylabel="softmax entropy (nats)",
              title="OOD on the left, ambiguous above")
    left.legend(frameon=False)
    run.save_figure(figure, "uncertainty.png")


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args, seed):
    """All sets of a run; `seed` splits off the validation set."""
    for name in args.ood:
        if data.set_name(name) in PARTS.get(args.dataset, {}):
            raise UserError(f"--ood {name}: {args.dataset} has a part of this name; rename the set")
    return data.load_sets(args.dataset, args.data_dir, seed=seed, image_size=args.image_size,
                          limit_train=args.limit_train, ood=args.ood,
                          ood_required="ood" in args.explicit, predict=args.predict)


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
    name = [data.set_name(args.dataset), args.model]
    if args.sn:
        name.append(f"sn{args.coeff:g}")
    if args.mod:
        name.append("mod")
    if args.width != 1:
        name.append(f"w{args.width:g}")
    if args.active_learning:
        name.append("al")
    return common.join_name(*name, f"seed{args.seed}")


def run_features(args):
    """--features: fit and score features that were computed elsewhere; a tenth is held out."""
    run = common.Run(args, "ddu", f"features-{Path(args.features).stem}-seed{args.seed}")
    features, labels = data.read_labelled_features(args.features)
    files = {}
    for path in args.score:
        if Path(path).stem in files:
            raise UserError(f"--score: two files are called {Path(path).stem}; rename one")
        files[Path(path).stem] = data.read_features(path, features.shape[1])
    train, val = data.train_val_split(len(labels), args.seed)
    if len(val) == 0:
        raise UserError(f"{args.features} has {len(labels)} examples; at least 10 are needed to "
                        "hold a tenth out")
    gaussians = fit(features[train], labels[train], int(labels.max()) + 1, args)
    val_density = validation_densities(gaussians, features[val], args)

    rows = []
    first = next(iter(files))
    for name, z in files.items():
        log_densities = class_log_densities(gaussians, z)
        scores = density_scores(log_densities)
        confidence, predicted = log_densities.softmax(1).max(1)        # of q(c|z)
        columns = {"index": list(range(len(z))), "predicted": predicted, "confidence": confidence}
        # Without a softmax, the entropy of q(c|z) tells ambiguous inputs from clean ones.
        columns["gmm_entropy"] = scores["gmm_entropy"]
        columns |= density_columns(scores["density"], scores["gmm_entropy"], val_density, args)
        run.write_csv(f"scores_{name}.csv", columns)

        row = {"method": "DDU", "seed": args.seed, "set": first, "n": len(files[first]),
               "jitter": gaussians.jitter,
               "fraction_ood": columns["decision"].count("ood") / len(z)}
        if name == first:
            inside = scores
        else:
            row["against"] = name
            row |= detection_metrics(inside, scores)
        rows.append(row)
    return run.report(rows, ["fraction_ood", "auroc_density", "auroc_gmm_entropy"])


class Pool(NamedTuple):
    """What active learning starts from."""

    images: data.ImageSet  # P examples, whose labels are hidden until they are asked for
    start: Tensor          # rows that are labelled first
    ambiguous: Tensor      # [P] bool
    test: data.ImageSet


def active_learning_pool(args, seed):
    """The pool of one run; of dirty_mnist and dirty_glyphs it holds few clean examples."""
    generator = torch.Generator().manual_seed(seed)
    names = list(PARTS.get(args.dataset, [args.dataset]))
    images = data.load(names[0], "train", args.data_dir, seed=seed, val_fraction=0,
                       image_size=args.image_size)
    test = data.load(names[0], "test", args.data_dir, image_size=args.image_size)
    ambiguous = torch.zeros(len(images), dtype=torch.bool)
    if len(names) > 1:
        # published code: 1000 clean examples, and all ambiguous ones
        clean = images.select(torch.randint(len(images), (1000,), generator=generator))
        other = data.load(names[1], "train", args.data_dir, seed=seed, val_fraction=0)
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


def acquisition_step(pool, labelled, acquisition, seed, args, run):
    """Train networks from scratch on the labelled rows of the pool.

    Returns their test accuracy and scores [P] of the pool: high ones are labelled next.
    """
    # published code: an epoch has 5056 examples, drawn at random. Here, each labelled
    # example occurs nearly equally often.
    draws = torch.arange(max(5056, len(labelled)))
    train_set = pool.images.select(labelled[draws % len(labelled)])
    nets = []
    for member in range(args.ensemble if acquisition in ("pe", "mi") else 1):
        member_seed = common.derive_seed(seed, len(labelled), member)
        common.seed_all(member_seed)
        net = make_network(args, pool.images.num_classes, pool.images.shape)
        train(net, train_set, args, member_seed, run)
        nets.append(net)

    test_log_probs = stack_log_probs([forward(net, pool.test, args) for net in nets])
    accuracy = common.accuracy(test_log_probs.exp().mean(0), pool.test.labels)
    if acquisition == "random":
        return accuracy, torch.rand(len(pool.images))
    outputs = [forward(net, pool.images, args) for net in nets]
    if acquisition == "density":
        z = outputs[0].features
        gaussians = fit(z[labelled], pool.images.labels[labelled], pool.images.num_classes, args)
        return accuracy, -density_scores(class_log_densities(gaussians, z))["density"]
    parts = common.ensemble_uncertainty(stack_log_probs(outputs))
    if acquisition == "mi":
        return accuracy, parts["epistemic"]
    # pe, or for a single network the entropy of its softmax
    return accuracy, parts["total"]


def label_step_by_step(acquisition, pool, sizes, seed, args, run):
    """One run of active learning; it resumes from the last completed step.

    Returns the labelled rows in their order, and the test accuracies at the `sizes`.
    """
    name = f"{acquisition}-seed{seed}"
    state = run.load(name) or {"labelled": pool.start, "accuracies": []}
    labelled = state["labelled"]
    accuracies = state["accuracies"]
    for size in sizes[len(accuracies):]:
        if args.eval:
            raise UserError(f"{name} has {size} labels; finish it without --eval first")
        accuracy, score = acquisition_step(pool, labelled, acquisition, seed, args, run)
        accuracies.append(accuracy)
        # Label the rows with the highest scores among those without a label.
        score[labelled] = -math.inf
        ranking = score.sort(descending=True, stable=True).indices
        new = ranking[:args.acquisition_batch_size]
        labelled = torch.cat([labelled, new])[:sizes[-1]]
        run.save(name, labelled=labelled, accuracies=accuracies)
        print(f"{name}: {size} labels, test accuracy {accuracy:.4f}", flush=True)
    return labelled, accuracies


def run_active_learning(args):
    """--active-learning: compare acquisition functions on the same pools."""
    # These options, too, change what is labelled.
    identity = args.identity + ["ensemble", "shrinkage"]
    run = common.Run(args, "ddu", run_name(args), identity)
    last = args.max_training_samples
    sizes = list(range(args.num_initial_samples, last, args.acquisition_batch_size)) + [last]
    rows = []
    curves = {acquisition: [] for acquisition in args.active_learning}
    for seed in range(args.seed, args.seed + args.runs):
        pool = active_learning_pool(args, seed)
        check_network(pool.images, args)
        for acquisition in curves:
            labelled, accuracies = label_step_by_step(acquisition, pool, sizes, seed, args, run)
            curves[acquisition].append(accuracies)
            rows.append({"method": acquisition, "seed": seed, "set": pool.test.name,
                         "n": len(pool.test), "labels": last, "accuracy": accuracies[-1],
                         "accuracy_mean": np.mean(accuracies),
                         "ambiguous_share": pool.ambiguous[labelled].double().mean()})
    columns = ["labels", "accuracy", "accuracy_mean", "ambiguous_share"]
    return run.report(rows, columns, curves=curves, sizes=sizes)


# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "ece15_scaled", "fraction_ood", "auroc_density",
           "auroc_entropy", "auroc_total", "auroc_epistemic"]


def evaluate(members, sets, seed, args, run):
    """Steps 2 and 3 on the main process: the rows of one seed, and the files of the first seed.

    members: for each network a data.Sets of Outputs
    """
    fitted = fit_outputs(members[0], sets.train.num_classes, args)
    names = [sets.test.name] + list(PARTS.get(args.dataset, []))
    outputs = [by_set(of_network, names) for of_network in members]
    scores = {name: all_scores(out, fitted) for name, out in outputs[0].items()}
    rows = network_rows(names, outputs[0], scores, fitted, args, seed)
    if len(members) > 1:
        rows += ensemble_rows(names, outputs, seed)
    if seed == args.seed and args.predict:
        write_predictions(members, fitted, sets, args, run)
    if seed == args.seed and args.plot:
        # The parts of the test set if it has any, else the test set.
        plot_uncertainty(names[-2:] + list(sets.ood), scores, fitted, args, run)
    return rows


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    if args.features:
        return run_features(args)
    if args.active_learning:
        return run_active_learning(args)

    # Nothing is written before the first checkpoint: a refused start leaves nothing.
    run = common.Run(args, "ddu", run_name(args))
    rows = []
    for seed in range(args.seed, args.seed + args.runs):
        sets = load_sets(args, seed)
        check_network(sets.train, args)
        # Algorithm 1: train a network, fit the Gaussians to its features, score all sets.
        members = []
        for member in range(args.ensemble):
            net = train_member(sets.train, args, run, seed, member)
            members.append(forward_all(net, sets, args))
        rows += common.on_main(evaluate, members, sets, seed, args, run)
    return run.report(rows, COLUMNS)


if __name__ == "__main__":
    common.launch(main)
