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
  glyphs, n = 3 seeds, mean +- standard error, one CPU thread, four minutes each: accuracy 99.73
    +- 0.04 % (deep ensemble), 99.77 +- 0.02 % (FoRDE-PCA), 99.78 +- 0.02 % (identity); NLL under
    corruption 0.831 +- 0.069, 0.813 +- 0.069, 0.836 +- 0.061 nats: no clear difference.
  cifar100: not measured. The paper has, for ten members: NLL 0.70, 0.71, 0.70 nats, accuracy 81.8,
    81.4, 82.1 %, accuracy under corruption 54.3, 56.1, 54.1 %.

Differs from the published code (github.com/AaltoPML/FoRDE, commit e8f9d74; JAX and Haiku):
  - It also does what the code leaves out: tuned lengthscales, the repulsions the paper compares,
    one member (ln 1 = 0 makes it NaN there), resuming, missing corruption sets, any device count.
  - A gradient row of (nearly) zero length is a constant: there its Jacobian is about 1e10.
  - The paper's Algorithm 1 has twice the exponent and one bandwidth for all pairs of a sample; the
    code, whose results were published, has the form above. So do we.
  - The basis is that of the second moments, centred by channel, as published; --centre-pca centres
    by pixel, as the paper's text says.
  - Corruption metrics pool all kinds of a severity, as published; means over kinds are extra.
  - --layers torch has PyTorch's padding, initialisation and running variance; the default has the
    published ones (pads 0 before and 1 after where it strides, truncated normals of 1/fan_in, zero
    head, biased and debiased running statistics).
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import old_common as common
import old_data as data
from old_common import UserError

# ---- Arguments ----------------------------------------------------------------------------------

METHODS = {
    "deep_ensemble": dict(repulsion="none", kernel="identity"),
    "forde_pca": dict(repulsion="input_gradient", kernel="pca"),
    "forde_identity": dict(repulsion="input_gradient", kernel="identity"),
    "forde_tuned": dict(repulsion="input_gradient", kernel="tuned"),
    "weight_rde": dict(repulsion="weight", kernel="identity"),
    "function_rde": dict(repulsion="function", kernel="identity"),
    "feature_rde": dict(repulsion="feature", kernel="identity"),
    "lit": dict(repulsion="lit", kernel="identity"),
}
PRESETS = {
    # paper: 10 members, batch 128, SGD with Nesterov momentum 0.9, decay 5e-4 on everything,
    # learning rate 0.1, from the middle to 90 % of the epochs linearly to 0.001
    "": dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
             lr=0.1, lr_ratio=0.01, weight_decay=5e-4, schedule="published", alpha=0.4, width=1.0,
             amp="off", compile=False, shift="published", ood=[], shift_examples=0),
    "cifar10": dict(alpha=0.2, ood=["svhn", "cifar100"]),
    "cifar100": dict(ood=["svhn", "cifar10"]),
    # published command: ends at 0.0001; the paper's text says 0.001 (--lr-ratio 0.01)
    "tiny_imagenet": dict(model="preact_resnet18", epochs=150, lr_ratio=0.001, ood=["svhn"]),
    "mnist": dict(ood=["fashion_mnist"], shift="computed"),
    "fashion_mnist": dict(ood=["mnist"], shift="computed"),
    "svhn": dict(ood=["cifar10"], shift="computed"),
    # paper: features of a frozen ViT, three hidden layers with batch norm
    "features": dict(model="mlp", batch_size=256, lr=0.2, epochs=100, shift="none"),
    "glyphs": dict(methods=["deep_ensemble", "forde_pca", "forde_identity"], members=4,
                   model="resnet9", width=0.125, limit_train=4000, epochs=4, batch_size=64,
                   schedule="one_cycle", shift="computed", ood=["glyphs_letters"],
                   shift_examples=250),
    "numbers": dict(members=4, model="resnet9", width=0.25, epochs=8, schedule="one_cycle",
                    shift="none", ood=["glyphs_letters"]),
    "toy_regression": dict(methods=["deep_ensemble", "forde_identity"], members=16, model="mlp",
                           hidden=[64, 64], norm=False, epochs=60, batch_size=60, lr=2e-4,
                           weight_decay=0.0, schedule="one_cycle", shift="none",
                           vectorise="vmap"),
    "toy_classification": dict(methods=["deep_ensemble", "forde_identity"], members=16,
                               model="mlp", hidden=[64, 64], norm=False, epochs=20,
                               batch_size=200, lr=0.02, weight_decay=0.0, schedule="one_cycle",
                               shift="none", vectorise="vmap"),
}
TOYS = ("toy_regression", "toy_classification")
# The published pixel statistics where data.py has others.
STATISTICS = {"cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))}
# The options that shape the weights: they guard a run's checkpoint.
TRAINING_OPTIONS = ("dataset", "model", "width", "hidden", "norm", "layers", "members", "seed",
                    "epochs", "batch_size", "lr", "lr_ratio", "momentum", "weight_decay",
                    "schedule", "label_smoothing", "augment", "val_fraction", "limit_train",
                    "repulsion", "kernel", "alpha", "tuned_formula", "update", "grad_of", "eps",
                    "repulsion_coef", "repulse_every", "cauchy", "prior", "empcov_eps",
                    "centre_pca", "pca_components", "amp", "match_published", "limit_steps",
                    "features")


def parse_args(argv=None):
    parser = common.Parser(prog="forde.py", description=__doc__.split("\n")[0],
                           epilog="Details, equations and differences: the top of this file.")
    common.add_common_arguments(parser, [d for d in PRESETS if d])
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="trained with the same "
        f"initial members and batches, and compared: {', '.join(METHODS)}")
    add("--repulsion", choices=["input_gradient", "none", "weight", "function", "feature", "lit"],
        help="one method by its repulsion instead: input_gradient is FoRDE, none a deep ensemble")
    add("--kernel", choices=["pca", "identity", "tuned"], help="of FoRDE: lengthscales from the "
        "eigenvalues (paper's main form), none, or between the two by --alpha")
    add("--alpha", type=float, help="of the tuned kernel: 0 identity, 1 PCA (paper: 0.4 on "
        "CIFAR-100, 0.2 on CIFAR-10, chosen from 0, .1, .2, .4, .8, 1)")
    add("--tuned-formula", choices=["paper", "website"], default="paper",
        help="paper: Sigma = a Lambda^-1 + (1-a) I; website: Sigma^-1 = a Lambda + (1-a) I")
    add("--update", choices=["wgd", "svgd"], default="wgd", help="Wasserstein gradient descent in "
        "its KDE form (paper), or Stein's: M^2 backward passes a step in input-gradient space")
    add("--members", "-m", type=int, help="ensemble members M (paper: 10)")
    add("--model", choices=["resnet9", "resnet18", "resnet34", "preact_resnet18", "wrn_16_4",
                            "mlp"], help="paper: resnet18; preact_resnet18 on TinyImageNet")
    add("--hidden", type=int, nargs="+", default=None, help="widths of mlp (paper: three layers)")
    add("--norm", action=flag, default=None, help="batch norm in mlp")
    add("--layers", choices=["published", "torch"], default="published",
        help="padding, initialisation and running statistics: the published ones, or PyTorch's")
    add("--momentum", type=float, default=0.9, help="Nesterov momentum (paper: 0.9)")
    add("--weight-decay", type=float, help="on ALL parameters (paper: 5e-4)")
    add("--label-smoothing", type=float, default=0.0, help="of the cross entropy alone (paper: 0)")
    add("--schedule", choices=["published", "one_cycle"], help="published: constant, linear from "
        "50 to 90 %% of the epochs, constant; one_cycle: better in few epochs")
    add("--lr-ratio", type=float, help="final over initial learning rate (paper: 0.01)")
    add("--augment", action=flag, help="random crop and flip (default: on for CIFAR, TinyImageNet)")
    add("--val-fraction", type=float, default=0.0, help="of the training set, for a temperature "
        "and --eval-every (published: 0)")
    add("--eval-every", type=int, default=0, metavar="E",
        help="epochs between validations; 0: none")
    add("--limit-train", type=int, metavar="N", help="train on N images, evenly spaced")
    add("--grad-of", choices=["logit", "logprob"], default="logit",
        help="f_y: the raw logit of the true class (published), or its log-probability")
    add("--eps", type=float, default=1e-24, help="added to squared gradient norms: the square of "
        "the paper's 1e-12")
    add("--repulsion-coef", type=float, default=1.0, help="multiplies the repulsion (paper: 1); "
        "of lit: the penalty's weight, which is not published")
    add("--repulse-every", type=int, default=1, help="steps between repulsions (paper: 1)")
    add("--cauchy", type=float, help="c of the prior sum ln(1 + c z^2) on features or logits "
        "(published: features 1e-3 on CIFAR-10, else 5e-3; logits 1e-6)")
    add("--prior", choices=["isotropic", "empcov"], default="isotropic", help="on the first "
        "layer: weight decay, or N(0, aC + eI) with the covariance C of the images' patches")
    add("--empcov-eps", type=float, default=0.1, help="e over the mean eigenvalue of aC")
    add("--pca", metavar="FILE", help="basis of the inputs made by another run (default: computed "
        "on first use and kept beside the runs)")
    add("--centre-pca", action=flag, default=False, help="centre by pixel, as the paper's text "
        "says (published: by channel)")
    add("--pca-components", type=int, default=0, metavar="R",
        help="leading components kept; 0: all")
    add("--vectorise", choices=["loop", "vmap", "two_pass"], help="members one by one (default), "
        "as one batched network, or with forward-mode instead of second derivatives")
    add("--chunk", type=int, default=0, metavar="C", help="members whose activations are in memory "
        "at once, a divisor of M; 0: all")
    add("--ood", nargs="*", metavar="NAME", help="out-of-distribution sets, also folder:PATH")
    add("--shift", choices=["none", "computed", "published"], help="also evaluate the test set "
        "corrupted: computed on the fly, or the published -C files (skipped if absent)")
    add("--shift-examples", type=int, metavar="N", help="test images a corruption; 0: all")
    add("--diversity-examples", type=int, default=1000, metavar="N",
        help="test images for the input gradients' diversity, at each severity")
    add("--features", nargs=2, metavar=("TRAIN", "TEST"), help="of --dataset features: .npz files "
        "with 'features' [N, D] and 'labels' [N]; --ood then takes such files too")
    add("--runs", type=int, default=1, help="repeat with the next seeds; mean and standard error")
    add("--save-interval", type=int, default=1, help="epochs between checkpoints")
    add("--match-published", action="store_true", help="feature repulsion as in its published "
        "code: the five smallest directions, and squared distances squared again")
    args = parser.parse_args(argv)
    if args.repulsion or args.kernel:
        if args.methods:
            raise UserError("--methods or --repulsion and --kernel, not both")
        args.repulsion = args.repulsion or "input_gradient"
        kernel = (args.kernel or "pca") if args.repulsion == "input_gradient" else "identity"
        if args.kernel and kernel != args.kernel:
            raise UserError(f"--kernel is for --repulsion input_gradient, not {args.repulsion}")
        args.methods = [name for name, options in METHODS.items()
                        if options == dict(repulsion=args.repulsion, kernel=kernel)]
    return check_args(common.resolve_arguments(args, PRESETS, "glyphs"))


def check_args(args):
    """Fill what depends on other options; refuse what cannot work, before anything is loaded."""
    args.methods = list(dict.fromkeys(args.methods))
    if args.augment is None:
        args.augment = args.dataset in ("cifar10", "cifar100", "tiny_imagenet")
    args.hidden = args.hidden or [256, 256, 256]
    args.norm = True if args.norm is None else args.norm
    args.vectorise = args.vectorise or "loop"
    for key in ("members", "runs", "repulse_every", "save_interval", "diversity_examples",
                "limit_train", *["batch_size"]):
        if getattr(args, key) is not None and getattr(args, key) < 1:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1")
    if args.chunk < 0 or args.members % (args.chunk or args.members):
        raise UserError(f"--chunk {args.chunk} does not divide --members {args.members}; use a "
                        "divisor, or 0 for all members at once")
    for key, low, high in (("alpha", 0, 1), ("momentum", 0, 0.999), ("weight_decay", 0, math.inf),
                           ("label_smoothing", 0, 0.999), ("lr_ratio", 0, 1), ("eps", 0, 1),
                           ("val_fraction", 0, 0.9), ("repulsion_coef", 0, math.inf),
                           ("empcov_eps", 1e-6, math.inf), ("pca_components", 0, math.inf),
                           ("shift_examples", 0, math.inf), ("eval_every", 0, math.inf),
                           ("cauchy", 0, math.inf)):
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{key.replace('_', '-')} {value}: must lie in [{low}, {high}]")
    if min(args.hidden) < 1:
        raise UserError(f"--hidden {min(args.hidden)}: must be at least 1")
    if args.update == "svgd":
        if bad := [m for m in args.methods if METHODS[m]["repulsion"] in ("feature", "lit")]:
            raise UserError(f"--update svgd is not for {bad[0]}; leave it at wgd")
        if args.prior == "empcov":
            raise UserError("--update svgd takes --prior isotropic only")
    if args.compile and (args.vectorise != "two_pass" or args.update == "svgd"):
        raise UserError("--compile needs --vectorise two_pass: a compiled network cannot be "
                        "differentiated twice")
    if (args.dataset == "features") != bool(args.features):
        raise UserError("--dataset features and --features TRAIN.npz TEST.npz go together")
    if (args.dataset in (*TOYS, "features")) != (args.model == "mlp"):
        raise UserError(f"--model {args.model} is not for --dataset {args.dataset}: mlp is for "
                        "features and the toys, and they for mlp")
    if args.prior == "empcov" and args.model == "mlp":
        raise UserError("--prior empcov is a prior on convolutions; mlp has none")
    if args.val_fraction and args.model == "mlp":
        raise UserError("--val-fraction is for images; leave it out")
    if args.eval_every and not args.val_fraction:
        raise UserError("--eval-every needs a validation set; add --val-fraction 0.1")
    if args.shift == "published" and args.dataset not in ("cifar10", "cifar100", "tiny_imagenet"):
        raise UserError(f"--shift published is not for {args.dataset}; use computed or none")
    if args.dataset in TOYS and (args.shift != "none" or args.ood or args.runs > 1):
        raise UserError(f"--shift, --ood and --runs are not for {args.dataset}; leave them out")
    website = args.tuned_formula == "website" and "forde_tuned" in args.methods
    if args.pca_components and website and args.alpha < 1:
        raise UserError("--tuned-formula website weights every direction; leave --pca-components "
                        "at 0")
    return args


# ---- Model --------------------------------------------------------------------------------------
# Every network returns (logits [B, K], features [B, F]), logits = head(features). Its convolutions
# and batch norms are twice differentiable out of the library's fused kernels: PyTorch's own second
# derivative of batch norm is twenty passes over memory, of a convolution in channels-last memory a
# change of layout. The first derivative taken with create_graph=True is with respect to the input.


def as_laid_out(t, like):
    """t in the memory layout of `like`: channels last or not."""
    last = torch.channels_last
    channels_last = like.is_contiguous(memory_format=last) and not like.is_contiguous()
    return t.contiguous(memory_format=last if channels_last else torch.contiguous_format)


class Convolve(torch.autograd.Function):
    """y = conv(x, w), zero padding, no bias."""

    @staticmethod
    def forward(x, w, stride, padding):
        return F.conv2d(x, w, None, stride, padding)

    @staticmethod
    def setup_context(ctx, inputs, _):
        x, w, *ctx.geometry = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        need_w = need_w and not torch.is_grad_enabled()
        return *ConvolveBackward.apply(grad, x, w, *ctx.geometry, need_x, need_w), None, None

    @staticmethod
    def jvp(ctx, tangent, w_tangent, *_):
        return Convolve.apply(tangent, ctx.saved_tensors[1], *ctx.geometry)


class ConvolveBackward(torch.autograd.Function):
    """(dL/dx, dL/dw) of a convolution; dL/dx, linear in dL/dy and in w, is differentiable."""

    @staticmethod
    def forward(grad, x, w, stride, padding, need_x, need_w):
        return torch.ops.aten.convolution_backward(
            as_laid_out(grad, x), x, w, None, stride, padding, (1, 1), False, (0, 0), 1,
            (need_x, need_w, False))[:2]

    @staticmethod
    def setup_context(ctx, inputs, _):
        *tensors, ctx.stride, ctx.padding, _, _ = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, v, _):
        grad, x, w = ctx.saved_tensors
        v, geometry = as_laid_out(v, x), (ctx.stride, ctx.padding)
        _, w_grad = ConvolveBackward.forward(grad, v, w, *geometry, False, True)
        return F.conv2d(v, w, None, *geometry), None, w_grad, None, None, None, None


class Conv2d(nn.Conv2d):
    """A convolution without bias, padded like XLA's SAME, or by k // 2 if `same` is off.

    SAME pads a 3x3 of stride 2 on an even map by 0 before and 1 after. A strided 1x1 is written as
    subsampling: on CPUs PyTorch 2.14's own writes out of bounds in the backward pass.
    """

    fused = True

    def __init__(self, c_in, c_out, kernel, stride=1, same=True):
        super().__init__(c_in, c_out, kernel, stride, kernel // 2, bias=False)
        self.same = same

    def forward(self, x):
        weight, stride, padding = self.weight, self.stride, self.padding
        if self.kernel_size == (1, 1):
            x, stride = x[..., ::stride[0], ::stride[1]], (1, 1)
        elif self.same and stride != (1, 1):
            sides = []
            for n, k, s in zip(x.shape[:1:-1], self.kernel_size[::-1], stride[::-1]):
                total = max((-(-n // s) - 1) * s + k - n, 0)
                sides += [total // 2, total - total // 2]
            x, padding = F.pad(x, sides), (0, 0)
        if not self.fused or not torch.is_grad_enabled():
            return F.conv2d(x, weight, None, stride, padding)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        return Convolve.apply(x, weight, stride, padding)


def global_sum(t):
    """The sum of t over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def by_channel(t):
    return t[:, None, None]


class Normalise(torch.autograd.Function):
    """(y, mean, 1/std) of y = w (x - mean) / std + b with the statistics of the global batch."""

    @staticmethod
    def forward(x, w, b, eps):
        if not dist.is_initialized():
            return torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
        count = global_sum(torch.full_like(w, x.numel() / len(w)))
        mean = global_sum(x.sum((0, 2, 3), dtype=w.dtype)) / count
        centred = x - by_channel(mean)  # two passes: no cancellation
        var = global_sum(centred.square().sum((0, 2, 3))) / count
        invstd = torch.rsqrt(var + eps)
        y = torch.addcmul(by_channel(b), centred, by_channel(w * invstd))
        return y.to(x.dtype), mean, invstd

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, w, *output[1:])
        ctx.save_for_forward(x, w, *output[1:])

    @staticmethod
    def backward(ctx, grad, *_):
        return *NormaliseBackward.apply(grad, *ctx.saved_tensors)[:3], None

    @staticmethod
    def jvp(ctx, tangent, *_):  # the map from dL/dy to dL/dx is its own transpose
        return NormaliseBackward.apply(tangent, *ctx.saved_tensors)[0], None, None


def normalise_backward(grad, x, w, mean, invstd):
    """(dL/dx, sum dL/dy xhat, sum dL/dy, their means over the global batch) of `Normalise`:

        dL/dx = w/std P(dL/dy),   P(v) = v - mean(v) - xhat mean(v xhat),   xhat = (x - mean)/std.
    """
    alone = not dist.is_initialized()
    dx, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, w, None, None, mean, invstd, True, 0.0, (alone, True, True))
    sums = global_sum(torch.stack([dot, total, torch.full_like(dot, x.numel() / len(dot))]))
    mean_dot, mean_grad = sums[:2] / sums[2]
    if not alone:
        slope = mean_dot * invstd
        dx = torch.addcmul(by_channel(slope * mean - mean_grad), x, by_channel(-slope)).add_(grad)
        dx = dx.mul_(by_channel(invstd if w is None else w * invstd)).to(x.dtype)
    return dx, dot, total, mean_dot, mean_grad


class NormaliseBackward(torch.autograd.Function):
    """`normalise_backward`, of which dL/dx is differentiable."""

    @staticmethod
    def forward(grad, x, w, mean, invstd):
        return normalise_backward(as_laid_out(grad, x), x, w, mean, invstd)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[3:])

    @staticmethod
    def backward(ctx, v, *_):
        grad, x, w, mean, invstd, dot, average = ctx.saved_tensors
        grad, v = as_laid_out(grad, x), as_laid_out(v, x)
        # P is self-adjoint: <v, w/std P(grad)> = w <u, grad> with u = P(v)/std
        u, _, _, v_dot, v_average = normalise_backward(v, x, None, mean, invstd)
        zero, one = torch.zeros_like(mean), torch.ones_like(mean)
        inner = torch.ops.aten.native_batch_norm_backward(  # sum of grad u by channel, fused
            grad, u, None, None, None, zero, one, True, 0.0, (False, True, False))[1]
        sums = global_sum(torch.stack([inner, torch.full_like(inner, x.numel() / len(inner))]))
        # 1/std and xhat depend on x: -w/std^2 [v_dot P(grad) + dot P(v) + xhat <u, grad> std / N]
        k = -w * invstd.square()
        slope = k * invstd * (sums[0] / (sums[1] * invstd) - 2 * dot * v_dot)
        constant = -k * (v_dot * average + dot * v_average) - slope * mean
        x_grad = torch.addcmul(by_channel(constant), x, by_channel(slope))
        x_grad = x_grad.addcmul_(grad, by_channel(k * v_dot)).addcmul_(v, by_channel(k * dot))
        return u.mul_(by_channel(w)).to(grad.dtype), x_grad.to(x.dtype), inner, None, None


class BatchNorm(nn.Module):
    """Batch norm of [B, C] or [B, C, H, W], statistics of the global batch.

    `take_statistics` gives those of a training forward; `track` moves the running ones, published:
    the biased variance, and average_t = hidden_t / (1 - 0.9^t); else as torch does.
    """

    fused, eps, momentum = True, 1e-5, 0.1

    def __init__(self, channels, published=True):
        super().__init__()
        self.published, self.batch_statistics = published, None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        maps = x if x.ndim == 4 else x[:, :, None, None]
        self.count = maps.numel() // len(self.weight) * (
            dist.get_world_size() if dist.is_initialized() else 1)  # values a channel
        if not self.training:
            y = F.batch_norm(maps, self.running_mean, self.running_var, self.weight, self.bias,
                             False, 0.0, self.eps)
        elif self.fused:
            y, mean, invstd = Normalise.apply(maps, self.weight, self.bias, self.eps)
            self.batch_statistics = mean, invstd.pow(-2) - self.eps
        else:  # PyTorch's own has a forward derivative whose gradient is wrong (seen in 2.14)
            total = common.all_reduce_sum if dist.is_initialized() else nn.Identity()
            mean = total(maps.sum((0, 2, 3))) / self.count
            centred = maps - by_channel(mean)
            var = total(centred.square().sum((0, 2, 3))) / self.count
            scale = self.weight * torch.rsqrt(var + self.eps)
            y = centred * by_channel(scale) + by_channel(self.bias)
            self.batch_statistics = mean, var
        return y.view_as(x) if x.ndim == 2 else y

    def take_statistics(self):
        """(mean, variance) of the last training forward; none are left (they may be batched)."""
        taken, self.batch_statistics = self.batch_statistics, None
        return taken

    @torch.no_grad()
    def track(self, mean, var, count):
        """Move the running statistics by those of a training batch of `count` values a channel."""
        self.steps += 1
        weight = self.momentum
        if self.published:
            weight = weight / (1 - (1 - weight) ** self.steps.to(mean.dtype))
        else:
            var = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean), weight)
        self.running_var.lerp_(var.to(self.running_var), weight)


class BasicBlock(nn.Module):
    """conv-BN-ReLU-conv-BN plus shortcut, ReLU; 1x1 projection with BN where the shape changes."""

    def __init__(self, c_in, c_out, stride, same):
        super().__init__()
        self.conv1 = Conv2d(c_in, c_out, 3, stride, same)
        self.conv2 = Conv2d(c_out, c_out, 3, 1, same)
        self.norm1, self.norm2 = BatchNorm(c_out, same), BatchNorm(c_out, same)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(Conv2d(c_in, c_out, 1, stride, same),
                                          BatchNorm(c_out, same))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class PreActivationBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-conv; a 1x1 projection sees the first pre-activation, an identity
    shortcut the raw input."""

    def __init__(self, c_in, c_out, stride, same):
        super().__init__()
        self.norm1, self.norm2 = BatchNorm(c_in, same), BatchNorm(c_out, same)
        self.conv1 = Conv2d(c_in, c_out, 3, stride, same)
        self.conv2 = Conv2d(c_out, c_out, 3, 1, same)
        project = stride != 1 or c_in != c_out
        self.projection = Conv2d(c_in, c_out, 1, stride, same) if project else None

    def forward(self, x):
        h = F.relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(h)
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + shortcut


class ResNet(nn.Module):
    """Residual network with a 3x3 stem and no max pool: BasicBlock, or PreActivationBlock, which
    has no norm after the stem and one before the pooling."""

    def __init__(self, block, counts, channels, num_classes, in_channels, stem, same):
        super().__init__()
        self.stem = Conv2d(in_channels, stem, 3, 1, same)
        blocks, c_in, self.pre_activation = [], stem, block is PreActivationBlock
        for group, (count, c) in enumerate(zip(counts, channels)):
            for i in range(count):
                blocks.append(block(c_in, c, 2 if group and not i else 1, same))
                c_in = c
        self.norm = BatchNorm(c_in if self.pre_activation else stem, same)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(c_in, num_classes)

    def forward(self, x):
        x = self.stem(x)
        if self.pre_activation:
            x = F.relu(self.norm(self.blocks(x)))
        else:
            x = self.blocks(F.relu(self.norm(x)))
        features = x.mean((2, 3))
        return self.head(features), features


class MLP(nn.Module):
    """ReLU network, with batch norm if `norm`."""

    def __init__(self, dim, hidden, num_classes, norm, same):
        super().__init__()
        sizes = [dim, *hidden]
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes, hidden))
        self.norms = nn.ModuleList(BatchNorm(o, same) if norm else nn.Identity() for o in hidden)
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, x):
        x = x.flatten(1)
        for linear, norm in zip(self.linears, self.norms):
            x = F.relu(norm(linear(x)))
        return self.head(x), x


def initialise_as_published(net):
    """Haiku's: normal of std 1/sqrt(fan_in) cut at two std, so of std .88/sqrt(fan_in); biases 0.

    The head's weight is 0 too: at step 0 all logits, gradients and repulsive forces are 0.
    """
    for m in net.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            std = m.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(m.weight, std=std, a=-2 * std, b=2 * std)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    nn.init.zeros_(net.head.weight)
    return net


def make_network(args, num_classes, shape):
    """One member for inputs [C, H, W]."""
    same = args.layers == "published"
    wide = lambda *channels: [max(1, round(c * args.width)) for c in channels]
    if args.model == "mlp":
        net = MLP(math.prod(shape), wide(*args.hidden), num_classes, args.norm, same)
    elif args.model == "wrn_16_4":
        net = ResNet(PreActivationBlock, (2, 2, 2), wide(64, 128, 256), num_classes, shape[0], 16,
                     same)
    else:
        counts = {"resnet9": (1, 1, 1, 1), "resnet34": (3, 4, 6, 3)}.get(args.model, (2, 2, 2, 2))
        block = PreActivationBlock if args.model == "preact_resnet18" else BasicBlock
        net = ResNet(block, counts, wide(64, 128, 256, 512), num_classes, shape[0], *wide(64), same)
    return initialise_as_published(net) if same else net


class Members(nn.Module):
    """C members of an ensemble on the same batch: the unit of memory and of data parallelism.

    vectorise  "loop": one by one, the repulsion's gradient by differentiating twice
               "vmap": stacked parameters, one batched network
               "two_pass": one by one, the repulsion's gradient by a forward derivative along it
    particles  what repels: "input_gradient", "logits", "features", or "none"
    """

    def __init__(self, nets, vectorise="loop", particles="input_gradient", grad_of="logit",
                 compiled=False):
        super().__init__()
        self.nets, self.vectorise = nn.ModuleList(nets), vectorise
        self.particles, self.grad_of = particles, grad_of
        for layer in self.modules():
            if isinstance(layer, (Conv2d, BatchNorm)):
                layer.fused = vectorise != "vmap" and not compiled
        if compiled and particles == "input_gradient":
            self._shifted = torch.compile(self._shifted)
        elif compiled:
            self._score = torch.compile(self._score)

    @property
    def has_direction(self):
        return self.vectorise == "two_pass" and self.particles == "input_gradient"

    def forward(self, x, y, direction=None, repel=True):
        """Logits [C, B, K] and particles [C, B, D], differentiable; moves the running statistics.

        two_pass with a `direction` [C, B, *] has instead of the input gradients g [C] scalars t:
        <g, direction>, as a forward derivative of the network along it. No particles (D = 0) if
        `repel` is off.
        """
        self.active = self.particles if repel else "none"
        parameters = self._tensors()
        if self.vectorise == "vmap":
            logits, particles, statistics = self._batched(parameters, x, y)
        else:
            if direction is not None:
                outputs = [self._shifted(p, x, y, d) for p, d in zip(parameters, direction)]
            else:
                outputs = [self._single(p, x, y, torch.is_grad_enabled()) for p in parameters]
            logits, particles, statistics = zip(*outputs)
            logits, particles = torch.stack(logits), torch.stack(particles)
        if self.training:
            counts = [norm.count for norm in norms_of(self.nets[0])]
            for net, rows in zip(self.nets, statistics):
                for norm, (mean, var), count in zip(norms_of(net), rows, counts):
                    norm.track(mean.detach(), var.detach(), count)
        return logits, particles

    def without_graph(self, x, y):
        """The same, detached, one member's activations at a time, statistics left alone."""
        self.active = self.particles
        parameters = [{name: t.detach() for name, t in row.items()} for row in self._tensors()]
        if self.vectorise == "vmap":
            logits, particles, _ = self._batched(parameters, x, y)
            return logits.detach(), particles.detach()
        outputs = ([t.detach() for t in self._single(p, x, y, False)[:2]] for p in parameters)
        return [torch.stack(part) for part in zip(*outputs)]

    def _tensors(self):
        """Each member's parameters, in eval mode its running statistics too, by name."""
        return [dict(net.named_parameters()) | ({} if self.training else dict(net.named_buffers()))
                for net in self.nets]

    def _score(self, parameters, x, y):
        """(sum of f_y, (logits, particles where they are no derivative, batch statistics)).

        One network with each member's parameters in turn: it is compiled once, not M times.
        """
        net = self.nets[0]
        logits, features = (widen(t) for t in torch.func.functional_call(net, parameters, (x,)))
        particles = {"logits": logits, "features": features}.get(self.active, logits[:, :0])
        statistics = [norm.take_statistics() for norm in norms_of(net)]
        return true_class_score(logits, y, self.grad_of).sum(), (logits, particles, statistics)

    def _single(self, parameters, x, y, create_graph):
        if self.active != "input_gradient":
            with torch.set_grad_enabled(create_graph):
                return self._score(parameters, x, y)[1]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            score, (logits, _, statistics) = self._score(parameters, x, y)
            gradient, = torch.autograd.grad(score, x, create_graph=create_graph)
        return logits, gradient.flatten(1), statistics

    def _shifted(self, parameters, x, y, direction):
        direction = as_laid_out(direction.view(x.shape).to(x), x)
        _, change, (logits, _, statistics) = torch.func.jvp(
            lambda x: self._score(parameters, x, y), (x,), (direction,), has_aux=True)
        return logits, change, statistics

    def _batched(self, parameters, x, y):
        stacked = {name: torch.stack([p[name] for p in parameters]) for name in parameters[0]}
        gradient = self.active == "input_gradient"
        score = lambda x, p: self._score(p, x, y)
        score = torch.func.grad(score, has_aux=True) if gradient else score
        first, (logits, particles, statistics) = torch.func.vmap(score, (None, 0))(x, stacked)
        rows = [[(mean[i], var[i]) for mean, var in statistics] for i in range(len(parameters))]
        return logits, first.flatten(2) if gradient else particles, rows


def norms_of(net):
    return [m for m in net.modules() if isinstance(m, BatchNorm)]


def widen(t):
    """bf16 as float32; float32 and float64 as they are."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


# ---- Method -------------------------------------------------------------------------------------
# M members, B examples of the GLOBAL batch, D input dimensions, R <= D principal components.


def true_class_score(logits, y, grad_of="logit") -> Tensor:
    """f_y [B], whose input gradient is the particle: the raw logit of the true class (paper).

    logits [B, K]; y int [B], or float [B] for regression with K = 1, where f is the output itself.
    `grad_of` "logprob": log softmax instead, as Ross et al. (2018) have it.
    """
    if y.is_floating_point():
        return logits[:, 0]
    scores = logits.log_softmax(1) if grad_of == "logprob" else logits
    return scores.gather(1, y[:, None])[:, 0]


def unit_rows(g, eps=1e-24) -> tuple[Tensor, Tensor]:
    """(n, |g|): n = g / sqrt(|g|^2 + eps), for rows g [..., D], and the root [..., 1].

    A row with |g|^2 <= eps has no direction: it is a constant 0, with root inf, lest its Jacobian
    of 1/|g| drown all others. eps is the square of the paper's 1e-12.
    """
    squared = g.square().sum(-1, keepdim=True)
    length = torch.where(squared > eps, squared + eps, torch.inf).sqrt()
    return g / length, length


def pca(second_moments, components=0) -> tuple[Tensor, Tensor]:
    """(eigenvectors [D, R] as columns, eigenvalues [R], largest first) of X^T X / (N-1) [D, D]."""
    eigenvalues, eigenvectors = torch.linalg.eigh(second_moments)
    keep = slice(None, components or None)
    return eigenvectors.flip(1)[:, keep], eigenvalues.flip(0).clamp_min(0)[keep]


def tuned_precision(eigenvalues, alpha=1.0, formula="paper") -> Tensor:
    """Diagonal of Sigma^-1 in the eigenbasis [R]: the identity at alpha 0, Lambda (PCA) at 1.

    paper (appendix D.4): Sigma = alpha Lambda^-1 + (1 - alpha) I, an average of lengthscales;
    website: Sigma^-1 = alpha Lambda + (1 - alpha) I, an average of their inverses.
    """
    if formula == "website":
        return alpha * eigenvalues + (1 - alpha)
    return eigenvalues / (alpha + (1 - alpha) * eigenvalues).clamp_min(1e-30)


def kernel_map(kernel, eigenvectors=None, eigenvalues=None, alpha=1.0, formula="paper"):
    """A [D, R] with A A^T = Sigma^-1, so that s = n A has the kernel's distances; None: identity.

    Lambda is not normalised: the median bandwidth takes a common factor out.
    """
    if kernel == "identity" or kernel == "tuned" and alpha == 0:
        return None
    precision = tuned_precision(eigenvalues, alpha if kernel == "tuned" else 1.0, formula)
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
    ranked, m = d.detach().sort(0).values, len(d)
    return (ranked[(m - 1) // 2] + ranked[m // 2]) / (2 * math.log(m)) + 1e-12


def repulsion(g, kernel=None, eps=1e-24) -> Tensor:
    """R = (1/B) sum_i log[(1/B) sum_b sum_j exp(-d_ijb / h_jb)], 0 <= R <= M ln(M) / B, nats.

    Args: g [M, B, D], input gradients of the members; kernel A [D, R] from `kernel_map`, or None.
    Differentiable in g as WGD wants it: grad R_i = sum_j grad k_ij / sum_j k_ij. The minimised
    objective is sum_i CE_i + R, CE the mean over B (Algorithm 1: both are divided by B).
    """
    s, _ = unit_rows(g, eps)
    d = squared_distances(s if kernel is None else s @ kernel)
    exponents = -d / median_bandwidth(d)
    return (exponents.flatten(1).logsumexp(1) - math.log(g.shape[1])).sum() / g.shape[1]


@torch.no_grad()
def repulsion_gradient(g, kernel=None, eps=1e-24) -> tuple[Tensor, Tensor, Tensor]:
    """(R, dR/dg [M, B, D], mean of med_jb) in closed form: no graph, [M, B, D] at a time.

    w_ijb = softmax over (j, b) of -d_ijb / h_jb;  dR/ds_ib = -(2/B) sum_j w_ijb/h_jb (s_ib - s_jb);
    then A^T, and the projection (I - n n^T) / |g|.
    """
    n, length = unit_rows(g, eps)
    s = n if kernel is None else n @ kernel
    d = squared_distances(s)
    h, size = median_bandwidth(d), g.shape[1]
    exponents = -d / h
    total = exponents.flatten(1).logsumexp(1)
    pull = (exponents - total[:, None, None]).exp() / h
    force = sum(pull[:, j, :, None] * (s[j] - s) for j in range(len(s))).mul_(2 / size)
    if kernel is not None:
        force = force @ kernel.T
    force -= n * (n * force).sum(-1, keepdim=True)
    value = (total - math.log(size)).sum() / size
    return value, force / length, (h - 1e-12).mean() * math.log(len(g))


def rbf_weights(d) -> tuple[Tensor, Tensor, Tensor]:
    """(K [M, M], bandwidth, sum_i ln sum_j K_ij), K = exp(-d ln(M+1) / med), of d [M, M].

    The kernel of repulsive ensembles (D'Angelo and Fortuin 2021) on weights and function values:
    one median over all M^2 distances, zeros included.
    """
    bandwidth = d.flatten().quantile(0.5) / math.log(len(d) + 1) + 1e-12
    return (-d / bandwidth).exp(), bandwidth, (-d / bandwidth).logsumexp(1).sum()


def rbf_distances(points) -> Tensor:
    """|p_i - p_j|^2 [M, M] summed over a list of tensors p [M, ...], tensor by tensor."""
    return sum(torch.stack([(p - other).square().flatten(1).sum(1) for other in p], 1)
               for p in points)


def pulled(weights, p) -> Tensor:
    """sum_j weights_ij (p_i - p_j) [M, ...] of p [M, ...]."""
    mixed = torch.einsum("ij,j...->i...", weights, p)
    return p * weights.sum(1).view(-1, *[1] * (p.ndim - 1)) - mixed


@torch.no_grad()
def rbf_repulsion(points) -> tuple[Tensor, list]:
    """(sum_i ln sum_j K_ij, its gradients with the second argument and the bandwidth constant):

    minus sum_j (2/h) K_ij (p_i - p_j) / sum_j K_ij, for each tensor p [M, ...] of `points`.
    """
    k, bandwidth, value = rbf_weights(rbf_distances(points))
    weights = -2 / bandwidth * k / k.sum(1, keepdim=True)
    return value, [pulled(weights, p) for p in points]


def cauchy_prior(z, c) -> Tensor:
    """Minus the log prior up to a constant, sum ln(1 + c z^2), on outputs or features."""
    return (c * z.square()).log1p().sum()


def feature_directions(features, logits, y, head_weight, count=5, smallest=False) -> Tensor:
    """Projections [B, F, count] on the leading directions of the members' likelihood gradients.

    Per example: eigenvectors, in the span of the M gradients d log p(y|z_i) / dz_i, of their Gram
    matrix [M, M] (Yashima et al. 2022); 0 for those under 1e-6 of the largest eigenvalue, which are
    rounding. `smallest`: the published code's choice, apparently a slip.
    """
    residual = F.one_hot(y, logits.shape[-1]) - logits.softmax(-1)
    v = (residual.to(features) @ head_weight).transpose(0, 1)  # [B, M, F]
    values, vectors = torch.linalg.eigh(v @ v.mT)
    alive = values > values[:, -1:].clamp_min(1e-30) * 1e-6
    values = torch.where(alive, values, torch.inf)
    chosen = slice(None, count)
    if not smallest:
        values, vectors = values.flip(-1), vectors.flip(-1)
    return v.mT @ vectors[..., chosen] * values[:, None, chosen].rsqrt()


def feature_repulsion(features, directions, c, published=False) -> Tensor:
    """(1/B) sum_b [sum_i ln sum_j exp(-d_ijb/h_jb) + Cauchy prior], d along `directions`.

    features [M, B, F]; h_jb = med_i d_ijb / ln M + 1e-12 (published: the median squared again).
    """
    z = torch.einsum("mbf,bfk->mbk", features, directions)
    d = squared_distances(z)
    h = median_bandwidth(d)
    if published:
        h = ((h - 1e-12) * math.log(len(d))).square() / math.log(len(d)) + 1e-12
    value = (-d / h).logsumexp(1).sum()
    return (value + cauchy_prior(features, c)) / features.shape[1]


def local_independence(g, eps=1e-24) -> Tensor:
    """LIT (Ross et al. 2018): mean over pairs and examples of cos^2(g_i, g_j), g [M, B, D]."""
    n, _ = unit_rows(g, eps)
    cosines = torch.einsum("ibd,jbd->ijb", n, n)
    squares = cosines.square().sum((0, 1)) - cosines.diagonal().square().sum(1)
    return squares.mean() / (len(g) * (len(g) - 1))


@torch.no_grad()
def stein_kernel(g, kernel=None, eps=1e-24) -> tuple[Tensor, Tensor]:
    """For SVGD in input-gradient space: K_ij = (1/B) sum_b k_ijb [M, M], and dK_ij/dg_j.

    The second is [M, M, B, D] in the order (j, i): what member j sends back for member i.
    """
    n, length = unit_rows(g, eps)
    s = n if kernel is None else n @ kernel
    d = squared_distances(s)
    h, size = median_bandwidth(d), g.shape[1]
    k = (-d / h).exp()
    back = []
    for j in range(len(g)):
        force = (2 / size) * (k[:, j] / h[j])[..., None] * (s - s[j])
        force = force if kernel is None else force @ kernel.T
        back.append((force - n[j] * (n[j] * force).sum(-1, keepdim=True)) / length[j])
    return k.mean(2), torch.stack(back)


def empcov_precision(patch_covariance, eps) -> Tensor:
    """(C / c + eps I)^-1 [P, P], c the mean eigenvalue of C: times the weight decay and w, the
    gradient of the first layer's prior N(0, a C + e I) that is on average as wide as weight decay.
    """
    c = patch_covariance / patch_covariance.diagonal().mean()
    return torch.linalg.inv(c + eps * torch.eye(len(c)).to(c))


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


def data_loss(logits, y, label_smoothing=0.0) -> Tensor:
    """The sum over members and examples: cross entropy, or squared error / (2 * 0.1^2) (toy).

    logits [M, B, K]; y int or float [B]. Sums over members: each member's gradient is its own.
    """
    if y.is_floating_point():
        return (logits[..., 0] - y).square().sum() / (2 * 0.1**2)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="sum",
                           label_smoothing=label_smoothing)


# ---- Training -----------------------------------------------------------------------------------

PARTICLES = {"input_gradient": "input_gradient", "lit": "input_gradient", "function": "logits",
             "feature": "features"}


def make_loader(dataset, args, world, batch_size=None, train=False):
    """Batches of this process, on its device; shuffled and augmented only where `train`."""
    return data.Loader(dataset, batch_size or args.batch_size, world.device, seed=args.seed,
                       shuffle=train and args.dataset not in TOYS,
                       augment="crop_flip" if train and args.augment else "none",
                       rank=world.rank, world_size=world.size, workers=args.workers,
                       channels_last=dataset.shape[1:] != (1, 1))


def autocast(args, world):
    return torch.autocast(world.device.type, torch.bfloat16, enabled=args.amp == "bf16")


def second_moments(dataset, args, world, patches=False) -> Tensor:
    """X^T X / (N-1) [D, D], float64, of the training images as the network sees them, flattened in
    the order C, H, W, un-augmented; or the covariance of their 3x3 patches [9C, 9C]."""
    total, mean, count = 0.0, 0.0, 0
    for batch in make_loader(dataset, args, world, 1000 * world.size).epoch():
        x = batch.images.double()
        x = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1) if patches else x.flatten(1)
        total, mean, count = total + x.T @ x, mean + x.sum(0), count + len(x)
    count = common.all_reduce(total.new_tensor(float(count)), world)
    total, mean = (common.all_reduce(t, world) for t in (total, mean))
    if args.centre_pca or patches:
        total = total - torch.outer(mean, mean) / count
    return total / (count - 1)


def principal_components(args, world) -> tuple[Tensor, Tensor]:
    """Eigenvectors [D, R] and eigenvalues [R] of the whole published training set, float32, from
    the file beside the runs, or computed and kept there: the same for all seeds and limits."""
    with common.main_first(world):
        whole = training_set(common.with_options(args, seed=1, val_fraction=0.0, limit_train=None))
    if isinstance(whole, data.StreamedSet):
        raise UserError(f"{args.dataset} does not fit in memory; use --kernel identity")
    config = common.to_json({"dataset": args.dataset, "images": len(whole), "shape": whole.shape,
                             "mean": whole.mean, "std": whole.std, "centre": args.centre_pca})
    stem = Path(args.features[0]).stem if args.features else args.dataset
    name = f"pca-{stem}-{len(whole)}{'-centred' * args.centre_pca}.pt"
    path = Path(args.pca) if args.pca else Path(args.out_dir) / "forde" / name
    needed = 5 * 8 * math.prod(whole.shape) ** 2
    exists = common.broadcast_bytes(b"1" if path.exists() else None, world) is not None
    if not exists and not args.pca:
        if needed > (memory := common.device_memory(world)):
            raise UserError(f"the basis of {math.prod(whole.shape)} dimensions needs "
                            f"{needed / 1e9:.1f} GB, the device has {memory / 1e9:.1f} GB; use "
                            "--kernel identity")
        moments = second_moments(whole, args, world)
        if world.is_main:
            vectors, values = (t.float().cpu() for t in pca(moments))
            path.parent.mkdir(parents=True, exist_ok=True)
            common.save_checkpoint(path, {"config": config, "eigenvectors": vectors,
                                          "eigenvalues": values})
    state = common.load_checkpoint(path, world=world)
    if state["config"] != config or "eigenvectors" not in state:
        odd = [k for k, v in config.items() if v != state["config"].get(k)]
        raise UserError(f"{path} is the basis of other data (another {', '.join(odd) or 'file'}); "
                        "give another --pca FILE, or none to have it computed")
    keep = slice(None, args.pca_components or None)
    return state["eigenvectors"][:, keep], state["eigenvalues"][keep]


def make_kernel(args, world):
    """The kernel's A [D, R] of this run on the device; None for the identity."""
    if args.repulsion != "input_gradient" or args.kernel == "identity" or args.members == 1:
        return None
    vectors, values = principal_components(args, world)
    kernel = kernel_map(args.kernel, vectors, values, args.alpha, args.tuned_formula)
    return None if kernel is None else kernel.to(world.device)


def gather_batch(t, world) -> Tensor:
    """[M, b, ...] of every process as [M, B, ...]: the kernels see the global batch."""
    if world.size == 1:
        return t
    return common.concat_rows(t.transpose(0, 1).contiguous(), world).transpose(0, 1)


def own_rows(t, batch, world) -> Tensor:
    """The rows of this process in [..., M, B, D]."""
    share, longer = divmod(batch.global_size, world.size)
    first = world.rank * share + min(world.rank, longer)
    return t[..., first:first + len(batch.labels), :]


def particle_forces(particles, logits, batch, head, args, world, kernel):
    """(R, dR/dparticles [M, b, D] of this process, mean median distance) from detached local ones.

    All are divided by the global B, as the cross entropy is.
    """
    everyone, nothing = gather_batch(particles, world), particles.new_zeros(())
    if args.repulsion == "input_gradient":
        matrix = None if kernel is None else kernel.to(everyone.dtype)
        value, force, median = repulsion_gradient(everyone, matrix, args.eps)
        return value, own_rows(force, batch, world), median
    if args.repulsion == "function":
        value, (force,) = rbf_repulsion([everyone])
        force = force + 2 * args.cauchy * everyone / (1 + args.cauchy * everyone.square())
        size = batch.global_size
        return value / size, own_rows(force / size, batch, world), nothing
    everyone = everyone.detach().requires_grad_()
    with torch.enable_grad():
        if args.repulsion == "lit":
            value = local_independence(everyone, args.eps)
        else:
            labels = common.concat_rows(batch.labels, world)
            directions = feature_directions(everyone.detach(), gather_batch(logits, world), labels,
                                            head.weight.detach(), smallest=args.match_published)
            value = feature_repulsion(everyone, directions, args.cauchy, args.match_published)
    force, = torch.autograd.grad(value, everyone)
    return value.detach(), own_rows(force, batch, world), nothing


def unwrapped(chunk):
    return getattr(chunk, "module", chunk)


def ensemble_step(chunks, batch, args, world, kernel, repel):
    """Gradients of sum_i CE_i + coef R; returns (CE sum of this process, R, median, logits).

    One chunk keeps its graph from the particles to the force and back. Several, and two_pass, have
    the particles without a graph first, so that one chunk's activations are in memory at a time.
    """
    x, y, size = batch.images, batch.labels, batch.global_size
    whole = len(chunks) == 1 and args.vectorise != "two_pass"
    value = median = x.new_zeros(())
    loss_sum, all_logits, forces = 0.0, [], [None] * len(chunks)
    if repel:
        with autocast(args, world):
            outputs = [chunks[0](x, y)] if whole else [
                unwrapped(chunk).without_graph(x, y) for chunk in chunks]
        logits, particles = (torch.cat([out[k].detach() for out in outputs]) for k in (0, 1))
        head = unwrapped(chunks[0]).nets[0].head
        value, force, median = particle_forces(particles, logits, batch, head, args, world, kernel)
        forces = (args.repulsion_coef * force).split(args.chunk or args.members)
    for chunk, force in zip(chunks, forces):
        along = force is not None and unwrapped(chunk).has_direction
        if not (repel and whole):
            with autocast(args, world):
                outputs = [chunk(x, y, force if along else None, repel)]
        logits, particles = outputs[0]
        loss = data_loss(logits, y, args.label_smoothing)
        total = loss / size
        if repel:
            total = total + (particles if along else particles * force).sum()
        (total * world.size).backward()  # DDP divides by the number of processes
        loss_sum += loss.detach()
        all_logits.append(logits.detach())
    return loss_sum, value, median, torch.cat(all_logits)


def stein_step(chunks, batch, args, world, kernel, n_train):
    """SVGD: p_i.grad = (1/M) [sum_j K_ij score_j - coef sum_j dK_ij/dtheta_j], one net a chunk.

    score_j is the gradient of the mean cross entropy with its weight decay; the kernel's part is
    divided by B (function and input-gradient space) or N (weight space), as in WGD.
    """
    x, y, size, m = batch.images, batch.labels, batch.global_size, len(chunks)
    parameters = [list(chunk.parameters()) for chunk in chunks]
    stacks = [torch.stack([p.detach() for p in group]) for group in zip(*parameters)]
    k, back, loss_sum, all_logits = torch.eye(m).to(x), None, 0.0, []
    if args.repulsion != "weight":
        with autocast(args, world):
            everyone = gather_batch(
                torch.cat([c.without_graph(x, y)[1] for c in chunks]), world)
    if args.repulsion == "input_gradient":
        matrix = None if kernel is None else kernel.to(everyone.dtype)
        k, back = stein_kernel(everyone, matrix, args.eps)
        back = own_rows(back / size, batch, world)
    else:
        points = stacks if args.repulsion == "weight" else [everyone]
        k, bandwidth, _ = rbf_weights(rbf_distances(points))
    scores, forces = [], [[torch.zeros_like(p) for p in group] for group in parameters]
    for j, (chunk, group) in enumerate(zip(chunks, parameters)):
        with autocast(args, world):
            logits, particles = chunk(x, y)
        loss = data_loss(logits, y, args.label_smoothing)
        scores.append(torch.autograd.grad(loss / size, group, retain_graph=True))
        for i in range(m if back is not None else 0):
            sent = torch.autograd.grad(particles, group, back[j, i][None], retain_graph=True,
                                       allow_unused=True)
            for total, part in zip(forces[i], sent):
                total += 0 if part is None else part
        if args.repulsion == "function":  # pulled back through this member's own Jacobian
            residual = gather_batch(torch.stack([
                torch.autograd.grad(data_loss(f, y, args.label_smoothing)
                                    + cauchy_prior(f, args.cauchy), f)[0]
                for f in own_rows(everyone, batch, world)[:, None].requires_grad_()])[:, 0], world)
            push = pulled(2 / bandwidth * k, everyone)[j]
            cotangent = (torch.einsum("j,jbk->bk", k[j], residual)
                         - args.repulsion_coef * push) / (m * size)
            scores[j] = torch.autograd.grad(logits, group, own_rows(cotangent, batch, world)[None])
        loss_sum += loss.detach()
        all_logits.append(logits.detach())
    for index, stack in enumerate(stacks):
        score = common.all_reduce(torch.stack([s[index] for s in scores]), world)
        if args.repulsion == "function":
            grad = score + args.weight_decay * stack
        else:
            score = score + args.weight_decay * stack
            force = common.all_reduce(torch.stack([f[index] for f in forces]), world)
            if args.repulsion == "weight":
                force = pulled(2 / bandwidth * k, stack) / n_train
            mixed = torch.einsum("ij,j...->i...", k.to(score), score)
            grad = (mixed - args.repulsion_coef * force) / m
        for group, g in zip(parameters, grad):
            group[index].grad = g
    return loss_sum, k.mean(), x.new_zeros(()), torch.cat(all_logits)


@torch.no_grad()
def finish_gradients(nets, args, n_train, precision):
    """What acts on the parameters themselves: weight repulsion, the shared classifier, EmpCov."""
    value = 0.0
    if args.repulsion == "weight" and args.update == "wgd" and len(nets) > 1:
        groups = list(zip(*(net.parameters() for net in nets)))
        value, forces = rbf_repulsion([torch.stack(group) for group in groups])
        value = value * args.repulsion_coef / n_train
        for group, force in zip(groups, forces):
            torch._foreach_add_([p.grad for p in group], list(force),
                                alpha=args.repulsion_coef / n_train)
    if args.repulsion == "feature":  # one classifier: M equal copies, the mean of their gradients
        for group in zip(*(net.head.parameters() for net in nets)):
            mean = torch.stack([p.grad for p in group]).mean(0)
            for p in group:
                p.grad.copy_(mean)
    if precision is not None:
        for net in nets:
            w = net.stem.weight
            w.grad += args.weight_decay * (w.flatten(1) @ precision.to(w)).view_as(w)
    return value


def make_optimiser(nets, args):
    """SGD on every tensor of every member: g + wd theta, momentum by Nesterov."""
    stems = [net.stem.weight for net in nets] if args.prior == "empcov" else []
    rest = [p for p in nets.parameters() if all(p is not s for s in stems)]
    groups = [{"params": rest}] + ([{"params": stems, "weight_decay": 0.0}] if stems else [])
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum,
                           nesterov=args.momentum > 0,
                           weight_decay=0.0 if args.update == "svgd" else args.weight_decay)


def train(nets, train_set, val_set, run, args, world):
    """All members together on the training set, resumed from this run's checkpoint if there is."""
    run.open()
    run.say(f"run directory {run.directory}")
    precision = None
    if args.prior == "empcov":
        precision = empcov_precision(second_moments(train_set, args, world, patches=True),
                                     args.empcov_eps)
    if args.compile and world.size > 1:
        raise UserError("--compile is for one process; leave it out")
    kernel, optimiser = make_kernel(args, world), make_optimiser(nets, args)
    particles = PARTICLES.get(args.repulsion, "none") if args.members > 1 else "none"
    size = 1 if args.update == "svgd" else args.chunk or args.members
    chunks = [Members(nets[i:i + size], args.vectorise, particles, args.grad_of, args.compile)
              for i in range(0, args.members, size)]
    loader = make_loader(train_set, args, world, train=True)
    steps = max(1, len(train_set) // args.batch_size)  # published: the last partial batch is left
    steps = min(steps, args.limit_steps or steps)
    fresh = lambda: {"step": 0, **{k: torch.zeros(steps) for k in LOGGED}}
    progress = {"epoch": 0, **fresh()}
    if (state := run.load()) is not None:
        nets.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        progress = state["progress"]
        run.say(f"{run.resume_from}: {progress['epoch']} of {args.epochs} epochs are done")
    if args.update == "wgd":
        chunks = [common.data_parallel(chunk, world) for chunk in chunks]

    def save(**progress):
        if not math.isfinite(torch.nn.utils.get_total_norm(nets.parameters())):
            raise UserError(f"weights are no longer finite after epoch {progress['epoch']}; the "
                            "last good checkpoint is kept. Lower --lr")
        run.save(model=nets.state_dict(), optimiser=optimiser.state_dict(), progress=progress)

    lr_at = lambda step: learning_rate(step, steps, args)
    with common.StopSignals() as stop:
        for epoch in range(progress["epoch"], args.epochs):
            clock, first = common.Stopwatch(world.device), progress["step"]
            step, signum, logged = train_epoch(chunks, nets, optimiser, loader, epoch, steps,
                                               progress, stop, args, world, kernel, precision)
            common.check_finite((logged["loss"] + logged["repulsion"])[:step], epoch * steps, lr_at)
            if step < steps:
                save(epoch=epoch, step=step, **logged)
                raise common.Stopped(signum, f"in epoch {epoch + 1} after step {step}")
            seconds, images = clock.seconds(), min(steps * args.batch_size, len(train_set))
            means = {f"{k}_nats" if k != "median" else k: v.mean().item()
                     for k, v in logged.items() if k != "correct"}
            if args.eval_every and (epoch + 1) % args.eval_every == 0:
                log_probs = predict(nets, val_set, args, world)
                values = predictive_metrics(log_probs, val_set.labels)
                means |= {"val_nll": values["nll"], "val_accuracy": values["accuracy"]}
            if train_set.num_classes > 1:
                means["member_accuracy"] = logged["correct"].sum().item() / images
            run.log(epoch=epoch + 1, epochs=args.epochs, **means,
                    lr=lr_at(epoch * steps + steps - 1),
                    images_per_s=images * (1 - first / steps) / seconds, seconds=seconds)
            progress, signum = fresh(), signum or stop.asked(world)
            if (epoch + 1) % args.save_interval == 0 or epoch + 1 == args.epochs or signum:
                save(epoch=epoch + 1, **progress)
            if signum:
                raise common.Stopped(signum, f"after epoch {epoch + 1}")


# By step: mean cross entropy of a member, R/M (at most ln(M)/B), mean of the medians med_jb,
# correct predictions of an average member.
LOGGED = ("loss", "repulsion", "median", "correct")


def train_epoch(chunks, nets, optimiser, loader, epoch, steps, progress, stop, args, world, kernel,
                precision):
    """Steps progress["step"] to `steps` of an epoch; fewer if a stop is asked for.

    Returns the steps done, the signal that stopped it or 0, and LOGGED by step, on the CPU.
    """
    nets.train()
    share = float(world.is_main)  # what is global, or from before an interruption, counts once
    logged = {k: share * progress[k].to(world.device) for k in LOGGED}
    n_train, m = len(loader.dataset), args.members
    batches = common.progress(loader.epoch(epoch, start=progress["step"]), steps - progress["step"],
                              f"epoch {epoch + 1}", args.quiet, world)
    for step, batch in zip(range(progress["step"], steps), batches):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(epoch * steps + step, steps, args)
        optimiser.zero_grad(set_to_none=True)
        if args.update == "svgd":
            loss, value, median, logits = stein_step(chunks, batch, args, world, kernel, n_train)
        else:
            repel = m > 1 and args.repulsion in PARTICLES and \
                (epoch * steps + step) % args.repulse_every == 0
            loss, value, median, logits = ensemble_step(chunks, batch, args, world, kernel, repel)
        value = value + finish_gradients(nets, args, n_train, precision)
        optimiser.step()
        logged["loss"][step] = loss / (m * batch.global_size)
        logged["repulsion"][step], logged["median"][step] = share * value / m, share * median
        if not batch.labels.is_floating_point():
            logged["correct"][step] = (logits.argmax(2) == batch.labels).sum() / m
        if signum := stop.asked(world, step):
            break
    return step + 1, signum, {k: common.all_reduce(t, world).cpu() for k, t in logged.items()}


# ---- Evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def predict(nets, dataset, args, world) -> Tensor:
    """Log-probabilities [M, N, K] float32 of all members, in the set's order, on every CPU.

    Regression (K = 1): the outputs themselves.
    """
    nets.eval()
    rows, index = [], [torch.zeros(0, dtype=torch.long)]
    for batch in make_loader(dataset, args, world, max(512, args.batch_size)).epoch():
        if not len(batch.labels):  # more processes than images left
            continue
        with autocast(args, world):
            logits = torch.stack([net(batch.images)[0] for net in nets], 1).float()
        rows.append((logits if logits.shape[2] == 1 else logits.log_softmax(2)).cpu())
        index.append(batch.index.cpu())
    shape = len(nets), nets[0].head.out_features
    rows = torch.cat(rows) if rows else torch.zeros(0, *shape)
    return common.gather_rows(rows, torch.cat(index), len(dataset), world).transpose(0, 1)


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
    values = {"accuracy": common.accuracy(probs, labels), "nll": common.nll(mean, labels),
              "nll_miss": common.nll(mean[wrong], labels[wrong]) if wrong.any() else None,
              "ece15": common.ece(probs, labels), "brier": common.brier(probs, labels)}
    values |= {f"top{k}_accuracy": common.top_k_accuracy(probs, labels, k)
               for k in (2, 3) if k <= probs.shape[1]}
    parts = common.ensemble_uncertainty(log_probs)
    for name in ("total", "aleatoric", "epistemic"):
        values |= {f"{name}_mean": parts[name].mean().item(),
                   f"{name}_std": parts[name].std(correction=0).item()}
    members = [common.accuracy(p, labels) for p in log_probs]
    values["member_accuracy"] = float(np.mean(members))
    values["disagreement"] = disagreement(log_probs)
    return values


def disagreement(log_probs) -> float:
    """Fraction of ordered pairs of members that predict another class, mean over examples."""
    m, n, k = log_probs.shape
    if m == 1:
        return 0.0
    votes = torch.zeros(n, k, dtype=torch.float64)
    votes.scatter_add_(1, log_probs.argmax(2).T, torch.ones(n, m, dtype=torch.float64))
    return 1 - ((votes * (votes - 1)).sum(1) / (m * (m - 1))).mean().item()


def gradient_distance(nets, dataset, args, world) -> float:
    """Mean over pairs of members and examples of 1 - cos of their input gradients (eval mode)."""
    nets.eval()
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    m, members = len(nets), Members(nets, grad_of=args.grad_of).eval()
    for batch in make_loader(dataset, args, world, max(512, args.batch_size)).epoch():
        if not len(batch.labels):
            continue
        with autocast(args, world):
            _, g = members.without_graph(batch.images, batch.labels)
        n, _ = unit_rows(g.double(), args.eps)
        cosines = (n.sum(0).square().sum(1) - n.square().sum((0, 2))) / (m * (m - 1))
        total += torch.stack([(1 - cosines).sum(), total.new_tensor(float(len(cosines)))])
    total = common.all_reduce(total, world)
    return (total[0] / total[1]).item()


def evenly(dataset, n):
    """n rows of a set, evenly spaced; all if n is 0 or more than there are."""
    if not n or n >= len(dataset):
        return dataset
    return dataset.select(torch.arange(n) * len(dataset) // n)


def evaluate(nets, sets, args, world) -> dict:
    """Every quantity of one ensemble, by `split/metric`."""
    test = sets["test"]
    log_probs, metrics = predict(nets, test, args, world), {}
    temperature = 1.0
    if sets["val"] is not None:
        val = predict(nets, sets["val"], args, world)
        metrics |= prefixed("val", predictive_metrics(val, sets["val"].labels))
        temperature = common.fit_temperature(mean_log_probs(val), sets["val"].labels)
        scaled = (mean_log_probs(log_probs) / temperature).log_softmax(1)
        metrics |= {"temperature": temperature, "test/nll_scaled": common.nll(scaled, test.labels),
                    "test/ece15_scaled": common.ece(scaled.exp(), test.labels)}
    metrics |= prefixed("test", predictive_metrics(log_probs, test.labels))
    inside = common.ensemble_uncertainty(log_probs)
    for name, dataset in sets["ood"].items():
        outside = common.ensemble_uncertainty(predict(nets, dataset, args, world))
        for score in ("total", "epistemic"):
            values = common.ood_metrics(inside[score], outside[score], larger_means="ood")
            metrics |= {f"{name}/{metric}_{score}": v for metric, v in values.items()}
    metrics["diversity/disagreement"] = metrics["test/disagreement"]
    if args.members > 1:
        metrics["diversity/input_gradient_cosine_distance"] = gradient_distance(
            nets, evenly(test, args.diversity_examples), args, world)
    return metrics | evaluate_shift(nets, sets, args, world)


def prefixed(name, values):
    return {f"{name}/{key}": value for key, value in values.items()}


def evaluate_shift(nets, sets, args, world) -> dict:
    """Metrics by severity, all kinds pooled (cA, cNLL, cECE: their means), and by kind.

    Pooled ECE is not the mean over kinds, which is there too as ece15_by_kind.
    """
    name, kinds, corrupted = sets["shift"]
    if not kinds:
        return {}
    metrics, key = {}, "diversity/input_gradient_cosine_distance"
    for severity in range(1, 6):
        pooled, labels, by_kind, few = [], [], [], []
        for kind in kinds:
            dataset = corrupted(kind, severity)
            log_probs = predict(nets, dataset, args, world)
            values = predictive_metrics(log_probs, dataset.labels)
            metrics |= {f"{name}_{kind}_s{severity}/{k}": values[k]
                        for k in ("accuracy", "nll", "ece15")}
            by_kind.append(values["ece15"])
            pooled.append(log_probs)
            labels.append(dataset.labels)
            few.append(evenly(dataset, -(-args.diversity_examples // len(kinds))))
        values = predictive_metrics(torch.cat(pooled, 1), torch.cat(labels))
        values["ece15_by_kind"] = float(np.mean(by_kind))
        if args.members > 1:
            some = dataclasses.replace(few[0], images=torch.cat([f.images for f in few]),
                                       labels=torch.cat([f.labels for f in few]))
            values["input_gradient_cosine_distance"] = gradient_distance(nets, some, args, world)
        metrics |= prefixed(f"{name}_s{severity}", values)
    for k in ("accuracy", "nll", "ece15", "ece15_by_kind"):
        metrics[f"{name}/{k}"] = float(np.mean([metrics[f"{name}_s{s}/{k}"] for s in range(1, 6)]))
    return metrics


def shift_of(metrics):
    """The name of the corrupted set in `metrics`, or None."""
    return next((k.split("_s1/")[0] for k in metrics if k.endswith("_s1/ece15_by_kind")), None)


def format_results(methods, sets) -> str:
    """The table that a run prints, {method: metrics}: clean, by severity; then OOD detection."""
    first = next(iter(methods.values()))
    shift, rows = shift_of(first), []
    columns = ["test"] + [f"{shift}_s{s}" for s in range(1, 6)] * (shift is not None)
    distance = "input_gradient_cosine_distance"
    for label, key, scale, digits in (
            ("accuracy %", "accuracy", 100, 2), ("NLL nats", "nll", 1, 4),
            ("ECE15 %", "ece15", 100, 2), ("disagreement %", "disagreement", 100, 2),
            ("gradients, 1 - cos", distance, 1, 4)):
        for method, metrics in methods.items():
            values = [metrics.get("diversity/" + key if key == distance and c == "test"
                                  else f"{c}/{key}") for c in columns]
            if shift:
                values.append(metrics.get(f"{shift}/{key}"))
            if any(v is not None for v in values):
                cells = (None if v is None else f"{scale * v:.{digits}f}" for v in values)
                rows.append([f"{label}  {method}", *cells])
    header = ["", *columns[:1], *(f"s{s}" for s in range(1, len(columns)))]
    text = common.format_table(header + [f"{shift}"] * (shift is not None), rows)
    detection = [[f"{name} from test", method, *(f"{metrics[f'{name}/auroc_{score}']:.4f}"
                                                 for score in ("total", "epistemic"))]
                 for name in sets["ood"] for method, metrics in methods.items()]
    if detection:
        text += "\n\n" + common.format_table(
            ["AUROC", "method", "total entropy", "epistemic"], detection)
    return text


# ---- Plots --------------------------------------------------------------------------------------

COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#BBBBBB", "#000000"]


def plot_shift(plt, path, methods):
    """Accuracy, NLL and diversity by severity of corruption (0: clean), {method: metrics}."""
    name = shift_of(next(iter(methods.values())))
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.5), constrained_layout=True)
    distance = "input_gradient_cosine_distance"
    for colour, (method, metrics) in zip(COLOURS, methods.items()):
        for axis, key in zip(axes, ("accuracy", "nll", "ece15", distance)):
            clean = f"diversity/{key}" if key == distance else f"test/{key}"
            keys = [clean] + [f"{name}_s{s}/{key}" for s in range(1, 6)]
            if all(k in metrics for k in keys):
                axis.plot(range(6), [metrics[k] for k in keys], "o-", ms=4, color=colour,
                          label=method.replace("_", " "))
    for axis, label in zip(axes, ("accuracy", "NLL (nats)", "ECE, 15 bins",
                                  "1 - cos of input gradients")):
        axis.set(xlabel=f"severity ({name}; 0: clean)", ylabel=label, xticks=range(6))
    axes[0].legend(frameon=False)
    common.save_figure(plt, figure, path)


def plot_toy_regression(plt, path, grid, predictions, x, y):
    """Members' functions, their mean and two standard deviations: {method: [M, points]}."""
    figure, axes = plt.subplots(1, len(predictions), figsize=(5 * len(predictions), 3.6),
                                constrained_layout=True, sharey=True, squeeze=False)
    for axis, (method, values) in zip(axes[0], predictions.items()):
        mean, std = values.mean(0), values.std(0)
        axis.plot(grid, values.T, color=COLOURS[0], lw=0.5, alpha=0.5)
        axis.fill_between(grid, mean - 2 * std, mean + 2 * std, color=COLOURS[5], alpha=0.3, lw=0)
        axis.plot(grid, mean, color=COLOURS[0], lw=2)
        axis.plot(x, y, ".", ms=4, color="black")
        axis.set(title=method.replace("_", " "), xlabel="x", ylim=(y.min() - 2, y.max() + 2))
    axes[0, 0].set_ylabel("y: members, mean, two standard deviations")
    common.save_figure(plt, figure, path)


def plot_toy_classification(plt, path, grid, panels, x, y):
    """Total and epistemic entropy over the plane: {method: (total, epistemic) [points]}."""
    figure, axes = plt.subplots(2, len(panels), figsize=(4.4 * len(panels), 7.4),
                                constrained_layout=True, squeeze=False)
    tops = np.max([[v.max() for v in values] for values in panels.values()], axis=0)
    for column, (method, values) in zip(axes.T, panels.items()):
        for axis, name, v, top in zip(column, ("total", "epistemic"), values, tops):
            image = axis.pcolormesh(*grid, v.reshape(grid[0].shape), vmin=0, vmax=top)
            figure.colorbar(image, ax=axis, label=f"{name} entropy (nats)")
            for c in range(5):
                axis.plot(*x[y == c].T, ".", ms=5, color=COLOURS[c], mec="white", mew=0.4)
            axis.set(title=method.replace("_", " "), aspect="equal")
    common.save_figure(plt, figure, path)


# ---- Main ---------------------------------------------------------------------------------------


def with_method(args, method, seed):
    """The options of one method: its repulsion and kernel, and its published prior."""
    options = common.with_options(args, seed=seed, **METHODS[method])
    if args.members == 1:  # ln 1 = 0 has no kernel
        options.repulsion = "none"
    if options.repulsion == "none":
        options.update = "wgd"
    if options.cauchy is None:
        options.cauchy = {"function": 1e-6, "feature": 1e-3 if args.dataset == "cifar10" else 5e-3
                          }.get(options.repulsion, 0.0)
    return options


def toy_set(args):
    """A toy's points, 50 times: an epoch of 50 full batches."""
    if args.dataset == "toy_regression":
        x, y = data.gapped_regression()
        # with one feature a unit gradient would be a sign, and nothing could repel
        x = torch.stack([x / 2, (x / 2).square()], 1)
    else:
        x, y = data.gaussian_ring(40)
    classes = 1 if y.is_floating_point() else 5
    return data.ImageSet(args.dataset, x[:, :, None, None].repeat(50, 1, 1, 1), y.repeat(50),
                         classes, (0.0, 0.0), (1.0, 1.0))


def training_set(args):
    """The training set with the published pixel statistics."""
    if args.dataset in TOYS:
        return toy_set(args)
    if args.features:
        return evenly(data.feature_set(args.features[0]), args.limit_train)
    dataset = data.load(args.dataset, "train", args.data_dir, seed=args.seed,
                        val_fraction=args.val_fraction, limit=args.limit_train)
    if args.dataset in STATISTICS:
        mean, std = STATISTICS[args.dataset]
        dataset = dataclasses.replace(dataset, mean=mean, std=std)
    return dataset


def load_sets(args, world) -> dict:
    """All sets of a run, before anything is trained: train, val or None, test, OOD sets by name,
    and `shift`: (name, kinds, function of kind and severity)."""
    def load(name, split="test", **changes):
        if name.endswith(".npz"):
            return data.feature_set(name, like)
        size = like.shape[-1] if name.startswith("folder:") else None
        return data.match(data.load(name, split, args.data_dir, seed=args.seed, image_size=size,
                                    **changes), like)

    with common.main_first(world):
        like = training_set(args)
        test = load(args.features[1]) if args.features else load(args.dataset)
        val = None
        if args.val_fraction:
            val = load(args.dataset, "val", val_fraction=args.val_fraction)
            if not len(val):
                raise UserError(f"--val-fraction {args.val_fraction} leaves no image; raise it")
        ood = {Path(name.removeprefix("folder:")).stem: load(name) for name in args.ood}
    return {"train": like, "val": val, "test": test, "ood": ood,
            "shift": shifted_sets(args, test, like, world)}


def shifted_sets(args, test, like, world):
    """(name, kinds, function of kind and severity) of the corrupted test sets of these options."""
    if args.shift == "none":
        return "", [], None
    if args.shift == "published":
        name = f"{args.dataset}_c"
        kinds = data.corruption_kinds(name, args.data_dir)
        if not kinds and world.is_main:
            print(f"{name} is not in {args.data_dir}: skipped (--shift computed makes corruptions "
                  f"of its own; {data.CORRUPTED[name][0]} is at {data.CORRUPTED[name][1]})")
        return args.dataset.replace("_", "") + "c", kinds, lambda kind, severity: evenly(
            data.match(data.load_corrupted(name, kind, severity, args.data_dir), like),
            args.shift_examples)
    some = evenly(test, args.shift_examples)
    name = "glyphs_c" if test.name == "glyphs" else f"{test.name}_computed_c"
    return name, list(data.CORRUPTIONS), lambda kind, severity: data.corrupted(some, kind, severity)


def run_name(args) -> str:
    width = f"-w{args.width:g}" if args.width != 1 else ""
    return args.name or f"{args.dataset}-{args.model}{width}-m{args.members}"


def method_suffix(args, method) -> str:
    single = len(args.methods) * args.runs == 1
    return "" if args.name and single else f"-{method}-seed{args.seed}"


def open_run(args, world, suffix, keys=TRAINING_OPTIONS):
    """The run directory of one ensemble, or of a comparison, whose results the options shape."""
    config = {k: getattr(args, k, None) for k in keys}
    return common.Run(args, "forde", run_name(args) + suffix, config, world)


def make_ensemble(args, world, num_classes, shape):
    """M networks on the device; member i of every method starts from the same weights."""
    nets = []
    for member in range(args.members):
        common.seed_all(args.seed, member)
        nets.append(make_network(args, num_classes, shape))
    if args.repulsion == "feature":
        for net in nets[1:]:
            net.head.load_state_dict(nets[0].head.state_dict())
    last = args.model != "mlp" and args.vectorise != "vmap"
    return nn.ModuleList(nets).to(
        world.device, memory_format=torch.channels_last if last else torch.contiguous_format)


def trained_ensemble(sets, run, args, world):
    """The ensemble of a run: trained, or read (--eval)."""
    nets = make_ensemble(args, world, sets["train"].num_classes, sets["train"].shape)
    if args.eval:
        state = run.load(required=True)
        if (done := state["progress"]["epoch"]) < args.epochs:
            raise UserError(f"{run.resume_from} has {done} of {args.epochs} epochs; finish it "
                            "first (the same command without --eval)")
        nets.load_state_dict(state["model"])
    else:
        train(nets, sets["train"], sets["val"], run, args, world)
    return nets


def run_method(method, seed, sets, args, world) -> dict:
    """Train one method's ensemble (unless it is trained), evaluate it, write its results."""
    args = with_method(args, method, seed)
    run = open_run(args, world, method_suffix(args, method))
    nets = trained_ensemble(sets, run, args, world)
    clock = common.Stopwatch(world.device)
    metrics = evaluate(nets, sets, args, world)
    run.results(metrics, {"train_s": sum(row["seconds"] for row in run.history),
                          "evaluate_s": clock.seconds()})
    run.say(f"{method}, seed {seed}: test accuracy {metrics['test/accuracy']:.4f}, NLL "
            f"{metrics['test/nll']:.4f} nats\n")
    return metrics


def run_methods(args, world) -> dict:
    """Every method with every seed; a comparison of means where there are several."""
    runs = {method: [] for method in args.methods}
    for seed in range(args.seed, args.seed + args.runs):
        sets = load_sets(common.with_options(args, seed=seed), world)
        for method in args.methods:
            runs[method].append(run_method(method, seed, sets, args, world))
    summary = {method: {k: mean_of([values[k] for values in rows]) for k in rows[0]}
               for method, rows in runs.items()}
    flat = {f"{method}/{k}": v for method, values in summary.items() for k, v in values.items()}
    errors = {f"{method}/{k}": error_of([values[k] for values in rows])
              for method, rows in runs.items() for k in rows[0]}
    single = len(runs) * args.runs == 1
    suffix = method_suffix(args, args.methods[0]) if single else \
        f"-comparison-seed{args.seed}-runs{args.runs}"
    run = open_run(args, world, suffix, ("methods", "runs", *TRAINING_OPTIONS))
    if not single:
        run.results(flat, {}, standard_error=errors, values=runs)
    if world.is_main:
        print(f"{run_name(args)}, mean of {args.runs} run(s)\n\n"
              f"{format_results(summary, sets)}\n", flush=True)
        if args.plot and shift_of(next(iter(summary.values()))) and (plt := common.pyplot()):
            plot_shift(plt, run.directory / "shift.png", summary)
            run.say(f"picture in {run.directory}")
    return runs[args.methods[0]][0] if single else flat


def mean_of(values):
    """Mean of the values that exist, None if none does (the NLL of errors, without errors)."""
    values = [v for v in values if v is not None]
    return float(np.mean(values)) if values else None


def error_of(values):
    values = [v for v in values if v is not None]
    return common.standard_error(values) if values else None


def run_toy(args, world) -> dict:
    """The paper's toys: what the members do where there are no data."""
    train_set, regression = toy_set(args), args.dataset == "toy_regression"
    sets = {"train": train_set, "val": None}
    points = len(train_set) // 50
    x, y = train_set.images[:points, :, 0, 0], train_set.labels[:points]
    if regression:
        line = torch.linspace(-10, 10, 400)
        inputs = torch.stack([line / 2, (line / 2).square()], 1)
    else:
        axis = torch.linspace(-12, 12, 120)
        grid = torch.meshgrid(axis, axis, indexing="xy")
        inputs = torch.stack([g.flatten() for g in grid], 1)
        test_x, test_y = data.gaussian_ring(20, seed=43)
    far = torch.cdist(inputs, x).min(1).values > (0.5 if regression else 3)
    as_set = lambda x, y: data.ImageSet("toy", x[:, :, None, None], y, train_set.num_classes,
                                        (0.0, 0.0), (1.0, 1.0))
    metrics, panels = {}, {}
    for method in args.methods:
        options = with_method(args, method, args.seed)
        run = open_run(options, world, method_suffix(options, method))
        nets = trained_ensemble(sets, run, options, world)
        out = predict(nets, as_set(inputs, torch.zeros(len(inputs)).to(y.dtype)), options, world)
        if regression:
            f = out[..., 0]
            fit = predict(nets, as_set(x, y), options, world)[..., 0]
            spread, error = f.std(0), (fit.mean(0) - y).square().mean().sqrt().item()
            own = {"train/rmse": error, "train/std_mean": fit.std(0).mean().item(),
                   "far/std_mean": spread[far].mean().item()}
            panels[method] = f.numpy()
        else:
            parts = common.ensemble_uncertainty(out)
            own = prefixed("test", predictive_metrics(
                predict(nets, as_set(test_x, test_y), options, world), test_y))
            own |= {f"far/{k}_mean": parts[k][far].mean().item() for k in ("total", "epistemic")}
            panels[method] = parts["total"].numpy(), parts["epistemic"].numpy()
        run.results(own, {"train_s": sum(row["seconds"] for row in run.history)})
        metrics |= {f"{method}/{k}": v for k, v in own.items()}
    if world.is_main:
        shown = [k.split("/", 1)[1] for k in metrics if k.startswith(f"{args.methods[0]}/")]
        print(common.format_table(["", *args.methods], [
            [k, *(None if metrics[f"{m}/{k}"] is None else f"{metrics[f'{m}/{k}']:.4g}"
                  for m in args.methods)] for k in shown]))
        if args.plot and (plt := common.pyplot()):
            run = open_run(args, world, f"-comparison-seed{args.seed}", ("methods",))
            run.open()
            if regression:
                line_x = 2 * x[:, 0]
                plot_toy_regression(plt, run.directory / "toy.png", line.numpy(), panels,
                                    line_x.numpy(), y.numpy())
            else:
                plot_toy_classification(plt, run.directory / "toy.png",
                                        [g.numpy() for g in grid], panels, x.numpy(), y.numpy())
            run.say(f"picture in {run.directory}")
    return metrics


def main(argv=None) -> dict:
    args = parse_args(argv)
    world = common.start_world(args.device)
    common.check_batch(args, world)
    return run_toy(args, world) if args.dataset in TOYS else run_methods(args, world)


if __name__ == "__main__":
    common.run_script(main)
