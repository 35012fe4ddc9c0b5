"""The health of every GPU of a node while its ranks train, told in the metrics channel as rows of kind `gpus`.

    python -m litgpt_demo.node.gpu_health     what NVML says every few seconds, a line of JSON each

A process of its own asks NVML, the driver's library for questions: a GPU that has fallen off the bus may hang whoever
asks, and this one can be left behind. A node without NVML has no such rows, and a broken NVML harms no training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.metrics import CLOCK_REASONS, marked
from litgpt_demo.node.environment import driver_folders
from litgpt_demo.node.evidence import Trace

SAMPLED = 5.0
"""Seconds between two samples. NVML's own utilisation is of the last sixth of a second to second (nvml.h)."""
TOLD = 60.0
"""Seconds that a row is about: a node with 8 GPUs writes 5 MB of them in a week."""
_LAST = 2.0  # seconds that the process has to end

# Those that a sound GPU in a sound machine does not have; at its power limit (SwPowerCap) every busy one is at times.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80

Sample = Mapping[str, Any]
"""The things NVML says of one GPU, in NVML's units; None for what it does not know of this model, empty for a lost GPU.

`utilization` in per cent, `used` and `total` bytes of memory, `power` in milliwatts, `temperature` in degrees Celsius,
`clock` of the multiprocessors in MHz, `reasons` as a bit mask, `corrected` and `uncorrected` ECC errors since the
driver was loaded."""


class Health:
    """The GPUs of a node over a stretch of time, sample by sample."""

    def __init__(self) -> None:
        self._gpus: list[_Seen] = []
        self._xids: dict[str, None] = {}

    def add(self, gpus: Sequence[Sample], xids: Sequence[str] = ()) -> None:
        """Take a sample of each GPU, and the Xid errors since the last one, as `<GPU>:<number>`."""
        self._gpus += [_Seen() for _ in gpus[len(self._gpus) :]]
        for seen, sample in zip(self._gpus, gpus, strict=False):
            seen.add(sample)
        self._xids |= dict.fromkeys(xids)

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of a metrics row, each a list by GPU (litgpt_demo.metrics); none before a sample."""
        told = [seen.columns() for seen in self._gpus]
        return {name: [one[name] for one in told] for name in told[0]} | {"xids": list(self._xids)} if told else {}


class _Seen:
    """The things seen of one GPU."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._most: dict[str, float] = {}
        self._reasons = 0

    def add(self, sample: Sample) -> None:
        reasons = sample.get("reasons")
        self._reasons |= reasons or 0
        throttled = None if reasons is None else bool(reasons & _THROTTLED)
        for name, value in {**sample, "throttled": throttled}.items():
            if value is not None:
                self._sums[name] += value
                self._counts[name] += 1
                self._most[name] = max(value, self._most.get(name, value))

    def columns(self) -> dict[str, Any]:
        def mean(name: str, unit: float, digits: int) -> float | None:
            return round(self._sums[name] / self._counts[name] * unit, digits) if self._counts[name] else None

        return {
            "utilisation": mean("utilization", 0.01, 3),
            "memory_used": self._most.get("used"),
            "memory_total": self._most.get("total"),
            "power": mean("power", 0.001, 1),
            "temperature": self._most.get("temperature"),
            "clock": mean("clock", 1, 0),
            "throttled": mean("throttled", 1, 3),
            "reasons": " ".join(name for bit, name in CLOCK_REASONS.items() if self._reasons & bit),
            "corrected": self._most.get("corrected"),
            "uncorrected": self._most.get("uncorrected"),
        }


class GpuWatch:
    """Tells of a node's GPUs as long as it is entered: a row every `told` seconds, and one of what is left at the end.

    A node without GPUs starts nothing.
    """

    def __init__(
        self, environ: Mapping[str, str], place: Mapping[str, Any], *,
        step: Callable[[], int], sampled: float = SAMPLED, told: float = TOLD, root: Path = Path("/"),
    ) -> None:  # fmt: skip
        """
        Args:
            environ: the ranks' environment, by which they find the driver.
            place: the columns that say which node it is.
            step: the steps that its ranks have done.
        """
        folders = ":".join(dict.fromkeys(filter(None, driver_folders(environ, root))))
        # Not marked as one of the node's ranks: whoever ends those need not wait for a process that hangs in a driver.
        mine = {name: value for name, value in environ.items() if name != NODE_DIRECTORY}
        self._environ = {**mine, "LD_LIBRARY_PATH": folders}
        self._place, self._step, self._sampled, self._told = place, step, sampled, told
        self._process: subprocess.Popen[str] | None = None
        self._any = any((root / "dev").glob("nvidia[0-9]*"))
        self._thread = threading.Thread(target=self._read, name="gpus", daemon=True)
        self.whole = Health()
        """All of its time."""

    def __enter__(self) -> Self:
        if self._any:
            command = [sys.executable, "-m", __name__, f"--every={self._sampled}"]
            with suppress(OSError):
                self._process = subprocess.Popen(
                    command, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
                )
                self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._thread.join(_LAST)
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible call does not die
                self._process.wait(_LAST)

    def traces(self) -> list[Trace]:
        """Return the errors that the driver told of, for the judge of the node's end; most containers hide its log."""
        told = (xid.partition(":") for xid in self.whole.columns().get("xids", ()))
        return [Trace(source="kernel", text=f"NVML: Xid {number} on GPU {gpu}") for gpu, _, number in told]

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        part, begun = Health(), time.monotonic()
        for line in self._process.stdout:
            with suppress(ValueError, TypeError, KeyError):  # a line that a kill cut short
                sample = json.loads(line)
                part.add(sample["gpus"], sample["xids"])
                self.whole.add(sample["gpus"], sample["xids"])
            if (seconds := time.monotonic() - begun) >= self._told:
                self._tell(part, seconds)
                part, begun = Health(), time.monotonic()
        self._tell(part, time.monotonic() - begun)

    def _tell(self, part: Health, seconds: float) -> None:
        if columns := part.columns():
            row = {"kind": "gpus", "step": self._step(), **self._place, "seconds": round(seconds, 1), **columns}
            # One write, as in litgpt_demo.metrics: the ranks print too.
            sys.stdout.write(f"{marked(row)}\n")
            sys.stdout.flush()


# --- in the process that asks -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Print what NVML says of every GPU until nobody reads it. Without NVML nothing is printed."""
    import pynvml as nvml

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=SAMPLED, help="seconds between two samples")
    every = parser.parse_args(argv).every
    try:
        nvml.nvmlInit()
        gpus = [_asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return
    events = _asked(nvml, nvml.nvmlEventSetCreate)
    for gpu in gpus if events is not None else ():
        if gpu is not None:
            _asked(nvml, nvml.nvmlDeviceRegisterEvents, gpu, nvml.nvmlEventTypeXidCriticalError, events)
    xids: list[str] = []
    with suppress(BrokenPipeError):
        while True:
            print(json.dumps({"gpus": [_sample(nvml, gpu) for gpu in gpus], "xids": xids}), flush=True)
            xids = _xids(nvml, events, every)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more when it ends


def _asked(nvml: Any, function: Callable[..., Any], *arguments: object) -> Any:
    """Return NVML's answer; None where it has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _sample(nvml: Any, gpu: Any) -> dict[str, Any]:
    if gpu is None:
        return {}

    def ask(name: str, *arguments: object) -> Any:
        return _asked(nvml, getattr(nvml, name), gpu, *arguments)

    def errors(kind: int) -> Any:
        return ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)

    use, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    return {
        "utilization": None if use is None else use.gpu,
        "used": None if memory is None else memory.used,
        "total": None if memory is None else memory.total,
        "power": ask("nvmlDeviceGetPowerUsage"),
        "temperature": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "clock": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        # The name that drivers before 535 know too; newer ones answer to both.
        "reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        "corrected": errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "uncorrected": errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


def _xids(nvml: Any, events: Any, seconds: float) -> list[str]:
    """Wait so many seconds, and return the Xid errors that came meanwhile."""
    found, until = [], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        event = None if events is None else _asked(nvml, nvml.nvmlEventSetWait, events, max(1, int(left * 1000)))
        if event is None:  # none came; or there are none to be had, which is answered at once
            time.sleep(max(0.0, until - time.monotonic()))
        else:
            found.append(f"{_asked(nvml, nvml.nvmlDeviceGetIndex, event.device)}:{event.eventData}")
    return found


if __name__ == "__main__":
    main()
