from __future__ import annotations

import os
from pathlib import Path

import pytest

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node.environment import of_network, sourced
from litgpt_demo.node.network import NodeNetwork

BASE = {"PATH": os.environ["PATH"]}

# As the network's own script does: it needs a variable, puts its folder first, and overwrites what was set before.
PROFILE = """
[[ -n "${NCCL_LIB_DIR:-}" ]] || { echo "NCCL_LIB_DIR is not set"; exit 1; }
export LD_LIBRARY_PATH="${NCCL_LIB_DIR}:${LD_LIBRARY_PATH:-}"
export NCCL_DEBUG=WARN CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
NCCL_NOT_EXPORTED=1
export NCCL_LONG=$'two\\nlines = "quoted"'
echo sourced
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "profile.sh"
    path.write_text(text)
    return str(path)


def test_variables_of_scripts_come_before_the_profiles_and_those_before_the_users(tmp_path: Path) -> None:
    network = NodeNetwork(
        scripts=(script(tmp_path, PROFILE),),
        library_paths=("/usr/local/gib/lib64", "/plugin"),
        environment={"NCCL_DEBUG": "INFO", "NCCL_NET": "gIB"},
        overrides={"NCCL_NET": "Socket"},
    )
    before = {**BASE, "NCCL_LIB_DIR": "/plugin", "LD_LIBRARY_PATH": "/opt/hpcx:/plugin", "NCCL_DEBUG": "TRACE"}
    mine = of_network(network, before)
    assert mine["NCCL_DEBUG"] == "INFO"
    assert mine["NCCL_NET"] == "Socket"
    assert mine["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert mine["NCCL_LONG"] == 'two\nlines = "quoted"'
    assert mine["LD_LIBRARY_PATH"] == "/usr/local/gib/lib64:/plugin:/opt/hpcx"
    assert "NCCL_NOT_EXPORTED" not in mine


def test_a_script_that_fails_ends_the_node_with_what_it_printed_and_one_that_is_not_there_is_the_nodes_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"profile\.sh ended with"):
        sourced((script(tmp_path, PROFILE),), BASE)
    assert "NCCL_LIB_DIR is not set" in capfd.readouterr().out
    with pytest.raises(NodeError, match=r"set_nccl_env\.sh is not on this node; see whether the installer's DaemonSet"):
        sourced((f"{tmp_path}/set_nccl_env.sh",), BASE)
