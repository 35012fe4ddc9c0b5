import pytest
from job_handles import handle_of

from launcher.benchmark import BenchmarkConfig, lead, markdown, table
from launcher.config import validated
from launcher.errors import ConfigProblem
from litgpt_demo.node.network_test import NetworkTestResult, Speed

# An RDMA cluster's published table: ranks to algbw and busbw in Gbit/s.
PUBLISHED = {2: (1687.1, 1687.1), 4: (1081.0, 1621.5), 8: (949.9, 1662.4), 16: (65.2, 122.3), 32: (39.3, 76.2)}


def result(**more: object) -> NetworkTestResult:
    """Measurements that come to the published algbw, beside slower ones of a smaller size."""
    speeds = tuple(
        Speed(ranks=ranks, bytes=size, seconds=size * 8 / 1e9 / (algbw * share), repeats=5)
        for ranks, (algbw, _) in PUBLISHED.items()
        for size, share in ((2**20, 0.1), (4 * 10**9, 1.0))
    )
    hosts = tuple(f"machine-{number}" for number in range(4))
    return NetworkTestResult(backend="nccl", nodes=4, hosts=hosts, floor=None, seconds=30.0, speeds=speeds, **more)  # type: ignore[arg-type]


def test_table_agrees_with_the_published_one() -> None:
    rows = table([result()])
    shown = {int(row["ranks"]): (float(row["algbw Gbit/s"]), float(row["busbw Gbit/s"])) for row in rows}
    assert shown == {ranks: pytest.approx(speeds, rel=2e-3) for ranks, speeds in PUBLISHED.items()}


def test_slow_node_is_named_in_the_result() -> None:
    speeds = {(0, 1): 40.0, (2, 3): 4.0, (0, 2): 4.1, (1, 3): 39.0, (0, 3): 41.0, (1, 2): 3.9}
    made = result(pairs=speeds)
    assert lead(made).endswith("slow: node 2 (machine-2)")
    assert markdown([made]).count("slow: node 2") == 4, "above, and at its three pairs"


def test_benchmark_job_has_no_network_test() -> None:
    cluster = {"kind": "gke", "cluster": "c", "project": "p", "location": "l", "machine": "a3-highgpu-8g", "nodes": 4}
    config = {"measure": {"compare": True}, "platform": {**cluster, "network": "tcpx"}}
    fast, sockets = validated(BenchmarkConfig, config, where="here").jobs()
    assert (fast.platform.network_test, fast.platform.allow_tcp_fallback) == (0, False)  # type: ignore[union-attr]
    assert sockets.platform.env == {"NCCL_NET": "Socket"}  # type: ignore[union-attr]
    assert len({handle_of(job).make_job(1).name for job in (fast, sockets)}) == 2
    with pytest.raises(ConfigProblem, match=r"platform\.processes_per_node=1 has no network to measure"):
        validated(BenchmarkConfig, {"platform": {"kind": "local"}}, where="here")
