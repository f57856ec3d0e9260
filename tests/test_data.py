"""data.py: splits, published layouts, streaming, the loader, corruptions, OOD and embedded sets."""
import hashlib
import math
import pickle
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
from common import UserError  # noqa: E402
from data import ImageSet, Loader, StreamedSet, load, match, train_val_split  # noqa: E402

SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A data_dir with the real MNIST, CIFAR-10 and CIFAR-100 test images."""
    if not (SHARED / "unpack.py").exists():
        pytest.skip("no real data: ../shared/data is absent")
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, SHARED / "unpack.py", folder, "mnist", "cifar10", "cifar100_test"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


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


def save_png(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


# ---- Splits --------------------------------------------------------------------------------------


def test_published_split_of_cifar10_seed_1():
    train, val = train_val_split(50000, 1, 0.1)
    assert val[:4].tolist() == [26247, 35067, 34590, 16668]
    assert (len(train), len(val)) == (45000, 5000)
    order = list(range(50000))
    np.random.RandomState(1).shuffle(order)
    assert torch.cat([val, train]).tolist() == order
    assert train_val_split(50000, 2, 0.1)[1][:4].tolist() != val[:4].tolist()


@pytest.mark.parametrize("n, fraction, n_val", [(73257, 0.1, 7325), (10, 0.0, 0), (9, 0.34, 3)])
def test_split_sizes(n, fraction, n_val):
    train, val = train_val_split(n, 3, fraction)
    assert len(val) == n_val and sorted(torch.cat([train, val]).tolist()) == list(range(n))


def test_split_never_separates_a_group():
    groups = torch.randint(0, 300, (2000,), generator=torch.Generator().manual_seed(0)) * 5 - 40
    train, val = train_val_split(2000, 1, 0.25, groups)
    assert not set(groups[train].tolist()) & set(groups[val].tolist())
    assert len(groups[val].unique()) == int(0.25 * len(groups.unique()))
    assert sorted(torch.cat([train, val]).tolist()) == list(range(2000))
    leaky_train, leaky_val = train_val_split(2000, 1, 0.25)
    assert set(groups[leaky_train].tolist()) & set(groups[leaky_val].tolist())


def test_split_leaves_the_global_generators_alone():
    np.random.seed(0), torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    train_val_split(100, 1)
    for batch in Loader(toy(), 7, shuffle=True, augment="crop_flip").epoch():
        pass
    data.corrupt(toy().images, "shot_noise", 3)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_set_selects_all_its_fields():
    dataset = toy(6, label_probs=torch.eye(6), groups=torch.arange(6) // 2).rename("other")
    mask = torch.tensor([False, True, False, False, True, False])
    for index in (torch.tensor([4, 1]), [4, 1], mask):
        part = dataset.select(index)
        rows = [4, 1] if len(index) == 2 else [1, 4]
        assert torch.equal(part.images, dataset.images[rows]) and len(part) == 2
        assert torch.equal(part.label_probs, torch.eye(6)[rows]) and part.name == "other"
        assert part.labels.tolist() == rows and part.groups.tolist() == [r // 2 for r in rows]
    assert dataset.shape == (3, 8, 8)
    refuses("toy", ImageSet, "toy", dataset.images, torch.zeros(5).long(), 7, (0.5,), (0.5,))


# ---- Real files ----------------------------------------------------------------------------------


def test_mnist(real):
    train, val, test = (load("mnist", split, real, seed=3) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (54000, 6000, 10000) and test.shape == (1, 28, 28)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4] and test.images.dtype == torch.uint8
    pool = load("mnist", "train", real, val_fraction=0)
    std, mean = torch.std_mean(pool.images / 255)
    assert mean == pytest.approx(pool.mean[0], abs=5e-5)
    assert std == pytest.approx(pool.std[0], abs=1e-4)
    noisy = load("mnist", "val", real, seed=3, noise=0.05)
    assert noisy.images.dtype == torch.float32
    assert (noisy.images - val.images / 255).std() == pytest.approx(0.05 * 0.3081, rel=1e-3)


def test_cifar10_and_cifar100_test_file(real):
    val = load("cifar10", "val", real)
    from torchvision.datasets import CIFAR10
    raw = CIFAR10(real)
    assert np.array_equal(val.images[0].permute(1, 2, 0), raw.data[26247])
    assert val.labels[:3].tolist() == [raw.targets[i] for i in (26247, 35067, 34590)]
    cifar100 = load("cifar100", "test", real, limit=500)
    assert len(cifar100) == 500 and cifar100.shape == (3, 32, 32) and cifar100.num_classes == 100
    assert cifar100.labels.bincount().tolist() == [5] * 100  # a limited set still has every class
    says = "cifar-100-python is not there.*toronto"
    refuses(says, load, "cifar100", "train", real, download=False)


def test_cut_mnist_file(real, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (real / "MNIST" / "raw").iterdir():
        (raw / file.name).write_bytes(file.read_bytes()[:5000])
    refuses("MNIST/raw is damaged.*get it from", load, "mnist", "test", tmp_path)


# ---- Published layouts ---------------------------------------------------------------------------


def test_absent_sets_name_the_path_and_the_site(tmp_path):
    for name, path in (
            ("mnist", "MNIST/raw"), ("kmnist", "KMNIST/raw"), ("svhn", "test_32x32.mat"),
            ("cifar10", "cifar-10-batches-py"), ("imagenet", "imagenet/val"),
            ("tiny_imagenet", "tiny-imagenet-200/wnids.txt"), ("imagenet_a", "imagenet-a"),
            ("ambiguous_mnist", "AmbiguousMNIST/amnist_samples.pt")):
        refuses(f"{path}.* is not there.*https?://", load, name, "test", tmp_path, download=False)
    for name, path in (("cifar10_c", "CIFAR-10-C/fog.npy"), ("imagenet_c", "imagenet-c/fog/2"),
                       ("tiny_imagenet_c", "Tiny-ImageNet-C/fog/2")):
        refuses(f"{path} is not there.*https://", data.load_corrupted, name, "fog", 2, tmp_path)


@pytest.mark.parametrize("call, match", [
    (lambda: load("mnits", "train"), "'mnits' is unknown.*glyphs"),
    (lambda: load("glyphs", "valid"), "split 'valid'"),
    (lambda: load("glyphs", "val", val_fraction=1.0), "val_fraction"),
    (lambda: load("glyphs", "val", limit=0), "limit"),
    (lambda: load("imagenet_r", "train"), "test split only"),
    (lambda: load("folder:/nowhere", "test"), "/nowhere is not there"),
    (lambda: data.load_corrupted("cifar_c", "fog", 1), "'cifar_c' is unknown"),
    (lambda: data.corruption_kinds("cifar10"), "'cifar10' is unknown.*imagenet_c"),
    (lambda: data.load_corrupted("cifar10_c", "occlusion", 1), "'occlusion' is unknown.*frost"),
    (lambda: data.load_corrupted("imagenet_c", "occlusion", 1), "'occlusion' is unknown.*frost"),
    (lambda: data.load_corrupted("glyphs_c", "fog", 1), "'fog' is unknown.*jpeg"),
    (lambda: data.load_corrupted("cifar10_c", "fog", 6), "severity 6"),
    (lambda: data.corrupt(toy().images, "fog", 1), "'fog' is unknown.*jpeg"),
    (lambda: Loader(toy(), 0), "batch_size 0"),
    (lambda: Loader(toy(), 5, rank=2, world_size=2), "rank 2"),
    (lambda: Loader(toy(), 5, augment="flip"), "'flip' is unknown"),
])
def test_mistakes_are_one_line(call, match):
    refuses(match, call)


def test_downloads_only_what_is_absent(tmp_path, monkeypatch):
    asked = []

    class Fake:
        def __init__(self, root, train, download):
            asked.append(download)
            raise RuntimeError("no route\nto host")

    monkeypatch.setitem(data.TORCHVISION, "mnist", (Fake, *data.TORCHVISION["mnist"][1:]))
    refuses("could not be downloaded .no route to host", load, "mnist", "test", tmp_path)
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    refuses("damaged or incomplete", load, "mnist", "test", tmp_path)
    assert asked == [True, False]


def test_damaged_cifar_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": 0})[:-3])
    refuses("cifar-10-batches-py is damaged", load, "cifar10", "train", tmp_path)
    file = tmp_path / "cifar100_test.npz"
    np.savez(file, images=np.zeros((9, 32, 32, 3), np.uint8), labels=np.zeros(9))
    refuses("cifar100_test.npz.*expected .10000", load, "cifar100", "test", tmp_path)
    file.write_bytes(b"PK not a zip")
    refuses("cifar100_test.npz is damaged", load, "cifar100", "test", tmp_path)


@pytest.fixture(scope="session")
def ambiguous(tmp_path_factory):
    """Ambiguous-MNIST's files: image i is i / 12000 all over, its tenth label unlike the others."""
    folder = tmp_path_factory.mktemp("amnist") / "AmbiguousMNIST"
    folder.mkdir()
    images = (torch.arange(12000.0) / 12000).view(-1, 1, 1, 1).expand(-1, 1, 28, 28).contiguous()
    labels = (torch.arange(12000)[:, None] % 5).repeat(1, 10)
    labels[:, 9] = 5 + torch.arange(12000) % 5
    torch.save(images, folder / "amnist_samples.pt")
    torch.save(labels, folder / "amnist_labels.pt")
    return folder.parent


@pytest.fixture
def trusted(ambiguous, monkeypatch):
    for file in data.AMBIGUOUS_MNIST_MD5:
        md5 = hashlib.md5((ambiguous / "AmbiguousMNIST" / file).read_bytes()).hexdigest()
        monkeypatch.setitem(data.AMBIGUOUS_MNIST_MD5, file, md5)
    return ambiguous


def test_ambiguous_mnist_rows(trusted):
    pool = load("ambiguous_mnist", "train", trusted, val_fraction=0, limit=60000)
    pool = pool.select(pool.groups.argsort(stable=True))
    assert len(pool) == 60000 and pool.images.dtype == torch.float32
    assert torch.equal(pool.images[:, 0, 0, 0], (torch.arange(60000) // 10) / 12000)
    assert pool.labels[40:50].tolist() == [4] * 9 + [9]
    assert pool.label_probs[45].tolist() == pytest.approx([0, 0, 0, 0, 0.9, 0, 0, 0, 0, 0.1])
    test = load("ambiguous_mnist", "test", trusted)
    assert len(test) == 60000 and (test.mean, test.std) == ((0.1307,), (0.3081,))
    for k in (0, 1, 59999):  # sample-major: ten rows of one image, then the next
        assert test.images[k, 0, 5, 5] == torch.tensor((6000 + k // 10) / 12000)


def test_ambiguous_mnist_split_leaks_only_on_request(trusted):
    def images(split, **options):
        return set(load("ambiguous_mnist", split, trusted, **options).groups.tolist())

    assert not images("train") & images("val") and len(images("val")) == 600
    assert len(images("train", published_split=True) & images("val", published_split=True)) > 3000


def test_other_release_of_ambiguous_mnist_is_refused(ambiguous):
    says = "amnist_samples.pt is damaged or.*another release than data-v1.0.0.*MD5"
    refuses(says, load, "ambiguous_mnist", "test", ambiguous)


def test_dirty_mnist(trusted, monkeypatch):
    clean = [replace(toy(n, (1, 28, 28)), num_classes=10) for n in (10000, 60000)]
    monkeypatch.setattr(data, "_torchvision", lambda name, training, *_: clean[training])
    test = load("dirty_mnist", "test", trusted)
    assert len(test) == 70000 and test.num_classes == 10
    assert torch.equal(test.images[:10000], clean[0].images / 255)
    assert test.images[10010, 0, 0, 0] == torch.tensor(6001 / 12000)
    assert torch.equal(test.label_probs[:10000].argmax(1), clean[0].labels)
    for split, rows in (("train", 108000), ("val", 12000)):
        assert len(load("dirty_mnist", split, trusted, published_split=True)) == rows
    train, val = (load("dirty_mnist", split, trusted).groups for split in ("train", "val"))
    assert len(train) + len(val) == 120000 and not set(train.tolist()) & set(val.tolist())
    assert len(val.unique()) == 6600


def test_noise_is_seeded_and_in_normalised_units(trusted):
    def images(noise, seed):
        return load("ambiguous_mnist", "test", trusted, limit=2000, noise=noise, seed=seed).images

    plain, a, b, c = images(0, 1), images(0.05, 1), images(0.05, 1), images(0.05, 2)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (a - plain).std() == pytest.approx(0.05 * 0.3081, rel=1e-2)
    assert (a - plain).mean().abs() < 1e-4 and a.max() > 1  # not clipped


def test_cifar_c_layout(tmp_path):
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
        assert dataset.shape == (3, 32, 32) and len(dataset) == 10000 and dataset.num_classes == 10
        assert np.array_equal(dataset.images[:, 1, 3, 4], severity * 10 - 10 + mine % 7)
        assert dataset.labels.tolist() == (mine % 10).tolist()
        assert dataset.name == f"cifar10_c_fog_s{severity}"
        assert dataset.mean == (0.4914, 0.4822, 0.4465)
    np.save(folder / "labels.npy", np.zeros(10000))
    np.save(folder / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    np.save(folder / "frost.npy", np.array([{}], dtype=object))
    (folder / "spatter.npy").write_bytes((folder / "fog.npy").read_bytes()[:100000])
    for kind, says in (("fog", r"labels.npy.*\(10000,\), expected \(50000,\)"),
                       ("snow", r"snow.npy.*\(10, 32, 32, 3\), expected"),
                       ("frost", "frost.npy is damaged"), ("spatter", "spatter.npy is damaged")):
        refuses(says, data.load_corrupted, "cifar10_c", kind, 1, tmp_path)


@pytest.fixture
def tiny(tmp_path):
    """tiny-imagenet-200 with two classes, in an order that sorting would change."""
    root = tmp_path / "tiny-imagenet-200"
    root.mkdir()
    (root / "wnids.txt").write_text("n02\nn01\n")
    for k, wnid in enumerate(("n02", "n01")):
        for i in range(5):
            array = np.full((64, 64, 3) if i else (64, 64), 100 * k + 10 * i, np.uint8)  # some grey
            save_png(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", array)
    for i, k in enumerate((1, 0, 1)):
        save_png(root / "val" / "images" / f"val_{i}.JPEG", np.full((64, 64, 3), 50 * i, np.uint8))
    rows = [f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9" for i, wnid in enumerate(("n01", "n02", "n01"))]
    (root / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_tiny_imagenet_layout(tiny):
    pool = load("tiny_imagenet", "train", tiny, val_fraction=0)
    assert pool.shape == (3, 64, 64) and len(pool) == 10 and pool.num_classes == 2
    level = pool.images[:, :, 32, 32].float()
    assert torch.equal(level.mean(1) >= 95, pool.labels == 1)
    test = load("tiny_imagenet", "test", tiny, image_size=32)
    assert test.shape == (3, 32, 32) and test.labels.tolist() == [1, 0, 1]
    assert test.images[:, 0, 9, 9].tolist() == [0, 50, 100]
    assert len(load("tiny_imagenet", "val", tiny, val_fraction=0.3)) == 3


def test_tiny_imagenet_faults(tiny):
    root = tiny / "tiny-imagenet-200"
    file = root / "val" / "images" / "val_1.JPEG"
    whole = file.read_bytes()
    save_png(file, np.zeros((32, 32, 3), np.uint8))
    says = r"val_1.JPEG: width and height \(32, 32\), expected \(64, 64\)"
    refuses(says, load, "tiny_imagenet", "test", tiny)
    file.write_bytes(whole[:len(whole) // 2])
    refuses("val_1.JPEG: unreadable", load, "tiny_imagenet", "test", tiny)
    file.unlink()
    refuses("val_1.JPEG: unreadable", load, "tiny_imagenet", "test", tiny)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t9\t9\n")
    refuses("class n09 is not in wnids", load, "tiny_imagenet", "test", tiny)
    for file in (root / "train" / "n01" / "images").iterdir():
        file.unlink()
    refuses("n01/images: no images", load, "tiny_imagenet", "train", tiny)


def test_tiny_imagenet_c_labels_follow_wnids(tiny):
    for wnid in ("n01", "n02"):
        level = 200 if wnid == "n01" else 20
        file = tiny / "Tiny-ImageNet-C" / "fog" / "2" / wnid / "a.JPEG"
        save_png(file, np.full((64, 64, 3), level, np.uint8))
    dataset = data.load_corrupted("tiny_imagenet_c", "fog", 2, tiny)
    assert dataset.labels.tolist() == [0, 1] and dataset.images[:, 0, 0, 0].tolist() == [20, 200]


@pytest.fixture
def tiny_c(tiny):
    """Tiny-ImageNet-C of one kind and two severities: 2 as folders, 3 the same in zip archives."""
    root, rng = tiny / "Tiny-ImageNet-C" / "zoom", np.random.default_rng(0)
    (root / "3").mkdir(parents=True)
    for wnid, members in (("n01", ("n01/b.JPEG", "n01/a.JPEG")),
                          ("n02", ("z/y/a.png", "c.JPEG", "z/b.JPEG", "notes.txt"))):
        with zipfile.ZipFile(root / "3" / f"{wnid}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for member in members:
                file = root / "2" / wnid / Path(member).name
                if file.suffix == ".txt":
                    file.write_text("no image")
                else:
                    save_png(file, rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
                archive.write(file, member)
    return tiny


def test_tiny_imagenet_c_from_zip_archives(tiny_c):
    before = sorted(tiny_c.rglob("*"))
    folders, zips = (data.load_corrupted("tiny_imagenet_c", "zoom", s, tiny_c) for s in (2, 3))
    assert isinstance(zips, ImageSet) and zips.name == "tiny_imagenet_c_zoom_s3"
    assert zips.labels.tolist() == folders.labels.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(zips.images, folders.images) and len(zips.images.unique(dim=0)) == 5
    assert (zips.num_classes, zips.mean, zips.std) == (2, folders.mean, folders.std)
    assert sorted(tiny_c.rglob("*")) == before  # nothing is extracted


def test_tiny_imagenet_c_zip_faults(tiny_c):
    root = tiny_c / "Tiny-ImageNet-C" / "zoom"
    file, load_zips = root / "3" / "n01.zip", ("tiny_imagenet_c", "zoom", 3, tiny_c)
    whole = file.read_bytes()
    broken = bytearray(whole)
    broken[2000] ^= 255  # in the first member: its checksum is wrong
    for content in (whole[:len(whole) // 2], broken, b""):
        file.write_bytes(content)
        refuses("3/n01.zip: unreadable.*replace", data.load_corrupted, *load_zips)
    save_png(root / "small.png", np.zeros((32, 64, 3), np.uint8))
    (root / "text.png").write_bytes(b"no image")
    for member, says in (("small.png", r"n01.zip/x/small.png: width and height \(64, 32\)"),
                         ("text.png", "n01.zip/x/text.png: unreadable")):
        with zipfile.ZipFile(file, "w") as archive:
            archive.write(root / member, f"x/{member}")
        refuses(says, data.load_corrupted, *load_zips)
    zipfile.ZipFile(file, "w").close()
    refuses("3/n01.zip: no images", data.load_corrupted, *load_zips)
    file.unlink()
    refuses("3/n01.zip: no images", data.load_corrupted, *load_zips)
    file.write_bytes(whole)
    (root / "3" / "n02.zip").unlink()
    refuses("3/n02.zip: no images", data.load_corrupted, *load_zips)


def test_corruption_kinds(tiny_c):
    assert data.corruption_kinds("glyphs_c") == list(data.CORRUPTIONS)
    for name in ("cifar10_c", "cifar100_c", "imagenet_c"):
        assert data.corruption_kinds(name, tiny_c) == []
    for file in ("CIFAR-100-C/saturate.npy", "CIFAR-100-C/fog.npy", "CIFAR-100-C/labels.npy",
                 "CIFAR-100-C/shot_noise.npy", "Tiny-ImageNet-C/README"):
        (tiny_c / file).parent.mkdir(exist_ok=True)
        (tiny_c / file).write_text("")
    assert data.corruption_kinds("cifar100_c", tiny_c) == ["shot_noise", "fog", "saturate"]
    assert data.corruption_kinds("cifar10_c", str(tiny_c)) == []
    for kind in ("zoom", "blur_7", "fog"):
        save_png(tiny_c / "imagenet-c" / kind / "4" / "n01" / "a.png", np.zeros((9, 9), np.uint8))
    (tiny_c / "Tiny-ImageNet-C" / "fog").mkdir()
    assert data.corruption_kinds("imagenet_c", tiny_c) == ["blur_7", "fog", "zoom"]
    assert data.corruption_kinds("tiny_imagenet_c", tiny_c) == ["fog", "zoom"]
    assert len(data.load_corrupted("imagenet_c", "blur_7", 4, tiny_c)) == 1
    refuses("'blur_7' is unknown", data.load_corrupted, "tiny_imagenet_c", "blur_7", 4, tiny_c)


def test_folders(tmp_path):
    for i in range(3):
        save_png(tmp_path / "flat" / f"{i}.png", np.full((20, 30, 3), 80 * i, np.uint8))
    (tmp_path / "flat" / "notes.txt").write_text("no image")
    name = f"folder:{tmp_path}/flat"
    flat = load(name, "test", image_size=16)
    assert isinstance(flat, ImageSet) and flat.shape == (3, 16, 16) and flat.name == "flat"
    assert flat.labels.tolist() == [0, 0, 0] and flat.images[:, 0, 8, 8].tolist() == [0, 80, 160]
    refuses("images of 30x20; give image_size", load, name, "test")
    (tmp_path / "none").mkdir()
    refuses("neither images", load, f"folder:{tmp_path}/none", "test")
    for i, kind in enumerate(("b", "a", "b")):
        save_png(tmp_path / "tree" / kind / f"{i}.png", np.full((40, 40, 3), 80 * i, np.uint8))
    tree = load(f"folder:{tmp_path}/tree", "test", image_size=20)
    assert isinstance(tree, ImageSet) and tree.labels.tolist() == [0, 1, 1]
    streamed = load(f"folder:{tmp_path}/tree", "test")
    assert isinstance(streamed, StreamedSet) and streamed.shape == (3, 224, 224)
    assert streamed.classes == ("a", "b") and streamed.labels.tolist() == [0, 1, 1]


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
    dataset = load("imagenet", "test", imagenet, image_size=28)
    assert isinstance(dataset, StreamedSet) and len(dataset) == 9 and dataset.shape == (3, 28, 28)
    transform = T.Compose([T.Resize(32), T.CenterCrop(28), T.ToTensor(),
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


def test_streamed_augmentation_depends_on_seed_epoch_and_row_alone(imagenet):
    dataset = load("imagenet", "train", imagenet, image_size=24, val_fraction=0)
    options = dict(shuffle=True, augment="crop_flip", seed=4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    whole = [list(Loader(dataset, 5, **options).epoch(e)) for e in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    images = [torch.cat([b.images[b.index.argsort()] for b in epoch]) for epoch in whole]
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
    ranks = [list(Loader(dataset, 5, rank=r, world_size=3, workers=r, **options).epoch(0, start=1))
             for r in range(3)]
    for i, batch in enumerate(whole[0][1:]):
        assert torch.equal(torch.cat([rank[i].images for rank in ranks]), batch.images)
        assert torch.equal(torch.cat([rank[i].index for rank in ranks]), batch.index)
        assert torch.equal(torch.cat([rank[i].labels for rank in ranks]), batch.labels)
    assert [len(rank[1].images) for rank in ranks] == [1, 1, 0]  # the last batch has two images


def test_streamed_split_and_unreadable_file(imagenet, tmp_path):
    train, val = (load("imagenet", s, imagenet, val_fraction=0.25) for s in ("train", "val"))
    assert (len(train), len(val)) == (9, 3)
    assert not set(train.dataset.paths) & set(val.dataset.paths)
    refuses("noise", load, "imagenet", "val", imagenet, noise=0.1)
    for i in range(3):
        save_png(tmp_path / "x" / f"{i}.png", np.zeros((9, 9), np.uint8))
    (tmp_path / "x" / "1.png").write_bytes(b"no image")
    dataset = load(f"folder:{tmp_path}", "test")
    for workers in (0, 1):
        refuses(r"x/1.png: unreadable", lambda: list(Loader(dataset, 2, workers=workers).epoch()))


def test_imagenet_folders_must_agree(tmp_path):
    for path in ("train/n0", "train/n1", "val/n1"):
        save_png(tmp_path / "imagenet" / path / "a.png", np.zeros((9, 9), np.uint8))
    refuses("train and .*val differ", load, "imagenet", "test", tmp_path)
    assert load("imagenet", "train", tmp_path, val_fraction=0).num_classes == 2


# ---- Loader --------------------------------------------------------------------------------------


def by_hand(dataset, loader, epoch, mode="constant"):
    """The epoch's images one by one, by the offsets that the loader's generator draws."""
    g, n = data._generator(loader.seed, epoch), len(dataset)
    order = torch.randperm(n, generator=g)
    dy, dx = torch.randint(0, 9, (2, n), generator=g)
    flip, out = torch.randint(0, 2, (n,), generator=g), []
    mean, std = (torch.tensor(t).view(-1, 1, 1) for t in (dataset.mean, dataset.std))
    for position, row in enumerate(order.tolist()):
        image = F.pad(dataset.images[row][None].float(), [4] * 4, mode=mode)[0]
        h, w = dataset.shape[1:]
        image = image[:, dy[position]:dy[position] + h, dx[position]:dx[position] + w]
        image = image.flip(2) if flip[position] else image
        out.append((image / 255 - mean) / std)
    assert flip.unique().tolist() == [0, 1] and len(dy.unique()) == len(dx.unique()) == 9
    return order, torch.stack(out)


@pytest.mark.parametrize("augment, mode", [("crop_flip", "constant"),
                                           ("reflect_crop_flip", "reflect")])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 11)])
def test_augmentation_equals_one_image_at_a_time(augment, mode, shape):
    dataset = toy(130, shape)
    loader = Loader(dataset, 32, seed=5, shuffle=True, augment=augment)
    batches = list(loader.epoch(2))
    order, want = by_hand(dataset, loader, 2, mode)
    assert torch.equal(torch.cat([b.index for b in batches]), order)
    assert torch.equal(torch.cat([b.labels for b in batches]), dataset.labels[order])
    torch.testing.assert_close(torch.cat([b.images for b in batches]), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("floating", [False, True])
def test_evaluation_is_exact_in_order_and_normalised(floating):
    whole = toy(21).select(slice(3, None))  # a view that does not start at its storage's beginning
    pixels = whole.images / 255
    dataset = replace(whole, images=pixels) if floating else whole
    mean, std = (torch.tensor(t).view(-1, 1, 1) for t in (dataset.mean, dataset.std))
    batches = list(Loader(dataset, 4).epoch())
    images = torch.cat([b.images for b in batches])
    assert torch.cat([b.index for b in batches]).tolist() == list(range(18))
    assert [b.global_size for b in batches] == [4, 4, 4, 4, 2] and images.dtype == torch.float32
    torch.testing.assert_close(images, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    other = next(Loader(dataset, 18, mean=(0.5,) * 3, std=(1.0,) * 3).epoch()).images
    torch.testing.assert_close(other, pixels - 0.5, atol=1e-6, rtol=1e-5)
    images.zero_()  # batches are the caller's: the set is unharmed
    assert torch.equal(whole.images, toy(21).images[3:]) and dataset.images.max() > 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_ranks_together_are_the_single_process(world, augment):
    dataset, options = toy(50), dict(seed=1, shuffle=True, augment=augment)
    single = list(Loader(dataset, 16, **options).epoch(3))
    ranks = [list(Loader(dataset, 16, rank=r, world_size=world, **options).epoch(3))
             for r in range(world)]
    assert [len(batch.images) for batch in single] == [16, 16, 16, 2]
    for i, batch in enumerate(single):
        cuts = [len(part) for part in np.array_split(np.arange(len(batch.images)), world)]
        assert [len(rank[i].images) for rank in ranks] == cuts
        assert {rank[i].global_size for rank in ranks} == {batch.global_size}
        for field in ("images", "labels", "index"):
            together = torch.cat([getattr(rank[i], field) for rank in ranks])
            assert torch.equal(together, getattr(batch, field))


def test_start_skips_exactly():
    loader = Loader(toy(50), 8, shuffle=True, augment="crop_flip", seed=9)
    whole, tail = list(loader.epoch(4)), list(loader.epoch(4, start=5))
    assert len(loader) == len(whole) == 7 and len(tail) == 2
    for a, b in zip(whole[5:], tail):
        assert torch.equal(a.images, b.images) and torch.equal(a.index, b.index)
    assert not list(loader.epoch(4, start=7))


def test_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        batches = Loader(toy(60), 13, seed=seed, shuffle=True).epoch(epoch)
        return tuple(torch.cat([b.index for b in batches]).tolist())

    orders = [order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9 and all(sorted(o) == list(range(60)) for o in orders)
    assert order(2, 1) == orders[7] and order(-5, 0) != order(5, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("augment", ["none", "crop_flip", "reflect_crop_flip"])
def test_cuda_batches_equal_those_of_the_cpu(augment):
    dataset = toy(50000, (3, 32, 32))  # more than 2**31 possible pixels in all its crops
    loaders = [Loader(dataset, 6000, device, shuffle=True, augment=augment)
               for device in ("cpu", "cuda")]
    for a, b in zip(*(loader.epoch() for loader in loaders)):
        assert b.images.is_cuda and b.labels.is_cuda and b.index.is_cuda
        assert torch.equal(a.images, b.images.cpu()) and torch.equal(a.labels, b.labels.cpu())


def test_channels_last_changes_the_layout_only():
    a, b = (next(Loader(toy(), 8, augment="crop_flip", channels_last=c).epoch()).images
            for c in (False, True))
    assert torch.equal(a, b) and a.is_contiguous()
    assert b.is_contiguous(memory_format=torch.channels_last) and not b.is_contiguous()


# ---- Corruptions ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pictures():
    """Grey glyphs and smooth coloured images, uint8, 28x28 and 32x32."""
    coarse = torch.rand(150, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(coarse, (32, 32), mode="bicubic", align_corners=False).clamp(0, 1)
    return load("glyphs", "test", limit=150).images, (smooth * 255).byte()


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
        real = data.corrupt(images / 255, kind, 5, seed=1)
        assert real.dtype == torch.float32 and 0 <= real.min() and real.max() <= 1
        assert (real * 255 - out).abs().max() <= 0.51


@pytest.mark.parametrize("kind", ["gaussian_noise", "shot_noise", "impulse_noise", "motion_blur",
                                  "occlusion", "rotation", "elastic"])
def test_random_corruptions_follow_the_seed(kind, pictures):
    a, b = (data.corrupt(pictures[0], kind, 3, seed=seed) for seed in (0, 1))
    assert not torch.equal(a, b)
    twins = data.corrupt(pictures[0][:1].expand(8, -1, -1, -1), kind, 3)
    assert len(twins.flatten(1).unique(dim=0)) > 1  # drawn an image, not once for all


def test_noise_strengths():
    grey = torch.full((200, 1, 28, 28), 0.4)
    for kind, std in (("gaussian_noise", 0.08), ("shot_noise", (0.4 / 60) ** 0.5)):
        noise = data.corrupt(grey, kind, 2) - grey
        assert noise.std() == pytest.approx(std, rel=0.02) and noise.mean().abs() < 0.001
    out = data.corrupt(grey, "impulse_noise", 5)
    for value, share in ((0.0, 0.09), (1.0, 0.09), (0.4, 0.82)):
        assert (out == value).float().mean() == pytest.approx(share, abs=0.003)


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
    dataset = data.corrupted(toy(4), "contrast", 2)
    assert dataset.name == "toy_computed_contrast_s2" and dataset.labels.tolist() == [0, 1, 2, 3]
    glyphs_c = data.load_corrupted("glyphs_c", "rotation", 4)
    assert glyphs_c.name == "glyphs_c_rotation_s4" and len(glyphs_c) == 2000


# ---- OOD data ------------------------------------------------------------------------------------


def test_match_takes_channels_size_and_statistics():
    grey, colour = toy(5, (1, 28, 28), mean=(0.1,), std=(0.3,)), toy(5, (3, 32, 32), seed=1)
    up = match(grey, colour)
    assert up.shape == (3, 32, 32) and up.images.dtype == torch.uint8 and up.name == "toy"
    assert (up.mean, up.std) == (colour.mean, colour.std)
    assert torch.equal(up.images, up.images[:, :1].expand(-1, 3, -1, -1))
    down = match(colour, grey)
    assert down.shape == (1, 28, 28) and (down.mean, down.std) == (grey.mean, grey.std)
    small = match(colour, toy(1, (1, 32, 32)))
    r, g, b = colour.images.float().unbind(1)
    assert (small.images[:, 0] - (0.299 * r + 0.587 * g + 0.114 * b)).abs().max() <= 0.55
    want = F.interpolate(colour.images.double(), (16, 16), mode="bilinear", antialias=True)
    assert (match(colour, toy(1, (3, 16, 16))).images - want).abs().max() <= 0.51
    same = match(colour, toy(2, (3, 32, 32), mean=(0.0,) * 3))
    assert torch.equal(same.images, colour.images) and same.mean == (0.0,) * 3
    floats = match(replace(grey, images=grey.images / 255), colour)
    assert floats.images.dtype == torch.float32 and floats.images.max() <= 1


def test_match_streamed(imagenet):
    streamed = load("imagenet", "test", imagenet, image_size=32)
    matched = match(streamed, toy(3, (3, 32, 32)))
    assert matched.mean == (0.4, 0.5, 0.6) and len(matched) == 9
    refuses("image_size=8", match, streamed, toy())


# ---- Features and toys ---------------------------------------------------------------------------


def save_features(path, features, labels):
    np.savez(path, features=np.asarray(features), labels=np.asarray(labels))
    return path


def test_feature_set_is_standardised_by_the_loader(tmp_path):
    z = np.random.default_rng(0).normal((5, -300, 0), (2, 40, 0.01), (400, 3))
    z = np.hstack([z, np.full((400, 1), 0.1)])  # a constant feature
    train = data.feature_set(save_features(tmp_path / "z.train.npz", z, np.arange(400) % 6))
    assert train.name == "z.train" and train.num_classes == 6 and train.shape == (4, 1, 1)
    assert train.images.dtype == torch.float32 and train.labels.tolist()[4:8] == [4, 5, 0, 1]
    assert np.array_equal(train.images[:, :, 0, 0], z.astype(np.float32))
    assert train.mean == pytest.approx(z.mean(0)) and train.std[3] == 1
    assert train.std[:3] == pytest.approx(z.std(0)[:3])
    batch = next(Loader(train, 400).epoch()).images[:, :, 0, 0]
    torch.testing.assert_close(batch.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    std = torch.tensor([1.0, 1, 1, 0])
    torch.testing.assert_close(batch.std(0, correction=0), std, atol=1e-5, rtol=0)
    test = save_features(tmp_path / "test.npz", z[:5].astype(np.float16), np.arange(5, dtype="u1"))
    test = data.feature_set(test, like=train)
    assert (test.num_classes, test.mean, test.std) == (6, train.mean, train.std)
    torch.testing.assert_close(next(Loader(test, 5).epoch()).images[:, :, 0, 0][:, :2],
                               batch[:5, :2], atol=0.01, rtol=0)


@pytest.mark.parametrize("features, labels, says", [
    (np.ones((3, 4)), [0, 1, 2], r"must be \[N, 2\], not \[3, 4\]"),
    (np.ones((3, 2)), [0, 1, 3], "label 3 is not one of the 3 classes of train.*labelling"),
    (np.ones((3, 2)), [0, 1, -1], "'labels' must be"),
    (np.ones((3, 2)), [0.0, 1.0, 2.0], "'labels' must be"),
    (np.ones((3, 2)), [0, 1], r"'labels' must be \[3\]"),
    (np.ones((3, 2, 1)), [0, 1, 2], "'features' must be"),
    (np.ones((0, 2)), np.zeros(0, int), "'features' must be"),
    (np.full((3, 2), np.nan), [0, 1, 2], "NaN or infinity"),
    (np.full((3, 2), "a"), [0, 1, 2], "must hold numbers"),
])
def test_features_that_do_not_fit(tmp_path, features, labels, says):
    train = data.feature_set(save_features(tmp_path / "train.npz", np.eye(3, 2), [0, 1, 2]))
    path = save_features(tmp_path / "odd.npz", features, labels)
    refuses(f"odd.npz.*{says}", data.feature_set, path, like=train)


def test_absent_features(tmp_path):
    refuses("no file .*none.npz", data.feature_set, tmp_path / "none.npz")
    np.savez(tmp_path / "z.npz", features=np.ones((3, 2)))
    says = "z.npz has no array 'labels.*it needs features, labels"
    refuses(says, data.feature_set, tmp_path / "z.npz")
    assert data.read_features(tmp_path / "z.npz", 2).tolist() == [[1, 1]] * 3
    refuses(r"\[N, 3\]", data.read_features, tmp_path / "z.npz", 3)


def test_gaussian_ring():
    x, y = data.gaussian_ring(4000)
    assert x.dtype == torch.float32 and y.tolist() == [k for k in range(5) for _ in range(4000)]
    at = 2 * np.pi / 5 * np.arange(5)
    want = torch.tensor(5 * np.stack([np.cos(at), np.sin(at)], 1)).float()
    groups = x.view(5, 4000, 2)
    assert (groups.mean(1) - want).abs().max() < 0.07  # four standard errors
    for group in groups:
        assert (group.T.cov() - torch.eye(2)).abs().max() < 0.1
    a, b, c = (data.gaussian_ring(9, seed)[0] for seed in (42, 42, 1))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.shape == (45, 2)
    assert torch.equal(a, data.gaussian_ring(9)[0])


def test_gapped_regression():
    x, y = data.gapped_regression(6000)
    assert x.dtype == y.dtype == torch.float32 and x.shape == y.shape == (6000,)
    for part, low, high in zip(x.view(3, 2000), (-7, -0.7, 4.2), (-4.2, 1.75, 7)):
        assert low <= part.min() < low + 0.02 and high - 0.02 < part.max() <= high
        assert part.mean() == pytest.approx((low + high) / 2, abs=0.08)
    noise = y - (x.sin() + (x / 5) ** 2)
    assert noise.std() == pytest.approx(0.1, rel=0.04) and noise.mean().abs() < 0.005
    a, b, c = (torch.stack(data.gapped_regression(20, seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not (a == c).any()
    assert ((a[0] < -4).sum(), (a[0] > 4).sum()) == (7, 6)
    assert torch.equal(torch.stack(data.gapped_regression()),
                       torch.stack(data.gapped_regression(60, 0)))


def test_two_moons():
    from sklearn.datasets import make_moons
    for n in (100, 7):
        x, y = data.two_moons(n, noise=0.0)
        want, labels = make_moons(n, shuffle=False)
        assert np.allclose(x, want, atol=1e-6) and y.tolist() == labels.tolist()
        assert x.dtype == torch.float32 and y.dtype == torch.int64
    a, b, c = (data.two_moons(4000, 0.1, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (a - data.two_moons(4000, 0.0)[0]).std() == pytest.approx(0.1, rel=0.05)


# ---- Embedded sets -------------------------------------------------------------------------------

SIZES = {"glyphs": (9000, 1000, 2000, 10), "glyphs_ambiguous": (9000, 1000, 2000, 10),
         "dirty_glyphs": (14400, 1600, 4000, 10), "glyphs_letters": (9000, 1000, 2000, 16),
         "numbers": (27000, 3000, 5000, 1000), "numbers_letters": (27000, 3000, 5000, 1000),
         "numbers_ambiguous": (4500, 500, 2000, 1000)}


@pytest.mark.parametrize("name", data.EMBEDDED)
def test_embedded_sets(name):
    train, val, test = (load(name, split) for split in ("train", "val", "test"))
    *sizes, classes = SIZES[name]
    if name == "dirty_glyphs":  # its split counts images, of which some have five rows
        assert abs(len(val) - sizes[1]) < 100 and len(train) + len(val) == 16000
        sizes[:2] = len(train), len(val)
    assert [len(train), len(val), len(test)] == sizes and test.num_classes == classes
    assert test.shape == (1, 28, 28) and test.images.dtype == torch.uint8
    if name != "numbers_ambiguous":  # sampled labels, few of each class
        assert test.labels.unique().tolist() == list(range(classes))
    pool = torch.cat([train.images, val.images]) / 255
    assert pool.mean() == pytest.approx(test.mean[0], abs=1e-4) and test.mean == train.mean
    assert pool.std() == pytest.approx(test.std[0], abs=1e-4) and pool.max() == 1
    assert len(torch.cat([pool.flatten(1), test.images.flatten(1) / 255]).sum(1).unique()) > 1000
    assert not torch.equal(load(name, "train", seed=2).labels, train.labels)


@pytest.mark.parametrize("name", ["glyphs", "glyphs_ambiguous", "numbers_ambiguous"])
def test_embedded_sets_are_the_same_every_time(name):
    first = load(name, "test", seed=1)
    data._embedded.cache_clear()
    torch.manual_seed(123)
    again = load(name, "test", seed=7)
    assert torch.equal(first.images, again.images) and torch.equal(first.labels, again.labels)
    rows = {image.numpy().tobytes() for image in load(name, "train").images}
    assert not rows & {image.numpy().tobytes() for image in again.images}


def test_blended_numbers_follow_their_distribution():
    test = load("numbers_ambiguous", "test")
    probs, hits = test.label_probs, test.label_probs.gather(1, test.labels[:, None])
    assert torch.allclose(probs.sum(1), torch.ones(2000)) and ((probs > 0).sum(1) == 2).all()
    top = probs.amax(1)
    assert (hits > 0).all() and 0.5 <= top.min() and top.max() <= 0.65 + 1e-6
    likely = (hits[:, 0] == top).double().mean().item()  # as often as its probability
    assert likely == pytest.approx(top.mean().item(), abs=4 * math.sqrt(0.25 / 2000))


def test_ambiguous_labels_follow_their_distribution():
    train, val = load("glyphs_ambiguous", "train"), load("glyphs_ambiguous", "val")
    assert not set(train.groups.tolist()) & set(val.groups.tolist())
    order = train.groups.argsort(stable=True)
    images, groups = train.images[order].view(-1, 2, 784), train.groups[order].view(-1, 2)
    assert (images == images[:, :1]).all() and (groups == groups[:, :1]).all()
    probs = torch.cat([train.label_probs, val.label_probs])
    assert torch.allclose(probs.sum(1), torch.ones(10000)) and ((probs > 0).sum(1) == 2).all()
    top = probs.amax(1)
    assert 0.5 <= top.min() and top.max() <= 0.65 + 1e-6
    hits = probs.gather(1, torch.cat([train.labels, val.labels])[:, None])
    assert (hits > 0).all()
    likely = (hits[:, 0] == top).double().mean()  # the likelier label, as often as its probability
    assert likely == pytest.approx(top.mean().item(), abs=0.015)  # three standard errors


def test_dirty_glyphs_holds_both_halves():
    test = load("dirty_glyphs", "test")
    certain = test.label_probs.amax(1) == 1
    assert certain.tolist() == [True] * 2000 + [False] * 2000
    assert torch.equal(test.label_probs[:2000].argmax(1), test.labels[:2000])
    assert torch.equal(test.images[2000:], load("glyphs_ambiguous", "test").images)
    train = load("dirty_glyphs", "train", val_fraction=0)
    assert len(train) == 16000 and len(train.groups.unique()) == 8000 + 4000


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
