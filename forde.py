"""First-order repulsive deep ensembles (FoRDE): members that repel in input-gradient space.

Trinh, Heinonen, Acerbi, Kaski, "Input-gradient space particle inference for neural network
ensembles", ICLR 2024, arXiv:2306.02775. Method (Algorithm 1, with the corrections listed below):

  1. All M members see the same batch. g_ib is the gradient of the true class's logit of member i
     with respect to input b, in training mode (batch norm's cross-sample terms included).
  2. s_ib = g_ib / |g_ib|, rotated by the eigenvectors U of the training images and scaled by the
     square roots of their eigenvalues: distances are (u - u')^T U Lambda U^T (u - u').
  3. k_ijb = exp(-|s_ib - s_jb|^2 / h_jb), h_jb = med_i |s_ib - s_jb|^2 / ln M: no gradient through
     s_jb and h_jb.
  4. Minimise sum_i CE_i + R, R = (1/B) sum_i log[(1/B) sum_b sum_j k_ijb]: Wasserstein gradient
     descent on the posterior. Predict with the mean of the members' probabilities.

Usage:
  python forde.py                                          # glyphs, three methods, two cores
  torchrun --nproc_per_node 8 forde.py --dataset cifar100  # the paper's row: 10 members, 300 epochs
  python forde.py --eval                                   # the table again, from the checkpoints
  torchrun --nnodes 2 --nproc_per_node 8 --node_rank R --master_addr HOST --master_port 29500 \
      forde.py --dataset cifar100                          # two machines, R = 0 and 1

Expected:
  glyphs, mean +- standard error of n = 10 seeds (1-5, on whose first the setting was chosen, and
    6-10 to confirm), 40-50 s a seed with one thread on two CPU cores; the differences are paired:
    NLL under corruption 0.637 +- 0.008 nats (deep ensemble), FoRDE-PCA 0.026 +- 0.003 and
    FoRDE-identity 0.029 +- 0.002 lower (seeds 6-10 alone: 0.020 +- 0.003, 0.029 +- 0.003); its ECE
    5.3 +- 0.2 %, 1.3 +- 0.1 and 0.7 +- 0.1 lower. AUROC of letters by epistemic entropy 0.817 +-
    0.004, 0.016 +- 0.002 and 0.012 +- 0.002 higher. Accuracy 95.95 +- 0.18, 96.08, 96.10 %.
  cifar10, 5,000 images, four small ResNet-9, ten epochs (options in the README), n = 2, NLL under
    corruption: deep ensemble 1.680 +- 0.022, FoRDE-PCA 0.004 +- 0.033 higher: does not show.
  cifar100: not measured. The paper has, for ten members: NLL 0.70, 0.71, 0.70 nats, accuracy 81.8,
    81.4, 82.1 %, accuracy under corruption 54.3, 56.1, 54.1 %.

Differs from the published code (github.com/AaltoPML/FoRDE, commit e8f9d74; JAX and Haiku):
  - It also does what the code leaves out: tuned lengthscales, the repulsions the paper compares,
    one member (ln 1 = 0 makes it NaN there), resuming, missing corruption sets, any device count.
  - A gradient row of (nearly) zero length is a constant: there its Jacobian is about 1e10.
  - The paper's Algorithm 1 has twice the exponent and one bandwidth for all pairs of a sample; the
    code, whose results were published, has the form above. So do we.
  - The basis is that of the second moments of the images trained on, centred by channel and not by
    pixel, as published; there it takes images held out for validation too (none by default).
  - Validation images are drawn at random by the seed; --published-split takes as many of each
    class, by scikit-learn's seed 88.
  - Corruption metrics pool all kinds of a severity, as published; those of each kind are extra.
  - TinyImageNet is scaled to [0, 1] (there 0 to 255, with the statistics of that scale).
  - Nesterov momentum has no flag (the published one is ignored); no warm-up (off there).
  - Feature repulsion projects on the largest directions of the likelihood gradients, by a singular
    value decomposition (its published code: on the smallest eigenvectors of their Gram matrix, and
    with squared distances squared again in the bandwidth).
  - nll_miss is None where the ensemble makes no error (there NaN).
"""

import argparse
import dataclasses
import hashlib
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Arguments ----------------------------------------------------------------------------------

# name: what repels, and for FoRDE the alpha of its metric (None: --alpha)
METHODS = {"deep_ensemble": ("none", 0), "forde_pca": ("input_gradient", 1),
           "forde_identity": ("input_gradient", 0), "forde_tuned": ("input_gradient", None),
           "weight_rde": ("weight", 0), "function_rde": ("function", 0),
           "feature_rde": ("feature", 0), "lit": ("lit", 0)}
TOYS = ("toy_regression", "toy_classification")
PRESETS = {
    # paper: 10 members, batch 128, SGD with Nesterov momentum 0.9, decay 5e-4 on everything,
    # learning rate 0.1, from the middle to 90 % of the epochs linearly to 0.001
    "": dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
             lr=0.1, lr_ratio=0.01, weight_decay=5e-4, schedule="published", alpha=0.4,
             width=1.0, limit_train=None, hidden=[256, 256, 256], norm=True, augment=True,
             shift="published", ood=[], shift_examples=0),
    "cifar10": dict(alpha=0.2, ood=["svhn", "cifar100"]),
    "cifar100": dict(ood=["svhn", "cifar10"]),
    # published command: ends at 0.0001; the paper's text says 0.001 (--lr-ratio 0.01)
    "tiny_imagenet": dict(model="preact_resnet18", epochs=150, lr_ratio=0.001, ood=["svhn"]),
    "mnist": dict(ood=["fashion_mnist"], shift="computed", augment=False),
    "fashion_mnist": dict(ood=["mnist"], shift="computed", augment=False),
    # paper: features of a frozen ViT, three hidden layers with batch norm
    "features": dict(model="mlp", batch_size=256, lr=0.2, epochs=100, shift="none", augment=False),
    **dict.fromkeys(("glyphs", "dirty_glyphs"), dict(
        methods=["deep_ensemble", "forde_pca", "forde_identity"], members=8, model="mlp",
        hidden=[128, 128], limit_train=1000, epochs=16, batch_size=32, schedule="one_cycle",
        shift="computed", ood=["glyphs_letters"], shift_examples=200, augment=False)),
    "numbers": dict(members=4, model="resnet9", width=0.25, epochs=8, schedule="one_cycle",
                    shift="none", ood=["glyphs_letters"], augment=False),
    **{toy: dict(methods=["deep_ensemble", "forde_identity"], members=16, model="mlp",
                 hidden=[64, 64], norm=False, weight_decay=0.0, schedule="one_cycle",
                 shift="none", augment=False, **own)
       for toy, own in zip(TOYS, (dict(epochs=60, batch_size=60, lr=2e-4),
                                  dict(epochs=20, batch_size=200, lr=0.02)))},
}


def parse_args(argv=None):
    parser = common.Parser(__doc__, PRESETS, "glyphs")
    flag = argparse.BooleanOptionalAction
    add = parser.group("data")
    add("--features", nargs=2, metavar=("TRAIN", "TEST"), help="of --dataset features: .npz files "
        "with 'features' [N, D] and 'labels' [N]; --ood then takes such files too")
    add("--augment", action=flag, help="random crop and flip (paper: on)")
    add("--val-fraction", type=between(0, 0.9), default=0.0, help="for a temperature and "
        "--eval-every (published: 0)")
    add("--published-split", action=flag, default=False, help="of validation: as many of each "
        "class, by the published seed, instead of at random by --seed")
    add("--limit-train", type=at_least(1), metavar="N", help="train on N images, evenly spaced")
    add = parser.group("network")
    add("--members", "-m", type=at_least(1), help="ensemble members M (paper: 10)")
    add("--model", choices=[*RESNETS, "mlp"], help="paper: resnet18; TinyImageNet: preact_resnet18")
    add("--hidden", type=at_least(1), nargs="+", metavar="N", help="widths of mlp (paper: three)")
    add("--norm", action=flag, help="batch norm in mlp")
    add = parser.group("training")
    add("--momentum", type=between(0, 0.999), default=0.9, help="Nesterov's (paper: 0.9)")
    add("--weight-decay", type=at_least(0, float), help="on ALL parameters (paper: 5e-4)")
    add("--label-smoothing", type=between(0, 0.999), default=0.0, help="of CE alone (paper: 0)")
    add("--schedule", choices=["published", "one_cycle"], help="published: constant, linear from "
        "50 to 90 %% of the epochs, constant; one_cycle: better in few epochs")
    add("--lr-ratio", type=between(0, 1), help="final over initial learning rate (0.01)")
    add("--prior", choices=["isotropic", "empcov"], default="isotropic", help="on the first "
        "layer: weight decay, or N(0, aC + eI) with the covariance C of what it sees")
    add = parser.group("method")
    add("--alpha", type=between(0, 1), help="of forde_tuned: 0 identity, 1 PCA (paper: 0.4 "
        "on CIFAR-100, 0.2 on CIFAR-10, chosen from 0, .1, .2, .4, .8, 1)")
    add("--grad-of", choices=["logit", "logprob"], default="logit",
        help="f_y: the raw logit of the true class (published), or its log-probability")
    add("--eps", type=between(0, 1), default=1e-24, help="added to |g|^2 (paper: 1e-12 squared)")
    add("--repulsion-coef", type=at_least(0, float), default=1.0, help="multiplies the repulsion "
        "(paper: 1); of lit: the penalty's weight, which is not published")
    add("--repulse-every", type=at_least(1), default=1, help="steps between repulsions (paper: 1)")
    add("--cauchy", type=at_least(0, float), help="c of the prior sum ln(1 + c z^2) on features or "
        "logits (published: features 1e-3 on CIFAR-10, else 5e-3; logits 1e-6)")
    add("--pca", metavar="FILE", help="basis of the inputs made by another run (default: computed "
        "on first use and kept beside the runs)")
    add("--pca-components", type=at_least(0), default=0, metavar="R", help="how many; 0: all")
    add = parser.group("evaluation")
    add("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="trained with the same "
        f"initial members and batches, and compared: {', '.join(METHODS)}")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH, and "
        "FILE.npz for features")
    add("--shift", choices=["none", "computed", "published"], help="also evaluate the test set "
        "corrupted: computed on the fly, or the published -C files (left out if absent)")
    add("--shift-examples", type=at_least(0), metavar="N", help="test images a corruption; 0: all")
    add("--diversity-examples", type=at_least(1), default=1000, metavar="N",
        help="test images for the input gradients' diversity, at each severity")
    add("--eval-every", type=at_least(0), default=0, metavar="E", help="validate every E epochs")
    parser.group("run")("--chunk", type=at_least(0), default=0, metavar="C", help="members whose "
        "activations are in memory at once, a divisor of M; 0: all")
    args = parser.parse(argv)
    args.methods = list(dict.fromkeys(args.methods))
    plain, own = args.dataset in (*TOYS, "features"), args.dataset.startswith("folder:")
    if own and args.shift == "published" and "shift" not in args.explicit:
        args.shift = "computed"
    for wrong, message in (
            (args.compile, "--compile: a compiled network cannot be differentiated twice"),
            (args.members % (args.chunk or 1), f"--chunk {args.chunk} does not divide --members "
             f"{args.members}; use a divisor, or 0 for all members at once"),
            ((args.dataset == "features") != bool(args.features), "--dataset features and "
             "--features TRAIN.npz TEST.npz go together"),
            (plain and (args.model, args.val_fraction, args.shift, args.augment) != (
                "mlp", 0, "none", False), f"--model {args.model}, --val-fraction, --shift "
             f"{args.shift}, --augment: {args.dataset} has no images; it takes --model mlp, "
             "--val-fraction 0, --shift none and --no-augment"),
            (args.eval_every and not args.val_fraction, "--eval-every needs a validation set; add "
             "--val-fraction 0.1"),
            (args.shift == "published" and f"{args.dataset}_c" not in data.CORRUPTED,
             f"--shift published is not for {args.dataset}; use computed or none"),
            (args.dataset in TOYS and (args.ood or args.predict), "--ood and --predict are not for "
             f"{args.dataset}; leave them out"),
            (args.dataset == "toy_regression" and "feature_rde" in args.methods, "feature_rde "
             "repels along the likelihood's gradients of classes; toy_regression has none")):
        if wrong:
            parser.error(message)
    return args


# ---- Model --------------------------------------------------------------------------------------
# Every layer is twice differentiable: FoRDE trains through the gradient by the input.


class Conv2d(nn.Conv2d):
    """A convolution without bias, padded like XLA's SAME: a 3x3 of stride 2 on an even map by 0
    before and 1 after. A strided 1x1 is written as subsampling: on CPUs PyTorch 2.14's own writes
    out of bounds in the backward pass."""

    def __init__(self, c_in, c_out, kernel=3, stride=1):
        super().__init__(c_in, c_out, kernel, stride, kernel // 2, bias=False)

    def forward(self, x):
        (stride, _), (height, width) = self.stride, x.shape[2:]
        if self.kernel_size == (1, 1):
            return F.conv2d(x[..., ::stride, ::stride], self.weight)
        if stride == 1:
            return super().forward(x)
        return F.conv2d(F.pad(x, (width % 2, 1, height % 2, 1)), self.weight, stride=stride)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm of [B, C] or [B, C, H, W] with the statistics of the global batch.

    published code: running statistics of the biased variance, debiased: average_t = hidden_t / (1 -
    0.9^t). They move in a training forward whose weights have a gradient.
    """

    def forward(self, x):
        maps = x if x.ndim == 4 else x[:, :, None, None]
        if not self.training:
            return super().forward(maps).view(x.shape)
        if common.world_size() == 1:
            y, mean, inverse_std = torch.native_batch_norm(
                maps, self.weight, self.bias, None, None, True, 0.0, self.eps)
            var = inverse_std.pow(-2) - self.eps
        else:
            count = self.weight.new_full((1,), maps.numel() / maps.shape[1])
            sums = torch.cat([maps.sum((0, 2, 3), dtype=count.dtype), count])
            mean, count = common.all_reduce_sum(sums).split([maps.shape[1], 1])
            mean = mean / count
            centred = maps - mean[:, None, None]  # two passes: no cancellation
            var = common.all_reduce_sum(centred.square().sum((0, 2, 3))) / count
            scale = self.weight * torch.rsqrt(var + self.eps)
            y = (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
        if self.weight.requires_grad:
            with torch.no_grad():
                self.num_batches_tracked += 1
                steps = self.num_batches_tracked.to(mean.dtype)
                weight = self.momentum / (1 - (1 - self.momentum) ** steps)
                self.running_mean.lerp_(mean.to(self.running_mean), weight)
                self.running_var.lerp_(var.to(self.running_var), weight)
        return y.view(x.shape)


class Residual(nn.Module):
    """conv-BN-ReLU-conv-BN plus shortcut, ReLU; or BN-ReLU-conv-BN-ReLU-conv plus shortcut: x, or
    where the shape changes a 1x1 projection, with BN, or of the first pre-activation."""

    def __init__(self, c_in, c_out, stride, pre_activation):
        super().__init__()
        body = [Conv2d(c_in, c_out, 3, stride), BatchNorm(c_out), nn.ReLU(), Conv2d(c_out, c_out)]
        shortcut = [Conv2d(c_in, c_out, 1, stride)] if stride > 1 or c_in != c_out else []
        before, after = [BatchNorm(c_in), nn.ReLU()], []
        if not pre_activation:
            before, after = [], [nn.ReLU()]
            body.append(BatchNorm(c_out))
            shortcut += [BatchNorm(c_out) for _ in shortcut]
        self.before, self.body, self.shortcut, self.after = (
            nn.Sequential(*layers) for layers in (before, body, shortcut, after))

    def forward(self, x):
        h = self.before(x)
        return self.after(self.body(h) + (self.shortcut(h) if self.shortcut else x))


class Network(nn.Module):
    """Layers, a mean over what is left of the image, a linear head: (logits [B, K], features)."""

    def __init__(self, layers, dim, num_classes):
        super().__init__()
        self.extractor, self.head = nn.Sequential(*layers), nn.Linear(dim, num_classes)

    def forward(self, x):
        features = self.extractor(x)
        features = features.mean((2, 3)) if features.ndim == 4 else features
        return self.head(features), features


# name: (pre-activation, channels of the stem and by group, blocks a group); 3x3 stem, no max pool
RESNETS = {"resnet9": (False, 64, (64, 128, 256, 512), 1),
           "resnet18": (False, 64, (64, 128, 256, 512), 2),
           "preact_resnet18": (True, 64, (64, 128, 256, 512), 2),
           "wrn_16_4": (True, 16, (64, 128, 256), 2)}


def resnet(args, shape):
    """Layers and feature dimension; the norm that ends them stands after the stem in a basic one,
    after the last block in a pre-activation one."""
    pre_activation, stem, channels, blocks = RESNETS[args.model]
    wide = lambda c: max(1, round(c * args.width))
    c_in = stem if args.model == "wrn_16_4" else wide(stem)
    layers = [Conv2d(shape[0], c_in)]
    if not pre_activation:
        layers += [BatchNorm(c_in), nn.ReLU()]
    for group, c in enumerate(map(wide, channels)):
        for i in range(blocks):
            layers.append(Residual(c_in, c, 2 if group and not i else 1, pre_activation))
            c_in = c
    if pre_activation:
        layers += [BatchNorm(c_in), nn.ReLU()]
    return layers, c_in


def mlp(args, shape):
    """ReLU layers, with batch norm if --norm."""
    layers, dim = [nn.Flatten()], math.prod(shape)
    for width in args.hidden:
        width = max(1, round(width * args.width))
        layers += [nn.Linear(dim, width), *[BatchNorm(width)] * args.norm, nn.ReLU()]
        dim = width
    return layers, dim


def make_network(args, num_classes, shape):
    """One member for inputs [C, H, W], initialised as published (Haiku's default).

    Weights are normal with std 1/sqrt(fan_in), cut at two std (so of std .88/sqrt(fan_in)), biases
    0. The head is 0 too: at step 0 all logits, gradients and repulsive forces are 0.
    """
    layers, dim = (mlp if args.model == "mlp" else resnet)(args, shape)
    net = Network(layers, dim, num_classes)
    for m in net.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            std = m.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(m.weight, std=std, a=-2 * std, b=2 * std)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    nn.init.zeros_(net.head.weight)
    return net


# ---- Method -------------------------------------------------------------------------------------
# M members, B examples of the GLOBAL batch, D input dimensions, R <= D principal components.


def input_gradient(net, x, y, grad_of="logit", create_graph=True) -> tuple[Tensor, Tensor]:
    """(logits [B, K], g [B, D]): g_b = d/dx_b sum_b' f_y(x_b'); net(x) gives logits and features.

    f_y is the raw logit of the true class y (paper, 3), its log softmax with `grad_of` "logprob"
    (Ross et al. 2018), or the output where y is float (regression, K = 1). In training mode batch
    norm couples the examples, and g has these terms (as published). create_graph: g is
    differentiable by the parameters.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = net(x)[0]
        scores = logits.log_softmax(1) if grad_of == "logprob" else logits
        own = logits if y.is_floating_point() else scores.gather(1, y[:, None])
        g, = torch.autograd.grad(own.sum(), x, create_graph=create_graph)
    return logits, g.flatten(1)


def unit_rows(g, eps=1e-24) -> Tensor:
    """g / sqrt(|g|^2 + eps) for rows g [..., D]; eps is the square of the paper's 1e-12.

    A row with |g|^2 <= eps has no direction: it is a constant 0, lest its Jacobian of 1/|g| drown
    all others.
    """
    squared = g.square().sum(-1, keepdim=True)
    return g / torch.where(squared > eps, squared + eps, torch.inf).sqrt()


def pca(second_moments) -> tuple[Tensor, Tensor]:
    """(eigenvectors [D, D] as columns, eigenvalues [D], largest first) of X^T X / (N-1) [D, D]."""
    eigenvalues, eigenvectors = torch.linalg.eigh(second_moments)
    return eigenvectors.flip(1), eigenvalues.flip(0).clamp_min(0)


def kernel_map(eigenvectors, eigenvalues, alpha=1.0) -> Tensor:
    """A [D, R] with A A^T = Sigma^-1, so that s = n A has the kernel's distances.

    paper: appendix D.4, Sigma = alpha Lambda^-1 + (1 - alpha) I in the eigenbasis: PCA at alpha 1,
    the identity at 0. A common factor of Lambda does not matter: the median takes it out.
    """
    precision = eigenvalues / (alpha + (1 - alpha) * eigenvalues).clamp_min(1e-30)
    return eigenvectors * precision.sqrt()


def squared_distances(s) -> Tensor:
    """d_ijb = |s_ib - sg(s_jb)|^2 [M, M, B] of s [M, B, R], the diagonal (0) included.

    By differences: from a Gram matrix few digits would be left when members are nearly equal.
    """
    return torch.stack([(s - other).square().sum(-1) for other in s.detach()], 1)


def median_bandwidth(d) -> Tensor:
    """h_jb = med_i d_ijb / ln M + 1e-12 [M, B], constant; an even M averages the two middle ones.

    The zero distance to itself counts. Two members: h is half their distance over ln 2.
    """
    # paper: eq. (17), in the published code's form
    ranked, m = d.detach().sort(0).values, len(d)
    return (ranked[(m - 1) // 2] + ranked[m // 2]) / (2 * math.log(m)) + 1e-12


def repulsion(g, kernel=None, eps=1e-24) -> Tensor:
    """R = (1/B) sum_i log[(1/B) sum_b sum_j exp(-d_ijb / h_jb)], 0 <= R <= M ln(M) / B, nats.

    Args: g [M, B, D], input gradients of M >= 2 members; kernel A [D, R] of `kernel_map`, or None
    for the identity. Differentiable in g as WGD wants it: grad R_i = sum_j grad k_ij / sum_j k_ij.
    The minimised objective is sum_i CE_i + R, CE the mean over B.
    """
    # paper: Algorithm 1; both terms are divided by B
    s = unit_rows(g, eps)
    d = squared_distances(s if kernel is None else s @ kernel.to(s))
    exponents = -d / median_bandwidth(d)
    return (exponents.flatten(1).logsumexp(1) - math.log(g.shape[1])).sum() / g.shape[1]


@torch.no_grad()
def rbf_repulsion(points) -> tuple[Tensor, list]:
    """(sum_i ln sum_j K_ij, its gradients), K_ij = exp(-d_ij ln(M+1) / med d), of points.

    points: tensors [M, ...], which together are one point a member: d_ij is summed over them. The
    kernel of repulsive ensembles (D'Angelo and Fortuin 2021) on weights and function values: one
    median over all M^2 distances, zeros included. The second argument and the bandwidth are
    constant; the gradients are minus sum_j (2/h) K_ij (p_i - p_j) / sum_j K_ij.
    """
    d = sum(torch.stack([(p - other).square().flatten(1).sum(1) for other in p], 1)
            for p in points)
    bandwidth = d.flatten().quantile(0.5) / math.log(len(d) + 1) + 1e-12
    weights = -2 / bandwidth * (-d / bandwidth).softmax(1)
    gradients = [p * weights.sum(1).view(-1, *[1] * (p.ndim - 1))
                 - torch.einsum("ij,j...->i...", weights, p) for p in points]
    return (-d / bandwidth).logsumexp(1).sum(), gradients


def function_repulsion(logits, c=0.0) -> Tensor:
    """(1/B) [sum_i ln sum_j K_ij + sum ln(1 + c z^2)] of logits z [M, B, K]: the kernel of
    `rbf_repulsion` and a Cauchy prior."""
    value, (gradient,) = rbf_repulsion([logits])
    value = value + (gradient * (logits - logits.detach())).sum()  # its value and its gradient
    return (value + (c * logits.square()).log1p().sum()) / logits.shape[1]


@torch.no_grad()
def feature_directions(logits, y, head_weight, count=5) -> Tensor:
    """Projections [B, F, count] on the leading directions of the members' likelihood gradients.

    Per example: the left singular vectors of the M gradients d log p(y|z_i) / dz_i (Yashima et al.
    2022, there from their Gram matrix, which squares the condition). Those of singular values under
    1 % of the largest, which rounding turns, fade out. logits [M, B, K], y [B], head_weight [K, F].
    """
    residual = F.one_hot(y, logits.shape[-1]) - logits.softmax(-1)
    v = (residual.to(head_weight) @ head_weight).permute(1, 2, 0)  # [B, F, M]
    basis, small = torch.linalg.qr(v)
    inner, sizes, _ = torch.linalg.svd(small, full_matrices=False)
    squared = sizes.square()
    fade = squared / (squared + 1e-4 * squared[:, :1]).clamp_min(1e-30)
    return (basis @ inner * fade[:, None])[..., :count]


def feature_repulsion(features, directions, c=0.0) -> Tensor:
    """(1/B) sum_b [sum_i ln sum_j exp(-d_ijb/h_jb) + sum ln(1 + c z^2)] of features z [M, B, F],
    d along `directions` [B, F, count], h_jb = med_i d_ijb / ln M + 1e-12."""
    d = squared_distances(torch.einsum("mbf,bfk->mbk", features, directions))
    value = (-d / median_bandwidth(d)).logsumexp(1).sum()
    return (value + (c * features.square()).log1p().sum()) / features.shape[1]


def pairwise_cosines(g, eps=1e-24) -> Tensor:
    """cos(g_i, g_j) of all pairs i < j of members and all examples, [M (M-1) / 2, B]."""
    n = unit_rows(g, eps)
    first, second = torch.triu_indices(len(g), len(g), 1, device=g.device)
    return torch.einsum("ibd,jbd->ijb", n, n)[first, second]


def local_independence(g, eps=1e-24) -> Tensor:
    """LIT (Ross et al. 2018): mean over pairs and examples of cos^2(g_i, g_j), g [M, B, D]."""
    return pairwise_cosines(g, eps).square().mean()


def empcov_precision(covariance, eps=0.1) -> Tensor:
    """(C / c + eps I)^-1 [P, P], c the mean eigenvalue of C, the covariance of the first layer's
    inputs: times the weight decay and w, the gradient of the prior N(0, a C + e I) that is on
    average as wide as weight decay."""
    c = covariance / covariance.diagonal().mean()
    return torch.linalg.inv(c + eps * torch.eye(len(c)).to(c))


def data_loss(logits, y, label_smoothing=0.0) -> Tensor:
    """Cross entropy of int y [B], or squared error / (2 * 0.1^2) of float y (toy), of logits [M, B,
    K]: summed over members, each of which has its own gradient, and examples."""
    if y.is_floating_point():
        return (logits[..., 0] - y).square().sum() / (2 * 0.1**2)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="sum",
                           label_smoothing=label_smoothing)


def disagreement(log_probs) -> float:
    """Fraction of ordered pairs of members that predict another class, mean over examples; of
    log_probs [M, N, K]."""
    m, n, k = log_probs.shape
    if m == 1:
        return 0.0
    votes = F.one_hot(log_probs.argmax(2), k).sum(0).double()
    return 1 - ((votes * (votes - 1)).sum(1) / (m * (m - 1))).mean().item()


# ---- Training -----------------------------------------------------------------------------------

PARTICLES = {"input_gradient": "input_gradient", "lit": "input_gradient", "function": "logits",
             "feature": "features"}  # by repulsion: what of a member repels


class Members(nn.Module):
    """C members of an ensemble on the same batch: the unit of memory and of data parallelism."""

    def __init__(self, nets, particles="none", grad_of="logit"):
        super().__init__()
        self.nets, self.particles, self.grad_of = nn.ModuleList(nets), particles, grad_of

    def forward(self, x, y, repel=True, graph=True):
        """Logits [C, B, K] and particles [C, B, D] (D = 0 without `repel`), in float32 at least.
        Without a `graph` they are constants, and the running statistics stay as they are."""
        outputs = []
        self.nets.requires_grad_(graph)
        for net in self.nets:
            if repel and self.particles == "input_gradient":
                outputs.append(input_gradient(net, x, y, self.grad_of, create_graph=graph))
            else:
                logits, features = net(x)
                outputs.append((logits, {"logits": logits, "features": features}.get(
                    self.particles * repel, logits[:, :0])))
        self.nets.requires_grad_(True)
        wide = torch.promote_types(outputs[0][0].dtype, torch.float32)
        outputs = [torch.stack(part).to(wide) for part in zip(*outputs)]
        return outputs if graph else [t.detach() for t in outputs]


def make_loader(dataset, args, seed=0, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`.

    Second derivatives are fastest in contiguous memory on CPUs, in channels-last memory on GPUs.
    """
    return data.Loader(dataset, args.batch_size if train else max(512, args.batch_size),
                       args.device, seed=seed, shuffle=train and args.dataset not in TOYS,
                       augment="crop_flip" if train and args.augment else "none",
                       workers=args.workers,
                       channels_last=args.device.type == "cuda" and not dataset.is_features)


def autocast(args):
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def second_moments(dataset, args, first_layer=False) -> Tensor:
    """X^T X / (N-1) [D, D], float64, of the images as the network sees them, flattened in the order
    C, H, W, un-augmented; or the covariance of what the first layer sees, 3x3 patches [9C, 9C] or
    whole inputs (mlp)."""
    total, mean, count = 0.0, 0.0, 0
    for batch in make_loader(dataset, args).epoch():
        x = (batch.images.cpu() if args.device.type == "mps" else batch.images).double()
        if first_layer and args.model != "mlp":
            x = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
        x = x.flatten(1)
        total, mean, count = total + x.T @ x, mean + x.sum(0), count + len(x)
    total, mean, count = map(common.all_reduce, (total, mean, total.new_tensor(float(count))))
    return (total - torch.outer(mean, mean) / count * first_layer) / (count - 1)


def principal_components(train_set, args) -> tuple[Tensor, Tensor]:
    """Eigenvectors [D, R] and eigenvalues [R] of the training images, float32: of --pca, or of the
    file beside the runs that is named by the images' content, computed on first use."""
    if isinstance(train_set, data.StreamedSet):
        raise UserError(f"{train_set.name} is not in memory and has no basis; use --methods "
                        "forde_identity")
    dim = math.prod(train_set.shape)
    rows = train_set.images.flatten(1).contiguous().numpy()
    content = sum(int(hashlib.sha256(row).hexdigest(), 16) for row in rows)  # in any order
    content = repr((content, train_set.shape, train_set.mean, train_set.std)).encode()
    path = Path(args.out_dir, "forde", f"pca-{hashlib.sha256(content).hexdigest()[:20]}.pt")
    if not args.pca and not common.broadcast(path.exists()):
        needed, memory = 5 * 8 * dim**2, common.device_memory(args.device)
        if memory and needed > memory:
            raise UserError(f"the basis of {dim} inputs needs {needed / 1e9:.1f} GB, the device "
                            f"has {memory / 1e9:.1f} GB; use --methods forde_identity")
        moments = second_moments(train_set, args)
        if common.is_main():
            vectors, values = (t.float().cpu() for t in pca(moments))
            common.write(path, common.to_bytes({"eigenvectors": vectors, "eigenvalues": values}))
    state = common.load_checkpoint(args.pca or path)
    vectors, values = (state.get(k, torch.empty(0)) for k in ("eigenvectors", "eigenvalues"))
    if vectors.shape != (dim, len(values)):
        raise UserError(f"{args.pca or path} is no basis of inputs of {dim} dimensions; give "
                        "another --pca FILE, or none to have it computed")
    keep = slice(None, args.pca_components or None)
    return vectors[:, keep], values[keep]


def own_rows(batch) -> slice:
    """Which rows of the global batch this process has."""
    share, longer = divmod(batch.global_size, common.world_size())
    first = common.rank() * share + min(common.rank(), longer)
    return slice(first, first + len(batch.labels))


def global_batch(t, batch) -> Tensor:
    """[M, B, ...] of all processes from the [M, b, ...] of each."""
    everyone = t.new_zeros(len(t), batch.global_size, *t.shape[2:])
    everyone[:, own_rows(batch)] = t
    return common.all_reduce(everyone)


def particle_forces(particles, logits, batch, head, kernel, args):
    """(R, dR/dparticles [M, b, D] of this process) from the detached particles of this process."""
    everyone = global_batch(particles, batch).requires_grad_()
    if args.repulsion == "input_gradient":
        value = repulsion(everyone, kernel, args.eps)
    elif args.repulsion == "lit":
        value = local_independence(everyone, args.eps)
    elif args.repulsion == "function":
        value = function_repulsion(everyone, args.cauchy)
    else:
        own = feature_directions(logits, batch.labels, head.weight)
        value = feature_repulsion(everyone, global_batch(own[None], batch)[0], args.cauchy)
    force, = torch.autograd.grad(value, everyone)
    return value.detach(), force[:, own_rows(batch)]


def ensemble_step(chunks, batch, kernel, args, repel):
    """Gradients of sum_i CE_i + coef R; returns (CE sum of this process, R, logits).

    One chunk keeps its graph from the particles to the force and back. Several have the particles
    without a graph first, so that one chunk's activations are in memory at a time.
    """
    x, y = batch.images, batch.labels
    value, loss_sum, all_logits, forces = x.new_zeros(()), 0.0, [], [None] * len(chunks)
    if repel:
        with autocast(args):
            outputs = [chunks[0](x, y)] if len(chunks) == 1 else [
                getattr(chunk, "module", chunk)(x, y, graph=False) for chunk in chunks]
        logits, particles = (torch.cat([out[k].detach() for out in outputs]) for k in (0, 1))
        head = getattr(chunks[0], "module", chunks[0]).nets[0].head
        value, force = particle_forces(particles, logits, batch, head, kernel, args)
        forces = (args.repulsion_coef * force).split(args.members // len(chunks))
    for chunk, force in zip(chunks, forces):
        if len(chunks) > 1 or not repel:
            with autocast(args):
                outputs = [chunk(x, y, repel)]
        logits, particles = outputs[0]
        loss = data_loss(logits, y, args.label_smoothing)
        total = loss / batch.global_size
        if repel:
            total = total + (particles * force).sum()
        (total * common.world_size()).backward()  # DDP divides by the number of processes
        loss_sum += loss.detach()
        all_logits.append(logits.detach())
    return loss_sum, value, torch.cat(all_logits)


@torch.no_grad()
def finish_gradients(nets, args, n_train, precision, repel):
    """What acts on the parameters themselves: weight repulsion, the shared classifier, EmpCov."""
    value = 0.0
    if repel and args.repulsion == "weight":
        groups = list(zip(*(net.parameters() for net in nets)))
        value, forces = rbf_repulsion([torch.stack(group) for group in groups])
        value, scale = value / n_train, args.repulsion_coef / n_train
        for group, force in zip(groups, forces):
            torch._foreach_add_([p.grad for p in group], list(force), alpha=scale)
    if args.repulsion == "feature":  # one classifier: M equal copies, the mean of their gradients
        for group in zip(*(net.head.parameters() for net in nets)):
            mean = torch.stack([p.grad for p in group]).mean(0)
            for p in group:
                p.grad.copy_(mean)
    if precision is not None:
        for net in nets:
            w = next(net.parameters())  # of the first layer
            w.grad += args.weight_decay * (w.flatten(1) @ precision.to(w)).view_as(w)
    return value


def make_ensemble(args, seed, num_classes, shape):
    """M networks on the device; member i of every method starts from the same weights."""
    nets = []
    for member in range(args.members):
        common.seed_all(seed, member)
        nets.append(make_network(args, num_classes, shape))
    last = args.device.type == "cuda" and args.model != "mlp"
    return nn.ModuleList(nets).to(
        args.device, memory_format=torch.channels_last if last else torch.contiguous_format)


def make_optimiser(nets, args):
    """SGD on every tensor of every member: g + wd theta, momentum by Nesterov."""
    stems = [next(net.parameters()) for net in nets] if args.prior == "empcov" else []
    rest = [p for p in nets.parameters() if all(p is not s for s in stems)]
    groups = [{"params": rest}] + [{"params": stems, "weight_decay": 0.0}] * bool(stems)
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, nesterov=args.momentum > 0,
                           weight_decay=args.weight_decay)


def learning_rate(step, steps_per_epoch, args) -> float:
    """The learning rate at a global step (from 0): a pure function, so resuming needs no state.

    published: with t = epoch/epochs, constant to t = 0.5, linear to lr * ratio at 0.9, constant.
    """
    if args.schedule == "published":
        t = (step // steps_per_epoch) / max(1, args.epochs)
        return args.lr * (1 - (1 - args.lr_ratio) * min(1.0, max(0.0, (t - 0.5) / 0.4)))
    total = max(1, args.epochs * steps_per_epoch)
    warm = 0.2 * total
    return args.lr * ((step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm))


def train(nets, sets, basis, run, name, args, seed):
    """All members together; goes on after the last whole epoch of this run, exactly."""
    m, train_set, precision = args.members, sets["train"], sets.get("precision")
    kernel = kernel_map(*basis, args.alpha).to(args.device) if basis and args.alpha else None
    optimiser = make_optimiser(nets, args)
    particles, size = PARTICLES.get(args.repulsion, "none"), args.chunk or m
    chunks = [common.data_parallel(Members(nets[i:i + size], particles, args.grad_of), args.device,
                                   twice=True) for i in range(0, m, size)]
    loader = make_loader(train_set, args, seed, train=True)
    # published code: the last, partial batch is left
    steps = min(max(1, len(train_set) // args.batch_size), args.limit_steps or len(loader))
    for epoch in run.epochs(args.epochs, name=name, net=nets, optimiser=optimiser):
        nets.train()
        totals = torch.zeros(4, device=args.device)  # CE, R, right predictions, examples
        for step, batch in run.steps(loader, epoch):
            if step == steps:
                break
            now = epoch * steps + step
            lr = learning_rate(now, steps, args)
            for group in optimiser.param_groups:
                group["lr"] = lr
            repel = args.repulsion != "none" and now % args.repulse_every == 0
            optimiser.zero_grad(set_to_none=True)
            loss, value, logits = ensemble_step(
                chunks, batch, kernel, args, repel and args.repulsion != "weight")
            value = value + finish_gradients(nets, args, len(train_set), precision, repel)
            optimiser.step()
            right = (logits.argmax(2) == batch.labels).sum() / m
            totals += torch.stack([loss / m, value / m * len(batch.labels), right,
                                   right.new_full((), len(batch.labels))])
        loss, value, right, n = common.all_reduce(totals).unbind()
        more = {} if train_set.num_classes == 1 else {"accuracy": right / n}
        if args.eval_every and (epoch + 1) % args.eval_every == 0:
            log_probs = predict(nets, sets["val"], args)
            if log_probs is not None:
                values = predictive_metrics(log_probs, sets["val"].labels)
                more |= {"val_nll": values["nll"], "val_accuracy": values["accuracy"]}
        run.log(loss / n, repulsion=value / n, lr=lr, examples=n, **more)


# ---- Evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def predict(nets, dataset, args):
    """Log-probabilities [M, N, K] float32 of all members, in the set's order, on the main process
    (None on the others). Regression (K = 1): the outputs themselves."""
    nets.eval()
    rows, index = [], []
    for batch in make_loader(dataset, args).epoch():
        if not len(batch.labels):  # more processes than images left
            continue
        with autocast(args):
            logits = torch.stack([net(batch.images)[0] for net in nets], 1).float()
        rows.append((logits if logits.shape[2] == 1 else logits.log_softmax(2)).cpu())
        index.append(batch.index.cpu())
    gathered = common.gather_rows(torch.cat(index), torch.cat(rows))
    if gathered and not gathered[0].isfinite().all():
        raise UserError(f"outputs on {dataset.name} are not finite, a member has diverged; train "
                        "again with a lower --lr")
    return gathered and gathered[0].transpose(0, 1)


def mean_log_probs(log_probs) -> Tensor:
    """Log of the mean of the members' probabilities [N, K], float64, from [M, N, K]."""
    parts = [part.double().logsumexp(0) for part in log_probs.split(10_000, 1)]
    return torch.cat(parts) - math.log(len(log_probs))


def predictive_metrics(log_probs, labels) -> dict:
    """Metrics of the mixture of members, log_probs [M, N, K] (paper: all of them on the mean).

    nll_miss is the mean NLL over the ensemble's errors, None without errors. Uncertainties are in
    nats, with their population standard deviation over the set.
    """
    mean = mean_log_probs(log_probs)
    probs = mean.exp()
    wrong = probs.argmax(1) != labels
    values = {"n": len(labels), "accuracy": common.accuracy(probs, labels),
              "nll": common.nll(mean, labels),
              "nll_miss": common.nll(mean[wrong], labels[wrong]) if wrong.any() else None,
              "ece15": common.ece(probs, labels), "brier": common.brier(probs, labels)}
    values |= {f"top{k}_accuracy": common.top_k_accuracy(probs, labels, k)
               for k in (2, 3) if k <= probs.shape[1]}
    values["member_accuracy"] = float(np.mean([common.accuracy(p, labels) for p in log_probs]))
    values["disagreement"] = disagreement(log_probs)
    return values | uncertainty_metrics(log_probs)


def uncertainty_metrics(log_probs) -> dict:
    parts = common.ensemble_uncertainty(log_probs)
    return {f"{name}_{k}": value.item() for name in ("total", "aleatoric", "epistemic")
            for k, value in (("mean", parts[name].mean()), ("std", parts[name].std(correction=0)))}


def gradient_distance(nets, dataset, args) -> dict:
    """Mean over pairs of members and examples of 1 - cos of their input gradients (eval mode)."""
    if args.members == 1:
        return {}
    members = Members(nets, "input_gradient", args.grad_of).eval()
    total = torch.zeros((), device=args.device)
    for batch in make_loader(dataset, args).epoch():
        if len(batch.labels):
            with autocast(args):
                _, g = members(batch.images, batch.labels, graph=False)
            total += (1 - pairwise_cosines(g, args.eps)).mean(0).sum()
    return {"gradient_distance": common.all_reduce(total).item() / len(dataset)}


def evaluate(nets, sets, args) -> tuple[list, list]:
    """(rows of one ensemble: test set, OOD sets against it, corrupted sets; rows by corruption),
    on the main process; the others only predict."""
    test, val = sets["test"], sets["val"]
    log_probs = predict(nets, test, args)
    distance = gradient_distance(nets, data.evenly(test, args.diversity_examples), args)
    on_val = predict(nets, val, args) if val is not None else None
    outside = {name: predict(nets, dataset, args) for name, dataset in sets["ood"].items()}
    shifted, by_kind = evaluate_shift(nets, sets["shift"], args)
    if not common.is_main():
        return [], []
    rows = [{"set": test.name, **predictive_metrics(log_probs, test.labels), **distance}]
    if val is not None:
        temperature = common.fit_temperature(mean_log_probs(on_val), val.labels)
        scaled = (mean_log_probs(log_probs) / temperature).log_softmax(1)
        rows[0] |= {"temperature": temperature, "nll_scaled": common.nll(scaled, test.labels),
                    "ece15_scaled": common.ece(scaled.exp(), test.labels)}
        rows.append({"set": "val", **predictive_metrics(on_val, val.labels)})
    inside = common.ensemble_uncertainty(log_probs)
    for against, log_probs in outside.items():
        row, scores = {"n": log_probs.shape[1]}, common.ensemble_uncertainty(log_probs)
        for score in ("total", "epistemic"):
            values = common.ood_metrics(inside[score], scores[score], larger_means="ood")
            row |= {f"{metric}_{score}": v for metric, v in values.items()}
        rows.append({"set": test.name, "against": against, **row, **uncertainty_metrics(log_probs)})
    return rows + shifted, by_kind


def evaluate_shift(nets, shift, args) -> tuple[list, list]:
    """Rows by severity, all kinds pooled, and their mean (cA, cNLL, cECE); rows by kind.

    Pooled ECE is not the mean over kinds, which is there too as ece15_by_kind.
    """
    name, kinds, corrupted = shift
    rows, by_kind = [], []
    for severity in data.SEVERITIES if kinds else ():
        pooled, labels, few = [], [], []
        for kind in kinds:
            dataset = corrupted(kind, severity)
            pooled.append(predict(nets, dataset, args))
            labels.append(dataset.labels)
            few.append(data.evenly(dataset, -(-args.diversity_examples // len(kinds))))
            if common.is_main():
                values = predictive_metrics(pooled[-1], dataset.labels)
                by_kind.append({"set": f"{name}_{kind}_s{severity}",
                                **{k: values[k] for k in ("n", "accuracy", "nll", "ece15")}})
        few = data.ImageSet(name, torch.cat([f.images for f in few]), torch.cat(
            [f.labels for f in few]), dataset.num_classes, dataset.mean, dataset.std)
        distance = gradient_distance(nets, few, args)
        if common.is_main():
            eces = [row["ece15"] for row in by_kind[-len(kinds):]]
            rows.append({"set": f"{name}_s{severity}", **distance, **predictive_metrics(
                torch.cat(pooled, 1), torch.cat(labels)), "ece15_by_kind": float(np.mean(eces))})
    if rows:
        mean = {k: float(np.mean([row[k] for row in rows])) for k in (
            "accuracy", "nll", "ece15", "ece15_by_kind", "disagreement", "gradient_distance")
            if k in rows[0]}
        rows.append({"set": name, "n": sum(row["n"] for row in rows), **mean})
    return rows, by_kind


def member_spread(outputs) -> Tensor:
    """Standard deviation [N] over members of a regression's outputs [M, N, 1]; of one: 0."""
    return outputs[..., 0].std(0, correction=min(1, len(outputs) - 1))


def evaluate_regression(nets, sets, args) -> tuple[list, list]:
    """The toy's row: error and spread of the members on the data, and their spread far from it."""
    test, plane = sets["test"], sets["plane"]
    fit, drawn = predict(nets, test, args), predict(nets, plane, args)
    if not common.is_main():
        return [], []
    error = (fit[..., 0].mean(0) - test.labels).square().mean().sqrt().item()
    far = torch.cdist(plane.images.flatten(1), test.images.flatten(1)).min(1).values > 0.5
    return [{"set": test.name, "n": len(test), "rmse": error,
             "std_mean": member_spread(fit).mean().item(),
             "far_std_mean": member_spread(drawn)[far].mean().item()}], []


COLUMNS = ["accuracy", "nll", "ece15", "disagreement", "gradient_distance", "auroc_total",
           "auroc_epistemic", "epistemic_mean", "rmse", "std_mean", "far_std_mean"]  # printed


def paired_differences(rows) -> list:
    """Rows of every method minus those of the first, seed by seed: same members, same batches."""
    key = lambda row: (row["seed"], row["set"], row.get("against"))
    first = {key(row): row for row in rows if row["method"] == rows[0]["method"]}
    pairs = [(row, first[key(row)]) for row in rows if row["method"] != rows[0]["method"]]
    return [{**{k: row[k] for k in ("seed", "set", "against", "n") if k in row},
             "method": f"{row['method']} - {base['method']}",
             **{k: row[k] - base[k] for k in COLUMNS if k in row}} for row, base in pairs]


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#BBBBBB", "#000000"]


def plot_shift(plt, path, rows, test, shift):
    """Accuracy, NLL, ECE and diversity by severity (0: clean), mean and standard error of seeds."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.5), constrained_layout=True)
    labels = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece15": "ECE, 15 bins",
              "gradient_distance": "1 - cos of input gradients"}
    sets = [test, *(f"{shift}_s{s}" for s in range(1, 6))]
    for k, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [[row for row in rows if row["method"] == method and row["set"] == name
                and "against" not in row] for name in sets]
        for axis, metric in zip(axes, labels):
            if all(metric in row for group in own for row in group):
                values = np.array([[row[metric] for row in group] for group in own])  # [6, seeds]
                error = values.std(1, ddof=1) / values.shape[1] ** 0.5 if values.shape[1] > 1 else 0
                axis.errorbar(np.arange(6) + 0.05 * k, values.mean(1), error, marker="osD^vP*X"[k],
                              ms=4, capsize=2, color=COLOURS[k], label=method.replace("_", " "))
    for axis, label in zip(axes, labels.values()):
        axis.set(xlabel=f"severity ({shift}; 0: clean)", ylabel=label, xticks=range(6))
    axes[0].legend(frameon=False)
    common.save_figure(plt, figure, path)


def plot_regression(plt, path, sets, outputs):
    """Members' functions, their mean and two standard deviations: outputs {method: [M, N, 1]}."""
    line, x, y = sets["axes"], 2 * sets["test"].images[:, 0].flatten(), sets["test"].labels
    figure, axes = plt.subplots(1, len(outputs), figsize=(5 * len(outputs), 3.6),
                                constrained_layout=True, sharey=True, squeeze=False)
    for axis, (method, values) in zip(axes[0], outputs.items()):
        std, values = member_spread(values), values[..., 0]
        mean = values.mean(0)
        axis.plot(line, values.T, color=COLOURS[0], lw=0.5, alpha=0.5)
        axis.fill_between(line, mean - 2 * std, mean + 2 * std, color=COLOURS[5], alpha=0.3, lw=0)
        axis.plot(line, mean, color=COLOURS[0], lw=2)
        axis.plot(x, y, ".", ms=4, color="black")
        axis.set(title=method.replace("_", " "), xlabel="x", ylim=(y.min() - 2, y.max() + 2))
    axes[0, 0].set_ylabel("y: members, mean, two standard deviations")
    common.save_figure(plt, figure, path)


def plot_classification(plt, path, sets, outputs):
    """Total and epistemic entropy over the plane; outputs {method: [M, N, K]}."""
    points, grid = sets["train"].select(slice(200)), sets["axes"]
    panels = {method: common.ensemble_uncertainty(values) for method, values in outputs.items()}
    figure, axes = plt.subplots(2, len(panels), figsize=(4.4 * len(panels), 7.4),
                                constrained_layout=True, squeeze=False)
    for row, name in zip(axes, ("total", "epistemic")):
        top = max(parts[name].max().item() for parts in panels.values())
        for axis, (method, parts) in zip(row, panels.items()):
            image = axis.pcolormesh(*grid.permute(2, 0, 1), parts[name].view(grid.shape[:2]),
                                    vmin=0, vmax=top)
            figure.colorbar(image, ax=axis, label=f"{name} entropy (nats)")
            axis.scatter(*points.images.flatten(1).T, 9, np.array(COLOURS)[points.labels],
                         edgecolors="white", linewidths=0.4)
            axis.set(title=method.replace("_", " "), aspect="equal")
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def points_set(name, x, y, repeat=1):
    """Points [N, 2] as images [N, 2, 1, 1], `repeat` times."""
    return data.ImageSet(name, x[:, :, None, None].repeat(repeat, 1, 1, 1), y.repeat(repeat),
                         1 if y.is_floating_point() else 5, (0.0, 0.0), (1.0, 1.0))


def toy_sets(args) -> dict:
    """A toy's points, trained on 50 times an epoch (full batches), and what its picture shows."""
    if args.dataset == "toy_regression":
        # with one feature a unit gradient would be a sign, and nothing could repel
        features = lambda x: torch.stack([x / 2, (x / 2).square()], 1)
        (x, y), axes, ood = data.gapped_regression(), torch.linspace(-10, 10, 400), {}
        x, plane = features(x), points_set("line", features(axes), torch.zeros(400))
        test = x, y
    else:
        (x, y), test = data.gaussian_ring(40), data.gaussian_ring(20, seed=43)
        axis = torch.linspace(-12, 12, 120)
        axes = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), 2)
        plane = points_set("plane", axes.flatten(0, 1), torch.zeros(14_400).long())
        ood = {"far": plane.select(torch.cdist(axes.flatten(0, 1), x).min(1).values > 3)}
    return {"train": points_set(args.dataset, x, y, 50), "test": points_set(args.dataset, *test),
            "val": None, "ood": ood, "shift": ("", [], None), "plane": plane, "axes": axes}


def load_sets(args, seed) -> dict:
    """All sets of a seed, before anything is trained: train, val or None, test, OOD sets by name,
    and `shift`: (name, kinds, function of kind and severity)."""
    if args.dataset in TOYS:
        return toy_sets(args)
    val = None
    if args.features:
        train = data.evenly(data.feature_set(args.features[0]), args.limit_train)
        test = data.feature_set(args.features[1], train)
    else:
        load = lambda split, **more: data.load(
            args.dataset, split, args.data_dir, seed=seed, val_fraction=args.val_fraction,
            published_split="forde" if args.published_split else None,
            image_size=args.image_size, **more)
        train = load("train", limit=args.limit_train)
        if args.dataset == "cifar10":  # the published statistics; data.py's differ
            train = dataclasses.replace(train, mean=(0.4914, 0.4822, 0.4465),
                                        std=(0.2470, 0.2435, 0.2616))
        test = data.match(load("test"), train)
        if args.val_fraction:
            val = data.match(load("val"), train)
    ood = data.ood_sets(args, train)
    predicted = data.predict_set(args, train) if args.predict else None
    data.check_shares(train, val, test, predicted, *ood.values(),
                      limit=min(args.diversity_examples, args.shift_examples or math.inf))
    return {"train": train, "val": val, "test": test, "ood": ood, "predict": predicted,
            "shift": shifted_sets(args, test, train)}


def shifted_sets(args, test, like):
    """(name, kinds, function of kind and severity) of the corrupted test sets of these options."""
    few, name = args.shift_examples or None, f"{args.dataset}_c"
    if args.shift == "published":
        kinds = data.corruption_kinds(name, args.data_dir)
        return data.corrupted_name(name, kinds), kinds, lambda kind, severity: data.evenly(
            data.match(data.load_corrupted(name, kind, severity, args.data_dir), like), few)
    streamed = isinstance(test, data.StreamedSet)
    if streamed and "shift" in args.explicit and args.shift == "computed":
        raise UserError(f"--shift computed is for images in memory, not {test.name}; leave it out")
    kinds = [] if streamed or args.shift == "none" else [*data.CORRUPTIONS]
    some = data.evenly(test, few)
    name = "glyphs_c" if test.name == "glyphs" else f"{test.name}_computed_c"
    return name, kinds, lambda kind, severity: data.corrupted(some, kind, severity)


def with_method(args, method):
    """The options of one method: its repulsion and metric, and its published prior."""
    repulsion, alpha = METHODS[method]
    published = {"function": 1e-6, "feature": 1e-3 if args.dataset == "cifar10" else 5e-3}
    cauchy = published.get(repulsion, 0.0) if args.cauchy is None else args.cauchy
    # ln 1 = 0: a single member has no kernel
    return common.with_options(args, alpha=args.alpha if alpha is None else alpha, cauchy=cauchy,
                               repulsion=repulsion if args.members > 1 else "none")


def run_method(method, seed, sets, basis, args, run):
    """Train one method's ensemble (unless it is trained) and evaluate it: (rows, rows by kind of
    corruption, the toys' outputs over their plane), on the main process."""
    args, name = with_method(args, method), f"{method}-seed{seed}"
    nets = make_ensemble(args, seed, sets["train"].num_classes, sets["train"].shape)
    train(nets, sets, basis, run, name, args, seed)
    with run.clock("evaluate"):
        measure = evaluate_regression if args.dataset == "toy_regression" else evaluate
        rows, by_kind = measure(nets, sets, args)
    if args.predict:
        log_probs = predict(nets, sets["predict"], args)
        if common.is_main():
            several = f"-{name}" * (len(args.methods) * args.runs > 1)
            path = run.dir / f"predictions{several}.csv"
            common.write_predictions(path, sets["predict"], log_probs)
    key = {"method": method, "seed": seed}
    return ([{**key, **row} for row in rows], [{**key, **row} for row in by_kind],
            predict(nets, sets["plane"], args) if args.dataset in TOYS else None)


def main(argv=None) -> list:
    args = parse_args(argv)
    width, name = f"-w{args.width:g}" * (args.width != 1), data.set_name(args.dataset)
    name = f"{name}-{args.model}{width}-m{args.members}-seed{args.seed}"
    run, rows, by_kind, drawn = None, [], [], {}
    rotated = {"forde_pca", "forde_tuned"} & {*args.methods} and args.members > 1
    for seed in range(args.seed, args.seed + args.runs):
        sets, basis = load_sets(args, seed), None
        run = run or common.Run(args, "forde", name)  # a start that is refused claims nothing
        if rotated and not args.eval:
            basis = principal_components(sets["train"], args)
        if args.prior == "empcov" and not args.eval:
            sets["precision"] = empcov_precision(second_moments(sets["train"], args, True))
        for method in args.methods:
            own, kinds, drawn[method] = run_method(method, seed, sets, basis, args, run)
            rows, by_kind = rows + own, by_kind + kinds
    names = {sets["test"].name, sets["shift"][0], "val"}
    shown, paired = [row for row in rows if row["set"] in names], paired_differences(rows)
    rows = run.report(rows, COLUMNS, shown, by_kind=by_kind, paired=paired)
    if args.runs > 1 and paired:
        common.say(common.tables([row for row in paired if row["set"] in names], COLUMNS) + "\n")
    toy, (shift, kinds, _) = args.dataset in TOYS, sets["shift"]
    if args.plot and common.is_main() and (toy or kinds) and (plt := common.pyplot()):
        if toy:
            regression = args.dataset == "toy_regression"
            plot = plot_regression if regression else plot_classification
            plot(plt, run.dir / "toy.png", sets, drawn)
        else:
            plot_shift(plt, run.dir / "shift.png", rows, sets["test"].name, shift)
    return rows


if __name__ == "__main__":
    common.launch(main)
