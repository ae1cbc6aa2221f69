"""The page in a real browser that has no network."""

from __future__ import annotations

import shutil

import pytest

from piebald.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.full

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    binary = next((found for name in names if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no chromium was found on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("report"))[0].as_uri()


@pytest.fixture
def visit(browser, address):
    """Open the page; returns the page, its console messages and its requests."""
    contexts = []

    def visit(width, scheme):
        context = browser.new_context(
            viewport={"width": width, "height": 812}, color_scheme=scheme, offline=True, has_touch=width < 600
        )
        contexts.append(context)
        page, messages, requests = context.new_page(), [], []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollHeight") <= (
            3000 if width > 1000 else 6000
        )  # the rest folds
        page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        for plot in page.locator(".plot").all():
            plot.locator(".main-svg").first.wait_for()
        return page, messages, requests

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (375, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.long),
        pytest.param(375, "light", marks=pytest.mark.long),
    ],
)
def test_all_is_drawn_quietly_and_fits(visit, address, width, scheme):
    page, messages, requests = visit(width, scheme)
    assert messages == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot").count() == 8
    assert page.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))")
    drawn = "[...document.querySelectorAll('.js-line, .boxes path.box, .heatmaplayer image')].length"
    assert page.evaluate(drawn) >= 5 * 3 + 5 + 4 + 4 + 1
    boxes = "[...document.querySelectorAll('.plot')].map((p) => [p.offsetHeight, p.querySelector('svg').clientHeight])"
    assert all(outer == inner for outer, inner in page.evaluate(boxes))  # no chart spills over what follows it


@pytest.mark.long
def test_the_charts_follow_the_theme(visit):
    page, messages, _ = visit(1280, "light")
    line = page.locator("#plot-version .js-line").nth(1)
    before = line.evaluate("(path) => getComputedStyle(path).stroke")
    page.emulate_media(color_scheme="dark")
    playwright.expect(line).not_to_have_css("stroke", before)
    assert messages == []


@pytest.mark.long
def test_tables_scroll_in_their_own_box(visit):
    page, _, _ = visit(375, "light")
    wide = page.locator("#results .scroll").first
    assert wide.evaluate("(box) => box.scrollWidth > box.clientWidth")
    wide.evaluate("(box) => { box.scrollLeft = 10_000; }")
    assert wide.evaluate("(box) => box.querySelector('tbody th').getBoundingClientRect().left >= 0")  # the label stays


@pytest.mark.long
def test_series_can_be_hidden(visit):
    page, messages, _ = visit(1280, "light")
    lines = page.locator("#plot-version .js-line")
    before = lines.count()
    key = page.locator(".keys button", has_text="fedprox").first
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    playwright.expect(lines).not_to_have_count(before)
    key.click()
    playwright.expect(lines).to_have_count(before)
    assert messages == []


@pytest.mark.long
def test_clients_can_be_sorted(visit):
    page, _, _ = visit(1280, "light")
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    column = page.locator("table.sortable thead button", has_text="hdafl")
    cells = "[...document.querySelectorAll('table.sortable tbody tr')].map((row) => Number(row.cells[4].dataset.sort))"
    place = page.evaluate(
        "[...document.querySelectorAll('table.sortable thead th')].findIndex((th) => th.textContent === 'hdafl')"
    )
    for sign in (-1, 1):
        column.click()
        values = page.evaluate(cells.replace("cells[4]", f"cells[{place}]"))
        assert values == sorted(values, key=lambda value: sign * value)


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 390])
def test_no_text_of_a_chart_is_cut(visit, width):
    page, _, _ = visit(width, "light")
    cut = """() => [...document.querySelectorAll('.plot text')].filter((text) => {
        const own = text.getBoundingClientRect(), all = text.closest('svg').getBoundingClientRect();
        return own.width && (own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1);
    }).map((text) => text.textContent)"""
    assert page.evaluate(cut) == []


@pytest.mark.long
def test_text_stands_out_from_what_is_behind_it(visit):
    """WCAG AA: 4.5 : 1 for text, 3 : 1 for lines of a chart."""
    ratio = """(names) => {
        const css = getComputedStyle(document.documentElement);
        const light = (name) => {
            const hex = css.getPropertyValue("--" + name).trim();
            const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
            const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const back = light("surface");
        return names.map((n) => (Math.max(light(n), back) + 0.05) / (Math.min(light(n), back) + 0.05));
    }"""
    for scheme in ("light", "dark"):
        page, _, _ = visit(1280, scheme)
        assert min(page.evaluate(ratio, ["ink", "soft", "accent", "good", "bad"])) >= 4.5
        for palette in ("series", "group"):
            assert min(page.evaluate(ratio, [f"{palette}-{place}" for place in range(8)])) >= 3
