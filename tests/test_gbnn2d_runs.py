"""gbnn2d.py end to end: all stages, resuming, several processes, export, misuse."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import Child, run_gbnn2d_in_float64, start_ranks
from PIL import Image
from test_gbnn2d import tiny_code
from test_runs import parse_command, snapshot, strict_json, usage_commands
from test_streaming import write_images

import common
import gbnn2d

SCRIPT = "gbnn2d"
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
    wanted.remove("det/glyphs_letters_auroc_mutual_information")
    assert "det/glyphs_letters_auroc_mutual_information" not in metrics  # one network has none
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


@pytest.mark.parametrize("stage", ["det", "stoch", "final"])
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


# ---- Several runs, other runs' stages -----------------------------------------------------------


def test_runs_are_averaged(small, capfd):
    """Mean and standard error of the single runs; their directories hold the same."""
    several = [*small, "--epochs", "1", "--mc", "1", "--ood"]
    several[several.index("--name") + 1] = "both"
    means = gbnn2d.main([*several, "--runs", "2", "--seed", "5"])
    root = folder(small).parent
    content, = (strict_json(p) for p in root.glob("*-runs2/results.json"))
    single = [strict_json(root / f"both-seed{k}" / "results.json")["metrics"] for k in (5, 6)]
    assert content["metrics"] == common.to_json(means) and content["values"] == single
    assert content["metrics"].keys() == single[0].keys() == content["standard_error"].keys()
    for key, (a, b) in {k: [run[k] for run in single] for k in single[0]}.items():
        assert content["metrics"][key] == pytest.approx((a + b) / 2, rel=1e-12), key
        error = abs(a - b) / 2  # of two: sqrt(((a - b)^2 / 2) / 2)
        assert content["standard_error"][key] == pytest.approx(error, rel=1e-9, abs=1e-15), key
    assert content["standard_error"]["det/nll"] > 0
    assert "mean of 2 runs" in capfd.readouterr().out


def test_draws_are_compared_and_another_run_read(small):
    """--compare-draws: each draw's own numbers; --resume DIRECTORY: the same, read, not written."""
    first = gbnn2d.main([*small, "--compare-draws"])
    for key in ("accuracy", "nll", "nll_samples", "ece15"):
        assert first[f"final_hier/{key}"] == first[f"final/{key}"]
    assert len({first[f"final_{m}/nll_samples"] for m in ("hier", "shared", "perweight")}) == 3
    before = snapshot(folder(small))
    read = gbnn2d.main([*named(small, "read"), "--resume", str(folder(small))])
    assert read == {k: v for k, v in first.items() if not k.startswith("final_")}
    assert snapshot(folder(small)) == before
    assert not (folder(small).with_name("read") / "final" / "last.pt").exists()


def test_zero_epochs_leave_the_start(small):
    """Stages of no epochs are kept and read like others; nothing moves."""
    none = [*small, "--epochs", "0", "--stoch-epochs", "0", "--final-epochs", "0", "--mc", "1",
            "--ood", "--draw", "perweight"]
    metrics = gbnn2d.main(none)
    assert metrics["final/nll"] == metrics["merged/nll"]
    det, stoch, final = (state_of(none, "run", s)["model"] for s in ("det", "stoch", "final"))
    assert torch.equal(stoch["mu"][:150].view(6, 1, 5, 5), det["conv1.weight"])
    assert final["shift"].abs().max() == 0
    assert gbnn2d.main(none) == metrics == gbnn2d.main([*none, "--eval"])


# ---- Exports that are not -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The file of a tiny LeNet."""
    path = tmp_path_factory.mktemp("export") / "compressed.pt"
    args = gbnn2d.parse_args(["--dataset", "glyphs", "--model", "lenet"])
    net = gbnn2d.make_network(args, 10, (1, 28, 28))
    layout = gbnn2d.Layout(net)
    gbnn2d.export_shared(path, gbnn2d.Shared(net, layout, tiny_code(layout.size)), args, 10,
                         (1, 28, 28))
    return path


def test_other_and_cut_exports(refused, tmp_path, exported):
    state, path = torch.load(exported, weights_only=True), tmp_path / "other.pt"
    load = ["--dataset", "glyphs", "--device", "cpu", "--load", path]
    torch.save({**state, "config": {**state["config"], "format": "unsure-gbnn2d-0"}}, path)
    assert "unsure-gbnn2d-1" in refused(*load)
    torch.save({**state, "code": {**state["code"], "labels": state["code"]["labels"][:-1]}}, path)
    assert "labels for" in refused(*load)
    for content in (exported.read_bytes()[:-1000], b"not a checkpoint", b""):
        path.write_bytes(content)
        assert str(path) in refused(*load)


@pytest.mark.parametrize("part, key", [
    ("code", "centres"), ("code", "labels"), ("rest", "head.bias"), (None, "rest"),
    (None, "shape")])
def test_exports_that_lack_a_part(refused, tmp_path, exported, part, key):
    state, path = torch.load(exported, weights_only=True), tmp_path / "other.pt"
    del (state[part] if part else state)[key]
    torch.save(state, path)
    assert str(path) in refused("--dataset", "glyphs", "--device", "cpu", "--load", path)


@pytest.mark.parametrize("argv, said", [
    ("--runs 2 --export a.pt", "--runs"), ("--runs 2 --load a.pt", "--runs"),
    ("--runs 0", "--runs"), ("--k0 32768", "--k0"), ("--bins 0", "--bins"),
    ("--keep-layers nothing", "--keep-layers"), ("--tau-d -1", "--tau-d"),
    ("--tau-d nan", "--tau-d"), ("--lr-final nan", "--lr-final"),
    ("--keep-layers conv1 conv2 fc1 fc2 head", "no convolution or linear")])
def test_more_misuse_is_one_line_and_status_2(small, refused, argv, said):
    assert said in refused(*small, *argv.split())


def test_a_threshold_that_is_a_word(small, refused):
    err = refused(*small, "--tau-d", "word")
    assert "--tau-d" in err and "'word'" in err and "lambda" not in err


def test_a_directory_without_stages_is_refused(small, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "--resume" in refused(*small, "--resume", tmp_path / "empty")
    assert "--resume" in refused(*small, "--resume", tmp_path / "nowhere")


def test_thresholds_that_leave_nothing(small, refused):
    """Refused once the weights are known: no codes, no results, and the next start goes on."""
    few = [*small, "--epochs", "1", "--limit-steps", "1", "--mc", "1", "--ood", "--keep-layers",
           "fc1"]
    gbnn2d.main([*few, "--stage", "stoch"])
    (folder(small) / "results.json").unlink()
    for more, said in (("--k0 30000", "--k0 30000"), ("--tau-w 0 --grad-frac 0.5", "inliers"),
                       ("--grad-frac 1", "inliers"), ("--min-cluster 100000", "--min-cluster")):
        with pytest.raises(common.UserError, match=said) as error:
            gbnn2d.main([*few, *more.split()])
        assert "\n" not in str(error.value)
        assert {p.name for p in (folder(small) / "gmm").iterdir()} == {"args.json"}
        assert {p.name for p in folder(small).iterdir()} == {"args.json", "det", "stoch", "gmm"}
    assert gbnn2d.main([*few, "--stage", "gmm"])["counts/gaussians"] <= 40


# ---- Networks of torchvision --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An ImageNet-like --data-dir of 3 classes, and state dicts of networks for 3 and 4."""
    root, rng = tmp_path_factory.mktemp("folders"), np.random.default_rng(0)
    for c, name in enumerate(("n01", "n02", "n03")):
        write_images(root / "imagenet/train" / name, 5, rng, np.eye(3)[c] * 130)
        write_images(root / "imagenet/val" / name, 3, rng, np.eye(3)[c] * 130)
    write_images(root / "imagenet-o/n04", 4, rng, 60)
    for k in (3, 4):
        torch.manual_seed(k)
        net = torchvision.models.shufflenet_v2_x0_5(weights=None, num_classes=k)
        torch.save(net.state_dict(), root / f"{k}.pt")
    (root / "words.pt").write_text("no state dict")
    torch.save([1, 2], root / "list.pt")
    return root


@pytest.fixture
def pretrained(folders, tmp_path):
    return ["--dataset", "imagenet", "--model", "torchvision/shufflenet_v2_x0_5", "--data-dir",
            str(folders), "--device", "cpu", "--workers", "1", "-b", "8", "--stoch-epochs", "1",
            "--final-epochs", "1", "--limit-steps", "1", "--k0", "40", "--mc", "2", "--bn-batches",
            "1", "--tau-w", "1", "--no-plot", "--out-dir", str(tmp_path / "runs"), "--name", "run"]


def test_pretrained_network_of_torchvision(pretrained, folders, tmp_path, capfd):
    """Its state is stage 0: nothing trained, all later stages; the export predicts the same."""
    weights = ["--weights", str(folders / "3.pt")]
    metrics = gbnn2d.main([*pretrained, *weights])
    out = capfd.readouterr().out
    assert "57 layers with 336,912 weights are shared; kept whole: conv1.1.weight" in out
    assert "fc.bias" in out and "fc.weight" not in out and "running_mean" not in out
    assert all(math.isfinite(v) for v in metrics.values())
    assert {f"{s}/imagenet_o_auroc_entropy" for s in STAGES} <= metrics.keys()
    assert metrics["counts/weights"] == 336_912 and metrics["counts/gaussians"] <= 40
    root = folder(pretrained)
    assert not (root / "det").exists()
    prior = torch.load(folders / "3.pt", weights_only=True)
    start = state_of(pretrained, "run", "stoch")["model"]
    assert (start["mu"][:648].view(24, 3, 3, 3) - prior["conv1.0.weight"]).abs().max() < 1e-3
    loaded = gbnn2d.main([*pretrained, "--load", str(root / "compressed.pt")])
    assert loaded["loaded/nll"] == pytest.approx(metrics["final/nll"], abs=1e-6)


@pytest.mark.parametrize("weights, said", [
    ("4.pt", "size mismatch"), ("words.pt", "words.pt"), ("list.pt", "list.pt"),
    ("absent.pt", "absent.pt")])
def test_weights_that_do_not_fit(pretrained, folders, refused, weights, said):
    err = refused(*pretrained, "--weights", folders / weights)
    assert said in err and "--model torchvision/shufflenet_v2_x0_5" in err


@pytest.mark.parametrize("name", ["nonsense", "", "raft_small"])
def test_names_that_are_no_classifiers(pretrained, folders, refused, name):
    options = [*pretrained, "--model", f"torchvision/{name}", "--weights", folders / "3.pt"]
    assert f"torchvision/{name}" in refused(*options)
