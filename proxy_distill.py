"""Ensemble distribution distillation with proxy targets: one student for many classes.

Ryabinin, Malinin, Gales, "Scaling Ensemble Distribution Distillation to Many Classes with Proxy
Targets", NeurIPS 2021, arXiv:2105.06987. The method:

  1. Train M networks by cross entropy. Of their predictions p_m of an image, the mean is
     pi = (1/M) sum_m p_m, and the spread is RMI = (1/M) sum_m KL(pi || p_m).
  2. The proxy of the ensemble is the Dirichlet distribution with mean pi and precision (sum of
     concentrations) beta_0 = (K - 1) / (2 RMI), for K classes.
  3. A student's logits z define the Dirichlet with concentrations alpha = exp(z) + 1. It
     minimises the REVERSE divergence KL(Dir(alpha) || Dir(pi beta_0 + 1)) / beta_0. Likely classes
     dominate its gradient; in the forward divergence and in EnD2's likelihood the unlikely ones do.
  4. The student predicts softmax(z), the mean of Dir(exp(z)), now without the 1; its uncertainties
     are those of this Dirichlet.

Usage:
  python proxy_distill.py                        # numbers (1000 classes), offline, two CPU cores
  torchrun --nproc_per_node 8 proxy_distill.py --dataset imagenet     # ten members, two students
  python proxy_distill.py --dataset imagenet --members 1 --seed 3 --losses  # member 3, no student
  python proxy_distill.py --dataset imagenet --ensemble-paths a.pt b.pt   # students of such members
  python proxy_distill.py --dataset imagenet --eval --student-path FILE   # ours, or a published one

Expected (more in tests/RESULTS.md): `OMP_NUM_THREADS=1 python proxy_distill.py`, also --seed 6, 11;
  n = 3, 8.5 core-minutes per seed. Accuracy (%), NLL: ensemble of five 99.6 +- 0.04, 0.050 +- 0.002
  (ECE 3.7 +- 0.1 %); one network 97.75 +- 0.03, 0.070 +- 0.001; EnD 98.5 +- 0.2, 0.061 +- 0.004;
  reverse KL 98.3 +- 0.2, 0.075 +- 0.005: better than one network in accuracy, not in NLL; AUROC of
  letters 0.997 by its epistemic uncertainty (one network's entropy: 0.986). EnD2 and the forward
  KL to the proxy stay at 0.1 %.

Differences from the published code (github.com/yandex-research/proxy-dirichlet-distillation):
  - The default loss is the paper's (there, for ImageNet: forward KL), with offsets 1 (there: 0).
  - Kept: the reverse KL's target has precision beta_0 + 2 K (paper: beta_0 + K, --target-offset 0).
  - RMI is float64 and at least 0 (there: float32, and identical members have negative precisions).
    2^-23 is added in beta_0 alone (there: also inside logarithms and gamma functions).
  - The evaluated proxy has precision (K - 1) / (2 RMI) (there: (M - 1) / (2 RMI)), EPKL is a mean
    over pairs (there: a sum), RMI is EPKL - MI (there: that sum - MI).
  - A single softmax has no epistemic uncertainty (there: that of Dir(exp(z)), of arbitrary scale).
  - MIMO averages probabilities (there: logits) and is evaluated as an ensemble.
  - Batch norm and metrics are over all processes (there: over those of one GPU); --opt adam has the
    schedule (there: AdamW without); the step schedule has no milestone before the second epoch.
  - Images are resized in proportion, by Pillow (there: both sides to 256, by OpenCV), and those of
    ImageNet-C not again. --amp is bfloat16 except in the last layer (there: float16).
  - PRR shares ties (there: order of rows); ECE has 15 bins (a, b] (there: 10, [a, b)); means over
    corruptions are new. The last epoch counts (there: the last, or the best on validation images).
"""

import argparse
import hashlib

import argparse
import hashlib
import itertools
import math
import re
import time
from collections import OrderedDict
from dataclasses import replace
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
# it needs those of typing and torch. B images, M members, K classes; z are a student's logits
# [B, K]. All results are float64.

LOSSES = ("forward_kl", "dirichlet_likelihood", "proxy", "rkl_proxy")
EPS = 2.0**-23          # published code: keeps the precision of members that agree finite
LARGEST_LOGIT = 30.0    # above ln((K - 1) / EPS) for every K up to a million


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

    Training collapses: accuracies stay at chance, observed with 1000 classes and with ten classes
    (MNIST), where the reverse KL learns. The unlikely classes together outweigh the likely one in
    the gradient, by a factor that grows with their number.
    """
    alpha = logits.double().exp() + offset                             # [B, K]
    log_norm = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    return log_norm - ((alpha - 1) * ensemble.mean_log_probs).sum(-1)


def proxy_loss(logits, ensemble, model_offset=1.0, target_offset=1.0):
    """The forward divergence KL(Dir(pi beta_0 + t) || Dir(exp(z) + m)) [B].

    Training collapses, observed with 1000 classes and with ten classes (MNIST), for the same
    reason as that of EnD2. With t = 0 it overflows where members are certain.
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
        w_k = (alpha_k - 1) / b - pi_k
        L = sum_k w_k [psi(alpha_k) - psi(alpha_0)]
            - [sum_k lnGamma(alpha_k) - lnGamma(alpha_0)] / b
        dL/dz_k = exp(z_k) [w_k psi'(alpha_k) - psi'(alpha_0) sum_j w_j]

    z, pi [B, K] and b [B, 1] in float64; alpha_0 = sum_k alpha_k. The gradient in this closed form
    costs less than autograd, which evaluates the digamma function psi again. It can be
    differentiated once. Logits above LARGEST_LOGIT are clamped, so that nothing overflows, but
    keep a gradient, which makes them smaller again.
    """

    @staticmethod
    def forward(ctx, z, pi, b, offset):
        exp_z = z.clamp_max(LARGEST_LOGIT).exp()
        alpha = exp_z + offset                                         # [B, K]
        alpha_0 = alpha.sum(-1, keepdim=True)                          # [B, 1]
        w = (alpha - 1) / b - pi                                       # [B, K]
        common_term = torch.polygamma(1, alpha_0) * w.sum(-1, keepdim=True)   # [B, 1]
        ctx.save_for_backward(exp_z * (w * torch.polygamma(1, alpha) - common_term))
        log_means = torch.digamma(alpha) - torch.digamma(alpha_0)      # [B, K]  E ln p_k
        log_norm = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha_0)[:, 0]
        return torch.linalg.vecdot(w, log_means) - log_norm / b[:, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gradient, = ctx.saved_tensors
        return grad[:, None] * gradient, None, None, None


def distillation_loss(loss, logits, ensemble, model_offset=1.0, target_offset=1.0):
    """The loss of each row of logits [B, K], by its name in LOSSES."""
    if loss == "forward_kl":
        return forward_kl_loss(logits, ensemble)
    if loss == "dirichlet_likelihood":
        return dirichlet_likelihood_loss(logits, ensemble, model_offset)
    if loss == "proxy":
        return proxy_loss(logits, ensemble, model_offset, target_offset)
    return rkl_proxy_loss(logits, ensemble, model_offset, target_offset)


# Uncertainties [B]; entropies and divergences are in nats; "epistemic" is the mutual information.
MEASURES = ("one_minus_max", "total", "aleatoric", "epistemic", "epkl", "rmi")


class Outputs(NamedTuple):
    """What a network or an ensemble predicts for B images."""

    log_probs: Tensor      # [B, K]  its prediction
    measures: dict         # {name: [B]} of those MEASURES that it has
    log_precision: Tensor  # [B]  ln sum_k exp(z_k); of an ensemble ln beta_0


def ensemble_outputs(ensemble):
    """Outputs of an ensemble: epkl = (1/M^2) sum_ij KL(p_i || p_j) = epistemic + rmi."""
    log_pi = ensemble.log_probs
    pi = log_pi.exp()
    total = -torch.linalg.vecdot(pi, log_pi)
    epistemic = (total - ensemble.aleatoric).clamp_min(0)
    measures = {"one_minus_max": 1 - pi.amax(-1), "total": total, "aleatoric": ensemble.aleatoric,
                "epistemic": epistemic, "epkl": epistemic + ensemble.rmi, "rmi": ensemble.rmi}
    return Outputs(log_pi, measures, proxy_precision(ensemble).log())


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


def softmax_outputs(logits):
    """Outputs of one classifier with logits [B, K]: no epistemic uncertainty.

    That of Dir(exp(z)) would depend on the scale of exp(z), which cross entropy leaves arbitrary.
    """
    z = logits.double()
    log_probs = z.log_softmax(-1)
    probs = log_probs.exp()
    measures = {"one_minus_max": 1 - probs.amax(-1), "total": torch.special.entr(probs).sum(-1)}
    return Outputs(log_probs, measures, z.logsumexp(-1))


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


MIMO_REPETITIONS = 2  # published code: each subnetwork sees an image twice in a batch


def mimo_rows(n, subnetworks, generator, repetitions=MIMO_REPETITIONS, shared=0.6):
    """Which of the n images of a batch each of E subnetworks sees: [n repetitions, E].

    In the fraction `shared` of the rows all subnetworks see the same image; in the others each
    sees an image of its own.
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


class Network(nn.Module):
    """A backbone and a linear head: logits [B, K] of images [B, C, H, W]."""

    def __init__(self, backbone, fc):
        super().__init__()
        self.backbone = backbone
        self.fc = fc

    def forward(self, x):
        features = self.backbone(x)
        # Logits are float32 even under --amp bf16: those of a student reach ln 8e9 = 23.
        with torch.autocast(x.device.type, enabled=False):
            return self.fc(features.to(self.fc.weight.dtype))


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


# Layers have torchvision's names, so that its state dicts and the published checkpoints fit.


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1 = conv(c_in, c, stride=stride)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = conv(c, c)
        self.bn2 = nn.BatchNorm2d(c)
        self.downsample = make_shortcut(c_in, c, stride)
        nn.init.zeros_(self.bn2.weight)  # published code: starts at zero

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.downsample(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1 = conv(c_in, c, kernel=1)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = conv(c, c, stride=stride)
        self.bn2 = nn.BatchNorm2d(c)
        self.conv3 = conv(c, 4 * c, kernel=1)
        self.bn3 = nn.BatchNorm2d(4 * c)
        self.downsample = make_shortcut(c_in, 4 * c, stride)
        nn.init.zeros_(self.bn3.weight)  # published code: starts at zero

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + self.downsample(x))


# Each of the following functions builds the feature extractor of one network, for images of `shape`
# (C, H, W): it returns its layers, as a list or by name, and the number of features.


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


def resnet18(args, shape):
    return resnet(args, shape, BasicBlock, depths=(2, 2, 2, 2))


def resnet50(args, shape):
    return resnet(args, shape, Bottleneck, depths=(3, 4, 6, 3))


def resnet(args, shape, block, depths):
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
        blocks = []
        for index in range(depth):
            # Every stage but the first one starts by halving the resolution.
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(block(c_in, width * 2**stage, stride))
            c_in = block.expansion * width * 2**stage
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return layers, c_in


# Your own network is one more entry, such a function by its name; it may also return a classifier.
NETWORKS = {"convnet": convnet, "resnet18": resnet18, "resnet50": resnet50}


def make_network(args, num_classes, shape):
    """The network --model for images of `shape` (C, H, W), on its device: logits [B, K]."""
    net = Network(*data.backbone_and_head(args, NETWORKS, num_classes, shape))
    if args.model.startswith("resnet"):
        # as torchvision's ResNets
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net.to(args.device, memory_format=torch.channels_last)


def make_mimo(args, num_classes, shape, subnetworks):
    """The network --model with the inputs and outputs of several subnetworks."""
    channels, height, width = shape
    net = make_network(args, subnetworks * num_classes, (subnetworks * channels, height, width))
    return MIMO(net, subnetworks)


# Lightning 1.5 keeps options in a dictionary of its own class; 1.4 has the classes of callbacks as
# keys. An ordinary dictionary stands for these names; no other name of theirs is known.
LIGHTNING_NAMES = ("utilities.parsing.AttributeDict", "callbacks.model_checkpoint.ModelCheckpoint",
                   "callbacks.early_stopping.EarlyStopping",
                   "callbacks.lr_monitor.LearningRateMonitor")
LIGHTNING = [(OrderedDict, f"pytorch_lightning.{name}") for name in LIGHTNING_NAMES]
OPTION_OF = {"member": "--ensemble-paths", "student": "--student-path", "mimo": "--mimo-path"}


def read_file(path):
    """The state dict in the file of a network, and the kind of network.

    The kind is "member", "student_<loss>", "mimo", or None if the file does not tell. Nothing but
    tensors and plain values is read, and nothing is run.
    """
    with torch.serialization.safe_globals(LIGHTNING):
        state = common.load_tensors(path)
        weights = data.read_state_dict(path)
    kind = None
    made_from = state.get("made_from")
    if isinstance(made_from, dict):  # a checkpoint of this script
        kind = made_from.get("kinds of networks")
    # Of the published networks, students alone have a loss among their options.
    options = state.get("hyper_parameters") or {}
    loss = options.get("loss_type", options.get("loss"))
    if loss in LOSSES:
        kind = f"student_{loss}"
    return weights, kind


def read_network(path, kind, like, args):
    """The network of a file, and what `read_file` says it is; `like` is the test set.

    kind: what it has to be, one of OPTION_OF.
    """
    weights, file_kind = read_file(path)
    if file_kind is not None and not file_kind.startswith(kind):
        other = file_kind.split("_")[0]
        raise UserError(f"{path} is a {other}, not a {kind}; give it with {OPTION_OF[other]}")
    if kind == "mimo":
        subnetworks = max(1, len(weights.get("fc.bias", ())) // like.num_classes)
        net = make_mimo(args, like.num_classes, like.shape, subnetworks)
        inner = net.net
    else:
        net = make_network(args, like.num_classes, like.shape)
        inner = net
    # The published networks have torchvision's names, without "backbone.".
    for name in list(weights):
        if not name.startswith(("backbone.", "fc.")):
            weights[f"backbone.{name}"] = weights.pop(name)
    try:
        inner.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit --model {args.model} --width {args.width:g} and "
                        f"{like.num_classes} classes ({common.one_line(error)})") from None
    return net.eval().requires_grad_(False), file_kind


def read_student(path, like, args):
    """The student of a file, and its name among the methods."""
    net, kind = read_network(path, "student", like, args)
    if kind is None:
        common.print_on_main(f"{path} does not name its loss: it is evaluated as a student by the "
                             "reverse KL, with the uncertainties of a Dirichlet distribution")
        kind = "student_rkl_proxy"
    return net, kind


# ---- Training -----------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a network is trained, and the checkpoint that it is saved in."""

    name: str         # of the checkpoint
    made_from: dict   # what its training depends on beside the options
    seed: int
    epochs: int
    batch_size: int   # images of a global batch
    rate: float       # the highest learning rate


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


def train(net, train_set, batch_loss, plan, args, run):
    """Minimise a loss; training resumes from the last completed epoch of the checkpoint.

    batch_loss(model, batch, epoch, step) returns {name: values [b]} of the rows of this process,
    and the number of rows of the global batch. The mean of "loss" is minimised; the means of all
    are logged.
    """
    optimiser = make_optimiser(net, args)
    # The order and the augmentation of the images depend only on the seed and the epoch.
    augment = "crop_flip" if args.augment else "none"
    loader = data.Loader(train_set, plan.batch_size, args.device, seed=plan.seed, shuffle=True,
                         limit_steps=args.limit_steps, augment=augment, workers=args.workers,
                         channels_last=True)
    model = common.data_parallel(net, args.device)  # DDP, with batch norm over all processes
    if args.compile:
        model = torch.compile(model)

    history = run.resume(plan.name, plan.epochs, plan.made_from, net=net, optimiser=optimiser)
    for epoch in range(len(history), plan.epochs):
        start = time.perf_counter()
        # Every epoch is seeded, so that a resumed run draws the same dropout masks.
        common.seed_all(plan.seed, epoch, common.rank())
        model.train()
        totals = 0.0  # of each column, and the number of rows
        for step, batch in enumerate(common.progress(loader, epoch)):
            # A function of the step: a resumed run needs no state of a scheduler.
            done = epoch * len(loader) + step
            lr = plan.rate * learning_rate(done, len(loader), plan.epochs, args.schedule)
            for group in optimiser.param_groups:
                group["lr"] = lr
            columns, global_rows = batch_loss(model, batch, epoch, step)

            # DDP averages gradients over processes: this is the mean over the global batch.
            mean_loss = columns["loss"].sum() * common.world_size() / global_rows
            optimiser.zero_grad()
            mean_loss.backward()
            optimiser.step()

            sums = [column.detach().double().sum() for column in columns.values()]
            rows = torch.tensor(len(columns["loss"]), dtype=torch.float64).to(sums[0].device)
            totals = totals + torch.stack(sums + [rows])
        *means, rows = common.all_reduce(totals).tolist()
        row = {"epoch": epoch + 1}
        for name, total in zip(columns, means):
            row[name] = total / rows
        row |= {"lr": lr, "seconds": time.perf_counter() - start}
        history.append(row)
        run.save(plan.name, history, plan.made_from, net=net, optimiser=optimiser)
    return net.eval().requires_grad_(False)


def train_member(train_set, args, run, seed):
    """Step 1: train one member of the ensemble by cross entropy."""
    def batch_loss(model, batch, epoch, step):
        with common.autocast(args):
            logits = model(batch.images)
        return supervised_columns(logits, batch.labels), batch.global_size

    common.seed_all(seed, KINDS["member"])
    net = make_network(args, train_set.num_classes, train_set.shape)
    made_from = {**data.origin(train_set, args), "kinds of networks": "member"}
    plan = Plan(f"member-seed{seed}", made_from, seed, args.member_epochs, args.batch_size,
                args.lr * args.batch_size / 256)
    return train(net, train_set, batch_loss, plan, args, run)


def supervised_columns(logits, labels):
    """Loss and accuracy of each row of logits [b, K]."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == labels}


def evaluation_loader(dataset, args):
    """Batches of a set in its order, not augmented."""
    return data.Loader(dataset, args.batch_size, args.device, workers=args.workers,
                       channels_last=True)


CACHE_BYTES = 4e9  # of statistics that are kept instead of computed in every step


class Teachers(NamedTuple):
    """The members, as the students see them."""

    members: list
    cached: Ensemble | None  # float32 statistics of all training images, if these never change


def make_teachers(members, train_set, args):
    """Step 2: the statistics of the members' predictions for the training images.

    They are computed once for all students if the images are not augmented, and if 8 N K bytes
    are not too many; else in every step.
    """
    teachers = Teachers(members, None)
    n = len(train_set)
    num_classes = train_set.num_classes
    if args.eval or args.augment or 8 * n * num_classes > CACHE_BYTES:
        return teachers
    shapes = [(n, num_classes), (n, num_classes), (n,), (n,)]
    cached = Ensemble(*[torch.zeros(shape, device=args.device) for shape in shapes])
    for batch in evaluation_loader(train_set, args).epoch():
        statistics = teacher_statistics(teachers, batch, args)
        for column, values in zip(cached, statistics):
            column[batch.index] = values.float()
    # An all-gather of rows: each process has filled in its own, and zeros elsewhere. The processes
    # may have different numbers of rows, which a sum does not mind.
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
    def batch_loss(model, batch, epoch, step):
        with common.autocast(args):
            logits = model(batch.images)
        ensemble = teacher_statistics(teachers, batch, args)
        losses = distillation_loss(loss, logits, ensemble, args.model_offset, args.target_offset)
        agrees = logits.argmax(1) == ensemble.log_probs.argmax(1)
        return {"loss": losses, "agreement": agrees}, batch.global_size

    common.seed_all(seed, KINDS["student"])
    net = make_network(args, train_set.num_classes, train_set.shape)
    kind = f"student_{loss}"
    made_from = {**data.origin(train_set, args), "kinds of networks": kind,
                 "teachers": [common.digest(member) for member in teachers.members]}
    # The options of students alone are part of the name: with others, another student is trained
    # beside this one, by the same members.
    name = f"{kind}-e{args.epochs}"
    if loss != "forward_kl":
        name += f"-m{args.model_offset:g}"
    if loss in ("proxy", "rkl_proxy"):
        name += f"-t{args.target_offset:g}"
    name += f"-of{len(teachers.members)}-seed{seed}"
    plan = Plan(name, made_from, seed, args.epochs, args.batch_size,
                args.lr * args.batch_size / 256)
    return train(net, train_set, batch_loss, plan, args, run)


def train_mimo(train_set, args, run, seed):
    """Train a MIMO network, with 2 --batch-size labels in a step (published code)."""
    def batch_loss(model, batch, epoch, step):
        generator = torch.Generator().manual_seed(common.derive_seed(seed, epoch, step))
        rows = mimo_rows(batch.global_size, args.mimo, generator)
        images, labels = mimo_batch(batch, rows)
        with common.autocast(args):
            logits = model(images)                                     # [b, E, K]
        return supervised_columns(logits.flatten(0, 1), labels.flatten()), rows.numel()

    common.seed_all(seed, KINDS["mimo"])
    net = make_mimo(args, train_set.num_classes, train_set.shape, args.mimo)
    made_from = {**data.origin(train_set, args), "kinds of networks": "mimo"}
    # Each image is repeated for every subnetwork, so a step has fewer images than labels.
    labels_per_step = 2 * args.batch_size
    images_per_step = labels_per_step // (MIMO_REPETITIONS * args.mimo)
    plan = Plan(f"mimo{args.mimo}-e{args.mimo_epochs}-seed{seed}", made_from, seed,
                args.mimo_epochs, images_per_step, args.lr * labels_per_step / 256)
    return train(net, train_set, batch_loss, plan, args, run)


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

# The methods in the order of the table, and their names there.
METHODS = {"single": "single network", "ensemble": "ensemble", "ensemble_proxy": "its proxy",
           "student_forward_kl": "EnD (forward KL)",
           "student_dirichlet_likelihood": "EnD2 (likelihood)",
           "student_proxy": "proxy, forward KL", "student_rkl_proxy": "proxy, reverse KL",
           "mimo": "MIMO"}


class Logits(NamedTuple):
    """The logits of all networks for a set, in the order of the set, on the CPU.

    On processes other than the main one, there are no networks.
    """

    of_networks: dict  # {network: [N, K] float32, or [N, E, K] of MIMO}
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
    """The Outputs of each method, {method: [Outputs]}, from {network: logits}.

    Of the single networks there are as many as members; of the other methods there is one.
    """
    outputs = {}
    members = [z for name, z in logits.items() if name.startswith("member")]
    if members:
        outputs["single"] = [softmax_outputs(z) for z in members]
    if len(members) > 1:
        ensemble = ensemble_statistics(members)
        outputs["ensemble"] = [ensemble_outputs(ensemble)]
        outputs["ensemble_proxy"] = [proxy_outputs(ensemble)]
    for name, z in logits.items():
        if name == "mimo":
            outputs[name] = [ensemble_outputs(ensemble_statistics(z.unbind(1)))]
        elif name == "student_forward_kl":
            outputs[name] = [softmax_outputs(z)]
        elif name.startswith("student"):
            outputs[name] = [student_outputs(z)]
    return {method: outputs[method] for method in METHODS if method in outputs}


def columns_of(log_probs, outputs, labels):
    """What the metrics need to know of each example, {name: [n]}.

    labels [n] index the columns of log_probs; for a set with other classes only uncertainties are
    meaningful.
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
        "log_precision": outputs.log_precision,
    }
    return columns | outputs.measures


def score(logits, classes=None):
    """The columns of each method for a set, {method: [{name: [N]}]}, from its Logits.

    classes [n]: the only classes of this set. The logits are restricted to them before the softmax
    (published code); uncertainties still use all classes.
    """
    blocks = {}
    # In blocks of rows, because float64 tensors of ImageNet and ten members would take 10 GB.
    rows_of_block = max(1, 2**22 // max([1] + [z[0].numel() for z in logits.of_networks.values()]))
    for rows in torch.arange(len(logits.labels)).split(rows_of_block):
        part = {name: z[rows] for name, z in logits.of_networks.items()}
        full = all_outputs(part)
        restricted = full
        if classes is not None:
            restricted = all_outputs({name: z[..., classes] for name, z in part.items()})
        for method, networks in full.items():
            for number, outputs in enumerate(networks):
                log_probs = restricted[method][number].log_probs
                columns = columns_of(log_probs, outputs, logits.labels[rows])
                blocks.setdefault(method, {}).setdefault(number, []).append(columns)
    scored = {}
    for method, networks in blocks.items():
        scored[method] = [join_blocks(parts) for parts in networks.values()]
    return scored


def join_blocks(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


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
    for measure in MEASURES:
        if measure in columns:
            ratio = common.prediction_rejection_ratio(columns[measure], columns["correct"])
            metrics[f"prr_{measure}"] = ratio
    return metrics


def detection_metrics(inside, outside):
    """How well each uncertainty tells two sets apart, from the columns of both."""
    metrics = {}
    for name in MEASURES:
        if name in inside:
            found = common.ood_metrics(inside[name], outside[name], larger_means="ood")
            for metric, value in found.items():
                metrics[f"{metric}_{name}"] = value  # for example auroc_total
    # Of a softmax, the logarithm of the precision is minus the energy score.
    found = common.ood_metrics(inside["log_precision"], outside["log_precision"],
                               larger_means="id")
    metrics["auroc_precision"] = found["auroc"]
    return metrics


def rank_correlations(student, ensemble):
    """Spearman correlations of a student's uncertainties with the ensemble's, image by image.

    They measure whether the distribution of the ensemble was distilled.
    """
    metrics = {}
    for name in MEASURES[1:] + ("log_precision",):
        if name not in student or name not in ensemble:
            continue
        values = [student[name].numpy(), ensemble[name].numpy()]
        # A constant has no rank correlation.
        if all(len(np.unique(column)) > 1 for column in values):
            title = name.removeprefix("log_")
            metrics[f"spearman_{title}"] = float(stats.spearmanr(*values).statistic)
    return metrics


def costs(logits, networks):
    """{method: [{"ms": per example, "bytes": of the weights}]}, like `score`."""
    each = {}
    for name, net in networks.items():
        size = sum(tensor.nbytes for tensor in net.state_dict().values())
        each[name] = {"ms": logits.ms_loading + logits.ms[name], "bytes": size}
    members = [name for name in networks if name.startswith("member")]
    found = {name: [cost] for name, cost in each.items()}
    found["single"] = [each[name] for name in members]
    ensemble = {"ms": logits.ms_loading + sum(logits.ms[name] for name in members),
                "bytes": sum(each[name]["bytes"] for name in members)}
    found["ensemble"] = [ensemble]
    found["ensemble_proxy"] = [ensemble]
    return found


def set_rows(name, scored, seed):
    """Rows of prediction metrics on one set; each single network has its own seed."""
    rows = []
    for method, networks in scored.items():
        for number, columns in enumerate(networks):
            rows.append({"method": METHODS[method], "seed": seed + number, "set": name,
                         "n": len(columns["correct"]), **prediction_metrics(columns)})
    return rows


def pair_rows(name, inside, other, outside, seed, selected=slice(None)):
    """Rows of detection metrics: a set, or the `selected` part of it, against another set."""
    rows = []
    for method, networks in inside.items():
        for number, columns in enumerate(networks):
            part = {key: column[selected] for key, column in columns.items()}
            rows.append({"method": METHODS[method], "seed": seed + number, "set": name,
                         "against": other, "n": len(part["correct"]),
                         **detection_metrics(part, outside[method][number])})
    return rows


def test_rows(name, scored, cost, seed):
    """The rows of the test set, with times and with rank correlations of the students."""
    for method, networks in scored.items():
        for columns in networks:
            if not columns["log_prob"].isfinite().all():
                raise UserError(f"{METHODS[method]}: its logits on {name} are not finite; train it "
                                "again with a lower --lr")
    rows = iter(set_rows(name, scored, seed))
    finished = []
    for method, networks in scored.items():
        for number, columns in enumerate(networks):
            row = next(rows) | cost[method][number]
            if method.startswith("student") and "ensemble" in scored:
                row |= rank_correlations(columns, scored["ensemble"][0])
            finished.append(row)
    return finished


def ood_rows(dataset, scored, classes, test_set, test_scored, seed):
    """Rows of an OOD set; classes [n]: its classes, if the test set has them all, else None."""
    rows = []
    # The folders of ImageNet-O are named after classes that its images do not belong to.
    has_labels = classes is not None and dataset.name != "imagenet_o"
    if has_labels or getattr(dataset, "label_probs", None) is not None:
        rows += set_rows(dataset.name, scored, seed)
    rows += pair_rows(test_set.name, test_scored, dataset.name, scored, seed)
    if classes is not None:
        # published code: also against the test images of the same classes alone
        same = torch.isin(test_set.labels, classes)
        if same.any():
            name = f"{test_set.name}, its classes"
            rows += pair_rows(name, test_scored, dataset.name, scored, seed, same)
    return rows


def shift_rows(rows_of_sets, corruptions):
    """All rows of {(kind, severity): rows}, then their means over kinds and over severities."""
    rows = []
    for found in rows_of_sets.values():
        rows += found
    groups = [corruptions.kinds]
    # Published tables average 15 kinds where there are more.
    standard = [kind for kind in corruptions.kinds if kind in data.CIFAR_C_KINDS[:15]]
    if len(standard) == 15 and len(corruptions.kinds) > 15:
        groups.append(standard)
    for kinds in groups:
        title = f"{corruptions.name} mean of {len(kinds)} kinds"
        for severity in data.SEVERITIES:
            selected = [rows_of_sets[kind, severity] for kind in kinds]
            rows += mean_rows(f"{title} {severity}", selected)
        selected = [rows_of_sets[key] for key in itertools.product(kinds, data.SEVERITIES)]
        rows += mean_rows(title, selected)
    return rows


def mean_rows(title, rows_of_sets):
    """The means of the metrics that all sets have, row by row: {set: title, ...}."""
    means = []
    for rows in zip(*rows_of_sets, strict=True):
        mean = {**rows[0], "set": title}
        for metric, value in rows[0].items():
            if isinstance(value, float):
                mean[metric] = float(np.mean([row[metric] for row in rows]))
        means.append(mean)
    return means


# --predict writes the last of these methods that was run, and the ensemble beside it.
BEST = ["single", "mimo", "ensemble"] + [f"student_{loss}" for loss in LOSSES]


def write_predictions(logits, sets, run):
    """--predict: predictions.csv."""
    outputs = all_outputs(logits.of_networks)
    best = [method for method in BEST if method in outputs][-1]
    measures = outputs[best][0].measures
    log_probs = outputs[best][0].log_probs
    table = common.prediction_columns(sets.predict, {best: log_probs[None]}, sets.train.classes)
    run.write_csv("predictions.csv", table | measures)


# ---- Plots --------------------------------------------------------------------------------------


def plot_rejection(scored, run):
    """Rejection curves, and the precision of the students against that of the ensemble."""
    figure, (left, right) = common.make_figure(1, 2, figsize=(11.5, 4.4))
    target = scored["ensemble"][0]["log_precision"].numpy()
    # The proxy predicts, and rejects, as the ensemble does.
    methods = [method for method in scored if method != "ensemble_proxy"]
    for method, colour in zip(methods, common.colours(len(methods))):
        columns = scored[method][0]
        rejected, error = common.rejection_curve(columns["total"], columns["correct"])
        left.plot(100 * rejected, 100 * error, color=colour, label=METHODS[method])
        if method.startswith("student") and method != "student_forward_kl":
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
# What a preset does not say is the published recipe, the default of `parse_args`: ResNet-50, SGD at
# 0.1 per 256 images, on eight GPUs with 256 images each.
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
}
# These say which networks a study has, and how they are evaluated, but not how a member is trained:
# a directory holds the networks of all their values, each in a checkpoint of its own.
NOT_OF_MEMBERS = ("members", "ensemble_paths", "losses", "epochs", "model_offset", "target_offset",
                  "mimo", "mimo_epochs", "student_path", "mimo_path", "ood", "shift",
                  "shift_examples")
# What identifies a directory for networks from files, of which none is trained.
OF_FILES = ("files", "dataset", "image_size", "noise", "model", "width")


def parse_args(argv=None):
    parser = common.Parser("proxy_distill", __doc__, PRESETS, NETWORKS, dataset="numbers",
                           model="resnet50", epochs=90, batch_size=2048, lr=0.1)
    add = parser.add_argument_group("proxy_distill.py").add_argument
    add("--members", type=at_least(1), default=10, metavar="M",
        help="number of networks in the ensemble; their seeds start at --seed (paper: 10)")
    add("--member-epochs", type=at_least(0), default=120,
        help="number of epochs of a member; --epochs is that of a student (paper: 120 and 90)")
    add("--opt", choices=["sgd", "adam"], default="sgd",
        help="optimiser (paper: SGD with Nesterov momentum 0.9)")
    add("--weight-decay", "--wd", type=at_least(0, float), default=1e-4,
        help="weight decay; none for bn1 to bn3 of residual blocks (published code: 1e-4)")
    add("--schedule", choices=["step", "cosine"], default="step",
        help="'step' divides the learning rate by 10 after 30, 60 and 80 of 90 epochs "
        "(paper); 'cosine' is better for short runs; the peak learning rate is --lr x "
        "--batch-size / 256 (MIMO: twice that)")
    add("--augment", action=argparse.BooleanOptionalAction, default=True,
        help="use random crops and flips (published code)")
    add("--noise", type=between(0, 5, int), default=0, metavar="SEVERITY",
        help="severity of Gaussian noise on all images, training images included (paper: 0)")
    add("--losses", nargs="*", choices=LOSSES, default=["forward_kl", "rkl_proxy"], metavar="LOSS",
        help="train a student by each: forward_kl (EnD), dirichlet_likelihood (EnD2), "
        "proxy (forward KL to the proxy), rkl_proxy (reverse KL, the paper's); give no "
        "name to train no student")
    add("--model-offset", "--model_offset", type=at_least(0, float), default=1.0,
        help="m in the concentrations exp(z) + m of a student (paper: 1)")
    add("--target-offset", "--target_offset", type=at_least(0, float), default=1.0,
        help="t in the concentrations of the proxy, pi beta_0 + t for the forward KL and "
        "pi (beta_0 + K t) + 1 for the reverse KL (published code: 1; the paper's "
        "equation, of the reverse KL alone: 0)")
    add("--mimo", type=at_least(0), default=0, metavar="E",
        help="also train a MIMO network of E subnetworks (published code: 2); 0: no MIMO "
        "network")
    add("--mimo-epochs", type=at_least(0), default=150,
        help="number of epochs of the MIMO network (published code: 150)")
    add("--ensemble-paths", "--ensemble_paths", nargs="+", default=[], metavar="FILE",
        help="files of trained members: member-*.pt of other runs, torchvision's, or the "
        "published Lightning checkpoints")
    add("--student-path", metavar="FILE",
        help="evaluate a trained student (student_*.pt, or a published checkpoint)")
    add("--mimo-path", metavar="FILE",
        help="evaluate a trained MIMO network (mimo*.pt, or a published checkpoint)")
    add("--ood", nargs="*", default=[], metavar="NAME",
        help="out-of-distribution sets; folder:PATH is a folder of images")
    add("--shift", choices=["none", "computed", "published"], default="none",
        help="also evaluate the test set under corruptions: computed ones, or the "
        "published files of CIFAR-C, TinyImageNet-C and ImageNet-C")
    add("--shift-examples", type=at_least(0), default=0, metavar="N",
        help="number of test images under each corruption, evenly spaced; 0: all")
    args = parser.parse(argv)
    # The order of the files does not matter.
    args.ensemble_paths = sorted(args.ensemble_paths)
    if args.student_path or args.mimo_path:
        # Files are evaluated, and nothing is trained.
        common.refuse(args, ["members", "losses", "mimo"], "with --student-path or --mimo-path")
        args.losses = []
        args.mimo = 0
    elif args.ensemble_paths:
        common.refuse(args, ["members", "member_epochs"], "with --ensemble-paths")
    if files_of(args):
        args.members = len(args.ensemble_paths)
    check_options(args)
    return args


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    if args.losses and args.members < 2:
        raise UserError(f"--members {args.members}: an ensemble has at least 2; to train one "
                        "member alone, add --losses without a name")
    if args.runs > 1 and files_of(args):
        raise UserError("--runs: each run has other members, but files are given; remove this "
                        "option")
    if "proxy" in args.losses and args.target_offset == 0:
        raise UserError("--target-offset 0: the loss 'proxy' overflows at concentrations of 0; "
                        "use another --target-offset, or --losses without it")
    if args.mimo == 1:
        raise UserError("--mimo 1: a MIMO network has at least 2 subnetworks; 0: no network")
    if args.device.type == "mps":
        raise UserError("--device mps: the losses need float64, use --device cpu")
    if not args.mimo:
        common.refuse(args, ["mimo_epochs"], "without --mimo")
    if not args.losses and not args.eval:
        common.refuse(args, ["epochs", "model_offset", "target_offset"], "without --losses")
    if args.shift == "none":
        common.refuse(args, ["shift_examples"], "without --shift")


def files_of(args):
    """The files of networks that the options name."""
    files = args.ensemble_paths + [args.student_path, args.mimo_path]
    return [path for path in files if path]


def is_trained(args):
    """Whether a network is trained, not only read from files."""
    return bool(args.losses or args.mimo or not files_of(args))


# ---- Main ---------------------------------------------------------------------------------------


def with_noise(dataset, severity, seed):
    """A set under Gaussian noise; it keeps its name."""
    if severity == 0 or dataset is None:
        return dataset
    if isinstance(dataset, data.StreamedSet):
        raise UserError(f"--noise {severity}: {dataset.name} is not in memory; use --noise 0")
    noisy = data.corrupted(dataset, "gaussian_noise", severity, seed)
    return replace(noisy, name=dataset.name)


def load_sets(args):
    """All sets, with --noise; no validation set is needed."""
    sets = data.load_sets(args.dataset, args.data_dir, val_fraction=0, image_size=args.image_size,
                          limit_train=args.limit_train, ood=args.ood,
                          ood_required="ood" in args.given, predict=args.predict)
    ood = {}
    for seed, (name, dataset) in enumerate(sets.ood.items(), 2):
        ood[name] = with_noise(dataset, args.noise, seed)
    return sets._replace(train=with_noise(sets.train, args.noise, 0),
                         test=with_noise(sets.test, args.noise, 1), ood=ood,
                         predict=with_noise(sets.predict, args.noise, 1))


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
    if args.shift == "published" and name in data.CORRUPTED:
        kinds = data.corruption_kinds(name, args.data_dir)
    if kinds:
        return Corruptions(data.corrupted_name(name, kinds), kinds)
    if args.shift == "published" and "shift" in args.given:
        raise UserError(f"--shift published: {name} not found; use --shift none or computed")
    return Corruptions(name, [])


def corrupted_set(test_set, kind, severity, args):
    """The test set under one corruption, or --shift-examples of it."""
    limit = args.shift_examples or None
    if args.shift == "computed":
        return data.corrupted(data.evenly(test_set, limit), kind, severity)
    dataset = data.load_corrupted(f"{args.dataset}_c", kind, severity, args.data_dir)
    dataset = data.match(data.evenly(dataset, limit), test_set)
    return with_noise(dataset, args.noise, 1)


def limit_batch_size(train_set, args):
    """The options, with a --batch-size of at most the number of training images.

    The learning rate is proportional to the number of images that a batch can have.
    """
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
    net = make_network(args, train_set.num_classes, train_set.shape)
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
    """The networks of the files that the options name, {name: network}; `like` is the test set."""
    networks = {}
    for number, path in enumerate(args.ensemble_paths):
        networks[f"member{number}"], _ = read_network(path, "member", like, args)
    if args.student_path:
        net, name = read_student(args.student_path, like, args)
        networks[name] = net
    if args.mimo_path:
        networks["mimo"], _ = read_network(args.mimo_path, "mimo", like, args)
    return networks


def open_study(args):
    """The run directory of members and their students.

    The digest of members from files is part of its name: other files have another directory.
    """
    name = [data.set_name(args.dataset), args.model]
    if args.width != 1:
        name.append(f"w{args.width:g}")
    files = files_of(args)
    if files:
        args = common.with_options(args, files=common.on_main(digest_of_files, files))
        name.append(f"of_{args.files}")
    name.append(f"seed{args.seed}")
    return common.Run(args, "proxy_distill", common.join_name(*name), NOT_OF_MEMBERS)


def open_files(args):
    """The run directory of networks from files, of which none is trained."""
    args = common.with_options(args, files=common.on_main(digest_of_files, files_of(args)),
                               eval=False)
    name = [data.set_name(args.dataset), args.model]
    if args.width != 1:
        name.append(f"w{args.width:g}")
    name.append(f"files_{args.files}")
    others = [option for option in common.options(args) if option not in OF_FILES]
    return common.Run(args, "proxy_distill", common.join_name(*name), others)


def digest_of_files(paths):
    """Eight hexadecimal digits from the content of files, whatever their names and their order."""
    digests = []
    for path in paths:
        try:
            digests.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the path") from None
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:8]


def train_networks(networks, sets, seed, args, run):
    """Add the members that are not from files, the students and the MIMO network."""
    if not networks:
        for number in range(args.members):
            networks[f"member{number}"] = train_member(sets.train, args, run, seed + number)
    if args.losses:
        members = [net for name, net in networks.items() if name.startswith("member")]
        teachers = make_teachers(members, sets.train, args)
        for loss in args.losses:
            student = train_student(loss, teachers, sets.train, args, run, seed)
            networks[f"student_{loss}"] = student
    if args.mimo:
        networks["mimo"] = train_mimo(sets.train, args, run, seed)
    return networks


def evaluate(networks, sets, seed, args, run):
    """The rows of one run, and the picture and the predictions of the first one."""
    logits = collect_logits(networks, sets.test, args)
    test_scored = score(logits)
    rows = common.on_main(test_rows, sets.test.name, test_scored, costs(logits, networks), seed)
    for dataset in sets.ood.values():
        classes = known_classes(dataset, sets.test)
        scored = score(collect_logits(networks, dataset, args), classes)
        rows += common.on_main(ood_rows, dataset, scored, classes, sets.test, test_scored, seed)
    if seed == args.seed and sets.predict is not None:
        logits = collect_logits(networks, sets.predict, args)
        common.on_main(write_predictions, logits, sets, run)
    if seed == args.seed and args.plot and args.members > 1:
        common.on_main(plot_rejection, test_scored, run)
    return rows


def evaluate_shift(networks, test_set, corruptions, seed, args):
    """The rows of the test set under all corruptions."""
    rows = {}
    for kind, severity in itertools.product(corruptions.kinds, data.SEVERITIES):
        dataset = corrupted_set(test_set, kind, severity, args)
        scored = score(collect_logits(networks, dataset, args))
        name = f"{corruptions.name} {kind} {severity}"
        rows[kind, severity] = common.on_main(set_rows, name, scored, seed)
    return shift_rows(rows, corruptions)


COLUMNS = ["accuracy", "nll", "ece15", "prr_total", "spearman_precision", "ms",
           "auroc_epistemic", "auroc_total", "auroc_precision"]


def main(argv=None):
    """Run the script; returns the rows of its report."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    sets = load_sets(args)
    args = limit_batch_size(sets.train, args)
    corruptions = find_corruptions(sets.test, args)
    from_files = read_files(sets.test, args)
    if is_trained(args):
        check_network(sets.train, args)
        run = open_study(args)
    else:
        run = open_files(args)
    rows = []
    shown = []
    for number in range(args.runs):
        # Each run has members of its own.
        seed = args.seed + number * args.members
        networks = dict(from_files)
        if is_trained(args):
            networks = train_networks(networks, sets, seed, args, run)
        found = evaluate(networks, sets, seed, args, run)
        # The table shows the test set; results.csv has all rows.
        shown += [row for row in found if row["set"] == sets.test.name]
        rows += found + evaluate_shift(networks, sets.test, corruptions, seed, args)
    return run.report(rows, COLUMNS, shown)


if __name__ == "__main__":
    common.launch(main)
