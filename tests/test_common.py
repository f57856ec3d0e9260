"""The run layer of common.py: options, processes, files, runs, tables, signals; and the README."""

import contextlib
import csv
import fcntl
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (CPU, REPO, SCRIPTS, Child, assert_same_checkpoints, free_port, snapshot,
                      start_ranks, strict_json, wait_for)
from PIL import Image
from scipy.stats import entropy, kstest, sem
from torch import nn

import common
from common import UserError

# ---- Options ------------------------------------------------------------------------------------

PRESETS = {
    "": dict(epochs=3, batch_size=32, lr=0.5),
    "main": dict(taste="sweet", lr=0.25),
    "other": dict(epochs=9),
    "folder": dict(taste="own"),
}
MODES = {"quick": dict(epochs=1, lr=0.75)}


def parse(*argv):
    parser = common.Parser("One line.\n\nMore.", PRESETS, "main", modes=MODES)
    add = parser.group("method").add_argument
    add("--taste", default="none", help="taste (paper: bitter)")
    add("--quick", action="store_true", help="train for a short time")
    add = parser.group("evaluation").add_argument
    add("--measure", type=common.between(0, 1), default=0.5, help="a distance")
    return parser.parse([*argv, *CPU])


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_presets_are_defaults_and_do_not_leak_into_each_other():
    args = parse()
    assert (args.dataset, args.epochs, args.lr, args.taste) == ("main", 3, 0.25, "sweet")
    args = parse("--dataset", "other")  # nothing of the default data set's preset
    assert (args.epochs, args.lr, args.taste) == (9, 0.5, "none")
    assert parse("--dataset", "folder:/some/where").taste == "own"
    args = parse("--dataset", "folder:/some/where", "--preset", "other")
    assert (args.taste, args.epochs, args.dataset) == ("none", 9, "folder:/some/where")


def test_a_folder_is_the_same_with_a_slash_at_its_end():
    assert parse("--dataset", "folder:/some/where/").dataset == "folder:/some/where"


def test_the_command_line_wins_over_modes_and_these_over_presets():
    args = parse("--dataset", "other", "-e", "0", "-b", "5", "--lr", "0", "--no-plot", "--compile")
    assert (args.epochs, args.batch_size, args.lr) == (0, 5, 0.0)  # 0 is a value, not an absence
    assert args.plot is False and args.compile is True
    assert args.explicit == {"dataset", "epochs", "batch_size", "lr", "plot", "compile", "device"}
    args = parse("--quick")
    assert (args.epochs, args.lr, args.taste) == (1, 0.75, "sweet")
    args = parse("--quick", "--lr", "0.25")  # the preset's value, but given
    assert (args.epochs, args.lr) == (1, 0.25)


def test_what_identifies_a_run_is_printed(tmp_path, capsys):
    args = parse("--dataset", "other", "--measure", "0.25", "--workers", "1")
    assert {"dataset", "preset", "width", "seed", "lr", "taste", "quick"} <= set(args.identity)
    assert not {"measure", "workers", "runs", "predict", "help"} & set(args.identity)
    args.out_dir = str(tmp_path)
    common.Run(args, "x", "run")
    line, _ = capsys.readouterr().out.splitlines()
    for words in ("dataset other", "epochs 9", "taste none", "1 process(es) of 1 thread(s)"):
        assert words in line
    assert "measure" not in line and "data_dir" not in line


def test_help_shows_the_defaults_of_the_chosen_data_set(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--dataset", "other", "--lr", "9", "--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("training set [default: 9]", "processes) [default: 32]", "[default: main]",
                  "(torch.compile) [default: off]", "matplotlib) [default: on]", "paper: bitter"):
        assert words in text, words
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
    ("--dataset nonsense", "--dataset nonsense"), ("--dataset folder", "--dataset folder"), ("--preset nonsense", "--preset nonsense"),
    ("--dataset", "--dataset"), ("--measure 1.1", "--measure"), ("--eval --fresh", "--fresh"),
    (f"-e {10**400}", "--epochs"), ("--device cuda:1", "--device")])
def test_bad_options_are_refused_by_name(argv, named):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    assert named in one_line(error)


def test_devices_that_are_not_found(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(UserError, match="--device cuda: process 99 needs a GPU of its own"):
        common.start("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device mps: not found"):
        common.start("mps")


def test_options_without_effect_are_refused_only_where_they_were_given():
    args = parse("--batch-size", "32")
    common.refuse(args, ["lr", "taste"], "here")
    with pytest.raises(UserError, match="--batch-size has no effect with --features; remove this"):
        common.refuse(args, ["lr", "batch_size"], "with --features")


def test_copies_of_options_and_names_of_runs():
    args = parse()
    assert common.with_options(args, lr=9.0).lr == 9.0 and args.lr == 0.25
    assert not {"explicit", "identity"} & set(common.options(args))
    assert common.join_name("cifar10", None, "w0.5", 3) == "cifar10-w0.5-3"
    assert common.join_name("folder:/a b/\u00fc", "x") == "folder_a_b_\u00fc-x"


# ---- Processes ----------------------------------------------------------------------------------


def test_derive_seed_mixes_and_seed_all_seeds_everything():
    keys = list(itertools.product(range(9), repeat=3))
    seeds = [common.derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)

    def draw(*key):
        common.seed_all(*key)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw(3, 1) == draw(3, 1)
    assert all(a != b for a, b in zip(draw(3, 1), draw(3, 2)))


def test_seeded_noise_depends_on_its_key_alone():
    device = torch.device("cpu")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    noise = common.seeded_noise((40, 50), device, 1, 2)
    assert torch.equal(torch.rand(3), expected)  # other random numbers are not disturbed
    assert torch.equal(common.seeded_noise((40, 50), device, 1, 2), noise)
    for other in ((2, 1), (1, 3), (1,)):
        assert not torch.equal(common.seeded_noise((40, 50), device, *other), noise)
    assert kstest(noise.flatten(), "norm").pvalue > 0.01


def raise_user_error(text):
    raise UserError(text)


def error_of(function, *arguments):
    """The text of the UserError or RuntimeError that a call raises."""
    try:
        function(*arguments)
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def as_if_alone(value):
    """Collective calls that would hang if the other process were waited for."""
    total = common.all_reduce(torch.tensor(2.0)).item()
    nested = common.on_main(lambda: 5)
    nested_error = error_of(common.on_main, raise_user_error, "nested")
    return [value, common.rank(), common.world_size(), common.gather_objects(1), total, nested,
            nested_error, common.on_each_machine(lambda: 6)]


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
    common.start("cpu")
    rank = common.rank()

    def first_makes_a_file():
        if rank == 0:
            time.sleep(0.2)
            (folder / "made").touch()
        return (folder / "made").exists()

    def fails_on_the_last():
        if rank == 1:
            raise UserError("no download")

    found = {"rank": (rank, common.world_size(), common.is_main())}
    found["sum"] = common.all_reduce(torch.tensor(float(rank + 1))).item()
    found["broadcast"] = common.broadcast({"a": torch.arange(3), "b": f"from {rank}"})
    found["on_main"] = common.on_main(as_if_alone, f"from {rank}")
    found["on_main_error"] = error_of(common.on_main, raise_user_error, f"from {rank}")
    found["each"] = common.on_each_machine(first_makes_a_file)
    found["each_error"] = error_of(common.on_each_machine, fails_on_the_last)
    os.environ["LOCAL_RANK"] = "0"  # two machines
    found["machines_error"] = error_of(common.on_each_machine, fails_on_the_last)
    found["rows"] = [gather_shards(sizes) for sizes in SHARDS]
    for name, step in (("twice", 0), ("missing", 3)):
        index = torch.tensor([0, 1]) + step * rank
        found[name] = error_of(common.gather_rows, [{"index": index}])
    found["all"] = common.gather_objects(10 * rank)
    dist.destroy_process_group()
    return found


def test_collectives_of_two_processes(ranks, tmp_path):
    main, other = ranks(in_collectives, tmp_path)
    assert main["rank"] == (0, 2, True) and other["rank"] == (1, 2, False)
    for found in (main, other):
        assert found["sum"] == 3 and found["all"] == [0, 10]
        assert same(found["broadcast"], {"a": torch.arange(3), "b": "from 0"})
        assert found["on_main"] == ["from 0", 0, 1, [1], 2.0, 5, "UserError: nested", 6]
        assert found["on_main_error"] == "UserError: from 0"
        assert found["each"] is True
        assert found["each_error"] == found["machines_error"] == "UserError: no download"
    for sizes, rows in zip(SHARDS, main["rows"], strict=True):
        n = torch.arange(float(sum(sizes)))
        assert same(rows, {"values": torch.stack([2 * n, 3 * n], 1), "number": n.int()})
    assert other["rows"] == [{}, {}, {}]
    for wrong in ("twice", "missing"):
        assert "RuntimeError: rows are missing or occur twice" in main[wrong]
        assert other[wrong] is None


def in_a_run(folder):
    """What each process sees of a run; machines need not share a disk."""
    common.start("cpu")
    rank = common.rank()
    found = {}
    run = make_run(folder / str(rank))
    run.save("state", value=rank)
    found["load"] = run.load("state")["value"]
    for name in ("made", "read"):
        found[name] = run.keep("kept", {"of": 1}, lambda: {"value": rank})["value"]
    fit(run)
    run.report(rows_of([1]), ["accuracy"])
    make_run(folder / str(rank), "--eval")
    found["refusal"] = error_of(make_run, folder / str(rank), "--lr", "0.3")
    dist.destroy_process_group()
    return found


def test_a_run_of_two_processes(ranks, tmp_path):
    for found in ranks(in_a_run, tmp_path):
        assert found["load"] == found["made"] == found["read"] == 0
        assert "made with other options: --lr 0.25" in found["refusal"]
    assert not (tmp_path / "1").exists()
    results = strict_json(tmp_path / "0" / "x" / "name" / "results.json")
    assert results["environment"]["processes"] == 2


def in_launch(main, *arguments):
    sys.argv = ["folder/x.py"]
    common.launch(lambda: main(*arguments))


def refused_by_the_main_process():
    common.start("cpu")
    common.on_main(raise_user_error, "file\n not found")


def refused_by_all(folder):
    make_run(folder, "-b", "1")


def test_an_error_of_the_main_process_ends_all_processes_in_one_line(tmp_path):
    """None waits for another that has stopped, and none prints a traceback."""
    for child in start_ranks(tmp_path, 2, in_launch, refused_by_the_main_process):
        assert child.wait(60).status == 2
        assert child.stderr == "x.py: error: file not found\n"


def test_what_all_processes_see_ends_all_of_them(tmp_path):
    main, other = start_ranks(tmp_path, 2, in_launch, refused_by_all, tmp_path)
    assert main.wait(60).status == 2
    assert "--batch-size 1: this is the global batch size" in main.stderr
    assert main.stderr.count("\n") == 1
    assert other.wait(60).status != 0  # it may find the connection closed before it has joined
    assert not (tmp_path / "x").exists()


TORCHRUN_SCRIPT = """
import common

def fail():
    raise common.UserError("file not found")

def main():
    common.start("cpu")
    common.on_main(fail)

common.launch(main)
"""


def test_under_torchrun_an_error_is_printed_last_and_once(tmp_path):
    (tmp_path / "x.py").write_text(TORCHRUN_SCRIPT)
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
    for rank in range(2):
        wait_for((tmp_path / f"started{rank}").exists, what=f"process {rank}")
        assert is_locked(tmp_path / f"lock{rank}")
    agent.process.kill()
    for rank in range(2):
        wait_for(lambda rank=rank: not is_locked(tmp_path / f"lock{rank}"), 30, f"end of {rank}")


def batch_norm_derivatives(rows, wrap=lambda layer: None):
    """Of the rows of a float64 batch far from zero mean, after two training forwards: output, first
    and second gradients, running statistics, output in eval mode."""
    generator = torch.Generator().manual_seed(5)
    batch = 5 + 3 * torch.randn(7, 3, 4, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 3, 4, 5, generator=generator, dtype=torch.float64)
    layer = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2, dtype=torch.float64)
    nn.init.uniform_(layer.weight, -1, 2, generator)
    nn.init.uniform_(layer.bias, generator=generator)
    wrap(layer)
    x = batch[rows].requires_grad_()
    layer(batch[rows] + 1)
    y = layer(x)
    loss = (y.tanh() * weight[rows]).sum()
    first = torch.autograd.grad(loss, [x, layer.weight, layer.bias], create_graph=True)
    penalty = first[0].square().sum() / 2
    second = torch.autograd.grad(penalty, [x, layer.weight])
    statistics = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    tensors = [y, *first, *second, *statistics, layer.eval()(x)]
    return [tensor.detach() for tensor in tensors]


NARROW = torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(6)).bfloat16() + 3
ONE_PIXEL = torch.tensor([1.0, -2.0, 3.0]).reshape(1, 3, 1, 1)


def forward_share(batch, cut):
    """A new layer's output for this process's share of a batch, and its running statistics."""
    layer = common.GlobalBatchNorm2d(3)
    rows = slice(0, cut) if common.rank() == 0 else slice(cut, None)
    return [layer(batch[rows]).detach(), layer.running_mean, layer.running_var]


def in_batch_norm(cuts):
    device = common.start("cpu")

    def wrap(layer):
        net = common.data_parallel(nn.Sequential(nn.Conv2d(1, 1, 1), layer), device)
        assert isinstance(net, nn.parallel.DistributedDataParallel)
        assert type(layer) is common.GlobalBatchNorm2d and len(layer.state_dict()) == 5

    found = []
    for cut in cuts:
        rows = slice(0, cut) if common.rank() == 0 else slice(cut, None)
        found.append((batch_norm_derivatives(rows, wrap), forward_share(NARROW, cut)))
    one_pixel = forward_share(ONE_PIXEL, 1)
    dist.destroy_process_group()
    return found, one_pixel


def test_global_batch_norm_equals_batch_norm_of_the_whole_batch(ranks):
    (main, one_pixel), (other, _) = ranks(in_batch_norm, (7, 3))
    whole = batch_norm_derivatives(slice(None))
    layer = nn.BatchNorm2d(3)
    narrow_output = layer(NARROW.float()).bfloat16()
    close = dict(rtol=1e-9, atol=1e-11)
    for (a, narrow_a), (b, narrow_b) in zip(main, other):  # first: the second has no image
        for i in (0, 1, 4, 9):  # y, dx, ddx, eval y: rows of the batch
            assert torch.allclose(torch.cat([a[i], b[i]]), whole[i], **close), i
        for i in (2, 3, 5):  # of the affine map: each process's share
            assert torch.allclose(a[i] + b[i], whole[i], **close), i
        for i in (6, 7, 8):  # running statistics
            assert torch.allclose(a[i], whole[i], **close) and torch.equal(a[i], b[i]), i
        # Of bfloat16, the statistics are computed in float32.
        assert torch.allclose(torch.cat([narrow_a[0], narrow_b[0]]), narrow_output, rtol=0.01)
        assert torch.allclose(narrow_a[1], layer.running_mean)
        assert torch.allclose(narrow_a[2], layer.running_var)
    # One pixel has the variance 0 / 1, and not 0 / 0.
    y, mean, variance = one_pixel
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.allclose(mean, 0.1 * ONE_PIXEL.flatten())
    assert torch.allclose(variance, torch.full((3,), 0.9))


# ---- Files --------------------------------------------------------------------------------------


def test_write_is_whole_or_nothing_and_synced_before_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "x"
    calls = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, f=function: calls.append(f) or f(*args))
    common.write(path, "old")
    assert [call.__name__ for call in calls] == ["fsync", "replace"]

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):  # a disk that fills up
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(UserError, match="No space left") as error:
                common.write(path, "new")
        assert str(path) in one_line(error)
    for place in (tmp_path / "absent" / "x", path / "below a file", tmp_path):
        with pytest.raises(UserError, match="cannot write"):
            common.write(place, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def checkpoint(path):
    """Write a file with tensors of several types; returns (its bytes, its content)."""
    state = {"config": {"a": 1, "b": [1, "x", None], "c": True}, "t": torch.arange(3),
             "net": {"w": torch.randn(40, 5), "half": torch.ones(7).bfloat16()}, "f": 0.5}
    common.write(path, common.to_bytes(state))
    return path.read_bytes(), state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def places_of_data(whole):
    """First, middle and last byte of each record of a zip archive."""
    places = set()
    for record in zipfile.ZipFile(io.BytesIO(whole)).infolist():
        head = whole[record.header_offset:]
        name_length = int.from_bytes(head[26:28], "little")
        extra_length = int.from_bytes(head[28:30], "little")
        start = record.header_offset + 30 + name_length + extra_length
        places |= {start, start + record.file_size // 2, start + record.file_size - 1}
    return places


def test_a_flipped_byte_in_any_record_is_found(tmp_path):
    path = tmp_path / "last.pt"
    whole, state = checkpoint(path)
    assert same(common.load_checkpoint(path), state)
    data = places_of_data(whole)
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
    folder = tmp_path / "files"
    trap = tmp_path / "trap"
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


def test_arrays_are_read_from_plain_files_alone(tmp_path):
    path = tmp_path / "whole.npz"
    np.savez(path, a=np.arange(3.0), b=np.ones((2, 2)))
    np.savez(tmp_path / "hostile.npz", a=np.array([Hostile(tmp_path / "trap")], dtype=object))
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:100])
    arrays = common.load_arrays(path, ("a", "b"))
    assert arrays["a"].tolist() == [0, 1, 2] and arrays["b"].shape == (2, 2)
    for name, names, message in (("whole", "ac", "needs the arrays a, c; it has a"),
                                 ("absent", "a", "file not found"), ("cut", "a", "not a readable"),
                                 ("hostile", "a", "not a readable")):
        with pytest.raises(UserError, match=message) as error:
            common.load_arrays(tmp_path / f"{name}.npz", tuple(names))
        assert name in one_line(error)
    assert not (tmp_path / "trap").exists()


def test_as_json_is_strict_json():
    value = {"nan": math.nan, "list": (1, -math.inf, np.float32(0.5), np.int64(3)),
             7: torch.tensor([1.0, math.nan]), "flag": True, "np_flag": np.bool_(False),
             "path": REPO, "none": None, "array": np.array([[1, 2]]), "big": 2**60}
    back = json.loads(json.dumps(common.as_json(value), allow_nan=False))
    assert back == {"nan": None, "list": [1, None, 0.5, 3], "7": [1.0, None], "flag": True,
                    "np_flag": False, "path": str(REPO), "none": None, "array": [[1, 2]],
                    "big": 2**60}
    assert back["flag"] is True and back["np_flag"] is False


def test_a_digest_changes_with_every_weight_and_buffer():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).bfloat16())

    digests = {common.digest(make())}
    assert digests == {common.digest(make())}
    for name in make().state_dict():
        net = make()
        net.state_dict()[name].view(-1)[-1] += 1
        digests.add(common.digest(net))
    assert len(digests) == 1 + len(make().state_dict())


# ---- Runs ---------------------------------------------------------------------------------------


def make_run(folder, *argv, name="name"):
    return common.Run(parse("--out-dir", str(folder), *argv), "x", name)


def fit(run, epochs=3, spoil=None, stop=None, name="last"):
    """A small training by `run.epochs`; spoil(net, loss) before each end, stop: in that epoch."""
    common.seed_all(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in run.epochs(epochs, name, net=net, optimiser=optimiser):
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
        run.end_epoch(loss.detach(), accuracy=torch.tensor(0.5), lr=0.05, examples=32)
    return net.state_dict()


def test_epochs_resume_exactly_and_leave_a_log(tmp_path, capsys):
    whole = fit(make_run(tmp_path / "whole"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("last ")]
    assert len(lines) == 3
    for words in ("last 1/3", "loss", "accuracy 0.5", "lr 0.05", "examples_per_s", "s left"):
        assert words in lines[0]
    for stop in (1, 2):
        assert fit(make_run(tmp_path / "cut"), stop=stop) is None
    assert not capsys.readouterr().err
    run = make_run(tmp_path / "cut")
    assert same(fit(run), whole)
    folder = tmp_path / "cut" / "x" / "name"
    assert_same_checkpoints(tmp_path / "whole" / "x" / "name" / "last.pt", folder / "last.pt")
    rows = [json.loads(line) for line in (folder / "last.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows == run.history
    for row in rows:
        assert row["examples_per_s"] * row["seconds"] == pytest.approx(32)
    before = snapshot(folder)
    assert same(fit(make_run(tmp_path / "cut")), whole)
    assert snapshot(folder) == before


def test_a_checkpoint_of_another_network_or_training_set_is_refused(tmp_path, capsys):
    class Set(list):
        classes = ("cat", "dog")

    def train(net, train_set, *argv):
        run = make_run(tmp_path, *argv)
        for epoch in run.epochs(1, "last", train_set, net=net):
            run.end_epoch(1.0)

    def network(activation, stride=1):
        return nn.Sequential(nn.Conv2d(1, 2, 3, stride=stride), activation, nn.BatchNorm2d(2))

    train(network(nn.ReLU()), Set("abcd"))
    capsys.readouterr()
    train(network(nn.ReLU()), Set("abcd"))
    assert "last: trained already; --fresh trains again" in capsys.readouterr().out
    with_processes = network(nn.ReLU())
    with_processes[2].__class__ = common.GlobalBatchNorm2d  # as `data_parallel` does
    train(with_processes, Set("abcd"))
    renamed = Set("abcd")
    renamed.classes = ("cat", "cow")
    for net, train_set, what in ((network(nn.Tanh()), Set("abcd"), "network"),
                                 (network(nn.ReLU(), stride=2), Set("abcd"), "network"),
                                 (network(nn.ReLU()), Set("abc"), "training set"),
                                 (network(nn.ReLU()), renamed, "training set")):
        for argv in ([], ["--eval"]):
            with pytest.raises(UserError, match=f"made with another {what}; use another --name"):
                train(net, train_set, *argv)
        train(net, train_set, "--fresh")
        train(network(nn.ReLU()), Set("abcd"), "--fresh")


def test_what_a_network_function_returns_is_checked():
    layers = [nn.Conv2d(3, 5, 3), nn.Flatten()]
    assert common.check_layers("mine", (layers, 20), (3, 4, 4)) == (layers, 20)
    assert layers[0].training
    for made in (nn.Sequential(*layers), layers, (layers, "20"), (layers, 20, 1)):
        with pytest.raises(UserError, match="--model mine: its function must return the list"):
            common.check_layers("mine", made, (3, 4, 4))
    with pytest.raises(UserError, match=r"outputs \[1, 20\] of one image, .* returns 7"):
        common.check_layers("mine", (layers, 7), (3, 4, 4))
    with pytest.raises(UserError, match=r"fails on images \(3, 2, 2\)"):
        common.check_layers("mine", (layers, 20), (3, 2, 2))


def test_a_log_is_written_again_from_its_checkpoint(tmp_path):
    """A kill between the two files, a truncated or a deleted log."""
    whole = fit(make_run(tmp_path))
    log = tmp_path / "x" / "name" / "last.jsonl"
    text = log.read_text()
    for damage in (lambda: log.write_text(text[:20]), log.unlink):
        damage()
        assert same(fit(make_run(tmp_path)), whole)
        assert log.read_text() == text


def test_epochs_without_a_name_are_not_saved(tmp_path):
    run = make_run(tmp_path)
    fit(run, name=None)
    assert len(run.history) == 3 and not list(tmp_path.iterdir())


def test_a_loop_that_forgets_to_end_its_epoch_is_told(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match="must call end_epoch once"):
        for _ in run.epochs(2, "last"):
            pass


def test_a_clock_that_stands_still(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    run = make_run(tmp_path)
    fit(run)
    assert all(math.isfinite(row["examples_per_s"]) for row in run.history)
    run.report(rows_of([1]), ["accuracy"])
    assert strict_json(run.dir / "results.json")["seconds"] == 0


def test_nothing_is_written_before_the_first_state(tmp_path):
    run = make_run(tmp_path)
    make_run(tmp_path, "--fresh")
    assert list(tmp_path.iterdir()) == []
    fit(run)
    before = snapshot(tmp_path)
    make_run(tmp_path, "--fresh", "--lr", "0.3")
    assert snapshot(tmp_path) == before


def test_eval_needs_a_finished_run(tmp_path):
    with pytest.raises(UserError, match="no run in .*; train it first"):
        make_run(tmp_path, "--eval")
    assert not (tmp_path / "x").exists()
    fit(make_run(tmp_path), stop=2)
    with pytest.raises(UserError, match="2 of 3 epochs; finish this run first"):
        fit(make_run(tmp_path, "--eval"))
    with pytest.raises(UserError, match="fit.pt was not found, or .*; finish this run first"):
        make_run(tmp_path, "--eval").keep("fit", {}, dict)


def test_eval_may_change_how_it_is_computed_and_names_the_options_to_add(tmp_path):
    same_run = ["-e", "4", "--quick"]
    whole = fit(make_run(tmp_path, *same_run))
    free = "-b 7 --amp bf16 --limit-steps 2 --measure 0.1 --runs 4 --workers 0".split()
    assert same(fit(make_run(tmp_path, "--eval", *same_run, *free)), whole)
    with pytest.raises(UserError, match="other options: --lr 0.75; use these to evaluate it"):
        make_run(tmp_path, "--eval", *same_run, "--lr", "0.3")
    with pytest.raises(UserError) as error:
        make_run(tmp_path, "--eval", "--preset", "other", "--taste", "bitter", "--lr", "0.75")
    for words in ("(no --preset)", "--epochs 4", "--quick", "--taste sweet"):
        assert words in one_line(error)
    assert same(fit(make_run(tmp_path, *same_run)), whole)  # still the options of the training


def test_a_read_only_run_can_be_evaluated(tmp_path, monkeypatch, capsys):
    whole = fit(make_run(tmp_path))
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    run = make_run(tmp_path, "--eval")
    capsys.readouterr()
    assert same(fit(run), whole)
    run.report(rows_of([1]), ["accuracy"])
    out = capsys.readouterr().out
    assert out.count("skipped: writing to") == 1 and "accuracy" in out
    assert snapshot(tmp_path) == before


def test_fresh_starts_over_once(tmp_path):
    whole = fit(make_run(tmp_path))
    run = make_run(tmp_path)
    run.report(rows_of([1]), ["accuracy"])
    run.save("old", value=1)
    run = make_run(tmp_path, "--fresh", "--lr", "0.3")  # other options, too
    assert run.load("last") is None
    assert set(snapshot(run.dir)) == {"options.json"}
    fit(run, stop=1)
    assert len(run.load("last")["history"]) == 1  # what it wrote itself counts
    with pytest.raises(UserError, match="--lr 0.3"):
        make_run(tmp_path)
    assert same(fit(make_run(tmp_path, "--fresh")), whole)


class Killed(BaseException):
    """What a test raises where a process might be killed."""


@pytest.mark.parametrize("deleted", range(6))
def test_a_start_with_fresh_that_is_killed_leaves_no_mixture(tmp_path, monkeypatch, deleted):
    """Whatever it still holds belongs to the old options, if these are there, or else it is empty;
    both commands can go on."""
    run = make_run(tmp_path)
    whole = fit(run)
    run.report(rows_of([1]), ["accuracy"])
    old_files = snapshot(run.dir)
    unlink = Path.unlink
    calls = []

    def unlink_or_die(path):
        calls.append(path)
        if len(calls) > deleted:
            raise Killed
        unlink(path)

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_die)
        patch.setattr(common, "write", die)
        with pytest.raises(Killed):
            make_run(tmp_path, "--fresh", "--lr", "0.3").load("last")
    files = snapshot(run.dir)
    assert len(files) == len(old_files) - deleted and files.items() <= old_files.items()
    assert ("options.json" in files) == bool(files)
    assert same(fit(make_run(tmp_path)), whole)
    assert fit(make_run(tmp_path, "--fresh", "--lr", "0.3"))


@pytest.mark.parametrize("spoil", ["loss", "weight", "mean", "variance"])
def test_what_is_not_finite_never_replaces_a_good_checkpoint(tmp_path, spoil):
    """The running statistics, too: they are buffers, no parameters."""
    def ruin(net, loss):
        if spoil == "loss":
            return loss * math.nan
        tensors = {"weight": net[0].weight, "mean": net[1].running_mean,
                   "variance": net[1].running_var}
        tensors[spoil].data[1] = math.nan if spoil == "weight" else math.inf
        return loss

    for _ in range(2):  # and again: nothing was lost or changed
        with pytest.raises(UserError, match="diverged in epoch 2: .* Lower --lr") as error:
            fit(make_run(tmp_path), spoil=ruin)
        assert one_line(error)
        state = common.load_checkpoint(tmp_path / "x" / "name" / "last.pt")
        assert len(state["history"]) == 1 and common.all_finite(state)
    assert same(fit(make_run(tmp_path)), fit(make_run(tmp_path / "calm")))


def test_a_stage_that_diverges_names_its_own_option(tmp_path):
    """A rate that acts on another stage would not help."""
    run = make_run(tmp_path)
    for _ in run.epochs(1, "second"):
        with pytest.raises(UserError, match="checkpoint before it is kept. Lower --lr-final$"):
            run.end_epoch(math.nan, advice="Lower --lr-final")
        break


@pytest.mark.parametrize("key, value", [
    ("optimiser", None), ("net", {"0.weight": torch.ones(2)}), ("net", "text"), ("history", None),
    ("history", "abc"), ("history", 3), ("history", [1, 2, 3]), ("identity", None),
    ("identity", "text"), ("identity", ["lr"])])
def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(tmp_path, key, value):
    path = tmp_path / "x" / "name" / "last.pt"
    fit(make_run(tmp_path))
    state = torch.load(path, weights_only=True)
    states = [{**state, key: value}]
    if value is None:
        states.append({name: part for name, part in state.items() if name != key})
    for damaged in states:
        torch.save(damaged, path)
        before = path.read_bytes()
        with pytest.raises(UserError) as error:
            fit(make_run(tmp_path))
        assert "last.pt" in one_line(error) and path.read_bytes() == before


def test_a_directory_belongs_to_one_set_of_options(tmp_path):
    run = make_run(tmp_path, "--lr", "0.3")  # made while there is no run yet
    fit(make_run(tmp_path))
    make_run(tmp_path, "--measure", "0.1", "--no-plot", "--workers", "1", "--runs", "2")
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as error:
        make_run(tmp_path, "--lr", "0.3", "--taste", "bitter", "-b", "7", "--quick")
    for words in ("--lr 0.25", "--taste sweet", "--batch-size 32", "--no-quick", "another --name"):
        assert words in one_line(error)
    assert "seed" not in str(error.value)
    with pytest.raises(UserError, match="--lr 0.25"):
        fit(run)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("damage", ["{", "[1]", "[" * 100_000, None])
def test_damaged_options_are_one_line(tmp_path, damage):
    fit(make_run(tmp_path))
    path = tmp_path / "x" / "name" / "options.json"
    path.unlink()
    if damage is None:
        path.mkdir()
    else:
        path.write_text(damage)
    with pytest.raises(UserError, match="options.json is damaged|cannot read .*options.json"):
        make_run(tmp_path)


def hold(folder):
    make_run(folder).load("last")
    (folder / "held").touch()
    time.sleep(300)


def test_a_directory_belongs_to_one_process_and_forgets_what_a_killed_one_left(tmp_path):
    child = Child(tmp_path, hold, tmp_path)
    wait_for(lambda: (tmp_path / "held").exists() or not child.process.is_alive(), what="run")
    for argv in ([], ["--fresh", "--lr", "0.3"]):
        with pytest.raises(UserError, match="is locked by another process"):
            make_run(tmp_path, *argv).load("last")
    child.process.kill()
    child.process.join()
    left_over = tmp_path / "x" / "name" / ".last.pt.123.tmp"
    left_over.write_bytes(b"half a checkpoint")
    make_run(tmp_path).load("last")
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
        with pytest.raises(UserError, match="cannot (read|write to) "):
            make_run(tmp_path / place).load("last")
    assert (tmp_path / "file").read_text() == "kept"


def test_states_are_read_only_if_their_identity_is_the_same(tmp_path):
    run = make_run(tmp_path)
    assert run.load("fit") is None
    run.save("fit", {"samples": 3, "of": [1, 2]}, mean=torch.ones(2))
    state = make_run(tmp_path).load("fit", {"samples": 3, "of": (1, 2)})
    assert torch.equal(state["mean"], torch.ones(2))
    for other in ({"samples": 4, "of": [1, 2]}, {"samples": 3}, {}, None):
        assert make_run(tmp_path).load("fit", other) is None
    run.save("choice", value=1)  # made from the options of the run
    assert run.load("choice")["value"] == 1
    assert run.load("choice", {}) is None


def test_keep_makes_a_state_anew_when_its_identity_differs(tmp_path):
    made = []

    def make():
        made.append(len(made))
        return {"value": torch.tensor(made[-1])}

    values = []
    for weights in ("a", "a", "b", "b", "a"):
        state = make_run(tmp_path).keep("fit", {"weights": weights}, make)
        values.append(state["value"].item())
    assert values == [0, 0, 1, 1, 2]
    assert make_run(tmp_path, "--eval").keep("fit", {"weights": "a"}, make)["value"] == 2
    with pytest.raises(UserError, match="fit.pt"):
        make_run(tmp_path, "--eval").keep("fit", {"weights": "c"}, make)
    with pytest.raises(UserError, match="bad: a value is not finite"):
        make_run(tmp_path).keep("bad", {}, lambda: {"value": torch.tensor(math.inf)})
    assert not (tmp_path / "x" / "name" / "bad.pt").exists()


# ---- Rows, reports, tables ----------------------------------------------------------------------


def rows_of(seeds, shift=0.0):
    """Two rows for each seed: predictions on the set t, and t against the set o_d."""
    generator = np.random.default_rng(0)
    rows = []
    for seed in seeds:
        accuracy, nll = generator.random(2) + shift
        rows.append({"method": "DDU", "seed": seed, "set": "t", "n": 10, "accuracy": accuracy,
                     "nll": nll})
        rows.append({"method": "DDU", "seed": seed, "set": "t", "against": "o_d", "n": 10,
                     "auroc": accuracy})
    return rows


def test_report_writes_results(tmp_path):
    rows = rows_of([1, 2, 3])
    rows[0]["odd"] = math.nan
    run = make_run(tmp_path, "--measure", "0.25")
    back = run.report(rows, ["accuracy", "auroc"], curve=torch.ones(2))
    content = strict_json(run.dir / "results.json")
    assert content["rows"] == back and back[0]["odd"] is None
    assert content["script"] == "x" and content["columns"] == ["accuracy", "auroc"]
    assert content["config"]["measure"] == 0.25 and content["config"]["device"] == "cpu"
    assert content["curve"] == [1.0, 1.0] and content["seconds"] > 0
    environment = content["environment"]
    assert environment["threads"] == environment["processes"] == 1
    assert environment["torch"] == torch.__version__
    assert {"commit", "python", "numpy", "device", "tf32_in_convolutions"} <= environment.keys()
    assert common.device_memory(run.args.device) > 1e8
    with open(run.dir / "results.csv") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 6 and float(cells[0]["accuracy"]) == rows[0]["accuracy"]
    assert [row["against"] for row in cells[:2]] == ["", "o_d"] and cells[0]["odd"] == ""


def test_report_prints_mean_and_standard_error_of_its_columns(tmp_path, capsys):
    rows = rows_of([1, 2, 3])
    run = make_run(tmp_path)
    run.report(rows, ["accuracy", "auroc"])
    out = capsys.readouterr().out
    for metric, part in (("accuracy", rows[::2]), ("auroc", rows[1::2])):
        values = [row[metric] for row in part]
        assert metric in out and f"{np.mean(values):.4f} ± {sem(values):.4f}" in out
    assert "nll" not in out and str(run.dir) in out
    run.report(rows, ["accuracy", "auroc"], shown=rows[::2])
    assert "auroc" not in capsys.readouterr().out


def table(capsys, *argv):
    capsys.readouterr()
    common.table([str(word) for word in argv])
    return capsys.readouterr()


@pytest.fixture
def runs_of_two_rates(tmp_path):
    """({learning rate: accuracies of three seeds}, the run directories)."""
    accuracies = {"0.1": [], "0.2": []}
    for lr, seed in itertools.product(accuracies, (1, 2, 3)):
        rows = rows_of([seed], shift=seed * float(lr))
        argv = ["--seed", str(seed), "--lr", lr]
        if seed == 2:
            argv.append("--compile")  # the same numbers
        run = make_run(tmp_path, *argv, name=f"{lr}-{seed}")
        run.report(rows, ["accuracy", "auroc"])
        accuracies[lr].append(rows[0]["accuracy"])
    return accuracies, sorted((tmp_path / "x").iterdir())


def test_table_pools_the_seeds_of_directories_and_separates_options(runs_of_two_rates, capsys):
    accuracies, folders = runs_of_two_rates
    text = table(capsys, *folders).out
    markdown = table(capsys, *folders, "--format", "markdown").out
    for shown in (text, markdown):
        for lr, values in accuracies.items():
            lines = [line for line in shown.splitlines() if f"lr={lr}" in line]
            assert len(lines) == 2  # of the set, and of the pair of sets
            assert f"{np.mean(values):.4f} ± {sem(values):.4f}" in lines[0]
            assert " 3 " in lines[0]
            assert "o_d" in lines[1]
        for other in ("nll", "seed=", "compile=", "name=", "taste="):
            assert other not in shown
    assert re.fullmatch(r"\|[|: -]+\|", markdown.splitlines()[1])
    assert "nll" in table(capsys, *folders, "--metrics", "nll").out


def test_a_run_is_named_by_what_differs_within_its_script(runs_of_two_rates, capsys, tmp_path):
    _, folders = runs_of_two_rates
    content = json.loads((folders[0] / "results.json").read_text())
    content["script"] = "y"
    content["config"] |= {"lr": 0.3, "coeff": 3}  # the only run of its script
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text(json.dumps(content))
    text = table(capsys, *folders, tmp_path / "other").out
    labels = {line.split("  ")[0] for line in text.splitlines() if "  DDU  " in line}
    assert labels == {"x lr=0.1", "x lr=0.2", "y"}
    text = table(capsys, folders[0], tmp_path / "other").out
    labels = [line.split("  ")[0] for line in text.splitlines() if "  DDU  " in line]
    assert labels == ["x", "y", "x", "y"]  # of the set, and of the pair of sets


def test_long_labels_of_runs_are_numbered_and_explained(runs_of_two_rates, capsys):
    accuracies, folders = runs_of_two_rates
    long = "taste=" + 50 * "z"
    path = folders[0] / "results.json"
    content = json.loads(path.read_text())
    content["config"]["taste"] = 50 * "z"
    path.write_text(json.dumps(content))
    text = table(capsys, *folders).out
    legend, shown = text.split("\n\n")[0].splitlines(), text.split("\n\n")[1]
    assert [line.split(": ")[0] for line in legend] == ["run 1", "run 2", "run 3"]
    assert long in legend[0] and "lr=0.1" in legend[1] and "lr=0.2" in legend[2]
    assert long not in shown and "lr=" not in shown
    line = next(line for line in shown.splitlines() if line.startswith("run 3 "))
    assert f"{np.mean(accuracies['0.2']):.4f}" in line


@pytest.mark.parametrize("argv, message", [
    ("--metrics nll acuracy", "--metrics acuracy: not found in any row"),
    ("--sets acuracy", "no rows to show")])
def test_tables_refuse_what_no_row_has(runs_of_two_rates, capsys, argv, message):
    _, folders = runs_of_two_rates
    assert "DDU" in table(capsys, *folders, "--sets", "t", "acuracy").out
    with pytest.raises(UserError, match=message):
        table(capsys, *folders, *argv.split())


ROW = {"method": "a", "seed": 1, "set": "s", "n": 3, "accuracy": 0.5}


@pytest.mark.parametrize("edit", [
    {"rows": None}, {"rows": [None]}, {"rows": "text"}, {"rows": [dict(ROW, method={"a": 1})]},
    {"rows": [dict(ROW, seed=[1])]}, {"rows": [dict(ROW, members="abc")]}, {"config": "text"},
    {"config": None}, {"columns": 3}, "{}", "[]", "3", "text", "", '{"rows": ' + "[" * 100_000])
def test_results_that_were_edited_by_hand_are_skipped_in_one_line(tmp_path, capsys, edit):
    run = make_run(tmp_path)
    run.report(rows_of([1]), ["accuracy"])
    whole = table(capsys, run.dir)
    text = edit
    if isinstance(edit, dict):
        text = json.dumps(strict_json(run.dir / "results.json") | edit)
    (tmp_path / "results.json").write_text(text)
    shown = table(capsys, tmp_path, run.dir)
    assert shown.out == whole.out and whole.err == ""
    assert shown.err == f"skipped: {tmp_path} is not the directory of a finished run\n"


@pytest.mark.parametrize("first, second", [
    (0.5, "high"), ("high", 0.5), (0.5, [1]), ({"a": 1}, 0.5), (0.5, math.nan)])
def test_odd_values_of_a_metric_are_shown(tmp_path, capsys, first, second):
    rows = [dict(ROW, seed=1, accuracy=first), dict(ROW, seed=2, accuracy=second)]
    content = {"script": "x", "config": {}, "columns": ["accuracy", ["n"]], "rows": rows}
    (tmp_path / "results.json").write_text(json.dumps(content))
    shown = table(capsys, tmp_path)
    assert str(first) in shown.out and not shown.err


def test_pooled_cells():
    metrics = ["x", "kind", "y", "absent"]
    lines = common.pool([
        {"method": "a", "seed": 1, "set": "s", "n": 3, "x": 1.5, "kind": "flat"},
        {"method": "a", "seed": 2, "set": "s", "n": 3, "x": 2.5, "kind": "flat"},
        {"method": "b", "seed": 1, "set": "s", "n": 3, "x": None, "y": 123456.7}], metrics)
    keys = {"run": None, "set": "s", "against": None, "n": 3, "absent": None}
    assert lines == [
        {"method": "a", "seeds": 2, "x": "2.0000 ± 0.5000", "kind": "flat", "y": None, **keys},
        {"method": "b", "seeds": 1, "x": None, "kind": None, "y": "1.2346e+05", **keys}]
    text = common.format_table(lines).splitlines()
    assert text[0].split() == ["method", "set", "n", "seeds", "x", "kind", "y"]
    assert text[2].split() == ["a", "s", "3", "2", "2.0000", "±", "0.5000", "flat"]
    assert text[3].split() == ["b", "s", "3", "1", "1.2346e+05"]


def test_seeds_that_share_members_are_not_pooled_as_independent():
    rows = [dict(ROW, seed=1, x=1.5, members=[1, 2]), dict(ROW, seed=2, x=2.5, members=[3, 4])]
    assert common.pool(rows, ["x"])[0]["x"] == "2.0000 ± 0.5000"
    rows[1]["members"] = [2, 3]
    assert common.pool(rows, ["x"])[0]["x"] == "2.0000"
    rows[1]["method"] = "another"  # not in one group
    assert [line["x"] for line in common.pool(rows, ["x"])] == ["1.5000", "2.5000"]


class Files:
    """A set of image files, of which the second has no known label."""

    files = ("a/0.png", "b, c/1.png")
    labels = torch.tensor([1, -1])


class Rows(list):
    """A set without files: of numbered rows."""


def read_predictions(run, columns):
    run.write_csv("predictions.csv", columns)
    with open(run.dir / "predictions.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("members, classes, names", [
    (1, (), ["0", "1", "2", "3"]), (3, ("cat", "dog", "cow", "emu"), ["cat", "dog", "cow", "emu"])])
def test_predictions_are_a_line_for_each_example(tmp_path, capsys, members, classes, names):
    log_probs = torch.randn(members, 2, 4, dtype=torch.float64).log_softmax(-1)
    given = log_probs[0] if members == 1 else log_probs
    columns = common.prediction_columns(Files, given, classes)
    columns["density"] = torch.tensor([1.5, -math.inf])
    columns["decision"] = ["ood", "clean"]
    rows = read_predictions(make_run(tmp_path), columns)
    probs = log_probs.exp().numpy()
    mean = probs.mean(0)
    total = entropy(mean, axis=1)
    aleatoric = entropy(probs, axis=2).mean(0)
    numbers = {"confidence": mean.max(1), "total": total, "aleatoric": aleatoric,
               "epistemic": total - aleatoric}
    for name, values in numbers.items():
        found = [float(row[name]) for row in rows]
        assert found == pytest.approx(list(values), abs=1e-9), name
    texts = {"file": ["a/0.png", "b, c/1.png"], "label": [names[1], ""], "density": ["1.5", ""],
             "predicted": [names[k] for k in mean.argmax(1)], "decision": ["ood", "clean"]}
    for name, values in texts.items():
        assert [row[name] for row in rows] == values
    assert "predictions.csv: 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize("labels, expected", [
    ([2, 0], ["2", "0"]), ([1.5, math.nan], ["1.5", ""]),
    ([-1, -1], [None, None]), ([math.nan, math.nan], [None, None])])
def test_examples_without_files_are_numbered_and_may_have_no_label(tmp_path, labels, expected):
    dataset = Rows([0, 0])
    dataset.labels = torch.tensor(labels)
    rows = read_predictions(make_run(tmp_path), common.example_columns(dataset))
    assert [row["index"] for row in rows] == ["0", "1"]
    assert [row.get("label") for row in rows] == expected


# ---- Signals, errors, platforms, pictures -------------------------------------------------------


def test_launch_hides_no_programming_error(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the signals of pytest stay its own
    errors = {ZeroDivisionError: lambda: 1 / 0, FileNotFoundError: lambda: open("/absent/file"),
              RuntimeError: lambda: torch.ones(2) @ torch.ones(3)}
    for error, main in errors.items():
        with pytest.raises(error):
            common.launch(main)


def allocate_too_much():
    torch.empty(2**60, dtype=torch.uint8)


def allocate_too_much_on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n 2.00 GiB")


def allocate_too_much_in_python():
    bytearray(2**62)


@pytest.mark.parametrize("main", [allocate_too_much, allocate_too_much_on_a_gpu,
                                  allocate_too_much_in_python])
def test_out_of_memory_is_one_line_that_names_what_helps(tmp_path, main):
    child = Child(tmp_path, in_launch, main).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1
    assert child.stderr.startswith("x.py: error: out of memory; ")
    for option in ("--batch-size", "--width", "--amp bf16"):
        assert option in child.stderr


def run_out_of_memory_on_main():
    common.start("cpu")
    try:
        common.on_main(allocate_too_much)
    except UserError as error:
        return str(error)


def test_out_of_memory_on_the_main_process_reaches_all(ranks):
    messages = ranks(run_out_of_memory_on_main)
    assert len(messages) == 2 and all(text.startswith("out of memory") for text in messages)


def wrap_batch_norm(layer):
    common.start("cpu")
    dist.barrier()  # the first process would end before the other one has joined
    try:
        common.data_parallel(nn.Sequential(layer, nn.Linear(2, 1)), torch.device("cpu"))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm2d(2, affine=False),
                                   nn.BatchNorm2d(2, momentum=None),
                                   nn.BatchNorm2d(2, track_running_stats=False)])
def test_batch_norm_that_cannot_be_shared_is_refused(ranks, layer):
    for message in ranks(wrap_batch_norm, layer):
        assert "BatchNorm" in message and "start one process" in message


def print_without_a_reader(target, end):
    """Print to a full device or to a pipe that was closed, at once or when the script ends."""
    if target == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    os.dup2(out, 1)
    in_launch(sys.stdout.write, "a row" + end)


@pytest.mark.parametrize("target, reason", [("full", "No space left"), ("pipe", "Broken pipe")])
@pytest.mark.parametrize("end", ["\n", ""])
def test_output_without_a_reader_is_one_line_and_status_2(tmp_path, target, reason, end):
    child = Child(tmp_path, print_without_a_reader, target, end).wait(60)
    assert child.status == 2 and child.stderr.count("\n") == 1
    assert f"x.py: error: cannot print ({reason}" in child.stderr


def print_nowhere():
    sys.stdout = None  # as Python sets it where standard output was closed
    in_launch(print, "a row")


def test_a_closed_output_is_no_error(tmp_path):
    child = Child(tmp_path, print_nowhere).wait(60)
    assert child.status == 0 and child.stderr == ""


def train_for_ever(folder):
    def main():
        if os.fork() == 0:  # as the processes that decode images, which Ctrl-C reaches, too
            signal.raise_signal(signal.SIGINT)
        os.wait()
        fit(make_run(folder, "-e", "1000000"), 1_000_000)

    in_launch(main)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_one_line_and_128_more(tmp_path, number):
    child = Child(tmp_path, train_for_ever, tmp_path)
    path = tmp_path / "x" / "name" / "last.pt"
    wait_for(lambda: path.exists() or not child.process.is_alive(), what="checkpoint")
    os.kill(child.process.pid, number)
    assert child.wait(30).status == 128 + number
    assert child.stderr.count("\n") == 1
    assert f"x.py: stopped by {number.name}; the same command resumes" in child.stderr
    assert common.load_checkpoint(path)["history"]


def on_windows(folder):
    """What is missing there: POSIX modules and calls."""
    sys.modules["fcntl"] = None
    sys.modules["resource"] = None
    for name in ("sysconf", "sysconf_names", "getuid", "fork"):
        if hasattr(os, name):
            delattr(os, name)
    module = importlib.reload(common)
    assert module.fcntl is None
    run = make_run(folder)
    fit(run)
    run.report(rows_of([1]), ["accuracy"])
    return module.device_memory(run.args.device)


def test_scripts_start_without_posix_modules(tmp_path):
    assert Child(tmp_path, on_windows, tmp_path).value() is None


class Loader:
    def __len__(self):
        return 3

    def epoch(self, epoch):
        return [f"{epoch}:{i}" for i in range(3)]


def test_steps_are_limited_and_silent_off_a_terminal(capsys, tmp_path):
    run = make_run(tmp_path, "--limit-steps", "2")
    assert run.steps_per_epoch(Loader()) == 2
    assert list(run.steps(Loader(), 5)) == [(0, "5:0"), (1, "5:1")]
    run = make_run(tmp_path / "all")
    assert run.steps_per_epoch(Loader()) == 3
    assert len(list(run.steps(Loader(), 5))) == 3
    assert make_run(tmp_path, "--limit-steps", "9").steps_per_epoch(Loader()) == 3
    assert capsys.readouterr().err == ""


def test_figures_are_written_and_freed(tmp_path):
    from matplotlib import pyplot

    figure, (left, right) = common.make_figure(1, 2, figsize=(4, 2))
    left.plot([1, 2], color=common.colours(1)[0])
    right.plot([1, 2], color=common.colours(9)[8])
    run = make_run(tmp_path)
    run.save_figure(figure, "x.png")
    assert (run.dir / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not pyplot.get_fignums()


def test_without_matplotlib_pictures_are_skipped_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert parse().plot is False
    assert capsys.readouterr().out.count("pip install matplotlib") == 1
    assert parse("--no-plot").plot is False
    assert "matplotlib" not in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 6, 7, 20, 100])
def test_colours_are_different(count):
    found = {str(colour) for colour in common.colours(count)}
    assert len(found) == count


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
        for file in filter(re.compile(r"[\w.]+\.(ckpt|npz)").fullmatch, words):
            (tmp_path / file).touch()  # some are looked for at once
        script.parse_args(words[words.index(f"{name}.py") + 1:])


def test_the_files_of_the_pages_commands_exist():
    for line in page_commands("README.md") + page_commands("tests/RESULTS.md"):
        for script in re.findall(r"(?:python|torchrun)\b.*?([\w/]+\.py)\b", line.split("#")[0]):
            assert script == "mine.py" or (REPO / script).exists(), line
    for file in ("README.md", "tests/RESULTS.md"):
        text = (REPO / file).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert ((REPO / file).parent / target).exists(), target


def test_the_front_door_is_short():
    lines = (REPO / "README.md").read_text().splitlines()
    assert len(lines) <= 140 and max(map(len, lines)) <= 200


def write_images(folder):
    """Ten gray images; those of different folders differ."""
    folder.mkdir(parents=True)
    for i in range(10):
        gray = (37 * i + len(str(folder))) % 256
        Image.new("RGB", (8, 8), (gray, gray, gray)).save(folder / f"{i}.png")


def test_the_readmes_example_of_own_data_runs(tmp_path):
    """As it stands there, with ddu.py, common.py and data.py beside it."""
    for part in ("images/train/cat", "images/train/dog", "images/test/cat", "images/test/dog",
                 "new_images"):
        write_images(tmp_path / part)
    for file in ("ddu.py", "common.py", "data.py"):
        shutil.copy(REPO / file, tmp_path)
    [example] = [block for block in blocks() if "new_images" in block]
    environment = {**os.environ, "OMP_NUM_THREADS": "1",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", example], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("runs/ddu/images-*/predictions.csv")
    header, *lines = file.read_text().splitlines()
    assert len(lines) == 10
    readme = (REPO / "README.md").read_text()
    assert all(f"`{column}`" in readme for column in header.split(","))


def test_the_readmes_network_of_ones_own_runs(tmp_path):
    [code] = blocks(language="python")
    (tmp_path / "mine.py").write_text(code)
    command = [sys.executable, "mine.py", "--model", "mine", "--dataset", "glyphs", "--epochs", "1",
               "--limit-train", "300", "--ood", "--no-plot"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.glob("runs/ddu/glyphs-mine-*/results.csv")]
