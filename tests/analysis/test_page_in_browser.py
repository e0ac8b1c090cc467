"""The page of a report in a real browser, without a window: what a reader sees and does."""

import json
import shutil
from contextlib import contextmanager

import pytest

from potluck.analysis.page import page_text
from potluck.analysis.read import read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the PATH"),
]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser, store_run, tmp_path):
    """Opens the page on runs given as tables; afterwards nothing may have failed, been logged or been asked for."""
    contexts, complaints = [], []

    def open_page(*tables, width=1280, curves=None, **options):
        runs = []
        for index, table in enumerate(tables):
            extra = {name: table.pop(name) for name in ("classes", "partition") if name in table}
            folder = store_run(f"run{index}", **table)
            for name, content in extra.items():
                (folder / f"{name}.json").write_text(json.dumps(content))
            runs.append(read_run(folder))
        file = tmp_path / "report.html"
        file.write_text(page_text(runs, **curves or {}), encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url == file.as_uri() or complaints.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def several(make_round, count=3):
    """Experiments that end at different accuracies, in an order that is not that of their names."""
    ends = [0.3 + 0.6 * ((7 * index) % count) / count for index in range(count)]
    return [
        {
            "method": f"method{index}",
            "rounds": [make_round(n, personal=[end * n / 4] * 4) for n in range(1, 5)],
            "planned": 4,
        }
        for index, end in enumerate(ends)
    ]


def column(page, table, place):
    rows = page.locator(f"#{table} tbody tr:visible")
    return [row.locator("th, td").nth(place).inner_text() for row in rows.all()]


@contextmanager
def dragged(page, target, start, end):
    box = page.locator(target).bounding_box()
    page.mouse.move(box["x"] + box["width"] * start, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, box["y"] + box["height"] / 2, steps=4)
    yield
    page.mouse.up()


def test_it_renders_curves_and_tables(show, make_round):
    page = show(*several(make_round))
    assert page.title() == "method0, method1 and method2 on digits – Potluck report"
    assert page.locator("#chart svg path.line").count() == 3
    assert page.locator("#legend li").count() == 3
    assert "At the end: method2 " in page.locator("#chart svg").get_attribute("aria-label")
    assert page.locator("#stills").count() == 0


def test_a_table_sorts_by_a_click_and_by_the_keyboard(show, make_round):
    page = show(*several(make_round))
    heading = page.locator("#experiments thead th", has_text="Own test parts")
    assert heading.get_attribute("aria-sort") == "none"
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    down = [float(cell) for cell in column(page, "experiments", 3)]
    assert down == sorted(down, reverse=True)
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [float(cell) for cell in column(page, "experiments", 3)] == sorted(down)


def test_a_long_table_is_cut_filters_and_says_how_much_is_seen(show, make_round):
    page = show(*several(make_round, 30))
    assert len(column(page, "runs", 0)) == 20
    page.get_by_role("button", name="Show all 30").first.click()
    assert len(column(page, "experiments", 0)) == 30
    page.get_by_label("Filter the rows of Experiments").fill("method2")
    assert column(page, "experiments", 0) == ["method2", *(f"method2{n}" for n in range(10))]
    box = page.locator(".filter", has=page.get_by_label("Filter the rows of Experiments"))
    assert box.locator("span").inner_text() == "11 of 30 rows"


def test_the_theme_follows_the_system_and_a_switch(show, make_round):
    page = show({}, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(19, 23, 29)"
    page.get_by_role("button", name="Light theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(ground) == "rgb(19, 23, 29)"


def test_pointing_at_a_curve_says_the_records_number(show, make_round):
    page = show(*several(make_round))
    spot = page.locator("#chart g[data-name=method2] path.marker").last.bounding_box()
    page.mouse.move(spot["x"] + spot["width"] / 2, spot["y"] + spot["height"] / 2)
    expected = f"{100 * (0.3 + 0.6 * (14 % 3) / 3):.1f} %"
    assert page.locator("#tip").inner_text().split("\n") == ["method2", expected, "round 4"]
    assert page.locator("#chart g.hot").get_attribute("data-name") == "method2"


def test_dragging_zooms_and_a_button_shows_the_whole_again(show, make_round):
    page = show({})
    labels = page.locator("#chart svg text")
    whole = labels.all_text_contents()
    with dragged(page, "#chart svg", 0.5, 0.9):
        assert page.locator("#chart .drag").count() == 1
    assert labels.all_text_contents() != whole
    assert "1" not in labels.all_text_contents()
    page.get_by_role("button", name="Whole range").click()
    assert labels.all_text_contents() == whole
    page.get_by_role("button", name="Zoom in").click()
    assert labels.all_text_contents() != whole


def test_the_chart_can_be_read_and_zoomed_with_the_keyboard(show, make_round):
    page = show(*several(make_round))
    page.locator("#chart svg").focus()
    page.keyboard.press("ArrowRight")
    live = page.locator("#chart-live")
    assert live.inner_text().startswith("method2, round 4: ")
    page.keyboard.press("ArrowLeft")
    assert live.inner_text().startswith("method2, round 3: ")
    page.keyboard.press("ArrowDown")
    assert live.inner_text().startswith("method1, round 3: ")
    before = page.locator("#chart svg text").all_text_contents()
    page.keyboard.press("+")
    assert page.locator("#chart svg text").all_text_contents() != before
    page.keyboard.press("0")
    assert page.locator("#chart svg text").all_text_contents() == before


def test_curves_can_be_read_as_a_table(show, make_round):
    page = show(*several(make_round))
    page.locator("#chart-values summary").click()
    cells = page.locator("#values tbody tr").last.locator("td").all_inner_texts()
    assert cells == [f"{100 * (0.3 + 0.6 * ((7 * index) % 3) / 3):.1f}" for index in range(3)]


def test_of_many_lines_the_best_are_in_colour_and_no_two_look_alike(show, make_round):
    page = show(*several(make_round, 40))
    assert page.locator("#chart path.line:not(.other)").count() == 8
    assert page.locator("#chart path.line.other").count() == 32
    page.get_by_role("button", name="all", exact=True).click()
    looks = page.eval_on_selector_all(
        "#chart g[data-name]",
        """groups => groups.map((group) => [
          group.style.color, group.querySelector(".line").getAttribute("stroke-dasharray"),
          group.querySelector(".marker").getAttribute("d").replace(/[0-9.]+/g, ""),
        ].join())""",
    )
    assert len(looks) == len(set(looks)) == 40
    page.get_by_label("Find lines by name").fill("method39")
    assert page.locator("#legend li:visible").count() == 1
    page.get_by_role("button", name="none", exact=True).click()
    page.locator("#legend li:visible input").check()
    assert page.locator("#chart path.line:not(.other)").count() == 1


def test_means_over_seeds_have_a_band_and_single_runs_none(show, make_round):
    rounds = [[make_round(n, personal=[share * n / 2] * 4) for n in (1, 2)] for share in (0.4, 0.6)]
    page = show(*({"rounds": one, "seed": seed, "planned": 2} for seed, one in enumerate(rounds)))
    page.locator("#kind").select_option("mean")
    assert page.locator("#chart .band").count() == 1
    page.locator("#chart svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().split("\n")[1:] == ["50.0 ± 14.1 %", "round 2, 2 seeds"]
    page.locator("#kind").select_option("runs")
    assert page.locator("#chart .band").count() == 0
    assert page.locator("#legend .name").all_inner_texts() == ["fedin, seed 0", "fedin, seed 1"]


def test_other_measures_and_axes_can_be_chosen(show, make_round):
    page = show({})
    page.locator("#series").select_option("loss")
    assert "training loss, over rounds" in page.locator("#chart svg").get_attribute("aria-label")
    page.locator("#axis").select_option("megabytes")
    assert page.locator("#chart svg text").last.text_content() == "megabytes sent"
    page.locator("#chart svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().split("\n")[1:] == ["1.25", "round 6, 13.5 megabytes"]


PALE_AND_NOT, ENDS = (".pale", ":not(.pale)"), ("method1", "method2")


def test_smoothed_lines_lie_over_pale_ones_and_a_target_only_in_its_own_curves(show, make_round):
    page = show(*several(make_round), curves={"target": 0.6, "smooth": 2})
    assert page.locator("#chart path.line:not(.pale)").count() == page.locator("#chart path.line.pale").count() == 3
    looks = "path => [getComputedStyle(path).stroke, Number(getComputedStyle(path).opacity)]"
    group = page.locator("#chart g[data-name=method2]")
    (colour, faint), (same, full) = (group.locator(f"path.line{which}").evaluate(looks) for which in PALE_AND_NOT)
    assert colour == same
    assert faint < full == 1
    page.locator("#chart svg").focus()
    page.keyboard.press("ArrowRight")  # method2 has 52.5 % in round 3, and 70 % in round 4
    assert page.locator("#tip").inner_text().split("\n") == ["method2", "70.0 %, smoothed 61.2 %", "round 4"]
    assert page.locator("#legend .final").all_inner_texts() == ["30.0", "50.0", "70.0"]
    line = page.locator("#chart path.target").bounding_box()
    low, high = (page.locator(f"#chart g[data-name={name}] path.marker").last.bounding_box()["y"] for name in ENDS)
    assert high < line["y"] < low
    assert page.locator("#chart text.of-target").text_content() == "target 60.0 %"
    assert page.locator("#chart svg").get_attribute("aria-label").endswith("Target: 60.0 %.")
    page.locator("#series").select_option("loss")
    assert page.locator("#chart path.target, #chart text.of-target").count() == 0
    assert "Target" not in page.locator("#chart svg").get_attribute("aria-label")


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_a_target_beyond_all_curves_is_inside_the_chart_even_where_no_point_is(show, make_round, target):
    page = show(*several(make_round), curves={"target": target})
    for _ in range(6):
        chart, line = (page.locator(f"#chart {part}").bounding_box() for part in ("svg", "path.target"))
        assert chart["y"] < line["y"] < chart["y"] + chart["height"] - 40
        page.get_by_role("button", name="Zoom in").click()


def test_clients_of_each_run_can_be_chosen_and_sorted(show, make_round):
    low, high = ([make_round(1, personal=[base, base, base + 0.1, base + 0.1])] for base in (0.2, 0.6))
    page = show({"rounds": low, "planned": 1}, {"rounds": high, "planned": 1, "method": "fedavg"})
    assert column(page, "clients", 4) == ["20.0", "20.0", "30.0", "30.0"]
    page.locator("#client-run").select_option(label="fedavg")
    assert column(page, "clients", 4) == ["60.0", "60.0", "70.0", "70.0"]
    page.locator("#clients thead button", has_text="own test part").click()
    assert column(page, "clients", 0) == ["2", "3", "0", "1"]


def test_matrices_of_classes_and_the_division_are_drawn(show, make_round):
    classes = {"round": 6, "confusion": [[8, 2], [1, 9]], "counts": [[8, 9], [9, 11], [10, 10]]}
    partition = {"train": [[30, 0], [20, 10], [15, 15], [0, 30]]}
    page = show({"classes": classes, "partition": partition})
    assert page.locator("#classes .matrix td").all_inner_texts() == ["8", "2", "1", "9"]
    first = page.locator("#classes table:not(.matrix) tbody tr").first
    assert first.locator("th, td").all_inner_texts() == ["0", "10", "80.0", "88.9", "1 (2)"]
    assert page.locator("#partition .matrix td").all_inner_texts() == ["30", "20", "15", "", "", "10", "15", "30"]


def test_a_name_with_markup_is_shown_and_never_run(show, make_round):
    classes = {"round": 6, "confusion": [[8, 2], [1, 9]], "counts": [[8, 9], [9, 11], [10, 10]]}
    noted = [{**make_round(1, personal=[0.5] * 4), "notes": {"norm": 1.0}}]
    evil = {"method": EVIL.replace('"', "'").replace("/", "|"), "machine": EVIL}
    page = show({**evil, "classes": classes}, {"rounds": noted, "planned": 1})
    page.wait_for_timeout(50)
    assert page.title().startswith("<script>")
    assert page.locator("img").count() == 0
    assert page.locator("#legend .name").first.inner_text().startswith("<script>")


@pytest.mark.parametrize("count", [1, 12])
def test_on_a_phone_nothing_makes_the_page_scroll_sideways(show, make_round, count):
    partition = {"train": [[1] * 40] * 4}
    page = show(*({**table, "partition": partition} for table in several(make_round, count)), width=390, has_touch=True)
    page.locator("#chart-values summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.locator("#chart svg").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_on_a_phone_a_row_keeps_its_name_and_a_table_its_caption_while_it_is_moved_sideways(show, make_round):
    width = 320  # a small one: these experiments' table has few columns
    page = show(*several(make_round, 12), width=width)
    name, caption = (page.locator(f"#experiments {part}").first for part in ("tbody th", "caption"))
    before = name.bounding_box()["x"], caption.bounding_box()["x"]
    last = page.locator("#experiments thead th:visible").last
    assert right_of(last) > width
    page.evaluate("document.querySelector('#experiments').closest('.scroll').scrollLeft = 10000")
    assert right_of(last) <= width
    assert (name.bounding_box()["x"], caption.bounding_box()["x"]) == pytest.approx(before, abs=1)
    assert caption.bounding_box()["width"] <= width - 2 * before[1]


def right_of(element):
    box = element.bounding_box()
    return box["x"] + box["width"]


def test_without_scripts_curves_and_tables_are_there(show, make_round):
    page = show(*several(make_round), java_script_enabled=False)
    assert page.locator("svg.still").count() == 2
    assert page.locator("svg.still").first.locator("polyline").count() == 3
    assert "method2 ends at 70.0" in page.locator("svg.still").first.get_attribute("aria-label")
    assert page.locator("#experiments tbody tr").count() == 3
    assert page.locator("#clients tbody tr").count() == 4
    assert not page.locator("#chart-panel, #theme, #classes").first.is_visible()


CONTRASTS = """() => {
  const lightness = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(Number)
      .map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() && !one.closest("svg, .matrix")
      && [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())).map((one) => {
    const [a, b] = [lightness(getComputedStyle(one).color), lightness(ground(one))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), one.tagName, one.className, one.textContent.slice(0, 30)];
  }).sort((x, y) => x[0] - y[0])[0];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(show, make_round, scheme):
    page = show(*several(make_round, 12), color_scheme=scheme)
    worst = page.evaluate(CONTRASTS)
    assert worst[0] >= 4.5, worst
    page.evaluate(
        """() => [...Array(8).keys()].map((slot) => {
          const probe = document.body.appendChild(document.createElement("p"));
          probe.style.color = `var(--slot${slot})`;
          probe.textContent = "x";
        })"""
    )
    worst = page.evaluate(CONTRASTS)
    assert worst[0] >= 4.5, worst  # lines need 3:1 only


def test_every_control_has_a_name(show, make_round):
    page = show(*several(make_round, 12))
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, summary, [tabindex]")].filter((one) =>
          one.checkVisibility() && !(one.textContent.trim() || one.getAttribute("aria-label")
          || one.getAttribute("aria-labelledby") || one.labels?.length)).map((one) => one.outerHTML)"""
    )
    assert nameless == []
