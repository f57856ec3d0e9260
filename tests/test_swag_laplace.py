"""swag_laplace_ensembles.py against laplace-torch, autograd, textbook forms and loops; its runs: a
study of each kind of data, resuming, processes, options, members trained apart, misuse."""

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import random
import shutil
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, leaves, run_script, start_ranks
from PIL import Image
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal

import common
import data
import swag_laplace_ensembles as sl
from common import UserError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(a, b, rtol=1e-10, atol=1e-12):
    if torch.is_tensor(a):
        a = a.detach()
    if torch.is_tensor(b):
        b = b.detach()
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def unit(p):
    return torch.eye(p).double()


# ---- SWAG ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r, p", [(2, 5), (10, 4), (7, 7)])
def test_swag_covariance_by_its_linear_map(r, p):
    """Unit vectors as noise give the rows of the factor: P of z_1 and R of z_2, apart."""
    rows = torch.randn(p).double() + torch.randn(r, p).double() @ torch.randn(p, p).double()
    mean, variance, deviations = sl.swag_moments(rows.clone())
    close(variance, rows.var(0, correction=0))
    close(deviations.sum(0), torch.zeros(p), atol=1e-12)
    noise = torch.cat([unit(p + r), torch.zeros(1, p + r).double()])
    samples = sl.swag_samples(mean, variance, deviations, noise[:, :p], noise[:, p:])
    close(samples[-1], rows.mean(0))
    factor = samples[:-1] - samples[-1]
    right = (np.diag(variance) + np.cov(rows.T.numpy(), ddof=1)) / 2
    close(factor.T @ factor, right, atol=1e-11)


def test_swag_floor_is_on_the_variance_and_one_iterate_is_refused():
    mean, variance, deviations = sl.swag_moments(torch.ones(5, 1).double())
    one = torch.ones(1, 1).double()
    moved = sl.swag_samples(mean, variance, deviations, one, torch.zeros(1, 5).double()) - mean
    assert moved.item() == pytest.approx(7.0711e-5, rel=1e-4)
    far, _, _ = sl.swag_moments(1e4 + torch.randn(500, 3))
    assert far.dtype == torch.float32 and (far - 1e4).abs().max() < 0.2
    with pytest.raises(ValueError, match="at least 2"):
        sl.swag_moments(torch.zeros(1, 3))


# ---- The last layer -----------------------------------------------------------------------------


def classes_problem(n=40, d=5, c=4):
    """(raw inputs, LastLayer of tanh(raw), theta, network tanh then linear), float64."""
    net = nn.Sequential(nn.Tanh(), nn.Linear(d, c)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.7)
    raw = 1.5 * torch.randn(n, d).double()
    labels = Categorical(logits=net(raw).detach()).sample()
    return raw, sl.LastLayer(raw.tanh(), labels), sl.flat_head(net[1]).detach(), net


def logits_at(theta, x, c):
    """W row by row, then b."""
    d = x.shape[1]
    return x @ theta[:c * d].view(c, d).T + theta[c * d:]


def brute_ggn(theta, x, c):
    """The sum of J^T (diag p - p p^T) J over the examples."""
    jacobians = torch.func.jacrev(logits_at)(theta, x, c)
    h = 0
    for j, p in zip(jacobians, logits_at(theta, x, c).softmax(-1)):
        h = h + j.T @ (torch.diag(p) - torch.outer(p, p)) @ j
    return h


def dense(spectrum):
    q = spectrum.basis
    if q is None:
        q = unit(len(spectrum.values))
    return q @ torch.diag(spectrum.values) @ q.T


def molecules_problem(n=12, d=4, gap=0.3):
    """(LastLayer of molecules, theta, number of atoms of each), float64."""
    sizes = torch.randint(1, 6, (n,))
    molecule = torch.arange(n).repeat_interleave(sizes)
    x = torch.randn(len(molecule), d).double()
    scale = torch.tensor(1.7).double()
    last = sl.LastLayer(x, None, molecule, torch.randn(n).double(), scale)
    theta = 0.5 * torch.randn(2 * (d + 1)).double()
    mean, variance = atoms_loop(theta, last)
    labels = mean + gap * variance.sqrt() * torch.randn(n).double()
    return last._replace(labels=labels), theta, sizes


def atoms_loop(theta, last):
    """(mean, variance) [N], a molecule at a time."""
    d = last.x.shape[1]
    w, u = theta[:2 * d].view(2, d)
    b, c = theta[-2:]
    means = []
    variances = []
    for k in range(len(last.offset)):
        rows = last.x[last.molecule == k]
        means.append(last.offset[k] + last.scale * (rows @ w + b).sum())
        variances.append(last.scale**2 * (F.softplus(rows @ u + c) + 1e-8).square().sum())
    return torch.stack(means), torch.stack(variances)


def nll_loop(theta, last):
    mean, variance = atoms_loop(theta, last)
    return 0.5 * (variance.log() + (last.labels - mean)**2 / variance).sum()


def test_outputs_and_densities_of_classes():
    raw, last, _, net = classes_problem()
    thetas = torch.randn(3, 24).double()
    found = sl.head_outputs(thetas, last)
    for theta, own in zip(thetas, found):
        close(own, logits_at(theta, last.x, 4).log_softmax(-1))
    close(sl.head_outputs(sl.flat_head(net[1])[None], last)[0], net(raw).log_softmax(-1))
    close(sl.log_density(found, last.labels), found[:, range(40), last.labels])
    far = torch.tensor([[[-2000.0, 0.0]], [[-3000.0, 0.0]]])
    assert sl.log_predictive_density(far, torch.tensor([0])) == pytest.approx(-2000 - math.log(2))


def test_outputs_and_densities_of_molecules():
    last, theta, _ = molecules_problem()
    found = sl.head_outputs(torch.randn(3, 10).double(), last)
    assert found.shape == (3, 12, 2)
    lpd = common.mixture_lpd(*found.unbind(-1), last.labels)
    assert sl.log_predictive_density(found, last.labels) == pytest.approx(lpd, rel=1e-12)
    own = sl.head_outputs(theta[None], last)
    close(own[0], torch.stack(atoms_loop(theta, last), -1))
    close(sl.log_density(own, last.labels),
          Normal(own[..., 0], own[..., 1].sqrt()).log_prob(last.labels))
    close(sl.data_loss(own[0], last.labels, 3.0), 3 * nll_loop(theta, last))


@pytest.mark.parametrize("c, d", [(2, 5), (3, 70), (6, 3)])
def test_ggn_is_the_sum_over_examples(c, d):
    _, last, theta, _ = classes_problem(d=d, c=c)
    right = brute_ggn(theta, last.x, c)
    close(sl.diagonal_spectrum(theta, last).values, right.diagonal())
    spectrum = sl.full_spectrum(theta, last)
    close(dense(spectrum), right, atol=1e-10)
    close(spectrum.basis.T @ spectrum.basis, unit(len(theta)), atol=1e-12)
    # Along a shift of all classes alike the curvature is exactly 0.
    shift = torch.cat([torch.zeros(c * d), torch.ones(c)]).double()
    along = spectrum.basis.T @ shift
    assert (spectrum.values[along.abs() > 1e-9] == 0).all()


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_posterior(structure):
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    raw, last, theta, net = classes_problem()
    find = {"full": sl.full_spectrum, "diag": sl.diagonal_spectrum}[structure]
    spectrum = find(theta, last)
    peer = Laplace(net, "classification", subset_of_weights="last_layer",
                   hessian_structure=structure, backend=BackPackGGN)
    peer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(raw, last.labels), 16))
    for delta in (1e-2, 1.0, 40.0):
        peer.prior_precision = torch.tensor(delta).double()
        if structure == "full":
            covariance = peer.posterior_covariance
        else:
            covariance = torch.diag(peer.posterior_variance)
        root = (sl.laplace_samples(theta, spectrum, delta, unit(24)) - theta).T
        close(root @ root.T, covariance, rtol=1e-7, atol=1e-9)


def test_samples_do_not_depend_on_the_signs_of_eigenvectors():
    _, last, theta, _ = classes_problem()
    spectrum = sl.full_spectrum(theta, last)
    noise = torch.randn(3, 24).double()
    turned = spectrum._replace(basis=-spectrum.basis)
    close(sl.laplace_samples(theta, spectrum, 1.0, noise),
          sl.laplace_samples(theta, turned, 1.0, noise))


def test_grids_are_the_published_ones():
    close(sl.LAPLACE_GRID, 10 ** np.linspace(-4, 4, 21))
    assert (sum(sl.FLOW_GRID), len(sl.FLOW_GRID)) == (1566, 15)
    assert (sum(sl.SWAG_LRS), len(sl.SWAG_LRS)) == (pytest.approx(0.2986), 21)
    assert (sum(sl.MOLECULE_LRS), len(sl.MOLECULE_LRS)) == (pytest.approx(2.9986e-6), 30)


def test_precision_scores_are_of_mean_probabilities():
    _, last, theta, _ = classes_problem()
    spectrum = sl.full_spectrum(theta, last)
    noise = torch.randn(8, 24).double()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores, strict=True):
        mean = 0
        for sample in sl.laplace_samples(theta, spectrum, delta, noise):
            probs = logits_at(sample, last.x, 4).softmax(-1)
            mean = mean + probs[range(40), last.labels] / 8
        close(score, mean.log().mean(), rtol=1e-9)


def test_every_precision_has_a_posterior_in_float32():
    theta = 0.3 * torch.randn(650)
    last = sl.LastLayer(torch.randn(2000, 64).relu(), torch.randint(10, (2000,)))
    spectrum = sl.full_spectrum(theta, last)
    scores = sl.precision_scores(theta, spectrum, last, torch.randn(4, 650))
    assert all(map(math.isfinite, scores)) and spectrum.values.min() >= 0


@pytest.mark.parametrize("d, gap", [(1, 0.3), (4, 4.0)])
def test_the_curvature_of_molecules_is_the_hessian(d, gap):
    last, theta, _ = molecules_problem(d=d, gap=gap)
    right = torch.autograd.functional.hessian(lambda t: nll_loop(t, last), theta)
    close(dense(sl.molecule_spectrum(theta, last)), right, rtol=1e-7, atol=1e-7)


def test_where_the_hessian_is_indefinite_there_is_no_posterior():
    last, theta, _ = molecules_problem(gap=0.01)  # r = 0: -1 / (2 v^2) g_v g_v^T is left
    spectrum = sl.molecule_spectrum(theta, last)
    noise = torch.randn(5, 10).double()
    lowest = spectrum.values.min().item()
    assert lowest < -1e-3
    assert sl.laplace_samples(theta, spectrum, -lowest / 2, noise).isnan().any(1).all()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores):
        assert math.isfinite(score) == (delta > -lowest), delta
    assert sl.LAPLACE_GRID[sl.index_of_best(scores, "x")] > -lowest


def test_best_of_scores():
    assert sl.index_of_best([math.nan, -2.0, -1.0, -1.0, math.inf], "x") == 2
    with pytest.raises(UserError, match="--swag-lrs"):
        sl.index_of_best([math.nan, -math.inf], "--swag-lrs")


def test_the_cpu_helps_where_a_gpu_fails(monkeypatch, capsys):
    """Beyond a GPU solver's limit, as at 25,443 numbers of CIFAR-100."""
    _, last, theta, _ = classes_problem()
    real = sl.full_spectrum
    moved = []

    class OnGPU(list):
        device = torch.device("cuda")

        def cpu(self):
            return theta

    on_gpu = OnGPU(theta)

    def limited(theta, last):
        if theta is on_gpu:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_INVALID_VALUE")
        return real(theta, last)

    monkeypatch.setattr(sl, "full_spectrum", limited)
    monkeypatch.setattr(sl, "to_device", lambda fields, device: moved.append(device) or fields)
    study = SimpleNamespace(molecules=False, args=SimpleNamespace(structure="full"))
    found = sl.find_spectrum(study, on_gpu, last)
    close(found.values, real(theta, last).values)
    assert moved == ["cpu", torch.device("cuda")]
    said = capsys.readouterr().out
    assert "24 columns" in said and "on the CPU" in said and said.count("\n") == 1
    # An error on a CPU is none that the CPU could help with.
    monkeypatch.setattr(sl, "full_spectrum", lambda *_: torch.linalg.cholesky(-torch.eye(2)))
    with pytest.raises(RuntimeError):
        sl.find_spectrum(study, theta, last)


# ---- Flows --------------------------------------------------------------------------------------


def flow(layers=3, p=5, g=1, spread=1.0):
    tensors = []
    for shape in ((layers, p), (layers,), (layers,)):
        tensors.append(spread * torch.randn(g, *shape).double())
    return tensors


def test_radial_flows_side_by_side_are_the_published_ones():
    own = flow(4, g=3)
    own[2][:, 1] = own[1][:, 1]  # beta = 0: nothing moves
    for theta in (torch.randn(1, 5).double(), torch.randn(3, 5).double()):
        y, log_det = sl.apply_flow(own, theta)
        for g in range(3):
            x = theta[g % len(theta)]
            total = 0.0
            for layer in range(4):
                centre, a, b = [tensor[g, layer] for tensor in own]
                r = (x - centre).norm()
                beta = F.softplus(b) - F.softplus(a)
                h = 1 / (F.softplus(a) + r)
                total += 4 * torch.log(1 + beta * h) + torch.log(1 + beta * h - beta * h**2 * r)
                x = x + beta * h * (x - centre)
            close(y[g], x)
            close(log_det[g], total)


def brute_elbo(own, theta, h, delta, precision, base, log_likelihood, scale):
    """-ELBO of one flow, the density of the base by torch, the log-determinant by autograd."""
    def run(t):
        return sl.apply_flow(own, t[None])[0][0]

    p = len(theta)
    gaussian = MultivariateNormal(theta, precision_matrix=h + delta * unit(p))
    jacobian = torch.func.jacrev(run)(base)
    log_q = gaussian.log_prob(base) - torch.linalg.slogdet(jacobian).logabsdet
    prior = MultivariateNormal(torch.zeros(p).double(), unit(p) / precision)
    return log_q - prior.log_prob(run(base)) - scale * log_likelihood(run(base))


@pytest.mark.parametrize("kind", ["full", "diag", "molecules"])
def test_negative_elbo_by_brute_force(kind):
    rows = torch.tensor([4, 1, 7])
    delta = 0.7
    if kind == "molecules":
        last, theta, sizes = molecules_problem()
        train = SimpleNamespace(sizes=sizes)
        study = SimpleNamespace(molecules=True, sets=SimpleNamespace(train=train))
        spectrum = sl.molecule_spectrum(theta, last)
        delta = 1 - spectrum.values.min().item()
    else:
        _, last, theta, _ = classes_problem(d=3, c=3)
        study = SimpleNamespace(molecules=False)
        find = {"full": sl.full_spectrum, "diag": sl.diagonal_spectrum}[kind]
        spectrum = find(theta, last)
    batch = sl.take(study, last, rows)
    if kind == "molecules":
        assert torch.equal(batch.x, torch.cat([last.x[last.molecule == k] for k in rows]))
        assert torch.equal(batch.offset, last.offset[rows])

    def log_likelihood(t):
        if kind == "molecules":
            return -nll_loop(t, batch) - 1.5 * math.log(2 * math.pi)
        return Categorical(logits=logits_at(t, batch.x, 3)).log_prob(batch.labels).sum()

    own = flow(3, len(theta), 3, spread=0.3)
    precision = torch.tensor([2.0, 30.0, 5.0]).double()
    for draws, n in ((1, 40), (3, 3)):  # n = 3 = B: no scaling
        noise = torch.randn(draws, len(theta)).double()
        found = sl.negative_elbo(own, theta, spectrum, delta, precision, noise, batch, n)
        base = sl.laplace_samples(theta, spectrum, delta, noise)
        for g in range(3):
            one = [tensor[g:g + 1] for tensor in own]
            right = brute_elbo(one, theta, dense(spectrum), delta, precision[g], base[g % draws],
                               log_likelihood, n / 3)
            close(found[g], right, rtol=1e-8)


# ---- Mixtures and ensembles ---------------------------------------------------------------------


def test_mixtures_of_members_are_those_of_all_their_samples():
    outputs = 3 * torch.randn(3, 20, 7, 4).log_softmax(-1)
    sizes = [2, 5, 20]
    members = [sl.running_mixtures(iter(own), sizes) for own in outputs]
    for at, n in enumerate(sizes):
        found = sl.mix([own[at] for own in members])
        rows = outputs[:, :n].flatten(0, 1).double()
        close(found.log_probs, rows.exp().mean(0).log())
        close(found.entropy, torch.special.entr(rows.exp()).sum(-1).mean(0))
    far, = sl.running_mixtures(torch.full((3, 1, 2), -900.0), [3])
    close(far.log_probs, [[-900, -900]])


def test_published_combinations():
    assert sl.member_combinations(30, 2)[0] == [5, 11]
    assert sl.member_combinations(3, 1) == [[1], [2], [3]]
    for members, k in ((30, 2), (30, 20), (4, 3)):
        right = []
        for i in range(1, 31):
            random.seed((k + i) * (k + i + 1) // 2 + i)
            chosen = sorted(random.sample(list(range(1, members + 1)), k))
            if chosen not in right:
                right.append(chosen)
        state = random.getstate()
        assert sl.member_combinations(members, k) == right
        assert random.getstate() == state  # nobody else's numbers are used


def study_of(**changes):
    """What predictions need of a study of three members and eight samples."""
    args = SimpleNamespace(ensembles=[1, 3], members=3, runs=1, seed=1, samples=8)
    return SimpleNamespace(args=args, molecules=False, **changes)


def test_every_member_of_an_ensemble_gives_the_same_number_of_samples():
    study = study_of()
    outputs = torch.randn(3, 8, 5, 4).log_softmax(-1)
    members = [sl.summarise(study, iter(own), sl.sample_counts(study.args, "swag"))
               for own in outputs]
    found = sl.predict_ensemble(study, "swag", members)  # 8 // 3 = 2
    probs = outputs[:, :2].flatten(0, 1).double().exp()
    close(found.log_probs, probs.mean(0).log(), rtol=1e-6)
    assert found.samples == 6
    found = sl.predict_ensemble(study, "swag", members[:1])
    close(found.log_probs, outputs[0].double().exp().mean(0).log(), rtol=1e-6)
    study.molecules = True
    samples = torch.rand(3, 5, 8, 2).double() + 0.1
    found = sl.predict_ensemble(study, "llla", [{"samples": own} for own in samples])
    close(found.means, torch.cat([own[:, :2, 0].T for own in samples]))
    close(found.variances, torch.cat([own[:, :2, 1].T for own in samples]))


def test_metrics_of_classes_and_of_molecules():
    each = (2 * torch.randn(4, 60, 3)).double().log_softmax(-1)
    labels = torch.randint(3, (60,))
    (mixture,) = sl.running_mixtures(iter(each), [4])
    own = sl.ClassPrediction(*mixture, 4)
    metrics = own.metrics(labels)
    assert metrics["lpd"] == pytest.approx(common.lpd(each, labels), rel=1e-12)
    scores = own.scores(labels)
    for name in ("lpd", "accuracy"):
        assert scores[name].mean().item() == pytest.approx(metrics[name], rel=1e-12), name
    right = common.ensemble_uncertainty(each)
    close(own.uncertainties()["total"], right["total"])
    close(own.uncertainties()["epistemic"], right["epistemic"], atol=1e-12)

    means = torch.randn(4, 60).double()
    variances = torch.rand(4, 60).double() + 0.1
    targets = torch.randn(60).double()
    own = sl.EnergyPrediction(means, variances)
    metrics = own.metrics(targets)
    for name in ("lpd", "mae"):
        assert own.scores(targets)[name].mean().item() == pytest.approx(metrics[name], rel=1e-12)
    close(own.uncertainties()["std"]**2, variances.mean(0) + means.var(0, correction=0))
    close(own.uncertainties()["epistemic"]**2, means.var(0, correction=0))


def test_one_sample_has_no_epistemic_uncertainty():
    """Rounding would give it some, which would tell two sets apart."""
    log_probs = torch.randn(9, 3).double().log_softmax(1)
    entropy = torch.special.entr(log_probs.exp()).sum(1) - 1e-17
    assert list(sl.ClassPrediction(log_probs, entropy, 1).uncertainties()) == ["total"]
    assert len(sl.ClassPrediction(log_probs, entropy, 2).uncertainties()) == 2
    ones = torch.ones(1, 9).double()
    assert list(sl.EnergyPrediction(ones, ones).uncertainties()) == ["std"]
    assert len(sl.EnergyPrediction(ones.repeat(2, 1), ones.repeat(2, 1)).uncertainties()) == 2


def test_intervals_are_of_paired_examples():
    """Of a constant difference the interval is a point, whatever the spread of the examples."""
    base = {(2, "lpd"): list(torch.rand(3, 50).double())}
    rows = [{"members": [1, 2]} for _ in range(3)]
    # Rows of other sizes and of OOD sets are left alone.
    others = [{"members": [1]}, {"members": [1, 2], "against": "x"}]
    better = {(2, "lpd"): [values + 0.1 * (e + 1) for e, values in enumerate(base[2, "lpd"])]}
    (found,) = sl.compare("swag", [others[1], *rows, others[0]], better, base)
    assert [len(row) for row in others] == [1, 2]
    assert found[:3] == ("SWAG", 2, "lpd") and found.mean == pytest.approx(0.2)
    assert found.interval < 1e-12
    assert [row["lpd_minus_de"] for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    change = torch.randn(3, 50).double()
    worse = {(2, "lpd"): [a + b for a, b in zip(base[2, "lpd"], change)]}
    (found,) = sl.compare("swag", rows, worse, base)
    of_examples = change.mean(0).numpy()
    assert found.mean == pytest.approx(of_examples.mean())
    assert found.interval == pytest.approx(1.96 * common.standard_error(of_examples))


# ---- Networks -----------------------------------------------------------------------------------

REFERENCES = torch.linspace(-3, 4, 101).double()


def network(name, width=1.0, dropout=0.0, **train_set):
    """A network of the table, for a training set with these properties."""
    args = SimpleNamespace(model=name, width=width, device=torch.device("cpu"))
    return sl.make_network(args, SimpleNamespace(**train_set), dropout)


@pytest.mark.parametrize("name, classes, count", [
    ("wrn_16_4", 10, 2_750_698), ("wrn_16_4", 100, 2_773_828), ("wrn_28_10", 10, 36_488_170),
    ("wrn_16_4_bn", 10, 2_748_890), ("bert_256_4", 2, 13_272_322)])
def test_published_numbers_of_parameters(name, classes, count):
    net = network(name, num_classes=classes, shape=(3, 32, 32), vocab=range(30522))
    assert sum(p.numel() for p in net.parameters()) == count


def frn(x, layer):
    power = x.square().mean((2, 3), keepdim=True) + 1e-6
    return torch.maximum(layer.gamma * x / power.sqrt() + layer.beta, layer.tau)


def batch_norm_relu(x, layer):
    norm = layer[0]
    x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return x.relu()


@torch.no_grad()
def shaken(net):
    """float64, in eval mode, every number moved off its start."""
    net = net.double().eval()
    for name, value in itertools.chain(net.named_parameters(), net.named_buffers()):
        if value.is_floating_point() and name not in ("statistics", "references"):
            value.add_(0.1 * torch.randn_like(value).abs())
    return net


@pytest.mark.parametrize("side", [1, 5])
def test_frn_is_its_formula(side):
    layer = shaken(sl.FRN(4))
    x = torch.randn(3, 4, side, side).double()
    close(layer(x), frn(x, layer))
    zero = torch.zeros(2, 4, side, side, dtype=torch.bfloat16, requires_grad=True)
    y = sl.FRN(4)(zero)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and (y == 0).all() and zero.grad.isfinite().all()


@pytest.mark.parametrize("name, unit_of", [("wrn_16_4", frn), ("wrn_16_4_bn", batch_norm_relu)])
@pytest.mark.parametrize("side", [8, 7])
def test_wide_resnet_by_hand(name, unit_of, side):
    """The shortcut of a transition sees norm(x)."""
    net = shaken(network(name, width=0.125, num_classes=5, shape=(3, side, side)))
    x = torch.randn(2, 3, side, side).double()
    stem = net.extractor[0]
    blocks = net.extractor[1:-3]
    h = F.conv2d(x, stem.weight, padding=1)
    shapes = []
    for block in blocks:
        first, middle, dropout, second = block.body
        assert isinstance(dropout, nn.Dropout)
        stride = first.stride[0]
        above = unit_of(h, block.norm)
        rest = h
        if block.shortcut is not None:
            rest = F.conv2d(above, block.shortcut[1].weight, stride=stride)
        above = unit_of(F.conv2d(above, first.weight, stride=stride, padding=1), middle)
        h = rest + F.conv2d(above, second.weight, padding=1)
        shapes.append((h.shape[1], stride, block.shortcut is not None))
    assert shapes == [(8, 1, True), (8, 1, False), (16, 2, True), (16, 1, False), (32, 2, True),
                      (32, 1, False)]
    features = unit_of(h, net.extractor[-3]).mean((2, 3))
    logits, found = net(x)
    close(found, features)
    close(logits, features @ net.head.weight.T + net.head.bias)


def bert_layer(layer, x, is_token):
    """Attention of eight heads and the feed-forward layer, written out."""
    b, length, dim = x.shape

    def normed(norm, x):
        return F.layer_norm(x, (dim,), norm.weight, norm.bias, 1e-12)

    attention = layer.self_attn
    heads = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = heads.view(b, length, 3, 8, dim // 8).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_token[:, None, None])
    mixed = mixed.transpose(1, 2).reshape(b, length, dim)
    x = normed(layer.norm1, x + attention.out_proj(mixed))
    return normed(layer.norm2, x + layer.linear2(F.gelu(layer.linear1(x))))


def test_bert_by_hand():
    """Attention and feed-forward written out; padding is inert; dropout acts in training."""
    net = shaken(network("bert_256_2", width=1 / 16, dropout=0.3, num_classes=2, vocab=range(30)))
    bert = net.extractor
    is_token = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    tokens = torch.randint(1, 30, (3, 9)).where(is_token, 0)
    x = bert.words.weight[tokens] + bert.types.weight[0] + bert.positions.weight[:9]
    x = F.layer_norm(x, (16,), bert.norm.weight, bert.norm.bias, 1e-12)
    for layer in bert.layers:
        x = bert_layer(layer, x, is_token)
    features = torch.tanh(F.linear(x[:, 0], bert.pooler[0].weight, bert.pooler[0].bias))
    close(net(tokens)[1], features, rtol=1e-9)
    net(tokens[:0])[0].sum().backward()  # an empty part of a batch: DDP waits for its gradients
    assert not any(p.grad.any() for p in net.parameters())
    with torch.no_grad():  # PyTorch's fast path
        close(net(tokens)[1], features, rtol=1e-9)
        close(net(F.pad(tokens, (0, 259)))[0], net(tokens)[0], rtol=1e-12)
        net.train()
        assert not torch.equal(net(tokens)[0], net(tokens)[0])


def test_bert_starts_as_published():
    net = network("bert_256_2", width=0.25, num_classes=2, vocab=range(500))
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def molecules_of(atoms):
    """[(numbers, positions float64), ...] as one graph, in float64."""
    sizes = torch.tensor([len(numbers) for numbers, _ in atoms])
    numbers = torch.cat([torch.tensor(numbers) for numbers, _ in atoms])
    positions = torch.cat([places for _, places in atoms])
    own = data.MoleculeSet("x", numbers, positions, sizes, sizes.double(), REFERENCES)
    (batch,) = data.SequenceLoader(own, len(own), cutoff=3.0).epoch()
    return batch.molecules._replace(positions=positions)


def painn_dense(net, numbers, places, cutoff=3.0):
    """(mean, variance) of one molecule, each atom [i] with each other [i, j]."""
    n = len(places)
    numbers = torch.tensor(numbers)
    offset = places - places[:, None]
    d = offset.norm(dim=-1, keepdim=True) + unit(n)[..., None]
    rbf = torch.cat([torch.sin(k * math.pi * d / cutoff) / d for k in range(1, 6)], -1)
    near = (d < cutoff) * ~torch.eye(n, dtype=torch.bool)[..., None]
    cut = 0.5 * (torch.cos(math.pi * d / cutoff) + 1) * near
    s = net.embedding.weight[numbers]
    v = torch.zeros(n, 3, 8).double()
    for layer in net.layers:
        vv, ss, vs = (layer.message(s) * layer.filter(rbf) * cut).chunk(3, -1)
        v = v + (vv[:, :, None] * v + vs[:, :, None] * (offset / d)[..., None]).sum(1)
        s = s + ss.sum(1)
        uv = layer.u(v)
        vv = layer.v(v)
        a_vv, a_sv, a_ss = layer.update(torch.cat([vv.norm(dim=1), s], -1)).chunk(3, -1)
        s = s + a_ss + a_sv * (uv * vv).sum(1)
        v = v + uv * a_vv[:, None]
    mean, raw = net.head(net.readout(s)).T
    variance = ((F.softplus(raw) + 1e-8) * 1.9).square()
    return torch.stack([(mean * 1.9 - 0.7 + REFERENCES[numbers]).sum(), variance.sum()])


def test_painn_is_a_sum_over_pairs():
    assert sum(p.numel() for p in sl.PaiNN((0.0, 1.0), REFERENCES).parameters()) == 589_250
    net = shaken(sl.PaiNN((-0.7, 1.9), REFERENCES, 8, 2, radial=5, cutoff=3.0))
    atoms = []
    for n in (5, 1, 3, 6):
        atoms.append(([1, 6, 7, 8, 1, 9][:n], 1.5 * torch.randn(n, 3).double()))
    found, _ = net(molecules_of(atoms))
    for own, (numbers, places) in zip(found, atoms):
        close(own, painn_dense(net, numbers, places), rtol=1e-9)
    outputs, _ = net.train()(molecules_of(atoms[1:2]))  # a lone atom
    outputs.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_statistics_are_per_atom_and_without_references():
    sizes = torch.tensor([2, 1, 4])
    numbers = torch.tensor([1, 6, 7, 8, 1, 6, 1])
    labels = 10 * torch.randn(3).double()
    own = data.MoleculeSet("x", numbers, torch.randn(7, 3).double(), sizes, labels, REFERENCES)
    known = torch.stack([REFERENCES[z].sum() for z in numbers.split([2, 1, 4])])
    rows = ((labels - known) / sizes).numpy()
    close(sl.energy_statistics(own), (rows.mean(), rows.std(ddof=1)))
    with pytest.raises(UserError, match="--target"):
        sl.energy_statistics(dataclasses.replace(own, labels=known + 2.0 * sizes))


# ---- Data ---------------------------------------------------------------------------------------


def options(dataset, *more):
    return sl.parse_args(["--dataset", dataset, *CPU, *map(str, more)])


def test_the_split_of_cifar_is_the_published_one(monkeypatch):
    """The first 2,000 of PyTorch's permutation of the files' order with seed 0."""
    index = torch.arange(50_000)
    pixels = torch.stack([index % 256, index // 256 % 256, index // 65536], 1).byte()
    whole = data.ImageSet("cifar10", pixels[:, :, None, None], index % 10, 10, (0.5,) * 3,
                          (0.25,) * 3)
    monkeypatch.setattr(data, "_read", lambda name, training, *_: whole)
    train, val, test = sl.load_images(options("cifar10"))
    place = torch.tensor([1, 256, 65536])
    rows = (val.images[:, :, 0, 0].long() * place).sum(1)
    assert len(rows) == 2000 and rows.sum() == 50_129_101
    rest = (train.images[:, :, 0, 0].long() * place).sum(1)
    assert torch.equal(torch.cat([rows, rest]).sort().values, index)
    # No seed changes it.
    other = sl.load_images(options("cifar10", "--seed", 5))[1]
    assert torch.equal(other.images, val.images)


def test_statistics_of_pixels_of_any_type(monkeypatch):
    """Sets that are not 8-bit have pixels of 0..1."""
    few = data.evenly(data.load("glyphs", "test"), 40)
    found = []
    for own in (few, dataclasses.replace(few, images=few.images / 255)):
        monkeypatch.setattr(data, "load", lambda *_, own=own, **__: own)
        train, *_ = sl.load_images(options("glyphs", "--num-val", 5))
        found.append(train.mean + train.std)
    close(*found, rtol=1e-6)


def save_images(folder, labels, brightness=40, side=70):
    """Six red images of each label; two of their channels are constant."""
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for i in range(6):
            colour = (brightness * i % 256, 9, 9)
            Image.new("RGB", (side, side), colour).save(folder / label / f"{i}.png")


def test_validation_images_of_a_folder_are_read(tmp_path):
    save_images(tmp_path / "own" / "train", "ab")
    save_images(tmp_path / "own" / "test", "ab")
    args = options(f"folder:{tmp_path / 'own'}", "--num-val", 3)
    train, val, _ = sl.load_images(args)
    assert (len(train), len(val)) == (9, 3)
    save_images(tmp_path / "own" / "val", "ab", brightness=33)
    with pytest.raises(UserError, match="--num-val has no effect .* folder val"):
        sl.load_images(args)
    train, val, _ = sl.load_images(options(f"folder:{tmp_path / 'own'}"))
    assert (len(train), len(val)) == (12, 12)
    assert val.images[:, 0, 0, 0].unique().tolist() == [33 * i for i in range(6)]


def write_qm9(folder, count=40):
    """A small QM9 in its published files: water molecules of slightly different shapes."""
    (folder / "QM9").mkdir()
    rows = ["mol_id,homo,u0"]
    blocks = []
    for i in range(count):
        lines = [f"gdb_{i + 1}", "", "", "  3  0  0"]
        for symbol, x in (("O", 0.0), ("H", 0.9 + 0.01 * i), ("H", -0.9)):
            lines.append(f"{x:10.4f}    0.0000    0.1000 {symbol}   0")
        blocks.append("\n".join(lines) + "\n$$$$\n")
        rows.append(f"gdb_{i + 1},{-0.2 - 0.001 * i},{-76.4 + 0.002 * i}")
    (folder / "QM9" / "gdb9.sdf").write_text("".join(blocks))
    (folder / "QM9" / "gdb9.sdf.csv").write_text("\n".join(rows) + "\n")
    (folder / "QM9" / "uncharacterized.txt").write_text("")


def test_labels_of_another_quantity_are_not_predicted(tmp_path):
    """The energy of a cluster is no orbital energy."""
    write_qm9(tmp_path)
    argv = ["--data-dir", tmp_path, "--target", "homo", "--ood"]
    sets = sl.load_sets(options("qm9", *argv, "--predict", "clusters_large"))
    assert sets.predict.labels.isnan().all() and not sets.test.labels.isnan().any()
    columns = sl.EnergyPrediction(torch.ones(2, 5500), torch.ones(2, 5500)).columns(sets.predict, ())
    assert list(columns) == ["index", "predicted", "total", "aleatoric", "epistemic"]
    same = sl.load_sets(options("qm9", *argv, "--predict", "qm9")).predict
    assert torch.equal(same.labels, sets.test.labels)


# ---- Runs ---------------------------------------------------------------------------------------

SCRIPT = "swag_laplace_ensembles"
RUN = f"{SCRIPT}/run"
OOD = {"glyphs": "glyphs_letters", "reviews": "reviews_finance", "clusters": "clusters_large"}
TINY = ("--members 2 --ensembles 1 2 --limit-train 96 --limit-test 40 --batch-size 24 --limit-steps 3 "
        "--width 0.1 --epochs 2 --device cpu --name run --no-plot").split()
POSTERIORS = "--samples 7 --val-samples 3 --swag-epochs 3 --flow-layers 2".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sl, "FLOW_EPOCHS", 2)
    monkeypatch.setattr(sl, "DROPOUTS", (0.1,))


def tiny(dataset, out, *more, methods=tuple(sl.METHODS)):
    """A small study; of MAP networks alone, options of posteriors would be refused."""
    argv = ["--dataset", dataset, *TINY, "--out-dir", str(out), "--methods", *methods]
    if len(methods) == len(sl.METHODS):
        argv += POSTERIORS
    if dataset not in data.TEXTS + data.MOLECULES:
        argv += ["--num-val", "60"]
    return argv + [str(word) for word in more]


def opened(dataset, out, *more):
    return sl.open_study(sl.parse_args(tiny(dataset, out, *more)))


def pieces(out):
    return {path.name: path.read_bytes() for path in sorted((out / RUN).glob("*.pt"))}


def stored_rates(state):
    """The rates of SWA and SWAG that are best by what is stored of their choice."""
    rates = sl.PRESETS["glyphs"]["swag_lrs"]
    return [rates[int(np.argmax(state[name]))] for name in ("swa_lpds", "swag_lpds")]


def by_name(rows):
    """{(method, members, OOD set): row}"""
    return {(row["method"], row["seed"], row.get("against")): row for row in rows}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    @functools.cache
    def study(dataset):
        """(folder, rows) of a whole study, made once."""
        out = tmp_path_factory.mktemp(dataset)
        return out, sl.main(tiny(dataset, out, "--plot"))

    return study


@pytest.fixture
def copied(studies, tmp_path):
    def copy(dataset="glyphs"):
        out, rows = studies(dataset)
        shutil.copytree(out, tmp_path / "runs")
        return tmp_path / "runs", rows

    return copy


@pytest.mark.parametrize("dataset", OOD)
def test_a_study_tells_its_story(studies, dataset):
    out, rows = studies(dataset)
    folder = out / RUN
    labels = list(sl.METHODS.values())
    single = [row for row in rows if "against" not in row]
    found = [(row["method"], row["seed"], row["members"]) for row in single]
    right = []
    for label in labels:
        right += [(f"{label}, K=1", "1", [1]), (f"{label}, K=1", "2", [2]),
                  (f"{label}, K=2", "1+2", [1, 2])]
    assert found == right
    score = "auroc_std" if dataset == "clusters" else "auroc_total"
    for row in rows:
        assert row["set"] == dataset and row["n"] == 40
        if "against" in row:
            assert row["against"] == OOD[dataset] and 0 <= row[score] <= 1
        else:
            assert math.isfinite(row["lpd"]) and "K" not in row
            assert ("lpd_minus_de" in row) == (not row["method"].startswith("DE"))
    results = json.loads((folder / "results.json").read_text())
    assert results["rows"] == rows
    differences = {(d["method"], d["k"], d["metric"]): d for d in results["differences"]}
    metrics = ("lpd", "mae") if dataset == "clusters" else ("lpd", "accuracy")
    assert set(differences) == set(itertools.product(labels[1:], (1, 2), metrics))
    # The mean over the ensembles of K is the difference of the rows' means.
    rows_of = by_name(single)
    for label in labels[1:]:
        own = [rows_of[f"{label}, K=1", seed, None]["lpd"] for seed in "12"]
        base = [rows_of["DE, K=1", seed, None]["lpd"] for seed in "12"]
        right = np.mean(own) - np.mean(base)
        assert differences[label, 1, "lpd"]["mean"] == pytest.approx(right, abs=1e-9)
        assert differences[label, 1, "lpd"]["interval"] > 0
    assert (folder / "differences.png").stat().st_size > 10_000


def test_names_of_pieces_are_explicit(studies):
    out, _ = studies("glyphs")
    names = set(pieces(out))
    for seed in (1, 2):
        right = {f"seed{seed}-map.pt", f"seed{seed}-map-dropout0.1.pt", f"seed{seed}-swag-choice.pt",
                 f"seed{seed}-mcdo-choice.pt", f"seed{seed}-llla.pt", f"seed{seed}-la_nf.pt",
                 f"seed{seed}-flows.pt"}
        for method, part in itertools.product(sl.METHODS, ("test", "ood-glyphs_letters")):
            right.add(f"seed{seed}-{method}-{part}.pt")
        choice = torch.load(out / RUN / f"seed{seed}-swag-choice.pt", weights_only=True)
        for rate in set(stored_rates(choice)):
            name = f"seed{seed}-swag-lr{rate:g}"
            right |= {f"{name}.pt", f"{name}-1.pt", f"{name}-2.pt", f"{name}-3.pt"}
        # Nothing else: the iterates of the other rate are deleted.
        assert {name for name in names if name.startswith(f"seed{seed}-")} == right


def test_what_is_stored_of_classes_is_mixtures_in_float32(studies):
    """Never one sample by itself: of CIFAR-100 they would take a terabyte."""
    out, rows = studies("glyphs")
    state = torch.load(out / RUN / "seed1-llla-test.pt", weights_only=True)
    # After 7 // 2 and 7 samples, for K = 2 and 1.
    assert state["log_probs"].shape == (40, 2, 10) and state["log_probs"].dtype == torch.float32
    assert state["entropy"].dtype == torch.float64 and state["entropy"].shape == (40, 2)
    assert torch.load(out / RUN / "seed1-map-test.pt", weights_only=True)["log_probs"].shape[1] == 1


def test_small_uncertainties_survive_storing(tmp_path):
    """Of a weak network, float16 made six times too much mutual information."""
    each = torch.randn(1, 200, 10).mul(0.05) + 2e-3 * torch.randn(20, 200, 10)
    each = each.double().log_softmax(2)
    study = study_of()
    study.args.ensembles = [1]
    study.args.samples = 20
    torch.save(sl.summarise(study, iter(each), [20]), tmp_path / "x.pt")
    own = sl.predict_ensemble(study, "llla", [torch.load(tmp_path / "x.pt")]).uncertainties()
    right = common.ensemble_uncertainty(each)["epistemic"]
    assert right.mean() < 1e-5
    close(own["epistemic"], right, rtol=0.1, atol=2e-7)
    assert own["epistemic"].mean().item() == pytest.approx(right.mean().item(), rel=0.02)


def test_the_best_epochs_weights_are_kept(tmp_path, monkeypatch):
    found = []
    lpds = iter([-3.0, -1.0, math.nan, -2.0])

    def next_lpd(study, networks):
        found.append(sl.get_vector(networks[0]))
        return next(lpds)

    monkeypatch.setattr(sl, "validation_lpd", next_lpd)
    net = sl.train_map(opened("glyphs", tmp_path, "--epochs", 4), 1, 0.0)
    assert torch.equal(sl.get_vector(net), found[1]) and not torch.equal(found[1], found[3])


def test_samples_of_swag_differ_by_seed_and_sample(tmp_path):
    """Of one posterior: two members, samples of one block and of two."""
    study = opened("glyphs", tmp_path)
    p = len(sl.get_vector(sl.blank_network(study)))
    posterior = torch.zeros(p), torch.ones(p), torch.zeros(3, p)
    found = []
    for seed in (1, 2, 1):
        vectors = [sl.get_vector(net) for net in sl.swag_networks(study, seed, posterior, 9)]
        assert len(vectors) == 9
        found += [vectors[0], vectors[1], vectors[8]]
    apart = torch.pdist(torch.stack(found[:6]))
    assert apart.min() > 0.9 * math.sqrt(p)
    assert all(map(torch.equal, found[:3], found[6:]))
    (few,) = sl.swag_networks(study, 1, posterior, 1)
    assert torch.equal(sl.get_vector(few), found[0])  # whatever the number of samples


def test_batch_statistics_are_means_over_the_training_set(tmp_path):
    study = opened("glyphs", tmp_path, "--model", "wrn_16_4_bn", "--width", 0.05)
    net = sl.blank_network(study)
    first = sl.batch_norms(net)[0]
    seen = []
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].transpose(0, 1)))
    study.parts["train"] = study.parts["train"]._replace(
        loader=sl.make_loader(study.sets.train, study.args, 40))
    for _ in range(2):
        seen.clear()
        sl.refresh_batch_norm(study, net)
    assert len(seen) == 3
    means = torch.stack([x.flatten(1).mean(1) for x in seen]).mean(0)
    variances = torch.stack([x.flatten(1).var(1) for x in seen]).mean(0)
    close(first.running_mean, means, rtol=1e-5, atol=1e-6)
    close(first.running_var, variances, rtol=1e-5, atol=1e-6)


def test_flows_see_all_of_the_training_set(copied, monkeypatch):
    """And what they predict of molecules: total, aleatoric and epistemic standard deviations."""
    out, _ = copied("clusters")
    calls = []
    losses = []
    real = sl.negative_elbo

    def recorded(*arguments):
        calls.append(arguments)
        losses.append(real(*arguments))
        return losses[-1]

    monkeypatch.setattr(sl, "negative_elbo", recorded)
    monkeypatch.setattr(sl, "FLOW_EPOCHS", 1)
    argv = tiny("clusters", out, "--flow-layers", 3, "--predict", "clusters_large", "--samples", 7,
                "--val-samples", 3, "--members", 1, methods=["la_nf"])
    sl.main(argv)
    assert calls[0][4].tolist() == list(sl.FLOW_GRID)
    assert {n for *_, n in calls} == {96}
    noises = {noise.sum().item() for *_, noise, _, _ in calls}
    labels = torch.cat([batch.labels for *_, batch, _ in calls])
    assert len(noises) == 3 and len(labels.unique()) == 72  # three steps of 24
    row = json.loads((out / RUN / "seed1-flows.jsonl").read_text())
    assert row["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    header, *lines = (out / RUN / "predictions.csv").read_text().splitlines()
    assert header == "method,index,label,predicted,total,aleatoric,epistemic"
    assert [line.split(",")[0] for line in lines] == ["DE"] * 1000 + ["LA-NF"] * 1000
    table = np.array([line.split(",")[4:] for line in lines], float)
    total, aleatoric, epistemic = table.T
    close(total**2, aleatoric**2 + epistemic**2)


@pytest.mark.parametrize("dataset", OOD)
def test_eval_makes_and_deletes_nothing(copied, dataset, monkeypatch):
    """Another batch size is another way, no other options."""
    out, rows = copied(dataset)
    for name in ("data_loss", "negative_elbo", "full_spectrum", "molecule_spectrum"):
        monkeypatch.setattr(sl, name, None)
    monkeypatch.setattr(sl, "check_network", lambda *_: None)
    before = pieces(out)
    again = sl.main(tiny(dataset, out, "--eval", "--batch-size", 7))
    assert by_name(again) == by_name(rows) and pieces(out) == before


def test_a_later_option_never_retrains_an_early_stage(copied, monkeypatch):
    out, rows = copied()
    before = pieces(out)
    real = sl.train_epoch
    trained = []

    def recorded(study, model, optimiser, loader, seed, *rest):
        trained.append((optimiser.param_groups[0]["lr"], seed))
        return real(study, model, optimiser, loader, seed, *rest)

    monkeypatch.setattr(sl, "train_epoch", recorded)
    for more in (["--structure", "diag"], ["--flow-layers", 1], ["--samples", 9]):
        other = sl.main(tiny("glyphs", out, *more))
        assert by_name(other) != by_name(rows) and not trained, more
    changed = {name for name in before if pieces(out)[name] != before[name]}
    assert changed and all("llla" in name or "la_nf" in name or "flows" in name or "-test" in name
                           or "-ood-" in name for name in changed)
    # Back to the first options: the same rows, bit for bit.
    assert by_name(sl.main(tiny("glyphs", out))) == by_name(rows) and not trained


def test_only_map_has_the_published_factor_on_the_loss(monkeypatch, tmp_path):
    real = sl.train_epoch
    factors = []

    def recorded(study, model, optimiser, loader, seed, epoch, factor=1.0):
        factors.append(factor)
        return real(study, model, optimiser, loader, seed, epoch, factor)

    monkeypatch.setattr(sl, "train_epoch", recorded)
    sl.main(tiny("clusters", tmp_path, "--members", 1, "--swag-epochs", 2,
                 methods=["map", "swag"]))
    of_map = factors.count(pytest.approx(0.02**2))
    assert of_map >= 1 and factors[:of_map] == pytest.approx([0.02**2] * of_map)
    assert len(factors) > of_map and set(factors[of_map:]) == {1.0}


def test_what_must_be_trained_again_is_said_first(copied, monkeypatch, capsys):
    """The iterates of rates that were not chosen are gone; MAP networks stay."""
    out, _ = copied()
    argv = tiny("glyphs", out, "--val-samples", 2)
    before = pieces(out)
    capsys.readouterr()
    sl.main(argv)
    said = capsys.readouterr().out
    choice = torch.load(io.BytesIO(before["seed1-swag-choice.pt"]), weights_only=True)
    rates = [f"{rate:g}" for rate in (0.03, 0.01) if rate not in stored_rates(choice)]
    assert len(rates) == 1
    note = said.index(f"SGD now runs at {rates[0]}")
    assert note < said.index(f"seed1-swag-lr{rates[0]} 1/3") and "seed1-map 1/2" not in said
    assert pieces(out)["seed1-map.pt"] == before["seed1-map.pt"]


def test_more_epochs_of_swag_continue(copied, capsys):
    out, _ = copied()
    before = pieces(out)
    capsys.readouterr()
    sl.main(tiny("glyphs", out, "--swag-epochs", 4))
    said = capsys.readouterr().out
    kept = [name for name in before if name.startswith("seed1-swag-lr") and name.endswith("-1.pt")]
    for name in kept:
        own = name.removesuffix("-1.pt")
        assert f"{own} 4/4" in said and f"{own} 3/4" not in said
        assert pieces(out)[name] == before[name]


def test_nothing_stale_is_read_after_fresh(tmp_path, monkeypatch):
    """MAP networks made anew are other ones here: so are all posteriors around them."""
    methods = ("map", "swag", "llla")
    argv = tiny("glyphs", tmp_path / "a", "--members", 1, methods=methods)
    argv += "--samples 4 --val-samples 2 --swag-epochs 2".split()
    first = by_name(sl.main(argv))
    real = sl.data_loss

    def another(outputs, labels, factor=1.0):
        return 0.5 * real(outputs, labels, factor)

    monkeypatch.setattr(sl, "data_loss", another)
    sl.main(tiny("glyphs", tmp_path / "a", "--fresh", "--members", 1, methods=["map"]))
    found = by_name(sl.main(argv))
    clean = by_name(sl.main([str(tmp_path / "b") if word == str(tmp_path / "a") else word
                             for word in argv]))
    assert found == clean
    assert all(found[key]["lpd"] != first[key]["lpd"] for key in found if key[2] is None)


def test_fresh_that_is_killed_leaves_nothing_old(copied, monkeypatch):
    out, _ = copied()
    calls = itertools.count()
    real = sl.train_epoch

    def dying(*arguments):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sl, "train_epoch", dying)
    with pytest.raises(KeyboardInterrupt):
        sl.main(tiny("glyphs", out, "--fresh"))
    assert list(pieces(out)) == ["seed1-map.pt"]  # its first epoch
    assert not (out / RUN / "results.json").exists()
    with pytest.raises(UserError, match="1 of 2 epochs; finish this"):
        sl.main(tiny("glyphs", out, "--eval"))


def same_pieces(left, right):
    """Two studies agree bit for bit, but for clocks."""
    assert list(left) == list(right)
    for name in left:
        a = dict(leaves(torch.load(io.BytesIO(left[name]), weights_only=True)))
        b = dict(leaves(torch.load(io.BytesIO(right[name]), weights_only=True)))
        assert a.keys() == b.keys(), name
        for key in a:
            if not key.endswith(("seconds", "examples_per_s")):
                assert torch.equal(a[key], b[key]) or a[key].isnan().all(), (name, key)


@pytest.mark.parametrize("function, call", [("train_epoch", 1), ("train_epoch", 4),
                                            ("train_epoch", 9), ("negative_elbo", 5),
                                            ("outputs_and_features", 30), ("delete_iterates", 0)])
def test_killed_and_resumed_equals_uninterrupted(studies, tmp_path, monkeypatch, function, call):
    """In MAP's second epoch, SWAG's, MC dropout's, LA-NF's, and in prediction: bit-equal pieces."""
    out, rows = studies("glyphs")
    calls = itertools.count()
    real = getattr(sl, function)

    def dying(*arguments):
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments)

    argv = tiny("glyphs", tmp_path, "--members", 1)
    monkeypatch.setattr(sl, function, dying)
    with pytest.raises(KeyboardInterrupt):
        sl.main(argv)
    for row in sl.main(argv):
        right = by_name(rows)[row["method"], "1", row.get("against")]
        assert row == right
    first = {name: own for name, own in pieces(out).items() if name.startswith("seed1-")}
    same_pieces(pieces(tmp_path), first)


# ---- Members that are trained apart, and several studies ----------------------------------------


def test_members_that_are_trained_apart_join_a_study(studies, tmp_path, monkeypatch):
    """As the top of the script says: their files are copied into its directory."""
    out, rows = studies("glyphs")
    apart = tiny("glyphs", tmp_path / "apart", "--members", 1, "--seed", 2)
    sl.main(apart)
    (tmp_path / "study" / RUN).mkdir(parents=True)
    for path in (tmp_path / "apart" / RUN).glob("seed2-*"):
        shutil.copy(path, tmp_path / "study" / RUN)
    real = sl.train_epoch

    def recorded(study, model, optimiser, loader, seed, *rest):
        assert seed == 1, "trains the member that is there"
        return real(study, model, optimiser, loader, seed, *rest)

    monkeypatch.setattr(sl, "train_epoch", recorded)
    # Its predictions are used, too: those for K = 2 were made although there was one member.
    monkeypatch.setattr(sl, "negative_elbo", functools.partial(only_once, sl.negative_elbo, []))
    found = sl.main(tiny("glyphs", tmp_path / "study"))
    assert by_name(found) == by_name(rows)
    same_pieces(pieces(tmp_path / "study"), pieces(out))


def only_once(real, calls, *arguments):
    """Six calls are one member's flow."""
    calls.append(1)
    assert len(calls) <= 6
    return real(*arguments)


def test_studies_that_share_a_member_are_not_pooled_as_independent(tmp_path):
    """--seed 1 and --seed 2 with two members each have network 2 in common."""
    rows = []
    for seed in (1, 2):
        rows += sl.main(tiny("glyphs", tmp_path, "--seed", seed, methods=["map"]))
    single = [row for row in rows if "against" not in row]
    ones, twos = common.pool(single, ["lpd"])
    assert (ones["method"], ones["seeds"]) == ("DE, K=1", 3) and "±" in ones["lpd"]
    assert (twos["method"], twos["seeds"]) == ("DE, K=2", 2) and "±" not in twos["lpd"]


def test_a_seed_of_zero_and_more_runs(tmp_path):
    argv = tiny("glyphs", tmp_path, "--seed", 0, "--runs", 2, methods=["map"])
    rows = [row for row in sl.main(argv) if "against" not in row]
    assert [row["seed"] for row in rows] == ["0", "1", "2", "3", "0+1", "2+3"]
    table = common.format_table(common.pool(rows, ["lpd"]))
    assert "-999999" not in table and "1.0000" not in table


def quick_in_float64(*argv):
    """A process of several; of three, the last one is on a machine of its own."""
    if os.environ["WORLD_SIZE"] == "3":
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = str(rank % 2)
        os.environ["LOCAL_WORLD_SIZE"] = str(2 - rank // 2)
    sl.FLOW_EPOCHS = 2
    conftest.run_in_float64(SCRIPT, *argv)


SAMPLES = "--samples 4 --val-samples 3".split()
SWAG = [*SAMPLES, "--swag-epochs", 3]


@pytest.mark.parametrize("dataset, size, methods, more", [
    ("glyphs", 3, ["swa", "swag"], [*SWAG, "--model", "wrn_16_4_bn"]),
    ("reviews", 2, ["llla", "la_nf"], [*SAMPLES, "--dropout", 0]),
    ("clusters", 2, ["swag", "llla", "la_nf"], SWAG)])
def test_processes_equal_one(tmp_path, dataset, size, methods, more, monkeypatch):
    """Also where machines have different numbers of processes."""
    more = [*more, "--members", 1]
    argv = [tiny(dataset, tmp_path / n, *more, methods=methods) for n in ("one", "several")]
    ranks = start_ranks(tmp_path, size, quick_in_float64, *argv[1])
    conftest.in_float64(sl, monkeypatch.setattr)
    rows = sl.main(argv[0])
    for rank in ranks:
        rank.value()
    found = json.loads((tmp_path / "several" / RUN / "results.json").read_text())
    for a, b in zip(rows, found["rows"], strict=True):
        for key in {"accuracy", "lpd", "ece15", "mae", "brier", "auroc_total"} & set(a):
            # Predictions are stored in float32.
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6), (a["method"], key)
    compared = 0
    for path in (tmp_path / "one" / RUN).glob("seed1-*.pt"):
        b = dict(leaves(torch.load(tmp_path / "several" / RUN / path.name, weights_only=True)))
        for key, value in leaves(torch.load(path, weights_only=True)):
            if key.startswith(("/net/", "/weights")):
                close(value, b[key], rtol=1e-8, atol=1e-10)
                compared += 1
            elif key.startswith(("/heads", "/flows")):  # their noise is float32
                close(value, b[key], rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared > 20


# ---- Room, missing pieces, misuse ---------------------------------------------------------------


def paper_study(tmp_path, dataset="cifar100"):
    """The paper's study: what `check_room` needs of it."""
    args = options(dataset, "--out-dir", tmp_path)
    train = SimpleNamespace(num_classes=100, shape=(3, 32, 32))
    parts = {"train": None, "val": None, "test": SimpleNamespace(dataset=range(10_000)),
             "ood-svhn": SimpleNamespace(dataset=range(26_032)),
             "ood-cifar10": SimpleNamespace(dataset=range(10_000))}
    return SimpleNamespace(args=args, run=SimpleNamespace(dir=tmp_path / "runs" / "x"),
                           sets=SimpleNamespace(train=train), parts=parts, molecules=False)


def test_the_papers_study_fits_on_a_disk(tmp_path, monkeypatch, capsys):
    """All samples of CIFAR-100's networks would take terabytes, all iterates 0.7."""
    free = {"free": 300e9}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**free))
    study = paper_study(tmp_path)
    capsys.readouterr()
    sl.check_room(study)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    needed = float(said.split("about ")[1].split(" GB")[0])
    # 30 members with 200 iterates of 2.8 million weights, and one with 2100; predictions.
    assert 66 + 23 + 5 < needed < 66 + 23 + 25
    free["free"] = 10e9
    with pytest.raises(UserError, match="--out-dir"):
        sl.check_room(study)
    # What is there already counts.
    study.run.dir.mkdir(parents=True)
    with open(study.run.dir / "seed1-map.pt", "wb") as file:
        file.truncate(int(needed * 1e9))
    sl.check_room(study)


def test_a_matrix_that_no_memory_holds_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "device_memory", lambda _: 2e6)
    with pytest.raises(UserError, match="650 numbers .* --structure diag"):
        sl.main(tiny("glyphs", tmp_path, "--width", 0.25))
    assert not (tmp_path / SCRIPT).exists()
    sl.main(tiny("glyphs", tmp_path, methods=["map"]))


def test_eval_predicts_another_set_and_makes_lost_predictions_anew(copied, monkeypatch):
    out, rows = copied()
    monkeypatch.setattr(sl, "negative_elbo", None)
    monkeypatch.setattr(sl, "train_epoch", None)
    lost = out / RUN / "seed2-swag-test.pt"
    content = lost.read_bytes()
    lost.unlink()
    save_images(out / "odd", "a", side=28)
    again = sl.main(tiny("glyphs", out, "--eval", "--predict", f"folder:{out / 'odd' / 'a'}"))
    assert by_name(again) == by_name(rows) and lost.read_bytes() == content
    header, *lines = (out / RUN / "predictions.csv").read_text().splitlines()
    assert header.startswith("method,file,predicted,confidence,total,aleatoric,epistemic")
    assert {line.split(",")[0] for line in lines} == set(sl.METHODS.values())


def test_missing_pieces_are_named(copied):
    out, _ = copied()
    (out / RUN / "seed2-llla.pt").unlink()
    with pytest.raises(UserError, match="seed2-llla.*without --eval"):
        sl.main(tiny("glyphs", out, "--eval"))
    state = torch.load(out / RUN / "seed2-swag-choice.pt", weights_only=True)
    rate = stored_rates(state)[1]
    (out / RUN / f"seed2-swag-lr{rate:g}-2.pt").unlink()
    (out / RUN / "seed2-swag-test.pt").unlink()
    with pytest.raises(UserError, match=f"lr{rate:g}-2.pt not found; delete"):
        sl.main(tiny("glyphs", out))


def test_rates_that_diverge_are_skipped(tmp_path, monkeypatch, capsys):
    argv = tiny("glyphs", tmp_path, "--members", 1, "--ensembles", 1, methods=["map", "swag"])
    argv += ["--swag-epochs", "2", "--samples", "2", "--val-samples", "2"]
    sl.main(argv + ["--swag-lrs", "1e9", "0.01"])
    assert "skipped: SWAG at the rate 1e+09" in capsys.readouterr().out
    assert not list((tmp_path / RUN).glob("*1e+09*.pt"))
    with pytest.raises(UserError, match="no value of --swag-lrs"):
        sl.main(argv + ["--swag-lrs", "1e9"])
    # Where MAP diverges, no rate is to blame.
    monkeypatch.setattr(sl, "data_loss", lambda outputs, *_: math.nan * outputs.sum())
    with pytest.raises(UserError, match="seed 1: the loss .* lower the learning rate"):
        sl.main(argv + ["--swag-lrs", "0.01", "--name", "other"])


def test_a_method_that_is_not_compared_stops_no_study(tmp_path, monkeypatch):
    """Without a rate for SWAG a study of SWA runs, and one to which SWAG is added does not."""
    monkeypatch.setattr(sl, "swag_samples", lambda mean, *_: math.nan * mean.expand(8, -1))
    argv = ["--members", 1, "--ensembles", 1, "--swag-epochs", 2, "--val-samples", 2]
    rows = sl.main(tiny("glyphs", tmp_path, *argv, methods=["map", "swa"]))
    assert {row["method"] for row in rows} == {"DE, K=1", "SWA, K=1"}
    monkeypatch.setattr(sl, "train_epoch", None)  # that no rate will do is stored
    with pytest.raises(UserError, match="no value of --swag-lrs"):
        sl.main(tiny("glyphs", tmp_path, *argv, "--samples", 2, methods=["map", "swa", "swag"]))


def test_swag_joins_swa_later_without_training(tmp_path, monkeypatch):
    """The iterates of its rate were kept, too."""
    argv = ["--members", 1, "--ensembles", 1, "--swag-epochs", 2, "--val-samples", 2]
    sl.main(tiny("glyphs", tmp_path, *argv, methods=["map", "swa"]))
    monkeypatch.setattr(sl, "train_epoch", None)
    rows = sl.main(tiny("glyphs", tmp_path, *argv, "--samples", 2, methods=["map", "swa", "swag"]))
    assert {row["method"] for row in rows} == {"DE, K=1", "SWA, K=1", "SWAG, K=1"}


def test_dropout_masks_differ_and_are_repeated(tmp_path):
    """Also of a transformer, whose fast path knows no dropout."""
    study = opened("reviews", tmp_path)
    net = sl.make_network(study.args, study.sets.train, 0.5)
    found = []
    for _ in range(2):
        networks = sl.dropout_networks(1, net, 2)
        found.append(sl.predict_networks(study, networks, "test", [1, 2])["log_probs"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:, 0], found[0][:, 1])


def test_own_images(tmp_path):
    """Large images in a folder whose name is that of a part of the study, and one more run. Two
    channels are constant."""
    rows = {}
    for name in ("choice", "val", "test"):
        own = tmp_path / "data" / name
        for part in ("train", "test"):
            save_images(own / part, "ab")
        argv = tiny(f"folder:{own}", tmp_path, "--image-size", 70, "--num-val", 3, "--swag-lrs",
                    0.01, "--predict", f"folder:{own}/test", "--samples", 2, "--val-samples", 2,
                    "--swag-epochs", 2, "--ensembles", 1, "--members", 1, "--name", name,
                    methods=["map", "swag"])
        rows[name] = sl.main(argv)
        assert {row["set"] for row in rows[name]} == {name}
        header, *lines = (tmp_path / SCRIPT / name / "predictions.csv").read_text().splitlines()
        assert header == "method,file,label,predicted,confidence,total,aleatoric,epistemic"
        assert [line.split(",")[:3] for line in lines[:2]] == [["DE", "a/0.png", "a"],
                                                               ["DE", "a/1.png", "a"]]
        assert len(lines) == 2 * 12
    # Other images in the same place are predicted anew.
    Image.effect_noise((70, 70), 90).convert("RGB").save(own / "test" / "a" / "0.png")
    sl.main(argv)
    again = (tmp_path / SCRIPT / name / "predictions.csv").read_text().splitlines()[1:]
    assert again[0] != lines[0] and again[1:12] == lines[1:12]


def tiny_network(args, train_set, dropout):
    """A user's own network: features, and a linear head."""
    extractor = nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.Tanh(), nn.Dropout(dropout))
    extractor(torch.zeros(1, *train_set.shape))
    return sl.Network(extractor, nn.Linear(6, train_set.num_classes))


def run_with_own_network(*argv):
    sl.NETWORKS["mine"] = tiny_network
    run_script(SCRIPT, *argv)


def test_a_network_of_ones_own_is_one_entry(tmp_path):
    argv = tiny("glyphs", tmp_path, "--model", "mine", "--members", 1)
    conftest.Child(tmp_path, run_with_own_network, *argv).value()
    rows = json.loads((tmp_path / RUN / "results.json").read_text())["rows"]
    assert {row["method"].split(",")[0] for row in rows} == set(sl.METHODS.values())


@pytest.mark.parametrize("network, said", [
    (lambda *_: nn.Linear(3, 2), "--model mine: its function must return Network"),
    (lambda *_: (nn.Linear(3, 2), 2), "--model mine: its function must return Network"),
    (lambda *_: sl.Network(nn.Flatten(), nn.Linear(784, 3)), "linear layer of 10 outputs"),
    (lambda *_: sl.Network(nn.Linear(5, 784), nn.Linear(784, 10)), "mine fails on 24 example"),
    (lambda args, train_set, _: sl.Network(nn.Flatten(), nn.Linear(7, 10)), "--model mine fails"),
    (lambda args, train_set, _: tiny_network(args, train_set, 0.0).train(), "no error"),
])
def test_impossible_networks_are_refused_before_training(tmp_path, monkeypatch, network, said):
    monkeypatch.setitem(sl.NETWORKS, "mine", network)
    args = sl.parse_args(tiny("glyphs", tmp_path, "--model", "mine"))
    train = data.evenly(data.load("glyphs", "test"), 48)
    if said == "no error":
        sl.check_network(train, args)
        monkeypatch.setitem(sl.NETWORKS, "mine", lambda *_: without_dropout(train))
        said = "has no dropout"
    with pytest.raises(UserError, match=said):
        sl.check_network(train, args)


def without_dropout(train_set):
    features = train_set.images[0].numel()
    return sl.Network(nn.Flatten(), nn.Linear(features, train_set.num_classes))


def test_what_depends_on_other_options(monkeypatch, capsys):
    large = options("cifar10", "--preset", "cifar10_wrn_28_10")
    assert (large.structure, large.epochs, large.swag_epochs) == ("diag", 200, 25)
    assert options("cifar10", "--methods", "swag").methods == ["map", "swag"]
    capsys.readouterr()
    args = options("cifar10", "--members", 2)
    assert "skipped: ensembles of 5, 10, 20" in capsys.readouterr().out
    assert sl.list_ensembles(args) == [[1], [2], [1, 2]]
    assert sl.sample_counts(args, "swag") == [10, 20, 40, 100, 200]
    # Preset sizes that exceed the number of members become the ensemble of all.
    assert sl.list_ensembles(options("cifar10", "--members", 4))[-1] == [1, 2, 3, 4]
    explicit = options("cifar10", "--members", 4, "--ensembles", 1, 5)
    assert sl.list_ensembles(explicit) == [[1], [2], [3], [4]]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match="float64"):
        options("clusters", "--device", "mps")


def test_what_is_not_here_is_said():
    for word in ("IVON", "Kronecker", "probit", "bridge", "GLM", "planar"):
        assert word in sl.__doc__.split("Not here")[1], word


@pytest.mark.parametrize("argv, said", [
    (["--dataset", "clusters", "--target", "homo"], "--target has no effect on clusters"),
    (["--dataset", "reviews", "--vocab", "x"], "--vocab has no effect on reviews"),
    (["--dataset", "reviews", "--augment"], "--augment has no effect on reviews"),
    (["--dataset", "reviews", "--num-val", "5"], "--num-val has no effect on reviews"),
    (["--dataset", "sst2", "--image-size", "5"], "--image-size has no effect on sst2"),
    (["--dataset", "clusters", "--structure", "diag"], "--structure has no effect on molecules"),
    (["--methods", "map", "--samples", "9"], "--samples has no effect without --methods swag or"),
    (["--methods", "llla", "--flow-layers", "3"], "without --methods la_nf"),
    (["--dataset", "reviews", "--model", "painn"], "--model painn"),
    (["--model", "nosuch"], "--model nosuch: choose one of wrn_10_4"),
    (["--dataset", "qm9", "--target", "nosuch"], "target 'nosuch' is unknown"),
    (["--model"], "expected one argument"),
    (["--members", "2", "--ensembles", "3"], "--ensembles 3: must not exceed --members 2"),
    (["--samples", "2", "--members", "3", "--ensembles", "3"], "at least one for each member"),
    (["--swag-epochs", "1"], "at least 2"),
    (["--num-val", "100000"], "--num-val 100000"),
    (["--dataset", "clusters", "--limit-train", "1"], "--limit-train: 1: must be a number, at lea"),
    (["--limit-train", "2"], "raise --limit-train"),
])
def test_misuse_is_one_line(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        sl.main(["--out-dir", str(tmp_path), *CPU, *argv])
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())  # nothing is claimed
