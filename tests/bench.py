"""Ours against named peers in one process: the table of RESULTS.md under "Speed and memory".

  python tests/bench.py [NAME ...] [--small]

Not a test: it asserts nothing. Each figure is the best of several rounds, ours and the peer's in
turn, since whatever else a machine does only adds time. The ratio is the peer's time over ours, or
ours over the peer's where it is what a method costs. --small only shows that a row runs.
"""

import argparse
import importlib.util
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
import data  # noqa: E402
import ddu  # noqa: E402
import forde  # noqa: E402
import gbnn2d  # noqa: E402
import swag_laplace_ensembles as sle  # noqa: E402

SMALL = "--small" in sys.argv


def size(whole, small):
    return small if SMALL else whole


def best_seconds(*functions, budget_s=12.0):
    """Shortest call of each function: rounds in turn, as long as another one fits in the budget."""
    best = [math.inf for _ in functions]
    spent = 0.0
    rounds = 0
    while rounds == 0 or spent + spent / rounds < size(budget_s, 1):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            best[number] = min(best[number], seconds)
            spent += seconds
        rounds += 1
    return best


def show(what, seconds, *peers, cost=False):
    """Print `seconds` of ours and of each peer, and peer / ours, or with `cost` ours / peer."""
    ours, *others = seconds
    line = f"  {what}: {1e3 * ours:,.1f} ms"
    for name, peer in zip(peers, others):
        ratio = ours / peer if cost else peer / ours
        line += f"; {name} {1e3 * peer:,.1f} ms, ratio {ratio:.3g}"
    print(line, flush=True)


def options(script, *argv):
    return script.parse_args(["--device", "cpu"] + [str(word) for word in argv])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_set(n, classes=10):
    """n random images of CIFAR's size, with labels."""
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=seeded())
    return data.ImageSet("random", images, torch.arange(n) % classes, classes, (0.5, 0.5, 0.5),
                         (0.25, 0.25, 0.25))


def bench_loader():
    """Crop, flip and normalise 32x32x3 images in batches of 128."""
    from torchvision import datasets, transforms
    n, few = size((50_000, 20_000), (1000, 500))
    dataset = random_set(n)
    peer = datasets.CIFAR10.__new__(datasets.CIFAR10)
    peer.data = dataset.images[:few].permute(0, 2, 3, 1).numpy()
    peer.targets = dataset.labels.tolist()
    peer.target_transform = None
    peer.transform = transforms.Compose([
        transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(dataset.mean, dataset.std)])
    ours = data.Loader(dataset, 128, shuffle=True, augment="crop_flip")
    theirs = torch.utils.data.DataLoader(peer, 128, True, num_workers=2, persistent_workers=True)
    ours_s, peer_s = best_seconds(lambda: sum(1 for _ in ours.epoch()),
                                  lambda: sum(1 for _ in theirs))
    show(f"{n:,} images", (ours_s, peer_s * n / few), "torchvision's DataLoader, 2 workers")


def class_features(n, dim, classes):
    """Features [n, dim] of classes with different means, and their labels."""
    labels = torch.arange(n) % classes
    z = torch.randn(n, dim, generator=seeded()).relu()
    return z + torch.randn(classes, dim, generator=seeded(1))[labels], labels


def bench_ddu():
    """Gaussians of ten classes, and what spectral normalisation costs."""
    n, dim = size((45_000, 640), (2000, 64))
    z, labels = class_features(n, dim, 10)

    def ours():
        return ddu.class_log_joints(z, labels, 10, [z])[0].logsumexp(1)

    def peer():
        wide = z.double()
        columns = []
        for c in range(10):
            rows = wide[labels == c]
            normal = torch.distributions.MultivariateNormal(rows.mean(0), torch.cov(rows.T))
            columns.append(normal.log_prob(wide))
        return torch.stack(columns, 1).logsumexp(1)

    show(f"fit and score {n:,} x {dim}, 10 classes, float64",
         best_seconds(ours, peer, budget_s=45), "loop over MultivariateNormal")

    x = torch.randn(size(32, 4), 3, 32, 32, generator=seeded())

    def step_of(sn):
        args = options(ddu, "--dataset", "cifar10", "--model", "resnet18", sn, "--width",
                       size(1.0, 0.125))
        net = ddu.make_network(args, 10, (3, 32, 32)).train()

        def step():
            net.zero_grad()
            net(x)[0].logsumexp(1).sum().backward()

        return step

    show(f"training step with spectral norm, ResNet-18, {len(x)} images",
         best_seconds(step_of("--sn"), step_of("--no-sn")), "without", cost=True)


GAUSSIANS = """
import re, time, torch
from tests.bench import class_features
z, labels = class_features({n}, {dim}, {classes})
queries = z[:{queries}].clone()
def gigabytes(name):
    text = open("/proc/self/status").read()
    return int(re.search(name + r":\\s+(\\d+) kB", text)[1]) / 2**20
open("/proc/self/clear_refs", "w").write("5")  # Linux: forget the peak
before = gigabytes("VmRSS")
{work}
print(time.process_time() - start, gigabytes("VmHWM") - before)
"""
OURS = """
import ddu
start = time.process_time()
ddu.class_log_joints(z, labels, {classes}, [queries], shrinkage=True)[0].logsumexp(1)
"""
PYTORCH_OOD = """
from pytorch_ood.detector import GMM
start = time.process_time()
detector = GMM(torch.nn.Identity())
detector.fit_features(z, labels)
detector.predict_features(queries)
"""


def bench_gaussians():
    """Gaussians of many classes, each side in its own process: processor seconds and memory."""
    if importlib.util.find_spec("pytorch_ood") is None:
        print("  pytorch-ood 0.4.0 is not installed")
        return
    sizes = {"n": size(20_000, 500), "dim": size(640, 16), "classes": size(100, 5),
             "queries": size(4000, 100)}
    results = []
    for work in (OURS, PYTORCH_OOD):
        code = GAUSSIANS.format(work=work.format(**sizes), **sizes)
        printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
        results.append([float(word) for word in printed.split()])
    (seconds, memory), (peer_seconds, peer_memory) = results
    print(f"  {sizes}: {seconds:.2f} s, {memory:.2f} GB; pytorch-ood's GMM {peer_seconds:.2f} s, "
          f"{peer_memory:.2f} GB; ratios {peer_seconds / seconds:.3g}, {peer_memory / memory:.3g}")


def forde_step(args, dataset, A=None, is_forde=True):
    """A training step of the members on one batch, which is the whole set."""
    [batch] = data.Loader(dataset, len(dataset), args.device).epoch()
    nets = forde.make_ensemble(args, 1, dataset.num_classes, dataset.shape).train()
    for net in nets:
        torch.nn.init.normal_(net.head.weight, std=0.05)
    optimiser = torch.optim.SGD(nets.parameters(), 1e-3, 0.9, nesterov=True)
    labels = batch.labels.repeat(args.members)

    def step():
        repulsion = 0.0
        if is_forde:
            logits, g = forde.member_gradients(nets, batch, args)
            s = forde.unit_rows(g)
            if A is not None:
                s = s @ A
            repulsion = forde.repulsion(forde.log_kernel(s))
        else:
            logits = forde.member_logits(nets, batch.images, args)
        loss = args.members * F.cross_entropy(logits.flatten(0, 1), labels) + repulsion
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def forde_step_with_layers_of_pytorch(args, dataset):
    """The same step with nn.Conv2d and nn.BatchNorm2d, which PyTorch differentiates twice."""
    with mock.patch.object(forde, "make_twice_differentiable"):
        step = forde_step(args, dataset)

    def plain_step():
        with mock.patch.object(forde.Convolution, "forward", torch.nn.Conv2d.forward):
            step()

    return plain_step


def bench_forde():
    """A step of FoRDE with ResNet-18, over one by layers of PyTorch, and of the deep ensemble."""
    dataset = random_set(size(32, 8))
    members, width = size((4, 0.25), (2, 0.125))
    args = options(forde, "--dataset", "cifar10", "--members", members, "--width", width)
    A = torch.randn(3072, 3072, generator=seeded()) / 3072**0.5
    steps = [forde_step(args, dataset), forde_step_with_layers_of_pytorch(args, dataset),
             forde_step(args, dataset, A), forde_step(args, dataset, is_forde=False)]
    identity, plain, pca, ensemble = best_seconds(*steps, budget_s=60)
    title = f"{members} members, {len(dataset)} images"
    show(f"FoRDE-identity, {title}", (identity, plain), "nn.Conv2d and nn.BatchNorm2d")
    show(f"FoRDE-identity, {title}", (identity, ensemble), "deep ensemble", cost=True)
    show(f"FoRDE-PCA, {title}", (pca, ensemble), "deep ensemble", cost=True)


def like_weights(n):
    """Points (mu, sigma) [n, 2], float64, as a network's: heavy tails, sigma grows with |mu|."""
    a, b, c = torch.randn(3, n, generator=seeded(), dtype=torch.float64)
    mu = 0.02 * a * b.abs().sqrt()
    return torch.stack([mu, 3e-3 * (0.3 * c).exp() + 0.1 * mu.abs()], 1)


def bench_mixture():
    """EM and labels of Gaussians in the plane."""
    from sklearn.mixture import GaussianMixture
    n, k, iterations = size((300_000, 64, 8), (3000, 8, 3))
    x = like_weights(n)
    spread = x.std(0)
    first = gbnn2d.fit_mixture(x, k, seeded(), iterations=0)
    precisions = torch.linalg.inv(first.covariance) * torch.outer(spread, spread)
    peer = GaussianMixture(k, reg_covar=1e-6, max_iter=iterations, tol=0,
                           weights_init=first.proportion, means_init=first.centre / spread,
                           precisions_init=precisions, init_params="random")
    seconds = best_seconds(lambda: gbnn2d.fit_mixture(x, k, seeded(), iterations),
                           lambda: peer.fit(x / spread), budget_s=20)
    show(f"EM, {n:,} points, K = {k}, {iterations} iterations", seconds, "scikit-learn")

    n, k, iterations = size((200_000, 2000, 20), (2000, 20, 2))
    x = like_weights(n)
    mixture = gbnn2d.fit_mixture(x, k, seeded(), iterations)

    def dense():
        return [gbnn2d.log_joint(block[:, None], mixture).argmax(1) for block in x.split(2**11)]

    seconds = best_seconds(lambda: gbnn2d.assign(x, mixture), dense, budget_s=30)
    show(f"labels of {n:,} points, K = {k}", seconds, "all log densities")


def shared_network(net):
    """gbnn2d.py's network of shared Gaussians, which are fitted to the initial weights."""
    points = gbnn2d.MeanField(net).points().cpu()
    gradient = torch.rand(len(points), generator=seeded())
    k = min(2048, len(points) // 500)
    label, mixture = gbnn2d.cluster(points, gradient, k, seeded(), tau_w=1.0)
    label, mixture = gbnn2d.merge(points, label, mixture, gradient)
    return gbnn2d.RandomNetwork(net, gbnn2d.SharedGaussians(gbnn2d.encode(points, label, mixture)))


@torch.no_grad()
def bench_gbnn2d():
    """Predictions by five samples of a ResNet-18 whose weights share Gaussians."""
    x = torch.randn(size(256, 8), 3, 32, 32, generator=seeded())
    args = options(gbnn2d, "--dataset", "cifar10", "--width", size(0.25, 0.05))
    plain = gbnn2d.make_network(args, 10, (3, 32, 32)).eval()
    shared = shared_network(gbnn2d.make_network(args, 10, (3, 32, 32))).eval()
    show(f"{len(shared.posterior.label):,} weights, {len(x)} images",
         best_seconds(lambda: [shared(x) for _ in range(5)], lambda: plain(x)), "one pass",
         cost=True)


def bench_laplace():
    """A last layer of CIFAR-10's size: fit, the grid of 21 prior precisions, predictions.

    The peer's network is the last layer alone: what it spends on features is not counted.
    """
    from laplace import Laplace
    counts, dim, samples = size(([48_000, 2000, 10_000], 256, 200), ([300, 50, 50], 16, 20))
    head = torch.nn.Linear(dim, 10)
    torch.nn.init.normal_(head.weight, std=0.3)
    x = torch.randn(sum(counts), dim, generator=seeded()).relu()
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=head(x)).sample()
    parts = zip(x.split(counts), y.split(counts))
    train, val, test = [sle.LastLayer(*part) for part in parts]
    theta = sle.flat_head(head).detach()
    precisions = []

    def ours():
        laplace = sle.full_laplace(theta, train.x)
        noise = torch.randn(100, len(theta), generator=seeded())
        scores = sle.precision_scores(laplace, val, noise)
        precisions.append(max(scores, key=scores.get))
        noise = torch.randn(samples, len(theta), generator=seeded())
        heads = sle.laplace_samples(laplace._replace(precision=precisions[-1]), noise)
        for block in test.x.split(500):
            sle.head_outputs(heads, block).softmax(-1).mean(0)

    def theirs():
        loaders = []
        for part, batch in ((train, 500), (val, len(val.x)), (test, 1000)):
            rows = list(zip(part.x, part.labels))
            loaders.append(torch.utils.data.DataLoader(rows, batch))
        net = torch.nn.Sequential(torch.nn.Identity(), head)
        peer = Laplace(net, "classification", "last_layer", "full")
        peer.fit(loaders[0])
        peer.optimize_prior_precision(
            "nn", "gridsearch", val_loader=loaders[1], n_samples=100, grid_size=21,
            link_approx="mc", loss=lambda p, y: F.nll_loss(p.log(), y))
        peer.prior_precision = precisions[-1]
        for rows, _ in loaders[2]:
            peer(rows, "nn", link_approx="mc", n_samples=samples)

    show(f"{counts[0]:,} x {dim + 1}, 10 classes, {samples} samples of {counts[2]:,}",
         best_seconds(ours, theirs, budget_s=25), "laplace-torch")


ROWS = {"loader": bench_loader, "ddu": bench_ddu, "gaussians": bench_gaussians,
        "forde": bench_forde, "mixture": bench_mixture, "gbnn2d": bench_gbnn2d,
        "laplace": bench_laplace}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in asked.names or ROWS:
        print(f"{name}: {ROWS[name].__doc__.splitlines()[0]}")
        ROWS[name]()


if __name__ == "__main__":
    main()
