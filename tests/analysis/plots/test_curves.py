import struct
import sys

import matplotlib as mpl
import numpy as np
import pytest

from potluck.analysis.plots.curves import _LABEL_GAP, _LETTERS_A_LINE, _apart, draw_curves, save
from potluck.analysis.plots.drawn import AS_MEASURED, Drawn
from potluck.analysis.read import read_run


@pytest.fixture
def drawn(store_run):
    """A function that stores runs, given as keyword arguments of each, and draws them together."""

    def draw(*tables, how=AS_MEASURED):
        return draw_curves([read_run(store_run(f"run{index}", **table)) for index, table in enumerate(tables)], how)

    return draw


def texts(axes):
    return [text.get_text() for text in axes.texts]


def lines(axes):
    return {(*line.get_xdata(),): [round(float(share), 6) for share in line.get_ydata()] for line in axes.lines}


def size(path):
    """Width and height of a PNG, from its header."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_one_run_has_a_line_an_architecture_and_their_mean(drawn):
    over_rounds, over_traffic = drawn({}).axes
    shown = sorted([round(float(share), 6) for share in line.get_ydata()] for line in over_rounds.lines)
    assert shown == [[0.3, 0.4, 0.4], [0.4, 0.6, 0.55], [0.5, 0.8, 0.7]]
    assert all(list(line.get_xdata()) == [2, 4, 6] for line in over_rounds.lines)
    assert texts(over_rounds) == ["small", "mean over clients", "large(width=8)"]
    assert lines(over_traffic) == {(4.0, 8.0, 13.5): [0.35, 0.55, 0.5], (8.0, 13.5): [0.625, 0.575]}
    assert texts(over_traffic) == ["common test set", "own test parts", "global model,\ncommon test set"]


def test_several_methods_have_a_line_each_with_a_band_over_seeds(drawn, make_round):
    one, other = ([make_round(1, personal=[share] * 4)] for share in (0.5, 0.7))
    figure = drawn({"rounds": one, "seed": 0}, {"rounds": other, "seed": 1}, {"rounds": one, "method": "fedavg"})
    over_rounds, over_traffic = figure.axes
    assert [list(line.get_ydata()) for line in over_rounds.lines] == [[pytest.approx(0.6)], [pytest.approx(0.5)]]
    assert texts(over_rounds) == ["fedavg", "fedin"]
    assert texts(over_traffic) == []
    band = over_rounds.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(0.6 - 0.02**0.5), pytest.approx(0.6 + 0.02**0.5))


def test_the_picture_says_what_it_shows(drawn):
    figure = drawn({"seed": 0}, {"seed": 1}, {"method": "fedavg", "seed": 0}, {"method": "fedavg", "seed": 1})
    over_rounds, over_traffic = figure.axes
    assert figure.get_suptitle() == "fedin and fedavg on digits, 4 clients: accuracy of the clients' models"
    assert "mean over 2 seeds; bands: ± one standard deviation over seeds" in figure.get_supxlabel()
    assert (over_rounds.get_xlabel(), over_rounds.get_ylabel()) == ("round", "accuracy")
    assert over_traffic.get_xlabel() == "megabytes sent, down and up, all clients"
    assert over_rounds.yaxis.get_major_formatter()(0.425, 0) == "42.5%"


def test_single_seeds_are_named_instead_of_averaged(drawn):
    assert drawn({"seed": 7}).get_supxlabel().startswith("Seed 7. Megabytes are 10⁶ bytes")


def test_runs_of_one_round_are_drawn_as_points_inside_the_panels(drawn, make_round):
    only = [make_round(1, personal=[0.25] * 4)]
    for axes, end in zip(drawn({"rounds": only, "planned": 1}).axes, (1, 2.0), strict=True):
        assert axes.lines[0].get_marker() == "o"
        assert axes.get_xlim()[0] == 0 < end < axes.get_xlim()[1]
        low, high = axes.get_ylim()
        assert low < 0.25 < high
        assert high - low == pytest.approx(0.1)


def test_a_run_that_was_not_evaluated_says_so(drawn, make_round):
    over_rounds, _ = drawn({"rounds": [make_round(1)]}).axes
    assert texts(over_rounds) == ["no test accuracy recorded"]


def test_accuracies_stay_between_nothing_and_all(drawn, make_round):
    rounds = [make_round(1, personal=[0.0] * 4), make_round(2, personal=[1.0] * 4)]
    low, high = drawn({"rounds": rounds}).axes[0].get_ylim()
    assert low == 0
    assert 1 <= high <= 1.02


def test_many_rounds_are_drawn_without_markers_and_many_methods_without_repeating_a_look(drawn, make_round):
    rounds = [make_round(number, personal=[0.5] * 4) for number in range(1, 14)]
    figure = drawn(*({"method": f"method{index}", "rounds": rounds} for index in range(8)))
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 8
    assert {line.get_marker() for line in figure.axes[0].lines} == {"None"}


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes_whatever_a_user_has_configured(store_run, tmp_path):
    run = read_run(store_run())
    first, again, elsewhere = (tmp_path / name for name in ("first.png", "again.png", "elsewhere.png"))
    figure = draw_curves([run])
    save(figure, first)
    save(figure, again)
    with mpl.rc_context({"font.size": 20, "savefig.transparent": True, "axes.facecolor": "red"}):
        save(draw_curves([run]), elsewhere)
    assert first.read_bytes() == again.read_bytes() == elsewhere.read_bytes()
    assert size(first) == (1500, 630)
    assert first.stat().st_size > 10_000
    assert b"Software" not in first.read_bytes()


def test_drawing_needs_no_window_and_leaves_no_trace(drawn, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    ours = ("font.size", "axes.grid", "text.color", "lines.linewidth")
    before = [mpl.rcParams[name] for name in ours]
    save(drawn({}), tmp_path / "picture.png")
    assert [mpl.rcParams[name] for name in ours] == before


@pytest.mark.parametrize("heights", [[0.1, 0.5, 0.9], [0.5, 0.5, 0.5], [0.2, 0.21, 0.22, 0.8], [0.9, 0.91], [0.3], []])
def test_labels_keep_a_line_of_text_apart_and_stay_near(heights):
    placed = _apart(heights)
    assert np.all(np.diff(placed) >= _LABEL_GAP - 1e-12)
    assert sum(placed) == pytest.approx(sum(heights))  # as many move up as down
    assert np.all(np.abs(np.subtract(placed, heights)) <= _LABEL_GAP * max(0, len(heights) - 1) / 2 + 1e-12)


def test_of_more_lines_than_can_be_told_apart_the_best_are_named_and_the_others_grey(drawn, make_round):
    ends = [0.3 + 0.01 * index for index in range(15)]
    figure = drawn(*({"method": f"m{n}", "rounds": [make_round(1, personal=[end] * 4)]} for n, end in enumerate(ends)))
    over_rounds, _ = figure.axes
    assert {text.removeprefix("- - ") for text in texts(over_rounds)} == {f"m{n}" for n in range(3, 15)}
    looks = [(line.get_color(), line.get_linestyle()) for line in over_rounds.lines]
    coloured = [look for look in looks if looks.count(look) == 1]
    assert len(coloured) == 12
    assert {text.get_color() for text in over_rounds.texts if text.get_text().startswith("- - ")} <= {
        c for c, _ in coloured
    }
    assert "Grey: 3 more, which end worse or were not measured." in figure.get_supxlabel()


def test_a_smoothed_line_lies_over_a_pale_one_as_measured(drawn, make_round):
    rounds = [make_round(n, personal=[share] * 4) for n, share in enumerate((0.2, 0.6, 0.4), start=1)]
    figure = drawn({"rounds": rounds}, {"rounds": rounds, "method": "fedavg"}, how=Drawn(smooth=2))
    for axes in figure.axes:
        pale, smoothed = axes.lines[:2]
        assert list(pale.get_ydata()) == pytest.approx([0.2, 0.6, 0.4])
        assert list(smoothed.get_ydata()) == pytest.approx([0.2, 0.4, 0.5])
        assert pale.get_color() == smoothed.get_color()
        assert pale.get_alpha() < 0.5
        assert smoothed.get_alpha() is None
    assert "Smoothed: mean of the latest 2 values; pale: as measured." in figure.get_supxlabel()


def test_the_best_of_smoothed_lines_are_those_that_were_measured_best(drawn, make_round):
    last = [make_round(n, personal=[share] * 4) for n, share in ((1, 0.0), (2, 0.9))]
    steady = [make_round(n, personal=[0.5 + n / 100] * 4) for n in (1, 2)]
    tables = [{"method": "late", "rounds": last}, *({"method": f"m{n}", "rounds": steady} for n in range(12))]
    assert "late" in {text.removeprefix("- - ") for text in texts(drawn(*tables, how=Drawn(smooth=2)).axes[0])}


@pytest.mark.parametrize("target", [0.45, 0.95])
def test_a_target_is_a_line_across_both_panels_wherever_the_curves_are(drawn, target):
    figure = drawn({}, how=Drawn("common", target=target))
    for axes, end in zip(figure.axes, (6, 13.5), strict=True):
        assert [list(line.get_ydata()) for line in axes.lines].count([target, target]) == 1
        assert axes.get_ylim()[0] < target < axes.get_ylim()[1]
        assert axes.get_xlim() == (0, pytest.approx(1.03 * end))
    assert f"Red, dotted: the target, {100 * target:.1f} %, common test set." in figure.get_supxlabel()
    assert texts(figure.axes[0]) == ["small", "mean over clients", "large(width=8)"]
    assert figure.axes[0].get_title(loc="left") == "on common test set, over rounds"


def test_a_long_caption_goes_on_below(drawn):
    how = Drawn(smooth=3, target=0.5)
    caption = drawn({"seed": 0}, {"seed": 1}, how=how).get_supxlabel()
    assert len(caption) > _LETTERS_A_LINE >= max(map(len, caption.splitlines()))
