"""What NCCL's log says of the network in use. The lines are NCCL's own, as pods printed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from litgpt_demo.errors import Fault
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.network_use import NetworkUse

FELL_BACK = """pod-0:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.4.51<0>
pod-0:71:71 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
pod-0:71:71 [0] NCCL INFO NET/IB : No device found.
pod-0:71:71 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
pod-0:71:71 [0] NCCL INFO Using network Socket
"""
RIGHT = """pod-0:71:71 [0] NCCL INFO NET/gIB : Initializing gIB v1.1.0
pod-0:71:71 [0] NCCL INFO Using network gIB
"""
GIB = NodeNetwork(name="gib", nccl_net="gIB")


def ranks(folder: Path, *texts: str) -> Path:
    """Output of ranks where torchrun leaves it."""
    for number, text in enumerate(texts):
        path = folder / "r_x" / "attempt_0" / str(number) / "stdout.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_plain_sockets_stop_the_run_and_say_what_to_look_at(tmp_path: Path) -> None:
    use = NetworkUse(GIB, ranks(tmp_path, RIGHT), nodes=2)
    assert use.look(steps=5) is None
    ranks(tmp_path, RIGHT, FELL_BACK)
    found = use.look()
    assert found is not None
    assert found.fault is Fault.NODE
    assert "NCCL uses Socket, not gIB (platform.network=gib)" in found.message
    assert any("Could not find: libnccl-net.so" in line for line in found.traceback)


def test_what_is_plain_alone_or_allowed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = ranks(tmp_path, FELL_BACK)
    assert NetworkUse(NodeNetwork(), logs, nodes=2).look(steps=1) is None
    assert NetworkUse(GIB, logs, nodes=1).look(steps=1) is None
    assert capsys.readouterr().out == ""
    allowed = NetworkUse(GIB.model_copy(update={"allow_sockets": True}), logs, nodes=2)
    assert [allowed.look(), allowed.look()] == [None, None]
    assert capsys.readouterr().out.count("warning [network.unused] NCCL uses Socket, not gIB") == 1
