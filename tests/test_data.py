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
    """What runs next believes to be process number `rank` of `size`."""
    monkeypatch.setattr(common, "rank", lambda: rank)
    monkeypatch.setattr(common, "world_size", lambda: size)


def read_splits(dataset, data_dir="data", seed=1, num_val=None, **changes):
    """The Splits of a run with these options."""
    args = {"dataset": dataset, "data_dir": data_dir, "image_size": None, "limit_train": None,
            "model": "resnet18", "weights": "DEFAULT", "epochs": 1, "ood": [], "predict": None,
            "vocab": None} | changes
    if dataset in data.TEXTS + data.MOLECULES:
        return data.load_sequences(Namespace(**args))
    return data.load_splits(Namespace(**args), seed, num_val)


def toy(n=50, shape=(3, 8, 8), **fields):
    """An ImageSet of random bytes with seven classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)
    given = {"mean": (0.4, 0.5, 0.6)[:shape[0]], "std": (0.2, 0.25, 0.3)[:shape[0]]} | fields
    return ImageSet("toy", images, torch.arange(n) % 7, 7, **given)


def expect_error(match, call, *args):
    """`call` raises a UserError whose message is one line that matches `match`."""
    with pytest.raises(UserError, match=rf"\A.*{match}.*\Z"):
        call(*args)


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
    colour = toy(5, (3, 32, 32))
    half = data.convert_like(colour, toy(1, (1, 16, 16), mean=(0.2,)))
    luma = colour.images.double().mul(torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    expected = F.interpolate(luma[:, None], (16, 16), mode="bilinear", antialias=True)
    assert half.images.dtype == torch.uint8
    assert half.mean == (0.2,)
    assert (half.images - expected).abs().max() < 1.5  # Pillow rounds after each direction


def test_a_fingerprint_notices_all_that_training_sees(tmp_path):
    images = toy(6, groups=torch.arange(6), classes=tuple("abcdefg"), files=tuple("uvwxyz"))
    pixels = images.images.clone()
    pixels[5, 2, 7, 7] ^= 1
    changes = {"images": pixels, "labels": images.labels.flip(0), "files": tuple("uvwxyy"),
               "groups": torch.zeros(6).long(), "classes": tuple("abcdefh")}
    sets = [images, TEXTS, MOLECULES, replace(TEXTS, vocab=("x", *TEXTS.vocab[1:])),
            replace(MOLECULES, positions=MOLECULES.positions + 1e-9)]
    sets += [replace(images, **{name: value}) for name, value in changes.items()]
    prints = {data.fingerprint(dataset) for dataset in sets}
    assert len(prints | {data.fingerprint(*sets), data.fingerprint(*sets[::-1])}) == len(sets) + 2
    assert data.fingerprint(replace(images, name="other"), None) == data.fingerprint(images)
    # Of bitmaps of equal size the contents count; of more than 10,000 files, sizes and times.
    prints = []
    for level, time in ((20, 1), (20, 2), (21, 2)):
        save_grey(tmp_path / "x.bmp", level)
        os.utime(tmp_path / "x.bmp", (time, time))
        few = load(f"folder:{tmp_path}", "all", image_size=96)
        many = replace(few, files=few.files * 10001, labels=few.labels.repeat(10001))
        prints.append([data.fingerprint(few), data.fingerprint(many)])
    assert prints[0][0] == prints[1][0] != prints[2][0]
    assert prints[0][1] != prints[1][1] == prints[2][1]


@pytest.mark.parametrize("num_val", [None, 1, 37])
def test_a_split_draws_whole_groups_until_there_are_enough_rows(num_val):
    groups = torch.cat([torch.arange(100), torch.arange(40), torch.arange(10)])
    dataset = toy(150, groups=groups, files=tuple(map(str, range(150))))
    for seed in range(3):
        train, val = data.random_split(dataset, seed, num_val)
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        rows = torch.cat([(groups == group).nonzero()[:, 0] for group in order]).tolist()
        count = num_val or 15
        while groups[rows[count]] == groups[rows[count - 1]]:
            count += 1
        assert val.files == tuple(map(str, rows[:count]))
        assert torch.equal(val.images, dataset.images[rows[:count]])
        assert train.files == tuple(map(str, rows[count:]))
    # Splits class by class left out classes of fewer than ten images.
    dataset = replace(toy(103), labels=torch.tensor([0] * 60 + [1] * 40 + [2] * 3))
    held_out = [data.random_split(dataset, seed)[1].labels for seed in range(600)]
    assert torch.cat(held_out).bincount().tolist() == pytest.approx(
        [6000 * n / 103 for n in (60, 40, 3)], abs=60)


@pytest.mark.parametrize("changes, num_val, source", [
    ({}, 30, "train"), ({"weights": "net.pt"}, 0, None), ({"epochs": 0}, None, "train"),
    ({"weights": "net.pt"}, None, "test"), ({"weights": "net.pt", "epochs": 0}, 30, "test"),
    ({"model": "torchvision/x"}, None, "train"),
    ({"model": "torchvision/x", "epochs": 0}, None, "train"),
    ({"model": "torchvision/x", "weights": "none", "epochs": 0}, None, "train")])
def test_validation_images_were_never_seen_in_training(changes, num_val, source, capsys):
    """They are test images where trained weights come from elsewhere; copies stay together."""
    train, val, test, *_ = read_splits("dirty_glyphs", "", 3, num_val, limit_train=500, **changes)
    assert ("held out for validation" in capsys.readouterr().out) == (source == "test")
    assert len(test) == 4000 - (len(val) if source == "test" else 0)
    assert len(train) == 500
    if source is None:
        assert val is None
        return
    whole = load("dirty_glyphs", source)
    expected = data.random_split(whole, 3, num_val if source == "train" else None)[1]
    assert torch.equal(val.labels, expected.labels)
    assert torch.equal(val.groups, expected.groups)
    assert 0.3 < val.is_ambiguous.double().mean() < 0.7
    rest = {"train": train, "test": test}[source]
    assert not set(val.groups.tolist()) & set(rest.groups.tolist())


def test_a_folder_with_val_is_validated_on_it(image_folder, tmp_path):
    for split in ("train", "test"):
        os.symlink(image_folder / split, tmp_path / split)
    name = f"folder:{tmp_path}"
    assert [len(part) for part in read_splits(name)[:3]] == [33, 3, 15]
    save_images(tmp_path / "val", ("ant", "bee", "cat"), 2, 20)
    assert [len(part) for part in read_splits(name, weights="net.pt")[:3]] == [36, 6, 15]
    save_images(tmp_path / "val", ("dog",), 1, 20)
    expect_error("only one of training and validation set has the classes 'dog'", read_splits, name)


def test_classes_that_differ_are_named_so_that_one_sees_the_difference(tmp_path):
    save_images(tmp_path / "train", ("caf\u00e9", "tea"), 2, 8)
    save_images(tmp_path / "test", ("cafe\u0301", "tea"), 2, 8)
    expect_error(r"training and test set has the classes 'cafe\\u0301', 'caf\\xe9'", read_splits,
                 f"folder:{tmp_path}")


def test_programs_files_are_no_images_and_other_types_are_counted(tmp_path, capsys):
    for split in ("train", "test"):
        for name in ("ant/0.png", "bee/1.PNG", "bee/._1.png", ".thumbnails/0.png",
                     "ant/.ipynb_checkpoints/0.png", "@eaDir/0.png", "__MACOSX/ant/0.png"):
            save_grey(tmp_path / split / name)
        for name in ("2.gif", "3.jfif", "4.avif", "5", "6.gif"):
            (tmp_path / split / "bee" / name).write_bytes(b"")
    train, _, test, *_ = read_splits(f"folder:{tmp_path}", num_val=0)
    assert train.classes == test.classes == ("ant", "bee")
    assert train.files == ("ant/0.png", "bee/1.PNG")
    types = "files of types that are not read (none, .avif, .gif, .jfif)"
    lines = [f"{tmp_path}/{split}: {types}: 5" for split in ("train", "test")]
    assert capsys.readouterr().out.splitlines() == lines
    assert len(load(f"folder:{tmp_path}", "all")) == 4
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}: {types}: 10"]
    (tmp_path / "train" / "cat" / ".hidden").mkdir(parents=True)
    expect_error(f"expected images in {tmp_path}/train/cat", read_splits, f"folder:{tmp_path}")


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


def test_names_that_are_not_utf8_are_read_and_have_a_fingerprint(tmp_path, capsys):
    save_grey(tmp_path / "0.png")
    (tmp_path / "0.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9.png"))
    (tmp_path / os.fsdecode(b"\xe8.png")).write_bytes(b"no image")
    whole = load(f"folder:{tmp_path}", "all")
    assert whole.files == (f"{tmp_path.name}/\udce9.png",)
    assert whole.unreadable == (f"{tmp_path.name}/\udce8.png",)
    assert capsys.readouterr().out.encode("utf-8").startswith(b"skipped: ")  # can be printed
    assert data.fingerprint(whole) != data.fingerprint(replace(whole, files=("e.png",)))


@pytest.mark.parametrize("side", [32, 96])  # of a training set in memory, or in files
@pytest.mark.parametrize("model", ["resnet18", "torchvision/x"])
def test_a_picture_has_the_same_pixels_in_memory_and_in_a_file(side, model, tmp_path, image_folder):
    glyphs = load("glyphs_letters", "test").select(slice(20))
    for number, image in enumerate(glyphs.images):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number:02}.png")
    splits = read_splits(f"folder:{image_folder}", model=model, image_size=side,
                         ood=["glyphs_letters", f"folder:{tmp_path}"])
    in_memory, files = splits.ood
    [expected] = Loader(in_memory.select(slice(20))).epoch()
    [batch] = Loader(files).epoch()
    assert batch.images.shape == (20, 3, side, side)
    assert torch.equal(batch.images, expected.images)


@pytest.mark.parametrize("model, shape", [("resnet18", (1, 28, 28)),
                                          ("torchvision/x", (3, 224, 224))])
def test_images_in_files_are_as_large_as_those_of_a_training_set_in_memory(model, shape, tmp_path):
    glyphs = load("glyphs", "test").select(slice(20))
    for number, image in enumerate(glyphs.images):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number:02}.png")
    splits = read_splits("glyphs", model=model, ood=[f"folder:{tmp_path}"])
    [expected] = Loader(splits.test.select(slice(20))).epoch()
    [batch] = Loader(splits.ood[0]).epoch()
    assert batch.images.shape == (20, *shape)
    assert torch.equal(batch.images, expected.images)


def test_validation_images_are_test_images_where_imagenet_itself_was_seen(tmp_path):
    for split in ("train", "val"):
        save_images(tmp_path / "imagenet" / split, ("n01", "n02"), 10, 16)
    for model, source in (("torchvision/x", "val"), ("resnet50", "train")):
        val = read_splits("imagenet", tmp_path, model=model, image_size=16).val
        assert len(val) == 2
        roots = {"train": load("imagenet", "train", tmp_path, 16),
                 "val": load("imagenet", "test", tmp_path, 16)}
        assert torch.equal(val.images, data.random_split(roots[source], 1)[1].images)


def test_ambiguous_images_get_the_channels_of_a_pool_and_keep_their_groups():
    pool = read_splits("glyphs", model="torchvision/x", num_val=0).train
    blends = data.convert_like(load("glyphs_ambiguous", "train"), pool)
    both = data.concat("pool", pool.select(slice(10)), blends)
    assert both.shape == (3, 224, 224)
    assert both.mean == data.IMAGENET[0]
    assert both.groups.tolist()[:14] == [*range(10), 10, 10, 11, 11]


def test_small_shared_memory_is_noticed_before_workers_start(image_folder, monkeypatch, capsys):
    dataset = load(f"folder:{image_folder}", "train", image_size=66)
    batch = 6 * 3 * 66 * 66
    for free, workers in ((6 * batch, 2), (6 * batch - 1, 0)):
        data.usable_workers.cache_clear()
        monkeypatch.setattr("shutil.disk_usage", lambda folder: Namespace(free=free))
        loaders = [Loader(dataset, 6, workers=2) for _ in range(2)]
        assert [loader.workers for loader in loaders] == [workers, workers]
        lines = capsys.readouterr().out.splitlines()
        assert [line[:13] for line in lines] == ["--workers 0: "] * (workers == 0)
    data.usable_workers.cache_clear()
    assert len(list(loaders[0].epoch())) == 6


def test_other_sets_are_found_skipped_or_refused_by_their_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", None)
    save_grey(tmp_path / "a" / "val" / "deep" / "x.PNG")
    save_grey(tmp_path / "b" / "val" / "y.jpg")
    folders = [f"folder:{tmp_path}/{name}/val" for name in "ab"]
    splits = read_splits("glyphs", tmp_path, predict=folders[0],
                         ood=["glyphs_letters", "svhn", folders[1]])
    assert [dataset.name for dataset in splits.ood] == ["glyphs_letters", "val"]  # as a split is
    for dataset in (*splits.ood, splits.predict):
        assert (dataset.shape, dataset.mean) == ((1, 28, 28), splits.train.mean)
    assert (splits.ood[1].files, splits.predict.files) == (("val/y.jpg",), ("val/deep/x.PNG",))
    assert capsys.readouterr().out.startswith("skipped: svhn: ")
    for names, match in ((["glyphz"], "'glyphz' is unknown; choose from glyphs, .*folder:PATH"),
                         (folders, "--ood: two sets have the same name: val, val"),
                         ([f"folder:{tmp_path}/c"], f"expected images in {tmp_path}/c")):
        expect_error(match, partial(read_splits, "glyphs", tmp_path, ood=names))


def test_labels_to_predict_go_by_the_names_of_classes(image_folder, tmp_path):
    for place in ("bee", "deep/ant", "cow", "."):
        save_grey(tmp_path / "more" / place / "x.png")
    for dataset, predict, expected in (
            ("glyphs", "dirty_glyphs", load("dirty_glyphs", "test").labels.tolist()),
            ("glyphs", "glyphs_letters", [-1] * 2000),
            (f"folder:{image_folder}", f"folder:{tmp_path}/more", [-1, 1, -1, 0]),
            ("reviews", "reviews_finance", [-1] * 1000)):
        splits = read_splits(dataset, predict=predict)
        assert splits.predict.labels.tolist() == expected
        assert splits.predict.classes == splits.train.classes  # with which they are printed


def test_networks_of_torchvision_get_imagenets_statistics_and_three_channels(image_folder):
    splits = read_splits(f"folder:{image_folder}", model="torchvision/x", image_size=96,
                         ood=["glyphs_letters"], predict=f"folder:{image_folder}/unknown")
    normalise = T.Normalize(*data.IMAGENET)
    steps = T.Compose([T.Resize(110), T.CenterCrop(96), T.ToTensor(), normalise])
    for dataset in (splits.train, splits.val, splits.test, splits.predict):
        expected = [steps(Image.open(dataset.root / file)) for file in dataset.files]
        torch.testing.assert_close(gather(Loader(dataset, 20).epoch(), "images"),
                                   torch.stack(expected), atol=1e-5, rtol=1e-5)
    [batch] = Loader(splits.ood[0].select(slice(5))).epoch()
    letters = load("glyphs_letters", "test").images[:5, 0].numpy()
    expected = [steps(Image.fromarray(image).convert("RGB")) for image in letters]
    torch.testing.assert_close(batch.images, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert read_splits("glyphs", model="torchvision/x").train.shape == (3, 224, 224)


@pytest.mark.parametrize("augment, mode, shape", [
    ("crop_flip", "constant", (3, 8, 8)), ("reflect_crop_flip", "reflect", (1, 7, 11))])
def test_augmented_batches_are_crops_and_flips_of_one_image_at_a_time(augment, mode, shape):
    dataset = toy(130, shape)
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
    assert {*tops} == {*lefts} == {*range(9)}
    assert 45 < sum(flips) < 85


def test_evaluation_is_in_order_and_normalised_and_batches_are_the_callers():
    dataset = replace(toy(18), images=toy(18).images / 255)
    before = dataset.images.clone()
    mean, std = torch.tensor([dataset.mean, dataset.std]).view(2, -1, 1, 1)
    batches = list(Loader(dataset, 4).epoch())
    torch.testing.assert_close(gather(batches, "images"), (before - mean) / std)
    assert gather(batches, "index").tolist() == list(range(18))
    batches[0].images.zero_()
    assert torch.equal(dataset.images, before)


@pytest.mark.parametrize("n, changes, sizes", [
    (30, {}, [8, 8, 8, 6]), (30, {"drop_last": True}, [8, 8, 8]), (30, {"limit_steps": 2}, [8, 8]),
    (33, {}, [8, 8, 8, 9]), (9, {"augment": "crop_flip"}, [9]), (34, {}, [8, 8, 8, 8, 2]),
    (33, {"shuffle": False}, [8, 8, 8, 8, 1]), (33, {"drop_last": True}, [8] * 4), (1, {}, [1])])
def test_a_last_training_batch_of_one_image_joins_the_batch_before(n, changes, sizes):
    loader = Loader(toy(n), 8, seed=2, **{"shuffle": True} | changes)
    batches = list(loader.epoch(1))
    assert [len(batch.images) for batch in batches] == loader.sizes == sizes
    whole = gather(Loader(toy(n), 8, seed=2, shuffle=loader.shuffle).epoch(1), "index")
    assert torch.equal(gather(batches, "index"), whole[:sum(sizes)])  # shorter epochs begin alike


def test_orders_depend_on_seed_and_epoch_alone():
    state = torch.get_rng_state()
    orders = set()
    for seed, epoch in itertools.product(range(4), range(4)):
        for make in (partial(Loader, toy(53), 8), partial(Loader, toy(53), augment="crop_flip"),
                     partial(SequenceLoader, TEXTS, 20), partial(SequenceLoader, MOLECULES)):
            order = gather(make(seed=seed, shuffle=True).epoch(epoch), "index")
            orders.add((seed, epoch, *order.tolist()))
    assert len(orders) == len({order[2:] for order in orders}) == 16
    assert {frozenset(order[2:]) for order in orders} == {frozenset(range(53))}
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


@pytest.mark.parametrize("make, dataset, world", [
    (Loader, toy(50), 2), (partial(Loader, augment="crop_flip"), toy(50), 3),
    (SequenceLoader, TEXTS, 12), (SequenceLoader, MOLECULES, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_several_processes_share_the_batches_of_one(make, dataset, world, shuffle, monkeypatch):
    make = partial(make, dataset, 12, seed=5, shuffle=shuffle)
    whole = list(make().epoch(4))
    pieces = []
    for rank in range(world):
        set_rank(monkeypatch, rank, world)
        pieces.append(list(make().epoch(4)))
    # In training, a smaller last batch is dropped, so that all processes have equal shares.
    assert len(pieces[0]) == len(make()) == (len(dataset) // 12 if shuffle else len(whole))
    for batch, *parts in zip(whole, *pieces):
        assert torch.equal(gather(parts, "index"), batch.index)
        assert [len(part.index) for part in parts] == [
            len(rows) for rows in np.array_split(batch.index, world)]
        inputs = [getattr(part[0], "positions", part[0]) for part in parts]
        assert torch.equal(torch.cat(inputs), getattr(batch[0], "positions", batch[0]))
    set_rank(monkeypatch, 0, 5)
    if shuffle:
        expect_error("5 processes cannot share batches of 12 equally; .* --batch-size", make)


def test_files_are_augmented_by_seed_epoch_and_process(image_folder, monkeypatch):
    dataset = load(f"folder:{image_folder}", "train", image_size=66).select([0] * 12)

    def read(epoch=0, seed=4, rank=0, augment="crop_flip"):
        set_rank(monkeypatch, rank, 2)
        loader = Loader(dataset, 6, seed=seed, shuffle=True, workers=1, augment=augment)
        batches = list(loader.epoch(epoch))
        return gather(batches, "images"), gather(batches, "index").tolist()

    first, rows = read()
    assert first.shape == (6, 3, 66, 66)
    assert torch.equal(read()[0], first)
    others = [read(epoch=1), read(seed=3), read(rank=1)]
    assert len({digest(images) for images, _ in [(first, rows), *others]}) == 4
    assert set(rows) | set(others[2][1]) == set(range(12))
    mean, std = torch.tensor([dataset.mean, dataset.std]).view(2, -1, 1, 1)
    for row, image, other in zip(rows, read(augment="none")[0], first):
        assert torch.allclose(dataset[row] / 255, image * std + mean, atol=1e-6)
        assert not torch.allclose(image, other)
    set_rank(monkeypatch, 1, 2)  # in an evaluation, it gets an empty piece of a small last batch
    assert [len(b.images) for b in Loader(dataset.select(slice(5)), 4).epoch()] == [2, 0]


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
        owner = torch.arange(len(chosen)).repeat_interleave(chosen.sizes)
        distance = torch.tensor(cdist(chosen.positions, chosen.positions))
        near = (distance < cutoff) & (owner[:, None] == owner)
        targets, sources = near.fill_diagonal_(False).nonzero(as_tuple=True)
        expected = (chosen.numbers, chosen.positions.float(), owner, sources, targets)
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
def test_embedded_sets_are_always_the_same_and_their_parts_are_apart(name):
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


def test_blends_of_two_digits_are_there_twice_and_a_limit_keeps_them_together():
    blends = load("glyphs_ambiguous", "train")
    assert torch.equal(blends.groups, torch.arange(5000).repeat_interleave(2))
    assert torch.equal(blends.images[::2], blends.images[1::2])
    differ = blends.labels[::2] != blends.labels[1::2]  # the mean of 2 w (1 - w), .35 < w < .65
    assert differ.double().mean() == pytest.approx(0.485, abs=0.03)
    whole = load("dirty_glyphs", "train")
    few = data.random_subset(whole, 1000)
    copies = few.groups[few.is_ambiguous].unique(return_counts=True)[1]
    assert len(few) == 1000
    assert 450 < copies.sum() < 550
    assert (copies == 1).sum() <= 1
    assert few.groups.diff().min() >= 0  # in the order of the set
    assert torch.equal(data.random_subset(whole, 1000).images, few.images)
    assert [data.random_subset(whole, limit) is whole for limit in (None, 16000)] == [True, True]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn"])
def test_torchvisions_sets_and_ambiguous_mnist(name, tmp_path, monkeypatch):
    channels = 1 if name == "mnist" else 3
    pixels = np.random.default_rng(0).integers(0, 256, (6, channels, 4, 5), dtype=np.uint8)

    def read(root, download, **part):
        assert download
        assert part == ({"split": "test"} if name == "svhn" else {"train": False})
        raw = {"mnist": pixels[:, 0], "cifar10": pixels.transpose(0, 2, 3, 1), "svhn": pixels}
        return Namespace(data=raw[name], labels=np.arange(6), targets=list(range(6)),
                         classes="abcdefghij")

    monkeypatch.setitem(data.TORCHVISION_CLASSES, name, read)
    test = load(name, "test", tmp_path)
    assert np.array_equal(test.images, pixels)
    assert test.labels.tolist() == list(range(6))
    assert (test.mean, test.std, test.num_classes) == (*data.STATISTICS[name], 10)
    if name == "mnist":
        levels = torch.arange(12000).div(12000).half()
        labels = torch.arange(120000).view(12000, 10) % 9
        (tmp_path / "AmbiguousMNIST").mkdir()
        torch.save(labels, tmp_path / "AmbiguousMNIST" / "amnist_labels.pt")
        images = levels.view(-1, 1, 1, 1).expand(-1, 1, 4, 5)
        torch.save(images, tmp_path / "AmbiguousMNIST" / "amnist_samples.pt")
        both = load("dirty_mnist", "test", tmp_path)  # a union of bytes and numbers in [0, 1]
        assert torch.equal(both.images[:6], test.images / 255)
        assert both.is_ambiguous.sum() == 60000
        assert torch.equal(both.images[6:, 0, 2, 1], levels[6000:].float().repeat_interleave(10))
        assert torch.equal(both.labels[6:], labels[6000:].flatten())
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
    strengths = {kind: [] for kind in CHANGES}
    args = Namespace(shift="computed", shift_examples=0)
    for _, kind, severity, copy in data.corrupted_sets(glyphs, args):
        change = copy.images.double() - glyphs.images.double()
        strengths[kind].append(change.abs().mean().item())
        exact = data.corrupted(in_unit, kind, severity).images * 255
        assert (exact - copy.images).abs().max() <= 0.51
        drawn = data.corrupted(twins, kind, severity).images
        is_random = kind not in ("gaussian_blur", "brightness", "contrast", "pixelate", "jpeg")
        assert (len({*map(digest, drawn)}) > 1) == is_random  # drawn for each image
        assert torch.equal(data.corrupted(twins, kind, severity).images, drawn)
    for kind, changes in CHANGES.items():
        assert strengths[kind] == pytest.approx(changes, abs=0.06), kind


def test_published_corruptions_of_cifar10(tmp_path):
    args = Namespace(dataset="cifar10", data_dir=tmp_path, shift="published", shift_examples=0)
    assert list(data.corrupted_sets(toy(3), args)) == []  # is skipped
    (tmp_path / "snow.npy.crdownload").write_bytes(b"")
    rows = np.arange(50000)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", (rows % 251).astype(np.uint8).reshape(-1, 1, 1, 1))
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", rows // 10000 + rows % 2)
    for k, (*name, copy) in enumerate(data.corrupted_sets(toy(3), args)):
        assert name == ["cifar10_c (1 of 19 kinds)", "fog", k + 1]
        assert np.array_equal(copy.images.flatten(), rows[10000 * k:10000 * (k + 1)] % 251)
        assert copy.labels.tolist() == [k, k + 1] * 5000
    assert k == 4


@pytest.mark.parametrize("count, title", [
    (19, "19 kinds"), (15, "15 kinds"), (16, "16 of 19 kinds"), (2, "2 of 19 kinds")])
def test_rows_say_how_many_published_kinds_there_are(count, title, tmp_path, monkeypatch, capsys):
    images = toy(4, (3, 8, 8), classes=tuple("abcdefg"))
    monkeypatch.setattr(data, "load", lambda *args: images)
    monkeypatch.setattr(data, "load_class_folders", lambda *args: images)
    for kind, severity in itertools.product(data.CIFAR_C_KINDS[:count], range(1, 6)):
        (tmp_path / "Tiny-ImageNet-C" / kind / f"{severity}").mkdir(parents=True)
    options = {"shift": "published", "shift_examples": 0, "num_val": 0}
    read_splits("tiny_imagenet", tmp_path, **options)
    lines = capsys.readouterr().out.splitlines()
    missing = ", ".join(data.CIFAR_C_KINDS[count:])
    line = f"{tmp_path}/Tiny-ImageNet-C has no {missing}"
    assert lines == ([] if count in (15, 19) else [line])
    args = Namespace(dataset="tiny_imagenet", data_dir=tmp_path, **options)
    copies = list(data.corrupted_sets(images, args))
    assert {copy.title for copy in copies} == {f"tiny_imagenet_c ({title})"}
    assert len(copies) == 5 * count
    first_kinds = data.corrupted_sets(images, args, data.CIFAR_C_KINDS[:15])
    assert ("c (15 kinds)" in next(first_kinds).title) == (count >= 15)


def test_damaged_published_corruptions_end_a_command_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *args: toy())
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    read = partial(read_splits, "cifar10", tmp_path, shift="published", num_val=0)
    array = np.zeros((50000, 1, 1, 1), np.uint8)
    np.save(root / "fog.npy", array)
    expect_error(f"{root}/labels.npy is damaged or missing .* download it again", read)
    np.save(root / "labels.npy", array[:, 0, 0, 0])
    read()
    np.save(root / "snow.npy", array[:10000])
    expect_error("snow.npy is damaged or missing .10000 rows, expected 50000.", read)
    whole = (root / "fog.npy").read_bytes()
    for content in (whole[:30000], b""):
        (root / "snow.npy").write_bytes(content)
        expect_error("snow.npy is damaged or missing", read)
    expect_error("there is no mnist_c; use --shift computed",
                 partial(read_splits, "mnist", shift="published", num_val=0))


def test_images_in_files_can_be_corrupted(image_folder):
    files = load(f"folder:{image_folder}", "test", image_size=66)
    copy = data.corrupted(files, "gaussian_noise", 3)
    assert torch.equal(copy.images, data.corrupted(files.in_memory(), "gaussian_noise", 3).images)
    assert copy.files == files.files


@pytest.mark.parametrize("match, read, name, split", [
    ("'mnits' is unknown; choose from glyphs,", load, "mnits", "train"),
    ("glyphs has no split 'val'", load, "glyphs", "val"),
    ("'sst3' is unknown; .* sst2", load_text, "sst3", "test"),
    ("images in /none/train/CLASS", load, "folder:/none", "train"),
    ("mnist: {}/MNIST/raw not found; .* from http", load, "mnist", "test"),
    ("ambiguous_mnist: {}/AmbiguousMNIST not found; .* http", load, "ambiguous_mnist", "test"),
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


@pytest.mark.parametrize("size", [32, 66])  # in memory, or read by a worker
def test_damaged_images_are_skipped_in_a_prediction_and_end_a_training(size, tmp_path, capsys):
    save_images(tmp_path / "train", ("a", "b"), 3, 70)
    path = tmp_path / "train" / "b" / "1.png"
    for workers, content in ((0, b""), (0, path.read_bytes()[:2000]), (1, b"no image")):
        path.write_bytes(content)
        part = load(f"folder:{tmp_path}/train", "all", image_size=size)
        assert part.unreadable == ("train/b/1.png",)
        assert len(part) == len(part.files) == 5
        assert "skipped: " in capsys.readouterr().out
        assert "train/b/1.png" not in part.files
        with pytest.raises(UserError, match=f"^{path}: unreadable .*; replace or remove the file"):
            train = load(f"folder:{tmp_path}", "train", image_size=size)
            list(Loader(train, 6, workers=workers).epoch())
    for name in ("0.png", "2.png"):
        path.with_name(name).write_bytes(b"")
    expect_error(f"{path.parent}", load, f"folder:{path.parent}", "all", "", size)


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
    rows = "".join(f"the \"x {k}\t{k % 2}\n" for k in range(40))
    (tmp_path / "SST-2").mkdir()
    for file, text in (("train", "sentence\tlabel\n" + rows), ("test", test),
                       ("dev", "sentence\tlabel\ngood film\t1\nbad film\t0\ngood\t1\n")):
        (tmp_path / "SST-2" / f"{file}.tsv").write_text(text)
    sets = read_splits("sst2", tmp_path)[:3]
    characters = sorted('"0123456789ehtx')
    vocab = (*data.SPECIAL, *characters, *("##" + c for c in characters), "the")
    assert [part.vocab for part in sets] == [vocab] * 3
    expected = [list(range(40)), [1, 0, 1], [0, 1]]
    if "label" not in test:  # "val" is a tenth of train.tsv, and dev.tsv the test set
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
        expected = [sorted(order[4:]), [k % 2 for k in order[:4]], [1, 0, 1]]
    assert [part.labels.tolist() for part in sets[1:]] == expected[1:]
    assert sets[0].labels.tolist() == [k % 2 for k in expected[0]]
    words = "".join(vocab[i].removeprefix("##") for i in sets[0].tokens)
    assert words == "".join(f'[CLS]the"x{k}[SEP]' for k in expected[0])
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    assert read_splits("sst2", tmp_path, vocab=tmp_path / "vocab.txt").val.vocab == VOCAB


def test_malformed_texts_are_named_by_file_and_line(tmp_path):
    (tmp_path / "SST-2").mkdir()
    texts = {"train": "a\t1\n" * 20, "dev": "\ufeffgood\t1\nfine\t1\n",
             "test": "\ufeffsentence\tlabel\r\nb\rc\t0\r\n"}
    for file, text in texts.items():
        header = "sentence\tlabel\n" if file != "test" else ""
        (tmp_path / "SST-2" / f"{file}.tsv").write_text(header + text, "utf-8", newline="")
    # The byte order mark does not hide that test.tsv has labels; a lone \r ends no line.
    sentences, labels = data.read_sentences("sst2", "test", tmp_path)
    assert sentences == ["b\rc"]
    assert labels.tolist() == [0]
    for line in ("no label", "x\t2", "x\ty\t1", "", "x\t"):
        (tmp_path / "SST-2" / "dev.tsv").write_text(f"sentence\tlabel\ngood\t1\n{line}\nx\t0\n")
        expect_error("dev.tsv of sst2, line 3: expected a sentence, a tab, and 0 or 1",
                     data.read_sentences, "sst2", "val", tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nx\n")
    for file, match in (("vocab.txt", "it lacks .CLS., .SEP."), ("v.txt", "there is no such file")):
        path = tmp_path / file
        expect_error(f"--vocab {path}: {match}", partial(read_splits, "reviews", vocab=path))


def test_embedded_sentences_have_their_shares_of_labels_and_no_unknown_words():
    for name, share, expected in (("reviews", 0.5, "ce9b19404999"),
                                  ("reviews_finance", 0, "afa710403caa")):
        train, val, test = [load_text(name, split) for split in ("train", "val", "test")]
        assert (len(train), len(val), len(test)) == (6000, 500, 1000)
        assert digest(torch.cat([test.tokens.long(), test.lengths])) == expected
        assert train.labels.double().mean() == pytest.approx(share, abs=0.02)
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
    parts = [load_molecules("qm9", split).labels for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [110000, 10000, 10831]
    assert np.array_equal(torch.cat(parts), np.random.default_rng(0).permutation(130831))


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


@pytest.mark.parametrize("side, size", [(32, 256), (80, 5)])
def test_images_in_files_are_evaluated_in_batches_of_the_training(side, size, image_folder):
    dataset = data.load(f"folder:{image_folder}", "train", image_size=side)  # 36 images
    args = Namespace(batch_size=5, device="cpu", workers=0)
    batches = list(data.evaluation_batches(dataset, args))
    assert len(batches[0].images) == min(size, 36)
    assert torch.equal(torch.cat([batch.index for batch in batches]), torch.arange(36))


def test_a_kind_of_corruption_without_a_severity_is_missing(tmp_path, capsys):
    for kind in ("fog", "snow"):
        for severity in range(1, 6 if kind == "fog" else 5):
            (tmp_path / "Tiny-ImageNet-C" / kind / str(severity)).mkdir(parents=True)
    args = Namespace(dataset="tiny_imagenet", data_dir=tmp_path)
    assert data.find_published(args)[1] == ["fog"]
    assert "snow" in capsys.readouterr().out
