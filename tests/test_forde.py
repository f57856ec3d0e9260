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

randn64 = partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- Layers -------------------------------------------------------------------------------------


def output_and_derivatives(layer, x):
    """The output, its first derivatives, and those of a loss that has the gradient by x in it.

    Tensors with a row for each example come first, then those of the parameters.
    """
    x = x.detach().requires_grad_()
    variables = [x, *layer.parameters()]
    y = layer(x)
    first = torch.autograd.grad(y.sin().sum(), variables, retain_graph=True)
    g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    loss = (g.square() + 3 * g.sin()).sum() + (y * y.cos()).sum()
    second = torch.autograd.grad(loss, variables)
    tensors = [y, g, first[0], second[0], *first[1:], *second[1:]]
    return [tensor.detach() for tensor in tensors]


CONVOLUTIONS = [
    ((8, 7), dict(kernel_size=3, padding=1)),
    ((8, 7), dict(kernel_size=3, padding=1, stride=2)),
    ((9, 10), dict(kernel_size=7, padding=3, stride=2, bias=False)),
    ((5, 8), dict(kernel_size=(1, 3), stride=(1, 3))),
    ((5, 8), dict(kernel_size=1, stride=2)),
    ((8, 9), dict(kernel_size=3, padding=(0, 1), stride=3, groups=2)),
    ((9, 8), dict(kernel_size=3, padding=2, stride=3, dilation=(2, 1), groups=4)),
]


@pytest.mark.parametrize("size, options", CONVOLUTIONS)
def test_convolutions_differentiate_twice_as_those_of_pytorch(size, options):
    layer = nn.Conv2d(4, 8, **options).double()
    ours = deepcopy(layer)
    forde.make_twice_differentiable(ours)
    assert type(ours) is forde.Convolution
    x = randn64(2, 4, *size)
    expected = output_and_derivatives(layer, x)
    assert_close(output_and_derivatives(ours, x), expected, rtol=1e-9, atol=1e-11)


def test_gradients_by_weights_with_create_graph_raise_instead_of_being_wrong():
    layer = nn.Conv2d(4, 8, 3)
    forde.make_twice_differentiable(layer)
    loss = layer(torch.randn(2, 4, 5, 5)).square().sum()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, layer.weight, create_graph=True)


def test_hardsigmoid_is_that_of_pytorch():
    x = torch.linspace(-5, 5, 30).requires_grad_()
    ours = forde.Hardsigmoid()(x)
    expected = nn.Hardsigmoid()(x)
    assert_close(ours, expected)
    gradients = [torch.autograd.grad(y.sin().sum(), x) for y in (ours, expected)]
    assert_close(*gradients)


BATCH_SHAPES = [(8, 3), (8, 3, 4), (4, 3, 4, 5)]


def batch_norm_results(shape, is_ours=True):
    """Derivatives, running statistics and the output in eval mode, for this process's examples."""
    torch.manual_seed(5)
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    layer = kind(3, eps=1e-3, momentum=0.2).double()
    layer.weight.data = torch.tensor([1.5, 0, -2]).double()
    layer.bias.data = randn64(3)
    x = 5 + 3 * randn64(*shape)
    if is_ours:
        forde.make_twice_differentiable(layer)
    piece = x.chunk(common.world_size())[common.rank()]
    derivatives = output_and_derivatives(layer, piece)
    running = [layer.running_mean, layer.running_var]
    return derivatives, running, layer.eval()(x[:2]).detach()


def batch_norm_in_two_processes():
    common.start("cpu")
    return [batch_norm_results(shape) for shape in BATCH_SHAPES]


@pytest.mark.parametrize("shape", BATCH_SHAPES)
def test_batch_norm_differentiates_twice_as_that_of_pytorch(shape):
    expected = batch_norm_results(shape, is_ours=False)
    assert_close(batch_norm_results(shape), expected, rtol=1e-9, atol=1e-10)


def test_batch_norm_of_two_processes_is_that_of_the_global_batch(tmp_path):
    results = run_ranks(tmp_path, batch_norm_in_two_processes)
    for shape, main, other in zip(BATCH_SHAPES, *results, strict=True):
        pairs = list(zip(main[0], other[0], strict=True))
        derivatives = [torch.cat(pair) for pair in pairs[:4]]          # a row for each example
        derivatives += [first + second for first, second in pairs[4:]]
        expected = batch_norm_results(shape, is_ours=False)
        for _, running, evaluated in (main, other):
            found = (derivatives, running, evaluated)
            assert_close(found, expected, rtol=1e-9, atol=1e-10)


# ---- Method -------------------------------------------------------------------------------------


def repulsion_by_loops(g, A=None):
    """R by its equations, of g [M, B, D]."""
    members, batch = g.shape[:2]
    s = g / g.norm(dim=2, keepdim=True)
    if A is not None:
        s = s @ A
    kernel_sums = 0
    for b in range(batch):
        for j in range(members):
            distances = [(s[i, b] - s[j, b].detach()).square().sum() for i in range(members)]
            distance = torch.stack(distances)                          # [M]
            bandwidth = np.median(distance.detach()) / math.log(members) + 1e-12
            kernel_sums = kernel_sums + torch.exp(-distance / bandwidth)
    return (kernel_sums / batch).log().sum() / batch


def repulsion(g, A=None):
    s = forde.unit_rows(g)
    if A is not None:
        s = s @ A
    return forde.repulsion(forde.log_kernel(s))


def value_and_gradient(function, g, *more):
    g = g.detach().requires_grad_()
    value = function(g, *more)
    return value.detach(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("members, dim, spread", [(2, None, 1), (3, 5, 1), (6, None, 1),
                                                  (4, None, 1e-5)])
def test_repulsion_is_that_of_loops_over_members_and_examples(members, dim, spread):
    g = randn64(4, 12) + spread * randn64(members, 4, 12)
    A = None if dim is None else randn64(12, dim)
    expected = value_and_gradient(repulsion_by_loops, g, A)
    assert_close(value_and_gradient(repulsion, g, A), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_members_that_are_equal_or_zero_are_at_the_maximum_without_a_force(length):
    g = length * randn64(1, 4, 12).repeat(5, 1, 1)
    value, gradient = value_and_gradient(repulsion, g)
    assert value.item() == pytest.approx(5 * math.log(5) / 4)
    assert (gradient == 0).all()


def test_distances_of_nearly_equal_members_are_precise():
    s = forde.unit_rows(randn64(4, 12) + 5e-4 * randn64(3, 4, 12))
    expected = forde.pairwise_squared_distances(s).float()
    # By the products of a Gram matrix they would be off by 1e-2.
    assert_close(forde.pairwise_squared_distances(s.float()), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("length", [0.0, 1e-13])
def test_a_gradient_without_length_is_a_constant_and_changes_no_other(length):
    g = randn64(4, 3, 12)
    is_other = torch.arange(12).view(4, 3, 1) != 5
    expected = value_and_gradient(lambda g: repulsion(g * is_other), g)
    assert_close(value_and_gradient(repulsion, torch.where(is_other, g, length * g)), expected)


@pytest.mark.parametrize("n", [20, 12, 300])
def test_distances_are_along_principal_components(n):
    X = torch.randn(n, 20) * torch.linspace(0.1, 3, 20) + 1
    X[:, 7] = 0  # a pixel that never changes
    M = X.double().T @ X.double() / (n - 1)
    u = forde.unit_rows(randn64(50, 20))
    expected = torch.einsum("np,pq,nq->n", u, M, u).float()
    found = (u.float() @ forde.pca_root(X)).square().sum(1)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


def options(more=""):
    return forde.parse_args(f"--width .1 --hidden 60 70 --members 3 --device cpu {more}".split())


def make_members():
    """Three members whose heads and batch norms are not those of the start; PyTorch's copies."""
    nets = forde.make_ensemble(options(), 1, 3, (3, 8, 8))
    for net in nets:
        for parameter in (*net.head.parameters(), *net.backbone.parameters()):
            if parameter.ndim == 1 or parameter is net.head.weight:
                parameter.data += 0.5 * torch.randn_like(parameter)
    copies = deepcopy(nets)
    for layer in copies.modules():
        if isinstance(layer, forde.BatchNorm):
            layer.__class__ = nn.BatchNorm1d
    return nets, copies


def test_input_gradients_are_sums_over_the_jacobian_of_true_logits():
    nets, copies = make_members()
    net = nets[0].double()
    copy = copies[0].double()
    x = randn64(5, 3, 8, 8)
    y = torch.arange(5) % 3
    jacobian = torch.autograd.functional.jacobian(copy, x)             # [B, K, B, C, H, W]
    expected = (copy(x), jacobian[torch.arange(5), y].sum(0).flatten(1))
    assert_close(forde.input_gradient(net, x, y), expected)


def test_a_gradient_of_zero_is_orthogonal_to_all_others():
    g = torch.ones(2, 1, 4)
    g[1] = 0
    assert forde.pairwise_cosines(g).tolist() == [[0]]


# ---- Networks -----------------------------------------------------------------------------------


def conv_padded_as_by_jax(x, weight, stride=1):
    """ceil(n / stride) outputs; an odd number of zeros has the additional one at the end."""
    kernel = weight.shape[-1]
    padding = []
    for n in reversed(x.shape[2:]):  # F.pad begins with the last axis
        zeros = max((math.ceil(n / stride) - 1) * stride + kernel - n, 0)
        padding += [zeros // 2, zeros - zeros // 2]
    return F.conv2d(F.pad(x, padding), weight, None, stride)


def normalise(x):
    return F.batch_norm(x, None, None, training=True)


def conv_weights(block):
    return [parameter for parameter in block.parameters() if parameter.ndim == 4]


BLOCK_SHAPES = pytest.mark.parametrize("c_out, stride, size", [(5, 2, (8, 8)), (5, 2, (9, 6)),
                                                               (3, 1, (8, 8)), (3, 1, (9, 6))])


@BLOCK_SHAPES
def test_blocks_are_padded_and_ordered_as_published(c_out, stride, size):
    x = torch.randn(4, 3, *size)
    block = forde.BasicBlock(3, c_out, stride)
    first, second, *projection = conv_weights(block)
    h = normalise(conv_padded_as_by_jax(x, first, stride)).relu()
    h = normalise(conv_padded_as_by_jax(h, second))
    shortcut = x
    if projection:
        shortcut = normalise(conv_padded_as_by_jax(x, projection[0], stride))
    assert_close(block(x), (h + shortcut).relu())


@BLOCK_SHAPES
def test_pre_activation_blocks_are_padded_and_ordered_as_published(c_out, stride, size):
    x = torch.randn(4, 3, *size)
    block = forde.PreActivationBlock(3, c_out, stride)
    first, second, *projection = conv_weights(block)
    start = normalise(x).relu()
    h = normalise(conv_padded_as_by_jax(start, first, stride)).relu()
    h = conv_padded_as_by_jax(h, second)
    shortcut = x
    if projection:
        shortcut = conv_padded_as_by_jax(start, projection[0], stride)
    assert_close(block(x), h + shortcut)


def test_networks_start_as_published_each_from_weights_of_its_own():
    nets = forde.make_ensemble(options("--model resnet9 --width .5"), 1, 10, (3, 32, 32))
    assert not torch.equal(nets[0].backbone[0].weight, nets[1].backbone[0].weight)
    assert (nets[0].head.weight == 0).all()
    for name, parameter in nets[0].named_parameters():
        if parameter.ndim == 1:
            is_scale = name.endswith("weight")  # of batch norm
            assert (parameter == is_scale).all(), name
        elif parameter.numel() > 30_000:  # cut at two standard deviations
            scaled = parameter * parameter[0].numel() ** 0.5
            assert 1.99 < scaled.abs().max() <= 2.0001
            assert scaled.std().item() == pytest.approx(0.8796, abs=0.012)


@pytest.mark.parametrize("model, classes, size", [("resnet18", 100, 11_220_132),
                                                  ("wrn_16_4", 10, 2_748_890),
                                                  ("preact_resnet18", 200, 11_269_640)])
def test_networks_have_the_published_sizes(model, classes, size):
    args = options(f"--model {model} --width 1")
    with torch.device("meta"):
        layers, dim = forde.NETWORKS[model](args, (3, 32, 32))
        net = forde.Network(nn.Sequential(*layers), nn.Linear(dim, classes))
    assert sum(parameter.numel() for parameter in net.parameters()) == size


def test_heads_compute_in_float32_with_amp():
    args = options("--amp")
    nets, _ = make_members()
    x = torch.randn(50, 3, 8, 8)
    logits = forde.member_logits(nets, x, args)
    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits.
    assert not torch.equal(logits, logits.bfloat16().float())


def test_members_that_start_from_one_file_differ_by_new_heads(tmp_path):
    trained, _ = make_members()
    torch.save(trained[0].state_dict(), tmp_path / "file.pt")
    nets = forde.make_ensemble(options(f"--weights {tmp_path}/file.pt"), 1, 3, (3, 8, 8))
    for net in nets:
        assert_close(net.backbone.state_dict(), trained[0].backbone.state_dict())
    assert not torch.equal(nets[0].head.weight, nets[1].head.weight)


# ---- Options ------------------------------------------------------------------------------------


def test_published_learning_rates_are_constant_within_an_epoch():
    args = options("--schedule published --lr .1")
    published = {150: 0.1, 151: 0.099175, 210: 0.0505, 269: 0.001825, 299: 0.001}
    for epoch, lr in published.items():
        last_step = 390 * epoch + 389
        assert forde.learning_rate(last_step, 390, 300, args) == pytest.approx(lr)


@pytest.mark.parametrize("dataset", ["mnist", "glyphs", "dirty_glyphs"])
def test_digits_are_never_mirrored_by_a_recipe(dataset):
    argv = ["--device", "cpu", "--dataset", dataset]
    assert not forde.parse_args(argv).augment
    assert not forde.parse_args([*argv, "--model", "torchvision/resnet18"]).augment


def test_photographs_are_mirrored_by_the_recipe_of_pretrained_networks():
    argv = ["--device", "cpu", "--dataset", "folder:images", "--model", "torchvision/resnet18"]
    assert forde.parse_args(argv).augment


# ---- Training -----------------------------------------------------------------------------------


def tiny_set(n, name="tiny"):
    images = torch.randint(256, (n, 3, 8, 8), dtype=torch.uint8)
    return data.ImageSet(name, images, torch.arange(n) % 3, 3, (0.5,) * 3, (0.3,) * 3)


def normalised_images(dataset):
    return (dataset.images / 255 - 0.5) / 0.3


def principal_component_root(dataset):
    """A of FoRDE-PCA, from eigenvectors."""
    X = normalised_images(dataset).flatten(1).double()
    eigenvalues, eigenvectors = torch.linalg.eigh(X.T @ X / (len(X) - 1))
    return eigenvectors * eigenvalues.clamp_min(0).sqrt()


def train_by_a_plain_loop(nets, train_set, method):
    """Two epochs of two steps with PyTorch's layers; (cross entropy, R) of each step."""
    A = principal_component_root(train_set) if method == "forde_pca" else None
    optimiser = torch.optim.SGD(nets.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = data.Loader(train_set, 8, seed=7, shuffle=True, drop_last=True, augment="crop_flip")
    batches = [*loader.epoch(0), *loader.epoch(1)]
    lr_factors = (1 / 1.8, 3 / 3.2, 2 / 3.2, 1 / 3.2)  # up in the first fifth, then down
    losses = []
    for step, (batch, lr_factor) in enumerate(zip(batches, lr_factors, strict=True)):
        if step % 2 == 0:
            common.seed_all(7, step // 2, 0)
        optimiser.param_groups[0]["lr"] = 0.1 * lr_factor
        for layer in nets.modules():
            layer.momentum = 0.1 / (1 - 0.9 ** (step + 1))
        pairs = [forde.input_gradient(net, batch.images, batch.labels) for net in nets]
        logits, g = zip(*pairs)
        cross_entropy = sum(F.cross_entropy(member, batch.labels) for member in logits)
        R = torch.zeros(())
        if method != "deep_ensemble":
            R = repulsion_by_loops(torch.stack(g).double(), A)
        losses.append([cross_entropy.item() / len(nets), R.item()])
        optimiser.zero_grad()
        (cross_entropy + R).backward()
        optimiser.step()
    return losses


@pytest.mark.parametrize("method", forde.METHODS)
def test_training_is_that_of_a_plain_loop(method):
    args = options("--batch-size 8 --epochs 2 --augment --lr .1")
    train_set = tiny_set(20)
    nets, copies = make_members()
    for net in (*nets, *copies):
        net.backbone.append(nn.Dropout(0.3))
    history = []
    run = Namespace(resume=lambda *_, **__: history, save=lambda *_, **__: None)
    forde.train(nets, train_set, method, args, 7, run, "name")
    losses = train_by_a_plain_loop(copies, train_set, method)
    for row, expected in zip(history, (losses[:2], losses[2:]), strict=True):
        found = [row["cross_entropy"], row["repulsion"]]
        assert found == pytest.approx(np.mean(expected, 0), rel=1e-4)
    state = nets.state_dict()
    for name, expected in copies.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert_close(state[name], expected, rtol=1e-3, atol=1e-4)


# ---- Rows ---------------------------------------------------------------------------------------


PAIRS = [(0, 1), (0, 2), (1, 2)]  # of three members


def epistemic_uncertainty(p):
    """The mutual information [N] of p [M, N, K], by SciPy."""
    return stats.entropy(p.mean(0), axis=1) - stats.entropy(p, axis=2).mean(0)


def expected_metrics(nets, dataset):
    """Metrics of three members for a set, by scikit-learn, SciPy and PyTorch; and p [M, N, K]."""
    x = normalised_images(dataset).requires_grad_()
    logits = [net.eval()(x) for net in nets]
    gradients = []
    for member in logits:
        true_logits = member[range(len(x)), dataset.labels]
        gradients.append(torch.autograd.grad(true_logits.sum(), x)[0].flatten(1))
    cosines = [F.cosine_similarity(gradients[i], gradients[j]) for i, j in PAIRS]
    p = torch.stack(logits).detach().double().softmax(2).numpy()
    predicted = p.argmax(2)                                            # [M, N]
    metrics = {"nll": sk.log_loss(dataset.labels, p.mean(0), labels=range(3)),
               "disagreement": np.mean([predicted[i] != predicted[j] for i, j in PAIRS]),
               "epistemic_mean": epistemic_uncertainty(p).mean(),
               "gradient_distance": 1 - torch.stack(cosines).mean().item()}
    return metrics, p


def evaluate_members(nets, test, other, copies, monkeypatch, argv="--methods forde_pca"):
    """What run_seed returns for networks that need no training."""
    monkeypatch.setattr(data, "corrupted_sets", lambda *_: copies)
    monkeypatch.setattr(forde, "make_ensemble", lambda *_: nets)
    monkeypatch.setattr(forde, "train", lambda *_: None)
    splits = data.Splits(test, None, test, [other], None)
    return forde.run_seed(splits, options(argv), 5, None)


def test_rows_are_those_of_scikit_learn(monkeypatch):
    test = tiny_set(30, "tiny")
    other = tiny_set(20, "other")
    corrupted = [tiny_set(30) for _ in range(4)]  # two kinds of each severity
    copies = [data.Corruption("tiny_c", "kind", 1 + number // 2, dataset)
              for number, dataset in enumerate(corrupted)]
    nets, _ = make_members()
    rows, severities = evaluate_members(nets, test, other, copies, monkeypatch)
    test_row, ood_row, mean_row = rows
    expected, p = expected_metrics(nets, test)
    _, p_other = expected_metrics(nets, other)
    assert {name: test_row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert ood_row["against"] == "other"
    scores = np.concatenate([epistemic_uncertainty(p), epistemic_uncertainty(p_other)])
    auroc = sk.roc_auc_score(np.arange(50) >= 30, scores)
    assert ood_row["auroc_epistemic"] == pytest.approx(auroc, abs=0.01)

    assert severities[0] is test_row
    metrics = [expected_metrics(nets, dataset)[0] for dataset in corrupted]
    unions = (metrics[:2], metrics[2:], metrics)
    for row, union in zip([*severities[1:], mean_row], unions, strict=True):
        assert row["set"] == "tiny_c"
        assert row["n"] == 30 * len(union)
        for name in expected:
            mean = np.mean([of_copy[name] for of_copy in union])
            assert row[name] == pytest.approx(mean, rel=1e-4)


def test_equal_members_have_an_epistemic_uncertainty_of_zero(monkeypatch):
    nets, _ = make_members()
    equal = nn.ModuleList([nets[0]] * 3)
    rows, _ = evaluate_members(equal, tiny_set(30), tiny_set(20), [], monkeypatch)
    assert rows[0]["epistemic_mean"] == 0
    assert rows[1]["auroc_epistemic"] == 0.5


def test_a_single_member_has_no_metrics_of_differences(monkeypatch):
    nets, _ = make_members()
    copies = [data.Corruption("tiny_c", "kind", 1, tiny_set(30))]
    argv = "--methods deep_ensemble --members 1"
    rows, severities = evaluate_members(nets[:1], tiny_set(30), tiny_set(20), copies, monkeypatch,
                                        argv)
    assert "auroc_total" in rows[1]
    for row in rows + severities:
        assert "auroc_epistemic" not in row
        assert not {"epistemic_mean", "disagreement", "gradient_distance"} & row.keys()


# ---- Runs ---------------------------------------------------------------------------------------


def command(images, out, more=""):
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --image-size 8 --width .05 "
            f"--members 2 --epochs 2 --batch-size 12 --workers 0 --name run --out-dir {out} "
            f"--methods deep_ensemble forde_pca {more}").split()


@pytest.fixture(scope="module")
def finished_run(image_folder, tmp_path_factory):
    """The rows of a run of two seeds, those of --eval, and the run directory."""
    out = tmp_path_factory.mktemp("finished")
    more = f"--shift computed --predict folder:{image_folder}/test --runs 2 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        two_kinds = dict(list(data.CORRUPTIONS.items())[:2])
        patch.setattr(data, "CORRUPTIONS", two_kinds)
        rows = forde.main(command(image_folder, out, more))  # with a picture
        evaluated_again = run_script("forde", *command(image_folder, out, "--eval"))
    return rows, evaluated_again, out / "forde" / "run"


def test_eval_repeats_the_rows_of_a_run(finished_run):
    rows, evaluated_again, folder = finished_run
    assert len(rows) == 2 * 3 * 3  # seeds; methods and their difference; test, OOD, shift
    assert evaluated_again == rows
    assert (folder / "shift.png").stat().st_size > 10_000


def test_differences_are_those_of_equal_seeds(finished_run):
    rows = finished_run[0]
    keys = [(row["seeds"], row["set"], row.get("against")) for row in rows]
    for difference, key in zip(rows[12:], keys[12:], strict=True):
        baseline, forde_pca = [row for row, other in zip(rows[:12], keys) if other == key]
        assert difference["method"] == "FoRDE-PCA - deep ensemble"
        for name in {"nll", "gradient_distance", "auroc_epistemic"} & difference.keys():
            assert difference[name] == forde_pca[name] - baseline[name]


def test_predictions_of_the_last_method_have_bare_columns(finished_run):
    rows, _, folder = finished_run
    table = np.genfromtxt(folder / "predictions.csv", delimiter=",", names=True, dtype=None)
    columns = ["predicted", "confidence", "total", "aleatoric", "epistemic"]
    assert list(table.dtype.names)[2:] == columns + [f"{name}_deep_ensemble" for name in columns]
    baseline, forde_pca = rows[0], rows[3]
    is_right = table["label"] == table["predicted_deep_ensemble"]
    assert is_right.mean() == baseline["accuracy"]
    assert (table["label"] == table["predicted"]).mean() == forde_pca["accuracy"]


def test_a_run_that_is_killed_ends_with_equal_weights(finished_run, image_folder, tmp_path):
    argv = command(image_folder, tmp_path)
    checkpoint = tmp_path / "forde" / "run" / "forde_pca-seed1.pt"
    kill_after(Child(tmp_path, run_script, "forde", *argv), checkpoint)
    run_script("forde", *argv)
    assert_equal_checkpoints(checkpoint, finished_run[2] / "forde_pca-seed1.pt")


def test_two_processes_train_and_evaluate_as_one(finished_run, image_folder, tmp_path):
    """Batch norm and R are those of the global batch."""
    expected_rows, _, folder = finished_run
    rows, _ = run_ranks(tmp_path, run_script, "forde", *command(image_folder, tmp_path))
    state = common.load(tmp_path / "forde" / "run" / "forde_pca-seed1.pt")["net"]
    expected = common.load(folder / "forde_pca-seed1.pt")["net"]
    assert_close(state, expected, rtol=1e-3, atol=1e-4)
    for row, expected_row in zip(rows[:2], expected_rows[:2]):
        for name in {"nll", "gradient_distance", "auroc_total"} & row.keys():
            assert row[name] == pytest.approx(expected_row[name], rel=1e-3)


def evaluate_file(path, image_folder, out, more=""):
    """forde.py --weights FILE --epochs 0."""
    argv = command(image_folder, out, f"--weights {path} --epochs 0 {more}")
    return run_script("forde", *argv)


def test_members_of_a_checkpoint_are_evaluated_without_seeds(finished_run, image_folder, tmp_path):
    rows, _, folder = finished_run
    path = folder / "forde_pca-seed1.pt"
    evaluated = evaluate_file(path, image_folder, tmp_path)
    for row, expected in zip(evaluated, rows[3:5], strict=True):
        assert row == expected | {"method": "forde_pca-seed1.pt", "seeds": []}


def test_a_checkpoint_of_other_members_or_classes_is_refused(finished_run, image_folder, tmp_path):
    path = finished_run[2] / "forde_pca-seed1.pt"
    with pytest.raises(common.UserError, match="FoRDE needs training.* 3 members.* has 2 members"):
        evaluate_file(path, image_folder, tmp_path, "--members 3")
    state = common.load(path)
    for member in (0, 1):
        state["net"][f"{member}.head.weight"] = torch.zeros(7, 25)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(common.UserError, match="FoRDE needs training"):
        evaluate_file(tmp_path / "other.pt", image_folder, tmp_path)
    torch.save({"net": {"head.weight": torch.zeros(3, 25)}}, tmp_path / "ddu.pt")
    with pytest.raises(common.UserError, match="FoRDE needs training.* has 0 members"):
        evaluate_file(tmp_path / "ddu.pt", image_folder, tmp_path)


@pytest.mark.parametrize("argv", ["", "--model torchvision/resnet18", "--weights file.pt --runs 2"])
def test_untrained_networks_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        options(f"--epochs 0 {argv}")
    assert "FoRDE needs training" in capsys.readouterr().err


def attention(args, shape):
    same = nn.Conv2d(3, 3, 3, padding="same")  # which stays PyTorch's
    transformer = models.VisionTransformer(image_size=8, patch_size=4, num_layers=2, num_heads=2,
                                           hidden_dim=24, mlp_dim=48, num_classes=24)
    return [same, transformer], 24


@pytest.mark.parametrize("model, side", [("torchvision/mobilenet_v3_small", 32), ("attention", 8)])
def test_networks_of_torchvision_and_of_ones_own(model, side, image_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(forde.NETWORKS, "attention", attention)
    argv = command(image_folder, tmp_path, f"--model {model} --weights none --amp --epochs 1 "
                   f"--methods forde_pca --batch-size 8 --image-size {side}")
    rows = run_script("forde", *argv)
    [row] = common.load(tmp_path / "forde" / "run" / "forde_pca-seed1.pt")["history"]
    assert 2 * math.log(1.25) - 1e-4 < 8 * row["repulsion"] < 2 * math.log(2)
    assert math.isfinite(rows[0]["nll"])
    assert rows[0]["gradient_distance"] > 0
