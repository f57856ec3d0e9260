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


# ---- Flows --------------------------------------------------------------------------------------


def make_flows(layers, p, spread=1.0):
    """Three flows side by side."""
    return sl.Flow(*[spread * torch.randn(3, *shape).double()
                     for shape in ((layers, p), (layers,), (layers,))])


def one_of(flows, number):
    return sl.Flow(*[tensor[number] for tensor in flows])


def test_radial_flows_side_by_side_are_the_published_ones():
    flows = make_flows(4, 5, spread=2)
    flows.b[:, 1] = flows.a[:, 1]  # beta = 0: nothing moves
    for theta in (torch.randn(1, 5).double(), torch.randn(3, 5).double()):
        moved, log_det = sl.apply_flow(flows, theta)
        for number in range(3):
            start = theta[number % len(theta)]
            x = start
            for centre, a, b in zip(*one_of(flows, number)):
                alpha = math.log1p(math.exp(a))
                beta = math.log1p(math.exp(b)) - alpha
                x = x + beta / (alpha + (x - centre).norm()) * (x - centre)
            close(moved[number], x)
            jacobian = torch.func.jacrev(lambda t: sl.apply_flow(one_of(flows, number), t)[0])
            close(log_det[number], torch.linalg.slogdet(jacobian(start)).logabsdet)


def test_the_density_of_a_flow_integrates_to_1():
    """log q at the image of a grid, whose cells have the area |det|."""
    flow = one_of(make_flows(3, 2, spread=2), 0)
    line = torch.linspace(-9, 9, 400).double()
    grid = torch.cartesian_prod(line, line)
    y, log_det = sl.apply_flow(flow, grid)
    corners = y.view(400, 400, 2)
    along = corners[2:, 1:-1] - corners[:-2, 1:-1]
    across = corners[1:-1, 2:] - corners[1:-1, :-2]
    area = (along[..., 0] * across[..., 1] - along[..., 1] * across[..., 0]) / 4
    log_q = Normal(0.0, 1.0).log_prob(grid).sum(-1) - log_det
    mass = log_q.exp().view(400, 400)[1:-1, 1:-1] * area
    assert mass.sum().item() == pytest.approx(1, abs=2e-3)


def test_flows_start_equal_and_uniform():
    flows = sl.initial_flows(15, 10, 2500)
    for tensor, shape in zip(flows, ((15, 10, 2500), (15, 10), (15, 10))):
        assert tensor.shape == shape and (tensor == tensor[0]).all()
        assert 0 < tensor.abs().max() <= 0.02
    assert flows.centres.std().item() == pytest.approx(0.02 / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("kind", ["full", "diag", "energies"])
def test_the_negative_elbo_is_that_of_brute_force(kind):
    """Gaussians by torch, log-determinants by autograd; also where a batch is all of the set."""
    if kind == "energies":
        last, theta = make_molecules()
        laplace = sl.energy_laplace(theta, last)
        log_p = energy_log_p
    else:
        last, theta = make_classes(d=3, c=3)
        fit = {"full": sl.full_laplace, "diag": sl.diagonal_laplace}[kind]
        laplace = fit(theta, last.x)
        log_p = partial(lambda t, last: -cross_entropy(t, last))
    batch = last.select(torch.tensor([1, 4, 7]))
    close(batch.log_likelihood(theta[None]), last.log_likelihood(theta[None])[:, [1, 4, 7]])
    laplace = laplace._replace(precision=1.2 - min(0, laplace.values.min().item()))
    p = len(theta)
    base = MultivariateNormal(theta, precision_matrix=curvature(laplace)
                              + laplace.precision * unit(p))
    flows = make_flows(3, p, spread=0.3)
    precisions = torch.tensor([2.0, 30.0, 5.0]).double()
    for draws, n in ((1, 40), (3, 3)):
        noise = torch.randn(draws, p).double()
        found = sl.negative_elbo(flows, laplace, precisions, noise, batch, n)
        starts = sl.laplace_samples(laplace, noise)
        for number, precision in enumerate(precisions):
            run = partial(lambda t, flow: sl.apply_flow(flow, t)[0], flow=one_of(flows, number))
            start = starts[number % draws]
            t = run(start)
            log_det = torch.linalg.slogdet(torch.func.jacrev(run)(start)).logabsdet
            prior = Normal(0.0, precision.rsqrt()).log_prob(t).sum()
            expected = base.log_prob(start) - log_det - prior - n / 3 * log_p(t, batch).sum()
            close(found[number], expected, rtol=1e-8)


# ---- Ensembles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("members, k", [(30, 2), (30, 20), (6, 3)])  # several of 6 are equal
def test_published_combinations(members, k):
    expected = []
    for i in range(1, 31):
        random.seed((k + i) * (k + i + 1) // 2 + i)
        chosen = tuple(sorted(random.sample(list(range(1, members + 1)), k)))
        if chosen not in expected:
            expected.append(chosen)
    found = sl.member_combinations(members, k)
    assert found == expected
    assert k != 2 or found[0] == (5, 11)  # of the published ensembles.csv


def test_ensembles_have_members_of_one_run():
    args = Namespace(ensembles=[1, 3], runs=2, members=3)
    assert sl.list_ensembles(args) == [(0,), (1,), (2,), (3,), (4,), (5,), (0, 1, 2), (3, 4, 5)]


def test_each_member_gives_as_many_samples_of_which_ensembles_use_the_first():
    args = Namespace(samples=200, ensembles=[1, 3, 20])
    assert sl.sample_counts("swag", args) == {200, 66, 10} and sl.sample_counts("swa", args) == {1}
    outputs = 2 * torch.randn(3, 5, 40, 4)  # members, samples, N, C
    test = Namespace()
    mixtures = [sl.mix(z, test, {2, 5}) for z in outputs]
    for n in (2, 5):
        predictions = sl.predict([mixture[n] for mixture in mixtures], test, n)
        probs = outputs[:, :n].double().softmax(-1).flatten(0, 1)
        expected = common.ensemble_uncertainty(probs.log())
        close(predictions.outputs[0].exp(), probs.mean(0), rtol=1e-6)
        for name, values in expected.items():
            close(predictions.scores[name], values, rtol=1e-5, atol=1e-6)
    far = sl.mix(torch.tensor([[[0.0, 900.0]], [[0.0, 950.0]]]), test, {2})  # underflows
    assert far[2].log_probs[0, 0].item() == pytest.approx(-900 - math.log(2))


@pytest.mark.parametrize("count", [1, 2])
def test_one_sample_has_no_epistemic_uncertainty(count):
    """Its rounding errors would tell two sets apart."""
    energies = data.MoleculeSet("x", *[None] * 5)
    for dataset, outputs in ((Namespace(), torch.randn(2, 9, 3)), (energies, torch.rand(2, 9, 2))):
        mixture = sl.mix(outputs, dataset, {count})[count]
        assert ("epistemic" in sl.predict([mixture], dataset, count).scores) == (count == 2)


# ---- Networks -----------------------------------------------------------------------------------


def options(more=""):
    return sl.parse_args(f"--device cpu --workers 0 {more}".split())


def make_network(name, shape, more="", classes=5):
    """A network with random numbers in all tensors, in float64 and eval mode."""
    net = sl.make_network(options(f"--model {name} {more}"), classes, shape).double().eval()
    for key, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.3)
            if key.endswith(("running_var", "gamma", "norm.weight")):
                tensor.abs_().add_(1)
    return net


@pytest.mark.parametrize("name, classes, count", [
    ("wrn_16_4", 10, 2_750_698), ("wrn_16_4", 100, 2_773_828), ("wrn_16_4_bn", 10, 2_748_890),
    ("bert_256_4", 2, 13_272_322), ("painn", 2, 589_250)])
def test_published_numbers_of_parameters(name, classes, count):
    shape = {"wrn": (3, 32, 32), "ber": (30522,), "pai": ()}[name[:3]]
    net = sl.make_network(options(f"--model {name} --dropout .5"), classes, shape)
    assert sum(p.numel() for p in net.parameters()) == count
    if name == "bert_256_4":  # whose head is initialised by PyTorch
        stds = [net.head.weight.std().item(), net.backbone[0].layers[0].linear1.weight.std().item()]
        assert stds == pytest.approx([1 / math.sqrt(3 * 256), 0.02], rel=0.1)
        rates = [layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)]
        rates += [layer.self_attn.dropout for layer in net.backbone[0].layers]
        assert sorted(rates) == 4 * [0.0] + 13 * [0.5]  # none in the feed-forward layers


def normalise(norm, x):
    """FRN with its threshold, or batch norm in eval mode and ReLU."""
    if isinstance(norm, sl.FRN):
        power = x.square().mean((2, 3), keepdim=True)
        return torch.maximum(norm.gamma * x / (power + 1e-6).sqrt() + norm.beta, norm.tau)
    bn = norm[0]
    return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias).relu()


@pytest.mark.parametrize("name", ["wrn_16_4", "wrn_16_4_bn"])
def test_wide_resnets_are_published_ones_whose_shortcuts_see_the_first_norm(name):
    net = make_network(name, (3, 8, 8), "--width .1")
    images = torch.randn(2, 3, 8, 8).double()
    stem, *blocks, norm, _, _ = net.backbone
    x = F.conv2d(images, stem.weight, padding=1)
    for number, block in enumerate(blocks):
        first, middle, second = block.body
        stride = 2 if number in (2, 4) else 1
        h = normalise(block.norm_1, x)
        if number % 2 == 0:
            x = F.conv2d(h, block.shortcut[1].weight, stride=stride)
        h = normalise(middle, F.conv2d(h, first.weight, stride=stride, padding=1))
        x = x + F.conv2d(h, second.weight, padding=1)
    features = normalise(norm, x).mean((2, 3))
    assert len(blocks) == 6 and features.shape == (2, 26)
    found = net(images)
    close(found[1].detach(), features.detach())
    close(found[0].detach(), F.linear(features, net.head.weight, net.head.bias).detach())


def test_frn_of_zeros_has_finite_gradients_in_bfloat16():
    zero = torch.zeros(2, 4, 5, 5, dtype=torch.bfloat16, requires_grad=True)
    y = sl.FRN(4)(zero)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and (y == 0).all() and zero.grad.isfinite().all()


def bert_by_hand(bert, tokens):
    """Features, with attention of eight heads and feed-forward written out."""
    b, length = tokens.shape
    x = bert.norm(bert.words.weight[tokens] + bert.positions.weight[:length] + bert.types.weight[0])
    for layer in bert.layers:
        attention = layer.self_attn
        q, k, v = [part.view(b, length, 8, -1).transpose(1, 2) for part in
                   F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)]
        weights = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = weights.masked_fill((tokens == 0)[:, None, None], -math.inf).softmax(-1)
        x = layer.norm1(x + attention.out_proj((weights @ v).transpose(1, 2).flatten(2)))
        x = layer.norm2(x + layer.linear2(F.gelu(layer.linear1(x))))
    return bert.pooler[0](x[:, 0]).tanh()


def test_bert_is_that_of_the_paper_for_which_padding_is_inert():
    net = make_network("bert_256_2", (30,), "--width .0625 --dropout .3")
    is_token = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    tokens = torch.randint(1, 30, (3, 9)).where(is_token, 0)
    features = bert_by_hand(net.backbone[0], tokens).detach()
    close(net(tokens)[1].detach(), features)
    with torch.no_grad():  # PyTorch's fast path
        close(net(F.pad(tokens, (0, 259)))[1], features)
        assert net(tokens[:0])[1].shape == (0, 16)  # an empty piece of a batch
        net.train()
        assert not torch.equal(net(tokens)[1], net(tokens)[1])


def make_molecule_set(sizes=(5, 1, 3, 6)):
    count = sum(sizes)
    numbers = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (count,))]
    return data.MoleculeSet("x", numbers, 1.5 * torch.randn(count, 3).double(), torch.tensor(sizes),
                            10 * torch.randn(len(sizes)).double(),
                            torch.linspace(-3, 4, 101).double())


def painn_by_hand(painn, numbers, positions):
    """The features of one molecule, each atom [i] with each other [i, j]."""
    n = len(numbers)
    offset = positions - positions[:, None]
    d = offset.norm(dim=-1, keepdim=True) + unit(n)[..., None]
    rbf = torch.cat([torch.sin(k * math.pi * d / 5) / d for k in range(1, 21)], -1)
    cut = 0.5 * (torch.cos(math.pi * d / 5) + 1) * (d < 5) * (1 - unit(n)[..., None])
    s = painn.embedding.weight[numbers]
    v = torch.zeros(n, 3, s.shape[1]).double()
    for layer in painn.layers:
        vv, ss, vs = (layer.message(s) * layer.filter(rbf) * cut).chunk(3, -1)
        v = v + (vv[:, :, None] * v + vs[:, :, None] * (offset / d)[..., None]).sum(1)
        s = s + ss.sum(1)
        u_v, v_v = v @ layer.u.weight.T, v @ layer.v.weight.T
        a_vv, a_sv, a_ss = layer.update(torch.cat([v_v.norm(dim=1), s], -1)).chunk(3, -1)
        s = s + a_ss + a_sv * (u_v * v_v).sum(1)
        v = v + u_v * a_vv[:, None]
    return painn.readout(s)


def test_painn_is_a_sum_over_pairs_and_energies_are_sums_over_atoms():
    dataset = make_molecule_set()
    net = make_network("painn", (), "--width .0625", 2)
    net = sl.EnergyNetwork(net.backbone, net.head, dataset)
    sizes = dataset.sizes.tolist()
    references = [dataset.references[z] for z in dataset.numbers.split(sizes)]
    per_atom = (dataset.labels - torch.stack([r.sum() for r in references])) / dataset.sizes
    expected = []
    for r, z, x in zip(references, dataset.numbers.split(sizes), dataset.positions.split(sizes)):
        m, u = net.head(painn_by_hand(net.backbone[0], z, x)).T
        mean = (per_atom.std() * m + per_atom.mean() + r).sum()
        expected.append([mean, (per_atom.std() * (F.softplus(u) + 1e-8)).square().sum()])
    [batch] = data.SequenceLoader(dataset, 9).epoch()
    graph = batch.molecules._replace(positions=dataset.positions)  # in float64
    outputs, features = net(graph)
    close(outputs.detach(), torch.tensor(expected), rtol=1e-8)
    last = net.last_layer(features, dataset)
    close(last.outputs(sl.flat_head(net.head)[None])[0].detach(), outputs.detach())
    error = Normal(outputs[:, 0], outputs[:, 1].sqrt()).log_prob(batch.labels)
    loss = net.loss(outputs, batch.labels)
    assert loss.item() == pytest.approx(-error.mean().item() - 0.5 * math.log(2 * math.pi))
    loss.backward()  # finite for the lone atom, too
    assert all(p.grad.isfinite().all() for p in net.parameters())
