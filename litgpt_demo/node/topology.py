"""Ranks in the order of the machines' places in the fabric, so that neighbours in a ring are neighbours in the hall.

A platform numbers nodes as they come. NCCL's rings and trees go through nodes in the order of their ranks, so a ring
over machines of two blocks in arbitrary order crosses between the blocks at every other step instead of twice. Kueue's
topology-aware scheduling orders pods by their completion index already, and nothing is left to do here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Blocks, racks and hosts, as `/block/subblock/host`; the same as GKE's node labels cloud.google.com/gce-topology-*:
# https://docs.cloud.google.com/compute/docs/instances/use-compact-placement-policies#verify-vm-location
_METADATA = "http://{host}/computeMetadata/v1/instance/attributes/physical_host"

# In the environment of the ranks: where their machine is.
PLACE = "LITGPT_PLACE"


def place_of(source: str | None, environ: Mapping[str, str]) -> str:
    """Return the place of this machine in the fabric, largest part first, with slashes between; empty if not known.

    Args:
        source: `gce` asks the machine's metadata server, `env:NAME` reads a variable, None asks nobody.
    """
    if source is None:
        return ""
    if source.startswith("env:"):
        return environ.get(source.removeprefix("env:"), "")
    from urllib.request import Request, urlopen

    # Google's own libraries find another server by this variable too.
    host = environ.get("GCE_METADATA_HOST", "169.254.169.254")
    request = Request(_METADATA.format(host=host), headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=5) as answer:
            return str(answer.read().decode()).strip()
    except OSError as error:  # machines without a placement policy have no such attribute
        print(
            f"warning [node.place] the place of this machine is not known: {error} -> ranks keep their order",
            flush=True,
        )
        return ""


def ranks_by_place(places: Sequence[str]) -> list[int]:
    """The rank of each node: machines that share a block are next to each other, and within it those of one rack.

    Node 0 stays rank 0, because the others meet there; its block and rack come first. Machines whose place is not known
    come last, in their own order.
    """
    first = _parts(places[0]) if places else ()

    def order(node: int) -> tuple[bool, bool, tuple[tuple[bool, str], ...], int]:
        mine = _parts(places[node])
        shared = [mine[: depth + 1] != first[: depth + 1] for depth in range(len(mine))]
        return node != 0 and not mine, node != 0 and not first, tuple(zip(shared, mine, strict=True)), node

    ordered = sorted(range(len(places)), key=order)
    return [ordered.index(node) for node in range(len(places))]


def _parts(place: str) -> tuple[str, ...]:
    return tuple(part for part in place.split("/") if part)
