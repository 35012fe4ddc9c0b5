"""The registry of check codes: it has exactly the codes that the source emits, and its texts name existing settings."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from docs.reference_checks import AREAS, area_of
from launcher.checks import doctor
from launcher.config import RunConfig, ScriptConfig, SweepConfig, settings_of
from launcher.platforms import settings_classes
from launcher.platforms.kubernetes import reasons
from launcher.platforms.slurm import platform as slurm
from litgpt_demo.codes import CODES
from litgpt_demo.errors import Finding, Severity

CHECKOUT = Path(__file__).parents[3]
# The functions that construct findings, and the place of the code among their arguments.
CONSTRUCTORS = {"Finding": 1, "Finding.of": 1, "finding_of": 1, "found": 0, "info": 0, "warning": 0, "error": 0}
SETTING = re.compile(r"`((?:data|model|train|evaluation|sweep|image|platform|launch|dataset_workers)\.[a-z0-9_.]+)")


@cache
def nodes() -> list[ast.AST]:
    """The syntax nodes of both sides, without the registry itself."""
    files = [file for package in ("launcher", "litgpt_demo") for file in sorted((CHECKOUT / package).rglob("*.py"))]
    trees = [ast.parse(file.read_text("utf-8")) for file in files if file.name != "codes.py"]
    return [node for tree in trees for node in ast.walk(tree)]


def constructions() -> Iterator[tuple[str, str | None]]:
    """The code of each construction of a finding that has it as text, and its severity if that is text too."""
    for node in nodes():
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        place = CONSTRUCTORS.get(name)
        if place is None or len(node.args) <= place:
            continue
        code = node.args[place]
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            severity = node.args[0].value if name == "Finding" and isinstance(node.args[0], ast.Constant) else None
            yield code.value, {"info": "info", "warning": "warning", "error": "error"}.get(name, severity)


def printed() -> Iterator[tuple[str, str]]:
    """The code and severity of each line that a node or a VM prints itself."""
    text = "\n".join(node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for severity, code in re.findall(r"\b(error|warning) \[([a-z-]+\.[a-z-]+)\]", text):
        yield code, severity
    for code in re.findall(r"\|\| fail ([a-z-]+\.[a-z-]+) ", text):
        yield code, "error"


def composed() -> set[str]:
    """The codes that the source composes from an area and a word."""
    pending = [*reasons._ADMISSION, *reasons._SCHEDULER, *reasons._WAITING, *reasons._EVENTS]
    areas = ("kubernetes", reasons._AREA)
    failures = {
        node.args[0].value for node in nodes() if isinstance(node, ast.Call) and ast.unparse(node.func) == "_fail"
    }
    kubernetes_words = {"unscheduled", "gated", "queue", "deactivated", "evicted", *reasons._REFUSED_PARTS.values()}
    return {
        *(f"{area}.{phrase.code}" for area in areas for phrase in reasons._ADMISSION),
        *(f"{area}.refused" for area in areas),
        *(f"{reasons._AREA}.{phrase.code}" for phrase in pending),
        *(f"{reasons._AREA}.{word}" for word in kubernetes_words),
        *(f"slurm.{word}" for word in failures),
        *(f"slurm.pending.{reason}" for reason in slurm._REASONS),
        *(f"package.{name}" for name in doctor._NEEDED),
        *(f"tool.{name}" for name in doctor._TOOLS),
        *(f"{area}.access" for area in ("batch", "kubernetes", "runai", "slurm")),
    }


def settings() -> set[str]:
    """All settings of configs, with their sections."""
    kinds = (RunConfig, ScriptConfig, SweepConfig)
    names = {setting.name for kind in kinds for setting in settings_of(kind)}
    return names | {name.rpartition(".")[0] for name in names}


def test_registry_has_exactly_the_codes_of_the_source() -> None:
    constant = {node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    shown = {code for code, _ in printed()}
    assert {"batch.driver", "network.slow"} < shown
    assert {code for code, _ in constructions()} | shown | composed() <= CODES.keys()
    assert CODES.keys() - constant - shown - composed() == set()


def test_registry_names_the_severities_of_the_source() -> None:
    listed = {code: set(check.severities.split(", ")) for code, check in CODES.items()}
    assert set().union(*listed.values()) == set(get_args(Severity))
    emitted = {(code, severity) for code, severity in [*constructions(), *printed()] if severity is not None}
    assert {(code, severity) for code, severity in emitted if severity not in listed[code]} == set()


def test_each_platform_elsewhere_has_a_code_for_access() -> None:
    areas = {kind.opens.split(".")[2] for kind in settings_classes()} - {"local"}
    assert {f"{area}.access" for area in areas} <= CODES.keys()


@pytest.mark.parametrize("code", CODES)
def test_texts_of_a_code_are_short_sentences(code: str) -> None:
    check = CODES[code]
    assert re.fullmatch(r"[a-z_]+(\.[A-Za-z0-9_-]+)+", code)
    assert check.summary
    assert check.cause
    assert check.fix or check.severities == "info"
    for text in filter(None, check[1:]):
        assert text.endswith("."), text
        assert ";" not in text
        assert max(len(sentence.split()) for sentence in re.split(r"(?<=\.) ", text)) <= 25, text


def test_texts_name_existing_settings() -> None:
    known = settings()
    named = {name.rstrip(".") for check in CODES.values() for text in check for name in SETTING.findall(text)}
    assert len(named) > 50
    assert named - known == set()


def test_page_has_a_section_for_each_area() -> None:
    assert {area_of(code) for code in CODES} == set(AREAS)


def test_finding_with_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown check code 'gpu.cuont'"):
        Finding("error", "gpu.cuont", "too few")
