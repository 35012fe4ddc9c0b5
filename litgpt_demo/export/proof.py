"""The proof: a written model is opened as its users will open it, and compared with the trainer's own on one batch.

All is in float32 on the CPU, with one model in memory at a time.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.utils import chunked_cross_entropy
from tokenizers import Tokenizer as HfTokenizer
from torch import Tensor

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import SampleIds, validation_sources, weighted_mean
from litgpt_demo.data.dataset import TokenDataset
from litgpt_demo.errors import DataError
from litgpt_demo.export import FinalManifest, HuggingFaceProof
from litgpt_demo.metrics import perplexity
from litgpt_demo.models.model import LossGPT
from litgpt_demo.models.sampling import sampled
from litgpt_demo.runs import CONFIG, HUGGINGFACE, LITGPT
from litgpt_demo.training.checkpoint_reader import explain_unpickling_errors, load_weights
from litgpt_demo.training.checkpoints import CheckpointManifest, reached_end

# Two ways to add the same float32 products differ by less than this share of the largest logit. LitGPT's own model
# computes the same bits as the trainer's; transformers' differs by about 1e-6.
_RELATIVE = 1e-4

# The trainer evaluates in its own precision, collection in float32. If the losses differ by more than this share, or by
# this much if they are small, it is not the trained model.
_LOSS_TOLERANCE = 0.05

_PROBE_SAMPLES, _PROBE_TOKENS = 2, 256
_PROMPT_TOKENS, _NEW_TOKENS = 16, 96
_FORWARD_FLOPS = 1e14  # for the validation loss: some minutes of a few cores


def probe_batch(validation: TokenDataset, window: int | None) -> Tensor:
    """Return the first samples' beginnings; for a sliding window one sample that is longer, if the model's are."""
    samples, tokens = _PROBE_SAMPLES, _PROBE_TOKENS
    if window is not None:
        samples, tokens = 1, max(_PROBE_TOKENS, 2 * window + 16)
    numbers = np.arange(min(samples, len(validation)), dtype=np.uint64)
    return torch.from_numpy(validation.read(numbers)[0][:, :tokens].copy())


@torch.no_grad()
def last_logits(model: Any, head: Any, inputs: Tensor) -> Tensor:
    # The head gets no other tokens: all logits of a long sample could take more memory than the model.
    with head.register_forward_pre_hook(lambda _, hidden: (hidden[0][:, -_PROBE_TOKENS:],)):
        output = model.eval()(inputs)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def tolerance(own: Tensor) -> float:
    """Return the largest difference by rounding between `own` logits and another implementation's."""
    return _RELATIVE * max(1.0, float(own.abs().max()))


def largest_difference(own: Tensor, logits: Tensor) -> float:
    """Return the largest absolute difference of a logit; NaN if one is not finite."""
    return float((own - logits).abs().max())


def _empty_model(config: Config, end_of_text: int | None = None) -> LossGPT:
    with Fabric(accelerator="cpu", devices=1, precision="32-true").init_module(empty_init=True):
        return LossGPT(config, end_of_text=end_of_text)


@torch.no_grad()
def trainer_logits(config: Config, shards: Path, inputs: Tensor, *, kind: str) -> Tensor:
    """Return the output of the trainer's own model with the checkpoint's weights, or their averages, read by the
    trainer's own reader."""
    model = _empty_model(config)
    load_weights(shards, model.state_dict(), kind=kind)
    logits = last_logits(model, model.lm_head, inputs)
    del model
    _trim_malloc()
    return logits


def _trim_malloc() -> None:
    """Return the memory of deleted models to the system: the allocator would keep it next to the next model."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


class Texts:
    """The texts of a batch, with the ids of the dataset, which every tokenizer must give them."""

    def __init__(self, tokenizer: Path, inputs: Tensor) -> None:
        self.tokenizer, self.inputs = HfTokenizer.from_file(str(tokenizer)), inputs
        prefix = self.tokenizer.encode("").ids
        if inputs[0, : len(prefix)].tolist() != prefix:
            what = f"{tokenizer} puts the ids {prefix} before a text, but the dataset has none there"
            raise DataError(what, fix="remove the dataset, and prepare it again")
        self.prefix = tuple(self.tokenizer.id_to_token(number) for number in prefix)

    def require_ids(self, encode: Callable[[str], Any], name: str) -> None:
        """Compare the ids of `encode`, with the special ones; a DataError if they differ."""
        for row in self.inputs.tolist():
            # LitGPT removes an end-of-text from the ends of a text, which may be about it.
            text = f"a {self.tokenizer.decode(row)} a"
            if list(encode(text)) != self.tokenizer.encode(text).ids:
                raise DataError(f"the tokenizer of {name} gives other ids than the dataset's")


def _losses(model: Any, validation: TokenDataset, numbers: SampleIds) -> list[float]:
    losses = []
    for number in numbers:
        batch, targets = (torch.from_numpy(part) for part in validation.read(np.array([number], dtype=np.uint64)))
        losses.append(float(chunked_cross_entropy(model(batch), targets)))
    return losses


@torch.no_grad()
def opened_by_litgpt(
    folder: Path,
    own: Tensor,
    texts: Texts,
    validation: TokenDataset,
    spec: TrainingSpec,
    checkpoint: CheckpointManifest,
    end_of_text: int | None,
) -> FinalManifest:
    """Open a folder by `litgpt.LLM.load`, compare with `own` logits and the trainer's loss, and let it write.

    The loss is computed as the trainer did: with an id of `end_of_text`, attention stays within documents.
    """
    from litgpt import LLM

    # Maps the file and reads no weights. LitGPT 0.5 executes pickled code in it, whatever torch's settings are.
    with explain_unpickling_errors(str(folder)):
        torch.load(folder / "lit_model.pth", map_location="cpu", mmap=True, weights_only=True)
    llm: Any = LLM.load(str(folder), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    inputs, encode = texts.inputs, llm.preprocessor.tokenizer.encode
    texts.require_ids(lambda text: encode(text).tolist(), LITGPT)
    back, fix = f"the model loaded back from {LITGPT}", f"do not use it, and report this with the run's {CONFIG}"
    difference, allowed = largest_difference(own, last_logits(llm.model, llm.model.lm_head, inputs)), tolerance(own)
    if not difference <= allowed:
        what = f"{back} differs by {difference:.2e} in a logit from the checkpoint, but may only by {allowed:.0e}"
        raise DataError(what, fix=fix)
    parameters = sum(weight.numel() for weight in llm.model.parameters())
    # As many samples as the trainer evaluated at that step, whatever the setting is now; fewer of a large model.
    trainers_windows = min(checkpoint.evaluation_samples or spec.train.evaluation_samples, len(validation))
    sources = validation_sources(validation, trainers_windows)
    affordable = int(_FORWARD_FLOPS / (2 * parameters * validation.length)) // len(sources)
    windows = max(1, min(trainers_windows, affordable))  # of each source
    model = llm.model
    if end_of_text is not None:  # its weights are not copied
        model = _empty_model(llm.config, end_of_text)
        model.load_state_dict(llm.model.state_dict(), assign=True)
    losses = [_losses(model, validation, source.sample_ids[:windows]) for source in sources]
    loss = weighted_mean(sources, map(fmean, losses))
    trainers_loss = checkpoint.validation_loss
    if trainers_loss is not None and windows >= trainers_windows:
        if not abs(loss - trainers_loss) <= _LOSS_TOLERANCE * max(1.0, trainers_loss):
            what = f"{back} has a validation loss of {loss:.4f}, but the trainer found {trainers_loss:.4f}"
            raise DataError(what, fix=fix)
    room = llm.config.block_size
    # A prompt cut inside a character comes back as U+FFFD, three bytes and at worst three tokens.
    # LitGPT's own `generate`, which the card shows, takes no prompt that is longer than a window.
    opening = inputs[0, :_PROMPT_TOKENS].tolist()[
        : max(1, min(room // 4, (llm.config.sliding_window_size or room) // 3))
    ]
    prompt: str = llm.preprocessor.tokenizer.decode(torch.tensor(opening))
    torch.manual_seed(0)
    new = min(_NEW_TOKENS, max(1, room - 3 * len(opening)))
    ids = llm.preprocessor.encode(prompt).tolist()[: room - 1]
    options: Any = {"temperature": 0.8, "top_k": 50, "eos_id": llm.preprocessor.tokenizer.eos_id}
    written = [*sampled(llm.model, ids, length=min(room, len(ids) + new), **options)]
    sample = str(llm.preprocessor.decode(torch.tensor(written)))
    del llm, model
    _trim_malloc()
    return FinalManifest(
        run=spec.run,
        step=checkpoint.step,
        tokens=checkpoint.tokens,
        complete=reached_end(checkpoint, spec),
        parameters=parameters,
        dataset_hash=checkpoint.dataset_hash,
        validation_loss=loss,
        perplexity=perplexity(loss),
        validation_windows=sum(map(len, losses)),
        trainer_validation_loss=trainers_loss,
        logits_difference=difference,
        logits_tolerance=allowed,
        huggingface=None,
        prefix=texts.prefix,
        prompt=prompt,
        sample=sample,
        files=(),
    )


def opened(folder: Path, **settings: Any) -> Any:
    """Return the model that `AutoModelForCausalLM` opens; a DataError if a weight is missing, too many or misshapen."""
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    model, info = loader.from_pretrained(
        folder, **settings, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    problems = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if problems:
        raise DataError(f"transformers opened it with {problems}")
    return model


@torch.no_grad()
def opened_by_transformers(folder: Path, *, own: Tensor, texts: Texts) -> HuggingFaceProof:
    """Open a folder by transformers, compare with `own` logits and the dataset's ids, and let it write."""
    import transformers

    inputs = texts.inputs
    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    model = opened(folder, dtype=torch.float32)  # as the card says, with the attention that its config says
    difference = largest_difference(own, last_logits(model, model.get_output_embeddings(), inputs))
    if not difference <= tolerance(own):
        raise DataError(f"its logits differ by {difference:.2e} from the checkpoint's, above {tolerance(own):.0e}")
    reader = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    texts.require_ids(lambda text: reader(text).input_ids, HUGGINGFACE)
    opening = inputs[0, :_PROMPT_TOKENS].tolist()
    prompt = texts.tokenizer.encode(texts.tokenizer.decode(opening)).ids or opening[:1]
    room, sample = model.config.max_position_embeddings - len(prompt), ""
    if room > 0:
        new = min(_NEW_TOKENS, room)
        written = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0)
        sample = str(reader.decode(written[0, len(prompt) :]))
    return HuggingFaceProof(
        architecture=type(model).__name__, attention=str(model.config._attn_implementation),
        logits_difference=difference, tokens=inputs.shape[1], sample=sample,
    )  # fmt: skip
