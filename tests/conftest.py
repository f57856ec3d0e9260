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
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
REPO = Path(__file__).resolve().parent.parent
PATHS = [str(REPO), str(REPO / "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [*PATHS, os.environ.get("PYTHONPATH")]))

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
    """With `-n 2`: the tests of a file with "story" in their names share a worker and a fixture."""
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
        self.out, self.err, self.result = (Path(folder) / f"{rank}.{k}"
                                           for k in ("out", "err", "result"))
        world = {} if size is None else {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        streams = self.out, self.err, self.result
        self.process = SERVER.Process(target=_in_child, args=(streams, world, function, args))
        self.process.start()

    def wait(self, timeout=300):
        """Wait for the end (killing the process when it takes too long); returns self."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
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


def _in_child(streams, world, function, args):
    for path, number in zip(streams, (1, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    os.environ.update({k: str(v) for k, v in world.items()})
    torch.set_num_threads(1)
    streams[2].write_bytes(pickle.dumps(function(*args)))


def in_double(batch):
    """A batch with its images, or the positions of its molecules, in float64; tokens stay."""
    if hasattr(batch, "images"):
        return batch._replace(images=batch.images.double())
    if hasattr(batch, "molecules"):
        graph = batch.molecules
        return batch._replace(molecules=graph._replace(positions=graph.positions.double()))
    return batch


def in_float64(script, replace=setattr):
    """Make the script's networks and all batches float64: what is left of a difference is not
    rounding. `replace` sets an attribute (monkeypatch.setattr undoes it)."""
    import data
    make = script.make_network
    replace(script, "make_network", lambda *args: make(*args).double())
    for loader in (data.Loader, data.SequenceLoader):
        replace(loader, "epoch", lambda *args, epoch=loader.epoch: map(in_double, epoch(*args)))


def _runner(name, wide):
    def run(*argv):
        import common
        script = importlib.import_module(name)
        if wide:
            in_float64(script)
        sys.argv = [f"{name}.py", *map(str, argv)]
        common.launch(script.main)

    run.__name__ = run.__qualname__ = f"run_{name}" + "_in_float64" * wide
    return run


# run_ddu(*argv): `python ddu.py ARGV` in this process; run_ddu_in_float64: in_float64
globals().update((run.__name__, run) for script in SCRIPTS for wide in (False, True)
                 for run in [_runner(script, wide)])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_ranks(folder, size, function, *args, each=None):
    """`size` processes with one process group to be; `each(rank)` gives further arguments."""
    port = free_port()
    return [Child(folder, function, *args, *(each(r) if each else ()), rank=r, size=size, port=port)
            for r in range(size)]


def wait_for(condition, timeout=200, what="condition"):
    """Poll until `condition()` is true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"no {what} within {timeout} s")
        time.sleep(0.005)


def strict_json(path):
    """The content of a JSON file without NaN or infinity."""
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def snapshot(folder):
    """Every file below `folder` by its relative path, but for locks."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*")
            if p.is_file() and p.name != ".lock"}


def leaves(tree, path=""):
    """(path, tensor) of the numbers and tensors in nested dicts and lists."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (int, float, torch.Tensor)):
        yield path, torch.as_tensor(tree)


def assert_same_checkpoints(a, b):
    """Two checkpoints agree bit for bit in all but what names the run and measures time."""
    a, b = (torch.load(p, weights_only=True) for p in (a, b))
    for state in (a, b):
        del state["identity"]
        state["history"] = [{k: v for k, v in row.items() if k != "seconds" and "_per_s" not in k}
                            for row in state["history"]]
    left, right = dict(leaves(a)), dict(leaves(b))
    assert left.keys() == right.keys() and len(left) > 3
    assert not [key for key, value in left.items() if not torch.equal(value, right[key])]


@pytest.fixture
def ranks(tmp_path):
    """ranks(function, *args, size=2): what `function` returns in each of `size` processes."""
    def run(function, *args, size=2):
        children = start_ranks(tmp_path, size, function, *args)
        for child in children:
            child.process.join(300)
        return [child.value() for child in children]

    return run


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A --data-dir with the real data sets that lie in shared/data beside the checkout; one for all
    workers of pytest-xdist."""
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

    4 classes, 121 training images (109 after the split: with a global batch of 36 the last has one
    image, so that the second of two processes gets none), 20 test images, all 64x64.
    """
    folder = tmp_path_factory.mktemp("small_data")
    root, rng = folder / "tiny-imagenet-200", np.random.default_rng(0)
    names = [f"n0000000{k}" for k in range(4)]

    def write(path, label):
        y, x = np.mgrid[:64, :64] / 64
        wave = np.sin(2 * np.pi * ((label + 1) * (x if label % 2 else y) + rng.random()))
        image = 128 + 60 * wave[..., None] * rng.random(3) + 12 * rng.standard_normal((64, 64, 3))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, compress_level=1)

    for k, name in enumerate(names):
        for i in range(31 if k == 0 else 30):
            write(root / "train" / name / "images" / f"{name}_{i}.png", k)
    rows = [(f"val_{i}.png", i % 4) for i in range(20)]
    for file, k in rows:
        write(root / "val" / "images" / file, k)
    notes = "".join(f"{file}\t{names[k]}\t0\t0\t63\t63\n" for file, k in rows)
    (root / "val" / "val_annotations.txt").write_text(notes)
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    (folder / "odd").mkdir()
    for i in range(20):
        pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "odd" / f"{i}.png", compress_level=1)
    return folder
