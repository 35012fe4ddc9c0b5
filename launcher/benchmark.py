"""The network benchmark: its settings, the job that measures, and the tables of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from launcher.config import NAME_PATTERN, LaunchSettings, PlatformConfig, ScriptConfig
from launcher.formatting import NOTHING
from launcher.images.settings import Image, NoImage
from launcher.platforms import default_settings
from litgpt_demo.config import Count, PathOrUri, Settings, WholeSeconds
from litgpt_demo.node.network_test import NetworkTestResult


class MeasureSettings(Settings, title="Measurement"):
    """The settings of a measurement: how much is measured, and the floor that the result is compared with."""

    seconds: WholeSeconds = Field(60, ge=4, le=3600)
    """Seconds for one measurement: half for all-reduce among 2, 4, 8, … ranks, and half for pairs of nodes."""
    largest: Count | None = Field(None, ge=2**20)
    """Bytes of the largest tensor; empty is 1 GiB on GPUs and 64 MiB on gloo."""
    compare: bool = False
    """Measure again over TCP sockets in a second job, to compare both."""


class BenchmarkConfig(Settings):
    """A network benchmark: how fast the ranks of a platform reduce among themselves."""

    name: str = Field("network", pattern=NAME_PATTERN)
    """The name of the job: lower-case letters, digits and dashes, at most 32."""
    root: PathOrUri = "output"
    """The folder, or gs://bucket/prefix, under which the results are stored."""
    measure: MeasureSettings = MeasureSettings()
    """The measurement."""
    image: Image = NoImage(kind="none")
    """The software of the nodes."""
    platform: PlatformConfig = default_settings()
    """The platform that has the nodes."""
    launch: LaunchSettings = LaunchSettings()
    """The treatment of live jobs with the same name."""

    @model_validator(mode="after")
    def _has_links(self) -> Self:
        if self.platform.nodes * self.platform.processes_per_node < 2:
            what = "platform.nodes=1 with platform.processes_per_node=1 has no network to measure"
            raise ValueError(f"{what}; raise one of them")
        return self

    def jobs(self) -> list[ScriptConfig]:
        """Return the job over the platform's network, and with `measure.compare` one over sockets."""
        jobs = [self._job(sockets=False)]
        if self.measure.compare:
            jobs.append(self._job(sockets=True))
        return jobs

    def _job(self, *, sockets: bool) -> ScriptConfig:
        args = ["collectives", "--table", "--seconds", str(self.measure.seconds)]
        if self.measure.largest is not None:
            args += ["--largest", str(self.measure.largest)]
        return ScriptConfig(
            name=self.name,
            root=self.root,
            script="-m litgpt_demo",
            args=tuple(args),
            env={"NCCL_NET": "Socket"} if sockets else {},
            image=self.image,
            platform=self.platform.for_measuring(sockets=sockets),
            launch=self.launch,
        )


def table(results: Sequence[NetworkTestResult]) -> list[dict[str, str]]:
    """Return one row per number of ranks, from the size with the largest busbw. A second result is over plain
    sockets."""
    per_node = max(speed.ranks for speed in results[0].speeds) // results[0].nodes
    rows = []
    for ranks in sorted({speed.ranks for speed in results[0].speeds}):
        row = {"ranks": str(ranks), "nodes": str(-(-ranks // per_node))}
        for prefix, result in zip(("", "sockets "), results, strict=False):
            speeds = [speed for speed in result.speeds if speed.ranks == ranks]
            fastest = max(speeds, key=lambda speed: speed.busbw, default=None)
            if fastest is not None and not prefix:
                mib = fastest.bytes / 2**20
                row["size"] = f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:g} GiB"
            for unit, factor in (("Gbit/s", 8), ("GB/s", 1)):  # links are sold in bits, memory in bytes
                row[f"{prefix}busbw {unit}"] = _figure(fastest.busbw * factor) if fastest else NOTHING
                row[f"{prefix}algbw {unit}"] = _figure(fastest.algbw * factor) if fastest else NOTHING
        rows.append(row)
    return rows


def _figure(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def pairs_table(result: NetworkTestResult) -> list[dict[str, str]]:
    rows = []
    for pair, speed in sorted(result.pairs.items(), key=lambda item: item[1]):
        machines = " and ".join(result.hosts[node] for node in pair)
        row = {"nodes": f"{pair[0]} and {pair[1]}", "machines": machines, "GB/s": _figure(speed), "": ""}
        slow = [f"node {node}" for node in pair if node in result.slow]
        if slow:
            row[""] = f"slow: {', '.join(slow)}"
        rows.append(row)
    return rows


def lead(result: NetworkTestResult) -> str:
    best = result.best
    text = f"{best.ranks} ranks on {result.nodes} nodes reach {_figure(best.busbw)} GB/s ({result.backend}, busbw)"
    slow = ", ".join(f"node {node} ({result.hosts[node]})" for node in result.slow)
    return f"{text}; slow: {slow}" if slow else text


def markdown(results: Sequence[NetworkTestResult]) -> str:
    parts = [lead(results[0])]
    for rows in filter(None, (table(results), pairs_table(results[0]))):
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts)
