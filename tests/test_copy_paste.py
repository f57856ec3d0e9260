"""Method sections, pasted under the imports that their first comments name, run on their own."""

import ast
import re
import types

import pytest
import torch
from conftest import REPO, SCRIPTS
from torch import nn
from torch.distributions import MultivariateNormal


def paste(script):
    """A module with the imports that a section names, and the section itself."""
    text = (REPO / f"{script}.py").read_text()
    section = re.search(r"^# ---- Method -+\n(.*?)^# ---- ", text, re.M | re.S)[1]
    comment = re.match(r"(#.*\n)+", section)[0].replace("\n# ", " ")
    packages = re.search(r"below the imports of (.*?)\.[ \n]", comment)[1]
    module = types.ModuleType(script)
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            name = getattr(node, "module", None) or node.names[0].name
            if re.search(rf"\b{name}\b|\b{name.split('.')[0]}\b(?!\.)", packages):
                exec(ast.unparse(node), vars(module))
    exec(compile(section, script, "exec"), vars(module))
    return module


@pytest.fixture
def method(request):
    """The pasted section of the script that the name of the test begins with."""
    [script] = [name for name in SCRIPTS if f"test_{name}" in request.node.name]
    torch.manual_seed(0)
    return paste(script)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_ddu_bounds_a_network_and_knows_what_is_far_away(method):
    net = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Flatten(), nn.Linear(72, 64))
    assert method.spectral_normalise(net, (2, 3, 3), coeff=0.3) == []
    for _ in range(100):
        net(torch.zeros(1, 2, 3, 3))
    assert torch.linalg.matrix_norm(net[2].weight, 2).item() == pytest.approx(0.3, rel=0.01)
    z = double(300, 5)
    parts = [z[c::3] for c in range(3)]
    y = torch.arange(300) % 3
    near, far = method.class_log_densities(z, y, 3, [z, 5 * z])
    expected = [MultivariateNormal(part.mean(0), part.T.cov()).log_prob(z) for part in parts]
    density = near.logsumexp(1)
    torch.testing.assert_close(density, torch.stack(expected).exp().mean(0).log())
    regions = method.decide(far.logsumexp(1), torch.zeros(300), density.quantile(0.01), 0.5)
    assert method.REGIONS[2] == "ood"
    assert (regions == 2).double().mean() > 0.9


def test_forde_repels_four_networks(method):
    x = double(20, 6)
    nets = [nn.Linear(6, 3).double() for _ in range(4)]
    g = torch.stack([method.input_gradient(net, x, torch.arange(20) % 3)[1] for net in nets])
    assert torch.equal(g[1, ::3], nets[1].weight[[0] * 7])
    s = method.unit_rows(g) @ method.pca_root(x)
    offset = g[0] / g[0].norm(dim=1)[:, None] - g[1] / g[1].norm(dim=1)[:, None]
    distance = (offset @ (x.T @ x / 19) * offset).sum(-1)  # of Mahalanobis, squared
    torch.testing.assert_close(method.pairwise_squared_distances(s)[0, 1], distance)
    loss = method.repulsion(method.log_kernel(s))
    loss.backward()
    assert 0 < loss < 4 * torch.tensor(4).log() / 20  # that of equal networks
    assert all(net.weight.grad.abs().max() > 0 for net in nets)


def test_gbnn2d_lets_the_weights_of_a_network_share_gaussians(method):
    net = nn.Sequential(nn.Linear(9, 99), nn.ReLU(), nn.Linear(99, 10))
    network = method.RandomNetwork(net, method.MeanField(net))
    loss = nn.functional.cross_entropy(network(torch.randn(50, 9)), torch.arange(50) % 10)
    (loss + 0.1 * network.posterior.kl() / 50).backward()
    mu = network.posterior.mu
    points = torch.stack([mu, network.posterior.sigma], 1).detach().double()
    found = method.cluster(points, mu.grad.abs(), 8, torch.Generator().manual_seed(0))
    label, mixture = method.merge(points, *found, mu.grad.abs())
    shared = method.SharedGaussians(method.encode(points, label, mixture))
    assert 0 < len(mixture.proportion) <= 8 and shared.kl().item() == pytest.approx(0, abs=1e-5)
    mean = sum(shared().detach() for _ in range(400)) / 400
    assert torch.corrcoef(torch.stack([mean, mu.detach()]))[0, 1] > 0.9


def test_proxy_distill_has_its_optimum_at_the_mean_prediction(method):
    ensemble = method.ensemble_statistics(double(5, 32, 10))
    b = method.proxy_precision(ensemble) + 10
    z = (ensemble.log_probs + b.log()[:, None]).requires_grad_()
    method.rkl_proxy_loss(z, ensemble).sum().backward()
    assert z.grad.abs().max() < 1e-9
    _, scores = method.student_predictions(z.detach())
    torch.testing.assert_close(scores["epistemic"] + scores["rmi"], 9 / b)


def test_swag_laplace_ensembles_has_posteriors_of_a_last_layer(method):
    last = method.LastLayer(double(40, 3), torch.arange(40) % 4)
    theta = method.flat_head(nn.Linear(3, 4).double()).detach()
    laplace = method.full_laplace(theta, last.x)._replace(precision=2.0)
    hessian = torch.autograd.functional.hessian(
        lambda vector: -last.log_likelihood(vector[None]).sum(), theta)
    root = method.laplace_samples(laplace, torch.eye(16).double()) - theta
    torch.testing.assert_close(root.T @ root, torch.linalg.inv(hessian + 2 * torch.eye(16)))
