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

Expected (more in tests/RESULTS.md): `python forde.py --runs 10`: NLL under corruption 0.542 +-
  0.007 (deep ensemble), by FoRDE-PCA 0.008 +- 0.002 and by FoRDE-identity 0.021 +- 0.003 lower; ECE
  by 0.9 +- 0.1 % and 0.6 +- 0.1 % lower (mean +- standard error of paired differences, n = 10).

Where the method is: step 1: `input_gradient`; step 2: `pca`, `metric_root`, `unit_rows`; step 3:
`log_kernel`; step 4: `repulsion`; all four: `ensemble_step`, which `train` calls.

Differences from the published code (github.com/AaltoPML/FoRDE, commit e8f9d74; JAX and Haiku):
  - Kernel. The paper's Algorithm 1: twice this exponent, one bandwidth per example. Published code,
    which made the paper's results, and here: the form above.
  - Basis. Published: of all training images. Here: without those that are held out.
  - Batch norm. Published: biased running variances. Here: unbiased ones, as in PyTorch (0.05 %
    larger).
  - An input gradient of zero length. Published: its unit vector has the derivative 1e12. Here: it
    is a constant, because that force would exceed all others.
  - TinyImageNet. Published: pixels from 0 to 255. Here: from 0 to 1, with statistics of that scale.
  - Validation images. Published: equal shares of the classes, always the same. Here: drawn by the
    seed, because seeds should differ in all that is random.
  - Momentum. Published: Nesterov's, although its flag can be off. Here: Nesterov's, without a flag.
  - nll_miss. Published: NaN if the ensemble makes no error. Here: None.
  - Methods. Published: FoRDE alone. Here: also deep ensembles, weight-RDE, function-RDE, LIT and
    tuned lengthscales; the paper's other methods and its experiment on features are not here.
  - New: --chunk, --schedule one_cycle, pretrained networks.
"""

import argparse
import math
import time
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

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
# it needs math and those of torch.
#
# M members, B examples, K classes, D input dimensions. The repulsion of Algorithm 1 is
#   repulsion(log_kernel(unit_rows(g) @ A))
# with input gradients g [M, B, D] and A of `metric_root`.


def input_gradient(net: nn.Module, x: Tensor, y: Tensor,
                   grad_of: str = "logit") -> tuple[Tensor, Tensor]:
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
        # With a graph even for constants: `Convolution` then computes no gradients of weights.
        g, = torch.autograd.grad(of_label.sum(), x, create_graph=True)
    if constant:
        logits = logits.detach()
        g = g.detach()
    return logits, g.flatten(1)


def unit_rows(g: Tensor, eps: float = 1e-24) -> Tensor:
    """g / sqrt(|g|^2 + eps) for rows g [..., D]; eps is the square of the paper's 1e-12.

    A row with |g|^2 <= eps has no direction. It becomes 0, a constant: the derivative of 1/|g|
    would exceed all others.
    """
    squared_length = g.square().sum(-1, keepdim=True)
    has_direction = squared_length > eps
    divisor = torch.where(has_direction, squared_length + eps, torch.inf)
    return g / divisor.sqrt()


def pca(second_moments: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors [D, D] as columns, and eigenvalues [D], largest first, of X^T X / (N - 1).

    second_moments: X^T X / (N - 1) [D, D], best in float64, for normalised images X [N, D].
    Normalising subtracts the mean of each channel, not that of each pixel. The result is float32.
    Both are as published.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(second_moments.double())
    return eigenvectors.flip(1).float(), eigenvalues.flip(0).clamp_min(0).float()


def metric_root(eigenvectors: Tensor, eigenvalues: Tensor, alpha: float = 1.0) -> Tensor:
    """A [D, D] with A A^T = Sigma^-1, so that distances are those of the rows s = u A.

    paper: appendix D.4, Sigma = alpha Lambda^-1 + (1 - alpha) I in the eigenbasis; PCA is alpha 1.
    With alpha 1 a common factor of the eigenvalues cancels, because it is in the bandwidth, too. A
    has the dtype of the eigenvectors, which must be that of the gradients: float32 after `pca`.
    """
    if alpha == 0:
        return eigenvectors
    precision = eigenvalues / (alpha + (1 - alpha) * eigenvalues).clamp_min(1e-30)
    return eigenvectors * precision.sqrt()


def pairwise_squared_distances(s: Tensor) -> Tensor:
    """|s_i - s_j|^2 [M, M, ...] of rows s [M, ..., D]; s_j is a constant, i = j is included."""
    # By differences: in the products of a Gram matrix, nearly equal members would cancel.
    columns = []
    for other in s.detach():
        columns.append((s - other).square().sum(-1))                   # [M, ...]
    return torch.stack(columns, 1)


def log_kernel(s: Tensor) -> Tensor:
    """log k_ijb = -|s_ib - s_jb|^2 / h_jb [M, M, B] of s [M, B, D], M > 1, constant s_jb, h_jb.

    paper: equation (17), in the published code's form, h_jb = med_i |s_ib - s_jb|^2 / ln M + 1e-12
    """
    distance = pairwise_squared_distances(s)                           # [M, M, B]
    members = len(s)
    # The median over i includes i = j; of an even number it is the mean of the middle two.
    ranked = distance.detach().sort(0).values
    lower = ranked[(members - 1) // 2]
    upper = ranked[members // 2]
    median = (lower + upper) / 2                                       # [M, B]
    bandwidth = median / math.log(members) + 1e-12
    return -distance / bandwidth


def repulsion(log_k: Tensor) -> Tensor:
    """R = (1/B) sum_i log[(1/B) sum_b sum_j k_ijb] of log k [M, M, B]; 0 <= R <= M ln(M) / B.

    Its gradient is that of Wasserstein gradient descent, sum_i [sum_j grad k_ij / sum_j k_ij],
    because `log_kernel` has constant second arguments. B is the global batch size.
    """
    batch = log_k.shape[2]
    log_sums = log_k.flatten(1).logsumexp(1) - math.log(batch)         # [M]
    return log_sums.sum() / batch


def rbf_repulsion(particles: Tensor) -> Tensor:
    """sum_i ln sum_j exp(-|p_i - p_j|^2 / h) of particles p [M, P], with constant p_j and h.

    The kernel of D'Angelo and Fortuin (2021): h = med / ln(M + 1), with one median over all M^2
    squared distances.
    """
    distance = pairwise_squared_distances(particles)                   # [M, M]
    median = distance.detach().flatten().quantile(0.5)
    bandwidth = median / math.log(len(particles) + 1) + 1e-12
    return (-distance / bandwidth).logsumexp(1).sum()


def function_repulsion(logits: Tensor, inverse_squared_scale: float = 1e-6) -> Tensor:
    """(1/B) [`rbf_repulsion` of the members' logits z [M, B, K] + sum ln(1 + z^2 / scale^2)].

    The second term is a Cauchy prior of scale 1000 on each logit (paper: appendix C.2).
    """
    prior = (inverse_squared_scale * logits.square()).log1p().sum()
    return (rbf_repulsion(logits.flatten(1)) + prior) / logits.shape[1]


def pairwise_cosines(g: Tensor) -> Tensor:
    """cos(g_i, g_j) of all pairs i < j of members [M (M - 1) / 2, B], from g [M, B, D]."""
    unit_g = unit_rows(g)
    cosines = torch.einsum("ibd,jbd->ijb", unit_g, unit_g)
    i, j = torch.triu_indices(len(g), len(g), 1, device=g.device)
    return cosines[i, j]


def local_independence(g: Tensor) -> Tensor:
    """LIT: the mean of cos^2(g_i, g_j) over pairs and examples, g [M, B, D].

    In Ross et al. (2018), g are gradients of log probabilities (--grad-of logprob).
    """
    return pairwise_cosines(g).square().mean()


# ---- Model --------------------------------------------------------------------------------------
# FoRDE trains through the gradient by the input, so every layer must be differentiable twice.
# PyTorch's are, but the second derivatives of convolutions are slow, and those of batch norm take
# many small operations. `make_network` replaces both layers in any network.


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


def ease_second_derivatives(net):
    """Replace the convolutions and batch norms of `net`; their parameters stay the same objects."""
    common.use_global_batch_norm(net)
    for module in net.modules():
        if type(module) is nn.Conv2d and module.dilation == (1, 1) and module.groups == 1:
            if module.padding_mode == "zeros" and isinstance(module.padding, tuple):
                module.__class__ = Conv2d


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

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


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


def preact_resnet(args, shape, counts, stem_width=None):
    """Groups of two pre-activation blocks after a 3x3 convolution with `stem_width` channels."""
    widths = channels(counts, args)
    c_in = widths[0] if stem_width is None else stem_width
    layers = [SameConv2d(shape[0], c_in)]
    layers += groups_of_blocks(PreActivationBlock, c_in, widths, 2)
    layers += [nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, widths[-1]


def mlp(args, shape):
    """Linear layers with batch norm and ReLU."""
    layers = [nn.Flatten()]
    c_in = math.prod(shape)
    for c_out in channels(args.hidden, args):
        layers += [nn.Linear(c_in, c_out), nn.BatchNorm1d(c_out), nn.ReLU()]
        c_in = c_out
    return layers, c_in


PUBLISHED_NETWORKS = {
    "resnet9": partial(resnet, blocks=1),
    "resnet18": partial(resnet, blocks=2),
    "wrn_16_4": partial(preact_resnet, counts=(64, 128, 256), stem_width=16),
    "preact_resnet18": partial(preact_resnet, counts=(64, 128, 256, 512)),
    "mlp": mlp,
}
# To add a network of your own, add its function here; it keeps the weights that it is made with.
NETWORKS = PUBLISHED_NETWORKS | {}


def make_network(args, num_classes, shape):
    """One member for inputs of `shape` (C, H, W), which returns logits.

    The networks above are initialised as published. Others, which may be pretrained, keep their
    weights; only their heads are drawn anew, because members that start equal would stay equal.
    """
    backbone, head = common.backbone_and_head(args, NETWORKS, num_classes, shape)
    if args.model in PUBLISHED_NETWORKS:
        initialise(backbone)
        # published code: the last layer starts at zero, so the first forces are zero, too.
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    else:
        initialise(head)
    net = nn.Sequential(OrderedDict(backbone=backbone, head=head))
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
    memory_format = torch.contiguous_format
    if args.device.type == "cuda":  # on CPUs, second derivatives are slower in channels-last memory
        memory_format = torch.channels_last
    return nn.ModuleList(nets).to(args.device, memory_format=memory_format)


def member_logits(nets, args, x):
    """The logits [M, b, K] of the networks: a tuple, like that of `member_gradients`."""
    with common.autocast(args):
        logits = [net(x) for net in nets]
    return (stack_in_float32(logits),)


def member_gradients(nets, args, x, y):
    """The logits [M, b, K] and the input gradients [M, b, D] of the networks."""
    logits = []
    gradients = []
    with common.autocast(args):
        for net in nets:
            f, g = input_gradient(net, x, y, args.grad_of)
            logits.append(f)
            gradients.append(g)
    return stack_in_float32(logits), stack_in_float32(gradients)


def stack_in_float32(tensors):
    """Stack tensors; bfloat16 is not precise enough for losses and distances. Float64 stays."""
    stacked = torch.stack(tensors)
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32))


# ---- Training -----------------------------------------------------------------------------------


def forward_in_chunks(forward, nets, args, x, *labels):
    """What forward(nets, args, x, *labels) returns, computed for --chunk members at a time.

    forward: `member_logits` or `member_gradients`. Only the activations of one chunk are in memory
    at a time, because the backward pass computes them again, with the same dropout masks. For
    FoRDE with ten ResNet-18 and 128 images they take 12 GiB, and 1.2 GiB with --chunk 1, to which
    second derivatives add: so all ten train on a GPU of 24 GB.
    """
    if not 0 < args.chunk < len(nets):
        return forward(nets, args, x, *labels)
    x.requires_grad_()  # or else the backward pass would not reach a checkpoint
    outputs = []
    for first in range(0, len(nets), args.chunk):
        chunk = nets[first:first + args.chunk]
        outputs.append(checkpoint(forward, chunk, args, x, *labels, use_reentrant=True))
        set_momentum(chunk, 0.0)  # the second pass does not move the running averages again
    return [torch.cat(tensors) for tensors in zip(*outputs)]


class GatherParticles(torch.autograd.Function):
    """Particles [M, B, ...] of the global batch, from the pieces [M, b, ...] of all processes.

    R couples the examples, so every process computes R of the global batch. Each one
    differentiates it by its own piece, and the chain rule takes this gradient on to the weights:
    the sum over the processes is the gradient of R. DistributedDataParallel takes the mean instead
    of the sum, hence the factor.
    """

    @staticmethod
    def forward(ctx, particles, batch):
        everyone = particles.new_zeros(len(particles), batch.global_size, *particles.shape[2:])
        own_piece(everyone).copy_(particles)
        return common.all_reduce(everyone)

    @staticmethod
    def backward(ctx, grad):
        return own_piece(grad) * common.world_size(), None


def own_piece(particles):
    """The rows [M, b, ...] of this process in a global batch [M, B, ...], as a view."""
    return particles.tensor_split(common.world_size(), 1)[common.rank()]


def gather_particles(particles, batch):
    """Particles [M, B, ...] of the global batch, over which the members repel."""
    if common.world_size() == 1:
        return particles
    return GatherParticles.apply(particles, batch)


# The baselines. Each function returns the logits [M, b, K] of this process's examples, and R.


def deep_ensemble(nets, batch, num_train, args):
    """Without repulsion, R is 0."""
    logits, = forward_in_chunks(member_logits, nets, args, batch.images)
    return logits, logits.new_zeros(())


def weight_rde(nets, batch, num_train, args):
    """Weight-RDE: `rbf_repulsion` of the weights, which all processes have.

    The cross entropy is a mean over examples, so the prior is divided by their number, too.
    """
    logits, = forward_in_chunks(member_logits, nets, args, batch.images)
    weights = []
    for net in nets:
        weights.append(torch.cat([p.flatten() for p in net.parameters()]))
    return logits, rbf_repulsion(torch.stack(weights)) / num_train


def function_rde(nets, batch, num_train, args):
    """Function-RDE: `function_repulsion` of the logits."""
    logits, = forward_in_chunks(member_logits, nets, args, batch.images)
    return logits, function_repulsion(gather_particles(logits, batch))


def lit(nets, batch, num_train, args):
    """LIT: `local_independence` of the input gradients."""
    logits, g = forward_in_chunks(member_gradients, nets, args, batch.images, batch.labels)
    return logits, local_independence(gather_particles(g, batch))


BASELINES = {"deep_ensemble": deep_ensemble, "weight_rde": weight_rde,
             "function_rde": function_rde, "lit": lit}


def ensemble_step(nets, batch, method, A, num_train, args):
    """Algorithm 1 on one batch: add the gradient of sum_i CE_i + R to those of the parameters.

    A: of `metric_root`, None for the identity; num_train: number of training examples. Returns
    the cross entropy, summed over members and this process's examples, R, and the logits
    [M, b, K].
    """
    if method in BASELINES:
        logits, R = BASELINES[method](nets, batch, num_train, args)
    else:
        # 1. The input gradients of all members.
        logits, g = forward_in_chunks(member_gradients, nets, args, batch.images, batch.labels)
        g = gather_particles(g, batch)                                 # [M, B, D]
        # 2. Unit vectors: only the directions of the gradients count.
        s = unit_rows(g)                                               # [M, B, D]
        if A is not None:
            s = s @ A.to(s)
        # 3. The kernel between members, which is summed over examples and members j.
        log_k = log_kernel(s)                                          # [M, M, B]
        R = repulsion(log_k)

    # 4. The loss, and its gradient, also through the input gradients. DistributedDataParallel
    # averages gradients over the processes: this is the mean cross entropy of the global batch.
    every_label = batch.labels.repeat(len(logits))                     # [M b]
    loss = F.cross_entropy(logits.flatten(0, 1), every_label, reduction="sum")
    mean_loss = loss * common.world_size() / batch.global_size
    (mean_loss + args.repulsion_coef * R).backward()
    return loss.detach(), R.detach(), logits.detach()


def set_momentum(nets, momentum):
    """Set how far a step moves the running statistics of batch norm."""
    for module in nets.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
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


@torch.no_grad()
def validate(nets, val_set, args):
    """Accuracy and NLL of the mean prediction for the held-out images, in eval mode."""
    nets.eval()
    totals = torch.zeros(2, device=args.device)  # NLL, correct predictions
    for batch in data.evaluation_loader(val_set, args).epoch():
        logits, = member_logits(nets, args, batch.images)              # [M, b, K]
        log_probs = logits.log_softmax(2).logsumexp(0) - math.log(len(nets))
        totals[0] += F.nll_loss(log_probs, batch.labels, reduction="sum")
        totals[1] += (log_probs.argmax(1) == batch.labels).sum()
    nll, accuracy = (common.all_reduce(totals) / len(val_set)).tolist()
    return {"val_accuracy": accuracy, "val_nll": nll}


def make_loader(train_set, args, seed):
    """Batches whose order and augmentation depend only on the seed and the epoch."""
    augment = "crop_flip" if args.augment else "none"
    # published code: the last, smaller batch of an epoch is dropped
    return data.Loader(train_set, args.batch_size, args.device, seed=seed, shuffle=True,
                       limit_steps=args.limit_steps, drop_last=True, augment=augment,
                       workers=args.workers, channels_last=args.device.type == "cuda")


def train(nets, splits, A, method, args, seed, run):
    """Train all members together, on the same batches; save and resume their checkpoint.

    The logged repulsion is R, without --repulsion-coef, the mean over the steps of an epoch.
    """
    name = f"{method}-seed{seed}"
    loader = make_loader(splits.train, args, seed)
    # Fused: one operation updates all parameters.
    optimiser = torch.optim.SGD(nets.parameters(), lr=args.lr, momentum=0.9, nesterov=True,
                                weight_decay=args.weight_decay, fused=args.device.type == "cuda")
    # With several processes these are DistributedDataParallel.
    models = nn.ModuleList([common.data_parallel(net, args.device) for net in nets])
    history = run.resume(name, args.epochs, net=nets, optimiser=optimiser)
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        common.seed_all(seed, epoch, common.rank())  # for networks with dropout
        models.train()
        totals = torch.zeros(2, device=args.device)  # cross entropy, correct predictions
        sum_of_R = torch.zeros((), device=args.device)
        for step, batch in enumerate(common.progress(loader, epoch)):
            # Functions of the step: a resumed run needs no state of a scheduler.
            global_step = epoch * len(loader) + step
            lr = learning_rate(global_step, len(loader), args)
            optimiser.param_groups[0]["lr"] = lr
            # published code: averages with decay 0.9, divided by 1 - 0.9^t after t steps
            set_momentum(models, 0.1 / (1 - 0.9 ** (global_step + 1)))

            optimiser.zero_grad()
            loss, R, logits = ensemble_step(models, batch, method, A, len(splits.train), args)
            optimiser.step()

            totals[0] += loss
            totals[1] += (logits.argmax(2) == batch.labels).sum()
            sum_of_R += R
        # All batches are of one size.
        predictions = len(loader) * batch.global_size * args.members
        loss, accuracy = (common.all_reduce(totals) / predictions).tolist()
        row = {"epoch": epoch + 1, "loss": loss, "train_accuracy": accuracy}
        if method != "deep_ensemble":
            row["repulsion"] = sum_of_R.item() / len(loader)
        if splits.val is not None:
            row |= validate(nets, splits.val, args)
        history.append(row | {"lr": lr, "seconds": time.perf_counter() - start})
        run.save(name, history, net=nets, optimiser=optimiser)


# ---- Evaluation ---------------------------------------------------------------------------------

DIVERSITY_EXAMPLES = 1000  # of a test set, for the input gradients
# What is averaged over the severities of corruption, and drawn, and its name in the picture.
SHIFT_METRICS = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece15": "ECE, 15 bins",
                 "disagreement": "disagreement of members",
                 "epistemic_mean": "epistemic uncertainty (nats)",
                 "gradient_distance": "1 - cos of input gradients"}
# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "disagreement", "gradient_distance", "auroc_total",
           "auroc_epistemic", "epistemic_mean"]


class Outputs(NamedTuple):
    """What an ensemble returns for the examples of a set, on the CPU."""

    log_probs: Tensor  # [M, N, K] float32
    labels: Tensor     # [N]
    ms: float          # time of the pass over the set, in milliseconds per example


@torch.no_grad()
def compute_outputs(nets, dataset, args):
    """The Outputs for a whole set in eval mode; None on all processes but the main one."""
    nets.eval()
    start = time.perf_counter()
    batches = []
    for batch in data.evaluation_loader(dataset, args).epoch():
        logits, = member_logits(nets, args, batch.images)              # [M, b, K]
        log_probs = logits.log_softmax(2).transpose(0, 1)              # [b, M, K]
        batches.append({"index": batch.index, "log_probs": log_probs})
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
    for batch in data.evaluation_loader(dataset, args).epoch():
        _, g = member_gradients(nets, args, batch.images, batch.labels)
        total += (1 - pairwise_cosines(g)).mean(0).sum()
    return common.all_reduce(total).item() / len(dataset)


def member_uncertainty(log_probs):
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
    agreeing_share = agreeing_pairs.double() / (members * (members - 1))
    return 1 - agreeing_share.mean().item()


def moments(uncertainty):
    """Mean and population standard deviation over a set of its `member_uncertainty`."""
    metrics = {}
    for name, values in uncertainty.items():
        metrics[f"{name}_mean"] = values.mean()
        metrics[f"{name}_std"] = values.std(correction=0)
    return metrics


def prediction_row(name, outputs, key):
    """Metrics of the mean prediction for one set; key: {"method": ..., "seed": ...}.

    nll_miss is the NLL of its errors.
    """
    log_probs, labels, _ = outputs
    uncertainty = member_uncertainty(log_probs)
    mean = mean_log_probs(log_probs)                                   # [N, K]
    row = {**key, "set": name, "n": len(labels), **common.prediction_metrics(mean, labels)}
    is_wrong = mean.argmax(1) != labels
    row["nll_miss"] = None
    if is_wrong.any():
        of_errors = common.prediction_metrics(mean[is_wrong], labels[is_wrong])
        row["nll_miss"] = of_errors["nll"]
    for k in (2, 3):
        if k <= mean.shape[1]:
            row[f"top{k}_accuracy"] = common.top_k_accuracy(mean, labels, k)
    is_correct = log_probs.argmax(2) == labels                         # [M, N]
    row["member_accuracy"] = is_correct.double().mean().item()
    row["disagreement"] = disagreement(log_probs)
    return row | moments(uncertainty)


def scaled_metrics(test, val):
    """The temperature that fits the validation set, and metrics of the test set after scaling."""
    # Logarithms of probabilities are logits: their softmax gives the probabilities back.
    temperature = common.fit_temperature(mean_log_probs(val.log_probs), val.labels)
    scaled = (mean_log_probs(test.log_probs) / temperature).log_softmax(1)
    metrics = {"temperature": temperature}
    for name, value in common.prediction_metrics(scaled, test.labels).items():
        metrics[f"{name}_scaled"] = value
    return metrics


def detection_row(test_name, ood_name, test, ood, key):
    """How well uncertainty tells the test set from an OOD set, whose moments the row has, too."""
    outside = member_uncertainty(ood.log_probs)
    row = {**key, "set": test_name, "against": ood_name, "n": len(test.labels), **moments(outside)}
    inside = member_uncertainty(test.log_probs)
    scores = {"total": inside["total"]}
    if len(test.log_probs) > 1:  # the epistemic uncertainty of a single network is 0
        scores["epistemic"] = inside["epistemic"]
    return row | common.detection_metrics(scores, outside, {"total": "ood", "epistemic": "ood"})


def clean_rows(test_name, test, val, ood, distance, key):
    """The rows of the test set, of the validation set, and of the test set against OOD sets.

    test, val and ood {name: ...} are Outputs, val may be None; distance: `gradient_distance` of
    the test set
    """
    row = prediction_row(test_name, test, key) | {"gradient_distance": distance, "ms": test.ms}
    rows = [row]
    if val is not None:
        row |= scaled_metrics(test, val)
        rows.append(prediction_row("val", val, key))
    for name, outputs in ood.items():
        rows.append(detection_row(test_name, name, test, outputs, key))
    return rows


def severity_rows(outputs, distance, name, severity, key):
    """The row of all kinds of corruption as one set, which is printed, then a row of each kind.

    outputs: {kind: Outputs}; distance: `gradient_distance`; name: that of all corrupted sets
    """
    log_probs = torch.cat([of_kind.log_probs for of_kind in outputs.values()], 1)
    labels = torch.cat([of_kind.labels for of_kind in outputs.values()])
    row = prediction_row(f"{name}_s{severity}", Outputs(log_probs, labels, 0.0), key)
    print(f"{row['method']}-seed{row['seed']}: {row['set']}, {row['n']} images: accuracy "
          f"{row['accuracy']:.4f}, NLL {row['nll']:.4f}", flush=True)
    rows = [row | {"severity": severity, "gradient_distance": distance}]
    for kind, of_kind in outputs.items():
        row = prediction_row(f"{name}_{kind}_s{severity}", of_kind, key)
        rows.append(row | {"severity": severity, "kind": kind})
    return rows


def evaluate_corrupted(nets, corrupted, args, key):
    """The rows of each severity of the corrupted sets, and of their mean."""
    rows = []
    for severity in data.SEVERITIES:
        outputs = {}
        distances = []
        for kind in corrupted.kinds:
            dataset = corrupted.read(kind, severity)
            outputs[kind] = compute_outputs(nets, dataset, args)
            examples = math.ceil(DIVERSITY_EXAMPLES / len(corrupted.kinds))
            subset = data.stratified_subset(dataset, examples)
            distances.append(gradient_distance(nets, subset, args))
        distance = np.mean(distances)
        rows += common.on_main(severity_rows, outputs, distance, corrupted.name, severity, key)
    pooled = [row for row in rows if "kind" not in row]
    mean = {**key, "set": corrupted.name, "n": sum(row["n"] for row in pooled)}
    for metric in SHIFT_METRICS:
        mean[metric] = np.mean([row[metric] for row in pooled])
    return rows + [mean]


def evaluate(nets, splits, corrupted, args, key):
    """All rows of one ensemble."""
    test = compute_outputs(nets, splits.test, args)
    val = None
    if splits.val is not None:
        val = compute_outputs(nets, splits.val, args)
    ood = {name: compute_outputs(nets, dataset, args) for name, dataset in splits.ood.items()}
    subset = data.stratified_subset(splits.test, DIVERSITY_EXAMPLES)
    distance = gradient_distance(nets, subset, args)
    rows = common.on_main(clean_rows, splits.test.name, test, val, ood, distance, key)
    if corrupted is not None:
        rows += evaluate_corrupted(nets, corrupted, args, key)
    size = sum(tensor.nbytes for tensor in nets.state_dict().values())
    cost = {"ms": rows[0]["ms"], "bytes": size}
    return [row | cost for row in rows]


def paired_differences(rows):
    """Rows of each method minus those of the first one, which has the same seeds and batches."""
    baseline = rows[0]["method"]
    rows_of_baseline = {}
    differences = []
    for row in rows:
        key = (row["seed"], row["set"], row.get("against"))
        if row["method"] == baseline:
            rows_of_baseline[key] = row
            continue
        difference = {"method": f"{row['method']} - {baseline}"}
        for name in ("seed", "set", "against", "n", "severity", "kind"):
            if name in row:
                difference[name] = row[name]
        for name in COLUMNS:
            if name in row:
                difference[name] = row[name] - rows_of_baseline[key][name]
        differences.append(difference)
    return differences


def write_predictions(predictions, splits, run):
    """predictions.csv from {method: Outputs}, the columns of a deep ensemble last."""
    methods = sorted(predictions, key=lambda method: method == "deep_ensemble")
    log_probs = {method: predictions[method].log_probs for method in methods}
    common.write_predictions(run, splits.predict, log_probs, splits.train.classes)


# ---- Plots --------------------------------------------------------------------------------------

TITLES = {"deep_ensemble": "deep ensemble", "forde_pca": "FoRDE-PCA",
          "forde_identity": "FoRDE-identity", "forde_tuned": "FoRDE, tuned",
          "weight_rde": "weight-RDE", "function_rde": "function-RDE", "lit": "LIT"}


def plot_shift(rows, test_name, corrupted_name, run):
    """SHIFT_METRICS by severity (0 is clean), with standard errors over the seeds."""
    sets = [test_name] + [f"{corrupted_name}_s{severity}" for severity in data.SEVERITIES]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = common.make_figure(2, 3, figsize=(11, 6.5))
    for axis, (metric, label) in zip(axes.flat, SHIFT_METRICS.items()):
        for method, colour, marker in zip(methods, common.colours(len(methods)), "osD^vP*"):
            values = []                                                # [severities, seeds]
            for name in sets:
                values.append([row[metric] for row in rows if row["method"] == method
                               and row["set"] == name and "against" not in row])
            error = None
            if len(values[0]) > 1:
                error = np.std(values, 1, ddof=1) / math.sqrt(len(values[0]))
            axis.errorbar(range(len(sets)), np.mean(values, 1), error, marker=marker, ms=4,
                          capsize=2, color=colour, label=TITLES[method])
        axis.set(xlabel=f"severity ({corrupted_name}; 0 is clean)", ylabel=label)
    axes[0, 0].legend(frameon=False)
    run.save_figure(figure, "shift.png")


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
    "glyphs": GLYPHS,
    "dirty_glyphs": GLYPHS,
    # Your own images: small networks that train on two CPU cores in minutes.
    "folder": dict(methods=["deep_ensemble", "forde_pca"], members=4, model="resnet9", width=0.25,
                   epochs=30, batch_size=16, schedule="one_cycle", shift="none"),
    # Large images have too many dimensions for the basis of FoRDE-PCA.
    "--model torchvision/NAME": dict(methods=["deep_ensemble", "forde_identity"], members=3,
                                     width=1.0, epochs=5, batch_size=16, lr=0.02,
                                     schedule="one_cycle", augment=True, shift="none"),
}


def parse_args(argv=None):
    """The options; each is added to the group of its role (see ROLES in common.py)."""
    parser = common.Parser("forde", __doc__, PRESETS, NETWORKS, dataset="glyphs", model="resnet18",
                           epochs=300, batch_size=128, lr=0.1, augment=True)
    training = parser.training.add_argument
    training("--members", "-m", type=at_least(1), default=10,
        help="number of ensemble members M (paper: 10)")
    training("--alpha", type=between(0, 1), default=0.4,
        help="lengthscales of forde_tuned, from 0 (identity) to 1 (PCA) (paper: 0.4 on CIFAR-100, "
        "0.2 on CIFAR-10)")
    training("--grad-of", choices=["logit", "logprob"], default="logit",
        help="input gradients of the true class's logit (paper) or log probability")
    training("--repulsion-coef", type=at_least(0, float), default=1.0,
        help="factor on the repulsion R (paper: 1)")
    training("--hidden", type=at_least(1), nargs="+", metavar="N", default=[256, 256, 256],
        help="numbers of hidden units of mlp (paper: three layers)")
    training("--weight-decay", type=at_least(0, float), default=5e-4,
        help="weight decay of all parameters (paper: 5e-4)")
    training("--schedule", choices=["published", "one_cycle"], default="published",
        help="'published' decreases the learning rate linearly from 50 to 90 %% of the epochs; "
        "'one_cycle' is better for short runs")
    training("--lr-ratio", type=between(0, 1), default=0.01,
        help="final over initial learning rate of the published schedule (paper: 0.01)")
    training("--val-fraction", type=between(0, 0.9), default=0.0,
        help="fraction of the training set that is held out to fit a temperature (paper: 0)")
    evaluation = parser.evaluation.add_argument
    evaluation("--methods", nargs="+", choices=METHODS, metavar="METHOD", default=["forde_pca"],
        help=f"methods to compare, from the same initial weights: {', '.join(METHODS)}")
    evaluation("--shift", choices=["none", "computed", "published"], default="published",
        help="corrupted test sets: computed here, or published files such as CIFAR-10-C")
    evaluation("--shift-examples", type=at_least(0), metavar="N", default=0,
        help="number of test images under each corruption; 0 is all")
    parser.runtime.add_argument("--chunk", type=at_least(0), default=0, metavar="C",
        help="number of members whose activations are in memory at a time; 0 is all. Less memory, "
        "but outputs and input gradients are computed twice")
    args = parser.parse(argv, run_name)
    args.methods = list(dict.fromkeys(args.methods))  # each one once
    check_options(args)
    return args


def run_name(args):
    """The name of the run directory."""
    return common.run_name(args, f"m{args.members}")


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if args.compile:
        raise UserError("--compile: a compiled network cannot be differentiated twice")
    if args.freeze:
        raise UserError("--freeze: members differ in their gradients by the image, so the whole "
                        "network is trained; remove this option")
    if args.epochs == 0 and args.model not in PUBLISHED_NETWORKS:
        raise UserError(f"--epochs 0 --model {args.model}: the members differ in new heads, which "
                        "must be trained; use --epochs 1 or more")
    if args.members == 1 and args.methods != ["deep_ensemble"]:
        raise UserError("--members 1: one particle cannot repel; use --methods deep_ensemble for "
                        "a single network")
    common.refuse(args, [
        (data.has_val_folder(args.dataset), ["val_fraction"], "on a folder with a part val"),
        (args.shift == "none", ["shift_examples"], "without corrupted test sets (--shift)"),
        (args.model != "mlp", ["hidden"], f"with --model {args.model}"),
        (args.schedule != "published", ["lr_ratio"], f"with --schedule {args.schedule}"),
        ("forde_tuned" not in args.methods, ["alpha"], "without --methods forde_tuned"),
        (args.methods == ["deep_ensemble"], ["repulsion_coef"], "where no members repel"),
    ])


# ---- Main ---------------------------------------------------------------------------------------


def published_statistics(train_set):
    """Mean and std per channel of CIFAR-10, a little different from those of the other scripts."""
    return (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load_splits(args, seed):
    """The sets of one seed, which splits off the validation set."""
    statistics = published_statistics if args.dataset == "cifar10" else None
    return data.load_splits(args, seed, val_fraction=args.val_fraction, statistics=statistics)


def check_network(train_set, args):
    """Refuse, before training, a network that fails on a batch, also when differentiated twice."""
    net = make_network(args, train_set.num_classes, train_set.shape).to(args.device).train()

    def differentiate_twice(images):
        labels = torch.zeros(len(images), dtype=torch.long, device=args.device)
        _, g = input_gradient(net, images, labels)
        g.sum().backward()

    common.try_batch(differentiate_twice, train_set, args)


def compute_basis(train_set, args):
    """The principal components of FoRDE-PCA: {"eigenvectors": [D, D], "eigenvalues": [D]}."""
    common.print_on_main(f"computing the eigenvectors of {len(train_set)} training images")
    device = "cpu" if args.device.type == "mps" else args.device  # MPS has no float64
    dim = math.prod(train_set.shape)
    total = torch.zeros(dim, dim, dtype=torch.float64, device=device)
    # Normalised images without augmentation.
    for batch in data.evaluation_loader(train_set, args).epoch():
        x = batch.images.to(device).flatten(1).double()                # [b, D]
        total.addmm_(x.T, x)
    eigenvectors, eigenvalues = pca(common.all_reduce(total) / (len(train_set) - 1))
    return {"eigenvectors": eigenvectors.cpu(), "eigenvalues": eigenvalues.cpu()}


def load_metric_root(splits, method, args, seed, run):
    """A of `metric_root` on the device; None for the identity, and where A is not needed."""
    alpha = {"forde_pca": 1.0, "forde_tuned": args.alpha}.get(method, 0.0)
    if alpha == 0 or args.eval:
        return None
    # Without a validation set, all seeds train on the same images.
    name = "basis" if splits.val is None else f"basis-seed{seed}"
    basis = run.cached(name, {}, partial(compute_basis, splits.train, args))
    return metric_root(basis["eigenvectors"], basis["eigenvalues"], alpha).to(args.device)


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    splits = load_splits(args, args.seed)
    corrupted = data.corrupted_sets(splits.test, args)
    check_network(splits.train, args)
    run = common.Run(args, splits.fingerprints, splits.summary())
    rows = []
    predictions = {}  # of the first seed, {method: Outputs}
    for seed in range(args.seed, args.seed + args.runs):
        if seed > args.seed:
            splits = load_splits(args, seed)  # another validation set
        for method in args.methods:
            # Algorithm 1: train the members together, predict with their mean.
            nets = make_ensemble(args, seed, splits.train.num_classes, splits.train.shape)
            A = load_metric_root(splits, method, args, seed, run)
            train(nets, splits, A, method, args, seed, run)
            rows += evaluate(nets, splits, corrupted, args, {"method": method, "seed": seed})
            if seed == args.seed and splits.predict is not None:
                predictions[method] = compute_outputs(nets, splits.predict, args)

    if args.plot and corrupted is not None:
        common.on_main(plot_shift, rows, splits.test.name, corrupted.name, run)
    if args.predict:
        common.on_main(write_predictions, predictions, splits, run)
    rows += paired_differences(rows)
    # The severities of corruption and the validation set are in results.csv.
    shown = [row for row in rows if "severity" not in row and row["set"] != "val"]
    return run.report(rows, COLUMNS, shown)


if __name__ == "__main__":
    common.launch(main)
