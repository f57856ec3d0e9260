"""forde.py end to end: every way to start, stop, resume, spread out, and misuse a run."""

import json
import math
import os
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (Child, in_float64, refusal, run_forde, run_forde_in_float64, start_ranks,
                      wait_for)
from PIL import Image
from test_runs import (CPU, METRICS, assert_same_weights, epochs_done, finish, parse_command,
                       snapshot, strict_json, usage_commands, with_options)

import common
import data
import forde
from common import UserError, World

BASE = [*"--dataset glyphs --width 0.02 --members 3 --limit-train 76 -b 16 --epochs 2 --shift none "
        "--diversity-examples 20 --no-plot --methods forde_identity --name run".split(), *CPU,
        "--ood"]
PREDICTIVE = {"accuracy", "nll", "nll_miss", "ece15", "brier", "top2_accuracy", "top3_accuracy",
              "member_accuracy", "disagreement",
              *(f"{part}_{k}" for part in ("total", "aleatoric", "epistemic")
                for k in ("mean", "std"))}
DISTANCE = "input_gradient_cosine_distance"
KINDS = list(data.CORRUPTIONS)
LN10 = math.log(10)

SCRIPT = "forde"


@pytest.fixture
def small(tmp_path):
    """Options of a run that takes half a second: three members, four steps an epoch (a partial
    batch of 12 is left), two epochs, shuffled and augmented."""
    return [*BASE, "--augment", "--out-dir", str(tmp_path / "runs")]


def keep_few_tests(replace=setattr):
    """Let forde.py test on a hundred images."""
    load = forde.load_sets

    def load_few(*args):
        sets = load(*args)
        return {**sets, "test": sets["test"].select(slice(0, None, 20))}

    replace(forde, "load_sets", load_few)


@pytest.fixture
def few_tests():
    with pytest.MonkeyPatch.context() as patch:
        keep_few_tests(patch.setattr)
        yield


def folder_of(options):
    """The run directory of `small` options (the last of a repeated one counts)."""
    args = forde.parse_args([str(o) for o in options])
    return Path(args.out_dir) / "forde" / args.name


def weights_of(options):
    state = torch.load(folder_of(options) / "last.pt", weights_only=True)
    return state["model"]


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def equal_weights(a, b):
    a, b = weights_of(a), weights_of(b)
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) for k in a)


def distance_of_weights(a, b):
    """The largest relative difference of a tensor."""
    a, b = (weights_of(options) for options in (a, b))
    assert a.keys() == b.keys()
    a, b = ({k: v.double() for k, v in weights.items()} for weights in (a, b))
    return max(((a[k] - b[k]).norm() / b[k].norm().clamp_min(1e-3)).item() for k in a)


def not_blank(path):
    with Image.open(path) as image:
        greys = set(image.convert("L").resize((64, 32)).tobytes())
        return image.width > 500 and len(greys) > 10


def assert_finite(metrics, nullable=("nll_miss",)):
    for key, value in metrics.items():
        if value is None and key.endswith(nullable):
            continue
        assert isinstance(value, (int, float)) and math.isfinite(value), (key, value)


def named_metrics(name, ood, severities=()):
    """The metrics that a method's results.json must have."""
    named = {f"test/{k}" for k in PREDICTIVE}
    named |= {f"diversity/{k}" for k in ("disagreement", DISTANCE)}
    named |= {f"{ood}/{metric}_{score}" for metric in METRICS for score in ("total", "epistemic")}
    for s in severities:
        named |= {f"{name}_s{s}/{k}" for k in (*PREDICTIVE, "ece15_by_kind", DISTANCE)}
        named |= {f"{name}_{kind}_s{s}/{k}" for kind in KINDS for k in ("accuracy", "nll", "ece15")}
    return named | {f"{name}/{k}" for k in ("accuracy", "nll", "ece15", "ece15_by_kind")
                    if severities}


def assert_ranges(metrics, members):
    assert_finite(metrics)
    for key, value in metrics.items():
        kind = key.split("/")[1]
        if kind.startswith(("accuracy", "top", "member_", "ece", "au", "fpr", "disagree")):
            assert 0 <= value <= 1, key
        elif kind in ("total_mean", "aleatoric_mean"):
            assert 0 < value <= LN10 + 1e-6, key
        elif kind == "epistemic_mean":
            assert -1e-7 <= value <= math.log(members), key
        elif kind == DISTANCE:
            assert 0 <= value <= 2, key
        elif kind in ("nll", "nll_miss") and value is not None:
            assert value > 0, key
    for split in {key.split("/")[0] for key in metrics if key.endswith("/top3_accuracy")}:
        m = {k: metrics[f"{split}/{k}"] for k in PREDICTIVE}
        assert m["accuracy"] <= m["top2_accuracy"] <= m["top3_accuracy"]
        assert m["total_mean"] == pytest.approx(m["aleatoric_mean"] + m["epistemic_mean"], abs=1e-6)
        if m["nll_miss"] is not None:
            assert m["nll_miss"] >= m["nll"] * 0.9


# ---- A whole run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default command, narrow and short, with what its networks and loaders gave."""
    out, seen = tmp_path_factory.mktemp("default"), {"networks": [], "batches": []}
    options = ["--out-dir", str(out), "--width", "0.05", "--members", "2", "--limit-train", "600",
               "--epochs", "3", "--shift-examples", "5", "--diversity-examples", "20", *CPU]
    make, load = forde.make_network, forde.make_loader

    def make_network(*args):
        net = make(*args)
        seen["networks"].append({k: v.clone() for k, v in net.state_dict().items()})
        return net

    def make_loader(*args, **kwargs):
        loader = load(*args, **kwargs)
        if kwargs.get("train"):
            epoch, batches = loader.epoch, []
            seen["batches"].append(batches)
            loader.epoch = lambda *a, **k: map(
                lambda b: batches.append((b.images.clone(), b.labels)) or b, epoch(*a, **k))
        return loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forde, "make_network", make_network)
        patch.setattr(forde, "make_loader", make_loader)
        metrics = forde.main(options)
    return options, out / "forde", metrics, seen


METHODS = ("deep_ensemble", "forde_pca", "forde_identity")
STEM = "glyphs-resnet9-w0.05-m2"


def test_default_run_leaves_its_files(default_run):
    _, root, _, _ = default_run
    comparison = root / f"{STEM}-comparison-seed1-runs1"
    assert {p.name for p in root.iterdir()} == {
        *(f"{STEM}-{m}-seed1" for m in METHODS), comparison.name, "pca-glyphs-10000.pt"}
    for method in METHODS:
        folder = root / f"{STEM}-{method}-seed1"
        assert {p.name for p in folder.iterdir()} == {"args.json", "log.jsonl", "last.pt",
                                                      "results.json"}
        rows = log_of(folder)
        assert [row["epoch"] for row in rows] == [1, 2, 3]
        for row in rows:
            assert {"loss_nats", "repulsion_nats", "median", "member_accuracy", "lr",
                    "images_per_s", "seconds", "peak_memory_gb"} <= row.keys()
            assert 0.5 < row["loss_nats"] < 3 and 0 <= row["member_accuracy"] <= 1
            # in [0, ln(M)/B], and with two members it is ln(1.25)/B where they differ
            assert 0 <= row["repulsion_nats"] <= math.log(2) / 64 + 1e-7
            assert (row["repulsion_nats"] == 0) == (method == "deep_ensemble")
            assert (row["median"] == 0) == (method == "deep_ensemble")
    pictures = {"args.json", "results.json", "shift.png"}
    assert {p.name for p in comparison.iterdir()} == pictures
    assert not_blank(comparison / "shift.png")


def test_default_run_results(default_run):
    _, root, metrics, _ = default_run
    comparison = strict_json(root / f"{STEM}-comparison-seed1-runs1" / "results.json")
    assert comparison["metrics"] == common.to_json(metrics)
    assert set(comparison["standard_error"].values()) == {None}  # of one run
    named = named_metrics("glyphs_c", "glyphs_letters", range(1, 6))
    for method in METHODS:
        folder = root / f"{STEM}-{method}-seed1"
        results = strict_json(folder / "results.json")
        own = results["metrics"]
        assert {"config", "metrics", "timing", "environment"} <= results.keys()
        assert own.keys() == named
        assert_ranges(own, 2)
        assert own == {k.removeprefix(f"{method}/"): v for k, v in metrics.items()
                       if k.startswith(f"{method}/")}
        assert own["diversity/disagreement"] == own["test/disagreement"]
        for k in ("accuracy", "nll", "ece15", "ece15_by_kind"):
            rows = [own[f"glyphs_c_s{s}/{k}"] for s in range(1, 6)]
            assert own[f"glyphs_c/{k}"] == pytest.approx(np.mean(rows))
        for s in range(1, 6):  # kinds of equal size: what is a mean over examples is one over kinds
            for k in ("accuracy", "nll"):
                kinds = [own[f"glyphs_c_{kind}_s{s}/{k}"] for kind in KINDS]
                assert own[f"glyphs_c_s{s}/{k}"] == pytest.approx(np.mean(kinds), abs=1e-6)
            kinds = [own[f"glyphs_c_{kind}_s{s}/ece15"] for kind in KINDS]
            assert own[f"glyphs_c_s{s}/ece15_by_kind"] == pytest.approx(np.mean(kinds))
            assert own[f"glyphs_c_s{s}/ece15"] < own[f"glyphs_c_s{s}/ece15_by_kind"]
        assert results["timing"]["train_s"] > 0 and results["timing"]["evaluate_s"] > 0
        assert results["environment"]["processes"] == 1
        config = strict_json(folder / "args.json")
        assert results["config"] == config and config["members"] == 2 and config["lr"] == 0.1
        wanted = forde.METHODS[method]
        assert (config["repulsion"], config["kernel"]) == (wanted["repulsion"], wanted["kernel"])
    assert len(metrics) == 3 * len(named)
    assert len({metrics[f"{m}/test/nll"] for m in METHODS}) == 3  # they do differ


def test_methods_start_from_the_same_members_and_see_the_same_batches(default_run):
    *_, seen = default_run
    networks, batches = seen["networks"], seen["batches"]
    assert len(networks) == 3 * 2 and len(batches) == 3
    for a, b in zip(networks[:2] * 2, networks[2:]):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(networks[0]["stem.weight"], networks[1]["stem.weight"])
    assert len({len(rows) for rows in batches}) == 1 and len(batches[0]) >= 3 * 9
    for rows in batches[1:]:
        for (x, y), (x2, y2) in zip(batches[0], rows):
            assert torch.equal(x, x2) and torch.equal(y, y2)
    assert not torch.equal(batches[0][0][0], batches[0][9][0])  # but epochs are shuffled anew


def test_eval_gives_the_same_metrics(default_run, capfd):
    options, root, metrics, _ = default_run
    before = {k: v for k, v in snapshot(root).items() if not k.endswith(("results.json", ".png"))}
    capfd.readouterr()
    assert forde.main([*options, "--eval", "--no-plot", "--quiet"]) == metrics
    assert {k: v for k, v in snapshot(root).items() if k in before} == before
    out, err = capfd.readouterr()
    assert err == "" and all(f"accuracy %  {m}" in out for m in METHODS)
    assert "AUROC" in out and "glyphs_letters from test" in out and "run directory" not in out


def test_second_start_finishes_without_retraining(default_run, monkeypatch):
    options, root, metrics, _ = default_run
    results = root / f"{STEM}-forde_pca-seed1" / "results.json"
    results.unlink()  # as if killed between training and results

    def no_training(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(forde, "train_epoch", no_training)
    assert forde.main([*options, "--no-plot"]) == metrics
    assert strict_json(results)["timing"]["train_s"] > 0


@pytest.mark.usefixtures("few_tests")
def test_one_method_needs_no_comparison(small):
    metrics = forde.main(small)
    folder = folder_of(small)
    assert [p.name for p in folder.parent.iterdir()] == ["run"]
    assert strict_json(folder / "results.json")["metrics"] == common.to_json(metrics)
    assert "test/nll" in metrics
    same = [*small[:small.index("--methods")], *small[small.index("--methods") + 2:]]
    named = with_options(["--repulsion", "input_gradient", "--kernel", "identity", *same],
                         name="named")
    assert forde.main(named) == metrics and equal_weights(named, small)


@pytest.mark.usefixtures("few_tests")
def test_quiet_and_one_line_an_epoch(small, capfd):
    forde.main(small)
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2 and err == ""
    for word in ("1/2", "loss_nats", "repulsion_nats", "median", "lr", "images_per_s", "s left"):
        assert word in lines[0]
    forde.main([*small, "--quiet", "--resume", "never"])
    out, err = capfd.readouterr()
    assert "accuracy %" in out and "NLL nats" in out and err == ""
    assert not any(line.startswith(("epoch", "run directory", "forde_identity,"))
                   for line in out.splitlines())


# ---- Metrics against brute force ----------------------------------------------------------------


def brute_force(p, y):
    """The metrics of member probabilities p [M, N, K], float64, in plain loops."""
    mean, n = p.mean(0), len(y)
    order = [sorted(range(p.shape[2]), key=lambda c: -row[c]) for row in mean]
    losses = [-math.log(mean[i, y[i]]) for i in range(n)]
    missed = [losses[i] for i in range(n) if order[i][0] != y[i]]
    h = lambda q: -sum(v * math.log(v) for v in q if v > 0)
    total = [h(mean[i]) for i in range(n)]
    aleatoric = [np.mean([h(q[i]) for q in p]) for i in range(n)]
    epistemic = [a - b for a, b in zip(total, aleatoric)]
    bins = [[] for _ in range(15)]
    for i in range(n):
        confidence = mean[i, order[i][0]]
        bins[max(0, math.ceil(confidence * 15) - 1)].append((confidence, order[i][0] == y[i]))
    ece = sum(abs(sum(c for c, _ in rows) - sum(r for _, r in rows)) for rows in bins) / n
    votes = p.argmax(2)
    m = len(p)
    differ = [votes[i] != votes[j] for i in range(m) for j in range(m) if i != j]
    values = {"accuracy": np.mean([order[i][0] == y[i] for i in range(n)]),
              "nll": np.mean(losses), "nll_miss": np.mean(missed) if missed else None,
              "ece15": ece, "member_accuracy": np.mean(votes == y),
              "brier": np.mean([((mean[i] - np.eye(p.shape[2])[y[i]])**2).sum() for i in range(n)]),
              "disagreement": np.mean(differ) if differ else 0.0}
    for k in (2, 3):
        values[f"top{k}_accuracy"] = np.mean([y[i] in order[i][:k] for i in range(n)])
    for name, rows in (("total", total), ("aleatoric", aleatoric), ("epistemic", epistemic)):
        values |= {f"{name}_mean": np.mean(rows), f"{name}_std": np.std(rows)}
    return values


def assert_metrics(values, right, tolerance=1e-6):
    assert right.keys() <= values.keys()
    for key, value in right.items():
        assert values[key] == (None if value is None else pytest.approx(value, abs=tolerance)), key


def drawn_predictions(seed=0, members=3, n=60, classes=5, skill=1.0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    z = rng.normal(size=(members, n, classes)) * 2
    z[:, np.arange(n), y] += skill
    p = np.exp(z) / np.exp(z).sum(2, keepdims=True)
    return p, y


@pytest.mark.parametrize("members, skill", [(1, 1.0), (2, 1.0), (3, 1.0), (4, -3.0)])
def test_predictive_metrics(members, skill):
    p, y = drawn_predictions(members=members, skill=skill)
    values = forde.predictive_metrics(torch.tensor(p).log(), torch.tensor(y))
    right = brute_force(p, y)
    assert values.keys() == right.keys() == PREDICTIVE
    assert_metrics(values, right, 1e-9)
    sample = np.std([-(q * np.log(q)).sum() for q in p.mean(0)], ddof=1)
    assert abs(values["total_std"] - sample) > 1e-4  # the population's
    assert forde.disagreement(torch.tensor(p).log()) == pytest.approx(right["disagreement"])
    assert members == 1 or right["disagreement"] > 0.2
    if members > 1:  # of the mean of probabilities, not the mean of the members'
        alone = np.mean([brute_force(q[None], y)["top2_accuracy"] for q in p])
        assert abs(alone - values["top2_accuracy"]) > 1e-3


def test_metrics_of_perfect_predictions():
    p, y = drawn_predictions(skill=40.0)
    values = forde.predictive_metrics(torch.tensor(p).log(), torch.tensor(y))
    assert values["accuracy"] == 1 and values["nll_miss"] is None and values["disagreement"] == 0
    q = p[..., :2] / p[..., :2].sum(2, keepdims=True)
    two = forde.predictive_metrics(torch.tensor(q).log(), torch.zeros(60, dtype=torch.long))
    assert "top2_accuracy" in two and "top3_accuracy" not in two


@pytest.fixture(scope="module")
def evaluated(default_run):
    """(metrics, nets, {set: (member probabilities, labels, set)}) of the default forde_pca."""
    options, *_ = default_run
    seen, nets_of, real = {}, [], forde.predict

    def predict(nets, dataset, *rest):
        out = real(nets, dataset, *rest)
        seen[dataset.name] = out.double().exp().numpy(), dataset.labels.numpy(), dataset
        nets_of.append(nets)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forde, "predict", predict)
        metrics = forde.main([*options, "--methods", "forde_pca", "--eval", "--no-plot"])
    return metrics, nets_of[0], seen


def test_predictions_are_those_of_the_saved_members(default_run, evaluated):
    _, root, _, _ = default_run
    _, nets, seen = evaluated
    p, labels, test = seen["glyphs"]
    assert p.shape == (2, 2000, 10) and np.allclose(p.sum(2), 1, atol=1e-5)
    saved = torch.load(root / f"{STEM}-forde_pca-seed1" / "last.pt", weights_only=True)["model"]
    assert all(torch.equal(v, saved[k]) for k, v in nets.state_dict().items())
    rows = [0, 7, 1999]
    x = (test.images[rows].double() / 255 - test.mean[0]) / test.std[0]
    for member, net in enumerate(nets):
        net.double().eval()
        with torch.no_grad():
            right = net(x)[0].softmax(1).numpy()
        net.float()
        assert np.abs(p[member][rows] - right).max() < 1e-5


def test_evaluation_is_brute_force(evaluated):
    metrics, _, seen = evaluated
    assert len(seen) == 2 + 5 * len(KINDS)
    right = brute_force(*seen["glyphs"][:2])
    assert_metrics(metrics, forde.prefixed("test", right), 1e-5)
    inside = entropies(seen["glyphs"][0])
    outside = entropies(seen["glyphs_letters"][0])
    for score, a, b in zip(("total", "epistemic"), inside, outside):
        above = (b[:, None] > a[None]).mean() + 0.5 * (b[:, None] == a[None]).mean()
        assert metrics[f"glyphs_letters/auroc_{score}"] == pytest.approx(above, abs=1e-3)
    for severity in range(1, 6):
        rows = [seen[f"glyphs_computed_{kind}_s{severity}"] for kind in KINDS]
        pooled = brute_force(np.concatenate([p for p, *_ in rows], 1),
                             np.concatenate([y for _, y, _ in rows]))
        assert_metrics(metrics, forde.prefixed(f"glyphs_c_s{severity}", pooled), 1e-5)
        kinds = [brute_force(p, y) for p, y, _ in rows]
        for kind, values in zip(KINDS, kinds):
            for k in ("accuracy", "nll", "ece15"):
                assert metrics[f"glyphs_c_{kind}_s{severity}/{k}"] == pytest.approx(values[k],
                                                                                   abs=1e-5)
        by_kind = np.mean([values["ece15"] for values in kinds])
        assert metrics[f"glyphs_c_s{severity}/ece15_by_kind"] == pytest.approx(by_kind, abs=1e-5)
        assert pooled["ece15"] < by_kind - 0.01


def entropies(p):
    h = lambda q: -(q * np.log(q)).sum(-1)
    return h(p.mean(0)), h(p.mean(0)) - h(p).mean(0)


def slow_distance(nets, images, labels, of="logit"):
    """Mean of 1 - cos over pairs of members and examples: one backward pass an example."""
    distances = []
    for x, y in zip(images.double(), labels):
        gradients = []
        for net in nets:
            leaf = x[None].clone().requires_grad_()
            logits = net.double().eval()(leaf)[0][0]
            score = (logits.log_softmax(0) if of == "logprob" else logits)[y]
            g = torch.autograd.grad(score, leaf)[0].flatten()
            gradients.append(g / g.norm())
        distances += [1 - (a @ b).item() for i, a in enumerate(gradients) for b in gradients[:i]]
    return np.mean(distances)


def normalised(dataset):
    c = lambda values: torch.tensor(values, dtype=torch.float64)[:, None, None]
    return (dataset.images.double() / 255 - c(dataset.mean)) / c(dataset.std)


def test_diversity_of_input_gradients(evaluated):
    metrics, nets, seen = evaluated
    test = seen["glyphs"][2]
    rows = torch.arange(20) * 100  # --diversity-examples 20 of 2,000
    try:
        right = slow_distance(nets, normalised(test)[rows], test.labels[rows])
        assert metrics[f"diversity/{DISTANCE}"] == pytest.approx(right, abs=1e-5)
        few = [seen[f"glyphs_computed_{kind}_s3"][2] for kind in KINDS]
        images = torch.cat([normalised(f)[[0, 2]] for f in few])  # two of five for each kind
        right = slow_distance(nets, images, torch.cat([f.labels[[0, 2]] for f in few]))
        assert metrics[f"glyphs_c_s3/{DISTANCE}"] == pytest.approx(right, abs=1e-5)
    finally:
        nets.float()


@pytest.mark.parametrize("of", ["logit", "logprob"])
def test_gradient_distance_of_several_members(of):
    args = forde.parse_args([*BASE, "--members", "4", "--grad-of", of])
    torch.manual_seed(0)
    nets = torch.nn.ModuleList(forde.make_network(args, 10, (1, 28, 28)) for _ in range(4))
    for net in nets:
        torch.nn.init.normal_(net.head.weight)
        for norm in forde.norms_of(net):  # each member has running statistics of its own
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.3, 3)
    some = data.load("glyphs", "test").select(slice(9))
    value = forde.gradient_distance(nets, some, args, World())
    right = slow_distance(nets, normalised(some), some.labels, of)
    assert value == pytest.approx(right, abs=1e-5)
    assert abs(right - slow_distance(nets, normalised(some), some.labels,
                                     "logit" if of == "logprob" else "logprob")) > 1e-3


# ---- Stopped and resumed ------------------------------------------------------------------------

LONG = ["--members", "2", "--limit-train", "165", "-b", "8", "--epochs", "3", "--methods",
        "forde_pca", "--val-fraction", "0.02", "--eval-every", "1"]  # epochs of 20 steps


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """(last.pt, metrics) of a LONG run that nobody disturbed."""
    options = [*BASE, "--augment", *LONG, "--out-dir", str(tmp_path_factory.mktemp("calm"))]
    metrics = forde.main(options)
    return folder_of(options) / "last.pt", metrics


def test_killed_and_restarted_equals_uninterrupted(small, calm, tmp_path):
    options, (expected, metrics) = [*small, *LONG], calm
    folder, last = folder_of(options), 0
    for _ in range(2):
        child = Child(tmp_path, run_forde, *options)
        wait_for(lambda: epochs_done(folder) > last or not child.process.is_alive(), what="epoch")
        time.sleep(0.05)  # into the next epoch
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.join()
        last = epochs_done(folder)
        assert child.status == -signal.SIGKILL and last < 3, child.stderr
    assert forde.main(options) == metrics
    assert_same_weights(folder / "last.pt", expected)
    assert len(log_of(folder)) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_mid_epoch_and_resumed_equals_uninterrupted(small, calm, tmp_path, number):
    options, (expected, metrics) = [*small, *LONG], calm
    folder = folder_of(options)
    child = Child(tmp_path, run_forde, *options)
    wait_for(lambda: epochs_done(folder) > 0 or not child.process.is_alive(), what="epoch")
    os.kill(child.process.pid, number)
    child.wait()
    assert child.status == 128 + number, child.stderr
    assert child.stderr.count("\n") == 1 and number.name in child.stderr
    progress = torch.load(folder / "last.pt", weights_only=True)["progress"]
    assert 0 < progress["step"] < 20 and 0 < progress["epoch"] < 3
    assert f"epoch {progress['epoch'] + 1} after step {progress['step']}" in child.stderr
    assert not (folder / "results.json").exists()
    assert forde.main(options) == metrics
    assert_same_weights(folder / "last.pt", expected)


VARIANTS = [
    "--methods forde_pca",
    "--methods forde_identity --vectorise vmap",
    "--methods forde_identity --vectorise two_pass --chunk 1",
    "--methods forde_identity --update svgd",
    "--methods function_rde --update svgd",
    "--methods weight_rde --update svgd",
    "--methods function_rde --layers torch",
    "--methods feature_rde",
    "--methods lit",
    "--methods weight_rde --prior empcov",
    "--methods forde_tuned --repulse-every 2 --label-smoothing 0.1 --amp bf16"]


@pytest.mark.usefixtures("few_tests")
@pytest.mark.parametrize("more", VARIANTS)
def test_every_method_goes_on_where_it_stopped(small, monkeypatch, more):
    """Stopped by SIGTERM in the second step of the second epoch."""
    small = [*small, *more.split()]
    metrics, again = forde.main(small), with_options(small, name="again")
    real = forde.learning_rate

    def learning_rate(step, *rest):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(step, *rest)

    monkeypatch.setattr(forde, "learning_rate", learning_rate)
    with pytest.raises(common.Stopped, match="SIGTERM in epoch 2 after step 2"):
        forde.main(again)
    monkeypatch.undo()
    assert forde.main(again) == metrics
    assert_same_weights(folder_of(small) / "last.pt", folder_of(again) / "last.pt")


@pytest.mark.usefixtures("few_tests")
def test_stop_signal_in_the_last_step_is_not_swallowed(small, monkeypatch):
    real = forde.train_epoch

    def signalled(*args):
        done = real(*args)
        if args[4] == 1:  # the last epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(forde, "train_epoch", signalled)
    with pytest.raises(common.Stopped):
        forde.main(small)
    assert epochs_done(folder_of(small)) == 2


@pytest.mark.usefixtures("few_tests")
def test_resume_never_trains_anew_and_is_repeatable(small):
    first = forde.main(small)
    path = folder_of(small) / "last.pt"
    state = torch.load(path, weights_only=True)
    state["model"] = {k: v + 1 for k, v in state["model"].items()}
    torch.save(state, path)
    assert forde.main(small) != first  # the file is what counts
    assert forde.main([*small, "--resume", "never"]) == first


@pytest.mark.usefixtures("few_tests")
def test_resume_from_another_file(small, monkeypatch):
    metrics = forde.main(small)
    elsewhere = [*with_options(small, name="elsewhere"), "--resume",
                 str(folder_of(small) / "last.pt")]
    monkeypatch.setattr(forde, "train_epoch", None)
    assert forde.main(elsewhere) == metrics
    assert (folder_of(elsewhere) / "results.json").exists()
    assert forde.main([*elsewhere, "--eval"]) == metrics


@pytest.mark.usefixtures("few_tests")
def test_save_interval_keeps_the_result(small, monkeypatch):
    small, saves, real = [*small, "--epochs", "3"], [], common.Run.save
    metrics = forde.main(small)
    sparse = [*with_options(small, name="sparse"), "--save-interval", "2"]
    monkeypatch.setattr(common.Run, "save", lambda self, **state: (
        saves.append(state["progress"]["epoch"]), real(self, **state)))
    assert forde.main(sparse) == metrics and saves == [2, 3]
    assert_same_weights(folder_of(sparse) / "last.pt", folder_of(small) / "last.pt")


# ---- Several processes --------------------------------------------------------------------------


def assert_close_metrics(a, b, tolerance):
    """Metrics of two runs whose weights differ by rounding: one example can change its class."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        counted = any(k in key for k in ("accuracy", "disagreement", "ece", "fpr", "auroc", "aupr"))
        if value is not None:
            assert abs(b[key] - value) <= (2e-3 if counted else tolerance), key


SPREAD = [
    "--methods forde_pca",
    "--methods forde_tuned --layers torch",
    "--methods forde_identity --vectorise two_pass --chunk 1",
    "--methods forde_identity --vectorise vmap",
    "--methods forde_identity --repulse-every 2 --label-smoothing 0.1",
    "--methods function_rde",
    "--methods feature_rde",
    "--methods lit --grad-of logprob --chunk 1",
    "--methods weight_rde --prior empcov",
    "--methods forde_identity --update svgd",
    "--methods function_rde --update svgd",
    "--methods weight_rde --update svgd"]


def run_briefly(*argv):
    keep_few_tests()
    run_forde(*argv)


def main_in_float64(*runs):
    """forde.main of several lists of options, one after the other, in one process group."""
    in_float64(forde)
    keep_few_tests()
    for number, options in enumerate(runs):
        print(f"run {number}", flush=True)
        forde.main(options)


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """{what: (options of one process's run, of two processes' run)} and the two processes, done."""
    folder, pairs = tmp_path_factory.mktemp("spread"), {}
    for number, more in enumerate(SPREAD):
        shared = [*BASE, "--augment", "--out-dir", str(folder), "--epochs", "1", "--limit-steps",
                  "3", *more.split()]
        pairs[more] = [with_options(shared, name=f"{name}{number}") for name in ("one", "two")]
    with pytest.MonkeyPatch.context() as patch:
        in_float64(forde, patch.setattr)
        keep_few_tests(patch.setattr)
        for one, _ in pairs.values():
            forde.main(one)  # first: the other runs read the basis of the inputs that it leaves
    children = start_ranks(folder, 2, main_in_float64, *(two for _, two in pairs.values()))
    return pairs, [child.wait() for child in children]


@pytest.mark.parametrize("more", SPREAD)
def test_two_processes_equal_one(spread, more):
    pairs, children = spread
    one, two = pairs[more]
    assert (folder_of(two) / "results.json").exists(), [c.stderr[-2000:] for c in children]
    assert all(v.dtype != torch.float32 for v in weights_of(one).values())
    assert distance_of_weights(one, two) < (1e-7 if "feature" in more else 1e-11)  # eigenvectors
    results = [strict_json(folder_of(options) / "results.json") for options in (one, two)]
    assert [r["environment"]["processes"] for r in results] == [1, 2]
    assert_close_metrics(*(r["metrics"] for r in results), 1e-5)
    [a], [b] = (log_of(folder_of(options)) for options in (one, two))
    for key in ("loss_nats", "repulsion_nats", "median", "member_accuracy"):
        assert a[key] == pytest.approx(b[key], rel=1e-5), key
    assert a["repulsion_nats"] > 0


def test_one_of_two_processes_prints(spread):
    _, (first, second) = spread
    assert first.status == second.status == 0, first.stderr
    assert first.stdout.count("accuracy %") == len(SPREAD)
    assert second.stdout == "".join(f"run {k}\n" for k in range(len(SPREAD)))
    assert "Traceback" not in first.stderr + second.stderr


def test_one_process_evaluates_the_run_of_two(small, tmp_path):
    small = [*small, "--methods", "forde_pca", "deep_ensemble", "--shift", "computed",
             "--shift-examples", "5", "--epochs", "1", "--limit-steps", "2", "--plot", "--members",
             "2"]
    finish(start_ranks(tmp_path, 2, run_forde, *small))
    root = folder_of(small).parent
    assert not_blank(root / "run-comparison-seed1-runs1" / "shift.png")
    before = {name: content for name, content in snapshot(root).items() if name.endswith(".pt")}
    results = strict_json(root / "run-comparison-seed1-runs1" / "results.json")
    assert results["environment"]["processes"] == 2
    metrics = forde.main([*small, "--eval", "--no-plot"])
    assert_close_metrics(results["metrics"], common.to_json(metrics), 1e-5)
    # the basis is the one process's
    basis = torch.load(root / "pca-glyphs-10000.pt", weights_only=True)
    (root / "pca-glyphs-10000.pt").unlink()
    forde.main([*small, "--resume", "never", "--methods", "forde_pca", "--limit-steps", "1"])
    again = torch.load(root / "pca-glyphs-10000.pt", weights_only=True)
    assert again["config"] == basis["config"]
    a, b = (t["eigenvectors"] * t["eigenvalues"] @ t["eigenvectors"].T for t in (basis, again))
    assert ((a - b).norm() / b.norm()).item() < 1e-5
    assert len(before) == 3 and all((root / name).exists() for name in before)


def test_stopped_with_two_processes_and_resumed(small, tmp_path):
    small = [*small, "--members", "2", "--limit-train", "100", "-b", "8", "--methods",
             "function_rde"]  # 12 steps an epoch
    calm, stopped = (with_options(small, name=name) for name in ("calm", "stopped"))
    finish(start_ranks(tmp_path, 2, run_briefly, *calm))
    children = start_ranks(tmp_path, 2, run_briefly, *stopped)
    wait_for(lambda: epochs_done(folder_of(stopped)) > 0 or not children[1].process.is_alive(),
             what="epoch")
    os.kill(children[1].process.pid, signal.SIGTERM)  # one of the two: both must stop
    finish(children, 128 + signal.SIGTERM)
    assert epochs_done(folder_of(stopped)) < 2
    finish(start_ranks(tmp_path, 2, run_briefly, *stopped))
    assert_same_weights(folder_of(calm) / "last.pt", folder_of(stopped) / "last.pt")


def test_two_machines_that_share_no_disk(small, tmp_path):
    """Only the main process writes; the other gets the basis and the checkpoint from it."""
    def each(rank):
        return ["--out-dir", str(tmp_path / f"machine{rank}")]

    small = [*small, "--methods", "forde_pca", "--epochs", "1", "--limit-steps", "1"]
    finish(start_ranks(tmp_path, 2, run_briefly, *small, each=each))
    before = snapshot(tmp_path / "machine0" / "forde")
    assert "pca-glyphs-10000.pt" in before and "run/last.pt" in before
    finish(start_ranks(tmp_path, 2, run_briefly, *small, "--eval", each=each))
    after = snapshot(tmp_path / "machine0" / "forde")
    assert {k for k in before if before[k] != after[k]} <= {"run/results.json"}
    assert not (tmp_path / "machine1").exists()


def test_a_batch_that_does_not_divide_by_the_processes(small, tmp_path):
    for child in start_ranks(tmp_path, 2, run_forde, *small, "-b", "33"):
        child.wait()
        assert child.status == 2 and child.stderr.count("\n") == 1, child.stderr
        assert "--batch-size 33" in child.stderr and "2 processes" in child.stderr
    assert not (tmp_path / "runs").exists()


def test_misuse_by_two_processes(small, tmp_path):
    """All processes end, in words: what only one can see, it tells the others."""
    (tmp_path / "file").touch()
    torch.save({"config": {}}, tmp_path / "other.pt")
    for more in (["--ood", "nonsense"], ["--out-dir", str(tmp_path / "file")], ["--eval"],
                 ["--methods", "forde_pca", "--pca", str(tmp_path / "other.pt")]):
        for child in start_ranks(tmp_path, 2, run_forde, *small, *more):
            child.wait()
            assert child.status == 2 and "Traceback" not in child.stderr, child.stderr
            assert child.stderr.startswith("forde.py: error: ") and child.stderr.count("\n") == 1


# ---- Methods, networks, options -----------------------------------------------------------------


@pytest.mark.usefixtures("few_tests")
def test_every_method(small):
    """All repel but the deep ensemble, and no two end alike."""
    metrics = forde.main([*small, "--limit-steps", "3", "--methods", *forde.METHODS])
    root = folder_of(small).parent
    heads = {}
    for method in forde.METHODS:
        folder = root / f"run-{method}-seed1"
        rows = log_of(folder)
        assert_ranges({k.removeprefix(f"{method}/"): v for k, v in metrics.items()
                       if k.startswith(f"{method}/")}, 3)
        if method == "deep_ensemble":
            assert all(row["repulsion_nats"] == 0 for row in rows)
        else:
            assert rows[-1]["repulsion_nats"] > 0
        if method.startswith("forde"):
            assert all(row["repulsion_nats"] <= math.log(3) / 16 + 1e-7 for row in rows)
            assert rows[-1]["median"] > 0
        heads[method] = torch.load(folder / "last.pt", weights_only=True)["model"]
    for a in heads:
        for b in heads:
            assert a == b or not torch.equal(heads[a]["0.stem.weight"], heads[b]["0.stem.weight"])
    shared = heads["feature_rde"]
    assert torch.equal(shared["0.head.weight"], shared["2.head.weight"])
    assert not torch.equal(heads["lit"]["0.head.weight"], heads["lit"]["2.head.weight"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(options): the options of a run of three steps, each trained once and not tested."""
    folder, done = tmp_path_factory.mktemp("trained"), {}
    at = BASE.index("--methods")
    less = [*BASE[:at], *BASE[at + 2:], "--epochs", "1", "--limit-steps", "3", "--out-dir",
            str(folder), "--quiet"]

    def run(more, double=False):
        if (more, double) not in done:
            options = [*with_options(less, name=f"run{len(done)}"), *more.split()]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forde, "evaluate", lambda *_: {"test/accuracy": 0.0, "test/nll": 0.0})
                if double:
                    in_float64(forde, patch.setattr)
                forde.main(options)
            done[more, double] = options
        return done[more, double]

    return run


@pytest.mark.parametrize("a, b", [
    ("--methods forde_tuned --alpha 1", "--methods forde_pca"),
    ("--methods forde_tuned --alpha 1 --tuned-formula website", "--methods forde_pca"),
    ("--methods forde_tuned --alpha 0", "--methods forde_identity"),
    ("--repulsion none", "--methods deep_ensemble"),
    ("--repulsion input_gradient", "--methods forde_pca"),
    ("--methods forde_pca --pca-components 784", "--methods forde_pca"),
    # the first step is from a head of zeros, where nothing repels
    ("--methods forde_identity --repulse-every 100", "--methods deep_ensemble"),
    ("--methods forde_identity --repulsion-coef 0", "--methods deep_ensemble"),
    ("--methods weight_rde --repulsion-coef 0", "--methods deep_ensemble"),
    ("--methods function_rde --repulsion-coef 0 --cauchy 0", "--methods deep_ensemble"),
    ("--methods deep_ensemble --vectorise vmap", "--methods deep_ensemble"),
    ("--methods deep_ensemble --update svgd", "--methods deep_ensemble")])
def test_options_that_are_another_method(trained, a, b):
    assert distance_of_weights(trained(a), trained(b)) < 1e-4


@pytest.mark.parametrize("a, b", [
    ("--alpha 0.5", "--alpha 0.5 --tuned-formula website"),
    ("--alpha 0.5", ""),
    ("--methods forde_pca", "--methods forde_pca --pca-components 5"),
    ("--methods forde_pca", "--methods forde_pca --centre-pca"),
    ("", "--grad-of logprob"),
    ("", "--eps 0.01"),
    ("", "--repulsion-coef 2"),
    ("", "--repulse-every 2"),
    ("", "--label-smoothing 0.1"),
    ("", "--update svgd"),
    ("", "--prior empcov"),
    ("--prior empcov", "--prior empcov --empcov-eps 1"),
    ("", "--weight-decay 0"),
    ("", "--layers torch"),
    ("", "--augment"),
    ("--methods function_rde", "--methods function_rde --cauchy 1"),
    ("--methods feature_rde", "--methods feature_rde --match-published")])
def test_options_that_change_the_result(trained, a, b):
    a, b = (trained(text if "--methods" in text else f"--methods forde_tuned {text}")
            for text in (a, b))
    assert all(v.isfinite().all() for v in weights_of(b).values())
    assert distance_of_weights(a, b) > 1e-6


@pytest.mark.parametrize("more", ["--vectorise vmap", "--vectorise two_pass",
                                  "--vectorise two_pass --chunk 1", "--chunk 1"])
@pytest.mark.parametrize("method", ["forde_pca", "function_rde"])
def test_vectorised_and_chunked_members_are_the_same(trained, method, more):
    plain = trained(f"--methods {method}", True)
    other = trained(f"--methods {method} {more}", True)
    assert distance_of_weights(plain, other) < 1e-11
    [a], [b] = (log_of(folder_of(options)) for options in (plain, other))
    assert a["repulsion_nats"] == pytest.approx(b["repulsion_nats"], rel=1e-6)


@pytest.mark.usefixtures("few_tests")
@pytest.mark.parametrize("model", ["resnet18", "resnet34", "preact_resnet18", "wrn_16_4"])
def test_networks(small, model):
    metrics = forde.main([*small, "--model", model, "--members", "2", "--epochs", "1",
                          "--limit-steps", "2", "--ood", "glyphs_letters"])
    assert metrics.keys() == named_metrics("", "glyphs_letters") | set()
    assert_ranges(metrics, 2)
    assert log_of(folder_of(small))[0]["repulsion_nats"] > 0


@pytest.mark.usefixtures("few_tests")
def test_bf16_keeps_weights_and_repulsion_wide(small):
    metrics = forde.main([*small, "--amp", "bf16", "--methods", "forde_pca"])
    assert_ranges(metrics, 3)
    assert all(v.dtype in (torch.float32, torch.int64) for v in weights_of(small).values())
    assert 0 < log_of(folder_of(small))[-1]["repulsion_nats"] < math.log(3) / 16


@pytest.mark.usefixtures("few_tests")
def test_last_partial_batch_is_left(small, monkeypatch):
    """76 images in batches of 16: four steps an epoch, whatever the last batch has."""
    rates, real = [], forde.learning_rate
    monkeypatch.setattr(forde, "learning_rate", lambda step, n, args: (
        rates.append((step, n)), real(step, n, args))[1])
    forde.main(small)
    steps = [step for step, _ in rates]
    assert set(steps) == set(range(8)) and {n for _, n in rates} == {4}
    assert weights_of(small)["0.norm.steps"] == 8


@pytest.mark.usefixtures("few_tests")
def test_fewer_images_than_a_batch(small):
    metrics = forde.main([*small, "--limit-train", "10"])
    assert weights_of(small)["0.norm.steps"] == 2
    assert_ranges(metrics, 3)
    assert 0 <= log_of(folder_of(small))[-1]["member_accuracy"] <= 1


def test_validation_gives_a_temperature_and_log_entries(small, monkeypatch):
    seen, real = {}, forde.predict

    def predict(nets, dataset, *rest):
        out = real(nets, dataset, *rest)
        seen[len(dataset)] = out.double().exp().numpy(), dataset.labels.numpy(), dataset
        return out

    monkeypatch.setattr(forde, "predict", predict)
    small = [*small, "--val-fraction", "0.03", "--eval-every", "2", "--epochs", "3"]
    metrics = forde.main(small)
    p, y, val = seen[300]
    assert_metrics(metrics, forde.prefixed("val", brute_force(p, y)), 1e-5)
    train = forde.training_set(forde.parse_args(small))
    rows = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in rows for image in val.images)
    # scaled: the mean of the members' probabilities, as one network
    t = metrics["temperature"]
    losses = []
    for temperature in (t / 1.05, t, t * 1.05):
        q = p.mean(0)**(1 / temperature)
        losses.append(-np.log(q / q.sum(1, keepdims=True))[np.arange(300), y].mean())
    assert 0 < t < 1e3 + 1 and t != 1
    assert losses[1] == min(losses[:2] if t == 1e3 else losses)  # 1e3 is where the search ends
    test, labels, _ = seen[2000]
    q = test.mean(0)**(1 / t)
    right = brute_force((q / q.sum(1, keepdims=True))[None], labels)
    assert metrics["test/nll_scaled"] == pytest.approx(right["nll"], abs=1e-5)
    assert metrics["test/ece15_scaled"] == pytest.approx(right["ece15"], abs=1e-5)
    rows = log_of(folder_of(small))
    assert ["val_nll" in row for row in rows] == [False, True, False]
    assert {"val_nll", "val_accuracy"} <= rows[1].keys() and 1 < rows[1]["val_nll"] < 4
    assert not any(k.startswith("val") or "scaled" in k
                   for k in forde.main(with_options([*small[:-6]], name="without")))


@pytest.mark.usefixtures("few_tests")
def test_evaluating_every_so_often_changes_no_weight(small):
    small = [*small, "--val-fraction", "0.02"]
    plain, watched = (with_options(small, name=name) for name in ("plain", "watched"))
    assert forde.main(plain) == forde.main([*watched, "--eval-every", "1"])
    assert equal_weights(plain, watched)


@pytest.mark.usefixtures("few_tests")
def test_runs(small):
    small = [*small, "--runs", "2", "--methods", "deep_ensemble", "forde_identity"]
    metrics = forde.main([*small, "--plot"])
    root = folder_of(small).parent
    assert {p.name for p in root.iterdir()} == {
        "run-comparison-seed1-runs2",
        *(f"run-{m}-seed{s}" for m in ("deep_ensemble", "forde_identity") for s in (1, 2))}
    results = strict_json(root / "run-comparison-seed1-runs2" / "results.json")
    assert results["metrics"] == common.to_json(metrics)
    assert results["standard_error"].keys() == metrics.keys()
    for method in ("deep_ensemble", "forde_identity"):
        rows = [strict_json(root / f"run-{method}-seed{s}" / "results.json")["metrics"]
                for s in (1, 2)]
        assert results["values"][method] == rows and rows[0] != rows[1]
        for key in rows[0]:
            values = [row[key] for row in rows]
            assert metrics[f"{method}/{key}"] == pytest.approx(np.mean(values))
            error = np.std(values, ddof=1) / 2**0.5
            assert results["standard_error"][f"{method}/{key}"] == pytest.approx(error)
    second = forde.main([*with_options(small, name="two"), "--runs", "1", "--seed", "2"])
    for key, value in second.items():  # the second run is the run of that seed
        method, key = key.split("/", 1)
        assert results["values"][method][1][key] == value


@pytest.mark.usefixtures("few_tests")
def test_basis_does_not_depend_on_what_ran_before(small, tmp_path):
    """The basis is that of the whole training set, whatever seed and --limit-train say."""
    small = [*small, "--methods", "forde_pca", "--seed", "2", "--epochs", "1"]
    alone = [*small, "--out-dir", str(tmp_path / "elsewhere")]
    forde.main([*with_options(small, name="first"), "--seed", "1"])
    forde.main(small)
    forde.main(alone)
    assert distance_of_weights(small, alone) < 1e-6


@pytest.mark.parametrize("more", [
    "--methods deep_ensemble", "--methods forde_pca", "--methods weight_rde",
    "--methods function_rde", "--methods feature_rde", "--methods lit",
    "--methods forde_identity --vectorise vmap", "--methods forde_identity --vectorise two_pass",
    "--methods forde_identity --update svgd", "--methods weight_rde --update svgd"])
def test_one_member_is_plain_training(trained, more):
    one, plain = (trained(f"--members 1 {words}") for words in (more, "--methods deep_ensemble"))
    assert all(row["repulsion_nats"] == row["median"] == 0 for row in log_of(folder_of(one)))
    assert distance_of_weights(one, plain) < 1e-4


def test_one_member_has_no_diversity(small):
    metrics = forde.main([*small, "--members", "1", "--limit-steps", "2"])
    assert_finite(metrics)
    assert metrics["test/disagreement"] == metrics["diversity/disagreement"] == 0
    assert not any(DISTANCE in key for key in metrics)
    assert abs(metrics["test/epistemic_mean"]) < 1e-6


def test_one_member_under_corruption(small):
    metrics = forde.main([*small, "--members", "1", "--limit-steps", "1", "--shift", "computed",
                          "--shift-examples", "5", "--plot"])
    assert_finite(metrics)
    assert "glyphs_c_s1/nll" in metrics and not any(DISTANCE in key for key in metrics)
    assert not_blank(folder_of(small) / "shift.png")


# ---- Features and toys --------------------------------------------------------------------------


@pytest.fixture
def features(tmp_path):
    """Options of a run on features of three classes far apart, and a far set as OOD data."""
    rng = np.random.default_rng(0)
    for name, n in (("train", 140), ("test", 70), ("far", 50)):
        labels = rng.integers(0, 3, n)
        z = rng.normal(size=(n, 6)) * [1, 2, 1, 1, 1, 1] + 20 * np.eye(6)[labels]
        np.savez(tmp_path / f"{name}.npz", features=z + 40 * (name == "far"), labels=labels)
    paths = [str(tmp_path / f"{name}.npz") for name in ("train", "test", "far")]
    return [*"--dataset features --members 3 -b 32 --epochs 4 --hidden 16 16 --no-plot --name run "
            "--diversity-examples 20 --lr 0.1".split(), *CPU, "--features", *paths[:2],
            "--out-dir", str(tmp_path / "runs"), "--ood", paths[2]]


def test_features(features, tmp_path):
    methods = ("deep_ensemble", "forde_pca", "forde_tuned", "function_rde", "feature_rde")
    metrics = forde.main([*features, "--methods", *methods])
    root = folder_of(features).parent
    for method in methods:
        own = {k.removeprefix(f"{method}/"): v for k, v in metrics.items()
               if k.startswith(f"{method}/")}
        assert own.keys() == named_metrics("", "far")
        # perfect on the test set: null, in strict JSON, here and in the comparison
        assert own["test/accuracy"] == 1 and own["test/nll_miss"] is None
        assert strict_json(root / f"run-{method}-seed1" / "results.json")["metrics"] == \
            common.to_json(own)
    folder = root / "run-comparison-seed1-runs1"
    assert strict_json(folder / "results.json")["metrics"]["forde_pca/test/nll_miss"] is None
    # the basis: of the features, each standardised
    z = np.load(tmp_path / "train.npz")["features"]
    z = (z - z.mean(0)) / z.std(0)
    basis = torch.load(root / "pca-train-140.pt", weights_only=True)
    right = np.linalg.eigvalsh(z.T @ z / 139)[::-1]
    np.testing.assert_allclose(basis["eigenvalues"].numpy(), right, rtol=1e-5)
    assert forde.main([*features, "--methods", *methods, "--eval"]) == metrics


def test_features_of_few_rows_by_two_processes(features, tmp_path, monkeypatch):
    features = [*features, "--methods", "forde_pca", "--limit-train", "100", "--epochs", "1"]
    two = with_options(features, name="two")
    in_float64(forde, monkeypatch.setattr)
    metrics = forde.main(features)
    assert strict_json(folder_of(features) / "args.json")["limit_train"] == 100
    assert (folder_of(features).parent / "pca-train-140.pt").exists()
    finish(start_ranks(tmp_path, 2, run_forde_in_float64, *two))
    assert distance_of_weights(features, two) < 1e-9
    results = strict_json(folder_of(two) / "results.json")
    assert_close_metrics(common.to_json(metrics), results["metrics"], 1e-5)


@pytest.mark.parametrize("toy", ["toy_regression", "toy_classification"])
def test_toys(tmp_path, toy):
    options = ["--dataset", toy, "--members", "4", "--epochs", "2", "--out-dir", str(tmp_path),
               "--name", "toy", "--hidden", "16", *CPU]
    metrics = forde.main(options)
    root = tmp_path / "forde"
    assert not_blank(root / "toy-comparison-seed1" / "toy.png")
    keys = {"train/rmse", "train/std_mean", "far/std_mean"} if toy == "toy_regression" else {
        "far/total_mean", "far/epistemic_mean", *(f"test/{k}" for k in PREDICTIVE)}
    for method in ("deep_ensemble", "forde_identity"):
        folder = root / f"toy-{method}-seed1"
        own = strict_json(folder / "results.json")["metrics"]
        assert own.keys() == keys
        assert own == {k.removeprefix(f"{method}/"): v for k, v in common.to_json(metrics).items()
                       if k.startswith(f"{method}/")}
        assert_finite(own)
        model = torch.load(folder / "last.pt", weights_only=True)["model"]
        assert model["0.linears.0.weight"].shape == (16, 2)  # two features: gradients can turn
        rows = log_of(folder)
        assert (rows[-1]["repulsion_nats"] > 0) == (method != "deep_ensemble")
        assert rows[1]["loss_nats"] < rows[0]["loss_nats"]
        assert ("member_accuracy" in rows[0]) == (toy == "toy_classification")
    assert forde.main([*options, "--eval", "--no-plot"]) == metrics


# ---- Published corruptions ----------------------------------------------------------------------


@pytest.fixture
def tiny(small_data, tmp_path):
    return [*"--dataset tiny_imagenet --model resnet9 --width 0.02 --members 2 -b 32 --epochs 1 "
            "--limit-train 64 --limit-steps 1 --no-plot --name run --diversity-examples 4 "
            "--methods deep_ensemble forde_identity".split(), *CPU, "--data-dir", str(small_data),
            "--out-dir", str(tmp_path / "runs"), "--ood", f"folder:{small_data}/odd"]


def test_absent_published_corruptions_are_skipped_with_one_line(tiny, small_data, capfd):
    metrics = forde.main(tiny)
    out, err = capfd.readouterr()
    assert err == "" and out.count("skipped") == 1
    [line] = [line for line in out.splitlines() if "skipped" in line]
    assert "tiny_imagenet_c" in line and str(small_data) in line and "Tiny-ImageNet-C" in line
    assert strict_json(folder_of(tiny).parent / "run-comparison-seed1-runs1" / "results.json")
    assert not any("imagenetc" in key for key in metrics)
    assert {f"{m}/odd/auroc_epistemic" for m in ("deep_ensemble", "forde_identity")} <= \
        metrics.keys()
    assert strict_json(folder_of(tiny).parent / "run-forde_identity-seed1" / "args.json")["augment"]


def test_published_corruptions_in_folders_and_in_archives(tiny, small_data, tmp_path):
    """Tiny-ImageNet-C of two kinds, two images a class, as folders and as zip archives."""
    rng, classes = np.random.default_rng(3), [f"n0000000{k}" for k in range(4)]
    places = [tmp_path / layout for layout in ("folders", "archives")]
    for place in places:
        place.mkdir()
        (place / "tiny-imagenet-200").symlink_to(small_data / "tiny-imagenet-200")
    for kind in ("fog", "snow"):
        for severity in range(1, 6):
            at = [p / "Tiny-ImageNet-C" / kind / str(severity) for p in places]
            at[1].mkdir(parents=True)
            for name in classes:
                (at[0] / name).mkdir(parents=True)
                for i in range(2):
                    pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(at[0] / name / f"{i}.png", compress_level=1)
                with zipfile.ZipFile(at[1] / f"{name}.zip", "w") as archive:
                    for file in sorted((at[0] / name).iterdir()):
                        archive.write(file, f"{name}/{file.name}")
    tiny = [*tiny, "--methods", "forde_identity", "--data-dir", str(places[0])]
    metrics = forde.main([*tiny, "--plot"])
    assert not_blank(folder_of(tiny) / "shift.png")
    again = forde.main([*tiny, "--eval", "--data-dir", str(places[1])])
    assert again == metrics
    for s in range(1, 6):
        assert {f"tinyimagenetc_s{s}/{k}" for k in (*PREDICTIVE, "ece15_by_kind", DISTANCE)} <= \
            metrics.keys()
        for k in ("accuracy", "nll"):
            kinds = [metrics[f"tinyimagenetc_{kind}_s{s}/{k}"] for kind in ("fog", "snow")]
            assert metrics[f"tinyimagenetc_s{s}/{k}"] == pytest.approx(np.mean(kinds), abs=1e-6)
    severities = [metrics[f"tinyimagenetc_s{s}/nll"] for s in range(1, 6)]
    assert len(set(severities)) == 5
    assert metrics["tinyimagenetc/nll"] == pytest.approx(np.mean(severities))
    few = forde.main([*tiny, "--eval", "--shift-examples", "3"])
    assert few["test/nll"] == metrics["test/nll"]
    assert few["tinyimagenetc_s1/nll"] != metrics["tinyimagenetc_s1/nll"]
    none = forde.main([*tiny, "--eval", "--shift", "none"])
    assert not any("tinyimagenetc" in key for key in none)


# ---- The basis of the inputs --------------------------------------------------------------------


def test_basis_is_that_of_the_normalised_images(small):
    forde.main([*small, "--methods", "forde_pca", "--epochs", "0", "--val-fraction", "0.3"])
    basis = torch.load(folder_of(small).parent / "pca-glyphs-10000.pt", weights_only=True)
    train = data.load("glyphs", "train", val_fraction=0)  # of all, validation included
    x = normalised(train).flatten(1).numpy()
    values, vectors = np.linalg.eigh(x.T @ x / 9999)
    values, vectors = values[::-1], vectors[:, ::-1]
    ours, u = basis["eigenvalues"].double().numpy(), basis["eigenvectors"].double().numpy()
    assert basis["eigenvalues"].dtype == torch.float32 and u.shape == (784, 784)
    np.testing.assert_allclose(ours, np.maximum(values, 0), rtol=1e-4, atol=1e-5 * values[0])
    np.testing.assert_allclose(u.T @ u, np.eye(784), atol=1e-5)
    assert np.abs(u * ours @ u.T - x.T @ x / 9999).max() < 1e-5 * values[0]
    assert (np.abs((u[:, :5] * vectors[:, :5]).sum(0)) > 0.999).all()


@pytest.mark.parametrize("centre", [False, True])
def test_second_moments_are_in_the_order_of_the_network(centre):
    """Channels, rows, columns: of colour images of unequal sides, every entry by its place."""
    images = torch.randint(0, 256, (30, 3, 2, 5), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 4
    some = data.ImageSet("some", images, torch.zeros(30, dtype=torch.long), 1, (0.4, 0.3, 0.2),
                         (0.2, 0.3, 0.4))
    args = forde.parse_args([*BASE, *["--centre-pca"] * centre])
    moments = forde.second_moments(some, args, World())
    x = normalised(some).numpy().reshape(30, 30)  # [N, C H W]
    right = np.cov(x.T) if centre else x.T @ x / 29
    assert moments.dtype == torch.float64
    np.testing.assert_allclose(moments.numpy(), right, rtol=1e-5, atol=1e-5)
    assert np.abs(np.cov(x.T) - x.T @ x / 29).max() > 0.01


@pytest.mark.usefixtures("few_tests")
def test_basis_is_written_once_and_read_again(small, monkeypatch):
    small, calls, real = [*small, "--methods", "forde_pca", "--epochs", "1"], [], \
        forde.second_moments
    monkeypatch.setattr(forde, "second_moments", lambda *a, **k: calls.append(1) or real(*a, **k))
    forde.main(small)
    path = folder_of(small).parent / "pca-glyphs-10000.pt"
    before = path.read_bytes()
    for more in (["--methods", "forde_tuned"], ["--pca-components", "3"], ["--augment"]):
        forde.main([*with_options(small, name=more[-1].strip("-")), *more])
    assert len(calls) == 1 and path.read_bytes() == before
    forde.main([*with_options(small, name="centred"), "--centre-pca"])
    assert len(calls) == 2
    centred = torch.load(path.with_name("pca-glyphs-10000-centred.pt"), weights_only=True)
    basis = torch.load(path, weights_only=True)
    assert (basis["eigenvalues"][0] - centred["eigenvalues"][0]) > 0.01 * basis["eigenvalues"][0]
    moved = path.rename(path.with_name("moved.pt"))
    elsewhere = [*with_options(small, name="elsewhere"), "--pca", str(moved)]
    forde.main(elsewhere)
    assert len(calls) == 2 and equal_weights(elsewhere, small) and not path.exists()
    forde.main(with_options([*small, "--methods", "forde_identity"], name="identity"))
    assert len(calls) == 2


@pytest.mark.parametrize("what", ["other data", "other size", "damaged", "absent", "checkpoint"])
def test_a_basis_that_does_not_fit_is_refused(small, refused, tmp_path, what):
    small = [*small, "--methods", "forde_pca", "--epochs", "1", "--limit-steps", "1"]
    path = tmp_path / "basis.pt"
    if what == "damaged":
        path.write_bytes(b"no basis")
    elif what != "absent":
        forde.main([*small, "--out-dir", str(tmp_path / "other")])
        made = tmp_path / "other" / "forde"
        path = made / "run" / "last.pt" if what == "checkpoint" else next(made.glob("pca-*"))
    if "other" in what:
        state = torch.load(path, weights_only=True)
        changed = {"dataset": "numbers"} if what == "other data" else {"images": 70}
        torch.save({**state, "config": {**state["config"], **changed}}, path)
    err = refused(*small, "--pca", str(path), writes=["runs/forde/run/args.json"])
    assert str(path) in err
    if "other" in what:
        assert "--pca" in err
        assert ("dataset" if what == "other data" else "images") in err


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, named", [
    ("--nonsense", "--nonsense"),
    ("--dataset nonsense", "nonsense"),
    ("--methods nonsense", "nonsense"),
    ("--methods", "--methods"),
    ("--kernel nonsense", "--kernel"),
    ("--model nonsense", "--model"),
    ("--repulsion nonsense", "--repulsion"),
    ("--members 0", "--members 0"),
    ("--members -1", "--members -1"),
    ("--members 4 --chunk 3", "--chunk 3"),
    ("--chunk 4", "--chunk 4"),
    ("--chunk -1", "--chunk -1"),
    ("--methods forde_pca --kernel pca", "--kernel"),
    ("--methods lit --repulsion lit", "--repulsion"),
    ("-- --repulsion none --kernel pca", "--kernel"),
    ("-- --repulsion weight --kernel identity --epochs 1 --kernel pca", "--kernel"),
    ("--alpha 2", "--alpha 2"),
    ("--alpha -0.1", "--alpha -0.1"),
    ("--alpha nan", "--alpha nan"),
    ("--methods lit --update svgd", "--update svgd"),
    ("--methods feature_rde --update svgd", "--update svgd"),
    ("--update svgd --prior empcov", "--prior"),
    ("--members 1 --update svgd --methods nonsense", "nonsense"),
    ("--dataset features", "--features"),
    ("--features a.npz b.npz", "--dataset features"),
    ("--features a.npz", "--features"),
    ("--dataset features --features nowhere.npz nowhere.npz", "nowhere.npz"),
    ("--model mlp", "--model mlp"),
    ("--dataset toy_regression --model resnet9", "--model resnet9"),
    ("--dataset toy_regression --shift computed", "--shift"),
    ("--dataset toy_regression --prior empcov --shift none", "--prior empcov"),
    ("--methods forde_tuned --tuned-formula website --pca-components 5", "--pca-components"),
    ("--compile", "--compile"),
    ("--compile --vectorise vmap", "--compile"),
    ("--compile --vectorise two_pass --update svgd", "--compile"),
    ("--eval-every 1", "--val-fraction"),
    ("--eval-every -1 --val-fraction 0.1", "--eval-every -1"),
    ("--val-fraction 1", "--val-fraction 1"),
    ("--val-fraction 0.00001", "--val-fraction"),
    ("--shift published", "--shift published"),
    ("--shift-examples -1", "--shift-examples -1"),
    ("--diversity-examples 0", "--diversity-examples 0"),
    ("--limit-train 0", "--limit-train 0"),
    ("--limit-steps 0", "--limit-steps 0"),
    ("--runs 0", "--runs 0"),
    ("--repulse-every 0", "--repulse-every 0"),
    ("--save-interval 0", "--save-interval 0"),
    ("--repulsion-coef -1", "--repulsion-coef -1"),
    ("--momentum 1", "--momentum 1"),
    ("--weight-decay -1", "--weight-decay -1"),
    ("--label-smoothing 1", "--label-smoothing 1"),
    ("--lr-ratio 2", "--lr-ratio 2"),
    ("--lr nan", "--lr nan"),
    ("--eps -1", "--eps -1"),
    ("--empcov-eps 0", "--empcov-eps 0"),
    ("--pca-components -1", "--pca-components -1"),
    ("--cauchy -1", "--cauchy -1"),
    ("--hidden 16 0", "--hidden 0"),
    ("--width 0", "--width 0"),
    ("--epochs -1", "--epochs -1"),
    ("--epochs x", "--epochs"),
    ("--batch-size 0", "--batch-size 0"),
    ("--seed -1", "--seed -1"),
    ("--ood nonsense", "nonsense"),
    ("--ood folder:nowhere", "nowhere"),
    ("--ood nowhere.npz", "nowhere.npz"),
    ("--methods forde_pca --pca nowhere.pt", "nowhere.pt"),
    ("--device nonsense", "--device nonsense"),
    ("--device mps", "--device mps"),
    ("--resume nowhere.pt", "nowhere.pt")], ids=lambda value: value)
def test_misuse_is_one_line_and_status_2(small, refused, tmp_path, argv, named):
    options = small
    if argv.startswith("-- "):  # instead of --methods
        at = small.index("--methods")
        options, argv = [*small[:at], *small[at + 2:]], argv.removeprefix("-- ")
    # what only training meets may leave the options of the run, nothing else
    met = argv.startswith("--resume") or "--pca n" in argv
    err = refused(*options, *argv.split(), writes=["runs/forde/run/args.json"] if met else [])
    assert named in err


def test_misuse_in_a_process_of_its_own(small, tmp_path):
    assert "--members 0" in refusal(tmp_path, run_forde, *small, "--members", "0")
    if not torch.cuda.is_available():
        err = refusal(tmp_path, run_forde, *small, "--device", "cuda")
        assert "--device cuda" in err and "--device cpu" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dataset", ["features", "toy_classification"])
def test_validation_of_what_has_no_validation_set(features, refused, tmp_path, dataset):
    """--val-fraction is refused or works; it does not crash."""
    if dataset != "features":
        features = ["--dataset", dataset, "--members", "2", "--epochs", "1", "--no-plot",
                    "--out-dir", str(tmp_path / "runs"), *CPU]
    assert "--val-fraction" in refused(*features, "--val-fraction", "0.1", "--eval-every", "1")


@pytest.mark.parametrize("name, change, named", [
    ("train", {"labels": np.r_[-1, np.zeros(139, int)]}, "labels"),
    ("train", {"labels": np.zeros(10, int)}, "labels"),
    ("train", {"labels": np.zeros(140)}, "labels"),
    ("train", {"labels": None}, "labels"),
    ("train", {"features": np.full((140, 6), np.nan)}, "NaN"),
    ("train", {"features": np.zeros(140)}, "features"),
    ("train", {"features": np.zeros((0, 6)), "labels": np.zeros(0, int)}, "features"),
    ("test", {"labels": np.full(70, 3)}, "label 3"),
    ("test", {"features": np.zeros((70, 5))}, "features"),
    ("far", {"features": np.zeros((50, 7))}, "features"),
    ("far", {"labels": None}, "labels"),
    ("train", b"no archive", "npz"), ("test", b"", "npz"), ("far", b"PK\x03\x04", "npz"),
], ids=lambda value: str(value)[:25].replace("\n", "") if not isinstance(value, str) else value)
def test_bad_features(features, refused, tmp_path, name, change, named):
    path = tmp_path / f"{name}.npz"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        arrays = {**np.load(path), **change}
        np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    err = refused(*features, "--methods", "forde_pca")
    assert f"{name}.npz" in err and named in err


@pytest.mark.parametrize("change", ["missing", "truncated"])
def test_damaged_images(tiny, refused, small_data, tmp_path, change):
    shutil.copytree(small_data / "tiny-imagenet-200", tmp_path / "data" / "tiny-imagenet-200")
    image = tmp_path / "data/tiny-imagenet-200/train/n00000001/images/n00000001_3.png"
    if change == "missing":
        shutil.rmtree(tmp_path / "data" / "tiny-imagenet-200")
    else:
        image.write_bytes(image.read_bytes()[:300])
    named = "tiny-imagenet-200" if change == "missing" else image.name
    assert named in refused(*tiny, "--limit-train", "121", "--data-dir", str(tmp_path / "data"))


@pytest.fixture
def finished(small):
    """A finished run of one step."""
    small = [*small, "--epochs", "1", "--limit-steps", "1"]
    forde.main(small)
    return small


def test_changed_options_are_refused_with_their_names(finished, refused):
    err = refused(*finished, "--epochs", "2", "--alpha", "0.3", "--methods", "weight_rde")
    assert all(f"{key} (" in err for key in ("epochs", "alpha", "repulsion"))
    assert "epochs (1 there, 2 now)" in err and "seed" not in err and "--name" in err
    assert "seed (1 there, 9 now)" in refused(*finished, "--seed", "9", "--eval")
    for key in forde.TRAINING_OPTIONS:  # each is kept
        assert key in strict_json(folder_of(finished) / "args.json")
    forde.main([*finished, "--diversity-examples", "5", "--shift", "none", "--save-interval", "3",
                "--chunk", "1", "--vectorise", "two_pass"])  # what shapes no weights may change


def test_evaluation_before_training(small, refused):
    for method in ("forde_identity", "forde_pca"):
        assert "train first" in refused(*small, "--eval", "--methods", method)


def test_evaluation_of_an_unfinished_run(finished, refused):
    path = folder_of(finished) / "last.pt"
    state = torch.load(path, weights_only=True)
    state["progress"] |= {"epoch": 0, "step": 0}
    torch.save(state, path)
    assert "0 of 1 epochs" in refused(*finished, "--eval")


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "another script's"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(finished, refused, damage):
    path = folder_of(finished) / "last.pt"
    whole = path.read_bytes()
    if damage == "another script's":
        torch.save({"weights": torch.ones(3)}, path)
    else:
        path.write_bytes({"cut": whole[:len(whole) // 2], "empty": b"",
                          "garbage": b"no checkpoint" * 99}[damage])
    for more in ([], ["--eval"]):
        assert "last.pt" in refused(*finished, *more)


def test_out_dir_that_is_a_file(small, refused, tmp_path):
    (tmp_path / "file").write_text("kept")
    for methods in (["forde_identity"], ["forde_pca"]):
        assert "--out-dir" in refused(*small, "--out-dir", str(tmp_path / "file"), "--methods",
                                      *methods)


@pytest.mark.usefixtures("few_tests")
@pytest.mark.parametrize("method", ["deep_ensemble", "forde_identity", "weight_rde"])
def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(small, refused, method):
    options = [*small, "--lr", "1e12", "--schedule", "published", "--epochs", "9", "--limit-steps",
               "1", "--methods", method]
    folder = folder_of(options)
    with pytest.raises(UserError) as stop:
        forde.main(options)
    message = str(stop.value)
    assert "last good checkpoint is kept" in message and "--lr" in message
    state = common.load_checkpoint(folder / "last.pt")
    done = state["progress"]["epoch"]
    assert done > 0 and all(torch.isfinite(v).all() for v in state["model"].values())
    if "weights" not in message:
        assert f"at step {done} with learning rate 1e+12;" in message
    assert len(log_of(folder)) == done
    assert message in refused(*options)  # and again: nothing was lost or changed


@pytest.mark.usefixtures("few_tests")
def test_a_non_finite_loss_names_step_loss_and_learning_rate(small, monkeypatch):
    real, calls = forde.data_loss, []

    def poisoned(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs) * (math.nan if len(calls) == 6 else 1)

    monkeypatch.setattr(forde, "data_loss", poisoned)
    rate = forde.learning_rate(5, 4, forde.parse_args(small))
    with pytest.raises(UserError, match=f"loss nan at step 5 with learning rate {rate:g};"):
        forde.main(small)
    state = common.load_checkpoint(folder_of(small) / "last.pt")
    assert state["progress"]["epoch"] == 1
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    monkeypatch.undo()
    metrics = forde.main(small)  # the same command goes on from there
    assert metrics == forde.main(with_options(small, name="calm"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("more", ["--methods forde_pca", "--vectorise vmap --amp bf16",
                                  "--vectorise two_pass --chunk 1", "--update svgd"])
def test_on_a_gpu(small, more):
    small = [*small, "--device", "cuda", *more.split()]
    metrics = forde.main(small)
    assert_ranges(metrics, 3)
    assert_close_metrics(metrics, forde.main([*small, "--eval"]), 1e-3)


# ---- Help and commands --------------------------------------------------------------------------


def test_every_option_has_a_help_text(capsys, monkeypatch):
    parsers, real = [], common.Parser.parse_args
    monkeypatch.setattr(common.Parser, "parse_args", lambda self, *a: (parsers.append(self),
                                                                       real(self, *a))[1])
    args = forde.parse_args([])
    with pytest.raises(SystemExit) as stop:
        forde.parse_args(["--help"])
    text = capsys.readouterr().out
    assert not stop.value.code and len(text.splitlines()) > 60
    for key in vars(args):
        assert f"--{key.replace('_', '-')}" in text, key
    for action in parsers[0]._actions:
        assert action.help and len(action.help) > 5, action.option_strings
    assert all(name in text for name in forde.METHODS)


def test_the_commands_of_the_docstring_parse():
    parsed = [parse_command(line) for line in usage_commands(forde)]
    assert len(parsed) == 4 and all(parsed)
    assert [a.dataset for a in parsed] == ["glyphs", "cifar100", "glyphs", "cifar100"]
    assert parsed[2].eval and parsed[0].methods == list(METHODS)
    paper = dict(methods=["forde_pca"], members=10, model="resnet18", epochs=300, batch_size=128,
                 lr=0.1, lr_ratio=0.01, momentum=0.9, weight_decay=5e-4, schedule="published",
                 width=1, eps=1e-24, alpha=0.4, augment=True, shift="published", val_fraction=0,
                 layers="published", ood=["svhn", "cifar10"])
    for command in parsed[1::2]:
        assert paper.items() <= vars(command).items()


def test_presets_are_the_published_settings():
    parse = lambda text: vars(forde.parse_args(text.split()))
    cifar10 = dict(alpha=0.2, model="resnet18", epochs=300, ood=["svhn", "cifar100"])
    assert cifar10.items() <= parse("--dataset cifar10").items()
    tiny = dict(model="preact_resnet18", epochs=150, lr_ratio=0.001, members=10, augment=True)
    assert tiny.items() <= parse("--dataset tiny_imagenet").items()
    cauchy = lambda dataset, method: forde.with_method(
        forde.parse_args(["--dataset", dataset]), method, 1).cauchy
    assert [cauchy(d, "feature_rde") for d in ("cifar10", "cifar100", "tiny_imagenet")] == \
        [1e-3, 5e-3, 5e-3]
    assert cauchy("cifar10", "function_rde") == 1e-6 and cauchy("cifar10", "forde_pca") == 0
    assert parse("--dataset cifar100 --members 7 --alpha 0.1")["members"] == 7
