"""Mistakes of one line that some test has to notice: `make mutants`, or `make mutants ONLY="NAME …"` for some of them.

Each is made in a copy of the checkout, and the tests that should notice it run there until one fails. In the end the
tests that failed run once more on the source as it is: one that fails there too has noticed nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
_SLURM = "launcher/platforms/slurm/test_slurm_jobs.py"

# What it is called, the file, a piece of a line that the file has once, and what takes its place; then the tests below
# tests/, one of which notices it: files, or single tests of slow files.
MUTANTS: tuple[tuple[str, ...], ...] = (
    ("two-roots-are-one-job", "launcher/job.py", "sha256(root.encode())", "sha256(b'')",
     "launcher/runs/test_attempts.py"),
    ("folder-marker-is-a-file", "litgpt_demo/storage/bucket.py", "return bool(name) and clean_path(name) == name",
     "return clean_path(name) == name", "litgpt_demo/storage/test_folder_markers.py"),
    ("files-removed-while-read", "litgpt_demo/training/saving.py", "ranks.first(lambda: None)", "None",
     "litgpt_demo/training/test_saving.py::test_no_rank_removes_what_another_still_reads"),
    ("any-stack-for-any-network", "launcher/checks/fitness.py", "in {NcclFit.QUALIFIED, NcclFit.UNSTATED}",
     "is not NcclFit.FAILS", "launcher/checks/test_fitness.py"),
    ("forged-job-is-believed", "launcher/runs/attempts.py", "if not any(platform.gave(record.job_id,",
     "if False and any(platform.gave(record.job_id,", "launcher/runs/test_attempts.py"),
    ("mounted-code-is-believed", "litgpt_demo/node/code.py", "!= named[1]:", '== "":',
     "litgpt_demo/node/test_node_code.py"),
    ("ignore-file-brings-secrets-back", "launcher/images/context.py", "PatternMatcher([*lines, *after, file.name])",
     "PatternMatcher([*after, *lines, file.name])", "launcher/runs/test_code.py"),
    ("labels-believed", "litgpt_demo/stacks/installed.py", "        if found[name] != labels[name]",
     "        if not found[name] and found[name] != labels[name]", "litgpt_demo/test_installed.py"),
    ("first-attempt-instead-of-last", "launcher/runs/attempts.py",
     "return last if last is not None and last.status.state.live else None",
     "return next((one for one in self.all()[:1] if one.status.state.live), None)", "launcher/runs/test_attempts.py"),
    ("registry-swaps-the-image", "launcher/images/oci.py", "if reference.digest not in {None, digest}:",
     "if reference.digest == digest == None:", "launcher/images/test_images.py"),
    ("password-to-whom-the-registry-sends", "launcher/images/oci.py",
     "own = origin_of(answer.url) == origin_of(first.url)", "own = bool(first)", "launcher/checks/test_fitness.py"),
    ("password-to-an-http-realm", "launcher/images/oci.py", "if not is_protected(realm):",
     "if not is_local(self._reference.host) and not is_protected(realm):", "launcher/images/test_images.py"),
    ("runai-name-not-compared", "launcher/platforms/runai/rest.py", 'if one.get("name") == name and str(', "if str(",
     "launcher/platforms/runai/test_runai.py"),
    ("runai-project-not-compared", "launcher/platforms/runai/rest.py",
     'one.get("name") == name and str(one.get("projectId")) == project]', 'one.get("name") == name]',
     "launcher/platforms/runai/test_runai.py"),
    ("runai-unknown-words-refuse", "launcher/platforms/runai/cli.py", "raise PlatformUnreachable(told)",
     "raise PlatformRefused(told)", "launcher/platforms/runai/test_runai.py"),
    ("runai-follows-redirects", "litgpt_demo/secrets.py", "follow_redirects=False", "follow_redirects=True",
     "launcher/platforms/runai/test_runai.py"),
    ("service-account-token-mounted", "launcher/platforms/kubernetes/render.py",
     '"automountServiceAccountToken": False', '"automountServiceAccountToken": True',
     "launcher/platforms/kubernetes/test_rendering.py::test_no_pod_gets_a_token_of_the_clusters_api"),
    ("capabilities-kept", "launcher/platforms/kubernetes/render.py", '= {"capabilities": {"drop": ["ALL"]}}', "= {}",
     "launcher/platforms/kubernetes/test_rendering.py::test_a_node_keeps_no_capability_that_its_network_does_not_need"),
    ("cancel-without-a-request", "launcher/runs/attempts.py", "self.index.request_cancel(self.run)", "pass",
     "launcher/runs/test_attempts.py"),
    ("logs-before-status", "launcher/runs/waiting.py",
     "return status, platform.logs(job_id, position)",
     "page = platform.logs(job_id, position); return platform.status(job_id), page", "launcher/runs/test_waiting.py"),
    ("killed-node-blamed-last", "launcher/runs/diagnosis.py", "    ended: float = -math.inf",
     "    ended: float = math.inf", "launcher/runs/test_diagnosis.py"),
    ("lost-peer-blamed", "launcher/runs/diagnosis.py", "return self.part, severity, self.began, self.node",
     "return self.part, self.began, severity, self.node", "launcher/runs/test_diagnosis.py"),
    ("those-that-waited-blamed", "launcher/runs/diagnosis.py", "part = Part.WAITED", "part = Part.CAUSE",
     "launcher/runs/test_diagnosis.py", "faults/test_verdict.py"),
    ("earlier-jobs-hardware-blamed", "litgpt_demo/node/evidence.py", "float(told[1]) >= begun and",
     "float(told[1]) >= 0 and", "litgpt_demo/node/test_torchrun.py"),
    ("dataset-not-in-the-runs-key", "launcher/runs/run.py",
     "key_of(FORMAT, dataset.key, model, dict(train))", "key_of(FORMAT, model, dict(train))",
     "launcher/runs/test_runs.py"),
    ("price-of-one-node", "launcher/checks/arithmetic.py", "price.usd * nodes * seconds / 3600",
     "price.usd * seconds / 3600", "launcher/checks/test_arithmetic.py"),
    ("gone-without-proof", "launcher/platforms/kubernetes/platform.py", "if refused:", "if refused and left:",
     "launcher/platforms/kubernetes/test_gke_cancel.py"),
    ("pods-of-two-lives", "launcher/platforms/kubernetes/render.py", '"restartStrategy": "BlockingRecreate"',
     '"restartStrategy": "Recreate"',
     "launcher/platforms/kubernetes/test_rendering.py::test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone"),
    ("log-begun-anew", "litgpt_demo/storage/local.py", "if size < position.size:", "if not size:",
     "launcher/platforms/test_log_files.py"),
    ("batch-cancel-read-as-failure", "launcher/platforms/batch/states.py",
     "cancelled < failed[0].at", "cancelled > failed[0].at", "launcher/platforms/batch/test_batch_jobs.py"),
    ("cancelled-end-not-written", "launcher/runs/attempts.py", "self.index.end(attempt.record, cancelled)", "pass",
     "launcher/runs/test_attempts.py"),
    ("claimed-over-what-was-written", "launcher/runs/attempts.py",
     "is JobState.ABSENT and not open_storage(there.directory).list()", "is JobState.ABSENT",
     "launcher/runs/test_attempts.py"),
    ("nobody-avoided", "launcher/runs/restarts.py", "if one.machine and counts[one.machine] == times:",
     "if counts[one.machine] == times:", "launcher/runs/test_restarts.py"),
    ("any-holders-count-inherited", "launcher/runs/lease.py",
     "self.holder.flow_run if self._lived and self.holder else None", "self.holder.flow_run if self.holder else None",
     "launcher/runs/test_lease.py"),
    ("lease-lost-too-early", "launcher/runs/lease.py", "return now - since >= DEAD",
     "return now - since >= BEAT", "launcher/runs/test_lease.py"),
    ("last-attempt-by-its-spelling", "launcher/runs/index.py", "(found := pattern.fullmatch(path))])",
     "(found := pattern.fullmatch(path))], key=str)", "launcher/runs/test_index.py"),
    ("lines-handed-on-again", "launcher/runs/waiting.py", "position = page.position", "pass",
     "launcher/runs/test_waiting.py"),
    ("evicted-node-not-blamed", "launcher/runs/diagnosis.py", "began = -math.inf if eviction else math.inf",
     "began = math.inf", "launcher/runs/test_diagnosis.py", "faults/test_verdict.py"),
    ("rank-before-the-nodes-number", "litgpt_demo/node/rendezvous.py",
     '"PET_NODE_RANK", "RANK")', '"RANK", "PET_NODE_RANK")', "litgpt_demo/node/test_rendezvous.py"),
    ("gpus-without-torch", "litgpt_demo/node/gpu.py", "    if seen.gpus == 0:", "    if seen.gpus < 0:",
     "litgpt_demo/node/test_checks.py"),
    ("grace-that-older-torchruns-lack", "litgpt_demo/node/torchrun.py",
     "int(os.environ.get(SHUTDOWN_TIMEOUT, timeout))", "timeout", "litgpt_demo/node/test_torchrun.py"),
    ("damaged-checkpoint-removed", "litgpt_demo/training/checkpoints.py",
     "if _STEP.fullmatch(name) and folder not in kept and folder not in damaged:", "if folder not in kept:",
     "litgpt_demo/training/test_checkpoints.py::test_a_damaged_manifest_is_none_and_is_told"),
    ("max-time-not-reached", "litgpt_demo/training/checkpoints.py",
     "(limit is not None and manifest.seconds >= limit.total_seconds())", "limit is not None",
     "litgpt_demo/training/test_checkpoints.py::test_a_training_has_ended_after_its_last_step_or_when_its_time_is_up_and_not_before"),
    ("saved-without-verifying", "litgpt_demo/training/saving.py",
     "ranks.together(lambda: checkpoints.verify(run, step, names), lambda _: None)",
     "ranks.together(lambda: None, lambda _: None)",
     "litgpt_demo/training/test_saving.py::test_nothing_is_removed_before_its_successor_verifies"),
    ("state-changes-while-it-is-copied", "litgpt_demo/training/saving.py", "copied.wait()",
     "copied.is_set()",
     "litgpt_demo/training/test_saving.py::test_what_is_saved_is_the_state_at_that_moment_whatever_the_training_does_next"),
    ("ranks-shares-overlap", "litgpt_demo/data/batches.py", "return numbers[rank * each : (rank + 1) * each]",
     "return numbers[rank : rank + each]", "litgpt_demo/data/test_batches.py"),
    ("token-of-the-file-before", "litgpt_demo/data/batches.py", 'np.searchsorted(ends, at, side="right")',
     'np.searchsorted(ends, at, side="left")', "litgpt_demo/data/test_batches.py"),
    ("update-without-a-gradient", "litgpt_demo/training/step.py", "found_inf = (~whole.isfinite()).float()",
     "found_inf = (whole > 1e30).float()", "litgpt_demo/training/test_not_finite.py"),
    ("update-of-an-infinite-loss", "litgpt_demo/training/step.py",
     "torch.where(loss.detach().isfinite(), 1.0, math.nan)", "1.0", "litgpt_demo/training/test_not_finite.py"),
    ("gradients-summed", "litgpt_demo/training/step.py", "share = loss if len(batches) == 1 else loss / len(batches)",
     "share = loss", "litgpt_demo/training/test_train.py::test_what_changes_only_rounding_may_be_changed_on_the_way"),
    ("fault-taken-for-a-preemption", "litgpt_demo/node/agent.py",
     "if ending.asked is not None and (cause is None or cause.time >= int(ending.asked)):",
     "if ending.asked is not None:", "litgpt_demo/node/test_node_code.py", "litgpt_demo/test_node_errors.py"),
    ("platforms-world-size-inherited", "litgpt_demo/node/main.py",
     'for name in environ if not name.startswith("PET_") and name not in _OF_RANKS', "for name in environ",
     "litgpt_demo/node/test_node_code.py", "litgpt_demo/node/test_node_environment.py"),
    ("pieces-of-another-assignment", "litgpt_demo/data/workers.py",
     "if done is not None and done.assignment == assignment.digest:", "if done is not None:",
     "litgpt_demo/data/test_preparation.py::test_an_empty_document_that_no_footer_told_of_moves_the_pieces_that_were_made_before_it_is_read"),
    ("forged-document-boundary", "litgpt_demo/data/tokens.py",
     'if not token.get("special") and token["id"] != tokenizer.end_of_text', 'if token["id"] is not None',
     "litgpt_demo/data/test_tokens.py"),
    ("create-replaces", "litgpt_demo/storage/local.py",
     "with replacing(final, durable=self.durable, take=link) as partial:",
     "with replacing(final, durable=self.durable) as partial:",
     "litgpt_demo/storage/test_storage.py::test_what_is_created_is_there_and_never_replaced"),
    ("same-size-is-enough", "litgpt_demo/documents.py", "if (crc32c := crc32c_of(path)) != record.crc32c:",
     "if (crc32c := record.crc32c) != record.crc32c:", "litgpt_demo/test_stored_documents.py"),
    ("delete-takes-a-newer-object", "litgpt_demo/storage/bucket.py",
     "delete(if_generation_match=blob.generation, retry=self._retry())", "delete(retry=self._retry())",
     "litgpt_demo/storage/test_storage.py::test_a_late_request_does_not_touch_a_newer_object"),
    ("nan-logits-pass", "litgpt_demo/export/proof.py", "if not difference <= tolerance(own):",
     "if difference > tolerance(own):",
     "litgpt_demo/export/test_huggingface.py::test_a_logit_that_is_no_number_is_not_taken_for_rounding"),
    ("a-live-orchestrator-overruled", "flows/reconciling.py",
     'return "CANCELLED" in known and all(state in TERMINAL_STATES for state in known)', 'return "CANCELLED" in known',
     "flows/test_reconciling.py::test_only_what_all_have_left_and_somebody_cancelled_is_abandoned"),
    ("unknown-flow-run-taken-for-ended", "flows/reconciling.py", 'states.get(flow_run, "UNKNOWN")',
     'states.get(flow_run, "CRASHED")',
     "flows/test_reconciling.py::test_only_what_all_have_left_and_somebody_cancelled_is_abandoned"),
    ("preemptions-counted", "launcher/runs/restarts.py",
     "spent[one.fault] += not (one.progressed and self._forgives(one.fault))", "spent[one.fault] += 1",
     "launcher/runs/test_restarts.py::test_a_machine_that_fails_again_and_again_costs_nothing_while_the_training_gets_on"),
    ("preemptions-free", "launcher/runs/restarts.py",
     "spent[one.fault] += not (one.progressed and self._forgives(one.fault))",
     "spent[one.fault] += not self._forgives(one.fault)",
     "launcher/runs/test_restarts.py::test_each_class_has_a_budget_of_its_own"),
    ("any-suspect-blamed", "launcher/runs/diagnosis.py",
     "cause.part <= Part.BLAMED and not rivals and not cause.terminated", "True",
     "launcher/runs/test_diagnosis.py::test_neither_a_victim_nor_one_of_several_that_may_have_been_it_is_blamed"),
    ("blamed-machine-taken-again", "tasks/training.py", "partial(claim.take, ended=ended, exclude=exclude)",
     "partial(claim.take, ended=ended)",
     "tasks/test_training.py::test_a_machine_that_was_blamed_twice_is_avoided_and_the_run_ends_well_elsewhere"),
    ("restarts-forgotten", "tasks/training.py", "attempts.index.verdicts, attempts.run, claim.orchestrator",
     "attempts.index.verdicts, attempts.run, None",
     "tasks/test_training.py::test_a_flow_run_that_is_resumed_goes_on_with_its_count_and_another_command_begins_anew"),
    ("refused-job-left-waiting", "tasks/training.py", 'native="refused by its platform", lingers=True',
     'native="refused by its platform"',
     "tasks/test_training.py::test_a_job_that_its_platform_does_not_let_in_ends_the_run_with_the_fix_and_is_taken_back"),
    ("waits-that-multiply", "tasks/steps.py", "if not isinstance(error, Exception) or was_given_up(error):",
     "if not isinstance(error, Exception):", "tasks/test_steps.py"),
    ("server-open-to-the-network", "flows/serving.py", '"--host", "127.0.0.1"', '"--host", "0.0.0.0"',
     "deployments/test_bootstrap.py"),
    ("slurms-word-over-the-nodes", "launcher/platforms/slurm/platform.py",
     "codes = dict.fromkeys(range(job.nodes), EXIT_CODES[_MEANS[word]]) | codes",
     "codes = codes | dict.fromkeys(range(job.nodes), EXIT_CODES[_MEANS[word]])", _SLURM),
    ("slurm-job-that-left-the-queue-doubled", "launcher/platforms/slurm/platform.py",
     "if record is not None and record.number is not None:", "if record is not None and record.number is row:", _SLURM),
    ("slurm-cancel-without-time-to-save", "launcher/platforms/slurm/platform.py",
     'elif row.state != "RUNNING" or time.monotonic() > start + self._settings.grace:', "else:", _SLURM),
    ("slurm-completed-with-a-failed-node", "launcher/platforms/slurm/platform.py",
     "elif state is JobState.SUCCEEDED and any(codes.values()):", "elif False:", _SLURM),
    ("slurm-timeout-of-a-job-that-is-done", "launcher/platforms/slurm/platform.py",
     "elif len(codes) == job.nodes and not any(codes.values()):", "elif row is None and not any(codes.values()):",
     _SLURM),
    ("slurm-killed-sbatch-made-no-job", "launcher/platforms/slurm/platform.py",
     " or done.returncode < 0 or done.returncode > 128", "", _SLURM),
    ("slurm-first-number-is-the-jobs", "launcher/platforms/slurm/platform.py", "for later in rows[1:]:",
     "for later in (row._replace(number=number) for row in rows for number in numbers[:1]):", _SLURM),
    ("slurm-any-reason-lasts", "launcher/platforms/slurm/platform.py", 'lasts = bool(_LASTING.fullmatch(code)) or (',
     "lasts = bool(code) or (", _SLURM),
    ("slurm-limit-of-a-user-always-lasts", "launcher/platforms/slurm/platform.py", "is JobState.RUNNING for job in",
     "is None for job in", _SLURM),
    ("slurm-step-of-one-core", "launcher/platforms/slurm/render.py", "export SRUN_CPUS_PER_TASK=", "export CORES=",
     _SLURM),
    ("slurm-profile-wins", "launcher/platforms/slurm/platform.py", '" SBATCH_* | SCANCEL_*', '" SCANCEL_*', _SLURM),
    ("slurm-percent-of-a-root-replaced", "launcher/platforms/slurm/render.py", ".replace('%', '%%')", "", _SLURM),
    ("slurm-option-shortened", "launcher/platforms/slurm/settings.py", "if name.startswith(found[1])",
     "if name == found[1]", _SLURM),
    ("slurm-secrets-file-as-code", "launcher/platforms/slurm/render.py", 'f"fail {code} {shlex.quote(words)}"',
     """f'fail {code} "{words}"'""", "launcher/platforms/test_planted_code.py"),
    ("lease-of-the-living", "launcher/runs/lease.py", "        elif beat == before:", "        elif True:",
     "launcher/runs/test_lease.py"),
    ("reap-the-living", "launcher/runs/listing.py", "    return last is not None and last.status.state.final",
     "    return last is not None", "launcher/runs/test_leftovers.py"),
    ("deployments-settings-win", "flows/parameters.py",
     'return {**whole, "overrides": {}} if parameters.get("overrides") else whole', "return whole", "cli/test_cli.py"),
)  # fmt: skip

# Seconds that one test may take; a mistake that makes one hang is noticed too.
_TIMEOUT = 240
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


@contextmanager
def mistake(file: Path, old: str, new: str) -> Iterator[None]:
    """Have it in the file.

    Raises:
        ValueError: the file does not have the piece, or has it several times.
    """
    source = file.read_text(encoding="utf-8")
    if (count := source.count(old)) != 1:
        raise ValueError(f"{file} has {old!r} {count} times, not once; write the mutant anew")
    _write(file, source.replace(old, new))
    try:
        yield
    finally:
        _write(file, source)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(file))).unlink(missing_ok=True)  # Python compares sizes and whole seconds only


def failing(copy: Path, tests: Sequence[str], *options: str) -> list[str]:
    """Return the tests that fail in a copy of the checkout, without their parameters.

    Raises:
        RuntimeError: pytest could not run them.
    """
    cache = f"cache_dir={CHECKOUT / '.pytest_cache'}"  # which has a migrated database of Prefect's
    always = ["-n", "0", "--tb=no", "-rfE", "-o", cache, f"--timeout={_TIMEOUT}"]
    env = {**os.environ, "PYTHONPATH": str(copy)}  # processes that tests start import the copy too
    command = [sys.executable, "-m", "pytest", *always, *options, *tests]
    done = subprocess.run(command, cwd=copy, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 and not found:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return found


def main(names: Sequence[str]) -> int:
    """Make the mistakes of these names, or all of them, one after the other; returns the exit code."""
    if unknown := set(names) - {name for name, *_ in MUTANTS}:
        print(f"there is no mutant {', '.join(sorted(unknown))}; {Path(__file__).name} has their names")
        return 2
    killers: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = shutil.copytree(CHECKOUT, Path(folder) / "checkout", ignore=_LEFT_OUT)
        for name, path, old, new, *tests in MUTANTS:
            if names and name not in names:
                continue
            with mistake(copy / path, old, new):
                killers[name] = next(iter(failing(copy, [f"tests/{test}" for test in tests], "-x")), "")
            print(f"{name}: {killers[name] or 'SURVIVED'}", flush=True)
        # A test that fails without the mistake too has noticed nothing.
        broken = failing(copy, sorted({*killers.values()} - {""})) if any(killers.values()) else []
    for test in broken:
        print(f"{test} fails without a mistake too")
    killed = sum(test not in {"", *broken} for test in killers.values())
    print(f"{killed} of {len(killers)} mutants were killed")
    return 0 if killed == len(killers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
