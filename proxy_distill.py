"""Ensemble distribution distillation with proxy targets: one student for many classes.

Ryabinin, Malinin, Gales, "Scaling Ensemble Distribution Distillation to Many Classes with Proxy
Targets", NeurIPS 2021, arXiv:2105.06987. The method:

  1. Train M networks by cross entropy. Of their predictions p_m of an image, the mean is
     pi = (1/M) sum_m p_m, and the spread is RMI = (1/M) sum_m KL(pi || p_m).
  2. The proxy of the ensemble is the Dirichlet distribution with mean pi and precision (sum of
     concentrations) beta_0 = (K - 1) / (2 RMI), for K classes.
  3. A student's logits z define the Dirichlet with concentrations alpha = exp(z) + 1. It minimises
     the REVERSE divergence KL(Dir(alpha) || Dir(pi beta_0 + 1)) / beta_0. Likely classes dominate
     its gradient; in the forward divergence and in EnD2's likelihood the unlikely ones do.
  4. The student predicts softmax(z), the mean of Dir(exp(z)), now without the 1; its uncertainties
     are those of this Dirichlet.

Usage:
  python proxy_distill.py                          # numbers (1000 classes), offline, two CPU cores
  torchrun --nproc_per_node 8 proxy_distill.py --dataset imagenet            # the paper's row
  python proxy_distill.py --dataset folder:images --model torchvision/resnet18     # your network
  python proxy_distill.py --dataset imagenet --published-evaluation --losses --ensemble-paths FILES
    # the published members (see README.md); without --losses they also teach students

Expected (more in tests/RESULTS.md): 99.6 % right by the ensemble, 98.1 by one network, 98.0 by the
  student, 0.1 by EnD2 and the forward KL; AUROC of letters 0.998 by student and ensemble (n = 3).

Differences from the published code (github.com/yandex-research/proxy-dirichlet-distillation):
  - The default loss is the paper's (there, for ImageNet: forward KL); offsets are 1 (there, 0).
  - Kept: the target of the reverse KL has precision beta_0 + 2 K (--target-offset 0: the paper's
    beta_0 + K).
  - RMI is float64 and at least 0 (there, float32: identical members have negative precisions).
    2^-23 is added in beta_0 alone (there, also inside logarithms and gamma functions). The reverse
    KL is exact for logits from -80 to 690, and constant beyond (there, wrong from 40 on).
  - The evaluated proxy has precision (K - 1) / (2 RMI) (there, (M - 1) / (2 RMI)), EPKL is a mean
    over pairs (there, a sum), RMI is EPKL - MI (there, that sum - MI).
  - A single softmax has no epistemic uncertainty (there, that of Dir(exp(z)), of arbitrary scale).
  - MIMO averages probabilities (there, logits) and is evaluated as an ensemble.
  - Batch norm and metrics are over all processes (there, of one GPU); --opt adam has the schedule
    (there, AdamW without); the step schedule has no milestone before the second epoch.
  - Images are resized in proportion, those of ImageNet-C only with --image-size;
    --published-evaluation makes both sides 256, as there, but by Pillow with antialiasing (there,
    OpenCV). On equal logits, metrics then agree (with ece10 and mce10), but for the ensemble's
    RMI, its proxy and MIMO. The labels of ImageNet-O, which mean nothing, are not used.
  - --amp is bfloat16 (there, float16). Ties share a rank in PRR (there, the order of rows). Means
    over corruptions are new. The last epoch counts (there, also the best on validation images).
Not here: precision and recall of errors; the paper's machine translation and speech recognition.
"""

import argparse
import hashlib
import itertools
import math
import re
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of math, typing and torch. B images, M members, K classes; z [B, K]: a student's
# logits. All results are float64.

LOSSES = ("forward_kl", "dirichlet_likelihood", "proxy", "rkl_proxy")
EPS = 2.0**-23          # published code: keeps the precision of members that agree finite


class Ensemble(NamedTuple):
    """What losses and uncertainties need to know of the predictions p_m of M members."""

    log_probs: Tensor       # [B, K]  ln pi, with the mean prediction pi = (1/M) sum_m p_m
    mean_log_probs: Tensor  # [B, K]  (1/M) sum_m ln p_m
    aleatoric: Tensor       # [B]  (1/M) sum_m H(p_m), in nats
    rmi: Tensor             # [B]  (1/M) sum_m KL(pi || p_m), in nats, at least 0


def ensemble_statistics(logits_of_members):
    """The Ensemble of the members' logits, each [B, K], which may come from a generator.

    One member at a time is in memory. No gradient reaches the members.
    """
    count = 0
    probs_sum = 0.0
    log_probs_sum = 0.0
    entropy_sum = 0.0
    for logits in logits_of_members:
        log_probs = logits.detach().double().log_softmax(-1)           # [B, K]  ln p_m
        probs = log_probs.exp()
        probs_sum = probs_sum + probs
        log_probs_sum = log_probs_sum + log_probs
        entropy_sum = entropy_sum - torch.linalg.vecdot(probs, log_probs)
        count += 1
    # A probability can underflow; that of a class that all members exclude counts as 1e-308.
    log_pi = (probs_sum / count).clamp_min(torch.finfo(torch.float64).tiny).log()
    mean_log_probs = log_probs_sum / count
    rmi = torch.linalg.vecdot(log_pi.exp(), log_pi - mean_log_probs)   # [B]
    return Ensemble(log_pi, mean_log_probs, entropy_sum / count, rmi.clamp_min(0))


def proxy_precision(ensemble):
    """The proxy's precision beta_0 = (K - 1) / (2 RMI + EPS) [B]; EPS keeps it finite.

    A Dirichlet with mean pi and large concentrations has the RMI (K - 1) / (2 beta_0), by
    Stirling's formula. It fits poorly where members are certain of different classes: the proxy
    then has far less mutual information than the ensemble.
    """
    num_classes = ensemble.log_probs.shape[-1]
    return (num_classes - 1) / (2 * ensemble.rmi + EPS)


def forward_kl_loss(logits, ensemble):
    """EnD, plain distillation: KL(pi || softmax(z)) [B], in nats."""
    log_probs = logits.double().log_softmax(-1)
    pi = ensemble.log_probs.exp()
    return (pi * (ensemble.log_probs - log_probs)).sum(-1)


def dirichlet_likelihood_loss(logits, ensemble, offset=1.0):
    """EnD2: -(1/M) sum_m ln Dir(p_m; alpha) [B], with alpha = exp(z) + offset.

    Training collapsed in all trials with offset 1: for 1000 classes (numbers) and for ten (MNIST),
    by Adam and by SGD (--lr 0.1 to 1e-5), accuracy stayed near chance. (By SGD, EnD learnt at
    0.1; the reverse KL did at 0.02, and diverged at 0.1.) The unlikely classes together outweigh
    the likely one in the gradient, by a factor that grows with their number: they pull all logits
    down to where exp(z), and so the gradient, vanishes.
    """
    alpha = logits.double().exp() + offset                             # [B, K]
    log_norm = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    return log_norm - ((alpha - 1) * ensemble.mean_log_probs).sum(-1)


def proxy_loss(logits, ensemble, model_offset=1.0, target_offset=1.0):
    """The forward divergence KL(Dir(pi beta_0 + t) || Dir(exp(z) + m)) [B].

    Training collapsed in the same trials as that of EnD2, also with the published arithmetic (a
    float32 target); with m = 0, MNIST was learnt in part, and 1000 classes were not. With t = 0 it
    overflows where members are certain.
    """
    alpha = logits.double().exp() + model_offset                       # [B, K]
    precision = proxy_precision(ensemble)[:, None]
    beta = ensemble.log_probs.exp() * precision + target_offset        # [B, K]
    alpha_0 = alpha.sum(-1)
    beta_0 = beta.sum(-1)
    log_norm_alpha = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha_0)
    log_norm_beta = torch.lgamma(beta).sum(-1) - torch.lgamma(beta_0)
    log_means = torch.digamma(beta) - torch.digamma(beta_0)[:, None]   # E ln p_k under the target
    return log_norm_alpha - log_norm_beta + ((beta - alpha) * log_means).sum(-1)


def rkl_proxy_loss(logits, ensemble, model_offset=1.0, target_offset=1.0):
    """The reverse divergence KL(Dir(exp(z) + m) || Dir(pi b + 1)) / b [B].

    The paper has b = beta_0, which is t = 0. published code: b = beta_0 + K t with t = 1, so that
    the precision of the target is beta_0 + 2 K. At the optimum for m = 1, softmax(z) = pi and
    sum_k exp(z_k) = b. A constant is left out: the values of two batches cannot be compared.
    """
    b = proxy_precision(ensemble) + logits.shape[-1] * target_offset
    return ReverseKL.apply(logits.double(), ensemble.log_probs.exp(), b[:, None], model_offset)


class ReverseKL(torch.autograd.Function):
    """The reverse KL to the proxy [B], with its gradient in closed form.

        L = KL(Dir(alpha) || Dir(pi b + 1)) / b + constant, with alpha = exp(z) + m
          = -sum_k pi_k [psi(alpha_k) - psi(alpha_0)] - H / b
        H = sum_k q(alpha_k) - q(alpha_0) - (K - 1) psi(alpha_0), the entropy of Dir(alpha)
        dL/dz_k = exp(z_k) { psi'(alpha_0) - pi_k psi'(alpha_k)
            + [r(alpha_k) - r(alpha_0) - psi'(alpha_k) + K psi'(alpha_0)] / b }

    with q(x) = lnGamma(x) - (x - 1) psi(x) + x and r(x) = x psi'(x) - 1. Large terms cancel within
    q and r, and nowhere else, so that no precision is lost. z, pi [B, K] and b [B, 1] in float64;
    alpha_0 = sum_k alpha_k. The closed form costs less than autograd, and can be differentiated
    once. Logits outside of LOGITS are clamped to it, but keep a gradient, which pulls them back.
    """

    @staticmethod
    def forward(ctx, z, pi, b, offset):
        exp_z = z.clamp(*LOGITS).exp()
        alpha = exp_z + offset                                         # [B, K]
        alpha_0 = alpha.sum(-1, keepdim=True)                          # [B, 1]
        num_classes = z.shape[-1]
        trigamma = torch.polygamma(1, alpha)
        trigamma_0 = torch.polygamma(1, alpha_0)
        bracket = trigamma_rest(alpha, trigamma) - trigamma_rest(alpha_0, trigamma_0)
        bracket = bracket - trigamma + num_classes * trigamma_0
        ctx.save_for_backward(exp_z * (trigamma_0 - pi * trigamma + bracket / b))

        digamma = torch.digamma(alpha)
        digamma_0 = torch.digamma(alpha_0)
        entropy = entropy_part(alpha, digamma).sum(-1, keepdim=True)   # [B, 1]
        entropy = entropy - entropy_part(alpha_0, digamma_0) - (num_classes - 1) * digamma_0
        # The means of ln p_k are digamma - digamma_0.
        return torch.linalg.vecdot(pi, digamma_0 - digamma) - (entropy / b)[:, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gradient, = ctx.saved_tensors
        return grad[:, None] * gradient, None, None, None


LOGITS = (-80.0, 690.0)  # float64 holds exp(709); float32, for m = 0, a gradient of exp(80)
LARGE = 1000.0           # where three terms of Stirling's series are exact to 1e-13


def entropy_part(x, digamma):
    """q(x) = lnGamma(x) - (x - 1) psi(x) + x, elementwise for x > 0, given psi(x); float64."""
    y = 1 / x
    series = (x.log() + math.log(2 * math.pi * math.e)) / 2 - y * (1 / 3 + y * (1 / 12 + y / 90))
    return torch.where(x < LARGE, torch.lgamma(x) - (x - 1) * digamma + x, series)


def trigamma_rest(x, trigamma):
    """r(x) = x psi'(x) - 1, elementwise for x > 0, given psi'(x); float64."""
    y = 1 / x
    return torch.where(x < LARGE, x * trigamma - 1, y * (1 / 2 + y / 6))


def distillation_loss(loss, logits, ensemble, model_offset=1.0, target_offset=1.0):
    """The loss of each row of logits [B, K], by its name in LOSSES."""
    if loss == "forward_kl":
        return forward_kl_loss(logits, ensemble)
    if loss == "dirichlet_likelihood":
        return dirichlet_likelihood_loss(logits, ensemble, model_offset)
    if loss == "proxy":
        return proxy_loss(logits, ensemble, model_offset, target_offset)
    return rkl_proxy_loss(logits, ensemble, model_offset, target_offset)


# Uncertainties [B], large where uncertain. Entropies and divergences are in nats; "epistemic" is
# the mutual information; "energy", of a single softmax alone, is -ln sum_k exp(z_k).
MEASURES = ("one_minus_max", "total", "aleatoric", "epistemic", "epkl", "rmi", "energy")


class Outputs(NamedTuple):
    """What a network or an ensemble predicts for B images."""

    log_probs: Tensor                    # [B, K]  its prediction
    measures: dict                       # {name: [B]} of those MEASURES that it has
    log_precision: Tensor | None = None  # [B]  ln alpha_0 of a Dirichlet distribution


def softmax_outputs(logits):
    """Outputs of one classifier with logits [B, K]: no epistemic uncertainty.

    That of Dir(exp(z)) would depend on the scale of exp(z), which cross entropy leaves arbitrary.
    """
    z = logits.double()
    log_probs = z.log_softmax(-1)
    probs = log_probs.exp()
    measures = {"one_minus_max": 1 - probs.amax(-1), "total": torch.special.entr(probs).sum(-1),
                "energy": -z.logsumexp(-1)}
    return Outputs(log_probs, measures)


def ensemble_outputs(ensemble):
    """Outputs of an ensemble: epkl = (1/M^2) sum_ij KL(p_i || p_j) = epistemic + rmi."""
    log_pi = ensemble.log_probs
    pi = log_pi.exp()
    total = -torch.linalg.vecdot(pi, log_pi)
    epistemic = (total - ensemble.aleatoric).clamp_min(0)
    measures = {"one_minus_max": 1 - pi.amax(-1), "total": total, "aleatoric": ensemble.aleatoric,
                "epistemic": epistemic, "epkl": epistemic + ensemble.rmi, "rmi": ensemble.rmi}
    return Outputs(log_pi, measures)


def dirichlet_outputs(alpha, log_probs):
    """Outputs of Dir(alpha), alpha [B, K], with the mean p = alpha / alpha_0 = exp(log_probs).

    total H(p); aleatoric -sum_k p_k (psi(alpha_k + 1) - psi(alpha_0 + 1)); epkl = epistemic + rmi
    = (K - 1) / alpha_0.
    """
    alpha_0 = alpha.sum(-1, keepdim=True)                              # [B, 1]
    p = alpha / alpha_0
    total = torch.special.entr(p).sum(-1)
    aleatoric = -(p * (torch.digamma(alpha + 1) - torch.digamma(alpha_0 + 1))).sum(-1)
    epistemic = (total - aleatoric).clamp_min(0)
    epkl = (alpha.shape[-1] - 1) / alpha_0[:, 0]
    measures = {"one_minus_max": 1 - p.amax(-1), "total": total, "aleatoric": aleatoric,
                "epistemic": epistemic, "epkl": epkl, "rmi": (epkl - epistemic).clamp_min(0)}
    return Outputs(log_probs, measures, alpha_0[:, 0].log())


def student_outputs(logits):
    """Outputs of a student: those of Dir(exp(z)), whose mean is the prediction softmax(z).

    published code: the offset of the loss is not added in the evaluation.
    """
    z = logits.double()
    # exp overflows at 709; out-of-distribution inputs of large networks can reach that.
    return dirichlet_outputs(z.clamp(-600, 600).exp(), z.log_softmax(-1))


def proxy_outputs(ensemble):
    """Outputs of the ensemble's proxy Dir(pi beta_0)."""
    alpha = ensemble.log_probs.exp() * proxy_precision(ensemble)[:, None]
    return dirichlet_outputs(alpha, ensemble.log_probs)


class MIMO(nn.Module):
    """E subnetworks in one network, which sees E images as channels and has E K outputs.

    images [B, E, C, H, W], or [B, C, H, W], which all subnetworks see; logits [B, E, K].
    """

    def __init__(self, net, subnetworks):
        super().__init__()
        self.net = net
        self.subnetworks = subnetworks

    def forward(self, images):
        if images.ndim == 4:
            images = images[:, None].expand(-1, self.subnetworks, -1, -1, -1)
        logits = self.net(images.flatten(1, 2))                        # [B, E K]
        return logits.unflatten(1, (self.subnetworks, -1))


def mimo_rows(n, subnetworks, generator, repetitions=2, shared=0.6):
    """Which of the n images of a batch each of E subnetworks sees: [n repetitions, E].

    In the fraction `shared` of the rows all subnetworks see the same image; in the others each
    sees an image of its own. The defaults are those of the published code.
    """
    rows = torch.arange(n).repeat(repetitions)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    count = int(len(rows) * (1 - shared))
    columns = []
    for _ in range(subnetworks):
        order = torch.randperm(count, generator=generator)
        columns.append(torch.cat([rows[:count][order], rows[count:]]))
    return torch.stack(columns, 1)


# ---- Model --------------------------------------------------------------------------------------


class Network(nn.Sequential):
    """The layers of a backbone, then a linear head: logits [B, K] of images [B, C, H, W]."""

    def __init__(self, backbone, head):
        layers = {"backbone": backbone}
        if isinstance(backbone, nn.Sequential) and not hasattr(backbone, "fc"):
            layers = dict(backbone.named_children())
        super().__init__(OrderedDict(layers, fc=head))

    def forward(self, x):
        for layer in list(self)[:-1]:
            x = layer(x)
        # Logits are float32 even under --amp bf16: those of a student reach ln 8e9 = 23.
        with torch.autocast(x.device.type, enabled=False):
            return self.fc(x.to(self.fc.weight.dtype))


def conv(c_in, c_out, kernel=3, stride=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)


def make_shortcut(c_in, c_out, stride):
    """The shortcut of a residual block: the identity, or a 1x1 convolution."""
    if stride == 1 and c_in == c_out:
        return nn.Sequential()
    # Subsample first: the strided 1x1 convolution of PyTorch 2.14 writes out of bounds on CPUs.
    layers = {"subsample": nn.AvgPool2d(1, stride), "0": conv(c_in, c_out, kernel=1),
              "1": nn.BatchNorm2d(c_out)}
    return nn.Sequential(OrderedDict(layers))


class Block(nn.Sequential):
    """A residual block: layers in sequence; the last one, "downsample", is the shortcut."""

    def forward(self, x):
        h = x
        for layer in list(self)[:-1]:
            h = layer(h)
        return F.relu(h + self.downsample(x))


# Layers have torchvision's names, so that its state dicts and the published checkpoints fit.


def basic_block(c_in, c_out, stride):
    layers = {"conv1": conv(c_in, c_out, stride=stride), "bn1": nn.BatchNorm2d(c_out),
              "relu1": nn.ReLU(), "conv2": conv(c_out, c_out), "bn2": nn.BatchNorm2d(c_out),
              "downsample": make_shortcut(c_in, c_out, stride)}
    nn.init.zeros_(layers["bn2"].weight)  # published code: starts at zero
    return Block(OrderedDict(layers))


def bottleneck_block(c_in, c_out, stride):
    c = c_out // 4
    layers = {"conv1": conv(c_in, c, kernel=1), "bn1": nn.BatchNorm2d(c), "relu1": nn.ReLU(),
              "conv2": conv(c, c, stride=stride), "bn2": nn.BatchNorm2d(c), "relu2": nn.ReLU(),
              "conv3": conv(c, c_out, kernel=1), "bn3": nn.BatchNorm2d(c_out),
              "downsample": make_shortcut(c_in, c_out, stride)}
    nn.init.zeros_(layers["bn3"].weight)  # published code: starts at zero
    return Block(OrderedDict(layers))


# Each of the following functions builds the feature extractor of one network, for images of
# `shape` (C, H, W): it returns its layers, as a list or by name, and the number of features.


def convnet(args, shape):
    """Three convolutions, without global pooling: the position of a digit matters."""
    c_in, height, width = shape
    if min(height, width) < 8:
        raise UserError(f"--model convnet: {shape} images are too small, it needs 8 x 8 pixels")
    layers = {}
    for stage in range(3):
        c_out = max(1, round(32 * args.width)) * 2**stage
        layers[f"stage{stage + 1}"] = nn.Sequential(conv(c_in, c_out), nn.BatchNorm2d(c_out),
                                                    nn.ReLU(), nn.MaxPool2d(2))
        c_in = c_out
    layers["flatten"] = nn.Flatten()
    return layers, c_in * (height // 8) * (width // 8)


def resnet(args, shape, block, expansion, depths):
    """A ResNet; images of more than 64 pixels per side get the stem for ImageNet."""
    width = max(1, round(64 * args.width))  # channels of the stem, doubled in every stage
    stem = conv(shape[0], width)
    pool = nn.Identity()
    if shape[-1] > 64:
        stem = conv(shape[0], width, kernel=7, stride=2)
        pool = nn.MaxPool2d(3, 2, 1)
    layers = {"conv1": stem, "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU(), "maxpool": pool}
    c_in = width
    for stage, depth in enumerate(depths):
        c_out = expansion * width * 2**stage
        blocks = []
        for index in range(depth):
            # Every stage but the first one starts by halving the resolution.
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(block(c_in, c_out, stride))
            c_in = c_out
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return layers, c_in


# Your own network is one more entry, such a function by its name; it may also return a classifier.
NETWORKS = {
    "convnet": convnet,
    "resnet18": partial(resnet, block=basic_block, expansion=1, depths=(2, 2, 2, 2)),
    "resnet50": partial(resnet, block=bottleneck_block, expansion=4, depths=(3, 4, 6, 3)),
}


def make_network(args, num_classes, shape, epochs):
    """The network --model for images of `shape` (C, H, W), on its device: logits [B, K].

    epochs: those for which it will be trained, see data.backbone_and_head.
    """
    net = Network(*data.backbone_and_head(args, NETWORKS, num_classes, shape, epochs))
    if args.model in ("resnet18", "resnet50"):
        # as torchvision's ResNets
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net.to(args.device, memory_format=torch.channels_last)


def make_mimo(args, num_classes, shape, subnetworks):
    """The network --model with the inputs and outputs of several subnetworks."""
    channels, height, width = shape
    net = make_network(args, subnetworks * num_classes, (subnetworks * channels, height, width),
                       args.mimo_epochs)
    return MIMO(net, subnetworks)


# Lightning 1.5 keeps options in a dictionary of its own class; 1.4 has the classes of callbacks as
# keys. An ordinary dictionary stands for these names; no other name of theirs is known.
LIGHTNING = [(OrderedDict, f"pytorch_lightning.{name}") for name in (
    "utilities.parsing.AttributeDict", "callbacks.model_checkpoint.ModelCheckpoint",
    "callbacks.early_stopping.EarlyStopping", "callbacks.lr_monitor.LearningRateMonitor")]


def read_file(path):
    """The state dict in the file of a network, and the kind of network.

    The kind is "member", "student_<loss>", "mimo", or None if the file does not tell. Nothing but
    tensors and plain values is read, and nothing is run.
    """
    with torch.serialization.safe_globals(LIGHTNING):
        state = common.load_tensors(path)
        weights = data.read_state_dict(path)
    kind = None
    if isinstance(state.get("made_from"), dict):  # a checkpoint of this script
        kind = state["made_from"].get("kinds of networks")
    # Of the published networks, students alone have a loss among their options.
    options = state.get("hyper_parameters")
    if isinstance(options, dict):
        loss = options.get("loss_type", options.get("loss"))
        if loss in LOSSES:
            kind = f"student_{loss}"
    return weights, kind


def read_network(path, kind, like, args):
    """The network of a file, and what `read_file` says it is; `like` is the test set.

    kind: what it has to be, "member" or "student".
    """
    weights, found = read_file(path)
    if found is not None and not str(found).startswith(kind):
        raise UserError(f"{path} is a {found}, not a {kind}; members are given with "
                        "--ensemble-paths, a student with --student-path")
    is_pretrained = args.model.startswith("torchvision/") and not args.freeze
    try:
        if found is None and is_pretrained:
            # torchvision's heads have several names, all of which --weights FILE knows. Without
            # epochs, none is replaced by a new one.
            net = make_network(common.with_options(args, weights=path), like.num_classes,
                               like.shape, 0)
        else:
            # As with --eval, all weights come from the file.
            net = make_network(common.with_options(args, eval=True), like.num_classes, like.shape,
                               1)
            net.load_state_dict(weights)
    except (RuntimeError, UserError) as error:
        raise UserError(f"{path} does not fit --model {args.model} --width {args.width:g} and "
                        f"{like.num_classes} classes ({common.one_line(error)})") from None
    return net.eval().requires_grad_(False), found


# ---- Training -----------------------------------------------------------------------------------

# The first weights of a network are determined by its seed and this number.
KINDS = {"member": 0, "mimo": 1, "student": 2}


def learning_rate(step, steps_per_epoch, epochs, schedule):
    """The factor on the highest learning rate at a step, counted from the start of training."""
    if schedule == "step":
        factor = 1.0
        for milestone in (30, 60, 80):  # published code: of 90 epochs, else rounded down
            # Short runs start at the full rate: no milestone comes before the second epoch.
            if step // steps_per_epoch >= max(1, milestone * epochs // 90):
                factor *= 0.1
        return factor
    # cosine: a linear warm-up in the first fifth of the steps, then half a cosine to zero
    total = epochs * steps_per_epoch
    warm_up = 0.2 * total
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))


def make_optimiser(net, args):
    decayed = []
    free = []
    for name, parameter in net.named_parameters():
        # published code: batch norm in residual blocks has no weight decay, that elsewhere has
        if re.search(r"layer\d\.\d+\.bn\d", name):
            free.append(parameter)
        else:
            decayed.append(parameter)
    groups = [{"params": decayed, "weight_decay": args.weight_decay},
              {"params": free, "weight_decay": 0.0}]
    if args.opt == "adam":
        return torch.optim.Adam(groups)
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


def train(name, net, train_set, batch_columns, args, run, *, made_from, seed, epochs, batch_size,
          highest_lr):
    """Minimise a loss; training resumes from the last completed epoch of the checkpoint `name`.

    batch_columns(model, batch, epoch, step) returns {name: values [b]} of the rows of this process
    and the number of rows of the global batch. "loss" is minimised; the means of all are logged.
    made_from: what it depends on beside the options and data.origin; batch_size: in images.
    """
    optimiser = make_optimiser(net, args)
    # The order and the augmentation of the images depend only on the seed and the epoch.
    augment = "crop_flip" if args.augment else "none"
    loader = data.Loader(train_set, batch_size, args.device, seed=seed, shuffle=True,
                         limit_steps=args.limit_steps, augment=augment, workers=args.workers,
                         channels_last=True)
    model = common.data_parallel(net, args.device, args.compile)  # DDP, with global batch norm
    made_from = data.origin(train_set, args) | made_from
    history = run.resume(name, epochs, made_from, net=net, optimiser=optimiser)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        # Every epoch is seeded, so that a resumed run draws the same dropout masks.
        common.seed_all(seed, epoch, common.rank())
        model.train()
        sums = 0.0  # of each column over the epoch
        rows = 0
        for step, batch in enumerate(common.progress(loader, epoch)):
            # A function of the step: a resumed run needs no state of a scheduler.
            done = epoch * len(loader) + step
            lr = highest_lr * learning_rate(done, len(loader), epochs, args.schedule)
            for group in optimiser.param_groups:
                group["lr"] = lr
            columns, global_rows = batch_columns(model, batch, epoch, step)
            # DDP averages gradients over processes: this is the mean over the global batch.
            mean_loss = columns["loss"].sum() * common.world_size() / global_rows
            optimiser.zero_grad()
            mean_loss.backward()
            optimiser.step()
            own_sums = [column.detach().double().sum() for column in columns.values()]
            sums = sums + torch.stack(own_sums)
            rows += global_rows
        totals = common.all_reduce(sums).tolist()
        means = {column: total / rows for column, total in zip(columns, totals)}
        history.append({"epoch": epoch + 1, **means, "lr": lr,
                        "seconds": time.perf_counter() - start})
        run.save(name, history, made_from, net=net, optimiser=optimiser)
    return net.eval().requires_grad_(False)


def train_member(train_set, args, run, seed):
    """Step 1: train one member of the ensemble by cross entropy."""
    common.seed_all(seed, KINDS["member"])
    net = make_network(args, train_set.num_classes, train_set.shape, args.member_epochs)
    columns = partial(member_columns, args)
    return train(f"member-seed{seed}", net, train_set, columns, args, run,
                 made_from={"kinds of networks": "member"}, seed=seed, epochs=args.member_epochs,
                 batch_size=args.batch_size, highest_lr=args.lr * args.batch_size / 256)


def member_columns(args, model, batch, epoch, step):
    with common.autocast(args):
        logits = model(batch.images)
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == batch.labels}, batch.global_size


def evaluation_loader(dataset, args):
    """Batches of a set in its order, not augmented."""
    return data.Loader(dataset, max(512, args.batch_size), args.device, workers=args.workers,
                       channels_last=True)


CACHE_BYTES = 4e9  # of statistics that are kept instead of computed in every step


class Teachers(NamedTuple):
    """The members, as the students see them."""

    members: list
    cached: Ensemble | None = None  # float32, for all training images, if these never change


def make_teachers(members, train_set, args):
    """Step 2: the statistics of the members' predictions for the training images.

    They are computed once for all students if the images are not augmented, and if 8 N K bytes
    are not too many; else in every step.
    """
    teachers = Teachers(members)
    n = len(train_set)
    num_classes = train_set.num_classes
    if args.eval or args.augment or 8 * n * num_classes > CACHE_BYTES:
        return teachers
    shapes = [(n, num_classes), (n, num_classes), (n,), (n,)]
    cached = Ensemble(*[torch.zeros(shape, device=args.device) for shape in shapes])
    for batch in evaluation_loader(train_set, args).epoch():
        for column, values in zip(cached, teacher_statistics(teachers, batch, args)):
            column[batch.index] = values.float()
    # An all-gather: each process has filled in its rows of the zeros. A sum, because processes
    # may have different numbers of rows.
    for column in cached:
        common.all_reduce(column)
    return Teachers(members, cached)


@torch.no_grad()
def teacher_statistics(teachers, batch, args):
    """The Ensemble of the members for a batch."""
    if teachers.cached is None:
        with common.autocast(args):
            return ensemble_statistics(net(batch.images) for net in teachers.members)
    cached = Ensemble(*[column[batch.index].double() for column in teachers.cached])
    # Probabilities that were rounded to float32 do not sum to 1.
    return cached._replace(log_probs=cached.log_probs.log_softmax(-1))


def train_student(loss, teachers, train_set, args, run, seed):
    """Step 3: train a student, a network like a member, from scratch; it sees no labels."""
    common.seed_all(seed, KINDS["student"])
    net = make_network(args, train_set.num_classes, train_set.shape, args.epochs)
    # With other options of students, the same members teach another student, which is saved
    # beside this one: its name has these options.
    name = f"student_{loss}-{args.epochs}epochs"
    if loss != "forward_kl":
        name += f"-m{args.model_offset:g}"
    if loss in ("proxy", "rkl_proxy"):
        name += f"-t{args.target_offset:g}"
    name += f"-of{len(teachers.members)}-seed{seed}"
    made_from = {"kinds of networks": f"student_{loss}",
                 "teachers": sorted(common.digest(member) for member in teachers.members)}
    columns = partial(student_columns, loss, teachers, args)
    return train(name, net, train_set, columns, args, run,
                 made_from=made_from, seed=seed, epochs=args.epochs, batch_size=args.batch_size,
                 highest_lr=args.lr * args.batch_size / 256)


def student_columns(loss, teachers, args, model, batch, epoch, step):
    """The loss, and what shows whether training collapses.

    agreement: whether student and ensemble predict the same class; log_precision: that of
    Dir(exp(z)) (minus_energy of EnD, which is no Dirichlet), and that of the ensemble's proxy.
    """
    with common.autocast(args):
        logits = model(batch.images)
    ensemble = teacher_statistics(teachers, batch, args)
    losses = distillation_loss(loss, logits, ensemble, args.model_offset, args.target_offset)
    log_precision = "minus_energy" if loss == "forward_kl" else "log_precision"
    columns = {"loss": losses, "agreement": logits.argmax(1) == ensemble.log_probs.argmax(1),
               log_precision: logits.logsumexp(1),
               "log_precision_of_proxy": proxy_precision(ensemble).log()}
    return columns, batch.global_size


def train_mimo(train_set, args, run, seed):
    """Train a MIMO network, with 2 --batch-size labels in a step (published code)."""
    common.seed_all(seed, KINDS["mimo"])
    net = make_mimo(args, train_set.num_classes, train_set.shape, args.mimo)
    name = f"mimo{args.mimo}-{args.mimo_epochs}epochs-seed{seed}"
    columns = partial(mimo_columns, seed, args)
    labels_per_step = 2 * args.batch_size
    # Every subnetwork sees each image twice, so a step has fewer images than labels.
    images_per_step = labels_per_step // (2 * args.mimo)
    return train(name, net, train_set, columns, args, run,
                 made_from={"kinds of networks": "mimo"}, seed=seed, epochs=args.mimo_epochs,
                 batch_size=images_per_step, highest_lr=args.lr * labels_per_step / 256)


def mimo_columns(seed, args, model, batch, epoch, step):
    generator = torch.Generator().manual_seed(common.derive_seed(seed, epoch, step))
    rows = mimo_rows(batch.global_size, args.mimo, generator)
    images, labels = mimo_batch(batch, rows)
    with common.autocast(args):
        logits = model(images)                                         # [b, E, K]
    logits = logits.flatten(0, 1)
    labels = labels.flatten()
    losses = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == labels}, rows.numel()


def mimo_batch(batch, rows):
    """This process's part of the rows [n r, E]: images [b, E, C, H, W] and labels [b, E].

    Each process has loaded its share of the n images of the global batch, and sends it to all.
    """
    images = batch.images
    labels = batch.labels
    size = common.world_size()
    if size > 1:
        places = torch.arange(batch.global_size).tensor_split(size)[common.rank()]
        places = places.to(images.device, non_blocking=True)
        images = images.new_zeros(batch.global_size, *images.shape[1:])
        images[places] = batch.images
        common.all_reduce(images)
        labels = labels.new_zeros(batch.global_size)
        labels[places] = batch.labels
        common.all_reduce(labels)
    share = rows.tensor_split(size)[common.rank()].to(images.device, non_blocking=True)
    return images[share], labels[share]


# ---- Evaluation ---------------------------------------------------------------------------------

# The methods, and their names in the table. --predict writes the last of them that was run.
METHODS = {"single": "single network", "mimo": "MIMO", "ensemble_proxy": "its proxy",
           "ensemble": "ensemble", "student_forward_kl": "EnD (forward KL)",
           "student_dirichlet_likelihood": "EnD2 (likelihood)",
           "student_proxy": "proxy, forward KL", "student_rkl_proxy": "proxy, reverse KL"}


class Logits(NamedTuple):
    """What all networks predict for a set; nothing on processes other than the main one."""

    of_networks: dict  # {network: [N, K] float32 on the CPU, or [N, E, K] of MIMO}
    labels: Tensor     # [N]
    ms: dict           # {network: time of its forward passes, in milliseconds per example}
    ms_loading: float  # time of everything else, mostly loading, in milliseconds per example


@torch.no_grad()
def collect_logits(networks, dataset, args):
    """The Logits of all networks {name: network} for a set, from one pass over its images."""
    batches = []
    seconds = dict.fromkeys(networks, 0.0)
    start = time.perf_counter()
    for batch in evaluation_loader(dataset, args).epoch():
        rows = {"index": batch.index}
        for name, net in networks.items():
            begin = time.perf_counter()
            with common.autocast(args):
                rows[name] = net(batch.images).cpu()                   # waits for the device
            seconds[name] += time.perf_counter() - begin
        batches.append(rows)
    loading = time.perf_counter() - start - sum(seconds.values())
    ms = {name: 1000 * own / len(dataset) for name, own in seconds.items()}
    return Logits(common.gather_rows(batches), dataset.labels, ms, 1000 * loading / len(dataset))


def all_outputs(logits):
    """The Outputs of each method, from {network: logits}.

    The keys are (method, 0), and for the single networks ("single", 0), ("single", 1), ...
    """
    outputs = {}
    members = [z for name, z in logits.items() if name.startswith("member")]
    for number, z in enumerate(members):
        outputs["single", number] = softmax_outputs(z)
    if len(members) > 1:
        ensemble = ensemble_statistics(members)
        outputs["ensemble", 0] = ensemble_outputs(ensemble)
        outputs["ensemble_proxy", 0] = proxy_outputs(ensemble)
    for name, z in logits.items():
        if name == "mimo":
            outputs[name, 0] = ensemble_outputs(ensemble_statistics(z.unbind(1)))
        elif name == "student_forward_kl":
            outputs[name, 0] = softmax_outputs(z)
        elif name.startswith("student"):
            outputs[name, 0] = student_outputs(z)
    return outputs


def columns_of(log_probs, outputs, labels):
    """What the metrics need to know of each example, {name: [n]}.

    labels [n] index the columns of log_probs; where they do not, only uncertainties mean anything.
    """
    known = labels.clamp(0, log_probs.shape[1] - 1)
    log_prob = log_probs.gather(1, known[:, None])[:, 0]               # [n]  ln p(label)
    probs = log_probs.exp()
    top5 = log_probs.topk(min(5, log_probs.shape[1])).indices          # [n, 5]
    columns = {
        "log_prob": log_prob,
        "correct": (log_probs.argmax(1) == labels).double(),
        "top5": (top5 == labels[:, None]).any(1).double(),
        "brier": probs.square().sum(1) - 2 * log_prob.exp() + 1,
        "max_prob": probs.amax(1),
    }
    if outputs.log_precision is not None:
        columns["log_precision"] = outputs.log_precision
    return columns | outputs.measures


def score(logits, classes=None):
    """The columns {name: [N]} of each method for a set, with the keys of `all_outputs`.

    classes [n]: the only classes of this set. The logits are restricted to them before the softmax
    (published code); uncertainties still use all classes.
    """
    parts = {}
    # In blocks of rows, because float64 tensors of ImageNet and ten members would take 10 GB.
    for rows in torch.arange(len(logits.labels)).split(4096):
        block = {name: z[rows] for name, z in logits.of_networks.items()}
        full = all_outputs(block)
        restricted = full
        if classes is not None:
            restricted = all_outputs({name: z[..., classes] for name, z in block.items()})
        for key, outputs in full.items():
            columns = columns_of(restricted[key].log_probs, outputs, logits.labels[rows])
            parts.setdefault(key, []).append(columns)
    return {key: join_columns(blocks) for key, blocks in parts.items()}


def join_columns(blocks):
    """The columns {name: [N]} of all rows, from those of blocks of them."""
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def prediction_metrics(columns):
    """Accuracy, likelihood, calibration and rejection, from the columns of one network."""
    bars = common.reliability(columns["max_prob"], columns["correct"])
    gaps = np.abs(bars.accuracy - bars.confidence)
    metrics = {
        "accuracy": columns["correct"].mean().item(),
        "top5_accuracy": columns["top5"].mean().item(),
        "nll": -columns["log_prob"].mean().item(),
        "brier": columns["brier"].mean().item(),
        "ece15": float((bars.counts * gaps).sum() / bars.counts.sum()),
    }
    # published code: float32, in which a confidence of 1 - 1e-8 is 1, with a bin of its own
    confidence = columns["max_prob"].float().numpy()
    metrics |= published_calibration(confidence, columns["correct"].numpy())
    return metrics | rejection_metrics("prr", columns)


def published_calibration(confidence, correct):
    """ECE and largest gap of the published code: ten bins [a, b), and one for confidence 1."""
    bin_index = np.digitize(confidence, np.linspace(0, 1, 11))
    gaps = np.abs(np.bincount(bin_index, confidence - correct))        # times the count of a bin
    counts = np.bincount(bin_index).clip(1)
    return {"ece10": float(gaps.sum() / len(correct)), "mce10": float((gaps / counts).max())}


def rejection_metrics(title, columns):
    """The prediction rejection ratio of each uncertainty, {"<title>_<uncertainty>": ratio}."""
    ratio = common.prediction_rejection_ratio
    return {f"{title}_{name}": ratio(columns[name], columns["correct"])
            for name in MEASURES if name in columns}


def detection_metrics(inside, outside):
    """How well each uncertainty tells two sets apart, from the columns of both."""
    metrics = {}
    for name in MEASURES:
        if name in inside:
            found = common.ood_metrics(inside[name], outside[name], larger_means="ood")
            for metric, value in found.items():
                metrics[f"{metric}_{name}"] = value  # for example auroc_total
    return metrics


def rank_correlations(student, ensemble, proxy):
    """Spearman correlations of uncertainties: was the ensemble's distribution distilled?"""
    pairs = {name: (student[name], ensemble[name]) for name in MEASURES[1:]
             if name in student and name in ensemble}
    log_precision = student.get("log_precision")
    if log_precision is None:
        log_precision = -student["energy"]  # EnD is not Dirichlet, but has a sum of exp(z), too
    pairs["precision"] = (log_precision, proxy["log_precision"])
    metrics = {}
    for name, values in pairs.items():
        # A constant has no rank correlation.
        if all(column.min() < column.max() for column in values):
            metrics[f"spearman_{name}"] = float(stats.spearmanr(*values).statistic)
    return metrics


def costs(networks, logits):
    """Milliseconds per example and bytes of the weights, with the keys of `all_outputs`."""
    found = {}
    team = {"ms": logits.ms_loading, "bytes": 0}
    for name, net in networks.items():
        key = (name, 0)
        size = sum(tensor.nbytes for tensor in net.state_dict().values())
        if name.startswith("member"):
            key = ("single", len(found))  # members come first
            team["ms"] += logits.ms[name]
            team["bytes"] += size
        found[key] = {"ms": logits.ms_loading + logits.ms[name], "bytes": size}
    return found | {("ensemble", 0): team, ("ensemble_proxy", 0): team}


def set_rows(name, scored, seed):
    """A row of prediction metrics for each method; each single network has its own seed."""
    rows = []
    for (method, number), columns in scored.items():
        rows.append({"method": METHODS[method], "seed": seed + number, "set": name,
                     "n": len(columns["correct"]), **prediction_metrics(columns)})
    return rows


def pair_rows(name, inside, other, outside, seed, selected=slice(None)):
    """Rows of detection metrics: a set, or the `selected` part of it, against another."""
    rows = []
    for (method, number), columns in inside.items():
        part = {column: values[selected] for column, values in columns.items()}
        rows.append({"method": METHODS[method], "seed": seed + number, "set": name,
                     "against": other, "n": len(part["correct"]),
                     **detection_metrics(part, outside[method, number])})
    return rows


def test_rows(name, scored, cost, seed):
    """The rows of the test set, with costs, and with rank correlations of the students."""
    for (method, _), columns in scored.items():
        if not columns["log_prob"].isfinite().all():
            raise UserError(f"{METHODS[method]}: its logits on {name} are not finite; train it "
                            "again with a lower --lr")
    rows = set_rows(name, scored, seed)
    for row, (key, columns) in zip(rows, scored.items()):
        row |= cost[key]
        if key[0].startswith("student") and ("ensemble", 0) in scored:
            row |= rank_correlations(columns, scored["ensemble", 0], scored["ensemble_proxy", 0])
    return rows


def labelled_rows(name, scored, test_name, test_scored, seed):
    """Rows of a set with the classes of the test set, and of the test set against it."""
    rows = set_rows(name, scored, seed)
    pairs = pair_rows(test_name, test_scored, name, scored, seed)
    for row, key in zip(pairs, test_scored):
        # published code ("_with_val"): rejection among the images of both sets
        both = join_columns([test_scored[key], scored[key]])
        row |= rejection_metrics("prr_both", both)
    return rows + pairs


def ood_rows(dataset, scored, classes, test_set, test_scored, seed):
    """Rows of an OOD set; classes [n]: its classes, if the test set has them all, else None."""
    name = test_set.name
    # The folders of ImageNet-O are named after classes that its images do not belong to.
    if classes is None or dataset.name == "imagenet_o":
        rows = pair_rows(name, test_scored, dataset.name, scored, seed)
    else:
        rows = labelled_rows(dataset.name, scored, name, test_scored, seed)
    if classes is not None:
        # published code ("_masked"): also against the test images of the same classes alone
        same = torch.isin(test_set.labels, classes)
        if same.any():
            title = f"{name}, its classes"
            rows += pair_rows(title, test_scored, dataset.name, scored, seed, same)
    return rows


def shift_rows(rows_of_sets, corruptions):
    """All rows of {(kind, severity): rows}, then their means over kinds and over severities."""
    rows = []
    for (kind, severity), of_set in rows_of_sets.items():
        rows += [row | {"kind": kind, "severity": severity} for row in of_set]
    groups = [corruptions.kinds]
    # Published tables average 15 kinds where there are more.
    standard = data.CIFAR_C_KINDS[:15]
    if set(standard) < set(corruptions.kinds):
        groups.append(standard)
    for kinds in groups:
        title = f"{corruptions.name}_mean_of_{len(kinds)}"
        for severity in data.SEVERITIES:
            selected = [rows_of_sets[kind, severity] for kind in kinds]
            rows += mean_rows(f"{title}_s{severity}", selected)
        selected = [rows_of_sets[key] for key in itertools.product(kinds, data.SEVERITIES)]
        rows += mean_rows(title, selected)
    return rows


def mean_rows(title, rows_of_sets):
    """The rows of one corrupted set called `title`, with the means of all metrics."""
    means = []
    for rows in zip(*rows_of_sets, strict=True):
        name = "against" if "against" in rows[0] else "set"
        mean = {**rows[0], name: title}
        for metric in rows[0]:
            if metric not in ("method", "seed", "set", "against", "n"):
                values = [row[metric] for row in rows]
                # Without errors there is no rejection ratio.
                mean[metric] = None if None in values else float(np.mean(values))
        means.append(mean)
    return means


def write_predictions(logits, sets, run):
    """--predict: predictions.csv, by the last method of METHODS and the ensemble beside it."""
    outputs = all_outputs(logits.of_networks)
    best = [method for method in METHODS if (method, 0) in outputs][-1]
    log_probs, measures, _ = outputs[best, 0]
    predictions = {best: log_probs[None]}                              # [1, N, K]
    members = [own.log_probs for (method, _), own in outputs.items() if method == "single"]
    if len(members) > 1:
        predictions["ensemble"] = torch.stack(members)                 # [M, N, K]
    columns = common.prediction_columns(sets.predict, predictions, sets.train.classes)
    # A student's uncertainties are those of a Dirichlet distribution.
    columns |= {name: values for name, values in measures.items() if name != "one_minus_max"}
    run.write_csv("predictions.csv", columns)


# ---- Plots --------------------------------------------------------------------------------------


def plot_rejection(scored, run):
    """Rejection curves, and the precision of the students against that of the ensemble."""
    figure, (left, right) = common.make_figure(1, 2, figsize=(11.5, 4.4))
    target = scored["ensemble_proxy", 0]["log_precision"].numpy()
    # The proxy predicts, and rejects, as the ensemble does.
    methods = [method for method, number in scored if number == 0 and method != "ensemble_proxy"]
    for method, colour in zip(methods, common.colours(len(methods))):
        columns = scored[method, 0]
        rejected, error = common.rejection_curve(columns["total"], columns["correct"])
        left.plot(100 * rejected, 100 * error, color=colour, label=METHODS[method])
        if "log_precision" in columns:
            right.plot(target, columns["log_precision"].numpy(), ".", ms=2, color=colour)
    left.set(xlabel="rejected as most uncertain (%)", ylabel="remaining errors (% of images)",
             xlim=(0, 100), yscale="log", ylim=(0.01, 130))
    ends = np.quantile(target, [0.001, 0.999])
    right.plot(ends, ends, "k--", lw=1, label="equal precision")
    right.set(xlabel="log precision of the ensemble's proxy", ylabel="log precision of a student")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    run.save_figure(figure, "rejection.png")


# ---- Options ------------------------------------------------------------------------------------

# Not in the paper: its networks for small images, with the usual recipe.
CIFAR = dict(model="resnet18", batch_size=128, lr=0.2, weight_decay=5e-4, shift="published")
# Beside these, the defaults of `parse_args` are the published recipe.
PRESETS = {
    "imagenet": dict(ood=["imagenet_o", "imagenet_a", "imagenet_r"], shift="published"),
    "tiny_imagenet": dict(model="resnet18", batch_size=256, shift="published"),
    "cifar10": dict(CIFAR, ood=["svhn", "cifar100"]),
    "cifar100": dict(CIFAR, ood=["svhn"]),
    # Without noise these images are too easy for an ensemble to disagree. With shorter training or
    # weight decay, members are not sure of what they know, and their mean is under-confident.
    "numbers": dict(model="convnet", width=0.25, members=5, epochs=16, member_epochs=12,
                    mimo_epochs=16, batch_size=128, lr=6e-3, opt="adam", schedule="cosine",
                    weight_decay=0.0, losses=list(LOSSES), augment=False, noise=3,
                    shift="computed", shift_examples=40,
                    ood=["numbers_letters", "numbers_ambiguous"]),
    # Your own images: small networks that train on two CPU cores in minutes.
    "folder": dict(model="convnet", width=0.5, members=5, epochs=40, member_epochs=40,
                   mimo_epochs=40, batch_size=16, lr=0.016, opt="adam", schedule="cosine",
                   weight_decay=0.0),
    # Your own network: a few careful epochs, or its last layer alone.
    "pretrained": dict(width=1.0, members=3, epochs=10, member_epochs=10, batch_size=32, lr=0.16,
                       opt="sgd", schedule="cosine", weight_decay=5e-4, augment=True,
                       shift="none"),
    "frozen": dict(members=5, epochs=30, member_epochs=30, lr=0.08, weight_decay=0.015,
                   augment=False),
}
# These say which networks a study has and how they are evaluated, but not how a member is trained.
# They do not identify a run: its directory holds the networks of all their values, each in a
# checkpoint of its own.
NOT_IDENTITY = ("members", "ensemble_paths", "losses", "epochs", "model_offset", "target_offset",
                "mimo", "mimo_epochs", "student_path", "ood", "shift", "shift_examples",
                "published_evaluation")
# Nothing but these identifies a run that trains nothing; "files" is the digest of its networks.
IDENTITY_OF_FILES = ("files", "dataset", "image_size", "noise", "model", "weights", "freeze",
                     "width", "amp")


def parse_args(argv=None):
    parser = common.Parser("proxy_distill", __doc__, PRESETS, NETWORKS, dataset="numbers",
                           model="resnet50", epochs=90, batch_size=2048, lr=0.1)
    add = parser.add_argument_group("proxy_distill.py").add_argument
    add("--members", type=at_least(0), default=10, metavar="M",
        help="number of networks in the ensemble; their seeds start at --seed (paper: 10); 0: "
        "only the network of --mimo")
    add("--member-epochs", type=at_least(0), default=120,
        help="number of epochs of a member; --epochs is that of a student (paper: 120 and 90)")
    add("--opt", choices=["sgd", "adam"], default="sgd",
        help="optimiser (paper: SGD with Nesterov momentum 0.9)")
    add("--weight-decay", "--wd", type=at_least(0, float), default=1e-4,
        help="weight decay; none for bn1 to bn3 of residual blocks (published code: 1e-4)")
    add("--schedule", choices=["step", "cosine"], default="step",
        help="'step' divides the learning rate by 10 after 30, 60 and 80 of 90 epochs (paper); "
        "'cosine' is better for short runs; it starts at --lr x --batch-size / 256, MIMO at twice")
    add("--augment", action=argparse.BooleanOptionalAction, default=True,
        help="use random crops and flips (published code)")
    add("--noise", type=between(0, 5, int), default=0, metavar="SEVERITY",
        help="severity of Gaussian noise on all images, training images included (paper: 0)")
    add("--losses", nargs="*", choices=LOSSES, default=["forward_kl", "rkl_proxy"], metavar="LOSS",
        help="train a student by each: forward_kl (EnD), dirichlet_likelihood (EnD2), proxy "
        "(forward KL to the proxy), rkl_proxy (reverse KL, the paper's); no name: no student")
    add("--model-offset", "--model_offset", type=at_least(0, float), default=1.0,
        help="m in the concentrations exp(z) + m of a student (paper: 1)")
    add("--target-offset", "--target_offset", type=at_least(0, float), default=1.0,
        help="t in the concentrations of the proxy: pi beta_0 + t in the forward KL, "
        "pi (beta_0 + K t) + 1 in the reverse KL (published code: 1; the paper's reverse KL: 0)")
    add("--mimo", type=at_least(0), default=0, metavar="E",
        help="also train a MIMO network of E subnetworks (published code: 2); 0: none")
    add("--mimo-epochs", type=at_least(0), default=150,
        help="number of epochs of the MIMO network (published code: 150)")
    add("--ensemble-paths", "--ensemble_paths", nargs="+", default=[], metavar="FILE",
        help="files of trained members: ours, state dicts, or the published Lightning checkpoints")
    add("--student-path", metavar="FILE",
        help="evaluate a trained student, student_*.pt or a Lightning checkpoint")
    add("--ood", nargs="*", default=[], metavar="NAME",
        help="out-of-distribution sets; folder:PATH is a folder of images, nonsense are patterns "
        "and noise")
    add("--shift", choices=["none", "computed", "published"], default="none",
        help="also evaluate the test set under corruptions: computed ones, or the published files "
        "of CIFAR-10-C, CIFAR-100-C, TinyImageNet-C and ImageNet-C")
    add("--shift-examples", type=at_least(0), default=0, metavar="N",
        help="number of test images under each corruption, evenly spaced; 0: all")
    add("--published-evaluation", action="store_true",
        help="resize images to 256 x 256 pixels before the crop, ImageNet-C's too, as the "
        "published code does; its calibration errors are ece10 and mce10 in results.csv")
    args = parser.parse(argv)
    args.ensemble_paths = sorted(args.ensemble_paths)  # in any order, they are the same ensemble
    if "losses" not in args.given:
        if args.target_offset == 0 and "proxy" in args.losses:
            common.print_on_main("skipped: the loss proxy, which overflows with --target-offset 0")
            args.losses = [loss for loss in args.losses if loss != "proxy"]
        if args.members == 0 and args.mimo:
            args.losses = []
    check_options(args)
    if args.student_path:
        # Files are evaluated, and nothing is trained.
        args.losses = []
        args.mimo = 0
    if args.student_path or args.ensemble_paths:
        args.members = len(args.ensemble_paths)
    if not (args.members or args.mimo or args.student_path):
        raise UserError("--members 0 is for --mimo alone; add --mimo 2")
    if args.losses and args.members == 0:
        raise UserError("--members 0: students learn from an ensemble; remove --losses")
    if args.losses and args.members < 2:
        raise UserError(f"--members {args.members}: an ensemble has at least 2; to train one "
                        "member alone, add --losses without a name")
    if not is_trained(args):
        args.epochs = 0
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if args.runs > 1 and (args.ensemble_paths or args.student_path):
        raise UserError("--runs: each run has other members, but files are given; remove it")
    if "proxy" in args.losses and args.target_offset == 0:
        raise UserError("--target-offset 0: the loss 'proxy' overflows at concentrations of 0; "
                        "use another --target-offset, or --losses without it")
    if args.mimo == 1:
        raise UserError("--mimo 1: a MIMO network has at least 2 subnetworks; 0: no network")
    if args.device.type == "mps":
        raise UserError("--device mps: the losses need float64, use --device cpu")
    if args.published_evaluation and (args.dataset != "imagenet" or args.image_size):
        raise UserError("--published-evaluation is for --dataset imagenet in its own size; remove "
                        "this option or --image-size")

    pretrained = args.model.startswith("torchvision/")
    of_students = ["epochs", "model_offset", "target_offset"]
    no_effect = [
        (args.student_path, ["members", "losses", "mimo"] + of_students, "with --student-path"),
        (args.ensemble_paths, ["members", "member_epochs"], "with --ensemble-paths"),
        (not args.mimo, ["mimo_epochs"], "without --mimo"),
        (not args.losses and not args.eval, of_students, "without --losses"),
        (args.losses == ["forward_kl"], ["model_offset"], "on the loss forward_kl"),
        (args.losses and not {"proxy", "rkl_proxy"} & set(args.losses), ["target_offset"],
         "without the losses proxy and rkl_proxy"),
        (args.shift == "none", ["shift_examples"], "without --shift"),
        (not pretrained, ["weights", "freeze"], "without --model torchvision/NAME"),
        (pretrained, ["width", "mimo"], f"with --model {args.model}"),
        (args.freeze, ["augment", "shift"], "with --freeze"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            common.refuse(args, names, reason)


def is_trained(args):
    """Whether networks are trained, not only read from files."""
    return bool(args.losses or args.mimo or not (args.ensemble_paths or args.student_path))


# ---- Main ---------------------------------------------------------------------------------------

# Seeds of the noise. Computed corruptions have seed 0: no image gets the same noise twice.
TRAIN_NOISE = 1
TEST_NOISE = 2  # also of the set to predict and of published corruptions
OOD_NOISE = 3   # of the first OOD set


def with_noise(dataset, seed, args):
    """A set under the Gaussian noise of --noise; it keeps its name."""
    if args.noise == 0 or dataset is None:
        return dataset
    if isinstance(dataset, data.StreamedSet):
        raise UserError(f"--noise {args.noise}: {dataset.name} is not in memory; use --noise 0")
    noisy = data.corrupted(dataset, "gaussian_noise", args.noise, seed)
    return replace(noisy, name=dataset.name)


def for_evaluation(dataset, seed, args):
    """A set under noise; with --published-evaluation, its files are read as published."""
    if args.published_evaluation and isinstance(dataset, data.StreamedSet):
        # Both sides of an image become 256 pixels, of which 224 are cut out.
        dataset = replace(dataset, resize=[256, 256])
    return with_noise(dataset, seed, args)


def load_sets(args):
    """All sets, with --noise; no validation set is needed."""
    preparation = data.preparation_of(args.model, args.weights, args.image_size)
    # Published networks are evaluated without the training images of ImageNet.
    reads_train = is_trained(args) or args.dataset != "imagenet"
    sets = data.load_sets(args.dataset, args.data_dir, val_fraction=0, image_size=args.image_size,
                          limit_train=args.limit_train, ood=args.ood,
                          ood_required="ood" in args.given, predict=args.predict,
                          preparation=preparation, train_part="train" if reads_train else "test")
    ood = {}
    for seed, (name, dataset) in enumerate(sets.ood.items(), OOD_NOISE):
        ood[name] = for_evaluation(dataset, seed, args)
    sets = sets._replace(ood=ood, test=for_evaluation(sets.test, TEST_NOISE, args),
                         predict=for_evaluation(sets.predict, TEST_NOISE, args),
                         train=with_noise(sets.train, TRAIN_NOISE, args))
    side = sets.test.shape[-1]
    if args.published_evaluation and side > 256:
        raise UserError(f"--published-evaluation cuts images out of 256 x 256 pixels, and --model "
                        f"{args.model} has images of {side}; remove one of the two")
    if args.freeze:
        sets = data.frozen_features(sets, args)
    return sets


def known_classes(dataset, test_set):
    """The classes [n] of the test set that an OOD set has, or None if it has others, too."""
    if not dataset.classes or not set(dataset.classes) <= set(test_set.classes):
        return None
    return torch.tensor([test_set.classes.index(name) for name in dataset.classes])


class Corruptions(NamedTuple):
    """The corruptions under which the test set is evaluated."""

    name: str    # of the corrupted sets
    kinds: list


def find_corruptions(test_set, args):
    """The Corruptions of --shift; those whose published files are missing are skipped."""
    if args.shift_examples:
        data.check_sizes(test_set, limit=args.shift_examples)
    if args.shift == "computed":
        if isinstance(test_set, data.StreamedSet):
            raise UserError(f"--shift computed: {test_set.name} is not in memory; use "
                            "--shift none or published")
        return Corruptions(f"{test_set.name}_computed", list(data.CORRUPTIONS))
    name = f"{args.dataset}_c"
    kinds = []
    if args.shift == "published":
        if name in data.CORRUPTED:
            kinds = data.corruption_kinds(name, args.data_dir)
        if "shift" in args.given and not kinds:
            raise UserError(f"--shift published: {name} not found; use --shift none or computed")
    return Corruptions(data.corrupted_name(name, kinds), kinds)


def corrupted_set(test_set, kind, severity, args):
    """The test set under one corruption, or --shift-examples of it."""
    limit = args.shift_examples or None
    if args.shift == "computed":
        return data.corrupted(data.evenly(test_set, limit), kind, severity)
    dataset = data.load_corrupted(f"{args.dataset}_c", kind, severity, args.data_dir,
                                  preparation=test_set.preparation)
    dataset = data.match(data.evenly(dataset, limit), test_set)
    return for_evaluation(dataset, TEST_NOISE, args)


def limit_batch_size(train_set, args):
    """The options, with a --batch-size of at most the number of training images."""
    # The learning rate is proportional to the number of images that a batch can have.
    batch_size = min(args.batch_size, len(train_set))
    # Each subnetwork of MIMO takes its share of the batch, in each process.
    smallest = args.mimo * common.world_size()
    if batch_size < smallest:
        raise UserError(f"--batch-size {batch_size} for {len(train_set)} training images: "
                        f"--mimo {args.mimo} needs at least {smallest}")
    return common.with_options(args, batch_size=batch_size)


def check_network(train_set, args):
    """Refuse, before training, a network that fails on the smallest batch."""
    smallest = len(train_set) % args.batch_size or args.batch_size
    # Two images reveal every failure; one alone may fail in batch norm. MIMO repeats each image.
    for epochs in (args.member_epochs, args.epochs):  # of members and of students
        net = make_network(args, train_set.num_classes, train_set.shape, epochs)
    images = torch.zeros(min(smallest, 2), *train_set.shape).to(net.fc.weight)
    try:
        net.train()(images)
        if args.mimo:
            net = make_mimo(args, train_set.num_classes, train_set.shape, args.mimo)
            net.train()(torch.cat([images, images]))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--model {args.model} fails on {smallest} images {train_set.shape}: "
                        f"{common.one_line(error)}; use another --model, --image-size or "
                        "--batch-size") from None


def read_files(like, args):
    """The networks of the files that the options name, {name: network}, and their digest.

    The digest has eight hexadecimal digits, in any order of the files; it is None without files.
    `like` is the test set.
    """
    networks = {}
    for number, path in enumerate(args.ensemble_paths):
        networks[f"member{number}"], _ = read_network(path, "member", like, args)
    digests = [common.digest(net) for net in networks.values()]
    if len(set(digests)) < len(digests):
        raise UserError("--ensemble-paths: two of the files hold the same network; an ensemble "
                        "has different ones")
    if args.student_path:
        net, name = read_network(args.student_path, "student", like, args)
        if name is None:
            common.print_on_main(f"{args.student_path} does not name its loss: it is evaluated as "
                                 "a student by the reverse KL, a Dirichlet distribution")
            name = "student_rkl_proxy"
        networks[name] = net
        digests.append(common.digest(net))
    if not networks:
        return networks, None
    return networks, hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:8]


def open_run(args):
    """The run directory of members and their students, or of files, if nothing is trained."""
    width = f"w{args.width:g}" if args.width != 1 else None
    frozen = "frozen" if args.freeze else None
    files = f"files_{args.files}" if args.files else None
    seed = None
    not_identity = set(vars(args)) - set(IDENTITY_OF_FILES)
    if is_trained(args):
        seed = f"seed{args.seed}"
        not_identity = NOT_IDENTITY
    name = common.join_name(data.set_name(args.dataset), args.model, width, frozen, files, seed)
    return common.Run(args, "proxy_distill", name, not_identity)


def evaluate(networks, members, sets, corruptions, seed, args, run):
    """The rows of one run, and the picture and the predictions of the first one.

    members: the seeds or files of the ensemble. Each row lists its own: rows that share some are
    not independent.
    """
    logits = collect_logits(networks, sets.test, args)
    test_scored = score(logits)
    name = sets.test.name
    rows = common.on_main(test_rows, name, test_scored, costs(networks, logits), seed)
    for dataset in sets.ood.values():
        classes = known_classes(dataset, sets.test)
        scored = score(collect_logits(networks, dataset, args), classes)
        rows += common.on_main(ood_rows, dataset, scored, classes, sets.test, test_scored, seed)
    shifted = {}
    for kind, severity in itertools.product(corruptions.kinds, data.SEVERITIES):
        dataset = corrupted_set(sets.test, kind, severity, args)
        scored = score(collect_logits(networks, dataset, args))
        title = f"{corruptions.name}_{kind}_s{severity}"
        shifted[kind, severity] = common.on_main(labelled_rows, title, scored, name, test_scored,
                                                 seed)
    rows += shift_rows(shifted, corruptions)

    if seed == args.seed and sets.predict is not None:
        logits = collect_logits(networks, sets.predict, args)
        common.on_main(write_predictions, logits, sets, run)
    if seed == args.seed and args.plot and args.members > 1:
        common.on_main(plot_rejection, test_scored, run)
    for row in rows:
        row["members"] = members
        if row["method"] == METHODS["single"]:
            row["members"] = [members[row["seed"] - seed]]
        elif row["method"] == METHODS["mimo"]:
            row["members"] = []
    return rows


# The columns of the table that is printed; results.csv has all of them.
COLUMNS = ["accuracy", "nll", "ece15", "prr_total", "spearman_precision", "ms", "auroc_total",
           "auroc_epistemic"]


def main(argv=None):
    """Run the script; returns the rows of its report."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args)
    args = limit_batch_size(sets.train, args)
    corruptions = find_corruptions(sets.test, args)
    from_files, args.files = read_files(sets.test, args)
    if is_trained(args):
        check_network(sets.train, args)
    run = open_run(args)
    rows = []
    for number in range(args.runs):
        # Each run has members of its own.
        seed = args.seed + number * max(args.members, 1)
        members = [f"{Path(path).name} {common.digest(net)[:8]}"
                   for path, net in zip(args.ensemble_paths, from_files.values())]
        networks = dict(from_files)
        if not from_files:
            members = [seed + m for m in range(args.members)]
            for m in range(args.members):
                networks[f"member{m}"] = train_member(sets.train, args, run, members[m])
        if args.losses:
            teachers = make_teachers(list(networks.values()), sets.train, args)
        for loss in args.losses:
            student = train_student(loss, teachers, sets.train, args, run, seed)
            networks[f"student_{loss}"] = student
        if args.mimo:
            networks["mimo"] = train_mimo(sets.train, args, run, seed)
        rows += evaluate(networks, members, sets, corruptions, seed, args, run)
    # The table shows the test set, alone and against the OOD sets.
    others = [None] + list(sets.ood)
    shown = [row for row in rows
             if row["set"] == sets.test.name and row.get("against") in others]
    return run.report(rows, COLUMNS, shown)


if __name__ == "__main__":
    common.launch(main)
