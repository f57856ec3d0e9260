"""First-order repulsive deep ensembles (FoRDE): members that repel in input-gradient space.

Trinh, Heinonen, Acerbi, Kaski, "Input-gradient space particle inference for neural network
ensembles", ICLR 2024, arXiv:2306.02775. Algorithm 1, for M members on the same batches:

  1. g_ib is the gradient of the true class's logit of member i with respect to input b.
  2. s_ib = A^T g_ib / |g_ib|. For FoRDE-PCA, A = U Lambda^(1/2), where the N normalised training
     images X have X^T X / (N - 1) = U Lambda U^T; for FoRDE-identity, A = I.
  3. k_ijb = exp(-|s_ib - s_jb|^2 / h_jb), h_jb = med_i |s_ib - s_jb|^2 / ln M; s_jb and h_jb are
     constants.
  4. Minimise sum_i CE_i + R, R = (1/B) sum_i log[(1/B) sum_b sum_j k_ijb]. This is Wasserstein
     gradient descent on the posterior. Predict with the mean of the members' probabilities.

Usage:
  python forde.py                                          # glyphs, three methods, two CPU cores
  torchrun --nproc_per_node 8 forde.py --dataset cifar100  # the paper's row: 10 members, 300 epochs
  python forde.py --eval --predict glyphs_letters          # evaluate again, predict another set
  python forde.py --dataset features --features train.npz test.npz    # on your own features

Expected (more in tests/RESULTS.md): `python forde.py --runs 10`, 30 seconds per seed on a CPU core:
  NLL under corruption 0.633 +- 0.011 (deep ensemble), by FoRDE-PCA 0.020 +- 0.005 and by
  FoRDE-identity 0.024 +- 0.003 lower (mean +- standard error of paired differences, n = 10).

Differences from the published code (github.com/AaltoPML/FoRDE, commit e8f9d74; JAX and Haiku):
  - The paper's Algorithm 1 doubles the exponent and has one bandwidth per example; the published
    code, which made the paper's results, has the form above. So does this script.
  - The basis is that of the images trained on; there, it includes held-out validation images (by
    default there are none).
  - The running variances of batch norm are unbiased, as in PyTorch (there biased: 0.05 % lower in
    the last layers of ResNet-18).
  - An input gradient of zero length is a constant; there, its unit vector has derivative 1e12.
  - TinyImageNet is scaled to [0, 1] (there 0 to 255, with statistics of that scale).
  - Validation images are drawn by the seed; --published-split draws equal shares of the classes
    by scikit-learn's seed 88.
  - Nesterov momentum is always on (as there, where its flag is ignored); no warm-up (off there).
  - nll_miss is None where the ensemble makes no error (there NaN); a single member has no R (NaN).
  - New: tuned lengthscales and the methods that the paper compares (it has no code for them),
    --chunk, --repulse-every.
"""

import argparse
import math
import time
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below `import math`,
# `import torch` and `import torch.nn.functional as F`.
#
# M members, B examples, K classes, D input dimensions. The repulsion of Algorithm 1 is
#   repulsion(log_kernel(unit_rows(g) @ A)), with input gradients g [M, B, D] and A of `metric_root`


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
        # With a graph even for constants: the `Convolution` of the networks above then computes
        # no gradients of weights.
        g, = torch.autograd.grad(of_label.sum(), x, create_graph=True)
    if constant:
        logits = logits.detach()
        g = g.detach()
    return logits, g.flatten(1)


def function_values(net, x, y):
    """The logits [B, K], and again as particles: function-RDE repels in them."""
    logits = net(x)
    return logits, logits


def no_particles(net, x, y):
    """The logits [B, K], and particles [B, 0]."""
    logits = net(x)
    return logits, logits[:, :0]


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

    second_moments: X^T X / (N - 1) [D, D] in float64, for normalised images X [N, D]. Normalising
    subtracts the mean of each channel, not that of each pixel (as published).
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(second_moments)
    return eigenvectors.flip(1), eigenvalues.flip(0).clamp_min(0)


def metric_root(eigenvectors, eigenvalues, alpha=1.0):
    """A [D, D] with A A^T = Sigma^-1, so that distances are those of the rows s = u A.

    paper: appendix D.4, Sigma = alpha Lambda^-1 + (1 - alpha) I in the eigenbasis; PCA is alpha 1.
    With alpha 1 a common factor of the eigenvalues cancels, because it is in the bandwidth, too.
    """
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
    """log k_ijb = -|s_ib - s_jb|^2 / h_jb [M, M, B] of s [M, B, D], M > 1; s_jb, h_jb are constant.

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


def disagreement(log_probs):
    """Fraction of ordered pairs of members that predict different classes; log_probs [M, N, K]."""
    members, _, num_classes = log_probs.shape
    if members == 1:
        return 0.0
    votes = F.one_hot(log_probs.argmax(2), num_classes).sum(0)         # [N, K]
    agreeing_pairs = (votes * (votes - 1)).sum(1)                      # [N]
    share = agreeing_pairs.double() / (members * (members - 1))
    return 1 - share.mean().item()


# ---- Model --------------------------------------------------------------------------------------
# Every layer must be differentiable twice: FoRDE trains through the gradient by the input.


class Convolution(torch.autograd.Function):
    """F.conv2d(x, weight, None, stride, padding), with a cheaper second derivative.

    PyTorch differentiates the gradient by x by means of a convolution whose kernel is as large as
    the image. Here this gradient is a transposed convolution, and is differentiated as one. The
    stride must divide the padded size minus the kernel's size.
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
            # With create_graph, only the gradient by the input is taken: see `input_gradient`.
            return F.conv_transpose2d(grad, weight, None, ctx.stride, ctx.padding), None, None, None
        wanted = (ctx.needs_input_grad[0], True, False)
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, wanted)
        return grad_x, grad_weight, None, None


class SameConv2d(nn.Conv2d):
    """A 3x3 convolution without bias, padded to ceil(size / stride) outputs."""

    def __init__(self, c_in, c_out, stride=1):
        padding = 1 if stride == 1 else 0
        super().__init__(c_in, c_out, 3, stride, padding, bias=False)

    def forward(self, x):
        if self.stride == (2, 2):
            # published code: JAX pads even sizes only at the end
            height, width = x.shape[2:]
            x = F.pad(x, (width % 2, 1, height % 2, 1))
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()
            weight = weight.bfloat16()
        return Convolution.apply(x, weight, self.stride, self.padding)


def projection(c_in, c_out, stride):
    """The layers of a shortcut between different shapes."""
    # Subsample first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
    return [nn.AvgPool2d(1, stride), nn.Conv2d(c_in, c_out, 1, bias=False)]


class BasicBlock(nn.Module):
    """ReLU(body(x) + shortcut(x)), with batch norm after each convolution."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.body = nn.Sequential(
            SameConv2d(c_in, c_out, stride), nn.BatchNorm2d(c_out), nn.ReLU(),
            SameConv2d(c_out, c_out), nn.BatchNorm2d(c_out))
        self.shortcut = nn.Sequential()
        if stride > 1 or c_in != c_out:
            self.shortcut = nn.Sequential(*projection(c_in, c_out, stride), nn.BatchNorm2d(c_out))

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
            self.projection = nn.Sequential(*projection(c_in, c_out, stride))

    def forward(self, x):
        h = self.before(x)
        if self.projection is None:
            return self.body(h) + x
        return self.body(h) + self.projection(h)


# Each of the following functions builds one network for inputs of `shape` (C, H, W): it returns a
# list of layers and the number of features that the last one gives.


def channels(count, args):
    return max(1, round(count * args.width))


def resnet9(args, shape):
    return resnet(args, shape, blocks=1)


def resnet18(args, shape):
    return resnet(args, shape, blocks=2)


def resnet(args, shape, blocks):
    """Four groups of basic blocks after a 3x3 convolution of stride 1, without a max pool."""
    c_in = channels(64, args)
    layers = [SameConv2d(shape[0], c_in), nn.BatchNorm2d(c_in), nn.ReLU()]
    for group in range(4):
        c_out = channels(64 * 2**group, args)
        for index in range(blocks):
            # Every group but the first one starts by halving the resolution.
            stride = 2 if group > 0 and index == 0 else 1
            layers.append(BasicBlock(c_in, c_out, stride))
            c_in = c_out
    return layers + [nn.AdaptiveAvgPool2d(1), nn.Flatten()], c_in


def preact_resnet18(args, shape):
    return preact_resnet(args, shape, channels(64, args), groups=(64, 128, 256, 512))


def wrn_16_4(args, shape):
    return preact_resnet(args, shape, 16, groups=(64, 128, 256))


def preact_resnet(args, shape, c_in, groups):
    """Groups of two pre-activation blocks after a 3x3 convolution with `c_in` channels."""
    layers = [SameConv2d(shape[0], c_in)]
    for group, count in enumerate(groups):
        c_out = channels(count, args)
        for index in range(2):
            stride = 2 if group > 0 and index == 0 else 1
            layers.append(PreActivationBlock(c_in, c_out, stride))
            c_in = c_out
    layers += [nn.BatchNorm2d(c_in), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return layers, c_in


def mlp(args, shape):
    """Linear layers with batch norm and ReLU."""
    layers = [nn.Flatten()]
    c_in = math.prod(shape)
    for count in args.hidden:
        c_out = channels(count, args)
        # As images of one pixel, because common.data_parallel shares only BatchNorm2d.
        layers += [nn.Linear(c_in, c_out), nn.Unflatten(1, (c_out, 1, 1)), nn.BatchNorm2d(c_out),
                   nn.ReLU(), nn.Flatten()]
        c_in = c_out
    return layers, c_in


# To add a network, add its function here. Batch norm must be nn.BatchNorm2d, and --chunk needs a
# network without dropout.
NETWORKS = {"resnet9": resnet9, "resnet18": resnet18, "preact_resnet18": preact_resnet18,
            "wrn_16_4": wrn_16_4, "mlp": mlp}


def make_network(args, num_classes, shape):
    """One member for inputs of `shape` (C, H, W), initialised as published; it returns logits."""
    net = nn.Sequential(*data.backbone_and_head(args, NETWORKS, num_classes, shape))
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            # Haiku's default: std 1 / sqrt(fan_in), cut at two standard deviations
            std = module.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    # published code: the last layer starts at zero, so the first forces are zero, too.
    nn.init.zeros_(net[-1].weight)
    return net


def make_ensemble(args, seed, num_classes, shape):
    """M networks on the device; member i of every method starts from the same weights."""
    nets = []
    for member in range(args.members):
        common.seed_all(seed, member)
        nets.append(make_network(args, num_classes, shape))
    memory_format = torch.contiguous_format
    if channels_last(args):
        memory_format = torch.channels_last
    return nn.ModuleList(nets).to(args.device, memory_format=memory_format)


def channels_last(args):
    """Whether images are in channels-last memory: second derivatives on CPUs are slower in it."""
    return args.device.type == "cuda" and args.model != "mlp"


# ---- Training -----------------------------------------------------------------------------------


class Members(nn.Module):
    """Some or all members of an ensemble, which DistributedDataParallel can wrap."""

    def __init__(self, nets):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x, y, particles):
        """Logits [C, B, K] and particles [C, B, ...], float32, by a function of `particles_of`."""
        outputs = [particles(net, x, y) for net in self.nets]
        # bfloat16 is not precise enough for losses and distances; float64 stays.
        logits, points = map(torch.stack, zip(*outputs))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype), points.to(dtype)


def particles_of(args):
    """The function of (net, x, y) that gives the logits, and what repels in this method."""
    if args.repulsion in ("input_gradient", "lit"):
        return partial(input_gradient, grad_of=args.grad_of)
    if args.repulsion == "function":
        return function_values
    return no_particles


# The repulsion of the baselines, given their particles [M, B, ...].
BASELINES = {"lit": local_independence, "function": function_repulsion}


def own_rows(batch):
    """Which rows of the global batch this process has, as a slice."""
    share, longer = divmod(batch.global_size, common.world_size())
    first = common.rank() * share + min(common.rank(), longer)
    return slice(first, first + len(batch.labels))


def global_batch(particles, batch):
    """Particles [M, B, ...] of all processes, from those of this process [M, b, ...]."""
    shape = (len(particles), batch.global_size) + particles.shape[2:]
    everyone = particles.new_zeros(shape)
    everyone[:, own_rows(batch)] = particles
    return common.all_reduce(everyone)


def ensemble_step(members, batch, metric, args):
    """Algorithm 1 on one batch: add the gradient of sum_i CE_i + R to those of the parameters.

    members: a function that gives logits [M, b, K] and particles [M, b, D] of this process's
    examples; metric: A of `metric_root`, None for the identity. Returns the cross entropy, summed
    over members and these examples, R, and the logits.
    """
    # 1. The input gradients of all members. Baselines have other particles.
    with common.autocast(args):
        logits, particles = members(batch.images, batch.labels, particles_of(args))

    # Members repel over the global batch.
    g = global_batch(particles.detach(), batch).requires_grad_()       # [M, B, D]
    if args.repulsion == "input_gradient":
        # 2. Unit vectors: only the directions of the gradients count.
        s = unit_rows(g)                                               # [M, B, D]
        if metric is not None:
            s = s @ metric.to(s)
        # 3. The kernel between members, which is summed over examples and members j.
        log_k = log_kernel(s)                                          # [M, M, B]
        value = repulsion(log_k)
    else:
        value = BASELINES[args.repulsion](g)
    # The force is minus the gradient of R with respect to this process's particles.
    force = -torch.autograd.grad(value, g)[0]                          # [M, B, D]
    force = force[:, own_rows(batch)]                                  # [M, b, D]

    # 4. The loss. The force is a constant: minus its product with the particles has the gradient
    # of R with respect to the weights.
    loss = data_loss(logits, batch.labels)
    repelling = -(particles * force).sum()
    total = loss / batch.global_size + args.repulsion_coef * repelling
    # The backward pass, also through the input gradients. DDP averages over the processes.
    (total * common.world_size()).backward()
    return loss.detach(), value.detach(), logits.detach()


def chunked_step(chunks, batch, metric, args):
    """`ensemble_step` with the activations of one chunk of members at a time, in two passes."""
    # The first pass, without a graph: the logits and particles of all members.
    parts = []
    with torch.no_grad(), common.autocast(args):
        for chunk in chunks:
            parts.append(chunk(batch.images, batch.labels, particles_of(args)))
    logits = torch.cat([part[0] for part in parts]).requires_grad_()
    particles = torch.cat([part[1] for part in parts]).requires_grad_()
    # The backward pass of Algorithm 1 ends at these outputs ...
    result = ensemble_step(lambda *_: (logits, particles), batch, metric, args)

    # ... and goes on to the weights in a second pass, which must not move running averages again.
    set_momentum(chunks, 0.0)
    by_logits = logits.grad.split(args.chunk)
    by_particles = particles.grad.split(args.chunk)
    for chunk, gradients in zip(chunks, zip(by_logits, by_particles)):
        with common.autocast(args):
            outputs = chunk(batch.images, batch.labels, particles_of(args))
        torch.autograd.backward(outputs, gradients)
    return result


def independent_step(chunks, batch, args):
    """Add the gradient of sum_i CE_i alone; returns what `ensemble_step` does, with R = 0."""
    losses = []
    outputs = []
    for chunk in chunks:
        with common.autocast(args):
            logits, _ = chunk(batch.images, batch.labels, no_particles)
        loss = data_loss(logits, batch.labels)
        mean_loss = loss / batch.global_size
        (mean_loss * common.world_size()).backward()
        losses.append(loss.detach())
        outputs.append(logits.detach())
    total = torch.stack(losses).sum()
    return total, torch.zeros_like(total), torch.cat(outputs)


def repel_weights(nets, num_train, args):
    """Weight-RDE: add the gradient of R / N, the repulsion of the weights; returns R / N."""
    points = []
    for net in nets:
        weights = [p.flatten() for p in net.parameters()]
        points.append(torch.cat(weights))
    points = torch.stack(points)                                       # [M, P]
    # The cross entropy is a mean over examples, so the prior is divided by their number.
    value = rbf_repulsion(points) / num_train
    (args.repulsion_coef * value).backward()
    return value.detach()


def set_momentum(nets, momentum):
    """Set how far a step moves the running statistics of batch norm."""
    for net in nets:
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
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


def train(nets, train_set, metric, args, seed, run, name):
    """Train all members together, on the same batches; save and resume the checkpoint `name`."""
    chunks = make_chunks(nets, args)
    optimiser = torch.optim.SGD(nets.parameters(), lr=args.lr, momentum=0.9, nesterov=True,
                                weight_decay=args.weight_decay)
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
        start = time.perf_counter()
        common.seed_all(seed, epoch, common.rank())  # for networks with dropout
        nets.train()
        totals = torch.zeros(3, device=args.device)  # cross entropy, R, correct predictions
        for step, batch in enumerate(common.progress(loader, epoch)):
            # Functions of the step: a resumed run needs no state of a scheduler.
            now = epoch * len(loader) + step
            lr = learning_rate(now, len(loader), args)
            for group in optimiser.param_groups:
                group["lr"] = lr
            # published code: averages with decay 0.9, divided by 1 - 0.9^t after t steps
            set_momentum(nets, 0.1 / (1 - 0.9 ** (now + 1)))
            optimiser.zero_grad()
            repels = now % args.repulse_every == 0
            if args.repulsion in ("none", "weight") or not repels:
                loss, value, logits = independent_step(chunks, batch, args)
            elif len(chunks) == 1:
                loss, value, logits = ensemble_step(chunks[0], batch, metric, args)
            else:
                loss, value, logits = chunked_step(chunks, batch, metric, args)
            if args.repulsion == "weight" and repels:
                value = repel_weights(nets, len(train_set), args)
            optimiser.step()

            totals[0] += loss
            totals[1] += value * len(batch.labels)
            totals[2] += (logits.argmax(2) == batch.labels).sum()
        examples = len(loader) * batch.global_size
        loss, value, accuracy = (common.all_reduce(totals) / examples / args.members).tolist()
        history.append({"epoch": epoch + 1, "loss": loss, "repulsion": value,
                        "accuracy": accuracy, "lr": lr, "seconds": time.perf_counter() - start})
        run.save(name, history, made_from, net=nets, optimiser=optimiser)


# ---- Evaluation ---------------------------------------------------------------------------------


def batches_of(dataset, args):
    """The batches of a whole set, in its order."""
    loader = data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                         channels_last=channels_last(args))
    return loader.epoch()


@torch.no_grad()
def predict(nets, dataset, args):
    """Log probabilities [M, N, K] of all members for a whole set; None on all other processes."""
    nets.eval()
    batches = []
    for batch in batches_of(dataset, args):
        with common.autocast(args):
            logits = torch.stack([net(batch.images) for net in nets], 1)   # [b, M, K]
        batches.append({"index": batch.index, "log_probs": logits.float().log_softmax(2)})
    columns = common.gather_rows(batches)
    if not columns:
        return None
    return columns["log_probs"].transpose(0, 1)


@torch.no_grad()
def gradient_distance(nets, dataset, args):
    """Mean of 1 - cos of two members' input gradients in eval mode, over pairs and examples."""
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


def predictive_metrics(log_probs, labels):
    """Metrics of the mean prediction of log_probs [M, N, K]; nll_miss is the NLL of its errors."""
    uncertainty = uncertainties(log_probs)
    mean = mean_log_probs(log_probs)
    probs = mean.exp()
    metrics = {"accuracy": common.accuracy(probs, labels), "nll": common.nll(mean, labels),
               "nll_miss": None, "ece15": common.ece(probs, labels),
               "brier": common.brier(probs, labels)}
    wrong = probs.argmax(1) != labels
    if wrong.any():
        metrics["nll_miss"] = common.nll(mean[wrong], labels[wrong])
    for k in (2, 3):
        if k <= probs.shape[1]:
            metrics[f"top{k}_accuracy"] = common.top_k_accuracy(probs, labels, k)
    metrics["member_accuracy"] = np.mean([common.accuracy(own, labels) for own in log_probs])
    metrics["disagreement"] = disagreement(log_probs)
    return metrics | moments(uncertainty)


def moments(uncertainty):
    """Mean and population standard deviation over a set of its `uncertainties`."""
    metrics = {}
    for name in ("total", "aleatoric", "epistemic"):
        metrics[f"{name}_mean"] = uncertainty[name].mean()
        metrics[f"{name}_std"] = uncertainty[name].std(correction=0)
    return metrics


def clean_rows(sets, outputs, distance, key):
    """The rows of the test set, of the validation set, and of the test set against OOD sets.

    outputs: data.Sets of log probabilities [M, N, K]; key: method and seed, with which rows begin
    """
    test = sets.test
    row = {**key, "set": test.name, "n": len(test)}
    row |= predictive_metrics(outputs.test, test.labels)
    row["gradient_distance"] = distance
    rows = [row]
    if sets.val is not None:
        on_val = mean_log_probs(outputs.val)
        temperature = common.fit_temperature(on_val, sets.val.labels)
        # Logarithms of probabilities are logits: their softmax gives the probabilities back.
        scaled = (mean_log_probs(outputs.test) / temperature).log_softmax(1)
        row["temperature"] = temperature
        row["nll_scaled"] = common.nll(scaled, test.labels)
        row["ece15_scaled"] = common.ece(scaled.exp(), test.labels)
        val_row = {**key, "set": "val", "n": len(sets.val)}
        rows.append(val_row | predictive_metrics(outputs.val, sets.val.labels))
    inside = uncertainties(outputs.test)
    for name, log_probs in outputs.ood.items():
        outside = uncertainties(log_probs)
        row = {**key, "set": test.name, "against": name, "n": len(test)}
        for score in ("total", "epistemic"):
            found = common.ood_metrics(inside[score], outside[score], larger_means="ood")
            for metric, value in found.items():
                row[f"{metric}_{score}"] = value
        # The moments are those of the OOD set.
        rows.append(row | moments(outside))
    return rows


class Shift(NamedTuple):
    """The corrupted test sets of a run."""

    name: str                     # of all of them together
    kinds: list                   # of corruption
    clean: data.ImageSet | None   # the images to corrupt; None for the published sets


def find_shift(test_set, args):
    """The Shift of these options; None if there is none."""
    if args.shift == "none":
        return None
    if args.shift == "published":
        name = f"{args.dataset}_c"
        kinds = data.corruption_kinds(name, args.data_dir)
        if not kinds:
            return None
        return Shift(data.corrupted_name(name, kinds), kinds, None)
    data.check_sizes(test_set, limit=args.shift_examples or math.inf)
    clean = data.evenly(test_set, args.shift_examples or None)
    if isinstance(clean, data.StreamedSet):
        clean = common.on_each_machine(clean.in_memory)
    # These corruptions are not those of the published -C sets.
    name = "glyphs_c" if test_set.name == "glyphs" else f"{test_set.name}_computed_c"
    return Shift(name, list(data.CORRUPTIONS), clean)


def corrupted_set(shift, kind, severity, test_set, args):
    """The test set, or --shift-examples of it, under one corruption."""
    if shift.clean is not None:
        return data.corrupted(shift.clean, kind, severity)
    dataset = data.load_corrupted(f"{args.dataset}_c", kind, severity, args.data_dir)
    return data.evenly(data.match(dataset, test_set), args.shift_examples or None)


DIVERSITY_EXAMPLES = 1000  # of a test set, for the input gradients


def severity_row(nets, shift, severity, test_set, args, key):
    """The row of one severity, with all kinds of corruption as one set."""
    log_probs = []
    labels = []
    distances = []
    examples = math.ceil(DIVERSITY_EXAMPLES / len(shift.kinds))
    for kind in shift.kinds:
        dataset = corrupted_set(shift, kind, severity, test_set, args)
        log_probs.append(predict(nets, dataset, args))
        labels.append(dataset.labels)
        some = data.evenly(dataset, examples)
        distances.append(gradient_distance(nets, some, args))
    labels = torch.cat(labels)
    row = {**key, "set": f"{shift.name}_s{severity}", "severity": severity, "n": len(labels)}
    row |= common.on_main(pooled_metrics, log_probs, labels)
    row["gradient_distance"] = np.mean(distances)
    return row


def pooled_metrics(log_probs, labels):
    """Metrics of the union of sets, from a list of log_probs [M, n, K] and all labels [N]."""
    return predictive_metrics(torch.cat(log_probs, 1), labels)


def evaluate_shift(nets, shift, test_set, args, key):
    """The rows of each severity, and of their mean; one line is printed after each severity."""
    rows = []
    for severity in data.SEVERITIES:
        row = severity_row(nets, shift, severity, test_set, args, key)
        scores = f"accuracy {row['accuracy']:.4f}, NLL {row['nll']:.4f}"
        common.print_on_main(f"{row['method']}-seed{row['seed']}: {row['set']}, {row['n']} images: {scores}")
        rows.append(row)
    mean = {**key, "set": shift.name, "n": 0}
    for row in rows:
        mean["n"] += row["n"]
    for metric in ("accuracy", "nll", "ece15", "disagreement", "gradient_distance"):
        mean[metric] = np.mean([row[metric] for row in rows])
    return rows + [mean]


def evaluate(nets, sets, shift, args, key):
    """All rows of one ensemble."""
    test = predict(nets, sets.test, args)
    val = None
    if sets.val is not None:
        val = predict(nets, sets.val, args)
    ood = {}
    for name, dataset in sets.ood.items():
        ood[name] = predict(nets, dataset, args)
    outputs = data.Sets(None, val, test, ood, None)
    some = data.evenly(sets.test, DIVERSITY_EXAMPLES)
    distance = gradient_distance(nets, some, args)
    rows = common.on_main(clean_rows, sets, outputs, distance, key)
    if shift is not None:
        rows += evaluate_shift(nets, shift, sets.test, args, key)
    return rows


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
        for name, value in row.items():
            if name in ("seed", "set", "against", "n", "severity"):
                difference[name] = value
            elif name in COLUMNS:
                difference[name] = value - first[key][name]
        differences.append(difference)
    return differences


def write_predictions(predictions, sets, run):
    """predictions.csv from {method: log_probs [M, N, K]}, the methods side by side."""
    columns = common.prediction_columns(sets.predict, predictions, sets.train.classes)
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------

PLANE_SIDE = 120  # points per side of the toy's picture
PLANE_LIMIT = 12  # its largest coordinate


def plot_shift(rows, test_name, shift_name, run):
    """Metrics by severity (0 is clean), with standard errors over the seeds."""
    labels = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece15": "ECE, 15 bins",
              "gradient_distance": "1 - cos of input gradients"}
    sets = [test_name]
    for severity in data.SEVERITIES:
        sets.append(f"{shift_name}_s{severity}")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = common.make_figure(1, len(labels), figsize=(14, 3.5))
    for axis, (metric, label) in zip(axes, labels.items()):
        for method, colour, marker in zip(methods, common.colours(len(methods)), "osD^vP*"):
            values = {name: [] for name in sets}
            for row in rows:
                if row["method"] == method and row["set"] in values and "against" not in row:
                    values[row["set"]].append(row[metric])
            mean = [np.mean(of_set) for of_set in values.values()]
            error = [common.standard_error(of_set) or 0 for of_set in values.values()]
            axis.errorbar(range(len(sets)), mean, error, marker=marker, ms=4, capsize=2,
                          color=colour, label=method.replace("_", " "))
        axis.set(xlabel=f"severity ({shift_name}; 0 is clean)", ylabel=label)
    axes[0].legend(frameon=False)
    run.save_figure(figure, "shift.png")


def plot_toy(points, outputs, run):
    """Epistemic uncertainty over the plane; outputs {method: log_probs [M, N, K]}."""
    figure, axes = common.make_figure(1, len(outputs), figsize=(4.4 * len(outputs), 3.7),
                                      squeeze=False)
    x, y = points.images.flatten(1).T.numpy()
    colours = np.array(common.COLOURS)[points.labels]
    extent = (-PLANE_LIMIT, PLANE_LIMIT, -PLANE_LIMIT, PLANE_LIMIT)
    pictures = {}
    for name, log_probs in outputs.items():
        uncertainty = common.ensemble_uncertainty(log_probs)["epistemic"]
        pictures[name] = uncertainty.view(PLANE_SIDE, PLANE_SIDE).numpy()
    highest = max(picture.max() for picture in pictures.values())
    for axis, name in zip(axes[0], pictures):
        image = axis.imshow(pictures[name], origin="lower", extent=extent, vmin=0, vmax=highest)
        axis.scatter(x, y, 9, colours, edgecolors="white", linewidths=0.4)
        axis.set(title=name.replace("_", " "))
    figure.colorbar(image, ax=axes, label="epistemic uncertainty (nats)")
    run.save_figure(figure, "toy.png")


# ---- Options ------------------------------------------------------------------------------------

# method: the space in which its members repel, and for FoRDE the alpha of its metric
METHODS = {
    "deep_ensemble": dict(repulsion="none"),
    "forde_pca": dict(repulsion="input_gradient", alpha=1.0),
    "forde_identity": dict(repulsion="input_gradient", alpha=0.0),
    "forde_tuned": dict(repulsion="input_gradient"),  # --alpha
    "weight_rde": dict(repulsion="weight"),
    "function_rde": dict(repulsion="function"),
    "lit": dict(repulsion="lit"),
}
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
    # paper: features of a frozen ViT, three hidden layers with batch norm
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
    "pretrained": dict(),
    "frozen": dict(),
}
# These only change what is computed from trained networks, or how much memory training takes, so
# they do not identify a run.
EVALUATION_OPTIONS = ("methods", "ood", "shift", "shift_examples", "chunk")


def parse_args(argv=None):
    parser = common.Parser("forde", __doc__, PRESETS, NETWORKS, dataset="glyphs",
                           model="resnet18", epochs=300, batch_size=128, lr=0.1)
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument_group("forde.py").add_argument
    add("--methods", nargs="+", choices=list(METHODS), metavar="METHOD", default=["forde_pca"],
        help=f"methods to compare, from the same initial weights: {', '.join(METHODS)}")
    add("--members", "-m", type=at_least(1), default=10,
        help="number of ensemble members M (paper: 10)")
    add("--alpha", type=between(0, 1), default=0.4,
        help="metric of forde_tuned, from 0 (identity) to 1 (PCA) (paper: 0.4 on CIFAR-100, 0.2 on "
        "CIFAR-10)")
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
        help="hold out the same examples as the published code: the same fraction of every class")
    add("--features", nargs=2, metavar="NPZ", help="training and test file of --dataset features, "
        "with 'features' [N, D] and 'labels' [N]; --ood and --predict then take such files, too")
    add("--ood", nargs="*", metavar="NAME", default=[],
        help="out-of-distribution sets; folder:PATH is a folder of images")
    add("--shift", choices=["none", "computed", "published"], default="published",
        help="corrupted test sets: computed here, or published files such as CIFAR-10-C")
    add("--shift-examples", type=at_least(0), metavar="N", default=0,
        help="number of test images under each corruption; 0 is all")
    add("--chunk", type=at_least(0), default=0, metavar="C",
        help="number of members whose activations are in memory at a time; 0 is all. Less memory, "
        "but one more forward pass per step")
    args = parser.parse(argv)
    args.methods = list(dict.fromkeys(args.methods))
    check_options(args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if args.compile:
        raise UserError("--compile: a compiled network cannot be differentiated twice")
    if args.chunk and args.members % args.chunk:
        raise UserError(f"--chunk {args.chunk} must divide --members {args.members}; or use 0 for "
                        "all members at once")
    if (args.dataset == "features") != bool(args.features):
        raise UserError("--dataset features and --features TRAIN.npz TEST.npz must be used "
                        "together")
    no_images = {"features": ["val_fraction", "published_split", "image_size"],
                 "toy_classification": ["val_fraction", "published_split", "image_size",
                                        "limit_train", "ood", "predict", "data_dir", "workers"]}
    if args.dataset in no_images:
        common.refuse(args, no_images[args.dataset], f"with --dataset {args.dataset}")
        if args.augment or args.shift != "none":
            raise UserError(f"--dataset {args.dataset} has no images; it needs --no-augment and "
                            "--shift none")
    if args.shift == "published" and f"{args.dataset}_c" not in data.CORRUPTED:
        raise UserError(f"--shift published: not available for {args.dataset}; use --shift "
                        "computed or none")
    if args.shift == "none":
        common.refuse(args, ["shift_examples"], "without corrupted test sets (--shift)")
    if not args.val_fraction:
        common.refuse(args, ["published_split"], "without --val-fraction")
    if args.model != "mlp":
        common.refuse(args, ["hidden"], f"with --model {args.model}")
    if args.schedule != "published":
        common.refuse(args, ["lr_ratio"], f"with --schedule {args.schedule}")
    if "forde_tuned" not in args.methods:
        common.refuse(args, ["alpha"], "without --methods forde_tuned")
    if args.methods == ["deep_ensemble"] or args.members == 1:
        common.refuse(args, ["repulsion_coef", "repulse_every"], "where no members repel")


# ---- Main ---------------------------------------------------------------------------------------


def points_set(name, x, y=None):
    """Points x [N, 2] with labels y [N], or without, as images of one pixel."""
    if y is None:
        y = torch.full((len(x),), -1)
    images = x[:, :, None, None]
    return data.ImageSet(name, images, y, num_classes=5, mean=(0.0, 0.0), std=(1.0, 1.0))


def toy_plane():
    """A grid of points [N, 2] around the toy's Gaussians, row by row."""
    axis = torch.linspace(-PLANE_LIMIT, PLANE_LIMIT, PLANE_SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y], 2).flatten(0, 1)


def load_toy():
    """The sets of the toy; points of the plane that are far from its training points are OOD."""
    x, y = data.gaussian_ring(40)
    test_x, test_y = data.gaussian_ring(20, seed=43)
    # An epoch sees each point 50 times: a pass over 200 points would be a single step.
    train = points_set("toy_classification", x.repeat(50, 1), y.repeat(50))
    plane = toy_plane()
    far = plane[torch.cdist(plane, x).amin(1) > 3]
    ood = {"far": points_set("far", far)}
    test = points_set(train.name, test_x, test_y)
    return data.Sets(train, None, test, ood, points_set("plane", plane))


def load_features(args):
    """The sets of --features: a training and a test file, and others like them."""
    train = data.evenly(data.feature_set(args.features[0]), args.limit_train)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    test = data.feature_set(args.features[1], train)
    ood = data.ood_sets(args.ood, train, args.data_dir, required="ood" in args.given)
    predicted = None
    if args.predict:
        predicted = data.predict_set(args.predict, train, args.data_dir)
    data.check_sizes(train, test, predicted, *ood.values())
    return data.Sets(train, None, test, ood, predicted)


def load_sets(args, seed):
    """All sets of a run as data.Sets; `seed` splits off the validation set."""
    if args.dataset == "toy_classification":
        return load_toy()
    if args.features:
        return load_features(args)
    published_split = "forde" if args.published_split else None
    statistics = None
    if args.dataset == "cifar10":
        # published code: these differ a little from those of the other scripts
        statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return data.load_sets(args.dataset, args.data_dir, seed=seed, val_fraction=args.val_fraction,
                          published_split=published_split, image_size=args.image_size,
                          limit_train=args.limit_train, statistics=statistics, ood=args.ood,
                          ood_required="ood" in args.given, predict=args.predict)


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
    """Refuse, before training, a basis that needs more memory than the device has."""
    dim = math.prod(train_set.shape)
    needed = 5 * 8 * dim**2  # in float64, with the workspace of eigh
    memory = common.device_memory(args.device)
    if memory and needed > memory:
        raise UserError(f"the basis of {dim} inputs needs {needed / 1e9:.0f} GB, and the device "
                        f"has {memory / 1e9:.0f} GB; use --methods forde_identity, or a smaller "
                        "--image-size")


def needs_basis(args):
    """Whether a method uses the eigenvectors of the training images."""
    some_method = "forde_pca" in args.methods or "forde_tuned" in args.methods
    return some_method and args.members > 1


def second_moments(train_set, args):
    """X^T X / (N - 1) [D, D] in float64, of the normalised images X [N, D] without augmentation."""
    device = "cpu" if args.device.type == "mps" else args.device  # MPS has no float64
    dim = math.prod(train_set.shape)
    total = torch.zeros(dim, dim, dtype=torch.float64, device=device)
    for batch in batches_of(train_set, args):
        x = batch.images.to(device).flatten(1).double()                # [b, D]
        total.addmm_(x.T, x)
    return common.all_reduce(total) / (len(train_set) - 1)


def principal_components(train_set, args):
    """The basis of FoRDE-PCA in float32, {"eigenvectors": [D, D], "eigenvalues": [D]}."""
    common.print_on_main(f"computing the eigenvectors of {len(train_set)} training images")
    eigenvectors, eigenvalues = pca(second_moments(train_set, args))
    return {"eigenvectors": eigenvectors.float().cpu(), "eigenvalues": eigenvalues.float().cpu()}


def with_method(args, method):
    """The options of one method."""
    args = common.with_options(args, **METHODS[method])
    if args.members == 1:
        args.repulsion = "none"  # ln 1 = 0: a single member has no kernel
    return args


def metric_of(basis, args):
    """A of `metric_root` on the device; None for the identity, and for methods without a metric."""
    if basis is None or args.repulsion != "input_gradient" or args.alpha == 0:
        return None
    metric = metric_root(basis["eigenvectors"], basis["eigenvalues"], args.alpha)
    return metric.to(args.device)


def run_name(args):
    """The name of the run directory."""
    name = [data.set_name(args.dataset), args.model]
    if args.width != 1:
        name.append(f"w{args.width:g}")
    return common.join_name(*name, f"m{args.members}", f"seed{args.seed}")


def main(argv=None):
    """Run the script; returns the rows of its table."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args, args.seed)
    shift = find_shift(sets.test, args)
    check_network(sets.train, args)
    if needs_basis(args):
        check_basis(sets.train, args)
    run = common.Run(args, "forde", run_name(args), EVALUATION_OPTIONS)
    rows = []
    predictions = {}  # of the first seed, {method: log_probs [M, N, K]}
    for seed in range(args.seed, args.seed + args.runs):
        if seed > args.seed:
            sets = load_sets(args, seed)  # another validation set
        basis = None  # only training needs it
        if needs_basis(args) and not args.eval:
            images = {"training images": data.digest(sets.train)}
            basis = run.load_or_compute(f"basis-seed{seed}", images,
                                        partial(principal_components, sets.train, args))
        for method in args.methods:
            method_args = with_method(args, method)
            nets = make_ensemble(args, seed, sets.train.num_classes, sets.train.shape)
            metric = metric_of(basis, method_args)
            train(nets, sets.train, metric, method_args, seed, run, f"{method}-seed{seed}")
            rows += evaluate(nets, sets, shift, args, {"method": method, "seed": seed})
            if sets.predict is not None and seed == args.seed:
                predictions[method] = predict(nets, sets.predict, args)

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
