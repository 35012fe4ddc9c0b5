from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.benchmark import (
    Benchmark,
    BenchmarkConfig,
    benchmark_page,
    charts,
    lead,
    markdown,
    pairs_table,
    table,
    with_bars,
)
from launcher.checks.plan import findings_of
from launcher.config import validated
from launcher.errors import ConfigProblem
from launcher.runs.attempts import claim_of
from litgpt_demo.node.collectives import Result, Speed, bus_factor

# An RDMA cluster's published table: ranks to algbw and busbw in Gbit/s.
PUBLISHED = {2: (1687.1, 1687.1), 4: (1081.0, 1621.5), 8: (949.9, 1662.4), 16: (65.2, 122.3), 32: (39.3, 76.2)}
OVER_SOCKETS = {16: (15.5, 29.1), 32: (15.6, 30.1)}


def result(published: dict[int, tuple[float, float]], **more: object) -> Result:
    """Measurements that come to the published algbw, beside slower ones of a smaller size."""
    speeds = [
        Speed(ranks=ranks, bytes=size, seconds=size * 8 / 1e9 / (algbw * share), repeats=5)
        for ranks, (algbw, _) in published.items()
        for size, share in ((2**20, 0.1), (4 * 10**9, 1.0))
    ]
    hosts = tuple(f"machine-{number}" for number in range(4))
    fields: dict[str, object] = {"backend": "nccl", "nodes": 4, "hosts": hosts, "floor": None, "seconds": 30.0}
    return Result(speeds=tuple(speeds), **{**fields, **more})  # type: ignore[arg-type]


MADE = Benchmark(name="network", result=result(PUBLISHED), sockets=result(OVER_SOCKETS))


@pytest.mark.parametrize(("ranks", "algbw", "busbw"), [(ranks, *both) for ranks, both in PUBLISHED.items()])
def test_busbw_follows_from_algbw_as_in_published_tables(ranks: int, algbw: float, busbw: float) -> None:
    assert algbw * bus_factor(ranks) == pytest.approx(busbw, rel=2e-3)


@given(st.integers(2, 10**6))
def test_of_many_ranks_busbw_nears_twice_algbw(ranks: int) -> None:
    assert 1 <= bus_factor(ranks) < 2
    assert bus_factor(ranks) < bus_factor(ranks + 1)


def test_the_table_is_the_published_one() -> None:
    rows = {int(row["ranks"]): row for row in table(MADE)}
    assert list(rows) == [2, 4, 8, 16, 32]
    for ranks, (algbw, busbw) in PUBLISHED.items():
        assert float(rows[ranks]["algbw Gbit/s"]) == pytest.approx(algbw, rel=2e-3)
        assert float(rows[ranks]["busbw Gbit/s"]) == pytest.approx(busbw, rel=2e-3)
        assert float(rows[ranks]["busbw GB/s"]) == pytest.approx(busbw / 8, rel=2e-2)
    assert rows[32]["sockets busbw Gbit/s"] in {"30.1", "30.2"}
    assert rows[2]["sockets busbw Gbit/s"] == "–"
    assert [row["nodes"] for row in rows.values()] == ["1", "1", "1", "2", "4"]


def test_only_the_terminal_has_bars_in_the_table_where_the_page_has_charts() -> None:
    lengths = {int(row["ranks"]): len(row[""]) for row in with_bars(table(MADE))}
    assert lengths[2] == 24 > lengths[16] >= lengths[32] > 0
    assert "█" not in benchmark_page(MADE) + markdown(MADE)
    idle = [{"busbw GB/s": "0.000"}, {"busbw GB/s": "0.000"}]
    assert [row[""] for row in with_bars(idle)] == ["█", "█"]


def test_a_slow_node_is_named_in_what_is_shown() -> None:
    speeds = {(0, 1): 40.0, (2, 3): 4.0, (0, 2): 4.1, (1, 3): 39.0, (0, 3): 41.0, (1, 2): 3.9}
    made = Benchmark(name="network", result=result(PUBLISHED, pairs=speeds))
    assert lead(made.result).endswith("slow: node 2 (machine-2)")
    rows = pairs_table(made.result)
    assert [row["nodes"] for row in rows] == ["1 and 2", "2 and 3", "0 and 2", "1 and 3", "0 and 1", "0 and 3"]
    assert [row[""] for row in rows] == ["slow: node 2"] * 3 + [""] * 3
    assert "slow: node 2" in markdown(made)


def test_the_page_shows_tables_and_plots() -> None:
    text = benchmark_page(MADE)
    assert text.count("<svg") == 3 == len(charts(MADE))
    assert "busbw by number of ranks, GB/s" in text
    assert "Pairs of nodes" not in text
    assert text.count("<tr>") == 6


def test_what_a_node_calls_itself_stays_text_on_the_page() -> None:
    hosts = ("<script>alert(1)</script>", "\x1b[31mred", "a", "b")
    text = benchmark_page(Benchmark(name="network", result=result(PUBLISHED, hosts=hosts, pairs={(0, 1): 1.0})))
    assert "Pairs of nodes" in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "\x1b" not in text


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_job_is_that_of_a_training_without_its_gate() -> None:
    cluster = {"kind": "gke", "cluster": "c", "project": "p", "location": "l", "machine": "a3-highgpu-8g", "nodes": 4}
    asked = {"measure": {"compare": True, "largest": 2**30}, "platform": {**cluster, "network": "tcpx"}}
    config = validated(BenchmarkConfig, asked, where="here")
    fast, sockets = config.jobs()
    assert fast.program[:3] == ("-m", "litgpt_demo", "collectives")
    assert fast.args[-2:] == ("--largest", str(2**30))
    assert fast.platform.gate == 0  # type: ignore[union-attr]
    assert not fast.platform.allow_sockets  # type: ignore[union-attr]
    assert sockets.platform.allow_sockets  # type: ignore[union-attr]
    assert sockets.platform.overrides == {"NCCL_NET": "Socket"}  # type: ignore[union-attr]
    names = {claim_of(job).make_job(1).name for job in (fast, sockets)}
    assert len(names) == 2


def test_on_one_machine_nothing_else_is_changed() -> None:
    config = validated(BenchmarkConfig, {"platform": {"kind": "local", "nodes": 2}}, where="here")
    assert config.job().platform == config.platform
    assert claim_of(config).make_job(1).program == config.job().program
    assert not [one for one in findings_of(config) if one.severity == "error" and one.code != "local.port"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"platform": {"kind": "local"}}, "one node of one process"),
        ({"measure": {"seconds": 1}}, "measure.seconds"),
        ({"measure": {"size": 1}}, "measure.size: there is no such setting"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigProblem, match=words):
        validated(BenchmarkConfig, settings, where="here")
