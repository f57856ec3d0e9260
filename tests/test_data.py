"""data.py: splits, published layouts, own folders, OOD sets, the loader, corruptions, glyphs."""

import hashlib
import math
import os
import re
import signal
import urllib.request
from argparse import Namespace
from dataclasses import fields, replace
from functools import partial
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
from data import ImageSet, Loader, StreamedSet, convert_like, load, load_splits, train_val_split


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
            assert torch.equal(joined(parts, field), getattr(batch, field)), field
        if "molecules" in batch._fields:
            together = torch.cat([part.molecules.positions for part in parts])
            assert torch.equal(together, batch.molecules.positions)


def joined(batches, field):
    """What all batches have, one after another."""
    return torch.cat([getattr(batch, field) for batch in batches])


def options(dataset, data_dir="data", **changes):
    """The options of a script, as far as data.py reads them."""
    given = {"dataset": dataset, "data_dir": data_dir, "image_size": None, "limit_train": None,
             "model": "resnet18", "weights": None, "freeze": False, "ood": [], "predict": None,
             "explicit": set(), "batch_size": 128, "device": torch.device("cpu"), "workers": 0,
             "amp": "off", "seed": 1, "epochs": 1, "eval": False}
    return Namespace(**given | changes)


def splits_of(dataset, data_dir="data", seed=1, val_fraction=0.1, **changes):
    """The Splits of a data set."""
    return load_splits(options(dataset, data_dir, **changes), seed, val_fraction=val_fraction)


def toy(n=50, shape=(3, 8, 8), seed=0, **fields):
    """An ImageSet of random bytes with seven classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)
    stats = {"mean": (0.4, 0.5, 0.6)[:shape[0]], "std": (0.2, 0.25, 0.3)[:shape[0]]}
    stats.update(fields)
    return ImageSet("toy", images, torch.arange(n) % 7, 7, **stats)


def refuses(match, call, *args, kind=UserError, **kwargs):
    """`call` raises a UserError, or its kind, of one line that matches `match`."""
    with pytest.raises(kind, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


def noise(seed, shape=(20, 30, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


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
    part = dataset.select([4, 1])
    assert torch.equal(part.images, dataset.images[[4, 1]])
    assert torch.equal(part.label_probs, torch.eye(6)[[4, 1]])
    assert part.labels.tolist() == [4, 1]
    assert part.groups.tolist() == [2, 0]
    assert part.files == ("e", "b")


def labelled(labels, **fields):
    """Black images with these labels."""
    labels = torch.as_tensor(labels)
    return ImageSet("toy", torch.zeros(len(labels), 1, 1, 2), labels, 20, (0.5,), (0.5,), **fields)


def test_a_limit_keeps_the_shares_of_classes():
    periodic = labelled(torch.arange(2000) % 10, files=tuple(map(str, range(2000))))
    for limit in (10, 100, 200, 1000):
        part = data.stratified_subset(periodic, limit)
        assert part.labels.bincount().tolist() == [limit // 10] * 10
        rows = [int(file) for file in part.files]
        assert rows == sorted(rows) and part.files == data.stratified_subset(periodic, limit).files
    uneven = labelled([0] * 50 + [1] * 50 + [2])
    assert data.limit_train(uneven, 21).labels.bincount().tolist() == [10, 10, 1]
    refuses(r"toy: 2 training example\(s\) leave out 1 class\(es\); raise --limit-train",
            data.limit_train, uneven, 2)
    numbers = labelled(torch.arange(6.0))
    assert data.limit_train(numbers, 4).labels.tolist() == [0, 1, 3, 4]  # evenly spaced


def test_a_limit_keeps_groups_whole():
    train = data.limit_train(load("dirty_glyphs", "train"), 1000)
    assert 990 <= len(train) <= 1000
    blends = train.groups[train.label_probs.amax(1) < 1].bincount()
    assert blends.unique().tolist() == [0, 2]
    assert (blends == 2).sum() == 250  # half of the rows are clean
    assert (train.labels.bincount() - 100).abs().max() <= 5
    assert len(data.stratified_subset(labelled([0] * 9, groups=torch.zeros(9).long()), 4)) == 0


def share_of_labels(dataset):
    return dataset.labels.bincount(minlength=20) / len(dataset)


def test_a_limit_keeps_the_shares_of_all_labels_of_groups():
    """All groups have the first label 0, and most of them the second label 0."""
    second = torch.zeros(200).long()
    second[::4] = 1
    second[1:40:4] = 2  # in 10 of 200 groups
    labels = torch.stack([torch.zeros(200).long(), second], 1).flatten()
    whole = labelled(labels, groups=torch.arange(200).repeat_interleave(2))
    for limit, largest in ((20, 0.051), (40, 0.051), (100, 0.011), (200, 0.001)):
        few = data.limit_train(whole, limit)  # refuses to lose a class
        assert few.groups.unique(return_counts=True)[1].unique().tolist() == [2]
        assert (share_of_labels(few) - share_of_labels(whole)).abs().max() < largest
        assert torch.equal(few.groups, data.limit_train(whole, limit).groups)


def test_a_rare_class_is_never_validation_alone(tmp_path):
    labels = torch.tensor([0] * 50 + [1] * 50 + [2])
    for seed in range(20):
        train, val = data.class_split(labels, seed)
        assert labels[val].bincount().tolist() == [5, 5]
        assert sorted([*train, *val]) == list(range(101))
    name = write_folder(tmp_path / "pets", train=("ab", 20), test=("abc", 1))
    save_png(tmp_path / "pets" / "train" / "c" / "0.png")
    for seed in (1, 8, 15):
        splits = splits_of(name, image_size=4, seed=seed)
        assert splits.train.labels.bincount()[2] == 1
        assert splits.val.labels.tolist() == [0, 0, 1, 1]


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


def test_fingerprint_covers_what_training_sees():
    dataset = toy(6, label_probs=torch.eye(6), groups=torch.arange(6), classes=tuple("abcdefg"))
    want = data.fingerprint(dataset)
    assert len(want) == 64
    for same in ({}, {"name": "other"}, {"files": tuple("uvwxyz")}):
        assert data.fingerprint(replace(dataset, **same)) == want
    one_pixel = dataset.images.clone()
    one_pixel[5, 2, 7, 7] ^= 1
    changes = {"images": one_pixel, "labels": dataset.labels.flip(0), "mean": (0.4, 0.5, 0.61),
               "std": (0.2, 0.2, 0.2), "label_probs": None, "groups": torch.zeros(6).long(),
               "classes": tuple("abcdefh"), "num_classes": 8}
    changed = {data.fingerprint(replace(dataset, **{name: new})) for name, new in changes.items()}
    assert len(changed - {want}) == len(changes)
    pair = data.fingerprint(dataset, toy(3))
    assert len({want, pair, data.fingerprint(toy(3), dataset)}) == 3


def test_fingerprint_of_files_is_that_of_their_content(tmp_path, monkeypatch):
    """Neither the times of files nor the place of their folder matter; bytes do."""
    for i in range(3):
        save_png(tmp_path / "old" / f"{i}.png", noise(i))
    dataset = load(f"folder:{tmp_path}/old", "ood", image_size=96)
    want = data.fingerprint(dataset)
    for other in (replace(dataset, resize=230), dataset.select([1, 0, 2])):
        assert data.fingerprint(other) != want
    os.utime(tmp_path / "old" / "1.png", (1, 1))
    (tmp_path / "old").rename(tmp_path / "new")
    dataset = load(f"folder:{tmp_path}/new", "ood", image_size=96)
    assert data.fingerprint(dataset) == want
    content = bytearray((tmp_path / "new" / "2.png").read_bytes())

    def fingerprint_with(content):
        (tmp_path / "new" / "2.png").write_bytes(content)
        return data.fingerprint(dataset)

    content[-20] ^= 1
    assert fingerprint_with(content) != want
    # Names and sizes identify many bytes: reading all of them would take too long.
    monkeypatch.setattr(data, "FEW_BYTES", 100)
    want = fingerprint_with(content)
    content[-20] ^= 2
    assert fingerprint_with(content) == want
    assert fingerprint_with(content + b"x") != want


# ---- The sets of a run ---------------------------------------------------------------------


def test_load_splits(tmp_path):
    save_png(tmp_path / "new" / "3" / "x.png")
    args = options("glyphs", tmp_path, limit_train=500, ood=["glyphs_letters"],
                   predict=f"folder:{tmp_path}/new")
    seen = []

    def statistics(dataset):
        seen.append(len(dataset))
        return [0.25], [0.5]

    splits = load_splits(args, 3, statistics=statistics)
    whole = load("glyphs", "train")
    train, val = train_val_split(10000, 3)
    limited = data.limit_train(whole.select(train), 500)
    assert torch.equal(splits.train.images, limited.images)
    assert torch.equal(splits.val.images, whole.images[val])
    assert torch.equal(splits.test.images, load("glyphs", "test").images)
    assert list(splits.ood) == ["glyphs_letters"] and splits.predict.labels.tolist() == [3]
    for dataset in (splits.train, splits.val, splits.test, *splits.ood.values(), splits.predict):
        assert (dataset.mean, dataset.std) == ((0.25,), (0.5,))
    assert seen == [9000]  # the whole training part
    # The fingerprint is that of all training images, whatever a seed selects.
    assert splits.fingerprints == {"training data": data.fingerprint(whole),
                                   "test data": data.fingerprint(load("glyphs", "test"))}
    assert splits.summary() == (
        "glyphs: 10 classes, 500 training, 1,000 held-out and 2,000 test images of 1 x 28 x 28; "
        "always guessing the most frequent class: accuracy 0.100")
    assert list(load_splits(args, 3, ood=["nonsense"]).ood) == ["nonsense"]
    args = options("glyphs")
    assert load_splits(args, 1, val_fraction=0).val is None
    split = load_splits(args, 1, split=lambda whole: (torch.arange(9), torch.arange(20, 24)))
    assert split.train.labels.tolist() == whole.labels[:9].tolist()
    assert split.val.labels.tolist() == whole.labels[20:24].tolist()


def test_splits_without_training_images(tmp_path):
    """ImageNet's validation images are enough to evaluate a network of torchvision."""
    for k in range(2):
        save_png(tmp_path / "imagenet" / "val" / f"n{k}" / "a.png", noise(k))
    torch.save({}, tmp_path / "net.pt")
    args = options("imagenet", tmp_path, weights=str(tmp_path / "net.pt"))
    splits = load_splits(args, 1, val_fraction=0, reads_train=False,
                         statistics=lambda dataset: ([0.1] * 3, [0.2] * 3))
    assert splits.train.files == splits.test.files == ("n0/a.png", "n1/a.png")
    assert splits.test.mean == (0.1, 0.1, 0.1)
    assert list(splits.fingerprints) == ["test data", "file of --weights"]
    assert splits.summary().startswith("imagenet: 2 classes, 2 test images of 3 x 224 x 224; ")
    args.weights = "none"
    assert "file of --weights" not in load_splits(args, 1, reads_train=False).fingerprints
    refuses("imagenet.train/<class>.*not found", load_splits, args, 1)


def test_fingerprint_of_a_folder_covers_all_its_training_images(tmp_path):
    name = write_folder(tmp_path / "pets", train=("ab", 9), val=("ab", 3), test=("ab", 2))
    splits = splits_of(name, seed=1, limit_train=4)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (4, 6, 4)
    assert splits_of(name, seed=2).fingerprints == splits.fingerprints
    assert data.has_val_folder(name) and not data.has_val_folder("glyphs")
    for place, noun in (("train/b/8", "training data"), ("val/a/1", "training data"),
                        ("test/a/0", "test data")):
        before = splits_of(name, limit_train=4).fingerprints
        save_png(tmp_path / "pets" / f"{place}.png", noise(5, (40, 30, 3)))
        after = splits_of(name, limit_train=4).fingerprints
        assert [key for key in after if after[key] != before[key]] == [noun]


# ---- Published sets ------------------------------------------------------------------------


def test_real_mnist_and_cifar10(real_data):
    """Rows are in the order of the files, in which a split by published indices expects them."""
    from torchvision.datasets import CIFAR10
    train, val, test = splits_of("mnist", real_data)[:3]
    assert (len(train), len(val), len(test)) == (54000, 6000, 10000)
    assert (test.shape, test.images.dtype) == ((1, 28, 28), torch.uint8)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    std, mean = torch.std_mean(torch.cat([train.images, val.images]) / 255)
    assert mean == pytest.approx(train.mean[0], abs=5e-5)
    assert std == pytest.approx(train.std[0], abs=1e-4)
    raw = CIFAR10(real_data)
    train = load("cifar10", "train", real_data)
    assert train.labels.tolist() == raw.targets
    assert np.array_equal(train.images[::25].permute(0, 2, 3, 1), raw.data[::25])
    assert train.classes[:2] == ("airplane", "automobile")
    # The published std is the mean over the images of the std within each.
    within = torch.tensor(raw.data[:5000]).flatten(1, 2).double().std(1).mean(0) / 255
    assert within.tolist() == pytest.approx(train.std, abs=3e-3)


def test_torchvision_completes_raw_files(tmp_path, monkeypatch):
    def read(*_, train, download):
        assert download and not train  # so that what a killed download left is mended
        return SimpleNamespace(data=torch.zeros(12, 28, 28, dtype=torch.uint8),
                               targets=torch.arange(12) % 10, classes=())

    monkeypatch.setitem(data.TORCHVISION, "mnist", read)
    assert load("mnist", "test", tmp_path).classes == tuple("0123456789")


@pytest.mark.parametrize("name, path", [
    ("mnist", "MNIST.raw"), ("svhn", "test_32x32.mat"), ("imagenet", "imagenet.val"),
    ("tiny_imagenet", "tiny-imagenet-200.wnids.txt"),
    ("ambiguous_mnist", "AmbiguousMNIST.amnist_samples.pt"), ("imagenet_c", "imagenet-c.fog.2"),
    ("sst2", "SST-2.test.tsv"), ("qm9", "QM9.gdb9.sdf")])
def test_absent_sets_name_the_path_and_the_site(tmp_path, name, path):
    read = {"imagenet_c": partial(data.load_corrupted, name, "fog", 2),
            "sst2": partial(data.load_text, name, "test"),
            "qm9": partial(data.load_molecules, name, "test")}
    for _ in range(2):  # a failed download leaves nothing that is taken for the set
        refuses(rf"{path}.*not found.*https?://", read.get(name, partial(load, name, "test")),
                tmp_path, kind=data.DatasetNotFound)


@pytest.mark.parametrize("call, says", [
    (lambda: load("mnits", "train"), "'mnits' is unknown.*glyphs"),
    (lambda: load("", "train"), "dataset '' is unknown"),
    (lambda: load("glyphs", "valid"), "split 'valid'"),
    (lambda: load("glyphs", "val"), "glyphs has no validation set"),
    # Only some scripts have an option for a larger share.
    (lambda: splits_of("glyphs", val_fraction=1e-5), "glyphs: 10000 .* too few .*; add examples$"),
    (lambda: splits_of("glyphs", limit_train=1), "glyphs: 1 training .*leave out 9.*limit-train"),
    (lambda: load("mnist", "test", image_size=32), "--image-size has no effect on .*mnist"),
    (lambda: load("imagenet_a", "train"), "imagenet_a has a test split only"),
    (lambda: data.load_corrupted("cifar10_c", "x", 1), "x.npy: .*No such file.*zenodo.org/.*this"),
    (lambda: data.load_corrupted("cifar10", "fog", 1), "'cifar10' is unknown.*imagenet_c"),
    (lambda: data.load_molecules("clusters", "ood"), "split 'ood' is unknown.*test"),
    (lambda: Loader(toy(), 0), r"toy: 0 example\(s\) cannot"),
    (lambda: Loader(toy(3, (2, 1, 1)), 5, augment="crop_flip"), "would destroy features"),
])
def test_errors_of_the_user_are_one_line(call, says):
    refuses(says, call)


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
    train, val = splits_of("ambiguous_mnist", tmp_path)[:2]
    assert len(val.groups.unique()) == 600
    assert not set(train.groups.tolist()) & set(val.groups.tolist())
    pool = load("ambiguous_mnist", "train", tmp_path)
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
    dataset = data.load_corrupted("cifar10_c", "fog", 5, tmp_path)
    assert np.array_equal(dataset.images[:, 1, 3, 4], 40 + rows[40000:] % 7)
    assert dataset.labels.tolist() == (rows[40000:] % 10).tolist()
    assert (dataset.name, dataset.num_classes) == ("cifar10_c_fog_s5", 10)
    assert (dataset.shape, dataset.mean) == ((3, 32, 32), (0.4914, 0.4822, 0.4465))
    # A part is named as a part.
    sets = data.corrupted_sets(toy(20, (3, 32, 32)), shifted("cifar10", tmp_path, "published", 30))
    assert (sets.name, sets.kinds) == ("cifar10_c_1of19", ["fog"])
    few = sets.read("fog", 2)
    assert few.labels.bincount().tolist() == [3] * 10
    assert (few.mean, few.std) == (toy().mean, toy().std)
    out = capsys.readouterr().out
    assert "CIFAR-10-C: lacks all or a part of gaussian_noise, shot_noise, " in out
    (folder / "spatter.npy").write_bytes((folder / "fog.npy").read_bytes()[:100000])
    refuses("spatter.npy: .*get it from https", data.load_corrupted, "cifar10_c", "spatter", 1,
            tmp_path)


def shifted(dataset, data_dir="data", shift="computed", shift_examples=0, **changes):
    return options(dataset, data_dir, shift=shift, shift_examples=shift_examples, **changes)


def test_missing_severities(tmp_path, capsys):
    for severity in range(1, 6):
        for kind in ("zoom_blur", "spatter"):
            save_png(tmp_path / "imagenet-c" / kind / str(severity) / "n01" / "a.png")
    save_png(tmp_path / "imagenet-c" / "frost" / "4" / "n01" / "a.png")
    save_png(tmp_path / "imagenet" / "val" / "n01" / "a.png")
    test = load("imagenet", "test", tmp_path)
    sets = data.corrupted_sets(test, shifted("imagenet", tmp_path, "published"))
    out = capsys.readouterr().out
    assert (sets.name, sets.kinds) == ("imagenet_c_2of19", ["zoom_blur", "spatter"])
    assert "snow, frost, fog" in out and "zoom" not in out
    streamed = sets.read("spatter", 4)
    assert (streamed.shape, streamed.resize, len(streamed)) == ((3, 224, 224), 224, 1)
    assert streamed.name == "imagenet_c_spatter_s4"


@pytest.mark.parametrize("dataset", ["cifar10", "glyphs"])  # of glyphs, none was published
def test_corrupted_sets_that_are_not_found(tmp_path, dataset):
    args = shifted(dataset, tmp_path, "published")
    assert data.corrupted_sets(toy(), args) is None
    args.explicit = {"shift"}
    refuses(f"--shift published: {dataset}_c not found; use --shift none or computed",
            data.corrupted_sets, toy(), args)
    assert data.corrupted_sets(toy(), shifted(dataset, shift="none")) is None


def test_computed_sets(tmp_path):
    name = write_folder(tmp_path / "pets", train=("ab", 3), test=("ab", 4))
    streamed = load(name, "test", image_size=70)
    for test, expected in ((load("glyphs", "test"), "glyphs_c"), (streamed, "pets_computed_c")):
        sets = data.corrupted_sets(test, shifted("any", shift_examples=6))
        assert (sets.name, sets.kinds) == (expected, list(data.CORRUPTIONS))
        few = sets.read("shot_noise", 2)
        clean = data.stratified_subset(test, 6)
        assert (len(few), few.name) == (6, f"{test.name}_computed_shot_noise_s2")
        if isinstance(clean, StreamedSet):
            clean = clean.in_memory()
        assert torch.equal(few.images, data.corrupted(clean, "shot_noise", 2).images)
    whole = data.corrupted_sets(toy(), shifted("any"))
    assert len(whole.read("contrast", 1)) == len(toy())
    features = toy(9, (3, 1, 1))
    refuses("--shift computed corrupts images, but toy has features", data.corrupted_sets, features,
            shifted("any"))
    refuses("toy: corruptions can only be computed", data.corrupted, features, "contrast", 1)


# ---- Folders -------------------------------------------------------------------------------


def write_tiny_imagenet(data_dir):
    root = data_dir / "tiny-imagenet-200"
    for k, wnid in enumerate(("n02", "n01")):  # an order that sorting would change
        for i in range(5):
            size = (64, 64, 3) if i else (64, 64)  # some are grey
            array = np.full(size, 100 * k + 10 * i, np.uint8)
            save_png(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", array)
        array = np.full((64, 64, 3), 20 + 180 * k, np.uint8)
        save_png(data_dir / "Tiny-ImageNet-C" / "fog" / "2" / wnid / "a.JPEG", array)
    notes = ""
    for i, wnid in enumerate(("n01", "n02", "n01")):
        save_png(root / "val" / "images" / f"val_{i}.JPEG",
                 np.full((64, 64, 3), 50 * i, np.uint8))
        notes += f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n"
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text(notes)


def test_tiny_imagenet(tmp_path):
    write_tiny_imagenet(tmp_path)
    pool = load("tiny_imagenet", "train", tmp_path)
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
    args = shifted("tiny_imagenet", tmp_path, "published")
    assert data.corrupted_sets(test, args) is None  # not all severities
    # Corrupted images have all that the clean ones have, and are prepared as these are.
    large = load("tiny_imagenet", "test", tmp_path, image_size=128)
    fog = data.load_corrupted("tiny_imagenet_c", "fog", 2, tmp_path,
                              transform=large.transform)
    assert fog.transform == large.transform and fog.shape == (3, 128, 128)


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
    splits = splits_of(name, image_size=24)
    train, val, test = splits[:3]
    assert splits.summary() == (
        "folder my_pets_: 2 classes, 18 training, 2 held-out and 6 test images of 3 x 24 x 24; "
        "always guessing the most frequent class: accuracy 0.500")
    assert not set(train.files) & set(val.files)
    assert isinstance(train, ImageSet) and train.classes == ("a", "b")
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
    refuses(says, splits_of, name)


def test_files_that_are_skipped_are_named(tmp_path, capsys):
    root = tmp_path / "pets"
    name = write_folder(root, train=("ab", 3), test=("ab", 1))
    for path in ("train/a/more/x.png", "train/a/more/deep/y.JPG", "train/loose.png",
                 "test/c/z.png"):  # c is no class of train
        save_png(root / path, noise(len(path)))
    (root / "train" / "b" / "notes.txt").write_text("no image")
    (root / "train" / "a" / "._0.png").write_text("hidden")
    for _ in range(2):  # said once
        assert len(load(name, "train")) == 6
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "train: skipped 4 file(s) that are not of the types .jpg .jpeg .png " in out
    assert out.endswith("first of them: a/more/deep/y.JPG, a/more/x.png, b/notes.txt\n")
    assert len(load(name, "test")) == 2
    assert capsys.readouterr().out.endswith("of train, the first of them: c/z.png\n")
    assert len(load(name, "ood")) == 12


def test_links(tmp_path, capsys):
    """Links that lead round in a circle, nowhere or to themselves, and splits that share files."""
    name = write_folder(tmp_path / "pets", train=("ab", 3), test=("ab", 2), more=("ab", 1))
    root = tmp_path / "pets"
    (root / "more" / "a" / "round").symlink_to(root / "more")
    (root / "more" / "gone.png").symlink_to("nowhere")
    (root / "more" / "self.png").symlink_to("self.png")
    os.mkfifo(root / "more" / "pipe.png")
    assert load(f"folder:{root}/more", "ood").files == ("a/0.png", "b/0.png")
    assert capsys.readouterr().out == (
        f"folder:{root}/more: skipped 2 link(s) that lead nowhere, the first of them: gone.png, "
        "self.png\n")
    (root / "more" / os.fsdecode(b"caf\xe9")).mkdir()
    refuses(r"/caf\\xe9: the name is not UTF-8; rename it", load, f"folder:{root}/more", "ood")
    (root / "test" / "b" / "copy.png").symlink_to(root / "train" / "b" / "2.png")
    refuses("pets: test and train share images, by a link", load, name, "test")
    (root / "val").symlink_to(root / "train")
    refuses("pets: val and train share images", load, name, "val")


def test_a_link_that_points_to_itself_is_no_folder(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refuses("loop not found, or not a folder", splits_of, f"folder:{loop}")
    refuses("loop not found", data.predict_set, f"folder:{loop}", toy())
    name = write_folder(tmp_path / "pets", train=("ab", 9), test=("ab", 2))
    (tmp_path / "pets" / "val").symlink_to("val")
    (tmp_path / "pets" / "train" / "c").symlink_to("c")
    splits = splits_of(name)
    assert (len(splits.train), len(splits.val), splits.train.num_classes) == (17, 1, 2)


def test_test_images_that_are_also_training_images_are_counted(tmp_path, capsys):
    root = tmp_path / "pets"
    name = write_folder(root, train=("ab", 12), test=("ab", 3))
    data.load(name, "test")
    assert capsys.readouterr().out == ""
    for c, place in (("a", "b/new name"), ("b", "b/1")):  # an image may be in another class
        (root / "test" / f"{place}.png").write_bytes((root / "train" / c / "2.png").read_bytes())
    images = np.full((40, 30, 3), 111, np.uint8)  # the same pixels, in another format
    Image.fromarray(images).save(root / "test" / "a" / "9.bmp")
    for _ in range(2):  # said once
        assert len(data.load(name, "test")) == 8
    assert capsys.readouterr().out == (
        f"note: folder {root}: 2 of 8 images in test are also in train, which makes results look "
        "better than they are; the first of them: test/b/1.png, test/b/new name.png\n")
    os.link(root / "train" / "a" / "3.png", root / "test" / "a" / "hard.png")
    load(name, "test")
    assert "3 of 9 images in test are also in train" in capsys.readouterr().out


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
        assert joined(batches, "index").tolist() == list(range(9))
        assert joined(batches, "labels").tolist() == [0] * 3 + [1] * 3 + [2] * 3
        torch.testing.assert_close(joined(batches, "images"), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(dataset.in_memory().images[4], dataset[4])


def test_streamed_augmentation_depends_on_seed_epoch_and_row_alone(imagenet, as_rank):
    state = torch.get_rng_state()
    dataset = load("imagenet", "train", imagenet)
    dataset = replace(dataset, shape=(3, 24, 24))

    def make(seed=4):
        return Loader(dataset, 5, shuffle=True, augment="crop_flip", seed=seed,
                      workers=common.rank() % 2)

    def images_by_row(seed, epoch):
        batches = list(make(seed).epoch(epoch))
        return joined(batches, "images")[joined(batches, "index").argsort()]

    first = images_by_row(4, 4)
    assert torch.equal(first, images_by_row(4, 4))
    assert not torch.equal(first, images_by_row(4, 1))
    assert not torch.equal(first, images_by_row(3, 4))
    check_ranks(as_rank, 3, make)  # the last batch has two images
    assert torch.equal(torch.get_rng_state(), state)


def test_transforms_of_torchvision():
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    bilinear = InterpolationMode.BILINEAR

    def of(model, weights=None, image_size=None):
        return data.transform_of(options("x", model=model, weights=weights, image_size=image_size))

    assert of("torchvision/resnet50") == (224, 232, *imagenet, bilinear)
    assert of("torchvision/efficientnet_b3") == (300, 320, *imagenet, InterpolationMode.BICUBIC)
    assert of("torchvision/efficientnet_b3", image_size=300) == of("torchvision/efficientnet_b3")
    assert of("torchvision/efficientnet_b3", "none", 224) == (224, 256, *imagenet, bilinear)
    assert of("torchvision/resnet18", "DEFAULT", 96) == (96, 110, *imagenet, bilinear)
    assert of("resnet18") is None


def test_images_are_transformed_as_torchvision_does(tmp_path):
    from torchvision.models import EfficientNet_B3_Weights
    name = write_folder(tmp_path / "pets", train=("ab", 10), test=("ab", 2))
    wide = np.arange(120, dtype=np.uint8).reshape(10, 12).repeat(30, 0).repeat(40, 1)
    save_png(tmp_path / "odd" / "x.png", wide)
    save_png(tmp_path / "pets" / "test" / "a" / "wide.png", wide)
    want = EfficientNet_B3_Weights.DEFAULT.transforms(crop_size=96, resize_size=102)
    odd = f"folder:{tmp_path}/odd"

    def statistics(_):
        raise AssertionError("the weights have statistics of their own")

    args = options(name, model="torchvision/efficientnet_b3", image_size=96, predict=odd,
                   ood=[odd, "glyphs_letters"])
    splits = load_splits(args, 1, statistics=statistics)
    for dataset in (splits.train, splits.val, splits.test, splits.ood["odd"], splits.predict):
        assert (dataset.shape, dataset.resize) == ((3, 96, 96), 102)
        images = joined(Loader(dataset, 50).epoch(), "images")
        expected = [want(Image.open(dataset.root / file).convert("RGB")) for file in dataset.files]
        torch.testing.assert_close(images, torch.stack(expected), atol=1e-5, rtol=1e-5)
    letters = splits.ood["glyphs_letters"]
    assert (letters.shape, letters.mean) == ((3, 96, 96), splits.train.mean)
    # Sets in memory keep their size, which the network changes; grey ones become RGB.
    args = options("glyphs", model=args.model, image_size=96)
    glyphs = load_splits(args, 1, statistics=statistics).train
    assert (glyphs.shape, glyphs.mean, glyphs.std) == ((3, 28, 28), *data.transform_of(args)[2:4])
    transform = data.Transform(8, 9, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    small = load(name, "test", transform=transform)
    assert (type(small), small.shape, small.mean) == (ImageSet, (3, 8, 8), (0.1, 0.2, 0.3))


def test_an_unreadable_file_is_named_by_a_worker(tmp_path):
    for name in ("imagenet/train/n0/a", "imagenet/train/n1/a"):
        save_png(tmp_path / f"{name}.png")
    dataset = load("imagenet", "train", tmp_path)
    (tmp_path / "imagenet" / "train" / "n1" / "a.png").write_bytes(b"no image")
    for workers in (0, 1):
        refuses(r"^\S*n1.a.png: unreadable",
                lambda: list(Loader(dataset, 2, workers=workers).epoch()))
    for kind, mode in ((np.uint16, "I;16"), (np.float32, "F")):  # would turn white, or black
        (tmp_path / mode).mkdir()
        Image.fromarray(np.zeros((9, 9), kind)).save(tmp_path / mode / "1.tif")
        refuses(f"unreadable .pixels of mode {mode}, expected 8 bits", load,
                f"folder:{tmp_path}/{mode}", "ood")


class Faulty(StreamedSet):
    """Images on which a worker ends as its name says."""

    def __getitem__(self, row):
        if self.name.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.name))
        raise RuntimeError(self.name)


@pytest.mark.parametrize("fault, says", [
    ("SIGBUS", "too little shared memory .*--workers 0"),
    ("SIGKILL", "worker was killed, .*--workers 0"),
    ("unable to open shared memory object </torch_1_2> in read-write mode: No space left on device "
     "(28)", "too little shared memory .*--workers 0"),
    ("unable to write to file </torch_1_2_3>: No space left on device (28)",
     "too little shared memory .*--workers 0"),
    ("a fault of the program", "^None$")])
def test_a_worker_without_memory_ends_in_one_line(imagenet, fault, says):
    whole = load("imagenet", "test", imagenet, image_size=70)
    dataset = Faulty(**{field.name: getattr(whole, field.name) for field in fields(whole)})
    with pytest.raises(RuntimeError) as caught:
        next(Loader(replace(dataset, name=fault), 2, workers=1).epoch())
    assert re.search(says, str(common.as_user_error(caught.value)))


def test_evaluation_batches_of_files_are_those_of_training(imagenet):
    streamed = load("imagenet", "test", imagenet, image_size=70)
    images = toy(1000, (1, 2, 2), mean=(0.5,), std=(0.5,))
    for dataset, batch_size, changes, sizes in (
            (streamed, 4, {}, [4, 4, 1]), (images, 4, {}, [512, 488]),
            (images, 700, {}, [700, 300]), (images, 4, {"batch_size": 400}, [400, 400, 200]),
            (images, 4, {"drop_last": True}, [512])):
        args = options("any", batch_size=batch_size)
        loader = data.evaluation_loader(dataset, args, **changes)
        assert loader.sizes == sizes
        assert loader.format == torch.channels_last
    plain = data.evaluation_loader(images, args, channels_last=False)
    assert plain.format == torch.contiguous_format


# ---- Loader --------------------------------------------------------------------------------


@pytest.mark.parametrize("augment, mode, shape", [
    ("crop_flip", "constant", (3, 8, 8)), ("reflect_crop_flip", "reflect", (1, 7, 11))])
def test_augmentation_equals_one_image_at_a_time(augment, mode, shape):
    state = torch.get_rng_state()
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
    assert torch.equal(joined(batches, "index"), order)
    assert torch.equal(joined(batches, "labels"), dataset.labels[order])
    torch.testing.assert_close(joined(batches, "images"), torch.stack(want), atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


@pytest.mark.parametrize("floating", [False, True])
def test_evaluation_is_exact_in_order_and_normalised(floating):
    whole = toy(21).select(slice(3, None))
    pixels = whole.images / 255
    dataset = replace(whole, images=pixels) if floating else whole
    mean = torch.tensor(dataset.mean).view(-1, 1, 1)
    std = torch.tensor(dataset.std).view(-1, 1, 1)
    batches = list(Loader(dataset, 4).epoch())
    images = joined(batches, "images")
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    for batch in batches:
        batch.images.zero_()  # batches are the caller's: the set is unharmed
    assert torch.equal(dataset.images, pixels if floating else whole.images)


@pytest.mark.parametrize("n, options, sizes", [
    (30, {}, [8, 8, 8, 6]), (30, {"drop_last": True}, [8, 8, 8]), (30, {"limit_steps": 2}, [8, 8]),
    (30, {"limit_steps": 9, "drop_last": True}, [8, 8, 8]), (33, {}, [8, 8, 8, 9]),
    (9, {"augment": "crop_flip"}, [9]), (34, {}, [8, 8, 8, 8, 2]),
    (33, {"shuffle": False}, [8, 8, 8, 8, 1]), (33, {"drop_last": True}, [8, 8, 8, 8]),
    (33, {"limit_steps": 2}, [8, 8]), (33, {"limit_steps": 4}, [8, 8, 8, 9]), (1, {}, [1])])
def test_a_last_training_batch_of_one_image_joins_the_batch_before(n, options, sizes):
    """Batch norm cannot train on one image. The batches of shorter epochs are the same."""
    loader = Loader(toy(n), 8, seed=2, **{"shuffle": True} | options)
    batches = list(loader.epoch(1))
    assert [b.global_size for b in batches] == [len(b.images) for b in batches] == sizes
    assert len(loader) == len(sizes)
    order = joined(batches, "index")
    want = torch.arange(n)
    if loader.shuffle:
        want = torch.randperm(n, generator=data._loader_generator(2, 1))
    assert torch.equal(order, want[:len(order)])
    assert len(Loader(toy(3), 1, shuffle=True)) == 3


def test_keys_of_loaders_share_nothing():
    keys = [(a,) for a in range(5)]
    keys += [(a, b) for a in range(5) for b in range(5)]
    keys += [(*pair, row) for pair in keys[5:] for row in range(5)]
    assert len({data._loader_generator(*key).initial_seed() for key in keys}) == len(keys) == 155


# ---- Corruptions ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pictures():
    """Grey glyphs and smooth coloured images, uint8, 28x28 and 32x32."""
    coarse = torch.rand(60, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(coarse, (32, 32), mode="bicubic", align_corners=False).clamp(0, 1)
    glyphs = data.stratified_subset(load("glyphs", "test"), 60)
    return glyphs.images, (smooth * 255).byte()


RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "occlusion", "rotation",
          "elastic")


@pytest.mark.parametrize("kind", data.CORRUPTIONS)
def test_corruptions(kind, pictures):
    state = torch.get_rng_state()
    for images in pictures:
        distances = [0.3]
        for severity in data.SEVERITIES:
            out = data.corrupt(images, kind, severity, seed=1)
            assert (out.shape, out.dtype) == (images.shape, torch.uint8)
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
    assert torch.equal(torch.get_rng_state(), state)


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


def test_convert_like_takes_channels_size_and_statistics(imagenet):
    grey = toy(5, (1, 28, 28), mean=(0.1,), std=(0.3,))
    colour = toy(5, (3, 32, 32), seed=1)
    up = convert_like(grey, colour)
    down = convert_like(colour, grey)
    assert (up.name, up.shape, up.images.dtype) == ("toy", (3, 32, 32), torch.uint8)
    assert (up.mean, up.std) == (colour.mean, colour.std)
    assert torch.equal(up.images, up.images[:, :1].expand(-1, 3, -1, -1))
    assert down.shape == (1, 28, 28)
    assert (down.mean, down.std) == (grey.mean, grey.std)
    small = convert_like(colour, toy(1, (1, 32, 32)))
    r, g, b = colour.images.float().unbind(1)
    assert (small.images[:, 0] - (0.299 * r + 0.587 * g + 0.114 * b)).abs().max() <= 0.55
    want = F.interpolate(colour.images.double(), (16, 16), mode="bilinear", antialias=True)
    assert (convert_like(colour, toy(1, (3, 16, 16))).images - want).abs().max() <= 0.51
    streamed = load("imagenet", "test", imagenet, image_size=32)
    assert convert_like(streamed, colour).mean == (0.4, 0.5, 0.6)


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
    refuses("svhn: .*not found", splits_of, "glyphs", tmp_path, ood=["svhn"], explicit={"ood"})
    refuses("'swhn' is unknown; .*folder:PATH, nonsense", data.ood_sets, ["swhn"], train)
    refuses("dataset .. is unknown", data.ood_sets, [""], train)
    assert not data.ood_sets(["glyphs"], train)
    assert "another set of this run is called glyphs" in capsys.readouterr().out
    for name in ("nonsense", f"folder:{tmp_path}/odd one"):
        refuses("has images, but toy has features", data.ood_sets, [name], toy(9, (3, 1, 1)))


@pytest.mark.parametrize("name", ["train", "predict"])
def test_other_sets_never_have_the_name_of_a_split(tmp_path, name):
    save_png(tmp_path / "new" / name / "b" / "x.png")
    path = f"folder:{tmp_path}/new/{name}"
    assert list(data.ood_sets([path], toy())) == [f"new_{name}"]
    assert data.predict_set(path, toy()).name == f"new_{name}"
    assert data.predict_set(f"folder:{tmp_path}/new", toy()).name == "new"


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
    prepared = data.Transform(40, 44, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for train in (load(own, "train", image_size=70), load(own, "train", transform=prepared),
                  replace(toy(9), images=toy(9).images / 255), toy(9, (3, 8, 20))):
        nonsense = data.predict_set("nonsense", train)
        assert nonsense.images.shape == (70, *train.shape)
        assert nonsense.images.dtype == torch.uint8
        assert nonsense.classes == train.classes
        assert nonsense.labels.unique().tolist() == [-1]
        assert torch.equal(data.ood_sets(["nonsense"], train)["nonsense"].images, nonsense.images)
        batch = next(Loader(nonsense, 70).epoch()).images
        for name, pixel in (("white-0", 1), ("black-0", 0)):
            seen = batch[nonsense.files.index(name)].flatten(1).unique(dim=1)[:, 0]
            want = (pixel - torch.tensor(train.mean)) / torch.tensor(train.std)
            torch.testing.assert_close(seen, want)
    images = dict(zip(nonsense.files, nonsense.images.double()))
    for row, column in ((0, 0), (1, 3), (2, 2), (7, 6)):  # stripes and squares, three a side
        is_white = (3 * row // 8 + 3 * column // 20) % 2
        assert (images["checkerboard-1"][:, row, column] == 255 * is_white).all()
        assert (images["stripes-1"][:, row, column] == 255 * (3 * row // 8 % 2)).all()


# ---- Several processes ---------------------------------------------------------------------


def read_on_two_machines(folder):
    """What each rank finds where it has a disk of its own: {case: result or error}."""
    common.start("cpu")
    disk = Path(folder) / str(common.rank())
    train = data.stratified_subset(load("glyphs", "train"), 10)
    corrupted = data.corrupted_sets(toy(), shifted("cifar10", disk, "published"))
    splits = splits_of("glyphs", disk, limit_train=20, predict="nonsense")
    assert len(splits.train) == 20
    results = {"kinds": corrupted.kinds, "fingerprint": data.fingerprint(train),
               "splits": splits.fingerprints,
               "ood": list(data.ood_sets([f"folder:{disk}/odd", "glyphs_letters"], train))}
    calls = {
        "folder": lambda: load(f"folder:{disk}/pets", "train"),
        "unreadable": lambda: load(f"folder:{disk}/broken", "ood"),
        "predict": lambda: data.predict_set(f"folder:{disk}/odd", train),
        "text": lambda: data.load_text("sst2", "test", disk),
        "corrupted": lambda: data.load_corrupted("cifar10_c", "fog", 1, disk),
    }
    for case, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        results[case] = str(caught.value)
    common.all_reduce(torch.zeros(1))  # no process waits for one that has stopped
    return results


def test_machines_agree_on_what_is_there(tmp_path, ranks):
    """The second machine lacks each set, or has a damaged one; the first one has all."""
    write_folder(tmp_path / "0" / "pets", train=("ab", 10), test=("ab", 3))
    for file in ("0/odd/x.png", "0/broken/x.png", "1/broken/x.png"):
        save_png(tmp_path / file)
    (tmp_path / "1" / "broken" / "x.png").write_text("no image")
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
                       "predict": "1/odd not found", "text": "1/SST-2",
                       "corrupted": "1/CIFAR-10-C/fog.npy"}.items():
        assert says in first[case]


# ---- Features ------------------------------------------------------------------------------


def save_features(path, features, labels=None, names=None):
    arrays = {"features": features, "labels": labels, "names": names}
    np.savez(path, **{key: np.asarray(a) for key, a in arrays.items() if a is not None})
    return path


def test_features_of_a_file(tmp_path):
    z = np.random.default_rng(0).normal((5, -300, 1.7e9), (2, 40, 1), (400, 3))
    train = data.read_features(save_features(tmp_path / "a.npz", z, np.arange(400) % 6))
    assert torch.equal(train.values, torch.tensor(z)) and len(train) == 400
    assert train.labels.tolist() == [k % 6 for k in range(400)]
    assert (train.classes, train.files) == ((), ())
    few = save_features(tmp_path / "b.npz", z[:5].astype(">f4"), np.arange(5, dtype="u1"))
    few = data.read_features(few, 3)
    assert torch.equal(few.values, torch.tensor(z[:5].astype(np.float32)).double())
    assert few.select([4, 1]).labels.tolist() == [4, 1]
    bare = data.read_features(save_features(tmp_path / "c.npz", np.eye(3, dtype=int)))
    assert bare.values.dtype == torch.float64 and bare.labels.tolist() == [-1] * 3


def test_names_of_classes_and_rows(tmp_path):
    z = np.eye(4, 2)
    path = save_features(tmp_path / "a.npz", z, ["dog", "ant", "dog", "cat"], list("wxyz"))
    train = data.read_features(path, labelled=True)
    assert (train.classes, train.labels.tolist()) == (("ant", "cat", "dog"), [2, 0, 2, 1])
    assert train.files == ("w", "x", "y", "z")
    # Names mean the same in another file, which may have fewer or others; numbers mean nothing.
    for labels, want in ((["dog", "dog", "cat", "cat"], [2, 2, 1, 1]),
                         (["dog", "elk", "ant", "ant"], [2, -1, 0, 0]), ([0, 1, 2, 0], [-1] * 4)):
        other = save_features(tmp_path / "b.npz", z, labels, list("1234"))
        other = data.read_features(other, 2, classes=train.classes)
        assert other.labels.tolist() == want
        assert (other.classes, other.files) == (train.classes, ("1", "2", "3", "4"))
    bad = save_features(tmp_path / "e.npz", z, [0, 1, 2, 0], ["x"])
    refuses(r"e.npz: 'names' must be \[4\] texts", data.read_features, bad)


ROWS = np.ones((3, 2))


@pytest.mark.parametrize("features, labels, says", [
    (np.ones((3, 2, 1)), [0, 1, 2], "'features' must be"),
    (np.ones((0, 2)), [], "'features' must be"),
    (np.array([["a", "b"]]), [0], "'features' must be finite numbers"),
    (np.full((3, 2), np.nan), [0, 1, 2], "'features' must be finite"),
    (np.full((3, 2), 1e200), [0, 1, 2], "in the range of float32"),
    (ROWS, [0, 1, -1], "'labels' must be"),
    (ROWS, [0, 1, 10**12], "'labels' must be.*below 1,000,000"),
    (ROWS, [0, 1], r"'labels' must be \[3\]"),
    (ROWS, ["a", "b"], r"'labels' must be \[3\]")])
def test_bad_features_and_labels(tmp_path, features, labels, says):
    path = save_features(tmp_path / "odd.npz", features, labels)
    refuses(f"odd.npz.*{says}", data.read_features, path)


def test_features_that_do_not_fit(tmp_path):
    path = save_features(tmp_path / "odd.npz", np.ones((3, 4)), [0, 1, 2])
    refuses(r"must be \[N, 2\], not \[3, 4\]", data.read_features, path, 2)
    path = save_features(tmp_path / "bare.npz", np.ones((3, 2)))
    needs = "bare.npz needs the arrays features, labels; it has features"
    refuses(needs, partial(data.read_features, path, labelled=True))
    (tmp_path / "text.npz").write_text("text")
    refuses("text.npz is not a readable .npz file", data.read_features, tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", ROWS)
    refuses("one.npy is not a readable .npz file", data.read_features, tmp_path / "one.npy")
    refuses("file not found: .*none.npz", data.read_features, tmp_path / "none.npz")


# ---- Features of a frozen network ----------------------------------------------------------

SMALL = "torchvision/shufflenet_v2_x0_5"


def image_set(name, n, **given):
    images = torch.from_numpy(noise(n, (n, 3, 12, 12)))
    return ImageSet(name, images, torch.arange(n) % 4, 4, (0.4, 0.5, 0.6), (0.2, 0.3, 0.2),
                    classes=("a", "b", "c", "d"), **given)


def image_splits():
    train = image_set("train", 150, groups=torch.arange(150) // 2,
                      label_probs=torch.full((150, 4), 0.25))
    mine = image_set("mine", 3, files=("1.png", "2.png", "3.png"))
    return data.Splits(train, None, image_set("test", 30), {"far": image_set("far", 5)}, mine, {})


def frozen_options(weights="none"):
    return options("any", model=SMALL, weights=str(weights), freeze=True, image_size=16)


def frozen_in_a_process(weights):
    if "RANK" in os.environ:
        common.start("cpu")
    frozen = data.frozen_features(image_splits(), frozen_options(weights))
    return [frozen.train.images, frozen.test.images, frozen.ood["far"].images,
            torch.tensor(frozen.train.mean)]


def test_frozen_features_are_those_of_a_direct_forward(monkeypatch):
    clock = iter([100.0, 100.3])
    monkeypatch.setattr(data.time, "perf_counter", lambda: next(clock))
    args = frozen_options()
    splits = image_splits()
    frozen = data.frozen_features(splits, args)
    torch.manual_seed(1)
    backbone, _ = common.pretrained_network(args, 4, (3, 12, 12))
    pairs = [(splits.train, frozen.train), (splits.test, frozen.test),
             (splits.predict, frozen.predict), (splits.ood["far"], frozen.ood["far"])]
    for images, features in pairs:
        batch = next(Loader(images, 500).epoch())
        with torch.no_grad():
            expected = backbone.eval()(batch.images)
        assert features.is_features and features.images.dtype == torch.float32
        assert torch.allclose(features.images[:, :, 0, 0], expected, atol=1e-5)
        assert (features.mean, features.std) == (frozen.train.mean, frozen.train.std)
        for field in ("name", "labels", "num_classes", "classes", "files", "groups"):
            assert getattr(features, field) is getattr(images, field), field
    # What the head sees: centred, with one scale for all features.
    batch = next(Loader(frozen.train, 500).epoch())
    assert batch.images.mean(0).abs().max() < 1e-3
    assert batch.images.square().sum((1, 2, 3)).mean() == pytest.approx(512, abs=0.1)
    assert len(set(frozen.train.std)) == 1
    assert frozen.val is None
    assert frozen.fingerprints == {"frozen backbone": common.fingerprint(backbone)}
    assert frozen.backbone_bytes == sum(x.nbytes for x in backbone.state_dict().values())
    assert frozen.backbone_ms == pytest.approx(2)  # 0.3 s for 150 images


def test_splits_of_features():
    args = frozen_options()
    args.dataset, args.limit_train, args.batch_size = "glyphs", 60, 200
    splits = load_splits(args, 1)
    assert splits.summary().startswith("glyphs: 10 classes, 60 training, 1,000 held-out and 2,000 "
                                       "test examples of 1024 features; always guessing")
    assert splits.fingerprints["test data"] == splits_of(
        "glyphs", model=SMALL, weights="none", image_size=16).fingerprints["test data"]
    assert 0 < splits.backbone_ms < 1000


def test_two_processes_have_the_features_of_one(ranks):
    alone = frozen_in_a_process("none")
    for others in ranks(frozen_in_a_process, "none"):
        for ours, theirs in zip(alone, others):
            assert torch.allclose(ours, theirs, atol=1e-5)


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
    train, val, test = splits_of(name)[:3]
    num_rows, num_test_rows, num_classes, labels, grey = EMBEDDED[name]
    assert len(train) + len(val) == num_rows
    assert abs(len(val) - num_rows // 10) < 100
    assert (len(test), test.num_classes, test.shape) == (num_test_rows, num_classes, (1, 28, 28))
    pool = torch.cat([train.images, val.images]) / 255
    assert pool.mean() == pytest.approx(test.mean[0], abs=1e-4)
    assert pool.std() == pytest.approx(test.std[0], abs=1e-4)
    images = {image.numpy().tobytes() for image in train.images}
    assert not images & {image.numpy().tobytes() for image in test.images}
    assert digest(test.labels) == labels
    # processors round differently
    assert test.images.double().mean() == pytest.approx(grey, abs=0.02)
    if name == "dirty_glyphs":  # clean ones, then blends
        assert (test.label_probs.amax(1) == 1).tolist() == [True] * 2000 + [False] * 2000
        assert torch.equal(test.images[2000:], load("glyphs_ambiguous", "test").images)
        assert len(train.groups.unique()) + len(val.groups.unique()) == 8000 + 4000


@pytest.mark.parametrize("name", ["glyphs_ambiguous", "numbers_ambiguous"])
def test_labels_of_blends_follow_their_distribution(name):
    whole = load(name, "train")
    assert torch.allclose(whole.label_probs.sum(1), torch.ones(len(whole)))
    assert ((whole.label_probs > 0).sum(1) == 2).all()
    top = whole.label_probs.amax(1)
    hits = whole.label_probs.gather(1, whole.labels[:, None])[:, 0]
    assert (hits > 0).all()
    likely = (hits == top).double().mean().item()  # as often as its probability
    assert likely == pytest.approx(top.mean().item(), abs=4 * math.sqrt(0.25 / len(whole)))
    if name == "glyphs_ambiguous":  # each image twice, never in both parts
        train, val = splits_of(name)[:2]
        assert not set(train.groups.tolist()) & set(val.groups.tolist())
