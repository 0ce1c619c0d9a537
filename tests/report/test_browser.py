"""The site in a real browser, opened from disk."""

import json
import shutil

import pytest

from slimqwen import variant
from slimqwen.report import site

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium here; `apt-get install chromium chromium-driver` gets it"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "report"
    site.build(variant.repository_root(), folder)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", f"--user-data-dir={profile}",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def page(driver, report):
    """The index, fresh, as a desktop shows it."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get((report / "index.html").as_uri())
    return driver


def variants_shown(page):
    return page.execute_script(
        "return [...document.querySelectorAll('.board tbody tr:not(.family)')].filter(r => r.checkVisibility())"
        ".map(r => r.cells[0].innerText)"
    )


def columns(page, label):
    """By family, the sort keys of a column, empty ones as None, of the rows as they stand."""
    return page.execute_script(
        """
        const headings = [...document.querySelectorAll(".board thead th")];
        const index = headings.findIndex((one) => one.innerText.trim() === arguments[0]);
        return [...document.querySelectorAll(".board tbody")].map((family) =>
          [...family.rows].slice(1).map((row) => row.cells[index].dataset.o ?? null));
        """,
        label,
    )


def heading(page, label):
    return page.find_element(
        "xpath", f"//table[contains(@class,'board')]//th[button[normalize-space()='{label}']]"
    )


def test_every_page_loads_without_an_error_and_asks_nothing_of_a_network(page, report):
    asked = []
    for file in sorted(report.rglob("*.html")):
        page.get(file.as_uri())
        assert page.get_log("browser") == [], file.name
        for entry in page.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            # The browser's own first page asks for parts of its own.
            own = message["params"].get("documentURL", "").startswith(("chrome:", "chrome-untrusted:"))
            if message["method"] == "Network.requestWillBeSent" and not own:
                asked.append(message["params"]["request"]["url"])
    assert len(asked) > 10
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}


def test_a_click_sorts_and_a_second_one_turns_it_round(page):
    button = heading(page, "E2EL long, ms").find_element("tag name", "button")
    button.click()
    assert heading(page, "E2EL long, ms").get_attribute("aria-sort") == "ascending"
    keys = columns(page, "E2EL long, ms")[0]
    given = [float(key) for key in keys if key is not None]
    assert len(given) >= 2
    assert given == sorted(given)
    assert keys[len(given) :] == [None] * (len(keys) - len(given))

    button.click()
    assert heading(page, "E2EL long, ms").get_attribute("aria-sort") == "descending"
    keys = columns(page, "E2EL long, ms")[0]
    assert [float(key) for key in keys if key is not None] == given[::-1]
    assert keys[: len(given)].count(None) == 0


def test_every_column_sorts_by_keyboard_alone(page):
    from selenium.webdriver.common.keys import Keys

    labels = page.execute_script(
        "return [...document.querySelectorAll('.board thead th')].map(h => h.innerText.trim())"
    )
    assert len(labels) > 20
    for label in labels:
        button = heading(page, label).find_element("tag name", "button")
        page.execute_script("arguments[0].focus()", button)
        page.switch_to.active_element.send_keys(Keys.ENTER)
        direction = heading(page, label).get_attribute("aria-sort")
        assert direction in ("ascending", "descending"), label
        for family in columns(page, label):
            try:
                keys = [float(key) for key in family if key is not None]
            except ValueError:
                continue
            assert keys == sorted(keys, reverse=direction == "descending"), label
    assert len(page.find_elements("css selector", "[aria-sort]")) == 1


def test_the_tab_key_reaches_the_content_link_first_and_then_the_headings(page):
    from selenium.webdriver.common.keys import Keys

    page.switch_to.active_element.send_keys(Keys.TAB)
    first = page.switch_to.active_element
    assert first.text == "Skip to the content"
    assert first.rect["x"] >= 0  # it is seen once it has the focus
    reached = set()
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.switch_to.active_element.text.strip())
    assert {"variant", "verdict", "evidence"} <= reached
    outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline not in ("none", "")


def test_a_family_without_a_record_is_folded_and_a_click_unfolds_it(page):
    assert "tiny-best" in variants_shown(page)
    assert "cyankiwi" not in variants_shown(page)
    button = page.find_element("xpath", "//tr[@class='family']//button[contains(., 'qwen3.5-4b')]")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert {"cyankiwi", "qwen3.5-4b-best"} <= set(variants_shown(page))
    button.click()
    assert "cyankiwi" not in variants_shown(page)


@pytest.mark.parametrize("width", [1400, 390])
def test_rows_are_of_one_height(page, width):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    heights = page.execute_script(
        """
        document.querySelectorAll(".folded .family button").forEach((one) => one.click());
        return [...document.querySelectorAll(".board tbody tr:not(.family)")].map((row) => row.offsetHeight);
        """
    )
    assert len(heights) > 20
    assert max(heights) - min(heights) <= 1


def test_filters_leave_the_rows_that_fit_and_say_how_many(page):
    from selenium.webdriver.support.select import Select

    every = page.find_elements("css selector", ".board tbody tr:not(.family)")
    Select(page.find_element("name", "standing")).select_by_visible_text("promoted")
    shown = variants_shown(page)
    assert "tiny-best" in shown
    assert 0 < len(shown) < len(every)
    assert f"{len(shown)} of {len(every)} rows" in page.find_element("tag name", "output").text

    Select(page.find_element("name", "standing")).select_by_index(0)
    hardware = Select(page.find_element("name", "hardware"))
    hardware.select_by_visible_text(next(each.text for each in hardware.options if "2 CPUs" in each.text))
    assert set(variants_shown(page)) >= {"tiny", "tiny-awq"}
    assert "cyankiwi" not in variants_shown(page)

    Select(page.find_element("name", "suite")).select_by_visible_text("tinyworld")
    page.find_element("name", "find").send_keys("tiny-awq")
    assert variants_shown(page) == ["tiny-awq"]

    for name in ("hardware", "suite"):
        Select(page.find_element("name", name)).select_by_index(0)
    page.find_element("name", "find").clear()
    page.find_element("name", "find").send_keys("shortcot-w4lm")  # of a folded family
    assert variants_shown(page) == ["cyankiwi-seq8-shortcot-w4lm-v64k-mtp4"]


def test_groups_of_columns_can_be_hidden(page):
    cell = heading(page, "E2EL long, ms")
    assert cell.is_displayed()
    page.find_element("css selector", "[name=columns][value=latency]").click()
    assert not cell.is_displayed()
    assert heading(page, "verdict").is_displayed()


def test_a_variant_is_reached_by_its_link(page):
    page.find_element("link text", "tiny-awq").click()
    assert page.title.startswith("tiny-awq")
    page.find_element("link text", "Slimqwen").click()
    assert page.find_element("id", "leaderboard").is_displayed()


def test_without_scripts_it_is_a_plain_table(page, report):
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.get((report / "index.html").as_uri())
        assert page.find_element("css selector", ".board tbody tr th a").is_displayed()
        assert not page.find_element("css selector", ".filters").is_displayed()
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_paper_stand_apart_in_either_scheme(page, scheme):
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    colours = page.execute_script(
        """
        const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const seen = (colour) => !/, 0\\)$/.test(colour);
        const behind = (one) => {
          for (let up = one; up; up = up.parentElement) {
            const colour = getComputedStyle(up).backgroundColor;
            if (seen(colour)) return rgb(colour);
          }
        };
        return [...document.querySelectorAll("p, td, th, a, small, .badge, .w, figcaption span, .plot text")]
          .filter((one) => one.textContent.trim())
          .map((one) => {
            const style = getComputedStyle(one);
            return [one.tagName, rgb(one.closest("svg") ? style.fill : style.color), behind(one)];
          });
        """
    )
    assert len(colours) > 100
    dim = {
        (tag, round(_contrast(ink, paper), 1)) for tag, ink, paper in colours if _contrast(ink, paper) < 4.5
    }
    assert dim == set()


@pytest.mark.parametrize("path", ["index.html", "variants/tiny-best.html", "variants/tiny.html"])
def test_on_a_phone_nothing_but_tables_is_wider_than_the_screen(page, report, path):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 800, "deviceScaleFactor": 2, "mobile": True},
    )
    page.get((report / path).as_uri())
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    wide = page.execute_script(
        """
        return [...document.querySelectorAll("main *")]
          .filter((one) => !one.closest(".scroll, pre, .sr, svg"))
          .filter((one) => one.getBoundingClientRect().right > 361)
          .map((one) => one.outerHTML.slice(0, 90));
        """
    )
    assert wide == []


def test_what_a_screen_reader_needs_is_there(page, report):
    for path in ("index.html", "variants/tiny-best.html"):
        page.get((report / path).as_uri())
        assert page.execute_script("return document.documentElement.lang") == "en"
        bad = page.execute_script(
            "const all = s => [...document.querySelectorAll(s)];"
            "return [all('table').filter(t => !t.caption).length, all('th').filter(t => !t.scope).length,"
            " all('main svg').filter(s => s.getAttribute('role') !== 'img' || !s.getAttribute('aria-label')).length,"
            " all('figure').filter(f => !f.querySelector('table tbody tr')).length,"
            " all('input, select').filter(f => !f.closest('label')).length, all('h1').length - 1]"
        )
        assert bad == [0, 0, 0, 0, 0, 0]


def _contrast(first, second):
    """The ratio of WCAG 2 (W3C, 2018), section 1.4.3."""

    def luminance(colour):
        parts = [value / 255 for value in colour]
        parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
