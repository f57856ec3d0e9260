"""swag_laplace_ensembles.py: equations by brute force; networks, training, posteriors, rows, runs."""

import csv
import itertools
import json
import math
import random
import shutil
from argparse import Namespace
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from scipy.linalg import sqrtm
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal
from torch.func import functional_call
from torchvision import models

import common
import data
import swag_laplace_ensembles as sl
from common import UserError

close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def unit(p):
    return torch.eye(p, dtype=torch.float64)


# ---- SWAG ---------------------------------------------------------------------------------------


def test_samples_of_swag_have_half_the_covariance_and_half_the_variances_of_the_iterates():
    iterates = 5 + torch.randn(7, 4).double() * torch.tensor([1, 1e-6, 3, 0.2])
    moments = sl.swag_moments(iterates)
    mean = moments[0]
    diagonal = sl.swag_samples(*moments, unit(4), torch.zeros(4, 7).double()) - mean
    low_rank = sl.swag_samples(*moments, torch.zeros(7, 4).double(), unit(7)) - mean
    variances = np.diag(np.maximum(np.var(iterates.numpy(), 0), 1e-8))  # the floor is used
    close(diagonal.T @ diagonal, variances / 2)
    close(low_rank.T @ low_rank, np.cov(iterates.T) / 2)
    noise, more = torch.randn(5, 4).double(), torch.randn(5, 7).double()
    close(sl.swag_samples(*moments, noise, more),
          iterates.mean(0) + noise @ diagonal + more @ low_rank)


def test_moments_of_swag_need_two_iterates_and_keep_their_digits_in_float32():
    iterates = 1e4 + torch.randn(500, 3)
    mean, variance, _ = sl.swag_moments(iterates)
    assert mean.dtype == torch.float32
    close(mean, iterates.double().mean(0), rtol=1e-7)
    close(variance, iterates.double().var(0, correction=0), rtol=1e-3)
    with pytest.raises(ValueError, match="at least 2 iterates, not 1"):
        sl.swag_moments(iterates[:1])


# ---- The last layer -----------------------------------------------------------------------------


def make_classes(n=40, d=5, c=4):
    """A LastLayer with features in (-1, 1), and theta, in float64."""
    theta = 0.7 * torch.randn(c * (d + 1)).double()
    x = torch.randn(n, d).double().tanh()
    return sl.LastLayer(x, Categorical(logits=logits_of(theta, x)).sample()), theta


def logits_of(theta, x):
    """The weights row by row, then the biases."""
    d = x.shape[1]
    c = len(theta) // (d + 1)
    return x @ theta[:c * d].view(c, d).T + theta[c * d:]


def cross_entropy(theta, last):
    return F.cross_entropy(logits_of(theta, last.x), last.labels, reduction="sum")


def curvature(laplace):
    basis = unit(len(laplace.values)) if laplace.basis is None else laplace.basis
    return basis @ laplace.values.diag() @ basis.T


def test_outputs_and_densities_of_last_layers():
    last, _ = make_classes()
    thetas = torch.randn(3, 24).double()
    logits = torch.stack([logits_of(theta, last.x) for theta in thetas])
    log_p = torch.stack([Categorical(logits=z).log_prob(last.labels) for z in logits])
    close(last.outputs(thetas), logits)
    close(last.log_likelihood(thetas), log_p)
    close(sl.log_predictive_density(log_p), log_p.exp().mean(0).log())
    assert sl.mean_lpd(thetas, last) == pytest.approx(log_p.exp().mean(0).log().mean().item())
    far = torch.tensor([[-2000.0], [-3000.0]])  # float32 has no such probabilities
    assert sl.log_predictive_density(far).item() == pytest.approx(-2000 - math.log(2))
    head = nn.Linear(5, 4).double()
    close(last.outputs(sl.flat_head(head)[None]).detach()[0], head(last.x).detach())


@pytest.mark.parametrize("c, d", [(2, 5), (6, 3)])
def test_the_gauss_newton_matrix_is_the_hessian_of_the_summed_cross_entropy(c, d):
    last, theta = make_classes(d=d, c=c)
    h = torch.autograd.functional.hessian(partial(cross_entropy, last=last), theta)
    full = sl.full_laplace(theta, last.x)
    close(curvature(full), h, atol=1e-10)
    close(sl.diagonal_laplace(theta, last.x).values, h.diagonal())
    shift = torch.cat([torch.zeros(c * d), torch.ones(c)]).double()  # of all logits: no curvature
    close(curvature(full) @ shift, 0, atol=1e-10)
    assert (full.values >= 0).all()


@pytest.mark.parametrize("structure, fit", [("full", sl.full_laplace),
                                            ("diag", sl.diagonal_laplace)])
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_posterior(structure, fit):
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    last, theta = make_classes()
    net = nn.Sequential(nn.Tanh(), nn.Linear(5, 4)).double()
    nn.utils.vector_to_parameters(theta, net.parameters())
    peer = Laplace(net, "classification", subset_of_weights="last_layer",
                   hessian_structure=structure, backend=BackPackGGN)
    raw = torch.utils.data.TensorDataset(last.x.atanh(), last.labels)
    peer.fit(torch.utils.data.DataLoader(raw, 16))
    peer.prior_precision = torch.tensor(0.3).double()
    covariance = peer.posterior_covariance if structure == "full" else peer.posterior_variance.diag()
    laplace = fit(theta, last.x)._replace(precision=0.3)
    root = sl.laplace_samples(laplace, unit(24)) - theta
    close(root.T @ root, covariance, rtol=1e-7, atol=1e-9)
    close(root, root.T)  # symmetric: no sign of an eigenvector changes a sample


def test_grids_are_the_published_ones():
    close(sl.LAPLACE_GRID, 10 ** np.linspace(-4, 4, 21))
    assert (sum(sl.FLOW_GRID), len(sl.FLOW_GRID)) == (1566, 15)
    assert (sum(sl.SWAG_LRS), len(sl.SWAG_LRS)) == (pytest.approx(0.2986), 21)
    assert (sum(sl.MOLECULE_LRS), len(sl.MOLECULE_LRS)) == (pytest.approx(2.9986e-6), 30)


def test_precisions_are_scored_by_the_mean_probability():
    last, theta = make_classes()
    noise = torch.randn(8, 24).double()
    scores = sl.precision_scores(sl.full_laplace(theta, last.x), last, noise)
    h = torch.autograd.functional.hessian(partial(cross_entropy, last=last), theta)
    for delta, score in zip(sl.LAPLACE_GRID, scores.values(), strict=True):
        root = torch.from_numpy(sqrtm(torch.linalg.inv(h + delta * unit(24)).numpy()))
        probs = torch.stack([logits_of(t, last.x).softmax(-1) for t in theta + noise @ root])
        expected = probs.mean(0)[range(40), last.labels].log().mean()
        assert score == pytest.approx(expected.item(), rel=1e-6), delta


def test_the_choice_is_the_first_of_the_largest_finite_scores():
    scores = {"a": math.nan, "b": -2.0, "c": -1.0, "d": -1.0, "e": math.inf}
    assert sl.choose(scores, "x") == "c"
    with pytest.raises(UserError, match="--swag-lrs: no value gives a finite LPD"):
        sl.choose({"a": math.nan, "b": -math.inf}, "--swag-lrs")


# ---- Energies -----------------------------------------------------------------------------------


def make_molecules(n=12, d=4, gap=0.3):
    """An EnergyLastLayer whose residuals are `gap` standard deviations, and theta, in float64."""
    molecule = torch.arange(n).repeat_interleave(torch.randint(1, 6, (n,)))
    x = torch.randn(len(molecule), d).double()
    scale = torch.tensor(1.7).double()
    last = sl.EnergyLastLayer(x, None, molecule, 5 * torch.randn(n).double(), scale)
    theta = 0.5 * torch.randn(2 * (d + 1)).double()
    mean, std = energies_of(theta, last)
    return last._replace(labels=mean + gap * std * torch.randn(n).double()), theta


def energies_of(theta, last):
    """Mean and standard deviation [N], a molecule at a time."""
    means = []
    stds = []
    for number, offset in enumerate(last.offset):
        m, u = logits_of(theta, last.x[last.molecule == number]).T
        means.append(offset + (last.scale * m).sum())
        stds.append((last.scale * (F.softplus(u) + 1e-8)).square().sum().sqrt())
    return torch.stack(means), torch.stack(stds)


def energy_log_p(theta, last):
    return Normal(*energies_of(theta, last)).log_prob(last.labels)


def test_outputs_and_densities_of_energies():
    last, _ = make_molecules()
    thetas = torch.randn(3, 10).double()
    expected = [torch.stack(energies_of(theta, last)) for theta in thetas]
    close(last.outputs(thetas).transpose(1, 2).sqrt()[:, 1], torch.stack(expected)[:, 1])
    close(last.outputs(thetas)[..., 0], torch.stack(expected)[:, 0])
    log_p = torch.stack([energy_log_p(theta, last) for theta in thetas])
    close(last.log_likelihood(thetas), log_p)
    assert sl.mean_lpd(thetas, last) == pytest.approx(log_p.exp().mean(0).log().mean().item())


@pytest.mark.parametrize("d, gap", [(1, 0.3), (4, 4.0)])
def test_the_curvature_of_energies_is_the_hessian(d, gap):
    last, theta = make_molecules(d=d, gap=gap)
    h = -torch.autograd.functional.hessian(lambda t: energy_log_p(t, last).sum(), theta)
    close(curvature(sl.energy_laplace(theta, last)), h, rtol=1e-7, atol=1e-7)


def test_where_the_hessian_is_indefinite_small_precisions_have_no_posterior():
    last, theta = make_molecules(gap=0.01)
    laplace = sl.energy_laplace(theta, last)
    lowest = laplace.values.min().item()
    noise = torch.randn(5, 10).double()
    scores = sl.precision_scores(laplace, last, noise)
    assert lowest < -1e-3
    assert [math.isfinite(lpd) for lpd in scores.values()] == [d > -lowest for d in scores]
    assert sl.choose(scores, "x") > -lowest
