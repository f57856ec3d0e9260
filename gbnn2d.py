"""Stochastic weight sharing: a Bayesian network whose weights share a few Gaussians in the plane.

Lin, Guan, Jing, Botterweck, Patane, "Stochastic Weight Sharing for Bayesian Neural Networks",
AISTATS 2025, arXiv:2505.17856. Method:

  1. Train a network, then a mean-field posterior N(mu_i, sigma_i^2) over its weights by the ELBO.
  2. The points (mu_i, sigma_i) are covered by K Gaussians N(c_k, S_k) in the plane (EM). Outliers
     (|mu| > 0.2, or gradients among the largest) keep their own Gaussian. Points outside the 95 %
     ellipse of their component blend their two most probable ones.
  3. Components closer than tau_d in Wasserstein-2 (and alike in gradient and variance) merge.
  4. The K centres and covariances and the outliers are trained by the ELBO, through the assignment
     of weights to components. A weight costs the two bytes of its label.

Usage:
  python gbnn2d.py                                           # glyphs, all stages, two cores
  torchrun --nproc_per_node 8 gbnn2d.py --dataset cifar100   # the published ResNet-18
  python gbnn2d.py --eval                                    # the table again, from the checkpoints
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      gbnn2d.py --dataset imagenet                           # two machines, R = 0 and 1

Expected:
  glyphs, n = 3 seeds, mean +- standard error, one CPU core, 2.5 minutes each: NLL 0.0090 +- 0.0020
    nats (deterministic), 0.0096 +- 0.0021 (mean-field), 0.154 +- 0.036 (clustered), 0.225 +- 0.016
    (merged), 0.0147 +- 0.0028 (final); 29.5 % of the bytes of the mean-field network.
  cifar10, ResNet-18: not measured. The authors' README gives accuracy 91.8 +- 0.1 %, NLL 0.313 +-
    0.003 nats, ECE 0.034 +- 0.003.

Differs from the published code (github.com/gfhvbjk/Anonymous):
  - Its trainer cannot learn: sampled weights are detached, and no optimiser step is made. Ours does
    what the paper describes, so the last stage does train.
  - The mean-field stage has its KL term (--stoch-kl 0: the published loss), softplus for sigma.
  - A weight is drawn as m + s eps with (m, s) from its component; --draw shared is the published
    draw (all members of a component equal), --draw perweight has no uncertainty of the component.
  - Outliers by the magnitude of the mean gradient of an epoch, not the signed one of a batch.
  - EM (--gmm kmeans: the published k-means); blended weights' alphas sum to one; merged moments.
  - Batch norm has running statistics, measured anew with drawn weights after clustering and fixed in
    the last stage, which so trains what predicts (there: a batch's own, in the test too).
  - Predictions are means of probabilities; means of logits and votes stand beside them.
"""

import argparse
import heapq
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from scipy.spatial import cKDTree
from torch import Tensor, nn

import old_common as common
import old_data as data
from old_common import UserError

# ---- Arguments ----------------------------------------------------------------------------------

PRESETS = {
    # published: stage 0 SGD 0.1, Nesterov 0.9, decay 5e-4, cosine, 200 epochs of batches of 128;
    # stage 1 learning rates 1e-5 for mu, 1e-3 for rho; stage 2 Adam, batches of 256
    "": dict(model="resnet18", width=1.0, epochs=200, stoch_epochs=20, final_epochs=20, lr=0.1,
             weight_decay=5e-4, lr_mu=1e-5, lr_rho=1e-3, lr_final=0.1, warm_up=0.0, batch_size=128,
             tau_w=0.2, grad_frac=0.01, tau_d=3.873e-4, mc=30, amp="off", compile=False,
             ood=["svhn"]),
    "cifar10": dict(mc=60, ood=["svhn", "cifar100"]),
    "cifar100": dict(mc=40),
    "svhn": dict(ood=["cifar10"]),
    "imagenet": dict(mc=30, epochs=90, batch_size=256, weight_decay=1e-4, ood=["imagenet_o"]),
    "mnist": dict(model="lenet", epochs=10, stoch_epochs=5, final_epochs=5, lr=0.05, lr_mu=1e-4,
                  warm_up=0.2, tau_d="auto", ood=["fashion_mnist"]),
    "fashion_mnist": dict(model="lenet", epochs=10, stoch_epochs=5, final_epochs=5, lr=0.05,
                          lr_mu=1e-4, warm_up=0.2, tau_d="auto", ood=["mnist"]),
    "glyphs": dict(width=0.125, epochs=3, stoch_epochs=2, final_epochs=4, lr_mu=1e-4, lr_rho=2e-2,
                   warm_up=0.2, tau_d="auto", mc=20, ood=["glyphs_letters"]),
}
STAGES = ("det", "stoch", "gmm", "final")
# The options that shape each stage's result, those of the earlier stages included.
STAGE_OPTIONS = {
    "det": ("dataset", "model", "width", "depth", "weights", "seed", "epochs", "batch_size", "lr",
            "momentum", "weight_decay", "warm_up", "augment", "amp", "limit_steps"),
    "stoch": ("stoch_epochs", "lr_mu", "lr_rho", "sigma_init", "sigma_map", "prior", "prior_sd",
              "stoch_kl", "kl_warm_up", "keep_layers"),
    "gmm": ("tau_w", "grad_frac", "k0", "min_cluster", "gmm", "em_iterations", "bins", "chi2_level",
            "tau_d", "tau_g", "tau_v", "bn_batches"),
    "final": ("final_epochs", "lr_final", "draw", "blend", "beta", "train_bn"),
}


def parse_args(argv=None):
    parser = common.Parser(prog="gbnn2d.py", description=__doc__.split("\n")[0],
                           epilog="Details, equations and differences: the top of this file.")
    common.add_common_arguments(parser, [d for d in PRESETS if d])
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--stage", choices=["all", *STAGES, "eval"], default="all",
        help="stop after this stage (earlier ones are trained if missing); eval: as --eval")
    add("--model", "-net", help="lenet, resnet18, resnet50, wide_resnet, or torchvision/NAME: "
        "pretrained, as stage 0 (NAME as torchvision.models.get_model takes it)")
    add("--weights", default="DEFAULT", help="of torchvision/NAME: DEFAULT, or a state dict's file")
    add("--depth", type=int, default=28, help="depth of wide_resnet, 6n + 4 (paper: 28)")
    add("--stoch-epochs", type=int, help="of the mean-field stage (published: up to 200)")
    add("--final-epochs", type=int, help="of the last stage (published: up to 200)")
    add("--lr-mu", type=float, help="mean-field stage: learning rate of mu (published: 1e-5)")
    add("--lr-rho", type=float, help="learning rate of rho, also of outliers (published: 1e-3)")
    add("--lr-final", type=float, help="last stage: learning rate of what is shared and of "
        "outliers, in units of their own spread; batch norm and biases keep --lr-mu")
    add("--momentum", type=float, default=0.9, help="of stage 0, Nesterov (published: 0.9)")
    add("--weight-decay", type=float, help="of stage 0 (published: 5e-4)")
    add("--warm-up", type=float, help="share of each stage's steps with a rising learning rate")
    add("--augment", action=flag, help="reflected crop and flip (default: on for CIFAR, SVHN)")
    add("--sigma-init", type=float, default=0.01, help="initial sigma over the layer's weight RMS")
    add("--sigma-map", choices=["softplus", "published"], default="softplus",
        help="published: log(0.0003 + e^rho), which can be negative")
    add("--prior", choices=["zero", "pretrained"], default="zero",
        help="mean of the weights' prior")
    add("--prior-sd", type=float, default=0.0, help="of the prior; 0: each layer's weight RMS")
    add("--stoch-kl", type=float, default=1.0, help="weight of the KL term of the mean-field stage "
        "(0: the published loss)")
    add("--kl-warm-up", type=float, default=0.5, help="share of the mean-field steps in which its "
        "KL term rises to full weight")
    add("--keep-layers", nargs="*", default=[], metavar="NAME", help="layers left out of sharing")
    add("--tau-w", type=float, help="|mu| above which a weight is an outlier (published: 0.2)")
    add("--grad-frac", type=float, help="share of weights that are outliers by their gradient")
    add("--k0", type=int, default=0, help="components before merging; 0: min(2048, N / 500) "
        "(published: 6000 for WRN-28-10, 256 for ResNet-18)")
    add("--min-cluster", type=int, default=20, help="components of at most this many members "
        "dissolve into outliers (published: 20)")
    add("--gmm", choices=["em", "kmeans"], default="em", help="kmeans: as published")
    add("--em-iterations", type=int, default=30, help="at most")
    add("--bins", type=int, default=1024, help="of the histogram that EM works on, a side")
    add("--chi2-level", type=float, default=0.95, help="weights outside this ellipse are blended")
    add("--tau-d", type=threshold, metavar="{auto,W2}",
        help="W2 below which components merge, not squared (published: 3.873e-4; auto: the 5 %% "
        "quantile of the components' distances from their nearest)")
    add("--tau-g", type=float, default=math.inf, help="largest difference of gradient magnitudes")
    add("--tau-v", type=float, default=1e-3, help="largest difference of variances")
    add("--bn-batches", type=int, default=50, help="training batches that refresh batch norm "
        "after clustering and at the end")
    add("--draw", choices=["hier", "shared", "perweight"], default="hier",
        help="w = m + s eps with (m, s) of the component; m alone (published); or its mean + eps")
    add("--blend", choices=["linear", "choose", "mean"], default="linear",
        help="of ellipse points: blended draws; one of the two by chance; blended centres "
        "(published)")
    add("--beta", type=float, default=1.0, help="weight of the last stage's KL term")
    add("--train-bn", action=flag, default=True, help="train batch norm's scale and offset, and "
        "biases, in the last stage")
    add("--mc", type=int, help="weight samples of a prediction (published: 30 to 60)")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH")
    add("--export", metavar="FILE", help="write the compressed network")
    add("--load", metavar="FILE", help="evaluate a compressed network that --export wrote")
    add("--compare-draws", action="store_true", help="evaluate the last stage by all three draws")
    add("--runs", type=int, default=1, help="repeat with the next seeds; mean and standard error")
    add("--save-interval", type=int, default=1, help="epochs between checkpoints")
    return check_args(common.resolve_arguments(parser.parse_args(argv), PRESETS, "glyphs"))


def threshold(text):
    """"auto" or a number, of --tau-d."""
    return text if text == "auto" else float(text)


def check_args(args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    if args.augment is None:
        args.augment = args.dataset in ("cifar10", "cifar100", "svhn", "imagenet")
    args.eval = args.eval or args.stage == "eval"
    args.stage = "final" if args.stage in ("all", "eval") else args.stage
    for key in ("mc", "bins", "save_interval", "em_iterations", "bn_batches", "runs"):
        if getattr(args, key) < 1:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1")
    for key, low, high in (
            ("stoch_epochs", 0, math.inf), ("final_epochs", 0, math.inf), ("lr_mu", 0, math.inf),
            ("lr_rho", 0, math.inf), ("lr_final", 0, math.inf), ("momentum", 0, 0.999),
            ("weight_decay", 0, math.inf), ("warm_up", 0, 0.9), ("sigma_init", 1e-9, 10),
            ("prior_sd", 0, math.inf), ("stoch_kl", 0, math.inf), ("kl_warm_up", 0, 1),
            ("tau_w", 0, math.inf), ("grad_frac", 0, 1), ("k0", 0, 32767),
            ("min_cluster", 0, math.inf), ("chi2_level", 1e-6, 1 - 1e-12), ("tau_g", 0, math.inf),
            ("tau_v", 0, math.inf), ("beta", 0, math.inf), ("tau_d", 0, math.inf)):
        value = getattr(args, key)
        if value != "auto" and not low <= value <= high:
            raise UserError(f"--{key.replace('_', '-')} {value}: must lie in [{low}, {high}]")
    if args.runs > 1 and (args.export or args.load):
        raise UserError("--export and --load are for one run; leave out --runs")
    if args.compile:
        raise UserError("--compile is not for networks whose weights are drawn; leave it out")
    if args.model == "wide_resnet" and (args.depth < 10 or args.depth % 6 != 4):
        raise UserError(f"--depth {args.depth}: wide_resnet takes 6n + 4, from 10 on")
    return args


# ---- Model --------------------------------------------------------------------------------------


def strided_1x1(c_in, c_out, stride):
    """A 1x1 convolution with a stride, as subsampling and then a plain one: on CPUs PyTorch 2.14's
    own strided one, channels last, writes out of bounds in the backward pass."""
    return nn.Sequential(nn.AvgPool2d(1, stride), nn.Conv2d(c_in, c_out, 1, bias=False))


class LeNet(nn.Module):
    """LeNet-5 for 28x28 images."""

    def __init__(self, num_classes, in_channels=1, **_):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(in_channels, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(256, 120), nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class ResidualBlock(nn.Module):
    """Post-activation block: basic (3x3, 3x3), or bottleneck (1x1, 3x3 with the stride, 1x1)."""

    def __init__(self, c_in, c, stride, bottleneck):
        super().__init__()
        c_out = 4 * c if bottleneck else c
        shape = [(c_in, c, 1, 1), (c, c, 3, stride), (c, c_out, 1, 1)] if bottleneck else \
                [(c_in, c, 3, stride), (c, c, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False)
                                   for i, o, k, s in shape)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shape)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(strided_1x1(c_in, c_out, stride), nn.BatchNorm2d(c_out))

    def forward(self, x):
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            h = norm(conv(F.relu(h) if i else h))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 or -50; images of 64 pixels and more take ImageNet's stem (7x7, max pool)."""

    def __init__(self, num_classes, in_channels=3, size=32, width=1.0, bottleneck=False, **_):
        super().__init__()
        c_in = c_stem = max(1, round(64 * width))
        large = size > 64
        self.stem = nn.Conv2d(in_channels, c_in, 7 if large else 3, 2 if large else 1,
                              3 if large else 1, bias=False)
        self.norm = nn.BatchNorm2d(c_in)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        blocks = []
        for group, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
            c = c_stem * 2**group
            for i in range(count):
                blocks.append(ResidualBlock(c_in, c, 2 if group and not i else 1, bottleneck))
                c_in = 4 * c if bottleneck else c
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(c_in, num_classes)

    def forward(self, x):
        x = self.blocks(self.pool(F.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class PreActivationBlock(nn.Module):
    """BN, ReLU, 3x3, BN, ReLU, 3x3; where the shape changes, a 1x1 of the first pre-activation."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        changes = stride != 1 or c_in != c_out
        self.shortcut = strided_1x1(c_in, c_out, stride) if changes else None

    def forward(self, x):
        h = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + shortcut


class WideResNet(nn.Module):
    """WRN-depth-(10 width): 28 and 1 are the paper's WRN-28-10."""

    def __init__(self, num_classes, in_channels=3, width=1.0, depth=28, **_):
        super().__init__()
        c_in, blocks = 16, []
        self.stem = nn.Conv2d(in_channels, c_in, 3, 1, 1, bias=False)
        for group in range(3):
            c = max(1, round(160 * width)) * 2**group
            for i in range((depth - 4) // 6):
                blocks.append(PreActivationBlock(c_in, c, 2 if group and not i else 1))
                c_in = c
        self.blocks, self.norm = nn.Sequential(*blocks), nn.BatchNorm2d(c_in)
        self.head = nn.Linear(c_in, num_classes)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


NETWORKS = {"lenet": LeNet, "resnet18": ResNet, "resnet50": ResNet, "wide_resnet": WideResNet}


def make_network(args, num_classes, shape):
    """The deterministic network of `args` for inputs of `shape` (C, H, W)."""
    if args.model.startswith("torchvision/"):
        return torchvision_network(args.model.split("/", 1)[1], args.weights, num_classes, shape)
    if args.model not in NETWORKS:
        raise UserError(f"--model {args.model}: use one of {', '.join(NETWORKS)}, torchvision/NAME")
    if args.model == "lenet" and tuple(shape[1:]) != (28, 28):
        raise UserError(f"--model lenet takes 28x28 images, {args.dataset} has {shape}")
    return NETWORKS[args.model](num_classes, in_channels=shape[0], size=shape[-1],
                                width=args.width, depth=args.depth,
                                bottleneck=args.model == "resnet50")


def torchvision_network(name, weights, num_classes, shape):
    """A pretrained classifier of torchvision, or one with the state dict of the file `weights`."""
    option = f"--model torchvision/{name} --weights {weights}"
    try:
        if weights == "DEFAULT":
            net = torchvision.models.get_model(name, weights="DEFAULT")
        else:
            net = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
            net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        with torch.no_grad():
            outputs = net.eval()(torch.zeros(1, *shape))
    except Exception as error:  # unknown names, failed downloads, other files and shapes
        raise UserError(f"{option}: {common.one_line(error)}") from None
    if outputs.shape != (1, num_classes):
        raise UserError(f"{option}: outputs of shape {tuple(outputs.shape)} for {num_classes} "
                        "classes; use a classifier of this data set")
    return net


class Layout:
    """One order of the covered weights (convolutions and linear layers), flat as [N]."""

    def __init__(self, net, keep=()):
        self.entries, self.size = [], 0
        known = {name for name, _ in net.named_modules()}
        if unknown := set(keep) - known:
            raise UserError(f"--keep-layers {min(unknown)}: the network has no such layer")
        for name, module in net.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and name not in keep:
                shape = tuple(module.weight.shape)
                self.entries.append((f"{name}.weight", self.size, shape))
                self.size += math.prod(shape)
        if not self.size:
            raise UserError("the network has no convolution or linear layer to cover")
        self.names = {name for name, _, _ in self.entries}
        self.rest = [name for name, _ in net.named_parameters() if name not in self.names]

    def describe(self) -> str:
        """What is covered, and which parameters are kept whole (beside all buffers)."""
        return (f"{len(self.entries)} layers with {self.size:,} weights are shared; kept whole: "
                f"{', '.join(self.rest) or 'nothing'}")

    def flatten(self, tensors) -> Tensor:
        """[N] from {name: tensor}."""
        return torch.cat([tensors[name].detach().reshape(-1) for name, _, _ in self.entries])

    def split(self, flat) -> dict:
        """{name: view} of [N]."""
        return {name: flat[start:start + math.prod(shape)].view(shape)
                for name, start, shape in self.entries}

    def spread(self, values) -> Tensor:
        """[N] from one number a layer."""
        return torch.cat([torch.full((math.prod(shape),), float(v))
                          for v, (_, _, shape) in zip(values, self.entries)])


class Stochastic(nn.Module):
    """A network whose covered weights are drawn anew for each forward pass, by `draw`."""

    def __init__(self, net, layout):
        super().__init__()
        self.net, self.layout = net, layout
        for name, parameter in net.named_parameters():
            if name in layout.names:
                parameter.requires_grad_(False)

    def forward(self, x, weights=None):
        weights = self.draw() if weights is None else weights
        return torch.func.functional_call(self.net, self.layout.split(weights), (x,))


class MeanField(Stochastic):
    """w_i = mu_i + sigma(rho_i) eps_i; prior N(m_i, s_i^2) with a spread s of each layer."""

    def __init__(self, net, layout, args):
        super().__init__(net, layout)
        mu = layout.flatten(dict(net.named_parameters()))
        rms = layout.spread([net.get_parameter(name).square().mean().sqrt()
                             for name, _, _ in layout.entries]).to(mu).clamp_min(1e-8)
        self.mu, self.kind = nn.Parameter(mu.clone()), args.sigma_map
        self.rho = nn.Parameter(rho_of(args.sigma_init * rms) if self.kind == "softplus" else
                                (args.sigma_init * rms).expm1().clamp_min(1e-12).log())
        self.register_buffer("prior_mu", mu.clone() if args.prior == "pretrained" else 0 * mu)
        self.register_buffer("prior_sd", rms if args.prior_sd == 0 else 0 * rms + args.prior_sd)

    @property
    def sigma(self):
        return sigma_of(self.rho, self.kind).abs()  # the published map's sign has no meaning

    def draw(self):
        return self.mu + self.sigma * torch.randn_like(self.mu)

    def kl(self) -> Tensor:
        """KL of the posterior from the prior, nats."""
        return gaussian_kl(self.mu, self.sigma, self.prior_mu, self.prior_sd).sum()


class Shared(Stochastic):
    """Weights that refer to K Gaussians in the plane, but for outliers, which have their own.

    What is trained is how far each Gaussian moved from where it began, in its own units: with
    S_0 = L_0 L_0^T, c = c_0 + L_0 shift and L = L_0 M, M lower triangular of (log M_00, M_10,
    log M_11) = shape; an outlier's mu = mu_0 + sigma_0 shift, sigma = sigma_0 e^scale. So one
    learning rate suits all, and the prior, the start, is N(0, I) in these units.

    Buffers: labels int32 [N] (-1: outlier), outliers, ellipse (index, second label, alpha), and
    where everything began.
    """

    def __init__(self, net, layout, code, draw="hier", blend="linear"):
        super().__init__(net, layout)
        self.draw_mode, self.blend = draw, blend
        like = next(net.parameters())
        for name in CODE:
            value = code[name]
            if value.dtype == torch.int16:  # as stored; process groups cannot send it
                value = value.int()
            self.register_buffer(name, value.to(like) if value.is_floating_point() else value)
        k, n = len(code["centres"]), len(code["outliers"])
        zeros = lambda *size: nn.Parameter(like.new_zeros(size))
        self.shift, self.shape = zeros(k, 2), zeros(k, 3)
        self.outlier_shift, self.outlier_scale = zeros(n), zeros(n)
        # inliers have their component; outliers' rows are overwritten
        self.register_buffer("index", self.labels.clamp_min(0), persistent=False)

    def current(self):
        """(centres [K, 2], factors [K, 3], outliers' mu and sigma [n_out]) as they are now."""
        outlier_mu = self.outlier_mu + self.outlier_sigma * self.outlier_shift
        return *moved(self.centres, self.factors, self.shift, self.shape), outlier_mu, \
            self.outlier_sigma * self.outlier_scale.exp()

    def draw(self):
        centres, factors, outlier_mu, outlier_sigma = self.current()
        level = self.draw_mode != "perweight"
        m, s = component_draws(centres, factors, torch.randn_like(centres) * level)
        eps = torch.randn(self.layout.size, device=m.device, dtype=m.dtype)
        eps = eps * (self.draw_mode != "shared")
        weights = m.index_select(0, self.index) + s.index_select(0, self.index) * eps
        if len(self.ellipse):
            rows, alpha = self.ellipse, self.ellipse_alpha
            if self.blend == "mean":
                m, s = centres[:, 0], 0 * s
            if self.blend == "choose":
                alpha = (torch.rand_like(alpha) < alpha).to(alpha)
            one, two = (m.index_select(0, k) + s.index_select(0, k) * eps[rows]
                        for k in (self.index[rows], self.ellipse_second))
            weights = weights.index_copy(0, rows, alpha * one + (1 - alpha) * two)
        own = outlier_mu + outlier_sigma * torch.randn_like(outlier_mu)
        return weights.index_copy(0, self.outliers, own)

    def kl(self) -> Tensor:
        """KL of all latent variables, each counted once, from where they began, nats."""
        return plane_kl(self.shift, self.shape) + unit_kl(self.outlier_shift, self.outlier_scale)


# What a code consists of: all that `Shared` needs beside the network.
CODE = ("labels", "outliers", "outlier_mu", "outlier_sigma", "ellipse", "ellipse_second",
        "ellipse_alpha", "centres", "factors")


# ---- Method -------------------------------------------------------------------------------------
# N covered weights (of convolutions and linear layers) are points (mu, sigma) in the plane; K
# Gaussians N(c_k, S_k) cover them. Covariances are [K, 3]: (S_00, S_01, S_11).


def sigma_of(rho, kind="softplus") -> Tensor:
    """sigma > 0 from the unconstrained rho; published: log(0.0003 + e^rho), which can be < 0."""
    return F.softplus(rho) if kind == "softplus" else (3e-4 + rho.exp()).log()


def rho_of(sigma) -> Tensor:
    """Inverse of softplus, exact to 1e-4 and far below: sigma + log(1 - e^-sigma)."""
    return sigma + (-torch.expm1(-sigma)).log()


def gaussian_kl(mu, sigma, prior_mu, prior_sigma) -> Tensor:
    """KL(N(mu, sigma^2) || N(prior)), element by element, nats."""
    ratio = (sigma / prior_sigma).square()
    return 0.5 * (ratio - 1 - ratio.log() + ((mu - prior_mu) / prior_sigma).square())


def unit_kl(shift, scale) -> Tensor:
    """sum KL(N(shift, e^(2 scale)) || N(0, 1)), nats."""
    return (0.5 * ((2 * scale).exp() + shift.square() - 1) - scale).sum()


def plane_kl(shift, shape) -> Tensor:
    """sum_k KL(N(shift_k, M_k M_k^T) || N(0, I)) in the plane, nats, M of `shape`:

        1/2 [tr M M^T + |shift|^2 - 2 - ln det M M^T],

    which is KL(N(c_k, S_k) || N(c_k0, S_k0)), since units do not matter to it."""
    return unit_kl(shift, shape[:, ::2]) + 0.5 * shape[:, 1].square().sum()


def outlier_mask(mu, gradient, tau_w=0.2, fraction=0.01) -> Tensor:
    """Weights that keep their own Gaussian: |mu| > tau_w, or |gradient| among the largest.

    mu, gradient [N]. The largest are those >= the k-th, k = max(1, floor(fraction N)); none at 0.
    differs: the published code takes the largest SIGNED gradients of the last batch.
    """
    mask = mu.abs() > tau_w
    if fraction > 0:
        size = gradient.abs()
        mask |= size >= size.topk(max(1, int(fraction * len(size)))).values[-1]
    return mask


class Cells(NamedTuple):
    """Points z = (x - shift) / scale binned on a grid, without loss of their moments; float64."""

    count: Tensor    # [C]
    mean: Tensor     # [C, 2]
    scatter: Tensor  # [C, 3], mean of (z - cell mean)(z - cell mean)^T
    index: Tensor    # [N] int32, the cell of each point
    shift: Tensor    # [2]
    scale: Tensor    # [2]


def standardise(x) -> tuple[Tensor, Tensor]:
    """(shift [2], scale [2]) of points [N, 2]: mu and sigma differ in scale by orders."""
    x = x.double()
    scale = x.std(0)
    return x.mean(0), torch.where(scale > 0, scale, torch.ones_like(scale))


def bin_points(x, bins=1024, tail=1e-4, chunk=2**20) -> Cells:
    """Cells of points [N, 2]: a grid between the quantiles `tail` and 1 - tail of each axis, the
    points outside in its edge cells, by their true sums. Streams: `chunk` points at a time."""
    shift, scale = standardise(x)
    sample = x[::max(1, len(x) // 200_000)].double()
    low, high = ((sample - shift) / scale).quantile(torch.tensor([tail, 1 - tail]).to(sample), 0)
    step = (high - low).clamp_min(1e-12) / bins
    sums = torch.zeros(6, bins * bins, dtype=torch.float64, device=x.device)
    index = torch.empty(len(x), dtype=torch.int32, device=x.device)
    for start in range(0, len(x), chunk):
        z = (x[start:start + chunk].double() - shift) / scale
        cell = ((z - low) / step).long().clamp_(0, bins - 1)
        z = z - (low + (cell + 0.5) * step)  # from the cell's middle: no cancellation
        cell = cell[:, 0] * bins + cell[:, 1]
        index[start:start + chunk] = cell.int()
        u, v = z.unbind(1)
        for row, values in zip(sums, (torch.ones_like(u), u, v, u * u, u * v, v * v)):
            row += torch.bincount(cell, values, bins * bins)
    used = sums[0].nonzero().flatten()
    number = torch.full((bins * bins,), -1, dtype=torch.int32, device=x.device)
    number[used] = torch.arange(len(used), dtype=torch.int32, device=x.device)
    count, u, v, uu, uv, vv = sums[:, used]
    u, v, uu, uv, vv = (t / count for t in (u, v, uu, uv, vv))
    middle = low + (torch.stack([used // bins, used % bins], 1) + 0.5) * step
    scatter = torch.stack([uu - u * u, uv - u * v, vv - v * v], 1)
    return Cells(count, middle + torch.stack([u, v], 1), scatter, number[index], shift, scale)


def nearest(x, centres, k, chunk=2**14) -> Tensor:
    """Numbers [n, k] of the k nearest centres of points [n, 2], the nearest first."""
    k = min(k, len(centres))
    if x.device.type == "cpu":
        found = cKDTree(centres.numpy()).query(x.numpy(), k, workers=-1)[1]
        return torch.from_numpy(found.reshape(len(x), k)).long()
    return torch.cat([torch.cdist(part, centres).topk(k, largest=False).indices
                      for part in x.split(chunk)])


def kmeans_plus_plus(cells, k, generator, sample=100_000) -> Tensor:
    """k starting centres [k, 2]: cells drawn one by one with probability count x distance^2."""
    count, mean = cells.count, cells.mean
    if len(count) > sample:
        few = torch.multinomial(count.cpu(), sample, generator=generator).to(count.device)
        count, mean = count[few], mean[few]
    draws = torch.rand(k, generator=generator, dtype=torch.float64).to(count.device)
    u, v = mean.T.contiguous()
    distance, chosen = torch.ones_like(u), []
    for draw in draws:
        total = (count * distance).cumsum(0)
        chosen.append(torch.searchsorted(total, draw * total[-1]).clamp_max(len(u) - 1))
        own = (u - u[chosen[-1]]).square_().add_((v - v[chosen[-1]]).square_())
        distance = own if len(chosen) == 1 else torch.minimum(distance, own, out=distance)
    return mean[torch.stack(chosen)].unique(dim=0)  # fewer where points are fewer


class Mixture(NamedTuple):
    """K Gaussians, float64: weights [K] (sum 1), centres [K, 2], covariances [K, 3]."""

    weights: Tensor
    centres: Tensor
    covariances: Tensor


def kmeans(cells, centres, iterations=15) -> Tensor:
    """Centres [K, 2] after Lloyd's iterations on cells; those without a cell stay."""
    for _ in range(iterations):
        label = nearest(cells.mean, centres, 1)[:, 0]
        total = centres.new_zeros(len(centres)).index_add_(0, label, cells.count)
        moved = torch.zeros_like(centres).index_add_(0, label, cells.count[:, None] * cells.mean)
        centres = torch.where(total[:, None] > 0, moved / total.clamp_min(1)[:, None], centres)
    return centres


def natural_parameters(mixture) -> tuple[Tensor, Tensor]:
    """(theta [K, 6], peak [K]): log pi_k N(x; c_k, S_k) = theta_k . (1, u, v, uu, uv, vv) for
    x = (u, v), and what this is at x = c_k."""
    (a, b, d), (u, v) = mixture.covariances.unbind(1), mixture.centres.unbind(1)
    det = a * d - b * b
    p, q, r = d / det, -b / det, a / det  # the precision matrix
    peak = mixture.weights.log() - 0.5 * det.log() - math.log(2 * math.pi)
    y, z = p * u + q * v, q * u + r * v
    return torch.stack([peak - 0.5 * (u * y + v * z), y, z, -0.5 * p, -q, -0.5 * r], 1), peak


def monomials(x, scatter=0.0) -> Tensor:
    """(1, u, v, uu, uv, vv) [..., 6] of x = (u, v) [..., 2]: expected ones, with a scatter."""
    u, v = x.unbind(-1)
    products = torch.stack([u * u, u * v, v * v], -1) + scatter
    return torch.cat([torch.ones_like(u)[..., None], x, products], -1)


def log_joint(theta, features, candidates, chunk=2**11) -> Tensor:
    """theta_k . features_n [n, J] of n points for their `candidates` k [n, J]."""
    return torch.cat([torch.bmm(theta[k], f[:, :, None])[:, :, 0]  # chunks stay in the cache
                      for k, f in zip(candidates.split(chunk), features.split(chunk))])


def mixture_of(cells, neighbours, responsibility, k, reg) -> Mixture:
    """M-step: the mixture of k components from responsibilities [C, J] for `neighbours` [C, J].

    Moments about zero are safe in float64: axes are standardised, and `reg` is far above rounding.
    """
    flat = neighbours.flatten()
    weighted = monomials(cells.mean, cells.scatter) * cells.count[:, None]
    mass, u, v, uu, uv, vv = (torch.bincount(flat, (responsibility * column[:, None]).flatten(), k)
                              for column in weighted.T)
    u, v, uu, uv, vv = (t / mass.clamp_min(1e-300) for t in (u, v, uu, uv, vv))
    covariances = torch.stack([uu - u * u + reg, uv - u * v, vv - v * v + reg], 1)
    return Mixture(mass / mass.sum(), torch.stack([u, v], 1), covariances)


def expectation(cells, mixture, neighbours) -> tuple[Tensor, Tensor]:
    """E-step: responsibilities [C, J], and the mean log-likelihood in nats a point.

    A cell's points share its responsibilities; its scatter enters the expected log density exactly.
    """
    joint = log_joint(natural_parameters(mixture)[0], monomials(cells.mean, cells.scatter),
                      neighbours)
    return joint.softmax(1), (cells.count @ joint.logsumexp(1)) / cells.count.sum()


def fit_mixture(cells, start, iterations=50, neighbours=16, reg=1e-6, tolerance=1e-5, refresh=5):
    """EM from `start` centres: (mixture, log-likelihoods [iterations], nats a point).

    Sparse: each cell knows its `neighbours` nearest components only, looked up again every
    `refresh` iterations; exact if there are no more than that. `reg` is added to the variances of
    the standardised axes. Stops when the log-likelihood gains less than `tolerance`.
    """
    k, near = len(start), nearest(cells.mean, start, 1)
    mixture = mixture_of(cells, near, torch.ones_like(near, dtype=torch.float64), k, reg)
    history = []
    for i in range(iterations):
        if i % refresh == 0:
            mixture = without_empty(mixture)
            near = nearest(cells.mean, mixture.centres, neighbours)
        responsibility, value = expectation(cells, mixture, near)
        mixture = mixture_of(cells, near, responsibility, len(mixture.weights), reg)
        history.append(float(value))
        if i % refresh and history[-1] - history[-2] < tolerance:
            break
    return without_empty(mixture), history


def without_empty(mixture, least=0.0) -> Mixture:
    """The components with more than `least` of the weight, which sums to 1 again."""
    keep = mixture.weights > least
    weights, centres, covariances = (t[keep] for t in mixture)
    return Mixture(weights / weights.sum(), centres, covariances)


def learn_mixture(x, k, generator, kind="em", iterations=30, bins=1024):
    """(mixture of at most k Gaussians of points [N, 2] in their own units, cells of the points,
    log-likelihoods): k-means++ and Lloyd's iterations on the cells, then EM, or none (kind
    "kmeans", published): each cell's nearest centre, with the covariance of what is there."""
    cells = bin_points(x, bins)
    start = kmeans(cells, kmeans_plus_plus(cells, k, generator))
    if kind == "em":
        mixture, history = fit_mixture(cells, start, iterations)
    else:
        near, history = nearest(cells.mean, start, 1), []
        mixture = without_empty(mixture_of(cells, near, torch.ones_like(near, dtype=torch.float64),
                                           len(start), 1e-6))
    product = torch.stack([cells.scale[0] ** 2, cells.scale.prod(), cells.scale[1] ** 2])
    return Mixture(mixture.weights, mixture.centres * cells.scale + cells.shift,
                   mixture.covariances * product), cells, history


class Assignment(NamedTuple):
    """Which component(s) each of n points refers to."""

    label: Tensor    # int64 [n], the component of highest posterior
    second: Tensor   # int64 [n], the next one
    alpha: Tensor    # float64 [n], posterior of the first among these two
    squared: Tensor  # float64 [n], squared Mahalanobis distance from the first


def assign(x, mixture, candidates) -> Assignment:
    """The two components of highest pi_k N(x; c_k, S_k) among `candidates` [n, J], x [n, 2]."""
    theta, peak = natural_parameters(mixture)
    joint = log_joint(theta, monomials(x.to(theta)), candidates)
    best, first = joint.max(1, keepdim=True)
    label = candidates.gather(1, first)[:, 0]
    squared = (2 * (peak[label] - best[:, 0])).clamp_min(0)  # log N falls by d^2 / 2
    rest, second = joint.scatter(1, first, -math.inf).max(1, keepdim=True)
    return Assignment(label, candidates.gather(1, second)[:, 0], (best - rest).sigmoid()[:, 0],
                      squared)


class Sharing(NamedTuple):
    """The assignment of N points, and of those at the rim of their component (ellipse points)."""

    label: Tensor   # int16 [N]
    rim: Tensor     # int64 [n], the points outside their component's ellipse
    second: Tensor  # int64 [n], their next component
    alpha: Tensor   # float64 [n], the share of their first


def assign_all(x, cells, mixture, level=0.95, candidates=4, chunk=2**17) -> Sharing:
    """`assign` for all points [N, 2], streamed: the candidates are those of the point's cell."""
    if len(mixture.weights) > 32767:
        raise ValueError(f"{len(mixture.weights)} components do not fit in int16 labels")
    z = Mixture(mixture.weights, (mixture.centres - cells.shift) / cells.scale, mixture.covariances
                / torch.stack([cells.scale[0] ** 2, cells.scale.prod(), cells.scale[1] ** 2]))
    near = nearest(cells.mean, z.centres, 16)
    joint = log_joint(natural_parameters(z)[0], monomials(cells.mean), near)
    near = near.gather(1, joint.topk(min(candidates, near.shape[1])).indices)
    label, rim = torch.empty(len(x), dtype=torch.int16, device=x.device), []
    for i in range(0, len(x), chunk):
        part = (x[i:i + chunk].double() - cells.shift) / cells.scale
        own = assign(part, z, near[cells.index[i:i + chunk]])
        label[i:i + chunk] = own.label.short()
        rows = (own.squared > chi_square_quantile(level)).nonzero().flatten()
        rim.append((rows + i, own.second[rows], own.alpha[rows]))
    return Sharing(label, *(torch.cat(columns) for columns in zip(*rim)))


def chi_square_quantile(level=0.95) -> float:
    """Quantile of chi-square with 2 degrees of freedom: -2 ln(1 - level), 5.991464547 at 95 %."""
    return -2 * math.log1p(-level)


def wasserstein(centres_a, covariances_a, centres_b, covariances_b) -> Tensor:
    """W2 [...] (not squared) between Gaussians in the plane, closed form, float64:

        W2^2 = |m_1 - m_2|^2 + tr S_1 + tr S_2 - 2 sqrt(tr(S_1 S_2) + 2 sqrt(det S_1 det S_2)).
    """
    a, b, d = covariances_a.double().unbind(-1)
    e, f, h = covariances_b.double().unbind(-1)
    dets = (a * d - b * b).clamp_min(0) * (e * h - f * f).clamp_min(0)
    cross = a * e + 2 * b * f + d * h + 2 * dets.sqrt()
    bures = (a + d + e + h - 2 * cross.clamp_min(0).sqrt()).clamp_min(0)
    return ((centres_a.double() - centres_b.double()).square().sum(-1) + bures).sqrt()


def merge_pair(weight, centre, covariance, i, j):
    """Moment matching: (weight, centre, covariance) of components i and j together.

    Keeps the mixture's total weight, mean and covariance; differs: the published code averages.
    """
    total = weight[i] + weight[j]
    p, q = weight[i] / total, weight[j] / total
    u, v = centre[i] - centre[j]
    spread = p * q * np.array([u * u, u * v, v * v])
    return total, p * centre[i] + q * centre[j], p * covariance[i] + q * covariance[j] + spread


def can_merge(mixture, gradient, i, j, tau_d, tau_g, tau_v) -> tuple[Tensor, Tensor]:
    """(W2 [n], whether all three thresholds allow it [n]) of the pairs i, j [n]."""
    weights, centres, covariances = mixture
    w2 = wasserstein(centres[i], covariances[i], centres[j], covariances[j])
    variance = (covariances[:, 0] + covariances[:, 2]) / 2
    allowed = (w2 < tau_d) & ((gradient[i] - gradient[j]).abs() < tau_g) & \
        ((variance[i] - variance[j]).abs() < tau_v)
    return w2, allowed


def merge_mixture(mixture, gradient, tau_d, tau_g=math.inf, tau_v=1e-3, neighbours=8):
    """Merge pairs, smallest W2 first, while W2 < tau_d, |g_i - g_j| < tau_g and |tr S_i - tr S_j|/2
    < tau_v: (mixture, gradient [K'], number of the new component of each old one [K]), on the CPU.

    gradient [K]: mean gradient magnitude of a component's members. Candidates are nearest centres,
    and when none of those is left, all pairs with |m_i - m_j| <= W2 < tau_d: at the end no pair may
    merge.
    """
    mixture, gradient = Mixture(*(t.cpu() for t in mixture)), gradient.cpu().double()
    number, close = torch.arange(len(gradient)), True
    while (k := len(gradient)) > 1:
        if close:
            near = nearest(mixture.centres, mixture.centres, neighbours + 1)
            i, j = torch.arange(k).repeat_interleave(near.shape[1]), near.flatten()
        elif math.isfinite(tau_d):
            i, j = torch.from_numpy(cKDTree(mixture.centres.numpy()).query_pairs(
                tau_d, output_type="ndarray")).long().T
        else:
            i, j = torch.combinations(torch.arange(k)).T
        i, j = i[i != j], j[i != j]  # where centres are equal, the nearest need not be itself
        w2, allowed = can_merge(mixture, gradient, i, j, tau_d, tau_g, tau_v)
        if allowed.any():
            pairs = zip(w2[allowed].tolist(), i[allowed].tolist(), j[allowed].tolist())
            mixture, gradient, step = merge_greedily(mixture, gradient, list(pairs),
                                                     (tau_d, tau_g, tau_v))
            number, close = step[number], True
        elif close:
            close = False
        else:
            break
    return mixture, gradient, number


def merge_greedily(mixture, gradient, heap, thresholds):
    """Merge the pairs (W2, i, j) of `heap`, smallest first; a new component takes its parents'
    partners. Returns as `merge_mixture`."""
    k = len(gradient)
    room = lambda t: torch.cat([t, torch.zeros_like(t)])  # at most k - 1 new components
    mixture, gradient = Mixture(*(room(t) for t in mixture)), room(gradient)
    weight, centre, covariance = (t.numpy() for t in mixture)
    parent, alive, partners = list(range(k)), [True] * k, [set() for _ in range(k)]
    for _, i, j in heap:
        partners[i].add(j)
        partners[j].add(i)
    heapq.heapify(heap)
    while heap:
        _, i, j = heapq.heappop(heap)
        if not (alive[i] and alive[j]):
            continue
        new, share = len(alive), weight[i] / (weight[i] + weight[j])
        weight[new], centre[new], covariance[new] = merge_pair(weight, centre, covariance, i, j)
        gradient[new] = share * gradient[i] + (1 - share) * gradient[j]
        alive[i] = alive[j] = False
        parent[i] = parent[j] = new
        alive.append(True)
        parent.append(new)
        partners.append({n for n in partners[i] | partners[j] if alive[n]})
        others = torch.tensor(sorted(partners[new]), dtype=torch.long)
        for n in partners[new]:
            partners[n].add(new)
        w2, allowed = can_merge(mixture, gradient, torch.full_like(others, new), others,
                                *thresholds)
        for distance, n in zip(w2[allowed].tolist(), others[allowed].tolist()):
            heapq.heappush(heap, (distance, n, new))
    for n in reversed(range(len(parent))):  # the last in each chain of merges
        parent[n] = parent[parent[n]]
    kept = [n for n, living in enumerate(alive) if living]
    position = {n: p for p, n in enumerate(kept)}
    renamed = torch.tensor([position[n] for n in parent[:k]])
    return Mixture(*(t[kept] for t in mixture)), gradient[kept], renamed


def cholesky(covariances) -> Tensor:
    """(L_00, L_10, L_11) [K, 3] with S = L L^T, of (S_00, S_01, S_11); float64 inside."""
    a, b, d = covariances.double().unbind(1)
    l00 = a.clamp_min(1e-30).sqrt()
    l10 = b / l00
    return torch.stack([l00, l10, (d - l10.square()).clamp_min(1e-30).sqrt()], 1)


def covariances_of(factors) -> Tensor:
    """(S_00, S_01, S_11) [K, 3] of S = L L^T from (L_00, L_10, L_11)."""
    l00, l10, l11 = factors.unbind(1)
    return torch.stack([l00 * l00, l00 * l10, l10 * l10 + l11 * l11], 1)


def moved(centres, factors, shift, shape) -> tuple[Tensor, Tensor]:
    """(c + L shift [K, 2], the factors L M [K, 3]), M of `shape` (log M_00, M_10, log M_11)."""
    l00, l10, l11 = factors.unbind(1)
    m00, m10, m11 = shape[:, 0].exp(), shape[:, 1], shape[:, 2].exp()
    offset = torch.stack([l00 * shift[:, 0], l10 * shift[:, 0] + l11 * shift[:, 1]], 1)
    return centres + offset, torch.stack([l00 * m00, l10 * m00 + l11 * m10, l11 * m11], 1)


def component_draws(centres, factors, noise) -> tuple[Tensor, Tensor]:
    """(m, s) [K] each = c_k + L_k e_k from noise e [K, 2]."""
    l00, l10, l11 = factors.unbind(1)
    m = centres[:, 0] + l00 * noise[:, 0]
    return m, centres[:, 1] + l10 * noise[:, 0] + l11 * noise[:, 1]


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, world, batch_size=None, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`."""
    streamed = isinstance(dataset, data.StreamedSet)
    augment = "crop_flip" if streamed else "reflect_crop_flip"
    return data.Loader(dataset, batch_size or args.batch_size, world.device, seed=args.seed,
                       shuffle=train, augment=augment if train and args.augment else "none",
                       rank=world.rank, world_size=world.size, workers=args.workers,
                       channels_last=True)


def autocast(args, world):
    return torch.autocast(world.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def widen(t):
    """bf16 as float32; float32 and float64 as they are."""
    return t.float() if t.dtype == torch.bfloat16 else t


def learning_rate(step, steps, warm_up=0.0) -> float:
    """Share of the full learning rate at a step of a stage: linear warm-up, then half a cosine."""
    warm = warm_up * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, steps - warm)))


def make_optimiser(module, stage, args):
    """The optimiser of a stage; each group keeps its full rate as "full"."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if stage == "det":
        groups = [{"params": [p for _, p in named], "full": args.lr}]
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum,
                               nesterov=args.momentum > 0, weight_decay=args.weight_decay)
    rates = {"rho": args.lr_rho} if stage == "stoch" else {
        n: args.lr_final for n in ("shift", "shape", "outlier_shift", "outlier_scale")}
    return torch.optim.Adam([{"params": [p], "full": rates.get(n, args.lr_mu)} for n, p in named],
                            lr=args.lr_mu)


def train(module, stage, epochs, kl_weight, train_set, run, args, world):
    """Minimise mean cross entropy + kl_weight(progress) KL / n_train, resumed if begun before."""
    run.open()
    run.say(f"{stage}: {run.directory}")
    model = common.sync_batch_norm(module.to(world.device, memory_format=torch.channels_last),
                                   world)
    optimiser = make_optimiser(module, stage, args)
    loader = make_loader(train_set, args, world, train=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    fresh = lambda: {"step": 0, **{k: torch.zeros(steps) for k in LOGGED}}
    progress = {"epoch": 0, **fresh()}
    if (state := run.load()) is not None:
        module.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        progress = state["progress"]
        run.say(f"{run.resume_from}: {progress['epoch']} of {epochs} epochs are done")
    model = common.data_parallel(model, world)

    def save(**progress):
        if not math.isfinite(torch.nn.utils.get_total_norm(module.parameters())):
            raise UserError(f"weights are no longer finite after epoch {progress['epoch']}; the "
                            "last good checkpoint is kept. Lower the learning rate")
        run.save(model=module.state_dict(), optimiser=optimiser.state_dict(), progress=progress)

    rate = lambda step: learning_rate(step, epochs * steps, args.warm_up)
    full = optimiser.param_groups[0]["full"]
    with common.StopSignals() as stop:
        for epoch in range(progress["epoch"], epochs):
            clock, first = common.Stopwatch(world.device), progress["step"]
            step, signum, logged = train_epoch(model, module, stage, optimiser, loader, epoch,
                                               steps, rate, kl_weight(epochs * steps), progress,
                                               stop, args, world)
            common.check_finite(logged["loss"][:step], epoch * steps, lambda s: full * rate(s))
            if step < steps:
                save(epoch=epoch, step=step, **logged)
                raise common.Stopped(signum, f"in epoch {epoch + 1} of {stage} after step {step}")
            seconds, images = clock.seconds(), min(steps * args.batch_size, len(train_set))
            run.log(epoch=epoch + 1, epochs=epochs, loss_nats=logged["loss"].mean().item(),
                    kl_nats=logged["kl"].mean().item(),
                    accuracy=logged["correct"].sum().item() / images,
                    lr=full * rate(epoch * steps + steps - 1),
                    images_per_s=images * (1 - first / steps) / seconds, seconds=seconds)
            progress, signum = fresh(), signum or stop.asked(world)
            if (epoch + 1) % args.save_interval == 0 or epoch + 1 == epochs or signum:
                save(epoch=epoch + 1, **progress)
            if signum:
                raise common.Stopped(signum, f"after epoch {epoch + 1} of {stage}")
        if not epochs and state is None:
            save(**progress)


LOGGED = ("loss", "kl", "correct")  # by step: mean cross entropy, KL / n_train, correct predictions


def train_epoch(model, module, stage, optimiser, loader, epoch, steps, rate, kl_weight, progress,
                stop, args, world):
    """Steps progress["step"] to `steps` of an epoch; fewer if a stop is asked for."""
    set_training(model, stage)
    share, n_train = float(world.is_main), len(loader.dataset)
    logged = {k: share * progress[k].to(world.device) for k in LOGGED}
    batches = common.progress(loader.epoch(epoch, start=progress["step"]), steps - progress["step"],
                              f"{stage} {epoch + 1}", args.quiet, world)
    for step, batch in zip(range(progress["step"], steps), batches):
        now = epoch * steps + step
        common.seed_all(args.seed, STAGES.index(stage), now)  # the same draws on all processes
        for group in optimiser.param_groups:
            group["lr"] = group["full"] * rate(now)
        with autocast(args, world):
            logits = model(batch.images)
        loss = F.cross_entropy(widen(logits), batch.labels, reduction="sum") / batch.global_size
        total = loss * world.size  # DDP divides by the number of processes
        if stage != "det":
            kl = kl_weight(now) * module.kl() / n_train
            total = total + kl
            logged["kl"][step] = share * kl.detach()
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        optimiser.step()
        logged["loss"][step] = loss.detach()
        logged["correct"][step] = (logits.argmax(1) == batch.labels).sum()
        if signum := stop.asked(world, step):
            break
    return step + 1, signum, {k: common.all_reduce(t, world).cpu() for k, t in logged.items()}


def set_training(model, stage):
    """Training mode; in the last stage batch norm keeps the running statistics that predictions
    use: a batch's own would hide how the draws shift activations."""
    model.train()
    for module in model.modules() if stage == "final" else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def gradient_magnitude(module, train_set, args, world) -> Tensor:
    """Mean over an epoch's batches of |d mean cross entropy / d mu| [N], in a fixed order."""
    module.eval()
    total, loader = torch.zeros_like(module.mu), make_loader(train_set, args, world)
    for step, batch in zip(range(args.limit_steps or len(loader)), loader.epoch()):
        common.seed_all(args.seed, STAGES.index("gmm"), step)
        with autocast(args, world):
            logits = module(batch.images)
        loss = F.cross_entropy(widen(logits), batch.labels, reduction="sum") / batch.global_size
        gradient, = torch.autograd.grad(loss, module.mu)
        total += common.all_reduce(gradient, world).abs()
    return total / (step + 1)


@torch.no_grad()
def refresh_batch_norm(module, train_set, args, world):
    """Running statistics anew, with drawn weights: sharing shifts activations."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    common.sync_batch_norm(module, world)  # this can put other layers in their places
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    module.train()
    for step, batch in zip(range(args.bn_batches),
                           make_loader(train_set, args, world, train=True).epoch(0)):
        for norm in norms:
            norm.momentum = 1 / (step + 1)  # the mean over batches
        common.seed_all(args.seed, len(STAGES), step)
        with autocast(args, world):
            module(batch.images)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    module.eval()


def build_codes(module, train_set, args, world) -> dict:
    """Stage gmm: {"clustered": code, "merged": code, "report": numbers}, on the CPU.

    A code is what `Shared` is made of; both have the same outliers.
    """
    mu, sigma = module.mu.detach(), module.sigma.detach()
    gradient = gradient_magnitude(module, train_set, args, world)
    points = torch.stack([mu, sigma], 1)
    outlier = outlier_mask(mu, gradient, args.tau_w, args.grad_frac)
    generator = torch.Generator().manual_seed(common.derive_seed(args.seed, 5))
    k0 = args.k0 or min(2048, max(2, len(mu) // 500))
    inliers = (~outlier).nonzero().flatten()
    if len(inliers) < 2:
        raise UserError(f"only {len(inliers)} of {len(mu)} weights are inliers; raise --tau-w or "
                        "lower --grad-frac")
    if k0 > len(inliers):
        raise UserError(f"--k0 {k0}: there are only {len(inliers)} inliers among {len(mu)} weights")
    x = points[inliers]
    mixture, cells, history = learn_mixture(x, k0, generator, args.gmm, args.em_iterations,
                                            args.bins)
    labels = assign_all(x, cells, mixture).label.int()
    counts = torch.bincount(labels, minlength=len(mixture.weights))
    small = counts <= args.min_cluster
    if small.all():
        raise UserError(f"no component has more than --min-cluster {args.min_cluster} members; "
                        "lower it, or --k0")
    dissolved = small[labels]
    outlier[inliers[dissolved]] = True
    inliers, x = inliers[~dissolved], x[~dissolved]
    cells = cells._replace(index=cells.index[~dissolved])
    mixture = Mixture(*(t[~small] for t in mixture))
    mixture = mixture._replace(weights=mixture.weights / mixture.weights.sum())
    codes, members = {}, None
    for name in ("clustered", "merged"):
        if name == "merged":
            mean = gradient.new_zeros(len(mixture.weights))
            mean = mean.index_add_(0, members, gradient[inliers]) / \
                torch.bincount(members, minlength=len(mean)).clamp_min(1)
            distances = nearest_distances(mixture)
            tau_d = args.tau_d
            if tau_d == "auto":  # a little more: the quantile can be a pair's own distance
                tau_d = distances.quantile(0.05).item() * (1 + 1e-6)
            mixture, _, _ = merge_mixture(mixture, mean.double(), tau_d, args.tau_g, args.tau_v)
            mixture = Mixture(*(t.to(mu.device) for t in mixture))
        mixture, sharing = compact(x, cells, mixture, args.chi2_level)
        members = sharing.label.int()
        codes[name] = make_code(points, outlier, inliers, mixture, sharing)
    codes["report"] = {"k0": k0, "tau_d": tau_d, "em_log_likelihood": history}
    return codes


def compact(x, cells, mixture, level):
    """(mixture, sharing) in which every component has a member and labels are 0..K-1."""
    while True:
        sharing = assign_all(x, cells, mixture, level)
        used = torch.bincount(sharing.label.int(), minlength=len(mixture.weights)) > 0
        if used.all():
            return mixture, sharing
        mixture = Mixture(*(t[used] for t in mixture))
        mixture = mixture._replace(weights=mixture.weights / mixture.weights.sum())


def nearest_distances(mixture) -> Tensor:
    """W2 of each component from the nearest of its 8 nearest centres [K]."""
    if len(mixture.weights) < 2:
        return torch.zeros(1)
    near = nearest(mixture.centres, mixture.centres, 9)
    own = mixture.centres[:, None], mixture.covariances[:, None]
    distances = wasserstein(*own, mixture.centres[near], mixture.covariances[near])
    itself = near == torch.arange(len(near), device=near.device)[:, None]
    return distances.masked_fill(itself, math.inf).min(1).values


def make_code(points, outlier, inliers, mixture, sharing) -> dict:
    """Labels, outliers, ellipse points and Gaussians of a network, on the CPU."""
    labels = torch.full((len(points),), -1, dtype=torch.int16, device=points.device)
    labels[inliers] = sharing.label
    rows = outlier.nonzero().flatten()
    code = {"labels": labels, "outliers": rows, "outlier_mu": points[rows, 0],
            "outlier_sigma": points[rows, 1], "ellipse": inliers[sharing.rim],
            "ellipse_second": sharing.second.short(), "ellipse_alpha": sharing.alpha.float(),
            "centres": mixture.centres.float(), "factors": cholesky(mixture.covariances).float(),
            "mixture": list(mixture)}
    return {k: [t.cpu() for t in v] if k == "mixture" else v.cpu() for k, v in code.items()}


# ---- Evaluation ---------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What `samples` weight draws say about N examples, on the CPU."""

    probs: Tensor       # [N, K] mean of probabilities
    logits: Tensor      # [N, K] mean of logits
    votes: Tensor       # [N, K] share of draws
    aleatoric: Tensor   # [N] mean entropy of a draw, nats
    sample_nll: float   # mean NLL of single draws, nats


@torch.no_grad()
def predict(module, dataset, args, world, samples) -> Prediction:
    """Monte Carlo over weights: one draw for the whole set at a time; any number of processes."""
    module.eval()
    sums, index, nll = None, [], 0.0
    deterministic = not isinstance(module, Stochastic)
    for sample in range(1 if deterministic else samples):
        common.seed_all(args.seed, 1000 + sample)
        drawn = () if deterministic else (module.draw(),)
        rows, index = [], []
        for batch in make_loader(dataset, args, world, max(512, args.batch_size)).epoch():
            if not len(batch.labels):
                continue
            with autocast(args, world):
                logits = widen(module(batch.images, *drawn))
            log_probs = logits.log_softmax(1)
            probs, votes = log_probs.exp(), F.one_hot(logits.argmax(1), logits.shape[1])
            own = log_probs.gather(1, batch.labels.clamp_max(logits.shape[1] - 1)[:, None])
            rows.append(torch.cat([probs, logits, votes, common.entropy(probs)[:, None].to(probs),
                                   -own], 1).double().cpu())
            index.append(batch.index.cpu())
        rows = torch.cat(rows) if rows else torch.zeros(0, 3 * dataset.num_classes + 2)
        sums = rows if sums is None else sums + rows
    index = torch.cat(index) if index else torch.zeros(0, dtype=torch.long)
    mean = common.gather_rows(sums / (1 if deterministic else samples), index, len(dataset), world)
    k = (mean.shape[1] - 2) // 3
    return Prediction(mean[:, :k], mean[:, k:2 * k], mean[:, 2 * k:3 * k], mean[:, -2],
                      mean[:, -1].mean().item())


def predictive_metrics(p, labels) -> dict:
    """Metrics by the mean of probabilities (default), of logits (published) and by votes."""
    probs = p.probs / p.probs.sum(1, keepdim=True)
    by_logits = p.logits.log_softmax(1)
    values = {"accuracy": common.accuracy(probs, labels),
              "nll": common.nll(probs.clamp_min(1e-45).log(), labels),
              "ece15": common.ece(probs, labels), "brier": common.brier(probs, labels),
              "accuracy_logits": common.accuracy(by_logits, labels),
              "nll_logits": common.nll(by_logits, labels),
              "ece15_logits": common.ece(by_logits.exp(), labels),
              "accuracy_votes": common.accuracy(p.votes, labels), "nll_samples": p.sample_nll}
    return values


def ood_scores(p, several=True) -> dict:
    """Uncertainties [N]: entropy of the mean, 1 - largest probability, and where there are several
    draws the mutual information."""
    probs = p.probs / p.probs.sum(1, keepdim=True)
    total = common.entropy(probs)
    scores = {"entropy": total, "max_prob": 1 - probs.max(1).values}
    if several:
        scores["mutual_information"] = (total - p.aleatoric).clamp_min(0)
    return scores


def evaluate(module, sets, args, world) -> tuple[dict, Prediction]:
    """Test metrics and OOD detection of one stage's network, and its prediction of the test set."""
    test = predict(module, sets["test"], args, world, args.mc)
    several = args.mc > 1 and isinstance(module, Stochastic)
    metrics, inside = predictive_metrics(test, sets["test"].labels), ood_scores(test, several)
    for name, dataset in sets["ood"].items():
        outside = ood_scores(predict(module, dataset, args, world, args.mc), several)
        for score in inside:
            values = common.ood_metrics(inside[score], outside[score], larger_means="ood")
            metrics |= {f"{name}_{k}_{score}": v for k, v in values.items()}
    return metrics, test


def compression_report(shared) -> dict:
    """Counts, and bytes by part of the compressed network, with ratios to both baselines."""
    n, outliers, k = shared.layout.size, len(shared.outliers), len(shared.centres)
    ellipses = len(shared.ellipse)
    rest = [t for name, t in shared.net.state_dict().items() if name not in shared.layout.names]
    parts = {"labels": 2 * n, "outlier_index": 4 * outliers, "outlier_values": 8 * outliers,
             "gaussians": 20 * k, "ellipses": (4 + 2 + 4) * ellipses,
             "rest": sum(t.numel() * t.element_size() for t in rest)}
    total, plain = sum(parts.values()), parts["rest"]
    return {"counts/weights": n, "counts/outliers": outliers, "counts/ellipses": ellipses,
            "counts/inliers": n - outliers, "counts/gaussians": k,
            "counts/trainable": 2 * outliers + 5 * k,
            **{f"compression/bytes_{name}": v for name, v in parts.items()},
            "compression/bytes": total,
            "compression/bytes_ratio_mean_field": total / (8 * n + plain),
            "compression/bytes_ratio_deterministic": total / (4 * n + plain)}


def layer_report(shared, mu) -> dict:
    """By layer: RMS of mu_i minus the mean of the shared draw, and the share of outliers."""
    with torch.no_grad():
        centres, _, outlier_mu, _ = shared.current()
        mean, alpha = centres[:, 0].index_select(0, shared.index), shared.ellipse_alpha
        second = centres[:, 0].index_select(0, shared.ellipse_second)
        blended = alpha * mean[shared.ellipse] + (1 - alpha) * second
        mean = mean.index_copy(0, shared.ellipse, blended)
        mean = mean.index_copy(0, shared.outliers, outlier_mu)
        errors = shared.layout.split((mu.to(mean) - mean).square())
        outliers = shared.layout.split((shared.labels < 0).double())
    return {f"quantisation/{name}": v.mean().sqrt().item() for name, v in errors.items()} | \
        {f"outlier_share/{name}": v.mean().item() for name, v in outliers.items()}


def format_results(metrics, ood) -> str:
    """The table that a run prints, of `<stage>/<metric>`, then what the network weighs."""
    header = ["stage", "accuracy %", "NLL nats", "ECE15 %", "Brier", "NLL of mean logits",
              *(f"AUROC {name}" for name in ood)]
    stages = [k.removesuffix("/accuracy") for k in metrics if k.endswith("/accuracy")]
    rows = [[stage, f"{100 * metrics[f'{stage}/accuracy']:.2f}", f"{metrics[f'{stage}/nll']:.4f}",
             f"{100 * metrics[f'{stage}/ece15']:.2f}", f"{metrics[f'{stage}/brier']:.4f}",
             f"{metrics[f'{stage}/nll_logits']:.4f}",
             *(f"{metrics[f'{stage}/{name}_auroc_entropy']:.4f}" for name in ood)]
            for stage in stages]
    text = common.format_table(header, rows)
    if "compression/bytes" in metrics:
        parts = {k.split("bytes_")[1]: v for k, v in metrics.items()
                 if k.startswith("compression/bytes_") and "ratio" not in k}
        rows = [[k.replace("_", " "), f"{v:,.0f}"] for k, v in parts.items() if k != "file"]
        rows += [["total", f"{metrics['compression/bytes']:,.0f}"]]
        rows += [["file", f"{parts['file']:,.0f}"]] if "file" in parts else []
        counts = ", ".join(f"{v:,.0f} {k.split('/')[1]}" for k, v in metrics.items()
                           if k.startswith("counts/"))
        text += (f"\n\n{counts}\n\n{common.format_table(['bytes', 'compressed'], rows)}\n"
                 f"{100 * metrics['compression/bytes_ratio_mean_field']:.1f} % of the mean-field "
                 f"network, {100 * metrics['compression/bytes_ratio_deterministic']:.1f} % of the "
                 "deterministic one")
    return text


# ---- Export -------------------------------------------------------------------------------------

FORMAT = "unsure-gbnn2d-1"


def export_shared(path, shared, args, num_classes, shape):
    """Write the compressed network: labels, outliers, Gaussians, ellipse points, the rest.

    Tensors and plain Python, atomically; labels are int16, factors three numbers a component.
    """
    current = zip(("centres", "factors", "outlier_mu", "outlier_sigma"), shared.current())
    code = {k: getattr(shared, k) for k in CODE} | {k: v.detach() for k, v in current}
    narrow = {"outliers": torch.int32, "ellipse": torch.int32, "labels": torch.int16,
              "ellipse_second": torch.int16}
    code = {k: v.to(narrow.get(k, torch.float32)).cpu() for k, v in code.items()}
    rest = {k: v.cpu() for k, v in shared.net.state_dict().items() if k not in shared.layout.names}
    model = {k: getattr(args, k) for k in ("dataset", "model", "width", "depth", "keep_layers",
                                           "draw", "blend")}
    common.save_checkpoint(path, {"config": {"format": FORMAT, **common.to_json(model)},
                                  "num_classes": num_classes, "shape": list(shape), "code": code,
                                  "rest": rest})


def load_shared(path):
    """(the network that --export wrote, its options, classes, shape)."""
    state = common.load_checkpoint(path)
    if state["config"].get("format") != FORMAT:
        raise UserError(f"{path} is no {FORMAT} file; write one with --export")
    try:
        return read_shared(state)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: a part is missing or does not fit ({common.one_line(error)}); "
                        "export it again") from None


def read_shared(state):
    """`load_shared` of the file's content."""
    options, shape = argparse.Namespace(**state["config"], weights=None), tuple(state["shape"])
    if options.model.startswith("torchvision/"):
        net = torchvision.models.get_model(options.model.split("/", 1)[1], weights=None,
                                           num_classes=state["num_classes"])
    else:
        net = make_network(options, state["num_classes"], shape)
    code = state["code"]
    full = {**code, "outliers": code["outliers"].long(), "ellipse": code["ellipse"].long()}
    layout = Layout(net, options.keep_layers)
    if layout.size != len(code["labels"]):
        raise RuntimeError(f"{len(code['labels'])} labels for {layout.size} weights")
    if int(code["labels"].max()) >= len(code["centres"]):
        raise RuntimeError(f"a label above the {len(code['centres'])} components")
    weights = layout.split(torch.zeros(layout.size))
    net.load_state_dict({**state["rest"], **weights})
    shared = Shared(net, layout, full, options.draw, options.blend).eval()
    return shared, options, state["num_classes"], shape


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE"]


def plot_plane(plt, path, points, codes):
    """The (mu, sigma) plane: 95 % ellipses, outliers, ellipse points, before and after merging."""
    from matplotlib.collections import EllipseCollection
    figure, axes = plt.subplots(1, len(codes), figsize=(6.5 * len(codes), 4.6), sharex=True,
                                sharey=True, constrained_layout=True, squeeze=False)
    generator = torch.Generator().manual_seed(0)
    few = torch.randperm(len(points), generator=generator)[:50_000]
    for axis, (name, code) in zip(axes[0], codes.items()):
        inlier = code["labels"][few] >= 0
        rim = code["ellipse"][torch.randperm(len(code["ellipse"]), generator=generator)[:10_000]]
        for rows, colour, label in ((few[inlier], COLOURS[5], "inliers"),
                                    (few[~inlier], COLOURS[1], "outliers"),
                                    (rim, COLOURS[2], "ellipse points")):
            axis.plot(*points[rows].T, ".", ms=1.2, color=colour, label=label, rasterized=True)
        widths, heights, angles = ellipse_axes(covariances_of(code["factors"].double()))
        axis.add_collection(EllipseCollection(
            widths, heights, angles, units="xy", offsets=code["centres"].numpy(),
            transOffset=axis.transData, facecolors="none", edgecolors=COLOURS[0], lw=0.6))
        axis.set(title=f"{name}: {len(code['centres'])} components", xlabel="mu")
    low, high = np.quantile(points.numpy(), [0.001, 0.999], axis=0)
    margin = 0.1 * (high - low)
    axes[0, 0].set(ylabel="sigma", xlim=(low[0] - margin[0], high[0] + margin[0]),
                   ylim=(low[1] - margin[1], high[1] + margin[1]))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  markerscale=6, frameon=False)
    common.save_figure(plt, figure, path)


def ellipse_axes(covariances, level=0.95):
    """Widths, heights, angles (degrees) [K] of the ellipses that hold `level` of each Gaussian."""
    a, b, d = covariances.double().unbind(1)
    values, vectors = torch.linalg.eigh(torch.stack([torch.stack([a, b], 1),
                                                     torch.stack([b, d], 1)], 2))
    sides = 2 * (values.clamp_min(0) * chi_square_quantile(level)).sqrt()
    angles = torch.rad2deg(torch.atan2(vectors[:, 1, 1], vectors[:, 0, 1]))
    return sides[:, 1].numpy(), sides[:, 0].numpy(), angles.numpy()


def plot_weights(plt, path, mu, shared, curve, prediction, labels):
    """Weights before and after sharing, components against the merge threshold, reliability."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = shared.draw().cpu()
    span = np.quantile(mu.numpy(), [0.001, 0.999])
    for values, colour, label in ((mu, COLOURS[0], "mean-field means"),
                                  (drawn, COLOURS[1], "a draw, shared")):
        axes[0].hist(values.numpy(), 80, range=span, histtype="step", color=colour, label=label)
    axes[0].set(xlabel="weight", ylabel="weights", yscale="log")
    axes[0].legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[1].plot(*zip(*curve), "o-", color=COLOURS[0])
    axes[1].set(xlabel="merge threshold tau_d (W2)", ylabel="components K", xscale="log")
    probs = prediction.probs / prediction.probs.sum(1, keepdim=True)
    confidence, predicted = probs.max(1)
    bins = common.reliability(confidence, predicted == labels)
    axes[2].bar(np.arange(15) / 15, bins.accuracy, 1 / 15, align="edge", color=COLOURS[0],
                ec="white")
    axes[2].plot([0, 1], [0, 1], "k--", lw=1)
    axes[2].set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1),
                title=f"final, ECE {100 * common.ece(probs, labels):.2f} %")
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def load_sets(args, world) -> dict:
    """All sets of a run, before anything is trained: train, test, OOD sets by name."""
    def load(name, split="test"):
        size = like.shape[-1] if name.startswith("folder:") else None
        return data.match(data.load(name, split, args.data_dir, seed=args.seed, image_size=size),
                          like)

    with common.main_first(world):
        like = data.load(args.dataset, "train", args.data_dir, seed=args.seed, val_fraction=0.0)
        return {"train": like, "test": load(args.dataset),
                "ood": {Path(name.removeprefix("folder:")).name: load(name) for name in args.ood}}


def run_name(args) -> str:
    width = f"-w{args.width:g}" if args.width != 1 else ""
    return args.name or f"{args.dataset}-{args.model.replace('/', '_')}{width}-seed{args.seed}"


def open_run(args, world, stage):
    """The run directory of a stage; its options are those of the stages up to it.

    --resume PATH is another run's directory: its stages are read where they exist."""
    keys = [k for s in STAGES[:STAGES.index(stage) + 1] for k in STAGE_OPTIONS[s]]
    if args.resume not in ("auto", "never"):
        other = Path(args.resume) / stage / "last.pt"
        if not other.exists() and stage == "det":
            raise UserError(f"--resume {args.resume}: no {other}; give the directory of a run, "
                            "which holds its stages")
        args = common.with_options(args, resume=str(other) if other.exists() else "auto")
    return common.Run(args, "gbnn2d", f"{run_name(args)}/{stage}",
                      {k: getattr(args, k) for k in keys}, world)


def finish(module, stage, epochs, kl_weight, sets, args, world):
    """Train a stage, or read it (--eval); the run."""
    run = open_run(args, world, stage)
    if args.eval:
        state = run.load(required=True)
        if (done := state["progress"]["epoch"]) < epochs:
            raise UserError(f"{run.resume_from} has {done} of {epochs} epochs; finish it first "
                            "(the same command without --eval)")
        module.load_state_dict(state["model"])
        module.to(world.device, memory_format=torch.channels_last)
    else:
        train(module, stage, epochs, kl_weight, sets["train"], run, args, world)
    return run


def copy_of(net, args, sets):
    """A network of the same kind with the same state: each stage has its own."""
    twin = make_network(args, sets["train"].num_classes, sets["train"].shape)
    twin.load_state_dict(net.state_dict())
    return twin


def codes_of(module, sets, args, world) -> dict:
    """The codes of stage gmm: from its checkpoint, or made and kept there."""
    run = open_run(args, world, "gmm")
    run.open()
    if (state := run.load(required=args.eval)) is not None:
        return state["codes"]
    clock = common.Stopwatch(world.device)
    codes = build_codes(module, sets["train"], args, world)
    run.say(f"gmm: {len(codes['clustered']['centres'])} components, "
            f"{len(codes['merged']['centres'])} after merging, {clock.seconds():.1f} s")
    run.save(codes=codes)
    return codes


def run_stages(args, world) -> dict:
    """All stages up to --stage of one seed: the metrics of each, and the compressed network."""
    common.seed_all(args.seed)
    clock, sets, last = common.Stopwatch(world.device), load_sets(args, world), args.stage
    none = lambda steps: lambda step: 0.0
    metrics, field, codes, shared = {}, None, None, None

    def measure(stage, module):
        values, prediction = evaluate(module, sets, args, world)
        metrics.update({f"{stage}/{k}": v for k, v in values.items()})
        return prediction

    net = make_network(args, sets["train"].num_classes, sets["train"].shape)
    layout = Layout(net, args.keep_layers)
    if args.model.startswith("torchvision/"):
        if world.is_main and not args.quiet:
            print(layout.describe(), flush=True)
        net.to(world.device, memory_format=torch.channels_last)
    else:
        finish(net, "det", args.epochs, none, sets, args, world)
    measure("det", net)
    if last != "det":
        field = MeanField(copy_of(net, args, sets), layout, args)
        rising = lambda steps: lambda step: args.stoch_kl * min(
            1.0, (step + 1) / max(1.0, args.kl_warm_up * steps))
        finish(field, "stoch", args.stoch_epochs, rising, sets, args, world)
        measure("stoch", field)
    if last in ("gmm", "final"):
        codes = codes_of(field, sets, args, world)
        for name in ("clustered", "merged"):
            shared = Shared(copy_of(field.net, args, sets), layout, codes[name], args.draw,
                            args.blend).to(world.device, memory_format=torch.channels_last)
            refresh_batch_norm(shared, sets["train"], args, world)
            prediction = measure(name, shared)
    if last == "final":
        for parameter in shared.net.parameters() if not args.train_bn else ():
            parameter.requires_grad_(False)
        finish(shared, "final", args.final_epochs, lambda steps: lambda step: args.beta, sets, args,
               world)
        prediction = measure("final", shared)
        for mode in ("hier", "shared", "perweight") if args.compare_draws else ():
            shared.draw_mode = mode
            measure(f"final_{mode}", shared)
        shared.draw_mode = args.draw
    if shared is not None:
        metrics |= compression_report(shared) | layer_report(shared, field.mu)
        if world.is_main:
            metrics["compression/bytes_file"] = export_all(shared, sets, args, world)
    run = common.Run(args, "gbnn2d", run_name(args), open_run(args, world, last).config, world)
    run.results(metrics, {"seconds": clock.seconds()})
    if world.is_main:
        print(f"\n{run_name(args)}\n\n{format_results(metrics, sets['ood'])}\n", flush=True)
        if args.plot and shared is not None and (plt := common.pyplot()):
            draw_pictures(plt, run.directory, shared, field, codes, prediction, sets, args)
            run.say(f"pictures in {run.directory}")
    return metrics


def export_all(shared, sets, args, world) -> int:
    """Write the compressed network into the run's directory, and to --export; its bytes."""
    own = open_run(args, world, args.stage).directory.parent / "compressed.pt"
    for path in (own, Path(args.export)) if args.export else (own,):
        export_shared(path, shared, args, sets["train"].num_classes, sets["train"].shape)
    return own.stat().st_size


def draw_pictures(plt, directory, shared, field, codes, prediction, sets, args):
    """plane.png and weights.png."""
    points = torch.stack([field.mu, field.sigma], 1).detach().cpu()
    plot_plane(plt, directory / "plane.png", points, {k: codes[k] for k in ("clustered", "merged")})
    mixture = Mixture(*codes["clustered"]["mixture"])
    middle = max(nearest_distances(mixture).median().item(), 1e-12)
    gradient = torch.zeros(len(mixture.weights))
    curve = [(t, len(merge_mixture(mixture, gradient, t, math.inf, args.tau_v)[0].weights))
             for t in middle * np.geomspace(0.05, 20, 12)]
    plot_weights(plt, directory / "weights.png", points[:, 0], shared, curve, prediction,
                 sets["test"].labels)


def run_seeds(args, world) -> dict:
    """--runs times all stages, with the next seeds, and their means."""
    several = lambda seed: common.with_options(
        args, seed=seed, name=args.name and f"{args.name}-seed{seed}")
    runs = [run_stages(several(seed) if args.runs > 1 else args, world)
            for seed in range(args.seed, args.seed + args.runs)]
    if args.runs == 1:
        return runs[0]
    values = {k: [run[k] for run in runs] for k in runs[0]}
    means = {k: float(np.mean(v)) for k, v in values.items()}
    run = common.Run(args, "gbnn2d", f"{run_name(args)}-runs{args.runs}",
                     open_run(args, world, args.stage).config, world)
    run.results(means, {}, standard_error={k: common.standard_error(v) for k, v in values.items()},
                values=runs)
    run.say(f"mean of {args.runs} runs\n\n" + format_results(
        means, [Path(name.removeprefix("folder:")).name for name in args.ood]))
    return means


def run_loaded(args, world) -> dict:
    """--load: the metrics of a compressed network."""
    shared, options, num_classes, shape = load_shared(args.load)
    args.dataset, args.model, args.width = options.dataset, options.model, options.width
    sets = load_sets(args, world)
    if sets["train"].num_classes != num_classes or tuple(sets["train"].shape) != shape:
        raise UserError(f"--load {args.load}: a network for {num_classes} classes of {shape}")
    shared.to(world.device, memory_format=torch.channels_last)
    metrics, _ = evaluate(shared, sets, args, world)
    metrics = {f"loaded/{k}": v for k, v in metrics.items()} | compression_report(shared)
    if world.is_main:
        print(format_results(metrics, sets["ood"]))
    return metrics


def main(argv=None) -> dict:
    args = parse_args(argv)
    world = common.start_world(args.device)
    common.check_batch(args, world)
    return run_loaded(args, world) if args.load else run_seeds(args, world)


if __name__ == "__main__":
    common.run_script(main)
