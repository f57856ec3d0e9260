"""swag_laplace_ensembles.py against laplace-torch, autograd, textbook forms and loops; its runs: a
study of each kind of data, resuming, processes, options, published networks, misuse."""

import collections
import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import types
import typing
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, leaves, start_ranks
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


def test_swag_floor_is_on_the_variance_and_one_iterate_is_refused():
    moments = sl.swag_moments(torch.ones(5, 1).double())
    moved = sl.swag_samples(*moments, unit(1), torch.zeros(1, 5).double()) - 1
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
    last = sl.LastLayer(x, None, True, molecule, torch.randn(n).double(), scale)
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
    assert sl.log_predictive_density(found, last.labels, True) == pytest.approx(lpd, rel=1e-12)
    own = sl.head_outputs(theta[None], last)
    close(own[0], torch.stack(atoms_loop(theta, last), -1))
    close(sl.log_density(own, last.labels, energies=True),
          Normal(own[..., 0], own[..., 1].sqrt()).log_prob(last.labels))
    close(sl.data_loss(own[0], last.labels, True, 3.0), 3 * nll_loop(theta, last))


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
    """Whatever the signs of the eigenvectors."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    raw, last, theta, net = classes_problem()
    peer = Laplace(net, "classification", subset_of_weights="last_layer",
                   hessian_structure=structure, backend=BackPackGGN)
    peer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(raw, last.labels), 16))
    peer.prior_precision = torch.tensor(0.3).double()
    if structure == "full":
        covariance = peer.posterior_covariance
        spectrum = sl.full_spectrum(theta, last)
        turned = spectrum._replace(basis=-spectrum.basis)
        noise = torch.randn(3, 24).double()
        close(sl.laplace_samples(theta, spectrum, 1.0, noise),
              sl.laplace_samples(theta, turned, 1.0, noise))
    else:
        covariance = torch.diag(peer.posterior_variance)
        spectrum = sl.diagonal_spectrum(theta, last)
    root = (sl.laplace_samples(theta, spectrum, 0.3, unit(24)) - theta).T
    close(root @ root.T, covariance, rtol=1e-7, atol=1e-9)


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
        samples = sl.laplace_samples(theta, spectrum, delta, noise)
        probs = torch.stack([logits_at(sample, last.x, 4).softmax(-1) for sample in samples])
        close(score, probs.mean(0)[range(40), last.labels].log().mean(), rtol=1e-9)


@pytest.mark.parametrize("d, gap", [(1, 0.3), (4, 4.0)])
def test_the_curvature_of_molecules_is_the_hessian(d, gap):
    last, theta, _ = molecules_problem(d=d, gap=gap)
    right = torch.autograd.functional.hessian(lambda t: nll_loop(t, last), theta)
    close(dense(sl.energy_spectrum(theta, last)), right, rtol=1e-7, atol=1e-7)


def test_where_the_hessian_is_indefinite_there_is_no_posterior():
    last, theta, _ = molecules_problem(gap=0.01)  # r = 0: -1 / (2 v^2) g_v g_v^T is left
    spectrum = sl.energy_spectrum(theta, last)
    noise = torch.randn(5, 10).double()
    lowest = spectrum.values.min().item()
    assert lowest < -1e-3
    assert sl.laplace_samples(theta, spectrum, -lowest / 2, noise).isnan().any(1).all()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores):
        assert math.isfinite(score) == (delta > -lowest), delta
    lpds = sl.finite_only(dict(zip(sl.LAPLACE_GRID, scores)))
    assert sl.choose(lpds, "x") > -lowest


def test_best_of_scores(capsys):
    lpds = {"a": math.nan, "b": -2.0, "c": -1.0, "d": -1.0, "e": math.inf}
    assert sl.choose(sl.finite_only(lpds), "x") == "c"
    with pytest.raises(UserError, match="--swag-lrs"):
        sl.choose(sl.finite_only({"a": math.nan, "b": -math.inf}), "--swag-lrs")
    # A precision at an end of its grid is noted, also where there is no posterior at the other.
    member = SimpleNamespace(seed=3)
    assert sl.choose_precision(member, "llla", {0.1: math.nan, 1.0: -2.0, 10.0: -3.0}) == 1.0
    assert capsys.readouterr().out == ""
    assert sl.choose_precision(member, "la_nf", {10.0: -1.0, 1.0: -3.0, 0.1: -3.0}) == 10.0
    assert "note: seed3-la_nf: the chosen prior precision 10 is an end" in capsys.readouterr().out


def test_the_cpu_helps_where_a_gpu_fails(monkeypatch):
    """Beyond a GPU solver's limit, as at 25,443 numbers of CIFAR-100."""
    h = torch.randn(5, 5).double()
    h = h + h.T
    real = torch.linalg.eigh

    def limited(matrix):
        if not torch.is_tensor(matrix):
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_INVALID_VALUE")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", limited)
    values, vectors = sl.eigh(SimpleNamespace(device="cpu", cpu=lambda: h))
    close(vectors @ torch.diag(values) @ vectors.T, h, atol=1e-12)


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


def brute_elbo(own, theta, h, base_precision, precision, base, log_likelihood, scale):
    """-ELBO of one flow, the density of the base by torch, the log-determinant by autograd."""
    def run(t):
        return sl.apply_flow(own, t[None])[0][0]

    p = len(theta)
    gaussian = MultivariateNormal(theta, precision_matrix=h + base_precision * unit(p))
    jacobian = torch.func.jacrev(run)(base)
    log_q = gaussian.log_prob(base) - torch.linalg.slogdet(jacobian).logabsdet
    prior = MultivariateNormal(torch.zeros(p).double(), unit(p) / precision)
    return log_q - prior.log_prob(run(base)) - scale * log_likelihood(run(base))


@pytest.mark.parametrize("kind", ["full", "diag", "molecules"])
def test_negative_elbo_by_brute_force(kind):
    rows = torch.tensor([4, 1, 7])
    base_precision = 0.7
    if kind == "molecules":
        last, theta, sizes = molecules_problem()
        train = SimpleNamespace(sizes=sizes)
        study = SimpleNamespace(energies=True, sets=SimpleNamespace(train=train))
        spectrum = sl.energy_spectrum(theta, last)
        base_precision = 1 - spectrum.values.min().item()
    else:
        _, last, theta, _ = classes_problem(d=3, c=3)
        study = SimpleNamespace(energies=False)
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
        found = sl.negative_elbo(own, theta, spectrum, base_precision, precision, noise, batch, n)
        base = sl.laplace_samples(theta, spectrum, base_precision, noise)
        for g in range(3):
            one = [tensor[g:g + 1] for tensor in own]
            right = brute_elbo(one, theta, dense(spectrum), base_precision, precision[g],
                               base[g % draws], log_likelihood, n / 3)
            close(found[g], right, rtol=1e-8)


# ---- Mixtures and ensembles ---------------------------------------------------------------------


def mixtures_at(samples, counts):
    """The Mixtures of the first n samples, for each n of `counts`."""
    running = sl.RunningMixture()
    found = []
    for sample in samples:
        running.add(sample)
        if running.count in counts:
            found.append(running.mixture())
    return found


def test_mixtures_of_members_are_those_of_all_their_samples():
    outputs = 3 * torch.randn(3, 20, 7, 4).log_softmax(-1)
    sizes = [2, 5, 20]
    members = [mixtures_at(own, sizes) for own in outputs]
    for at, n in enumerate(sizes):
        found = sl.mix([own[at] for own in members])
        rows = outputs[:, :n].flatten(0, 1).double()
        close(found.log_probs, rows.exp().mean(0).log())
        close(found.entropy, torch.special.entr(rows.exp()).sum(-1).mean(0))
        assert found.samples == 3 * n
    far, = mixtures_at(torch.full((3, 1, 2), -900.0), [3])
    close(far.log_probs, [[-900, -900]])


def test_published_combinations():
    assert sl.member_combinations(30, 2)[0] == [5, 11]
    assert sl.member_combinations(3, 1) == [[1], [2], [3]]
    for members, k in ((30, 20), (4, 3)):
        right = []
        for i in range(1, 31):
            random.seed((k + i) * (k + i + 1) // 2 + i)
            chosen = sorted(random.sample(list(range(1, members + 1)), k))
            if chosen not in right:
                right.append(chosen)
        state = random.getstate()
        assert sl.member_combinations(members, k) == right
        assert random.getstate() == state  # nobody else's numbers are used


def study_of(folder=None, **changes):
    """What Evaluation needs of a study of three members and eight samples."""
    args = dict(ensembles=[1, 3], members=3, runs=1, samples=[8], flow_layers=[2], ood=[],
                methods=["map", "swag"])
    return SimpleNamespace(args=SimpleNamespace(**args | changes), energies=False, seeds=[1, 2, 3],
                           run=SimpleNamespace(dir=folder))


def stored(study, samples, counts):
    """What is stored of samples [S, N, C]."""
    rows = torch.arange(samples.shape[1])
    return sl.summarise(study, [(rows, outputs) for outputs in samples], counts)


def test_every_member_of_an_ensemble_gives_the_same_number_of_samples():
    study = study_of()
    outputs = torch.randn(3, 8, 5, 4).log_softmax(-1)
    members = {seed: stored(study, own, [2, 8]) for seed, own in enumerate(outputs, 1)}
    one, _, _, three = sl.list_ensembles(study, "swag")  # 8 // 3 = 2
    found = sl.predict_together(study, members, three)
    probs = outputs[:, :2].flatten(0, 1).double().exp()
    close(found.log_probs, probs.mean(0).log(), rtol=1e-6)
    assert found.samples == 6
    found = sl.predict_together(study, members, one)
    close(found.log_probs, outputs[0].double().exp().mean(0).log(), rtol=1e-6)
    study.energies = True
    samples = torch.rand(3, 8, 5, 2).double() + 0.1
    members = {seed: stored(study, own, [8]) for seed, own in enumerate(samples, 1)}
    found = sl.predict_together(study, members, three)
    close(found.means, samples[:, :2, :, 0].flatten(0, 1))
    close(found.variances, samples[:, :2, :, 1].flatten(0, 1))


def test_metrics_of_classes_and_of_molecules():
    each = (2 * torch.randn(4, 60, 3)).double().log_softmax(-1)
    labels = torch.randint(3, (60,))
    (mixture,) = mixtures_at(each, [4])
    own = sl.ClassPrediction(*mixture)
    assert own.metrics(labels)["lpd"] == pytest.approx(common.lpd(each, labels), rel=1e-12)
    right = common.ensemble_uncertainty(each)
    for name, values in own.uncertainties().items():
        close(values, right[name], atol=1e-12)

    means = torch.randn(4, 60).double()
    variances = torch.rand(4, 60).double() + 0.1
    energies = sl.EnergyPrediction(means, variances)
    targets = torch.randn(60).double()
    metrics = energies.metrics(targets)
    assert metrics["mae_milli"] == pytest.approx(1000 * (means.mean(0) - targets).abs().mean())
    found = energies.uncertainties()
    close(found["total"]**2, variances.mean(0) + means.var(0, correction=0))
    close(found["epistemic"]**2, means.var(0, correction=0))
    close(found["total"]**2, found["aleatoric"]**2 + found["epistemic"]**2)
    # What is compared between methods is what the table shows.
    for prediction, truth in ((own, labels), (energies, targets)):
        shown = prediction.metrics(truth)
        for name, values in prediction.scores(truth).items():
            assert values.mean().item() == pytest.approx(shown[name], rel=1e-12)


def test_one_sample_has_no_epistemic_uncertainty():
    """Rounding would give it some, which would tell two sets apart."""
    log_probs = torch.randn(9, 3).double().log_softmax(1)
    ones = torch.ones(2, 9).double()
    for count in (1, 2):
        classes = sl.ClassPrediction(log_probs, log_probs[:, 0], count)
        energies = sl.EnergyPrediction(ones[:count], ones[:count])
        for own in (classes, energies):
            assert ("epistemic" in own.uncertainties()) == (count == 2)


def test_evaluation_is_a_function_of_stored_predictions(tmp_path):
    """Intervals are those of paired examples; the union of OOD sets is one set; costs add up."""
    study = study_of(tmp_path, ood=["near", "near+far", "gone"], samples=[4, 8])
    labels = torch.randint(4, (50,))
    test = data.ImageSet("x", torch.zeros(50, 1, 1, 1), labels, 4, (0.0,), (1.0,))
    study.sets = SimpleNamespace(test=test, ood={"near": None, "far": None})
    samples = {}
    for part, n in (("test", 50), ("ood-near", 30), ("ood-far", 20)):
        for seed, method in itertools.product((1, 2, 3), ("map", "swag")):
            count = 1 if method == "map" else 8
            own = (2 * torch.randn(count, n, 4)).double().log_softmax(-1)
            samples[method, seed, part] = own
            state = stored(study, own, [1, 2, 4, 8])
            state["cost"] = torch.tensor([[0.5, 0.25], [100.0, 10.0]], dtype=torch.float64)
            torch.save(state, tmp_path / f"seed{seed}-{method}-{part}.pt")
    rows, differences = sl.evaluate(study)
    assert [row["method"].split(", ")[-1] for row in rows] == sorted(
        row["method"].split(", ")[-1] for row in rows)  # K, and within it the methods

    def mixture(method, part, seeds=(1, 2, 3), share=2):
        share = min(share, 1 if method == "map" else 8)
        return torch.cat([samples[method, seed, part][:share] for seed in seeds])

    row, = [r for r in rows if r["method"] == "SWAG, S=8, K=3" and "against" not in r]
    right = common.lpd(mixture("swag", "test"), labels)
    assert row["lpd"] == pytest.approx(right, rel=1e-5) and row["seed"] == "1+2+3"
    assert row["ms"] == pytest.approx(1000 * 3 * (0.5 + 2 * 0.25) / 50) and row["bytes"] == 360
    base = common.lpd(mixture("map", "test"), labels)
    assert row["lpd_minus_de"] == pytest.approx(right - base, rel=1e-4)
    found = {(d.method, d.k, d.metric): d for d in differences}
    assert len(found) == len(differences) == 8
    each = []
    for seed in (1, 2, 3):
        pair = []
        for method in ("swag", "map"):
            probs = mixture(method, "test", [seed], 4).exp().mean(0)
            pair.append(probs[range(50), labels].log())
        each.append(pair[0] - pair[1])
    of_examples = torch.stack(each).mean(0).numpy()
    d = found["SWAG, S=4", 1, "lpd"]
    assert d.mean == pytest.approx(of_examples.mean(), rel=1e-4)
    assert d.interval == pytest.approx(1.96 * common.standard_error(of_examples), rel=1e-4)

    pairs = {key[::2]: row for key, row in by_name(rows).items() if key[1] == "1+2+3" and key[2]}
    assert {against for _, against in pairs} == {"near", "near+far"}  # "gone" was not found
    both = torch.cat([mixture("swag", part) for part in ("ood-near", "ood-far")], 1)
    for kind in ("total", "epistemic"):
        right = common.ood_metrics(common.ensemble_uncertainty(mixture("swag", "test"))[kind],
                                   common.ensemble_uncertainty(both)[kind], larger_means="ood")
        own = pairs["SWAG, S=8, K=3", "near+far"]
        for metric, value in right.items():
            assert own[f"{metric}_{kind}"] == pytest.approx(value, abs=1e-3)
    assert "auroc_epistemic" not in next(r for r in rows if r["method"] == "DE, K=1")
    assert sl.ood_parts(["a+b", "folder:a+b"]) == {"a+b": ["a", "b"], "folder:a+b": ["folder:a+b"]}


# ---- Networks -----------------------------------------------------------------------------------
# They are written out a second time, with weights by their published names: so the names are
# checked, too.

REFERENCES = torch.linspace(-3, 4, 101).double()


def network(name, width=1.0, dropout=0.0, **train_set):
    """A network of the tables, for a training set with these properties."""
    args = SimpleNamespace(model=name, width=width, dropout=dropout, freeze=False, epochs=1,
                           device=torch.device("cpu"))
    kind = data.ImageSet if "shape" in train_set else data.TextSet
    own = kind.__new__(kind)
    for key, value in train_set.items():
        if key == "shape":
            key, value = "images", torch.zeros(1, *value)
        object.__setattr__(own, key, value)
    return sl.make_network(args, own)


@pytest.mark.parametrize("name, classes, count", [
    ("wrn_16_4", 10, 2_750_698), ("wrn_16_4", 100, 2_773_828), ("wrn_28_10", 10, 36_488_170),
    ("wrn_16_4_bn", 10, 2_748_890), ("bert_256_4", 2, 13_272_322)])
def test_published_numbers_of_parameters(name, classes, count):
    kind = {"vocab": range(30522)} if name.startswith("bert") else {"shape": (3, 32, 32)}
    net = network(name, num_classes=classes, **kind)
    assert sum(p.numel() for p in net.parameters()) == count


class Published(dict):
    """Weights by their published names, drawn where they are first used, so that the network that
    uses them also says their shapes."""

    def draw(self, name, *shape, near=0.0):
        return self.setdefault(name, near + 0.3 * torch.randn(shape)).double()

    def linear(self, x, name, d_out, bias=True):
        weight = self.draw(f"{name}.weight", d_out, x.shape[-1])
        return F.linear(x, weight, self.draw(f"{name}.bias", d_out) if bias else None)

    def layer_norm(self, x, name):
        d = x.shape[-1]
        weight = self.draw(f"{name}.LayerNorm.weight", d, near=1.0)
        return F.layer_norm(x, (d,), weight, self.draw(f"{name}.LayerNorm.bias", d), 1e-12)

    def conv(self, x, name, c_out, kernel, stride=1):
        weight = self.draw(f"{name}.weight", c_out, x.shape[1], kernel, kernel)
        return F.conv2d(x, weight, stride=stride, padding=kernel // 2)

    def norm(self, x, name, kind):
        """FRN with its threshold, or batch norm in eval mode and ReLU."""
        c = x.shape[1]
        if kind == "bn":
            keys = ("running_mean", "running_var", "weight", "bias")
            own = [self.draw(f"{name}.bn.{key}", c, near=2.0) for key in keys]
            self[f"{name}.bn.num_batches_tracked"] = torch.tensor(7)
            return F.batch_norm(x, *own).relu()
        self[f"{name}.eps"] = torch.full((1, c, 1, 1), 1e-6)
        keys = ("gamma", "beta", "tau")
        gamma, beta, tau = [self.draw(f"{name}.{key}", 1, c, 1, 1) for key in keys]
        power = x.square().mean((2, 3), keepdim=True) + 1e-6
        return torch.maximum(gamma * x / power.sqrt() + beta, tau)

    def load_into(self, net):
        """`net`, in float64, with these weights."""
        net = net.double()
        net.load_state_dict(sl.state_here(net, self))  # strict
        return net.eval()


def wrn_by_hand(p, x, channels=(4, 8, 16, 32), blocks=2, classes=5, kind="frn"):
    """(logits, features) of a published WRN; the shortcut of a transition sees norm_1(x)."""
    c_in = channels[0]
    x = p.conv(x, "backbone.conv_1", c_in, 3)
    for stage, c in enumerate(channels[1:], 1):
        for index in range(blocks):
            name = f"backbone.block_{stage}.layer.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            h = p.norm(x, f"{name}.norm_1", kind)
            if c_in != c or stride == 2:
                x = p.conv(h, f"{name}.conv_shortcut", c, 1, stride)
            h = p.norm(p.conv(h, f"{name}.conv_1", c, 3, stride), f"{name}.norm_2", kind)
            x = x + p.conv(h, f"{name}.conv_2", c, 3)
            c_in = c
    features = p.norm(x, "backbone.norm_1", kind).mean((2, 3))
    return p.linear(features, "head.fc", classes), features


@pytest.mark.parametrize("name, kind", [("wrn_16_4", "frn"), ("wrn_16_4_bn", "bn")])
@pytest.mark.parametrize("side", [8, 7])
def test_wide_resnet_by_hand(name, kind, side):
    x = torch.randn(2, 3, side, side).double()
    p = Published()
    right = wrn_by_hand(p, x, kind=kind)
    net = p.load_into(network(name, width=0.125, num_classes=5, shape=(3, side, side)))
    for own, value in zip(net(x), right):
        close(own, value, rtol=1e-9)


@pytest.mark.parametrize("side", [1, 5])
def test_frn_is_its_formula(side):
    zero = torch.zeros(2, 4, side, side, dtype=torch.bfloat16, requires_grad=True)
    y = sl.FRN(4)(zero)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and (y == 0).all() and zero.grad.isfinite().all()


def bert_by_hand(p, tokens, dim=16, layers=2, vocabulary=30):
    """The features of a published BERT: attention of eight heads and feed-forward, written out."""
    b, length = tokens.shape
    root = "backbone.model."
    x = p.draw(f"{root}embeddings.word_embeddings.weight", vocabulary, dim)[tokens]
    x = x + p.draw(f"{root}embeddings.position_embeddings.weight", 512, dim)[:length]
    x = x + p.draw(f"{root}embeddings.token_type_embeddings.weight", 2, dim)[0]
    x = p.layer_norm(x, f"{root}embeddings")
    for layer in range(layers):
        name = f"{root}encoder.layer.{layer}"
        q, k, v = [p.linear(x, f"{name}.attention.self.{part}", dim).view(b, length, 8, -1)
                   .transpose(1, 2) for part in ("query", "key", "value")]
        mixed = F.scaled_dot_product_attention(q, k, v, (tokens > 0)[:, None, None])
        mixed = p.linear(mixed.transpose(1, 2).flatten(2), f"{name}.attention.output.dense", dim)
        x = p.layer_norm(x + mixed, f"{name}.attention.output")
        wide = F.gelu(p.linear(x, f"{name}.intermediate.dense", 8 * dim))
        x = p.layer_norm(x + p.linear(wide, f"{name}.output.dense", dim), f"{name}.output")
    return p.linear(x[:, 0], f"{root}pooler.dense", dim).tanh()


def test_bert_by_hand():
    """Padding is inert; dropout acts in training, but not in the pooler."""
    is_token = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    tokens = torch.randint(1, 30, (3, 9)).where(is_token, 0)
    p = Published()
    features = bert_by_hand(p, tokens)
    logits = p.linear(features, "head.fc", 2)
    net = network("bert_256_2", width=1 / 16, dropout=0.3, num_classes=2, vocab=range(30))
    net = p.load_into(net)
    close(net(tokens)[0], logits, rtol=1e-9)
    net(tokens[:0])[0].sum().backward()  # an empty part of a batch: DDP waits for its gradients
    assert not any(p.grad.any() for p in net.parameters())
    with torch.no_grad():  # PyTorch's fast path
        close(net(tokens)[1], features, rtol=1e-9)
        close(net(F.pad(tokens, (0, 259)))[0], net(tokens)[0], rtol=1e-12)
        net.train()
        assert not torch.equal(net(tokens)[0], net(tokens)[0])
        net.extractor.dropout.eval()
        net.extractor.layers.eval()
        close(net(tokens)[1], features, rtol=1e-9)


def test_bert_starts_as_published():
    """Its head is initialised by PyTorch."""
    net = network("bert_256_2", width=0.25, num_classes=2, vocab=range(500))
    for name, parameter in net.extractor.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name
    assert net.head.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.2)
    assert (net.head.bias != 0).all()


def molecules_of(atoms):
    """[(numbers, positions float64), ...] as one graph, in float64."""
    sizes = torch.tensor([len(numbers) for numbers, _ in atoms])
    numbers = torch.cat([torch.tensor(numbers) for numbers, _ in atoms])
    positions = torch.cat([places for _, places in atoms])
    own = data.MoleculeSet("x", numbers, positions, sizes, sizes.double(), REFERENCES)
    (batch,) = data.SequenceLoader(own, len(own), cutoff=3.0).epoch()
    return batch.molecules._replace(positions=positions)


def painn_by_hand(p, numbers, places, cutoff=3.0, f=8):
    """(mean, variance) of one molecule, each atom [i] with each other [i, j]."""
    def two(x, name, d_out):
        return p.linear(F.silu(p.linear(x, f"{name}.0", f)), f"{name}.3", d_out)

    n = len(places)
    numbers = torch.tensor(numbers)
    offset = places - places[:, None]
    d = offset.norm(dim=-1, keepdim=True) + unit(n)[..., None]
    rbf = torch.cat([torch.sin(k * math.pi * d / cutoff) / d for k in range(1, 6)], -1)
    near = (d < cutoff) * ~torch.eye(n, dtype=torch.bool)[..., None]
    cut = 0.5 * (torch.cos(math.pi * d / cutoff) + 1) * near
    s = p.draw("backbone.0.atom_embedding.weight", 101, f)[numbers]
    p.draw("backbone.0.radial_basis.freqs", 5)
    v = torch.zeros(n, 3, f).double()
    for layer in range(2):
        name = f"backbone.0.message_blocks.{layer}"
        phi = two(s, f"{name}.scalar_network", 3 * f)
        vv, ss, vs = (phi * p.linear(rbf, f"{name}.rbf_network.0", 3 * f) * cut).chunk(3, -1)
        v = v + (vv[:, :, None] * v + vs[:, :, None] * (offset / d)[..., None]).sum(1)
        s = s + ss.sum(1)
        name = f"backbone.0.update_blocks.{layer}"
        uv = p.linear(v, f"{name}.U.0", f, bias=False)
        vv = p.linear(v, f"{name}.V.0", f, bias=False)
        scales = two(torch.cat([vv.norm(dim=1), s], -1), f"{name}.scalar_vector_network", 3 * f)
        a_vv, a_sv, a_ss = scales.chunk(3, -1)
        s = s + a_ss + a_sv * (uv * vv).sum(1)
        v = v + uv * a_vv[:, None]
    features = F.silu(p.linear(s, "backbone.1.partial_readout_network.0", f // 2))
    mean, raw = p.linear(features, "head.head.readout_network", 2).T
    mu = p.draw("head.head.mean")
    std = p.draw("head.head.std", near=2.0)
    known = mu + p.draw("head.head.atom_refs", 100, 1)[numbers, 0]
    p.draw("head.head.prediction_finalizer.scale_and_shift.scale")
    variance = ((F.softplus(raw) + 1e-8) * std).square()
    return torch.stack([(mean * std + known).sum(), variance.sum()])


def test_painn_is_a_sum_over_pairs():
    assert sum(p.numel() for p in sl.PaiNN((0.0, 1.0), REFERENCES).parameters()) == 589_250
    p = Published()
    atoms = [([1, 6, 7, 8, 1, 9][:n], 1.5 * torch.randn(n, 3).double()) for n in (5, 1, 3, 6)]
    right = [painn_by_hand(p, *molecule) for molecule in atoms]
    net = p.load_into(sl.PaiNN((0.0, 1.0), REFERENCES, 8, 2, radial=5, cutoff=3.0))
    found, _ = net(molecules_of(atoms))
    close(found, torch.stack(right), rtol=1e-9)
    outputs, _ = net.train()(molecules_of(atoms[1:2]))  # a lone atom
    outputs.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_painn_has_the_published_dropout():
    """After the hidden units of both networks of a layer, the filter, U and V, and the readout."""
    net = sl.PaiNN((0.0, 1.0), REFERENCES, 8, 2, dropout=0.5, cutoff=3.0).train()
    widths = []
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.5
            module.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[-1]))
    net(molecules_of([([1, 6], torch.tensor([[0.0, 0, 0], [1, 0, 0]]))]))
    assert sorted(widths) == sorted(2 * [24, 8, 8, 8, 8] + [4])


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


# ---- Published checkpoints ----------------------------------------------------------------------


@pytest.fixture
def save_published(monkeypatch):
    """save(path, class, seed, state): a file as the authors' script writes it, with objects of a
    stand-in of OmegaConf, which is gone again when the file is read."""
    modules = {"omegaconf": types.ModuleType("omegaconf")}
    for name in ("dictconfig.DictConfig", "nodes.AnyNode", "base.ContainerMetadata"):
        module, kind = name.split(".")
        own = modules.setdefault(f"omegaconf.{module}", types.ModuleType(f"omegaconf.{module}"))
        setattr(own, kind, type(kind, (), {"__module__": f"omegaconf.{module}"}))

    def node(value):
        is_leaf = not isinstance(value, dict)
        kind = modules["omegaconf.nodes"].AnyNode if is_leaf else (
            modules["omegaconf.dictconfig"].DictConfig)
        made = kind()
        made._metadata = modules["omegaconf.base"].ContainerMetadata()
        made._metadata.ref_type = typing.Any
        made._metadata.resolver_cache = collections.defaultdict(dict)
        if is_leaf:
            made._val = value
        else:
            made._content = {key: node(item) for key, item in value.items()}
            for child in made._content.values():
                child._parent = made
        return made

    def save(path, kind, seed, state):
        config = {"inference": {"init": {"_target_": f"src.inference.{kind}"}}, "seed": seed}
        with monkeypatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            torch.save({"cfg": node(config), "state_dict": state, "val_lpd": 0.0}, path)
        return path

    return save


def vector_of(tensors):
    """The parameters as one vector, in the order of the file, with FRN's epsilons."""
    names = [name for name in tensors if ".running" not in name and "num_batches" not in name]
    return torch.cat([tensors[name].flatten() for name in names])


@pytest.mark.parametrize("kind, name", [("frn", "wrn_16_4"), ("bn", "wrn_16_4_bn")])
def test_published_iterates_are_networks(save_published, tmp_path, kind, name):
    """Each iterate, as a network, gives the published outputs; without FRN's epsilons."""
    x = torch.randn(2, 3, 8, 8).double()
    iterates = [Published() for _ in range(3)]
    for p in iterates:
        wrn_by_hand(p, x, kind=kind)
        p.update({key: own for key, own in iterates[0].items() if "running" in key})
    state = {"iterates": torch.stack([vector_of(p) for p in iterates], 1)}
    state |= {f"model.{key}": value for key, value in iterates[0].items()}
    file = sl.read_published(save_published(tmp_path / "x.pt", "SWAG", 4, state))
    assert (file.title, file.seed) == ("swag", 4)
    net = network(name, width=0.125, num_classes=5, shape=(3, 8, 8)).double()
    found = sl.published_iterates(net, file)
    assert found.shape == (3, sum(p.numel() for p in net.parameters()))
    sl.load_published(net, file)
    for p, own in zip(iterates, found.double()):
        nn.utils.vector_to_parameters(own, net.parameters())
        close(net(x)[0], wrn_by_hand(p, x, kind=kind)[0], rtol=1e-9)
    narrow = network(name, width=0.25, num_classes=5, shape=(3, 8, 8))
    with pytest.raises(UserError, match="x.pt does not fit --model, --dataset or --vocab: .*size"):
        sl.published_iterates(narrow, file)


def test_only_tensors_and_configurations_are_unpickled(save_published, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    path = tmp_path / "x.pt"
    for content, said in (({"cfg": Evil(), "state_dict": {}}, "Unpickling"),
                          ({"a": 1}, "KeyError"), ({"cfg": {}, "state_dict": {}}, "Attribute")):
        torch.save(content, path)
        with pytest.raises(UserError, match=f"x.pt is not a published network.*{said}"):
            sl.read_published(path)
    save_published(path, "IVON", 1, {})
    with pytest.raises(UserError, match="KeyError: 'IVON'"):
        sl.read_published(path)
    with pytest.raises(UserError, match="nowhere.pt is not a published network.*FileNotFound"):
        sl.read_published(tmp_path / "nowhere.pt")
    assert not (tmp_path / "evil").exists()


def published_study(tmp_path, save):
    """Files of two networks, the posteriors of one of them, and that LLLA's Hessian and flow."""
    files = []
    for seed in (10, 2):
        p = Published()
        wrn_by_hand(p, torch.zeros(1, 1, 8, 8).double(), (4, 6, 13, 26), 1, 10)
        state = {f"model.{key}": value for key, value in p.items()}
        files.append(save(tmp_path / f"map{seed}.pt", "MAP", seed, state))
    theta = torch.cat([p["head.fc.weight"].flatten(), p["head.fc.bias"]])
    root = torch.randn(270, 270)
    h = root @ root.T
    laplace = {"H": h, "prior_precision": torch.tensor([3.0])}
    llla = {"model": dict(p), "mean": theta, "llla": laplace}
    flow = {}
    for layer, (name, size) in itertools.product(
            range(2), (("x0", 270), ("alpha_prime", 1), ("beta_prime", 1))):
        flow[f"transform.{layer}.{name}"] = torch.randn(size)
    mean = vector_of(p)[:, None]
    swag = {"iterates": mean + 0.01 * torch.randn(len(mean), 3), **state}
    la_nf = {"llla_inference": llla, "num_transforms": 2, "guide_state_dict": flow}
    saved = (("swa", "SWA", swag), ("swag", "SWAG", swag), ("llla", "LastLayerLaplace", llla),
             ("la_nf", "PosteriorRefinedLastLayerLaplace", la_nf))
    posteriors = [save(tmp_path / f"{name}.pt", kind, 2, own) for name, kind, own in saved]
    return files, posteriors, theta, h, flow


def test_a_study_of_published_networks(save_published, tmp_path, monkeypatch, capsys):
    files, posteriors, theta, h, flow = published_study(tmp_path, save_published)
    argv = ("--dataset glyphs --model wrn_10_4 --width 0.1 --limit-train 60 --limit-test 20 "
            "--val-samples 2 --samples 4 --flow-layers 2 --ensembles 1 2 --swag-lrs 1e-3 --ood "
            "--swag-epochs 2 --no-plot --batch-size 20 --device cpu").split()
    argv += ["--out-dir", str(tmp_path), "--map-paths", *map(str, files)]
    rows = sl.main(argv + ["--posterior-paths", *map(str, posteriors)])
    assert [row["seed"] for row in rows[:2]] == ["2", "10"]  # by the seeds in the files
    folder = tmp_path / SCRIPT / "glyphs-wrn_10_4-w0.1-published"
    assert not (folder / "seed2-swag-lr0.001.pt").exists()     # a published one
    assert (folder / "seed10-swag-lr0.001.pt").exists()
    heads = torch.load(folder / "seed2-llla.pt")["heads"]
    noise = sl.seeded_noise((4, 270), torch.device("cpu"), 2, sl.STREAMS["samples"])
    values, basis = torch.linalg.eigh(h.double() + 3 * unit(270))
    right = theta + noise.double() @ basis @ torch.diag(values.rsqrt()) @ basis.T
    close(heads, right, rtol=1e-3, atol=1e-4)
    own = [torch.stack([flow[f"transform.{layer}.{name}"] for layer in range(2)]).squeeze(-1)
           for name in ("x0", "alpha_prime", "beta_prime")]
    refined = torch.load(folder / "seed2-la_nf2.pt")["heads"]
    close(refined, sl.apply_flow(own, heads)[0], rtol=1e-4, atol=1e-4)
    # A finished study is read; another file of a posterior is another posterior.
    monkeypatch.setattr(sl, "train_epoch", None)
    monkeypatch.setattr(sl, "negative_elbo", None)
    again = sl.main(argv + ["--eval", "--posterior-paths", *map(str, posteriors)])
    assert by_name(again) == by_name(rows)
    state = {"mean": theta + 1, "llla": {"H": h, "prior_precision": torch.tensor([3.0])}}
    save_published(posteriors[2], "LastLayerLaplace", 2, state)
    with pytest.raises(UserError, match="llla.pt belongs to another network than that of seed 2"):
        sl.main(argv + ["--eval", "--posterior-paths", *map(str, posteriors)])
    for words, said in ((["--map-paths", files[0], files[0]], "map of seed 10; --map-paths takes"),
                        (["--map-paths", files[0], "--posterior-paths", files[1]], "holds map of"),
                        (["--map-paths", posteriors[0]], "holds swa of seed 2"),
                        (["--map-paths", files[0], "--epochs", 3], "--epochs has no effect with"),
                        (["--posterior-paths", files[0]], "without --map-paths"),
                        (["--map-paths", files[0], "--width", 0.2], "map10.pt does not fit")):
        argv = ["--dataset", "glyphs", "--model", "wrn_10_4", "--out-dir", tmp_path / "no", *CPU,
                "--limit-train", 60, "--width", 0.1, "--ensembles", 1, *words]
        with pytest.raises(UserError, match=said):
            sl.main([str(word) for word in argv])
    assert not (tmp_path / "no").exists()


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
    # Published networks know the statistics of 48,000 images, whatever is left of them here.
    few, val_of_few, _ = sl.load_images(options("cifar10", "--seed", 5, "--limit-train", 90))
    assert torch.equal(val_of_few.images, val.images) and len(few) == 90
    assert (few.mean, few.std) == (train.mean, train.std) == (val.mean, val.std)
    close(train.mean, train.images.double().mean((0, 2, 3)) / 255, rtol=1e-5)


@pytest.mark.parametrize("name", ["dirty_glyphs", "dirty_mnist"])
def test_no_validation_image_is_a_training_image(name, monkeypatch):
    """A blend of two digits occurs several times, with other labels."""
    if name == "dirty_mnist":  # one image in ten copies, of which rows would leave most in both
        images = torch.arange(100)[:, None, None, None].repeat_interleave(10, 0).byte()
        own = data.ImageSet(name, images, torch.arange(1000) % 10, 10, (0.5,), (0.5,),
                            groups=torch.arange(100).repeat_interleave(10))
        monkeypatch.setattr(data, "load", lambda *_, **__: own)
    args = options("dirty_glyphs", "--num-val", 95, "--limit-train", 300)
    train, val, _ = sl.load_images(args)
    assert not set(val.groups.tolist()) & set(train.groups.tolist())
    assert 95 <= len(val) <= 104 and 290 < len(train) <= 300
    pixels = {image.numpy().tobytes() for image in train.images}
    assert not pixels & {image.numpy().tobytes() for image in val.images}


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


def test_validation_images_of_a_folder(tmp_path):
    """They are read, or else classes keep their shares."""
    save_images(tmp_path / "own" / "train", "ab")
    save_images(tmp_path / "own" / "test", "ab")
    args = options(f"folder:{tmp_path / 'own'}", "--num-val", 4)
    train, val, _ = sl.load_images(args)
    assert train.labels.bincount().tolist() == [4, 4] and val.labels.bincount().tolist() == [2, 2]
    save_images(tmp_path / "own" / "val", "ab", brightness=33)
    with pytest.raises(UserError, match="--num-val has no effect .* folder val"):
        sl.load_images(args)
    train, val, _ = sl.load_images(options(f"folder:{tmp_path / 'own'}"))
    assert (len(train), len(val)) == (12, 12)
    assert val.images[:, 0, 0, 0].unique().tolist() == [33 * i for i in range(6)]


def test_what_sst2_lacks_is_said(tmp_path, capsys):
    """Labels of its test set, and BERT's word pieces."""
    (tmp_path / "SST-2").mkdir()
    rows = "".join(f"a {'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(40))
    for name in ("train", "dev"):
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + rows)
    (tmp_path / "SST-2" / "test.tsv").write_text("index\tsentence\n0\tx\n")
    sl.load_sets(options("sst2", "--data-dir", tmp_path))
    said = capsys.readouterr().out
    assert "huggingface.co/datasets/SetFit/sst2" in said and "4 rows of train.tsv" in said
    assert "vocab.txt of huggingface.co/google-bert/bert-base-uncased" in said
    (tmp_path / "SST-2" / "test.tsv").write_text("sentence\tlabel\n" + rows)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "film"]))
    sl.load_sets(options("sst2", "--data-dir", tmp_path, "--vocab", tmp_path / "vocab.txt"))
    assert "huggingface" not in capsys.readouterr().out


# ---- Runs ---------------------------------------------------------------------------------------

SCRIPT = "swag_laplace_ensembles"
RUN = f"{SCRIPT}/run"
METHODS = tuple(sl.LABELS)
OOD = {"glyphs": "glyphs_letters", "reviews": "reviews_finance", "clusters": "clusters_large"}
TINY = ("--members 2 --ensembles 1 2 --limit-train 96 --limit-test 40 --batch-size 24 "
        "--limit-steps 3 --width 0.1 --epochs 2 --device cpu --name run --no-plot").split()
SAMPLES = "--samples 3 --val-samples 2".split()
SWAG = [*SAMPLES, "--swag-epochs", 2]
SMALL_BN = functools.partial(sl.wide_resnet, depth=10, widening=4, norm=sl.batch_norm_relu)
POSTERIORS = "--samples 7 --val-samples 3 --swag-epochs 3 --flow-layers 2".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sl, "FLOW_EPOCHS", 2)
    monkeypatch.setattr(sl, "DROPOUTS", (0.1,))


def tiny(dataset, out, *more, methods=METHODS):
    """A small study; of MAP networks alone, options of posteriors would be refused."""
    argv = ["--dataset", dataset, *TINY, "--out-dir", str(out), "--methods", *methods]
    if len(methods) == len(METHODS):
        argv += POSTERIORS
    if dataset not in data.TEXTS + data.MOLECULES:
        argv += ["--num-val", "60"]
    return argv + [str(word) for word in more]


def opened(dataset, out, *more):
    """A Study, and its directory."""
    args = sl.parse_args(tiny(dataset, out, *more))
    run = common.Run(args, SCRIPT, "run", sl.EVALUATION_OPTIONS)
    return sl.Study(args, run, sl.load_sets(args), {})


def pieces(out):
    return {path.name: path.read_bytes() for path in sorted((out / RUN).glob("*.pt"))}


def stored_rates(out, seed):
    """The rates of SWA and SWAG that are best by what is stored."""
    best = []
    for method in ("swa", "swag"):
        lpds = {}
        for rate in (0.03, 0.01):
            state = torch.load(out / RUN / f"seed{seed}-swag-lpds-{rate}.pt", weights_only=True)
            lpds[rate] = state["lpds"][method]
        best.append(max(lpds, key=lpds.get))
    return best


def by_name(rows):
    """{(method, members, OOD set): row}"""
    return {(row["method"], row["seed"], row.get("against")): row for row in rows}


def without_clocks(rows):
    return by_name([{key: row[key] for key in row if key != "ms"} for row in rows])


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
    labels = list(sl.LABELS.values())
    single = [row for row in rows if "against" not in row]
    found = [(row["method"], row["seed"], row["members"]) for row in single]
    right = []
    for label in labels:
        right += [(f"{label}, K=1", "1", [1]), (f"{label}, K=1", "2", [2])]
    assert found == right + [(f"{label}, K=2", "1+2", [1, 2]) for label in labels]
    for row in rows:
        assert row["set"] == dataset and row["n"] == 40
        if "against" in row:
            assert row["against"] == OOD[dataset] and 0 <= row["auroc_total"] <= 1
        else:
            assert math.isfinite(row["lpd"]) and row["ms"] > 0 and row["bytes"] > 1000
            assert ("lpd_minus_de" in row) == (not row["method"].startswith("DE"))
    results = json.loads((folder / "results.json").read_text())
    assert results["rows"] == rows
    differences = {(d["method"], d["k"], d["metric"]): d for d in results["differences"]}
    metrics = ("lpd", "mae") if dataset == "clusters" else ("lpd", "accuracy")
    assert set(differences) == set(itertools.product(labels[1:], (1, 2), metrics))
    for name in ("differences.png", "training.png"):
        assert (folder / name).stat().st_size > 10_000


def test_what_a_prediction_needs(studies):
    """In bytes: a network; SWAG's variances and deviations; last layers."""
    _, rows = studies("glyphs")
    rows = without_clocks(rows)
    network = rows["DE, K=1", "1", None]["bytes"]
    assert rows["DE, K=2", "1+2", None]["bytes"] == 2 * network == 2 * 4 * 12_917
    assert rows["SWAG, K=1", "1", None]["bytes"] == (1 + 1 + 3) * network
    assert rows["LLLA, K=1", "1", None]["bytes"] == network + 7 * 4 * 270
    assert rows["LA-NF, K=2", "1+2", None]["bytes"] == 2 * (network + 3 * 4 * 270)


def test_names_of_pieces_are_explicit(studies):
    out, _ = studies("glyphs")
    names = set(pieces(out))
    for seed in (1, 2):
        right = {f"seed{seed}-{name}.pt" for name in (
            "map", "map-dropout0.1", "mcdo-lpd-0.1", "swag-lpds-0.03", "swag-lpds-0.01", "llla",
            "la_nf2")}
        titles = ("map", "swa", "swag", "llla", "la_nf2", "mcdo")
        for title, part in itertools.product(titles, ("test", "ood-glyphs_letters")):
            right.add(f"seed{seed}-{title}-{part}.pt")
        for rate in set(stored_rates(out, seed)):
            name = f"seed{seed}-swag-lr{rate:g}"
            right |= {f"{name}.pt", f"{name}-1.pt", f"{name}-2.pt", f"{name}-3.pt"}
        # Nothing else: the iterates of the other rate are deleted.
        assert {name for name in names if name.startswith(f"seed{seed}-")} == right
    # Of classes, mixtures are stored: 200 samples of CIFAR-100 would take a terabyte.
    state = torch.load(out / RUN / "seed1-llla-test.pt", weights_only=True)
    assert {name: (own.dtype, tuple(own.shape)) for name, own in state.items()
            if name.startswith(("log_probs", "entropy"))} == {
        "log_probs_3": (torch.float32, (40, 10)), "entropy_3": (torch.float64, (40,)),
        "log_probs_7": (torch.float32, (40, 10)), "entropy_7": (torch.float64, (40,))}


def test_the_best_epochs_weights_are_kept(tmp_path, monkeypatch):
    found = []
    lpds = iter([-3.0, -1.0, -1.0, -2.0, math.nan])

    def next_lpd(study, networks):
        found.append(copy.deepcopy(networks[0].state_dict()))
        return next(lpds)

    monkeypatch.setattr(sl, "validation_lpd", next_lpd)
    study = opened("glyphs", tmp_path, "--epochs", 4)
    net = sl.train_map(study, 1, 0.0)
    for name, value in net.state_dict().items():
        assert torch.equal(value, found[1][name])
    assert not torch.equal(value, found[2][name])  # of equal ones, the first
    assert all("val_lpd" not in name for name in net.state_dict())
    with pytest.raises(UserError, match="training diverged"):
        sl.train_map(study, 2, 0.0)


def test_samples_of_swag_differ_by_seed_and_sample():
    """Of one posterior: two members, samples of one block and of two."""
    p = 500
    moments = torch.zeros(p), torch.ones(p), torch.zeros(3, p)
    found = []
    for seed in (1, 2, 1):
        vectors = list(sl.swag_vectors(seed, moments, 9))
        assert len(vectors) == 9
        found += [vectors[0], vectors[1], vectors[8]]
    assert torch.pdist(torch.stack(found[:6])).min() > 0.9 * math.sqrt(p)
    assert all(map(torch.equal, found[:3], found[6:]))
    (few,) = sl.swag_vectors(1, moments, 1)
    assert torch.equal(few, found[0])  # whatever the number of samples


def test_batch_statistics_are_means_over_the_training_set(tmp_path):
    study = opened("glyphs", tmp_path, "--model", "wrn_16_4_bn", "--width", 0.05)
    study.loaders["train"] = sl.make_loader(study.sets.train, study.args, 40)
    net = sl.make_network(study.args, study.sets.train)
    seen = []
    member = SimpleNamespace(net=net, study=study)
    vector = torch.cat([p.detach().flatten() for p in net.parameters()]) + 0.01
    first = sl.batch_norms(net)[0]
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].transpose(0, 1)))
    for own in sl.networks_at(member, [vector, vector]):
        assert len(seen) == 3 and not own.training
        means = torch.stack([x.flatten(1).mean(1) for x in seen]).mean(0)
        variances = torch.stack([x.flatten(1).var(1) for x in seen]).mean(0)
        close(sl.batch_norms(own)[0].running_mean, means, rtol=1e-5, atol=1e-6)
        close(sl.batch_norms(own)[0].running_var, variances, rtol=1e-5, atol=1e-6)
        seen.clear()
    assert first.num_batches_tracked == 0  # of the network itself, nothing changes


def test_flows_see_all_of_the_training_set(copied, monkeypatch):
    """And what they predict of molecules: total, aleatoric and epistemic standard deviations."""
    out, _ = copied("clusters")
    calls = []
    real = sl.negative_elbo

    def recorded(*arguments):
        calls.append(arguments)
        return real(*arguments)

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
    header, *lines = (out / RUN / "predictions.csv").read_text().splitlines()
    own = "predicted total aleatoric epistemic".split()
    assert header.split(",") == ["index", "label", *own[:3], *[f"{name}_la_nf3" for name in own]]
    table = np.array([line.split(",")[6:] for line in lines], float)
    total, aleatoric, epistemic = table.T
    assert len(lines) == 1000 and (epistemic > 0).all()
    close(total**2, aleatoric**2 + epistemic**2, rtol=1e-4)


@pytest.mark.parametrize("dataset", OOD)
def test_eval_makes_and_deletes_nothing(copied, dataset, monkeypatch):
    """Another batch size is another way, no other options; another precision is."""
    out, rows = copied(dataset)
    for name in ("data_loss", "negative_elbo", "full_spectrum", "energy_spectrum"):
        monkeypatch.setattr(sl, name, None)
    monkeypatch.setattr(sl, "check_network", lambda *_: None)
    before = pieces(out)
    again = sl.main(tiny(dataset, out, "--eval", "--batch-size", 7))
    assert by_name(again) == by_name(rows) and pieces(out) == before
    config = json.loads((out / RUN / "results.json").read_text())["config"]
    assert config["batch_size"] == 24
    with pytest.raises(UserError, match="other options: amp off"):
        sl.main(tiny(dataset, out, "--eval", "--amp", "bf16"))


def recorded_training(monkeypatch):
    """What is trained from now on: [(learning rate, seed, factor on the loss)]."""
    real = sl.train_epoch
    trained = []

    def recorded(study, model, optimiser, loader, seed, epoch, factor=1.0):
        trained.append((optimiser.param_groups[0]["lr"], seed, factor))
        return real(study, model, optimiser, loader, seed, epoch, factor)

    monkeypatch.setattr(sl, "train_epoch", recorded)
    return trained


def test_a_later_option_never_retrains_an_early_stage(copied, monkeypatch):
    """Rows of several numbers of samples and flows are those of studies of one number."""
    out, rows = copied()
    before = pieces(out)
    trained = recorded_training(monkeypatch)
    other = sl.main(tiny("glyphs", out, "--structure", "diag"))
    assert without_clocks(other) != without_clocks(rows)
    changed = {name for name in before if pieces(out)[name] != before[name]}
    assert changed and all(re.search("llla|la_nf|-test|-ood-", name) for name in changed)
    several = by_name(sl.main(tiny("glyphs", out, "--samples", 1, 4, 7, "--flow-layers", 1, 2)))
    for label, old in (("SWAG, S=7", "SWAG"), ("LA-NF, T=2, S=7", "LA-NF"), ("SWA", "SWA")):
        for k, seed in ((1, "2"), (2, "1+2")):
            own = several[f"{label}, K={k}", seed, None]
            assert own["lpd"] == by_name(rows)[f"{old}, K={k}", seed, None]["lpd"]
    assert ("LA-NF, T=1, S=1, K=1", "1", None) in several
    assert ("LA-NF, T=1, S=1, K=2", "1+2", None) not in several  # no member could give one
    # Back to the first options: the same rows, bit for bit.
    assert without_clocks(sl.main(tiny("glyphs", out))) == without_clocks(rows) and not trained


def test_only_map_has_the_published_factor_on_the_loss(monkeypatch, tmp_path):
    trained = recorded_training(monkeypatch)
    sl.main(tiny("clusters", tmp_path, "--members", 1, *SWAG, methods=["map", "swag"]))
    assert [factor for *_, factor in trained] == pytest.approx(2 * [0.02**2] + 4 * [1.0])


def test_iterates_are_trained_again_or_continued(copied, monkeypatch):
    """Those of rates that were not chosen are gone; MAP networks stay."""
    out, _ = copied()
    before = pieces(out)
    trained = recorded_training(monkeypatch)
    sl.main(tiny("glyphs", out, "--swag-epochs", 4))
    assert set(trained) == set(itertools.product((0.03, 0.01), (1, 2), (1.0,)))
    for rate, seed, _ in set(trained):
        is_continued = f"seed{seed}-swag-lr{rate:g}-1.pt" in before
        assert trained.count((rate, seed, 1.0)) == (1 if is_continued else 4)
    for name in set(before) & set(pieces(out)):
        if "-swag-lr" in name and name.endswith(("-1.pt", "-2.pt", "-3.pt")):
            assert pieces(out)[name] == before[name]
    assert pieces(out)["seed1-map.pt"] == before["seed1-map.pt"]


def test_nothing_stale_is_read_after_fresh(tmp_path, monkeypatch):
    """MAP networks made anew are other ones here: so are all posteriors around them."""
    argv = tiny("glyphs", tmp_path, "--members", 1, *SWAG, methods=["map", "swag", "llla"])
    first = by_name(sl.main(argv))
    real = sl.data_loss
    monkeypatch.setattr(sl, "data_loss", lambda *arguments: 0.5 * real(*arguments))
    sl.main(tiny("glyphs", tmp_path, "--fresh", "--members", 1, methods=["map"]))
    found = without_clocks(sl.main(argv))
    clean = without_clocks(sl.main(argv + ["--name", "clean"]))
    assert found == clean
    assert all(found[key]["lpd"] != first[key]["lpd"] for key in found if key[2] is None)


def same_pieces(left, right):
    """Two studies agree bit for bit, but for clocks."""
    assert list(left) == list(right)
    for name in left:
        a = dict(leaves(torch.load(io.BytesIO(left[name]), weights_only=True)))
        b = dict(leaves(torch.load(io.BytesIO(right[name]), weights_only=True)))
        assert a.keys() == b.keys(), name
        for key in a:
            if not key.endswith(("seconds", "/cost")):
                assert torch.equal(a[key], b[key]) or a[key].isnan().all(), (name, key)


@pytest.mark.parametrize("function, call", [("train_epoch", 1), ("train_epoch", 4),
                                            ("train_epoch", 9), ("negative_elbo", 5),
                                            ("forward", 30), ("delete_iterates", 0)])
def test_killed_and_resumed_equals_uninterrupted(studies, tmp_path, monkeypatch, function, call):
    """In epochs of MAP, SWAG, MC dropout and LA-NF, and in prediction: bit-equal pieces."""
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
    assert without_clocks(sl.main(argv)).items() <= without_clocks(rows).items()
    first = {name: own for name, own in pieces(out).items() if name.startswith("seed1-")}
    same_pieces(pieces(tmp_path), first)


# ---- Members that are trained apart, and several studies ----------------------------------------


def test_members_that_are_trained_apart_join_a_study(studies, tmp_path, monkeypatch):
    """As the top of the script says: their files are copied into its directory."""
    out, rows = studies("glyphs")
    sl.main(tiny("glyphs", tmp_path / "apart", "--members", 1, "--seed", 2))
    (tmp_path / "study" / RUN).mkdir(parents=True)
    shutil.copy(tmp_path / "apart" / RUN / "options.json", tmp_path / "study" / RUN)
    for path in (tmp_path / "apart" / RUN).glob("seed2-*"):
        shutil.copy(path, tmp_path / "study" / RUN)
    trained = recorded_training(monkeypatch)
    found = sl.main(tiny("glyphs", tmp_path / "study"))
    assert {seed for _, seed, _ in trained} == {1}
    assert without_clocks(found) == without_clocks(rows)
    same_pieces(pieces(tmp_path / "study"), pieces(out))


def test_studies_that_share_a_member_are_not_pooled_as_independent(tmp_path):
    """--seed 1 and --seed 2 with two members each have network 2 in common; --runs 2 do not."""
    earlier = []
    for argv, seeds, has_error in ((["--seed", 1], ["1", "2", "1+2"], [True, False]),
                                   (["--seed", 2], ["2", "3", "2+3"], [False, False]),
                                   (["--seed", 0, "--runs", 2], ["0", "1", "2", "3", "0+1", "2+3"],
                                    [True, True])):
        rows = [row for row in sl.main(tiny("glyphs", tmp_path, *argv, methods=["map"]))
                if "against" not in row]
        assert [row["seed"] for row in rows] == seeds
        if argv == ["--seed", 2]:
            rows += earlier
        assert ["±" in line["lpd"] for line in common.pool(rows, ["lpd"])] == has_error
        earlier = rows


def quick_in_float64(*argv):
    """A process of several; of three, the last one is on a machine of its own."""
    if os.environ["WORLD_SIZE"] == "3":
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = str(rank % 2)
        os.environ["LOCAL_WORLD_SIZE"] = str(2 - rank // 2)
    sl.FLOW_EPOCHS = 2
    sl.NETWORKS["small_bn"] = SMALL_BN
    conftest.run_in_float64(SCRIPT, *argv)




@pytest.mark.parametrize("dataset, size, methods, more", [
    ("glyphs", 3, ["swa", "swag"], ["--swag-lrs", 0.01, *SWAG, "--model", "small_bn"]),
    ("reviews", 2, ["llla", "la_nf"], [*SAMPLES, "--dropout", 0]),
    ("clusters", 2, ["swag", "llla", "la_nf"], ["--swag-lrs", 1e-6, *SWAG])])
def test_processes_equal_one(tmp_path, dataset, size, methods, more, monkeypatch):
    """Also where machines have different numbers of processes."""
    monkeypatch.setitem(sl.NETWORKS, "small_bn", SMALL_BN)
    more = [*more, "--members", 1, "--ensembles", 1, "--predict", OOD[dataset], "--ood"]
    argv = [tiny(dataset, tmp_path / n, *more, methods=methods) for n in ("one", "several")]
    ranks = start_ranks(tmp_path, size, quick_in_float64, *argv[1])
    conftest.in_float64(sl, monkeypatch.setattr)
    rows = sl.main(argv[0])
    for rank in ranks:
        rank.value()
    found = json.loads((tmp_path / "several" / RUN / "results.json").read_text())
    for a, b in zip(rows, found["rows"], strict=True):
        for key in {"accuracy", "lpd", "ece15", "mae", "brier"} & set(a):
            # Predictions are stored in float32.
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6), (a["method"], key)
    compared = 0
    for path in (tmp_path / "one" / RUN).glob("seed1-*.pt"):
        b = dict(leaves(torch.load(tmp_path / "several" / RUN / path.name, weights_only=True)))
        for key, value in leaves(torch.load(path, weights_only=True)):
            rtol = {"net": 1e-8, "weights": 1e-8, "heads": 1e-5}.get(key.split("/")[1])
            if rtol is not None:  # the noise of heads is float32
                close(value, b[key], rtol=rtol, atol=rtol / 10)
                compared += 1
    assert compared > 15
    predicted = [(tmp_path / n / RUN / "predictions.csv").read_text().split("\n")
                 for n in ("one", "several")]
    assert predicted[0][0] == predicted[1][0] and len(predicted[0]) == len(predicted[1])


# ---- Pretrained networks ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of two classes, and a file of weights of ShuffleNet with 1000 classes."""
    from torchvision import models

    folder = tmp_path_factory.mktemp("photographs")
    for part, count in (("train", 12), ("test", 5), ("other", 5)):
        for label, colour in (("red", (200, 30, 0)), ("green", (30, 200, 0))):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (40, 40), (*colour[:2], 9 * i))
                image.save(folder / part / label / f"{i}.png")
    torch.manual_seed(0)
    torch.save(models.get_model("shufflenet_v2_x0_5").state_dict(), folder / "weights.pt")
    return folder


def of_photographs(folder, out, *more):
    return [str(word) for word in (
        "--dataset", f"folder:{folder}", "--model", "torchvision/shufflenet_v2_x0_5", "--weights",
        folder / "weights.pt", "--image-size", 32, "--workers", 0, "--num-val", 4, "--samples", 4,
        "--val-samples", 2, "--flow-layers", 1, "--batch-size", 10, "--out-dir", out, *CPU,
        "--ood", f"folder:{folder}/other", "--no-plot", *more)]


def test_your_own_network(photographs, tmp_path, capsys):
    """Fine-tuned, all of its posteriors are there; SWAG's have batch statistics of their own."""
    words = ("--epochs 1 --limit-steps 1 --lr 1e-3 --ensembles 1 2 --swag-epochs 2 --name x "
             "--swag-lrs 1e-4 --members 2 --methods swag llla la_nf").split()
    argv = of_photographs(photographs, tmp_path, *words)
    rows = sl.main(argv)
    assert "new head: 2 classes instead of 1000" in capsys.readouterr().out
    assert {row["method"] for row in rows} >= {"DE, K=2", "SWAG, K=2", "LLLA, K=1", "LA-NF, K=2"}
    assert all(row["n"] == 10 for row in rows)
    start = torch.load(photographs / "weights.pt", weights_only=True)
    net = torch.load(tmp_path / SCRIPT / "x" / "seed1-map.pt", weights_only=True)["net"]
    moved = (net["extractor.conv1.0.weight"] - start["conv1.0.weight"]).norm()
    assert 0 < moved < 0.5 * start["conv1.0.weight"].norm()


def test_the_features_of_a_frozen_network_are_computed_once(photographs, tmp_path, monkeypatch):
    calls = []
    real = data.with_features
    monkeypatch.setattr(data, "with_features", lambda *a, **k: calls.append(1) or real(*a, **k))
    argv = of_photographs(photographs, tmp_path, "--freeze", "--members", 2, "--ensembles", 1, 2,
                          "--epochs", 20, "--methods", "llla", "la_nf", "--predict",
                          f"folder:{photographs}/other")
    rows = sl.main(argv)
    assert len(calls) == 5  # train, val, test, OOD and the predicted set
    folder = tmp_path / SCRIPT / f"{photographs.name}-torchvision_shufflenet_v2_x0_5-frozen"
    state = torch.load(folder / "seed1-map.pt", weights_only=True)["net"]
    assert set(state) == {"head.weight", "head.bias"} and state["head.weight"].shape == (2, 1024)
    assert max(row["accuracy"] for row in rows if "accuracy" in row) >= 0.9
    header = (folder / "predictions.csv").read_text().splitlines()[0]
    assert header.startswith("file,label,predicted,confidence,total,aleatoric,epistemic")
    assert header.endswith("confidence_la_nf1,total_la_nf1,aleatoric_la_nf1,epistemic_la_nf1")


def test_a_network_that_is_not_trained(photographs, tmp_path):
    """--epochs 0: the last-layer Laplace approximation of a network as it is."""
    state = torch.load(photographs / "weights.pt", weights_only=True)
    for name in ("fc.weight", "fc.bias"):
        state[name] = state[name][:2]
    torch.save({"state_dict": {f"module.{key}": own for key, own in state.items()}},
               tmp_path / "two.pt")
    argv = of_photographs(photographs, tmp_path, "--weights", tmp_path / "two.pt", "--epochs", 0,
                          "--methods", "llla", "--name", "x")
    argv.remove("--flow-layers")
    argv.remove("1")
    with pytest.raises(UserError, match="all members would be the same network; add --members 1"):
        sl.main(argv)
    rows = sl.main(argv + ["--members", "1", "--ensembles", "1"])
    assert {row["method"] for row in rows} == {"DE, K=1", "LLLA, K=1"}
    assert not (tmp_path / SCRIPT / "x" / "seed1-map.pt").exists()
    with pytest.raises(UserError, match="--methods mcdo .* torchvision/NAME"):
        sl.main(argv + ["--members", "1", "--ensembles", "1", "--methods", "mcdo"])


# ---- Missing pieces, misuse ---------------------------------------------------------------------


def test_a_matrix_that_no_memory_holds_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "device_memory", lambda _: 2e6)
    with pytest.raises(UserError, match="last layer needs .* --structure diag"):
        sl.main(tiny("glyphs", tmp_path, "--width", 0.25))
    assert not (tmp_path / SCRIPT).exists()
    sl.main(tiny("glyphs", tmp_path, methods=["map"]))


def test_eval_predicts_another_set_and_makes_lost_predictions_anew(copied, monkeypatch):
    out, rows = copied()
    monkeypatch.setattr(sl, "negative_elbo", None)
    monkeypatch.setattr(sl, "train_epoch", None)
    lost = out / RUN / "seed2-swag-test.pt"
    content = torch.load(lost, weights_only=True)
    lost.unlink()
    save_images(out / "odd", "a", side=28)
    again = sl.main(tiny("glyphs", out, "--eval", "--predict", f"folder:{out / 'odd' / 'a'}"))
    assert without_clocks(again) == without_clocks(rows)
    for name, value in torch.load(lost, weights_only=True).items():
        assert name in ("cost", "made_from") or torch.equal(value, content[name])
    header, *lines = (out / RUN / "predictions.csv").read_text().splitlines()
    columns = "predicted,confidence,total,aleatoric,epistemic"
    assert header.startswith(f"file,{columns},predicted_swa,confidence_swa,total_swa")
    assert len(lines) == 6 and len(header.split(",")) == 1 + 6 * 5
    # An unwritable directory: stored predictions are read, others refused.
    monkeypatch.setattr(os, "access", lambda *_: False)
    again = sl.main(tiny("glyphs", out, "--eval"))
    assert without_clocks(again) == without_clocks(rows)
    with pytest.raises(UserError, match="read-only, and lacks predictions"):
        sl.main(tiny("glyphs", out, "--eval", "--limit-test", 30))


def test_missing_pieces_are_named(copied):
    out, _ = copied()
    rate = stored_rates(out, 2)[1]
    (out / RUN / f"seed2-swag-lr{rate:g}-2.pt").unlink()
    (out / RUN / "seed2-swag-test.pt").unlink()
    with pytest.raises(UserError, match=f"lr{rate:g}-2.pt cannot be read"):
        sl.main(tiny("glyphs", out))
    (out / RUN / "seed2-map.pt").unlink()
    with pytest.raises(UserError, match="seed2-map"):
        sl.main(tiny("glyphs", out, "--eval"))


def test_rates_that_diverge_are_skipped(tmp_path, monkeypatch, capsys):
    argv = tiny("glyphs", tmp_path, "--members", 1, "--ensembles", 1, methods=["map", "swag"])
    argv += ["--swag-epochs", "2", "--samples", "2", "--val-samples", "2"]
    sl.main(argv + ["--swag-lrs", "1e9", "0.01"])
    assert "skipped: SWAG at the rate 1e+09" in capsys.readouterr().out
    assert not list((tmp_path / RUN).glob("*lr1e+09*.pt"))
    with pytest.raises(UserError, match="no value of --swag-lrs"):
        sl.main(argv + ["--swag-lrs", "1e9"])
    # Where MAP diverges, no rate is to blame.
    monkeypatch.setattr(sl, "data_loss", lambda outputs, *_: math.nan * outputs.sum())
    with pytest.raises(UserError, match="seed 1: the loss .* lower the learning rate"):
        sl.main(argv + ["--swag-lrs", "0.01", "--name", "other"])


def test_swag_joins_swa_later_without_training(tmp_path, monkeypatch):
    """The iterates of its rate were kept, too. That no rate will do is stored."""
    argv = ["--members", 1, "--ensembles", 1, "--swag-epochs", 2, "--val-samples", 2]
    sl.main(tiny("glyphs", tmp_path, *argv, methods=["map", "swa"]))
    with monkeypatch.context() as patch:
        patch.setattr(sl, "train_epoch", None)
        rows = sl.main(tiny("glyphs", tmp_path, *argv, "--samples", 2,
                            methods=["map", "swa", "swag"]))
        assert {row["method"] for row in rows} == {"DE, K=1", "SWA, K=1", "SWAG, K=1"}
    monkeypatch.setattr(sl, "swag_samples", lambda mean, *_: math.nan * mean.expand(8, -1))
    argv += ["--name", "other"]
    sl.main(tiny("glyphs", tmp_path, *argv, methods=["map", "swa"]))
    monkeypatch.setattr(sl, "train_epoch", None)
    with pytest.raises(UserError, match="no value of --swag-lrs"):
        sl.main(tiny("glyphs", tmp_path, *argv, "--samples", 2, methods=["map", "swa", "swag"]))


def test_dropout_masks_differ_and_are_repeated(tmp_path):
    """Also of a transformer, whose fast path knows no dropout."""
    study = opened("reviews", tmp_path)
    args = common.with_options(study.args, dropout=0.5)
    own = sl.MCDropout.__new__(sl.MCDropout)
    own.net = sl.make_network(args, study.sets.train)
    own.member = SimpleNamespace(seed=1)
    found = []
    for _ in range(2):
        samples = sl.network_samples(study, own.networks(2), "test")
        found.append([outputs for _, outputs in samples])
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(*found[0])


def test_own_images(tmp_path):
    """In a folder whose name is that of a part of the study. Two channels are constant."""
    own = tmp_path / "data" / "val"
    for part in ("train", "test"):
        save_images(own / part, "ab")
    argv = tiny(f"folder:{own}", tmp_path, "--image-size", 70, "--num-val", 4, "--predict",
                f"folder:{own}/test", "--ensembles", 1, "--members", 1, *SAMPLES, "--workers", 0,
                methods=["map", "llla"])
    assert {row["set"] for row in sl.main(argv)} == {"val"}
    header, *lines = (tmp_path / RUN / "predictions.csv").read_text().splitlines()
    assert header.startswith("file,label,predicted,confidence,total,aleatoric,epistemic,")
    assert [line.split(",")[:2] for line in lines[:2]] == [["a/0.png", "a"], ["a/1.png", "a"]]
    assert len(lines) == 12
    # Another image in the same place is predicted anew.
    Image.effect_noise((70, 70), 90).convert("RGB").save(own / "test" / "a" / "0.png")
    sl.main(argv)
    again = (tmp_path / RUN / "predictions.csv").read_text().splitlines()[1:]
    assert again[0] != lines[0] and again[1:12] == lines[1:12]


def test_a_network_of_ones_own_is_one_entry(tmp_path, monkeypatch):
    def mine(args, shape):
        """Layers, and the number of their features."""
        return [nn.Flatten(), nn.Linear(math.prod(shape), 6), nn.Dropout(args.dropout)], 6

    monkeypatch.setitem(sl.NETWORKS, "mine", mine)
    rows = sl.main(tiny("glyphs", tmp_path, "--model", "mine", "--members", 1))
    assert {row["method"].split(",")[0] for row in rows} == set(sl.LABELS.values())


@pytest.mark.parametrize("network, said", [
    (lambda args, shape: ([nn.Flatten(), nn.Linear(5, 3)], 3), "--model mine fails on images"),
    (lambda args, shape: ([nn.Flatten(), nn.BatchNorm1d(784)], 784), "mine fails on 1 example"),
    (lambda args, shape: ([nn.Flatten()], 784), "has no dropout"),
])
def test_impossible_networks_are_refused_before_training(tmp_path, monkeypatch, network, said):
    monkeypatch.setitem(sl.NETWORKS, "mine", network)
    argv = tiny("glyphs", tmp_path, "--model", "mine", "--limit-train", 97, "--batch-size", 24)
    with pytest.raises(UserError, match=said):
        sl.main(argv)
    assert not list(tmp_path.iterdir())


def test_what_depends_on_other_options(monkeypatch, capsys):
    large = options("cifar10", "--preset", "cifar10_wrn_28_10")
    assert (large.structure, large.epochs, large.swag_epochs) == ("diag", 200, 25)
    assert large.ood == ["svhn+cifar100"] and options("cifar100").ood == ["svhn+cifar10"]
    assert options("cifar10", "--methods", "swag").methods == ["map", "swag"]
    # Of points, no number of samples is demanded.
    assert options("cifar10", "--methods", "map", "--ensembles", 30).ensembles == [30]
    capsys.readouterr()
    args = options("cifar10", "--members", 2)
    assert "skipped: ensembles of 5, 10, 20" in capsys.readouterr().out

    def members(args):
        study = SimpleNamespace(args=args, seeds=[1, 2, 3, 4])
        return [list(ensemble.seeds) for ensemble in sl.list_ensembles(study, "map")]

    assert members(args) == [[1], [2], [1, 2]]
    # Preset sizes that exceed the number of members become the ensemble of all.
    assert members(options("cifar10", "--members", 4))[-1] == [1, 2, 3, 4]
    explicit = options("cifar10", "--members", 4, "--ensembles", 1, 5)
    assert members(explicit) == [[1], [2], [3], [4]]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match="float64"):
        options("glyphs", "--device", "mps")


@pytest.mark.parametrize("argv, said", [
    (["--dataset", "clusters", "--target", "homo"], "--target has no effect on clusters"),
    (["--dataset", "reviews", "--vocab", "x"], "--vocab has no effect on reviews"),
    (["--dataset", "sst2", "--image-size", "5"], "--image-size has no effect on sst2"),
    (["--dataset", "clusters", "--structure", "diag"], "--structure has no effect on molecules"),
    (["--methods", "map", "--samples", "9"], "--samples has no effect without --methods swag or"),
    (["--methods", "llla", "--flow-layers", "3"], "without --methods la_nf"),
    (["--dataset", "reviews", "--model", "painn"], "--model painn"),
    (["--dataset", "reviews", "--model", "torchvision/resnet18"], "choose one of bert_256_2"),
    (["--freeze"], "--freeze has no effect without --model torchvision/NAME"),
    (["--model", "torchvision/resnet18", "--width", "2"], "--width has no effect with"),
    (["--members", "2", "--ensembles", "3"], "--ensembles 3: must not exceed --members 2"),
    (["--samples", "2", "--members", "3", "--ensembles", "3"], "at least one for each member"),
    (["--num-val", "100000"], "--num-val 100000"),
    (["--dataset", "clusters", "--limit-train", "1"], "--limit-train: 1: must be a whole number"),
    (["--limit-train", "2"], "raise --limit-train"),
    (["--ood", "glyphs_letters+nosuch"], "nosuch"),
])
def test_misuse_is_one_line(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        sl.main(["--out-dir", str(tmp_path), *CPU, *argv])
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())  # nothing is claimed
