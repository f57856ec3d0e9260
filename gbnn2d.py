"""Stochastic weight sharing: a Bayesian network whose weights share a few Gaussians in the plane.

Lin, Guan, Jing, Botterweck, Patane, "Stochastic Weight Sharing for Bayesian Neural Networks",
AISTATS 2025, arXiv:2505.17856. Method:

  1. Train a network (stage det), then a mean-field posterior N(mu_i, sigma_i^2) over its weights
     (stoch): mean cross entropy + 0.1 KL / n, a cold posterior, from the prior N(0, s_layer^2).
  2. The points (mu_i, sigma_i) are covered by K Gaussians N(c_k, S_k) in the plane, by EM (gmm).
     Outliers (|mu| > 0.2, or a gradient among the largest 1 %) keep their own Gaussian. Points
     outside the 95 % ellipse of their component blend their two most probable ones.
  3. Components closer than tau_d in Wasserstein-2 (and alike in gradient and variance) merge.
  4. The centres, covariances and outliers are trained by the same loss through the labels, with
     the KL from where they began (final). A weight costs the two bytes of its label.

Usage:
  python gbnn2d.py                                           # glyphs, all stages, two cores
  torchrun --nproc_per_node 8 gbnn2d.py --dataset cifar100   # the published ResNet-18
  python gbnn2d.py --eval                                    # the table again, from the checkpoints
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      gbnn2d.py --dataset imagenet                           # two machines, R = 0 and 1

Expected (one of two CPU cores; about 2 core-minutes a seed):
  python gbnn2d.py --runs 3 --mc 5, n = 3, mean +- standard error of NLL in nats: 0.0074 +- 0.0021
    (deterministic), 0.0201 +- 0.0039 (mean-field), 0.0366 +- 0.0078 (clustered), 0.0400 +- 0.0012
    (merged), 0.0101 +- 0.0018 (final: accuracy 99.82 +- 0.03 %, ECE 0.60 +- 0.11 %); 28.1 % of the
    bytes of the mean-field network.
  CIFAR-10 made small, a folder: of 12,500 training and 10,000 test images of 16x16, n = 1: --width
    0.125 --image-size 16 --epochs 10 --stoch-epochs 3 --final-epochs 5 --warm-up 0.2 --lr-mu 1e-4
    --lr-rho 5e-2 --k0 0 --tau-d auto --mc 5 --stoch-kl W --beta W: accuracy %, NLL, ECE %: 56.0,
    1.215, 1.9 (deterministic); final with W = 0: 56.3, 1.207, 1.1; 0.01: 56.3, 1.207, 1.2; 0.1:
    56.0, 1.215, 1.8; 1: 51.8, 1.346, 8.7; 28.0 to 28.4 % of the mean-field bytes.
  --dataset mnist --runs 3, n = 3, three core-minutes a seed: deterministic 99.20 +- 0.04 %, 0.0228
    +- 0.0006 nats; final 99.20 +- 0.02 %, 0.0259 +- 0.0012, ECE 0.42 +- 0.01 %, 27.9 % of bytes.
  CIFAR-10, n = 1, 43 core-minutes: --dataset cifar10 --width 0.25 --epochs 6 --stoch-epochs 2
    --final-epochs 3 --warm-up 0.2 --lr-mu 1e-4 --lr-rho 5e-2 --k0 0 --tau-d auto --mc 10 --ood
    cifar100: deterministic 84.49 %, ECE 1.2 %; final 83.98 %, 1.9 %, 27.6 % of the bytes.
  CIFAR-10 at width 1, CIFAR-100, ImageNet: not measured. The authors' README gives ResNet-18
    91.8 +- 0.1 %, 0.313 +- 0.003 nats, ECE 3.4 +- 0.3 % on CIFAR-10.

Differs from the published code (github.com/gfhvbjk/Anonymous):
  - Its last stage cannot learn: sampled weights are detached, and no optimiser step is made. Ours
    does what the paper describes.
  - The mean-field stage has a KL term, times 0.1 (published: none, --stoch-kl 0). With all of it
    (--stoch-kl 1) the posterior collapses onto the prior, as weights outnumber images. The last
    stage's KL is times 0.1 too (there whole).
  - sigma = softplus(rho) from 1 % of the layer's root mean square (published: log(0.0003 + e^rho),
    --sigma-map published, from random rho; there a negative one is possible, here its magnitude
    counts, and the last stage's other offset, 0.03, is not used).
  - Adam, not SGD with decay, trains mu and rho; what is shared moves in units of its own spread;
    warm-up, the batch of the last stage (there 256) and the lengths of stages are ours.
  - Batch norm's statistics are fixed after stage det (there they drift, in the test too). Its scale
    and offset, and biases, train on with --lr-mu (there: frozen, and random biases, in the
    mean-field stage); --no-train-bn fixes them.
  - Outliers by the mean magnitude of an epoch's gradients, not the signed one of a batch, and by
    |mu| > 0.2, not >=; they are left out before the mixture is learned, not after.
  - EM on standardised axes (--gmm kmeans: without; there in raw units of mu and rho), from 6000
    components for every network (there 256 for ResNet-18), labels by density (there: nearest
    centre), covariances of all that EM gives to a component (divisor n).
  - Ellipse points: alphas are posteriors and sum to 1, of drawn weights (--blend mean: of centres);
    there a second component counts only above a density of e^12, and the weight shrinks.
  - Merging: once, the closest pair first, moments matched, by W2 in closed form; there after each
    epoch in the order of numbers, by plain averages, and a clamp spoils the distances of small
    covariances. tau_g and tau_v bound differences, as in the paper; there each value.
  - A weight is drawn as m + s eps, (m, s) from its component; --draw shared is the published draw
    (all members of a component equal), --draw perweight has no uncertainty of the component.
  - The query, key and value projections of attention are shared too. Normalisation is each data
    set's own, an OOD set has that of the training set (there CIFAR-100's, and SVHN its own); MNIST
    has one channel; CIFAR-10 is not rotated by up to 15 degrees, its crops reflect.
  - Predictions are means of probabilities over draws for the whole set; means of logits and votes,
    which the published scripts use, stand beside them. OOD sets have as many draws as the test set
    (there 100), FPR is at 95 % TPR (there at 85 %).
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from scipy.spatial import cKDTree
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

STAGES = ("det", "stoch", "gmm", "final")
PRESETS = {
    # as published, but for what the list above says of the last two stages
    "": dict(model="resnet18", width=1.0, epochs=200, stoch_epochs=20, final_epochs=20, lr=0.1,
             weight_decay=5e-4, lr_mu=1e-5, lr_rho=1e-3, lr_final=0.1, warm_up=0.0, batch_size=128,
             augment=False, grad_frac=0.01, k0=6000, tau_d=3.873e-4, mc=30, ece_bins=15,
             ood=["svhn"]),
    "cifar10": dict(augment=True, mc=60, ood=["svhn", "cifar100"]),
    "cifar100": dict(augment=True, mc=40),
    "svhn": dict(augment=True, ood=["cifar10"]),
    "imagenet": dict(augment=True, epochs=90, batch_size=256, weight_decay=1e-4, ece_bins=10,
                     ood=["imagenet_o"]),
    "mnist": dict(model="lenet", epochs=10, stoch_epochs=5, final_epochs=5, lr=0.05, lr_mu=1e-4,
                  lr_rho=1e-2, warm_up=0.2, k0=0, tau_d="auto", ood=["fashion_mnist"]),
    "glyphs": dict(width=0.125, epochs=3, stoch_epochs=2, final_epochs=4, lr_mu=1e-4, lr_rho=5e-2,
                   warm_up=0.2, k0=0, tau_d="auto", mc=20, ood=["glyphs_letters"]),
}
PRESETS["fashion_mnist"] = {**PRESETS["mnist"], "ood": ["mnist"]}


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "glyphs")
    flag = argparse.BooleanOptionalAction
    add = parser.group("network")
    add("--model", "-net", help="lenet, resnet18, resnet50, wide_resnet, or torchvision/NAME: "
        "pretrained, as stage det (NAME as torchvision.models.get_model takes it)")
    add("--weights", default="DEFAULT", help="of torchvision/NAME: DEFAULT, or a state dict's file")
    add("--depth", type=at_least(10), default=28, help="of wide_resnet, 6n + 4 (paper: 28)")
    add("--keep-layers", nargs="*", default=[], metavar="NAME", help="layers left out of sharing")
    add = parser.group("training")
    add("--stoch-epochs", type=at_least(0), help="of the mean-field stage (published: up to 200)")
    add("--final-epochs", type=at_least(0), help="of the last stage (published: up to 200)")
    add("--lr-mu", type=at_least(0, float), help="mean-field stage: of mu (published: 1e-5)")
    add("--lr-rho", type=at_least(0, float), help="of rho (published: 1e-3)")
    add("--lr-final", type=at_least(0, float), help="last stage: of what is shared and of "
        "outliers, in units of their own spread; batch norm and biases keep --lr-mu")
    add("--weight-decay", type=at_least(0, float), help="of stage det (published: 5e-4)")
    add("--warm-up", type=between(0, 0.9), help="share of each stage's steps with a rising rate")
    add("--augment", action=flag, help="reflected crop and flip (published: CIFAR)")
    add("--train-bn", action=flag, default=True, help="train norms and biases after stage det")
    add = parser.group("method")
    add("--sigma-init", type=between(1e-9, 10), default=0.01, help="over the layer's weight RMS")
    add("--sigma-map", choices=["softplus", "published"], default="softplus", help="of rho")
    add("--prior", choices=["zero", "pretrained"], default="zero", help="mean of the prior")
    add("--prior-sd", type=at_least(0, float), default=0.0, help="0: the layer's weight RMS")
    add("--stoch-kl", type=at_least(0, float), default=0.1, help="weight of the mean-field stage's "
        "KL term; below 1: a cold posterior (published: 0; 1 collapses onto the prior)")
    add("--tau-w", type=at_least(1e-9, float), default=0.2, help="|mu| of outliers (paper: 0.2)")
    add("--grad-frac", type=between(0, 0.9), help="share of outliers by gradient (paper: 0.01; the "
        "counts that it publishes fit 0.001)")
    add("--k0", type=between(0, 32767, int), help="components before merging; 0: min(2048, "
        "N / 500) (published: 6000 for WRN-28-10, 256 for ResNet-18 by k-means)")
    add("--min-cluster", type=at_least(0), default=20, help="components of at most this many "
        "members dissolve into outliers (published: 20)")
    add("--gmm", choices=["em", "kmeans"], default="em", help="kmeans: no EM (published)")
    add("--chi2-level", type=between(1e-6, 1 - 1e-12), default=0.95, help="of the ellipses")
    add("--tau-d", type=lambda text: text if text == "auto" else at_least(0, float)(text),
        metavar="{auto,W2}", help="W2 below which components merge, not squared (published: "
        "3.873e-4; auto: 5 %% quantile of the distances of nearest ones)")
    add("--tau-g", type=at_least(0, float), default=math.inf, help="largest gradient difference")
    add("--tau-v", type=at_least(0, float), default=1e-3, help="largest difference of variances")
    add("--draw", choices=["hier", "shared", "perweight"], default="hier", help="w = m + s eps "
        "with (m, s) of the component; m alone (published); or its mean + eps")
    add("--blend", choices=["linear", "choose", "mean"], default="linear", help="of ellipse "
        "points: blended draws; one of the two by chance; blended centres (published)")
    add("--beta", type=at_least(0, float), default=0.1, help="weight of the last stage's KL term")
    add = parser.group("evaluation")
    add("--mc", type=at_least(1), help="weight draws of a prediction (published: 30 to 60)")
    add("--ece-bins", type=at_least(1), help="of the ECE beside ece15 (published: 15; ImageNet 10)")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH")
    add("--load", metavar="FILE", help="evaluate a compressed network that --export wrote")
    add = parser.group("run")
    add("--stage", choices=["all", *STAGES], default="all", help="stop after this one")
    add("--export", metavar="FILE", help="write the compressed network")
    argv = sys.argv[1:] if argv is None else argv
    argv = [f"-{word}" if word in ("-dataset", "-lr") else word for word in argv]  # published
    args = parser.parse(argv)
    if args.model == "wide_resnet" and args.depth % 6 != 4:
        parser.error(f"--depth {args.depth}: wide_resnet takes 6n + 4, from 10 on")
    if args.export and args.stage in ("det", "stoch"):
        parser.error(f"--export: stage {args.stage} has nothing shared yet; leave out --stage")
    if args.runs > 1 and (args.export or args.load):
        parser.error("--export and --load are for one run; leave out --runs")
    if args.export and args.load:
        parser.error("--load evaluates such a file as it is; leave out --export")
    if args.compile:
        parser.error("--compile is not for networks whose weights are drawn; leave it out")
    if args.gmm == "kmeans" and args.model != "wide_resnet" and "k0" not in args.explicit:
        args.k0 = args.k0 and 256
    args.eval = args.eval and not args.load  # which needs no run
    return args


# ---- Model --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """after(body(h) + shortcut(h)), h = before(x); without a shortcut x itself is added."""

    def __init__(self, body, shortcut, before=nn.Identity(), after=nn.Identity()):
        super().__init__()
        self.before, self.body, self.shortcut, self.after = before, body, shortcut, after

    def forward(self, x):
        h = self.before(x)
        return self.after(self.body(h) + (self.shortcut(h) if self.shortcut else x))


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)


def shortcut(c_in, c_out, stride, *norm):
    """None where the shape stays. Subsampling, then a plain 1x1 convolution: on CPUs PyTorch 2.14's
    own strided one, channels last, writes out of bounds in the backward pass."""
    if stride != 1 or c_in != c_out:
        return nn.Sequential(nn.AvgPool2d(1, stride), conv(c_in, c_out, 1), *norm)


def lenet(args, shape):
    """LeNet-5 for 28x28 images."""
    if shape[1:] != (28, 28):
        raise UserError(f"--model lenet takes 28x28 images, not {shape[1]}x{shape[2]}")
    a, b, c, d = (max(1, round(n * args.width)) for n in (6, 16, 120, 84))
    return [nn.Conv2d(shape[0], a, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, d),
            nn.ReLU()], d


def resnet(args, shape):
    """ResNet-18 or -50; images of more than 64 pixels take ImageNet's stem (7x7, max pool)."""
    bottleneck, channels = args.model == "resnet50", max(1, round(64 * args.width))
    c_in, large = channels, shape[-1] > 64
    layers = [conv(shape[0], c_in, 7 if large else 3, 2 if large else 1), nn.BatchNorm2d(c_in),
              nn.ReLU(), nn.MaxPool2d(3, 2, 1) if large else nn.Identity()]
    for group, count in enumerate((3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)):
        for stride in [2 if group else 1] + [1] * (count - 1):
            c = channels * 2**group
            c_out = 4 * c if bottleneck else c
            convs = [conv(c_in, c, 1), conv(c, c, 3, stride), conv(c, c_out, 1)] if bottleneck \
                else [conv(c_in, c, 3, stride), conv(c, c)]
            body = [m for k in convs for m in (k, nn.BatchNorm2d(k.out_channels), nn.ReLU())]
            side = shortcut(c_in, c_out, stride, nn.BatchNorm2d(c_out))
            layers.append(Residual(nn.Sequential(*body[:-1]), side, after=nn.ReLU()))
            c_in = c_out
    return layers + [nn.AdaptiveAvgPool2d(1), nn.Flatten()], c_in


def wide_resnet(args, shape):
    """WRN-depth-(10 width), pre-activation: depth 28 and width 1 are the paper's WRN-28-10."""
    layers, c_in = [conv(shape[0], 16)], 16
    for group in range(3):
        c = max(1, round(160 * args.width)) * 2**group
        for stride in [2 if group else 1] + [1] * ((args.depth - 4) // 6 - 1):
            body = nn.Sequential(conv(c_in, c, 3, stride), nn.BatchNorm2d(c), nn.ReLU(), conv(c, c))
            layers.append(Residual(body, shortcut(c_in, c, stride),
                                   before=nn.Sequential(nn.BatchNorm2d(c_in), nn.ReLU())))
            c_in = c
    layers += [nn.BatchNorm2d(c_in), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


NETWORKS = {"lenet": lenet, "resnet18": resnet, "resnet50": resnet, "wide_resnet": wide_resnet}


def torchvision_network(name, weights, num_classes, shape):
    """A classifier of torchvision: pretrained (weights "DEFAULT"), with the state dict of the file
    `weights`, or (None) as initialised. Auxiliary classifiers are left out."""
    state = None if weights in (None, "DEFAULT") else common.load_checkpoint(weights)
    try:
        known = {"weights": "DEFAULT"} if weights == "DEFAULT" else {"num_classes": num_classes}
        net = common.main_first(lambda: torchvision.models.get_model(name, **known))
        for part in ("aux1", "aux2", "AuxLogits", "aux_logits"):  # GoogLeNet's, Inception's
            if hasattr(net, part):
                setattr(net, part, None)
        if state is not None:
            net.load_state_dict({k: v for k, v in state.items() if k[:3].lower() != "aux"})
        with torch.no_grad():
            if net.eval()(torch.zeros(1, *shape)).shape == (1, num_classes):
                return net
        error = f"it has no outputs for {num_classes} classes of images {list(shape)}"
    except Exception as raised:  # unknown names, failed downloads, other files and shapes
        error = raised
    raise UserError(f"--model torchvision/{name} --weights {weights}: {common.one_line(error)}")


def make_network(args, num_classes, shape):
    """The deterministic network of `args` for images of `shape` (C, H, W), on its device."""
    if args.model.startswith("torchvision/"):
        net = torchvision_network(args.model.split("/", 1)[1], args.weights, num_classes, shape)
    elif args.model in NETWORKS:
        layers, dim = NETWORKS[args.model](args, tuple(shape))
        net = nn.Sequential(*layers, nn.Linear(dim, num_classes))
    else:
        raise UserError(f"--model {args.model}: use one of {', '.join(NETWORKS)}, torchvision/NAME")
    return net.to(args.device, memory_format=torch.channels_last)


class Layout:
    """One order of the covered weights (of convolutions, linear layers and attention), as [N]."""

    def __init__(self, net, keep=()):
        layers, self.shapes = dict(net.named_modules()), {}
        if unknown := set(keep) - set(layers):
            raise UserError(f"--keep-layers {min(unknown)}: the network has no such layer")
        for name, layer in layers.items():
            key = "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"
            if isinstance(layer, (nn.Conv2d, nn.Linear, nn.MultiheadAttention)) \
                    and name not in keep and getattr(layer, key) is not None:
                self.shapes[f"{name}.{key}".lstrip(".")] = getattr(layer, key).shape
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self.sizes)
        if not self.size:
            raise UserError("the network has no convolution or linear layer to share")

    def split(self, flat) -> dict:
        """{name: view} of [N]."""
        parts = zip(self.shapes.items(), flat.split(self.sizes))
        return {name: part.view(shape) for (name, shape), part in parts}


class Stochastic(nn.Module):
    """A network whose covered weights [N] are drawn anew for each forward pass, by `draw`."""

    def __init__(self, net, layout, args):
        super().__init__()
        self.net, self.layout = net, layout
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(args.train_bn and name not in layout.shapes)

    def forward(self, x, weights=None):
        weights = self.draw() if weights is None else weights
        return torch.func.functional_call(self.net, self.layout.split(weights), (x,))


class MeanField(Stochastic):
    """w_i = mu_i + sigma(rho_i) eps_i; prior N(m_i, s_i^2) with a spread s of each layer."""

    def __init__(self, net, layout, args):
        super().__init__(net, layout, args)
        mu = torch.cat([net.get_parameter(name).detach().flatten() for name in layout.shapes])
        self.kind = args.sigma_map
        rms = torch.cat([part.square().mean().sqrt().expand(part.numel())
                         for part in layout.split(mu).values()]).clamp_min(1e-8)
        self.mu = nn.Parameter(mu.clone())
        self.rho = nn.Parameter(rho_of(args.sigma_init * rms, self.kind))
        self.register_buffer("prior_mu", mu if args.prior == "pretrained" else 0 * mu)
        self.register_buffer("prior_sd", 0 * rms + args.prior_sd if args.prior_sd else rms)

    @property
    def sigma(self):
        return sigma_of(self.rho, self.kind).abs()  # the published map's sign has no meaning

    def draw(self):
        return self.mu + self.sigma * torch.randn_like(self.mu)

    def kl(self):
        """KL of the posterior from the prior, nats."""
        return gaussian_kl(self.mu, self.sigma, self.prior_mu, self.prior_sd).sum()


class Shared(Stochastic):
    """Weights that refer to K Gaussians in the plane, but for outliers, which have their own.

    Buffers: the code as it began. Parameters: how far its Gaussians moved since, in their own
    units, so that one learning rate suits all.
    """

    def __init__(self, net, layout, code, args):
        super().__init__(net, layout, args)
        self.draw_mode, self.blend, like = args.draw, args.blend, next(net.parameters())
        for name, value in code._asdict().items():  # process groups cannot send int16
            whole = torch.int32 if value.dtype == torch.int16 else torch.int64
            self.register_buffer(name, value.to(like) if value.is_floating_point()
                                 else value.to(like.device, whole))
        k, n = len(code.centres), len(code.outliers)
        self.moves = nn.ParameterList(like.new_zeros(size) for size in ((k, 2), (k, 3), n, n))

    def code(self):
        """The code as it is now."""
        return move(Code(*(getattr(self, name) for name in Code._fields)), *self.moves)

    def draw(self):
        return draw_weights(self.code(), self.draw_mode, self.blend)

    def kl(self):
        """KL of the Gaussians from where they began, each counted once, nats."""
        return moved_kl(*self.moves)


# ---- Method -------------------------------------------------------------------------------------
# N weights are points (mu, sigma) in the plane, covered by K Gaussians N(c_k, S_k). A covariance is
# three numbers (S_00, S_01, S_11), a factor L with S = L L^T three (L_00, L_10, L_11).


def sigma_of(rho, kind="softplus") -> Tensor:
    """sigma from the unconstrained rho: softplus, > 0; published: log(0.0003 + e^rho), any sign."""
    return F.softplus(rho) if kind == "softplus" else torch.log1p(torch.expm1(rho) + 3e-4)


def rho_of(sigma, kind="softplus") -> Tensor:
    """Inverse of `sigma_of`: sigma + log(1 - e^-sigma), exact far below 1; log(e^sigma - 3e-4)."""
    if kind == "softplus":
        return sigma + (-torch.expm1(-sigma)).log()
    return torch.log1p(torch.expm1(sigma) - 3e-4)


def gaussian_kl(mu, sigma, prior_mu, prior_sigma) -> Tensor:
    """KL(N(mu, sigma^2) || N(prior_mu, prior_sigma^2)), element by element, nats."""
    ratio = (sigma / prior_sigma).square()
    return 0.5 * (ratio - 1 - ratio.log() + ((mu - prior_mu) / prior_sigma).square())


def outlier_mask(mu, gradient, tau_w=0.2, fraction=0.01) -> Tensor:
    """Weights [N] that keep their own Gaussian: |mu| > tau_w, or |gradient| among the largest.

    The largest are those >= the k-th, k = max(1, floor(fraction N)); none where fraction is 0.
    """
    mask, size = mu.abs() > tau_w, gradient.abs()
    if fraction > 0:
        mask |= size >= size.topk(max(1, int(fraction * len(size)))).values[-1]
    return mask


class Cells(NamedTuple):
    """N points as z = (x - shift) / scale on a grid: each cell's mean moments, exactly; float64."""

    count: Tensor    # [C]
    moments: Tensor  # [C, 6], means of (1, u, v, uu, uv, vv) over the cell's points z = (u, v)
    index: Tensor    # [N] int32, the cell of each point
    shift: Tensor    # [2]
    scale: Tensor    # [2], of the order of the points: mu and sigma differ by orders


class Mixture(NamedTuple):
    """K Gaussians, float64: weights [K] (sum 1), centres [K, 2], covariances [K, 3]."""

    weights: Tensor
    centres: Tensor
    covariances: Tensor


class Code(NamedTuple):
    """What a network of N weights is made of: shared Gaussians, and those of the outliers."""

    labels: Tensor          # [N] int16 or wider, the component of each weight; -1: an outlier
    outliers: Tensor        # [n_out], which weights
    outlier_mu: Tensor      # [n_out]
    outlier_sigma: Tensor   # [n_out]
    ellipse: Tensor         # [n_ell], the inliers outside the ellipse of their component
    ellipse_second: Tensor  # [n_ell], their next component
    ellipse_alpha: Tensor   # [n_ell], posterior of the first among these two
    centres: Tensor         # [K, 2], (mu, sigma)
    factors: Tensor         # [K, 3]


def monomials(z) -> Tensor:
    """(1, u, v, uu, uv, vv) [n, 6] of z = (u, v) [n, 2]."""
    u, v = z.unbind(1)
    return torch.stack([torch.ones_like(u), u, v, u * u, u * v, v * v], 1)


def bin_points(x, bins=1024, tail=1e-4, chunk=2**20) -> Cells:
    """Cells of points [N, 2]: a grid between the quantiles `tail` and 1 - tail of each axis, the
    points beyond in its edge cells. Streams: `chunk` points at a time."""
    few = x[::max(1, len(x) // 200_000)].double()
    shift, scale = x.mean(0, dtype=torch.float64), few.std(0)
    scale = torch.where(scale > 0, scale, 1.0)
    low, high = ((few - shift) / scale).quantile(few.new_tensor([tail, 1 - tail]), 0)
    step = (high - low).clamp_min(1e-12) / bins
    sums = x.new_zeros(6, bins * bins, dtype=torch.float64)
    index = x.new_empty(len(x), dtype=torch.int32)
    for start in range(0, len(x), chunk):
        z = (x[start:start + chunk].double() - shift) / scale
        u, v = ((z - low) / step).long().clamp_(0, bins - 1).unbind(1)
        index[start:start + chunk] = cell = u * bins + v
        for row, values in zip(sums, monomials(z).T.contiguous()):
            row += torch.bincount(cell, values, bins * bins)
    used = sums[0].nonzero().flatten()
    number = (sums[0] > 0).cumsum(0).int() - 1
    count = sums[0, used]
    return Cells(count, (sums[:, used] / count).T.contiguous(), number[index], shift, scale)


def nearest(x, centres, k, chunk=2**14) -> Tensor:
    """Numbers [n, k] of the k nearest centres of points [n, 2], the nearest first."""
    k = min(k, len(centres))
    if x.device.type == "cpu":
        found = cKDTree(centres.numpy()).query(x.numpy(), k, workers=-1)[1]
        return torch.from_numpy(found.reshape(len(x), k)).long()
    return torch.cat([torch.cdist(part, centres).topk(k, largest=False).indices
                      for part in x.split(chunk)])


def kmeans_plus_plus(cells, k, generator, sample=100_000) -> Tensor:
    """At most k starting centres [k, 2]: cells drawn with probability count x distance^2."""
    count, (u, v) = cells.count, cells.moments[:, 1:3].T.contiguous()
    if len(count) > sample:
        few = torch.multinomial(count.cpu(), sample, generator=generator).to(count.device)
        count, u, v = count[few], u[few], v[few]
    distance, chosen = torch.ones_like(u), []
    for draw in torch.rand(k, generator=generator, dtype=torch.float64).to(count.device):
        total = (count * distance).cumsum(0)
        chosen.append(torch.searchsorted(total, draw * total[-1]).clamp_max(len(u) - 1))
        own = (u - u[chosen[-1]]).square_().add_((v - v[chosen[-1]]).square_())
        distance = own if len(chosen) == 1 else torch.minimum(distance, own, out=distance)
    chosen = torch.stack(chosen)
    return torch.stack([u[chosen], v[chosen]], 1).unique(dim=0)


def select(mixture, keep) -> Mixture:
    """The components that `keep` [K] names; their weights sum to 1 again."""
    weights, centres, covariances = (t[keep] for t in mixture)
    return Mixture(weights / weights.sum(), centres, covariances)


def rescale(mixture, shift, scale) -> Mixture:
    """The mixture of scale * z + shift from that of z."""
    product = torch.stack([scale[0] ** 2, scale.prod(), scale[1] ** 2])
    return Mixture(mixture.weights, mixture.centres * scale + shift, mixture.covariances * product)


def natural_parameters(mixture) -> tuple[Tensor, Tensor]:
    """(theta [K, 6], peak [K]): log pi_k N(z; c_k, S_k) = theta_k . (1, u, v, uu, uv, vv) for
    z = (u, v), and what this is at z = c_k."""
    (a, b, d), (u, v) = mixture.covariances.unbind(1), mixture.centres.unbind(1)
    det = a * d - b * b
    p, q, r = d / det, -b / det, a / det  # the precision matrix
    peak = mixture.weights.log() - 0.5 * det.log() - math.log(2 * math.pi)
    y, z = p * u + q * v, q * u + r * v
    return torch.stack([peak - 0.5 * (u * y + v * z), y, z, -0.5 * p, -q, -0.5 * r], 1), peak


def log_joint(theta, features, candidates, chunk=2**11) -> Tensor:
    """theta_k . features_n [n, J] of n points for their `candidates` k [n, J]."""
    return torch.cat([torch.bmm(theta[k], f[:, :, None])[:, :, 0]  # chunks stay in the cache
                      for k, f in zip(candidates.split(chunk), features.split(chunk))])


def mixture_of(cells, neighbours, responsibility, k, reg) -> Mixture:
    """M-step: k components from responsibilities [C, J] for `neighbours` [C, J].

    Moments about zero are safe in float64: axes are standardised, and `reg`, which is added to both
    variances, is far above rounding.
    """
    flat, weighted = neighbours.flatten(), cells.moments * cells.count[:, None]
    mass, u, v, uu, uv, vv = (torch.bincount(flat, (responsibility * column[:, None]).flatten(), k)
                              for column in weighted.T)
    u, v, uu, uv, vv = (t / mass.clamp_min(1e-300) for t in (u, v, uu, uv, vv))
    covariances = torch.stack([uu - u * u + reg, uv - u * v, vv - v * v + reg], 1)
    return Mixture(mass / mass.sum(), torch.stack([u, v], 1), covariances)


def nearest_mixture(cells, centres, reg) -> Mixture:
    """The mixture [K] of k-means: each cell belongs to its nearest centre."""
    near = nearest(cells.moments[:, 1:3], centres, 1)
    return mixture_of(cells, near, torch.ones_like(near).double(), len(centres), reg)


def kmeans(cells, centres, iterations=15) -> Tensor:
    """Centres [K, 2] after Lloyd's iterations on the cells; those without a cell stay."""
    for _ in range(iterations):
        mass, moved, _ = nearest_mixture(cells, centres, 0.0)
        centres = torch.where(mass[:, None] > 0, moved, centres)
    return centres


def fit_mixture(cells, start, iterations=30, neighbours=16, reg=1e-6, tolerance=1e-5, refresh=5):
    """EM from `start` centres [K, 2]: (mixture, mean log-likelihoods by iteration, nats a point).

    A cell's points share their responsibilities; their scatter enters exactly. Sparse: each cell
    knows its `neighbours` nearest components, looked up every `refresh` iterations; exact if there
    are no more. Ends when the log-likelihood gains less than `tolerance`. With iterations = 0 the
    mixture is that of k-means: each cell belongs to its nearest centre.
    """
    mixture, history = nearest_mixture(cells, start, reg), []
    for i in range(iterations):
        if i % refresh == 0:
            mixture = select(mixture, mixture.weights > 0)
            near = nearest(cells.moments[:, 1:3], mixture.centres, neighbours)
        joint = log_joint(natural_parameters(mixture)[0], cells.moments, near)
        mixture = mixture_of(cells, near, joint.softmax(1), len(mixture.weights), reg)
        history.append(float(cells.count @ joint.logsumexp(1) / cells.count.sum()))
        if i % refresh and history[-1] - history[-2] < tolerance:
            break
    return select(mixture, mixture.weights > 0), history


def two_best(z, mixture, candidates):
    """(k, j, posterior of k among the two, squared Mahalanobis distance from k), all [n]: the two
    components of highest pi_k N(z; c_k, S_k) among `candidates` [n, J], z [n, 2]."""
    theta, peak = natural_parameters(mixture)
    joint = log_joint(theta, monomials(z), candidates)
    best, first = joint.max(1, keepdim=True)
    rest, second = joint.scatter(1, first, -math.inf).max(1, keepdim=True)
    label = candidates.gather(1, first)[:, 0]
    squared = (2 * (peak[label] - best[:, 0])).clamp_min(0)  # log N falls by d^2 / 2
    return label, candidates.gather(1, second)[:, 0], (best - rest).sigmoid()[:, 0], squared


def assign(x, cells, mixture, level=0.95, candidates=4, chunk=2**17):
    """Each of N points [N, 2] of `cells` to a component: (labels [N] int16; of the n points outside
    the ellipse of `level`: their numbers, next component, posterior of the first [n] each).

    The candidates are the best of the point's cell. Raises ValueError for more than 32767 of them.
    """
    if len(mixture.weights) > 32767:
        raise ValueError(f"{len(mixture.weights)} components do not fit in int16 labels")
    mixture = rescale(mixture, -cells.shift / cells.scale, 1 / cells.scale)
    near = nearest(cells.moments[:, 1:3], mixture.centres, 16)
    joint = log_joint(natural_parameters(mixture)[0], cells.moments, near)
    near = near.gather(1, joint.topk(min(candidates, near.shape[1])).indices)
    labels, rim = x.new_empty(len(x), dtype=torch.int16), []
    rim_begins = -2 * math.log1p(-level)  # chi-square, 2 degrees of freedom: 5.991464547 at 95 %
    for i in range(0, len(x), chunk):
        z = (x[i:i + chunk].double() - cells.shift) / cells.scale
        label, second, alpha, squared = two_best(z, mixture, near[cells.index[i:i + chunk]])
        labels[i:i + chunk] = label.short()
        rows = (squared > rim_begins).nonzero().flatten()
        rim.append((rows + i, second[rows], alpha[rows]))
    return labels, *(torch.cat(columns) for columns in zip(*rim))


def encode(points, inliers, cells, mixture, level=0.95) -> tuple[Code, Mixture]:
    """The code of all points [N, 2] whose `inliers` refer to the mixture and whose others are
    outliers, and the components that have members."""
    while True:
        label, rim, second, alpha = assign(points[inliers], cells, mixture, level)
        used = torch.bincount(label.int(), minlength=len(mixture.weights)) > 0
        if used.all():
            break
        mixture = select(mixture, used)
    labels = points.new_full((len(points),), -1, dtype=torch.int16)
    labels[inliers] = label
    outliers = (labels < 0).nonzero().flatten()
    return Code(labels, outliers, *points[outliers].T.contiguous(), inliers[rim], second.short(),
                alpha.float(), mixture.centres.float(), cholesky(mixture.covariances).float()), \
        mixture


def wasserstein(centres_a, covariances_a, centres_b, covariances_b) -> Tensor:
    """W2 [...] (not squared) between Gaussians in the plane, closed form, float64:

        W2^2 = |m_1 - m_2|^2 + tr S_1 + tr S_2 - 2 sqrt(tr(S_1 S_2) + 2 sqrt(det S_1 det S_2)).
    """
    a, b, d = covariances_a.double().unbind(-1)
    e, f, h = covariances_b.double().unbind(-1)
    dets = (a * d - b * b).clamp_min(0) * (e * h - f * f).clamp_min(0)
    cross = a * e + 2 * b * f + d * h + 2 * dets.sqrt()
    bures = ((a + d) + (e + h) - 2 * cross.clamp_min(0).sqrt()).clamp_min(0)
    return ((centres_a.double() - centres_b.double()).square().sum(-1) + bures).sqrt()


def nearest_components(mixture, gradient, rows, tau_g=math.inf, tau_v=math.inf, chunk=16):
    """(W2 from the nearest [n], its number [n]) of the components `rows` [n] among all K; infinite
    where gradients differ by tau_g or more, or variances tr S / 2 by tau_v."""
    _, centres, covariances = mixture
    variance, found = (covariances[:, 0] + covariances[:, 2]) / 2, []
    for own in rows[:, None].split(chunk):
        w2 = wasserstein(centres[own], covariances[own], centres, covariances)
        refused = ((gradient[own] - gradient).abs() >= tau_g) | \
            ((variance[own] - variance).abs() >= tau_v)
        found.append(w2.masked_fill_(refused, math.inf).scatter_(1, own, math.inf).min(1))
    return tuple(torch.cat(column) for column in zip(*found))


def merge_mixture(mixture, gradient, tau_d, tau_g=math.inf, tau_v=1e-3):
    """Merge the closest pair, again and again, while W2 < tau_d, |g_i - g_j| < tau_g and
    |tr S_i - tr S_j| / 2 < tau_v.

    gradient [K]: mean gradient magnitude of a component's members. Moments are matched: the
    mixture's weight, mean and covariance stay. All K^2 pairs are looked at, in O(K) of memory: a
    pair is known to the row of that one of the two which changed last.
    Returns (mixture, gradients [K'], the new number of each component [K], W2 of each merge, so
    that the largest so far says which tau_d it takes), on the CPU.
    """
    weight, centre, covariance = mixture = Mixture(*(t.cpu().double().clone() for t in mixture))
    gradient, number, heights = gradient.cpu().double().clone(), torch.arange(len(weight)), []
    w2, partner = nearest_components(mixture, gradient, number.clone(), tau_g, tau_v)
    while w2[i := int(w2.argmin())] < tau_d:
        heights.append(w2[i].item())
        i, j = sorted((i, int(partner[i])))
        p, q = torch.stack([weight[i], weight[j]]) / (weight[i] + weight[j])
        u, v = centre[i] - centre[j]
        covariance[i] = p * covariance[i] + q * covariance[j] \
            + p * q * torch.stack([u * u, u * v, v * v])
        centre[i] = p * centre[i] + q * centre[j]
        gradient[i] = p * gradient[i] + q * gradient[j]
        weight[i] += weight[j]
        number[number == j] = i
        centre[j] = w2[j] = math.inf  # out of everyone's reach
        partner[i], partner[j] = j, -1
        rows = ((partner == i) | (partner == j)).nonzero().flatten()
        w2[rows], partner[rows] = nearest_components(mixture, gradient, rows, tau_g, tau_v)
    kept, number = number.unique(return_inverse=True)
    return Mixture(*(t[kept] for t in mixture)), gradient[kept], number, heights


def share_weights(mu, sigma, gradient, generator, *, k0=0, min_cluster=20, tau_w=0.2,
                  fraction=0.01, kind="em", level=0.95, tau_d="auto", tau_g=math.inf, tau_v=1e-3):
    """The paper's second stage: (code before merging, code after it, numbers about both).

    mu, sigma, gradient [N]: each weight's posterior and the gradient of the loss. k0 components at
    first, 0: min(2048, N / 500); those of at most `min_cluster` weights dissolve into outliers.
    tau_d "auto": the 5 % quantile of the components' W2 from their nearest. The generator is a CPU
    one. Raises ValueError where outliers leave too little.
    """
    points, outlier = torch.stack([mu, sigma], 1), outlier_mask(mu, gradient, tau_w, fraction)
    inliers, k0 = (~outlier).nonzero().flatten(), k0 or min(2048, max(2, len(mu) // 500))
    if len(inliers) < max(2, k0):
        raise ValueError(f"only {len(inliers)} of {len(mu)} weights are inliers, for {k0} "
                         "components; raise tau_w, lower the share of outliers or k0")
    cells = bin_points(points[inliers])
    start = kmeans(cells, kmeans_plus_plus(cells, k0, generator))
    mixture, history = fit_mixture(cells, start, 30 if kind == "em" else 0)
    mixture = rescale(mixture, cells.shift, cells.scale)
    label = assign(points[inliers], cells, mixture)[0].int()
    large = torch.bincount(label, minlength=len(mixture.weights)) > min_cluster
    if not large.any():
        raise ValueError(f"no component has more than {min_cluster} members; lower that, or k0")
    inliers = inliers[large[label]]
    cells = cells._replace(index=cells.index[large[label]])
    clustered, mixture = encode(points, inliers, cells, select(mixture, large), level)
    members = clustered.labels[inliers].int()
    mean = mixture.weights.new_zeros(len(mixture.weights)).index_add_(
        0, members, gradient[inliers].double()) / torch.bincount(members)
    if tau_d == "auto":  # a little more: the quantile can be a pair's own distance
        every = torch.arange(len(mean), device=mean.device)
        w2 = nearest_components(mixture, mean, every)[0]
        tau_d = w2.quantile(0.05).item() * (1 + 1e-6)
    mixture = merge_mixture(mixture, mean, tau_d, tau_g, tau_v)[0]
    mixture = Mixture(*(t.to(mu.device) for t in mixture))
    merged, mixture = encode(points, inliers, cells, mixture, level)
    return clustered, merged, {"k0": k0, "tau_d": tau_d, "em_log_likelihood": history}


def check_code(code, n):
    """Raise ValueError unless `code` is one of n weights: whole, and its numbers in range."""
    k, rim, own = len(code.centres), len(code.ellipse), len(code.outliers)
    sizes = [(n,), (own,), (own,), (own,), (rim,), (rim,), (rim,), (k, 2), (k, 3)]
    within = lambda index, low, high: bool(((index >= low) & (index < high)).all())
    if [t.shape for t in code] != sizes or not within(code.labels, -1, k) \
            or not torch.equal((code.labels < 0).nonzero()[:, 0], code.outliers.long()) \
            or not within(code.ellipse, 0, n) or not within(code.ellipse_second, 0, k):
        raise ValueError(f"not a code of {n} weights: sizes or numbers do not fit")


def cholesky(covariances) -> Tensor:
    """(L_00, L_10, L_11) [K, 3] with S = L L^T, of (S_00, S_01, S_11); float64 inside."""
    a, b, d = covariances.double().unbind(1)
    l00 = a.clamp_min(1e-30).sqrt()
    l10 = b / l00
    return torch.stack([l00, l10, (d - l10.square()).clamp_min(1e-30).sqrt()], 1)


def covariances_of(factors) -> Tensor:
    """(S_00, S_01, S_11) [K, 3] of S = L L^T."""
    l00, l10, l11 = factors.unbind(1)
    return torch.stack([l00 * l00, l00 * l10, l10 * l10 + l11 * l11], 1)


def move(code, shift, shape, outlier_shift, outlier_scale) -> Code:
    """The code with its Gaussians moved in their own units: c + L shift and L M, with M of `shape`
    [K, 3] = (log M_00, M_10, log M_11); outliers' mu + sigma shift and sigma e^scale."""
    l00, l10, l11 = code.factors.unbind(1)
    m00, m10, m11 = shape[:, 0].exp(), shape[:, 1], shape[:, 2].exp()
    offset = torch.stack([l00 * shift[:, 0], l10 * shift[:, 0] + l11 * shift[:, 1]], 1)
    return code._replace(
        centres=code.centres + offset,
        factors=torch.stack([l00 * m00, l10 * m00 + l11 * m10, l11 * m11], 1),
        outlier_mu=code.outlier_mu + code.outlier_sigma * outlier_shift,
        outlier_sigma=code.outlier_sigma * outlier_scale.exp())


def moved_kl(shift, shape, outlier_shift, outlier_scale) -> Tensor:
    """KL of what `move` moved from where it was, each shared Gaussian counted once, nats:

        sum_k 1/2 [tr M M^T + |shift|^2 - 2 - ln det M M^T], for outliers sum KL(N || N(0, 1)),

    which is sum_k KL(N(c_k, S_k) || N(c_k0, S_k0)) and so on: units do not matter to it."""
    shift = torch.cat([shift.flatten(), outlier_shift])
    scale = torch.cat([shape[:, ::2].flatten(), outlier_scale])
    return (0.5 * ((2 * scale).exp() + shift.square() - 1) - scale).sum() \
        + 0.5 * shape[:, 1].square().sum()


def draw_weights(code, draw="hier", blend="linear") -> Tensor:
    """Weights [N]: w_i = m_k + s_k eps_i, (m_k, s_k) ~ N(c_k, S_k); differentiable in c and S.

    One (m_k, s_k) for all members of a component. draw "shared" (published): w_i = m_k;
    "perweight": w_i ~ N(c_k[0], c_k[1]^2). An ellipse point blends those of two components, by
    alpha ("linear"), by chance ("choose") or of their centres ("mean", published); an outlier has
    its own Gaussian.
    """
    centres, (l00, l10, l11) = code.centres, code.factors.unbind(1)
    noise = torch.randn_like(centres) * (draw != "perweight")
    m = centres[:, 0] + l00 * noise[:, 0]
    s = centres[:, 1] + l10 * noise[:, 0] + l11 * noise[:, 1]
    eps = torch.randn(len(code.labels), device=m.device, dtype=m.dtype) * (draw != "shared")
    index = code.labels.clamp_min(0).int()
    weights = m.index_select(0, index) + s.index_select(0, index) * eps
    if len(code.ellipse):
        rows, alpha = code.ellipse, code.ellipse_alpha
        if blend == "mean":
            m, s = centres[:, 0], 0 * s
        if blend == "choose":
            alpha = (torch.rand_like(alpha) < alpha).to(alpha)
        one, two = (m.index_select(0, k) + s.index_select(0, k) * eps[rows]
                    for k in (index[rows], code.ellipse_second.int()))
        weights = weights.index_copy(0, rows, alpha * one + (1 - alpha) * two)
    own = code.outlier_mu + code.outlier_sigma * torch.randn_like(code.outlier_mu)
    return weights.index_copy(0, code.outliers, own)


def mean_weights(code) -> Tensor:
    """The mean [N] of `draw_weights`: a draw without any spread."""
    centres = code.centres * code.centres.new_tensor([1.0, 0.0])
    return draw_weights(code._replace(centres=centres, factors=0 * code.factors,
                                      outlier_sigma=0 * code.outlier_sigma))


def storage(code, rest) -> dict:
    """Counts, and bytes by part, of a network of this code and `rest` bytes that are not shared:
    labels of 2 bytes, outliers of 4 + 8, Gaussians of 5 floats, ellipse points of 4 + 2 + 4."""
    n, outliers, ellipses, k = map(len, (code.labels, code.outliers, code.ellipse, code.centres))
    parts = {"labels": 2 * n, "outliers": 12 * outliers, "gaussians": 20 * k,
             "ellipses": 10 * ellipses, "rest": rest}
    total = sum(parts.values())
    return {"weights": n, "inliers": n - outliers, "outliers": outliers, "ellipses": ellipses,
            "gaussians": k, "trainable": 2 * outliers + 5 * k,
            **{f"bytes_{name}": value for name, value in parts.items()}, "bytes": total,
            "of_mean_field": total / (8 * n + rest), "of_deterministic": total / (4 * n + rest)}


# ---- Training -----------------------------------------------------------------------------------


def make_loader(dataset, args, batch_size=None, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`."""
    crop = "crop_flip" if isinstance(dataset, data.StreamedSet) else "reflect_crop_flip"
    return data.Loader(dataset, batch_size or args.batch_size, args.device, seed=args.seed,
                       shuffle=train, augment=crop if train and args.augment else "none",
                       workers=args.workers, channels_last=True)


def outputs(module, batch, args, *drawn):
    """(logits, at least float32, this process's part of the batch's mean cross entropy)."""
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
        logits = module(batch.images, *drawn)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    labels = batch.labels.clamp(0, logits.shape[1] - 1)  # of other sets: any
    return logits, F.cross_entropy(logits, labels, reduction="sum") / batch.global_size


def learning_rate(done, warm_up=0.0) -> float:
    """Share of the full rate after the share `done` of a stage: linear, then half a cosine."""
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def make_optimiser(module, stage, args):
    """The optimiser of a stage; each group keeps its full rate as "full"."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if stage == "det":  # published: Nesterov momentum, decay of everything
        return torch.optim.SGD([{"params": [p for _, p in named], "full": args.lr}], lr=args.lr,
                               momentum=0.9, nesterov=True, weight_decay=args.weight_decay)
    full = {"mu": args.lr_mu, "rho": args.lr_rho}
    return torch.optim.Adam([{"params": [p], "full": args.lr_mu if name.startswith("net.") else
                              full.get(name, args.lr_final)} for name, p in named])


def train(module, stage, epochs, kl_weight, train_set, run, args):
    """Minimise mean cross entropy + kl_weight KL / n_train; goes on after the last whole epoch."""
    optimiser = make_optimiser(module, stage, args)
    loader = make_loader(train_set, args, train=True)
    steps = min(len(loader), args.limit_steps or len(loader))
    model = common.data_parallel(module, args.device)
    for epoch in run.epochs(epochs, f"seed{args.seed}-{stage}", net=module, optimiser=optimiser):
        model.train()
        for part in model.modules() if stage != "det" else ():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()  # a batch's own statistics would hide how draws shift activations
        totals = torch.zeros(4, device=args.device)
        for step, batch in run.steps(loader, epoch):
            common.seed_all(args.seed, STAGES.index(stage), epoch, step)  # one draw for all
            share = learning_rate((epoch + (step + 0.5) / steps) / epochs, args.warm_up)
            for group in optimiser.param_groups:
                group["lr"] = group["full"] * share
            logits, loss = outputs(model, batch, args)
            kl = loss.new_zeros(()) if stage == "det" else module.kl() / len(train_set)
            optimiser.zero_grad()
            # DDP divides by the number of processes: the KL is in each one's loss
            (loss * common.world_size() + kl_weight * kl).backward()
            optimiser.step()
            totals += torch.stack([loss.detach(), kl.detach() / common.world_size(), (
                logits.argmax(1) == batch.labels).sum(), loss.new_full((), len(logits))])
        loss, kl, right, n = common.all_reduce(totals)
        run.log(loss / steps, kl_nats=kl / steps, accuracy=right / n, examples=n,
                lr=max(group["lr"] for group in optimiser.param_groups))


def gradient_magnitude(field, train_set, args) -> Tensor:
    """Mean over an epoch's batches of |d mean cross entropy / d mu| [N], in a fixed order."""
    total, loader = torch.zeros_like(field.mu), make_loader(train_set, args)
    steps = min(len(loader), args.limit_steps or len(loader))
    field.eval()
    for step, batch in zip(range(steps), loader.epoch()):
        common.seed_all(args.seed, STAGES.index("gmm"), step)
        gradient, = torch.autograd.grad(outputs(field, batch, args)[1], field.mu)
        total += common.all_reduce(gradient).abs()
    return total / steps


def make_codes(field, train_set, run, args) -> dict:
    """Stage gmm, by the main process, for all: {"clustered": code, "merged": code, "numbers"}, a
    code as a dict on the CPU."""
    if state := run.load(f"seed{args.seed}-gmm"):
        return state
    if args.eval:
        raise UserError(f"{run.dir} has no stage gmm; first finish it (without --eval)")
    gradient = gradient_magnitude(field, train_set, args)
    with run.clock("gmm"):
        if common.is_main():
            place = "cpu" if args.device.type == "mps" else args.device  # which has no float64
            points = (t.detach().to(place) for t in (field.mu, field.sigma, gradient))
            generator = torch.Generator().manual_seed(common.derive_seed(args.seed, 5))
            try:
                *codes, numbers = share_weights(
                    *points, generator, k0=args.k0, min_cluster=args.min_cluster, tau_w=args.tau_w,
                    fraction=args.grad_frac, kind=args.gmm, level=args.chi2_level,
                    tau_d=args.tau_d, tau_g=args.tau_g, tau_v=args.tau_v)
            except ValueError as error:
                raise UserError(f"{error} (--tau-w, --grad-frac, --k0, --min-cluster)") from None
            clustered, merged = ({k: t.cpu() for k, t in code._asdict().items()} for code in codes)
            state = {"clustered": clustered, "merged": merged, "numbers": numbers}
        state = common.broadcast(state)
    run.save(f"seed{args.seed}-gmm", **state)
    return state


# ---- Evaluation ---------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What the weight draws say about N examples, float64, on the CPU."""

    log_probs: Tensor   # [N, K], of the mean of probabilities
    logits: Tensor      # [N, K], mean of logits
    votes: Tensor       # [N, K], share of draws
    aleatoric: Tensor   # [N], mean entropy of a draw, nats
    sample_nll: Tensor  # [N], mean NLL of a draw, nats


@torch.no_grad()
def predict(module, dataset, args):
    """A `Prediction` of the main process, None of others: one draw at a time for the whole set."""
    module.eval()
    several = isinstance(module, Stochastic)
    loader = make_loader(dataset, args, max(512, args.batch_size))
    for sample in range(samples := args.mc if several else 1):
        common.seed_all(args.seed, 1000 + sample)
        drawn, rows = (module.draw(),) if several else (), []
        for batch in loader.epoch():
            rows.append((batch.index, batch.labels, outputs(module, batch, args, *drawn)[0]))
        index, labels, logits = (torch.cat(column).cpu() for column in zip(*rows))
        logits, k = logits.double(), logits.shape[1]
        log_probs = logits.log_softmax(1)
        new = [logits, F.one_hot(logits.argmax(1), k), -(log_probs.exp() * log_probs).sum(1),
               -log_probs.gather(1, labels.clamp(0, k - 1)[:, None])[:, 0]]
        mean = torch.logaddexp(mean, log_probs) if sample else log_probs
        sums = [a + b for a, b in zip(sums, new)] if sample else new
    columns = common.gather_rows(index, mean - math.log(samples), *(t / samples for t in sums))
    return columns and Prediction(*columns)


def predictive_metrics(p, labels, bins=15) -> dict:
    """Metrics by the mean of probabilities (default), of logits (published) and by votes."""
    values = {}
    for suffix, log_probs in (("", p.log_probs), ("_logits", p.logits.log_softmax(1))):
        probs = log_probs.exp()
        values |= {f"accuracy{suffix}": common.accuracy(probs, labels),
                   f"nll{suffix}": common.nll(log_probs, labels),
                   f"brier{suffix}": common.brier(probs, labels),
                   **{f"ece{b}{suffix}": common.ece(probs, labels, b) for b in (15, bins)}}
    return {**values, "accuracy_votes": common.accuracy(p.votes, labels),
            "nll_samples": p.sample_nll.mean().item()}


def uncertainties(p) -> dict:
    """Scores [N], large where uncertain: entropy of the mean, 1 - its largest probability, mutual
    information of prediction and weights (0 for a single draw)."""
    total = common.entropy(p.log_probs.exp())
    return {"entropy": total, "max_prob": -p.log_probs.max(1).values.expm1(),
            "mutual_information": (total - p.aleatoric).clamp_min(0)}


def evaluate(method, module, sets, args) -> tuple:
    """(rows of one stage's network, its prediction of the test set), of the main process."""
    test = predict(module, sets["test"], args)
    outside = {name: predict(module, dataset, args) for name, dataset in sets["ood"].items()}
    if not common.is_main():
        return [], None
    row = {"method": method, "seed": args.seed, "set": sets["test"].name}
    rows = [{**row, "n": len(test.logits),
             **predictive_metrics(test, sets["test"].labels, args.ece_bins)}]
    several, inside = isinstance(module, Stochastic) and args.mc > 1, uncertainties(test)
    for name, prediction in outside.items():
        scores = uncertainties(prediction)
        rows.append({**row, "against": name, "n": len(prediction.logits), **{
            f"{metric}_{score}": value for score in [*inside][:3 if several else 2]
            for metric, value in common.ood_metrics(inside[score], scores[score],
                                                    larger_means="ood").items()}})
    return rows, test


@torch.no_grad()
def sigma_report(field, args) -> dict:
    """Sigma over the prior's: the 5 %, 50 % and 95 % quantiles by layer, printed; and a warning
    where little but the prior is left."""
    ratios = field.layout.split((field.sigma / field.prior_sd).cpu().double())
    found = {name: np.quantile(t, [0.05, 0.5, 0.95]).tolist() for name, t in ratios.items()}
    common.say("sigma over the prior's, 5 %, 50 % and 95 % of a layer's weights:")
    for name, quantiles in found.items():
        common.say(f"  {name:30s}" + "".join(f"{q:8.3f}" for q in quantiles))
    if collapsed := sum(median > 0.9 for _, median, _ in found.values()):
        common.say(f"warning: the median is above 0.9 in {collapsed} of {len(found)} layers, which "
                   f"collapsed onto the prior; lower --stoch-kl ({args.stoch_kl:g})")
    return found


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#66CCEE"]


def plot_plane(plt, path, points, codes):
    """The (mu, sigma) plane: 95 % ellipses, outliers, ellipse points, before and after merging."""
    from matplotlib.collections import EllipseCollection
    figure, axes = plt.subplots(1, len(codes), figsize=(6.5 * len(codes), 4.6), sharex=True,
                                sharey=True, constrained_layout=True)
    few = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:50_000]
    for axis, (name, code) in zip(axes, codes.items()):
        inlier, rim = code.labels[few] >= 0, torch.isin(few, code.ellipse)
        for rows, colour, label in ((few[inlier], COLOURS[3], "inliers"),
                                    (few[~inlier], COLOURS[1], "outliers"),
                                    (few[rim], COLOURS[2], "ellipse points")):
            axis.plot(*points[rows].T, ".", ms=1.2, color=colour, label=label, rasterized=True)
        covariances = covariances_of(code.factors.double())[:, [0, 1, 1, 2]].view(-1, 2, 2)
        values, vectors = np.linalg.eigh(covariances.numpy())
        heights, widths = 2 * np.sqrt(values.clip(0) * -2 * math.log(0.05)).T  # they hold 95 %
        angles = np.degrees(np.arctan2(vectors[:, 1, 1], vectors[:, 0, 1]))
        axis.add_collection(EllipseCollection(
            widths, heights, angles, units="xy", offsets=code.centres, facecolors="none",
            transOffset=axis.transData, edgecolors=COLOURS[0], lw=0.6))
        axis.set(title=f"{name}: {len(code.centres)} components", xlabel="mu")
    low, high = np.quantile(points, [0.001, 0.999], axis=0)
    (left, bottom), (right, top) = low - 0.1 * (high - low), high + 0.1 * (high - low)
    axes[0].set(ylabel="sigma", xlim=(left, right), ylim=(bottom, top))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  markerscale=6, frameon=False)
    common.save_figure(plt, figure, path)


def plot_weights(plt, path, mu, drawn, code, prediction, labels, args):
    """Weights before and after sharing, components by merge threshold, reliability."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    axes[0].hist([mu, drawn], 80, range=np.quantile(mu, [0.001, 0.999]), histtype="step",
                 color=COLOURS[:2], label=["mean-field means", "a draw, shared"])
    axes[0].set(xlabel="weight", ylabel="weights", yscale="log")
    axes[0].legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    members = torch.bincount(code.labels.int() + 1)[1:].double()
    mixture = Mixture(members / members.sum(), code.centres, covariances_of(code.factors.double()))
    *_, heights = merge_mixture(mixture, 0 * members, math.inf, args.tau_g, args.tau_v)
    axes[1].step(np.maximum.accumulate(heights), len(members) - 1 - np.arange(len(heights)),
                 where="post", color=COLOURS[0])
    axes[1].set(xlabel="merge threshold tau_d (W2)", ylabel="components K", xscale="log")
    probs = prediction.log_probs.exp()
    confidence, predicted = probs.max(1)
    accuracy = common.reliability(confidence, predicted == labels).accuracy
    axes[2].bar(np.arange(15) / 15, accuracy, 1 / 15, align="edge", color=COLOURS[0], ec="white")
    axes[2].plot([0, 1], [0, 1], "k--", lw=1)
    axes[2].set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1),
                title=f"ECE {100 * common.ece(probs, labels):.2f} %")
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------

FORMAT = "unsure-gbnn2d-2"


def export(path, shared, args, train_set) -> dict:
    """Write the compressed network, its code as it is now and what is not shared; its `storage`."""
    narrow = {"outliers": torch.int32, "ellipse": torch.int32, "labels": torch.int16,
              "ellipse_second": torch.int16}
    code = {name: value.detach().to(narrow.get(name, torch.float32)).cpu()
            for name, value in shared.code()._asdict().items()}
    rest = {name: value.cpu() for name, value in shared.net.state_dict().items()
            if name not in shared.layout.shapes}
    config = {key: getattr(args, key) for key in ("dataset", "model", "width", "depth",
                                                  "keep_layers", "draw", "blend")}
    config["transform_input"] = getattr(shared.net, "transform_input", None)  # GoogLeNet's
    content = common.to_bytes({
        "format": FORMAT, "config": config, "num_classes": train_set.num_classes,
        "shape": list(train_set.shape), "code": code, "rest": rest})
    common.write(path, content)
    rest_bytes = sum(value.numel() * value.element_size() for value in rest.values())
    return {**storage(Code(**code), rest_bytes), "bytes_file": len(content)}


def load_shared(args, train_set):
    """The network of the file --load, whose options replace those of `args`. Raises UserError, of
    one line, for other files, and where a part is missing or does not fit."""
    state = common.load_checkpoint(args.load)
    if state.get("format") != FORMAT:
        raise UserError(f"{args.load} is no {FORMAT} file; write one with --export")
    try:
        num_classes, shape = fits = state["num_classes"], tuple(state["shape"])
        dataset = state["config"].pop("dataset")
        if data.set_name(dataset) != data.set_name(args.dataset):
            raise UserError(f"it is a network of another data set: add --dataset {dataset}")
        if fits != (train_set.num_classes, train_set.shape):
            raise UserError(f"it is for {num_classes} classes of images {shape}, which "
                            f"{args.dataset} has not")
        vars(args).update(state["config"], weights=None)  # results.json shall name them
        net, code = make_network(args, num_classes, shape), Code(**state["code"])
        net.transform_input, layout = args.transform_input, Layout(net, args.keep_layers)
        check_code(code, layout.size)
        net.load_state_dict({**state["rest"], **layout.split(torch.zeros(layout.size))})
        return Shared(net, layout, code, args).to(args.device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = str(error) if isinstance(error, UserError) else "a part is missing or does not fit " \
            f"({common.one_line(error)}); export it again"
        raise UserError(f"--load {args.load}: {why}") from None


def start_network(train_set, args) -> tuple:
    """The network as initialised, or pretrained, and its layout."""
    common.seed_all(args.seed)
    net = make_network(args, train_set.num_classes, train_set.shape)
    layout = Layout(net, args.keep_layers)
    if 2 * args.k0 > layout.size:
        raise UserError(f"--k0 {args.k0}: the network has only {layout.size} weights to share")
    return net, layout


def run_seed(sets, run, args) -> tuple:
    """All stages up to --stage of one seed: (rows, numbers by layer, the last network)."""
    train_set, stop = sets["train"], args.stage
    net, layout = start_network(train_set, args)
    tables = [name for name, value in net.named_parameters()
              if value.ndim > 1 and name not in layout.shapes]
    common.say(f"{len(layout.sizes)} layers with {layout.size:,} weights are shared; kept whole: "
               f"{', '.join(['biases, norms', *tables])}")
    if not args.model.startswith("torchvision/"):
        train(net, "det", args.epochs, 0.0, train_set, run, args)
    rows, _ = evaluate("deterministic", net, sets, args)
    if stop == "det":
        return rows, {}, net
    field = MeanField(net, layout, args).to(args.device)
    train(field, "stoch", args.stoch_epochs, args.stoch_kl, train_set, run, args)
    numbers = {"sigma_over_prior": sigma_report(field, args)}
    rows += evaluate("mean-field", field, sets, args)[0]
    if stop == "stoch":
        return rows, numbers, field
    state = make_codes(field, train_set, run, args)
    codes = {name: Code(**state[name]) for name in ("clustered", "merged")}
    for name, code in codes.items():
        shared = Shared(net, layout, code, args).to(args.device)
        more, prediction = evaluate(name, shared, sets, args)
        rows += more
    if stop != "gmm":
        train(shared, "final", args.final_epochs, args.beta, train_set, run, args)
        more, prediction = evaluate("final", shared, sets, args)
        rows += more
    if common.is_main():
        error = (field.mu - mean_weights(shared.code())).detach().square()
        numbers |= {**state["numbers"], "quantisation_rms": {
            name: part.mean().sqrt().item() for name, part in layout.split(error).items()}}
        outliers = layout.split((shared.labels < 0).float())
        numbers["outlier_share"] = {name: part.mean().item() for name, part in outliers.items()}
        for path in filter(None, (run.dir / f"seed{args.seed}-compressed.pt", args.export)):
            more[0].update(export(path, shared, args, train_set))
        if args.plot and (plt := common.pyplot()):
            points = torch.stack([field.mu, field.sigma], 1).detach().cpu()
            drawn = shared.draw().detach().cpu().numpy()
            plot_plane(plt, run.dir / "plane.png", points, codes)
            plot_weights(plt, run.dir / "weights.png", points[:, 0].numpy(), drawn,
                         codes["clustered"], prediction, sets["test"].labels, args)
    return rows, numbers, shared


def main(argv=None) -> list:
    args, rows, numbers = parse_args(argv), [], {}
    options = dict(data_dir=args.data_dir, seed=args.seed, image_size=args.image_size)
    train_set = data.load(args.dataset, "train", val_fraction=0.0, **options)
    test = data.match(data.load(args.dataset, "test", **options), train_set)
    sets = {"train": train_set, "test": test, "ood": data.ood_sets(args, train_set),
            "predict": data.predict_set(args, train_set) if args.predict else None}
    data.check_shares(train_set, test, sets["predict"], *sets["ood"].values())
    if args.export and common.is_main():
        common.check_writable(args.export)
    if args.load:
        module, name = load_shared(args, train_set), f"loaded-{Path(args.load).stem}"
    else:  # refuse what cannot work before the run's directory has its options
        start_network(train_set, args)
        depth = f"-{args.depth}" * (args.model == "wide_resnet")
        name = f"{data.set_name(args.dataset)}-{args.model}{depth}-w{args.width:g}-seed{args.seed}"
    run = common.Run(args, "gbnn2d", name)
    if args.load:
        rows, _ = evaluate("loaded", module, sets, args)
    for seed in range(args.seed, args.seed + args.runs) if not args.load else ():
        first = seed == args.seed  # the pictures and predictions are the first run's
        own = common.with_options(args, seed=seed, plot=args.plot and first)
        more, numbers[seed], network = run_seed(sets, run, own)
        module, rows = network if first else module, rows + more
    if args.predict and (p := predict(module, sets["predict"], args)):
        common.write_predictions(run.dir / "predictions.csv", sets["predict"], p.log_probs,
                                 aleatoric=p.aleatoric,
                                 epistemic=uncertainties(p)["mutual_information"])
    return run.report(rows, [
        "accuracy", "nll", "ece15", "brier", "nll_logits", "auroc_entropy",
        "auroc_mutual_information", "gaussians", "outliers", "bytes", "of_mean_field"],
        numbers=numbers)


if __name__ == "__main__":
    common.launch(main)
