"""data.py: splits, published layouts, own folders, OOD sets, the loader, corruptions, glyphs."""
import hashlib
import math
import pickle
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import common
import data
from common import UserError
from data import ImageSet, Loader, StreamedSet, load, match, train_val_split


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(rank, size): what is made next believes to be that process."""
    def become(rank, size):
        monkeypatch.setattr(common, "rank", lambda: rank)
        monkeypatch.setattr(common, "world_size", lambda: size)

    return become


def check_ranks(as_rank, world, make):
    """`world` processes' loaders, as `make` returns them, together give the batches of one
    process, and so does each with `whole`."""
    one, ranks = list(make().epoch(4)), []
    for rank in range(world):
        as_rank(rank, world)
        ranks.append(list(make().epoch(4)))
    for batch, alone, *parts in zip(one, make(whole=True).epoch(4), *ranks, strict=True):
        cuts = [len(part) for part in np.array_split(batch.index, world)]
        assert [len(part.index) for part in parts] == cuts
        assert {part.global_size for part in parts} == {len(batch.index)}
        for field in {*batch._fields} - {"global_size", "molecules"}:
            together = torch.cat([getattr(part, field) for part in parts])
            assert torch.equal(together, getattr(batch, field)), field
            assert torch.equal(getattr(alone, field), together), field


def toy(n=50, shape=(3, 8, 8), seed=0, **fields):
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, *shape), generator=g, dtype=torch.uint8)
    stats = dict(mean=(0.4, 0.5, 0.6)[:shape[0]], std=(0.2, 0.25, 0.3)[:shape[0]])
    return ImageSet("toy", images, torch.arange(n) % 7, 7, **{**stats, **fields})


def refuses(match, call, *args, **kwargs):
    """call raises UserError, in one line that matches `match`."""
    with pytest.raises(UserError, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


def save_png(path, array=np.zeros((20, 30), np.uint8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def options(ood=(), explicit=(), data_dir="nowhere", predict=None):
    return SimpleNamespace(ood=[str(name) for name in ood], explicit={*explicit}, seed=1,
                           data_dir=str(data_dir), predict=predict, target="gap")


# ---- Splits and sets -----------------------------------------------------------------------------


def test_published_split_of_cifar10_seed_1():
    train, val = train_val_split(50000, 1, 0.1)
    assert val[:4].tolist() == [26247, 35067, 34590, 16668]
    order = list(range(50000))
    np.random.RandomState(1).shuffle(order)
    assert val.tolist() == order[:5000] and train.tolist() == order[5000:]
    assert [len(part) for part in train_val_split(73257, 3)] == [65932, 7325]


def test_stratified_split_is_that_of_scikit_learn():
    from sklearn.model_selection import train_test_split
    labels = torch.randperm(2000, generator=torch.Generator().manual_seed(0)) % 10
    want = train_test_split(np.arange(2000), test_size=0.1, stratify=labels, random_state=88)
    assert all(map(np.array_equal, data.stratified_split(labels), want))
    labels = torch.tensor([0] * 25 + [1] * 9)  # no whole numbers: rounded down in each class
    train, val = data.stratified_split(labels)
    assert labels[val].tolist() == [0, 0] and sorted([*train, *val]) == list(range(34))
    vals = [load("glyphs", "val", published_split="forde", seed=seed).labels for seed in (1, 2)]
    assert vals[0].bincount().tolist() == [100] * 10 and torch.equal(*vals)


def test_sets_select_all_their_fields():
    dataset = toy(6, label_probs=torch.eye(6), groups=torch.arange(6) // 2, files=tuple("abcdef"))
    mask = torch.tensor([False, True, False, False, True, False])
    for index, rows in ((torch.tensor([4, 1]), [4, 1]), ([4, 1], [4, 1]), (mask, [1, 4]), ([], [])):
        part = dataset.select(index)
        assert torch.equal(part.images, dataset.images[rows]) and len(part) == len(rows)
        assert torch.equal(part.label_probs, torch.eye(6)[rows])
        assert part.labels.tolist() == rows and part.groups.tolist() == [r // 2 for r in rows]
        assert part.files == tuple("abcdef"[r] for r in rows)
    assert dataset.shape == (3, 8, 8) and data.evenly(dataset, 4).labels.tolist() == [0, 1, 3, 4]
    refuses("toy", ImageSet, "toy", dataset.images, torch.zeros(5).long(), 7, (0.5,), (0.5,))
    refuses("labels from 0 to 6; expected 0 to 4", replace, toy(7), num_classes=5)


# ---- Published sets ------------------------------------------------------------------------------


def test_real_mnist_cifar10_and_cifar100(real_data):
    from torchvision.datasets import CIFAR10
    train, val, test = (load("mnist", split, real_data) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (54000, 6000, 10000) and test.shape == (1, 28, 28)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4] and test.images.dtype == torch.uint8
    std, mean = torch.std_mean(torch.cat([train.images, val.images]) / 255)
    assert mean == pytest.approx(train.mean[0], abs=5e-5)
    assert std == pytest.approx(train.std[0], abs=1e-4)
    val, raw = load("cifar10", "val", real_data), CIFAR10(real_data)
    assert np.array_equal(val.images[0].permute(1, 2, 0), raw.data[26247])
    assert val.labels[:3].tolist() == [raw.targets[i] for i in (26247, 35067, 34590)]
    cifar100 = load("cifar100", "test", real_data, limit=500)
    assert cifar100.shape == (3, 32, 32) and cifar100.num_classes == 100
    assert cifar100.labels.bincount().tolist() == [5] * 100  # a limited set still has every class
    refuses("cifar-100-python is not there.*no route to host.*toronto", load, "cifar100", "train",
            real_data)


def test_raw_files_are_checked(tmp_path, monkeypatch):
    labels = torch.arange(10000) % 10

    def read(*_, train, download, **__):
        assert download  # what a killed download left half done is there, and has to be mended
        images = torch.full((10000, 28, 28), 255 * train, dtype=torch.uint8)
        return SimpleNamespace(data=images, targets=labels, classes=())

    for name, folder, rows in (("mnist", "MNIST", 60000), ("kmnist", "KMNIST", 10000)):
        monkeypatch.setitem(data.TORCHVISION, name, (read, rows, 10000))
        save_png(tmp_path / folder / "raw" / "a.png")
    test = load("kmnist", "test", tmp_path)
    assert test.labels[:12].tolist() == [*range(10), 0, 1]
    assert (test.mean, test.std) == ((1.0,), (0.0,))  # the training images'
    labels[700] = 200
    refuses("mnist: labels from 0 to 200; expected 0 to 9", load, "mnist", "test",
            tmp_path)
    refuses("MNIST.raw is damaged.*expected 60000 of.*get it from", load, "mnist", "val", tmp_path)
    np.savez(tmp_path / "cifar100_test.npz", images=np.zeros((9, 32, 32, 3), np.uint8),
             labels=np.zeros(9))
    refuses("cifar-100-python is damaged.*expected 10000", load, "cifar100", "test", tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": 0})[:-3])
    refuses("cifar-10-batches-py is damaged", load, "cifar10", "train", tmp_path)


@pytest.mark.parametrize("name, path", [
    ("mnist", "MNIST.raw"), ("kmnist", "KMNIST.raw"), ("svhn", "test_32x32.mat"),
    ("cifar10", "cifar-10-batches-py"), ("imagenet", "imagenet.val"),
    ("tiny_imagenet", "tiny-imagenet-200.wnids.txt"), ("imagenet_a", "imagenet-a"),
    ("ambiguous_mnist", "AmbiguousMNIST.amnist_samples.pt"), ("cifar10_c", "CIFAR-10-C.fog.npy"),
    ("imagenet_c", "imagenet-c.fog.2"), ("tiny_imagenet_c", "Tiny-ImageNet-C.fog.2")])
def test_absent_sets_name_the_path_and_the_site(tmp_path, monkeypatch, name, path):
    waits = []  # those for whom the others wait: all must come there, or they wait for ever
    monkeypatch.setattr(common, "gather_objects", waits.append)
    for _ in range(2):  # a failed download leaves nothing that is taken for the set
        call = ((data.load_corrupted, name, "fog", 2, tmp_path) if name.endswith("_c") else
                (load, name, "test", tmp_path))
        refuses(f"{path}.* is not there.*https?://", *call)
        with pytest.raises(data.Absent):
            call[0](*call[1:])
    assert len(waits) == (8 if "mnist" in name or name in data.TORCHVISION else 0)


@pytest.mark.parametrize("call, match", [
    (lambda: load("mnits", "train"), "'mnits' is unknown.*glyphs"),
    (lambda: load("glyphs", "valid"), "split 'valid'"),
    (lambda: load("glyphs", "val", published_split="sngp"), "'sngp' is unknown.*forde"),
    (lambda: load("glyphs", "val", val_fraction=1.0), "val_fraction"),
    (lambda: load("glyphs", "val", limit=0), "limit"),
    (lambda: load("imagenet_r", "train"), "test split only"),
    (lambda: load("folder:/nowhere", "test"), "nowhere is not there"),
    (lambda: data.load_corrupted("cifar_c", "fog", 1), "'cifar_c' is unknown"),
    (lambda: data.corruption_kinds("cifar10"), "'cifar10' is unknown.*imagenet_c"),
    (lambda: data.load_corrupted("cifar10_c", "occlusion", 1), "'occlusion' is unknown.*frost"),
    (lambda: data.load_corrupted("cifar10_c", "fog", 6), "severity 6"),
    (lambda: data.corrupt(toy().images, "fog", 1), "'fog' is unknown.*jpeg"),
    (lambda: data.corrupted(toy(3, (2, 1, 1)), "jpeg", 1), "images in memory alone"),
    (lambda: data.load_text("sst", "train"), "'sst' is unknown.*reviews.*sst2"),
    (lambda: data.load_text("reviews", "dev"), "split 'dev'"),
    (lambda: data.load_molecules("qm8", "train"), "'qm8' is unknown.*clusters.*qm9"),
    (lambda: data.load_molecules("clusters", "all"), "split 'all'"),
    (lambda: data.load_molecules("clusters", "test", target="gap"), "'gap' is unknown.*u0"),
    (lambda: data.load_molecules("qm9", "test", target="U"), "target 'U' is unknown.*u298"),
    (lambda: data.load_molecules("qm9", "test", "/x"), "x.QM9.gdb9.sdf .*is not there.*https"),
    (lambda: Loader(toy(), 0), "batches of 0"),
    (lambda: Loader(toy().select([]), 5), "0 rows"),
    (lambda: Loader(toy(), 5, augment="flip"), "'flip' is unknown"),
    (lambda: Loader(toy(3, (2, 1, 1)), 5, augment="crop_flip"), "would destroy features"),
])
def test_mistakes_are_one_line(call, match):
    refuses(match, call)


def test_ambiguous_mnist(tmp_path, monkeypatch):
    # image i is i / 12000 all over, its tenth label unlike the others
    images = (torch.arange(12000.0) / 12000).view(-1, 1, 1, 1).expand(-1, 1, 28, 28).contiguous()
    labels = (torch.arange(12000)[:, None] % 5).repeat(1, 10)
    labels[:, 9] = 5 + torch.arange(12000) % 5
    (tmp_path / "AmbiguousMNIST").mkdir()
    files = [tmp_path / "AmbiguousMNIST" / file for file in data.AMBIGUOUS_MNIST]
    torch.save(images, files[0]), torch.save(labels, files[1])
    says = "amnist_samples.pt is damaged or.*another release than data-v1.0.0.*MD5"
    refuses(says, load, "ambiguous_mnist", "test", tmp_path)
    for file in files:
        md5 = hashlib.md5(file.read_bytes()).hexdigest()
        monkeypatch.setitem(data.AMBIGUOUS_MNIST, file.name, md5)
    train, val = (load("ambiguous_mnist", split, tmp_path) for split in ("train", "val"))
    assert not {*train.groups.tolist()} & {*val.groups.tolist()} and len(val.groups.unique()) == 600
    pool = load("ambiguous_mnist", "train", tmp_path, val_fraction=0)
    pool = pool.select(pool.groups.argsort(stable=True))
    assert len(pool) == 60000 and pool.images.dtype == torch.float32
    assert torch.equal(pool.images[:, 0, 0, 0], (torch.arange(60000) // 10) / 12000)
    assert pool.labels[40:50].tolist() == [4] * 9 + [9]
    assert pool.label_probs[45].tolist() == pytest.approx([0, 0, 0, 0, 0.9, 0, 0, 0, 0, 0.1])
    clean = replace(toy(10000, (1, 28, 28)), num_classes=10)
    monkeypatch.setattr(data, "_torchvision", lambda *_: clean)
    test = load("dirty_mnist", "test", tmp_path)
    assert len(test) == 70000 and torch.equal(test.images[:10000], clean.images / 255)
    assert test.images[10010, 0, 0, 0] == torch.tensor(6001 / 12000)
    assert torch.equal(test.label_probs[:10000].argmax(1), clean.labels)


def test_noise_is_in_normalised_units_and_the_same_for_all_seeds():
    test = load("glyphs", "test", noise=0.05)
    added = test.images - load("glyphs", "test").images / 255
    assert added.std() == pytest.approx(0.05 * test.std[0], rel=1e-2)
    assert added.mean().abs() < 1e-4 and test.images.max() > 1  # not clipped
    rows = [load("glyphs", split, noise=0.05, seed=seed).images for seed in (1, 2)
            for split in ("train", "val")]
    sums = [torch.cat(rows[k:k + 2]).double().sum((1, 2, 3)).sort()[0] for k in (0, 2)]
    assert torch.equal(*sums)  # a training image has its noise, wherever it comes to lie


# ---- Corrupted sets ------------------------------------------------------------------------------


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
        mine = rows[(severity - 1) * 10000:severity * 10000]
        assert dataset.shape == (3, 32, 32) and dataset.num_classes == 10
        assert np.array_equal(dataset.images[:, 1, 3, 4], severity * 10 - 10 + mine % 7)
        assert dataset.labels.tolist() == (mine % 10).tolist()
        assert dataset.name == f"cifar10_c_fog_s{severity}"
        assert dataset.mean == (0.4914, 0.4822, 0.4465)
    assert data.corruption_kinds("cifar10_c", tmp_path) == ["fog"]  # a part is named as a part
    assert "CIFAR-10-C lacks gaussian_noise, shot_noise" in capsys.readouterr().out
    assert data.corrupted_name("cifar10_c", data.CIFAR_C_KINDS) == "cifar10_c"
    for labels, says in (((rows % 11).astype(np.uint8), "0 to 10"), (rows % 10 + 256, "256 to")):
        np.save(folder / "labels.npy", labels)
        refuses(f"labels from {says}", data.load_corrupted, "cifar10_c", "fog", 1, tmp_path)
    np.save(folder / "labels.npy", np.zeros(10000, np.uint8))
    np.save(folder / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    np.save(folder / "frost.npy", np.array([{}], dtype=object))
    (folder / "spatter.npy").write_bytes((folder / "fog.npy").read_bytes()[:100000])
    for kind, says in (("fog", r"labels.npy.*\(10000,\), expected \(50000,\)"),
                       ("snow", r"snow.npy.*\(10, 32, 32, 3\), expected"),
                       ("frost", "frost.npy is damaged"), ("spatter", "spatter.npy is damaged")):
        refuses(says, data.load_corrupted, "cifar10_c", kind, 1, tmp_path)


def test_missing_severities(tmp_path, capsys):
    assert data.corruption_kinds("imagenet_c", tmp_path) == []
    assert "imagenet-c is not there; get it from https://" in capsys.readouterr().out
    for severity in range(1, 6):
        for kind in ("zoom_blur", "snow"):
            save_png(tmp_path / "imagenet-c" / kind / str(severity) / "n01" / "a.png")
        save_png(tmp_path / f"imagenet-c-fog-{severity}" / "n01" / "a.png")
    save_png(tmp_path / "imagenet-c" / "frost" / "4" / "n01" / "a.png")
    kinds = data.corruption_kinds("imagenet_c", tmp_path)
    out = capsys.readouterr().out
    assert kinds == ["zoom_blur", "snow", "fog"] and out.count("\n") == 1
    assert "frost of severity 1, 2, 3, 5" in out and "spatter" not in out
    assert data.corrupted_name("imagenet_c", kinds) == "imagenet_c_3of15"
    streamed = data.load_corrupted("imagenet_c", "fog", 4, tmp_path)
    assert (streamed.shape, streamed.resize, len(streamed)) == ((3, 224, 224), 224, 1)
    save_png(tmp_path / "imagenet" / "val" / "n02" / "a.png")
    refuses("no class folder n02", data.load_corrupted, "imagenet_c", "fog", 4, tmp_path)


# ---- Folders -------------------------------------------------------------------------------------


def test_tiny_imagenet(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for k, wnid in enumerate(("n02", "n01")):  # an order that sorting would change
        for i in range(5):
            array = np.full((64, 64, 3) if i else (64, 64), 100 * k + 10 * i, np.uint8)  # some grey
            save_png(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", array)
        save_png(tmp_path / "Tiny-ImageNet-C" / "fog" / "2" / wnid / "a.JPEG",
                 np.full((64, 64, 3), 20 + 180 * k, np.uint8))
    for i in range(3):
        save_png(root / "val" / "images" / f"val_{i}.JPEG", np.full((64, 64, 3), 50 * i, np.uint8))
    (root / "wnids.txt").write_text("n02\nn01\n")
    rows = [f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n" for i, wnid in enumerate(("n01", "n02", "n01"))]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    pool = load("tiny_imagenet", "train", tmp_path, val_fraction=0)
    assert pool.shape == (3, 64, 64) and len(pool) == 10 and pool.num_classes == 2
    assert torch.equal(pool.images[:, :, 32, 32].float().mean(1) >= 95, pool.labels == 1)
    assert pool.mean == pytest.approx((0.480308, 0.448139, 0.397633), abs=1e-6)
    assert pool.std == pytest.approx((0.276441, 0.268894, 0.281618), abs=1e-6)
    test = load("tiny_imagenet", "test", tmp_path, image_size=32)
    assert test.shape == (3, 32, 32) and test.labels.tolist() == [1, 0, 1]
    assert test.images[:, 0, 9, 9].tolist() == [0, 50, 100]
    assert isinstance(load("tiny_imagenet", "test", tmp_path, image_size=224), StreamedSet)
    corrupted = data.load_corrupted("tiny_imagenet_c", "fog", 2, tmp_path)
    assert corrupted.labels.tolist() == [0, 1]  # as in wnids.txt
    assert corrupted.images[:, 0, 0, 0].tolist() == [20, 200]
    file = root / "val" / "images" / "val_1.JPEG"
    whole = file.read_bytes()
    save_png(file)
    says = r"val_1.JPEG: width and height \(30, 20\), expected \(64, 64\)"
    refuses(says, load, "tiny_imagenet", "test", tmp_path)
    file.write_bytes(whole[:len(whole) // 2])
    refuses("val_1.JPEG: unreadable", load, "tiny_imagenet", "test", tmp_path)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t9\t9\n")
    refuses("class n09 is not in wnids", load, "tiny_imagenet", "test", tmp_path)
    for file in (root / "train" / "n01" / "images").iterdir():
        file.unlink()
    says = r"n01.images: no images \(.jpg .*put the class's there"
    refuses(says, load, "tiny_imagenet", "train", tmp_path)


def write_folder(root, **parts):
    """root/<part>/<class>/<i>.png: parts = {part: (classes, images of each)}; image i is 9 i + 1
    all over, 100 more in training."""
    for part, (classes, n) in parts.items():
        for c in classes:
            for i in range(n):
                level = 9 * i + 1 + 100 * (part == "train")
                save_png(root / part / c / f"{i}.png", np.full((40, 30, 3), level, np.uint8))
    return f"folder:{root}"


def test_own_folder_is_never_tested_on_its_training_images(tmp_path):
    name = write_folder(tmp_path / "my pets!", train=("ab", 10), test=("ab", 3))
    (tmp_path / "my pets!" / "train" / ".ipynb_checkpoints").mkdir()  # hidden: no class
    train, val, test = (load(name, split, image_size=24) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (18, 2, 6) and train.classes == ("a", "b")
    assert isinstance(train, ImageSet) and train.shape == (3, 24, 24) and train.name == "my_pets_"
    assert train.images.min() > 100 > test.images.max()
    assert test.labels.tolist() == [0] * 3 + [1] * 3
    assert test.files[4] == "b/1.png" and load(name, "test").shape == (3, 32, 32)
    large = load(name, "test", image_size=128)
    assert isinstance(large, StreamedSet) and large.resize == 146
    name = write_folder(tmp_path / "val", train=("ab", 10), val=("ab", 3))  # val is the test set
    assert len(load(name, "test")) == 6 and len(load(name, "val")) == 2
    write_folder(tmp_path / "val", test=("ab", 4))  # now val is the validation set
    sizes = [len(load(name, split)) for split in ("train", "val", "test", "ood")]
    assert sizes == [20, 6, 8, 34]


@pytest.mark.parametrize("parts, says", [
    (dict(train=("ab", 2)), r"has no test \(or val\); expected .*train/<class>/.*test/<class>/"),
    (dict(test=("ab", 2)), "has no train with two classes or more; expected"),
    (dict(train=("a", 2), test=("a", 2)), "has no train with two classes"),
    (dict(cats=("ab", 2), dogs=("ab", 2)), "has no train.*never the training set"),
    (dict(train=("ab", 2), test=("ac", 2)), "class b is in train or in test alone"),
    (dict(train=("ab", 2), val=("abc", 1), test=("ab", 2)), "class c is in train or in val alone"),
])
def test_other_layouts_are_refused(tmp_path, parts, says):
    name = write_folder(tmp_path / "pets", **parts)
    for split in ("train", "test"):
        refuses(says, load, name, split)


def test_names_hold_no_path(tmp_path, monkeypatch):
    (tmp_path / "ß b" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "ß b")
    for name, want in (("folder:/x/y/Z-1.2/", "Z-1.2"), ("folder:.", "_b"), ("folder:c/..", "_b"),
                       ("/x/z.train.npz", "z.train"), ("svhn+cifar100", "svhn_cifar100"),
                       ("folder:/x/.hidden", "hidden"), ("folder:/", "folder"), ("svhn", "svhn")):
        assert data.set_name(name) == want


# ---- Streaming -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """imagenet/{train,val} with three classes of noise images of different sizes."""
    root, rng = tmp_path_factory.mktemp("streamed"), np.random.default_rng(0)
    for split, n in (("train", 4), ("val", 3)):
        for k in range(3):
            for i in range(n):
                array = rng.integers(0, 256, (40 + 8 * i, 56 - 4 * k, 3), dtype=np.uint8)
                save_png(root / "imagenet" / split / f"n0{k}" / f"{i}.png", array)
    return root


def test_streamed_set_evaluates_in_order(imagenet):
    from torchvision import transforms as T
    dataset = load("imagenet", "test", imagenet, image_size=70)
    assert isinstance(dataset, StreamedSet) and len(dataset) == 9 and dataset.shape == (3, 70, 70)
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


def test_streamed_augmentation_depends_on_seed_epoch_and_row_alone(imagenet, as_rank, monkeypatch):
    dataset, state = load("imagenet", "train", imagenet, val_fraction=0), torch.get_rng_state()
    dataset = replace(dataset, shape=(3, 24, 24))

    def make(seed=4, **more):
        return Loader(dataset, 5, shuffle=True, augment="crop_flip", seed=seed,
                      workers=common.rank() % 2, **more)

    orders = [list(make(seed).epoch(epoch)) for seed, epoch in ((4, 4), (4, 4), (4, 1), (3, 4))]
    first, again, *others = [torch.cat([b.images[b.index.argsort()] for b in batches])
                             for batches in orders]
    assert torch.equal(first, again) and not any(torch.equal(first, other) for other in others)
    twins = Loader(dataset.select([0] * 5), 5, augment="crop_flip").epoch()
    assert len(next(twins).images.unique(dim=0)) == 5
    check_ranks(as_rank, 3, make)  # the last batch has two images
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # a GPU's generator rests, too
    assert replace(dataset, key=(4, 4))[0].shape == (3, 24, 24)


def test_unreadable_files_and_folders_that_disagree(tmp_path):
    for name in ("x/0", "x/1", "x/2", "imagenet/train/n0/a", "imagenet/train/n1/a",
                 "imagenet/val/n1/a"):
        save_png(tmp_path / f"{name}.png")
    refuses("train and .*val differ", load, "imagenet", "test", tmp_path)
    (tmp_path / "x" / "1.png").write_bytes(b"no image")
    dataset = load(f"folder:{tmp_path}/x", "ood", image_size=100)
    for workers in (0, 1):
        refuses(r"x.1.png: unreadable", lambda: list(Loader(dataset, 2, workers=workers).epoch()))
    for kind, mode in ((np.uint16, "I;16"), (np.float32, "F")):  # would turn white, or black
        (tmp_path / mode).mkdir()
        Image.fromarray(np.zeros((9, 9), kind)).save(tmp_path / mode / "1.tif")
        refuses(f"unreadable .pixels of mode {mode}, expected 8 bits",
                load, f"folder:{tmp_path}/{mode}", "ood")


# ---- Loader --------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment, mode, shape", [
    ("crop_flip", "constant", (3, 8, 8)), ("reflect_crop_flip", "reflect", (1, 7, 11))])
def test_augmentation_equals_one_image_at_a_time(augment, mode, shape):
    dataset, (h, w) = toy(130, shape), shape[1:]
    batches = list(Loader(dataset, 32, seed=5, shuffle=True, augment=augment).epoch(2))
    g = data._generator(5, 2)
    order = torch.randperm(130, generator=g)
    dy, dx = torch.randint(0, 9, (2, 130), generator=g)
    flip, want = torch.randint(0, 2, (130,), generator=g), []
    mean, std = (torch.tensor(t).view(-1, 1, 1) for t in (dataset.mean, dataset.std))
    for row, y, x, flipped in zip(order, dy, dx, flip):
        image = F.pad(dataset.images[row][None].float(), [4] * 4, mode=mode)[0]
        image = image[:, y:y + h, x:x + w]
        want.append(((image.flip(2) if flipped else image) / 255 - mean) / std)
    assert flip.unique().tolist() == [0, 1] and len(dy.unique()) == len(dx.unique()) == 9
    assert torch.equal(torch.cat([b.index for b in batches]), order)
    assert torch.equal(torch.cat([b.labels for b in batches]), dataset.labels[order])
    images = torch.cat([b.images for b in batches])
    torch.testing.assert_close(images, torch.stack(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("floating", [False, True])
def test_evaluation_is_exact_in_order_and_normalised(floating):
    whole = toy(21).select(slice(3, None))
    pixels = whole.images / 255
    dataset = replace(whole, images=pixels) if floating else whole
    mean, std = (torch.tensor(t).view(-1, 1, 1) for t in (dataset.mean, dataset.std))
    batches = list(Loader(dataset, 4).epoch())
    images = torch.cat([b.images for b in batches])
    assert torch.cat([b.index for b in batches]).tolist() == list(range(18))
    assert [b.global_size for b in batches] == [4, 4, 4, 4, 2] and images.dtype == torch.float32
    torch.testing.assert_close(images, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    images.zero_()  # batches are the caller's: the set is unharmed
    assert torch.equal(whole.images, toy(21).images[3:]) and dataset.images.max() > 0


def test_order_depends_on_seed_and_epoch():
    np.random.seed(0), torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()

    def order(seed, epoch):
        batches = Loader(toy(60), 13, seed=seed, shuffle=True, augment="crop_flip").epoch(epoch)
        return tuple(torch.cat([b.index for b in batches]).tolist())

    orders = [order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9 and all(sorted(o) == list(range(60)) for o in orders)
    assert order(2, 1) == orders[7] and order(-5, 0) != order(5, 0)
    train_val_split(100, 1), data.corrupt(toy().images, "shot_noise", 3)
    assert np.array_equal(np.random.get_state()[1], before[0])  # global ones rest
    assert torch.equal(torch.get_rng_state(), before[1])


# ---- Corruptions ---------------------------------------------------------------------------------


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
        before, distances = images.clone(), []
        for severity in (1, 2, 3, 4, 5):
            out = data.corrupt(images, kind, severity, seed=1)
            assert out.shape == images.shape and out.dtype == torch.uint8
            distances.append((out.float() - images.float()).abs().mean().item())
        assert all(a < b for a, b in zip([0.3] + distances, distances)), distances
        assert distances[-1] < 100 and torch.equal(images, before)
        assert torch.equal(out, data.corrupt(images, kind, 5, seed=1))
        assert torch.equal(out, data.corrupt(images, kind, 5, seed=0)) == (kind not in RANDOM)
        real = data.corrupt(images / 255, kind, 5, seed=1)
        assert real.dtype == torch.float32 and 0 <= real.min() and real.max() <= 1
        assert (real * 255 - out).abs().max() <= 0.51
    twins = data.corrupt(pictures[0][:1].expand(8, -1, -1, -1), kind, 3)
    drawn = len(twins.flatten(1).unique(dim=0))
    assert drawn > 1 if kind in RANDOM else drawn == 1  # an image at a time, not once for all


def test_corruption_directions():
    x = torch.zeros(4, 1, 28, 28)
    x[:, :, 10, 14] = 1
    blurred = data.corrupt(x, "gaussian_blur", 3)
    assert torch.allclose(blurred.sum((1, 2, 3)), torch.ones(4), atol=1e-5)
    at, std = torch.arange(28.0), 0.031 * 28
    line = torch.exp(-(at - 14) ** 2 / (2 * std**2))
    assert torch.allclose(blurred[0, 0, 10], line / line.sum() * blurred[0, 0, 10].sum(), atol=1e-3)
    turned = data._warp(x, angle=torch.full((4,), torch.pi / 2))
    assert turned[0, 0].argmax() in (14 * 28 + 17, 13 * 28 + 10)  # (10,14) goes to a quarter turn
    hidden = (data.corrupt(torch.zeros(9, 3, 32, 32), "occlusion", 2) == 0.5).sum((1, 2, 3))
    assert hidden.tolist() == [3 * round(0.27 * 32) ** 2] * 9
    grey = torch.full((1001, 3, 16, 16), 0.5)
    struck = data.corrupt(grey, "impulse_noise", 5)
    assert [(struck == x).double().mean().item() for x in (0, 1)] == pytest.approx([0.09] * 2, 0.02)
    assert not torch.equal(struck[0], struck[1000])  # in the next block
    dataset = data.corrupted(toy(4), "contrast", 2)
    assert dataset.name == "toy_computed_contrast_s2" and dataset.labels.tolist() == [0, 1, 2, 3]
    x = toy(4).images.double()
    want = 0.55 * x + 0.45 * x.mean((1, 2, 3), keepdim=True)
    assert (dataset.images - want).abs().max() <= 0.51


# ---- OOD data and sets to predict ----------------------------------------------------------------


def test_match_takes_channels_size_and_statistics(imagenet):
    grey, colour = toy(5, (1, 28, 28), mean=(0.1,), std=(0.3,)), toy(5, (3, 32, 32), seed=1)
    up, down = match(grey, colour), match(colour, grey)
    assert up.shape == (3, 32, 32) and up.images.dtype == torch.uint8 and up.name == "toy"
    assert (up.mean, up.std) == (colour.mean, colour.std)
    assert torch.equal(up.images, up.images[:, :1].expand(-1, 3, -1, -1))
    assert down.shape == (1, 28, 28) and (down.mean, down.std) == (grey.mean, grey.std)
    small = match(colour, toy(1, (1, 32, 32)))
    r, g, b = colour.images.float().unbind(1)
    assert (small.images[:, 0] - (0.299 * r + 0.587 * g + 0.114 * b)).abs().max() <= 0.55
    want = F.interpolate(colour.images.double(), (16, 16), mode="bilinear", antialias=True)
    assert (match(colour, toy(1, (3, 16, 16))).images - want).abs().max() <= 0.51
    floats = match(replace(grey, images=grey.images / 255), colour)
    assert floats.images.dtype == torch.float32 and floats.images.max() <= 1
    for a, b in ((colour, toy(3, (5, 1, 1))), (toy(3, (5, 1, 1)), colour),
                 (toy(3, (5, 1, 1)), toy(3, (4, 1, 1)))):
        refuses("images and features cannot be compared", match, a, b)
    streamed = load("imagenet", "test", imagenet, image_size=32)
    assert match(streamed, colour).mean == (0.4, 0.5, 0.6)
    refuses("image_size=8", match, streamed, toy())


def test_ood_sets(tmp_path, capsys):
    train = load("glyphs", "train")
    save_png(tmp_path / "odd one" / "deep" / "er" / "x.PNG")
    save_png(tmp_path / "odd one" / "y.jpg", np.full((30, 20, 3), 200, np.uint8))
    (tmp_path / "odd one" / "notes.txt").write_text("no image")
    names = ["glyphs_letters", "svhn", "tiny_imagenet", f"folder:{tmp_path}/odd one",
             "glyphs_letters+glyphs_ambiguous"]
    sets = data.ood_sets(options(names, data_dir=tmp_path), train)
    assert [*sets] == ["glyphs_letters", "odd_one", "glyphs_letters_glyphs_ambiguous"]
    assert {s.shape for s in sets.values()} == {(1, 28, 28)}
    assert {(s.mean, s.std) for s in sets.values()} == {(train.mean, train.std)}
    assert len(sets["odd_one"]) == 2 and sets["odd_one"].files == ("deep/er/x.PNG", "y.jpg")
    assert len(sets["glyphs_letters_glyphs_ambiguous"]) == 4000
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and out[0].startswith("left out: svhn: ") and "tiny-imagenet-200" in out[1]
    assert all("https://" in line or "http://" in line for line in out)
    for name in ("svhn", "tiny_imagenet", "folder:/nowhere"):  # asked for by name
        refuses("is not there", data.ood_sets, options([name], ["ood"], tmp_path), train)
    refuses("'swhn' is unknown", data.ood_sets, options(["swhn"]), train)


@pytest.mark.parametrize("names, title", [
    (["a/odd", "b/odd"], "odd"), (["c/test"], "test"), (["c/val"], "val"), (["c/train"], "train"),
    (["c/glyphs"], "glyphs"), (["c/part"], "part"), (["c/letters", "d/letters"], "letters")])
def test_names_of_ood_sets_are_unique(tmp_path, names, title):
    for name in names:
        save_png(tmp_path / name / "x.png")
    args = options(f"folder:{tmp_path}/{name}" for name in names)
    refuses(f"another set of this run is called {title}", data.ood_sets, args,
            load("glyphs", "train", limit=10), taken=("part",))


def test_machines_agree_on_what_is_left_out(tmp_path, monkeypatch):
    train = load("glyphs", "train", limit=10)
    monkeypatch.setattr(common, "broadcast", lambda own: ["glyphs_letters"])  # the main one's
    kept = data.ood_sets(options(["glyphs_ambiguous", "glyphs_letters"]), train)
    assert [*kept] == ["glyphs_letters"]
    monkeypatch.setattr(common, "broadcast", lambda own: ["svhn"])
    refuses("svhn.*is not there", data.ood_sets, options(["svhn"], data_dir=tmp_path), train)


def test_predict_set_knows_labels_by_class_names(tmp_path):
    glyphs = load("glyphs", "train")
    for name in ("glyphs", "dirty_glyphs"):
        own = data.predict_set(options(predict=name), glyphs)
        assert torch.equal(own.labels, load(name, "test").labels)
    letters = data.predict_set(options(predict="glyphs_letters"), glyphs)
    assert letters.labels.unique().tolist() == [-1] and letters.num_classes == 10
    train = load(write_folder(tmp_path / "pets", train=("ab", 9), test=("ab", 2)), "train")
    for place in ("b", "new/a", "c", "."):
        save_png(tmp_path / "more" / place / "x.png")
    more = data.predict_set(options(predict=f"folder:{tmp_path}/more"), train)
    assert more.files == ("b/x.png", "c/x.png", "new/a/x.png", "x.png")
    assert more.labels.tolist() == [1, -1, 0, -1] and more.mean == train.mean
    (tmp_path / "nothing").mkdir()
    refuses("no images", data.predict_set, options(predict=f"folder:{tmp_path}/nothing"), train)


# ---- Features and toys ---------------------------------------------------------------------------


def save_features(path, features, labels=None):
    arrays = {} if labels is None else {"labels": np.asarray(labels)}
    np.savez(path, features=np.asarray(features), **arrays)
    return path


def test_feature_set_is_standardised_by_the_loader(tmp_path):
    z = np.random.default_rng(0).normal((5, -300, 0), (2, 40, 0.01), (400, 3))
    z = np.hstack([z, np.full((400, 1), 0.1)])  # a constant feature
    train = data.feature_set(save_features(tmp_path / "z.train.npz", z, np.arange(400) % 6))
    assert train.name == "z.train" and train.num_classes == 6 and train.shape == (4, 1, 1)
    assert np.array_equal(train.images[:, :, 0, 0], z.astype(np.float32)) and train.is_features
    assert train.mean == pytest.approx(z.mean(0))
    assert train.std == pytest.approx([*z.std(0)[:3], 1])
    batch = next(Loader(train, 400).epoch()).images[:, :, 0, 0]
    torch.testing.assert_close(batch.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    std = torch.tensor([1.0, 1, 1, 0])
    torch.testing.assert_close(batch.std(0, correction=0), std, atol=1e-5, rtol=0)
    test = save_features(tmp_path / "test.npz", z[:5].astype(">f2"), np.arange(5, dtype="u1"))
    test = data.feature_set(test, like=train)
    assert (test.num_classes, test.mean, test.std) == (6, train.mean, train.std)
    torch.testing.assert_close(next(Loader(test, 5).epoch()).images[:, :, 0, 0][:, :2],
                               batch[:5, :2], atol=0.01, rtol=0)


def test_features_as_ood_may_have_other_classes(tmp_path):
    train = data.feature_set(save_features(tmp_path / "a.npz", np.eye(3, 2), [0, 1, 2]))
    for name, labels in (("b", [0, 55, 99]), ("c", None), ("d", [0, 2, 3])):
        save_features(tmp_path / f"{name}.npz", np.ones((3, 2)), labels)
    sets = data.ood_sets(options([tmp_path / "b.npz", tmp_path / "c.npz"]), train)
    assert [*sets] == ["b", "c"] and sets["b"].labels.tolist() == [0, 0, 0]
    assert (sets["c"].mean, sets["c"].num_classes) == (train.mean, 3)
    for name, labels in (("b", [0, -1, -1]), ("c", [-1] * 3), ("d", [0, 2, -1])):
        own = data.predict_set(options(predict=str(tmp_path / f"{name}.npz")), train)
        assert own.labels.tolist() == labels
    refuses("cannot be compared", data.ood_sets, options(["glyphs_letters"]), train)
    refuses("cannot be compared with toy", data.ood_sets, options([tmp_path / "b.npz"]), toy())


@pytest.mark.parametrize("features, labels, says", [
    (np.ones((3, 4)), [0, 1, 2], r"must be \[N, 2\], not \[3, 4\]"),
    (np.ones((3, 2)), [0, 1, 3], "label 3 is not one of the 3 classes of train.*labelling"),
    (np.ones((3, 2)), [0, 1, -1], "'labels' must be"),
    (np.ones((3, 2)), [0, 1, 10**12], "'labels' must be.*below 1,000,000"),
    (np.ones((3, 2)), np.array([0, 1, 2**64 - 1], np.uint64), "'labels' must be"),
    (np.ones((3, 2)), [0.0, 1.0, 2.0], "'labels' must be"),
    (np.ones((3, 2)), [0, 1], r"'labels' must be \[3\]"),
    (np.ones((3, 2, 1)), [0, 1, 2], "'features' must be"),
    (np.ones((0, 2)), np.zeros(0, int), "'features' must be"),
    (np.full((3, 2), np.nan), [0, 1, 2], "NaN or infinity"),
    (np.full((3, 2), 1e39), [0, 1, 2], "exceed float32"),
    (np.full((3, 2), "a"), [0, 1, 2], "must hold numbers"),
])
def test_features_that_do_not_fit(tmp_path, features, labels, says):
    train = data.feature_set(save_features(tmp_path / "train.npz", np.eye(3, 2), [0, 1, 2]))
    path = save_features(tmp_path / "odd.npz", features, labels)
    refuses(f"odd.npz.*{says}", data.feature_set, path, like=train)
    refuses("no file .*none.npz", data.feature_set, tmp_path / "none.npz")


def test_toys():
    from sklearn.datasets import make_moons
    x, y = data.gaussian_ring(4000)
    assert x.dtype == torch.float32 and y.tolist() == [k for k in range(5) for _ in range(4000)]
    at = 2 * np.pi / 5 * np.arange(5)
    want = torch.tensor(5 * np.stack([np.cos(at), np.sin(at)], 1)).float()
    assert (x.view(5, 4000, 2).mean(1) - want).abs().max() < 0.07  # four standard errors
    for group in x.view(5, 4000, 2):
        assert (group.T.cov() - torch.eye(2)).abs().max() < 0.1
    x, y = data.gapped_regression(6000)
    for part, low, high in zip(x.view(3, 2000), (-7, -0.7, 4.2), (-4.2, 1.75, 7)):
        assert low <= part.min() < low + 0.02 and high - 0.02 < part.max() <= high
    noise = y - (x.sin() + (x / 5) ** 2)
    assert noise.mean().abs() < 0.005 and noise.square().mean() == pytest.approx(0.01, rel=0.07)
    for n in (100, 7):
        x, y = data.two_moons(n, noise=0.0)
        want, labels = make_moons(n, shuffle=False)
        assert np.allclose(x, want, atol=1e-6) and y.tolist() == labels.tolist()
    for draw in (data.gaussian_ring, data.gapped_regression, data.two_moons):
        a, b, c = (draw(20, seed=seed)[0] for seed in (3, 3, 1))
        assert torch.equal(a, b) and not (a == c).any()


# ---- Embedded sets -------------------------------------------------------------------------------

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
    train, val, test = (load(name, split) for split in ("train", "val", "test"))
    rows, test_rows, classes, labels, grey = EMBEDDED[name]
    assert len(train) + len(val) == rows and abs(len(val) - rows // 10) < 100
    assert (len(test), test.num_classes, test.shape) == (test_rows, classes, (1, 28, 28))
    pool = torch.cat([train.images, val.images]) / 255
    assert pool.mean() == pytest.approx(test.mean[0], abs=1e-4) and test.mean == train.mean
    assert pool.std() == pytest.approx(test.std[0], abs=1e-4) and pool.max() == 1
    rows = {image.numpy().tobytes() for image in train.images}
    assert not rows & {image.numpy().tobytes() for image in test.images}
    assert digest(test.labels) == labels
    assert test.images.double().mean() == pytest.approx(grey, abs=0.02)  # processors round unalike
    if name == "dirty_glyphs":
        assert (test.label_probs.amax(1) == 1).tolist() == [True] * 2000 + [False] * 2000
        assert torch.equal(test.images[2000:], load("glyphs_ambiguous", "test").images)
        assert len(train.groups.unique()) + len(val.groups.unique()) == 8000 + 4000
    elif name.endswith("ambiguous"):  # labels follow their distribution
        probs = torch.cat([train.label_probs, val.label_probs])
        assert torch.allclose(probs.sum(1), torch.ones(len(probs))) and (
            (probs > 0).sum(1) == 2).all()
        top, hits = probs.amax(1), probs.gather(1, torch.cat([train.labels, val.labels])[:, None])
        likely = (hits[:, 0] == top).double().mean().item()  # as often as its probability
        assert (hits > 0).all() and likely == pytest.approx(
            top.mean().item(), abs=4 * math.sqrt(0.25 / len(probs)))
    if name == "glyphs_ambiguous":
        assert not {*train.groups.tolist()} & {*val.groups.tolist()}


def test_glyphs_can_be_read():
    """Least squares on pixels finds the digits, and takes a 6 for a 9 no more than another."""
    train, test = load("glyphs", "train"), load("glyphs", "test")
    x, z = (F.pad(F.avg_pool2d(s.images / 255, 2).flatten(1), [0, 1], value=1.0).double()
            for s in (train, test))
    weights = torch.linalg.lstsq(x, F.one_hot(train.labels, 10).double()).solution
    guess = (z @ weights).argmax(1)
    assert (guess == test.labels).double().mean() > 0.8
    for a, b in ((6, 9), (9, 6)):
        assert (guess[test.labels == a] == b).double().mean() < 0.02
