"""Ours against named peers, in one process, as ratios: python tests/bench.py [NAME ...]

Not a test: it asserts nothing. Each figure is the best of several repetitions, ours and the peer's in
turn, since whatever else a machine does only adds time. Quote a ratio with the hardware beside it.
"""

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import ot
import torch
from PIL import Image
from sklearn import metrics as sk
from sklearn.mixture import GaussianMixture
from torchmetrics.functional import classification as tm
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
import data  # noqa: E402
import ddu  # noqa: E402
import forde  # noqa: E402
import gbnn2d  # noqa: E402
import proxy_distill  # noqa: E402
import swag_laplace_ensembles as sle  # noqa: E402


def best_seconds(*functions, repeat=3):
    """Shortest call of each function, called in turn after an untimed round."""
    for function in functions:
        function()
    best = [float("inf")] * len(functions)
    for _ in range(repeat):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


class LikeCIFAR10(torch.utils.data.Dataset):
    """Items as torchvision.datasets.CIFAR10 makes them: a PIL image from an array, then the transform."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def bench_loader(n=50_000, batch_size=128, workers=2, peer_batches=150):
    """Crop, flip and normalise 32x32x3 images: data.Loader against a torchvision DataLoader."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, n)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    ours = data.Loader(data.ImageSet("bench", torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
                                     torch.from_numpy(labels), 10, mean, std),
                       batch_size, shuffle=True, augment="crop_flip")
    transform = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])
    peer = torch.utils.data.DataLoader(LikeCIFAR10(images, labels, transform), batch_size, shuffle=True,
                                       num_workers=workers, persistent_workers=True)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations wait for a second thread more than it helps them

    def rate(batches, limit):
        next(batches)  # starting the workers is not counted
        start, seen = time.perf_counter(), 0
        for _, batch in zip(range(limit), batches):
            seen += len(batch[0])
        return seen / (time.perf_counter() - start)

    rates = [[rate(ours.epoch(e), n), rate(iter(peer), peer_batches)] for e in range(3)]
    torch.set_num_threads(threads)
    ours_rate, peer_rate = (max(r) for r in zip(*rates))
    print(f"loader: {ours_rate:,.0f} images/s, torchvision DataLoader with {workers} workers {peer_rate:,.0f}; "
          f"ratio {ours_rate / peer_rate:.1f} (goal 20)")


def bench_gaussians(n=45_000, dim=640, num_classes=10):
    """Fit and score: one Gaussian per class, against a loop over torch.distributions, both float64."""
    torch.manual_seed(0)
    labels = torch.arange(n) % num_classes
    features = torch.randn(n, dim).relu() + torch.randn(num_classes, dim)[labels]

    def ours():
        moments = ddu.ClassMoments(torch.bincount(labels), dim)
        for z, y in zip(features.split(4096), labels.split(4096)):
            moments.update(z, y)
        gaussians = ddu.fit_gaussians(moments)
        return torch.cat([ddu.class_log_densities(gaussians, z) for z in features.split(4096)])

    def peer():
        z = features.double()
        columns = []
        for c in range(num_classes):
            own = z[labels == c]
            columns.append(torch.distributions.MultivariateNormal(own.mean(0), torch.cov(own.T)).log_prob(z))
        return torch.stack(columns, 1)

    difference = (ours() - peer()).abs().max().item()
    (ours_s, peer_s), before = best_seconds(ours, peer, repeat=2), common.peak_memory_gb(common.World())
    print(f"gaussians: fit and score {n:,} x {dim}, {num_classes} classes: {ours_s:.2f} s, MultivariateNormal loop "
          f"{peer_s:.2f} s; ratio {peer_s / ours_s:.1f} (goal 5), largest difference {difference:.1e} nats, "
          f"peak memory of the process {before:.1f} GB")


def bench_metrics(rows=50_000, classes=1_000, scores=1_000_000):
    """Metrics against torchmetrics and scikit-learn on the same input."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(rows, classes, generator=generator).mul_(2).log_softmax(-1)
    probs, labels = log_probs.exp(), torch.randint(classes, (rows,), generator=generator)
    score = torch.randn(scores, generator=generator)
    positive = torch.rand(scores, generator=generator) < 0.3
    p, y, s, t, k = probs.numpy(), labels.numpy(), score.numpy(), positive.numpy(), range(classes)
    micro = dict(num_classes=classes, average="micro")
    table = [
        ("accuracy", "torchmetrics", lambda: common.accuracy(probs, labels),
         lambda: tm.multiclass_accuracy(probs, labels, **micro)),
        ("top-5 accuracy", "torchmetrics", lambda: common.top_k_accuracy(probs, labels, 5),
         lambda: tm.multiclass_accuracy(probs, labels, **micro, top_k=5)),
        ("NLL", "scikit-learn", lambda: common.nll(log_probs, labels), lambda: sk.log_loss(y, p, labels=k)),
        ("Brier", "scikit-learn", lambda: common.brier(probs, labels),
         lambda: sk.brier_score_loss(y, p, labels=k, scale_by_half=False)),
        ("ECE, 15 bins", "torchmetrics", lambda: common.ece(probs, labels),
         lambda: tm.multiclass_calibration_error(probs, labels, classes, n_bins=15)),
        ("AUROC", "scikit-learn", lambda: common.auroc(score, positive), lambda: sk.roc_auc_score(t, s)),
        ("average precision", "scikit-learn", lambda: common.average_precision(score, positive),
         lambda: sk.average_precision_score(t, s))]
    print(f"metrics: {rows:,} x {classes:,} probabilities, {scores:,} scores (goal 3)")
    for name, peer, ours, theirs in table:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            difference = abs(float(ours()) - float(theirs()))
            ours_s, peer_s = best_seconds(ours, theirs)
        print(f"  {name:<18} {1e3 * ours_s:8.1f} ms, {peer} {1e3 * peer_s:8.1f} ms; ratio {peer_s / ours_s:.1f}, "
              f"difference {difference:.0e}")


def bench_spectral(batch_size=128):
    """A training step with soft spectral normalisation over the plain one, ResNet-18, 32x32x3."""
    for width, shape in ((0.25, (1, 28, 28)), (0.25, (3, 32, 32)), (1.0, (3, 32, 32))):
        size = batch_size if width < 1 else 32
        x = torch.randn(size, *shape).contiguous(memory_format=torch.channels_last)

        def step_of(sn):
            torch.manual_seed(0)
            args = argparse.Namespace(model="resnet18", width=width, sn=sn, mod=False, coeff=3.0, power_iterations=1,
                                      depth=28, dropout=0.3)
            net = ddu.make_network(args, 10, shape).to(memory_format=torch.channels_last)

            def step():
                net.zero_grad()
                net(x)[0].logsumexp(1).sum().backward()
            return step

        plain, spectral = best_seconds(step_of(False), step_of(True), repeat=5)
        print(f"spectral: ResNet-18, width {width:g}, {size} images {shape}: {1e3 * spectral:.0f} ms a step, plain "
              f"{1e3 * plain:.0f} ms; ratio {spectral / plain:.2f} (goal 1.3)")


def forde_step(repulsion, members, batch_size, vectorise="loop", chunk=0, width=1.0, shape=(3, 32, 32)):
    """A function that does one training step's gradients of an ensemble of ResNet-18."""
    args = forde.parse_args(["--dataset", "cifar10", "--repulsion", repulsion, "--members", str(members), "--vectorise",
                             vectorise, "--chunk", str(chunk), "--width", str(width)])
    args = forde.with_method(args, args.methods[0], 1)
    world = common.World()
    nets = forde.make_ensemble(args, world, 10, shape).train()
    for net in nets:
        torch.nn.init.normal_(net.head.weight, std=0.05)
    size = chunk or members
    particles = forde.PARTICLES.get(repulsion, "none")
    chunks = [forde.Members(nets[i:i + size], vectorise, particles) for i in range(0, members, size)]
    x = torch.randn(batch_size, *shape).contiguous(memory_format=torch.channels_last)
    batch = data.Batch(x, torch.arange(batch_size) % 10, torch.arange(batch_size), batch_size)
    kernel = torch.randn(x[0].numel(), x[0].numel()) / x[0].numel() ** 0.5 if repulsion != "none" else None

    def step():
        nets.zero_grad()
        forde.ensemble_step(chunks, batch, args, world, kernel, repulsion != "none")
    return step


def bench_forde(members=4, batch_size=32):
    """A step of FoRDE-PCA over one of the deep ensemble, ResNet-18, 32x32x3, same members and batch."""
    ways = [("deep ensemble", "none", "loop")] + [(f"FoRDE, {v}", "input_gradient", v)
                                                  for v in ("loop", "two_pass", "vmap")]
    steps = [forde_step(repulsion, members, batch_size, vectorise) for _, repulsion, vectorise in ways]
    seconds = best_seconds(*steps, repeat=4)
    for (name, *_), s in zip(ways, seconds):
        print(f"forde: {name:<16} {members} members, {batch_size} images 3x32x32: {s:.2f} s a step; "
              f"ratio to the deep ensemble {s / seconds[0]:.2f} (goal 2.5)")


def process_peak_gb():
    """Peak memory of this process; getrusage would count its parent's too."""
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def in_own_process(function, *args):
    """What function(queue, *args) puts into its queue, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=function, args=(queue, *args))
    process.start()
    result = queue.get()
    process.join()
    return result


def forde_peak(queue, members, chunk):
    """Peak memory of a process before and after one step, into `queue`: GB."""
    step, before = forde_step("input_gradient", members, 32, chunk=chunk), process_peak_gb()
    step()
    queue.put((before, process_peak_gb()))


def bench_forde_memory():
    """Peak memory of a FoRDE step against M: one member at a time (flat), and all at once."""
    for chunk in (1, 0):
        for members in (2, 4, 8):
            before, peak = in_own_process(forde_peak, members, chunk)
            print(f"forde: {'chunks of 1' if chunk else 'one chunk  '}, {members} members: {peak - before:.2f} GB more "
                  f"than the {before:.2f} GB of the networks and libraries")


def like_weights(n):
    """Points (mu, sigma) [n, 2] float32 as a network's: heavy tails, sigma grows with |mu|."""
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(n, generator=generator).mul_(0.02).mul_(torch.randn(n, generator=generator).abs_().sqrt_())
    sigma = torch.randn(n, generator=generator).mul_(0.3).exp_().mul_(3e-3).add_(mu.abs(), alpha=0.1)
    return torch.stack([mu, sigma], 1)


def bench_mixture():
    """EM on up to a million points against scikit-learn's, from the same start, as many iterations.

    The peer keeps arrays [N, K] of float64: with K = 512 a million points do not fit in 24 GB."""
    for n, k, iterations, bins in ((1_000_000, 64, 10, 1024), (300_000, 512, 4, 2048)):
        x = like_weights(n)
        cells = gbnn2d.bin_points(x, bins)
        z = ((x.double() - cells.shift) / cells.scale).numpy()
        start = gbnn2d.kmeans(cells, gbnn2d.kmeans_plus_plus(cells, k, torch.Generator().manual_seed(0)))
        near = gbnn2d.nearest(cells.mean, start, 1)
        first = gbnn2d.mixture_of(cells, near, torch.ones_like(near, dtype=torch.float64), len(start), 1e-6)
        a, b, d = first.covariances.T
        precisions = torch.stack([d, -b, -b, a], 1).div((a * d - b * b)[:, None]).reshape(-1, 2, 2)
        peer = GaussianMixture(len(start), reg_covar=1e-6, max_iter=iterations, tol=0, weights_init=first.weights,
                               means_init=first.centres, precisions_init=precisions, init_params="random")

        def ours():
            return gbnn2d.fit_mixture(gbnn2d.bin_points(x, bins), start, iterations, tolerance=-math.inf)[0]

        ours_s, = best_seconds(ours)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begin = time.perf_counter()
            peer.fit(z)
            peer_s = time.perf_counter() - begin
        theirs, mixture = peer.score(z), ours()
        peer.weights_, peer.means_ = mixture.weights.numpy(), mixture.centres.numpy()
        a, b, d = mixture.covariances.T
        root = (d - b * b / a).rsqrt()  # precision = U U^T, U upper triangular, as scikit-learn keeps it
        peer.precisions_cholesky_ = torch.stack([a.rsqrt(), -b / a * root, torch.zeros_like(a), root],
                                                1).reshape(-1, 2, 2).numpy()
        print(f"mixture: EM, {n:,} points, {bins}^2 bins, K = {len(start)}, {iterations} iterations: {ours_s:.2f} s with the binning, "
              f"scikit-learn {peer_s:.1f} s; ratio {peer_s / ours_s:.0f} (goal 20), log-likelihood of all points "
              f"{peer.score(z):.6f} and {theirs:.6f} nats a point, difference {peer.score(z) - theirs:.1e} (goal 1e-4)")


def mixture_seconds(queue, n, k):
    """Seconds of k-means++ and EM, of the labels of all points, of merging; peak memory in GB."""
    x, before, laps = like_weights(n), process_peak_gb(), [time.perf_counter()]
    lap = lambda: laps.append(time.perf_counter())
    mixture, cells, _ = gbnn2d.learn_mixture(x, k, torch.Generator().manual_seed(0))
    lap()
    gbnn2d.assign_all(x, cells, mixture)
    lap()
    tau_d = gbnn2d.nearest_distances(mixture).quantile(0.05).item()
    merged = gbnn2d.merge_mixture(mixture, torch.zeros(len(mixture.weights)), tau_d)[0]
    lap()
    queue.put(([b - a for a, b in zip(laps, laps[1:])], before, process_peak_gb(), len(cells.count),
               len(mixture.weights), len(merged.weights)))


def bench_mixture_scale(k=6000):
    """The whole mixture as N grows to WRN-28-10's 36.5 million weights."""
    for n in (1_000_000, 10_000_000, 36_518_832):
        seconds, before, peak, cells, components, merged = in_own_process(mixture_seconds, n, k)
        print(f"mixture: N = {n:,}, K0 = {k}: {sum(seconds):.1f} s (learning {seconds[0]:.1f}, labels "
              f"{seconds[1]:.1f}, merging {components} to {merged} {seconds[2]:.2f}), {cells:,} cells, peak memory "
              f"{peak:.2f} GB, {before:.2f} of it before (libraries, points); goal 30 s, 3 GiB")


def bench_wasserstein(k=6000, neighbours=8, peer_pairs=2000):
    """W2 of all candidate pairs of K components, against POT pair by pair."""
    x = like_weights(200_000).double()
    generator = torch.Generator().manual_seed(0)
    centres = x[torch.randperm(len(x), generator=generator)[:k]]
    factors = 1e-4 * torch.randn(k, 3, generator=generator).double()
    covariances = gbnn2d.covariances_of(factors) + 1e-9 * torch.tensor([1.0, 0.0, 1.0])
    j = gbnn2d.nearest(centres, centres, neighbours + 1)[:, 1:].flatten()
    i = torch.arange(k).repeat_interleave(neighbours)
    full = covariances[:, [0, 1, 1, 2]].reshape(-1, 2, 2).numpy()
    means = centres.numpy()

    def ours():
        return gbnn2d.wasserstein(centres[i], covariances[i], centres[j], covariances[j])

    def peer():
        return [ot.gaussian.bures_wasserstein_distance(means[a], means[b], full[a], full[b])
                for a, b in zip(i[:peer_pairs].tolist(), j[:peer_pairs].tolist())]

    difference = np.abs(ours()[:peer_pairs].numpy() / np.array(peer()) - 1).max()
    ours_s, peer_s = best_seconds(ours, peer)
    ours_us, peer_us = 1e6 * ours_s / len(i), 1e6 * peer_s / peer_pairs
    print(f"wasserstein: {len(i):,} pairs {1e3 * ours_s:.1f} ms, {ours_us:.2f} us a pair, POT {peer_us:.0f} us a pair "
          f"({peer_pairs:,} pairs); ratio {peer_us / ours_us:.0f} (goal 100), largest relative difference {difference:.0e}")


def bench_shared(batch_size=128):
    """A step of the last stage over a deterministic one, same network and batch."""
    world = common.World()
    for width, shape, size in ((0.125, (1, 28, 28), batch_size), (0.25, (3, 32, 32), batch_size),
                               (1.0, (3, 32, 32), batch_size)):
        args = gbnn2d.parse_args(["--dataset", "cifar10", "--width", str(width)])
        net = gbnn2d.make_network(args, 10, shape)
        layout = gbnn2d.Layout(net)
        field = gbnn2d.MeanField(net, layout, args)
        points = torch.stack([field.mu, field.sigma], 1).detach()
        outlier = gbnn2d.outlier_mask(points[:, 0], torch.randn(layout.size))
        mixture, cells, _ = gbnn2d.learn_mixture(points[~outlier], min(2048, layout.size // 500),
                                                 torch.Generator().manual_seed(0))
        mixture, sharing = gbnn2d.compact(points[~outlier], cells, mixture, args.chi2_level)
        code = gbnn2d.make_code(points, outlier, (~outlier).nonzero().flatten(), mixture, sharing)
        shared = gbnn2d.Shared(gbnn2d.make_network(args, 10, shape), layout, code)
        x = torch.randn(size, *shape).contiguous(memory_format=torch.channels_last)
        labels = torch.arange(size) % 10

        def step_of(module, stage):
            module.to(memory_format=torch.channels_last)
            for parameter in module.parameters():
                parameter.requires_grad_(stage == "det" or parameter.requires_grad)
            optimiser = gbnn2d.make_optimiser(module, stage, args)
            gbnn2d.set_training(module, stage)

            def step():
                optimiser.zero_grad(set_to_none=True)
                loss = torch.nn.functional.cross_entropy(module(x), labels)
                (loss if stage == "det" else loss + module.kl() / 50_000).backward()
                optimiser.step()
            return step

        plain, ours = best_seconds(step_of(gbnn2d.make_network(args, 10, shape), "det"), step_of(shared, "final"),
                                   repeat=5)
        print(f"shared: ResNet-18, width {width:g}, {size} images {shape}, {layout.size:,} weights: {1e3 * ours:.0f} ms a "
              f"step of the last stage, deterministic {1e3 * plain:.0f} ms; ratio {ours / plain:.2f} (goal 1.5)")


def random_members(members, rows, classes, generator):
    """Logits of an ensemble [members, rows, classes]: something shared, something of each."""
    shared = 2 * torch.randn(rows, classes, generator=generator)
    return [shared + 0.5 * torch.randn(rows, classes, generator=generator) for _ in range(members)]


def bench_reverse_kl(rows=256, classes=1000, members=5):
    """The reverse-KL loss, forward and backward, against autograd of its textbook form, float64."""
    generator = torch.Generator().manual_seed(0)
    ensemble = proxy_distill.ensemble_statistics(random_members(members, rows, classes, generator))
    precision, pi = proxy_distill.proxy_precision(ensemble), ensemble.log_probs.exp()
    z = torch.randn(rows, classes, generator=generator).double().requires_grad_()

    def textbook():
        alpha = z.exp() + 1
        alpha_0 = alpha.sum(-1, keepdim=True)
        spread = alpha.digamma() - alpha_0.digamma()
        entropy = alpha.lgamma().sum(-1) - alpha_0[:, 0].lgamma() - ((alpha - 1) * spread).sum(-1)
        return torch.autograd.grad((-(pi * spread).sum(-1) - entropy / (precision + classes)).mean(), z)[0]

    def ours(value):
        loss = proxy_distill.rkl_proxy_loss(z, ensemble, precision, value=value)
        return torch.autograd.grad(loss.mean(), z)[0]

    difference = (ours(True) - textbook()).abs().max().item()
    alone, both, peer = best_seconds(lambda: ours(False), lambda: ours(True), textbook, repeat=20)
    print(f"reverse_kl: {rows} x {classes}: gradient {1e3 * alone:.1f} ms, with the value {1e3 * both:.1f} ms, autograd of "
          f"the textbook form {1e3 * peer:.1f} ms; ratios {peer / alone:.1f} and {peer / both:.1f} (goal 3), largest "
          f"difference of the gradients {difference:.0e} (goal 1e-8)")


def bench_measures(members=10, rows=500, classes=1000):
    """All measures of an ensemble from streamed sums, against loops over pairs of members, float64: as published, with
    both logarithms of each KL(p_i || p_j), and with a member's logarithms and probabilities taken once."""
    logits = random_members(members, rows, classes, torch.Generator().manual_seed(0))

    def ours():
        return proxy_distill.ensemble_outputs(proxy_distill.ensemble_statistics(logits)).measures

    def measures_from(p, log_p, kl):
        epkl = sum(kl(i, j) for i in range(members) for j in range(members)) / members**2
        pi = p.mean(0)
        total, data_nats = -(pi * pi.log()).sum(-1), -(p * log_p).sum(-1).mean(0)
        return {"epkl": epkl, "mutual_information": total - data_nats, "rmi": epkl - total + data_nats}

    def published():
        p = torch.stack([z.double().softmax(-1) for z in logits])
        return measures_from(p, p.log(), lambda i, j: (p[i] * (p[i].log() - p[j].log())).sum(-1))

    def once():
        log_p = torch.stack([z.double().log_softmax(-1) for z in logits])
        p = log_p.exp()
        return measures_from(p, log_p, lambda i, j: (p[i] * (log_p[i] - log_p[j])).sum(-1))

    difference = max((ours()[k] - v).abs().max().item() for k, v in published().items())
    ours_s, peer_s, once_s = best_seconds(ours, published, once, repeat=5)
    print(f"measures: {members} members, {rows} x {classes}: {1e3 * ours_s:.0f} ms, loop over pairs as published "
          f"{1e3 * peer_s:.0f} ms; ratio {peer_s / ours_s:.1f} (goal 20), with each logarithm once {once_s / ours_s:.1f}; "
          f"largest difference {difference:.0e} nats")


def evaluation_peak(queue, rows, classes, members, batch_size=512):
    """Seconds and peak memory of all columns of an ensemble and its proxy, in batches."""
    generator, before, start, parts = torch.Generator().manual_seed(0), process_peak_gb(), 0.0, []
    for first in range(0, rows, batch_size):
        logits = random_members(members, min(batch_size, rows - first), classes, generator)
        labels = torch.randint(classes, (len(logits[0]),), generator=generator)
        begin = time.perf_counter()
        ensemble = proxy_distill.ensemble_statistics(logits)
        parts += [torch.cat([proxy_distill.columns_of(o, labels) for o in (
            proxy_distill.ensemble_outputs(ensemble), proxy_distill.proxy_outputs(ensemble))], 1)]
        start += time.perf_counter() - begin
    proxy_distill.predictive_metrics(torch.cat(parts)[:, :len(proxy_distill.COLUMNS)])
    queue.put((start, before, process_peak_gb()))


def bench_evaluation(rows=50_000, classes=1000, members=10):
    """ImageNet's validation set with ten members, beside the networks: time and peak memory."""
    seconds, before, peak = in_own_process(evaluation_peak, rows, classes, members)
    print(f"evaluation: {rows:,} x {classes} x {members} members, ensemble and proxy, all measures: {seconds:.0f} s, "
          f"peak memory {peak:.2f} GB, {before:.2f} of it libraries (all logits at once: "
          f"{4e-9 * rows * classes * members:.1f} GB)")


def bench_distill(members=5, batch_size=128):
    """A distillation step of the default's student, from members and from their cached statistics."""
    args = proxy_distill.parse_args([])
    world, sets = common.World(), {"train": data.load("numbers", "train", val_fraction=0.0, limit=4 * batch_size)}
    nets = [proxy_distill.new_network(args, sets, seed, args.width).to(memory_format=torch.channels_last)
            for seed in range(members)]
    student = proxy_distill.new_network(args, sets, 99, args.student_width).to(memory_format=torch.channels_last)
    optimiser = proxy_distill.make_optimiser(student, "distill", args)
    batch = next(iter(proxy_distill.make_loader(sets["train"], args, world).epoch()))

    def step_of(teachers):
        def step():
            loss, *_ = proxy_distill.batch_loss(student, "distill", batch, 0, 0, teachers, args, world)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return step

    with tempfile.TemporaryDirectory() as folder:
        online = proxy_distill.Teachers(nets, args, world)
        cache = proxy_distill.TeacherCache(Path(folder, "teachers.f32"), "bench", sets["train"], world)
        cache.fill(online, sets["train"], args, world, lambda text: None)
        cached_s, online_s = best_seconds(step_of(proxy_distill.Teachers(nets, args, world, cache)),
                                          step_of(online), repeat=10)
    print(f"distill: numbers, {members} members, {batch_size} images: {1e3 * cached_s:.0f} ms a step from the cache, "
          f"{1e3 * online_s:.0f} ms from the members; ratio {online_s / cached_s:.2f}")


def bench_laplace(n=48_000, n_val=2000, n_test=10_000, d=256, classes=10, samples=200):
    """The last layer's full posterior, the grid of 21 prior precisions and the predictive, against laplace-torch,
    whose network is here the last layer alone: what it spends on features is not counted."""
    from laplace import Laplace
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(d, classes)
    x = torch.randn(n + n_val + n_test, d, generator=generator).relu()
    with torch.no_grad():
        head.weight.copy_(0.3 * torch.randn(classes, d, generator=generator))
        labels = torch.distributions.Categorical(logits=head(x)).sample()
    parts = [sle.LastLayer(*rows) for rows in zip(x.split([n, n_val, n_test]), labels.split([n, n_val, n_test]))]
    theta, seconds, found = sle.flat_head(head).detach(), {}, {}

    def timed(name, function):
        start = time.perf_counter()
        value = function()
        seconds[name] = time.perf_counter() - start
        return value

    def ours_grid(spectrum):
        scores = sle.precision_scores(theta, spectrum, parts[1], torch.randn(100, len(theta)))
        return sle.LAPLACE_GRID[int(np.argmax(scores))]

    def ours_predict(spectrum, delta):
        weights = sle.laplace_samples(theta, spectrum, delta, torch.randn(samples, len(theta)))
        outputs = sle.in_rows(lambda part: sle.head_outputs(weights, part), parts[2], samples * classes)
        return sle.mixture_prefixes(outputs, [samples])[samples]

    with torch.no_grad():
        sle.decompose("full", sle.LastLayer(parts[0].x[::4], None), theta)  # threads and memory, warm
        spectrum = timed("ours fit", lambda: sle.decompose("full", parts[0], theta))
        delta = timed("ours grid", lambda: ours_grid(spectrum))
        found["ours"] = timed("ours predict", lambda: ours_predict(spectrum, delta))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = [torch.utils.data.DataLoader(torch.utils.data.TensorDataset(p.x, p.labels), rows)
                   for p, rows in zip(parts, (500, n_val, 1000))]
        net = torch.nn.Sequential(torch.nn.Identity(), head)
        peer = Laplace(net, "classification", "last_layer", "full")
        timed("peer fit", lambda: peer.fit(loaders[0]))
        timed("peer grid", lambda: peer.optimize_prior_precision(
            "nn", "gridsearch", val_loader=loaders[1], n_samples=100, grid_size=21, link_approx="mc",
            loss=lambda probs, y: torch.nn.functional.nll_loss(probs.log(), y)))
        peer.prior_precision = delta
        found["peer"] = timed("peer predict", lambda: torch.cat(
            [peer(rows, "nn", link_approx="mc", n_samples=samples) for rows, _ in loaders[2]]).log())
        # equality: a tenth of the rows in float64, where neither side is rounding
        few = sle.LastLayer(parts[0].x[::10].double(), parts[0].labels[::10])
        peer = Laplace(torch.nn.Sequential(torch.nn.Identity(), head.double()), "classification", "last_layer", "full")
        peer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(few.x, few.labels), 500))
        wanted, evidence = peer.posterior_covariance, float(peer.log_marginal_likelihood())
    with torch.no_grad():
        theta = theta.double()
        spectrum = sle.decompose("full", few, theta)
        q = spectrum.bases[0]
        covariance = (q / (spectrum.values + 1.0)) @ q.T
        log_lik = sle.log_density(sle.head_outputs(theta[None], few), few.labels).sum()
        ours = float(sle.log_marginal_likelihood(log_lik, theta, spectrum, 1.0))
    totals = [sum(v for k, v in seconds.items() if k.startswith(who)) for who in ("ours", "peer")]
    print(f"laplace: {n} x {d + 1} features, {classes} classes, {len(theta)} parameters: ours "
          f"{totals[0]:.1f} s, laplace-torch {totals[1]:.1f} s; ratio {totals[1] / totals[0]:.1f}; "
          + ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items()))
    gap = (covariance - wanted).abs().max() / wanted.abs().max()
    print(f"  covariance within {gap:.1e} of the largest entry, evidence within {abs(ours / evidence - 1):.1e}; "
          f"predictive NLL {-found['ours'].gather(1, parts[2].labels[:, None]).mean():.5f} and "
          f"{-found['peer'].gather(1, parts[2].labels[:, None]).mean():.5f} nats (other noise)")


def bench_swag(rows=500, rank=100, samples=8):
    """Drawing SWAG's samples of WRN-16-4 (2.75 M weights) against evaluating them."""
    args = sle.parse_args(["--dataset", "cifar10", "--device", "cpu"])
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    dataset = data.ImageSet("random", images, torch.zeros(rows, dtype=torch.int64), 10, (0.5,) * 3, (0.25,) * 3)
    net = sle.make_network(args, dataset, 0.0).to(memory_format=torch.channels_last)
    parameters = sle.sampled_parameters(net)
    start = sle.get_vector(parameters)
    iterates = start + 1e-3 * torch.randn(rank, len(start), generator=generator)
    moments = sle.swag_moments(iterates)

    def draw():
        return sle.swag_samples(*moments, torch.randn(samples, len(start)), torch.randn(samples, rank))

    def evaluate():
        sle.predict_net(net, dataset, args, common.World())

    draw_s, evaluate_s = best_seconds(draw, evaluate)
    whole = evaluate_s * 10_000 / rows
    print(f"swag: {len(start)} weights, rank {rank}: {draw_s / samples:.3f} s a draw (blocks of {samples}), "
          f"{evaluate_s:.2f} s to evaluate {rows} images; of 10,000 images the draw is "
          f"{100 * draw_s / samples / whole:.2f} % of the evaluation")


def bench_texts(n=640):
    """An evaluation of BERT-256-4 on sentences of SST-2's lengths: batches by length against padding to 268."""
    args = sle.parse_args(["--dataset", "sst2", "--device", "cpu"])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 52, (n,), generator=generator)
    tokens = torch.randint(5, 30522, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    dataset = data.TextSet("random", tokens, lengths, torch.zeros(n, dtype=torch.int64), 2,
                           tuple(map(str, range(30522))))
    net = sle.make_network(args, dataset, 0.0).eval()

    def logits(**options):
        found = torch.empty(n, 2)
        for batch in data.SequenceLoader(dataset, 64, **options).epoch():
            found[batch.index] = net(batch.tokens)
        return found

    with torch.no_grad():
        difference = (logits() - logits(by_length=False, pad_to=268)).abs().max()
        ours, peer = best_seconds(logits, lambda: logits(by_length=False, pad_to=268), repeat=2)
    print(f"texts: {n} sentences of 4 to 51 tokens: by length {ours:.2f} s, padded to 268 {peer:.2f} s; ratio "
          f"{peer / ours:.1f}; logits differ by {difference:.1e}")


def bench_molecules(n=1000, peer_n=100, widths=(1, 0.25)):
    """A training epoch of PaiNN in batches of 100, against one molecule at a time."""
    for width in widths:
        args = sle.parse_args(["--dataset", "clusters", "--width", str(width), "--device", "cpu"])
        dataset = data.load_molecules("clusters", "train", limit=n)
        net = sle.make_network(args, dataset, 0.0)
        optimiser = torch.optim.SGD(net.parameters(), 1e-9)

        def epoch(loader):
            for batch in loader.epoch():
                loss = sle.data_loss(net(batch.molecules), batch.labels) / batch.global_size
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()

        together = data.SequenceLoader(dataset, 100)
        alone = data.SequenceLoader(dataset.select(torch.arange(peer_n) * n // peer_n), 1)
        ours, peer = best_seconds(lambda: epoch(together), lambda: epoch(alone), repeat=3)
        peer *= n / peer_n
        print(f"molecules: {n} clusters, PaiNN of {round(128 * width)} features: {ours:.2f} s an epoch, one by one "
              f"{peer:.1f} s (from {peer_n}); ratio {peer / ours:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ["loader", "gaussians", "metrics", "spectral", "forde", "forde_memory", "mixture", "mixture_scale",
             "wasserstein", "shared", "reverse_kl", "measures", "evaluation", "distill",
             "laplace", "swag", "texts", "molecules"]
    parser.add_argument("which", nargs="*", metavar="{" + ",".join(names) + "}")
    chosen = parser.parse_args().which or names
    if unknown := sorted({*chosen} - {*names}):
        parser.error(f"no benchmark {unknown[0]}; choose from {', '.join(names)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for which in chosen:
        globals()[f"bench_{which}"]()
