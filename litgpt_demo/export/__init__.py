"""Collection: a run's checkpoint becomes models that LitGPT and Hugging Face open, proved to be what was trained.

final/   litgpt/  huggingface/  MODEL_CARD.md  loss.png  lineage.json  manifest.json

This module describes them, without torch; `models` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from litgpt_demo.config import Settings
from litgpt_demo.documents import FileRecord, read_manifest
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, RecordedPrice
from litgpt_demo.storage import Storage, bucket_path
from litgpt_demo.training import checkpoints


class Cost(Settings):
    """The cost of all attempts of a run, as far as its nodes reported their ends. A killed node reports none."""

    hours: float
    """Hours of one machine."""
    price: RecordedPrice
    unreadable: int = 0
    """The number of reports that are damaged, forged or without a start; their nodes' hours are left out."""

    @property
    def usd(self) -> float:
        return self.hours * self.price.usd

    def __str__(self) -> str:
        price, bad = self.price, self.unreadable
        cost = f"${self.usd:,.2f} or more: {self.hours:,.2f} hours of {price.machine} at ${price.usd:,.2f}"
        if bad:
            return f"{cost}, {price.source}; reports of nodes that could not be read, and are left out: {bad}"
        return f"{cost}, {price.source}"


class HuggingFaceProof(Settings):
    architecture: str
    """Class in transformers."""
    attention: str
    """The implementation that transformers chose by itself and by config.json."""
    logits_difference: float
    """Largest difference between the checkpoint's logits and this model's, both in float32."""
    tokens: int
    """The length of the samples of those logits; longer than a sliding window, if the model has one."""
    sample: str
    """The text that it wrote after the prompt, always taking the likeliest token."""


class FinalManifest(Settings):
    run: str
    step: int
    tokens: int
    chain: str | None = None
    """The chain of digests of its checkpoint (docs/reference/digests.md); None if an older version saved that."""
    complete: bool = True
    """True if the run ends with this step; a model may be collected on the way."""
    average: bool = False
    """True if its weights are the moving average of the run's weights at that step."""
    parameters: int
    dataset_hash: str
    validation_loss: float
    """Nats per token, of the model loaded back from final/litgpt, in float32."""
    perplexity: float
    validation_windows: int
    """The number of samples of that loss, of all sources."""
    trainer_validation_loss: float | None = None
    """The trainer's own loss at that step, if it evaluated there, in its own precision."""
    logits_difference: float
    """Largest difference between the checkpoint's logits and those of final/litgpt, both in float32."""
    logits_tolerance: float
    """The largest difference that is accepted, for final/huggingface too."""
    huggingface: HuggingFaceProof | None
    """None if there is no final/huggingface; `findings` has the reason."""
    findings: tuple[str, ...] = ()
    cost: Cost | None = None
    """None if the machines have no list price, as on this machine."""
    prefix: tuple[str, ...] = ()
    """Tokens that the model's tokenizers put before a text, as the dataset has them there."""
    prompt: str
    sample: str
    files: tuple[FileRecord, ...]


def exported(run: Storage) -> FinalManifest | None:
    """Return the collected model of the run's newest checkpoint, if there is one and it is complete."""
    manifest = complete_final(run)
    if manifest is not None and any(newest.step > manifest.step for newest in checkpoints.list_complete(run)[:1]):
        return None
    return manifest


def finished(run: Storage) -> FinalManifest | None:
    """Return the collected model of a run that has ended; None if there is none, or it was collected before the end."""
    final = exported(run)
    return final if final is not None and final.complete else None


def complete_final(run: Storage, place: str = FINAL) -> FinalManifest | None:
    """Return the manifest of the model collected last into `place`, if all its files exist."""
    final = run.within(place)
    manifest = read_manifest(final, FinalManifest)
    if manifest is None or not {record.path for record in manifest.files} <= set(final.list()):
        return None
    return manifest


def summary_lines(final: FinalManifest) -> Iterator[str]:
    yield f"step {final.step}, {final.tokens:,} tokens, {final.parameters:,} parameters, {len(final.files)} files"
    yield (
        f"validation loss {final.validation_loss:.4f}, perplexity {final.perplexity:.2f}, "
        f"over {final.validation_windows} samples"
    )
    yield f"LitGPT: opens, logits differ by {final.logits_difference:.1e}"
    if final.huggingface is not None:
        yield f"{final.huggingface.architecture}: opens, logits differ by {final.huggingface.logits_difference:.1e}"
    yield from (f"warning: {finding}" for finding in final.findings)


def usage(run: str, final: FinalManifest, *, huggingface: bool) -> str:
    """Return Python that generates text by the models of the run at this address; empty is the folder of the card."""
    remote = bucket_path(run) is not None
    lines, folder = [], ""
    if remote:
        # Into a folder that exists, so that the copy has the same name whatever was copied before.
        lines, folder = [f"# first, in a shell: gcloud storage cp --recursive {run}/{FINAL} ."], f"{FINAL}/"
    elif run:
        folder = f"{run}/{FINAL}/"
    litgpt, transformers = (f"{folder}{path.removeprefix(f'{FINAL}/')}" for path in (LITGPT, HUGGINGFACE))
    needs_eager = final.huggingface is not None and final.huggingface.attention == "eager"
    if not (huggingface and needs_eager):  # LitGPT's cache does not mask capped scores
        lines += ["from litgpt import LLM", f"print(LLM.load({litgpt!r}).generate({final.prompt!r}))", ""]
    if huggingface:
        eager = ', attn_implementation="eager"' if needs_eager else ""
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({transformers!r})",
            f"model = AutoModelForCausalLM.from_pretrained({transformers!r}{eager})",
            f'inputs = tokenizer({final.prompt!r}, return_tensors="pt")',
            "written = model.generate(**inputs, max_new_tokens=50, pad_token_id=tokenizer.eos_token_id)",
            "print(tokenizer.decode(written[0]))",
        ]
    return "\n".join(lines).rstrip()
