"""The promises of every drill, held against what became of its run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import Any

from cli.drills.ground import Command, Ground, Reference, Scene, Violation
from cli.drills.table import Drill, weights_of
from launcher.runs.lease import Lease
from launcher.runs.leftovers import leftovers
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.export import exported
from litgpt_demo.runs import read_metrics
from litgpt_demo.training.checkpoints import committed

_CANCEL = 30.0  # seconds that a cancellation may take


@dataclass(frozen=True, kw_only=True)
class DrillResult:
    """The result of one drill, held once."""

    drill: str
    injected: str
    happened: str
    recovery: float | None
    """Seconds from the fault until the job trained again, or until a command followed it again."""
    lost: int | None
    """Steps that had been seen, and were trained again."""
    seconds: float
    violations: tuple[str, ...]
    logs: str
    """The folder of what the commands said."""


def hold(drill: Drill, ground: Ground, *, disturb: Callable[[Scene], None] = lambda scene: None) -> DrillResult:
    """Hold one drill, and leave nothing that runs.

    Args:
        disturb: called before the run is judged.
    """
    began = time.monotonic()
    with drill.place() as root:
        scene = Scene(ground, drill.name, own_server=drill.own_server, root=root)
        broken: list[str] = []
        try:
            broken += _play(drill, scene)
            disturb(scene)
            broken += _violations(drill, scene)
        except (Violation, TrainLitgptError) as error:
            broken.append(str(error))
        finally:
            happened = _happened(scene)
            scene.clear()
    return DrillResult(
        drill=drill.name,
        injected=drill.injected,
        happened=happened,
        recovery=scene.recovered,
        lost=_lost(scene),
        seconds=time.monotonic() - began,
        violations=tuple(broken),
        logs=str(scene.folder),
    )


def _play(drill: Drill, scene: Scene) -> Iterator[str]:
    """Start the commands, inject the fault, and type again what a user would; yield what was not as promised."""
    commands = drill.commands(scene)
    scene.until(drill.when, f"the moment for {drill.injected}")
    scene.about_to_inject()
    drill.inject(scene)
    ended = sorted(scene.end_of(command, drill.back if not drill.again else _never) for command in commands)
    if ended != sorted(drill.ends):
        yield f"the commands ended with {ended}, not {sorted(drill.ends)}: {_last(commands[0])}"
    if drill.again and (code := scene.end_of(again := scene.run(), drill.back)) != 0:
        yield f"the same command, typed again, ended with {code}: {_last(again)}"


def _never(scene: Scene) -> bool:
    """Return False: whoever was hit cannot recover; the next command does."""
    return False


def _violations(drill: Drill, scene: Scene) -> Iterator[str]:
    """Yield every promise that does not hold, now that all commands have ended."""
    scene.look()
    yield from _of_words(drill, scene)
    yield from _of_model(scene)
    if (count := len(scene.attempts.records())) not in drill.attempts:
        yield f"{count} attempts were made, not {' or '.join(map(str, drill.attempts))}"
    if scene.most > 1:
        yield f"{scene.most} jobs were there at once"
    begun = scene.starts[scene.lives :]
    if any(step < scene.saved for step in begun):
        yield f"a checkpoint was lost: step {scene.saved} was committed, and training began at {begun}"
    if scene.seconds_to_cancel > _CANCEL:
        yield f"cancelling took {scene.seconds_to_cancel:.0f} s, more than {_CANCEL:.0f}"
    yield from _of_leftovers(scene)


def _of_words(drill: Drill, scene: Scene) -> Iterator[str]:
    text = scene.text
    yield from (f"nobody was told {words!r}" for words in drill.told if not re.search(words, text))
    if re.search("^Traceback", text, re.MULTILINE):  # that of a rank, as evidence in a verdict, is indented
        yield "the command fell over with a traceback"


def _of_model(scene: Scene) -> Iterator[str]:
    """Compare the model and the checkpoints with those of the training that nobody disturbed."""
    made, reference = _reference(scene), scene.ground.reference
    if reference is None:  # this is that training
        scene.ground.reference = made
        return
    if reference.exact and made.weights != reference.weights:
        yield f"the weights are not those of the undisturbed run: {made.weights[:12]}, not {reference.weights[:12]}"
    if abs(made.loss - reference.loss) > 0.01 * reference.loss:
        yield f"the validation loss is {made.loss:.4f}, and {reference.loss:.4f} undisturbed"
    if made.checkpoints != reference.checkpoints:
        yield f"the checkpoints are {made.checkpoints}, and {reference.checkpoints} undisturbed"


def _reference(scene: Scene) -> Reference:
    final = exported(scene.storage)
    if final is None:
        raise Violation("no model was exported")
    devices = {row.get("device") for row in read_metrics(scene.storage) if row["kind"] == "start"}
    return Reference(
        weights=sha256(weights_of(scene)).hexdigest(),
        loss=final.validation_loss,
        checkpoints=tuple(found.step for found in committed(scene.storage)),
        exact=devices == {"cpu"},
    )


def _of_leftovers(scene: Scene) -> Iterator[str]:
    if scene.attempts.live() is not None:
        yield "a job runs on"
    yield from (f"left: {left}" for left in leftovers(scene.index) if left.run == scene.attempts.run)
    yield from (f"left: {process}" for process in scene.gone())
    with Lease(scene.index, scene.attempts.run) as lease:
        if not lease.take():
            yield f"the run's lease is still held by {lease.holder}"


def _last(command: Command) -> str:
    lines = [line.strip() for line in command.text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


def _happened(scene: Scene) -> str:
    """Return the attempts in short: how each ended, and the steps from which ranks began."""
    try:
        seen = [f"{attempt.number} {attempt.status.native}" for attempt in scene.attempts.all()]
    except TrainLitgptError as error:
        return str(error)
    begun = f"; began at step {', '.join(map(str, scene.starts))}" if len(scene.starts) > 1 else ""
    return f"attempt {', '.join(seen)}{begun}" if seen else "no attempt"


def _lost(scene: Scene) -> int | None:
    """Return the steps that were trained again."""
    if scene.injected is None:
        return None
    after = scene.starts[scene.lives :]
    return max(0, scene.reached - after[0]) if after else 0


# --- the table of many -----------------------------------------------------------------------------------------------


def rows(results: Sequence[DrillResult]) -> list[dict[str, Any]]:
    """Return a row for each drill, over all times that it was held."""
    held: dict[str, list[DrillResult]] = {}
    for result in results:
        held.setdefault(result.drill, []).append(result)
    return [_row(these) for these in held.values()]


def _row(held: Sequence[DrillResult]) -> dict[str, Any]:
    bad = [one for one in held if one.violations]
    shown = (bad or held)[-1]
    return {
        "": "✗" if bad else "✓",
        "drill": shown.drill,
        "injected": shown.injected,
        "happened": shown.happened,
        "passed": f"{len(held) - len(bad)} of {len(held)}",
        "recovery": _spread([one.recovery for one in held], " s"),
        "steps again": _spread([one.lost for one in held], ""),
    }


def _spread(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    digits = 1 if unit else 0
    middle, most = f"{median(known):.{digits}f}{unit}", f"{max(known):.{digits}f}{unit}"
    return middle if middle == most else f"{middle}, at most {most}"
