"""swag_laplace_ensembles.py: equations by brute force, networks, training, posteriors, runs."""

import csv
import math
import random
import shutil
from copy import deepcopy
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
from torch.func import jacrev
from torchvision import models

import common
import data
import swag_laplace_ensembles as sl
from common import UserError

run_sl = partial(run_script, "swag_laplace_ensembles")


def close(found, expected, rtol=1e-9, atol=1e-12):
    found, expected = [torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, expected)]
    np.testing.assert_allclose(found, expected, rtol, atol)


def unit(p):
    return torch.eye(p, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- Method -------------------------------------------------------------------------------------


def test_samples_of_swag_have_half_the_covariance_and_half_the_variances_of_the_iterates():
    iterates = 5 + torch.randn(7, 4).double() * torch.tensor([1, 1e-6, 3, 0.2])
    moments = sl.swag_moments(iterates)
    diagonal = sl.swag_samples(*moments, unit(4), torch.zeros(4, 7).double()) - moments[0]
    low_rank = sl.swag_samples(*moments, torch.zeros(7, 4).double(), unit(7)) - moments[0]
    close(diagonal.T @ diagonal, iterates.var(0, correction=0).clamp_min(1e-8).diag() / 2)
    close(low_rank.T @ low_rank, iterates.T.cov() / 2)
    noise, more = torch.randn(5, 4).double(), torch.randn(5, 7).double()
    close(sl.swag_samples(*moments, noise, more),
          iterates.mean(0) + noise @ diagonal + more @ low_rank)
    far = 1e4 + torch.randn(500, 3)  # keeps its digits in float32
    close(sl.swag_moments(far)[0], far.double().mean(0), rtol=1e-7)
    close(sl.swag_moments(far)[1], far.double().var(0, correction=0), rtol=1e-3)
    with pytest.raises(ValueError, match="at least 2 iterates, not 1"):
        sl.swag_moments(far[:1])


def logits_of(theta, x):
    """The outputs of a last layer: theta has the weights row by row, then the biases."""
    d = x.shape[1]
    c = len(theta) // (d + 1)
    return x @ theta[:c * d].view(c, d).T + theta[c * d:]


def class_log_p(theta, last):
    return Categorical(logits=logits_of(theta, last.x)).log_prob(last.labels)


def lpd_of(thetas, last):
    return torch.stack([class_log_p(t, last) for t in thetas]).exp().mean(0).log().mean().item()


def hessian(log_p, theta, last):
    return -torch.autograd.functional.hessian(lambda t: log_p(t, last).sum(), theta)


def make_classes():
    """The LastLayer of 40 examples, theta, and the Hessian of the summed cross entropy."""
    theta = 0.7 * torch.randn(24).double()
    x = torch.randn(40, 5).double().tanh()
    last = sl.LastLayer(x, Categorical(logits=logits_of(theta, x)).sample())
    return last, theta, hessian(class_log_p, theta, last)


def energies_of(theta, last):
    """Mean and standard deviation [N], a molecule at a time."""
    moments = []
    for number, offset in enumerate(last.offset):
        m, u = logits_of(theta, last.x[last.molecule == number]).T
        std = (last.scale * (F.softplus(u) + 1e-8)).square().sum().sqrt()
        moments.append(torch.stack([offset + (last.scale * m).sum(), std]))
    return torch.stack(moments).T


def energy_log_p(theta, last):
    return Normal(*energies_of(theta, last)).log_prob(last.labels)


def make_molecules():
    """The EnergyLastLayer of 12 molecules, theta, and the Hessian, which is indefinite."""
    molecule = torch.arange(12).repeat_interleave(torch.randint(1, 6, (12,)))
    theta = 0.5 * torch.randn(10).double()
    last = sl.EnergyLastLayer(torch.randn(len(molecule), 4).double(), None, molecule,
                              5 * torch.randn(12).double(), torch.tensor(1.7).double())
    mean, std = energies_of(theta, last)
    last = last._replace(labels=mean + 0.01 * std * torch.randn(12).double())
    return last, theta, hessian(energy_log_p, theta, last)


@pytest.mark.parametrize("structure, fit", [("full", sl.full_laplace),
                                            ("diag", sl.diagonal_laplace)])
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_posterior(structure, fit):
    from laplace import Laplace
    from laplace.curvature import BackPackGGN
    last, theta, _ = make_classes()
    net = nn.Sequential(nn.Tanh(), nn.Linear(5, 4)).double()
    nn.utils.vector_to_parameters(theta, net.parameters())
    peer = Laplace(net, "classification", "last_layer", structure, backend=BackPackGGN)
    raw = torch.utils.data.TensorDataset(last.x.atanh(), last.labels)
    peer.fit(torch.utils.data.DataLoader(raw, 16))
    peer.prior_precision = torch.tensor(0.3).double()
    precision = peer.posterior_precision if structure == "full" else peer.posterior_precision.diag()
    root = sl.laplace_samples(fit(theta, last.x)._replace(precision=0.3), unit(24)) - theta
    close(root @ precision @ root, unit(24), atol=1e-7)
    close(root, root.T)  # the signs of eigenvectors change no sample


def test_the_choice_is_the_first_of_the_largest_finite_scores_which_do_not_underflow():
    assert sl.choose({1: math.nan, 2: -2.0, 3: -1.0, 4: -1.0, 5: math.inf}, "x") == 3
    with pytest.raises(UserError, match="--swag-lrs: no value gives a finite LPD"):
        sl.choose({1: math.nan, 2: -math.inf}, "--swag-lrs")
    close(sl.log_predictive_density(torch.tensor([[-2e3], [-3e3]])), [-2e3 - math.log(2)])


def move(t, centres, a, b):
    """Radial flows, one after another."""
    for centre, alpha, end in zip(centres, F.softplus(a), F.softplus(b)):
        t = t + (end - alpha) / (alpha + (t - centre).norm()) * (t - centre)
    return t


@pytest.mark.parametrize("make, log_p, fit", [
    (make_classes, class_log_p, sl.full_laplace), (make_classes, class_log_p, sl.diagonal_laplace),
    (make_molecules, energy_log_p, sl.energy_laplace)])
def test_hessians_flows_and_the_negative_elbo_are_those_of_brute_force(make, log_p, fit):
    """Change of variables by autograd, Gaussians of torch; also where a batch is all of the set."""
    last, theta, h = make()
    laplace = fit(theta, last if make is make_molecules else last.x)
    p = len(theta)
    basis = unit(p) if laplace.basis is None else laplace.basis
    h = h.diagonal().diag() if laplace.basis is None else h
    close(basis @ laplace.values.diag() @ basis.T, h, 1e-7, 1e-9)
    lowest = laplace.values.min().item()
    assert lowest < -0.001 if make is make_molecules else lowest >= 0  # in spite of rounding
    scores = sl.precision_scores(laplace, last, torch.randn(5, p).double())
    assert [delta > -lowest for delta in scores] == [math.isfinite(scores[d]) for d in scores]
    laplace = laplace._replace(precision=1.2 - lowest)
    base = MultivariateNormal(theta, precision_matrix=h + laplace.precision * unit(p))
    batch = last.select(torch.tensor([1, 4, 7]))
    close(log_p(theta, batch), log_p(theta, last)[[1, 4, 7]])
    flows = sl.Flow(*[torch.randn(3, *shape).double() for shape in ((4, p), (4,), (4,))])
    priors = torch.tensor([2.0, 30.0, 5.0]).double()
    for draws, n in ((1, 40), (3, 3)):  # noise of all flows, and of each
        noise = torch.randn(draws, p).double()
        found = sl.negative_elbo(flows, laplace, priors, noise, batch, n)
        starts = sl.laplace_samples(laplace, noise)
        moved, log_det = sl.apply_flow(flows, starts)
        for number, start in enumerate(starts.expand(3, -1)):
            centres, a, b = [tensor[number] for tensor in flows]
            run = partial(move, centres=centres, a=a, b=b)
            t = run(start)
            close(moved[number], t)
            close(log_det[number], torch.linalg.slogdet(jacrev(run)(start)).logabsdet)
            log_prior = Normal(0.0, priors[number].rsqrt()).log_prob(t).sum()
            expected = base.log_prob(start) - log_det[number] - log_prior
            close(found[number], expected - n / 3 * log_p(t, batch).sum(), rtol=1e-8)


@pytest.mark.parametrize("members, k", [(30, 2), (30, 20), (6, 3)])
def test_published_combinations_without_duplicates(members, k):
    expected = {}
    for i in range(1, 31):
        random.seed((k + i) * (k + i + 1) // 2 + i)
        expected[tuple(sorted(random.sample(range(1, members + 1), k)))] = i
    assert sl.member_combinations(members, k) == list(expected)
    assert k != 2 or list(expected)[0] == (5, 11)  # of the published ensembles.csv


# ---- Networks -----------------------------------------------------------------------------------


def options(*words):
    return sl.parse_args([*" ".join(map(str, words)).split(), "--device", "cpu"])


def waves(*shape):
    """Numbers in -1..1 that look random, and are always the same."""
    return (1 + torch.arange(math.prod(shape)).double()).square().sin().view(shape)


def make_network(name, shape, classes, count, width=1 / 16):
    """A small network of numbers that are always the same; `count`: parameters of the large one."""
    net = sl.make_network(options("--model", name, "--width 1"), classes, shape)
    assert sum(p.numel() for p in net.parameters()) == count
    args = options("--model", name, "--width", width, "--dropout .3")
    net = sl.make_network(args, classes, shape).double().eval()
    for key, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.2 * waves(*tensor.shape))
            if key.endswith(("running_var", "gamma", "norm.weight")):
                tensor.abs_().add_(1)
    return net


def test_networks_are_those_of_the_paper():
    """Numbers of parameters, and projections of features that were computed by hand."""
    shape = (3, 32, 32)
    images = waves(2, 3, 8, 8)
    tokens = torch.tensor([[1, 7, 12, 29, 0, 0], [3, 3, 4, 5, 6, 7]])
    bert = make_network("bert_256_4", (30522,), 2, 13_272_322)
    for net, x, expected in (
            (make_network("wrn_16_4", shape, 100, 2_773_828, 0.1), images, -3.9863750377345033),
            (make_network("wrn_16_4_bn", shape, 10, 2_748_890, 0.1), images, 0.6538783280959442),
            (bert, tokens, 1.5211138201139116), (bert, F.pad(tokens, (0, 262)), 1.5211138201139116)):
        logits, features = net(x)
        close((features * waves(*features.shape)).sum(), expected)
        close(logits, net.head(features))
    assert bert(tokens[:0])[1].shape == (0, 16)  # an empty piece of a batch
    rates = [layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)]
    assert sorted(rates) == 4 * [0.0] + 9 * [0.3]  # none in the feed-forward layers
    assert not torch.equal(bert.train()(tokens)[1], bert(tokens)[1])


def test_painn_sees_distances_within_molecules_and_energies_are_sums_over_atoms():
    """Features were computed by hand, from pairs of atoms."""
    numbers = torch.tensor([6, 1, 8, 1, 7, 9])
    sizes = torch.tensor([5, 1])
    dataset = data.MoleculeSet("x", numbers, 3 * waves(6, 3), sizes, waves(2), 4 * waves(101))
    net = make_network("painn", (), 2, 589_250)
    net = sl.EnergyNetwork(net.backbone, net.head, dataset)
    [batch] = data.SequenceLoader(dataset).epoch()
    rotation = torch.linalg.qr(waves(3, 3)).Q
    for positions in (dataset.positions @ rotation + 1, dataset.positions):  # in float64
        outputs, features = net(batch.molecules._replace(positions=positions))
        close((features[:5] * waves(5, 4)).sum(), 0.3547835928106484)
    references = torch.stack([dataset.references[z].sum() for z in numbers.split([5, 1])])
    per_atom = (dataset.labels - references) / sizes
    last = net.last_layer(features, dataset)
    close(last.scale, per_atom.std())
    close(last.offset, references + sizes * per_atom.mean())
    mean, std = energies_of(sl.flat_head(net.head), last)
    close(outputs, torch.stack([mean, std**2], 1))
    loss = net.loss(outputs, batch.labels)
    close(loss, -Normal(mean, std).log_prob(batch.labels).mean() - 0.5 * math.log(2 * math.pi))
    loss.backward()  # finite for the lone atom, too
    assert all(p.grad.isfinite().all() for p in net.parameters())


# ---- Training and posteriors --------------------------------------------------------------------


def flatten(args, shape):
    """A network of one's own."""
    return [nn.Flatten()], math.prod(shape)


@pytest.fixture
def linear(tmp_path, monkeypatch):
    """Splits, options and run of a linear network; 24 images of three classes are a batch."""
    monkeypatch.setitem(sl.NETWORKS, "linear", flatten)
    monkeypatch.setattr(sl, "FLOW_EPOCHS", 2)
    args = options("--dataset glyphs --model linear --epochs 4 --batch-size 24 --lr .5 --samples 6 "
                   "--weight-decay .1 --swag-epochs 3 --swag-lrs 1e30 .3 .01 --val-samples 4 "
                   "--flow-layers 2 --out-dir", tmp_path)
    images = torch.rand(36, 1, 2, 2)
    labels = images.flatten(1)[:, :3].argmax(1)
    whole = data.ImageSet("x", images, labels, 3, (0.3,), (0.4,))
    splits = data.Splits(whole.select(slice(24)), whole.select(slice(24, 36)), None, [], None)
    return splits, args, common.Run(args, "x")


def make_member(splits, args):
    common.seed_all(7)
    return sl.Member(sl.make_member(args, splits.train), 7, "name")


def weights_of(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def descend(net, train_set, optimiser, rates):
    """The weights after each step on all images."""
    [batch] = data.Loader(train_set, 24).epoch()
    weights = []
    for rate in rates:
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        F.cross_entropy(net(batch.images)[0], batch.labels).backward()
        optimiser.step()
        weights.append(weights_of(net))
    return torch.stack(weights)


@pytest.mark.parametrize("opt, make", [
    ("sgd", partial(torch.optim.SGD, momentum=0.9, nesterov=True)), ("adamw", torch.optim.AdamW)])
def test_networks_are_those_of_the_best_epoch_of_half_a_cosine(opt, make, linear, monkeypatch):
    splits, args, run = linear
    args.opt = opt
    lpds = iter([-3.0, -1.0, -1.0, -2.0])
    monkeypatch.setattr(sl, "validation_lpd", lambda *_: next(lpds))
    best = sl.train_map(splits, 7, args, run)
    net = make_member(splits, args).net
    rates = [0.25 + 0.25 * math.cos(math.pi * epoch / 4) for epoch in range(4)]
    weights = descend(net, splits.train, make(net.parameters(), weight_decay=0.1), rates)
    close(weights_of(best), weights[1], 1e-4, 1e-6)
    last = common.load(run.dir / "map-seed7.pt")["last"]
    close(torch.cat([last["head.weight"].flatten(), last["head.bias"]]), weights[3], 1e-4, 1e-6)


def swag_networks(iterates, count, member, args):
    """The weights of samples of SWAG."""
    samples = []
    for number in range(count):
        noises = [sl.draw_noise((1, p), stream, member, args, number)
                  for p, stream in zip(iterates.T.shape, ("swag", "low_rank"))]
        samples += sl.swag_samples(*sl.swag_moments(iterates), *noises)
    return samples


def test_swa_and_swag_choose_among_rates_of_sgd_by_their_own_densities(linear):
    splits, args, run = linear
    args.augment = True  # of MAP networks alone
    member = make_member(splits, args)
    val = sl.compute_last_layer(member.net, splits.val, args)
    scores = {"swa": {}, "swag": {}}
    for rate in args.swag_lrs[1:]:  # 1e30 diverges
        net = deepcopy(member.net)
        optimiser = torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=0.1)
        iterates = descend(net, splits.train, optimiser, 3 * [rate])
        close(sl.run_sgd(member, rate, splits.train, args)["iterates"], iterates, 1e-4, 1e-6)
        scores["swa"][rate] = lpd_of([iterates.mean(0)], val)
        scores["swag"][rate] = lpd_of(swag_networks(iterates, 4, member, args), val)
    best = {method: max(of_rate, key=of_rate.get) for method, of_rate in scores.items()}
    assert sl.choose_rates(member, splits, args, run) == best
    kept = {f"name-sgd-lr{rate:g}.pt" for rate in best.values()}
    assert {path.name for path in run.dir.glob("*.pt")} == kept


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_last_layers_are_those_of_the_best_precisions(structure, linear, monkeypatch):
    """LLLA by a Hessian; each flow by itself, on the batches and the noise of all."""
    splits, args, _ = linear
    args.structure, args.batch_size = structure, 12
    member = make_member(splits, args)
    steps = []
    negative_elbo = sl.negative_elbo

    def spy(*arguments):
        steps.append(arguments[3:])
        return negative_elbo(*arguments)

    monkeypatch.setattr(sl, "negative_elbo", spy)
    heads = sl.fit_last_layer(member, splits, args)
    train, val = [sl.compute_last_layer(member.net, dataset, args) for dataset in splits[:2]]
    theta = sl.flat_head(member.net.head).detach()
    h = hessian(class_log_p, theta.double(), train._replace(x=train.x.double()))
    h = h if structure == "full" else h.diagonal().diag()
    samples = {}  # {LPD: (precision, samples for validation, samples)}
    for delta in sl.LAPLACE_GRID:
        root = torch.from_numpy(sqrtm(torch.linalg.inv(h + delta * unit(15)).numpy())).float()
        for_val, for_test = [theta + sl.draw_noise((n, 15), stream, member, args) @ root
                             for n, stream in ((4, "llla_val"), (6, "llla"))]
        samples[lpd_of(for_val, val)] = (delta, for_val, for_test)
    delta, *of_llla = samples[max(samples)]
    close(heads["llla"], of_llla[1], 1e-3, 1e-4)

    noises, batches, ns = zip(*steps)
    assert ns == (24, 24, 24, 24) and len(torch.cat(noises).unique(dim=0)) == 4
    first, second = torch.cat([batch.x for batch in batches]).split(24)
    assert len(first.unique(dim=0)) == 24 and not torch.equal(first, second)
    laplace = sl.Laplace(theta, *sl.eigendecomposition(h), delta)
    refined = {}
    for precision in sl.FLOW_GRID:
        common.seed_all(7, sl.STREAMS["flow"])
        flow = sl.Flow(*[tensor.requires_grad_() for tensor in sl.initial_flows(1, 2, 15)])
        adam = torch.optim.Adam(flow)
        for number, step in enumerate(steps):
            adam.param_groups[0]["lr"] = 5e-4 + 5e-4 * math.cos(math.pi * number / 4)
            adam.zero_grad()
            negative_elbo(flow, laplace, torch.tensor([precision]), *step).sum().backward()
            adam.step()
        for_val, for_test = [sl.apply_flow(flow, t)[0].detach() for t in of_llla]
        refined[lpd_of(for_val, val)] = for_test
    close(heads["la_nf"], refined[max(refined)], 1e-3, 1e-4)


def refresh_in_a_process(args, train_set):
    """The statistics of a batch norm after refresh_batch_norm, and the batches it has seen."""
    args.device = common.start("cpu")
    norm = nn.BatchNorm2d(1)
    batches = []
    norm.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0]))
    sl.refresh_batch_norm(norm, train_set, args)
    return norm.running_mean, norm.running_var, batches


@pytest.mark.parametrize("processes, size, n", [(1, 19, 21), (2, 10, 20)])
def test_statistics_of_batch_norm_weigh_images_equally(processes, size, n, linear, tmp_path):
    """Also those of a small last batch; shuffled; in all processes the same."""
    splits, args, _ = linear
    args.batch_size = size
    train_set = splits.train.select(slice(n))
    results = run_ranks(tmp_path, refresh_in_a_process, args, train_set, size=processes)
    batches = [batch for *_, of_process in results for batch in of_process]
    assert len(batches) == 2 * processes
    for mean, variance, _ in results:
        close(mean, torch.cat(batches).mean((0, 2, 3)), 1e-4, 1e-6)
        close(variance, sum(len(batch) / n * batch.var() for batch in batches)[None], 1e-4)
    [in_order] = data.Loader(train_set, n).epoch()
    assert not torch.equal(batches[0], in_order.images[:len(batches[0])])


def test_a_name_depends_on_parameters_and_buffers():
    """Other running statistics are another network."""
    net = nn.BatchNorm1d(2)
    names = {sl.name_member(net, 1), sl.name_member(net, 2)}
    for tensor in (net.weight.data, net.running_mean, net.running_var):
        tensor += 1
        names.add(sl.name_member(net, 1))
    assert len(names) == 5 and len({*sl.STREAMS.values()}) == len(sl.STREAMS)
