"""Networks of torchvision and of the user: heads, files of weights, image sizes."""

import copy
import re
from argparse import Namespace
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import refusal
from torch import nn
from torchvision import models

import common

SMALL = "torchvision/shufflenet_v2_x0_5"
# Of each family the smallest network, an image size for it, and its number of features.
FAMILIES = {
    "alexnet": (64, 4096), "convnext_tiny": (32, 768), "densenet121": (32, 1024),
    "efficientnet_b0": (32, 1280), "googlenet": (32, 1024), "inception_v3": (75, 2048),
    "maxvit_t": (224, 512), "mnasnet0_5": (32, 1280), "mobilenet_v2": (32, 1280),
    "mobilenet_v3_small": (32, 1024), "regnet_x_400mf": (32, 400), "resnet18": (32, 512),
    "shufflenet_v2_x0_5": (32, 1024), "swin_t": (32, 768), "vgg11": (32, 4096),
    "vit_b_32": (32, 768)}


def options(model=SMALL, weights="none", **others):
    return Namespace(**{"model": model, "weights": str(weights), "image_size": None, "epochs": 1,
                        "freeze": False, "eval": False, **others})


def network(model=SMALL, weights="none", num_classes=5, shape=(3, 32, 32), **others):
    return common.pretrained_network(options(model, weights, **others), num_classes, shape)


def saved(path, name="shufflenet_v2_x0_5", num_classes=5, seed=1):
    """The state dict of a network of torchvision with random weights; it is saved in `path`."""
    torch.manual_seed(seed)
    state = models.get_model(name, num_classes=num_classes).state_dict()
    torch.save(state, path)
    return state


def same_weights(net, state):
    """Whether a backbone and a state dict agree, but for the head."""
    weights = net.state_dict()
    assert len(weights) > 10
    return all(torch.equal(value, state[name]) for name, value in weights.items())


def test_the_table_of_families_is_complete():
    names = models.list_models(module=models, exclude="squeezenet*")
    modules = {models.get_model_builder(name).__module__ for name in names}
    assert modules == {models.get_model_builder(name).__module__ for name in FAMILIES}


@pytest.fixture
def quick_weights(monkeypatch):
    """Initial weights that repeat 9973 random numbers: VGG's take seconds."""
    numbers = 0.03 * torch.randn(9973)

    def fill(tensor, *args, **kwargs):
        with torch.no_grad():
            repeated = numbers.repeat(tensor.numel() // 9973 + 1)[:tensor.numel()]
            return tensor.copy_(repeated.view_as(tensor))

    for name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_"):
        monkeypatch.setattr(nn.init, name, fill)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_makes_features_and_trains(name, quick_weights, tmp_path):
    size, dim = FAMILIES[name]
    arguments = {"image_size": size} if name.startswith("vit") else {}
    if name in ("googlenet", "inception_v3"):
        arguments = {"init_weights": False}
    # Without memory, but for RegNet, whose constructor computes with tensors.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        state = models.get_model(name, num_classes=7, **arguments).state_dict()
    # Of each tensor one number is saved, because the files of all families have 3 GB.
    for key, value in state.items():
        number = torch.rand(()) / 10 + 0.01
        state[key] = number.to(value.dtype).expand(value.shape)
    torch.save(state, tmp_path / "net.pt")
    backbone, head = network(f"torchvision/{name}", tmp_path / "net.pt", shape=(3, size, size))
    assert same_weights(backbone, state)
    assert type(head) is nn.Linear and head.weight.shape == (5, dim) and head.bias is not None
    # In training mode, auxiliary classifiers would return more than features.
    images = torch.randn(2, 3, size, size)
    features = backbone.train()(images)
    assert features.shape == (2, dim)
    F.cross_entropy(head(features), torch.tensor([0, 3])).backward()
    first, *_ = backbone.parameters()
    assert head.weight.grad.isfinite().all() and first.grad.isfinite().all()
    assert all(p.grad is not None for p in backbone.parameters())


@pytest.mark.parametrize("name", ["densenet121", "mobilenet_v3_small", "vit_b_32"])
def test_the_head_makes_the_logits_of_torchvisions_network(name, quick_weights, monkeypatch):
    built = []
    get_model = models.get_model

    def recorded(*args, **kwargs):
        built.append(get_model(*args, **kwargs))
        return copy.deepcopy(built[0])

    monkeypatch.setattr(models, "get_model", recorded)
    backbone, head = network(f"torchvision/{name}")
    images = torch.randn(2, 3, 32, 32)
    assert backbone.training
    with torch.no_grad():
        assert torch.equal(head(backbone.eval()(images)), built[0].eval()(images))


@pytest.mark.parametrize("name", ["squeezenet1_0", "fcn_resnet50", "quantized_resnet18",
                                  "nonsense"])
def test_other_networks_are_refused_with_what_to_use(name):
    message = refusal(network, f"torchvision/{name}")
    assert "ends in a linear layer; use resnet18" in message


# ---- Files of weights ---------------------------------------------------------------------------


def with_prefix(state, prefix):
    return OrderedDict((prefix + name, value) for name, value in state.items())


WRAPPINGS = {
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


def refused(*args, **others):
    """The line with which a network is refused."""
    message = refusal(network, *args, **others)
    assert len(message) < 420 and "delete" not in message
    return message


def joined(backbone, head):
    """What every script trains."""
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


def trained(name, num_classes=5, seed=3, shape=(3, 32, 32)):
    torch.manual_seed(seed)
    return joined(*network(f"torchvision/{name}", num_classes=num_classes, shape=shape))


def checkpoint(path, net):
    """A file such as the scripts save after each epoch."""
    history = [{"epoch": 1, "loss": 0.5}]
    torch.save({"net": net.state_dict(), "optimiser": {"state": {}}, "history": history}, path)
    return path


def same_state(net, other):
    pairs = zip(net.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v3_small"])
def test_a_checkpoint_of_any_script_loads(name, tmp_path, capsys):
    """Whatever the names of torchvision's heads are; grey images add no names."""
    model = f"torchvision/{name}"
    net = trained(name, shape=(1, 28, 28))
    assert {key.split(".")[0] for key in net.state_dict()} == {"backbone", "head"}
    path = checkpoint(tmp_path / "net.pt", net)
    assert same_state(joined(*network(model, path)), net)
    assert same_state(joined(*network(model, path, epochs=0)), net)
    other = joined(*network(model, path, num_classes=8))
    assert same_state(other.backbone, net.backbone) and other.head.out_features == 8


def test_of_the_networks_of_an_ensemble_the_first_one_loads(tmp_path, capsys):
    path = tmp_path / "net.pt"
    nets = [trained("shufflenet_v2_x0_5", seed=seed) for seed in (1, 2, 3)]
    for kind in (nn.ModuleList, lambda nets: nn.ModuleDict({"members": nn.ModuleList(nets)})):
        common.print_once.cache_clear()
        capsys.readouterr()
        checkpoint(path, kind(nets))
        assert same_state(joined(*network(SMALL, path)), nets[0])
        assert capsys.readouterr().out == f"{path} holds 3 networks; the first one is used\n"
        checkpoint(path, kind(nets[1:2]))
        assert same_state(joined(*network(SMALL, path)), nets[1])
        assert capsys.readouterr().out == ""


def test_a_head_alone_and_other_networks_are_refused(tmp_path):
    path = tmp_path / "net.pt"
    net = trained("shufflenet_v2_x0_5")
    for frozen in (joined(nn.Flatten(), net.head),
                   nn.ModuleList([joined(nn.Flatten(), net.head)] * 2)):
        assert "holds a head alone" in refused(weights=checkpoint(path, frozen))
    ours = joined(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()), nn.Linear(7200, 5))
    assert "2 left over: conv1.0.weight" in refused(weights=checkpoint(path, ours))


def test_eval_needs_the_file_of_a_frozen_backbone_alone(tmp_path):
    absent = tmp_path / "absent.pt"
    network(weights=absent, eval=True)  # a checkpoint has all weights
    assert "absent.pt cannot be read" in refused(weights=absent, eval=True, freeze=True)
    assert "absent.pt cannot be read" in refused(weights=absent, eval=True, epochs=0)
    backbone, head = common.backbone_and_head(options(weights=absent, eval=True, epochs=0), {}, 5,
                                              (3, 32, 32), epochs=1)
    assert head.out_features == 5


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "net.pt"
    state = saved(path)
    state["extra.weight"] = state.pop("conv1.0.weight")
    state["loss.weight"] = torch.ones(3)
    torch.save(state, path)
    assert f"--weights {path} does not fit {SMALL} (1 missing, 2 left over: conv1.0.weight); " in (
        refused(weights=path))
    # One name without the prefix does not hide what it is.
    state = {f"model.{name}": value for name, value in saved(path).items()}
    torch.save({**state, "n_averaged": torch.tensor(3)}, path)
    assert "(0 missing, 1 left over: n_averaged)" in refused(weights=path)
    # Two networks in one file: neither is taken for the other.
    both = {f"{prefix}.{name}": value for prefix in ("model", "net")
            for name, value in saved(path).items()}
    torch.save(both, path)
    assert f"{len(state)} left over: net.conv1.0.weight" in refused(weights=path)
    torch.save({name: value.char() for name, value in saved(path).items()}, path)
    assert "conv1.0.weight holds integers (quantised?)" in refused(weights=path)


def test_files_that_are_no_state_dicts(tmp_path):
    path = tmp_path / "net.pt"
    torch.save(models.shufflenet_v2_x0_5(), path)
    message = refused(weights=path)
    assert "ShuffleNetV2 (a whole pickled" in message and "torch.save(net.state" in message
    torch.save({"epoch": 3, "note": "hello"}, path)
    assert "'epoch' is no tensor" in refused(weights=path)
    state = saved(path)
    state["fc.bias"][0] = torch.nan
    torch.save(state, path)
    assert "not finite" in refused(weights=path)


def test_a_file_of_1000_classes_gets_a_new_head(tmp_path, capsys):
    path = tmp_path / "net.pt"
    state = saved(path, num_classes=1000)
    common.print_once.cache_clear()
    backbone, head = network(weights=path, num_classes=8)
    assert same_weights(backbone, state) and head.weight.shape == (8, 1024)
    assert capsys.readouterr().out == f"{SMALL}: new head: 8 classes instead of 1000\n"
    # Without training, the new head would be random.
    assert "train a new head" in refused(weights=path, num_classes=8, epochs=0)
    network(weights=path, num_classes=1000, epochs=0)
    assert "head is taken for class k of the data; classes in fold" in capsys.readouterr().out


def test_default_weights_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(url, path, *args, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    message = refused("torchvision/densenet121", "DEFAULT")
    assert "download.pytorch.org" in message and "Name or service not known" in message

    def download(url, path, *args, **options):
        state = models.densenet121().state_dict()
        downloaded.append(state)
        # As published: with the old names of the layers, such as norm.1 for norm1.
        torch.save({re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", name): value
                    for name, value in state.items()}, path)

    downloaded = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    backbone, head = network("torchvision/densenet121", "DEFAULT", 7, image_size=32)
    assert len(downloaded) == 1 and head.out_features == 7
    assert same_weights(backbone, downloaded[0])


# ---- Sizes --------------------------------------------------------------------------------------


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
    assert "one or three channels, not 9" in refused(shape=(9, 28, 28))
    # It is a hook: names stay, and copies and compiled networks have it, too.
    assert fitted.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        expected = fitted(grey)
        assert torch.equal(copy.deepcopy(fitted)(grey), expected)
    layer = nn.Flatten()
    layer.register_forward_pre_hook(partial(common._fit_images, 48))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(grey), images.flatten(1))


def test_images_of_a_size_that_a_network_does_not_take(tmp_path, monkeypatch):
    def small_vit(name, num_classes, image_size=224):
        """Instead of a ViT with 88 million weights: one layer of 16 units."""
        return models.VisionTransformer(image_size, 32, 1, 1, 16, 16, num_classes=num_classes)

    monkeypatch.setattr(models, "get_model", small_vit)
    vit = "torchvision/vit_b_32"
    message = refused(vit, shape=(3, 40, 40))
    assert "fails on images (3, 40, 40)" in message and "--image-size, such as 224" in message
    torch.save(small_vit("vit_b_32", 7, 64).state_dict(), tmp_path / "vit.pt")
    backbone, _ = network(vit, tmp_path / "vit.pt", shape=(3, 64, 64))
    assert backbone.image_size == 64
    message = refused(vit, tmp_path / "vit.pt", shape=(3, 96, 96))
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


def parts(made, num_classes=4, shape=(3, 9, 9), **others):
    networks = {"mine": lambda args, shape: made()}
    return common.backbone_and_head(options("mine", **others), networks, num_classes, shape)


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
        assert "its last layer is not a linear layer" in refusal(parts, made)
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
    (lambda: ([nn.Flatten()], 8), "cannot be multiplied (1x243 and 8x4)"),
    (lambda: ([nn.Conv2d(3, 9, 1)], 9), "[B, K] of features [B, D]"),
    (lambda: [nn.Flatten()], "must return a classifier, or the layers"),
])
def test_other_returns_are_told_in_one_line(made, message):
    assert message in refusal(parts, made)
