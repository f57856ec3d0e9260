"""common.py: metrics, options, networks of torchvision, runs, tables, processes."""

import copy
import json
import math
import os
import random
import time
from argparse import BooleanOptionalAction, Namespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal_checkpoints, run_ranks
from scipy import optimize, stats
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression
from torch import nn
from torchmetrics.functional import classification as tm
from torchvision import models

import common
import data
from common import UserError

# ---- Metrics ------------------------------------------------------------------------------------


def random_log_probs(m, n, k):
    """log_probs [m, n, k], and labels [n] from sharper rows of the first member."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(m, n, k, dtype=torch.float64)
    labels = torch.multinomial((1.5 * logits[0]).softmax(-1), 1)[:, 0]
    return logits.log_softmax(-1), labels


def test_prediction_metrics_are_those_of_the_libraries():
    [log_probs], labels = random_log_probs(1, 2000, 7)
    probs = log_probs.exp()
    expected = {"accuracy": sk.accuracy_score(labels, probs.argmax(1)),
                "brier": sk.brier_score_loss(labels, probs.numpy(), labels=range(7)),
                "nll": sk.log_loss(labels, probs.numpy(), labels=range(7)),
                "ece15": tm.multiclass_calibration_error(probs, labels, 7, 15).item()}
    assert common.prediction_metrics(log_probs, labels) == pytest.approx(expected, abs=1e-6)


def test_ece_is_that_of_torchmetrics_with_mirrored_bins():
    """1 - confidence turns its bins, closed on the left, into bins closed on the right."""
    confidence = torch.arange(17, 33).repeat(3) / 32  # every second is an edge; 1 is the last
    is_wrong = (torch.arange(48) % 4 < 1).long()
    ours = common.ece(torch.stack([confidence, 1 - confidence], 1), is_wrong, bins=16)
    mirrored = tm.binary_calibration_error(1 - confidence, is_wrong, n_bins=16).item()
    assert ours == pytest.approx(mirrored, abs=1e-6)


def test_uncertainty_of_an_ensemble_is_entropy_and_divergence():
    log_probs, _ = random_log_probs(5, 40, 10)
    p = log_probs.exp().numpy()
    ours = common.ensemble_uncertainty(log_probs)
    expected = {"total": stats.entropy(p.mean(0), axis=-1),
                "aleatoric": stats.entropy(p, axis=-1).mean(0),
                "epistemic": stats.entropy(p, p.mean(0)[None], axis=-1).mean(0)}
    for name, value in expected.items():
        assert np.allclose(ours[name], value, atol=1e-12), name


def test_what_equal_members_disagree_by_is_zero_and_not_rounding():
    log_probs, _ = random_log_probs(1, 40, 3)
    equal = log_probs.expand(7, -1, -1)
    assert common.ensemble_uncertainty(equal)["epistemic"].abs().max() == 0
    spread = torch.linspace(-1e-4, 1e-4, 7)[:, None, None]
    nearly_equal = (equal * (1 + spread)).log_softmax(-1)
    assert common.ensemble_uncertainty(nearly_equal)["epistemic"].min() > 0
    assert "epistemic" not in common.ensemble_uncertainty(log_probs)  # of a single member


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_nan_or_logits_in_any_member_are_refused(value):
    log_probs, labels = random_log_probs(3, 10, 4)
    log_probs[1, 7, 2] = value
    for metric, *arguments in [(common.ensemble_uncertainty, log_probs),
                               (common.nll, log_probs[1], labels),
                               (common.brier, log_probs[1].exp(), labels),
                               (common.ece, log_probs[1].exp(), labels)]:
        with pytest.raises(ValueError, match="probabilities that sum to 1"):
            metric(*arguments)


@pytest.mark.parametrize("fraction, decimals", [(0.2, 8), (0.8, 1), (0.8, 0)])  # more and more ties
def test_ranking_is_that_of_scikit_learn_and_needs_both_kinds(fraction, decimals):
    positive = np.arange(500) < 500 * fraction  # also a true positive rate of exactly 0.95
    scores = (np.random.default_rng(0).normal(1e4, size=500) + 1.5 * positive).round(decimals)
    fpr, tpr, _ = sk.roc_curve(positive, scores, drop_intermediate=False)
    expected = {common.auroc: sk.roc_auc_score(positive, scores),
                common.average_precision: sk.average_precision_score(positive, scores),
                common.fpr_at_tpr: fpr[tpr >= 0.95].min()}
    for metric, value in expected.items():
        ours = metric(torch.tensor(scores), torch.tensor(positive))
        assert ours == pytest.approx(value, abs=1e-12)
        for factor, is_positive in ((math.nan, positive), (1, positive | True), (1, positive < 0)):
            with pytest.raises(ValueError, match="without NaN, of positive and of negative"):
                metric(factor * torch.tensor(scores), torch.tensor(is_positive))


def test_conventions_of_ood_metrics():
    is_ood = torch.arange(1000) >= 300
    scores = torch.tensor(np.random.default_rng(3).normal(size=1000).round(1)) + is_ood
    inside, outside = scores.split([300, 700])
    ours = common.ood_metrics(inside, outside)
    assert ours == {"auroc": common.auroc(scores, is_ood),
                    "aupr_in": common.average_precision(-scores, ~is_ood),
                    "aupr_out": common.average_precision(scores, is_ood),
                    "fpr95": (outside <= inside.kthvalue(285).values).double().mean()}


def test_temperature_is_the_minimum_of_the_nll_within_limits():
    [log_probs], labels = random_log_probs(1, 1000, 10)
    z = 20 * log_probs
    best = optimize.minimize_scalar(lambda t: common.nll((z / t).log_softmax(1), labels),
                                    bounds=(0.1, 100), options={"xatol": 1e-9})
    assert common.fit_temperature(z.float(), labels) == pytest.approx(best.x, rel=1e-5)
    assert common.fit_temperature(torch.eye(4), torch.arange(4)) == 0.1
    assert common.fit_temperature(torch.eye(4), torch.arange(4).roll(1)) == 100.0


# ---- Options and networks -----------------------------------------------------------------------

RECIPES = {"digits": {"lr": 0.25}, "folder": {"epochs": 7, "model": "large"}}


def parse(folder, *argv):
    """The options of a script called x, with run directories in `folder`."""
    parser = common.Parser("x", "About x.", RECIPES, {"small": None, "large": None},
                           dataset="digits", model="small", epochs=3, batch_size=8, lr=1.0)
    parser.training("--smooth", action=BooleanOptionalAction, default=True, help="smooth")
    parser.other("--methods", nargs="+", default=["a"], help="methods")
    argv = [*map(str, argv), "--out-dir", str(folder), "--device", "cpu"]
    return parser.parse(argv, lambda args: RECIPES[args.dataset.split(":")[0]])


def test_a_data_set_chooses_its_recipe_and_the_command_line_wins(tmp_path):
    args = parse(tmp_path)
    assert (args.lr, args.epochs, args.model, args.batch_size) == (0.25, 3, "small", 8)
    args = parse(tmp_path, "--dataset", "folder:some/images", "--lr", "0.5", "--seed", "4")
    assert (args.lr, args.epochs, args.run_dir.name) == (0.5, 7, "images-large-seed4")


def test_unknown_names_are_one_line(tmp_path, capsys):
    names = {"--dataset": "digits, folder", "--model": "small, large, torchvision/NAME"}
    for option in names:
        with pytest.raises(SystemExit, match="2"):
            parse(tmp_path, option, "x")
        assert f"error: {option} x: choose one of {names[option]}\n" in capsys.readouterr().err


def test_eval_restores_the_options_of_the_last_command_that_may_train(tmp_path):
    train(tmp_path, "--lr", 0.5, "--no-smooth", "--methods", "b", "c", "--ood", "folder:x",
          "--predict", "new", "--no-plot", "--fresh")
    args = parse(tmp_path, "--eval")
    assert (args.lr, args.smooth, args.methods, args.ood) == (0.5, False, ["b", "c"], ["folder:x"])
    assert args.predict is None
    assert args.plot
    assert not args.fresh
    assert parse(tmp_path).lr == 0.25
    typed = train(tmp_path, "--eval", "--methods", "a", "--ood", "--predict", "new").args
    assert (typed.methods, typed.ood, typed.predict) == (["a"], [], "new")
    assert parse(tmp_path, "--eval") == args  # that command has replaced none


def torchvision_network(weights="none", num_classes=5, name="shufflenet_v2_x0_5"):
    """A network as the scripts build it from --model torchvision/NAME."""
    args = Namespace(dataset="folder:x", model=f"torchvision/{name}", weights=str(weights))
    net = nn.Sequential()
    net.backbone, net.head, net.is_trained = common.torchvision_network(args, num_classes)
    return net


def logits(net):
    return net.eval()(torch.linspace(-9, 9, 2 * 3 * 32 * 32).sin().view(2, 3, 32, 32)).detach()


def state_without(net, ending):
    state = net.state_dict()
    return {name: state[name] for name in state if not name.endswith(ending)}


@pytest.mark.parametrize("content", [
    nn.Module.state_dict,
    lambda net: torch.optim.swa_utils.AveragedModel(net).state_dict(),    # "module." and a counter
    lambda net: {"state_dict": nn.ModuleDict({"net": net, "loss": nn.Linear(1, 5)}).state_dict()},
    lambda net: {"model_state_dict": net.state_dict(), "epoch": 3},
    lambda net: state_without(net, "num_batches_tracked"),
    lambda net: state_without(net, "classifier.3.bias"),                  # which is 0
    lambda net: nn.Sequential(net, nn.Softmax(1)).state_dict()])          # names begin with "0."
def test_a_state_dict_loads_as_people_have_it(content, tmp_path):
    net = models.mobilenet_v3_small(num_classes=5)  # its head is classifier.3
    torch.save(content(net), tmp_path / "net.pt")
    ours = torchvision_network(tmp_path / "net.pt", name="mobilenet_v3_small")
    assert torch.equal(logits(ours), logits(net))
    assert ours.is_trained
    # The same for networks of the scripts, where some names begin with a prefix.
    torch.save(content(ours), tmp_path / "ours.pt")
    other = torchvision_network(name="mobilenet_v3_small")
    assert common.load_weights(other, tmp_path / "ours.pt")
    assert torch.equal(logits(other), logits(net))


def test_a_head_for_other_classes_is_not_loaded_and_an_ensemble_gives_its_first(tmp_path, capsys):
    path = tmp_path / "net.pt"
    nets = nn.ModuleList(torchvision_network() for _ in range(2))
    for whole in (nets[0], nets):
        torch.save({"net": whole.state_dict(), "history": [{"loss": 1.0}]}, path)
        assert torch.equal(logits(torchvision_network(path)), logits(nets[0]))
    assert "tensors are not used, such as 1.backbone" in capsys.readouterr().out
    net = torchvision_network(path, 9)
    assert net.head.weight.shape == (9, 1024)
    assert not net.is_trained
    assert torch.equal(net.backbone.conv5[0].weight, nets[0].backbone.conv5[0].weight)
    assert "a new last layer for 9 classes" in capsys.readouterr().out


def test_networks_of_torchvision_that_cannot_work_are_one_line():
    for name, words in (("resnet", "Unknown model"), ("squeezenet1_0", "has no linear layer")):
        with pytest.raises(UserError, match=f"--model torchvision/{name}.*{words}"):
            torchvision_network(name=name)


def test_only_imagenet_has_the_classes_of_pretrained_networks(monkeypatch):
    net = models.resnet18()  # of 1,000 classes
    monkeypatch.setattr(common.models, "get_model", lambda name, weights: copy.deepcopy(net))
    for dataset in ("numbers", "imagenet"):
        args = Namespace(dataset=dataset, model="torchvision/resnet18", weights="DEFAULT")
        _, head, is_trained = common.torchvision_network(args, 1000)
        assert is_trained == (dataset == "imagenet")
        assert torch.equal(head.weight, net.fc.weight) == (dataset == "imagenet")


def test_a_fitted_head_is_the_logistic_regression_of_scikit_learn():
    torch.manual_seed(0)
    x = 3 * torch.randn(200, 8).relu()
    labels = (x[:, :5] + torch.randn(200, 5)).argmax(1)
    head = nn.Linear(8, 5)
    common.fit_head(head, x, labels)
    theirs = LogisticRegression(tol=1e-10, max_iter=10_000)
    theirs.fit(x.double().numpy(), labels.numpy())
    expected = theirs.predict_proba(x.double().numpy())
    assert np.allclose(head(x).softmax(1).detach(), expected, atol=1e-4)


@pytest.mark.parametrize("content, words", [
    (models.resnet18(num_classes=5).state_dict(), ["conv1.0.weight", "bn1.weight"]),
    (models.shufflenet_v2_x1_0(num_classes=5).state_dict(), ["size mismatch for conv5.0.weight"]),
    (models.shufflenet_v2_x0_5(num_classes=5).state_dict() | {"stage2.9.weight": torch.ones(1)},
     ["which has no ['stage2.9.weight']"]), ([1, 2], [])], ids=["names", "sizes", "larger", "list"])
def test_a_file_that_does_not_fit_is_one_line_with_both_names(content, words, tmp_path, capsys):
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(SystemExit, match="2"):
        common.launch(lambda: torchvision_network(tmp_path / "net.pt"))
    [line] = capsys.readouterr().err.splitlines()
    assert all(word in line for word in [f"error: {tmp_path}/net.pt", *words])


def test_files_are_read_without_running_code_or_refused_in_one_line(tmp_path):
    torch.save({"net": nn.Linear(2, 2)}, tmp_path / "pickled network")
    torch.save({"x": torch.ones(1000)}, tmp_path / "cut")
    os.truncate(tmp_path / "cut", 2000)
    (tmp_path / "text").write_text("no checkpoint\nat all\n")
    for name in ("pickled network", "cut", "text", "absent"):
        with pytest.raises(UserError, match=f"{name} cannot be read: ") as error:
            common.load(tmp_path / name)
        assert "\n" not in str(error.value)


# ---- Runs, tables, processes --------------------------------------------------------------------


def train(folder, *argv, dataset="d", files=(), second_loss=None):
    """A small training, as the scripts write it; returns its Run."""
    run = common.Run(parse(folder, *argv), dataset, "test", files)
    common.seed_all(0)
    run.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimiser = torch.optim.SGD(run.net.parameters(), lr=0.05, momentum=0.9)
    history = run.resume("net", run.args.epochs, net=run.net, optimiser=optimiser)
    for epoch in range(len(history), run.args.epochs):
        common.seed_all(1, epoch, common.rank())
        x = torch.randn(32, 4)
        loss = (run.net(x)[:, 0] - x.sum(1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append({"epoch": epoch + 1, "loss": loss.item()})
        if epoch == 1 and second_loss is not None:
            history[-1]["loss"] = second_loss
        run.save("net", history, net=run.net, optimiser=optimiser)
    return run


def test_a_run_that_was_stopped_resumes_with_equal_weights(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole").dir / "net.pt"
    replace = os.replace

    def stop(old, new):
        if new.name == "net.pt" and new.exists():
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", stop)  # at the second checkpoint
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.undo()
    assert len(common.load(tmp_path / "x" / "digits-small-seed1" / "net.pt")["history"]) == 1
    assert_equal_checkpoints(train(tmp_path).dir / "net.pt", whole)


def test_divergence_keeps_the_checkpoint_before_and_eval_needs_what_was_saved(tmp_path):
    with pytest.raises(UserError, match="digits-small-seed1 has no run; train it first"):
        train(tmp_path, "--eval")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="net: training diverged in epoch 2; .* learning rate"):
        train(tmp_path, second_loss=math.inf)
    with pytest.raises(UserError, match="net.pt has 1 of 3 epochs; train without --eval"):
        train(tmp_path, "--eval")
    run = train(tmp_path)
    nn.init.constant_(run.net[0].weight, math.nan)
    with pytest.raises(UserError, match="training diverged"):
        run.save("net", [{"epoch": 1, "loss": 0.5}], net=run.net)
    assert len(common.load(run.dir / "net.pt")["history"]) == 3
    with pytest.raises(UserError, match="other.pt is missing; run without --eval"):
        train(tmp_path, "--eval").cached("other", dict)
    train(tmp_path, "--eval", "--epochs", 0, "--name", "pretrained")  # has nothing to train


def test_only_other_training_options_data_and_weights_are_refused(tmp_path):
    weights = tmp_path / "weights.pt"
    argv = ["--no-smooth", "--weights", weights]
    weights.write_text("any file will do")
    train(tmp_path, *argv, files=[__file__])
    train(tmp_path, *argv, "--methods", "b", "--runs", 4, files=[__file__])
    options = ["--lr", 0.5, "--smooth"]
    for more, content, dataset, files, words in [
            (options, "any file will do", "d", [__file__], r"lr 0.25 \(not 0.5\), smooth False"),
            ([], "any file will do", "e", [__file__], r"data d \(not e"),
            ([], "any file will do", "d", [], rf"content of {__file__} \w+ \(not None"),
            (["--eval"], "another", "d", [__file__], rf"content of {weights} \w+ \(not \w")]:
        weights.write_text(content)
        with pytest.raises(UserError, match=rf"made with {words}.*\); use another --name, or"):
            train(tmp_path, *argv, *more, dataset=dataset, files=files)


def test_fresh_starts_over_but_not_with_eval(tmp_path):
    run = train(tmp_path)
    run.cached("cache", lambda: {"tensor": torch.ones(2), "name": "a"})
    run.report([row([1], 0.5)], ["accuracy"])
    train(tmp_path, "--fresh", "--eval")
    assert run.cached("cache", dict)["tensor"].tolist() == [1, 1]  # is not computed again
    with pytest.raises(UserError, match="diverged"):
        train(tmp_path, "--fresh", "--lr", 0.5, second_loss=math.nan)
    assert len(common.load(run.dir / "net.pt")["history"]) == 1
    # No results of the other options stay, as they would be rows of a table.
    assert {path.name for path in run.dir.iterdir()} == {"net.pt", "options.json"}


def test_predictions_have_a_line_for_each_image_and_ten_digits(tmp_path, capsys):
    run = train(tmp_path)
    images = data.ImageSet("new", torch.zeros(2, 1, 4, 4), torch.tensor([1, -1]), 3, (0,), (1,),
                           files=("a.png", "b\udcff.png"), unreadable=("c.png",))
    log_probs = torch.eye(3)[[1, 0]].log()
    scores = {"total": torch.tensor([-11234.567891, 0.1], dtype=torch.float64)}
    classes = ("cat", "dog", "cow")
    columns = common.class_columns(log_probs, classes) | scores
    run.write_predictions(images, classes, {"DDU": columns, "llla": scores})
    # A file name that is not UTF-8 keeps its bytes.
    assert (run.dir / "predictions.csv").read_bytes().splitlines() == [
        b"file,label,predicted,confidence,total,total_llla",
        b"a.png,dog,dog,1,-11234.56789,-11234.56789", b"b\xff.png,,cat,1,0.1,0.1", b"c.png,,,,,"]
    assert "1 images could not be read" in capsys.readouterr().out
    assert (run.dir / "predictions.png").exists()


@pytest.mark.parametrize("score, first", [("log_density", [0, 1]), ("total", [9, 8])])
def test_the_picture_of_predictions_begins_with_what_is_known_least(score, first):
    grey = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    images = data.ImageSet("new", grey, torch.zeros(10).long(), 3, (0,), (1,))
    columns = {"predicted": list("abcdefghij"), score: torch.arange(10, dtype=torch.float64)}
    figure = common.draw_predictions(images, columns)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == [f"{'abcdefghij'[row]}\n{row}" for row in first]
    assert len([title for title in titles[12:] if title]) == 5
    assert figure.axes[0].images[0].get_array()[0, 0].tolist() == [first[0]] * 3


def row(seeds, accuracy, **others):
    return {"method": "m", "seeds": seeds, "set": "t", "n": 10, "accuracy": accuracy} | others


def test_pool_counts_equal_rows_once_and_needs_independent_seeds_for_an_error():
    rows = [row([1], 0.9, prr=None), row([2], 0.8, prr=1.0), row([2], 0.8, prr=1.0), row([3], 0.4)]
    [line] = common.pool(rows, ["accuracy", "prr"])
    assert line["accuracy"] == f"0.7 ± {stats.sem([0.9, 0.8, 0.4]):.2g}"
    assert line["rows"] == 3
    assert "prr" not in line  # which some rows lack
    for seeds, text in [(([1, 2], [3]), "0.6 ± 0.1"), (([1, 2], [2]), "0.6"), (([], []), "0.6")]:
        [line] = common.pool([row(seeds[0], 0.5), row(seeds[1], 0.7)], ["accuracy"])
        assert line["accuracy"] == text
        assert line["rows"] == 2
    for key in ("run", "method", "k", "set", "against", "n"):  # these are not pooled
        assert len(common.pool([row([1], 0.5), row([2], 0.7) | {key: 3}], ["accuracy"])) == 2


def test_common_as_a_program_pools_what_runs_of_equal_settings_report(tmp_path, capsys):
    folders = [str(tmp_path / "unfinished")]
    for seed, options in ((8, ["--lr", 0.5, "--methods", "b"]), (9, []), (10, [])):
        run = train(tmp_path, "--seed", seed, *options)
        folders.append(str(run.dir))
        rows = [row([seed, 2 * seed], seed / 100, nll=0.25),
                row([seed], math.inf, against="o_d")]
        assert run.report(rows, ["accuracy"], curve=[1]) == rows
    assert "method  set  n   rows  accuracy\nm       t    10  1     0.1" in capsys.readouterr().out
    content = json.loads((run.dir / "results.json").read_text())
    settings = content.pop("settings")
    assert settings.items() >= {"lr": 0.25, "methods": ["a"], "test_set": "test"}.items()
    assert "seed" not in settings
    rows[1]["accuracy"] = None  # JSON has no infinity
    assert content == {"script": "x", "columns": ["accuracy"], "rows": rows, "curve": [1]}
    assert (run.dir / "results.csv").read_text() == (
        "method,seeds,set,n,accuracy,nll,against\nm,10 20,t,10,0.1,0.25,\nm,10,t,10,inf,,o_d\n")
    common.main(folders)
    out, err = capsys.readouterr()
    assert err == f"skipped: {tmp_path}/unfinished has no results.json\n"
    single, pairs = out.strip().split("\n\n")
    assert single == (
        "run                                     method  set  n   rows  accuracy\n"
        "x/digits-small, lr 0.5, methods ['b']   m       t    10  1     0.08\n"
        "x/digits-small, lr 0.25, methods ['a']  m       t    10  2     0.095 ± 0.005")
    assert pairs.endswith("m       t    o_d      10  2")
    common.main([*folders[2:], "--metrics", "nll", "--latex"])
    single, pairs = capsys.readouterr().out.split("\n\n")
    assert r"x/digits-small & m & t & 10 & 2 & 0.25 $\pm$ 0 \\" in single
    assert r"o\_d" in pairs


def test_seeds_of_similar_keys_differ_and_seed_everything():
    keys = [*np.ndindex(7, 7, 7), (), (0,), (0, 0), (1,), (1, 0), (2**40,)]
    seeds = {common.derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert 0 <= min(seeds) < max(seeds) < 2**63
    drawn = []
    for key in ((3, 1), (3, 1), (3, 2)):
        common.seed_all(*key)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def in_two_processes(folder):
    """What each process gets; the rows are shuffled, and one batch is empty."""
    common.start("cpu")
    rank = common.rank()
    mine = torch.tensor([3, 0, 4, 1, 2]).split([1, 4])[rank]
    batches = [{"index": index, "value": 2 * index} for index in (mine, mine[:0])]
    with common.local_main_first():
        if rank == 0:
            time.sleep(0.2)
            (folder / "download").touch()
        is_downloaded = (folder / "download").exists()
    run = train(folder)
    result = {"rows": common.gather_rows(batches), "sum": common.all_reduce(torch.ones(2) + rank),
              "is_downloaded": is_downloaded, "net": run.net.state_dict(),
              "cached": run.cached("rank", lambda: {"rank": rank})}
    dist.destroy_process_group()
    return result


def test_two_processes(tmp_path):
    main, other = run_ranks(tmp_path, in_two_processes, tmp_path)
    assert main["rows"]["value"].tolist() == [0, 2, 4, 6, 8]
    assert other["rows"] is None
    for result in (main, other):
        assert result["sum"].tolist() == [3, 3]
        assert result["cached"] == {"rank": 0}
        assert result["is_downloaded"]
    saved = common.load(tmp_path / "x" / "digits-small-seed1" / "net.pt")["net"]
    for name, value in main["net"].items():
        assert torch.equal(value, saved[name])
        # Each process had other images: running averages are shared all the same.
        is_buffer = name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")
        assert torch.equal(value, other["net"][name]) == is_buffer, name
    assert "epoch 3" in (tmp_path / "0.out").read_text()
    assert not (tmp_path / "1.out").read_text()
