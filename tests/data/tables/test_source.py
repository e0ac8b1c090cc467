"""Tables as data sets: what users rely on, each claim on a small file."""

import numpy as np
import pandas as pd
import pytest
import torch

from potluck.core.ground.errors import ConfigError, DataError, PotluckWarning
from potluck.core.tasks.named import task_named
from potluck.data.datasets import common_reading, describe, load
from potluck.data.tables.columns import MOST_DIFFERENT, Columns
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve

ROWS = pd.DataFrame(
    {
        "patient": [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6],
        "site": ["north", "south"] * 6,
        "age": [30.0, 40, 50, 60, 30, 40, 50, 60, 30, 40, 50, 60],
        "ward": [1, 2, 3] * 4,
        "sex": ["f", "m", "m"] * 4,
        "outcome": ["well", "ill"] * 6,
    }
)
COLUMNS = Columns(target="outcome", inputs=("age", "ward", "sex"), names=("ward",))


@pytest.fixture
def table(tmp_path):
    """Writes a table, or one for training and one for tests; gives its path."""

    def write(rows=ROWS, test=None, name="table.csv"):
        if test is None:
            rows.to_csv(tmp_path / name, index=False)
            return tmp_path / name
        folder = tmp_path / "folder"
        folder.mkdir()
        rows.to_csv(folder / "train.csv", index=False)
        test.to_csv(folder / "test.csv", index=False)
        return folder

    return write


def test_numbers_are_standardised_over_the_training_rows_and_names_are_ones_among_zeros(table):
    test = ROWS.iloc[:2].assign(age=[45.0, 56.0])
    found = load(table(ROWS, test), columns=COLUMNS)
    age = ROWS.age.to_numpy()
    assert found.train_inputs.dtype == torch.float32
    np.testing.assert_allclose(found.train_inputs[:, 0], (age - age.mean()) / age.std(), rtol=1e-6)
    np.testing.assert_allclose(found.test_inputs[:, 0], (np.array([45.0, 56.0]) - age.mean()) / age.std(), rtol=1e-6)
    assert found.train_inputs[:3, 1:].tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [0, 0, 1, 0, 1]]
    assert found.classes == ("ill", "well")
    assert found.train_targets[:2].tolist() == [1, 0]
    assert found.description.input_shape == (6,)


def test_by_default_all_columns_are_inputs_that_are_nothing_else(table):
    columns = Columns(target="outcome", by="site", group="patient", names=("ward",))
    assert describe(table(), columns=columns).input_shape == (6,)


def test_a_file_of_parquet_gives_the_same_as_one_of_csv(table, tmp_path):
    ROWS.to_parquet(tmp_path / "table.parquet")
    one, other = (load(place, columns=COLUMNS) for place in (table(), tmp_path / "table.parquet"))
    assert one.checksum == other.checksum


def test_a_function_may_return_a_table_or_two(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import pandas as pd\n"
        f"ROWS = pd.DataFrame({ROWS.to_dict('list')})\n"
        "def whole():\n    return ROWS\n"
        "def parts():\n    return ROWS, ROWS.iloc[:4]\n"
    )
    ROWS.to_csv(tmp_path / "same.csv", index=False)
    assert (
        load(f"{tmp_path / 'mine.py'}:whole", columns=COLUMNS).checksum
        == load(tmp_path / "same.csv", columns=COLUMNS).checksum
    )
    assert len(load(f"{tmp_path / 'mine.py'}:parts", columns=COLUMNS).test) == 4


def test_a_share_of_each_owners_rows_is_for_tests_and_the_same_at_every_time(table):
    rows = pd.concat([ROWS] * 10)
    columns = Columns(target="outcome", inputs=("age",), by="site", test=0.25)
    found = load(table(rows), columns=columns)
    assert [owner.bincount().tolist() for owner in found.owners] == [[45, 45], [15, 15]]
    assert load(table(rows, name="again.csv"), columns=columns).checksum == found.checksum


def test_rows_of_a_group_are_all_in_one_part(table):
    rows = pd.concat([ROWS.assign(patient=ROWS.patient + 6 * k, age=ROWS.patient + 6.0 * k) for k in range(20)])
    found = load(table(rows), columns=Columns(target="outcome", inputs=("age",), by="site", group="patient"))
    train, test = (set(part[:, 0].tolist()) for part in (found.train_inputs, found.test_inputs))
    assert not train & test
    assert len(train) + len(test) == 120


def test_no_rows_of_a_group_are_for_training_where_others_are_for_validation(table):
    rows = pd.concat([ROWS.assign(patient=ROWS.patient + 6 * k, age=ROWS.patient + 6.0 * k) for k in range(20)])
    columns = {"target": "outcome", "inputs": ["age"], "group": "patient"}
    for partition in ({"name": "iid"}, {"name": "natural"}):
        federation = {"dataset": str(table(rows)), "clients": 2, "models": ["mlp2"], "validation_fraction": 0.3}
        federation |= {"partition": partition, "columns": {**columns, "by": "site"}}
        made = assemble(resolve({"federation": federation, "method": {"name": "local"}})).federation
        parts = ([getattr(site, name) for site in made.sites.values()] for name in ("train", "validation"))
        train, validation = ({float(age) for of in part for age in of.inputs[of.rows]} for part in parts)
        assert len(validation) > 20
        assert not train & validation, partition


def test_a_group_that_is_in_train_and_in_test_is_refused(table):
    place = table(ROWS, ROWS.iloc[2:4])
    with pytest.raises(DataError, match=r"patient: 1 of its groups are in train and in test, the first '2'; a test on"):
        load(place, columns=Columns(target="outcome", inputs=("age",), group="patient"))


@pytest.mark.parametrize("column", ["by", "group"])
def test_a_part_that_does_not_say_whose_rows_are_or_which_belong_together_is_refused(table, column):
    place = table(ROWS, ROWS.drop(columns="patient"))
    with pytest.raises(DataError, match="no column 'patient'; found site, age"):
        load(place, columns=Columns(target="outcome", inputs=("age",), **{column: "patient"}))


def test_owners_are_numbered_in_the_order_of_their_names_in_both_parts_together(table):
    found = load(table(ROWS, ROWS.assign(site="east")), columns=Columns(target="outcome", inputs=("age",), by="site"))
    assert found.owners[0][:2].tolist() == [1, 2]
    assert set(found.owners[1].tolist()) == {0}


def test_text_is_read_byte_by_byte_beside_the_other_columns(table):
    rows = pd.DataFrame({"note": ["ab", "", None, "abcdef"], "age": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]})
    columns = Columns(target="y", text=("note",), tokens=4)
    found = load(table(rows, rows), columns=columns).train_inputs
    assert found["input_ids"].tolist() == [[98, 99, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [98, 99, 100, 101]]
    assert found["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert found["columns"].shape == (4, 1)


def test_another_table_is_read_as_the_common_one_is(table, tmp_path):
    known = common_reading(table(ROWS, ROWS), None, COLUMNS).table()
    other = pd.DataFrame({"age": [45.0, 55], "ward": [3, 9], "sex": ["x", "f"], "outcome": ["ill", "ill"]})
    other.to_csv(tmp_path / "other.csv", index=False)
    columns = Columns(target="outcome", names=("ward",), test=0.5, known=known)
    found = load(tmp_path / "other.csv", columns=columns)
    rows = torch.cat([found.train_inputs, found.test_inputs])
    age = ROWS.age.to_numpy()
    row = {round(float(r[0] * age.std() + age.mean())): r[1:].tolist() for r in rows}
    assert row == {45: [0, 0, 1, 0, 0], 55: [0, 0, 0, 1, 0]}, "unseen names are a row of zeros"
    assert found.classes == ("ill", "well"), "also those that this table lacks"


def test_a_column_in_another_unit_is_asked_about(table, tmp_path):
    known = common_reading(table(ROWS, ROWS), None, COLUMNS).table()
    months = ROWS.assign(age=ROWS.age * 12)
    months.to_csv(tmp_path / "months.csv", index=False)
    with pytest.warns(PotluckWarning, match=r"age: mean .* and 45 in the common data .* is it in the same unit\?"):
        load(tmp_path / "months.csv", columns=Columns(target="outcome", names=("ward",), known=known))


def test_numbers_are_predicted_by_a_task_that_expects_them(table):
    found = load(table(), columns=Columns(target="age", inputs=("ward", "sex")), task=task_named("regression"))
    assert found.train_targets.dtype == torch.float32
    assert sorted({*found.train_targets.tolist(), *found.test_targets.tolist()}) == [30, 40, 50, 60]


GAPS = ROWS.assign(age=[None, *ROWS.age[1:]])


def test_missing_numbers_are_the_mean_if_asked_for(table):
    columns = Columns(target="outcome", inputs=("age",), missing="mean")
    assert float(load(table(GAPS, ROWS), columns=columns).train_inputs[0, 0]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (
            ROWS,
            Columns(),
            r"which column is to be predicted\? Name it in federation.columns.target: patient, site, age",
        ),
        (ROWS, Columns(target="outcom"), r"no column 'outcom' \(nearest: outcome"),
        (ROWS, Columns(target="outcome", inputs=("agee",)), r"no column 'agee' \(nearest: age"),
        (ROWS, Columns(target="outcome", by="hospital"), "no column 'hospital'; found patient, site"),
        (GAPS, Columns(target="outcome", inputs=("age",)), "age: 1 of .* numbers are missing; fill them"),
        (ROWS.assign(outcome=[None, *ROWS.outcome[1:]]), COLUMNS, "outcome: 1 of .* targets are missing; leave these"),
        (ROWS.assign(outcome=0.5), COLUMNS, "outcome: found numbers with fractions; expected classes: for numbers"),
        (ROWS.iloc[:0], COLUMNS, "no rows for training; give at least one"),
        (
            pd.DataFrame({"id": [f"k{k}" for k in range(2 * MOST_DIFFERENT)], "outcome": ["a", "b"] * MOST_DIFFERENT}),
            Columns(target="outcome"),
            r"id: 3\d\d different names, such as 'k\d+'; expected at most 200: list it in",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(table, rows, columns, expected):
    with pytest.raises(DataError, match=expected) as found:
        load(table(rows), columns=columns)
    assert "\n" not in str(found.value)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"broken.parquet: cannot be read as a table"):
        load(tmp_path / "broken.parquet", columns=COLUMNS)
    (tmp_path / "twice.csv").write_text("")
    with pytest.raises(DataError, match=r"twice.csv: cannot be read as a table"):
        load(tmp_path / "twice.csv", columns=COLUMNS)


def test_more_than_memory_holds_is_refused_before_it_is_made(table, monkeypatch):
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: 10_000, raising=False)
    rows = pd.DataFrame({"note": ["ab"] * 40, "y": [0, 1] * 20})
    with pytest.raises(DataError, match=r"its inputs.*use fewer rows, columns or federation.columns.tokens"):
        load(table(rows), columns=Columns(target="y", text=("note",), tokens=100_000))


def test_columns_of_what_is_no_table_are_refused():
    with pytest.raises(ConfigError, match=r"federation.columns: digits is no table; leave it out"):
        load("digits", columns=COLUMNS)


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"numbers": {"age": [1.0]}, "names": {}, "text": [], "classes": []},
        {"numbers": {"age": [float("nan"), 1.0]}, "names": {}, "text": [], "classes": []},
        {"numbers": [], "names": {}, "text": [], "classes": []},
        {"numbers": {}, "names": {}, "text": [], "classes": []},
        {"numbers": {}, "names": {"sex": [str(n) for n in range(100_000)]}, "text": [], "classes": []},
    ],
)
def test_what_another_machine_says_is_read_or_refused(table, known):
    with pytest.raises(DataError, match=r"federation.columns.known: expected the tables numbers and names"):
        load(table(), columns=Columns(target="outcome", known=known))
