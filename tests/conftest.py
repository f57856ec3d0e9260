"""What the tests share: one thread, real processes, folders of images.

Processes come from a fork server that has imported the scripts already: each is a process of its
own, with its own streams and exit status, but starts in a fraction of a second.
"""

import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

import numpy as np  # noqa: E402  after the thread count is set
import pytest  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

torch.set_num_threads(1)

SCRIPTS = ("ddu", "forde", "gbnn2d", "proxy_distill", "swag_laplace_ensembles")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "ddu"])


def run_script(name, *argv):
    """`python NAME.py ARGV` without pictures on the CPU, in this process; returns main()'s rows."""
    script = importlib.import_module(name)
    return script.main([str(word) for word in argv] + ["--device", "cpu", "--no-plot"])


class Child:
    """A process that runs `function(*args)`, with its streams in files.

    size: the number of processes that torchrun would have started, of which this is number `rank`.
    """

    def __init__(self, folder, function, *args, rank=0, size=1, port=0):
        files = [Path(folder) / f"{rank}.{name}" for name in ("out", "err", "result")]
        _, self.err, self.result = files
        variables = {}
        if size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.process = SERVER.Process(target=_in_child, args=(files, variables, function, args))
        self.process.start()

    def value(self, timeout=300):
        """What the function returned; fails with its stderr if it did not return in time."""
        self.process.join(timeout)
        status = self.process.exitcode  # None if it is still running
        if status != 0:
            self.process.kill()
            pytest.fail(f"status {status}: {self.err.read_text()[-3000:]}")
        return pickle.loads(self.result.read_bytes())


def _in_child(files, variables, function, args):
    out, err, result = files
    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    result.write_bytes(pickle.dumps(function(*args)))


def run_ranks(folder, function, *args, size=2):
    """What `function(*args)` returns in each of `size` processes of one process group to be."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    children = [Child(folder, function, *args, rank=rank, size=size, port=port)
                for rank in range(size)]
    return [child.value() for child in children]


def kill_after(child, path, timeout=200):
    """Kill a Child by SIGKILL as soon as `path` exists."""
    end = time.monotonic() + timeout
    while not Path(path).exists():
        if time.monotonic() > end or not child.process.is_alive():
            pytest.fail(f"no {path}: {child.err.read_text()[-2000:]}")
        time.sleep(0.005)
    child.process.kill()
    child.process.join()


def assert_equal_checkpoints(first, second):
    """Two files of tensors and plain values are equal bit for bit."""
    states = [torch.load(path, weights_only=True) for path in (first, second)]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)


def save_images(folder, classes, count, side, seed=0):
    """Write `count` PNG files of each class below FOLDER/CLASS: waves, noise and random colours."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            position = np.mgrid[:side, :side][label % 2] / side
            wave = np.sin(2 * np.pi * ((label + 1) * position + rng.random()))
            pixels = 128 + 60 * wave[..., None] * rng.random(3)
            pixels += 12 * rng.standard_normal((side, side, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(Path(folder) / name / f"{number}.png", compress_level=1)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A folder of one's own images of 40 x 40 pixels: train, test (3 classes), and unknown."""
    folder = tmp_path_factory.mktemp("images")
    classes = ("ant", "bee", "cat")
    save_images(folder / "train", classes, 12, 40)
    save_images(folder / "test", classes, 5, 40, seed=1)
    save_images(folder / "unknown", ("dog", "eel"), 4, 40, seed=2)
    return folder
