"""common.py: metrics, and the few lines that make a run trustworthy.

Shared by the five scripts; no model, no loss, nothing of one paper. Three parts:

  Metrics      accuracy, NLL, Brier, calibration, ensemble decomposition, OOD detection, rejection,
               temperature: pure functions on tensors, Python floats out, `ValueError` on bad input.
  Processes    torchrun or a single process in one code path; seeding; exact sharded evaluation;
               batch norm and dropout that do not depend on the number of processes.
  Runs         the shared command line, the run directory, atomic checkpoints, results, signals.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class UserError(ValueError):
    """A mistake that the user can mend; `run_script` shows it as one line, exit status 2."""


from common_metrics import *  # noqa

# ---- Processes ----------------------------------------------------------------------------------


class World(NamedTuple):
    """This process among `size`: global `rank`, `local_rank` on its machine, its device."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_world(device="auto") -> World:
    """Join the process group that torchrun describes (RANK, LOCAL_RANK, WORLD_SIZE), if any.

    `device`: auto (a GPU if there is one), cpu, cuda, or cuda:N (single process). CPU tensors
    travel by gloo and GPU tensors by nccl, so small decisions never wait for the GPU.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device {device}: not a device; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda":
        index = chosen.index if chosen.index is not None and size == 1 else local_rank
        if index >= torch.cuda.device_count():
            raise UserError(f"--device {device}: GPU {index} is asked for, this machine has "
                            f"{torch.cuda.device_count()}; start fewer processes or use "
                            "--device cpu")
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise UserError(f"--device {device}: use auto, cpu, cuda or cuda:N")
    if size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    return World(rank, local_rank, size, chosen)


@contextlib.contextmanager
def main_first(world):
    """Let one process of each machine do the block (a download, a cache) before the others."""
    if world.size > 1 and world.local_rank:
        dist.barrier()
    yield
    if world.size > 1 and not world.local_rank:
        dist.barrier()


def barrier(world):
    """Wait for all processes."""
    if world.size > 1:
        dist.barrier()


def derive_seed(seed, *counters) -> int:
    """One 63-bit seed from (seed, epoch, step, rank, ...), well mixed: neighbours share nothing."""
    return int(np.random.SeedSequence([seed, *counters]).generate_state(1, np.uint64)[0] >> 1)


def seed_all(seed, *counters):
    """Seed Python, NumPy and torch (all devices) from (seed, *counters); the same on all ranks."""
    value = derive_seed(seed, *counters)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def all_reduce(tensor, world) -> Tensor:
    """Sum `tensor` over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_rows(rows, index, n, world) -> Tensor:
    """Put the rows [b, ...] that each process computed for examples `index` [b] in their places.

    Returns [n, ...] on the CPU of every process, exactly one row an example however many processes
    there are; raises RuntimeError if an example is missing or came twice.
    """
    rows, index = concat_rows(rows.cpu(), world), concat_rows(index.cpu(), world)
    if len(index) != n or not torch.equal(index.sort().values, torch.arange(n)):
        raise RuntimeError(f"evaluation returned {len(index)} rows for {n} examples")
    placed = torch.empty_like(rows)
    placed[index] = rows
    return placed


def concat_rows(rows, world) -> Tensor:
    """The rows [b, ...] of all processes, in rank order; b may differ from process to process."""
    if world.size == 1:
        return rows
    counts = torch.zeros(world.size, dtype=torch.long)
    counts[world.rank] = len(rows)
    dist.all_reduce(counts)
    padded = torch.cat([rows, rows.new_zeros(int(counts.max()) - len(rows), *rows.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded)
    return torch.cat([g[:n] for g, n in zip(gathered, counts.tolist())])


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # every process's loss depends on every process's x
        return _AllReduceSum.apply(grad.contiguous())


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the global batch on any device, differentiable twice.

    torch's SyncBatchNorm refuses CPU tensors; this is the same function for gloo processes. Two
    passes (mean, then centred second moment), so float32 does not cancel.
    """

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        count = _AllReduceSum.apply(x.new_tensor(x.numel() / x.shape[1]))
        mean = _AllReduceSum.apply(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        var = _AllReduceSum.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var * (count / (count - 1)), momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


def sync_batch_norm(net, world):
    """Give `net` batch statistics over the global batch: world size must not change the result."""
    if world.size == 1:
        return net
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
    return net


class Dropout(nn.Dropout):
    """Dropout whose mask is drawn for the global batch; each process uses its own rows of it.

    With the same seed on all ranks the masks do not depend on the number of processes (exactly so
    when the batch divides by it).
    """

    def forward(self, x):
        if not self.training or self.p == 0 or not dist.is_initialized():
            return super().forward(x)
        rank, size, rows = dist.get_rank(), dist.get_world_size(), len(x)
        mask = F.dropout(x.new_ones(rows * size, *x.shape[1:]), self.p)
        return x * mask[rank * rows:(rank + 1) * rows]


# ---- Runs ---------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_common_arguments(parser, datasets):
    """The options that all five scripts spell alike. None means: take it from PRESETS[dataset]."""
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--dataset", default=None, metavar="NAME",
        help=f"training set; alone it reproduces the paper's setting for it: {', '.join(datasets)}")
    add("--data-dir", default="data", help="where data sets lie or are downloaded to")
    add("--out-dir", default="runs", help="run directories are made under OUT_DIR/<script>/")
    add("--name", default=None, help="name of the run directory (default: made from the options)")
    add("--seed", type=int, default=1, help="seed of initialisation, split, order and augmentation")
    add("--epochs", type=int, help="passes over the training set")
    add("--batch-size", "-b", type=int,
        help="GLOBAL batch size B: the same whatever the number of processes, which must divide it")
    add("--lr", type=float, help="initial learning rate; keep it when the number of GPUs changes")
    add("--width", type=float, help="multiplies the network's channels; 1 is the paper's network")
    add("--amp", choices=["off", "bf16"], help="bf16: autocast the network")
    add("--compile", action=flag, help="torch.compile the network (pays on GPUs after a minute)")
    add("--workers", type=int, default=4, help="decoding processes for streamed image folders")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--eval", action="store_true", help="evaluate the finished run of these options")
    add("--resume", default="auto", metavar="{auto,never,PATH}",
        help="auto: go on from this run's own checkpoint; never: start anew; PATH: from that file")
    add("--limit-steps", type=int, metavar="N", help="end each epoch after N steps")
    add("--plot", action=flag, default=True, help="draw the pictures (needs matplotlib)")
    add("--quiet", action="store_true", help="print the final table only")


def resolve_arguments(args, presets, default_dataset):
    """Fill options left at None from `presets`: {"": for all, dataset: what differs there}."""
    args.dataset = args.dataset or default_dataset
    preset = {**presets[""], **presets.get(args.dataset, {})}
    for key, value in preset.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    positive = {"epochs": 0, "batch_size": 1, "limit_steps": 1, "width": 0.01, "lr": 0.0}
    for key, least in positive.items():
        value = getattr(args, key)
        if value is not None and not (least <= value < math.inf):
            raise UserError(f"--{key.replace('_', '-')} {value}: must be at least {least}")
    if not 0 <= args.seed < 2**31:
        raise UserError(f"--seed {args.seed}: must be between 0 and 2**31 - 1")
    return args


def check_batch(args, world):
    """Refuse a global batch that does not divide by the number of processes."""
    if args.batch_size % world.size:
        raise UserError(f"--batch-size {args.batch_size} is the global batch and does not divide "
                        f"by {world.size} processes; use a multiple of {world.size}")


def first_line(error) -> str:
    """The first line of an exception's message, shortened; its type where it has none."""
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def _replacing(path):
    """Open a temporary file beside `path`; on success sync it and put it in the place of `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path, text):
    """Write a text file atomically: a reader sees the old one or the new one, whole."""
    with _replacing(path) as file:
        file.write(text.encode())


def load_arrays(path, names) -> dict:
    """The arrays `names` of an .npz file; UserError if it is absent, damaged, or lacks one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except KeyError as error:
        raise UserError(f"{path} has no array {error}; it needs {', '.join(names)}") from None
    except Exception:  # numpy raises many kinds for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None


def save_arrays(path, arrays):
    """Write {name: tensor} as an .npz file, atomically."""
    with _replacing(path) as file:
        np.savez(file, **{name: np.asarray(array) for name, array in arrays.items()})


def to_json(value):
    """Plain JSON of nested dicts, lists, numbers, tensors, paths; NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def write_json(path, value):
    """Write `value` as strict JSON, atomically."""
    write_text(path, json.dumps(to_json(value), indent=1, allow_nan=False) + "\n")


def save_checkpoint(path, state):
    """Write tensors and plain Python atomically: killed at any time, `path` is whole, old or new."""
    with _replacing(path) as file:
        torch.save(state, file)


def load_checkpoint(path, same=None):
    """Read a checkpoint to the CPU; raise UserError if it is absent, damaged, or of other options.

    `same`: the options that must equal those stored under "config".
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}; train first (the same command without "
                        "--eval)") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{path} cannot be read as a checkpoint ({first_line(error)}); delete it "
                        "to start anew") from None
    if not isinstance(state, dict) or "config" not in state:
        raise UserError(f"{path} is not a checkpoint of this project; give another path or "
                        "delete it")
    if same is not None:
        saved, now = state["config"], to_json(same)
        differing = sorted(k for k in {*saved, *now} if saved.get(k) != now.get(k))
        if differing:
            shown = ", ".join(f"{k} ({saved.get(k)} there, {now.get(k)} now)" for k in differing)
            raise UserError(f"{path} was made with other options: {shown}; use the same options, "
                            "another --name, or --resume never")
    return state


class Stopped(Exception):
    """Raised after a requested stop, once the state is saved; `run_script` exits 128 + signal."""

    def __init__(self, signum, where):
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} {where}; the same command goes on from there")
        self.status = 128 + signum


class StopSignals:
    """SIGTERM and SIGINT ask for a stop after the step; a second SIGINT stops at once.

    Several processes agree before they stop, every 10 steps, by a CPU tensor: no GPU sync.
    """

    def __enter__(self):
        self.signum, self.previous = 0, {}
        for signum in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
                self.previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_):
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _note(self, signum, _frame):
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

    def asked(self, world, step=0) -> int:
        """The signal that asks for a stop (0: none), agreed on by all processes."""
        if world.size > 1:
            if step % 10:
                return 0
            agreed = torch.tensor(self.signum)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            return int(agreed)
        return self.signum


class Run:
    """A run directory: args.json, log.jsonl (an object an epoch), last.pt, results.json, pictures.

    Only the main process writes. `config` holds the options that make the result; it is stored in
    every checkpoint and compared on loading.
    """

    def __init__(self, args, script, name, config, world):
        self.directory = Path(args.out_dir) / script / name
        self.config, self.world, self.quiet = to_json(config), world, args.quiet
        self.checkpoint = self.directory / "last.pt"
        own = args.resume in ("auto", "never")
        self.resume_from = self.checkpoint if own else Path(args.resume)
        self.fresh = args.resume == "never" and not args.eval
        self.history = []

    def open(self):
        """Make the directory and write args.json (refusing a path that cannot be a directory)."""
        if self.world.is_main:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                write_json(self.directory / "args.json", self.config)
            except OSError as error:
                raise UserError(f"cannot write to {self.directory} ({error.strerror}); choose "
                                "another --out-dir or --name") from None
        self.say(f"run directory {self.directory}")

    def say(self, text):
        """Print on the main process, unless --quiet."""
        if self.world.is_main and not self.quiet:
            print(text, flush=True)

    def load(self, required=False):
        """The state to go on from, or None. Its config must equal this run's."""
        explicit = self.resume_from != self.checkpoint
        if not required and not explicit and (self.fresh or not self.checkpoint.exists()):
            return None
        state = load_checkpoint(self.resume_from, same=self.config)
        self.history = state.get("history", [])
        return state

    def log(self, epoch, epochs, **row):
        """Note an epoch for log.jsonl (written with the next checkpoint) and print it."""
        row = {"epoch": epoch, **row, "peak_memory_gb": peak_memory_gb(self.world)}
        self.history.append(row)
        left = row["seconds"] * (epochs - epoch)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in ("epoch", "seconds"))
        self.say(f"epoch {epoch}/{epochs}  {shown}  {left:.0f} s left")

    def save(self, **state):
        """Write last.pt and log.jsonl; both tell of the same epochs."""
        if self.world.is_main:
            save_checkpoint(self.checkpoint,
                            {"config": self.config, "history": self.history, **state})
            lines = "".join(json.dumps(to_json(row)) + "\n" for row in self.history)
            write_text(self.directory / "log.jsonl", lines)

    def results(self, metrics, timing, **more):
        """Write results.json and return its content."""
        content = to_json({"config": self.config, "metrics": metrics, "timing": timing,
                           "environment": environment(self.world), **more})
        if self.world.is_main:
            write_json(self.directory / "results.json", content)
        return content


def environment(world) -> dict:
    """What a reader needs to repeat a number: commit, versions, device, processes."""
    here = Path(__file__).resolve().parent

    def git(*words):
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "-uno"))
    except OSError:
        commit, dirty = None, None
    cuda = world.device.type == "cuda"
    return {"commit": commit, "uncommitted_changes": dirty, "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "processes": world.size,
            "device": torch.cuda.get_device_name(world.device) if cuda else platform.machine(),
            "threads": torch.get_num_threads(), "peak_memory_gb": peak_memory_gb(world)}


class Stopwatch:
    """Wall seconds since it was made; waits for the GPU when read."""

    def __init__(self, device):
        self.device, self.start = device, time.perf_counter()

    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start


def device_memory(world) -> int:
    """Bytes of memory of the process's device."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_gb(world) -> float:
    """Peak memory in GB: the allocator's on a GPU, the process's resident set on a CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def check_finite(losses, first_step, lr_at):
    """Raise UserError for the first non-finite loss of an epoch, by step: one sync an epoch."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise UserError(f"loss {losses[i].item()} at step {first_step + i} with learning rate "
                        f"{lr_at(first_step + i):g}; the last good checkpoint is kept. Lower --lr")


def progress(batches, total, label, quiet, world):
    """tqdm on the main process of a terminal; otherwise the batches as they are."""
    if quiet or not world.is_main or not sys.stderr.isatty():
        return batches
    from tqdm import tqdm
    return tqdm(batches, total=total, desc=label, leave=False)


def format_table(header, rows) -> str:
    """Plain text table: first column left, the others right; None is an empty cell."""
    cells = [[("" if c is None else str(c)) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                       for i, (c, w) in enumerate(zip(row, widths))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def pyplot():
    """matplotlib.pyplot for files, or None after one line that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def run_script(main):
    """Run main(); a UserError is one line and exit status 2, a requested stop 128 + signal."""
    status = 0
    try:
        main()
    except (UserError, Stopped) as problem:
        kind = "" if isinstance(problem, Stopped) else "error: "
        print(f"{Path(sys.argv[0]).name}: {kind}{' '.join(str(problem).split())}", file=sys.stderr)
        status = getattr(problem, "status", 2)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(status)
