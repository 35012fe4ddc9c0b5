"""The proof: a model that was written is opened as its users will, and held against the trainer's own on one batch.

All in float32 on the CPU, one model in memory at a time. The same model is scored and lets people write on a GPU too.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.utils import chunked_cross_entropy
from tokenizers.decoders import DecodeStream
from torch import Tensor

from litgpt_demo.data.batches import AnyWindows
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.training.loss import loss_model
from litgpt_demo.training.reading import load_weights, refusing

# Two ways to add up the same float32 products differ by less than this share of the largest logit. LitGPT's own model
# computes what the trainer's does, to the bit; transformers' differs by about 1e-6.
_RELATIVE = 1e-4

_PROBE_WINDOWS, _PROBE_TOKENS = 2, 256
_PROMPT_TOKENS, _NEW_TOKENS = 16, 96
_FORWARD_FLOPS = 1e14  # for the validation loss: some minutes of a few cores


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The fixed batch: the beginnings of the validation split's first samples, the same ones in every run on it."""

    inputs: Tensor

    @classmethod
    def of(cls, validation: AnyWindows) -> Probe:
        numbers = np.arange(min(_PROBE_WINDOWS, len(validation)), dtype=np.uint64)
        return cls(inputs=torch.from_numpy(validation.read(numbers)[0][:, :_PROBE_TOKENS].copy()))

    @property
    def opening(self) -> list[int]:
        """The split's first tokens: a prompt that the model has not seen."""
        return [int(token) for token in self.inputs[0, :_PROMPT_TOKENS]]


def tolerance(own: Tensor) -> float:
    """Return the largest difference by rounding between `own` logits and another implementation's."""
    return _RELATIVE * max(1.0, float(own.abs().max()))


def largest_difference(own: Tensor, other: Tensor) -> float:
    """The largest absolute difference of a logit; NaN where one is not finite."""
    return float((own - other).abs().max())


@torch.no_grad()
def trainer_logits(config: Config, shards: Path, probe: Probe) -> Tensor:
    """Return the output of the trainer's own model with the checkpoint's weights, read by the trainer's own reader."""
    with Fabric(accelerator="cpu", devices=1, precision="32-true").init_module(empty_init=True):
        model = loss_model(config)
    load_weights(shards, model.state_dict())
    logits: Tensor = model.eval()(probe.inputs)
    del model
    give_back()
    return logits


def give_back() -> None:
    """Return to the system what models took that are gone: the allocator would keep it next to the next model."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


# --- LitGPT -----------------------------------------------------------------------------------------------------------


class LitgptModel:
    """A LitGPT checkpoint directory, opened by `litgpt.LLM.load`."""

    def __init__(self, folder: Path, *, accelerator: str = "cpu", precision: str | None = "32-true") -> None:
        """Open the model; without a precision it has the device's own, bfloat16 on a GPU and float32 on a CPU."""
        from litgpt import LLM

        # Maps the file and reads none of the weights. LitGPT 0.5 executes what else is in it, whatever torch is told.
        with refusing(str(folder)):
            torch.load(folder / "lit_model.pth", map_location="cpu", mmap=True, weights_only=True)
        self._llm: Any = LLM.load(str(folder), distribute=None)
        self._llm.distribute(accelerator=accelerator, devices=1, precision=precision)

    @torch.no_grad()
    def logits(self, probe: Probe) -> Tensor:
        """The logits for the fixed batch."""
        logits: Tensor = self._llm.model(probe.inputs)
        return logits

    def affordable_windows(self, windows: AnyWindows, *, most: int) -> int:
        """Return the number of samples for the validation loss: as many as the trainer's, fewer of a large model."""
        parameters = sum(weight.numel() for weight in self._llm.model.parameters())
        each = 2 * parameters * windows.length
        return max(1, min(most, len(windows), int(_FORWARD_FLOPS / each)))

    def validation_loss(self, windows: AnyWindows, count: int) -> float:
        """Nats per token over the first `count` samples."""
        nats, tokens = map(sum, zip(*self.nats(windows, count), strict=True))
        return nats / max(1, tokens)

    @torch.no_grad()
    def nats(self, windows: AnyWindows, count: int) -> list[tuple[float, int]]:
        """The loss of each of the first `count` samples, summed over its targets that are learned, and their number."""
        device, found = self._llm.fabric.device, []
        for number in range(count):
            sample = windows.read(np.array([number], dtype=np.uint64))
            inputs, targets = (torch.from_numpy(part).to(device) for part in sample)
            learned = int((targets >= 0).sum())
            loss = float(chunked_cross_entropy(self._llm.model(inputs), targets)) if learned else 0.0
            found.append((learned * loss, learned))
        return found

    def writes(self, probe: Probe) -> tuple[str, str]:
        """A prompt, and what the model writes after it."""
        room = self._llm.config.block_size
        # A prompt cut inside a character comes back as U+FFFD, three bytes and at worst three tokens.
        opening = probe.opening[: max(1, room // 4)]
        prompt: str = self._llm.preprocessor.tokenizer.decode(torch.tensor(opening))
        torch.manual_seed(0)
        new = min(_NEW_TOKENS, max(1, room - 3 * len(opening)))
        return prompt, str(self._llm.generate(prompt, max_new_tokens=new, temperature=0.8, top_k=50))

    def stream(self, prompt: str, *, most: int, temperature: float, top_k: int | None, top_p: float) -> Iterator[str]:
        """Yield what the model writes after the prompt, in its prompt style, as soon as it is whole characters.

        Args:
            most: tokens; fewer where the model's block has no room for more.

        Raises:
            UserError: the prompt has no token, or fills the block.
        """
        tokenizer, block = self._llm.preprocessor.tokenizer, self._llm.config.block_size
        length = len(tokenizer.encode(self._llm.prompt_style.apply(prompt)))
        if not 0 < length < block:
            raise UserError(f"the prompt has {length:,} tokens, and this model takes 1 to {block - 1:,}; give another")
        ids = self._llm.generate(
            prompt,
            max_new_tokens=min(most, block - length),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            return_as_token_ids=True,
            stream=True,
        )
        # A token may be a part of a character; LitGPT's own stream shows U+FFFD for it.
        decoder = DecodeStream(skip_special_tokens=True)
        yield from filter(None, (decoder.step(tokenizer.processor, int(token)) for token in ids))


@contextmanager
def opened_by_litgpt(
    folder: Path, *, accelerator: str = "cpu", precision: str | None = "32-true"
) -> Iterator[LitgptModel]:
    """The model in `folder`, whose memory goes at the end."""
    model = LitgptModel(folder, accelerator=accelerator, precision=precision)
    try:
        yield model
    finally:
        model.__dict__.clear()
        give_back()


# --- Hugging Face -----------------------------------------------------------------------------------------------------

# transformers imports them where they are installed, for losses, decoding and weights of kinds that no model here has.
_UNUSED_BY_TRANSFORMERS = ("sklearn", "scipy", "torchao")


@contextmanager
def without_unused_packages() -> Iterator[None]:
    """Hide from transformers what it would import and no proof uses: 2 of the 13 CPU seconds of a small collection."""
    before = {name: sys.modules[name] for name in _UNUSED_BY_TRANSFORMERS if name in sys.modules}
    sys.modules.update(dict.fromkeys(_UNUSED_BY_TRANSFORMERS, cast("ModuleType", None)))  # as if not installed
    try:
        yield
    finally:
        for name in _UNUSED_BY_TRANSFORMERS:
            del sys.modules[name]
        sys.modules.update(before)


@torch.no_grad()
@without_unused_packages()
def opened_by_transformers(folder: Path, *, own: Tensor, probe: Probe, tokenizer: Path) -> tuple[float, str]:
    """Open a folder by `AutoModelForCausalLM` and `AutoTokenizer`, compare with `own` logits and let it write.

    Args:
        tokenizer: the dataset's tokenizer.json.

    Returns:
        The largest difference of a logit, and what the model wrote.

    Raises:
        DataError: a tensor is missing, too many or of another shape, the logits differ, the tokenizer does.
    """
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    # Eager attention, because not every architecture's window and softcapping are in the other ones.
    model, info = library.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if wrong := {kind: sorted(map(str, names)) for kind, names in info.items() if names}:
        raise DataError(f"transformers opened it with {wrong}")
    difference = largest_difference(own, model.eval()(probe.inputs).logits)
    if not difference <= tolerance(own):
        raise DataError(f"its logits differ by {difference:.2e} from the checkpoint's, above {tolerance(own):.0e}")
    reader = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    prompt = _same_ids(reader, tokenizer, probe)
    room = model.config.max_position_embeddings - len(prompt)
    if room < 1:
        return difference, ""
    written = model.generate(
        torch.tensor([prompt]), max_new_tokens=min(_NEW_TOKENS, room), do_sample=False, pad_token_id=0
    )
    return difference, str(reader.decode(written[0, len(prompt) :]))


def _same_ids(reader: Any, tokenizer: Path, probe: Probe) -> list[int]:
    """The prompt's ids by transformers' tokenizer, which have to be those that the model was trained on.

    Raises:
        DataError: they are not.
    """
    from tokenizers import Tokenizer as HfTokenizer

    own = HfTokenizer.from_file(str(tokenizer))
    for row in probe.inputs.tolist():
        text = own.decode(row, skip_special_tokens=True)
        theirs, ours = reader(text, add_special_tokens=False).input_ids, own.encode(text, add_special_tokens=False).ids
        if theirs != ours:
            raise DataError("its tokenizer gives other ids than the dataset's")
    ids: list[int] = own.encode(own.decode(probe.opening), add_special_tokens=False).ids
    return ids or probe.opening[:1]
