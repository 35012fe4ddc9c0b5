"""Mistakes of one line that some test has to notice: `make mutants`, or `make mutants ONLY="NAME …"` for some of them.

Each is made in a copy of the checkout, and the tests that should notice it run there until one fails. In the end the
tests that failed run once more on the source as it is: one that fails there too has noticed nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake in one line of the source."""

    name: str
    path: str
    old: str
    """A piece of one line, which the file has once."""
    new: str
    why: str
    """What the mistake would do."""
    tests: tuple[str, ...]
    """Files, or single tests of slow files (`file::test`), one of which notices it."""

    def mutated(self, source: str) -> str:
        """Return the file's text with the mistake in it.

        Raises:
            ValueError: the file does not have the piece, or has it several times.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {count} times, not once; write the mutant anew")
        return source.replace(self.old, self.new)


MUTANTS = (
    # --- launcher -----------------------------------------------------------------------------------------------------
    Mutant(
        name="two-roots-are-one-job",
        path="launcher/job.py",
        old="sha256(root.encode())",
        new="sha256(b'')",
        why="Who has the same config under another root adopts, shows and cancels somebody else's training.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="folder-marker-is-a-file",
        path="litgpt_demo/storage/gcs.py",
        old="return bool(name) and clean_path(name) == name",
        new="return clean_path(name) == name",
        why="An empty object `checkpoints/`, as consoles make it, has the next save remove every checkpoint.",
        tests=("tests/litgpt_demo/storage/test_folder_markers.py",),
    ),
    Mutant(
        name="files-removed-while-read",
        path="litgpt_demo/training/resuming.py",
        old="ranks.first(lambda: None)",
        new="None",
        why="Of several ranks on a node one removes the checkpoint that another still reads, and the run ends.",
        tests=("tests/litgpt_demo/training/test_saving.py::test_no_rank_removes_what_another_still_reads",),
    ),
    Mutant(
        name="any-stack-for-any-network",
        path="launcher/images/fitness.py",
        old="in {NcclFit.QUALIFIED, NcclFit.UNSTATED}",
        new="is not NcclFit.FAILS",
        why="Every network gets the default stack, and 64 GPUs are rented to learn that its NCCL is another.",
        tests=("tests/launcher/images/test_fitness.py",),
    ),
    Mutant(
        name="forged-job-is-believed",
        path="launcher/runs/attempts.py",
        old="if not any(platform.gave(record.job_id,",
        new="if False and any(platform.gave(record.job_id,",
        why="Who may write to the root's storage has a run's owner cancel another job, or read another folder's logs.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="mounted-code-is-believed",
        path="litgpt_demo/node/code.py",
        old="!= digest:",
        new="== digest[:0]:",
        why="Who may write to the root's storage has their code run by every node, in place of the user's.",
        tests=("tests/litgpt_demo/node/test_node_code.py",),
    ),
    Mutant(
        name="ignore-file-brings-secrets-back",
        path="launcher/images/context.py",
        old="PatternMatcher([*lines, *after, file.name])",
        new="PatternMatcher([*after, *lines, file.name])",
        why="`!src` in a .dockerignore ships src/.env to everybody who may read the bucket.",
        tests=("tests/launcher/runs/test_code.py",),
    ),
    Mutant(
        name="labels-believed",
        path="litgpt_demo/stacks/installed.py",
        old="        if found[name] != labels[name]",
        new="        if not found[name] and found[name] != labels[name]",
        why="An image says NCCL 2.28.9, brings another, and plan believes it: the plug-in fails on rented GPUs.",
        tests=("tests/litgpt_demo/test_installed.py",),
    ),
    Mutant(
        name="first-attempt-instead-of-last",
        path="launcher/runs/attempts.py",
        old="return last if last is not None and last.status.state.live else None",
        new="return next((one for one in self.all()[:1] if one.status.state.live), None)",
        why="A run whose first attempt failed looks idle while its second trains: a second job is started next to it.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="registry-swaps-the-image",
        path="launcher/images/oci.py",
        old="if reference.digest not in {None, digest}:",
        new="if reference.digest == digest == None:",
        why="Nodes run an image that nobody pinned.",
        tests=("tests/launcher/images/test_images.py",),
    ),
    Mutant(
        name="password-to-whom-the-registry-sends",
        path="launcher/images/oci.py",
        old="own = origin_of(answer.url) == origin_of(first.url)",
        new="own = bool(first)",
        why="A server that a registry redirects to asks for the registry's password, and gets it.",
        tests=("tests/launcher/images/test_fitness.py",),
    ),
    Mutant(
        name="password-to-an-http-realm",
        path="launcher/images/oci.py",
        old="if not is_protected(realm):",
        new="if not is_local(reference.host) and not is_protected(realm):",
        why="A registry's password crosses the network in clear text.",
        tests=("tests/launcher/images/test_images.py",),
    ),
    Mutant(
        name="runai-name-not-compared",
        path="launcher/platforms/runai/rest.py",
        old='if one.get("name") == name and str(',
        new="if str(",
        why="Attempt 1 adopts or deletes attempt 11, because Run:ai's filter matches the beginning of a name.",
        tests=("tests/launcher/platforms/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="runai-project-not-compared",
        path="launcher/platforms/runai/rest.py",
        old='one.get("name") == name and str(one.get("projectId")) == project]',
        new='one.get("name") == name]',
        why="A job of the same name in somebody else's project is adopted or deleted.",
        tests=("tests/launcher/platforms/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="runai-unknown-words-refuse",
        path="launcher/platforms/runai/cli.py",
        old="return PlatformUnreachable(told)",
        new="return PlatformRefused(told)",
        why="A connection that is cut once the job is made passes for a refusal: the job runs, and nobody knows of it.",
        tests=("tests/launcher/platforms/runai/test_runai_program.py",),
    ),
    Mutant(
        name="runai-follows-redirects",
        path="litgpt_demo/secrets.py",
        old="follow_redirects=False",
        new="follow_redirects=True",
        why="The application's secret is posted to wherever the control plane's address leads by now.",
        tests=("tests/launcher/platforms/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="service-account-token-mounted",
        path="launcher/platforms/kubernetes/pods.py",
        old='"automountServiceAccountToken": False',
        new='"automountServiceAccountToken": True',
        why="Any script that runs in a pod may use the cluster's API.",
        tests=("tests/launcher/platforms/kubernetes/test_rendering.py::test_no_pod_gets_a_token_of_the_clusters_api",),
    ),
    Mutant(
        name="capabilities-kept",
        path="launcher/platforms/kubernetes/pods.py",
        old='rights = {"capabilities": {"drop": ["ALL"]}}',
        new="rights = {}",
        why="Pods keep privileges that nothing in them needs.",
        tests=(
            "tests/launcher/platforms/kubernetes/test_rendering.py::test_a_node_keeps_no_capability_that_its_network_does_not_need",
        ),
    ),
    Mutant(
        name="cancel-without-a-request",
        path="launcher/runs/attempts.py",
        old="self.index.request_cancel(self.run)",
        new="pass",
        why="The orchestrator of a cancelled run starts the next attempt.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="logs-before-status",
        path="launcher/runs/waiting.py",
        old="page = await asyncio.to_thread(platform.logs, job_id, position)",
        new="page = platform.logs(job_id, position); status = platform.status(job_id)",
        why="What a job writes just before its end, its error above all, is never delivered.",
        tests=("tests/launcher/runs/test_waiting.py",),
    ),
    Mutant(
        name="killed-node-blamed-last",
        path="launcher/runs/culprits.py",
        old="    ended: float = -math.inf",
        new="    ended: float = math.inf",
        why="The machine that kills its job passes for a preemption, and gets one attempt after the other.",
        tests=("tests/launcher/runs/test_diagnosis.py",),
    ),
    Mutant(
        name="lost-peer-blamed",
        path="launcher/runs/culprits.py",
        old="return self.part, severity, self.began, self.node",
        new="return self.part, self.began, severity, self.node",
        why="Peers that hung in vain are blamed for a mistake in the program, which is started again and again.",
        tests=("tests/launcher/runs/test_diagnosis.py",),
    ),
    Mutant(
        name="those-that-waited-blamed",
        path="launcher/runs/culprits.py",
        old="part = Part.WAITED",
        new="part = Part.CAUSE",
        why="The machines that waited for a rank that hung are blamed for it, and excluded in its place.",
        tests=("tests/launcher/runs/test_diagnosis.py", "tests/faults/test_verdict.py"),
    ),
    Mutant(
        name="earlier-jobs-hardware-blamed",
        path="litgpt_demo/node/evidence.py",
        old="float(told[1]) >= begun and",
        new="float(told[1]) >= 0 and",
        why="A GPU that was repaired a week ago is blamed for every failure on its machine since.",
        tests=("tests/litgpt_demo/node/test_torchrun.py",),
    ),
    Mutant(
        name="dataset-not-in-the-runs-key",
        path="launcher/runs/run.py",
        old="key_of(FORMAT, dataset.key, model, config.train.outcome())",
        new="key_of(FORMAT, model, config.train.outcome())",
        why="Other text means the same run: it goes on from checkpoints of the old text.",
        tests=("tests/launcher/runs/test_runs.py",),
    ),
    Mutant(
        name="price-of-one-node",
        path="launcher/checks/cost.py",
        old="price.usd * nodes * seconds / 3600",
        new="price.usd * seconds / 3600",
        why="A plan tells the price of one node for all of them.",
        tests=("tests/launcher/checks/test_cost.py",),
    ),
    Mutant(
        name="gone-without-proof",
        path="launcher/platforms/kubernetes/deletion.py",
        old="if refused:",
        new="if refused and left:",
        why="A job whose pods may not be listed is called gone while they run.",
        tests=("tests/launcher/platforms/kubernetes/test_gke_cancel.py",),
    ),
    Mutant(
        name="pods-of-two-lives",
        path="launcher/platforms/kubernetes/jobset.py",
        old='"restartStrategy": "BlockingRecreate"',
        new='"restartStrategy": "Recreate"',
        why="Pods of two lives of a JobSet write the same checkpoints.",
        tests=(
            "tests/launcher/platforms/kubernetes/test_rendering.py::test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone",
        ),
    ),
    Mutant(
        name="log-begun-anew",
        path="litgpt_demo/storage/local.py",
        old="if size < position.size:",
        new="if not size:",
        why="What a preempted pod writes after it came back is left out until its log is as long as the old one.",
        tests=("tests/launcher/platforms/test_log_files.py",),
    ),
    Mutant(
        name="batch-cancel-read-as-failure",
        path="launcher/platforms/batch/states.py",
        old="if first is not None and cancelled is not None and cancelled < first.at:",
        new="if first is not None and cancelled is not None and cancelled > first.at:",
        why="A job that somebody cancelled counts as failed, and is started again.",
        tests=("tests/launcher/platforms/batch/test_batch_jobs.py",),
    ),
    Mutant(
        name="cancelled-end-not-written",
        path="launcher/runs/attempts.py",
        old="self.index.end(attempt.record, cancelled)",
        new="pass",
        why="A run that was cancelled looks as if it had vanished, once its platform has forgotten the job.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="claimed-over-what-was-written",
        path="launcher/runs/attempts.py",
        old="is JobState.ABSENT and not open_storage(there.directory).list()",
        new="is JobState.ABSENT",
        why="An attempt that ran and that its platform has forgotten is written over by the next.",
        tests=("tests/launcher/runs/test_attempts.py",),
    ),
    Mutant(
        name="nobody-avoided",
        path="launcher/runs/restarts.py",
        old="if one.machine and counts[one.machine] == times:",
        new="if counts[one.machine] == times:",
        why="Attempts that blame nobody have the next avoid a machine without a name, which a cluster refuses.",
        tests=("tests/launcher/runs/test_restarts.py",),
    ),
    Mutant(
        name="any-holders-count-inherited",
        path="launcher/runs/lease.py",
        old="self.holder.flow_run if self._lived and self.holder else None",
        new="self.holder.flow_run if self.holder else None",
        why="A command that is typed after a crash goes on with a count of restarts that is used up.",
        tests=("tests/launcher/runs/test_lease.py",),
    ),
    Mutant(
        name="lease-lost-too-early",
        path="launcher/runs/lease.py",
        old="return now - self._seen.at >= DEAD",
        new="return now - self._seen.at >= BEAT",
        why="A holder whose bucket is slow for a moment loses its run to another orchestrator.",
        tests=("tests/launcher/runs/test_lease.py",),
    ),
    Mutant(
        name="last-attempt-by-its-spelling",
        path="launcher/runs/index.py",
        old='max(int(found["attempt"]), last.get(found["run"], 0))',
        new='int(found["attempt"])',
        why="After ten attempts a run's state and logs are those of its second.",
        tests=("tests/launcher/runs/test_index.py",),
    ),
    Mutant(
        name="lines-handed-on-again",
        path="launcher/runs/waiting.py",
        old="position = page.position",
        new="pass",
        why="Every look at a job prints its whole log again.",
        tests=("tests/launcher/runs/test_waiting.py",),
    ),
    Mutant(
        name="evicted-node-not-blamed",
        path="launcher/runs/culprits.py",
        old="began = -math.inf if eviction else math.inf",
        new="began = math.inf",
        why="A node that its kubelet evicted hides behind those that ended with it, and the run is started again.",
        tests=("tests/launcher/runs/test_diagnosis.py", "tests/faults/test_verdict.py"),
    ),
    # --- litgpt_demo --------------------------------------------------------------------------------------------------
    Mutant(
        name="rank-before-the-nodes-number",
        path="litgpt_demo/node/rendezvous.py",
        old='NODE_RANKS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")',
        new='NODE_RANKS = ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")',
        why="A process's rank is taken for its node's number, so that nodes wait for peers that never come.",
        tests=("tests/litgpt_demo/node/test_rendezvous.py",),
    ),
    Mutant(
        name="gpus-without-torch",
        path="litgpt_demo/node/gpu.py",
        old="    elif seen.gpus == 0:",
        new="    elif seen.gpus < 0:",
        why="Eight GPUs are rented, torch cannot use one of them, and the ranks train on CPUs without a word.",
        tests=("tests/litgpt_demo/node/test_checks.py",),
    ),
    Mutant(
        name="flag-that-older-torchruns-lack",
        path="litgpt_demo/node/torchrun.py",
        old='return [word for word in argv if word is not flag], int(flag.partition("=")[2])',
        new='return list(argv), int(flag.partition("=")[2])',
        why="torchrun of 2.11 and older refuses --shutdown-timeout, so that no job of the tcpxo stack starts.",
        tests=("tests/litgpt_demo/node/test_torchrun.py",),
    ),
    Mutant(
        name="damaged-checkpoint-removed",
        path="litgpt_demo/training/checkpoints.py",
        old="if _STEP.fullmatch(name) and folder not in kept and folder not in damaged:",
        new="if folder not in kept:",
        why="A checkpoint that cannot be read for a moment is removed for good.",
        tests=("tests/litgpt_demo/training/test_checkpoints.py::test_a_damaged_manifest_is_none_and_is_told",),
    ),
    Mutant(
        name="max-time-not-reached",
        path="litgpt_demo/training/checkpoints.py",
        old="(limit is not None and manifest.seconds >= limit.total_seconds())",
        new="limit is not None",
        why="A run with train.max_time is finished after its first checkpoint.",
        tests=(
            "tests/litgpt_demo/training/test_checkpoints.py::test_a_training_has_ended_after_its_last_step_or_when_its_time_is_up_and_not_before",
        ),
    ),
    Mutant(
        name="saved-without-verifying",
        path="litgpt_demo/training/committing.py",
        old="self.ranks.together(lambda: checkpoints.verify(run, step, names), lambda _: None)",
        new="self.ranks.together(lambda: None, lambda _: None)",
        why="Good checkpoints are removed for one that the disk has damaged.",
        tests=("tests/litgpt_demo/training/test_saving.py::test_nothing_is_removed_before_its_successor_verifies",),
    ),
    Mutant(
        name="state-changes-while-it-is-copied",
        path="litgpt_demo/training/saving.py",
        old="self._pending.copied.wait()",
        new="self._pending.copied.is_set()",
        why="A checkpoint mixes the weights of two steps.",
        tests=(
            "tests/litgpt_demo/training/test_saving.py::test_what_is_saved_is_the_state_at_that_moment_whatever_the_training_does_next",
        ),
    ),
    Mutant(
        name="ranks-shares-overlap",
        path="litgpt_demo/data/batches.py",
        old="return numbers[rank * each : (rank + 1) * each]",
        new="return numbers[rank : rank + each]",
        why="Ranks train on each other's samples, and most of a batch is never seen.",
        tests=("tests/litgpt_demo/data/test_batches.py",),
    ),
    Mutant(
        name="token-of-the-file-before",
        path="litgpt_demo/data/batches.py",
        old='np.searchsorted(ends, at, side="right")',
        new='np.searchsorted(ends, at, side="left")',
        why="A sample that begins in one file and ends in the next holds a wrong token.",
        tests=("tests/litgpt_demo/data/test_batches.py",),
    ),
    Mutant(
        name="update-without-a-gradient",
        path="litgpt_demo/training/step.py",
        old="found_inf = (~whole.isfinite()).float()",
        new="found_inf = (whole > 1e30).float()",
        why="With train.on_not_finite=skip a gradient that is no number makes all weights none.",
        tests=("tests/litgpt_demo/training/test_not_finite.py",),
    ),
    Mutant(
        name="update-of-an-infinite-loss",
        path="litgpt_demo/training/step.py",
        old="torch.where(loss.detach().isfinite(), 1.0, math.nan)",
        new="1.0",
        why="A rank whose loss is infinite updates with the gradient of a batch that is to be left out.",
        tests=("tests/litgpt_demo/training/test_not_finite.py",),
    ),
    Mutant(
        name="gradients-summed",
        path="litgpt_demo/training/step.py",
        old="share = loss if len(batches) == 1 else loss / len(batches)",
        new="share = loss",
        why="The learning rate grows with the number of micro-batches.",
        tests=("tests/litgpt_demo/training/test_train.py::test_accumulating_gradients_changes_only_rounding",),
    ),
    Mutant(
        name="fault-taken-for-a-preemption",
        path="litgpt_demo/node/agent.py",
        old="if ending.asked is not None and (cause is None or cause.time >= int(ending.asked)):",
        new="if ending.asked is not None:",
        why="A crash before the node was asked to leave counts as a preemption, and is tried again without end.",
        tests=(
            "tests/litgpt_demo/node/test_node_code.py",
            "tests/litgpt_demo/test_node_errors.py",
        ),
    ),
    Mutant(
        name="platforms-world-size-inherited",
        path="litgpt_demo/node/main.py",
        old="mine = without_leftovers(environ)",
        new="mine = dict(environ)",
        why="Ranks take the platform's count of nodes for their own world.",
        tests=(
            "tests/litgpt_demo/node/test_node_code.py",
            "tests/litgpt_demo/node/test_node_environment.py",
        ),
    ),
    Mutant(
        name="pieces-of-another-assignment",
        path="litgpt_demo/data/preparation/workers.py",
        old="if done is not None and done.assignment == assignment.digest:",
        new="if done is not None:",
        why="Pieces of a preparation that counted otherwise are used again: documents go to the wrong split.",
        tests=(
            "tests/litgpt_demo/data/test_preparation.py::test_an_empty_document_that_no_footer_told_of_moves_the_pieces_that_were_made_before_it_is_read",
        ),
    ),
    Mutant(
        name="forged-document-boundary",
        path="litgpt_demo/data/tokens.py",
        old='if not token.get("special") and token["id"] != tokenizer.end_of_text',
        new='if token["id"] is not None',
        why="The text <|endoftext|> inside a document ends it.",
        tests=("tests/litgpt_demo/data/test_tokens.py",),
    ),
    Mutant(
        name="create-replaces",
        path="litgpt_demo/storage/local.py",
        old="with replacing(final, durable=self.durable, take=link) as partial:",
        new="with replacing(final, durable=self.durable) as partial:",
        why="Two orchestrators both believe that an attempt is theirs, and submit it twice.",
        tests=("tests/litgpt_demo/storage/test_storage.py::test_what_is_created_is_there_and_never_replaced",),
    ),
    Mutant(
        name="same-size-is-enough",
        path="litgpt_demo/manifests.py",
        old="if (crc32c := crc32c_of(path)) != record.crc32c:",
        new="if (crc32c := record.crc32c) != record.crc32c:",
        why="A flipped bit of a dataset or checkpoint is trained on.",
        tests=("tests/litgpt_demo/test_manifests.py",),
    ),
    Mutant(
        name="delete-takes-a-newer-object",
        path="litgpt_demo/storage/objects.py",
        old="delete(if_generation_match=blob.generation, retry=self._retry())",
        new="delete(retry=self._retry())",
        why="A deletion that a bucket carries out late removes what was written since.",
        tests=("tests/litgpt_demo/storage/test_storage.py::test_a_late_removal_does_not_take_a_newer_object",),
    ),
    Mutant(
        name="nan-logits-pass",
        path="litgpt_demo/export/proof.py",
        old="if not difference <= tolerance(own):",
        new="if difference > tolerance(own):",
        why="An exported model that says nothing but NaN is proved to be the checkpoint's.",
        tests=(
            "tests/litgpt_demo/export/test_huggingface.py::test_a_logit_that_is_no_number_is_not_taken_for_rounding",
        ),
    ),
    # --- flows, tasks, deployments ------------------------------------------------------------------------------------
    Mutant(
        name="a-live-orchestrator-overruled",
        path="flows/reconciling.py",
        old='return "CANCELLED" in known and all(state in _ENDED for state in known)',
        new='return "CANCELLED" in known',
        why="A job is cancelled that another flow run has taken up.",
        tests=("tests/flows/test_reconciling.py::test_only_what_all_have_left_and_somebody_cancelled_is_abandoned",),
    ),
    Mutant(
        name="unknown-flow-run-taken-for-ended",
        path="flows/reconciling.py",
        old='states.get(flow_run, "UNKNOWN")',
        new='states.get(flow_run, "CRASHED")',
        why="A job is cancelled that a command line with a server of its own orchestrates.",
        tests=("tests/flows/test_reconciling.py::test_a_flow_run_that_the_server_does_not_know_may_be_at_work",),
    ),
    Mutant(
        name="preemptions-counted",
        path="launcher/runs/restarts.py",
        old="spent[one.fault] += not (one.progressed and self._forgives(one.fault))",
        new="spent[one.fault] += 1",
        why="Spot machines that are taken away use up train.max_restarts, and the run ends.",
        tests=(
            "tests/launcher/runs/test_restarts.py::"
            "test_a_machine_that_fails_again_and_again_costs_nothing_while_the_training_gets_on",
        ),
    ),
    Mutant(
        name="preemptions-free",
        path="launcher/runs/restarts.py",
        old="spent[one.fault] += not (one.progressed and self._forgives(one.fault))",
        new="spent[one.fault] += not self._forgives(one.fault)",
        why="A script that always ends with the code of a preemption is started again for ever.",
        tests=("tests/launcher/runs/test_restarts.py::test_each_class_has_a_budget_of_its_own",),
    ),
    Mutant(
        name="any-suspect-blamed",
        path="launcher/runs/culprits.py",
        old="cause.part <= Part.BLAMED and not rivals and not cause.terminated",
        new="True",
        why="Sound machines of victims are excluded, until a run has none left.",
        tests=(
            "tests/launcher/runs/test_diagnosis.py::"
            "test_neither_a_victim_nor_one_of_several_that_may_have_been_it_is_blamed",
        ),
    ),
    Mutant(
        name="blamed-machine-taken-again",
        path="tasks/training.py",
        old="partial(self.claim.take, ended=ended, exclude=exclude)",
        new="partial(self.claim.take, ended=ended)",
        why="A broken machine ends every attempt until the budget is used up.",
        tests=(
            "tests/tasks/test_training.py::"
            "test_a_machine_that_was_blamed_twice_is_avoided_and_the_run_ends_well_elsewhere",
        ),
    ),
    Mutant(
        name="restarts-forgotten",
        path="tasks/training.py",
        old="attempts.index.verdicts, attempts.run, claim.orchestrator",
        new="attempts.index.verdicts, attempts.run, None",
        why="An orchestrator that crashes and is resumed begins a new count of restarts each time.",
        tests=(
            "tests/tasks/test_training.py::"
            "test_a_flow_run_that_is_resumed_goes_on_with_its_count_and_another_command_begins_anew",
        ),
    ),
    Mutant(
        name="refused-job-left-waiting",
        path="tasks/training.py",
        old="await ask(claim, partial(platform.cancel, job_id))  # or it would start when nobody watches it",
        new="",
        why="A job that its run has given up starts later, when nobody watches it.",
        tests=(
            "tests/tasks/test_training.py::"
            "test_a_job_that_its_platform_does_not_let_in_ends_the_run_with_the_fix_and_is_taken_back",
        ),
    ),
    Mutant(
        name="waits-that-multiply",
        path="tasks/steps.py",
        old="if not isinstance(error, Exception) or was_given_up(error):",
        new="if not isinstance(error, Exception):",
        why="A bucket that is away for good is waited for four times as long, a share of a dataset tried 16 times.",
        tests=("tests/tasks/test_steps.py",),
    ),
    Mutant(
        name="server-open-to-the-network",
        path="flows/serving.py",
        old='"--host", "127.0.0.1"',
        new='"--host", "0.0.0.0"',
        why="Anybody on the network may start flows on this machine.",
        tests=("tests/deployments/test_bootstrap.py",),
    ),
    Mutant(
        name="lease-of-the-living",
        path="launcher/runs/lease.py",
        old="        elif self._seen.beat != beat:",
        new="        elif False:",
        why="Who waits for seven seconds takes the run from an orchestrator that lives.",
        tests=("tests/launcher/runs/test_lease.py",),
    ),
    Mutant(
        name="reap-the-living",
        path="launcher/runs/leftovers.py",
        old="    return last is not None and last.status.state.final",
        new="    return last is not None",
        why="reap offers to remove the job of a run that lives.",
        tests=("tests/launcher/runs/test_leftovers.py",),
    ),
    Mutant(
        name="deployments-settings-win",
        path="flows/submission.py",
        old='return {**whole, "overrides": {}} if parameters.get("overrides") else whole',
        new="return whole",
        why="What a deployment overrides wins over what its user sets on the command line.",
        tests=("tests/cli/test_cli.py",),
    ),
)


# --- the run ----------------------------------------------------------------------------------------------------------

# Seconds that one test may take; a mistake that makes one hang is noticed too.
_TIMEOUT = 240
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


class Copy:
    """A copy of the checkout, in which files may be changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkout"
        shutil.copytree(CHECKOUT, self._folder, ignore=_LEFT_OUT)

    @contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.path
        source = path.read_text(encoding="utf-8")
        self._write(path, mutant.mutated(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python compares sizes and whole seconds only.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def failing(self, tests: Sequence[str], *options: str) -> list[str]:
        """Return the tests that fail, without their parameters.

        Raises:
            RuntimeError: pytest could not run them.
        """
        # The checkout's own cache has a migrated database of Prefect's.
        cache = f"cache_dir={CHECKOUT / '.pytest_cache'}"
        always = ["-n", "0", "--tb=no", "-rfE", "-o", cache, f"--timeout={_TIMEOUT}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *always, *options, *tests],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},  # processes that tests start import the copy too
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 and not found:
            words = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}: {words}")
        return found


def main(names: Sequence[str]) -> int:
    """Make the mistakes of these names, or all of them, one after the other; returns the exit code."""
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"there is no mutant {', '.join(sorted(unknown))}; {Path(__file__).name} has their names")
        return 2
    wanted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    killers: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for number, mutant in enumerate(wanted, 1):
            start = time.monotonic()
            with copy.with_mistake(mutant):
                failed = copy.failing(mutant.tests, "-x")
            killers |= {mutant.name: failed[0]} if failed else {}
            words = f"killed by {failed[0]}" if failed else f"SURVIVED: {mutant.why}"
            print(f"{number}/{len(wanted)} {mutant.name}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
        # A test that fails without the mistake too has noticed nothing.
        broken = copy.failing(sorted(set(killers.values()))) if killers else []
    for test in broken:
        print(f"{test} fails without a mistake too")
    killed = [name for name, test in killers.items() if test not in broken]
    print(f"{len(killed)} of {len(wanted)} mutants were killed")
    return 0 if len(killed) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
