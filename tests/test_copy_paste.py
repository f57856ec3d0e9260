"""Method sections, pasted under the imports that their first comments name, run on their own."""

import ast
import builtins
import re
import symtable
import types

import pytest
import torch
from conftest import REPO, SCRIPTS
from torch import nn


def paste(script):
    """A module with the imports that a section names, and the section itself."""
    torch.manual_seed(0)
    text = (REPO / f"{script}.py").read_text()
    module = types.ModuleType(script)
    module.section = re.search(r"^# ---- Method -+\n(.*?)^# ---- ", text, re.M | re.S)[1]
    comment = re.match(r"(#.*\n)+", module.section)[0].replace("\n# ", " ")
    packages = re.search(r"below the imports of (.*?)\.[ \n]", comment)[1]
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            name = getattr(node, "module", None) or node.names[0].name
            if re.search(rf"\b{name}\b|\b{name.split('.')[0]}\b(?!\.)", packages):
                exec(ast.unparse(node), vars(module))
    exec(compile(module.section, script, "exec"), vars(module))
    return module


def global_names(table):
    """The global names in a block of code and in the functions and classes of it."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    for child in table.get_children():
        names |= global_names(child)
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_section_uses_only_its_own_names_and_those_of_the_imports(script):
    method = paste(script)
    names = global_names(symtable.symtable(method.section, script, "exec"))
    assert names <= vars(method).keys() | vars(builtins).keys()


def test_ddu_bounds_a_network_and_knows_what_is_far_away():
    method = paste("ddu")
    net = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Flatten(), nn.Linear(72, 64))
    assert method.spectral_normalise(net, (2, 3, 3), coeff=0.3) == []
    for _ in range(100):
        net(torch.zeros(1, 2, 3, 3))
    assert torch.linalg.matrix_norm(net[2].weight, 2).item() == pytest.approx(0.3, rel=0.01)
    z = torch.randn(300, 5).double()
    near, far = method.class_log_joints(z, torch.arange(300) % 3, 3, [z, 5 * z])
    threshold = near.logsumexp(1).quantile(0.01)
    regions = method.decide(far.logsumexp(1), torch.zeros(300), threshold, 0.5)
    assert method.REGIONS[2] == "ood"
    assert (regions == 2).double().mean() > 0.9


def test_forde_repels_four_networks():
    method = paste("forde")
    x = torch.randn(20, 6).double()
    nets = [nn.Linear(6, 3).double() for _ in range(4)]
    g = torch.stack([method.input_gradient(net, x, torch.arange(20) % 3)[1] for net in nets])
    assert torch.equal(g[1, ::3], nets[1].weight[[0] * 7])
    s = method.unit_rows(g) @ method.pca_root(x)
    loss = method.repulsion(method.log_kernel(s))
    loss.backward()
    assert 0 < loss < 4 * torch.tensor(4).log() / 20  # that of equal networks
    assert all(net.weight.grad.abs().max() > 0 for net in nets)


def test_gbnn2d_lets_the_weights_of_a_network_share_gaussians():
    method = paste("gbnn2d")
    net = nn.Sequential(nn.Linear(9, 99), nn.ReLU(), nn.Linear(99, 10))
    network = method.RandomNetwork(net, method.MeanField(net))
    loss = nn.functional.cross_entropy(network(torch.randn(50, 9)), torch.arange(50) % 10)
    (loss + 0.1 * network.posterior.kl() / 50).backward()
    mu = network.posterior.mu
    points = network.posterior.points()
    clustered = method.cluster(points, mu.grad.abs(), 8, torch.Generator().manual_seed(0))
    label, mixture = method.merge(points, *clustered, mu.grad.abs())
    shared = method.SharedGaussians(method.encode(points, label, mixture))
    assert 0 < len(mixture.proportion) <= 8
    assert shared.kl().item() == pytest.approx(0, abs=1e-5)
    mean = sum(shared().detach() for _ in range(400)) / 400
    assert torch.corrcoef(torch.stack([mean, mu.detach()]))[0, 1] > 0.9
