"""Ours against named peers, or against what the machine can do, measured in one process.

  python tests/bench.py [NAME ...] [--small]

Not a test: it asserts nothing. Each figure is the best of several rounds, ours and the peer's in
turn, since whatever else a machine does only adds time. --small only shows that a row runs.
"""

import argparse
import contextlib
import io
import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
import data  # noqa: E402
import ddu  # noqa: E402
import forde  # noqa: E402
import gbnn2d  # noqa: E402
import swag_laplace_ensembles as sle  # noqa: E402

SMALL = False


def size(whole, small):
    return small if SMALL else whole


def best_seconds(*functions, budget_s=12.0):
    """Shortest call of each function: rounds in turn, as long as another one fits in the budget."""
    best = [math.inf] * len(functions)
    spent = 0.0
    rounds = 0
    while rounds == 0 or spent + spent / rounds < size(budget_s, 1):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            best[i] = min(best[i], seconds)
            spent += seconds
        rounds += 1
    return best


def row(what, seconds, *peers, note="", cost=False):
    """`seconds` of ours and of each of the peers, and peer / ours, or with `cost` ours / peer."""
    ours, *others = seconds
    line = f"  {what}: {1e3 * ours:,.1f} ms"
    for name, peer in zip(peers, others):
        ratio = ours / peer if cost else peer / ours
        line += f"; {name} {1e3 * peer:,.1f} ms, ratio {ratio:.3g}"
    if note:
        line += f"; {note}"
    print(line, flush=True)


def options(script, *argv):
    """A script's options (on a CPU), without the line it prints about them."""
    with contextlib.redirect_stdout(io.StringIO()):
        return script.parse_args(["--device", "cpu", *map(str, argv)])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_set(n, side=32, classes=10):
    """n random images with labels, of CIFAR-10's size unless said."""
    images = torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=seeded())
    return data.ImageSet("random", images, torch.arange(n) % classes, classes, (0.5,) * 3,
                         (0.25,) * 3)


def bench_loader():
    """Crop, flip and normalise 32x32x3 images in batches of 128."""
    from torchvision import datasets, transforms as T
    n, few = size(50_000, 1000), size(20_000, 500)
    own, peer = random_set(n), datasets.CIFAR10.__new__(datasets.CIFAR10)
    peer.data, peer.targets = own.images[:few].permute(0, 2, 3, 1).numpy(), own.labels.tolist()
    peer.transform, peer.target_transform = T.Compose([
        T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(),
        T.Normalize(own.mean, own.std)]), None
    loaders = data.Loader(own, 128, shuffle=True, augment="crop_flip"), \
        torch.utils.data.DataLoader(peer, 128, True, num_workers=2, persistent_workers=True)
    ours_s, peer_s = best_seconds(lambda: sum(1 for _ in loaders[0].epoch()),
                                  lambda: sum(1 for _ in loaders[1]))
    row(f"{n:,} images", (ours_s, peer_s * n / few), "torchvision's DataLoader, 2 workers")


def bench_ddu():
    """Algorithm 1 on features, and what spectral normalisation costs."""
    n = size(45_000, 2000)
    dim = size(640, 64)
    k = 10
    labels = torch.arange(n) % k
    z = torch.randn(n, dim, generator=seeded()).relu() + torch.randn(k, dim)[labels]
    other = torch.randn(dim, dim).double()
    out = torch.empty(n, dim).double()

    def ours():
        gaussians = ddu.fit_gaussians(z, labels, k)
        return ddu.class_log_densities(gaussians, z).logsumexp(1)

    def peer():
        wide = z.double()
        columns = []
        for c in range(k):
            rows = wide[labels == c]
            normal = torch.distributions.MultivariateNormal(rows.mean(0), torch.cov(rows.T))
            columns.append(normal.log_prob(wide))
        return torch.stack(columns, 1).logsumexp(1)

    def products():  # covariances: one of 2 N D^2; a triangular solve for each class: half a one
        wide = z.double()
        for _ in range(1 + k // 2):
            torch.mm(wide, other, out=out)

    row(f"fit and score {n:,} x {dim}, {k} classes, float64",
        best_seconds(ours, peer, products, budget_s=45), "loop over MultivariateNormal",
        "matrix products of the same flops")

    batch, width = size(32, 4), size(1.0, 0.125)
    x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def step_of(sn):
        args = options(ddu, "--dataset", "cifar10", "--model", "resnet18", "--width", width, sn)
        net = ddu.make_network(args, 10, (3, 32, 32)).train()

        def step():
            net.zero_grad()
            net(x)[0].logsumexp(1).sum().backward()
        return step

    row(f"training step with spectral norm, ResNet-18, {batch} images",
        best_seconds(step_of("--sn"), step_of("--no-sn")), "without", cost=True)


def bench_forde():
    """A training step of FoRDE-PCA over one of the deep ensemble: ResNet-18, contiguous."""
    members, batch, width = size(4, 2), size(32, 8), size(1.0, 0.125)
    own = random_set(batch)
    x = next(iter(data.Loader(own, batch).epoch()))
    A = torch.randn(3072, 3072, generator=seeded()) / 3072**0.5

    def step_of(method):
        args = options(forde, "--dataset", "cifar10", "--members", members, "--width", width)
        nets = forde.make_ensemble(args, 1, 10, own.shape).train()
        for net in nets:
            torch.nn.init.normal_(net.head.weight, std=0.05)

        def step():
            nets.zero_grad()
            forde.ensemble_step(nets, x, method, A, batch, args)
        return step

    row(f"{members} members, {batch} images", best_seconds(
        step_of("forde_pca"), step_of("deep_ensemble"), budget_s=40), "deep ensemble", cost=True)


def like_weights(n):
    """Points (mu, sigma) [n, 2] float32 as a network's: heavy tails, sigma grows with |mu|."""
    a, b, c = torch.randn(3, n, generator=seeded())
    mu = 0.02 * a * b.abs().sqrt()
    return torch.stack([mu, 3e-3 * (0.3 * c).exp() + 0.1 * mu.abs()], 1)


def bench_gbnn2d():
    """EM, Wasserstein distances, and a step of the last stage."""
    import ot
    from sklearn.mixture import GaussianMixture
    n = size(300_000, 3000)
    k = size(64, 8)
    iterations = size(8, 3)
    x = like_weights(n).double()
    spread = x.std(0)
    first, _ = gbnn2d.fit_mixture(x, k, seeded(), iterations=0)
    precisions = torch.linalg.inv(first.covariance) * torch.outer(spread, spread)
    peer = GaussianMixture(k, reg_covar=1e-6, max_iter=iterations, tol=0,
                           weights_init=first.proportion, means_init=first.centre / spread,
                           precisions_init=precisions, init_params="random")

    def ours():
        return gbnn2d.fit_mixture(x, k, seeded(), iterations)[1]

    seconds = best_seconds(ours, lambda: peer.fit(x / spread), budget_s=20)
    gap = ours()[-1] + spread.log().sum().item() - peer.lower_bound_
    row(f"EM, {n:,} points, K = {k}, {iterations} iterations", seconds, "scikit-learn",
        note=f"log-likelihoods differ by {gap:.1e} nats a point")

    k = size(6000, 100)
    pairs = size(2000, 50)
    centre = like_weights(k).double()
    root = 1e-4 * torch.randn(k, 2, 2).double()
    covariance = root @ root.mT + 1e-9 * torch.eye(2)
    j = torch.randint(k, (8 * k,), generator=seeded())
    i = torch.arange(k).repeat(8)
    means = centre.numpy()
    matrices = covariance.numpy()

    def distances():
        return gbnn2d.wasserstein(centre[i], covariance[i], centre[j], covariance[j])

    def peer_distances():
        for a, b in zip(i[:pairs].tolist(), j[:pairs].tolist()):
            ot.gaussian.bures_wasserstein_distance(means[a], means[b], matrices[a], matrices[b])

    ours_s, peer_s = best_seconds(distances, peer_distances, budget_s=6)
    row(f"W2 of {len(i):,} pairs", (ours_s, peer_s * len(i) / pairs), "POT")

    batch = size(64, 4)
    width = size(0.25, 0.05)
    args = options(gbnn2d, "--dataset", "cifar10", "--model", "resnet18", "--width", width)
    net = gbnn2d.make_network(args, 10, (3, 32, 32))
    shared = shared_network(gbnn2d.make_network(args, 10, (3, 32, 32)))
    x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch) % 10
    seconds = best_seconds(gbnn2d_step(shared.eval(), x, labels, args),
                           gbnn2d_step(net.train(), x, labels, args))
    weights = len(shared.posterior.label)
    row(f"step of the last stage, ResNet-18 of {weights:,} weights, {batch} images", seconds,
        "deterministic", cost=True)


def shared_network(net):
    """gbnn2d.py's network of shared Gaussians, which are fitted to the initial weights."""
    field = gbnn2d.MeanField(net)
    gradient = torch.rand(len(field.mu), generator=seeded())
    options = gbnn2d.CompressionOptions(k0=0, tau_w=1.0, tau_d="auto")
    _, weights, _ = gbnn2d.compress(field.mu.detach(), field.sigma.detach(), gradient, options,
                                    seeded())
    return gbnn2d.RandomNetwork(net, gbnn2d.SharedGaussians(weights))


def gbnn2d_step(module, x, labels, args):
    """A function that trains a network of gbnn2d.py for one step."""
    optimiser = gbnn2d.make_optimiser(module, args)

    def step():
        loss = F.cross_entropy(module(x), labels)
        if isinstance(module, gbnn2d.RandomNetwork):
            loss = loss + module.posterior.kl() / 50_000
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def bench_laplace():
    """Last layer of CIFAR-10's size: fit, the grid of 21 prior precisions, predictions by samples.

    The peer's network is the last layer alone: what it spends on features is not counted."""
    from laplace import Laplace
    n, n_val, n_test, d, k, samples = size((48_000, 2000, 10_000, 256, 10, 200),
                                           (300, 50, 50, 16, 3, 20))
    head = torch.nn.Linear(d, k)
    x = torch.randn(n + n_val + n_test, d, generator=seeded()).relu()
    with torch.no_grad():
        head.weight.copy_(0.3 * torch.randn(k, d, generator=seeded()))
        y = torch.distributions.Categorical(logits=head(x)).sample()
    train, val, test = [sle.LastLayer(*rows) for rows in zip(
        x.split([n, n_val, n_test]), y.split([n, n_val, n_test]))]
    theta = sle.flat_head(head).detach()
    found = {}

    def ours():
        spectrum = sle.full_spectrum(theta, train)
        noise = torch.randn(100, len(theta), generator=seeded())
        scores = sle.precision_scores(theta, spectrum, val, noise)
        found["delta"] = sle.LAPLACE_GRID[int(np.argmax(scores))]
        noise = torch.randn(samples, len(theta), generator=seeded())
        heads = sle.laplace_samples(theta, spectrum, found["delta"], noise)
        outputs = [sle.head_outputs(heads, sle.LastLayer(rows, None)).logsumexp(0)
                   for rows in test.x.split(500)]
        found["ours"] = torch.cat(outputs) - math.log(samples)

    def theirs():
        loaders = [torch.utils.data.DataLoader([*zip(p.x, p.labels)], rows)
                   for p, rows in ((train, 500), (val, n_val), (test, 1000))]
        net = torch.nn.Sequential(torch.nn.Identity(), head)
        peer = Laplace(net, "classification", "last_layer", "full")
        peer.fit(loaders[0])
        peer.optimize_prior_precision(
            "nn", "gridsearch", val_loader=loaders[1], n_samples=100, grid_size=21,
            link_approx="mc", loss=lambda p, y: F.nll_loss(p.log(), y))
        peer.prior_precision = found["delta"]
        outputs = [peer(rows, "nn", link_approx="mc", n_samples=samples) for rows, _ in loaders[2]]
        found["theirs"] = torch.cat(outputs).log()

    seconds = best_seconds(ours, theirs, budget_s=25)
    nll = [common.nll(found[who], test.labels) for who in ("ours", "theirs")]
    row(f"{n:,} x {d + 1}, {k} classes, {samples} samples of {n_test:,}", seconds, "laplace-torch",
        note=f"NLL {nll[0]:.4f} and {nll[1]:.4f} (other noise)")


@torch.no_grad()
def bench_predict():
    """Predictions for 512 images of 32x32x3 by small networks, over one pass of the network."""
    batch = size(512, 8)
    width = size(0.25, 0.05)
    common_options = ["--dataset", "cifar10", "--width", width]
    x = torch.randn(batch, 3, 32, 32, generator=seeded())
    x = x.contiguous(memory_format=torch.channels_last)

    args = options(ddu, *common_options, "--model", "resnet18")
    net = ddu.make_network(args, 10, (3, 32, 32)).eval()
    z = torch.randn(size(10_000, 500), net.head.in_features, generator=seeded())
    gaussians = ddu.fit_gaussians(z, torch.arange(len(z)) % 10, 10)

    def scores():
        return ddu.predict_by_ddu(ddu.Outputs(*net(x), None, 0.0), gaussians, temperature=1.0)

    row("ddu.py, ResNet-18, ten Gaussians", best_seconds(scores, lambda: net(x)), "one pass",
        cost=True)

    args = options(gbnn2d, *common_options, "--model", "resnet18")
    plain = gbnn2d.make_network(args, 10, (3, 32, 32)).eval()
    shared = shared_network(gbnn2d.make_network(args, 10, (3, 32, 32))).eval()
    uniform = torch.rand(5, batch, generator=seeded())

    def draws():
        logits = torch.stack([shared(x) for _ in range(5)])
        return gbnn2d.mean_prediction(logits.double(), uniform)

    row("gbnn2d.py, ResNet-18, five samples", best_seconds(draws, lambda: plain(x)), "one pass",
        cost=True)

    args = options(sle, *common_options, "--model", "wrn_10_4")
    net = sle.make_network(args, random_set(batch)).eval()
    heads = torch.randn(size(200, 3), len(sle.flat_head(net.head)), generator=seeded())

    def last_layers():
        last = sle.LastLayer(net(x)[1], None)
        return [sle.head_outputs(some, last) for some in heads.split(8)]  # as in the script

    seconds = best_seconds(last_layers, lambda: net(x))
    row(f"LLLA and LA-NF, WRN-10-4, {len(heads)} samples", seconds, "one pass", cost=True)


if __name__ == "__main__":
    ROWS = {"loader": bench_loader, "ddu": bench_ddu, "forde": bench_forde,
            "gbnn2d": bench_gbnn2d, "laplace": bench_laplace, "predict": bench_predict}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    asked = parser.parse_args()
    unknown = set(asked.names) - set(ROWS)
    if unknown:
        parser.error(f"no row {min(unknown)}; choose from {', '.join(ROWS)}")
    SMALL = asked.small
    warnings.simplefilter("ignore")  # the peers' own
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratio: peer / ours, or "
          "ours / peer where it is what a method costs")
    for name in asked.names or ROWS:
        print(f"{name}: {ROWS[name].__doc__.splitlines()[0]}")
        ROWS[name]()
