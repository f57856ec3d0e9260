"""swag_laplace_ensembles.py end to end: studies, pieces, resuming, processes, cached outputs,
selection, misuse."""

import csv
import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (Child, run_script, run_swag_laplace_ensembles,
                      run_swag_laplace_ensembles_in_float64, start_ranks)
from PIL import Image
from test_data_sequences import write_npz, write_sst2
from test_runs import leaves, parse_command, strict_json, usage_commands, with_options

import common
import swag_laplace_ensembles as script

SCRIPT = "swag_laplace_ensembles"
METHODS = tuple(script.METHODS)
OOD = {"glyphs": "letters", "reviews": "finance", "clusters": "large"}
TINY = ("--members 2 --ensembles 1,2 --combinations 2 --samples 7 --val-samples 3 --limit-train 120"
        " --limit-test 40 --num-val 60 --batch-size 24 --limit-steps 3 --width 0.1 --epochs 2"
        " --swag-epochs 3 --ivon-epochs 2 --flow-epochs 2 --flow-layers 2 --device cpu --no-plot"
        " --name run").split()
COLUMNS = {"glyphs": ("accuracy", "lpd", "ece15"), "reviews": ("accuracy", "lpd", "ece15"),
           "clusters": ("mae", "lpd", "ece")}


def options_of(dataset, out, *more):
    depth = {"reviews": ["--depth", "1"], "clusters": ["--depth", "1"]}.get(dataset, [])
    return ["--dataset", dataset, *TINY, *depth, "--out-dir", str(out), *more]


def root_of(options):
    out, name = (options[options.index(flag) + 1] for flag in ("--out-dir", "--name"))
    return Path(out) / SCRIPT / name


def state_of(path):
    return torch.load(Path(path) / "last.pt", weights_only=True)


def files_of(root, *patterns):
    """{path: (bytes, time of change)} of what a second start must leave alone."""
    found = [p for pattern in patterns for p in root.glob(pattern)]
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


def outputs_of(root, method, seed, name="test"):
    """The one file of outputs of a member."""
    path, = root.glob(f"outputs-*-seed{seed}/{method}-{name}-*.npy")
    return np.load(path)


def rows_of(root, members=2):
    with open(root / f"study-m{members}" / "rows.csv") as file:
        return list(csv.DictReader(file))


def no_training(*_, **__):
    raise AssertionError("trains")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """studies(dataset): (options, metrics, what it printed) of a whole study, made once."""
    made = {}

    def study(dataset):
        if dataset not in made:
            out = tmp_path_factory.mktemp(dataset)
            options = [o for o in options_of(dataset, out) if o != "--no-plot"]
            made[dataset] = options, script.main(options)
        return made[dataset]

    return study


@pytest.fixture
def study(studies, tmp_path):
    """study(dataset): options and metrics of a copy of it that a test may change."""
    def copy(dataset="glyphs"):
        options, metrics = studies(dataset)
        shutil.copytree(options[options.index("--out-dir") + 1], tmp_path / "runs")
        return [*with_options(options, out_dir=tmp_path / "runs"), "--no-plot"], metrics

    return copy


@pytest.fixture
def small(tmp_path):
    return options_of("glyphs", tmp_path / "runs")


# ---- Whole studies -------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["glyphs", "reviews", "clusters"])
def test_a_study_leaves_its_files(studies, dataset):
    options, metrics = studies(dataset)
    root = root_of(options)
    ood, columns = OOD[dataset], COLUMNS[dataset]
    for k in (1, 2):
        for method in METHODS:
            for key in (*columns, f"auroc_{ood}"):
                assert math.isfinite(metrics[f"{method}_k{k}/{key}"]), (method, k, key)
    assert all(math.isfinite(v) for v in metrics.values())
    if dataset != "clusters":
        assert all(0 <= metrics[f"{m}_k{k}/{key}"] <= 1 for m in METHODS for k in (1, 2)
                   for key in ("accuracy", "ece15", f"auroc_{ood}"))
    folder = root / "study-m2"
    assert {p.name for p in folder.iterdir()} == {
        "args.json", "results.json", "rows.csv", "ensembles.csv", "table.md", "table.tex",
        "study.png"}
    results = strict_json(folder / "results.json")
    assert results["metrics"] == metrics and results["config"]["swag_epochs"] == 3
    assert results["n"][f"swag_k1/{columns[1]}"] == 2
    assert results["standard_deviation"]["swag_k1/lpd"] > 0
    assert results["standard_deviation"]["swag_k2/lpd"] is None  # one pair of two
    with Image.open(folder / "study.png") as image:
        assert image.width > 500 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 10
    for part in root.rglob("*.json"):
        strict_json(part)
    rows = rows_of(root)
    assert {(r["method"], r["K"], r["members"]) for r in rows} == {
        (m, *rest) for m in METHODS for rest in (("1", "1"), ("1", "2"), ("2", "1 2"))}
    for r in rows:
        sizes = (r["K"],) if r["method"] in ("map", "swa") else ("5", "7")
        assert r["samples"] in sizes, r
    with open(folder / "ensembles.csv") as file:
        listed = list(csv.DictReader(file, delimiter="\t"))
    assert [r["ensemble_id"] for r in listed] == ["1", "2", "1"]
    assert {(r["K"], r["seed"], r["model_ids"].replace(",", " ")) for r in listed} == {
        (r["K"], r["ensemble_seed"], r["members"]) for r in rows}
    tests = [(r["method"], r["members"], r["samples"]) for r in rows if r["set"] == "test"]
    assert len(tests) == len(set(tests)) == 3 * (2 + 2 * (len(METHODS) - 2))
    if dataset != "clusters":  # Jensen: two different networks are better than they are one by one
        assert metrics["map_k2/lpd"] > metrics["map_k1/lpd"]
    table = (folder / "table.md").read_text().splitlines()
    assert len(table) == 2 + 2 * len(METHODS) and all(
        line.count("|") == 3 + len(columns) for line in table)
    latex = (folder / "table.tex").read_text()
    assert latex.count(r"\\") == 1 + 2 * len(METHODS) and latex.count(r"\textbf{") >= 6
    assert f"{metrics['swag_k2/lpd']:.3f}" in table[4 + len(METHODS)] and r"\begin{tab" in latex


@pytest.mark.parametrize("dataset", ["glyphs", "reviews", "clusters"])
def test_a_second_start_and_eval_train_nothing(study, monkeypatch, capfd, dataset):
    options, metrics = study(dataset)
    kept = files_of(root_of(options), "*/last.pt", "*/iterates.f32", "*/log.jsonl")
    monkeypatch.setattr(script, "train_epoch", no_training)
    monkeypatch.setattr(script, "negative_elbo", no_training)
    monkeypatch.setattr(script, "decompose", no_training)
    for more in ([], ["--eval"]):
        capfd.readouterr()
        assert script.main([*options, *more]) == metrics
        assert "epoch" not in capfd.readouterr().out
    assert kept == files_of(root_of(options), "*/last.pt", "*/iterates.f32", "*/log.jsonl")


def test_a_second_start_predicts_nothing(study, monkeypatch):
    """Every ensemble is an index into the files that are there."""
    options, metrics = study()
    kept = files_of(root_of(options), "outputs-*/*.npy")
    predicted, real = [], script.Member.predict

    def predict(self, method, *rest):
        predicted.append(method)
        return real(self, method, *rest)

    monkeypatch.setattr(script.Member, "predict", predict)
    assert script.main([*options, "--eval"]) == metrics
    assert not predicted and kept == files_of(root_of(options), "outputs-*/*.npy")


def test_eval_with_missing_members_names_them(study, monkeypatch, refused):
    options, _ = study()
    root = root_of(options)
    shutil.rmtree(root / "map-seed2")
    said = refused(*options, "--eval")
    assert "not finished: map of seeds 2;" in said and "--method map --seed 2" in said
    assert missing_of(said) == {m: "2" for m in METHODS if m not in ("mcdo", "ivon")}
    shutil.rmtree(root / "la_nf-t2-seed1")
    assert missing_of(refused(*options, "--eval"))["la_nf"] == "1, 2"
    shutil.rmtree(root / "ivon-seed2")
    said = missing_of(refused(*options, "--eval"))
    assert said["ivon"] == said["map"] == "2" and "mcdo" not in said


def missing_of(said):
    """{method: seeds} of the error of --eval."""
    listed = said.split("not finished: ")[1].split(". Make one")[0]
    return dict(part.split(" of seeds ") for part in listed.split("; "))


def test_eval_with_other_options_says_so_instead(study, refused):
    """A piece of other options is not missing: making it would be refused too."""
    options, _ = study()
    shutil.rmtree(root_of(options) / "map-seed2")
    said = refused(*options, "--eval", "--ivon-lr", "0.1")
    assert "ivon_lr" in said and "not finished" not in said


def test_eval_before_training(small, refused):
    said = refused(*small, "--eval")
    assert missing_of(said) == dict.fromkeys(METHODS, "1, 2") and "--method map --seed 1" in said
    assert "train first" in refused(*small, "--eval", "--method", "swag", "--seed", "3")


# ---- Pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_piece_alone_is_its_row_of_the_study(study, monkeypatch, method):
    options, _ = study()
    row, = (r for r in rows_of(root_of(options)) if (
        r["method"], r["K"], r["members"], r["set"]) == (method, "1", "2", "test") and r[
            "samples"] == ("1" if method in ("map", "swa") else "7"))
    monkeypatch.setattr(script, "train_epoch", no_training)
    metrics = script.main([*options, "--method", method, "--seed", "2"])
    assert {k.split("/")[0] for k in metrics} == {f"{method}_k1"}
    for key in ("accuracy", "lpd", "ece15", "brier"):
        assert metrics[f"{method}_k1/{key}"] == pytest.approx(float(row[key]), abs=1e-12)
    assert script.main([*options, "--method", method, "--seed", "2", "--eval"]) == metrics


def test_a_piece_trains_what_it_is_made_from_and_no_more(small):
    """... and is bit for bit the piece of a study: a member does not depend on the others."""
    script.main([*small, "--method", "llla", "--seed", "2"])
    root = root_of(small)
    assert {p.name for p in root.iterdir()} == {
        "map-seed2", "llla-seed2", "outputs-llla-seed2", "llla-alone-seed2"}


@pytest.mark.parametrize("dataset, methods", [
    ("glyphs", METHODS), ("reviews", ("swag", "mcdo")), ("clusters", ("swag", "la_nf"))])
def test_outputs_of_a_member_do_not_depend_on_the_others(studies, tmp_path, dataset, methods):
    options, _ = studies(dataset)
    root = root_of(options)
    alone = [*with_options(options, out_dir=tmp_path / "runs"), "--no-plot"]
    for method in methods:
        script.main([*alone, "--method", method, "--seed", "2"])
        for name in ("test", f"{dataset}_{OOD[dataset]}"):
            a, b = (outputs_of(r, method, 2, name) for r in (root, root_of(alone)))
            np.testing.assert_array_equal(a, b, err_msg=f"{method} {name}")


# ---- Resuming ------------------------------------------------------------------------------------

KINDS = {"map": "map-seed1", "swag": "swag-lr0.01-seed1", "ivon": "ivon-seed1",
         "mcdo": "mcdo-p0.1-seed1"}


def kill_in_step(kind, signum, argv):
    """Start the script; a signal in the second epoch of `kind`, in its second step of three."""
    real, calls = script.train_epoch, []

    def train_epoch(model, recipe, loader, epoch, steps, lr_at, progress, stop, *rest):
        if recipe.kind == kind:
            calls.append(epoch)
            if len(calls) == 2:
                source = loader.epoch

                def batches(*a, **k):
                    for i, batch in enumerate(source(*a, **k)):
                        if i == 1:
                            os.kill(os.getpid(), signum)
                        yield batch
                loader.epoch = batches
        return real(model, recipe, loader, epoch, steps, lr_at, progress, stop, *rest)

    script.train_epoch = train_epoch
    run_script(SCRIPT, argv)


def assert_same_piece(a, b, kind):
    assert_same_history(a / "last.pt", b / "last.pt")
    keeper, other = (state_of(p)["keeper"] for p in (a, b))
    left, right = dict(leaves(keeper)), dict(leaves(other))
    assert left.keys() == right.keys() and (kind in ("swag", "ivon")) == (not left)
    assert all(torch.equal(left[k], right[k]) for k in left)
    if kind == "swag":
        assert (a / "iterates.f32").read_bytes() == (b / "iterates.f32").read_bytes()


def assert_same_history(a, b):
    """assert_same_weights, of logs whose rates are examples/s."""
    a, b = (torch.load(p, weights_only=True) for p in (a, b))
    for part in ("model", "optimiser", "progress"):
        left, right = (dict(leaves(state[part])) for state in (a, b))
        assert left.keys() == right.keys() and len(left) >= 3
        assert all(torch.equal(v, right[k]) for k, v in left.items()), part
    timing = ("seconds", "examples_per_s", "peak_memory_gb")
    left, right = ([{k: v for k, v in row.items() if k not in timing} for row in s["history"]]
                   for s in (a, b))
    assert left == right


@pytest.mark.parametrize("dataset, kind, number", [
    ("glyphs", "map", signal.SIGTERM), ("glyphs", "map", signal.SIGKILL),
    ("glyphs", "swag", signal.SIGTERM), ("glyphs", "swag", signal.SIGKILL),
    ("glyphs", "ivon", signal.SIGTERM), ("glyphs", "mcdo", signal.SIGKILL),
    ("reviews", "mcdo", signal.SIGTERM), ("clusters", "swag", signal.SIGTERM)])
def test_killed_in_mid_epoch_and_resumed_equals_uninterrupted(studies, tmp_path, dataset, kind,
                                                              number):
    options, _ = studies(dataset)
    lr = "1e-06" if dataset == "clusters" else "0.01"
    what = KINDS[kind].replace("0.01", lr)
    calm = [*with_options(options, out_dir=tmp_path / "calm"), "--no-plot", "--method", kind,
            "--swag-lrs", lr]
    root = root_of(calm)
    if kind != "map":
        root.mkdir(parents=True)
        shutil.copytree(root_of(options) / "map-seed1", root / "map-seed1")
        shutil.copytree(tmp_path / "calm", tmp_path / "runs")
    own = with_options(calm, out_dir=tmp_path / "runs")
    metrics = script.main(calm)
    child = Child(tmp_path, kill_in_step, kind, number, own).wait()
    part = root_of(own) / what
    if number == signal.SIGTERM:
        assert child.status == 128 + number and f"in epoch 2 of {kind} after step 2" in child.stderr
        assert state_of(part)["progress"]["step"] == 2
    else:
        assert child.status == -number
    assert state_of(part)["progress"]["epoch"] == 1
    assert script.main(own) == metrics
    assert_same_piece(part, root / what, kind)
    assert not list(root_of(own).rglob("*.tmp"))


def test_swag_stopped_after_each_epoch_equals_uninterrupted(study, monkeypatch):
    options, _ = study()
    options = [*options, "--method", "swag", "--swag-lrs", "0.01"]
    calm = with_options(options, name="calm")
    shutil.copytree(root_of(options) / "map-seed1", root_of(calm) / "map-seed1")
    metrics = script.main(calm)
    whole = root_of(calm) / "swag-lr0.01-seed1"
    shutil.rmtree(root_of(options) / "swag-lr0.01-seed1")
    part, real = root_of(options) / "swag-lr0.01-seed1", script.Iterates.after_epoch

    def after_epoch(self, epoch):
        found = real(self, epoch)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(script.Iterates, "after_epoch", after_epoch)
        for epoch in (1, 2):
            with pytest.raises(common.Stopped, match=f"after epoch {epoch} of swag"):
                script.main(options)
            rows = np.fromfile(part / "iterates.f32", np.float32).reshape(3, -1)
            wanted = np.fromfile(whole / "iterates.f32", np.float32).reshape(3, -1)
            np.testing.assert_array_equal(rows[:epoch], wanted[:epoch])
            assert not rows[epoch:].any()
    assert script.main(options) == metrics
    assert_same_piece(part, whole, "swag")
    assert len(set(map(bytes, wanted))) == 3  # an iterate an epoch, and none is the start
    start = state_of(root_of(options) / "map-seed1")["keeper"]["weights"]
    names = [k for k in start if not k.endswith("eps")]
    assert wanted.shape[1] == sum(start[k].numel() for k in names)


@pytest.mark.parametrize("dataset", ["glyphs", "clusters"])
def test_la_nf_killed_after_each_epoch_equals_uninterrupted(study, monkeypatch, dataset):
    options, _ = study(dataset)
    options = [*options, "--method", "la_nf"]
    part, real = root_of(options) / "la_nf-t2-seed1", common.Run.save
    whole = state_of(part)
    before = outputs_of(root_of(options), "la_nf", 1)
    for folder in ("la_nf-t2-seed1", "outputs-la_nf-t2-seed1"):
        shutil.rmtree(root_of(options) / folder)

    def save(self, **state):
        real(self, **state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "save", save)
        with pytest.raises(KeyboardInterrupt):
            script.main(options)
    assert state_of(part)["epoch"] == 1
    script.main(options)
    again = state_of(part)
    assert again["epoch"] == 2 and len(whole["parameters"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(whole["parameters"], again["parameters"]))
    left, right = (dict(leaves(s["optimiser"])) for s in (whole, again))
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    np.testing.assert_array_equal(outputs_of(root_of(options), "la_nf", 1), before)


def test_a_stop_signal_in_la_nf_ends_it_after_the_epoch(study, monkeypatch):
    options, _ = study()
    part, real = root_of(options) / "la_nf-t2-seed1", script.negative_elbo
    shutil.rmtree(part)
    monkeypatch.setattr(script, "negative_elbo", lambda *a: (
        os.kill(os.getpid(), signal.SIGTERM), real(*a))[1])
    with pytest.raises(common.Stopped, match="after epoch 1 of la_nf"):
        script.main([*options, "--method", "la_nf"])
    assert state_of(part)["epoch"] == 1


def test_early_stopping_keeps_the_best_epoch(small):
    """Patience 1: the first epoch that is not better ends the training; it is resumed as done."""
    options = [*small, "--method", "map", "--epochs", "12", "--patience", "1", "--min-epochs", "3",
               "--lr", "3"]
    metrics = script.main(options)
    state = state_of(root_of(small) / "map-seed1")
    nlls = [row["val_nll_nats"] for row in state["history"]]
    assert state["keeper"]["epoch"] == int(np.argmin(nlls)) + 1 and len(nlls) >= 3
    assert len(nlls) == 12 or len(nlls) - state["keeper"]["epoch"] >= 1
    assert state["progress"]["done"] and script.main(options) == metrics


def test_resume_from_a_file(small, tmp_path, monkeypatch):
    """--resume PATH: a finished piece is read; an unfinished one is finished from there."""
    options = [*small, "--method", "map"]
    metrics = script.main(options)
    part = root_of(small) / "map-seed1"
    part.rename(tmp_path / "moved")
    kept = files_of(tmp_path / "moved", "*")
    monkeypatch.setattr(script, "train_epoch", no_training)
    assert script.main([*options, "--resume", str(tmp_path / "moved" / "last.pt")]) == metrics
    assert kept == files_of(tmp_path / "moved", "*")


def test_resume_from_a_file_that_is_not_the_one_there(small, tmp_path, monkeypatch):
    """--resume PATH of a finished piece: its weights, not those of an older last.pt."""
    options = [*small, "--method", "map"]
    metrics = script.main(options)
    part, moved = root_of(small) / "map-seed1", tmp_path / "moved"
    shutil.copytree(part, moved)
    state = state_of(part)
    for weights in (state["model"], state["keeper"]["weights"]):
        weights["head.bias"] += torch.arange(10.0)
    torch.save(state, part / "last.pt")
    shutil.rmtree(root_of(small) / "outputs-map-seed1")
    assert script.main(options) != metrics
    monkeypatch.setattr(script, "train_epoch", no_training)
    assert script.main([*options, "--resume", str(moved / "last.pt")]) == metrics


def test_resume_from_an_unfinished_file_finishes_it(small, tmp_path, monkeypatch):
    options = [*small, "--method", "map"]
    metrics = script.main(with_options(options, name="calm"))
    real = common.Run.save

    def save(self, **state):
        real(self, **state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "save", save)
        with pytest.raises(KeyboardInterrupt):
            script.main(options)
    (root_of(small) / "map-seed1").rename(tmp_path / "moved")
    kept = (tmp_path / "moved" / "last.pt").read_bytes()
    found = script.main([*options, "--resume", str(tmp_path / "moved" / "last.pt")])
    assert found == metrics and (tmp_path / "moved" / "last.pt").read_bytes() == kept
    assert script.main(options) == metrics


def test_resume_never_trains_anew_and_repeats_itself(study):
    options, metrics = study()
    root = root_of(options)
    kept = files_of(root, "*/last.pt")
    assert script.main([*options, "--resume", "never"]) == metrics
    again = files_of(root, "*/last.pt")
    assert kept.keys() == again.keys() and all(kept[k][1] != again[k][1] for k in kept)


def test_resume_never_of_a_piece_keeps_what_it_is_made_from(study):
    options, _ = study()
    root = root_of(options)
    kept = files_of(root, "*/last.pt")
    script.main([*options, "--method", "la_nf", "--resume", "never"])
    again = files_of(root, "*/last.pt")
    assert {k for k in kept if kept[k] != again[k]} == {"la_nf-t2-seed1/last.pt"}


@pytest.mark.parametrize("method, change, keys", [
    ("map", "--lr 0.3", ("lr (0.2 there, 0.3 now)",)),
    ("map", "--width 0.2 --limit-train 100", ("width", "limit_train")),
    ("map", "--batch-size 12", ("batch_size",)), ("mcdo", "--weight-decay 0", ("weight_decay",)),
    ("ivon", "--ivon-lr 0.1", ("ivon_lr",)), ("swag", "--swag-weight-decay 0.1", (
        "swag_weight_decay",)), ("swag", "--match-published", ("match_published",)),
    ("llla", "--structure diag", ("structure",)), ("llla", "--prior-precision 3", (
        "prior_precision",)), ("la_nf", "--flow-lr 0.1", ("flow_lr",)),
    ("la_nf", "--flow planar", ("flow",)), ("swag", "--epochs 3", ("epochs",))])
def test_changed_options_are_refused_by_name(study, refused, method, change, keys):
    options, _ = study()
    said = refused(*options, "--method", method, *change.split())
    assert "other options" in said and all(key in said for key in keys), said


@pytest.mark.parametrize("method", ["swag", "swa", "llla", "la_nf"])
def test_what_is_made_from_an_older_map_is_refused_or_remade(study, refused, method):
    """Never silently stale: --resume never of that piece mends it."""
    options, metrics = study()
    new = [*options, "--lr", "0.02"]
    script.main([*new, "--method", "map", "--resume", "never"])
    said = refused(*new, "--method", method)
    assert "map (" in said and "never" in said
    mended = script.main([*new, "--method", method, "--resume", "never"]) if method != "la_nf" \
        else script.main([*new, "--method", "llla", "--resume", "never"]) and script.main(
            [*new, "--method", method, "--resume", "never"])
    fresh = script.main([*with_options(new, name="fresh"), "--method", method])
    assert mended == fresh and mended[f"{method}_k1/lpd"] != metrics[f"{method}_k1/lpd"]


def test_outputs_of_an_older_map_are_remade(study):
    options, _ = study()
    new = [*options, "--lr", "0.02", "--method", "map"]
    mended = script.main([*new, "--resume", "never"])
    assert mended == script.main(with_options(new, name="fresh"))


@pytest.mark.parametrize("method, before, after", [
    ("llla", "--prior-precision 10 --structure full", "--prior-precision 10 --structure diag"),
    ("la_nf", "--flow-precision 10", "--flow-precision 10 --flow-lr 0.1"),
    ("la_nf", "--flow-precision 10", "--flow-precision 10 --flow planar"),
    ("ivon", "--ivon-ess 100", "--ivon-ess 1000"),
    ("swag", "--swag-weight-decay 0.01", "--swag-weight-decay 0"),
    ("mcdo", "--weight-decay 0.01", "--weight-decay 0")])
def test_outputs_of_a_piece_made_anew_are_made_anew(tmp_path, method, before, after):
    options = [*options_of("glyphs", tmp_path / "runs"), "--method", method]
    script.main([*options, *before.split()])
    outputs = outputs_of(root_of(options), method, 1)
    script.main([*options, *after.split(), "--resume", "never"])
    fresh = with_options(options, name="fresh")
    script.main([*fresh, *after.split()])
    wanted = outputs_of(root_of(fresh), method, 1)
    assert not np.array_equal(outputs, wanted)
    np.testing.assert_array_equal(outputs_of(root_of(options), method, 1), wanted)


# ---- Processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset, more", [
    ("glyphs", "--limit-train 73 --eval-batch-size 39"),
    ("glyphs", "--norm bn --methods map swa swag ivon --ood"),
    ("clusters", "--methods map swa swag ivon llla la_nf --limit-train 73 --eval-batch-size 39"),
    ("clusters", "--methods mcdo"), ("reviews", ""),
    ("reviews", "--methods map --limit-train 73"), ("reviews", "--methods map --limit-test 39 "
                                                    "--eval-batch-size 19")])
def test_two_processes_equal_one(tmp_path, dataset, more):
    """In float64: MAP, SWAG's iterates, outputs of all methods. Where the last batch has one
    example the second process has none."""
    lr = "1e-7" if dataset == "clusters" else "0.01"
    options = options_of(dataset, tmp_path / "runs", "--swag-lrs", lr, *more.split())
    options = with_options(options, members=1, ensembles=1, limit_steps=5, samples=3, val_samples=2)
    one, two = (with_options(options, name=name) for name in ("one", "two"))
    children = [Child(tmp_path, run_swag_laplace_ensembles_in_float64, *one, rank=9)]
    children += start_ranks(tmp_path, 2, run_swag_laplace_ensembles_in_float64, *two)
    assert not [c.stderr[-800:] for c in children if c.wait().status]
    a, b = root_of(one), root_of(two)
    for part in sorted(a.glob("*/last.pt")):
        if "model" not in (state := state_of(part.parent)):
            continue
        other = state_of(b / part.parent.name)["model"]
        for k, v in state["model"].items():
            difference = (v.double() - other[k].double()).abs().max()
            assert difference < 1e-7 * max(1.0, v.abs().max()), (part.parent.name, k)
    found = list(a.glob("*/iterates.f32"))
    args = script.parse_args(one)
    methods = args.methods
    assert len(found) == ("swag" in methods)
    for path in found:
        rows, other = (torch.from_numpy(np.fromfile(p, np.float32)).view(3, -1).double()
                       for p in (path, b / path.relative_to(a)))
        for left, right in zip(script.swag_moments(rows), script.swag_moments(other)):
            assert (left - right).abs().max() < 1e-6 * max(1.0, left.abs().max())
    checked = 0
    for path in sorted(a.rglob("*.npy")):
        left, right = np.load(path), np.load(b / path.relative_to(a))
        # a flow's Adam makes steps of gradients that are nearly rounding
        close = 1e-3 if path.name.startswith("la_nf") else 2e-5
        np.testing.assert_allclose(right, left, rtol=close, atol=close, err_msg=path.name)
        checked += 1
    assert checked == (1 + len(args.ood)) * len(methods)
    left, right = (strict_json(r / "study-m1" / "results.json")["metrics"] for r in (a, b))
    assert all(right[k] == pytest.approx(v, abs=2e-4, rel=1e-5) for k, v in left.items()
               if k.endswith(("/lpd", "/mae", "/brier")))


def test_two_processes_evaluate_the_run_of_one(study, tmp_path):
    """Nothing is trained; what is there is read; results equal. bn: statistics over all data."""
    options, metrics = study()
    children = start_ranks(tmp_path, 2, run_swag_laplace_ensembles, *options, "--eval")
    for child in children:
        assert child.wait().status == 0, child.stderr[-2000:]
    found = strict_json(root_of(options) / "study-m2" / "results.json")
    assert found["metrics"] == metrics and found["environment"]["processes"] == 2


def test_batch_norm_is_refreshed_over_all_data_by_two_processes(tmp_path):
    """Also in networks that were not trained by these processes."""
    options = [*options_of("glyphs", tmp_path / "runs"), "--norm", "bn", "--method", "swag",
               "--swag-lrs", "0.01", "--ood"]
    options = with_options(options, samples=3, val_samples=2)
    one = Child(tmp_path, run_swag_laplace_ensembles_in_float64, *options, rank=9)
    assert one.wait().status == 0, one.stderr[-2000:]
    wanted = outputs_of(root_of(options), "swag", 1)
    shutil.rmtree(root_of(options) / "outputs-swag-seed1")
    for child in start_ranks(tmp_path, 2, run_swag_laplace_ensembles_in_float64, *options,
                             "--eval"):
        assert child.wait().status == 0, child.stderr[-2000:]
    np.testing.assert_allclose(outputs_of(root_of(options), "swag", 1), wanted, atol=1e-5)


def test_batch_norm_keeps_its_unit_on_several_gpus(small):
    """What data parallel training makes of a network computes the same."""
    args = script.parse_args([*small, "--norm", "bn"])
    train = script.load_sets(args, common.World())["train"]
    net = script.make_network(args, train, 0.0).eval()
    x = torch.randn(5, *train.shape)
    with torch.no_grad():
        wanted = net(x)
        world = common.World()._replace(size=2, device=torch.device("cuda"))
        assert torch.equal(common.sync_batch_norm(net, world).eval()(x), wanted)


def test_a_batch_that_does_not_divide_by_the_processes(tmp_path):
    options = options_of("glyphs", tmp_path / "runs", "--batch-size", "25")
    for child in start_ranks(tmp_path, 2, run_swag_laplace_ensembles, *options):
        assert child.wait().status == 2 and child.stderr.count("\n") == 1, child.stderr
        assert "--batch-size 25" in child.stderr
    assert not (tmp_path / "runs").exists()


# ---- Cached outputs ------------------------------------------------------------------------------


def brute_order(k, samples, seed):
    """Member of each draw, and its number among that member's: the published rule, by hand."""
    generator, drawn = torch.Generator().manual_seed(seed), []
    while len(drawn) < samples:
        drawn += torch.randperm(k, generator=generator).tolist()
    drawn = drawn[:samples]
    return [(member, drawn[:i].count(member)) for i, member in enumerate(drawn)]


@pytest.mark.parametrize("dataset", ["glyphs", "clusters"])
def test_metrics_of_an_ensemble_are_those_of_the_files(studies, dataset):
    """Rows of the stratified rule out of the members' files, mixed by hand."""
    options, _ = studies(dataset)
    args = script.parse_args(options)
    sets = script.load_sets(args, common.World())
    labels = sets["evaluated"]["test"].labels.numpy()
    root = root_of(options)
    for row in (r for r in rows_of(root) if r["set"] == "test" and r["K"] == "2"):
        method, s = row["method"], int(row["samples"])
        point = method in ("map", "swa")
        seed = (2 + 1) * (2 + 1 + 1) // 2 + 1
        assert row["ensemble_seed"] == str(seed) == "7"
        assert random.Random(seed).sample([1, 2], 2) in ([1, 2], [2, 1])
        files = [outputs_of(root, method, m).astype(np.float64) for m in (1, 2)]
        drawn = brute_order(2, 2 if point else 7, seed)[:s]
        assert len({tuple(d) for d in drawn}) == s
        mixed = np.stack([files[m][i] for m, i in drawn])
        if dataset == "glyphs":
            probs = np.exp(mixed).mean(0)
            own = probs[np.arange(40), labels]
            assert float(row["lpd"]) == pytest.approx(np.log(own).mean(), abs=1e-9)
            assert float(row["accuracy"]) == (probs.argmax(1) == labels).mean()
        else:
            mean, variance = mixed[..., 0], mixed[..., 1]
            density = np.exp(-(labels - mean)**2 / 2 / variance) / np.sqrt(2 * np.pi * variance)
            assert float(row["mae"]) == pytest.approx(abs(mean.mean(0) - labels).mean(), rel=1e-9)
            assert float(row["lpd"]) == pytest.approx(np.log(density.mean(0)).mean(), rel=1e-6)


def test_a_prefix_of_samples_is_a_smaller_study(studies, tmp_path):
    """Other S: files of their own; weights drawn by networks do not depend on S."""
    options, _ = studies("glyphs")
    shutil.copytree(options[options.index("--out-dir") + 1], tmp_path / "runs")
    fewer = with_options([*options, "--no-plot"], out_dir=tmp_path / "runs", samples=3)
    root = root_of(fewer)
    whole = {(m, s): outputs_of(root, m, s) for m in METHODS for s in (1, 2)}
    script.main(fewer)
    rows = rows_of(root)
    assert {r["samples"] for r in rows if r["method"] == "swag"} == {"3"}
    for (method, seed), wanted in whole.items():
        files = {np.load(p).shape[0]: np.load(p)
                 for p in root.glob(f"outputs-*-seed{seed}/{method}-test-*.npy")}
        assert set(files) == ({1} if method in ("map", "swa") else {3, 7})
        np.testing.assert_array_equal(files[max(files)], wanted)
        if method in ("swag", "ivon"):  # torch.randn of another shape: other last numbers
            np.testing.assert_allclose(files[3], wanted[:3], atol=1e-6, err_msg=method)


@pytest.mark.parametrize("method, change", [
    ("swag", "--samples 8"), ("swag", "--swag-scale 4"), ("llla", "--predictive probit"),
    ("llla", "--predictive bridge"), ("llla", "--predictive glm_mc"), ("map", "--limit-test 30"),
    ("mcdo", "--eval-batch-size 13")])
def test_a_changed_option_makes_new_outputs(study, method, change):
    """... equal to those of a directory without others; the old ones are still there."""
    options, _ = study()
    options = [*options, "--method", method, "--keep-grid"]
    for folder in root_of(options).glob("swag-lr*-seed1"):
        shutil.rmtree(folder)
    script.main(options)  # with the iterates of all rates
    changed = script.main([*options, *change.split()])
    fresh = with_options(options, name="fresh")
    for what in ("map-seed1", "mcdo-p0.1-seed1", "llla-seed1", *(
            p.name for p in root_of(options).glob("swag-lr*-seed1"))):
        shutil.copytree(root_of(options) / what, root_of(fresh) / what)
    assert changed == script.main([*fresh, *change.split()])
    before = script.main(options)
    assert before != changed
    row = [r for r in rows_of(root_of(options)) if (
        r["method"], r["K"], r["members"], r["set"]) == (method, "1", "1", "test")][-1]
    assert before[f"{method}_k1/lpd"] == pytest.approx(float(row["lpd"]), abs=1e-12)


def test_outputs_of_shifted_sets_are_those_of_their_kind(tmp_path):
    """Computed and published corruptions are different images."""
    paths = []
    for shift in ("computed", "published"):
        args = script.parse_args(["--dataset", "cifar10", "--shift", shift])
        store = script.Outputs({}, {}, args, common.World())
        paths.append(store.path("map", 1, "c_level_0"))
    assert paths[0] != paths[1]


def test_a_number_in_the_seed_makes_other_members(study):
    """--seed 5 --members 2: networks of seeds 5 and 6, ensembles named by them."""
    options, metrics = study()
    other = script.main([*options, "--seed", "5", "--methods", "map"])
    assert {p.name for p in root_of(options).glob("map-seed*")} == {
        f"map-seed{s}" for s in (1, 2, 5, 6)}
    assert {r["members"] for r in rows_of(root_of(options))} == {"5", "6", "5 6"}
    assert other["map_k1/lpd"] != metrics["map_k1/lpd"]


# ---- Options -------------------------------------------------------------------------------------


def finite(metrics):
    return metrics and all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("more", [
    "--norm bn --methods swa swag ivon --dropout 0.1 --augment",
    "--structure kron --predictive probit --methods llla la_nf --flow-precision llla",
    "--structure diag --predictive bridge --methods llla --prior-precision marglik",
    "--structure kron --predictive glm_mc --methods llla --prior-precision 3.5",
    "--flow planar --flow-precision 20 --methods la_nf", "--amp bf16 --methods swag llla",
    "--match-published --keep-grid --swag-scale 0.5 --methods swag swa",
    "--shift computed --methods map --limit-test 3 --ood glyphs_letters+numbers_letters",
    "--epochs 0 --swag-epochs 2 --ivon-epochs 0 --flow-epochs 0",
    "--save-interval 2 --quiet --methods swag", "--dropouts 0.3,0.1 --methods mcdo",
    "--opt adamw --lr 1e-3 --mse-steps 1 1 --methods map --ood"])
def test_options_for_images(small, more):
    options = [*with_options(small, members=1, ensembles=1), *more.split()]
    metrics = script.main(options)
    assert finite(metrics)
    assert script.main([*options, "--eval"]) == metrics
    if "--ood glyphs_letters+" in more:
        assert metrics["map_k1/auroc_letters_numbers_letters"] > 0
        assert {f"map_k1/c_level_{s}_accuracy" for s in range(5)} <= metrics.keys()
        args = script.parse_args(options)
        found = script.load_sets(args, common.World())["evaluated"]
        assert len(found["glyphs_letters_numbers_letters"]) == 3
        assert len(found["c_level_4"]) == 3 * len(script.data.CORRUPTIONS)


@pytest.mark.parametrize("dataset, more", [
    ("reviews", "--batch-by random --structure kron --methods map llla"),
    ("reviews", "--batch-by padded --methods map --limit-train 24 --limit-test 8 --ood"),
    ("reviews", "--opt sgd --lr 0.01 --methods swag --match-published"),
    ("clusters", "--flow planar --flow-precision llla --methods la_nf"),
    ("clusters", "--prior-precision 1e4 --methods llla la_nf --mse-steps 2 2 --y-var 1"),
    ("clusters", "--cutoff 2.5 --dropout 0.1 --dropouts 0.05 --methods map mcdo --ood")])
def test_options_for_texts_and_molecules(tmp_path, dataset, more):
    options = options_of(dataset, tmp_path / "runs", *more.split())
    options = with_options(options, members=1, ensembles=1)
    metrics = script.main(options)
    assert finite(metrics)
    assert script.main([*options, "--eval"]) == metrics


def test_batches_of_texts_do_not_change_what_is_predicted(tmp_path):
    """Padding is inert: the same weights give the same outputs, whatever --batch-by."""
    options = [*options_of("reviews", tmp_path / "runs"), "--method", "map", "--epochs", "0",
               "--limit-test", "30", "--ood"]
    found = []
    for kind in ("length", "random", "padded"):
        own = with_options(options, name=kind, batch_by=kind, eval_batch_size=7)
        script.main(own)
        found.append(outputs_of(root_of(own), "map", 1))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], atol=1e-6)


def test_keep_grid(small):
    """Iterates of the rates that were not chosen are kept, or not."""
    options = [*small, "--method", "swag", "--swag-lrs", "0.05,0.02,0.01"]
    for more, kept in (([], 1), (["--keep-grid"], 3)):
        name = f"kept{kept}"
        script.main([*with_options(options, name=name), *more])
        root = root_of(with_options(options, name=name))
        found = list(root.glob("swag-lr*-seed1/iterates.f32"))
        assert len(list(root.glob("swag-lr*-seed1/last.pt"))) == 3
        assert len(found) == 3 if kept == 3 else len(found) <= 2
        assert all(p.stat().st_size % 12 == 0 for p in found)


def test_match_published_samples_the_epsilon(small):
    options = [*small, "--method", "swag", "--swag-lrs", "0.01"]
    sizes = []
    for name, more in (("ours", []), ("theirs", ["--match-published"])):
        own = with_options(options, name=name)
        script.main([*own, *more])
        sizes.append((root_of(own) / "swag-lr0.01-seed1" / "iterates.f32").stat().st_size)
    weights = state_of(root_of(own) / "map-seed1")["model"]
    eps = sum(v.numel() for k, v in weights.items() if k.endswith("eps"))
    assert eps > 0 and sizes[1] - sizes[0] == 3 * 4 * eps


def test_sst2_from_files(tmp_path):
    """GLUE's layout, a vocabulary file, labelled test sentences."""
    rows = [f"{'good' if k % 2 else 'bad'} film {k % 7}\t{k % 2}\n" for k in range(90)]
    write_sst2(tmp_path, train="".join(rows), dev="".join(rows[:20]),
               test="".join(["sentence\tlabel\n", *rows[30:60]]))
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film",
                                *map(str, range(7)))) + "\n")
    options = [*options_of("sst2", tmp_path / "runs"), "--data-dir", str(tmp_path), "--depth", "1",
               "--methods", "map", "swag", "--swag-lrs", "0.01", "--ood"]
    for more in ([], ["--vocab", str(vocab)]):
        own = with_options(options, name=f"vocab{len(more)}")
        assert finite(script.main([*own, *more]))
        words = state_of(root_of(own) / "map-seed1")["model"]["words.weight"]
        assert (len(words) == 15) == bool(more)


def test_real_texts_and_molecules(real_data, tmp_path):
    """SST-2 and QM9 as they lie in shared/data, a target that is no energy too."""
    tiny = ["--data-dir", str(real_data), "--limit-steps", "2", "--epochs", "1", "--width", "0.1",
            "--depth", "1", "--swag-epochs", "2", "--methods", "map", "swag", "llla", "--members",
            "1", "--ensembles", "1", "--eval-batch-size", "400"]
    metrics = script.main([*options_of("sst2", tmp_path / "runs"), *tiny, "--swag-lrs", "0.01"])
    assert finite(metrics) and 0.2 < metrics["swag_k1/accuracy"] < 0.9
    for target in ("u0", "gap"):
        own = with_options(options_of("qm9", tmp_path / "runs"), name=target)
        metrics = script.main([*own, *tiny, "--swag-lrs", "1e-9", "--target", target])
        assert finite(metrics) and metrics["map_k1/mae"] < 100


def test_real_images(real_data, tmp_path):
    """CIFAR-10 with its published OOD sets that are there: the published split."""
    options = [*options_of("cifar10", tmp_path / "runs"), "--data-dir", str(real_data), "--depth",
               "10", "--methods", "map", "swag", "--swag-lrs", "0.01", "--ood", "cifar100",
               "--members", "1", "--ensembles", "1"]
    metrics = script.main(options)
    assert finite(metrics) and "swag_k1/auroc_cifar100" in metrics


# ---- Selection -----------------------------------------------------------------------------------


def test_swa_and_swag_choose_their_rates_separately(study):
    """By the numbers beside the iterates: changed there, others are chosen, for each its own."""
    options, _ = study()
    options = [*options, "--swag-lrs", "0.05,0.02", "--keep-grid"]
    for method in ("swag", "swa"):
        script.main([*options, "--method", method])
    root = root_of(options)
    args = script.parse_args(options)
    sets = script.load_sets(args, common.World())
    own = {}
    for lr in (0.05, 0.02):
        note, = root.glob(f"swag-lr{lr}-seed1/val-3-1.json")
        content = json.loads(note.read_text())
        assert set(content) == {"config", "scores"} and set(content["scores"]) == {"swag", "swa"}
        assert content["config"]["lr"] == lr and content["config"]["swag_epochs"] == 3
        values = {"swag": -1.0, "swa": -3.0} if lr == 0.05 else {"swag": -2.0, "swa": -2.0}
        note.write_text(json.dumps({**content, "scores": values}))
        member = script.Member(1, sets, args, common.World())
        own[lr] = member.predict_swag(member.swag_posterior(lr), sets["evaluated"]["test"], 0)
    member = script.Member(1, sets, args, common.World())
    assert member.swag() == {"swag": (-1.0, 0.05), "swa": (-2.0, 0.02)}
    script.main([*options, "--method", "swa"])
    np.testing.assert_array_equal(outputs_of_lrs(root, "swa", own), own[0.02].numpy())


def outputs_of_lrs(root, method, own):
    """The file of `method` that is the mean of one of the rates; the study's is of others."""
    found = [np.load(p) for p in root.glob(f"outputs-swag-seed1/{method}-test-*.npy")]
    return next(f for f in found if any(np.array_equal(f, o.numpy()) for o in own.values()))


DIVERGING = "--swag-weight-decay 1e6 --swag-epochs 4".split()


@pytest.mark.parametrize("lr, steps", [("1000", "3"), ("10", "5")], ids=["weights", "loss"])
def test_a_diverging_rate_is_left_out(small, capfd, lr, steps):
    """A line that names it, at the second start too; by its weights as by its loss."""
    options = [*with_options(small, limit_steps=steps), *DIVERGING, "--method", "swag",
               "--swag-lrs", f"{lr},1e-8"]
    metrics = script.main(options)
    said = [line for line in capfd.readouterr().out.splitlines() if "left out" in line]
    assert finite(metrics) and len(said) == 1 and f"rate {lr} is left out" in said[0]
    assert ("weights are" in said[0]) == (lr == "1000")
    assert script.main(options) == metrics
    assert script.main([*options, "--eval"]) == metrics


def test_all_rates_diverging_is_one_line(study, refused):
    options, _ = study()
    options = [*options, *DIVERGING, "--method", "swag", "--swag-lrs", "1000,900"]
    root = f"runs/{SCRIPT}/run"
    made = {f"{root}/swag-lr{lr}-seed1/{file}" for lr in (1000, 900) for file in (
        "args.json", "last.pt", "log.jsonl", "iterates.f32", "val-3-1.json")}
    assert "--swag-lrs" in refused(*options, writes=made)
    assert "--swag-lrs" in refused(*options)


def test_a_rate_whose_samples_diverge_is_left_out_at_the_second_start_too(study, monkeypatch):
    """SWAG's score NaN, SWA's not: the file says null."""
    options, _ = study()
    options = [*options, "--swag-lrs", "0.05,0.02", "--method", "swag"]
    real = script.Member.swag_validation
    with monkeypatch.context() as patch:
        patch.setattr(script.Member, "swag_validation", lambda self, lr: {
            **real(self, lr), **({"swag": math.nan} if lr == 0.05 else {})})
        metrics = script.main(options)
    note, = root_of(options).glob("swag-lr0.05-seed1/val-3-1.json")
    scores = strict_json(note)["scores"]
    assert scores["swag"] is None and scores["swa"] is not None
    assert script.main(options) == metrics


def test_a_rate_that_diverged_is_tried_again_with_other_options(study):
    """What diverged under other options, or from another MAP, is no verdict on these."""
    options, _ = study()
    options = [*options, "--method", "swag", "--swag-lrs", "0.05,1e-8", "--swag-epochs", "4",
               "--keep-grid"]
    note = root_of(options) / "swag-lr0.05-seed1" / "val-3-1.json"
    script.main([*options, "--swag-weight-decay", "0"])  # both are well
    whole = strict_json(note)
    assert whole["scores"]["swag"] is not None
    nothing = {"swag": None, "swa": None}
    for other in ({"swag_weight_decay": 0.1}, {"map": "another"}):
        shutil.rmtree(note.parent)
        note.parent.mkdir()
        common.write_json(note, {"config": {**whole["config"], **other}, "scores": nothing})
        assert whole["config"].keys() >= other.keys()
        script.main([*options, "--swag-weight-decay", "0"])
        assert strict_json(note) == whole


@pytest.mark.parametrize("name", ["run", "infinite"])
def test_other_errors_are_not_taken_for_divergence(study, refused, name):
    """Whatever the run is called."""
    options, _ = study()
    other = with_options(options, name=name)
    if name != "run":
        root_of(options).rename(root_of(other))
    said = refused(*other, "--method", "swag", "--swag-weight-decay", "0.1")
    assert "swag_weight_decay" in said


def test_mcdo_chooses_by_validation(small, monkeypatch):
    options = [*small, "--method", "mcdo", "--dropouts", "0.5,0.1,0.3"]
    values = iter((-2.0, math.nan, -1.0))
    monkeypatch.setattr(script.BestCopy, "after_epoch", lambda self, epoch: {})
    monkeypatch.setattr(script, "log_predictive_density", lambda *a: next(values))
    args = script.parse_args(options)
    member = script.Member(1, script.load_sets(args, common.World()), args, common.World())
    score, rate, net = member.mcdo()
    assert (score, rate) == (-1.0, 0.3) and {m.p for m in net.modules() if isinstance(
        m, common.Dropout)} == {0.3}


def test_ties_and_nan_in_a_grid():
    nan, inf = math.nan, math.inf
    assert script.best([(nan, 1), (-2.0, 2), (-1.0, 3), (-1.0, 4), (-inf, 5)], "x")[1] == 3
    with pytest.raises(common.UserError, match="no value of --x"):
        script.best([(nan, 1), (-inf, 2)], "--x")


def test_llla_takes_the_best_precision_of_its_grid(study, monkeypatch):
    """The first on ties; -inf where there is none; fixed numbers are taken as they are."""
    options, _ = study()
    part = root_of(options) / "llla-seed1"
    state = state_of(part)
    scores, grid = state["scores"], script.LAPLACE_GRID
    assert len(scores) == 21 and state["delta"] == grid[int(np.argmax(scores))]
    for fixed, wanted in ((["--prior-precision", "7"], 7.0), ([], grid[4])):
        monkeypatch.setattr(script, "precision_scores", lambda *a: [
            -math.inf, *[-5.0] * 3, -1.0, -1.0, *[math.nan] * 15])
        script.main([*options, "--method", "llla", "--resume", "never", *fixed])
        assert state_of(part)["delta"] == wanted


# ---- Misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, said", [
    ("--swag-epochs 1", "--swag-epochs 1"), ("--limit-train 3", "--limit-train"),
    ("--ensembles 5", "--members 2"), ("--ensembles one", "--ensembles one"),
    ("--ensembles 1,,2", "--ensembles"), ("--ensembles 0", "--ensembles"),
    ("--ensembles 1.5", "--ensembles"), ("--swag-lrs 0.1;0.2", "--swag-lrs"),
    ("--swag-lrs -1", "--swag-lrs"), ("--swag-lrs nan", "--swag-lrs"),
    ("--dropouts 1", "--dropouts"), ("--dropouts 0", "--dropouts"),
    ("--samples 1", "--samples 1"), ("--samples 0", "--samples"), ("--members 0", "--members"),
    ("--combinations 0", "--combinations"), ("--val-samples -1", "--val-samples"),
    ("--num-val 0", "--num-val"), ("--num-val 100000", "--num-val"),
    ("--depth 11", "--depth"), ("--depth 0", "--depth"), ("--depth 4", "--depth"),
    ("--epochs -1", "--epochs"), ("--width 0", "--width"), ("--dropout 1", "--dropout"),
    ("--prior-precision 0", "--prior-precision"), ("--prior-precision nothing", "grid"),
    ("--prior-precision -3", "--prior-precision"), ("--prior-precision nan", "--prior-precision"),
    ("--flow-precision inf", "--flow-precision"), ("--flow-layers 0", "--flow-layers"),
    ("--flow-lr -1", "--flow-lr"), ("--flow-lr nan", "--flow-lr"), ("--flow none", "--flow"),
    ("--ivon-ess 0", "--ivon-ess"), ("--ivon-lr -1", "--ivon-lr"), ("--y-var 0", "--y-var"),
    ("--weight-decay -1", "--weight-decay"), ("--swag-scale -1", "--swag-scale"),
    ("--patience 0", "--patience"), ("--mse-steps -1 5", "--mse-steps"),
    ("--save-interval 0", "--save-interval"), ("--eval-batch-size 0", "--eval-batch-size"),
    ("--model bert_256_4", "wrn_16_4"), ("--model painn", "images"), ("--model nothing", "--model"),
    ("--dataset reviews --model wrn_16_4 --depth 1", "bert_256_4"),
    ("--dataset clusters --model bert_256_4", "painn"), ("--dataset nothing", "nothing"),
    ("--dataset clusters --structure kron", "--structure kron"),
    ("--dataset clusters --predictive probit", "--predictive probit"),
    ("--dataset clusters --shift computed", "--shift"), ("--shift published", "--shift"),
    ("--dataset reviews --shift computed", "--shift"),
    ("--ood nothing", "nothing"), ("--ood glyphs_letters+nothing", "nothing"),
    ("--dataset reviews --ood reviews_finance+glyphs", "reviews_finance+glyphs"),
    ("--dataset clusters --ood glyphs", "glyphs"), ("--dataset sst2 --data-dir none", "SST-2"),
    ("--dataset qm9 --data-dir none", "qm9"), ("--dataset qm9 --target none", "none"),
    ("--resume none.pt", "--method"),
    *((f"--method {m} --resume none.pt", "--method map") for m in ("swa", "swag", "llla", "la_nf")),
    ("--method map --resume none.pt", "none.pt"),
    ("--method nothing", "--method"), ("--methods nothing", "--methods"), ("--seed -1", "--seed"),
    ("--out-dir /dev/null", "--out-dir"), ("--device nothing", "nothing"),
    ("--lr nan", "--lr"), ("--cutoff 0 --dataset clusters", "--cutoff"),
    ("--width 0.1 --model wrn_28_10 --depth 12", "--depth 12")])
def test_misuse_is_one_line_and_status_2(tmp_path, refused, argv, said):
    assert said in refused(*options_of("glyphs", tmp_path / "runs"), *argv.split())


def test_an_absent_or_damaged_vocabulary(tmp_path, refused):
    write_sst2(tmp_path)
    options = [*options_of("sst2", tmp_path / "runs"), "--data-dir", tmp_path, "--vocab"]
    assert "none.txt" in refused(*options, tmp_path / "none.txt")
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    assert "vocab.txt" in refused(*options, tmp_path / "vocab.txt")


def test_a_vocabulary_that_would_not_be_used(tmp_path, refused):
    """Embedded sentences keep their own: a --vocab that does nothing is a mistake."""
    assert "--vocab" in refused(*options_of("reviews", tmp_path / "runs"), "--vocab", "none.txt")


def test_an_empty_sentence(tmp_path, refused):
    rows = "".join(f"word {k}\t{k % 2}\n" for k in range(40))
    write_sst2(tmp_path, train=rows + " \t1\n")
    said = refused(*options_of("sst2", tmp_path / "runs"), "--data-dir", tmp_path)
    assert "train.tsv, line 42" in said and "empty" in said


def test_an_unknown_element(tmp_path, refused):
    write_npz(tmp_path, molecules=(1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3))
    path = tmp_path / "QM9" / "qm9_subset.npz"
    arrays = dict(np.load(path))
    arrays["Z"][3] = 99
    np.savez(path, **arrays)
    said = refused(*options_of("qm9", tmp_path / "runs"), "--data-dir", tmp_path)
    assert "molecule" in said and "element 99" in said


def test_few_molecules_leave_a_part_empty(tmp_path, refused):
    """A QM9 folder of three molecules has no validation part."""
    write_npz(tmp_path)
    assert "qm9" in refused(*options_of("qm9", tmp_path / "runs"), "--data-dir", tmp_path)


def test_an_empty_class_of_texts(tmp_path, refused):
    options = with_options(options_of("reviews", tmp_path / "runs"), limit_train=1)
    assert "no training example of class" in refused(*options)


def test_a_matrix_that_does_not_fit(study, refused, monkeypatch):
    options, _ = study()
    shutil.rmtree(root_of(options) / "llla-seed1")
    monkeypatch.setattr(common, "device_memory", lambda world: 1e4)
    said = refused(*options, "--method", "llla")
    assert "--structure kron or diag" in said and "GB" in said


def test_a_matrix_that_does_not_fit_is_known_before_training(small, refused, monkeypatch):
    """Not after a study's first member is trained."""
    monkeypatch.setattr(common, "device_memory", lambda world: 1e4)
    assert "--structure kron or diag" in refused(*small, "--methods", "map", "llla")
    assert finite(script.main([*small, "--methods", "llla", "--structure", "diag"]))


@pytest.mark.parametrize("more", ["--prior-precision 1e-6", "--prior-precision marglik"])
def test_a_hessian_that_is_not_positive_definite(study, refused, monkeypatch, more):
    """Molecules: a precision without a posterior is one line, and no outputs of NaN."""
    options, _ = study("clusters")
    shutil.rmtree(root_of(options) / "llla-seed1")
    real = script.decompose

    def decompose(*a):
        found = real(*a)
        return found._replace(values=found.values - found.values.min() - 100)

    monkeypatch.setattr(script, "decompose", decompose)
    part = f"runs/{SCRIPT}/run/llla-seed1"
    said = refused(*options, "--method", "llla", *more.split(), writes={
        f"{part}/{file}" for file in ("args.json", "log.jsonl", "last.pt")})
    assert "--prior-precision" in said


@pytest.mark.parametrize("what", ["map", "swag-lr*", "mcdo-p0.1", "ivon", "llla", "la_nf-t2"])
@pytest.mark.parametrize("damage", ["truncated", "other"])
def test_a_damaged_checkpoint_is_named(study, refused, what, damage):
    options, _ = study()
    path = sorted(root_of(options).glob(f"{what}-seed1/last.pt"))[0]
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    else:
        torch.save({"nothing": 1}, path)
    method = what.split("-")[0]
    assert str(path) in refused(*options, "--method", method)


@pytest.mark.parametrize("method", ["swag", "map"])
@pytest.mark.parametrize("size", [0, 50, -8])
def test_a_damaged_file_of_outputs(study, method, size):
    """Made again: no traceback, no silent wrong numbers."""
    options, _ = study()
    options = [*options, "--method", method]
    metrics = script.main(options)
    path, = root_of(options).glob(f"outputs-*-seed1/{method}-test-*.npy")
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    assert script.main(options) == metrics and path.read_bytes() == whole
    np.save(path, np.load(path)[:, :-1])  # of fewer examples
    assert script.main(options) == metrics and path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["truncated", "absent"])
def test_damaged_iterates_are_refused(study, refused, damage):
    options, _ = study()
    root = root_of(options)
    shutil.rmtree(root / "outputs-swag-seed1")
    for path in root.glob("swag-lr*-seed1/iterates.f32"):
        path.write_bytes(path.read_bytes()[:-4]) if damage == "truncated" else path.unlink()
    for more in ([], ["--eval"]):
        said = refused(*options, "--method", "swag", *more)
        assert "iterates.f32" in said and "--resume never" in said


@pytest.mark.parametrize("damage", ["truncated", "absent"])
def test_iterates_that_are_lost_in_the_middle_are_not_zeros(study, refused, monkeypatch, damage):
    """Stopped after an epoch, the file damaged, started again: refused; the command that the line
    names mends it."""
    options, _ = study()
    options = [*options, "--method", "swag", "--swag-lrs", "0.05"]
    metrics = script.main([*with_options(options, name="calm"), "--epochs", "2"])
    real = common.Run.save

    def save(self, **state):
        real(self, **state)
        if state["progress"]["epoch"] == 2 and "swag" in self.directory.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "save", save)
        with pytest.raises(KeyboardInterrupt):
            script.main(options)
    path = root_of(options) / "swag-lr0.05-seed1" / "iterates.f32"
    path.write_bytes(path.read_bytes()[:-4]) if damage == "truncated" else path.unlink()
    said = refused(*options)
    assert "iterates.f32" in said and "--method swag --seed 1 --keep-grid --resume never" in said
    assert script.main([*options, "--keep-grid", "--resume", "never"]) == metrics


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_damaged_note_of_scores(study, refused, content):
    """The file beside the iterates counts as absent: made again from them; where they are gone too,
    one line that names them and what mends both."""
    options, _ = study()
    options = [*options, "--method", "swag"]
    root, part = root_of(options), f"runs/{SCRIPT}/run"
    paths = list(root.glob("swag-lr*-seed1/val-3-1.json"))
    kept = {p: p.read_text() for p in paths}
    assert len(paths) == 2
    if len(list(root.glob("swag-lr*-seed1/iterates.f32"))) < len(paths):
        for path in paths:
            path.write_text(content)
        said = refused(*options, writes={f"{part}/{p.relative_to(root)}" for p in paths})
        assert "iterates.f32" in said and "--seed 1 --keep-grid --resume never" in said
    for more in (["--resume", "never"], []):
        metrics = script.main([*options, "--keep-grid", *more])
        assert all(p.read_text() == text for p, text in kept.items())
        for path in paths:
            path.write_text(content)
    assert script.main([*options, "--keep-grid"]) == metrics
    assert all(p.read_text() == text for p, text in kept.items())


def test_a_study_of_no_flow_epochs_is_evaluated(small):
    """Zero epochs of a flow leave it as it began; --eval knows that nothing is missing."""
    options = [*with_options(small, members=1, ensembles=1, flow_epochs=0), "--methods", "la_nf"]
    metrics = script.main(options)
    assert script.main([*options, "--eval"]) == metrics


def test_quiet_prints_the_table_only(study, capfd):
    options, _ = study()
    capfd.readouterr()
    script.main([*options, "--quiet", "--eval"])
    out, err = capfd.readouterr()
    assert "LPD" in out and "epoch" not in out and str(root_of(options)) not in out and not err


def test_the_commands_of_the_docstring_parse():
    parsed = [parse_command(line, (script,)) for line in usage_commands(script)]
    assert [a.dataset for a in parsed] == ["glyphs", "cifar10", "glyphs", "cifar10"]
    published = dict(model="wrn_16_4", width=1, epochs=100, batch_size=128, lr=0.1, samples=200,
                     members=30, ensembles=[1, 2, 5, 10, 20], weight_decay=5e-4, swag_epochs=100,
                     structure="full", flow_layers=10, flow_epochs=20, norm="frn", num_val=2000)
    assert published.items() <= vars(parsed[1]).items() and parsed[1].ood == ["svhn+cifar100"]
    assert (parsed[3].method, parsed[3].seed) == ("swag", 3)
