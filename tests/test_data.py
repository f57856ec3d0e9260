"""data.py: splits, published layouts, own folders, OOD sets, the loader, corruptions, glyphs."""

import hashlib
import math
import os
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import InterpolationMode

import common
import data
from common import UserError
from data import ImageSet, Loader, StreamedSet, load, load_sets, match, train_val_split


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(rank, size): what runs next believes to be that process."""
    def become(rank, size):
        monkeypatch.setattr(common, "rank", lambda: rank)
        monkeypatch.setattr(common, "world_size", lambda: size)

    return become


def check_ranks(as_rank, world, make):
    """The loaders of `world` processes, as `make` returns them, together give the batches of one
    process, each a contiguous near-equal piece."""
    whole = list(make().epoch(4))
    pieces = []
    for rank in range(world):
        as_rank(rank, world)
        pieces.append(list(make().epoch(4)))
    for batch, *parts in zip(whole, *pieces, strict=True):
        cuts = [len(part) for part in np.array_split(batch.index, world)]
        assert [len(part.index) for part in parts] == cuts
        assert {part.global_size for part in parts} == {len(batch.index)}
        for field in set(batch._fields) - {"global_size", "molecules"}:
            together = torch.cat([getattr(part, field) for part in parts])
            assert torch.equal(together, getattr(batch, field)), field
        if "molecules" in batch._fields:
            together = torch.cat([part.molecules.positions for part in parts])
            assert torch.equal(together, batch.molecules.positions)


def toy(n=50, shape=(3, 8, 8), seed=0, **fields):
    """An ImageSet of random bytes with seven classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)
    stats = {"mean": (0.4, 0.5, 0.6)[:shape[0]], "std": (0.2, 0.25, 0.3)[:shape[0]]}
    stats.update(fields)
    return ImageSet("toy", images, torch.arange(n) % 7, 7, **stats)


def refuses(match, call, *args, **kwargs):
    """`call` raises a UserError of one line that matches `match`."""
    with pytest.raises(UserError, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


def save_png(path, array=np.zeros((20, 30), np.uint8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


# ---- Splits and sets -----------------------------------------------------------------------


def test_published_split_of_cifar10_seed_1():
    train, val = train_val_split(50000, 1, 0.1)
    assert val[:4].tolist() == [26247, 35067, 34590, 16668]
    order = list(range(50000))
    np.random.RandomState(1).shuffle(order)
    assert [*val, *train] == order
    assert [len(part) for part in train_val_split(73257, 3)] == [65932, 7325]


def test_sets_select_all_their_fields():
    dataset = toy(6, label_probs=torch.eye(6), groups=torch.arange(6) // 2, files=tuple("abcdef"))
    mask = torch.tensor([False, True, False, False, True, False])
    for index, rows in (([4, 1], [4, 1]), (mask, [1, 4]), ([], []), (slice(2, 4), [2, 3])):
        part = dataset.select(index)
        assert torch.equal(part.images, dataset.images[rows])
        assert torch.equal(part.label_probs, torch.eye(6)[rows])
        assert part.labels.tolist() == rows
        assert part.groups.tolist() == [row // 2 for row in rows]
        assert part.files == tuple("abcdef"[row] for row in rows)
    refuses("toy: 6 images and 0 names, but 5 labels", ImageSet, "toy", dataset.images,
            torch.zeros(5).long(), 7, (0.5,), (0.5,))
    refuses("6 images and 5 names", replace, dataset, files=tuple("abcde"))
    refuses("labels from 0 to 6; expected 0 to 4", replace, toy(7), num_classes=5)


def labelled(labels, **fields):
    """Black images with these labels."""
    labels = torch.as_tensor(labels)
    return ImageSet("toy", torch.zeros(len(labels), 1, 1, 2), labels, 20, (0.5,), (0.5,), **fields)


def test_a_limit_keeps_the_shares_of_classes():
    periodic = labelled(torch.arange(2000) % 10, files=tuple(map(str, range(2000))))
    for limit in (10, 100, 200, 1000):
        part = data.evenly(periodic, limit)
        assert part.labels.bincount().tolist() == [limit // 10] * 10
        rows = [int(file) for file in part.files]
        assert rows == sorted(rows) and part.files == data.evenly(periodic, limit).files
    uneven = labelled([0] * 50 + [1] * 50 + [2])
    assert data.limit_train(uneven, 21).labels.bincount().tolist() == [10, 10, 1]
    refuses(r"toy: 2 training example\(s\) leave out 1 class\(es\); raise --limit-train",
            data.limit_train, uneven, 2)
    numbers = labelled(torch.arange(6.0))
    assert data.limit_train(numbers, 4).labels.tolist() == [0, 1, 3, 4]  # evenly spaced


def test_a_limit_keeps_groups_whole():
    train = data.limit_train(load("dirty_glyphs", "train", val_fraction=0), 1000)
    assert 990 <= len(train) <= 1000
    blends = train.groups[train.label_probs.amax(1) < 1].bincount()
    assert blends.unique().tolist() == [0, 2]
    assert 200 <= (blends == 2).sum() <= 300  # half of the rows are clean
    assert (train.labels.bincount() - 100).abs().max() < 15


def test_a_rare_class_is_never_validation_alone(tmp_path):
    labels = torch.tensor([0] * 50 + [1] * 50 + [2])
    for seed in range(20):
        train, val = data.class_split(labels, seed)
        assert labels[val].bincount().tolist() == [5, 5]
        assert sorted([*train, *val]) == list(range(101))
    name = write_folder(tmp_path / "pets", train=("ab", 20), test=("abc", 1))
    save_png(tmp_path / "pets" / "train" / "c" / "0.png")
    for seed in (1, 8, 15):
        assert load(name, "train", image_size=4, seed=seed).labels.bincount()[2] == 1
        assert load(name, "val", image_size=4, seed=seed).labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("first_has, second_has", [(True, False), (False, True), (False, False)])
def test_concat_of_bytes_and_numbers(first_has, second_has):
    """Clean digits are bytes, ambiguous ones numbers in [0, 1] with groups and distributions."""
    clean = toy(7)
    other = replace(toy(7, seed=1), images=toy(7, seed=1).images / 255)
    truth = {"label_probs": torch.full((7, 7), 1 / 7), "groups": torch.arange(7) // 2 + 3}
    if first_has:
        clean = replace(clean, **truth)
    if second_has:
        other = replace(other, **truth)
    both = data.concat("both", clean, other)
    assert torch.equal(both.images, torch.cat([clean.images / 255, other.images]))
    for dataset, part in ((clean, both.select(slice(7))), (other, both.select(slice(7, None)))):
        want = torch.eye(7) if dataset.groups is None else dataset.label_probs
        assert torch.equal(part.label_probs, want)
        assert len(part.groups.unique()) == (7 if dataset.groups is None else 4)
    assert not set(both.groups[:7].tolist()) & set(both.groups[7:].tolist())
    refuses("toy .* cannot be joined", data.concat, "x", clean, toy(3, (1, 8, 8)))


def test_digest_covers_what_training_sees(imagenet):
    dataset = toy(6, label_probs=torch.eye(6), groups=torch.arange(6), classes=tuple("abcdefg"))
    want = data.digest(dataset)
    assert len(want) == 64
    for same in ({}, {"name": "other"}, {"files": tuple("uvwxyz")}):
        assert data.digest(replace(dataset, **same)) == want
    one_pixel = dataset.images.clone()
    one_pixel[5, 2, 7, 7] ^= 1
    changes = {"images": one_pixel, "labels": dataset.labels.flip(0), "mean": (0.4, 0.5, 0.61),
               "std": (0.2, 0.2, 0.2), "label_probs": None, "groups": torch.zeros(6).long(),
               "classes": tuple("abcdefh"), "num_classes": 8}
    digests = {data.digest(replace(dataset, **{name: new})) for name, new in changes.items()}
    assert len(digests - {want}) == len(changes)
    streamed = load("imagenet", "test", imagenet)
    again = load("imagenet", "test", imagenet)
    assert data.digest(streamed) == data.digest(again)
    for other in (replace(streamed, resize=230), streamed.select([1, 0, *range(2, 9)])):
        assert data.digest(other) != data.digest(streamed)
    (imagenet / "imagenet" / "val" / "n01" / "1.png").touch()
    assert data.digest(replace(again, name="later")) != data.digest(streamed)


# ---- The sets of a run ---------------------------------------------------------------------


def test_load_sets(tmp_path):
    save_png(tmp_path / "new" / "3" / "x.png")
    sets = load_sets("glyphs", tmp_path, seed=3, limit_train=500, ood=["glyphs_letters"],
                     predict=f"folder:{tmp_path}/new", statistics=([0.25], [0.5]))
    train = load("glyphs", "train", seed=3, limit=500)
    assert torch.equal(sets.train.images, train.images)
    assert torch.equal(sets.val.images, load("glyphs", "val", seed=3).images)
    assert torch.equal(sets.test.images, load("glyphs", "test").images)
    assert list(sets.ood) == ["glyphs_letters"] and sets.predict.labels.tolist() == [3]
    for dataset in (sets.train, sets.test, sets.ood["glyphs_letters"], sets.predict):
        assert (dataset.mean, dataset.std) == ((0.25,), (0.5,))
    assert load_sets("glyphs", val_fraction=0).val is None
    refuses("glyphs: 1 training .*leave out 9.*limit-train", load_sets, "glyphs", limit_train=1)


# ---- Published sets ------------------------------------------------------------------------


def test_real_mnist_and_cifar10(real_data):
    from torchvision.datasets import CIFAR10
    train, val, test = [load("mnist", split, real_data) for split in ("train", "val", "test")]
    assert (len(train), len(val), len(test)) == (54000, 6000, 10000)
    assert (test.shape, test.images.dtype) == ((1, 28, 28), torch.uint8)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    std, mean = torch.std_mean(torch.cat([train.images, val.images]) / 255)
    assert mean == pytest.approx(train.mean[0], abs=5e-5)
    assert std == pytest.approx(train.std[0], abs=1e-4)
    raw = CIFAR10(real_data)
    val = load("cifar10", "val", real_data)
    assert np.array_equal(val.images[0].permute(1, 2, 0), raw.data[26247])
    assert val.labels[:3].tolist() == [raw.targets[i] for i in (26247, 35067, 34590)]
    assert val.classes[:2] == ("airplane", "automobile")
    # The published std is the mean over the images of the std within each.
    within = torch.tensor(raw.data[:5000]).flatten(1, 2).double().std(1).mean(0) / 255
    assert within.tolist() == pytest.approx(val.std, abs=3e-3)


def test_without_validation_rows_are_in_the_order_of_the_files(real_data):
    from torchvision.datasets import CIFAR10
    raw = CIFAR10(real_data)
    # The local-posteriors study splits rows in this order by these indices.
    indices = torch.randperm(50000, generator=torch.Generator().manual_seed(0))[:2000]
    assert indices.sum() == 50_129_101
    train = load("cifar10", "train", real_data, val_fraction=0, seed=2)
    assert train.labels.tolist() == raw.targets
    assert np.array_equal(train.images[indices].permute(0, 2, 3, 1), raw.data[indices])


@pytest.mark.parametrize("images, labels, says", [
    (10000, 10000, None), (9999, 9999, "MNIST.raw: 9,999 images instead of 10,000; get it from"),
    (10000, 9999, "10000 images and 0 names, but 9999 labels")])
def test_raw_files_are_checked(tmp_path, monkeypatch, images, labels, says):
    def read(*_, train, download, **__):
        assert download  # so that what a killed download left half done is mended
        return SimpleNamespace(data=torch.zeros(images, 28, 28, dtype=torch.uint8),
                               targets=torch.arange(labels) % 10, classes=())

    monkeypatch.setitem(data.TORCHVISION, "mnist", read)
    if says:
        refuses(says, load, "mnist", "test", tmp_path)
    else:
        assert load("mnist", "test", tmp_path).labels[:12].tolist() == [*range(10), 0, 1]
        refuses("10,000 images instead of 60,000", load, "mnist", "train", tmp_path)


@pytest.mark.parametrize("name, path", [
    ("mnist", "MNIST.raw"), ("svhn", "test_32x32.mat"),
    ("cifar10", "cifar-10-batches-py"), ("imagenet", "imagenet.val"),
    ("tiny_imagenet", "tiny-imagenet-200.wnids.txt"), ("imagenet_a", "imagenet-a"),
    ("ambiguous_mnist", "AmbiguousMNIST.amnist_samples.pt"), ("imagenet_c", "imagenet-c.fog.2"),
    ("tiny_imagenet_c", "Tiny-ImageNet-C.fog.2"), ("sst2", "SST-2.test.tsv"),
    ("qm9", "QM9.gdb9.sdf")])
def test_absent_sets_name_the_path_and_the_site(tmp_path, name, path):
    for _ in range(2):  # a failed download leaves nothing that is taken for the set
        with pytest.raises(data.Absent, match=rf"{path}.*not found.*https?://") as caught:
            if name.endswith("_c"):
                data.load_corrupted(name, "fog", 2, tmp_path)
            elif name == "sst2":
                data.load_text(name, "test", tmp_path)
            elif name == "qm9":
                data.load_molecules(name, "test", tmp_path)
            else:
                load(name, "test", tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call, match", [
    (lambda: load("mnits", "train"), "'mnits' is unknown.*glyphs"),
    (lambda: load("glyphs", "valid"), "split 'valid'"),
    (lambda: load("glyphs", "val", val_fraction=1e-5), "1e-05 of 10000.*no validation example"),
    (lambda: load("mnist", "test", image_size=32), "--image-size has no effect on .*mnist"),
    (lambda: data.load_corrupted("cifar10_c", "x", 1), "x.npy: .*No such file.*zenodo.org/.*there"),
    (lambda: data.corruption_kinds("cifar10"), "'cifar10' is unknown.*imagenet_c"),
    (lambda: data.load_molecules("clusters", "test", target="gap"), "'gap' is unknown.*u0"),
    (lambda: Loader(toy(), 0), r"toy: 0 example\(s\) cannot"),
    (lambda: Loader(toy(3, (2, 1, 1)), 5, augment="crop_flip"), "would destroy features"),
])
def test_errors_of_the_user_are_one_line(call, match):
    refuses(match, call)


def write_ambiguous_mnist(data_dir, monkeypatch):
    """Image i is i / 12000 everywhere; its tenth label is unlike the others."""
    images = (torch.arange(12000.0) / 12000).view(-1, 1, 1, 1).expand(-1, 1, 28, 28).contiguous()
    labels = (torch.arange(12000)[:, None] % 5).repeat(1, 10)
    labels[:, 9] = 5 + torch.arange(12000) % 5
    folder = data_dir / "AmbiguousMNIST"
    folder.mkdir()
    torch.save(images, folder / "amnist_samples.pt")
    torch.save(labels, folder / "amnist_labels.pt")
    refuses("amnist_samples.pt: not found or damaged.*no route", load, "ambiguous_mnist", "test",
            data_dir)  # another checksum than the published one
    for file in data.AMBIGUOUS_MNIST:
        md5 = hashlib.md5((folder / file).read_bytes()).hexdigest()
        monkeypatch.setitem(data.AMBIGUOUS_MNIST, file, md5)


def test_ambiguous_mnist(tmp_path, monkeypatch):
    write_ambiguous_mnist(tmp_path, monkeypatch)
    train = load("ambiguous_mnist", "train", tmp_path)
    val = load("ambiguous_mnist", "val", tmp_path)
    assert len(val.groups.unique()) == 600
    assert not set(train.groups.tolist()) & set(val.groups.tolist())
    pool = load("ambiguous_mnist", "train", tmp_path, val_fraction=0)
    assert len(pool) == 60000
    assert torch.equal(pool.images[:, 0, 0, 0], (torch.arange(60000) // 10) / 12000)
    assert pool.labels[40:50].tolist() == [4] * 9 + [9]
    assert pool.label_probs[45].tolist() == pytest.approx([0, 0, 0, 0, 0.9, 0, 0, 0, 0, 0.1])
    clean = replace(toy(10000, (1, 28, 28)), num_classes=10, classes=tuple("0123456789"))
    monkeypatch.setattr(data, "_torchvision", lambda *_: clean)
    test = load("dirty_mnist", "test", tmp_path)
    assert len(test) == 70000
    assert torch.equal(test.images[:10000], clean.images / 255)
    assert test.images[10010, 0, 0, 0] == torch.tensor(6001 / 12000)
    assert torch.equal(test.label_probs[:10000].argmax(1), clean.labels)


# ---- Corrupted sets ------------------------------------------------------------------------


def test_cifar_c_layout(tmp_path, capsys):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    rows = np.arange(50000)
    fog = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50000, 32, 32, 3))
    fog[:, 3, 4, 1] = rows // 10000 * 10 + rows % 7
    fog.flush()
    np.save(folder / "labels.npy", (rows % 10).astype(np.uint8))
    for severity in (1, 5):
        dataset = data.load_corrupted("cifar10_c", "fog", severity, tmp_path)
        own = rows[(severity - 1) * 10000:severity * 10000]
        assert np.array_equal(dataset.images[:, 1, 3, 4], severity * 10 - 10 + own % 7)
        assert dataset.labels.tolist() == (own % 10).tolist()
        assert (dataset.name, dataset.num_classes) == (f"cifar10_c_fog_s{severity}", 10)
        assert (dataset.shape, dataset.mean) == ((3, 32, 32), (0.4914, 0.4822, 0.4465))
    assert data.corruption_kinds("cifar10_c", tmp_path) == ["fog"]  # a part is named as a part
    out = capsys.readouterr().out
    assert "CIFAR-10-C: lacks all or a part of gaussian_noise, shot_noise, " in out
    np.save(folder / "labels.npy", (rows % 11).astype(np.uint8))
    refuses("labels from 0 to 10", data.load_corrupted, "cifar10_c", "fog", 1, tmp_path)
    np.save(folder / "labels.npy", np.zeros(10000, np.uint8))
    np.save(folder / "snow.npy", np.zeros((3, 32, 32, 3), np.int16))
    (folder / "spatter.npy").write_bytes((folder / "fog.npy").read_bytes()[:100000])
    for kind, says in (("fog", r"labels.npy.*\(10000,\), expected \(50000,\)"),
                       ("snow", r"snow.npy.*int16 \(3, 32, 32, 3\), expected"),
                       ("spatter", "spatter.npy: ")):
        refuses(f"{says}.*get it from https", data.load_corrupted, "cifar10_c", kind, 1, tmp_path)


def test_missing_severities(tmp_path, capsys):
    for severity in range(1, 6):
        for kind in ("zoom_blur", "spatter"):
            save_png(tmp_path / "imagenet-c" / kind / str(severity) / "n01" / "a.png")
    save_png(tmp_path / "imagenet-c" / "frost" / "4" / "n01" / "a.png")
    kinds = data.corruption_kinds("imagenet_c", tmp_path)
    out = capsys.readouterr().out
    assert kinds == ["zoom_blur", "spatter"]
    assert "snow, frost, fog" in out and "zoom" not in out
    assert data.corrupted_name("imagenet_c", kinds) == "imagenet_c_2of19"
    streamed = data.load_corrupted("imagenet_c", "spatter", 4, tmp_path)
    assert (streamed.shape, streamed.resize, len(streamed)) == ((3, 224, 224), 224, 1)


# ---- Folders -------------------------------------------------------------------------------


def write_tiny_imagenet(data_dir, place, corrupted):
    root = data_dir / place
    for k, wnid in enumerate(("n02", "n01")):  # an order that sorting would change
        for i in range(5):
            size = (64, 64, 3) if i else (64, 64)  # some are grey
            array = np.full(size, 100 * k + 10 * i, np.uint8)
            save_png(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", array)
        array = np.full((64, 64, 3), 20 + 180 * k, np.uint8)
        save_png(data_dir / corrupted / "fog" / "2" / wnid / "a.JPEG", array)
    notes = ""
    for i, wnid in enumerate(("n01", "n02", "n01")):
        save_png(root / "val" / "images" / f"val_{i}.JPEG",
                 np.full((64, 64, 3), 50 * i, np.uint8))
        notes += f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n"
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text(notes)
    if root.parent.name == "TinyImageNet":  # the published repository has one outside, too
        (root.parent / "wnids.txt").write_text("n02\nn01\n")
    return root


@pytest.mark.parametrize("place, corrupted", [
    ("tiny-imagenet-200", "Tiny-ImageNet-C"),
    ("TinyImageNet/tiny-imagenet-200", "TinyImageNet/corrupt")])
def test_tiny_imagenet(tmp_path, place, corrupted, capsys):
    root = write_tiny_imagenet(tmp_path, place, corrupted)
    for _ in range(2):
        pool = load("tiny_imagenet", "train", tmp_path, val_fraction=0)
    out = capsys.readouterr().out
    assert out == f"note: {root}/train has 10 images; 100,000 were published\n"
    assert (pool.shape, len(pool), pool.classes) == ((3, 64, 64), 10, ("n02", "n01"))
    assert torch.equal(pool.images[:, :, 32, 32].float().mean(1) >= 95, pool.labels == 1)
    assert pool.mean == pytest.approx((0.480308, 0.448139, 0.397633), abs=1e-6)
    assert pool.std == pytest.approx((0.276441, 0.268894, 0.281618), abs=1e-6)
    test = load("tiny_imagenet", "test", tmp_path, image_size=32)
    assert (test.shape, test.labels.tolist()) == ((3, 32, 32), [1, 0, 1])
    assert test.images[:, 0, 9, 9].tolist() == [0, 50, 100]
    assert isinstance(load("tiny_imagenet", "test", tmp_path, image_size=224), StreamedSet)
    fog = data.load_corrupted("tiny_imagenet_c", "fog", 2, tmp_path)
    assert fog.labels.tolist() == [0, 1]  # as in wnids.txt
    assert fog.images[:, 0, 0, 0].tolist() == [20, 200]
    assert data.corruption_kinds("tiny_imagenet_c", tmp_path) == []  # not all severities
    # Corrupted images have all that the clean ones have, and are prepared as these are.
    large = load("tiny_imagenet", "test", tmp_path, image_size=128)
    fog = data.load_corrupted("tiny_imagenet_c", "fog", 2, tmp_path,
                              preparation=large.preparation)
    assert fog.preparation == large.preparation and fog.shape == (3, 128, 128)


def write_folder(root, **parts):
    """root/<part>/<class>/<i>.png: parts = {part: (classes, images of each)}; image i is 5 i + 1
    all over, 100 more in training."""
    for part, (classes, n) in parts.items():
        for c in classes:
            for i in range(n):
                level = 5 * i + 1 + 100 * (part == "train")
                save_png(root / part / c / f"{i}.png", np.full((40, 30, 3), level, np.uint8))
    return f"folder:{root}"


def test_own_folder_is_never_tested_on_its_training_images(tmp_path):
    name = write_folder(tmp_path / "my pets!", train=("ab", 10), test=("ab", 3))
    (tmp_path / "my pets!" / "train" / ".ipynb_checkpoints").mkdir()  # hidden: no class
    train = load(name, "train", image_size=24)
    val = load(name, "val", image_size=24)
    test = load(name, "test", image_size=24)
    assert (len(train), len(val), len(test)) == (18, 2, 6)
    assert not set(train.files) & set(val.files)
    assert isinstance(train, ImageSet)
    assert (train.classes, train.shape, train.name) == (("a", "b"), (3, 24, 24), "my_pets_")
    assert train.images.min() > 100 > test.images.max()
    assert test.files[4] == "b/1.png"
    assert load(name, "test").shape == (3, 32, 32)
    assert load(name, "test", image_size=128).resize == 146
    write_folder(tmp_path / "my pets!", val=("ab", 4))
    sizes = [len(load(name, split)) for split in ("train", "val", "test", "ood")]
    assert sizes == [20, 8, 6, 34]


@pytest.mark.parametrize("parts, says", [
    (dict(train=("ab", 2)), r"expected .*/train/<class>/.* and .*/test/<class>/\*"),
    (dict(train=("a", 2), test=("a", 2)), "expected .*train.* two classes or more"),
    (dict(cats=("ab", 2), dogs=("ab", 2)), "expected.*never the training set"),
    (dict(train=("ab", 2), test=("ac", 2)), "test.b: no images"),
    (dict(train=("ab", 2), val=("a", 1), test=("ab", 2)), "val.b: no images"),
])
def test_other_layouts_are_refused(tmp_path, parts, says):
    name = write_folder(tmp_path / "pets", **parts)
    refuses(says, load, name, "val" if "test" in parts and "val" in parts else "test")


def test_files_that_are_skipped_are_named(tmp_path, capsys):
    root = tmp_path / "pets"
    name = write_folder(root, train=("ab", 3), test=("ab", 1))
    for path in ("train/a/more/x.png", "train/a/more/deep/y.JPG", "train/loose.png",
                 "test/c/z.png"):  # c is no class of train
        save_png(root / path)
    (root / "train" / "b" / "notes.txt").write_text("no image")
    (root / "train" / "a" / "._0.png").write_text("hidden")
    for split in ("train", "val", "train"):  # said once
        assert len(load(name, split, val_fraction=0.5)) == 3
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "train: skipped 4 file(s) that are not of the types .jpg .jpeg .png " in out
    assert out.endswith("first of them: a/more/deep/y.JPG, a/more/x.png, b/notes.txt\n")
    assert len(load(name, "test")) == 2
    assert capsys.readouterr().out.endswith("of train, the first of them: c/z.png\n")
    assert len(load(name, "ood")) == 12


def test_links(tmp_path):
    """A link that leads round in a circle, and parts that are links to others."""
    name = write_folder(tmp_path / "pets", train=("ab", 3), test=("ab", 2), more=("ab", 1))
    root = tmp_path / "pets"
    (root / "more" / "a" / "round").symlink_to(root / "more")
    (root / "more" / "gone.png").symlink_to("nowhere")
    assert load(f"folder:{root}/more", "ood").files == ("a/0.png", "b/0.png")
    (root / "test" / "b" / "copy.png").symlink_to(root / "train" / "b" / "2.png")
    refuses("pets: test and train share images, by a link", load, name, "test")
    (root / "test").rename(root / "old")
    for part in ("test", "val"):
        (root / part).symlink_to(root / "train")
        refuses(f"pets: {part} and train share images", load, name, part)


def test_names_that_are_not_utf8_and_pipes(tmp_path):
    save_png(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert load(f"folder:{tmp_path}", "ood").files == ("a.png",)
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    refuses(r"/caf\\xe9: the name is not UTF-8; rename it", load, f"folder:{tmp_path}", "ood")


def test_pixels_are_what_a_viewer_shows(tmp_path):
    left_white = np.zeros((4, 6, 3), np.uint8)
    left_white[:, :3] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.fromarray(left_white).save(tmp_path / "turned.png", exif=exif)
    hidden = np.zeros((4, 4, 4), np.uint8)  # black, transparent on the left
    hidden[:, 2:, 3] = 255
    Image.fromarray(hidden).save(tmp_path / "transparent.png")
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9] * 2)
    palette.save(tmp_path / "palette.png", transparency=1)
    images = load(f"folder:{tmp_path}", "ood", image_size=4).images
    assert images[0].unique().tolist() == [255]
    assert images[1, 0].tolist() == [[255, 255, 0, 0]] * 4
    assert (images[2, 0, 0].min(), images[2, 0, 3].max()) == (255, 0)  # the left is at the top


def test_unreadable_files_are_listed_together(tmp_path):
    for name in "abcde":
        save_png(tmp_path / f"{name}.png")
    Image.new("L", (8, 8)).save(tmp_path / "f.tif", save_all=True,
                                append_images=[Image.new("L", (8, 8))])
    for name in "bcd":
        (tmp_path / f"{name}.png").write_text("no image")
    for size in (8, 100):  # in memory, and streamed
        with pytest.raises(UserError, match=r"4 unreadable image\(s\), the ") as caught:
            load(f"folder:{tmp_path}", "ood", image_size=size)
        said = str(caught.value)
        assert "\n" not in said and "a.png" not in said
        assert all(f"{name}.png: unreadable (" in said for name in "bcd")
    for name in "bcd":
        (tmp_path / f"{name}.png").unlink()
    refuses("f.tif: unreadable .2 pages or frames, expected one", load, f"folder:{tmp_path}", "ood")


# ---- Streaming -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """imagenet/{train,val} with three classes of noise images of different sizes."""
    root = tmp_path_factory.mktemp("streamed")
    rng = np.random.default_rng(0)
    for split, n in (("train", 4), ("val", 3)):
        for k in range(3):
            for i in range(n):
                array = rng.integers(0, 256, (40 + 8 * i, 56 - 4 * k, 3), dtype=np.uint8)
                save_png(root / "imagenet" / split / f"n0{k}" / f"{i}.png", array)
    return root


def test_streamed_set_evaluates_in_order(imagenet):
    from torchvision import transforms as T
    dataset = load("imagenet", "test", imagenet, image_size=70)
    assert isinstance(dataset, StreamedSet)
    assert (len(dataset), dataset.shape) == (9, (3, 70, 70))
    transform = T.Compose([T.Resize(80), T.CenterCrop(70), T.ToTensor(),
                           T.Normalize(dataset.mean, dataset.std)])
    paths = sorted((imagenet / "imagenet" / "val").glob("*/*.png"))
    want = torch.stack([transform(Image.open(path)) for path in paths])
    for workers in (0, 2):
        batches = list(Loader(dataset, 4, workers=workers).epoch())
        assert torch.cat([b.index for b in batches]).tolist() == list(range(9))
        assert torch.cat([b.labels for b in batches]).tolist() == [0] * 3 + [1] * 3 + [2] * 3
        assert [b.global_size for b in batches] == [4, 4, 1]
        images = torch.cat([b.images for b in batches])
        torch.testing.assert_close(images, want, atol=1e-6, rtol=1e-5)
    assert dataset.files[3] == "n01/0.png"
    assert torch.equal(dataset.in_memory().images[4], dataset[4])


def test_streamed_augmentation_depends_on_seed_epoch_and_row_alone(imagenet, as_rank):
    state = torch.get_rng_state()
    dataset = load("imagenet", "train", imagenet, val_fraction=0)
    dataset = replace(dataset, shape=(3, 24, 24))

    def make(seed=4):
        return Loader(dataset, 5, shuffle=True, augment="crop_flip", seed=seed,
                      workers=common.rank() % 2)

    def images_by_row(seed, epoch):
        batches = list(make(seed).epoch(epoch))
        order = torch.cat([b.index for b in batches])
        return torch.cat([b.images for b in batches])[order.argsort()]

    first = images_by_row(4, 4)
    assert torch.equal(first, images_by_row(4, 4))
    assert not torch.equal(first, images_by_row(4, 1))
    assert not torch.equal(first, images_by_row(3, 4))
    check_ranks(as_rank, 3, make)  # the last batch has two images
    assert torch.equal(torch.get_rng_state(), state)


def test_a_preparation_is_that_of_torchvision_s_weights(imagenet, tmp_path):
    from torchvision.models import ResNet18_Weights
    name = write_folder(tmp_path / "pets", train=("ab", 10), test=("ab", 2))
    wide = np.arange(120, dtype=np.uint8).reshape(10, 12).repeat(30, 0).repeat(40, 1)
    save_png(tmp_path / "odd" / "x.png", wide)
    save_png(tmp_path / "pets" / "test" / "a" / "wide.png", wide)
    want = ResNet18_Weights.DEFAULT.transforms(crop_size=96, resize_size=128, mean=(0.1, 0.2, 0.3),
                                               interpolation=InterpolationMode.BICUBIC)
    preparation = data.Preparation(96, 128, (0.1, 0.2, 0.3), tuple(want.std),
                                   InterpolationMode.BICUBIC)
    odd = f"folder:{tmp_path}/odd"
    sets = load_sets(name, image_size=33, preparation=preparation, ood=[odd, "glyphs_letters"],
                     predict=odd)
    for dataset in (sets.train, sets.val, sets.test, sets.ood["odd"], sets.predict):
        assert (dataset.shape, dataset.resize) == ((3, 96, 96), 128)
        images = torch.cat([batch.images for batch in Loader(dataset, 50).epoch()])
        expected = [want(Image.open(dataset.root / file).convert("RGB")) for file in dataset.files]
        torch.testing.assert_close(images, torch.stack(expected), atol=1e-5, rtol=1e-5)
    letters = sets.ood["glyphs_letters"]
    assert (letters.shape, letters.mean) == ((3, 96, 96), (0.1, 0.2, 0.3))
    # Sets in memory keep their size, which the network changes; grey ones become RGB.
    glyphs = load("glyphs", "train", image_size=96, preparation=preparation)
    assert (glyphs.shape, glyphs.mean, glyphs.std) == ((3, 28, 28), *preparation[2:4])
    small = load(name, "test", preparation=preparation._replace(crop=8, resize=9))
    assert (type(small), small.shape, small.mean) == (ImageSet, (3, 8, 8), (0.1, 0.2, 0.3))


def test_an_unreadable_file_is_named_by_a_worker(tmp_path):
    for name in ("imagenet/train/n0/a", "imagenet/train/n1/a"):
        save_png(tmp_path / f"{name}.png")
    dataset = load("imagenet", "train", tmp_path, val_fraction=0)
    (tmp_path / "imagenet" / "train" / "n1" / "a.png").write_bytes(b"no image")
    for workers in (0, 1):
        refuses(r"^\S*n1.a.png: unreadable",
                lambda: list(Loader(dataset, 2, workers=workers).epoch()))
    for kind, mode in ((np.uint16, "I;16"), (np.float32, "F")):  # would turn white, or black
        (tmp_path / mode).mkdir()
        Image.fromarray(np.zeros((9, 9), kind)).save(tmp_path / mode / "1.tif")
        refuses(f"unreadable .pixels of mode {mode}, expected 8 bits", load,
                f"folder:{tmp_path}/{mode}", "ood")


# ---- Loader --------------------------------------------------------------------------------


@pytest.mark.parametrize("augment, mode, shape", [
    ("crop_flip", "constant", (3, 8, 8)), ("reflect_crop_flip", "reflect", (1, 7, 11))])
def test_augmentation_equals_one_image_at_a_time(augment, mode, shape):
    dataset = toy(130, shape)
    _, height, width = shape
    batches = list(Loader(dataset, 32, seed=5, shuffle=True, augment=augment).epoch(2))
    generator = data._loader_generator(5, 2)
    order = torch.randperm(130, generator=generator)
    dy, dx = torch.randint(0, 9, (2, 130), generator=generator)
    flip = torch.randint(0, 2, (130,), generator=generator)
    mean = torch.tensor(dataset.mean).view(-1, 1, 1)
    std = torch.tensor(dataset.std).view(-1, 1, 1)
    want = []
    for row, y, x, flipped in zip(order, dy, dx, flip):
        image = F.pad(dataset.images[row][None].float(), [4] * 4, mode=mode)[0]
        image = image[:, y:y + height, x:x + width]
        if flipped:
            image = image.flip(2)
        want.append((image / 255 - mean) / std)
    assert flip.unique().tolist() == [0, 1]
    assert len(dy.unique()) == len(dx.unique()) == 9
    assert torch.equal(torch.cat([b.index for b in batches]), order)
    assert torch.equal(torch.cat([b.labels for b in batches]), dataset.labels[order])
    images = torch.cat([b.images for b in batches])
    torch.testing.assert_close(images, torch.stack(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("floating", [False, True])
def test_evaluation_is_exact_in_order_and_normalised(floating):
    whole = toy(21).select(slice(3, None))
    pixels = whole.images / 255
    dataset = replace(whole, images=pixels) if floating else whole
    mean = torch.tensor(dataset.mean).view(-1, 1, 1)
    std = torch.tensor(dataset.std).view(-1, 1, 1)
    batches = list(Loader(dataset, 4).epoch())
    images = torch.cat([b.images for b in batches])
    assert torch.cat([b.index for b in batches]).tolist() == list(range(18))
    assert [b.global_size for b in batches] == [4, 4, 4, 4, 2]
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    for batch in batches:
        batch.images.zero_()  # batches are the caller's: the set is unharmed
    assert torch.equal(dataset.images, whole.images / 255 if floating else whole.images)


@pytest.mark.parametrize("options, sizes", [
    ({}, [8, 8, 8, 6]), ({"drop_last": True}, [8, 8, 8]), ({"limit_steps": 2}, [8, 8]),
    ({"limit_steps": 9}, [8, 8, 8, 6]), ({"limit_steps": 9, "drop_last": True}, [8, 8, 8])])
def test_length_of_an_epoch(options, sizes):
    whole = list(Loader(toy(30), 8, shuffle=True).epoch(2))
    loader = Loader(toy(30), 8, shuffle=True, **options)
    batches = list(loader.epoch(2))
    assert [len(batch.index) for batch in batches] == sizes
    assert len(loader) == len(sizes)
    for batch, same in zip(batches, whole):
        assert torch.equal(batch.index, same.index)


def test_keys_of_loaders_share_nothing():
    keys = [(a,) for a in range(5)]
    keys += [(a, b) for a in range(5) for b in range(5)]
    keys += [(*pair, row) for pair in keys[5:] for row in range(5)]
    assert len({data._loader_generator(*key).initial_seed() for key in keys}) == len(keys) == 155


def test_order_depends_on_seed_and_epoch():
    state = torch.get_rng_state()

    def order(seed, epoch):
        batches = Loader(toy(60), 13, seed=seed, shuffle=True, augment="crop_flip").epoch(epoch)
        return tuple(torch.cat([b.index for b in batches]).tolist())

    orders = [order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9
    assert all(sorted(rows) == list(range(60)) for rows in orders)
    assert order(2, 1) == orders[7]
    data.corrupt(toy().images, "shot_noise", 3)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


# ---- Corruptions ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pictures():
    """Grey glyphs and smooth coloured images, uint8, 28x28 and 32x32."""
    coarse = torch.rand(60, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(coarse, (32, 32), mode="bicubic", align_corners=False).clamp(0, 1)
    return load("glyphs", "test", limit=60).images, (smooth * 255).byte()


RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "occlusion", "rotation",
          "elastic")


@pytest.mark.parametrize("kind", data.CORRUPTIONS)
def test_corruptions(kind, pictures):
    for images in pictures:
        distances = [0.3]
        for severity in data.SEVERITIES:
            out = data.corrupt(images, kind, severity, seed=1)
            assert out.shape == images.shape
            assert out.dtype == torch.uint8
            distances.append((out.float() - images.float()).abs().mean().item())
        assert distances == sorted(set(distances))
        assert distances[-1] < 100
        assert torch.equal(out, data.corrupt(images, kind, 5, seed=1))
        assert torch.equal(out, data.corrupt(images, kind, 5, seed=0)) == (kind not in RANDOM)
        real = data.corrupt(images / 255, kind, 5, seed=1)
        assert (real * 255 - out).abs().max() <= 0.51
    twins = data.corrupt(pictures[0][:1].expand(8, -1, -1, -1), kind, 3)
    drawn = len(twins.flatten(1).unique(dim=0))
    assert (drawn > 1) == (kind in RANDOM)  # drawn for each image, not once for all


def test_corruption_directions():
    x = torch.zeros(4, 1, 28, 28)
    x[:, :, 10, 14] = 1
    blurred = data.corrupt(x, "gaussian_blur", 3)
    assert torch.allclose(blurred.sum((1, 2, 3)), torch.ones(4), atol=1e-5)
    at = torch.arange(28.0)
    line = torch.exp(-(at - 14) ** 2 / (2 * (0.031 * 28) ** 2))
    assert torch.allclose(blurred[0, 0, 10], line / line.sum() * blurred[0, 0, 10].sum(), atol=1e-3)
    turned = data._warp(x, angle=torch.full((4,), torch.pi / 2))
    assert turned[0, 0].argmax() in (14 * 28 + 17, 13 * 28 + 10)  # (10, 14) goes to a quarter turn
    hidden = (data.corrupt(torch.zeros(9, 3, 32, 32), "occlusion", 2) == 0.5).sum((1, 2, 3))
    assert hidden.tolist() == [3 * round(0.27 * 32) ** 2] * 9
    struck = data.corrupt(torch.full((300, 3, 16, 16), 0.5), "impulse_noise", 5)
    for value in (0, 1):
        assert (struck == value).double().mean().item() == pytest.approx(0.09, rel=0.03)
    dataset = data.corrupted(toy(4), "contrast", 2)
    assert dataset.name == "toy_computed_contrast_s2"
    x = toy(4).images.double()
    want = 0.55 * x + 0.45 * x.mean((1, 2, 3), keepdim=True)
    assert (dataset.images - want).abs().max() <= 0.51


# ---- OOD data and sets to predict ----------------------------------------------------------


def test_match_takes_channels_size_and_statistics(imagenet):
    grey = toy(5, (1, 28, 28), mean=(0.1,), std=(0.3,))
    colour = toy(5, (3, 32, 32), seed=1)
    up = match(grey, colour)
    down = match(colour, grey)
    assert (up.name, up.shape, up.images.dtype) == ("toy", (3, 32, 32), torch.uint8)
    assert (up.mean, up.std) == (colour.mean, colour.std)
    assert torch.equal(up.images, up.images[:, :1].expand(-1, 3, -1, -1))
    assert down.shape == (1, 28, 28)
    assert (down.mean, down.std) == (grey.mean, grey.std)
    small = match(colour, toy(1, (1, 32, 32)))
    r, g, b = colour.images.float().unbind(1)
    assert (small.images[:, 0] - (0.299 * r + 0.587 * g + 0.114 * b)).abs().max() <= 0.55
    want = F.interpolate(colour.images.double(), (16, 16), mode="bilinear", antialias=True)
    assert (match(colour, toy(1, (3, 16, 16))).images - want).abs().max() <= 0.51
    refuses("images and features cannot be compared", match, colour, toy(3, (5, 1, 1)))
    streamed = load("imagenet", "test", imagenet, image_size=32)
    assert match(streamed, colour).mean == (0.4, 0.5, 0.6)
    refuses("image_size=8", match, streamed, toy())


def test_ood_sets(tmp_path, capsys):
    train = load("glyphs", "train")
    save_png(tmp_path / "odd one" / "deep" / "er" / "x.PNG")
    save_png(tmp_path / "odd one" / "y.jpg", np.full((30, 20, 3), 200, np.uint8))
    names = ["glyphs_letters", "svhn", "tiny_imagenet", f"folder:{tmp_path}/odd one"]
    sets = data.ood_sets(names, train, tmp_path)
    assert list(sets) == ["glyphs_letters", "odd_one"]
    for title, dataset in sets.items():
        assert dataset.name == title
        assert dataset.shape == (1, 28, 28)
        assert (dataset.mean, dataset.std) == (train.mean, train.std)
    assert sets["odd_one"].files == ("deep/er/x.PNG", "y.jpg")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all("http" in line for line in out)
    assert out[0].startswith("skipped: svhn: ")
    refuses("not found", data.ood_sets, ["svhn"], train, tmp_path, required=True)
    refuses("'swhn' is unknown; .*folder:PATH, nonsense", data.ood_sets, ["swhn"], train)
    refuses("dataset .. is unknown", data.ood_sets, [""], train)
    assert not data.ood_sets(["glyphs"], train)
    assert "another set of this run is called glyphs" in capsys.readouterr().out


def test_predict_set_knows_labels_by_class_names(tmp_path):
    glyphs = load("glyphs", "train")
    own = data.predict_set("dirty_glyphs", glyphs)
    assert torch.equal(own.labels, load("dirty_glyphs", "test").labels)
    letters = data.predict_set("glyphs_letters", glyphs)
    assert letters.labels.unique().tolist() == [-1]
    # Labels and the names that are printed for them are those of the training set.
    assert (letters.num_classes, letters.classes) == (10, glyphs.classes)
    train = load(write_folder(tmp_path / "pets", train=("ab", 9), test=("ab", 2)), "train")
    for place in ("b", "new/a", "c", "."):
        save_png(tmp_path / "more" / place / "x.png")
    more = data.predict_set(f"folder:{tmp_path}/more", train)
    assert more.files == ("b/x.png", "c/x.png", "new/a/x.png", "x.png")
    assert more.labels.tolist() == [1, -1, 0, -1]
    refuses("svhn.*not found", data.predict_set, "svhn", glyphs, tmp_path)


def test_nonsense_is_prepared_like_the_training_set(tmp_path):
    own = write_folder(tmp_path / "own", train=("ab", 9), test=("ab", 2))
    prepared = data.preparation_of("torchvision/vit_b_16", "none", 40)
    for train in (toy(9, (3, 12, 20)), load(own, "train", image_size=70),
                  load(own, "train", preparation=prepared),
                  replace(toy(9), images=toy(9).images / 255)):
        found = data.predict_set("nonsense", train)
        assert found.images.shape == (70, *train.shape) and found.images.dtype == torch.uint8
        assert (found.mean, found.std, found.classes) == (train.mean, train.std, train.classes)
        assert found.labels.unique().tolist() == [-1]
        assert torch.equal(data.ood_sets(["nonsense"], train)["nonsense"].images, found.images)
        batch = next(Loader(found, 70).epoch()).images
        for name, pixel in (("white-0", 1), ("black-0", 0)):
            seen = batch[found.files.index(name)].flatten(1).unique(dim=1)[:, 0]
            want = (pixel - torch.tensor(train.mean)) / torch.tensor(train.std)
            torch.testing.assert_close(seen, want)
    images = dict(zip(found.files, found.images.double()))
    for row, column in ((0, 0), (1, 3), (2, 2), (7, 6)):  # stripes and squares of 8 / 3 pixels
        is_white = (3 * row // 8 + 3 * column // 8) % 2
        assert (images["checkerboard-1"][:, row, column] == 255 * is_white).all()
        assert (images["stripes-1"][:, row, column] == 255 * (3 * row // 8 % 2)).all()
    refuses("nonsense are images, but toy has features", data.predict_set, "nonsense",
            toy(9, (3, 1, 1)))


# ---- Several processes ---------------------------------------------------------------------


def read_on_two_machines(folder):
    """What each rank finds where it has a disk of its own: {case: result or error}."""
    common.start("cpu")
    disk = Path(folder) / str(common.rank())
    train = load("glyphs", "train", limit=10)
    results = {"kinds": data.corruption_kinds("cifar10_c", disk), "digest": data.digest(train),
               "ood": list(data.ood_sets([f"folder:{disk}/odd", "glyphs_letters"], train))}
    calls = {
        "folder": lambda: load(f"folder:{disk}/pets", "train"),
        "unreadable": lambda: load(f"folder:{disk}/broken", "ood"),
        "predict": lambda: data.predict_set(f"folder:{disk}/odd", train),
        "features": lambda: data.feature_set(disk / "z.npz"),
        "text": lambda: data.load_text("sst2", "test", disk),
        "corrupted": lambda: data.load_corrupted("cifar10_c", "fog", 1, disk),
    }
    for case, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        results[case] = str(caught.value)
    common.gather_objects(None)  # no process waits for one that has stopped
    return results


def test_machines_agree_on_what_is_there(tmp_path, ranks):
    """The second machine lacks each set, or has a damaged one; the first one has all."""
    write_folder(tmp_path / "0" / "pets", train=("ab", 10), test=("ab", 3))
    for file in ("0/odd/x.png", "0/broken/x.png", "1/broken/x.png"):
        save_png(tmp_path / file)
    (tmp_path / "1" / "broken" / "x.png").write_text("no image")
    np.savez(tmp_path / "0" / "z.npz", features=np.eye(3), labels=np.arange(3))
    (tmp_path / "0" / "SST-2").mkdir()
    for file in ("dev.tsv", "train.tsv", "test.tsv"):
        (tmp_path / "0" / "SST-2" / file).write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    (tmp_path / "0" / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "0" / "CIFAR-10-C" / "fog.npy", np.zeros((50000, 32, 32, 3), np.uint8))
    np.save(tmp_path / "0" / "CIFAR-10-C" / "labels.npy", np.zeros(50000, np.uint8))
    first, second = ranks(read_on_two_machines, str(tmp_path))
    assert first == second
    assert first["kinds"] == ["fog"]  # the main process decides
    assert first["ood"] == ["glyphs_letters"]
    for case, says in {"folder": "1/pets not found", "unreadable": "1/broken/x.png: unreadable",
                       "predict": "1/odd not found", "features": "1/z.npz", "text": "1/SST-2",
                       "corrupted": "1/CIFAR-10-C/fog.npy"}.items():
        assert says in first[case]


# ---- Features ------------------------------------------------------------------------------


def save_features(path, features, labels=None, names=None):
    arrays = {"features": features, "labels": labels, "names": names}
    np.savez(path, **{key: np.asarray(a) for key, a in arrays.items() if a is not None})
    return path


def batch_of(dataset):
    return next(Loader(dataset, len(dataset)).epoch()).images[:, :, 0, 0]


def test_feature_set_is_standardised_by_the_loader(tmp_path):
    # The third column varies little about a large mean, the last two are constant.
    z = np.random.default_rng(0).normal((5, -300, 1.7e9), (2, 40, 1), (400, 3))
    z = np.hstack([z, np.full((400, 1), 0.1), np.full((400, 1), 0.7)])
    train = data.feature_set(save_features(tmp_path / "z.train.npz", z, np.arange(400) % 6))
    assert (train.name, train.num_classes, train.shape) == ("z.train", 6, (5, 1, 1))
    assert train.mean == pytest.approx(z.mean(0))
    assert train.std == pytest.approx([*z.std(0)[:3], 1, 1])
    batch = batch_of(train)
    want = np.hstack([(z[:, :3] - z[:, :3].mean(0)) / z[:, :3].std(0), np.zeros((400, 2))])
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, torch.tensor(want).float(), atol=1e-5, rtol=1e-5)
    test = save_features(tmp_path / "test.npz", z[:5].astype(">f4"), np.arange(5, dtype="u1"))
    test = data.feature_set(test, like=train)
    assert (test.num_classes, test.mean, test.std) == (6, train.mean, train.std)
    assert test.labels.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(batch_of(test)[:, :2], batch[:5, :2], atol=1e-4, rtol=0)


def test_names_of_classes_and_rows(tmp_path):
    z = np.eye(4, 2)
    path = save_features(tmp_path / "a.npz", z, ["dog", "ant", "dog", "cat"], list("wxyz"))
    train = data.feature_set(path)
    assert (train.classes, train.labels.tolist()) == (("ant", "cat", "dog"), [2, 0, 2, 1])
    assert train.files == ("w", "x", "y", "z")
    # Names mean the same in another file, which may have fewer or others; numbers mean nothing.
    less = save_features(tmp_path / "b.npz", z, ["dog", "dog", "cat", "cat"])
    assert data.feature_set(less, train).labels.tolist() == [2, 2, 1, 1]
    other = save_features(tmp_path / "c.npz", z, ["dog", "elk", "ant", "ant"], list("1234"))
    predicted = data.predict_set(str(other), train)
    assert predicted.labels.tolist() == [2, -1, 0, 0]
    assert predicted.files == ("1", "2", "3", "4")
    refuses(r"c.npz: 'labels' must be \[4\] classes of a", data.feature_set, other, train)
    numbers = save_features(tmp_path / "d.npz", z, [0, 1, 2, 0])
    assert data.predict_set(str(numbers), train).labels.tolist() == [-1] * 4
    refuses("must be .* classes of a", data.feature_set, numbers, train)
    bad = save_features(tmp_path / "e.npz", z, [0, 1, 2, 0], ["x"])
    refuses(r"e.npz: 'names' must be \[4\] texts", data.feature_set, bad)


def test_features_as_ood_may_have_other_classes(tmp_path):
    train = data.feature_set(save_features(tmp_path / "a.npz", np.eye(3, 2), [0, 1, 2]))
    save_features(tmp_path / "b.npz", np.ones((3, 2)), [0, 2, 99])
    save_features(tmp_path / "c.npz", np.ones((3, 2)))
    sets = data.ood_sets([f"{tmp_path}/b.npz", f"{tmp_path}/c.npz"], train)
    assert list(sets) == ["b", "c"]
    assert (sets["c"].mean, sets["c"].num_classes) == (train.mean, 3)
    assert data.predict_set(f"{tmp_path}/b.npz", train).labels.tolist() == [0, 2, -1]
    assert data.predict_set(f"{tmp_path}/c.npz", train).labels.tolist() == [-1] * 3
    refuses("cannot be compared", data.ood_sets, ["glyphs_letters"], train)


ROWS = np.ones((3, 2))


@pytest.mark.parametrize("features, labels, says", [
    (np.ones((3, 2, 1)), [0, 1, 2], "'features' must be"),
    (np.ones((0, 2)), [], "'features' must be"),
    (np.full((3, 2), np.nan), [0, 1, 2], "contain NaN"),
    (np.full((3, 2), 1e200), [0, 1, 2], "exceed float32"),
    (ROWS, [0, 1, -1], "'labels' must be"),
    (ROWS, [0, 1, 10**12], "'labels' must be.*below 1,000,000"),
    (ROWS, [0, 1], r"'labels' must be \[3\]"),
    (ROWS, ["a", "b"], r"'labels' must be \[3\]")])
def test_bad_features_and_labels(tmp_path, features, labels, says):
    train = data.feature_set(save_features(tmp_path / "train.npz", np.eye(3, 2), [0, 1, 2]))
    path = save_features(tmp_path / "odd.npz", features, labels)
    refuses(f"odd.npz.*{says}", data.read_features, path)
    refuses(f"odd.npz.*{says}", data.predict_set, str(path), train)


def test_features_that_do_not_fit(tmp_path):
    train = data.feature_set(save_features(tmp_path / "train.npz", np.eye(3, 2), [0, 1, 2]))
    path = save_features(tmp_path / "odd.npz", np.ones((3, 4)), [0, 1, 2])
    refuses(r"must be \[N, 2\], not \[3, 4\]", data.feature_set, path, like=train)
    path = save_features(tmp_path / "odd.npz", np.ones((3, 2)), [0, 1, 3])
    refuses(r"'labels' must be \[3\] classes of train", data.feature_set, path, like=train)
    path = save_features(tmp_path / "bare.npz", np.ones((3, 2)))
    refuses("bare.npz needs the arrays features, labels; it has features", data.feature_set, path)
    (tmp_path / "text.npz").write_text("text")
    refuses("text.npz is not a readable .npz file", data.load_arrays, tmp_path / "text.npz", ["a"])


# ---- Embedded sets -------------------------------------------------------------------------

# rows of train and test, classes, a digest of the test part's labels, and its mean grey
EMBEDDED = {
    "glyphs": (10000, 2000, 10, "5cdcce1ed6aa", 53.175),
    "glyphs_ambiguous": (10000, 2000, 10, "a960ed3cebbd", 48.752),
    "dirty_glyphs": (16000, 4000, 10, "a184342675ae", 50.963),
    "glyphs_letters": (10000, 2000, 16, "14168ca16fcc", 54.629),
    "numbers_ambiguous": (5000, 2000, 1000, "632da11a236c", 58.053),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets(name):
    train = load(name, "train")
    val = load(name, "val")
    test = load(name, "test")
    num_rows, num_test_rows, num_classes, labels, grey = EMBEDDED[name]
    assert len(train) + len(val) == num_rows
    assert abs(len(val) - num_rows // 10) < 100
    assert (len(test), test.num_classes, test.shape) == (num_test_rows, num_classes, (1, 28, 28))
    pool = torch.cat([train.images, val.images]) / 255
    assert test.mean == train.mean
    assert pool.mean() == pytest.approx(test.mean[0], abs=1e-4)
    assert pool.std() == pytest.approx(test.std[0], abs=1e-4)
    images = {image.numpy().tobytes() for image in train.images}
    assert not images & {image.numpy().tobytes() for image in test.images}
    assert digest(test.labels) == labels
    # processors round differently
    assert test.images.double().mean() == pytest.approx(grey, abs=0.02)


@pytest.mark.parametrize("name", ["glyphs_ambiguous", "numbers_ambiguous"])
def test_labels_of_blends_follow_their_distribution(name):
    train = load(name, "train")
    val = load(name, "val")
    probs = torch.cat([train.label_probs, val.label_probs])
    labels = torch.cat([train.labels, val.labels])
    assert torch.allclose(probs.sum(1), torch.ones(len(probs)))
    assert ((probs > 0).sum(1) == 2).all()
    top = probs.amax(1)
    hits = probs.gather(1, labels[:, None])[:, 0]
    assert (hits > 0).all()
    likely = (hits == top).double().mean().item()  # as often as its probability
    assert likely == pytest.approx(top.mean().item(), abs=4 * math.sqrt(0.25 / len(probs)))
    if name == "glyphs_ambiguous":  # each image twice, never in both parts
        assert not set(train.groups.tolist()) & set(val.groups.tolist())


def test_dirty_glyphs_are_clean_ones_and_blends():
    train = load("dirty_glyphs", "train")
    val = load("dirty_glyphs", "val")
    test = load("dirty_glyphs", "test")
    assert (test.label_probs.amax(1) == 1).tolist() == [True] * 2000 + [False] * 2000
    assert torch.equal(test.images[2000:], load("glyphs_ambiguous", "test").images)
    assert len(train.groups.unique()) + len(val.groups.unique()) == 8000 + 4000
