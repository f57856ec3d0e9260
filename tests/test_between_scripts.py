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
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x.py"])
        for script in SCRIPTS:
            argv = [*SMALL, *OPTIONS[script].split(), *CPU, "--weights", str(weights), "--dataset",
                    f"folder:{folder}/pets", "--out-dir", str(folder / "runs")]
            importlib.import_module(script).main(argv)
            found[script] = folder / "runs" / script / "tiny"
            weights = networks(found[script])[0]  # every script leaves one
    return found


def networks(run_dir):
    """The checkpoints of a run that hold a network alone, the first one first."""
    found = []
    for path in sorted(run_dir.glob("*.pt")):
        with contextlib.suppress(common.UserError):
            names = common.read_state_dict(path)
            if all(name.startswith(("backbone.", "head.")) for name in names):
                found.append(path)
    return found


def test_weights_takes_the_checkpoints_of_all_scripts(runs, monkeypatch):
    """The network that a script begins with is, bit for bit, that of each checkpoint."""
    monkeypatch.setattr("sys.argv", ["x.py"])
    files = [networks(run_dir)[0] for run_dir in runs.values()]
    for script in SCRIPTS:
        module = importlib.import_module(script)
        for path in files:
            args = module.parse_args([*SMALL, *CPU, "--weights", str(path)])
            backbone, head = common.backbone_and_head(args, module.NETWORKS, 2, SHAPE)
            saved = common.read_state_dict(path)
            own = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
            own |= {f"head.{name}": value for name, value in head.state_dict().items()}
            assert own.keys() == saved.keys()
            for name, value in own.items():
                assert torch.equal(value, saved[name]), name
