"""tests/published.py: files in published formats, made here."""

import collections
import sys
import types
import typing
from dataclasses import replace

import pytest
import torch
from conftest import run_script
from torchvision import models

import common
import data
import gbnn2d
import published
import swag_laplace_ensembles as sl


def published_state(net, first, block, parts, last, count):
    """The state dict of one of our WRN, whose norms become random, by published names."""
    names = [first]
    for number in range(3 * count):
        where = block.format(1 + number // count, number % count)
        names += [where + part for part in parts.split()[:4 if number % count else 5]]
    kinds = (torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.Linear, sl.FRN)
    layers = [layer for layer in net.modules() if isinstance(layer, kinds)]
    state = {}
    for name, layer in zip(names + last.split(), layers, strict=True):
        if isinstance(layer, sl.FRN):
            state[f"{name}.eps"] = torch.full_like(layer.beta[None], 1e-6)
        for leaf, tensor in layer.state_dict().items():
            if tensor.ndim in (1, 3):
                tensor.add_(0.3 * torch.rand_like(tensor))
            state[f"{name}.{leaf}"] = tensor[None] if tensor.ndim == 3 else tensor
    return state


def make_wide():
    """A small WRN-28 of gbnn2d.py, with biases, and its state dict by published names."""
    args = gbnn2d.parse_args("--device cpu --model wide_resnet --width 0.0125".split())
    net = gbnn2d.make_network(args, 3, (3, 32, 32))
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.bias = torch.nn.Parameter(torch.zeros(layer.out_channels))
    parts = "bn1 conv1 bn2 conv2 convShortcut"
    return net, published_state(net, "conv1", "block{}.layer.{}.", parts, "bn1 fc", 4)


def convert(folder, images, files, *options):
    """Save {name: content} and convert these files."""
    for name, content in files.items():
        torch.save(content, folder / name)
    words = [*[folder / name for name in files], "--out-dir", folder, *options, "--device", "cpu"]
    return published.main([str(word) for word in words] + ["--dataset", f"folder:{images}"])


def nll(net, images, side, statistics):
    """The NLL of a network on the test images of a folder."""
    test = data.load(f"folder:{images}", "test", image_size=side)
    [batch] = data.Loader(replace(test, mean=statistics[0], std=statistics[1])).epoch()
    return torch.nn.functional.cross_entropy(net.eval()(batch.images), batch.labels).item()


@torch.no_grad()
def test_shared_weights_are_evaluated(tmp_path, image_folder):
    net, state = make_wide()
    label = torch.randint(2, gbnn2d.MeanField(net).mu.shape)
    outliers = torch.tensor([7, 3, 500])
    centres = torch.tensor([[0.1, 1], [-0.2, 1]])
    locs = torch.tensor([1.0, 2, 3])
    values = {3: [2e5 + 0.3, 2e5], 9: [162755.0, 162754.5], 8: [1e5 + 0.5, 1e5], 500: [9.5, 9.0]}
    guide = {"centers": centres, "outliers_posterior_loc": locs, "outliers_posterior_simga":
             torch.zeros(3), "scale_tril_posterior": torch.zeros(2, 2, 2)}
    parts = {"outliers_indices": outliers, "ellipse_outdices": list(values),
             "filtered_labels": label.index_fill(0, outliers[:1], -1).short(),
             "ellipse_outdices_value_dict": values,
             "ellipse_outdices_dict": dict.fromkeys(values, [1, 0])}
    rest = {name: tensor for name, tensor in state.items() if tensor.ndim not in (2, 4)}
    file = {"state_dict_no_weight": rest, "params_guide": guide, "params_dict_indices": parts}
    [command] = convert(tmp_path, image_folder, {"x.pth": file}, "--samples", 1, "--ood")
    w = centres[label, 0].index_copy(0, outliers, locs)
    for i, (first, second) in values.items():
        a = torch.tensor(first - second).sigmoid()
        w[i] = -0.2 * a + 0.1 * (1 - a) * (second > 162754.8)  # e^12
    loaded = gbnn2d.restore(common.load(command[2]), (3, 32, 32), gbnn2d.parse_args(command[3:]))
    torch.testing.assert_close(loaded.posterior(), w)
    for name, piece in loaded.split(w).items():
        net.get_parameter(name).copy_(piece)
    [row] = run_script("gbnn2d", *command[1:], "--out-dir", tmp_path)
    assert row["nll"] == pytest.approx(nll(net, image_folder, 32, published.CIFAR100), 1e-4)


@pytest.mark.parametrize("stage", [0, 1])
def test_networks_of_stages_0_and_1_start_ours(stage, tmp_path, image_folder):
    net, state = make_wide()
    file = {"epoch": 3, "state_dict": state, "best_prec1": 1.0}
    if stage == 1:
        file = {"epoch": 3, "net": {"x.prior_mu": torch.ones(1)}, "grad": {}}
        for name, tensor in state.items():
            if "bn" in name:
                file["net"][name] = tensor
            else:
                file["net"] |= {f"{name}_mu": tensor, f"{name}_sigma": 0.01 * tensor}
    [command] = convert(tmp_path, image_folder, {"x.pth": file}, "--samples", 1, "--ood", "--k0", 4,
                        "--limit-steps", 1, "--final-epochs", 0)
    rows = run_script("gbnn2d", *command[1:], "--stoch-epochs", 0, "--out-dir", tmp_path)
    assert rows[0]["nll"] == pytest.approx(nll(net, image_folder, 32, published.CIFAR), 1e-4)
    if stage == 1:
        rho = [0.01 * weight.flatten() for weight in state.values() if weight.ndim in (2, 4)]
        sigma = torch.log(0.0003 + torch.cat(rho).exp())
        assert (sigma < 0).any()  # a Gaussian all the same
        ours = gbnn2d.make_mean_field(net, gbnn2d.parse_args(command[1:])).posterior.sigma
        torch.testing.assert_close(ours.detach(), sigma.abs(), rtol=1e-3, atol=1e-7)
    del state["block2.layer.0.bn2.bias"]
    with pytest.raises(common.UserError, match="x.pth.*other layers than"):
        convert(tmp_path, image_folder, {"x.pth": state})


def test_members_and_students_are_evaluated(tmp_path, image_folder):
    net = models.resnet18(num_classes=3)
    net.layer1[0].bn1.bias.data.fill_(1)
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
    # gbnn2d.py has this ResNet-18 for ImageNet; its convolutions have no biases.
    torch.testing.assert_close(published.without_biases(net.state_dict()), dict(net.state_dict()))


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
    args = sl.parse_args("--device cpu --model wrn_10_4 --width 0.125".split())
    for seed in (7, 3):
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
        for kind, state_dict in (("SWAG", swag), ("LastLayerLaplace", llla),
                                 ("PosteriorRefinedLastLayerLaplace", la_nf)):
            cfg = {"model": {"backbone": {"depth": 10, "widen_factor": 4}}, "seed": seed,
                   "data": {"name": "CIFAR10"}, "inference": {
                       "init": {"_target_": f"src.{kind}"}, "fit": {"optimizer": {"lr": 0.02}}}}
            files[f"{kind}{seed}"] = {"cfg": node(cfg), "state_dict": state_dict}
    [command] = convert(tmp_path, image_folder, files, "--width", 1 / 8, "--samples", 3, "--ood")
    rows = run_script("swag_laplace_ensembles", *command[1:])
    assert [row["method"] for row in rows[:8:2]] == ["DE", "SWAG", "LLLA", "LA-NF"]
    with pytest.raises(common.UserError, match="has no SWA"):
        run_script("swag_laplace_ensembles", *command[1:], "--methods", "swa")
    with pytest.raises(common.UserError, match="SWAG3: give the MAP file of the same seed"):
        convert(tmp_path, image_folder, {"SWAG3": files["SWAG3"]})
    folder = tmp_path / "swag_laplace_ensembles" / "published-cifar10-wrn_10_4"
    member = sl.Member(net, 3, sl.name_member(net, 3))
    iterates = common.load(folder / f"{member.name}-sgd-lr0.02.pt")["iterates"]
    assert torch.equal(iterates, swag["iterates"][vector != 1e-6].T)  # without FRN's epsilons
    heads = common.load(folder / f"{member.name}-heads-3.pt")
    right = theta + sl.draw_noise((3, len(theta)), "llla", member, args) @ root.T
    torch.testing.assert_close(heads["llla"], right)
    layers = sl.Flow(theta[None] + 1, torch.ones(1), torch.full((1,), 2.0))
    torch.testing.assert_close(heads["la_nf"], sl.apply_flow(layers, right)[0])
