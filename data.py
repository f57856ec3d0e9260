"""Data for the scripts of this folder: loaders, augmentation, corruptions, OOD and embedded sets.

    train = load("cifar10", "train", "data", seed=1)      # 45,000 rows, uint8, in memory
    ood = match(load("svhn", "test", "data"), train)      # OOD data in the training set's terms
    for batch in Loader(train, 128, "cuda", shuffle=True, augment="crop_flip").epoch(3):
        batch.images                                      # float32, normalised, on the device

    train = load_text("sst2", "train", "data")            # or load_molecules("qm9", "train")
    for batch in SequenceLoader(train, 16, "cuda", shuffle=True).epoch(3):
        batch.tokens                                      # int64, padded with 0, on the device

Small sets are an `ImageSet`: uint8 tensors that the `Loader` keeps on the device, where it crops,
flips and normalises whole batches. Folders too large for memory are a `StreamedSet`, decoded in
worker processes. Sentences are a `TextSet`, molecules a `MoleculeSet`. `DATASETS`, `TEXTS` and
`MOLECULES` list the names. What the user can mend raises `common.UserError`, in one line.
"""
import io
import math
import os
import re
import unicodedata
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets as tv
from torchvision.datasets.utils import check_md5, download_url
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

import common
from common import UserError

# ---- Sources -------------------------------------------------------------------------------------


class Source(NamedTuple):
    place: str              # what is read, below data_dir
    site: str               # where its publisher has it
    num_classes: int = 0    # 0: as many as there are class folders
    mean: tuple = ()        # per channel, of training pixels in [0,1]; (): computed, as no
    std: tuple = ()         # published value is known to us


GITHUB, ZENODO = "https://github.com/", "https://zenodo.org/records/"
IMAGENET = (0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # users' folders have these, too
TINY_IMAGENET = (0, tuple(x / 255 for x in (122.4786, 114.2755, 101.3963)),  # published on 0..255
                 tuple(x / 255 for x in (70.4924, 68.5679, 71.8127)))
SOURCES = {
    "mnist": Source("MNIST/raw", "https://ossci-datasets.s3.amazonaws.com/mnist",
                    10, (0.1307,), (0.3081,)),
    "fashion_mnist": Source("FashionMNIST/raw", GITHUB + "zalandoresearch/fashion-mnist",
                            10, (0.2860,), (0.3530,)),
    "kmnist": Source("KMNIST/raw", "http://codh.rois.ac.jp/kmnist", 10),
    "cifar10": Source("cifar-10-batches-py", "https://www.cs.toronto.edu/~kriz/cifar.html",
                      10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": Source("cifar-100-python", "https://www.cs.toronto.edu/~kriz/cifar.html",
                       100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": Source("{}_32x32.mat", "http://ufldl.stanford.edu/housenumbers",
                   10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "ambiguous_mnist": Source(
        "AmbiguousMNIST", GITHUB + "BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0",
        10, (0.1307,), (0.3081,)),
    "tiny_imagenet": Source("tiny-imagenet-200", "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                            *TINY_IMAGENET),
    "imagenet": Source("imagenet", "https://www.image-net.org (sort val into class folders)",
                       *IMAGENET),
    "imagenet_a": Source("imagenet-a", GITHUB + "hendrycks/natural-adv-examples", *IMAGENET),
    "imagenet_o": Source("imagenet-o", GITHUB + "hendrycks/natural-adv-examples", *IMAGENET),
    "imagenet_r": Source("imagenet-r", GITHUB + "hendrycks/imagenet-r", *IMAGENET),
    "cifar10_c": Source("CIFAR-10-C", ZENODO + "2535967"),
    "cifar100_c": Source("CIFAR-100-C", ZENODO + "3555552"),
    "tiny_imagenet_c": Source("Tiny-ImageNet-C", ZENODO + "2536630", *TINY_IMAGENET),
    "imagenet_c": Source("imagenet-c", ZENODO + "2235448", *IMAGENET),
    "sst2": Source("SST-2", "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"),
    "qm9": Source(
        "QM9", "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/molnet_publish/qm9.zip"),
}
TORCHVISION = {  # name: torchvision's class, rows of training and test
    "mnist": (tv.MNIST, 60000, 10000), "fashion_mnist": (tv.FashionMNIST, 60000, 10000),
    "kmnist": (tv.KMNIST, 60000, 10000), "cifar10": (tv.CIFAR10, 50000, 10000),
    "cifar100": (tv.CIFAR100, 50000, 10000), "svhn": (tv.SVHN, 73257, 26032)}
AMBIGUOUS_MNIST = {"amnist_samples.pt": "4f7865093b1d28e34019847fab917722",
                   "amnist_labels.pt": "3bfc055a9f91a76d8d493e8b898c3c95"}  # their MD5

DIGITS, LETTERS = "0123456789", "ACEFHKMNPRTUVWXY"  # no letter that a warped digit resembles
NUMBERS = [f"{k:03d}" for k in range(1000)]
WORDS = ["".join(LETTERS[4 * k // 16**place % 16] for place in (2, 1, 0)) for k in range(1000)]
EMBEDDED = {  # 28x28x1: the classes' texts, font size, stroke widths, rows of training and test
    "glyphs": (DIGITS, 52, (0, 1, 2, 3), 10000, 2000),
    "glyphs_ambiguous": (DIGITS, 50, (0, 1), 5000, 2000),    # blends of two; training rows twice
    "dirty_glyphs": (),                                      # 8,000 of each, all 4,000 of test
    "glyphs_letters": (LETTERS, 50, (0, 1, 2, 3), 10000, 2000),
    "numbers": (NUMBERS, 27, (0, 1), 30000, 5000),           # 1000 classes
    "numbers_letters": (WORDS, 27, (0, 1), 30000, 5000),
    "numbers_ambiguous": (NUMBERS, 27, (0, 1), 5000, 2000),
}
DATASETS = (*EMBEDDED, *TORCHVISION, "ambiguous_mnist", "dirty_mnist", "tiny_imagenet", "imagenet",
            "imagenet_a", "imagenet_o", "imagenet_r", "folder:PATH")
TEXTS = ("reviews", "reviews_finance", "sst2")
MOLECULES = ("clusters", "clusters_large", "qm9")
SPLITS = ("train", "val", "test", "ood")


class Absent(UserError):
    """A set is not where it has to be, and could not be downloaded."""


def _absent(name, path, error=None):
    why = f" and could not be downloaded ({common.one_line(error)})" if error else ""
    return Absent(f"{name}: {path} is not there{why}; get it from {SOURCES[name].site}")


def _damaged(name, path, why):
    site = SOURCES[name].site
    return UserError(f"{name}: {path} is damaged or incomplete ({why}); get it from {site}")


def _unreadable(path, error):
    return UserError(f"{path}: unreadable ({common.one_line(error)}); replace the file")


def _choose_from(what, value, choices):
    if value not in choices:
        raise UserError(f"{what} {value!r} is unknown; choose from {', '.join(map(str, choices))}")


def _generator(*key):
    """A CPU generator seeded by all integers of `key`; near keys give unrelated streams."""
    state = np.random.SeedSequence([k % 2**63 for k in key]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) % 2**63)


# ---- Sets ----------------------------------------------------------------------------------------


class _Set:
    """What all sets share. `rows`: the fields with an entry a row; `ragged`: those that hold the
    entries of one row after those of the other, as many as the field `counts` says."""
    rows, ragged, counts, is_features = ("labels",), (), None, False

    def __post_init__(self):
        rows = {key: len(getattr(self, key)) for key in self.rows if getattr(self, key) is not None}
        long = [len(getattr(self, key)) - int(getattr(self, self.counts).sum())
                for key in self.ragged]
        if {*rows.values()} - {0} - {len(self)} or any(long):
            raise UserError(f"{self.name}: fields of different lengths: {rows}, {long}")
        if len(self) and not self.labels.is_floating_point():
            low, high = (int(end) for end in self.labels.aminmax())
            if low < -1 or high >= self.num_classes:
                raise UserError(f"{self.name}: labels from {low} to {high}; expected 0 to "
                                f"{self.num_classes - 1}")

    def __len__(self):
        return len(self.labels)

    def select(self, index):
        """The rows `index` (a slice, integers [n] or a mask [N]) as a new set."""
        index = torch.arange(len(self))[index]
        entries = _ragged(getattr(self, self.counts), index) if self.ragged else None
        changed = {key: getattr(self, key)[entries] for key in self.ragged}
        for key in self.rows:
            own = getattr(self, key)
            changed[key] = own[index] if isinstance(own, Tensor) else own and tuple(
                own[row] for row in index.tolist())
        return replace(self, **changed)


def _ragged(counts, index):
    """int64: where the entries of rows `index` lie, of rows of `counts` entries in turn."""
    own = counts[index]
    shift = (counts.cumsum(0) - counts)[index] - (own.cumsum(0) - own)
    return torch.arange(int(own.sum())) + shift.repeat_interleave(own)


@dataclass(frozen=True, eq=False)
class ImageSet(_Set):
    """N images in memory: uint8, or float32 where the source is not 8-bit (then in [0,1], unless
    noise was added), or features [N,D,1,1]."""
    name: str
    images: Tensor          # [N,C,H,W]
    labels: Tensor          # int64 [N], 0..num_classes-1, or -1 where unknown; or float targets
    num_classes: int
    mean: tuple             # per channel, of pixels in [0,1], over the training set
    std: tuple
    label_probs: Tensor | None = None   # float32 [N,K]: the true distribution, where it is known
    groups: Tensor | None = None        # int64 [N]: equal ones are one image, split never
    classes: tuple = ()     # names in label order, by which `predict_set` compares labels
    files: tuple = ()       # the images' paths below their folder

    rows = ("images", "labels", "label_probs", "groups", "files")

    @property
    def shape(self):
        """(C, H, W)."""
        return tuple(self.images.shape[1:])

    @property
    def is_features(self):
        """Whether rows are vectors (features, points) and no pictures."""
        return self.shape[1:] == (1, 1)


@dataclass(frozen=True, eq=False)
class StreamedSet(_Set):
    """N image files, decoded as they are read, to RGB uint8 [3,S,S]."""
    name: str
    paths: tuple
    labels: Tensor
    num_classes: int
    mean: tuple
    std: tuple
    shape: tuple            # (3, S, S): of the centre crop
    resize: int | list      # to what the shorter side is resized before, or [height, width]
    classes: tuple = ()     # names in label order: ImageNet-A, -O and -R have 200 of the 1000
    root: str = ""          # the folder below which `files` are named
    expect: tuple | None = None     # the (width, height) that every file must have
    key: tuple | None = None        # integers that draw, with the row, how it is augmented

    rows = ("paths", "labels")

    @property
    def files(self):
        """Paths below the set's folder, with slashes."""
        return tuple(os.path.relpath(path, self.root).replace(os.sep, "/") for path in self.paths)

    def open(self, row):
        """File `row` as an RGB PIL image; UserError where it cannot be read."""
        path = self.paths[row]
        try:
            with Image.open(path) as file:
                if file.mode[0] in "IF":  # integers of 16 bits, floats: Pillow would cut at 255
                    raise ValueError(f"pixels of mode {file.mode}, expected 8 bits a channel")
                image = file.convert("RGB")
        except Exception as error:  # Pillow's readers raise many types, few of them documented
            raise _unreadable(path, error) from None
        if self.expect and image.size != self.expect:
            raise UserError(f"{path}: width and height {image.size}, expected {self.expect}; "
                            "unpack the published archive again")
        return image

    def __getitem__(self, row):
        """uint8 [3,S,S]: file `row`, resized and cropped; with a key under torchvision's random
        resized crop (scale .08-1, ratio 3/4-4/3) and a random flip, a function of both alone."""
        image, side = self.open(row), self.shape[-1]
        if self.key is None:
            return TF.pil_to_tensor(TF.center_crop(TF.resize(image, self.resize), side))
        with torch.random.fork_rng(devices=[]):  # get_params draws from the CPU's own generator
            torch.default_generator.manual_seed(_generator(*self.key, row).initial_seed())
            box = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = torch.rand(()) < 0.5
        image = TF.resized_crop(image, *box, [side, side])
        return TF.pil_to_tensor(TF.hflip(image) if flip else image)

    def in_memory(self):
        """An ImageSet of all files, decoded by a thread pool."""
        images = torch.empty(len(self), *self.shape, dtype=torch.uint8)
        with ThreadPoolExecutor() as pool:  # Pillow decodes without holding the interpreter's lock
            for row, image in enumerate(pool.map(self.__getitem__, range(len(self)))):
                images[row] = image
        return ImageSet(self.name, images, self.labels, self.num_classes, self.mean, self.std,
                        classes=self.classes, files=self.files if self.root else ())


@dataclass(frozen=True, eq=False)
class TextSet(_Set):
    """N sentences in memory, each `[CLS] ... [SEP]`."""
    name: str
    tokens: Tensor          # int32 [T], ids below len(vocab), one sentence after the other
    lengths: Tensor         # int64 [N], tokens of each sentence
    labels: Tensor          # int64 [N], in 0..num_classes-1, or -1 where unknown
    num_classes: int
    vocab: tuple            # the word piece of each id; 0 is "[PAD]", which no sentence holds

    rows, ragged, counts = ("lengths", "labels"), ("tokens",), "lengths"


@dataclass(frozen=True, eq=False)
class MoleculeSet(_Set):
    """N molecules in memory, the atoms of one after those of the other."""
    name: str
    numbers: Tensor         # int64 [A], atomic numbers, in 1..100
    positions: Tensor       # float64 [A,3], ångström
    sizes: Tensor           # int64 [N], atoms of each molecule
    labels: Tensor          # float64 [N]: energies in eV (float32 would be a meV off at QM9's)
    references: Tensor      # float64 [101], eV: see atom_references

    rows, ragged, counts = ("sizes", "labels"), ("numbers", "positions"), "sizes"


def evenly(dataset, limit):
    """At most `limit` rows of any set, evenly spaced; all with None."""
    n = len(dataset)
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: expected at least 1")
    return dataset if limit is None or limit >= n else dataset.select(
        torch.arange(limit) * n // limit)


def check_shares(*sets, limit=math.inf):
    """Refuse, before anything is trained, sets (or None) too small to be shared out to the
    processes; limit: how many rows are taken at a time."""
    for dataset in (own for own in sets if own is not None):
        if (rows := min(len(dataset), limit)) < common.world_size():
            raise UserError(f"{dataset.name}: {common.world_size()} process(es) cannot share {rows} "
                            f"of its {len(dataset)} example(s); start fewer, leave it out, or let "
                            "there be more")


def _unit(images):
    """float32 pixels in [0,1]."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def _like(x, images):
    """float32 pixels, clipped to [0,1], in the dtype of `images`."""
    x = x.clamp(0, 1)
    return x.mul_(255).round_().byte() if images.dtype == torch.uint8 else x


def _statistics(grey):
    """(mean, std) of uint8 images of one channel, in the form of ImageSet's."""
    std, mean = torch.std_mean(_unit(grey))
    return (round(mean.item(), 4),), (round(std.item(), 4),)


# ---- Loading -------------------------------------------------------------------------------------

SMALL = 64  # files of up to so many pixels a side are decoded once, and kept in memory


def load(name, split, data_dir="data", *, seed=1, val_fraction=0.1, published_split=None,
         noise=0.0, image_size=None, limit=None):
    """One of `DATASETS` as an ImageSet or a StreamedSet, downloaded if need be and possible, else
    `Absent` is raised; all processes must call it together.

    split            "train", "val": parts of the published training set, chosen by `seed` (or a
                     folder's own, if it has all three); "test"; "ood": test, but of a folder all
                     images at any depth, as one class
    val_fraction     share of the training set that is "val", in [0,1)
    published_split  "forde": as many of each class (see stratified_split)
    noise            std, in normalised units, of Gaussian noise added once and not clipped, the
                     same for every seed; images become float32 (Dirty-MNIST: DDU's code 0, the
                     data package 0.05)
    image_size       side of the square images read from files (a folder's: 32 unless given)
    limit            keep this many rows, evenly spaced
    """
    _choose_from("split", split, SPLITS)
    _choose_from("published_split", published_split, (None, "forde"))
    if not 0 <= val_fraction < 1 or noise < 0:
        raise UserError(f"val_fraction {val_fraction}, noise {noise}: expected 0 <= val_fraction "
                        "< 1, noise >= 0")
    training = cut = split in ("train", "val")
    if name.startswith("folder:"):
        dataset, cut = _folder(name, split, image_size or 32)
    else:
        _choose_from("dataset", name, DATASETS)
        read = (_embedded if name in EMBEDDED else _torchvision if name in TORCHVISION else
                _ambiguous_mnist if name.endswith("mnist") else
                _tiny_imagenet if name == "tiny_imagenet" else _imagenet)
        make = lambda: read(name, training, Path(data_dir), image_size)
        downloads = name in TORCHVISION or name.endswith("mnist")
        dataset = common.main_first(make) if downloads else make()
    if noise and isinstance(dataset, StreamedSet):
        raise UserError(f"{name}: noise is for sets in memory; leave it at 0")
    if noise:
        added = torch.randn(dataset.images.shape, generator=_generator(1, training))
        added *= noise * torch.tensor(dataset.std).view(-1, 1, 1)
        dataset = replace(dataset, images=added.add_(_unit(dataset.images)))
    if cut and published_split == "forde":
        parts = stratified_split(dataset.labels, val_fraction)
    elif cut:
        groups = getattr(dataset, "groups", None)
        parts = train_val_split(len(dataset), seed, val_fraction, groups)
    if cut and split == "val" and not len(parts[1]):
        raise UserError(f"{name}: {val_fraction:g} of {len(dataset)} training examples is no "
                        "validation example; take a larger share, or add some")
    dataset = evenly(dataset.select(parts[SPLITS.index(split)]) if cut else dataset, limit)
    files = name.startswith("folder:") or name == "tiny_imagenet"
    return dataset.in_memory() if files and dataset.shape[-1] <= SMALL else dataset


def train_val_split(n, seed, val_fraction=0.1, groups=None):
    """(train, val): int64 row numbers, each row in exactly one. Published: a legacy NumPy shuffle
    of 0..n-1, its first floor(val_fraction n) are validation. With groups (int64 [n]) it shuffles
    and counts the distinct groups instead, and cuts none."""
    ids, member = np.unique(np.arange(n) if groups is None else groups.numpy(), return_inverse=True)
    order = list(range(len(ids)))
    np.random.RandomState(seed).shuffle(order)
    rank = np.argsort(order)[member]
    rows = torch.from_numpy(np.argsort(rank, kind="stable"))
    n_val = int((rank < math.floor(val_fraction * len(ids))).sum())
    return rows[n_val:], rows[:n_val]


def stratified_split(labels, val_fraction=0.1, seed=88):
    """(train, val): int64 row numbers; floor(val_fraction n_c) of each class c are validation.
    Published (FoRDE): scikit-learn's train_test_split with this seed, whose very rows these are
    where val_fraction of each class is a whole number."""
    random, parts = np.random.RandomState(seed), ([], [])
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0].numpy()
        rows = rows[random.permutation(len(rows))]
        cut = len(rows) - math.floor(val_fraction * len(rows))
        parts[0].append(rows[:cut])
        parts[1].append(rows[cut:])
    return tuple(torch.from_numpy(random.permutation(np.concatenate(part))) for part in parts)


# ---- Published sets ------------------------------------------------------------------------------


def _torchvision(name, training, data_dir, _):
    (cls, *rows), source = TORCHVISION[name], SOURCES[name]
    part, mean, std = "train" if training else "test", source.mean, source.std
    path, spare = data_dir / source.place.format(part), data_dir / "cifar100_test.npz"
    # a failed download leaves an empty folder
    present = path.is_file() or path.is_dir() and any(path.iterdir())
    if name == "cifar100" and not training and not present and spare.exists():
        (images, labels), classes = common.load_arrays(spare, ("images", "labels")).values(), ()
    else:
        try:
            raw = cls(data_dir, download=True,  # also what a killed download left half done
                      **{"split": part} if name == "svhn" else {"train": training})
        except Exception as error:  # absent and cut files raise many types, few of them documented
            if present:
                raise _damaged(name, path, common.one_line(error)) from None
            raise _absent(name, path, error) from None
        images, labels = raw.data, raw.labels if name == "svhn" else raw.targets
        classes = DIGITS if name in ("mnist", "svhn") else raw.classes
    images, labels = torch.as_tensor(images), torch.as_tensor(labels).to(torch.int64)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif name != "svhn":
        images = images.permute(0, 3, 1, 2).contiguous()
    n, shape = rows[not training], (1, 28, 28) if "mnist" in name else (3, 32, 32)
    if (tuple(images.shape), images.dtype, len(labels)) != ((n, *shape), torch.uint8, n):
        raise _damaged(name, path, f"images {tuple(images.shape)}, {len(labels)} labels; expected "
                                   f"{n} of {shape}")
    if not mean:
        pool = images if training else _torchvision(name, True, data_dir, _).images
        mean, std = _statistics(pool)
    return ImageSet(name, images, labels, source.num_classes, mean, std, classes=tuple(classes))


def _ambiguous_mnist(name, training, data_dir, _):
    """Ambiguous-MNIST, each image ten times in a row with its sampled labels; after MNIST if
    `name` is dirty_mnist."""
    source = SOURCES["ambiguous_mnist"]
    samples, votes = (_read_ambiguous(data_dir / source.place / file) for file in AMBIGUOUS_MNIST)
    half = slice(0, 6000) if training else slice(6000, 12000)
    samples, votes = samples[half].float(), votes[half].long()
    probs, tens = F.one_hot(votes, 10).float().mean(1), torch.arange(6000).repeat_interleave(10)
    ambiguous = ImageSet(name, samples[tens], votes.flatten(), *source[2:], probs[tens], tens,
                         classes=tuple(DIGITS))
    if name == "ambiguous_mnist":
        return ambiguous
    mnist = _torchvision("mnist", training, data_dir, None)
    return concat(name, replace(mnist, images=_unit(mnist.images)), ambiguous)


def _read_ambiguous(path):
    """float32 [12000,1,28,28] or int64 [12000,10], as the checksums have it."""
    name, md5 = "ambiguous_mnist", AMBIGUOUS_MNIST[path.name]
    if not path.exists():
        try:
            download_url(f"{SOURCES[name].site}/{path.name}", path.parent, path.name, md5)
        except Exception as error:  # urllib, ssl and torchvision raise several types
            raise _absent(name, path, error) from None
    if not check_md5(path, md5):
        raise _damaged(name, path, f"or another release than data-v1.0.0: its MD5 is not {md5}")
    return torch.load(path, map_location="cpu", weights_only=True)


def concat(name, clean, ambiguous):
    """Clean rows, each its own group, with one-hot label distributions; then ambiguous ones, which
    have label_probs and groups."""
    one_hot = F.one_hot(clean.labels, clean.num_classes).float()
    return ImageSet(name, torch.cat([clean.images, ambiguous.images]),
                    torch.cat([clean.labels, ambiguous.labels]), clean.num_classes,
                    clean.mean, clean.std, torch.cat([one_hot, ambiguous.label_probs]),
                    torch.cat([torch.arange(len(clean)), len(clean) + ambiguous.groups]),
                    clean.classes)


# ---- Folders -------------------------------------------------------------------------------------

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


def set_name(name):
    """A set's name as part of a file's: of folder:PATH and PATH.npz the last component, without its
    suffix; characters other than A-Z a-z 0-9 . _ - become "_"."""
    if name.startswith("folder:"):
        name = Path(name.removeprefix("folder:")).expanduser().resolve().name
    name = Path(name).stem if name.endswith(".npz") else name
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".") or "folder"


def _folders_in(root):
    """Sorted names, but for hidden folders: notebooks and desktops leave some."""
    found = os.scandir(root) if root.is_dir() else ()
    return sorted(e.name for e in found if e.is_dir() and not e.name.startswith("."))


def _is_image(name):
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")  # ._x.jpg: macOS's notes


def _class_folders(name, root, stats, size, classes=None, place="{}"):
    """A StreamedSet of the images in root/<place of each class>; the classes are the folders,
    sorted, unless given."""
    classes, paths, counts = tuple(classes or _folders_in(root)), [], []
    for folder in classes:
        own = root / place.format(folder)
        files = sorted(e.path for e in os.scandir(own) if _is_image(e.name)) if own.is_dir() else []
        if not files:
            raise UserError(f"{own}: no images ({' '.join(SUFFIXES)}) in it; put the class's there")
        paths += files
        counts.append(len(files))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return _streamed(name, root, stats, size, tuple(paths), labels, classes)


def _streamed(name, root, stats, size, paths, labels, classes):
    resize = size if size <= SMALL else round(size * 256 / 224)  # of larger ones the centre is cut
    return StreamedSet(name, paths, labels, max(1, len(classes)), stats[-2], stats[-1],
                       (3, size, size), resize, classes, str(root))


def _folder(name, split, size):
    """A user's images: (the part that has the split, whether it is to be cut in train and val)."""
    root, name = Path(name.removeprefix("folder:")).expanduser(), set_name(name)
    if not root.is_dir():
        raise Absent(f"folder {root} is not there; write folder: and the path of a folder")
    if split == "ood":
        paths = tuple(sorted(os.path.join(place, file) for place, _, files in os.walk(root)
                             for file in files if _is_image(file)))
        if not paths:
            raise UserError(f"folder {root}: no images ({' '.join(SUFFIXES)}) in it")
        labels = torch.zeros(len(paths), dtype=torch.int64)
        return _streamed(name, root, IMAGENET, size, paths, labels, ()), False
    parts = {part: _folders_in(root / part) for part in SPLITS[:3]}
    classes = parts["train"]
    if len(classes) < 2 or not (parts["test"] or parts["val"]):
        lacks = "train with two classes or more" if len(classes) < 2 else "test (or val)"
        raise UserError(f"folder {root} has no {lacks}; expected {root}/train/<class>/* and "
                        f"{root}/test/<class>/* (or val): a test set is never the training set")
    for part, own in parts.items():
        if own and own != classes:
            raise UserError(f"folder {root}: class {min({*own} ^ {*classes})} is in train or in "
                            f"{part} alone; all parts need the same class folders")
    if cut := not (parts["test"] and parts["val"]):
        split = "train" if split != "test" else "test" if parts["test"] else "val"
    return _class_folders(name, root / split, IMAGENET, size), cut and split == "train"


def _imagenet(name, training, data_dir, size):
    root = data_dir / SOURCES[name].place
    if name != "imagenet" and training:
        raise UserError(f"{name} has a test split only")
    folder = root if name != "imagenet" else root / ("train" if training else "val")
    classes = _folders_in(folder)
    if not classes:
        raise _absent(name, f"{folder}/<class>/*.JPEG")
    if folder.name == "val" and (known := _folders_in(root / "train")) and known != classes:
        raise UserError(f"{name}: the class folders of {root}/train and {folder} differ; mend them")
    return _class_folders(name, folder, SOURCES[name], size or 224)


def _tiny_imagenet(name, training, data_dir, size):
    """The published layout: a class is its line in wnids.txt; test is the labelled val folder."""
    root, classes, size = data_dir / SOURCES[name].place, _wnids(data_dir), size or 64
    notes = root / "val" / "val_annotations.txt"
    if training:
        pool = _class_folders(name, root / "train", SOURCES[name], size, classes, "{}/images")
        return replace(pool, expect=(64, 64))
    if not notes.exists():
        raise _absent(name, notes)
    rows = [line.split("\t")[:2] for line in notes.read_text("utf-8").splitlines()]
    if unknown := {wnid for _, wnid in rows} - {*classes}:
        raise _damaged(name, notes, f"class {min(unknown)} is not in wnids.txt")
    paths = tuple(str(notes.parent / "images" / file) for file, _ in rows)
    labels = torch.tensor([classes.index(wnid) for _, wnid in rows])
    return replace(_streamed(name, root, SOURCES[name], size, paths, labels, classes),
                   expect=(64, 64))


def _wnids(data_dir):
    path = data_dir / SOURCES["tiny_imagenet"].place / "wnids.txt"
    if not path.exists():
        raise _absent("tiny_imagenet", path)
    return tuple(path.read_text("utf-8").split())


# ---- Corruptions ---------------------------------------------------------------------------------

CIFAR_C_KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur",
    "zoom_blur", "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate",
    "jpeg_compression", "speckle_noise", "gaussian_blur", "spatter", "saturate")  # last four: extra
CORRUPTED = {"cifar10_c": CIFAR_C_KINDS, "cifar100_c": CIFAR_C_KINDS,
             "tiny_imagenet_c": CIFAR_C_KINDS[:15], "imagenet_c": CIFAR_C_KINDS[:15]}
SEVERITIES = (1, 2, 3, 4, 5)


def corruption_kinds(name, data_dir="data"):
    """The kinds of a set of CORRUPTED that are there in all five severities, in the order of
    CIFAR_C_KINDS; the main process prints a line on what is missing."""
    _choose_from("corrupted set", name, CORRUPTED)
    folder, present, missing = Path(data_dir, SOURCES[name].place), [], []
    for kind in CIFAR_C_KINDS:
        lacks = [str(s) for s in SEVERITIES if not (
            (folder / f"{kind}.npy").exists() if name.startswith("cifar") else
            _folders_in(_severity(name, kind, s, data_dir)))]
        if not lacks:
            present.append(kind)
        elif len(lacks) < 5 or kind in CORRUPTED[name]:
            missing.append(kind if len(lacks) == 5 else f"{kind} of severity {', '.join(lacks)}")
    if missing:
        what = f"{folder} lacks {', '.join(missing)}" if present else f"{folder} is not there"
        common.say(f"{name}: {what}; get it from {SOURCES[name].site}")
    return present


def corrupted_name(name, kinds):
    """`name` where `kinds` are all of the published set's, else like cifar10_c_2of19: what a part
    of a set gives is not the set's."""
    whole = CORRUPTED[name]
    return name if {*whole} <= {*kinds} else f"{name}_{len(kinds)}of{len(whole)}"


def _severity(name, kind, severity, data_dir):
    joined = Path(data_dir, f"imagenet-c-{kind}-{severity}")
    whole = Path(data_dir, SOURCES[name].place, kind, str(severity))
    return joined if name == "imagenet_c" and joined.is_dir() else whole


def load_corrupted(name, kind, severity, data_dir="data"):
    """A test set under one corruption at severity 1..5, in memory but for imagenet_c's.

    Read from CIFAR-10-C/<kind>.npy and labels.npy (10,000 rows a severity),
    imagenet-c/<kind>/<severity>/<class>/ (or imagenet-c-<kind>-<severity>/<class>/), and the like.
    """
    _choose_from("corrupted set", name, CORRUPTED)
    _choose_from("corruption", kind, CIFAR_C_KINDS)
    _choose_from("severity", severity, SEVERITIES)
    title, source = f"{name}_{kind}_s{severity}", SOURCES[name]
    root = _severity(name, kind, severity, data_dir)
    if name.startswith("cifar"):
        clean, folder = SOURCES[name.removesuffix("_c")], Path(data_dir, source.place)
        rows = slice(severity * 10000 - 10000, severity * 10000)
        images = _npy(name, folder / f"{kind}.npy", (50000, 32, 32, 3), rows)
        labels = _npy(name, folder / "labels.npy", (50000,), rows)
        return ImageSet(title, images.permute(0, 3, 1, 2).contiguous(), labels, *clean[2:])
    if not root.is_dir():
        raise _absent(name, root)
    if name == "tiny_imagenet_c":
        dataset = _class_folders(title, root, source, 64, _wnids(Path(data_dir)))
        return replace(dataset, expect=(64, 64)).in_memory()
    if lacking := {*_folders_in(Path(data_dir, "imagenet", "val"))} - {*_folders_in(root)}:
        raise _damaged(name, root, f"no class folder {min(lacking)}, as imagenet/val has")
    return replace(_class_folders(title, root, source, 224), resize=224)


def _npy(name, path, shape, rows):
    """`rows` of an array of this shape: uint8 pixels, or labels of any integer type as int64."""
    if not path.exists():
        raise _absent(name, path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _damaged(name, path, common.one_line(error)) from None
    if array.shape != shape or array.dtype.kind not in "iu" or len(shape) > 1 and (
            array.dtype != np.uint8):
        raise _damaged(name, path, f"{array.dtype} {array.shape}, expected {shape} of uint8")
    return torch.from_numpy(array[rows].astype(np.uint8 if len(shape) > 1 else np.int64))


def corrupt(images, kind, severity, seed=0):
    """images, uint8 or float32 in [0,1] [N,C,H,W], under a kind of CORRUPTIONS, severity 1..5: a
    function of the arguments alone. The corruptions are ours, not comparable with CIFAR-10-C's."""
    _choose_from("corruption", kind, CORRUPTIONS)
    _choose_from("severity", severity, SEVERITIES)
    apply, strengths = CORRUPTIONS[kind]
    generator = _generator(seed, list(CORRUPTIONS).index(kind))
    return torch.cat([_like(apply(_unit(block.cpu()), strengths[severity - 1], generator), images)
                      for block in images.split(1000)]).to(images.device)


def corrupted(dataset, kind, severity, seed=0):
    """An ImageSet under `corrupt`, named like cifar10_computed_gaussian_noise_s3."""
    if not isinstance(dataset, ImageSet) or dataset.is_features:
        raise UserError(f"{dataset.name}: corruptions are computed for images in memory alone")
    return replace(dataset, name=f"{dataset.name}_computed_{kind}_s{severity}",
                   images=corrupt(dataset.images, kind, severity, seed))


def _impulse_noise(x, share, generator):
    u = torch.rand(x.shape, generator=generator)  # half of the share turns black, half white
    return torch.where(u < share, (u > share / 2).float(), x)


def _gaussian_blur(x, std, _):
    std, channels = std * x.shape[-1], x.shape[1]
    reach = math.ceil(3 * std)
    kernel = torch.exp(-torch.arange(-reach, reach + 1.0) ** 2 / (2 * std**2))
    kernel = (kernel / kernel.sum()).expand(channels, 1, 1, -1)
    x = F.conv2d(F.pad(x, [reach] * 4, mode="replicate"), kernel, groups=channels)
    return F.conv2d(x, kernel.mT, groups=channels)


def _motion_blur(x, length, generator):
    """Mean along a straight path of random direction, sampled about every half pixel."""
    angle = math.pi * torch.rand(len(x), generator=generator)
    path = torch.stack([angle.cos(), angle.sin()], 1)
    steps = torch.linspace(-length, length, 2 * math.ceil(length * x.shape[-1]) + 1)
    return sum(_warp(x, shift=path * step) for step in steps) / len(steps)


def _pixelate(x, kept, _):
    small = [max(1, round(kept * side)) for side in x.shape[-2:]]
    coarse = F.interpolate(x, small, mode="bilinear", antialias=True)
    return F.interpolate(coarse, x.shape[-2:], mode="nearest-exact")


def _jpeg(x, quality, _):
    out = []
    for image in (x * 255).round().byte():
        buffer = io.BytesIO()
        TF.to_pil_image(image).save(buffer, "jpeg", quality=quality)
        out.append(TF.pil_to_tensor(Image.open(buffer)))
    return _unit(torch.stack(out))


def _occlusion(x, side, generator):
    hidden = []
    for size, u in zip(x.shape[-2:], torch.rand(2, len(x), 1, generator=generator)):
        length, at = round(side * size), torch.arange(size)
        first = (u * (size - length + 1)).long()
        hidden.append((at >= first) & (at < first + length))
    return x.masked_fill((hidden[0][:, :, None] & hidden[1][:, None, :])[:, None], 0.5)


def _smooth_field(n, std, size, generator):
    """Smooth random displacements [n,*size,2], from a coarse grid of normal draws."""
    coarse = std * torch.randn(n, 2, 4, 4, generator=generator)
    return F.interpolate(coarse, size, mode="bicubic", align_corners=False).permute(0, 2, 3, 1)


def _warp(x, size=None, angle=0.0, scale=1.0, shear=0.0, shift=0.0, bend=0.0, padding="border"):
    """x [B,C,H,W] under an affine map an image, resampled to [B,C,*size].

    angle (radians), scale, shear: [B] or a number; shift [B,2] and bend [B,*size,2] are (x, y) in
    half-sides, and say where the output's points are read.
    """
    angle, scale, shear = (torch.as_tensor(t).float().expand(len(x)) for t in (angle, scale, shear))
    cos, sin = angle.cos() / scale, angle.sin() / scale
    rows = torch.stack([cos, cos * shear + sin, -sin, cos - sin * shear], 1).view(-1, 2, 2)
    shift = torch.as_tensor(shift).float().expand(len(x), 2)[:, :, None]
    shape = [len(x), 1, *(size or x.shape[-2:])]
    grid = F.affine_grid(torch.cat([rows, shift], 2), shape, align_corners=False) + bend
    return F.grid_sample(x, grid, padding_mode=padding, align_corners=False)


# kind: (function of [0,1] images, strength and generator; its strengths for severities 1..5).
# Lengths are fractions of the image's side, so that 28, 32 and 64 pixels suffer alike.
CORRUPTIONS = {
    "gaussian_noise": (lambda x, std, g: x + std * torch.randn(x.shape, generator=g),
                       (0.04, 0.08, 0.13, 0.19, 0.26)),
    "shot_noise": (lambda x, photons, g: torch.poisson(x * photons, generator=g) / photons,
                   (160, 60, 28, 14, 7)),                       # photons of a white pixel
    "impulse_noise": (_impulse_noise, (0.01, 0.03, 0.06, 0.11, 0.18)),         # share of values
    "gaussian_blur": (_gaussian_blur, (0.015, 0.022, 0.031, 0.042, 0.055)),    # std
    "motion_blur": (_motion_blur, (0.08, 0.13, 0.18, 0.24, 0.31)),             # length
    "brightness": (lambda x, added, _: x + added, (0.06, 0.12, 0.19, 0.27, 0.36)),
    "contrast": (lambda x, kept, _: x.mean((1, 2, 3), keepdim=True).lerp(x, kept),
                 (0.75, 0.55, 0.4, 0.27, 0.16)),
    "pixelate": (_pixelate, (0.8, 0.65, 0.5, 0.4, 0.3)),                       # resolution kept
    "jpeg": (_jpeg, (60, 35, 20, 12, 6)),                                      # quality
    "occlusion": (_occlusion, (0.18, 0.27, 0.36, 0.45, 0.55)),                 # side of the square
    "rotation": (lambda x, degrees, g: _warp(x, angle=math.radians(degrees) * (
        1 - 2 * torch.randint(0, 2, (len(x),), generator=g))), (8, 16, 25, 35, 46)),
    "elastic": (lambda x, std, g: _warp(x, bend=_smooth_field(len(x), std, x.shape[-2:], g)),
                (0.04, 0.07, 0.10, 0.14, 0.19)),                # displacement's std
}


# ---- Other sets in the training set's terms ------------------------------------------------------


def match(dataset, like):
    """`dataset` with the channels (grey repeated, RGB to luma), size (antialiased bilinear), mean
    and std of `like`: OOD data are always normalised with the in-distribution statistics."""
    (channels, *size), same = like.shape, dataset.shape == like.shape
    if dataset.is_features != like.is_features or dataset.is_features and not same:
        raise UserError(f"{dataset.name} {dataset.shape} and {like.name} {like.shape}: images and "
                        "features cannot be compared, nor features of different numbers")
    if not same and isinstance(dataset, StreamedSet):
        raise UserError(f"{dataset.name}: files streamed as {dataset.shape} cannot become "
                        f"{like.shape}; load them with image_size={size[0]}")
    dataset = replace(dataset, mean=like.mean, std=like.std)
    if same:
        return dataset
    blocks = []
    for block in dataset.images.split(1000):
        x = TF.rgb_to_grayscale(_unit(block)) if channels < block.shape[1] else _unit(block)
        blocks.append(_like(TF.resize(x, size), block).expand(-1, channels, -1, -1))
    return replace(dataset, images=torch.cat(blocks))


def _other_set(name, args, like, labels):
    """The set `name` to be compared with the training set `like`, in its terms."""
    if name.endswith(".npz"):
        return feature_set(name, like, labels)
    if isinstance(like, TextSet):
        return load_text(name, "test", args.data_dir, like=like)
    if isinstance(like, MoleculeSet):
        return load_molecules(name, "test", args.data_dir,
                              target=args.target if name == "qm9" else "u0")
    streamed = isinstance(like, StreamedSet)
    size = like.shape[-1] if streamed or name.startswith(("folder:", "imagenet")) else None
    dataset = load(name, "ood", args.data_dir, image_size=size)
    if isinstance(dataset, StreamedSet) and not streamed:
        dataset = dataset.in_memory()
    return match(dataset, like)


def ood_sets(args, like, taken=()):
    """{unique name: set} of `args.ood`, in the terms of the training set `like`.

    A name is one of the sets of `like`'s kind, `a+b` (both as one; in memory), folder:PATH,
    or, where `like` holds features, PATH.npz (its labels are ignored). An absent set is left out,
    and the main process says so, unless it was asked for by name ("ood" in args.explicit). Raises
    UserError for that, and for names that are equal, in `taken`, `like`'s, train, val or test.
    """
    found, absent, used = {}, {}, {"train", "val", "test", like.name, *taken}
    for name in args.ood:
        if (title := set_name(name)) in used:
            raise UserError(f"--ood {name}: another set of this run is called {title}; rename one")
        used.add(title)
        whole = name.startswith("folder:") or name.endswith(".npz") or not hasattr(like, "images")
        try:
            parts = [_other_set(part, args, like, "ignored")
                     for part in ([name] if whole else name.split("+"))]
        except Absent as error:
            if "ood" in args.explicit:
                raise
            absent[title] = error
            continue
        found[title] = replace(parts[0], name=title) if len(parts) == 1 else ImageSet(
            title, torch.cat([part.images for part in parts]),
            torch.zeros(sum(map(len, parts)), dtype=torch.int64), 1, like.mean, like.std)
    kept = common.broadcast([*found])  # machines may differ in what they have
    for title, error in absent.items():
        if title in kept:
            raise error
        common.say(f"left out: {error}")
    return {title: found[title] for title in kept}


def predict_set(args, like):
    """The set that `args.predict` names, as `ood_sets` reads it, with its labels in the terms of
    the training set `like`: by the names of the classes (of a folder's images: of the folders that
    they lie in); -1 where they are not known. `files` names the images of a folder."""
    name = args.predict
    dataset = _other_set(name, args, like, "optional")
    if isinstance(like, MoleculeSet) or like.name == name or name.endswith(".npz"):
        return dataset
    known = {c: label for label, c in enumerate(getattr(like, "classes", ()))}
    own = getattr(dataset, "classes", ())
    names = ([Path(file).parent.name for file in dataset.files] if name.startswith("folder:")
             else [own[label] if own else None for label in dataset.labels.tolist()])
    labels = torch.tensor([known.get(c, -1) for c in names])
    return replace(dataset, labels=labels, num_classes=like.num_classes)


# ---- Features and toys ---------------------------------------------------------------------------

MOST_CLASSES = 1_000_000  # a label beyond is a mistake, and would be the size of what is allocated


def read_features(path, dim=None, labelled=False):
    """'features' [N,D] of an .npz file, finite, in its floating dtype; with `labelled` (features,
    'labels'), int64 [N] from 0. D must be `dim`, if given."""
    arrays = common.load_arrays(path, ("features", "labels") if labelled else ("features",))
    if any(a.dtype.kind not in "fiu" for a in arrays.values()):
        raise UserError(f"{path}: arrays must hold numbers")
    features = arrays["features"]
    if features.ndim != 2 or features.shape[1] != (dim or features.shape[1]) or not features.size:
        raise UserError(f"{path}: 'features' must be [N, {dim or 'D'}], not {[*features.shape]}")
    if not np.isfinite(features).all():
        raise UserError(f"{path}: 'features' contain NaN or infinity")
    native = features.dtype in (np.float16, np.float32, np.float64)
    features = torch.from_numpy(features if native else features.astype(np.float64))
    if not labelled:
        return features
    labels = arrays["labels"]
    if labels.shape != features.shape[:1] or labels.dtype.kind == "f" or not (
            0 <= labels.min() and labels.max() < MOST_CLASSES):
        raise UserError(f"{path}: 'labels' must be [{len(features)}] integers from 0, below "
                        f"{MOST_CLASSES:,}")
    return features, torch.from_numpy(labels.astype(np.int64))


def feature_set(path, like=None, labels="required"):
    """'features' [N,D] and 'labels' [N] of an .npz file as an ImageSet: images float32 [N,D,1,1].

    mean and std are each feature's over the file (1 where it is constant: the Loader divides by
    std), or with `like`, a feature set, its own, and so is num_classes. labels: "required",
    "optional" (-1 where the file has none, or none of `like`'s) or "ignored" (all 0: OOD data have
    other classes).
    """
    if like is not None and not like.is_features:
        raise UserError(f"{path}: features cannot be compared with {like.name}, which has none")
    dim, own = None if like is None else like.shape[0], None
    if labels != "ignored":
        try:
            features, own = read_features(path, dim, labelled=True)
        except UserError:
            if labels == "required":
                raise
    if own is None:
        features = read_features(path, dim)
        own = torch.full((len(features),), 0 if labels == "ignored" else -1)
    features = features.float()
    if not features.isfinite().all():
        raise UserError(f"{path}: 'features' exceed float32")
    if like is None:
        std, mean = torch.std_mean(features.double(), 0, correction=0)
        std[std == 0] = 1
        stats = int(own.max()) + 1, tuple(mean.tolist()), tuple(std.tolist())
    else:
        stats = like.num_classes, like.mean, like.std
        if labels == "required" and own.max() >= like.num_classes:
            raise UserError(f"{path}: label {own.max()} is not one of the {like.num_classes} "
                            f"classes of {like.name}; give files of one labelling")
        own = own.where(own < like.num_classes, -1)
    return ImageSet(set_name(str(path)), features[:, :, None, None], own, *stats)


def two_moons(n, noise=0.1, seed=0):
    """Two interleaved half circles, as in scikit-learn's make_moons, class 0 first:
    (x float32 [n,2], y int64 [n]); noise is the std on each coordinate."""
    a, b = (torch.linspace(0, math.pi, k, dtype=torch.float64) for k in (n // 2, n - n // 2))
    x = torch.stack([torch.cat([a.cos(), 1 - b.cos()]), torch.cat([a.sin(), 0.5 - b.sin()])], 1)
    x += noise * torch.randn(n, 2, generator=_generator(seed), dtype=torch.float64)
    return x.float(), (torch.arange(n) >= n // 2).long()


def gaussian_ring(n_per_class, seed=42):
    """(x float32 [5n,2], y int64 [5n]): n of each of five Gaussians of unit variance, centred at
    0, 72, ..., 288 degrees of a circle of radius 5 (D'Angelo & Fortuin 2021), class 0 first."""
    y = torch.arange(5).repeat_interleave(n_per_class)
    angle = 2 * math.pi / 5 * y.double()
    x = torch.randn(len(y), 2, generator=_generator(seed), dtype=torch.float64)
    x += 5 * torch.stack([angle.cos(), angle.sin()], 1)
    return x.float(), y


def gapped_regression(n=60, seed=0):
    """(x float32 [n], y float32 [n]) in the style of Izmailov et al. 2019: y = sin(x) + (x / 5)^2
    and noise of std 0.1, x = 7 u with u uniform in [-1,-0.6], [-0.1,0.25] and [0.6,1], in this
    order, a third (as nearly as n allows) in each."""
    low, high = torch.tensor([[-1, -0.1, 0.6], [-0.6, 0.25, 1]], dtype=torch.float64)
    cluster, generator = torch.arange(n) * 3 // n, _generator(seed)
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    x = 7 * low[cluster].lerp(high[cluster], u)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x.float(), (x.sin() + (x / 5) ** 2 + 0.1 * noise).float()


# ---- Batches -------------------------------------------------------------------------------------


class _Batches:
    """What both loaders share. `batch_size` is global: each batch is cut into contiguous near-equal
    pieces, as np.array_split does, of which this process gets that of its rank (it may be empty in
    the last batch), with `whole` all: together they are, bit for bit, one process's batch."""

    def __init__(self, dataset, batch_size, device, seed, shuffle, whole):
        self.rank, self.world_size = (0, 1) if whole else (common.rank(), common.world_size())
        most = min(batch_size, len(dataset))
        if most < 1 or most < self.world_size:
            raise UserError(f"{dataset.name}: {len(dataset)} rows in batches of {batch_size} are "
                            f"too few for {self.world_size} processes")
        self.dataset, self.batch_size, self.device = dataset, batch_size, torch.device(device)
        self.seed, self.shuffle, self.labels = seed, shuffle, dataset.labels.to(self.device)

    def __len__(self):
        """Batches in an epoch, over all processes."""
        return -(-len(self.dataset) // self.batch_size)

    def _order(self, epoch):
        """(the epoch's generator, int64 [N]: the rows in their order)."""
        generator, n = _generator(self.seed, epoch), len(self.dataset)
        return generator, (torch.randperm(n, generator=generator) if self.shuffle else
                           torch.arange(n))

    def _piece(self, batch):
        """(first, last, global size) of a batch: this rank's part is first:last of the order."""
        begin = batch * self.batch_size
        size = min(self.batch_size, len(self.dataset) - begin)
        share, longer = divmod(size, self.world_size)
        first = begin + self.rank * share + min(self.rank, longer)
        return first, first + share + (self.rank < longer), size


# A part of a batch, on the device; index: its rows of the set; global_size: rows over all processes
Batch = namedtuple("Batch", "images labels index global_size")              # float32, normalised
TextBatch = namedtuple("TextBatch", "tokens labels index global_size")      # int64, padded with 0
MoleculeBatch = namedtuple("MoleculeBatch", "molecules labels index global_size")   # Molecules


class Loader(_Batches):
    """Batches of an ImageSet or a StreamedSet, in an order that depends on (seed, epoch) alone.

    augment    "none"; "crop_flip": pad with 4 black pixels, random crop, random flip (files:
               random resized crop and flip); "reflect_crop_flip": the border is mirrored instead
    workers    processes that decode a StreamedSet
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False, augment="none",
                 workers=0, channels_last=False, whole=False):
        super().__init__(dataset, batch_size, device, seed, shuffle, whole)
        self.streamed = isinstance(dataset, StreamedSet)
        _choose_from("augment", augment,
                     ("none", "crop_flip", "reflect_crop_flip")[:2 if self.streamed else 3])
        if augment != "none" and dataset.is_features:
            raise UserError(f"{dataset.name}: {augment} would destroy features; augment images")
        self.augment, self.workers = augment, workers
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        white = 255 if self.streamed or dataset.images.dtype == torch.uint8 else 1
        stats = torch.tensor([dataset.mean, dataset.std], dtype=torch.float64)
        mean, std = (stats * white).view(2, -1, 1, 1)
        self.shift, self.scale = mean.float().to(self.device), (1 / std).float().to(self.device)
        if not self.streamed:
            self._place(dataset.images)

    def _place(self, images):
        """Pad the images, so that every crop lies in one contiguous run of memory: with rows of S
        pixels, the crop at (dy, dx) starts dy S + dx after its image. `runs` views them as rows."""
        self.pad = 0 if self.augment == "none" else 4
        if self.pad:
            border = [(0, 0), (0, 0), (self.pad, self.pad), (self.pad, self.pad)]
            mode = "constant" if self.augment == "crop_flip" else "reflect"
            images = torch.from_numpy(np.pad(images.cpu().numpy(), border, mode))
        images = images.to(self.device).contiguous()
        _, channels, height, self.row = images.shape
        self.image = channels * height * self.row
        run = self.image - 2 * self.pad * (self.row + 1)
        self.strides = (run, height * self.row, self.row, 1)
        self.runs = images.view(-1).as_strided((images.numel() - run + 1, run), (1, 1))

    def epoch(self, epoch=0):
        """Iterate over the batches of `epoch`."""
        generator, order = self._order(epoch)
        pieces = [self._piece(batch) for batch in range(len(self))]
        return (self._stream if self.streamed else self._gather)(order, pieces, generator, epoch)

    def _gather(self, order, pieces, generator, _):
        begin, flips = order * self.image, None
        if self.pad:
            dy, dx = torch.randint(0, 2 * self.pad + 1, (2, len(order)), generator=generator)
            flips = torch.randint(0, 2, (len(order),), generator=generator).to(self.device)
            begin += dy * self.row + dx
        order, begin = order.to(self.device), begin.to(self.device)
        for first, last, size in pieces:
            index, b = order[first:last], last - first
            x = self.runs.index_select(0, begin[first:last])
            x = x.as_strided((b, *self.dataset.shape), self.strides)
            if flips is not None:  # both of each, then the one drawn: no wait for the device
                drawn = torch.arange(b, device=self.device).add_(flips[first:last], alpha=b)
                x = torch.cat([x, x.flip(3)]).index_select(0, drawn)
            yield Batch(self._normalise(x), self.labels[index], index, size)

    def _stream(self, order, pieces, generator, epoch):
        key = None if self.augment == "none" else (self.seed, epoch)
        rows = [order[first:last] for first, last, _ in pieces]
        batches = iter(DataLoader(  # a generator of its own: the global one is left alone
            replace(self.dataset, key=key), batch_sampler=[r.tolist() for r in rows if len(r)],
            num_workers=self.workers, pin_memory=self.device.type == "cuda", generator=generator))
        for index, (*_, size) in zip(rows, pieces):
            try:
                images = next(batches) if len(index) else torch.empty(0, *self.dataset.shape)
            except UserError as error:  # from a worker it comes with a traceback in its message
                raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None
            images, index = (t.to(self.device, non_blocking=True) for t in (images, index))
            yield Batch(self._normalise(images), self.labels[index], index, size)

    def _normalise(self, x):
        x = x.to(torch.float32, memory_format=self.format, copy=True)
        return x.sub_(self.shift).mul_(self.scale)


# ---- Embedded images -----------------------------------------------------------------------------


@lru_cache(maxsize=None)
def _embedded(name, training, *_):
    """The training pool or the test part of an embedded set; nothing else changes what it holds."""
    if name == "dirty_glyphs":
        clean, ambiguous = (_embedded(part, training) for part in ("glyphs", "glyphs_ambiguous"))
        dataset = concat(name, clean.select(slice(8000)), ambiguous.select(slice(8000)))
    else:
        texts, font_size, strokes, *rows = EMBEDDED[name]
        generator = _generator(2102, list(EMBEDDED).index(name), training)
        draw = _blends if name.endswith("ambiguous") else _prints
        parts = draw(name, rows[not training], generator, _templates(texts, font_size, strokes),
                     2 if training else 1)
        dataset = ImageSet(name, *parts[:2], len(texts), (0.0,), (1.0,), *parts[2:],
                           classes=tuple(texts))
    mean, std = _statistics((dataset if training else _embedded(name, True)).images)
    return replace(dataset, mean=mean, std=std)


def _templates(texts, font_size, strokes):
    """float32 [S,T,56,56]: each text, centred, in Pillow's own font, at S growing stroke widths."""
    font, pages = ImageFont.load_default(font_size), []
    for stroke in strokes:
        for text in texts:
            left, top, right, bottom = font.getbbox(text, stroke_width=stroke)
            at, page = (28 - (left + right) / 2, 28 - (top + bottom) / 2), Image.new("L", (56, 56))
            ImageDraw.Draw(page).text(at, text, 255, font, stroke_width=stroke)
            pages.append(TF.pil_to_tensor(page))
    return _unit(torch.cat(pages)).view(len(strokes), len(texts), 56, 56)


def _draw(templates, labels, generator, tilt=15.0, shear=0.25, scale=(0.8, 1.1), shift=0.12,
          bend=0.05, apart=0.0):
    """Ink in [0,1], float32 [N,1,28,28]: templates at random weights, affine maps and bends.

    tilt in degrees, small lest a 6 be a 9; shift, bend, apart (a fixed shift [N,2]) in half-sides.
    """
    n, size = len(labels), (28, 28)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    weight = uniform(0, len(templates) - 1.001)
    maps = (uniform(-tilt, tilt) * math.pi / 180, uniform(*scale), uniform(-shear, shear),
            uniform(-shift, shift, 2) + apart)
    field, out = _smooth_field(n, bend, size, generator), []
    for rows in torch.arange(n).split(1000):
        thin, label, mix = weight[rows].long(), labels[rows], (weight[rows] % 1)[:, None, None]
        ink = templates[thin, label].lerp(templates[thin + 1, label], mix)[:, None]
        out.append(_warp(ink, size, *(m[rows] for m in maps), field[rows], "zeros"))
    return torch.cat(out)


SMALL_PRINT = dict(tilt=7.0, shear=0.15, scale=(0.95, 1.05), shift=0.06, bend=0.02)  # of numbers


def _print(ink, generator):
    """uint8 [N,1,28,28]: ink in a random grey on a random ground, with pixel noise."""
    low, high, noise = torch.rand(3, len(ink), 1, 1, 1, generator=generator)
    x = (0.15 * low).lerp(0.65 + 0.35 * high, ink)
    x += (0.02 + 0.06 * noise) * torch.randn(ink.shape, generator=generator)
    return x.clamp_(0, 1).mul_(255).round_().byte()


def _prints(name, n, generator, templates, _):
    """(images, labels): every class as often, in random order."""
    labels = torch.randperm(n, generator=generator) % templates.shape[1]
    ink = _draw(templates, labels, generator, **SMALL_PRINT if "numbers" in name else {})
    return _print(ink, generator), labels


def _blends(name, n, generator, templates, times):
    """Two texts over each other, the first with the share w (.35-.65) of the ink: the label is the
    first with probability w. Digits lie a little apart, and their training pool has each twice."""
    digits, k = name == "glyphs_ambiguous", templates.shape[1]
    first = torch.randperm(n, generator=generator) % k
    second = (first + torch.randint(1, k, (n,), generator=generator)) % k
    style, apart = SMALL_PRINT, 0.0
    if digits:
        angle = 2 * math.pi * torch.rand(n, generator=generator)
        style = dict(tilt=10.0, shear=0.15, scale=(0.75, 0.95), shift=0.0, bend=0.03)
        apart = 0.25 * torch.stack([angle.cos(), angle.sin()], 1)
    w = 0.35 + 0.3 * torch.rand(n, 1, generator=generator)
    share = w[:, :, None, None]
    a, b = (_draw(templates, label, generator, **style, apart=offset)
            for label, offset in ((first, apart), (second, -apart)))
    ink = ((share * a + (1 - share) * b) / torch.maximum(share, 1 - share)).clamp_(0, 1)
    probs = torch.zeros(n, k).scatter_(1, first[:, None], w).scatter_(1, second[:, None], 1 - w)
    rows = torch.arange(n).repeat_interleave(times if digits else 1)
    if digits:  # they draw their labels after the print's noise, numbers before it
        images, u = _print(ink, generator), torch.rand(len(rows), generator=generator)
    else:
        u, images = torch.rand(len(rows), generator=generator), _print(ink, generator)
    labels = torch.where(u < w[rows, 0], first[rows], second[rows])
    return images[rows], labels, probs[rows], *([rows] if digits else [])


# ---- Texts and molecules -------------------------------------------------------------------------


def load_text(name, split, data_dir="data", *, vocab_file=None, like=None):
    """One of `TEXTS` as a TextSet; its splits are fixed.

    split       "train", "val", "test"; those of sst2: see sst2_has_test_labels
    vocab_file  BERT's vocab.txt, a word piece a line; by default sst2 has the `vocabulary` of its
                training sentences, and reviews and reviews_finance that of both: as BERT's does,
                it knows words that training lacks, so that length does not give OOD data away
    like        a TextSet whose vocabulary is used instead: that of the model's training set
    """
    _choose_from("dataset", name, TEXTS)
    _choose_from("split", split, SPLITS[:3])
    read = lambda name, split: _embedded_text(name, split) if name != "sst2" else _sst2(
        Path(data_dir) / SOURCES["sst2"].place, split)
    sentences, labels = read(name, split)
    if like is not None:
        vocab = like.vocab
    elif vocab_file is not None:
        vocab = read_vocabulary(vocab_file)
    else:
        sets = ("sst2",) if name == "sst2" else TEXTS[:2]
        vocab = vocabulary([sentence for own in sets for sentence in read(own, "train")[0]])
    return TextSet(name, *tokenise(sentences, vocab), labels, 2, vocab)


def load_molecules(name, split, data_dir="data", *, target="u0"):
    """One of `MOLECULES` as a MoleculeSet; its splits are fixed.

    split   "train", "val", "test"; qm9's are the published ones where all 130,831 molecules are
            there, else the same shares of a permutation drawn in the same way
    target  one of `QM9_TARGETS`, for qm9; clusters have one target, their energy
    """
    _choose_from("dataset", name, MOLECULES)
    _choose_from("split", split, SPLITS[:3])
    _choose_from("target", target, QM9_TARGETS if name == "qm9" else ("u0",))
    if name == "qm9":
        dataset = _qm9(Path(data_dir) / SOURCES["qm9"].place, target)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset)))
        ends = [round(rows / QM9_MOLECULES * len(dataset)) for rows in (110000, 120000)]
    else:
        dataset = _embedded_molecules(name)
        order, ends = torch.arange(len(dataset)), [4000, 4500]
    return dataset.select(order.tensor_split(ends)[SPLITS.index(split)])


class Molecules(NamedTuple):
    """Molecules as one graph. An edge leads from `sources` to `targets` for every two atoms of a
    molecule closer than the cutoff, both ways, sorted by target; none from an atom to itself."""
    numbers: Tensor     # int64 [a], atomic numbers
    positions: Tensor   # float32 [a,3], ångström
    molecule: Tensor    # int64 [a], in 0..count-1, ascending
    sources: Tensor     # int64 [e], atoms in 0..a-1
    targets: Tensor     # int64 [e], ascending
    count: int          # molecules


class SequenceLoader(_Batches):
    """Batches of a TextSet or a MoleculeSet, in an order that depends on (seed, epoch) alone.

    Sentences of like length share batches, padded to the longest of the global batch. Shuffled,
    each 50 batches are sorted by length and the batches then permuted, so that the partial one may
    come anywhere; else all sentences are sorted. cutoff (ångström): of the edges of molecules,
    which are found once, here.
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False, cutoff=5.0,
                 whole=False):
        super().__init__(dataset, batch_size, device, seed, shuffle, whole)
        if isinstance(dataset, MoleculeSet):
            self.sources, self.targets, self.edges = find_edges(dataset, cutoff)

    def epoch(self, epoch=0):
        """Iterate over the batches of `epoch`."""
        (generator, order), batches = self._order(epoch), torch.arange(len(self))
        text, n = isinstance(self.dataset, TextSet), len(self.dataset)
        if text:
            chunk = torch.arange(n) // (50 * self.batch_size if self.shuffle else n)
            key = chunk * (int(self.dataset.lengths.max()) + 1) + self.dataset.lengths[order]
            order = order[key.argsort(stable=True)]
            if self.shuffle:
                batches = torch.randperm(len(self), generator=generator)
        for batch in batches.tolist():
            first, last, size = self._piece(batch)
            index, begin = order[first:last], batch * self.batch_size
            parts = (self._tokens(index, order[begin:begin + size]) if text else
                     self._molecules(index))
            index = index.to(self.device, non_blocking=True)
            yield (TextBatch if text else MoleculeBatch)(parts, self.labels[index], index, size)

    def _tokens(self, index, whole):
        """int64 [b,L]: the sentences `index`, as long as the longest of `whole`."""
        part, longest = self.dataset.select(index), int(self.dataset.lengths[whole].max())
        real = torch.arange(longest) < part.lengths[:, None]
        tokens = torch.zeros(real.shape, dtype=torch.int64)
        return tokens.masked_scatter_(real, part.tokens.long()).to(self.device, non_blocking=True)

    def _molecules(self, index):
        part, at = self.dataset.select(index), _ragged(self.edges, index)
        first = part.sizes.cumsum(0) - part.sizes
        shift = first.repeat_interleave(self.edges[index])
        tensors = (part.numbers, part.positions.float(),
                   torch.arange(len(index)).repeat_interleave(part.sizes),
                   self.sources[at] + shift, self.targets[at] + shift)
        return Molecules(*(t.to(self.device, non_blocking=True) for t in tensors), len(index))


def find_edges(dataset, cutoff=5.0):
    """(sources int16 [E], targets int16 [E], edges int64 [N] a molecule): the two atoms, counted
    within their molecule, of all pairs of different atoms closer than `cutoff`; by target."""
    found, largest = [], int(dataset.sizes.max())
    apart = ~torch.eye(largest, dtype=torch.bool)
    for rows in torch.arange(len(dataset)).split(1 + 2**20 // largest**2):
        part = dataset.select(rows)
        real = torch.arange(largest) < part.sizes[:, None]
        place = torch.zeros(*real.shape, 3, dtype=torch.float64)
        place[real] = part.positions
        near = (place[:, None] - place[:, :, None]).square().sum(3) < cutoff**2
        near &= real[:, None] & real[:, :, None] & apart
        _, target, source = near.nonzero(as_tuple=True)
        found.append((source.short(), target.short(), near.sum((1, 2))))
    return tuple(torch.cat(part) for part in zip(*found))


# ---- Word pieces ---------------------------------------------------------------------------------

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


def sst2_has_test_labels(data_dir="data"):
    """Whether SST-2/test.tsv is labelled; then its splits are as published. GLUE withholds the
    labels; then test is dev.tsv, and val 2,000 rows of train.tsv (of short files a tenth), which
    has phrases of its sentences as rows: this val is easier than test, and what is fitted on it too
    confident."""
    path = Path(data_dir) / SOURCES["sst2"].place / "test.tsv"
    header = _read_lines("sst2", path)[0]
    if header not in ("sentence\tlabel", "index\tsentence"):
        raise _damaged("sst2", path, f"header {header[:80]!r}, expected 'sentence<TAB>label', or "
                                     "'index<TAB>sentence' where the labels are withheld")
    return header == "sentence\tlabel"


def _sst2(folder, split):
    """(sentences, labels int64 [N]) of sentence<TAB>label rows, without quoting."""
    labelled = sst2_has_test_labels(folder.parent)
    files = ("train", "dev", "test") if labelled else ("train", "train", "dev")
    path = folder / f"{files[SPLITS.index(split)]}.tsv"
    header, *lines = _read_lines("sst2", path)
    rows = [line.split("\t") for line in lines]
    if header != "sentence\tlabel" or not rows:
        raise _damaged("sst2", path, f"header {header[:80]!r}, {len(rows)} rows; expected "
                                     "'sentence<TAB>label' and rows")
    for number, row in enumerate(rows, 2):
        if len(row) != 2 or not row[0].strip() or row[1] not in ("0", "1"):
            raise UserError(f"{path}, line {number}: {lines[number - 2][:80]!r}; expected "
                            "sentence<TAB>label, label 0 or 1")
    sentences, labels = [row[0] for row in rows], torch.tensor([int(row[1]) for row in rows])
    if labelled or split == "test":
        return sentences, labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    n_val = min(2000, len(labels) // 10)
    keep = order[:n_val] if split == "val" else order[n_val:].sort()[0]
    return [sentences[row] for row in keep.tolist()], labels[keep]


def _read_lines(name, path, end="\n"):
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _absent(name, path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    # not splitlines, which cuts at more characters than these
    return text.replace("\r\n", "\n").removesuffix("\n").split(end)


def read_vocabulary(path):
    """A vocab.txt (a word piece a line, line number = id, [PAD] first) as a tuple."""
    path = Path(path)
    vocab = tuple(_read_lines("sst2", path)) if path.exists() else ()
    if vocab[:1] != SPECIAL[:1] or {*SPECIAL[:4]} - {*vocab}:
        raise UserError(f"{path}: expected BERT's vocab.txt, a word piece a line, [PAD] first, "
                        f"with {', '.join(SPECIAL[1:4])}")
    return vocab


def vocabulary(sentences, size=30522):
    """At most `size` word pieces: BERT's special tokens; every character c, then every ##c; words
    that come twice or more, by falling frequency, equals in alphabetical order."""
    words = Counter(word for sentence in sentences for word in _words(sentence))
    characters = sorted({c for word in words for c in word})
    pieces = [*SPECIAL, *characters, *("##" + c for c in characters)]
    frequent = sorted((w for w, count in words.items() if count > 1 and len(w) > 1),
                      key=lambda word: (-words[word], word))
    return tuple((pieces + frequent)[:size])


def tokenise(sentences, vocab, max_length=268):
    """BERT's uncased WordPiece: (tokens int32 [T], lengths int64 [N]), each `[CLS] ... [SEP]`.

    Each word is cut from the left into the longest pieces that `vocab` has; one that cannot be, or
    of more than 100 characters, is [UNK]. Sentences keep their first max_length - 2 pieces.
    """
    table, tokens, lengths = {piece: number for number, piece in enumerate(vocab)}, [], []
    cut = lru_cache(maxsize=None)(lambda word: _word_pieces(word, table))  # each word once
    for sentence in sentences:
        ids = [number for word in _words(sentence) for number in cut(word)][:max_length - 2]
        tokens += [table["[CLS]"], *ids, table["[SEP]"]]
        lengths.append(len(ids) + 2)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64)


@lru_cache(maxsize=None)
def _character(c):
    """What becomes of a decomposed, lower-case character."""
    kind = unicodedata.category(c)
    if c in "\t\n\r" or kind == "Zs":
        return " "
    if c == "\ufffd" or kind[0] == "C" or kind == "Mn":  # control characters, accents
        return ""
    # all ASCII signs count as punctuation, "$" and "^" too
    sign = kind[0] == "P" or c.isascii() and not c.isalnum()
    return f" {c} " if sign or any(low <= ord(c) <= high for low, high in CJK) else c


def _words(text):
    """The words of a text, in lower case and without accents; punctuation and CJK alone."""
    return "".join(map(_character, unicodedata.normalize("NFD", text.lower()))).split()


def _word_pieces(word, table):
    """The ids of the longest pieces from the left, or [UNK]'s."""
    ids, start = [], 0
    while start < len(word) <= 100:
        mark = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if mark + word[start:end] in table),
                   None)
        if end is None:
            return [table["[UNK]"]]
        ids.append(table[mark + word[start:end]])
        start = end
    return ids or [table["[UNK]"]]


# ---- Molecules: files and energies ---------------------------------------------------------------

HARTREE_EV, KCAL_MOL_EV = 27.211386246, 0.04336414  # as in PyTorch Geometric's copy of the set
QM9_MOLECULES = 130831
QM9_ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
QM9_ATOMS = {  # free atoms of QM9_ELEMENTS, hartree, as published
    "u0": (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730),
    "u298": (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314),
    "h298": (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370),
    "g298": (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544)}
QM9_TARGETS = {  # name: factor to our unit. Energies in eV; others as published
    **dict.fromkeys(("A", "B", "C", "mu", "alpha", "r2", "cv"), 1),
    **dict.fromkeys(("homo", "lumo", "gap", "zpve", *QM9_ATOMS), HARTREE_EV),
    **dict.fromkeys((f"{energy}_atom" for energy in QM9_ATOMS), KCAL_MOL_EV)}


def atom_references(target="u0"):
    """float64 [101], eV: the free atoms' `target` by atomic number; zeros where it has none."""
    references = torch.zeros(101, dtype=torch.float64)
    if target in QM9_ATOMS:
        values = torch.tensor(QM9_ATOMS[target], dtype=torch.float64)
        references[list(QM9_ELEMENTS.values())] = values * HARTREE_EV
    return references


def _qm9(folder, target):
    """All molecules that are there, in the order of their numbers, as a MoleculeSet: of the
    published gdb9.sdf (with gdb9.sdf.csv and uncharacterized.txt), else of qm9_subset.npz."""
    places = [folder / "gdb9.sdf", folder / "raw" / "gdb9.sdf", folder / "qm9_subset.npz"]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise _absent("qm9", f"{places[0]} (with gdb9.sdf.csv, uncharacterized.txt)")
    numbers, positions, sizes, columns = _read_qm9(path, path.stat().st_mtime_ns)
    if lacking := {*QM9_TARGETS} - {*columns}:
        raise _damaged("qm9", path, f"no targets {', '.join(sorted(lacking))}")
    values = torch.from_numpy(np.ascontiguousarray(columns[target])) * QM9_TARGETS[target]
    known = torch.tensor(list(QM9_ELEMENTS.values()))
    if len(strange := numbers[torch.isin(numbers, known, invert=True)]):
        raise _damaged("qm9", path, f"element {int(strange[0])}; QM9 has {', '.join(QM9_ELEMENTS)}")
    if not (values.isfinite().all() and positions.isfinite().all()):
        raise _damaged("qm9", path, "NaN or infinity among positions or targets")
    return MoleculeSet("qm9", numbers, positions, sizes, values, atom_references(target))


@lru_cache(maxsize=1)
def _read_qm9(path, _):
    """(atomic numbers int64 [A], positions float64 [A,3], sizes int64 [N], targets by name [N])."""
    if path.suffix == ".sdf":
        numbers, positions, sizes, columns = _read_sdf(path)
    else:
        names = ("N", "Z", "R", "targets", "target_names")
        sizes, numbers, positions, targets, names = common.load_arrays(path, names).values()
        columns, shape = dict(zip(names.tolist(), targets.T)), (int(sizes.sum()), 3)
        if positions.shape != shape or numbers.shape != shape[:1] or (
                targets.shape != (*sizes.shape, len(names))):
            raise _damaged("qm9", path, f"Z {numbers.shape}, R {positions.shape}, targets "
                                        f"{targets.shape} for {shape[0]} atoms of N")
    return (torch.as_tensor(numbers).long(), torch.as_tensor(positions).double().view(-1, 3),
            torch.as_tensor(sizes).long(), columns)


def _read_sdf(path):
    """gdb9.sdf and gdb9.sdf.csv, as PyTorch Geometric reads them: without the molecules whose
    numbers begin lines of uncharacterized.txt; coordinates have 4 digits."""
    lines = _read_lines("qm9", path.with_name("uncharacterized.txt"))
    omitted = {int(line.split()[0]) for line in lines if line.strip()[:1].isdecimal()}
    table = path.with_name("gdb9.sdf.csv")
    header, *rows = (line.split(",") for line in _read_lines("qm9", table))
    blocks = _read_lines("qm9", path, end="$$$$\n")
    kept = [row for row in range(len(rows)) if row + 1 not in omitted]
    if len(blocks) != len(rows) or len(kept) > QM9_MOLECULES:
        raise _damaged("qm9", path, f"{len(blocks)} molecules, {len(rows)} rows in {table.name}, "
                                    f"{len(omitted)} in uncharacterized.txt")
    numbers, positions, sizes, columns = [], [], [], []
    for row in kept:
        try:
            lines = blocks[row].split("\n")
            atoms = [lines[4 + k].split() for k in range(int(lines[3][:3]))]
            numbers += [QM9_ELEMENTS[atom[3]] for atom in atoms]
            positions += [float(x) for atom in atoms for x in atom[:3]]
            sizes.append(len(atoms))
            columns.append([float(value) for value in rows[row][1:]])
            if len(columns[-1]) != len(header) - 1:
                raise ValueError(f"{len(rows[row])} fields in {table.name}")
        except (ValueError, IndexError, KeyError) as error:
            raise _damaged("qm9", path, f"molecule {row + 1}: {common.one_line(error)}") from None
    return numbers, np.array(positions), sizes, dict(zip(header[1:], np.array(columns).T))


# atomic number: depth (eV), covalent radius (ångström), electronegativity
PAIR_TERMS = {1: (3.2, 0.35, 2.2), 6: (3.9, 0.76, 2.55), 7: (3.2, 0.71, 3.04), 8: (3.0, 0.66, 3.44)}


def pair_energy(numbers, positions):
    """Energy of molecules under the clusters' potential, eV, float64 [...].

    sum_i ref(Z_i) + sum_{i<j, d<5} D_ij (exp(-2a(d - r_ij)) - 2 exp(-a(d - r_ij))) cos^2(pi d/10)

    with the distance d in ångström, r_ij the sum of covalent radii, D_ij the geometric mean of the
    elements' depths times 1 + 0.2 |difference of electronegativities|, and a = 1.7 / ångström.

    numbers    int64 [...,n]: 1, 6, 7, 8; 0 is no atom
    positions  float64 [...,n,3], ångström
    """
    terms = torch.zeros(101, 3, dtype=torch.float64)
    terms[list(PAIR_TERMS)] = torch.tensor(list(PAIR_TERMS.values()), dtype=torch.float64)
    depth, radius, pull = terms[numbers].unbind(-1)
    well = (depth[..., None] * depth[..., None, :]).sqrt()
    well = well * (1 + 0.2 * (pull[..., None] - pull[..., None, :]).abs())
    apart = positions[..., None, :] - positions[..., None, :, :]
    d = apart.square().sum(-1).sqrt()
    decay = torch.exp(-1.7 * (d - radius[..., None] - radius[..., None, :]))
    energy = well * (decay.square() - 2 * decay) * torch.cos(math.pi * d / 10).square()
    pairs = (d < 5).triu(1)
    return atom_references()[numbers].sum(-1) + (energy * pairs).sum((-2, -1))


# ---- Embedded texts and molecules ----------------------------------------------------------------


@lru_cache(maxsize=None)
def _embedded_molecules(name):
    """All 5,500 rows of clusters or clusters_large. Each atom is put near bond length from an
    earlier one: at the first of `tries` random places no nearer to any than 0.85 of the sum of
    radii, else at the widest."""
    smallest, largest = (4, 10) if name == "clusters" else (11, 16)
    n, tries, generator = 5500, 12, _generator(2103, smallest)
    sizes = torch.randint(smallest, largest + 1, (n,), generator=generator)
    elements, shares = torch.tensor([1, 6, 7, 8]), torch.tensor([0.45, 0.3, 0.12, 0.13])
    numbers = elements[shares.multinomial(n * largest, True, generator=generator)].view(n, -1)
    radius = torch.tensor([PAIR_TERMS.get(z, (0, 0))[1] for z in range(9)], dtype=torch.float64)
    radius, rows = radius[numbers], torch.arange(n)[:, None]
    positions = torch.zeros(n, largest, 3, dtype=torch.float64)
    for atom in range(1, largest):
        parent = torch.randint(0, atom, (n, tries), generator=generator)
        away = torch.randn(n, tries, 3, generator=generator, dtype=torch.float64)
        bond = (radius[rows, parent] + radius[:, atom:atom + 1])[:, :, None]
        bond = bond * (0.92 + 0.2 * torch.rand(n, tries, 1, generator=generator).double())
        place = positions[rows, parent] + bond * F.normalize(away, dim=2)
        apart = (place[:, :, None] - positions[:, None, :atom]).square().sum(3).sqrt()
        room = (apart / (radius[:, None, :atom] + radius[:, None, atom:atom + 1])).amin(2)
        best = torch.where((room >= 0.85).any(1), (room >= 0.85).byte().argmax(1), room.argmax(1))
        positions[:, atom] = place[rows[:, 0], best]
    real = torch.arange(largest) < sizes[:, None]
    energies = pair_energy(numbers.where(real, 0), positions)
    return MoleculeSet(name, numbers[real], positions[real], sizes, energies, atom_references())


SUBJECTS = ("the film", "the movie", "the plot", "the acting", "the script", "this one",
            "the dialogue", "the pacing", "this story", "the lead actor", "the ending",
            "the director 's cut", "each scene", "the photography", "the score", "the first half",
            "the premise")
PRAISE = ("good great funny clever moving superb charming fresh smart brilliant warm gripping "
          "sharp lovely honest witty tender wonderful vivid elegant rich daring graceful splendid "
          "nimble sincere radiant poignant dazzling inventive delightful assured luminous spirited "
          "subtle thrilling stirring deft refreshing sublime playful exquisite humane masterful "
          "buoyant astute beguiling sumptuous riveting heartfelt").split()
BLAME = ("bad dull boring awful silly weak flat terrible stale tedious clumsy cheap lazy horrible "
         "bland messy hollow dreadful shallow sloppy tired grating forced abysmal vapid muddled "
         "lifeless pointless contrived dismal insipid leaden trite wooden smug atrocious turgid "
         "inept soulless plodding maudlin garbled stilted wretched banal strident joyless drab "
         "excruciating witless").split()
STRONG = set("great superb brilliant wonderful splendid dazzling sublime exquisite masterful awful "
             "riveting terrible horrible dreadful abysmal atrocious wretched excruciating".split())
DEGREES = {"": 1.0, "very": 1.5, "really": 1.4, "quite": 1.2, "somewhat": 0.6, "a little": 0.5,
           "extremely": 2.0, "so": 1.5, "rather": 0.9, "utterly": 2.0, "a bit": 0.5}
NEGATIONS = {"": 1.0, "not": -0.7, "never": -0.9, "hardly": -0.6, "far from": -1.0,
             "anything but": -1.2}
HEDGES = {"": 1.0, "perhaps": 0.7, "i think": 0.8, "to be fair ,": 0.8, "maybe": 0.6,
          "in truth": 1.2}
TAILS = ("", "at times", "from start to finish", "in the second half", "for two hours", "overall",
         "by the end", "for its genre", "on a large screen")
JOINS = {"": (1.0, 0.0), ", but": (0.2, 1.5), ", although": (1.5, 0.2), "and": (1.0, 1.0),
         ", yet": (0.3, 1.4), "even though": (1.4, 0.3)}
COMPANIES = ("the bank", "the carmaker", "the retailer", "an oil producer", "the chip maker",
             "a drug firm", "the airline", "the insurer", "a steel group", "the software company",
             "the utility", "a shipping line", "the miner", "the lender", "the telecoms operator")
REPORTS = ("reports", "expects", "confirms", "publishes", "files", "discusses", "repeats")
FIGURES = ("quarterly revenue", "annual results", "a dividend", "its tax rate", "a bond sale",
           "second half sales", "capital spending", "a share issue", "its cash position",
           "a merger filing", "operating costs", "the order book", "export volumes")
CONTEXTS = ("", "as markets open", "ahead of the central bank meeting", "after the annual meeting",
            "while bond yields hold", "in its filing to the exchange", "as oil trades in a range",
            "before the inflation report", "as the dollar is unchanged", "in line with forecasts")
TIMES = ("", "on monday", "on friday", "this quarter", "for the fiscal year", "in early trading",
         "analysts say", "the company says", "at the close")


def _choose(options, n, generator, first=None, decay=0.0):
    """(texts [n], numbers [n]): entries of a tuple, or of {text: number}; the k-th with a weight of
    (k + 1)^-decay, the first with probability `first`, if given."""
    weights = (torch.arange(len(options)) + 1.0) ** -decay
    if first is not None:
        weights[0] = first / (1 - first) * weights[1:].sum()
    index = weights.multinomial(n, True, generator=generator).tolist()
    texts = list(options)
    values = list(options.values()) if isinstance(options, dict) else [0] * len(options)
    return [texts[i] for i in index], torch.tensor(values)[index]


def _opinions(n, generator):
    """(texts [n], scores [n]): clauses such as `the plot is not very good at times`. Words late in
    PRAISE and BLAME are rare."""
    parts = [(HEDGES, 0.8), (SUBJECTS,), (("is", "seems", "feels", "was"),), (NEGATIONS, 0.85),
             (DEGREES, 0.5), (tuple(zip(PRAISE, BLAME)), None, 1.2), (TAILS, 0.5)]
    texts, values = zip(*(_choose(options, n, generator, *how) for options, *how in parts))
    blame = torch.randint(0, 2, (n,), generator=generator)
    words = [pair[sign] for pair, sign in zip(texts[5], blame.tolist())]
    strength = torch.tensor([2.0 if word in STRONG else 1.0 for word in words])
    score = values[0] * values[3] * values[4] * strength * (1 - 2 * blame)
    return (*texts[:5], words, texts[6]), score


def _reviews(n, generator):
    """[(sentence, label)], at most n: one or two opinions, of one sign around "and", and the sign
    of their weighted sum, which is not within 0.3 of zero; no more than 30 words."""
    (first, a), (second, b) = (_opinions(n, generator) for _ in range(2))
    joins, weights = _choose(JOINS, n, generator, 0.5)
    score = weights[:, 0] * a + weights[:, 1] * b
    second = [[part if one else "" for part, one in zip(column, joins)] for column in second]
    sentences = [" ".join(filter(None, row)) for row in zip(*first, joins, *second)]
    clear = ((score.abs() >= 0.3) & ((weights[:, 0] != weights[:, 1]) | (a * b > 0))).tolist()
    labels = (score > 0).long().tolist()
    return [pair for pair, keep in zip(zip(sentences, labels), clear)
            if keep and len(pair[0].split()) <= 30]


@lru_cache(maxsize=None)
def _embedded_text(name, split):
    """(sentences, labels int64): 6,000, 500 or 1,000 of 7,500 different rows."""
    n, generator, part = 13000, _generator(2104, len(name)), SPLITS.index(split)
    if name == "reviews":
        rows = _reviews(n, generator)
    else:
        columns = [_choose(options, n, generator)[0]
                   for options in (COMPANIES, REPORTS, FIGURES, CONTEXTS, TIMES)]
        rows = [(" ".join(filter(None, row)), 0) for row in zip(*columns)]
    first, last = (0, 6000, 6500, 7500)[part:part + 2]
    sentences, labels = zip(*[*dict(rows).items()][first:last])
    return sentences, torch.tensor(labels)
