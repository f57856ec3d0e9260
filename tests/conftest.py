"""What the tests share: one thread, the repository on the path, real processes, data to train on.

Processes come from a fork server that has imported the scripts already: each is a process of its
own, with its own signals, streams and exit status, but starts in a fraction of a second.
"""

import fcntl
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
REPO = Path(__file__).resolve().parent.parent
PATHS = [str(REPO), str(REPO / "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.getenv("PYTHONPATH")])])

import numpy as np  # noqa: E402  after the thread count is set
import pytest  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

torch.set_num_threads(1)

SERVER = multiprocessing.get_context("forkserver")
SCRIPTS = ("ddu", "forde", "gbnn2d", "proxy_distill", "swag_laplace_ensembles")
SERVER.set_forkserver_preload(["pytest", "ddu"])
CPU = ["--device", "cpu"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file with "story" in their names share a worker and a fixture."""
    from xdist.scheduler import LoadScopeScheduling

    class Stories(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0] if "story" in nodeid else nodeid

    return Stories(config, log)


class Child:
    """A process that runs `function(*args)`, its streams in files; SystemExit sets its status.

    `rank`, `size`, `port`: the variables that torchrun would set, if size is given.
    """

    def __init__(self, folder, function, *args, rank=0, size=None, port=None):
        files = [Path(folder) / f"{rank}.{name}" for name in ("out", "err", "result")]
        self.out, self.err, self.result = files
        variables = {}
        if size is not None:
            variables = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}",
                         "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": f"{port}"}
        self.process = SERVER.Process(target=_in_child, args=(files, variables, function, args))
        self.process.start()

    def wait(self, timeout=300):
        """Wait for the end (killing the process when it takes too long); returns self."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            pytest.fail(f"still running after {timeout} s; stderr: {self.stderr[-2000:]}")
        return self

    @property
    def status(self):
        return self.process.exitcode

    @property
    def stdout(self):
        return self.out.read_text()

    @property
    def stderr(self):
        return self.err.read_text()

    def value(self):
        """What the function returned; fails with its stderr if it did not return."""
        if self.wait().status != 0:
            pytest.fail(f"status {self.status}: {self.stderr[-3000:]}")
        return pickle.loads(self.result.read_bytes())


def _in_child(files, variables, function, args):
    out, err, result = files
    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    os.environ.update(variables)
    torch.set_num_threads(1)
    result.write_bytes(pickle.dumps(function(*args)))


def in_double(batch):
    """A batch with its images, or the positions of its molecules, in float64; tokens stay."""
    if hasattr(batch, "images"):
        return batch._replace(images=batch.images.double())
    if hasattr(batch, "molecules"):
        positions = batch.molecules.positions.double()
        return batch._replace(molecules=batch.molecules._replace(positions=positions))
    return batch


def in_float64(script, replace=setattr):
    """Make the script's networks and all batches float64, so that no difference is rounding;
    `replace` sets an attribute (monkeypatch.setattr undoes it)."""
    import common
    import data
    make_network = script.make_network
    replace(script, "make_network", lambda *args: make_network(*args).double())
    replace(common, "try_batch", lambda *args: None)  # which would give it float32
    for loader in (data.Loader, data.SequenceLoader):

        def epoch_in_float64(*args, epoch=loader.epoch):
            return map(in_double, epoch(*args))

        replace(loader, "epoch", epoch_in_float64)


def run_script(name, *argv):
    """`python NAME.py ARGV` in this process."""
    import common
    script = importlib.import_module(name)
    sys.argv = [f"{name}.py"] + [str(word) for word in argv]
    common.launch(script.main)


def run_in_float64(name, *argv):
    in_float64(importlib.import_module(name))
    run_script(name, *argv)


run_ddu = partial(run_script, "ddu")
run_ddu_in_float64 = partial(run_in_float64, "ddu")
run_gbnn2d_in_float64 = partial(run_in_float64, "gbnn2d")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_ranks(folder, size, function, *args, each=None):
    """`size` processes with one process group to be; `each(rank)` gives further arguments."""
    where = dict(size=size, port=free_port())
    each = each or (lambda rank: ())
    return [Child(folder, function, *args, *each(rank), rank=rank, **where) for rank in range(size)]


def wait_for(condition, timeout=200, what="condition"):
    """Poll until `condition()` is true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"no {what} within {timeout} s")
        time.sleep(0.005)


def refusal(function, *arguments, kind=None, **options):
    """The text, one line, of the UserError (or `kind`) that a call raises."""
    from common import UserError
    with pytest.raises(kind or UserError) as found:
        function(*arguments, **options)
    error = found.value
    text = str(error)
    assert "\n" not in text and "\0" not in text
    while error:  # frees the variables of the call, and with them the lock of a Run
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    return text


def strict_json(path):
    """The content of a JSON file without NaN or infinity."""
    return json.loads(Path(path).read_text(), parse_constant=pytest.fail)


def snapshot(folder):
    """Every file below `folder` by its relative path, but for locks."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def leaves(tree, path=""):
    """(path, tensor) of the numbers and tensors in nested dicts and lists."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (int, float, torch.Tensor)):
        yield path, torch.as_tensor(tree)


def assert_same_checkpoints(a, b):
    """Two checkpoints agree bit for bit in all but their inputs and what measures time."""
    states = []
    for path in (a, b):
        state = torch.load(path, weights_only=True)
        state.pop("inputs", None)
        for row in state["history"]:
            row.pop("seconds", None)
        states.append(dict(leaves(state)))
    assert len(states[0]) > 3
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.fixture
def ranks(tmp_path):
    """ranks(function, *args, size=2): what `function` returns in each of `size` processes."""
    def run(function, *args, size=2):
        return [child.value() for child in start_ranks(tmp_path, size, function, *args)]

    return run


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A --data-dir with the real data sets of ../shared/data, one for all workers of xdist."""
    unpack = REPO.parent / "shared" / "data" / "unpack.py"
    if not unpack.exists():
        pytest.skip("no real data: ../shared/data is absent")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "real_data"
    folder.mkdir(exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # what is there already is left alone
        subprocess.run([sys.executable, str(unpack), str(folder)], check=True,
                       stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A --data-dir with a tiny set of colour images in TinyImageNet's layout, and 20 odd images.

    4 classes, 121 training images (109 after the split: with a global batch of 36, the last one has
    37, which two processes share unequally), 20 test images, all 64x64.
    """
    folder = tmp_path_factory.mktemp("small_data")
    root = folder / "tiny-imagenet-200"
    rng = np.random.default_rng(0)
    names = [f"n0000000{k}" for k in range(4)]

    def save(path, pixels):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path, compress_level=1)

    def save_wave(path, label):
        """A wave with label + 1 periods, across or down, in a random colour."""
        position = np.mgrid[:64, :64][label % 2] / 64
        wave = np.sin(2 * np.pi * ((label + 1) * position + rng.random()))
        colour = rng.random(3)
        noise = rng.standard_normal((64, 64, 3))
        image = 128 + 60 * wave[..., None] * colour + 12 * noise
        save(path, image.clip(0, 255))

    for label, name in enumerate(names):
        for i in range(31 if label == 0 else 30):
            save_wave(root / "train" / name / "images" / f"{name}_{i}.png", label)
    notes = ""
    for i in range(20):
        save_wave(root / "val" / "images" / f"val_{i}.png", i % 4)
        notes += f"val_{i}.png\t{names[i % 4]}\t0\t0\t63\t63\n"
    (root / "val" / "val_annotations.txt").write_text(notes)
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    for i in range(20):
        save(folder / "odd" / f"{i}.png", rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    return folder
