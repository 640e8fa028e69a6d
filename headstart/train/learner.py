"""One head in training: master weights, optimiser, and the draft pass in computing precision.

Only the head's own parameters are trainable. They are at least fp32; each pass computes with
copies in the computing dtype, through which gradients reach the masters. With `shard` FSDP2 does
the same with masters, gradients and moments split over the processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from headstart.models.documents import Documents
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.unroll import ChainContext, unroll
from headstart.train.averaging import Average
from headstart.train.losses.lm_head import LmHead
from headstart.train.optimizers import Optimizer, like, whole
from headstart.train.options import TrainOptions
from headstart.train.parallel import World
from headstart.vocab.own_tokens import OwnRule


class _Drafting(nn.Module):
    """All depths as one module, so that sharded weights are put together once per pass."""

    def __init__(self, head: MTPHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        embedded: Tensor,
        rotary: RotaryTable,
        states: Tensor,
        documents: Documents,
        num_depths: int,
        context: ChainContext,
        rows: Tensor | None,
    ) -> list[Tensor]:
        return unroll(
            self.head, embedded, rotary, states, documents,
            num_depths=num_depths, context=context, rows=rows,
        )  # fmt: skip


class Learner:
    """A head and its optimiser."""

    def __init__(
        self,
        name: str,
        options: TrainOptions,
        head: MTPHead,
        lm_head: LmHead,
        *,
        dtype: torch.dtype,
        world: World,
        own_lm_heads: tuple[LmHead, ...] = (),
    ) -> None:
        self.name, self.options, self.lm_head = name, options, lm_head
        self.own_lm_heads = own_lm_heads  # of modules that have them; they stay as they are
        self.own_rule: OwnRule | None = None  # where texts draft their own tokens, too
        if options.draft_vocab_own and lm_head.vocab_ids is not None:
            listed = lm_head.vocab_ids.tolist()
            self.own_rule = OwnRule.of(listed, len(lm_head.weight), options.draft_vocab_own)
        self.world, self.dtype = world, dtype
        self.is_sharded = options.shard and world.size > 1
        self._module = _Drafting(head)
        device = next(head.parameters()).device
        if self.is_sharded:
            mesh = init_device_mesh(device.type, (world.size,))
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            # Always back to shards after a pass: a validation has no backward that would do it.
            sharded = fully_shard(
                self._module, mesh=mesh, mp_policy=policy, reshard_after_forward=True
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        self.optimizer = Optimizer(self.parameters, options, fused=device.type == "cuda")
        self.average = Average(self.parameters, options.average) if options.average else None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Masters by their names in the head."""
        found = self._module.named_parameters()
        return {name.removeprefix("head."): parameter for name, parameter in found}

    def lm_heads(self, ids: Tensor) -> tuple[LmHead, ...]:
        """What losses over these texts run over: the trunk's, then those of modules.

        Where texts draft their own tokens, all that are in `ids`, for every row: a row's loss also
        sees tokens of the texts beside its own.
        """
        found = (self.lm_head, *self.own_lm_heads)
        return found if self.own_rule is None else tuple(head.beside(ids) for head in found)

    def draft(
        self,
        embedded: Tensor,
        rotary: RotaryTable,
        states: Tensor,
        documents: Documents,
        *,
        num_depths: int,
        context: ChainContext,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """States for the LM head, [T, D] of each depth; see `unroll` for `rows`."""
        arguments = (embedded, rotary, states, documents, num_depths, context, rows)
        masters = dict(self._module.named_parameters())
        if self.is_sharded or next(iter(masters.values())).dtype == self.dtype:
            result: list[Tensor] = self._module(*arguments)
        else:
            copies = {name: master.to(self.dtype) for name, master in masters.items()}
            result = functional_call(self._module, copies, arguments)
        return result

    def update(self, rate: float) -> float:
        """One step of the optimiser with the gradients of the whole batch; returns their norm.

        Nothing changes where the norm is not a finite number.
        """
        parameters = list(self.parameters.values())
        if not self.is_sharded:
            self.world.sum_gradients(parameters)
        limit = self.options.clip or float("inf")
        norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        if norm == norm and norm != float("inf"):
            self.optimizer.step(rate)
            if self.average is not None:
                self.average.update(self.parameters)
        self.optimizer.zero_grad()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Masters, moments and mean on the CPU, whole; every process must ask."""
        masters = {name: whole(p.detach()) for name, p in self.parameters.items()}
        result = {f"master.{name}": master for name, master in masters.items()}
        result |= self.optimizer.tensors()
        result |= {} if self.average is None else self.average.tensors()
        return {name: value.cpu() for name, value in result.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for name, parameter in self.parameters.items():
            parameter.copy_(like(tensors[f"master.{name}"], parameter))
        self.optimizer.load(tensors)
        if self.average is not None:
            self.average.load(tensors)
