"""data.py: splits, loaders, embedded and published images, corruptions, texts, molecules."""

import hashlib
import itertools
import os
from argparse import Namespace
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import save_images
from PIL import Image
from scipy.spatial.distance import cdist
from torchvision import transforms as T

import common
import data
from common import UserError
from data import ImageSet, Loader, SequenceLoader, load, load_molecules, load_text

TEXTS = load_text("reviews", "test").select(slice(53))
MOLECULES = load_molecules("clusters", "test").select(slice(53))


def set_rank(monkeypatch, rank, size):
    """Make this process number `rank` of `size`."""
    monkeypatch.setattr(common, "rank", lambda: rank)
    monkeypatch.setattr(common, "world_size", lambda: size)


def read_splits(dataset, data_dir="data", seed=1, num_val=None, **changes):
    """Read the Splits of a run with these options."""
    args = {"dataset": dataset, "data_dir": data_dir, "image_size": None, "limit_train": None,
            "model": "resnet18", "weights": "DEFAULT", "epochs": 1, "ood": [], "predict": None,
            "vocab": None} | changes
    if dataset in data.TEXTS + data.MOLECULES:
        return data.load_sequences(Namespace(**args))
    return data.load_splits(Namespace(**args), seed, num_val)


def random_set(n=50, shape=(3, 8, 8), **fields):
    """Make an ImageSet of random bytes with seven classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)
    statistics = {"mean": (0.4, 0.5, 0.6)[:shape[0]], "std": (0.2, 0.25, 0.3)[:shape[0]]}
    return ImageSet("random", images, torch.arange(n) % 7, 7, **statistics | fields)


def expect_error(match, call, *args, **options):
    """Expect a UserError whose message is one line that matches `match`."""
    with pytest.raises(UserError, match=rf"\A.*{match}.*\Z"):
        call(*args, **options)


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


def gather(batches, field):
    return torch.cat([getattr(batch, field) for batch in batches])


def split_rows(values, sizes):
    return [row.tolist() for row in values.split(sizes.tolist())]


def save_grey(path, level=20):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (level, level, level)).save(path)


def test_other_sets_are_resized_and_grey_like_the_training_set():
    colour = random_set(5, (3, 32, 32))
    half = data.convert_like(colour, random_set(1, (1, 16, 16), mean=(0.2,)))
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).view(3, 1, 1)
    luma = (colour.images * weights).sum(1, keepdim=True)
    expected = F.interpolate(luma, (16, 16), mode="bilinear", antialias=True)
    assert half.images.dtype == torch.uint8
    assert half.mean == (0.2,)
    assert (half.images - expected).abs().max() < 1.5  # Pillow rounds after each direction


def test_a_fingerprint_notices_all_that_training_sees():
    images = random_set(6, groups=torch.arange(6), classes=tuple("abcdefg"), files=tuple("uvwxyz"))
    pixels = images.images.clone()
    pixels[5, 2, 7, 7] ^= 1
    sets = [images, TEXTS, MOLECULES,
            replace(images, images=pixels),
            replace(images, labels=images.labels.flip(0)),
            replace(images, files=tuple("uvwxyy")),
            replace(images, files=tuple("uvwxy\udce9")),  # a name that is not UTF-8
            replace(images, groups=torch.zeros(6).long()),
            replace(images, classes=tuple("abcdefh")),
            replace(TEXTS, vocab=("x", *TEXTS.vocab[1:])),
            replace(MOLECULES, positions=MOLECULES.positions + 1e-9)]
    prints = {data.fingerprint(dataset) for dataset in sets}
    assert len(prints) == len(sets)
    assert data.fingerprint(*sets) != data.fingerprint(*sets[::-1])
    assert data.fingerprint(replace(images, name="other"), None) == data.fingerprint(images)


def test_a_fingerprint_of_files_is_that_of_contents_or_of_sizes_and_times(tmp_path):
    prints_of_few = []
    prints_of_many = []
    for level, time in ((20, 1), (20, 2), (21, 2)):
        save_grey(tmp_path / "x.bmp", level)
        os.utime(tmp_path / "x.bmp", (time, time))
        few = load(f"folder:{tmp_path}", "all", image_size=96)
        many = replace(few, files=few.files * 10001, labels=few.labels.repeat(10001))
        prints_of_few.append(data.fingerprint(few))
        prints_of_many.append(data.fingerprint(many))
    assert prints_of_few[0] == prints_of_few[1] != prints_of_few[2]
    assert prints_of_many[0] != prints_of_many[1] == prints_of_many[2]


@pytest.mark.parametrize("num_val", [None, 1, 37])
def test_a_split_draws_whole_groups_until_there_are_enough_rows(num_val):
    groups = torch.cat([torch.arange(100), torch.arange(40), torch.arange(10)])
    dataset = random_set(150, groups=groups, files=tuple(map(str, range(150))))
    train, val = data.random_split(dataset, 2, num_val)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    rows = torch.cat([(groups == group).nonzero()[:, 0] for group in order]).tolist()
    count = num_val or 15
    while groups[rows[count]] == groups[rows[count - 1]]:
        count += 1
    assert val.files == tuple(map(str, rows[:count]))
    assert torch.equal(val.images, dataset.images[rows[:count]])
    assert train.files == tuple(map(str, rows[count:]))


@pytest.mark.parametrize("changes, num_val, source", [
    ({}, 30, "train"), ({"weights": "net.pt"}, 30, "test"),
    ({"model": "torchvision/x"}, None, "train"),
    ({"model": "torchvision/x", "weights": "none"}, None, "train")])
def test_validation_images_are_test_images_where_weights_come_from_elsewhere(
        changes, num_val, source, capsys):
    train, val, test, *_ = read_splits("dirty_glyphs", "", 3, num_val, **changes)
    assert ("held out for validation" in capsys.readouterr().out) == (source == "test")
    rest, expected = data.random_split(load("dirty_glyphs", source), 3,
                                       num_val if source == "train" else None)
    assert torch.equal(val.groups, expected.groups)
    assert len(train) == (len(rest) if source == "train" else 16000)
    assert len(test) == (len(rest) if source == "test" else 4000)


def test_validation_images_are_test_images_where_imagenet_itself_was_seen(tmp_path):
    for seed, split in enumerate(("train", "val")):
        save_images(tmp_path / "imagenet" / split, ("n01", "n02"), 10, 16, seed)
    for model, split in (("torchvision/x", "test"), ("resnet50", "train")):
        val = read_splits("imagenet", tmp_path, model=model, image_size=16).val
        whole = load("imagenet", split, tmp_path, 16)
        assert torch.equal(val.images, data.random_split(whole, 1)[1].images)


def test_a_folder_with_val_is_validated_on_it(image_folder, tmp_path):
    for split in ("train", "test"):
        os.symlink(image_folder / split, tmp_path / split)
    name = f"folder:{tmp_path}"
    assert read_splits(name, num_val=0).val is None
    assert [len(dataset) for dataset in read_splits(name)[:3]] == [33, 3, 15]
    save_images(tmp_path / "val", ("ant", "bee", "cat"), 2, 20)
    assert [len(dataset) for dataset in read_splits(name, weights="net.pt")[:3]] == [36, 6, 15]
    save_images(tmp_path / "val", ("dog",), 1, 20)
    expect_error("only one of training and validation set has the classes 'dog'", read_splits, name)


def test_classes_that_differ_are_named_so_that_one_sees_the_difference(tmp_path):
    save_images(tmp_path / "train", ("caf\u00e9", "tea"), 2, 8)
    save_images(tmp_path / "test", ("cafe\u0301", "tea"), 2, 8)
    expect_error(r"training and test set has the classes 'cafe\\u0301', 'caf\\xe9'", read_splits,
                 f"folder:{tmp_path}")


def test_other_sets_are_skipped_or_refused_by_their_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", None)
    save_grey(tmp_path / "a" / "val" / "deep" / "x.PNG")
    save_grey(tmp_path / "b" / "val" / "y.jpg")
    folders = [f"folder:{tmp_path}/{name}/val" for name in "ab"]
    splits = read_splits("glyphs", tmp_path, predict=folders[0],
                         ood=["glyphs_letters", "svhn", folders[1]])
    assert [dataset.name for dataset in splits.ood] == ["glyphs_letters", "val"]
    for dataset in (*splits.ood, splits.predict):
        assert (dataset.shape, dataset.mean) == ((1, 28, 28), splits.train.mean)
    assert (splits.ood[1].files, splits.predict.files) == (("val/y.jpg",), ("val/deep/x.PNG",))
    assert capsys.readouterr().out.startswith("skipped: svhn: ")
    for names, match in ((["glyphz"], "'glyphz' is unknown; choose from glyphs, .*folder:PATH"),
                         (folders, "--ood: two sets have the same name: val, val"),
                         ([f"folder:{tmp_path}/c"], f"expected images in {tmp_path}/c")):
        expect_error(match, read_splits, "glyphs", tmp_path, ood=names)


def test_labels_to_predict_go_by_the_names_of_classes(image_folder, tmp_path):
    for folder in ("bee", "deep/ant", "cow", "."):
        save_grey(tmp_path / "more" / folder / "x.png")
    for dataset, predict, expected in (
            ("glyphs", "dirty_glyphs", load("dirty_glyphs", "test").labels.tolist()),
            ("glyphs", "glyphs_letters", [-1] * 2000),
            (f"folder:{image_folder}", f"folder:{tmp_path}/more", [-1, 1, -1, 0]),
            ("reviews", "reviews_finance", [-1] * 1000)):
        splits = read_splits(dataset, predict=predict)
        assert splits.predict.labels.tolist() == expected
        assert splits.predict.classes == splits.train.classes  # with which they are printed


@pytest.mark.parametrize("augment, mode, shape", [
    ("crop_flip", "constant", (3, 8, 8)), ("reflect_crop_flip", "reflect", (1, 7, 11))])
def test_augmented_batches_are_crops_and_flips_of_one_image_at_a_time(augment, mode, shape):
    dataset = random_set(130, shape)
    _, height, width = shape
    batches = list(Loader(dataset, 32, seed=5, shuffle=True, augment=augment).epoch(2))
    order = gather(batches, "index")
    assert torch.equal(gather(batches, "labels"), dataset.labels[order])
    mean, std = torch.tensor([dataset.mean, dataset.std]).view(2, -1, 1, 1)
    seen = []
    for row, image in zip(order, gather(batches, "images")):
        padded = F.pad(dataset.images[row][None].float(), [4] * 4, mode=mode)[0] / 255
        padded = (padded - mean) / std
        for top, left, flip in itertools.product(range(9), range(9), (0, 1)):
            crop = padded[:, top:top + height, left:left + width]
            if torch.allclose([crop, crop.flip(2)][flip], image, atol=1e-5):
                seen.append((top, left, flip))
                break
    tops, lefts, flips = zip(*seen)
    assert len(seen) == 130
    assert set(tops) == set(lefts) == set(range(9))
    assert 45 < sum(flips) < 85


@pytest.mark.parametrize("side, size", [(32, 36), (80, 5)])
def test_images_in_files_are_evaluated_in_batches_of_the_training(side, size, image_folder):
    dataset = load(f"folder:{image_folder}", "train", image_size=side)  # 36 images
    args = Namespace(batch_size=5, device="cpu", workers=0)
    batches = list(data.evaluation_batches(dataset, args))
    assert len(batches[0].images) == size
    assert gather(batches, "index").tolist() == list(range(36))


@pytest.mark.parametrize("n, changes, sizes", [
    (30, {}, [8, 8, 8, 6]), (30, {"drop_last": True}, [8, 8, 8]), (30, {"limit_steps": 2}, [8, 8]),
    (33, {}, [8, 8, 8, 9]), (9, {"augment": "crop_flip"}, [9]), (1, {}, [1]),
    (33, {"shuffle": False}, [8, 8, 8, 8, 1]), (33, {"drop_last": True}, [8] * 4)])
def test_a_last_training_batch_of_one_image_joins_the_batch_before(n, changes, sizes):
    loader = Loader(random_set(n), 8, seed=2, **{"shuffle": True} | changes)
    batches = list(loader.epoch(1))
    assert [len(batch.images) for batch in batches] == sizes
    assert len(loader) == len(sizes)
    whole = gather(Loader(random_set(n), 8, seed=2, shuffle=loader.shuffle).epoch(1), "index")
    assert torch.equal(gather(batches, "index"), whole[:sum(sizes)])  # shorter epochs begin alike


def test_orders_depend_on_seed_and_epoch_alone():
    state = torch.get_rng_state()
    orders = set()
    for seed, epoch in itertools.product(range(4), range(4)):
        for make in (partial(Loader, random_set(53), 8),
                     partial(Loader, random_set(53), augment="crop_flip"),
                     partial(SequenceLoader, TEXTS, 20), partial(SequenceLoader, MOLECULES)):
            order = gather(make(seed=seed, shuffle=True).epoch(epoch), "index").tolist()
            assert sorted(order) == list(range(53))
            orders.add((seed, epoch, *order))
    assert len(orders) == 16
    assert len({order[2:] for order in orders}) == 16
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


@pytest.mark.parametrize("make, dataset, world", [
    (Loader, random_set(50), 2), (partial(Loader, augment="crop_flip"), random_set(50), 3),
    (SequenceLoader, TEXTS, 12), (SequenceLoader, MOLECULES, 12)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_several_processes_share_the_batches_of_one(make, dataset, world, shuffle, monkeypatch):
    make = partial(make, dataset, 12, seed=5, shuffle=shuffle)
    whole = list(make().epoch(4))
    batches_of_ranks = []
    for rank in range(world):
        set_rank(monkeypatch, rank, world)
        batches_of_ranks.append(list(make().epoch(4)))
    # In training, a smaller last batch is dropped, so that all processes have equally many rows.
    assert len(make()) == (len(dataset) // 12 if shuffle else len(whole))
    assert len(batches_of_ranks[0]) == len(make())
    for batch, *pieces in zip(whole, *batches_of_ranks):
        assert torch.equal(gather(pieces, "index"), batch.index)
        sizes = [len(rows) for rows in np.array_split(batch.index, world)]
        assert [len(piece.index) for piece in pieces] == sizes
        inputs = [getattr(piece[0], "positions", piece[0]) for piece in pieces]
        assert torch.equal(torch.cat(inputs), getattr(batch[0], "positions", batch[0]))
    set_rank(monkeypatch, 0, 5)
    if shuffle:
        expect_error("5 processes cannot share batches of 12 equally; .* --batch-size", make)


def test_files_are_augmented_by_seed_epoch_and_process(image_folder, monkeypatch):
    dataset = load(f"folder:{image_folder}", "train", image_size=66).select([0] * 12)

    def read(epoch=0, seed=4, rank=0, augment="crop_flip"):
        set_rank(monkeypatch, rank, 2)
        loader = Loader(dataset, 6, seed=seed, shuffle=True, workers=1, augment=augment)
        return gather(loader.epoch(epoch), "images")

    first = read()
    assert first.shape == (6, 3, 66, 66)
    assert torch.equal(read(), first)
    others = [first, read(epoch=1), read(seed=3), read(rank=1)]
    assert len(set(map(digest, others))) == 4
    mean, std = torch.tensor([dataset.mean, dataset.std]).view(2, -1, 1, 1)
    for image, augmented in zip(read(augment="none"), first):
        assert torch.allclose(dataset[0] / 255, image * std + mean, atol=1e-6)
        assert not torch.allclose(image, augmented)
    set_rank(monkeypatch, 1, 2)  # in an evaluation, it gets an empty piece of a small last batch
    sizes = [len(batch.images) for batch in Loader(dataset.select(slice(5)), 4).epoch()]
    assert sizes == [2, 0]


@pytest.mark.parametrize("size, cutoff, shuffle", [(1, 5, False), (7, 2, True), (53, 0.01, False)])
def test_sentences_are_padded_and_molecules_become_graphs(size, cutoff, shuffle):
    sentences = split_rows(TEXTS.tokens, TEXTS.lengths)
    batches = list(SequenceLoader(TEXTS, size, shuffle=shuffle).epoch(2))
    for batch in batches:
        longest = TEXTS.lengths[batch.index].max()
        rows = [sentences[row] for row in batch.index]
        assert batch.tokens.tolist() == [row + [0] * (longest - len(row)) for row in rows]
        assert torch.equal(batch.labels, TEXTS.labels[batch.index])
    if not shuffle:  # by rising length
        assert torch.equal(gather(batches, "index"), TEXTS.lengths.argsort(stable=True))
    for batch in SequenceLoader(MOLECULES, size, shuffle=shuffle, cutoff=cutoff).epoch(1):
        graph = batch.molecules
        chosen = MOLECULES.select(batch.index)
        molecule = torch.arange(len(chosen)).repeat_interleave(chosen.sizes)
        distance = torch.tensor(cdist(chosen.positions, chosen.positions))
        near = (distance < cutoff) & (molecule[:, None] == molecule)
        targets, sources = near.fill_diagonal_(False).nonzero(as_tuple=True)
        expected = (chosen.numbers, chosen.positions.float(), molecule, sources, targets)
        assert all(map(torch.equal, graph[:5], expected))
        assert graph.count == len(chosen)
        assert torch.equal(batch.labels, chosen.labels)


# Images of training (0: slow) and of test, classes, digest of the test labels, mean grey.
EMBEDDED = {"glyphs": (10000, 2000, 10, "5cdcce1ed6aa", 53.175),
            "glyphs_ambiguous": (10000, 2000, 10, "a960ed3cebbd", 48.752),
            "dirty_glyphs": (16000, 4000, 10, "a184342675ae", 50.963),
            "glyphs_letters": (10000, 2000, 16, "14168ca16fcc", 54.629),
            "numbers": (0, 5000, 1000, "9420777a4c92", 45.434),
            "numbers_letters": (0, 5000, 1000, "cc4bdf80d7d5", 47.562),
            "numbers_ambiguous": (5000, 2000, 1000, "632da11a236c", 58.053)}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets_are_always_the_same_and_training_and_test_images_differ(name):
    train_rows, test_rows, num_classes, labels, grey = EMBEDDED[name]
    test = load(name, "test")
    train = load(name, "train") if train_rows else test.select([])
    assert (len(train), len(test), len(set(test.classes))) == (train_rows, test_rows, num_classes)
    assert digest(test.labels) == labels
    assert test.shape == (1, 28, 28)
    assert test.images.double().mean() == pytest.approx(grey, abs=0.02)  # processors round
    assert not set(map(digest, train.images)) & set(map(digest, test.images))
    std, mean = torch.std_mean((train if train_rows else test).images / 255)
    assert [mean, std] == pytest.approx([*test.mean, *test.std], abs=1e-4 if train_rows else 1e-3)


def test_blends_of_two_digits_occur_twice_and_a_limit_keeps_them_together():
    blends = load("glyphs_ambiguous", "train")
    assert torch.equal(blends.groups, torch.arange(5000).repeat_interleave(2))
    assert torch.equal(blends.images[::2], blends.images[1::2])
    differ = blends.labels[::2] != blends.labels[1::2]  # the mean of 2 w (1 - w), .35 < w < .65
    assert differ.double().mean() == pytest.approx(0.485, abs=0.03)
    whole = load("dirty_glyphs", "train")
    few = data.random_subset(whole, 1000)
    assert len(few) == 1000
    assert torch.equal(data.random_subset(whole, 1000).images, few.images)
    copies = few.groups[few.is_ambiguous].unique(return_counts=True)[1]
    assert 450 < copies.sum() < 550
    assert (copies == 1).sum() <= 1
    assert few.groups.diff().min() >= 0  # in the order of the set


@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn"])
def test_torchvisions_sets(name, tmp_path, monkeypatch):
    channels = 1 if name == "mnist" else 3
    pixels = np.random.default_rng(0).integers(0, 256, (6, channels, 4, 5), dtype=np.uint8)
    raw = {"mnist": pixels[:, 0], "cifar10": pixels.transpose(0, 2, 3, 1), "svhn": pixels}

    def read(root, download, **split):
        assert download
        assert split == ({"split": "test"} if name == "svhn" else {"train": False})
        return Namespace(data=raw[name], labels=np.arange(6), targets=list(range(6)),
                         classes="abcdefghij")

    monkeypatch.setitem(data.TORCHVISION_CLASSES, name, read)
    test = load(name, "test", tmp_path)
    assert np.array_equal(test.images, pixels)
    assert test.labels.tolist() == list(range(6))
    assert (test.mean, test.std, test.num_classes) == (*data.STATISTICS[name], 10)
    assert "".join(test.classes) == ("abcdefghij" if name == "cifar10" else "0123456789")


def test_dirty_mnist_joins_bytes_and_numbers_of_which_ten_copies_have_labels(tmp_path, monkeypatch):
    clean = random_set(6, (1, 4, 5))
    monkeypatch.setattr(data, "load_torchvision", lambda *_: clean)
    levels = torch.arange(12000).div(12000).half()
    labels = torch.arange(120000).view(12000, 10) % 9
    (tmp_path / "AmbiguousMNIST").mkdir()
    torch.save(labels, tmp_path / "AmbiguousMNIST" / "amnist_labels.pt")
    images = levels.view(-1, 1, 1, 1).expand(-1, 1, 4, 5)
    torch.save(images, tmp_path / "AmbiguousMNIST" / "amnist_samples.pt")
    both = load("dirty_mnist", "test", tmp_path)
    assert torch.equal(both.images[:6], clean.images / 255)
    assert torch.equal(both.images[6:, 0, 2, 1], levels[6000:].float().repeat_interleave(10))
    assert torch.equal(both.labels[6:], labels[6000:].flatten())
    assert both.is_ambiguous.tolist() == [False] * 6 + [True] * 60000
    images = next(Loader(both).epoch()).images
    expected = T.functional.normalize(both.images[:256], both.mean, both.std)
    torch.testing.assert_close(images, expected)
    assert both.groups.bincount().tolist() == [1] * 6 + [10] * 6000


def test_tiny_imagenet(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for k, wnid in enumerate(("n02", "n01")):
        save_grey(root / "train" / wnid / "images" / "a.JPEG", 100 * k)
        save_grey(root / "val" / "images" / f"{k}.JPEG", 50 * k)
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text("0.JPEG\tn02\t0\t0\n1.JPEG\tn01\t0\t0\n")
    for split, levels, labels in (("test", [0, 50], [1, 0]), ("train", [100, 0], [0, 1])):
        dataset = load("tiny_imagenet", split, tmp_path)
        assert (dataset.classes, dataset.shape) == (("n01", "n02"), (3, 64, 64))
        assert dataset.images[:, 0, 9, 9].tolist() == levels
        assert dataset.labels.tolist() == labels


@pytest.mark.parametrize("match, read, name, split", [
    ("'mnits' is unknown; choose from glyphs,", load, "mnits", "train"),
    ("glyphs has no split 'val'", load, "glyphs", "val"),
    ("'sst3' is unknown; .* sst2", load_text, "sst3", "test"),
    ("images in /none/train/CLASS", load, "folder:/none", "train"),
    ("mnist: {}/MNIST/raw not found; .* from http", load, "mnist", "test"),
    ("sst2: {}/SST-2/test.tsv not found; .* from http", load_text, "sst2", "test"),
    ("qm9: {}/QM9/uncharacterized.txt not found; .* http", load_molecules, "qm9", "test")])
def test_unknown_and_missing_sets_are_one_line(match, read, name, split, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", None)
    expect_error(match.format(tmp_path), read, name, split, tmp_path)


def test_images_are_what_a_viewer_shows(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:, 2:, 3] = 255  # black, transparent on the left
    image = Image.fromarray(pixels)
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "turned.png", exif=exif)
    plain, turned = load(f"folder:{tmp_path}", "all", image_size=4).images
    assert plain[0].tolist() == [[255, 255, 0, 0]] * 4
    assert turned[0].tolist() == [[255] * 4] * 2 + [[0] * 4] * 2  # the left is at the top
    for kind in (np.uint16, np.float32):  # would turn white, or black
        Image.fromarray(np.zeros((9, 9), kind)).save(tmp_path / "16.tif")
        expect_error("16.tif: unreadable .*expected 8 bits", data.read_image, tmp_path / "16.tif")


def test_programs_files_are_no_images_and_other_types_are_counted(tmp_path, capsys):
    for name in ("ant/0.png", "bee/1.PNG", "bee/._1.png", ".thumbnails/0.png",
                 "ant/.ipynb_checkpoints/0.png", "@eaDir/0.png", "__MACOSX/ant/0.png"):
        save_grey(tmp_path / "train" / name)
    for name in ("2.gif", "3.jfif", "4.avif", "5", "6.gif"):
        (tmp_path / "train" / "bee" / name).write_bytes(b"")
    train = load(f"folder:{tmp_path}", "train")
    assert train.classes == ("ant", "bee")
    assert train.files == ("ant/0.png", "bee/1.PNG")
    line = "files of types that are not read (.avif, .gif, .jfif, none): 5"
    assert capsys.readouterr().out == f"{tmp_path}/train/bee: {line}\n"
    assert len(load(f"folder:{tmp_path}", "all")) == 2
    assert capsys.readouterr().out == f"{tmp_path}: {line}\n"
    (tmp_path / "train" / "cat" / ".hidden").mkdir(parents=True)
    expect_error(f"expected images in {tmp_path}/train/cat", load, f"folder:{tmp_path}", "train")


def test_links_are_followed_but_count_no_image_twice(tmp_path):
    save_grey(tmp_path / "train" / "ant" / "0.png")
    save_grey(tmp_path / "train" / "bee" / "0.png")
    save_grey(tmp_path / "elsewhere" / "1.png")
    os.symlink(tmp_path / "train", tmp_path / "train" / "ant" / "up")
    os.symlink(tmp_path / "elsewhere", tmp_path / "train" / "bee" / "more")
    os.symlink(tmp_path / "train" / "bee", tmp_path / "elsewhere" / "back")
    train = load(f"folder:{tmp_path}", "train")
    assert train.files == ("ant/0.png", "bee/0.png", "bee/more/1.png")
    assert len(load(f"folder:{tmp_path}/train", "all")) == 3


@pytest.mark.parametrize("size", [32, 66])  # in memory, or read by a worker
def test_damaged_images_are_skipped_in_a_prediction_and_end_a_training(size, tmp_path, capsys):
    save_images(tmp_path / "train", ("a", "b"), 3, 70)
    path = tmp_path / "train" / "b" / "1.png"
    for workers, content in ((0, b""), (0, path.read_bytes()[:2000]), (1, b"no image")):
        path.write_bytes(content)
        readable = load(f"folder:{tmp_path}/train", "all", image_size=size)
        assert readable.unreadable == ("train/b/1.png",)
        assert len(readable) == len(readable.files) == 5
        assert "train/b/1.png" not in readable.files
        assert f"skipped: {path}" in capsys.readouterr().out
        with pytest.raises(UserError, match=f"^{path}: unreadable .*; replace or remove the file$"):
            train = load(f"folder:{tmp_path}", "train", image_size=size)
            list(Loader(train, 6, workers=workers).epoch())
    for name in ("0.png", "2.png"):
        path.with_name(name).write_bytes(b"")
    expect_error(f"{path.parent}: none of its", load, f"folder:{path.parent}", "all", "", size)


@pytest.mark.parametrize("model, side, shape", [
    ("resnet18", None, (1, 28, 28)), ("torchvision/x", None, (3, 224, 224)),
    ("resnet18", 32, (3, 32, 32)), ("torchvision/x", 96, (3, 96, 96))])
def test_a_picture_has_the_same_pixels_in_memory_and_in_a_file(model, side, shape, tmp_path,
                                                               image_folder):
    """The training set is in memory, or, if there is a side, in files."""
    for number, image in enumerate(load("glyphs_letters", "test").images[:20]):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number:02}.png")
    train = "glyphs" if side is None else f"folder:{image_folder}"
    splits = read_splits(train, model=model, image_size=side,
                         ood=["glyphs_letters", f"folder:{tmp_path}"])
    in_memory, files = splits.ood
    [expected] = Loader(in_memory.select(slice(20))).epoch()
    [batch] = Loader(files).epoch()
    assert batch.images.shape == (20, *shape)
    assert torch.equal(batch.images, expected.images)


def test_networks_of_torchvision_get_imagenets_statistics_and_three_channels(image_folder):
    splits = read_splits(f"folder:{image_folder}", model="torchvision/x", image_size=96,
                         ood=["glyphs_letters"], predict=f"folder:{image_folder}/unknown")
    steps = T.Compose([T.Resize(110), T.CenterCrop(96), T.ToTensor(), T.Normalize(*data.IMAGENET)])
    for dataset in (splits.train, splits.val, splits.test, splits.predict):
        expected = [steps(Image.open(dataset.root / file)) for file in dataset.files]
        images = gather(Loader(dataset, 20).epoch(), "images")
        torch.testing.assert_close(images, torch.stack(expected), atol=1e-5, rtol=1e-5)
    [batch] = Loader(splits.ood[0].select(slice(5))).epoch()
    letters = load("glyphs_letters", "test").images[:5, 0].numpy()
    expected = [steps(Image.fromarray(image).convert("RGB")) for image in letters]
    torch.testing.assert_close(batch.images, torch.stack(expected), atol=1e-5, rtol=1e-5)
    glyphs = read_splits("glyphs", model="torchvision/x").train
    assert (glyphs.mean, glyphs.std) == data.IMAGENET


# The mean change of 200 glyphs, in grey levels of 255, at severities 1 to 5.
CHANGES = {
    "gaussian_noise": (7.3, 13.7, 20.8, 28.4, 36.7), "shot_noise": (5.8, 9.4, 13.5, 18.7, 25.6),
    "impulse_noise": (1.2, 3.8, 7.7, 14.0, 22.8), "gaussian_blur": (3.2, 9.7, 14.6, 18.9, 23.3),
    "motion_blur": (11.1, 15.5, 19.3, 23.5, 27.5), "brightness": (14.8, 30.3, 46.3, 65.4, 85.4),
    "contrast": (12.9, 23.3, 31.1, 37.8, 43.5), "pixelate": (13.0, 15.0, 18.3, 21.6, 27.5),
    "jpeg": (8.1, 10.2, 12.2, 13.8, 16.6), "occlusion": (3.0, 7.5, 11.6, 19.4, 25.9),
    "rotation": (16.9, 23.8, 30.3, 36.0, 40.6), "elastic": (13.1, 19.8, 25.1, 30.7, 36.2)}


@pytest.mark.filterwarnings("ignore:The image decoding")
def test_computed_corruptions_are_as_strong_as_published():
    glyphs = load("glyphs", "test").select(slice(200))
    in_unit = replace(glyphs, images=glyphs.images / 255)
    twins = glyphs.select([0] * 8)
    copies = data.corrupted_sets(glyphs, Namespace(shift="computed", shift_examples=0))
    for kind, changes in CHANGES.items():
        for severity, expected in enumerate(changes, 1):
            severity_of_copy, copy = next(copies)
            assert severity_of_copy == severity
            assert copy.name == "glyphs_computed"
            change = copy.images.double() - glyphs.images.double()
            assert change.abs().mean().item() == pytest.approx(expected, abs=0.06), kind
            exact = data.corrupted(in_unit, kind, severity).images * 255
            assert (exact - copy.images).abs().max() <= 0.51
            drawn = data.corrupted(twins, kind, severity).images
            is_random = kind not in ("gaussian_blur", "brightness", "contrast", "pixelate", "jpeg")
            assert (len(set(map(digest, drawn))) > 1) == is_random  # drawn for each image
            assert torch.equal(data.corrupted(twins, kind, severity).images, drawn)


def test_published_corruptions_of_cifar10_and_damaged_ones_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *args: random_set())
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    (root / "snow.npy.crdownload").write_bytes(b"")
    options = {"shift": "published", "shift_examples": 0, "num_val": 0}
    args = Namespace(dataset="cifar10", data_dir=tmp_path, **options)
    assert list(data.corrupted_sets(random_set(3), args)) == []  # is skipped
    rows = np.arange(50000)
    pixels = (rows % 251).astype(np.uint8).reshape(-1, 1, 1, 1)
    read = partial(read_splits, data_dir=tmp_path, **options)
    np.save(root / "fog.npy", pixels)
    expect_error(f"{root}/labels.npy is damaged or missing .* download it again", read, "cifar10")
    np.save(root / "labels.npy", rows // 10000 + rows % 2)
    read("cifar10")
    copies = list(data.corrupted_sets(random_set(3), args))
    assert [severity for severity, _ in copies] == [1, 2, 3, 4, 5]
    for k, (_, copy) in enumerate(copies):
        assert copy.name == "cifar10_c (1 of 19 kinds)"
        assert np.array_equal(copy.images.flatten(), rows[10000 * k:10000 * (k + 1)] % 251)
        assert copy.labels.tolist() == [k, k + 1] * 5000
    np.save(root / "snow.npy", pixels[:10000])
    expect_error("snow.npy is damaged or missing .10000 rows, expected 50000.", read, "cifar10")
    for content in ((root / "fog.npy").read_bytes()[:30000], b""):
        (root / "snow.npy").write_bytes(content)
        expect_error("snow.npy is damaged or missing", read, "cifar10")
    expect_error("there is no mnist_c; use --shift computed", read, "mnist")


@pytest.mark.parametrize("count, name", [
    (19, "19 kinds"), (15, "15 kinds"), (16, "16 of 19 kinds"), (2, "2 of 19 kinds")])
def test_rows_say_how_many_published_kinds_there_are(count, name, tmp_path, monkeypatch, capsys):
    images = random_set(4, (3, 8, 8), classes=tuple("abcdefg"))
    monkeypatch.setattr(data, "load", lambda *args: images)
    monkeypatch.setattr(data, "load_class_folders", lambda *args: images)
    root = tmp_path / "Tiny-ImageNet-C"
    for kind, severity in itertools.product(data.CIFAR_C_KINDS[:count], range(1, 6)):
        (root / kind / f"{severity}").mkdir(parents=True)
    for kind, severity in itertools.product(data.CIFAR_C_KINDS[count:], range(1, 5)):
        (root / kind / f"{severity}").mkdir(parents=True)  # without severity 5, it is missing
    options = {"shift": "published", "shift_examples": 0, "num_val": 0}
    read_splits("tiny_imagenet", tmp_path, **options)
    missing = ", ".join(data.CIFAR_C_KINDS[count:])
    expected = "" if count in (15, 19) else f"{root} has no {missing}\n"
    assert capsys.readouterr().out == expected
    args = Namespace(dataset="tiny_imagenet", data_dir=tmp_path, **options)
    copies = list(data.corrupted_sets(images, args))
    assert {copy.name for _, copy in copies} == {f"tiny_imagenet_c ({name})"}
    assert len(copies) == 5 * count
    _, first = next(data.corrupted_sets(images, args, data.CIFAR_C_KINDS[:15]))
    assert ("c (15 kinds)" in first.name) == (count >= 15)


VOCAB = (*data.SPECIAL, *"abcdeinou", *("##" + c for c in "abcdenosu"), "un", "##able", "want",
         "##want", "##ed", "runn", "##ing", "cafe", "!", "'", "$", "日")


@pytest.mark.parametrize("text, pieces", [
    ("UNwanted running", "un ##want ##ed runn ##ing"),  # the example of BERT's own tests
    ("unwantedX running", "[UNK] runn ##ing"), ("un!able", "un ! [UNK]"),
    ("a\u0000b\ufffdc\u200dd", "a ##b ##c ##d"),  # control characters vanish within a word
    ("can't $b\u00a0Cafe\u0301 日日", "c ##a ##n ' [UNK] $ b cafe 日 日"), (" \u0301 ", ""),
    ("a" * 100, "a" + " ##a" * 99), ("a" * 101, "[UNK]"), ("a " * 300, "a " * 266)])
def test_word_pieces_by_hand(text, pieces):
    tokens, _ = data.tokenise([text, ""], VOCAB)
    expected = ["[CLS]", *pieces.split(), "[SEP]", "[CLS]", "[SEP]"]
    assert [VOCAB[i] for i in tokens] == expected


@pytest.mark.parametrize("test", ["sentence\tlabel\nawful\t0\ngood\t1", "index\tsentence\n0\tx\n"])
def test_sst2_with_and_without_published_test_labels(test, tmp_path):
    texts = {"train": "sentence\tlabel\n" + "".join(f"the \"x {k}\t{k % 2}\n" for k in range(40)),
             "test": test, "dev": "sentence\tlabel\ngood film\t1\nbad film\t0\ngood\t1\n"}
    (tmp_path / "SST-2").mkdir()
    for file, text in texts.items():
        (tmp_path / "SST-2" / f"{file}.tsv").write_text("\ufeff" + text, encoding="utf-8")
    train, val, test_set, *_ = read_splits("sst2", tmp_path)
    train_rows = list(range(40))
    val_labels = [1, 0, 1]
    test_labels = [0, 1]
    if "label" not in test:  # "val" is a tenth of train.tsv, and dev.tsv the test set
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
        train_rows = sorted(order[4:])
        val_labels = [k % 2 for k in order[:4]]
        test_labels = [1, 0, 1]
    assert train.labels.tolist() == [k % 2 for k in train_rows]
    assert val.labels.tolist() == val_labels
    assert test_set.labels.tolist() == test_labels
    characters = sorted('"0123456789ehtx')
    vocab = (*data.SPECIAL, *characters, *("##" + c for c in characters), "the")
    assert train.vocab == val.vocab == test_set.vocab == vocab
    words = "".join(vocab[i].removeprefix("##") for i in train.tokens)
    assert words == "".join(f'[CLS]the"x{k}[SEP]' for k in train_rows)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    assert read_splits("sst2", tmp_path, vocab=tmp_path / "vocab.txt").val.vocab == VOCAB


@pytest.mark.parametrize("name, positive, expected", [
    ("reviews", 0.5, "ce9b19404999"), ("reviews_finance", 0, "afa710403caa")])
def test_embedded_sentences_are_always_the_same_and_have_no_unknown_words(name, positive, expected):
    train, val, test = [load_text(name, split) for split in ("train", "val", "test")]
    assert (len(train), len(val), len(test)) == (6000, 500, 1000)
    assert digest(torch.cat([test.tokens.long(), test.lengths])) == expected
    assert train.labels.double().mean() == pytest.approx(positive, abs=0.02)
    assert train.vocab == TEXTS.vocab
    assert not (train.tokens == 1).any()  # [UNK]


def test_qm9_joins_its_files_by_number_and_has_the_published_split(tmp_path, monkeypatch):
    texts = {"gdb9.sdf": "", "gdb9.sdf.csv": "mol_id,homo,u0,cv\n",
             "uncharacterized.txt": "Molecules\n\n   2  C  -1.0\n\n"}
    for number, symbols in ((7, "NF"), (2, "H"), (5, "OHH"), (4, "C")):
        atoms = "".join(f"{number:10.4f}   -0.5000    1.2500 {symbol}   0\n" for symbol in symbols)
        texts["gdb9.sdf"] += (f"gdb_{number}\n -OEChem\n\n{len(symbols):3d}  0  0     0\n{atoms}"
                              "  1  2  1  0\nM  END\n$$$$\n")
        texts["gdb9.sdf.csv"] += f"gdb_{9 - number},-.3877,{number - 50},6.469\n"
    (tmp_path / "QM9").mkdir()
    for file, text in texts.items():
        (tmp_path / "QM9" / file).write_text(text)
    whole = data.read_qm9(tmp_path)
    assert split_rows(whole.numbers, whole.sizes) == [[6], [8, 1, 1], [7, 9]]  # of 4, 5, 7
    assert whole.positions.tolist() == [[k, -0.5, 1.25] for k in (4, 5, 5, 5, 7, 7)]
    assert whole.labels.tolist() == [-45 * 27.211386246, -46 * 27.211386246, -48 * 27.211386246]
    assert whole.references[9].item() == pytest.approx(-99.718730 * 27.211386246)
    assert read_splits("qm9", tmp_path, predict="clusters").predict.labels.isnan().all()
    many = replace(whole.select([0] * 130831), labels=torch.arange(130831))
    monkeypatch.setattr(data, "read_qm9", lambda _: many)
    labels = [load_molecules("qm9", split).labels for split in ("train", "val", "test")]
    assert [len(rows) for rows in labels] == [110000, 10000, 10831]
    assert np.array_equal(torch.cat(labels), np.random.default_rng(0).permutation(130831))


@pytest.mark.parametrize("name, low, high, expected", [
    ("clusters", 4, 10, "f684d9675a50"), ("clusters_large", 11, 16, "2cddb5832b7d")])
def test_embedded_molecules_have_the_documented_energy(name, low, high, expected):
    train, val, test = [load_molecules(name, split) for split in ("train", "val", "test")]
    assert len(torch.cat([train.labels, val.labels, test.labels]).unique()) == 5500
    assert train.sizes.unique().tolist() == list(range(low, high + 1))
    assert len(train) == 4000
    assert digest(torch.cat([test.numbers, test.sizes])) == expected
    radius = torch.tensor([0, 0.35, 0, 0, 0, 0, 0.76, 0.71, 0.66], dtype=torch.float64)
    for row in range(0, 1000, 50):
        one = test.select([row])
        i, j = torch.triu_indices(len(one.numbers), len(one.numbers), 1)
        contact = radius[one.numbers[i]] + radius[one.numbers[j]]
        q = torch.exp(-1.7 * (F.pdist(one.positions) - contact))
        energy = one.references[one.numbers].sum() + 3.5 * (q * q - 2 * q).sum()
        assert one.labels.item() == pytest.approx(energy.item(), abs=1e-8)
