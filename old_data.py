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
worker processes. Sentences are a `TextSet` and molecules a `MoleculeSet`: rows of any length, laid
one after the other. `DATASETS`, `TEXTS` and `MOLECULES` list the names. What the user can mend
raises `UserError`, in one line.
"""
import io
import math
import os
import unicodedata
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets as tv
from torchvision.datasets.utils import check_md5, download_url
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

from old_common import UserError, load_arrays

DATASETS = {
    "glyphs": "embedded: digits 0-9 in a warped font, 28x28x1; 10,000 train, 2,000 test",
    "glyphs_ambiguous": "embedded: blends of two digits, label distribution known; 10,000 / 2,000",
    "dirty_glyphs": "embedded: 8,000 rows of glyphs, 8,000 of glyphs_ambiguous; 4,000 test",
    "glyphs_letters": "embedded, OOD: letters that do not look like digits; 10,000 / 2,000",
    "numbers": "embedded: the numbers 000-999, 1000 classes, 28x28x1; 30,000 / 5,000",
    "numbers_letters": "embedded, OOD: three letters as numbers has digits; 30,000 / 5,000",
    "numbers_ambiguous": "embedded: blends of two numbers, label distribution known; 5,000 / 2,000",
    "mnist": "MNIST, 60,000 / 10,000",
    "fashion_mnist": "Fashion-MNIST, 60,000 / 10,000",
    "kmnist": "Kuzushiji-MNIST, 60,000 / 10,000",
    "ambiguous_mnist": "Ambiguous-MNIST, 60,000 / 60,000, each image ten times, labels sampled",
    "dirty_mnist": "MNIST and Ambiguous-MNIST, 120,000 / 70,000",
    "cifar10": "CIFAR-10, 50,000 / 10,000",
    "cifar100": "CIFAR-100, 50,000 / 10,000",
    "svhn": "Street View House Numbers, cropped digits, 73,257 / 26,032",
    "tiny_imagenet": "TinyImageNet, 64x64x3, 100,000 / 10,000 (test is the labelled val folder)",
    "imagenet": "ImageNet-1k, streamed from imagenet/{train,val}/<class>/ (test is val)",
    "imagenet_a": "ImageNet-A, streamed from imagenet-a/<class>/, test only",
    "imagenet_o": "ImageNet-O, streamed from imagenet-o/<class>/, test only",
    "imagenet_r": "ImageNet-R, streamed from imagenet-r/<class>/, test only",
    "folder:PATH": "a folder of images: flat (labels 0), or class subfolders (streamed, unless "
                   "image_size is given)",
}
TEXTS = {
    "reviews": "embedded: sentences of praise or blame, 2 classes; 6,000 / 500 val / 1,000 test",
    "reviews_finance": "embedded, OOD: neutral headlines, in reviews' vocabulary; as many",
    "sst2": "SST-2, 67,349 / 872 / 1,821 (other splits where GLUE's test labels are withheld)",
}
MOLECULES = {
    "clusters": "embedded: 4-10 atoms under a pair potential; 4,000 / 500 val / 1,000 test",
    "clusters_large": "embedded, OOD: 11-16 atoms under the same potential; as many",
    "qm9": "QM9, 110,000 / 10,000 / 10,831, or as large a share of the molecules that are there",
}


# ---- Sets ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageSet:
    """N images in memory. mean, std: per channel, of pixels in [0,1], over the training set.

    images       uint8 [N,C,H,W], or float32 where the source is not 8-bit (then in [0,1], unless
                 noise was added, or they are features)
    labels       int64 [N], in 0..num_classes-1
    label_probs  float32 [N,K] where the true label distribution is known, else None
    groups       int64 [N] or None: rows of equal group are one image, which no split separates
    """
    name: str
    images: Tensor
    labels: Tensor
    num_classes: int
    mean: tuple
    std: tuple
    label_probs: Tensor | None = None
    groups: Tensor | None = None

    def __post_init__(self):
        rows = [len(t) for t in (self.labels, self.label_probs, self.groups) if t is not None]
        if self.images.ndim != 4 or set(rows) != {len(self.images)}:
            raise UserError(f"{self.name}: images {tuple(self.images.shape)}, and {rows} labels, "
                            "probabilities or groups; expected [N,C,H,W] and N of each")

    def __len__(self):
        return len(self.images)

    @property
    def shape(self):
        """(C, H, W)."""
        return tuple(self.images.shape[1:])

    def select(self, index):
        """The rows `index` (a slice, integers [n] or a mask [N]) as a new set."""
        index = index if isinstance(index, slice) else torch.as_tensor(index)
        fields = {key: getattr(self, key) for key in ("images", "labels", "label_probs", "groups")}
        return replace(self, **{key: t[index] for key, t in fields.items() if t is not None})

    def rename(self, name):
        return replace(self, name=name)


@dataclass(frozen=True, eq=False)
class StreamedSet:
    """N image files, decoded as they are read: dataset[i] is (uint8 [C,H,W], int label).

    `classes`: the class folders' names in label order, by which a model of 1000 classes finds the
    200 that ImageNet-A, -O and -R have.
    """
    name: str
    dataset: Dataset
    num_classes: int
    mean: tuple
    std: tuple
    shape: tuple
    classes: tuple = ()

    def __len__(self):
        return len(self.dataset)

    @property
    def labels(self):
        """int64 [N]; no image is decoded."""
        return self.dataset.labels

    def select(self, index):
        """The files `index` (a slice, integers [n] or a mask [N]) as a new set."""
        return replace(self, dataset=self.dataset.select(torch.arange(len(self))[index]))

    def rename(self, name):
        return replace(self, name=name)

    def squared(self):
        """Resized to a square, not in proportion, before the crop (published code: of ImageNet)."""
        side = round(self.dataset.crop * 256 / 224)
        return replace(self, dataset=self.dataset.select(torch.arange(len(self)), [side, side]))

    def unreadable(self, rows):
        """bool [n]: whether files `rows` [n] cannot be decoded. Each is read once, by threads."""
        def fails(row):
            try:
                self.dataset.open(row)
            except UserError:
                return True
            return False

        with ThreadPoolExecutor() as pool:  # in parts: every waiting task takes memory
            found = [torch.tensor(list(pool.map(fails, part.tolist())), dtype=torch.bool)
                     for part in rows.split(4096)]
        return torch.cat(found)

    def in_memory(self):
        """An ImageSet of all files, decoded by a thread pool."""
        images = torch.empty(len(self), *self.shape, dtype=torch.uint8)

        def put(row):
            images[row] = self.dataset[row][0]

        with ThreadPoolExecutor() as pool:  # Pillow decodes without holding the interpreter's lock
            for _ in pool.map(put, range(len(self))):
                pass
        return ImageSet(self.name, images, self.labels, self.num_classes, self.mean, self.std)


class ImageFiles(Dataset):
    """Image files as RGB uint8 [3,crop,crop]: shorter side to `resize`, or height and width to the
    two numbers of it, then a centre crop.

    `expect` is the (width, height) that every file must have, if any.
    """

    def __init__(self, paths, labels, resize, crop, expect=None):
        self.paths, self.labels = paths, torch.as_tensor(labels, dtype=torch.int64)
        self.resize, self.crop, self.expect = resize, crop, expect

    def __len__(self):
        return len(self.paths)

    def select(self, index, resize=None):
        paths = [self.paths[i] for i in index.tolist()]
        resize = self.resize if resize is None else resize
        return ImageFiles(paths, self.labels[index], resize, self.crop, self.expect)

    def open(self, row):
        """The file as an RGB PIL image; UserError where it cannot be read."""
        path = self.paths[row]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # Pillow's readers raise many types, few of them documented
            raise _unreadable(path, error) from None
        if self.expect and image.size != self.expect:
            raise UserError(f"{path}: width and height {image.size}, expected {self.expect}; "
                            "unpack the published archive again")
        return image

    def __getitem__(self, row):
        image = TF.center_crop(TF.resize(self.open(row), self.resize), self.crop)
        return TF.pil_to_tensor(image), int(self.labels[row])

    def augmented(self, row, seed):
        """Item `row` under torchvision's random resized crop (scale .08-1, ratio 3/4-4/3) and a
        random flip; a function of (row, seed) alone."""
        with torch.random.fork_rng(devices=[]):  # get_params draws from the global generator
            torch.manual_seed(seed)
            image = self.open(row)
            box = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = torch.rand(()) < 0.5
        image = TF.resized_crop(image, *box, [self.crop, self.crop])
        return TF.pil_to_tensor(TF.hflip(image) if flip else image), int(self.labels[row])


# ---- Loading -------------------------------------------------------------------------------------


def load(name, split, data_dir="data", *, seed=1, val_fraction=0.1, published_split=False,
         noise=0.0, image_size=None, download=True, limit=None):
    """One of `DATASETS` as an ImageSet or a StreamedSet.

    split            "train", "val": parts of the published training set (see train_val_split);
                     "test": the published test set, or all of a folder
    seed             chooses the split (and the noise), never what an embedded set contains
    val_fraction     share of the training set that is "val", in [0,1); with 0 all is "train"
    published_split  split rows even where some share an image (published DDU code: that leaks)
    noise            std, in normalised units, of Gaussian noise added once and not clipped; the
                     images become float32 (Dirty-MNIST: 0 the DDU code, 0.05 the data package)
    image_size       side of the square images read from files; other sets keep theirs
    download         fetch a set that is absent, where its publisher allows it
    limit            keep this many rows, evenly spaced
    Raises UserError for unknown names and values, absent, damaged and ill-shaped files.
    """
    if split not in ("train", "val", "test"):
        raise UserError(f"split {split!r} is unknown; choose train, val or test")
    if not 0 <= val_fraction < 1 or noise < 0 or limit is not None and limit < 1:
        raise UserError(f"val_fraction {val_fraction}, noise {noise}, limit {limit}: expected "
                        "0 <= val_fraction < 1, noise >= 0, limit >= 1")
    dataset = _source(name, split != "test", Path(data_dir), image_size, download)
    if split != "test":
        groups = None if published_split else getattr(dataset, "groups", None)
        train, val = train_val_split(len(dataset), seed, val_fraction, groups)
        dataset = dataset.select(train if split == "train" else val)
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(torch.arange(limit) * len(dataset) // limit)
    folder = name.startswith("folder:") and (image_size or not dataset.classes)
    if folder or name == "tiny_imagenet":
        dataset = dataset.in_memory()
    if not noise:
        return dataset
    if isinstance(dataset, StreamedSet):
        raise UserError(f"{name}: noise is for sets in memory; leave it at 0")
    generator = _generator(seed, ("train", "val", "test").index(split))
    added = torch.randn(dataset.images.shape, generator=generator)
    added *= noise * torch.tensor(dataset.std).view(-1, 1, 1)
    return replace(dataset, images=added.add_(_unit(dataset.images)))


def train_val_split(n, seed, val_fraction=0.1, groups=None):
    """The published split: a legacy NumPy shuffle of 0..n-1; its first floor(val_fraction n) are
    validation. With groups (int64 [n]) it shuffles and counts the distinct groups instead.

    Returns (train, val): int64 row numbers, each row in exactly one, each group too.
    """
    ids, member = np.unique(np.arange(n) if groups is None else groups.numpy(), return_inverse=True)
    order = list(range(len(ids)))
    np.random.RandomState(seed).shuffle(order)
    rank = np.argsort(order)[member]
    rows = torch.from_numpy(np.argsort(rank, kind="stable"))
    n_val = int((rank < math.floor(val_fraction * len(ids))).sum())
    return rows[n_val:], rows[:n_val]


def _source(name, training, data_dir, image_size, download):
    """The whole published training (or test) part, before any split."""
    if name in EMBEDDED:
        return _embedded(name, training)
    if name in TORCHVISION:
        return _torchvision(name, training, data_dir, download)
    if name in ("ambiguous_mnist", "dirty_mnist"):
        return _dirty_mnist(name, training, data_dir, download)
    if name == "tiny_imagenet":
        return _tiny_imagenet(training, data_dir, image_size or 64)
    if name in IMAGENETS:
        return _imagenet(name, training, data_dir, image_size or 224)
    if name.startswith("folder:"):
        return _folder(Path(name.removeprefix("folder:")), image_size)
    raise UserError(f"dataset {name!r} is unknown; choose from {', '.join(DATASETS)}")


def _unit(images):
    """float32 pixels in [0,1]."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def _statistics(grey):
    """(mean, std) of uint8 images of one channel, in the form of ImageSet's."""
    std, mean = torch.std_mean(_unit(grey))
    return (round(mean.item(), 4),), (round(std.item(), 4),)


def _generator(*key):
    """A CPU generator seeded by all integers of `key`; near keys give unrelated streams."""
    state = np.random.SeedSequence([k % 2**63 for k in key]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) % 2**63)


def _one_line(error):
    return " ".join(str(error).split())[:150] or type(error).__name__


def _absent(name, path, site, why=""):
    return UserError(f"{name}: {path} is not there{why}; get it from {site}")


def _unreadable(path, error):
    return UserError(f"{path}: unreadable ({_one_line(error)}); replace the file")


def _damaged(name, path, site, why):
    return UserError(f"{name}: {path} is damaged or incomplete ({why}); get it from {site}")


# ---- Published sets ------------------------------------------------------------------------------

# name: torchvision's class, what it reads below data_dir, rows, classes, mean, std, publisher.
# None: computed, no published values are known to us.
TORCHVISION = {
    "mnist": (tv.MNIST, "MNIST/raw", (60000, 10000), 10, (0.1307,), (0.3081,),
              "https://ossci-datasets.s3.amazonaws.com/mnist"),
    "fashion_mnist": (tv.FashionMNIST, "FashionMNIST/raw", (60000, 10000), 10, (0.2860,), (0.3530,),
                      "https://github.com/zalandoresearch/fashion-mnist"),
    "kmnist": (tv.KMNIST, "KMNIST/raw", (60000, 10000), 10, (None,), (None,),
               "http://codh.rois.ac.jp/kmnist"),
    "cifar10": (tv.CIFAR10, "cifar-10-batches-py", (50000, 10000), 10, (0.4914, 0.4822, 0.4465),
                (0.2023, 0.1994, 0.2010), "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": (tv.CIFAR100, "cifar-100-python", (50000, 10000), 100, (0.5071, 0.4865, 0.4409),
                 (0.2673, 0.2564, 0.2762), "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "svhn": (tv.SVHN, "{}_32x32.mat", (73257, 26032), 10, (0.4377, 0.4438, 0.4728),
             (0.1980, 0.2010, 0.1970), "http://ufldl.stanford.edu/housenumbers"),
}


def _torchvision(name, training, data_dir, download):
    cls, file, rows, num_classes, mean, std, site = TORCHVISION[name]
    part = "train" if training else "test"
    path, spare = data_dir / file.format(part), data_dir / "cifar100_test.npz"
    if name == "cifar100" and not training and spare.exists() and not path.exists():
        path = spare
    present = path.exists()
    try:
        if path == spare:
            with np.load(path, allow_pickle=False) as arrays:
                images, labels = arrays["images"], arrays["labels"]
        else:
            options = {"split": part} if name == "svhn" else {"train": training}
            raw = cls(data_dir, download=download and not present, **options)
            images, labels = raw.data, raw.labels if name == "svhn" else raw.targets
            if None in mean:
                mean, std = _statistics(raw.data if training else cls(data_dir, train=True).data)
    except Exception as error:  # absent and cut files raise many types, few of them documented
        if present:
            raise _damaged(name, path, site, _one_line(error)) from None
        why = f" and could not be downloaded ({_one_line(error)})" if download else ""
        raise _absent(name, path, site, why) from None
    images, labels = torch.as_tensor(images), torch.as_tensor(labels).to(torch.int64)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif name != "svhn":
        images = images.permute(0, 3, 1, 2).contiguous()
    shape = (rows[not training], len(mean), *[28 if len(mean) == 1 else 32] * 2)
    if (tuple(images.shape), images.dtype, len(labels)) != (shape, torch.uint8, shape[0]):
        why = f"images {tuple(images.shape)}, {len(labels)} labels; expected {shape}"
        raise _damaged(name, path, site, why)
    return ImageSet(name, images, labels, num_classes, mean, std)


AMBIGUOUS_MNIST_SITE = "https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0"
AMBIGUOUS_MNIST_MD5 = {"amnist_samples.pt": "4f7865093b1d28e34019847fab917722",
                       "amnist_labels.pt": "3bfc055a9f91a76d8d493e8b898c3c95"}


def _dirty_mnist(name, training, data_dir, download):
    """Ambiguous-MNIST, each image ten times in a row with its sampled labels; after MNIST if
    `name` is dirty_mnist."""
    folder = data_dir / "AmbiguousMNIST"
    samples, votes = (_read_ambiguous(folder / file, download) for file in AMBIGUOUS_MNIST_MD5)
    if tuple(samples.shape) != (12000, 1, 28, 28) or tuple(votes.shape) != (12000, 10):
        why = f"shapes {tuple(samples.shape)}, {tuple(votes.shape)}; expected 12000 of each"
        raise _damaged(name, folder, AMBIGUOUS_MNIST_SITE, why)
    half = slice(0, 6000) if training else slice(6000, 12000)
    samples, votes = samples[half].float(), votes[half].long()
    probs, tens = F.one_hot(votes, 10).float().mean(1), torch.arange(6000).repeat_interleave(10)
    ambiguous = ImageSet(name, samples[tens], votes.flatten(), 10, (0.1307,), (0.3081,),
                         probs[tens], tens)
    if name == "ambiguous_mnist":
        return ambiguous
    mnist = _torchvision("mnist", training, data_dir, download)
    return concat(name, replace(mnist, images=_unit(mnist.images)), ambiguous)


def _read_ambiguous(path, download):
    site, md5 = f"{AMBIGUOUS_MNIST_SITE}/{path.name}", AMBIGUOUS_MNIST_MD5[path.name]
    if not path.exists():
        try:
            if not download:
                raise OSError("downloading is off")
            download_url(site, path.parent, path.name, md5)
        except Exception as error:  # urllib, ssl and torchvision raise several types
            raise _absent("ambiguous_mnist", path, site, f" ({_one_line(error)})") from None
    if not check_md5(path, md5):
        why = f"or another release than data-v1.0.0: its MD5 is not {md5}"
        raise _damaged("ambiguous_mnist", path, site, why)
    return torch.load(path, map_location="cpu", weights_only=True)


def concat(name, clean, ambiguous):
    """Clean rows, each its own group, with one-hot label distributions; then ambiguous ones."""
    one_hot = F.one_hot(clean.labels, clean.num_classes).float()
    return ImageSet(name, torch.cat([clean.images, ambiguous.images]),
                    torch.cat([clean.labels, ambiguous.labels]), clean.num_classes,
                    clean.mean, clean.std, torch.cat([one_hot, ambiguous.label_probs]),
                    torch.cat([torch.arange(len(clean)), len(clean) + ambiguous.groups]))


# ---- Folders -------------------------------------------------------------------------------------

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
TINY_IMAGENET = dict(mean=(0.4803, 0.4481, 0.3976), std=(0.2764, 0.2689, 0.2816))
TINY_IMAGENET_SITE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
IMAGENETS = {"imagenet": "https://www.image-net.org (and sort the val images into class folders)",
             "imagenet_a": "https://github.com/hendrycks/natural-adv-examples",
             "imagenet_o": "https://github.com/hendrycks/natural-adv-examples",
             "imagenet_r": "https://github.com/hendrycks/imagenet-r"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


def _folders_in(root):
    return sorted(e.name for e in os.scandir(root) if e.is_dir()) if root.is_dir() else []


class _Zipped(io.BytesIO):
    """The content of a zip archive's member, which Pillow opens like a path; str says whose."""

    def __init__(self, archive, member):
        super().__init__(archive.read(member))
        self.place = f"{archive.filename}/{member}"

    def __str__(self):
        return self.place


def _images_in(place):
    """The images of a folder (paths), or at any depth of a zip archive (_Zipped), by file name."""
    if place.is_dir():
        return sorted(e.path for e in os.scandir(place) if e.name.lower().endswith(SUFFIXES))
    if not place.exists():
        return []
    try:
        with ZipFile(place) as archive:
            names = [name for name in archive.namelist() if name.lower().endswith(SUFFIXES)]
            names.sort(key=lambda name: (name.rsplit("/", 1)[-1], name))
            return [_Zipped(archive, name) for name in names]
    except Exception as error:  # damaged archives raise many types, few of them documented
        raise _unreadable(place, error) from None


def _class_folders(root, classes=None, place="{}"):
    """(paths, labels, classes) of the images in root/<place of each class>, a folder or a zip
    archive; the classes are the folders, sorted, unless given."""
    classes, paths, labels = tuple(classes or _folders_in(root)), [], []
    for label, name in enumerate(classes):
        files = _images_in(root / place.format(name))
        if not files:
            raise UserError(f"{root / place.format(name)}: no images in it; unpack the published "
                            "archive again")
        paths += files
        labels += [label] * len(files)
    return paths, labels, classes


def _streamed(name, listing, stats, crop, resize=None, expect=None):
    paths, labels, classes = listing
    files = ImageFiles(paths, labels, resize or round(crop * 256 / 224), crop, expect)
    shape = (3, crop, crop)
    return StreamedSet(name, files, max(1, len(classes)), **stats, shape=shape, classes=classes)


def _folder(root, image_size):
    if not root.is_dir():
        raise UserError(f"folder {root} is not there; write folder: and the path of a folder")
    if _folders_in(root):
        listing = _class_folders(root)
        return _streamed(root.name, listing, IMAGENET, image_size or 224, resize=image_size)
    paths = _images_in(root)
    if not paths:
        raise UserError(f"folder {root} holds neither images ({' '.join(SUFFIXES)}) nor folders")
    files = ImageFiles(paths, [0] * len(paths), 0, 0)
    expect = None if image_size else files.open(0).size
    if expect and expect[0] != expect[1]:
        raise UserError(f"folder {root}: images of {expect[0]}x{expect[1]}; give image_size")
    size, listing = image_size or expect[0], (paths, files.labels, ())
    return _streamed(root.name, listing, IMAGENET, size, resize=size, expect=expect)


def _imagenet(name, training, data_dir, size):
    root, site = data_dir / name.replace("_", "-"), IMAGENETS[name]
    if name != "imagenet" and training:
        raise UserError(f"{name} has a test split only")
    folder = root if name != "imagenet" else root / ("train" if training else "val")
    classes = _folders_in(folder)
    if not classes:
        raise _absent(name, f"{folder}/<class>/*.JPEG", site)
    if folder.name == "val" and (known := _folders_in(root / "train")) and known != classes:
        raise UserError(f"{name}: the class folders of {root}/train and {folder} differ; mend them")
    return _streamed(name, _class_folders(folder), IMAGENET, size)


def _tiny_imagenet(training, data_dir, size):
    """The published layout: a class is its line in wnids.txt; test is the labelled val folder."""
    root, classes = data_dir / "tiny-imagenet-200", _wnids(data_dir)
    notes = root / "val" / "val_annotations.txt"
    if training:
        listing = _class_folders(root / "train", classes, "{}/images")
    elif notes.exists():
        rows = [line.split("\t")[:2] for line in notes.read_text().splitlines()]
        paths = [str(notes.parent / "images" / file) for file, _ in rows]
        if unknown := {wnid for _, wnid in rows} - set(classes):
            why = f"class {min(unknown)} is not in wnids.txt"
            raise _damaged("tiny_imagenet", notes, TINY_IMAGENET_SITE, why)
        listing = paths, [classes.index(wnid) for _, wnid in rows], classes
    else:
        raise _absent("tiny_imagenet", notes, TINY_IMAGENET_SITE)
    return _streamed("tiny_imagenet", listing, TINY_IMAGENET, size, resize=size, expect=(64, 64))


def _wnids(data_dir):
    path = data_dir / "tiny-imagenet-200" / "wnids.txt"
    if not path.exists():
        raise _absent("tiny_imagenet", path, TINY_IMAGENET_SITE)
    return tuple(path.read_text().split())


# ---- Corruptions ---------------------------------------------------------------------------------

CIFAR_C_KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur",
    "zoom_blur", "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate",
    "jpeg_compression", "speckle_noise", "gaussian_blur", "spatter", "saturate")  # last four: extra
CORRUPTED = {"cifar10_c": ("CIFAR-10-C", "https://zenodo.org/records/2535967"),
             "cifar100_c": ("CIFAR-100-C", "https://zenodo.org/records/3555552"),
             "tiny_imagenet_c": ("Tiny-ImageNet-C", "https://zenodo.org/records/2536630"),
             "imagenet_c": ("imagenet-c", "https://zenodo.org/records/2235448"),
             "glyphs_c": ("", "")}


def corruption_kinds(name, data_dir="data"):
    """The kinds of a set of CORRUPTED that are there, as a list; empty where its folder is absent.

    glyphs_c has all of CORRUPTIONS, cifar10_c and cifar100_c what they have of CIFAR_C_KINDS, in
    that order, the others their sub-folders, sorted. Raises UserError for an unknown name.
    """
    if name not in CORRUPTED:
        raise UserError(f"corrupted set {name!r} is unknown; choose from {', '.join(CORRUPTED)}")
    folder = Path(data_dir, CORRUPTED[name][0])
    if name == "glyphs_c":
        return list(CORRUPTIONS)
    if name.startswith("cifar"):
        return [kind for kind in CIFAR_C_KINDS if (folder / f"{kind}.npy").exists()]
    joined = [f.rsplit("-", 1)[0].removeprefix("imagenet-c-") for f in _folders_in(Path(data_dir))
              if name == "imagenet_c" and f.startswith("imagenet-c-")]
    return sorted({*_folders_in(folder), *joined})


def load_corrupted(name, kind, severity, data_dir="data"):
    """A test set under one corruption at severity 1..5; `corruption_kinds` lists what is there.

    cifar10_c, cifar100_c  CIFAR-10-C/<kind>.npy and labels.npy: 10,000 rows a severity
    tiny_imagenet_c        Tiny-ImageNet-C/<kind>/<severity>/<class>/ or <class>.zip, in memory,
                           any number of images a class, labels by wnids.txt
    imagenet_c             imagenet-c/<kind>/<severity>/<class>/, or imagenet-c-<kind>-<severity>/
                           <class>/, a StreamedSet, 224x224, uncropped
    glyphs_c               computed; `kind` is one of CORRUPTIONS
    Raises UserError for unknown names and kinds, absent, damaged and ill-shaped files.
    """
    kinds = corruption_kinds(name, data_dir)
    if name != "glyphs_c":  # a published kind that is absent: told below what to get
        kinds = dict.fromkeys([*CIFAR_C_KINDS, *kinds])
    _check_kind(kind, severity, kinds)
    title, (folder, site) = f"{name}_{kind}_s{severity}", CORRUPTED[name]
    if name == "glyphs_c":
        return corrupted(_embedded("glyphs", False), kind, severity).rename(title)
    if name.startswith("cifar"):
        images, labels = _cifar_c(name, Path(data_dir, folder), kind, severity, site)
        return ImageSet(title, images, labels, *TORCHVISION[name.removesuffix("_c")][3:6])
    root = Path(data_dir, folder, kind, str(severity))
    joined = Path(data_dir, f"imagenet-c-{kind}-{severity}")
    if name == "imagenet_c" and joined.is_dir():
        root = joined
    if not root.is_dir():
        raise _absent(name, root, site)
    if name == "imagenet_c":
        return _streamed(title, _class_folders(root), IMAGENET, 224, resize=224)
    classes = _wnids(Path(data_dir))
    zipped = any((root / f"{wnid}.zip").exists() for wnid in classes)
    listing = _class_folders(root, classes, "{}.zip" if zipped else "{}")
    return _streamed(title, listing, TINY_IMAGENET, 64, resize=64, expect=(64, 64)).in_memory()


def _cifar_c(name, folder, kind, severity, site):
    parts, rows = [], slice((severity - 1) * 10000, severity * 10000)
    for file, shape in ((f"{kind}.npy", (50000, 32, 32, 3)), ("labels.npy", (50000,))):
        if not (folder / file).exists():
            raise _absent(name, folder / file, site)
        try:
            array = np.load(folder / file, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise _damaged(name, folder / file, site, _one_line(error)) from None
        if array.shape != shape or file != "labels.npy" and array.dtype != np.uint8:
            why = f"{array.dtype} {array.shape}, expected {shape}, images as uint8"
            raise _damaged(name, folder / file, site, why)
        parts.append(torch.from_numpy(np.array(array[rows])))
    return parts[0].permute(0, 3, 1, 2).contiguous(), parts[1].long()


def _check_kind(kind, severity, kinds):
    if kind not in kinds:
        raise UserError(f"corruption {kind!r} is unknown; choose from {', '.join(kinds)}")
    if severity not in (1, 2, 3, 4, 5):
        raise UserError(f"severity {severity!r} is unknown; choose 1, 2, 3, 4 or 5")


def corrupt(images, kind, severity, seed=0):
    """images, uint8 or float32 in [0,1] [N,C,H,W], under a kind of CORRUPTIONS, severity 1..5.

    Same shape, dtype and device; a function of the arguments alone. The corruptions are ours:
    like those of CIFAR-10-C in kind, not comparable with them in number.
    """
    _check_kind(kind, severity, CORRUPTIONS)
    (apply, strengths), out = CORRUPTIONS[kind], torch.empty_like(images)
    generator = _generator(seed, list(CORRUPTIONS).index(kind))
    for start in range(0, len(images), 1000):
        x = apply(_unit(images[start:start + 1000].cpu()), strengths[severity - 1], generator)
        out[start:start + 1000] = _like(x, images)
    return out


def corrupted(dataset, kind, severity, seed=0):
    """An ImageSet under `corrupt`, named like cifar10_computed_gaussian_noise_s3."""
    return replace(dataset, name=f"{dataset.name}_computed_{kind}_s{severity}",
                   images=corrupt(dataset.images, kind, severity, seed))


def _like(x, images):
    """float32 pixels, clipped to [0,1], in the dtype of `images`."""
    x = x.clamp(0, 1)
    return x.mul_(255).round_().byte() if images.dtype == torch.uint8 else x


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


def _contrast(x, kept, _):
    return x.mean((1, 2, 3), keepdim=True).lerp(x, kept)


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


def _rotation(x, degrees, generator):
    sign = 1 - 2 * torch.randint(0, 2, (len(x),), generator=generator)
    return _warp(x, angle=sign * math.radians(degrees))


def _elastic(x, std, generator):
    return _warp(x, bend=_smooth_field(len(x), std, x.shape[-2:], generator))


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
    "contrast": (_contrast, (0.75, 0.55, 0.4, 0.27, 0.16)),                    # kept
    "pixelate": (_pixelate, (0.8, 0.65, 0.5, 0.4, 0.3)),                       # resolution kept
    "jpeg": (_jpeg, (60, 35, 20, 12, 6)),                                      # quality
    "occlusion": (_occlusion, (0.18, 0.27, 0.36, 0.45, 0.55)),                 # side of the square
    "rotation": (_rotation, (8, 16, 25, 35, 46)),                              # degrees
    "elastic": (_elastic, (0.04, 0.07, 0.10, 0.14, 0.19)),                     # displacement's std
}


# ---- Out-of-distribution data --------------------------------------------------------------------


def match(dataset, like):
    """`dataset` with the channels (grey repeated, RGB to luma), size (antialiased bilinear), mean
    and std of `like`: OOD data are always normalised with the in-distribution statistics.

    A StreamedSet must have the shape already (UserError: load it with image_size).
    """
    images, (channels, *size) = getattr(dataset, "images", None), like.shape
    if dataset.shape != like.shape:
        if images is None:
            raise UserError(f"{dataset.name}: files streamed as {dataset.shape} cannot become "
                            f"{like.shape}; load them with image_size={size[0]}")
        images = torch.empty(len(dataset), *like.shape, dtype=images.dtype)
        for start in range(0, len(images), 1000):
            x = _unit(dataset.images[start:start + 1000])
            if channels < x.shape[1]:
                x = TF.rgb_to_grayscale(x)
            if list(x.shape[-2:]) != size:
                x = F.interpolate(x, size, mode="bilinear", antialias=True)
            images[start:start + 1000] = _like(x, images)
    changed = {} if images is None else {"images": images}
    return replace(dataset, mean=like.mean, std=like.std, **changed)


# ---- Features and toys ---------------------------------------------------------------------------


def read_features(path, dim=None, labelled=False):
    """'features' [N,D] of an .npz file, finite, in its dtype; with `labelled` (features, 'labels'),
    int64 [N] from 0. Raises UserError for absent, damaged and ill-shaped files, and D != dim."""
    arrays = load_arrays(path, ("features", "labels") if labelled else ("features",))
    if any(a.dtype.kind not in "fiu" for a in arrays.values()):
        raise UserError(f"{path}: arrays must hold numbers")
    features = torch.as_tensor(arrays["features"])
    if features.ndim != 2 or features.shape[1] != (dim or features.shape[1]) or not len(features):
        raise UserError(f"{path}: 'features' must be [N, {dim or 'D'}], not {list(features.shape)}")
    if not torch.isfinite(features).all():
        raise UserError(f"{path}: 'features' contain NaN or infinity")
    if not labelled:
        return features
    labels = torch.as_tensor(arrays["labels"])
    if labels.shape != features.shape[:1] or labels.is_floating_point() or labels.min() < 0:
        raise UserError(f"{path}: 'labels' must be [{len(features)}] integers from 0")
    return features, labels.long()


def feature_set(path, like=None):
    """Precomputed features, 'features' [N,D] and 'labels' [N] of an .npz file, as an ImageSet:
    images float32 [N,D,1,1], named after the file.

    mean and std are each feature's over the file (1 where it is constant: the Loader divides by
    std), and the labels are 0..num_classes-1; with `like`, a feature set, all three are its own.
    Raises UserError for absent, damaged and ill-shaped files, and what does not fit `like`.
    """
    features, labels = read_features(path, None if like is None else like.shape[0], labelled=True)
    features, num_classes = features.float(), int(labels.max()) + 1
    if like is None:
        std, mean = torch.std_mean(features.double(), 0, correction=0)
        std[std == 0] = 1
        stats = num_classes, tuple(mean.tolist()), tuple(std.tolist())
    elif num_classes <= like.num_classes:
        stats = like.num_classes, like.mean, like.std
    else:
        raise UserError(f"{path}: label {num_classes - 1} is not one of the {like.num_classes} "
                        f"classes of {like.name}; give files of one labelling")
    return ImageSet(Path(path).stem, features[:, :, None, None], labels, *stats)


def two_moons(n, noise=0.1, seed=0):
    """Two interleaved half circles, as in scikit-learn's make_moons, class 0 first:
    (x float32 [n,2], y int64 [n]); noise is the std on each coordinate."""
    a, b = (torch.linspace(0, math.pi, k, dtype=torch.float64) for k in (n // 2, n - n // 2))
    x = torch.stack([torch.cat([a.cos(), 1 - b.cos()]), torch.cat([a.sin(), 0.5 - b.sin()])], 1)
    x += noise * torch.randn(n, 2, generator=_generator(seed), dtype=torch.float64)
    return x.float(), (torch.arange(n) >= n // 2).long()


def gaussian_ring(n_per_class, seed=42):
    """Five Gaussians of unit variance, their centres at the angles 0, 72, ..., 288 degrees of a
    circle of radius 5 (D'Angelo & Fortuin 2021), class 0 first:
    (x float32 [5n,2], y int64 [5n]) for n_per_class = n."""
    y = torch.arange(5).repeat_interleave(n_per_class)
    angle = 2 * math.pi / 5 * y.double()
    x = torch.randn(len(y), 2, generator=_generator(seed), dtype=torch.float64)
    x += 5 * torch.stack([angle.cos(), angle.sin()], 1)
    return x.float(), y


def gapped_regression(n=60, seed=0):
    """Regression with gaps, in the style of Izmailov et al. 2019: y = sin(x) + (x / 5)^2 and noise
    of std 0.1, at x = 7 u with u uniform in three clusters, [-1,-0.6], [-0.1,0.25] and [0.6,1],
    a third of the points (as nearly as n allows) each, in this order:
    (x float32 [n], y float32 [n])."""
    low, high = torch.tensor([[-1, -0.1, 0.6], [-0.6, 0.25, 1]], dtype=torch.float64)
    cluster, generator = torch.arange(n) * 3 // n, _generator(seed)
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    x = 7 * low[cluster].lerp(high[cluster], u)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x.float(), (x.sin() + (x / 5) ** 2 + 0.1 * noise).float()


# ---- Batches -------------------------------------------------------------------------------------


class Batch(NamedTuple):
    images: Tensor      # float32 [B,C,H,W], normalised, on the device
    labels: Tensor      # int64 [B], on the device
    index: Tensor       # int64 [B], rows of the set, on the device
    global_size: int    # images in this batch over all processes


class Loader:
    """Batches of an ImageSet or a StreamedSet, in an order that depends on (seed, epoch) alone.

    `batch_size` is global: each batch is cut into `world_size` contiguous near-equal pieces, as
    np.array_split does, and this process gets number `rank` (with no rows, if a last batch has
    fewer images than processes). Together the pieces are, bit for bit, the batch of one process,
    augmentation included. The last, partial batch is kept.

    augment    "none"; "crop_flip": pad with 4 black pixels, random crop, random flip (files:
               random resized crop and flip); "reflect_crop_flip": the border is mirrored instead
    mean, std  per channel, of pixels in [0,1]; by default the set's
    workers    processes that decode a StreamedSet
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False, augment="none",
                 mean=None, std=None, rank=0, world_size=1, workers=0, channels_last=False):
        self.streamed = isinstance(dataset, StreamedSet)
        known = ("none", "crop_flip", "reflect_crop_flip")[:2 if self.streamed else 3]
        if augment not in known:
            raise UserError(f"augment {augment!r} is unknown; choose from {', '.join(known)}")
        if batch_size < 1 or not len(dataset) or not 0 <= rank < world_size:
            raise UserError(f"batch_size {batch_size}, {len(dataset)} rows, rank {rank} of "
                            f"{world_size}: expected at least 1, 1 and a rank below the world size")
        self.dataset, self.batch_size, self.device = dataset, batch_size, torch.device(device)
        self.seed, self.shuffle, self.augment, self.workers = seed, shuffle, augment, workers
        self.rank, self.world_size = rank, world_size
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        white = 255 if self.streamed or dataset.images.dtype == torch.uint8 else 1
        stats = torch.tensor([dataset.mean if mean is None else mean,
                              dataset.std if std is None else std], dtype=torch.float64)
        mean, std = (stats * white).view(2, -1, 1, 1)
        self.shift, self.scale = mean.float().to(self.device), (1 / std).float().to(self.device)
        if not self.streamed:
            self.labels = dataset.labels.to(self.device)
            self._place(dataset.images.to(self.device))

    def _place(self, images):
        """Lay the padded images out so that every crop lies in one contiguous run of memory.

        With rows of S pixels, the crop at (dy, dx) starts dy S + dx after its image, and has its
        rows S apart and its channels a padded channel apart. `runs` views every run as a row.
        """
        self.pad = 0 if self.augment == "none" else 4
        if self.augment == "crop_flip":
            images = F.pad(images, [self.pad] * 4)
        elif self.augment == "reflect_crop_flip":
            for axis in (2, 3):
                images = images.index_select(axis, self._mirror(images.shape[axis]))
        images = images.contiguous()
        _, channels, height, self.row = images.shape
        self.image = channels * height * self.row
        run = self.image - 2 * self.pad * (self.row + 1)
        self.strides = (run, height * self.row, self.row, 1)
        self.runs = images.view(-1).as_strided((images.numel() - run + 1, run), (1, 1))

    def _mirror(self, side):
        """Pixel numbers of a padded side, mirrored at both borders (which are not repeated)."""
        at = torch.arange(-self.pad, side + self.pad, device=self.device).abs()
        return torch.where(at >= side, 2 * (side - 1) - at, at)

    def __len__(self):
        """Batches in an epoch, over all processes."""
        return -(-len(self.dataset) // self.batch_size)

    def epoch(self, epoch=0, start=0):
        """Iterate over the batches of `epoch` from number `start` on; earlier ones cost nothing."""
        generator, n = _generator(self.seed, epoch), len(self.dataset)
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        pieces = [self._piece(batch) for batch in range(start, len(self))]
        return (self._stream if self.streamed else self._gather)(order, pieces, generator, epoch)

    def _piece(self, batch):
        """(first, last, global size): this rank's part of a batch as order[first:last]."""
        first = batch * self.batch_size
        size = min(self.batch_size, len(self.dataset) - first)
        share, longer = divmod(size, self.world_size)
        first += self.rank * share + min(self.rank, longer)
        return first, first + share + (self.rank < longer), size

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
        files = self.dataset.dataset
        if self.augment != "none":
            files = _Augmented(files, (self.seed, epoch))
        rows = [order[first:last] for first, last, _ in pieces]
        batches = iter(DataLoader(  # a generator of its own: the global one is left alone
            files, batch_sampler=[r.tolist() for r in rows if len(r)], num_workers=self.workers,
            pin_memory=self.device.type == "cuda", generator=generator))
        empty = torch.empty(0, *self.dataset.shape), torch.empty(0, dtype=torch.int64)
        for index, (_, _, size) in zip(rows, pieces):
            try:
                batch = (*(next(batches) if len(index) else empty), index)
            except UserError as error:  # from a worker it comes with a traceback in its message
                raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None
            images, labels, index = (t.to(self.device, non_blocking=True) for t in batch)
            yield Batch(self._normalise(images), labels, index, size)

    def _normalise(self, x):
        x = x.to(torch.float32, memory_format=self.format, copy=True)
        return x.sub_(self.shift).mul_(self.scale)


class _Augmented(Dataset):
    """Files under the augmentation drawn for `key` and the row."""

    def __init__(self, files, key):
        self.files, self.key = files, key

    def __getitem__(self, row):
        return self.files.augmented(row, _generator(*self.key, row).initial_seed())


# ---- Embedded sets -------------------------------------------------------------------------------

DIGITS, LETTERS = "0123456789", "ACEFHKMNPRTUVWXY"  # no letter that a warped digit resembles
EMBEDDED = ("glyphs", "glyphs_ambiguous", "dirty_glyphs", "glyphs_letters", "numbers",
            "numbers_letters", "numbers_ambiguous")


@lru_cache(maxsize=None)
def _embedded(name, training):
    """The training pool or the test part of an embedded set; nothing else changes what it holds."""
    if name == "dirty_glyphs":
        clean, ambiguous = (_embedded(part, training) for part in ("glyphs", "glyphs_ambiguous"))
        dataset = concat(name, clean.select(slice(8000)), ambiguous.select(slice(8000)))
    else:
        draw = {"glyphs": _glyphs, "glyphs_ambiguous": _blends, "glyphs_letters": _letters,
                "numbers": _numbers, "numbers_letters": _words,
                "numbers_ambiguous": _number_blends}[name]
        images, labels, k, *rest = draw(training, _generator(2102, EMBEDDED.index(name), training))
        dataset = ImageSet(name, images, labels, k, (0.0,), (1.0,), *rest)
    if not training:
        pool = _embedded(name, True)
        return replace(dataset, mean=pool.mean, std=pool.std)
    mean, std = _statistics(dataset.images)
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


def _print(ink, generator):
    """uint8 [N,1,28,28]: ink in a random grey on a random ground, with pixel noise."""
    low, high, noise = torch.rand(3, len(ink), 1, 1, 1, generator=generator)
    x = (0.15 * low).lerp(0.65 + 0.35 * high, ink)
    x += (0.02 + 0.06 * noise) * torch.randn(ink.shape, generator=generator)
    return x.clamp_(0, 1).mul_(255).round_().byte()


def _balanced(n, classes, generator):
    """int64 [n]: every class as often, in random order."""
    return torch.randperm(n, generator=generator) % classes


def _glyphs(training, generator):
    labels = _balanced(10000 if training else 2000, 10, generator)
    ink = _draw(_templates(DIGITS, 52, (0, 1, 2, 3)), labels, generator)
    return _print(ink, generator), labels, 10


def _letters(training, generator):
    labels = _balanced(10000 if training else 2000, len(LETTERS), generator)
    ink = _draw(_templates(LETTERS, 50, (0, 1, 2, 3)), labels, generator)
    return _print(ink, generator), labels, len(LETTERS)


NUMBERS = [f"{k:03d}" for k in range(1000)]
WORDS = ["".join(LETTERS[4 * k // 16**place % 16] for place in (2, 1, 0)) for k in range(1000)]


def _numbers(training, generator, texts=NUMBERS):
    labels = _balanced(30000 if training else 5000, 1000, generator)
    ink = _draw(_templates(texts, 27, (0, 1)), labels, generator, 7.0, 0.15, (0.95, 1.05),
                shift=0.06, bend=0.02)
    return _print(ink, generator), labels, 1000


def _words(training, generator):
    """Three letters as `numbers` has digits."""
    return _numbers(training, generator, WORDS)


def _number_blends(training, generator):
    """Two numbers over each other, the first with the share w (.35-.65) of the ink, its label with
    probability w."""
    n = 5000 if training else 2000
    first = _balanced(n, 1000, generator)
    second = (first + torch.randint(1, 1000, (n,), generator=generator)) % 1000
    w = 0.35 + 0.3 * torch.rand(n, 1, generator=generator)
    templates, share = _templates(NUMBERS, 27, (0, 1)), w[:, :, None, None]
    a, b = (_draw(templates, label, generator, 7.0, 0.15, (0.95, 1.05), 0.06, 0.02)
            for label in (first, second))
    ink = (share * a + (1 - share) * b) / torch.maximum(share, 1 - share)
    probs = torch.zeros(n, 1000).scatter_(1, first[:, None], w)
    probs.scatter_(1, second[:, None], 1 - w)
    sampled = torch.rand(n, generator=generator) < w[:, 0]
    return _print(ink.clamp_(0, 1), generator), torch.where(sampled, first, second), 1000, probs


def _blends(training, generator):
    """Two digits over each other, a little apart, the first with the share w (.35-.65) of the ink:
    the label is the first with probability w. The training pool has each image twice."""
    n, times = (5000, 2) if training else (2000, 1)
    first = _balanced(n, 10, generator)
    second = (first + torch.randint(1, 10, (n,), generator=generator)) % 10
    angle, w = 2 * math.pi * torch.rand(n, generator=generator), torch.rand(n, generator=generator)
    apart, w = 0.25 * torch.stack([angle.cos(), angle.sin()], 1), 0.35 + 0.3 * w[:, None]
    templates, share = _templates(DIGITS, 50, (0, 1)), w[:, :, None, None]
    a, b = (_draw(templates, digit, generator, 10.0, 0.15, (0.75, 0.95), 0.0, 0.03, offset)
            for digit, offset in ((first, apart), (second, -apart)))
    ink = (share * a + (1 - share) * b) / torch.maximum(share, 1 - share)
    images = _print(ink.clamp_(0, 1), generator)
    probs = torch.zeros(n, 10).scatter_(1, first[:, None], w).scatter_(1, second[:, None], 1 - w)
    rows = torch.arange(n).repeat_interleave(times)
    sampled = torch.rand(len(rows), generator=generator) < w[rows, 0]
    return images[rows], torch.where(sampled, first[rows], second[rows]), 10, probs[rows], rows


# ---- Texts and molecules -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextSet:
    """N sentences in memory, one after the other, each `[CLS] ... [SEP]`.

    tokens   int32 [T], ids below len(vocab); T is the sum of `lengths`
    lengths  int64 [N], tokens of each sentence, with [CLS] and [SEP]
    labels   int64 [N], in 0..num_classes-1
    vocab    the word piece of each id; 0 is "[PAD]", which no sentence holds
    """
    name: str
    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    num_classes: int
    vocab: tuple

    def __post_init__(self):
        if len(self.tokens) != int(self.lengths.sum()) or len(self.lengths) != len(self.labels):
            raise UserError(f"{self.name}: {len(self.tokens)} tokens, {len(self.lengths)} lengths "
                            f"that sum to {int(self.lengths.sum())}, {len(self.labels)} labels")

    def __len__(self):
        return len(self.labels)

    def select(self, index):
        """The sentences `index` (a slice, integers [n] or a mask [N]) as a new set."""
        rows = _rows(len(self), index)
        return replace(self, tokens=self.tokens[_ragged(self.lengths, rows)],
                       lengths=self.lengths[rows], labels=self.labels[rows])

    def rename(self, name):
        return replace(self, name=name)


@dataclass(frozen=True, eq=False)
class MoleculeSet:
    """N molecules in memory, the atoms of one after those of the other.

    numbers     int64 [A], atomic numbers, in 1..100; A is the sum of `sizes`
    positions   float64 [A,3], ångström
    sizes       int64 [N], atoms of each molecule
    labels      float64 [N], the target: energies in eV (float32 would be a meV off at QM9's)
    references  float64 [101], the target of a free atom by atomic number, eV; zeros where the
                target is no total energy
    """
    name: str
    numbers: Tensor
    positions: Tensor
    sizes: Tensor
    labels: Tensor
    references: Tensor

    def __post_init__(self):
        atoms, shapes = len(self.numbers), (tuple(self.positions.shape), len(self.references))
        if int(self.sizes.sum()) != atoms or len(self.sizes) != len(self.labels) or shapes != (
                (atoms, 3), 101):
            raise UserError(f"{self.name}: {atoms} numbers, positions {shapes[0]}, sizes that sum "
                            f"to {int(self.sizes.sum())}, {len(self.sizes)} sizes, "
                            f"{len(self.labels)} labels, {shapes[1]} references")

    def __len__(self):
        return len(self.labels)

    def select(self, index):
        """The molecules `index` (a slice, integers [n] or a mask [N]) as a new set."""
        rows = _rows(len(self), index)
        atoms = _ragged(self.sizes, rows)
        return replace(self, numbers=self.numbers[atoms], positions=self.positions[atoms],
                       sizes=self.sizes[rows], labels=self.labels[rows])

    def rename(self, name):
        return replace(self, name=name)


def load_text(name, split, data_dir="data", *, vocab_file=None, like=None, limit=None):
    """One of `TEXTS` as a TextSet; its splits are fixed.

    split       "train", "val", "test"; those of sst2: see sst2_has_test_labels
    vocab_file  BERT's vocab.txt, a word piece a line; by default sst2 has the `vocabulary` of its
                training sentences (embedded sets keep their own)
    like        a TextSet whose vocabulary is used instead: that of the model's training set
    limit       keep this many sentences, evenly spaced
    Raises UserError for unknown names and values, absent and damaged files.
    """
    _check_part(name, split, limit, TEXTS)
    if name == "sst2":
        sentences, labels = _sst2(Path(data_dir) / "SST-2", split)
    else:
        sentences, labels = _embedded_text(name)
        part = _part(split, 6000)
        sentences, labels = sentences[part], labels[part]
    if like is not None:
        vocab = like.vocab
    elif name != "sst2":
        vocab = _embedded_vocabulary()
    elif vocab_file is not None:
        vocab = read_vocabulary(vocab_file)
    else:
        vocab = vocabulary(sentences if split == "train" else
                           _sst2(Path(data_dir) / "SST-2", "train")[0])
    keep = _evenly(len(labels), limit)
    tokens, lengths = tokenise([sentences[row] for row in keep.tolist()], vocab)
    return TextSet(name, tokens, lengths, labels[keep], 2, vocab)


def load_molecules(name, split, data_dir="data", *, target="u0", limit=None):
    """One of `MOLECULES` as a MoleculeSet; its splits are fixed.

    split   "train", "val", "test"; qm9's are the published ones where all 130,831 molecules are
            there, else the same shares of a permutation drawn in the same way
    target  one of `QM9_TARGETS`, for qm9; clusters have one target, their energy
    limit   keep this many molecules, evenly spaced
    Raises UserError for unknown names and values, absent and damaged files.
    """
    _check_part(name, split, limit, MOLECULES)
    if name == "qm9":
        dataset = _qm9(Path(data_dir) / "QM9", target)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset)))
        ends = [round(rows / 130831 * len(dataset)) for rows in (0, 110000, 120000, 130831)]
        part = ("train", "val", "test").index(split)
        rows = order[ends[part]:ends[part + 1]]
    else:
        if target != "u0":
            raise UserError(f"{name}: target {target!r} is unknown; its one target is u0")
        dataset = _embedded_molecules(name)
        rows = torch.arange(len(dataset))[_part(split, 4000)]
    return dataset.select(rows[_evenly(len(rows), limit)])


def _check_part(name, split, limit, names):
    if name not in names:
        raise UserError(f"dataset {name!r} is unknown; choose from {', '.join(names)}")
    if split not in ("train", "val", "test"):
        raise UserError(f"split {split!r} is unknown; choose train, val or test")
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: expected limit >= 1")


def _rows(n, index):
    """int64: the row numbers of n rows that `index` selects."""
    if not isinstance(index, slice):
        index = torch.as_tensor(index)
        index = index.long() if not len(index) else index  # an empty list comes as floats
    return torch.arange(n)[index]


def _evenly(n, limit):
    """int64: all of n rows, or `limit` of them, evenly spaced."""
    return torch.arange(n) if limit is None or limit >= n else torch.arange(limit) * n // limit


def _ragged(sizes, rows, total=None, starts=None):
    """int64 [total]: where the entries of `rows` lie, if rows of `sizes` entries lie one after
    the other. A `total` given beforehand (and `starts`) spares a wait for the device."""
    starts, counts = sizes.cumsum(0) - sizes if starts is None else starts, sizes[rows]
    shift = starts[rows] - (counts.cumsum(0) - counts)
    total = int(counts.sum()) if total is None else total
    return torch.arange(total, device=sizes.device) + shift.repeat_interleave(
        counts, output_size=total)


# ---- Batches of texts and molecules --------------------------------------------------------------


class TextBatch(NamedTuple):
    tokens: Tensor      # int64 [b,L], padded with 0, on the device; so are labels and index
    labels: Tensor      # int64 [b]
    index: Tensor       # int64 [b], rows of the set
    global_size: int    # sentences in this batch over all processes


class Molecules(NamedTuple):
    """Molecules as one graph. An edge leads from `sources` to `targets` for every two atoms of a
    molecule closer than the cutoff, both ways, sorted by target; none from an atom to itself."""
    numbers: Tensor     # int64 [a], atomic numbers
    positions: Tensor   # float32 [a,3], ångström
    molecule: Tensor    # int64 [a], in 0..count-1, ascending
    sources: Tensor     # int64 [e], atoms in 0..a-1
    targets: Tensor     # int64 [e], ascending
    count: int          # molecules
    atom_rows: tuple | None = None  # (first, total): where these lie among the global batch's
    edge_rows: tuple | None = None


class MoleculeBatch(NamedTuple):
    molecules: Molecules
    labels: Tensor      # float64 [b]
    index: Tensor       # int64 [b], rows of the set
    global_size: int    # molecules in this batch over all processes


class SequenceLoader:
    """Batches of a TextSet or a MoleculeSet, in an order that depends on (seed, epoch) alone.

    `batch_size` is global: each batch is cut into `world_size` contiguous near-equal pieces, as
    Loader does. The last, partial batch is kept.

    by_length  texts: sentences of like length share batches. Shuffled, each 50 batches are sorted
               by length and the batches then permuted, so that the partial one may come anywhere;
               else all sentences are sorted
    pad_to     texts: tokens a row; 0: the longest sentence of the global batch
    cutoff     molecules: ångström; edges are found once, here
    """

    def __init__(self, dataset, batch_size, device="cpu", *, seed=0, shuffle=False, by_length=True,
                 rank=0, world_size=1, cutoff=5.0, pad_to=0):
        if batch_size < 1 or not len(dataset) or not 0 <= rank < world_size:
            raise UserError(f"batch_size {batch_size}, {len(dataset)} rows, rank {rank} of "
                            f"{world_size}: expected at least 1, 1 and a rank below the world size")
        self.dataset, self.batch_size, self.device = dataset, batch_size, torch.device(device)
        self.seed, self.shuffle, self.rank, self.world_size = seed, shuffle, rank, world_size
        self.text, self.pad_to = isinstance(dataset, TextSet), pad_to
        self.by_length = by_length and self.text
        self.labels = dataset.labels.to(self.device)
        self._place_texts() if self.text else self._place_molecules(cutoff)

    def _place_texts(self):
        longest = int(self.dataset.lengths.max())
        if self.pad_to and self.pad_to < longest:
            raise UserError(f"{self.dataset.name}: pad_to {self.pad_to} is less than the "
                            f"{longest} tokens of its longest sentence")
        real = torch.arange(self.pad_to or longest) < self.dataset.lengths[:, None]
        table = torch.zeros(real.shape, dtype=torch.int32)
        self.table = table.masked_scatter_(real, self.dataset.tokens).to(self.device)

    def _place_molecules(self, cutoff):
        sources, targets, self.edges = find_edges(self.dataset, cutoff)
        self.bonds = torch.stack([sources, targets]).to(self.device)
        self.numbers = self.dataset.numbers.to(self.device)
        self.positions = self.dataset.positions.float().to(self.device)
        sizes = torch.stack([self.dataset.sizes, self.edges])
        self.counts, self.starts = (t.to(self.device) for t in (sizes, sizes.cumsum(1) - sizes))

    def __len__(self):
        """Batches in an epoch, over all processes."""
        return -(-len(self.dataset) // self.batch_size)

    def epoch(self, epoch=0, start=0):
        """Iterate over the batches of `epoch` from number `start` on; earlier ones cost nothing."""
        generator, n = _generator(self.seed, epoch), len(self.dataset)
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        batches = torch.arange(len(self))
        if self.by_length:
            chunk = torch.arange(n) // (50 * self.batch_size if self.shuffle else n)
            key = chunk * (int(self.dataset.lengths.max()) + 1) + self.dataset.lengths[order]
            order = order[key.argsort(stable=True)]
            if self.shuffle:
                batches = torch.randperm(len(self), generator=generator)
        pieces = [self._piece(batch) for batch in batches[start:].tolist()]
        return (self._texts if self.text else self._molecules)(order, pieces)

    def _piece(self, batch):
        """(start of the batch, first, last, global size): this rank's part is order[first:last]."""
        begin = batch * self.batch_size
        size = min(self.batch_size, len(self.dataset) - begin)
        share, longer = divmod(size, self.world_size)
        first = begin + self.rank * share + min(self.rank, longer)
        return begin, first, first + share + (self.rank < longer), size

    def _texts(self, order, pieces):
        lengths = F.pad(self.dataset.lengths[order], (0, -len(order) % self.batch_size))
        longest = lengths.view(-1, self.batch_size).amax(1).tolist()
        order = order.to(self.device)
        for begin, first, last, size in pieces:
            index = order[first:last]
            tokens = self.table[index, :self.pad_to or longest[begin // self.batch_size]].long()
            yield TextBatch(tokens, self.labels[index], index, size)

    def _molecules(self, order, pieces):
        ends = torch.stack([self.dataset.sizes, self.edges])[:, order].cumsum(1)
        ends, order = F.pad(ends, (1, 0)).tolist(), order.to(self.device)
        for begin, first, last, size in pieces:
            index = order[first:last]
            atoms, edges = (end[last] - end[first] for end in ends)
            where = ((end[first] - end[begin], end[begin + size] - end[begin]) for end in ends)
            graph = Molecules(*self._graph(index, atoms, edges), *where)
            yield MoleculeBatch(graph, self.labels[index], index, size)

    def _graph(self, index, atoms, edges):
        """The molecules `index`, of so many atoms and edges in all."""
        (sizes, bonds), (first_atom, first_bond) = self.counts, self.starts
        at = _ragged(sizes, index, atoms, first_atom)
        counts, row = sizes[index], torch.arange(len(index), device=self.device)
        shift = (counts.cumsum(0) - counts).repeat_interleave(bonds[index], output_size=edges)
        sources, targets = self.bonds[:, _ragged(bonds, index, edges, first_bond)] + shift
        return (self.numbers[at], self.positions[at],
                row.repeat_interleave(counts, output_size=atoms), sources, targets, len(index))


def find_edges(dataset, cutoff=5.0):
    """(sources int16 [E], targets int16 [E], edges int64 [N] a molecule): the two atoms, counted
    within their molecule, of all pairs of different atoms closer than `cutoff`; by target."""
    found, sizes = [], dataset.sizes
    starts, pairs = sizes.cumsum(0) - sizes, sizes * sizes
    parts = pairs.cumsum(0).sub_(1) // 2**21  # as many molecules at a time as memory holds easily
    for rows in torch.arange(len(sizes)).split(parts.unique_consecutive(
            return_counts=True)[1].tolist()):
        molecule = rows.repeat_interleave(pairs[rows])
        n = sizes[molecule]
        pair = torch.arange(len(n)) - (pairs[rows].cumsum(0) - pairs[rows]).repeat_interleave(
            pairs[rows])
        target, source, first = pair // n, pair % n, starts[molecule]
        apart = dataset.positions[first + source] - dataset.positions[first + target]
        near = (apart.square().sum(1) < cutoff**2) & (source != target)
        found.append((source[near].short(), target[near].short(),
                      molecule[near].sub_(rows[0]).bincount(minlength=len(rows))))
    return tuple(torch.cat(part) for part in zip(*found))


# ---- Texts: files and word pieces ----------------------------------------------------------------

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SST2_SITE = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
       (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


def sst2_has_test_labels(data_dir="data"):
    """Whether SST-2/test.tsv is labelled (header sentence<TAB>label): the splits depend on it.

    With labels: train.tsv 67,349, dev.tsv 872, test.tsv 1,821, as published. GLUE withholds them
    (header index<TAB>sentence); then test is dev.tsv, val is 2,000 rows of train.tsv (the first of
    torch.randperm under seed 0; of short files a tenth) and train the others. train.tsv has phrases
    of its sentences as rows of their own, so that this val shares sentences with train: it is
    easier than test, and what is fitted on it is too confident.
    """
    path = Path(data_dir) / "SST-2" / "test.tsv"
    header = _read_lines("sst2", path, SST2_SITE)[0]
    if header not in ("sentence\tlabel", "index\tsentence"):
        raise UserError(f"{path}: header {header[:80]!r}; expected 'sentence<TAB>label', or "
                        "'index<TAB>sentence' where the labels are withheld")
    return header == "sentence\tlabel"


def _sst2(folder, split):
    """(sentences, labels int64 [N])."""
    labelled = sst2_has_test_labels(folder.parent)
    if labelled or split == "test":
        files = {"train": "train", "val": "dev", "test": "test" if labelled else "dev"}
        return _read_sst2(folder / f"{files[split]}.tsv")
    sentences, labels = _read_sst2(folder / "train.tsv")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    n_val = min(2000, len(labels) // 10)
    rows = order[:n_val] if split == "val" else order[n_val:].sort()[0]
    return [sentences[row] for row in rows.tolist()], labels[rows]


def _read_lines(name, path, site, end="\n"):
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _absent(name, path, site) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    # not splitlines, which cuts at more characters than these
    return text.replace("\r\n", "\n").removesuffix("\n").split(end)


def _read_sst2(path):
    """(sentences, labels int64 [N]) of sentence<TAB>label rows, without quoting."""
    header, *lines = _read_lines("sst2", path, SST2_SITE)
    if header != "sentence\tlabel":
        raise UserError(f"{path}: header {header[:80]!r}; expected 'sentence<TAB>label'")
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, 2):
        if len(row) != 2:
            raise UserError(f"{path}, line {number}: {len(row)} fields; expected "
                            "sentence<TAB>label")
        if not row[0].strip():
            raise UserError(f"{path}, line {number}: the sentence is empty")
        if row[1] not in ("0", "1"):
            raise UserError(f"{path}, line {number}: label {row[1][:80]!r}; expected 0 or 1")
    if not rows:
        raise _damaged("sst2", path, SST2_SITE, "no rows")
    sentences, labels = zip(*rows)
    return sentences, torch.tensor([int(label) for label in labels])


def read_vocabulary(path):
    """A vocab.txt (a word piece a line, line number = id, [PAD] first) as a tuple."""
    vocab = tuple(_read_lines("vocabulary", Path(path), "https://huggingface.co/bert-base-uncased"))
    missing = [token for token in SPECIAL[:4] if token not in vocab]
    if missing or vocab[0] != SPECIAL[0]:
        what = f"{', '.join(missing)} missing" if missing else "[PAD] is not its first line"
        raise UserError(f"{path}: {what}; expected BERT's vocab.txt, a word piece a line")
    return vocab


def vocabulary(sentences, size=30522):
    """At most `size` word pieces: BERT's special tokens; every character c, then every ##c; words
    that come twice or more, by falling frequency, equals in alphabetical order."""
    words = Counter()
    for word, count in Counter(w for s in sentences for w in _clean(s).split()).items():
        for piece in _basic_words(word):
            words[piece] += count
    characters = sorted({c for word in words for c in word})
    pieces = [*SPECIAL, *characters, *("##" + c for c in characters)]
    frequent = sorted((w for w, count in words.items() if count > 1 and len(w) > 1),
                      key=lambda word: (-words[word], word))
    return tuple((pieces + frequent)[:size])


def tokenise(sentences, vocab, max_length=268):
    """BERT's uncased WordPiece: (tokens int32 [T], lengths int64 [N]), each `[CLS] ... [SEP]`.

    Lower case, no accents, punctuation and CJK characters alone; each word is cut from the left
    into the longest pieces that `vocab` has. A word that cannot be, or of more than 100
    characters, is [UNK]. Sentences keep their first max_length - 2 pieces. "[SEP]" in a text is
    three words, as in the original code, not a special token.
    """
    table = {piece: number for number, piece in enumerate(vocab)}
    ids, codes, counts = {}, [], []  # each different word is cut once
    for sentence in sentences:
        words = _clean(sentence).split()
        codes += [ids.setdefault(word, len(ids)) for word in words]
        counts.append(len(words))
    pieces = [[i for w in _basic_words(word) for i in _word_pieces(w, table)] for word in ids]
    sizes = torch.tensor([len(p) for p in pieces], dtype=torch.int64)
    pieces = torch.tensor([i for p in pieces for i in p], dtype=torch.int32)
    codes, counts = (torch.tensor(t, dtype=torch.int64) for t in (codes, counts))
    body = pieces[_ragged(sizes, codes)]
    ends = F.pad(sizes[codes].cumsum(0), (1, 0))[F.pad(counts.cumsum(0), (1, 0))]
    full = ends.diff()
    lengths = full.clamp(max=max_length - 2) + 2
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(len(body)) - ends[:-1].repeat_interleave(full)
    kept, at = within < max_length - 2, (starts + 1).repeat_interleave(full) + within
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int32)
    tokens[starts], tokens[starts + lengths - 1] = table["[CLS]"], table["[SEP]"]
    tokens[at[kept]] = body[kept]
    return tokens, lengths


def _clean(text):
    """Without control characters; any white space as " ", CJK characters between spaces."""
    if text.isascii() and text.isprintable():
        return text
    out = []
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            out.append(" ")
        elif c != "\ufffd" and unicodedata.category(c)[0] != "C":
            cjk = any(low <= ord(c) <= high for low, high in CJK)
            out.append(f" {c} " if cjk else c)
    return "".join(out)


def _basic_words(word):
    """A word without white space, in lower case and without accents, cut at punctuation."""
    if word.isascii() and word.isalpha():
        return [word.lower()]
    out = []
    for c in unicodedata.normalize("NFD", word.lower()):
        kind = unicodedata.category(c)
        if kind != "Mn":  # all ASCII signs count as punctuation, "$" and "^" too
            sign = kind[0] == "P" or c.isascii() and c.isprintable() and not c.isalnum()
            out.append(f" {c} " if sign else c)
    return "".join(out).split()


def _word_pieces(word, table):
    """The ids of the longest pieces from the left, or [UNK]'s."""
    ids, start = [], 0
    while start < len(word) <= 100:
        mark = "##" if start else ""
        for end in range(len(word), start, -1):
            if mark + word[start:end] in table:
                break
        else:
            return [table["[UNK]"]]
        ids.append(table[mark + word[start:end]])
        start = end
    return ids or [table["[UNK]"]]


# ---- Molecules: files and energies ---------------------------------------------------------------

HARTREE_EV, KCAL_MOL_EV = 27.211386246, 0.04336414  # as in PyTorch Geometric's copy of the set
QM9_SITE = "https://doi.org/10.6084/m9.figshare.978904"
QM9_SDF_SITE = "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/molnet_publish/qm9.zip"
QM9_ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
QM9_ATOMS = {  # free atoms of QM9_ELEMENTS, hartree, as published
    "u0": (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730),
    "u298": (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314),
    "h298": (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370),
    "g298": (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544)}
QM9_TARGETS = {  # name: factor to our unit. Energies in eV; others as published
    "A": 1, "B": 1, "C": 1, "mu": 1, "alpha": 1, "homo": HARTREE_EV, "lumo": HARTREE_EV,
    "gap": HARTREE_EV, "r2": 1, "zpve": HARTREE_EV, "u0": HARTREE_EV, "u298": HARTREE_EV,
    "h298": HARTREE_EV, "g298": HARTREE_EV, "cv": 1, "u0_atom": KCAL_MOL_EV,
    "u298_atom": KCAL_MOL_EV, "h298_atom": KCAL_MOL_EV, "g298_atom": KCAL_MOL_EV}


def atom_references(target="u0"):
    """float64 [101], eV: the free atoms' `target` by atomic number; zeros where it has none."""
    references = torch.zeros(101, dtype=torch.float64)
    if target in QM9_ATOMS:
        values = torch.tensor(QM9_ATOMS[target], dtype=torch.float64)
        references[list(QM9_ELEMENTS.values())] = values * HARTREE_EV
    return references


def _qm9(folder, target):
    """All molecules that are there, in the order of their numbers, as a MoleculeSet."""
    if target not in QM9_TARGETS:
        raise UserError(f"target {target!r} is unknown; choose from {', '.join(QM9_TARGETS)}")
    path = _qm9_path(folder)
    stamps = tuple(file.stat().st_mtime_ns for file in (path, path.parent))
    index, numbers, positions, sizes, columns = _read_qm9(path, stamps)
    values = torch.from_numpy(np.ascontiguousarray(columns[target])) * QM9_TARGETS[target]
    known = torch.tensor(list(QM9_ELEMENTS.values()))
    strange = torch.isin(numbers, known, invert=True).nonzero().flatten()
    if len(strange):
        atom = int(strange[0])
        row = int((sizes.cumsum(0) <= atom).sum())
        raise UserError(f"{path}, molecule {index[row]}: element {int(numbers[atom])} is unknown; "
                        f"QM9 has {', '.join(QM9_ELEMENTS)}")
    if not (values.isfinite().all() and positions.isfinite().all()):
        raise _damaged("qm9", path, QM9_SITE, "NaN or infinity among positions or targets")
    return MoleculeSet("qm9", numbers, positions, sizes, values, atom_references(target))


def _qm9_path(folder):
    """What there is of QM9, the complete layouts first."""
    for path in (folder / "gdb9.sdf", folder / "raw" / "gdb9.sdf", folder / "dsgdb9nsd",
                 folder / "qm9_subset.npz"):
        if path.exists():
            return path
    raise UserError(f"qm9: {folder} has none of gdb9.sdf (with gdb9.sdf.csv and uncharacterized.txt"
                    f", {QM9_SDF_SITE}), dsgdb9nsd/*.xyz (with uncharacterized.txt, {QM9_SITE}), "
                    "qm9_subset.npz")


@lru_cache(maxsize=1)
def _read_qm9(path, _):
    """(molecule numbers, atomic numbers [A], positions [A,3], sizes [N], targets by name [N])."""
    if path.suffix == ".npz":
        arrays = load_arrays(path, ["index", "N", "Z", "R", "targets", "target_names"])
        index, sizes, names = arrays["index"], arrays["N"], arrays["target_names"].tolist()
        numbers, positions = arrays["Z"], arrays["R"]
        columns = dict(zip(names, arrays["targets"].T))
        shapes = (sizes.shape, numbers.shape, positions.shape, arrays["targets"].shape)
        n, atoms = len(index), int(sizes.sum())
        lacks = set(QM9_TARGETS) - set(columns)
        if lacks or shapes != ((n,), (atoms,), (atoms, 3), (n, len(names))):
            why = f"N, Z, R and targets have the shapes {shapes} for {n} molecules, {atoms} atoms"
            why = f"no targets {', '.join(sorted(lacks))}" if lacks else why
            raise _damaged("qm9", path, QM9_SITE, why)
    else:
        read = _read_sdf if path.suffix == ".sdf" else _read_xyz_files
        index, numbers, positions, sizes, columns = read(path)
        positions = np.array(positions).reshape(-1, 3)
        if len(index) > 130831:
            why = f"{len(index)} molecules remain, expected 130831"
            raise _damaged("qm9", path.parent / "uncharacterized.txt", QM9_SITE, why)
    return (index, torch.as_tensor(numbers).long(), torch.as_tensor(positions).double(),
            torch.as_tensor(sizes).long(), columns)


def _uncharacterized(path):
    """The numbers of the molecules that are left out: lines that begin with one."""
    first = [line.split()[0] for line in _read_lines("qm9", path, QM9_SITE) if line.strip()]
    return {int(word) for word in first if word.isdecimal()}


def _atoms(path, molecule, atoms):
    """([atomic number], [x, y, z, ...]) of rows of text: symbol, x, y, z."""
    try:
        numbers = [QM9_ELEMENTS[atom[0]] for atom in atoms]
        return numbers, [_number(word) for atom in atoms for word in atom[1:4]]
    except KeyError as error:
        raise UserError(f"{path}, molecule {molecule}: element {error} is unknown; QM9 has "
                        f"{', '.join(QM9_ELEMENTS)}") from None
    except ValueError as error:
        why = f"molecule {molecule}: {_one_line(error)}"
        raise _damaged("qm9", path, QM9_SITE, why) from None


def _number(word):
    """The published files write 1e-6 as 1.*^-6."""
    return float(word.replace("*^", "e"))


def _read_sdf(path):
    """gdb9.sdf and gdb9.sdf.csv, as PyTorch Geometric reads them; coordinates have 4 digits."""
    omitted = _uncharacterized(path.with_name("uncharacterized.txt"))
    table = path.with_name("gdb9.sdf.csv")
    header, *rows = (line.split(",") for line in _read_lines("qm9", table, QM9_SDF_SITE))
    lacking = [target for target in QM9_TARGETS if target not in header]
    if lacking or {len(row) for row in rows} != {len(header)}:
        why = f"its header lacks {', '.join(lacking)}" if lacking else "rows of unequal length"
        raise _damaged("qm9", table, QM9_SDF_SITE, why)
    blocks = _read_lines("qm9", path, QM9_SDF_SITE, end="$$$$\n")
    if len(blocks) != len(rows):
        why = f"{len(blocks)} molecules, but {len(rows)} rows in {table.name}"
        raise _damaged("qm9", path, QM9_SDF_SITE, why)
    kept = [row for row in range(len(rows)) if row + 1 not in omitted]
    numbers, positions, sizes = [], array("d"), []
    for row in kept:
        lines = blocks[row].split("\n")
        n = lines[3][:3].strip() if len(lines) > 3 else ""
        atoms = [line.split() for line in lines[4:4 + int(n)]] if n.isdecimal() else []
        if not atoms or len(atoms) < int(n) or min(map(len, atoms)) < 4:
            raise _damaged("qm9", path, QM9_SDF_SITE, f"molecule {row + 1} is cut")
        part = _atoms(path, row + 1, [(atom[3], *atom[:3]) for atom in atoms])
        numbers += part[0]
        positions.extend(part[1])
        sizes.append(len(atoms))
    try:
        columns = {target: np.array([float(rows[row][header.index(target)]) for row in kept])
                   for target in QM9_TARGETS}
    except ValueError as error:
        raise _damaged("qm9", table, QM9_SDF_SITE, _one_line(error)) from None
    return [row + 1 for row in kept], numbers, positions, sizes, columns


def _read_xyz_files(folder):
    """The published dsgdb9nsd_*.xyz, whose atomisation energies come from the free atoms'."""
    omitted = _uncharacterized(folder.with_name("uncharacterized.txt"))
    index, numbers, positions, sizes, targets = [], [], array("d"), [], []
    for path in sorted(folder.glob("dsgdb9nsd_*.xyz")):
        lines = [line.split() for line in _read_lines("qm9", path, QM9_SITE)]
        n = int(lines[0][0]) if lines[0] and lines[0][0].isdecimal() else 0
        if not n or len(lines) < n + 2 or len(lines[1]) != 17 or any(
                len(atom) != 5 for atom in lines[2:n + 2]):
            why = "not an atom count, a line of 15 properties and the atoms"
            raise _damaged("qm9", path, QM9_SITE, why)
        try:
            molecule, values = int(lines[1][1]), [_number(word) for word in lines[1][2:]]
        except ValueError as error:
            raise _damaged("qm9", path, QM9_SITE, _one_line(error)) from None
        if molecule in omitted:
            continue
        part = _atoms(path, molecule, lines[2:n + 2])
        index.append(molecule)
        sizes.append(n)
        targets.append(values)
        numbers += part[0]
        positions.extend(part[1])
    if not index:
        raise _damaged("qm9", folder, QM9_SITE, "no molecule in dsgdb9nsd_*.xyz")
    columns = dict(zip(QM9_TARGETS, np.array(targets).T))
    molecule = np.repeat(np.arange(len(sizes)), sizes)
    for target in QM9_ATOMS:
        free = (atom_references(target) / HARTREE_EV).numpy()[numbers]
        bound = columns[target] - np.bincount(molecule, free)
        columns[target + "_atom"] = bound * HARTREE_EV / KCAL_MOL_EV
    return index, numbers, positions, sizes, columns


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
    depth, radius, pull = torch.zeros(3, 101, dtype=torch.float64)
    for z, values in PAIR_TERMS.items():
        depth[z], radius[z], pull[z] = values
    depth, radius, pull = (t[numbers] for t in (depth, radius, pull))
    well = (depth[..., None] * depth[..., None, :]).sqrt()
    well = well * (1 + 0.2 * (pull[..., None] - pull[..., None, :]).abs())
    apart = positions[..., None, :] - positions[..., None, :, :]
    d = apart.square().sum(-1).sqrt()
    decay = torch.exp(-1.7 * (d - radius[..., None] - radius[..., None, :]))
    energy = well * (decay.square() - 2 * decay) * torch.cos(math.pi * d / 10).square()
    pairs = (d < 5).triu(1)
    return atom_references()[numbers].sum(-1) + (energy * pairs).sum((-2, -1))


# ---- Embedded texts and molecules ----------------------------------------------------------------


def _part(split, training):
    """The rows of an embedded set's train, val (500) or test (1000)."""
    ends = {"train": (0, training), "val": (training, training + 500),
            "test": (training + 500, training + 1500)}
    return slice(*ends[split])


@lru_cache(maxsize=None)
def _embedded_molecules(name):
    """All 5,500 rows of clusters or clusters_large."""
    sizes = (4, 10) if name == "clusters" else (11, 16)
    generator = _generator(2103, sizes[0])
    n = torch.randint(sizes[0], sizes[1] + 1, (5500,), generator=generator)
    numbers, positions = _grow(n, sizes[1], generator)
    real = numbers > 0
    return MoleculeSet(name, numbers[real], positions[real], n, pair_energy(numbers, positions),
                       atom_references())


def _grow(sizes, largest, generator, tries=12):
    """(numbers int64 [N,largest], 0 after `sizes` atoms; positions float64 [N,largest,3]).

    Each atom is put near bond length from an earlier one: at the first of `tries` random places no
    nearer to any than 0.85 of the sum of radii, else at the widest.
    """
    n = len(sizes)
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
    return torch.where(torch.arange(largest) < sizes[:, None], numbers, 0), positions


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
    of their weighted sum; those within 0.3 of zero are left out, and those of over 30 words."""
    (first, a), (second, b) = (_opinions(n, generator) for _ in range(2))
    joins, weights = _choose(JOINS, n, generator, 0.5)
    score = weights[:, 0] * a + weights[:, 1] * b
    second = [[part if one else "" for part, one in zip(column, joins)] for column in second]
    sentences = [" ".join(filter(None, row)) for row in zip(*first, joins, *second)]
    clear = ((score.abs() >= 0.3) & ((weights[:, 0] != weights[:, 1]) | (a * b > 0))).tolist()
    labels = (score > 0).long().tolist()
    return [pair for pair, keep in zip(zip(sentences, labels), clear)
            if keep and len(pair[0].split()) <= 30]


def _headlines(n, generator):
    columns = [_choose(options, n, generator)[0]
               for options in (COMPANIES, REPORTS, FIGURES, CONTEXTS, TIMES)]
    return [(" ".join(filter(None, row)), 0) for row in zip(*columns)]


@lru_cache(maxsize=None)
def _embedded_text(name):
    """(sentences, labels int64): 7,500 different rows."""
    draw = _reviews if name == "reviews" else _headlines
    rows = list(dict(draw(13000, _generator(2104, len(name)))).items())[:7500]
    sentences, labels = zip(*rows)
    return sentences, torch.tensor(labels)


@lru_cache(maxsize=None)
def _embedded_vocabulary():
    """That of reviews and reviews_finance: as BERT's does, it knows words that training lacks, so
    that OOD sentences do not give themselves away by their length."""
    part = _part("train", 6000)
    return vocabulary([*_embedded_text("reviews")[0][part],
                       *_embedded_text("reviews_finance")[0][part]])
