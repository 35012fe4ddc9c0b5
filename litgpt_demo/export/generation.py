"""Text by a run's model: the collected one, or the newest checkpoint if that is further. Imports torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer
from tokenizers.decoders import DecodeStream

from litgpt_demo.data.dataset import open_dataset
from litgpt_demo.documents import fetch_verified
from litgpt_demo.errors import UserError
from litgpt_demo.export import exported
from litgpt_demo.export.models import verified_checkpoint
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.models.sampling import sampled
from litgpt_demo.runs import FINAL, LITGPT, read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoint_reader import explain_unpickling_errors, load_weights


class Writer:
    """A run's model and tokenizer, in float32, on the GPU or else on the CPU."""

    def __init__(self, run: Storage) -> None:
        spec, kind = read_spec(run), "cuda" if torch.cuda.is_available() else "cpu"
        fabric = Fabric(accelerator=kind, devices=1, precision="32-true")
        with tempfile.TemporaryDirectory(prefix="litgpt-generate-") as temporary:
            scratch = Path(temporary)
            final = exported(run)
            if final is not None:
                files = [file for file in final.files if f"{FINAL}/{file.path}".startswith(f"{LITGPT}/")]
                folder = fetch_verified(run.within(FINAL), files, lambda: scratch) / LITGPT.removeprefix(f"{FINAL}/")
                with fabric.init_module(empty_init=True):
                    self._model = GPT(Config.from_file(folder / "model_config.yaml"))
                with explain_unpickling_errors(run.address(LITGPT)):
                    weights = torch.load(folder / "lit_model.pth", map_location="cpu", mmap=True, weights_only=True)
                self._model.load_state_dict(weights)
                self.step = final.step
            else:
                found, shards = verified_checkpoint(run, spec, scratch, step=None, newest=True)
                dataset = open_dataset(spec.dataset)
                folder = (
                    fetch_verified(open_storage(spec.dataset), dataset.tokenizer, lambda: scratch / "dataset")
                    / "tokenizer"
                )
                with fabric.init_module(empty_init=True):
                    self._model = GPT(litgpt_config(spec.model, vocab_size=dataset.vocab_size))
                load_weights(shards, self._model.state_dict())
                self.step = found.step
            self._tokenizer: Any = Tokenizer(folder)
        self._model.eval()

    def write(self, text: str, *, max_tokens: int, temperature: float, top_k: int, seed: int | None) -> Iterator[str]:
        """Yield the continuation of `text` in whole characters, to its document's end; an empty `text` begins one."""
        model, tokenizer = self._model, self._tokenizer
        ids = tokenizer.encode(text).tolist() or [tokenizer.eos_id]
        room = model.config.block_size
        if len(ids) >= room:
            raise UserError(f"the text has {len(ids)} tokens, but the model sees {room}", fix="give it a shorter one")
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        decoder, length = DecodeStream(ids, skip_special_tokens=True), min(room, len(ids) + max_tokens)
        options: Any = {"temperature": temperature, "top_k": top_k, "eos_id": tokenizer.eos_id}
        for token in sampled(model, ids, length=length, **options):
            yield decoder.step(tokenizer.processor, token) or ""
