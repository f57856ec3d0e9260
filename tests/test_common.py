"""common.py: metrics, options, networks of torchvision, runs, tables, processes."""

import copy
import importlib
import json
import math
import os
import random
import re
import runpy
import signal
import sys
import time
from argparse import BooleanOptionalAction, Namespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import REPO, SCRIPTS, Child, assert_equal_checkpoints, run_ranks
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


@pytest.mark.parametrize("k", [2, 7])
def test_prediction_metrics_are_those_of_the_libraries(k):
    [log_probs], labels = random_log_probs(1, 2000, k)
    probs = log_probs.exp()
    # scikit-learn halves the Brier score of two classes, unless it is told not to.
    brier = sk.brier_score_loss(labels, probs.numpy(), labels=range(k), scale_by_half=False)
    assert common.prediction_metrics(log_probs, labels) == pytest.approx({
        "accuracy": sk.accuracy_score(labels, probs.argmax(1)), "brier": brier,
        "nll": sk.log_loss(labels, probs.numpy(), labels=range(k)),
        "ece15": tm.multiclass_calibration_error(probs, labels, k, 15).item()}, abs=1e-6)
    if k == 2:
        assert brier == pytest.approx(2 * sk.brier_score_loss(labels, probs[:, 1]))


def test_ece_is_that_of_torchmetrics_with_mirrored_bins():
    """1 - confidence turns its bins, closed on the left, into bins closed on the right."""
    confidence = torch.arange(17, 33).repeat(3) / 32  # every second is an edge; 1 is the last
    is_wrong = (torch.arange(48) % 4 < 1).long()
    ours = common.ece(torch.stack([confidence, 1 - confidence], 1), is_wrong, bins=16)
    mirrored = tm.binary_calibration_error(1 - confidence, is_wrong, n_bins=16).item()
    assert ours == pytest.approx(mirrored, abs=1e-6)
    assert abs(tm.binary_calibration_error(confidence, 1 - is_wrong, n_bins=16) - ours) > 0.01


@pytest.mark.parametrize("m, k", [(2, 3), (5, 10)])
def test_uncertainty_of_an_ensemble_is_entropy_and_divergence(m, k):
    log_probs, _ = random_log_probs(m, 40, k)
    p = log_probs.exp().numpy()
    ours = common.ensemble_uncertainty(log_probs)
    expected = {"total": stats.entropy(p.mean(0), axis=-1),
                "aleatoric": stats.entropy(p, axis=-1).mean(0),
                "epistemic": stats.entropy(p, p.mean(0)[None], axis=-1).mean(0)}
    for name, value in expected.items():
        assert np.allclose(ours[name], value, atol=1e-12), name
    certain = common.ensemble_uncertainty(torch.eye(k).log()[:, None])
    assert certain["aleatoric"] == 0
    assert certain["epistemic"].item() == pytest.approx(math.log(k))


def test_what_equal_members_disagree_by_is_zero_and_not_rounding():
    log_probs, _ = random_log_probs(1, 40, 3)
    epistemic = common.ensemble_uncertainty(log_probs.expand(7, -1, -1))["epistemic"]
    assert epistemic.abs().max() == 0
    spread = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None, None] * 1e-4
    nearly_equal = (log_probs.expand(2, -1, -1) * (1 + spread)).log_softmax(-1)
    assert common.ensemble_uncertainty(nearly_equal)["epistemic"].min() > 0
    assert "epistemic" not in common.ensemble_uncertainty(log_probs)  # of a single member


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_nan_or_logits_in_any_member_are_refused(value):
    for member in range(3):
        log_probs, labels = random_log_probs(3, 10, 4)
        log_probs[member, 7, 2] = value
        for metric, *arguments in [(common.ensemble_uncertainty, log_probs),
                                   (common.nll, log_probs[member], labels),
                                   (common.brier, log_probs[member].exp(), labels),
                                   (common.ece, log_probs[member].exp(), labels)]:
            with pytest.raises(ValueError, match="probabilities that sum to 1, but a row is off"):
                metric(*arguments)


@pytest.mark.parametrize("decimals", [8, 1, 0])  # ties: few, many, and most
@pytest.mark.parametrize("fraction", [0.2, 0.8])
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
    # pytorch-ood and torch-uncertainty: the fraction of ID that is rejected when 95 % of OOD is.
    theirs = (-inside <= (-outside).kthvalue(665).values).double().mean()
    assert common.fpr_at_tpr(scores, is_ood) == theirs and abs(theirs - ours["fpr95"]) > 0.02
    # pytorch-ood: trapezoids down to recall 0, precision 1. They differ for a constant score.
    precision, recall, _ = sk.precision_recall_curve(is_ood, np.zeros(1000))
    assert sk.auc(recall, precision) == pytest.approx((1 + 0.7) / 2)
    assert common.ood_metrics(torch.zeros(300), torch.zeros(700))["aupr_out"] == 0.7
    several = common.detection_metrics({"a": inside, "b": -inside}, {"a": outside, "b": -outside})
    assert {f"{name}_a": value for name, value in ours.items()}.items() < several.items()
    assert several["auroc_b"] == pytest.approx(1 - ours["auroc"]) and len(several) == 8


def test_rejection_ratio_by_hand():
    # Errors while 0, ..., 4 are kept: 0 0 1 1 2; at random 0 .5 1 1.5 2; at best 0 0 0 1 2.
    correct = torch.tensor([False, True, True, False])
    uncertainty = torch.tensor([0.2, 0.1, 0.3, 0.4])
    assert common.prediction_rejection_ratio(uncertainty, correct) == (4 - 3) / (4 - 2)
    assert common.prediction_rejection_ratio(torch.ones(4), correct) == 0
    for equal in (correct | True, correct & False):
        assert common.prediction_rejection_ratio(uncertainty, equal) is None


@pytest.mark.parametrize("scale", [0.3, 20.0])
def test_temperature_is_the_minimum_of_the_nll_within_limits(scale):
    [log_probs], labels = random_log_probs(1, 1000, 10)
    z = scale * log_probs
    best = optimize.minimize_scalar(lambda t: common.nll((z / t).log_softmax(1), labels),
                                    bounds=(0.1, 100), options={"xatol": 1e-9})
    assert common.fit_temperature(z.float(), labels) == pytest.approx(best.x, rel=1e-5)
    assert common.fit_temperature(scale * torch.eye(4), torch.arange(4)) == 0.1
    assert common.fit_temperature(scale * torch.eye(4), torch.arange(4).roll(1)) == 100.0


@pytest.mark.parametrize("s", [1, 4])
def test_regression_is_that_of_the_mixture(s):
    generator = np.random.default_rng(0)
    m = generator.normal(size=20) + generator.normal(size=(s, 20))
    v = generator.random((s, 20)) + 0.05
    y = m.mean(0) + 1.2 * generator.normal(size=20)
    moments = common.mixture_moments(torch.tensor(m), torch.tensor(v))
    expected = {"mean": m.mean(0), "total": (v + m**2).mean(0) - m.mean(0)**2,
                "aleatoric": v.mean(0), "epistemic": m.var(0)}
    for name, value in expected.items():
        assert np.allclose(moments[name], value, atol=1e-12), name
    levels = np.linspace(0.01, 0.99, 20)
    is_below = stats.norm.cdf(y, m, np.sqrt(v)).mean(0) <= levels[:, None]
    assert common.regression_metrics(*map(torch.tensor, (m, v, y))) == pytest.approx({
        "lpd": np.log(stats.norm.pdf(y, m, np.sqrt(v)).mean(0)).mean(),
        "mae": sk.mean_absolute_error(y, m.mean(0)),
        "rmse": sk.root_mean_squared_error(y, m.mean(0)),
        "quantile_ece": np.abs(is_below.mean(1) - levels).mean()}, abs=1e-12)


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
    assert args.run_dir == tmp_path / "x" / "digits-small-seed1"
    args = parse(tmp_path, "--dataset", "folder:some/images", "--lr", "0.5", "--seed", "4")
    assert (args.lr, args.epochs, args.run_dir.name) == (0.5, 7, "images-large-seed4")


@pytest.mark.parametrize("option, names", [("--dataset", "digits, folder"),
                                           ("--model", "small, large, torchvision/NAME")])
def test_unknown_names_are_one_line(option, names, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(tmp_path, option, "x")
    assert capsys.readouterr().err.endswith(f"error: {option} x: choose one of {names}\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_after_an_equals_sign_gets_the_same_recipe(script):
    parse_args = importlib.import_module(script).parse_args
    args = parse_args(["--device", "cpu", "--model", "torchvision/resnet18"])
    assert args == parse_args(["--device", "cpu", "--model=torchvision/resnet18"])
    assert args.lr != parse_args(["--device", "cpu"]).lr


def test_eval_restores_the_options_of_the_last_command_that_may_train(tmp_path):
    train(tmp_path, "--lr", 0.5, "--no-smooth", "--methods", "b", "c", "--ood", "folder:x",
          "--predict", "new", "--no-plot", "--fresh")
    args = parse(tmp_path, "--eval")
    assert (args.lr, args.smooth, args.methods, args.ood) == (0.5, False, ["b", "c"], ["folder:x"])
    assert args.predict is None and args.plot and not args.fresh and parse(tmp_path).lr == 0.25
    typed = train(tmp_path, "--eval", "--methods", "a", "--ood", "--predict", "new").args
    assert (typed.methods, typed.ood, typed.predict) == (["a"], [], "new")
    assert parse(tmp_path, "--eval") == args  # that command has replaced none


def torchvision_network(weights="none", num_classes=5, name="shufflenet_v2_x0_5", image_size=None):
    """A network as the scripts build it from --model torchvision/NAME."""
    args = Namespace(dataset="folder:x", model=f"torchvision/{name}", weights=str(weights),
                     image_size=image_size)
    net = nn.Sequential()
    net.backbone, net.head, net.is_trained = common.torchvision_network(args, num_classes)
    return net


def logits(net):
    return net.eval()(torch.linspace(-9, 9, 2 * 3 * 32 * 32).sin().view(2, 3, 32, 32)).detach()


def prefixed(prefix, net):
    return {prefix + name: value for name, value in net.state_dict().items()}


def without_counters(net):
    state = net.state_dict()
    return {name: state[name] for name in state if not name.endswith("num_batches_tracked")}


@pytest.mark.parametrize("content", [
    nn.Module.state_dict,
    lambda net: prefixed("_orig_mod.", net),                              # torch.compile
    lambda net: nn.DataParallel(net).state_dict(),
    lambda net: torch.optim.swa_utils.AveragedModel(net).state_dict(),
    lambda net: {"epoch": 3, "state_dict": prefixed("net.", net)},        # Lightning
    lambda net: {"state_dict": prefixed("model.module._orig_mod.", net)},
    lambda net: {"state_dict": prefixed("net.", net) | {"criterion.weight": torch.ones(5)}},
    lambda net: {"model_state_dict": net.state_dict(), "epoch": 3},
    without_counters,
    lambda net: nn.Sequential(net, nn.Softmax(1)).state_dict()])          # names begin with "0."
def test_a_state_dict_loads_as_people_have_it(content, tmp_path, capsys):
    net = models.mobilenet_v3_small(num_classes=5)  # its head is classifier.3
    torch.save(content(net), tmp_path / "net.pt")
    ours = torchvision_network(tmp_path / "net.pt", name="mobilenet_v3_small")
    assert torch.equal(logits(ours), logits(net))
    assert ours.is_trained
    assert ("not used: criterion.weight" in capsys.readouterr().out) == ("criterion" in str(
        torch.load(tmp_path / "net.pt").get("state_dict", {}).keys()))
    # The same for networks of the scripts, where some names begin with a prefix.
    torch.save(content(ours), tmp_path / "ours.pt")
    other = torchvision_network(name="mobilenet_v3_small")
    assert common.load_weights(other, tmp_path / "ours.pt")
    assert torch.equal(logits(other), logits(net))
    for path in ("DEFAULT", "none"):  # these change nothing
        assert not common.load_weights(other, path)
        assert torch.equal(logits(other), logits(net))


def test_a_sequential_network_is_no_ensemble_and_a_head_may_have_no_bias(tmp_path, capsys):
    layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    net = nn.Sequential()
    net.backbone, net.head = layers, nn.Linear(3, 2)
    state = {f"0.{name}": value for name, value in layers.state_dict().items()}
    state["1.weight"] = torch.ones(2, 3)
    torch.save(state, tmp_path / "sequential.pt")
    with pytest.raises(UserError, match="has no .*backbone.0.weight"):
        common.load_weights(net, tmp_path / "sequential.pt")
    state = net.state_dict() | {"head.weight": torch.ones(2, 3)}
    del state["head.bias"]
    torch.save(state, tmp_path / "no_bias.pt")
    assert common.load_weights(net, tmp_path / "no_bias.pt")
    assert net.head.weight.tolist() == torch.ones(2, 3).tolist()
    assert net.head.bias.tolist() == [0, 0]
    assert capsys.readouterr().out == ""


def test_a_head_for_other_classes_is_not_loaded_and_an_ensemble_gives_its_first(tmp_path, capsys):
    path = tmp_path / "net.pt"
    nets = nn.ModuleList(torchvision_network() for _ in range(2))
    for whole in (nets[0], nets):
        torch.save({"net": whole.state_dict(), "history": [{"loss": 1.0}]}, path)
        assert torch.equal(logits(torchvision_network(path)), logits(nets[0]))
    assert "an ensemble of forde.py, of which the first member is used" in capsys.readouterr().out
    net = torchvision_network(path, 9)
    assert net.head.weight.shape == (9, 1024)
    assert not net.is_trained
    assert torch.equal(net.backbone.conv5[0].weight, nets[0].backbone.conv5[0].weight)
    assert "a new last layer for 9 classes" in capsys.readouterr().out


@pytest.mark.parametrize("name, image_size, words", [
    ("resnet", None, "Unknown model"), ("squeezenet1_0", None, "not a classifier with one linear"),
    ("googlenet", None, "not a classifier with one linear"), ("vit_b_16", 64, "Wrong image height"),
    ("fasterrcnn_resnet50_fpn", 64, "")])
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_networks_of_torchvision_that_cannot_work_are_one_line(name, image_size, words):
    with pytest.raises(UserError, match=f"--model torchvision/{name}.*{words}"):
        torchvision_network(name=name, image_size=image_size)


def test_the_trial_of_a_network_leaves_it_as_it_was():
    torch.manual_seed(0)
    net = models.mobilenet_v3_small()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    number = torch.rand(())
    torch.manual_seed(0)
    models.mobilenet_v3_small()
    assert common.try_network(net, 32).shape == (2, 1000)
    assert torch.rand(()) == number
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_only_imagenet_has_the_classes_of_pretrained_networks(monkeypatch):
    """Another data set of 1,000 classes needs a last layer of its own."""
    net = models.resnet18()
    monkeypatch.setattr(common.models, "get_model", lambda name, weights: copy.deepcopy(net))
    args = Namespace(dataset="numbers", model="torchvision/resnet18", weights="DEFAULT",
                     image_size=32)
    _, head, is_trained = common.torchvision_network(args, 1000)
    assert not is_trained
    assert not torch.equal(head.weight, net.fc.weight)
    args.dataset = "imagenet"
    _, head, is_trained = common.torchvision_network(args, 1000)
    assert is_trained
    assert torch.equal(head.weight, net.fc.weight)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_a_fitted_head_is_the_logistic_regression_of_scikit_learn(num_classes):
    torch.manual_seed(0)
    x = 3 * torch.randn(200, 8).relu()
    labels = (x[:, :num_classes] + torch.randn(200, num_classes)).argmax(1)
    head = nn.Linear(8, num_classes)
    common.fit_head(head, x, labels)
    # For two classes, scikit-learn has one vector of weights, w_2 - w_1, with half of the penalty.
    theirs = LogisticRegression(C=2 if num_classes == 2 else 1, tol=1e-10, max_iter=10_000)
    theirs.fit(x.double().numpy(), labels.numpy())
    expected = theirs.predict_proba(x.double().numpy())
    assert np.allclose(head(x).softmax(1).detach(), expected, atol=1e-4)


@pytest.mark.parametrize("content, words", [
    (models.resnet18(num_classes=5).state_dict(), ["conv1.0.weight", "bn1.weight"]),
    (models.shufflenet_v2_x1_0(num_classes=5).state_dict(), ["size mismatch for conv5.0.weight"]),
    (models.shufflenet_v2_x0_5(num_classes=5).state_dict() | {"stage2.9.weight": torch.ones(1)},
     ["which has no ['stage2.9.weight']"]),
    (torch.ones(3), []), ([1, 2], [])], ids=["names", "sizes", "larger", "tensor", "list"])
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
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    content = len(header).to_bytes(8, "little") + header + np.ones(2, dtype="<f4").tobytes()
    (tmp_path / "net.safetensors").write_bytes(content)
    words = {"pickled network": "", "cut": "", "text": "", "absent": ""}
    if importlib.util.find_spec("safetensors"):
        assert common.load(tmp_path / "net.safetensors")["w"].tolist() == [1, 1]
    else:
        words["net.safetensors"] = ".*safetensors"
    for name, word in words.items():
        with pytest.raises(UserError, match=f"{name} cannot be read: {word}") as error:
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


def train_and_die(folder):
    """Killed while the second checkpoint takes the place of the first."""
    replace = os.replace

    def kill(old, new):
        if new.name == "net.pt" and new.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new)

    os.replace = kill
    train(folder)


def test_a_killed_run_resumes_with_equal_weights(tmp_path):
    whole = train(tmp_path / "whole").dir / "net.pt"
    assert Child(tmp_path, train_and_die, tmp_path).wait() == -signal.SIGKILL
    cut = tmp_path / "x" / "digits-small-seed1" / "net.pt"
    assert len(common.load(cut)["history"]) == 1
    train(tmp_path)
    assert_equal_checkpoints(cut, whole)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_divergence_keeps_the_checkpoint_before_and_eval_needs_all_epochs(loss, tmp_path):
    with pytest.raises(UserError, match="digits-small-seed1 has no run; train it first"):
        train(tmp_path, "--eval")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="net: training diverged in epoch 2; .* learning rate"):
        train(tmp_path, second_loss=loss)
    with pytest.raises(UserError, match="net.pt has 1 of 3 epochs; train without --eval"):
        train(tmp_path, "--eval")
    train(tmp_path, "--eval", "--epochs", 0, "--name", "pretrained")  # has nothing to train


@pytest.mark.parametrize("mode", [[], ["--eval"]])
def test_only_other_training_options_data_and_weights_are_refused(mode, tmp_path):
    own, other = tmp_path / "own.pt", REPO / "LICENSE"  # any file will do
    argv = ["--no-smooth", "--weights", own]
    for text, files, options, dataset, words in [
            ("a", [other], [], "d", None), ("a", [other], [], "e", r"data d \(not e"),
            ("a", [other], ["--lr", 0.5, "--smooth"], "d", r"lr 0.25 \(not 0.5\), smooth False"),
            ("b", [other], [], "d", rf"content of {own} \w+ \(not \w"),
            ("a", [], [], "d", rf"content of {other} \w+ \(not None"),
            ("a", [other, __file__], [], "d", rf"content of {__file__} None \(not \w"),
            ("a", [other], [*mode, "--methods", "b", "--runs", 4, "--workers", 0], "d", None)]:
        own.write_text(text)
        if words is None:
            train(tmp_path, *argv, *options, dataset=dataset, files=files)
            continue
        with pytest.raises(UserError, match=rf"made with {words}.*\); use another --name, or"):
            train(tmp_path, *argv, *mode, *options, dataset=dataset, files=files)


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
    run = train(tmp_path, "--no-plot")
    images = data.ImageSet("new", torch.zeros(2, 1, 4, 4), torch.tensor([1, -1]), 3, (0,), (1,),
                           files=("a.png", "b\udcff.png"), unreadable=("c.png",))
    log_probs = torch.eye(3)[[1, 0]].log()
    energies = {"energy": torch.tensor([-11234.567891, 0.1], dtype=torch.float64)}
    for classes, names in ((("cat", "dog", "cow"), ["dog", "cat"]), ((), ["1", "0"])):
        columns = common.class_columns(log_probs, classes)
        run.write_predictions(images, classes, {"DDU": columns, "llla": energies})
        # A file name that is not UTF-8 keeps its bytes.
        assert (run.dir / "predictions.csv").read_bytes().splitlines() == [
            b"file,label,predicted,confidence,energy_llla",
            f"a.png,{names[0]},{names[0]},1,-11234.56789".encode(),
            b"b\xff.png,," + names[1].encode() + b",1,0.1", b"c.png,,,,"]
    assert "1 images could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("score, first", [("log_density", [0, 1]), ("total", [9, 8])])
def test_the_picture_of_predictions_begins_with_what_is_known_least(score, first, tmp_path):
    run = train(tmp_path)
    figures = []
    run.save_figure = lambda figure, name: figures.append((figure, name))
    grey = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    images = data.ImageSet("new", grey, torch.zeros(10).long(), 3, (0,), (1,))
    columns = {"predicted": [f"class {row}" for row in range(10)],
               score: torch.arange(10, dtype=torch.float64)}
    run.write_predictions(images, (), {"method": columns})
    [(figure, name)] = figures
    assert name == "predictions.png"
    titles = [axis.get_title() for axis in figure.axes]
    least, best = titles[:12], titles[12:]
    assert [title for title in least if title][:2] == [f"class {row}\n{row}" for row in first]
    assert len([title for title in best if title]) == 5
    assert figure.axes[0].images[0].get_array()[0, 0].tolist() == [first[0]] * 3


def row(seeds, accuracy, **others):
    return {"method": "m", "seeds": seeds, "set": "t", "n": 10, "accuracy": accuracy} | others


def test_pool_counts_equal_rows_once_and_needs_independent_seeds_for_an_error():
    rows = [row([1], 0.9), row([2], 0.8), row([2], 0.8), row([3], 0.4)]
    [line] = common.pool(rows, ["accuracy", "nll"])
    assert line["accuracy"] == f"0.7 ± {stats.sem([0.9, 0.8, 0.4]):.2g}"
    assert line["rows"] == 3
    assert "nll" not in line
    for seeds, text in [(([1, 2], [3]), "0.6 ± 0.1"), (([1, 2], [2]), "0.6"), (([], []), "0.6")]:
        [line] = common.pool([row(seeds[0], 0.5), row(seeds[1], 0.7)], ["accuracy"])
        assert line["accuracy"] == text
        assert line["rows"] == 2
    for key in ("run", "method", "k", "set", "against", "n"):  # these are not pooled
        assert len(common.pool([row([1], 0.5), row([2], 0.7) | {key: 3}], ["accuracy"])) == 2


def test_a_metric_that_one_row_lacks_stays_empty():
    rows = [row([1], 0.9, prr=None), row([2], 0.8, prr=0.5), row([3], 0.7, prr=0.3)]
    [line] = common.pool(rows, ["accuracy", "prr"])
    assert line["accuracy"].startswith("0.8 ±")
    assert "prr" not in line


def print_without_a_reader(*argv):
    """python common.py ARGV | true"""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.argv = ["common.py", *argv]
    runpy.run_path(str(REPO / "common.py"), run_name="__main__")


def test_common_as_a_program_pools_what_runs_report(tmp_path, capsys):
    for seed in (9, 10):
        run = train(tmp_path, "--seed", seed)
        rows = [row([seed, 2 * seed], seed / 100, nll=0.25), row([seed], None, against="o_d")]
        assert run.report(rows, ["accuracy"], curve=[1]) == rows
    table = capsys.readouterr().out.split("\n\n")[-2]
    assert table == "method  set  n   rows  accuracy\nm       t    10  1     0.1"
    content = json.loads((run.dir / "results.json").read_text())
    settings = content.pop("settings")
    assert settings.items() >= {"lr": 0.25, "methods": ["a"], "test_set": "test"}.items()
    assert "seed" not in settings
    assert content == {"script": "x", "columns": ["accuracy"], "rows": rows, "curve": [1]}
    assert (run.dir / "results.csv").read_text() == (
        "method,seeds,set,n,accuracy,nll,against\nm,10 20,t,10,0.1,0.25,\nm,10,t,10,,,o_d\n")
    folders = [str(run.dir), str(run.dir).replace("seed10", "seed9"), str(tmp_path / "unfinished")]
    common.main(folders)
    out, err = capsys.readouterr()
    assert err == f"skipped: {tmp_path}/unfinished has no results.json\n"
    assert out == ("\nrun             method  set  n   rows  accuracy\n"
                   "x/digits-small  m       t    10  2     0.095 ± 0.005\n"
                   "\nrun             method  set  against  n   rows\n"
                   "x/digits-small  m       t    o_d      10  2\n")
    common.main([*folders, "--metrics", "nll", "--latex"])
    single, pairs = capsys.readouterr().out.split("\n\n")
    assert r"x/digits-small & m & t & 10 & 2 & 0.25 $\pm$ 0 \\" in single
    assert r"o\_d" in pairs
    child = Child(tmp_path, print_without_a_reader, str(run.dir))
    assert child.wait() == -signal.SIGPIPE and child.err.read_text() == ""


@pytest.mark.parametrize("option, text", [
    (["--lr", 0.5], "lr 0.5"), (["--methods", "b"], "methods ['b']")])
def test_runs_of_other_settings_get_lines_that_name_the_difference(option, text, tmp_path, capsys):
    folders = []
    for seed, more in ((1, []), (2, []), (3, option)):
        run = train(tmp_path, "--seed", seed, *more)
        run.report([row([seed], seed / 10)], ["accuracy"])
        folders.append(str(run.dir))
    capsys.readouterr()
    common.main(folders)
    _, first, second = capsys.readouterr().out.strip().splitlines()
    assert first.endswith("2     0.15 ± 0.05")
    assert second.startswith(f"x/digits-small, {text} ")
    assert second.endswith("1     0.3")


def test_results_are_json_and_latex_has_no_signs_of_its_own(tmp_path, capsys):
    run = train(tmp_path)
    run.report([row([1], 0.5, nll=math.inf, method="a & b #1")], ["accuracy", "nll"])
    assert "inf" in capsys.readouterr().out
    text = (run.dir / "results.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["rows"][0]["nll"] is None
    assert common.latex_cell("a_b & c #1, 5 %: inf ± 0") == (
        r"a\_b \& c \#1, 5 \%: $\infty$ $\pm$ 0")


def test_a_network_that_is_not_finite_is_not_saved(tmp_path):
    run = train(tmp_path)
    nn.init.constant_(run.net[0].weight, math.nan)
    with pytest.raises(UserError, match="training diverged in epoch 1; use a lower learning rate"):
        run.save("net", [{"epoch": 1, "loss": 0.5}], net=run.net)
    assert len(common.load(run.dir / "net.pt")["history"]) == 3


def test_eval_computes_nothing_that_was_not_saved(tmp_path):
    train(tmp_path).cached("posterior", lambda: {"samples": torch.ones(2)})
    run = train(tmp_path, "--eval")
    assert run.cached("posterior", dict)["samples"].tolist() == [1, 1]
    with pytest.raises(UserError, match="other.pt is missing; run without --eval"):
        run.cached("other", dict)


def test_workers_are_at_most_the_cores(tmp_path):
    assert parse(tmp_path, "--workers", 1000).workers == len(os.sched_getaffinity(0))
    assert parse(tmp_path, "--workers", 0).workers == 0


def test_seeds_of_similar_keys_differ_and_seed_everything():
    keys = [*np.ndindex(7, 7, 7), (), (0,), (0, 0), (1,), (1, 0), (2**40,)]
    seeds = {common.derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and min(seeds) >= 0 and max(seeds) < 2**63
    drawn = []
    for key in ((3, 1), (3, 1), (3, 2)):
        common.seed_all(*key)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


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
    assert main["rows"]["value"].tolist() == [0, 2, 4, 6, 8] and other["rows"] is None
    for result in (main, other):
        assert result["sum"].tolist() == [3, 3] and result["cached"] == {"rank": 0}
        assert result["is_downloaded"]
    saved = common.load(tmp_path / "x" / "digits-small-seed1" / "net.pt")["net"]
    for name, value in main["net"].items():
        assert torch.equal(value, saved[name])
        # Each process had other images: running averages are shared all the same.
        is_buffer = name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")
        assert torch.equal(value, other["net"][name]) == is_buffer, name
    assert "epoch 3" in (tmp_path / "0.out").read_text() and not (tmp_path / "1.out").read_text()
