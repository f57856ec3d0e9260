"""Data of the scripts: loaders, augmentation, corruptions, OOD sets and embedded sets.

    sets = load_sets("cifar10", "data", seed=1, ood=["svhn"])
    sets.train                                     # 45,000 images, uint8, in memory
    sets.ood["svhn"]                               # normalised with the statistics of sets.train
    for batch in Loader(sets.train, 128, "cuda", shuffle=True, augment="crop_flip").epoch(3):
        batch.images                               # float32, normalised, on the device

    train = load_text("sst2", "train", "data")     # or load_molecules("qm9", "train", "data")
    for batch in SequenceLoader(train, 16, "cuda", shuffle=True).epoch(3):
        batch.tokens                               # int64, padded with 0, on the device

Small image sets are an `ImageSet`: uint8 tensors that the `Loader` keeps on the device, where it
crops, flips and normalises whole batches. Large images are a `StreamedSet`: files that are decoded
by worker processes. Sentences are a `TextSet`, molecules a `MoleculeSet`. `DATASETS`, `TEXTS` and
`MOLECULES` list the names of all sets; `digest` identifies what a set holds. Functions that read a
set must be called by all processes together. Errors that the user can fix are `common.UserError`s
of one line.
"""

import contextlib
import hashlib
import io
import itertools
import math
import os
import random
import re
import unicodedata
from collections import Counter, OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.data import DataLoader
from torchvision import datasets as tv
from torchvision import models
from torchvision.datasets.utils import download_url
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as TF

import common
from common import UserError

# ---- Sources ------------------------------------------------------------------------------


class Source(NamedTuple):
    """Where a published set lies, what it holds, and how it is normalised."""

    path: str               # relative to the data directory
    site: str               # where its publisher offers it
    train_rows: int = 0     # published numbers of images
    test_rows: int = 0
    num_classes: int = 0    # 0: as many as there are class folders
    mean: tuple = ()        # per channel, of pixels in [0, 1], as published
    std: tuple = ()
    side: int = 0           # pixels per side of images that are read from files
    other_paths: tuple = ()  # where published scripts and other libraries put it


MNIST_STATISTICS = (10, (0.1307,), (0.3081,))
SOURCES = {
    "mnist": Source("MNIST/raw", "https://ossci-datasets.s3.amazonaws.com/mnist",
                    60000, 10000, *MNIST_STATISTICS),
    "fashion_mnist": Source("FashionMNIST/raw",
                            "https://github.com/zalandoresearch/fashion-mnist",
                            60000, 10000, 10, (0.2860,), (0.3530,)),
    # This published std is the mean of the stds within each image; that of all training pixels is
    # (0.2470, 0.2435, 0.2616).
    "cifar10": Source("cifar-10-batches-py", "https://www.cs.toronto.edu/~kriz/cifar.html",
                      50000, 10000, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": Source("cifar-100-python", "https://www.cs.toronto.edu/~kriz/cifar.html",
                       50000, 10000, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": Source("{}_32x32.mat", "http://ufldl.stanford.edu/housenumbers",
                   73257, 26032, 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "ambiguous_mnist": Source(
        "AmbiguousMNIST",
        "https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0",
        60000, 60000, *MNIST_STATISTICS),
    # These statistics are published on a scale of 0 to 255; the published repository has a
    # wnids.txt in the outer folder, too.
    "tiny_imagenet": Source(
        "tiny-imagenet-200", "http://cs231n.stanford.edu/tiny-imagenet-200.zip", 100000, 10000, 0,
        (122.4786 / 255, 114.2755 / 255, 101.3963 / 255),
        (70.4924 / 255, 68.5679 / 255, 71.8127 / 255), 64,
        ("TinyImageNet/tiny-imagenet-200", "TinyImageNet")),
    "imagenet": Source("imagenet", "https://www.image-net.org (sort val into class folders)",
                       1281167, 50000, 0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224),
    "imagenet_a": Source("imagenet-a", "https://github.com/hendrycks/natural-adv-examples",
                         0, 7500),
    "imagenet_o": Source("imagenet-o", "https://github.com/hendrycks/natural-adv-examples",
                         0, 2000),
    "imagenet_r": Source("imagenet-r", "https://github.com/hendrycks/imagenet-r", 0, 30000),
    "cifar10_c": Source("CIFAR-10-C", "https://zenodo.org/records/2535967"),
    "cifar100_c": Source("CIFAR-100-C", "https://zenodo.org/records/3555552"),
    "tiny_imagenet_c": Source("Tiny-ImageNet-C", "https://zenodo.org/records/8206060",
                              other_paths=("TinyImageNet/corrupt",)),
    "imagenet_c": Source("imagenet-c", "https://zenodo.org/records/2235448"),
    # The test set of GLUE has no labels.
    "sst2": Source("SST-2", "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip (labelled test "
                   "set: https://huggingface.co/datasets/SetFit/sst2)"),
    "qm9": Source(
        "QM9", "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/molnet_publish/qm9.zip",
        other_paths=("QM9/raw",)),
}
TORCHVISION = {
    "mnist": tv.MNIST,
    "fashion_mnist": tv.FashionMNIST,
    "cifar10": tv.CIFAR10,
    "cifar100": tv.CIFAR100,
    "svhn": tv.SVHN,
}
AMBIGUOUS_MNIST = {  # MD5 checksums of its files
    "amnist_samples.pt": "4f7865093b1d28e34019847fab917722",
    "amnist_labels.pt": "3bfc055a9f91a76d8d493e8b898c3c95",
}


class Style(NamedTuple):
    """The largest distortions of a text; lengths are in half sides of the image."""

    tilt: float             # degrees; small, or else a 6 would look like a 9
    shear: float
    scale: tuple            # smallest and largest
    shift: float
    bend: float


LARGE_PRINT = Style(15.0, 0.25, (0.8, 1.1), 0.12, 0.05)
SMALL_PRINT = Style(7.0, 0.15, (0.95, 1.05), 0.06, 0.02)
BLENDED_DIGIT = Style(10.0, 0.15, (0.75, 0.95), 0.0, 0.03)


class Prints(NamedTuple):
    """An embedded set: 28x28 grey pictures of texts, one class per text."""

    texts: list
    font_size: int
    strokes: tuple          # stroke widths of the pen
    style: Style | None
    train_rows: int
    test_rows: int
    mean: float             # of the training pixels in [0, 1]
    std: float


DIGITS = list("0123456789")
LETTERS = list("ACEFHKMNPRTUVWXY")  # none of them resembles a digit when it is warped
NUMBERS = [f"{k:03d}" for k in range(1000)]
# A word per number: the hexadecimal digits of its fourfold, written as letters.
TO_LETTERS = str.maketrans("0123456789abcdef", "ACEFHKMNPRTUVWXY")
WORDS = [f"{4 * k:03x}".translate(TO_LETTERS) for k in range(1000)]
EMBEDDED = {  # the random numbers of a set depend on its place in this table
    "glyphs": Prints(DIGITS, 52, (0, 1, 2, 3), LARGE_PRINT, 10000, 2000, 0.2100, 0.2746),
    # Blends of two digits. Each training image occurs twice, with a label drawn for each.
    "glyphs_ambiguous": Prints(DIGITS, 50, (0, 1), BLENDED_DIGIT, 5000, 2000, 0.1904, 0.2425),
    # 8,000 training rows and all test rows of each of the two above
    "dirty_glyphs": Prints(DIGITS, 0, (), None, 16000, 4000, 0.2002, 0.2592),
    "glyphs_letters": Prints(LETTERS, 50, (0, 1, 2, 3), LARGE_PRINT, 10000, 2000, 0.2159, 0.2794),
    "numbers": Prints(NUMBERS, 27, (0, 1), SMALL_PRINT, 30000, 5000, 0.1784, 0.2284),
    "numbers_letters": Prints(WORDS, 27, (0, 1), SMALL_PRINT, 30000, 5000, 0.1859, 0.2361),
    "numbers_ambiguous": Prints(NUMBERS, 27, (0, 1), SMALL_PRINT, 5000, 2000, 0.2288, 0.2745),
}
IN_MEMORY = tuple(EMBEDDED) + tuple(TORCHVISION) + ("ambiguous_mnist", "dirty_mnist")
DATASETS = IN_MEMORY + ("tiny_imagenet", "imagenet", "imagenet_a", "imagenet_o", "imagenet_r",
                        "folder:PATH")
TEXTS = ("reviews", "reviews_finance", "sst2")
MOLECULES = ("clusters", "clusters_large", "qm9")
SPLITS = ("train", "val", "test", "ood")


class Absent(UserError):
    """A set cannot be used: it was not found, is damaged, or has the name of another set."""


def _absent(name, path, reason="not found"):
    return Absent(f"{name}: {path}: {reason}; get it from {SOURCES[name].site} and put it there")


def _place(name, data_dir, file=""):
    """The folder of a published set that has this file; if none has it, the usual folder."""
    source = SOURCES[name]
    for path in (source.path,) + source.other_paths:
        if (data_dir / path / file).exists():
            return data_dir / path
    return data_dir / source.path


def _choose_from(what, value, choices):
    if value not in choices:
        raise UserError(f"{what} {value!r} is unknown; choose from {', '.join(map(str, choices))}")


@lru_cache(maxsize=None)
def _print_once(note):
    """Print on the main process what would be repeated each time that a set is read."""
    common.print_on_main(note)


def _generator(*key):
    """A CPU generator seeded by the integers of `key`; similar keys give unrelated numbers.

    NumPy pads keys with zeros: (1,) and (1, 0) are the same. The embedded sets and corruptions
    keep this rule, so that they stay as they are.
    """
    entropy = [number % 2**63 for number in key]
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) % 2**63)


def _loader_generator(*key):
    """A generator for loaders, whose keys of different lengths also give unrelated numbers."""
    return _generator(len(key), *key)


# ---- Sets ---------------------------------------------------------------------------------


class _Rows:
    """What all kinds of sets share: N rows that can be selected."""

    of_rows = ()            # names of the fields with one entry per row
    of_entries = ()         # names of the fields with several entries per row ...
    counts = ""             # ... and of the field with their numbers
    is_features = False     # whether the rows are vectors instead of pictures

    def __len__(self):
        return len(self.labels)

    def select(self, index):
        """The rows `index` (a slice, integers [n] or a mask [N]) as a new set."""
        rows = torch.arange(len(self))[index]
        selected = {}
        for name in self.of_rows:
            column = getattr(self, name)
            if isinstance(column, Tensor):
                selected[name] = column[rows]
            elif column:
                selected[name] = tuple(column[row] for row in rows.tolist())
        for name in self.of_entries:
            entries = entries_of(rows, getattr(self, self.counts))
            selected[name] = getattr(self, name)[entries]
        return replace(self, **selected)


@dataclass(frozen=True, eq=False)
class ImageSet(_Rows):
    """N images in memory: uint8, or floating in [0, 1], or features [N, D, 1, 1]."""

    name: str
    images: Tensor                      # [N, C, H, W]
    labels: Tensor                      # int64 [N] in 0..num_classes-1, -1 unknown; or float
    num_classes: int
    mean: tuple                         # per channel, of pixels in [0, 1]
    std: tuple
    label_probs: Tensor | None = None   # float32 [N, K], the true distribution where known
    groups: Tensor | None = None        # int64 [N]; rows of a group are never split
    classes: tuple = ()                 # names in the order of the labels, where known
    files: tuple = ()                   # paths of the images, relative to their folder
    preparation: tuple | None = None    # the Preparation of files that were read into memory

    of_rows = ("images", "labels", "label_probs", "groups", "files")

    def __post_init__(self):
        n = len(self.labels)
        if len(self.images) != n or len(self.files) not in (0, n):
            raise UserError(f"{self.name}: {len(self.images)} images and {len(self.files)} names, "
                            f"but {n} labels")
        if n > 0 and not self.labels.is_floating_point():
            low, high = self.labels.aminmax()
            if low < -1 or high >= self.num_classes:
                raise UserError(f"{self.name}: labels from {low} to {high}; expected 0 to "
                                f"{self.num_classes - 1}")

    @property
    def shape(self):
        """(C, H, W)."""
        return tuple(self.images.shape[1:])

    @property
    def is_features(self):
        return self.shape[1:] == (1, 1)


@dataclass(frozen=True, eq=False)
class StreamedSet(_Rows):
    """N image files, decoded to RGB uint8 [3, S, S] when they are read."""

    name: str
    root: Path
    files: tuple                        # paths relative to `root`, with forward slashes
    labels: Tensor                      # int64 [N]
    num_classes: int
    mean: tuple
    std: tuple
    shape: tuple                        # (3, S, S), of the centre crop
    resize: int | list                  # size of the shorter side before it, or [height, width]
    interpolation: InterpolationMode
    classes: tuple = ()                 # names; ImageNet-A, -O and -R have 200 of the 1000
    key: tuple | None = None            # integers that, with the row, seed the augmentation

    of_rows = ("files", "labels")

    @property
    def preparation(self):
        return Preparation(self.shape[-1], self.resize, self.mean, self.std, self.interpolation)

    def __getitem__(self, row):
        """File `row` as uint8 [3, S, S]: a centre crop, or with a key a random crop and flip."""
        image = _read_image(self.root / self.files[row], _to_rgb)
        if self.key is None:
            image = TF.resize(image, self.resize, self.interpolation)
            return TF.pil_to_tensor(TF.center_crop(image, self.shape[-1]))
        # get_params draws from the default generator, which is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_loader_generator(*self.key, row).get_state())
            box = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = torch.rand(()) < 0.5
        image = TF.resized_crop(image, *box, list(self.shape[1:]), self.interpolation)
        if flip:
            image = TF.hflip(image)
        return TF.pil_to_tensor(image)

    def _read_all(self, read):
        """read(row) of all rows, by a pool of threads; one error for all unreadable files."""
        def attempt(row):
            try:
                return read(row)
            except UserError as error:
                return error

        # Pillow releases the interpreter's lock while it decodes.
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(attempt, range(len(self))))
        errors = [str(result) for result in results if isinstance(result, UserError)]
        if errors:
            raise UserError(f"{self.name}: {len(errors)} unreadable image(s), the first of them: "
                            f"{', '.join(errors[:3])}")
        return results

    def in_memory(self):
        """An ImageSet of all files."""
        images = torch.stack(self._read_all(self.__getitem__))
        return ImageSet(self.name, images, self.labels, self.num_classes, self.mean, self.std,
                        classes=self.classes, files=self.files, preparation=self.preparation)

    def check_headers(self):
        """Refuse files whose headers tell that they cannot be read; nothing is decoded."""
        self._read_all(lambda row: _read_image(self.root / self.files[row], _size))


@dataclass(frozen=True, eq=False)
class TextSet(_Rows):
    """N sentences in memory, each [CLS] ... [SEP]."""

    name: str
    tokens: Tensor          # int32 [T], ids below len(vocab), one sentence after another
    lengths: Tensor         # int64 [N], number of tokens per sentence
    labels: Tensor          # int64 [N], in 0..num_classes-1, or -1 where unknown
    num_classes: int
    vocab: tuple            # the word piece of each id; id 0 is [PAD], which no sentence has
    classes: tuple = ()     # names in the order of the labels, where known

    of_rows = ("lengths", "labels")
    of_entries = ("tokens",)
    counts = "lengths"


@dataclass(frozen=True, eq=False)
class MoleculeSet(_Rows):
    """N molecules in memory, the atoms of one after those of another."""

    name: str
    numbers: Tensor         # int64 [A], atomic numbers, in 1..100
    positions: Tensor       # float64 [A, 3], angstrom
    sizes: Tensor           # int64 [N], number of atoms per molecule
    labels: Tensor          # float64 [N]; float32 would round QM9's energies by 1 meV
    references: Tensor      # float64 [101], eV, see atom_references
    quantity: str = ""      # what the labels are; only equal quantities can be compared

    of_rows = ("sizes", "labels")
    of_entries = ("numbers", "positions")
    counts = "sizes"


def entries_of(rows, counts):
    """Places (int64) of the entries of `rows`, where row i has counts[i] entries in turn."""
    starts = counts.cumsum(0) - counts                     # [N]
    selected = counts[rows]                                # [n]
    new_starts = selected.cumsum(0) - selected             # [n]
    shift = (starts[rows] - new_starts).repeat_interleave(selected)
    return torch.arange(len(shift)) + shift


UNSEEN = ("name", "root", "files", "key", "preparation")  # fields that training does not see


def digest(dataset):
    """A hexadecimal SHA-256 of all that training sees of a set; a checkpoint is made from it.

    It covers pixels, tokens or atoms, labels, label_probs, groups, statistics and names of
    classes, but not the name of the set. Streamed files count by relative name, size and time of
    the last change. All processes call this together; the main process computes it, once per set.
    """
    if "digest" not in vars(dataset):
        vars(dataset)["digest"] = common.on_main(_hash, dataset)
    return vars(dataset)["digest"]


def _hash(dataset):
    content = hashlib.sha256()
    for name in [field.name for field in fields(dataset) if field.name not in UNSEEN]:
        value = getattr(dataset, name)
        if name in ("mean", "std"):
            # Their last digits depend on the number of threads that summed up.
            value = [f"{number:.4g}" for number in value]
        if isinstance(value, Tensor):
            content.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            content.update(value.contiguous().flatten().view(torch.uint8).numpy())
        else:
            content.update(f"{name} {value!r}\n".encode())
    if isinstance(dataset, StreamedSet):
        for file in dataset.files:
            status = (dataset.root / file).stat()
            content.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return content.hexdigest()


def _to_unit(images):
    """float32 pixels in [0, 1]."""
    if images.dtype == torch.uint8:
        return images.float().div_(255)
    return images.float()


def _from_unit(x, dtype):
    """Pixels in [0, 1], clipped, as uint8 or as they are."""
    x = x.clamp(0, 1)
    if dtype == torch.uint8:
        return x.mul_(255).round_().byte()
    return x


def concat(name, first, second):
    """The rows of the image set `first`, then those of `second`, normalised like `first`.

    Bytes become numbers in [0, 1] if only one set has bytes. Where a set has no label_probs, they
    are its labels, one-hot; where it has no groups, each row is one.
    """
    if (first.shape, first.classes) != (second.shape, second.classes):
        raise UserError(f"{first.name} {first.shape} and {second.name} {second.shape} cannot be "
                        "joined: their images or classes differ")
    parts = [first, second]
    if first.images.dtype != second.images.dtype:
        parts = [replace(part, images=_to_unit(part.images)) for part in parts]
    first_groups = _groups(first)
    second_groups = _groups(second) + first_groups.max() + 1
    return replace(first, name=name, images=torch.cat([part.images for part in parts]),
                   labels=torch.cat([first.labels, second.labels]),
                   label_probs=torch.cat([_label_probs(part) for part in parts]),
                   groups=torch.cat([first_groups, second_groups]), files=())


def _label_probs(dataset):
    if dataset.label_probs is None:
        return F.one_hot(dataset.labels, dataset.num_classes).float()
    return dataset.label_probs


def _groups(dataset):
    """int64 [N]: the groups of any set."""
    groups = getattr(dataset, "groups", None)
    return torch.arange(len(dataset)) if groups is None else groups


# ---- Splits and parts ---------------------------------------------------------------------


def train_val_split(n, seed, val_fraction=0.1, groups=None):
    """(train, val): int64 row numbers; each of the rows 0..n-1 is in exactly one of them.

    Published: a legacy NumPy shuffle of 0..n-1, of which the first floor(val_fraction n) are
    for validation. With groups (int64 [n]), the groups are shuffled and counted instead, and
    the rows of a group stay together.
    """
    group_of_rows = np.arange(n) if groups is None else groups.numpy()
    names, group = np.unique(group_of_rows, return_inverse=True)
    order = np.random.RandomState(seed).permutation(len(names))
    rank = np.argsort(order)[group]                        # [n] place of each row's group
    rows = torch.from_numpy(np.argsort(rank, kind="stable"))
    num_val = int((rank < math.floor(val_fraction * len(names))).sum())
    return rows[num_val:], rows[:num_val]


def class_split(labels, seed, val_fraction=0.1):
    """(train, val): int64 row numbers, ascending, in which classes keep their shares.

    floor(val_fraction n) rows are for validation, but at least one row of each class is not.
    """
    labels = labels.numpy()
    num_train = len(labels) - math.floor(val_fraction * len(labels))
    num_train = max(num_train, len(np.unique(labels)))
    order = torch.from_numpy(_by_shares(labels, seed))
    return order[:num_train].sort().values, order[num_train:].sort().values


def evenly(dataset, limit):
    """At most `limit` rows of a set, in their order; all rows if limit is None.

    They are drawn at random, always the same, so that classes keep their shares and none is left
    out while the limit allows it. Groups stay whole: an ambiguous image is absent, or has all its
    labels. Where labels are real numbers, the rows are evenly spaced.
    """
    n = len(dataset)
    if limit is None or limit >= n:
        return dataset
    if dataset.labels.is_floating_point():
        return dataset.select(torch.arange(limit) * n // limit)
    _, first, group = np.unique(_groups(dataset), return_index=True, return_inverse=True)
    order = _by_shares(dataset.labels.numpy()[first], seed=0)          # [G]
    rows_so_far = np.bincount(group)[order].cumsum()
    kept = np.isin(group, order[rows_so_far <= limit])
    return dataset.select(torch.from_numpy(kept))


def _by_shares(labels, seed):
    """The rows 0..n-1, shuffled so that classes have their shares among the first of them.

    The rows of a class are at 0, 1 / m, 2 / m, ... of the way, if there are m of them; so each
    class is represented as soon as possible.
    """
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    by_class = labels[shuffled].argsort(kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    place = np.empty(len(labels))
    place[by_class] = np.concatenate([np.arange(size) / size for size in sizes])
    return shuffled[place.argsort(kind="stable")]


def limit_train(dataset, limit):
    """`evenly` for a training set: refuses a limit that leaves a class without examples."""
    limited = evenly(dataset, limit)
    if not dataset.labels.is_floating_point():
        lost = set(dataset.labels.tolist()) - set(limited.labels.tolist())
        if lost:
            raise UserError(f"{dataset.name}: {limit} training example(s) leave out {len(lost)} "
                            "class(es); raise --limit-train")
    return limited


def check_sizes(*sets, limit=math.inf):
    """Refuse sets that are too small to be distributed over the processes.

    Call it before training. Entries may be None; `limit` is the number of rows that are
    distributed at a time.
    """
    processes = common.world_size()
    for dataset in sets:
        rows = math.inf if dataset is None else min(len(dataset), limit)
        if rows < processes:
            raise UserError(f"{dataset.name}: {rows} example(s) cannot be distributed over "
                            f"{processes} process(es); use fewer processes, add examples or "
                            "remove the set")


# ---- Loading ------------------------------------------------------------------------------


class Sets(NamedTuple):
    """The image sets of a run, all of the size, channels and normalisation of `train`."""

    train: ImageSet | StreamedSet
    val: ImageSet | StreamedSet | None
    test: ImageSet | StreamedSet
    ood: dict               # {name: set}
    predict: ImageSet | StreamedSet | None


class Preparation(NamedTuple):
    """How image files are resized, cropped in the centre and normalised."""

    crop: int               # side of the crop, in pixels
    resize: int | list      # size of the shorter side before it, or [height, width]
    mean: tuple             # per channel, of pixels in [0, 1]
    std: tuple
    interpolation: InterpolationMode = InterpolationMode.BILINEAR


SMALL = 64  # images in files are kept in memory if no side has more pixels than this


def _usual_preparation(name, image_size=None):
    # Variants of ImageNet and folders of the user are normalised like ImageNet.
    source = SOURCES["imagenet"]
    if name.startswith("tiny_imagenet"):
        source = SOURCES["tiny_imagenet"]
    side = image_size or source.side
    # Small images keep the whole shorter side; of large ones the centre is cut, as published.
    resize = side if side <= SMALL else round(side * 256 / 224)
    return Preparation(side, resize, source.mean, source.std)


def _together(read):
    """Make `read` a function that all processes must call together.

    The first process of each machine reads before the others, so that it alone downloads. An
    error of one process is raised on all of them.
    """
    @wraps(read)
    def read_together(*args, **options):
        return common.on_each_machine(partial(read, *args, **options))

    return read_together


@_together
def load(name, split, data_dir="data", *, seed=1, val_fraction=0.1, image_size=None,
         preparation=None, limit=None):
    """A set of DATASETS as an ImageSet or a StreamedSet, downloaded where that is possible.

    split            "train" and "val": parts of the training set, or, of a folder that has both,
                     its own parts; "test"; "ood": the test set, or all images at any depth of a
                     folder, as one class
    val_fraction     share of the training set that is "val", in [0, 1), chosen by `seed`; with
                     0, the rows of "train" are in the order of the files
    image_size       side of the square images that are read from files (folders: 32)
    preparation      a Preparation of image files, instead of image_size; images in memory keep
                     their size, but become RGB and are normalised by its mean and std
    limit            number of rows to keep, see evenly and, for "train", limit_train

    Raises Absent if the set is not found.
    """
    _choose_from("split", split, SPLITS)
    dataset = _read(name, split, Path(data_dir), image_size, preparation)
    if split in ("train", "val") and not has_own_val(name):
        dataset = _part(dataset, name, split, seed, val_fraction)
    dataset = limit_train(dataset, limit) if split == "train" else evenly(dataset, limit)
    if isinstance(dataset, ImageSet):
        if preparation is not None:
            images = dataset.images.expand(-1, 3, -1, -1)
            dataset = replace(dataset, images=images, mean=preparation.mean, std=preparation.std)
        return dataset
    # ImageNet stays on the disk at any size: there is too much of it.
    if name.startswith(("folder:", "tiny_imagenet")) and dataset.shape[-1] <= SMALL:
        return dataset.in_memory()
    if name.startswith("folder:"):
        dataset.check_headers()
    return dataset


def _read(name, split, data_dir, image_size, preparation):
    """The whole training set, the test set, or a part of a folder of the user."""
    training = split in ("train", "val")
    if name in IN_MEMORY and image_size is not None and preparation is None:
        raise UserError(f"--image-size has no effect on {', '.join(IN_MEMORY)}; remove this option")
    if name in EMBEDDED:
        return _embedded(name, training)
    if name in TORCHVISION:
        return _torchvision(name, training, data_dir)
    if name == "ambiguous_mnist":
        return _ambiguous_mnist(training, data_dir)
    if name == "dirty_mnist":
        ambiguous = _ambiguous_mnist(training, data_dir)
        return concat(name, _torchvision("mnist", training, data_dir), ambiguous)
    if name.startswith("folder:"):
        return _own_folder(name, split, preparation or _usual_preparation(name, image_size or 32))
    if name and name not in DATASETS and Path(name).is_dir():
        raise UserError(f"{name} is a folder; write folder:{name}")
    others = ("nonsense",) if split == "ood" else ()
    _choose_from("dataset", name, DATASETS + others)
    preparation = preparation or _usual_preparation(name, image_size)
    if name == "tiny_imagenet":
        dataset = _tiny_imagenet(training, data_dir, preparation)
    else:
        dataset = _imagenet(name, training, data_dir, preparation)
    source = SOURCES[name]
    published = source.train_rows if training else source.test_rows
    if len(dataset) != published:
        _print_once(f"note: {dataset.root} has {len(dataset):,} images; {published:,} were "
                    "published")
    return dataset


def _part(pool, name, split, seed, val_fraction):
    """The part "train" or "val" of a training set."""
    if split == "train" and val_fraction == 0:
        return pool  # in the order of the files
    if name.startswith("folder:"):
        train, val = class_split(pool.labels, seed, val_fraction)
    else:
        train, val = train_val_split(len(pool), seed, val_fraction, _groups(pool))
    if len(val) == 0 and split == "val":
        raise UserError(f"{name}: {val_fraction:g} of {len(pool)} training examples is no "
                        "validation example; take a larger share or add examples")
    return pool.select(train if split == "train" else val)


def load_sets(name, data_dir="data", *, seed=1, val_fraction=0.1, image_size=None,
              preparation=None, limit_train=None, statistics=None, ood=(), ood_required=False,
              predict=None, train_part="train"):
    """The image sets of a run: training, validation, test, OOD and predicted set, as Sets.

    train_part       "test" where nothing is trained, if the statistics are not those of a folder
    limit_train      number of training examples, see the function limit_train
    statistics       (mean, std) per channel, instead of those of the training set
    ood              names of OOD sets, see ood_sets; `ood_required`: the user named them
    predict          name of the set to predict, see predict_set

    The validation set is None if val_fraction is 0 and the folder has no part val. For the
    other options see load. Refuses sets that are too small to train on or to distribute.
    """
    read = partial(load, name, data_dir=data_dir, seed=seed, val_fraction=val_fraction,
                   image_size=image_size, preparation=preparation)
    train = read(train_part, limit=limit_train)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    if statistics is not None:
        mean, std = statistics
        train = replace(train, mean=tuple(mean), std=tuple(std))
    val = None
    if val_fraction > 0 or common.on_main(has_own_val, name):
        val = match(read("val"), train)
    test = match(read("test"), train)
    others = ood_sets(ood, train, data_dir, required=ood_required)
    predicted = predict_set(predict, train, data_dir) if predict else None
    check_sizes(train, val, test, predicted, *others.values())
    return Sets(train, val, test, others, predicted)


# ---- Published images ---------------------------------------------------------------------


def _torchvision(name, training, data_dir):
    """An ImageSet of what torchvision reads, and downloads if it is absent."""
    part = "train" if training else "test"
    options = {"split": part} if name == "svhn" else {"train": training}
    source = SOURCES[name]
    path = data_dir / source.path.format(part)
    try:
        # This also completes what a killed download has left.
        raw = TORCHVISION[name](data_dir, download=True, **options)
    except Exception as error:  # absent and truncated files raise many undocumented types
        raise _absent(name, path, f"not found or damaged: {common.one_line(error)}") from None
    images = torch.as_tensor(raw.data)
    if "mnist" in name:
        images = images.unsqueeze(1)                       # [N, 1, 28, 28]
    elif name.startswith("cifar"):
        images = images.permute(0, 3, 1, 2).contiguous()   # [N, 3, 32, 32]
    labels = torch.as_tensor(raw.labels if name == "svhn" else raw.targets).long()
    # Digits have the same names in all sets; torchvision calls them "3 - three" in MNIST.
    classes = DIGITS if name in ("mnist", "svhn") else raw.classes
    published = source.train_rows if training else source.test_rows
    if len(images) != published:
        raise _absent(name, path, f"{len(images):,} images instead of {published:,}")
    return ImageSet(name, images, labels, source.num_classes, source.mean, source.std,
                    classes=tuple(classes))


def _ambiguous_mnist(training, data_dir):
    """Ambiguous-MNIST: each image ten times in a row, with its ten sampled labels."""
    name = "ambiguous_mnist"
    source = SOURCES[name]
    folder = data_dir / source.path
    arrays = []
    for file, md5 in AMBIGUOUS_MNIST.items():
        try:
            # A file with another checksum is downloaded again.
            download_url(f"{source.site}/{file}", folder, file, md5)
            arrays.append(torch.load(folder / file, map_location="cpu", weights_only=True))
        except Exception as error:  # urllib, ssl, torchvision and torch raise several types
            reason = f"not found or damaged: {common.one_line(error)}"
            raise _absent(name, folder / file, reason) from None
    half = slice(0, 6000) if training else slice(6000, 12000)
    samples = arrays[0][half].float()                      # [6000, 1, 28, 28]
    votes = arrays[1][half].long()                         # [6000, 10]
    probs = F.one_hot(votes, 10).float().mean(1)           # [6000, 10]
    image = torch.arange(6000).repeat_interleave(10)       # [60000]
    return ImageSet(name, samples[image], votes.flatten(), 10, source.mean, source.std,
                    probs[image], groups=image, classes=tuple(DIGITS))


# ---- Folders of images --------------------------------------------------------------------

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


def set_name(name):
    """The name of a set as part of a file name.

    Of folder:PATH and PATH.npz it is the last component, without suffix; characters other
    than A-Z a-z 0-9 . _ - become "_".
    """
    if name.startswith("folder:"):
        name = _folder_path(name).resolve().name
    if name.endswith(".npz"):
        name = Path(name).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".") or "folder"


def _folder_path(name):
    path = name.removeprefix("folder:")
    if not path.strip():
        raise UserError(f"{name!r} has no path; write folder: and the path of a folder")
    return Path(path).expanduser()


def _unreadable(path, error):
    return UserError(f"{path}: unreadable ({common.one_line(error)}); replace or remove the file")


def _read_image(path, read):
    """read(file) of an image file that Pillow has opened; a UserError if it cannot be read."""
    try:
        with Image.open(path) as file:
            # Pillow would clip 16-bit integers and floats at 255.
            if file.mode[0] in "IF":
                raise ValueError(f"pixels of mode {file.mode}, expected 8 bits per channel")
            # The second frame of an MPO file, a JPEG of some cameras, is a preview.
            pages = getattr(file, "n_frames", 1)
            if pages > 1 and file.format != "MPO":
                raise ValueError(f"{pages} pages or frames, expected one")
            return read(file)
    except Exception as error:  # Pillow's readers raise many undocumented types
        raise _unreadable(path, error) from None


def _size(file):
    return file.size


def _to_rgb(file):
    """An image in RGB: upright as its EXIF tag says, transparent pixels on white."""
    image = ImageOps.exif_transpose(file)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _entries(folder):
    """The entries of a folder, sorted by name; hidden ones are no data."""
    entries = os.scandir(folder) if folder.is_dir() else ()
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in entries:
        try:
            entry.name.encode()
        except UnicodeEncodeError:
            readable = os.fsencode(entry.name).decode("utf-8", "backslashreplace")
            raise UserError(f"{folder}/{readable}: the name is not UTF-8; rename it") from None
    return sorted(entries, key=lambda entry: entry.name)


def _folders_in(folder):
    return [entry.name for entry in _entries(folder) if entry.is_dir()]


def _files_in(folder):
    # Other entries, such as pipes, could block for ever when they are read.
    return [entry.name for entry in _entries(folder) if entry.is_file()]


def _files_below(folder, above=()):
    """Sorted paths, relative to `folder`, of the files at any depth."""
    files = _files_in(folder)
    above += (folder.resolve(),)
    for name in _folders_in(folder):
        # A link to one of the folders above would lead round in a circle.
        if (folder / name).resolve() not in above:
            files += [f"{name}/{file}" for file in _files_below(folder / name, above)]
    return sorted(files)


def _images_among(files):
    return [file for file in files if file.lower().endswith(SUFFIXES)]


def _streamed(name, root, files, labels, classes, preparation):
    crop, resize, mean, std, interpolation = preparation
    return StreamedSet(name, root, tuple(files), torch.tensor(labels), max(1, len(classes)), mean,
                       std, (3, crop, crop), resize, interpolation, tuple(classes))


def _class_folders(name, root, classes, preparation, place=""):
    """A StreamedSet of the images directly in root/<class><place>."""
    files = []
    labels = []
    for label, c in enumerate(classes):
        folder = f"{c}{place}"
        images = _images_among(_files_in(root / folder))
        if not images:
            raise UserError(f"{root / folder}: no images ({' '.join(SUFFIXES)}) in it; put the "
                            "images of this class there")
        files += [f"{folder}/{image}" for image in images]
        labels += [label for _ in images]
    return _streamed(name, root, files, labels, classes, preparation)


def has_own_val(name):
    """Whether `name` is a folder of the user with validation images."""
    return name.startswith("folder:") and bool(_folders_in(_folder_path(name) / "val"))


def _own_folder(name, split, preparation):
    """A part of a folder of the user; "val" is "train" if there is no folder val."""
    root = _folder_path(name)
    if not root.is_dir():
        reason = "is a file, not a folder" if root.exists() else "not found"
        raise Absent(f"folder {root} {reason}; write folder: and the path of a folder")
    if split == "ood":
        return _all_images(name, root, preparation)
    classes = _folders_in(root / "train")
    if len(classes) < 2 or not _folders_in(root / "test"):
        raise UserError(f"folder {root}: expected {root}/train/<class>/* with two classes or more "
                        f"and {root}/test/<class>/*; {root}/val/<class>/* is for validation. "
                        "A test set is never the training set")
    part = "train" if split == "val" and not has_own_val(name) else split
    dataset = _class_folders(set_name(name), root / part, classes, preparation)
    _print_skipped(root / part, dataset.files)
    here = _places_on_disk(root / part)
    for other in ("train", "val"):
        if other != part and here & _places_on_disk(root / other):
            raise UserError(f"folder {root}: {part} and {other} share images, by a link; a test "
                            "set is never the training set")
    return dataset


def _places_on_disk(folder):
    """{(device, inode)} of all images below a folder, those of links being where they lead to."""
    statuses = [os.stat(folder / file) for file in _images_among(_files_below(folder))]
    return {(status.st_dev, status.st_ino) for status in statuses}


def _all_images(name, root, preparation):
    """All images below a folder of the user, as one class."""
    files = _images_among(_files_below(root))
    if not files:
        raise UserError(f"folder {root}: no images ({' '.join(SUFFIXES)}) in it")
    _print_skipped(root, files)
    labels = [0 for _ in files]
    return _streamed(set_name(name), root, files, labels, (), preparation)


def _print_skipped(root, used):
    """Report in one line, once, which files below `root` are not used."""
    skipped = sorted(set(_files_below(root)) - set(used))
    if skipped:
        _print_once(f"folder:{root}: skipped {len(skipped)} file(s) that are not of the types "
                    f"{' '.join(SUFFIXES)} or not directly in a class folder of train, the first "
                    f"of them: {', '.join(skipped[:3])}")


def _imagenet(name, training, data_dir, preparation):
    """ImageNet, or one of its variants, which have a test set only."""
    root = data_dir / SOURCES[name].path
    classes = _folders_in(root)
    if name == "imagenet":
        # The test set must have all classes of the training set, if that is there.
        classes = _folders_in(root / "train")
        root = root / ("train" if training else "val")
        classes = classes or _folders_in(root)
    elif training:
        raise UserError(f"{name} has a test split only")
    if not _folders_in(root):
        raise _absent(name, f"{root}/<class>/*.JPEG")
    return _class_folders(name, root, classes, preparation)


def _tiny_imagenet(training, data_dir, preparation):
    """TinyImageNet as published; its labelled validation images are the test set."""
    name = "tiny_imagenet"
    root = _place(name, data_dir, "wnids.txt")
    classes = _wnids(root)
    if training:
        return _class_folders(name, root / "train", classes, preparation, "/images")
    files = []
    labels = []
    for line in _read_file(name, root / "val" / "val_annotations.txt").split("\n"):
        file, wnid = line.split("\t")[:2]
        files.append(f"val/images/{file}")
        labels.append(classes.index(wnid))
    return _streamed(name, root, files, labels, classes, preparation)


def _wnids(root):
    """The classes of TinyImageNet, in the order of their labels."""
    return _read_file("tiny_imagenet", root / "wnids.txt").split()


# ---- Corruptions --------------------------------------------------------------------------

# The last four are extra kinds; those of ImageNet-C and Tiny-ImageNet-C are in a second archive.
CIFAR_C_KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
    "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
    "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate")
CORRUPTED = ("cifar10_c", "cifar100_c", "tiny_imagenet_c", "imagenet_c")
SEVERITIES = (1, 2, 3, 4, 5)


def corruption_kinds(name, data_dir="data"):
    """The kinds of a set of CORRUPTED that the main process finds in all five severities.

    They are in the order of CIFAR_C_KINDS. One line is printed on what is missing.
    """
    _choose_from("corrupted set", name, CORRUPTED)
    return common.on_main(_find_kinds, name, Path(data_dir))


def _find_kinds(name, data_dir):
    present = []
    missing = []
    for kind in CIFAR_C_KINDS:
        if all(path.exists() for path in _corrupted_paths(name, kind, data_dir)):
            present.append(kind)
        else:
            missing.append(kind)
    if missing:
        reason = f"lacks all or a part of {', '.join(missing)}" if present else "not found"
        common.print_on_main(str(_absent(name, _place(name, data_dir), reason)))
    return present


def _corrupted_paths(name, kind, data_dir):
    """What belongs to a kind: images and labels, or a folder for each severity."""
    root = _place(name, data_dir)
    if name.startswith("cifar"):
        return [root / f"{kind}.npy", root / "labels.npy"]
    return [root / kind / str(severity) for severity in SEVERITIES]


def corrupted_name(name, kinds):
    """`name` if `kinds` are all that were published, else a name such as imagenet_c_15of19."""
    if len(kinds) == len(CIFAR_C_KINDS):
        return name
    return f"{name}_{len(kinds)}of{len(CIFAR_C_KINDS)}"


@_together
def load_corrupted(name, kind, severity, data_dir="data", *, preparation=None):
    """A test set under one corruption at severity 1..5, in memory except for large images.

    It is read from CIFAR-10-C/<kind>.npy and labels.npy (10,000 rows per severity), from
    imagenet-c/<kind>/<severity>/<class>/* or from Tiny-ImageNet-C/<kind>/<severity>/<class>/*.
    preparation: that of the images of the clean test set [default: the usual one].
    """
    _choose_from("corrupted set", name, CORRUPTED)
    data_dir = Path(data_dir)
    title = f"{name}_{kind}_s{severity}"
    paths = _corrupted_paths(name, kind, data_dir)
    if name.startswith("cifar"):
        clean = SOURCES[name.removesuffix("_c")]
        rows = slice(severity * 10000 - 10000, severity * 10000)
        images = _read_npy(name, paths[0], (50000, 32, 32, 3), np.uint8)[rows]
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        labels = _read_npy(name, paths[1], (50000,), np.integer)[rows]
        labels = torch.from_numpy(labels.astype(np.int64))
        return ImageSet(title, torch.from_numpy(images), labels, clean.num_classes, clean.mean,
                        clean.std)
    path = paths[severity - 1]
    if not path.exists():
        raise _absent(name, path)
    preparation = preparation or _usual_preparation(name)
    # The copy must have all classes of the clean set, if that is there.
    if name == "tiny_imagenet_c":
        classes = _wnids(_place("tiny_imagenet", data_dir, "wnids.txt"))
    else:
        classes = _folders_in(data_dir / "imagenet" / "val") or _folders_in(path)
        # The files of ImageNet-C are centre crops already: they are resized as a whole.
        preparation = preparation._replace(resize=preparation.crop)
    dataset = _class_folders(title, path, classes, preparation)
    return dataset.in_memory() if dataset.shape[-1] <= SMALL else dataset


def _read_npy(name, path, shape, dtype):
    """An array of this shape and kind of numbers, mapped into memory."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _absent(name, path, common.one_line(error)) from None
    if array.shape != shape or not np.issubdtype(array.dtype, dtype):
        raise _absent(name, path, f"{array.dtype} {array.shape}, expected {shape}")
    return array


def corrupt(images, kind, severity, seed=0):
    """Images under a corruption of CORRUPTIONS at severity 1..5; equal arguments, equal results.

    images: uint8, or float32 in [0, 1], [N, C, H, W]. These corruptions are not those of
    CIFAR-10-C, and their results cannot be compared.
    """
    apply, strengths = CORRUPTIONS[kind]
    generator = _generator(seed, list(CORRUPTIONS).index(kind))
    blocks = []
    for block in images.split(1000):
        x = apply(_to_unit(block.cpu()), strengths[severity - 1], generator)
        blocks.append(_from_unit(x, images.dtype))
    return torch.cat(blocks).to(images.device)


def corrupted(dataset, kind, severity, seed=0):
    """An ImageSet under `corrupt`, named like cifar10_computed_gaussian_noise_s3."""
    if not isinstance(dataset, ImageSet) or dataset.is_features:
        raise UserError(f"{dataset.name}: corruptions can only be computed for images in memory")
    images = corrupt(dataset.images, kind, severity, seed)
    return replace(dataset, name=f"{dataset.name}_computed_{kind}_s{severity}", images=images)


# All corruptions take float32 images x [B, C, H, W] in [0, 1], a strength and a generator.


def _gaussian_noise(x, std, generator):
    return x + std * torch.randn(x.shape, generator=generator)


def _shot_noise(x, photons, generator):
    """Poisson noise; `photons` is the mean number of photons of a white pixel."""
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x, share, generator):
    """Half of the share of values becomes 0, the other half 1."""
    u = torch.rand(x.shape, generator=generator)
    return torch.where(u < share, (u > share / 2).float(), x)


def _gaussian_blur(x, std, _):
    std = std * x.shape[-1]                                            # in pixels
    reach = math.ceil(3 * std)
    offset = torch.arange(-reach, reach + 1.0)
    kernel = torch.exp(-offset**2 / (2 * std**2))
    channels = x.shape[1]
    kernel = (kernel / kernel.sum()).expand(channels, 1, 1, -1)        # [C, 1, 1, 2 reach + 1]
    x = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    x = F.conv2d(x, kernel, groups=channels)
    return F.conv2d(x, kernel.mT, groups=channels)


def _motion_blur(x, length, generator):
    """The mean along a straight path of random direction, sampled every half pixel or so."""
    angle = math.pi * torch.rand(len(x), generator=generator)
    path = torch.stack([angle.cos(), angle.sin()], 1)                  # [B, 2]
    steps = torch.linspace(-length, length, 2 * math.ceil(length * x.shape[-1]) + 1)
    return sum(_warp(x, shift=path * step) for step in steps) / len(steps)


def _brightness(x, added, _):
    return x + added


def _contrast(x, kept, _):
    return x.mean((1, 2, 3), keepdim=True).lerp(x, kept)


def _pixelate(x, kept, _):
    small = [max(1, round(kept * side)) for side in x.shape[-2:]]
    coarse = F.interpolate(x, small, mode="bilinear", antialias=True)
    return F.interpolate(coarse, x.shape[-2:], mode="nearest-exact")


def _jpeg(x, quality, _):
    decoded = []
    for image in (x * 255).round().byte():
        buffer = io.BytesIO()
        TF.to_pil_image(image).save(buffer, "jpeg", quality=quality)
        decoded.append(TF.pil_to_tensor(Image.open(buffer)))
    return _to_unit(torch.stack(decoded))


def _occlusion(x, side, generator):
    """A grey square at a random place of each image."""
    spans = []
    for size, u in zip(x.shape[-2:], torch.rand(2, len(x), 1, generator=generator)):
        length = round(side * size)
        first = (u * (size - length + 1)).long()
        place = torch.arange(size)
        spans.append((place >= first) & (place < first + length))
    rows, columns = spans                                              # [B, H], [B, W]
    square = rows[:, :, None] & columns[:, None, :]
    return x.masked_fill(square[:, None], 0.5)


def _rotation(x, degrees, generator):
    sign = 1 - 2 * torch.randint(0, 2, (len(x),), generator=generator)
    return _warp(x, angle=math.radians(degrees) * sign)


def _elastic(x, std, generator):
    return _warp(x, bend=_smooth_field(len(x), std, x.shape[-2:], generator))


def _smooth_field(n, std, size, generator):
    """Smooth random displacements [n, *size, 2], from a coarse grid of normal numbers."""
    coarse = std * torch.randn(n, 2, 4, 4, generator=generator)
    field = F.interpolate(coarse, size, mode="bicubic", align_corners=False)
    return field.permute(0, 2, 3, 1)


def _warp(x, angle=0.0, scale=1.0, shear=0.0, shift=0.0, bend=0.0, size=None, padding="border"):
    """Images x [B, C, H, W] under affine maps, resampled to [B, C, *size].

    angle (radians), scale, shear: [B] or numbers. shift [B, 2] and bend [B, *size, 2] are
    (x, y) in half sides; they move the places where the pixels of the output are read.
    """
    angle = torch.zeros(len(x)) + angle
    cos = angle.cos() / scale
    sin = angle.sin() / scale
    matrix = torch.stack([cos, cos * shear + sin, -sin, cos - sin * shear], 1)
    shift = torch.zeros(len(x), 2) + shift
    maps = torch.cat([matrix.view(-1, 2, 2), shift[:, :, None]], 2)    # [B, 2, 3]
    height, width = size or x.shape[-2:]
    grid = F.affine_grid(maps, (len(x), 1, height, width), align_corners=False)
    return F.grid_sample(x, grid + bend, padding_mode=padding, align_corners=False)


# A function and its strengths for severities 1 to 5. Lengths are shares of the image's side,
# so that images of 28, 32 and 64 pixels are degraded equally.
CORRUPTIONS = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.08, 0.13, 0.19, 0.26)),       # std
    "shot_noise": (_shot_noise, (160, 60, 28, 14, 7)),                         # photons
    "impulse_noise": (_impulse_noise, (0.01, 0.03, 0.06, 0.11, 0.18)),         # share of values
    "gaussian_blur": (_gaussian_blur, (0.015, 0.022, 0.031, 0.042, 0.055)),    # std
    "motion_blur": (_motion_blur, (0.08, 0.13, 0.18, 0.24, 0.31)),             # half the length
    "brightness": (_brightness, (0.06, 0.12, 0.19, 0.27, 0.36)),               # added
    "contrast": (_contrast, (0.75, 0.55, 0.4, 0.27, 0.16)),                    # contrast kept
    "pixelate": (_pixelate, (0.8, 0.65, 0.5, 0.4, 0.3)),                       # resolution kept
    "jpeg": (_jpeg, (60, 35, 20, 12, 6)),                                      # quality
    "occlusion": (_occlusion, (0.18, 0.27, 0.36, 0.45, 0.55)),                 # side
    "rotation": (_rotation, (8, 16, 25, 35, 46)),                              # degrees
    "elastic": (_elastic, (0.04, 0.07, 0.10, 0.14, 0.19)),                     # std
}


# ---- OOD sets and sets to predict ---------------------------------------------------------


def match(dataset, like):
    """`dataset` with the channels, size, mean and std of `like`.

    Grey is repeated, RGB becomes luma, and sizes change by antialiased bilinear interpolation.
    OOD data are always normalised with the statistics of the training set.
    """
    dataset = replace(dataset, mean=like.mean, std=like.std)
    if dataset.shape == like.shape:
        return dataset
    if dataset.is_features or like.is_features:
        raise UserError(f"{dataset.name} {dataset.shape} and {like.name} {like.shape}: images "
                        "and features cannot be compared, nor features of different numbers")
    channels, height, width = like.shape
    if isinstance(dataset, StreamedSet):
        raise UserError(f"{dataset.name}: image files that are read as {dataset.shape} cannot "
                        f"become {like.shape}; use image_size={width}")
    blocks = []
    for block in dataset.images.split(1000):
        x = _to_unit(block)
        if channels < x.shape[1]:
            x = TF.rgb_to_grayscale(x)
        x = _from_unit(TF.resize(x, [height, width]), block.dtype)
        blocks.append(x.expand(-1, channels, -1, -1))
    return replace(dataset, images=torch.cat(blocks))


def ood_sets(names, like, data_dir="data", *, required=False):
    """The OOD sets {name: set} for a training set `like`, resized and normalised like it.

    A name is that of a set of the kind of `like`, for images also folder:PATH or "nonsense", for
    features PATH.npz. `required`: the user named the sets. Then it is an error if a set is absent
    or has the name of another set; else it is skipped, which one line reports.
    """
    found = {}
    used = ("train", "val", "test", like.name)
    for name in names:
        title = set_name(name)
        try:
            if title in used or title in found:
                raise Absent(f"OOD set {name}: another set of this run is called {title}; rename "
                             "one of them or remove it")
            found[title] = replace(_other_set(name, like, data_dir), name=title)
        except Absent as error:
            if required:
                raise
            common.print_on_main(f"skipped: {error}")
    return found


def _other_set(name, like, data_dir):
    """The test part of a set of the kind of `like`, prepared and normalised like it."""
    if name.endswith(".npz"):
        return feature_set(name, like, labelled=False)
    if isinstance(like, TextSet):
        return load_text(name, "test", data_dir, like=like)
    if isinstance(like, MoleculeSet):
        target = "u0"
        if name == "qm9" and like.quantity in QM9_TARGETS:
            target = like.quantity
        return load_molecules(name, "test", data_dir, target=target)
    if name == "nonsense":
        return nonsense(like)
    size = None
    if like.preparation is None and name.startswith(("folder:", "imagenet")):
        # TinyImageNet is small enough to be resized in memory, as published.
        size = like.shape[-1]
    dataset = load(name, "ood", data_dir, image_size=size, preparation=like.preparation)
    if isinstance(dataset, StreamedSet) and isinstance(like, ImageSet):
        dataset = common.on_each_machine(dataset.in_memory)
    return match(dataset, like)


def predict_set(name, like, data_dir="data"):
    """The set `name`, read like an OOD set, with labels that mean what those of `like` mean.

    Labels are translated by the names of the classes; for a folder these are the folders that
    the images lie in. They are -1 (molecules: NaN) where they are unknown. `files` names the
    images of a folder and of "nonsense", or the rows of an .npz file.
    """
    dataset = _other_set(name, like, data_dir)
    if isinstance(dataset, MoleculeSet) and dataset.quantity != like.quantity:
        return replace(dataset, labels=torch.full_like(dataset.labels, math.nan))
    if name.endswith(".npz") or isinstance(dataset, MoleculeSet):
        return dataset
    if name.startswith("folder:"):
        names = [Path(file).parent.name for file in dataset.files]
    else:
        classes = dict(enumerate(dataset.classes))
        names = [classes.get(label) for label in dataset.labels.tolist()]
    labels = _numbers_of(names, like.classes)
    return replace(dataset, labels=labels, num_classes=like.num_classes, classes=like.classes)


def _numbers_of(names, classes):
    """int64 [N]: the places of the names in `classes`, -1 for other names."""
    label_of = {c: label for label, c in enumerate(classes)}
    return torch.tensor([label_of.get(name, -1) for name in names])


def nonsense(like):
    """The set "nonsense": 70 images that belong to no class, each with a name in `files`.

    They have the shape (C, H, W) and the statistics of the image set `like`; equal shapes give
    equal images. The ten of a kind differ in shade, number of squares, direction or random draw.
    """
    if like.is_features:
        raise UserError(f"nonsense are images, but {like.name} has features")
    _, height, width = like.shape
    y = (torch.arange(height)[:, None] + 0.5) / height                 # [H, 1], in (0, 1)
    x = (torch.arange(width) + 0.5) / width                            # [W]
    generator = _generator(2105)
    images = {}
    for number in range(10):
        row = (y * (number + 2)).long()
        column = (x * (number + 2)).long()
        angle = 2 * math.pi * number / 10
        ramp = math.cos(angle) * (x - 0.5) + math.sin(angle) * (y - 0.5)
        kinds = {
            "black": torch.tensor(0.01 * number),
            "white": torch.tensor(1 - 0.01 * number),
            "checkerboard": (row + column) % 2.0,
            "stripes": row % 2.0,
            "gradient": 0.5 + ramp / math.sqrt(2),
            "uniform_noise": torch.rand(like.shape, generator=generator),
            "gaussian_noise": 0.5 + 0.25 * torch.randn(like.shape, generator=generator),
        }
        for kind, image in kinds.items():
            images[f"{kind}-{number}"] = _from_unit(image, torch.uint8).expand(like.shape)
    files = tuple(sorted(images))
    pixels = torch.stack([images[file] for file in files])
    return ImageSet("nonsense", pixels, torch.full((len(files),), -1), like.num_classes, like.mean,
                    like.std, classes=like.classes, files=files)


# ---- Features -----------------------------------------------------------------------------

MOST_CLASSES = 1_000_000  # a larger label is an error: memory is allocated for each class


def load_arrays(path, names, optional=()):
    """{name: array} of an .npz file: all of `names`, and those of `optional` that it has."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = ", ".join(file) or "nothing"
            wanted = list(names) + [name for name in optional if name in file]
            return {name: file[name] for name in wanted}
    except FileNotFoundError:
        raise UserError(f"file not found: {path}") from None
    except KeyError:
        raise UserError(f"{path} needs the arrays {', '.join(names)}; it has {found}") from None
    except Exception:  # NumPy raises many types for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None


@dataclass(frozen=True, eq=False)
class Features(_Rows):
    """N rows of features, as an .npz file has them."""

    values: Tensor          # [N, D], in the floating dtype of the file
    labels: Tensor          # int64 [N], from 0, or -1 where unknown
    classes: tuple = ()     # names in the order of the labels, where known
    files: tuple = ()       # names of the rows, where known

    of_rows = ("values", "labels", "files")


def read_features(path, dim=None, *, labelled=False, classes=()):
    """The Features in the arrays of an .npz file: 'features' [N, D], 'labels' [N], 'names' [N].

    Labels are numbers from 0 or names of classes; they and the names of the rows may be absent.

    dim       D must be this number
    labelled  labels must be there; if they are names, these are the classes, in sorted order
    classes   otherwise, names of classes, such as those of the training features; labels that
              are not among them are unknown
    """
    needed = ("features", "labels") if labelled else ("features",)
    arrays = load_arrays(path, needed, ("labels", "names"))
    values = arrays["features"]
    shape = list(values.shape)
    if len(shape) != 2 or 0 in shape or shape[1] != (dim or shape[1]):
        raise UserError(f"{path}: 'features' must be [N, {dim or 'D'}], not {shape}")
    if values.dtype.kind not in "fiu":
        raise UserError(f"{path}: 'features' must hold numbers")
    # The comparison is false for NaN.
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise UserError(f"{path}: 'features' contain NaN, infinity or numbers that exceed float32")
    # PyTorch has neither long doubles nor other byte orders.
    if values.dtype not in (np.float16, np.float32, np.float64):
        values = values.astype(np.float64)
    n = len(values)
    labels = torch.full((n,), -1)
    if "labels" in arrays:
        if labelled and arrays["labels"].dtype.kind == "U":
            classes = tuple(np.unique(arrays["labels"]).tolist())
        labels = _read_labels(path, arrays["labels"], n, classes)
    names = arrays.get("names", np.array([], str))
    if names.dtype.kind != "U" or names.shape not in ((0,), (n,)):
        raise UserError(f"{path}: 'names' must be [{n}] texts")
    return Features(torch.from_numpy(values), labels, classes, tuple(names.tolist()))


def _read_labels(path, labels, n, classes):
    """int64 [n]: labels of an .npz file as numbers of the classes, -1 where unknown."""
    if labels.shape == (n,) and labels.dtype.kind == "U":
        return _numbers_of(labels.tolist(), classes)
    whole = labels.shape == (n,) and labels.dtype.kind in "iu"
    if not whole or labels.min() < 0 or labels.max() >= MOST_CLASSES:
        raise UserError(f"{path}: 'labels' must be [{n}] names, or integers from 0, below "
                        f"{MOST_CLASSES:,}")
    numbers = torch.from_numpy(labels.astype(np.int64))
    if classes:
        return torch.full_like(numbers, -1)  # they do not tell which of the names is meant
    return numbers


@_together
def feature_set(path, like=None, *, labelled=True):
    """The Features of an .npz file as an ImageSet [N, D, 1, 1], which the Loader standardises.

    Mean and std are those of each feature in the file (std 1 where it is constant), or those of
    the feature set `like`, to whose classes all labels belong; unless `labelled`, those that do
    not, or are absent, are -1.
    """
    name = set_name(str(path))
    if like is not None:
        if not like.is_features:
            raise UserError(f"{path}: features cannot be compared with {like.name}, which has "
                            "none")
        features = read_features(path, like.shape[0], classes=like.classes)
        labels = features.labels.where(features.labels < like.num_classes, -1)
        if labelled and (labels < 0).any():
            raise UserError(f"{path}: 'labels' must be [{len(labels)}] classes of {like.name}")
        return replace(like, name=name, images=features.values[:, :, None, None], labels=labels,
                       files=features.files)
    features = read_features(path, labelled=True)
    values = features.values.double()
    std, mean = torch.std_mean(values, 0, correction=0)
    low, high = values.aminmax(dim=0)
    # Of a constant, the computed std may be a rounding error.
    std[(low == high) | (std == 0)] = 1
    return ImageSet(name, features.values[:, :, None, None], features.labels,
                    int(features.labels.max()) + 1, tuple(mean.tolist()), tuple(std.tolist()),
                    classes=features.classes, files=features.files)


# ---- Batches ------------------------------------------------------------------------------

# The piece of a global batch that belongs to this process, on the device. labels: [b]. index:
# int64 [b], the rows of the set. global_size: number of rows over all processes.
# images: float32 [b, C, H, W], normalised. tokens: int64 [b, L], padded with 0.
Batch = namedtuple("Batch", "images labels index global_size")
TextBatch = namedtuple("TextBatch", "tokens labels index global_size")
MoleculeBatch = namedtuple("MoleculeBatch", "molecules labels index global_size")


class Molecules(NamedTuple):
    """Molecules as one graph.

    Any two atoms of a molecule that are closer than the cutoff have an edge in both
    directions; no atom has an edge to itself.
    """

    numbers: Tensor         # int64 [a], atomic numbers
    positions: Tensor       # float32 [a, 3], angstrom
    molecule: Tensor        # int64 [a], in 0..count-1, ascending
    sources: Tensor         # int64 [e], atoms in 0..a-1
    targets: Tensor         # int64 [e], ascending
    count: int              # number of molecules


class _Batches:
    """What both loaders share: global batches, of which each process gets a contiguous piece.

    The pieces of a batch differ by one row at most; in the last batch they may be empty.
    Together they are the batch of a single process.

    limit_steps   an epoch ends after this number of batches
    drop_last     an epoch has no smaller batch, unless it has no other one
    """

    def __init__(self, dataset, batch_size, device, seed, shuffle, limit_steps, drop_last):
        check_sizes(dataset, limit=batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.seed = seed
        self.shuffle = shuffle
        self.steps = math.ceil(len(dataset) / batch_size)
        if drop_last:
            self.steps = max(1, len(dataset) // batch_size)
        if limit_steps is not None:
            self.steps = min(self.steps, limit_steps)
        self.labels = dataset.labels.to(self.device)

    def __len__(self):
        """Number of steps in an epoch, the same for all processes."""
        return self.steps

    def epoch(self, epoch=0):
        """Iterate over this process's pieces of the batches of an epoch."""
        return itertools.islice(self._batches(epoch), self.steps)

    def _order(self, generator):
        """int64 [N]: the rows in the order of this epoch."""
        if self.shuffle:
            return torch.randperm(len(self.dataset), generator=generator)
        return torch.arange(len(self.dataset))

    def _piece(self, batch):
        """This process's piece [b] of a global batch [B] of rows."""
        return batch.tensor_split(common.world_size())[common.rank()]


PADDING = {"crop_flip": "constant", "reflect_crop_flip": "reflect"}  # the modes of numpy.pad


class Loader(_Batches):
    """Batches of an ImageSet or a StreamedSet, in an order determined by (seed, epoch).

    augment    "none"; "crop_flip" pads with 4 black pixels, crops and flips at random;
               "reflect_crop_flip" mirrors the border instead. Files: random resized crop and
               flip in both cases
    workers    number of processes that decode a StreamedSet, at most one for each core
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False,
                 limit_steps=None, drop_last=False, augment="none", workers=0,
                 channels_last=False):
        super().__init__(dataset, batch_size, device, seed, shuffle, limit_steps, drop_last)
        if augment != "none" and dataset.is_features:
            raise UserError(f"{dataset.name}: {augment} would destroy features; augment images")
        self.augment = augment
        self.workers = min(workers, os.cpu_count() or 1)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.streamed = isinstance(dataset, StreamedSet)
        # Images are normalised on the scale on which they arrive: (x - shift) * scale. Features
        # may vary little about a large mean, which takes float64.
        white = 255 if self.streamed or dataset.images.dtype == torch.uint8 else 1
        dtype = torch.float64 if dataset.is_features else torch.float32
        mean, std = torch.tensor([dataset.mean, dataset.std], dtype=torch.float64) * white
        self.shift = mean.to(dtype).view(-1, 1, 1).to(self.device)
        self.scale = (1 / std).to(dtype).view(-1, 1, 1).to(self.device)
        if not self.streamed:
            images = dataset.images
            if augment != "none":
                border = [(0, 0), (0, 0), (4, 4), (4, 4)]
                images = np.pad(images.cpu().numpy(), border, PADDING[augment])
                images = torch.from_numpy(images)
            self.images = images.to(self.device)

    def _batches(self, epoch):
        generator = _loader_generator(self.seed, epoch)
        order = self._order(generator)
        if self.streamed:
            return self._stream(order, generator, epoch)
        if self.augment == "none":
            return self._gather(order)
        return self._gather_crops(order, generator)

    def _gather(self, order):
        for batch in order.to(self.device).split(self.batch_size):
            rows = self._piece(batch)
            images = self._normalise(self.images[rows])
            yield Batch(images, self.labels[rows], rows, len(batch))

    def _gather_crops(self, order, generator):
        n = len(order)
        corners = torch.randint(0, 9, (2, n), generator=generator)
        flips = torch.randint(0, 2, (n,), generator=generator)
        # The whole epoch goes to the device at once, so that no batch waits for it.
        order = order.to(self.device)
        dy, dx = corners.to(self.device)
        flips = flips.to(self.device)
        # A view of all crops, [N, C, 9, 9, H, W], which takes no memory.
        _, height, width = self.dataset.shape
        crops = self.images.unfold(2, height, 1).unfold(3, width, 1)
        for batch in torch.arange(n, device=self.device).split(self.batch_size):
            at = self._piece(batch)
            rows = order[at]
            x = crops[rows, :, dy[at], dx[at]]                         # [b, C, H, W]
            # index_select copies whole images; torch.where, byte by byte, takes five times longer.
            chosen = torch.arange(len(rows), device=self.device) + len(rows) * flips[at]
            x = torch.cat([x, x.flip(3)]).index_select(0, chosen)
            yield Batch(self._normalise(x), self.labels[rows], rows, len(batch))

    def _stream(self, order, generator, epoch):
        batches = order.split(self.batch_size)
        pieces = [self._piece(batch) for batch in batches]
        key = None if self.augment == "none" else (self.seed, epoch)
        # With a generator of its own, DataLoader leaves the global one alone.
        decoded = iter(DataLoader(
            replace(self.dataset, key=key),
            batch_sampler=[piece.tolist() for piece in pieces if len(piece)],
            num_workers=self.workers, pin_memory=self.device.type == "cuda",
            generator=generator))
        for batch, rows in zip(batches, pieces):
            images = torch.empty(0, *self.dataset.shape)
            try:
                if len(rows):
                    images = next(decoded)
            except UserError as error:
                # A worker's error comes with its traceback in the message.
                message = str(error).rsplit("UserError: ", 1)[-1]
                raise UserError(message.strip()) from None
            images = images.to(self.device, non_blocking=True)
            rows = rows.to(self.device, non_blocking=True)
            yield Batch(self._normalise(images), self.labels[rows], rows, len(batch))

    def _normalise(self, x):
        x = x.to(self.shift.dtype, memory_format=self.format)
        return x.sub_(self.shift).mul_(self.scale).float()


class SequenceLoader(_Batches):
    """Batches of a TextSet or a MoleculeSet, in an order determined by (seed, epoch).

    Sentences are padded to the longest of the global batch. Without `shuffle` they come by rising
    length, so that little is padded. cutoff (angstrom) is that of the edges of molecules, which
    are found here, once.
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False,
                 limit_steps=None, drop_last=False, cutoff=5.0):
        super().__init__(dataset, batch_size, device, seed, shuffle, limit_steps, drop_last)
        if isinstance(dataset, MoleculeSet):
            self.sources, self.targets, self.counts = find_edges(dataset, cutoff)

    def _batches(self, epoch):
        order = self._order(_loader_generator(self.seed, epoch))
        is_text = isinstance(self.dataset, TextSet)
        if is_text and not self.shuffle:
            order = self.dataset.lengths.argsort(stable=True)
        for batch in order.split(self.batch_size):
            rows = self._piece(batch)
            if is_text:
                longest = int(self.dataset.lengths[batch].max())
                make = partial(TextBatch, self._tokens(rows, longest))
            else:
                make = partial(MoleculeBatch, self._molecules(rows))
            rows = rows.to(self.device, non_blocking=True)
            yield make(self.labels[rows], rows, len(batch))

    def _tokens(self, rows, longest):
        part = self.dataset.select(rows)
        is_token = torch.arange(longest) < part.lengths[:, None]
        tokens = torch.zeros(is_token.shape, dtype=torch.int64)        # [b, L]
        tokens[is_token] = part.tokens.long()
        return tokens.to(self.device, non_blocking=True)

    def _molecules(self, rows):
        part = self.dataset.select(rows)
        molecule = torch.arange(len(rows)).repeat_interleave(part.sizes)
        # Edges count atoms within their molecule; in the graph these follow each other.
        first_atom = part.sizes.cumsum(0) - part.sizes                 # [b]
        shift = first_atom.repeat_interleave(self.counts[rows])        # [e]
        edges = entries_of(rows, self.counts)                          # [e]
        columns = (part.numbers, part.positions.float(), molecule, self.sources[edges] + shift,
                   self.targets[edges] + shift)
        on_device = [column.to(self.device, non_blocking=True) for column in columns]
        return Molecules(*on_device, len(rows))


def find_edges(dataset, cutoff=5.0):
    """(sources int16 [E], targets int16 [E], counts int64 [N]) of the edges of each molecule.

    Edges lead from each atom to all others of its molecule that are closer than `cutoff`. Atoms
    are counted within their molecule, and edges are sorted by molecule, then by target.
    """
    sources = []
    targets = []
    counts = []
    for places in dataset.positions.split(dataset.sizes.tolist()):
        # The matrix product that cdist may use instead would round the distances.
        mode = "donot_use_mm_for_euclid_dist"
        near = torch.cdist(places, places, compute_mode=mode) < cutoff
        near.fill_diagonal_(False)
        target, source = near.nonzero(as_tuple=True)
        sources.append(source.short())
        targets.append(target.short())
        counts.append(len(source))
    return torch.cat(sources), torch.cat(targets), torch.tensor(counts)


# ---- Pretrained networks ------------------------------------------------------------------


def preparation_of(model, weights, image_size=None):
    """The Preparation of images for torchvision/NAME; None for other networks.

    It is that of torchvision's default weights, also for a file of weights, which was probably
    fine-tuned from them. For the weights "none" it is ResNet-18's: 224 pixels and the statistics
    of ImageNet. `image_size` replaces the crop, and the resizing in proportion.
    """
    if not model.startswith("torchvision/"):
        return None
    name = _torchvision_name(model)
    if weights == "none":
        name = "resnet18"
    published = models.get_model_weights(name).DEFAULT.transforms()
    crop = published.crop_size[0]
    resize = published.resize_size[0]
    if image_size is not None:
        resize = round(image_size * resize / crop)
        crop = image_size
    return Preparation(crop, resize, tuple(published.mean), tuple(published.std),
                       published.interpolation)


def _torchvision_name(model):
    """NAME of torchvision/NAME, which must be an image classifier that ends in a linear layer."""
    name = model.removeprefix("torchvision/")
    if name not in models.list_models(module=models, exclude="squeezenet*"):
        raise UserError(f"--model {model}: not an image classifier of torchvision that ends in a "
                        "linear layer; use resnet18, resnet50, convnext_tiny, efficientnet_b0, "
                        "mobilenet_v3_large, vit_b_16, swin_t or a relative of theirs")
    return name


def is_pretrained(args):
    """Whether --model and --weights are those of a network that was trained elsewhere."""
    return args.model.startswith("torchvision/") and args.weights != "none"


def backbone_and_head(args, networks, num_classes, shape, epochs=None):
    """The network --model for images of `shape` (C, H, W), as (backbone, linear head).

    The backbone makes features [B, D]. networks: the table NETWORKS of a script, whose functions
    return the backbone (a module, a list of layers, or layers by name) and D; or a whole
    classifier, whose head is replaced if it has other classes. For features [D, 1, 1] of --freeze,
    it is a head alone. epochs: those for which this network is trained [default: --epochs].
    """
    is_trained = (args.epochs if epochs is None else epochs) > 0
    if args.freeze and tuple(shape[1:]) == (1, 1):
        if not is_trained:
            raise UserError("--freeze trains a new last layer, for one epoch or more")
        return nn.Flatten(), nn.Linear(shape[0], num_classes)
    if args.model.startswith("torchvision/"):
        # --eval restores what was trained: the file of its first weights need not be there.
        return pretrained_network(args.model, args.weights or "DEFAULT", num_classes, shape,
                                  args.image_size, is_trained=is_trained,
                                  is_restored=args.eval and is_trained)
    if args.model not in networks:
        raise UserError(f"--model {args.model}: choose one of {', '.join(networks)}, or "
                        "torchvision/NAME")
    made = networks[args.model](args, shape)
    if isinstance(made, nn.Module):
        backbone, head = split_head(made, args.model, shape)
        return backbone, _fit_head(head, num_classes, args.model, is_trained)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], int)):
        raise UserError(f"--model {args.model}: its function must return a classifier, or the "
                        "layers before the head and the number of their features")
    backbone, dim = made
    if isinstance(backbone, dict):
        backbone = nn.Sequential(OrderedDict(backbone))
    elif not isinstance(backbone, nn.Module):
        backbone = nn.Sequential(*backbone)
    found = list(_outputs_of_one_image(backbone, args.model, shape).shape)
    if found != [1, dim]:
        raise UserError(f"--model {args.model}: its layers make outputs {found} of one image, but "
                        f"its function returns {dim} as the number of features, which needs "
                        f"[1, {dim}]")
    return backbone, nn.Linear(dim, num_classes)


def pretrained_network(model, weights, num_classes, shape, image_size=None, *, is_trained=True,
                       is_restored=False):
    """torchvision/NAME for images of `shape` (C, H, W), as (backbone, linear head).

    weights      "DEFAULT": torchvision's, which are downloaded; "none": random ones; else a file,
                 whose head may have other classes
    image_size   to which the backbone resizes images of another size; None is the size of the
                 weights for "DEFAULT", and the size of the images otherwise
    is_trained   whether the network will be trained: otherwise a new head is refused
    is_restored  whether it will get all its weights from a checkpoint: these here are not loaded
    """
    name = _torchvision_name(model)
    if shape[0] not in (1, 3):
        raise UserError(f"--model {model} takes images of one or three channels, not {shape[0]}")
    published_size = preparation_of(model, weights).crop
    size = image_size or shape[-1]
    if image_size is None and weights == "DEFAULT":
        size = published_size
    options = {}
    if name.startswith("vit_") and size % int(name[-2:]) == 0:  # vit_b_16 has patches of 16 pixels
        options["image_size"] = size
    if name in ("googlenet", "inception_v3"):
        # With weights of ImageNet, these two have a normalisation of their own.
        options.update(init_weights=True, transform_input=weights != "none")
    net = models.get_model(name, num_classes=num_classes, **options)
    _switch_off_auxiliary(net)
    if weights != "none" and not is_restored:
        if weights == "DEFAULT":
            state = common.on_each_machine(_download_weights, name)
        else:
            state = read_state_dict(weights)
        _load_weights(net, state, model, weights)
    advice = f"use --image-size {published_size}, or another --model"
    backbone, head = split_head(net, model, (3, size, size), advice)
    if tuple(shape) != (3, size, size):
        backbone = nn.Sequential(FitImages(size), backbone)
    return backbone, _fit_head(head, num_classes, model, is_trained)


# What training code puts around a state dict: a key of a checkpoint, and prefixes of all names.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = re.compile(r"((module|model|net|backbone|_orig_mod)\.)*")


def read_state_dict(path):
    """The state dict {name: tensor} in a file of torch.save, on the CPU.

    It may lie under one of STATE_DICT_KEYS, and all its names may begin with PREFIXES.
    """
    state = common.load_tensors(path)
    for key in STATE_DICT_KEYS:
        if isinstance(state.get(key), dict):
            state = state[key]
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path} is no state dict: {name!r} is no tensor; give a file of "
                            "torch.save(net.state_dict(), FILE)")
    if not state or not common.all_finite(state):
        raise UserError(f"{path}: the state dict is empty, or a weight is not finite")
    prefixes = PREFIXES.match(os.path.commonprefix(list(state)))[0]
    for prefix in prefixes.split(".")[:-1]:
        # This also renames the versions of the layers, which MNASNet needs.
        consume_prefix_in_state_dict_if_present(state, f"{prefix}.")
    return state


def _download_weights(name):
    """The state dict of torchvision's default weights."""
    weights = models.get_model_weights(name).DEFAULT
    try:
        return weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except Exception as error:  # of many types: no network, no space, a damaged file
        raise UserError(f"--weights DEFAULT: {weights.url} cannot be downloaded to "
                        f"{torch.hub.get_dir()}/checkpoints, or not be read there "
                        f"({common.one_line(error)}); try again, or give a file") from None


def _load_weights(net, state, model, weights):
    """Load a state dict into a network of torchvision, which gets a head of as many classes."""
    name = _linear_layers(net)[0]
    head = net.get_submodule(name)
    if f"{name}.weight" in state:
        rows = len(state[f"{name}.weight"])
        net.set_submodule(name, nn.Linear(head.in_features, rows, head.bias is not None))
    # Some prefixes are still there if another name has none.
    stripped = OrderedDict((PREFIXES.sub("", key, count=1), state[key]) for key in state)
    if len(stripped) == len(state):
        stripped._metadata = getattr(state, "_metadata", None)  # the versions of the layers
        state = stripped
    for key in list(state):
        value = state.pop(key)
        if not key.startswith(AUXILIARY):
            # DenseNet's weights still have old names: "denselayer1.norm.1" is now "norm1".
            state[re.sub(r"(denselayer\d+\.\w+)\.(\d)", r"\1\2", key)] = value
    expected = net.state_dict()
    # Files of PyTorch 0.4 have no number of batches.
    missing = [key for key in expected if key not in state and "num_batches" not in key]
    left_over = [key for key in state if key not in expected]
    # Quantised weights are integers.
    integers = [key for key in expected if expected[key].is_floating_point() and key in state
                and not state[key].is_floating_point()]
    problem = ""
    for what, names in (("missing", missing), ("left over", left_over), ("integers", integers)):
        if names:
            problem += f"{len(names)} {what} ({', '.join(names[:3])}); "
    try:
        # With such names, PyTorch's own message would be long.
        if not problem:
            net.load_state_dict(state)
    except (RuntimeError, ValueError) as error:  # other shapes
        problem = f"{common.one_line(error)}; "
    if problem:
        raise UserError(f"--weights {weights} does not fit {model}: {problem}give the --model and "
                        "--image-size that it was trained with")


# The auxiliary classifiers of GoogLeNet and Inception v3, which only training from scratch uses.
AUXILIARY = ("aux1", "aux2", "AuxLogits")


def _switch_off_auxiliary(net):
    """Let a network that has auxiliary classifiers return nothing but logits in training, too."""
    if hasattr(net, "aux_logits"):
        net.aux_logits = False
        for name in AUXILIARY:
            setattr(net, name, None)


def _linear_layers(net):
    """The names of the linear layers of a network, the last one first."""
    layers = net.named_modules()
    return [name for name, layer in layers if name and isinstance(layer, nn.Linear)][::-1]


USUAL_ADVICE = "use another --model or --image-size"


def split_head(net, model, shape, advice=USUAL_ADVICE):
    """Split a classifier into (backbone, head): the head is the linear layer that it ends in.

    The backbone is `net` without it, and without auxiliary outputs. One image shows that the head
    makes the classifier's outputs of the backbone's.
    """
    _switch_off_auxiliary(net)
    logits = _outputs_of_one_image(net, model, shape, advice)
    for name in _linear_layers(net):  # the head need not be the last that the class names
        head = net.get_submodule(name)
        net.set_submodule(name, nn.Identity())
        # Without this layer, the network may fail.
        with contextlib.suppress(UserError, AttributeError, TypeError, LookupError):
            features = _outputs_of_one_image(net, model, shape, advice)
            sizes = [(1, head.in_features), (1, head.out_features)]
            if [features.shape, logits.shape] == sizes and torch.allclose(head(features), logits):
                if head.bias is None:
                    head.bias = nn.Parameter(torch.zeros(head.out_features))
                return net, head
        net.set_submodule(name, head)
    raise UserError(f"--model {model}: its last layer is not a linear layer that makes logits "
                    "[B, K] of features [B, D]; let its function return the layers before the "
                    "head, and the number of their features")


def _outputs_of_one_image(net, model, shape, advice=USUAL_ADVICE):
    """What a network makes of one image of `shape`, on the CPU.

    In eval mode it draws no random numbers and changes no statistics of batch norm: what is
    trained later does not depend on this check.
    """
    image = torch.linspace(-1, 1, math.prod(shape)).view(1, *shape)
    net.eval()
    try:
        with torch.no_grad():
            outputs = net(image)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"--model {model} fails on images {tuple(shape)}: "
                        f"{common.one_line(error)}; {advice}") from None
    net.train()
    if not isinstance(outputs, Tensor):
        raise UserError(f"--model {model}: it must return a tensor, not {type(outputs).__name__}")
    return outputs


def _fit_head(head, num_classes, model, is_trained):
    """A linear head as it is if it has `num_classes`, or else a new one, which must be trained."""
    if head.out_features == num_classes:
        if not is_trained:
            _print_once(f"{model}: output k of its head is taken for class k of the data; classes "
                        "in folders are counted in alphabetical order")
        return head
    if not is_trained:
        raise UserError(f"--model {model}: its head has {head.out_features} classes, the data have "
                        f"{num_classes}; train a new head, for one epoch or more")
    _print_once(f"{model}: new head: {num_classes} classes instead of {head.out_features}")
    return nn.Linear(head.in_features, num_classes)


class FitImages(nn.Module):
    """Repeat grey images to three channels, and resize images to `size` pixels per side."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        x = x.expand(-1, 3, -1, -1)
        if x.shape[-1] != self.size:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return x


def frozen_features(sets, args):
    """The Sets of a run with features in place of images, for --freeze.

    They are those of torchvision/NAME, which is not trained, computed once, without augmentation,
    see with_features. `backbone_and_head` then gives a new head for them.
    """
    _print_once(f"{args.model}: a new head is trained on its features; ms and bytes are that "
                "head's")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)  # for --weights none
        backbone, _ = pretrained_network(args.model, args.weights or "DEFAULT",
                                         sets.train.num_classes, sets.train.shape, args.image_size)
    backbone = backbone.to(args.device, memory_format=torch.channels_last)
    train = with_features(backbone, sets.train, args)

    def computed(dataset):
        return None if dataset is None else with_features(backbone, dataset, args, like=train)

    ood = {name: computed(dataset) for name, dataset in sets.ood.items()}
    return Sets(train, computed(sets.val), computed(sets.test), ood, computed(sets.predict))


@torch.no_grad()
def with_features(backbone, dataset, args, like=None):
    """A set with features [N, D, 1, 1] in place of its images, by the backbone in eval mode.

    They are normalised like the set of features `like`. Without it, the mean of each feature
    becomes 0, and the mean squared length of a row 512, that of as many standard normal numbers: a
    learning rate and a weight decay then suit all backbones. All processes call this together.
    """
    backbone.eval()
    loader = Loader(dataset, max(128, common.world_size()), args.device, workers=args.workers,
                    channels_last=True)
    batches = []
    for batch in loader.epoch():
        with common.autocast(args):
            features = backbone(batch.images)              # [b, D]
        batches.append({"index": batch.index, "features": features.float()})
    features = common.broadcast(common.gather_rows(batches))["features"]
    if like is None:
        mean = features.double().mean(0)                   # [D]
        squared_length = (features - mean).square().sum(1).mean()
        std = (squared_length / 512).sqrt().clamp_min(1e-12).expand_as(mean)
        statistics = (tuple(mean.tolist()), tuple(std.tolist()))
    else:
        statistics = (like.mean, like.std)
    found = ImageSet(dataset.name, features[:, :, None, None], dataset.labels,
                     dataset.num_classes, *statistics,
                     label_probs=getattr(dataset, "label_probs", None),
                     groups=getattr(dataset, "groups", None), classes=dataset.classes,
                     files=dataset.files)
    # Checkpoints are made from images and weights: rounding differs with the number of processes.
    vars(found)["digest"] = f"{digest(dataset)} {common.digest(backbone)}"
    return found


def origin(train_set, args):
    """What the training of a network depends on beside the options: {plural noun: digest}.

    All processes call this together.
    """
    made_from = {"training images": digest(train_set)}
    path = args.weights
    is_file = path and path not in ("DEFAULT", "none")
    # A finished network can be evaluated without it.
    if is_file and not (args.eval and not common.on_main(os.path.exists, path)):
        made_from["initial weights"] = common.on_main(_file_digest, path)
    return made_from


def _file_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# ---- Embedded images ----------------------------------------------------------------------


@lru_cache(maxsize=None)
def _embedded(name, training):
    """The training set or the test set of a name in EMBEDDED."""
    prints = EMBEDDED[name]
    if name == "dirty_glyphs":
        clean = _embedded("glyphs", training).select(slice(8000))
        ambiguous = _embedded("glyphs_ambiguous", training).select(slice(8000))
        dirty = concat(name, clean, ambiguous)
        return replace(dirty, mean=(prints.mean,), std=(prints.std,))
    n = prints.train_rows if training else prints.test_rows
    generator = _generator(2102, list(EMBEDDED).index(name), training)
    if name.endswith("ambiguous"):
        return _blends(name, n, generator, training)
    labels = torch.randperm(n, generator=generator) % len(prints.texts)
    images = _print(_draw_ink(name, labels, generator), generator)
    return _grey_set(name, images, labels)


def _grey_set(name, images, labels):
    prints = EMBEDDED[name]
    return ImageSet(name, images, labels, len(prints.texts), (prints.mean,), (prints.std,),
                    classes=tuple(prints.texts))


def _blends(name, n, generator, training):
    """Two texts over each other; the label is the first one with probability `weight`.

    Digits lie a little apart, and each image of their training set occurs twice, as one group.
    """
    num_classes = len(EMBEDDED[name].texts)
    first = torch.randperm(n, generator=generator) % num_classes
    step = torch.randint(1, num_classes, (n,), generator=generator)
    second = (first + step) % num_classes
    apart = 0.0
    rows = torch.arange(n)
    if name == "glyphs_ambiguous":
        angle = 2 * math.pi * torch.rand(n, generator=generator)
        apart = 0.25 * torch.stack([angle.cos(), angle.sin()], 1)      # [n, 2]
        if training:
            rows = rows.repeat_interleave(2)
    weight = 0.35 + 0.3 * torch.rand(n, 1, generator=generator)        # [n, 1]
    one = _draw_ink(name, first, generator, apart)
    other = _draw_ink(name, second, generator, -apart)
    share = weight[:, :, None, None]
    ink = (share * one + (1 - share) * other) / torch.maximum(share, 1 - share)
    ink = ink.clamp_(0, 1)
    # The order of the draws determines the images.
    if name == "glyphs_ambiguous":
        images = _print(ink, generator)
        u = torch.rand(len(rows), generator=generator)
    else:
        u = torch.rand(len(rows), generator=generator)
        images = _print(ink, generator)
    labels = torch.where(u < weight[rows, 0], first[rows], second[rows])
    probs = weight * F.one_hot(first, num_classes) + (1 - weight) * F.one_hot(second, num_classes)
    dataset = _grey_set(name, images[rows], labels)
    return replace(dataset, label_probs=probs[rows], groups=rows)


def _draw_ink(name, labels, generator, apart=0.0):
    """Ink in [0, 1], float32 [N, 1, 28, 28]: texts of random stroke width, warped.

    apart: a fixed shift [N, 2] in half sides.
    """
    n = len(labels)
    style = EMBEDDED[name].style
    templates = _templates(name)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    stroke = uniform(0, len(templates) - 1.001)
    angle = uniform(-style.tilt, style.tilt) * math.pi / 180
    scale = uniform(*style.scale)
    shear = uniform(-style.shear, style.shear)
    shift = uniform(-style.shift, style.shift, 2) + apart
    bend = _smooth_field(n, style.bend, (28, 28), generator)
    blocks = []
    for rows in torch.arange(n).split(1000):
        # Widths between those of the templates are interpolated.
        width = stroke[rows].long()
        thin = templates[width, labels[rows]]                          # [b, 56, 56]
        thick = templates[width + 1, labels[rows]]
        ink = thin.lerp(thick, (stroke[rows] % 1)[:, None, None])[:, None]
        blocks.append(_warp(ink, angle[rows], scale[rows], shear[rows], shift[rows], bend[rows],
                            (28, 28), padding="zeros"))
    return torch.cat(blocks)


def _templates(name):
    """float32 [S, T, 56, 56]: the T texts of a set, centred, at S growing stroke widths."""
    texts, font_size, strokes, *_ = EMBEDDED[name]
    font = ImageFont.load_default(font_size)
    pages = []
    for stroke in strokes:
        for text in texts:
            left, top, right, bottom = font.getbbox(text, stroke_width=stroke)
            corner = (28 - (left + right) / 2, 28 - (top + bottom) / 2)
            page = Image.new("L", (56, 56))
            ImageDraw.Draw(page).text(corner, text, 255, font, stroke_width=stroke)
            pages.append(TF.pil_to_tensor(page))
    return _to_unit(torch.cat(pages)).view(len(strokes), len(texts), 56, 56)


def _print(ink, generator):
    """uint8 [N, 1, 28, 28]: ink in a random grey on a random ground, with pixel noise."""
    ground, grey, noise = torch.rand(3, len(ink), 1, 1, 1, generator=generator)
    x = (0.15 * ground).lerp(0.65 + 0.35 * grey, ink)
    x += (0.02 + 0.06 * noise) * torch.randn(ink.shape, generator=generator)
    return _from_unit(x, torch.uint8)


# ---- Texts --------------------------------------------------------------------------------


@_together
def load_text(name, split, data_dir="data", *, vocab_file=None, like=None):
    """A set of TEXTS as a TextSet; its splits are fixed.

    split       "train", "val" or "test"; for those of sst2 see sst2_has_test_labels
    vocab_file  BERT's vocab.txt, with a word piece per line. By default the vocabulary of
                sst2 is made of its training sentences, and that of reviews and reviews_finance
                of those of both: like BERT's, it has words that the training set lacks, so
                that unknown words do not give OOD data away
    like        a TextSet, such as the training set, whose vocabulary is used instead
    """
    _choose_from("dataset", name, TEXTS)
    folder = Path(data_dir) / SOURCES["sst2"].path
    sentences, labels = _read_sentences(name, split, folder)
    if like is not None:
        vocab = like.vocab
    elif vocab_file is not None:
        vocab = read_vocabulary(vocab_file)
    else:
        sources = ["sst2"] if name == "sst2" else ["reviews", "reviews_finance"]
        known = []
        for source in sources:
            known += _read_sentences(source, "train", folder)[0]
        vocab = vocabulary(known)
    tokens, lengths = tokenise(sentences, vocab)
    # Reports on companies are neither negative nor positive.
    classes = () if name == "reviews_finance" else ("negative", "positive")
    return TextSet(name, tokens, lengths, labels, 2, vocab, classes)


def sst2_has_test_labels(data_dir="data"):
    """Whether SST-2/test.tsv is labelled; then the splits are those that were published.

    GLUE withholds the labels. Then "test" is dev.tsv, and "val" is 2,000 rows of train.tsv (a
    tenth of short files). As train.tsv also has phrases of its sentences as rows, this "val"
    is easier than "test", and what is fitted to it is too confident.
    """
    path = Path(data_dir) / SOURCES["sst2"].path / "test.tsv"
    return _read_file("sst2", path).startswith("sentence\tlabel\n")


def _read_sentences(name, split, folder):
    """(sentences, labels int64 [N]) of a split."""
    if name != "sst2":
        return _embedded_texts(name, split)
    if sst2_has_test_labels(folder.parent):
        file = "dev" if split == "val" else split
        return _read_tsv(folder / f"{file}.tsv")
    if split == "test":
        return _read_tsv(folder / "dev.tsv")
    sentences, labels = _read_tsv(folder / "train.tsv")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    num_val = min(2000, len(labels) // 10)
    rows = order[:num_val] if split == "val" else order[num_val:].sort().values
    return [sentences[row] for row in rows.tolist()], labels[rows]


def _read_tsv(path):
    """(sentences, labels int64 [N]) of rows sentence<TAB>label, without quoting."""
    header, *lines = _read_file("sst2", path).split("\n")
    if header != "sentence\tlabel" or not lines:
        raise _absent("sst2", path, "expected a header sentence<TAB>label, and rows")
    sentences = []
    labels = []
    for number, line in enumerate(lines, start=2):
        sentence, _, label = line.partition("\t")
        if not sentence.strip() or label not in ("0", "1"):
            raise UserError(f"{path}, line {number}: {line[:80]!r}; expected sentence<TAB>label, "
                            "label 0 or 1")
        sentences.append(sentence)
        labels.append(int(label))
    return sentences, torch.tensor(labels)


def _read_file(name, path):
    """A UTF-8 text with Unix line ends, without the last one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _absent(name, path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    # Split at "\n" only: splitlines also cuts at characters that occur within lines.
    return text.replace("\r\n", "\n").removesuffix("\n")


# ---- Word pieces --------------------------------------------------------------------------

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Chinese, Japanese and Korean characters are words of their own.
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF),
       (0x2F800, 0x2FA1F))


def read_vocabulary(path):
    """BERT's vocab.txt as a tuple: line i is the word piece of id i, [PAD] is the first."""
    path = Path(path)
    pieces = _read_file("sst2", path).split("\n") if path.exists() else [""]
    if pieces[0] != "[PAD]" or not set(SPECIAL[:4]) <= set(pieces):
        raise UserError(f"{path}: expected BERT's vocab.txt, a word piece per line, [PAD] first, "
                        "with [UNK], [CLS], [SEP]; it is at "
                        "https://huggingface.co/google-bert/bert-base-uncased")
    return tuple(pieces)


def vocabulary(sentences, size=30522):
    """At most `size` word pieces of these sentences.

    BERT's special tokens; every character c, then every ##c; then the words that occur at
    least twice, by falling frequency, those of equal frequency in alphabetical order.
    """
    counts = Counter()
    for sentence in sentences:
        counts.update(_words(sentence))
    characters = sorted(set("".join(counts)))
    continued = ["##" + c for c in characters]
    frequent = [word for word, count in counts.items() if count > 1 and len(word) > 1]
    frequent.sort(key=lambda word: (-counts[word], word))
    return tuple(SPECIAL + characters + continued + frequent)[:size]


def tokenise(sentences, vocab, max_length=268):
    """BERT's uncased WordPiece: (tokens int32 [T], lengths int64 [N]).

    Each word is cut from the left into the longest pieces of `vocab`. A word that cannot be
    cut, or has more than 100 characters, is [UNK]. A sentence keeps its first max_length - 2
    pieces, between [CLS] and [SEP].
    """
    ids = {piece: number for number, piece in enumerate(vocab)}
    cut = lru_cache(maxsize=None)(partial(_word_pieces, ids=ids))  # each word is cut once
    tokens = []
    lengths = []
    for sentence in sentences:
        pieces = []
        for word in _words(sentence):
            pieces += cut(word)
        pieces = pieces[:max_length - 2]
        tokens += [ids["[CLS]"]] + pieces + [ids["[SEP]"]]
        lengths.append(len(pieces) + 2)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64)


def _words(text):
    """Words in lower case and without accents; punctuation and CJK are words of their own."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    return "".join(map(_character, decomposed)).split()


@lru_cache(maxsize=None)
def _character(c):
    """What becomes of a decomposed character in lower case."""
    category = unicodedata.category(c)
    if c in "\t\n\r" or category == "Zs":
        return " "
    # the replacement character, control characters, accents
    if c == "\ufffd" or category[0] == "C" or category == "Mn":
        return ""
    # All ASCII signs are punctuation, also "$" and "^", which Unicode calls symbols.
    is_sign = category[0] == "P" or (c.isascii() and not c.isalnum())
    is_cjk = any(low <= ord(c) <= high for low, high in CJK)
    return f" {c} " if is_sign or is_cjk else c


def _word_pieces(word, ids):
    """The ids of the longest pieces from the left, or that of [UNK]."""
    pieces = []
    start = 0
    while start < len(word) <= 100:
        mark = "##" if start > 0 else ""
        end = len(word)
        while end > start and mark + word[start:end] not in ids:
            end -= 1
        if end == start:
            return [ids["[UNK]"]]
        pieces.append(ids[mark + word[start:end]])
        start = end
    return pieces or [ids["[UNK]"]]


# ---- Molecules ----------------------------------------------------------------------------

# units as in PyTorch Geometric's copy of the set
HARTREE = 27.211386246          # eV
KCAL_PER_MOL = 0.04336414       # eV
# The factor from the published unit to ours: energies are in eV, all else as published.
QM9_TARGETS = {
    "A": 1, "B": 1, "C": 1, "mu": 1, "alpha": 1, "r2": 1, "cv": 1,
    "homo": HARTREE, "lumo": HARTREE, "gap": HARTREE, "zpve": HARTREE,
    "u0": HARTREE, "u298": HARTREE, "h298": HARTREE, "g298": HARTREE,
    "u0_atom": KCAL_PER_MOL, "u298_atom": KCAL_PER_MOL,
    "h298_atom": KCAL_PER_MOL, "g298_atom": KCAL_PER_MOL,
}
QM9_ROWS = 130831  # molecules that are published and not omitted
QM9_ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
# Energies at 0 K of free atoms of these elements, in hartree, as published.
QM9_ATOMS = [-0.500273, -37.846772, -54.583861, -75.064579, -99.718730]


@_together
def load_molecules(name, split, data_dir="data", *, target="u0"):
    """A set of MOLECULES as a MoleculeSet; its splits are fixed.

    split   "train", "val" or "test". Those of qm9 are the published ones if all 130,831
            molecules are there, else the same shares of a permutation drawn in the same way
    target  one of QM9_TARGETS, for qm9; the clusters only have their energy, as "u0"
    """
    _choose_from("dataset", name, MOLECULES)
    _choose_from("target", target, QM9_TARGETS if name == "qm9" else ("u0",))
    if name == "qm9":
        dataset = _qm9(_place(name, Path(data_dir), "gdb9.sdf"), target)
        order = np.random.default_rng(0).permutation(len(dataset))
        share = len(dataset) / QM9_ROWS
        ends = (round(share * 110000), round(share * 120000))
    else:
        dataset = _clusters(name)
        order = np.arange(len(dataset))
        ends = (4000, 4500)
    parts = torch.from_numpy(order).tensor_split(ends)
    return dataset.select(parts[SPLITS.index(split)])


def atom_references(target="u0"):
    """float64 [101]: energies of free atoms in eV, by atomic number; zeros if there are none.

    Those at 0 K serve all total energies. What heat adds to free atoms, 1 eV per molecule for
    u298 and h298 and -6 eV for g298, remains to be learned.
    """
    references = torch.zeros(101, dtype=torch.float64)
    if target in ("u0", "u298", "h298", "g298"):
        elements = list(QM9_ELEMENTS.values())
        references[elements] = torch.tensor(QM9_ATOMS, dtype=torch.float64) * HARTREE
    return references


@lru_cache(maxsize=1)
def _qm9(folder, target):
    """The molecules gdb_N of gdb9.sdf, by rising N, each with its target of gdb9.sdf.csv.

    As in PyTorch Geometric, those whose N begins a line of uncharacterized.txt are omitted.
    """
    path = folder / "gdb9.sdf"
    molecules = _read_molecules(path)
    values = _read_targets(folder / "gdb9.sdf.csv", target)
    if molecules.keys() != values.keys():
        raise _absent("qm9", path, f"its molecules ({len(molecules)}) are not those of "
                                   f"gdb9.sdf.csv ({len(values)})")
    for line in _read_file("qm9", folder / "uncharacterized.txt").split("\n"):
        if line.strip()[:1].isdecimal():
            molecules.pop(int(line.split()[0]), None)
    if len(molecules) != QM9_ROWS:
        _print_once(f"note: {path} has {len(molecules):,} molecules; {QM9_ROWS:,} were published")
    numbers = []
    positions = []
    sizes = []
    labels = []
    for number in sorted(molecules):
        elements, places = molecules[number]
        numbers += elements
        positions += places
        sizes.append(len(elements))
        labels.append(values[number])
    labels = torch.tensor(labels, dtype=torch.float64)
    return MoleculeSet("qm9", torch.tensor(numbers), torch.tensor(positions, dtype=torch.float64),
                       torch.tensor(sizes), labels * QM9_TARGETS[target],
                       atom_references(target), quantity=target)


def _read_molecules(path):
    """{N: (atomic numbers, (x, y, z) in angstrom)} of the molecules gdb_N of gdb9.sdf."""
    molecules = {}
    for place, block in enumerate(_read_file("qm9", path).split("$$$$\n"), start=1):
        elements = []
        places = []
        try:
            title, _, _, counts, *lines = block.split("\n")
            for atom in range(int(counts[:3])):
                x, y, z, symbol = lines[atom].split()[:4]
                elements.append(QM9_ELEMENTS[symbol])
                places.append((_number(x), _number(y), _number(z)))
            if not elements:
                raise ValueError("no atoms")
            _enter(molecules, title, (elements, places))
        except (ValueError, IndexError, KeyError) as error:
            raise _absent("qm9", path, f"molecule {place}: {common.one_line(error)}") from None
    return molecules


def _read_targets(path, target):
    """{N: value} of a column of gdb9.sdf.csv."""
    header, *rows = _read_file("qm9", path).split("\n")
    titles = header.split(",")
    values = {}
    for line, row in enumerate(rows, start=2):
        try:
            columns = dict(zip(titles, row.split(","), strict=True))
            _enter(values, columns["mol_id"], _number(columns[target]))
        except (ValueError, KeyError) as error:
            raise _absent("qm9", path, f"line {line}: {common.one_line(error)}") from None
    return values


def _enter(table, title, value):
    """Put what gdb_N has into {N: value}; a ValueError if it is there with another value."""
    number = int(title.removeprefix("gdb_"))
    if table.setdefault(number, value) != value:
        raise ValueError(f"{title} occurs twice, with different values")


def _number(text):
    """A finite number; a ValueError for anything else."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


# ---- Embedded molecules and texts ---------------------------------------------------------

# Covalent radii in angstrom, by atomic number; with that of no atom, 0, all q_ij are 0.
RADII = [-math.inf, 0.35, 0, 0, 0, 0, 0.76, 0.71, 0.66]


def pair_energy(numbers, positions):
    """Energy of molecules in eV, float64 [...], under the potential of the clusters.

    sum_i ref(Z_i) + sum_{i<j} 3.5 (q_ij^2 - 2 q_ij),  q_ij = exp(-1.7 (d_ij - r_i - r_j)),

    with distances d and covalent radii r in angstrom: each pair has a well of 3.5 eV.

    numbers    int64 [..., n]: 1, 6, 7 or 8; 0 is no atom
    positions  float64 [..., n, 3], angstrom
    """
    radius = torch.tensor(RADII, dtype=torch.float64)[numbers]         # [..., n]
    contact = radius[..., None] + radius[..., None, :]                 # [..., n, n]
    offset = positions[..., None, :] - positions[..., None, :, :]
    q = torch.exp(-1.7 * (offset.square().sum(-1).sqrt() - contact))
    pairs = 3.5 * (q.square() - 2 * q).triu(1)
    return atom_references()[numbers].sum(-1) + pairs.sum((-2, -1))


@lru_cache(maxsize=None)
def _clusters(name):
    """All 5,500 molecules of clusters (4 to 10 atoms) or clusters_large (11 to 16).

    Their atoms are random elements at random sites of a grid, from which they are displaced.
    """
    smallest, largest = (4, 10) if name == "clusters" else (11, 16)
    n = 5500
    generator = _generator(2103, smallest)
    sizes = torch.randint(smallest, largest + 1, (n,), generator=generator)
    elements = torch.tensor([1, 1, 1, 6, 6, 7, 8])
    drawn = torch.randint(0, len(elements), (n, largest), generator=generator)
    numbers = elements[drawn]
    line = 1.3 * torch.arange(3, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line, line)                      # [27, 3]
    sites = torch.rand(n, len(grid), generator=generator).argsort(1)[:, :largest]
    shift = torch.randn(n, largest, 3, dtype=torch.float64, generator=generator)
    positions = grid[sites] + 0.1 * shift                              # [n, largest, 3]
    is_atom = torch.arange(largest) < sizes[:, None]
    energies = pair_energy(numbers.where(is_atom, 0), positions)
    return MoleculeSet(name, numbers[is_atom], positions[is_atom], sizes, energies,
                       atom_references(), quantity="energy of a cluster")


# An empty entry leaves the slot of a sentence empty; the more of them, the more often.
SUBJECTS = ("the film, the plot, the acting, this one, the dialogue, the pacing, the lead actor, "
            "the ending, the director 's cut").split(", ")
NEGATIONS = (", , , , , , , , , , , , , , not, never, hardly").split(", ")
DEGREES = (", , , , very, really, quite, a little, from start to finish").split(", ")
# Pairs of opposites; the later ones are rarer.
PRAISE = (
    "good great funny clever moving superb charming fresh smart brilliant warm gripping sharp "
    "lovely honest witty tender wonderful vivid elegant rich daring graceful splendid").split()
BLAME = (
    "bad dull boring awful silly weak flat terrible stale tedious clumsy cheap lazy horrible "
    "bland messy hollow dreadful shallow sloppy tired grating forced abysmal").split()
COMPANIES = ("the bank, the carmaker, the retailer, an oil producer, the chip maker, a drug firm, "
             "the airline, the insurer").split(", ")
REPORTS = "reports, expects, confirms, publishes, files, discusses, repeats".split(", ")
FIGURES = ("quarterly revenue, annual results, a dividend, its tax rate, a bond sale, capital "
           "spending, second half sales, operating costs").split(", ")
CONTEXTS = (", as markets open, ahead of the central bank meeting, after the annual meeting, "
            "in line with forecasts").split(", ")
TEXT_ROWS = {"train": slice(6000), "val": slice(6000, 6500), "test": slice(6500, 7500)}
TIMES = ", on monday, on friday, this quarter, for the fiscal year, analysts say".split(", ")


@lru_cache(maxsize=None)
def _embedded_texts(name, split):
    """(sentences, labels int64): 6,000, 500 or 1,000 of 7,500 different sentences."""
    generator = random.Random(2104)
    make = _review if name == "reviews" else _finance_report
    label_of = {}
    while len(label_of) < 7500:
        sentence, label = make(generator)
        label_of[" ".join(sentence.split())] = label
    rows = TEXT_ROWS[split]
    labels = torch.tensor(list(label_of.values()))
    return list(label_of)[rows], labels[rows]


def _review(generator):
    """(sentence, label) of one opinion, or of two of which the one after "but" decides."""
    first, label = _opinion(generator)
    if generator.random() < 0.5:
        return first, label
    second, label = _opinion(generator)
    return f"{first} , but {second}", label


def _opinion(generator):
    """(text, label) of a clause such as "the plot is not very good"."""
    adjectives, label = generator.choice([(BLAME, 0), (PRAISE, 1)])
    weights = [(rank + 1) ** -1.2 for rank in range(len(adjectives))]
    adjective = generator.choices(adjectives, weights)[0]
    negation = generator.choice(NEGATIONS)
    if negation:
        label = 1 - label
    subject = generator.choice(SUBJECTS)
    degree = generator.choice(DEGREES)
    return f"{subject} is {negation} {degree} {adjective}", label


def _finance_report(generator):
    """(sentence, 0) of a report such as "the bank files annual results on monday"."""
    slots = [COMPANIES, REPORTS, FIGURES, CONTEXTS, TIMES]
    return " ".join(generator.choice(slot) for slot in slots), 0
