"""What one GPU does, in at most ten minutes: speeds for the README, then the tests that need CUDA.

  python tests/gpu.py --data-dir data            # data/ holds CIFAR-10's files: accuracies too
  python tests/gpu.py                            # random images: speed alone
  python tests/gpu.py ddu forde --out gpu.json   # some of the rows
  python tests/gpu.py --tiny                     # in seconds, also on the CPU: does it run?

Training runs through each script's own loop: loader, augmentation, optimiser, logging. The rate is
that of the second epoch. The bf16 peak is measured here, by a product of 8192 x 8192 matrices, and
the floating-point operations of a training step are counted by torch.utils.flop_counter, those of
power iterations left out. A row that fails is reported as such, and the next one begins; the rows
so far are in the file at any time. Tests that need CUDA have "gpu" or "cuda" in their names.
"""

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
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
from bench import (gbnn2d_step, like_weights, options, random_set,  # noqa: E402
                   shared_network)

LIMIT_S = 540  # and the imports before it


class Bench:
    """The device, the sizes, and the rows so far."""

    def __init__(self, asked, folder):
        self.asked, self.folder, self.rows, self.name = asked, folder, [], None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.start, self.peak = time.perf_counter(), None
        self.environment = common.environment(self.device)

    def size(self, whole, tiny):
        return tiny if self.asked.tiny else whole

    def left_s(self):
        return LIMIT_S - (time.perf_counter() - self.start)

    def options(self, script, *argv):
        return options(script, *argv, "--device", self.device.type, "--out-dir", self.folder)

    def seconds(self, work):
        """(seconds of work(), its value), the device waited for."""
        self.wait()
        start = time.perf_counter()
        value = work()
        self.wait()
        return time.perf_counter() - start, value

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget_memory(self):
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def add(self, what, value, unit, flops=None, **more):
        """Note a row; flops: of an image, where the value is images a second."""
        row = {"name": self.name, "what": what, "value": value, "unit": unit, **more}
        if flops:
            tflops = 1e-12 * flops * value
            row |= {"tflops": tflops, "share_of_bf16_peak": tflops / self.peak}
        if self.device.type == "cuda":
            row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        self.rows.append(row)
        self.save()
        print(format_row(row), flush=True)

    def save(self, tests="not run"):
        content = {"environment": self.environment, "bf16_peak_tflops": self.peak, "tests": tests,
                   "seconds": LIMIT_S - self.left_s(), "rows": self.rows}
        Path(self.asked.out).write_text(json.dumps(common.as_json(content), indent=1))

    def images(self, split, n, side=32, classes=10):
        """CIFAR-10's where --data-dir is given, else random ones."""
        if self.asked.data_dir and side == 32:
            return data.stratified_subset(data.load("cifar10", split, self.asked.data_dir), n)
        return random_set(n, side, classes)

    def measure_peak(self):
        """TFLOP/s of a bf16 matrix product."""
        n = self.size(8192, 128)
        a, b = torch.randn(2, n, n, device=self.device, dtype=torch.bfloat16)

        def ten_products():
            for _ in range(10):
                a @ b

        seconds = min(self.seconds(ten_products)[0] for _ in range(5)) / 10
        self.peak = 2e-12 * n**3 / seconds


def format_row(row):
    """A line of a markdown table."""
    share = f"{100 * row['share_of_bf16_peak']:.1f} %" if "share_of_bf16_peak" in row else ""
    memory = f"{row['memory_gb']:.1f} GB" if "memory_gb" in row else ""
    value = row.get("error") or f"{row['value']:,.4g} {row['unit']}"
    return f"| {row['name']} | {row['what']} | {value} | {share} | {memory} |"


def flops_of(net, x, training=True):
    """Floating-point operations of a forward pass, and of a backward pass too, by image."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        outputs = net(x)
        if training:
            (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    net.zero_grad()
    return counter.get_total_flops() / len(x)


def last_row(run):
    """The history of the only checkpoint of a run, in its last epoch."""
    [history] = run.histories.values()
    return history[-1]


def bench_ddu(bench):
    """Training of WRN-28-10 with spectral norm, as the paper's, with and without --amp bf16; with
    CIFAR-10 a whole short run."""
    steps = bench.size(150, 1)
    width = bench.size(1.0, 0.05)
    net_argv = ["--dataset", "cifar10", "--width", width, "--batch-size", bench.size(128, 8)]
    train_set = bench.images("train", bench.size(50_000, 16))
    plain = ddu.make_network(bench.options(ddu, *net_argv, "--no-sn"), 10, train_set.shape)
    flops = flops_of(plain, torch.randn(8, *train_set.shape, device=bench.device))
    for amp in ("off", "bf16"):
        args = bench.options(ddu, *net_argv, "--amp", amp, "--epochs", 2, "--limit-steps", steps,
                             "--lr", 0.01, "--name", f"ddu-{amp}")
        bench.forget_memory()
        net = ddu.make_network(args, 10, train_set.shape)
        run = common.Run(args, fingerprints={})
        ddu.train(net, train_set, None, args, 1, run, "network")
        images = min(steps * args.batch_size, len(train_set))
        bench.add(f"WRN-28-{10 * width:g} training, spectral norm, amp {amp}",
                  images / last_row(run)["seconds"], "images/s", flops)
    if bench.asked.data_dir:
        folder = Path(bench.asked.data_dir)
        files = {"cifar100": "cifar-100-python", "svhn": "test_32x32.mat"}
        present = [name for name, file in files.items() if any(folder.rglob(file))]
        epochs = bench.size(8, 1)
        argv = [*net_argv, "--amp", "bf16", "--epochs", epochs, "--schedule", "one_cycle",
                "--data-dir", folder, "--device", bench.device.type, "--out-dir", bench.folder,
                "--no-plot", "--ood", *present]
        if bench.asked.tiny:
            argv += ["--limit-steps", 1]
        seconds, rows = bench.seconds(lambda: ddu.main([*map(str, argv)]))
        metrics = ("accuracy", "nll", "ece15", "auroc_density", "auroc_total")
        for row, key in itertools.product(rows, metrics):
            if row.get(key) is not None:
                sets = " against ".join(filter(None, (row["set"], row.get("against"))))
                bench.add(f"{epochs} epochs, {sets}", row[key], key, seconds=seconds)


def bench_forde(bench):
    """An epoch of FoRDE-PCA with ten ResNet-18, and of its deep ensemble."""
    members = bench.size(10, 2)
    steps = bench.size(40, 1)
    train_set = bench.images("train", bench.size(50_000, 16))
    splits = data.Splits(train_set, None, train_set, {}, None, {})
    argv = ["--dataset", "cifar10", "--members", members, "--width", bench.size(1.0, 0.05), "--lr",
            0.01, "--batch-size", bench.size(128, 8), "--epochs", 2, "--limit-steps", steps]
    dim = math.prod(train_set.shape)
    A = torch.eye(dim, device=bench.device)
    if not bench.asked.tiny:  # a basis of 3072 dimensions takes the CPU minutes
        args = bench.options(forde, *argv)
        seconds, basis = bench.seconds(lambda: forde.compute_basis(train_set, args))
        A = forde.metric_root(basis["eigenvectors"], basis["eigenvalues"]).to(bench.device)
        bench.add(f"basis of {dim} dimensions", seconds, "s")
    for method, amp in itertools.product(("deep_ensemble", "forde_pca"), ("off", "bf16")):
        for chunk in (members, members // 2, 1):
            bench.forget_memory()
            try:
                args = bench.options(forde, *argv, "--amp", amp, "--chunk", chunk, "--name",
                                     f"forde-{method}-{amp}-{chunk}")
                run = common.Run(args, fingerprints={})
                nets = forde.make_ensemble(args, 1, 10, train_set.shape)
                forde.train(nets, splits, A, method, args, 1, run)
                break
            except torch.OutOfMemoryError:
                nets = None
        whole = len(train_set) // args.batch_size / steps
        bench.add(f"{method}, {members} ResNet-18, {chunk} at once, amp {amp}",
                  last_row(run)["seconds"] * whole, "s an epoch")


def bench_proxy_distill(bench):
    """Training and evaluation of ResNet-50 on 224x224 images that are on the device already."""
    side = bench.size(224, 72)
    classes = bench.size(1000, 10)
    dataset = bench.images("train", bench.size(4096, 8), side, classes)
    dataset = dataclasses.replace(dataset, images=dataset.images.to(bench.device))
    batch = bench.size(256, 4)
    steps = bench.size(16, 1)
    for amp in ("off", "bf16"):
        args = bench.options(
            proxy_distill, "--dataset", "imagenet", "--model", bench.size("resnet50", "resnet18"),
            "--width", bench.size(1.0, 0.05), "--amp", amp, "--member-epochs", 2, "--batch-size",
            batch, "--limit-steps", steps, "--lr", 0.01, "--name", f"proxy-{amp}")
        net = proxy_distill.make_network(args, classes, dataset.shape, 1)
        x = torch.randn(4, *dataset.shape, device=bench.device)
        training_flops = flops_of(net, x)
        evaluation_flops = flops_of(net, x, training=False)
        bench.forget_memory()
        run = common.Run(args, fingerprints={})
        splits = data.Splits(dataset, None, dataset, {}, None, {})
        net = proxy_distill.train_member(splits, 1, args, run)
        bench.add(f"{args.model} training, batch {batch}, amp {amp}",
                  steps * batch / last_row(run)["seconds"], "images/s", training_flops)
        bench.forget_memory()

        def evaluate():
            return proxy_distill.collect_logits({"member": net}, dataset, args)

        seconds = min(bench.seconds(evaluate)[0] for _ in range(2))
        bench.add(f"{args.model} evaluation, amp {amp}", len(dataset) / seconds, "images/s",
                  evaluation_flops)


def bench_swag(bench):
    """A sample of WRN-28-10 from 25 iterates: drawn, and evaluated on 10,000 images."""
    own = bench.images("test", bench.size(10_000, 16))
    model = bench.size("wrn_28_10", "wrn_10_4")
    argv = ["--dataset", "cifar10", "--model", model, "--width", bench.size(1.0, 0.05)]
    for amp in ("off", "bf16"):
        args = bench.options(sle, *argv, "--amp", amp)
        bench.forget_memory()
        net = sle.make_network(args, own).eval()
        mean = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        rank = bench.size(25, 3)
        if amp == "off":
            moments = sle.swag_moments(
                mean + 1e-3 * torch.randn(rank, len(mean), device=bench.device))

            def draw():
                noise = torch.randn(8, len(mean), device=bench.device)
                return sle.swag_samples(*moments, noise, torch.randn(8, rank, device=bench.device))

            seconds = min(bench.seconds(draw)[0] for _ in range(3)) / 8
            bench.add(f"SWAG draw of {len(mean):,} weights, rank {rank}", 1e3 * seconds, "ms")
        study = sle.make_study(args, data.Splits(own, own, own, {}, None, {}), {})

        def evaluate():
            return sle.summarise(study, [sle.compute_outputs(study, net, "test")], [1])

        seconds = min(bench.seconds(evaluate)[0] for _ in range(2))
        bench.add(f"evaluation of a sample on {len(own):,} images, amp {amp}", seconds, "s")

    # WRN-16-4 on CIFAR-100, the paper's largest matrix.
    n = bench.size(48_000, 20)
    dim = bench.size(256, 4)
    classes = bench.size(100, 3)
    head = torch.nn.Linear(dim, classes).to(bench.device)
    theta = sle.flat_head(head).detach()
    last = sle.LastLayer(torch.randn(n, dim, device=bench.device).relu(), None)
    bench.forget_memory()
    seconds, spectrum = bench.seconds(lambda: sle.full_spectrum(theta, last))
    nonzero = len(spectrum.values) - dim - 1
    bench.add(f"Laplace: curvature of a last layer, {nonzero:,} eigenvalues", seconds, "s")


def bench_gbnn2d(bench):
    """The mixture of WRN-28-10's weights: learned, labelled, merged, on the CPU; and training."""
    n = bench.size(36_518_832, 4000)
    k = bench.size(6000, 16)
    mu, sigma = like_weights(n).T.contiguous()
    gradient = torch.rand(n)
    own = gbnn2d.CompressionOptions(k0=k, min_cluster=bench.size(20, 2))
    generator = torch.Generator().manual_seed(0)
    seconds, (_, merged, _) = bench.seconds(
        lambda: gbnn2d.compress(mu, sigma, gradient, own, generator))
    bench.add(f"mixture of {n:,} weights, K0 = {k}, merged to {len(merged.centre)}", seconds, "s")

    batch = bench.size(128, 4)
    args = bench.options(gbnn2d, "--dataset", "cifar100", "--width", bench.size(1, 0.05))
    net = gbnn2d.make_network(args, 100, (3, 32, 32)).cpu()
    shared = shared_network(net).to(bench.device).eval()
    images = torch.randn(batch, 3, 32, 32, device=bench.device)
    step = gbnn2d_step(shared, images.contiguous(memory_format=torch.channels_last),
                       torch.arange(batch, device=bench.device) % 100, args)
    bench.forget_memory()
    step()  # warm up
    steps = bench.size(30, 2)
    seconds, _ = bench.seconds(lambda: [step() for _ in range(steps)])
    bench.add(f"training of ResNet-18's {len(shared.posterior.label):,} shared weights, "
              f"batch {batch}", steps * batch / seconds, "images/s")


def run_tests(bench):
    """The last line of pytest on those that need CUDA, in a process of its own."""
    if bench.asked.tiny:
        return "not run"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
               "(gpu or cuda) and not script", "--continue-on-collection-errors", TESTS]
    try:
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True,
                              timeout=max(30, bench.left_s()))
    except subprocess.TimeoutExpired:
        return "not done in time"
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    return f"{(done.stdout.strip().splitlines() or ['no output'])[-1]} (status {done.returncode})"


ROWS = {"ddu": bench_ddu, "forde": bench_forde, "proxy_distill": bench_proxy_distill,
        "swag": bench_swag, "gbnn2d": bench_gbnn2d}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*ROWS, "tests"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--data-dir", help="with CIFAR-10's files (and CIFAR-100's, SVHN's)")
    parser.add_argument("--out", default="gpu.json", help="the rows as JSON")
    parser.add_argument("--tiny", action="store_true", help="small sizes, also on the CPU")
    asked = parser.parse_args(argv)
    unknown = set(asked.names) - set(names)
    if unknown:
        parser.error(f"no row {min(unknown)}; choose from {', '.join(names)}")
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny also runs on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asked, folder)
        bench.measure_peak()
        print(f"{bench.environment['device']}, torch {torch.__version__}: bf16 peak "
              f"{bench.peak:,.4g} TFLOP/s\n| row | what | value | of the bf16 peak | memory |\n"
              "|---|---|---|---|---|", flush=True)
        for bench.name in [name for name in asked.names or names if name != "tests"]:
            try:
                if bench.left_s() < LIMIT_S / 5:
                    raise TimeoutError("no time left; ask for this row by name")
                ROWS[bench.name](bench)
            except Exception as error:  # the other rows are worth having
                traceback.print_exc()
                bench.rows.append({"name": bench.name, "what": "failed",
                                   "error": f"{type(error).__name__}: {error}"})
        tests = run_tests(bench) if "tests" in (asked.names or names) else "not asked for"
    print(f"tests: {tests}")
    bench.save(tests)
    return bench.rows


if __name__ == "__main__":
    sys.exit(any("error" in row for row in main()))
