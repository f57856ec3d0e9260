"""Data of the scripts: loaders, augmentation, corruptions, OOD sets and embedded sets.

    splits = load_splits(args, seed=1)             # args: the options of a script
    splits.train                                   # 45,000 images of CIFAR-10, uint8, in memory
    splits.ood["svhn"]                             # normalised with the statistics of splits.train
    for batch in Loader(splits.train, 128, "cuda", shuffle=True, augment="crop_flip").epoch(3):
        batch.images                               # float32, normalised, on the device

    train = load_text("sst2", "train", "data")     # or load_molecules("qm9", "train", "data")
    for batch in SequenceLoader(train, 16, "cuda", shuffle=True).epoch(3):
        batch.tokens                               # int64, padded with 0, on the device

Small image sets are an `ImageSet`: uint8 tensors that the `Loader` keeps on the device, where it
crops, flips and normalises whole batches. Large images are a `StreamedSet`: files that are decoded
by worker processes. Sentences are a `TextSet`, molecules a `MoleculeSet`. `DATASETS`, `TEXTS` and
`MOLECULES` list the names of all sets; `fingerprint` identifies what a set holds. Functions that
read a set must be called by all processes together. Errors that the user can fix are
`common.UserError`s of one line.
"""

import hashlib
import math
import os
import random
import time
import unicodedata
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets as tv
from torchvision import models
from torchvision.datasets.utils import download_url
from torchvision.transforms import InterpolationMode, RandomHorizontalFlip, RandomResizedCrop
from torchvision.transforms import functional as TF
from torchvision.transforms.v2.functional import jpeg

import common
from common import UserError

# ---- Sources ------------------------------------------------------------------------------


class Source(NamedTuple):
    """The place of a published set, its classes, and how it is normalised."""

    path: str               # relative to the data directory
    site: str               # where its publisher offers it
    num_classes: int = 0    # 0: one for each class folder
    mean: tuple = ()        # per channel, of pixels in [0, 1], as published
    std: tuple = ()
    side: int = 0           # pixels per side of images that are read from files


SOURCES = {
    "mnist": Source("MNIST/raw", "https://ossci-datasets.s3.amazonaws.com/mnist",
                    10, (0.1307,), (0.3081,)),
    "fashion_mnist": Source("FashionMNIST/raw", "https://github.com/zalandoresearch/fashion-mnist",
                            10, (0.2860,), (0.3530,)),
    # This published std is the mean of the stds within each image; that of all training pixels is
    # (0.2470, 0.2435, 0.2616).
    "cifar10": Source("cifar-10-batches-py", "https://www.cs.toronto.edu/~kriz/cifar.html",
                      10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": Source("cifar-100-python", "https://www.cs.toronto.edu/~kriz/cifar.html",
                       100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": Source("{}_32x32.mat", "http://ufldl.stanford.edu/housenumbers",
                   10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "ambiguous_mnist": Source(
        "AmbiguousMNIST",
        "https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0",
        10, (0.1307,), (0.3081,)),
    # These statistics are published on a scale of 0 to 255.
    "tiny_imagenet": Source(
        "tiny-imagenet-200", "http://cs231n.stanford.edu/tiny-imagenet-200.zip", 0,
        (122.4786 / 255, 114.2755 / 255, 101.3963 / 255),
        (70.4924 / 255, 68.5679 / 255, 71.8127 / 255), 64),
    "imagenet": Source("imagenet", "https://www.image-net.org (sort val into class folders)",
                       0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224),
    "imagenet_a": Source("imagenet-a", "https://github.com/hendrycks/natural-adv-examples"),
    "imagenet_o": Source("imagenet-o", "https://github.com/hendrycks/natural-adv-examples"),
    "imagenet_r": Source("imagenet-r", "https://github.com/hendrycks/imagenet-r"),
    "cifar10_c": Source("CIFAR-10-C", "https://zenodo.org/records/2535967"),
    "cifar100_c": Source("CIFAR-100-C", "https://zenodo.org/records/3555552"),
    "tiny_imagenet_c": Source("Tiny-ImageNet-C", "https://zenodo.org/records/8206060"),
    "imagenet_c": Source("imagenet-c", "https://zenodo.org/records/2235448"),
    # The test set of GLUE has no labels.
    "sst2": Source("SST-2", "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip (labelled test "
                   "set: https://huggingface.co/datasets/SetFit/sst2)"),
    "qm9": Source("QM9", "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/molnet_publish/"
                  "qm9.zip"),
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


class DatasetNotFound(UserError):
    """A set cannot be used: it is missing, damaged, or has the name of another set."""


def _not_found(name, path, reason="not found"):
    site = SOURCES[name].site
    return DatasetNotFound(f"{name}: {path}: {reason}; get it from {site} and save it at this path")


def _choose_from(what, value, choices):
    if value not in choices:
        raise UserError(f"{what} {value!r} is unknown; choose from {', '.join(map(str, choices))}")


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


class Transform(NamedTuple):
    """How image files are resized, cropped in the centre and normalised."""

    crop: int               # side of the crop, in pixels
    resize: int | list      # size of the shorter side before it, or [height, width]
    mean: tuple             # per channel, of pixels in [0, 1]
    std: tuple
    interpolation: InterpolationMode = InterpolationMode.BILINEAR


class _Rows:
    """What all kinds of sets share: N rows that can be selected."""

    of_rows = ()            # names of the fields with one entry per row
    of_entries = ()         # names of the fields with several entries per row ...
    counts = ""             # ... and of the field with their numbers
    is_features = False     # whether the rows are vectors instead of pictures

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: slice | Tensor | list) -> "Dataset":
        """Make a set of the rows `index`: a slice, integers [n] or a mask [N]."""
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
    transform: Transform | None = None  # that of files that were read into memory

    of_rows = ("images", "labels", "label_probs", "groups", "files")

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)."""
        return tuple(self.images.shape[1:])

    @property
    def is_features(self) -> bool:
        """Whether the rows are vectors, with height and width 1."""
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
    def transform(self) -> Transform:
        """The Transform that prepares other files in the same way."""
        return Transform(self.shape[-1], self.resize, self.mean, self.std, self.interpolation)

    def __getitem__(self, row: int) -> Tensor:
        """File `row` as uint8 [3, S, S]: a centre crop, or with a key a random crop and flip."""
        image = _read_image(self.root / self.files[row], _to_rgb)
        if self.key is None:
            image = TF.resize(image, self.resize, self.interpolation)
            return TF.pil_to_tensor(TF.center_crop(image, self.shape[-1]))
        crop = RandomResizedCrop(self.shape[1:], interpolation=self.interpolation)
        flip = RandomHorizontalFlip()
        # They draw from the default generator, which is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_loader_generator(*self.key, row).get_state())
            return TF.pil_to_tensor(flip(crop(image)))

    def _read_all(self, read):
        """read(row) of all rows, by a pool of threads; one error for all unreadable files."""
        # Pillow releases the interpreter's lock while it decodes.
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(read, row) for row in range(len(self))]
        errors = [call.exception() for call in calls if isinstance(call.exception(), UserError)]
        if errors:
            raise UserError(f"{self.name}: {len(errors)} unreadable image(s), the first of them: "
                            f"{', '.join(map(str, errors[:3]))}")
        return [call.result() for call in calls]

    def in_memory(self) -> ImageSet:
        """Decode all files into an ImageSet."""
        images = torch.stack(self._read_all(self.__getitem__))
        return ImageSet(self.name, images, self.labels, self.num_classes, self.mean, self.std,
                        classes=self.classes, files=self.files, transform=self.transform)

    def check_headers(self):
        """Refuse files whose headers tell that they cannot be read; nothing is decoded."""
        self._read_all(lambda row: _read_image(self.root / self.files[row], attrgetter("size")))


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
    labels: Tensor          # float64 [N], eV; float32 would round QM9's energies by 1 meV
    references: Tensor      # float64 [101], eV, see atom_references
    quantity: str = ""      # what the labels are; only equal quantities can be compared

    of_rows = ("sizes", "labels")
    of_entries = ("numbers", "positions")
    counts = "sizes"


Images = ImageSet | StreamedSet
Dataset = ImageSet | StreamedSet | TextSet | MoleculeSet


def entries_of(rows: Tensor, counts: Tensor) -> Tensor:
    """Positions (int64) of the entries of `rows`, where row i has counts[i] entries in turn."""
    starts = counts.cumsum(0) - counts                     # [N]
    selected = counts[rows]                                # [n]
    new_starts = selected.cumsum(0) - selected             # [n]
    shift = (starts[rows] - new_starts).repeat_interleave(selected)
    return torch.arange(len(shift)) + shift


UNSEEN = ("name", "root", "files", "key", "transform")  # fields that training does not see
FEW_BYTES = 256e6  # image files that are streamed are compared by their content up to this size


def fingerprint(*datasets: Dataset) -> str:
    """Compute the hexadecimal SHA-256 of all that training sees of one set, or of several.

    It covers pixels, tokens or atoms, labels, label_probs, groups, statistics and names of
    classes, but not the name of a set. Streamed files count by their relative names and their
    content, or, if they have more than FEW_BYTES together, their sizes; the time of their last
    change does not matter. All processes call this together; the main process computes it.
    """
    return common.on_main(_hash, datasets)


def _hash(datasets):
    content = hashlib.sha256()
    for dataset in datasets:
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
            paths = [dataset.root / file for file in dataset.files]
            sizes = [path.stat().st_size for path in paths]
            content.update(f"{dataset.files} {sizes}\n".encode())
            if sum(sizes) <= FEW_BYTES:
                content.update("".join(map(_file_hash, paths)).encode())
    return content.hexdigest()


def _file_hash(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def concat(name: str, first: ImageSet, second: ImageSet) -> ImageSet:
    """Join two image sets: the rows of `first`, then those of `second`, normalised like `first`.

    Bytes become numbers in [0, 1] if only one set has bytes. Where a set has no label_probs, they
    are its labels, one-hot; where it has no groups, each row is one.
    """
    images = [first.images, second.images]
    if first.images.dtype != second.images.dtype:
        images = [_to_unit(first.images), _to_unit(second.images)]
    label_probs = torch.cat([_label_probs(first), _label_probs(second)])
    first_groups = _groups(first)
    second_groups = _groups(second) + first_groups.max() + 1
    return replace(first, name=name, images=torch.cat(images),
                   labels=torch.cat([first.labels, second.labels]), label_probs=label_probs,
                   groups=torch.cat([first_groups, second_groups]), files=())


def _label_probs(dataset):
    if dataset.label_probs is None:
        return F.one_hot(dataset.labels, dataset.num_classes).float()
    return dataset.label_probs


def _groups(dataset):
    """int64 [N]: the groups of any set."""
    groups = getattr(dataset, "groups", None)
    return torch.arange(len(dataset)) if groups is None else groups


# ---- Splits and subsets -------------------------------------------------------------------


def train_val_split(n: int, seed: int, val_fraction: float = 0.1,
                    groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split the rows 0..n-1 at random into (train, val), int64 row numbers.

    Published: a legacy NumPy shuffle of 0..n-1, of which the first floor(val_fraction n) are
    for validation. With groups (int64 [n]), the groups are shuffled and counted instead, and
    the rows of a group stay together.
    """
    group_of_rows = np.arange(n) if groups is None else groups.numpy()
    names, group = np.unique(group_of_rows, return_inverse=True)
    order = np.random.RandomState(seed).permutation(len(names))
    rank = np.argsort(order)[group]                        # [n] rank of each row's group
    rows = torch.from_numpy(np.argsort(rank, kind="stable"))
    num_val = int((rank < math.floor(val_fraction * len(names))).sum())
    return rows[num_val:], rows[:num_val]


def class_split(labels: Tensor, seed: int, val_fraction: float = 0.1) -> tuple[Tensor, Tensor]:
    """Split rows into (train, val), int64 row numbers, ascending; classes keep their shares.

    floor(val_fraction n) rows are for validation, but at least one row of each class is not.
    """
    labels = labels.numpy()
    num_train = len(labels) - math.floor(val_fraction * len(labels))
    num_train = max(num_train, len(np.unique(labels)))
    order = torch.from_numpy(_by_shares(labels, seed))
    return order[:num_train].sort().values, order[num_train:].sort().values


def stratified_subset(dataset: Dataset, limit: int | None) -> Dataset:
    """Select at most `limit` rows of a set, in their order; all rows if limit is None.

    They are drawn at random, always the same, so that classes keep their shares and all classes
    are represented while the limit allows it. Groups stay whole: of an ambiguous image, all
    labels are selected, or none. Where labels are real numbers, rows are at equal intervals.
    """
    n = len(dataset)
    if limit is None or limit >= n:
        return dataset
    if dataset.labels.is_floating_point():
        return dataset.select(torch.arange(limit) * n // limit)
    labels = dataset.labels.numpy()
    if getattr(dataset, "groups", None) is None:
        rows = _by_shares(labels, seed=0)[:limit]
    else:
        rows = _groups_by_shares(labels, dataset.groups.numpy(), limit, seed=0)
    return dataset.select(torch.from_numpy(np.sort(rows)))


def _by_shares(labels, seed):
    """The rows 0..n-1, shuffled so that classes have their shares among the first of them.

    The m rows of a class are at 0, 1 / m, 2 / m, ... of the way, so that each class is represented
    as soon as possible.
    """
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    by_class = labels[shuffled].argsort(kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    place = np.empty(len(labels))
    place[by_class] = np.concatenate([np.arange(size) / size for size in sizes])
    return shuffled[place.argsort(kind="stable")]


def _groups_by_shares(labels, groups, limit, seed):
    """At most `limit` rows that are whole groups, in which all labels keep their shares.

    Groups of different sizes take turns by their shares. Of the groups of a size, the next one is
    the next at random that has a row of the label whose share of selected rows is the smallest.
    """
    _, labels = np.unique(labels, return_inverse=True)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    rows_of_groups = np.split(group.argsort(kind="stable"), sizes.cumsum()[:-1])
    waiting = defaultdict(deque)  # {(size, label): the rows of groups, in random order}
    for number in np.random.RandomState(seed).permutation(len(sizes)):
        rows = rows_of_groups[number]
        for label in set(labels[rows]):
            waiting[len(rows), label].append(rows)
    totals = np.bincount(labels)                           # [K]
    counts = np.zeros(len(totals))                         # [K] of selected rows
    is_selected = np.zeros(len(labels), bool)              # [N]
    for size in sizes[_by_shares(sizes, seed)]:
        if counts.sum() + size > limit:
            break
        for label in (counts / totals).argsort(kind="stable"):
            queue = waiting[size, label]
            # A group waits for each of its labels.
            while queue and is_selected[queue[0][0]]:
                queue.popleft()
            if queue:
                rows = queue.popleft()
                is_selected[rows] = True
                counts += np.bincount(labels[rows], minlength=len(counts))
                break
    return is_selected.nonzero()[0]


def limit_train(dataset: Dataset, limit: int | None) -> Dataset:
    """Call `stratified_subset` for a training set; refuse a limit that loses a class."""
    limited = stratified_subset(dataset, limit)
    if not dataset.labels.is_floating_point():
        lost = set(dataset.labels.tolist()) - set(limited.labels.tolist())
        if lost:
            raise UserError(f"{dataset.name}: {limit} training example(s) leave out {len(lost)} "
                            "class(es); raise --limit-train")
    return limited


def check_sizes(*datasets: Dataset | None, limit: float = math.inf):
    """Refuse sets that are too small to be distributed over the processes.

    Call it before training. Entries may be None; `limit` is the number of rows that are
    distributed at a time.
    """
    processes = common.world_size()
    for dataset in datasets:
        if dataset is not None and min(len(dataset), limit) < processes:
            raise UserError(f"{dataset.name}: {min(len(dataset), limit)} example(s) cannot be "
                            f"distributed over {processes} process(es); use fewer processes, add "
                            "examples or remove the set")


# ---- Loading ------------------------------------------------------------------------------

SMALL = 64  # images in files are kept in memory if no side has more pixels than this


def transform_of(args) -> Transform | None:
    """Look up how images are prepared for --model torchvision/NAME; None for other networks.

    It is the Transform of torchvision's default weights, also for a file of weights, which was
    probably fine-tuned from them, and that of ResNet-18 for --weights none. --image-size replaces
    the crop, and changes the resizing in proportion.
    """
    if not args.model.startswith("torchvision/"):
        return None
    name = common.torchvision_name(args.model)
    if args.weights == "none":
        name = "resnet18"
    published = models.get_model_weights(name).DEFAULT.transforms()
    crop = args.image_size or published.crop_size[0]
    resize = round(crop * published.resize_size[0] / published.crop_size[0])
    return Transform(crop, resize, tuple(published.mean), tuple(published.std),
                     published.interpolation)


def _usual_transform(name, image_size=None):
    # Variants of ImageNet and folders of the user are normalised like ImageNet.
    source = SOURCES["imagenet"]
    if name.startswith("tiny_imagenet"):
        source = SOURCES["tiny_imagenet"]
    side = image_size or source.side
    # Small images keep the whole shorter side; of large ones the centre is cut, as published.
    resize = side if side <= SMALL else round(side * 256 / 224)
    return Transform(side, resize, source.mean, source.std)


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
def load(name: str, split: str, data_dir: str | Path = "data", *, image_size: int | None = None,
         transform: Transform | None = None) -> Images:
    """Read a set of DATASETS, which is downloaded where that is possible.

    split        "train": the whole training set, in the order of the files; "val": the folder val
                 of the user's own images; "test"; "ood": the test set, or all images at any depth
                 of a folder, as one class
    image_size   side of the square images that are read from files, in pixels (folders: 32)
    transform    a Transform of image files, instead of image_size; images in memory keep their
                 size, but become RGB and are normalised by its mean and std

    Images of files are an ImageSet if their sides have at most SMALL pixels, but for those of
    ImageNet; else a StreamedSet. Raises DatasetNotFound.
    """
    _choose_from("split", split, ("train", "val", "test", "ood"))
    dataset = _read(name, split, Path(data_dir), image_size, transform)
    if isinstance(dataset, ImageSet):
        if transform is not None:
            images = dataset.images.expand(-1, 3, -1, -1)
            dataset = replace(dataset, images=images, mean=transform.mean, std=transform.std)
        return dataset
    # ImageNet stays on the disk at any size: memory would not suffice.
    if name.startswith(("folder:", "tiny_imagenet")) and dataset.shape[-1] <= SMALL:
        return dataset.in_memory()
    if name.startswith("folder:"):
        dataset.check_headers()
    return dataset


def _read(name, split, data_dir, image_size, transform):
    """The set of `load`, before images are converted or read into memory."""
    if name.startswith("folder:"):
        return _user_folder(name, split, transform or _usual_transform(name, image_size or 32))
    if split == "val":
        raise UserError(f"{name} has no validation set; split its training set")
    is_training = split == "train"
    if name in IN_MEMORY and image_size is not None and transform is None:
        raise UserError(f"--image-size has no effect on {', '.join(IN_MEMORY)}; remove this option")
    if name in EMBEDDED:
        return _embedded(name, is_training)
    if name in TORCHVISION:
        return _torchvision(name, is_training, data_dir)
    if name == "ambiguous_mnist":
        return _ambiguous_mnist(is_training, data_dir)
    if name == "dirty_mnist":
        ambiguous = _ambiguous_mnist(is_training, data_dir)
        return concat(name, _torchvision("mnist", is_training, data_dir), ambiguous)
    others = ("nonsense",) if split == "ood" else ()
    _choose_from("dataset", name, DATASETS + others)
    transform = transform or _usual_transform(name, image_size)
    if name == "tiny_imagenet":
        return _tiny_imagenet(is_training, data_dir, transform)
    return _imagenet(name, is_training, data_dir, transform)


class Splits(NamedTuple):
    """The sets of a run, all of the size, channels and normalisation of `train`.

    fingerprints: {noun: fingerprint} of the "training data" before they were split and limited
    (missing where they were not read), of the "test data", and of the "file of --weights" and the
    "frozen backbone" where a run has them. backbone_ms (milliseconds per example) and
    backbone_bytes are what the backbone costs that has replaced images by features (--freeze).
    """

    train: Dataset
    val: Dataset | None
    test: Dataset
    ood: dict[str, Dataset]
    predict: Dataset | None
    fingerprints: dict[str, str]
    backbone_ms: float = 0.0
    backbone_bytes: int = 0

    def summary(self) -> str:
        """Describe the sets in one line, with the accuracy of guessing for those with classes."""
        counts = f"{len(self.test):,} test {_noun(self.test)}"
        if self.val is not None:
            counts = f"{len(self.train):,} training, {len(self.val):,} held-out and {counts}"
        elif "training data" in self.fingerprints:
            counts = f"{len(self.train):,} training and {counts}"
        name = self.train.name
        if isinstance(self.train, MoleculeSet):
            return f"{name}: {counts}"
        if getattr(self.train, "files", ()) and name not in SOURCES:
            name = f"folder {name}"
        most_frequent = self.train.labels.bincount().argmax()
        accuracy = (self.test.labels == most_frequent).double().mean()
        return (f"{name}: {self.train.num_classes} classes, {counts}; always guessing the most "
                f"frequent class: accuracy {accuracy:.3f}")


def _noun(dataset):
    """What the rows of a set are, with their shape."""
    if isinstance(dataset, TextSet):
        return "sentences"
    if isinstance(dataset, MoleculeSet):
        return "molecules"
    if dataset.is_features:
        return f"examples of {dataset.shape[0]} features"
    channels, height, width = dataset.shape
    return f"images of {channels} x {height} x {width}"


def fingerprints(args, test_set: Dataset, *training_sets: Dataset) -> dict[str, str]:
    """Compute the fingerprints of Splits.

    training_sets: the whole training set, and the validation set where it is not a part of it
    """
    texts = {}
    if training_sets:
        texts["training data"] = fingerprint(*training_sets)
    texts["test data"] = fingerprint(test_set)
    is_file = args.weights not in (None, "DEFAULT", "none")
    # A finished network can be evaluated without the file of its first weights.
    if is_file and common.on_main(os.path.isfile, args.weights):
        texts["file of --weights"] = common.on_main(_file_hash, args.weights)
    return texts


def load_splits(args, seed: int, *, val_fraction: float = 0.1, split: Callable | None = None,
                statistics: Callable | None = None, ood: Sequence[str] | None = None,
                reads_train: bool = True) -> Splits:
    """Read the image sets of a run, as the options of a script say.

    seed           chooses the validation images
    val_fraction   share of the training images that are for validation, in [0, 1); a folder val of
                   the user's own images replaces them. With 0, val is None
    split          a function of the whole training set that returns (training rows, validation
                   rows), instead of val_fraction
    statistics     a function of the training images, before --limit-train, that returns (mean,
                   std) per channel, of pixels in [0, 1]; it is not called for torchvision/NAME,
                   whose weights come with statistics
    ood            names of OOD sets, instead of args.ood
    reads_train    False: nothing is trained, and `train` is the test set

    With --freeze, images become features. Refuses sets that are too small to train on or to be
    distributed over the processes.
    """
    transform = transform_of(args)
    read = partial(load, args.dataset, data_dir=args.data_dir, image_size=args.image_size,
                   transform=transform)
    test = read("test")
    train = test
    val = None
    training_sets = []
    if reads_train:
        train = read("train")
        training_sets.append(train)
        if has_val_folder(args.dataset):
            val = read("val")
            training_sets.append(val)
    texts = fingerprints(args, test, *training_sets)
    if reads_train and val is None:
        train, val = _hold_out(train, args.dataset, seed, val_fraction, split)
    if statistics is not None and transform is None:
        mean, std = statistics(train)
        train = replace(train, mean=tuple(mean), std=tuple(std))
    if reads_train:
        train = limit_train(train, args.limit_train)
    if len(train) < 2:
        raise UserError(f"{train.name}: {len(train)} training example(s); at least two are needed")
    return _complete_splits(train, val, test, ood, texts, args)


def _hold_out(whole, name, seed, val_fraction, split):
    """(training set, validation set or None) from a whole training set."""
    if split is not None:
        train, val = split(whole)
    elif val_fraction == 0:
        return whole, None
    elif name.startswith("folder:"):
        train, val = class_split(whole.labels, seed, val_fraction)
    else:
        train, val = train_val_split(len(whole), seed, val_fraction, _groups(whole))
    if len(val) == 0:
        raise UserError(f"{name}: {len(whole)} training examples are too few to hold out a "
                        f"validation example (share {val_fraction:g}); add examples")
    return whole.select(train), whole.select(val)


def _complete_splits(train, val, test, ood, texts, args):
    """The Splits of these sets and of OOD and predicted ones, all converted like `train`."""
    if val is not None:
        val = convert_like(val, train)
    test = convert_like(test, train)
    names = args.ood if ood is None else ood
    others = ood_sets(names, train, args.data_dir, required="ood" in args.explicit)
    predicted = None
    if args.predict:
        predicted = predict_set(args.predict, train, args.data_dir)
    check_sizes(train, val, test, predicted, *others.values())
    splits = Splits(train, val, test, others, predicted, texts)
    if args.freeze:
        splits = frozen_features(splits, args)
    return splits


# ---- Published images ---------------------------------------------------------------------


def _torchvision(name, is_training, data_dir):
    """An ImageSet of what torchvision reads, and downloads if it is missing."""
    split = "train" if is_training else "test"
    options = {"split": split} if name == "svhn" else {"train": is_training}
    source = SOURCES[name]
    path = data_dir / source.path.format(split)
    try:
        # This also completes what a killed download has left.
        raw = TORCHVISION[name](data_dir, download=True, **options)
    except Exception as error:  # missing and truncated files raise many undocumented types
        reason = f"not found or damaged: {common.one_line(error)}"
        raise _not_found(name, path, reason) from None
    images = torch.as_tensor(raw.data)
    if "mnist" in name:
        images = images.unsqueeze(1)                       # [N, 1, 28, 28]
    elif name.startswith("cifar"):
        images = images.permute(0, 3, 1, 2).contiguous()   # [N, 3, 32, 32]
    labels = torch.as_tensor(raw.labels if name == "svhn" else raw.targets).long()
    # Digits have the same names in all sets; torchvision calls them "3 - three" in MNIST.
    classes = DIGITS if name in ("mnist", "svhn") else raw.classes
    return ImageSet(name, images, labels, source.num_classes, source.mean, source.std,
                    classes=tuple(classes))


def _ambiguous_mnist(is_training, data_dir):
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
            raise _not_found(name, folder / file, reason) from None
    half = slice(0, 6000) if is_training else slice(6000, 12000)
    samples = arrays[0][half].float()                      # [6000, 1, 28, 28]
    votes = arrays[1][half].long()                         # [6000, 10]
    probs = F.one_hot(votes, 10).float().mean(1)           # [6000, 10]
    image = torch.arange(6000).repeat_interleave(10)       # [60000]
    return ImageSet(name, samples[image], votes.flatten(), 10, source.mean, source.std,
                    probs[image], groups=image, classes=tuple(DIGITS))


# ---- Folders of images --------------------------------------------------------------------

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


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


def _to_rgb(file):
    """An image in RGB: upright as its EXIF tag says, transparent pixels on white."""
    image = ImageOps.exif_transpose(file)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


class Tree(NamedTuple):
    """The files below a folder: sorted paths relative to it, with forward slashes."""

    files: list[str]
    broken: list[str]       # links that lead nowhere, or to themselves


def _visible_entries(folder):
    """The entries of a folder, sorted by name; hidden ones are no data."""
    if not folder.is_dir():
        return []
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from None
    for entry in entries:
        readable = os.fsencode(entry.name).decode("utf-8", "backslashreplace")
        if readable != entry.name:
            raise UserError(f"{folder}/{readable}: the name is not UTF-8; rename it")
    return sorted(entries, key=attrgetter("name"))


def _folders_in(folder):
    return [entry.name for entry in _visible_entries(folder) if os.path.isdir(entry)]


def _walk(root, prefix="", above=()):
    """The Tree below root/<prefix>; `above` are the real paths of the folders that lead to it."""
    tree = Tree([], [])
    folder = root / prefix
    above += (os.path.realpath(folder),)
    for entry in _visible_entries(folder):
        path = f"{prefix}{entry.name}"
        if entry.is_symlink() and not os.path.exists(entry):
            tree.broken.append(path)
        elif entry.is_dir():
            # A link to one of the folders above would lead round in a circle.
            if os.path.realpath(entry) not in above:
                for paths, more in zip(tree, _walk(root, f"{path}/", above)):
                    paths += more
        # Other entries, such as pipes, could block for ever when they are read.
        elif entry.is_file():
            tree.files.append(path)
    return Tree(*map(sorted, tree))


def _images_among(files):
    return [file for file in files if file.lower().endswith(SUFFIXES)]


def _streamed(name, root, files, labels, classes, transform):
    crop, resize, mean, std, interpolation = transform
    return StreamedSet(name, root, tuple(files), torch.tensor(labels), max(1, len(classes)), mean,
                       std, (3, crop, crop), resize, interpolation, tuple(classes))


def _class_folders(name, root, classes, transform, subfolder=""):
    """A StreamedSet of the images directly in root/<class><subfolder>."""
    files = []
    labels = []
    for label, class_name in enumerate(classes):
        folder = f"{class_name}{subfolder}"
        entries = _visible_entries(root / folder)
        images = _images_among(entry.name for entry in entries if entry.is_file())
        if not images:
            raise UserError(f"{root / folder}: no images ({' '.join(SUFFIXES)}) in it; put the "
                            "images of this class into this folder")
        files += [f"{folder}/{image}" for image in images]
        labels += [label for _ in images]
    return _streamed(name, root, files, labels, classes, transform)


def has_val_folder(name: str) -> bool:
    """Say whether `name` is a folder:PATH with validation images. All processes call it."""
    if not name.startswith("folder:"):
        return False
    return bool(common.on_main(_folders_in, common.folder_path(name) / "val"))


def _user_folder(name, split, transform):
    """A split of a folder of the user, or for "ood" all its images as one class."""
    root = common.folder_path(name)
    if not root.is_dir():
        raise DatasetNotFound(f"folder {root} not found, or not a folder; write folder: and the "
                              "path of a folder")
    set_name = common.set_name(name)
    if split == "ood":
        tree = _walk(root)
        files = _images_among(tree.files)
        if not files:
            raise UserError(f"folder {root}: no images ({' '.join(SUFFIXES)}) in it")
        _print_skipped(root, tree, files)
        return _streamed(set_name, root, files, [0 for _ in files], (), transform)
    classes = _folders_in(root / "train")
    if len(classes) < 2 or not _folders_in(root / "test"):
        raise UserError(f"folder {root}: expected {root}/train/<class>/* with two classes or more "
                        f"and {root}/test/<class>/*; {root}/val/<class>/* is for validation. "
                        "A test set is never the training set")
    dataset = _class_folders(set_name, root / split, classes, transform)
    trees = {folder: _walk(root / folder) for folder in ("train", "val", "test")}
    _print_skipped(root / split, trees[split], dataset.files)
    for other in ("train", "val"):
        if other == split:
            break  # validation images are compared with training images alone, these with none
        _compare_images(root, split, other, trees)
    return dataset


def _print_skipped(root, tree, used):
    """Report in one line each, once, which files and broken links below `root` are not used."""
    skipped = sorted(set(tree.files) - set(used))
    if skipped:
        common.print_once(f"folder:{root}: skipped {len(skipped)} file(s) that are not of the "
                          f"types {' '.join(SUFFIXES)} or not directly in a class folder of train, "
                          f"the first of them: {', '.join(skipped[:3])}")
    if tree.broken:
        common.print_once(f"folder:{root}: skipped {len(tree.broken)} link(s) that lead nowhere, "
                          f"the first of them: {', '.join(tree.broken[:3])}")


def _compare_images(root, split, other, trees):
    """Refuse images that two splits share by a link; report how many have equal content."""
    images = [root / split / file for file in _images_among(trees[split].files)]
    count = len(images)
    others = [root / other / file for file in _images_among(trees[other].files)]
    # Few files are left for the later and slower keys, of which the last one decides.
    for key in (os.path.getsize, _first_bytes, _file_hash):
        shared = {key(path) for path in images} & {key(path) for path in others}
        images = [path for path in images if key(path) in shared]
        others = [path for path in others if key(path) in shared]
    if set(map(os.path.realpath, images)) & set(map(os.path.realpath, others)):
        raise UserError(f"folder {root}: {split} and {other} share images, by a link; a test set "
                        "is never the training set")
    if images:
        names = [str(path.relative_to(root)) for path in images[:3]]
        common.print_once(f"note: folder {root}: {len(images)} of {count} images in {split} are "
                          f"also in {other}, which makes results look better than they are; the "
                          f"first of them: {', '.join(names)}")


def _first_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except OSError as error:
        raise _unreadable(path, error) from None


def _imagenet(name, is_training, data_dir, transform):
    """ImageNet, or one of its variants, which have a test set only."""
    root = data_dir / SOURCES[name].path
    class_root = root
    if name == "imagenet":
        root = root / ("train" if is_training else "val")
        # The test set must have all classes of the training set, if that exists.
        class_root = root.parent / "train"
    elif is_training:
        raise UserError(f"{name} has a test split only")
    if not _folders_in(root):
        raise _not_found(name, f"{root}/<class>/*.JPEG")
    classes = _folders_in(class_root) or _folders_in(root)
    return _class_folders(name, root, classes, transform)


def _tiny_imagenet(is_training, data_dir, transform):
    """TinyImageNet as published; its labelled validation images are the test set."""
    name = "tiny_imagenet"
    root = data_dir / SOURCES[name].path
    classes = _wnids(root)
    if is_training:
        return _class_folders(name, root / "train", classes, transform, "/images")
    files = []
    labels = []
    for line in _read_published(name, root / "val" / "val_annotations.txt").split("\n"):
        file, wnid = line.split("\t")[:2]
        files.append(f"val/images/{file}")
        labels.append(classes.index(wnid))
    return _streamed(name, root, files, labels, classes, transform)


def _wnids(root):
    """The classes of TinyImageNet, in the order of their labels."""
    return _read_published("tiny_imagenet", root / "wnids.txt", str.split)


# ---- Corruptions --------------------------------------------------------------------------

# The last four are extra kinds; those of ImageNet-C and Tiny-ImageNet-C are in a second archive.
CIFAR_C_KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
    "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
    "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate")
CORRUPTED = ("cifar10_c", "cifar100_c", "tiny_imagenet_c", "imagenet_c")
SEVERITIES = (1, 2, 3, 4, 5)


def _find_kinds(name, data_dir):
    """The kinds of a set of CORRUPTED with all five severities; a line says what is missing."""
    present = []
    missing = []
    for kind in CIFAR_C_KINDS:
        if all(path.exists() for path in _corrupted_paths(name, kind, data_dir)):
            present.append(kind)
        else:
            missing.append(kind)
    if missing:
        reason = "not found"
        if present:
            reason = f"lacks all or a part of {', '.join(missing)}"
        common.print_on_main(str(_not_found(name, data_dir / SOURCES[name].path, reason)))
    return present


def _corrupted_paths(name, kind, data_dir):
    """What belongs to a kind: images and labels, or a folder for each severity."""
    root = data_dir / SOURCES[name].path
    if name.startswith("cifar"):
        return [root / f"{kind}.npy", root / "labels.npy"]
    return [root / kind / str(severity) for severity in SEVERITIES]


@_together
def load_corrupted(name: str, kind: str, severity: int, data_dir: str | Path = "data", *,
                   transform: Transform | None = None) -> Images:
    """Read a test set under one corruption at severity 1..5, in memory except for large images.

    It is read from CIFAR-10-C/<kind>.npy and labels.npy (10,000 rows per severity), from
    imagenet-c/<kind>/<severity>/<class>/* or from Tiny-ImageNet-C/<kind>/<severity>/<class>/*.
    transform: that of the images of the clean test set [default: the usual one].
    """
    _choose_from("corrupted set", name, CORRUPTED)
    data_dir = Path(data_dir)
    set_name = f"{name}_{kind}_s{severity}"
    paths = _corrupted_paths(name, kind, data_dir)
    if name.startswith("cifar"):
        clean = SOURCES[name.removesuffix("_c")]
        rows = slice(severity * 10000 - 10000, severity * 10000)
        try:
            images, labels = [np.load(path, mmap_mode="r")[rows] for path in paths]
        except (ValueError, OSError, EOFError) as error:  # an error of the format names no file
            raise _not_found(name, paths[0], common.one_line(error)) from None
        images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        labels = torch.from_numpy(labels.astype(np.int64))
        return ImageSet(set_name, images, labels, clean.num_classes, clean.mean, clean.std)
    root = paths[severity - 1]
    if not root.exists():
        raise _not_found(name, root)
    transform = transform or _usual_transform(name)
    # The copy must have all classes of the clean set, if that exists.
    if name == "tiny_imagenet_c":
        classes = _wnids(data_dir / SOURCES["tiny_imagenet"].path)
    else:
        classes = _folders_in(data_dir / "imagenet" / "val") or _folders_in(root)
        # The files of ImageNet-C are centre crops already: they are resized as a whole.
        transform = transform._replace(resize=transform.crop)
    dataset = _class_folders(set_name, root, classes, transform)
    return dataset.in_memory() if dataset.shape[-1] <= SMALL else dataset


class CorruptedSets(NamedTuple):
    """The test sets of --shift, which are read one at a time."""

    name: str               # of all of them together, such as imagenet_c_15of19
    kinds: list[str]        # of corruption, each with the SEVERITIES 1 to 5
    read: Callable          # read(kind, severity) returns an image set, converted and limited


def corrupted_sets(test_set: Images, args) -> CorruptedSets | None:
    """Find the corrupted copies of a test set: those of --shift, in memory if they are computed.

    They are converted like the test set and have at most --shift-examples examples (0: all), in
    which classes keep their shares. None for --shift none, and where published files are missing
    that the user did not ask for.
    """
    if args.shift == "none":
        return None
    limit = args.shift_examples or None
    check_sizes(test_set, limit=limit or math.inf)
    if test_set.is_features:
        raise UserError(f"--shift {args.shift} corrupts images, but {test_set.name} has features; "
                        "use --shift none")
    if args.shift == "computed":
        clean = stratified_subset(test_set, limit)
        if isinstance(clean, StreamedSet):
            clean = common.on_each_machine(clean.in_memory)
        # These corruptions are not those of the published -C sets.
        name = "glyphs_c" if test_set.name == "glyphs" else f"{test_set.name}_computed_c"
        return CorruptedSets(name, list(CORRUPTIONS), partial(corrupted, clean))
    name = f"{args.dataset}_c"
    kinds = []
    if name in CORRUPTED:
        kinds = common.on_main(_find_kinds, name, Path(args.data_dir))
    if not kinds:
        if "shift" in args.explicit:
            raise UserError(f"--shift published: {name} not found; use --shift none or computed")
        return None
    read = partial(_load_converted, name, test_set, limit, args.data_dir)
    if len(kinds) < len(CIFAR_C_KINDS):
        name = f"{name}_{len(kinds)}of{len(CIFAR_C_KINDS)}"
    return CorruptedSets(name, kinds, read)


def _load_converted(name, test_set, limit, data_dir, kind, severity):
    """A published corrupted set, converted like the clean test set and limited."""
    dataset = load_corrupted(name, kind, severity, data_dir, transform=test_set.transform)
    return convert_like(stratified_subset(dataset, limit), test_set)


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images by a kind of CORRUPTIONS at severity 1..5; equal arguments, equal results.

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


def corrupted(dataset: ImageSet, kind: str, severity: int, seed: int = 0) -> ImageSet:
    """Apply `corrupt` to an image set; its name becomes cifar10_computed_gaussian_noise_s3."""
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
    blurred = gaussian_filter(x.numpy(), std, radius=reach, mode="nearest", axes=(2, 3))
    return torch.from_numpy(blurred)


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
    return _to_unit(jpeg((x * 255).round().byte(), quality))


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


def convert_like(dataset: Images, reference: Images) -> Images:
    """Give a set the channels, size, mean and std of the set `reference`.

    Grey is repeated, RGB becomes luma, and sizes change by antialiased bilinear interpolation;
    a StreamedSet must have the size already. OOD data are always normalised with the statistics of
    the training set.
    """
    dataset = replace(dataset, mean=reference.mean, std=reference.std)
    if dataset.shape == reference.shape:
        return dataset
    channels, height, width = reference.shape
    blocks = []
    for block in dataset.images.split(1000):
        x = _to_unit(block)
        if channels < x.shape[1]:
            x = TF.rgb_to_grayscale(x)
        x = _from_unit(TF.resize(x, [height, width]), block.dtype)
        blocks.append(x.expand(-1, channels, -1, -1))
    return replace(dataset, images=torch.cat(blocks))


NAMES_OF_SPLITS = ("train", "val", "test", "predict")


def name_of_other(name: str) -> str:
    """The name of an OOD or predicted set; that of folder:images/test is images_test."""
    set_name = common.set_name(name)
    if set_name in NAMES_OF_SPLITS:
        parent = Path(os.path.realpath(common.folder_path(name))).parent
        set_name = f"{common.set_name(f'folder:{parent}')}_{set_name}"
    return set_name


def ood_sets(names: Sequence[str], reference: Dataset, data_dir: str | Path = "data", *,
             required: bool = False) -> dict[str, Dataset]:
    """Read OOD sets {name: set}, resized and normalised like the training set `reference`.

    A name is that of a set of the kind of `reference`, for images also folder:PATH or "nonsense".
    `required`: the user named the sets. Then it is an error if a set is missing or has the name of
    another set; else it is skipped, which one line reports.
    """
    sets = {}
    for name in names:
        set_name = name_of_other(name)
        try:
            if set_name == reference.name or set_name in sets:
                raise DatasetNotFound(f"OOD set {name}: another set of this run is called "
                                      f"{set_name}; rename one of them or remove it")
            sets[set_name] = replace(_read_other(name, reference, data_dir), name=set_name)
        except DatasetNotFound as error:
            if required:
                raise
            common.print_on_main(f"skipped: {error}")
    return sets


def _read_other(name, reference, data_dir):
    """The test set of a data set of the kind of `reference`, converted like it."""
    if isinstance(reference, TextSet):
        return load_text(name, "test", data_dir, reference=reference)
    if isinstance(reference, MoleculeSet):
        return load_molecules(name, "test", data_dir)
    if reference.is_features:
        raise UserError(f"{name} has images, but {reference.name} has features: they cannot be "
                        "compared")
    if name == "nonsense":
        return nonsense(reference)
    size = None
    if reference.transform is None and name.startswith(("folder:", "imagenet")):
        # TinyImageNet is small enough to be resized in memory, as published.
        size = reference.shape[-1]
    dataset = load(name, "ood", data_dir, image_size=size, transform=reference.transform)
    if isinstance(dataset, StreamedSet) and isinstance(reference, ImageSet):
        dataset = common.on_each_machine(dataset.in_memory)
    return convert_like(dataset, reference)


def predict_set(name: str, reference: Dataset, data_dir: str | Path = "data") -> Dataset:
    """Read a set like an OOD set, with labels that mean what those of `reference` mean.

    Labels are translated by the names of the classes; for a folder these are the folders that
    the images lie in. They are -1 (molecules: NaN) where they are unknown. `files` names the
    images of a folder and of "nonsense".
    """
    dataset = replace(_read_other(name, reference, data_dir), name=name_of_other(name))
    if isinstance(dataset, MoleculeSet):
        if dataset.quantity == reference.quantity:
            return dataset
        return replace(dataset, labels=torch.full_like(dataset.labels, math.nan))
    if name.startswith("folder:"):
        names = [Path(file).parent.name for file in dataset.files]
    else:
        classes = dict(enumerate(dataset.classes))
        names = [classes.get(label) for label in dataset.labels.tolist()]
    return replace(dataset, labels=_labels_of(names, reference.classes),
                   num_classes=reference.num_classes, classes=reference.classes)


def _labels_of(names, classes):
    """int64 [N]: the positions of the names in `classes`, -1 for other names."""
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    return torch.tensor([label_of.get(name, -1) for name in names])


def nonsense(reference: Images) -> ImageSet:
    """Draw the set "nonsense": 70 images that belong to no class, each with a name in `files`.

    They have the shape (C, H, W) and the statistics of the image set `reference`; equal shapes
    give equal images. The ten of a kind differ in shade, number of squares, direction or random
    draw.
    """
    _, height, width = reference.shape
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
            "uniform_noise": torch.rand(reference.shape, generator=generator),
            "gaussian_noise": 0.5 + 0.25 * torch.randn(reference.shape, generator=generator),
        }
        for kind, image in kinds.items():
            images[f"{kind}-{number}"] = _from_unit(image, torch.uint8).expand(reference.shape)
    files = tuple(sorted(images))
    pixels = torch.stack([images[file] for file in files])
    return ImageSet("nonsense", pixels, torch.full((len(files),), -1), reference.num_classes,
                    reference.mean, reference.std, classes=reference.classes, files=files)


# ---- Features -----------------------------------------------------------------------------

MOST_CLASSES = 1_000_000  # a larger label is an error: memory is allocated for each class


@dataclass(frozen=True, eq=False)
class Features(_Rows):
    """N rows of features, as an .npz file has them."""

    values: Tensor          # float64 [N, D]
    labels: Tensor          # int64 [N], from 0, or -1 where unknown
    classes: tuple = ()     # names in the order of the labels, where known
    files: tuple = ()       # names of the rows, where known

    of_rows = ("values", "labels", "files")


def read_features(path: str | Path, dim: int | None = None, *, labelled: bool = False,
                  classes: tuple = ()) -> Features:
    """Read the Features in an .npz file: 'features' [N, D], 'labels' [N] and 'names' [N].

    Labels are numbers from 0 or names of classes; they and the names of the rows may be missing.

    dim        D must be this number
    labelled   labels are needed; if they are names, these are the classes, in sorted order
    classes    otherwise, names of classes, such as those of the training features; labels that
               are not among them are unknown
    """
    arrays = _read_arrays(path, labelled)
    values = arrays["features"]
    shape = list(values.shape)
    if len(shape) != 2 or 0 in shape or shape[1] != (dim or shape[1]):
        raise UserError(f"{path}: 'features' must be [N, {dim or 'D'}], not {shape}")
    is_number = values.dtype.kind in "fiu"
    # The comparison is false for NaN.
    if not (is_number and (np.abs(values) <= np.finfo(np.float32).max).all()):
        raise UserError(f"{path}: 'features' must be finite numbers in the range of float32")
    n = len(values)
    labels = torch.full((n,), -1)
    if "labels" in arrays:
        if labelled and arrays["labels"].dtype.kind == "U":
            classes = tuple(np.unique(arrays["labels"]).tolist())
        labels = _read_labels(path, arrays["labels"], n, classes)
    names = arrays.get("names", np.array([], str))
    if names.dtype.kind != "U" or names.shape not in ((0,), (n,)):
        raise UserError(f"{path}: 'names' must be [{n}] texts")
    values = torch.from_numpy(values.astype(np.float64))
    return Features(values, labels, classes, tuple(names.tolist()))


def _read_arrays(path, labelled):
    """{name: array} of an .npz file: the features, and the labels and names that it has."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("features", "labels", "names") if name in file}
    except FileNotFoundError:
        raise UserError(f"file not found: {path}") from None
    except Exception:  # NumPy raises many types for a damaged file
        raise UserError(f"{path} is not a readable .npz file of plain arrays") from None
    needed = ["features", "labels"] if labelled else ["features"]
    if not set(needed) <= arrays.keys():
        raise UserError(f"{path} needs the arrays {', '.join(needed)}; it has "
                        f"{', '.join(arrays) or 'none of them'}")
    return arrays


def _read_labels(path, labels, n, classes):
    """int64 [n]: labels of an .npz file as numbers of the classes, -1 where unknown."""
    if labels.shape == (n,) and labels.dtype.kind == "U":
        return _labels_of(labels.tolist(), classes)
    whole = labels.shape == (n,) and labels.dtype.kind in "iu"
    if not whole or labels.min() < 0 or labels.max() >= MOST_CLASSES:
        raise UserError(f"{path}: 'labels' must be [{n}] names, or integers from 0, below "
                        f"{MOST_CLASSES:,}")
    if classes:
        return torch.full((n,), -1)  # numbers do not tell which of the names is meant
    return torch.from_numpy(labels.astype(np.int64))


# ---- Batches ------------------------------------------------------------------------------

# The rows of a global batch that belong to this process, on the device. labels: [b]. index:
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
    """What both loaders share: global batches, which are distributed over the processes.

    Each process gets a contiguous piece of a batch. The pieces differ by one row at most; in the
    last batch they may be empty. Together they are the batch of a single process.

    limit_steps   an epoch ends after this number of batches
    drop_last     an epoch has no smaller batch, unless it has no other one; otherwise, with
                  `shuffle`, a last batch of one row joins the batch before it, because batch norm
                  cannot train on one row
    """

    def __init__(self, dataset, batch_size, device, seed, shuffle, limit_steps, drop_last):
        check_sizes(dataset, limit=batch_size)
        self.dataset = dataset
        self.device = torch.device(device)
        self.seed = seed
        self.shuffle = shuffle
        full, rest = divmod(len(dataset), batch_size)
        self.sizes = [batch_size for _ in range(full)]  # of the global batches
        if rest == 1 and full > 0 and shuffle and not drop_last:
            self.sizes[-1] += 1
        elif rest > 0 and (full == 0 or not drop_last):
            self.sizes.append(rest)
        self.sizes = self.sizes[:limit_steps]
        self.labels = dataset.labels.to(self.device)

    def __len__(self) -> int:
        """Number of steps in an epoch, the same for all processes."""
        return len(self.sizes)

    def _order(self, generator):
        """int64 [N]: the rows in the order of this epoch."""
        if self.shuffle:
            return torch.randperm(len(self.dataset), generator=generator)
        return torch.arange(len(self.dataset))

    def _split(self, order):
        """The global batches of an order [N] of rows."""
        return order[:sum(self.sizes)].split(self.sizes)

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

    def __init__(self, dataset: Images, batch_size: int, device: str | torch.device = "cpu", *,
                 seed: int = 0, shuffle: bool = False, limit_steps: int | None = None,
                 drop_last: bool = False, augment: str = "none", workers: int = 0,
                 channels_last: bool = False):
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

    def epoch(self, epoch: int = 0) -> Iterator[Batch]:
        """Iterate over this process's pieces of the batches of an epoch."""
        generator = _loader_generator(self.seed, epoch)
        order = self._order(generator)
        if self.streamed:
            return self._stream(order, generator, epoch)
        if self.augment == "none":
            return self._gather(order)
        return self._gather_crops(order, generator)

    def _gather(self, order):
        for batch in self._split(order.to(self.device)):
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
        for batch in self._split(torch.arange(n, device=self.device)):
            at = self._piece(batch)
            rows = order[at]
            x = crops[rows, :, dy[at], dx[at]]                         # [b, C, H, W]
            # index_select copies whole images; torch.where, byte by byte, takes five times longer.
            chosen = torch.arange(len(rows), device=self.device) + len(rows) * flips[at]
            x = torch.cat([x, x.flip(3)]).index_select(0, chosen)
            yield Batch(self._normalise(x), self.labels[rows], rows, len(batch))

    def _stream(self, order, generator, epoch):
        batches = self._split(order)
        pieces = [self._piece(batch) for batch in batches]
        key = None if self.augment == "none" else (self.seed, epoch)
        # With this generator, DataLoader leaves the global one alone.
        loader = DataLoader(
            replace(self.dataset, key=key), num_workers=self.workers, generator=generator,
            batch_sampler=[piece.tolist() for piece in pieces if len(piece)],
            pin_memory=self.device.type == "cuda")
        decoded = iter(loader)
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


def evaluation_loader(dataset: Images, args, batch_size: int = 512, **options) -> Loader:
    """Make the Loader, with its `options`, of a pass over a set in eval mode, in order.

    Batches have `batch_size` images, or --batch-size if that is larger. Those of a StreamedSet have
    --batch-size images, as the memory that data loading workers share may suffice for no more.
    """
    batch_size = max(batch_size, args.batch_size)
    if isinstance(dataset, StreamedSet):
        batch_size = args.batch_size
    options = {"workers": args.workers, "channels_last": True} | options
    return Loader(dataset, batch_size, args.device, **options)


class SequenceLoader(_Batches):
    """Batches of a TextSet or a MoleculeSet, in an order determined by (seed, epoch).

    Sentences are padded to the longest of the global batch. Without `shuffle` they come by rising
    length, so that little is padded. cutoff (angstrom) is that of the edges of molecules, which
    are computed once, when the loader is made.
    """

    def __init__(self, dataset: TextSet | MoleculeSet, batch_size: int,
                 device: str | torch.device = "cpu", *, seed: int = 0, shuffle: bool = False,
                 limit_steps: int | None = None, drop_last: bool = False, cutoff: float = 5.0):
        super().__init__(dataset, batch_size, device, seed, shuffle, limit_steps, drop_last)
        if isinstance(dataset, MoleculeSet):
            self.sources, self.targets, self.counts = find_edges(dataset, cutoff)

    def epoch(self, epoch: int = 0) -> Iterator[TextBatch | MoleculeBatch]:
        """Iterate over this process's pieces of the batches of an epoch."""
        order = self._order(_loader_generator(self.seed, epoch))
        is_text = isinstance(self.dataset, TextSet)
        if is_text and not self.shuffle:
            order = self.dataset.lengths.argsort(stable=True)
        for batch in self._split(order):
            rows = self._piece(batch)
            if is_text:
                longest = int(self.dataset.lengths[batch].max())
                make = partial(TextBatch, self._tokens(rows, longest))
            else:
                make = partial(MoleculeBatch, self._molecules(rows))
            rows = rows.to(self.device, non_blocking=True)
            yield make(self.labels[rows], rows, len(batch))

    def _tokens(self, rows, longest):
        sentences = self.dataset.select(rows)
        is_token = torch.arange(longest) < sentences.lengths[:, None]
        tokens = torch.zeros(is_token.shape, dtype=torch.int64)        # [b, L]
        tokens[is_token] = sentences.tokens.long()
        return tokens.to(self.device, non_blocking=True)

    def _molecules(self, rows):
        chosen = self.dataset.select(rows)
        molecule = torch.arange(len(rows)).repeat_interleave(chosen.sizes)
        # Edges count atoms within their molecule; in the graph these follow each other.
        first_atom = chosen.sizes.cumsum(0) - chosen.sizes             # [b]
        shift = first_atom.repeat_interleave(self.counts[rows])        # [e]
        edges = entries_of(rows, self.counts)                          # [e]
        columns = (chosen.numbers, chosen.positions.float(), molecule, self.sources[edges] + shift,
                   self.targets[edges] + shift)
        on_device = [column.to(self.device, non_blocking=True) for column in columns]
        return Molecules(*on_device, len(rows))


def find_edges(dataset: MoleculeSet, cutoff: float = 5.0) -> tuple[Tensor, Tensor, Tensor]:
    """Find the edges of each molecule: (sources int16 [E], targets int16 [E], counts int64 [N]).

    Edges lead from each atom to all others of its molecule that are closer than `cutoff`
    (angstrom). Atoms are counted within their molecule, and edges are sorted by molecule, then by
    target.
    """
    sources = []
    targets = []
    counts = []
    for positions in dataset.positions.split(dataset.sizes.tolist()):
        # The matrix product that cdist may use instead would round the distances.
        mode = "donot_use_mm_for_euclid_dist"
        near = torch.cdist(positions, positions, compute_mode=mode) < cutoff
        near.fill_diagonal_(False)
        target, source = near.nonzero(as_tuple=True)
        sources.append(source.short())
        targets.append(target.short())
        counts.append(len(source))
    return torch.cat(sources), torch.cat(targets), torch.tensor(counts)


# ---- Features of a frozen network ---------------------------------------------------------


def frozen_features(splits: Splits, args) -> Splits:
    """Replace the images of a run by the features of torchvision/NAME, for --freeze.

    The network is not trained: its features are computed once, without augmentation, see
    `with_features`. `common.backbone_and_head` then gives a new head for them. backbone_ms is the
    time of the pass over the training images, with reading them.
    """
    train = splits.train
    common.print_once(f"{args.model}: a new head is trained on its features, which are computed "
                      "once")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)  # for --weights none
        backbone, _ = common.pretrained_network(args, train.num_classes, train.shape)
    backbone = backbone.to(args.device, memory_format=torch.channels_last)
    start = time.perf_counter()
    features = with_features(backbone, train, args)
    ms = 1000 * (time.perf_counter() - start) / len(train)
    replaced = {"train": features}
    for name in ("val", "test", "predict"):
        dataset = getattr(splits, name)
        if dataset is not None:
            replaced[name] = with_features(backbone, dataset, args, features)
    ood = {}
    for name, dataset in splits.ood.items():
        ood[name] = with_features(backbone, dataset, args, features)
    weights = backbone.state_dict().values()
    texts = splits.fingerprints | {"frozen backbone": common.fingerprint(backbone)}
    return splits._replace(**replaced, ood=ood, fingerprints=texts, backbone_ms=ms,
                           backbone_bytes=sum(tensor.nbytes for tensor in weights))


@torch.no_grad()
def with_features(backbone: nn.Module, dataset: Images, args,
                  reference: ImageSet | None = None) -> ImageSet:
    """Replace the images of a set by features [N, D, 1, 1], by the backbone in eval mode.

    They are normalised like the set of features `reference`. Without it, the mean of each feature
    becomes 0, and the mean squared length of a row 512, that of as many standard normal numbers: a
    learning rate and a weight decay then suit all backbones. All processes call this together.
    """
    backbone.eval()
    batches = []
    for batch in evaluation_loader(dataset, args, batch_size=128).epoch():
        with common.autocast(args):
            features = backbone(batch.images)              # [b, D]
        batches.append({"index": batch.index, "features": features.float()})
    features = common.broadcast(common.gather_rows(batches))["features"]
    if reference is None:
        mean = features.double().mean(0)                   # [D]
        squared_length = (features - mean).square().sum(1).mean()
        std = (squared_length / 512).sqrt().clamp_min(1e-12).expand_as(mean)
        statistics = (tuple(mean.tolist()), tuple(std.tolist()))
    else:
        statistics = (reference.mean, reference.std)
    return ImageSet(dataset.name, features[:, :, None, None], dataset.labels, dataset.num_classes,
                    *statistics, label_probs=getattr(dataset, "label_probs", None),
                    groups=getattr(dataset, "groups", None), classes=dataset.classes,
                    files=dataset.files)


# ---- Embedded images ----------------------------------------------------------------------


@lru_cache(maxsize=None)
def _embedded(name, is_training):
    """The training set or the test set of a name in EMBEDDED."""
    prints = EMBEDDED[name]
    if name == "dirty_glyphs":
        clean = _embedded("glyphs", is_training).select(slice(8000))
        ambiguous = _embedded("glyphs_ambiguous", is_training).select(slice(8000))
        dirty = concat(name, clean, ambiguous)
        return replace(dirty, mean=(prints.mean,), std=(prints.std,))
    n = prints.train_rows if is_training else prints.test_rows
    generator = _generator(2102, list(EMBEDDED).index(name), is_training)
    if name.endswith("ambiguous"):
        return _blends(name, n, generator, is_training)
    labels = torch.randperm(n, generator=generator) % len(prints.texts)
    images = _print(_draw_ink(name, labels, generator), generator)
    return _grey_set(name, images, labels)


def _grey_set(name, images, labels):
    prints = EMBEDDED[name]
    return ImageSet(name, images, labels, len(prints.texts), (prints.mean,), (prints.std,),
                    classes=tuple(prints.texts))


def _blends(name, n, generator, is_training):
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
        if is_training:
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
def load_text(name: str, split: str, data_dir: str | Path = "data", *,
              vocab_file: str | Path | None = None, reference: TextSet | None = None) -> TextSet:
    """Read a set of TEXTS, whose splits are fixed.

    split        "train", "val" or "test"; for those of sst2 see sst2_has_test_labels
    vocab_file   BERT's vocab.txt, with a word piece per line. By default the vocabulary of
                 sst2 is made of its training sentences, and that of reviews and reviews_finance
                 of those of both: like BERT's, it has words that the training set lacks, so
                 that unknown words do not give OOD data away
    reference    a TextSet, such as the training set, whose vocabulary is used instead
    """
    _choose_from("dataset", name, TEXTS)
    folder = Path(data_dir) / SOURCES["sst2"].path
    sentences, labels = _read_sentences(name, split, folder)
    if reference is not None:
        vocab = reference.vocab
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


def sst2_has_test_labels(data_dir: str | Path = "data") -> bool:
    """Say whether SST-2/test.tsv is labelled; then the splits are those that were published.

    GLUE withholds the labels. Then "test" is dev.tsv, and "val" is 2,000 rows of train.tsv (a
    tenth of short files). As train.tsv also has phrases of its sentences as rows, this "val"
    is easier than "test", and what is fitted to it is too confident.
    """
    path = Path(data_dir) / SOURCES["sst2"].path / "test.tsv"
    return _read_published("sst2", path).startswith("sentence\tlabel\n")


def _read_sentences(name, split, folder):
    """(sentences, labels int64 [N]) of a split."""
    if name != "sst2":
        return _embedded_texts(name, split)
    if sst2_has_test_labels(folder.parent):
        file = "dev" if split == "val" else split
        return _read_published("sst2", folder / f"{file}.tsv", _rows_of_tsv)
    if split == "test":
        return _read_published("sst2", folder / "dev.tsv", _rows_of_tsv)
    sentences, labels = _read_published("sst2", folder / "train.tsv", _rows_of_tsv)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    num_val = min(2000, len(labels) // 10)
    rows = order[:num_val] if split == "val" else order[num_val:].sort().values
    return [sentences[row] for row in rows.tolist()], labels[rows]


def _rows_of_tsv(text):
    """(sentences, labels int64 [N]) of rows sentence<TAB>label, without quoting."""
    header, *lines = text.split("\n")
    if header != "sentence\tlabel" or not lines:
        raise ValueError("expected a header sentence<TAB>label, and rows")
    sentences = []
    labels = []
    for number, line in enumerate(lines, start=2):
        sentence, _, label = line.partition("\t")
        if not sentence.strip() or label not in ("0", "1"):
            raise ValueError(f"line {number}: {line[:80]!r}; expected sentence<TAB>label, with the "
                             "label 0 or 1")
        sentences.append(sentence)
        labels.append(int(label))
    return sentences, torch.tensor(labels)


def _read_published(name, path, parse=str):
    """parse(text) of a UTF-8 file of a published set, with Unix line ends, without the last one."""
    try:
        # Parsers split at "\n" only: splitlines also cuts at characters that occur within lines.
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return parse(text.removesuffix("\n"))
    except FileNotFoundError:
        raise _not_found(name, path) from None
    except (OSError, ValueError, LookupError) as error:
        raise _not_found(name, path, f"damaged: {common.one_line(error)}") from None


# ---- Word pieces --------------------------------------------------------------------------

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Each Chinese, Japanese or Korean character is a word.
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF),
       (0x2F800, 0x2FA1F))


def read_vocabulary(path: str | Path) -> tuple[str, ...]:
    """Read BERT's vocab.txt: line i is the word piece of id i, [PAD] is the first."""
    path = Path(path)
    pieces = _read_published("sst2", path).split("\n") if path.exists() else [""]
    if pieces[0] != "[PAD]" or not set(SPECIAL[:4]) <= set(pieces):
        raise UserError(f"{path}: expected BERT's vocab.txt, a word piece per line, [PAD] first, "
                        "with [UNK], [CLS], [SEP]; it is at "
                        "https://huggingface.co/google-bert/bert-base-uncased")
    return tuple(pieces)


def vocabulary(sentences: list[str], size: int = 30522) -> tuple[str, ...]:
    """Make at most `size` word pieces from these sentences.

    They are BERT's special tokens; every character c, then every ##c; then the words that occur
    at least twice, by falling frequency, those of equal frequency in alphabetical order.
    """
    counts = Counter()
    for sentence in sentences:
        counts.update(_words(sentence))
    characters = sorted(set("".join(counts)))
    continued = ["##" + c for c in characters]
    frequent = [word for word, count in counts.items() if count > 1 and len(word) > 1]
    frequent.sort(key=lambda word: (-counts[word], word))
    return tuple(SPECIAL + characters + continued + frequent)[:size]


def tokenise(sentences: list[str], vocab: tuple[str, ...],
             max_length: int = 268) -> tuple[Tensor, Tensor]:
    """Cut sentences by BERT's uncased WordPiece: (tokens int32 [T], lengths int64 [N]).

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
    """Words in lower case and without accents; each sign of punctuation or CJK is a word."""
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

HARTREE = 27.211386246  # eV, as in PyTorch Geometric's copy of the set
QM9_ROWS = 130831  # molecules that are published and not omitted
QM9_ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
# Energies at 0 K of free atoms of these elements, in hartree, as published.
QM9_ATOMS = [-0.500273, -37.846772, -54.583861, -75.064579, -99.718730]


@_together
def load_molecules(name: str, split: str, data_dir: str | Path = "data") -> MoleculeSet:
    """Read a set of MOLECULES with their energies, those of qm9 at 0 K (U0); its splits are fixed.

    split: "train", "val" or "test". Those of qm9 are the published ones if all 130,831 molecules
    are in its files, else the same shares of a permutation drawn in the same way.
    """
    _choose_from("dataset", name, MOLECULES)
    _choose_from("split", split, ("train", "val", "test"))
    if name == "qm9":
        dataset = _qm9(Path(data_dir) / SOURCES[name].path)
        order = np.random.default_rng(0).permutation(len(dataset))
        share = len(dataset) / QM9_ROWS
        ends = (round(share * 110000), round(share * 120000))
    else:
        dataset = _clusters(name)
        order = np.arange(len(dataset))
        ends = (4000, 4500)
    train, val, test = torch.from_numpy(order).tensor_split(ends)
    return dataset.select({"train": train, "val": val, "test": test}[split])


def atom_references() -> Tensor:
    """Energies at 0 K of free atoms in eV, float64 [101], by atomic number; 0 where unknown."""
    references = torch.zeros(101, dtype=torch.float64)
    elements = list(QM9_ELEMENTS.values())
    references[elements] = torch.tensor(QM9_ATOMS, dtype=torch.float64) * HARTREE
    return references


@lru_cache(maxsize=1)
def _qm9(folder):
    """The molecules gdb_N of gdb9.sdf, by rising N, each with its U0 of gdb9.sdf.csv.

    As in PyTorch Geometric, those whose N begins a line of uncharacterized.txt are omitted.
    """
    path = folder / "gdb9.sdf"
    molecules = _read_published("qm9", path, _molecules_of_sdf)
    energies = _read_published("qm9", folder / "gdb9.sdf.csv", _energies_of_csv)
    if molecules.keys() != energies.keys():
        raise _not_found("qm9", path, f"its molecules ({len(molecules)}) are not those of "
                                      f"gdb9.sdf.csv ({len(energies)})")
    for number in _read_published("qm9", folder / "uncharacterized.txt", _first_numbers):
        molecules.pop(number, None)
    atoms = []
    sizes = []
    labels = []
    for number in sorted(molecules):
        atoms += molecules[number]
        sizes.append(len(molecules[number]))
        labels.append(energies[number])
    atoms = torch.tensor(atoms, dtype=torch.float64)                   # [A, 4]
    labels = torch.tensor(labels, dtype=torch.float64) * HARTREE       # [N]
    if not common.all_finite([atoms, labels]):
        raise _not_found("qm9", path, "a number is not finite")
    return MoleculeSet("qm9", atoms[:, 0].long(), atoms[:, 1:].contiguous(), torch.tensor(sizes),
                       labels, atom_references(), quantity="U0")


def _molecules_of_sdf(text):
    """{N: [(atomic number, x, y, z in angstrom), ...]} of the molecules gdb_N."""
    molecules = {}
    for block in text.split("$$$$\n"):
        name, _, _, counts, *lines = block.split("\n")
        atoms = []
        for atom in range(int(counts[:3])):
            x, y, z, symbol = lines[atom].split()[:4]
            atoms.append((QM9_ELEMENTS[symbol], float(x), float(y), float(z)))
        if not atoms:
            raise ValueError(f"{name} has no atoms")
        molecules[int(name.removeprefix("gdb_"))] = atoms
    return molecules


def _energies_of_csv(text):
    """{N: U0 in hartree} of the molecules gdb_N."""
    header, *rows = text.split("\n")
    energies = {}
    for row in rows:
        columns = dict(zip(header.split(","), row.split(","), strict=True))
        energies[int(columns["mol_id"].removeprefix("gdb_"))] = float(columns["u0"])
    return energies


def _first_numbers(text):
    """The numbers with which lines begin."""
    words = [line.split()[0] for line in text.split("\n") if line.strip()]
    return [int(word) for word in words if word.isdecimal()]


# ---- Embedded molecules and texts ---------------------------------------------------------

# Covalent radii in angstrom, by atomic number; with that of no atom, 0, all q_ij are 0.
RADII = [-math.inf, 0.35, 0, 0, 0, 0, 0.76, 0.71, 0.66]


def pair_energy(numbers: Tensor, positions: Tensor) -> Tensor:
    """Compute the energy of molecules in eV, float64 [...], by the potential of the clusters.

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
