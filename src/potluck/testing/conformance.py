"""The contract of methods, as checks that users can run on their own methods."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from potluck.testing.checks.asynchrony import merges_together_what_was_asked_apart
from potluck.testing.checks.classes import asks_nothing_of_classes_that_a_client_lacks, means_the_same_class_everywhere
from potluck.testing.checks.clients import (
    learns_a_toy_task,
    leaves_a_layer_to_its_owners,
    leaves_bystanders_alone,
    lets_go_of_streamed_replies,
    survives_a_missing_reply,
    works_with_newcomers,
    works_with_odd_data,
)
from potluck.testing.checks.networks import (
    cuts_any_network_alike,
    cuts_networks,
    keeps_what_is_frozen,
    leaves_alone_what_nobody_covers,
    reads_named_inputs_alike,
    starts_as_every_method_does,
    trains_no_more_than_fits,
)
from potluck.testing.checks.repeating import (
    agrees_when_stacked,
    does_not_change_the_state_it_is_given,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    is_deterministic,
    leaves_the_global_generator_alone,
    resumes_to_the_same_bytes,
)
from potluck.testing.checks.statements import (
    declares_its_replies,
    documentation_is_complete,
    hyper_parameters_round_trip,
    is_a_frozen_value,
    names_its_variants,
    private_noise_never_repeats,
    sends_what_it_documents,
)
from potluck.testing.checks.subjects import Overrides, Subject
from potluck.testing.exits import predicts_with_exits_as_it_says, shares_its_exits
from potluck.testing.limits import limits_of
from potluck.testing.worlds import assigned


@dataclass(frozen=True)
class Check:
    """A check of one thing that a method must do. `run` raises AssertionError if it does not.

    Attributes:
        name: what it must do, and the variant that must.
        run: carries it out.
        variant: name of the variant; None for the defaults.
    """

    name: str
    run: Callable[[], None]
    variant: str | None = None


def checks_of(method: Subject) -> list[Check]:
    """Every check for a method: the contract's, its variants', and the limits that its documentation states."""
    contract = [Check(check.__name__, partial(check, method)) for check in (*_CONTRACT, *_of_some(method))]
    variants = [
        Check(f"{name}: {check.__name__}", partial(check, method, overrides), name)
        for name, overrides in ((name, assigned(variant)) for name, variant in method.variants.items())
        for check in (*_OF_VARIANTS, *_of_some(method, overrides))
    ]
    limits = [Check(f"limit: {limit.text}", limit.verify) for limit in limits_of(method)]
    return [*contract, *variants, *limits]


def _of_some(method: Subject, overrides: Overrides = ()) -> tuple[Callable[[Subject, Overrides], None], ...]:
    """The checks of those that cut networks which need not be staged, and of those that align clients' own classes."""
    of_cutting = (cuts_any_network_alike,) if cuts_networks(method, overrides) else ()
    aligns = method.aligns_classes
    return of_cutting + (
        (means_the_same_class_everywhere, asks_nothing_of_classes_that_a_client_lacks) if aligns else ()
    )


def check_method(method: Subject) -> None:
    """Run every check.

    Raises:
        AssertionError: the first check that fails, by name.
    """
    for check in checks_of(method):
        try:
            check.run()
        except AssertionError as error:
            raise AssertionError(f"{method.__name__}: {check.name}: {error}") from error


_CONTRACT: tuple[Callable[[Subject], None], ...] = (
    documentation_is_complete,
    is_a_frozen_value,
    hyper_parameters_round_trip,
    names_its_variants,
    is_deterministic,
    private_noise_never_repeats,
    leaves_the_global_generator_alone,
    does_not_change_the_state_it_is_given,
    leaves_bystanders_alone,
    leaves_a_layer_to_its_owners,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    starts_as_every_method_does,
    reads_named_inputs_alike,
    lets_go_of_streamed_replies,
    survives_a_missing_reply,
    works_with_newcomers,
    works_with_odd_data,
    sends_what_it_documents,
    declares_its_replies,
    trains_no_more_than_fits,
    leaves_alone_what_nobody_covers,
    shares_its_exits,
    predicts_with_exits_as_it_says,
    resumes_to_the_same_bytes,
    merges_together_what_was_asked_apart,
    learns_a_toy_task,
)

_OF_VARIANTS: tuple[Callable[[Subject, Overrides], None], ...] = (
    hyper_parameters_round_trip,
    is_deterministic,
    leaves_the_global_generator_alone,
    does_not_change_the_state_it_is_given,
    leaves_bystanders_alone,
    leaves_a_layer_to_its_owners,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    starts_as_every_method_does,
    reads_named_inputs_alike,
    survives_a_missing_reply,
    works_with_newcomers,
    sends_what_it_documents,
    declares_its_replies,
    shares_its_exits,
    predicts_with_exits_as_it_says,
    resumes_to_the_same_bytes,
    merges_together_what_was_asked_apart,
)
"""The checks of a variant: all but `learns_a_toy_task`, which takes long."""
