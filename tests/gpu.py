"""What one GPU does, in at most ten minutes: rows of a table for RESULTS.md.

  python tests/gpu.py                    # all rows; images are random where CIFAR is not in data/
  python tests/gpu.py forde ddu          # some of them
  python tests/gpu.py --small            # small sizes, also on the CPU: does it run?

The floating-point operations of a step are counted by torch.utils.flop_counter, its launches by
torch.profiler; the bf16 peak is that of a product of 8192 x 8192 matrices. A row that fails is
reported, and the next one begins.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from bench import SMALL, forde_step, random_set, shared_network, size
from torch.utils.flop_counter import FlopCounterMode

import common  # bench.py has put the folder above on the path
import data
import ddu
import forde
import gbnn2d
import proxy_distill
import swag_laplace_ensembles as sle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def load_random(name, split, data_dir):
    """Instead of CIFAR, where it is not there: random images of its size."""
    n = size(50_000 if split == "train" else 10_000, 256)
    return random_set(n, classes=100 if name == "cifar100" else 10)


def random_batch(count, side=32):
    """(images, labels) on the device."""
    return torch.randn(count, 3, side, side, device=DEVICE), torch.arange(count, device=DEVICE) % 10


def training_step(compute_loss, optimiser):
    """A function that makes a step of training."""
    def step():
        loss = compute_loss()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def measure_peak():
    """FLOP/s of a bf16 product of matrices."""
    n = size(8192, 128)
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16)
    return 2 * n**3 / seconds_of(lambda: a @ b)


def count_launches(function):
    """Kernels that one call starts."""
    with torch.profiler.profile() as profile:
        function()
        wait()
    return sum(event.name.startswith("cudaLaunchKernel") for event in profile.events())


def row_torchrun(peak, folder):
    """The command of the first page, for some steps."""
    argv = ["--dataset", "cifar100", "--epochs", 1, "--limit-steps", size(20, 1), "--shift", "none",
            "--ood", "--no-plot", "--device", DEVICE, "--out-dir", folder]
    if SMALL:
        argv += ["--small", "--members", 2, "--width", 0.05, "--batch-size", 8]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "1", __file__, "--launch"] + [str(word) for word in argv]
    start = time.perf_counter()
    printed = subprocess.check_output(command, text=True)
    show("torchrun --nproc_per_node 1 forde.py --dataset cifar100, 20 steps, evaluation",
         f"{time.perf_counter() - start:.0f} s", printed.strip().splitlines()[-1])


def row_forde(peak, folder):
    """A step of ten ResNet-18, over that of the deep ensemble."""
    dataset = random_set(size(128, 4))
    members, width = size((10, 1.0), (2, 0.05))
    A = torch.randn(3072, 3072, device=DEVICE) / 3072**0.5
    for amp in ((), ("--amp",)):
        args = options(forde, "--dataset", "cifar10", "--members", members, "--width", width, *amp)
        step = forde_step(args, dataset, A)
        seconds = seconds_of(step)
        launches = count_launches(step)
        ensemble = seconds_of(forde_step(args, dataset, is_forde=False))
        # Our batch norm should gain a fifth at least.
        with mock.patch.object(forde, "BatchNorm", torch.nn.BatchNorm2d):
            plain = seconds_of(forde_step(args, dataset, A))
        show(f"FoRDE-PCA's step, {members} ResNet-18, {len(dataset)} images {' '.join(amp)}",
             f"{1e3 * seconds:.1f} ms", f"{seconds / ensemble:.2f} x deep ensemble; "
             f"{plain / seconds:.2f} x faster than with PyTorch's batch norm; "
             f"{launches:,} launches, {launches / seconds:,.0f} a second")
    X = torch.randn(size(50_000, 200), 3072, device=DEVICE)
    show("FoRDE-PCA's A for 50,000 images", f"{seconds_of(lambda: forde.pca_root(X), 1, 1):.2f} s")


def row_ddu(peak, folder):
    """A step of WRN-28-10, and the densities of ImageNet."""
    images, labels = random_batch(size(128, 4))
    for amp in ((), ("--amp",)):
        args = options(ddu, "--dataset", "cifar10", "--width", size(1.0, 0.1), *amp)
        net = ddu.make_network(args, 10, (3, 32, 32)).train()

        def compute_loss():
            with common.autocast(args):
                logits, _ = net(images)
            return F.cross_entropy(logits.float(), labels)

        step = training_step(compute_loss, torch.optim.SGD(net.parameters(), 0.01, 0.9))
        with FlopCounterMode(display=False) as counter:
            step()
        seconds = seconds_of(step)
        fraction = counter.get_total_flops() / seconds / peak
        show(f"DDU's step, WRN-28-10 with spectral norm, {len(images)} images {' '.join(amp)}",
             f"{len(images) / seconds:,.0f} images/s", f"{fraction:.1%} of the bf16 peak")
    classes, dim, rows, count = size((1000, 2048, 300, 50_000), (10, 32, 40, 100))
    z = torch.randn(classes * rows, dim, device=DEVICE)
    labels = torch.arange(len(z), device=DEVICE) % classes
    queries = torch.randn(count, dim)
    seconds = seconds_of(lambda: ddu.class_log_joints(z, labels, classes, [queries]), 1, 0)
    show(f"DDU's densities, {classes} classes x {dim}, {count:,} queries", f"{seconds:.1f} s")


def row_proxy_distill(peak, folder):
    """A student's step, with ten ResNet-50 as teachers."""
    images, _ = random_batch(size(128, 2), size(224, 72))
    args = options(proxy_distill, "--dataset", "imagenet", "--amp", "--width", size(1.0, 0.05))
    classes, count = size((1000, 11), (10, 3))
    student, *members = [proxy_distill.make_network(args, classes, images.shape[1:])
                         for _ in range(count)]
    optimiser = proxy_distill.make_optimiser(student, args)

    def compute_loss():
        with common.autocast(args):
            logits = student(images)
            with torch.no_grad():
                of_members = [member.eval()(images) for member in members]
        ensemble = proxy_distill.ensemble_statistics(torch.stack(of_members))
        return proxy_distill.rkl_proxy_loss(logits, ensemble).mean()

    seconds = seconds_of(training_step(compute_loss, optimiser), 5)
    show(f"a student's step, {len(members)} teachers, ResNet-50, {images.shape[-1]} pixels, --amp",
         f"{len(images) / seconds:,.0f} images/s")


def row_gbnn2d(peak, folder):
    """A step of ResNet-18 whose weights share Gaussians."""
    images, labels = random_batch(size(128, 4))
    args = options(gbnn2d, "--dataset", "cifar10", "--width", size(1.0, 0.05))
    shared = shared_network(gbnn2d.make_network(args, 10, (3, 32, 32))).eval()

    def compute_loss():
        return F.cross_entropy(shared(images), labels) + shared.posterior.kl() / 50_000

    seconds = seconds_of(training_step(compute_loss, gbnn2d.make_optimiser(shared, args)))
    show(f"weight sharing's step, ResNet-18, {len(images)} images",
         f"{len(images) / seconds:,.0f} images/s")


def row_swag(peak, folder):
    """A sample of WRN-28-10, and the curvature of the paper's largest last layer."""
    args = options(sle, "--dataset", "cifar10", "--model", "wrn_28_10", "--width", size(1.0, 0.05),
                   "--amp")
    dataset = random_set(size(10_000, 32))
    net = sle.make_member(args, dataset)
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
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
    n, dim, classes = size((48_000, 256, 100), (20, 4, 3))
    x = torch.randn(n, dim, device=DEVICE).relu()
    theta = 0.1 * torch.randn(classes * (dim + 1), device=DEVICE)
    show(f"curvature of a last layer of {classes} classes, {dim} features",
         f"{seconds_of(lambda: sle.full_laplace(theta, x), 1, 0):.1f} s")


ROWS = {"torchrun": row_torchrun, "forde": row_forde, "ddu": row_ddu,
        "proxy_distill": row_proxy_distill, "gbnn2d": row_gbnn2d, "swag": row_swag}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--small", action="store_true", help="small sizes, also on the CPU")
    asked = parser.parse_args()
    if DEVICE == "cpu" and not SMALL:
        parser.error("no CUDA device; --small also runs on the CPU")
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
    arguments = [word for word in sys.argv[1:] if word not in ("--launch", "--small")]
    common.launch(lambda: forde.main(arguments))
elif __name__ == "__main__":
    main()
