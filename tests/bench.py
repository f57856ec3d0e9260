"""Ours against named peers, in one process, as ratios: python tests/bench.py [NAME ...]

Not a test: it asserts nothing. Each figure is the best of several repetitions, ours and the peer's in
turn, since whatever else a machine does only adds time. Quote a ratio with the hardware beside it.
"""

import argparse
import multiprocessing
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
import data  # noqa: E402
import ddu  # noqa: E402
import forde  # noqa: E402


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


def forde_peak(members, chunk, queue):
    """Peak memory of a process before and after one step, into `queue`: GB."""
    def peak():  # of this process; getrusage would count its parent's too
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e9

    step, before = forde_step("input_gradient", members, 32, chunk=chunk), peak()
    step()
    queue.put((before, peak()))


def bench_forde_memory():
    """Peak memory of a FoRDE step against M: one member at a time (flat), and all at once."""
    context = multiprocessing.get_context("spawn")
    for chunk in (1, 0):
        for members in (2, 4, 8):
            queue = context.Queue()
            process = context.Process(target=forde_peak, args=(members, chunk, queue))
            process.start()
            before, peak = queue.get()
            process.join()
            print(f"forde: {'chunks of 1' if chunk else 'one chunk  '}, {members} members: {peak - before:.2f} GB more "
                  f"than the {before:.2f} GB of the networks and libraries")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ["loader", "gaussians", "metrics", "spectral", "forde", "forde_memory"]
    parser.add_argument("which", nargs="*", metavar="{" + ",".join(names) + "}")
    chosen = parser.parse_args().which or names
    if unknown := sorted({*chosen} - {*names}):
        parser.error(f"no benchmark {unknown[0]}; choose from {', '.join(names)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for which in chosen:
        globals()[f"bench_{which}"]()
