from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.node.topology import place_of, ranks_by_place

places = st.lists(st.builds("/{}/{}/{}".format, *[st.sampled_from("abc")] * 2, st.integers(0, 99)), min_size=1)


def runs_of(values: list[str]) -> int:
    """How many stretches of equal values there are."""
    return 1 + sum(one != other for one, other in pairwise(values))


@given(places)
def test_machines_of_one_block_and_of_one_rack_are_neighbours(given_places: list[str]) -> None:
    ranks = ranks_by_place(given_places)
    assert sorted(ranks) == list(range(len(given_places)))
    assert ranks[0] == 0
    in_order = [given_places[ranks.index(rank)] for rank in range(len(ranks))]
    for depth in (2, 3):
        domains = ["/".join(place.split("/")[:depth]) for place in in_order]
        assert runs_of(domains) == len(set(domains))


@given(places, st.data())
def test_machines_whose_place_is_not_known_come_last_in_their_order(known: list[str], data: st.DataObject) -> None:
    unknown = data.draw(st.sets(st.integers(1, len(known) + 3), max_size=4))
    mixed = list(known)
    for node in sorted(unknown):
        mixed.insert(min(node, len(mixed)), "")
    ranks = ranks_by_place(mixed)
    theirs = [ranks[node] for node, place in enumerate(mixed) if not place]
    assert theirs == list(range(len(known), len(mixed)))


def test_without_places_nothing_changes() -> None:
    assert ranks_by_place(["", "", ""]) == [0, 1, 2]
    assert ranks_by_place(["", "/b/1/x", "/a/1/x"])[0] == 0
    assert ranks_by_place([]) == []


def test_two_blocks_that_came_mixed_are_sorted_out() -> None:
    assert ranks_by_place(["/b/r1/h1", "/a/r1/h2", "/b/r2/h3", "/a/r1/h4", "/b/r1/h5"]) == [0, 3, 2, 4, 1]


# --- where a place comes from -----------------------------------------------------------------------------------------


class Metadata(BaseHTTPRequestHandler):
    """Answers as the metadata server of GCE: one path, and only to those who ask with its header."""

    def do_GET(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.send_error(403)
        elif self.path != "/computeMetadata/v1/instance/attributes/physical_host":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"/ec8f2a/3c51/9d07\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_machine_of_gce_asks_its_metadata_server(metadata: str) -> None:
    assert place_of("gce", {"GCE_METADATA_HOST": metadata}) == "/ec8f2a/3c51/9d07"


def test_a_place_can_come_from_a_label_and_nobody_is_asked_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert place_of("env:BLOCK", {"BLOCK": "/a/b"}) == "/a/b"
    assert place_of("env:BLOCK", {}) == ""
    assert place_of(None, {"GCE_METADATA_HOST": "127.0.0.1:1"}) == ""
    assert capsys.readouterr().out == ""


def test_a_machine_without_a_place_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert place_of("gce", {"GCE_METADATA_HOST": "127.0.0.1:1"}) == ""
    assert "warning [node.place]" in capsys.readouterr().out
