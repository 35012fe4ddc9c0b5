"""A real server and worker, and a browser that has logged in to their UI."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright
from served import Served, client, served

__all__ = ["client", "served"]

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="package")
def browser_page(served: Served) -> Iterator[Page]:
    """A page as wide as a laptop's, in the dark theme, which is the one of the README's pictures."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium (playwright's own download is not used)")
    with sync_playwright() as playwright:
        # Root has no sandbox. Without this environment, its many processes are none that a test leaves behind.
        own = {"executable_path": str(CHROMIUM), "args": ["--no-sandbox"], "env": {"PATH": os.environ["PATH"]}}
        browser = playwright.chromium.launch(**own)  # type: ignore[arg-type]
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
        page.set_default_timeout(0)  # the guard against hanging is pytest's
        page.goto(served.ui)
        page.get_by_placeholder("admin:pass").fill(served.secret)
        page.get_by_role("button", name="Login").click()
        page.get_by_role("link", name="Deployments").wait_for()
        yield page
        browser.close()
