"""Deep Deterministic Uncertainty: one softmax network, one Gaussian per class on its features.

Mukhoti, Kirsch, van Amersfoort, Torr, Gal, "Deep Deterministic Uncertainty: A New Simple Baseline",
CVPR 2023, arXiv:2102.11582. Method (Algorithm 1):

  1. Train a classifier whose feature extractor z = f(x) is sensitive (residual connections) and
     smooth (soft spectral normalisation, coefficient 3), by cross entropy, as usual.
  2. Fit q(z) = sum_c q(z|c) q(c), q(z|c) = N(z; mu_c, Sigma_c): means and full covariances of the
     training features, in eval mode, without augmentation. No OOD data, no further training.
  3. Epistemic uncertainty: low log q(z). Aleatoric: softmax entropy, where q(z) is high.

Usage:
  python ddu.py                                        # dirty_glyphs, offline, two cores, minutes
  torchrun --nproc_per_node 8 ddu.py --dataset cifar10 # the paper's WRN-28-10, 350 epochs
  python ddu.py --eval --predict glyphs_letters        # the table again, and predictions.csv
  python ddu.py --features train.npz --score test.npz ood.npz  # on your own features

Expected:
  dirty_glyphs, `python ddu.py --runs 3`, n = 3, mean +- standard error, two minutes a seed on two
    CPU cores: AUROC of letters against the test set: density 0.970 +- 0.003, softmax entropy 0.717
    +- 0.006; of ambiguous against clean digits: entropy 0.9953 +- 0.0004, density 0.913 +- 0.003.
    1.0 +- 0.1 % of the test set and 76 +- 2 % of the letters lie below the threshold.
  mnist, --width 0.25 --epochs 3 --schedule one_cycle, n = 1, 7 core-minutes: accuracy 99.45 %,
    AUROC of Fashion-MNIST: density 0.999, entropy 0.977.
  cifar10 against CIFAR-100, --model resnet18 --width 0.5 --epochs 16 --schedule one_cycle --ood
    cifar100, n = 1, 115 core-minutes: accuracy 90.6 %, AUROC density 0.810, entropy 0.854: at this
    size the density is behind.
  cifar10 against SVHN, WRN-28-10: not measured. The authors' repository gives accuracy
    95.97 +- 0.03 %, AUROC 98.09 +- 0.10 % (density) and 94.44 +- 0.43 % (softmax entropy).

Differs from the published code (github.com/omegafragger/DDU, commit f597744):
  - Class log densities stay in float64. The published evaluation keeps them in float32, where the
    posteriors of the Gaussians tie (64 features: entropy AUROC .56 where float64 gives .97).
  - The jitter is relative to the features' scale and found from their rank (the published search
    never fits on current PyTorch: issues 4 and 8); classes with fewer examples than features have
    an exact form. --shrinkage is an addition.
  - The OOD threshold is a quantile of held-out densities; there the user chooses one by eye.
  - The temperature is the optimum, not the best of 100 grid points.
  - Ambiguous-MNIST repeats each image ten times; no image is in both train and validation.
  - CIFAR-100 and SVHN have their own normalisation, not CIFAR-10's.
  - Active learning ranks log densities (there the float32 densities underflow to ties), has no
    validation split of the pool, and knows which examples are ambiguous from the pool, not from
    the entropy of another trained model; each labelled example is drawn in each epoch.
  - The network's softmax entropy and the entropy of the Gaussians' posterior have different names,
    AUPR-in and AUPR-out too. Densities carry q(c) only with --priors.
  - Members of an ensemble are networks like the single one, on one split of the data (there: plain
    ones, each on a split of its own).
  - Two moons is an ordinary run; the last batch of an epoch is kept (there: dropped).
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

PRESETS = {
    # paper: SGD 0.1, momentum 0.9, decay 5e-4 on everything, batch 128, 350 epochs, /10 at 150, 250
    "": dict(model="wide_resnet", sn=True, mod=True, coeff=3.0, power_iterations=1, epochs=350,
             batch_size=128, opt="sgd", lr=0.1, weight_decay=5e-4, schedule="step", augment=False,
             ood=["svhn"]),
    "cifar10": dict(augment=True, ood=["svhn", "cifar100", "tiny_imagenet"]),
    "cifar100": dict(augment=True, ood=["svhn", "tiny_imagenet"]),
    "svhn": dict(ood=["cifar10", "cifar100"]),
    "tiny_imagenet": dict(model="resnet50", augment=True),
    # pretrained: no epoch of training
    "imagenet": dict(model="torchvision/resnet50", sn=False, mod=False, epochs=0, batch_size=256,
                     ood=["imagenet_o"]),
    # published code: figures 1 and 2 use ResNet-18 with spectral norm, without -mod, on 28x28 grey
    "mnist": dict(model="resnet18", mod=False, ood=["fashion_mnist"]),
    "fashion_mnist": dict(model="resnet18", mod=False, ood=["mnist"]),
    "kmnist": dict(model="resnet18", mod=False, ood=["mnist"]),
    "dirty_mnist": dict(model="resnet18", mod=False, epochs=100, ood=["fashion_mnist"]),
    **dict.fromkeys(("dirty_glyphs", "glyphs", "numbers"), dict(
        model="resnet18", mod=False, width=0.25, epochs=5, schedule="one_cycle",
        ood=["glyphs_letters"])),
    "two_moons": dict(model="fc_resnet", mod=False, epochs=150, lr=1e-3, batch_size=64, coeff=0.65,
                      power_iterations=5, opt="adam", weight_decay=0.0, schedule="constant",
                      ood=["background"]),
}
# published: the same for all data sets
ACTIVE_LEARNING = dict(model="resnet18", sn=False, mod=False, epochs=20, batch_size=64, lr=1e-3,
                       opt="adam", weight_decay=5e-4, schedule="constant", augment=False, ood=[])
# Each of these sets is the union of a clean and an ambiguous one.
PARTS = {"dirty_mnist": ("mnist", "ambiguous_mnist"),
         "dirty_glyphs": ("glyphs", "glyphs_ambiguous")}


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "dirty_glyphs")
    flag = argparse.BooleanOptionalAction
    add = parser.group("network")
    add("--model", help="lenet, resnet18, resnet50, wide_resnet, vgg16, or torchvision/NAME: "
        "pretrained (NAME as torchvision.models.get_model takes it)")
    add("--weights", default="DEFAULT", help="of torchvision/NAME: DEFAULT, or a state dict's file")
    add("--depth", type=between(10, 1000, int), default=28, help="of wide_resnet, 6n + 4 (paper)")
    add("-sn", "--sn", action=flag, help="soft spectral normalisation of every layer but the head")
    add("-mod", "--mod", action=flag, help="leaky ReLU, average-pooled instead of 1x1 shortcuts")
    add("--coeff", type=at_least(1e-6, float), help="largest spectral norm of a layer (paper: 3)")
    add("--power-iterations", type=at_least(1), help="a training step (paper: 1)")
    add("--dropout", type=between(0, 0.99), default=0.3, help="of wide_resnet (published: 0.3)")
    add = parser.group("training")
    add("--opt", choices=["sgd", "adam"], help="with adam use a learning rate near 1e-3")
    add("--momentum", "--mom", type=between(0, 1), default=0.9, help="of SGD")
    add("--weight-decay", "--decay", type=at_least(0, float), help="on ALL parameters (5e-4)")
    add("--schedule", choices=["step", "one_cycle", "constant"], help="step: /10 after 3/7 and 5/7 "
        "of the epochs (paper); one_cycle is better in few epochs")
    add("--augment", action=flag, help="random crop and flip (published: CIFAR only)")
    add("--noise", type=between(0, 1), default=0.0, help="on Ambiguous-MNIST, std in normalised "
        "units (published code 0, data package 0.05)")
    add = parser.group("evaluation")
    add("--ood", "--ood_dataset", nargs="*", metavar="NAME",
        help="out-of-distribution sets, also folder:PATH for any folder of images; none: no name")
    add("--priors", action="store_true", help="weight classes by q(c) = n_c / N (paper), which the "
        "published evaluation leaves out; no difference for balanced classes")
    add("--jitter", type=at_least(0, float), help="eps added to the diagonals of all covariances "
        "(left out: 0, or 1e-12 of the mean variance if one of them is singular)")
    add("--shrinkage", action=flag, default=False, help="Ledoit-Wolf: for few examples a class")
    add("--density-quantile", type=between(0, 1), default=0.01,
        help="OOD threshold: this quantile of the validation set's log densities")
    add("--entropy-threshold", type=at_least(0, float), default=0.35,
        help="nats above which an in-distribution input counts as ambiguous (half a bit)")
    add("--ensemble", type=at_least(1), default=1, metavar="M", help="members of an ensemble")
    add("--score", nargs="+", default=[], metavar="NPZ", help="the first one is in-distribution")
    add("--active-learning", nargs="+", choices=ACQUISITIONS, metavar="SCORE",
        help="label pool examples step by step: density (lowest), entropy, pe and mi (predictive "
        "entropy and mutual information of an ensemble; highest), random")
    add = parser.group("method")
    add("--features", metavar="NPZ", help="fit features that you computed ('features' [N, D], "
        "'labels' [N]), a tenth held out, and score those of --score; no network")
    add("-ambiguous", "--ambiguous", action="store_true",
        help="active learning's pool: --subsample clean examples and all of the ambiguous set")
    add("--subsample", type=at_least(1), default=1000, help="clean examples in that pool")
    add("--num-ensemble", type=at_least(2), default=5, help="members for pe and mi")
    add("--num-initial-samples", type=at_least(2), default=20, help="labels at the start")
    add("--max-training-samples", type=at_least(2), default=300, help="labels at the end")
    add("--acquisition-batch-size", type=at_least(1), default=5, help="labels acquired per step")
    learning = parser.parse_known_args(argv)[0].active_learning
    args = parser.parse(argv, **(ACTIVE_LEARNING if learning else {}))
    if bool(args.features) != bool(args.score):
        parser.error("--features TRAIN.npz and --score FILE.npz ... go together")
    if args.depth % 6 != 4:
        parser.error(f"--depth {args.depth}: wide_resnet takes 6n + 4")
    if (args.model == "fc_resnet") != (args.dataset == "two_moons") and not args.features:
        parser.error(f"--model {args.model} is not for --dataset {args.dataset}: two_moons and "
                     "fc_resnet go together")
    if (args.sn or args.mod) and (args.model == "lenet" or args.model.startswith("torchvision/")):
        parser.error(f"--model {args.model} has no spectral-normalised or -mod form; add "
                     "--no-sn --no-mod")
    if args.dataset == "two_moons" and (args.augment or args.active_learning):
        parser.error("--dataset two_moons has no images for --augment, no --active-learning")
    if args.active_learning and (args.predict or args.ensemble > 1):
        parser.error("--predict and --ensemble are not for --active-learning, which keeps no "
                     "network and has --num-ensemble")
    if args.features and (args.predict or args.active_learning or args.runs * args.ensemble > 1):
        parser.error("--predict, --active-learning, --runs and --ensemble are for networks, not "
                     "for --features; --score writes what it finds of them")
    if args.max_training_samples < args.num_initial_samples:
        parser.error(f"--max-training-samples {args.max_training_samples}: must be at least "
                     f"--num-initial-samples {args.num_initial_samples}")
    return args


# ---- Model --------------------------------------------------------------------------------------


class Network(nn.Module):
    """A feature extractor and a linear head: (logits [B, K], features z [B, D])."""

    def __init__(self, extractor, head):
        super().__init__()
        self.extractor, self.head = extractor, head

    def forward(self, x):
        z = self.extractor(x)
        return self.head(z), z


class Residual(nn.Module):
    """after(body(x) + shortcut(x))"""

    def __init__(self, body, shortcut=nn.Identity(), after=nn.Identity()):
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut, after

    def forward(self, x):
        return self.after(self.body(x) + self.shortcut(x))


class PoolShortcut(nn.Module):
    """-mod: average pooling (an odd size: every second pixel), then zero channels at the end."""

    def __init__(self, stride, extra_channels):
        super().__init__()
        self.stride, self.extra = stride, extra_channels

    def forward(self, x):
        if self.stride > 1:
            odd = x.shape[-1] % 2
            x = x[..., ::self.stride, ::self.stride] if odd else F.avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)


def activation(args):
    return nn.LeakyReLU(0.01) if args.mod else nn.ReLU()


def shortcut(c_in, c_out, stride, args, norm=False):
    """Identity where nothing changes, else pooling (-mod) or a strided 1x1 convolution."""
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    if args.mod:
        return PoolShortcut(stride, c_out - c_in)
    # subsampling first: on CPUs PyTorch 2.14's strided 1x1 convolution writes out of bounds
    layers = [nn.AvgPool2d(1, stride), conv(c_in, c_out, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(c_out)) if norm else nn.Sequential(*layers)


def lenet(args, shape):
    """LeNet-5 for 28x28 grey images."""
    if tuple(shape) != (1, 28, 28):
        raise UserError(f"--model lenet takes 28x28 grey images, {args.dataset} has {shape}")
    return [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84),
            nn.ReLU()], 84


def vgg16(args, shape):
    """With batch norm; on 28x28 images the first of the five max pools is left out."""
    layers, c_in = [], shape[0]
    for stage, (c, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        c = max(1, round(c * args.width))
        for _ in range(count):
            layers += [conv(c_in, c), nn.BatchNorm2d(c), activation(args)]
            c_in = c
        if stage or shape[-1] >= 32:
            layers.append(nn.MaxPool2d(2))
    return layers + [nn.AdaptiveAvgPool2d(1), nn.Flatten()], c_in


def resnet(args, shape):
    """ResNet-18 or -50 with the CIFAR stem: 3x3, stride 1, no max pool."""
    bottleneck, c_in = args.model == "resnet50", max(1, round(64 * args.width))
    layers, channels = [conv(shape[0], c_in), nn.BatchNorm2d(c_in), activation(args)], c_in
    for stage, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
        for stride in [2 if stage else 1] + [1] * (count - 1):
            c = channels * 2**stage
            c_out = 4 * c if bottleneck else c
            convs = [conv(c_in, c, 1), conv(c, c, 3, stride), conv(c, c_out, 1)] if bottleneck \
                else [conv(c_in, c, 3, stride), conv(c, c)]
            body = [m for k in convs for m in (k, nn.BatchNorm2d(k.out_channels), activation(args))]
            side = shortcut(c_in, c_out, stride, args, norm=True)
            layers.append(Residual(nn.Sequential(*body[:-1]), side, activation(args)))
            c_in = c_out
    return layers + [nn.AdaptiveAvgPool2d(1), nn.Flatten()], c_in


def wide_resnet(args, shape):
    """WRN-depth-(10 width), pre-activation; its shortcuts see the raw input."""
    layers, c_in = [conv(shape[0], 16)], 16
    for stage in range(3):
        c = max(1, round(160 * args.width)) * 2**stage
        for block in range((args.depth - 4) // 6):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(
                nn.BatchNorm2d(c_in), activation(args), conv(c_in, c, 3, stride), nn.BatchNorm2d(c),
                activation(args), nn.Dropout(args.dropout), conv(c, c))
            layers.append(Residual(body, shortcut(c_in, c, stride, args)))
            c_in = c
    layers += [nn.BatchNorm2d(c_in), activation(args), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


def fc_resnet(args, shape):
    """Two moons: 2 -> 128, then four layers x + relu(linear(x))."""
    width = max(1, round(128 * args.width))
    return [nn.Flatten(), nn.Linear(2, width), *(
        Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU())) for _ in range(4))], width


NETWORKS = {"lenet": lenet, "resnet18": resnet, "resnet50": resnet, "wide_resnet": wide_resnet,
            "vgg16": vgg16, "fc_resnet": fc_resnet}


def torchvision_network(args, num_classes, shape):
    """Any torchvision classifier that ends in a linear layer; its input is the feature."""
    import torchvision
    published = args.weights == "DEFAULT"
    state = None if published else common.load_checkpoint(args.weights)
    try:
        body = torchvision.models.get_model(args.model.removeprefix("torchvision/"),
                                            weights="DEFAULT" if published else None,
                                            num_classes=num_classes)
        if not published:
            body.load_state_dict(state)
        last = [n for n, m in body.named_modules() if isinstance(m, nn.Linear)][-1]
        body.eval()(torch.zeros(1, *shape))
    except Exception as error:  # unknown name, no network, no linear layer, other sizes
        raise UserError(f"--model {args.model} --weights {args.weights}: {common.one_line(error)}; "
                        "give a classifier that torchvision.models.list_models() knows, for "
                        f"{num_classes} classes and images {tuple(shape)}, and a state dict's file"
                        ) from None
    head = body.get_submodule(last)
    body.set_submodule(last, nn.Identity())
    return Network(body, head)


def make_network(args, num_classes, shape):
    """The network of `args` for images of `shape` (C, H, W), on its device."""
    if args.model.startswith("torchvision/"):
        net = torchvision_network(args, num_classes, shape)
    elif args.model in NETWORKS:
        layers, dim = NETWORKS[args.model](args, shape)
        net = Network(nn.Sequential(*layers), nn.Linear(dim, num_classes))
    else:
        raise UserError(f"--model {args.model}: use one of {', '.join(NETWORKS)}, torchvision/NAME")
    if args.model == "wide_resnet":  # published code
        for m in net.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                m.momentum = 0.01
        nn.init.zeros_(net.head.bias)
    if args.sn:
        spectral_normalise(net.extractor, shape, args.coeff, args.power_iterations)
    return net.to(args.device, memory_format=torch.channels_last)


# ---- Method -------------------------------------------------------------------------------------


class SoftSpectral(nn.Module):
    """Parametrisation of a weight: scaled down, never up, to a spectral norm of at most `coeff`:

        W_eff = W / max(1, sigma / coeff),   sigma = <u, A v>.

    A is the layer's linear operator [Cin, H, W] -> [Cout, H', W'] with its stride, zero padding,
    dilation, groups and input size `size` (H, W), A v = conv(v, W); a 1x1 kernel acts as a matrix.
    A training forward takes power iterations, v first. The gradient flows through sigma, with u and
    v constant. They are buffers: the net deep-copies, compiles and resumes exactly.
    """

    def __init__(self, layer, size, coeff, iterations):
        super().__init__()
        weight, groups = layer.weight, getattr(layer, "groups", 1)
        matrix = weight[0, 0].numel() == 1
        size, geometry = ((1, 1), (1, 0, 1)) if matrix else (
            size, (layer.stride, layer.padding, layer.dilation))
        self.geometry, self.coeff, self.iterations = (*geometry, groups), coeff, iterations
        self.eps = 0.0 if matrix else 1e-5  # published code: added after the maximum
        self.kernel = (..., *(None,) * (4 - weight.ndim))  # a linear layer's is 1x1
        v = torch.randn(1, weight.shape[1] * groups, *size).to(weight)
        self.register_buffer("v", v)
        self.register_buffer("u", torch.randn_like(self.operator(v, weight)))
        for x in (self.u, self.v):
            x.div_(x.norm())

    def operator(self, v, weight):
        return F.conv2d(v, weight[self.kernel], None, *self.geometry)

    @torch.no_grad()
    def iterate(self, weight):
        """One power iteration: v = A^T u / |A^T u|, u = A v / |A v|."""
        v = nn.grad.conv2d_input(self.v.shape, weight[self.kernel], self.u, *self.geometry)
        self.v.copy_(v / v.norm().clamp_min(1e-12))
        u = self.operator(self.v, weight)
        self.u.copy_(u / u.norm().clamp_min(1e-12))

    def forward(self, weight):
        with torch.autocast(weight.device.type, enabled=False):
            for _ in range(self.iterations if self.training else 0):
                self.iterate(weight)
            # sigma and its gradient with u and v constant: clones, for the buffers change in place
            sigma = (self.u.clone() * self.operator(self.v.clone(), weight)).sum()
            return weight / (torch.clamp(sigma / self.coeff, min=1.0) + self.eps)


def spectral_normalise(net, shape, coeff=3.0, iterations=1):
    """Give every convolution and linear layer of `net` a SoftSpectral weight, for the input size
    that images [C, H, W] of `shape` give the layer. Batch norm is left alone, as in the paper."""
    sizes, training = {}, net.training
    hooks = [m.register_forward_hook(lambda m, x, _: sizes.update({m: x[0].shape[2:]}))
             for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    net.eval()(torch.zeros(1, *shape).to(next(net.parameters())))
    net.train(training)
    for hook in hooks:
        hook.remove()
    for layer, size in sizes.items():
        parametrisation = SoftSpectral(layer, size, coeff, iterations)
        parametrize.register_parametrization(layer, "weight", parametrisation, unsafe=True)


# Which side large values of a score stand for: "id" scores are confidences, "ood" uncertainties.
SCORES = {"density": "id", "entropy": "ood", "energy": "id", "max_prob": "id", "gmm_entropy": "ood",
          "class_mahalanobis": "id", "mahalanobis": "id", "relative_mahalanobis": "id",
          "predictive_entropy": "ood", "mutual_information": "ood"}
ACQUISITIONS = ("density", "entropy", "pe", "mi", "random")


class Gaussians(NamedTuple):
    """N(mu_c, Sigma_c + eps I) for each of K classes, float64, by the spectrum of Sigma_c.

    R_c = rank of Sigma_c, at most n_c - 1: fewer examples than features need no D x D matrix.
    """

    mean: Tensor       # [K, D]
    directions: list   # K of [R_c, D]: eigenvectors of Sigma_c
    variances: list    # K of [R_c]: its eigenvalues, plus eps
    rest: list         # K: the variance outside the span of the directions, eps without shrinkage
    log_prior: Tensor  # [K]  log q(c), or 0 without priors
    centre: Tensor     # [D]  mean of all examples
    within: Tensor     # [D, D]  whitens the shared within-class covariance (Mahalanobis)
    total: Tensor      # [D, D]  whitens the covariance that ignores classes (relative Mahalanobis)
    eps: float


def fit_gaussians(features, labels, num_classes, priors=False, eps=None, shrinkage=False):
    """Algorithm 1: q(z|c) = N(mu_c, Sigma_c + eps I), a full covariance (divisor n_c - 1) a class.

    features [N, D] of any float type, labels int64 [N] in 0..num_classes-1. eps: jitter, by default
    0, or 10^-12 of the mean variance of a feature if a Sigma_c is singular. shrinkage: Sigma_c by
    Ledoit and Wolf (2004). priors: q(c) = n_c / N. Returns Gaussians; ValueError where a class has
    fewer than two examples or a feature is not finite. Features whose scales differ by more than a
    million count as singular: standardise them first. Memory: 8 D sum_c min(n_c, D) bytes.
    """
    count = torch.bincount(labels, minlength=num_classes)
    if (few := (count < 2).nonzero().flatten().tolist()):
        raise ValueError(f"class {few[0]} has {int(count[few[0]])} training example(s) and a "
                         f"covariance needs two ({len(few)} such class(es)); add examples")
    if not torch.isfinite(features).all():
        raise ValueError("features contain NaN or infinity: the network has diverged, or the file "
                         "is damaged")
    mean, spectra, shrunk, within = [], [], [], 0.0
    for c, n in enumerate(count.tolist()):
        z = features[labels == c].double()
        mean.append(z.mean(0))
        z = z - mean[c]
        directions, variances = spectrum(z)
        intensity = ledoit_wolf(z, variances * (n - 1) / n) if shrinkage else 0.0
        shrunk.append(intensity * variances.sum().item() / z.shape[1])
        spectra.append((directions, variances * (1 - intensity)))
        within = within + (directions.T * variances * (n - 1)) @ directions
    mean, dim, share = torch.stack(mean), features.shape[1], count.double() / len(labels)
    singular = any(len(v) < dim and not s for (_, v), s in zip(spectra, shrunk))
    if eps is None:
        scale = sum(v.sum().item() for _, v in spectra) / len(mean) / dim
        eps = 1e-12 * (scale or 1.0) if singular else 0.0
    if singular and eps == 0:
        raise ValueError("the covariance of a class is singular (no more examples than features, "
                         "or equal ones) and the jitter is 0; leave it out")
    rest = [s + eps for s in shrunk]
    variances = [v + r for (_, v), r in zip(spectra, rest)]
    centre, within = share @ mean, within / len(labels)
    offset = (mean - centre) * share.sqrt()[:, None]
    return Gaussians(mean, [d for d, _ in spectra], variances, rest, share.log() * priors, centre,
                     whitener(within), whitener(within + offset.T @ offset), eps)


def spectrum(z):
    """Eigenvectors [R, D] and eigenvalues [R] of z^T z / (n - 1), other than 0, of centred rows
    z [n, D]: by its D x D matrix, or from the rows where they are fewer."""
    n, dim = z.shape
    if n > dim:
        values, vectors = torch.linalg.eigh(z.T @ z / (n - 1))
        directions, rounding = vectors.T, 2 * dim * torch.finfo(z.dtype).eps * values[-1]
    else:
        _, s, directions = torch.linalg.svd(z / (n - 1) ** 0.5, full_matrices=False)
        values, rounding = s.square(), 1e-24 * s[0].square()  # centring takes one away
    kept = values > rounding
    return directions[kept], values[kept]


def ledoit_wolf(z, values) -> float:
    """The shrinkage intensity 0..1 of Ledoit and Wolf (2004) for centred rows z [n, D] whose
    covariance (divisor n) has the eigenvalues `values`: (1 - rho) S + rho tr(S) / D I."""
    n, dim = z.shape
    spread = values.square().sum() - values.sum() ** 2 / dim
    error = (z.square().sum(1).square().mean() - values.square().sum()) / n
    return (error / spread).clamp(0, 1).item() if spread > 0 else 1.0


def whitener(covariance):
    """W [D, D] with W^T W the inverse; directions of no variance get 10^-12 of the mean one."""
    values, vectors = torch.linalg.eigh(covariance)
    floor = 1e-12 * (values.mean().item() or 1.0)
    return (vectors / values.clamp_min(floor).sqrt()).T


def density_scores(gaussians, features) -> dict:
    """Scores [N], float64, from the features [N, D] alone: the log density and its relatives.

    density              log q(z) = logsumexp_c log N(z; mu_c, Sigma_c) + log q(c)
    gmm_entropy          entropy of q(c|z), nats; not the network's softmax entropy
    class_mahalanobis    -min_c (z - mu_c)^T Sigma_c^-1 (z - mu_c)
    mahalanobis          the same with one shared within-class covariance (Lee et al. 2018)
    relative_mahalanobis minus the distance to a single Gaussian without classes (Ren et al. 2021)
    log_posterior        [N, K]: log q(c|z)
    """
    features, dim = features.to(gaussians.mean), features.shape[1]
    squared, log_det = [], []
    for mean, directions, variances, rest in zip(*gaussians[:4]):
        z = features - mean
        along = z @ directions.T
        squared.append((along.square() / variances).sum(1))
        log_det.append(variances.log().sum())
        if missing := dim - len(variances):
            squared[-1] += (z - along @ directions).square().sum(1) / rest
            log_det[-1] += missing * math.log(rest)
    squared = torch.stack(squared, 1)
    joint = gaussians.log_prior - (squared + torch.stack(log_det) + dim * math.log(2 * math.pi)) / 2
    z, mean = features - gaussians.centre, gaussians.mean - gaussians.centre
    nearest = torch.cdist(z @ gaussians.within.T, mean @ gaussians.within.T).min(1).values.square()
    return {"density": joint.logsumexp(1), "gmm_entropy": entropy(joint),
            "class_mahalanobis": -squared.min(1).values, "mahalanobis": -nearest,
            "relative_mahalanobis": (z @ gaussians.total.T).square().sum(1) - nearest,
            "log_posterior": joint.log_softmax(1)}


def entropy(logits):
    """Entropy of softmax(logits [N, K]), nats, [N]."""
    return torch.special.entr(logits.softmax(1)).sum(1)


def softmax_scores(logits, temperature=1.0) -> dict:
    """Scores [N] of logits [N, K] / T: entropy (nats), largest probability, energy (logsumexp)."""
    logits = logits.double() / temperature
    return {"entropy": entropy(logits), "max_prob": logits.softmax(1).max(1).values,
            "energy": logits.logsumexp(1)}


REGIONS = ("clean", "ambiguous", "ood")


def decide(density, entropy, density_threshold, entropy_threshold):
    """Index of REGIONS [N]: low density is out of distribution, whatever the entropy."""
    # paper: the pseudo-code's sign is inverted; a LOW density means out of distribution
    return torch.where(density < density_threshold, 2, (entropy > entropy_threshold).long())


# ---- Training -----------------------------------------------------------------------------------


def learning_rate(step, steps, args) -> float:
    """The learning rate at a global step (from 0), `steps` an epoch: resuming needs no state."""
    if args.schedule == "constant":
        return args.lr
    if args.schedule == "step":
        milestones = (round(args.epochs * share) for share in (150 / 350, 250 / 350))
        return args.lr * 0.1 ** sum(step // steps >= epoch for epoch in milestones)
    total = args.epochs * steps
    warm = 0.2 * total
    return args.lr * ((step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm))


def train(net, train_set, args, seed, run, name=None):
    """Cross entropy; goes on after the last whole epoch of checkpoint `name`, if one is given."""
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    optimiser = torch.optim.Adam(net.parameters(), **options) if args.opt == "adam" else \
        torch.optim.SGD(net.parameters(), momentum=args.momentum, **options)
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         augment="crop_flip" if args.augment else "none", workers=args.workers,
                         channels_last=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    model = common.data_parallel(net, args.device)
    model = torch.compile(model) if args.compile else model
    epochs = run.epochs(args.epochs, name, net=net, optimiser=optimiser) if name else \
        range(args.epochs)
    for epoch in epochs:
        common.seed_all(seed, epoch, common.rank())  # dropout: the same whatever came before
        totals = torch.zeros(3, device=args.device)
        model.train()
        for step, batch in run.steps(loader, epoch):
            lr = learning_rate(epoch * steps + step, steps, args)
            for group in optimiser.param_groups:
                group["lr"] = lr
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                logits, _ = model(batch.images)
            loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
            optimiser.zero_grad()
            # of the global mean: DDP divides by the number of processes
            (loss * common.world_size() / batch.global_size).backward()
            optimiser.step()
            correct = (logits.argmax(1) == batch.labels).sum()
            totals += torch.stack([loss.detach(), correct, totals.new_full((), len(logits))])
        loss, correct, n = common.all_reduce(totals)
        if name:
            run.log(loss / n, accuracy=correct / n, lr=lr, examples=n)
    return net


# ---- Evaluation ---------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What one forward pass over a set gives, in the set's order, on the CPU."""

    logits: Tensor    # [N, K] float32
    features: Tensor  # [N, D] float32
    labels: Tensor    # [N]


class Evaluated(NamedTuple):
    """One network's outputs and scores by set, and what was chosen on the validation set."""

    outputs: dict       # {set: Outputs}
    scores: dict        # {set: {score: [N] float64}}
    gaussians: Gaussians
    temperature: float
    threshold: float    # of the log density


@torch.no_grad()
def forward(net, dataset, args) -> Outputs | None:
    """One row an example, in eval mode, un-augmented; None but on the main process."""
    net.eval()
    rows, loader = [], data.Loader(dataset, max(512, args.batch_size), args.device,
                                   workers=args.workers, channels_last=True)
    for batch in loader.epoch(0):
        if not len(batch.labels):  # more processes than images left
            continue
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
            logits, features = net(batch.images)
        rows.append((batch.index, logits.float(), features.float()))
    columns = common.gather_rows(*(torch.cat(column) for column in zip(*rows)))
    return Outputs(*columns, dataset.labels) if columns else None


def check_gaussians(train_set, dim, args):
    """Refuse, before training, what could not be fitted after it: a class of fewer than two
    examples, Gaussians that the device could not hold (features thrice, directions once)."""
    count = torch.bincount(train_set.labels, minlength=train_set.num_classes)
    if (least := count.min().item()) < 2:
        raise UserError(f"class {count.argmin()} of {train_set.name} has {least} training "
                        "example(s) and its Gaussian needs two; add examples")
    needed = 12 * len(train_set) * dim + 8 * dim * int(count.clamp_max(dim).sum())
    if (memory := common.device_memory(args.device)) and needed > memory:
        raise UserError(f"{len(count)} Gaussians of {dim} features need {needed / 1e9:.1f} GB, the "
                        f"device has {memory / 1e9:.1f} GB; use a smaller --width, or --device cpu")


def fit(features, labels, num_classes, args) -> Gaussians:
    """`fit_gaussians` on the device, with a word about classes that are too small for it."""
    count, dim = torch.bincount(labels, minlength=num_classes), features.shape[1]
    if count.min() < 2 * dim and not (args.shrinkage or args.active_learning):
        print(f"note: class {int(count.argmin())} has {int(count.min())} examples for {dim} "
              "features, fewer than twice as many: its covariance is poor; try --shrinkage")
    device = "cpu" if args.device.type == "mps" else args.device  # which has no float64
    try:
        return fit_gaussians(features.to(device), labels.to(device), num_classes, args.priors,
                             args.jitter, args.shrinkage)
    except ValueError as error:
        raise UserError(str(error)) from None


def score_features(gaussians, features) -> dict:
    """`density_scores` in parts, on the Gaussians' device; results on the CPU."""
    parts = [density_scores(gaussians, part) for part in features.split(4096)]
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def evaluate(net, sets, args, run) -> Evaluated | None:
    """One pass over every set, the Gaussians, and all scores: on the main process."""
    with run.clock("forward"):
        train, val = (forward(net, sets[part], args) for part in ("train", "val"))
        outputs = {name: forward(net, dataset, args)
                   for name, dataset in {**sets["test"], **sets["ood"]}.items()}
    if train is None:
        return None
    with run.clock("fit"):
        gaussians = fit(train.features, train.labels, train.logits.shape[1], args)
    if len(sets["test"]) > 1:
        outputs[sets["whole"]] = Outputs(*map(torch.cat, zip(*(outputs[n] for n in sets["test"]))))
    temperature = common.fit_temperature(val.logits, val.labels)
    with run.clock("score"):
        scores = {name: all_scores(gaussians, out, temperature) for name, out in outputs.items()}
        held_out = score_features(gaussians, val.features)["density"]
    threshold = held_out.quantile(args.density_quantile).item()
    return Evaluated(outputs, scores, gaussians, temperature, threshold)


def all_scores(gaussians, outputs, temperature) -> dict:
    """Every score [N] of a set; softmax scores also at the temperature, as <score>_scaled."""
    scores = score_features(gaussians, outputs.features)
    del scores["log_posterior"]
    scaled = softmax_scores(outputs.logits, temperature)
    return scores | softmax_scores(outputs.logits) | {f"{k}_scaled": v for k, v in scaled.items()}


def detection_metrics(inside, outside) -> dict:
    """AUROC, AUPR-in, AUPR-out, FPR at 95 % TPR of every score, {score: [N]} of both sides."""
    return {f"{metric}_{name}": value for name in inside for metric, value in common.ood_metrics(
        inside[name], outside[name], larger_means=SCORES[name.removesuffix("_scaled")]).items()}


def member_log_probs(members, name, suffix) -> Tensor:
    """[M, N, K] of a set, float64; with the suffix "_scaled" at each member's own temperature."""
    return torch.stack([(m.outputs[name].logits.double() / (m.temperature if suffix else 1)
                         ).log_softmax(1) for m in members])


def result_rows(method, seed, sets, members, scores) -> list:
    """Rows of the members' mean probabilities on the test set and its parts; then of detection by
    `scores`: OOD sets against it and its clean part, and the ambiguous part against that."""
    names, rows = [*dict.fromkeys([sets["whole"], *sets["test"]])], []
    for name in names:
        labels = members[0].outputs[name].labels
        rows.append({"method": method, "seed": seed, "set": name, "n": len(labels)})
        for suffix in ("", "_scaled"):
            each = member_log_probs(members, name, suffix)
            log_probs = each.logsumexp(0) - math.log(len(each))
            probs = log_probs.exp()
            values = {"accuracy": common.accuracy(probs, labels),
                      "nll": common.nll(log_probs, labels), "brier": common.brier(probs, labels),
                      "ece15": common.ece(probs, labels), "mce15": common.mce(probs, labels),
                      "adaptive_ece15": common.adaptive_ece(probs, labels)}
            rows[-1] |= {metric + suffix: value for metric, value in values.items()}
    pairs = [(inside, outside) for inside in names[:2] for outside in sets["ood"]]
    for inside, outside in pairs + [names[1:]] * (len(names) > 1):
        rows.append({"method": method, "seed": seed, "set": inside, "against": outside,
                     "n": len(members[0].outputs[inside].labels),
                     **detection_metrics(scores[inside], scores[outside])})
    return rows


def network_rows(evaluated, sets, args, seed) -> list:
    """Rows of one network; fraction_* are shares of the set (of `against`, where there is one)."""
    scores, threshold = evaluated.scores, evaluated.threshold
    rows = result_rows("DDU", seed, sets, [evaluated], scores)
    for row in rows:
        own = scores[row.get("against", row["set"])]
        region = decide(own["density"], own["entropy"], threshold, args.entropy_threshold)
        shares = region.bincount(minlength=3) / len(region)
        row |= {f"fraction_{name}": share for name, share in zip(REGIONS, shares)}
        row |= {"temperature": evaluated.temperature, "density_threshold": threshold,
                "jitter": evaluated.gaussians.eps}
    return rows


def ensemble_rows(members, sets, seed) -> list:
    """Rows of the mean of the members' probabilities, and of its uncertainties."""
    scores = {name: {} for name in members[0].outputs}
    for name, suffix in itertools.product(scores, ("", "_scaled")):
        parts = common.ensemble_uncertainty(member_log_probs(members, name, suffix))
        scores[name] |= {f"predictive_entropy{suffix}": parts["total"],
                         f"mutual_information{suffix}": parts["epistemic"]}
    return result_rows(f"ensemble of {len(members)}", seed, sets, members, scores)


def write_predictions(net, evaluated, dataset, args, run):
    """--predict: predictions.csv of any set, with the log density and the decision."""
    if (out := forward(net, dataset, args)) is None:
        return
    scores = all_scores(evaluated.gaussians, out, evaluated.temperature)
    density = scores["density"]
    region = decide(density, scores["entropy"], evaluated.threshold, args.entropy_threshold)
    common.write_predictions(run.dir / "predictions.csv", dataset,
                             out.logits.double().log_softmax(1), epistemic=-density,
                             log_density=density, decision=[REGIONS[r] for r in region])


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#CCBB44", "#AA3377", "#228833", "#EE6677", "#66CCEE"]  # colour-blind safe


def plot_uncertainty(plt, path, evaluated, sets, entropy_threshold):
    """Figures 1 and 2 of the paper (entropy, density), and the plane in which `decide` cuts."""
    names, scores, threshold = [*sets["test"], *sets["ood"]], evaluated.scores, evaluated.threshold
    inside = torch.cat([scores[name]["density"] for name in sets["test"]])
    top = max(scores[name]["entropy"].max().item() for name in names)
    high, low = max(threshold, inside.max().item()), min(threshold, inside.quantile(0.01).item())
    low -= 1.5 * (high - threshold)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for colour, name in zip(itertools.cycle(COLOURS), names):
        entropies = scores[name]["entropy"].numpy()
        densities = scores[name]["density"].numpy().clip(low, high)
        look = dict(weights=np.full(len(entropies), 1 / len(entropies)), alpha=0.6, color=colour)
        left.hist(entropies, 40, range=(0, top), label=name.replace("_", " "), **look)
        middle.hist(densities, 60, range=(low, high), **look)
        few = slice(None, None, max(1, len(entropies) // 1500))
        right.plot(densities[few], entropies[few], ".", ms=2.5, alpha=0.5, color=colour)
    for axis in (middle, right):
        axis.axvline(threshold, color="black", ls="--", lw=1)
    right.plot([threshold, high], [entropy_threshold] * 2, color="black", ls="--", lw=1)
    for x, y, text in ((low, 1.1 * top, "out of distribution"), (high, 1.1 * top, "ambiguous"),
                       (high, -0.1 * top, "clean")):
        right.text(x, y, text, ha="left" if x == low else "right", va="center")
    left.set(xlabel="softmax entropy (nats)", ylabel="fraction of the set", yscale="log")
    middle.set(xlabel="log density (lower ones at the left edge)", ylabel="fraction of the set")
    right.set(xlabel="log density", ylabel="softmax entropy (nats)", ylim=(-0.2 * top, 1.2 * top))
    left.legend(frameon=False)
    common.save_figure(plt, figure, path)


def plot_reliability(plt, path, outputs, temperature):
    """Accuracy by confidence in 15 bins, before and after temperature scaling."""
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.6), constrained_layout=True, sharey=True)
    for axis, t in zip(axes, (1.0, temperature)):
        probs = (outputs.logits.double() / t).softmax(1)
        confidence, predicted = probs.max(1)
        bars, left = common.reliability(confidence, predicted == outputs.labels), np.arange(15) / 15
        axis.bar(left, bars.accuracy, 1 / 15, align="edge", color=COLOURS[0], ec="white",
                 label="accuracy")
        axis.bar(left, bars.counts / bars.counts.sum(), 1 / 15, align="edge", fc="none",
                 ec=COLOURS[2], label="share of examples")
        axis.plot([0, 1], [0, 1], "k--", lw=1)
        axis.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1),
                 title=f"T = {t:.2f}, ECE {100 * common.ece(probs, outputs.labels):.2f} %")
    axes[0].set_ylabel("accuracy")
    axes[0].legend(loc="upper left")
    common.save_figure(plt, figure, path)


def plot_two_moons(plt, path, nets, gaussians, train_set, args):
    """Uncertainties over the plane, and the training data."""
    outputs = [forward(net, grid_set(), args) for net in nets]
    density = score_features(gaussians, outputs[0].features)["density"]
    panels = {"softmax entropy (nats)": entropy(outputs[0].logits.double()),
              "log density (above -50)": density.clamp_min(-50)}
    if len(nets) > 1:
        log_probs = torch.stack([out.logits.log_softmax(1) for out in outputs])
        parts = common.ensemble_uncertainty(log_probs)
        panels |= {f"{name}, {len(nets)} members (nats)": parts[key] for name, key in (
            ("predictive entropy", "total"), ("mutual information", "epistemic"))}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.6),
                                constrained_layout=True)
    x, y = grid_set().images[:, :, 0, 0].view(100, 100, 2).unbind(2)
    for axis, (title, values) in zip(axes, panels.items()):
        figure.colorbar(axis.pcolormesh(x, y, values.view(100, 100)), ax=axis)
        for c in (0, 1):
            points = train_set.images[train_set.labels == c, :, 0, 0]
            axis.plot(*points.T.numpy(), ".", ms=1.5, color=COLOURS[1 + c])
        axis.set(title=title)
    common.save_figure(plt, figure, path)


def plot_curves(plt, path, curves, labels, ylabel):
    """Mean and standard-error band over the runs: curves {name: [runs, evaluations]}."""
    figure, axis = plt.subplots(figsize=(5.5, 3.8), constrained_layout=True)
    for colour, (name, values) in zip(COLOURS, curves.items()):
        values = np.asarray(values)
        mean = values.mean(0)
        axis.plot(labels, mean, ".-", color=colour, label=f"{name} ({len(values)} runs)")
        if len(values) > 1:
            error = values.std(0, ddof=1) / len(values) ** 0.5
            axis.fill_between(labels, mean - error, mean + error, color=colour, alpha=0.25, lw=0)
    axis.set(xlabel="labelled examples", ylabel=ylabel)
    axis.legend(frameon=False)
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def points_set(name, x, y):
    """Points [N, 2] as images [N, 2, 1, 1]."""
    return data.ImageSet(name, x[:, :, None, None], y, 2, (0.0, 0.0), (1.0, 1.0))


def grid_set():
    grid = torch.meshgrid(torch.linspace(-2.5, 3.5, 100), torch.linspace(-3, 3, 100), indexing="xy")
    return points_set("grid", torch.stack(grid, 2).view(-1, 2), torch.zeros(10_000).long())


def two_moons_sets(args) -> dict:
    """The moons, and as OOD set the points of a grid that are far from all training data."""
    if unknown := args.predict or " ".join({*args.ood} - {"background"}):
        raise UserError(f"{unknown}: two_moons knows one other set, --ood background")
    train, val, test = (points_set("two_moons", *data.two_moons(2000, 0.1, seed))
                        for seed in (0, 2, 1))
    far = torch.cdist(grid_set().images.flatten(1), train.images.flatten(1)).min(1).values > 0.5
    return {"train": train, "val": val, "test": {"two_moons": test}, "whole": "two_moons",
            "ood": {name: grid_set().select(far) for name in args.ood}}


def load_options(args) -> dict:
    return dict(data_dir=args.data_dir, seed=args.seed, image_size=args.image_size,
                noise=args.noise)


def load_sets(args) -> dict:
    """All sets of a run, before anything is trained: train, val, test parts and OOD sets by name,
    the name of the whole test set, and what --predict asks for."""
    if args.dataset == "two_moons":
        return two_moons_sets(args)
    train, val = (data.load(args.dataset, part, **load_options(args)) for part in ("train", "val"))
    parts = PARTS.get(args.dataset, (args.dataset,))
    tests = [data.match(data.load(part, "test", **load_options(args)), train) for part in parts]
    sets = {"train": train, "val": val, "test": {test.name: test for test in tests},
            "whole": train.name, "ood": data.ood_sets(args, train, taken=parts),
            "predict": data.predict_set(args, train) if args.predict else None}
    data.check_shares(train, val, *tests, sets["predict"], *sets["ood"].values())
    return sets


def run_name(args):
    spectral, width = f"-sn{args.coeff:g}" * args.sn, f"-w{args.width:g}" * (args.width != 1)
    name = f"{data.set_name(args.dataset)}-{args.model}{spectral}{'-mod' * args.mod}{width}"
    return f"{name}{'-al' * bool(args.active_learning)}-seed{args.seed}"


def run_networks(args) -> list:
    """--runs times --ensemble networks; the pictures and predictions are the first run's."""
    run, rows = None, []
    for seed in range(args.seed, args.seed + args.runs):
        own = common.with_options(args, seed=seed)  # one split for all members
        sets = load_sets(own)
        seeds = [seed, *(common.derive_seed(seed, m) for m in range(1, args.ensemble))]
        nets, members = [], []
        for net_seed in seeds:
            common.seed_all(net_seed)
            nets.append(make_network(args, sets["train"].num_classes, sets["train"].shape))
            check_gaussians(sets["train"], nets[-1].head.in_features, args)
        run = run or common.Run(args, "ddu", run_name(args))  # a refused start claims nothing
        for member, (net, net_seed) in enumerate(zip(nets, seeds)):
            train(net, sets["train"], own, net_seed, run,
                  f"seed{seed}" + f"-member{member}" * bool(member))
            members.append(evaluate(net, sets, args, run))
        first = members[0]
        if common.is_main():
            rows += network_rows(first, sets, args, seed)
            rows += ensemble_rows(members, sets, seed) if args.ensemble > 1 else []
        if seed > args.seed:
            continue
        if args.predict:
            write_predictions(nets[0], first, sets["predict"], args, run)
        if common.is_main() and args.plot and (plt := common.pyplot()):
            plot_uncertainty(plt, run.dir / "uncertainty.png", first, sets, args.entropy_threshold)
            plot_reliability(plt, run.dir / "reliability.png", first.outputs[sets["whole"]],
                             first.temperature)
            if args.dataset == "two_moons":
                with common.alone():
                    plot_two_moons(plt, run.dir / "two_moons.png", nets, first.gaussians,
                                   sets["train"], args)
    return run.report(rows, ["accuracy", "nll", "ece15", "ece15_scaled", "fraction_ood",
                             "auroc_density", "auroc_entropy", "auroc_mahalanobis",
                             "auroc_predictive_entropy", "auroc_mutual_information"])


def run_features(args) -> list:
    """--features: Gaussians on features that somebody else computed, a tenth of them held out for
    the threshold; the files of --score, the first one in-distribution."""
    features, labels = data.read_features(args.features, labelled=True)
    files = {Path(path).stem: data.read_features(path, features.shape[1]) for path in args.score}
    if len(files) < len(args.score):
        raise UserError("two of the files to score have the same name; rename one")
    run = common.Run(args, "ddu", f"features-{Path(args.features).stem}-seed{args.seed}")
    if not common.is_main():
        return []
    train, val = data.train_val_split(len(labels), args.seed)
    if not len(val):
        raise UserError(f"{args.features} has {len(labels)} examples; to hold a tenth out takes 10")
    gaussians = fit(features[train], labels[train], int(labels.max()) + 1, args)
    threshold = score_features(gaussians, features[val])["density"].quantile(args.density_quantile)
    scores = {name: score_features(gaussians, z) for name, z in files.items()}
    first, rows = next(iter(files)), []
    for name, own in scores.items():
        posterior = own.pop("log_posterior")
        region = decide(own["density"], own["gmm_entropy"], threshold, args.entropy_threshold)
        rows.append({"method": "DDU", "seed": args.seed, "set": first, "n": len(files[first]),
                     "fraction_ood": (region == 2).double().mean(),
                     "density": own["density"].mean(), "density_threshold": threshold,
                     "jitter": gaussians.eps})
        if name != first:
            rows[-1] |= {"against": name, **detection_metrics(scores[first], own)}
        common.write_predictions(run.dir / f"scores_{name}.csv", None, posterior, **own,
                                 decision=[REGIONS[r] for r in region])
    return run.report(rows, ["density", "fraction_ood", "auroc_density", "auroc_gmm_entropy",
                             "auroc_mahalanobis", "auroc_relative_mahalanobis"])


def active_learning_pool(args):
    """(pool, test set, first labelled rows, which pool rows are ambiguous [P])."""
    pairs, generator = dict(PARTS.values()), torch.Generator().manual_seed(args.seed)
    if args.ambiguous and args.dataset not in pairs:
        raise UserError(f"--ambiguous is for {' and '.join(pairs)}, not for {args.dataset}")
    options = dict(load_options(args), val_fraction=0.0)
    pool, test = (data.load(args.dataset, part, **options) for part in ("train", "test"))
    test, ambiguous = data.match(test, pool), torch.zeros(len(pool), dtype=torch.bool)
    if args.ambiguous:
        clean = pool.select(torch.randint(len(pool), (args.subsample,), generator=generator))
        odd = data.match(data.load(pairs[args.dataset], "train", **options), clean)
        pool = data.concat("ambiguous_pool", clean, odd)
        ambiguous = torch.arange(len(pool)) >= len(clean)
    per_class, rest = divmod(args.num_initial_samples, pool.num_classes)
    if rest or per_class < 2:
        raise UserError(f"--num-initial-samples {args.num_initial_samples}: must be a multiple of "
                        f"the {pool.num_classes} classes, at least two of each")
    if args.max_training_samples > len(pool):
        raise UserError(f"--max-training-samples {args.max_training_samples}: the pool has "
                        f"{len(pool)} examples")
    order = torch.randperm(len(pool), generator=generator)
    start = torch.cat([order[pool.labels[order] == c][:per_class] for c in range(pool.num_classes)])
    return pool, test, start, ambiguous


def acquisition_step(pool, test, labelled, acquisition, key, args, run):
    """Train from scratch on the labelled rows; (test accuracy, score [P]: what to label next)."""
    draws = max(5056, len(labelled))  # published: examples an epoch, each nearly equally often
    drawn = pool.select(labelled.repeat(-(-draws // len(labelled)))[:draws])
    nets = []
    for member in range(args.num_ensemble if acquisition in ("pe", "mi") else 1):
        seed = common.derive_seed(*key, member)
        common.seed_all(seed)
        net = make_network(args, pool.num_classes, pool.shape)
        nets.append(train(net, drawn, args, seed, run))
    log_probs = lambda dataset: torch.stack([
        forward(net, dataset, args).logits.double().log_softmax(1) for net in nets])
    accuracy = common.accuracy(log_probs(test).exp().mean(0), test.labels)
    if acquisition == "random":
        return accuracy, torch.rand(len(pool))
    if acquisition == "density":  # in log space: the densities themselves underflow to ties
        few = forward(nets[0], pool.select(labelled), args)
        gaussians = fit(few.features, few.labels, pool.num_classes,
                        common.with_options(args, priors=True))
        scores = score_features(gaussians, forward(nets[0], pool, args).features)
        return accuracy, -scores["density"]
    parts = common.ensemble_uncertainty(log_probs(pool))
    return accuracy, parts["epistemic" if acquisition == "mi" else "total"]


def label_step_by_step(job, pool, test, start, sizes, args, run) -> dict:
    """One (acquisition, run): {"labelled": rows in the order of labelling, "accuracy": by size}."""
    acquisition, r = job
    name = f"{acquisition}-run{r}"
    state = run.load(name) or {"labelled": start, "accuracy": []}
    for size in sizes[len(state["accuracy"]):]:
        if args.eval:
            raise UserError(f"{name} stops at {size} labels; run the same command without --eval")
        accuracy, score = acquisition_step(pool, test, state["labelled"], acquisition,
                                           (args.seed, r, size), args, run)
        score[state["labelled"]] = -math.inf
        count = min(args.acquisition_batch_size, sizes[-1] - size)
        new = score.sort(descending=True, stable=True).indices[:count]
        state = {"labelled": torch.cat([state["labelled"], new]),
                 "accuracy": [*state["accuracy"], accuracy]}
        run.save(name, **state)
        print(f"{acquisition}, run {r}: {size} labels, test accuracy {accuracy:.4f}", flush=True)
    return state


def run_active_learning(args) -> list:
    """--active-learning: each (acquisition, run) is a job of its own, shared out over processes."""
    pool, test, start, ambiguous = active_learning_pool(args)
    make_network(args, pool.num_classes, pool.shape)  # a refused start claims no directory
    run, last = common.Run(args, "ddu", run_name(args)), args.max_training_samples
    sizes = [*range(args.num_initial_samples, last, args.acquisition_batch_size), last]
    jobs = [(a, r) for a in dict.fromkeys(args.active_learning) for r in range(args.runs)]
    mine = jobs[common.rank()::common.world_size()]
    run.config |= {"jitter": args.jitter, "shrinkage": args.shrinkage}  # they choose what to label
    with common.alone():
        run.dir.mkdir(parents=True, exist_ok=True)  # a machine may have a disk of its own
        done = {job: label_step_by_step(job, pool, test, start, sizes, args, run) for job in mine}
    done = {job: state for part in common.gather_objects(done) for job, state in part.items()}
    rows, curves, shares = [], {}, {}
    for acquisition, r in jobs:
        state = done[acquisition, r]
        if not args.eval:  # the main process's disk has all in the end
            run.save(f"{acquisition}-run{r}", **{k: state[k] for k in ("labelled", "accuracy")})
        odd = ambiguous[state["labelled"]].double().cumsum(0)
        share = [odd[n - 1].item() / n for n in sizes]
        curves.setdefault(acquisition, []).append(state["accuracy"])
        shares.setdefault(acquisition, []).append(share)
        rows.append({"method": acquisition, "seed": args.seed + r, "set": test.name,
                     "n": len(test), "labels": sizes[-1], "accuracy": state["accuracy"][-1],
                     "accuracy_mean": float(np.mean(state["accuracy"])),
                     "ambiguous_share": share[-1]})
    if common.is_main() and args.plot and (plt := common.pyplot()):
        plot_curves(plt, run.dir / "active_learning.png", curves, sizes, "test accuracy")
        if args.ambiguous:
            plot_curves(plt, run.dir / "ambiguous_share.png", shares, sizes,
                        "share of ambiguous examples among the labelled")
    return run.report(rows, curves=curves, ambiguous_shares=shares, labels=sizes)


def main(argv=None) -> list:
    args = parse_args(argv)
    if args.features:
        return run_features(args)
    return run_active_learning(args) if args.active_learning else run_networks(args)


if __name__ == "__main__":
    common.launch(main)
