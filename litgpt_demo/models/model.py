"""LitGPT's model: made from settings, with initial weights that depend on the seed alone, and with its loss.

The loss is computed without ever holding the logits of a whole batch. The projection onto the vocabulary and the
cross-entropy are most of a small model's step. Done apart, they write and read batch x sequence x vocabulary numbers
half a dozen times, in two precisions. Here they go together through a few rows at a time, and the gradients are ready
when the loss is: three matrix products and one softmax, forward and backward, as in Hsu et al. 2024
(https://arxiv.org/abs/2410.10989). torch's own `linear_cross_entropy` does likewise, but knows neither autocast nor the
softcapping of some models.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT, GroupedTopkRouter, do_softcapping
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from litgpt_demo import catalogue
from litgpt_demo.config import ModelConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models.estimates import chunk_rows, has_window


def litgpt_config(model: ModelConfig, *, vocab_size: int) -> Config:
    """LitGPT's Config of this model for a tokenizer of `vocab_size` ids."""
    has_weights = model.origin is not None
    problem = catalogue.vocabulary_problem(model.name, model.config, vocab_size=vocab_size, has_weights=has_weights)
    if problem is not None:
        raise UserError(problem[0], fix=problem[1])
    return unchecked_config(model, vocab_size=vocab_size)


def unchecked_config(model: ModelConfig, *, vocab_size: int) -> Config:
    """The same, also where the tokenizer has more ids than the model has embeddings."""
    length = model.sequence_length
    return Config(**catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size))


def initialise(model: GPT, *, seed: int) -> None:
    """Small-normal weights, the projections back into the residual stream smaller still.

    GPT-NeoX's scheme (https://arxiv.org/abs/2204.06745, section 2.1), which `litgpt pretrain` uses too: a standard
    deviation of sqrt(2 / 5d), and 1 / (layers * sqrt(d)) for the projections.
    """
    config, device = model.config, model.lm_head.weight.device
    usual = math.sqrt(2 / (5 * config.n_embd))
    residual = 1 / (math.sqrt(config.n_embd) * config.n_layer)
    # A thread begins on the first GPU, whatever its process uses.
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads(), initializer=begin) as pool:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | GroupedTopkRouter):
                std, unwrapped = residual if name.endswith(".proj") else usual, name.replace(_WRAPPER, "")
                deque(pool.map(partial(_draw, module.weight, std, seed, unwrapped), _pieces(module.weight)), maxlen=0)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, GroupedTopkRouter):
                module.e_score_correction_bias.zero_()


_WRAPPER = "_checkpoint_wrapped_module."  # of torch's activation checkpointing, within a name
_DRAWN_AT_ONCE = 1 << 22  # numbers that one generator draws: whole rows, by any thread of any rank


def _pieces(weight: Tensor) -> range:
    """Return the numbers of the pieces of a weight that this rank holds a row of."""
    local, first = _held(weight)
    rows = max(1, _DRAWN_AT_ONCE // weight.shape[1])
    return range(first // rows, -(-(first + len(local)) // rows)) if len(local) else range(0)


def _held(weight: Tensor) -> tuple[Tensor, int]:
    """Return what this rank holds of a weight, and the number of its first row."""
    if not isinstance(weight, DTensor):
        return weight, 0
    offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1]
    return weight.to_local(), offsets[0]


@torch.no_grad()
def _draw(weight: Tensor, std: float, seed: int, name: str, piece: int) -> None:
    """Draw one piece of a weight, by seed and name alone, and keep the rows of it that this rank holds."""
    (local, first), columns = _held(weight), weight.shape[1]
    rows = max(1, _DRAWN_AT_ONCE // columns)
    start = piece * rows
    stop = min(start + rows, len(weight))
    digest = blake2b(f"{seed}/{name}/{piece}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(stop - start, columns, dtype=torch.float32).normal_(0.0, std, generator=generator)
    begin, end = max(start, first), min(stop, first + len(local))
    local[begin - first : end - first].copy_(values[begin - start : end - start])


class LossGPT(GPT):  # type: ignore[misc]
    """A GPT that, given targets, returns the mean loss instead of logits. Its weights have GPT's own names.

    The loss is computed inside `forward` so that whatever wraps the model (DDP, FSDP, autocast) sees one call.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.workspace = Workspace()
        self.each: Tensor | None = None
        """Where the next losses put that of each token, in the order of the targets; None where nobody asks."""
        self._windowed = [has_window(config, layer) for layer in range(config.n_layer)]
        for block in self.transformer.h:  # LitGPT 0.5.13 fills its mask row by row, in each layer: `body` gives one
            block.attn.apply_sliding_window_attention = False

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean negative log-likelihood of `targets`, in nats per token; without targets, GPT's logits."""
        hidden, head, softcap = self.body(idx), self.lm_head, self.config.final_logit_softcapping
        if targets is None:
            logits: Tensor = head(hidden)
            return logits if softcap is None else do_softcapping(logits, softcap)
        return projected_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, softcap=softcap, workspace=self.workspace, each=self.each
        )

    def body(self, idx: Tensor) -> Tensor:
        """Compute GPT.forward up to the output projection, without a KV cache."""
        length, indices, window = idx.size(1), self.config.rope_indices, self.config.sliding_window_size
        cos, sin = self.cos[:length].unsqueeze(0), self.sin[:length].unsqueeze(0)
        hidden, dtype, mask = self.transformer.wte(idx), None, None
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden = hidden.float()  # the residual stream stays precise even if FSDP gathered the table in bfloat16
        if self.config.scale_embeddings:
            hidden = hidden * torch.tensor(self.config.n_embd**0.5, dtype=hidden.dtype)
        if any(self._windowed) and window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril().triu(1 - window)
            mask = torch.zeros_like(seen, dtype=dtype or hidden.dtype).masked_fill(~seen, -math.inf)
        for number, block in enumerate(self.transformer.h):
            turn = (cos, sin) if indices is None else (cos[..., indices[number]], sin[..., indices[number]])
            hidden = block(hidden, *turn, mask if self._windowed[number] else None)
        normed: Tensor = self.transformer.ln_f(hidden)
        return normed


class Workspace:
    """Memory of a CPU for what does not outlive a call, kept for the next one.

    Allocated anew for every chunk and call, the kernel would have to clear it page by page, up to a third of the time.
    On a GPU torch keeps what is freed by itself.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def of(self, name: str, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this name with any content; the one of the last time, if it still fits."""
        there = self._tensors.get(name)
        if there is None or (there.shape, there.dtype, there.device) != (shape, dtype, device):
            there = torch.empty(shape, dtype=dtype, device=device)
            self._tensors |= {name: there} if device.type == "cpu" else {}
        return there


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    workspace: Workspace | None = None,
    each: Tensor | None = None,
) -> Tensor:
    """The mean cross-entropy of `hidden @ weight.T + bias`, optionally softcapped, and of `targets`, a float32 scalar;
    that of each target is written into `each`.

    Under autocast the products take its precision and all else float32, as cross_entropy after a Linear would have it.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    rows, gradients = hidden.reshape(-1, hidden.size(-1)), torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, targets.reshape(-1), softcap, dtype, gradients, workspace or Workspace(), each
        )
    return loss


_LIFT = 1024.0  # a power of two; sums of float16 products stay far below 65,504


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        gradients: bool,
        workspace: Workspace,
        each: Tensor | None,
    ) -> Tensor:
        """The loss, and if asked for its gradients by `hidden`, `weight` and `bias`."""
        inputs, matrix, count = hidden.to(dtype), weight.to(dtype), len(targets)
        precise = torch.promote_types(dtype, torch.float32)
        rows = chunk_rows(count, len(weight), device=hidden.device.type)
        made = partial(workspace.of, device=hidden.device)
        scores_of_chunk = made("scores", rows, len(weight), dtype=precise)
        slopes_of_chunk = scores_of_chunk if dtype == precise else made("slopes", rows, len(weight), dtype=dtype)
        total = hidden.new_zeros((), dtype=precise)
        by_hidden = torch.empty_like(hidden, dtype=precise) if gradients else None
        by_weight = torch.empty_like(weight, dtype=precise) if gradients else None
        by_bias = torch.zeros_like(bias, dtype=precise) if gradients and bias is not None else None
        apart = gradients and dtype != precise and hidden.device.type != "cuda"  # see _multiply
        product = made("product", *weight.shape, dtype=dtype) if apart else None
        # The trainer scales the loss, but that reaches the gradient after its cast: float16 has nothing below 6e-8.
        lift = _LIFT if dtype == torch.float16 else 1.0
        alpha = 1 / (count * lift)
        for first in range(0, count, rows):
            part = slice(first, min(first + rows, count))
            scores, slopes = scores_of_chunk[: part.stop - first], slopes_of_chunk[: part.stop - first]
            _multiply(inputs[part], matrix.T, out=scores, workspace=slopes)
            if bias is not None:
                scores += bias
            slope = None
            if softcap is not None:  # LitGPT's do_softcapping in place, and its derivative
                scores.div_(softcap).tanh_()
                slope = 1 - scores * scores
                scores.mul_(softcap)
            # The summed cross-entropy; then `scores` become its gradient by themselves: probabilities, less 1 at the
            # target. Of the logarithms rather than of the probabilities, which are 0 where a target is all but
            # impossible.
            torch.log_softmax(scores, dim=-1, out=scores)
            places = targets[part].unsqueeze(1)
            found = scores.gather(1, places)
            total += -found.sum()
            if each is not None:
                torch.neg(found.squeeze(1), out=each[part])
            scores.exp_().scatter_add_(1, places, scores.new_full((), -1.0).expand(places.shape))
            if by_hidden is None or by_weight is None:
                continue
            if slope is not None:
                scores *= slope
            torch.mul(scores, lift, out=slopes)
            _multiply(slopes, matrix, out=by_hidden[part], alpha=alpha)
            _multiply(slopes.T, inputs[part], out=by_weight, workspace=product, alpha=alpha, add=first > 0)
            if by_bias is not None:
                by_bias.add_(scores.sum(0), alpha=1 / count)
        made_of = ((by_hidden, hidden), (by_weight, weight), (by_bias, bias))
        ctx.gradients = [None if gradient is None or of is None else gradient.to(of.dtype) for gradient, of in made_of]
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Let go of them, so that autograd may keep the tensors themselves as gradients instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        if scale.device.type != "cpu" or float(scale) != 1.0:  # a GPU would have to be waited for
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        return (*gradients, None, None, None, None, None, None)


def _multiply(
    one: Tensor, other: Tensor, *, out: Tensor, workspace: Tensor | None = None, alpha: float = 1.0, add: bool = False
) -> None:
    """Write, or add, `alpha` times a matrix product, summed in the precision of `out` where the device can; where it
    cannot, `workspace` is for the product in the operands' precision."""
    if one.dtype == out.dtype or one.device.type == "cuda":
        wider = {} if one.dtype == out.dtype else {"out_dtype": out.dtype}
        torch.addmm(out, one, other, **wider, beta=float(add), alpha=alpha, out=out)
        return
    product = torch.mm(one, other, out=workspace)
    if add:
        out.add_(product, alpha=alpha)
    else:
        torch.mul(product, out.new_tensor([alpha]), out=out)  # by a number it would be rounded to the product's type
