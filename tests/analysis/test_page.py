"""The page of a report as text: its numbers are the records', and it holds everything it needs."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from potluck.analysis.embedded import as_json, embedded, page_value, series_of, short
from potluck.analysis.findings import find
from potluck.analysis.groups import group
from potluck.analysis.inside import Inside
from potluck.analysis.numbers.drift import drift
from potluck.analysis.page import different, page_text
from potluck.analysis.plots.drawn import Drawn
from potluck.analysis.read import find_runs, read_run
from potluck.core.ground.errors import CheckpointError

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tables as rows of text by their id, and the elements that would ask for something."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.asking, self.scopes, self._table, self._cell = {}, [], [], None, None
        self.feed(text)
        self.numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', text, flags=re.DOTALL)[1])

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.asking += [value for key in ("src", "href") if (value := found.get(key)) and value != "data:,"]
        if tag == "table":
            self._table = self.tables.setdefault(found.get("id"), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._cell = ""
            self.scopes += [found.get("scope")] if tag == "th" else []

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self._table[-1].append(self._cell.strip())
            self._cell = None
        elif tag == "table":
            self._table = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def page(*folders, **options):
    return Page(page_text([read_run(folder) for folder in find_runs(folders)], **options))


def test_page_text__its_tables_have_the_records_numbers(store_run):
    found = page(store_run(), target=0.55).tables
    _, run = found["runs"]
    assert run[:10] == ["fedin", "0", "6", "55.0", "18.0", "30.0", "50.0", "57.5", "2", "40.0"]
    assert run[10:] == ["13.5", "0.750", "4"]
    assert found["architectures"][1:] == [
        ["small", "2", "40.0", "40.0", "30.0", "25.0"],
        ["large(width=8)", "2", "70.0", "60.0", "50.0", "45.0"],
    ]
    assert [row[:5] for row in found["clients"][1:]] == [
        ["0", "small", "30", "10", "40.0"],
        ["1", "small", "30", "10", "40.0"],
        ["2", "large(width=8)", "30", "10", "70.0"],
        ["3", "large(width=8)", "30", "10", "70.0"],
    ]
    assert found["traffic"][1:] == [["examples", "0", "0.0000800"], ["weights", "1.75", "0.500"]]


def test_page_text__means_over_seeds_have_the_interval_of_the_comparison(store_run, make_round):
    for seed, share in enumerate((0.4, 0.5, 0.9)):
        store_run(f"seed{seed}", [make_round(1, personal=[share] * 4)], seed=seed, planned=1)
    folder = store_run("other", [make_round(1, personal=[0.7] * 4)], method="fedavg", planned=1)
    _, first, second = page(folder.parent).tables["experiments"]
    assert first[:4] == ["fedavg", "1", "1", "70.0"]
    assert second[:4] == ["fedin", "3", "1", "60.0 ± 65.7"]  # 4.3027 * 0.26458 / sqrt(3)


def test_page_text__its_curves_have_the_records_numbers(store_run):
    content = page(store_run()).numbers
    (run,) = content["experiments"][0]["runs"]
    at, values = run["curves"]["accuracy.personal"]
    assert (content["rounds"][at], values) == ([2, 4, 6], [0.4, 0.6, 0.55])
    at, values = run["curves"]["accuracy.global"]
    assert (content["rounds"][at], values) == ([4, 6], [0.625, 0.575])
    assert run["curves"]["loss"][1] == [1.25] * 6
    assert run["spent"]["megabytes"] == [2, 4, 6, 8, 11.5, 13.5]
    large = content["by_architecture"][1]
    assert (large["name"], large["curves"]["accuracy.personal"][0][1]) == ("large(width=8)", [0.5, 0.8, 0.7])


def test_page_text__smoothed_curves_stand_beside_those_measured_and_it_is_said(store_run):
    text = page_text([read_run(store_run())], smooth=2)
    (run,) = Page(text).numbers["experiments"][0]["runs"]
    assert run["curves"]["accuracy.personal"][1:] == [[0.4, 0.6, 0.55], [0.4, 0.5, 0.575]]
    assert run["curves"]["accuracy.global"][1:] == [[0.625, 0.575], [0.625, 0.6]]
    large = Page(text).numbers["by_architecture"][1]["curves"]["accuracy.personal"]
    assert large[0][1:] == [[0.5, 0.8, 0.7], [0.5, 0.65, 0.75]]
    assert text.count("moothed: mean of the latest 2 values; pale: as measured") == 3  # two drawings and the chart
    assert text.count('<polyline class="line slot0 pale"') == 2
    assert "own test parts: fedin ends at 55.0" not in text
    assert "own test parts, over rounds: fedin ends at 55.0" in text  # as measured


def test_page_text__unsmoothed_is_what_it_is_without_the_option(store_run):
    runs = [read_run(store_run())]
    text = page_text(runs)
    assert page_text(runs, smooth=1) == text
    assert "moothed: mean" not in text
    assert "pale" not in text.split("<body>")[1].split("<script>")[0]
    assert {len(curve) for curve in Page(text).numbers["experiments"][0]["runs"][0]["curves"].values()} == {2}
    assert len(page_text(runs, smooth=2)) > len(text)


def heights(drawing):
    """The heights of a still drawing's lines, and of its target's."""
    lines = [
        [float(point.split(",")[1]) for point in found.split()] for found in re.findall(r'points="(.*?)"', drawing)
    ]
    return lines, [float(found) for found in re.findall(r'class="target" d="M52 ([0-9.]+)H', drawing)]


@pytest.mark.parametrize("measure", ["personal", "common"])
def test_page_text__a_target_has_a_line_only_in_the_curves_of_its_measure(store_run, measure):
    text = page_text([read_run(store_run())], 0.45, measure)
    assert Page(text).numbers["target"] == {"series": f"accuracy.{measure}", "value": 0.45}
    assert Page(text).numbers["series"][0]["id"] == f"accuracy.{measure}"
    first, second = re.findall(r"<figure>.*?</figure>", text, flags=re.DOTALL)[:2]
    (line,), (target,) = heights(first)
    assert line[0] > target > line[2]  # heights are counted from above
    assert "dotted: the target, 45.0 %" in first
    assert heights(second)[1] == []
    assert "target" not in second


def test_page_text__a_target_beyond_every_value_is_within_the_drawing(store_run):
    text = page_text([read_run(store_run())], 0.99)
    (line,), (target,) = heights(re.search(r"<figure>.*?</figure>", text, flags=re.DOTALL)[0])
    assert 0 < target < min(line)


def test_page_text__of_a_measure_that_no_run_has_own_test_parts_are_drawn_without_a_line(store_run, make_round):
    runs = [read_run(store_run(rounds=[make_round(n, personal=[0.5] * 4) for n in (1, 2)], planned=2))]
    found = Page(page_text(runs, 0.6, "global")).numbers
    assert (found["series"][0]["id"], found["target"]) == ("accuracy.personal", None)


def test_page_text__it_holds_all_it_needs_and_may_ask_for_nothing(store_run):
    text = page_text([read_run(store_run())])
    assert Page(text).asking == []
    assert re.search(
        r"""content="default-src 'none'; script-src 'sha256-[^']+'; style-src 'unsafe-inline'; img-src data:""", text
    )
    assert "@import" not in text
    assert "http://www.w3.org/2000/svg" in text  # a name, not an address
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_page_text__every_heading_of_a_table_says_what_it_heads(store_run):
    assert {*page(store_run(), store_run("other", method="fedavg")).scopes} <= {"col", "row", "rowgroup"}


def test_page_text__a_name_is_text_whatever_is_in_it(store_run):
    lines = client = store_run("evil", method=EVIL, notes={})
    manifest = json.loads((client / "manifest.json").read_text())
    (client / "manifest.json").write_text(json.dumps({**manifest, "machine": EVIL, "classes": [EVIL], "privacy": EVIL}))
    text = page_text([read_run(lines)])
    assert text.count("<script") == 2
    assert "<img" not in text


def test_page_text__the_same_runs_give_the_same_page(store_run):
    run = read_run(store_run())
    assert page_text([run]) == page_text([run])


def test_page_text__unfinished_runs_are_called_so(store_run, make_round):
    text = page_text([read_run(store_run(rounds=[make_round(1)], status="interrupted"))])
    assert "fedin has 1 of 6 rounds (status: interrupted)" in text
    assert page(store_run("other", rounds=[make_round(1)])).tables["runs"][1][3] == "–"


RMSE = {"name": "rmse", "label": "RMSE", "higher_is_better": False, "percent": False}


def test_page_text__of_errors_the_lowest_are_the_best(store_run, make_round):
    for method, error in (("worse", 12.345678), ("better", 0.5)):
        values = {measure: {"rmse": error} for measure in ("personal", "common", "personal_std", "personal_worst")}
        line = {**make_round(1), "metrics": values, "metrics_by_architecture": {"personal": {"small": {"rmse": error}}}}
        folder = store_run(method, [line], method=method, task={"name": "regression", "metrics": [RMSE]})
    text = page_text([read_run(folder) for folder in find_runs([folder.parent])])
    card = re.search(r"<dt>RMSE, own test parts</dt><dd class=\"value\">(.*?)</dd><dd class=\"quiet\">(.*?)</dd>", text)
    assert card.groups() == ("0.5", "better")
    assert [row[3] for row in Page(text).tables["experiments"][1:]] == ["0.5", "12.35"]
    assert Page(text).numbers["series"][0]["higher"] is False
    text = page_text([read_run(folder) for folder in find_runs([folder.parent])], 3.0, smooth=2)
    assert Page(text).numbers["target"] == {"series": "rmse.personal", "value": 3.0}
    assert "dotted: the target, 3" in text


def test_page_text__a_repeated_seed_is_said_to_count_once(store_run):
    runs = [read_run(store_run(f"run{index}")) for index in range(2)]
    assert "with the same seed the last counts" in page_text(runs)
    assert "with the same seed the last counts" not in page_text(runs[:1])


def with_classes(folder, counts, round_number=6, **partition):
    confusion = {"round": round_number, "confusion": counts, "counts": [[counts[0][0], counts[1][1]]] * 3}
    (folder / "classes.json").write_text(json.dumps(confusion))
    (folder / "partition.json").write_text(json.dumps({"train": [[1, 2], [3, 4], [5, 6], [7, 8]], **partition}))
    return folder


def test_page_text__matrices_of_classes_add_up_over_seeds(store_run):
    first = with_classes(store_run("a", seed=0), [[5, 1], [2, 7]])
    second = with_classes(store_run("b", seed=1), [[4, 2], [0, 9]])
    (found,) = page(first, second).numbers["by_class"]
    assert found["confusion"] == [[9, 3], [2, 16]]
    assert found["runs"] == 2
    assert [one["seeds"] for one in page(first, second).numbers["partitions"]] == [[0, 1]]


def test_page_text__classes_of_another_round_than_the_last_are_not_shown(store_run):
    folder = with_classes(store_run(), [[5, 1], [2, 7]], round_number=4)
    assert page(folder).numbers["by_class"] == [None]


@pytest.mark.parametrize(
    "content", ["{", '{"train": [[1], [2]]}', '{"train": [[1, 2], [3]]}', '{"train": [["a"]]}', "[]"]
)
def test_page_text__a_damaged_division_is_refused_by_name(store_run, content):
    folder = store_run()
    (folder / "partition.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"partition\.json is damaged"):
        page_text([read_run(folder)])


def test_embedded__what_does_not_fit_is_left_out_by_importance_and_named(store_run):
    runs = [read_run(store_run(f"run{seed}", seed=seed)) for seed in range(3)]
    names = {run.folder: run.name for run in runs}
    whole = embedded(group(runs), names, 10**6)
    assert whole.left_out == []
    size = len(as_json(whole.content))
    tight = embedded(group(runs), names, size * 2 // 3)
    assert len(as_json(tight.content)) <= size * 2 // 3
    assert tight.left_out
    kept = {series["id"] for series in tight.content["series"]}
    assert {"accuracy.personal", "loss"} <= kept


def test_embedded__of_very_many_rounds_some_are_left_out_and_the_first_and_last_stay(store_run, make_round):
    rounds = [make_round(number, personal=[number / 5000] * 4) for number in range(1, 2001)]
    run = read_run(store_run(rounds=rounds, planned=2000))
    found = embedded(group([run]), {run.folder: "one"}, 20_000)
    assert any("every 5th round" in words for words in found.left_out)
    at, values = found.content["experiments"][0]["runs"][0]["curves"]["accuracy.personal"]
    numbers = found.content["rounds"][at]
    assert numbers[:3] == [1, 5, 10]
    assert numbers[-1] == 2000
    assert values[-1] == 0.4
    assert len(as_json(found.content)) < 25_000


def test_embedded__of_a_thinned_curve_the_means_are_of_all_values(store_run, make_round):
    rounds = [make_round(number, personal=[number % 2] * 4) for number in range(1, 2001)]
    run = read_run(store_run(rounds=rounds, planned=2000))
    found = embedded(group([run]), {run.folder: "one"}, 20_000, Drawn(smooth=2))
    at, values, means = found.content["experiments"][0]["runs"][0]["curves"]["accuracy.personal"]
    assert len(found.content["rounds"][at]) < 400
    assert (set(values[1:]), set(means[1:])) == ({0}, {0.5})  # only even rounds are left, whose own mean would be 0
    assert len(as_json(found.content)) < 25_000


@pytest.mark.parametrize(
    ("value", "percent", "kept"),
    [(0.123456789, True, 0.123457), (0.10049999, True, 0.10049999), (2.0, False, 2), (1e-7, False, 1e-7)],
)
def test_short__six_digits_unless_they_would_be_shown_as_another_number(value, percent, kept):
    assert short(value, percent) == kept
    assert page_value(short(value, percent), percent) == page_value(value, percent)


def test_series_of__begins_with_what_matters_most(store_run):
    first, second, *_ = series_of([read_run(store_run())])
    assert (first.id, second.id) == ("accuracy.personal", "loss")


def test_different__shows_what_a_comparison_depends_on_apart_from_what_methods_call_alike(store_run):
    def store(name, method, temperature, mu, lr=0.01):
        folder = store_run(name, method=method, lr=lr)
        config = folder / "config.toml"
        config.write_text(
            config.read_text().replace("[method]\n", f"[method]\ntemperature = {temperature}\nmu = {mu}\n")
        )
        return read_run(folder)

    runs = [store(f"m{n}", f"method{n}", n, 0, 0.02 if n == 3 else 0.01) for n in range(7)]
    groups = group([*runs, store("again", "method0", 0, 5)])
    found = different(groups, by_method=False)
    assert set(found) == {"method.training.lr", "method.mu"}
    assert found["method.training.lr"] == [("0.02", "method3"), ("0.01", "the other 7")]
    assert found["method.mu"] == [("5", "method0, mu=5"), ("0", "the other 7")]
    assert list(different(groups, by_method=True)) == ["method.temperature"]


def test_the_page_says_who_profits_where_a_run_trained_alone(store_run, make_round, write_clients):
    first = [make_round(1, personal=[0.5] * 4)]
    runs = [
        read_run(write_clients(store_run(method, first, method=method, planned=1), values))
        for method, values in (("local", [0.5, 0.5]), ("fedavg", [0.7, 0.4]))
    ]
    sentence = "With fedavg 1 of 2 clients does better than alone (+5.0 points in the mean); 1 loses: client 1"
    assert sentence in page_text(runs)
    assert "better than alone" not in page_text(runs[1:])


def test_page_text__who_profits_has_its_tables_from_the_records_alone(store_run):
    runs = [read_run(store_run()), read_run(store_run("alone", method="local"))]
    text = page_text(runs)
    assert "With fedin 0 of 4 clients do better than alone" in text
    assert [name for name in TITLES_OF_FINDINGS if f"<h2>{name}</h2>" in text] == list(TITLES_OF_FINDINGS[:2])
    assert "<img" not in text
    assert "Who profits, who loses" not in page_text(runs[:1])


@pytest.mark.slow
def test_page_text__what_models_show_is_there_if_it_was_found_and_fits(store_run, monkeypatch):
    run = read_run(store_run())
    inside = Inside("fedin", "fedin", 6, drift=tuple(drift({0: {"w": np.ones(2)}, 1: {"w": np.zeros(2)}})))
    findings = find([run], [inside], remarks=["said once"])
    text = page_text([run], remarks=["said once"], findings=findings)
    assert [name for name in TITLES_OF_FINDINGS if f"<h2>{name}</h2>" in text] == ["How fairly", TITLES_OF_FINDINGS[2]]
    assert 'src="data:image/svg+xml;base64,' in text
    assert text.count("<li>said once</li>") == 1
    assert page_text([run], remarks=["said once"], findings=findings) == text
    monkeypatch.setattr("potluck.analysis.page._ROOM_FOR_FIGURES", 100)
    text = page_text([run], findings=findings)
    assert "<img" not in text
    assert "it leaves out: the figure drift" in text


TITLES_OF_FINDINGS = ("Who profits, who loses", "How fairly", "How far weights are apart")
