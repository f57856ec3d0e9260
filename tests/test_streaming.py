"""A pretrained torchvision network on an ImageNet-like folder tree: streamed, no training."""

import json

import numpy as np
import torch
import torchvision
from PIL import Image

import ddu


def write_images(folder, count, rng, tint):
    folder.mkdir(parents=True)
    for i in range(count):
        height, width = rng.integers(40, 90, 2)
        pixels = rng.integers(0, 120, (height, width, 3)) + tint
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.JPEG")


def test_pretrained_network_on_streamed_folders(tmp_path):
    rng = np.random.default_rng(0)
    for c, name in enumerate(("n01", "n02", "n03")):
        write_images(tmp_path / "data/imagenet/train" / name, 9, rng, np.eye(3)[c] * 130)
        write_images(tmp_path / "data/imagenet/val" / name, 4, rng, np.eye(3)[c] * 130)
    write_images(tmp_path / "data/imagenet-o/n04", 6, rng, 60)
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "weights.pt")
    options = ["--dataset", "imagenet", "--model", "torchvision/resnet18", "--weights", str(tmp_path / "weights.pt"),
               "--data-dir", str(tmp_path / "data"), "--out-dir", str(tmp_path / "runs"), "--device", "cpu",
               "--workers", "1", "-b", "16"]
    metrics = ddu.main(options)
    assert metrics["features"] == 512 and metrics["examples_per_class_min"] >= 6
    assert metrics["jitter"] > 0  # fewer examples than features in every class: the dual form
    assert 0 <= metrics["imagenet_o/auroc_density"] <= 1 and 0 <= metrics["test/accuracy"] <= 1
    folder = tmp_path / "runs/ddu/imagenet-torchvision_resnet18-seed1"
    assert json.loads((folder / "results.json").read_text())["metrics"]["imagenet_o/auroc_density"] == \
        metrics["imagenet_o/auroc_density"]
    assert not (folder / "last.pt").exists() and (folder / "uncertainty.png").exists()
    assert ddu.main([*options, "--eval", "--no-plot"]) == metrics
