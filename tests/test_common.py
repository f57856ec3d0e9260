"""The run layer of common.py: options, processes, files, runs, tables, signals; and the README."""

import argparse
import contextlib
import csv
import errno
import fcntl
import gc
import importlib
import itertools
import json
import math
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (CPU, REPO, SCRIPTS, Child, assert_same_checkpoints, free_port, refusal,
                      snapshot, start_ranks, strict_json, wait_for)
from PIL import Image
from scipy.stats import entropy, sem
from torch import nn
from torchvision import models

import common
from common import UserError

# ---- Options ------------------------------------------------------------------------------------

PRESETS = {"main": dict(taste="sweet", lr=0.25, smooth=False),
           "other": dict(epochs=9, flavours=["salt"]), "folder": dict(taste="own", epochs=20),
           "network": dict(model="torchvision/resnet50", epochs=0),
           "--model torchvision/NAME": dict(epochs=5, lr=0.01),
           "--freeze": dict(epochs=50, augment=False), "--quick-start": dict(epochs=1)}


def distance(text):
    """A number, or "auto"."""
    return text if text == "auto" else float(text)


def make_parser():
    parser = common.Parser("x", "One line.\n\nMore.", PRESETS, ["small", "big"], dataset="main",
                           model="small", epochs=3, batch_size=32, lr=0.5, augment=True)
    flag = argparse.BooleanOptionalAction
    parser.training.add_argument("--taste", default="none", help="taste (paper: bitter)")
    parser.training.add_argument("--smooth", action=flag, default=True, help="smooth it")
    parser.evaluation.add_argument("--flavours", nargs="*", default=[], help="names")
    parser.evaluation.add_argument("--measure", type=common.between(0, 1), default=0.5,
                                   help="a distance")
    parser.training.add_argument("--distance", type=distance, default="auto", help="how far")
    parser.evaluation.add_argument("--quick-start", action="store_true", help="start quickly")
    return parser


def parse(*argv, parser=None):
    parser = parser or make_parser()
    return parser.parse([*argv, *CPU], lambda args: common.run_name(args, "extra"))


def test_presets_are_defaults_and_the_command_line_wins():
    args = parse()
    assert (args.dataset, args.epochs, args.lr, args.taste) == ("main", 3, 0.25, "sweet")
    args = parse("--dataset", "other")  # nothing of the default data set's preset
    assert (args.epochs, args.lr, args.taste, args.smooth) == (9, 0.5, "none", True)
    args = parse("--dataset", "folder:/some/where/", "--preset", "other")
    assert (args.taste, args.epochs, args.dataset) == ("none", 9, "folder:/some/where")
    args = parse(*"--dataset other -e 0 --lr 0 --no-plot --compile --flavours".split())
    assert (args.epochs, args.lr) == (0, 0.0)  # 0 is a value, not an absence
    assert args.plot is False and args.compile is True and args.flavours == []
    assert args.explicit == set("dataset epochs lr plot compile flavours device".split())
    args = parse("--lr", "0.5", "--smooth")  # the parser's values, but typed
    assert (args.lr, args.smooth, args.taste) == (0.5, True, "sweet")
    assert args.explicit == {"lr", "smooth", "device"}


def test_presets_of_options_are_added_to_those_of_data_sets():
    for line, expected in [
            ("folder:/a --model torchvision/resnet18", (5, 0.01, "own", True)),
            ("folder:/a --model torchvision/resnet18 --freeze -e 2", (2, 0.01, "own", False)),
            ("folder:/a --model big --quick-start", (1, 0.5, "own", True)),
            ("network", (0, 0.5, "none", True)),  # its preset has such a network itself
            ("network --model torchvision/resnet18", (0, 0.5, "none", True))]:
        args = parse("--dataset", *line.split())
        assert (args.epochs, args.lr, args.taste, args.augment) == expected


def test_the_size_of_images_is_told_before_they_are_read():
    for line, size in [("main", None), ("main --image-size 40", 40), ("folder:/a", 32),
                       ("tiny_imagenet", 64), ("imagenet_a", 224),
                       ("main --model torchvision/resnet18", 224),
                       ("main --model torchvision/resnet18 --weights none", None),
                       ("folder:/a --model torchvision/resnet18 --weights none", 224),
                       ("folder:/a --model torchvision/inception_v3", 299)]:
        preset = ["--preset", "other"]
        assert parse("--dataset", *line.split(), *preset).image_size == size, line


def test_the_evaluation_of_a_named_run_needs_no_other_option(tmp_path):
    options = "--dataset other --lr 0.3 -e 2 --no-smooth --flavours a --measure 0.1 --distance 0.5"
    make_run(tmp_path, *options.split(), "--runs", "2")
    evaluation = ("--eval", "--name", "name", "--out-dir", str(tmp_path))
    args = parse(*evaluation, "--measure", "0.2")
    assert (args.dataset, args.lr, args.epochs, args.smooth) == ("other", 0.3, 2, False)
    assert (args.flavours, args.measure, args.distance) == (["a"], 0.2, 0.5)
    assert args.runs == 1  # which belongs to no run
    assert args.explicit == {"eval", "name", "out_dir", "device", "measure"}
    assert parse(*evaluation).measure == 0.1
    # So is that of a run whose name is made from its options.
    common.Run(parse("--no-plot", "--out-dir", str(tmp_path), "--lr", "0.3"), TRAINING_DATA)
    args = parse("--eval", "--out-dir", str(tmp_path))
    assert args.lr == 0.3 and args.run_dir.name == "main-small-extra-seed1"


def test_each_option_has_one_role_and_may_move_to_another():
    args = parse("--width", "0.5", "--model", "big")
    roles = [common.options(args, role) for role in common.ROLES]
    names = list(itertools.chain(*roles))
    assert len(set(names)) == len(names)
    assert {"dataset", "weights", "epochs", "seed", "taste"} <= roles[0].keys()
    assert {"ood", "data_dir", "measure"} <= roles[1].keys()
    assert {"eval", "runs", "name", "workers", "device"} <= roles[2].keys()
    assert vars(args).keys() - set(names) == {"explicit", "roles", "run_dir"}
    assert args.run_dir.name == "main-big-w0.5-extra-seed1"
    parser = make_parser()
    parser.move("--seed", "evaluation")
    args = parse(parser=parser)
    assert args.roles["seed"] == "evaluation" and "seed" not in common.options(args, "training")
    assert args.run_dir == Path("runs/x/main-small-extra")


def test_help_shows_the_defaults_of_the_chosen_data_set_and_three_roles(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        parse("--dataset", "other", "--lr", "9", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in ("One line.", "training set (default: 9)", "processes) (default: 32)",
                  "names (default: ['salt'])", "bitter) (default: none)",
                  "smooth it (default: True)", "start quickly",
                  "settings for it: main, other, network;", "network: small, big;"):
        assert words in text, words
    order = ["the options that most people need", "--eval", *common.ROLES["training"].split("\0"),
             "--taste", common.ROLES["evaluation"], "--measure", common.ROLES["runtime"]]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert text.count(" --epochs EPOCHS") == 1  # among the first ones, and not again


@pytest.mark.parametrize("argv, named", [
    ("--epochs many", "--epochs"), ("-b 0", "--batch-size"), ("--lr nan", "--lr"),
    ("--lr inf", "--lr"), ("--width 0", "--width"), ("--limit-steps 0", "--limit-steps"),
    ("--seed 1.5", "must be a whole number"), (f"--seed {2**31}", "--seed"), ("--runs 0", "--runs"),
    ("--limit-train 1", "--limit-train"), ("--workers -1", "--workers"),
    ("--image-size 5000", "--image-size"), ("--epocs 3", "--epocs 3; --help lists"),
    ("--dataset nonsense", "--preset nonsense: choose one of main, other, "),
    ("--preset nonsense", "nonsense"), ("--dataset=--freeze", "--freeze: choose one"),
    ("--eval --fresh", "--fresh"), (f"-e {10**400}", "--epochs")])
def test_bad_options_are_refused_by_name(argv, named):
    assert named in refusal(parse, *argv.split())


def test_devices_that_are_not_found_and_variables_that_are_left_over(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert where() == (0, 1, True) and common.on_main(where) == (0, 1, True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "--device mps: not found" in refusal(common.start, "mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "99")  # without WORLD_SIZE, of something else
    assert "--device cuda: process 0 needs a GPU of its own" in refusal(common.start, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--device cuda: process 99 needs a GPU of its own" in refusal(common.start, "cuda")


@pytest.mark.parametrize("variables", [
    {"WORLD_SIZE": ""}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "first"},
    {"WORLD_SIZE": "2", "LOCAL_RANK": "x"}, {"WORLD_SIZE": "2", "MASTER_PORT": "99999999"}])
def test_malformed_variables_of_torchrun_are_one_line(tmp_path, variables):
    """Such as are left over in a shell, or set by the queue of a cluster."""
    if len(variables) > 1:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(free_port())} | variables
    child = Child(tmp_path, start_with, variables).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1, child.stderr
    assert child.stderr.startswith("x.py: error: the environment variable ")
    assert child.stderr.endswith("start several processes by torchrun, or unset it\n")


def start_with(variables):
    os.environ.update(variables)
    in_launch(common.start, "cpu")


def test_options_without_effect_copies_of_options_and_names_of_runs():
    args = parse("--batch-size", "32")
    common.refuse(args, [(True, ["lr", "taste"], "here")])  # which were not typed
    text = refusal(common.refuse, args, [(False, ["batch_size"], "never"),
                                         (True, {"lr", "batch_size"}, "with --features")])
    assert text == "--batch-size has no effect with --features; remove this option"
    for line, words in [
            ("--model resnet18 --weights FILE", "did you mean --model torchvision/resnet18"),
            ("--freeze", "--freeze has no effect without --model torchvision/NAME; remove"),
            ("--model torchvision/resnet18 --width 2", "--width has no effect with --model torch"),
            ("--model torchvision/resnet18 --freeze --augment", "--augment has no effect with")]:
        assert words in refusal(common.refuse, parse(*line.split()), [])
    assert common.with_options(args, lr=9.0).lr == 9.0 and args.lr == 0.25
    assert common.join_name("cifar10", None, "w0.5", 3) == "cifar10-w0.5-3"
    assert common.join_name("folder:/a b/\u00fc", "x") == "folder_a_b_\u00fc-x"


def test_the_name_of_a_folder_is_that_of_what_it_leads_to(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to("a b")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.chdir(tmp_path / "a b")
    for name, expected in [(f"folder:{tmp_path}/link", "a_b"), ("folder:.", "a_b"),
                           (f"folder:{tmp_path}/circle", "circle"), ("folder:/", "folder"),
                           ("cifar10", "cifar10")]:
        assert common.set_name(name) == expected
    assert "has no path" in refusal(common.set_name, "folder: ")


# ---- Processes ----------------------------------------------------------------------------------


def test_derive_seed_mixes_and_seed_all_seeds_everything():
    keys = [*itertools.product(range(9), repeat=3), (), (0,), (0, 0), (1,), (1, 0), (2**40,)]
    seeds = [common.derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)

    def draw(*key):
        common.seed_all(*key)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw(3, 1) == draw(3, 1)
    assert all(a != b for a, b in zip(draw(3, 1), draw(3, 2)))


class Rows(list):
    """A set of data.py, as far as common.py knows it."""


def throw(error):
    raise error


def where():
    return common.rank(), common.world_size(), common.is_main()


SHARDS = [(4, 3), (5, 0), (1, 6)]  # rows of the first and of the second process


def gather_shards(sizes):
    """gather_rows of a set whose rows are shuffled and come in two batches, one of them empty."""
    shuffled = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0))
    mine = shuffled.split(sizes)[common.rank()]
    batches = []
    for index in (mine, mine[:0]):
        strided = torch.stack([index * 2.0, index * 3.0]).t()
        batches.append({"index": index, "values": strided, "number": index.int()})
    return common.gather_rows(batches)


def in_collectives(folder):
    """What each of two processes gets; the assertions hold on both."""
    common.start("cpu")
    rank = common.rank()
    assert where() == (rank, 2, rank == 0) and common.on_main(where) == (0, 2, True)
    assert common.all_reduce(torch.tensor(float(rank + 1))) == 3
    sent = common.broadcast({"a": torch.arange(3), "b": f"from {rank}"})
    assert same(sent, {"a": torch.arange(3), "b": "from 0"})
    assert refusal(common.on_main, throw, UserError(f"from {rank}")) == "from 0"
    assert refusal(common.on_main, torch.empty, 2**60).startswith("out of memory; ")

    def first_makes_a_file():
        if rank == 0:
            time.sleep(0.2)
            (folder / "made").touch()
        return (folder / "made").exists()

    def fails_on_the_last():
        return rank == 0 or throw(UserError("no download"))

    assert common.on_each_machine(first_makes_a_file)
    assert refusal(common.on_each_machine, fails_on_the_last) == "no download"
    os.environ["LOCAL_RANK"] = "0"  # two machines
    assert refusal(common.on_each_machine, fails_on_the_last) == "no download"
    shards = [gather_shards(sizes) for sizes in SHARDS]
    for step in (0, 3):  # rows that occur twice, or are missing
        batches = [{"index": torch.tensor([0, 1]) + step * rank}]
        if rank == 0:
            with pytest.raises(RuntimeError, match="rows are missing or occur twice"):
                common.gather_rows(batches)
        else:
            common.gather_rows(batches)
    dist.destroy_process_group()
    return shards


def test_collectives_of_two_processes(ranks, tmp_path):
    main, other = ranks(in_collectives, tmp_path)
    for sizes, rows in zip(SHARDS, main, strict=True):
        n = torch.arange(float(sum(sizes)))
        assert same(rows, {"values": torch.stack([2 * n, 3 * n], 1), "number": n.int()})
    assert other == [{}, {}, {}]


def in_a_run(folder):
    """What each process sees of a run; machines need not share a disk."""
    common.start("cpu")
    rank = common.rank()
    place = folder / str(rank)
    run = make_run(place, "--lr", "0.3")
    for _ in ("computed", "read"):
        state = run.cached("state", {"of": rank}, lambda: {"value": torch.tensor(rank)})
        assert state["value"] == 0
    trained = fit(run, inputs={"rank": rank})
    run.report(rows_of([1]), ["accuracy"])
    del run
    text = refusal(make_run, place, "--lr", "0.4")
    assert "was made with lr 0.3 (not 0.4); use another" in text
    gc.collect()  # lets the lock go
    evaluation = make_run(place, "--lr", "0.3", "--eval", "--runs", "2")
    assert same(fit(evaluation, {"rank": rank}), trained)
    args = parse("--eval", "--name", "name", "--out-dir", str(place))
    assert (args.lr, args.device.type, args.eval) == (0.3, "cpu", True)
    dist.destroy_process_group()


def test_a_run_of_two_processes(ranks, tmp_path):
    ranks(in_a_run, tmp_path)
    assert not (tmp_path / "1").exists()
    results = strict_json(tmp_path / "0" / "x" / "name" / "results.json")
    assert results["environment"]["processes"] == 2


def in_launch(main, *arguments):
    sys.argv = ["folder/x.py"]
    common.launch(lambda: main(*arguments))


def refused_by_the_main_process():
    common.start("cpu")
    common.on_main(throw, UserError("file\n not found"))


def test_an_error_of_the_main_process_ends_all_processes_in_one_line(tmp_path):
    """None waits for another that has stopped, and none prints a traceback."""
    for child in start_ranks(tmp_path, 2, in_launch, refused_by_the_main_process):
        assert child.wait(60).status == 2
        assert child.stderr == "x.py: error: file not found\n"


def test_what_all_processes_see_ends_all_of_them(tmp_path):
    main, other = start_ranks(tmp_path, 2, in_launch, make_run, tmp_path, "-b", "1")
    assert main.wait(60).status == 2 and main.stderr.count("\n") == 1
    assert "--batch-size 1: this is the global batch size" in main.stderr
    assert other.wait(60).status != 0  # it may find the connection closed before it has joined
    assert not (tmp_path / "x").exists()


def test_under_torchrun_an_error_is_printed_last_and_once(tmp_path):
    code = "import test_common as t\nt.in_launch(t.refused_by_the_main_process)\n"
    (tmp_path / "x.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               "--master_addr=127.0.0.1", f"--master_port={free_port()}", "x.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    before, after = (done.stdout + done.stderr).split("x.py: error: file not found")
    assert after.count("\n") <= 12 and "Connection" not in before


def in_an_agent(folder, port):
    """What torchrun does: start two processes, of which one waits for the other, and wait."""
    for rank in range(2):
        if os.fork() > 0:
            continue
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="1")
        common.start("cpu")
        lock = open(folder / f"lock{rank}", "a")
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
        (folder / f"started{rank}").touch()
        if rank == 0:
            time.sleep(100)
        common.broadcast(None)
    time.sleep(100)


def is_locked(path):
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_processes_end_soon_after_a_killed_torchrun(tmp_path):
    agent = Child(tmp_path, in_an_agent, tmp_path, free_port())
    locks = [tmp_path / "lock0", tmp_path / "lock1"]
    for rank, lock in enumerate(locks):
        wait_for((tmp_path / f"started{rank}").exists, what=f"process {rank}")
        assert is_locked(lock)
    agent.process.kill()
    wait_for(lambda: not any(map(is_locked, locks)), 30, "end of both")


def test_networks_compute_in_bfloat16_with_amp_and_are_tried_before_training():
    args = parse("--amp", "bf16")
    with common.autocast(args):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
    images = Rows([0, 0, 0])
    images.shape = (3, 8, 8)
    common.try_batch(nn.Flatten(), images, args)
    text = refusal(common.try_batch, nn.Linear(9, 2), images, args)
    assert "--model small fails on 2 image(s) of the shape (3, 8, 8): " in text
    with pytest.raises(ZeroDivisionError):  # no error of the user
        common.try_batch(lambda _: 1 / 0, images, args)


# ---- Files --------------------------------------------------------------------------------------


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_write_is_whole_or_nothing_and_synced_before_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "x"
    calls = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, f=function: calls.append(f) or f(*args))
    common.write(path, "old")
    assert [call.__name__ for call in calls] == ["fsync", "replace"]
    for name in ("fsync", "replace"):  # a disk that fills up
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full_disk)
            text = refusal(common.write, path, "new")
        assert "No space left" in text and str(path) in text
    for place in (tmp_path / "absent" / "x", path / "below a file", tmp_path):
        assert "cannot write" in refusal(common.write, place, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


STATE = {"config": {"a": 1, "b": [1, "x", None], "c": True}, "t": torch.arange(3), "f": 0.5,
         "net": {"w": torch.linspace(0, 1, 200).view(40, 5), "half": torch.ones(7).bfloat16()}}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def test_a_flipped_byte_in_any_record_is_found(tmp_path):
    path = tmp_path / "last.pt"
    common.write(path, common.to_bytes(STATE))
    assert same(common.load_tensors(path), STATE)
    whole = path.read_bytes()
    data = set()  # first, middle and last byte of each record
    for record in zipfile.ZipFile(path).infolist():
        head = whole[record.header_offset:]
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = record.header_offset + 30 + lengths  # behind the name and the extra field
        data |= {start, start + record.file_size // 2, start + record.file_size - 1}
    assert len(data) > 12  # the pickle, the tensors, versions
    for place in data.union(range(0, len(whole), 37)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1:])
        with contextlib.suppress(UserError):
            assert same(common.load_tensors(path), STATE)  # padding, or a date
            assert place not in data


class Hostile(str):
    """Unpickling this would make a directory of this name."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


@pytest.mark.parametrize("is_zip", [True, False])  # False: as before PyTorch 1.6
def test_what_is_no_file_of_tensors_is_refused_in_one_line(tmp_path, is_zip):
    folder = tmp_path / "files"
    trap = tmp_path / "trap"
    (folder / "directory").mkdir(parents=True)
    values = {"cut": STATE, "hostile": {"x": Hostile(trap)}, "list": [1, 2],
              "network": nn.Sequential(nn.Linear(2, 2))}
    for name, value in values.items():
        torch.save(value, folder / name, _use_new_zipfile_serialization=is_zip)
    assert same(common.load_tensors(folder / "cut"), STATE)
    whole = (folder / "cut").read_bytes()
    (folder / "cut").write_bytes(whole[:len(whole) // 2])
    (folder / "empty").touch()
    (folder / "text").write_text("not a checkpoint\nat all\n")
    for path in (*folder.iterdir(), folder / "absent"):
        text = refusal(common.load_tensors, path)
        assert str(path) in text and "weights_only" not in text and "delete" not in text
        says_what_to_save = "whole pickled network" in text and "net.state_dict()" in text
        assert says_what_to_save == (path.name == "network")
    assert not trap.exists()
    torch.load(folder / "hostile", weights_only=False)  # the trap does work
    assert trap.exists()


def test_as_json_is_strict_json():
    value = {"nan": math.nan, "list": (1, -math.inf, np.float32(0.5), np.int64(3)),
             7: torch.tensor([1.0, math.nan]), "flag": True, "np_flag": np.bool_(False),
             "path": REPO, "none": None, "array": np.array([[1, 2]]), "big": 2**60}
    assert json.dumps(common.as_json(value), allow_nan=False) == json.dumps(
        {"nan": None, "list": [1, None, 0.5, 3], "7": [1.0, None], "flag": True, "np_flag": False,
         "path": str(REPO), "none": None, "array": [[1, 2]], "big": 2**60})


def test_a_fingerprint_changes_with_every_weight_and_buffer():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).bfloat16())
    found = {common.fingerprint(net)}
    assert found == {common.fingerprint(net)}
    for tensor in net.state_dict().values():
        tensor.view(-1)[-1] += 1
        found.add(common.fingerprint(net))
    assert len(found) == 1 + len(net.state_dict())
    net[0].weight = nn.Parameter(torch.ones(3, 2)[:1, :1].T)  # one number, of stride 2
    assert common.fingerprint(net) not in found


# ---- Runs ---------------------------------------------------------------------------------------


TRAINING_DATA = {"training data": "a", "test data": "t"}


def make_run(folder, *argv, name="name", fingerprints=TRAINING_DATA):
    args = parse("--no-plot", "--out-dir", str(folder), "--name", name, *argv)
    return common.Run(args, fingerprints, "a line on the data")


def fit(run, inputs=None, *, dim=6, name="last", in_epoch_2=None):
    """A small training, as the scripts write it; `in_epoch_2` may spoil what is to be saved."""
    common.seed_all(0)
    net = nn.Sequential(nn.Linear(4, dim), nn.BatchNorm1d(dim), nn.Dropout(0.2), nn.Linear(dim, 1))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    history = run.resume(name, run.args.epochs, inputs, net=net, optimiser=optimiser)
    for epoch in range(len(history), run.args.epochs):
        common.seed_all(1, epoch)
        x = torch.randn(32, 4)
        loss = (net(x)[:, 0] - x.sum(1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append({"epoch": epoch + 1, "loss": loss.item(), "train_accuracy": 0.5, "lr": 0.05,
                        "seconds": time.perf_counter()})
        if in_epoch_2 and epoch == 1:
            in_epoch_2(net, optimiser.state, history[-1])
        run.save(name, history, net=net, optimiser=optimiser)
    return net.state_dict()


def make_and_fit(folder, *argv, **options):
    return fit(make_run(folder, *argv), **options)


def load_last(folder):
    return common.load_tensors(folder / "x" / "name" / "last.pt")


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def fit_and_die(folder):
    fit(make_run(folder), in_epoch_2=lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def test_a_killed_run_resumes_exactly_and_leaves_a_log(tmp_path, capsys):
    whole = fit(make_run(tmp_path / "whole"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("last ")]
    assert len(lines) == 3 and "epoch 1  loss " in lines[0] and "train_accuracy 0.5" in lines[0]
    for _ in range(2):
        child = Child(tmp_path, fit_and_die, tmp_path / "cut").wait(60)
        assert child.status == -signal.SIGKILL and not child.stderr
        assert len(load_last(tmp_path / "cut")["history"]) == 1
    run = make_run(tmp_path / "cut")
    assert same(fit(run), whole)
    assert_same_checkpoints(tmp_path / "whole/x/name/last.pt", run.dir / "last.pt")
    rows = read_csv(run.dir / "last.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    for row, saved in zip(rows, run.histories["last"], strict=True):
        assert row == {key: f"{value:.6g}" for key, value in saved.items()}
    del run
    before = snapshot(tmp_path)
    assert same(fit(make_run(tmp_path / "cut")), whole)
    assert "last: trained already; --fresh trains again" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


def test_a_checkpoint_of_another_network_or_with_other_inputs_is_refused(tmp_path):
    fit(make_run(tmp_path), {"teacher": "a"})
    before = snapshot(tmp_path)
    for argv in ([], ["--eval"]):
        for inputs, noun in (({"teacher": "b"}, "teacher"), (None, "inputs")):
            text = refusal(make_and_fit, tmp_path, *argv, inputs=inputs)
            assert f"last.pt was trained with other {noun}; use another --name, or --fresh" in text
        text = refusal(make_and_fit, tmp_path, *argv, inputs={"teacher": "a"}, dim=7)
        assert "last.pt does not fit this network (" in text
    assert snapshot(tmp_path) == before
    fit(make_run(tmp_path, "--fresh"), {"teacher": "b"}, dim=7)


def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "x" / "name" / "last.pt"
    make_and_fit(tmp_path)
    state = torch.load(path, weights_only=True)
    without_optimiser = {key: value for key, value in state.items() if key != "optimiser"}
    for damaged in (state | {"optimiser": None}, state | {"net": "text"}, state | {"history": 3},
                    state | {"history": [1, 2, 3]}, without_optimiser):
        torch.save(damaged, path)
        before = path.read_bytes()
        assert "last.pt does not fit this network (" in refusal(make_and_fit, tmp_path)
        assert path.read_bytes() == before


def spoil(part, net, state, row):
    """Put NaN or infinity into a part of what is to be saved, or fill the disk."""
    tensors = {"weight": net[0].weight, "variance": net[1].running_var,
               "momentum": state[net[0].weight]["momentum_buffer"]}
    if part == "loss":
        row["loss"] = np.float32("nan")
    elif part == "disk":
        os.fsync = full_disk
    else:
        tensors[part].data.view(-1)[-1] = math.nan if part == "weight" else math.inf


@pytest.mark.parametrize("part", ["loss", "weight", "variance", "momentum", "disk"])
def test_what_cannot_be_saved_never_replaces_a_good_checkpoint(tmp_path, monkeypatch, part):
    message = "last: training diverged in epoch 2.*lower learning rate"
    if part == "disk":
        message = "cannot write .*No space left"
    for _ in range(2):  # and again: nothing was lost or changed
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", os.fsync)  # `spoil` may replace it
            text = refusal(make_and_fit, tmp_path, in_epoch_2=partial(spoil, part))
        assert re.search(message, text)
        state = load_last(tmp_path)
        assert len(state["history"]) == 1 and common.all_finite(state)
    assert same(make_and_fit(tmp_path), fit(make_run(tmp_path / "calm")))


def test_eval_needs_a_finished_run(tmp_path):
    assert f"no run in {tmp_path}/x/name; train it first" in refusal(make_run, tmp_path, "--eval")
    assert not list(tmp_path.iterdir())
    refusal(make_and_fit, tmp_path, in_epoch_2=partial(spoil, "loss"))
    before = snapshot(tmp_path)
    for name, number in (("last", 1), ("seed2", 0)):
        text = refusal(make_and_fit, tmp_path, "--eval", name=name)
        assert f"{name}.pt has {number} of 3 epochs; finish this run first" in text
    assert snapshot(tmp_path) == before
    make_run(tmp_path, "--eval", "-e", "0", name="pretrained")  # there is nothing to train


@pytest.mark.parametrize("mode, advice", [
    ([], "use another --name, or --fresh to start over"),
    (["--eval"], "--eval needs the options and the data that it was made with")])
def test_only_other_training_options_are_refused_by_name(tmp_path, mode, advice):
    whole = make_and_fit(tmp_path, "--no-smooth")
    free = "--measure 0.1 --flavours b --runs 4 --workers 0 --data-dir elsewhere".split()
    assert same(make_and_fit(tmp_path, "--no-smooth", *free, *mode), whole)
    before = snapshot(tmp_path)
    text = refusal(make_run, tmp_path, "--no-smooth", "--lr", "0.3", *mode)
    assert text.endswith(f"was made with lr 0.25 (not 0.3); {advice}")
    text = refusal(make_run, tmp_path, "--preset", "other", "--taste", "new", "--measure", "1",
                   *mode)
    assert "preset None (not other)" in text and "taste sweet (not new)" in text
    assert "seed" not in text and "measure" not in text
    assert snapshot(tmp_path) == before
    assert same(make_and_fit(tmp_path, "--no-smooth"), whole)


def test_eval_finds_data_that_have_moved(tmp_path):
    """The fingerprint says that they are the same; without --eval, a run has one path."""
    for place in ("old", "new"):
        (tmp_path / place).mkdir()
    old, new = (["--dataset", f"folder:{tmp_path / place}"] for place in ("old", "new"))
    whole = make_and_fit(tmp_path, *old)
    assert same(make_and_fit(tmp_path, *new, "--eval"), whole)
    text = refusal(make_run, tmp_path, *new, "--eval", fingerprints={"training data": "b"})
    assert "was made with another training data" in text
    assert f"dataset folder:{tmp_path / 'old'} (not " in refusal(make_run, tmp_path, *new)
    assert "dataset folder:" in refusal(make_run, tmp_path, "--dataset", "other", "--eval")


def test_other_data_are_refused_but_for_the_test_data(tmp_path):
    make_and_fit(tmp_path)
    make_run(tmp_path, fingerprints=TRAINING_DATA | {"test data": "another"})
    before = snapshot(tmp_path)
    for changed in ({"training data": "b"}, {"file of --weights": "w"}):
        for argv in ([], ["--eval"]):
            text = refusal(make_run, tmp_path, *argv, fingerprints=TRAINING_DATA | changed)
            assert f"was made with another {next(iter(changed))}; " in text
    assert snapshot(tmp_path) == before


class Killed(BaseException):
    """What a test raises where a process might be killed."""


@pytest.mark.parametrize("deleted", [0, 3, 5, 6])
def test_a_start_with_fresh_that_is_killed_leaves_no_mixture(tmp_path, monkeypatch, deleted):
    """What it still holds belongs to the old options, which are there; or else it is empty."""
    run = make_run(tmp_path)
    whole = fit(run)
    run.report(rows_of([1]), ["accuracy"])
    run.write("x.png", b"a picture")
    old_files = snapshot(run.dir)
    run.write("notes.txt", "of the user")
    del run
    unlink = Path.unlink
    calls = []

    def unlink_or_die(path=None, content=None):
        calls.append(path)
        if len(calls) > deleted:
            raise Killed("killed")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_die)
        patch.setattr(common, "write", unlink_or_die)
        refusal(make_run, tmp_path, "--fresh", "--lr", "0.3", kind=Killed)
    files = snapshot(tmp_path / "x/name")
    assert files.pop("notes.txt") == b"of the user"
    assert len(files) == len(old_files) - deleted and files.items() <= old_files.items()
    assert ("options.json" in files) == bool(files)
    assert same(make_and_fit(tmp_path), whole)
    run = make_run(tmp_path, "--fresh", "--lr", "0.3")  # other options, too
    assert set(snapshot(run.dir)) == {"options.json", "notes.txt"}
    del run
    assert "lr 0.3" in refusal(make_run, tmp_path)


@pytest.mark.parametrize("damage", [
    "{", "[1]", "null", "{}", None, "directory",
    '{"training": {}, "evaluation": {}, "fingerprints": 3}',
    '{"training": ["lr"], "evaluation": {}, "fingerprints": {}}'])
def test_damaged_or_deleted_options_are_refused_beside_checkpoints(tmp_path, damage):
    make_and_fit(tmp_path)
    path = tmp_path / "x" / "name" / "options.json"
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage is not None:
        path.write_text(damage)
    before = snapshot(tmp_path)
    for argv in ([], ["--lr", "0.3"], ["--eval"], ["--eval", "--name", "name"]):
        text = refusal(make_run, tmp_path, *argv)
        assert "options.json is missing or damaged (" in text and "--fresh" in text
    assert snapshot(tmp_path) == before
    if damage != "directory":
        make_and_fit(tmp_path, "--fresh")


@pytest.mark.parametrize("name, value", [
    ("epochs", None), ("epochs", 2.5), ("lr", [1]), ("smooth", 3), ("flavours", 3),
    ("measure", "far"), ("dataset", 3)])
def test_stored_options_of_another_type_are_refused(tmp_path, name, value):
    run = make_run(tmp_path)
    fit(run)
    path = run.dir / "options.json"
    del run
    stored = strict_json(path)
    role = "training" if name in stored["training"] else "evaluation"
    stored[role][name] = value
    path.write_text(json.dumps(stored))
    text = refusal(make_run, tmp_path, "--eval")
    assert re.search(rf"options.json is damaged \(.*{name}.*\); use --fresh to start over", text)


TYPED = {"gbnn2d": "--tau-d 0.5 --k0 7", "ddu": "--no-sn --entropy-threshold 0.5", "forde": "-m 3",
         "proxy_distill": "--losses rkl_proxy", "swag_laplace_ensembles": "--ensembles 1 2"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_eval_reads_all_options_of_a_script_as_they_were(name, tmp_path):
    script = importlib.import_module(name)
    datasets = [key for key in script.PRESETS if key != "folder" and not key.startswith("--")]
    places = [*CPU, "--out-dir", str(tmp_path), "--name", "name"]
    for dataset in datasets:
        for words in ("", TYPED[name]):
            args = script.parse_args(["--dataset", dataset, *words.split(), *places])
            roles = {role: common.options(args, role) for role in ("training", "evaluation")}
            args.run_dir.mkdir(parents=True, exist_ok=True)
            (args.run_dir / "options.json").write_text(json.dumps(roles | {"fingerprints": {}}))
            again = script.parse_args(["--eval", *places])
            assert roles == {role: common.options(again, role) for role in roles}


def hold(folder):
    run = make_run(folder)
    run.write("held", "")
    time.sleep(100)


def test_a_directory_belongs_to_one_process_and_forgets_what_a_killed_one_left(tmp_path):
    child = Child(tmp_path, hold, tmp_path)
    folder = tmp_path / "x" / "name"
    wait_for((folder / "held").exists, 60, "run")
    before = snapshot(folder)
    for argv in ([], ["--fresh", "--lr", "0.3"]):
        assert "is locked by another process" in refusal(make_run, tmp_path, *argv)
    assert snapshot(folder) == before
    child.process.kill()
    child.process.join()
    (folder / ".last.pt.123.tmp").write_bytes(b"half a checkpoint")
    make_run(tmp_path)
    assert snapshot(folder) == before


@pytest.mark.parametrize("argv", [[], ["--eval"]])
def test_a_name_is_one_plain_part_of_a_path(tmp_path, argv):
    for name in ("../../x", "a/b", "/tmp/x", "..", ".", "nul\0byte", "x" * 300, " ", "a ", "a\nb",
                 "\n", "-x", "--name", ".hidden"):
        text = refusal(make_run, tmp_path / "out", f"--name={name}", *argv)
        assert "--name" in text and not list(tmp_path.iterdir())
    for good in ("a b", "v1.0+x=2,@y", "\u00fc_1"):
        assert make_run(tmp_path, "--name", good).dir == tmp_path / "x" / good


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "y" / "x" / "name" / ".last.pt.tmp").mkdir(parents=True)
    (tmp_path / "circle").symlink_to("circle")
    for place in ("file", "x" * 300, "y", "circle"):
        assert "cannot write to " in refusal(make_run, tmp_path / place)
    assert refusal(make_run, tmp_path / ("x" * 300), "--eval", "--name", "name")
    assert (tmp_path / "file").read_text() == "kept"


def test_values_are_computed_once_and_anew_when_their_inputs_change(tmp_path):
    calls = []

    def compute():
        calls.append(len(calls))
        return {"value": torch.tensor(calls[-1]), "text": "x", "list": [1, None]}

    def value_of(weights, *argv):
        run = make_run(tmp_path, *argv)
        inputs = {"weights": weights, "draws": (1, torch.tensor(2))}
        state = run.cached("fit", inputs, compute)
        assert state["text"] == "x" and state["list"] == [1, None]
        return state["value"].item()

    assert [value_of(weights) for weights in "aabba"] == [0, 0, 1, 1, 2]
    assert value_of("a", "--measure", "0.1") == 2
    run = make_run(tmp_path)
    text = refusal(run.cached, "bad", {}, lambda: {"value": torch.tensor(math.inf)})
    assert "bad: a value is not finite" in text
    assert set(snapshot(run.dir)) == {"options.json", "fit.pt"}
    run.write("fit.pt", b"damaged")
    assert "fit.pt is damaged" in refusal(run.cached, "fit", {"weights": "a"}, compute)


def remake(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".lock").touch()


@pytest.mark.parametrize("change", [shutil.rmtree, remake])
def test_a_directory_that_was_removed_or_made_again_gets_no_more_files(tmp_path, change):
    """Another run may have it by then: its files must not be mixed with those of this one."""
    run = make_run(tmp_path)
    text = refusal(fit, run, in_epoch_2=lambda *_: change(run.dir))
    assert "was removed or replaced while this command was running" in text
    assert not snapshot(tmp_path)


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    make_and_fit(tmp_path)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "cannot be locked (No locks available)" in notes[0]


# ---- Rows, reports, tables ----------------------------------------------------------------------


def rows_of(seeds, shift=0.0):
    """Two rows for each seed: predictions on the set t, and t against the set o_d."""
    generator = np.random.default_rng(0)
    rows = []
    for seed in seeds:
        accuracy, nll = generator.random(2) / 2 + shift
        row = {"method": "DDU", "seed": seed, "set": "t", "n": 10}
        rows += [{**row, "accuracy": accuracy, "nll": nll},
                 {**row, "against": "o_d", "auroc": accuracy}]
    return rows


def test_report_writes_results(tmp_path):
    rows = rows_of([1, 2, 3])
    rows[0] |= {"odd": math.nan, "bytes": 123456789}
    run = make_run(tmp_path, "--measure", "0.25")
    back = run.report(rows, ["accuracy", "auroc"], curve=torch.ones(2))
    content = strict_json(run.dir / "results.json")
    assert content["rows"] == back and back[0]["odd"] is None
    assert content["script"] == "x" and content["columns"] == ["accuracy", "auroc"]
    assert content["config"]["measure"] == 0.25 and content["config"]["lr"] == 0.25
    assert content["fingerprints"] == TRAINING_DATA and "workers" not in content["config"]
    assert content["curve"] == [1.0, 1.0] and content["seconds"] > 0
    environment = content["environment"]
    assert environment["threads"] == environment["processes"] == 1
    assert environment["torch"] == torch.__version__
    assert {"commit", "python", "device", "tf32_in_convolutions"} <= environment.keys()
    cells = read_csv(run.dir / "results.csv")
    assert len(cells) == 6 and cells[0]["accuracy"] == f"{rows[0]['accuracy']:.6g}"
    assert [row["against"] for row in cells[:2]] == ["", "o_d"]
    assert cells[0]["odd"] == "" and cells[0]["bytes"] == "123456789"


def test_report_prints_mean_and_standard_error_of_its_columns(tmp_path, capsys):
    rows = rows_of([1, 2, 3])
    rows[0]["accuracy"] = math.inf
    run = make_run(tmp_path)
    run.report(rows, ["accuracy", "auroc"])
    out = capsys.readouterr().out
    accuracies = [row["accuracy"] for row in rows[2::2]]
    aurocs = [row["auroc"] for row in rows[1::2]]
    for shown in (out, table(capsys, run.dir).out):
        assert f"{np.mean(accuracies):.4f} ± {sem(accuracies):.4f} (2 of 3)" in shown
        assert f"{np.mean(aurocs):.4f} ± {sem(aurocs):.4f}" in shown
    assert "nll" not in out and str(run.dir) in out
    run.report(rows, ["accuracy", "auroc"], shown=rows[::2])
    assert "auroc" not in capsys.readouterr().out


def test_the_histories_are_drawn_where_pictures_are_wanted(tmp_path):
    from matplotlib import pyplot

    for argv in ([], ["--plot"]):
        run = make_run(tmp_path, *argv)
        picture = run.dir / "training.png"
        run.report(rows_of([1]), ["accuracy"])
        assert not picture.exists()  # nothing was trained
        fit(run)
        fit(run, name="member1")
        run.report(rows_of([1]), ["accuracy"])
        assert picture.exists() == bool(argv)
        histories = run.histories
        del run
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not pyplot.get_fignums()  # pyplot would keep the figures in memory
    histories["last"][0]["late"] = None  # a number that not every epoch has
    histories["last"][2]["late"] = 1.0
    figure = common.draw_histories(histories)
    assert [panel.get_title() for panel in figure.axes] == ["loss", "train_accuracy", "late"]
    for name, line in zip(["last", "member1"], figure.axes[0].lines, strict=True):
        assert line.get_label() == name and list(line.get_xdata()) == [1, 2, 3]
        assert list(line.get_ydata()) == [row["loss"] for row in histories[name]]


def table(capsys, *argv):
    capsys.readouterr()
    common.table([str(word) for word in argv])
    return capsys.readouterr()


def write_results(folder, rows, script="x", columns=("accuracy", "auroc"), fingerprints=None,
                  **config):
    """A finished run's results.json with these rows; returns its directory."""
    folder.mkdir(parents=True)
    content = {"script": script, "config": config, "columns": columns, "rows": rows,
               "fingerprints": fingerprints or TRAINING_DATA}
    (folder / "results.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("option", ["lr", "data_dir"])  # one of training, one of evaluation
def test_table_pools_the_seeds_of_directories_and_separates_options(tmp_path, capsys, option):
    accuracies = {"0.1": [], "0.2": []}
    for value, seed in itertools.product(accuracies, (1, 2, 3)):
        rows = rows_of([seed], shift=seed * float(value) / 2)
        argv = ["--seed", str(seed), f"--{option.replace('_', '-')}", value]
        if seed == 2:
            argv.append("--compile")  # the same numbers
        make_run(tmp_path, *argv, name=f"{value}-{seed}").report(rows, ["accuracy", "auroc"])
        accuracies[value].append(rows[0]["accuracy"])
    folders = sorted((tmp_path / "x").iterdir())
    shown = table(capsys, *folders).out
    for value, numbers in accuracies.items():
        lines = [line for line in shown.splitlines() if f"{option}={value}" in line]
        assert len(lines) == 2 and "o_d" in lines[1]  # of the set, and of the pair of sets
        assert f" 3      {np.mean(numbers):.4f} ± {sem(numbers):.4f}" in lines[0]
    assert not re.search("nll|seed=|compile=|name=|taste=", shown)
    assert "nll" in table(capsys, *folders, "--metrics", "nll").out
    assert "DDU" in table(capsys, *folders, "--sets", "t").out
    for wrong in (["--metrics", "nll", "t"], ["--sets", "t", "nll"]):
        text = refusal(table, capsys, *folders, *wrong)
        assert f"{wrong[0]} {wrong[2]}: not found in any row" in text


def test_runs_of_several_scripts_make_one_table(tmp_path, capsys):
    """One row for each method, set and OOD set: with the scores of the set, too."""
    ddu = []
    for seed in (1, 2):
        row = {"method": "DDU", "seed": seed, "set": "t", "n": 10}
        ddu += [{**row, "accuracy": 0.25 * seed, "ms": 0.5, "bytes": 1234, "secret": 7.0},
                {**row, "against": "a", "auroc_total": 0.3 * seed},
                {**row, "against": "b", "auroc_total": 0.3 * seed}]
    swag = [{"set": "t", "n": 9, "method": "SWAG", "seed": 1, "accuracy": 0.5, "nll": 1.25},
            {"set": "u", "n": 9, "method": "MAP", "seed": 1, "accuracy": 0.75}]
    folders = [write_results(tmp_path / "d", ddu, "ddu", lr=0.1, width=1),
               write_results(tmp_path / "s", swag, "swag", lr=0.2),
               write_results(tmp_path / "w", swag, "swag", lr=0.3)]
    header, _, *lines = table(capsys, *folders).out.split("\n\n")[0].splitlines()
    assert header.split() == ["run", "method", "set", "against", "n", "seeds", "accuracy", "nll",
                              "auroc_total", "ms", "bytes"]
    pooled = "10  2  0.3750 ± 0.1250  0.4500 ± 0.1500  0.5000 ± 0.0000  1234"
    assert [re.sub("  +", "  ", line) for line in lines] == [
        f"ddu  DDU  t  a  {pooled}", f"ddu  DDU  t  b  {pooled}",
        "swag lr=0.2  SWAG  t  9  1  0.5000  1.2500", "swag lr=0.2  MAP  u  9  1  0.7500",
        "swag lr=0.3  SWAG  t  9  1  0.5000  1.2500", "swag lr=0.3  MAP  u  9  1  0.7500"]
    assert "7.0000" in table(capsys, *folders, "--metrics", "secret").out
    # Of equal seeds, no run hides another.
    folders.append(write_results(tmp_path / "again", ddu, "ddu", lr=0.1, width=1))
    assert "2 in 4 runs" in table(capsys, *folders).out


def test_data_sets_side_by_side(tmp_path, capsys):
    """Papers' tables: a row for each method; data sets, and metrics that only some have, beside."""
    images = [{"method": method, "seed": seed, "set": "a_b", "n": 9, "accuracy": 0.25 * seed}
              for seed in (1, 2) for method in ("MAP", "SWAG")]
    images.append({"method": "SWAG", "seed": 1, "set": "a_b", "against": "o", "auroc": 0.75})
    energies = [{"method": "SWAG", "seed": 1, "set": "q", "n": 5, "lpd": -1.5, "mae_milli": 9.06}]
    folders = [write_results(tmp_path / "i", images, model="wrn"),
               write_results(tmp_path / "e", energies, columns=("lpd", "mae_milli"), model="painn")]
    lines = table(capsys, *folders, "--side-by-side").out.split("\n\n")[0].splitlines()
    assert [re.split("  +", line) for line in lines if "---" not in line] == [
        ["method", "a_b accuracy", "a_b/o auroc", "q lpd", "q mae_milli"],
        ["MAP", "0.3750 ± 0.1250"], ["SWAG", "0.3750 ± 0.1250", "0.7500", "-1.5000", "9.1"]]
    latex = table(capsys, *folders, "--side-by-side", "--format", "latex").out.splitlines()
    assert latex == [
        r"\begin{tabular}{lllll}",
        r"method & a\_b accuracy & a\_b/o auroc & q lpd & q mae\_milli \\", r"\hline",
        r"MAP & 0.3750 $\pm$ 0.1250 &  &  &  \\",
        r"SWAG & 0.3750 $\pm$ 0.1250 & 0.7500 & $-$1.5000 & 9.1 \\", r"\end{tabular}"]


def test_runs_of_one_data_set_are_told_apart_side_by_side(tmp_path, capsys):
    """By their networks, or by the options that differ."""
    one = {"method": "DE, K=1", "seed": 1, "set": "a_b", "n": 9, "accuracy": 0.25}
    rows = [one, {**one, "method": "DE, K=5"}]
    more = [one, {**one, "method": "DE, K=2", "accuracy": 0.5}]
    for network, width in (("wrn", 1), ("vit", 1), ("vit", 2)):
        write_results(tmp_path / f"{network}{width}", more if width > 1 else rows, dataset="a_b",
                      columns=("accuracy",), model=network, width=width)
    shown = table(capsys, tmp_path / "wrn1", tmp_path / "vit1", "--side-by-side").out
    assert re.split("  +", shown.splitlines()[0])[1:] == ["a_b wrn accuracy", "a_b vit accuracy"]
    shown = table(capsys, tmp_path / "vit1", tmp_path / "vit2", "--side-by-side").out
    header, _, *lines = shown.split("\n\n")[0].splitlines()
    assert re.split("  +", header)[1:] == ["a_b width=1 accuracy", "a_b width=2 accuracy"]
    assert [line.split()[1] for line in lines] == ["K=1", "K=2", "K=5"]
    # So are folders of one name.
    write_results(tmp_path / "w", rows, columns=("accuracy",), model="wrn", dataset="folder:w/a_b")
    shown = table(capsys, tmp_path / "wrn1", tmp_path / "w", "--side-by-side").out
    assert len(re.findall(" a_b ", shown.splitlines()[0])) == 2


def test_side_by_side_drops_no_run_with_another_number_of_examples(tmp_path, capsys):
    folders = []
    for seed, n in ((1, 100), (2, 100), (3, 90)):
        row = {"method": "DDU", "seed": seed, "set": "t", "n": n, "accuracy": 0.25 * seed}
        folders.append(write_results(tmp_path / str(seed), [row], columns=["accuracy"], seed=seed))
    lines = table(capsys, *folders, "--side-by-side").out.splitlines()
    assert [re.split("  +", line) for line in lines[2:4]] == [
        ["DDU", "0.3750 ± 0.1250"], ["DDU (n = 90)", "0.7500"]]


def test_other_directories_are_skipped_in_one_line(tmp_path, capsys):
    run = write_results(tmp_path / "run", rows_of([1]))
    alone = table(capsys, run)
    whole = strict_json(run / "results.json")
    damages = [None, "[]", "text", '{"rows": []}']
    for name in ("script", "config", "columns", "rows", "fingerprints"):
        damages += [json.dumps(whole | {name: value}) for value in (None, 3)]
    row = {"method": "m", "set": "s", "n": 3, "accuracy": 0.5}
    for wrong in ({}, "row", {"method": "m", "accuracy": 0.5}, row | {"n": "many"},
                  row | {"accuracy": "high"}, row | {"method": ["m"]}):
        damages.append(json.dumps(whole | {"rows": [wrong]}))
    for text in damages:
        if text is not None:
            (tmp_path / "results.json").write_text(text)
        shown = table(capsys, tmp_path, run)
        assert shown.out == alone.out and alone.err == "", text
        assert shown.err == (f"skipped: {tmp_path} has no results.json of a finished run, or a "
                             "damaged one\n")
        assert "no rows to show" in refusal(table, capsys, tmp_path)


def test_runs_on_other_data_are_not_pooled(tmp_path, capsys):
    """Such as two seeds, between which images were added to the folder."""
    folders = []
    for seed, data in ((1, "a" * 64), (2, "b" * 64), (3, "b" * 64)):
        row = {"method": "DDU", "seed": seed, "set": "t", "n": 10, "accuracy": 0.25 * seed}
        folders.append(write_results(tmp_path / str(seed), [row], columns=["accuracy"], seed=seed,
                                     fingerprints={"training data": data, "test data": "t"}))
    header, _, first, second, *_ = table(capsys, *folders).out.splitlines()
    assert re.split("  +", first)[0] == f"training data: {'a' * 8}" and "0.2500" in first
    assert re.split("  +", second)[0] == f"training data: {'b' * 8}" and "0.6250 ±" in second
    assert "run" not in table(capsys, *folders[1:]).out.splitlines()[0].split()


def test_what_the_errors_of_a_table_mean_is_explained(tmp_path, capsys):
    rows = [{"method": "DDU", "seed": seed, "set": "t", "n": 120, "accuracy": 0.48}
            for seed in (1, 2)]
    run = write_results(tmp_path / "run", rows, columns=["accuracy"])
    meaning = "±: standard error over networks with other seeds, for the same test examples"
    sample = "120 test examples: ± 4.6 % for an accuracy of 48.0 % (standard error of the sample)"
    assert table(capsys, run).out.splitlines()[-2:] == [meaning, sample]
    make_run(tmp_path).report([rows[0] | {"accuracy": 1.0}], ["accuracy"])
    out = capsys.readouterr().out
    assert meaning not in out and "± 0.8 % for an accuracy of 100.0 %" in out


ROW = {"method": "a", "seed": 1, "set": "s", "n": 3, "accuracy": 0.5}


def test_a_mean_says_of_how_many_values_it_is_made():
    for values, text in [
            ([1.5, 2.5, None], "2.0000 ± 0.5000 (2 of 3)"), ([None, 1.5], "1.5000 (1 of 2)"),
            ([None, None], None), ([0.25], "0.2500"), ([7, 7, 7], "7"), ([0, 0], "0"),
            ([7, 8], "7.5000 ± 0.5000"), ([91.0, 92.0], "91.5 ± 0.5"), ([7, None], "7 (1 of 2)"),
            (["a", "b", "a"], "a or b"), (["flat", None], "flat (1 of 2)"),
            ([123456.7], "1.2346e+05"), ([1e6, 3e6], "2e+06 ± 1e+06")]:
        assert common.pooled_text(values) == text


def test_what_is_not_independent_has_no_standard_error():
    """Ensembles of different seeds that share members, and runs of the same seed."""
    rows = [dict(ROW, seed=1, x=1.5, members=[1, 2]), dict(ROW, seed=2, x=2.5, members=[3, 4])]
    assert common.pool(rows, ["x"])[0]["x"] == "2.0000 ± 0.5000"
    rows[1]["members"] = [2, 3]
    assert common.pool(rows, ["x"])[0]["x"] == "2.0000"
    rows[1]["method"] = "another"  # not in one group
    assert [line["x"] for line in common.pool(rows, ["x"])] == ["1.5000", "2.5000"]
    [line] = common.pool([dict(ROW, x=1.5), dict(ROW, x=2.5)], ["x"])
    assert line["x"] == "2.0000" and line["seeds"] == "1 in 2 runs"


@pytest.mark.parametrize("classes", [(), ("cat", "dog", "cow", "emu")])
def test_predictions_have_a_line_for_each_example_and_methods_side_by_side(tmp_path, classes):
    names = [str(name) for name in classes or range(4)]
    generator = torch.Generator().manual_seed(0)
    methods = {name: torch.randn(members, 2, 4, generator=generator).log_softmax(-1)
               for name, members in (("ddu", 1), ("ensemble", 3))}
    dataset = Rows([0, 0])
    dataset.files = ("a/0.png", "b, c/1.png")
    dataset.labels = torch.tensor([1, -1])  # the second one is not known
    run = make_run(tmp_path)
    extra = {"density": torch.tensor([1.5, -math.inf]), "decision": ["ood", "clean"]}
    common.write_predictions(run, dataset, methods, classes, {"ddu": 2.5}, extra)
    expected = {"file": ["a/0.png", "b, c/1.png"], "label": [names[1], ""]}
    for ending, log_probs in (("", methods["ddu"]), ("_ensemble", methods["ensemble"])):
        probs = log_probs.double().exp().numpy()
        mean = probs.mean(0)
        total = entropy(mean, axis=1)
        aleatoric = entropy(probs, axis=2).mean(0)
        expected[f"predicted{ending}"] = [names[k] for k in mean.argmax(1)]
        expected[f"confidence{ending}"] = [f"{value:.6g}" for value in mean.max(1)]
        expected[f"total{ending}"] = [f"{value:.6g}" for value in total]
        expected[f"aleatoric{ending}"] = [f"{value:.6g}" for value in aleatoric]
        expected[f"epistemic{ending}"] = [f"{value:.6g}" for value in total - aleatoric]
        expected[f"temperature{ending}"] = ["1", "1"]
    expected |= {"epistemic": ["", ""], "temperature": ["2.5", "2.5"],  # of a single network
                 "density": ["1.5", ""], "decision": ["ood", "clean"]}
    rows = read_csv(run.dir / "predictions.csv")
    assert list(rows[0]) == list(expected)
    for name, values in expected.items():
        assert [row[name] for row in rows] == values, name


def test_examples_without_files_are_numbered_and_may_have_no_label(tmp_path):
    run = make_run(tmp_path)
    dataset = Rows([0, 0])
    for labels, expected in [([2, 0], ["2", "0"]), ([1.5, math.nan], ["1.5", ""]),
                             ([-1, -1], [None, None]), ([math.nan, math.nan], [None, None])]:
        dataset.labels = torch.tensor(labels)
        run.write_csv("x.csv", common.example_columns(dataset))
        rows = read_csv(run.dir / "x.csv")
        assert [row["index"] for row in rows] == ["0", "1"]
        assert [row.get("label") for row in rows] == expected
    with pytest.raises(ValueError):
        run.write_csv("x.csv", {"a": [1, 2], "b": [1]})


# ---- Signals, errors, platforms, pictures -------------------------------------------------------


def test_launch_hides_no_programming_error(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the signals of pytest stay its own
    errors = {ZeroDivisionError: lambda: 1 / 0, FileNotFoundError: lambda: open("/absent/file"),
              RuntimeError: lambda: torch.ones(2) @ torch.ones(3)}
    for error, main in errors.items():
        with pytest.raises(error):
            common.launch(main)


@pytest.mark.parametrize("main, argument", [
    (torch.empty, 2**60), (throw, torch.OutOfMemoryError("CUDA out of memory. Tried\n 2 GiB"))])
def test_out_of_memory_is_one_line_that_names_what_helps(tmp_path, main, argument):
    child = Child(tmp_path, in_launch, main, argument).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1
    assert child.stderr.startswith("x.py: error: out of memory; ")
    for option in ("--batch-size", "--width", "--amp bf16"):
        assert option in child.stderr


def test_out_of_memory_is_not_a_damaged_file(tmp_path, monkeypatch):
    torch.save({"x": torch.zeros(3)}, tmp_path / "x.pt")
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
    for error in (MemoryError(), RuntimeError(text)):
        monkeypatch.setattr(torch, "load", lambda *_, **__: throw(error))
        with pytest.raises(type(error)):
            common.load_tensors(tmp_path / "x.pt")


def run_common(*argv):
    """`python common.py ARGV`."""
    sys.argv = ["common.py", *argv]
    runpy.run_path(str(REPO / "common.py"), run_name="__main__")


def show_help(length):
    parser = make_parser()
    parser.runtime.add_argument("--long", help="a word " * length)
    parse("--help", parser=parser)


def print_without_a_reader(target, function, *arguments):
    """Print to a full device or to a pipe that was closed, buffered as where output is a file."""
    if target == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    os.dup2(out, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    function(*arguments)


@pytest.mark.parametrize("target, reason, main, argument", [
    ("full", "No space left", common.print_on_main, "a row"),
    ("pipe", "Broken pipe", common.print_on_main, "a row"), ("full", "No space left", show_help, 1),
    ("pipe", "Broken pipe", show_help, 4000)])
def test_output_without_a_reader_is_one_line(tmp_path, target, reason, main, argument):
    child = Child(tmp_path, print_without_a_reader, target, in_launch, main, argument).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1
    assert f"x.py: error: cannot print ({reason}" in child.stderr


def test_a_table_without_a_reader(tmp_path):
    """`table ... | head -1` ends in silence; a full disk is told."""
    run = write_results(tmp_path / "run", rows_of([1]))
    for target, status, words in [("pipe", -signal.SIGPIPE, ""),
                                  ("full", 2, "common.py: error: cannot print (No space left")]:
        child = Child(tmp_path, print_without_a_reader, target, run_common, "table", str(run))
        assert child.wait(60).status == status and child.stderr.count("\n") == bool(words)
        assert words in child.stderr


@pytest.mark.parametrize("argv", [[], ["tabel", "runs/x"]])
def test_common_as_a_program_says_what_it_does(tmp_path, argv):
    child = Child(tmp_path, run_common, *argv).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1
    assert "usage: python common.py table RUN ..." in child.stderr


def without_streams(numbers, function, *arguments):
    """As after 1>&- or 2>&- in a shell: Python has no such stream, and its number is free."""
    for number in numbers:
        os.close(number)
        setattr(sys, {1: "stdout", 2: "stderr"}[number], None)
    in_launch(function, *arguments)


def write_and_fail(path):
    with open(path, "w") as file:
        os.write(2, b"from a library in C")
        file.write("content")
    raise UserError("wrong")


@pytest.mark.parametrize("closed", [(2,), (1,), (1, 2)])
def test_closed_streams_hide_no_error_and_spoil_no_file(tmp_path, closed):
    path = tmp_path / "file"
    child = Child(tmp_path, without_streams, closed, write_and_fail, path).wait(60)
    assert child.status == 2 and path.read_text() == "content"
    text = child.stdout + child.stderr
    assert ("x.py: error: wrong\n" in text) == (closed != (1, 2))


def test_scripts_need_no_docstrings():
    """Under `python -OO` they have none."""
    assert "usage: " in common.Parser("x", None, PRESETS, ["small"]).format_help()
    for name in SCRIPTS:  # docstrings are used for the help alone
        assert (REPO / f"{name}.py").read_text().count("__doc__") == 1


def train_for_ever(folder):
    if os.fork() == 0:  # as the processes that decode images, which Ctrl-C reaches, too
        signal.raise_signal(signal.SIGINT)
    os.wait()
    fit(make_run(folder, "-e", "1000000"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_one_line_and_128_more(tmp_path, number):
    child = Child(tmp_path, in_launch, train_for_ever, tmp_path)
    wait_for((tmp_path / "x/name/last.pt").exists, 60, "checkpoint")
    os.kill(child.process.pid, number)
    assert child.wait(30).status == 128 + number
    assert child.stderr.count("\n") == 1
    assert f"x.py: stopped by {number.name}; the same command resumes" in child.stderr
    assert load_last(tmp_path)["history"]


def on_windows(folder):
    """What is missing there: POSIX modules and calls."""
    sys.modules["fcntl"] = None
    sys.modules["resource"] = None
    for name in ("sysconf", "sysconf_names", "getuid", "fork"):
        if hasattr(os, name):
            delattr(os, name)
    module = importlib.reload(common)
    assert module.fcntl is None
    importlib.reload(importlib.import_module("ddu"))
    run = make_run(folder)
    fit(run)
    run.report(rows_of([1]), ["accuracy"])


def test_scripts_start_without_posix_modules(tmp_path):
    Child(tmp_path, on_windows, tmp_path).value()


@pytest.mark.parametrize("count", [1, 6, 7, 100])
def test_colours_differ(count):
    assert len({str(colour) for colour in common.colours(count)}) == count


def parse_with_matplotlib(folder, error):
    (folder / "matplotlib").mkdir()
    (folder / "matplotlib" / "__init__.py").write_text(f"raise {error}")
    sys.path.insert(0, str(folder))
    return parse().plot, parse("--no-plot").plot


@pytest.mark.parametrize("error", ["ImportError('no module')", "AttributeError('_ARRAY_API')"])
def test_without_matplotlib_or_with_a_broken_one_pictures_are_skipped(tmp_path, error):
    child = Child(tmp_path, parse_with_matplotlib, tmp_path, error)
    assert child.value() == (False, False)
    assert child.stdout.count("\n") == 1 and "pip install matplotlib" in child.stdout


# ---- The README ---------------------------------------------------------------------------------


def blocks(file="README.md", language=""):
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (REPO / file).read_text(), re.M | re.S)


def page_commands(file):
    """The commands of a page: of fenced blocks (joined, chains split), and `python X.py ...`."""
    lines = []
    for line in "\n".join(blocks(file)).replace("\\\n", " ").splitlines():
        lines += [part.strip() for part in re.split(r"&&|;|\|", line)]
    text = re.sub(r"^```.*?^```", "", (REPO / file).read_text(), flags=re.M | re.S)
    spans = re.findall(r"`([^`]+)`", text)
    return lines + [" ".join(span.split()) for span in spans]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_of_the_pages_and_the_docstring_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(name)
    pattern = rf"([A-Z_]+=\S+ )?((python|torchrun)\b.* )?{name}\.py( -|$)"
    found = page_commands("README.md") + page_commands("tests/RESULTS.md")
    found = [line for line in found if re.match(pattern, line.split("#")[0].strip())]
    usage = script.__doc__.split("Usage:")[1].split("\n\n")[0].replace("\\\n", " ")
    commands = [line.strip() for line in usage.splitlines() if f"{name}.py" in line]
    assert found and len(commands) >= 2
    for line in found + commands:  # published results rest on them
        words = shlex.split(line.replace("…", ""), comments=True)
        if {"--load", "--map-paths"} & set(words):
            continue  # the options are in the file
        for file in filter(re.compile(r"[\w.]+\.(ckpt|npz)").fullmatch, words):
            (tmp_path / file).touch()  # some are looked for at once
        script.parse_args(words[words.index(f"{name}.py") + 1:])


def test_the_files_of_the_pages_commands_exist():
    for line in page_commands("README.md") + page_commands("tests/RESULTS.md"):
        command = line.split("#")[0]
        for script in re.findall(r"(?:python|torchrun)\b.*?(?<![$\w])([\w/]+\.py)\b", command):
            assert script == "mine.py" or (REPO / script).exists(), line
    for file in ("README.md", "tests/RESULTS.md"):
        text = (REPO / file).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert ((REPO / file).parent / target).exists(), target


def test_the_front_door_is_short():
    text = (REPO / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 180 and max(map(len, lines)) <= 120
    # Without an empty line, all that follows would belong to the table in HTML, unformatted.
    assert "</table>\n\n" in text


def write_images(folder):
    """Ten gray images; those of different folders differ."""
    folder.mkdir(parents=True)
    for i in range(10):
        gray = (37 * i + len(str(folder))) % 256
        Image.new("RGB", (8, 8), (gray, gray, gray)).save(folder / f"{i}.png")


def test_the_readmes_example_of_own_data_runs(tmp_path, monkeypatch):
    """With small images and one epoch."""
    for part in ("images/train/cat", "images/train/dog", "images/test/cat", "images/test/dog",
                 "new_images"):
        write_images(tmp_path / part)
    # The weights of ImageNet, as if they had been downloaded: random ones here.
    name = Path(models.ResNet18_Weights.DEFAULT.url).name
    weights = tmp_path / "torch/hub/checkpoints" / name
    weights.parent.mkdir(parents=True)
    torch.save(models.resnet18().state_dict(), weights)
    torch.save(models.resnet18(num_classes=2).state_dict(), tmp_path / "mine.pt")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.chdir(tmp_path)
    [example] = [block for block in blocks() if "new_images" in block]
    assert example.count("torchvision/resnet18") == 2
    example = example.replace("folder:images", "folder:images --epochs 1 --no-plot")
    example = example.replace("resnet18", "resnet18 --image-size 32")
    for line in example.splitlines():
        python, script, *argv = shlex.split(line, comments=True)
        assert (python, script) == ("python", "ddu.py")
        importlib.import_module("ddu").main(argv)
    header, *lines = (tmp_path / "runs/ddu/tuned/predictions.csv").read_text().splitlines()
    assert len(lines) == 10
    [explained] = [block for block in blocks() if "density_percentile" in block]
    names = [line.split()[0] for line in explained.splitlines()]
    assert header.split(",") == ["file"] + names


def test_the_readmes_comparison_of_scripts_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [example] = [block for block in blocks() if "$script" in block]
    [shared] = re.findall(r'OPTIONS="(.*)"', example)
    [scripts] = re.findall(r"for script in (.*?);", example)
    for script in scripts.split():
        args = importlib.import_module(script).parse_args(shared.split())
        assert (args.name, args.image_size) == ("images", 64)
    assert len(scripts.split()) == 5


def run_file(path, *argv):
    os.chdir(path.parent)
    sys.argv = [path.name, *argv]
    runpy.run_path(str(path), run_name="__main__")


def test_the_readmes_network_of_ones_own_runs(tmp_path):
    [code] = [block for block in blocks(language="python") if "common.launch" in block]
    path = tmp_path / "mine.py"
    path.write_text(code)
    options = "--model mine --dataset glyphs --epochs 1 --limit-train 300 --ood --no-plot"
    Child(tmp_path, run_file, path, *options.split()).value()
    assert [*tmp_path.glob("runs/ddu/glyphs-mine-*/results.csv")]
