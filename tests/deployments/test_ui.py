"""What a person sees in Prefect's UI, by a headless Chromium: the form, its refusals, a run, its curves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from prefect.client.orchestration import SyncPrefectClient
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from launcher.config import RunConfig
from launcher.runs.run import plan_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.prefect,
    pytest.mark.training,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"),
]

Browser: TypeAlias = webdriver.Chrome
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1440,1200",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One that was opened by `make ui`, and is logged in thereby."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    started = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    opened = served.call("env", "BROWSER=echo %s", sys.executable, "-m", "deployments.bootstrap", "ui")
    started.get(opened.stdout.strip())
    says(started, "Dashboard")
    yield started
    started.quit()


@pytest.fixture
def client(served: Any) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as opened:
        yield opened


@pytest.fixture
def form(served: Any, client: SyncPrefectClient, browser: Browser) -> Callable[[str], None]:
    """Opens the form that starts a deployment's flow."""

    def open_form(deployment: str) -> None:
        found = client.read_deployment_by_name(deployment)
        browser.get(f"{served.place.ui}/deployments/deployment/{found.id}/run")
        seen(browser, "//button[normalize-space()='Submit']")

    return open_form


def eventually(browser: Browser, attempt: Callable[[Browser], Any], seconds: float = 60, what: str = "") -> Any:
    """What `attempt` gives, once it gives something: the page replaces its elements while it loads."""
    passing = [NoSuchElementException, StaleElementReferenceException]
    return WebDriverWait(browser, seconds, ignored_exceptions=passing).until(attempt, what)


def seen(browser: Browser, path: str, seconds: float = 60) -> WebElement:
    """The element at this XPath, once it is there."""
    found: WebElement = eventually(browser, lambda driver: driver.find_element(By.XPATH, path), seconds, path)
    return found


def says(browser: Browser, text: str, seconds: float = 60) -> None:
    eventually(browser, lambda driver: text in driver.find_element(By.TAG_NAME, "body").text, seconds, text)


def fill(browser: Browser, label: str, value: str) -> None:
    path = f"//label[starts-with(normalize-space(),'{label}')]/following::*[self::input or self::textarea]"

    def written(driver: Browser) -> bool:
        field = driver.find_element(By.XPATH, path)
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value)
        return field.get_attribute("value") == value

    eventually(browser, written, what=label)


def press(browser: Browser, button: str) -> None:
    def pressed(driver: Browser) -> bool:
        found = driver.find_element(By.XPATH, f"//button[normalize-space()='{button}']")
        driver.execute_script("arguments[0].click()", found)
        return True

    eventually(browser, pressed, what=button)


def test_the_secret_is_pasted_once_where_the_browser_was_opened_by_hand(served: Any, browser: Browser) -> None:
    browser.get(served.place.ui)
    says(browser, "Dashboard")
    browser.execute_script("localStorage.clear()")
    browser.get(served.place.ui)
    seen(browser, "//input[@type='password']").send_keys(served.secret)
    press(browser, "Login")
    says(browser, "Dashboard")
    browser.get(served.place.ui)
    says(browser, "Work Pools")


def test_the_form_shows_titles_help_and_defaults(form: Callable[[str], None], browser: Browser) -> None:
    form("train-litgpt/local")
    for text in (
        "Learning Rate", "Highest learning rate, reached after the warm-up.",
        "Python standard library", "Hugging Face dataset", "OpenWebText",
        "The text, and how it is cut into tokens.",
    ):  # fmt: skip
        says(browser, text)
    rate = seen(browser, "//label[starts-with(normalize-space(),'Learning Rate')]/following::input")
    assert rate.get_attribute("value") == "0.002"


@pytest.mark.parametrize(
    ("label", "value", "refusal"),
    [
        ("Max Steps", "-1", "Validation failed for field 'train.max_steps'"),
        ("name", "No Name!", "Validation failed for field 'name'"),
    ],
)
def test_the_form_refuses_a_wrong_value_and_names_its_field(
    label: str, value: str, refusal: str, form: Callable[[str], None], browser: Browser, client: SyncPrefectClient
) -> None:
    before = len(client.read_flow_runs())
    form("train-litgpt/local")
    fill(browser, label, value)
    press(browser, "Submit")
    says(browser, refusal)
    assert len(client.read_flow_runs()) == before


def test_a_run_started_from_the_form_is_followed_to_its_end(
    form: Callable[[str], None], browser: Browser, tmp_path: Path
) -> None:
    form("prepare-dataset/dataset-local")
    fill(browser, "root", str(tmp_path))
    fill(browser, "Max Bytes", "300000")
    fill(browser, "Vocab Size", "300")
    press(browser, "Submit")
    run = "//a[contains(@href,'/runs/flow-run/')]"
    browser.get(eventually(browser, lambda driver: driver.find_element(By.XPATH, run).get_attribute("href")))
    says(browser, "Completed", 120)
    browser.refresh()
    says(browser, "prepare stdlib")
    says(browser, "validation tokens in datasets/stdlib-")
    assert list(tmp_path.glob("datasets/*/manifest.json"))


def test_the_report_and_its_curves_are_drawn(
    whole: RunConfig, served: Any, browser: Browser, client: SyncPrefectClient
) -> None:
    run = plan_run(whole)
    pages = {str(artifact.key): artifact.id for artifact in client.read_artifacts()}
    for kind, text in (("training", "8 of 8"), ("report", "Validation loss")):
        browser.get(f"{served.place.ui}/artifacts/artifact/{pages[f'{kind}-{run.name}']}")
        says(browser, text)
        chart = "//*[name()='svg'][@aria-roledescription='xychart'][.//*[text()='Loss']]"
        for number, name in enumerate(("training", "validation")):
            seen(browser, f"{chart}//*[@class='legend']//*[text()='{name}']")
            line = seen(browser, f"{chart}//*[@class='line-plot-{number}']/*[name()='path']")
            assert "L" in str(line.get_attribute("d"))
        assert browser.execute_script(CLIPPED, seen(browser, chart)) == []
        assert browser.execute_script(GROUND, seen(browser, chart)) == ""


# Texts of a chart that its own edges cut, in JavaScript as is what it is drawn by.
CLIPPED = """
const box = arguments[0].getBoundingClientRect();
return [...arguments[0].querySelectorAll('text')].filter(text => {
  const at = text.getBoundingClientRect();
  return at.left < box.left || at.right > box.right || at.top < box.top || at.bottom > box.bottom;
}).map(text => text.textContent);
"""
# The colour of a rectangle behind the chart; what lies around it is the page's.
GROUND = """
const fill = getComputedStyle(arguments[0].querySelector('.background')).fill;
return fill == 'rgba(0, 0, 0, 0)' || fill == 'transparent' ? '' : fill;
"""


def test_the_lengths_of_the_documents_are_drawn(
    whole: RunConfig, served: Any, browser: Browser, client: SyncPrefectClient
) -> None:
    dataset = plan_run(whole).dataset
    pages = {str(artifact.key): artifact.id for artifact in client.read_artifacts()}
    browser.get(f"{served.place.ui}/artifacts/artifact/{pages[f'dataset-lengths-{dataset.name}-{dataset.key}']}")
    chart = "//*[name()='svg'][.//*[contains(text(),'Length of documents')]]"
    bar = seen(browser, f"{chart}//*[starts-with(@class,'bar-plot')]//*[name()='rect']")
    assert float(str(bar.get_attribute("height"))) >= 0
