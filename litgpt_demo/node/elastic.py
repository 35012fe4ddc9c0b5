"""The ranks of an elastic node: one generation after the other, each from the newest checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from litgpt_demo.errors import Fault, NetworkError, decisive
from litgpt_demo.node.agent import Ending, Leave, fault_of, run_ranks
from litgpt_demo.node.checks import port_is_free
from litgpt_demo.node.environment import GENERATION, REGROUP
from litgpt_demo.node.membership import Membership, MemberState, NodeGeneration, Over
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.times import TIMES, NodeTimes
from litgpt_demo.storage import open_storage

# Ports from which each generation takes the first free one: those of former ones may still be held by dying ranks.
_PORTS = 100


def run_generations(node: Node, environ: Mapping[str, str], leave: Leave, times: NodeTimes) -> tuple[Node, int, Ending]:
    """Run the node's ranks until the job has ended, or cannot go on.

    Returns the node as its last generation had it, its place among that one's nodes, and how its ranks ended.

    Args:
        times: begins anew with every generation after the first.

    Raises:
        NetworkError: there is no generation with this node.
    """
    meet, ending, mine, place = node.meet, None, node, node.meet.node_rank
    with Membership(
        open_storage(node.log_uri or str(node.directory)),
        node=meet.node_rank,
        most=meet.nodes,
        counts=node.counts,
        port_of=lambda number: _port(meet.port, number),
    ) as members:
        while True:
            turn = members.next()
            if isinstance(turn, Over):
                print(f"no generation follows: {turn.why}", flush=True)
                if turn.done:
                    members.tell(MemberState.DONE)
                    return mine, place, Ending(exit_code=0, asked=None, host_ran_out_of_memory=False)
                if ending is None or ending.exit_code == -signal.SIGKILL:  # killed by this node, as hopeless
                    raise NetworkError(turn.why)
                members.tell(MemberState.GONE, fault_of(ending))
                return mine, place, ending
            mine, place = _member(node, turn)
            if turn.number > 1:
                times.begin_again()
            ending, victim = _run(mine, place, turn, {**environ, TIMES: times.words()}, leave, members)
            fault = fault_of(ending)
            if fault is None or leave.asked is not None or not victim:
                members.tell(MemberState.DONE if fault is None else MemberState.GONE, fault)
                return mine, place, ending
            members.tell(MemberState.WAITING, fault)


def _port(first: int, number: int) -> int:
    """Return a free port for a generation; none is the attempt's own, whose freedom is checked before it begins."""
    ports = [first + 1 + (number + more) % _PORTS for more in range(_PORTS)]
    return next(port for port in ports if port_is_free(port))


def _member(node: Node, generation: NodeGeneration) -> tuple[Node, int]:
    """Return the node as the generation has it, and its place among the others."""
    meet = replace(
        node.meet,
        nodes=len(generation.nodes),
        port=generation.port,
        run_id=f"{node.meet.run_id}-g{generation.number}",
    )
    return replace(node, meet=meet), generation.nodes.index(node.meet.node_rank)


def _run(
    node: Node,
    place: int,
    generation: NodeGeneration,
    environ: Mapping[str, str],
    leave: Leave,
    members: Membership,
) -> tuple[Ending, bool]:
    """Run the ranks of one generation; returns how they ended, and whether others are the reason."""
    number, nodes = generation.number, generation.nodes
    told = f"generation {number}: {len(nodes)} nodes ({', '.join(map(str, nodes))})"
    print(f"{told}, this one is {place}", flush=True)
    (node.own / REGROUP).unlink(missing_ok=True)
    members.tell(MemberState.TRAINING, generation=number)
    broken: list[str] = []

    def hopeless() -> bool:
        if not members.look():
            return False
        if why := members.view.broken(generation):
            broken.append(why)
            print(f"{told} is over: {why}", flush=True)
        elif members.view.wants_more(generation):
            (node.own / REGROUP).touch()
        return bool(broken)

    ranks = {**environ, GENERATION: f"{number} {len(nodes)} {len(nodes) * node.processes}"}
    ending = run_ranks(node, ranks, leave, place=place, hopeless=hopeless)
    leave.torchrun = None
    return ending, bool(broken) or _is_victim(ending)


def _is_victim(ending: Ending) -> bool:
    """Return whether the ranks may have ended because of another node's: they left with it, or lost it.

    A lost peer can also abort the process, in threads of gloo and of NCCL's watchdog.
    """
    cause = decisive(ending.failures)
    aborted = cause is not None and cause.exit_code == -signal.SIGABRT
    return aborted or fault_of(ending) in {Fault.NETWORK, Fault.PREEMPTED}
