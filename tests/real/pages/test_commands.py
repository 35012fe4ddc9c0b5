"""The commands of each page outside the tutorials run in a folder of their own, and print what the page shows."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from page_reader import BLOCK, CHECKOUT, INTERRUPT, LINKED, Reader

RUN = ("gpt-0123456789", "output/runs/RUN", "@last")  # how a page names a finished run
BEFORE = {  # a page that shows a run which is still training: the command that was left at its first steps
    "docs/howto/manage-runs.md": "train-litgpt run deployments/configs/local.yaml train.max_steps=200",
    "docs/howto/resume.md": "train-litgpt run deployments/configs/local.yaml",
}
LEFT = f"━ 4/60\n{INTERRUPT}"
CODES = {  # with which a page shows that a command ends
    "hang.yaml": 46,
    "name=priced": 40,
    "wandb={project: pages}": 40,  # no key
}


def commands(page: Path) -> str:
    """Return the commands of a page that are not marked as not run."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return "".join(block for mark, kind, _, block in blocks if kind == "sh" and not mark)


PAGES = {
    str(page.relative_to(CHECKOUT)): commands(page)
    for page in [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    if page.parent.name != "start" and commands(page)
}


def write_texts(folder: Path) -> None:
    """Write four files of 48 documents each, of which four are too short for the filter of the page."""
    chance = random.Random(7)
    vocabulary = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 7))) for _ in range(300)]
    folder.mkdir()
    for number in range(4):
        documents = [" ".join(chance.choices(vocabulary, k=40 if index % 12 else 2)) for index in range(48)]
        (folder / f"{number}.txt").write_text("\n\n".join(documents), encoding="utf-8")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory, prefect_home: Callable[[], Path]) -> Path:
    """A folder with a finished run in `output`, and what pages name: `texts`, `own.yaml` and the token ids `mine`."""
    reader = Reader(tmp_path_factory.mktemp("materials"), prefect_home())
    write_texts(reader.folder / "texts")
    [own] = [block for *_, name, block in BLOCK.findall((CHECKOUT / "docs/howto/data-files.md").read_text()) if name]
    (reader.folder / "own.yaml").write_text(own, encoding="utf-8")
    reader.type("train-litgpt prepare own.yaml")
    [dataset] = reader.folder.glob("output/datasets/texts-*")
    shutil.copytree(dataset, reader.folder / "mine")
    shutil.copy(dataset / "tokenizer" / "tokenizer.json", reader.folder / "mine")
    shutil.rmtree(dataset)
    short = "platform.nodes=1 train.max_steps=20 train.warmup_steps=2"
    reader.type(f"train-litgpt run deployments/configs/local.yaml name=gpt {short}")
    return reader.folder


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_output_of_its_commands(
    page: str, materials: Path, tmp_path: Path, prefect_home: Callable[[], Path]
) -> None:
    unneeded = LINKED if any(name in PAGES[page] for name in RUN) else (*LINKED, "output")
    shutil.copytree(materials, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*unneeded))
    reader = Reader(tmp_path, prefect_home())
    if page in BEFORE:
        reader.type(BEFORE[page], LEFT)
    reader.follow(page, codes=CODES)
