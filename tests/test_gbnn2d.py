"""gbnn2d.py: equations against brute force, POT, scikit-learn; networks, training, rows, runs."""

import json
import math
from argparse import Namespace
from copy import deepcopy
from functools import partial

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from scipy import stats
from sklearn import metrics as sk
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.testing import assert_close
from torchvision import models

import common
import data
import gbnn2d
from gbnn2d import GaussianMixture

double = partial(torch.randn, dtype=torch.float64)
generator = partial(torch.Generator().manual_seed, 0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def heavy_tailed_points(n):
    """Points (mu, sigma) [n, 2] like those of a network: heavy tails, sigma grows with |mu|."""
    mu = 0.05 * double(n) * double(n).abs().sqrt()
    sigma = 4e-2 * (0.3 * double(n)).exp() + 0.05 * mu.abs()
    return torch.stack([mu, sigma], 1)


def log_joint_by_torch(x, mixture):
    """log pi_k N(x; c_k, S_k) [n, K] by torch.distributions."""
    normals = MultivariateNormal(mixture.centre, mixture.covariance)
    return normals.log_prob(x[:, None]) + mixture.proportion.log()


def tiny_network():
    """A network of 84 random weights, for images [1, 6, 6]."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


def tiny_shared_weights():
    """84 weights of three Gaussians, with two outliers and some ellipse points, float64."""
    x = heavy_tailed_points(84)
    mixture = gbnn2d.fit_mixture(x, 3, generator())
    label = gbnn2d.assign(x, mixture)
    label[[0, 5]] = -1
    label[6:24] = torch.arange(18) % 3  # many of them lie outside their ellipse then
    weights = gbnn2d.encode(x, label, mixture)
    doubles = {name: tensor.double() for name, tensor in weights._asdict().items()
               if tensor.is_floating_point()}
    return weights._replace(**doubles)


@pytest.mark.parametrize("size", [0, 1e-9])
def test_a_mean_field_starts_at_the_network_and_a_layer_of_zeros_can_be_trained(size):
    net = tiny_network().double()
    net[3].weight.data *= size
    posterior = gbnn2d.MeanField(net, sigma_init=1e-9)
    rms = net[0].weight.detach().square().mean().sqrt()
    prior_sd = torch.cat([rms.expand(36), torch.full((48,), 16**-0.5).double()])
    assert_close(posterior.sigma, 1e-9 * prior_sd, rtol=1e-9, atol=0)
    assert torch.equal(posterior.mu, torch.cat([net[0].weight.flatten(), net[3].weight.flatten()]))
    kl = kl_divergence(Normal(posterior.mu, posterior.sigma), Normal(0, prior_sd)).sum()
    assert_close(posterior.kl(), kl)


@pytest.mark.parametrize("gradient, fraction, by_gradient", [
    (torch.arange(1000.0), 0.01, range(990, 1000)),
    (torch.arange(1000.0), 0, []),
    (torch.zeros(1000), 0.01, range(1000))])  # all are as large as the tenth largest
def test_outliers_are_large_or_have_large_gradients(gradient, fraction, by_gradient):
    mu = torch.zeros(1000)
    mu[3:5] = torch.tensor([-0.3, 0.25])  # the second one is not above the threshold
    rows = gbnn2d.outlier_mask(mu, gradient, 0.25, fraction).nonzero()[:, 0]
    assert set(rows.tolist()) == {*by_gradient, 3}


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_a_mixture_is_fitted_by_em_of_points_with_unit_variances(shift):
    """Candidates of a point are the five nearest components, at the first and the sixth step."""
    groups = [double(400, 2) * scale + centre for scale, centre in ((0.3, 0), (1, 2), (0.1, -2))]
    x = (shift + torch.cat(groups)) * torch.tensor([1.0, 0.001])
    mixture = gbnn2d.fit_mixture(x, 9, generator(), iterations=0)
    for step in range(7):
        if step % 5 == 0:
            distance = torch.cdist(x / x.std(0), mixture.centre / x.std(0))
            is_candidate = distance <= distance.kthvalue(5, keepdim=True).values
        r = log_joint_by_torch(x, mixture).where(is_candidate, -math.inf).softmax(1)
        centre = r.T @ x / r.sum(0)[:, None]
        offset = x[:, None] - centre
        covariance = torch.einsum("nk,nkp,nkq->kpq", r, offset, offset) / r.sum(0)[:, None, None]
        mixture = GaussianMixture(r.mean(0), centre, covariance + 1e-6 * x.var(0).diag())
    fitted = gbnn2d.fit_mixture(x, 9, generator(), 7, neighbours=5)
    assert_close(fitted, mixture, rtol=1e-6, atol=1e-10)
    assert len(gbnn2d.fit_mixture(x, 50, generator(), 2, max_points=20).centre) <= 20
    assert len(gbnn2d.kmeans_plus_plus(x[:3].repeat(9, 1), 9, generator())) == 3  # different ones


@pytest.mark.parametrize("has_excluded", [False, True])
@pytest.mark.parametrize("k", [1, 2, 9, 60])
def test_labels_are_the_argmax_over_all_components(k, has_excluded):
    """Components have shapes from round to almost a line; some points are far away."""
    scale = 10 ** (2 * torch.rand(k, 2).double() - 2)
    covariance = scale[:, :, None] * scale[:, None]
    covariance[:, 0, 1] *= double(k).sign() * (1 - 10 ** (-11 * torch.rand(k).double()))
    covariance[:, 1, 0] = covariance[:, 0, 1]
    mixture = GaussianMixture((3 * double(k)).softmax(0), double(k, 2), covariance)
    distance = torch.tensor([1, 1, 1, 1e3, 1e6]).double().repeat(500)
    x = double(2500, 2) * distance[:, None]
    joint = gbnn2d.log_joint(x[:, None], mixture)
    excluded = None
    if has_excluded:
        excluded = torch.randint(k, (2500,))
        joint[torch.arange(2500), excluded] = -math.inf
    label = gbnn2d.assign(x, mixture, excluded)
    assert np.array_equal(label, joint.numpy().argmax(1))


def test_points_outside_of_95_percent_are_blends_with_the_most_probable_other_component():
    x = heavy_tailed_points(900)
    mixture = gbnn2d.fit_mixture(x, 8, generator())
    is_moved = torch.rand(900) < 0.1
    label = torch.where(is_moved, torch.randint(-1, 8, (900,)), gbnn2d.assign(x, mixture))
    weights = gbnn2d.encode(x, label, mixture)
    offset = x - mixture.centre[label]
    precision = torch.linalg.inv(mixture.covariance)[label]
    squared = torch.einsum("np,npq,nq->n", offset, precision, offset)
    rows = ((label >= 0) & (squared > stats.chi2.ppf(0.95, 2))).nonzero()[:, 0]
    assert 20 < len(rows) < 200
    assert torch.equal(weights.ellipse_point, rows.int())
    joint = log_joint_by_torch(x, mixture)[rows]
    largest, second = joint.scatter(1, label[rows, None], -math.inf).max(1)
    assert torch.equal(weights.second, second.int())
    alpha = (joint[torch.arange(len(rows)), label[rows]] - largest).sigmoid()
    assert_close(weights.alpha, alpha.float(), rtol=1e-4, atol=1e-6)
    assert_close(weights.factor, torch.linalg.cholesky(mixture.covariance).float())
    assert torch.equal(weights.outlier, (label < 0).nonzero()[:, 0].int())
    outliers = torch.stack([weights.outlier_mu, weights.outlier_sigma], 1)
    assert torch.equal(outliers, x[label < 0].float())


@pytest.mark.parametrize("tau_d, tau_g, tau_v", [("auto", math.inf, 9.0), (0.02, 0.05, 1e-4)])
def test_weights_are_clustered_and_merged_and_small_components_dissolve(tau_d, tau_g, tau_v):
    x = heavy_tailed_points(3000)
    gradient = 1e-3 * torch.rand(3000) + 0.1 * (x[:, 0] > 0)
    label, mixture = gbnn2d.cluster(x, gradient, 40, generator(), 0.3, 0.01, 78)
    is_inlier = ~gbnn2d.outlier_mask(x[:, 0], gradient, 0.3, 0.01)
    before = gbnn2d.fit_mixture(x[is_inlier], 40, generator())
    label_before = torch.full((3000,), -1)
    label_before[is_inlier] = gbnn2d.assign(x[is_inlier], before)
    keep = label_before[is_inlier].bincount(minlength=40) >= 78
    assert 2 < keep.sum() < 40
    shared = is_inlier & keep[label_before]
    assert torch.equal(label >= 0, shared)
    assert torch.equal(mixture.centre[label[shared]], before.centre[label_before[shared]])
    assert_close(mixture.proportion, before.proportion[keep] / before.proportion[keep].sum())
    members = [label == k for k in range(len(mixture.centre))]
    mean_gradient = torch.stack([gradient[rows].double().mean() for rows in members])
    threshold = 0.25 * x[shared, 1].median().item() if tau_d == "auto" else tau_d
    expected = gbnn2d.merge_mixture(mixture, mean_gradient, threshold, tau_g, tau_v)
    label, merged = gbnn2d.merge(x, label, mixture, gradient, tau_d, tau_g, tau_v)
    assert 1 <= len(merged.centre) < len(members)
    assert_close(merged, expected)
    assert torch.equal(label[shared], gbnn2d.assign(x[shared], expected))
    assert torch.equal(label >= 0, shared)


@pytest.mark.parametrize("n, factor", [(50, 1), (30, 1), (3000, math.nan)])
def test_what_cannot_be_clustered_is_refused(n, factor):
    x = heavy_tailed_points(n)
    with pytest.raises(ValueError, match="Gaussians|NaN"):
        gbnn2d.cluster(x, factor * torch.rand(n), 40, generator())


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_distances_are_those_of_pot_and_those_of_lines(scale):
    """For lines, whose covariances are singular, POT returns NaN."""
    c = scale * double(20, 2)
    root = scale * double(20, 2, 2)
    s = root @ root.mT
    by_pot = [ot.gaussian.bures_wasserstein_distance(c[0], d, s[0], t) for d, t in zip(c, s)]
    ours = gbnn2d.wasserstein(c[0], s[0], c, s)
    assert_close(ours[1:], torch.cat(by_pot)[1:], rtol=1e-7, atol=0)
    assert gbnn2d.wasserstein(c, s, c, s).max() < 1e-7 * scale
    angle = math.pi * torch.rand(2000).double()
    direction = scale * torch.stack([angle.cos(), angle.sin()], 1)
    a = direction[:, :, None] * direction[:, None]
    b = scale**2 * torch.eye(2).double() - a                           # the lines across
    for covariance, squared in ((3 * b, 1 + 3), (0 * b, 1), (a, 0), (4 * a, 1)):
        distance = gbnn2d.wasserstein(c[0], a, c[0], covariance) / scale
        assert_close(distance**2, torch.full_like(angle, squared), rtol=0, atol=1e-7)


def merge_by_loops(mixture, gradient, tau_d, tau_g, tau_v):
    """[(proportion, centre, covariance, gradient)] after merging, one pair after the other."""
    parts = list(zip(*mixture, gradient))
    while True:
        distances = {(0, 0): math.inf}
        for j, (_, d, t, h) in enumerate(parts):
            for i, (_, c, s, g) in enumerate(parts[:j]):
                if abs(g - h) < tau_g and abs((s - t).trace()) / 2 < tau_v:
                    distances[i, j] = gbnn2d.wasserstein(c, s, d, t).item()
        i, j = min(distances, key=distances.get)
        if distances[i, j] >= tau_d:
            return parts
        w, c, s, g = parts[i]
        v, d, t, h = parts.pop(j)
        p = w / (w + v)
        covariance = p * s + (1 - p) * t + p * (1 - p) * torch.outer(c - d, c - d)
        parts[i] = (w + v, p * c + (1 - p) * d, covariance, p * g + (1 - p) * h)


@pytest.mark.parametrize("tau_d, tau_g, tau_v", [
    (0.9, math.inf, math.inf), (1.2, 0.3, math.inf), (1.2, math.inf, 0.05)])
def test_the_closest_two_merge_until_none_are_close(tau_d, tau_g, tau_v):
    root = 0.3 * double(14, 2, 2)
    mixture = GaussianMixture(double(14).softmax(0), double(14, 2), root @ root.mT)
    gradient = torch.rand(14).double()
    copies = [tensor.clone() for tensor in (*mixture, gradient)]
    parts = merge_by_loops(GaussianMixture(*copies[:3]), copies[3], tau_d, tau_g, tau_v)
    assert 2 <= len(parts) <= 12
    merged = gbnn2d.merge_mixture(mixture, gradient, tau_d, tau_g, tau_v)
    parts.sort(key=lambda part: part[1][0])
    expected = [torch.stack(column) for column in zip(*parts)][:3]
    order = merged.centre[:, 0].argsort()
    assert_close([*gbnn2d.select(merged, order)], expected)
    assert all(map(torch.equal, (*mixture, gradient), copies))  # the arguments stay


@pytest.mark.parametrize("equal", [False, True])
def test_a_draw_shares_m_and_s_and_blends_those_of_two_components(equal):
    start = tiny_shared_weights()
    posterior = gbnn2d.SharedGaussians(start, equal)
    assert all(map(torch.equal, posterior.weights(), start))
    for parameter in posterior.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    torch.manual_seed(1)
    drawn = posterior()
    drawn.sin().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in posterior.parameters())
    now = gbnn2d.SharedWeights(*[tensor.detach() for tensor in posterior.weights()])
    torch.manual_seed(1)
    m, s = (now.centre + (now.factor @ double(3, 2, 1))[..., 0]).T
    s = torch.zeros_like(s) if equal else s
    eps = double(84)
    draws = m[:, None] + s[:, None] * eps                              # [K, N]
    expected = draws[now.label.long(), torch.arange(84)]
    for row, second, alpha in zip(now.ellipse_point, now.second, now.alpha):
        expected[row] = alpha * expected[row] + (1 - alpha) * draws[second, row]
    expected[[0, 5]] = now.outlier_mu + now.outlier_sigma * eps[[0, 5]]
    assert_close(drawn, expected)
    shared = [MultivariateNormal(w.centre, scale_tril=w.factor) for w in (now, start)]
    outliers = [Normal(w.outlier_mu, w.outlier_sigma) for w in (now, start)]
    kl = kl_divergence(*shared).sum() + kl_divergence(*outliers).sum()
    assert_close(posterior.kl(), kl)


def options(more=""):
    return gbnn2d.parse_args(f"--width 1 --device cpu --workers 0 --samples 3 {more}".split())


def test_a_resnet18_is_that_of_torchvision():
    x = torch.randn(2, 3, 96, 96)
    ours = gbnn2d.make_network(options("--model resnet18"), 1000, (3, 96, 96)).eval()
    theirs = models.resnet18().eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    small = gbnn2d.make_network(options("--model resnet18"), 100, (3, 32, 32))
    assert sum(parameter.numel() for parameter in small.parameters()) == 11_220_132  # published
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.float32  # in bfloat16, many logits are equal


def test_a_wide_resnet_has_its_published_size_and_normalises_before_each_convolution():
    net = gbnn2d.make_network(options("--model wide_resnet"), 100, (3, 32, 32))
    assert sum(parameter.numel() for parameter in net.parameters()) == 36_536_884
    x = torch.randn(2, 3, 96, 96)
    block = nn.Sequential(*gbnn2d.wide_block(3, 5, stride=2))
    kernels = [layer.weight for layer in block.modules() if isinstance(layer, nn.Conv2d)]
    start = F.batch_norm(x, None, None, training=True).relu()
    h = F.conv2d(start, kernels[0], stride=2, padding=1)
    h = F.conv2d(F.batch_norm(h, None, None, training=True).relu(), kernels[1], padding=1)
    assert_close(block(x), h + F.conv2d(start, kernels[2], stride=2))


@pytest.mark.parametrize("argv, epochs, stoch_epochs, is_augmented", [
    ("--dataset mnist", 10, 5, False), ("--dataset cifar10", 200, 20, True),
    ("--dataset glyphs --model lenet", 3, 2, False),
    ("--dataset svhn --model torchvision/resnet18", 0, 1, False),
    ("--dataset folder:x --model torchvision/resnet18", 0, 1, True),
    ("--dataset folder:x --model torchvision/resnet18 --weights none", 20, 5, True),
    ("--dataset folder:x --model lenet --epochs 0", 0, 1, True)])
def test_recipes_of_digits_and_of_pretrained_networks(argv, epochs, stoch_epochs, is_augmented):
    args = gbnn2d.parse_args([*argv.split(), "--device", "cpu"])
    assert args.epochs == epochs
    assert args.stoch_epochs == stoch_epochs
    assert args.augment == is_augmented


def tiny_set(n=30, name="tiny"):
    images = torch.randint(256, (n, 1, 6, 6), dtype=torch.uint8, generator=generator())
    return data.ImageSet(name, images, torch.arange(n) * 3 // n, 3, (0.5,), (0.3,))


def network_of_stage(stage):
    """The tiny network, with the posterior of a stage, in eval mode."""
    net = tiny_network().eval()
    if stage == "deterministic":
        return net
    if stage == "mean-field":
        return gbnn2d.RandomNetwork(net, gbnn2d.MeanField(net))
    return gbnn2d.RandomNetwork(net, gbnn2d.SharedGaussians(tiny_shared_weights()))


@pytest.mark.parametrize("stage, kl_weight", list(zip(gbnn2d.STAGES, (0.0, 0.2, 0.3))))
def test_training_is_that_of_a_plain_loop(stage, kl_weight):
    args = options("--augment --batch-size 16 --warm-up .25 --lr .1 --lr-mu .05 --lr-rho .2 "
                   "--epochs 2 --stoch-epochs 2 --final-epochs 2 --stoch-kl .2 --beta .3")
    network = network_of_stage(stage)
    ours = deepcopy(network)
    run = Namespace(resume=lambda *_, **__: [], save=lambda *_, **__: None)
    gbnn2d.train(ours, stage, tiny_set(), args, 7, run)
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    groups = [{"params": [network.get_parameter(name)]} for name in names]
    optimiser = torch.optim.Adam(groups)
    if stage == "deterministic":
        optimiser = torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = data.Loader(tiny_set(), 16, seed=7, shuffle=True, augment="reflect_crop_flip")
    factors = iter([0.5, *[0.5 + 0.5 * math.cos(math.pi * t) for t in (1 / 6, 1 / 2, 5 / 6)]])
    for epoch in range(2):
        common.seed_all(7, gbnn2d.STAGES.index(stage), epoch)
        network.train(stage == "deterministic")
        for batch in loader.epoch(epoch):
            factor = next(factors)
            for name, group in zip(names, optimiser.param_groups):
                rate = 0.05 if name.startswith("net") or name == "posterior.mu" else 0.1
                group["lr"] = factor * (0.2 if name == "posterior.rho" else rate)
            loss = F.cross_entropy(network(batch.images), batch.labels)
            if stage != "deterministic":
                loss = loss + kl_weight * network.posterior.kl() / 30
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert_close(ours.state_dict(), network.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_is_the_mean_magnitude_over_shuffled_batches(steps):
    """So that --limit-steps sees all classes of a folder, which come one after the other."""
    network = network_of_stage("mean-field")
    batches = list(data.Loader(tiny_set(), 16, seed=7, shuffle=True).epoch(0))
    args = options(f"--batch-size 16 --limit-steps {steps}")
    magnitude = gbnn2d.gradient_magnitude(network, tiny_set(), args, 7)
    common.seed_all(7, 3)
    gradients = []
    for batch in batches[:steps]:
        loss = F.cross_entropy(network(batch.images), batch.labels)
        [gradient] = torch.autograd.grad(loss, network.posterior.mu)
        gradients.append(gradient.abs())
    assert_close(magnitude, torch.stack(gradients).mean(0))


@pytest.mark.parametrize("stage", gbnn2d.STAGES)
def test_rows_are_those_of_scikit_learn(stage):
    network = network_of_stage(stage)
    sets = [tiny_set(300), tiny_set(40, "other")]
    outputs = [gbnn2d.compute_outputs(network, dataset, options(), 5) for dataset in sets]
    predictions = [gbnn2d.predict(output) for output in outputs]
    row, pair = gbnn2d.evaluate(stage, [5], sets, predictions, {"bytes": 1})
    images = torch.cat([dataset.images for dataset in sets])
    probs = []
    for draw in range(3):
        common.seed_all(5, 1000 + draw)
        probs.append(network((images / 255 - 0.5) / 0.3).detach().double().softmax(1).numpy())
    scores = {"total": stats.entropy(np.mean(probs, 0), axis=1)}
    if stage != "deterministic":
        scores["aleatoric"] = stats.entropy(probs, axis=2).mean(0)
        scores["epistemic"] = scores["total"] - scores["aleatoric"]
    nll = sk.log_loss(sets[0].labels, np.mean(probs, 0)[:300])
    assert row["nll"] == pytest.approx(nll)
    assert len(pair) == 5 + 4 * len(scores)
    for name, score in scores.items():
        auroc = sk.roc_auc_score(np.arange(340) >= 300, score)
        assert pair[f"auroc_{name}"] == pytest.approx(auroc, abs=1e-4)


def test_equal_draws_have_no_epistemic_uncertainty_of_rounding():
    log_probs = double(50, 3).log_softmax(1)
    outputs = gbnn2d.Outputs(log_probs, common.entropy(log_probs.exp()) - 1e-15)
    assert gbnn2d.predict(outputs).scores["epistemic"].eq(0).all()


def command(images, out, more=""):
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --width .03 --epochs 2 "
            f"--predict folder:{images}/test --stoch-epochs 2 --final-epochs 2 --batch-size 12 "
            f"--k0 30 --tau-d .01 --samples 2 --workers 0 --name run --out-dir {out} "
            f"{more}").split()


@pytest.fixture(scope="module")
def finished_run(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    rows = gbnn2d.main([*command(image_folder, out), "--device", "cpu"])
    return rows, out / "gbnn2d" / "run"


def test_rows_count_the_bytes_of_the_file(finished_run):
    rows, directory = finished_run
    deterministic, mean_field, clustered, merged, final = rows[::2]
    file = common.load(directory / "seed1-compressed.pt")
    tensors = [*file["weights"].values(), *file["rest"].values()]
    assert final["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert final["bytes_vs_deterministic"] == final["bytes"] / deterministic["bytes"]
    assert final["bytes_vs_mean_field"] == final["bytes"] / mean_field["bytes"]
    assert final["bytes"] < final["file_bytes"] < final["bytes"] + 400 * len(tensors)
    gaussians = len(file["weights"]["centre"])
    assert gaussians == final["gaussians"] == merged["gaussians"]
    assert gaussians < clustered["gaussians"] <= 30


def test_a_finished_run_has_a_picture_and_predictions_and_repeats(finished_run, image_folder):
    rows, directory = finished_run
    assert (directory / "plane.png").stat().st_size > 10_000
    table = np.genfromtxt(directory / "predictions.csv", delimiter=",", names=True, dtype=None)
    assert table.dtype.names[2:] == ("predicted", "confidence", "total", "aleatoric", "epistemic")
    assert (table["predicted"] == table["label"]).mean() == rows[-2]["accuracy"]
    assert run_script("gbnn2d", *command(image_folder, directory.parents[1], "--eval")) == rows


@pytest.mark.parametrize("words", ["--tau-w 0", "--k0 32768", "--k0 32000"])
def test_what_leaves_nothing_to_cluster_is_refused_before_training(words, image_folder, tmp_path):
    with pytest.raises((SystemExit, common.UserError)):
        run_script("gbnn2d", *command(image_folder, tmp_path, words))
    assert not list(tmp_path.rglob("*.pt"))


def test_weights_of_a_file_start_a_run(finished_run, image_folder, tmp_path):
    rows, directory = finished_run
    more = (f"--weights {directory}/seed1-deterministic.pt --epochs 0 --stoch-epochs 0 "
            "--final-epochs 0 --draw equal --runs 2")
    again = run_script("gbnn2d", *command(image_folder, tmp_path, more))
    assert again[:2] == [row | {"seeds": []} for row in rows[:2]]  # nothing was trained here
    assert [row["seeds"] for row in again[2::10]] == [[1], [2]]
    assert again[8]["nll"] == again[6]["nll"]  # final, merged
    path = tmp_path / "gbnn2d" / "run" / "seed1-compressed.pt"
    loaded = run_script("gbnn2d", *command(image_folder, tmp_path, f"--name loaded --load {path}"))
    assert loaded == [row | {"method": "loaded", "seeds": []} for row in again[8:10]]


def test_a_loaded_file_gives_its_rows_without_seeds(finished_run, image_folder, tmp_path):
    """Its network, settings and directory are its own."""
    rows, directory = finished_run
    path = directory / "seed1-compressed.pt"
    argv = (f"--load {path} --dataset folder:{image_folder} --ood folder:{image_folder}/unknown "
            f"--model lenet --workers 0 --samples 2 --out-dir {tmp_path}").split()
    loaded = run_script("gbnn2d", *argv)
    assert loaded == [row | {"method": "loaded", "seeds": []} for row in rows[-2:]]
    assert run_script("gbnn2d", *argv, "--eval") == loaded
    results = tmp_path / "gbnn2d" / "run-seed1-compressed" / "results.json"
    settings = json.loads(results.read_text())["settings"]
    assert (settings["model"], settings["width"], settings["samples"]) == ("resnet18", 0.03, 2)
    with pytest.raises(common.UserError, match="another --name"):
        run_script("gbnn2d", *argv, "--eval", "--name", "run", "--out-dir", directory.parents[1])


def test_a_run_that_is_killed_twice_ends_with_equal_files(finished_run, image_folder, tmp_path):
    argv = command(image_folder, tmp_path)
    directory = tmp_path / "gbnn2d" / "run"
    for stage in ("mean-field", "final"):
        kill_after(Child(tmp_path, run_script, "gbnn2d", *argv), directory / f"seed1-{stage}.pt")
    assert run_script("gbnn2d", *argv) == finished_run[0]
    for name in (*gbnn2d.STAGES, "mixture"):
        assert_equal_checkpoints(directory / f"seed1-{name}.pt",
                                 finished_run[1] / f"seed1-{name}.pt")


def test_two_processes_train_the_networks_of_one(image_folder, tmp_path):
    argv = command(image_folder, tmp_path, "--model lenet --image-size 28")
    rows, _ = run_ranks(tmp_path, run_script, "gbnn2d", *argv)
    again = run_script("gbnn2d", *argv, "--eval")
    one = run_script("gbnn2d", *argv, "--name", "one")
    for row, same, other in zip(rows[::2], again[::2], one[::2], strict=True):
        assert row["nll"] == pytest.approx(same["nll"], rel=1e-4)
        assert row.get("outliers") == other.get("outliers")
    files = [tmp_path / "gbnn2d" / name / "seed1-mean-field.pt" for name in ("run", "one")]
    assert_close(*[common.load(file)["net"] for file in files], rtol=1e-3, atol=1e-5)


def test_a_head_that_nothing_trained_is_fitted_to_images_as_they_are(image_folder, tmp_path,
                                                                     monkeypatch):
    pooled = nn.AdaptiveAvgPool2d(4)
    monkeypatch.setitem(gbnn2d.NETWORKS, "own", lambda args, shape: ([pooled, nn.Flatten()], 48))
    more = "--model own --epochs 0 --stoch-epochs 0 --final-epochs 0 --augment"
    row = run_script("gbnn2d", *command(image_folder, tmp_path, more))[0]
    [train] = data.Loader(data.load(f"folder:{image_folder}", "train")).epoch()
    [test] = data.Loader(data.load(f"folder:{image_folder}", "test")).epoch()
    head = nn.Linear(48, 3)
    common.fit_head(head, pooled(train.images).flatten(1), train.labels)
    logits = head(pooled(test.images).flatten(1))
    assert row["nll"] == pytest.approx(F.cross_entropy(logits, test.labels).item(), rel=1e-4)


@pytest.mark.parametrize("model", ["torchvision/shufflenet_v2_x0_5", "attention"])
def test_networks_of_torchvision_and_of_ones_own(model, image_folder, tmp_path, monkeypatch):
    fit = partial(gbnn2d.fit_mixture, iterations=2, max_points=5000)
    monkeypatch.setattr(gbnn2d, "fit_mixture", fit)
    net = models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=24)
    monkeypatch.setitem(gbnn2d.NETWORKS, "attention", lambda args, shape: ([net], 24))
    argv = command(image_folder, tmp_path, f"--model {model} --weights none --image-size 32 --amp")
    rows = run_script("gbnn2d", *argv, "--limit-steps", 1)
    if model == "attention":
        matrices = sum(p.numel() for p in net.parameters() if p.dim() in (2, 4))  # no embeddings
        assert rows[-2]["weights"] == matrices + 24 * 3  # and the head
    path = tmp_path / "gbnn2d" / "run" / "seed1-compressed.pt"
    [row, _] = run_script("gbnn2d", *argv, "--name", "loaded", "--load", path)
    assert row | {"method": "final", "seeds": [1]} == rows[-2]
