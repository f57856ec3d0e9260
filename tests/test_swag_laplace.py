"""swag_laplace_ensembles.py against laplace-torch, autograd, textbook forms and loops; its runs: a
study of each kind of data, resuming, processes, options, published networks, misuse."""

import collections
import dataclasses
import functools
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
from pathlib import Path
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
from torchvision import models

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
    _, last, _, _ = classes_problem()
    thetas = torch.randn(3, 24).double()
    found = sl.head_outputs(thetas, last)
    for theta, own in zip(thetas, found):
        close(own, logits_at(theta, last.x, 4).log_softmax(-1))
    close(sl.log_likelihood(found, last.labels), found[:, range(40), last.labels])
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
    close(sl.log_likelihood(own, last.labels, energies=True),
          Normal(own[..., 0], own[..., 1].sqrt()).log_prob(last.labels))
    close(sl.summed_loss(own[0], last.labels, True, 3.0), 3 * nll_loop(theta, last))


@pytest.mark.parametrize("c, d", [(2, 5), (6, 3)])
def test_ggn_is_the_hessian_of_the_summed_cross_entropy(c, d):
    _, last, theta, _ = classes_problem(d=d, c=c)

    def loss(theta):
        return F.cross_entropy(logits_at(theta, last.x, c), last.labels, reduction="sum")

    right = torch.autograd.functional.hessian(loss, theta)
    close(sl.diagonal_spectrum(theta, last).values, right.diagonal())
    spectrum = sl.full_spectrum(theta, last)
    close(dense(spectrum), right, atol=1e-10)
    # Along a shift of all classes alike there is no curvature, and no negative one is left.
    shift = torch.cat([torch.zeros(c * d), torch.ones(c)]).double()
    along = spectrum.basis.T @ shift
    assert (spectrum.values[along.abs() > 1e-6] < 1e-12).all() and (spectrum.values >= 0).all()


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_posterior(structure):
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
    assert sl.choose(dict(zip(sl.LAPLACE_GRID, scores)), "x") > -lowest


def test_best_of_scores(capsys):
    lpds = {"a": math.nan, "b": -2.0, "c": -1.0, "d": -1.0, "e": math.inf}
    assert sl.choose(lpds, "x") == "c"
    with pytest.raises(UserError, match="--swag-lrs"):
        sl.choose({"a": math.nan, "b": -math.inf}, "--swag-lrs")
    # A precision at an end of its grid is noted, also where there is no posterior at the other.
    member = SimpleNamespace(seed=3)
    assert sl.choose_precision(member, "llla", {0.1: math.nan, 1.0: -2.0, 10.0: -3.0}) == 1.0
    assert capsys.readouterr().out == ""
    assert sl.choose_precision(member, "la_nf5", {10.0: -1.0, 1.0: -3.0, 0.1: -3.0}) == 10.0
    assert "note: seed3-la_nf5: the chosen prior precision 10 is an end" in capsys.readouterr().out


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
        spectrum = sl.energy_spectrum(theta, last)
        base_precision = 1 - spectrum.values.min().item()
    else:
        _, last, theta, _ = classes_problem(d=3, c=3)
        train = None
        find = {"full": sl.full_spectrum, "diag": sl.diagonal_spectrum}[kind]
        spectrum = find(theta, last)
    batch = sl.select_examples(last, rows, train)
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


def test_mixtures_do_not_underflow():
    running = sl.RunningMixture()
    for _ in range(3):
        running.add(torch.full((1, 2), -900.0))
    close(running.log_probs(), [[-900, -900]])


@pytest.mark.parametrize("members, k", [(30, 20), (6, 3)])  # several of 6 are equal
def test_published_combinations(members, k):
    right = []
    for i in range(1, 31):
        random.seed((k + i) * (k + i + 1) // 2 + i)
        chosen = sorted(random.sample(list(range(1, members + 1)), k))
        if chosen not in right:
            right.append(chosen)
    assert sl.member_combinations(members, k) == right


def study_of(folder=None, **changes):
    """What Evaluation needs of a study of three members and eight samples."""
    args = dict(ensembles=[1, 3], members=3, runs=1, samples=[8], flow_layers=[2], ood=[],
                methods=["map", "swag"])
    return SimpleNamespace(args=SimpleNamespace(**args | changes), energies=False, seeds=[1, 2, 3],
                           run=SimpleNamespace(dir=folder))


def stored(study, samples, counts):
    """What is stored of samples [S, N, C], each of which took 0.25 s; the first one 0.75 s."""
    rows = torch.arange(samples.shape[1])
    outputs = [sl.Outputs(rows, sample, None, 0.25 + 0.5 * (number == 0))
               for number, sample in enumerate(samples)]
    return sl.summarise(study, outputs, counts) | {"bytes": [100, 10]}


def test_ensembles_of_molecules():
    """Every member gives the same number of samples; methods are compared by the metrics."""
    study = study_of()
    *_, three = sl.list_ensembles(study, "swag")  # 8 // 3 = 2
    study.energies = True
    samples = torch.rand(3, 8, 60, 2).double() + 0.1
    members = {seed: stored(study, own, [8]) for seed, own in enumerate(samples, 1)}
    energies = sl.combine_members(study, members, three)
    means, variances = samples[:, :2].flatten(0, 1).unbind(-1)
    close(energies.means, means)
    close(energies.variances, variances)
    targets = torch.randn(60).double()
    metrics = energies.metrics(targets)
    assert metrics["mae_milli"] == pytest.approx(1000 * (means.mean(0) - targets).abs().mean())
    for name, values in energies.scores(targets).items():
        assert values.mean().item() == pytest.approx(metrics[name], rel=1e-12)
    uncertainties = energies.uncertainties()
    epistemic = means.var(0, correction=0)
    close(uncertainties["epistemic"]**2, epistemic)
    close(uncertainties["aleatoric"]**2, variances.mean(0))
    close(uncertainties["total"]**2, variances.mean(0) + epistemic)


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
    study.splits = data.Splits(None, None, test, {"near": None, "far": None}, None, {})
    samples = {}
    for part, n in (("test", 50), ("ood-near", 30), ("ood-far", 20)):
        for seed, method in itertools.product((1, 2, 3), ("map", "swag")):
            count = 1 if method == "map" else 8
            own = (2 * torch.randn(count, n, 4)).double().log_softmax(-1)
            samples[method, seed, part] = own
            torch.save(stored(study, own, [1, 2, 4, 8]),
                       tmp_path / f"seed{seed}-{method}-{part}.pt")
    rows, differences = sl.evaluate(study)

    def mixture(method, split, seeds=(1, 2, 3), count=2):
        return torch.cat([samples[method, seed, split][:count] for seed in seeds])

    row, = [r for r in rows if r["method"] == "SWAG, S=8, K=3" and "against" not in r]
    right = common.lpd(mixture("swag", "test"), labels)
    assert row["lpd"] == pytest.approx(right, rel=1e-5) and row["seed"] == "1+2+3"
    assert row["ms"] == pytest.approx(1000 * 3 * (0.5 + 2 * 0.25) / 50) and row["bytes"] == 360
    base = common.lpd(mixture("map", "test"), labels)
    assert row["lpd_minus_de"] == pytest.approx(right - base, rel=1e-4)
    found = {(d.method, d.k, d.metric): d for d in differences}
    assert len(found) == len(differences) == 8
    changes = 0
    for seed, (method, sign) in itertools.product((1, 2, 3), (("swag", 1), ("map", -1))):
        probs = mixture(method, "test", [seed], 4).exp().mean(0)
        changes = changes + sign * probs[range(50), labels].log() / 3
    d = found["SWAG, S=4", 1, "lpd"]
    assert d.mean == pytest.approx(changes.mean().item(), rel=1e-4)
    error = common.standard_error(changes)
    assert d.interval == pytest.approx(1.96 * error, rel=1e-4)

    pairs = {key[::2]: row for key, row in by_name(rows).items() if key[1] == "1+2+3" and key[2]}
    assert {against for _, against in pairs} == {"near", "near+far"}  # "gone" was not found
    both = torch.cat([mixture("swag", "ood-near"), mixture("swag", "ood-far")], 1)
    for kind in ("total", "epistemic"):
        inside, outside = [common.ensemble_uncertainty(outputs)[kind]
                           for outputs in (mixture("swag", "test"), both)]
        right = common.ood_metrics(inside, outside, larger_means="ood")
        for metric, value in right.items():
            row = pairs["SWAG, S=8, K=3", "near+far"]
            assert row[f"{metric}_{kind}"] == pytest.approx(value, abs=1e-3)
    assert "auroc_epistemic" not in next(r for r in rows if r["method"] == "DE, K=1")
    assert sl.ood_unions(["a+b", "folder:a+b"]) == {"a+b": ["a", "b"], "folder:a+b": ["folder:a+b"]}


# ---- Networks -----------------------------------------------------------------------------------
# They are written out a second time, with weights by their published names: so the names are
# checked, too.

REFERENCES = torch.linspace(-3, 4, 101).double()


def network(name, width=1.0, dropout=0.0, **train_set):
    """A network of the tables, for a training set with these properties."""
    dataset = "cifar10" if "shape" in train_set else "sst2"
    args = SimpleNamespace(dataset=dataset, model=name, width=width, dropout=dropout, freeze=False,
                           epochs=1, device=torch.device("cpu"))
    return sl.make_network(args, SimpleNamespace(**train_set))


@pytest.mark.parametrize("name, classes, count", [
    ("wrn_16_4", 100, 2_773_828), ("wrn_16_4_bn", 10, 2_748_890),
    ("bert_256_4", 2, 13_272_322)])
def test_published_numbers_of_parameters(name, classes, count):
    kind = {"vocab": range(30522)} if name.startswith("bert") else {"shape": (3, 32, 32)}
    net = network(name, num_classes=classes, **kind)
    assert sum(p.numel() for p in net.parameters()) == count
    if name.startswith("bert"):  # its head is initialised by PyTorch
        stds = [net.head.weight.std().item(), net.backbone.layers[0].linear1.weight.std().item()]
        assert stds == pytest.approx([1 / math.sqrt(3 * 256), 0.02], rel=0.1)


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
        return sl.load_published(net.double(), map_file(self))


def map_file(tensors):
    """What is read of a published MAP network with these tensors."""
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return sl.Published("x.pt", "map", 4, state, None, [])


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


def test_frn_of_zeros_in_bf16():
    zero = torch.zeros(2, 4, 5, 5, dtype=torch.bfloat16, requires_grad=True)
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
    with torch.no_grad():  # PyTorch's fast path
        close(net(F.pad(tokens, (0, 259)))[0], logits, rtol=1e-9)
        net.train()
        assert not torch.equal(net(tokens)[0], net(tokens)[0])
        net.backbone.dropout.eval()
        net.backbone.layers.eval()
        close(net(tokens)[1], features, rtol=1e-9)


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
    with pytest.raises(UserError, match="the same energy per atom"):
        sl.energy_statistics(dataclasses.replace(own, labels=known + 2.0 * sizes))


# ---- Published checkpoints ----------------------------------------------------------------------


@pytest.fixture
def save_published(monkeypatch):
    """save(path, class, seed, state): a file as the authors' script writes it, with objects of a
    stand-in of OmegaConf, which is gone again when the file is read."""
    modules = {"omegaconf": types.ModuleType("omegaconf")}
    kinds = {}
    for module, kind in (("dictconfig", "DictConfig"), ("nodes", "AnyNode"),
                         ("base", "ContainerMetadata")):
        name = f"omegaconf.{module}"
        kinds[kind] = type(kind, (), {"__module__": name})
        modules[name] = types.ModuleType(name)
        setattr(modules[name], kind, kinds[kind])

    def node(value):
        is_leaf = not isinstance(value, dict)
        made = kinds["AnyNode" if is_leaf else "DictConfig"]()
        made._metadata = kinds["ContainerMetadata"]()
        made._metadata.ref_type = typing.Any
        made._metadata.resolver_cache = collections.defaultdict(dict)
        if is_leaf:
            made._val = value
            return made
        made._content = {key: node(item) for key, item in value.items()}
        for child in made._content.values():
            child._parent = made
        return made

    def save(path, kind, seed, state, **config):
        config |= {"inference": {"init": {"_target_": f"src.inference.{kind}"}}, "seed": seed}
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
    assert (file.name, file.seed) == ("swag", 4)
    net = network(name, width=0.125, num_classes=5, shape=(3, 8, 8)).double()
    found = sl.published_iterates(net, file)
    assert found.shape == (3, sum(p.numel() for p in net.parameters()))
    sl.load_published(net, file)
    for p, own in zip(iterates, found.double()):
        nn.utils.vector_to_parameters(own, net.parameters())
        close(net(x)[0], wrn_by_hand(p, x, kind=kind)[0], rtol=1e-9)
    of_member = {("map", 4): map_file(iterates[0])}
    values = state["iterates"]
    head = state["model.head.fc.weight"]
    for change, said in (({"iterates": values[:, :1]}, "at least 2 iterates, not 1"),
                         ({"iterates": values[1:]}, "split_with_sizes"),
                         ({"iterates": values.long()}, "holds integers"),
                         ({"iterates": values / 0}, "not finite"),
                         ({"model.head.fc.weight": head.T}, "has the shape")):
        damaged = file._replace(state=state | change)
        with pytest.raises(UserError, match=f"x.pt lacks a part of a published swag.*{said}"):
            sl.check_published(net, of_member | {("swag", 4): damaged})


def test_a_tensor_of_another_shape_is_refused():
    """Also if it has as many elements: a transposed head, a permuted kernel."""
    p = Published()
    wrn_by_hand(p, torch.zeros(2, 3, 8, 8).double())
    net = network("wrn_16_4", width=0.125, num_classes=5, shape=(3, 8, 8))
    kernel = "backbone.block_1.layer.0.conv_1.weight"
    lacking = {name: tensor for name, tensor in p.items() if name != "head.fc.bias"}
    for tensors, said in ((p | {"head.fc.weight": p["head.fc.weight"].T}, "shape"),
                          (p | {kernel: p[kernel].permute(2, 3, 0, 1)}, "shape"),
                          (p | {"head.fc.bias": torch.full((5,), math.nan)}, "not finite"),
                          (p | {"another": torch.zeros(3)}, "another is left over"),
                          (lacking, "head.fc.bias")):
        with pytest.raises(UserError, match=f"x.pt lacks a part of a published map.*{said}"):
            sl.check_published(net, {("map", 4): map_file(tensors)})


def test_only_tensors_and_configurations_are_unpickled(save_published, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    path = tmp_path / "x.pt"
    for content, said in (({"cfg": Evil(), "state_dict": {}}, "not plain tensors"),
                          ({"cfg": Path(), "state_dict": {}}, "an object of pathlib.PosixPath"),
                          ({"a": 1}, "cfg")):
        torch.save(content, path)
        text = conftest.refusal(sl.read_published, path)
        assert "is not a published network" in text and said in text and "\x1b" not in text
    assert not (tmp_path / "evil").exists()
    for kind, said in (("IVONFromScratch", "IVON"), ("MonteCarloDropout", "MC dropout")):
        save_published(path, kind, 1, {})
        with pytest.raises(UserError, match=f"x.pt holds {said}, which is not read here"):
            sl.read_published(path)


@pytest.mark.parametrize("config, options", [
    ({"data": {"name": "cifar100"},
      "model": {"backbone": {"depth": 16, "widen_factor": 4, "norm_type": "bn"}}},
     ("cifar100", "wrn_16_4_bn")),
    ({"data": {"name": "cifar10"}, "model": {"backbone": {"depth": 28, "widen_factor": 10}}},
     ("cifar10", "wrn_28_10")),
    ({"data": {"name": "SST2"}, "model": {"backbone": {"hidden_size": 256, "n_layers": 2}}},
     ("sst2", "bert_256_2")),
    ({"data": {"name": "QM9"}}, ("qm9", "painn")),
    ({"data": {"name": "mine"}}, ("dirty_glyphs", "wrn_10_4"))])
def test_a_published_file_says_its_data_set_and_network(save_published, tmp_path, config, options):
    path = save_published(tmp_path / "x.pt", "MAP", 1, {}, **config)
    args = sl.parse_args(["--map-paths", str(path), "--ensembles", "1", *CPU])
    assert (args.dataset, args.model) == options
    args = sl.parse_args(["--map-paths", str(path), "--ensembles", "1", "--dataset", "cifar10",
                          "--model", "wrn_16_4", *CPU])
    assert (args.dataset, args.model) == ("cifar10", "wrn_16_4")  # what was typed


def test_damaged_published_files_are_refused(save_published, tmp_path):
    """Flipped bytes in tensors, as of a download that failed."""
    files, posteriors, *_ = published_study(tmp_path, save_published)
    for path in (files[1], *posteriors):
        content = path.read_bytes()
        start = len(content) // 2
        for damaged in (content[:start] + bytes(400) + content[start + 400:], content[:-300]):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{path.name} is damaged"):
                sl.read_published(path)


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


PUBLISHED = ("--dataset glyphs --model wrn_10_4 --width 0.1 --limit-train 60 --limit-test 20 --ood "
             "--samples 4 --flow-layers 2 --no-plot --batch-size 20 --device cpu").split()


def test_a_study_of_published_networks(save_published, tmp_path, monkeypatch):
    files, posteriors, theta, h, flow = published_study(tmp_path, save_published)
    argv = [*PUBLISHED, "--out-dir", tmp_path, "--ensembles", 1, 2, "--swag-lrs", 1e-3,
            "--swag-epochs", 2, "--val-samples", 2, "--map-paths", *files, "--posterior-paths",
            *posteriors]
    argv = [str(word) for word in argv]
    rows = sl.main(argv)
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
    assert by_name(sl.main([*argv, "--eval"])) == by_name(rows)
    state = {"mean": theta, "llla": {"H": h + unit(270), "prior_precision": torch.tensor([3.0])}}
    save_published(posteriors[2], "LastLayerLaplace", 2, state)
    changed = by_name(sl.main(argv))
    for method, is_same in (("LLLA, K=1", False), ("LA-NF, K=1", True), ("SWAG, K=1", True)):
        lpds = [found[method, "2", None]["lpd"] for found in (changed, by_name(rows))]
        assert (lpds[0] == lpds[1]) == is_same, method


def test_published_files_that_do_not_fit_are_refused(save_published, tmp_path):
    """In one line, before the run directory is made; also those that nothing would use."""
    files, posteriors, theta, h, _ = published_study(tmp_path, save_published)
    all_files = ["--map-paths", *files, "--posterior-paths", *posteriors]

    def check(said, *words):
        argv = [*PUBLISHED, "--ensembles", 1, "--out-dir", tmp_path / "out", *words]
        text = conftest.refusal(sl.main, [str(word) for word in argv])
        assert re.search(said, text), text

    check("la_nf.pt holds la_nf2 of seed 2, which has no", *all_files, "--flow-layers", 3)
    check("swa.pt holds swa of seed 2, which has", *all_files, "--methods", "swag", "la_nf")
    check("swa.pt holds swa of seed 2, which has", *all_files, "--map-paths", files[0])
    check("LA-NF has to be published, too; give the file of la_nf2", "--map-paths", *files,
          "--posterior-paths", posteriors[2])
    check("map of seed 10; --map-paths takes", "--map-paths", files[0], files[0])
    check("holds swa of seed 2", "--map-paths", posteriors[0])
    check("map10.pt lacks .* shape", "--map-paths", files[0], "--width", 0.2)
    laplace = {"H": h, "prior_precision": torch.tensor([3.0])}
    for state, said in (({"mean": theta + 1, "llla": laplace}, "other weights than those of seed"),
                        ({"mean": theta[:-1], "llla": laplace}, "shape"),
                        ({"mean": theta}, "'llla'"),
                        ({"mean": theta, "llla": {"H": h}}, "'prior_precision'"),
                        ({"mean": theta, "llla": laplace | {"H": h[:9]}}, "shape"),
                        ({"mean": theta, "llla": laplace | {"prior_precision": math.nan}}, "nan")):
        save_published(posteriors[2], "LastLayerLaplace", 2, state)
        check(f"llla.pt lacks a part of a published llla, or does not.*{said}", *all_files)
    assert not (tmp_path / "out").exists()


# ---- Data ---------------------------------------------------------------------------------------


def options(dataset, *more):
    return sl.parse_args(["--dataset", dataset, *CPU, *map(str, more)])


def test_the_split_of_cifar_is_the_published_one(monkeypatch):
    """The first 2,000 of PyTorch's permutation of the files' order with seed 0."""
    index = torch.arange(50_000)
    pixels = torch.stack([index % 256, index // 256 % 256, index // 65536], 1).byte()
    whole = data.ImageSet("cifar10", pixels[:, :, None, None], index % 10, 10, (0.5,) * 3,
                          (0.25,) * 3)
    monkeypatch.setattr(data, "_read", lambda *_: whole)
    monkeypatch.setattr(data, "ood_sets", lambda *_, **__: {})
    train, val, *_ = sl.load_splits(options("cifar10"))
    place = torch.tensor([1, 256, 65536])
    rows = (val.images[:, :, 0, 0].long() * place).sum(1)
    assert len(rows) == 2000 and rows.sum() == 50_129_101
    rest = (train.images[:, :, 0, 0].long() * place).sum(1)
    assert torch.equal(torch.cat([rows, rest]).sort().values, index)
    # Published networks know the statistics of 48,000 images, whatever is left of them here.
    few, val_of_few, *_ = sl.load_splits(options("cifar10", "--seed", 5, "--limit-train", 90))
    assert torch.equal(val_of_few.images, val.images) and len(few) == 90
    assert (few.mean, few.std) == (train.mean, train.std) == (val.mean, val.std)
    close(train.mean, train.images.double().mean((0, 2, 3)) / 255, rtol=1e-5)


def test_no_validation_image_is_a_training_image():
    """A blend of two digits occurs several times, with other labels."""
    args = options("dirty_glyphs", "--num-val", 95, "--limit-train", 300)
    train, val, *_ = sl.load_splits(args)
    assert not set(val.groups.tolist()) & set(train.groups.tolist())
    assert 95 <= len(val) <= 104 and 290 < len(train) <= 300
    pixels = {image.numpy().tobytes() for image in train.images}
    assert not pixels & {image.numpy().tobytes() for image in val.images}


def test_what_sst2_lacks_is_said(tmp_path, capsys):
    """Labels of its test set, and BERT's word pieces."""
    (tmp_path / "SST-2").mkdir()
    rows = "".join(f"a {'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(40))
    for name in ("train", "dev"):
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + rows)
    (tmp_path / "SST-2" / "test.tsv").write_text("index\tsentence\n0\tx\n")
    sl.load_splits(options("sst2", "--data-dir", tmp_path))
    said = capsys.readouterr().out
    assert "huggingface.co/datasets/SetFit/sst2" in said and "rows of train.tsv" in said
    assert "vocab.txt of huggingface.co/google-bert/bert-base-uncased" in said


# ---- Runs ---------------------------------------------------------------------------------------

SCRIPT = "swag_laplace_ensembles"
RUN = f"{SCRIPT}/run"
METHODS = tuple(sl.LABELS)
OOD = {"glyphs": "glyphs_letters", "clusters": "clusters_large"}
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
    """A Study of which nothing is computed yet."""
    args = sl.parse_args(tiny(dataset, out, *more))
    splits = sl.load_splits(args)
    run = common.Run(args, splits.fingerprints)
    return sl.make_study(args, splits, {})._replace(run=run)


def pieces(out):
    return {path.name: path.read_bytes() for path in sorted((out / RUN).glob("*.pt"))}


def by_name(rows):
    """{(method, members, OOD set): row}"""
    return {(row["method"], row["seed"], row.get("against")): row for row in rows}


def without_clocks(rows):
    return by_name([{key: row[key] for key in row if key != "ms"} for row in rows])


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    @functools.cache
    def study(dataset):
        """(folder, rows, {function: its arguments}) of a whole study, made once."""
        out = tmp_path_factory.mktemp(dataset)
        calls = {"negative_elbo": [], "train_epoch": []}

        def recorded(name, *arguments):
            calls[name].append(arguments)
            return real[name](*arguments)

        real = {name: getattr(sl, name) for name in calls}
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                patch.setattr(sl, name, functools.partial(recorded, name))
            pictures = ["--plot"] if dataset == "glyphs" else []
            return out, sl.main(tiny(dataset, out, *pictures)), calls

    return study


@pytest.fixture
def copied(studies, tmp_path):
    """A copy of the study of images, and its rows."""
    out, rows, _ = studies("glyphs")
    shutil.copytree(out, tmp_path / "runs")
    return tmp_path / "runs", rows


@pytest.mark.parametrize("dataset", OOD)
def test_a_study_tells_its_story(studies, dataset):
    out, rows, calls = studies(dataset)
    folder = out / RUN
    labels = list(sl.LABELS.values())
    single = [row for row in rows if "against" not in row]
    found = [(row["method"], row["seed"], row["members"]) for row in single]
    right = [(f"{label}, K=1", str(seed), [seed])
             for label, seed in itertools.product(labels, (1, 2))]
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
    metrics = ("lpd", "mae_milli") if dataset == "clusters" else ("lpd", "accuracy")
    assert set(differences) == set(itertools.product(labels[1:], (1, 2), metrics))
    for path in folder.glob("*.png"):
        pixels = np.asarray(Image.open(path).convert("L"))
        assert len(pixels) > 200 and 0.5 < (pixels > 250).mean() < 0.99
    assert len([*folder.glob("*.png")]) == 2 * (dataset == "glyphs")
    if dataset == "clusters":  # MAP alone has the published factor on the loss
        factors = [arguments[6] for arguments in calls["train_epoch"] if len(arguments) > 6]
        assert factors == pytest.approx(8 * [0.02**2]) and len(calls["train_epoch"]) > 8
    # Flows, one for each prior precision, see all of the training set, with noise of each step.
    flows = calls["negative_elbo"]
    assert flows[0][4].tolist() == list(sl.FLOW_GRID) and {n for *_, n in flows} == {96}
    assert len({noise.sum().item() for *_, noise, _, _ in flows}) == len(flows) > 3


def test_what_a_prediction_of_the_story_needs(studies):
    """In bytes: a network; SWAG's variances and deviations; last layers."""
    _, rows, _ = studies("glyphs")
    rows = without_clocks(rows)
    network = rows["DE, K=1", "1", None]["bytes"]
    assert rows["DE, K=2", "1+2", None]["bytes"] == 2 * network == 2 * 4 * 12_917
    assert rows["SWAG, K=1", "1", None]["bytes"] == (1 + 1 + 3) * network
    assert rows["LLLA, K=1", "1", None]["bytes"] == network + 7 * 4 * 270
    assert rows["LA-NF, K=2", "1+2", None]["bytes"] == 2 * (network + 3 * 4 * 270)


def test_the_best_epochs_weights_are_kept(tmp_path, monkeypatch):
    weights = []
    values = iter([3.0, 1.0, 1.0, 2.0, math.nan])
    monkeypatch.setattr(sl, "validate", lambda *_: {"val_nll": next(values)})
    monkeypatch.setattr(sl, "compute_outputs",
                        lambda study, net, split: weights.append(sl.flat_weights(net)))
    study = opened("glyphs", tmp_path, "--epochs", 4)
    best = sl.flat_weights(sl.train_map(study, 1, 0.0))
    assert torch.equal(best, weights[1]) and not torch.equal(best, weights[2])  # the first one
    with pytest.raises(UserError, match="training diverged"):
        sl.train_map(study, 2, 0.0)


def test_samples_of_swag_differ_by_seed_and_sample():
    """Of one posterior: two members, samples of one block and of two."""
    moments = torch.zeros(500), torch.ones(500), torch.zeros(3, 500)
    samples = [*sl.swag_vectors(1, moments, 9), *sl.swag_vectors(2, moments, 9)]
    assert len(samples) == 18
    assert torch.pdist(torch.stack(samples)).min() > 0.9 * math.sqrt(500)
    (few,) = sl.swag_vectors(1, moments, 1)
    assert torch.equal(few, samples[0])  # whatever the number of samples


def test_batch_statistics_are_means_over_the_training_set(tmp_path):
    study = opened("glyphs", tmp_path, "--model", "wrn_16_4_bn", "--width", 0.05)
    study.loaders["train"] = data.Loader(study.splits.train, 40, shuffle=True)
    net = sl.make_network(study.args, study.splits.train)
    seen = []
    first = sl.batch_norms(net)[0]
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].transpose(0, 1)))
    for _ in range(2):
        vector = sl.flat_weights(net) + 0.01
        sl.set_weights(net, vector)
        sl.refresh_batch_norm(study, net)
        assert torch.equal(sl.flat_weights(net), vector)
        assert len(seen) == 3 and not net.training
        means = torch.stack([x.flatten(1).mean(1) for x in seen]).mean(0)
        variances = torch.stack([x.flatten(1).var(1) for x in seen]).mean(0)
        close(first.running_mean, means, rtol=1e-5, atol=1e-6)
        close(first.running_var, variances, rtol=1e-5, atol=1e-6)
        seen.clear()


def save_colours(folder, count=12):
    """Class folders of images, the red ones before the green ones in each split."""
    for split in ("train", "test", "other"):
        for label, colour in (("a_red", (200, 30)), ("b_green", (30, 200))):
            (folder / split / label).mkdir(parents=True)
            for i in range(count if split == "train" else 5):
                image = Image.new("RGB", (40, 40), (*colour, 9 * i % 256))
                image.save(folder / split / label / f"{i}.png")
    return f"folder:{folder}"


def test_batch_statistics_of_a_folder_vary_between_classes(tmp_path, monkeypatch):
    """Images in folders are sorted by class; statistics over sorted batches would be of one."""
    dataset = save_colours(tmp_path / "own", count=60)
    study = opened(dataset, tmp_path, "--model", "wrn_16_4_bn", "--num-val", 20, "--limit-train",
                   100, "--width", 0.05)
    study.loaders["train"].sizes = [25, 25, 25, 25]
    net = sl.make_network(study.args, study.splits.train)
    sl.refresh_batch_norm(study, net)
    images = next(iter(data.Loader(study.splits.train, 100).epoch())).images
    with torch.no_grad():
        inputs = net.backbone.conv_1(images)
    variance = inputs.transpose(0, 1).flatten(1).var(1)
    ratio = sl.batch_norms(net)[0].running_var / variance
    assert 0.85 < ratio.min() and ratio.max() < 1.1


def test_time_of_swa_is_that_of_its_passes(tmp_path, monkeypatch):
    """Without the recomputation of batch norm's statistics."""
    study = opened("glyphs", tmp_path, "--model", "wrn_16_4_bn", "--width", 0.05)
    member = sl.Member(study, 1, sl.make_network(study.args, study.splits.train))
    clock = [0.0]

    def slow_refresh(study, net):
        clock[0] += 5

    monkeypatch.setattr(sl, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(sl, "refresh_batch_norm", slow_refresh)
    iterates = sl.flat_weights(member.net).repeat(3, 1)
    (outputs,) = sl.draw_swag(member, "swa", iterates.clone, "test", 1)
    assert (outputs.seconds, clock) == (0.0, [5.0])


def test_eval_of_the_story_makes_and_deletes_nothing(copied, monkeypatch):
    out, rows = copied
    for name in ("summed_loss", "negative_elbo", "full_spectrum", "energy_spectrum"):
        monkeypatch.setattr(sl, name, None)
    monkeypatch.setattr(sl, "check_network", lambda *_: None)
    before = pieces(out)
    again = sl.main(tiny("glyphs", out, "--eval"))
    assert by_name(again) == by_name(rows) and pieces(out) == before
    # A flow depends on the batch size: a run has one.
    for more in (["--batch-size", 7], ["--limit-steps", 2], ["--amp", "bf16"]):
        text = conftest.refusal(sl.main, tiny("glyphs", out, "--eval", *more))
        assert re.search(f"{more[0][2:].replace('-', '_')} .*not {more[1]}", text)


def test_members_of_all_seeds_share_a_directory(tmp_path, monkeypatch):
    """Made one by one, with files that are copied together, as on several machines."""
    words = ["--ood", *SAMPLES]
    methods = ["map", "llla"]
    for seed in (2, 1):
        sl.main(tiny("glyphs", tmp_path / str(seed), "--members", 1, "--seed", seed, *words,
                     methods=methods))
    rows = sl.main(tiny("glyphs", tmp_path / "both", *words, methods=methods))
    for path in (tmp_path / "1" / RUN).glob("seed1-*"):
        shutil.copy(path, tmp_path / "2" / RUN)
    monkeypatch.setattr(sl, "train_epoch", None)
    together = sl.main(tiny("glyphs", tmp_path / "2", *words, methods=methods))
    assert without_clocks(together) == without_clocks(rows)


@pytest.mark.parametrize("more", [
    ["--structure", "diag", "--swag-epochs", 2], ["--val-samples", 2],
    ["--samples", 5, "--swag-lrs", 0.02], ["--limit-test", 30, "--ood", "nonsense"]])
def test_an_option_of_evaluation_changed_in_the_story_is_a_fresh_directory(copied, more):
    """Nothing that is stored depends on an option that is not among its inputs."""
    out, _ = copied
    words = tiny("glyphs", out, "--members", 1, "--ensembles", 1, *more)
    changed = without_clocks(sl.main(words))
    for path in (out / RUN).glob("*"):
        if not re.search(r"map(-dropout.*)?\.pt|options.json", path.name) and path.is_file():
            path.unlink()
    assert without_clocks(sl.main(words)) == changed


def test_a_later_option_never_retrains_the_story(copied, monkeypatch):
    """Rows of several numbers of samples and flows are those of studies of one number."""
    out, rows = copied
    before = pieces(out)
    monkeypatch.setattr(sl, "train_epoch", None)
    other = sl.main(tiny("glyphs", out, "--structure", "diag", "--members", 1, "--ensembles", 1))
    own, old = [by_name(found)["LLLA, K=1", "1", None]["lpd"] for found in (other, rows)]
    assert own != old
    changed = {name for name in before if pieces(out)[name] != before[name]}
    assert changed and all(re.search("llla|la_nf|-test|-ood-", name) for name in changed)
    several = by_name(sl.main(tiny("glyphs", out, "--samples", 1, 7, "--flow-layers", 1, 2)))
    for label, old in (("SWAG, S=7", "SWAG"), ("LA-NF, T=2, S=7", "LA-NF"), ("SWA", "SWA")):
        for k, seed in ((1, "2"), (2, "1+2")):
            own = several[f"{label}, K={k}", seed, None]
            assert own["lpd"] == by_name(rows)[f"{old}, K={k}", seed, None]["lpd"]
    assert ("LA-NF, T=1, S=1, K=1", "1", None) in several
    assert ("LA-NF, T=1, S=1, K=2", "1+2", None) not in several  # no member could give one


def test_nothing_stale_is_read_after_fresh(tmp_path, monkeypatch):
    """MAP networks made anew are other ones here: so are all posteriors around them."""
    words = ["--members", 1, "--ensembles", 1, "--ood"]
    argv = tiny("glyphs", tmp_path, *words, *SAMPLES, methods=["map", "llla"])
    first = by_name(sl.main(argv))
    real = sl.summed_loss
    monkeypatch.setattr(sl, "summed_loss", lambda *arguments: 0.5 * real(*arguments))
    sl.main(tiny("glyphs", tmp_path, "--fresh", *words, methods=["map"]))
    found = without_clocks(sl.main(argv))
    assert found == without_clocks(sl.main(argv + ["--name", "clean"]))
    assert all(found[key]["lpd"] != first[key]["lpd"] for key in found)


def tensors_in(file):
    """{path: tensor} of all numbers in a file of torch.save, but for clocks."""
    state = torch.load(file, weights_only=True)
    return {key: value for key, value in leaves(state) if "seconds" not in key}


@pytest.mark.parametrize("function, call", [("train_epoch", 4), ("negative_elbo", 5)])
def test_killed_and_resumed_is_the_whole_story(studies, tmp_path, monkeypatch, function, call):
    """In epochs of SWAG and LA-NF: bit-equal pieces, of a study of fewer members, too."""
    out, rows, _ = studies("glyphs")
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
    files = sorted(path.name for path in (out / RUN).glob("seed1-*.pt"))
    assert files == sorted(pieces(tmp_path)) and len(files) > 20
    for name in files:
        right, resumed = [tensors_in(folder / RUN / name) for folder in (out, tmp_path)]
        torch.testing.assert_close(resumed, right, rtol=0, atol=0, equal_nan=True)


def quick_in_float64(*argv):
    sl.FLOW_EPOCHS = 2
    sl.NETWORKS["small_bn"] = SMALL_BN
    conftest.run_in_float64(SCRIPT, *argv)


@pytest.mark.parametrize("dataset, methods, more", [
    ("glyphs", ["swag", "llla"], ["--swag-lrs", 0.01, *SWAG, "--model", "small_bn"]),
    ("clusters", ["llla", "la_nf"], SAMPLES)])
def test_two_processes_equal_one(tmp_path, dataset, methods, more, monkeypatch):
    monkeypatch.setitem(sl.NETWORKS, "small_bn", SMALL_BN)
    more = [*more, "--members", 1, "--ensembles", 1, "--ood"]
    argv = [tiny(dataset, tmp_path / n, *more, methods=methods) for n in ("one", "several")]
    ranks = start_ranks(tmp_path, 2, quick_in_float64, *argv[1])
    conftest.in_float64(sl, monkeypatch.setattr)
    rows = sl.main(argv[0])
    for rank in ranks:
        rank.value()
    found = json.loads((tmp_path / "several" / RUN / "results.json").read_text())
    for a, b in zip(rows, found["rows"], strict=True):
        for key in {"accuracy", "lpd", "ece15", "mae", "brier"} & set(a):  # of float32
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6), (a["method"], key)
    compared = 0
    for path in (tmp_path / "one" / RUN).glob("seed1-*.pt"):
        right = tensors_in(tmp_path / "several" / RUN / path.name)
        for key, value in tensors_in(path).items():
            rtol = {"net": 1e-8, "weights": 1e-8, "heads": 1e-5}.get(key.split("/")[1])
            if rtol is not None:  # the noise of heads is float32
                close(value, right[key], rtol=rtol, atol=rtol / 10)
                compared += 1
    assert compared > 9


# ---- Pretrained networks ------------------------------------------------------------------------


def test_the_features_of_a_pretrained_network_are_computed_once(tmp_path, monkeypatch):
    """Of a folder of two classes, and a file of weights with 1000 classes."""
    save_colours(tmp_path / "own")
    torch.save(models.get_model("shufflenet_v2_x0_5").state_dict(), tmp_path / "weights.pt")
    calls = []
    real = data.with_features
    monkeypatch.setattr(data, "with_features", lambda *a, **k: calls.append(1) or real(*a, **k))
    argv = (f"--dataset folder:{tmp_path}/own --model torchvision/shufflenet_v2_x0_5 --weights "
            f"{tmp_path}/weights.pt --image-size 32 --workers 0 --num-val 4 --samples 4 "
            f"--val-samples 2 --flow-layers 1 --batch-size 10 --out-dir {tmp_path} --freeze "
            f"--ood folder:{tmp_path}/own/other --no-plot --members 2 --ensembles 1 2 --epochs 20 "
            f"--methods llla la_nf --predict folder:{tmp_path}/own/other").split()
    rows = sl.main(argv + CPU)
    assert len(calls) == 5  # train, val, test, OOD and the predicted set
    folder = tmp_path / SCRIPT / "own-torchvision_shufflenet_v2_x0_5-frozen"
    assert all(row["bytes"] > 1e6 for row in rows if "bytes" in row)  # with the backbone
    state = torch.load(folder / "seed1-map.pt", weights_only=True)["net"]
    assert set(state) == {"head.weight", "head.bias"} and state["head.weight"].shape == (2, 1024)
    assert max(row["accuracy"] for row in rows if "accuracy" in row) >= 0.9
    header = (folder / "predictions.csv").read_text().splitlines()[0]
    assert header.startswith("file,label,predicted,confidence,total,aleatoric,epistemic")
    with pytest.raises(UserError, match="all members would be the same network; use --members 1"):
        sl.main(argv + [*CPU, "--epochs", "0"])


# ---- Missing pieces, misuse ---------------------------------------------------------------------


def test_lost_pieces_of_the_story_are_made_again_or_named(copied, monkeypatch):
    out, rows = copied
    monkeypatch.setattr(sl, "train_epoch", None)
    lost = out / RUN / "seed2-swag-test.pt"
    content = torch.load(lost, weights_only=True)
    lost.unlink()
    assert without_clocks(sl.main(tiny("glyphs", out, "--eval"))) == without_clocks(rows)
    for name, value in torch.load(lost, weights_only=True).items():
        if torch.is_tensor(value):
            assert torch.equal(value, content[name])
    lost.unlink()
    for path in (out / RUN).glob("seed2-swag-lr*.iterates"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="seed2-swag-lr.*.iterates ends after 2 iterates"):
        sl.main(tiny("glyphs", out))
    (out / RUN / "seed2-map.pt").unlink()
    with pytest.raises(UserError, match="seed2-map"):
        sl.main(tiny("glyphs", out, "--eval"))


def test_rates_that_diverge_are_skipped(tmp_path, monkeypatch, capsys):
    words = ["--members", 1, "--ensembles", 1, *SWAG, "--ood"]
    argv = tiny("glyphs", tmp_path, *words, methods=["map", "swag"])
    sl.main(argv + ["--swag-lrs", "1e9", "0.01"])
    assert "skipped: SWAG at the rate 1e+09" in capsys.readouterr().out
    with pytest.raises(UserError, match="no value of --swag-lrs"):
        sl.main(argv + ["--swag-lrs", "1e9"])
    # Where MAP diverges, no rate is to blame.
    monkeypatch.setattr(sl, "summed_loss", lambda outputs, *_: math.nan * outputs.sum())
    with pytest.raises(UserError, match="seed 1: the loss .* lower the learning rate"):
        sl.main(argv + ["--swag-lrs", "0.01", "--name", "other"])


def test_dropout_masks_differ_and_are_repeated(tmp_path):
    """Also of a transformer, whose fast path knows no dropout."""
    study = opened("reviews", tmp_path)
    args = common.with_options(study.args, dropout=0.5)
    net = sl.make_network(args, study.splits.train)
    member = SimpleNamespace(seed=1, study=study)
    found = []
    for _ in range(2):
        samples = sl.draw_mcdo(member, net, "test", 2)
        found.append([sample.outputs for sample in samples])
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(*found[0])


class Failing(nn.Module):
    def forward(self, x):
        return x.reshape(3, -1) if self.training else x


@pytest.mark.parametrize("layers, said", [
    ([nn.Flatten(), nn.Dropout(), Failing()], "--model mine fails on 2 image"),
    ([nn.Flatten()], "has no dropout")])
def test_impossible_networks_are_refused_before_training(tmp_path, monkeypatch, layers, said):
    monkeypatch.setitem(sl.NETWORKS, "mine", lambda *_: (layers, 784))
    with pytest.raises(UserError, match=said):
        sl.main(tiny("glyphs", tmp_path, "--model", "mine"))
    assert not list(tmp_path.iterdir())


def test_what_depends_on_other_options(monkeypatch):
    large = options("cifar10", "--preset", "cifar10_wrn_28_10")
    assert (large.structure, large.epochs, large.swag_epochs) == ("diag", 200, 25)
    assert large.ood == ["svhn+cifar100"]
    # Of points, no number of samples is demanded.
    assert options("cifar10", "--methods", "map", "--ensembles", 30).ensembles == [30]

    def members(args):
        study = SimpleNamespace(args=args, seeds=[1, 2, 3, 4])
        return [list(ensemble.seeds) for ensemble in sl.list_ensembles(study, "map")]

    # Preset sizes that exceed the number of members become the ensemble of all.
    assert members(options("cifar10", "--members", 4))[-1] == [1, 2, 3, 4]
    # Of skipped sizes, no number of samples is demanded.
    assert options("cifar10", "--members", 4, "--samples", 10).samples == [10]
    explicit = options("cifar10", "--members", 4, "--ensembles", 1, 5)
    assert members(explicit) == [[1], [2], [3], [4]]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match="float64"):
        options("glyphs", "--device", "mps")


@pytest.mark.parametrize("argv, said", [
    (["--dataset", "clusters", "--vocab", "x"], "--vocab has no effect on clusters"),
    (["--dataset", "clusters", "--structure", "diag"], "--structure has no effect on molecules"),
    (["--methods", "map", "--samples", "9"], "--samples has no effect without --methods swag or"),
    (["--dataset", "reviews", "--model", "torchvision/resnet18"], "8: choose one of bert_256_2"),
    (["--members", "2", "--ensembles", "3"], "--ensembles 3: must not exceed --members 2"),
    (["--samples", "2", "--members", "3", "--ensembles", "3"], "at least one for each member"),
    (["--swag-lrs", "0.01", "0.0100000499"], "same first six digits"),
    (["--num-val", "100000"], "--num-val 100000"), (["--ood", "glyphs_letters+nosuch"], "nosuch")])
def test_misuse_is_one_line(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        sl.main(["--out-dir", str(tmp_path), *CPU, *argv])
    assert "fails on" not in str(error.value)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())  # nothing is claimed
