"""What one GPU does, in at most ten minutes: rows of a table for RESULTS.md.

  python tests/gpu.py                    # all rows; images are random where CIFAR is not in data/
  python tests/gpu.py forde ddu          # some of them
  python tests/gpu.py --tiny             # small sizes, also on the CPU: does it run?

The bf16 peak is measured here, by a product of 8192 x 8192 matrices; the floating-point operations
of a step are counted by torch.utils.flop_counter. A row that fails is reported, and the next one
begins. Launches are counted by torch.profiler.
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
import common  # noqa: E402
import data  # noqa: E402
import ddu  # noqa: E402
import forde  # noqa: E402
import gbnn2d  # noqa: E402
import proxy_distill  # noqa: E402
import swag_laplace_ensembles as sle  # noqa: E402

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def size(whole, tiny):
    return tiny if TINY else whole


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(function, repeats=20, warm_up=3):
    """Mean seconds of a call, the device waited for at the end."""
    for _ in range(size(warm_up, 1)):
        function()
    wait()
    start = time.perf_counter()
    for _ in range(size(repeats, 1)):
        function()
    wait()
    return (time.perf_counter() - start) / size(repeats, 1)


def show(what, value, note=""):
    """Print a row of the table, with the peak of the memory since the row before."""
    memory = ""
    if DEVICE == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        torch.cuda.reset_peak_memory_stats()
    print(f"| {what} | {value} | {note} | {memory} |", flush=True)


def options(script, *argv):
    return script.parse_args(["--device", DEVICE] + [str(word) for word in argv])


def random_set(n, side=32, classes=10):
    images = torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8)
    return data.ImageSet("random", images, torch.arange(n) % classes, classes, (0.5, 0.5, 0.5),
                         (0.25, 0.25, 0.25))


def load_random(name, split, data_dir):
    """Instead of CIFAR and SVHN, where they are not there: random images of their size."""
    n = size(50_000 if split == "train" else 10_000, 256)
    return random_set(n, classes=100 if name == "cifar100" else 10)


def batch_of(count, side=32, classes=10):
    """(images, labels) on the device."""
    x = torch.randn(count, 3, side, side, device=DEVICE)
    labels = torch.arange(count, device=DEVICE) % classes
    return x.contiguous(memory_format=torch.channels_last), labels


def measure_peak():
    """FLOP/s of a bf16 product of matrices."""
    n = size(8192, 128)
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16)
    return 2 * n**3 / seconds_of(lambda: a @ b)


def count_launches(function):
    """Kernels that one call starts."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        function()
        wait()
    return sum(event.name.startswith("cudaLaunchKernel") for event in profile.events())


def row_torchrun(peak, folder):
    """The command of the first page, for some steps."""
    import subprocess

    argv = ["--dataset", "cifar100", "--epochs", 1, "--limit-steps", size(20, 1), "--shift", "none",
            "--ood", "--no-plot", "--device", DEVICE, "--out-dir", folder]
    if TINY:
        argv += ["--tiny", "--members", 2, "--width", 0.05, "--batch-size", 8]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "1", __file__, "--launch"] + [str(word) for word in argv]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    show("torchrun --nproc_per_node 1 forde.py --dataset cifar100, 20 steps, evaluation",
         f"{time.perf_counter() - start:.0f} s", done.stdout.strip().splitlines()[-1])


def row_forde(peak, folder):
    """A step of ten ResNet-18, over that of the deep ensemble."""
    members = size(10, 2)
    batch = data.Batch(*batch_of(size(128, 4)), None)
    for amp in ((), ("--amp",)):
        args = options(forde, "--dataset", "cifar10", "--members", members, "--width",
                       size(1.0, 0.05), *amp)
        nets = forde.make_ensemble(args, 1, 10, (3, 32, 32)).train()
        optimiser = torch.optim.SGD(nets.parameters(), 1e-3, 0.9, nesterov=True)
        A = torch.randn(3072, 3072, device=DEVICE) / 3072**0.5
        labels = batch.labels.repeat(members)

        def step(is_forde=True):
            repulsion = 0.0
            if is_forde:
                logits, g = forde.member_gradients(nets, batch, args)
                s = forde.unit_rows(g)
                if A is not None:
                    s = s @ A
                repulsion = forde.repulsion(forde.log_kernel(s))
            else:
                logits = forde.member_logits(nets, batch.images, args)
            loss = members * F.cross_entropy(logits.flatten(0, 1), labels) + repulsion
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        seconds = seconds_of(step)
        ensemble = seconds_of(lambda: step(is_forde=False))
        launches = count_launches(step)
        # The custom batch norm should gain a fifth at least.
        layers = [layer for layer in nets.modules() if isinstance(layer, forde.BatchNorm)]
        for layer in layers:
            layer.__class__ = torch.nn.BatchNorm2d
        plain = seconds_of(step)
        for layer in layers:
            layer.__class__ = forde.BatchNorm
        show(f"FoRDE-PCA's step, {members} ResNet-18, 128 images {' '.join(amp)}",
             f"{1e3 * seconds:.1f} ms", f"{seconds / ensemble:.2f} x deep ensemble; {launches:,} "
             f"launches, {launches / seconds:,.0f} a second; {plain / seconds:.2f} x with PyTorch's "
             "batch norm")
    X = torch.randn(size(50_000, 200), 3072, device=DEVICE)
    show("FoRDE-PCA's A for 50,000 images", f"{seconds_of(lambda: forde.pca_root(X), 1, 1):.2f} s")


def row_ddu(peak, folder):
    """A step of WRN-28-10, and the densities of ImageNet."""
    images, labels = batch_of(size(128, 4))
    for amp in ((), ("--amp",)):
        args = options(ddu, "--dataset", "cifar10", "--width", size(1.0, 0.1), *amp)
        net = ddu.make_network(args, 10, (3, 32, 32)).train()
        optimiser = torch.optim.SGD(net.parameters(), 0.01, 0.9)

        def step():
            with common.autocast(args):
                logits, _ = net(images)
            optimiser.zero_grad()
            F.cross_entropy(logits.float(), labels).backward()
            optimiser.step()

        with FlopCounterMode(display=False) as counter:
            step()
        seconds = seconds_of(step)
        share = counter.get_total_flops() / seconds / peak
        show(f"DDU's step, WRN-28-10 with spectral norm, 128 images {' '.join(amp)}",
             f"{len(images) / seconds:,.0f} images/s", f"{share:.1%} of the bf16 peak")
    classes = size(1000, 10)
    dim = size(2048, 32)
    z = torch.randn(classes * size(300, 40), dim, device=DEVICE)
    labels = torch.arange(len(z), device=DEVICE) % classes
    queries = torch.randn(size(50_000, 100), dim)
    seconds = seconds_of(
        lambda: ddu.class_log_densities(z, labels, classes, [queries]), 1, 0)
    show(f"DDU's densities, {classes} classes x {dim}, {len(queries):,} queries",
         f"{seconds:.1f} s")


def row_proxy_distill(peak, folder):
    """A student's step, with ten ResNet-50 as teachers."""
    images, _ = batch_of(size(128, 2), size(224, 72))
    args = options(proxy_distill, "--dataset", "imagenet", "--amp", "--width", size(1.0, 0.05))
    classes = size(1000, 10)
    nets = [proxy_distill.make_network(args, classes, images.shape[1:])
            for _ in range(size(11, 3))]
    student, *members = nets
    optimiser = proxy_distill.make_optimiser(student, args)

    def step():
        with common.autocast(args):
            logits = student(images)
            with torch.no_grad():
                of_members = [member.eval()(images) for member in members]
        ensemble = proxy_distill.ensemble_statistics(torch.stack(of_members))
        loss = proxy_distill.rkl_proxy_loss(logits, ensemble).mean()
        for group in optimiser.param_groups:
            group["lr"] = 0.01
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    show("a student's step, ten teachers, ResNet-50, 224 x 224, --amp",
         f"{len(images) / seconds_of(step, 5):,.0f} images/s")


def row_gbnn2d(peak, folder):
    """A step of ResNet-18 whose weights share Gaussians."""
    images, labels = batch_of(size(128, 4))
    args = options(gbnn2d, "--dataset", "cifar10", "--width", size(1.0, 0.05))
    net = gbnn2d.make_network(args, 10, (3, 32, 32))
    posterior = gbnn2d.MeanField(net).cpu()
    points = torch.stack([posterior.mu, posterior.sigma], 1).detach().double()
    start = time.perf_counter()
    label, mixture = gbnn2d.cluster(points, torch.rand(len(points)), size(2048, 8),
                                    torch.Generator().manual_seed(0), tau_w=1.0)
    weights = gbnn2d.encode(points, label, mixture)
    show(f"mixture of {len(points):,} weights, on the CPU", f"{time.perf_counter() - start:.0f} s")
    shared = gbnn2d.RandomNetwork(net, gbnn2d.SharedGaussians(weights)).eval()
    optimiser = gbnn2d.make_optimiser(shared, args)

    def step():
        loss = F.cross_entropy(shared(images), labels) + shared.posterior.kl() / 50_000
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    show("weight sharing's step, ResNet-18, 128 images",
         f"{len(images) / seconds_of(step):,.0f} images/s")


def row_swag(peak, folder):
    """A sample of WRN-28-10, and the curvature of the paper's largest last layer."""
    args = options(sle, "--dataset", "cifar10", "--model", "wrn_28_10", "--width", size(1.0, 0.05),
                   "--amp")
    dataset = random_set(size(10_000, 32))
    net = sle.make_member(args, dataset)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    iterates = weights + 1e-3 * torch.randn(size(25, 3), len(weights), device=DEVICE)
    moments = sle.swag_moments(iterates)

    def sample():
        noise = torch.randn(1, len(weights), device=DEVICE)
        low_rank_noise = torch.randn(1, len(iterates), device=DEVICE)
        drawn = sle.swag_samples(*moments, noise, low_rank_noise)[0]
        torch.nn.utils.vector_to_parameters(drawn, net.parameters())
        sle.compute_last_layer(net, dataset, args)

    show(f"a sample of SWAG, WRN-28-10, and its evaluation on {len(dataset):,} images",
         f"{seconds_of(sample, 3, 1):.2f} s")
    x = torch.randn(size(48_000, 20), size(256, 4), device=DEVICE).relu()
    theta = 0.1 * torch.randn(size(100, 3) * (x.shape[1] + 1), device=DEVICE)
    show("curvature of a last layer of 100 classes, 256 features",
         f"{seconds_of(lambda: sle.full_laplace(theta, x), 1, 0):.1f} s")


ROWS = {"torchrun": row_torchrun, "forde": row_forde, "ddu": row_ddu,
        "proxy_distill": row_proxy_distill, "gbnn2d": row_gbnn2d, "swag": row_swag}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, also on the CPU")
    asked = parser.parse_args()
    if DEVICE == "cpu" and not TINY:
        parser.error("no CUDA device; --tiny also runs on the CPU")
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    peak = measure_peak()
    print(f"{name}, torch {torch.__version__}: bf16 peak {1e-12 * peak:,.4g} TFLOP/s\n"
          "| row | value | | memory |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in asked.names or ROWS:
            try:
                ROWS[row](peak, folder)
            except Exception:  # the other rows are worth having
                traceback.print_exc()
                show(row, "failed")


if __name__ == "__main__" and "--launch" in sys.argv:  # in a process of torchrun
    if not Path("data", "cifar-100-python").exists():
        data.load_torchvision = load_random
    arguments = [word for word in sys.argv[1:] if word not in ("--launch", "--tiny")]
    common.launch(lambda: forde.main(arguments))
elif __name__ == "__main__":
    main()
