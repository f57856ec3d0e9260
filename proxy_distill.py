"""Ensemble distribution distillation with proxy targets: one student for many classes.

Ryabinin, Malinin, Gales, "Scaling Ensemble Distribution Distillation to Many Classes with Proxy
Targets", NeurIPS 2021, arXiv:2105.06987:

  1. Train M networks by cross entropy. Their predictions p_m of an image have the mean
     pi = (1/M) sum_m p_m and the spread RMI = (1/M) sum_m KL(pi || p_m).
  2. The proxy of the ensemble is the Dirichlet distribution with mean pi and precision (sum of
     concentrations) beta_0 = (K - 1) / (2 RMI), for K classes.
  3. A student with logits z, alpha = exp(z) + 1, minimises KL(Dir(alpha) || Dir(pi b + 1)) / b, in
     which likely classes dominate the gradient; in the opposite divergence and in EnD^2 the
     unlikely ones do. b = beta_0 + K t with t = 1 as published, or b = beta_0 as in the paper.
  4. The student predicts softmax(z), the mean of Dir(exp(z)), which also gives its uncertainties.

Usage:
  python proxy_distill.py                          # numbers (1000 classes), offline, two CPU cores
  torchrun --nproc_per_node 8 proxy_distill.py --dataset imagenet            # the paper's row
  python proxy_distill.py --dataset folder:images --model torchvision/resnet18     # your network
  python proxy_distill.py --dataset imagenet --published-evaluation --losses --ensemble-paths FILES
    # the published members (see README.md); without --losses they also teach students

Expected (tests/RESULTS.md, six seeds): one member is right on 95.2 %, the ensemble on 98.9, the
  student on 98.1; AUROC of letters 0.970, 0.997 and 0.994, by the student's epistemic uncertainty
  0.999. Its rejection is better than a member's, its NLL worse (0.23 and 0.22). Members train for
  two epochs; a network that labels train for ten, as the student, is right on 99.0 % (NLL 0.03).

Where the method is: step 1: `train_member`; step 2: `ensemble_statistics`, `proxy_precision`; step
3: `rkl_proxy_loss`, `train_student`; step 4: `student_outputs`, `predict`.

Differences from the published code (github.com/yandex-research/proxy-dirichlet-distillation):
  - Loss. Published: forward KL for ImageNet, offsets 0. Here: the paper's, offsets 1, with logits
    clamped to -80..ln b + 15, because gradients beyond lose their digits.
  - RMI. Published: float32, with 2^-23 inside logarithms and gamma functions, negative for members
    that agree. Here: float64, at least 0, with 2^-23 in beta_0 alone.
  - EPKL. Published: a sum over pairs, with 1e-10 inside logarithms (up to 35 % where probabilities
    are smaller); RMI is that sum minus MI, the evaluated proxy has precision (M - 1) / (2 RMI).
    Here: the definitions.
  - Uncertainty. Published: a softmax has the epistemic uncertainty of Dir(exp(z)), MIMO averages
    logits. Here: it has none, as its scale is arbitrary; MIMO averages probabilities.
  - Processes. Published: batch norm and metrics of one GPU. Here: of all; each process shuffles its
    own rows for MIMO, whose result depends on their number.
  - Images. Published: both sides become 256 pixels. Here: in proportion, or as published with
    --published-evaluation; then metrics agree, but for RMI, EPKL, proxy and MIMO. ImageNet-O's
    labels are not used.
  - Training. Published: float16, AdamW without schedule, the best epoch. Here: bfloat16, Adam with
    schedule, the last epoch; no milestone is before epoch 2. PRR: ties share a rank.
  - Not here: precision and recall of errors, machine translation, speech recognition.
"""

import argparse
import itertools
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence

import common
import data
from common import UserError, at_least, between

# ---- Method -------------------------------------------------------------------------------------
# The paper, as functions of tensors. This section runs alone: paste it below the imports, of which
# it needs those of collections, typing and torch. B images, M members, K classes; z [B, K]: a
# student's logits. All results are float64.

LOSSES = ("forward_kl", "dirichlet_likelihood", "proxy", "rkl_proxy")
EPS = 2.0**-23          # published code: keeps the precision of members that agree finite


class Ensemble(NamedTuple):
    """What losses and uncertainties need to know of the predictions p_m of M members."""

    log_probs: Tensor       # [B, K]  ln pi, with the mean prediction pi = (1/M) sum_m p_m
    mean_log_probs: Tensor  # [B, K]  (1/M) sum_m ln p_m
    aleatoric: Tensor       # [B]  (1/M) sum_m H(p_m), in nats
    rmi: Tensor             # [B]  (1/M) sum_m KL(pi || p_m), in nats, at least 0


def ensemble_statistics(logits_of_members: Iterable[Tensor]) -> Ensemble:
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


def proxy_precision(ensemble: Ensemble) -> Tensor:
    """The proxy's precision beta_0 = (K - 1) / (2 RMI + EPS) [B]; EPS keeps it finite.

    A Dirichlet with mean pi and large concentrations has the RMI (K - 1) / (2 beta_0), by
    Stirling's formula. It fits poorly where members are certain of different classes: the proxy
    then has far less mutual information than the ensemble.
    """
    num_classes = ensemble.log_probs.shape[-1]
    return (num_classes - 1) / (2 * ensemble.rmi + EPS)


def forward_kl_loss(logits: Tensor, ensemble: Ensemble) -> Tensor:
    """EnD, plain distillation: KL(pi || softmax(z)) [B], in nats."""
    log_probs = logits.double().log_softmax(-1)
    pi = ensemble.log_probs.exp()
    return (pi * (ensemble.log_probs - log_probs)).sum(-1)


def dirichlet_likelihood_loss(logits: Tensor, ensemble: Ensemble, offset: float = 1.0) -> Tensor:
    """EnD^2: -(1/M) sum_m ln Dir(p_m; alpha) [B], with alpha = exp(z) + offset.

    With offset 1, training collapsed in all trials (tests/RESULTS.md). The unlikely classes
    together outweigh the likely one in the gradient, by a factor that grows with their number:
    they pull all logits down to where exp(z), and so the gradient, vanishes.
    """
    alpha = logits.double().exp() + offset                             # [B, K]
    log_norm = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    return log_norm - ((alpha - 1) * ensemble.mean_log_probs).sum(-1)


def clamp_logits(z: Tensor, b: Tensor) -> Tensor:
    """Clamp z [B, K] to -80..ln b + 15, b [B]; the gradient passes, and pulls back what is beyond.

    The logits of the optimum sum to exp(z) = b. Far beyond it, terms of the divergences cancel.
    """
    clamped = torch.minimum(z, b.log()[:, None] + 15).clamp_min(-80)
    return z + (clamped - z).detach()


def proxy_loss(logits: Tensor, ensemble: Ensemble, model_offset: float = 1.0,
               target_offset: float = 1.0) -> Tensor:
    """The forward divergence KL(Dir(pi beta_0 + t) || Dir(exp(z) + m)) [B].

    Training collapsed as that of EnD^2 did, also with the published arithmetic (a float32 target).
    With t = 0 it overflows where members are certain.
    """
    beta_0 = proxy_precision(ensemble)
    z = clamp_logits(logits.double(), beta_0)
    target = ensemble.log_probs.exp() * beta_0[:, None] + target_offset  # [B, K]
    return kl_divergence(Dirichlet(target, validate_args=False),
                         Dirichlet(z.exp() + model_offset, validate_args=False))


def rkl_proxy_loss(logits: Tensor, ensemble: Ensemble, model_offset: float = 1.0,
                   target_offset: float = 1.0) -> Tensor:
    """The reverse divergence KL(Dir(exp(z) + m) || Dir(pi b + 1)) / b [B], b = beta_0 + K t.

    At the optimum for m = 1, softmax(z) = pi and sum_k exp(z_k) = b.
    """
    b = proxy_precision(ensemble) + logits.shape[-1] * target_offset   # [B]
    z = clamp_logits(logits.double(), b)
    target = ensemble.log_probs.exp() * b[:, None] + 1                 # [B, K]
    divergence = kl_divergence(Dirichlet(z.exp() + model_offset, validate_args=False),
                               Dirichlet(target, validate_args=False))
    return divergence / b


def distillation_loss(loss: str, logits: Tensor, ensemble: Ensemble, model_offset: float = 1.0,
                      target_offset: float = 1.0) -> Tensor:
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


def softmax_outputs(logits: Tensor) -> Outputs:
    """Outputs of one classifier with logits [B, K]: no epistemic uncertainty.

    That of Dir(exp(z)) would depend on the scale of exp(z), which cross entropy leaves arbitrary.
    """
    z = logits.double()
    log_probs = z.log_softmax(-1)
    probs = log_probs.exp()
    measures = {"one_minus_max": 1 - probs.amax(-1), "total": torch.special.entr(probs).sum(-1),
                "energy": -z.logsumexp(-1)}
    return Outputs(log_probs, measures)


def ensemble_outputs(ensemble: Ensemble) -> Outputs:
    """Outputs of an ensemble: epkl = (1/M^2) sum_ij KL(p_i || p_j) = epistemic + rmi."""
    log_pi = ensemble.log_probs
    pi = log_pi.exp()
    total = -torch.linalg.vecdot(pi, log_pi)
    epistemic = (total - ensemble.aleatoric).clamp_min(0)
    measures = {"one_minus_max": 1 - pi.amax(-1), "total": total, "aleatoric": ensemble.aleatoric,
                "epistemic": epistemic, "epkl": epistemic + ensemble.rmi, "rmi": ensemble.rmi}
    return Outputs(log_pi, measures)


def dirichlet_outputs(alpha: Tensor, log_probs: Tensor) -> Outputs:
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


def student_outputs(logits: Tensor) -> Outputs:
    """Outputs of a student: those of Dir(exp(z)), whose mean is the prediction softmax(z).

    published code: the offset of the loss is not added in the evaluation.
    """
    z = logits.double()
    # exp overflows at 709; out-of-distribution inputs of large networks can reach that.
    return dirichlet_outputs(z.clamp(-600, 600).exp(), z.log_softmax(-1))


def proxy_outputs(ensemble: Ensemble) -> Outputs:
    """Outputs of the ensemble's proxy Dir(pi beta_0)."""
    alpha = ensemble.log_probs.exp() * proxy_precision(ensemble)[:, None]
    return dirichlet_outputs(alpha, ensemble.log_probs)


class MIMO(nn.Module):
    """E subnetworks in one network, which sees E images as channels and has E K outputs.

    images [B, E, C, H, W], or [B, C, H, W], which all subnetworks see; logits [B, E, K].
    """

    def __init__(self, net: nn.Module, subnetworks: int):
        super().__init__()
        self.net = net
        self.subnetworks = subnetworks

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim == 4:
            images = images[:, None].expand(-1, self.subnetworks, -1, -1, -1)
        logits = self.net(images.flatten(1, 2))                        # [B, E K]
        return logits.unflatten(1, (self.subnetworks, -1))


def mimo_rows(n: int, subnetworks: int, generator: torch.Generator, repetitions: int = 2,
              shared: float = 0.6) -> Tensor:
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


class Network(nn.Module):
    """A feature extractor and a linear head: logits [B, K] of images [B, C, H, W]."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x):
        features = self.backbone(x)
        # Logits are float32 even under --amp bf16: those of a student reach ln 8e9 = 23.
        with torch.autocast(x.device.type, enabled=False):
            return self.head(features.to(self.head.weight.dtype))


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

    epochs: those for which it will be trained, see common.backbone_and_head.
    """
    net = Network(*common.backbone_and_head(args, NETWORKS, num_classes, shape, epochs))
    if args.model in ("resnet18", "resnet50"):
        # as torchvision's ResNets
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net.to(args.device, memory_format=torch.channels_last)


def make_mimo(args, num_classes, shape):
    """The network --model with the inputs and outputs of --mimo subnetworks."""
    channels, height, width = shape
    net = make_network(args, args.mimo * num_classes, (args.mimo * channels, height, width),
                       args.mimo_epochs)
    return MIMO(net, args.mimo)


# Lightning 1.5 keeps options in a dictionary of its own class; 1.4 has the classes of callbacks as
# keys. An ordinary dictionary stands for these names; no other name of theirs is known.
LIGHTNING = [(OrderedDict, f"pytorch_lightning.{name}") for name in (
    "utilities.parsing.AttributeDict", "callbacks.model_checkpoint.ModelCheckpoint",
    "callbacks.early_stopping.EarlyStopping", "callbacks.lr_monitor.LearningRateMonitor")]


def read_file(path):
    """The state dict in the file of a network, and what the file says about the network.

    This is {"kind": "member", "student_<loss>" or "mimo", ...}, or {} if the file does not tell.
    Nothing but tensors and plain values is read, and nothing is run.
    """
    if str(path).endswith((".tar", ".tar.gz", ".tgz")):
        raise UserError(f"{path} is an archive: unpack it, and give the files of the networks")
    with torch.serialization.safe_globals(LIGHTNING):
        state = common.load_tensors(path)
    weights = common.state_dict_in(state, path)
    if isinstance(state.get("inputs"), dict):  # a checkpoint of this script
        return weights, state["inputs"]
    # Of the published networks, students alone have a loss among their options.
    options = state.get("hyper_parameters")
    if isinstance(options, dict):
        loss = options.get("loss_type", options.get("loss"))
        if loss in LOSSES:
            return weights, {"kind": f"student_{loss}"}
    return weights, {}


def read_network(path, kind, splits, args):
    """The network of a file, and its kind, None if the file does not tell.

    kind: what it has to be, "member" or "student".
    """
    weights, inputs = read_file(path)
    stored_kind = inputs.get("kind")
    if stored_kind is not None and not str(stored_kind).startswith(kind):
        raise UserError(f"{path} is a {stored_kind}, not a {kind}; members are given with "
                        "--ensemble-paths, a student with --student-path")
    if inputs.get("features", frozen_features(splits, args)) != frozen_features(splits, args):
        raise UserError(f"{path} was trained on the features of other images, or of another "
                        "network; its head fits no others: use the --limit-train, --model, "
                        "--weights and --image-size that it was trained with")
    num_classes = splits.train.num_classes
    try:
        if not inputs and args.model.startswith("torchvision/") and not args.freeze:
            # Heads of torchvision's networks have several names, all of which --weights FILE knows.
            # Without epochs, none is replaced by a new one.
            args = common.with_options(args, weights=path)
            net = make_network(args, num_classes, splits.train.shape, 0)
        else:
            # As with --eval, all weights come from the file.
            args = common.with_options(args, eval=True)
            net = make_network(args, num_classes, splits.train.shape, 1)
            net.load_state_dict(with_our_names(weights))
    except (RuntimeError, UserError) as error:
        raise UserError(f"{path} does not fit --model {args.model} --width {args.width:g} and "
                        f"{num_classes} classes ({common.one_line(error)})") from None
    return net.eval().requires_grad_(False), stored_kind


def with_our_names(weights):
    """A state dict with the names of `Network`, also if it has those of torchvision's ResNets."""
    renamed = {}
    for name, value in weights.items():
        name = re.sub(r"^fc\.", "head.", name)
        if not name.startswith(("backbone.", "head.")):
            name = f"backbone.{name}"
        renamed[name] = value
    return renamed


def frozen_features(splits, args):
    """What the features of --freeze depend on, as plain values; None without --freeze.

    Features are standardised by the training images, so that a head fits no others.
    """
    if not args.freeze:
        return None
    weights = splits.fingerprints.get("file of --weights", args.weights)
    if weights == "none":
        weights = f"drawn by seed {args.seed}"
    return {"training data": splits.fingerprints.get("training data"), "weights": weights,
            "model": args.model, "image_size": args.image_size, "limit_train": args.limit_train}


# ---- Training -----------------------------------------------------------------------------------

# The random numbers of a network are determined by its seed and this number.
KINDS = {"member": 0, "mimo": 1, "student": 2}


def lr_factor(step, steps_per_epoch, epochs, schedule):
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


def batch_size_of(train_set, args):
    """The images of a full batch, to which the learning rate is proportional."""
    return min(args.batch_size, len(train_set))


def epoch_loader(train_set, batch_size, kind, seed, epoch, args):
    """The Loader of an epoch: --noise is drawn anew, as an augmentation.

    Noise, order and augmentation depend only on the kind of network, the seed and the epoch.
    """
    noise_seed = common.derive_seed(seed, KINDS[kind], epoch)
    return data.Loader(with_noise(train_set, noise_seed, args), batch_size, args.device, seed=seed,
                       shuffle=True, limit_steps=args.limit_steps, workers=args.workers,
                       augment="crop_flip" if args.augment else "none", channels_last=True)


def with_noise(dataset, seed, args):
    """A set under the Gaussian noise of --noise, which its name says."""
    if args.noise == 0 or dataset is None:
        return dataset
    noisy = data.corrupted(dataset, "gaussian_noise", args.noise, seed)
    return replace(noisy, name=f"{dataset.name}_noise{args.noise}")


def take_step(optimiser, lr, loss, rows):
    """Minimise the mean loss of the `rows` of all processes; `loss` is the sum over those here."""
    for group in optimiser.param_groups:
        group["lr"] = lr
    mean_loss = loss * common.world_size() / rows  # DDP averages gradients over processes
    optimiser.zero_grad()
    mean_loss.backward()
    optimiser.step()


def train_member(splits, seed, args, run):
    """Step 1: train one member of the ensemble by cross entropy."""
    train_set = splits.train
    epochs = args.member_epochs
    common.seed_all(seed, KINDS["member"])
    net = make_network(args, train_set.num_classes, train_set.shape, epochs)
    optimiser = make_optimiser(net, args)
    model = common.data_parallel(net, args.device, args.compile)  # DDP, with global batch norm
    batch_size = batch_size_of(train_set, args)
    name = f"member-seed{seed}"
    inputs = {"kind": "member", "features": frozen_features(splits, args)}
    history = run.resume(name, epochs, inputs, net=net, optimiser=optimiser)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        loader = epoch_loader(train_set, batch_size, "member", seed, epoch, args)
        # Every epoch is seeded, so that a resumed run draws the same dropout masks.
        common.seed_all(seed, epoch, common.rank())
        model.train()
        totals = torch.zeros(3, device=args.device)  # loss, correct predictions, images
        for step, batch in enumerate(common.progress(loader, epoch)):
            # A function of the step: a resumed run needs no state of a scheduler.
            factor = lr_factor(epoch * len(loader) + step, len(loader), epochs, args.schedule)
            lr = args.lr * batch_size / 256 * factor
            with common.autocast(args):
                logits = model(batch.images)                           # [b, K]
            loss = F.cross_entropy(logits, batch.labels, reduction="none").sum()
            take_step(optimiser, lr, loss, batch.global_size)
            totals[0] += loss.detach()
            totals[1] += (logits.argmax(1) == batch.labels).sum()
            totals[2] += len(logits)
        loss, correct, images = common.all_reduce(totals).tolist()
        history.append({"epoch": epoch + 1, "loss": loss / images,
                        "train_accuracy": correct / images, "lr": lr,
                        "seconds": time.perf_counter() - start})
        run.save(name, history, net=net, optimiser=optimiser)
    return net.eval().requires_grad_(False)


def student_checkpoint(loss_name, members, splits, seed, args):
    """The name of a student's checkpoint, and its inputs: the members, and the options of students.

    With other options, the same members teach another student, which is saved beside this one.
    """
    inputs = {"kind": f"student_{loss_name}", "features": frozen_features(splits, args),
              "teachers": sorted(common.fingerprint(member) for member in members),
              "epochs": args.epochs}
    name = f"student_{loss_name}-{args.epochs}epochs"
    if loss_name != "forward_kl":
        inputs["model offset"] = args.model_offset
        name += f"-m{args.model_offset:g}"
    if loss_name in ("proxy", "rkl_proxy"):
        inputs["target offset"] = args.target_offset
        name += f"-t{args.target_offset:g}"
    return f"{name}-of{len(members)}-seed{seed}", inputs


def train_student(loss_name, members, splits, seed, args, run):
    """Steps 2 and 3: train a student, a network like a member, from scratch; it sees no labels.

    The members see the same images as the student, augmented and under the same noise.
    """
    train_set = splits.train
    epochs = args.epochs
    common.seed_all(seed, KINDS["student"])
    net = make_network(args, train_set.num_classes, train_set.shape, epochs)
    optimiser = make_optimiser(net, args)
    model = common.data_parallel(net, args.device, args.compile)
    batch_size = batch_size_of(train_set, args)
    name, inputs = student_checkpoint(loss_name, members, splits, seed, args)
    history = run.resume(name, epochs, inputs, net=net, optimiser=optimiser)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        loader = epoch_loader(train_set, batch_size, "student", seed, epoch, args)
        common.seed_all(seed, epoch, common.rank())
        model.train()
        # loss, agreements with the ensemble, log precisions of student and proxy, images
        totals = torch.zeros(5, dtype=torch.float64, device=args.device)
        for step, batch in enumerate(common.progress(loader, epoch)):
            factor = lr_factor(epoch * len(loader) + step, len(loader), epochs, args.schedule)
            lr = args.lr * batch_size / 256 * factor
            with common.autocast(args):
                logits = model(batch.images)                           # [b, K]
                with torch.no_grad():
                    ensemble = ensemble_statistics(member(batch.images) for member in members)
            loss = distillation_loss(loss_name, logits, ensemble, args.model_offset,
                                     args.target_offset).sum()
            take_step(optimiser, lr, loss, batch.global_size)
            totals[0] += loss.detach()
            totals[1] += (logits.argmax(1) == ensemble.log_probs.argmax(1)).sum()
            totals[2] += logits.detach().logsumexp(1).sum()
            totals[3] += proxy_precision(ensemble).log().sum()
            totals[4] += len(logits)
        means = common.all_reduce(totals) / totals[4]
        loss, agreement, log_precision, log_precision_of_proxy, _ = means.tolist()
        # If training collapses, the student's precision falls far below the proxy's.
        history.append({"epoch": epoch + 1, "loss": loss, "agreement": agreement,
                        "log_precision": log_precision,
                        "log_precision_of_proxy": log_precision_of_proxy, "lr": lr,
                        "seconds": time.perf_counter() - start})
        run.save(name, history, net=net, optimiser=optimiser)
    return net.eval().requires_grad_(False)


def train_mimo(splits, seed, args, run):
    """Train a MIMO network, with 2 --batch-size labels in a step (published code)."""
    train_set = splits.train
    epochs = args.mimo_epochs
    common.seed_all(seed, KINDS["mimo"])
    net = make_mimo(args, train_set.num_classes, train_set.shape)
    optimiser = make_optimiser(net, args)
    model = common.data_parallel(net, args.device, args.compile)
    labels_per_step = 2 * batch_size_of(train_set, args)
    # Every subnetwork sees each image twice, so a step has fewer images than labels.
    images_per_step = labels_per_step // (2 * args.mimo)
    name = f"mimo{args.mimo}-{epochs}epochs-seed{seed}"
    inputs = {"kind": "mimo", "subnetworks": args.mimo, "epochs": epochs}
    history = run.resume(name, epochs, inputs, net=net, optimiser=optimiser)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        loader = epoch_loader(train_set, images_per_step, "mimo", seed, epoch, args)
        common.seed_all(seed, epoch, common.rank())
        model.train()
        totals = torch.zeros(3, device=args.device)  # loss, correct predictions, labels
        for step, batch in enumerate(common.progress(loader, epoch)):
            factor = lr_factor(epoch * len(loader) + step, len(loader), epochs, args.schedule)
            lr = args.lr * labels_per_step / 256 * factor
            # Each process mixes the images that it has loaded.
            generator = torch.Generator().manual_seed(
                common.derive_seed(seed, epoch, step, common.rank()))
            rows = mimo_rows(len(batch.labels), args.mimo, generator).to(args.device)
            with common.autocast(args):
                logits = model(batch.images[rows]).flatten(0, 1)       # [b E, K]
            labels = batch.labels[rows].flatten()                      # [b E]
            loss = F.cross_entropy(logits, labels, reduction="none").sum()
            take_step(optimiser, lr, loss, 2 * args.mimo * batch.global_size)
            totals[0] += loss.detach()
            totals[1] += (logits.argmax(1) == labels).sum()
            totals[2] += len(labels)
        loss, correct, number = common.all_reduce(totals).tolist()
        history.append({"epoch": epoch + 1, "loss": loss / number,
                        "train_accuracy": correct / number, "lr": lr,
                        "seconds": time.perf_counter() - start})
        run.save(name, history, net=net, optimiser=optimiser)
    return net.eval().requires_grad_(False)


# ---- Evaluation ---------------------------------------------------------------------------------

# The methods, and their names in the table. --predict writes the last of them that was run.
METHODS = {"member": "single network", "mimo": "MIMO", "ensemble_proxy": "proxy of the ensemble",
           "ensemble": "ensemble", "student_forward_kl": "EnD: KL(ensemble mean, student)",
           "student_dirichlet_likelihood": "EnD²", "student_proxy": "proxy, forward KL",
           "student_rkl_proxy": "proxy, reverse KL"}
LARGER_MEANS = dict.fromkeys(MEASURES, "ood")  # what large values of an uncertainty mean


class Logits(NamedTuple):
    """What all networks return for a set; no network has any but on the main process."""

    of_networks: dict  # {network: [N, K] float32 on the CPU, or [N, E, K] of MIMO}
    labels: Tensor     # [N]
    ms: dict           # {network: time of its forward passes, in milliseconds per example}
    ms_loading: float  # time of everything else, mostly loading, in milliseconds per example


class Predictions(NamedTuple):
    """What a method predicts for the examples of a set."""

    name: str                     # that of the method in the table
    seed: int                     # that of a single network, or of the first member
    networks: list                # names of the networks that it needs
    labels: Tensor                # [N]
    log_probs: Tensor             # [N, K] float32: those of ImageNet and ten members take 3 GB
    scores: dict                  # {name: [N]} of those MEASURES that it has
    log_precision: Tensor | None  # [N]  of a Dirichlet distribution

    def correct(self) -> Tensor:
        """Whether the predicted class is the label [N]."""
        return self.log_probs.argmax(1) == self.labels


@torch.no_grad()
def collect_logits(networks, dataset, args):
    """The Logits of all networks {name: network} for a set, from one pass over its images."""
    batches = []
    seconds = dict.fromkeys(networks, 0.0)
    start = time.perf_counter()
    for batch in data.evaluation_loader(dataset, args).epoch():
        rows = {"index": batch.index}
        for name, net in networks.items():
            begin = time.perf_counter()
            with common.autocast(args):
                rows[name] = net(batch.images).cpu()                   # waits for the device
            seconds[name] += time.perf_counter() - begin
        batches.append(rows)
    loading = time.perf_counter() - start - sum(seconds.values())
    ms = {name: 1000 * spent / len(dataset) for name, spent in seconds.items()}
    return Logits(common.gather_rows(batches), dataset.labels, ms, 1000 * loading / len(dataset))


def make_predictions(kind, seed, networks, labels, outputs):
    """The Predictions of one method, by its key in METHODS, from its Outputs."""
    return Predictions(METHODS[kind], seed, networks, labels, outputs.log_probs.float(),
                       outputs.measures, outputs.log_precision)


def predict(logits, seed):
    """The Predictions of each single network, the ensemble, its proxy, the students and MIMO."""
    of_networks = logits.of_networks
    labels = logits.labels
    predictions = []
    members = [name for name in of_networks if name.startswith("member")]
    for number, name in enumerate(members):
        outputs = softmax_outputs(of_networks[name])
        predictions.append(make_predictions("member", seed + number, [name], labels, outputs))
    if len(members) > 1:
        ensemble = ensemble_statistics(of_networks[name] for name in members)
        for kind, outputs in (("ensemble", ensemble_outputs(ensemble)),
                              ("ensemble_proxy", proxy_outputs(ensemble))):
            predictions.append(make_predictions(kind, seed, members, labels, outputs))
    for name, z in of_networks.items():
        if name in members:
            continue
        if name == "mimo":
            outputs = ensemble_outputs(ensemble_statistics(z.unbind(1)))
        elif name == "student_forward_kl":
            outputs = softmax_outputs(z)
        else:
            outputs = student_outputs(z)
        predictions.append(make_predictions(name, seed, [name], labels, outputs))
    return predictions


def predict_among(classes, logits, seed):
    """`predict` a set with some classes alone, which its labels number; classes [n].

    published code: logits are restricted to them before the softmax; uncertainties are of all.
    """
    of_networks = {name: z[..., classes] for name, z in logits.of_networks.items()}
    restricted = predict(logits._replace(of_networks=of_networks), seed)
    return [among_all._replace(log_probs=among.log_probs)
            for among_all, among in zip(predict(logits, seed), restricted, strict=True)]


def known_classes(dataset, test_set):
    """The classes [n] of the test set that an OOD set has; None if it has others, or no labels."""
    if not dataset.classes or not set(dataset.classes) <= set(test_set.classes):
        return None
    if (dataset.labels < 0).any():  # those of "nonsense" are unknown
        return None
    return torch.tensor([test_set.classes.index(name) for name in dataset.classes])


def published_calibration(confidence, correct):
    """ECE and largest gap of the published code: ten bins [a, b), and one for confidence 1.

    confidence [N] float32, in which 1 - 1e-8 is 1, as published
    """
    bin_index = np.digitize(confidence, np.linspace(0, 1, 11))
    gaps = np.abs(np.bincount(bin_index, confidence - correct))        # times the count of a bin
    counts = np.bincount(bin_index).clip(1)
    return {"ece10": float(gaps.sum() / len(correct)), "mce10": float((gaps / counts).max())}


def rejection_metrics(title, scores, correct):
    """The prediction rejection ratio of each uncertainty, {"<title>_<uncertainty>": ratio}."""
    return {f"{title}_{name}": common.prediction_rejection_ratio(values, correct)
            for name, values in scores.items()}


def rank_correlations(student, ensemble, proxy):
    """Spearman correlations of uncertainties: was the ensemble's distribution distilled?"""
    pairs = {name: (student.scores[name], ensemble.scores[name])
             for name in ensemble.scores if name in student.scores and name != "one_minus_max"}
    log_precision = student.log_precision
    if log_precision is None:
        log_precision = -student.scores["energy"]  # EnD is not Dirichlet, but has a sum of exp(z)
    pairs["precision"] = (log_precision, proxy.log_precision)
    metrics = {}
    for name, values in pairs.items():
        # A constant has no rank correlation.
        if all(column.min() < column.max() for column in values):
            metrics[f"spearman_{name}"] = float(stats.spearmanr(*values).statistic)
    return metrics


def prediction_rows(title, predictions):
    """A row of prediction metrics for each method."""
    rows = []
    for method in predictions:
        if not method.log_probs.isfinite().all():
            raise UserError(f"{method.name}: its logits on {title} are not finite; train it again "
                            "with a lower --lr")
        correct = method.correct()
        row = {"method": method.name, "seed": method.seed, "set": title, "n": len(method.labels)}
        row |= common.prediction_metrics(method.log_probs, method.labels)
        row["top5_accuracy"] = common.top_k_accuracy(method.log_probs, method.labels, 5)
        confidence = method.log_probs.exp().amax(1)
        row |= published_calibration(confidence.numpy(), correct.numpy())
        rows.append(row | rejection_metrics("prr", method.scores, correct))
    return rows


def detection_rows(title, inside, other, outside, selected=slice(None)):
    """Rows of detection metrics: a set, or the `selected` part of it, against another."""
    rows = []
    for method, unknown in zip(inside, outside, strict=True):
        scores = {name: values[selected] for name, values in method.scores.items()}
        rows.append({"method": method.name, "seed": method.seed, "set": title, "against": other,
                     "n": len(method.labels[selected]),
                     **common.detection_metrics(scores, unknown.scores, LARGER_MEANS)})
    return rows


def test_rows(title, tested, costs):
    """The rows of the test set, with costs, and with rank correlations of the students.

    costs: {network: (milliseconds per example, bytes)}, of "" what all of them share
    """
    rows = prediction_rows(title, tested)
    by_name = {method.name: method for method in tested}
    ensemble = by_name.get(METHODS["ensemble"])
    proxy = by_name.get(METHODS["ensemble_proxy"])
    for row, method in zip(rows, tested, strict=True):
        row["ms"], row["bytes"] = costs[""]
        for network in method.networks:
            ms, size = costs[network]
            row["ms"] += ms
            row["bytes"] += size
        if method.networks[0].startswith("student") and ensemble is not None:
            row |= rank_correlations(method, ensemble, proxy)
    return rows


def labelled_rows(title, predictions, test_title, tested):
    """Rows of a set with the classes of the test set, and of the test set against it."""
    rows = prediction_rows(title, predictions)
    pairs = detection_rows(test_title, tested, title, predictions)
    for row, inside, outside in zip(pairs, tested, predictions, strict=True):
        # published code ("_with_val"): rejection among the images of both sets
        scores = {name: torch.cat([values, outside.scores[name]])
                  for name, values in inside.scores.items()}
        correct = torch.cat([inside.correct(), outside.correct()])
        row |= rejection_metrics("prr_both", scores, correct)
    return rows + pairs


def ood_rows(dataset, predictions, classes, test_set, tested):
    """Rows of an OOD set; classes [n]: its classes, if the test set has them all, else None."""
    name = test_set.name
    # The folders of ImageNet-O are named after classes that its images do not belong to.
    if classes is None or dataset.name == "imagenet_o":
        rows = detection_rows(name, tested, dataset.name, predictions)
    else:
        rows = labelled_rows(dataset.name, predictions, name, tested)
    if classes is not None:
        # published code ("_masked"): also against the test images of the same classes alone
        same = torch.isin(test_set.labels, classes)
        if same.any():
            rows += detection_rows(f"{name}, its classes", tested, dataset.name, predictions, same)
    return rows


def shift_rows(rows_of_sets, title, kinds):
    """All rows of {(kind, severity): rows}, then their means over kinds and over severities."""
    rows = []
    for (kind, severity), of_set in rows_of_sets.items():
        rows += [row | {"kind": kind, "severity": severity} for row in of_set]
    groups = [kinds]
    # Published tables average 15 of the kinds.
    standard = data.CIFAR_C_KINDS[:15]
    if set(standard) < set(kinds):
        groups.append(standard)
    for group in groups:
        title_of_group = f"{title}_mean_of_{len(group)}"
        for severity in data.SEVERITIES:
            selected = [rows_of_sets[kind, severity] for kind in group]
            rows += mean_rows(f"{title_of_group}_s{severity}", selected)
        selected = [rows_of_sets[key] for key in itertools.product(group, data.SEVERITIES)]
        rows += mean_rows(title_of_group, selected)
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
                # Predictions without an error have no rejection ratio.
                mean[metric] = None if None in values else float(np.mean(values))
        means.append(mean)
    return means


def write_predictions(predictions, splits, run):
    """--predict: predictions.csv, by the last method of METHODS and the ensemble beside it."""
    order = list(METHODS.values())
    best = max(predictions, key=lambda method: order.index(method.name))
    log_probs = {best.name: best.log_probs[None]}                      # [1, N, K]
    members = [method.log_probs for method in predictions if method.name == METHODS["member"]]
    if len(members) > 1:
        log_probs["ensemble"] = torch.stack(members)                   # [M, N, K]
    # A student's uncertainties are those of a Dirichlet distribution.
    scores = {name: values for name, values in best.scores.items() if name != "one_minus_max"}
    common.write_predictions(run, splits.predict, log_probs, splits.train.classes, extra=scores)


# ---- Plots --------------------------------------------------------------------------------------


def plot_uncertainty(tested, unknown, run):
    """Rejection and detection by the total uncertainty, of all methods but the proxy.

    tested: Predictions for the test set; unknown: {OOD set: Predictions}
    """
    chosen = {}
    for number, method in enumerate(tested):
        chosen.setdefault(method.name, number)  # of the single networks the first one
    del chosen[METHODS["ensemble_proxy"]]
    figure, (panels,) = common.make_figure(1, 1 + len(unknown), figsize=(4 + 4 * len(unknown), 4),
                                           squeeze=False)
    for (name, number), colour in zip(chosen.items(), common.colours(len(chosen))):
        total = tested[number].scores["total"]
        rejected, error = common.rejection_curve(total, tested[number].correct())
        panels[0].plot(100 * rejected, 100 * error, color=colour, label=name)
        # Inputs are rejected from the uncertainty of each test image on.
        thresholds = total.sort(descending=True).values
        for panel, predictions in zip(panels[1:], unknown.values()):
            scores = predictions[number].scores["total"].sort().values
            detected = 1 - torch.searchsorted(scores, thresholds) / len(scores)
            panel.plot(np.linspace(0, 100, len(detected)), 100 * detected, color=colour)
    panels[0].set(ylabel="remaining errors (% of images)", title="test images", ylim=(0, None))
    for panel, name in zip(panels[1:], unknown):
        panel.set(ylabel="rejected images (%)", title=name.replace("_", " "), ylim=(0, 102))
    for panel in panels:
        panel.set(xlabel="rejected as most uncertain (% of test images)", xlim=(0, 10))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    run.save_figure(figure, "uncertainty.png")


# ---- Options ------------------------------------------------------------------------------------

# Not in the paper: its networks for small images, with the usual recipe.
CIFAR = dict(model="resnet18", batch_size=128, lr=0.2, weight_decay=5e-4, shift="published")
# Beside these, the defaults of `parse_args` are the published recipe.
PRESETS = {
    "imagenet": dict(ood=["imagenet_o", "imagenet_a", "imagenet_r"], shift="published"),
    "tiny_imagenet": dict(model="resnet18", batch_size=256, shift="published"),
    "cifar10": dict(CIFAR, ood=["svhn", "cifar100"]),
    "cifar100": dict(CIFAR, ood=["svhn"]),
    # Without noise these images are too easy for an ensemble to disagree. With weight decay,
    # members are not sure of what they know, and their mean is under-confident. Members train
    # briefly, so that all ends in minutes: one network that labels train for as long as a student
    # makes fewer errors than it does (tests/RESULTS.md).
    "numbers": dict(model="convnet", width=0.25, members=5, epochs=10, member_epochs=2,
                    mimo_epochs=8, batch_size=128, lr=0.012, opt="adam", schedule="cosine",
                    weight_decay=0.0, augment=False, noise=3, shift="computed", shift_examples=40,
                    ood=["numbers_letters", "numbers_ambiguous"]),
    # Your own images: small networks that train on two CPU cores in minutes.
    "folder": dict(model="convnet", width=0.5, members=5, epochs=40, member_epochs=40,
                   mimo_epochs=40, batch_size=16, lr=0.016, opt="adam", schedule="cosine",
                   weight_decay=0.0),
    # The following are added to the preset of the data set if the option is used. Your own
    # network: a few careful epochs, or its last layer alone.
    "--model torchvision/NAME": dict(width=1.0, members=3, epochs=10, member_epochs=10,
                                     batch_size=32, lr=0.16, opt="sgd", schedule="cosine",
                                     weight_decay=5e-4, augment=True, shift="none"),
    "--freeze": dict(members=5, epochs=30, member_epochs=30, lr=0.08, weight_decay=0.015,
                     augment=False, noise=0),
    "--student-path": dict(losses=[], mimo=0),
}


def parse_args(argv=None):
    """The options; those of students do not change the members, so they are for evaluation."""
    parser = common.Parser("proxy_distill", __doc__, PRESETS, NETWORKS, dataset="numbers",
                           model="resnet50", epochs=90, batch_size=2048, lr=0.1, augment=True)
    parser.move("--epochs", "evaluation")
    training = parser.training.add_argument
    training("--member-epochs", type=at_least(0), default=120,
        help="number of epochs of a member; --epochs is that of a student (paper: 120 and 90)")
    training("--opt", choices=["sgd", "adam"], default="sgd",
        help="optimiser (paper: SGD with Nesterov momentum 0.9)")
    training("--weight-decay", "--wd", type=at_least(0, float), default=1e-4,
        help="weight decay; none for bn1 to bn3 of residual blocks (published code: 1e-4)")
    training("--schedule", choices=["step", "cosine"], default="step",
        help="'step' divides the learning rate by 10 after 30, 60 and 80 of 90 epochs (paper); "
        "'cosine' is better for short runs; it starts at --lr x --batch-size / 256, MIMO at twice")
    training("--noise", type=between(0, 5, int), default=0, metavar="SEVERITY",
        help="severity of Gaussian noise on all images; of training images it is an augmentation, "
        "drawn anew in each epoch (paper: 0)")

    evaluation = parser.evaluation.add_argument
    evaluation("--members", type=at_least(0), default=10, metavar="M",
        help="number of networks in the ensemble; their seeds start at --seed (paper: 10); 0: "
        "only the network of --mimo")
    evaluation("--losses", nargs="*", choices=LOSSES, default=["forward_kl", "rkl_proxy"],
        metavar="LOSS",
        help="train a student by each: forward_kl (EnD: KL(ensemble mean, student)), "
        "dirichlet_likelihood (EnD²), proxy (proxy, forward KL), rkl_proxy (proxy, reverse KL: the "
        "paper's); no name: no student")
    evaluation("--model-offset", "--model_offset", type=at_least(0, float), default=1.0,
        help="m in the concentrations exp(z) + m of a student (paper: 1)")
    evaluation("--target-offset", "--target_offset", type=at_least(0, float), default=1.0,
        help="t in the concentrations of the proxy: pi beta_0 + t in the forward KL, "
        "pi (beta_0 + K t) + 1 in the reverse KL (published code: 1; the paper's reverse KL: 0)")
    evaluation("--mimo", type=at_least(0), default=0, metavar="E",
        help="also train a MIMO network of E subnetworks (published code: 2); 0: none")
    evaluation("--mimo-epochs", type=at_least(0), default=150,
        help="number of epochs of the MIMO network (published code: 150)")
    evaluation("--ensemble-paths", "--ensemble_paths", nargs="+", default=[], metavar="FILE",
        help="files of trained members: ours, state dicts, or the published Lightning checkpoints")
    evaluation("--student-path", metavar="FILE",
        help="evaluate a trained student, student_*.pt or a Lightning checkpoint")
    evaluation("--shift", choices=["none", "computed", "published"], default="none",
        help="also evaluate the test set under corruptions: computed ones, or the published files "
        "of CIFAR-10-C, CIFAR-100-C, TinyImageNet-C and ImageNet-C")
    evaluation("--shift-examples", type=at_least(0), default=0, metavar="N",
        help="number of test images under each corruption, drawn at random, in which classes keep "
        "their shares; 0: all")
    evaluation("--published-evaluation", action="store_true",
        help="resize images to 256 x 256 pixels before the crop, ImageNet-C's too, as the "
        "published code does; its calibration errors are ece10 and mce10 in results.csv")
    args = parser.parse(argv, run_name)
    args.ensemble_paths = sorted(args.ensemble_paths)  # in any order, they are the same ensemble
    if args.ensemble_paths or args.student_path:
        args.members = len(args.ensemble_paths)
    if args.members == 0 and "losses" not in args.explicit:
        args.losses = []
    check_options(args)
    return args


def run_name(args):
    """The name of the run directory; networks from files have one of their own."""
    files = None
    if args.ensemble_paths or args.student_path:
        first = Path((args.ensemble_paths + [args.student_path])[0])
        files = f"files_of_{first.resolve().parent.name}"
    return common.run_name(args, files)


def check_options(args):
    """Refuse options that contradict each other, or that would have no effect."""
    files = args.ensemble_paths or args.student_path
    if args.runs > 1 and files:
        raise UserError("--runs: each run has other members, but files are given; remove it")
    if "proxy" in args.losses and args.target_offset == 0:
        raise UserError("--target-offset 0: the loss 'proxy' overflows at concentrations of 0; "
                        "use another --target-offset, or --losses without it")
    if args.mimo == 1:
        raise UserError("--mimo 1: a MIMO network has at least 2 subnetworks; 0: no network")
    if args.device.type == "mps":
        raise UserError("--device mps: the losses need float64, use --device cpu")
    if args.published_evaluation and (args.dataset != "imagenet" or args.image_size > 256):
        raise UserError("--published-evaluation cuts images of --dataset imagenet out of 256 x 256 "
                        "pixels; remove it, or use a smaller --image-size")

    of_students = ["epochs", "model_offset", "target_offset"]
    of_training = ["opt", "lr", "weight_decay", "schedule", "augment", "limit_steps"]
    common.refuse(args, [
        (args.student_path, ["members", "losses", "mimo"] + of_students, "with --student-path"),
        (args.ensemble_paths, ["members", "member_epochs"], "with --ensemble-paths"),
        (not is_trained(args), ["member_epochs"] + of_training, "without a network to train"),
        (not args.mimo, ["mimo_epochs"], "without --mimo"),
        (not args.losses and not args.eval, of_students, "without --losses"),
        (args.losses == ["forward_kl"], ["model_offset"], "on the loss forward_kl"),
        (not {"proxy", "rkl_proxy"} & set(args.losses), ["target_offset"],
         "without the losses proxy and rkl_proxy"),
        (args.shift == "none", ["shift_examples"], "without --shift"),
        (args.model.startswith("torchvision/"), ["mimo"], f"with --model {args.model}"),
        (args.freeze, ["noise", "shift"], "with --freeze"),
    ])

    if not (args.members or args.mimo or args.student_path):
        raise UserError("--members 0 is for --mimo alone; add --mimo 2")
    if args.losses and args.members == 0:
        raise UserError("--members 0: students learn from an ensemble; remove --losses")
    if args.losses and args.members < 2:
        raise UserError(f"--members {args.members}: an ensemble has at least 2; to train one "
                        "member alone, add --losses without a name")
    is_one_network = common.is_pretrained(args) and args.member_epochs == 0
    if is_one_network and args.members > 1 and not args.ensemble_paths:
        raise UserError(f"--member-epochs 0: all members of --model {args.model} would be the same "
                        "network; train them, or add --members 1 --losses")


def is_trained(args):
    """Whether networks are trained, not only read from files."""
    return bool(args.losses or args.mimo or not (args.ensemble_paths or args.student_path))


# ---- Main ---------------------------------------------------------------------------------------

# Seeds of the noise. Computed corruptions have seed 0, the training images' seeds are larger: no
# image gets the same noise twice.
TEST_NOISE = 2  # also of the set to predict and of published corruptions
OOD_NOISE = 3   # of the first OOD set


def for_evaluation(dataset, seed, args):
    """A set under noise; with --published-evaluation, its files are read as published."""
    if args.published_evaluation and isinstance(dataset, data.StreamedSet):
        # Both sides of an image become 256 pixels, of which 224 are cut out.
        dataset = replace(dataset, resize=[256, 256])
    return with_noise(dataset, seed, args)


def load_splits(args):
    """All sets; those to evaluate with --noise. No validation set is needed."""
    # Published networks are evaluated without the training images of ImageNet.
    reads_train = is_trained(args) or args.dataset != "imagenet"
    splits = data.load_splits(args, args.seed, val_fraction=0, reads_train=reads_train)
    ood = {}
    for seed, dataset in enumerate(splits.ood.values(), OOD_NOISE):
        dataset = for_evaluation(dataset, seed, args)
        ood[dataset.name] = dataset
    return splits._replace(ood=ood, test=for_evaluation(splits.test, TEST_NOISE, args),
                           predict=for_evaluation(splits.predict, TEST_NOISE, args))


def check_network(train_set, args):
    """Refuse, before training, a network that fails on a batch, or a batch that is too small."""
    # Each subnetwork of MIMO takes its share of the batch, in each process.
    smallest = args.mimo * common.world_size()
    if batch_size_of(train_set, args) < smallest:
        raise UserError(f"--batch-size {args.batch_size} for {len(train_set)} training images: "
                        f"--mimo {args.mimo} needs at least {smallest}")
    for epochs in (args.member_epochs, args.epochs):  # of members and of students
        net = make_network(args, train_set.num_classes, train_set.shape, epochs)
    common.try_batch(net.train(), train_set, args)
    if args.mimo:
        mimo = make_mimo(args, train_set.num_classes, train_set.shape)
        common.try_batch(mimo.train(), train_set, args)


def read_files(splits, args):
    """The networks of the files that the options name, {name: network}."""
    networks = {}
    for number, path in enumerate(args.ensemble_paths):
        networks[f"member{number}"], _ = read_network(path, "member", splits, args)
    if len(set(map(common.fingerprint, networks.values()))) < len(networks):
        raise UserError("--ensemble-paths: two of the files hold the same network; an ensemble "
                        "has different ones")
    if args.student_path:
        net, name = read_network(args.student_path, "student", splits, args)
        if name is None:
            common.print_on_main(f"{args.student_path} does not name its loss: it is evaluated as "
                                 "a student by the reverse KL, a Dirichlet distribution")
            name = "student_rkl_proxy"
        networks[name] = net
    return networks


def cost_of_networks(networks, logits, splits):
    """{network: (milliseconds per example, bytes)}, of "" what all of them share."""
    costs = {"": (logits.ms_loading + splits.backbone_ms, splits.backbone_bytes)}
    for name, net in networks.items():
        size = sum(tensor.nbytes for tensor in net.state_dict().values())
        costs[name] = (logits.ms[name], size)
    return costs


def evaluate(networks, members, splits, shift, seed, args, run):
    """The rows of one run, and the picture and the predictions of the first one.

    members: the seeds or files of the ensemble. Each row lists its own: rows that share some are
    not independent.
    """
    test_set = splits.test
    logits = collect_logits(networks, test_set, args)
    tested = predict(logits, seed)
    costs = cost_of_networks(networks, logits, splits)
    rows = common.on_main(test_rows, test_set.name, tested, costs)
    unknown = {}
    for dataset in splits.ood.values():
        logits = collect_logits(networks, dataset, args)
        classes = known_classes(dataset, test_set)
        if classes is None:
            predictions = predict(logits, seed)
        else:
            predictions = predict_among(classes, logits, seed)
        rows += common.on_main(ood_rows, dataset, predictions, classes, test_set, tested)
        unknown[dataset.name] = predictions
    if shift is not None:
        shifted = {}
        for kind, severity in itertools.product(shift.kinds, data.SEVERITIES):
            dataset = shift.read(kind, severity)
            if args.shift == "published":
                dataset = for_evaluation(dataset, TEST_NOISE, args)
            predictions = predict(collect_logits(networks, dataset, args), seed)
            title = f"{shift.name}_{kind}_s{severity}"
            shifted[kind, severity] = common.on_main(labelled_rows, title, predictions,
                                                     test_set.name, tested)
        rows += shift_rows(shifted, shift.name, shift.kinds)

    if seed == args.seed and args.plot and args.members > 1:
        common.on_main(plot_uncertainty, tested, unknown, run)
    if seed == args.seed and splits.predict is not None:
        predictions = predict(collect_logits(networks, splits.predict, args), seed)
        common.on_main(write_predictions, predictions, splits, run)
    for row in rows:
        row["members"] = members
        if row["method"] == METHODS["member"]:
            row["members"] = [members[row["seed"] - seed]]
        elif row["method"] == METHODS["mimo"]:
            row["members"] = []
    return rows


def main(argv=None):
    """Run the script; returns the rows of its report."""
    args = parse_args(argv)
    # The run directory is made after all checks: a command that is refused leaves nothing.
    splits = load_splits(args)
    shift = data.corrupted_sets(splits.test, args)
    files = read_files(splits, args)
    fingerprints = dict(splits.fingerprints)
    if files:
        of_files = sorted(common.fingerprint(net) for net in files.values())
        fingerprints["networks in files"] = " ".join(of_files)
    if is_trained(args):
        check_network(splits.train, args)
    run = common.Run(args, fingerprints, splits.summary())
    rows = []
    for number in range(args.runs):
        # Each run has members of its own.
        seed = args.seed + number * max(args.members, 1)
        networks = dict(files)
        members = [f"{Path(path).name} {common.fingerprint(net)[:8]}"
                   for path, net in zip(args.ensemble_paths, files.values())]
        if not files:
            members = list(range(seed, seed + args.members))
            for m, member_seed in enumerate(members):
                networks[f"member{m}"] = train_member(splits, member_seed, args, run)
        teachers = list(networks.values())
        for loss in args.losses:
            student = train_student(loss, teachers, splits, seed, args, run)
            networks[f"student_{loss}"] = student
        if args.mimo:
            networks["mimo"] = train_mimo(splits, seed, args, run)
        rows += evaluate(networks, members, splits, shift, seed, args, run)
    # The table shows the test set, alone and against the OOD sets; results.csv has all rows.
    others = [None] + list(splits.ood)
    shown = [row for row in rows
             if row["set"] == splits.test.name and row.get("against") in others]
    columns = ["accuracy", "nll", "ece15", "prr_one_minus_max", "prr_total", "spearman_precision",
               "ms", "auroc_total", "auroc_epistemic"]
    return run.report(rows, columns, shown)


if __name__ == "__main__":
    common.launch(main)
