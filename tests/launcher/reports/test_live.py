"""The page of a training while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_gpus import H100, with_trouble
from test_goodput import DAY, PRICE, end, record, start, steps

from launcher.findings import Finding
from launcher.job import JobState, JobStatus
from launcher.reports.goodput import AttemptTimes
from launcher.reports.live import LivePage, live_markdown
from launcher.reports.places import RunPlace, run_places, web_page
from litgpt_demo.config import TrainConfig
from litgpt_demo.metrics import GpuRow
from litgpt_demo.node.gpu_health import Health
from litgpt_demo.storage import open_storage


def figures(page: LivePage) -> dict[str, str]:
    """The rows of the page's first table."""
    lines = live_markdown(page).split("\n\n")[0].splitlines()
    assert lines[:2] == ["| Figure | Now |", "| --- | --- |"]
    cells = (line.strip("| ").split(" | ") for line in lines[2:])
    return {name: value.replace("\\", "") for name, value in cells}


def training(last: int = 10, **values: float) -> list[dict[str, Any]]:
    """A first attempt of 20 steps, 2 s each, from 140 s on."""
    known = {"loss": 4.24, "learning_rate": 6e-4, "tokens": 512 * last, "tokens_per_second": 12_345.0, "mfu": 0.41}
    trained = [{**row, **known, "memory": 54 * 10**9, **values} for row in steps(1, last, 40.0)]
    evaluation = {"kind": "evaluation", "step": 5, "elapsed": 60.0, "validation_loss": 4.5}
    return [start(1, 100, 0), *trained[:5], evaluation, *trained[5:]]


def healthy(node: int, *, trouble: dict[str, int] | None = None, xids: tuple[str, ...] = ()) -> GpuRow:
    health = Health()
    health.add([H100[1]] * 7 + [with_trouble(H100[1], **(trouble or {}))], xids)
    return GpuRow(node=node, host=f"gpu-{node}", rank=8 * node, ranks=8, **health.columns())


def test_one_table_tells_how_the_training_goes() -> None:
    told = figures(LivePage(rows=training(), now=DAY + 170, status=JobStatus(state=JobState.RUNNING, native="Running")))
    assert told == {
        "State": "running",
        "Step": "10 of 20 (50 %)",
        "Training loss": "4.2400",
        "Validation loss": "4.5000 at step 5",
        "Learning rate": "0.0006",
        "Tokens seen": "5,120",
        "Throughput": "12,345 tok/s",
        "MFU": "41 %",
        "Peak memory of rank 0": "54.0 GB",
        "Time left": "20 s, until 1970-01-12 13:49 UTC",
        "Attempt": "1",
    }


def test_before_the_first_step_the_page_says_what_the_job_waits_for_and_where_to_look() -> None:
    waits = Finding("warning", "gke.quota", "no quota for 8 GPUs in europe-west4", "ask for more")
    status = JobStatus(state=JobState.PENDING, native="Pending", reasons=(waits,))
    page = live_markdown(LivePage(status=status, places=[RunPlace("Logs", "/r/runs/gpt/attempts/1")]))
    assert page.startswith("The job has not reported a step yet.")
    assert "| State | pending: no quota for 8 GPUs in europe-west4 |" in page
    assert "| Logs | `/r/runs/gpt/attempts/1` |" in page


def test_the_cost_is_told_so_far_and_to_the_end_where_the_machines_have_a_list_price() -> None:
    """Two machines of $36 an hour are held since the node began: for 70 s, and 20 s are left."""
    page = LivePage(rows=training(), times=[AttemptTimes(record=record(1, 0.0), end=None)], price=PRICE)
    told = figures(page)
    assert told["Cost so far"] == "$1.40, at list price: 2 x a3-highgpu-8g for $36.00 an hour"
    assert told["Cost at the end"] == "$1.80"


def test_without_a_list_price_nothing_is_said_of_cost() -> None:
    page = LivePage(rows=training(), times=[AttemptTimes(record=record(1, 0.0), end=None)])
    assert "ost" not in figures(page).keys() | set(live_markdown(page).split())


def test_a_second_attempt_shows_the_curves_and_the_cost_of_the_first_one_too() -> None:
    failed = AttemptTimes(record=record(1, 0.0), end=end(JobState.FAILED, 180.0, scheduled=90.0, pulled=95.0))
    again = AttemptTimes(record=record(2, 200.0), end=None)
    resumed = [start(2, 300, 5), *({**row, "loss": 3.0} for row in steps(6, 12, 40.0))]
    page = LivePage(rows=[*training(), *resumed], times=[failed, again], price=PRICE, attempt=2)
    told = figures(page)
    assert told["Attempt"] == "2, after 1 restart"
    assert told["Cost so far"].startswith("$3.08")  # 90 s and 64 s of two machines
    assert '"step" 1 --> 12' in live_markdown(page)


def test_restarts_by_the_platform_within_an_attempt_are_counted() -> None:
    rows = [*training(), start(1, 400, 5), *steps(6, 8, 40.0)]
    assert figures(LivePage(rows=rows))["Attempt"] == "1, after 1 restart"


def test_the_health_of_the_gpus_is_a_word_or_the_troubles_by_name() -> None:
    good = [healthy(0), healthy(1)]
    assert figures(LivePage(rows=training(), nodes=good))["GPU health"] == "good (16 GPUs on 2 nodes)"
    bad = [healthy(0, trouble={"clock": 345, "reasons": 0x48}), healthy(1, xids=("5:79",)), healthy(2)]
    straggler = {"kind": "straggler", "step": 60, "rank": 17, "node": 2, "since": 44, "factor": 1.84, "seconds": 0.3}
    assert figures(LivePage(rows=training(), nodes=bad, stragglers=[straggler]))["GPU health"] == (
        "node 0: throttled 100 % of the time (HwSlowdown HwThermalSlowdown); node 1: Xid 79 on GPU 5; "
        "node 2: the others wait for rank 17, 1.8 times as long since step 44"
    )


def test_a_gpu_that_only_keeps_to_its_power_limit_is_well() -> None:
    nodes = [healthy(0, trouble={"reasons": 0x4})]
    assert figures(LivePage(rows=training(), nodes=nodes))["GPU health"] == "good (8 GPUs on 1 nodes)"


def test_of_many_sick_nodes_the_first_are_named_and_the_others_counted() -> None:
    nodes = [healthy(node, trouble={"uncorrected": 3}) for node in range(40)]
    page = LivePage(rows=training(), nodes=nodes)
    assert figures(page)["GPU health"].endswith("node 2: uncorrected ECC errors: 3; 37 more nodes")
    assert live_markdown(page).count("3 uncorrected on GPU 7") == 32


def test_loss_learning_rate_and_throughput_are_drawn_with_units_and_at_most_a_hundred_points() -> None:
    rows = [
        start(1, 100, 0),
        *({"kind": "step", "step": step, "loss": 9.0 / step, "learning_rate": step * 1e-6, "tokens_per_second": 2e4}
          for step in range(1, 2001)),
        *({"kind": "evaluation", "step": step, "validation_loss": 4.0} for step in (500, 1000)),
    ]  # fmt: skip
    page = live_markdown(LivePage(rows=rows))
    for title, unit in (
        ("Loss", "loss, nats per token"),
        ("Learning rate", "learning rate"),
        ("Throughput", "thousand tokens per second"),
    ):
        assert f'title "{title}"\n    x-axis "step" 1 --> 2000\n    y-axis "{unit}" ' in page
    lines = [line for line in page.splitlines() if line.startswith("    line ")]
    assert [line.partition("[")[0] for line in lines] == [
        '    line "training" ', '    line "validation" ', '    line "rate" ', '    line "tokens/s" ',
    ]  # fmt: skip
    assert all(2 <= line.count(",") + 1 <= 100 for line in lines)


# --- where to look ----------------------------------------------------------------------------------------------------


def places(root: str, train: dict[str, Any] | None = None, pages: dict[str, str] | None = None) -> dict[str, RunPlace]:
    run = open_storage(f"{root}/runs/gpt-1")
    settings = None if train is None else TrainConfig.model_validate(train)
    found = run_places(run, name="gpt-1", logs=f"{run.address()}/attempts/2", train=settings, pages=pages or {})
    return {place.name: place for place in found}


def test_a_run_in_a_bucket_is_looked_at_in_the_console() -> None:
    found = places("gs://my-bucket/llm", pages={"Batch job": "https://console.example/job"})
    bucket = "https://console.cloud.google.com/storage/browser/my-bucket/llm/runs/gpt-1"
    assert found["Run's folder"] == ("Run's folder", "gs://my-bucket/llm/runs/gpt-1", bucket)
    assert found["Logs"].url == f"{bucket}/attempts/2"
    assert found["Logs in a terminal"].text == "train-litgpt logs gpt-1 --root gs://my-bucket/llm"
    page = live_markdown(LivePage(places=list(found.values())))
    assert f"| Run's folder | [gs://my-bucket/llm/runs/gpt-1]({bucket}) |" in page
    assert "| Batch job | [Batch job](https://console.example/job) |" in page


def test_a_local_run_has_no_links_because_a_browser_opens_no_folder() -> None:
    found = places("/srv/out", {"tensorboard": True, "wandb": {"project": "pages", "secret": None}})
    assert [place.url for place in found.values()] == [None] * 5
    assert found["TensorBoard"].text == "tensorboard --logdir /srv/out/runs/gpt-1/tensorboard"
    assert found["Weights & Biases"].text == "/srv/out/runs/gpt-1/wandb"


def test_trackers_that_were_asked_for_are_linked() -> None:
    mlflow = {"uri": "https://mlflow.example.com", "experiment": "gpts"}
    found = places("/srv/out", {"wandb": {"project": "pages", "entity": "lab"}, "mlflow": mlflow})
    assert found["Weights & Biases"].url == "https://wandb.ai/lab/pages/runs/gpt-1"
    assert found["MLflow"].url == "https://mlflow.example.com"
    assert "MLflow" not in places("/srv/out", {})


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("/srv/out/config.json", None),
        ("gs://my-bucket/runs/gpt/config.json", "https://storage.cloud.google.com/my-bucket/runs/gpt/config.json"),
        ("gs://my-bucket/runs/gpt/final", "https://console.cloud.google.com/storage/browser/my-bucket/runs/gpt/final"),
    ],
)
def test_what_lies_in_a_bucket_has_a_page(address: str, page: str | None) -> None:
    assert web_page(address) == page


def test_no_address_ends_its_link_or_its_cell() -> None:
    page = live_markdown(LivePage(places=[RunPlace("a|b", "x](y", "https://host/a b)|c"), RunPlace("t", "`|`")]))
    assert r"| a\|b | [x\](y](https://host/a%20b%29%7Cc) |" in page
    assert r"| t | \`\|\` |" in page
