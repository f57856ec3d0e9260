"""tests/published.py: files in published formats, made here and by the authors' own classes."""

import collections
import subprocess
import sys
import types
import typing
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, Child, run_script
from torch import nn
from torchvision import models

import common
import data
import gbnn2d
import published
import swag_laplace_ensembles as sl

ARGS = Namespace(weights="none", device=torch.device("cpu"), dataset="clusters", dropout=0.0,
                 model="wide_resnet", width=1 / 80, samples=2)
WIDE = ("conv1", "block{}.layer.{}.", "bn1 conv1 bn2 conv2 convShortcut", "bn1 fc", 4)
LOCAL = ("backbone.conv_1", "backbone.block_{}.layer.{}.",
         "norm_1 conv_1 norm_2 conv_2 conv_shortcut", "backbone.norm_1 head.fc", 1)


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
        is_frn = isinstance(layer, sl.FRN)
        if is_frn:
            state[f"{name}.eps"] = torch.full_like(layer.beta[None], 1e-6)
        for leaf, tensor in layer.state_dict().items():
            if tensor.ndim in (1, 3):
                tensor.add_(0.3 * torch.rand_like(tensor))
            elif tensor.ndim == 4:
                tensor.mul_(3)
            state[f"{name}.{leaf}"] = tensor[None] if is_frn else tensor
    return state


def near(found, right):
    """Within 1e-5 of the largest magnitude."""
    right = torch.as_tensor(right)
    return found.shape == right.shape and (found - right).abs().max() < 1e-5 * right.abs().max()


def convert(out_dir, images, paths, *options):
    words = [*paths, "--out-dir", out_dir, "--dataset", f"folder:{images}", "--device", "cpu"]
    return published.main([str(word) for word in (*words, *options)])


def nll(net, images, side, statistics):
    """The NLL of a network on the test images of a folder."""
    test = data.load(f"folder:{images}", "test", image_size=side)
    test = replace(test, mean=statistics[0], std=statistics[1])
    [batch] = data.Loader(test, device="cpu", workers=0).epoch()
    return F.cross_entropy(net.eval()(batch.images), batch.labels).item()


@torch.no_grad()
def test_shared_weights_are_evaluated(tmp_path, image_folder):
    net = gbnn2d.make_network(ARGS, 3, (3, 32, 32))
    state = published_state(net, *WIDE)
    label = torch.randint(2, (sum(map(torch.Size.numel, gbnn2d.weight_shapes(net).values())),))
    outliers = torch.tensor([7, 3, 500])
    values = {3: [2e5 + 0.3, 2e5], 9: [162755.0, 162754.5], 8: [1e5 + 0.5, 1e5], 500: [9.5, 9.0]}
    centres = torch.tensor([[0.1, 1], [-0.2, 1]])
    parts = {"outliers_indices": outliers, "ellipse_outdices": list(values),
             "filtered_labels": label.index_fill(0, outliers[:1], -1).short(),
             "ellipse_outdices_value_dict": values,
             "ellipse_outdices_dict": dict.fromkeys(values, [1, 0])}
    guide = {"centers": centres, "scale_tril_posterior": torch.zeros(2, 2, 2),
             "outliers_posterior_loc": torch.tensor([1.0, 2, 3]),
             "outliers_posterior_simga": torch.zeros(3)}  # sic, in files of one script
    rest = {name: tensor for name, tensor in state.items() if tensor.ndim not in (2, 4)}
    torch.save({"state_dict_no_weight": rest, "params_guide": guide, "params_dict_indices": parts},
               tmp_path / "2DGBNNs.pth")
    [command] = convert(tmp_path, image_folder, [tmp_path / "2DGBNNs.pth"], "--mc", 1, "--ood")
    w = centres[label, 0].index_copy(0, outliers, guide["outliers_posterior_loc"])
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
    net = gbnn2d.make_network(ARGS, 3, (3, 32, 32))
    for layer in net.modules():
        if stage == 1 and isinstance(layer, nn.Conv2d):
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
    file = {"epoch": 3, "state_dict": published_state(net, *WIDE), "best_prec1": 1.0}
    if stage == 1:
        file = {"epoch": 3, "net": {}, "grad": {}}
        for name, tensor in published_state(net, *WIDE).items():
            file["net"] |= {name: tensor} if "bn" in name else {
                f"{name}_mu": tensor, f"{name}_sigma": 0.01 * tensor, "x.prior_mu": tensor}
    torch.save(file, tmp_path / "x.pth")
    [command] = convert(tmp_path, image_folder, [tmp_path / "x.pth"], "--mc", 1, "--ood", "--k0", 4,
                        "--limit-steps", 1, "--final-epochs", 0)
    rows = run_script("gbnn2d", *command[1:], "--stoch-epochs", 0, "--out-dir", tmp_path)
    # FAULT: gbnn2d.py does not read mean and std in a file of --weights
    assert rows[0]["nll"] == pytest.approx(nll(net, image_folder, 32, published.CIFAR), 1e-4)
    if stage == 1:
        rho = [0.01 * weight.flatten() for weight in net.state_dict().values() if weight.ndim > 1]
        sigma = torch.log(0.0003 + torch.cat(rho).exp())
        assert (sigma < 0).any()  # a Gaussian all the same
        net = gbnn2d.make_network(ARGS, 3, (3, 32, 32))
        ours = gbnn2d.make_mean_field(net, Namespace(**vars(ARGS) | {"weights": command[2]}))
        np.testing.assert_allclose(ours.posterior.sigma.detach(), sigma.abs(), 1e-3, 1e-7)


def test_members_and_students_are_evaluated(tmp_path, image_folder):
    net = models.resnet18(num_classes=3)
    state = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, options in (("a", {}), ("b", {}), ("s", {"loss_type": "proxy"})):
        torch.save({"pytorch-lightning_version": "1.5.3", "state_dict": state,
                    "lr_schedulers": [collections.Counter([3])], "hyper_parameters": options},
                   tmp_path / f"{name}.ckpt")
    commands = convert(tmp_path, image_folder, [tmp_path / f"{name}.ckpt" for name in "sab"],
                       "--image-size", 72, "--workers", 0)
    right = nll(net, image_folder, 72, data.IMAGENET)
    for command, count in zip(commands, (1, 4), strict=True):  # members, ensemble, proxy
        rows = run_script("proxy_distill", *command[1:], "--out-dir", tmp_path, "--name", count)
        assert [row["nll"] for row in rows] == pytest.approx([right] * count, rel=1e-4)


def save_local(path, kind, state, seed=1):
    """A file of the study, whose configuration has objects as OmegaConf's."""
    class_of_nodes = type("AnyNode", (), {"__module__": "omegaconf.nodes"})

    def node(value):
        made = class_of_nodes()
        made._metadata = collections.defaultdict(dict, kind=typing.Any)
        made._val = value
        if isinstance(value, dict):
            made._content = {key: node(item) for key, item in value.items()}
            made._val = made  # a cycle, as by _parent
        return made

    cfg = {"model": {"backbone": {"depth": 10, "widen_factor": 4}}, "data": {"name": "CIFAR10"},
           "inference": {"init": {"_target_": f"src.inference.{kind}"},
                         "fit": {"optimizer": {"lr": 0.02}}}, "seed": seed}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("omegaconf", "omegaconf.nodes"):
            module = types.SimpleNamespace(AnyNode=class_of_nodes)
            patch.setitem(sys.modules, name, module)
        torch.save({"cfg": node(cfg), "state_dict": state}, path)
    return path


def test_a_study_is_evaluated(tmp_path, image_folder):
    paths = []
    for seed in (7, 3):
        args = Namespace(**vars(ARGS) | {"model": "wrn_10_4", "width": 1 / 8})
        net = sl.make_network(args, 3, (3, 32, 32))
        state = published_state(net, *LOCAL)
        swag = {f"model.{name}": tensor for name, tensor in state.items()}
        vector = torch.cat([tensor.flatten() for tensor in state.values()])
        swag["iterates"] = vector[:, None] + 0.01 * torch.randn(len(vector), 3)
        theta = sl.flat_head(net.head).detach()
        root = torch.randn(len(theta), len(theta)).tril() / 30 + torch.eye(len(theta))
        llla = {"model": state, "mean": theta, "covariance": root @ root.T}
        flow = {"transform.0.x0": theta + 1, "transform.0.alpha_prime": torch.ones(1),
                "transform.0.beta_prime": torch.full((1,), 2.0)}
        la_nf = {"llla_inference": llla, "guide_state_dict": flow, "num_transforms": 1}
        for kind, file in (("SWA", swag), ("SWAG", swag), ("LastLayerLaplace", llla),
                           ("PosteriorRefinedLastLayerLaplace", la_nf)):
            paths.append(save_local(tmp_path / f"{kind}{seed}.pt", kind, file, seed))
    [command] = convert(tmp_path, image_folder, paths, "--width", 1 / 8, "--samples", 2, "--ood")
    rows = run_script("swag_laplace_ensembles", *command[1:])
    assert [row["method"] for row in rows[::2]][:5] == ["DE", "SWA", "SWAG", "LLLA", "LA-NF"]
    folder = tmp_path / "swag_laplace_ensembles" / "published-cifar10-wrn_10_4"
    member = sl.Member(net, 3, sl.name_member(net, 3))
    kept = torch.cat([torch.full((tensor.numel(),), not name.endswith("eps"))
                      for name, tensor in state.items()])
    iterates = common.load(folder / f"{member.name}-sgd-lr0.02.pt")["iterates"]
    assert torch.equal(iterates, swag["iterates"][kept].T)
    heads = common.load(folder / f"{member.name}-heads-2.pt")
    right = theta + sl.draw_noise((2, len(theta)), "llla", member, ARGS) @ root.T
    assert near(heads["llla"], right)
    a, b = F.softplus(torch.tensor(1.0)), F.softplus(torch.tensor(2.0))
    offset = right - theta - 1
    assert near(heads["la_nf"], right + (b - a) * offset / (a + offset.norm(dim=1)[:, None]))


@pytest.mark.parametrize("change, said", [
    (lambda file: file["state_dict"]["fc.bias"].fill_(np.inf), "a value is not finite"),
    (lambda file: file["state_dict"].pop("block2.layer.0.bn2.bias"), "other layers than"),
    (lambda file: file["state_dict"].pop("block1.layer.0.bn2.weight"), "is no published file"),
    (lambda file: file.update({"state_dict": torch.ones(3)}), "is damaged or of another kind"),
    (lambda file: file.update(cfg=sys.exit), "cannot be read"), (None, "a checksum is wrong")])
def test_other_files_are_refused_in_one_line(change, said, tmp_path):
    path = tmp_path / "x.pth"
    file = {"state_dict": published_state(gbnn2d.make_network(ARGS, 3, (3, 32, 32)), *WIDE)}
    if change:
        change(file)
    torch.save(file, path)
    if change is None:
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(content[:half] + bytes(64) + content[half + 64:])
    child = Child(tmp_path, launch, str(path), "--out-dir", str(tmp_path), "--device", "cpu")
    assert child.wait() == 2
    [line] = child.err.read_text().splitlines()
    assert "published.py: error: " in line and str(path) in line and said in line


def launch(*argv):
    sys.argv = ["published.py", *argv]
    common.launch(published.main)


@pytest.fixture(scope="session")
def genuine(tmp_path_factory):
    """A folder of fixtures, where the tool, the authors' code and what it imports are here."""
    tool = REPO.parent / "shared" / "tools" / "published_fixtures.py"
    code = [REPO.parent / ".mirror" / name / "repo" for name in (
        "gfhvbjk+Anonymous", "jonasvj+OnLocalPosteriorStructureInDeepEnsembles")]
    if not (all(path.exists() for path in [tool, *code]) and find_spec("pyro")):
        pytest.skip("no files of the authors' classes")
    folder = tmp_path_factory.mktemp("genuine")
    subprocess.run([sys.executable, tool, "--gbnn", code[0], "--local", code[1], "--out", folder,
                    "--all"], check=True)
    return folder


@torch.no_grad()
def test_genuine_files_of_gbnn2d(genuine, tmp_path, monkeypatch):
    blocks = gbnn2d.groups_of_blocks
    monkeypatch.setattr(gbnn2d, "groups_of_blocks", lambda block, c_in, widths, depth: blocks(
        block, c_in, widths, 1 if block is gbnn2d.wide_block else depth))  # WRN-10
    monkeypatch.setattr(data, "load", lambda *_: Namespace(classes=()))
    for path in sorted(genuine.glob("gbnn/*/*.pth")):
        arrays = np.load(f"{path}.npz")
        x, right = torch.tensor(arrays["images"]), arrays["mean_logits" if "mean_logits" in arrays else "logits"]
        [command] = published.main([str(path), "--out-dir", str(tmp_path), "--device", "cpu"])
        args = gbnn2d.parse_args(command[1:])
        if args.load is None:
            assert near(gbnn2d.make_network(args, 100, x.shape[1:]).eval()(x), right)
            continue
        net = gbnn2d.restore(common.load(args.load), x.shape[1:], args).eval()
        weights = net.posterior.weights()
        m = weights.centre + torch.einsum("kpq,kq->kp", weights.factor, torch.tensor(arrays["noise_locs"]))
        outliers = published.read(path)["params_dict_indices"]["outliers_indices"]
        eps = torch.zeros(len(weights.label)).index_copy(0, outliers, torch.tensor(arrays["noise_outliers"]))
        w = gbnn2d.expand_to_weights(weights, m[:, 0], torch.zeros(len(m)), eps)
        if "weights" in arrays:
            assert near(w, arrays["weights"])
        else:
            assert near(w[arrays["places"]], arrays["weights_at_places"])
        assert near(torch.func.functional_call(net.net, net.split(w), (x,)), right)


@torch.no_grad()
def test_genuine_files_of_the_study(genuine, monkeypatch):
    clusters = data.load_molecules("clusters", "train")
    for path in sorted(genuine.glob("local/**/*.pt")):
        arrays = {name: torch.tensor(array) for name, array in np.load(f"{path}.npz").items() if array.dtype.kind in "fi"}
        studies = {}
        published.collect(path, published.read(path), studies)
        [((_, model), study)] = studies.items()
        [(name, (_, _, state))] = study[1].items()
        args = Namespace(**vars(ARGS) | {"model": model, "width": 1, "samples": 3})
        like = {"painn": clusters, "bert_256_4": Namespace(num_classes=2, shape=(30522,))}.get(model, Namespace(num_classes=10, shape=(3, 32, 32)))
        net = sl.make_member(args, like).eval()
        common.load_state(net, published.convert_network(published.network_of(study[1])[1], net), path)
        if model == "painn":
            distance = torch.cdist(arrays["positions"].double(), arrays["positions"].double())
            is_edge = (distance < 5) & (arrays["molecule"][:, None] == arrays["molecule"])
            edges = is_edge.fill_diagonal_(False).nonzero().T
            x = data.Molecules(arrays["numbers"], arrays["positions"], arrays["molecule"], *edges, 16)
        else:
            x = arrays.get("images", arrays.get("tokens"))
        outputs, features = net(x)
        for key in {"logits", "mean_logits", "map_logits", "outputs"} & arrays.keys():
            if arrays[key].ndim == 2:
                assert near(outputs.float(), arrays[key])
        if "features" in arrays:
            assert near(features, arrays["features"])
        if name == "swag":
            moments = sl.swag_moments(published.convert_iterates(state, net))
            published_moments = [published.convert_iterates(state | {"iterates": v[:, None]}, net)[0] for v in (arrays["sample"], arrays["noise_diagonal"])]
            sample = sl.swag_samples(*moments, published_moments[1][None], arrays["noise_low_rank"][None])
            assert (sample[0] - published_moments[0]).abs().max() < 1e-3 * published_moments[0].abs().max()
        if name in ("llla", "la_nf"):
            monkeypatch.setattr(sl, "draw_noise", lambda *_: arrays["noise"])
            heads = published.convert_heads(name, state, sl.Member(net, 1, ""), args)
            assert near(heads, arrays["theta"])
            assert near(sl.head_outputs(heads, arrays["features"]), arrays["logits"])
