"""swag_laplace_ensembles.py against laplace-torch, autograd, textbook forms and loops; its runs: a
study of each kind of data, resuming, processes, options side by side, misuse."""

import dataclasses
import functools
import io
import itertools
import json
import math
import random
import shutil
import warnings
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import leaves, start_ranks
from PIL import Image
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal

import common
import data
import swag_laplace_ensembles as sl
from common import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from laplace import Laplace
    from laplace.curvature import BackPackGGN


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(a, b, rtol=1e-10, atol=1e-12):
    a, b = (t.detach() if torch.is_tensor(t) else t for t in (a, b))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def unit(p):
    return torch.eye(p).double()


# ---- SWAG and IVON ------------------------------------------------------------------------------


@pytest.mark.parametrize("r, p, scale", [(2, 5, 1.0), (10, 4, 0.3), (7, 7, 4.0)])
def test_swag_covariance_by_its_linear_map(r, p, scale):
    """Unit vectors as noise give the rows of the factor: M of z_1 and R of z_2, apart."""
    rows = torch.randn(p).double() + torch.randn(r, p).double() @ torch.randn(p, p).double()
    moments = sl.swag_moments(rows.clone())
    close(moments[1], rows.var(0, correction=0))
    noise = torch.cat([unit(p + r), torch.zeros(1, p + r).double()])
    diagonal, low_rank = np.diag(moments[1]), np.cov(rows.T.numpy(), ddof=1)
    z1, z2 = noise[:, :p], noise[:, p:]
    for some, right in (((z1, z2), (diagonal + low_rank) / 2), ((z1, None), diagonal),
                        ((None, z2), low_rank)):
        samples = sl.swag_samples(*moments, *some, scale)
        close(samples[-1], rows.mean(0))
        factor = samples[:-1] - samples[-1]
        close(factor.T @ factor, scale * right, atol=1e-11)


def test_swag_floor_is_on_the_variance_and_one_iterate_is_refused():
    mean, variance, deviations = sl.swag_moments(torch.ones(5, 1).double())
    z = torch.ones(1, 1).double(), torch.zeros(1, 5).double()
    moved = sl.swag_samples(mean, variance, deviations, *z) - mean
    assert moved.item() == pytest.approx(7.0711e-5, rel=1e-4)
    far = sl.swag_moments(1e4 + torch.randn(500, 3))[0]
    assert far.dtype == torch.float32 and (far - 1e4).abs().max() < 0.2
    with pytest.raises(ValueError, match="at least 2"):
        sl.swag_moments(torch.zeros(1, 3))


@pytest.mark.parametrize("clip", [math.inf, 0.01])
def test_ivon_is_the_published_update(clip):
    p, ess, wd, h0, lr, b1, b2 = 6, 50.0, 2e-3, 0.5, 0.2, 0.9, 0.99
    mean, momentum = torch.randn(p).double(), torch.zeros(p).double()
    hessian = torch.full((p,), h0).double()
    theta, m, h = mean.numpy().copy(), np.zeros(p), np.full(p, h0)
    for t in range(1, 6):
        noise, grad = torch.randn(2, p).double()
        deviation = sl.ivon_deviation(hessian, noise, ess, wd)
        close(deviation, noise.numpy() / np.sqrt(ess * (h + wd)))
        sl.ivon_update(mean, momentum, hessian, grad, deviation, t, lr, ess, wd, h0, (b1, b2), clip)
        f = ess * (h + wd) * deviation.numpy() * grad.numpy()
        h = b2 * h + (1 - b2) * f + 0.5 * (1 - b2)**2 * (h - f)**2 / (h + wd)
        m = b1 * m + (1 - b1) * grad.numpy()
        step = (m / (1 - b1**t) + wd * theta) / (h + wd)
        theta = theta - lr * (h0 + wd) * step.clip(-clip, clip)
        for own, right in ((hessian, h), (momentum, m), (mean, theta)):
            close(own, right)
    assert np.abs(h - h0).max() > 1e-3


@pytest.mark.parametrize("epochs", [1, 3, 8, 200])
def test_ivons_rate_ends_at_zero(epochs):
    """The published cosine ended five epochs later: the last of eight had 31 % of the peak."""
    shares = [sl.ivon_schedule(t, epochs) for t in np.linspace(0, epochs, 40 * epochs + 1)]
    assert max(shares) == pytest.approx(1) and abs(shares[-1]) < 1e-12
    if epochs == 200:
        assert [shares[i] for i in (0, 80, 200)] == pytest.approx([0.2, 0.52, 1])


def test_ivon_holds_a_sample_in_a_step_and_the_mean_after():
    args = options("glyphs", "--ivon-ess", 100, "--ivon-hess-init", 0.5, "--ivon-clip", 1e9)
    net = nn.Linear(4, 3).double()
    own = sl.Ivon(net, args, 7)
    start, hessian, momentum = own.mean.clone(), own.hessian.clone(), own.momentum.clone()
    assert (hessian == 0.5).all() and not momentum.any()
    own.perturb()
    moved = sl.get_vector(net) - start
    noise = sl.seeded_noise([15], "cpu", args.seed, 3, 1).double()
    close(moved, sl.ivon_deviation(hessian, noise, 100, 2e-4))
    F.cross_entropy(net(torch.randn(9, 4).double()), torch.arange(9) % 3).backward()
    grad = torch.cat([p.grad.flatten() for p in net.parameters()])
    own.step()
    sl.ivon_update(start, momentum, hessian, grad, moved, 1, args.ivon_lr, 100, 2e-4, 0.5,
                   args.ivon_betas)
    for a, b in ((own.mean, start), (own.hessian, hessian), (sl.get_vector(net), start)):
        close(a, b)
    again = sl.Ivon(nn.Linear(4, 3).double(), args, 7)
    again.load_state_dict(own.state_dict())
    for ivon in (own, again):
        ivon.perturb()
    assert torch.equal(again.drawn, own.drawn) and not torch.equal(again.drawn, moved)
    args.ivon_ess = None
    again = sl.Ivon(net, args, 7)
    close(again.deviation(3, 1), sl.ivon_deviation(again.hessian, noise, 7, 2e-4))


# ---- The last layer -----------------------------------------------------------------------------


def classes_problem(n=40, d=5, c=4):
    """(raw inputs, LastLayer of tanh(raw), theta, network tanh then linear), float64."""
    net = nn.Sequential(nn.Tanh(), nn.Linear(d, c)).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.7)
    raw = 1.5 * torch.randn(n, d).double()
    labels = Categorical(logits=net(raw).detach()).sample()
    return raw, sl.LastLayer(raw.tanh(), labels), sl.flat_head(net[1]).detach(), net


def logits_at(theta, x, c):
    """W row by row, then b."""
    d = x.shape[1]
    return x @ theta[:c * d].view(c, d).T + theta[c * d:]


def brute_ggn(theta, x, c):
    j, p = torch.func.jacrev(logits_at)(theta, x, c), logits_at(theta, x, c).softmax(-1)
    return sum(a.T @ (torch.diag(q) - torch.outer(q, q)) @ a for a, q in zip(j, p))


def dense(spectrum):
    q = unit(len(spectrum.values)) if spectrum.basis is None else spectrum.basis
    return q @ torch.diag(spectrum.values) @ q.T


def molecules_problem(n=12, d=4, gap=0.3):
    """(LastLayer of molecules, theta, atoms of each), float64."""
    sizes = torch.randint(1, 6, (n,))
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


def test_outputs_and_densities_of_heads():
    raw, last, _, net = classes_problem()
    thetas = torch.randn(3, 24).double()
    found = sl.head_outputs(thetas, last)
    for theta, own in zip(thetas, found):
        close(own, logits_at(theta, last.x, 4).log_softmax(-1))
    close(sl.head_outputs(sl.flat_head(net[1])[None], last)[0], net(raw).log_softmax(-1))
    close(sl.log_density(found, last.labels), found[:, range(40), last.labels])
    last, _, _ = molecules_problem()
    found = sl.head_outputs(torch.randn(3, 10).double(), last)
    assert found.shape == (3, 12, 2)
    lpd = common.mixture_lpd(*found.unbind(-1), last.labels)
    assert sl.log_predictive_density(found, last.labels) == pytest.approx(lpd, rel=1e-12)
    far = torch.tensor([[[-2000.0, 0.0]], [[-3000.0, 0.0]]])
    assert sl.log_predictive_density(far, torch.tensor([0])) == pytest.approx(-2000 - math.log(2))
    theta = torch.randn(10).double()
    own = sl.head_outputs(theta[None], last)
    close(own[0], torch.stack(atoms_loop(theta, last), -1))
    close(sl.log_density(own, last.labels),
          Normal(own[..., 0], own[..., 1].sqrt()).log_prob(last.labels))
    close(sl.data_loss(own[0], last.labels, 3.0), 3 * nll_loop(theta, last))


@pytest.mark.parametrize("c, d", [(1, 5), (2, 5), (3, 70)])  # no contrast; one stripe, two
def test_ggn_is_the_sum_over_examples(c, d):
    _, last, theta, _ = classes_problem(d=d, c=c)
    probs, right = sl.head_outputs(theta[None], last)[0].exp(), brute_ggn(theta, last.x, c)
    blocks = sl.as_layout(sl.ggn_blocks(last.x, probs, block=7))
    close(sl.as_layout(blocks.permute(1, 2, 0)).T, right, atol=1e-11)
    close(sl.decompose("diag", last, theta).values, right.diagonal())
    close(dense(sl.decompose("full", last, theta)), right, atol=1e-10)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_laplace_torch_has_the_same_posterior(structure):
    raw, last, theta, net = classes_problem()
    spectrum = sl.decompose(structure, last, theta)
    la = Laplace(net, "classification", subset_of_weights="last_layer",
                 hessian_structure=structure, backend=BackPackGGN)
    la.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(raw, last.labels), 16))
    for delta in (1e-2, 1.0, 40.0):
        la.prior_precision = torch.tensor(delta).double()
        peer = la.posterior_covariance if structure == "full" else torch.diag(
            la.posterior_variance)
        root = (sl.laplace_samples(theta, spectrum, delta, unit(24)) - theta).T
        close(root @ root.T, peer, rtol=1e-7, atol=1e-9)
    turned = spectrum if structure == "diag" else spectrum._replace(basis=-spectrum.basis)
    noise = torch.randn(3, 24).double()  # rounding turns eigenvectors round: no other samples
    close(sl.laplace_samples(theta, spectrum, 1.0, noise),
          sl.laplace_samples(theta, turned, 1.0, noise))


def test_grids_are_the_published_ones():
    close(sl.LAPLACE_GRID, 10 ** np.linspace(-4, 4, 21))
    assert (sum(sl.FLOW_GRID), len(sl.FLOW_GRID)) == (1566, 15)
    assert (sum(sl.SWAG_LRS), len(sl.SWAG_LRS)) == (pytest.approx(0.2986), 21)
    assert (sum(sl.MOLECULE_LRS), len(sl.MOLECULE_LRS)) == (pytest.approx(2.9986e-6), 30)


def test_precision_scores_are_of_mean_probabilities():
    _, last, theta, _ = classes_problem()
    spectrum, noise = sl.decompose("full", last, theta), torch.randn(8, 24).double()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores, strict=True):
        p = torch.stack([logits_at(t, last.x, 4).softmax(-1)[range(40), last.labels]
                         for t in sl.laplace_samples(theta, spectrum, delta, noise)])
        close(score, p.mean(0).log().mean(), rtol=1e-9)


def test_every_precision_has_a_posterior_in_float32():
    x, theta = torch.randn(2000, 64).relu(), 0.3 * torch.randn(650)
    last = sl.LastLayer(x, torch.randint(10, (2000,)))
    spectrum = sl.decompose("full", last, theta)
    scores = sl.precision_scores(theta, spectrum, last, torch.randn(4, 650))
    assert all(map(math.isfinite, scores)) and spectrum.values.min() >= 0


@pytest.mark.parametrize("d, gap", [(1, 0.3), (4, 4.0)])
def test_heteroscedastic_hessian_is_autograds(d, gap):
    last, theta, _ = molecules_problem(d=d, gap=gap)
    right = torch.autograd.functional.hessian(lambda t: nll_loop(t, last), theta)
    close(sl.heteroscedastic_hessian(theta, last), right, rtol=1e-9,
          atol=1e-9 * right.abs().max())
    close(dense(sl.decompose("full", last, theta)), right, rtol=1e-7, atol=1e-7)


def test_where_the_hessian_is_indefinite_there_is_no_posterior():
    last, theta, _ = molecules_problem(gap=0.01)  # r = 0: -1/(2 v^2) g_v g_v^T is left
    spectrum, noise = sl.decompose("full", last, theta), torch.randn(5, 10).double()
    lowest = spectrum.values.min().item()
    assert lowest < -1e-3
    assert sl.laplace_samples(theta, spectrum, -lowest / 2, noise).isnan().any(1).all()
    scores = sl.precision_scores(theta, spectrum, last, noise)
    for delta, score in zip(sl.LAPLACE_GRID, scores):
        assert math.isfinite(score) == (delta > -lowest), delta
    assert sl.best(scores, sl.LAPLACE_GRID, "x") > -lowest


def test_best_of_scores():
    nan, inf = math.nan, math.inf
    assert sl.best([nan, -2.0, -1.0, -1.0, inf], "abcde", "x") == "c"
    with pytest.raises(UserError, match="--swag-lrs"):
        sl.best([nan, -inf], "ab", "--swag-lrs")


# ---- Flows --------------------------------------------------------------------------------------


def flow(layers=3, p=5, g=1, spread=1.0):
    shapes = (layers, p), (layers,), (layers,)
    return [spread * torch.randn(g, *shape).double() for shape in shapes]


def test_radial_flows_side_by_side_are_the_published_ones():
    own = flow(4, g=3)
    own[2][:, 1] = own[1][:, 1]  # beta = 0: nothing moves
    for theta in (torch.randn(1, 5).double(), torch.randn(3, 5).double()):
        y, log_det = sl.apply_flow(own, theta)
        for g in range(3):
            x, total = theta[g % len(theta)], 0.0
            for c, a, b in zip(*(p[g] for p in own)):
                r, beta = (x - c).norm(), F.softplus(b) - F.softplus(a)
                h = 1 / (F.softplus(a) + r)
                total += 4 * torch.log(1 + beta * h) + torch.log(1 + beta * h - beta * h**2 * r)
                x = x + beta * h * (x - c)
            close(y[g], x)
            close(log_det[g], total)


def brute_elbo(own, theta, h, base_delta, precision, base, log_lik, scale):
    """-ELBO of one flow, the density of the base by torch, the log-determinant by autograd."""
    run, p = lambda t: sl.apply_flow(own, t[None])[0][0], len(theta)
    gaussian = MultivariateNormal(theta, precision_matrix=h + base_delta * unit(p))
    log_q = gaussian.log_prob(base) - torch.linalg.slogdet(torch.func.jacrev(run)(base)).logabsdet
    t = run(base)
    log_prior = MultivariateNormal(torch.zeros(p).double(), unit(p) / precision).log_prob(t)
    return log_q - log_prior - scale * log_lik(t)


@pytest.mark.parametrize("structure", ["full", "diag", "molecules"])
def test_negative_elbo_by_brute_force(structure):
    rows, sizes, delta = torch.tensor([4, 1, 7]), None, 0.7
    if structure == "molecules":
        last, theta, sizes = molecules_problem()
        delta = 1 - sl.decompose("full", last, theta).values.min().item()
        log_lik = lambda t: -nll_loop(t, batch) - 1.5 * math.log(2 * math.pi)
    else:
        _, last, theta, _ = classes_problem(d=3, c=3)
        log_lik = lambda t: Categorical(logits=logits_at(t, batch.x, 3)).log_prob(
            batch.labels).sum()
    atoms = sizes if sizes is None else torch.arange(len(last.x)).split(sizes.tolist())
    batch, spectrum = sl.take(last, rows, atoms), sl.decompose(structure, last, theta)
    if sizes is not None:
        assert torch.equal(batch.x, torch.cat([last.x[last.molecule == k] for k in rows]))
    own, precision = flow(3, len(theta), 3, spread=0.3), torch.tensor([2.0, 30.0, 5.0]).double()
    for draws, n in ((1, 40), (3, 3)):  # n = 3 = B: no scaling
        noise = torch.randn(draws, len(theta)).double()
        found = sl.negative_elbo(own, theta, spectrum, delta, precision, noise, batch, n)
        base = sl.laplace_samples(theta, spectrum, delta, noise)
        for k in range(3):
            right = brute_elbo([q[k:k + 1] for q in own], theta, dense(spectrum), delta,
                               precision[k], base[k % draws], log_lik, n / 3)
            close(found[k], right, rtol=1e-8)


# ---- Mixtures and ensembles ---------------------------------------------------------------------


def test_mixtures_of_members_are_those_of_all_their_samples():
    """What is kept, a member's first n draws as one, gives what all draws would."""
    outputs = 3 * torch.randn(3, 20, 7, 4).log_softmax(-1)
    sizes = [2, 5, 7, 20]
    members = [dict(zip(sizes, map(sl.Mixture, *sl.running_mixtures(own, sizes))))
               for own in outputs]
    counts = [7, 5, 0]
    rows = torch.cat([outputs[0, :7], outputs[1, :5]]).double()
    found = sl.ensemble_mixture(members, counts)
    close(found.log_probs, rows.exp().mean(0).log())
    close(found.entropy, torch.special.entr(rows.exp()).sum(-1).mean(0))
    far = sl.running_mixtures(torch.full((3, 1, 2), -900.0), [3]).log_probs
    close(far, [[[-900, -900]]])


@pytest.mark.parametrize("k, samples", [(1, 7), (3, 200), (20, 200), (7, 7), (10, 33)])
def test_stratified_order(k, samples):
    order = sl.stratified_order(k, samples, 11)
    assert len(order) == samples and torch.equal(order, sl.stratified_order(k, samples, 11))
    for start in range(0, samples - k + 1, k):
        assert sorted(order[start:start + k].tolist()) == list(range(k))
    counts = sorted(np.bincount(order, minlength=k), reverse=True)
    assert counts == [samples // k + (i < samples % k) for i in range(k)]
    draws = sl.draws_by_member(k, samples, 11)
    assert list(draws) == [n for n in sl.SUBSAMPLES if n < samples] + [samples]
    for n, own in draws.items():
        assert own == np.bincount(order[:n], minlength=k).tolist()


def test_published_combinations():
    assert sl.member_combinations(30, 2, 30)[0] == (7, [5, 11])
    assert sl.member_combinations(3, 1, 30) == [(1, [1]), (2, [2]), (3, [3])]
    for members, k in ((30, 2), (30, 20), (4, 3)):
        right = {}
        for i in range(1, 31):
            random.seed(seed := (k + i) * (k + i + 1) // 2 + i)
            chosen = tuple(sorted(random.sample(list(range(1, members + 1)), k)))
            right.setdefault(chosen, seed)
        state = random.getstate()
        assert sl.member_combinations(members, k, 30) == [(s, list(c)) for c, s in right.items()]
        assert random.getstate() == state  # nobody else's numbers are used


def test_metrics_are_those_of_repeated_examples():
    times, log_probs = torch.randint(0, 4, (2, 60)), (2 * torch.randn(60, 3)).double()
    log_probs, within = log_probs.log_softmax(-1), 0.1 * torch.rand(60).double()
    labels, outside = torch.randint(3, (60,)), torch.randn(40).double().round(decimals=1)
    values = sl.example_values(sl.Mixture(log_probs, within), labels)
    inside, more = outside[:30].repeat(2), torch.randint(0, 3, (2, 40))
    weights = times * 60 / times.sum(1, keepdim=True).double()
    found = sl.weighted_metrics(values, sl.COLUMNS, weights)
    area = sl.weighted_auroc(inside, outside, times.double(), more.double())
    for b in range(2):
        rows = torch.arange(60).repeat_interleave(times[b])
        right, probs, y = sl.class_metrics(values[rows]), log_probs.exp()[rows], labels[rows]
        for name, own in found.items():
            assert own[b].item() == pytest.approx(float(right[name]), rel=1e-10), name
        for name, peer in (("accuracy", common.accuracy(probs, y)), ("mce15", common.mce(probs, y)),
                           ("ece15", common.ece(probs, y)), ("brier", common.brier(probs, y)),
                           ("lpd", -common.nll(log_probs[rows], y)),
                           ("entropy", common.entropy(probs).mean().item())):
            assert float(right[name]) == pytest.approx(peer, rel=1e-12), name
        information = (common.entropy(probs) - within[rows]).clamp_min(0)
        close(right["mutual_information"], information.mean())
        out = outside.repeat_interleave(more[b])
        right = common.ood_metrics(inside[rows], out, larger_means="ood")["auroc"]
        assert area[b].item() == pytest.approx(right, rel=1e-10)
    mean, variance = torch.randn(5, 60).double(), torch.rand(5, 60).double() + 0.1
    y = torch.randn(60).double()
    pit = Normal(mean, variance.sqrt()).cdf(y).mean(0)
    columns = torch.stack([y, (mean.mean(0) - y).abs(), pit, y, y], 1)
    found = sl.weighted_metrics(columns, sl.MOLECULE_COLUMNS, torch.ones(1, 60).double())
    assert found["ece"].item() == pytest.approx(common.regression_ece(mean, variance, y))
    assert found["mae"].item() == pytest.approx((mean.mean(0) - y).abs().mean().item())


def test_bootstrap_intervals_are_paired():
    """Of a constant difference the interval is a point, whatever the examples' own spread."""
    weights = sl.bootstrap_weights(50, 0)
    assert weights.shape == (sl.RESAMPLES + 1, 50) and (weights.sum(1) == 50).all()
    assert (weights[0] == 1).all() and weights[1:].var() == pytest.approx(1, abs=0.1)
    values = torch.rand(3, 50, 6).double()
    args = SimpleNamespace(runs=1, ensembles=[1], members=3, combinations=1, samples=4, seed=1,
                           model="x")
    study = sl.Study(args, {"a": range(50), "train": None}, ["a"], [], None, {})
    better = values.clone()
    better[..., 0] += 0.1
    (row,) = sl.differences(study, {"map": {"a": values}, "swag": {"a": better}})
    assert row["method"] == "SWAG" and row["ensembles"] == 3
    assert all(row["lpd"][k] == pytest.approx(0.1) for k in ("difference", "low", "high"))
    assert row["accuracy"] == {"difference": 0, "low": 0, "high": 0}
    better[:, :25, 0] += 1
    (row,) = sl.differences(study, {"map": {"a": values}, "swag": {"a": better}})
    assert row["lpd"]["difference"] == pytest.approx(0.6)
    assert 0.3 < row["lpd"]["low"] < 0.55 and 0.65 < row["lpd"]["high"] < 0.9


# ---- Networks -----------------------------------------------------------------------------------

REFERENCES = torch.linspace(-3, 4, 101).double()


def test_published_numbers_of_parameters():
    for net, count in ((sl.wide_resnet(10, 3, 16, 4, "frn"), 2_750_698),
                       (sl.wide_resnet(100, 3, 16, 4, "frn"), 2_773_828),
                       (sl.wide_resnet(10, 3, 28, 10, "frn"), 36_488_170),
                       (sl.wide_resnet(10, 3, 16, 4, "bn"), 2_748_890),
                       (sl.bert(2, 30522, 256, 4, 0.5), 13_272_322),
                       (sl.PaiNN((0.0, 1.0), REFERENCES), 589_250)):
        assert sum(p.numel() for p in net.parameters()) == count


def frn(x, layer):
    power = x.square().mean((2, 3), keepdim=True) + 1e-6
    return torch.maximum(layer.gamma * x / power.sqrt() + layer.beta, layer.tau)


def shaken(net):
    """float64, evaluated, every number moved off its start."""
    net = net.double().eval()
    with torch.no_grad():
        for name, value in (*net.named_parameters(), *net.named_buffers()):
            if value.is_floating_point() and name not in ("statistics", "references"):
                value.add_(0.1 * torch.randn_like(value).abs())
    return net


@pytest.mark.parametrize("side", [1, 5])
def test_frn_is_its_formula(side):
    layer, x = shaken(sl.FRN(4)), torch.randn(3, 4, side, side).double()
    close(layer(x), frn(x, layer))
    zero = torch.zeros(2, 4, side, side, dtype=torch.bfloat16, requires_grad=True)
    y = sl.FRN(4)(zero)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and (y == 0).all() and zero.grad.isfinite().all()


@pytest.mark.parametrize("norm", ["frn", "bn"])
@pytest.mark.parametrize("side", [8, 7])
def test_wide_resnet_by_hand(norm, side):
    """The shortcut of a transition sees norm1(x)."""
    net = shaken(sl.wide_resnet(5, 3, 16, 2, norm, width=0.25))
    unit_of = (lambda layer, x: frn(x, layer)) if norm == "frn" else (
        lambda layer, x: F.batch_norm(x, layer[0].running_mean, layer[0].running_var,
                                      layer[0].weight, layer[0].bias).relu())
    x = torch.randn(2, 3, side, side).double()
    stem, *blocks, last, _, _ = net.extractor
    h, shapes = F.conv2d(x, stem.weight, padding=1), []
    for block in blocks:
        first, middle, dropout, second = block.body
        stride, above = first.stride[0], unit_of(block.norm, h)
        assert isinstance(dropout, nn.Dropout)
        rest = h if block.shortcut is None else F.conv2d(above, block.shortcut[1].weight,
                                                         stride=stride)
        above = unit_of(middle, F.conv2d(above, first.weight, stride=stride, padding=1))
        h = rest + F.conv2d(above, second.weight, padding=1)
        shapes.append((h.shape[1], stride, block.shortcut is not None))
    assert shapes == [(8, 1, True), (8, 1, False), (16, 2, True), (16, 1, False), (32, 2, True),
                      (32, 1, False)]
    features = unit_of(last, h).mean((2, 3))
    logits, found = net(x)
    close(found, features)
    close(logits, features @ net.head.weight.T + net.head.bias)


def test_bert_by_hand():
    """Attention and feed-forward written out; padding is inert; dropout acts in training."""
    net = shaken(sl.bert(2, 30, 16, 2, 0.3))
    bert, lengths = net.extractor, torch.tensor([9, 4, 1])
    tokens = torch.randint(1, 30, (3, 9)).masked_fill(torch.arange(9) >= lengths[:, None], 0)
    x = bert.words.weight[tokens] + bert.types.weight[0] + bert.positions.weight[:9]
    normed = lambda layer, x: F.layer_norm(x, (16,), layer.weight, layer.bias, 1e-12)
    x = normed(bert.norm, x)
    for layer in bert.layers:
        own = layer.self_attn
        q, k, v = F.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
        q, k, v = (t.view(3, 9, 8, 2).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, (tokens > 0)[:, None, None])
        mixed = mixed.transpose(1, 2).reshape(3, 9, 16)
        x = normed(layer.norm1, x + own.out_proj(mixed))
        x = normed(layer.norm2, x + layer.linear2(F.gelu(layer.linear1(x))))
    features = torch.tanh(F.linear(x[:, 0], bert.pooler[0].weight, bert.pooler[0].bias))
    close(net(tokens)[1], features, rtol=1e-9)
    net(tokens[:0])[0].sum().backward()  # an empty part of a batch: DDP waits for its gradients
    assert not any(p.grad.any() for p in net.parameters())
    with torch.no_grad():  # PyTorch's fast path
        close(net(tokens)[1], features, rtol=1e-9)
        close(net(F.pad(tokens, (0, 259)))[0], net(tokens)[0], rtol=1e-12)
        net.train()
        assert not torch.equal(net(tokens)[0], net(tokens)[0])
    fresh = sl.bert(2, 500, 64, 2, 0.5)
    for name, p in fresh.named_parameters():
        if name.endswith("bias") or p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.2), name


def molecules_of(atoms):
    """[(numbers, positions float64), ...] as one graph, in float64."""
    sizes = torch.tensor([len(z) for z, _ in atoms])
    numbers, positions = (torch.cat([torch.as_tensor(t) for t in own]) for own in zip(*atoms))
    own = data.MoleculeSet("x", numbers, positions, sizes, sizes.double(), REFERENCES)
    (batch,) = data.SequenceLoader(own, len(own), cutoff=3.0).epoch()
    return batch.molecules._replace(positions=positions)


def painn_dense(net, numbers, r, cutoff=3.0):
    """(mean, variance) of one molecule, each atom [i] with each other [i, j]."""
    n, numbers = len(r), torch.tensor(numbers)
    offset, others = r - r[:, None], ~torch.eye(n, dtype=torch.bool)
    d = offset.norm(dim=-1, keepdim=True) + unit(n)[..., None]
    rbf = torch.cat([torch.sin(k * math.pi * d / cutoff) / d for k in range(1, 6)], -1)
    cut = 0.5 * (torch.cos(math.pi * d / cutoff) + 1) * (d < cutoff) * others[..., None]
    s, v = net.embedding.weight[numbers], torch.zeros(n, 3, 8).double()
    for layer in net.layers:
        vv, ss, vs = (layer.message(s) * layer.filter(rbf) * cut).chunk(3, -1)
        v = v + (vv[:, :, None] * v + vs[:, :, None] * (offset / d)[..., None]).sum(1)
        s = s + ss.sum(1)
        uv, vv = layer.u(v), layer.v(v)
        a_vv, a_sv, a_ss = layer.update(torch.cat([vv.norm(dim=1), s], -1)).chunk(3, -1)
        s, v = s + a_ss + a_sv * (uv * vv).sum(1), v + uv * a_vv[:, None]
    mean, raw = net.head(net.readout(s)).T
    variance = ((F.softplus(raw) + 1e-8) * 1.9).square()
    return torch.stack([(mean * 1.9 - 0.7 + REFERENCES[numbers]).sum(), variance.sum()])


def test_painn_is_a_sum_over_pairs():
    net = shaken(sl.PaiNN((-0.7, 1.9), REFERENCES, 8, 2, radial=5, cutoff=3.0))
    atoms = [([1, 6, 7, 8, 1, 9][:n], 1.5 * torch.randn(n, 3).double()) for n in (5, 1, 3, 6)]
    found, _ = net(molecules_of(atoms))
    for own, (z, r) in zip(found, atoms):
        close(own, painn_dense(net, z, r), rtol=1e-9)
    net.train()(molecules_of(atoms[1:2]))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_statistics_are_per_atom_and_without_references():
    sizes, numbers = torch.tensor([2, 1, 4]), torch.tensor([1, 6, 7, 8, 1, 6, 1])
    labels = 10 * torch.randn(3).double()
    own = data.MoleculeSet("x", numbers, torch.randn(7, 3).double(), sizes, labels, REFERENCES)
    known = torch.stack([REFERENCES[z].sum() for z in numbers.split([2, 1, 4])])
    rows = ((labels - known) / sizes).numpy()
    close(sl.energy_statistics(own), (rows.mean(), rows.std(ddof=1)))
    with pytest.raises(UserError, match="--target"):
        sl.energy_statistics(dataclasses.replace(own, labels=known + 2.0 * sizes))


# ---- Runs ---------------------------------------------------------------------------------------

RUN = "swag_laplace_ensembles/run"
OOD = {"glyphs": "glyphs_letters", "reviews": "reviews_finance", "clusters": "clusters_large"}
TINY = ("--members 2 --ensembles 1 2 --combinations 2 --samples 7 --val-samples 3 --limit-train 96"
        " --limit-test 40 --batch-size 24 --limit-steps 3 --width 0.1 --epochs 2 --swag-epochs 3"
        " --ivon-epochs 2 --flow-epochs 2 --flow-layers 2 --device cpu --name run"
        " --dropout 0").split()


def options(dataset, *more):
    return sl.parse_args(["--dataset", dataset, "--device", "cpu", *map(str, more)])


def tiny(dataset, out, *more):
    own = ["--num-val", "60"] if dataset == "glyphs" else ["--depth", "1"]
    methods = ["--methods", *sl.METHODS]
    return ["--dataset", dataset, *TINY, *own, *methods, "--out-dir", str(out), *map(str, more)]


def pieces(out):
    return {p.name: p.read_bytes() for p in sorted((out / RUN).glob("*.pt"))}


def numbers(rows):
    """{(method, seed, set, against): metrics that no clock measures}"""
    return {(r["method"], r["seed"], r["set"], r.get("against")): {
        k: v for k, v in r.items() if k not in ("train_s", "predict_s")} for r in rows}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    @functools.cache
    def study(dataset):
        """(folder, rows) of a whole study, made once."""
        out = tmp_path_factory.mktemp(dataset)
        return out, sl.main(tiny(dataset, out))

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
    folder, labels = out / RUN, [*sl.METHODS.values()]
    own = [r for r in rows if "against" not in r]
    assert [(r["method"], r["members"]) for r in own] == [
        (f"{label}, K={k}", m) for label in labels for k, m in ((1, "1"), (1, "2"), (2, "1 2"))]
    score = "auroc_std" if dataset == "clusters" else "auroc_entropy"
    for r in rows:
        assert r["set"] == dataset and r["n"] == 40
        if "against" in r:
            assert r["against"] == OOD[dataset] and 0 <= r[score] <= 1
        else:
            assert math.isfinite(r["lpd"])
            assert min(float(r["memory_mb"]), float(r["predict_s"])) > 0, r["method"]
    results = json.loads((folder / "results.json").read_text())
    assert results["rows"] == rows and len(results["differences"]) == 2 * 6
    few = [r for r in results["by_samples"] if r["samples"] == 5]
    assert {r["method"] for r in few} == {f"{label}, K={k}" for label in labels[2:]
                                          for k in (1, 2)}
    assert (folder / "study.png").stat().st_size > 10_000


def opened(dataset, out, *more):
    return sl.open_study(sl.parse_args(tiny(dataset, out, *more)))


def test_the_best_epochs_weights_are_kept(tmp_path, monkeypatch):
    found, lpds = [], iter([-3.0, -1.0, math.nan, -2.0])
    monkeypatch.setattr(sl, "validation_lpd", lambda _, sampler: found.append(
        sl.get_vector(sampler.net)) or next(lpds))
    net = sl.map_sampler(opened("glyphs", tmp_path, "--epochs", 4)).net
    assert torch.equal(sl.get_vector(net), found[1]) and not torch.equal(found[1], found[3])


def test_draws_differ_by_seed_and_sample(copied, monkeypatch):
    """Of one posterior: two members, samples of one block and of two."""
    study = opened("glyphs", copied()[0], "--eval")
    p = sl.map_sampler(study).numbers
    monkeypatch.setattr(sl, "swag_moments", lambda _: (
        torch.zeros(p), torch.ones(p), torch.zeros(3, p)))
    found = []
    for m, s in itertools.product((0, 1, 0), (0, 1, 8)):
        sampler = sl.swag_sampler(sl.member_of(study, m), 0.01)
        sampler.draw(s)
        found.append(sl.get_vector(sampler.net))
    apart = torch.pdist(torch.stack(found[:6]))
    assert apart.min() > 0.9 * math.sqrt(p)
    assert all(map(torch.equal, found[:3], found[6:]))
    sampler = sl.ivon_sampler(study._replace(args=common.with_options(study.args, samples=1)))
    mean = sl.get_vector(sampler.net)
    sampler.draw(0)
    assert not torch.equal(sl.get_vector(sampler.net), mean)  # one draw is a draw


def test_statistics_of_pixels_of_any_type(monkeypatch):
    """Sets that are not 8-bit have pixels of 0..1."""
    few, found = data.evenly(data.load("glyphs", "test"), 40), []
    for own in (few, dataclasses.replace(few, images=few.images / 255)):
        monkeypatch.setattr(data, "load", lambda *_, **__: own)
        train, *_ = sl.image_sets(options("glyphs", "--num-val", 5))
        found.append((*train.mean, *train.std))
    close(*found, rtol=1e-6)


def test_batch_statistics_are_means_over_the_training_set():
    args = options("glyphs", "--norm", "bn", "--width", 0.1, "--batch-size", 8)
    train = data.evenly(data.load("glyphs", "test"), 20)
    net, seen = sl.make_network(args, train), []
    first = sl.batch_norms(net)[0]
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].transpose(0, 1)))
    for _ in range(2):
        seen.clear()
        sl.refresh_batch_norm(net, SimpleNamespace(args=args, sets={"train": train}))
    assert len(seen) == 3 and not first.training
    for own, right in ((first.running_mean, [x.flatten(1).mean(1) for x in seen]),
                       (first.running_var, [x.flatten(1).var(1) for x in seen])):
        close(own, torch.stack(right).mean(0), rtol=1e-5, atol=1e-6)


def test_flows_see_all_of_the_training_set(copied, monkeypatch):
    """And what they predict of molecules: total, aleatoric and epistemic standard deviations."""
    (out, _), found, losses, real = copied("clusters"), [], [], sl.negative_elbo
    monkeypatch.setattr(sl, "negative_elbo", lambda *a: found.append(
        (a[4].tolist(), a[5].sum().item(), a[6].labels, a[7])) or losses.append(real(*a))
        or losses[-1])
    sl.main(tiny("clusters", out, "--flow-epochs", 1, "--no-plot", "--members", 1, "--ensembles", 1,
                 "--methods", "la_nf", "--predict", "clusters_large"))
    precisions, noises, labels, sizes = zip(*found)
    assert {*sizes} == {96} and precisions[0] == [*map(float, sl.FLOW_GRID)]
    assert len({*noises}) == 3 and len(torch.cat(labels).unique()) == 72
    log = max((out / RUN).glob("la_nf-seed1-*.jsonl"), key=lambda p: p.stat().st_mtime)
    mean = torch.stack(losses).mean().item()
    assert json.loads(log.read_text())["loss"] == pytest.approx(mean, rel=1e-6)
    header, *lines = (out / RUN / "predictions.csv").read_text().splitlines()
    assert header == "index,label,predicted,total,aleatoric,epistemic" and len(lines) > 40
    *_, total, aleatoric, epistemic = np.array([line.split(",") for line in lines], float).T
    close(total**2, aleatoric**2 + epistemic**2)


def test_ensembles_of_molecules_are_of_their_draws(monkeypatch):
    """The n-th draw of a member is its n-th sample."""
    outputs, y = torch.rand(3, 9, 7, 2).double() + 0.1, torch.randn(9).double()
    study = sl.Study(SimpleNamespace(seed=0), {"a": SimpleNamespace(labels=y)}, ["a"], [], None, {})
    draws, order = sl.draws_by_member(3, 7, 11), sl.stratified_order(3, 7, 11)
    monkeypatch.setattr(sl, "combinations", lambda *_: [(3, 11, [0, 2, 1], draws)])
    monkeypatch.setattr(sl, "read_leaf", lambda own, *_: {"outputs": outputs[own.args.seed]})
    _, (found,) = sl.evaluate_molecules(study, "swag", "a")
    rows = [outputs[[0, 2, 1][i], :, int((order[:at] == i).sum())] for at, i in enumerate(order)]
    for n in (5, 7):
        right = common.regression_metrics(*torch.stack(rows[:n]).unbind(-1), y)
        assert found[n] == pytest.approx(right, rel=1e-10)


def test_one_draw_has_no_epistemic_uncertainty(monkeypatch):
    """Rounding gave it some, which told two sets apart."""
    args = SimpleNamespace(methods=["map"], model="", runs=1, ensembles=[1, 2], members=2,
                           combinations=1, samples=4, seed=1)
    study = sl.Study(args, {"a": range(5), "b": range(5)}, ["a"], ["b"], None, {})
    monkeypatch.setattr(sl, "evaluate_classes", lambda *_: (
        torch.full((3, 5, 6), 1e-17).double(), [{1: {}}, {1: {}}, {2: {}}]))
    found = [r for r in sl.evaluate(study)[0] if "against" in r]
    assert ["auroc_mutual_information" in r for r in found] == [False, False, True]


@pytest.mark.parametrize("dataset", OOD)
def test_eval_makes_and_deletes_nothing(copied, dataset, monkeypatch):
    """Another batch size is another way, no other options."""
    out, rows = copied(dataset)
    for name in ("data_loss", "negative_elbo", "decompose"):
        monkeypatch.setattr(sl, name, None)
    monkeypatch.setattr(sl, "KEEP_GB", 0)
    before = pieces(out)
    again = sl.main(tiny(dataset, out, "--eval", "--batch-size", 7, "--no-plot"))
    assert numbers(again) == numbers(rows) and pieces(out) == before


def test_options_side_by_side(copied, monkeypatch):
    out, rows = copied()
    before = pieces(out)
    with monkeypatch.context() as patch:
        patch.setattr(sl, "data_loss", lambda *_: pytest.fail("trains a network"))
        for more in (["--prior-precision", 3], ["--structure", "diag"], ["--flow-layers", 1],
                     ["--swag-scale", 0.5], ["--val-samples", 2], ["--samples", 9],
                     ["--swag-covariance", "low_rank"]):
            other = sl.main(tiny("glyphs", out, "--no-plot", *more))
            assert numbers(other) != numbers(rows), more
    assert before.items() <= pieces(out).items()
    assert numbers(sl.main(tiny("glyphs", out, "--eval", "--no-plot"))) == numbers(rows)


@pytest.mark.parametrize("function, call", [("data_loss", 4), ("data_loss", 10), ("data_loss", 17),
                                            ("data_loss", 34), ("negative_elbo", 5),
                                            ("predict", 9)])
def test_killed_and_resumed_equals_uninterrupted(studies, tmp_path, monkeypatch, function, call):
    """In MAP's second epoch, SWAG's, IVON's, LA-NF's, and in prediction: bit-equal pieces."""
    out, rows = studies("glyphs")
    calls, real = itertools.count(), getattr(sl, function)

    def dying(*args, **more):
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **more)

    argv = tiny("glyphs", tmp_path, "--no-plot")
    monkeypatch.setattr(sl, function, dying)
    with pytest.raises(KeyboardInterrupt):
        sl.main(argv)
    assert numbers(sl.main(argv)) == numbers(rows)
    right, found = pieces(out), pieces(tmp_path)
    assert [*found] == [*right]
    for name in right:
        a, b = (dict(leaves(torch.load(io.BytesIO(own[name]), weights_only=True)))
                for own in (right, found))
        differ = [k for k in {**a, **b} if not torch.equal(a[k], b[k])]
        assert all(k.endswith(("seconds", "_s")) for k in differ), (name, differ)


@pytest.mark.parametrize("dataset, more", [("glyphs", ["--norm", "bn", "--ivon-lr", 1e-3]),
                                           ("glyphs", ["--methods", "llla", "--ood"]),
                                           ("reviews", []), ("clusters", [])])
def test_two_processes_equal_one(tmp_path, dataset, more, monkeypatch):
    methods = ["--methods", "map", "swa", "swag", "ivon", "llla", "la_nf"]
    argv = [tiny(dataset, tmp_path / n, "--no-plot", "--samples", 4, *methods, *more, "--fresh")
            for n in ("one", "two")]
    ranks = start_ranks(tmp_path, 2, conftest.run_swag_laplace_ensembles_in_float64, *argv[1])
    conftest.in_float64(sl, monkeypatch.setattr)
    rows = sl.main(argv[0])
    for rank in ranks:
        rank.value()
    found = json.loads((tmp_path / "two" / RUN / "results.json").read_text())
    for a, b in zip(rows, found["rows"], strict=True):
        for key in {"accuracy", "lpd", "ece15", "mae", "brier", "auroc_entropy", "crps"} & {*a}:
            # SWAG's and IVON's draws are kept in float16
            exact = a["method"].startswith(("DE", "SWA,")) and key == "lpd"
            near = dict(rel=1e-7) if exact else dict(rel=1e-3, abs=1e-4)
            assert a[key] == pytest.approx(b[key], **near), (a["method"], key)


def test_evaluation_is_shared_out(monkeypatch):
    """Two machines of two processes: the second does not see the main one's files."""
    monkeypatch.setattr(common, "world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, rows in enumerate(([0, 1, 2, 3], [4, 5, 6], [], [])):
        monkeypatch.setattr(common, "rank", lambda: rank)
        assert sl.own_share(7).tolist() == rows
    monkeypatch.setattr(common, "broadcast", lambda value: value)
    for some in ("--limit-test", "--eval-batch-size"):  # before anything is trained
        with pytest.raises(UserError, match=r"4 process\(es\) cannot share 3 "):
            sl.load_sets(options("glyphs", "--batch-size", 8, "--ood", some, 3))


def test_the_papers_study_fits_on_a_disk(tmp_path, monkeypatch, capsys):
    """All draws of CIFAR-100's networks would take 331 GB."""
    args = options("cifar100", "--out-dir", tmp_path)
    sets = {"train": SimpleNamespace(num_classes=100), "val": None, "test": range(10_000),
            "ood": range(36_032)}
    study = sl.Study(args, sets, ["test"], ["ood"], SimpleNamespace(dir=tmp_path), {})
    there = dict(memory=80e9, free=300e9)
    monkeypatch.setattr(common, "device_memory", lambda _: there["memory"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=there["free"]))
    check = lambda: sl.check_room(study, 2_773_828, nn.Linear(256, 100))
    check()
    said = capsys.readouterr().out
    assert 5 < float(said.split("outputs ")[1].split(",")[0]) < 60
    for change, refusal in ((dict(free=10e9), "--out-dir"), (dict(memory=16e9), "diag")):
        there |= change
        with pytest.raises(UserError, match=refusal):
            check()


def test_missing_pieces_are_named(copied):
    out, _ = copied()
    run = out / RUN
    next(run.glob("swag-glyphs-seed2*.pt")).unlink()
    with pytest.raises(UserError, match="swag-glyphs-seed2.*without --eval"):
        sl.main(tiny("glyphs", out, "--eval", "--no-plot"))
    next(run.glob("swag-lr0.01-seed2-*-1.pt")).unlink()
    with pytest.raises(UserError, match="is missing; delete"):
        sl.main(tiny("glyphs", out, "--no-plot", "--swag-scale", 2))


def test_iterates_of_rates_not_chosen(tmp_path, monkeypatch):
    """Deleted where a study would fill the disk, and only while training; a rate whose loss or
    weights are not finite is left out."""
    monkeypatch.setattr(sl, "KEEP_GB", 0)
    argv = tiny("glyphs", tmp_path, "--no-plot", "--methods", "swa", "swag", "--members", 1,
                "--ensembles", 1, "--swag-lrs", 1e9, 0.03, 0.01, 1e-3)
    rows = sl.main(argv)
    kept = {name.split("-seed")[0] for name in pieces(tmp_path) if name.startswith("swag-lr")}
    assert 1 <= len(kept) <= 2 and "swag-lr1e+09" not in kept
    assert numbers(sl.main([*argv, "--eval"])) == numbers(rows)
    with pytest.raises(UserError, match="--swag-lrs"):
        sl.main([*argv, "--swag-lrs", "1e9"])
    with pytest.raises(UserError, match="IVON: predictions of clusters are not finite"):
        sl.main(tiny("clusters", tmp_path, "--methods", "ivon", "--ivon-epochs", 0, "--ivon-ess",
                     1e-12, "--ivon-hess-init", 1e-12, "--name", "wide"))
    monkeypatch.setattr(sl, "data_loss", lambda outputs, *_: math.nan * outputs.sum())
    with pytest.raises(UserError, match="map-seed1 .* lower --lr"):  # no rate of SWAG's is to blame
        sl.main([*argv, "--methods", "swag", "--name", "other"])


def test_dropout_draws_differ_and_are_repeated():
    """Also of a transformer, whose fast path knows no dropout."""
    args = options("reviews", "--width", 0.1, "--depth", 1)
    dataset = data.evenly(data.load_text("reviews", "test"), 12)
    torch.manual_seed(3)
    net = sl.make_network(args, dataset, 0.5)
    sampler = sl.Sampler(net, lambda s: common.seed_all(1, 12, s), True)
    first, again = (sl.predict(sampler, dataset, args, [1, 2])["log_probs"] for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first[:, 0], first[:, 1])


def test_more_of_a_study(tmp_path):
    """Of one's own large images: shifted sets, one more run, predictions of what lies in a folder
    now. Two channels are empty; SWA's rate alone is chosen; no folder is called val."""
    own, said = tmp_path / "own", []
    for part, label, i in itertools.product(("train", "test"), "ab", range(6)):
        (own / part / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (70, 70), (40 * i, 9, 9)).save(own / part / label / f"{i}.png")
    argv = tiny(f"folder:{own}", tmp_path, "--methods", "swa", "llla", "--no-plot", "--ensembles",
                1, "--image-size", 70, "--num-val", 3, "--depth", 10, "--ood", "--swag-lrs", 0.01)
    for _ in range(2):
        Image.effect_noise((70, 70), 90).convert("RGB").save(own / "test/a/0.png")
        found = sl.main([*argv, "--runs", "2", "--members", "1", "--shift", "computed",
                         "--predict", f"folder:{own}/test"])
        said.append((tmp_path / RUN / "predictions-llla.csv").read_text().splitlines())
    assert said[0][0] == "file,label,predicted,confidence,total,aleatoric,epistemic"
    assert len(said[0]) == 13 and said[0][2:] == said[1][2:] and said[0][1] != said[1][1]
    assert {r["set"] for r in found} == {"own", *(f"corrupted_{s}" for s in range(1, 6))}
    assert {r["n"] for r in found} == {12, 12 * len(data.CORRUPTIONS)}
    assert not [name for name in pieces(tmp_path) if name.startswith("swag-choice")]
    same = [r for r in found if r["set"] == "own"]
    assert [r["members"] for r in same] == ["1", "2"] * 2 and len({r["seed"] for r in same}) == 2
    apart = [sl.main([*argv, "--members", "1", "--seed", str(seed)]) for seed in (1, 2)]
    assert numbers(apart[0]) | numbers(apart[1]) == numbers(same)
    own.rename(tmp_path / "val")
    with pytest.raises(UserError, match="is called val; rename"):
        sl.main([*argv, "--dataset", f"folder:{tmp_path}/val"])


def test_predictions_of_rounded_probabilities(tmp_path, monkeypatch):
    """Of 120 equal classes in float16 they sum to .9984."""
    rounded = sl.Mixture(torch.full((2, 120), -math.log(120)).half(), torch.ones(2))
    monkeypatch.setattr(sl, "member_mixtures", lambda *_: {1: rounded})
    args = SimpleNamespace(methods=["swag"], seed=1, ensembles=[1], members=1, runs=1, samples=1)
    args.combinations, run = 1, SimpleNamespace(dir=tmp_path)
    sl.write_predictions(sl.Study(args, {"predicted": [0, 1]}, [], [], run, {}))
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 3


def test_what_depends_on_other_options(monkeypatch):
    assert options("cifar100", "--model", "wrn_28_10").structure == "diag"
    assert options("cifar10", "--members", 2).ensembles == [1, 2]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match="float64"):
        options("clusters", "--device", "mps")


@pytest.mark.parametrize("argv, said", [
    (["--dataset", "clusters", "--target", "nosuch"], "--target nosuch is for qm9"),
    (["--dataset", "reviews", "--vocab", "x"], "--vocab is for sst2"),
    (["--dataset", "reviews", "--model", "painn"], "use bert_256_4"),
    (["--dataset", "clusters", "--structure", "diag"], "molecules take full"),
    (["--dataset", "reviews", "--shift", "computed"], "use none"),
    (["--shift", "published"], "use none or computed"),
    (["--depth", "12"], "6 n [+] 4"),
    (["--model"], "expected one argument"),
    (["--members", "2", "--ensembles", "3"], "more than --members"),
    (["--samples", "2", "--members", "3", "--ensembles", "3"], "less than one a member"),
    (["--swag-epochs", "1"], "at least 2"),
    (["--prior-precision", "-1"], "at least"),
    (["--ivon-betas", "1", ".9"], "between 0 and 0.999"),
    (["--num-val", "100000"], "--num-val 100000"),
    (["--dataset", "clusters", "--limit-train", "1"], "same target"),
    (["--limit-train", "2"], "raise --limit-train"),
])
def test_misuse_is_one_line(tmp_path, argv, said):
    with pytest.raises(UserError, match=said) as error:
        sl.main(["--out-dir", str(tmp_path), "--device", "cpu", *argv])
    assert "\n" not in str(error.value) and not [*tmp_path.iterdir()]  # nothing is claimed
