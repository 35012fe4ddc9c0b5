"""The nodes of an elastic attempt agree which of them train: pure decisions, and real threads in one folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from litgpt_demo.errors import Fault
from litgpt_demo.node import membership
from litgpt_demo.node.membership import (
    GATHER,
    PATIENCE,
    SILENT,
    UNDECIDED,
    Membership,
    MemberState,
    NodeGeneration,
    Over,
    Sign,
    View,
)
from litgpt_demo.storage import open_storage


def sign(
    node: int, state: MemberState = MemberState.WAITING, *, generation: int = 0, fault: Fault | None = None
) -> Sign:
    return Sign(node=node, life=f"life-{node}", state=state, generation=generation, fault=fault)


def trained(node: int, fault: Fault = Fault.NETWORK) -> Sign:
    """A node whose ranks have left generation 1."""
    return sign(node, generation=1, fault=fault)


def first(*nodes: int) -> NodeGeneration:
    return NodeGeneration(number=1, lives={str(node): f"life-{node}" for node in nodes}, port=20001)


def view(*signs: Sign, me: int = 0, counts: Sequence[int] = (2, 3, 4), newest: NodeGeneration | None = None) -> View:
    there = {one.node: one for one in signs}
    return View(
        me=there[me], most=4, counts=counts, signs=there, silent=dict.fromkeys(there, 0), newest=newest
    )  # fmt: skip


def test_the_first_generation_waits_for_all_nodes_and_then_for_enough() -> None:
    assert view(*map(sign, range(4))).turn() == [0, 1, 2, 3]
    assert view(*map(sign, range(4)), me=1).turn() is None  # the first that lives proposes
    seen = view(*map(sign, range(3)))
    assert seen.turn() is None
    seen.waited = GATHER
    assert seen.turn() == [0, 1, 2]
    alone = view(sign(0))
    alone.waited = PATIENCE
    assert isinstance(alone.turn(), Over)


@pytest.mark.parametrize("lost", [0, 2])
def test_the_nodes_left_go_on_when_one_is_silent_and_the_first_of_them_leads(lost: int) -> None:
    left = [node for node in range(3) if node != lost]
    signs = [replace(sign(lost), state=MemberState.TRAINING, generation=1), *map(trained, left)]
    seen = view(*signs, me=left[0], newest=first(0, 1, 2))
    seen.silent[lost] = SILENT - 1
    assert seen.turn() is None
    seen.silent[lost] = SILENT
    assert f"node {lost} has given no sign of life" in str(seen.broken(first(0, 1, 2)))
    assert seen.turn() == left
    assert view(*signs, me=left[1], newest=first(0, 1, 2)).turn() is None


def test_no_generation_begins_while_ranks_of_the_last_one_may_still_write() -> None:
    seen = view(sign(2, MemberState.GONE, generation=1, fault=Fault.NODE), trained(0), newest=first(0, 1, 2))
    seen.signs[1], seen.silent[1] = sign(1, MemberState.TRAINING, generation=1), 0
    assert seen.turn() is None
    seen.signs[1] = trained(1)
    assert seen.turn() == [0, 1]


def test_only_so_many_train_as_the_batch_splits_over_and_the_others_wait() -> None:
    signs = [*map(trained, range(3)), sign(3, MemberState.GONE, generation=1, fault=Fault.NODE)]
    assert view(*signs, counts=(2, 4), newest=first(0, 1, 2, 3)).turn() == [0, 1]
    running = view(
        *(sign(node, MemberState.TRAINING, generation=1) for node in (0, 1)), counts=(2, 4), newest=first(0, 1)
    )
    running.signs[2], running.silent[2] = sign(2), 0
    assert not running.wants_more(first(0, 1))
    running.signs[3], running.silent[3] = sign(3), 0
    assert running.wants_more(first(0, 1))


def test_too_few_left_are_the_end_and_say_who_is_lost() -> None:
    signs = [trained(0), sign(1, MemberState.GONE, generation=1, fault=Fault.NODE)]
    over = view(*signs, newest=first(0, 1)).turn()
    assert over == Over(why="node 1 ended (node fault); 1 left, and platform.nodes.min=2")


@pytest.mark.parametrize("fault", [Fault.USER, Fault.DATA, Fault.OUT_OF_MEMORY, Fault.HANG, Fault.DISK_FULL])
def test_what_another_generation_would_meet_again_ends_the_attempt(fault: Fault) -> None:
    culprit = sign(1, MemberState.GONE, generation=1, fault=fault)
    seen = view(trained(0), culprit, trained(2), newest=first(0, 1, 2))
    assert seen.broken(first(0, 1, 2)) is None  # how its peers fall is for the verdict
    assert seen.turn() == Over(why=f"node 1 ended ({fault})")


def test_nodes_that_live_and_lost_each_other_leave_it_to_a_new_attempt() -> None:
    seen = view(*map(trained, range(3)), newest=first(0, 1, 2))
    assert [seen.turn() for _ in range(UNDECIDED)] == [None] * UNDECIDED
    assert isinstance(seen.turn(), Over)


def test_a_program_that_only_says_it_was_preempted_gets_no_generation_after_the_other() -> None:
    left = [trained(node, Fault.PREEMPTED) for node in range(3)]
    assert view(*left, newest=first(0, 1, 2)).turn() is None
    assert view(*left, sign(3), newest=first(0, 1, 2)).turn() == [0, 1, 2, 3]  # they left for one that waits


def test_a_node_started_again_is_another_life_and_joins() -> None:
    again = replace(sign(2), life="second")
    seen = view(trained(0), trained(1), again, newest=first(0, 1, 2))
    assert "node 2 was started again" in str(seen.broken(first(0, 1, 2)))
    assert seen.turn() == [0, 1, 2]


def test_a_node_that_waits_when_the_job_has_ended_is_done_too() -> None:
    ended = [sign(node, MemberState.DONE, generation=1) for node in (0, 1)]
    assert view(*ended, sign(2), me=2, newest=first(0, 1)).turn() == Over(why="the job has ended", done=True)
    fell = view(ended[0], trained(1), me=1, newest=first(0, 1))
    assert fell.turn() == Over(why="the job has ended", done=False)


def test_three_nodes_in_one_folder_agree_also_when_the_first_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.05)
    monkeypatch.setattr(membership, "SILENT", 20)
    agreed: dict[int, list[NodeGeneration | Over]] = {node: [] for node in range(3)}

    def live(node: int) -> None:
        where = open_storage(str(tmp_path))
        with Membership(where, node=node, most=3, counts=(2, 3), port_of=lambda number: 20000 + number) as members:
            found = members.next()
            agreed[node].append(found)
            assert isinstance(found, NodeGeneration)
            members.tell(MemberState.TRAINING, generation=found.number)
            if node == 0:  # dies: its thread gives no more signs, and nothing says goodbye
                members._over.set()
                monkeypatch.setattr(members, "_give_sign", lambda: None)
                return
            until(lambda: members.look() and members.view.broken(found), seconds=30)
            members.tell(MemberState.WAITING, Fault.NETWORK)
            agreed[node].append(members.next())
            members.tell(MemberState.DONE)

    nodes = [threading.Thread(target=live, args=(node,)) for node in range(3)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert agreed[0][0] == agreed[1][0] == agreed[2][0]
    assert agreed[1][1] == agreed[2][1]
    assert [one.nodes for one in agreed[1] if isinstance(one, NodeGeneration)] == [[0, 1, 2], [1, 2]]
