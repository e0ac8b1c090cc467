import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.nets.splitting import CannotSplit, make_plan
from potluck.core.nets.splitting.plan import EXAMPLES

EXACTLY = {"rtol": 0, "atol": 0}
IMAGES = (3, 12, 12)


class Tutorial(nn.Module):
    """As tutorials have it: functions between layers, and a dropout that asks for the mode."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)[..., :2, :2]
        x = F.dropout(x.flatten(1), 0.5, self.training)
        return self.fc2(F.relu(self.fc1(x)))


class Residual(nn.Module):
    """Its stem ends in place, its blocks add what they were given, and its modules have names that Potluck uses."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.features = nn.ModuleList(Block() for _ in range(2))
        self.split, self.plan, self.net = nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Identity()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.stages(x)
        for block in self.features:
            x = block(x)
        return self.head(self.net(self.split(self.plan(x)).flatten(1)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu_(self.norm(self.conv(x)) + x)


class Repeated(nn.Module):
    """One module is called three times."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = (
            nn.Linear(432, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(3):
            x = self.shared(x)
        return self.last(x)


class Soft(nn.Module):
    """What its last layer puts out is dropped from and made to log-probabilities."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.conv(self.norm(self.stem(x)).relu()).mean((2, 3))
        return F.log_softmax(F.dropout(self.fc(x), 0.5, self.training), 1)


class Branches(nn.Module):
    """Two ways that meet, then two ways to the outputs."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3), nn.Conv2d(4, 3, 1)
        self.join, self.mean, self.top = nn.Identity(), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = self.join(torch.cat([self.left(x), self.right(x)[..., 1:-1, 1:-1]], 1))
        return self.mean(x.mean((2, 3))) + self.top(x.amax((2, 3)))


class Patches(nn.Module):
    """A small transformer over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Linear(36, 8), nn.Parameter(torch.randn(12, 8))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2).flatten(2)) + self.place
        return self.out(self.layers(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Linear(36, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        states, _ = self.lstm(self.embed(x.transpose(1, 2).flatten(2)))
        return self.out(states[:, -1])


class Undecided(nn.Module):
    """Python looks at numbers before the head."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(432, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = self.second(x) if x.abs().sum() >= 0 else x
        return self.last(x.relu())


class Convolutional(nn.Module):
    """Its head is a convolution of kernel 1, as of nets that can be slid over larger images."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classes = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.classes(self.body(x)).flatten(1)


NETS = [Tutorial, Residual, Repeated, Soft, Branches, Patches, Recurrent, Undecided, Convolutional]
every_net = pytest.mark.parametrize("build", NETS)


def made(build, seed=0):
    torch.manual_seed(seed)
    return build()


def images(count=5, seed=1):
    return torch.randn(count, *IMAGES, generator=torch.Generator().manual_seed(seed))


def plan_for(net):
    return make_plan(net, images(EXAMPLES))


def in_parts(net, plan, x):
    run = plan.course.run
    h = run(net, run(net, x, stop=plan.extractor), plan.extractor, plan.features)
    return run(net, h, plan.features)


@every_net
@pytest.mark.parametrize("training", [False, True])
def test_parts__give_what_the_whole_net_gives_with_its_gradients_draws_and_buffers(build, training):
    whole, parts = (made(build).train(training) for _ in range(2))
    plan, outputs, draws = plan_for(parts), [], []
    for net in (whole, parts):
        torch.manual_seed(7)
        outputs.append(net(images()) if net is whole else in_parts(net, plan, images()))
        draws.append(torch.rand(1))
        outputs[-1].square().sum().backward()
    assert_close(outputs[1], outputs[0], **({"rtol": 1e-5, "atol": 1e-6} if build is Patches else EXACTLY))
    assert_close(draws[1], draws[0], **EXACTLY)
    for mine, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, **({"rtol": 1e-4, "atol": 1e-5} if build is Patches else EXACTLY))
    for mine, theirs in zip(parts.buffers(), whole.buffers(), strict=True):
        assert_close(mine, theirs, **EXACTLY)


@every_net
def test_parts__every_proven_place_leads_to_the_outputs(build):
    net = made(build).eval()
    plan = plan_for(net)
    *tensors, outputs = plan.course.at(net, images(), *plan.places)
    for place, x in zip(plan.places, tensors, strict=True):
        assert tuple(x.shape[1:]) == place.shape
        found = plan.course.run(net, x.detach().clone(), place)
        assert_close(found, outputs, rtol=1e-5, atol=1e-6, msg=lambda text, place=place: f"{place}: {text}")


@pytest.mark.parametrize(
    ("build", "ends", "reads", "head"),
    [
        (Tutorial, "<conv2", "<fc2", "fc2"),
        (Residual, "stages", "<head", "head"),
        (Repeated, "first", "<last", "last"),
        (Soft, "<conv", "<fc", None),
        (Branches, "stem", "join", None),
        (Patches, "embed", "<out", "out"),
        (Recurrent, "embed", "<out", "out"),
        (Undecided, "first", "<last", "last"),
        (Convolutional, "body.1", "<classes", None),
    ],
)
def test_plan__ends_the_extractor_at_the_first_layers_end_and_takes_what_the_last_layer_reads(build, ends, reads, head):
    plan = plan_for(made(build))
    assert (str(plan.extractor), str(plan.features), plan.head) == (ends, reads, head)


@pytest.mark.parametrize(("cut", "found"), [(["conv2", "fc1"], ("conv2", "<fc1")), (["<fc1", "fc1#1"], None)])
def test_plan__ends_where_the_user_says(cut, found):
    if found is None:
        with pytest.raises(CannotSplit, match=r"what 'fc1#1' reads; expected one of: conv1, <conv2, conv2, <fc1, fc1"):
            make_plan(made(Tutorial), images(EXAMPLES), cut)
        return
    net = made(Tutorial).eval()
    plan = make_plan(net, images(EXAMPLES), cut)
    assert (str(plan.extractor), str(plan.features), plan.head) == (*found, None)
    assert plan.names(None, plan.extractor) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    assert_close(in_parts(net, plan, images()), net(images()), **EXACTLY)


def test_plan__refuses_an_extractor_behind_the_head():
    with pytest.raises(CannotSplit, match="cut: fc1 does not come before conv2"):
        make_plan(made(Tutorial), images(EXAMPLES), ["fc1", "conv2"])


def test_plan__looking_at_a_net_leaves_it_and_all_draws_alone():
    net = made(Residual).train()
    before, draws = copy.deepcopy(net.state_dict()), torch.default_generator.get_state()
    plan_for(net)
    assert all(module.training and "_call_impl" not in module.__dict__ for module in net.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert torch.equal(torch.default_generator.get_state(), draws)
    for name, tensor in net.state_dict().items():
        assert_close(tensor, before[name], **EXACTLY)


def test_plan__a_part_that_starts_behind_the_inputs_draws_nothing_before_it_and_moves_no_statistics_there():
    net = made(Residual).train()
    plan = plan_for(net)
    with torch.no_grad():
        h = plan.course.run(net, images(), stop=plan.extractor)
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        plan.course.run(net, h, plan.extractor)
    moved = {name for name, buffer in net.named_buffers() if not torch.equal(buffer, before[name])}
    assert moved == {name for name in before if name.startswith("features.")}
    assert not any("_call_impl" in module.__dict__ for module in net.modules())


def test_plan__an_operation_in_place_behind_a_place_does_not_change_what_was_received():
    net = made(Residual).eval()
    plan = plan_for(net)
    (received,) = (place for place in plan.places if str(place) == "stages.1")
    x, outputs = plan.course.at(net, images(), received)
    assert received.changed, "the ReLU behind it works in place"
    assert bool((x < 0).any())
    before = x.clone()
    assert_close(plan.course.run(net, x, received), outputs, **EXACTLY)
    assert_close(x, before, **EXACTLY)


def test_plan__a_tensor_that_a_local_variable_hands_on_is_no_place_to_start_from():
    class Handed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.head = nn.Linear(4, 4)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.first(x).relu()
            return self.head((x + self.second(x)).mean((2, 3)))

    plan = plan_for(made(Handed))
    assert [str(place) for place in plan.places] == ["stem", "<head"]
    assert plan.left_out[0].startswith("<second: ")


class Written(nn.Module):
    """Has the size of its batch written into it."""

    def forward(self, x):
        return x.reshape(2, 4, -1).mean(2)


class Failing(nn.Module):
    """Wants something that nobody gives it."""

    def forward(self, x):
        return x.flatten(1) * {}["mask"]


class Table(nn.Module):
    """Puts out a table."""

    def forward(self, x):
        return {"logits": x.flatten(1)[:, :4]}


class Constant(nn.Module):
    """Does not look at its inputs."""

    def forward(self, x):
        return torch.zeros(len(x), 4)


class Counting(nn.Module):
    """Its course depends on how many examples there are."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(432, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(x) if len(x) == 2 else self.last(x + self.first.bias).relu()


class Drawing(nn.Module):
    """Puts out something else each time."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(432, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.second(self.first(x.flatten(1)).relu() * self.calls).relu() * self.calls)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Written(), r"its outputs do not have one row for each example"),
        (Failing(), r"its forward cannot be followed: KeyError: 'mask'; .*test_plan\.py, line \d+"),
        (Table(), r"it puts out dict; expected a tensor"),
        (Constant(), r"its outputs do not depend on its inputs"),
        (nn.Sequential(nn.Flatten(), nn.Linear(432, 4)), r"no layer with weights reads all that its outputs are"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(432, 4), nn.Linear(4, 4)),
            r"it has one layer with weights before its head",
        ),
        (Drawing(), r"it puts out something else when it is called again with the same inputs in evaluation mode"),
    ],
)
def test_plan__says_in_one_line_why_there_is_none(net, expected):
    with pytest.raises(CannotSplit, match=expected) as found:
        plan_for(net)
    assert "\n" not in str(found.value)


def test_plan__of_a_net_with_two_heads_what_both_read_are_the_features_and_no_head_can_be_taken_out():
    plan = plan_for(made(Branches))
    assert plan.names(plan.features, None) == {"mean.weight", "mean.bias", "top.weight", "top.bias"}
    assert plan.head_problem() == "what comes behind join reads features of shape (6, 8, 8)"


def test_plan__of_tied_weights_no_head_can_be_taken_out():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.first, self.second, self.last = (nn.Linear(*n) for n in ((432, 4), (4, 4), (4, 4), (4, 4)))
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.second(self.first(self.flat(x.flatten(1)).relu()).relu()).relu())

    assert plan_for(made(Tied)).head_problem() == "its first.weight is used before it, too"


@every_net
def test_plan__is_one_for_all_nets_of_the_architecture(build):
    plan, other = plan_for(made(build)), made(build, seed=3).eval()
    assert copy.deepcopy(plan) is plan
    assert_close(in_parts(other, plan, images(2)), other(images(2)), rtol=1e-5, atol=1e-6)


def test_plan__of_a_net_with_nothing_but_functions_before_its_head_ends_the_extractor_at_its_one_layer():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))
    plan = plan_for(net)
    assert (str(plan.extractor), str(plan.features), plan.head) == ("0", "<4", "4")
    assert plan.names(plan.extractor, plan.features) == frozenset()


class Vectors(nn.Module):
    """A net of images as vectors, whose middle a subclass says."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(432, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.middle(self.stem(x.flatten(1)).relu()).relu())


class Beginning(Vectors):
    """A branch has no weight yet, and is computed from what a local variable hands on."""

    def __init__(self):
        super().__init__()
        self.skip, self.alpha = nn.Identity(), nn.Parameter(torch.zeros(()))

    def middle(self, x):
        x = x + self.first(x)
        return self.skip(x) + self.alpha * self.second(x)


class Experts(Vectors):
    """Each example goes through one of two layers."""

    def middle(self, x):
        y, mine = torch.zeros_like(x), x[:, 0] > 0.1
        y[mine], y[~mine] = self.first(x[mine]), self.second(x[~mine])
        return y + x


class Dropping(Vectors):
    """Leaves out layers at random, in training."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def middle(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.3:
                x = layer(x)
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("build", [Beginning, Experts, Dropping])
@pytest.mark.parametrize("seed", range(3))
def test_plan__holds_for_other_weights_other_examples_and_other_draws(build, seed):
    net = made(build, seed)
    plan = plan_for(net)
    assert str(plan.features) == "<head"
    assert not any(place.path.startswith(("skip", "first", "layers")) for place in plan.places if build is not Dropping)
    assert not any(place.path.startswith("layers") for place in plan.places)
    with torch.no_grad():
        for weight in net.parameters():
            weight += torch.randn_like(weight)
    *tensors, outputs = plan.course.at(net.eval(), images(7, seed=5), *plan.places)
    for place, x in zip(plan.places, tensors, strict=True):
        assert_close(plan.course.run(net, x, place), outputs, rtol=1e-5, atol=1e-5)
    for _ in range(10):
        plan.course.at(net.train(), images(7), *plan.places)


class Masked(nn.Module):
    """A transformer that is told which rows count."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.embed, self.layers, self.out = nn.Linear(36, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, x):
        mask = torch.arange(12).expand(len(x), -1) > 9
        return self.out(self.layers(self.embed(x.transpose(1, 2).flatten(2)), src_key_padding_mask=mask).mean(1))


def test_plan__an_expert_who_gets_all_examples_that_are_looked_at_is_not_taken_for_a_layer():
    net = made(Experts, seed=3).eval()
    plan = plan_for(net)
    assert [str(place) for place in plan.places] == ["stem", "<head"]
    assert (plan.middle_problem or "").startswith("cannot go on from <head: NotImplementedError: ")
    extracted, features, outputs = plan.passed(net, images())
    assert_close(extracted, net.stem(images().flatten(1)), **EXACTLY)
    assert_close(net.head(features), net(images()), **EXACTLY)
    assert_close(outputs, net(images()), **EXACTLY)


def test_plan__of_a_transformer_with_a_mask_is_made_without_torchs_other_way_to_attention():
    net = made(Masked).eval()
    plan = plan_for(net)
    assert (str(plan.extractor), str(plan.features)) == ("embed", "<out")
    assert_close(in_parts(net, plan, images()), plan.course.at(net, images())[-1], **EXACTLY)
    assert_close(in_parts(net, plan, images()), net(images()), rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


class TwoInTraining(Vectors):
    """Puts out something besides, in training."""

    def forward(self, x):
        x = self.second(self.first(self.stem(x.flatten(1))))
        return (self.head(x), x) if self.training else self.head(x)


def uncopied():
    net = nn.Sequential(nn.Flatten(), nn.Linear(432, 4), nn.Linear(4, 4))
    net[1].held = (net[1].weight * 2,)  # torch copies no tensor that is computed from others
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (TwoInTraining(), r"^it puts out tuple in training mode; expected a tensor$"),
        (uncopied(), r"^its forward cannot be followed: RuntimeError: Only Tensors created explicitly"),
    ],
)
def test_plan__says_of_other_nets_why_there_is_none(net, expected):
    with pytest.raises(CannotSplit, match=expected):
        plan_for(net)


@pytest.mark.parametrize("of", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_plan__a_parametrised_last_layer_is_a_head_like_any_other(of):
    net = made(lambda: nn.Sequential(nn.Flatten(), nn.Linear(432, 4), nn.Linear(4, 4), nn.ReLU(), of(nn.Linear(4, 4))))
    plan = plan_for(net)
    assert (str(plan.features), plan.head) == ("<4", "4")


def test_plan__a_place_that_a_pass_does_not_come_to_is_said_and_no_number_made_up_gets_out():
    class Shortened(Vectors):
        shortened = False

        def middle(self, x):
            return x if self.shortened else self.second(self.first(x).relu())

    net = made(Shortened).eval()
    plan = plan_for(net)
    place = next(place for place in plan.places if str(place) == "first")
    net.shortened = True
    for of in (place, replace(place, by_value=True)):
        with pytest.raises(CannotSplit, match="first was not reached"):
            plan.course.run(net, torch.zeros(5, 4), of)
    with pytest.raises(CannotSplit, match="first was not reached"):
        plan.course.at(net, images(), place)
