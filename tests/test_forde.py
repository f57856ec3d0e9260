"""forde.py: layers against PyTorch's, equations against loops, networks, training, rows, runs."""

import json
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


@pytest.fixture(scope="module", autouse=True)
def two_kinds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CORRUPTIONS", dict(list(data.CORRUPTIONS.items())[:2]))
        yield


def output_and_derivatives(layer, x):
    """The output and derivatives, also of a loss with the gradient by x; first four with B rows."""
    x = x.detach().requires_grad_()
    variables = [x, *layer.parameters()]
    y = layer(x)
    first = torch.autograd.grad(y.sin().sum(), variables, retain_graph=True)
    g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    loss = (g.square() + 3 * g.sin()).sum() + (y * y.cos()).sum()
    second = torch.autograd.grad(loss, variables)
    tensors = [y, g, first[0], second[0], *first[1:], *second[1:]]
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize("size, options", [
    ((8, 7), dict(kernel_size=3, padding=1, stride=2, bias=False)),
    ((5, 8), dict(kernel_size=(1, 3), stride=(1, 3))),
    ((9, 8), dict(kernel_size=3, padding=2, stride=3, dilation=(2, 1), groups=4))])
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
    x = torch.linspace(-5, 5, 30)
    assert_close(forde.Hardsigmoid()(x), nn.Hardsigmoid()(x))


def batch_norm_results(is_ours=True):
    """Derivatives, running statistics and the output in eval mode, for this process's examples."""
    common.start("cpu")
    torch.manual_seed(5)
    results = []
    for layer, shape in ((nn.BatchNorm1d(3, 1e-3, 0.2), (8, 3)),
                         (nn.BatchNorm2d(3, 1e-3, 0.2), (4, 3, 4, 5))):
        layer.weight.data = torch.tensor([1.5, 0, -2])
        layer.bias.data = torch.randn(3)
        x = 5 + 3 * randn64(*shape)
        if is_ours:
            forde.make_twice_differentiable(layer)
        piece = x.chunk(common.world_size())[common.rank()]
        derivatives = output_and_derivatives(layer.double(), piece)
        running = [layer.running_mean, layer.running_var]
        results.append((derivatives, running, layer.eval()(x[:2]).detach()))
    return results


def test_batch_norm_of_one_or_two_processes_is_that_of_pytorch_for_the_global_batch(tmp_path):
    expected = batch_norm_results(is_ours=False)
    assert_close(batch_norm_results(), expected, rtol=1e-9, atol=1e-10)
    for main, other, whole in zip(*run_ranks(tmp_path, batch_norm_results), expected, strict=True):
        pairs = list(zip(main[0], other[0], strict=True))
        derivatives = [torch.cat(pair) for pair in pairs[:4]]          # a row for each example
        derivatives += [first + second for first, second in pairs[4:]]
        for _, running, evaluated in (main, other):
            assert_close((derivatives, running, evaluated), whole, rtol=1e-9, atol=1e-10)


IDENTITY = torch.eye(12, dtype=torch.float64)


def repulsion_by_loops(g, A=IDENTITY):
    """R by its equations, of g [M, B, D]."""
    members, batch = g.shape[:2]
    s = g / g.norm(dim=2, keepdim=True) @ A
    kernel_sums = 0
    for b in range(batch):
        for j in range(members):
            distances = [(s[i, b] - s[j, b].detach()).square().sum() for i in range(members)]
            distance = torch.stack(distances)                          # [M]
            bandwidth = np.median(distance.detach()) / math.log(members) + 1e-12
            kernel_sums = kernel_sums + torch.exp(-distance / bandwidth)
    return (kernel_sums / batch).log().sum() / batch


def repulsion(g, A=IDENTITY):
    return forde.repulsion(forde.log_kernel(forde.unit_rows(g) @ A))


def value_and_gradient(function, g, *more):
    g = g.detach().requires_grad_()
    value = function(g, *more)
    return value.detach(), torch.autograd.grad(value, g)[0]


@pytest.mark.parametrize("members, A, spread", [(2, IDENTITY, 1), (3, randn64(12, 5), 1),
                                                (4, IDENTITY, 1e-5)])
def test_repulsion_is_that_of_loops_over_members_and_examples(members, A, spread):
    g = randn64(4, 12) + spread * randn64(members, 4, 12)
    expected = value_and_gradient(repulsion_by_loops, g, A)
    assert_close(value_and_gradient(repulsion, g, A), expected, rtol=1e-7, atol=1e-9)


def test_members_that_are_equal_are_at_the_maximum_without_a_force():
    value, gradient = value_and_gradient(repulsion, randn64(1, 4, 12).repeat(5, 1, 1))
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
    g = torch.where(is_other, g, length * g)
    assert_close(value_and_gradient(repulsion, g), expected)
    assert forde.pairwise_cosines(g)[[0, 3, 4], 2].tolist() == [0, 0, 0]  # of member 1, example 2


@pytest.mark.parametrize("n", [12, 300])
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


def padded_conv(x, weight, stride=1):
    """As by JAX: ceil(n / stride) outputs; of an odd number of zeros, one more is at the end."""
    padding = []
    for n in reversed(x.shape[2:]):  # F.pad begins with the last axis
        zeros = max((math.ceil(n / stride) - 1) * stride + weight.shape[-1] - n, 0)
        padding += [zeros // 2, zeros - zeros // 2]
    return F.conv2d(F.pad(x, padding), weight, None, stride)


def normalise(x):
    return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("c_out, stride", [(5, 2), (3, 1)])
def test_blocks_are_padded_and_ordered_as_published(c_out, stride):
    x = torch.randn(4, 3, 8, 9)
    block = forde.BasicBlock(3, c_out, stride)
    first, second, *projection = [weight for weight in block.parameters() if weight.ndim == 4]
    h = normalise(padded_conv(x, first, stride)).relu()
    h = normalise(padded_conv(h, second))
    shortcut = normalise(padded_conv(x, projection[0], stride)) if projection else x
    assert_close(block(x), (h + shortcut).relu())
    block = forde.PreActivationBlock(3, c_out, stride)
    first, second, *projection = [weight for weight in block.parameters() if weight.ndim == 4]
    start = normalise(x).relu()
    h = normalise(padded_conv(start, first, stride)).relu()
    h = padded_conv(h, second)
    shortcut = padded_conv(start, projection[0], stride) if projection else x
    assert_close(block(x), h + shortcut)


def test_networks_start_as_published_each_from_weights_of_its_own():
    nets = forde.make_ensemble(options("--model resnet9 --width .5"), 1, 10, (3, 32, 32))
    assert not torch.equal(nets[0].backbone[0].weight, nets[1].backbone[0].weight)
    assert (nets[0].head.weight == 0).all()
    for name, parameter in nets[0].named_parameters():
        if parameter.ndim == 1:
            assert (parameter == name.endswith("weight")).all(), name  # scales are 1, biases are 0
        elif parameter.numel() > 30_000:  # cut at two standard deviations
            scaled = parameter * parameter[0].numel() ** 0.5
            assert 1.99 < scaled.abs().max() <= 2.0001
            assert scaled.std().item() == pytest.approx(0.8796, abs=0.012)


@pytest.mark.parametrize("model, classes, size", [
    ("resnet18", 100, 11_220_132), ("wrn_16_4", 10, 2_748_890),
    ("preact_resnet18", 200, 11_269_640)])
def test_networks_have_the_published_sizes(model, classes, size):
    with torch.device("meta"):
        layers, dim = forde.NETWORKS[model](options("--width 1"), (3, 32, 32))
        net = forde.Network(nn.Sequential(*layers), nn.Linear(dim, classes))
    assert sum(parameter.numel() for parameter in net.parameters()) == size


def test_heads_compute_in_float32_with_amp():
    nets, _ = make_members()
    logits = forde.member_logits(nets, torch.randn(50, 3, 8, 8), options("--amp"))
    assert not torch.equal(logits, logits.bfloat16().float())  # bfloat16 has 8 bits


def test_members_that_start_from_one_file_differ_by_new_heads(tmp_path):
    trained, _ = make_members()
    torch.save(trained[0].state_dict(), tmp_path / "file.pt")
    nets = forde.make_ensemble(options(f"--weights {tmp_path}/file.pt"), 1, 3, (3, 8, 8))
    for net in nets:
        assert_close(net.backbone.state_dict(), trained[0].backbone.state_dict())
    assert not torch.equal(nets[0].head.weight, nets[1].head.weight)


def test_published_learning_rates_are_constant_within_an_epoch():
    args = options("--schedule published --lr .1")
    for epoch, lr in {150: 0.1, 151: 0.099175, 210: 0.0505, 269: 0.001825, 299: 0.001}.items():
        assert forde.learning_rate(390 * epoch + 389, 390, 300, args) == pytest.approx(lr)


def test_photographs_are_mirrored_and_digits_are_not():
    for model in ("resnet18", "torchvision/resnet18"):
        assert options(f"--dataset folder:images --model {model}").augment
        assert not options(f"--dataset glyphs --model {model}").augment


def images_of(dataset):
    return torch.cat([batch.images for batch in data.Loader(dataset).epoch()])


def train_by_a_plain_loop(nets, train_set, method):
    """Two epochs of two steps with PyTorch's layers; (cross entropy, R) of each step."""
    A = torch.eye(192).double()
    if method == "forde_pca":
        X = images_of(train_set).flatten(1).double()
        eigenvalues, eigenvectors = torch.linalg.eigh(X.T @ X / (len(X) - 1))
        A = eigenvectors * eigenvalues.clamp_min(0).sqrt()
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
        logits, g = zip(*[forde.input_gradient(net, batch.images, batch.labels) for net in nets])
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
    images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)
    train_set = data.ImageSet("tiny", images, torch.arange(20) % 3, 3, (0.5,) * 3, (0.3,) * 3)
    nets, copies = make_members()
    for net in (*nets, *copies):
        net.backbone.append(nn.Dropout(0.3))
    history = []
    run = Namespace(resume=lambda *_, **__: history, save=lambda *_, **__: None)
    forde.train(nets, train_set, method, args, 7, run, "name")
    losses = train_by_a_plain_loop(copies, train_set, method)
    for row, expected in zip(history, (losses[:2], losses[2:]), strict=True):
        assert [row["cross_entropy"], row["repulsion"]] == pytest.approx(np.mean(expected, 0), 1e-4)
    state = nets.state_dict()
    for name, expected in copies.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert_close(state[name], expected, rtol=1e-3, atol=1e-4)


def expected_metrics(nets, dataset):
    """Metrics of three members for a set, by scikit-learn, SciPy and PyTorch."""
    x = images_of(dataset).requires_grad_()
    logits = [net.eval()(x) for net in nets]
    gradients = []
    for member in logits:
        true_logits = member[range(len(x)), dataset.labels]
        gradients.append(torch.autograd.grad(true_logits.sum(), x)[0].flatten(1))
    pairs = [(0, 1), (0, 2), (1, 2)]
    cosines = [F.cosine_similarity(gradients[i], gradients[j]) for i, j in pairs]
    p = torch.stack(logits).detach().double().softmax(2).numpy()       # [M, N, K]
    predicted = p.argmax(2)                                            # [M, N]
    total = stats.entropy(p.mean(0), axis=1)                           # [N]
    return {"nll": sk.log_loss(dataset.labels, p.mean(0), labels=range(3)),
            "disagreement": np.mean([predicted[i] != predicted[j] for i, j in pairs]),
            "epistemic_mean": (total - stats.entropy(p, axis=2).mean(0)).mean(),
            "gradient_distance": 1 - torch.stack(cosines).mean().item()}


def command(images, out, more=""):
    return (f"--dataset folder:{images} --ood folder:{images}/unknown --image-size 8 --width .05 "
            f"--members 3 --epochs 2 --batch-size 12 --workers 0 --name run --out-dir {out} "
            f"--device cpu --methods deep_ensemble forde_pca {more}").split()


@pytest.fixture(scope="module")
def finished_run(image_folder, tmp_path_factory):
    """The rows of a run of two seeds, and OUT_DIR."""
    out = tmp_path_factory.mktemp("finished")
    more = f"--shift computed --predict folder:{image_folder}/test --runs 2"
    return forde.main(command(image_folder, out, more)), out  # with a picture


def test_rows_are_those_of_scikit_learn(finished_run, image_folder):
    rows, out = finished_run
    args = forde.parse_args(command(image_folder, out, "--eval"))
    splits = data.load_splits(args, 1, num_val=0)
    nets = forde.make_ensemble(args, 1, 3, splits.train.shape)
    nets.load_state_dict(common.load(out / "forde/run/forde_pca-seed1.pt")["net"])
    test_row, _, mean_row = rows[3:6]
    expected = expected_metrics(nets, splits.test)
    assert {name: test_row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    kinds = [expected_metrics(nets, copy) for _, copy in data.corrupted_sets(splits.test, args)]
    severities = json.loads((out / "forde/run/results.json").read_text())["severities"][6:12]
    assert severities[0] == test_row
    unions = [kinds[severity::5] for severity in range(5)]  # of both kinds
    for row, union in zip([*severities[1:], mean_row], [*unions, kinds], strict=True):
        assert row["n"] == len(splits.test) * len(union)
        for name in expected:
            mean = np.mean([of_kind[name] for of_kind in union])
            assert row[name] == pytest.approx(mean, rel=1e-4, abs=1e-6)


def test_a_single_member_has_no_metrics_of_differences(image_folder, tmp_path):
    argv = command(image_folder, tmp_path, "--methods deep_ensemble --members 1 --epochs 1")
    row, ood_row = run_script("forde", *argv)
    assert "auroc_epistemic" not in ood_row
    assert not {"epistemic_mean", "disagreement", "gradient_distance"} & row.keys()


def test_eval_repeats_the_rows_of_a_run(finished_run, image_folder):
    rows, out = finished_run
    assert run_script("forde", *command(image_folder, out, "--eval")) == rows
    assert (out / "forde" / "run" / "shift.png").stat().st_size > 10_000


def test_differences_are_those_of_equal_seeds(finished_run):
    rows, _ = finished_run  # test, OOD and shift of each method; then of the differences
    baselines = rows[0:3] + rows[6:9]
    others = rows[3:6] + rows[9:12]
    for difference, baseline, other in zip(rows[12:], baselines, others, strict=True):
        assert difference["method"] == "FoRDE-PCA - deep ensemble"
        assert difference["seeds"] == baseline["seeds"] == other["seeds"]
        for name in {"nll", "gradient_distance", "auroc_epistemic"} & difference.keys():
            assert difference[name] == other[name] - baseline[name]


def test_predictions_of_the_last_method_have_bare_columns(finished_run):
    rows, out = finished_run
    table = np.genfromtxt(out / "forde/run/predictions.csv", delimiter=",", names=True, dtype=None)
    columns = ["predicted", "confidence", "total", "aleatoric", "epistemic"]
    assert list(table.dtype.names)[2:] == columns + [f"{name}_deep_ensemble" for name in columns]
    for name, row in (("predicted_deep_ensemble", rows[0]), ("predicted", rows[3])):
        assert (table["label"] == table[name]).mean() == row["accuracy"]


def test_a_run_that_is_killed_ends_with_equal_weights(finished_run, image_folder, tmp_path):
    argv = command(image_folder, tmp_path)
    checkpoint = tmp_path / "forde/run/forde_pca-seed1.pt"
    kill_after(Child(tmp_path, run_script, "forde", *argv), checkpoint)
    run_script("forde", *argv)
    assert_equal_checkpoints(checkpoint, finished_run[1] / "forde/run/forde_pca-seed1.pt")


def test_two_processes_train_and_evaluate_as_one(finished_run, image_folder, tmp_path):
    rows, _ = run_ranks(tmp_path, run_script, "forde", *command(image_folder, tmp_path))
    state, expected = [common.load(out / "forde/run/forde_pca-seed1.pt")["net"]
                       for out in (tmp_path, finished_run[1])]
    assert_close(state, expected, rtol=1e-3, atol=1e-4)
    for row, expected_row in zip(rows[:2], finished_run[0][:2]):
        for name in {"nll", "gradient_distance", "auroc_total"} & row.keys():
            assert row[name] == pytest.approx(expected_row[name], rel=1e-3)


def test_members_of_a_checkpoint_are_evaluated_without_seeds(finished_run, image_folder, tmp_path):
    rows, out = finished_run
    path = out / "forde/run/forde_pca-seed1.pt"
    argv = command(image_folder, tmp_path, f"--weights {path} --epochs 0")
    for row, expected in zip(run_script("forde", *argv), rows[3:5], strict=True):
        assert row == expected | {"method": "forde_pca-seed1.pt", "seeds": []}
    with pytest.raises(common.UserError, match="FoRDE needs training.* 4 members.* has 3 members"):
        run_script("forde", *argv, "--members", 4, "--fresh")


def attention(args, shape):
    transformer = models.VisionTransformer(image_size=8, patch_size=4, num_layers=2, num_heads=2,
                                           hidden_dim=24, mlp_dim=48, num_classes=24)
    return [nn.Conv2d(3, 3, 3, padding="same"), transformer], 24  # which stays PyTorch's


@pytest.mark.parametrize("model, side", [("torchvision/mobilenet_v3_small", 32), ("attention", 8)])
def test_networks_of_torchvision_and_of_ones_own(model, side, image_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(forde.NETWORKS, "attention", attention)
    argv = command(image_folder, tmp_path, f"--model {model} --weights none --amp --epochs 1 "
                   f"--methods forde_pca --members 2 --batch-size 8 --image-size {side}")
    rows = run_script("forde", *argv)
    [row] = common.load(tmp_path / "forde" / "run" / "forde_pca-seed1.pt")["history"]
    assert 2 * math.log(1.25) - 1e-4 < 8 * row["repulsion"] < 2 * math.log(2)
    assert rows[0]["gradient_distance"] > 0
