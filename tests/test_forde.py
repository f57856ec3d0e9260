"""forde.py: layers against PyTorch's, equations against loops, networks, training, rows, runs."""

import math
from argparse import Namespace
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Child, assert_equal_checkpoints, kill_after, run_ranks, run_script
from scipy import stats
from sklearn import metrics as sk
from torch import nn
from torch.testing import assert_close
from torchvision import models

import common
import data
import forde

double = partial(torch.randn, dtype=torch.float64)
SHAPES = [(8, 3), (8, 3, 4), (4, 3, 4, 5)]  # of batches


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- Layers -------------------------------------------------------------------------------------


def derivatives(layer, x):
    """The output, its first derivatives, and those of a loss that has the gradient by x in it."""
    x = x.detach().requires_grad_()
    wanted = [x, *layer.parameters()]
    y = layer(x)
    first = torch.autograd.grad(y.sin().sum(), wanted, retain_graph=True)
    g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    loss = (g.square() + 3 * g.sin()).sum() + (y * y.cos()).sum()
    second = torch.autograd.grad(loss, wanted)
    return [tensor.detach() for tensor in (y, g, first[0], second[0], *first[1:], *second[1:])]


@pytest.mark.parametrize("options, size", [
    (dict(kernel_size=3, padding=1), (8, 7)), (dict(kernel_size=3, stride=2, padding=1), (8, 7)),
    (dict(kernel_size=7, stride=2, padding=3, bias=False), (9, 10)),
    (dict(kernel_size=(1, 3), stride=(1, 3)), (5, 8)), (dict(kernel_size=1, stride=2), (5, 8)),
    (dict(kernel_size=3, stride=3, padding=(0, 1), groups=2), (8, 9)),
    (dict(kernel_size=3, stride=3, padding=2, dilation=(2, 1), groups=4), (9, 8))])
def test_convolutions_differentiate_twice_as_those_of_pytorch(options, size):
    layer = nn.Conv2d(4, 8, **options).double()
    ours = deepcopy(layer)
    ours.__class__ = forde.Convolution
    x = double(2, 4, *size)
    assert_close(derivatives(ours, x), derivatives(layer, x), rtol=1e-9, atol=1e-11)
    with pytest.raises(RuntimeError, match="not have been used"):  # there is no wrong gradient
        torch.autograd.grad(ours(x).square().sum(), ours.weight, create_graph=True)


def test_hardsigmoid_is_that_of_pytorch():
    x = torch.linspace(-5, 5, 30).requires_grad_()
    values = [layer(x) for layer in (forde.Hardsigmoid(), nn.Hardsigmoid())]
    assert_close(*[(value, *torch.autograd.grad(value.sin().sum(), x)) for value in values])


def batch_norm(shape, is_ours=True):
    torch.manual_seed(5)
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    layer = kind(3, eps=1e-3, momentum=0.2).double()
    layer.weight.data = torch.tensor([1.5, 0, -2]).double()
    layer.bias.data = double(3)
    x = 5 + 3 * double(*shape)
    if is_ours:
        layer.__class__ = forde.BatchNorm
    results = derivatives(layer, x.chunk(common.world_size())[common.rank()])
    return results, [layer.running_mean, layer.running_var], layer.eval()(x[:2]).detach()


def batch_norm_in_two_processes():
    common.start("cpu")
    return [batch_norm(shape) for shape in SHAPES]


def test_batch_norm_differentiates_twice_as_that_of_pytorch_on_the_global_batch(tmp_path):
    main, other = run_ranks(tmp_path, batch_norm_in_two_processes)
    for number, shape in enumerate(SHAPES):
        expected = batch_norm(shape, is_ours=False)
        assert_close(batch_norm(shape), expected, rtol=1e-9, atol=1e-10)
        halves = list(zip(main[number][0], other[number][0], strict=True))
        rows = [torch.cat(pair) for pair in halves[:4]]
        both = rows + [a + b for a, b in halves[4:]]  # of weights and biases
        for found in (main, other):
            assert_close((both, *found[number][1:]), expected, rtol=1e-9, atol=1e-10)


# ---- Method -------------------------------------------------------------------------------------


def plain_repulsion(g, A=None):
    """R by its equations, in loops, of g [M, B, D]."""
    m, size = g.shape[:2]
    s = g / g.norm(dim=2, keepdim=True)
    s = s if A is None else s @ A
    kernels = 0
    for b in range(size):
        for j in range(m):
            d = torch.stack([(s[i, b] - s[j, b].detach()).square().sum() for i in range(m)])
            h = np.median(d.detach()) / math.log(m) + 1e-12
            kernels = kernels + torch.exp(-d / h)                      # [M]
    return (kernels / size).log().sum() / size


def repulsion(g, A=None):
    s = forde.unit_rows(g)
    return forde.repulsion(forde.log_kernel(s if A is None else s @ A))


def with_gradient(function, g, *more):
    g = g.detach().requires_grad_()
    value = function(g, *more)
    return value.detach(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("members, dim, spread", [(2, None, 1), (3, 5, 1), (6, None, 1),
                                                  (4, None, 1e-5)])
def test_repulsion_is_that_of_loops_over_members_and_examples(members, dim, spread):
    g = double(4, 12) + spread * double(members, 4, 12)
    A = None if dim is None else double(12, dim)
    expected = with_gradient(plain_repulsion, g, A)
    assert_close(with_gradient(repulsion, g, A), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_members_that_are_equal_or_zero_are_at_the_maximum_without_a_force(length):
    value, gradient = with_gradient(repulsion, length * double(1, 4, 12).repeat(5, 1, 1))
    assert value.item() == pytest.approx(5 * math.log(5) / 4) and (gradient == 0).all()
    near = forde.unit_rows(double(4, 12) + 5e-4 * double(3, 4, 12))
    distance = forde.pairwise_squared_distances(near.float())  # from products: off by 1e-2
    assert_close(distance, forde.pairwise_squared_distances(near).float(), rtol=1e-3, atol=0)
    # One gradient without length is a constant, and changes no other.
    g = double(4, 3, 12)
    mask = (torch.arange(12).view(4, 3, 1) != 5).double()
    expected = with_gradient(lambda g: repulsion(g * mask), g)
    assert_close(with_gradient(repulsion, g * mask.clamp_min(1e-13 * length)), expected)


@pytest.mark.parametrize("n", [20, 12, 300])
def test_distances_are_along_principal_components(n):
    """A A^T = Lambda in the eigenbasis; tuned: the inverse of alpha / Lambda + 1 - alpha."""
    X = torch.randn(n, 20) * torch.linspace(0.1, 3, 20) + 1
    X[:, 7] = 0  # a pixel that never changes
    M = (X.double().T @ X.double() / (n - 1)).numpy()
    u = forde.unit_rows(double(50, 20))
    values, vectors = np.linalg.eigh(M)
    for alpha in (None, 1.0, 0.4, 0.0):
        A = forde.pca_root(X) if alpha is None else forde.tuned_root(X, alpha)
        precision = M
        if alpha not in (None, 1.0):  # with 0, also directions without variance count
            inverse = alpha / values.clip(1e-30) + 1 - alpha
            precision = (vectors / inverse) @ vectors.T
        expected = np.einsum("np,pq,nq->n", u, precision, u)
        assert_close((u.float() @ A).square().sum(1), torch.tensor(expected).float(), rtol=1e-5,
                     atol=1e-5)


def options(more=""):
    return forde.parse_args(f"--width .1 --hidden 60 70 --members 3 --device cpu {more}".split())


def make_nets():
    """Three members whose heads and batch norms are not those of the first step; PyTorch's."""
    nets = forde.make_ensemble(options(), 1, 3, (3, 8, 8))
    for parameter in nets.parameters():
        if parameter.ndim == 1 or len(parameter) == 3:
            parameter.data += 0.5 * torch.randn_like(parameter)
    plain = deepcopy(nets)
    for layer in plain.modules():
        if isinstance(layer, forde.BatchNorm):
            layer.__class__ = nn.BatchNorm1d
    return nets, plain


def test_input_gradients_are_sums_over_the_jacobian_of_true_logits():
    net, plain = [nets[0].double() for nets in make_nets()]
    x = double(5, 3, 8, 8)
    y = torch.arange(5) % 3
    jacobian = torch.autograd.functional.jacobian(plain, x)            # [B, K, B, C, H, W]
    expected = plain(x), jacobian[torch.arange(5), y].sum(0).flatten(1)
    assert_close(forde.input_gradient(net, x, y), expected)


# ---- Networks, training, rows -------------------------------------------------------------------


def plain_conv(x, weight, stride=1):
    """Padded as JAX does: ceil(n / stride) outputs, the odd zero at the end."""
    k = weight.shape[-1]
    pads = []
    for n in reversed(x.shape[2:]):  # F.pad begins with the last axis
        zeros = max((math.ceil(n / stride) - 1) * stride + k - n, 0)
        pads += [zeros // 2, zeros - zeros // 2]
    return F.conv2d(F.pad(x, pads), weight, None, stride)


@pytest.mark.parametrize("size", [(8, 8), (9, 6)])
@pytest.mark.parametrize("c_out, stride", [(5, 2), (3, 1)])
def test_blocks_are_padded_and_ordered_as_published(size, c_out, stride):
    x = torch.randn(4, 3, *size)
    norm = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    block = forde.BasicBlock(3, c_out, stride)
    first, second, *last = [p for p in block.parameters() if p.ndim == 4]
    h = norm(plain_conv(norm(plain_conv(x, first, stride)).relu(), second))
    shortcut = norm(plain_conv(x, last[0], stride)) if last else x
    assert_close(block(x), (h + shortcut).relu())
    block = forde.PreActivationBlock(3, c_out, stride)
    first, second, *last = [p for p in block.parameters() if p.ndim == 4]
    start = norm(x).relu()
    h = plain_conv(norm(plain_conv(start, first, stride)).relu(), second)
    assert_close(block(x), h + (plain_conv(start, last[0], stride) if last else x))


def test_networks_start_as_published_each_from_weights_of_its_own(tmp_path):
    args = options("--model resnet9 --width .5")
    nets = forde.make_ensemble(args, 1, 10, (3, 32, 32))
    assert not torch.equal(nets[0].backbone[0].weight, nets[1].backbone[0].weight)
    for name, p in nets[0].named_parameters():
        unit = p * p[0].numel() ** 0.5
        if p.ndim == 1 or name.startswith("head"):
            assert (p == (p.ndim == 1 and name.endswith("weight"))).all(), name
        elif p.numel() > 30_000:  # cut at two standard deviations
            assert 1.99 < unit.abs().max() <= 2.0001 and abs(unit.std() - 0.8796) < 0.012
    nn.init.ones_(nets[0].head.weight)
    torch.save(nets[0].state_dict(), tmp_path / "file.pt")
    for epochs in (0, 1):  # members that start from one file differ by new heads
        argv = f"--model resnet9 --width .5 --weights {tmp_path}/file.pt --epochs {epochs}"
        head = forde.make_network(options(argv), 10, (3, 32, 32)).head
        assert (head.weight == 1).all().item() == (epochs == 0)
    args.width = 1
    for args.model, classes, size in (("resnet18", 100, 11_220_132), ("wrn_16_4", 10, 2_748_890),
                                      ("preact_resnet18", 200, 11_269_640)):
        with torch.device("meta"):
            net = forde.make_network(args, classes, (3, 32, 32))
        assert sum(parameter.numel() for parameter in net.parameters()) == size


def test_published_learning_rates_are_constant_within_an_epoch():
    args = options("--schedule published --lr .1")
    for epoch, lr in ((150, .1), (151, .099175), (210, .0505), (269, .001825), (299, .001)):
        assert forde.learning_rate(390 * epoch + 389, 390, 300, args) == pytest.approx(lr)


def tiny_set(n, name="tiny"):
    images = torch.randint(256, (n, 3, 8, 8), dtype=torch.uint8)
    return data.ImageSet(name, images, torch.arange(n) % 3, 3, (0.5,) * 3, (0.3,) * 3)


@pytest.mark.parametrize("method", forde.METHODS)
def test_training_is_that_of_a_plain_loop(method):
    args = options("--batch-size 8 --epochs 2 --alpha .3 --augment --lr .1")
    train_set = tiny_set(20)
    nets, plain = make_nets()
    for net in (*nets, *plain):
        net.backbone.append(nn.Dropout(0.3))
    rows = []
    run = Namespace(resume=lambda *_, **__: rows, save=lambda *_, **__: None)
    forde.train(nets, train_set, method, args, 7, run, "name")
    X = ((train_set.images / 255 - 0.5) / 0.3).flatten(1).double()
    values, A = torch.linalg.eigh(X.T @ X / 19)
    alpha = {"forde_pca": 1, "forde_tuned": 0.3}.get(method, 0)
    A = A * (1 / (alpha / values.clamp_min(1e-30) + 1 - alpha)).sqrt()
    optimiser = torch.optim.SGD(plain.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = data.Loader(train_set, 8, seed=7, shuffle=True, drop_last=True, augment="crop_flip")
    steps = [*loader.epoch(0), *loader.epoch(1)]
    losses = []
    for number, (batch, factor) in enumerate(zip(steps, (1 / 1.8, 3 / 3.2, 2 / 3.2, 1 / 3.2)), 1):
        if number % 2 == 1:  # an epoch has two steps
            common.seed_all(7, number // 2, 0)
        optimiser.param_groups[0]["lr"] = 0.1 * factor
        for layer in plain.modules():
            layer.momentum = 0.1 / (1 - 0.9**number)
        logits, g = zip(*[forde.input_gradient(net, *batch[:2]) for net in plain])
        cross_entropy = sum(F.cross_entropy(f, batch.labels) for f in logits)
        R = plain_repulsion(torch.stack(g).double(), A) * (method != "deep_ensemble")
        losses.append([cross_entropy.item() / 3, R.item()])
        optimiser.zero_grad()
        (cross_entropy + R).backward()
        optimiser.step()
    for row, of_epoch in zip(rows, (losses[:2], losses[2:]), strict=True):
        assert [row["cross_entropy"], row["repulsion"]] == pytest.approx(np.mean(of_epoch, 0), rel=1e-4)
    states = [[value for name, value in own.state_dict().items() if "num" not in name]
              for own in (nets, plain)]
    assert_close(*states, rtol=1e-3, atol=1e-4)


def test_rows_are_those_of_scikit_learn(monkeypatch):
    test, other, *sets = [tiny_set(30, "tiny"), tiny_set(20, "other"), *map(tiny_set, 4 * [30])]
    copies = [data.Corruption("tiny_c", "a", 1 + k // 2, own) for k, own in enumerate(sets)]
    monkeypatch.setattr(data, "corrupted_sets", lambda *_: copies)
    splits = data.Splits(None, None, test, [other], None)
    nets, _ = make_nets()
    monkeypatch.setattr(forde, "make_ensemble", lambda *_: nets)
    monkeypatch.setattr(forde, "train", lambda *_: None)
    splits = splits._replace(train=test)
    all_rows, severities = forde.run_seed(splits, options("--methods forde_pca"), 5, None)
    row, pair, mean = all_rows
    pairs = [(0, 1), (0, 2), (1, 2)]
    scores = []
    expected = []
    for own in (test, other, *sets):
        x = ((own.images / 255 - 0.5) / 0.3).requires_grad_()
        logits = [net.eval()(x) for net in nets]
        g = [torch.autograd.grad(z[range(len(x)), own.labels].sum(), x)[0] for z in logits]
        cosines = [F.cosine_similarity(g[i].flatten(1), g[j].flatten(1)) for i, j in pairs]
        p = torch.stack(logits).detach().double().softmax(2).numpy()
        scores.append(stats.entropy(p.mean(0), axis=1) - stats.entropy(p, axis=2).mean(0))
        expected.append({
            "nll": sk.log_loss(own.labels, p.mean(0), labels=range(3)),
            "disagreement": np.mean([p[i].argmax(1) != p[j].argmax(1) for i, j in pairs]),
            "epistemic_mean": scores[-1].mean(),
            "gradient_distance": 1 - torch.stack(cosines).mean().item()})
    assert {name: row[name] for name in expected[0]} == pytest.approx(expected[0], rel=1e-4)
    auroc = sk.roc_auc_score(np.arange(50) >= 30, np.concatenate(scores[:2]))
    assert pair["auroc_epistemic"] == pytest.approx(auroc, abs=0.01) and pair["against"] == "other"
    assert severities[0] is row
    rows = severities[1:] + [mean]
    for found, of in zip(rows, (expected[2:4], expected[4:], expected[2:]), strict=True):
        for name in expected[0]:
            assert found[name] == pytest.approx(np.mean([v[name] for v in of]), rel=1e-4)
        assert (found["set"], found["n"]) == ("tiny_c", 30 * len(of))


# ---- Runs ---------------------------------------------------------------------------------------


def command(images, out, more=""):
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --image-size 8 --width .05 "
            f"--members 2 --epochs 2 --batch-size 12 --workers 0 --name run --out-dir {out} "
            f"--methods deep_ensemble forde_pca {more}").split()


@pytest.fixture(scope="module")
def story(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("story")
    more = f"--shift computed --predict folder:{image_folder}/test --runs 2 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CORRUPTIONS", dict(list(data.CORRUPTIONS.items())[:2]))
        rows = forde.main(command(image_folder, out, more))  # with a picture
        again = run_script("forde", *command(image_folder, out, "--eval"))
    return rows, again, out / "forde" / "run"


def test_a_story_has_differences_of_equal_seeds_and_eval_repeats_it(story):
    rows, again, root = story
    assert again == rows and (root / "shift.png").stat().st_size > 10_000
    assert len(rows) == 2 * 3 * 3  # seeds; methods and their difference; test, OOD, shift
    keys = [(*row["seeds"], row["set"], row.get("against")) for row in rows]
    for row, key in zip(rows[12:], keys[12:], strict=True):
        baseline, own = [other for other, its_key in zip(rows[:12], keys) if its_key == key]
        assert row["method"] == "FoRDE-PCA - deep ensemble"
        for name in {"nll", "gradient_distance", "auroc_epistemic"} & own.keys():
            assert row[name] == own[name] - baseline[name]
    table = np.genfromtxt(root / "predictions.csv", delimiter=",", names=True, dtype=None)
    columns = ["predicted", "confidence", "total", "aleatoric", "epistemic"]
    assert list(table.dtype.names)[2:] == columns + [f"{name}_deep_ensemble" for name in columns]
    for column, row in (("predicted_deep_ensemble", rows[0]), ("predicted", rows[3])):
        assert (table["label"] == table[column]).mean() == row["accuracy"]


def test_a_run_that_is_killed_ends_with_equal_weights(story, image_folder, tmp_path):
    argv = command(image_folder, tmp_path)
    killed = tmp_path / "forde" / "run" / "forde_pca-seed1.pt"
    kill_after(Child(tmp_path, run_script, "forde", *argv), killed)
    run_script("forde", *argv)
    assert_equal_checkpoints(killed, story[2] / "forde_pca-seed1.pt")


def test_two_processes_train_and_evaluate_as_one(story, image_folder, tmp_path):
    """Batch norm and R are those of the global batch."""
    rows, _ = run_ranks(tmp_path, run_script, "forde", *command(image_folder, tmp_path))
    files = [root / "forde_pca-seed1.pt" for root in (tmp_path / "forde" / "run", story[2])]
    assert_close(*[common.load(file)["net"] for file in files], rtol=1e-3, atol=1e-4)
    for row, one in zip(rows[:2], story[0][:2]):
        for name in {"nll", "gradient_distance", "auroc_total"} & row.keys():
            assert row[name] == pytest.approx(one[name], rel=1e-3)


@pytest.mark.parametrize("model", ["torchvision/mobilenet_v3_small", "attention"])
def test_networks_of_torchvision_and_of_ones_own(model, image_folder, tmp_path, monkeypatch):
    def attention(args, shape):
        same = nn.Conv2d(3, 3, 3, padding="same")  # which stays PyTorch's
        return [same, models.VisionTransformer(8, 4, 2, 2, 24, 48, num_classes=24)], 24
    monkeypatch.setitem(forde.NETWORKS, "attention", attention)
    argv = command(image_folder, tmp_path, f"--model {model} --weights none --amp --epochs 1 "
                   "--methods forde_pca --batch-size 8 --image-size")
    rows = run_script("forde", *argv, 8 if model == "attention" else 32)
    [row] = common.load(tmp_path / "forde" / "run" / "forde_pca-seed1.pt")["history"]
    assert 2 * math.log(1.25) - 1e-4 < 8 * row["repulsion"] < 2 * math.log(2)
    assert math.isfinite(rows[0]["nll"]) and rows[0]["gradient_distance"] > 0
