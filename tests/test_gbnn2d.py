"""gbnn2d.py: equations against brute force, POT, scikit-learn; networks, training, rows, runs."""

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
from sklearn import mixture as sk_mixture
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


def like_weights(n):
    """Points (mu, sigma) [n, 2] as a network's: heavy tails, sigma grows with |mu|."""
    mu = 0.05 * double(n) * double(n).abs().sqrt()
    return torch.stack([mu, 4e-2 * (0.3 * double(n)).exp() + 0.05 * mu.abs()], 1)


def dense_log_joint(x, mixture):
    normals = MultivariateNormal(mixture.centre, mixture.covariance)
    return normals.log_prob(x[:, None]) + mixture.proportion.log()     # [n, K]


def tiny_net():
    """84 random weights, for images [1, 6, 6]."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


def tiny_weights():
    """84 weights: three Gaussians, two outliers and two ellipse points, float64."""
    label = (torch.arange(84) % 3).int()
    label[[0, 5]] = -1
    mu, sigma, alpha = torch.tensor([[0.5, -0.4], [0.01, 0.02], [0.7, 0.6]]).double()
    outlier, ellipse_point, second = torch.tensor([[0, 5], [2, 9], [0, 1]]).int()
    centre = torch.tensor([[0.1, 0.02], [-0.2, 0.03], [0, 0.01]]).double()
    factor = torch.tensor([[0.1, 0, 0.02, 0.03], [0.05, 0, 0.01, 0.04], [0.15, 0, -0.02, 0.03]])
    return gbnn2d.SharedWeights(label, outlier, mu, sigma, ellipse_point, second, alpha, centre,
                                factor.double().view(3, 2, 2))


@pytest.mark.parametrize("size", [0, 1e-9])
def test_a_mean_field_starts_at_the_network_and_a_layer_of_zeros_can_be_trained(size):
    net = tiny_net().double()
    net[3].weight.data *= size
    posterior = gbnn2d.MeanField(net, sigma_init=1e-9)
    rms = net[0].weight.detach().square().mean().sqrt()
    prior_sd = torch.cat([rms.expand(36), torch.full((48,), 16**-0.5).double()])
    assert_close(posterior.sigma, 1e-9 * prior_sd, rtol=1e-9, atol=0)
    assert torch.equal(posterior.mu, torch.cat([net[0].weight.flatten(), net[3].weight.flatten()]))
    kl = kl_divergence(Normal(posterior.mu, posterior.sigma), Normal(0, prior_sd)).sum()
    parameters = list(posterior.parameters())
    assert_close(posterior.kl(), kl)
    assert_close(*[torch.autograd.grad(value, parameters) for value in (posterior.kl(), kl)])


def test_outliers_are_large_or_have_large_gradients():
    mu = 0.01 * torch.randn(1000)
    mu[3:5] = torch.tensor([-0.3, 0.25])  # the second one is not above the threshold
    gradient = torch.rand(1000)
    rows = gbnn2d.outlier_mask(mu, gradient, 0.25).nonzero()[:, 0]
    assert set(rows.tolist()) == {*gradient.argsort()[-10:].tolist(), 3}
    for gradient, fraction, count in ((gradient, 0, 1), (mu - mu, 0.01, 1000), (gradient, 1e-9, 2)):
        assert gbnn2d.outlier_mask(mu, gradient, 0.25, fraction).sum() == count


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_a_mixture_is_fitted_by_em_of_points_with_unit_variances(shift):
    """Sixteen near components of 40 are as good as scikit-learn's fit with all."""
    x = shift + torch.cat([double(400, 2) * t + u for t, u in ((0.3, 0), (1, 2), (0.1, -2))])
    x = x * torch.tensor([1.0, 0.001])
    mixture = gbnn2d.fit_mixture(x, 4, generator(), iterations=0)
    for _ in range(7):
        r = dense_log_joint(x, mixture).softmax(1)
        centre = r.T @ x / r.sum(0)[:, None]
        offset = x[:, None] - centre
        covariance = torch.einsum("nk,nkp,nkq->kpq", r, offset, offset) / r.sum(0)[:, None, None]
        mixture = GaussianMixture(r.mean(0), centre, covariance + 1e-6 * x.var(0).diag())
    assert_close(gbnn2d.fit_mixture(x, 4, generator(), 7), mixture, rtol=1e-6, atol=1e-10)
    assert len(gbnn2d.fit_mixture(x, 50, generator(), 2, max_points=20).centre) <= 20
    assert len(gbnn2d.kmeans_plus_plus(torch.eye(3, 2).double().repeat(9, 1), 9, generator())) == 3
    x = like_weights(1000)
    likelihood = dense_log_joint(x, gbnn2d.fit_mixture(x, 40, generator())).logsumexp(1).mean()
    z = (x / x.std(0)).numpy()
    peer = sk_mixture.GaussianMixture(40, tol=0.01, random_state=0).fit(z)
    assert likelihood + x.std(0).log().sum() > peer.score(z) - 0.02


@pytest.mark.parametrize("seed", range(16))
def test_labels_are_the_argmax_over_all_components(seed):
    """Shapes from round to almost a line; far points."""
    torch.manual_seed(seed)
    k = (1, 2, 9, 60)[seed % 4]
    scale = 10 ** (2 * torch.rand(k, 2).double() - 2)
    covariance = scale[:, :, None] * scale[:, None]
    covariance[:, 0, 1] *= double(k).sign() * (1 - 10 ** (-11 * torch.rand(k).double()))
    covariance[:, 1, 0] = covariance[:, 0, 1]
    mixture = GaussianMixture((3 * double(k)).softmax(0), double(k, 2), covariance)
    x = double(2500, 2) * torch.tensor([1, 1, 1, 1e3, 1e6]).double().repeat(500)[:, None]
    joint = gbnn2d.log_joint(x[:, None], mixture)
    for excluded in (None, torch.randint(len(mixture.centre), (2500,))):
        if excluded is not None:
            joint[torch.arange(2500), excluded] = -math.inf
        label, largest = gbnn2d.most_probable(x, mixture, excluded)
        assert np.array_equal(label, joint.numpy().argmax(1))
        assert torch.equal(largest, joint.amax(1))
    # The bound of a point alone, on the axis of a component, is its density but for rounding.
    for x in mixture.centre + 1e4 * mixture.covariance[:, 0]:
        assert gbnn2d.assign(x[None], mixture) == gbnn2d.log_joint(x, mixture).numpy().argmax()


def test_points_outside_of_95_percent_are_blends_with_the_most_probable_other_component():
    x = like_weights(900)
    mixture = gbnn2d.fit_mixture(x, 8, generator())
    label = gbnn2d.assign(x, mixture).where(torch.rand(900) > 0.1, torch.randint(-1, 8, (900,)))
    weights = gbnn2d.encode(x, label, mixture)
    assert torch.equal(weights.outlier, (label < 0).nonzero()[:, 0].int())
    assert torch.equal(torch.stack(weights[2:4], 1), x[label < 0].float())
    offset = x - mixture.centre[label]
    precision = torch.linalg.inv(mixture.covariance)[label]
    squared = torch.einsum("np,npq,nq->n", offset, precision, offset)
    rows = ((label >= 0) & (squared > stats.chi2.ppf(0.95, 2))).nonzero()[:, 0]
    assert torch.equal(weights.ellipse_point, rows.int()) and 20 < len(rows) < 200
    joint = dense_log_joint(x, mixture)[rows]
    largest, second = joint.scatter(1, label[rows, None], -math.inf).max(1)
    assert torch.equal(weights.second, second.int())
    alpha = (joint[torch.arange(len(rows)), label[rows]] - largest).sigmoid()
    assert_close(weights.alpha, alpha.float(), rtol=1e-4, atol=1e-6)
    assert_close(weights.factor, torch.linalg.cholesky(mixture.covariance).float())
    weights = gbnn2d.encode(x, torch.zeros(900).long(), gbnn2d.select(mixture, slice(1)))
    assert (weights.alpha == 1).any() and (weights.alpha == 1).all()  # there is no other one


def test_weights_are_clustered_and_merged():
    x = like_weights(3000)
    gradient = 1e-3 * torch.rand(3000) + 0.1 * (x[:, 0] > 0)
    is_inlier = ~gbnn2d.outlier_mask(x[:, 0], gradient, 0.3, 0.01)
    first = gbnn2d.fit_mixture(x[is_inlier], 40, generator())
    before = is_inlier.long() - 1
    before[is_inlier] = gbnn2d.assign(x[is_inlier], first)
    members = before[is_inlier].bincount(minlength=40)
    keep = members >= members.median()
    shared = is_inlier & keep[before]
    label, mixture = gbnn2d.cluster(x, gradient, 40, generator(), 0.3, 0.01, members.median())
    assert torch.equal(label >= 0, shared) and 2 < keep.sum() < 40
    assert torch.equal(mixture.centre[label[shared]], first.centre[before[shared]])
    assert_close(mixture.proportion, first.proportion[keep] / first.proportion[keep].sum())
    means = torch.stack([gradient[label == k].double().mean() for k in range(label.max() + 1)])
    auto = 0.25 * x[shared, 1].median().item()
    for given, tau_d, taus in (("auto", auto, (math.inf, 9.0)), (0.02, 0.02, (0.05, 1e-4))):
        expected = gbnn2d.merge_mixture(mixture, means, tau_d, *taus)
        after, merged = gbnn2d.merge(x, label, mixture, gradient, given, *taus)
        assert_close(merged, expected)
        assert torch.equal(after[shared], gbnn2d.assign(x[shared], expected))
        assert torch.equal(after < 0, label < 0)
    assert 1 < len(merged.centre) < len(means)
    for n, factor, words in ((50, 1, "none of 40 Gaussians has 21"), (3000, math.nan, "or NaN")):
        with pytest.raises(ValueError, match=words):
            gbnn2d.cluster(x[:n], factor * gradient[:n], 40, generator())


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_distances_are_those_of_pot_and_finite_for_singular_covariances(scale):
    c = scale * double(20, 2)
    root = scale * double(20, 2, 2)
    s = root @ root.mT
    expected = [ot.gaussian.bures_wasserstein_distance(c[0], d, s[0], t) for d, t in zip(c, s)]
    found = gbnn2d.wasserstein(c[0], s[0], c, s)
    assert_close(found[1:], torch.cat(expected)[1:], rtol=1e-7, atol=0)
    assert gbnn2d.wasserstein(c, s, c, s).max() < 1e-7 * scale
    angle = math.pi * torch.rand(2000).double()  # POT gives NaN for lines
    lines = scale * torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1)
    a, b = [line[:, :, None] * line[:, None] for line in lines.split(2, 1)]
    for t, squared in ((3 * b, 1 + 3), (0 * b, 1), (a, 0), (4 * a, 1)):
        found = gbnn2d.wasserstein(c[0], a, c[0], t) / scale
        assert_close(found**2, torch.full_like(angle, squared), rtol=0, atol=1e-7)


@pytest.mark.parametrize("tau_d, tau_g, tau_v, left", [
    (0.9, math.inf, math.inf, None), (1.2, 0.3, math.inf, None), (1.2, math.inf, 0.05, None),
    (0.0, math.inf, math.inf, 14), (math.inf, math.inf, math.inf, 1)])
def test_the_closest_two_merge_until_none_are_close(tau_d, tau_g, tau_v, left):
    root = 0.3 * double(14, 2, 2)
    mixture = GaussianMixture(double(14).softmax(0), double(14, 2), root @ root.mT)
    gradient = torch.rand(14).double()
    before = [tensor.clone() for tensor in (*mixture, gradient)]
    parts = list(zip(*before))
    while True:
        distances = {(0, 0): math.inf}
        for j, (_, d, t, h) in enumerate(parts):
            for i, (_, c, s, g) in enumerate(parts[:j]):
                if abs(g - h) < tau_g and abs((s - t).trace()) / 2 < tau_v:
                    distances[i, j] = gbnn2d.wasserstein(c, s, d, t).item()
        i, j = min(distances, key=distances.get)
        if distances[i, j] >= tau_d:
            break
        (w, c, s, g), (v, d, t, h) = parts[i], parts.pop(j)
        p = w / (w + v)
        covariance = p * s + (1 - p) * t + p * (1 - p) * torch.outer(c - d, c - d)
        parts[i] = (w + v, p * c + (1 - p) * d, covariance, p * g + (1 - p) * h)
    assert len(parts) == left or (left is None and 1 < len(parts) < 13)
    merged = gbnn2d.merge_mixture(mixture, gradient, tau_d, tau_g, tau_v)
    parts.sort(key=lambda part: part[1][0])
    expected = [torch.stack(column) for column in zip(*parts)][:3]
    assert_close([*gbnn2d.select(merged, merged.centre[:, 0].argsort())], expected)
    assert all(map(torch.equal, (*mixture, gradient), before))  # the arguments stay
    mixture.centre[-1] = math.nan
    for arguments in ((mixture, gradient), (merged, math.nan * merged.proportion)):
        with pytest.raises(ValueError, match="not finite"):  # it would never end
            gbnn2d.merge_mixture(*arguments, tau_d)


@pytest.mark.parametrize("equal", [False, True])
def test_a_draw_shares_m_and_s_and_blends_those_of_two_components(equal):
    weights = tiny_weights()
    torch.manual_seed(1)
    drawn = gbnn2d.SharedGaussians(weights, equal)()
    torch.manual_seed(1)
    m, s = (weights.centre + (weights.factor @ double(3, 2, 1))[..., 0]).T
    eps = double(84)
    draws = m[:, None] + (0 if equal else s[:, None]) * eps            # [K, N]
    expected = draws[weights.label.long(), torch.arange(84)]
    expected[2] = 0.7 * draws[2, 2] + 0.3 * draws[0, 2]
    expected[9] = 0.6 * draws[0, 9] + 0.4 * draws[1, 9]
    expected[[0, 5]] = weights.outlier_mu + weights.outlier_sigma * eps[[0, 5]]
    assert_close(drawn, expected)


def test_gradients_of_draws_and_the_kl_of_shared_gaussians():
    start = tiny_weights()
    posterior = gbnn2d.SharedGaussians(start)
    assert posterior.kl() == 0 and all(map(torch.equal, posterior.weights(), start))
    names, parameters = zip(*posterior.named_parameters())
    for parameter in parameters:
        parameter.data = 0.5 * torch.randn_like(parameter)
    def draw(*values):
        torch.manual_seed(4)
        return torch.func.functional_call(posterior, dict(zip(names, values)), ()).sin()
    assert torch.autograd.gradcheck(draw, parameters)  # by central differences
    now = posterior.weights()
    normals = [MultivariateNormal(w.centre, scale_tril=w.factor) for w in (now, start)]
    outliers = [Normal(w.outlier_mu, w.outlier_sigma) for w in (now, start)]
    assert_close(posterior.kl(), kl_divergence(*normals).sum() + kl_divergence(*outliers).sum())


# ---- Networks, training, rows -------------------------------------------------------------------


def options(more=""):
    return gbnn2d.parse_args(f"--width 1 --device cpu --workers 0 --mc 3 {more}".split())


def test_networks_are_those_of_torchvision_and_of_wide_resnets():
    x = torch.randn(2, 3, 96, 96)
    args = options("--model resnet18")
    ours = gbnn2d.make_network(args, 1000, (3, 96, 96)).eval()
    theirs = models.resnet18().eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    block = nn.Sequential(*gbnn2d.wide_block(3, 5, stride=2))
    kernels = [layer.weight for layer in block.modules() if isinstance(layer, nn.Conv2d)]
    start = F.batch_norm(x, None, None, training=True).relu()
    h = F.conv2d(start, kernels[0], stride=2, padding=1)
    h = F.conv2d(F.batch_norm(h, None, None, training=True).relu(), kernels[1], padding=1)
    assert_close(block(x), h + F.conv2d(start, kernels[2], stride=2))
    args.device = torch.device("meta")
    for args.model, size in (("resnet18", 11_220_132), ("wide_resnet", 36_536_884)):
        net = gbnn2d.make_network(args, 100, (3, 32, 32))
        assert sum(parameter.numel() for parameter in net.parameters()) == size


def tiny_set(n=30, name="tiny"):
    images = torch.randint(256, (n, 1, 6, 6), dtype=torch.uint8, generator=generator())
    return data.ImageSet(name, images, torch.arange(n) * 3 // n, 3, (0.5,), (0.3,))


def make_module(stage):
    net = tiny_net().eval()
    if stage == "deterministic":
        return net
    shared = gbnn2d.SharedGaussians(tiny_weights())
    return gbnn2d.RandomNetwork(net, shared if stage == "final" else gbnn2d.MeanField(net))


@pytest.mark.parametrize("stage, kl_weight", list(zip(gbnn2d.STAGES, (0.0, 0.0, 0.3))))
def test_training_is_that_of_a_plain_loop(stage, kl_weight):
    args = options("--augment --batch-size 16 --warm-up .25 --lr .1 --lr-mu .05 --lr-rho .2 "
                   f"--epochs 2 --stoch-epochs 2 --final-epochs 2 --stoch-kl 0 --beta {kl_weight}")
    module = make_module(stage)
    ours = deepcopy(module)
    history = []
    run = Namespace(resume=lambda *_, **__: [], save=lambda _, rows, **__: history.append(rows[-1]))
    gbnn2d.train(ours, stage, tiny_set(), args, 7, run)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    groups = [{"params": [module.get_parameter(name)]} for name in names]
    optimiser = torch.optim.Adam(groups)
    if stage == "deterministic":
        optimiser = torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = data.Loader(tiny_set(), 16, seed=7, shuffle=True, augment="reflect_crop_flip")
    factors = iter([0.5, *[0.5 + 0.5 * math.cos(math.pi * t) for t in (1 / 6, 1 / 2, 5 / 6)]])
    for epoch in range(2):
        common.seed_all(7, gbnn2d.STAGES.index(stage), epoch)
        module.train(stage == "deterministic")
        sums = torch.zeros(2)
        for batch in loader.epoch(epoch):
            factor = next(factors)
            for name, group in zip(names, optimiser.param_groups):
                rate = 0.05 if name.startswith("net") or name == "posterior.mu" else 0.1
                group["lr"] = factor * (0.2 if name == "posterior.rho" else rate)
            logits = module(batch.images)
            loss = F.cross_entropy(logits, batch.labels)
            kl = module.posterior.kl() / 30 if stage != "deterministic" else torch.zeros(())
            sums += torch.stack([loss, kl]).detach() * len(logits)
            optimiser.zero_grad()
            (loss + kl_weight * kl).backward()
            optimiser.step()
        found = [history[epoch][name] for name in ("cross_entropy", "kl_per_image")]
        assert found == pytest.approx((sums / 30).tolist(), rel=1e-3)  # means over the epoch
    assert_close(ours.state_dict(), module.state_dict(), rtol=1e-3, atol=1e-4)


def test_the_gradient_is_the_mean_magnitude_over_shuffled_batches():
    """So that --limit-steps sees all classes of a folder, which come one after the other."""
    module = make_module("mean-field")
    batches = list(data.Loader(tiny_set(), 16, seed=7, shuffle=True).epoch(0))
    for steps in (1, 2):
        args = options(f"--batch-size 16 --limit-steps {steps}")
        found = gbnn2d.gradient_magnitude(module, tiny_set(), args, 7)
        common.seed_all(7, 3)
        losses = [F.cross_entropy(module(batch.images), batch.labels) for batch in batches[:steps]]
        gradients = [torch.autograd.grad(loss, module.posterior.mu)[0].abs() for loss in losses]
        assert_close(found, torch.stack(gradients).mean(0))


@pytest.mark.parametrize("stage", gbnn2d.STAGES)
def test_rows_are_those_of_scikit_learn(stage):
    module = make_module(stage)
    test, ood = tiny_set(300), tiny_set(40, "other")
    outputs = [gbnn2d.compute_outputs(module, dataset, options(), 5) for dataset in (test, ood)]
    sets = [(dataset.name, dataset.labels) for dataset in (test, ood)]
    row, pair = gbnn2d.evaluate([(stage, {"bytes": 1}, outputs)], sets, 5)
    images = torch.cat([test.images, ood.images])
    probs = []
    for draw in range(3):
        common.seed_all(5, 1000 + draw)
        probs.append(module((images / 255 - 0.5) / 0.3).detach().double().softmax(1).numpy())
    scores = {"total": stats.entropy(np.mean(probs, 0), axis=1)}
    if stage != "deterministic":
        scores["aleatoric"] = stats.entropy(probs, axis=2).mean(0)
        scores["epistemic"] = scores["total"] - scores["aleatoric"]
    nll = sk.log_loss(test.labels, np.mean(probs, 0)[:300])
    assert row | {"set": "tiny", "n": 300, "bytes": 1, "nll": pytest.approx(nll)} == row
    assert (pair["against"], len(pair)) == ("other", 5 + 4 * len(scores))
    for name, score in scores.items():
        auroc = sk.roc_auc_score(np.arange(340) >= 300, score)
        assert pair[f"auroc_{name}"] == pytest.approx(auroc, abs=1e-4)


# ---- Runs ---------------------------------------------------------------------------------------


def command(images, out, more=""):
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --width .03 --epochs 2 "
            f"--predict folder:{images}/test --stoch-epochs 2 --final-epochs 2 --batch-size 12 "
            f"--k0 30 --tau-d .01 --mc 2 --workers 0 --name run --out-dir {out} {more}").split()


@pytest.fixture(scope="module")
def story(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("story")
    rows = gbnn2d.main([*command(image_folder, out), "--device", "cpu"])  # with a picture
    return rows, out / "gbnn2d" / "run"


def test_rows_count_the_bytes_of_the_file_and_eval_repeats_them(story, image_folder):
    rows, root = story
    assert run_script("gbnn2d", *command(image_folder, root.parents[1], "--eval")) == rows
    assert (root / "plane.png").stat().st_size > 10_000
    deterministic, mean_field, clustered, merged, final = rows[::2]
    file = common.load(root / "seed1-compressed.pt")
    tensors = [*file["weights"].values(), *file["rest"].values()]
    assert final["bytes"] == sum(tensor.nbytes for tensor in tensors)
    for name, row in (("deterministic", deterministic), ("mean_field", mean_field)):
        assert final[f"bytes_vs_{name}"] == final["bytes"] / row["bytes"]
    assert final["bytes"] < final["file_bytes"] < final["bytes"] + 400 * len(tensors)
    gaussians = len(file["weights"]["centre"])
    assert gaussians == final["gaussians"] == merged["gaussians"] < clustered["gaussians"] <= 30
    table = np.genfromtxt(root / "predictions.csv", delimiter=",", names=True, dtype=None)
    assert table.dtype.names[2:] == ("predicted", "confidence", "total", "aleatoric", "epistemic")
    assert (table["predicted"] == table["label"]).mean() == final["accuracy"]


def test_files_are_loaded_with_their_statistics_or_start_a_run(story, image_folder, tmp_path):
    rows, root = story
    more = f"--weights {root}/seed1-deterministic.pt --epochs 0 --stoch-epochs 0 --final-epochs 0"
    again = run_script("gbnn2d", *command(image_folder, tmp_path, f"{more} --draw equal --runs 2"))
    assert again[:2] == rows[:2] and [row["seeds"] for row in again[::10]] == [[1], [2]]
    assert again[8]["nll"] == again[6]["nll"] and again[18]["nll"] == again[16]["nll"]
    for path, expected in ((root, rows), (tmp_path / "gbnn2d" / "run", again[:10])):
        argv = command(image_folder, tmp_path, f"--name {path.parts[-3]} --load")
        [row, pair] = run_script("gbnn2d", *argv, path / "seed1-compressed.pt")
        assert [row | {"method": "final"}, pair | {"method": "final"}] == expected[-2:]
    file = common.load(path / "seed1-compressed.pt")
    torch.save(file | {"std": file["mean"]}, tmp_path / "a.pt")
    assert run_script("gbnn2d", *argv, tmp_path / "a.pt", "--fresh")[0]["nll"] != row["nll"]


def test_a_run_that_is_killed_twice_ends_with_equal_files(story, image_folder, tmp_path):
    argv = command(image_folder, tmp_path)
    root = tmp_path / "gbnn2d" / "run"
    for name in ("mean-field", "final"):
        kill_after(Child(tmp_path, run_script, "gbnn2d", *argv), root / f"seed1-{name}.pt")
    assert run_script("gbnn2d", *argv) == story[0]
    for name in (*gbnn2d.STAGES, "mixture"):
        assert_equal_checkpoints(root / f"seed1-{name}.pt", story[1] / f"seed1-{name}.pt")


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


@pytest.mark.parametrize("model", ["torchvision/shufflenet_v2_x0_5", "attention"])
def test_networks_of_torchvision_and_of_ones_own(model, image_folder, tmp_path, monkeypatch):
    fit = partial(gbnn2d.fit_mixture, iterations=2, max_points=5000)
    monkeypatch.setattr(gbnn2d, "fit_mixture", fit)
    net = models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=24)
    monkeypatch.setitem(gbnn2d.NETWORKS, "attention", lambda args, shape: ([net], 24))
    argv = command(image_folder, tmp_path, f"--model {model} --weights none --image-size 32 --amp")
    rows = run_script("gbnn2d", *argv, "--limit-steps", 1)
    drawn = sum(p.numel() for p in net.parameters() if p.dim() in (2, 4))  # not embeddings
    assert model != "attention" or rows[-2]["weights"] == drawn + 24 * 3  # and the head
    [row, _] = run_script("gbnn2d", *argv, "--load", tmp_path / "gbnn2d/run/seed1-compressed.pt")
    assert row | {"method": "final"} == rows[-2]
