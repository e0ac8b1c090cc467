import pytest
import torch
from torch import nn

from potluck.core.nets.batchnorm import (
    batch_norms,
    forget_statistics,
    keep_statistics,
    measure_statistics,
    norms_of,
    takes_batch_statistics,
    unlearnt,
)
from potluck.core.nets.weights import buffers_of

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)) * 2 + 1


@pytest.fixture
def net():
    """A BatchNorm that has seen something, inside a net."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    net(INPUTS)
    return net


def same_buffers(net, before):
    after = buffers_of(net)
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_every_kind_of_batch_norm_is_found_and_no_other_norm():
    net = nn.ModuleDict(
        {
            "one": nn.BatchNorm1d(1),
            "deep": nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)),
            "group": nn.GroupNorm(1, 1),
            "instance": nn.InstanceNorm1d(1),
        }
    )
    assert list(batch_norms(net)) == ["one", "deep.0", "deep.1", "deep.2"]


def test_kept_statistics_are_bit_identical(net):
    before = buffers_of(net)
    with keep_statistics(net):
        net(INPUTS)
    assert same_buffers(net, before)
    assert len(before) == 3


def test_kept_statistics_still_normalise_by_the_batch(net):
    with keep_statistics(net):
        normalised = net[0](INPUTS)
    assert torch.allclose(normalised.mean(0), torch.zeros(3), atol=1e-5)


def test_statistics_are_tracked_again_afterwards(net):
    before = buffers_of(net)
    with keep_statistics(net):
        pass
    net(INPUTS)
    assert net[0].num_batches_tracked == before["0.num_batches_tracked"] + 1
    assert not torch.equal(net[0].running_mean, before["0.running_mean"])


def test_statistics_are_tracked_again_after_an_error(net):
    before = buffers_of(net)
    with pytest.raises(RuntimeError), keep_statistics(net):
        net(torch.zeros(2, 5))
    assert net[0].track_running_stats
    assert same_buffers(net, before)


def test_layers_that_never_track_stay_so():
    net = nn.BatchNorm1d(3, track_running_stats=False)
    with keep_statistics(net):
        net(INPUTS)
    assert not net.track_running_stats


def test_keeping_inside_keeping_keeps_until_the_outer_end(net):
    before = buffers_of(net)
    with keep_statistics(net):
        with keep_statistics(net):
            net(INPUTS)
        net(INPUTS)
    assert same_buffers(net, before)
    assert net[0].track_running_stats


def test_one_batch_gives_its_mean_and_unbiased_variance(net):
    assert measure_statistics(net, [INPUTS]) == 1
    assert torch.allclose(net[0].running_mean, INPUTS.mean(0), atol=1e-6)
    assert torch.allclose(net[0].running_var, INPUTS.var(0, unbiased=True), atol=1e-5)


def test_several_batches_give_plain_means_whatever_their_sizes(net):
    batches = INPUTS.split([7, 3, 2])
    assert measure_statistics(net, batches) == 3
    assert torch.allclose(net[0].running_mean, torch.stack([b.mean(0) for b in batches]).mean(0), atol=1e-6)
    assert torch.allclose(net[0].running_var, torch.stack([b.var(0) for b in batches]).mean(0), atol=1e-5)


def test_images_are_measured_over_their_positions():
    images = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    net = nn.BatchNorm2d(2)
    measure_statistics(net, [images])
    assert torch.allclose(net.running_var, images.transpose(0, 1).flatten(1).var(1), atol=1e-5)


def test_what_was_measured_before_is_forgotten(net):
    measure_statistics(net, [INPUTS + 100])
    measure_statistics(net, [INPUTS])
    assert torch.allclose(net[0].running_mean, INPUTS.mean(0), atol=1e-6)


def test_batches_of_one_are_skipped(net):
    assert measure_statistics(net, [INPUTS[:1], INPUTS, INPUTS[:1]]) == 1
    assert torch.allclose(net[0].running_mean, INPUTS.mean(0), atol=1e-6)


def test_nothing_measured_gives_the_statistics_of_a_fresh_layer(net):
    assert measure_statistics(net, [INPUTS[:1]]) == 0
    assert same_buffers(net, buffers_of(nn.Sequential(nn.BatchNorm1d(3))))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_mode_and_momentum_are_put_back(net, training, momentum):
    net.train(training)
    net[0].momentum = momentum
    measure_statistics(net, [INPUTS])
    assert net.training is net[0].training is training
    assert net[0].momentum == momentum


def test_mode_and_momentum_are_put_back_after_an_error(net):
    net.eval()
    with pytest.raises(RuntimeError):
        measure_statistics(net, [torch.zeros(2, 5)])
    assert not net.training
    assert net[0].momentum == 0.1


def test_measuring_leaves_parameters_and_gradients(net):
    before = net[0].weight.detach().clone()
    measure_statistics(net, [INPUTS])
    assert torch.equal(net[0].weight, before)
    assert net[0].weight.grad is None


def test_later_layers_are_measured_on_what_earlier_ones_give():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    measure_statistics(net, [INPUTS])
    with torch.no_grad(), keep_statistics(net):
        expected = net[:2](INPUTS).mean(0)
    assert torch.allclose(net[2].running_mean, expected, atol=1e-6)


def test_takes_batch_statistics_asks_for_layers_that_are_not_held_or_have_no_others(net):
    assert takes_batch_statistics(net)
    assert takes_batch_statistics(net.eval())  # nothing is said of its layers
    net.train()
    net[0].eval()
    assert not takes_batch_statistics(net)
    assert not takes_batch_statistics(nn.Sequential(nn.GroupNorm(1, 3)))
    bare = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    bare[0].eval()
    assert takes_batch_statistics(bare)


def test_measuring_leaves_held_layers_alone(net):
    both = nn.Sequential(net[0].eval(), nn.BatchNorm1d(3))
    before = net[0].state_dict(), {name: tensor.clone() for name, tensor in net[0].state_dict().items()}
    assert measure_statistics(both, [INPUTS[:6], INPUTS[6:]]) == 2
    assert all(torch.equal(before[0][name], tensor) for name, tensor in before[1].items())
    assert both[1].num_batches_tracked == 2
    expected = net[0](INPUTS).mean(0)
    assert torch.allclose(both[1].running_mean, expected, atol=1e-6)


def test_norms_of_finds_layers_of_every_kind_that_undo_a_change_of_scale():
    layers = nn.LayerNorm([4, 3, 3]), nn.RMSNorm([4, 3, 3])
    norms = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), *layers
    x = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    for norm in norms:
        assert norms_of(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU())) == [norm]
        assert torch.allclose(norm(x), norm(100 * x), atol=1e-4)
    assert norms_of(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout())) == []


def seen(**options):
    """A layer that has seen a batch in training mode."""
    layer = nn.BatchNorm1d(3, **options)
    layer(INPUTS)
    return layer


def without_count():
    """A layer whose statistics come from software that does not count batches."""
    layer = seen()
    layer.num_batches_tracked.zero_()
    return layer


def frozen():
    """A layer that a builder has put in evaluation mode."""
    return nn.BatchNorm1d(3).eval()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm1d(3, momentum=None), True),
        (seen(), False),
        (seen(momentum=None), False),
        (seen(momentum=0.0), False),  # whose user wants it so
        (without_count(), False),
        (nn.BatchNorm1d(3, track_running_stats=False), False),
        (frozen(), False),
        (nn.GroupNorm(1, 3), False),
    ],
)
def test_unlearnt__is_what_has_the_statistics_of_a_new_layer(layer, expected):
    assert unlearnt(nn.Sequential(nn.Linear(3, 3), layer)) == [layer] * expected


def test_unlearnt__finds_layers_of_a_net_in_evaluation_mode_as_a_whole():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).eval()
    assert unlearnt(net) == list(net)


def test_only_some_statistics_are_measured_behind_those_that_were_learnt(net):
    both = nn.Sequential(net, new := nn.BatchNorm1d(3))
    before, net[0].momentum = buffers_of(net), 0.5
    assert measure_statistics(both, [INPUTS], unlearnt(both)) == 1
    assert same_buffers(net, before)
    assert torch.allclose(new.running_mean, net.eval()(INPUTS).mean(0))
    assert both.training
    assert new.training
    assert net[0].momentum == 0.5


def test_where_nothing_is_to_be_measured_nothing_is_run(net):
    def batches():
        raise AssertionError("asked for a batch")
        yield

    before = buffers_of(net)
    assert measure_statistics(net, batches(), unlearnt(net)) == 0
    assert same_buffers(net, before)


def test_forgotten_statistics_are_those_of_a_new_layer_and_frozen_ones_stay():
    held = seen().eval()
    net = nn.Sequential(nn.Sequential(seen()), held)
    before = buffers_of(held)
    forget_statistics(net)
    assert unlearnt(net) == [net[0][0]]
    assert all(torch.equal(buffer, before[name]) for name, buffer in held.state_dict().items() if name in before)
