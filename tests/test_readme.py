"""README.md: its commands, its blocks of code, its links."""

import copy
import importlib
import re

import common
import ddu
import pytest
import torch
from conftest import REPO, SCRIPTS, run_script
from test_copy_paste import paste
from torchvision import models

README = (REPO / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
# Pairs of a script and its arguments.
COMMANDS = re.findall(r"^(?:python|torchrun.*) (\w+)\.py(.*?)(?: +#.*)?$", README, re.M)


@pytest.mark.parametrize("script, arguments", COMMANDS)
def test_every_command_is_understood(script, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = importlib.import_module(script).parse_args(arguments.split())
    assert args.run_dir.parts[:2] == ("runs", script)


def test_the_commands_for_own_images_run_one_after_another(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").symlink_to(image_folder)
    (tmp_path / "new_images").symlink_to(image_folder / "unknown" / "dog")
    torch.manual_seed(0)
    pretrained = models.get_model("resnet18", num_classes=1000)
    torch.save(models.get_model("resnet18", num_classes=3).state_dict(), "yours.pt")
    # Nothing is downloaded: the weights of torchvision are these.
    monkeypatch.setattr(common.models, "get_model", lambda name, weights: copy.deepcopy(pretrained))
    rows = {}
    for script, arguments in COMMANDS:
        if "--name" in arguments:
            argv = arguments.split() + ["--image-size", "32"]
            name = argv[argv.index("--name") + 1]
            if name == "small":
                argv += ["--epochs", "1"]
            again = run_script(script, *argv)
            assert rows.setdefault(name, again) == again  # also that of --eval
    assert list(rows) == ["mine", "tuned", "small", "yours"]
    folder = tmp_path / "runs" / "ddu" / "mine"
    header, *lines = (folder / "predictions.csv").read_text().splitlines()
    assert len(lines) == 4
    [table] = re.findall(r"^file, label.*?^```", README, re.M | re.S)
    for column in header.split(","):
        assert re.search(rf"\b{column}\b", table), column


SHORT = {"ddu": "", "forde": "--members 2",
         "gbnn2d": "--stoch-epochs 1 --final-epochs 1 --samples 2",
         "proxy_distill": "--members 2 --member-epochs 1 --mimo-epochs 1 --mimo 2",
         "swag_laplace_ensembles": "--members 2 --samples 4 --val-samples 2 --swag-epochs 2"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_images_of_more_than_64_pixels_stay_in_their_files(script, image_folder, tmp_path):
    unknown = f"folder:{image_folder}/unknown"
    argv = (f"--dataset folder:{image_folder} --image-size 72 --width .05 --epochs 1 --augment "
            f"--batch-size 12 --limit-steps 1 --ood {unknown} --predict {unknown} --name run "
            f"--workers 0 --out-dir {tmp_path} {SHORT[script]}").split()
    rows = run_script(script, *argv)
    assert len([row for row in rows if "against" in row]) > 0
    assert run_script(script, *argv, "--eval") == rows
    lines = (tmp_path / script / "run" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 9


@pytest.mark.parametrize("script, block", list(zip(SCRIPTS, PYTHON)), ids=SCRIPTS)
def test_the_block_of_a_method_runs_as_printed(script, block):
    assert block.startswith(f"# {script}.py: ")
    names = vars(paste(script))
    exec(block, names)
    if script == "ddu":
        assert names["is_unknown"].all()
    if script == "forde":
        assert all(net[0].weight.grad.abs().sum() > 0 for net in names["nets"])
    if script == "gbnn2d":
        assert names["shared"](torch.zeros(2, 9)).shape == (2, 10)
    if script == "proxy_distill":
        assert names["z"].grad.abs().sum() > 0
        assert names["scores"]["epistemic"].shape == (32,)
    if script == "swag_laplace_ensembles":
        torch.testing.assert_close(names["probs"].sum(1), torch.ones(90))


def test_the_block_of_an_own_network_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(ddu, "NETWORKS", dict(ddu.NETWORKS))
    exec(PYTHON[5], {"__name__": "mine"})
    rows = run_script("ddu", "--model", "mine", "--limit-train", 200, "--epochs", 1,
                      "--out-dir", tmp_path)
    assert rows[0]["n"] == 4000
    assert (tmp_path / "ddu" / "dirty_glyphs-mine-seed1").exists()


def test_links_lead_to_files_and_ci_finds_its_command():
    paths = re.findall(r'(?:src="|\]\()([^")]+)', README)
    assert "tests/RESULTS.md" in paths
    for path in paths:
        assert "://" in path or (REPO / path).exists(), path
    assert len(re.findall("^pip install .*pytest", README, re.M)) == 1  # as .ci/run expects
