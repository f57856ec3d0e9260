"""proxy_distill.py end to end: members, students, MIMO, resuming, several processes, misuse."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Child, run_proxy_distill_in_float64, start_ranks
from PIL import Image
from test_runs import parse_command, strict_json, usage_commands
from test_streaming import write_images

import common
import data
import proxy_distill

SCRIPT = "proxy_distill"
LOSSES = proxy_distill.LOSSES
ROWS = ("single", "ensemble", "ensemble_proxy", *(f"student_{loss}" for loss in LOSSES))


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Options of the whole story in a few seconds: two members, a few steps each, small test sets.
    """
    load = data.load
    monkeypatch.setattr(data, "load", lambda name, split, *rest, **more: load(
        name, split, *rest, **{**more, "limit": 400 if split == "test" else more.get("limit")}))
    return ["--dataset", "numbers", "--limit-train", "600", "--batch-size", "60", "--members", "2",
            "--base-epochs", "2", "--epochs", "1", "--mimo-epochs", "1", "--limit-steps", "4",
            "--shift", "none", "--ood", "glyphs_letters", "--device", "cpu", "--no-plot",
            "--out-dir", str(tmp_path / "runs"), "--name", "run"]


def folder(options, name="run"):
    return Path(options[options.index("--out-dir") + 1]) / "proxy_distill" / name


def named(options, name):
    options = list(options)
    options[options.index("--name") + 1] = name
    return options


def weights_of(path):
    return torch.load(path / "last.pt", weights_only=True)["model"]


def assert_equal_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith("ms_per_example")}


def test_the_story_leaves_its_files_and_eval_repeats_it(small):
    small = [o for o in small if o != "--no-plot"]
    small[small.index("--shift") + 1] = "computed"
    small += ["--shift-examples", "2", "--mimo"]
    metrics = proxy_distill.main(small)
    root = folder(small)
    assert {p.name for p in root.iterdir()} == {
        "base-seed1", "base-seed2", "mimo-seed1", "all-seed1", "teachers-seed1.f32",
        "teachers-seed1.json", "teachers-seed1.done", *(f"student_{x}-seed1" for x in LOSSES)}
    with Image.open(root / "all-seed1" / "story.png") as image:
        assert image.width > 500 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 10
    results = strict_json(root / "all-seed1" / "results.json")
    assert results["metrics"] == common.to_json(metrics) and results["n"]["test"] == 400
    for row in (*ROWS, "mimo"):
        wanted = {f"{row}/{k}" for k in ("accuracy", "nll", "ece15", "brier", "c_s5_accuracy",
                                         "c_nll", "auroc_total_uncertainty",
                                         "glyphs_letters_auroc_confidence")}
        if row not in ("single", "student_forward_kl"):  # a softmax has no mutual information
            wanted |= {f"{row}/{k}" for k in ("prr_mutual_information", "auroc_epkl",
                                              "auroc_mutual_information")}
        assert wanted <= metrics.keys()
    assert not any("single/auroc_mutual" in k for k in metrics)
    assert metrics["ensemble/nll"] == metrics["ensemble_proxy/nll"]
    kept = {p: p.read_bytes() for p in root.rglob("last.pt")}
    for more in (["--eval"], []):
        again = proxy_distill.main([*small, *more, "--no-plot"])
        assert timeless(again) == timeless(metrics)
    assert kept == {p: p.read_bytes() for p in kept}


@pytest.mark.parametrize("method, losses", [("base", ()), ("mimo", ()), *(
    ("distill", (loss,)) for loss in LOSSES)])
def test_stopped_and_resumed_equals_uninterrupted(small, monkeypatch, method, losses):
    if method == "distill":
        for name in ("run", "calm"):
            for seed in (1, 2):
                proxy_distill.main([*named(small, name), "--method", "base", "--seed",
                                    str(seed)])
    small = [*small, "--method", method, *(o for x in losses for o in ("--loss", x)),
             "--epochs", "2", "--mimo-epochs", "2"]
    metrics, real = proxy_distill.main(named(small, "calm")), proxy_distill.train_epoch
    calls = []

    def signalled(*rest):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    with monkeypatch.context() as patch:
        patch.setattr(proxy_distill, "train_epoch", signalled)
        with pytest.raises(common.Stopped, match=f"in epoch 2 of {method} after step 1"):
            proxy_distill.main(small)
    assert timeless(proxy_distill.main(small)) == timeless(metrics)
    what = f"student_{losses[0]}-seed1" if losses else f"{method}-seed1"
    assert_equal_weights(*(weights_of(folder(small, name) / what) for name in ("run", "calm")))


def test_two_processes_equal_one(small, tmp_path):
    """All of it, MIMO's shuffled rows and the shared file of the teachers too."""
    one, two = named(small, "one"), named(small, "two")
    more = ["--mimo", "--limit-steps", "2", "--losses", "dirichlet_likelihood", "rkl_proxy"]
    children = [Child(tmp_path, run_proxy_distill_in_float64, *one, *more, rank=9)]
    children += start_ranks(tmp_path, 2, run_proxy_distill_in_float64, *two, *more)
    for child in children:
        assert child.wait().status == 0, child.stderr[-2000:]
    for what in ("base-seed1", "base-seed2", "mimo-seed1", "student_rkl_proxy-seed1",
                 "student_dirichlet_likelihood-seed1"):
        a, b = (weights_of(folder(small, name) / what) for name in ("one", "two"))
        for k, v in a.items():
            difference = (v.double() - b[k].double()).abs().max()
            assert difference < 1e-6 * max(1.0, v.abs().max()), (what, k)
    a, b = (strict_json(folder(small, name) / "all-seed1" / "results.json")["metrics"]
            for name in ("one", "two"))
    assert all(a[f"{row}/nll"] == pytest.approx(b[f"{row}/nll"], abs=1e-5)
               for row in ("single", "ensemble", "student_rkl_proxy", "mimo"))


def test_cached_teachers_are_the_members(small, monkeypatch):
    """The file gives the losses of the members themselves; it goes on after a stop, and starts anew
    when the members are others."""
    shown = []
    real = proxy_distill.batch_loss

    def noted(*rest):
        values = real(*rest)
        shown.append(float(values[1]))
        return values

    monkeypatch.setattr(proxy_distill, "batch_loss", noted)
    proxy_distill.main([*small, "--losses", "rkl_proxy"])
    cached = shown[-4:]
    proxy_distill.main([*small, "--losses", "rkl_proxy", "--no-cache-teachers", "--resume",
                        "never"])
    np.testing.assert_allclose(cached, shown[-4:], rtol=1e-5)

    path = folder(small) / "teachers-seed1.f32"
    whole, note = path.read_bytes(), path.with_suffix(".json").read_text()
    path.write_bytes(bytes(len(whole)))  # nothing is done: all is computed again
    path.with_suffix(".done").write_bytes(bytes(1))
    proxy_distill.main([*small, "--losses", "forward_kl"])
    assert path.read_bytes() == whole
    path.write_bytes(bytes(len(whole)))  # all is done: nothing is computed
    proxy_distill.main([*small, "--losses", "proxy"])
    assert path.read_bytes() == bytes(len(whole))
    path.with_suffix(".json").write_text("of others")
    proxy_distill.main([*small, "--losses", "dirichlet_likelihood"])
    assert path.read_bytes() == whole and path.with_suffix(".json").read_text() == note


def test_teachers_are_left_alone(small):
    """No gradient and no batch statistics reach the members; the student trains."""
    proxy_distill.main([*small, "--method", "base"])
    proxy_distill.main([*small, "--method", "base", "--seed", "2"])
    before = [(folder(small) / f"base-seed{s}" / "last.pt").read_bytes() for s in (1, 2)]
    args = proxy_distill.parse_args([*small, "--no-cache-teachers"])
    world = common.start_world("cpu")
    sets = proxy_distill.load_sets(args, world)
    members = proxy_distill.members_of(args, sets, world)
    kept = [{k: v.clone() for k, v in net.state_dict().items()} for net in members]
    (net, offset), = proxy_distill.train_students(["rkl_proxy"], members, sets, args,
                                                  world).values()
    for member, state in zip(members, kept):
        assert_equal_weights(member.state_dict(), state)
        assert not member.training and all(p.grad is None for p in member.parameters())
    fresh = proxy_distill.new_network(args, sets, common.derive_seed(1, 7) % 2**31, 0.125)
    assert offset == 1 and not torch.equal(net.fc.weight, fresh.fc.weight)
    assert before == [(folder(small) / f"base-seed{s}" / "last.pt").read_bytes() for s in (1, 2)]


@pytest.mark.parametrize("more", [
    "--losses rkl_proxy --rkl-target paper --max-precision 1e4",
    "--losses dirichlet_likelihood --temperature 5 --anneal-epochs 2 --no-cache-teachers",
    "--losses proxy --model-offset 0 --target-offset 0 --opt sgd --lr 1e-4 --schedule step",
    "--losses --mimo --mimo-members 3 --mimo-average logits --repetition-probability 0",
    "--losses forward_kl --model resnet18 --width 0.05 --student-width 0.03 --amp bf16",
    "--losses forward_kl --label-smoothing 0.1 --no-decay norms --augment --no-cache-teachers"])
def test_options(small, more):
    metrics = proxy_distill.main([*small, "--base-epochs", "1", *more.split()])
    assert all(math.isfinite(v) for v in metrics.values() if v is not None)


def test_members_from_files(small, tmp_path):
    """State dicts of others make the same ensemble as our own runs."""
    whole = proxy_distill.main([*small, "--losses", "rkl_proxy"])
    paths = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.ckpt"  # as Lightning writes them
        state = weights_of(folder(small) / f"base-seed{seed}")
        torch.save({"epoch": 3, "state_dict": {f"model.{k}": v for k, v in state.items()}}, path)
        paths.append(str(path))
    again = proxy_distill.main([*named(small, "other"), "--losses", "rkl_proxy",
                                "--ensemble-paths", *paths])
    assert timeless(again) == timeless(whole)


def test_published_json(small, tmp_path):
    path = tmp_path / "published.json"
    metrics = proxy_distill.main([*small, "--method", "base", "--published-json", str(path)])
    found = strict_json(path)["single"]
    assert set(found) == {"imagenet_val", "glyphs-letters"}
    assert found["imagenet_val"]["acc1"] == metrics["single/accuracy"]
    assert found["imagenet_val"]["NLL"] == pytest.approx(metrics["single/nll"])
    assert found["glyphs-letters"]["entropy_of_expected"] == metrics[
        "single/auroc_total_uncertainty"]
    assert "mutual_information_PRR" not in found["imagenet_val"]


WNIDS = [f"n0{c}" for c in range(6)]


def write_tree(root):
    """A --data-dir like ImageNet's: 6 classes, 304 JPEGs; of A, O and R a part of the classes, of C
    two corruptions, one in each published layout, at severities 1 and 2."""
    rng = np.random.default_rng(0)

    def write(folder, count, classes=range(6)):
        for c in classes:
            write_images(root / folder / WNIDS[c], count, rng, 130 * np.array([c & 1, c & 2, c & 4]
                                                                              ).clip(max=1))

    write("imagenet/train", 24)
    write("imagenet/val", 8)
    write("imagenet-a", 8, (1, 4))
    write("imagenet-r", 8, (0, 2, 5))
    write("imagenet-o", 12, (2, 3))
    for kind in ("fog", "spatter"):
        write(f"imagenet-c/{kind}/1", 2)
        write(f"imagenet-c-{kind}-2", 2)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Options of the whole story on `write_tree`, streamed, in a few seconds."""
    write_tree(tmp_path / "data")
    monkeypatch.setattr(proxy_distill, "SEVERITIES", (1, 2))
    return ["--dataset", "imagenet", "--data-dir", str(tmp_path / "data"), "--out-dir",
            str(tmp_path / "runs"), "--name", "run", "--model", "resnet18", "--width", "0.05",
            "--student-width", "0.05", "--members", "2", "--base-epochs", "1", "--epochs", "1",
            "--batch-size", "48", "--workers", "0", "--lr", "0.01", "--base-lr", "0.01", "--losses",
            "rkl_proxy", "--no-mimo", "--shift", "published", "--device", "cpu", "--no-plot",
            "--limit-steps", "2", "--quiet"]


def test_folders_of_jpegs(tree, tmp_path):
    """Members, a student, all sets, the published file; --eval repeats it."""
    tree += ["--published-json", str(tmp_path / "published.json")]
    metrics = proxy_distill.main(tree)
    results = strict_json(folder(tree) / "all-seed1" / "results.json")
    assert results["n"] == {"test": 48, "imagenet_o": 24, "imagenet_a": 16, "imagenet_r": 24,
                            **{f"c_{k}_s{s}": 12 for k in ("fog", "spatter") for s in (1, 2)}}
    for row in ("single", "ensemble", "ensemble_proxy_t1", "student_rkl_proxy"):
        wanted = {f"{row}/{k}" for k in ("c_accuracy", "c15_accuracy", "c_s2_nll",
                                         "c_spatter_s1_brier")}
        for name in ("imagenet_a", "imagenet_r", "imagenet_o"):
            wanted |= {f"{row}/{name}_{k}auroc_total_uncertainty" for k in ("", "masked_")}
            assert (f"{row}/{name}_accuracy" in metrics) == (name != "imagenet_o")
        assert wanted <= metrics.keys()
    published = strict_json(tmp_path / "published.json")
    found = published["student_rkl_proxy"]
    domains = {"imagenet-a", "imagenet-r", *(f"imagenet-c-{k}-{s}" for k in ("fog", "spatter")
                                             for s in (1, 2))}
    assert {*found} == {"imagenet_val", "imagenet-o", "imagenet-o_masked", *domains, *(
        f"{d}_{k}" for d in domains for k in ("masked", "with_val"))}
    assert found["imagenet-a"]["acc1"] == metrics["student_rkl_proxy/imagenet_a_accuracy"]
    assert found["imagenet-r_masked"]["EPKL"] == metrics[
        "student_rkl_proxy/imagenet_r_masked_auroc_epkl"]
    again = proxy_distill.main([*tree, "--eval"])
    assert timeless(again) == timeless(metrics)
    assert strict_json(tmp_path / "published.json") == published
    squared = proxy_distill.main([*tree, "--eval", "--resize", "square"])
    assert squared["single/nll"] != metrics["single/nll"]


def test_square_images_are_not_in_proportion(tmp_path):
    """Both sides to 256, then the centre, by Pillow."""
    path = tmp_path / "imagenet/val/n00/0.PNG"
    path.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    dataset = data.load("imagenet", "test", tmp_path)
    square = Image.fromarray(pixels).resize((256, 256), Image.Resampling.BILINEAR)
    right = torch.from_numpy(np.array(square)[16:240, 16:240]).permute(2, 0, 1)
    assert torch.equal(dataset.squared().dataset[0][0], right)
    assert not torch.equal(dataset.dataset[0][0], right)


def run_on_32_pixels_in_float64(*argv):
    load = data.load
    data.load = lambda *rest, **more: load(*rest, **{**more, "image_size": 32})
    run_proxy_distill_in_float64(*argv)


def test_unreadable_files_are_refused_or_left_out(tree, tmp_path, capfd):
    """Named by path; by two processes as by one; what is left is what folders without them have."""
    broken = [tmp_path / "data" / name for name in (
        "imagenet/train/n01/3.JPEG", "imagenet/train/n05/0.JPEG", "imagenet/val/n02/7.JPEG",
        "imagenet-a/n04/2.JPEG", "imagenet-c/fog/1/n00/1.JPEG")]
    broken[0].write_bytes(broken[0].read_bytes()[:600])  # truncated; the others are no images
    for path in broken[1:]:
        path.write_bytes(b"not an image")
    tree[tree.index("--limit-steps") + 1] = "3"  # all of train
    one = [*named(tree, "one"), "--method", "base"]
    with pytest.raises(common.UserError) as error:
        proxy_distill.main(named(one, "refused"))
    assert any(str(error.value).startswith(f"{p}: unreadable") for p in broken[:2])

    more = ["--unreadable", "skip", "--shift", "none"]
    alone = Child(tmp_path, run_on_32_pixels_in_float64, *named(tree, "one"), *more, rank=9)
    both = start_ranks(tmp_path, 2, run_on_32_pixels_in_float64, *named(tree, "two"), *more)
    for group in ([alone], both):
        assert all(child.wait().status == 0 for child in group), group[0].stderr[-2000:]
        said = "".join(child.stderr for child in group)
        assert all(said.count(f"{path}: unreadable, skipped\n") == 1 for path in broken[:4])
    for what in ("base-seed1", "base-seed2", "student_rkl_proxy-seed1"):
        a, b = (weights_of(folder(tree, name) / what) for name in ("one", "two"))
        for k, v in a.items():
            difference = (v.double() - b[k].double()).abs().max()
            assert difference < 1e-6 * max(1.0, v.abs().max()), (what, k)
    a, b = (strict_json(folder(tree, name) / "all-seed1" / "results.json") for name in
            ("one", "two"))
    assert a["n"] == b["n"] == {"test": 47, "imagenet_o": 24, "imagenet_a": 15, "imagenet_r": 24}
    for key, value in a["metrics"].items():
        if key.endswith(("nll", "brier", "accuracy")):
            assert b["metrics"][key] == pytest.approx(value, abs=1e-5), key

    skip = [*named(one, "skip"), "--unreadable", "skip"]
    metrics = proxy_distill.main(skip)
    assert f"{broken[4]}: unreadable, skipped" in capfd.readouterr().err
    found = strict_json(folder(skip, "skip") / "base-seed1" / "results.json")
    assert found["n"]["c_fog_s1"] == 11 and found["n"]["test"] == 47
    for path in broken:
        path.unlink()
    again = proxy_distill.main([*skip[:-2], "--eval"])
    assert timeless(again) == timeless(metrics)


@pytest.mark.parametrize("argv, said", [
    ("--members 1", "--members"), ("--loss nothing", "--loss"), ("--model nothing", "--model"),
    ("--augment", "--no-augment"), ("--temperature 5", "--anneal-epochs"),
    ("--repetition-probability 2", "--repetition-probability"), ("--dataset nothing", "nothing"),
    ("--ensemble-paths nowhere.pt nowhere.pt", "nowhere.pt"), ("--eval", "train first"),
    ("--max-precision 0", "--max-precision"), ("--method distill", "--method base --seed 1"),
    ("--student-width 0", "--student-width"), ("--ood nothing", "nothing"),
    ("--resume nowhere.pt", "--method base")])
def test_misuse_is_one_line_and_status_2(small, refused, argv, said):
    assert said in refused(*small, *argv.split())


def test_resume_from_a_file_is_for_the_student(small):
    """--resume PATH of another run's student: its weights, and this run's members."""
    whole = proxy_distill.main([*small, "--losses", "rkl_proxy"])
    root = folder(small)
    (root / "student_rkl_proxy-seed1").rename(root / "moved")
    again = proxy_distill.main([*small, "--method", "distill", "--eval", "--resume",
                                str(root / "moved" / "last.pt")])
    assert timeless(again) == timeless(whole)


def test_changed_options_name_themselves(small, refused):
    proxy_distill.main([*small, "--method", "base"])
    assert "base_lr" in refused(*small, "--method", "base", "--base-lr", "0.01")


def test_students_belong_to_their_ensemble(small, refused):
    """Members trained anew: the old student is refused, not silently kept."""
    proxy_distill.main([*small, "--losses", "rkl_proxy"])
    for seed in ("1", "2"):
        proxy_distill.main([*small, "--method", "base", "--seed", seed, "--base-lr", "0.001",
                            "--resume", "never"])
    assert "ensemble" in refused(*small, "--losses", "rkl_proxy", "--base-lr", "0.001",
                                 "--no-cache-teachers")


def test_the_commands_of_the_docstring_parse():
    parsed = [parse_command(line, (proxy_distill,)) for line in usage_commands(proxy_distill)]
    assert [a.dataset for a in parsed] == ["numbers", "imagenet", "numbers", "imagenet"]
    published = dict(model="resnet50", lr=0.8, batch_size=2048, epochs=90, base_epochs=120,
                     weight_decay=1e-4, loss="rkl_proxy", model_offset=1.0, target_offset=1.0)
    assert published.items() <= vars(parsed[1]).items()


def test_the_published_learning_rate_is_that_of_what_is_trained():
    for method, key in (("base", "base_lr"), ("mimo", "mimo_lr"), ("distill", "lr")):
        args = vars(proxy_distill.parse_args(["--method", method, "--learning_rate", "0.123"]))
        assert {k for k, v in args.items() if v == 0.123} == {key}
