"""The run lines of common.py: processes, checkpoints, command line, results, signals."""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import REPO, Child, wait_for
from torch import nn

import common
from common import UserError, World

MAIN = World()


# ---- Errors and the command line ----------------------------------------------------------------


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True,
                          timeout=120)


def test_user_error_is_one_line_and_status_2():
    done = run_python("import sys, common; sys.argv = ['some/dir/x.py']\n"
                      "def main(): raise common.UserError('first line\\n  and a second')\n"
                      "common.run_script(main)")
    assert (done.returncode, done.stderr) == (2, "x.py: error: first line and a second\n")
    assert done.stdout == ""


def status_of(main, capsys):
    with pytest.raises(SystemExit) as stop:
        common.run_script(main)
    return stop.value.code or 0, capsys.readouterr().err


def test_run_script_statuses(capsys):
    assert status_of(lambda: {"a": 1}, capsys) == (0, "")

    def stopped():
        raise common.Stopped(signal.SIGTERM, "in epoch 3 after step 7")

    status, err = status_of(stopped, capsys)
    assert status == 143 and err.count("\n") == 1 and "error" not in err
    assert "SIGTERM in epoch 3 after step 7" in err

    def interrupted():
        raise KeyboardInterrupt

    assert status_of(interrupted, capsys)[0] == 130


def test_run_script_does_not_hide_programming_errors():
    with pytest.raises(ZeroDivisionError):
        common.run_script(lambda: 1 / 0)


PRESETS = {"": dict(epochs=7, batch_size=32, lr=0.5, width=1.0, amp="off", compile=False),
           "other": dict(epochs=9)}


def parse(*argv, default="main"):
    parser = common.Parser(prog="x.py")
    common.add_common_arguments(parser, ["main", "other"])
    return common.resolve_arguments(parser.parse_args(argv), PRESETS, default)


@pytest.mark.parametrize("argv", [
    ["--epochs", "many"], ["--amp", "fp8"], ["--nonsense"], ["--lr"], ["extra"]])
def test_parser_errors_are_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("x.py: error: ")


def test_presets_fill_what_the_command_line_leaves_out():
    args = parse()
    assert (args.dataset, args.epochs, args.batch_size, args.lr) == ("main", 7, 32, 0.5)
    args = parse("--dataset", "other")
    assert (args.epochs, args.lr) == (9, 0.5)
    args = parse("--dataset", "other", "--epochs", "0", "-b", "5", "--lr", "0")
    assert (args.epochs, args.batch_size, args.lr) == (0, 5, 0.0)  # 0 is a value, not an absence
    assert parse("--compile").compile is True and parse("--no-plot").plot is False


@pytest.mark.parametrize("argv, name", [
    (["--epochs", "-1"], "--epochs -1"), (["-b", "0"], "--batch-size 0"),
    (["--lr", "-0.1"], "--lr -0.1"), (["--lr", "nan"], "--lr nan"),
    (["--lr", "inf"], "--lr inf"), (["--width", "0"], "--width 0"),
    (["--limit-steps", "0"], "--limit-steps 0"), (["--seed", "-1"], "--seed -1"),
    (["--seed", str(2**31)], f"--seed {2**31}")])
def test_values_out_of_range_are_refused_by_name(argv, name):
    with pytest.raises(UserError, match=re.escape(name)):
        parse(*argv)


def test_check_batch():
    args = argparse.Namespace(batch_size=63)
    common.check_batch(args, World(size=1))
    common.check_batch(args, World(size=9))
    with pytest.raises(UserError, match="63.*2 processes"):
        common.check_batch(args, World(size=2))


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99", ""])
def test_start_world_refuses_devices_that_are_not_there(device):
    with pytest.raises(UserError, match=f"--device {device}"):
        common.start_world(device)


def test_start_world_alone():
    assert common.start_world("cpu") == (0, 0, 1, torch.device("cpu")) and MAIN.is_main


# ---- Seeds --------------------------------------------------------------------------------------


def test_derive_seed_mixes():
    grid = [(s, e, t) for s in range(12) for e in range(12) for t in range(12)]
    seeds = [common.derive_seed(*key) for key in grid]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)
    assert common.derive_seed(1, 2) != common.derive_seed(2, 1) != common.derive_seed(3)
    assert common.derive_seed(1, 2, 3) == common.derive_seed(1, 2, 3)
    flipped = [bin(common.derive_seed(s, 4) ^ common.derive_seed(s + 1, 4)).count("1")
               for s in range(400)]
    assert 30 < np.mean(flipped) < 33 and min(flipped) > 10  # of 63 bits, half flip: 31.5


def test_seed_all_seeds_everything():
    def draw(*key):
        common.seed_all(*key)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw(3, 1) == draw(3, 1)
    assert all(a != b for a, b in zip(draw(3, 1), draw(3, 2)))


# ---- Several processes --------------------------------------------------------------------------


def in_gather(sizes):
    world = common.start_world("cpu")
    first = sum(sizes[:world.rank])
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0))
    mine = order[first:first + sizes[world.rank]]
    rows = torch.stack([mine * 2.0, mine * 3.0], 1)
    placed = common.gather_rows(rows, mine, sum(sizes), world)
    joined = common.concat_rows(mine, world)
    problems = []
    for index, n in ((mine, sum(sizes) + 1), (torch.zeros_like(mine), sum(sizes)),
                     (mine + 1, sum(sizes))):
        try:
            common.gather_rows(rows, index, n, world)
            problems.append("")
        except RuntimeError as error:
            problems.append(str(error))
    dist.destroy_process_group()
    return placed, torch.equal(joined, order), problems


@pytest.mark.parametrize("sizes", [(4, 3), (5, 0), (1, 6)])
def test_gather_and_concat_rows_of_uneven_shards(ranks, sizes):
    n = torch.arange(7.0 if sum(sizes) == 7 else 5.0)
    for placed, joined, problems in ranks(in_gather, sizes):
        assert torch.equal(placed, torch.stack([2 * n, 3 * n], 1)) and joined
        assert all("rows for" in p for p in problems)  # missing, twice, out of range


def test_gather_rows_alone_and_its_errors():
    index = torch.tensor([2, 0, 1])
    assert common.gather_rows(index * 10, index, 3, MAIN).tolist() == [0, 10, 20]
    assert common.concat_rows(index, MAIN) is index
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2]):
        with pytest.raises(RuntimeError, match="rows for 3 examples"):
            common.gather_rows(torch.ones(len(wrong)), torch.tensor(wrong), 3, MAIN)


def batch_norm_case(shape=(7, 3, 4, 5)):
    """A float64 batch far from zero mean, a cotangent, and a layer with a true affine map."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    layer = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return 5 + 3 * x, w, layer


def batch_norm_derivatives(layer, x, w):
    """Two training forwards, then output, first gradients, second gradients, running statistics."""
    layer(x.detach() + 1)
    x = x.detach().requires_grad_()
    y = layer(x)
    first = torch.autograd.grad((y.tanh() * w).sum(), [x, layer.weight, layer.bias],
                                create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() / 2, [x, layer.weight])
    return [y, *first, *second, layer.running_mean, layer.running_var, layer.num_batches_tracked]


def in_batch_norm(sizes):
    world = common.start_world("cpu")
    x, w, layer = batch_norm_case()
    net = common.sync_batch_norm(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(layer)), world)
    assert type(net[1][0]) is common.GlobalBatchNorm2d and set(net[1][0].state_dict()) == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    mine = slice(0, sizes[0]) if world.rank == 0 else slice(sizes[0], None)
    parts = batch_norm_derivatives(layer, x[mine], w[mine])
    parts += [layer.eval()(x[mine])]
    dist.destroy_process_group()
    return [p.detach() for p in parts]


@pytest.mark.parametrize("sizes", [(3, 4), (7, 0)])
def test_global_batch_norm_equals_batch_norm_of_the_whole_batch(ranks, sizes):
    x, w, layer = batch_norm_case()
    whole = batch_norm_derivatives(layer, x, w)
    whole += [layer.eval()(x)]
    a, b = ranks(in_batch_norm, sizes)
    close = dict(rtol=1e-9, atol=1e-11)
    for i in (0, 1, 4, 9):  # y, dx, ddx, eval y: rows of the batch
        torch.testing.assert_close(torch.cat([a[i], b[i]]), whole[i].detach(), **close)
    for i in (2, 3, 5):     # gradients of the parameters: DDP sums them
        torch.testing.assert_close(a[i] + b[i], whole[i].detach(), **close)
    for i in (6, 7, 8):     # the same running statistics on all
        torch.testing.assert_close(a[i], whole[i], **close)
        assert torch.equal(a[i], b[i])


def test_sync_batch_norm_alone_changes_nothing():
    net = nn.Sequential(nn.BatchNorm2d(2))
    assert common.sync_batch_norm(net, MAIN) is net and type(net[0]) is nn.BatchNorm2d


def dropout_output(x):
    layer = common.Dropout(0.3)
    torch.manual_seed(11)
    outputs = [layer(x), layer(x)]
    return torch.stack([*outputs, layer.eval()(x)])


def dropout_input(memory_format):
    return torch.ones(6, 4, 5, 3).contiguous(memory_format=memory_format)


def in_dropout(memory_format):
    world = common.start_world("cpu")
    x = dropout_input(memory_format).chunk(2)[world.rank].contiguous(memory_format=memory_format)
    y = dropout_output(x)
    dist.destroy_process_group()
    return y


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dropout_masks_do_not_depend_on_the_number_of_processes(ranks, memory_format):
    whole = dropout_output(dropout_input(memory_format))
    assert 0.15 < (whole[0] == 0).float().mean() < 0.45 and not torch.equal(whole[0], whole[1])
    assert torch.equal(whole[2], torch.ones_like(whole[2]))
    assert torch.equal(torch.cat(ranks(in_dropout, memory_format), 1), whole)


def in_main_first(folder):
    world = common.start_world("cpu")
    with common.main_first(world):
        if world.rank == 0:
            time.sleep(0.3)
            (folder / "made").touch()
        there = (folder / "made").exists()
    total = common.all_reduce(torch.tensor(float(world.rank + 1)), world).item()
    common.barrier(world)
    dist.destroy_process_group()
    return there, total, tuple(world[:3])


def test_main_first_lets_the_first_process_prepare(ranks, tmp_path):
    assert ranks(in_main_first, tmp_path) == [(True, 3.0, (0, 0, 2)), (True, 3.0, (1, 1, 2))]


# ---- Atomic files -------------------------------------------------------------------------------


def state_of(value, n=1000):
    return {"config": {"value": value}, "weights": torch.full((n,), float(value))}


def test_a_crash_inside_the_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    common.save_checkpoint(path, state_of(1))
    before = path.read_bytes()

    def crash(state, file):
        file.write(b"half a checkpoint")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", crash)
        with pytest.raises(OSError, match="no space"):
            common.save_checkpoint(path, state_of(2))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    common.save_checkpoint(path, state_of(3))
    assert common.load_checkpoint(path)["weights"][0] == 3 and list(tmp_path.iterdir()) == [path]


def test_checkpoints_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    path, calls = tmp_path / "last.pt", []
    fsync, replace = os.fsync, os.replace

    def note_fsync(number):
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{number}") else "file")
        fsync(number)

    def note_replace(source, target):
        assert os.path.dirname(source) == str(tmp_path) and target == path
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    common.save_checkpoint(path, state_of(1))
    assert calls == ["file", "rename", "directory"] or not os.path.isdir("/proc/self/fd")


def write_for_ever(path):
    for i in range(10**9):
        common.save_checkpoint(path, state_of(i, 300_000))
        common.write_json(path.with_suffix(".json"), {"value": i, "padding": "x" * 100_000})


def test_kill_9_at_any_moment_leaves_whole_files(tmp_path):
    path = tmp_path / "last.pt"
    for attempt in range(6):
        child = Child(tmp_path, write_for_ever, path)
        seen = path.stat().st_mtime_ns if path.exists() else 0
        wait_for(lambda: path.with_suffix(".json").exists() and path.stat().st_mtime_ns > seen,
                 what="checkpoint")
        time.sleep(0.013 * attempt)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.join()
        assert child.status == -signal.SIGKILL
        state = common.load_checkpoint(path)
        assert (state["weights"] == state["config"]["value"]).all()
        assert len(json.loads(path.with_suffix(".json").read_text())["padding"]) == 100_000


def test_checkpoints_round_trip(tmp_path):
    state = {"config": {"a": 1, "b": [1, "x", None], "c": True}, "t": torch.arange(3),
             "nested": {"f": 0.5}}
    common.save_checkpoint(tmp_path / "x.pt", state)
    loaded = common.load_checkpoint(tmp_path / "x.pt", same=state["config"])
    assert loaded["config"] == state["config"] and loaded["nested"] == state["nested"]
    assert torch.equal(loaded["t"], state["t"])


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_load_checkpoint_absent(tmp_path):
    with pytest.raises(UserError) as error:
        common.load_checkpoint(tmp_path / "last.pt")
    assert "no checkpoint" in one_line(error) and "last.pt" in str(error.value)


@pytest.mark.parametrize("damage", [
    "truncated", "empty", "text", "not_ours", "no_config", "directory"])
def test_load_checkpoint_refuses_what_is_not_a_checkpoint(tmp_path, damage):
    path = tmp_path / "last.pt"
    common.save_checkpoint(path, state_of(1))
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[:len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("not a checkpoint\nat all\n")
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        torch.save([1, 2] if damage == "not_ours" else {"model": torch.ones(2)}, path)
    with pytest.raises(UserError) as error:
        common.load_checkpoint(path)
    assert "last.pt" in one_line(error)


def test_load_checkpoint_lists_the_options_that_differ(tmp_path):
    path = tmp_path / "last.pt"
    config = {"lr": 0.1, "epochs": 5, "model": "a", "gone": 1}
    common.save_checkpoint(path, {"config": common.to_json(config)})
    with pytest.raises(UserError) as error:
        common.load_checkpoint(path, same={"lr": 0.2, "epochs": 5, "model": "b", "new": 2})
    text = one_line(error)
    for part in ("lr (0.1 there, 0.2 now)", "model (a there, b now)", "gone (1 there",
                 "new (None there"):
        assert part in text
    assert "epochs" not in text
    common.load_checkpoint(path, same={**config, "lr": torch.tensor(0.1, dtype=torch.float64)})


class Malicious:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_checkpoints_run_no_code(tmp_path):
    trap, path = tmp_path / "trap", tmp_path / "last.pt"
    torch.save({"config": {}, "x": Malicious(trap)}, path)
    with pytest.raises(UserError):
        common.load_checkpoint(path)
    assert not trap.exists()
    torch.load(path, weights_only=False)  # the trap does work
    assert trap.exists()


def test_load_arrays(tmp_path):
    path = tmp_path / "x.npz"
    common.save_arrays(path, {"a": torch.arange(3.0), "b": np.ones((2, 2))})
    assert list(tmp_path.iterdir()) == [path]
    arrays = common.load_arrays(path, ("a", "b"))
    assert arrays["a"].tolist() == [0, 1, 2] and arrays["b"].shape == (2, 2)
    with pytest.raises(UserError, match=r"no array .*\bc\b"):
        common.load_arrays(path, ("a", "c"))
    with pytest.raises(UserError, match="no file"):
        common.load_arrays(tmp_path / "y.npz", ("a",))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="not a readable"):
        common.load_arrays(path, ("a",))
    np.savez(path, a=np.array([Malicious(tmp_path / "trap")], dtype=object))
    with pytest.raises(UserError, match="not a readable"):
        common.load_arrays(path, ("a",))
    assert not (tmp_path / "trap").exists()


def test_json_is_strict(tmp_path):
    value = {"nan": math.nan, "list": (1, -math.inf, np.float32(0.5), np.int64(3)),
             7: torch.tensor([1.0, math.nan]), "flag": True, "np_flag": np.bool_(False),
             "path": REPO / "x", "none": None, "array": np.array([[1, 2]]), "big": 2**60}
    common.write_json(tmp_path / "x.json", value)

    def refuse(name):
        raise AssertionError(name)

    back = json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
    assert back == {"nan": None, "list": [1, None, 0.5, 3], "7": [1.0, None], "flag": True,
                    "np_flag": False, "path": str(REPO / "x"), "none": None, "array": [[1, 2]],
                    "big": 2**60}
    assert back["flag"] is True and back["np_flag"] is False
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


# ---- The run directory --------------------------------------------------------------------------


def make_run(tmp_path, config, **options):
    defaults = dict(out_dir=str(tmp_path / "runs"), resume="auto", eval=False, quiet=True)
    run = common.Run(argparse.Namespace(**{**defaults, **options}), "x", "name", config, MAIN)
    run.open()
    return run


def test_run_directory(tmp_path):
    run = make_run(tmp_path, {"lr": 0.1})
    assert run.load() is None
    assert json.loads((run.directory / "args.json").read_text()) == {"lr": 0.1}
    run.log(epoch=1, epochs=2, loss=1.5, seconds=0.1)
    run.save(model={"w": torch.ones(2)})
    run.log(epoch=2, epochs=2, loss=math.nan, seconds=0.1)
    run.save(model={"w": torch.zeros(2)})
    rows = [json.loads(line) for line in (run.directory / "log.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["loss"]) for row in rows] == [(1, 1.5), (2, None)]
    assert rows[0]["peak_memory_gb"] > 0
    again = make_run(tmp_path, {"lr": 0.1})
    assert torch.equal(again.load()["model"]["w"], torch.zeros(2)) and len(again.history) == 2
    assert make_run(tmp_path, {"lr": 0.1}, resume="never").load() is None
    other = make_run(tmp_path / "other", {"lr": 0.1}, resume=str(run.checkpoint))
    assert other.load() is not None
    with pytest.raises(UserError, match="no checkpoint"):
        make_run(tmp_path / "other", {"lr": 0.1}, resume=str(tmp_path / "absent.pt")).load()
    content = run.results({"test/nll": math.nan}, {"train_s": 1.0}, extra=[1])
    assert content == json.loads((run.directory / "results.json").read_text())
    assert set(content) == {"config", "metrics", "timing", "environment", "extra"}
    assert {"commit", "python", "torch", "device", "processes"} <= set(content["environment"])


def test_a_refused_start_leaves_the_run_directory_alone(tmp_path):
    run = make_run(tmp_path, {"lr": 0.1})
    run.save(model={})
    before = {p.name: p.read_bytes() for p in run.directory.iterdir()}
    with pytest.raises(UserError, match="lr"):
        make_run(tmp_path, {"lr": 0.2}).load()
    assert {p.name: p.read_bytes() for p in run.directory.iterdir()} == before


def test_log_tells_of_the_last_epoch_even_if_killed_while_saving(tmp_path, monkeypatch):
    """Between the two files of a save: whichever is old, the next start makes them agree."""
    run, real, calls = make_run(tmp_path, {}), common._replacing, []

    def killed_after_the_first(path):
        calls.append(path)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(path)

    run.log(epoch=1, epochs=1, loss=0.5, seconds=0.1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, "_replacing", killed_after_the_first)
        run.save(model={}, epoch=1)
    again = make_run(tmp_path, {})
    if again.load() is not None:  # the checkpoint has the epoch, so nothing more is saved
        again.results({}, {})
        assert (again.directory / "log.jsonl").exists()


def test_run_refuses_a_path_that_is_no_directory(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        make_run(tmp_path, {})
    assert (tmp_path / "runs").read_text() == "a file"


# ---- Signals ------------------------------------------------------------------------------------


def test_stop_signals():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGINT):
        with common.StopSignals() as stop:
            assert stop.asked(MAIN) == 0
            os.kill(os.getpid(), number)
            assert stop.asked(MAIN, step=3) == number
            if number == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
                    time.sleep(1)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_stop_signals_in_a_thread_are_left_alone():
    found = []

    def body():
        with common.StopSignals() as stop:
            found.append(stop.asked(MAIN))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [0]


def in_stop():
    world = common.start_world("cpu")
    with common.StopSignals() as stop:
        before = [stop.asked(world, step) for step in range(12)]
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()
        after = [stop.asked(world, step) for step in (12, 19, 20)]
    dist.destroy_process_group()
    return before, after


def test_all_processes_stop_when_one_is_asked(ranks):
    assert ranks(in_stop) == [([0] * 12, [0, 0, signal.SIGTERM])] * 2


# ---- Small things -------------------------------------------------------------------------------


def test_check_finite_names_step_loss_and_learning_rate():
    common.check_finite(torch.ones(4), 0, lambda step: 1.0)
    common.check_finite(torch.ones(0), 0, lambda step: 1.0)
    for value, shown in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")):
        with pytest.raises(UserError) as error:
            common.check_finite(torch.tensor([1.0, 2.0, value, math.nan]), 30,
                                lambda step: step / 64)
        assert f"loss {shown} at step 32 with learning rate 0.5" in one_line(error)


def test_format_table():
    table = common.format_table(["name", "value"], [["a", 1.5], ["long name", None], ["b", 123456]])
    assert table.split("\n") == ["name        value", "-----------------", "a             1.5",
                                 "long name", "b          123456"]


def test_progress_is_silent_off_a_terminal(capsys):
    batches = [1, 2]
    assert common.progress(batches, 2, "epoch", False, MAIN) is batches
    assert capsys.readouterr().err == ""


def test_pyplot_absent(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert common.pyplot() is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install matplotlib" in err


def test_memory_and_time():
    watch = common.Stopwatch(MAIN.device)
    assert 0 <= watch.seconds() < 5
    assert 0.01 < common.peak_memory_gb(MAIN) < common.device_memory(MAIN) / 1e9
