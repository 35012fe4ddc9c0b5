"""A node's GPUs while its ranks train. NVML's stand-in is compiled here, and replays what real GPUs said."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_gpus import H100, H200, with_trouble

from litgpt_demo.metrics import GpuRow, parsed
from litgpt_demo.node.gpu_health import GpuWatch, Health

# Types, numbers and structures are those of NVIDIA's nvml.h. Each wait for an event is the next line of $SAMPLES.
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
static long tick;
static int value(void *gpu, int column, u64 *found) {
    FILE *file = fopen(getenv("SAMPLES"), "r");
    char line[4096];
    long wanted = tick * atol(getenv("GPUS")) + (long)gpu - 1;
    for (long number = 0; file && fgets(line, sizeof line, file); number++)
        if (number == wanted) {
            fclose(file);
            char *word = strtok(line, " ");
            while (column--) word = strtok(NULL, " ");
            *found = strtoull(word, NULL, 10);
            return strncmp(word, "-", 1) ? 0 : 3 /* NOT_SUPPORTED */;
        }
    if (file) fclose(file);
    return 15 /* GPU_IS_LOST */;
}
static int small(void *gpu, int column, unsigned *found) {
    u64 whole = 0;
    int code = value(gpu, column, &whole);
    *found = whole;
    return code;
}
int nvmlInitWithFlags(unsigned flags) { if (getenv("HANGS")) pause(); return atoi(getenv("INIT")); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = atoi(getenv("GPUS")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *rates) { rates[1] = 0; return small(gpu, 0, rates); }
int nvmlDeviceGetMemoryInfo(void *gpu, u64 *memory) {
    int code = value(gpu, 2, memory);
    return value(gpu, 1, memory + 2) || code;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *power) { return small(gpu, 3, power); }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *found) { return sensor ? 2 : small(gpu, 4, found); }
int nvmlDeviceGetClockInfo(void *gpu, int clock, unsigned *found) { return clock == 1 ? small(gpu, 5, found) : 2; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, u64 *reasons) { return value(gpu, 6, reasons); }
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, u64 *errors) {
    return counter ? 2 : value(gpu, 7 + type, errors);
}
int nvmlEventSetCreate(void **events) { *events = (void *)1; return 0; }
int nvmlDeviceRegisterEvents(void *gpu, u64 types, void *events) { return types == 8 /* Xid */ ? 0 : 2; }
struct event { void *gpu; u64 type, data; unsigned instance[2]; };
int nvmlEventSetWait_v2(void *events, struct event *event, unsigned milliseconds) {
    static int told;
    if (getenv("XID") && !told++) {
        *event = (struct event){(void *)1L, 8, atol(getenv("XID")), {~0u, ~0u}};
        return 0;
    }
    usleep(milliseconds * 1000);
    tick++;
    return 10 /* TIMEOUT */;
}
int nvmlDeviceGetIndex(void *gpu, unsigned *index) { *index = (long)gpu - 1; return 0; }
"""

PLACE = {"node": 3, "host": "gpu-node-3", "rank": 6, "ranks": 2}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine with two GPUs whose driver's library is where GKE mounts it."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    root = tmp_path_factory.mktemp("machine")
    folder = root / "usr/local/nvidia/lib64"
    folder.mkdir(parents=True)
    (root / "dev").mkdir()
    for number in range(2):
        (root / f"dev/nvidia{number}").touch()
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(folder / "libnvidia-ml.so.1"), "-"]
    subprocess.run(command, input=NVML, text=True, check=True)
    return root


@pytest.fixture
def trace(tmp_path: Path) -> dict[str, str]:
    """The environment of a replay of both recordings, one after the other on two GPUs, the first idle and then busy."""
    lines = [sample for pair in zip(H100, H200, strict=True) for sample in pair]
    (tmp_path / "samples").write_text("".join(f"{' '.join(map(str, line.values()))}\n" for line in lines))
    return {**os.environ, "SAMPLES": str(tmp_path / "samples"), "GPUS": "2", "INIT": "0"}


def watched(machine: Path, environ: dict[str, str], *, seconds: float = 30.0) -> GpuWatch:
    """What was told of GPUs that were watched until both samples were taken, or for so many seconds."""
    until = time.monotonic() + seconds
    with GpuWatch(environ, PLACE, step=lambda: 40, sampled=0.05, root=machine) as watch:
        while time.monotonic() < until and watch.whole.columns().get("temperature") != [59, 52]:
            time.sleep(0.02)
    return watch


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [row for line in capsys.readouterr().out.splitlines() if (row := parsed(line)) is not None]


def test_the_health_of_every_gpu_of_a_node_comes_into_the_metrics(
    machine: Path, trace: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = watched(machine, {**trace, "XID": "79"})
    (row,) = rows(capsys)
    assert {name: row[name] for name in ("kind", "step", *PLACE)} == {"kind": "gpus", "step": 40, **PLACE}
    assert GpuRow.model_validate(row).memory_total == (81_559 << 20, 143_771 << 20)
    assert row["temperature"] == [59, 52]
    assert row["memory_used"] == [19_818 << 20, 32_362 << 20]
    assert row["uncorrected"] == [0, 0]
    assert row["xids"] == ["0:79"]
    assert [trace.text for trace in watch.traces()] == ["NVML: Xid 79 on GPU 0"]


@pytest.mark.parametrize("broken", [{"INIT": "9"}, {"INIT": "15"}, {"HANGS": "1"}, {"GPUS": "0"}])
def test_a_broken_nvml_costs_its_rows_and_no_time(
    machine: Path, trace: dict[str, str], broken: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    assert watched(machine, trace | broken, seconds=0.3).whole.columns() == {}
    assert time.monotonic() - begun < 10
    assert rows(capsys) == []


def test_a_node_without_gpus_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with GpuWatch({}, PLACE, step=lambda: 0, root=tmp_path):
        pass


# --- what is made of the samples --------------------------------------------------------------------------------------


def columns(*samples: dict[str, Any]) -> dict[str, Any]:
    health = Health()
    for sample in samples:
        health.add([sample])
    return {name: value[0] for name, value in health.columns().items() if value}


def test_a_row_has_means_of_what_varies_and_the_most_of_what_counts_up() -> None:
    told = columns(*H100)
    assert told == {
        "utilisation": 0.5, "memory_used": 19_818 << 20, "memory_total": 81_559 << 20, "power": 350.9,
        "temperature": 59, "clock": 1162, "throttled": 0.0, "reasons": "", "corrected": 0, "uncorrected": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reasons", "throttled", "words"),
    [
        (0x1, 0.0, ""),  # idle is no trouble
        (0x4, 0.0, "SwPowerCap"),  # nor is its power limit
        (0x8 | 0x40, 0.5, "HwSlowdown HwThermalSlowdown"),
        (0x80, 0.5, "HwPowerBrakeSlowdown"),
    ],
)
def test_a_gpu_is_throttled_by_heat_and_by_its_power_supply(reasons: int, throttled: float, words: str) -> None:
    told = columns(H100[1], with_trouble(H100[1], reasons=reasons))
    assert (told["throttled"], told["reasons"]) == (throttled, words)


def test_what_nvml_does_not_know_of_a_gpu_stays_open() -> None:
    lost: dict[str, Any] = {}
    known = {name: value for name, value in H100[1].items() if name not in {"corrected", "uncorrected"}}
    assert columns(known)["uncorrected"] is None
    assert columns(lost)["temperature"] is None
    assert columns(H100[1], lost)["temperature"] == 59
