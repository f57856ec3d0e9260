"""Batch norm of the global batch against PyTorch's, to the second derivative, in float64."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import refusal
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import common

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = [(7, 3), (7, 3, 4), (7, 3, 4, 5), (7, 3, 2, 3, 2)]
CUTS = [7, 3]  # first rows of the second process; 7: it has none


def layer_and_batch(shape, training):
    """PyTorch's layer for a batch whose means are far from 0, both in float64."""
    generator = torch.Generator().manual_seed(5)
    batch = 5 + 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    layer = KINDS[len(shape)](3, eps=1e-3, momentum=0.2, dtype=torch.float64)
    for values in (layer.weight, layer.bias, layer.running_mean):
        nn.init.uniform_(values, -1, 2, generator)
    layer.weight.data[1] = 0
    return layer.train(training), batch


def derivatives(layer, x):
    """Output; gradients by x, weight and bias; those of a loss with the gradient by x in it."""
    layer(x + 1)
    layer.momentum = 0.5
    x = x.detach().requires_grad_()
    y = layer(x)
    wanted = [x, layer.weight, layer.bias]
    first = torch.autograd.grad(y.sin().sum(), wanted, retain_graph=True)
    g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    loss = g.square().sum() + 3 * g.sin().sum() + (y * y.cos()).sum()
    second = torch.autograd.grad(loss, wanted)
    of_rows = [y.detach(), first[0], g.detach(), second[0]]
    return of_rows, first[1:] + second[1:], list(layer.buffers())


def assert_close(tensors, expected, tolerance=1e-11):
    for ours, theirs in zip(tensors, expected, strict=True):
        scale = theirs.abs().max().clamp_min(1e-3)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * scale


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_process_differentiates_as_pytorch_does(shape, training):
    layer, batch = layer_and_batch(shape, training)
    peer = copy.deepcopy(layer)
    common.use_global_batch_norm(nn.Sequential(nn.Sequential(layer)))
    assert type(layer) is common.GlobalBatchNorm
    assert layer.state_dict().keys() == peer.state_dict().keys()
    rows, weights, statistics = derivatives(layer, batch)
    of_rows, of_weights, buffers = derivatives(peer, batch)
    assert_close(rows, of_rows)
    assert_close(weights, of_weights)
    assert_close(statistics[:2], buffers[:2])  # and not the number of batches


def in_two_processes():
    """The derivatives of one process's rows, for each shape, mode and cut."""
    common.start("cpu")
    results = {}
    for shape, training, cut in itertools.product(SHAPES, (True, False), CUTS):
        layer, batch = layer_and_batch(shape, training)
        common.use_global_batch_norm(layer)
        rows = batch[:cut] if common.is_main() else batch[cut:]
        results[shape, training, cut] = derivatives(layer, rows)
    dist.destroy_process_group()
    return results


def test_two_processes_have_the_derivatives_of_one(ranks):
    main, other = ranks(in_two_processes)
    assert len(main) == 16
    for shape, training, cut in main:
        layer, batch = layer_and_batch(shape, training)
        of_rows, of_weights, buffers = derivatives(layer, batch)
        rows, weights, statistics = main[shape, training, cut]
        other_rows, other_weights, other_statistics = other[shape, training, cut]
        assert_close(map(torch.cat, zip(rows, other_rows)), of_rows)
        assert_close(map(torch.add, weights, other_weights), of_weights)
        assert_close(statistics, buffers)
        assert_close(other_statistics, statistics, 0)


NARROW = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(6)).bfloat16() + 3
ONE_PIXEL = torch.tensor([1.0, -2.0, 3.0]).reshape(1, 3, 1, 1)


def narrow_derivatives(layer, x):
    """Output, first and second derivative [3, B, C, H, W], and running statistics."""
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    # The gradient of the squares is nearly zero, because the output has a constant length.
    g, = torch.autograd.grad(y.pow(3).sum() / 3, x, create_graph=True)
    second, = torch.autograd.grad(g.square().sum(), x)
    for tensor in (y, g, second):
        assert tensor.dtype == x.dtype
        assert not len(x) or tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.stack([y, g, second]).detach(), [layer.running_mean, layer.running_var]


def narrow_in_two_processes():
    common.start("cpu")
    cases = []
    for cut in (6, 2):
        rows = NARROW[:cut] if common.is_main() else NARROW[cut:]
        cases.append(narrow_derivatives(common.GlobalBatchNorm(3), rows))
    # One value per channel has the variance 0 / 1, and not 0 / 0.
    layer = common.GlobalBatchNorm(3)
    y = layer(ONE_PIXEL if common.is_main() else ONE_PIXEL[:0])
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.allclose(layer.running_mean, 0.1 * ONE_PIXEL.flatten())
    assert torch.allclose(layer.running_var, torch.full((3,), 0.9))
    dist.destroy_process_group()
    return cases


def test_statistics_of_bfloat16_are_float32(ranks):
    expected, expected_statistics = narrow_derivatives(nn.BatchNorm2d(3), NARROW.float())
    cases = [narrow_derivatives(common.GlobalBatchNorm(3), NARROW)]
    for main, other in zip(*ranks(narrow_in_two_processes), strict=True):
        cases.append((torch.cat([main[0], other[0]], 1), main[1]))
    for rows, statistics in cases:
        assert_close(rows.float(), expected, 0.03)
        assert_close(statistics, expected_statistics, 1e-6)


def test_one_value_per_channel_has_no_statistics():
    with pytest.raises(ValueError, match="more than one value per channel"):
        common.GlobalBatchNorm(2)(torch.ones(1, 2))
    assert common.GlobalBatchNorm(2).eval()(torch.ones(1, 2)).shape == (1, 2)
    assert common.GlobalBatchNorm(2).eval()(torch.ones(0, 2)).shape == (0, 2)


def test_no_wrong_gradient_by_weights_with_create_graph():
    layer = common.GlobalBatchNorm(2)
    loss = layer(torch.randn(2, 2, 4, 4)).square().sum()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, layer.weight, create_graph=True)


class Operations(TorchDispatchMode):
    """Counts the operations that compute, not those that make views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def test_the_second_derivative_takes_few_operations():
    layer = common.GlobalBatchNorm(3)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    y = layer(x)
    g, = torch.autograd.grad(y, x, torch.randn_like(y), create_graph=True)
    v = torch.randn_like(g)
    with Operations() as operations:
        torch.autograd.grad(g, [x, layer.weight], v)
    assert operations.count <= 18  # PyTorch's: 79


def other_layers():
    return [nn.BatchNorm1d(2, affine=False), nn.BatchNorm2d(2, momentum=None),
            nn.BatchNorm2d(2, track_running_stats=False)]


def refuse_other_layers():
    device = common.start("cpu")
    layer = nn.BatchNorm2d(2)
    net = common.data_parallel(nn.Sequential(nn.Conv2d(1, 2, 1), layer), device)
    assert isinstance(net, nn.parallel.DistributedDataParallel)
    assert type(layer) is common.GlobalBatchNorm
    for other in other_layers():
        text = refusal(common.data_parallel, nn.Sequential(other), device)
        assert text.startswith("BatchNorm") and "start one process" in text
    dist.destroy_process_group()


def test_layers_that_cannot_share_their_statistics(ranks):
    ranks(refuse_other_layers)
    layers = other_layers()
    assert common.data_parallel(layers[0], torch.device("cpu")) is layers[0]
    common.use_global_batch_norm(nn.Sequential(*layers))  # in one process, they are left alone
    assert not any(isinstance(layer, common.GlobalBatchNorm) for layer in layers)
