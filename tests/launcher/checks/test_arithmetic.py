"""What `plan` says a training takes: figures with how they come about, and a change that would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import arithmetic as module
from launcher.checks.arithmetic import check_memory, expected, figures, gpu_names, host_memory, seconds_for
from launcher.config import RunConfig, validated
from launcher.machines import MACHINES, ListPrice
from litgpt_demo import catalogue
from litgpt_demo.errors import Finding


@pytest.fixture(autouse=True)
def _on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])


def config(model: dict[str, Any], **settings: Any) -> RunConfig:
    return validated(RunConfig, {"model": model, **settings}, where="test")


def figures_of(training: RunConfig, **known: Any) -> dict[str, tuple[str, str]]:
    table = figures(training, **{"vocab_size": None} | known)
    return {row["what"]: (row["figure"], row["arithmetic"]) for row in table}


def found(training: RunConfig) -> list[Finding]:
    return list(check_memory(training, vocab_size=None))


def test_figures_of_every_catalogue_model_have_their_arithmetic() -> None:
    for name in catalogue.models():
        figures = figures_of(config({"name": name, "sequence_length": 128}, platform={"kind": "local"}))
        assert {"parameters", "FLOPs per token", "memory per process", "host memory of a save"} == set(figures), name
    own = config({"name": None, "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}})
    assert (figures_of(own), found(own)) == ({}, []), "its vocabulary is not known yet"
    gpt3 = config({"name": "transformer-175b", "sequence_length": 2048}, platform={"kind": "local"})
    figures = figures_of(gpt3, tokens=300_000_000_000)
    assert figures["parameters"] == ("175 B", "96 blocks of 1.81 B, embedding and output of 50,304 x 12,288 each")
    expected_figure = ("1.08 T", "6 x 175 B weights in products + 29.0 B for attention over 2,048 tokens")
    assert figures["FLOPs per token"] == expected_figure
    assert figures["FLOPs in all"][0] == "3.23e+23"
    assert figures["memory per process"][1].startswith("weights 701 GB + AdamW 1.40 TB + gradients 701 GB + at the ")
    assert figures["host memory of a save"] == ("2.10 TB", "weights and AdamW 2.10 TB, copied on each node")


@pytest.mark.parametrize("strategy", ["ddp", "hybrid", "fsdp"])
def test_plan_shows_the_host_memory_of_a_save_on_gpus(strategy: str) -> None:
    """Each node copies its share of one state, whatever the strategy."""
    platform = {"kind": "slurm", "nodes": 2, "processes_per_node": 8}
    figures = figures_of(config({"name": "pythia-1b"}, platform=platform, train={"strategy": strategy}))
    how = "weights and AdamW 12.1 GB / 2 nodes, copied on each node"
    assert figures["host memory of a save"] == ("6.07 GB", how)


LONG = 131_072  # tokens, of which not even one sample fits without recomputation


@pytest.mark.parametrize(
    ("model", "train", "processes", "length", "fix"),
    [
        ("pythia-1b", {"micro_batch": 64, "compile": "none"}, 1, 2048, "set train.micro_batch=16, which takes"),
        ("Llama-3.2-1B", {"micro_batch": 1}, 1, LONG, "set train.activation_checkpointing=full, which takes"),
        ("Llama-3-8B", {"micro_batch": 1, "strategy": "ddp"}, 8, 2048, "set train.strategy=fsdp, which takes about"),
        (
            "transformer-175b",
            {},
            8,
            2048,
            "take 128 processes and set train.activation_checkpointing=full train.micro_",
        ),
    ],
)
def test_fix_of_a_large_model_is_the_cheapest_that_fits(
    model: str, train: dict[str, Any], processes: int, length: int, fix: str
) -> None:
    platform = {"kind": "local", "processes_per_node": processes}
    training = config({"name": model, "sequence_length": length}, train=train, platform=platform)
    (finding,) = found(training)
    assert finding.severity == "error"
    assert finding.fix.startswith(fix)
    fits = training.model_dump()
    for section, name, value in re.findall(r"(model|train)\.(\w+)=(\w+)", finding.fix):
        fits[section][name] = value
    if count := re.match(r"take (\d+) processes", finding.fix):
        fits["platform"] = {"kind": "local", "processes_per_node": 64, "nodes": int(count[1]) // 64}
    assert found(config(**fits)) == []
    (unsure,) = found(config({"name": "pythia-1b", "sequence_length": 2048}, train={"micro_batch": 32}))
    assert unsure.severity == "warning"


def on_nodes(model: str, machine: str, network: str, nodes: int, **train: Any) -> RunConfig:
    platform = {"kind": "kubernetes", "machine": machine, "network": network, "nodes": nodes}
    return config({"name": model, "sequence_length": 2048}, train=train, platform=platform)


def test_auto_strategy_follows_memory_before_network_speed() -> None:
    """A model that no process can copy is sharded within nodes, or across a network that is fast enough."""
    passes = {"micro_batch": 4, "global_batch": 64, "activation_checkpointing": "full"}
    llama = on_nodes("Llama-3-8B", "a3-megagpu-8g", "tcpxo", 2, **passes)
    # The network test's figure for a network like that of RCP: 122.3 Gbit/s between nodes.
    measured = [{"kind": "network", "step": 0, "nodes": 2, "busbw": 122.3 / 8}]
    strategy, why = figures_of(llama, metrics=measured)["strategy"]
    assert (strategy, why[: why.index("; w")]) == (
        "hybrid",
        "each node holds a copy and sends 32.1 GB a step; fsdp would send 60.2 GB a step, 3.9 s at 122 Gbit/s "
        "(as the network test measured), and the matrix products take 1.1 s",
    )
    strategy, why = figures_of(llama)["strategy"]
    assert (strategy, why[: why.index("; w")]) == (
        "fsdp",
        "it takes least memory and sends 60.2 GB a step, 0.32 s at 1,520 Gbit/s (the least of tcpxo), "
        "which the matrix products of 1.1 s hide",
    )
    unknown = llama.model_copy(update={"platform": llama.platform.model_copy(update={"network": "tcp"})})
    assert figures_of(unknown)["strategy"][0] == "hybrid", "which sends least, however fast the network is"
    assert figures_of(on_nodes("pythia-1b", "a3-megagpu-8g", "tcpxo", 2, **passes))["strategy"][0] == "ddp"
    for network_config in (llama, unknown):
        assert found(network_config) == []
    training = config(
        {"name": "pythia-14m"}, train={"strategy": "ddp"}, platform={"kind": "local", "processes_per_node": 2}
    )
    assert figures_of(training)["strategy"] == ("ddp", "as train.strategy=ddp says")


@pytest.mark.parametrize(
    ("machine", "network", "nodes"), [("a3-megagpu-8g", "tcpxo", 64), ("a3-ultragpu-8g", "gib", 16)]
)
@pytest.mark.parametrize(("model", "parameters"), [("transformer-100b", 100.9e9), ("transformer-175b", 175.2e9)])
def test_hundred_billion_parameters_fit_with_each_term_shown(
    model: str, parameters: float, machine: str, network: str, nodes: int
) -> None:
    full = {"activation_checkpointing": "full", "micro_batch": 1, "global_batch": 512}
    training = on_nodes(model, machine, network, nodes, **full)
    assert found(training) == []
    strategy, why = figures_of(training)["strategy"]
    assert strategy == "fsdp"
    assert why.startswith("a copy for each node does not fit: it takes ")
    total, ranks, share = re.search(r"gradients of (\S+) TB / (\d+) processes = (\S+) GB", why).groups()  # type: ignore[union-attr]
    assert float(total) * 1e12 == pytest.approx(16 * parameters, rel=0.01)
    assert float(share) * 1e9 == pytest.approx(16 * parameters / int(ranks), rel=0.01)
    assert int(ranks) == 8 * nodes
    assert why.endswith("; tensor, pipeline and expert parallelism are not available")
    figure, terms = figures_of(training)["memory per process"]
    parts = [term.rsplit(" ", 2) for term in terms.partition(";")[0].split(" + ")]
    assert [name for name, *_ in parts] == ["weights", "AdamW", "gathered", "gradients", "at the loss"]
    added = sum(float(size) * {"MB": 1e-3, "GB": 1}[unit] for _, size, unit in parts)
    assert float(figure.removesuffix(" GB")) == pytest.approx(added, abs=0.2)
    # As the settings are by default it does not fit, and the advice does.
    (finding,) = found(on_nodes(model, machine, network, nodes, global_batch=4096))
    changes = dict(re.findall(r"train\.(\w+)=(\w+)", finding.fix))
    assert found(on_nodes(model, machine, network, nodes, **{"global_batch": 4096} | changes)) == []


def test_only_devices_that_are_known_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 12\n")
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"]
    (tmp_path / "limit").write_text("1000000000\n")
    assert host_memory(tmp_path / "limit") == 10**9, "a container's"
    huge = {"name": "transformer-175b"}
    assert found(config(huge, platform={"kind": "kubernetes", "gpus": 1})) == [], "this machine's say nothing of others"
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA GeForce RTX 3090"])
    assert found(config(huge, platform={"kind": "local"})) == []
    monkeypatch.setattr(module, "gpu_names", list)
    assert found(config(huge, platform={"kind": "local"})) != [], "the memory of a machine without GPUs is known"
    terms = figures_of(config({"name": "pythia-14m"}, platform={"kind": "local"}))["memory per process"][1]
    assert terms.endswith("a report's peak memory counts Python and torch too, 0.5 GB")


def test_more_machines_take_less_time_for_the_same_money() -> None:
    price = ListPrice(usd=36.0, region="us-central1", date="2026-10-13", source="here")
    a2 = replace(MACHINES["a2-highgpu-8g"], price=price)

    def on(nodes: int) -> RunConfig:
        platform = {"kind": "kubernetes", "machine": a2.name, "nodes": nodes}
        return validated(RunConfig, {"train": {"global_batch": 1024}, "platform": platform}, where="test")

    single, eight = (expected(a2, nodes=nodes, seconds=seconds_for(on(nodes), 1e21) or 0) for nodes in (1, 8))
    assert single.seconds == pytest.approx(8 * eight.seconds)
    assert single.dollars == pytest.approx(eight.dollars)
    assert "$288 at list price" in str(expected(a2, nodes=8, seconds=3600))
    assert "not known" in str(expected(replace(a2, price=None), nodes=1, seconds=3600))
