"""What a person sees of a run in Prefect's UI, by a headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from prefect.client.orchestration import SyncPrefectClient
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from launcher.config import RunConfig
from launcher.runs.run import plan_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver")

Browser: TypeAlias = webdriver.Chrome


@pytest.fixture(scope="module")
def browser(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One in which the secret was pasted."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as started:
        started.set_window_size(1440, 1200)
        started.get(served.place.ui)
        seen(started, "//input[@type='password']").send_keys(served.secret)
        started.execute_script("arguments[0].click()", seen(started, "//button[normalize-space()='Login']"))
        says(started, "Dashboard")
        yield started


def eventually(browser: Browser, attempt: Callable[[Browser], Any], what: str) -> Any:
    """What `attempt` gives, once it gives something: the page replaces its elements while it loads."""
    passing = [NoSuchElementException, StaleElementReferenceException]
    return WebDriverWait(browser, 180, ignored_exceptions=passing).until(attempt, what)


def seen(browser: Browser, path: str) -> Any:
    """The element at this XPath, once it is there."""
    return eventually(browser, lambda driver: driver.find_element(By.XPATH, path), path)


def says(browser: Browser, text: str) -> None:
    eventually(browser, lambda driver: text in driver.find_element(By.TAG_NAME, "body").text, text)


def test_the_report_and_its_curves_are_drawn(whole: RunConfig, served: Any, browser: Browser) -> None:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as client:
        [page] = [one.id for one in client.read_artifacts() if one.key == f"report-{plan_run(whole).name}"]
    browser.get(f"{served.place.ui}/artifacts/artifact/{page}")
    chart = "//*[name()='svg'][@aria-roledescription='xychart'][.//*[text()='Loss']]"
    for number, name in enumerate(("training", "validation")):
        seen(browser, f"{chart}//*[@class='legend']//*[text()='{name}']")
        assert "L" in seen(browser, f"{chart}//*[@class='line-plot-{number}']/*[name()='path']").get_attribute("d")
