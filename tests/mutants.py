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
    ("two-roots-are-one-job", "launcher/job.py", "sha256(self.root.encode())", "sha256(b'')",
     "launcher/runs/test_attempts.py"),
    ("folder-marker-is-a-file", "litgpt_demo/storage/bucket.py", "return bool(name) and base.clean_path(name) == name",
     "return base.clean_path(name) == name", "litgpt_demo/storage/test_folder_markers.py"),
    ("files-removed-while-read", "litgpt_demo/training/resuming.py",
     "self._ranks.run_on_rank_zero(lambda: None)", "None",
     "litgpt_demo/training/test_saving.py::test_no_rank_removes_files_that_another_still_reads"),
    ("any-stack-for-any-network", "launcher/checks/fitness.py", "in {NcclFit.QUALIFIED, NcclFit.UNSTATED}",
     "is not NcclFit.FAILS", "launcher/checks/test_fitness.py"),
    ("forged-job-is-believed", "launcher/runs/attempts.py", "if not platform.owns_job_id(record.job_id,",
     "if False and not platform.owns_job_id(record.job_id,", "launcher/runs/test_attempts.py"),
    ("mounted-code-is-believed", "litgpt_demo/node/code.py", "!= named[1]:", '== "":',
     "litgpt_demo/node/test_node_code.py"),
    ("ignore-file-brings-secrets-back", "launcher/images/context.py", "PatternMatcher([*lines, *after, file.name])",
     "PatternMatcher([*after, *lines, file.name])", "launcher/runs/test_code.py"),
    ("labels-believed", "litgpt_demo/stacks/installed.py", "        if found[name] != labels[name]",
     "        if not found[name] and found[name] != labels[name]", "litgpt_demo/test_installed.py"),
    ("first-attempt-instead-of-last", "launcher/runs/attempts.py",
     "        if last is None or not last.status.state.is_live:",
     "        last = next(iter(self.all()), None)\n        if last is None or not last.status.state.is_live:",
     "launcher/runs/test_attempts.py"),
    ("registry-swaps-the-image", "launcher/images/oci.py", "if reference.digest not in {None, digest}:",
     "if reference.digest == digest == None:", "launcher/images/test_images.py"),
    ("password-to-whom-the-registry-sends", "launcher/images/oci.py",
     "own = origin_of(answer.url) == origin_of(first.url)", "own = bool(first)", "launcher/checks/test_fitness.py"),
    ("password-to-an-http-realm", "launcher/images/oci.py", "if not is_protected(realm):",
     "if not is_local(self._reference.host) and not is_protected(realm):", "launcher/images/test_images.py"),
    ("runai-name-not-compared", "launcher/platforms/runai/rest.py", 'workload.get("name") == name', "True",
     "launcher/platforms/runai/test_runai.py"),
    ("runai-project-not-compared", "launcher/platforms/runai/rest.py", 'str(workload.get("projectId")) == project',
     "True", "launcher/platforms/runai/test_runai.py"),
    ("runai-unknown-words-refuse", "launcher/platforms/runai/cli.py", "raise PlatformUnreachable(what)",
     "raise PlatformRefused(what)", "launcher/platforms/runai/test_runai.py"),
    ("runai-follows-redirects", "litgpt_demo/secrets.py", "follow_redirects=False", "follow_redirects=True",
     "launcher/platforms/runai/test_runai.py"),
    ("service-account-token-mounted", "launcher/platforms/kubernetes/render.py",
     '"automountServiceAccountToken": False', '"automountServiceAccountToken": True',
     "launcher/platforms/kubernetes/test_rendering.py::test_pod_has_no_token_of_the_clusters_api"),
    ("capabilities-kept", "launcher/platforms/kubernetes/render.py", '= {"capabilities": {"drop": ["ALL"]}}', "= {}",
     "launcher/platforms/kubernetes/test_rendering.py::test_node_has_only_the_capabilities_of_its_network"),
    ("cancel-without-a-request", "launcher/runs/attempts.py", "self.index.request_cancel(self.run)", "str()",
     "launcher/runs/test_attempts.py"),
    ("logs-before-status", "launcher/runs/waiting.py",
     "return status, platform.logs(job_id, position)",
     "page = platform.logs(job_id, position); return platform.status(job_id), page", "launcher/runs/test_waiting.py"),
    ("killed-node-blamed-last", "launcher/runs/diagnosis.py", "    ended: float = -math.inf",
     "    ended: float = math.inf", "launcher/runs/test_diagnosis.py"),
    ("lost-peer-blamed", "launcher/runs/diagnosis.py", "return self.role, severity, self.began, self.node",
     "return self.role, self.began, severity, self.node", "launcher/runs/test_diagnosis.py"),
    ("those-that-waited-blamed", "launcher/runs/diagnosis.py", "role = Role.WAITED", "role = Role.CAUSE",
     "launcher/runs/test_diagnosis.py", "faults/test_recorded_failures.py"),
    ("earlier-jobs-hardware-blamed", "litgpt_demo/node/evidence.py", "float(entry[1]) >= start and",
     "float(entry[1]) >= 0 and", "litgpt_demo/node/test_torchrun.py"),
    ("dataset-not-in-the-run-id", "launcher/runs/run.py",
     "content_hash(FORMAT, dataset.content_hash, model, dict(train))", "content_hash(FORMAT, model, dict(train))",
     "launcher/runs/test_runs.py"),
    ("price-of-one-node", "launcher/checks/arithmetic.py", "price.usd * nodes * seconds / 3600",
     "price.usd * seconds / 3600", "launcher/checks/test_arithmetic.py"),
    ("gone-without-proof", "launcher/platforms/kubernetes/platform.py", "if refused:\n            rest",
     "if refused and remaining:\n            rest",
     "launcher/platforms/kubernetes/test_kubernetes_cancel.py"),
    ("pods-of-two-lives", "launcher/platforms/kubernetes/render.py", '"restartStrategy": "BlockingRecreate"',
     '"restartStrategy": "Recreate"',
     "launcher/platforms/kubernetes/test_rendering.py::test_next_life_starts_after_the_last_pod_of_this_one"),
    ("log-begun-anew", "litgpt_demo/storage/local.py", "if size < position.size:", "if not size:",
     "launcher/platforms/test_log_files.py"),
    ("batch-cancel-read-as-failure", "launcher/platforms/batch/states.py",
     "cancelled < failed[0].at", "cancelled > failed[0].at", "launcher/platforms/batch/test_batch_jobs.py"),
    ("cancelled-end-not-written", "launcher/runs/attempts.py", "self.index.record_end(attempt.record, cancelled)",
     "pass", "launcher/runs/test_attempts.py"),
    ("created-over-what-was-written", "launcher/runs/attempts.py",
     "is not JobState.ABSENT or has_begun(record.directory):", "is not JobState.ABSENT:",
     "launcher/runs/test_attempts.py"),
    ("nobody-avoided", "launcher/runs/restarts.py", "if diagnosis.machine and counts[diagnosis.machine] == times:",
     "if counts[diagnosis.machine] == times:", "launcher/runs/test_restarts.py"),
    ("any-holders-count-inherited", "launcher/runs/lease.py",
     "if self._observed_alive and self.holder is not None:", "if self.holder is not None:",
     "launcher/runs/test_lease.py"),
    ("lease-lost-too-early", "launcher/runs/lease.py", "return now - since >= LEASE_TIMEOUT",
     "return now - since >= HEARTBEAT_INTERVAL", "launcher/runs/test_lease.py"),
    ("last-attempt-by-its-spelling", "launcher/runs/index.py", "for match in matches if match])",
     "for match in matches if match], key=str)", "launcher/runs/test_index.py"),
    ("lines-handed-on-again", "launcher/runs/waiting.py", "position = page.position", "pass",
     "launcher/runs/test_waiting.py"),
    ("evicted-node-not-blamed", "launcher/runs/diagnosis.py", "role=role, began=-math.inf)",
     "role=role)", "launcher/runs/test_diagnosis.py", "faults/test_recorded_failures.py"),
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
     "litgpt_demo/training/test_checkpoints.py::test_a_training_ends_with_its_last_step_or_its_time"),
    ("saved-without-verifying", "litgpt_demo/training/saving.py",
     "ranks.gather_then_broadcast(lambda: checkpoints.verify(run, step, names), lambda _: None)",
     "ranks.gather_then_broadcast(lambda: None, lambda _: None)",
     "litgpt_demo/training/test_saving.py::test_nothing_is_removed_before_its_successor_verifies"),
    ("state-changes-while-it-is-copied", "litgpt_demo/training/saving.py", "staged.wait()",
     "staged.is_set()",
     "litgpt_demo/training/test_saving.py::test_save_has_the_state_of_its_moment"),
    ("ranks-shares-overlap", "litgpt_demo/data/batches.py", "return batch[rank * size : (rank + 1) * size]",
     "return batch[rank : rank + size]", "litgpt_demo/data/test_batches.py"),
    ("token-of-the-file-before", "litgpt_demo/data/dataset.py", 'np.searchsorted(ends, indices, side="right")',
     'np.searchsorted(ends, indices, side="left")', "litgpt_demo/data/test_batches.py"),
    ("update-without-a-gradient", "litgpt_demo/training/step.py", "found_inf = (~norm.isfinite()).float()",
     "found_inf = (norm > 1e30).float()", "litgpt_demo/training/test_not_finite.py"),
    ("update-of-an-infinite-loss", "litgpt_demo/training/step.py",
     "torch.where(loss.detach().isfinite(), 1.0, math.nan)", "1.0", "litgpt_demo/training/test_not_finite.py"),
    ("gradients-summed", "litgpt_demo/training/step.py", "share = loss if last == 1 else loss / last",
     "share = loss", "litgpt_demo/training/test_train.py::test_settings_that_change_only_rounding_may_change_in_a_run"),
    ("fault-taken-for-a-preemption", "litgpt_demo/node/agent.py",
     "if result.signalled_at is not None and (cause is None or cause.time >= int(result.signalled_at)):",
     "if result.signalled_at is not None:", "litgpt_demo/node/test_node_code.py", "litgpt_demo/test_node_errors.py"),
    ("platforms-world-size-inherited", "litgpt_demo/node/main.py",
     'for name in environ if not name.startswith("PET_") and name not in _OF_RANKS', "for name in environ",
     "litgpt_demo/node/test_node_code.py", "litgpt_demo/node/test_node_environment.py"),
    ("pieces-of-another-assignment", "litgpt_demo/data/workers.py",
     "if recorded is not None and recorded.task == task.digest:", "if recorded is not None:",
     "litgpt_demo/data/test_preparation.py::test_empty_document_in_a_footers_count_is_found"),
    ("forged-document-boundary", "litgpt_demo/data/tokens.py",
     'if not token.get("special") and token["id"] != tokenizer.end_of_text', 'if token["id"] is not None',
     "litgpt_demo/data/test_tokens.py"),
    ("create-replaces", "litgpt_demo/storage/local.py",
     "with atomic_write(final, durable=self.durable, take=link) as partial:",
     "with atomic_write(final, durable=self.durable) as partial:",
     "litgpt_demo/storage/test_storage.py::test_created_file_is_never_replaced"),
    ("same-size-is-enough", "litgpt_demo/documents.py", "if crc32c != record.crc32c:", "if not crc32c:",
     "litgpt_demo/test_stored_documents.py"),
    ("delete-takes-a-newer-object", "litgpt_demo/storage/bucket.py",
     "delete(if_generation_match=blob.generation, retry=self._retry())", "delete(retry=self._retry())",
     "litgpt_demo/storage/test_storage.py::test_a_late_request_does_not_touch_a_newer_object"),
    ("nan-logits-pass", "litgpt_demo/export/proof.py", "if not difference <= tolerance(own):",
     "if difference > tolerance(own):",
     "litgpt_demo/models/test_huggingface.py::test_a_logit_that_is_no_number_is_not_taken_for_rounding"),
    ("passed-draws-made-again", "launcher/runs/search.py", 'if self._sweep.sampler == "tpe":',
     'if self._sweep.sampler == "random":',
     "launcher/runs/test_search.py::test_a_random_search_makes_a_draw_again_that_left_no_trial"),
    ("grid-trials-by-old-numbers", "launcher/runs/search.py",
     "self._numbers.get(json.dumps(draw.changes, sort_keys=True), draw.number)", "draw.number",
     "launcher/runs/test_search.py::test_grid_is_completed_from_any_existing_trials"),
    ("failed-trial-counts-as-pruned", "launcher/runs/search.py", "states.PRUNED if pruned else states.FAIL",
     "states.PRUNED", "launcher/runs/test_search.py::test_search_killed_after_any_trial_draws_as_undisturbed"),
    ("front-by-optunas-numbers", "launcher/runs/search.py", "if trial.number in best}", "if number in best}",
     "launcher/runs/test_search.py::test_pareto_front_has_the_unbeaten_trials"),
    ("finished-trial-pruned", "flows/sweep_litgpt.py", " and step != last", "",
     "flows/test_sweep_litgpt.py::test_trial_that_falls_behind_is_cancelled_with_its_step"),
    ("running-trials-cost-nothing", "flows/sweep_litgpt.py", "if settings.max_gpu_hours or settings.max_usd:",
     "if settings.max_gpu_hours and settings.max_usd:",
     "flows/test_sweep_litgpt.py::test_spending_of_running_trials_counts"),
    ("unscored-trial-counts-as-done", "flows/sweep_litgpt.py",
     "has_ended = wanted is None or found_scores(run.storage, final, wanted) is not None", "has_ended = True",
     "flows/test_sweep_litgpt.py::test_a_trial_collected_on_the_way_is_trained_to_its_end"),
    ("resumed-losses-at-other-evaluations", "flows/sweep_litgpt.py",
     "self.search.report(number, step // trial.config.train.evaluate_every, loss)",
     "self.search.report(number, step, loss)",
     "flows/test_sweep_litgpt.py::test_a_trial_collected_on_the_way_is_trained_to_its_end"),
    ("nan-trial-is-best", "launcher/reports/sweeps.py", "if loss is None or math.isnan(loss):", "if loss is None:",
     "launcher/runs/test_runs.py::test_the_ranking_is_by_loss_and_best_yaml_is_its_first"),
    ("gpu-hours-of-one-gpu", "launcher/reports/sweeps.py", "hours=book.process_seconds / 3600",
     "hours=book.wall / 3600",
     "launcher/reports/test_sweep_page.py::test_trial_that_was_never_admitted_used_no_gpu_hours"),
    ("wsd-decays-a-step-late", "litgpt_demo/schedules.py", "start = last - decay if decay else warmup",
     "start = steps - decay if decay else warmup",
     "litgpt_demo/test_schedules.py::test_learning_rate_rises_stays_and_falls_by_its_schedule"),
    ("sqrt-decay-is-linear", "litgpt_demo/schedules.py", "(1 - math.sqrt(position.done))", "(1 - position.done)",
     "litgpt_demo/test_schedules.py::test_learning_rate_rises_stays_and_falls_by_its_schedule"),
    ("z-loss-without-its-logits", "litgpt_demo/models/loss.py", "(target_logits + losses)", "losses",
     "litgpt_demo/training/test_training_loss.py::test_loss_and_gradients_are_those_of_the_whole_logits"),
    ("z-loss-never-reaches-the-model", "litgpt_demo/training/setup.py", "z_loss=train.z_loss", "z_loss=0.0",
     "litgpt_demo/training/test_train.py::test_z_loss_is_trained_and_not_reported"),
    ("average-misses-the-shards", "litgpt_demo/training/step.py", "training.average.update(step)", "pass",
     "litgpt_demo/training/test_averaging.py::test_average_follows_the_weights_of_each_step"),
    ("average-resumes-at-the-weights", "litgpt_demo/training/resuming.py",
     "files, precision=precision, average=average,", "files, precision=precision,",
     "litgpt_demo/training/test_averaging.py::test_average_resumes_bit_for_bit"),
    ("tokens-per-parameter-of-no-vocabulary", "launcher/runs/run.py", "parameters = estimates.parameters(gpt)",
     "parameters = estimates.parameters(gpt) // 2",
     "launcher/checks/test_plan.py::test_steps_by_tokens_per_parameter_are_those_of_the_run"),
    ("minimum-rate-of-zero-is-a-tenth", "litgpt_demo/schedules.py", "if low is None:", "if not low:",
     "litgpt_demo/test_schedules.py::test_learning_rate_rises_stays_and_falls_by_its_schedule"),
    ("norms-decay", "litgpt_demo/optimizers.py", '"params": vectors, "weight_decay": 0.0',
     '"params": vectors, "weight_decay": weight_decay',
     "litgpt_demo/test_optimizers.py::test_matrices_decay_and_vectors_do_not"),
    ("betas-ignored", "litgpt_demo/optimizers.py", "betas=train.betas, fused=fused", "fused=fused",
     "litgpt_demo/training/test_train.py::test_thirty_steps_are_litgpts_own"),
    ("source-losses-since-the-beginning", "litgpt_demo/training/reporting.py", "self._losses = []", "pass",
     "litgpt_demo/data/test_mixtures.py::test_mixture_trains_alike_on_any_ranks_and_after_a_kill"),
    ("second-stage-repeats-the-first", "litgpt_demo/data/batches.py",
     "(self._before[stages, sources] + in_stage)", "in_stage",
     "litgpt_demo/data/test_mixtures.py::test_any_thousand_samples_of_a_stage_have_its_shares"),
    ("batch-of-the-next-step", "litgpt_demo/data/batches.py",
     "np.arange(spec.samples_after(step), spec.samples_after(step + 1)",
     "np.arange(spec.samples_after(step + 1), spec.samples_after(step + 2)", "litgpt_demo/data/test_batches.py"),
    ("stage-of-the-batch-begins-a-step-late", "litgpt_demo/config.py",
     "start = min(end, in_steps(stage.after, steps))",
     "start = min(end, in_steps(stage.after, steps) + (stage.after > 0))", "litgpt_demo/data/test_batches.py"),
    ("run-begins-at-its-first-sample-again", "litgpt_demo/data/batches.py",
     "return replace(part, first=spec.first_sample(part.content_hash))", "return part",
     "litgpt_demo/training/test_starting.py::test_a_decay_branch_equals_one_uninterrupted_run"),
    ("sources-continue-where-the-first-stood", "litgpt_demo/data/batches.py",
     "SeenSamples(part.content_hash, spec.train.seed, part.first + count, part.length)",
     "SeenSamples(part.content_hash, spec.train.seed, parts[0].first + count, part.length)",
     "litgpt_demo/data/test_mixtures.py::test_each_source_continues_where_the_runs_before_stood"),
    ("weights-alone-continue-the-samples", "litgpt_demo/config.py",
     "if not self.optimizer:", "if False:",
     "litgpt_demo/training/test_starting.py::test_order_of_samples_begins_again_where_it_is_not_continued"),
    ("validation-by-the-first-stage", "litgpt_demo/data/batches.py",
     "(spans[:, None] * counts).sum(axis=0)", "counts[0]",
     "litgpt_demo/data/test_mixtures.py::test_an_evaluation_draws_equally_many_samples_of_each_source"),
    ("every-epoch-in-one-order", "litgpt_demo/data/batches.py", 'f"{dataset.content_hash}/{seed}/{epoch}"',
     'f"{dataset.content_hash}/{seed}"', "litgpt_demo/data/test_batches.py"),
    ("validation-takes-the-first-samples", "litgpt_demo/data/batches.py",
     'return feistel_permutation(np.arange(min(count, size), dtype=np.uint64), size, "validation")',
     "return np.arange(min(count, size), dtype=np.uint64)",
     "litgpt_demo/data/test_mixtures.py::test_an_evaluation_draws_equally_many_samples_of_each_source"),
    ("mixture-weights-not-in-the-hash", "litgpt_demo/data/dataset.py",
     "[*hashes], [[after, *shares] for after, shares in schedule]", "[*hashes]",
     "litgpt_demo/data/test_mixtures.py::test_sources_of_a_mixture_are_datasets_staged_with_it"),
    ("last-validation-samples-left-out", "litgpt_demo/training/step.py",
     "math.ceil(len(source.sample_ids) / fabric.world_size)", "len(source.sample_ids) // fabric.world_size",
     "litgpt_demo/training/test_train.py::test_two_processes_train_as_one_does"),
    ("proof-weighs-sources-alike", "litgpt_demo/data/batches.py", "sum(source.share * loss for",
     "sum(source.share ** 0 * loss / 2 for",
     "litgpt_demo/data/test_mixtures.py::test_mixture_trains_alike_on_any_ranks_and_after_a_kill"),
    ("proof-by-the-present-setting", "litgpt_demo/export/proof.py",
     "checkpoint.evaluation_samples or spec.train.evaluation_samples",
     "spec.train.evaluation_samples or checkpoint.evaluation_samples",
     "litgpt_demo/export/test_export.py::test_the_trainers_loss_is_compared_on_its_own_samples"),
    ("losses-of-different-samples-ranked", "litgpt_demo/training/checkpoints.py",
     "scored.setdefault(checkpoint.evaluation_samples, [])", "scored.setdefault(None, [])",
     "litgpt_demo/training/test_checkpoints.py::test_the_newest_best_and_eternal_are_kept_alone"),
    ("committed-before-its-rows", "litgpt_demo/training/saving.py", "self._before_commit()", "pass",
     "litgpt_demo/training/test_loggers.py::test_a_committed_step_has_its_rows_wherever_a_kill_comes"),
    ("earlier-samples-forgotten", "litgpt_demo/data/batches.py",
     "earlier = spec.origin.trained_on if spec.origin else ()", "earlier: tuple[SeenSamples, ...] = ()",
     "litgpt_demo/training/test_starting.py::test_order_of_samples_begins_again_where_it_is_not_continued"),
    ("training-time-begins-anew", "litgpt_demo/training/resuming.py",
     "training.timer.previous, training.timer.started = manifest.seconds, monotonic()",
     "training.timer.previous, training.timer.started = 0.0, monotonic()",
     "litgpt_demo/training/test_train.py::test_a_training_ends_at_max_time_and_resumes_with_more"),
    ("saved-before-its-loss-is-known", "litgpt_demo/training/loop.py", "wait=should_evaluate or should_save",
     "wait=should_evaluate",
     "litgpt_demo/training/test_not_finite.py::test_a_step_is_saved_after_its_loss_is_known"),
    ("preempted-rank-evaluates", "litgpt_demo/training/loop.py", 'should_evaluate = stop_reason == "max_time"',
     "pass",
     "litgpt_demo/training/test_train.py::test_a_preempted_training_saves_and_resumes_unchanged"),
    ("budget-anew-after-a-platform-restart", "litgpt_demo/training/loop.py", "min(starts, default=times.started_at)",
     "times.started_at",
     "litgpt_demo/training/test_train.py::test_a_training_whose_budget_is_spent_saves_and_resumes"),
    ("no-time-left-to-save", "tasks/training.py", "(limit - spent) / per_hour * 3600 - platform.grace_period",
     "(limit - spent) / per_hour * 3600", "tasks/test_training.py::test_the_budget_counts_an_attempt_at_its_own_price"),
    ("budget-not-handed-to-the-nodes", "tasks/training.py",
     "handle.platform.render(replace(job, program=(*job.program, *limit)))", "handle.platform.render(job)",
     "tasks/test_training.py::test_nodes_get_the_seconds_that_the_budget_pays"),
    ("loss-of-a-later-step-announced", "tasks/training.py",
     "for earlier in [earlier for earlier in self._losses if earlier <= step]:", "for earlier in [*self._losses]:",
     "tasks/test_training.py::test_leader_announces_a_checkpoint_with_its_own_loss"),
    ("followers-announce-too", "tasks/training.py", "if self._leads() and step not in", "if step not in",
     "tasks/test_training.py::test_leader_announces_a_checkpoint_with_its_own_loss"),
    ("stopped-run-taken-by-a-follower", "launcher/runs/lease.py",
     "return not (unless_stopped_after and stopped == unless_stopped_after)", "return True",
     "launcher/runs/test_lease.py"),
    ("lost-lease-still-held", "launcher/runs/lease.py", "if self._term and newest == self._term:", "if self._term:",
     "launcher/runs/test_lease.py"),
    ("job-of-another-root-adopted", "launcher/runs/attempts.py",
     "if record.root != self.attempts.index.root.address():", "if False:",
     "launcher/runs/test_attempts.py::test_moved_root_still_finds_its_jobs"),
    ("earlier-requests-cancel-again", "launcher/runs/attempts.py",
     "self._before.get(attempts.run, frozenset()) | {request}", "frozenset({request})",
     "launcher/runs/test_attempts.py::test_a_replaced_job_ends_every_orchestrator_but_its_own"),
    ("other-runs-not-settled", "launcher/runs/attempts.py", "sweep is not None and record.sweep == sweep",
     "record.sweep == sweep",
     "launcher/runs/test_attempts.py::test_live_job_of_the_same_name_refuses_a_new_run"),
    ("nonce-not-random", "launcher/job.py", "return secrets.token_hex(len(PREVIEW) // 2)", "return PREVIEW",
     "launcher/runs/test_attempts.py::test_a_jobs_name_never_comes_back"),
    ("unscheduled-machines-cost", "launcher/reports/goodput.py", "held = nodes if scheduled is not None else 0",
     "held = nodes",
     "launcher/reports/test_sweep_page.py::test_trial_that_was_never_admitted_used_no_gpu_hours"),
    ("evaluations-of-lost-work-count", "launcher/reports/goodput.py",
     'if row["kind"] == "evaluation" and row["elapsed"] <= kept:', 'if row["kind"] == "evaluation":',
     "launcher/reports/test_goodput.py"),
    ("logged-steps-alone-count", "launcher/runs/run.py", "(step - before) * per_step[step]", "per_step[step]",
     "launcher/runs/test_runs.py::test_repeated_steps_and_pauses_count_once"),
    ("fsdp-over-a-slow-network", "launcher/checks/arithmetic.py", "if seconds <= products:",
     "if seconds >= products:",
     "launcher/checks/test_arithmetic.py::test_auto_strategy_follows_memory_before_network_speed"),
    ("accumulated-passes-send-nothing", "litgpt_demo/models/estimates.py", "return passes * (gathered + 4)",
     "return (gathered + 4)", "litgpt_demo/models/test_estimates.py::test_fsdp_alone_sends_for_each_accumulated_pass"),
    ("hybrid-over-the-nodes", "litgpt_demo/config.py", '"hybrid": processes}', '"hybrid": nodes}',
     "launcher/checks/test_arithmetic.py"),
    ("gradients-summed-in-bfloat16", "litgpt_demo/training/setup.py", "reduce_dtype=torch.float32",
     "reduce_dtype=gathered", "litgpt_demo/training/test_train.py::test_sharded_gradients_are_summed_in_float32"),
    ("copies-of-a-hybrid-drift-apart", "litgpt_demo/training/step.py",
     "module.set_requires_all_reduce(index == last)", "module.set_requires_all_reduce(index < last)",
     "litgpt_demo/training/test_train.py::test_a_run_resumes_with_another_strategy_and_world_size"),
    ("starts-from-the-oldest-checkpoint", "litgpt_demo/training/origins.py",
     "spec, last = read_spec(storage), complete[0]", "spec, last = read_spec(storage), complete[-1]",
     "litgpt_demo/training/test_starting.py::test_run_starts_from_weights_and_optimizer_of_another_run"),
    ("samples-of-the-weights-forgotten", "litgpt_demo/training/origins.py",
     '.model_copy(update={"trained_on": manifest.trained_on})', "",
     "litgpt_demo/training/test_starting.py::test_a_decay_branch_equals_one_uninterrupted_run"),
    ("folder-before-a-runs-name", "litgpt_demo/training/origins.py", "found = _in_run(run, name) or _in_folder(run)",
     "found = None",
     "litgpt_demo/training/test_starting.py::test_a_runs_name_goes_before_a_folder_of_that_name"),
    ("optimizer-not-in-the-run-id", "litgpt_demo/config.py",
     "content_hash(self.kind, files, self.optimizer)", "content_hash(self.kind, files)",
     "litgpt_demo/training/test_starting.py::test_run_starts_from_weights_and_optimizer_of_another_run"),
    ("a-live-orchestrator-overruled", "flows/reconciling.py",
     'return "CANCELLED" in known and all(state in TERMINAL_STATES for state in known)', 'return "CANCELLED" in known',
     "flows/test_reconciling.py::test_only_a_cancelled_job_without_followers_is_abandoned"),
    ("unknown-flow-run-taken-for-ended", "flows/reconciling.py", 'states.get(flow_run, "UNKNOWN")',
     'states.get(flow_run, "CRASHED")',
     "flows/test_reconciling.py::test_only_a_cancelled_job_without_followers_is_abandoned"),
    ("preemptions-counted", "launcher/runs/restarts.py",
     "if not diagnosis.progressed or not self._resets_on_progress(diagnosis.fault):", "if True:",
     "launcher/runs/test_restarts.py::test_failures_with_progress_use_up_no_budget"),
    ("preemptions-free", "launcher/runs/restarts.py",
     "if not diagnosis.progressed or not self._resets_on_progress(diagnosis.fault):",
     "if not self._resets_on_progress(diagnosis.fault):",
     "launcher/runs/test_restarts.py::test_each_class_has_a_budget_of_its_own"),
    ("idle-in-spite-of-progress", "launcher/runs/restarts.py",
     "attempts_without_progress = 0\n                for", "for",
     "launcher/runs/test_restarts.py::test_progress_begins_the_doubling_of_the_wait_again"),
    ("any-suspect-blamed", "launcher/runs/diagnosis.py",
     "cause.role <= Role.BLAMED and not rivals and not cause.terminated", "True",
     "launcher/runs/test_diagnosis.py::test_no_victim_or_one_of_several_suspects_is_blamed"),
    ("blamed-machine-taken-again", "tasks/training.py",
     "partial(handle.reattach_or_create, ended=self.last_ended, exclude=exclude, leads=self.lease.take)",
     "partial(handle.reattach_or_create, ended=self.last_ended, leads=self.lease.take)",
     "tasks/test_training.py::test_machine_blamed_twice_is_avoided_by_the_next_attempt"),
    ("restarts-forgotten", "tasks/training.py",
     "attempts.index.diagnoses_of_flow_run, attempts.run, handle.orchestrator",
     "attempts.index.diagnoses_of_flow_run, attempts.run, None",
     "tasks/test_training.py::test_resumed_flow_run_continues_its_count_of_restarts"),
    ("refused-job-left-waiting", "tasks/training.py", 'native=native, has_running_nodes=True',
     'native=native',
     "tasks/test_training.py::test_refused_job_is_cancelled_and_ends_the_run_with_the_fix"),
    ("waits-that-multiply", "tasks/steps.py", "if not isinstance(error, Exception) or is_marked_no_retry(error):",
     "if not isinstance(error, Exception):", "tasks/test_steps.py"),
    ("server-open-to-the-network", "flows/serving.py", '"--host", "127.0.0.1"', '"--host", "0.0.0.0"',
     "deployments/test_bootstrap.py"),
    ("no-notice-of-a-crash", "deployments/automations.yaml",
     "expect: [prefect.flow-run.Failed, prefect.flow-run.Crashed]", "expect: [prefect.flow-run.Failed]",
     "deployments/test_prefect_yaml.py"),
    ("stop-looks-at-one-page", "flows/reconciling.py", "if len(page) < _PAGE:", "if page:",
     "deployments/test_bootstrap.py::test_stop_looks_at_all_pages_of_flow_runs"),
    ("notices-by-http", "deployments/bootstrap.py", "if notify and not is_protected(notify):", "if not notify:",
     "deployments/test_bootstrap.py::test_notices_go_to_no_plain_address"),
    ("any-server-is-ours", "deployments/bootstrap.py", "socket.create_server((\"127.0.0.1\", port)).close()",
     "socket.create_server((\"127.0.0.1\", 0)).close()",
     "deployments/test_bootstrap.py::test_port_of_a_strange_server_is_refused"),
    ("unstartable-is-started-again", "deployments/automations.yaml",
     'match: {prefect.resource.id: prefect.flow-run.*, prefect.run-count: "!0"}',
     "match: {prefect.resource.id: prefect.flow-run.*}", "deployments/test_prefect_yaml.py"),
    ("notice-speaks-to-slack", "deployments/automations.yaml", 'replace("<", "&lt;")', 'replace("<", "<")',
     "deployments/test_prefect_yaml.py"),
    ("slurms-word-over-the-nodes", "launcher/platforms/slurm/platform.py",
     "codes = dict.fromkeys(range(job.nodes), EXIT_CODES[_FAILURE_CLASSES[row.state]]) | codes",
     "codes = codes | dict.fromkeys(range(job.nodes), EXIT_CODES[_FAILURE_CLASSES[row.state]])", _SLURM),
    ("slurm-job-that-left-the-queue-doubled", "launcher/platforms/slurm/platform.py",
     "if record is not None and record.number is not None:", "if record is not None and record.number is row:", _SLURM),
    ("slurm-cancel-without-time-to-save", "launcher/platforms/slurm/platform.py",
     'elif row.state != "RUNNING" or time.monotonic() > start + self._settings.grace_period:', "else:", _SLURM),
    ("slurm-completed-with-a-failed-node", "launcher/platforms/slurm/platform.py",
     "elif state is JobState.SUCCEEDED and any(codes.values()):", "elif False:", _SLURM),
    ("slurm-timeout-of-a-job-that-is-done", "launcher/platforms/slurm/platform.py",
     "elif len(codes) == job.nodes and not any(codes.values()):", "elif row is None and not any(codes.values()):",
     _SLURM),
    ("slurm-killed-sbatch-made-no-job", "launcher/platforms/slurm/platform.py",
     " or code < 0 or code - 128 in {SIGHUP, SIGINT, SIGKILL, SIGTERM}", "", _SLURM),
    ("slurm-first-number-is-the-jobs", "launcher/platforms/slurm/platform.py", "for later in rows[1:]:",
     "for later in (row._replace(number=number) for row in rows for number in numbers[:1]):", _SLURM),
    ("slurm-any-reason-lasts", "launcher/platforms/slurm/platform.py", "lasts = bool(_LASTING.fullmatch(code))",
     "lasts = bool(code)", _SLURM),
    ("slurm-limit-of-a-user-always-lasts", "launcher/platforms/slurm/platform.py", "is JobState.RUNNING for job in",
     "is None for job in", _SLURM),
    ("slurm-step-of-one-core", "launcher/platforms/slurm/render.py", "export SRUN_CPUS_PER_TASK=", "export CORES=",
     _SLURM),
    ("slurm-profile-wins", "launcher/platforms/slurm/platform.py", '" SBATCH_* | SCANCEL_*', '" SCANCEL_*', _SLURM),
    ("slurm-percent-of-a-root-replaced", "launcher/platforms/slurm/render.py", ".replace('%', '%%')", "", _SLURM),
    ("slurm-option-shortened", "launcher/platforms/slurm/settings.py", "if name.startswith(found[1])",
     "if name == found[1]", _SLURM),
    ("slurm-secrets-file-as-code", "launcher/platforms/slurm/render.py", 'f"fail {code} {shlex.quote(message)}"',
     """f'fail {code} "{message}"'""", "launcher/platforms/test_planted_code.py"),
    ("lease-of-the-living", "launcher/runs/lease.py", "        elif beat == observed_beat:", "        elif True:",
     "launcher/runs/test_lease.py"),
    ("cleanup-of-the-living", "launcher/runs/listing.py", "    return last is not None and last.status.state.is_final",
     "    return last is not None", "launcher/runs/test_orphaned_resources.py"),
    ("cluster-without-certificate", "launcher/platforms/kubernetes/connection.py",
     "    lock = threading.Lock()", "    configuration.verify_ssl = False; lock = threading.Lock()",
     "launcher/platforms/kubernetes/test_gke_connecting.py::test_cluster_with_another_certificate_is_sent_no_token"),
    ("scratch-of-another-user", "litgpt_demo/storage/private.py", "elif found.st_uid != os.geteuid():",
     "elif found.st_uid < 0:", "litgpt_demo/storage/test_private.py"),
    ("ssh-host-of-a-record", "launcher/platforms/slurm/settings.py",
     "if self.host is not None and self.host not in known:", "if self.host is not None and not known:",
     "launcher/platforms/slurm/test_slurm_jobs.py::test_login_node_of_a_record_needs_one_the_user_names"),
    ("number-of-nodes-is-believed", "launcher/platforms/runai/platform.py", "return job_id == WorkloadReference(",
     "return WorkloadReference.of(job_id).name == attempt_name or job_id == WorkloadReference(",
     "launcher/runs/test_attempts.py::test_a_forged_id_leads_no_verb_to_another_job_or_folder"),
    ("checkpoint-that-is-none", "tasks/training.py",
     'exists = self._run.exists(f"{checkpoints.folder_of(step)}/{MANIFEST}")', "exists = True",
     "tasks/test_training.py::test_event_of_a_checkpoint_needs_one_that_exists"),
    ("secret-in-the-diagnosis", "launcher/runs/diagnosis.py",
     "host=host, evidence=Cleaner()(cause.evidence), logs=logs", "host=host, logs=logs",
     "tasks/test_training.py::test_secret_in_an_error_or_a_log_is_in_no_event_log_or_file"),
    ("dollars-of-a-program", "litgpt_demo/node/agent.py", 'word.replace("$", "$$")', "word",
     "litgpt_demo/node/test_torchrun.py::test_arguments_of_a_program_reach_it_as_they_were_written"),
    ("weights-of-the-hub-unverified", "litgpt_demo/training/origins.py",
     "if CHECKSUMS[algorithm](path) != checksum:", "if not checksum:",
     "litgpt_demo/training/test_starting.py::test_model_of_the_hub_is_fetched_at_the_start_as_pinned"),
    ("deployments-settings-win", "flows/parameters.py",
     'complete["overrides"] = {}', "pass",
     "cli/test_cli.py::test_changed_setting_keeps_all_other_deployed_settings"),
)  # fmt: skip

# Seconds that one test may take; a mistake that makes one hang is noticed too.
_TIMEOUT = 240
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


def outdated() -> Iterator[str]:
    """Yield a sentence for each mutant whose file no longer has its piece once, or that names a test that is gone."""
    for name, path, old, _, *tests in MUTANTS:
        file = CHECKOUT / path
        if (count := file.read_text(encoding="utf-8").count(old) if file.exists() else 0) != 1:
            yield f"{name}: {path} has {old!r} {count} times, not once; write the mutant anew"
        for test in tests:
            place, _, function = test.partition("::")
            file = CHECKOUT / "tests" / place
            if not file.exists() or f"def {function}" not in file.read_text(encoding="utf-8"):
                yield f"{name}: there is no tests/{test}; name the test that notices it"


@contextmanager
def mistake(file: Path, old: str, new: str) -> Iterator[None]:
    """Have it in the file."""
    source = file.read_text(encoding="utf-8")
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
    if problems := [*outdated()]:
        print("\n".join(problems))
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
