"""ddu.py end to end: every way to start, stop, resume, spread out, and misuse a run."""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (REPO, Child, free_port, refusal, run_ddu, run_ddu_in_float64, start_ranks,
                      wait_for)
from PIL import Image
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import common
import ddu
import forde
import gbnn2d
import proxy_distill
import swag_laplace_ensembles
from common import UserError

CPU = ["--device", "cpu"]
METRICS = ("auroc", "aupr_in", "aupr_out", "fpr95")
SCORES = ("density", "entropy", "energy", "max_prob", "gmm_entropy", "class_mahalanobis",
          "mahalanobis", "relative_mahalanobis", "entropy_scaled", "max_prob_scaled",
          "energy_scaled")


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def snapshot(folder):
    """Every file below `folder` by its relative path."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file()}


def small_options(data, out):
    return ["--dataset", "tiny_imagenet", "--data-dir", str(data), "--ood", f"folder:{data}/odd",
            "--model", "wide_resnet", "--depth", "10", "--width", "0.02", "--batch-size", "36",
            "--epochs", "3", "--lr", "0.05", "--out-dir", str(out), "--name", "run", "--no-plot",
            *CPU]


@pytest.fixture
def small(small_data, tmp_path):
    """Options of a run that takes a second and has all that makes runs differ: SN, batch norm,
    dropout, augmentation, momentum, and a last batch of one image. 3 epochs of 4 steps."""
    return small_options(small_data, tmp_path / "runs")


def run_of(options):
    """The run directory of `small` options."""
    out, name = (options[options.index(flag) + 1] for flag in ("--out-dir", "--name"))
    return Path(out) / "ddu" / name


def with_options(options, **changes):
    """`options` with the value of --key replaced or added."""
    options = list(options)
    for key, value in changes.items():
        flag = "--" + key.replace("_", "-")
        if flag in options:
            options[options.index(flag) + 1] = str(value)
        else:
            options += [flag, str(value)]
    return options


def leaves(tree, path=""):
    """(path, tensor) of the numbers and tensors in nested dicts and lists."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (int, float, torch.Tensor)):
        yield path, torch.as_tensor(tree)


def assert_same_weights(a, b):
    """Bit for bit: model (with buffers), optimiser, progress and the log of two last.pt files."""
    a, b = (torch.load(p, weights_only=True) for p in (a, b))
    for part in ("model", "optimiser", "progress"):
        left, right = (dict(leaves(state[part])) for state in (a, b))
        assert left.keys() == right.keys() and len(left) > 3
        for key, value in left.items():
            assert torch.equal(value, right[key]), (part, key)
    timing = ("seconds", "images_per_s", "peak_memory_gb")
    left, right = ([{k: v for k, v in row.items() if k not in timing} for row in state["history"]]
                   for state in (a, b))
    assert left == right


def assert_close_weights(a, b, atol):
    a, b = (torch.load(p, weights_only=True)["model"] for p in (a, b))
    assert a.keys() == b.keys()
    worst = max((a[k].double() - b[k].double()).abs().max().item() for k in a)
    assert worst <= atol, worst


def assert_close_metrics(a, b, atol=2e-3):
    """Metrics of two runs whose weights differ by rounding."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if key == "jitter" or "fraction" in key or "fpr95" in key:
            continue  # ladders and thresholds: one example can flip
        scale = max(1.0, abs(value)) if key in ("density_threshold", "temperature") else 1.0
        steps = "ece" in key or "accuracy" in key  # one of 20 examples can change its class or bin
        assert abs(b[key] - value) <= (0.05 if steps else atol * scale), key


# ---- A whole run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default data set and network, but narrow and short: (options, run directory, metrics)."""
    out = tmp_path_factory.mktemp("default")
    options = ["--out-dir", str(out), "--width", "0.05", "-mod", "--epochs", "2", "-b", "64",
               "--limit-steps", "4", *CPU]
    metrics = ddu.main(options)
    return options, out / "ddu" / "dirty_glyphs-resnet18-sn3-mod-w0.05-seed1", metrics


def test_default_run_leaves_its_files(default_run):
    _, folder, _ = default_run
    pictures = {"uncertainty.png", "reliability.png"}
    assert {p.name for p in folder.iterdir()} == pictures | {
        "args.json", "log.jsonl", "last.pt", "results.json", "gaussians.pt"}
    for name in pictures:
        with Image.open(folder / name) as image:
            greys = set(image.convert("L").resize((64, 32)).tobytes())
            assert image.width > 500 and len(greys) > 10  # not a blank page
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all({"loss_nats", "accuracy", "lr", "images_per_s", "seconds"} <= row.keys()
               for row in rows)
    assert 2.0 < rows[0]["loss_nats"] < 3.0 and 0 <= rows[0]["accuracy"] <= 1


def test_default_run_results(default_run):
    _, folder, metrics = default_run
    results = strict_json(folder / "results.json")
    assert {"config", "metrics", "timing", "environment"} <= results.keys()
    assert results["metrics"] == common.to_json(metrics)
    parts, regions = ("glyphs", "glyphs_ambiguous", "glyphs_letters"), ("clean", "ambiguous", "ood")
    named = {"test/accuracy", "test/nll", "test/ece15", "glyphs_letters/auroc_density",
             "glyphs_letters/auroc_entropy", "glyphs_letters/auroc_energy",
             "glyphs_ambiguous/auroc_entropy", "glyphs_ambiguous/auroc_density", "temperature",
             "jitter", "density_threshold", "examples_per_class_min"}
    named |= {f"{part}/{metric}{suffix}" for part in ("test", "val", *parts[:2])
              for metric in ("accuracy", "nll", "brier", "ece15", "mce15", "adaptive_ece15")
              for suffix in ("", "_scaled")}
    named |= {f"{row}/{metric}_{score}" for metric in METRICS for score in SCORES
              for row in ("glyphs_letters", "glyphs_letters_vs_glyphs", "glyphs_ambiguous")}
    named |= {f"{part}/fraction_{region}" for part in parts for region in regions}
    assert named <= metrics.keys()
    assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in metrics.values())
    fractions = [k for k in metrics if re.search("accuracy|ece15|auroc|aupr|fpr95|fraction", k)]
    assert all(0 <= metrics[k] <= 1 for k in fractions)
    for part in parts:
        assert sum(metrics[f"{part}/fraction_{k}"] for k in regions) == pytest.approx(1)
    both = (metrics["glyphs/accuracy"] + metrics["glyphs_ambiguous/accuracy"]) / 2
    assert metrics["test/accuracy"] == pytest.approx(both)  # parts of equal size
    assert metrics["temperature"] != 1 and metrics["val/nll_scaled"] < metrics["val/nll"]
    assert metrics["test/accuracy_scaled"] == metrics["test/accuracy"]
    assert results["timing"]["train_s"] > 0 and results["timing"]["evaluate_s"] > 0
    assert results["environment"]["processes"] == 1
    assert results["environment"]["torch"] == torch.__version__
    config = strict_json(folder / "args.json")
    assert results["config"] == config
    assert (config["dataset"], config["lr"], config["sn"]) == ("dirty_glyphs", 0.1, True)


def test_gaussians_file_is_what_was_evaluated(default_run):
    _, folder, metrics = default_run
    saved = torch.load(folder / "gaussians.pt", weights_only=True)
    assert saved["mean"].shape == (10, metrics["features"]) and saved["mean"].dtype == torch.float64
    assert saved["jitter"] == metrics["jitter"]
    assert saved["count"].min() == metrics["examples_per_class_min"]
    assert 14300 < saved["count"].sum() < 14500  # 16,000 less a tenth of the groups


def test_eval_gives_the_same_metrics(default_run):
    options, folder, metrics = default_run
    kept = {name: (folder / name).read_bytes() for name in ("last.pt", "log.jsonl", "args.json")}
    assert ddu.main([*options, "--eval", "--no-plot"]) == metrics
    assert kept == {name: (folder / name).read_bytes() for name in kept}


def test_second_start_finishes_without_retraining(default_run, monkeypatch):
    options, folder, metrics = default_run
    for name in ("results.json", "gaussians.pt"):
        (folder / name).unlink()  # as if killed between training and results

    def no_training(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(ddu, "train_epoch", no_training)
    assert ddu.main([*options, "--no-plot"]) == metrics
    assert strict_json(folder / "results.json")["timing"]["train_s"] > 0
    assert (folder / "gaussians.pt").exists()


def test_resume_never_trains_anew_and_is_repeatable(small):
    first = ddu.main(small)
    before = (run_of(small) / "last.pt").read_bytes()
    state = torch.load(run_of(small) / "last.pt", weights_only=True)
    state["model"] = {k: torch.zeros_like(v) for k, v in state["model"].items()}
    torch.save(state, run_of(small) / "last.pt")
    assert ddu.main(small) != first  # the file is what counts
    assert ddu.main([*small, "--resume", "never"]) == first
    assert len((run_of(small) / "last.pt").read_bytes()) == len(before)


def test_resume_from_another_file(small, tmp_path):
    metrics = ddu.main(small)
    elsewhere = with_options(small, name="elsewhere", resume=run_of(small) / "last.pt")
    assert ddu.main(elsewhere) == metrics
    assert ddu.main([*elsewhere, "--eval"]) == metrics


def test_quiet_prints_the_table_only(small, capfd):
    ddu.main([*small, "--quiet", "--plot"])
    out, err = capfd.readouterr()
    assert "AUROC" in out and "accuracy %" in out and err == ""
    assert not re.search(r"^(epoch|run directory|picture)", out, re.MULTILINE)


def test_one_line_an_epoch(small, capfd):
    ddu.main(small)
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3 and err == ""
    for word in ("1/3", "loss", "accuracy", "lr", "images_per_s", "peak_memory_gb", "s left"):
        assert word in lines[0]


def test_without_matplotlib_the_run_says_how_to_get_it(small, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ddu.main([*small, "--plot", "--epochs", "1"])
    err = capfd.readouterr().err
    assert err == "no pictures: matplotlib is not installed (pip install matplotlib)\n"
    assert (run_of(small) / "results.json").exists()


def test_singular_covariances_are_handled_and_reported(small):
    small = with_options(small, width=0.05, epochs=1)  # 32 features, 27 examples a class
    metrics = ddu.main(small)
    assert metrics["features"] > metrics["examples_per_class_min"] and metrics["jitter"] > 0
    assert all(math.isfinite(v) for v in metrics.values())
    fixed = ddu.main([*small, "--eval", "--jitter", "0.5"])
    assert fixed["jitter"] == 0.5


def test_match_published_takes_the_temperature_from_the_grid(small):
    metrics = ddu.main([*with_options(small, epochs=1), "--match-published"])
    assert metrics["temperature"] * 10 == pytest.approx(round(metrics["temperature"] * 10), abs=1e-9)
    assert 0.1 - 1e-9 <= metrics["temperature"] <= 10 + 1e-9


def test_bf16_runs_and_keeps_statistics_wide(small):
    metrics = ddu.main([*small, "--amp", "bf16"])
    assert all(math.isfinite(v) for v in metrics.values())
    state = torch.load(run_of(small) / "last.pt", weights_only=True)
    assert all(v.dtype in (torch.float32, torch.int64) for v in state["model"].values())


@pytest.mark.parametrize("more", [
    "--model resnet50 --width 0.02",
    "--model vgg16 --width 0.05 --no-sn",
    "--model resnet18 --width 0.05 --opt adam --lr 0.001",
    "--model wide_resnet --nesterov --priors empirical --no-augment"])
def test_other_networks_and_options(small, more):
    metrics = ddu.main([*small, *more.split(), "--epochs", "1", "--limit-steps", "2"])
    assert 0 <= metrics["odd/auroc_density"] <= 1
    assert all(math.isfinite(v) for v in metrics.values())


def test_narrow_shortcuts_do_not_corrupt_memory(small, tmp_path):
    """oneDNN's weight gradient of a strided 1x1 convolution of few channels, channels last, writes
    past its workspace (uxlfoundation/oneDNN issue 6035): a crash here, or worse."""
    options = with_options(small, epochs=1, batch_size=54, model="resnet50", width=0.03)
    options += ["--no-mod", "--no-sn"]
    assert Child(tmp_path, run_ddu, *options).wait().status == 0


# ---- Killed and resumed -------------------------------------------------------------------------


LONG = dict(batch_size=6, epochs=3)  # epochs of 19 steps


@pytest.fixture(scope="module")
def calm(small_data, tmp_path_factory):
    """(last.pt, metrics) of a LONG run that nobody disturbed."""
    options = with_options(small_options(small_data, tmp_path_factory.mktemp("calm")), **LONG)
    metrics = ddu.main(options)
    return run_of(options) / "last.pt", metrics


def epochs_done(folder):
    path = folder / "last.pt"
    return torch.load(path, weights_only=True)["progress"]["epoch"] if path.exists() else 0


def test_killed_and_restarted_equals_uninterrupted(small, calm, tmp_path):
    options, (expected, metrics) = with_options(small, **LONG), calm
    folder, last = run_of(options), 0
    for _ in range(2):
        child = Child(tmp_path, run_ddu, *options)
        wait_for(lambda: epochs_done(folder) > last or not child.process.is_alive(), what="epoch")
        time.sleep(0.05)  # into the next epoch
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.join()
        last = epochs_done(folder)
        assert child.status == -signal.SIGKILL and last < 3, child.stderr
    assert ddu.main(options) == metrics
    assert_same_weights(folder / "last.pt", expected)
    assert len((folder / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_mid_epoch_and_resumed_equals_uninterrupted(small, calm, tmp_path, number):
    options, (expected, metrics) = with_options(small, **LONG), calm
    folder = run_of(options)
    child = Child(tmp_path, run_ddu, *options)
    wait_for(lambda: epochs_done(folder) > 0 or not child.process.is_alive(), what="epoch")
    os.kill(child.process.pid, number)
    child.wait()
    assert child.status == 128 + number, child.stderr
    assert child.stderr.count("\n") == 1 and number.name in child.stderr
    state = torch.load(folder / "last.pt", weights_only=True)
    assert 0 < state["progress"]["step"] < 19 and 0 < state["progress"]["epoch"] < 3
    epoch, step = (state["progress"][k] for k in ("epoch", "step"))
    assert f"epoch {epoch + 1} after step {step}" in child.stderr
    assert not (folder / "results.json").exists()
    assert ddu.main(options) == metrics
    assert_same_weights(folder / "last.pt", expected)


def test_stop_signal_in_the_last_step_is_not_swallowed(small, monkeypatch):
    """A stop asked for during the very last step: the weights are saved, and the run does stop."""
    real = ddu.train_epoch

    def signalled(*args):
        done = real(*args)
        if args[3] == 2:  # the last epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(ddu, "train_epoch", signalled)
    with pytest.raises(common.Stopped):
        ddu.main(small)
    assert epochs_done(run_of(small)) == 3


def test_save_interval_keeps_the_result(small):
    metrics = ddu.main(small)
    sparse = with_options(small, name="sparse", save_interval=2)
    assert ddu.main(sparse) == metrics
    assert_same_weights(run_of(sparse) / "last.pt", run_of(small) / "last.pt")


# ---- Several processes --------------------------------------------------------------------------


def finish(children, status=0):
    for child in children:
        child.wait()
        assert child.status == status, child.stderr
        assert "Traceback" not in child.stderr and "Warning" not in child.stderr
    return children


@pytest.mark.parametrize("more", [
    "--model resnet18 --width 0.05",  # one image in the last batch: none for the second process
    "--model vgg16 --width 0.05 --no-sn -b 34",  # 7 images in the last batch
    "--model wide_resnet --dropout 0.3 --no-mod --limit-steps 3",
    "--model wide_resnet --dropout 0.3 -b 34"])
def test_two_processes_equal_one(small, tmp_path, more):
    """In float64, lest batch norm and leaky ReLU blow rounding up."""
    one, two = ([*with_options(small, name=name, epochs=1), *more.split()]
                for name in ("one", "two"))
    children = [Child(tmp_path, run_ddu_in_float64, *one, rank=9)]
    children += start_ranks(tmp_path, 2, run_ddu_in_float64, *two)
    finish(children)
    assert_close_weights(run_of(one) / "last.pt", run_of(two) / "last.pt", 1e-9)
    results = [strict_json(run_of(options) / "results.json") for options in (one, two)]
    assert [r["environment"]["processes"] for r in results] == [1, 2]
    assert_close_metrics(*(r["metrics"] for r in results), 1e-5)
    assert "AUROC" in children[1].stdout and children[2].stdout == ""  # one process prints
    a, b = (json.loads((run_of(options) / "log.jsonl").read_text()) for options in (one, two))
    assert a["loss_nats"] == pytest.approx(b["loss_nats"], abs=1e-5)
    assert a["accuracy"] == b["accuracy"]


def test_one_process_evaluates_the_run_of_two(small, tmp_path):
    finish(start_ranks(tmp_path, 2, run_ddu, *small))
    results = strict_json(run_of(small) / "results.json")
    assert_close_metrics(results["metrics"], common.to_json(ddu.main([*small, "--eval"])), 1e-4)


def test_stopped_with_two_processes_and_resumed(small, tmp_path):
    small = with_options(small, **LONG)
    calm, stopped = (with_options(small, name=name) for name in ("calm", "stopped"))
    finish(start_ranks(tmp_path, 2, run_ddu, *calm))
    children = start_ranks(tmp_path, 2, run_ddu, *stopped)
    wait_for(lambda: epochs_done(run_of(stopped)) > 0 or not children[1].process.is_alive(),
             what="epoch")
    os.kill(children[1].process.pid, signal.SIGTERM)  # one of the two: both must stop
    finish(children, 128 + signal.SIGTERM)
    assert epochs_done(run_of(stopped)) < 3
    finish(start_ranks(tmp_path, 2, run_ddu, *stopped))
    assert_same_weights(run_of(calm) / "last.pt", run_of(stopped) / "last.pt")


def test_two_machines_that_share_no_disk(small, tmp_path):
    """Only the main process writes; a second start still goes on from its checkpoint, on all."""
    def each(rank):
        return ["--out-dir", str(tmp_path / f"machine{rank}")]

    finish(start_ranks(tmp_path, 2, run_ddu, *small, each=each))
    last = tmp_path / "machine0" / "ddu" / "run" / "last.pt"
    before = last.read_bytes()
    finish(start_ranks(tmp_path, 2, run_ddu, *small, each=each))
    assert last.read_bytes() == before
    finish(start_ranks(tmp_path, 2, run_ddu, *small, "--eval", each=each))


def torchrun(options, **flags):
    words = [f"--{k}={v}" for k, v in {"master_addr": "127.0.0.1", **flags}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "ddu.py", *options]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def test_torchrun_on_one_machine_and_on_two_equals_one_process(small):
    # few steps: rounding grows by the step (see above for the exact comparison)
    one, two, nodes = (with_options(small, name=name, epochs=1, limit_steps=2)
                       for name in ("one", "two", "nodes"))
    jobs, port = [torchrun(two, nproc_per_node=2, master_port=free_port())], free_port()
    jobs += [torchrun(nodes, nnodes=2, nproc_per_node=1, node_rank=rank, master_port=port)
             for rank in (0, 1)]
    metrics = ddu.main(one)
    for job in jobs:
        out, err = job.communicate(timeout=400)
        assert job.returncode == 0, err[-3000:]
    for options in (two, nodes):
        assert_close_weights(run_of(one) / "last.pt", run_of(options) / "last.pt", 1e-4)
        results = strict_json(run_of(options) / "results.json")
        assert results["environment"]["processes"] == 2
        assert_close_metrics(common.to_json(metrics), results["metrics"])


# ---- Several networks ---------------------------------------------------------------------------


def test_ensemble(small):
    metrics = ddu.main([*small, "--ensemble", "2"])
    root = run_of(small).parent
    singles = [strict_json(root / f"run-seed{s}" / "results.json")["metrics"] for s in (1, 2)]
    results = strict_json(root / "run-seed1-ensemble2-runs1" / "results.json")
    assert results["metrics"] == common.to_json(metrics)
    assert singles[0] != singles[1] and metrics["test/nll"] == singles[0]["test/nll"]
    scores = ("predictive_entropy", "mutual_information")
    for key in ("test/accuracy", "test/nll", "test/ece15_scaled",
                *(f"odd/{metric}_{score}" for metric in METRICS for score in scores)):
        assert math.isfinite(metrics[f"ensemble/{key}"]), key
    # a convex loss: the mean of the probabilities is no worse than the members on average
    assert metrics["ensemble/test/nll"] <= np.mean([s["test/nll"] for s in singles]) + 1e-9
    assert not (root / "run").exists()
    assert ddu.main([*small, "--ensemble", "2", "--eval"]) == metrics


def test_runs_and_the_published_json(small, small_data):
    # training images of one class as the other set: not separable, so that every number differs
    images = small_data / "tiny-imagenet-200" / "train" / "n00000001" / "images"
    small = with_options(small, epochs=1, runs=2, ensemble=2, ood=f"folder:{images}")
    metrics = ddu.main([*small, "--published-json"])
    root = run_of(small).parent
    folder = root / "run-seed1-ensemble2-runs2"
    first = [strict_json(root / f"run-seed{s}" / "results.json")["metrics"] for s in (1, 3)]
    results = strict_json(folder / "results.json")
    for key in ("test/accuracy", "test/nll", "images/auroc_density"):
        values = [m[key] for m in first]
        assert metrics[key] == pytest.approx(np.mean(values))
        assert results["standard_error"][key] == pytest.approx(np.std(values, ddof=1) / 2**0.5)
    columns = ["accuracy", "ece", "m1_auroc", "m1_auprc", "m2_auroc", "m2_auprc", "t_ece",
               "t_m1_auroc", "t_m1_auprc", "t_m2_auroc", "t_m2_auprc"]
    files = {p.name for p in folder.glob("res_*.json")}
    stem = "res_wide_resnet_sn_3.0_mod_1"
    assert files == {f"{stem}_{kind}_tiny_imagenet_images.json"
                     for kind in ("softmax", "gmm", "ensemble")}
    sources = {"softmax": {"m1_auroc": "auroc_energy", "m1_auprc": "aupr_in_energy",
                           "m2_auroc": "auroc_entropy", "m2_auprc": "aupr_out_entropy",
                           "t_m2_auroc": "auroc_entropy_scaled"},
               "gmm": {"m1_auroc": "auroc_density", "m1_auprc": "aupr_in_density",
                       "m2_auroc": "auroc_gmm_entropy", "m2_auprc": "aupr_out_gmm_entropy",
                       "t_m1_auroc": "auroc_density"},
               "ensemble": {"m1_auroc": "auroc_mutual_information",
                            "m1_auprc": "aupr_out_mutual_information",
                            "m2_auroc": "auroc_predictive_entropy",
                            "m2_auprc": "aupr_out_predictive_entropy",
                            "t_m2_auroc": "auroc_predictive_entropy_scaled"}}
    for kind in ("softmax", "gmm", "ensemble"):
        content = strict_json(folder / f"{stem}_{kind}_tiny_imagenet_images.json")
        assert list(content) == ["mean", "std", "values", "info"]
        assert all(list(content[part]) == columns for part in ("mean", "std", "values"))
        assert content["info"]["dataset"] == "tiny_imagenet" and content["info"]["runs"] == 2
        for column in columns:
            values = content["values"][column]
            assert len(values) == 2 and content["mean"][column] == pytest.approx(np.mean(values))
            assert content["std"][column] == pytest.approx(np.std(values, ddof=1) / 2**0.5)
        assert len({content["mean"][column] for column in columns[2:6]}) == 4
        prefix = "ensemble/images" if kind == "ensemble" else "images"
        for column, name in sources[kind].items():
            expected = [run[f"{prefix}/{name}"] for run in results["values"]]
            assert content["values"][column] == expected
    assert [run["images/auroc_density"] for run in results["values"]] == \
        [m["images/auroc_density"] for m in first]


def test_standard_error_of_one_run_is_null(small):
    ddu.main([*small, "--published-json", "--epochs", "1"])
    [path] = run_of(small).parent.glob("*/res_*_gmm_*.json")
    assert set(strict_json(path)["std"].values()) == {None}


def test_shift_computed(small):
    metrics = ddu.main([*small, "--shift", "computed", "--plot"])
    for severity in range(1, 6):
        for key in ("accuracy", "nll", "ece15", "auroc_density", "auroc_entropy"):
            assert math.isfinite(metrics[f"tiny_imagenet_computed_c_s{severity}/{key}"])
    assert (run_of(small) / "shift.png").stat().st_size > 5000


def test_real_data(real_data, tmp_path):
    metrics = ddu.main(["--dataset", "fashion_mnist", "--data-dir", str(real_data), "--epochs", "1",
                        "--model", "lenet", "--no-sn", "--limit-steps", "80", "--schedule",
                        "one_cycle", "--out-dir", str(tmp_path), "--no-plot", *CPU])
    assert metrics["test/accuracy"] > 0.5 and metrics["mnist/auroc_density"] > 0.7
    assert metrics["examples_per_class_min"] > 5300


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(small, tmp_path):
    small = with_options(small, device="cuda")
    assert_close_metrics(ddu.main(small), ddu.main([*small, "--eval"]), 1e-3)
    moons = ddu.main(["--dataset", "two_moons", "--epochs", "2", "--out-dir", str(tmp_path),
                      "--device", "cuda"])
    assert moons["background/auroc_density"] > 0.99


# ---- Features, two moons, active learning -------------------------------------------------------


@pytest.fixture
def features(tmp_path):
    """(folder, arrays): features of two classes, a set like them and a far one."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 200)

    def draw(y):
        return rng.normal(size=(len(y), 3)) * [1, 2, 0.1] + 4 * y[:, None]

    arrays = {"near": draw(rng.integers(0, 2, 80)), "far": draw(np.ones(50)) + 30}
    np.savez(tmp_path / "train.npz", features=draw(labels), labels=labels)
    for name, z in arrays.items():
        np.savez(tmp_path / f"{name}.npz", features=z)
    return tmp_path, arrays


def feature_options(folder, *names):
    return ["--features", str(folder / "train.npz"), "--out-dir", str(folder / "runs"), *CPU,
            "--score", *(str(folder / f"{name}.npz") for name in names)]


def test_features_of_ones_own(features):
    folder, arrays = features
    metrics = ddu.main(feature_options(folder, "near", "far"))
    train = np.load(folder / "train.npz")
    parts = [train["features"][train["labels"] == c] for c in (0, 1)]
    run = folder / "runs" / "ddu" / "features-train"
    for name, z in arrays.items():
        expected = logsumexp([multivariate_normal(p.mean(0), np.cov(p.T)).logpdf(z) for p in parts],
                             axis=0)
        scores = np.load(run / f"scores_{name}.npz")
        np.testing.assert_allclose(scores["density"], expected, rtol=1e-9)
        assert metrics[f"{name}/density_mean"] == pytest.approx(expected.mean())
    assert metrics["far/auroc_density"] == 1 and metrics["far/fraction_ood"] == 1
    assert metrics["near/fraction_ood"] < 0.1 and metrics["jitter"] == 0
    assert strict_json(run / "results.json")["metrics"] == common.to_json(metrics)


def test_features_with_fewer_examples_than_features(features):
    folder, _ = features
    rng = np.random.default_rng(2)
    np.savez(folder / "train.npz", features=rng.normal(size=(12, 30)), labels=np.arange(12) % 3)
    np.savez(folder / "near.npz", features=rng.normal(size=(5, 30)))
    metrics = ddu.main(feature_options(folder, "near"))
    assert metrics["jitter"] > 0 and math.isfinite(metrics["near/density_mean"])


def test_features_with_two_processes(features):
    folder, _ = features
    children = finish(start_ranks(folder, 2, run_ddu, *feature_options(folder, "near", "far")))
    assert "auroc" in children[0].stdout.lower() and children[1].stdout == ""


def test_two_moons(tmp_path):
    options = ["--dataset", "two_moons", "--epochs", "2", "--out-dir", str(tmp_path), *CPU]
    metrics = ddu.main(options)
    folder = tmp_path / "ddu" / "two_moons-fc_resnet-sn0.65-seed1"
    assert strict_json(folder / "results.json")["metrics"] == common.to_json(metrics)
    assert metrics["test/accuracy"] > 0.7
    assert metrics["background/auroc_density"] > 0.99 > metrics["background/auroc_entropy"]
    assert (folder / "two_moons.png").stat().st_size > 20_000
    assert ddu.main([*options, "--eval", "--no-plot"]) == metrics
    with pytest.raises(UserError, match="epochs"):
        ddu.main(with_options(options, epochs=3))


def al_options(tmp_path, *more):
    return ["--dataset", "glyphs", "--model", "lenet", "--num-initial-samples", "20",
            "--max-training-samples", "30", "--epochs", "1", "--draws", "64", "--out-dir",
            str(tmp_path), "--name", "few", "--no-plot", *CPU, *more]


def test_active_learning(tmp_path, monkeypatch):
    options = al_options(tmp_path, "--active-learning", "density", "random", "--runs", "2")
    metrics = ddu.main(options)
    folder = tmp_path / "ddu" / "few-al-seed1"
    results = strict_json(folder / "results.json")
    assert results["labels"] == [20, 25, 30] and results["metrics"] == common.to_json(metrics)
    for name, published in (("density", "gmm"), ("random", "random")):
        accuracies = strict_json(folder / f"test_accs_lenet_1_{published}_glyphs.json")
        assert list(accuracies) == ["0", "1"] and all(len(a) == 3 for a in accuracies.values())
        assert all(0 <= x <= 100 for a in accuracies.values() for x in a)
        assert max(max(a) for a in accuracies.values()) > 1  # percent, not fractions
        last = np.mean([a[-1] for a in accuracies.values()]) / 100
        assert metrics[f"{name}/accuracy_30"] == pytest.approx(last)
        first, second = (torch.load(folder / f"{name}-run{r}.pt", weights_only=True)["labelled"]
                         for r in (0, 1))
        assert len(first.unique()) == len(second.unique()) == 30
        assert torch.equal(first[:20], second[:20])  # drawn once for all runs
        assert not torch.equal(first[20:], second[20:])
    assert not list(folder.glob("ambiguous*"))
    # interrupted after the first step, and finished: the same; and evaluated: the same
    path = folder / "density-run1.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "labelled": state["labelled"][:25], "accuracy": state["accuracy"][:1]},
               path)
    with pytest.raises(UserError, match="25 labels"):
        ddu.main([*options, "--eval"])
    assert ddu.main(options) == metrics
    monkeypatch.setattr(ddu, "active_learning_step", None)
    assert ddu.main([*options, "--eval"]) == metrics
    with pytest.raises(UserError, match="draws"):
        ddu.main(with_options(options, draws=65))


def test_active_learning_takes_low_densities_and_high_uncertainties(tmp_path, monkeypatch):
    seen, real = [], ddu.acquire

    def acquire(scores, count):
        seen.append((scores, real(scores, count)))
        return seen[-1][1]

    monkeypatch.setattr(ddu, "acquire", acquire)
    ddu.main(al_options(tmp_path, "--active-learning", "density", "entropy", "pe", "mi",
                        "--num-ensemble", "2", "--max-training-samples", "25"))
    assert len(seen) == 4
    for scores, taken in seen:
        assert len(scores) == 9000 - 20 and len(taken) == 5 and scores.isfinite().all()
        assert torch.equal(scores[taken], scores.topk(5).values)
    density, entropy, pe, mi = (scores for scores, _ in seen)
    # log space: no ties, though far below what float32 exp holds
    assert density.unique().numel() > 8900 and density.min() > 104
    for scores in (entropy, pe, mi):
        assert -1e-6 <= scores.min() and scores.max() <= math.log(10) + 1e-6
    assert (mi <= pe + 1e-6).all()


@pytest.mark.parametrize("ambiguous", [False, True])
def test_active_learning_follows_the_published_protocol(tmp_path, ambiguous):
    """Trap 32, without training: 57 accuracies, 56 fractions, 20, 25 ... 300 labels."""
    options = ["--dataset", "glyphs", "--model", "lenet", "--active-learning", "random",
               "--epochs", "0", "--out-dir", str(tmp_path), "--name", "few", "--no-plot", *CPU,
               *["-ambiguous"] * ambiguous]
    args = ddu.parse_args(options)
    published = dict(num_initial_samples=20, max_training_samples=300, acquisition_batch_size=5,
                     draws=5056, num_ensemble=5, subsample=1000, lr=1e-3, batch_size=64, opt="adam")
    assert published.items() <= vars(args).items()
    metrics = ddu.main(options)
    folder = tmp_path / "ddu" / ("few-al-ambiguous-seed1" if ambiguous else "few-al-seed1")
    label = "dirty_glyphs_1000" if ambiguous else "glyphs"
    accuracies = strict_json(folder / f"test_accs_lenet_1_random_{label}.json")
    assert len(accuracies["0"]) == 57
    assert strict_json(folder / "results.json")["labels"] == list(range(20, 301, 5))
    labelled = torch.load(folder / "random-run0.pt", weights_only=True)["labelled"]
    assert len(labelled.unique()) == len(labelled) == 300
    pool, test, start, odd = ddu.active_learning_pool(args)
    assert torch.equal(labelled[:20], start) and len(test) == 2000 and test.name == "glyphs"
    assert torch.bincount(pool.labels[start]).tolist() == [2] * 10
    path = folder / f"ambiguous_lenet_1_random_{label}.json"
    assert path.exists() == ambiguous
    if ambiguous:
        fractions = strict_json(path)["0"]
        assert len(fractions) == 56
        assert fractions[-1] == pytest.approx(odd[labelled].double().mean().item())
        assert 9850 < len(pool) < 9950  # 11,000 less a tenth of the groups
        assert 0.85 < odd.double().mean() < 0.95
        assert metrics["random/ambiguous_share"] == pytest.approx(fractions[-1])
    else:
        assert len(pool) == 9000 and not odd.any()


def test_active_learning_entropies_of_a_trained_model(tmp_path):
    out = ["--out-dir", str(tmp_path), "--no-plot", *CPU]
    ddu.main([*"--model lenet --no-sn --epochs 1 --limit-steps 4 --name dirty".split(), *out])
    ddu.main(al_options(tmp_path, *"--active-learning random -ambiguous --subsample 50".split(),
                        "--trained-model", str(tmp_path / "ddu" / "dirty" / "last.pt"),
                        "--threshold", "2.2"))
    folder = tmp_path / "ddu" / "few-al-ambiguous-seed1"
    entropies = strict_json(folder / "ambiguous_entropies_lenet_1_random_dirty_glyphs_50.json")["0"]
    assert [len(entropies[i]) for i in ("0", "1")] == [25, 30]
    fractions = strict_json(folder / "ambiguous_lenet_1_random_dirty_glyphs_50.json")["0"]
    assert fractions == pytest.approx([np.mean(np.array(entropies[i]) > 2.2) for i in ("0", "1")])


def test_training_on_few_draws_each_example_nearly_equally_often():
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 2)

        def forward(self, x):
            seen.append(x.flatten())
            return self.head(x.view(-1, 1)), x

    args = argparse.Namespace(lr=1e-3, weight_decay=0.0, epochs=2, draws=5056, batch_size=64)
    ddu.train_on_few(Net(), torch.arange(25.0).view(-1, 1, 1, 1), torch.arange(25) % 2, args)
    counts = torch.cat(seen).long().bincount()
    assert len(seen) == 2 * 79 and counts.sum() == 2 * 5056 and counts.max() - counts.min() <= 2


def test_active_learning_with_two_processes(tmp_path):
    one, two = (al_options(tmp_path / name, "--active-learning", "density", "random")
                for name in ("one", "two"))
    metrics = ddu.main(one)
    (tmp_path / "two").mkdir()
    finish(start_ranks(tmp_path, 2, run_ddu, *two))
    results = strict_json(tmp_path / "two" / "ddu" / "few-al-seed1" / "results.json")
    assert results["metrics"] == common.to_json(metrics)


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.fixture
def misuse(tmp_path):
    """misuse(*argv): stderr of a start that must end with status 2 and one line, in a process."""
    return lambda *argv, **kwargs: refusal(tmp_path, run_ddu, *argv, **kwargs)


GLYPHS = ["--dataset", "glyphs", "--epochs", "1", "--limit-steps", "1"]
FAST = [*GLYPHS, "--model", "lenet", "--no-sn"]
AL = [*FAST, "--active-learning", "random", "--draws", "64"]


@pytest.mark.parametrize("argv, named", [
    (["--dataset", "nonsense"], "nonsense"),
    ([*FAST, "--ood", "nonsense"], "nonsense"),
    ([*FAST, "--ood", "folder:nowhere"], "nowhere"),
    (["--dataset", "imagenet_o"], "test split only"),
    (["--nonsense"], "--nonsense"),
    (["--epochs", "many"], "--epochs"),
    (["--model", "nonsense"], "nonsense"),
    ([*GLYPHS, "--model", "lenet", "-sn"], "lenet"),
    ([*GLYPHS, "--model", "lenet", "--no-sn", "-mod"], "lenet"),
    ([*GLYPHS, "--model", "torchvision/nonsense"], "torchvision/nonsense"),
    ([*GLYPHS, "--model", "fc_resnet"], "fc_resnet"),
    (["--dataset", "two_moons", "--model", "resnet18"], "two_moons"),
    ([*GLYPHS, "--model", "wide_resnet", "--depth", "11"], "--depth 11"),
    ([*GLYPHS, "--model", "wide_resnet", "--depth", "-4"], "--depth -4"),
    ([*FAST, "--jitter", "foo"], "--jitter foo"),
    ([*FAST, "--jitter", "-1"], "--jitter -1"),
    ([*FAST, "--jitter", "nan"], "--jitter nan"),
    (["--device", "cuda:99"], "cuda:99"),
    (["--device", "tpu"], "tpu"),
    (["--seed", "-3"], "--seed -3"),
    (["--seed", "1.5"], "--seed"),
    (["-b", "0"], "--batch-size 0"),
    (["--lr", "-1"], "--lr -1"),
    (["--lr", "nan"], "--lr nan"),
    (["--width", "0"], "--width 0"),
    (["--dropout", "1"], "--dropout 1"),
    (["--coeff", "0"], "--coeff 0"),
    (["--coeff", "nan"], "--coeff nan"),
    (["--momentum", "-1"], "--momentum -1"),
    ([*FAST, "--nesterov", "--momentum", "0"], "nesterov"),
    (["--weight-decay", "-1"], "--weight-decay -1"),
    (["--density-quantile", "1.5"], "--density-quantile 1.5"),
    (["--shift", "published"], "--shift"),
    (["--ensemble", "0"], "--ensemble 0"),
    (["--runs", "0"], "--runs 0"),
    (["--power-iterations", "0"], "--power-iterations 0"),
    (["--save-interval", "0"], "--save-interval 0"),
    (["--features", "x.npz"], "--score"),
    (["--score", "x.npz"], "--features"),
    (["--features", "x.npz", "--score", "y.npz"], "x.npz"),
    ([*AL, "--num-initial-samples", "25"], "--num-initial-samples 25"),
    ([*AL, "--num-initial-samples", "0"], "--num-initial-samples 0"),
    ([*AL, "--num-initial-samples", "-20"], "--num-initial-samples -20"),
    ([*AL, "--max-training-samples", "10"], "--max-training-samples 10"),
    ([*AL, "--acquisition-batch-size", "0"], "--acquisition-batch-size 0"),
    ([*AL, "--draws", "0"], "--draws 0"),
    ([*AL, "--max-training-samples", "9001"], "9001"),
    (["--active-learning", "random", "--dataset", "numbers", "--ambiguous"], "ambiguous"),
    (["--active-learning", "nonsense"], "nonsense"),
], ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "")
def test_misuse_is_one_line_and_status_2(misuse, tmp_path, argv, named):
    device = [] if "--device" in argv else CPU
    assert named in misuse("--out-dir", str(tmp_path / "runs"), "--no-plot", *device, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none(misuse):
    assert "--device cuda" in misuse("--device", "cuda")


def damaged(folder, small_data, what):
    """Make a copy of the small set with one thing wrong; what the error must name."""
    root = folder / "data" / "tiny-imagenet-200"
    subprocess.run(["cp", "-r", str(small_data), str(folder / "data")], check=True)
    image = root / "train" / "n00000001" / "images" / "n00000001_3.png"
    if what == "missing":
        subprocess.run(["rm", "-r", str(root)], check=True)
        return "tiny-imagenet-200"
    if what == "missing class":
        subprocess.run(["rm", "-r", str(root / "train" / "n00000002")], check=True)
        return "n00000002"
    if what == "truncated":
        image.write_bytes(image.read_bytes()[:300])
    elif what == "wrong size":
        Image.new("RGB", (32, 32)).save(image)
    elif what == "not an image":
        image.write_text("no image")
    elif what == "unknown class":
        notes = root / "val" / "val_annotations.txt"
        notes.write_text(notes.read_text() + "val_0.png\tn99\t0\t0\t63\t63\n")
        return "n99"
    return image.name


@pytest.mark.parametrize("what", ["missing", "missing class", "truncated", "wrong size",
                                  "not an image", "unknown class"])
def test_damaged_data(misuse, small, small_data, tmp_path, what):
    named = damaged(tmp_path, small_data, what)
    assert named in misuse(*with_options(small, data_dir=tmp_path / "data"))


@pytest.mark.parametrize("dataset, folder, file", [
    ("mnist", "MNIST/raw", "train-images-idx3-ubyte"),
    ("cifar10", "cifar-10-batches-py", "data_batch_3")])
def test_truncated_published_files(misuse, tmp_path, real_data, dataset, folder, file):
    target = tmp_path / "data" / folder
    target.mkdir(parents=True)
    for path in (real_data / folder).iterdir():
        (target / path.name).symlink_to(path)
    (target / file).unlink()
    (target / file).write_bytes((real_data / folder / file).read_bytes()[:1000])
    assert folder in misuse("--dataset", dataset, "--data-dir", str(tmp_path / "data"), *CPU,
                            "--ood", "glyphs_letters", "--out-dir", str(tmp_path / "runs"))


def test_images_that_the_network_cannot_take(misuse, small, tmp_path):
    assert "28x28" in misuse(*small, "--model", "lenet", "--no-sn", "--no-mod")
    import torchvision
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.resnet18(num_classes=1000).state_dict(), weights)
    plain = [*small, "--no-sn", "--no-mod"]
    err = misuse(*plain, "--model", "torchvision/resnet18", "--weights", str(weights))
    assert "size mismatch" in err and "1000" in err
    err = misuse("--dataset", "numbers", "--model", "torchvision/resnet18", "--weights",
                 str(weights), "--no-sn", "--no-mod", "--out-dir", str(tmp_path / "runs"), *CPU)
    assert "does not take images (1, 28, 28)" in err
    torch.save(torchvision.models.squeezenet1_1(num_classes=4).state_dict(), weights)
    err = misuse(*plain, "--model", "torchvision/squeezenet1_1", "--weights", str(weights))
    assert "linear layer" in err
    assert "-mod form" in misuse(*small, "--model", "torchvision/resnet18")


@pytest.mark.parametrize("train, near, named", [
    ({"labels": [0, 0, 0, 1]}, {}, "class 1 has 1"),
    ({"labels": [0, 0, 2, 2]}, {}, "class 1 has 0"),
    ({"labels": [0, 0, 1, -1]}, {}, "labels"),
    ({"labels": [0, 0, 1]}, {}, "labels"),
    ({"labels": [0.5, 0.5, 1.5, 1.5]}, {}, "labels"),
    ({"labels": None}, {}, "labels"),
    ({"features": [[math.nan, 1], [0, 1], [1, 2], [3, 4]]}, {}, "NaN"),
    ({"features": [[math.inf, 1], [0, 1], [1, 2], [3, 4]]}, {}, "NaN"),
    ({"features": [1, 2, 3, 4]}, {}, "features"),
    ({"features": [["a", "b"]] * 4}, {}, "features"),
    ({"features": np.zeros((0, 2)), "labels": np.zeros(0, int)}, {}, "features"),
    ({}, {"features": [[math.nan, 1]]}, "near.npz"),
    ({}, {"features": [[1, 2, 3]]}, "near.npz"),
    ({}, {"features": np.zeros((0, 2))}, "near.npz"),
    ({}, {"features": None}, "features"),
    (b"not an archive", {}, "train.npz"),
    ({}, b"", "near.npz"),
], ids=lambda value: str(value)[:40].replace("\n", "") if not isinstance(value, str) else "")
def test_bad_features(misuse, tmp_path, train, near, named):
    whole = {"train": {"features": [[0.0, 1], [1, 0], [5, 6], [6, 5]], "labels": [0, 0, 1, 1]},
             "near": {"features": [[0.0, 1]]}}
    for name, change in (("train", train), ("near", near)):
        if isinstance(change, bytes):
            (tmp_path / f"{name}.npz").write_bytes(change)
        else:
            arrays = {k: v for k, v in {**whole[name], **change}.items() if v is not None}
            np.savez(tmp_path / f"{name}.npz", **(arrays or {"other": np.ones(2)}))
    assert named in misuse(*feature_options(tmp_path, "near"))


@pytest.fixture
def finished(small):
    """A finished run of one epoch: (options, run directory)."""
    options = with_options(small, epochs=1)
    ddu.main(options)
    return options, run_of(options)


def test_changed_options_are_refused_with_their_names(misuse, finished):
    options, folder = finished
    before = snapshot(folder)
    err = misuse(*with_options(options, epochs=2, lr=0.2), "--no-mod")
    assert all(f"{key} (" in err for key in ("epochs", "lr", "mod"))
    assert "epochs (1 there, 2 now)" in err and "seed" not in err
    assert "other options" in misuse(*with_options(options, seed=9), "--eval")
    assert snapshot(folder) == before


def test_evaluation_before_training(misuse, small):
    assert "train first" in misuse(*small, "--eval")
    assert not list(run_of(small).rglob("last.pt"))


def test_evaluation_of_an_unfinished_run(misuse, finished):
    options, folder = finished
    state = torch.load(folder / "last.pt", weights_only=True)
    state["progress"] = {**state["progress"], "epoch": 0, "step": 2}
    torch.save(state, folder / "last.pt")
    before = snapshot(folder)
    assert "0 of 1 epochs" in misuse(*options, "--eval")
    assert snapshot(folder) == before


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "another script's"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(misuse, finished, damage):
    options, folder = finished
    path = folder / "last.pt"
    whole = path.read_bytes()
    if damage == "another script's":
        torch.save({"weights": torch.ones(3)}, path)
    else:
        path.write_bytes({"cut": whole[:len(whole) // 2], "empty": b"",
                          "garbage": b"no checkpoint" * 99}[damage])
    before = snapshot(folder)
    for more in ([], ["--eval"]):
        assert "last.pt" in misuse(*options, *more)
    assert snapshot(folder) == before


def test_out_dir_that_is_a_file(misuse, small, tmp_path):
    (tmp_path / "file").write_text("kept")
    assert "--out-dir" in misuse(*with_options(small, out_dir=tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


def test_resume_from_a_file_that_is_not_there(misuse, small, tmp_path):
    assert "absent.pt" in misuse(*small, "--resume", str(tmp_path / "absent.pt"))


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(misuse, tmp_path):
    # one step an epoch: the first loss is finite, and its step throws the weights far away
    options = [*FAST, "--lr", "1e12", "--epochs", "5", "--out-dir", str(tmp_path / "runs"),
               "--name", "run", *CPU]
    err = misuse(*options)
    found = re.search(r"loss (nan|-?inf) at step (\d+) with learning rate (\S+);", err)
    assert found and int(found[2]) > 0 and float(found[3]) > 1e10, err
    state = common.load_checkpoint(run_of(options) / "last.pt")
    assert state["progress"]["epoch"] == int(found[2])
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    assert len((run_of(options) / "log.jsonl").read_text().splitlines()) == int(found[2])
    assert misuse(*options) == err  # and again: nothing was lost or changed


def test_a_non_finite_loss_names_step_loss_and_learning_rate(small, monkeypatch):
    real = torch.nn.functional.cross_entropy
    calls = []

    def poisoned(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs) * (math.nan if len(calls) == 7 else 1)

    monkeypatch.setattr(ddu.F, "cross_entropy", poisoned)
    with pytest.raises(UserError, match="loss nan at step 6 with learning rate 0.005;"):
        ddu.main(small)  # four steps an epoch, the rate is divided by ten after the first
    state = common.load_checkpoint(run_of(small) / "last.pt")
    assert state["progress"]["epoch"] == 1
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    monkeypatch.undo()
    metrics = ddu.main(small)  # the same command goes on from there
    assert metrics == ddu.main(with_options(small, name="calm"))


def test_a_batch_that_does_not_divide_by_the_processes(tmp_path):
    options = [*FAST, "-b", "63", "--out-dir", str(tmp_path / "runs"), *CPU]
    for child in start_ranks(tmp_path, 2, run_ddu, *options):
        child.wait()
        assert child.status == 2 and child.stderr.count("\n") == 1, child.stderr
        assert "--batch-size 63" in child.stderr and "2 processes" in child.stderr
    assert not (tmp_path / "runs").exists()


def test_misuse_by_two_processes(small, tmp_path):
    """All processes end, in words: what only one can see, it tells the others."""
    (tmp_path / "file").touch()
    torch.save({"config": {}}, tmp_path / "other.pt")
    for change in ({"ood": "nonsense"}, {"out_dir": tmp_path / "file"},
                   {"resume": tmp_path / "other.pt"}, {"eval": None}):
        options = [*small, "--eval"] if "eval" in change else with_options(small, **change)
        for child in start_ranks(tmp_path, 2, run_ddu, *options):
            child.wait()
            assert child.status == 2 and "Traceback" not in child.stderr, child.stderr
            assert "error: " in child.stderr


# ---- The README ---------------------------------------------------------------------------------


SCRIPTS = (ddu, forde, gbnn2d, proxy_distill, swag_laplace_ensembles)


def readme_commands():
    """The commands in fenced blocks of README.md: continuation lines joined, chains split."""
    text = (REPO / "README.md").read_text()
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [part.strip().removeprefix("$ ") for line in lines
            for part in re.split(r"&&|;|\|", line)]


def usage_commands(script):
    """The commands of the Usage paragraph of a script's docstring."""
    usage = script.__doc__.split("Usage:")[1].split("\n\n")[0]
    return [line.strip() for line in usage.replace("\\\n", " ").splitlines() if line.strip()]


def parse_command(line, scripts=SCRIPTS):
    """Parse what stands after the script's name in a command line; None if it runs no script."""
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:  # environment variables
        words = words[1:]
    for script in scripts:
        name = f"{script.__name__}.py"
        if name in words and words[0] in ("python", "torchrun"):
            return script.parse_args(words[words.index(name) + 1:])
    return None


def test_help_and_the_common_options(capsys):
    with pytest.raises(SystemExit) as stop:
        ddu.parse_args(["--help"])
    text = capsys.readouterr().out
    assert not stop.value.code and len(text.splitlines()) > 60
    for flag in ("--dataset --data-dir --out-dir --name --seed --epochs --batch-size --lr --width "
                 "--amp --compile --no-compile --workers --device --eval --resume --limit-steps "
                 "--plot --no-plot --quiet").split():
        assert flag in text, flag


def test_published_flags_are_understood():
    args = ddu.parse_args("--seed 1 --dataset cifar10 --model wide_resnet -sn -mod --coeff 3.0 "
                          "-b 128 -e 350 --lr 0.1 --mom 0.9 --decay 5e-4 --opt sgd --ood_dataset "
                          "svhn --first-milestone 150 --second-milestone 250".split())
    published = dict(sn=True, mod=True, coeff=3, batch_size=128, epochs=350, momentum=0.9,
                     weight_decay=5e-4, ood=["svhn"])
    assert published.items() <= vars(args).items()


def test_the_commands_of_the_docstring_parse():
    parsed = [parse_command(line) for line in usage_commands(ddu)]
    assert len(parsed) == 4 and all(parsed)
    assert [a.dataset for a in parsed] == ["dirty_glyphs", "cifar10", "dirty_glyphs", "cifar10"]
    paper = dict(model="wide_resnet", depth=28, width=1, sn=True, mod=True, coeff=3, epochs=350,
                 batch_size=128, lr=0.1, momentum=0.9, nesterov=False, weight_decay=5e-4,
                 schedule="step", first_milestone=150, second_milestone=250, augment=True)
    assert paper.items() <= vars(parsed[1]).items()


def test_the_commands_of_the_readme_parse():
    commands = readme_commands()
    assert any([parse_command(line) for line in commands])
    for line in commands:
        for script in re.findall(r"(?:python|torchrun)\b.*?(\w+\.py)\b", line.split("#")[0]):
            assert (REPO / script).exists() or (REPO / "tests" / script).exists(), line


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_the_commands_in_the_text_of_the_readme_parse(script):
    """`python X.py ...`, and `X.py ...` in tables: published results and commands rest on them."""
    name = f"{script.__name__}.py"
    text = re.sub(r"^```.*?^```", "", (REPO / "README.md").read_text(), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    lines = [s for s in spans if re.match(rf"([A-Z_]+=\S+ )?((python|torchrun)\b.* )?{name} -", s)]
    assert lines
    for line in lines:
        script.parse_args(shlex.split(line.split(f"{name} ")[1].replace("…", "")))
