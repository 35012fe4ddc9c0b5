"""What a person sees of a run in Prefect's UI, by a headless Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from launcher.config import RunConfig
from launcher.runs.run import plan_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver")
def test_the_report_and_its_curves_are_drawn(
    whole: RunConfig, served: Any, client: SyncPrefectClient, tmp_path: Path
) -> None:
    ui = served.settings["PREFECT_UI_URL"]
    [page] = [one.id for one in client.read_artifacts() if one.key == f"report-{plan_run(whole).name}"]
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:

        def seen(path: str) -> Any:
            """The element at this XPath, once it is there: the page replaces its elements while it loads."""
            passing = [NoSuchElementException, StaleElementReferenceException]
            waiting = WebDriverWait(browser, 180, ignored_exceptions=passing)
            return waiting.until(lambda driver: driver.find_element(By.XPATH, path), path)

        browser.get(ui)
        seen("//input[@type='password']").send_keys(served.secret)
        seen("//button[normalize-space()='Login']").click()
        seen("//*[text()='Dashboard']")
        browser.get(f"{ui}/artifacts/artifact/{page}")
        chart = "//*[name()='svg'][@aria-roledescription='xychart'][.//*[text()='Loss']]"
        for number, name in enumerate(("training", "validation")):
            seen(f"{chart}//*[@class='legend']//*[text()='{name}']")
            assert "L" in seen(f"{chart}//*[@class='line-plot-{number}']/*[name()='path']").get_attribute("d")
