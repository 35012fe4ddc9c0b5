"""The membership of an elastic attempt: its nodes agree which of them train together, in the attempt's own folder.

Each node writes a sign of life, and reads those of the others. Those that train together form a *generation*: a file
that exactly one of them creates (Storage.create), and that all obey. No node is special, so that any of them may die,
the first one too; and no clock is compared with another machine's, because a node counts how often it has looked
without a new sign.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import uuid4

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, Fault, TrainLitgptError, fault_of_exception
from litgpt_demo.storage import Storage

# Seconds between two signs of life, and between two looks at the others'.
LOOK = 1.0

# Looks without a new sign of life after which a node counts as dead. One that is only late trains alone no longer than
# until its own next look, and joins again.
SILENT = 6

# Looks for which the first generation waits for all nodes, when there are enough for one.
GATHER = 60

# Looks for which there may be too few for the first generation: as long as torchrun's own rendezvous waits.
PATIENCE = 600

# Looks for which nodes whose ranks have lost a peer wait for it to turn out dead. One that is cut off from its peers
# and lives is the network's fault, which another generation would meet again.
UNDECIDED = SILENT + 4

# Losses that the others survive. Every other class would come back in the next generation, or is a verdict on the run.
SURVIVED = frozenset((Fault.NODE, Fault.PREEMPTED))

_FOLDER = "members"


class MemberState(StrEnum):
    """The states of a node."""

    WAITING = "waiting"
    """Its ranks are not there: it waits for the generation after its last one."""
    TRAINING = "training"
    DONE = "done"
    """Its ranks have ended well, and so has the job."""
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A node's sign of life."""

    node: int
    life: str
    """The process: a node that is started again is another life, and the former one is lost."""
    beat: int = 0
    """Counts its signs."""
    state: MemberState = MemberState.WAITING
    generation: int = 0
    """The newest generation that it was part of; 0 before its first."""
    fault: Fault | None = None
    """The reason why its ranks ended, or it did."""

    @property
    def left(self) -> bool:
        """Return True if its ranks left together with the others, having saved."""
        return self.state is MemberState.WAITING and self.fault is Fault.PREEMPTED


@dataclass(frozen=True, kw_only=True)
class NodeGeneration:
    """The nodes that train together until one is lost, or another one joins."""

    number: int
    """Counted from 1."""
    lives: Mapping[str, str]
    """Each member's number, as JSON writes it, and its life."""
    port: int
    """The port on which the first member listens."""

    @property
    def nodes(self) -> list[int]:
        """Return the numbers of its members, in the order of their ranks."""
        return sorted(int(node) for node in self.lives)


@dataclass(frozen=True)
class Loss:
    """A member that trains no more."""

    node: int
    how: str
    fault: Fault | None = None
    """The class that it ended with; None where it did not say."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """No generation follows."""

    why: str
    done: bool = False
    """The job has come to its end."""


@dataclass(kw_only=True)
class View:
    """The membership as one node sees it."""

    me: Sign
    most: int
    """Nodes of the job."""
    counts: Sequence[int]
    """The numbers of nodes that may train together, ascending."""
    signs: dict[int, Sign] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    """Looks since each node's last new sign."""
    newest: NodeGeneration | None = None
    waited: int = 0
    """Looks since this node began to wait for its next generation."""
    undecided: int = 0
    """Looks since all members have left the newest generation without a reason that is known."""

    def fitting(self, nodes: int) -> int:
        """Return how many of so many nodes train together; 0 for too few."""
        return max((count for count in self.counts if count <= nodes), default=0)

    @property
    def live(self) -> list[int]:
        """Return the nodes that live and are not through, in order."""
        return sorted(
            node
            for node, sign in self.signs.items()
            if self.silent[node] < SILENT and sign.state in {MemberState.WAITING, MemberState.TRAINING}
        )

    def lost(self) -> list[Loss]:
        """Return which members of the newest generation are lost, and how."""
        found = []
        for name, life in self.newest.lives.items() if self.newest else ():
            node, sign = int(name), self.signs.get(int(name))
            if sign is None or sign.life != life:
                found.append(Loss(node, "was started again"))
            elif sign.state is MemberState.GONE:
                found.append(Loss(node, f"ended ({sign.fault})", sign.fault))
            elif sign.state is not MemberState.DONE and self.silent[node] >= SILENT:
                found.append(Loss(node, f"has given no sign of life for {SILENT * LOOK:.0f} s"))
        return found

    def broken(self, generation: NodeGeneration) -> str | None:
        """Return why the ranks of a generation that trains can never end by themselves; None while they can."""
        if self.newest is not None and self.newest.number > generation.number:
            return "the other nodes went on without this one"
        # A node that was asked to leave has had all ranks save and leave, which takes the others a moment too; and what
        # is not survived ends the attempt, whose verdict wants to see how each rank fell.
        return _words(loss for loss in self.lost() if loss.fault in {None, Fault.NODE}) or None

    def wants_more(self, generation: NodeGeneration) -> bool:
        """Return True if a node waits with which more could train than do in this generation."""
        return not self.lost() and self.fitting(len(self.live)) > len(generation.lives)

    def turn(self) -> NodeGeneration | Over | list[int] | None:
        """Return the generation that this node trains in next, or that there is none; the members of one that this node
        has to propose; or None to look again."""
        self.waited += 1
        if self.newest is None:
            return self._first()
        if self.newest.number > self.me.generation and self.newest.lives.get(str(self.me.node)) == self.me.life:
            return self.newest
        return self._following(self.newest)

    def _first(self) -> Over | list[int] | None:
        live = self.live
        if len(live) == self.most or (self.waited > GATHER and self.fitting(len(live))):
            return self._proposed(live)
        if self.waited > PATIENCE:
            return Over(why=f"only {len(live)} of {self.most} nodes came within {PATIENCE * LOOK:.0f} s")
        return None

    def _following(self, newest: NodeGeneration) -> Over | list[int] | None:
        members = [self.signs[node] for node in newest.nodes if node in self.signs]
        if any(sign.state is MemberState.DONE for sign in members):
            # A member whose own ranks fell has not ended well, whatever another's program says of itself.
            return Over(why="the job has ended", done=self.me.generation < newest.number)
        lost, live = self.lost(), self.live
        if fatal := [loss for loss in lost if loss.fault is not None and loss.fault not in SURVIVED]:
            return Over(why=_words(fatal))
        staying = [sign for sign in members if sign.node not in {loss.node for loss in lost}]
        if any(sign.state is MemberState.TRAINING or sign.generation < newest.number for sign in staying):
            self.undecided = 0
            return None
        if lost and not self.fitting(len(live)):
            least = self.counts[0]
            return Over(why=f"{_words(lost)}; {len(live)} left, and platform.nodes.min={least}")
        joining = all(sign.left for sign in staying) and self.fitting(len(live)) > len(newest.lives)
        if not lost and not joining:
            self.undecided += 1
            return Over(why="no node is lost, and none waits to join") if self.undecided > UNDECIDED else None
        self.undecided = 0
        return self._proposed(live)

    def _proposed(self, live: Sequence[int]) -> list[int] | None:
        """Return the next members if this node is the one to propose them, which is the first that lives."""
        return list(live[: self.fitting(len(live))]) if live and live[0] == self.me.node else None


class Membership:
    """One node's part in it: a thread that gives its signs, and its looks at the others'."""

    def __init__(
        self, attempt: Storage, *, node: int, most: int, counts: Sequence[int], port_of: Callable[[int], int]
    ) -> None:
        """
        Args:
            attempt: the folder that all nodes of the attempt see.
            counts: the numbers of nodes that may train together, ascending.
            port_of: the port of a generation, by its number, if this node leads it.
        """
        # What a loss of power takes with it is of no use after it.
        self._storage, self._port_of = replace(attempt.within(_FOLDER), durable=False), port_of
        self.view = View(me=Sign(node=node, life=uuid4().hex), most=most, counts=tuple(counts))
        self._lock, self._over, self._looked = threading.Lock(), threading.Event(), -1.0
        self._thread = threading.Thread(target=self._give_signs, name="membership", daemon=True)

    def __enter__(self) -> Self:
        self._give_sign()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self.view.me.state not in {MemberState.DONE, MemberState.GONE}:
            self.tell(MemberState.GONE, Fault.UNKNOWN if error is None else fault_of_exception(error))

    def tell(self, state: MemberState, fault: Fault | None = None, *, generation: int | None = None) -> None:
        """Let the others know what this node does now."""
        with self._lock:
            me = self.view.me
            self.view.me = replace(
                me, state=state, fault=fault, generation=me.generation if generation is None else generation
            )
        self._give_sign()

    def next(self) -> NodeGeneration | Over:
        """Wait for the generation that this node trains in next."""
        self.view.waited = self.view.undecided = 0
        while True:
            if self.look():
                turn = self.view.turn()
                if isinstance(turn, NodeGeneration | Over):
                    return turn
                if turn is not None:
                    self._propose(turn)
                    continue
            self._over.wait(LOOK / 4)

    def look(self) -> bool:
        """Look at the others, unless that was a moment ago or the storage does not answer; return whether it was done.

        Counts looks and no seconds: a node that stood still for a minute has seen nobody silent.
        """
        if monotonic() - self._looked < LOOK:
            return False
        self._looked = monotonic()
        try:
            signs = [sign for node in range(self.view.most) if (sign := self._sign_of(node)) is not None]
            newest = self._newest()
        except (TrainLitgptError, OSError) as error:
            print(f"warning [node.members] the other nodes cannot be looked at: {error} -> looking again", flush=True)
            return False
        view = self.view
        for sign in signs:
            view.silent[sign.node] = view.silent.get(sign.node, 0) + 1 if view.signs.get(sign.node) == sign else 0
            view.signs[sign.node] = sign
        view.signs[view.me.node], view.silent[view.me.node], view.newest = view.me, 0, newest
        return True

    # --- the storage --------------------------------------------------------------------------------------------------

    def _give_signs(self) -> None:
        while not self._over.wait(LOOK):
            self._give_sign()

    def _give_sign(self) -> None:
        with self._lock:
            self.view.me = replace(self.view.me, beat=self.view.me.beat + 1)
            with contextlib.suppress(TrainLitgptError, OSError):  # a node that cannot write is dead to the others
                self._storage.write(f"node-{self.view.me.node}.json", json.dumps(asdict(self.view.me)).encode())

    def _sign_of(self, node: int) -> Sign | None:
        path = f"node-{node}.json"
        with contextlib.suppress(FileNotFoundError, DataError):
            return parse_json(
                self._storage.read(path), Sign, where=self._storage.address(path), fix="the node's next sign fixes it"
            )
        return None

    def _newest(self) -> NodeGeneration | None:
        """Return the newest generation. None is ever changed, so that those after the last known are looked for."""
        known = self.view.newest
        while True:
            path = f"generation-{1 if known is None else known.number + 1}.json"
            try:
                content = self._storage.read(path)
            except FileNotFoundError:
                return known
            fix = "end the attempt; the next one begins with generations of its own"
            known = parse_json(content, NodeGeneration, where=self._storage.address(path), fix=fix)

    def _propose(self, nodes: Sequence[int]) -> None:
        """Create the next generation, unless another node has."""
        view = self.view
        number = 1 if view.newest is None else view.newest.number + 1
        lives = {str(node): view.signs[node].life for node in nodes}
        proposed = NodeGeneration(number=number, lives=lives, port=self._port_of(number))
        self._storage.create(f"generation-{number}.json", json.dumps(asdict(proposed)).encode())
        self._looked = -1.0


def _words(losses: Iterable[Loss]) -> str:
    return ", ".join(f"node {loss.node} {loss.how}" for loss in losses)
