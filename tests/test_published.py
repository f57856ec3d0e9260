"""tests/published.py: files in published formats, made here."""

import collections
import sys
import types
import typing
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import run_script
from torch import nn
from torchvision import models

import common
import data
import gbnn2d
import published
import swag_laplace_ensembles as sl

ARGS = dict(weights="none", device=torch.device("cpu"), dataset="clusters", dropout=0.0, samples=3)


def published_state(net, first, block, parts, last, count):
    """The state dict of one of our WRN, which becomes random, by published names."""
    names = [first]
    for number in range(3 * count):
        where = block.format(1 + number // count, number % count)
        names += [where + part for part in parts.split()[:4 if number % count else 5]]
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, sl.FRN)
    layers = [layer for layer in net.modules() if isinstance(layer, kinds)]
    state = {}
    for name, layer in zip(names + last.split(), layers, strict=True):
        if isinstance(layer, sl.FRN):
            state[f"{name}.eps"] = torch.full_like(layer.beta[None], 1e-6)
        for leaf, tensor in layer.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand_like(tensor) if tensor.ndim in (1, 3) else tensor)
            state[f"{name}.{leaf}"] = tensor[None] if tensor.ndim == 3 else tensor
    return state


def make_wide(has_biases=False):
    """A small WRN-28 of gbnn2d.py, and its state dict by published names."""
    net = gbnn2d.make_network(Namespace(**ARGS, model="wide_resnet", width=1 / 80), 3, (3, 32, 32))
    for layer in net.modules():
        if has_biases and isinstance(layer, nn.Conv2d):
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
    parts = "bn1 conv1 bn2 conv2 convShortcut"
    return net, published_state(net, "conv1", "block{}.layer.{}.", parts, "bn1 fc", 4)


def near(found, right):
    """Within 1e-5 of the largest magnitude."""
    right = torch.as_tensor(right)
    return found.shape == right.shape and (found - right).abs().max() < 1e-5 * right.abs().max()


def convert(folder, images, files, *options):
    """Save {name: content} and convert these files."""
    for name, content in files.items():
        torch.save(content, folder / name)
    words = [*[folder / name for name in files], "--out-dir", folder, *options, "--device", "cpu"]
    return published.main([str(word) for word in words] + ["--dataset", f"folder:{images}"])


def nll(net, images, side, statistics):
    """The NLL of a network on the test images of a folder."""
    test = data.load(f"folder:{images}", "test", image_size=side)
    test = replace(test, mean=statistics[0], std=statistics[1])
    [batch] = data.Loader(test, device="cpu", workers=0).epoch()
    return F.cross_entropy(net.eval()(batch.images), batch.labels).item()


@torch.no_grad()
def test_shared_weights_are_evaluated(tmp_path, image_folder):
    net, state = make_wide()
    label = torch.randint(2, (sum(map(torch.Size.numel, gbnn2d.weight_shapes(net).values())),))
    outliers = torch.tensor([7, 3, 500])
    centres, locs = torch.tensor([[0.1, 1], [-0.2, 1]]), torch.tensor([1.0, 2, 3])
    values = {3: [2e5 + 0.3, 2e5], 9: [162755.0, 162754.5], 8: [1e5 + 0.5, 1e5], 500: [9.5, 9.0]}
    guide = {"centers": centres, "outliers_posterior_loc": locs, "outliers_posterior_simga":
             torch.zeros(3), "scale_tril_posterior": torch.zeros(2, 2, 2)}
    parts = {"outliers_indices": outliers, "ellipse_outdices": list(values),
             "filtered_labels": label.index_fill(0, outliers[:1], -1).short(),
             "ellipse_outdices_value_dict": values,
             "ellipse_outdices_dict": dict.fromkeys(values, [1, 0])}
    rest = {name: tensor for name, tensor in state.items() if tensor.ndim not in (2, 4)}
    file = {"state_dict_no_weight": rest, "params_guide": guide, "params_dict_indices": parts}
    [command] = convert(tmp_path, image_folder, {"x.pth": file}, "--mc", 1, "--ood")
    w = centres[label, 0].index_copy(0, outliers, locs)
    for i, (first, second) in values.items():
        a = 1 / (1 + np.exp(second - first))
        w[i] = -0.2 * a + 0.1 * (1 - a) * (second > np.exp(12))
    loaded = gbnn2d.restore(common.load(command[2]), (3, 32, 32), gbnn2d.parse_args(command[3:]))
    assert near(loaded.posterior(), w)
    for name, piece in loaded.split(w).items():
        net.get_parameter(name).copy_(piece)
    [row] = run_script("gbnn2d", *command[1:], "--out-dir", tmp_path)
    assert row["nll"] == pytest.approx(nll(net, image_folder, 32, published.CIFAR100), 1e-4)


@pytest.mark.parametrize("stage", [0, 1])
def test_networks_of_stages_0_and_1_start_ours(stage, tmp_path, image_folder):
    net, state = make_wide(has_biases=stage == 1)
    file = {"epoch": 3, "state_dict": state, "best_prec1": 1.0}
    if stage == 1:
        file = {"epoch": 3, "net": {}, "grad": {}}
        for name, tensor in state.items():
            file["net"] |= {name: tensor} if "bn" in name else {
                f"{name}_mu": tensor, f"{name}_sigma": 0.01 * tensor, "x.prior_mu": tensor}
    [command] = convert(tmp_path, image_folder, {"x.pth": file}, "--mc", 1, "--ood", "--k0", 4,
                        "--limit-steps", 1, "--final-epochs", 0)
    rows = run_script("gbnn2d", *command[1:], "--stoch-epochs", 0, "--out-dir", tmp_path)
    assert rows[0]["nll"] == pytest.approx(nll(net, image_folder, 32, published.CIFAR), 1e-4)
    if stage == 1:
        rho = [0.01 * weight.flatten() for weight in state.values() if weight.ndim in (2, 4)]
        sigma = torch.log(0.0003 + torch.cat(rho).exp())
        assert (sigma < 0).any()  # a Gaussian all the same
        ours = gbnn2d.make_mean_field(make_wide()[0], Namespace(weights=command[2]))
        np.testing.assert_allclose(ours.posterior.sigma.detach(), sigma.abs(), 1e-3, 1e-7)


def test_members_and_students_are_evaluated(tmp_path, image_folder):
    net = models.resnet18(num_classes=3)
    net.layer1[0].bn1.bias.data.fill_(1)
    unchanged = published.without_biases(net.state_dict())  # ResNet-18 of gbnn2d.py for ImageNet
    torch.testing.assert_close(unchanged, dict(net.state_dict()))
    state = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    files = {}
    for name, options in (("s", {"loss_type": "proxy"}), ("a", {}), ("b", {})):
        files[name] = {"pytorch-lightning_version": "1.5.3", "state_dict": state,
                       "lr_schedulers": [collections.Counter([3])], "hyper_parameters": options}
    commands = convert(tmp_path, image_folder, files, "--image-size", 72, "--workers", 0)
    right = nll(net, image_folder, 72, data.IMAGENET)
    for command, count in zip(commands, (1, 4), strict=True):  # members, ensemble, proxy
        rows = run_script("proxy_distill", *command[1:], "--out-dir", tmp_path, "--name", count)
        assert [row["nll"] for row in rows] == pytest.approx([right] * count, rel=1e-4)


def node(value):
    """A value in a configuration, made of objects as OmegaConf's."""
    made = sys.modules["omegaconf.nodes"].AnyNode()
    made._metadata = collections.defaultdict(dict, kind=typing.Any)
    made._val = value
    if isinstance(value, dict):
        made._content = {key: node(item) for key, item in value.items()}
        made._val = made  # a cycle, as by _parent
    return made


def test_a_study_is_evaluated(tmp_path, image_folder, monkeypatch):
    class_of_nodes = type("AnyNode", (), {"__module__": "omegaconf.nodes"})
    for name in ("omegaconf", "omegaconf.nodes"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(AnyNode=class_of_nodes))
    files = {}
    for seed in (7, 3):
        args = Namespace(**ARGS, model="wrn_10_4", width=1 / 8)
        net = sl.make_network(args, 3, (3, 32, 32))
        state = published_state(net, "backbone.conv_1", "backbone.block_{}.layer.{}.",
                                "norm_1 conv_1 norm_2 conv_2 conv_shortcut",
                                "backbone.norm_1 head.fc", 1)
        swag = {f"model.{name}": tensor for name, tensor in state.items()}
        vector = torch.cat([tensor.flatten() for tensor in state.values()])
        swag["iterates"] = vector[:, None] + 0.01 * torch.randn(len(vector), 3)
        theta = sl.flat_head(net.head).detach()
        root = torch.randn(len(theta), len(theta)).tril() / 30 + torch.eye(len(theta))
        llla = {"model": state, "mean": theta, "covariance": root @ root.T}
        flow = {"transform.0.x0": theta + 1, "transform.0.alpha_prime": torch.ones(1),
                "transform.0.beta_prime": torch.full((1,), 2.0)}
        la_nf = {"llla_inference": llla, "guide_state_dict": flow, "num_transforms": 1}
        for kind, state_dict in (("SWA", swag), ("SWAG", swag), ("LastLayerLaplace", llla),
                                 ("PosteriorRefinedLastLayerLaplace", la_nf)):
            cfg = {"model": {"backbone": {"depth": 10, "widen_factor": 4}}, "seed": seed,
                   "data": {"name": "CIFAR10"}, "inference": {
                       "init": {"_target_": f"src.{kind}"}, "fit": {"optimizer": {"lr": 0.02}}}}
            files[f"{kind}{seed}"] = {"cfg": node(cfg), "state_dict": state_dict}
    [command] = convert(tmp_path, image_folder, files, "--width", 1 / 8, "--samples", 3, "--ood")
    rows = run_script("swag_laplace_ensembles", *command[1:])
    methods = [row["method"] for row in rows[:10:2]]  # with two members each
    assert methods == ["DE", "SWA", "SWAG", "LLLA", "LA-NF"]
    folder = tmp_path / "swag_laplace_ensembles" / "published-cifar10-wrn_10_4"
    member = sl.Member(net, 3, sl.name_member(net, 3))
    kept = torch.cat([torch.full((tensor.numel(),), not name.endswith("eps"))
                      for name, tensor in state.items()])
    iterates = common.load(folder / f"{member.name}-sgd-lr0.02.pt")["iterates"]
    assert torch.equal(iterates, swag["iterates"][kept].T)
    heads = common.load(folder / f"{member.name}-heads-3.pt")
    right = theta + sl.draw_noise((3, len(theta)), "llla", member, args) @ root.T
    assert near(heads["llla"], right)
    layers = sl.Flow(theta[None] + 1, torch.ones(1), torch.full((1,), 2.0))
    assert near(heads["la_nf"], sl.apply_flow(layers, right)[0])


def test_a_study_needs_the_networks_that_its_posteriors_surround(tmp_path):
    states = {"swag": (tmp_path / "swag.ckpt", 0.02, {"model.head.fc.weight": torch.ones(1)})}
    with pytest.raises(common.UserError, match="swag.ckpt: give the MAP file of the same seed"):
        published.network_of(states)


def test_a_posterior_that_was_not_published_is_one_line(tmp_path):
    run = types.SimpleNamespace(dir=tmp_path, cached=lambda name, compute: {"swag": 0.02})
    assert sl.read_posterior("a-sgd", None, "swag", run) == 0.02
    with pytest.raises(common.UserError, match="a-sgd.pt has no SWA$"):
        sl.read_posterior("a-sgd", None, "swa", run)


@pytest.mark.parametrize("change, said", [
    (lambda state: state["fc.bias"].fill_(np.inf), "a value is not finite"),
    (lambda state: state.pop("block2.layer.0.bn2.bias"), "other layers than"),
    (lambda state: state.pop("block1.layer.0.bn2.weight"), "is no published file"),
    (lambda state: state.update({"fc.bias": 3}), "is damaged or of another kind"),
    (lambda state: state.update(x=sys.exit), "cannot be read"), (len, "a checksum is wrong")])
def test_other_files_are_refused_in_one_line(change, said, tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.pth"
    _, state = make_wide()
    change(state)
    torch.save({"state_dict": state}, path)
    if change is len:
        content = path.read_bytes()
        path.write_bytes(content[:20000] + bytes(64) + content[20064:])
    argv = f"published.py {path} --out-dir {tmp_path} --device cpu --width 0.0125".split()
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="2"):
        common.launch(published.main)
    [line] = capsys.readouterr().err.splitlines()
    assert str(path) in line and said in line and not (tmp_path / "published").exists()
