"""gbnn2d.py end to end: all stages, resuming, several processes, export, misuse."""

import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import Child, run_gbnn2d_in_float64, start_ranks
from PIL import Image
from test_runs import parse_command, snapshot, strict_json, usage_commands

import common
import gbnn2d

STAGES = ("det", "stoch", "clustered", "merged", "final")


@pytest.fixture
def small(tmp_path):
    """Options of a run of all stages in a few seconds: LeNet, a few steps a stage."""
    return ["--dataset", "glyphs", "--model", "lenet", "--epochs", "2", "--stoch-epochs", "1",
            "--final-epochs", "1", "--limit-steps", "6", "--k0", "40", "--mc", "2", "--bn-batches",
            "2", "--device", "cpu", "--no-plot", "--out-dir", str(tmp_path / "runs"), "--name",
            "run"]


def folder(options):
    return Path(options[options.index("--out-dir") + 1]) / "gbnn2d" / "run"


def named(options, name):
    options = list(options)
    options[options.index("--name") + 1] = name
    return options


def state_of(options, name, stage):
    path = folder(options).with_name(name) / stage / "last.pt"
    return torch.load(path, weights_only=True)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """refused(*argv): stderr of a start that must end with status 2, one line, no file changed."""
    def run(*argv):
        before = snapshot(tmp_path)
        monkeypatch.setattr(sys, "argv", ["gbnn2d.py", *map(str, argv)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            common.run_script(gbnn2d.main)
        err = capfd.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1, (stop.value.code, err)
        assert err.startswith("gbnn2d.py: error: ") and snapshot(tmp_path) == before
        return err

    return run


def test_all_stages_leave_their_files_and_eval_repeats_them(small, capfd):
    small = [o for o in small if o != "--no-plot"]
    metrics = gbnn2d.main(small)
    root = folder(small)
    assert {p.name for p in root.iterdir()} == {
        "args.json", "det", "stoch", "gmm", "final", "results.json", "compressed.pt", "plane.png",
        "weights.png"}
    for name in ("plane.png", "weights.png"):
        with Image.open(root / name) as image:
            greys = set(image.convert("L").resize((64, 32)).tobytes())
            assert image.width > 500 and len(greys) > 10
    results = strict_json(root / "results.json")
    assert results["metrics"] == common.to_json(metrics)
    wanted = {f"{stage}/{k}" for stage in STAGES for k in (
        "accuracy", "nll", "ece15", "brier", "nll_logits", "accuracy_votes",
        "glyphs_letters_auroc_entropy", "glyphs_letters_auroc_mutual_information")}
    wanted |= {"compression/bytes_ratio_mean_field", "compression/bytes_ratio_deterministic",
               "counts/outliers", "counts/ellipses", "counts/gaussians", "counts/weights"}
    assert wanted <= metrics.keys()
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["counts/inliers"] + metrics["counts/outliers"] == metrics["counts/weights"]
    assert metrics["compression/bytes_file"] == pytest.approx(metrics["compression/bytes"], rel=0.5)
    for stage in STAGES[1:]:  # the mean probability against single draws: Jensen
        assert metrics[f"{stage}/nll"] <= metrics[f"{stage}/nll_samples"] + 1e-9
    kept = {p: p.read_bytes() for p in root.rglob("last.pt")}
    assert gbnn2d.main([*small, "--eval", "--no-plot"]) == metrics
    assert gbnn2d.main([*small, "--no-plot"]) == metrics
    assert kept == {p: p.read_bytes() for p in kept}
    capfd.readouterr()
    loaded = gbnn2d.main(["--load", str(root / "compressed.pt"), *small[8:]])
    assert loaded["loaded/nll"] == pytest.approx(metrics["final/nll"], abs=1e-6)
    assert loaded["loaded/accuracy"] == metrics["final/accuracy"]


def test_the_last_stage_learns(small):
    """What the published trainer cannot: the loss of the shared network falls."""
    small = [*small, "--final-epochs", "12", "--lr-final", "0.05", "--tau-d", "1e-2", "--epochs",
             "4", "--limit-steps", "12"]
    metrics = gbnn2d.main(small)
    assert metrics["final/nll"] < metrics["merged/nll"]
    start = state_of(small, "run", "gmm")["codes"]["merged"]["centres"]
    state = state_of(small, "run", "final")["model"]
    assert torch.equal(state["centres"], start) and state["shift"].abs().max() > 1e-3


@pytest.mark.parametrize("stage", ["stoch", "final"])
def test_stopped_in_a_stage_and_resumed_equals_uninterrupted(small, monkeypatch, stage):
    metrics, real = gbnn2d.main(named(small, "calm")), gbnn2d.train_epoch

    def signalled(model, module, now, *rest):
        if now == stage:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, module, now, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(gbnn2d, "train_epoch", signalled)
        with pytest.raises(common.Stopped, match=f"of {stage} after step 1"):
            gbnn2d.main(small)
    assert state_of(small, "run", stage)["progress"]["step"] == 1
    assert gbnn2d.main(small) == metrics
    for part in ("det", "stoch", "final"):
        a, b = (state_of(small, name, part)["model"] for name in ("run", "calm"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_two_processes_equal_one(small, tmp_path):
    one, two = named(small, "one"), named(small, "two")
    more = ["--model", "resnet18", "--width", "0.02", "--batch-size", "20", "--ood"]
    children = [Child(tmp_path, run_gbnn2d_in_float64, *one, *more, rank=9)]
    children += start_ranks(tmp_path, 2, run_gbnn2d_in_float64, *two, *more)
    for child in children:
        assert child.wait().status == 0, child.stderr[-2000:]
    for stage in ("det", "stoch", "final"):
        a, b = (state_of(small, name, stage)["model"] for name in ("one", "two"))
        for k, v in a.items():
            difference = (v.double() - b[k].double()).abs().max()
            assert difference < 1e-7 * max(1.0, v.abs().max()), (stage, k)
    a, b = (strict_json(folder(small).with_name(name) / "results.json")["metrics"]
            for name in ("one", "two"))
    assert a["counts/gaussians"] == b["counts/gaussians"]
    assert all(a[f"{s}/nll"] == pytest.approx(b[f"{s}/nll"], abs=1e-5) for s in STAGES)


@pytest.mark.parametrize("more", [
    "--draw shared --blend mean", "--draw perweight --blend choose", "--gmm kmeans",
    "--stoch-kl 0 --sigma-map published", "--prior pretrained --prior-sd 0.05 --no-train-bn",
    "--keep-layers head conv1", "--amp bf16", "--model resnet18 --width 0.05 --grad-frac 0"])
def test_options(small, more):
    metrics = gbnn2d.main([*small, *more.split()])
    assert all(math.isfinite(v) for v in metrics.values())


def test_stages_one_by_one(small):
    assert {k.split("/")[0] for k in gbnn2d.main([*small, "--stage", "det"])} == {"det"}
    assert not (folder(small) / "stoch").exists()
    assert "stoch/nll" in gbnn2d.main([*small, "--stage", "stoch"])
    assert "merged/nll" in gbnn2d.main([*small, "--stage", "gmm"])
    whole = gbnn2d.main(small)
    assert gbnn2d.main(named(small, "other")) == whole


@pytest.mark.parametrize("argv, said", [
    ("--tau-w -1", "--tau-w"), ("--grad-frac 2", "--grad-frac"), ("--k0 40000", "--k0"),
    ("--stage nothing", "--stage"), ("--model nothing", "--model"), ("--mc 0", "--mc"),
    ("--chi2-level 1", "--chi2-level"), ("--compile", "--compile"),
    ("--depth 11 --model wide_resnet", "--depth"), ("--load nowhere.pt", "nowhere.pt"),
    ("--eval", "train first"), ("--dataset nothing", "nothing")])
def test_misuse_is_one_line_and_status_2(small, refused, argv, said):
    assert said in refused(*small, *argv.split())


def test_changed_options_name_themselves(small, refused):
    gbnn2d.main([*small, "--stage", "stoch"])
    assert "lr_mu" in refused(*small, "--lr-mu", "0.01")


def test_a_file_that_is_no_export(small, refused, tmp_path):
    gbnn2d.main([*small, "--stage", "det"])
    assert "--export" in refused(*small, "--load", folder(small) / "det" / "last.pt")


def test_the_commands_of_the_docstring_parse():
    parsed = [parse_command(line, (gbnn2d,)) for line in usage_commands(gbnn2d)]
    assert [a.dataset for a in parsed] == ["glyphs", "cifar100", "glyphs", "imagenet"]
    published = dict(model="resnet18", width=1, tau_w=0.2, grad_frac=0.01, tau_d=3.873e-4, mc=40,
                     min_cluster=20, epochs=200, batch_size=128, lr=0.1)
    assert published.items() <= vars(parsed[1]).items()
