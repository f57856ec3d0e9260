"""First-order repulsive deep ensembles (FoRDE): members that repel in input-gradient space.

Trinh, Heinonen, Acerbi, Kaski, "Input-gradient space particle inference for neural network
ensembles", ICLR 2024, arXiv:2306.02775. Algorithm 1, for M members on the same batches:

  1. g_ib is the gradient of the true class's logit of member i with respect to input b.
  2. s_ib = A^T g_ib / |g_ib|. For FoRDE-PCA, A = U Lambda^(1/2), where the N normalised training
     images X have X^T X / (N - 1) = U Lambda U^T; for FoRDE-identity, A = I.
  3. k_ijb = exp(-|s_ib - s_jb|^2 / h_jb), h_jb = med_i |s_ib - s_jb|^2 / ln M (equation 17); s_jb
     and h_jb are constants.
  4. Minimise sum_i CE_i + R, R = (1/B) sum_i log[(1/B) sum_b sum_j k_ijb]. This is Wasserstein
     gradient descent on the posterior. Predict with the mean of the members' probabilities.

Usage:
  python forde.py                                          # glyphs, three methods, two CPU cores
  torchrun --nproc_per_node 8 forde.py --dataset cifar100  # the paper's: 10 members, 300 epochs
  python forde.py --dataset folder:images --model torchvision/resnet18  # your images and network
  python forde.py --dataset features --features train.npz test.npz      # your own features

Expected (more in tests/RESULTS.md): `python forde.py --runs 10`: NLL under corruption 0.541 +-
  0.007 (deep ensemble), by FoRDE-PCA 0.008 +- 0.003 and by FoRDE-identity 0.020 +- 0.004 lower; ECE
  by 0.9 +- 0.2 % and 0.6 +- 0.1 % lower (mean +- standard error of paired differences, n = 10).

Differences from the published code (github.com/AaltoPML/FoRDE, commit e8f9d74; JAX and Haiku):
  - The paper's Algorithm 1 doubles the exponent and has one bandwidth per example; the published
    code, which made the paper's results, has the form above. So does this script.
  - The basis is that of the images trained on; there, it includes held-out validation images.
  - The running variances of batch norm are unbiased, as in PyTorch; there, biased (.05 % lower).
  - An input gradient of zero length is a constant; there, its unit vector has derivative 1e12.
  - TinyImageNet is scaled to [0, 1] (there 0 to 255, with statistics of that scale).
  - Validation images are drawn by the seed; --published-split draws equal shares of the classes
    by scikit-learn's seed 88.
  - Nesterov momentum is always on (as there, where its flag is ignored); no warm-up (off there).
  - nll_miss is None where the ensemble makes no error (there NaN).
  - There is only FoRDE. Of what the paper compares it with, deep ensembles, weight-RDE,
    function-RDE, LIT and tuned lengthscales are here; node-BNN, SWAG, feature-RDE and the prior
    EmpCov are not.
  - New: --chunk, --repulse-every, pretrained networks, and --dataset features, which is not the
    paper's transfer experiment: no ViT, no corrupted sets; widths and epochs are ours.
"""

import argparse
import math
import time
from functools import partial
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs math, torch and torch.nn.functional as F.
#
# M members, B examples, K classes, D input dimensions. The repulsion of Algorithm 1 is
#   repulsion(log_kernel(unit_rows(g) @ A))
# with input gradients g [M, B, D] and A of `metric_root`.


def input_gradient(net, x, y, grad_of="logit"):
    """The logits [B, K] of a network, and the gradients g [B, D] of its true-class outputs by x.

    g_b = d/dx_b sum_b' f(x_b')[y_b']: f are the logits, or with grad_of "logprob" log
    probabilities (Ross et al. 2018). In training mode, batch norm couples the examples, and g
    includes that coupling (as published). g is differentiable with respect to the parameters,
    except under torch.no_grad(), where both are constants.
    """
    constant = not torch.is_grad_enabled()
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = net(x)
        outputs = logits
        if grad_of == "logprob":
            outputs = logits.log_softmax(1)
        of_label = outputs.gather(1, y[:, None])                       # [B, 1]
        # With a graph even for constants: the layers below then compute no gradients of weights.
        g, = torch.autograd.grad(of_label.sum(), x, create_graph=True)
    if constant:
        logits = logits.detach()
        g = g.detach()
    return logits, g.flatten(1)


def unit_rows(g, eps=1e-24):
    """g / sqrt(|g|^2 + eps) for rows g [..., D]; eps is the square of the paper's 1e-12.

    A row with |g|^2 <= eps has no direction. It becomes 0, a constant: the derivative of 1/|g|
    would exceed all others.
    """
    squared_length = g.square().sum(-1, keepdim=True)
    has_direction = squared_length > eps
    divisor = torch.where(has_direction, squared_length + eps, torch.inf)
    return g / divisor.sqrt()


def pca(second_moments):
    """Eigenvectors [D, D] as columns, and eigenvalues [D], largest first, of X^T X / (N - 1).

    second_moments: X^T X / (N - 1) [D, D], best in float64, for normalised images X [N, D].
    Normalising subtracts the mean of each channel, not that of each pixel. The result is float32.
    Both are as published.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(second_moments.double())
    return eigenvectors.flip(1).float(), eigenvalues.flip(0).clamp_min(0).float()


def metric_root(eigenvectors, eigenvalues, alpha=1.0):
    """A [D, D] with A A^T = Sigma^-1, so that distances are those of the rows s = u A.

    paper: appendix D.4, Sigma = alpha Lambda^-1 + (1 - alpha) I in the eigenbasis; PCA is alpha 1.
    With alpha 1 a common factor of the eigenvalues cancels, because it is in the bandwidth, too. A
    has the dtype of the eigenvectors, which must be that of the gradients: float32 after `pca`.
    """
    if alpha == 0:
        return eigenvectors
    precision = eigenvalues / (alpha + (1 - alpha) * eigenvalues).clamp_min(1e-30)
    return eigenvectors * precision.sqrt()


def squared_distances(s):
    """|s_i - s_j|^2 [M, M, ...] of rows s [M, ..., D]; s_j is a constant, i = j is included."""
    # By differences: in the products of a Gram matrix, nearly equal members would cancel.
    columns = []
    for other in s.detach():
        columns.append((s - other).square().sum(-1))                   # [M, ...]
    return torch.stack(columns, 1)


def log_kernel(s):
    """log k_ijb = -|s_ib - s_jb|^2 / h_jb [M, M, B] of s [M, B, D], M > 1, constant s_jb, h_jb.

    paper: equation (17), in the published code's form, h_jb = med_i |s_ib - s_jb|^2 / ln M + 1e-12
    """
    distance = squared_distances(s)                                    # [M, M, B]
    members = len(s)
    # The median over i includes i = j; of an even number it is the mean of the middle two.
    ranked = distance.detach().sort(0).values
    lower = ranked[(members - 1) // 2]
    upper = ranked[members // 2]
    median = (lower + upper) / 2                                       # [M, B]
    bandwidth = median / math.log(members) + 1e-12
    return -distance / bandwidth


def repulsion(log_k):
    """R = (1/B) sum_i log[(1/B) sum_b sum_j k_ijb] of log k [M, M, B]; 0 <= R <= M ln(M) / B.

    Its gradient is that of Wasserstein gradient descent, sum_i [sum_j grad k_ij / sum_j k_ij],
    because `log_kernel` has constant second arguments. B is the global batch size.
    """
    batch = log_k.shape[2]
    log_density = log_k.flatten(1).logsumexp(1) - math.log(batch)      # [M]
    return log_density.sum() / batch


def rbf_repulsion(points):
    """sum_i ln sum_j exp(-|p_i - p_j|^2 / h) of points [M, P], with constant p_j and h.

    The kernel of D'Angelo and Fortuin (2021): h = med / ln(M + 1), with one median over all M^2
    squared distances.
    """
    distance = squared_distances(points)                               # [M, M]
    median = distance.detach().flatten().quantile(0.5)
    bandwidth = median / math.log(len(points) + 1) + 1e-12
    return (-distance / bandwidth).logsumexp(1).sum()


def function_repulsion(logits, inverse_squared_scale=1e-6):
    """(1/B) [`rbf_repulsion` of the members' logits z [M, B, K] + sum ln(1 + z^2 / scale^2)].

    The second term is a Cauchy prior of scale 1000 on each logit (paper: appendix C.2).
    """
    prior = (inverse_squared_scale * logits.square()).log1p().sum()
    return (rbf_repulsion(logits.flatten(1)) + prior) / logits.shape[1]


def pairwise_cosines(g):
    """cos(g_i, g_j) of all pairs i < j of members [M (M - 1) / 2, B], from g [M, B, D]."""
    unit = unit_rows(g)
    cosines = torch.einsum("ibd,jbd->ijb", unit, unit)
    i, j = torch.triu_indices(len(g), len(g), 1, device=g.device)
    return cosines[i, j]


def local_independence(g):
    """LIT: the mean of cos^2(g_i, g_j) over pairs and examples, g [M, B, D].

    In Ross et al. (2018), g are gradients of log probabilities (--grad-of logprob).
    """
    return pairwise_cosines(g).square().mean()


def data_loss(logits, labels):
    """The cross entropy of logits [M, B, K] and labels [B], summed over members and examples."""
    every_label = labels.repeat(len(logits))                           # [M B]
    return F.cross_entropy(logits.flatten(0, 1), every_label, reduction="sum")


# ---- Model --------------------------------------------------------------------------------------
# FoRDE trains through the gradient by the input, so every layer must be differentiable twice.
# PyTorch's are, but of convolutions the second derivative is slow, and of batch norm and ReLU it
# takes many small operations. `make_network` gives these layers of any network the classes below.


class Convolution(torch.autograd.Function):
    """F.conv2d(x, weight, None, stride, padding), twice differentiable.

    PyTorch differentiates the gradient by x by means of a convolution whose kernel is as large as
    the image. Here this gradient is a transposed convolution, and is differentiated as one.

    Only for gradients by inputs: in a backward pass with create_graph (which autograd shows by
    torch.is_grad_enabled()), the gradient by the weight is not computed, but None. To
    differentiate gradients by weights, use nn.Conv2d.
    """

    @staticmethod
    def forward(ctx, x, weight, stride, padding):
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        ctx.padding = padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            beyond = []  # rows and columns at the end of x that no kernel reaches
            sizes = zip(x.shape[2:], weight.shape[2:], ctx.padding, ctx.stride)
            for size, kernel, padding, stride in sizes:
                beyond.append((size + 2 * padding - kernel) % stride)
            grad_x = F.conv_transpose2d(grad, weight, None, ctx.stride, ctx.padding, beyond)
            return grad_x, None, None, None
        wanted = (ctx.needs_input_grad[0], True, False)
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, wanted)
        return grad_x, grad_weight, None, None


class Conv2d(nn.Conv2d):
    """nn.Conv2d by `Convolution`."""

    def _conv_forward(self, x, weight, bias):
        if torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()
            weight = weight.bfloat16()
        stride = self.stride
        if self.kernel_size == (1, 1) and self.padding == (0, 0) and stride != (1, 1):
            # Subsample: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
            x = F.avg_pool2d(x, 1, stride)
            stride = (1, 1)
        y = Convolution.apply(x, weight, stride, self.padding)
        if bias is not None:
            y = y + bias.to(y)[:, None, None]
        return y


class SameConv2d(Conv2d):
    """A 3x3 convolution without bias, padded to ceil(size / stride) outputs."""

    def __init__(self, c_in, c_out, stride=1):
        padding = 1 if stride == 1 else 0
        super().__init__(c_in, c_out, 3, stride, padding, bias=False)

    def forward(self, x):
        if self.stride == (2, 2):
            # published code: JAX pads even sizes only at the end
            height, width = x.shape[2:]
            x = F.pad(x, (width % 2, 1, height % 2, 1))
        return super().forward(x)


def by_channel(values, x):
    """values [C] in the shape that broadcasts over x [B, C] or [B, C, H, W]."""
    shape = [-1] + [1 for _ in x.shape[2:]]
    return values.view(shape)


def sum_by_channel(x):
    """The sums [C] of x [B, C] or [B, C, H, W], in float32 if x is bfloat16."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.sum([dim for dim in range(x.ndim) if dim != 1], dtype=dtype)


def batch_norm_gradient(g, x, weight, mean, inv_std, count):
    """d(g) of `BatchNormGradient`, and the sums [C] of g x' and of g over this process's examples.

    count: number of values of a channel in the global batch
    """
    alone = common.world_size() == 1
    var = None if alone else inv_std**-2
    # In one process, this is the equation; otherwise, so far, that of a constant mean and std.
    d_g, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
        g, x, weight, mean, var, mean, inv_std, alone, 0.0, (True, True, True))
    if not alone:
        mean_gx, mean_g = common.all_reduce(torch.stack([sum_gx, sum_g])) / count
        scale = weight * inv_std
        # Not F.batch_norm, which PyTorch 2.11 refuses to call with eps 0.
        of_means = torch.native_batch_norm(x, scale * mean_gx, scale * mean_g, mean, var, False,
                                           0.0, 0.0)[0]
        d_g = d_g - of_means
    return d_g, sum_gx, sum_g


class BatchNormGradient(torch.autograd.Function):
    """The gradient d(g) of batch norm by its input x, for the gradient g of its output.

    With x' = (x - mean) / std, and <.> the mean over the n values of a channel:
      d(g) = (weight / std) (g - <g> - x' <g x'>)
    For a gradient v of d(g), and k = <v g> - <v> <g> - <v x'> <g x'>, the gradient
      by g       is d(v)
      by weight  is n k / std
      by x       is -(<g x'> d(v) + <v x'> d(g) + k (weight / std) x') / std
    """

    @staticmethod
    def forward(ctx, g, x, weight, mean, inv_std, count):
        d_g, sum_gx, sum_g = batch_norm_gradient(g, x, weight, mean, inv_std, count)
        ctx.save_for_backward(g, x, weight, mean, inv_std, d_g.detach(), sum_gx, sum_g)
        ctx.count = count
        ctx.mark_non_differentiable(sum_gx, sum_g)
        ctx.set_materialize_grads(False)
        return d_g, sum_gx, sum_g

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v, *_):
        g, x, weight, mean, inv_std, d_g, sum_gx, sum_g = ctx.saved_tensors
        d_v, sum_vx, sum_v = batch_norm_gradient(v, x, weight, mean, inv_std, ctx.count)
        sums = [sum_gx, sum_g, sum_vx, sum_v, sum_by_channel(v * g)]
        if common.world_size() > 1:
            sums = common.all_reduce(torch.stack(sums))
        sum_gx, sum_g, sum_vx, sum_v, sum_vg = sums
        products = torch.addcmul(sum_v * sum_g, sum_vx, sum_gx)
        grad_weight = (sum_vg - products / ctx.count) * inv_std

        scale = inv_std / -ctx.count
        # The term with x' is a batch norm by constants, to which the other two are added.
        of_x = scale * weight * grad_weight
        grad_x = torch.native_batch_norm(x, of_x, None, mean, inv_std**-2, False, 0.0, 0.0)[0]
        grad_x.addcmul_(by_channel(scale * sum_gx, x), d_v)
        grad_x.addcmul_(by_channel(scale * sum_vx, x), d_g)
        if common.world_size() > 1:
            grad_weight = grad_weight / common.world_size()  # the processes' are added up
        return d_v, grad_x, grad_weight, None, None, None


class BatchNormTraining(torch.autograd.Function):
    """Batch norm of x by the statistics of the global batch, which move the running averages.

    As in `Convolution`, a backward pass with create_graph does not give the gradients by weight
    and bias, but None.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps):
        count = x.numel() / x.shape[1]
        if common.world_size() == 1:
            y, mean, inv_std = torch.native_batch_norm(x, weight, bias, running_mean, running_var,
                                                       True, momentum, eps)
        else:
            # The number of values travels with the sums, because processes may differ in it.
            sums = torch.cat([sum_by_channel(x), weight.new_full((1,), count)])
            count = common.all_reduce(sums)[-1]
            mean = sums[:-1] / count                                   # [C]
            squares = (x - by_channel(mean, x)).square()
            var = common.all_reduce(sum_by_channel(squares)) / count
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var * count / (count - 1), momentum)     # PyTorch's: unbiased
            y = F.batch_norm(x, mean, var, weight, bias, eps=eps)
            inv_std = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inv_std)
        ctx.count = count
        return y

    @staticmethod
    def backward(ctx, g):
        grad_x, grad_weight, grad_bias = BatchNormGradient.apply(g, *ctx.saved_tensors, ctx.count)
        if torch.is_grad_enabled():  # with create_graph
            grad_weight = None
            grad_bias = None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class BatchNorm(nn.Module):
    """nn.BatchNorm1d or nn.BatchNorm2d, in training mode by `BatchNormTraining`."""

    def forward(self, x):
        statistics = (self.running_mean, self.running_var)
        if not self.training:
            return F.batch_norm(x, *statistics, self.weight, self.bias, eps=self.eps)
        if x.numel() == x.shape[1] and common.world_size() == 1:
            raise ValueError(f"batch norm needs more than one value per channel, got {x.shape}")
        return BatchNormTraining.apply(x, self.weight, self.bias, *statistics, self.momentum,
                                       self.eps)


class Rectifier(torch.autograd.Function):
    """max(x, 0). PyTorch's adds zeros, the derivative by x, to the gradients of a gradient."""

    @staticmethod
    def forward(ctx, x):
        y = x.relu()
        ctx.save_for_backward(y.detach())  # a constant, which has no derivative
        return y

    @staticmethod
    def backward(ctx, grad):
        y, = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0)


class ReLU(nn.ReLU):
    """nn.ReLU by `Rectifier`."""

    def forward(self, x):
        return Rectifier.apply(x)


def ease_second_derivatives(net):
    """Give layers of `net` the classes above; parameters and buffers stay the same objects."""
    for module in net.modules():
        if type(module) is nn.Conv2d:
            padding = (module.padding_mode, type(module.padding))
            if padding == ("zeros", tuple) and module.dilation == (1, 1) and module.groups == 1:
                module.__class__ = Conv2d
        elif type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
            if module.affine and module.track_running_stats and module.momentum is not None:
                module.__class__ = BatchNorm
        elif type(module) is nn.ReLU:
            module.__class__ = ReLU


class BasicBlock(nn.Module):
    """ReLU(body(x) + shortcut(x)), with batch norm after each convolution."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.body = nn.Sequential(
            SameConv2d(c_in, c_out, stride), nn.BatchNorm2d(c_out), nn.ReLU(),
            SameConv2d(c_out, c_out), nn.BatchNorm2d(c_out))
        self.shortcut = nn.Sequential()
        if stride > 1 or c_in != c_out:
            projection = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(c_out))
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(self.body(x) + self.shortcut(x))


class PreActivationBlock(nn.Module):
    """body(h) + shortcut, with h = ReLU(BN(x)): batch norm before each convolution."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(c_in), nn.ReLU())
        self.body = nn.Sequential(SameConv2d(c_in, c_out, stride), nn.BatchNorm2d(c_out),
                                  nn.ReLU(), SameConv2d(c_out, c_out))
        self.projection = None
        if stride > 1 or c_in != c_out:
            self.projection = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x):
        h = self.before(x)
        if self.projection is None:
            return self.body(h) + x
        return self.body(h) + self.projection(h)


# Each of the following functions builds one network for inputs of `shape` (C, H, W): it returns a
# list of layers and the number of features that the last one gives.


def channels(counts, args):
    """Numbers of channels times --width."""
    return [max(1, round(count * args.width)) for count in counts]


def groups_of_blocks(block, c_in, widths, blocks):
    """Groups of blocks, each of one width; all but the first start by halving the resolution."""
    layers = []
    for group, c_out in enumerate(widths):
        for index in range(blocks):
            stride = 2 if group > 0 and index == 0 else 1
            layers.append(block(c_in, c_out, stride))
            c_in = c_out
    return layers


def resnet(args, shape, blocks):
    """Four groups of basic blocks after a 3x3 convolution of stride 1, without a max pool."""
    widths = channels((64, 128, 256, 512), args)
    c_in = widths[0]
    layers = [SameConv2d(shape[0], c_in), nn.BatchNorm2d(c_in), nn.ReLU()]
    layers += groups_of_blocks(BasicBlock, c_in, widths, blocks)
    return layers + [nn.AdaptiveAvgPool2d(1), nn.Flatten()], widths[-1]


def preact_resnet18(args, shape):
    widths = channels((64, 128, 256, 512), args)
    return preact_resnet(shape, widths[0], widths)


def wrn_16_4(args, shape):
    return preact_resnet(shape, 16, channels((64, 128, 256), args))


def preact_resnet(shape, c_in, widths):
    """Groups of two pre-activation blocks after a 3x3 convolution with `c_in` channels."""
    layers = [SameConv2d(shape[0], c_in)] + groups_of_blocks(PreActivationBlock, c_in, widths, 2)
    c_out = widths[-1]
    layers += [nn.BatchNorm2d(c_out), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_out


def mlp(args, shape):
    """Linear layers with batch norm and ReLU."""
    layers = [nn.Flatten()]
    c_in = math.prod(shape)
    for c_out in channels(args.hidden, args):
        layers += [nn.Linear(c_in, c_out), nn.BatchNorm1d(c_out), nn.ReLU()]
        c_in = c_out
    return layers, c_in


PUBLISHED_NETWORKS = {"resnet9": partial(resnet, blocks=1), "resnet18": partial(resnet, blocks=2),
                      "wrn_16_4": wrn_16_4, "preact_resnet18": preact_resnet18, "mlp": mlp}
# To add a network of your own, add its function here; it keeps the weights that it is made with.
NETWORKS = PUBLISHED_NETWORKS | {}


def make_network(args, num_classes, shape):
    """One member for inputs of `shape` (C, H, W), which returns logits.

    The networks above are initialised as published. Others, which may be pretrained, keep their
    weights; only their heads are drawn anew, because members that start equal would stay equal.
    """
    backbone, head = data.backbone_and_head(args, NETWORKS, num_classes, shape)
    if args.model in PUBLISHED_NETWORKS:
        initialise(backbone)
        # published code: the last layer starts at zero, so the first forces are zero, too.
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    else:
        initialise(head)
    net = nn.Sequential(backbone, head)
    ease_second_derivatives(net)
    return net


def initialise(net):
    """Draw the weights of linear layers and convolutions by Haiku's default; biases are zero."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            # std 1 / sqrt(fan_in), cut at two standard deviations
            std = module.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def make_ensemble(args, seed, num_classes, shape):
    """M networks on the device; member i of every method starts from the same weights."""
    nets = []
    for member in range(args.members):
        common.seed_all(seed, member)
        nets.append(make_network(args, num_classes, shape))
    memory_format = torch.channels_last if channels_last(args) else torch.contiguous_format
    return nn.ModuleList(nets).to(args.device, memory_format=memory_format)


def channels_last(args):
    """Whether images are in channels-last memory: second derivatives on CPUs are slower in it."""
    return args.device.type == "cuda" and args.model != "mlp"


# ---- Training -----------------------------------------------------------------------------------


class Members(nn.Module):
    """Some or all members of an ensemble, which DistributedDataParallel can wrap."""

    def __init__(self, nets):
        super().__init__()
        self.nets = nets

    def forward(self, x, y, method, grad_of):
        """Logits [C, B, K], and what repels in this method, particles [C, B, ...]; float32."""
        logits = []
        particles = []
        for net in self.nets:
            if method in ("deep_ensemble", "weight_rde", "function_rde"):
                f = net(x)                                             # [B, K]
                points = f if method == "function_rde" else f[:, :0]
            else:
                f, points = input_gradient(net, x, y, grad_of)         # [B, K], [B, D]
            logits.append(f)
            particles.append(points)
        # bfloat16 is not precise enough for losses and distances; float64 stays.
        dtype = torch.promote_types(f.dtype, torch.float32)
        return torch.stack(logits).to(dtype), torch.stack(particles).to(dtype)


# R of the other methods than FoRDE, from their particles [M, B, ...]; that of no particles is 0.
BASELINES = {"deep_ensemble": torch.sum, "weight_rde": torch.sum,
             "function_rde": function_repulsion, "lit": local_independence}


def chunked_forward(chunks, x, *others):
    """The outputs of all Members, by gradient checkpointing over chunks of them.

    Only one chunk's activations are in memory at a time: the backward pass computes them again,
    with the same dropout masks.
    """
    x.requires_grad_()  # or else the backward pass would not reach a checkpoint
    outputs = []
    for chunk in chunks:
        outputs.append(checkpoint(chunk, x, *others, use_reentrant=True))
        set_momentum(chunk, 0.0)  # the running averages do not move again
    logits, particles = map(torch.cat, zip(*outputs))
    return logits, particles


def own_rows(everyone):
    """The rows [M, b, ...] of this process in a global batch [M, B, ...], as a view."""
    return everyone.tensor_split(common.world_size(), 1)[common.rank()]


def global_batch(particles, batch):
    """Particles [M, B, ...] of all processes, from those of this process [M, b, ...]."""
    everyone = particles.new_zeros(len(particles), batch.global_size, *particles.shape[2:])
    own_rows(everyone).copy_(particles)
    return common.all_reduce(everyone)


def ensemble_step(chunks, batch, metric, method, args):
    """Algorithm 1 on one batch: add the gradient of sum_i CE_i + R to those of the parameters.

    chunks: of `make_chunks`; metric: A of `metric_root`, None for the identity. Returns the cross
    entropy, summed over members and this process's examples, R, and the logits [M, b, K].
    """
    # 1. The input gradients of all members. Baselines have other particles.
    inputs = (batch.images, batch.labels, method, args.grad_of)
    with common.autocast(args):
        if len(chunks) == 1:
            logits, particles = chunks[0](*inputs)                     # [M, b, K], [M, b, D]
        else:
            logits, particles = chunked_forward(chunks, *inputs)

    # Members repel over the global batch.
    g = global_batch(particles.detach(), batch).requires_grad_()       # [M, B, D]
    if method in BASELINES:
        R = BASELINES[method](g)
    else:
        # 2. Unit vectors: only the directions of the gradients count.
        s = unit_rows(g)                                               # [M, B, D]
        if metric is not None:
            s = s @ metric.to(s)
        # 3. The kernel between members, which is summed over examples and members j.
        log_k = log_kernel(s)                                          # [M, M, B]
        R = repulsion(log_k)

    # 4. The loss. `surrogate` has the gradient of R by the weights: the product of dR / dg, taken
    # as a constant, and the gradient of this process's particles g by the weights.
    grad_R = own_rows(torch.autograd.grad(R, g)[0])                    # [M, b, D]
    surrogate = (particles * grad_R).sum()
    loss = data_loss(logits, batch.labels)
    total = loss / batch.global_size + args.repulsion_coef * surrogate
    # The backward pass, also through the input gradients. DDP averages over the processes.
    (total * common.world_size()).backward()
    return loss.detach(), R.detach(), logits.detach()


def repel_weights(nets, num_train, args):
    """Weight-RDE: add the gradient of R, `rbf_repulsion` of the weights over N; returns R."""
    points = []
    for net in nets:
        weights = [p.flatten() for p in net.parameters()]
        points.append(torch.cat(weights))
    points = torch.stack(points)                                       # [M, P]
    # The cross entropy is a mean over examples, so the prior is divided by their number.
    R = rbf_repulsion(points) / num_train
    (args.repulsion_coef * R).backward()
    return R.detach()


def set_momentum(nets, momentum):
    """Set how far a step moves the running statistics of batch norm."""
    for module in nets.modules():
        if isinstance(module, (BatchNorm, nn.modules.batchnorm._BatchNorm)):
            module.momentum = momentum


def learning_rate(step, steps_per_epoch, args):
    """The learning rate at a step, counted from the start of training."""
    if args.schedule == "published":
        # With t = epoch / epochs: constant to t = 0.5, linear to t = 0.9, constant.
        t = (step // steps_per_epoch) / args.epochs
        decay = min(1.0, max(0.0, (t - 0.5) / 0.4))
        return args.lr * (1 - (1 - args.lr_ratio) * decay)
    # one_cycle: a linear warm-up in the first fifth of the steps, then linearly to zero
    total = args.epochs * steps_per_epoch
    warm_up = 0.2 * total
    if step < warm_up:
        return args.lr * ((step + 1) / (warm_up + 1))
    return args.lr * ((total - step) / (total - warm_up))


def make_chunks(nets, args):
    """The members as a list of Members, --chunk at a time, distributed over the processes."""
    size = args.chunk or args.members
    chunks = []
    for first in range(0, args.members, size):
        members = Members(nets[first:first + size])
        chunks.append(common.data_parallel(members, args.device))
    return chunks


def train(nets, train_set, metric, method, args, seed, run):
    """Train all members together, on the same batches; save and resume their checkpoint."""
    name = f"{method}-seed{seed}"
    chunks = make_chunks(nets, args)
    # Fused: one operation updates all parameters.
    optimiser = torch.optim.SGD(nets.parameters(), lr=args.lr, momentum=0.9, nesterov=True,
                                weight_decay=args.weight_decay, fused=args.device.type == "cuda")
    # The order and the augmentation of the images depend only on the seed and the epoch.
    # published code: the last, smaller batch of an epoch is dropped
    augment = "crop_flip" if args.augment else "none"
    loader = data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, drop_last=True, augment=augment,
                         workers=args.workers, channels_last=channels_last(args))
    # A checkpoint of other training images or pretrained weights is refused.
    made_from = data.origin(train_set, args)
    history = run.resume(name, args.epochs, made_from, net=nets, optimiser=optimiser)
    for epoch in range(len(history), args.epochs):
        common.seed_all(seed, epoch, common.rank())  # for networks with dropout
        row = train_epoch(nets, chunks, loader, optimiser, epoch, metric, method, args)
        history.append(row)
        run.save(name, history, made_from, net=nets, optimiser=optimiser)


def train_epoch(nets, chunks, loader, optimiser, epoch, metric, method, args):
    """Train all members for one epoch; returns the row of the history.

    Its repulsion is R before --repulsion-coef, the mean over the steps that repel.
    """
    start = time.perf_counter()
    nets.train()
    totals = torch.zeros(2, device=args.device)  # cross entropy, correct predictions
    Rs = []
    for step, batch in enumerate(common.progress(loader, epoch)):
        # Functions of the step: a resumed run needs no state of a scheduler.
        global_step = epoch * len(loader) + step
        lr = learning_rate(global_step, len(loader), args)
        optimiser.param_groups[0]["lr"] = lr
        # published code: averages with decay 0.9, divided by 1 - 0.9^t after t steps
        set_momentum(nets, 0.1 / (1 - 0.9 ** (global_step + 1)))

        optimiser.zero_grad()
        step_method = method if global_step % args.repulse_every == 0 else "deep_ensemble"
        loss, R, logits = ensemble_step(chunks, batch, metric, step_method, args)
        if step_method == "weight_rde":
            R = repel_weights(nets, len(loader.dataset), args)
        optimiser.step()

        totals[0] += loss
        totals[1] += (logits.argmax(2) == batch.labels).sum()
        if step_method != "deep_ensemble":
            Rs.append(R)
    # All batches are of one size.
    predictions = len(loader) * batch.global_size * args.members
    loss, accuracy = (common.all_reduce(totals) / predictions).tolist()
    row = {"epoch": epoch + 1, "loss": loss, "accuracy": accuracy, "lr": lr,
           "seconds": time.perf_counter() - start}
    if Rs:
        row["repulsion"] = torch.stack(Rs).mean().item()
    return row


# ---- Evaluation ---------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """The predictions of an ensemble for one set, in the order of the set, on the CPU."""

    log_probs: Tensor  # [M, N, K] float32
    labels: Tensor     # [N]
    ms: float          # time of the pass over the set, in milliseconds per example


def batches_of(dataset, args):
    """The batches of a whole set, in its order."""
    loader = data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                         channels_last=channels_last(args))
    return loader.epoch()


@torch.no_grad()
def forward(nets, dataset, args):
    """The Outputs for a whole set in eval mode; None for None, and on all other processes."""
    if dataset is None:
        return None
    nets.eval()
    start = time.perf_counter()
    batches = []
    for batch in batches_of(dataset, args):
        with common.autocast(args):
            logits = torch.stack([net(batch.images) for net in nets], 1)   # [b, M, K]
        batches.append({"index": batch.index, "log_probs": logits.float().log_softmax(2)})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    ms = 1000 * (time.perf_counter() - start) / len(dataset)
    return Outputs(columns["log_probs"].transpose(0, 1), dataset.labels, ms)


@torch.no_grad()
def gradient_distance(nets, dataset, args):
    """Mean of 1 - cos of two members' input gradients in eval mode, over pairs and examples.

    A gradient of zeros, which a head of zeros has before training, counts as orthogonal to all.
    """
    if len(nets) == 1:
        return 0.0
    nets.eval()
    total = torch.zeros((), device=args.device)
    for batch in batches_of(dataset, args):
        gradients = []
        with common.autocast(args):
            for net in nets:
                _, g = input_gradient(net, batch.images, batch.labels, args.grad_of)
                gradients.append(g)
        cosines = pairwise_cosines(torch.stack(gradients))             # [M (M - 1) / 2, b]
        total += (1 - cosines).mean(0).sum()
    return common.all_reduce(total).item() / len(dataset)


def uncertainties(log_probs):
    """`common.ensemble_uncertainty` of log_probs [M, N, K], which must be finite."""
    if not log_probs.isfinite().all():
        raise UserError("the outputs of a member are not finite; train again with a lower --lr")
    return common.ensemble_uncertainty(log_probs)


def mean_log_probs(log_probs):
    """Log of the mean of the members' probabilities [N, K], float64, of log_probs [M, N, K]."""
    # In blocks: the corrupted sets of CIFAR-100 would take 1.5 GB in float64.
    blocks = [block.double().logsumexp(0) for block in log_probs.split(10_000, 1)]
    return torch.cat(blocks) - math.log(len(log_probs))


def disagreement(log_probs):
    """Fraction of ordered pairs of members that predict different classes; log_probs [M, N, K]."""
    members, _, num_classes = log_probs.shape
    if members == 1:
        return 0.0
    votes = F.one_hot(log_probs.argmax(2), num_classes).sum(0)         # [N, K]
    agreeing_pairs = (votes * (votes - 1)).sum(1)                      # [N]
    share = agreeing_pairs.double() / (members * (members - 1))
    return 1 - share.mean().item()


def moments(uncertainty):
    """Mean and population standard deviation over a set of its `uncertainties`."""
    metrics = {}
    for name, values in uncertainty.items():
        metrics[f"{name}_mean"] = values.mean()
        metrics[f"{name}_std"] = values.std(correction=0)
    return metrics


def set_row(name, outputs, key):
    """Metrics of the mean prediction for one set; key: {"method": ..., "seed": ...}.

    nll_miss is the NLL of its errors.
    """
    log_probs = outputs.log_probs
    labels = outputs.labels
    uncertainty = uncertainties(log_probs)
    mean = mean_log_probs(log_probs)
    probs = mean.exp()
    wrong = probs.argmax(1) != labels
    nll_miss = common.nll(mean[wrong], labels[wrong]) if wrong.any() else None
    row = {**key, "set": name, "n": len(labels), "accuracy": common.accuracy(probs, labels),
           "nll": common.nll(mean, labels), "nll_miss": nll_miss,
           "ece15": common.ece(probs, labels), "brier": common.brier(probs, labels)}
    for k in (2, 3):
        if k <= probs.shape[1]:
            row[f"top{k}_accuracy"] = common.top_k_accuracy(probs, labels, k)
    row["member_accuracy"] = np.mean([common.accuracy(own, labels) for own in log_probs])
    row["disagreement"] = disagreement(log_probs)
    return row | moments(uncertainty)


def clean_rows(test_name, outputs, distance, key):
    """The rows of the test set, of the validation set, and of the test set against OOD sets.

    outputs: data.Sets of Outputs; distance: of the test set's input gradients
    """
    test = outputs.test
    row = set_row(test_name, test, key) | {"gradient_distance": distance, "ms": test.ms}
    rows = [row]
    if outputs.val is not None:
        rows.append(set_row("val", outputs.val, key))
        on_val = mean_log_probs(outputs.val.log_probs)
        row["temperature"] = common.fit_temperature(on_val, outputs.val.labels)
        # Logarithms of probabilities are logits: their softmax gives the probabilities back.
        logits = mean_log_probs(test.log_probs) / row["temperature"]
        scaled = logits.log_softmax(1)
        row["nll_scaled"] = common.nll(scaled, test.labels)
        row["ece15_scaled"] = common.ece(scaled.exp(), test.labels)
    inside = uncertainties(test.log_probs)
    for name, of_set in outputs.ood.items():
        outside = uncertainties(of_set.log_probs)
        # The moments are those of the OOD set.
        row = {**key, "set": test_name, "against": name, "n": len(test.labels), **moments(outside)}
        for score in ("total", "epistemic"):
            found = common.ood_metrics(inside[score], outside[score], larger_means="ood")
            for metric, value in found.items():
                row[f"{metric}_{score}"] = value
        rows.append(row)
    return rows


class Shift(NamedTuple):
    """The corrupted test sets of a run."""

    name: str        # of all of them together
    kinds: list      # of corruption
    read: Callable   # read(kind, severity) is one set


def find_shift(test_set, args):
    """The Shift of these options; None if there is none."""
    if args.shift == "none":
        return None
    if args.shift == "published":
        name = f"{args.dataset}_c"
        kinds = data.corruption_kinds(name, args.data_dir)
        if not kinds:
            if "shift" in args.given:
                raise UserError(f"--shift published: {name} not found; use --shift none or "
                                "computed")
            return None
        read = partial(data.load_corrupted, name, data_dir=args.data_dir,
                       preparation=test_set.preparation)
        return Shift(data.corrupted_name(name, kinds), kinds, read)
    data.check_sizes(test_set, limit=args.shift_examples or math.inf)
    clean = data.evenly(test_set, args.shift_examples or None)
    if isinstance(clean, data.StreamedSet):
        clean = common.on_each_machine(clean.in_memory)
    # These corruptions are not those of the published -C sets.
    name = "glyphs_c" if test_set.name == "glyphs" else f"{test_set.name}_computed_c"
    return Shift(name, list(data.CORRUPTIONS), partial(data.corrupted, clean))


DIVERSITY_EXAMPLES = 1000  # of a test set, for the input gradients
# What is averaged over the severities, and drawn, and its name in the picture.
SHIFT_METRICS = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece15": "ECE, 15 bins",
                 "disagreement": "disagreement of members",
                 "epistemic_mean": "epistemic uncertainty (nats)",
                 "gradient_distance": "1 - cos of input gradients"}


def severity_rows(outputs, distance, name, severity, key):
    """The row of all kinds of corruption as one set, which is printed, then a row of each kind.

    outputs: {kind: Outputs}; distance: of input gradients; name: of the Shift
    """
    log_probs = torch.cat([of_kind.log_probs for of_kind in outputs.values()], 1)
    labels = torch.cat([of_kind.labels for of_kind in outputs.values()])
    row = set_row(f"{name}_s{severity}", Outputs(log_probs, labels, None), key)
    common.print_on_main(f"{row['method']}-seed{row['seed']}: {row['set']}, {row['n']} images: "
                         f"accuracy {row['accuracy']:.4f}, NLL {row['nll']:.4f}")
    rows = [row | {"severity": severity, "gradient_distance": distance}]
    for kind, of_kind in outputs.items():
        row = set_row(f"{name}_{kind}_s{severity}", of_kind, key)
        rows.append(row | {"severity": severity, "kind": kind})
    return rows


def evaluate_shift(nets, shift, test_set, args, key):
    """The rows of each severity, and of their mean."""
    rows = []
    for severity in data.SEVERITIES:
        outputs = {}
        distances = []
        for kind in shift.kinds:
            dataset = data.match(shift.read(kind, severity), test_set)
            dataset = data.evenly(dataset, args.shift_examples or None)
            outputs[kind] = forward(nets, dataset, args)
            some = data.evenly(dataset, math.ceil(DIVERSITY_EXAMPLES / len(shift.kinds)))
            distances.append(gradient_distance(nets, some, args))
        distance = np.mean(distances)
        rows += common.on_main(severity_rows, outputs, distance, shift.name, severity, key)
    pooled = [row for row in rows if "kind" not in row]
    mean = {**key, "set": shift.name, "n": sum(row["n"] for row in pooled)}
    for metric in SHIFT_METRICS:
        mean[metric] = np.mean([row[metric] for row in pooled])
    return rows + [mean]


def evaluate(nets, sets, shift, args, key):
    """All rows of one ensemble."""
    ood = {name: forward(nets, dataset, args) for name, dataset in sets.ood.items()}
    outputs = data.Sets(None, forward(nets, sets.val, args), forward(nets, sets.test, args), ood,
                        None)
    some = data.evenly(sets.test, DIVERSITY_EXAMPLES)
    distance = gradient_distance(nets, some, args)
    rows = common.on_main(clean_rows, sets.test.name, outputs, distance, key)
    if shift is not None:
        rows += evaluate_shift(nets, shift, sets.test, args, key)
    size = sum(tensor.nbytes for tensor in nets.state_dict().values())
    cost = {"ms": rows[0]["ms"], "bytes": size}
    return [row | cost for row in rows]


# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "disagreement", "gradient_distance", "auroc_total",
           "auroc_epistemic", "epistemic_mean"]


def paired_differences(rows):
    """Rows of each method minus those of the first one, which has the same seeds and batches."""
    baseline = rows[0]["method"]
    first = {}
    differences = []
    for row in rows:
        key = (row["seed"], row["set"], row.get("against"))
        if row["method"] == baseline:
            first[key] = row
            continue
        difference = {"method": f"{row['method']} - {baseline}"}
        for name in ("seed", "set", "against", "n", "severity", "kind"):
            if name in row:
                difference[name] = row[name]
        for name in COLUMNS:
            if name in row:
                difference[name] = row[name] - first[key][name]
        differences.append(difference)
    return differences


def write_predictions(predictions, sets, run):
    """predictions.csv from {method: Outputs}, the columns of a deep ensemble last."""
    methods = sorted(predictions, key=lambda method: method == "deep_ensemble")
    log_probs = {method: predictions[method].log_probs for method in methods}
    columns = common.prediction_columns(sets.predict, log_probs, sets.train.classes)
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------

PLANE_SIDE = 120  # points per side of the toy's picture
PLANE_LIMIT = 12  # its largest coordinate
TITLES = {"deep_ensemble": "deep ensemble", "forde_pca": "FoRDE-PCA",
          "forde_identity": "FoRDE-identity", "forde_tuned": "FoRDE, tuned",
          "weight_rde": "weight-RDE", "function_rde": "function-RDE", "lit": "LIT"}


def plot_shift(rows, test_name, shift_name, run):
    """SHIFT_METRICS by severity (0 is clean), with standard errors over the seeds."""
    sets = [test_name] + [f"{shift_name}_s{severity}" for severity in data.SEVERITIES]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = common.make_figure(2, 3, figsize=(11, 6.5))
    for axis, (metric, label) in zip(axes.flat, SHIFT_METRICS.items()):
        for method, colour, marker in zip(methods, common.colours(len(methods)), "osD^vP*"):
            mean = []
            error = []
            for name in sets:
                found = [row[metric] for row in rows if row["method"] == method
                         and row["set"] == name and "against" not in row]
                mean.append(np.mean(found))
                error.append(common.standard_error(found) or 0)
            axis.errorbar(range(len(sets)), mean, error, marker=marker, ms=4, capsize=2,
                          color=colour, label=TITLES[method])
        axis.set(xlabel=f"severity ({shift_name}; 0 is clean)", ylabel=label)
    axes[0, 0].legend(frameon=False)
    run.save_figure(figure, "shift.png")


def plot_toy(points, predictions, run):
    """Epistemic uncertainty over the plane; predictions {method: Outputs}."""
    figure, axes = common.make_figure(1, len(predictions), figsize=(4.4 * len(predictions), 3.7),
                                      squeeze=False)
    x, y = points.images.flatten(1).T.numpy()
    colours = np.array(common.COLOURS)[points.labels]
    extent = (-PLANE_LIMIT, PLANE_LIMIT, -PLANE_LIMIT, PLANE_LIMIT)
    pictures = {}
    for name, outputs in predictions.items():
        uncertainty = common.ensemble_uncertainty(outputs.log_probs)["epistemic"]
        pictures[name] = uncertainty.view(PLANE_SIDE, PLANE_SIDE).numpy()
    highest = max(picture.max() for picture in pictures.values())
    for axis, name in zip(axes[0], pictures):
        image = axis.imshow(pictures[name], origin="lower", extent=extent, vmin=0, vmax=highest)
        axis.scatter(x, y, 9, colours, edgecolors="white", linewidths=0.4)
        axis.set(title=TITLES[name])
    figure.colorbar(image, ax=axes, label="epistemic uncertainty (nats)")
    run.save_figure(figure, "toy.png")


# ---- Options ------------------------------------------------------------------------------------

METHODS = tuple(TITLES)
# A data set alone selects the paper's recipe for it: what its preset does not say is the default
# of `parse_args`, ten ResNet-18 and FoRDE-PCA.
# The validation set is drawn by the seed, so each seed trains on other images.
GLYPHS = dict(methods=["deep_ensemble", "forde_pca", "forde_identity"], members=8, model="mlp",
              hidden=[128, 128], val_fraction=0.1, limit_train=1000, epochs=16, batch_size=32,
              schedule="one_cycle", augment=False, shift="computed", shift_examples=200,
              ood=["glyphs_letters"])
PRESETS = {
    "cifar10": dict(alpha=0.2, ood=["svhn", "cifar100"]),
    "cifar100": dict(ood=["svhn", "cifar10"]),
    # published command: the learning rate ends at 0.0001; the paper's text says 0.001
    "tiny_imagenet": dict(model="preact_resnet18", epochs=150, lr_ratio=0.001, ood=["svhn"]),
    "mnist": dict(augment=False, shift="computed", ood=["fashion_mnist"]),
    "fashion_mnist": dict(augment=False, shift="computed", ood=["mnist"]),
    # paper: batches of 256, learning rate 0.2, three hidden layers; widths and epochs are ours
    "features": dict(model="mlp", batch_size=256, lr=0.2, epochs=100, augment=False, shift="none"),
    "glyphs": GLYPHS,
    "dirty_glyphs": GLYPHS,
    # five Gaussians in the plane
    "toy_classification": dict(
        methods=["deep_ensemble", "forde_identity"], members=16, model="mlp",
        hidden=[64, 64], weight_decay=0.0, epochs=20, batch_size=200, lr=0.02,
        schedule="one_cycle", augment=False, shift="none"),
    # Your own images: small networks that train on two CPU cores in minutes.
    "folder": dict(methods=["deep_ensemble", "forde_pca"], members=4, model="resnet9", width=0.25,
                   epochs=30, batch_size=16, schedule="one_cycle", shift="none"),
    # Your own network. Large images have too many dimensions for the basis of FoRDE-PCA.
    "pretrained": dict(methods=["deep_ensemble", "forde_identity"], members=3, width=1.0,
                       epochs=5, batch_size=16, lr=0.02, schedule="one_cycle", augment=True,
                       shift="none"),
    "frozen": dict(),  # --freeze is refused
}
# These only change what is computed from trained networks, where the basis comes from, or how much
# memory training takes, so they do not identify a run.
EVALUATION_OPTIONS = ("methods", "ood", "shift", "shift_examples", "basis", "chunk")


def parse_args(argv=None):
    parser = common.Parser("forde", __doc__, PRESETS, NETWORKS, dataset="glyphs",
                           model="resnet18", epochs=300, batch_size=128, lr=0.1)
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument_group("forde.py").add_argument
    add("--methods", nargs="+", choices=METHODS, metavar="METHOD", default=["forde_pca"],
        help=f"methods to compare, from the same initial weights: {', '.join(METHODS)}")
    add("--members", "-m", type=at_least(1), default=10,
        help="number of ensemble members M (paper: 10)")
    add("--alpha", type=between(0, 1), default=0.4,
        help="metric of forde_tuned, from 0 (identity) to 1 (PCA) (paper: 0.4 on CIFAR-100, 0.2 "
        "on CIFAR-10)")
    add("--basis", metavar="FILE",
        help="principal components of the same training images, basis-*.pt of another run")
    add("--grad-of", choices=["logit", "logprob"], default="logit",
        help="input gradients of the true class's logit (paper) or log probability")
    add("--repulsion-coef", type=at_least(0, float), default=1.0,
        help="factor on the repulsion R (paper: 1)")
    add("--repulse-every", type=at_least(1), default=1,
        help="number of steps from one repulsion to the next (paper: 1)")
    add("--hidden", type=at_least(1), nargs="+", metavar="N", default=[256, 256, 256],
        help="numbers of hidden units of mlp (paper: three layers)")
    add("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters (paper: 5e-4)")
    add("--schedule", choices=["published", "one_cycle"], default="published",
        help="'published' decreases the learning rate linearly from 50 to 90 %% of the epochs; "
        "'one_cycle' is better for short runs")
    add("--lr-ratio", type=between(0, 1), default=0.01,
        help="final over initial learning rate of the published schedule (paper: 0.01)")
    add("--augment", action=flag, default=True, help="use random crops and flips (paper: on)")
    add("--val-fraction", type=between(0, 0.9), default=0.0,
        help="fraction of the training set that is held out to fit a temperature (paper: 0)")
    add("--published-split", action=flag, default=False,
        help="hold out the same examples as the published code: the same fraction of every class "
        "(of CIFAR, the same rows)")
    add("--features", nargs=2, metavar="NPZ", help="training and test file of --dataset features, "
        "with 'features' [N, D] and 'labels' [N]; --ood and --predict then take such files, too")
    add("--ood", nargs="*", metavar="NAME", default=[],
        help="out-of-distribution sets; folder:PATH is a folder of images, nonsense are patterns "
        "and noise")
    add("--shift", choices=["none", "computed", "published"], default="published",
        help="corrupted test sets: computed here, or published files such as CIFAR-10-C")
    add("--shift-examples", type=at_least(0), metavar="N", default=0,
        help="number of test images under each corruption; 0 is all")
    add("--chunk", type=at_least(0), default=0, metavar="C",
        help="number of members whose activations are in memory at a time; 0 is all. Less memory, "
        "but outputs and input gradients are computed twice")
    args = parser.parse(argv)
    args.methods = list(dict.fromkeys(args.methods))
    check_options(args)
    return args


NO_IMAGES = ("features", "toy_classification")


def uses_basis(args):
    """Whether a method needs the principal components of the training images."""
    return "forde_pca" in args.methods or "forde_tuned" in args.methods


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if args.compile:
        raise UserError("--compile: a compiled network cannot be differentiated twice")
    if args.freeze:
        raise UserError("--freeze: compute the features of your network once, and train an "
                        "ensemble on them: --dataset features --features TRAIN.npz TEST.npz")
    if args.epochs == 0 and args.model not in PUBLISHED_NETWORKS:
        raise UserError(f"--epochs 0 --model {args.model}: the members differ in new heads, which "
                        "must be trained; use --epochs 1 or more")
    if args.members == 1 and args.methods != ["deep_ensemble"]:
        raise UserError("--members 1: one particle cannot repel; use --methods deep_ensemble for "
                        "a single network")
    if args.chunk and args.members % args.chunk:
        raise UserError(f"--chunk {args.chunk} must divide --members {args.members}; or use 0 for "
                        "all members at once")
    if (args.dataset == "features") != bool(args.features):
        raise UserError("--dataset features and --features TRAIN.npz TEST.npz must be used "
                        "together")
    if args.shift == "published" and f"{args.dataset}_c" not in data.CORRUPTED:
        raise UserError(f"--shift published: not available for {args.dataset}; use --shift "
                        "computed or none")
    if args.dataset in NO_IMAGES and (args.augment or args.shift != "none"):
        raise UserError(f"--dataset {args.dataset} has no images; it needs --no-augment and "
                        "--shift none")
    refuse_without_effect(args)


def refuse_without_effect(args):
    """Refuse options that were given and would have no effect."""
    pretrained = args.model.startswith("torchvision/")
    no_effect = [
        (args.dataset in NO_IMAGES, ["val_fraction", "published_split", "image_size"],
         f"with --dataset {args.dataset}"),
        (args.dataset == "toy_classification",
         ["limit_train", "ood", "predict", "data_dir", "workers"], "with toy_classification"),
        (args.shift == "none", ["shift_examples"], "without corrupted test sets (--shift)"),
        (not args.val_fraction, ["published_split"], "without --val-fraction"),
        (args.model != "mlp", ["hidden"], f"with --model {args.model}"),
        (pretrained, ["width"], f"with --model {args.model}"),
        (not pretrained, ["weights"], "without --model torchvision/NAME"),
        (args.schedule != "published", ["lr_ratio"], f"with --schedule {args.schedule}"),
        ("forde_tuned" not in args.methods, ["alpha"], "without --methods forde_tuned"),
        (not uses_basis(args), ["basis"], "without --methods forde_pca or forde_tuned"),
        (args.methods == ["deep_ensemble"], ["repulsion_coef", "repulse_every"],
         "where no members repel"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


# ---- Main ---------------------------------------------------------------------------------------


def gaussian_ring(n_per_class, seed=42):
    """(x float32 [5n, 2], y int64 [5n]): n points of each of five Gaussians, class 0 first.

    They have unit variance and centres at 0, 72, ..., 288 degrees of a circle of radius 5
    (D'Angelo and Fortuin 2021).
    """
    y = torch.arange(5).repeat_interleave(n_per_class)
    angle = 2 * math.pi / 5 * y
    centre = 5 * torch.stack([angle.cos(), angle.sin()], 1)            # [5n, 2]
    noise = torch.randn(len(y), 2, generator=torch.Generator().manual_seed(seed))
    return centre + noise, y


def point_set(name, points, labels):
    """Points [N, 2] of the plane as a set of images of one pixel."""
    return data.ImageSet(name, points[:, :, None, None], labels, 5, (0.0, 0.0), (1.0, 1.0))


def load_toy():
    """The sets of the toy; points of the plane that are far from its training points are OOD."""
    x, y = gaussian_ring(40)
    # An epoch sees each point 50 times: a pass over 200 points would be a single step.
    train = point_set("toy_classification", x.repeat(50, 1), y.repeat(50))
    test = point_set("toy_classification", *gaussian_ring(20, seed=43))
    axis = torch.linspace(-PLANE_LIMIT, PLANE_LIMIT, PLANE_SIDE)
    points = torch.cartesian_prod(axis, axis).flip(1)                  # (x, y), row by row
    unknown = torch.full((len(points),), -1)
    plane = point_set("plane", points, unknown)
    is_far = torch.cdist(points, x).amin(1) > 3
    far = point_set("far", points[is_far], unknown[is_far])
    return data.Sets(train, None, test, {"far": far}, plane)


def load_features(args):
    """The sets of --features: a training and a test file, and others like them."""
    train = data.limit_train(data.feature_set(args.features[0]), args.limit_train)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    test = data.feature_set(args.features[1], train)
    ood = data.ood_sets(args.ood, train, args.data_dir, required="ood" in args.given)
    predicted = data.predict_set(args.predict, train, args.data_dir) if args.predict else None
    data.check_sizes(train, test, predicted, *ood.values())
    return data.Sets(train, None, test, ood, predicted)


def stratified_split(labels, val_fraction=0.1, seed=88):
    """(train, val): int64 row numbers; floor(val_fraction n_c) rows of each class are in val.

    published code: scikit-learn's train_test_split with this seed. The rows are the same where
    val_fraction n_c is a whole number for each class.
    """
    val_fraction += 1e-12  # 0.29 * 100 is a little less than 29
    generator = np.random.RandomState(seed)
    train = []
    val = []
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0].numpy()
        rows = generator.permutation(rows)
        num_train = len(rows) - math.floor(val_fraction * len(rows))
        train.append(rows[:num_train])
        val.append(rows[num_train:])
    train = generator.permutation(np.concatenate(train))
    val = generator.permutation(np.concatenate(val))
    return torch.from_numpy(train), torch.from_numpy(val)


def hold_out_as_published(sets, args):
    """The sets with the validation set of --published-split."""
    if sets.val is not None or getattr(sets.train, "groups", None) is not None:
        raise UserError(f"--published-split: {sets.train.name} has a validation set of its own, "
                        "or images that occur several times; remove this option")
    train, val = stratified_split(sets.train.labels, args.val_fraction)
    val_set = sets.train.select(val)
    data.check_sizes(val_set)
    train_set = data.limit_train(sets.train.select(train), args.limit_train)
    return sets._replace(train=train_set, val=val_set)


def load_sets(args, seed):
    """All sets of a run as data.Sets; `seed` splits off the validation set."""
    if args.dataset == "toy_classification":
        return load_toy()
    if args.features:
        return load_features(args)
    statistics = None
    if args.dataset == "cifar10":
        # published code: these differ a little from those of the other scripts
        statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    val_fraction = 0.0 if args.published_split else args.val_fraction
    limit_train = None if args.published_split else args.limit_train
    if common.on_main(data.has_own_val, args.dataset):
        common.refuse(args, ["val_fraction"], "on a folder with a part val")
    preparation = data.preparation_of(args.model, args.weights, args.image_size)
    sets = data.load_sets(args.dataset, args.data_dir, seed=seed, val_fraction=val_fraction,
                          image_size=args.image_size, preparation=preparation,
                          limit_train=limit_train, statistics=statistics, ood=args.ood,
                          ood_required="ood" in args.given, predict=args.predict)
    if args.published_split:
        return hold_out_as_published(sets, args)
    return sets


def check_network(train_set, args):
    """Refuse, before training, a network that is impossible."""
    net = make_network(args, train_set.num_classes, train_set.shape).to(args.device)
    weight = next(net.parameters())
    smallest = min(args.batch_size, len(train_set), 2)
    images = weight.new_zeros(smallest, *train_set.shape)
    labels = torch.zeros(smallest, dtype=torch.long, device=args.device)
    try:
        _, g = input_gradient(net.train(), images, labels)
        g.sum().backward()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} images {train_set.shape}, or "
                        f"cannot be differentiated twice: {common.one_line(error)}; use another "
                        "--model, --image-size or --batch-size") from None


def check_basis(train_set, args):
    """Refuse, before training, a basis of other images, or one that exceeds the memory."""
    if args.basis:
        if read_basis(train_set, args) is None:
            raise UserError(f"--basis {args.basis} was not made from these training images; give "
                            "a file basis-*.pt of a run with the same ones, or remove this option")
        return
    dim = math.prod(train_set.shape)
    needed = 5 * 8 * dim**2  # in float64, with the workspace of eigh
    memory = common.device_memory(args.device)
    if memory and needed > memory:
        raise UserError(f"the basis of {dim} inputs needs {needed / 1e9:.0f} GB, and the device "
                        f"has {memory / 1e9:.0f} GB; use --methods forde_identity, or a smaller "
                        "--image-size")


def read_basis(train_set, args):
    """The basis in the file --basis; None if there is none for these training images."""
    basis = common.load_tensors(args.basis) if args.basis else {}
    if basis.get("images") != data.digest(train_set):
        return None
    dim = math.prod(train_set.shape)
    shapes = [getattr(basis.get(name), "shape", None) for name in ("eigenvectors", "eigenvalues")]
    if shapes != [(dim, dim), (dim,)] or not common.all_finite(basis):
        raise UserError(f"--basis {args.basis} has no finite eigenvectors of {dim} dimensions; "
                        "remove this option to compute them")
    return basis


def compute_basis(train_set, args):
    """The principal components of FoRDE-PCA, and a digest of their images.

    {"eigenvectors": [D, D], "eigenvalues": [D], "images": digest}
    """
    common.print_on_main(f"computing the eigenvectors of {len(train_set)} training images")
    device = "cpu" if args.device.type == "mps" else args.device  # MPS has no float64
    dim = math.prod(train_set.shape)
    total = torch.zeros(dim, dim, dtype=torch.float64, device=device)
    for batch in batches_of(train_set, args):  # normalised images without augmentation
        x = batch.images.to(device).flatten(1).double()                # [b, D]
        total.addmm_(x.T, x)
    eigenvectors, eigenvalues = pca(common.all_reduce(total) / (len(train_set) - 1))
    return {"eigenvectors": eigenvectors.cpu(), "eigenvalues": eigenvalues.cpu(),
            "images": data.digest(train_set)}


def load_basis(train_set, args, run):
    """The basis of FoRDE-PCA; seeds that train on the same images share one file."""
    basis = read_basis(train_set, args)
    if basis is None:
        digest = data.digest(train_set)
        basis = run.load_or_compute(f"basis-{digest[:8]}", {"training images": digest},
                                    partial(compute_basis, train_set, args))
    return basis


def metric_of(basis, method, args):
    """A of `metric_root` on the device; None for the identity and methods without a metric."""
    alpha = {"forde_pca": 1.0, "forde_tuned": args.alpha}.get(method, 0.0)
    if basis is None or alpha == 0:
        return None
    return metric_root(basis["eigenvectors"], basis["eigenvalues"], alpha).to(args.device)


def run_name(args):
    """The name of the run directory."""
    name = data.set_name(args.dataset)
    width = f"w{args.width:g}" if args.width != 1 else None
    return common.join_name(name, args.model, width, f"m{args.members}", f"seed{args.seed}")


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args, args.seed)
    shift = find_shift(sets.test, args)
    check_network(sets.train, args)
    needs_basis = uses_basis(args) and not args.eval
    if needs_basis:
        check_basis(sets.train, args)
    run = common.Run(args, "forde", run_name(args), EVALUATION_OPTIONS)
    rows = []
    predictions = {}  # of the first seed, {method: Outputs}
    for seed in range(args.seed, args.seed + args.runs):
        if seed > args.seed:
            sets = load_sets(args, seed)  # another validation set
        basis = load_basis(sets.train, args, run) if needs_basis else None
        for method in args.methods:
            # Algorithm 1: train the members together, predict with their mean.
            nets = make_ensemble(args, seed, sets.train.num_classes, sets.train.shape)
            metric = metric_of(basis, method, args)
            train(nets, sets.train, metric, method, args, seed, run)
            rows += evaluate(nets, sets, shift, args, {"method": method, "seed": seed})
            if seed == args.seed:
                predictions[method] = forward(nets, sets.predict, args)

    results = rows + paired_differences(rows)
    # The severities of corruption and the validation set are in results.csv.
    shown = [row for row in results if "severity" not in row and row["set"] != "val"]
    results = run.report(results, COLUMNS, shown)
    if args.plot and shift is not None:
        common.on_main(plot_shift, rows, sets.test.name, shift.name, run)
    if args.plot and args.dataset == "toy_classification":
        common.on_main(plot_toy, sets.train.select(slice(200)), predictions, run)
    if args.predict:
        common.on_main(write_predictions, predictions, sets, run)
    return results


if __name__ == "__main__":
    common.launch(main)
