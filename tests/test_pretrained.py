"""Pretrained networks: heads, files of weights, image sizes, and features that are frozen."""

import copy
import os
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models
from torchvision.transforms import InterpolationMode

import common
import data

SMALL = "torchvision/shufflenet_v2_x0_5"
# The smallest network of each family, the images that it takes, and its number of features.
FAMILIES = [
    ("convnext_tiny", 32, 768), ("densenet121", 32, 1024), ("efficientnet_b0", 32, 1280),
    ("googlenet", 32, 1024), ("inception_v3", 75, 2048), ("mobilenet_v3_small", 32, 1024),
    ("regnet_x_400mf", 32, 400), ("resnet18", 32, 512), ("shufflenet_v2_x0_5", 32, 1024),
    ("swin_t", 32, 768), ("vgg11", 32, 4096), ("vit_b_32", 32, 768)]


def network(model=SMALL, weights="none", num_classes=5, shape=(3, 32, 32), **options):
    return data.pretrained_network(model, str(weights), num_classes, shape, **options)


def saved(path, name="shufflenet_v2_x0_5", num_classes=5, seed=1):
    """The state dict of a network of torchvision with random weights; it is saved in `path`."""
    torch.manual_seed(seed)
    state = models.get_model(name, num_classes=num_classes).state_dict()
    torch.save(state, path)
    return state


def same_weights(net, state):
    """Whether a backbone and a state dict agree, but for the head."""
    own = net.state_dict()
    assert len(own) > 10
    return all(torch.equal(value, state[name]) for name, value in own.items())


@pytest.fixture
def quick_weights(monkeypatch):
    """Initial weights that repeat 9973 random numbers: VGG's own ones take seconds."""
    some = 0.03 * torch.randn(9973)

    def fill(tensor, *args, **options):
        with torch.no_grad():
            return tensor.copy_(some.repeat(tensor.numel() // 9973 + 1)[:tensor.numel()]
                                .view_as(tensor))

    for name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_"):
        monkeypatch.setattr(nn.init, name, fill)


@pytest.mark.parametrize("name, size, dim", FAMILIES, ids=[row[0] for row in FAMILIES])
def test_the_last_linear_layer_is_the_head_in_every_family(name, size, dim, quick_weights,
                                                           monkeypatch):
    built = []
    get_model = models.get_model

    def recorded(*args, **options):
        built.append(get_model(*args, **options))
        return copy.deepcopy(built[0])

    monkeypatch.setattr(models, "get_model", recorded)
    backbone, head = network(f"torchvision/{name}", shape=(3, size, size))
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        features = backbone.eval()(images)
        assert features.shape == (2, dim)
        assert type(head) is nn.Linear and head.out_features == 5 and head.bias is not None
        assert torch.equal(head(features), built[0].eval()(images))
        assert backbone.train()(images).shape == (2, dim)  # no auxiliary outputs


@pytest.mark.parametrize("name", ["squeezenet1_0", "fcn_resnet50", "r3d_18", "raft_small",
                                  "quantized_resnet18", "fasterrcnn_resnet50_fpn", "nonsense"])
def test_other_networks_are_refused_with_what_to_use(name):
    with pytest.raises(common.UserError, match="ends in a linear layer; use resnet18"):
        network(f"torchvision/{name}")


# ---- Files of weights ---------------------------------------------------------------------------


def with_prefix(state, prefix):
    return OrderedDict((prefix + name, value) for name, value in state.items())


WRAPPINGS = {
    "plain": lambda state: state,
    "module": lambda state: with_prefix(state, "module."),
    "compiled twice": lambda state: with_prefix(state, "_orig_mod.module._orig_mod."),
    "lightning": lambda state: {"epoch": 3, "state_dict": with_prefix(state, "net.")},
    "backbone": lambda state: {"model": with_prefix(state, "model.backbone."), "lr": 0.1},
    "nested": lambda state: {"net": dict(state), "history": [{"loss": 1.0}]},
    "half": lambda state: {name: value.half() for name, value in state.items()},
    "without counts": lambda state: {name: value for name, value in state.items()
                                     if "num_batches" not in name},
}


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_state_dict_loads_in_its_usual_wrappings(kind, tmp_path):
    state = saved(tmp_path / "plain.pt")
    torch.save(WRAPPINGS[kind](state), tmp_path / "net.pt")
    backbone, head = network(weights=tmp_path / "net.pt")
    if kind == "half":
        state = {name: value.half().to(value.dtype) for name, value in state.items()}
    assert same_weights(backbone, state)
    assert torch.equal(head.weight, state["fc.weight"])
    assert torch.equal(head.bias, state["fc.bias"])
    assert head.weight.dtype == torch.float32


def test_files_with_and_without_the_auxiliary_classifiers_of_training(tmp_path):
    for aux_logits in (True, False):
        net = models.googlenet(num_classes=5, aux_logits=aux_logits, init_weights=False)
        torch.save(net.state_dict(), tmp_path / "googlenet.pt")
        backbone, _ = network("torchvision/googlenet", tmp_path / "googlenet.pt")
        assert same_weights(backbone, net.state_dict())
        assert backbone.transform_input  # with weights, the network normalises


def refusal(*args, **options):
    """The line with which a network is refused."""
    with pytest.raises(common.UserError) as refused:
        network(*args, **options)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 420 and "delete" not in message
    return message


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "net.pt"
    state = saved(path)
    state["extra.weight"] = state.pop("conv1.0.weight")
    state["loss.weight"] = torch.ones(3)
    torch.save(state, path)
    assert "1 missing (conv1.0.weight); 2 left over (extra.weight, loss.weight)" in refusal(
        weights=path)
    # One name without the prefix does not hide what it is.
    state = {f"model.{name}": value for name, value in saved(path).items()}
    torch.save({**state, "n_averaged": torch.tensor(3)}, path)
    assert ": 1 left over (n_averaged); " in refusal(weights=path)
    # Two networks in one file: neither is taken for the other.
    both = {f"{prefix}.{name}": value for prefix in ("model", "net")
            for name, value in saved(path).items()}
    torch.save(both, path)
    assert " missing (" in refusal(weights=path)
    torch.save({name: value.char() for name, value in saved(path).items()}, path)
    assert " integers (" in refusal(weights=path)
    saved(path)
    message = refusal("torchvision/resnet18", path)
    assert f"--weights {path} does not fit torchvision/resnet18: " in message


def test_files_that_are_no_state_dicts(tmp_path):
    path = tmp_path / "net.pt"
    torch.save(models.shufflenet_v2_x0_5(), path)
    message = refusal(weights=path)
    assert "ShuffleNetV2 (a whole pickled" in message and "torch.save(net.state" in message
    torch.save({"epoch": 3, "note": "hello"}, path)
    assert "'epoch' is no tensor" in refusal(weights=path)
    state = saved(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64:])
    assert "damaged" in refusal(weights=path)
    state["fc.bias"][0] = torch.nan
    torch.save(state, path)
    assert "not finite" in refusal(weights=path)


def test_a_file_of_1000_classes_gets_a_new_head(tmp_path, capsys):
    path = tmp_path / "net.pt"
    state = saved(path, num_classes=1000)
    data._print_once.cache_clear()
    heads = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        backbone, head = network(weights=path, num_classes=8)
        heads.append(head.weight)
    assert same_weights(backbone, state)
    assert heads[0].shape == (8, 1024)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert capsys.readouterr().out == f"{SMALL}: new head: 8 classes instead of 1000\n"
    # Without training, the new head would be random.
    assert "train a new head" in refusal(weights=path, num_classes=8, is_trained=False)
    network(weights=path, num_classes=1000, is_trained=False)
    assert "head is taken for class k of the data; classes in fold" in capsys.readouterr().out


def test_default_weights_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(url, path, *args, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    message = refusal("torchvision/densenet121", "DEFAULT")
    assert "download.pytorch.org" in message and "Name or service not known" in message

    def download(url, path, *args, **options):
        # As published: with the old names of the layers.
        state = models.densenet121().state_dict()
        old = {}
        for name, value in state.items():
            for layer in ("norm", "conv"):
                for number in "12":
                    name = name.replace(f".{layer}{number}.", f".{layer}.{number}.")
            old[name] = value
        torch.save(old, path)
        downloaded.append(state)

    downloaded = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    backbone, head = network("torchvision/densenet121", "DEFAULT", 7, image_size=32)
    assert len(downloaded) == 1 and head.out_features == 7
    assert same_weights(backbone, downloaded[0])


def test_the_versions_of_layers_are_kept(tmp_path):
    state = saved(tmp_path / "x.pt", "mnasnet0_5")  # its layers ask for the version of the weights
    backbone, _ = network("torchvision/mnasnet0_5", tmp_path / "x.pt")
    assert same_weights(backbone, state)
    prefixed = nn.ModuleDict({"module": models.mnasnet0_5(num_classes=5)}).state_dict()
    torch.save({"state_dict": prefixed}, tmp_path / "y.pt")
    backbone, _ = network("torchvision/mnasnet0_5", tmp_path / "y.pt")
    assert same_weights(backbone, {name[7:]: value for name, value in prefixed.items()})


# ---- Sizes --------------------------------------------------------------------------------------


def test_preparation():
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    bilinear = InterpolationMode.BILINEAR
    of = data.preparation_of
    assert of("torchvision/resnet50", "DEFAULT") == (224, 232, *imagenet, bilinear)
    assert of("torchvision/efficientnet_b3", None) == (300, 320, *imagenet,
                                                       InterpolationMode.BICUBIC)
    assert of("torchvision/efficientnet_b3", "none") == (224, 256, *imagenet, bilinear)
    assert of("torchvision/resnet18", "DEFAULT", 96) == (96, 110, *imagenet, bilinear)
    assert of("resnet18", "DEFAULT") is None


def test_grey_and_small_images_are_fitted_to_the_network():
    torch.manual_seed(1)
    plain, _ = network(shape=(3, 48, 48))
    torch.manual_seed(1)
    fitted, _ = network(shape=(1, 28, 28), image_size=48)
    grey = torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        images = F.interpolate(grey.repeat(1, 3, 1, 1), (48, 48), mode="bilinear", antialias=True)
        assert torch.equal(fitted.eval()(grey), plain.eval()(images))
        assert fitted(grey[:0]).shape == (0, 1024)  # a process may have no image of a batch
    assert "one or three channels, not 9" in refusal(shape=(9, 28, 28))


def test_images_of_a_size_that_a_network_does_not_take(tmp_path, monkeypatch, quick_weights):
    get_model = models.get_model

    def small_vit(name, num_classes, image_size=224):
        """Instead of a ViT with 88 million weights: one layer of 16 units."""
        if name != "vit_b_32":
            return get_model(name, num_classes=num_classes)
        return models.VisionTransformer(image_size, 32, 1, 1, 16, 16, num_classes=num_classes)

    monkeypatch.setattr(models, "get_model", small_vit)
    vit = "torchvision/vit_b_32"
    message = refusal(vit, shape=(3, 40, 40))
    assert "fails on images (3, 40, 40)" in message and "use --image-size 224" in message
    torch.save(small_vit("vit_b_32", 7, 64).state_dict(), tmp_path / "vit.pt")
    backbone, _ = network(vit, tmp_path / "vit.pt", shape=(3, 64, 64))
    assert backbone.image_size == 64
    message = refusal(vit, tmp_path / "vit.pt", shape=(3, 96, 96))
    assert "pos_embedding" in message and "--image-size that it was trained with" in message


# ---- The table NETWORKS -------------------------------------------------------------------------


class Classifier(nn.Module):
    """A user's network; `after` is what follows its linear layer."""

    def __init__(self, after=None, dim=8):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5),
                                      nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(dim, 4, bias=False)
        self.after = after or nn.Identity()

    def forward(self, x):
        return self.after(self.last(self.features(x)))


def parts(made, num_classes=4, shape=(3, 9, 9), **options):
    args = Namespace(model="mine", freeze=False, epochs=1, eval=False, **options)
    networks = {"mine": lambda args, shape: made()}
    return data.backbone_and_head(args, networks, num_classes, shape)


def test_a_function_of_networks_may_return_a_whole_classifier(capsys):
    whole = Classifier()
    images = torch.randn(2, 3, 9, 9)
    logits = copy.deepcopy(whole).eval()(images)
    backbone, head = parts(lambda: whole)
    assert backbone.training and torch.equal(head(backbone.eval()(images)), logits)
    assert head.bias.tolist() == [0, 0, 0, 0]
    assert parts(Classifier, num_classes=6)[1].out_features == 6
    assert "new head: 6 classes instead of 4" in capsys.readouterr().out


class HeadFirst(Classifier):
    """Its head is not the last linear layer that it names."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.before(self.features(x)).relu())


class OwnProduct(Classifier):
    """Its forward pass reads the weights of the head."""

    def forward(self, x):
        return self.features(x) @ self.last.weight.T


def test_the_head_is_the_linear_layer_that_a_classifier_ends_in():
    whole = HeadFirst()
    backbone, head = parts(lambda: whole)
    assert head.out_features == 4 and isinstance(backbone.before, nn.Linear)
    for made in (OwnProduct, lambda: nn.Linear(9, 4)):
        with pytest.raises(common.UserError, match="its last layer is not a linear layer"):
            parts(made)
    # The backbone may be any module, given with the number of its features.
    backbone, head = parts(lambda: (Classifier().features, 8))
    assert head.in_features == 8 and isinstance(backbone[0], nn.Conv2d)


def test_a_function_of_networks_may_return_layers():
    def made():
        return [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten()], 392

    torch.manual_seed(2)
    layers, dim = made()
    expected = nn.Linear(dim, 4)
    number = torch.rand(())
    torch.manual_seed(2)
    backbone, head = parts(made)
    assert torch.equal(backbone[0].weight, layers[0].weight)
    assert torch.equal(head.weight, expected.weight)
    assert torch.rand(()) == number  # the check draws no random number
    assert backbone[1].num_batches_tracked == 0 and backbone.training


@pytest.mark.parametrize("made, message", [
    (lambda: Classifier(nn.LogSoftmax(1)), "its last layer is not a linear layer"),
    (lambda: Classifier(dim=9), "fails on images"),
    (lambda: ([nn.Flatten()], 8), "make outputs [1, 243] of one image"),
    (lambda: ([nn.Linear(5, 8)], 8), "fails on images (3, 9, 9)"),
    (lambda: [nn.Flatten()], "must return a classifier, or the layers"),
])
def test_other_returns_are_told_in_one_line(made, message):
    with pytest.raises(common.UserError) as refused:
        parts(made)
    assert message in str(refused.value) and "\n" not in str(refused.value)


# ---- Frozen features ----------------------------------------------------------------------------


def image_set(name, n, **options):
    images = torch.randint(0, 256, (n, 3, 12, 12), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(n))
    return data.ImageSet(name, images, torch.arange(n) % 4, 4, (0.4, 0.5, 0.6), (0.2, 0.3, 0.2),
                         classes=("a", "b", "c", "d"), **options)


def frozen_args(weights, **options):
    return Namespace(**{"device": torch.device("cpu"), "workers": 0, "amp": "off", "freeze": True,
                        "epochs": 1, "model": SMALL, "weights": str(weights), "image_size": 16,
                        "seed": 1, **options})


def image_sets():
    train = image_set("train", 150, groups=torch.arange(150) // 2,
                      label_probs=torch.full((150, 4), 0.25))
    mine = image_set("mine", 3, files=("1.png", "2.png", "3.png"))
    return data.Sets(train, None, image_set("test", 30), {"far": image_set("far", 5)}, mine)


def frozen_in_a_process(weights):
    if "RANK" in os.environ:
        common.start("cpu")
    frozen = data.frozen_features(image_sets(), frozen_args(weights))
    return [frozen.train.images, frozen.test.images, frozen.ood["far"].images,
            torch.tensor(frozen.train.mean), data.digest(frozen.train)]


def test_frozen_features_are_those_of_a_direct_forward(tmp_path, capsys):
    saved(tmp_path / "net.pt")
    args = frozen_args(tmp_path / "net.pt")
    sets = image_sets()
    data._print_once.cache_clear()
    frozen = data.frozen_features(sets, args)
    assert "new head: 4 classes instead of 5" in capsys.readouterr().out
    backbone, _ = network(weights=args.weights, shape=(3, 12, 12), image_size=16)
    pairs = [(sets.train, frozen.train), (sets.test, frozen.test), (sets.predict, frozen.predict),
             (sets.ood["far"], frozen.ood["far"])]
    for images, features in pairs:
        batch = next(data.Loader(images, 500).epoch())
        with torch.no_grad():
            expected = backbone.eval()(batch.images)
        assert features.is_features and features.images.dtype == torch.float32
        assert torch.allclose(features.images[:, :, 0, 0], expected, atol=1e-5)
        assert (features.mean, features.std) == (frozen.train.mean, frozen.train.std)
        for field in ("name", "labels", "num_classes", "classes", "files", "groups"):
            assert getattr(features, field) is getattr(images, field), field
    # What the head sees: centred, with one scale for all features.
    batch = next(data.Loader(frozen.train, 500).epoch())
    assert batch.images.mean(0).abs().max() < 1e-3
    assert batch.images.square().sum((1, 2, 3)).mean() == pytest.approx(512, abs=0.1)
    assert len(set(frozen.train.std)) == 1
    torch.manual_seed(3)
    backbone, head = data.backbone_and_head(args, {}, 4, frozen.train.shape)
    assert torch.equal(head(backbone(batch.images)), head(batch.images[:, :, 0, 0]))
    with pytest.raises(common.UserError, match="for one epoch or more"):
        data.backbone_and_head(args, {}, 4, frozen.train.shape, 0)


def test_two_processes_have_the_features_of_one(ranks, tmp_path):
    """Checkpoints of a head are made from the images and the backbone."""
    alone = frozen_in_a_process("none")
    assert data.digest(image_sets().train) in alone[4]
    saved(tmp_path / "net.pt", seed=2)
    assert frozen_in_a_process(tmp_path / "net.pt")[4] != alone[4]
    for found in ranks(frozen_in_a_process, "none"):
        for ours, theirs in zip(alone[:4], found[:4]):
            assert torch.allclose(ours, theirs, atol=1e-5)
        assert found[4] == alone[4]  # with which either resumes the other
