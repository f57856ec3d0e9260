"""swag_laplace_ensembles.py's Model, Method and what its Training section computes, against
laplace-torch, autograd, textbook forms and loops. T1 ... T36 are the traps of the specification."""

import csv
import dataclasses
import io
import itertools
import json
import math
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal
from torchmetrics.functional.classification import multiclass_calibration_error

import common
import data
import swag_laplace_ensembles as sl
from common import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

WORLD = common.World()
STRUCTURES = ["full", "kron", "diag"]
KINDS = {"images": "glyphs", "texts": "reviews", "molecules": "clusters"}


def draws_of(order):
    """How often each entry's member came before: which of its samples is used."""
    return (order[:, None] == order).tril(-1).sum(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(a, b, rtol=1e-10, atol=1e-12):
    a, b = (t.detach() if torch.is_tensor(t) else t for t in (a, b))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def unit(p):
    return torch.eye(p).double()


def options(dataset="glyphs", *more):
    return sl.parse_args(["--dataset", dataset, "--quiet", *map(str, more)])


# ---- SWAG ---------------------------------------------------------------------------------------


def iterates(r=10, p=6):
    return torch.randn(p).double() + torch.randn(r, p).double() @ torch.randn(p, p).double()


def swag_covariance(rows, floor=1e-8):
    """From numpy's moments: diag(d) / 2 + (unbiased covariance) / 2."""
    return np.diag(np.var(rows, 0).clip(floor)) / 2 + np.cov(rows.T, ddof=1) / 2


@pytest.mark.parametrize("r", [2, 3, 10])
def test_swag_moments_are_numpys_and_deviations_sum_to_zero(r):  # T2, T4
    rows = iterates(r).numpy()
    mean, variance, deviations = sl.swag_moments(torch.from_numpy(rows.copy()))
    close(mean, rows.mean(0))
    close(variance, rows.var(0))
    close(deviations, rows - rows.mean(0))
    assert deviations.shape == rows.shape and deviations.sum(0).abs().max() < 1e-12


def test_swag_mean_of_float32_rows_does_not_drift():
    rows = 1e4 + torch.randn(500, 3)
    right = rows.double()
    mean, variance, _ = sl.swag_moments(rows)
    close(mean, right.mean(0), rtol=6e-8)
    close(variance, right.var(0, correction=0), rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("r, p", [(2, 5), (10, 4), (7, 7)])
def test_swag_covariance_by_its_linear_map(r, p, scale):  # T1, T5
    """Unit vectors as noise give the rows of the factor: M of z_1 and R of z_2, apart."""
    rows = iterates(r, p)
    moments = sl.swag_moments(rows.clone())
    eye, zero = torch.eye(p + r).double(), torch.zeros(1, p + r).double()
    noise = torch.cat([eye, zero])
    samples = sl.swag_samples(*moments, noise[:, :p].clone(), noise[:, p:].clone(), scale)
    factor = samples[:-1] - samples[-1]
    close(samples[-1], rows.mean(0))
    close(factor.T @ factor, scale * swag_covariance(rows.numpy()), atol=1e-11)
    close(factor[:p].T @ factor[:p], scale * torch.diag(moments[1]) / 2)


def test_swag_samples_are_linear_and_leave_the_moments_alone():
    moments = sl.swag_moments(iterates(4, 3))
    before = [m.clone() for m in moments]
    z1, z2 = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    found = sl.swag_samples(*moments, z1, z2)
    mean, variance, deviations = before
    for row, a, b in zip(found, z1, z2):
        right = mean + (variance.sqrt() * a + deviations.T @ b / math.sqrt(3)) / math.sqrt(2)
        close(row, right)
    for m, b in zip(moments, before):
        assert torch.equal(m, b)


def test_swag_covariance_by_monte_carlo():  # T1
    rows, n = iterates(10, 4), 100_000
    samples = sl.swag_samples(*sl.swag_moments(rows.clone()), torch.randn(n, 4).double(),
                              torch.randn(n, 10).double())
    right = swag_covariance(rows.numpy())
    error = np.sqrt((right**2 + np.outer(right.diagonal(), right.diagonal())) / n)
    off = np.abs(np.cov(samples.T.numpy()) - right) / error
    assert off.max() < 4, off
    wrong = [np.diag(np.var(rows.numpy(), 0)) / 2 + np.cov(rows.T.numpy(), ddof=0) / 2, 2 * right]
    for other in wrong:  # 1 / R; no 1 / sqrt 2
        assert (np.abs(np.cov(samples.T.numpy()) - other) / error).max() > 10


def test_swag_floor_is_on_the_variance():  # T3
    rows = torch.ones(5, 3).double()
    rows[:, 1] += 1e-6 * torch.arange(5)
    rows[:, 2] += torch.arange(5)
    mean, variance, deviations = sl.swag_moments(rows)
    close(variance, [1e-8, 1e-8, 2.0])
    z = torch.tensor([[1.0, 0.0, 0.0]]).double()
    moved = sl.swag_samples(mean, variance, deviations, z, torch.zeros(1, 5).double()) - mean
    assert moved[0, 0].item() == pytest.approx(7.0711e-5, rel=1e-4)
    assert sl.swag_moments(torch.ones(3, 1).double(), floor=0.25)[1].item() == 0.25


def test_swag_of_one_iterate_is_refused():  # T4
    with pytest.raises(UserError, match="at least 2"):
        sl.swag_moments(torch.zeros(1, 3))
    with pytest.raises(UserError, match="two iterates"):
        options("glyphs", "--swag-epochs", 1)


class Plain(nn.Module):
    """Linear in its pixels."""

    def __init__(self, pixels=4, k=3):
        super().__init__()
        self.head = nn.Linear(pixels, k)

    def features(self, x):
        return x.flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


def image_set(n=24, classes=3, side=2, name="glyphs"):
    images = torch.randint(256, (n, 1, side, side), dtype=torch.uint8)
    return data.ImageSet(name, images, torch.arange(n) % classes, classes, (0.5,), (0.25,))


def member(sets=None, *more, seed=1, dataset="glyphs"):
    train = image_set()
    sets = sets or {"train": train, "val": train, "ood": [], "evaluated": {"test": train}}
    return sl.Member(seed, sets, options(dataset, *more), WORLD)


def test_swag_draws_are_independent_and_a_prefix_of_more(monkeypatch):  # T5
    own, net = member(), Plain()
    parameters, noises, made = sl.sampled_parameters(net), [], sl.swag_samples
    rows = torch.randn(6, 15)

    def noted(mean, variance, deviations, z1, z2, scale):
        noises.append((z1.clone(), z2.clone()))
        return made(mean, variance, deviations, z1, z2, scale)

    monkeypatch.setattr(sl, "swag_samples", noted)
    posterior = (net, parameters, *sl.swag_moments(rows.clone()))
    many = own.predict_swag(posterior, own.sets["val"], 20)
    assert len(noises) == 3 and many.shape == (20, 24, 3)
    z1, z2 = (torch.cat(parts) for parts in zip(*noises))
    flat = [z1.flatten(), z2.flatten(), z1[:, :6].flatten(), z1[0], z1[8]]
    assert not torch.equal(flat[1], flat[2]) and not torch.equal(flat[3], flat[4])
    for a, b in noises:  # not one stream of numbers cut in two ways
        assert not torch.equal(a.flatten()[:b.numel()], b.flatten())
    both = np.corrcoef(flat[1].numpy(), flat[2].numpy())[0, 1]
    assert abs(both) < 4 / math.sqrt(len(flat[1]))
    assert torch.equal(own.predict_swag(posterior, own.sets["val"], 5), many[:5])
    mean = own.predict_swag(posterior, own.sets["val"], 0)  # SWA
    sl.set_vector(parameters, rows.mean(0))
    close(mean[0], sl.predict_net(net, own.sets["val"], own.args, WORLD)[0], rtol=1e-5)
    other = member(seed=2).predict_swag(posterior, own.sets["val"], 5)
    assert (other - many[:5]).abs().max() > 1e-3


def test_published_vector_has_the_epsilons():
    net = sl.WideResNet(10, 3, 10, 2, "frn")
    own, published = (sl.sampled_parameters(net, flag) for flag in (False, True))
    names = {n for n, p in net.named_parameters() if not any(p is q for q in own)}
    assert names and all(n.endswith(".eps") for n in names)
    assert len(published) - len(own) == len(names) == 2 * 3 + 1
    vector = sl.get_vector(published)
    assert (vector == 1e-6).sum() == sum(dict(net.named_parameters())[n].numel() for n in names)


def test_vectors_round_trip_in_channels_last():
    net = sl.WideResNet(4, 3, 10, 1, "frn").to(memory_format=torch.channels_last)
    parameters = sl.sampled_parameters(net)
    assert any(not p.is_contiguous() for p in parameters)
    names = [n for n, p in net.named_parameters() if p.requires_grad]
    vector = torch.arange(sum(p.numel() for p in parameters)).float()
    sl.set_vector(parameters, vector)
    assert torch.equal(sl.get_vector(parameters), vector)
    at = 0
    for name, p in zip(names, parameters):  # each tensor in its logical order
        assert torch.equal(p.detach().contiguous().view(-1), vector[at:at + p.numel()]), name
        at += p.numel()


# ---- Last layer: data ---------------------------------------------------------------------------


def classes_problem(n=40, d=5, c=4, spread=0.7):
    """(raw inputs, LastLayer of tanh(raw), theta, network tanh then linear), float64."""
    net = nn.Sequential(nn.Tanh(), nn.Linear(d, c)).double()
    with torch.no_grad():
        net[1].weight.normal_(std=spread)
        net[1].bias.normal_(std=spread)
    raw = 1.5 * torch.randn(n, d).double()
    labels = Categorical(logits=net(raw).detach()).sample()
    return raw, sl.LastLayer(raw.tanh(), labels), sl.flat_head(net[1]).detach(), net


def logits_at(theta, x, c):
    """Layout of the specification: W row by row, then b."""
    d = x.shape[1]
    return x @ theta[:c * d].view(c, d).T + theta[c * d:]


def jacobians(theta, x, c):
    """[N, C, P]"""
    return torch.func.jacrev(logits_at)(theta, x, c)


def brute_ggn(theta, x, c):
    j, p = jacobians(theta, x, c), logits_at(theta, x, c).softmax(-1)
    return sum(a.T @ (torch.diag(q) - torch.outer(q, q)) @ a for a, q in zip(j, p))


def basis(spectrum):
    """Q [P, P], from the parts."""
    if not spectrum.bases:
        return torch.eye(len(spectrum.values)).double()
    if len(spectrum.bases) == 1:
        return spectrum.bases[0]
    q_b, q_a = spectrum.bases
    return torch.block_diag(torch.kron(q_b, q_a), q_b)


def dense(spectrum):
    q = basis(spectrum)
    return q @ torch.diag(spectrum.values) @ q.T


def molecules_problem(n=12, d=4, largest=6, gap=0.3):
    """(LastLayer of molecules, theta, atoms of each), float64."""
    sizes = torch.randint(1, largest, (n,))
    molecule = torch.arange(n).repeat_interleave(sizes)
    x = torch.randn(len(molecule), d).double()
    last = sl.LastLayer(x, None, molecule, torch.randn(n).double(), torch.tensor(1.7).double())
    theta = 0.5 * torch.randn(2 * (d + 1)).double()
    mean, variance = atoms_loop(theta, last)
    labels = mean + gap * variance.sqrt() * torch.randn(n).double()
    return last._replace(labels=labels), theta, sizes


def atoms_loop(theta, last):
    """(mean, variance) [N], a molecule at a time."""
    d = last.x.shape[1]
    w, u, b, c = theta[:d], theta[d:2 * d], theta[-2], theta[-1]
    means, variances = [], []
    for k in range(len(last.offset)):
        rows = last.x[last.molecule == k]
        means.append(last.offset[k] + last.scale * sum(row @ w + b for row in rows))
        variances.append(last.scale**2 * sum((F.softplus(row @ u + c) + 1e-8)**2 for row in rows))
    return torch.stack(means), torch.stack(variances)


def nll_loop(theta, last):
    mean, variance = atoms_loop(theta, last)
    return 0.5 * (variance.log() + (last.labels - mean)**2 / variance).sum()


@pytest.mark.parametrize("s", [1, 3])
def test_outputs_of_heads_are_those_of_each(s):
    raw, last, _, net = classes_problem()
    thetas = torch.randn(s, 24).double()
    found = sl.head_outputs(thetas, last)
    assert found.shape == (s, 40, 4)
    for theta, own in zip(thetas, found):
        close(own, logits_at(theta, last.x, 4).log_softmax(-1))
    own = sl.head_outputs(sl.flat_head(net[1])[None], last)[0]
    close(own, net(raw).log_softmax(-1))  # T8
    last, _, _ = molecules_problem()
    thetas = torch.randn(s, 10).double()
    found = sl.head_outputs(thetas, last)
    assert found.shape == (s, 12, 2)
    for theta, own in zip(thetas, found):
        close(own, torch.stack(atoms_loop(theta, last), -1))


def test_log_density_of_classes_and_of_gaussians():
    outputs = torch.randn(3, 5, 4).double().log_softmax(-1)
    labels = torch.randint(4, (5,))
    close(sl.log_density(outputs, labels), [[row[k, y] for k, y in enumerate(labels)]
                                            for row in outputs.numpy()])
    outputs = torch.stack([torch.randn(3, 5), torch.rand(3, 5) + 0.1], -1).double()
    labels = torch.randn(5).double()
    close(sl.log_density(outputs, labels),
          Normal(outputs[..., 0], outputs[..., 1].sqrt()).log_prob(labels))


# ---- Last layer: curvature ----------------------------------------------------------------------


@pytest.mark.parametrize("c", [2, 4])
def test_ggn_is_the_sum_over_examples(c):  # T6, T7, T8, T10
    _, last, theta, _ = classes_problem(c=c)
    probs = sl.head_outputs(theta[None], last)[0].exp()
    right, found = brute_ggn(theta, last.x, c), sl.ggn_full(last.x, probs)
    close(found, right, atol=1e-11)
    close(found, found.T)
    twice = sl.ggn_full(torch.cat([last.x] * 2), torch.cat([probs] * 2))
    close(twice, 2 * right, atol=1e-11)
    close(sl.ggn_full(last.x, probs, block=7), right, atol=1e-11)
    close(sl.ggn_diagonal(last.x, probs), right.diagonal())
    b, a = sl.ggn_factors(last.x, probs)
    close(b, sum(torch.diag(p) - torch.outer(p, p) for p in probs), atol=1e-12)
    close(a, sum(torch.outer(x, x) for x in last.x) / 40)


def test_ggn_ignores_what_the_softmax_ignores():  # T7
    _, last, theta, _ = classes_problem()
    h = sl.ggn_full(last.x, sl.head_outputs(theta[None], last)[0].exp())
    shift = torch.cat([torch.zeros(20), torch.ones(4)]).double()
    assert (h @ shift).abs().max() < 1e-12
    for k in range(5):  # all classes' weight of one feature
        shift = torch.cat([torch.eye(5)[k].repeat(4), torch.zeros(4)]).double()
        assert (h @ shift).abs().max() < 1e-12
    alone = torch.cat([torch.zeros(20), torch.eye(4)[0]]).double()
    assert (h @ alone).abs().max() > 0.1


def fitted(structure, net, raw, labels, delta=1.0, backend=BackPackGGN):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(raw, labels), 16)
    more = {} if backend is None else {"backend": backend}
    la = Laplace(net, "classification", subset_of_weights="last_layer",
                 hessian_structure=structure, prior_precision=delta, **more)
    la.fit(loader)
    return la


def peer_covariance(la, structure):
    if structure == "full":
        return la.posterior_covariance
    if structure == "diag":
        return torch.diag(la.posterior_variance)
    return la.posterior_precision.to_matrix(exponent=-1)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_laplace_torch_has_the_same_posterior_and_evidence(structure):  # T6
    raw, last, theta, net = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    la = fitted(structure, net, raw, last.labels)
    log_lik = sl.log_density(sl.head_outputs(theta[None], last), last.labels).sum()
    close(log_lik, la.log_likelihood)
    own = {"full": lambda: la.H, "diag": lambda: torch.diag(la.H),
           "kron": lambda: la.H_facs.to_matrix()}[structure]()
    close(dense(spectrum), own, atol=1e-10)
    for delta in (1e-3, 0.5, 1.0, 40.0):
        right = la.log_marginal_likelihood(prior_precision=torch.tensor(delta, dtype=torch.float64))
        close(sl.log_marginal_likelihood(log_lik, theta, spectrum, delta), right)
        precision = dense(spectrum) + delta * unit(24)
        close(torch.linalg.inv(precision), peer_covariance(la, structure), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure, rtol", [("full", 1e-5), ("kron", 1e-9), ("diag", 1e-9)])
def test_laplace_torchs_default_backend_agrees(structure, rtol):  # Q14
    raw, last, theta, net = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    la = fitted(structure, net, raw, last.labels, 2.0, None)
    log_lik = sl.log_density(sl.head_outputs(theta[None], last), last.labels).sum()
    close(sl.log_marginal_likelihood(log_lik, theta, spectrum, 2.0), la.log_marginal_likelihood(),
          rtol=rtol)


def test_evidence_by_its_formula():  # T6
    _, last, theta, _ = classes_problem()
    h = brute_ggn(theta, last.x, 4)
    log_lik = sum(logits_at(theta, last.x, 4).log_softmax(-1)[range(40), last.labels])
    spectrum = sl.decompose("full", last, theta)
    deltas = torch.tensor([1e-2, 1.0, 30.0]).double()
    found = sl.log_marginal_likelihood(log_lik, theta, spectrum, deltas)
    for delta, own in zip(deltas, found):
        det = torch.linalg.slogdet(h + delta * unit(24)).logabsdet
        right = log_lik - (det - 24 * math.log(delta) + delta * theta @ theta) / 2
        close(own, right)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_marginal_precision_maximises_the_evidence(structure):
    _, last, theta, net = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    log_lik = sl.log_density(sl.head_outputs(theta[None], last), last.labels).sum()
    h = dense(spectrum)

    def objective(log_delta):
        delta = math.exp(log_delta)
        det = torch.linalg.slogdet(h + delta * unit(24)).logabsdet
        return (det - 24 * log_delta + delta * theta @ theta).item() / 2

    right = minimize_scalar(objective, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9})
    assert sl.marginal_precision(log_lik, theta, spectrum) == pytest.approx(math.exp(right.x),
                                                                            rel=1e-4)


def test_grids_are_the_published_ones():  # T11
    assert len(sl.LAPLACE_GRID) == 21 and sl.LAPLACE_GRID[10] == pytest.approx(1.0, rel=1e-14)
    close(sl.LAPLACE_GRID, 10 ** np.linspace(-4, 4, 21))
    close(np.diff(np.log10(sl.LAPLACE_GRID)), 0.4)
    assert list(sl.FLOW_GRID) == [1, 5, 10, 20, 30, 40, 50, 70, 90, 100, 125, 150, 175, 200, 500]
    assert len(sl.SWAG_LRS) == 21 and len(sl.MOLECULE_LRS) == 30
    close(sl.SWAG_LRS, [.1, .05, .04, .03, .02, .01, .009, .008, .007, .006, .005, .004, .003, .002,
                        .001, 9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 1e-4])
    close(sl.MOLECULE_LRS, [1e-6, *(k * 1e-7 for k in (5, 4, 3, 2, 1)),
                            *(k * 10.0**-e for e in (8, 9) for k in range(9, 0, -1)),
                            *(k * 1e-10 for k in (9, 8, 7, 6, 5)), 1e-10], atol=0)
    assert sl.SUBSAMPLES == (5, 10, 15, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200)


def root_of(theta, spectrum, delta):
    """The linear map from noise to samples, [P, P]."""
    p = len(theta)
    return (sl.laplace_samples(theta, spectrum, delta, unit(p)) - theta).T


@pytest.mark.parametrize("delta", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_laplace_samples_have_the_inverse_precision(structure, delta):  # T9, T10
    _, last, theta, _ = classes_problem()
    h = brute_ggn(theta, last.x, 4)
    if structure == "diag":
        h = torch.diag(h.diagonal())
    if structure == "kron":
        b, a = sl.ggn_factors(last.x, sl.head_outputs(theta[None], last)[0].exp())
        h = torch.block_diag(torch.kron(b, a), b)
    spectrum = sl.decompose(structure, last, theta)
    root = root_of(theta, spectrum, delta)
    right = torch.linalg.inv(h + delta * unit(24))
    close(root @ root.T, right, rtol=1e-8, atol=1e-10)
    zero = sl.laplace_samples(theta, spectrum, delta, torch.zeros(2, 24).double())
    assert torch.equal(zero, theta.expand(2, -1))
    if structure == "diag":  # not the diagonal of the full inverse
        full = torch.linalg.inv(brute_ggn(theta, last.x, 4) + delta * unit(24)).diagonal()
        if delta < 100:
            assert (root.square().sum(1) / full - 1).abs().max() > 0.05


@pytest.mark.parametrize("structure", STRUCTURES)
def test_rotate_multiplies_by_the_basis(structure):
    _, last, theta, _ = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    v = torch.randn(3, 24).double()
    close(sl.rotate(spectrum, v), v @ basis(spectrum).T)


def test_precision_scores_are_of_mean_probabilities():  # T12
    _, last, theta, _ = classes_problem()
    spectrum = sl.decompose("full", last, theta)
    noise = torch.randn(8, 24).double()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    gaps = []
    for delta, score in zip(sl.LAPLACE_GRID, scores, strict=True):
        samples = theta + noise @ root_of(theta, spectrum, delta).T
        p = torch.stack([logits_at(t, last.x, 4).softmax(-1)[range(40), last.labels]
                         for t in samples])
        close(score, p.mean(0).log().mean(), rtol=1e-9)
        gaps.append(score - p.log().mean().item())
    assert min(gaps) > 0 and max(gaps) > 0.05


def test_every_precision_has_a_posterior_in_float32():
    """The Gauss-Newton matrix is positive semi-definite: rounding below 0 is no reason to drop a
    precision of the grid, nor to lose the evidence."""
    x, theta = torch.randn(2000, 64).relu(), 0.3 * torch.randn(650)
    labels = torch.randint(10, (2000,))
    last = sl.LastLayer(x, labels)
    spectrum = sl.decompose("full", last, theta)
    scores = sl.precision_scores(theta, spectrum, last, torch.randn(4, 650))
    assert all(map(math.isfinite, scores)), scores
    lowest = sl.log_marginal_likelihood(torch.tensor(0.0), theta, spectrum, 1e-4)
    assert lowest.isfinite()


# ---- Last layer: predictives --------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_covariance_of_logits_is_that_of_jacobians(structure):  # T8
    _, last, theta, _ = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    j = jacobians(theta, last.x, 4)
    for delta in (0.1, 5.0):
        sigma = torch.linalg.inv(dense(spectrum) + delta * unit(24))
        found = sl.functional_covariance(spectrum, delta, last.x)
        assert found.shape == (40, 4, 4)
        close(found, j @ sigma @ j.mT, rtol=1e-8, atol=1e-10)
    if structure == "full":  # T8: biases between the weights is another variance
        order = torch.arange(24).view(6, 4).T.flatten()
        other = j @ sigma[order][:, order] @ j.mT
        assert (other - found).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["probit", "bridge"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_closed_predictives_are_laplace_torchs(structure, kind):
    raw, last, theta, net = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    for delta in (0.3, 3.0):
        right = fitted(structure, net, raw, last.labels, delta)(raw, pred_type="glm",
                                                                link_approx=kind)
        covariance = sl.functional_covariance(spectrum, delta, last.x)
        found = sl.predict_closed(kind, logits_at(theta, last.x, 4), covariance)
        assert found.shape == (1, 40, 4)
        close(found[0].exp(), right, rtol=1e-7)
        close(found[0].exp().sum(-1), torch.ones(40))


@pytest.mark.parametrize("kind", ["probit", "bridge"])
def test_closed_predictives_of_extreme_logits_are_finite(kind):
    logits = torch.tensor([[800.0, -800.0, 0.0], [60.0, 0.0, -60.0]])
    covariance = torch.eye(3).expand(2, 3, 3) * torch.tensor([1.0, 1e-3])[:, None, None]
    found = sl.predict_closed(kind, logits, covariance)
    assert not found.isnan().any() and torch.equal(found[0].argmax(-1), torch.tensor([0, 0]))


def test_sampled_logits_have_the_covariance():
    _, last, theta, _ = classes_problem()
    covariance = sl.functional_covariance(sl.decompose("full", last, theta), 1.0, last.x)
    noise = torch.cat([torch.eye(4), torch.zeros(1, 4)]).double()
    logits = logits_at(theta, last.x, 4)
    found = sl.predict_closed("glm_mc", logits, covariance, noise[:, None].expand(5, 40, 4))
    close(found[-1], logits.log_softmax(-1))
    # what a softmax shows: differences of logits
    steps = (found[:-1] - found[-1]).permute(1, 2, 0)
    steps = steps[:, 1:] - steps[:, :1]
    m = torch.cat([-torch.ones(3, 1), torch.eye(3)], 1).double()
    close(steps @ steps.mT, m @ covariance @ m.T, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("delta", [sl.LAPLACE_GRID[0], 1.0])
def test_sampled_logits_of_a_small_precision(delta):
    """The variance that the softmax does not see, |x~|^2 / delta, must not leak into the rest."""
    _, last, theta, _ = classes_problem(n=400)
    x = last.x[:10]
    covariance = sl.functional_covariance(sl.decompose("full", last, theta), delta, x)
    noise = torch.cat([torch.eye(4), torch.zeros(1, 4)]).double()[:, None].expand(5, 10, 4)
    found = sl.predict_closed("glm_mc", logits_at(theta, x, 4), covariance, noise)
    steps = (found[:-1] - found[-1]).permute(1, 2, 0)
    steps = steps[:, 1:] - steps[:, :1]
    m = torch.cat([-torch.ones(3, 1), torch.eye(3)], 1).double()
    close(steps @ steps.mT, m @ covariance @ m.T, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sampling_weights_or_logits_is_one_predictive(structure):  # T35
    _, last, theta, _ = classes_problem()
    spectrum, x = sl.decompose(structure, last, theta), last._replace(x=last.x[:6])
    covariance = sl.functional_covariance(spectrum, 1.0, x.x)
    logits = logits_at(theta, x.x, 4)
    for n, limit in ((100, 0.03), (100_000, 0.003)):
        weights = sl.laplace_samples(theta, spectrum, 1.0, torch.randn(n, 24).double())
        nn_mc = sl.head_outputs(weights, x).exp().mean(0)
        glm_mc = sl.predict_closed("glm_mc", logits, covariance,
                                   torch.randn(n, 6, 4).double()).exp().mean(0)
        assert (nn_mc - glm_mc).abs().mean() < limit
        assert (nn_mc - glm_mc).abs().max() < 3 * limit
    assert (nn_mc - glm_mc).abs().max() < 0.003


def test_rows_in_blocks_are_the_whole(monkeypatch):
    raw, last, theta, net = classes_problem()
    weights = theta + 0.3 * torch.randn(3, 24).double()
    right = sl.head_outputs(weights, last)
    for numbers in (1, 3 * 100 * 7, 2**24):
        found = sl.in_rows(lambda part: sl.head_outputs(weights, part), last, 3, numbers)
        close(found, right)


@pytest.mark.parametrize("kind", ["glm_mc", "probit", "bridge"])
def test_a_members_closed_predictive_in_blocks(kind, monkeypatch):
    _, last, theta, net = classes_problem(c=3)
    last, theta, net = last._replace(x=last.x.float()), theta.float(), net.float()
    own = member(None, "--predictive", kind)
    own.made |= {"map": SimpleNamespace(head=net[1]),
                 "llla": (theta, sl.decompose("full", last, theta), 2.0)}
    whole = own.predict_closed(last, 6)
    rows = sl.in_rows
    monkeypatch.setattr(sl, "in_rows", lambda f, part, samples: rows(f, part, samples, 1700))
    blocks = own.predict_closed(last, 6)
    assert whole.shape == (6 if kind == "glm_mc" else 1, 40, 3)
    close(blocks, whole, rtol=1e-4, atol=1e-5)
    if kind == "glm_mc":
        assert (whole[0] - whole[1]).abs().min() > 0


# ---- Molecules: the Hessian ---------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.3, 4.0])
@pytest.mark.parametrize("d", [1, 4])
def test_heteroscedastic_hessian_is_autograds(d, gap):
    last, theta, _ = molecules_problem(d=d, gap=gap)
    right = torch.autograd.functional.hessian(lambda t: nll_loop(t, last), theta)
    found = sl.heteroscedastic_hessian(theta, last)
    assert found.shape == (2 * (d + 1), 2 * (d + 1))
    close(found, right, rtol=1e-9, atol=1e-9 * right.abs().max())
    twice = last._replace(x=torch.cat([last.x] * 2), labels=torch.cat([last.labels] * 2),
                          molecule=torch.cat([last.molecule, last.molecule + 12]),
                          offset=torch.cat([last.offset] * 2))
    close(sl.heteroscedastic_hessian(theta, twice), 2 * found)


def test_spectrum_of_molecules_is_of_the_hessian_in_float64():
    last, theta, _ = molecules_problem()
    right = torch.autograd.functional.hessian(lambda t: nll_loop(t, last), theta)
    close(dense(sl.decompose("full", last, theta)), right, rtol=1e-7, atol=1e-7)
    narrow = last._replace(x=last.x.float())
    assert sl.decompose("full", narrow, theta.float()).values.dtype == torch.float64


def test_where_the_hessian_is_indefinite_there_is_no_posterior():
    last, theta, _ = molecules_problem(gap=0.01)  # r = 0: -1/(2 v^2) g_v g_v^T is left
    spectrum = sl.decompose("full", last, theta)
    lowest = spectrum.values.min().item()
    assert lowest < -1e-3
    noise = torch.randn(5, 10).double()
    assert sl.laplace_samples(theta, spectrum, -lowest / 2, noise).isnan().any(1).all()
    good = sl.laplace_samples(theta, spectrum, -lowest * 2 + 1, noise)
    assert good.isfinite().all()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores):
        assert math.isfinite(score) == (delta > -lowest), delta
    assert -math.inf in scores and math.isfinite(max(scores))


@pytest.mark.parametrize("lowest", [-50.0, -39.0, -0.1])
def test_marginal_likelihood_of_an_indefinite_hessian_gives_no_nan(lowest):
    spectrum = sl.Spectrum(torch.tensor([lowest, 1.0, 20.0]).double(), ())
    try:
        delta = sl.marginal_precision(torch.tensor(-3.0), torch.ones(3).double(), spectrum)
    except UserError:
        return
    assert delta > -lowest


def test_best_of_scores():  # T31
    nan, inf = math.nan, math.inf
    assert sl.best([(nan, 1), (-2.0, 2), (-1.0, 3), (-1.0, 4), (-inf, 5)], "x")[1] == 3
    for bad in ([(nan, 1)], [(-inf, 1), (nan, 2)], []):
        with pytest.raises(UserError, match="--swag-lrs"):
            sl.best(bad, "--swag-lrs")


# ---- Flows --------------------------------------------------------------------------------------


def flow(kind, layers=3, p=5, g=None, spread=1.0):
    lead = () if g is None else (g,)
    return [spread * torch.randn(*lead, *shape).double()
            for shape in sl.flow_shapes(kind, layers, p)]


@pytest.mark.parametrize("kind, numbers", [("radial", 7), ("planar", 11)])
def test_flow_shapes(kind, numbers):
    assert sum(math.prod(s) for s in sl.flow_shapes(kind, 1, 5)) == numbers
    assert sum(math.prod(s) for s in sl.flow_shapes(kind, 10, 5)) == 10 * numbers


@pytest.mark.parametrize("kind", ["radial", "planar"])
@pytest.mark.parametrize("layers", [1, 3])
def test_log_determinant_is_autograds(kind, layers):  # T26
    for _ in range(10):
        parameters, x = flow(kind, layers), 2 * torch.randn(5).double()
        y, log_det = sl.apply_flow(kind, [p[None] for p in parameters], x[None])
        run = lambda t: sl.apply_flow(kind, [p[None] for p in parameters], t[None])[0][0]
        sign, right = torch.linalg.slogdet(torch.func.jacrev(run)(x))
        assert sign == 1
        close(log_det[0], right, rtol=1e-8, atol=1e-10)


def test_layers_are_the_published_ones():
    x, c, w = (torch.randn(4).double() for _ in range(3))
    a, b = torch.randn(2).double()
    alpha, r = F.softplus(a), (x - c).norm()
    beta = -alpha + F.softplus(b)
    h = 1 / (alpha + r)
    y, log_det = sl.radial_layer(x, c, a, b)
    close(y, x + beta * h * (x - c))
    close(log_det, 3 * torch.log(1 + beta * h) + torch.log(1 + beta * h - beta * h**2 * r))
    uhat = c + (F.softplus(w @ c) - 1 - w @ c) * w / (w @ w)
    y, log_det = sl.planar_layer(x, c, w, b)
    close(y, x + uhat * torch.tanh(w @ x + b))
    close(log_det, torch.log(abs(1 + (1 - torch.tanh(w @ x + b)**2) * (w @ uhat))))


def test_a_radial_layer_of_equal_numbers_does_nothing():  # T26
    x, c = torch.randn(6, 5).double(), torch.randn(5).double()
    y, log_det = sl.radial_layer(x, c, torch.tensor(0.7).double(), torch.tensor(0.7).double())
    assert torch.equal(y, x) and (log_det == 0).all()


def test_layers_are_invertible_whatever_their_numbers():
    """Along what a layer acts on, the map increases strictly; its log-determinant is finite."""
    n = 500
    a, b = 4 * torch.randn(2, n, 1).double()
    r = torch.linspace(0.01, 8, 200).double()
    centre, unit = torch.randn(n, 1, 3).double(), F.normalize(torch.randn(n, 1, 3).double(), dim=-1)
    y, log_det = sl.radial_layer(centre + r[:, None] * unit, centre, a, b)
    moved = ((y - centre) * unit).sum(-1)
    assert (moved[:, 0] > 0).all() and (moved.diff(dim=1) > 0).all() and log_det.isfinite().all()
    u, w = 2 * torch.randn(2, n, 1, 3).double()
    t = torch.linspace(-2, 2, 200).double()
    y, log_det = sl.planar_layer(t[:, None] * w / w.square().sum(-1, keepdim=True), u, w, b / 4)
    moved = (y * w).sum(-1)
    assert (moved.diff(dim=1) > 0).all() and log_det.isfinite().all()


@pytest.mark.parametrize("kind", ["radial", "planar"])
def test_flows_side_by_side_are_each_alone(kind):
    parameters = flow(kind, 4, g=3)
    for theta in (torch.randn(1, 5).double(), torch.randn(3, 5).double()):
        y, log_det = sl.apply_flow(kind, parameters, theta)
        assert y.shape == (3, 5) and log_det.shape == (3,)
        for g in range(3):
            x, total = theta[g % len(theta)], 0.0
            for t in range(4):
                layer = sl.radial_layer if kind == "radial" else sl.planar_layer
                x, own = layer(x, *(p[g, t] for p in parameters))
                total = total + own
            close(y[g], x)
            close(log_det[g], total)
    samples = torch.randn(7, 5).double()  # one flow, many samples
    y, _ = sl.apply_flow(kind, [p[:1] for p in parameters], samples)
    close(y[3], sl.apply_flow(kind, [p[:1] for p in parameters], samples[3:4])[0][0])


def brute_elbo(kind, parameters, theta, h, base_delta, precision, noise, root, log_lik, scale):
    """-ELBO of one flow, the density of the base by torch, the log-determinant by autograd."""
    base = theta + root @ noise
    run = lambda t: sl.apply_flow(kind, [p[None] for p in parameters], t[None])[0][0]
    p = len(theta)
    gaussian = MultivariateNormal(theta, precision_matrix=h + base_delta * unit(p))
    log_q = gaussian.log_prob(base) - torch.linalg.slogdet(torch.func.jacrev(run)(base)).logabsdet
    t = run(base)
    log_prior = MultivariateNormal(torch.zeros(p).double(), unit(p) / precision).log_prob(t)
    return log_q - log_prior - scale * log_lik(t)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["radial", "planar"])
@pytest.mark.parametrize("g", [1, 3])
def test_negative_elbo_by_brute_force(kind, structure, g):  # T27, T28
    _, last, theta, _ = classes_problem(d=3, c=3)
    p = len(theta)
    spectrum = sl.decompose(structure, last, theta)
    root = root_of(theta, spectrum, 0.7)
    parameters = flow(kind, 3, p, g, spread=0.5)
    precision = torch.tensor([2.0, 30.0, 5.0]).double()[:g]
    batch = sl.take(last, torch.arange(10, 18))
    log_lik = lambda t: Categorical(logits=logits_at(t, batch.x, 3)).log_prob(batch.labels).sum()
    for rows, n in ((1, 40), (g, 8)):  # n = 8 = B: no scaling
        noise = torch.randn(rows, p).double()
        found = sl.negative_elbo(kind, parameters, theta, spectrum, 0.7, precision, noise, batch, n)
        assert found.shape == (g,)
        for k in range(g):
            right = brute_elbo(kind, [q[k] for q in parameters], theta, dense(spectrum), 0.7,
                               precision[k], noise[k % rows], root, log_lik, n / 8)
            close(found[k], right, rtol=1e-8)


def test_negative_elbo_of_molecules():  # T27
    last, theta, sizes = molecules_problem()
    spectrum = sl.decompose("full", last, theta)
    delta = 1 - spectrum.values.min().item()
    parameters, noise = flow("radial", 2, 10, 1, 0.3), torch.randn(1, 10).double()
    batch = sl.take(last, torch.tensor([4, 1, 7]), sizes)
    log_lik = lambda t: Normal(*(f(v) for f, v in zip((lambda m: m, torch.sqrt), atoms_loop(
        t, batch)))).log_prob(batch.labels).sum()
    found = sl.negative_elbo("radial", parameters, theta, spectrum, delta,
                             torch.tensor([4.0]).double(), noise, batch, 12)
    right = brute_elbo("radial", [q[0] for q in parameters], theta, dense(spectrum), delta, 4.0,
                       noise[0], root_of(theta, spectrum, delta), log_lik, 4)
    close(found[0], right, rtol=1e-8)


def test_elbo_of_the_gaussian_itself_is_its_divergence():  # T27, T28
    """A flow that does nothing, many draws, no data: KL(q || prior) in closed form."""
    _, last, theta, _ = classes_problem(d=2, c=2)
    spectrum = sl.decompose("full", last, theta)
    n = 40_000
    parameters = [torch.zeros(n, 1, 6).double(), *torch.full((2, n, 1), 0.3).double()]
    found = sl.negative_elbo("radial", parameters, theta, spectrum, 2.0, torch.full((n,), 9.0)
                             .double(), torch.randn(n, 6).double(), last, 0)
    cov = torch.linalg.inv(dense(spectrum) + 2 * unit(6))
    right = torch.distributions.kl_divergence(
        MultivariateNormal(theta, cov), MultivariateNormal(torch.zeros(6).double(),
                                                           unit(6) / 9))
    assert abs(found.mean() - right) < 4 * found.std() / math.sqrt(n)


def flow_member(tmp_path, precision, *more):
    train = image_set(20)
    own = member({"train": train, "val": train, "ood": [], "evaluated": {}}, "--out-dir", tmp_path,
                 "--flow-precision", precision, "--flow-epochs", 3, "--flow-layers", 2,
                 "--batch-size", 8, "--flow-lr", 0.02, "--name", f"p{precision}", *more)
    torch.manual_seed(3)
    theta, x = 0.5 * torch.randn(15), torch.randn(20, 4)
    last = sl.LastLayer(x, train.labels)
    own.made |= {"fingerprint": "x", "llla": (theta, sl.decompose("full", last, theta), 2.0),
                 "features train": last, "features val": last}
    return own


@pytest.mark.parametrize("kind", ["radial", "planar"])
def test_precisions_at_once_are_each_alone(tmp_path, kind, monkeypatch):  # T28, T32
    fits = {}
    best = sl.Member.best_flow

    def noted(self, parameters, precision):
        fits[self.args.name] = [p.detach().clone() for p in parameters]
        return best(self, parameters, precision)

    monkeypatch.setattr(sl.Member, "best_flow", noted)
    rates, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, *a: (
        rates.append(self.param_groups[0]["lr"]), step(self, *a))[1])
    whole = flow_member(tmp_path, "grid", "--flow", kind)
    before = [t.clone() for t in (whole.made["llla"][0], whole.made["llla"][1].values)]
    own, precision = whole.la_nf()
    close(rates, [0.02 * 0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(9)])
    assert precision in sl.FLOW_GRID and own[0].shape == (2, 15)
    assert [torch.equal(a, b) for a, b in zip(before, (whole.made["llla"][0],
                                                       whole.made["llla"][1].values))]
    for g, value in ((0, 1), (5, 40), (14, 500)):
        flow_member(tmp_path, value, "--flow", kind).la_nf()
        for a, b in zip(fits["pgrid"], fits[f"p{value}"], strict=True):
            close(a[g], b[0], rtol=1e-4, atol=1e-6)
    assert (fits["p1"][0] - fits["p500"][0]).abs().max() > 1e-3
    assert flow_member(tmp_path, "llla", "--flow", kind).la_nf()[1] == 2.0


def test_the_later_of_equal_flow_precisions_is_chosen(tmp_path, monkeypatch):
    own = flow_member(tmp_path, "grid")
    same = [torch.zeros(15, *s) for s in sl.flow_shapes("radial", 2, 15)]
    assert own.best_flow(same, torch.tensor(sl.FLOW_GRID))[1] == 500


# ---- IVON ---------------------------------------------------------------------------------------


def test_ivon_is_the_published_update():
    p, ess, wd, h0, lr, b1, b2 = 6, 50.0, 2e-3, 0.5, 0.2, 0.9, 0.99
    mean, momentum = torch.randn(p).double(), torch.zeros(p).double()
    hessian, own = torch.full((p,), h0).double(), [t.numpy().copy() for t in (mean, momentum)]
    theta, m = own
    h = np.full(p, h0)
    for t in range(1, 6):
        noise, grad = torch.randn(2, p).double()
        deviation = sl.ivon_deviation(hessian, noise, ess, wd)
        close(deviation, noise.numpy() / np.sqrt(ess * (h + wd)))
        sl.ivon_update(mean, momentum, hessian, grad, deviation, t, lr, ess, wd, h0, (b1, b2))
        g = grad.numpy()
        f = ess * (h + wd) * deviation.numpy() * g
        h, before = b2 * h + (1 - b2) * f + 0.5 * (1 - b2)**2 * (h - f)**2 / (h + wd), h
        m = b1 * m + (1 - b1) * g
        theta = theta - lr * (h0 + wd) * (m / (1 - b1**t) + wd * theta) / (h + wd)
        close(hessian, h)
        close(momentum, m)
        close(mean, theta)
    assert np.abs(h - h0).max() > 1e-3


def test_ivon_keeps_its_variance_positive():
    h, wd = torch.rand(1000).double() + 1e-3, 2e-4
    for t in range(1, 30):
        before, deviation = h.clone(), sl.ivon_deviation(h, torch.randn(1000).double(), 10.0, wd)
        sl.ivon_update(torch.zeros(1000).double(), torch.zeros(1000).double(), h,
                       100 * torch.randn(1000).double(), deviation, t, 0.1, 10.0, wd, 0.5,
                       (0.9, 0.7))
        assert (h + wd >= 0.5 * (before + wd) * (1 - 1e-12)).all()


def test_ivon_optimiser_holds_a_sample_in_a_step_and_the_mean_after():
    args = options("glyphs", "--ivon-ess", 100, "--ivon-hess-init", 0.5)
    net = Plain().double()
    own = sl.Ivon(net, args, 7)
    assert own.fixed["ess"] == 100 and sl.Ivon(net, options(), 7).fixed["ess"] == 7
    start, vector = own.mean.clone(), lambda: sl.get_vector(own.parameters)
    assert torch.equal(start, vector())
    own.perturb()
    moved = vector() - start
    close(moved, own.drawn)
    assert moved.abs().min() > 0
    x, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    F.cross_entropy(net(x), y).backward()
    grad = torch.cat([p.grad.flatten() for p in net.parameters()])
    own.step()
    hessian, momentum, mean = torch.full_like(start, 0.5), torch.zeros_like(start), start.clone()
    sl.ivon_update(mean, momentum, hessian, grad, moved, 1, args.ivon_lr, 100, 2e-4, 0.5)
    for a, b in ((own.mean, mean), (own.hessian, hessian), (vector(), mean)):
        close(a, b)
    close(own.momentum, 0.1 * grad)  # published betas: .9 and .99999
    f = 100 * (0.5 + 2e-4) * moved * grad
    close((own.hessian - 0.5) / 1e-5, f - 0.5 + 0.5e-5 * (f - 0.5)**2 / (0.5 + 2e-4), rtol=1e-6,
          atol=1e-7)
    again = sl.Ivon(Plain().double(), args, 7)
    again.load_state_dict(own.state_dict())
    assert torch.equal(again.deviation(21, 3), own.deviation(21, 3))
    assert not torch.equal(own.deviation(21, 3), own.deviation(21, 4))
    draws = torch.stack([own.deviation(21, s) for s in range(2000)])
    ratio = draws.square().mean(0) * 100 * (own.hessian + 2e-4)
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 2000)


# ---- Mixtures and ensembles ---------------------------------------------------------------------


def test_lpd_is_the_log_of_a_mean():  # T13
    outputs, labels = 2 * torch.randn(6, 30, 4).double(), torch.randint(4, (30,))
    outputs = outputs.log_softmax(-1)
    p = outputs.exp().numpy()[:, range(30), labels]
    assert sl.log_predictive_density(outputs, labels) == pytest.approx(np.log(p.mean(0)).mean())
    one = sl.log_predictive_density(outputs[:1], labels)
    assert one == pytest.approx(-F.nll_loss(outputs[0], labels).item())
    assert sl.log_predictive_density(outputs[:1].expand(9, -1, -1), labels) == pytest.approx(one)
    far = torch.tensor([[[-2000.0, 0.0]], [[-3000.0, 0.0]]])
    lpd = sl.log_predictive_density(far, torch.tensor([0]))
    assert lpd == pytest.approx(-2000 - math.log(2))


def test_lpd_of_gaussian_mixtures():
    outputs = torch.stack([torch.randn(6, 30), torch.rand(6, 30) + 0.2], -1).double()
    labels = torch.randn(30).double()
    right = common.mixture_lpd(*outputs.unbind(-1), labels)
    assert sl.log_predictive_density(outputs, labels) == pytest.approx(right, rel=1e-12)


def test_lpd_of_a_mixture_is_above_the_mean_of_its_members():  # T14
    outputs = 2 * torch.randn(3, 5, 30, 4).double()
    labels, log_p = torch.randint(4, (30,)), outputs.log_softmax(-1)
    whole = sl.log_predictive_density(log_p.flatten(0, 1), labels)
    alone = np.mean([sl.log_predictive_density(m, labels) for m in log_p])
    logits = outputs.flatten(0, 1).mean(0).log_softmax(-1)
    assert whole > alone + 1e-3
    assert abs(whole - sl.log_predictive_density(logits[None], labels)) > 1e-3


def test_prefixes_of_a_mixture():  # T14
    outputs = 3 * torch.randn(20, 7, 4).log_softmax(-1)
    found = sl.mixture_prefixes(outputs, (10, 1, 20, 5))
    assert set(found) == {1, 5, 10, 20}
    for size, own in found.items():
        assert own.dtype == torch.float64
        close(own, outputs[:size].double().exp().mean(0).log())
    far = torch.full((3, 1, 2), -900.0)
    close(sl.mixture_prefixes(far, (3,))[3], [[-900, -900]])


@pytest.mark.parametrize("k, samples", [(1, 7), (3, 200), (20, 200), (7, 3), (5, 5), (10, 33)])
def test_stratified_order(k, samples):  # T15, T16
    order = sl.stratified_order(k, samples, 11)
    assert len(order) == samples and torch.equal(order, sl.stratified_order(k, samples, 11))
    for start in range(0, samples - k + 1, k):
        assert sorted(order[start:start + k].tolist()) == list(range(k))
    rest = order[samples - samples % k:].tolist()
    assert len(set(rest)) == len(rest)
    counts = sorted(np.bincount(order, minlength=k), reverse=True)
    assert counts == [samples // k + (i < samples % k) for i in range(k)]
    if k > 1 and samples >= 4 * k:
        assert not torch.equal(order, sl.stratified_order(k, samples, 12))
        assert not torch.equal(order[:k], order[k:2 * k]) or not torch.equal(
            order[:k], order[2 * k:3 * k])


def test_200_samples_of_3_and_of_20():  # T15
    assert sorted(np.bincount(sl.stratified_order(3, 200, 0)).tolist()) == [66, 67, 67]
    assert np.bincount(sl.stratified_order(20, 200, 0)).tolist() == [10] * 20


def test_draws_count_up_for_each_member():
    order = sl.stratified_order(4, 30, 5)
    seen = dict.fromkeys(range(4), 0)
    for m, n in zip(order.tolist(), draws_of(order).tolist()):
        assert n == seen[m]
        seen[m] += 1


def test_published_combinations():
    state = random.getstate()
    assert sl.member_combinations(30, 2, 30)[0] == (7, [5, 11])
    rows = 0
    for k in range(2, 21):
        right = {}
        for i in range(1, 31):
            random.seed((k + i) * (k + i + 1) // 2 + i)
            right.setdefault(tuple(sorted(random.sample(list(range(1, 31)), k))),
                             (k + i) * (k + i + 1) // 2 + i)
            rows += 1
        random.setstate(state)
        found = sl.member_combinations(30, k, 30)
        assert found == [(seed, list(chosen)) for chosen, seed in right.items()]
        assert found == sl.member_combinations(30, k, 30)
        assert random.getstate() == state  # nobody else's numbers are used
    assert rows == 570
    assert sl.member_combinations(3, 1, 30) == [(1, [1]), (2, [2]), (3, [3])]
    assert [m for _, m in sl.member_combinations(3, 3, 5)] == [[1, 2, 3]]


def store_of(tmp_path, arrays, *more, labels=None, classes=3):
    """Outputs whose files hold {(method, seed, set): [S, N, C]}."""
    n = next(iter(arrays.values())).shape[1]
    test = image_set(n, classes)
    test = dataclasses.replace(test, labels=labels) if labels is not None else test
    names = {name for _, _, name in arrays}
    sets = {"train": test, "val": test, "ood": sorted(names - {"test"}),
            "evaluated": dict.fromkeys(sorted(names, reverse=True), test)}
    members = {seed: None for _, seed, _ in arrays}
    store = sl.Outputs(members, sets, options("glyphs", "--out-dir", tmp_path, *more), WORLD)
    for (method, seed, name), outputs in arrays.items():
        path = store.path(method, seed, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, outputs.numpy())
    return store


def random_outputs(*shape):
    return (2 * torch.randn(*shape)).log_softmax(-1)


def test_an_ensemble_is_an_index_operation(tmp_path):  # T16, T36
    arrays = {("swag", seed, "test"): random_outputs(12, 5, 3) for seed in (4, 7, 9)}
    store = store_of(tmp_path, arrays, "--samples", 12)
    chosen = [4, 7, 9]
    order = sl.stratified_order(3, 12, 2)
    found = store.ensemble("swag", chosen, 2, "test", slice(1, 4))
    for row, m, n in zip(found, order.tolist(), draws_of(order).tolist()):
        assert torch.equal(row, arrays["swag", chosen[m], "test"][n, 1:4])
    for other in itertools.permutations(chosen):  # the same rows, in another order
        moved = store.ensemble("swag", list(other), 2, "test", slice(1, 4))
        rows = lambda t: sorted(map(tuple, t.flatten(1).tolist()))
        assert rows(moved) == rows(found)
        assert torch.equal(moved, found) == (list(other) == chosen)


def test_points_are_taken_once_each(tmp_path):
    arrays = {("map", seed, "test"): random_outputs(1, 5, 3) for seed in (1, 2, 3)}
    store = store_of(tmp_path, arrays)
    found = store.ensemble("map", [1, 2, 3], 0, "test", slice(None))
    assert sorted(found.flatten(1).tolist()) == sorted(
        a.flatten().tolist() for a in arrays.values())


def test_evaluation_of_an_ensemble_by_hand(tmp_path, monkeypatch):  # T13, T16, T18, T34
    arrays = {("swag", seed, name): random_outputs(20, 40, 3) / (1 if name == "test" else 3)
              for seed in (1, 2) for name in ("test", "glyphs_letters")}
    arrays = {key: a.log_softmax(-1) for key, a in arrays.items()}
    store = store_of(tmp_path, arrays, "--samples", 20)
    rows = sl.evaluate_ensemble(store, "swag", [1, 2], 3)
    labels, order = store.sets["train"].labels, sl.stratified_order(2, 20, 3)
    at = list(zip(order.tolist(), draws_of(order).tolist()))
    stacked = {name: torch.stack([arrays["swag", (1, 2)[m], name][n] for m, n in at]).double()
               for name in ("test", "glyphs_letters")}
    by_size = {row["samples"]: row for row in rows if row["set"] == "test"}
    assert sorted(by_size) == [5, 10, 15, 20]
    for size, row in by_size.items():
        p = stacked["test"][:size].exp().mean(0)
        assert row["lpd"] == pytest.approx(p[range(40), labels].log().mean().item(), rel=1e-5)
        assert row["accuracy"] == (p.argmax(-1) == labels).double().mean().item()
        right = multiclass_calibration_error(p, labels, 3, n_bins=15).item()
        assert row["ece15"] == pytest.approx(right, abs=1e-6)
        right = (p - F.one_hot(labels, 3)).square().sum(-1).mean().item()
        assert row["brier"] == pytest.approx(right, rel=1e-5)
    entropy = {}
    for name, z in stacked.items():
        p = z.exp()
        total = -(p.mean(0) * p.mean(0).log()).sum(-1)
        entropy[name] = total, total - -(p * z).sum(-1).mean(0)
    assert by_size[20]["mutual_information"] == pytest.approx(entropy["test"][1].mean().item(),
                                                              rel=1e-4)
    (ood,) = [row for row in rows if row["set"] == "glyphs_letters"]
    for k, suffix in enumerate(("", "_mutual_information")):
        a, b = entropy["test"][k], entropy["glyphs_letters"][k]
        right = (b[:, None] > a).double().mean().item()
        assert ood[f"auroc{suffix}"] == pytest.approx(right)
        swapped = sl.ood_scores(b, a)["auroc"]
        assert swapped + right == pytest.approx(1)
    assert ood["auroc"] > 0.6 and "lpd" not in ood
    whole = sl.predictions(store, "swag", [1, 2], 3, "test")
    parts = sl.predictions(store, "swag", [1, 2], 3, "test", numbers=20 * 3 * 7)
    close(parts[0][20], whole[0][20])
    close(parts[1], whole[1], rtol=1e-6)


def test_evaluation_of_an_ensemble_of_molecules(tmp_path):  # T19, T20
    draw = lambda spread: torch.stack([spread * torch.randn(6, 9), torch.rand(6, 9) + 0.1], -1)
    arrays = {("swag", seed, name): draw(spread).double() for seed in (1, 2)
              for name, spread in (("test", 1), ("clusters_large", 3))}
    own = molecule_set(9)
    sets = {"train": own, "val": own, "ood": ["clusters_large"],
            "evaluated": {"test": own, "clusters_large": own}}
    store = sl.Outputs({1: None, 2: None}, sets, options("clusters", "--out-dir", tmp_path,
                                                         "--samples", 6), WORLD)
    for key, outputs in arrays.items():
        path = store.path(*key)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, outputs.numpy())
    few, test, few_ood, ood = sl.evaluate_ensemble(store, "swag", [1, 2], 3)
    order = sl.stratified_order(2, 6, 3)
    m, v, y = {}, {}, own.labels.numpy()
    for name in ("test", "clusters_large"):
        rows = torch.stack([arrays["swag", k + 1, name][n] for k, n in zip(
            order.tolist(), draws_of(order).tolist())]).numpy()
        m[name], v[name] = rows[..., 0], rows[..., 1]
    mean, epistemic = m["test"].mean(0), m["test"].var(0)
    assert test["mae"] == pytest.approx(np.abs(y - mean).mean())
    assert test["epistemic"] == pytest.approx(epistemic.mean())
    assert test["total"] == pytest.approx((epistemic + v["test"].mean(0)).mean())
    density = np.exp(-0.5 * (y - m["test"])**2 / v["test"]) / np.sqrt(2 * np.pi * v["test"])
    assert test["lpd"] == pytest.approx(np.log(density.mean(0)).mean())
    assert test["lpd"] != pytest.approx(-test["nll"], rel=1e-3)
    far = m["clusters_large"].var(0)
    assert ood["auroc_epistemic"] == pytest.approx((far[:, None] > epistemic).mean())
    far = far + v["clusters_large"].mean(0)
    assert ood["auroc"] == pytest.approx((far[:, None] > epistemic + v["test"].mean(0)).mean())
    assert [(r["set"], r["samples"]) for r in (few, test, few_ood, ood)] == [
        (name, size) for name in ("test", "clusters_large") for size in (5, 6)]
    assert few["mae"] == pytest.approx(np.abs(y - m["test"][:5].mean(0)).mean())
    assert few["lpd"] == pytest.approx(np.log(density[:5].mean(0)).mean())
    assert few_ood["total"] == pytest.approx(
        (m["clusters_large"][:5].var(0) + v["clusters_large"][:5].mean(0)).mean())


def test_brier_of_uniform_rows():  # T18
    values = sl.class_metrics(torch.full((6, 10), 0.1).double().log(), torch.arange(6))
    assert values["brier"] == pytest.approx(0.9) and values["lpd"] == pytest.approx(-math.log(10))
    assert values["entropy"] == pytest.approx(math.log(10))


def test_other_posteriors_have_other_stamps():
    """Same weights and precision, another structure or flow: the kept outputs are not of it."""
    _, last, theta, _ = classes_problem(d=4, c=3)
    stamps = set()
    for structure in STRUCTURES:
        own = member()
        own.made |= {"fingerprint": "x", "llla": (theta, sl.decompose(structure, last, theta), 2.0)}
        stamps.add(json.dumps(own.stamp("llla")))
    assert len(stamps) == 3
    stamps = set()
    for value in (0.1, 0.2):
        own.made["la_nf"] = ([torch.full(s, value) for s in sl.flow_shapes("radial", 2, 15)], 5.0)
        stamps.add(json.dumps(own.stamp("la_nf")))
    assert len(stamps) == 2


def test_swag_and_swa_choose_for_themselves(tmp_path, monkeypatch):  # T31
    scores = {0.3: (-2.0, -1.0), 0.2: (-1.5, -1.2), 0.1: (-1.5, math.nan), 0.05: (-3.0, -4.0)}
    own = member(None, "--swag-lrs", "0.3,0.2,0.1,0.05")
    monkeypatch.setattr(own, "swag_scores", lambda lr: dict(zip(("swag", "swa"), scores[lr])))
    paths = {lr: tmp_path / f"{lr}" for lr in scores}
    for path in paths.values():
        path.touch()
    monkeypatch.setattr(own, "iterates", lambda net, lr: SimpleNamespace(path=paths[lr]))
    monkeypatch.setattr(own, "map", lambda: None)
    assert own.swag() == {"swag": (-1.5, 0.2), "swa": (-1.0, 0.3)}
    assert {lr for lr, path in paths.items() if path.exists()} == {0.2, 0.3}


# ---- Networks for images ------------------------------------------------------------------------


def counts(net):
    return (sum(p.numel() for p in net.parameters()),
            sum(p.numel() for p in net.parameters() if p.requires_grad))


def made(dataset, classes=10, channels=3, *more):
    train = SimpleNamespace(num_classes=classes, shape=(channels, 32, 32), vocab=range(30_522))
    with torch.device("meta"):
        return sl.make_network(options(dataset, *more), train, 0.0)


@pytest.mark.parametrize("dataset, classes, more, whole, trained", [
    ("cifar10", 10, (), 2_752_506, 2_750_698), ("cifar100", 100, (), 2_775_636, 2_773_828),
    ("cifar10", 10, ("--model", "wrn_28_10"), 36_497_146, 36_488_170),
    ("cifar10", 10, ("--norm", "bn"), 2_748_890, 2_748_890),
    ("sst2", 2, (), 13_271_808 + 514, 13_271_808 + 514)])
def test_published_numbers_of_parameters(dataset, classes, more, whole, trained):  # T25
    net = made(dataset, classes, 3, *more)
    assert counts(net) == (whole, trained)
    assert counts(net.head)[0] == {("cifar10", 0): 2570, ("cifar100", 0): 25_700, ("sst2", 0): 514,
                                   ("cifar10", 1): 6410}[dataset, int("wrn_28_10" in more)]
    assert sum(p.numel() for p in sl.sampled_parameters(net)) == trained
    assert sum(p.numel() for p in sl.sampled_parameters(net, True)) == whole


def test_published_number_of_parameters_of_painn():
    net = sl.PaiNN((0.0, 1.0), torch.zeros(101))
    assert counts(net) == (589_250, 589_250) and counts(net.head)[0] == 130


def frn_loop(x, gamma, beta, tau, eps):
    y = torch.empty_like(x)
    for b, c in itertools.product(*map(range, x.shape[:2])):
        power = (x[b, c]**2).mean()
        y[b, c] = torch.maximum(gamma[c] * x[b, c] / (power + abs(eps[c])).sqrt() + beta[c], tau[c])
    return y


@pytest.mark.parametrize("side", [1, 2, 5])
def test_frn_is_its_formula(side):  # T24
    layer, x = sl.FRN(4).double(), torch.randn(3, 4, side, side).double()
    assert [p.tolist() for p in (layer.gamma, layer.beta, layer.tau)] == [[1] * 4, [0] * 4, [0] * 4]
    close(layer.eps, [1e-6] * 4, rtol=1e-7)
    with torch.no_grad():
        for p in (layer.gamma, layer.beta, layer.tau, layer.eps):
            p.normal_(std=0.5)
    close(layer(x), frn_loop(x, layer.gamma, layer.beta, layer.tau, layer.eps))
    if side == 1:  # the sign, scaled and shifted
        with torch.no_grad():
            layer.eps.fill_(1e-12)
            layer.tau.fill_(-9)
        right = layer.gamma[:, None, None] * x.sign() + layer.beta[:, None, None]
        close(layer(x), right, atol=1e-5)


@pytest.mark.parametrize("side", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frn_of_a_channel_of_zeros(dtype, side):  # T24
    layer, x = sl.FRN(3), torch.randn(2, 3, side, side)
    with torch.no_grad():
        layer.beta.copy_(torch.tensor([0.5, -0.5, 0.0]))
        x[:, :2] = 0
    x = x.to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype and (y[:, 0] == 0.5).all() and (y[:, 1] == 0).all()
    y.float().square().sum().backward()
    assert x.grad.isfinite().all() and all(
        p.grad.isfinite().all() for p in (layer.gamma, layer.beta, layer.tau))


def block_by_hand(block, x, norm):
    """Every branch written out: the shortcut of a transition sees norm1(x)."""
    stride = block.conv1.stride[0]
    h = norm(block.norm1, x)
    rest = x if block.shortcut is None else F.conv2d(h, block.shortcut.weight, stride=stride)
    h = norm(block.norm2, F.conv2d(h, block.conv1.weight, stride=stride, padding=1))
    return rest + F.conv2d(h, block.conv2.weight, padding=1)


def norm_by_hand(layer, x):
    if isinstance(layer, sl.FRN):
        return frn_loop(x, layer.gamma, layer.beta, layer.tau, layer.eps)
    layer = layer.norm
    scale = (layer.running_var + layer.eps).rsqrt() * layer.weight
    return (scale[:, None, None] * (x - layer.running_mean[:, None, None])
            + layer.bias[:, None, None]).relu()


def shaken(net):
    """float64, evaluated, every number moved off its start."""
    net = net.double().eval()
    with torch.no_grad():
        for name, value in (*net.named_parameters(), *net.named_buffers()):
            if value.is_floating_point() and name not in ("statistics", "references"):
                value.add_(0.1 * torch.randn_like(value).abs())
    return net


@pytest.mark.parametrize("norm", ["frn", "bn"])
@pytest.mark.parametrize("side", [8, 7])
def test_wide_resnet_by_hand(norm, side):  # T25
    net = shaken(sl.WideResNet(5, 3, 16, 2, norm, width=0.25))
    x = torch.randn(2, 3, side, side).double()
    h = F.conv2d(x, net.stem.weight, padding=1)
    shapes = []
    for block in net.blocks:
        h = block_by_hand(block, h, norm_by_hand)
        shapes.append((h.shape[1], block.conv1.stride[0], block.shortcut is not None))
    assert shapes == [(8, 1, True), (8, 1, False), (16, 2, True), (16, 1, False), (32, 2, True),
                      (32, 1, False)]
    features = norm_by_hand(net.norm, h).mean((2, 3))
    close(net.features(x), features)
    close(net(x), features @ net.head.weight.T + net.head.bias)


def test_dropout_of_a_wide_block_is_before_its_second_convolution():
    block = sl.WideBlock(4, 4, 1, sl.FRN, 0.3)
    seen = []
    block.norm2.register_forward_hook(lambda m, i, out: seen.append(out))
    block.dropout.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    block.dropout.register_forward_hook(lambda m, i, out: seen.append(out))
    block.conv2.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    block(torch.randn(2, 4, 5, 5))
    assert seen[0] is seen[1] and seen[2] is seen[3] and not torch.equal(seen[1], seen[2])
    assert block.dropout.p == 0.3


@pytest.mark.parametrize("width", [0.01, 0.03, 0.1])
def test_narrow_wide_resnets_run(width):
    net = sl.WideResNet(3, 1, 10, 4, "frn", width=width)
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_norm_over_processes_is_the_same_network(device):
    """What training converts must still have its ReLU, and be found by the conversion."""
    net = sl.WideResNet(3, 1, 10, 1, "bn").eval()
    x = torch.randn(2, 1, 8, 8)
    right = net(x)
    model = common.sync_batch_norm(net, common.World(size=2, device=torch.device(device)))
    close(model.eval()(x), right, rtol=1e-5)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 7
    assert all(isinstance(m, (common.GlobalBatchNorm2d, nn.SyncBatchNorm)) for m in norms)


# ---- Networks for texts -------------------------------------------------------------------------


def copied(own, peer):
    """The weights of an EncoderLayer in torch's."""
    a, peer = own.attention, peer.double()
    qkv = (a.query, a.key, a.value)
    pairs = [(torch.cat([q.weight for q in qkv]), peer.self_attn.in_proj_weight),
             (torch.cat([q.bias for q in qkv]), peer.self_attn.in_proj_bias)]
    for x, y in ((a.out, peer.self_attn.out_proj), (own.up, peer.linear1), (own.down, peer.linear2),
                 (own.norm1, peer.norm1), (own.norm2, peer.norm2)):
        pairs += [(x.weight, y.weight), (x.bias, y.bias)]
    with torch.no_grad():
        for x, y in pairs:
            y.copy_(x)
    return peer


def torch_layer(own, dim, heads, hidden):
    return copied(own, nn.TransformerEncoderLayer(dim, heads, hidden, 0.0, "gelu", 1e-12,
                                                  batch_first=True))


@pytest.mark.parametrize("training", [False, True])
def test_encoder_layer_is_torchs(training):
    """In training with a rate that drops nothing: the path of an explicit softmax."""
    own = shaken(sl.EncoderLayer(16, 4, 40, 1e-15)).train(training)
    peer = torch_layer(own, 16, 4, 40).train()
    x, real = torch.randn(3, 7, 16).double(), torch.arange(7) < torch.tensor([[7], [4], [1]])
    found, right = own(x, real), peer(x, src_key_padding_mask=~real)
    close(found[real], right[real], rtol=1e-9, atol=1e-11)


def sentences(n=3, longest=9, vocabulary=30):
    lengths = torch.randint(2, longest + 1, (n,))
    lengths[0] = longest
    tokens = torch.randint(1, vocabulary, (n, longest))
    return tokens.masked_fill(torch.arange(longest) >= lengths[:, None], 0), lengths


def test_bert_by_hand():
    net = shaken(sl.Bert(2, 30, 16, 3, 4, 40, 0.0))
    tokens, lengths = sentences()
    x = net.words.weight[tokens] + net.types.weight[0] + net.positions.weight[:9]
    x = F.layer_norm(x, (16,), net.norm.weight, net.norm.bias, 1e-12)
    for layer in net.layers:
        x = torch_layer(layer, 16, 4, 40).train()(x, src_key_padding_mask=tokens == 0)
    features = torch.tanh(x[:, 0] @ net.pooler.weight.T + net.pooler.bias)
    close(net.features(tokens), features, rtol=1e-9)
    close(net(tokens), features @ net.head.weight.T + net.head.bias, rtol=1e-9)
    alone = torch.cat([net(row[None, :n]) for row, n in zip(tokens, lengths)])
    close(net(tokens), alone, rtol=1e-9)


def test_padding_is_inert():  # T33
    net = shaken(sl.Bert(2, 30, 16, 2, 4, 40, 0.5))
    tokens, _ = sentences()
    close(net(F.pad(tokens, (0, 259))), net(tokens), rtol=1e-12)
    reached = net(tokens.where(tokens != 0, 7))  # as real tokens they would count
    assert (reached - net(tokens)).abs().max() > 1e-6


def test_start_of_bert():
    net = sl.Bert(2, 500, 64, 2, 8, 512)
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.2), name
    assert (net.words.weight[0] == 0).all()
    assert {m.p for m in net.modules() if isinstance(m, common.Dropout)} == {0.5}
    assert len({id(m) for m in net.modules() if isinstance(m, common.Dropout)}) == 1 + 2 * 2


# ---- Networks for molecules ---------------------------------------------------------------------

REFERENCES = torch.linspace(-3, 4, 101).double()


def molecules_of(atoms, cutoff=3.0):
    """[(numbers, positions float64), ...] as one graph, edges by a loop over pairs."""
    numbers = torch.cat([torch.as_tensor(z) for z, _ in atoms])
    positions = torch.cat([r for _, r in atoms])
    molecule = torch.arange(len(atoms)).repeat_interleave(torch.tensor([len(z) for z, _ in atoms]))
    pairs = [(j, i) for i in range(len(numbers)) for j in range(len(numbers))
             if i != j and molecule[i] == molecule[j] and
             (positions[i] - positions[j]).norm() < cutoff]
    sources, targets = torch.tensor(pairs, dtype=torch.long).view(-1, 2).T
    return data.Molecules(numbers, positions, molecule, sources, targets, len(atoms))


def painn(f=8, layers=2, cutoff=3.0, **more):
    return shaken(sl.PaiNN((-0.7, 1.9), REFERENCES, f, layers, 5, cutoff, **more))


def some_atoms(n=5):
    return [1, 6, 7, 8, 1, 9][:n], 1.5 * torch.randn(n, 3).double()


def painn_loop(net, numbers, r, cutoff=3.0):
    """(mean, variance) of one molecule: every atom and neighbour in turn."""
    n, f = len(numbers), net.embedding.weight.shape[1]
    silu = lambda x: x * torch.sigmoid(x)
    linear = lambda layer, x: layer.weight @ x + layer.bias
    s = [net.embedding.weight[z] for z in numbers]
    v = [torch.zeros(f, 3).double() for _ in range(n)]
    for layer in net.layers:
        ds, dv = [torch.zeros(f).double() for _ in s], [torch.zeros(f, 3).double() for _ in s]
        for i, j in itertools.permutations(range(n), 2):
            d = (r[j] - r[i]).norm()
            if d >= cutoff:
                continue
            rbf = torch.stack([torch.sin(k * math.pi * d / cutoff) / d for k in range(1, 6)])
            w = linear(layer.filter, rbf) * 0.5 * (torch.cos(math.pi * d / cutoff) + 1)
            phi = linear(layer.message[2], silu(linear(layer.message[0], s[j]))) * w
            ds[i] = ds[i] + phi[f:2 * f]
            dv[i] = dv[i] + v[j] * phi[:f, None] + torch.outer(phi[2 * f:], (r[j] - r[i]) / d)
        s, v = [a + b for a, b in zip(s, ds)], [a + b for a, b in zip(v, dv)]
        for i in range(n):
            uv, vv = layer.u.weight @ v[i], layer.v.weight @ v[i]
            a = linear(layer.update[2], silu(linear(layer.update[0], torch.cat([vv.norm(dim=1),
                                                                                s[i]]))))
            s[i], v[i] = (s[i] + a[2 * f:] + a[f:2 * f] * (uv * vv).sum(1), v[i] + uv * a[:f, None])
    mean, variance = 0.0, 0.0
    for z, own in zip(numbers, s):
        m, raw = linear(net.head, silu(linear(net.readout[0], own)))
        mean = mean + m * 1.9 - 0.7 + REFERENCES[z]
        variance = variance + ((F.softplus(raw) + 1e-8) * 1.9)**2
    return torch.stack([mean, variance])


def test_painn_is_a_loop_over_molecules():
    net, atoms = painn(), [some_atoms(5), some_atoms(1), some_atoms(3), some_atoms(6)]
    found = net(molecules_of(atoms))
    assert found.dtype == torch.float64 and found.shape == (4, 2)
    for own, (z, r) in zip(found, atoms):
        close(own, painn_loop(net, z, r), rtol=1e-9)


def rotation():
    q, _ = torch.linalg.qr(torch.randn(3, 3).double())
    return q * torch.linalg.det(q)


@pytest.mark.parametrize("move", ["rotation", "reflection", "translation", "permutation", "order"])
def test_painn_keeps_what_physics_keeps(move):  # T22
    net, atoms = painn(), [some_atoms(5), some_atoms(6), some_atoms(2)]
    right, q = net(molecules_of(atoms)), rotation()
    if move == "rotation":
        atoms = [(z, r @ q) for z, r in atoms]
    if move == "reflection":
        atoms = [(z, -r) for z, r in atoms]
    if move == "translation":
        atoms = [(z, r + 10 * torch.randn(3)) for z, r in atoms]
    if move == "permutation":
        orders = [torch.randperm(len(z)) for z, _ in atoms]
        atoms = [(torch.tensor(z)[o], r[o]) for (z, r), o in zip(atoms, orders)]
    if move == "order":
        atoms, right = atoms[::-1], right.flip(0)
    assert (net(molecules_of(atoms)) - right).abs().max() < 1e-9
    other = [(z, 0.8 * r) for z, r in atoms]  # it does see positions
    assert (net(molecules_of(other)) - right).abs().max() > 1e-4


def test_vectors_rotate_along():  # T22
    layer = painn().layers[0]
    z, r = some_atoms(6)
    s, v, q = torch.randn(6, 8).double(), torch.randn(6, 3, 8).double(), rotation()

    def run(r, v):
        graph = molecules_of([(z, r)], 100.0)
        edges = graph.sources, graph.targets
        offset = r[edges[0]] - r[edges[1]]
        d = offset.norm(dim=1, keepdim=True)
        rbf = torch.cat([(d * torch.arange(1, 6)).sin() / d, torch.ones_like(d)], 1) * (-d).exp()
        return layer(s, v, edges, rbf, offset / d)

    (s1, v1), (s2, v2) = run(r, v), run(r @ q, torch.einsum("aif,ij->ajf", v, q))
    close(s1, s2, atol=1e-9)
    close(torch.einsum("aif,ij->ajf", v1, q), v2, atol=1e-9)
    assert (v1 - v).abs().max() > 0.1


def test_two_far_molecules_are_twice_one():  # T21
    net, (z, r) = painn(), some_atoms(4)
    one = net(molecules_of([(z, r)]))[0]
    both = net(molecules_of([(z + z, torch.cat([r, r + 100.0]))]))[0]
    assert (both - 2 * one).abs().max() < 1e-9
    apart = net(molecules_of([(z, r), (z, r)]))  # molecules at one place do not see each other
    close(apart, one.expand(2, 2))


def test_water_of_a_silent_network():  # T23
    net = painn()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    (found,) = net(molecules_of([([8, 1, 1], torch.randn(3, 3).double())]))
    close(found, [REFERENCES[8] + 2 * REFERENCES[1] + 3 * -0.7,
                  3 * ((math.log(2) + 1e-8) * 1.9)**2])


def test_a_lone_atom_has_gradients():
    net = painn().train()
    net(molecules_of([some_atoms(1)])).sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_energies_are_smooth_at_the_cutoff():
    net = painn()
    at = lambda d: net(molecules_of([([6, 1], torch.tensor([[0.0, 0, 0], [d, 0, 0]]).double())]))
    close(at(3 - 1e-6), at(3 + 1e-6), atol=1e-9)
    assert (at(2.0) - at(3.1)).abs().max() > 1e-3


def molecule_set(n=9, name="clusters"):
    sizes = torch.randint(1, 6, (n,))
    numbers = torch.tensor([1, 6, 7, 8])[torch.randint(4, (int(sizes.sum()),))]
    return data.MoleculeSet(name, numbers, 1.5 * torch.randn(len(numbers), 3).double(), sizes,
                            10 * torch.randn(n).double(), REFERENCES)


def test_statistics_are_per_atom_and_without_references():  # T23
    own, rows, at = molecule_set(), [], 0
    for n, y in zip(own.sizes.tolist(), own.labels.tolist()):
        rows.append((y - sum(REFERENCES[z].item() for z in own.numbers[at:at + n])) / n)
        at += n
    mean, std = sl.energy_statistics(own)
    assert mean == pytest.approx(np.mean(rows)) and std == pytest.approx(np.std(rows, ddof=1))
    net = sl.make_network(options("clusters"), own, 0.0)
    close(net.statistics, [mean, std])
    assert torch.equal(net.references, REFERENCES)


# ---- What the last layer sees, by kind of network -----------------------------------------------


def text_set(n=11):
    lengths = torch.randint(2, 9, (n,))
    return data.TextSet("reviews", torch.randint(1, 30, (int(lengths.sum()),)).int(), lengths,
                        torch.arange(n) % 2, 2, tuple(map(str, range(30))))


def small_set(kind):
    return {"images": lambda: image_set(11, side=8), "texts": text_set,
            "molecules": molecule_set}[kind]()


def small_net(kind, *more):
    """(args, set, network in training mode, with dropout)"""
    args = options(KINDS[kind], "--eval-batch-size", 4, "--width", 0.05, *more)
    own = small_set(kind)
    return args, own, sl.make_network(args, own, 0.5).train()


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_alone_predicts_what_the_network_does(kind, amp):  # T29
    args, own, net = small_net(kind, "--amp", amp)
    last = sl.last_layer(net, own, args, WORLD)
    assert last.x.dtype == torch.float32 and torch.equal(last.labels, own.labels)
    with torch.no_grad():
        found = sl.head_outputs(sl.flat_head(net.head)[None], last)
    whole = sl.predict_net(net.train(), own, args, WORLD)  # dropout is off in both
    assert found.shape == whole.shape == (1, len(own), 3 if kind == "images" else 2)
    close(found, whole, rtol=1e-5, atol=1e-5)
    if kind != "molecules":
        close(found.exp().sum(-1), torch.ones(1, len(own)), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_last_layer_are_in_the_sets_order(kind):
    args, own, net = small_net(kind)
    whole = sl.predict_net(net, own, args, WORLD)[0]
    for row in range(len(own)):
        alone = sl.predict_net(net, own.select([row]), args, WORLD)[0, 0]
        close(whole[row], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_take_is_select(kind):
    args, own, net = small_net(kind)
    last, index = sl.last_layer(net, own, args, WORLD), torch.tensor([7, 0, 3, 8, 3])
    sizes = getattr(own, "sizes", None)
    found, right = sl.take(last, index, sizes), sl.last_layer(net, own.select(index), args, WORLD)
    close(found.x, right.x, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.labels, right.labels)
    if kind == "molecules":
        starts = sizes.cumsum(0) - sizes
        rows = torch.cat([torch.arange(starts[i], starts[i] + sizes[i]) for i in index])
        assert torch.equal(found.x, last.x[rows])
        assert torch.equal(found.molecule, right.molecule)
        close(found.offset, right.offset)
        assert found.scale == last.scale


def test_predictions_of_many_weights():
    args, own, net = small_net("images")
    parameters = sl.sampled_parameters(net)
    vectors = sl.get_vector(parameters) + 0.1 * torch.randn(3, sum(p.numel() for p in parameters))
    draw = lambda s: sl.set_vector(parameters, vectors[s])
    found = sl.predict_net(net, own, args, WORLD, 3, draw)
    for vector, rows in zip(vectors, found):
        sl.set_vector(parameters, vector)
        close(rows, sl.predict_net(net, own, args, WORLD)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_at_test_time(kind):
    own = small_set(kind)
    args = ("--width", 0.05, "--eval-batch-size", 4)
    who = member({"train": own, "val": own, "ood": [], "evaluated": {}}, *args, dataset=KINDS[kind])
    net = sl.make_network(who.args, own, 0.5)
    one, many = who.predict_dropout(net, own, 1), who.predict_dropout(net, own, 4)
    close(one, sl.predict_net(net, own, who.args, WORLD), rtol=1e-5)  # one sample: evaluated
    assert (many[0] - many[1]).abs().max() > 1e-4
    assert torch.equal(many[:2], who.predict_dropout(net, own, 2))


# ---- Training: losses and schedules -------------------------------------------------------------


def test_loss_of_classes():
    z, labels = torch.randn(6, 4).double(), torch.randint(4, (6,))
    close(sl.data_loss(z, labels), -z.log_softmax(-1)[range(6), labels].sum())


@pytest.mark.parametrize("lam, y_var", [(0.0, 1.0), (1.0, 4e-4), (0.3, 4e-4)])
def test_loss_of_molecules(lam, y_var):
    m, v, y = torch.randn(6).double(), torch.rand(6).double() + 0.1, torch.randn(6).double()
    right = sum(lam * (b - a)**2 + (1 - lam) * y_var * 0.5 * (math.log(c) + (b - a)**2 / c)
                for a, c, b in zip(m, v, y))
    close(sl.data_loss(torch.stack([m, v], -1), y, lam, y_var), right)


@pytest.mark.parametrize("w, n", [(200, 200), (0, 5), (3, 2), (4, 1)])
def test_share_of_the_squared_error(w, n):
    for t in range(w + n):
        right = 1.0 if t < w or n == 1 else 1 - (t - w) / (n - 1)
        assert sl.mse_share(t, w, n) == pytest.approx(right, abs=1e-12)
    assert sl.mse_share(w + n - 1, w, n) == (n == 1) and sl.mse_share(w + n, w, n) == 0
    assert sl.mse_share(10 * (w + n), w, n) == 0


def test_published_command_has_no_squared_error():
    assert options("qm9").mse_steps == [0, 0] and sl.mse_share(0, 0, 0) == 0
    assert sl.mse_share(4, 5, 0) == 1 and sl.mse_share(5, 5, 0) == 0


@pytest.mark.parametrize("epochs", [1, 7, 100])
def test_cosine_is_torchs(epochs):  # T32
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for epoch in range(epochs):
        assert sl.cosine(epoch, epochs) == pytest.approx(schedule.get_last_lr()[0], abs=1e-9)
        optimiser.step()
        schedule.step()
    assert sl.cosine(epochs, epochs) == pytest.approx(0, abs=1e-15)
    recipe = sl.make_recipe("map", Plain(), 10, options("glyphs", "--epochs", epochs))
    for step in range(3 * epochs):  # per epoch, not per step
        assert recipe.lr_at(step, 3) == 0.2 * sl.cosine(step // 3, epochs)


def test_ivon_schedule_is_the_published_one():
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    lr = torch.optim.lr_scheduler
    schedule = lr.SequentialLR(optimiser, [
        lr.LinearLR(optimiser, 0.2, total_iters=5), lr.CosineAnnealingLR(optimiser, 200)], [5])
    rates = []
    for _ in range(200):
        rates.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    for epoch, rate in enumerate(rates):
        for step in (0, 9):
            assert sl.ivon_share(10 * epoch + step, 10, 200) == pytest.approx(rate, abs=1e-9)
    assert 0.001 < sl.ivon_share(1999, 10, 200) < 0.003
    for epochs in (1, 3, 8):
        shares = [sl.ivon_share(t, 2, epochs) for t in range(2 * epochs)]
        assert max(shares) == 1 and min(shares) > 0


def test_recipes():  # T29
    net, args = Plain(), options("cifar10")
    own = sl.make_recipe("map", net, 10, args)
    group = own.optimiser.param_groups[0]
    assert own.augment and (group["momentum"], group["nesterov"], group["weight_decay"],
                            group["lr"]) == (0.9, True, 5e-4, 0.1)
    own = sl.make_recipe("swag", net, 10, args, 0.03)
    group = own.optimiser.param_groups[0]
    assert not own.augment and (group["momentum"], group["nesterov"], group["weight_decay"]) == (
        0.9, False, 5e-4)
    assert own.epochs == 100 and {own.lr_at(t, 5) for t in range(500)} == {0.03}
    args = options("qm9")
    own = sl.make_recipe("map", net, 10, args)
    assert isinstance(own.optimiser, torch.optim.AdamW) and own.y_var == 4e-4
    assert own.optimiser.param_groups[0]["weight_decay"] == 0.01
    own = sl.make_recipe("swag", net, 10, args, 1e-7)
    assert isinstance(own.optimiser, torch.optim.SGD)
    assert (own.y_var, own.mse_steps) == (1.0, (0, 0))
    assert options("cifar10", "--model", "wrn_28_10").swag_epochs == 25
    assert options("cifar10", "--model", "wrn_28_10").structure == "diag"
    assert options("sst2").swag_weight_decay == 3e-3
    assert options("cifar10").ivon_hess_init == options("qm9").ivon_hess_init == 0.5
    assert (sl.Ivon(net, options("cifar10"), 10).hessian == 0.5).all()
    assert (sl.Ivon(net, options(), 10).hessian == 5).all()


# ---- Training: keepers --------------------------------------------------------------------------


class FakeRun:
    """A run directory that only asks `on_save` at each checkpoint."""

    def __init__(self, folder, on_save=lambda state: None):
        self.directory, self.resume_from, self.on_save = folder, folder / "last.pt", on_save
        self.saved = []

    def load(self):
        return None

    def save(self, **state):
        self.on_save(state)
        self.saved.append(state["progress"])

    def open(self):
        pass

    def say(self, _):
        pass

    def log(self, **row):
        pass


def test_iterates_are_whole_before_they_are_counted(tmp_path):  # T4
    train, net = image_set(), Plain()
    args = options("glyphs", "--batch-size", 8, "--swag-epochs", 4)
    recipe = sl.make_recipe("swag", net, len(train), args, 0.1)
    keeper = sl.Iterates(net, tmp_path / "rows", 4, False, 1, WORLD)
    start, seen = sl.get_vector(keeper.parameters), []

    def look(state):
        epoch = state["progress"]["epoch"]
        rows = np.fromfile(tmp_path / "rows", np.float32).reshape(4, 15)
        seen.append(sl.get_vector(keeper.parameters))
        for row, right in zip(rows[:epoch], seen, strict=True):
            np.testing.assert_array_equal(row, right)
        assert (rows[epoch:] == 0).all()

    run = FakeRun(tmp_path, look)
    sl.train(net, recipe, keeper, train, run, args, WORLD)
    assert [p["epoch"] for p in run.saved] == [1, 2, 3, 4] and run.saved[-1]["done"]
    assert torch.equal(keeper.read(), torch.stack(seen))
    assert not any(torch.equal(row, start) for row in seen) and len(torch.stack(seen).unique(
        dim=0)) == 4


@pytest.mark.parametrize("damage", ["absent", "short", "long"])
def test_iterates_of_another_size_are_refused(tmp_path, damage):
    path, net = tmp_path / "rows", Plain()
    keeper = sl.Iterates(net, path, 2, False, 7, WORLD)
    if damage != "absent":
        np.zeros(30 + {"short": -1, "long": 15}[damage], np.float32).tofile(path)
    before = path.read_bytes() if path.exists() else None
    for use in (keeper.read, lambda: keeper.after_epoch(2)):  # no row of zeros for what is lost
        with pytest.raises(UserError, match="absent or incomplete.*--seed 7 .*--resume never"):
            use()
        assert (path.read_bytes() if path.exists() else None) == before
    keeper.after_epoch(1)  # begins anew
    keeper.after_epoch(2)
    assert torch.equal(keeper.read(), sl.get_vector(keeper.parameters).expand(2, -1))


def test_iterates_written_again_replace_only_their_row(tmp_path):
    net = Plain()
    keeper = sl.Iterates(net, tmp_path / "rows", 3, False, 1, WORLD)
    for epoch, value in ((1, 10.0), (2, 15.0), (3, 30.0), (2, 20.0)):
        sl.set_vector(keeper.parameters, torch.full((15,), value))
        keeper.after_epoch(epoch)
    assert keeper.read()[:, 0].tolist() == [10, 20, 30]


def test_the_best_copy_is_never_a_nan(monkeypatch):
    net, val = Plain(), image_set()
    args = options("glyphs", "--min-epochs", 3, "--patience", 2)
    keeper = sl.BestCopy(net, val, args, WORLD)
    values = iter([math.nan, 2.0, 1.0, 1.0, math.nan, 0.5, math.inf])
    monkeypatch.setattr(sl, "predict_net", lambda *_: None)
    monkeypatch.setattr(sl, "log_predictive_density", lambda *_: -next(values))
    best, finished = [], []
    for epoch in range(1, 8):
        sl.set_vector(list(net.parameters()), torch.full((15,), float(epoch)))
        row = keeper.after_epoch(epoch)
        assert set(row) == {"val_nll_nats"}
        best.append(keeper.state["epoch"])
        finished.append(keeper.finished(epoch))
        if keeper.state["weights"]:  # a copy, not the weights of now
            assert (keeper.state["weights"]["head.bias"] == best[-1]).all()
    assert best == [0, 2, 3, 3, 3, 6, 6] and keeper.state["nll"] == 0.5
    assert finished == [False, False, False, False, True, False, False]


def test_training_returns_the_best_epoch_and_stops_early(tmp_path, monkeypatch):
    net, train = Plain(), image_set()
    args = options("glyphs", "--epochs", 9, "--min-epochs", 4, "--patience", 3, "--batch-size", 8)
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.0])
    monkeypatch.setattr(sl, "predict_net", lambda *_: None)
    monkeypatch.setattr(sl, "log_predictive_density", lambda *_: -next(values))
    keeper, run = sl.BestCopy(net, train, args, WORLD), FakeRun(tmp_path)
    sl.train(net, sl.make_recipe("map", net, 24, args), keeper, train, run, args, WORLD)
    assert run.saved[-1] | {"loss": 0} == {"epoch": 5, "done": True, "step": 0, "loss": 0}
    assert keeper.state["epoch"] == 2


# ---- Batch norm ---------------------------------------------------------------------------------


def norm_net():
    torch.manual_seed(5)
    return sl.WideResNet(3, 1, 10, 1, "bn", width=0.25)


def statistics(net):
    return [t.clone() for m in net.modules() if isinstance(m, nn.BatchNorm2d)
            for t in (m.running_mean, m.running_var)]


def refreshed(world_from_environment=False):
    """Statistics after a refresh; the set's last batch is smaller."""
    world = common.start_world("cpu") if world_from_environment else WORLD
    torch.manual_seed(9)
    train, net = image_set(22, side=8), norm_net().eval()
    sl.refresh_batch_norm(net, train, options("glyphs", "--batch-size", 8), world)
    return statistics(net)


def test_refreshed_statistics_are_torchs():
    torch.manual_seed(9)
    train, net = image_set(22, side=8), norm_net()
    args = options("glyphs", "--batch-size", 8)
    batches = [batch.images for batch in sl.make_loader(train, args, WORLD).epoch()]
    torch.optim.swa_utils.update_bn(batches, net)
    for a, b in zip(refreshed(), statistics(net), strict=True):
        close(a, b, rtol=1e-5, atol=1e-6)
    net.eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.1
            m.reset_running_stats()
    first = net.blocks[0].norm1.norm
    sl.refresh_batch_norm(net, train, args, WORLD)
    inputs = [net.stem(x).detach() for x in batches]
    close(first.running_mean, sum(x.mean((0, 2, 3)) for x in inputs) / 3, rtol=1e-5, atol=1e-6)
    close(first.running_var, sum(x.transpose(0, 1).flatten(1).var(1) for x in inputs) / 3,
          rtol=1e-5)
    assert not any(m.training for m in net.modules())
    assert {m.momentum for m in net.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}


def test_refreshed_statistics_do_not_depend_on_the_number_of_processes(ranks):
    right = refreshed()
    for own in ranks(refreshed, True):
        for a, b in zip(own, right, strict=True):
            close(a, b, rtol=1e-4, atol=1e-5)


def test_every_swag_sample_has_its_own_statistics():
    train = image_set(22, side=8)
    own = member({"train": train, "val": train, "ood": [], "evaluated": {}}, "--batch-size", 8)
    net = norm_net()
    parameters = sl.sampled_parameters(net)
    rows = sl.get_vector(parameters) + 0.2 * torch.randn(4, sum(p.numel() for p in parameters))
    posterior = (net, parameters, *sl.swag_moments(rows))
    own.predict_swag(posterior, train, 3)
    now = statistics(net)
    sl.refresh_batch_norm(net, train, own.args, WORLD)  # of the last sample, still in the network
    for a, b in zip(now, statistics(net)):
        close(a, b, rtol=1e-5)


# ---- Data ---------------------------------------------------------------------------------------


def test_published_split(monkeypatch):  # T30
    n = 50_000
    whole = data.ImageSet("cifar10", torch.arange(n).view(n, 1, 1, 1).float() / n,
                          torch.arange(n), n, (0.5,), (0.2,))
    monkeypatch.setattr(data, "load", lambda *_, **__: whole)
    found = []
    for seed in (1, 9):
        train, val, test = sl.image_sets(options("cifar10", "--seed", seed))
        assert len(train) == 48_000 and len(val) == 2000
        assert val.labels.sum().item() == 50_129_101
        assert len(torch.cat([train.labels, val.labels]).unique()) == n
        pixels = train.images.double() / 255
        assert train.mean[0] == pytest.approx(pixels.mean().item(), rel=1e-4)
        assert train.std[0] == pytest.approx(pixels.std().item(), rel=1e-4)
        assert val.mean == test.mean == train.mean and val.std == test.std == train.std
        found.append(val.labels)
    assert torch.equal(*found)


def test_a_class_without_examples_is_refused():
    train = dataclasses.replace(image_set(), labels=torch.zeros(24).long())
    with pytest.raises(UserError, match="class 1, nor of 1 more"):
        sl.check_classes(train)
    sl.check_classes(image_set())
    sl.check_classes(molecule_set())


@pytest.mark.parametrize("more, fits", [
    (["--methods", "map", "la_nf"], False), (["--method", "llla"], False),
    (["--method", "llla", "--structure", "kron"], True),
    (["--method", "llla", "--structure", "diag"], True), (["--method", "swag"], True),
    (["--methods", "map", "swag"], True)])
def test_a_matrix_that_does_not_fit_is_refused(monkeypatch, more, fits):
    """Known from the network alone; memory for five copies of P x P, and a tenth to spare."""
    args, train = options("glyphs", *more), image_set()
    p = len(sl.flat_head(sl.make_network(args, train, 0.0).head))
    for memory, refuses in ((40 * p**2 / 0.9 - 1, not fits), (40 * p**2 / 0.9 + 1, False)):
        monkeypatch.setattr(common, "device_memory", lambda _: memory)
        if refuses:
            with pytest.raises(UserError, match="--structure kron or diag"):
                sl.refuse_large(args, train, WORLD)
        else:
            sl.refuse_large(args, train, WORLD)


# ---- Tables -------------------------------------------------------------------------------------


def rows_of(method, k, members, name, **values):
    return {"method": method, "K": k, "ensemble_seed": 1, "members": members, "set": name,
            **values}


def test_summary_by_hand():
    rows = [rows_of("swag", 2, "1 2", "test", samples=5, lpd=-9.0),
            rows_of("swag", 2, "1 2", "test", samples=20, lpd=-1.0, brier=0.2),
            rows_of("swag", 2, "1 3", "test", samples=20, lpd=-3.0, brier=None),
            rows_of("swag", 2, "1 2", "glyphs_letters", samples=20, auroc=0.5, entropy=1.0),
            rows_of("swag", 2, "1 3", "glyphs_letters", samples=20, auroc=0.7, entropy=3.0),
            rows_of("swag", 2, "1 2", "c_level_0", samples=20, lpd=-4.0),
            rows_of("swag", 2, "1 3", "c_level_0", samples=20, lpd=-6.0),
            rows_of("map", 1, "1", "test", samples=1, lpd=-2.0)]
    means, spread, n = sl.summarise(rows, {"ood": ["glyphs_letters"]}, options())
    assert means == pytest.approx({"swag_k2/lpd": -2.0, "swag_k2/auroc_letters": 0.6,
                                   "swag_k2/entropy_letters": 2.0, "swag_k2/c_level_0_lpd": -5.0,
                                   "map_k1/lpd": -2.0})
    assert spread["swag_k2/lpd"] == pytest.approx(math.sqrt(2)) and spread["map_k1/lpd"] is None
    assert n["swag_k2/lpd"] == 2 and n["map_k1/lpd"] == 1


def test_bold_in_the_papers_table():
    args = options("glyphs", "--methods", "map", "swag", "llla", "--ensembles", "1,3")
    metrics = {}
    for k, *columns in ((1, (0.90004, 0.89996, 0.8), (-0.2, -0.1, -0.1), (.05, .02, .03)),
                        (3, (0.7, 0.9, 0.95), (-1.0, -2.0, -3.0), (.01, .01, .0104))):
        for name, values in zip(("accuracy", "lpd", "ece15"), columns):
            metrics |= {f"{m}_k{k}/{name}": v for m, v in zip(args.methods, values)}
    lines = sl.paper_table(metrics, args).splitlines()
    assert lines == [
        "| K |  | accuracy | LPD | ECE15 |", "| ---: | --- | ---: | ---: | ---: |",
        "| 1 | DE | **0.900** | -0.200 | 0.050 |",
        "| 1 | SWAG | **0.900** | **-0.100** | **0.020** |",
        "| 1 | LLLA | 0.800 | **-0.100** | 0.030 |",
        "| 3 | DE | 0.700 | **-1.000** | **0.010** |", "| 3 | SWAG | 0.900 | -2.000 | **0.010** |",
        "| 3 | LLLA | **0.950** | -3.000 | **0.010** |"]
    latex = sl.paper_table(metrics, args, latex=True)
    assert r"1 & SWAG & \textbf{0.900} & \textbf{-0.100} & \textbf{0.020} \\" in latex
    assert latex.startswith(r"\begin{tabular}{rlrrr}") and latex.endswith("\\end{tabular}\n")
    assert latex.count(r"\\") == 7


def test_papers_table_of_molecules_is_in_milli_units():
    args = options("clusters", "--methods", "map", "swag", "--ensembles", "1")
    metrics = {"map_k1/mae": 0.0123456, "map_k1/lpd": 1.0, "map_k1/ece": 0.2,
               "swag_k1/mae": 0.0223456, "swag_k1/lpd": 2.0, "swag_k1/ece": 0.1}
    lines = sl.paper_table(metrics, args).splitlines()
    assert lines[2:] == ["| 1 | DE | **12.346** | 1.000 | 0.200 |",
                         "| 1 | SWAG | 22.346 | **2.000** | **0.100** |"]


def test_printed_table():
    args = options("glyphs", "--methods", "map", "swag", "--ensembles", "1")
    metrics = {"map_k1/accuracy": 0.91234, "map_k1/lpd": -0.25, "map_k1/ece15": 0.015,
               "swag_k1/auroc_letters": 0.98765}
    text = sl.format_results(metrics, {"map": (12.34, 0.5), "swag": (1.0, 2.0)},
                             {"ood": ["glyphs_letters"]}, args).splitlines()
    assert text[0].split("  ")[-1].strip() == "prediction s" and "AUROC letters" in text[0]
    own = next(line.split() for line in text if line.split()[:1] == ["DE"])
    assert own == ["DE", "1", "91.23", "-0.2500", "1.50", "-", "12.3", "0.50"]
    own = next(line.split() for line in text if line.split()[:1] == ["SWAG"])
    assert own == ["SWAG", "1", "-", "-", "-", "0.9877", "1.0", "2.00"]


def test_csv_of_rows_of_different_keys():
    rows = [{"method": "map", "lpd": -1.5}, {"method": "swag", "auroc": 0.25, "members": "1, 2"}]
    text = sl.csv_text(rows)
    assert text.splitlines()[0] == "method,lpd,auroc,members" and "\r" not in text
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"method": "map", "lpd": "-1.5", "auroc": "", "members": ""},
        {"method": "swag", "lpd": "", "auroc": "0.25", "members": "1, 2"}]


def test_frns_own_backward_pass():
    torch.manual_seed(3)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    eps = torch.full((4,), 1e-6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *a: sl.FilterResponse.apply(*a, eps), (x, *own))
