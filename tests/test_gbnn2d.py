"""gbnn2d.py: Method and Model against brute force, closed forms and scikit-learn in float64,
files of the published code against its equations, and the story end to end. What the Method does
to random mixtures is checked in test_copy_paste.py."""

import itertools
import json
import math
import warnings
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from conftest import CPU, Child, refusal, run_gbnn2d_in_float64, start_ranks, wait_for
from PIL import Image
from sklearn.metrics import log_loss
from sklearn.mixture import GaussianMixture
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal, kl_divergence

import common
import data
import gbnn2d


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


QUICK = partial(gbnn2d.fit_mixture, iterations=2, most=10_000)
# Few glyphs.
FEW = {name: prints._replace(train_rows=640, test_rows=200)
       for name, prints in data.EMBEDDED.items()}


def run(argv):
    """The rows of the script, with a quick fit of the mixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gbnn2d, "fit_mixture", QUICK)
        patch.setattr(data, "EMBEDDED", FEW)
        patch.setattr(data, "_embedded", data._embedded.__wrapped__)  # nothing is kept
        return gbnn2d.main([str(word) for word in argv])


def load(path, folder, *more):
    """The rows of --load."""
    return run(["--load", path, "--out-dir", folder, *CPU, *more])


def seed_of(number):
    return torch.Generator().manual_seed(number)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def dense_log_joint(x, mixture):
    """log pi_k N(x; c_k, S_k) [n, K], by torch.distributions."""
    normals = MultivariateNormal(mixture.centre, mixture.covariance)
    return normals.log_prob(x[:, None]) + mixture.proportion.log()


# ---- Sigma, outliers, KL ------------------------------------------------------------------------


def test_outliers():
    mu = 0.01 * torch.randn(1000)
    gradient = torch.rand(1000) * 1e-3
    mu[3] = -0.3  # negative ones, too
    mu[4] = 0.2   # not above the threshold
    gradient[7] = 5.0
    mask = gbnn2d.outlier_mask(mu, gradient, float(mu[4]), 0.01)
    assert mask[3] and not mask[4] and mask[7] and mask.sum() == 11
    assert gbnn2d.outlier_mask(mu, gradient, 0.25, 0).sum() == 1
    assert gbnn2d.outlier_mask(mu, torch.ones(1000), 9.0, 0.01).all()  # ties: all of them
    assert gbnn2d.outlier_mask(mu[:50], gradient[:50], 9.0, 0.01).sum() == 1  # at least one


def test_the_last_kl_is_that_of_the_gaussians_from_where_they_began():
    """The first KL, of the mean field from its prior: test_a_mean_field_starts_at_the_network."""
    weights = tiny_weights(84)
    posterior = gbnn2d.SharedGaussians(weights)
    start = posterior.weights()
    assert posterior.kl() == 0 and all(map(torch.equal, start, weights))
    for parameter in posterior.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    now = posterior.weights()
    assert not any(map(torch.equal, (now.centre, now.factor), (start.centre, start.factor)))
    planes = [MultivariateNormal(w.centre, w.factor @ w.factor.mT) for w in (now, start)]
    outliers = [Normal(w.outlier_mu, w.outlier_sigma) for w in (now, start)]
    wanted = kl_divergence(*planes).sum() + kl_divergence(*outliers).sum()
    assert posterior.kl().item() == pytest.approx(wanted.item(), rel=1e-9)


# ---- The mixture --------------------------------------------------------------------------------


def test_the_second_component_of_an_ellipse_point_can_be_far_away():
    """Nine narrow components are nearer, but at the rim of its own a wide one is more probable."""
    u, v = torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij")
    centre = torch.cat([torch.stack([u.flatten(), v.flatten()], 1), torch.tensor([[6.0, 6.0]])])
    variance = torch.tensor([1e-3] * 9 + [9.0]).double()
    mixture = gbnn2d.GaussianMixture(torch.full((10,), 0.1).double(), centre.double(),
                             variance[:, None, None] * torch.eye(2).double())
    x = torch.tensor([[1.0, 1.09], [1.0, 1.5]]).double()  # at the rim of number 4, and beyond it
    assert 9 not in gbnn2d.nearest(x, mixture.centre, 8)
    second, alpha = gbnn2d.second_components(x[:1], mixture, torch.tensor([4]))
    joint = dense_log_joint(x[:1], mixture)[0]
    assert second.item() == 9
    assert alpha.item() == pytest.approx(torch.sigmoid(joint[4] - joint[9]).item(), rel=1e-9)
    # Beyond its ellipse, a point belongs to the most probable one of all.
    assert gbnn2d.assign(x, mixture).tolist() == [4, 9]
    weights = gbnn2d.encode(x, torch.tensor([4, 9]), mixture)
    assert weights.ellipse_point.tolist() == [0] and weights.second.tolist() == [9]


def test_em_of_the_nearest_of_forty_is_em_of_all():
    """Points like weights have as large a likelihood as by scikit-learn's fit, which has all."""
    mu = double(1000) * (1 + torch.rand(1000).double())
    x = torch.stack([mu, 0.3 * (0.3 * double(1000)).exp() + 0.1 * mu.abs()], 1)
    sparse, history = gbnn2d.fit_mixture(x, 40, seed_of(1))
    assert len(sparse.proportion) == 40
    likelihood = dense_log_joint(x, sparse).logsumexp(1).mean().item()
    assert likelihood == pytest.approx(history[-1], abs=5e-3) and likelihood > history[0] + 0.1
    peer = GaussianMixture(40, max_iter=30, tol=1e-9, random_state=0)
    with warnings.catch_warnings(action="ignore"):  # it has not converged either
        assert likelihood > peer.fit(x).score(x) - 0.02


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_points_on_a_line_have_a_mixture(noise):
    """mu alone varies where no weight has learned a sigma; the draws of sigma stay close to it."""
    x = torch.stack([double(500), 1e-3 + noise * double(500)], 1)
    mixture, history = gbnn2d.fit_mixture(x, 5, seed_of(0), iterations=9)
    assert (torch.linalg.cholesky_ex(mixture.covariance).info == 0).all()
    assert math.isfinite(history[-1]) and len(mixture.centre) == 5
    assert mixture.covariance[:, 1, 1].sqrt().max() < 1.2 * max(noise, 1e-9)
    np.testing.assert_allclose(mixture.proportion @ mixture.centre, x.mean(0), rtol=1e-9)


# ---- Merging ------------------------------------------------------------------------------------


def test_wasserstein_is_exact_for_small_equal_and_singular_covariances():
    centre = double(20, 2)
    root = 0.1 * double(20, 2, 2)
    covariance = root @ root.mT
    assert gbnn2d.wasserstein(centre, covariance, centre, covariance).max() < 1e-7
    small = gbnn2d.wasserstein(1e-4 * centre, 1e-8 * covariance, 0 * centre, 0 * covariance)
    wanted = 1e-4 * (centre.square().sum(1) + root.square().sum((1, 2))).sqrt()
    np.testing.assert_allclose(small, wanted, rtol=1e-9)


# ---- Shared weights and draws -------------------------------------------------------------------


def tiny_weights(n):
    """Three Gaussians, two outliers and two ellipse points, float64."""
    label = (torch.arange(n) % 3).int()
    label[[0, 5]] = -1
    factor = [[[0.1, 0], [0.02, 0.03]], [[0.05, 0], [0.01, 0.04]], [[0.15, 0], [-0.02, 0.03]]]
    return gbnn2d.SharedWeights(
        label, torch.tensor([0, 5]), torch.tensor([0.5, -0.4]).double(),
        torch.tensor([0.01, 0.02]).double(), torch.tensor([2, 9]), torch.tensor([0, 1]),
        torch.tensor([0.7, 0.6]).double(),
        torch.tensor([[0.1, 0.02], [-0.2, 0.03], [0.0, 0.01]]).double(),
        torch.tensor(factor).double())


def lenet_weights(n=44_190):
    mu = (0.05 * torch.randn(n)).clamp(-0.19, 0.19)
    mu[:40:9] = torch.tensor([-0.3, 0.21, -0.21, 0.3, 0.7])
    return mu, 1e-3 * torch.randn(n).exp()


def test_shared_weights_are_whole_and_repeatable(monkeypatch):
    """Labels contiguous and each in use; outliers alike before and after merging; ellipse
    points are outside the ellipse of their component; components of few members dissolve."""
    monkeypatch.setattr(gbnn2d, "fit_mixture", QUICK)
    mu, sigma = lenet_weights(9000)
    points = torch.stack([mu, sigma], 1)
    options = gbnn2d.CompressionOptions(k0=40, min_cluster=30, tau_d=3e-3)
    arguments = (mu, sigma, torch.rand(len(mu)), options)
    before, after, numbers = gbnn2d.compress(*arguments, seed_of(1))
    again = gbnn2d.compress(*arguments, seed_of(1))
    assert numbers == again[2] and (numbers["tau_d"], numbers["k0"]) == (3e-3, 40)
    for weights, same in zip((before, after), again):
        assert all(map(torch.equal, weights, same))
        label = weights.label.long()
        assert label.unique().tolist() == list(range(-1, len(weights.centre)))
        assert torch.equal((label == -1).nonzero()[:, 0], weights.outlier)
        assert torch.equal(weights.outlier, before.outlier)
        kept = torch.stack([weights.outlier_mu, weights.outlier_sigma], 1)
        assert torch.equal(points[weights.outlier], kept)
        inliers = (label >= 0).nonzero()[:, 0]
        normals = MultivariateNormal(weights.centre.double()[label[inliers]],
                                     scale_tril=weights.factor.double()[label[inliers]])
        at_centre = normals.log_prob(normals.mean)
        outside = at_centre - normals.log_prob(points[inliers].double()) > 5.9915 / 2
        is_ellipse_point = torch.isin(inliers, weights.ellipse_point)
        assert (outside == is_ellipse_point).double().mean() > 0.9999 and is_ellipse_point.any()
        assert (label[weights.ellipse_point] != weights.second).all()
        assert ((weights.alpha >= 0.5) & (weights.alpha <= 1)).all()
    assert 1 < len(after.centre) < len(before.centre) <= 40
    assert before.label[inliers].bincount().min() > 30
    assert (before.label[mu.abs() > 0.2] == -1).all() and (mu.abs() > 0.2).sum() == 5


def test_thresholds(monkeypatch):
    monkeypatch.setattr(gbnn2d, "fit_mixture", QUICK)
    mu, sigma = lenet_weights(5000)

    def compress(**options):
        options = gbnn2d.CompressionOptions(**{"k0": 0, **options})
        return gbnn2d.compress(mu, sigma, torch.rand(5000), options, seed_of(0))

    same, merged, numbers = compress(tau_d=0.0)
    assert all(torch.equal(a, b) for a, b in zip(same, merged)) and numbers["k0"] == 10
    _, single, _ = compress(tau_d=math.inf, tau_v=math.inf, grad_frac=0.0)
    assert len(single.centre) == 1 and gbnn2d.SharedGaussians(single)().isfinite().all()
    before, _, numbers = compress(k0=200, min_cluster=2, tau_d="auto")
    median = sigma[before.label >= 0].median().item()
    assert numbers["tau_d"] == pytest.approx(gbnn2d.AUTO_TAU_D * median)


@pytest.mark.parametrize("options, said", [
    (dict(k0=6000), "too few for 6000 Gaussians"), (dict(tau_w=0.0), "only 0 of 5000 weights"),
    (dict(grad_frac=1.0), "only 0 of"), (dict(min_cluster=9999), "no Gaussian has more than 9999"),
    (None, "magnitude")])
def test_too_few_weights_and_signed_gradients_are_errors_of_one_line(options, said, monkeypatch):
    monkeypatch.setattr(gbnn2d, "fit_mixture", QUICK)
    mu, sigma = lenet_weights(5000)
    gradient = torch.rand(5000) if options else torch.randn(5000)
    options = gbnn2d.CompressionOptions(**{"k0": 10, **(options or {})})
    arguments = (mu, sigma, gradient, options, seed_of(0))
    assert said in refusal(gbnn2d.compress, *arguments, kind=ValueError)


@pytest.mark.parametrize("equal", [False, True])
def test_a_draw_is_that_of_a_loop_over_the_weights(equal):
    """(m, s) is drawn once for each component; an ellipse point blends the draws of two."""
    weights = tiny_weights(60)
    posterior = gbnn2d.SharedGaussians(weights, equal)
    torch.manual_seed(1)
    drawn = posterior()
    torch.manual_seed(1)
    noise = double(3, 2)
    m, s = (weights.centre + torch.einsum("kpq,kq->kp", weights.factor, noise)).T
    s = 0 * s if equal else s
    for i, eps in enumerate(double(60)):
        draws = m + s * eps                                            # [K]
        wanted = draws[weights.label[i]]
        if i in (0, 5):
            row = (0, 5).index(i)
            wanted = weights.outlier_mu[row] + weights.outlier_sigma[row] * eps
        elif i in (2, 9):
            row = (2, 9).index(i)
            wanted = draws[weights.second[row]].lerp(wanted, weights.alpha[row])
        assert drawn[i].item() == pytest.approx(wanted.item(), rel=1e-9), i


def test_gradients_reach_what_was_moved():
    """By central differences; a component that no weight refers to gets none."""
    weights = tiny_weights(84)
    label = torch.where(weights.label == 2, 1, weights.label)
    weights = weights._replace(label=label, second=torch.zeros(2).long())
    posterior = gbnn2d.SharedGaussians(weights)
    names = ["shift", "stretch", "outlier_shift", "outlier_stretch"]
    target = double(84)

    def loss(*moves):
        torch.manual_seed(4)
        drawn = torch.func.functional_call(posterior, dict(zip(names, moves)), ())
        return (drawn - target).square().sum()

    moves = []
    for name in names:
        zeros = posterior.get_parameter(name)
        moves.append((0.1 * torch.randn_like(zeros)).requires_grad_())
    assert torch.autograd.gradcheck(loss, moves, atol=1e-6)
    gradients = torch.autograd.grad(loss(*moves), moves)
    assert all((g[:2] != 0).any() for g in gradients)
    assert (gradients[0][2] == 0).all() and (gradients[1][2] == 0).all()


def test_the_published_counts():
    """Of ResNet-18 on ImageNet; then the bytes of a tiny network, by hand."""
    counts = [range(count) for count in (11_678_912, 23_013, 0, 0, 10_885, 0, 0, 2217, 0)]
    report = gbnn2d.storage(gbnn2d.SharedWeights(*counts), 0)
    assert 100 * report["bytes_vs_mean_field"] == pytest.approx(25.5, abs=0.1)
    tiny = gbnn2d.storage(tiny_weights(84), 84)
    size = 2 * 84 + 12 * 2 + 24 * 3 + 10 * 2 + 84
    assert tiny == {"weights": 84, "outliers": 2, "ellipse_points": 2, "gaussians": 3,
                    "bytes": size, "bytes_vs_deterministic": size / (84 * 4 + 84),
                    "bytes_vs_mean_field": size / (84 * 8 + 84)}


# ---- Networks -----------------------------------------------------------------------------------


def parse(*argv):
    return gbnn2d.parse_args([*CPU, *argv])


def tiny_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


@pytest.mark.parametrize("model, classes, side, size", [
    ("resnet18", 100, 32, 11_210_432), ("resnet18", 1000, 224, 11_678_912),
    ("lenet", 10, 28, 44_490), ("wide_resnet", 100, 32, 36_518_832)])
def test_parameter_counts(model, classes, side, size):
    args = parse("--dataset", "cifar100", "--model", model)
    args.device = "meta"
    with torch.device("meta"):
        net = gbnn2d.make_network(args, classes, (3, side, side))
    assert sum(shape.numel() for shape in gbnn2d.weight_shapes(net).values()) == size


def test_weights_have_one_order_and_attention_is_covered():
    assert gbnn2d.weight_shapes(tiny_net()) == {"0.weight": (4, 1, 3, 3), "3.weight": (3, 16)}
    vit = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=3).eval()
    field = gbnn2d.RandomNetwork(vit, gbnn2d.MeanField(vit))
    layer = "encoder.layers.encoder_layer_0."
    assert list(field.shapes) == [
        "conv_proj.weight", layer + "self_attention.in_proj_weight",
        layer + "self_attention.out_proj.weight", layer + "mlp.0.weight", layer + "mlp.3.weight",
        "heads.head.weight"]  # no embedding, no token
    mu = field.posterior.mu
    field.posterior.rho.data.fill_(-100)  # no noise
    mu.data = torch.randn(len(mu))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():  # where attention takes its fast path
        drawn = field.eval()(x)
        for name, part in field.split(mu).items():
            vit.get_parameter(name).copy_(part)
        torch.testing.assert_close(drawn, vit(x))
    with pytest.raises(ValueError, match="no convolution"):
        gbnn2d.weight_shapes(nn.Sequential(nn.BatchNorm1d(3)))


class ShowWeight(nn.Linear):
    """A network whose output is its weight."""

    def forward(self, x):
        return self.weight


def test_bfloat16_does_not_round_the_draws():
    """Gaussians are drawn in float32 under autocast, as they are trained and stored."""
    net = ShowWeight(12, 7)
    for posterior in (gbnn2d.MeanField(net), gbnn2d.SharedGaussians(tiny_weights(84))):
        random = gbnn2d.RandomNetwork(net, posterior)
        drawn = []
        for enabled in (False, True):
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                drawn.append(random(torch.ones(1)))
        assert drawn[1].dtype == torch.float32 and torch.equal(*drawn)


def test_a_mean_field_starts_at_the_network():
    net = tiny_net()
    field = mean_field(net, sigma_init=0.05).eval()
    posterior = field.posterior
    for layer, part in ((net[0], slice(0, 36)), (net[3], slice(36, 84))):
        rms = layer.weight.detach().square().mean().sqrt().expand(part.stop - part.start)
        np.testing.assert_allclose(posterior.sigma.detach()[part], 0.05 * rms, rtol=1e-4)
        np.testing.assert_allclose(posterior.prior_sd[part], rms, rtol=1e-6)
        assert torch.equal(posterior.mu[part], layer.weight.flatten())
    wanted = kl_divergence(Normal(posterior.mu, posterior.sigma), Normal(0, posterior.prior_sd))
    assert posterior.kl().item() == pytest.approx(wanted.sum().item(), rel=1e-4)
    x = torch.randn(5, 1, 4, 4)
    assert not torch.equal(field(x), field(x))
    trained = {name for name, p in field.named_parameters() if p.requires_grad}
    assert trained == {"posterior.mu", "posterior.rho", "net.1.weight", "net.1.bias", "net.3.bias"}


def mean_field(net, **options):
    return gbnn2d.RandomNetwork(net, gbnn2d.MeanField(net, **options))


# ---- Training and evaluation --------------------------------------------------------------------


def tiny_set(n=50, low=0, high=256):
    images = torch.randint(low, high, (n, 1, 4, 4), dtype=torch.uint8)
    return data.ImageSet("tiny", images, torch.arange(n) % 3, 3, (0.5,), (0.3,))


def as_input(images):
    return (images / 255.0 - 0.5) / 0.3


def test_a_step_of_training_by_hand(tmp_path):
    """Its gradient; Adam's first step is as long as the rate, here after the warm-up."""
    train_set = tiny_set(32)
    args = parse("-b", "40", "--warm-up", "0.2", "--lr-mu", "1e-3", "--lr-rho", "1e-2",
                 "--out-dir", str(tmp_path), "--name", "run")
    field = mean_field(tiny_net()).eval()
    rates = {"posterior.mu": 1e-3, "posterior.rho": 1e-2, "net.3.bias": 1e-3}
    before = {name: field.get_parameter(name).detach().clone() for name in rates}
    [batch] = data.Loader(train_set, 40, args.device, seed=1, shuffle=True).epoch(0)
    common.seed_all(1, 1, 0, 0)
    kl = field.posterior.kl() / 32
    loss = F.cross_entropy(field(batch.images), batch.labels) + 0.3 * kl
    wanted = torch.autograd.grad(loss, [field.get_parameter(name) for name in rates])
    run = common.Run(args, {})
    gbnn2d.train(field, "mean-field", 1, 1, train_set, args, run, kl_weight=0.3)
    share = 0.5 * (1 + math.cos(math.pi * (0.5 - 0.2) / 0.8))
    for (name, rate), gradient in zip(rates.items(), wanted):
        now = field.get_parameter(name)
        torch.testing.assert_close(now.grad, gradient, rtol=1e-4, atol=1e-6)
        step = (now - before[name]).abs().median().item()
        assert step == pytest.approx(rate * share, rel=1e-3)
    [row] = state_of(tmp_path, "run", "mean-field")["history"]
    assert row["kl_per_example"] == pytest.approx(kl.item())


def test_the_gradient_is_the_mean_magnitude_of_batches():
    net = tiny_net()
    train_set = tiny_set()
    args = parse("-b", "16")
    ours = gbnn2d.gradient_magnitude(mean_field(net, sigma_init=1e-9), 1, train_set, args)
    net.eval().requires_grad_(True)
    total = 0
    for rows in torch.arange(50).split(16):  # the last one has two images
        x = as_input(train_set.images[rows])
        loss = F.cross_entropy(net(x), train_set.labels[rows])
        gradients = torch.autograd.grad(loss, [net[0].weight, net[3].weight])
        total = total + torch.cat([g.flatten().abs() for g in gradients])
    np.testing.assert_allclose(ours, total / 4, rtol=1e-4, atol=1e-7)


def test_a_prediction_and_its_metrics_by_hand():
    """The same draws in each batch; means of probabilities and of logits."""
    test_set = tiny_set(700)
    weights = tiny_weights(84)
    posterior = gbnn2d.SharedGaussians(weights._replace(factor=10 * weights.factor))
    shared = gbnn2d.RandomNetwork(tiny_net(), posterior)
    p = gbnn2d.predict(shared, test_set, 5, parse("--mc", "3"))
    logits = []
    for sample in range(3):
        common.seed_all(5, 1000 + sample)
        with torch.no_grad():
            logits.append(shared(as_input(test_set.images)).double())
    logits = torch.stack(logits)
    labels = test_set.labels
    probs = logits.softmax(2)
    total = Categorical(probs.mean(0)).entropy()
    aleatoric = Categorical(logits=logits).entropy().mean(0)
    scores = gbnn2d.uncertainties(p)
    for found, wanted in ((p.logits, logits.mean(0)), (p.log_probs.exp(), probs.mean(0)),
                          (p.aleatoric, aleatoric), (scores["total"], total),
                          (scores["epistemic"], total - aleatoric)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    metrics = gbnn2d.label_metrics(p, labels)
    for ending, mean in (("", probs.mean(0)), ("_logits", logits.mean(0).softmax(1))):
        assert metrics[f"nll{ending}"] == pytest.approx(log_loss(labels, mean), rel=1e-4)
        for bins in (10, 15):
            wanted = common.ece(mean, labels, bins=bins)
            assert metrics[f"ece{bins}{ending}"] == pytest.approx(wanted, rel=1e-4)


def test_the_mode_of_sampled_labels_is_the_published_accuracy():
    """A label is drawn from the softmax of each draw; the mode is the smallest commonest one."""
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.1, 0.0]]).double()
    # The cumulative probabilities are 0.705, 0.965, 1 and 0.322, 0.678, 1.
    uniform = torch.tensor([[0.1, 0.9], [0.7, 0.9], [0.71, 0.3], [0.97, 0.1]])
    for numbers, labels in zip(uniform, ([0, 2], [0, 2], [1, 0], [2, 0])):
        drawn = gbnn2d.mean_prediction(logits[None], numbers[None])["mode"]
        assert drawn.tolist() == labels
    mode = gbnn2d.mean_prediction(logits.expand(4, 2, 3), uniform)["mode"]
    assert mode.tolist() == [0, 0]
    prediction = gbnn2d.Predictions(logits.log_softmax(1), logits, mode, mode, 0.0)
    assert gbnn2d.label_metrics(prediction, torch.tensor([0, 1]))["accuracy_mode"] == 0.5


# ---- Published checkpoints ----------------------------------------------------------------------


class CifarBlock(nn.Module):
    def __init__(self, c_in, c, step):
        super().__init__()
        self.residual_function = nn.Sequential(
            nn.Conv2d(c_in, c, 3, step, 1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c))
        self.shortcut = nn.Sequential()
        if c_in != c:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c, 1, step), nn.BatchNorm2d(c))

    def forward(self, x):
        return (self.residual_function(x) + self.shortcut(x)).relu()


def imagenet_block(c_in, c, step):
    shortcut = nn.Sequential(nn.Conv2d(c_in, c, 1, step, bias=False), nn.BatchNorm2d(c))
    return torchvision.models.resnet.BasicBlock(c_in, c, step, shortcut if c_in != c else None)


class WideBlock(nn.Module):
    def __init__(self, c_in, c, step):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.conv1 = nn.Conv2d(c_in, c, 3, step, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, 1, 1, bias=False)
        self.convShortcut = nn.Conv2d(c_in, c, 1, step, bias=False)

    def forward(self, x):
        h = self.bn1(x).relu()
        return self.conv2(self.bn2(self.conv1(h)).relu()) + self.convShortcut(h)


def published_net(layout, classes=4):
    """A network with the names of the published one, of small width, in eval mode."""
    stages = ((1, 2, 2, 1), (2, 2, 4, 2), (3, 4, 8, 2), (4, 8, 16, 2))  # number, widths, stride
    if layout == "wrn":  # WRN-10
        layers = {"conv1": nn.Conv2d(3, 16, 3, 1, 1, bias=False)}
        for number, c_in, c, step in ((1, 16, 2, 1), *stages[1:3]):
            block = nn.Sequential(WideBlock(c_in, c, step))
            layers[f"block{number}"] = nn.Sequential(OrderedDict(layer=block))
        layers |= {"bn1": nn.BatchNorm2d(8), "relu": nn.ReLU()}
    elif layout == "cifar":
        layers = {"conv1": nn.Sequential(nn.Conv2d(3, 2, 3, 1, 1), nn.BatchNorm2d(2), nn.ReLU())}
        for number, c_in, c, step in stages:
            blocks = (CifarBlock(c_in, c, step), CifarBlock(c, c, 1))
            layers[f"conv{number + 1}_x"] = nn.Sequential(*blocks)
    else:
        layers = {"conv1": nn.Conv2d(3, 2, 7, 2, 3, bias=False), "bn1": nn.BatchNorm2d(2),
                  "relu": nn.ReLU(), "maxpool": nn.MaxPool2d(3, 2, 1)}
        for number, c_in, c, step in stages:
            blocks = (imagenet_block(c_in, c, step), imagenet_block(c, c, 1))
            layers[f"layer{number}"] = nn.Sequential(*blocks)
    layers |= {"avg": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "fc": nn.Linear(c, classes)}
    net = nn.Sequential(OrderedDict(layers)).eval()
    for name, tensor in net.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith(("running_mean", "bias")):
            tensor.normal_(0, 0.2)
    return net


def published_file(layout, path, k=12, classes=4):
    """A file like 2DGBNNs.pth; returns its state and a network that belongs to it."""
    net = published_net(layout, classes)
    names = gbnn2d.weight_shapes(net)
    n = sum(shape.numel() for shape in names.values())
    label = torch.randint(k, (n,))
    outlier = torch.randperm(n)[:30]
    label[outlier[:5]] = -1
    inlier = torch.ones(n).index_fill(0, outlier, 0).nonzero()[:6, 0]
    rows = inlier.tolist() + outlier[:2].tolist()
    values = [[2e5 + 0.3, 2e5], [162755.0, 162754.5], [1e5, 9e4], [9.5, 9.0]] * 2
    pairs = [torch.randperm(k)[:2].tolist() for _ in rows]
    rest = {name: tensor for name, tensor in net.state_dict().items() if name not in names}
    guide = {"centers_guide": 0.3 * torch.randn(k, 2),
             "scale_tril_posterior": torch.tril(torch.rand(k, 2, 2) * 0.05 + 1e-3),
             "outliers_posterior_loc": torch.randn(30),
             "outliers_posterior_sigma": torch.rand(30) * 0.1 + 1e-3}
    indices = {"outliers_indices": outlier, "filtered_labels": label.to(torch.int16),
               "ellipse_outdices": rows, "ellipse_outdices_dict": dict(zip(rows, pairs)),
               "ellipse_outdices_value_dict": dict(zip(rows, values))}
    state = {"state_dict_no_weight": rest, "params_guide": guide, "params_dict_indices": indices}
    torch.save(state, path)
    return state, net


def published_draw(layout, state):
    """The weights [N] of one draw, as the prediction scripts make it."""
    guide, indices = state["params_guide"], state["params_dict_indices"]
    label, outlier = indices["filtered_labels"].long(), indices["outliers_indices"]
    noise = torch.randn(len(guide["centers_guide"]), 2, 1)
    m = guide["centers_guide"][:, 0] + (guide["scale_tril_posterior"] @ noise)[:, 0, 0]
    w = m[label.clamp_min(0)]
    noise = torch.randn(len(label))[outlier]
    w[outlier] = guide["outliers_posterior_loc"] + guide["outliers_posterior_sigma"] * noise
    for row, (first, second) in indices["ellipse_outdices_dict"].items():
        values = torch.tensor(indices["ellipse_outdices_value_dict"][row], dtype=torch.float64)
        a, b = values.softmax(0)
        both = (values > 162754.797).all()
        if layout == "wrn":  # the other scripts overwrite them
            w[row] = a * guide["centers_guide"][first, 0]
            w[row] += both * b * guide["centers_guide"][second, 0]
    return w


@pytest.mark.parametrize("layout, side", [("cifar", 32), ("wrn", 32), ("imagenet", 72)])
def test_a_published_file_gives_the_published_weights_and_logits(layout, side, tmp_path):
    path = tmp_path / "2DGBNNs.pth"
    state, net = published_file(layout, path)
    train_set = data.ImageSet("own", torch.zeros(4, 3, side, side, dtype=torch.uint8),
                              torch.arange(4), 4, (0.5,) * 3, (0.3,) * 3)
    splits = data.Splits(train_set, None, train_set, {}, None, {})
    args = parse("--load", str(path), "--dataset", "cifar10")
    assert args.model == ("wide_resnet" if layout == "wrn" else "resnet18")
    assert args.draw == "equal" and args.epochs is None
    file = gbnn2d.read_file(args)
    random = gbnn2d.load_network(file, splits, args).eval()
    x = torch.randn(3, 3, side, side)
    torch.manual_seed(1)
    wanted = published_draw(layout, state)
    with torch.no_grad():
        torch.manual_seed(1)
        np.testing.assert_allclose(random.posterior(), wanted, atol=1e-6)
        torch.manual_seed(1)
        logits = random(x)
        for name, weight in zip(gbnn2d.weight_shapes(net), random.split(wanted).values()):
            net.get_parameter(name).copy_(weight)
        assert (logits - net(x)).abs().max() < 1e-5 * logits.abs().max()
    # The other spellings of two keys.
    guide = state["params_guide"]
    guide["centers"] = guide.pop("centers_guide")
    guide["outliers_posterior_simga"] = guide.pop("outliers_posterior_sigma")
    torch.save(state, path)
    assert all(map(torch.equal, gbnn2d.read_file(args).weights, file.weights))
    # The stem of ResNet-18 depends on the size of the images.
    other = replace(train_set, images=torch.zeros(4, 3, 104 - side, 104 - side))
    if layout != "wrn":
        said = refusal(gbnn2d.load_network, file, splits._replace(train=other), args)
        assert f"for images of {104 - side} pixels per side" in said


def test_a_published_file_is_evaluated_as_published(tmp_path, monkeypatch):
    """With the statistics of CIFAR-100, the draws of its script, and counts of the file."""
    path = tmp_path / "2DGBNNs.pth"
    state, _ = published_file("wrn", path, classes=6)  # the published CIFAR-10 network has 100
    seen = []
    predict = gbnn2d.predict

    def predict_quickly(module, dataset, seed, args):
        seen.append((dataset.mean, args.mc))
        return predict(module, dataset, seed, common.with_options(args, mc=2))

    monkeypatch.setattr(gbnn2d, "predict", predict_quickly)
    argv = ["--dataset", own_folder(tmp_path), "--preset", "cifar10", "--ood"]
    [row] = load(path, tmp_path, *argv, "--predict", argv[1])
    assert seen == [(pytest.approx((0.5071, 0.4865, 0.4409), abs=1e-4), 30)] * 2
    assert (row["outliers"], row["ellipse_points"], row["gaussians"]) == (30, 8, 12)
    assert row["method"] == "published" and row["file_bytes"] == path.stat().st_size
    assert {"accuracy_mode", "accuracy_logits", "nll_logits", "ece10_logits", "nll"} <= row.keys()
    table = next((tmp_path / "gbnn2d").glob("*/predictions.csv")).read_text().splitlines()
    assert table[0] == "file,label,predicted,confidence,total,aleatoric,epistemic,temperature"
    # The training images are not read; and of WRN's files, some have no ellipse points.
    monkeypatch.setattr(data, "load", Mock(wraps=data.load))
    state["params_dict_indices"]["ellipse_outdices"] = []
    torch.save(state, path)
    [row] = load(path, tmp_path, *argv, "--mc", 1)
    assert row["ellipse_points"] == 0
    assert [call.args[1] for call in data.load.call_args_list] == ["test"]
    assert "--weights has no effect" in refusal(load, path, tmp_path, *argv, "--weights", "x")
    assert "add --dataset" in refusal(load, path, tmp_path)


GUIDE, INDICES, REST = "params_guide", "params_dict_indices", "state_dict_no_weight"


@pytest.mark.parametrize("layout, part, name, value, said", [
    ("cifar", GUIDE, "centers_guide", None, "centers_guide is missing"),
    # PyTorch would make numbers of this one by broadcasting.
    ("cifar", GUIDE, "outliers_posterior_sigma", torch.ones(1), "sigma has the shape (1,)"),
    ("cifar", GUIDE, "outliers_posterior_sigma", -torch.ones(30), "is negative"),
    ("cifar", GUIDE, "outliers_posterior_loc", torch.full((30,), math.nan), "not finite"),
    ("cifar", INDICES, "filtered_labels", torch.full((9,), 2), "out of"),
    ("cifar", INDICES, "outliers_indices", torch.arange(30), "other outliers than"),
    ("wrn", INDICES, "ellipse_outdices_dict", {}, "two numbers for each of ellipse_outdices"),
    ("wrn", GUIDE, "centers_guide", torch.ones(2, 2), "out of bounds"),
    ("wrn", REST, "block1.layer.0.bn2.weight", None, "no published network"),
    ("cifar", REST, "conv2_x.0.residual_function.3.bias", None, "layer1.0.conv2.bias"),
    ("cifar", REST, "fc.bias", torch.zeros(3), "3 classes"),
    ("cifar", REST, "fc.bias", torch.full((4,), math.nan), "head.bias is not finite"),
    ("wrn", REST, "bn1.running_var", -torch.ones(8), "bn1.running_var is negative")])
def test_a_published_file_that_does_not_fit_is_refused(layout, part, name, value, said, tmp_path):
    """Before its weights are drawn, and without a directory."""
    state, _ = published_file(layout, tmp_path / "file.pth")
    state[part][name] = value
    if value is None:
        del state[part][name]
    torch.save(state, tmp_path / "file.pth")
    text = refusal(load, tmp_path / "file.pth", tmp_path, "--dataset", own_folder(tmp_path))
    assert said in text and "file.pth" in text and not (tmp_path / "gbnn2d").exists()


def test_published_stages_start_ours(tmp_path, monkeypatch):
    """Stage 0 replaces the first stage; stage 1 the second one, too, with its own sigma."""
    plain = published_net("wrn")
    with_biases = published_net("wrn")
    state = {}
    biases = {}
    for name, tensor in plain.state_dict().items():
        layer = name.rpartition(".")[0]
        if name in gbnn2d.weight_shapes(plain):
            bias = biases[f"{layer}.bias"] = 0.1 * torch.randn(len(tensor))
            state |= {f"{layer}.weight_mu": tensor, f"{layer}.prior_mu": tensor,
                      f"{layer}.weight_sigma": 0.01 * torch.randn_like(tensor),
                      f"{layer}.bias_mu": bias, f"{layer}.bias_sigma": torch.zeros(len(tensor))}
            with_biases.get_submodule(layer).bias = nn.Parameter(bias)
        elif name != "fc.bias":
            state[name] = tensor
    state["fc.prior_bias_mu"] = state["fc.bias_mu"]
    with_biases.load_state_dict(plain.state_dict() | biases)
    torch.save({"epoch": 9, "state_dict": plain.state_dict()}, tmp_path / "stage0.pth")
    torch.save({"epoch": 1, "net": state, "grad": {}}, tmp_path / "stage1.pth")
    argv = ["--dataset", own_folder(tmp_path), *"-net wrn -b 12 --ood --mc 1 --k0 4 --tau-w 9 "
            "--limit-steps 1 --final-epochs 1 --workers 0 --no-plot".split(),
            "--out-dir", str(tmp_path), *CPU]
    monkeypatch.setattr(gbnn2d, "compress", Mock(wraps=gbnn2d.compress))
    x = torch.randn(2, 3, 32, 32)
    for stage, published in enumerate((plain, with_biases)):
        path = tmp_path / f"stage{stage}.pth"
        args = gbnn2d.parse_args([*argv, "--weights", str(path)])
        assert (args.epochs, args.stoch_epochs == 0) == (0, stage == 1)
        assert gbnn2d.load_splits(args).train.std == pytest.approx((0.24706, 0.24353, 0.26157))
        net = gbnn2d.make_network(args, 4, (3, 32, 32)).eval()
        torch.testing.assert_close(net(x), published(x))
        rows = by_method(run([*argv, "--weights", path, "--name", f"stage{stage}"]))
        assert list(rows) == METHODS
        skipped = ("deterministic", "mean-field")[stage]
        assert not (tmp_path / f"gbnn2d/stage{stage}/seed1-{skipped}.pt").exists()
    rho = torch.cat([state[f"{name}_sigma"].flatten() for name in gbnn2d.weight_shapes(plain)])
    sigma = torch.log(0.0003 + rho.exp())
    assert (sigma < 0).any()  # a Gaussian all the same
    clustered = gbnn2d.compress.call_args.args[1]
    np.testing.assert_allclose(clustered, sigma.abs(), rtol=1e-3, atol=1e-7)
    # The compressed file needs the published one no more.
    path.rename(tmp_path / "moved.pth")
    again = load_compressed(tmp_path, "stage1", "--mc", 1)
    assert again["nll"] == pytest.approx(rows["final"]["nll"], rel=1e-5)
    (tmp_path / "moved.pth").rename(path)
    assert "--epochs has no" in refusal(run, [*argv, "--weights", path, "--epochs", "1"])
    assert "--model wide_resnet" in refusal(run, [*argv, "--weights", path, "--model", "resnet18"])
    del state["fc.weight_sigma"]  # refused before a network is trained or a directory made
    torch.save({"net": state}, path)
    text = refusal(run, [*argv, "--weights", path, "--name", "part"])
    assert "head.weight" in text and not (tmp_path / "gbnn2d" / "part").exists()


# ---- Runs ---------------------------------------------------------------------------------------

METHODS = ["deterministic", "mean-field", "clustered", "merged", "final"]


def options(folder, *more):
    """All stages in a second: LeNet, a few steps a stage."""
    return ["--dataset", "glyphs", "--model", "lenet", "--width", "1", "--epochs", "2",
            "--stoch-epochs", "1", "--final-epochs", "2", "--limit-steps", "5", "-b", "32",
            "--k0", "40", "--mc", "2", "--lr-final", "0.05", *CPU, "--no-plot", "--out-dir",
            str(folder), "--name", "run", *map(str, more)]


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "ms"} for row in rows]


def by_method(rows):
    return {row["method"]: row for row in rows if "nll" in row}


# Enough for the last stage to learn.
LONGER = ("--epochs 4 --final-epochs 10 --limit-steps 20 --tau-d 2e-2 --lr-rho 1e-3 "
          "--mc 4").split()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """(folder, rows) of a whole run."""
    folder = tmp_path_factory.mktemp("story")
    rows = run(options(folder, *LONGER, "--plot", "--predict", "glyphs"))
    return folder, rows


def test_the_story_leaves_its_rows_and_files(story):
    folder, rows = story
    root = folder / "gbnn2d" / "run"
    found = by_method(rows)
    final = found["final"]
    names = {path.name for path in root.iterdir()}
    assert {"options.json", "results.csv", "seed1-mixture.pt", "seed1-mean-field.pt"} <= names
    results = json.loads((root / "results.json").read_text())
    assert results["rows"] == rows and list(found) == METHODS
    for name, row in found.items():
        assert {"accuracy", "ece15", "brier", "nll_logits", "bytes", "ms"} <= set(row)
        assert ("accuracy_mode" in row) == (name != "deterministic")  # one network has no mode
        assert row["n"] == 200 and row["set"] == "glyphs"
    against = [row for row in rows if row.get("against") == "glyphs_letters"]
    assert ["auroc_total" in row for row in against] == [True] * 5
    assert ["auroc_epistemic" in row for row in against] == [False] + [True] * 4
    # What the published trainer cannot: the loss of the shared network falls.
    state = state_of(folder, "run", "final")
    assert final["nll"] < found["merged"]["nll"], rows
    assert state["history"][-1]["loss"] < 0.97 * state["history"][0]["loss"], state["history"]
    assert state["net"]["posterior.shift"].abs().max() > 1e-3
    assert final["gaussians"] < found["clustered"]["gaussians"] and final["weights"] == 44_190
    # bytes of all tensors; the file is a little larger
    assert final["bytes_vs_mean_field"] == final["bytes"] / found["mean-field"]["bytes"]
    size = (root / "seed1-compressed.pt").stat().st_size
    assert final["bytes"] < size == final["file_bytes"] < 1.1 * final["bytes"]
    assert {"ellipse_points", "bytes", "file_bytes"} <= {*results["columns"]}
    table = np.genfromtxt(root / "predictions.csv", delimiter=",", names=True)
    assert len(table) == 200 and (table["aleatoric"] > table["epistemic"]).all()
    np.testing.assert_allclose(table["aleatoric"] + table["epistemic"], table["total"], rtol=1e-4)
    for ending, name in (("", "final"), ("_deterministic", "deterministic")):
        right = table[f"predicted{ending}"] == table["label"]
        assert right.mean() == pytest.approx(found[name]["accuracy"])
    for picture in ("plane.png", "training.png"):
        with Image.open(root / picture) as image:
            assert image.width > 500 and len(image.convert("RGB").getcolors(10**6)) > 99


def test_eval_and_load_repeat_the_story(story, tmp_path, capsys):
    """Other files of one name have directories of their own."""
    folder, rows = story
    assert timeless(run(options(folder, *LONGER, "--eval"))) == timeless(rows)
    path = folder / "gbnn2d" / "run" / "seed1-compressed.pt"
    loaded, _ = load(path, tmp_path, "--mc", 4, "--predict", "glyphs_letters")
    final = by_method(rows)["final"]
    assert loaded["accuracy"] == final["accuracy"] and loaded["bytes"] == final["bytes"]
    assert loaded["nll"] == pytest.approx(final["nll"], abs=1e-6)
    [first] = (tmp_path / "gbnn2d").iterdir()
    results = json.loads((first / "results.json").read_text())
    config = {"model": "lenet", "width": 1, "k0": 40, "limit_steps": 20}  # the file's
    assert config.items() <= results["config"].items()
    assert (first / "predictions.csv").exists()
    state = torch.load(path, weights_only=True)
    state["rest"]["backbone.0.bias"] += 1
    (tmp_path / "other").mkdir()
    torch.save(state, tmp_path / "other" / path.name)
    load(tmp_path / "other" / path.name, tmp_path, "--mc", 1)
    assert "trained on" not in capsys.readouterr().out
    load(path, tmp_path, *"--dataset dirty_glyphs --preset glyphs --ood --mc 1".split())
    assert "this network was trained on glyphs" in capsys.readouterr().out
    assert len(list((tmp_path / "gbnn2d").iterdir())) == 3


def test_what_is_no_compressed_file_of_the_story_is_refused(story, tmp_path):
    source = story[0] / "gbnn2d" / "run" / "seed1-compressed.pt"
    whole = torch.load(source, weights_only=True)
    weights = whole["weights"]
    path = tmp_path / "other.pt"
    for changed, said in (
            ({"format": "other"}, "no compressed network of this"), ({"weights": {}}, "label"),
            ({"rest": {}}, "backbone.0.bias"), ({"classes": ["a"]}, "those of --dataset glyphs"),
            ({"weights": weights | {"label": weights["label"][:-1]}}, "44189 weights"),
            ({"weights": weights | {"label": weights["label"] + 40}}, "label has a number")):
        torch.save(whole | changed, path)
        text = refusal(load, path, tmp_path)
        assert "other.pt" in text and said in text
    path.write_bytes(source.read_bytes()[:-1000])
    text = refusal(load, path, tmp_path)
    assert "other.pt" in text and "download it again" in text and "--fresh" not in text
    text = refusal(load, source, tmp_path, "--draw", "equal")
    assert "--draw has no effect with --load" in text and [*tmp_path.iterdir()] == [path]


def own_folder(folder, side=32, names="abcd"):
    """--dataset of 4 x 12 noisy greys in train and in test, made below `folder`."""
    rng = np.random.default_rng(0)
    for split, k in itertools.product(("train", "test"), range(4)):
        place = folder / "own" / split / names[k]
        place.mkdir(parents=True)
        images = rng.integers(60 * k, 60 * k + 60, (12, side, side, 3), np.uint8)
        for i, image in enumerate(images):
            Image.fromarray(image).save(place / f"{i}.png")
    return f"folder:{folder / 'own'}"


def state_of(folder, name, stage):
    return torch.load(folder / "gbnn2d" / name / f"seed1-{stage}.pt", weights_only=True)


def test_two_processes_equal_one_and_a_killed_run_ends_bit_equal(tmp_path):
    """In float64; and batch norm's statistics stay as the first stage left them."""
    more = "--model resnet18 --width 0.02 -b 30 --ood --mc 1 --epochs 1 --final-epochs 4"
    argv = options(tmp_path, "--dataset", own_folder(tmp_path), "--workers", "0", *more.split())
    work = (run_gbnn2d_in_float64, *argv, "--name")
    killed = Child(tmp_path, *work, "killed", rank=7)
    wait_for((tmp_path / "gbnn2d/killed/seed1-final.pt").exists)
    killed.process.kill()
    assert killed.wait().status == -9 and len(state_of(tmp_path, "killed", "final")["history"]) < 4
    for child in (Child(tmp_path, *work, "killed", rank=8), Child(tmp_path, *work, "one", rank=9),
                  *start_ranks(tmp_path, 2, *work, "two")):
        assert child.wait().status == 0, child.stderr
    det = state_of(tmp_path, "one", "deterministic")["net"]
    for stage in ("deterministic", "mean-field", "final"):
        one, two, again = (state_of(tmp_path, n, stage)["net"] for n in ("one", "two", "killed"))
        for key, value in one.items():
            assert torch.equal(value, again[key]), (stage, key)
            torch.testing.assert_close(value, two[key], rtol=1e-7, atol=1e-7)
            if "running" in key:
                assert torch.equal(value, det[key.removeprefix("net.")]) and value.any()
    rows = [json.loads((tmp_path / f"gbnn2d/{n}/results.json").read_text())["rows"]
            for n in ("one", "killed", "two")]
    assert timeless(rows[0]) == timeless(rows[1])
    for one, two in zip(rows[0], rows[2]):
        assert one["method"] == two["method"]
        assert one.get("nll") == pytest.approx(two.get("nll"), rel=1e-6)


def test_options(tmp_path):
    more = ("--stoch-epochs 0 --final-epochs 0 --runs 2 --draw equal --grad-frac 0 --amp bf16 "
            "--predict glyphs --ood --mc 1")
    argv = options(tmp_path, *more.split())
    at = argv.index("--lr-final")  # without effect
    rows = run(argv[:at] + argv[at + 2:])
    assert all(math.isfinite(row["nll"]) and "accuracy_mode" not in row for row in rows)
    assert [row["seed"] for row in rows] == [1] * 5 + [2] * 5
    # Predictions are those of the first run; one draw has no epistemic part.
    table = np.genfromtxt(tmp_path / "gbnn2d/run/predictions.csv", delimiter=",", names=True)
    assert (table["label"] == table["predicted"]).mean() == rows[4]["accuracy"]
    assert np.isnan(table["epistemic"]).all()


def test_published_flags_and_presets():
    args = gbnn2d.parse_args("-net wrn -dataset cifar10 --lr 0.2 -b 64".split())
    assert (args.model, args.dataset, args.lr) == ("wide_resnet", "cifar10", 0.2)
    assert args.augment and args.mc == 60
    published = dict(model="resnet18", width=1, tau_w=0.2, grad_frac=0.01, tau_d=3.873e-4, mc=40,
                     epochs=200, batch_size=128, lr=0.1, k0=6000, stoch_kl=0.1, draw="hier")
    assert published.items() <= vars(gbnn2d.parse_args(["--dataset", "cifar100"])).items()


@pytest.mark.parametrize("argv, said", [
    ("--tau-w 0", "--tau-w"), ("--tau-d nan", "--tau-d"), ("--k0 9000", "--k0"),
    ("--compile", "--compile"), ("--model nothing", "--model"), ("--weights DEFAULT", "DEFAULT"),
    ("--image-size 16", "--image-size"), ("--freeze", "--freeze has no effect"),
    ("--final-epochs 0", "--lr-final"), ("--stoch-epochs 0 --lr-rho 1", "--lr-rho")])
def test_misuse_is_one_line_before_anything_is_trained(tmp_path, argv, said):
    assert said in refusal(run, options(tmp_path, *argv.split()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", ["--lr 1e6 --epochs 1", "--lr-rho 1e30", "--lr-final 1e20"])
def test_divergence_is_one_line(tmp_path, argv):
    text = refusal(run, options(tmp_path, "--ood", "--limit-steps", "2", *argv.split()))
    assert "diverged" in text and "learning rate" in text


def test_a_replaced_image_is_noticed(tmp_path):
    """The checkpoints were made from other training images, of equal names and number."""
    argv = options(tmp_path, "--dataset", own_folder(tmp_path, 28), "--preset", "glyphs",
                   "--image-size", "28", "-b", "12", "--ood", "--limit-steps", "1", "--mc", "1")
    run(argv)
    Image.new("RGB", (28, 28)).save(tmp_path / "own/train/a/0.png")
    assert "another training data" in refusal(gbnn2d.main, argv)


def pretrained_options(folder, *more):
    """(path, options): the weights of a small network with 6 classes, to be fine-tuned."""
    net = torchvision.models.shufflenet_v2_x0_5(weights=None, num_classes=6)
    path = folder / "net.pt"
    torch.save(net.state_dict(), path)
    return path, ["--dataset", own_folder(folder), "--model", "torchvision/shufflenet_v2_x0_5",
                  "--out-dir", folder, *CPU, *"--image-size 32 --ood --mc 2 --epochs 1 --workers 0 "
                  "--stoch-epochs 1 --final-epochs 1 --no-plot".split(), *more]


def test_pretrained_networks(tmp_path, capsys, monkeypatch):
    """A state dict with other classes is fine-tuned whole; with --freeze, its head alone is."""
    monkeypatch.setitem(gbnn2d.PRESETS["--freeze"], "k0", 200)  # more than 4,096 weights allow
    path, argv = pretrained_options(tmp_path, "--tau-w", 9)
    argv += ["--weights", path]
    whole = [*argv, *"-b 8 --k0 64 --name whole".split()]
    rows = by_method(run([*whole, "--limit-steps", "1"]))
    assert list(rows) == METHODS and rows["final"]["weights"] == 337_936
    assert "bytes" not in capsys.readouterr().out.split("run directory")[0]
    # Later, the file need not be there, and nothing is computed anew.
    path.rename(tmp_path / "moved.pt")
    with monkeypatch.context() as patch:
        patch.setattr(gbnn2d, "compress", None)
        again = by_method(run([*whole, "--eval"]))["final"]
    assert again["nll"] == pytest.approx(rows["final"]["nll"])
    assert load_compressed(tmp_path, "whole")["nll"] == pytest.approx(rows["final"]["nll"])
    (tmp_path / "moved.pt").rename(path)
    argv += ["--freeze"]
    rows = by_method(run([*argv, "--name", "head"]))
    assert list(rows) == METHODS and rows["final"]["weights"] == 4 * 1024
    state = torch.load(path, weights_only=True)
    backbone = sum(tensor.nbytes for name, tensor in state.items() if "fc" not in name)
    assert rows["deterministic"]["bytes"] == 4 * (4 * 1024 + 4) + backbone
    assert "--k0 is 64, not 200" in capsys.readouterr().out
    assert "--k0 200" in refusal(run, [*argv, "--k0", "200", "--name", "other"])
    assert "--augment has no effect" in refusal(run, [*argv, "--augment"])


def load_compressed(folder, name, *more):
    """The row of --load for the file of a run, with the data set that it names."""
    path = folder / "gbnn2d" / name / "seed1-compressed.pt"
    [row] = load(path, folder, "--mc", 2, "--ood", *more)
    assert row["file_bytes"] == path.stat().st_size
    return row


def test_a_loaded_head_has_its_own_normalisation_and_backbone(tmp_path):
    """Features are normalised as in training; another backbone than in training is refused."""
    other = "on the features of another backbone"
    path, argv = pretrained_options(tmp_path, "--freeze", "--limit-train", 8)
    final = by_method(run([*argv, "--weights", path, "--name", "file"]))["final"]
    loaded = load_compressed(tmp_path, "file")
    assert loaded["nll"] == pytest.approx(final["nll"], rel=1e-5)
    assert loaded["bytes"] == final["bytes"]
    net = torchvision.models.shufflenet_v2_x0_5(weights=None, num_classes=6)
    torch.save(net.state_dict(), path)
    assert other in refusal(load_compressed, tmp_path, "file")
    # A random backbone is that of the seed of the file.
    final = by_method(run([*argv, "--weights", "none", "--seed", "3", "--name", "none"]))["final"]
    compressed = tmp_path / "gbnn2d/none"
    (compressed / "seed3-compressed.pt").rename(compressed / "seed1-compressed.pt")
    loaded = load_compressed(tmp_path, "none")
    assert loaded["nll"] == pytest.approx(final["nll"], rel=1e-5) and loaded["seed"] == 3
    assert other in refusal(load_compressed, tmp_path, "none", "--seed", 1)
