"""LitGPT's model with its loss, computed without ever holding the logits of a whole batch.

The projection onto the vocabulary and the cross-entropy are most of a small model's step. Done apart, they write and
read batch x sequence x vocabulary numbers half a dozen times, in two precisions. Here they go together through a few
rows at a time, and the gradients are ready when the loss is: three matrix products and one softmax, forward and
backward, as in Hsu et al. 2024 (https://arxiv.org/abs/2410.10989). torch's own `linear_cross_entropy` does likewise,
but knows neither autocast nor the softcapping of some models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from litgpt import lora
from litgpt.config import Config
from litgpt.model import GPT, CausalSelfAttention
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from litgpt_demo.models.estimates import chunk_rows
from litgpt_demo.training.context import SamplePart
from litgpt_demo.training.experts import Balance
from litgpt_demo.training.rounding import rounded, rounds_by_hand
from litgpt_demo.training.tensor import gathered


class LossGPT(GPT):  # type: ignore[misc]
    """A GPT that, given targets, returns the mean loss instead of logits. Its weights have GPT's own names.

    The loss is computed inside `forward` so that whatever wraps the model (DDP, FSDP, autocast) sees one call.
    """

    masked = False
    """True if some targets are negative: they are left out of the sum, whose mean is still over all."""

    def __init__(self, config: Config, *, balance_weight: float = 0.0) -> None:
        """
        Args:
            balance_weight: of the load-balance loss in the gradient; the loss that is returned is without it.
        """
        super().__init__(config)
        self.workspace = Workspace()
        self.balance_weight, self.balance = balance_weight, Balance(self)
        self.imbalance: Tensor | None = None
        """The load-balance loss of the last pass, of a mixture of experts."""
        self.context: SamplePart | None = None
        """The part of each sample that this rank has, where ranks divide them."""
        self.tensor_mesh: DeviceMesh | None = None
        """The ranks that divide the products, where they do."""

    def divide_samples(self, context: SamplePart) -> None:
        """Make the model take its part of each sample."""
        self.context = context
        for module in self.modules():
            if isinstance(module, CausalSelfAttention):
                attention, shared = (
                    module.scaled_dot_product_attention,
                    self.config.n_head // self.config.n_query_groups,
                )
                module.scaled_dot_product_attention = partial(context.attend, attention, shared)

    def forward(self, idx: Tensor, targets: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The mean negative log-likelihood of `targets`, in nats per token; without targets, GPT's logits.

        Where ranks divide samples, the mean over this rank's part.
        """
        if targets is None:
            return super().forward(idx, *args, **kwargs)
        self.balance.listen()
        hidden = self.body(idx)
        unbalanced = self.balance.told()
        if self.context is not None:
            targets = self.context.own(targets, 1)
        head: Any = getattr(self.lm_head, "linear", self.lm_head)  # LoRA's layer has the weights in one of its own
        weight, bias, part = head.weight, head.bias, None
        if self.tensor_mesh is not None:
            hidden, part = gathered(hidden, self.tensor_mesh, 1), VocabularyPart.of(self.tensor_mesh, len(weight))
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        loss = projected_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            softcap=self.config.final_logit_softcapping,
            workspace=self.workspace,
            masked=self.masked,
            part=part,
        )
        if unbalanced is not None:
            self.imbalance = unbalanced.detach()
            loss = loss + self.balance_weight * (unbalanced - self.imbalance)
        return loss

    def body(self, idx: Tensor) -> Tensor:
        """Compute GPT.forward up to the output projection, without a KV cache; of this rank's part of the samples."""
        length, indices = idx.size(1), self.config.rope_indices
        cos, sin = self.cos[:length], self.sin[:length]
        if self.context is not None:
            idx, cos, sin = self.context.own(idx, 1), self.context.own(cos, 0), self.context.own(sin, 0)
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
        hidden = self.transformer.wte(idx)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.float()  # the residual stream stays precise even if FSDP gathered the table in bfloat16
        if self.config.scale_embeddings:
            hidden = hidden * torch.tensor(self.config.n_embd**0.5, dtype=hidden.dtype)
        for number, block in enumerate(self.transformer.h):
            turn = (cos, sin) if indices is None else (cos[..., indices[number]], sin[..., indices[number]])
            hidden = block(hidden, *turn)
        normed: Tensor = self.transformer.ln_f(hidden)
        return normed


class LoraLossGPT(LossGPT, lora.GPT):  # type: ignore[misc]
    """The same of LitGPT's GPT with low-rank adapters, which alone are trained."""

    def __init__(self, config: lora.Config, *, balance_weight: float = 0.0) -> None:
        super().__init__(config, balance_weight=balance_weight)
        lora.mark_only_lora_as_trainable(self)


def loss_model(config: Config, *, balance_weight: float = 0.0) -> LossGPT:
    """Return the model of a config, with adapters if it is LoRA's."""
    kind = LoraLossGPT if isinstance(config, lora.Config) else LossGPT
    return kind(config, balance_weight=balance_weight)


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """The ids that this rank has the logits of, where ranks divide the vocabulary."""

    first: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh, ids: int) -> VocabularyPart:
        """This rank's of `ids`, which the ranks of `mesh` divide equally."""
        return cls(first=mesh.get_local_rank() * ids // mesh.size(), group=mesh.get_group())

    def share(self, within: Tensor) -> Tensor:
        """Return the logarithm of this rank's ids' share of all probability, by row.

        Args:
            within: the logarithm of the sum of exponentials of this rank's logits, by row.
        """
        every = within.new_empty(self.group.size(), *within.shape)
        dist.all_gather_into_tensor(every.flatten(0, 1), within.contiguous(), group=self.group)
        return within - torch.logsumexp(every, 0)


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
    masked: bool = False,
    part: VocabularyPart | None = None,
) -> Tensor:
    """The mean cross-entropy of `hidden @ weight.T + bias`, optionally softcapped, and of `targets`, a float32 scalar.

    Under autocast the products take its precision and all else float32, as cross_entropy after a Linear would have it.

    Args:
        masked: whether a target may be negative, which counts as one without a loss.
        part: the ids that `weight` has the rows of, where it does not have all. The loss is of all, and the gradient by
            `hidden` a summand of the whole.
    """
    device = hidden.device.type
    gradients = torch.is_grad_enabled()
    options = _Options(
        softcap=softcap,
        dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype,
        gradients=gradients,
        trains_weight=gradients and weight.requires_grad,
        workspace=workspace or Workspace(),
        masked=masked,
        part=part,
    )
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.size(-1)), weight, bias, targets.reshape(-1), options
    )
    return loss


@dataclass(frozen=True, kw_only=True)
class _Options:
    softcap: float | None
    dtype: torch.dtype
    gradients: bool
    trains_weight: bool
    """False where the projection's weights are frozen, whose gradient is a third of the products."""
    workspace: Workspace
    masked: bool
    part: VocabularyPart | None


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Any) -> Tensor:
        """Takes what `_loss_and_gradients` takes."""
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ctx.gradients = _loss_and_gradients(hidden, *others)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Let go of them, so that autograd may keep the tensors themselves as gradients instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        if scale.device.type != "cpu" or float(scale) != 1.0:  # a GPU would have to be waited for
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        return (*gradients, None, None)


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: _Options,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and if asked for its gradients by `hidden`, `weight` and `bias`."""
    dtype, gradients, trains, softcap = options.dtype, options.gradients, options.trains_weight, options.softcap
    cast = rounded if rounds_by_hand(dtype, hidden.device.type) else lambda values: values.to(dtype)
    inputs, matrix, count = cast(hidden), cast(weight), len(targets)
    precise = torch.promote_types(dtype, torch.float32)
    rows = chunk_rows(count, len(weight), device=hidden.device.type)
    made = partial(options.workspace.of, device=hidden.device)
    scores_of_chunk = made("scores", rows, len(weight), dtype=precise)
    slopes_of_chunk = (
        scores_of_chunk if inputs.dtype == precise else made("slopes", rows, len(weight), dtype=inputs.dtype)
    )
    total = hidden.new_zeros((), dtype=precise)
    by_hidden = torch.empty_like(hidden, dtype=precise) if gradients else None
    by_weight = torch.empty_like(weight, dtype=precise) if trains else None
    by_bias = torch.zeros_like(bias, dtype=precise) if trains and bias is not None else None
    apart = trains and inputs.dtype != precise and hidden.device.type != "cuda"  # see _multiply
    product = made("product", *weight.shape, dtype=inputs.dtype) if apart else None
    for first in range(0, count, rows):
        here = slice(first, min(first + rows, count))
        scores, slopes = scores_of_chunk[: here.stop - first], slopes_of_chunk[: here.stop - first]
        _multiply(inputs[here], matrix.T, out=scores, workspace=slopes)
        if bias is not None:
            scores += bias
        slope = None if softcap is None else _softcap_(scores, softcap)
        total += _cross_entropy_(scores, targets[here], options)
        if by_hidden is None:
            continue
        if slope is not None:
            scores *= slope
        slopes.copy_(scores)
        _multiply(slopes, matrix, out=by_hidden[here], alpha=1 / count)
        if by_weight is not None:
            _multiply(slopes.T, inputs[here], out=by_weight, workspace=product, alpha=1 / count, add=first > 0)
        if by_bias is not None:
            by_bias.add_(scores.sum(0), alpha=1 / count)
    if options.part is not None:
        dist.all_reduce(total, group=options.part.group)
    return total / count, list(map(_in_precision_of, (by_hidden, by_weight, by_bias), (hidden, weight, bias)))


def _in_precision_of(gradient: Tensor | None, of: Tensor | None) -> Tensor | None:
    return None if gradient is None or of is None else gradient.to(of.dtype)


def _softcap_(scores: Tensor, cap: float) -> Tensor:
    """LitGPT's do_softcapping in place; returns its derivative."""
    scores.div_(cap).tanh_()
    slope = 1 - scores * scores
    scores.mul_(cap)
    return slope


def _cross_entropy_(scores: Tensor, targets: Tensor, options: _Options) -> Tensor:
    """The rows' summed cross-entropy; `scores` become its gradient by themselves: probabilities, less 1 at the target.

    Rows with a negative target have neither a loss nor a gradient. Of a part of the vocabulary, the summands of the
    rows whose target is in it.
    """
    places, there, part = targets.unsqueeze(1), scores.new_ones(()), options.part
    if part is not None:
        places = places - part.first
    if part is not None or options.masked:
        there = ((places >= 0) & (places < scores.size(1))).to(scores.dtype)
        places = places.clamp(0, scores.size(1) - 1)
    aimed = scores.gather(1, places)
    logs = _softmax_(scores, places, aimed)
    if part is not None:
        share = part.share(aimed - logs)
        logs += share
        scores *= share.exp()
    loss = -(logs * there).sum()
    scores.scatter_add_(1, places, -there.expand(places.shape))
    if options.masked:
        scores *= (targets >= 0).unsqueeze(1)
    return loss


_SMALLEST_LOG = -80.0  # float32's probabilities lose digits below e^-87


def _softmax_(scores: Tensor, places: Tensor, aimed: Tensor) -> Tensor:
    """Make probabilities of logits in place, and return the logarithms of those at `places`.

    Of the logarithms rather than of the probabilities, which are 0 where a target is all but impossible. On a CPU the
    probabilities are made in one pass, and the logarithms of those few rows from what is likeliest in them.

    Args:
        aimed: the logits at `places`.
    """
    if scores.device.type != "cpu":
        torch.log_softmax(scores, dim=-1, out=scores)
        logs = scores.gather(1, places)
        scores.exp_()
        return logs
    highest = scores.amax(dim=-1, keepdim=True)
    torch.softmax(scores, dim=-1, out=scores)
    logs = scores.gather(1, places).log()
    far = (~(logs.squeeze(1) > _SMALLEST_LOG)).nonzero().squeeze(1)  # what is no number is among them
    if len(far):
        logs[far] = aimed[far] - highest[far] + scores[far].amax(dim=-1, keepdim=True).log()
    return logs


def _multiply(
    one: Tensor, other: Tensor, *, out: Tensor, workspace: Tensor | None = None, alpha: float = 1.0, add: bool = False
) -> None:
    """Write, or add, `alpha` times a matrix product, summed in the precision of `out` where the device can.

    Args:
        workspace: for the product in the operands' precision, where the device cannot.
    """
    beta = 1.0 if add else 0.0
    if one.dtype == out.dtype:
        torch.addmm(out, one, other, beta=beta, alpha=alpha, out=out)
    elif one.device.type == "cuda":
        torch.addmm(out, one, other, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        product = torch.mm(one, other, out=workspace)
        if add:
            out.add_(product, alpha=alpha)
        elif alpha == 1.0:
            out.copy_(product)  # in one pass; `mul` would make two of it
        else:
            torch.mul(product, alpha, out=out)
