"""swag_laplace_ensembles.py: equations by brute force, networks, training, posteriors, runs."""

import csv
import math
import random
import shutil
from argparse import Namespace
from copy import deepcopy
from functools import cache, partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal
from torchvision import models

import common
import data
import swag_laplace_ensembles as sl
from common import UserError

IDENTITY = torch.eye(24).double()
run_swag = partial(run_script, "swag_laplace_ensembles")


def assert_close(actual, expected, rtol=1e-9, atol=1e-12):
    actual = torch.as_tensor(actual, dtype=torch.float64).detach()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach()
    np.testing.assert_allclose(actual, expected, rtol, atol)


def test_samples_of_swag_have_half_the_covariance_and_half_the_variances_of_the_iterates():
    iterates = 5 + torch.randn(7, 4).double() * torch.tensor([1, 1e-6, 3, 0.2])
    moments = sl.swag_moments(iterates)
    zeros = torch.zeros(7, 7).double()
    diagonal = sl.swag_samples(*moments, IDENTITY[:4, :4], zeros[:4]) - moments[0]
    low_rank = sl.swag_samples(*moments, zeros[:, :4], IDENTITY[:7, :7]) - moments[0]
    assert_close(diagonal.T @ diagonal, iterates.var(0, correction=0).clamp_min(1e-8).diag() / 2)
    assert_close(low_rank.T @ low_rank, iterates.T.cov() / 2)
    samples = sl.swag_samples(*moments, fixed_numbers(5, 4), fixed_numbers(5, 7))
    expected = iterates.mean(0) + fixed_numbers(5, 4) @ diagonal + fixed_numbers(5, 7) @ low_rank
    assert_close(samples, expected)
    far = 1e4 + torch.randn(500, 3)  # variances keep their digits in float32
    assert_close(sl.swag_moments(far)[1], far.double().var(0, correction=0), rtol=1e-3)
    with pytest.raises(ValueError, match="at least 2 iterates, not 1"):
        sl.swag_moments(far[:1])


def apply_last_layer(theta, x):
    """The outputs of a last layer: theta has the weights row by row, then the biases."""
    outputs = len(theta) // (x.shape[1] + 1)
    return F.linear(x, theta[:-outputs].view(outputs, -1), theta[-outputs:])


def class_log_likelihood(theta, last):
    return Categorical(logits=apply_last_layer(theta, last.x)).log_prob(last.labels)


def make_class_examples():
    torch.manual_seed(0)
    theta = 0.7 * torch.randn(24).double()
    x = torch.randn(40, 5).double().tanh()
    return sl.LastLayer(x, Categorical(logits=apply_last_layer(theta, x)).sample()), theta


def energies_one_by_one(theta, last):
    """Mean and standard deviation [N], a molecule at a time."""
    moments = []
    for number, offset in enumerate(last.offset):
        m, u = apply_last_layer(theta, last.x[last.molecule == number]).T
        std = (last.scale * (F.softplus(u) + 1e-8)).square().sum().sqrt()
        moments.append(torch.stack([offset + (last.scale * m).sum(), std]))
    return torch.stack(moments).T


def energy_log_likelihood(theta, last):
    return Normal(*energies_one_by_one(theta, last)).log_prob(last.labels)


def make_molecule_examples():
    torch.manual_seed(0)
    molecule = torch.arange(12).repeat_interleave(torch.randint(1, 6, (12,)))
    theta = 0.5 * torch.randn(10).double()
    last = sl.EnergyLastLayer(torch.randn(len(molecule), 4).double(), None, molecule,
                              5 * torch.randn(12).double(), torch.tensor(1.7).double())
    mean, std = energies_one_by_one(theta, last)
    return last._replace(labels=mean + 0.01 * std * torch.randn(12).double()), theta


def test_the_choice_is_the_first_of_the_largest_finite_scores_which_do_not_underflow():
    assert sl.choose({1: math.nan, 2: -2.0, 3: -1.0, 4: -1.0, 5: math.inf}, "x") == 3
    with pytest.raises(UserError, match="x: no value gives a finite LPD"):
        sl.choose({1: math.nan, 2: -math.inf}, "x")
    assert_close(sl.log_predictive_density(torch.tensor([[-2e3], [-3e3]])), [-2e3 - math.log(2)])


@pytest.mark.parametrize("make, log_p, fit", [
    (make_class_examples, class_log_likelihood, sl.full_laplace),
    (make_class_examples, class_log_likelihood, sl.diagonal_laplace),
    (make_molecule_examples, energy_log_likelihood, sl.energy_laplace)])
def test_hessians_flows_and_the_negative_elbo_are_those_of_brute_force(make, log_p, fit):
    """Change of variables by autograd, Gaussians of torch; also where a batch is all of the set."""
    def move(centres, a, b, t):
        for centre, alpha, end in zip(centres, F.softplus(a), F.softplus(b)):
            t = t + (end - alpha) / (alpha + (t - centre).norm()) * (t - centre)
        return t

    last, theta = make()
    h = -torch.autograd.functional.hessian(lambda t: log_p(t, last).sum(), theta)
    laplace = fit(theta, last if make is make_molecule_examples else last.x)
    p = len(theta)
    h = h.diagonal().diag() if laplace.basis is None else h
    lowest = laplace.values.min().item()
    # For molecules, H is indefinite; otherwise it is not, in spite of rounding.
    assert lowest < -0.001 if make is make_molecule_examples else lowest >= 0
    scores = sl.precision_scores(laplace, last, torch.randn(5, p).double())
    assert [delta > -lowest for delta in scores] == [math.isfinite(scores[d]) for d in scores]
    laplace = laplace._replace(precision=1.2 - lowest)
    precision = h + laplace.precision * IDENTITY[:p, :p]
    root = sl.laplace_samples(laplace, IDENTITY[:p, :p]) - theta
    assert_close(root @ precision @ root, IDENTITY[:p, :p])
    assert_close(root, root.T)  # the signs of eigenvectors change no sample
    base = MultivariateNormal(theta, precision_matrix=precision)
    batch = last.select(torch.tensor([1, 4, 7]))
    assert_close(log_p(theta, batch), log_p(theta, last)[[1, 4, 7]])
    flows = sl.Flow(*[torch.randn(3, *shape).double() for shape in ((4, p), (4,), (4,))])
    priors = torch.tensor([2.0, 30.0, 5.0]).double()
    for draws, n in ((1, 40), (3, 3)):  # noise of all flows, and of each
        noise = torch.randn(draws, p).double()
        losses = sl.negative_elbo(flows, laplace, priors, noise, batch, n)
        starts = sl.laplace_samples(laplace, noise)
        moved, log_det = sl.apply_flow(flows, starts)
        for number, start in enumerate(starts.expand(3, -1)):
            apply_flow = partial(move, *[tensor[number] for tensor in flows])
            t = apply_flow(start)
            jacobian = torch.func.jacrev(apply_flow)(start)
            assert_close(moved[number], t)
            assert_close(log_det[number], torch.linalg.slogdet(jacobian).logabsdet)
            log_prior = Normal(0.0, priors[number].rsqrt()).log_prob(t).sum()
            expected = base.log_prob(start) - log_det[number] - log_prior
            expected = expected - n / 3 * log_p(t, batch).sum()
            assert_close(losses[number], expected, rtol=1e-8)


@pytest.mark.parametrize("members, k", [(30, 2), (30, 20), (6, 3)])
def test_published_combinations_without_duplicates(members, k):
    expected = {}
    for i in range(1, 31):
        random.seed((k + i) * (k + i + 1) // 2 + i)
        expected[tuple(sorted(random.sample(range(1, members + 1), k)))] = i
    assert sl.member_combinations(members, k) == list(expected)


def parse(*words):
    return sl.parse_args([*" ".join(map(str, words)).split(), "--device", "cpu"])


def fixed_numbers(*shape):
    """Numbers in -1..1 that look random, and are always the same."""
    return (1 + torch.arange(math.prod(shape)).double()).square().sin().view(shape)


def make_network(name, shape, classes, count, width=1 / 16):
    """A small network of numbers that are always the same; `count`: parameters of the large one."""
    net = sl.make_network(parse("--model", name, "--width 1"), classes, shape)
    assert sum(p.numel() for p in net.parameters()) == count
    args = parse("--model", name, "--width", width, "--dropout .3")
    net = sl.make_network(args, classes, shape).double().eval()
    for key, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.2 * fixed_numbers(*tensor.shape))
            if key.endswith(("running_var", "gamma", "norm.weight")):
                tensor.abs_().add_(1)
    return net


def test_networks_are_those_of_the_paper():
    """Numbers of parameters, and projections of features that were computed by hand."""
    shape = (3, 32, 32)
    images = fixed_numbers(2, 3, 8, 8)
    tokens = torch.tensor([[1, 7, 12, 29, 0, 0], [3, 3, 4, 5, 6, 7]])
    bert = make_network("bert_256_4", (30522,), 2, 13_272_322)
    for net, x, expected in (
            (make_network("wrn_16_4", shape, 100, 2_773_828, 0.1), images, -3.98637503773),
            (make_network("wrn_16_4_bn", shape, 10, 2_748_890, 0.1), images, 0.65387832809),
            (bert, tokens, 1.52111382011), (bert, F.pad(tokens, (0, 262)), 1.52111382011)):
        features = net(x)[1]
        assert_close((features * fixed_numbers(*features.shape)).sum(), expected)
    assert bert(tokens[:0])[1].shape == (0, 16)  # an empty piece of a batch
    rates = [layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)]
    assert sorted(rates) == 4 * [0.0] + 9 * [0.3]  # none in the feed-forward layers


def test_painn_sees_distances_within_molecules_and_energies_are_sums_over_atoms():
    numbers = torch.tensor([6, 1, 8, 1, 7, 9])
    dataset = data.MoleculeSet("x", numbers, 3 * fixed_numbers(6, 3), torch.tensor([5, 1]),
                               fixed_numbers(2), 4 * fixed_numbers(101))
    net = make_network("painn", (), 2, 589_250)
    net = sl.EnergyNetwork(net.backbone, net.head, dataset)
    [batch] = data.SequenceLoader(dataset).epoch()
    outputs, features = net(batch.molecules._replace(positions=dataset.positions))  # in float64
    # Computed by hand, from pairs of atoms.
    assert_close((features[:5] * fixed_numbers(5, 4)).sum(), 0.3547835928106484)
    references = torch.stack([dataset.references[z].sum() for z in numbers.split([5, 1])])
    per_atom = (dataset.labels - references) / dataset.sizes
    offset = references + dataset.sizes * per_atom.mean()
    molecule = torch.tensor([0, 0, 0, 0, 0, 1])
    last = sl.EnergyLastLayer(features, dataset.labels, molecule, offset, per_atom.std())
    mean, std = energies_one_by_one(sl.flat_head(net.head), last)
    assert_close(outputs, torch.stack([mean, std**2], 1))
    loss = -sl.output_log_likelihood(outputs[None], batch.labels).mean()
    assert_close(loss, -Normal(mean, std).log_prob(batch.labels).mean())
    loss.backward()  # finite for the lone atom, too
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.fixture
def linear_network(tmp_path, monkeypatch):
    """Splits, options, run and a member with dropout; 24 training images of three classes."""
    monkeypatch.setitem(sl.NETWORKS, "own", lambda args, shape: (
        [nn.Flatten(), nn.Dropout(0.2)], math.prod(shape)))
    monkeypatch.setattr(sl, "FLOW_EPOCHS", 2)
    args = parse("--dataset glyphs --model own --epochs 4 --batch-size 24 --lr .5 --samples 6 "
                 "--weight-decay .1 --swag-epochs 3 --swag-lrs 1e30 5 7 --val-samples 2 "
                 "--flow-layers 2 --out-dir", tmp_path)
    torch.manual_seed(0)
    images = torch.rand(36, 1, 2, 2)
    labels = images.flatten(1)[:, :3].argmax(1)
    whole = data.ImageSet("x", images, labels, 3, (0.3,), (0.4,))
    splits = data.Splits(whole.select(slice(24)), whole.select(slice(24, 36)), None, [], None)
    common.seed_all(7)
    member = sl.Member(sl.make_member(args, splits.train), 7, "name")
    return splits, args, common.Run(args, "x", "y"), member


def iterates_of_sgd(net, train_set, rates, make=partial(torch.optim.SGD, momentum=0.9)):
    net = deepcopy(net).train()
    optimiser = make(net.parameters(), weight_decay=0.1)
    weights = []
    for epoch, rate in enumerate(rates):
        [batch] = data.Loader(train_set, 24, seed=7, shuffle=True).epoch(epoch)
        common.seed_all(7, epoch, 0)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        F.cross_entropy(net(batch.images)[0], batch.labels).backward()
        optimiser.step()
        weights.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    return torch.stack(weights)


@pytest.mark.parametrize("opt, make", [
    ("sgd", partial(torch.optim.SGD, momentum=0.9, nesterov=True)), ("adamw", torch.optim.AdamW)])
def test_networks_are_those_of_the_best_epoch_of_half_a_cosine(opt, make, linear_network,
                                                               monkeypatch):
    splits, args, run, member = linear_network
    args.opt = opt
    lpds = iter([-3.0, -2.0, -1.0, -1.0])
    monkeypatch.setattr(sl, "validation_lpd", lambda *_: next(lpds))
    rates = [0.25 + 0.25 * math.cos(math.pi * epoch / 4) for epoch in range(4)]
    weights = iterates_of_sgd(member.net, splits.train, rates, make)
    best = sl.train(deepcopy(member.net), splits, args, 7, run, "name")
    assert_close(nn.utils.parameters_to_vector(best.parameters()), weights[2], 1e-4, 1e-6)


def swag_networks(iterates, count, member, args):
    samples = []
    for number in range(count):
        noises = [sl.draw_noise((1, p), stream, member, args, number)
                  for p, stream in zip(iterates.T.shape, ("swag", "low_rank"))]
        samples.append(sl.swag_samples(*sl.swag_moments(iterates), *noises))
    return torch.cat(samples)


def test_swa_and_swag_choose_among_rates_of_sgd_by_their_own_densities(linear_network,
                                                                       monkeypatch):
    splits, args, run, member = linear_network
    args.augment = True  # of MAP networks alone
    monkeypatch.setattr(sl, "choose", Mock(side_effect=sl.choose))  # it records its arguments
    val = sl.compute_last_layer(member.net, splits.val, args)
    scores = {"swa": {}, "swag": {}}
    iterates = {}
    for rate in args.swag_lrs[1:]:  # 1e30 diverges
        iterates[rate] = iterates_of_sgd(member.net, splits.train, 3 * [rate])
        ours = sl.run_sgd(member, rate, splits.train, args)["iterates"]
        assert_close(ours, iterates[rate], 1e-4, 1e-6)
        scores["swa"][rate] = sl.mean_lpd(iterates[rate].mean(0)[None], val)
        scores["swag"][rate] = sl.mean_lpd(swag_networks(iterates[rate], 2, member, args), val)
    best = {method: max(of_rate, key=of_rate.get) for method, of_rate in scores.items()}
    assert sl.choose_rates(member, splits, args, run) == best
    for call, expected in zip(sl.choose.call_args_list, scores.values(), strict=True):
        ours = [call.args[0][rate] for rate in expected]
        assert_close(ours, [*expected.values()], 1e-4)
    assert len(list(run.dir.glob("*.pt"))) == len(set(best.values()))  # the others take space
    run.cached("name-sgd", lambda: {"swag": 5.0, "swa": 7.0})
    for method, weights in (("swag", swag_networks(iterates[5.0], 6, member, args)),
                            ("swa", iterates[7.0].mean(0)[None])):
        [outputs] = sl.sample_posterior(member, method, [splits.val], splits, args, run)
        assert_close(outputs, val.apply(weights), 1e-3, 1e-4)


@pytest.mark.parametrize("structure, fit", [("full", sl.full_laplace),
                                            ("diag", sl.diagonal_laplace)])
def test_last_layers_are_those_of_the_best_precisions(structure, fit, linear_network):
    """Each flow by itself, on the batches and the noise of all."""
    splits, args, _, member = linear_network
    args.structure, args.batch_size = structure, 12
    heads = sl.fit_last_layer(member, splits, args)
    train, val = [sl.compute_last_layer(member.net, dataset, args) for dataset in splits[:2]]
    theta = sl.flat_head(member.net.head).detach()
    noises = [sl.draw_noise((n, 15), stream, member, args)
              for n, stream in ((2, "llla_val"), (6, "llla"))]
    samples = {}  # {LPD: (posterior, samples for validation, samples)}
    for delta in sl.LAPLACE_GRID:
        laplace = fit(theta, train.x)._replace(precision=delta)
        for_val, for_test = [sl.laplace_samples(laplace, noise) for noise in noises]
        samples[sl.mean_lpd(for_val, val)] = (laplace, for_val, for_test)
    laplace, for_val, for_test = samples[max(samples)]
    assert_close(heads["llla"], for_test, 1e-5, 1e-6)
    steps = []
    for epoch in range(2):
        noise = sl.draw_noise((2, 15), "flow", member, args, epoch)
        for step, batch in enumerate(torch.randperm(24).split(12)):
            steps.append((noise[step:step + 1], train.select(batch.sort().values), 24))
    refined = {}
    for precision in sl.FLOW_GRID:
        common.seed_all(7, sl.STREAMS["flow"])
        flow = sl.Flow(*[tensor.requires_grad_() for tensor in sl.initial_flows(1, 2, 15)])
        adam = torch.optim.Adam(flow)
        for number, step in enumerate(steps):
            adam.param_groups[0]["lr"] = 5e-4 + 5e-4 * math.cos(math.pi * number / 4)
            adam.zero_grad()
            sl.negative_elbo(flow, laplace, torch.tensor([precision]), *step).sum().backward()
            adam.step()
        moved, end = [sl.apply_flow(flow, t)[0].detach() for t in (for_val, heads["llla"])]
        refined[sl.mean_lpd(moved, val)] = end
    assert_close(heads["la_nf"], refined[max(refined)], 1e-5, 1e-5)


def refresh_in_a_process(args, train_set):
    args.device = common.start("cpu")
    norm = nn.BatchNorm2d(1)
    batches = []
    norm.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0]))
    sl.refresh_batch_norm(norm, train_set, args)
    return norm.running_mean, norm.running_var, batches


@pytest.mark.parametrize("processes, size, n", [(1, 19, 21), (2, 10, 20)])
def test_statistics_of_batch_norm_weigh_images_equally(processes, size, n, linear_network,
                                                       tmp_path):
    """Also those of a small last batch; shuffled; in all processes the same."""
    splits, args, *_ = linear_network
    args.batch_size = size
    train_set = splits.train.select(slice(n))
    results = run_ranks(tmp_path, refresh_in_a_process, args, train_set, size=processes)
    batches = [batch for *_, of_process in results for batch in of_process]
    for mean, variance, _ in results:
        assert_close(mean, torch.cat(batches).mean((0, 2, 3)), 1e-4, 1e-6)
        assert_close(variance, sum(len(batch) / n * batch.var() for batch in batches)[None], 1e-4)
    [in_order] = data.Loader(train_set, n).epoch()
    assert not torch.equal(batches[0], in_order.images[:len(batches[0])])


def test_a_name_depends_on_parameters_and_running_statistics():
    nets = [nn.BatchNorm1d(2) for _ in range(3)]
    nets[0].weight.data += 1
    nets[1].running_mean += 1
    assert len({sl.name_member(net, 1) for net in nets}) == 3


def small_study(dataset, out, *more):
    words = (f"--dataset {dataset} --out-dir {out} --name run --members 2 --width .1 --epochs 2 "
             "--batch-size 12 --lr .05 --swag-epochs 2 --swag-lrs .03 .01 --samples 5 "
             "--val-samples 2 --ensembles 1 2 --flow-layers 2 --image-size 16 --limit-steps 2")
    return (*words.split(), *" ".join(map(str, more)).split())


@pytest.fixture(scope="module", autouse=True)
def forty_sentences_and_molecules():
    """All embedded sets but those of images are small."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_text", "load_molecules"):
            load = getattr(data, name)
            patch.setattr(data, name, lambda *args, load=load, **options: data.random_subset(
                load(*args, **options), 40))
        yield


@pytest.fixture(scope="module")
def finished_run(image_folder, tmp_path_factory):
    @cache
    def make(kind):
        out = tmp_path_factory.mktemp(kind)
        more = "--lr .0005 --swag-lrs 1e-6 1e-7"
        if kind == "images":
            kind = f"folder:{image_folder}"
            more = f"--ood {kind}/unknown --predict {kind}/test"
        argv = small_study(kind, out, "--methods swa swag swag llla la_nf", more)
        return out / "swag_laplace_ensembles" / "run", argv, sl.main([*argv, "--device", "cpu"])

    return make


@pytest.mark.parametrize("kind", ["images", "reviews", "clusters"])
def test_rows_are_those_of_stored_networks_and_eval_repeats_them(kind, finished_run):
    root, argv, rows = finished_run(kind)
    assert (root / "differences.png").stat().st_size > 10_000
    assert run_swag(*argv, "--eval") == rows
    with pytest.raises(UserError, match="heads-7.pt is missing; run without --eval"):
        run_swag(*argv, "--eval", "--samples", 7)
    args = parse(*argv)
    splits = sl.load_splits(args)
    net = sl.make_member(args, splits.train).eval()
    [batch] = sl.make_loader(splits.test, len(splits.test), args).epoch()
    de_lpds = {}
    for row in rows:
        if "against" in row:
            is_single = row["method"] in ("DE", "SWA") and row["k"] == 1
            assert ("auroc_epistemic" in row) != is_single
            continue
        seeds = tuple(row["seeds"])
        change = row["lpd"] - de_lpds.setdefault(seeds, row["lpd"])
        assert_close(row["lpd_minus_de"], change)
        if row["method"] == "DE" and row["k"] == 1:
            net.load_state_dict(common.load(root / f"map-seed{seeds[0]}.pt")["net"])
            log_p = sl.output_log_likelihood(net(batch[0])[0][None], batch.labels)
            assert_close(row["lpd"], log_p.mean(), 1e-4)
            assert_close(row["lpd"], sl.validation_lpd(net, splits.test, args), 1e-4)
    assert len(rows) == 5 * 3 * 2  # methods, of which none is there twice; ensembles; sets
    if kind == "clusters":
        history = common.load(root / "map-seed1.pt")["history"]
        assert history[0]["loss"] < 0.01  # times the published factor
    if kind == "images":
        accuracy = {row["method"]: row["accuracy"] for row in rows[-10::2]}  # of both members
        lines = list(csv.DictReader((root / "predictions.csv").open()))
        for method, column in (("LA-NF", "predicted"), ("DE", "predicted_map")):
            correct = [line["label"] == line[column] for line in lines]
            assert np.mean(correct) == pytest.approx(accuracy[method])
        # Published: no seed changes the validation images.
        assert splits.val.files == data.random_split(data.load(args.dataset, "train"), 0)[1].files
        std, mean = torch.std_mean(splits.train.images.double() / 255, (0, 2, 3))
        assert_close([*splits.test.std, *splits.test.mean], torch.cat([std, mean]), 1e-5)


def test_a_run_that_is_killed_three_times_ends_with_equal_files(finished_run, tmp_path):
    root, argv, rows = finished_run("images")
    argv += ("--out-dir", tmp_path)
    copy = tmp_path / "swag_laplace_ensembles" / "run"
    for pattern in ("map-seed2.pt", "seed1-*-sgd.pt", "seed1-*-heads-5.pt"):
        [path] = root.glob(pattern)
        kill_after(Child(tmp_path, run_swag, *argv), copy / path.name)
    assert run_swag(*argv) == rows
    for path in root.glob("*.pt"):
        assert_equal_checkpoints(path, copy / path.name)


@pytest.mark.parametrize("more", ["--runs 2", "--epochs 0 --methods llla"])
def test_two_processes_equal_one_without_batch_norm(more, image_folder, tmp_path):
    argv = small_study(f"folder:{image_folder}", tmp_path, "--limit-train 24", more)
    rows, _ = run_ranks(tmp_path, run_swag, *argv)
    one = run_swag(*argv, "--name", "one")
    assert_close([row["lpd"] for row in rows], [row["lpd"] for row in one], 1e-3)
    if more == "--runs 2":
        assert [row["seeds"] for row in rows if row["k"] == 2] == 5 * [[1, 2], [3, 4]]


def test_files_of_networks_give_the_rows_of_their_run(finished_run, image_folder, tmp_path):
    """--map-paths, with an OOD set of any name; --weights FILE is validated on test images."""
    root, argv, rows = finished_run("images")
    file = shutil.copy(root / "map-seed1.pt", tmp_path / "net.pt")
    shutil.copytree(image_folder / "unknown", tmp_path / "predict")
    argv += ("--methods", "llla", "--out-dir", tmp_path, "--ood", f"folder:{tmp_path}/predict")
    paths = ("--map-paths", file, root / "map-seed2.pt")
    expected = [row | {"seeds": []} for row in rows if row["method"] in ("DE", "LLLA")]
    for row, other in zip(run_swag(*argv, *paths), expected, strict=True):
        assert row | {"against": None} == other | {"against": None}
    shutil.copy(root / "map-seed2.pt", file)
    with pytest.raises(UserError, match="content of .*net.pt"):
        run_swag(*argv, *paths)
    argv += ("--weights", file, "--epochs", 0, "--fresh")
    assert [(row["seeds"], row["n"]) for row in run_swag(*argv)] == 4 * [([], 14)]


@pytest.mark.parametrize("model, more", [
    ("torchvision/shufflenet_v2_x0_5", "--methods swag"), ("attention", "--structure diag --amp")])
def test_a_network_of_torchvision_and_attention(model, more, image_folder, tmp_path, monkeypatch):
    vit = models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=9)
    monkeypatch.setitem(sl.NETWORKS, "attention", lambda args, shape: ([vit], 9))
    argv = small_study(f"folder:{image_folder}", tmp_path, f"--model {model} --weights none",
                   "--ensembles 2 --swag-lrs .01 --image-size 32 --workers 0", more)
    rows = run_swag(*argv)
    assert all(math.isfinite(row["lpd"]) for row in rows)
    assert run_swag(*argv, "--eval") == rows


def test_a_last_layer_that_nothing_trained_is_fitted(image_folder, tmp_path, monkeypatch):
    """DE is scikit-learn's regression, without augmentation."""
    monkeypatch.setitem(sl.NETWORKS, "own", lambda args, shape: ([nn.Flatten()], math.prod(shape)))
    argv = small_study(f"folder:{image_folder}", tmp_path, "--model own --epochs 0 --augment "
                       "--image-size 8 --methods llla la_nf")
    rows = run_swag(*argv)
    splits = sl.load_splits(parse(*argv))
    [train] = data.Loader(splits.train).epoch()
    [test] = data.Loader(splits.test).epoch()
    peer = LogisticRegression(C=1, tol=1e-8, max_iter=10_000)
    peer.fit(train.images.flatten(1).double(), train.labels)
    log_probs = peer.predict_log_proba(test.images.flatten(1).double())
    assert_close(rows[0]["lpd"], log_probs[range(15), test.labels].mean(), 1e-3)
    made = [(row["method"], row["seeds"]) for row in rows]
    assert made == [("DE", []), ("LLLA", []), ("LA-NF", [])]
    assert run_swag(*argv, "--eval") == rows


@pytest.mark.parametrize("dataset", ["glyphs", "clusters"])
def test_rows_are_those_of_mixtures_of_the_first_samples_of_each_member(dataset):
    """Those of glyphs are close: their epistemic uncertainty keeps its digits."""
    def uncertainties(samples):
        if dataset == "clusters":
            aleatoric = samples[..., 1].mean(0)
            epistemic = samples[..., 0].var(0, correction=0)
        else:
            p = samples.softmax(-1)
            aleatoric = Categorical(p).entropy().mean(0)
            epistemic = (p * (p / p.mean(0)).log()).sum(-1).mean(0)
        return {"total": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}

    args = parse("--dataset", dataset, "--members 2 --ensembles 1 2 --samples 7")
    torch.manual_seed(0)
    outputs = 3 * torch.randn(2, 1, 1, 90, 2) + 1e-4 * torch.randn(2, 2, 7, 90, 2)
    labels = torch.randint(2, (90,))
    if dataset == "clusters":
        labels = torch.randn(90).double()
        variance = torch.rand(2, 2, 7, 90) + 0.05
        outputs = torch.stack([torch.randn(2, 2, 7, 90), variance], -1).double()
    sets = [Namespace(name=name, labels=labels) for name in ("test", "ood")]
    mixtures = [[sl.mix_samples(samples, "swag", args) for samples in of_members]
                for of_members in outputs]
    ensembles = [(0,), (1,), (0, 1)]
    de_lpds = {members: torch.randn(90).double() for members in ensembles}
    rows = sl.evaluate_ensembles("swag", sets, mixtures, de_lpds, args)
    for row, pair, members in zip(rows[::2], rows[1::2], ensembles, strict=True):
        inside, outside = [of_set[list(members), :7 // len(members)].flatten(0, 1).double()
                           for of_set in outputs]
        if dataset == "clusters":
            normal = Normal(inside[..., 0], inside[..., 1].sqrt())
            log_p = normal.log_prob(labels)
            mean = normal.mean.mean(0)
            metrics = sl.regression_metrics(*inside.unbind(-1), labels)
            assert_close(metrics["lpd"], log_p.exp().mean(0).log().mean())
            assert_close(row["mae"], sk.mean_absolute_error(labels, mean))
            assert_close(row["rmse"], sk.root_mean_squared_error(labels, mean))
            levels = np.linspace(0.01, 0.99, 20)
            is_below = normal.cdf(labels).mean(0).numpy() <= levels[:, None]
            assert_close(row["quantile_ece"], np.abs(is_below.mean(1) - levels).mean())
        else:
            log_p = inside.log_softmax(-1)[:, range(90), labels]
            predicted = inside.softmax(-1).mean(0).argmax(1)
            assert_close(row["accuracy"], sk.accuracy_score(labels, predicted))
        lpd = log_p.exp().mean(0).log()
        change = lpd - de_lpds[members]
        assert row["seeds"] == [member + 1 for member in members]
        assert_close(row["lpd"], lpd.mean())
        assert_close(row["lpd_minus_de"], change.mean())
        assert_close(row["interval95"], 1.96 * change.std() / math.sqrt(90))
        scores_outside = uncertainties(outside)
        for name, scores in uncertainties(inside).items():
            auroc = sk.roc_auc_score([0] * 90 + [1] * 90, torch.cat([scores, scores_outside[name]]))
            assert pair[f"auroc_{name}"] == pytest.approx(auroc, abs=1e-3)


def test_equal_samples_have_no_epistemic_uncertainty():
    args = parse("--dataset glyphs --members 1 --samples 2")
    mixture = sl.mix_samples(torch.randn(1, 50, 10).expand(2, -1, -1), "swag", args)
    assert sl.predict("swag", (0,), [mixture], args).scores["epistemic"].eq(0).all()


@pytest.mark.parametrize("words", ["--num-val 0", "--swag-epochs 1 --methods swa",
                                   "--epochs 0 --dataset clusters"])
def test_what_leaves_nothing_to_choose_or_to_fit_is_refused(words, tmp_path, capsys):
    with pytest.raises((SystemExit, UserError)) as error:
        run_swag(*words.split(), "--out-dir", tmp_path)
    assert words.partition(" --")[0] in f"{error.value} {capsys.readouterr().err}"


def test_recipes_of_the_paper_and_of_pretrained_networks():
    args = parse("--dataset cifar10 --model torchvision/resnet18")
    assert (args.epochs, args.members, args.structure, args.augment) == (0, 1, "diag", True)
    assert args.methods == ["map", "llla", "la_nf"]
    assert not parse("--dataset glyphs --model torchvision/resnet18").augment  # of digits
    args = parse("--dataset cifar10 --model wrn_28_10 --methods swag map swag --ensembles 40 2")
    assert (args.structure, args.epochs, args.swag_epochs) == ("diag", 200, 25)
    assert (args.methods, args.ensembles) == (["map", "swag"], [2, 30])
    molecules = parse("--dataset qm9").swag_lrs
    assert [sum(args.swag_lrs), sum(molecules)] == pytest.approx([0.2986, 2.9986e-6])
    assert [len(sl.FLOW_GRID), sum(sl.FLOW_GRID), len(molecules)] == [15, 1566, 30]
    assert_close(sl.LAPLACE_GRID, 10 ** np.linspace(-4, 4, 21))
