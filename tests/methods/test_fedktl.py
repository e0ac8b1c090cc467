"""FedKTL: the angles, the alignment, the generator and its pairs, and what clients learn from them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need
from potluck.core.nets.weights import buffers_of, parameters_of, weights_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedktl import Alignment, AlignmentLoss, FedKTL, TransferLoss
from potluck.parts.angles import cosines
from potluck.parts.cvae import AutoencoderLoss
from potluck.parts.kernels import discrepancy

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.05, epochs=3, batch_size=64)  # three full steps
CLASSES, FEATURES, LATENT = 3, 6, 5
SMALL = {
    "generator_training": LocalTraining(lr=0.01, epochs=3, batch_size=16),
    "server_training": LocalTraining(lr=0.01, epochs=5, batch_size=16),
    "latent": LATENT,
    "hidden": 16,
}


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def features(net, inputs):
    return net.pool(net.stages(inputs))


def generated(run, state, vectors):
    """What the stored generator makes of vectors, layer by layer."""
    one, two = ((state.generator[f"{n}.weight"], state.generator[f"{n}.bias"]) for n in (1, 3))
    return F.linear(F.linear(vectors, *one).relu(), *two)


def transformed(state, prototypes):
    """F in evaluation mode, layer by layer."""
    t = {name.removeprefix("transformer."): tensor for name, tensor in state.alignment.items()}
    h = F.linear(prototypes, t["0.weight"])
    h = (h - t["1.running_mean"]) / (t["1.running_var"] + 1e-5).sqrt() * t["1.weight"] + t["1.bias"]
    return F.linear(h.relu(), t["3.weight"], t["3.bias"])


def gathered(run):
    """All prototypes of the last round and their classes."""
    found = [(p, c) for reply in replied(run).values()
             for p, c in zip(reply["prototypes"], reply["counts"].nonzero().flatten(), strict=True)]  # fmt: skip
    return torch.stack([p for p, _ in found]), torch.stack([c for _, c in found])


# Angles


def test_cosines__are_those_of_a_simplex_whose_directions_are_equally_far_apart():
    found = cosines(3.0 * torch.eye(4))
    matrix = math.sqrt(4 / 3) * (torch.eye(4) - 0.25)
    assert_close(
        matrix @ matrix.T, torch.full((4, 4), -1 / 3).fill_diagonal_(1.0)
    )  # lengths 1, angles as wide as can be
    assert_close(found, matrix)
    outputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    by_hand = [[float(z @ v / z.norm()) for v in matrix] for z in outputs]
    assert_close(cosines(outputs), torch.tensor(by_hand))
    assert_close(cosines(outputs).argmax(1), outputs.argmax(1))


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_transfer_loss__adds_the_margin_to_the_angle_of_the_own_class(margin):
    torch.manual_seed(0)
    net = nn.ModuleDict({"model": nn.Linear(4, CLASSES)})
    batch = Batch(torch.randn(5, 4), torch.tensor([0, 1, 2, 2, 0]), {})
    expected = []
    for row, label in zip(cosines(net["model"](batch.inputs)).tolist(), batch.targets.tolist(), strict=True):
        scores = [8.0 * (math.cos(math.acos(c) + margin) if place == label else c) for place, c in enumerate(row)]
        expected.append(math.log(sum(map(math.exp, scores))) - scores[label])
    found = TransferLoss(F.cross_entropy, 8.0, margin, 50.0)(net, batch, {"pairs": None})
    assert_close(found.item(), sum(expected) / 5, rtol=1e-5, atol=0)


def test_transfer_loss__has_a_finite_gradient_where_outputs_meet_their_direction_exactly():
    net = nn.ModuleDict({"model": nn.Linear(CLASSES, CLASSES, bias=False)})
    with torch.no_grad():
        net["model"].weight.copy_(torch.eye(CLASSES))
    batch = Batch(torch.tensor([[2.0, -1.0, -1.0], [-2.0, 1.0, 1.0]]), torch.tensor([0, 0]), {})
    loss = TransferLoss(F.cross_entropy, 64.0, 0.5, 50.0)(net, batch, {"pairs": None})
    (gradient,) = torch.autograd.grad(loss, net["model"].weight)
    assert loss.isfinite()
    assert gradient.isfinite().all()


# What the server trains


@pytest.mark.parametrize("centres", ["means", "learnt"])
def test_a_prototype_that_changes_by_rounding_moves_no_centre_by_much_more(play, clouds, centres):
    """With as many steps of Adam as by default, each of which turns a gradient into one step, however small it is."""
    method = FedKTL(**{**SMALL, "centres": centres, "server_training": FedKTL().server_training})
    run = play(method, replace(clouds("mlp2", "mlp3"), num_classes=10), rounds=0)
    values = F.normalize(torch.randn(24, 10, generator=torch.Generator().manual_seed(0)))
    nudged = values.clone()
    nudged[3, 4] += 1e-7
    found = []
    for prototypes in (values, nudged):
        server = run.engine.server(1)
        alignment = method._alignment(server, run.state.alignment)
        method._align(alignment, {"values": prototypes, "labels": torch.arange(24) % 10}, server)
        found.append(alignment.centres.weight.detach().clone())
    assert found[0].norm(dim=1).mean() > 0.2
    assert (found[1] - found[0]).abs().max() < 1e-5


def test_discrepancy__is_the_mean_of_four_kernels_within_less_that_between():
    torch.manual_seed(0)
    x, y = torch.randn(3, 2), torch.randn(4, 2) + 1

    def kernel(a, b):
        return sum(math.exp(-float((a - b).square().sum()) / (2 * width)) for width in (10, 15, 20, 50))

    def mean(left, right):
        return sum(kernel(a, b) for a in left for b in right) / (len(left) * len(right))

    assert_close(discrepancy(x, y).item(), mean(x, x) + mean(y, y) - 2 * mean(x, y), rtol=1e-4, atol=1e-7)
    assert abs(discrepancy(x, x)) < 1e-6


def test_discrepancy__falls_on_the_way_to_the_distribution():
    torch.manual_seed(0)
    y = torch.randn(200, LATENT)
    near, nearer = (discrepancy(torch.randn(200, LATENT) * 0.2 + shift, y) for shift in (3.0, 1.0))
    assert nearer < near


def test_alignment_loss__is_the_discrepancy_from_new_draws_and_the_distance_to_the_centres():
    torch.manual_seed(0)
    net, batch = Alignment(CLASSES, LATENT), Batch(torch.randn(4, CLASSES), torch.tensor([0, 2, 1, 0]), {})
    q = net(batch.inputs)
    torch.manual_seed(1)
    z = torch.randn(4, LATENT)
    apart = ((q - net.centres.weight[batch.targets]) ** 2).sum() / q.numel()
    torch.manual_seed(1)
    assert_close(AlignmentLoss(0.3)(net, batch, {}), discrepancy(q, z) + 0.3 * apart)


def test_autoencoder_loss__is_half_the_squared_error_and_the_divergence_from_the_standard_normal():
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)
    inputs = torch.randn(8, FEATURES)
    m, s = encoder(inputs).chunk(2, 1)
    torch.manual_seed(1)
    u = m + (s / 2).exp() * torch.randn(8, 2)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(m, (s / 2).exp()), normal(0.0, 1.0)).sum(1)
    expected = (((inputs - decoder(u)) ** 2).sum(1) / 2 + 0.2 * kl).mean()
    torch.manual_seed(1)
    net = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    assert_close(AutoencoderLoss(0.2)(net, Batch(inputs, torch.zeros(8), {}), {}), expected)


def test_the_generator_learns_the_public_data_once(play, clouds):
    """What it makes of draws from its latent distribution comes to be spread as the public data are, and stays so."""
    federation = clouds("mlp2", public=200)
    rough = federation.public.inputs @ torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(3))
    federation = replace(federation, public=Examples(rough + 4.0, torch.zeros(200, dtype=torch.int64)))
    options = {**SMALL, "generator_training": LocalTraining(lr=0.01, epochs=40, batch_size=32), "hidden": 32}
    run = play(FedKTL(STILL, **options), federation, rounds=2)
    untrained = play(FedKTL(STILL, **{**options, "generator_training": STILL}), federation)
    z = torch.randn(2000, LATENT, generator=torch.Generator().manual_seed(0))

    def gap(of):
        made = generated(of, of.states[1], z)
        means = (made.mean(0) - federation.public.inputs.mean(0)).square().mean()
        return means + (made.T.cov() - federation.public.inputs.T.cov()).square().mean().sqrt()

    assert gap(run) < 0.3 * gap(untrained)
    assert_close(run.states[2].generator, run.states[1].generator, **EXACTLY)


def test_public_data_are_not_augmented_for_the_generator(play, clouds):
    plain = clouds("mlp2", public=30)
    public = replace(plain.public, preprocess=lambda inputs, rng: inputs if rng is None else 100 * inputs)
    one, other = (
        play(FedKTL(STILL, **SMALL), federation).state.generator
        for federation in (plain, replace(plain, public=public))
    )
    assert_close(one, other, **EXACTLY)


def test_pairs_are_what_the_stored_generator_makes_of_the_centres_of_transformed_prototypes(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", "norm3", public=40, labels=((0, 2), (2, 0))), rounds=2)
    prototypes, labels = gathered(run)
    assert labels.tolist() == [0, 2, 0, 2]
    q = transformed(run.state, prototypes)
    vectors = torch.stack([q[labels == label].mean(0) for label in (0, 2)])
    assert_close(run.state.pairs["vectors"], vectors)
    assert_close(run.state.pairs["images"], generated(run, run.state, vectors))
    assert run.state.known.tolist() == [True, False, True]


def test_learnt_centres_are_drawn_to_the_prototypes_and_never_set_to_their_means(play, clouds):
    federation = clouds("mlp2", "mlp3", public=40, labels=((0, 1), (1, 0)))
    run = play(FedKTL(STILL, **SMALL, centres="learnt"), federation)
    q = transformed(run.state, gathered(run)[0])
    vectors = run.state.pairs["vectors"]
    assert_close(vectors, run.state.alignment["centres.weight"][:2], **EXACTLY)
    assert not torch.allclose(vectors[0], (q[0] + q[2]) / 2, atol=0.1)
    longer = {**SMALL, "server_training": LocalTraining(lr=0.05, epochs=100, batch_size=16)}
    far = play(FedKTL(STILL, **longer, centres="learnt"), federation)
    near = transformed(far.state, gathered(far)[0]) - far.state.pairs["vectors"].repeat(2, 1)  # of classes 0, 1, 0, 1
    assert near.square().mean() < (q - vectors.repeat(2, 1)).square().mean() / 4
    assert_close(run.state.alignment["centres.weight"][2], run.states[0].alignment["centres.weight"][2], **EXACTLY)


def test_clients_are_sent_the_last_rounds_pairs_and_none_in_the_first(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", "mlp3", public=40), rounds=2)
    assert run.reports[0].traffic.down == {}
    for message in sent(run).values():
        assert_close(message["pairs"], run.states[1].pairs, **EXACTLY)
    assert message["pairs"]["images"].shape == (CLASSES, FEATURES)


def test_without_transfer_no_pairs_are_sent(play, clouds):
    run = play(FedKTL(STILL, transfer=0.0, **SMALL), clouds("mlp2", public=30), rounds=2)
    assert all("pairs" not in message for message in sent(run).values())


def test_clients_keep_no_projector(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", public=30), rounds=2)
    assert all("pairs" in message for message in sent(run).values())
    assert not run.kept(0).get("modules")


def test_prototypes_come_to_lie_by_their_class_among_the_latent_vectors(play, clouds):
    options = {**SMALL, "server_training": LocalTraining(lr=0.02, epochs=200, batch_size=64)}
    run = play(FedKTL(LocalTraining(lr=0.02, epochs=40), **options), clouds("mlp2", "mlp3", "norm2", public=40))
    still = play(FedKTL(STILL, **{**options, "server_training": STILL}), clouds("mlp2", "mlp3", "norm2", public=40))
    (mine, labels), (_, _) = gathered(run), gathered(still)
    z = torch.randn(500, LATENT, generator=torch.Generator().manual_seed(0))
    q = transformed(run.state, mine)
    before = transformed(still.state, mine)
    assert discrepancy(q, z) < discrepancy(before, z)
    centres = torch.stack([q[labels == label].mean(0) for label in range(CLASSES)])
    assert torch.cdist(q, centres).argmin(1).tolist() == labels.tolist()


def test_a_class_keeps_its_centre_while_its_clients_are_away(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", "mlp2", public=40, labels=((0, 1), (2, 1))), rounds=0)
    run.round(0)
    assert len(run.state.pairs["vectors"]) == 2
    run.round(1)
    assert run.state.known.all()
    assert_close(run.state.pairs["vectors"][0], run.states[1].pairs["vectors"][0])
    assert not torch.allclose(run.state.pairs["vectors"][1], run.states[1].pairs["vectors"][1])


def test_the_transformer_goes_on_from_where_it_was(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", "mlp3", public=40))
    method = replace(run.engine.method, server_training=STILL)
    still = play(method, clouds("mlp2", "mlp3", public=40), rounds=0)
    still.states = [run.state]
    still.round()
    assert_close(
        {n: t for n, t in still.state.alignment.items() if n in parameters_of(Alignment(CLASSES, LATENT)) and "0" in n},
        {n: t for n, t in run.state.alignment.items() if n in parameters_of(Alignment(CLASSES, LATENT)) and "0" in n},
        **EXACTLY,
    )


def test_one_prototype_alone_trains_no_transformer_but_has_a_pair(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", public=40, labels=((1,),)))
    first = {name: tensor for name, tensor in run.states[0].alignment.items() if name.startswith("transformer")}
    assert_close({name: run.state.alignment[name] for name in first}, first, **EXACTLY)
    assert run.state.pairs["images"].shape == (1, FEATURES)
    assert run.state.pairs["images"].isfinite().all()


def test_a_prototype_counts_no_more_for_being_long(play, clouds):
    run = play(FedKTL(STILL, **SMALL), clouds("mlp2", "mlp3", public=40), rounds=1)
    rows, method = {}, run.engine.method
    rows["values"], rows["labels"] = gathered(run)
    found = []
    for factor in (1.0, 2.0**20):
        server = run.engine.server(1)
        net = method._alignment(server)
        method._align(net, {**rows, "values": rows["values"] * factor}, server)
        found.append(weights_of(net))
    assert_close(*found, **EXACTLY)


# Clients


def test_clients_report_the_mean_directions_of_their_outputs(play, clouds):
    federation = clouds("norm2", "mlp3", public=40, labels=((0, 2), (0, 1, 2)))
    run = play(FedKTL(FULL, **SMALL), federation)
    for id, site in federation.sites.items():
        outputs, labels = run.model(id).net.eval()(site.train.inputs).detach(), site.train.labels
        directions = outputs / outputs.norm(dim=1, keepdim=True)
        expected = torch.stack([directions[labels == label].mean(0) for label in labels.unique()])
        assert_close(replied(run)[id]["prototypes"], expected / expected.norm(dim=1, keepdim=True))
        assert replied(run)[id]["counts"].tolist() == labels.bincount(minlength=CLASSES).tolist()


def test_local_training_descends_the_own_loss_and_the_distance_of_pairs(play, clouds):
    """Of 12 examples, four go with each of three pairs, so a full batch has the mean over all pairs."""
    federation = clouds("mlp2", public=40)
    run = play(FedKTL(FULL, **SMALL, transfer=2.0, scale=4.0, margin=0.2), federation)
    net, pairs = run.model(0).net, run.state.pairs
    run.round()
    projector = torch.nn.Linear(8, LATENT)
    built = run.engine.server(0).module("projector", lambda: nn.Linear(8, LATENT))
    projector.load_state_dict(built.state_dict())
    examples, weights = federation.sites[0].train, [*net.parameters(), *projector.parameters()]
    for _ in range(3):
        cosine = cosines(net(examples.inputs))
        own = F.one_hot(examples.labels, CLASSES).bool()
        scores = 4.0 * torch.where(own, (cosine.acos() + 0.2).cos(), cosine)
        gap = ((projector(features(net, pairs["images"])) - pairs["vectors"]) ** 2).mean()
        gradients = torch.autograd.grad(F.cross_entropy(scores, examples.labels) + 2.0 * gap, weights)
        with torch.no_grad():
            for parameter, gradient in zip(weights, gradients, strict=True):
                parameter -= 0.05 * gradient
    assert_close(parameters_of(run.model(0).net), parameters_of(net))


@pytest.mark.usefixtures("uncounted")
def test_every_pair_has_an_equal_share_of_a_clients_examples(play, clouds, monkeypatch):
    seen = []
    plain = TransferLoss.__call__

    def watched(self, net, batch, extras):
        seen.append(batch.columns.get("pair"))
        return plain(self, net, batch, extras)

    monkeypatch.setattr(TransferLoss, "__call__", watched)
    training = LocalTraining("sgd", lr=0.01, batch_size=7)
    run = play(FedKTL(training, **SMALL), clouds("mlp2", sizes=(20,), public=40), rounds=2)
    assert run.reports
    whole = torch.cat(seen[3:])
    assert seen[0] is None
    assert sorted(whole.bincount(minlength=CLASSES).tolist()) == [6, 7, 7]


def test_generated_inputs_leave_running_statistics_alone(play, clouds):
    federation = clouds("norm2", public=40)
    run = play(FedKTL(STILL, **SMALL), federation)
    other = play(FedKTL(STILL, **SMALL, transfer=0.0), federation)
    for one in (run, other):
        one.round()
    assert_close(buffers_of(run.model(0).net), buffers_of(other.model(0).net), **EXACTLY)


def test_pairs_bring_a_clients_features_nearer_to_the_vectors(play, clouds):
    """A step brings what the projector makes of them nearer than at a client whose step does without the pairs."""
    federation, distances = clouds("mlp2", public=60), []
    training = LocalTraining("sgd", lr=0.01, epochs=1, batch_size=12)
    for transfer in (1.0, 0.0):
        run = play(FedKTL(training, **SMALL, transfer=transfer), federation, rounds=0)
        run.states = [replace(run.state, **_known())]
        run.round()
        pairs, net = run.states[0].pairs, run.model(0).net
        projector = run.engine.server(0).module("projector", lambda: nn.Linear(8, LATENT))  # as it began
        distances.append(F.mse_loss(projector(features(net, pairs["images"])), pairs["vectors"]).item())
    assert distances[0] < distances[1]


def _known():
    generator = torch.Generator().manual_seed(5)
    pairs = {
        "images": torch.randn(CLASSES, FEATURES, generator=generator),
        "vectors": torch.randn(CLASSES, LATENT, generator=generator),
    }
    return {"pairs": pairs, "known": torch.ones(CLASSES, dtype=torch.bool)}


def test_a_newcomer_of_another_width_is_sent_pairs_and_predicts_before_it_takes_part(play, clouds):
    run = play(FedKTL(FULL, **SMALL), clouds("mlp2", "mlp2", "wide2", public=40), rounds=0)
    run.round(0, 1)
    outputs = run.model(2)(torch.randn(5, FEATURES))
    assert outputs.shape == (5, CLASSES)
    assert outputs.isfinite().all()
    run.round(2)
    assert_close(sent(run)[2]["pairs"], run.states[1].pairs, **EXACTLY)
    assert not torch.equal(run.state.pairs["vectors"], run.states[1].pairs["vectors"])


def test_outputs_are_scaled_cosines_which_predict_what_the_net_does(play, clouds):
    run = play(FedKTL(FULL, **SMALL, scale=10.0), clouds("mlp2", public=40))
    x, model = torch.randn(20, FEATURES), run.model(0)
    assert_close(model(x), 10.0 * cosines(model.net(x)))
    assert_close(model(x).argmax(1), model.net(x).argmax(1))


def test_needs_and_ranges():
    assert FedKTL().needs() == {Need.PUBLIC_DATA, Need.CLASSES, Need.SPLIT_MODEL, Need.REAL_INPUTS}
    for options, expected in (
        ({"transfer": -1.0}, "transfer: expected at least 0"),
        ({"latent": 0}, "latent: expected at least 1"),
        ({"server_training": LocalTraining(batch_size=1)}, r"server_training\.batch_size: expected at least 2"),
    ):
        with pytest.raises(ValueError, match=expected):
            replace(FedKTL(), **options)


def test_an_optimiser_that_lasts_is_refused_where_a_layer_begins_anew():
    lasting = LocalTraining(persist=True)
    with pytest.raises(ConfigError, match=r"^training\.persist: expected False unless transfer is 0, .*, found True$"):
        FedKTL(lasting)
    assert FedKTL(lasting, transfer=0.0).training.persist
