"""The node's entry point needs no more than requirements-node.txt names: images of users' own have no more."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from distributions import closure, requirements
from nodes import report_of, start_node
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import free_port

from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[3]
LISTED = requirements((CHECKOUT / "litgpt_demo" / "requirements-node.txt").read_text())
FOR_BUCKETS = "google-cloud-storage"

# Every process of the node starts with this: whatever else is installed is as if it were not.
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class OnlyThese(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        allowed = {allowed}
        if path is None and name not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError("no module named " + repr(name) + " in an image of one's own", name=name)

sys.meta_path.insert(0, OnlyThese())
"""

RANK = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"summed {total.item():g}\\n")
dist.destroy_process_group()
"""


def blocking(folder: Path, *, buckets: bool) -> dict[str, str]:
    """The environment of processes that can import the requirements, torch, what those need, and nothing else."""
    wanted = [line for line in LISTED if buckets or not line.startswith(FOR_BUCKETS)]
    there = closure(Requirement(line) for line in ["torch", *wanted])
    names = {
        name
        for name, owners in packages_distributions().items()
        if there & {canonicalize_name(owner) for owner in owners}
    }
    names -= set() if buckets else {"google"}
    assert not names & {"litgpt", "lightning", "transformers", "pyarrow", "gigatoken", "prefect"}
    allowed = sorted(names | set(sys.stdlib_module_names) | {"litgpt_demo", "usercustomize"})
    (folder / "sitecustomize.py").write_text(BLOCKED.replace("{allowed}", f"frozenset({allowed!r})"))
    return {"PYTHONPATH": f"{folder}:{CHECKOUT}"}


def test_their_ranges_are_those_of_the_products_own_image() -> None:
    ours = requirements((CHECKOUT / "litgpt_demo" / "requirements.txt").read_text())
    assert set(LISTED) < set(ours)


@pytest.mark.long
@pytest.mark.training
def test_two_nodes_measure_reduce_and_report_with_nothing_else_installed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    network = NodeNetwork(gate_seconds=2).model_dump_json(exclude_defaults=True)
    environ, port = {**blocking(tmp_path, buckets=False), NETWORK: network}, free_port()
    kept = ("--log-uri", str(tmp_path / "kept"))
    program = str(tmp_path / "rank.py")
    nodes = [
        start_node(tmp_path / "d", program, processes=1, nodes=2, number=number, port=port, flags=kept, environ=environ)
        for number in (0, 1)
    ]
    said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert ["summed 2" in text for text in said] == [True, True]
    assert (tmp_path / "d" / "node-0" / "network.json").exists()
    assert (tmp_path / "kept" / "node-1.log").exists()


@pytest.mark.training
def test_logs_go_into_a_bucket_with_one_package_more(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("raise SystemExit(41)")
    with bucket_emulator("kept") as emulator:
        environ = {**blocking(tmp_path, buckets=True), "STORAGE_EMULATOR_HOST": emulator}
        flags = ("--log-uri", "gs://kept/logs")
        node = start_node(tmp_path / "d", str(tmp_path / "rank.py"), processes=1, flags=flags, environ=environ)
        said = node.communicate(timeout=200)[0]
        assert node.returncode == 41, said
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", emulator)
            assert b"node 0 ends with 41" in open_storage("gs://kept/logs").read("node-0.log")
    assert report_of(tmp_path / "d")["fault"] == "data error"


def test_a_bucket_without_that_package_is_refused_by_its_name(tmp_path: Path) -> None:
    node = start_node(
        tmp_path / "d", __file__, processes=1, flags=("--log-uri", "gs://kept/logs"),
        environ=blocking(tmp_path, buckets=False),
    )  # fmt: skip
    said = node.communicate(timeout=100)[0]
    assert node.returncode == 40, said
    assert "gs://kept/logs needs google-cloud-storage, which is not installed here" in said
