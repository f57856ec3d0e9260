"""One network through all five scripts: each begins with the weights of a checkpoint of another."""

import contextlib
import importlib

import numpy as np
import pytest
import torch
from conftest import CPU, SCRIPTS
from PIL import Image

import common

SHAPE = (3, 32, 32)
SMALL = ("--model torchvision/shufflenet_v2_x0_5 --image-size 32 --batch-size 8 --epochs 1 "
         "--no-augment --no-plot --ood --name tiny").split()
OPTIONS = {"ddu": "", "forde": "--members 2 --methods deep_ensemble --shift none",
           "gbnn2d": "--stoch-epochs 1 --final-epochs 1 --k0 8 --mc 1",
           "proxy_distill": "--members 2 --member-epochs 1 --losses rkl_proxy --shift none",
           "swag_laplace_ensembles": "--members 1 --ensembles 1 --methods map swag --swag-epochs 2"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{script: its run directory}: each run begins with a checkpoint of the run before it."""
    folder = tmp_path_factory.mktemp("between")
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for label, name in enumerate(("cat", "dog")):
            (folder / "pets" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(100 * label, 100 * label + 100, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "pets" / split / name / f"{i}.png")
    weights = "none"
    run_dirs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x.py"])
        for script in SCRIPTS:
            argv = [*SMALL, *OPTIONS[script].split(), *CPU, "--weights", str(weights), "--dataset",
                    f"folder:{folder}/pets", "--out-dir", str(folder / "runs")]
            importlib.import_module(script).main(argv)
            run_dirs[script] = folder / "runs" / script / "tiny"
            weights = first_network(run_dirs[script])
    return run_dirs


def first_network(run_dir):
    """The first checkpoint of a run that holds a network alone; every script leaves one."""
    for path in sorted(run_dir.glob("*.pt")):
        with contextlib.suppress(common.UserError):
            names = common.read_state_dict(path)
            if all(name.startswith(("backbone.", "head.")) for name in names):
                return path
    pytest.fail(f"no network in {run_dir}")


def test_weights_takes_the_checkpoints_of_all_scripts(runs, monkeypatch):
    """The network that a script begins with is, bit for bit, that of each checkpoint."""
    monkeypatch.setattr("sys.argv", ["x.py"])
    files = [first_network(run_dir) for run_dir in runs.values()]
    for script in SCRIPTS:
        module = importlib.import_module(script)
        for path in files:
            args = module.parse_args([*SMALL, *CPU, "--weights", str(path)])
            backbone, head = common.backbone_and_head(args, module.NETWORKS, 2, SHAPE)
            net = torch.nn.ModuleDict({"backbone": backbone, "head": head})
            saved = common.read_state_dict(path)
            torch.testing.assert_close(dict(net.state_dict()), saved, rtol=0, atol=0)
