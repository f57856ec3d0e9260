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
  python ddu.py --eval                                 # the table again, from the checkpoint
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      ddu.py --dataset cifar10                         # two machines, R = 0 and 1

Expected:
  dirty_glyphs, n = 3 seeds, mean +- standard error, two CPU cores, about two minutes each:
    AUROC of letters against the test set: density 0.972 +- 0.005, softmax entropy 0.707 +- 0.010;
    of ambiguous against clean digits: softmax entropy 0.995 +- 0.001, density 0.914 +- 0.005.
  cifar10 against SVHN, WRN-28-10: not measured. The authors' repository gives accuracy
    95.97 +- 0.03 %, AUROC 98.09 +- 0.10 % (density) and 94.44 +- 0.43 % (softmax entropy).

Differs from the published code (github.com/omegafragger/DDU, commit f597744):
  - The jitter search works on current PyTorch (there it never fits: issues 4 and 8), is relative to
    the features' scale, and classes with no more examples than features take an exact dual form.
  - Temperature is the optimum, not the best of 100 grid points (--match-published: the grid).
  - Ambiguous-MNIST repeats each image ten times; no image is in both train and validation
    (--match-published: the row-wise split, which leaks).
  - CIFAR-100 and SVHN have their own normalisation (--match-published: CIFAR-10's).
  - Active learning ranks log densities; there the float32 densities underflow to ties.
  - The network's softmax entropy and the entropy of the Gaussians' posterior have different names,
    AUPR-in and AUPR-out too; published names and layout: --published-json.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, World

# ---- Arguments ----------------------------------------------------------------------------------

PRESETS = {
    # paper: SGD 0.1, momentum 0.9, decay 5e-4 on everything, batch 128, 350 epochs, /10 at 150, 250
    "": dict(model="wide_resnet", sn=True, mod=True, coeff=3.0, power_iterations=1, epochs=350,
             batch_size=128, opt="sgd", lr=0.1, weight_decay=5e-4, schedule="step", width=1.0,
             amp="off", compile=False, ood=["svhn"]),
    "cifar10": dict(ood=["svhn", "cifar100", "tiny_imagenet"]),
    "cifar100": dict(ood=["svhn", "tiny_imagenet"]),
    "svhn": dict(ood=["cifar10", "cifar100"]),
    "tiny_imagenet": dict(model="resnet50", ood=["svhn"]),
    "imagenet": dict(model="torchvision/resnet50", sn=False, mod=False, ood=["imagenet_o"],
                     batch_size=256),
    # published code: figures 1 and 2 use ResNet-18 with spectral norm, without -mod, on 28x28 grey
    "mnist": dict(model="resnet18", mod=False, ood=["fashion_mnist"]),
    "fashion_mnist": dict(model="resnet18", mod=False, ood=["mnist"]),
    "kmnist": dict(model="resnet18", mod=False, ood=["mnist"]),
    "dirty_mnist": dict(model="resnet18", mod=False, epochs=100, ood=["fashion_mnist"]),
    "dirty_glyphs": dict(model="resnet18", mod=False, width=0.25, epochs=5, schedule="one_cycle",
                         ood=["glyphs_letters"]),
    "glyphs": dict(model="resnet18", mod=False, width=0.25, epochs=6, schedule="one_cycle",
                   ood=["glyphs_letters"]),
    "numbers": dict(model="resnet18", mod=False, width=0.25, epochs=6, schedule="one_cycle",
                    ood=["glyphs_letters"]),
    "two_moons": dict(model="fc_resnet", mod=False, epochs=150, lr=1e-3, batch_size=64, coeff=0.65,
                      power_iterations=5, opt="adam", weight_decay=0.0, ood=[],
                      first_milestone=1_000_000),  # published code: a constant learning rate
}
# Each of these sets is the union of a clean and an ambiguous one.
PARTS = {"dirty_mnist": ("mnist", "ambiguous_mnist"),
         "dirty_glyphs": ("glyphs", "glyphs_ambiguous")}
# The options that shape the weights: they name the run and guard its checkpoint.
TRAINING_OPTIONS = ("dataset", "model", "sn", "mod", "coeff", "power_iterations", "depth", "width",
                    "dropout", "seed", "epochs", "batch_size", "opt", "lr", "momentum", "nesterov",
                    "weight_decay", "schedule", "first_milestone", "second_milestone", "augment",
                    "noise", "amp", "match_published", "limit_steps")


def parse_args(argv=None):
    parser = common.Parser(prog="ddu.py", description=__doc__.split("\n")[0],
                           epilog="Details, equations and differences: the top of this file.")
    common.add_common_arguments(parser, [d for d in PRESETS if d])
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", help="lenet, resnet18, resnet50, wide_resnet, vgg16, or torchvision/NAME: "
        "pretrained, not trained further (NAME as torchvision.models.get_model takes it)")
    add("--weights", default="DEFAULT", help="of torchvision/NAME: DEFAULT, or a state dict's file")
    add("-sn", "--sn", action=flag, help="soft spectral normalisation of every convolution")
    add("-mod", "--mod", action=flag, help="leaky ReLU, average-pooled instead of 1x1 shortcuts")
    add("--coeff", type=float, help="spectral norm above which a layer is scaled down (paper: 3)")
    add("--power-iterations", type=int, help="power iterations a training step (paper: 1)")
    add("--depth", type=int, default=28, help="depth of wide_resnet, 6n + 4 (paper: 28)")
    add("--dropout", type=float, default=0.3, help="of wide_resnet (published code: 0.3)")
    add("--opt", choices=["sgd", "adam"], help="with adam use a learning rate near 1e-3")
    add("--momentum", "--mom", type=float, default=0.9, help="of SGD")
    add("--nesterov", action=flag, default=False, help="Nesterov momentum (paper: off)")
    add("--weight-decay", "--decay", type=float, help="on ALL parameters (paper: 5e-4)")
    add("--schedule", choices=["step", "one_cycle"], help="step: /10 at the milestones (paper); "
        "one_cycle: up for a fifth of the steps, down to zero; better in few epochs")
    add("--first-milestone", type=int, help="epoch of the first /10 (paper: 150 of 350)")
    add("--second-milestone", type=int, help="epoch of the second /10 (paper: 250 of 350)")
    add("--augment", action=flag, help="random crop and flip (default: on for CIFAR, as published)")
    add("--noise", type=float, default=0.0, help="Ambiguous-MNIST: noise std in normalised units; "
        "published code 0, published data package 0.05")
    add("--ood", "--ood_dataset", nargs="+", metavar="NAME",
        help="out-of-distribution sets, also folder:PATH for any folder of images")
    add("--shift", default="none", choices=["none", "computed", "published"],
        help="also evaluate the test set corrupted, by severity: computed, or the CIFAR-C files")
    add("--priors", default="none", choices=["none", "empirical", "uniform"],
        help="q(c): none leaves it out, as the published OOD evaluation does (balanced classes)")
    add("--jitter", default="auto", help="eps added to the covariances' diagonals: auto (0, or the "
        "smallest step of a ladder at which all classes factorise) or a number")
    add("--density-quantile", type=float, default=0.01,
        help="OOD threshold: this quantile of the training set's log densities")
    add("--entropy-threshold", type=float, default=0.35,
        help="nats above which an in-distribution input counts as ambiguous (0.35: half a bit)")
    add("--ensemble", type=int, default=1, metavar="M", help="train and evaluate M members too")
    add("--runs", type=int, default=1, help="repeat with the next seeds; mean and standard error")
    add("--published-json", action="store_true", help="also write res_*.json, the published layout")
    add("--match-published", action="store_true", help="the published code's choices that the top "
        "of this file lists: temperature grid, leaking split, CIFAR-10 statistics")
    add("--features", metavar="NPZ", help="fit features that you computed ('features' [N, D], "
        "'labels' [N]) and score those of --score; no network, no training")
    add("--score", nargs="+", default=[], metavar="NPZ", help="files to score ('features' [N, D])")
    add("--save-interval", type=int, default=1, help="epochs between checkpoints")
    add("--active-learning", nargs="+", choices=ACQUISITIONS, metavar="SCORE",
        help="label pool examples step by step, those of lowest density, highest entropy, highest "
        "predictive entropy (pe) or mutual information (mi) of an ensemble, or random")
    add("-ambiguous", "--ambiguous", action="store_true",
        help="its pool: --subsample clean examples and all of the ambiguous set")
    add("--subsample", type=int, default=1000, help="clean examples in the ambiguous pool")
    add("--trained-model", metavar="PT", help="last.pt of a dirty run whose entropy tells which "
        "acquired examples are ambiguous, as published (default: known from the pool)")
    add("--threshold", type=float, default=1.0, help="its entropy threshold, nats")
    add("--num-ensemble", type=int, default=5, help="members for pe and mi")
    add("--num-initial-samples", type=int, default=20, help="labels at the start, equal per class")
    add("--max-training-samples", type=int, default=300, help="labels at the end")
    add("--acquisition-batch-size", type=int, default=5, help="labels acquired per step")
    add("--draws", type=int, default=5056, help="examples drawn per epoch from the labelled few")
    args = parser.parse_args(argv)
    if args.active_learning:
        published = dict(model="resnet18", sn=False, mod=False, epochs=20, batch_size=64, lr=1e-3,
                         opt="adam", weight_decay=5e-4)
        for key, value in published.items():  # whatever the data set
            if getattr(args, key) is None:
                setattr(args, key, value)
    return check_args(common.resolve_arguments(args, PRESETS, "dirty_glyphs"))


def check_args(args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    if args.augment is None:
        args.augment = args.dataset in ("cifar10", "cifar100", "tiny_imagenet")
    if args.first_milestone is None:
        args.first_milestone = round(args.epochs * 150 / 350)
    if args.second_milestone is None:
        args.second_milestone = max(args.first_milestone, round(args.epochs * 250 / 350))
    if args.jitter != "auto":
        try:
            args.jitter = float(args.jitter)
        except ValueError:
            raise UserError(f"--jitter {args.jitter}: use auto or a number") from None
        if not 0 <= args.jitter < math.inf:
            raise UserError(f"--jitter {args.jitter}: must not be negative")
    for key in ("runs", "ensemble", "num_ensemble", "power_iterations", "save_interval", "draws",
                "subsample", "num_initial_samples", "acquisition_batch_size"):
        if getattr(args, key) < 1:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1")
    if args.max_training_samples < args.num_initial_samples:
        raise UserError(f"--max-training-samples {args.max_training_samples}: must be at least "
                        f"--num-initial-samples {args.num_initial_samples}")
    if args.nesterov and not args.momentum:
        raise UserError("--nesterov needs a --momentum above 0")
    if (args.model == "fc_resnet") != (args.dataset == "two_moons") and not args.features:
        raise UserError(f"--model {args.model} is not for --dataset {args.dataset}: two_moons and "
                        "fc_resnet go together")
    for key, low, high in (("coeff", 1e-6, math.inf), ("dropout", 0, 0.99), ("noise", 0, 1),
                           ("momentum", 0, 1), ("entropy_threshold", 0, math.inf),
                           ("density_quantile", 0, 1), ("weight_decay", 0, math.inf)):
        if not low <= getattr(args, key) <= high:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: "
                            f"must lie in [{low}, {high}]")
    if args.model == "wide_resnet" and (args.depth < 10 or args.depth % 6 != 4):
        raise UserError(f"--depth {args.depth}: wide_resnet takes 6n + 4, from 10 on")
    if args.features and not args.score or args.score and not args.features:
        raise UserError("--features TRAIN.npz and --score FILE.npz ... go together")
    if (args.sn or args.mod) and (args.model == "lenet" or args.model.startswith("torchvision/")):
        raise UserError(f"--model {args.model} has no spectral-normalised or -mod form; add "
                        "--no-sn --no-mod")
    return args


# ---- Model --------------------------------------------------------------------------------------
# Every network returns (logits [B, K], features [B, D]), logits = head(features).


class SoftSpectral:
    """Scale a weight down, never up, so that the layer's spectral norm is at most `coeff`:

        W_eff = W / max(1, sigma / coeff),   sigma = <u, A v>.

    A is the layer's true linear operator [Cin, H, W] -> [Cout, H', W'], with its stride, zero
    padding and input size: A v = W unfold(v), A^T u = fold(W^T u). A training forward takes
    `iterations` power iterations, v first. The gradient flows through sigma, with u and v constant.
    They are buffers: the net deep-copies, pickles, compiles and resumes exactly.
    """

    def set_operator(self, in_shape, out_shape, kernel_size, stride, padding, coeff, iterations):
        self.geometry = dict(kernel_size=kernel_size, stride=stride, padding=padding)
        self.coeff, self.iterations = coeff, iterations
        for name, shape in (("u", out_shape), ("v", in_shape)):
            start = torch.randn(1, *shape)
            self.register_buffer(name, start / start.norm())

    def effective_weight(self):
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            matrix, iterations = self.weight.flatten(1), self.iterations if self.training else 0
            columns = None if iterations else F.unfold(self.v, **self.geometry)
            for _ in range(iterations):
                v = F.fold(matrix.T @ self.u.flatten(2), self.v.shape[2:], **self.geometry)
                self.v.copy_(v / v.norm().clamp_min(1e-12))
                columns = F.unfold(self.v, **self.geometry)
                u = matrix @ columns
                self.u.copy_((u / u.norm().clamp_min(1e-12)).view_as(self.u))
            # <u, A v> is linear in W: it is <W, slope>, and slope is its gradient
            slope = self.u.flatten(2) @ columns.mT
        sigma = (self.weight * slope.view_as(self.weight)).sum()
        # published code: 1e-5 is added after the maximum, for k x k kernels only
        eps = 0.0 if self.geometry["kernel_size"] == (1, 1) else 1e-5
        return self.weight / (torch.clamp(sigma / self.coeff, min=1.0) + eps)


class SpectralConv2d(SoftSpectral, nn.Conv2d):
    def forward(self, x):
        if self.kernel_size != (1, 1) and x.shape[1:] != self.v.shape[1:]:
            raise UserError(f"a spectral-normalised layer for inputs {tuple(self.v.shape[1:])} got "
                            f"{tuple(x.shape[1:])}; resize the images or build the net for them")
        return F.conv2d(x, self.effective_weight(), self.bias, self.stride, self.padding)


class SpectralLinear(SoftSpectral, nn.Linear):
    def __init__(self, fan_in, fan_out, coeff, iterations):
        super().__init__(fan_in, fan_out)
        self.set_operator((fan_in, 1, 1), (fan_out, 1, 1), (1, 1), 1, 0, coeff, iterations)

    def forward(self, x):
        return F.linear(x, self.effective_weight(), self.bias)


@torch.no_grad()
def spectral_normalise(net, input_shape, coeff=3.0, iterations=1):
    """Make every convolution of `net` a SpectralConv2d for the size that inputs [C, H, W] give it.

    A 1x1 kernel acts as a matrix, whatever size and stride. Batch norm and head are left alone.
    """
    def convert(conv, inputs, output):
        x, y, operator = inputs[0][0], output[0], (conv.stride, conv.padding)
        if conv.kernel_size == (1, 1):
            x, y, operator = x[:, :1, :1], y[:, :1, :1], (1, 0)
        conv.__class__ = SpectralConv2d
        conv.set_operator(x.shape, y.shape, conv.kernel_size, *operator, coeff, iterations)

    hooks = [m.register_forward_hook(convert) for m in net.modules() if type(m) is nn.Conv2d]
    net.eval()(torch.zeros(1, *input_shape))
    for hook in hooks:
        hook.remove()
    return net.train()


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


def activation(mod):
    return nn.LeakyReLU(0.01) if mod else nn.ReLU()


def strided_1x1(c_in, c_out, stride):
    """A 1x1 convolution with a stride, as subsampling and then a plain one.

    Equal, and safe: on CPUs PyTorch 2.14's own strided one, channels last, writes out of bounds in
    the backward pass for some small widths.
    """
    return nn.Sequential(nn.AvgPool2d(1, stride), nn.Conv2d(c_in, c_out, 1, bias=False))


class LeNet(nn.Module):
    """LeNet-5 for 28x28 grey images; the feature is the 84-vector after its ReLU."""

    def __init__(self, num_classes, **_):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(256, 120), nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        feature = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.head(feature), feature


class ResidualBlock(nn.Module):
    """Post-activation block: basic (3x3, 3x3), or bottleneck (1x1, 3x3 with the stride, 1x1)."""

    def __init__(self, c_in, c, stride, bottleneck, mod):
        super().__init__()
        c_out = 4 * c if bottleneck else c
        shape = [(c_in, c, 1, 1), (c, c, 3, stride), (c, c_out, 1, 1)] if bottleneck else \
                [(c_in, c, 3, stride), (c, c, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False)
                                   for i, o, k, s in shape)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shape)
        self.act = activation(mod)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = PoolShortcut(stride, c_out - c_in) if mod else nn.Sequential(
                strided_1x1(c_in, c_out, stride), nn.BatchNorm2d(c_out))

    def forward(self, x):
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            h = norm(conv(self.act(h) if i else h))
        return self.act(h + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 or -50 with the CIFAR stem (3x3, stride 1, no max pool)."""

    def __init__(self, num_classes, in_channels=3, width=1.0, mod=False, bottleneck=False, **_):
        super().__init__()
        c_in = c_stem = max(1, round(64 * width))
        self.stem = nn.Conv2d(in_channels, c_in, 3, 1, 1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(c_in), activation(mod)
        blocks = []
        for stage, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
            c = c_stem * 2**stage
            for i in range(count):
                blocks.append(ResidualBlock(c_in, c, 2 if stage and not i else 1, bottleneck, mod))
                c_in = 4 * c if bottleneck else c
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c_in, num_classes)

    def forward(self, x):
        x = self.blocks(self.act(self.norm(self.stem(x))))
        feature = x.mean((2, 3))
        return self.head(feature), feature


class PreActivationBlock(nn.Module):
    """BN, act, 3x3, BN, act, dropout, 3x3; the shortcut sees the raw input."""

    def __init__(self, c_in, c_out, stride, mod, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.act, self.dropout = activation(mod), common.Dropout(dropout)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = PoolShortcut(stride, c_out - c_in) if mod else \
                strided_1x1(c_in, c_out, stride)

    def forward(self, x):
        h = self.conv1(self.act(self.norm1(x)))
        h = self.conv2(self.dropout(self.act(self.norm2(h))))
        return h + self.shortcut(x)


class WideResNet(nn.Module):
    """WRN-depth-(10 width): 28 and 1 are the paper's WRN-28-10."""

    def __init__(self, num_classes, in_channels=3, width=1.0, mod=False, depth=28, dropout=0.3,
                 **_):
        super().__init__()
        c_in, blocks = 16, []
        self.stem = nn.Conv2d(in_channels, c_in, 3, 1, 1, bias=False)
        for stage in range(3):
            c = max(1, round(160 * width)) * 2**stage
            for i in range((depth - 4) // 6):
                stride = 2 if stage and not i else 1
                blocks.append(PreActivationBlock(c_in, c, stride, mod, dropout))
                c_in = c
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.act = nn.BatchNorm2d(c_in), activation(mod)
        self.head = nn.Linear(c_in, num_classes)
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                m.momentum = 0.01
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        feature = self.act(self.norm(self.blocks(self.stem(x)))).mean((2, 3))
        return self.head(feature), feature


class VGG16(nn.Module):
    """VGG-16 with batch norm; on 28x28 images the first of the five max pools is left out."""

    def __init__(self, num_classes, in_channels=3, width=1.0, mod=False, size=32, **_):
        super().__init__()
        layers, c_in = [], in_channels
        for stage, (c, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
            c = max(1, round(c * width))
            for _ in range(count):
                layers += [nn.Conv2d(c_in, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c),
                           activation(mod)]
                c_in = c
            if stage or size >= 32:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(c_in, num_classes)

    def forward(self, x):
        feature = self.layers(x).mean((2, 3))
        return self.head(feature), feature


class FCResNet(nn.Module):
    """Two moons: 2 -> 128, four layers x + relu(linear(x)), all spectral-normalised, and a head."""

    def __init__(self, num_classes=2, sn=True, coeff=0.65, power_iterations=5, width=1.0, **_):
        super().__init__()
        def linear(i, o):
            return SpectralLinear(i, o, coeff, power_iterations) if sn else nn.Linear(i, o)
        hidden = max(1, round(128 * width))
        self.first = linear(2, hidden)
        self.layers = nn.ModuleList(linear(hidden, hidden) for _ in range(4))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x), x


class TorchvisionNet(nn.Module):
    """Any torchvision classifier that ends in a linear layer; its input is the feature."""

    def __init__(self, name, weights, num_classes, shape):
        super().__init__()
        import torchvision
        try:
            if weights == "DEFAULT":
                self.body = torchvision.models.get_model(name, weights=weights)
            else:
                self.body = torchvision.models.get_model(name, num_classes=num_classes)
                state = torch.load(weights, map_location="cpu", weights_only=True)
                self.body.load_state_dict(state)
        except Exception as error:  # unknown name, no network, not a state dict, other shapes
            raise UserError(f"--model torchvision/{name} --weights {weights}: "
                            f"{common.one_line(error)}; give a name that torchvision.models."
                            "list_models() knows, and a state dict's file") from None
        linear = [n for n, m in self.body.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise UserError(f"--model torchvision/{name} does not end in a linear layer")
        try:
            self.eval().body(torch.zeros(1, *shape))
        except Exception as error:
            raise UserError(f"--model torchvision/{name} does not take images {tuple(shape)}: "
                            f"{common.one_line(error)}") from None
        self.head = self.body.get_submodule(linear[-1])
        self.body.set_submodule(linear[-1], nn.Identity())
        if self.head.out_features != num_classes:
            raise UserError(f"--model torchvision/{name} has {self.head.out_features} classes, "
                            f"the data set {num_classes}")

    def forward(self, x):
        feature = self.body(x)
        return self.head(feature), feature


NETWORKS = {"lenet": LeNet, "resnet18": ResNet, "resnet50": ResNet, "wide_resnet": WideResNet,
            "vgg16": VGG16, "fc_resnet": FCResNet}


def make_network(args, num_classes, shape):
    """The network of `args` for inputs of `shape` (C, H, W), spectral-normalised if so asked."""
    if args.model.startswith("torchvision/"):
        return TorchvisionNet(args.model.split("/", 1)[1], args.weights, num_classes, shape)
    if args.model not in NETWORKS:
        raise UserError(f"--model {args.model}: use one of {', '.join(NETWORKS)}, torchvision/NAME")
    if args.model == "lenet" and tuple(shape) != (1, 28, 28):
        raise UserError(f"--model lenet takes 28x28 grey images, {args.dataset} has {shape}")
    net = NETWORKS[args.model](num_classes, in_channels=shape[0], size=shape[-1], width=args.width,
                               mod=args.mod, depth=args.depth, dropout=args.dropout, sn=args.sn,
                               coeff=args.coeff, power_iterations=args.power_iterations,
                               bottleneck=args.model == "resnet50")
    if args.sn and args.model != "fc_resnet":
        spectral_normalise(net, shape, args.coeff, args.power_iterations)
    return net


# ---- Method -------------------------------------------------------------------------------------

# Which side large values of a score stand for: "id" scores are confidences, "ood" uncertainties.
SCORES = {"density": "id", "entropy": "ood", "energy": "id", "max_prob": "id", "gmm_entropy": "ood",
          "class_mahalanobis": "id", "mahalanobis": "id", "relative_mahalanobis": "id"}
ACQUISITIONS = ("density", "entropy", "pe", "mi", "random")


class ClassMoments:
    """Streaming class means and covariances of features, float64, exact over batches and processes.

    `count` [K] is the number of examples of each class, known before the pass. A class with no
    more examples than features (n_c <= D) has a singular covariance: its rows are kept, for the
    dual form, instead of a D x D scatter. Memory is at most 8 K D^2 bytes either way.
    """

    def __init__(self, count, dim, device="cpu"):
        if (few := (count < 2).nonzero().flatten().tolist()):
            raise UserError(f"class {few[0]} has {int(count[few[0]])} training example(s) and a "
                            f"covariance needs two ({len(few)} such class(es)); add examples or "
                            "leave the class out")
        options = dict(dtype=torch.float64, device=device)
        self.expected, self.count = count.cpu(), torch.zeros(len(count), **options)
        self.mean = torch.zeros(len(count), dim, **options)
        self.scatter = {c: torch.zeros(dim, dim, **options)
                        for c, n in enumerate(count.tolist()) if n > dim}
        self.rows = [self.mean[:0]]
        self.row_labels = [torch.zeros(0, dtype=torch.long, device=device)]

    def update(self, features, labels):
        """Add a batch: features [B, D] of any float dtype, labels int64 [B]."""
        features = features.to(self.mean)
        if not torch.isfinite(features).all():
            raise UserError("features contain NaN or infinity: the network has diverged, or the "
                            "file is damaged")
        for c, z in group_by_class(features, labels).items():
            n, shift = self.count[c].clone(), z.mean(0) - self.mean[c]
            self.count[c] += len(z)
            if c in self.scatter:  # Chan's update: nothing cancels, however far from 0 z lies
                centred, weight = z - z.mean(0), n * len(z) / self.count[c]
                self.scatter[c].addmm_(centred.T, centred).add_(weight * shift.outer(shift))
            else:
                self.rows.append(z)
                self.row_labels.append(labels.new_full((len(z),), c))
            self.mean[c] += shift * len(z) / self.count[c]

    def reduce(self, world):
        """Merge the moments of all processes; afterwards all hold the same. Returns self."""
        if world.size > 1:
            count, mean = self.count, self.mean
            self.count = common.all_reduce(count.clone(), world)
            self.mean = common.all_reduce(mean * count[:, None], world) / self.count[:, None]
            for c, scatter in self.scatter.items():
                shift = mean[c] - self.mean[c]
                common.all_reduce(scatter.add_(count[c] * shift.outer(shift)), world)
            self.rows = [common.concat_rows(torch.cat(self.rows), world)]
            self.row_labels = [common.concat_rows(torch.cat(self.row_labels), world)]
        if not torch.equal(self.count.cpu().long(), self.expected):
            raise RuntimeError("the pass over the training set met other class counts than labels")
        return self

    def covariances(self):
        """({c: Sigma_c [D, D]}, {c: B_c [n_c, D], Sigma_c = B_c^T B_c}), divisor n_c - 1, CPU."""
        mean, n = self.mean.cpu(), self.count.tolist()
        rows = group_by_class(torch.cat(self.rows).cpu(), torch.cat(self.row_labels).cpu())
        return ({c: scatter.cpu() / (n[c] - 1) for c, scatter in self.scatter.items()},
                {c: (z - mean[c]) / (n[c] - 1) ** 0.5 for c, z in rows.items()})


def group_by_class(features, labels) -> dict:
    """{class: its rows of `features`} for the classes present."""
    classes, counts = labels.unique(return_counts=True)
    rows = features[labels.argsort(stable=True)].split(counts.tolist())
    return dict(zip(classes.tolist(), rows))


class Gaussians(NamedTuple):
    """One Gaussian per class, factorised, float64; D features, K classes, n_c examples of class c.

    n_c > D:  basis[c] = L_c^-1 [D, D] where Sigma_c + eps I = L_c L_c^T; eigenvalues[c] is None.
    n_c <= D: basis[c] [n_c - 1, D] holds the eigenvectors of Sigma_c, eigenvalues[c] its
              eigenvalues other than 0; outside their span the variance is eps.
    """

    mean: Tensor       # [K, D]
    basis: list
    eigenvalues: list
    log_det: Tensor    # [K]  log |Sigma_c + eps I|
    log_prior: Tensor  # [K]  log q(c), or 0 without priors
    count: Tensor      # [K]
    jitter: float      # eps, the same for all classes
    within: Tensor     # [D, D]  whitens the shared within-class covariance (Mahalanobis)
    total: Tensor      # [D, D]  whitens the covariance that ignores classes (relative Mahalanobis)

    def to(self, device):
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x
        return Gaussians(*([move(t) for t in x] if isinstance(x, list) else move(x) for x in self))


def fit_gaussians(moments, priors="none", jitter="auto") -> Gaussians:
    """Algorithm 1: q(z|c) = N(mu_c, Sigma_c + eps I), one full covariance per class.

    `jitter` is eps, or auto: the smallest step of the ladder 0, 10^-12 s, 10^-11 s, ..., s (s: mean
    variance of a feature) at which ALL classes have a Cholesky factor; 0 is left out if some
    n_c <= D: that covariance is singular. `priors` q(c): none (left out), empirical n_c/N, uniform.
    """
    mean, count = moments.mean.cpu(), moments.count.cpu()
    full, thin = moments.covariances()
    variances = [s.trace() for s in full.values()] + [b.square().sum() for b in thin.values()]
    scale = torch.stack(variances).mean().item() / mean.shape[1] or 1.0
    ladder = [10.0**k * scale for k in range(-12, 1)]
    steps = [float(jitter)] if jitter != "auto" else ladder if thin else [0.0, *ladder]
    eps, factors = factorise(full, steps)
    if thin and eps == 0:
        raise UserError(f"--jitter 0: class {min(thin)} has no more examples than features, so its "
                        "covariance is singular; use auto or a positive number")
    classes = range(len(count))
    forms = [thin_form(thin[c], eps) if c in thin else full_form(factors[c]) for c in classes]
    basis, eigenvalues, log_det = zip(*forms)
    share = count / count.sum()
    log_prior = {"none": torch.zeros_like(share), "empirical": share.log(),
                 "uniform": torch.full_like(share, -math.log(len(count)))}[priors]
    within = sum((count[c] - 1) / count.sum() * (full[c] if c in full else thin[c].T @ thin[c])
                 for c in classes)
    offset = (mean - share @ mean) * share.sqrt()[:, None]
    whiten = [full_form(factorise({0: s}, [0.0, *ladder])[1][0])[0]
              for s in (within, within + offset.T @ offset)]
    return Gaussians(mean, list(basis), list(eigenvalues), torch.stack(log_det), log_prior, count,
                     eps, *whiten)


def factorise(covariances, steps):
    """(eps, {c: Cholesky factor of Sigma_c + eps I}): the first eps at which all have one.

    A pivot that is only rounding beside its variance counts as none.
    """
    for eps in steps:
        factors = {}
        for c, s in covariances.items():
            s = s + eps * torch.eye(len(s), dtype=s.dtype)
            factors[c], failed = torch.linalg.cholesky_ex(s)
            rounding = 2 * len(s) * torch.finfo(s.dtype).eps * s.diagonal()
            if failed or (factors[c].diagonal().square() <= rounding).any():
                break
        else:
            return eps, factors
    raise UserError(f"the covariances have no Cholesky factor up to jitter {steps[-1]:g}; give a "
                    "larger --jitter")


def full_form(factor):
    """(basis, None, log determinant) of one class from L [D, D]: ||L^-1 z||^2 is one product."""
    identity = torch.eye(len(factor), dtype=factor.dtype)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverse, None, 2 * factor.diagonal().log().sum()


def thin_form(b, eps):
    """(basis, eigenvalues, log determinant) of B^T B + eps I from B [n_c, D]; nothing is D x D."""
    _, s, basis = torch.linalg.svd(b, full_matrices=False)
    keep = s > s[0] * 1e-12  # centring takes one rank away, equal examples more
    values = s[keep].square()
    log_det = (values + eps).log().sum() + (b.shape[1] - len(values)) * math.log(eps)
    return basis[keep], values, log_det


def class_log_densities(gaussians, features) -> Tensor:
    """log N(z; mu_c, Sigma_c) [N, K], float64, of features [N, D]: no prior, class by class."""
    features = features.to(gaussians.mean)
    dim, columns = features.shape[1], []
    for mean, basis, values, log_det in zip(*gaussians[:4]):
        z = features - mean
        projected = z @ basis.T
        if values is None:
            squared = projected.square().sum(1)
        else:  # variance eps outside the span of the class's examples
            squared = (projected.square() / (values + gaussians.jitter)).sum(1)
            squared += (z - projected @ basis).square().sum(1) / gaussians.jitter
        columns.append(-0.5 * (squared + log_det + dim * math.log(2 * math.pi)))
    return torch.stack(columns, 1)


def density_scores(gaussians, features) -> dict:
    """Scores [N] from the features alone: the paper's log density, and its relatives.

    density              log q(z) = logsumexp_c log N(z; mu_c, Sigma_c) + log q(c)
    gmm_entropy          entropy of q(c|z), nats; not the network's softmax entropy
    class_mahalanobis    -min_c (z - mu_c)^T Sigma_c^-1 (z - mu_c)
    mahalanobis          the same with one shared within-class covariance (Lee et al. 2018)
    relative_mahalanobis minus the distance to a single Gaussian without classes (Ren et al. 2021)
    """
    class_log_density = class_log_densities(gaussians, features)
    joint = class_log_density + gaussians.log_prior
    squared = -2 * class_log_density - gaussians.log_det - features.shape[1] * math.log(2 * math.pi)
    centre = gaussians.count @ gaussians.mean / gaussians.count.sum()
    z, mean = features.to(centre) - centre, gaussians.mean - centre
    without_class = (z @ gaussians.total.T).square().sum(1)
    nearest = torch.cdist(z @ gaussians.within.T, mean @ gaussians.within.T).min(1).values.square()
    return {"density": joint.logsumexp(1), "gmm_entropy": common.entropy(joint.softmax(1)),
            "class_mahalanobis": -squared.min(1).values, "mahalanobis": -nearest,
            "relative_mahalanobis": without_class - nearest}


def softmax_scores(logits, temperature=1.0) -> dict:
    """Scores [N] of logits [N, K] / T: entropy (nats), largest probability, energy (logsumexp)."""
    logits = logits.double() / temperature
    probs = logits.softmax(1)
    return {"entropy": common.entropy(probs), "max_prob": probs.max(1).values,
            "energy": logits.logsumexp(1)}


def decide(density, entropy, density_threshold, entropy_threshold) -> Tensor:
    """0 clean, 1 ambiguous, 2 out of distribution [N]: low density is OOD whatever the entropy."""
    # paper: the pseudo-code's sign is inverted; a LOW density means out of distribution
    return torch.where(density < density_threshold, 2, (entropy > entropy_threshold).long())


def acquire(scores, count) -> Tensor:
    """Indices of the `count` most uncertain pool examples: largest scores [P], ties by index."""
    return scores.sort(descending=True, stable=True).indices[:count]


def learning_rate(step, steps_per_epoch, args) -> float:
    """The learning rate at a global step (from 0): a pure function, so resuming needs no state."""
    if args.schedule == "step":
        epoch = step // steps_per_epoch
        return args.lr * 0.1 ** ((epoch >= args.first_milestone) + (epoch >= args.second_milestone))
    total = max(1, args.epochs * steps_per_epoch)
    warm = 0.2 * total
    return args.lr * ((step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm))


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, world, batch_size=None, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`."""
    return data.Loader(dataset, batch_size or args.batch_size, world.device, seed=args.seed,
                       shuffle=train, augment="crop_flip" if train and args.augment else "none",
                       rank=world.rank, world_size=world.size, workers=args.workers,
                       channels_last=True)


def autocast(args, world):
    return torch.autocast(world.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def train(net, train_set, run, args, world):
    """Cross entropy on the training set, resumed from this run's checkpoint if there is one."""
    device = world.device
    run.open()
    run.say(f"run directory {run.directory}")
    model = common.sync_batch_norm(net.to(device, memory_format=torch.channels_last), world)
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    if args.opt == "adam":
        optimiser = torch.optim.Adam(net.parameters(), **options)
    else:
        optimiser = torch.optim.SGD(net.parameters(), momentum=args.momentum,
                                    nesterov=args.nesterov, **options)
    loader = make_loader(train_set, args, world, train=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    progress = {"epoch": 0, "step": 0, "losses": torch.zeros(steps), "correct": torch.zeros(steps)}
    lr_at = lambda step: learning_rate(step, steps, args)
    if (state := run.load()) is not None:
        net.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        progress = state["progress"]
        run.say(f"{run.resume_from}: {progress['epoch']} of {args.epochs} epochs are done")
    if args.compile:
        model = torch.compile(model)
    model = common.data_parallel(model, world)

    def save(**progress):
        if not math.isfinite(torch.nn.utils.get_total_norm(net.parameters())):
            raise UserError(f"weights are no longer finite after epoch {progress['epoch']}; the "
                            "last good checkpoint is kept. Lower --lr")
        run.save(model=net.state_dict(), optimiser=optimiser.state_dict(), progress=progress)

    with common.StopSignals() as stop:
        for epoch in range(progress["epoch"], args.epochs):
            clock, first = common.Stopwatch(device), progress["step"]
            step, signum, losses, correct = train_epoch(model, optimiser, loader, epoch, steps,
                                                        progress, stop, args, world)
            common.check_finite(losses[:step], epoch * steps, lr_at)
            if step < steps:
                save(epoch=epoch, step=step, losses=losses, correct=correct)
                raise common.Stopped(signum, f"in epoch {epoch + 1} after step {step}")
            seconds, images = clock.seconds(), min(steps * args.batch_size, len(train_set))
            run.log(epoch=epoch + 1, epochs=args.epochs, loss_nats=losses.mean().item(),
                    accuracy=correct.sum().item() / images, lr=lr_at(epoch * steps + steps - 1),
                    images_per_s=images * (1 - first / steps) / seconds, seconds=seconds)
            progress = {"step": 0, "losses": torch.zeros(steps), "correct": torch.zeros(steps)}
            signum = signum or stop.asked(world)
            if (epoch + 1) % args.save_interval == 0 or epoch + 1 == args.epochs or signum:
                save(epoch=epoch + 1, **progress)
            if signum:
                raise common.Stopped(signum, f"after epoch {epoch + 1}")


def train_epoch(model, optimiser, loader, epoch, steps, progress, stop, args, world):
    """Steps progress["step"] to `steps` of an epoch; fewer if a stop is asked for.

    Returns the steps done, the signal that stopped it or 0 and, by step, mean loss and correct
    predictions [steps], on the CPU.
    """
    model.train()
    share = float(world.is_main)  # sums over processes from before an interruption count once
    losses, correct = (share * progress[k].to(world.device) for k in ("losses", "correct"))
    batches = common.progress(loader.epoch(epoch, start=progress["step"]), steps - progress["step"],
                              f"epoch {epoch + 1}", args.quiet, world)
    for step, batch in zip(range(progress["step"], steps), batches):
        common.seed_all(args.seed, epoch, step)  # dropout: the same whatever came before
        common.Dropout.global_rows = batch.global_size
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(epoch * steps + step, steps, args)
        with autocast(args, world):
            logits, _ = model(batch.images)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum") / batch.global_size
        optimiser.zero_grad(set_to_none=True)
        (loss * world.size).backward()  # DDP divides by the number of processes
        optimiser.step()
        losses[step] = loss.detach()
        correct[step] = (logits.argmax(1) == batch.labels).sum()
        if signum := stop.asked(world, step):
            break
    return step + 1, signum, *(common.all_reduce(t, world).cpu() for t in (losses, correct))


# ---- Evaluation ---------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What one forward pass over a set gives, in the set's order, on the CPU of every process."""

    logits: Tensor      # [N, K] float32
    labels: Tensor      # [N]
    scores: dict        # density scores by name, [N] float64; softmax scores come from the logits

    def join(self, other):
        return Outputs(torch.cat([self.logits, other.logits]),
                       torch.cat([self.labels, other.labels]),
                       {k: torch.cat([v, other.scores[k]]) for k, v in self.scores.items()})


@torch.no_grad()
def forward_batches(net, dataset, args, world):
    """Yield (batch, logits, features), float32, of this process's rows: eval mode, un-augmented."""
    net.eval()
    for batch in make_loader(dataset, args, world, max(512, args.batch_size)).epoch():
        if not len(batch.labels):  # more processes than images left
            continue
        with autocast(args, world):
            logits, features = net(batch.images)
        yield batch, logits.float(), features.float()


def fit_density(net, train_set, args, world) -> Gaussians:
    """One pass over the training set, then one Gaussian per class."""
    count = torch.bincount(train_set.labels, minlength=train_set.num_classes)
    dim = net.head.in_features
    needed = 2 * 8 * dim * sum(min(n, dim) for n in count.tolist())  # moments and factors
    if needed > (memory := common.device_memory(world)):
        raise UserError(f"{len(count)} Gaussians of {dim} features need {needed / 1e9:.1f} GB, the "
                        f"device has {memory / 1e9:.1f} GB; use a smaller --width, or --device cpu")
    moments = ClassMoments(count, dim, world.device)
    for batch, _, features in forward_batches(net, train_set, args, world):
        moments.update(features, batch.labels)
    return fit_gaussians(moments.reduce(world), args.priors, args.jitter).to(world.device)


def evaluate_set(net, gaussians, dataset, args, world) -> Outputs:
    """Logits and density scores of all N examples: one forward pass, any number of processes."""
    names = list(density_scores(gaussians, gaussians.mean))
    rows = [torch.zeros(0, len(gaussians.mean) + len(names), dtype=torch.float64)]
    index = [torch.zeros(0, dtype=torch.long)]
    for batch, logits, features in forward_batches(net, dataset, args, world):
        scores = density_scores(gaussians, features)
        rows.append(torch.cat([logits.double(), torch.stack(list(scores.values()), 1)], 1).cpu())
        index.append(batch.index.cpu())
    rows = common.gather_rows(torch.cat(rows), torch.cat(index), len(dataset), world)
    logits, scores = rows[:, :-len(names)].float(), rows[:, -len(names):]
    return Outputs(logits, dataset.labels, dict(zip(names, scores.unbind(1))))


def classification_metrics(log_probs, labels, suffix="") -> dict:
    """Accuracy, NLL (nats), Brier, calibration errors (15 bins) of log-probabilities [N, K]."""
    probs = log_probs.exp()
    values = {"accuracy": common.accuracy(probs, labels), "nll": common.nll(log_probs, labels),
              "brier": common.brier(probs, labels), "ece15": common.ece(probs, labels),
              "mce15": common.mce(probs, labels),
              "adaptive_ece15": common.adaptive_ece(probs, labels)}
    return {name + suffix: value for name, value in values.items()}


def detection_metrics(inside, outside) -> dict:
    """AUROC, AUPR-in, AUPR-out, FPR at 95 % TPR of every score, `inside` against `outside`.

    Both are {score: [N]}. Large values speak for the side that SCORES names (ensembles': "ood").
    """
    side = lambda name: SCORES.get(name.removesuffix("_scaled"), "ood")
    return {f"{metric}_{name}": value for name in inside for metric, value in
            common.ood_metrics(inside[name], outside[name], larger_means=side(name)).items()}


def all_scores(outputs, temperature=1.0) -> dict:
    """Every score [N] of a set; softmax scores also at the temperature, as <score>_scaled."""
    scaled = softmax_scores(outputs.logits, temperature)
    return {**outputs.scores, **softmax_scores(outputs.logits),
            **{f"{name}_scaled": values for name, values in scaled.items()}}


class Comparison(NamedTuple):
    """One row of the detection table: how the scores tell `outside` from `inside`."""

    name: str
    inside: str
    outside: str


def comparisons(sets) -> list:
    """OOD sets against the test set and, where that has an ambiguous part, its clean part too."""
    rows = [Comparison(name, "test", name) for name in sets["ood"]]
    if len(sets["test"]) == 2:
        clean, ambiguous = sets["test"]
        rows += [Comparison(f"{name}_vs_{clean}", clean, name) for name in sets["ood"]]
        rows += [Comparison(ambiguous, clean, ambiguous)]
    return rows


def evaluate(net, sets, args, world):
    """Every quantity of one network: (metrics by `split/metric`, outputs by set, thresholds)."""
    gaussians = fit_density(net, sets["train"], args, world)
    run_set = lambda dataset: evaluate_set(net, gaussians, dataset, args, world)
    outputs = {name: run_set(dataset) for name, dataset in {**sets["test"], **sets["ood"]}.items()}
    parts = [outputs[name] for name in sets["test"]]
    outputs["test"] = parts[0].join(parts[1]) if len(parts) == 2 else parts[0]
    outputs["val"], outputs["train"] = run_set(sets["val"]), run_set(sets["train_sample"])
    fit = common.fit_temperature_grid if args.match_published else common.fit_temperature
    temperature = fit(outputs["val"].logits, outputs["val"].labels)
    threshold = outputs["train"].scores["density"].quantile(args.density_quantile).item()
    metrics = {"temperature": temperature, "jitter": gaussians.jitter,
               "density_threshold": threshold, "features": gaussians.mean.shape[1],
               "examples_per_class_min": int(gaussians.count.min())}
    for name in dict.fromkeys(["val", "test", *sets["test"]]):
        logits, labels = outputs[name].logits.double(), outputs[name].labels
        scaled = (logits / temperature).log_softmax(1)
        values = {**classification_metrics(logits.log_softmax(1), labels),
                  **classification_metrics(scaled, labels, "_scaled")}
        metrics |= {f"{name}/{k}": v for k, v in values.items()}
    scores = {name: all_scores(out, temperature) for name, out in outputs.items()}
    for row in comparisons(sets):
        values = detection_metrics(scores[row.inside], scores[row.outside])
        metrics |= {f"{row.name}/{k}": v for k, v in values.items()}
    for name in [*sets["test"], *sets["ood"]]:
        regions = decide(scores[name]["density"], scores[name]["entropy"], threshold,
                         args.entropy_threshold)
        shares = torch.bincount(regions, minlength=3) / len(regions)
        for label, share in zip(("clean", "ambiguous", "ood"), shares.tolist()):
            metrics[f"{name}/fraction_{label}"] = share
    metrics |= evaluate_shift(run_set, sets, scores, args)
    return metrics, outputs, gaussians


def evaluate_shift(run_set, sets, scores, args) -> dict:
    """Accuracy, NLL, ECE and clean-against-corrupted AUROC by severity, means over corruptions."""
    if args.shift == "none":
        return {}
    clean, metrics = next(iter(sets["test"].values())), {}
    name, kinds = f"{clean.name}_computed_c", list(data.CORRUPTIONS)
    corrupt = lambda kind, severity: data.corrupted(clean, kind, severity)
    if args.shift == "published":
        name, kinds = args.dataset.replace("_", "") + "c", data.CIFAR_C_KINDS[:15]
        corrupt = lambda kind, severity: data.match(
            data.load_corrupted(f"{args.dataset}_c", kind, severity, args.data_dir), clean)
    elif clean.name == "glyphs":
        name = "glyphs_c"
    for severity in range(1, 6):
        rows = []
        for kind in kinds:
            outputs = run_set(corrupt(kind, severity))
            log_probs = outputs.logits.double().log_softmax(1)
            detection = detection_metrics(scores[clean.name], all_scores(outputs))
            rows.append({**classification_metrics(log_probs, outputs.labels), **detection})
        metrics |= {f"{name}_s{severity}/{k}": float(np.mean([row[k] for row in rows]))
                    for k in rows[0]}
    return metrics


def evaluate_ensemble(members, sets) -> dict:
    """Metrics of the mean of the members' probabilities, and of its entropies, before and after T.

    `members`: (metrics, outputs) of each; every member has its own temperature.
    """
    metrics, scores = {}, {}
    for name, first in members[0][1].items():
        scores[name] = {}
        for suffix in ("", "_scaled"):
            log_probs = torch.stack([(outputs[name].logits.double() / (
                own["temperature"] if suffix else 1)).log_softmax(1) for own, outputs in members])
            parts = common.ensemble_uncertainty(log_probs)
            scores[name] |= {"predictive_entropy" + suffix: parts["total"],
                             "mutual_information" + suffix: parts["epistemic"]}
            if name in ("test", *sets["test"]):
                mean = log_probs.logsumexp(0) - math.log(len(members))
                values = classification_metrics(mean, first.labels, suffix)
                metrics |= {f"{name}/{k}": v for k, v in values.items()}
    for row in comparisons(sets):
        values = detection_metrics(scores[row.inside], scores[row.outside])
        metrics |= {f"{row.name}/{k}": v for k, v in values.items()}
    return metrics


def published_results(runs, dataset, ood, args) -> dict:
    """The published JSON for each model type: mean, std (the standard error), values, info.

    `runs`: a list of {"single": metrics, "ensemble": metrics or None}. m1 and m2 are, for softmax,
    energy (its AUPR-in) and entropy; for gmm, density (AUPR-in) and the entropy of the Gaussians'
    posterior; for ensemble, mutual information and predictive entropy; t_: temperature scaled.
    """
    kinds = {"softmax": ("single", "energy", "aupr_in", "entropy"),
             "gmm": ("single", "density", "aupr_in", "gmm_entropy"),
             "ensemble": ("ensemble", "mutual_information", "aupr_out", "predictive_entropy")}
    files = {}
    for kind, (source, m1, aupr1, m2) in kinds.items():
        if runs[0][source] is None:
            continue
        keys = {"accuracy": "test/accuracy", "ece": "test/ece15"}
        for prefix, suffix in (("", ""), ("t_", "_scaled")):
            keys |= {"t_ece": "test/ece15_scaled"} if prefix else {}
            suffix = "" if kind == "gmm" else suffix  # densities know no temperature
            keys |= {f"{prefix}m1_auroc": f"{ood}/auroc_{m1}{suffix}",
                     f"{prefix}m1_auprc": f"{ood}/{aupr1}_{m1}{suffix}",
                     f"{prefix}m2_auroc": f"{ood}/auroc_{m2}{suffix}",
                     f"{prefix}m2_auprc": f"{ood}/aupr_out_{m2}{suffix}"}
        values = {k: [run[source][name] for run in runs] for k, name in keys.items()}
        files[f"res_{published_stem(args)}_{kind}_{dataset}_{ood}.json"] = {
            "mean": {k: float(np.mean(v)) for k, v in values.items()},
            "std": {k: common.standard_error(v) for k, v in values.items()},
            "values": values, "info": vars(args)}
    return files


def published_stem(args) -> str:
    """File names of the published code: model, _sn_3.0, _mod, seed."""
    spectral = f"_sn_{args.coeff}" if args.sn else ""
    return f"{args.model.replace('/', '_')}{spectral}{'_mod' * args.mod}_{args.seed}"


def format_results(metrics, sets) -> str:
    """The table that a run prints: predictions by set, then AUROC by score."""
    temperature, columns = f"T = {metrics['temperature']:.2f}:", []
    names = ["test", *sets["test"]] if len(sets["test"]) == 2 else ["test"]
    for label, key, scale, digits in (
            ("accuracy %", "accuracy", 100, 2), ("NLL nats", "nll", 1, 4),
            ("ECE15 %", "ece15", 100, 2), (f"{temperature} NLL", "nll_scaled", 1, 4),
            ("ECE15 %", "ece15_scaled", 100, 2)):
        columns.append([label, *(f"{scale * metrics[f'{n}/{key}']:.{digits}f}" for n in names)])
    header, *rows = zip(["predictions", *names], *columns)
    shown = ("density", "entropy", "energy", "max_prob", "gmm_entropy", "mahalanobis",
             "relative_mahalanobis")
    detection = [[f"{row.outside} from {row.inside}",
                  *(f"{metrics[f'{row.name}/auroc_{score}']:.4f}" for score in shown)]
                 for row in comparisons(sets)]
    return (common.format_table(header, rows) + "\n\n" +
            common.format_table(["AUROC", *shown], detection))


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#CCBB44", "#AA3377", "#228833", "#EE6677", "#66CCEE"]  # colour-blind safe


def plot_uncertainty(plt, path, outputs, sets, threshold, entropy_threshold):
    """Figures 1 and 2 of the paper (entropy, density), and the plane in which `decide` cuts."""
    names = [*sets["test"], *sets["ood"]]
    entropies = {n: softmax_scores(outputs[n].logits)["entropy"].numpy() for n in names}
    densities = {n: outputs[n].scores["density"].numpy() for n in names}
    inside = np.concatenate([densities[n] for n in sets["test"]])
    high, top = inside.max(), max(e.max() for e in entropies.values())
    low = min(threshold, np.quantile(inside, 0.01)) - 1.5 * (high - threshold)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for colour, name in zip(COLOURS, names):
        entropy, density = entropies[name], densities[name].clip(low, high)
        look = dict(weights=np.full(len(entropy), 1 / len(entropy)), alpha=0.6, color=colour)
        left.hist(entropy, 40, range=(0, top), label=name.replace("_", " "), **look)
        middle.hist(density, 60, range=(low, high), **look)
        few = slice(None, None, max(1, len(entropy) // 1500))
        right.plot(density[few], entropy[few], ".", ms=2.5, alpha=0.5, color=colour)
    middle.axvline(threshold, color="black", ls="--", lw=1)
    right.axvline(threshold, color="black", ls="--", lw=1)
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
        bins = common.reliability(confidence, predicted == outputs.labels)
        left, share = np.arange(15) / 15, bins.counts / bins.counts.sum()
        axis.bar(left, bins.accuracy, 1 / 15, align="edge", color=COLOURS[0], ec="white",
                 label="accuracy")
        axis.bar(left, share, 1 / 15, align="edge", fc="none", ec=COLOURS[2],
                 label="share of examples")
        axis.plot([0, 1], [0, 1], "k--", lw=1)
        axis.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1),
                 title=f"T = {t:.2f}, ECE {100 * common.ece(probs, outputs.labels):.2f} %")
    axes[0].set_ylabel("accuracy")
    axes[0].legend(loc="upper left")
    common.save_figure(plt, figure, path)


def plot_shift(plt, path, metrics):
    """AUROC of clean against corrupted test images, and accuracy, by severity."""
    name = next(k.split("_s1/")[0] for k in metrics if "_s1/" in k)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), constrained_layout=True)
    values = lambda key: [metrics[f"{name}_s{s}/{key}"] for s in range(1, 6)]
    for colour, score in zip(COLOURS, ("density", "entropy", "energy")):
        left.plot(range(1, 6), values(f"auroc_{score}"), "o-", color=colour, label=score)
    right.plot(range(1, 6), values("accuracy"), "o-", color=COLOURS[3], label="accuracy")
    right.plot(range(1, 6), values("ece15"), "s-", color=COLOURS[4], label="ECE, 15 bins")
    left.set(xlabel="severity", ylabel="AUROC, clean against corrupted", xticks=range(1, 6),
             title=name)
    right.set(xlabel="severity", xticks=range(1, 6), ylim=(0, 1))
    left.legend(frameon=False)
    right.legend(frameon=False)
    common.save_figure(plt, figure, path)


def plot_two_moons(plt, path, x, y, grid, panels):
    """Uncertainties over the plane, {title: [rows * columns]}, and the training data."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6),
                                constrained_layout=True)
    for axis, (title, values) in zip(axes, panels.items()):
        image = axis.pcolormesh(*(t.numpy() for t in (*grid, values.view(grid[0].shape))))
        figure.colorbar(image, ax=axis)
        for c in (0, 1):
            axis.plot(*x[y == c][::2].T.numpy(), ".", ms=2, color=COLOURS[1 + c])
        axis.set(title=title, xlim=(-2.5, 3.5), ylim=(-3, 3))
    common.save_figure(plt, figure, path)


def plot_active_learning(plt, path, curves, labels, ylabel="test accuracy %"):
    """Mean and standard-error band over the runs: curves {name: [runs, evaluations]}."""
    figure, axis = plt.subplots(figsize=(5.5, 3.8), constrained_layout=True)
    for colour, (name, values) in zip(COLOURS, curves.items()):
        values = np.asarray(values)
        mean = values.mean(0)
        axis.plot(labels, mean, color=colour, label=f"{name} ({len(values)} runs)")
        if len(values) > 1:
            error = values.std(0, ddof=1) / len(values) ** 0.5
            axis.fill_between(labels, mean - error, mean + error, color=colour, alpha=0.25, lw=0)
    axis.set(xlabel="labelled examples", ylabel=ylabel)
    axis.legend(frameon=False)
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args, world) -> dict:
    """All sets of a run, before anything is trained: train, val, test parts, OOD sets by name."""
    options = dict(data_dir=args.data_dir, seed=args.seed, noise=args.noise,
                   published_split=args.match_published)

    def load(name, split="test", **changes):
        size = like.shape[-1] if name.startswith("folder:") else None
        return data.match(data.load(name, split, image_size=size, **{**options, **changes}), like)

    with common.main_first(world):
        like = data.load(args.dataset, "train", **options)
        if args.match_published and args.dataset in ("cifar100", "svhn"):
            mean, std = data.TORCHVISION["cifar10"][4:6]
            like = dataclasses.replace(like, mean=mean, std=std)
        sets = {"train": like, "val": load(args.dataset, "val"),
                "test": {part: load(part) for part in PARTS.get(args.dataset, (args.dataset,))},
                "ood": {Path(name.removeprefix("folder:")).name: load(name, noise=0.0)
                        for name in args.ood}}
    if args.shift != "none" and isinstance(like, data.StreamedSet):
        raise UserError("--shift works on sets that fit in memory; give folders of corrupted "
                        "images to --ood")
    if args.shift == "published" and args.dataset not in ("cifar10", "cifar100"):
        raise UserError("--shift published is for cifar10 and cifar100; use --shift computed")
    order = torch.randperm(len(like), generator=torch.Generator().manual_seed(args.seed))
    sets["train_sample"] = like.select(order[:10_000])  # enough for the threshold's quantile
    return sets


def run_name(args) -> str:
    spectral = f"-sn{args.coeff:g}" if args.sn else ""
    width = f"-w{args.width:g}" if args.width != 1 else ""
    return f"{args.dataset}-{args.model.replace('/', '_')}{spectral}{'-mod' * args.mod}{width}"


def open_run(args, world, suffix, keys=TRAINING_OPTIONS):
    """The run directory of one network, or of a summary, whose results the options `keys` shape."""
    config = {k: getattr(args, k) for k in keys}
    return common.Run(args, "ddu", (args.name or run_name(args)) + suffix, config, world)


def load_finished(net, run, args):
    """The weights of a run that has had all its epochs (--eval)."""
    state = run.load(required=True)
    if (done := state["progress"]["epoch"]) < args.epochs:
        raise UserError(f"{run.resume_from} has {done} of {args.epochs} epochs; finish it first "
                        "(the same command without --eval)")
    net.load_state_dict(state["model"])


def run_network(args, world, several):
    """Train one network (unless it is trained), evaluate it, write its results and pictures."""
    common.seed_all(args.seed)
    sets = load_sets(args, world)
    net = make_network(args, sets["train"].num_classes, sets["train"].shape)
    net = net.to(world.device, memory_format=torch.channels_last)
    run = open_run(args, world, "" if args.name and not several else f"-seed{args.seed}")
    pretrained = args.model.startswith("torchvision/")
    if args.eval and not pretrained:
        load_finished(net, run, args)
    elif not pretrained:
        train(net, sets["train"], run, args, world)
    clock = common.Stopwatch(world.device)
    metrics, outputs, gaussians = evaluate(net, sets, args, world)
    run.results(metrics, {"train_s": sum(row["seconds"] for row in run.history),
                          "evaluate_s": clock.seconds()})
    if world.is_main:
        path = run.directory
        common.save_checkpoint(path / "gaussians.pt", gaussians.to("cpu")._asdict())
        print(f"\n{run_name(args)}, seed {args.seed}, jitter {metrics['jitter']:.3g}\n\n"
              f"{format_results(metrics, sets)}\n", flush=True)
        if args.plot and (plt := common.pyplot()):
            plot_uncertainty(plt, path / "uncertainty.png", outputs, sets,
                             metrics["density_threshold"], args.entropy_threshold)
            plot_reliability(plt, path / "reliability.png", outputs["test"],
                             metrics["temperature"])
            if args.shift != "none":
                plot_shift(plt, path / "shift.png", metrics)
            run.say(f"pictures in {path}")
    return metrics, outputs, sets


def run_networks(args, world) -> dict:
    """--runs times --ensemble networks, seeds from --seed on, and what they are together."""
    several, runs = args.runs * args.ensemble > 1, []
    for first in range(args.seed, args.seed + args.runs * args.ensemble, args.ensemble):
        members = [run_network(common.with_options(args, seed=seed), world, several)
                   for seed in range(first, first + args.ensemble)]
        sets = members[0][2]
        together = evaluate_ensemble([m[:2] for m in members], sets) if args.ensemble > 1 else None
        runs.append({"single": members[0][0], "ensemble": together})
    if not several and not args.published_json:
        return runs[0]["single"]
    flat = [{**run["single"], **{f"ensemble/{k}": v for k, v in (run["ensemble"] or {}).items()}}
            for run in runs]
    summary = {k: float(np.mean([values[k] for values in flat])) for k in flat[0]}
    errors = {k: common.standard_error([values[k] for values in flat]) for k in flat[0]}
    run = open_run(args, world, f"-seed{args.seed}-ensemble{args.ensemble}-runs{args.runs}",
                   (*TRAINING_OPTIONS, "ensemble", "runs"))
    run.results(summary, {}, standard_error=errors, values=flat)
    if world.is_main:
        print(f"mean of {args.runs} run(s)\n\n{format_results(summary, sets)}\n")
        if args.ensemble > 1:
            scores = ("predictive_entropy", "mutual_information")
            print(common.format_table([f"AUROC, {args.ensemble} members", *scores], [
                [f"{row.outside} from {row.inside}",
                 *(f"{summary[f'ensemble/{row.name}/auroc_{score}']:.4f}" for score in scores)]
                for row in comparisons(sets)]), "\n")
        for ood in sets["ood"] if args.published_json else ():
            for name, content in published_results(runs, args.dataset, ood, args).items():
                common.write_json(run.directory / name, content)
    return summary


def active_learning_pool(args):
    """(pool, test set, initial labelled rows, which pool rows are ambiguous [P])."""
    options = dict(data_dir=args.data_dir, seed=args.seed, noise=args.noise)
    pool = data.load(args.dataset, "train", **options)
    test = data.match(data.load(args.dataset, "test", **options), pool)
    ambiguous = torch.zeros(len(pool), dtype=torch.bool)
    generator = torch.Generator().manual_seed(common.derive_seed(args.seed, 0))
    if args.ambiguous:
        other = next((a for clean, a in PARTS.values() if clean == args.dataset), None)
        if other is None:
            raise UserError(f"--ambiguous: {args.dataset} has no ambiguous companion; use mnist "
                            "or glyphs")
        clean = data.load(args.dataset, "train", val_fraction=0.0, **options)
        # published code: with replacement
        few = torch.randint(len(clean), (args.subsample,), generator=generator)
        odd = data.match(data.load(other, "train", val_fraction=0.0, **options), clean)
        pool = data.concat(f"{args.dataset}_ambiguous_pool", clean.select(few), odd)
        groups = None if args.match_published else pool.groups
        kept, _ = data.train_val_split(len(pool), args.seed, 0.1, groups)
        pool, ambiguous = pool.select(kept), kept >= args.subsample
    per_class, rest = divmod(args.num_initial_samples, pool.num_classes)
    if rest or per_class < 2:
        raise UserError(f"--num-initial-samples {args.num_initial_samples}: must be a multiple of "
                        f"the {pool.num_classes} classes, at least two of each")
    order = torch.randperm(len(pool), generator=generator)
    if args.max_training_samples > len(pool):
        raise UserError(f"--max-training-samples {args.max_training_samples}: the pool has "
                        f"{len(pool)} examples")
    start = torch.cat([order[pool.labels[order] == c][:per_class] for c in range(pool.num_classes)])
    return pool, test, start, ambiguous


def train_on_few(net, images, labels, args):
    """Adam on the labelled few: every epoch draws --draws of them, each nearly equally often."""
    optimiser = torch.optim.Adam(net.train().parameters(), lr=args.lr,
                                 weight_decay=args.weight_decay)
    for _ in range(args.epochs):
        rounds = [torch.randperm(len(labels)) for _ in range(-(-args.draws // len(labels)))]
        for index in torch.cat(rounds)[:args.draws].to(labels.device).split(args.batch_size):
            loss = F.cross_entropy(net(images[index])[0], labels[index])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    return net.eval()


def active_learning_step(pool, test, labelled, acquisition, seeds, args, world):
    """Train from scratch on the labelled rows; (test accuracy, the rows to label next)."""
    solo, nets = World(device=world.device), []
    few = next(make_loader(pool.select(labelled), args, solo, batch_size=len(labelled)).epoch())
    for member in range(args.num_ensemble if acquisition in ("pe", "mi") else 1):
        common.seed_all(*seeds, member)
        net = make_network(args, pool.num_classes, pool.shape)
        net = net.to(world.device, memory_format=torch.channels_last)
        nets.append(train_on_few(net, few.images, few.labels, args))

    def mean_log_probs(dataset):
        return torch.stack([torch.cat([
            logits.cpu().double().log_softmax(1)
            for _, logits, _ in forward_batches(net, dataset, args, solo)]) for net in nets])

    accuracy = common.accuracy(mean_log_probs(test).exp().mean(0), test.labels)
    unlabelled = torch.ones(len(pool), dtype=torch.bool)
    unlabelled[labelled] = False
    rows = unlabelled.nonzero().flatten()
    rest = pool.select(rows)
    count = min(args.acquisition_batch_size, args.max_training_samples - len(labelled))
    if count == 0:
        return accuracy, rows[:0]
    if acquisition == "random":
        scores = torch.rand(len(rows))
    elif acquisition == "density":  # in log space: the densities themselves underflow to ties
        moments = ClassMoments(torch.bincount(few.labels, minlength=pool.num_classes).cpu(),
                               nets[0].head.in_features, world.device)
        with torch.no_grad():
            moments.update(nets[0](few.images)[1], few.labels)
        gaussians = fit_gaussians(moments, "empirical", args.jitter).to(world.device)
        scores = torch.cat([-density_scores(gaussians, z)["density"].cpu()
                            for _, _, z in forward_batches(nets[0], rest, args, solo)])
    else:
        parts = common.ensemble_uncertainty(mean_log_probs(rest))
        scores = parts["epistemic" if acquisition == "mi" else "total"]
    return accuracy, rows[acquire(scores, count)]


ACTIVE_LEARNING_OPTIONS = (
    "dataset", "model", "sn", "mod", "coeff", "width", "seed", "epochs", "batch_size", "lr",
    "weight_decay", "ambiguous", "subsample", "num_ensemble", "num_initial_samples",
    "max_training_samples", "acquisition_batch_size", "draws", "jitter", "noise", "match_published")


def run_active_learning(args, world) -> dict:
    """--active-learning: each (acquisition, run) is a job of its own, shared out over processes."""
    with common.main_first(world):
        pool, test, start, ambiguous = active_learning_pool(args)
    suffix = f"-al{'-ambiguous' * args.ambiguous}-seed{args.seed}"
    run = open_run(args, world, suffix, ACTIVE_LEARNING_OPTIONS)
    if not args.eval:
        run.open()
    sizes = [*range(args.num_initial_samples, args.max_training_samples,
                    args.acquisition_batch_size), args.max_training_samples]
    jobs = [(a, r) for a in args.active_learning for r in range(args.runs)]
    with common.StopSignals() as stop:
        for acquisition, r in jobs[world.rank::world.size]:
            path = run.directory / f"{acquisition}-run{r}.pt"
            state = {"config": run.config, "labelled": start, "accuracy": []}
            if args.eval or path.exists() and not run.fresh:
                state = common.load_checkpoint(path, same=run.config)
            for size in sizes[len(state["accuracy"]):]:
                if args.eval:
                    raise UserError(f"{path} stops at {size} labels; run the same command without "
                                    "--eval")
                accuracy, new = active_learning_step(pool, test, state["labelled"], acquisition,
                                                     (args.seed, r, size), args, world)
                state["labelled"] = torch.cat([state["labelled"], new])
                state["accuracy"].append(accuracy)
                common.save_checkpoint(path, state)
                run.say(f"{acquisition}, run {r}: {size} labels, test accuracy {accuracy:.4f}")
                if stop.signum:
                    raise common.Stopped(stop.signum, f"after {size} labels")
    common.barrier(world)
    return active_learning_results(run, pool, ambiguous, sizes, args, world)


def active_learning_results(run, pool, ambiguous, sizes, args, world) -> dict:
    """The published JSONs, results.json, and the curves of the acquisitions of this command."""
    published = {"density": "gmm", "entropy": "softmax", "pe": "ensemble", "mi": "ensemble_mi",
                 "random": "random"}
    label = f"dirty_{args.dataset}_{args.subsample}" if args.ambiguous else args.dataset
    entropy = pool_entropy(pool, args, world) if args.trained_model else None
    odd = ambiguous if entropy is None else entropy > args.threshold
    curves, shares, metrics, last, files = {}, {}, {}, sizes[-1], {}
    for acquisition in args.active_learning:
        states = [common.load_checkpoint(run.directory / f"{acquisition}-run{r}.pt")
                  for r in range(args.runs)]
        name = f"{published_stem(args)}_{published[acquisition]}_{label}.json"
        curve = curves[acquisition] = [[100 * a for a in state["accuracy"]] for state in states]
        files[f"test_accs_{name}"] = dict(enumerate(curve))
        metrics[f"{acquisition}/accuracy_{last}"] = float(np.mean(curve, 0)[-1]) / 100
        metrics[f"{acquisition}/accuracy_mean"] = float(np.mean(curve)) / 100
        if args.ambiguous:
            rows = [[state["labelled"][:n] for n in sizes[1:]] for state in states]
            share = shares[acquisition] = [[odd[i].double().mean().item() for i in r] for r in rows]
            files[f"ambiguous_{name}"] = dict(enumerate(share))
            metrics[f"{acquisition}/ambiguous_share"] = float(np.mean(share, 0)[-1])
            if entropy is not None:
                files[f"ambiguous_entropies_{name}"] = {
                    r: {i: entropy[index] for i, index in enumerate(runs)}
                    for r, runs in enumerate(rows)}
    run.results(metrics, {}, curves=curves, labels=sizes, ambiguous_shares=shares)
    if world.is_main:
        for name, content in files.items():
            common.write_json(run.directory / name, content)
        columns = [f"accuracy_{last}", "accuracy_mean"] + ["ambiguous_share"] * bool(shares)
        print(common.format_table(["acquisition", *columns], [
            [a, *(f"{metrics[f'{a}/{column}']:.4f}" for column in columns)] for a in curves]))
        if args.plot and (plt := common.pyplot()):
            plot_active_learning(plt, run.directory / "active_learning.png", curves, sizes)
            if shares:
                plot_active_learning(plt, run.directory / "ambiguous_share.png", shares, sizes[1:],
                                     "share of ambiguous examples among the labelled")
            run.say(f"pictures in {run.directory}")
    return metrics


def pool_entropy(pool, args, world) -> Tensor:
    """Softmax entropy [P] of the pool under --trained-model, a last.pt that a dirty run wrote."""
    state = common.load_checkpoint(args.trained_model)
    options = common.with_options(args, **{**state["config"], "batch_size": args.batch_size})
    net = make_network(options, pool.num_classes, pool.shape)
    try:
        net.load_state_dict(state["model"])
    except (KeyError, RuntimeError):
        raise UserError(f"--trained-model {args.trained_model} does not fit "
                        f"{args.dataset}") from None
    net, solo = net.to(world.device, memory_format=torch.channels_last), World(device=world.device)
    return torch.cat([softmax_scores(logits)["entropy"].cpu()
                      for _, logits, _ in forward_batches(net, pool, args, solo)])


def run_features(args, world) -> dict:
    """--features: fit features that somebody else computed; score files, the first one as ID."""
    features, labels = data.read_features(args.features, labelled=True)
    moments = ClassMoments(torch.bincount(labels), features.shape[1], world.device)
    moments.update(features, labels.to(world.device))
    gaussians = fit_gaussians(moments, args.priors, args.jitter).to(world.device)

    def score(z):
        parts = [density_scores(gaussians, part.to(world.device)) for part in z.split(4096)]
        return {k: torch.cat([part[k].cpu() for part in parts]) for k in parts[0]}

    threshold = score(features)["density"].quantile(args.density_quantile).item()
    metrics = {"jitter": gaussians.jitter, "density_threshold": threshold}
    files = {Path(path).stem: score(data.read_features(path, features.shape[1]))
             for path in args.score}
    if len(files) < len(args.score):
        raise UserError("two of the files to score have the same name; rename one")
    first, rows = next(iter(files)), []
    for name, scores in files.items():
        metrics[f"{name}/density_mean"] = scores["density"].mean().item()
        metrics[f"{name}/fraction_ood"] = (scores["density"] < threshold).double().mean().item()
        detection = detection_metrics(files[first], scores) if name != first else {}
        metrics |= {f"{name}/{k}": v for k, v in detection.items()}
        shown = ("auroc_density", "auroc_mahalanobis", "auroc_relative_mahalanobis")
        rows.append([name, len(scores["density"]), f"{metrics[f'{name}/density_mean']:.4g}",
                     f"{metrics[f'{name}/fraction_ood']:.4f}",
                     *(f"{detection[k]:.4f}" if detection else None for k in shown)])
    args.name = args.name or f"features-{Path(args.features).stem}"
    run = open_run(args, world, "", ("features", "score", "priors", "jitter", "density_quantile"))
    run.results(metrics, {})
    if world.is_main:
        for name, scores in files.items():
            common.save_arrays(run.directory / f"scores_{name}.npz", scores)
        print(common.format_table(["scored", "n", "mean log density", "below threshold",
                                   "AUROC density", "Mahalanobis", "relative"], rows))
        print(f"scores by example: {run.directory}/scores_*.npz; jitter {gaussians.jitter:.3g}")
    return metrics


def run_two_moons(args, world) -> dict:
    """Two moons: the density knows where the data are, the softmax entropy does not."""
    (x, y), (test_x, test_y) = (data.two_moons(2000, noise=0.1, seed=seed) for seed in (0, 1))
    points_set = data.ImageSet("two_moons", x[:, :, None, None], y, 2, (0.0, 0.0), (1.0, 1.0))

    def fit(seed, sn, epochs):
        options = common.with_options(args, seed=seed, sn=sn, epochs=epochs)
        common.seed_all(seed)
        net = nn.Sequential(nn.Flatten(), make_network(options, 2, (2, 1, 1)))
        run = open_run(options, world, f"-seed{seed}")
        if args.eval:
            load_finished(net, run, options)
        else:
            train(net, points_set, run, options, world)
        return net[1].eval().cpu(), run

    plain = [fit(args.seed + i, False, min(5, args.epochs))[0] for i in (1, 2, 3)]
    net, run = fit(args.seed, args.sn, args.epochs)
    axes = torch.linspace(-2.5, 3.5, 100), torch.linspace(-3, 3, 100)
    grid = torch.meshgrid(*axes, indexing="xy")
    points = torch.stack([g.flatten() for g in grid], 1)
    with torch.no_grad():
        moments = ClassMoments(torch.bincount(y), net.head.in_features)
        moments.update(net(x)[1], y)
        gaussians = fit_gaussians(moments, args.priors, args.jitter)
        density, at_train, at_test = (density_scores(gaussians, net(p)[1])["density"]
                                      for p in (points, x, test_x))
        entropy, test_entropy = (softmax_scores(net(p)[0])["entropy"] for p in (points, test_x))
        log_probs = torch.stack([member(points)[0].log_softmax(1) for member in plain])
        accuracy = common.accuracy(net(test_x)[0].softmax(1), test_y)
    far = torch.cdist(points, x).min(1).values > 0.5
    detection = detection_metrics({"density": at_test, "entropy": test_entropy},
                                  {"density": density[far], "entropy": entropy[far]})
    metrics = {"test/accuracy": accuracy, "jitter": gaussians.jitter,
               "train/density_min": at_train.min().item(),
               "train/density_median": at_train.median().item(),
               **{f"background/{k}": v for k, v in detection.items()}}
    run.results(metrics, {"train_s": sum(row["seconds"] for row in run.history)})
    if world.is_main:
        print(common.format_table(["two moons", "value"],
                                  [[k, f"{v:.4g}"] for k, v in metrics.items()]))
        if args.plot and (plt := common.pyplot()):
            above = (density - at_train.min()).clamp_min(-1)
            plot_two_moons(plt, run.directory / "two_moons.png", x, y, grid, {
                "softmax entropy, plain net": common.entropy(log_probs[0].exp()),
                "predictive entropy, 3 members": common.ensemble_uncertainty(log_probs)["total"],
                "softmax entropy, spectral norm": entropy,
                "DDU density, spectral norm": above / above.max()})
            run.say(f"picture in {run.directory}")
    return metrics


def main(argv=None) -> dict:
    args = parse_args(argv)
    world = common.start_world(args.device)
    common.check_batch(args, world)
    if args.features:
        return run_features(args, world)
    if args.active_learning:
        return run_active_learning(args, world)
    if args.dataset == "two_moons":
        return run_two_moons(args, world)
    return run_networks(args, world)


if __name__ == "__main__":
    common.run_script(main)
