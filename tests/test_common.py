"""The run layer of common.py: options, processes, files, runs, tables, signals; and the README."""

import contextlib
import csv
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (CPU, REPO, SCRIPTS, Child, assert_same_checkpoints, free_port, snapshot,
                      start_ranks, strict_json, wait_for)
from scipy.stats import entropy, sem
from torch import nn

import common
from common import UserError

# ---- Options ------------------------------------------------------------------------------------

PRESETS = {"": dict(epochs=3, batch_size=32, lr=0.5), "main": dict(taste="sweet", lr=0.25),
           "other": dict(epochs=9), "cifar10": dict(taste="cold")}


def parse(*argv, **defaults):
    parser = common.Parser("One line.\n\nMore.", PRESETS, "main")
    parser.group("method")("--taste", default="none", help="of it (paper: bitter)")
    parser.group("evaluation")("--measure", type=common.between(0, 1), default=0.5, help="how far")
    return parser.parse([*argv, *CPU], **defaults)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_presets_are_defaults_and_do_not_leak_into_each_other():
    args = parse()
    assert (args.dataset, args.epochs, args.lr, args.taste) == ("main", 3, 0.25, "sweet")
    args = parse("--dataset", "other")  # nothing of the default data set's preset
    assert (args.epochs, args.lr, args.taste) == (9, 0.5, "none")
    args = parse("--dataset", "other", "-e", "0", "-b", "5", "--lr", "0", "--no-plot", "--compile")
    assert (args.epochs, args.batch_size, args.lr) == (0, 5, 0.0)  # 0 is a value, not an absence
    assert args.plot is False and args.compile is True
    assert set(args.explicit) == {"dataset", "epochs", "batch_size", "lr", "plot", "compile",
                                  "device"}
    args = parse(epochs=7)  # a script's own defaults win over presets, the command line over both
    assert (args.epochs, parse("-e", "1", epochs=7).epochs) == (7, 1)
    assert parse("--dataset", "folder:/some/where").taste == "cold"
    args = parse("--dataset", "folder:/some/where", "--preset", "other")
    assert (args.taste, args.epochs, args.dataset) == ("none", 9, "folder:/some/where")


def test_what_differs_is_printed_with_threads_and_help_shows_the_presets_values(capsys):
    parse("--dataset", "other", "--measure", "0.25")
    [line] = capsys.readouterr().out.splitlines()
    for word in ("dataset other", "epochs 9", "measure 0.25", "1 threads", "1 process"):
        assert word in line
    assert "batch_size" not in line and "data_dir" not in line
    parse("--dataset", "folder:/x", "--preset", "other")
    assert capsys.readouterr().out.count("preset other") == 1
    with pytest.raises(SystemExit):
        parse("--dataset", "other", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "training set (9)" in text and "augmentation (1)" in text and "paper" in text
    assert "matplotlib) (on)" in text and "compile the network (off)" in text
    for flag in ("--dataset --preset --image-size --width --seed --epochs --batch-size --lr --amp "
                 "--limit-steps --runs --predict --data-dir --out-dir --name --device --workers "
                 "--compile --no-compile --eval --fresh --plot --no-plot --taste").split():
        assert flag in text, flag


@pytest.mark.parametrize("argv, named", [
    ("--epochs many", "--epochs"), ("--epochs -1", "--epochs"), ("-b 0", "--batch-size"),
    ("--lr -0.1", "--lr"), ("--lr nan", "--lr"), ("--lr inf", "--lr"), ("--width 0", "--width"),
    ("--width 1000000", "--width"), ("--limit-steps 0", "--limit-steps"), ("--seed -1", "--seed"),
    ("--seed 1.5", "--seed"), (f"--seed {2**31}", "--seed"), ("--runs 0", "--runs"),
    ("--amp fp8", "--amp"), ("--image-size 5000", "--image-size"), ("--workers -1", "--workers"),
    ("--nonsense", "--nonsense"), ("--lr", "--lr"), ("extra", "extra"), ("--ep 3", "--ep"),
    ("--dataset nonsense", "nonsense"), ("--preset nonsense", "nonsense"), ("--dataset", "dataset"),
    ("--measure 1.1", "--measure"), ("--eval --fresh", "--fresh"), (f"-e {10**400}", "--epochs")])
def test_bad_options_are_refused_by_name(argv, named):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    assert named in one_line(error)


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99", ""])
def test_devices_that_are_not_there(device):
    with pytest.raises(UserError, match=f"--device {device}"):
        common.start(device)


def test_launch_hides_no_programming_error():
    with pytest.raises(ZeroDivisionError):
        common.launch(lambda: 1 / 0)


# ---- Processes ----------------------------------------------------------------------------------


def test_derive_seed_mixes_and_seed_all_seeds_everything():
    seeds = [common.derive_seed(s, e, t) for s in range(9) for e in range(9) for t in range(9)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)

    def draw(*key):
        common.seed_all(*key)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw(3, 1) == draw(3, 1)
    assert all(a != b for a, b in zip(draw(3, 1), draw(3, 2)))


SHARDS = [(4, 3), (5, 0), (1, 6)]


def in_collectives(folder):
    common.start("cpu")
    rank = common.rank()
    found = {"rank": (rank, common.world_size(), common.is_main())}

    def prepare():
        if rank == 0:
            time.sleep(0.2)
            (folder / "made").touch()
        return (folder / "made").exists()

    found["first"] = common.main_first(prepare)
    found["sum"] = common.all_reduce(torch.tensor(float(rank + 1))).item()
    found["main's"] = common.broadcast({"a": torch.arange(3), "b": f"from {rank}"})
    found["all"] = common.gather_objects(10 * rank)
    with common.alone():
        with common.alone():
            pass
        found["alone"] = (common.rank(), common.world_size(), common.gather_objects(rank),
                          common.all_reduce(torch.tensor(rank)).item())
    run = make_run(folder / str(rank))  # machines need not share a disk
    run.save("piece", value=rank)
    found["piece"] = run.load("piece")["value"]
    make_run(folder / str(rank), "--eval")
    found["rows"], found["wrong"] = [], []
    for sizes in SHARDS:
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0))
        mine = order.split(sizes)[rank]
        rows = torch.stack([mine * 2.0, mine * 3.0], 1).t().contiguous().t()  # strided
        found["rows"].append(common.gather_rows(mine, rows, mine.int()))
    for wrong in (torch.tensor([0, 1]), torch.tensor([0, 1]) + 3 * rank):  # twice; missing
        try:
            found["wrong"].append(common.gather_rows(wrong, wrong))
        except RuntimeError as error:
            found["wrong"].append(str(error))
    dist.destroy_process_group()
    return found


def test_collectives_of_two_processes(ranks, tmp_path):
    main, other = ranks(in_collectives, tmp_path)
    assert main["rank"] == (0, 2, True) and other["rank"] == (1, 2, False)
    for r, found in enumerate((main, other)):
        assert found["first"] and found["sum"] == 3 and found["all"] == [0, 10]
        assert found["main's"]["b"] == "from 0" and found["main's"]["a"].tolist() == [0, 1, 2]
        assert found["alone"] == (0, 1, [r], r) and found["piece"] == 0
    for sizes, (rows, index) in zip(SHARDS, main["rows"]):
        n = torch.arange(float(sum(sizes)))
        assert torch.equal(rows, torch.stack([2 * n, 3 * n], 1)) and torch.equal(index, n.int())
    assert other["rows"] == [None] * 3 and other["wrong"] == [None] * 2
    assert all("missing or came twice" in text for text in main["wrong"])


def batch_norm_derivatives(rows, wrap=lambda layer: None):
    """Of the rows of a float64 batch far from zero mean, after two training forwards: output, first
    and second gradients, running statistics, output in eval mode."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(7, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x, w, layer = 5 + 3 * x[rows], w[rows], nn.BatchNorm2d(3, 1e-3, 0.2, dtype=torch.float64)
    nn.init.uniform_(layer.weight, -1, 2, generator)
    nn.init.uniform_(layer.bias, generator=generator)
    wrap(layer)
    layer(x + 1)
    y = layer(x.requires_grad_())
    first = torch.autograd.grad((y.tanh() * w).sum(), [x, layer.weight, layer.bias],
                                create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() / 2, [x, layer.weight])
    statistics = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    return [t.detach() for t in (y, *first, *second, *statistics, layer.eval()(x))]


NARROW = torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(6)).bfloat16() + 3


def in_batch_norm(cuts):
    device, results, layer = common.start("cpu"), [], common.GlobalBatchNorm2d(3)

    def wrap(layer):
        net = common.data_parallel(nn.Sequential(nn.Conv2d(1, 1, 1), layer), device)
        assert isinstance(net, nn.parallel.DistributedDataParallel)
        assert type(layer) is common.GlobalBatchNorm2d and len(layer.state_dict()) == 5

    for cut in cuts:
        rows = slice(0, cut) if common.rank() == 0 else slice(cut, None)
        results.append(batch_norm_derivatives(rows, wrap))
    results.append([layer(NARROW[rows]).detach(), layer.running_mean, layer.running_var])
    dist.destroy_process_group()
    return results


def test_global_batch_norm_equals_batch_norm_of_the_whole_batch(ranks):
    whole = batch_norm_derivatives(slice(None))
    close = dict(rtol=1e-9, atol=1e-11)
    *wide, narrow = zip(*ranks(in_batch_norm, (7, 3)))
    for a, b in wide:  # first: no row is the second process's
        for i in (0, 1, 4, 9):  # y, dx, ddx, eval y: rows of the batch
            assert torch.allclose(torch.cat([a[i], b[i]]), whole[i], **close), i
        for i in (2, 3, 5):  # of the affine map: each process's share
            assert torch.allclose(a[i] + b[i], whole[i], **close), i
        for i in (6, 7, 8):
            assert torch.allclose(a[i], whole[i], **close) and torch.equal(a[i], b[i]), i
    layer, (y, *statistics) = nn.BatchNorm2d(3), narrow[0]
    want = layer(NARROW.float()).bfloat16()
    assert torch.allclose(torch.cat([y, narrow[1][0]]), want, rtol=0.01)
    assert all(map(torch.allclose, statistics, (layer.running_mean, layer.running_var)))


# ---- Files --------------------------------------------------------------------------------------


def test_write_is_whole_or_nothing_and_synced_before_the_rename(tmp_path, monkeypatch):
    path, calls, fsync, replace = tmp_path / "x", [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda n: calls.append("fsync") or fsync(n))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("replace") or replace(a, b))
    common.write(path, "old")
    assert calls == ["fsync", "replace"] and path.read_text() == "old"

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):  # a disk that fills up
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(UserError) as error:
                common.write(path, "new")
            assert "No space left" in one_line(error) and str(path) in str(error.value)
    for place in (tmp_path / "absent" / "x", path / "below a file", tmp_path):
        for check in (lambda: common.write(place, "new"), lambda: common.check_writable(place)):
            with pytest.raises(UserError, match="cannot write"):
                check()
    common.check_writable(tmp_path / "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def checkpoint(path):
    """A file with tensors of several types; (its bytes, its content)."""
    state = {"config": {"a": 1, "b": [1, "x", None], "c": True}, "t": torch.arange(3),
             "net": {"w": torch.randn(40, 5), "half": torch.ones(7).bfloat16()}, "f": 0.5}
    common.write(path, common.to_bytes(state))
    return path.read_bytes(), state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_a_flipped_byte_in_any_record_is_found(tmp_path):
    path = tmp_path / "last.pt"
    whole, state = checkpoint(path)
    assert same(common.load_checkpoint(path), state)
    data = set()
    for record in zipfile.ZipFile(io.BytesIO(whole)).infolist():
        head = record.header_offset
        names = sum(int.from_bytes(whole[head + k:head + k + 2], "little") for k in (26, 28))
        start = head + 30 + names
        data |= {start, start + record.file_size // 2, start + record.file_size - 1}
    assert len(data) > 12  # the pickle, the tensors, versions
    for place in data.union(range(0, len(whole), 37)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1:])
        with contextlib.suppress(UserError):
            assert same(common.load_checkpoint(path), state)  # padding, or a date
            assert place not in data


class Hostile:
    """Unpickling this would make a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    folder, trap = tmp_path / "files", tmp_path / "trap"
    (folder / "directory").mkdir(parents=True)
    whole, _ = checkpoint(folder / "cut")
    torch.save({"config": {}, "x": Hostile(trap)}, folder / "hostile")
    torch.save([1, 2], folder / "list")
    (folder / "cut").write_bytes(whole[:len(whole) // 2])
    (folder / "empty").touch()
    (folder / "text").write_text("not a checkpoint\nat all\n")
    for path in (*folder.iterdir(), folder / "absent"):
        with pytest.raises(UserError) as error:
            common.load_checkpoint(path)
        assert str(path) in one_line(error) and "weights_only" not in str(error.value)
    assert not trap.exists()
    torch.load(folder / "hostile", weights_only=False)  # the trap does work
    assert trap.exists()


def test_load_arrays(tmp_path):
    path = tmp_path / "x.npz"
    common.save_arrays(path, a=torch.arange(3.0), b=np.ones((2, 2)))
    arrays = common.load_arrays(path, ("a", "b"))
    assert arrays["a"].tolist() == [0, 1, 2] and arrays["b"].shape == (2, 2)
    hostile = tmp_path / "hostile.npz"
    np.savez(hostile, a=np.array([Hostile(tmp_path / "trap")], dtype=object))
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:100])
    for name, names, text in (("x", "ac", "no array 'c'; it needs a, c"), ("y", "a", "no file"),
                              ("cut", "a", "not a readable"), ("hostile", "a", "not a readable")):
        with pytest.raises(UserError, match=text):
            common.load_arrays(tmp_path / f"{name}.npz", tuple(names))
    assert not (tmp_path / "trap").exists()


def test_plain_is_strict_json():
    value = {"nan": math.nan, "list": (1, -math.inf, np.float32(0.5), np.int64(3)),
             7: torch.tensor([1.0, math.nan]), "flag": True, "np_flag": np.bool_(False),
             "path": REPO, "none": None, "array": np.array([[1, 2]]), "big": 2**60}
    back = json.loads(json.dumps(common.plain(value), allow_nan=False))
    assert back == {"nan": None, "list": [1, None, 0.5, 3], "7": [1.0, None], "flag": True,
                    "np_flag": False, "path": str(REPO), "none": None, "array": [[1, 2]],
                    "big": 2**60}
    assert back["flag"] is True and back["np_flag"] is False


# ---- Runs ---------------------------------------------------------------------------------------


def make_run(folder, *argv, name="name"):
    return common.Run(parse("--out-dir", str(folder), *argv), "x", name)


def fit(run, epochs=3, spoil=None, stop=None):
    """A small training by `run.epochs`; spoil(net, loss) before each log, stop: in that epoch."""
    common.seed_all(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in run.epochs(epochs, net=net, optimiser=optimiser):
        common.seed_all(1, epoch)
        x = torch.randn(32, 4)
        loss = (net(x)[:, 0] - x.sum(1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if epoch == stop:
            return None
        if spoil and epoch:
            loss = spoil(net, loss)
        run.log(loss, accuracy=torch.tensor(0.5), lr=0.05, examples=32)
    return net.state_dict()


def test_epochs_resume_exactly_and_leave_a_log(tmp_path, capsys):
    whole = fit(make_run(tmp_path / "whole"))
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("last ")]
    assert len(lines) == 3 and "last 1/3" in lines[0]
    for word in ("loss", "accuracy 0.5", "lr 0.05", "examples_per_s", "s left"):
        assert word in lines[0]
    for stop in (1, 2):
        assert fit(make_run(tmp_path / "cut"), stop=stop) is None
    assert not capsys.readouterr().err
    run = make_run(tmp_path / "cut")
    assert same(fit(run), whole)
    a, b = (tmp_path / k / "x" / "name" for k in ("whole", "cut"))
    assert_same_checkpoints(a / "last.pt", b / "last.pt")
    rows = [json.loads(line) for line in (b / "last.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows == common.plain(run.history)
    assert all(row["examples_per_s"] * row["seconds"] == pytest.approx(32) for row in rows)
    again, before = make_run(tmp_path / "cut"), snapshot(b)
    assert same(fit(again), whole) and snapshot(b) == before
    assert again.seconds.get("train") is None  # nothing was trained


def test_eval_needs_a_finished_run_and_may_change_how_it_is_computed(tmp_path):
    with pytest.raises(UserError, match="train first"):
        make_run(tmp_path, "--eval")
    assert not (tmp_path / "x").exists()
    fit(make_run(tmp_path), stop=2)
    with pytest.raises(UserError, match="2 of 3 epochs"):
        fit(make_run(tmp_path, "--eval"))
    whole = fit(make_run(tmp_path))
    free = "-b 7 --amp bf16 --limit-steps 2 --measure 0.1 --runs 4 --workers 0".split()
    assert same(fit(make_run(tmp_path, "--eval", *free)), whole)
    with pytest.raises(UserError, match="lr 0.25 there, 0.3 now"):
        make_run(tmp_path, "--eval", "--lr", "0.3")


def test_fresh_starts_anew_once(tmp_path):
    whole = fit(make_run(tmp_path))
    run = make_run(tmp_path, "--fresh", "--lr", "0.3")  # other options too
    assert run.load("last") is None
    assert fit(run, stop=1) is None
    assert run.load("last")["epoch"] == 1  # what it wrote itself counts
    assert same(fit(make_run(tmp_path, "--fresh")), whole)


@pytest.mark.parametrize("spoil", ["loss", "weight", "mean", "variance"])
def test_what_is_not_finite_never_replaces_a_good_checkpoint(tmp_path, spoil):
    """The running statistics, too: they are buffers, no parameters."""
    def ruin(net, loss):
        if spoil == "loss":
            return loss * math.nan
        tensor = {"weight": net[0].weight, "mean": net[1].running_mean,
                  "variance": net[1].running_var}[spoil]
        tensor.data[1] = math.nan if spoil == "weight" else math.inf
        return loss

    for _ in range(2):  # and again: nothing was lost or changed
        with pytest.raises(UserError) as error:
            fit(make_run(tmp_path), spoil=ruin)
        assert "--lr" in one_line(error) and "epoch 2" in str(error.value)
        state = common.load_checkpoint(tmp_path / "x" / "name" / "last.pt")
        assert state["epoch"] == 1 and common.all_finite(state)
    assert same(fit(make_run(tmp_path)), fit(make_run(tmp_path / "calm")))


def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "x" / "name" / "last.pt"
    fit(make_run(tmp_path))
    good = torch.load(path, weights_only=True)
    for change in ({"optimiser": None}, {"history": None}, {"config": None},
                   {"net": {"0.weight": torch.ones(2)}}):
        torch.save({k: v for k, v in {**good, **change}.items() if v is not None}, path)
        before = path.read_bytes()
        with pytest.raises(UserError) as error:
            fit(make_run(tmp_path))
        assert "last.pt" in one_line(error) and path.read_bytes() == before


def test_a_directory_belongs_to_one_set_of_options(tmp_path):
    fit(make_run(tmp_path))
    make_run(tmp_path, "--measure", "0.1", "--no-plot", "--workers", "1", "--runs", "2")
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as error:
        make_run(tmp_path, "--lr", "0.3", "--taste", "bitter", "-b", "7")
    for part in ("lr 0.25 there, 0.3 now", "taste sweet there, bitter now", "batch_size 32 there"):
        assert part in one_line(error)
    assert "seed" not in str(error.value) and snapshot(tmp_path) == before
    path = tmp_path / "x" / "name" / "options.json"
    for damage in (lambda: path.write_text("{"), lambda: path.write_text("[1]"),
                   lambda: path.unlink() or path.mkdir()):
        damage()
        with pytest.raises(UserError, match="options.json is damaged"):
            make_run(tmp_path)


def hold(folder):
    make_run(folder)
    (folder / "held").touch()
    time.sleep(300)


def test_a_directory_belongs_to_one_process_and_forgets_what_a_killed_one_left(tmp_path):
    child = Child(tmp_path, hold, tmp_path)
    wait_for(lambda: (tmp_path / "held").exists() or not child.process.is_alive(), what="run")
    for argv in ([], ["--lr", "0.3"], ["--fresh"]):
        with pytest.raises(UserError, match="in use by another process"):
            make_run(tmp_path, *argv)
    child.process.kill()
    child.process.join()
    left_over = tmp_path / "x" / "name" / ".last.pt.tmp"
    left_over.write_bytes(b"half a checkpoint")
    make_run(tmp_path)
    assert not left_over.exists()


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "..", ".", "nul\0byte", "x" * 300])
def test_a_name_is_one_part_of_a_path(tmp_path, name):
    with pytest.raises(UserError, match="--name") as error:
        make_run(tmp_path / "out", "--name", name)
    assert "\0" not in one_line(error) and not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "y" / "x" / "name" / ".last.pt.tmp").mkdir(parents=True)
    for place in ("file", "x" * 300, "y"):
        with pytest.raises(UserError, match="cannot write"):
            make_run(tmp_path / place)
    assert (tmp_path / "file").read_text() == "kept"
    assert make_run(tmp_path, name="folder:/a b/ü").dir.parent == tmp_path / "x"


def test_pieces_have_their_own_identity(tmp_path):
    run = make_run(tmp_path)
    assert run.load("fit") is None
    run.save("fit", {"samples": 3}, mean=torch.ones(2))
    assert torch.equal(make_run(tmp_path).load("fit", {"samples": 3})["mean"], torch.ones(2))
    with pytest.raises(UserError, match="samples 3 there, 4 now"):
        make_run(tmp_path).load("fit", {"samples": 4})


# ---- Rows, reports, tables ----------------------------------------------------------------------


def rows_of(seeds, shift=0.0):
    rng = np.random.default_rng(0)
    return [row for seed in seeds for a in [rng.random(2) + shift] for row in (
        {"method": "DDU", "seed": seed, "set": "t", "n": 10, "accuracy": a[0], "nll": a[1]},
        {"method": "DDU", "seed": seed, "set": "t", "against": "o_d", "n": 10, "auroc": a[0]})]


def test_report_writes_and_prints_mean_and_standard_error(tmp_path, capsys):
    rows, run = rows_of([1, 2, 3]), make_run(tmp_path, "--measure", "0.25")
    rows[0]["odd"] = math.nan
    for _ in range(2):
        with run.clock("fit"):
            time.sleep(0.01)
    back = run.report(rows, ["accuracy", "auroc"], curve=torch.ones(2))
    content = strict_json(run.dir / "results.json")
    assert content["rows"] == back and content["curve"] == [1.0, 1.0] and back[0]["odd"] is None
    assert content["config"]["measure"] == 0.25 and content["config"]["device"] == "cpu"
    assert content["script"] == "x"
    assert 0.02 <= content["seconds"]["fit"] < content["seconds"]["total"]
    environment = content["environment"]
    assert environment["threads"] == 1 and environment["processes"] == 1
    assert environment["torch"] == torch.__version__
    memory_gb = common.device_memory(run.args.device) / 1e9
    assert 0.01 < environment["peak_memory_gb"] < memory_gb
    assert {"commit", "python", "numpy", "device"} <= environment.keys()
    with open(run.dir / "results.csv") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 6 and float(cells[0]["accuracy"]) == rows[0]["accuracy"]
    assert cells[0]["against"] == "" and cells[1]["against"] == "o_d" and cells[0]["odd"] == ""
    out = capsys.readouterr().out
    for metric, part in (("accuracy", rows[::2]), ("auroc", rows[1::2])):
        values = [row[metric] for row in part]
        assert f"{np.mean(values):.4f} ± {sem(values):.4f}" in out and metric in out
    assert "nll" not in out


def test_table_pools_seeds_of_directories_and_separates_options(tmp_path, capsys):
    values = {"0.1": [], "0.2": []}
    for lr, seed in itertools.product(values, (1, 2, 3)):
        rows = rows_of([seed], shift=seed * float(lr))
        argv = ["--seed", str(seed), "--lr", lr, *["--compile"] * (seed == 2)]  # the same numbers
        make_run(tmp_path, *argv, name=f"{lr}-{seed}").report(rows)
        values[lr].append(rows[0]["accuracy"])
    folders = [str(p) for p in sorted((tmp_path / "x").iterdir())]
    folders[0] += "/results.json"

    def table(*argv):
        capsys.readouterr()
        common.table([*folders, *argv])
        return capsys.readouterr().out.strip()

    text = {form: table("--metrics", "accuracy", "auroc", "--format", form)
            for form in ("text", "markdown", "latex", "csv")}
    for lr, v in values.items():
        for form, sign in (("text", " ± "), ("markdown", " ± "), ("latex", " $\\pm$ ")):
            [line] = [li for li in text[form].splitlines() if f"lr={lr}" in li and "o" not in li]
            assert f"{np.mean(v):.4f}{sign}{sem(v):.4f}" in line and " 3 " in line, line
        [row] = [r for r in csv.DictReader(io.StringIO(text["csv"].split("\n\n")[0]))
                 if r["run"] == f"lr={lr}"]
        assert float(row["accuracy"]) == pytest.approx(np.mean(v), rel=1e-12)
        assert float(row["accuracy_se"]) == pytest.approx(sem(v), rel=1e-9) and row["seeds"] == "3"
    assert re.fullmatch(r"[|: -]+", text["markdown"].splitlines()[1]) and r"o\_d" in text["latex"]
    assert text["latex"].count(r"\begin{tabular}") == text["latex"].count(r"\end{tabular}") == 2
    assert "nll" not in text["text"] and "nll" in table() and "seed=" not in text["text"]
    other = json.loads((tmp_path / "x" / "0.1-1" / "results.json").read_text())
    other["config"] |= {"lr": 0.3, "coeff": 3}  # what another script's runs cannot differ in
    (tmp_path / "other.json").write_text(json.dumps(other | {"script": "y"}))
    folders.append(str(tmp_path / "other.json"))
    assert {line.split("  ")[0] for line in table("--sets", "t").splitlines()[2:]} >= {
        "script=x lr=0.1", "script=x lr=0.2", "script=y lr=0.3"}
    for wrong in ("--metrics nll acuracy", "--sets t acuracy"):
        with pytest.raises(UserError, match=f"{wrong.split()[0]} acuracy: no row has it"):
            table(*wrong.split())
    (tmp_path / "no.json").write_text("{}")
    whole = table()
    common.table([*folders, str(tmp_path / "no.json")])  # one that has not ended keeps none back
    out, err = capsys.readouterr()
    assert out.strip() == whole and err.count("\n") == 1 and "left out" in err and "no.json" in err
    for wrong in (tmp_path / "absent", tmp_path, tmp_path / "no.json"):
        with pytest.raises(UserError, match="not the results of a run"):
            common.table([str(wrong)])


def test_tables_of_mixed_cells():
    header, lines = common.pool([
        {"method": "a", "seed": 1, "set": "s", "n": 3, "x": 1.5, "kind": "flat"},
        {"method": "a", "seed": 2, "set": "s", "n": 3, "x": 2.5, "kind": "flat"},
        {"method": "b", "seed": 1, "set": "s", "n": 3, "x": None, "y": 123456.7}])
    assert header == ["method", "set", "n", "seeds", "x", "kind", "y"]
    assert lines == [["a", "s", 3, 2, (2.0, 0.5), "flat", None],
                     ["b", "s", 3, 1, None, None, (123456.7, None)]]
    text = common.format_table(header, lines).splitlines()
    assert text[2].split() == ["a", "s", "3", "2", "2.0000", "±", "0.5000", "flat"]
    assert text[3].split() == ["b", "s", "3", "1", "1.2346e+05"]


class Files:
    files, labels = ("a/0.png", "b, c/1.png"), torch.tensor([1, -1])


@pytest.mark.parametrize("dataset, members", [(Files, 3), (None, 1)])
def test_predictions_are_a_line_an_example(tmp_path, dataset, members):
    log_probs = torch.randn(members, 2, 4, dtype=torch.float64).log_softmax(-1)
    common.write_predictions(tmp_path / "p.csv", dataset, log_probs if dataset else log_probs[0],
                             decision=["ood", "clean"], density=torch.tensor([1.5, -2.0]))
    with open(tmp_path / "p.csv") as file:
        rows = list(csv.DictReader(file))
    probs = log_probs.exp().numpy()
    mean, total, each = probs.mean(0), entropy(probs.mean(0), axis=1), entropy(probs, axis=2)
    expected = {"predicted": mean.argmax(1), "confidence": mean.max(1), "total": total,
                "aleatoric": each.mean(0), "epistemic": total - each.mean(0),
                "density": [1.5, -2.0]}
    for name, values in expected.items():
        assert [float(row[name]) for row in rows] == pytest.approx(list(values), abs=1e-9), name
    assert [row["decision"] for row in rows] == ["ood", "clean"]
    if dataset:
        assert [(r["file"], r["label"]) for r in rows] == [("a/0.png", "1"), ("b, c/1.png", "-1")]
    else:
        assert [r["index"] for r in rows] == ["0", "1"] and "label" not in rows[0]


# ---- Signals, platforms, pictures ---------------------------------------------------------------


def train_for_ever(folder):
    def main():
        if os.fork() == 0:  # as the processes that decode images, which Ctrl-C reaches, too
            signal.raise_signal(signal.SIGINT)
        os.wait()
        fit(make_run(folder, "-e", "1000000"), 1_000_000)

    sys.argv = ["x.py"]
    common.launch(main)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_one_line_and_128_more(tmp_path, number):
    child, path = Child(tmp_path, train_for_ever, tmp_path), tmp_path / "x" / "name" / "last.pt"
    wait_for(lambda: path.exists() or not child.process.is_alive(), what="checkpoint")
    os.kill(child.process.pid, number)
    child.wait(30)
    assert child.status == 128 + number
    assert child.stderr.count("\n") == 1 and number.name in child.stderr
    assert common.load_checkpoint(path)["epoch"] >= 1


def on_windows(folder):
    """What is missing there: POSIX modules and calls."""
    sys.modules["fcntl"] = sys.modules["resource"] = None
    for name in ("sysconf", "sysconf_names", "getuid", "fork"):
        if hasattr(os, name):
            delattr(os, name)
    module = importlib.reload(common)
    assert module.fcntl is None
    run = make_run(folder)
    fit(run)
    run.report(rows_of([1]))
    memory = module.environment(run.args.device)["peak_memory_gb"]
    return memory, module.device_memory(run.args.device)


def test_scripts_start_without_posix_modules(tmp_path):
    assert Child(tmp_path, on_windows, tmp_path).value() == (None, None)


def test_under_torchrun_an_error_is_printed_last_and_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               "--master_addr=127.0.0.1", f"--master_port={free_port()}", "ddu.py", "--dataset",
               "nonsense", "--out-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    text = done.stdout + done.stderr
    assert text.count("--dataset nonsense: choose from") == 1
    after = text.split("--dataset nonsense: choose from")[1]
    assert after.count("\n") <= 12 and "ddu.py: error" in text


def in_a_refusal(folder):
    sys.argv = ["x.py"]
    common.launch(lambda: make_run(folder, "-b", "1"))


def test_what_all_processes_see_ends_all_of_them(tmp_path):
    main, other = start_ranks(tmp_path, 2, in_a_refusal, tmp_path)
    assert main.wait(60).status == 2 and other.wait(60).status != 0
    assert "--batch-size 1 is global" in main.stderr and main.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


class Loader:
    def __len__(self):
        return 3

    def epoch(self, epoch):
        return [f"{epoch}:{i}" for i in range(3)]


def test_steps_are_limited_and_silent_off_a_terminal(capsys, tmp_path):
    run = make_run(tmp_path, "--limit-steps", "2")
    assert list(run.steps(Loader(), 5)) == [(0, "5:0"), (1, "5:1")]
    assert len(list(make_run(tmp_path / "all").steps(Loader(), 5))) == 3
    assert capsys.readouterr().err == ""


def test_pictures_need_matplotlib_and_say_so(tmp_path, monkeypatch, capsys):
    plt = common.pyplot()
    figure, axis = plt.subplots()
    axis.plot([1, 2])
    common.save_figure(plt, figure, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000 and not plt.get_fignums()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert common.pyplot() is None
    out = "".join(capsys.readouterr())
    assert out.count("\n") == 1 and "pip install matplotlib" in out


# ---- The README ---------------------------------------------------------------------------------


def readme_lines():
    """The commands of README.md: of fenced blocks (joined, chains split), and `python X.py ...`."""
    text = (REPO / "README.md").read_text()
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [part.strip() for line in "\n".join(blocks).replace("\\\n", " ").splitlines()
             for part in re.split(r"&&|;|\|", line)]
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return lines, [" ".join(span.split()) for span in spans]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_of_the_readme_and_the_docstring_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, (lines, spans) = importlib.import_module(name), readme_lines()
    pattern = rf"([A-Z_]+=\S+ )?((python|torchrun)\b.* )?{name}\.py( -|$)"
    lines = [line for line in lines + spans if re.match(pattern, line.split("#")[0].strip())]
    usage = script.__doc__.split("Usage:")[1].split("\n\n")[0].replace("\\\n", " ")
    commands = [line.strip() for line in usage.splitlines() if line.strip()]
    assert lines and len(commands) >= 2
    for line in lines + commands:  # published results rest on them
        words = shlex.split(line.replace("…", ""), comments=True)
        for file in filter(re.compile(r"[\w.]+\.(ckpt|npz)").fullmatch, words):
            (tmp_path / file).touch()  # some are looked for at once
        script.parse_args(words[words.index(f"{name}.py") + 1:])


def test_the_files_of_the_readmes_commands_exist():
    for line in readme_lines()[0]:
        for script in re.findall(r"(?:python|torchrun)\b.*?(\w+\.py)\b", line.split("#")[0]):
            assert (REPO / script).exists() or (REPO / "tests" / script).exists(), line
