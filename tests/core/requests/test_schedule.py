import pytest

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (Schedule(), [1, 1, 1, 1, 1]),
        (Schedule("exponential", factor=0.5), [1, 0.5, 0.25, 0.125, 0.0625]),
        (Schedule("steps", factor=0.1, milestones=(1, 3)), [1, 0.1, 0.1, 0.01, 0.01]),
        (Schedule("cosine", rounds=4), [1, 0.8535534, 0.5, 0.1464466, 0.1464466]),
        (Schedule("cosine", rounds=1), [1, 1, 1, 1, 1]),
    ],
)
def test_share__follows_the_rule_from_round_to_round(schedule, shares):
    assert [schedule.share(number) for number in range(1, 6)] == pytest.approx(shares)
    assert schedule.share(0) == 1  # before the first round as in it


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rule": "exponentail", "factor": 0.5}, "rule: .*nearest: 'exponential'"),
        ({"rule": "exponential"}, "factor: expected a value, which the rule 'exponential' needs, found None"),
        ({"rule": "steps", "factor": 0.1}, "milestones: expected a value"),
        ({"rule": "steps", "milestones": (3,)}, "factor: expected a value"),
        ({"rule": "cosine"}, "rounds: expected a value"),
        ({"factor": 0.5}, "factor: expected nothing, as it belongs to the rule 'exponential' or 'steps', found 0.5"),
        ({"rule": "cosine", "rounds": 3, "milestones": (1,)}, "milestones: expected nothing"),
        ({"rule": "exponential", "factor": 0.5, "rounds": 3}, "rounds: expected nothing"),
        ({"rule": "exponential", "factor": 1.5}, "factor: expected above 0 and at most 1"),
        ({"rule": "exponential", "factor": float("nan")}, "factor: expected a finite number"),
        ({"rule": "steps", "factor": 0.1, "milestones": (3, 1)}, "milestones: expected different rounds, ascending"),
        ({"rule": "steps", "factor": 0.1, "milestones": (0,)}, "milestones.0: expected at least 1, found 0"),
        ({"rule": "cosine", "rounds": 0}, "rounds: expected at least 1, found 0"),
    ],
)
def test_schedule__refuses_what_its_rule_does_not_know_by_name(changes, complaint):
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        Schedule(**changes)


def test_at__is_the_training_of_one_round_whose_rate_stays():
    training = LocalTraining(lr=0.5, epochs=3, schedule=Schedule("exponential", factor=0.1))
    third = training.at(3)
    assert (third.lr, third.epochs) == (pytest.approx(0.005), 3)
    assert third.at(7) == third
    assert LocalTraining().at(9) == LocalTraining()
