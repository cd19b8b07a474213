"""Which part of each parameter a rank holds, and whole tensors from all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.config.layout.parallel_config import stage_layers
from nemotron_steps.engine.policy.distributed.parallel_dims import Groups, device
from nemotron_steps.engine.policy.model import PolicyModel
from nemotron_steps.engine.policy.optimizer import ClipGroup
from nemotron_steps.engine.policy.param_and_grad_buffer import Kind, ParameterBuffer
from nemotron_steps.models.adapters import hf_weight, low_rank_sum, peft_name
from nemotron_steps.models.mapping import Parameter, megatron_shape, of_mtp, parameters, shard, split, unshard
from nemotron_steps.models.megatron_checkpoint import Place, join, sharded_tensors

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


class ModelShards:
    """This rank's parameters under the names they have in the whole model."""

    def __init__(self, model: PolicyModel, groups: Groups, *, mtp_apart: bool = False) -> None:
        self.model, self.groups, self.mtp_apart = model, groups, mtp_apart
        self.architecture, self.layout = model.architecture, model.layout
        self.parameters = parameters(self.architecture)
        self.adapters = model.adapters
        of_adapters = [each for pair in self.adapters for each in (pair.linear_in, pair.linear_out)]
        self.saved: list[Parameter] = of_adapters or self.parameters
        self._pairs = {pair.base.name: pair for pair in self.adapters}
        self._of_the_model = [each for each in self.parameters if not of_mtp(each, self.architecture)]
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        self.local: dict[str, torch.nn.Parameter] = {}
        for name, tensor in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers[int(parts[2])])
            self.local[".".join(parts)] = tensor
        self.shares_embedding = groups.stages > 1 and (
            self.architecture.tied_embeddings or self.architecture.trains_mtp
        )
        self.has_embedding_copy = self.shares_embedding and groups.is_last_stage
        if self.has_embedding_copy and self.architecture.tied_embeddings:
            self.local[_EMBEDDING] = self.local.pop(_OUTPUT)

    def make_buffers(self, *, sharded: bool) -> list[ParameterBuffer]:
        """Trainable parameters into flat buffers: by type, experts and what is clipped apart by themselves."""
        alike: dict[tuple[bool, bool, torch.dtype], list[tuple[Parameter, Kind, torch.nn.Parameter]]] = {}
        if not self.adapters:
            alike[False, False, self.model.dtype] = []
        for parameter in self.saved:
            tensor = self.local.get(parameter.name)
            if tensor is not None and tensor.requires_grad:
                key = parameter.of_experts, self._is_apart(parameter), tensor.dtype
                alike.setdefault(key, []).append((parameter, self._kind(parameter, tensor), tensor))
        groups, buffers = self.groups, []
        for (of_experts, _, _), each in sorted(alike.items(), key=lambda item: item[0][0]):
            data, tensor_ranks = (groups.expert_gradient, None) if of_experts else (groups.gradient, groups.tensor)
            buffers.append(ParameterBuffer(each, data, tensor_ranks, sharded=sharded))
        return buffers

    def clip_groups(self, buffers: Sequence[ParameterBuffer], *, sharded: bool) -> list[ClipGroup]:
        """What is clipped together, the model first; as many entries on every rank, whatever its stage has."""
        groups = self.groups
        dense = [groups.model, *([groups.gradient] if sharded else [])]
        experts = [groups.expert, groups.pipeline, *([groups.expert_gradient] if sharded else [])]
        found: list[ClipGroup] = []
        for apart in (False, True) if self.mtp_apart else (False,):
            own = [buffer for buffer in buffers if self._is_apart(buffer.slots[0].parameter) is apart]
            clipped = [([buffer for buffer in own if not buffer.of_experts], dense)]
            if self.architecture.is_moe:
                clipped.append(([buffer for buffer in own if buffer.of_experts], experts))
            found.append(clipped)
        return found

    def reduce_embedding_gradient(self, buffer: ParameterBuffer) -> None:
        """Add up the gradient of an embedding that the first and the last stage both hold. Collective."""
        at_an_end = self.groups.is_first_stage or self.groups.is_last_stage
        if not self.shares_embedding or not at_an_end or buffer.of_experts:
            return
        for slot in buffer.slots:
            if slot.parameter.name == _EMBEDDING:
                dist.all_reduce(buffer.grads[slot.start : slot.end], group=self.groups.embedding)

    def load(self, weights: Iterable[tuple[Parameter, Tensor]]) -> None:
        """Copy this rank's parts out of whole Megatron tensors, or of those with `own_experts` alone."""
        with torch.no_grad():
            for parameter, tensor in weights:
                target = self.local.get(parameter.name)
                if target is None:
                    continue
                if parameter.of_experts:
                    target.copy_(tensor if len(tensor) == len(target) else tensor[self.own_experts])
                    continue
                missing = -tensor.shape[0] % self.layout.tensor if _is_vocabulary(parameter) else 0
                whole = F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
                target.copy_(shard(parameter, whole, self.groups.tensor_rank, self.layout.tensor))

    @property
    def own_experts(self) -> slice:
        """Which of a layer's experts this rank holds."""
        count = self.architecture.num_experts // self.layout.expert
        return slice(self.groups.expert_rank * count, (self.groups.expert_rank + 1) * count)

    def hf_tensors(self, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face-named whole tensors, one at a time, views of live weights where possible. Collective."""
        for parameter in self.parameters if with_mtp else self._of_the_model:
            yield from split(parameter, self._whole(parameter), self.architecture)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT-named whole tensors of the adapters, one at a time, A before B of each projection. Collective."""
        for pair in self.adapters:
            linear_in = self._whole(pair.linear_in)
            for name, rows in split(pair.linear_out, self._whole(pair.linear_out), self.architecture):
                yield peft_name(hf_weight(name), "A"), linear_in
                yield name, rows

    def current(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a weight, its adapter added where it has one."""
        pair = self._pairs.get(name)
        if pair is None:
            return tensor.detach()
        scale = self.model.adapter_scale
        linear_in, linear_out = (self.local[each.name].detach() for each in (pair.linear_in, pair.linear_out))
        return low_rank_sum(tensor.detach(), linear_in, linear_out, scale)

    def sharded_state(
        self,
        tensors: Callable[[str, torch.nn.Parameter], Tensor | None],
        prefix: str = "",
        *,
        of: Sequence[Parameter] | None = None,
    ) -> dict[str, list[Any]]:
        """megatron-core ShardedTensors of what parameters (default: of a checkpoint) have; None is left out."""
        state = {}
        for parameter in self.saved if of is None else of:
            local = self.local.get(parameter.name)
            tensor = None if local is None else tensors(parameter.name, local)
            if tensor is not None:
                place = self._place(parameter)
                state[parameter.name] = sharded_tensors(
                    parameter, tensor.detach(), self.architecture, place, prefix=prefix
                )
        return state

    def copy_loaded(self, loaded: dict[str, Any], target: Callable[[str, torch.nn.Parameter], Tensor]) -> None:
        """Copy what was loaded for `sharded_state` into its targets."""
        by_name = {parameter.name: parameter for parameter in (*self.parameters, *self.saved)}
        with torch.no_grad():
            for name, parts in loaded.items():
                into = target(name, self.local[name])
                into.copy_(join(by_name[name], parts).reshape(into.shape))

    def _place(self, parameter: Parameter) -> Place:
        groups = self.groups
        if parameter.of_experts:
            replica = groups.expert_gradient_rank
        else:
            same = groups.tensor_rank if parameter.tp_dim is None else 0
            copy = int(self.has_embedding_copy and parameter.name == _EMBEDDING)
            # Any number that is 0 for exactly one of the ranks that hold this part.
            replica = dist.get_rank(groups.gradient) + same + copy
        return Place(groups.tensor_rank, groups.tensor_size, groups.expert_rank, groups.expert_size, replica)

    def _kind(self, parameter: Parameter, tensor: Tensor) -> Kind:
        replicated = self.layout.tensor > 1 and parameter.tp_dim is None and not parameter.of_experts
        # Heads are split over tensor ranks, so each sees part of the QK-norms' gradient; under sequence parallelism
        # each sees part of the tokens.
        split_heads = ".q_layernorm." in parameter.name or ".k_layernorm." in parameter.name
        split_tokens = self.layout.sequence_parallel and parameter.layer is not None
        # Each rank has some of the rows of a column-parallel linear's B, and so of the gradient of its A.
        split_rows = parameter.of_adapter and ".linear_in." in parameter.name
        return Kind(
            decayed=tensor.dim() > 1,  # Megatron's rule: matrices are, norms and biases are not
            replicated=replicated,
            partial=replicated and (split_heads or split_tokens or split_rows),
            duplicate=self.has_embedding_copy and parameter.name == _EMBEDDING,
        )

    def _whole(self, parameter: Parameter, *, adapted: bool = True) -> Tensor:
        local = self.local.get(parameter.name)
        tensor = None
        if local is not None:
            own = self.current(parameter.name, local) if adapted else local.detach()
            tensor = self._gathered(parameter, own)
        if self.groups.stages > 1:
            tensor = self._from_stage(parameter, tensor)
        assert tensor is not None
        return tensor

    def _gathered(self, parameter: Parameter, tensor: Tensor) -> Tensor:
        if parameter.of_experts and self.layout.expert > 1:
            return torch.cat(_all_gather(tensor, self.groups.expert))
        if self.layout.tensor > 1 and parameter.tp_dim is not None:
            tensor = unshard(parameter, _all_gather(tensor, self.groups.tensor))
        return tensor[: self.architecture.vocab_size] if _is_vocabulary(parameter) else tensor

    def _from_stage(self, parameter: Parameter, tensor: Tensor | None) -> Tensor:
        stages = self.groups.stages
        if parameter.layer is not None:
            layers = stage_layers(self.architecture.num_layers, stages)
            owner = next((stage for stage, own in enumerate(layers) if parameter.layer in own), stages - 1)
        else:
            owner = 0 if parameter.name == _EMBEDDING else stages - 1
        if owner != self.groups.stage or tensor is None:
            dtype = self.model.parameter_dtype(parameter.name)
            tensor = torch.empty(megatron_shape(parameter), dtype=dtype, device=device())
        tensor = tensor.contiguous()
        dist.broadcast(tensor, dist.get_process_group_ranks(self.groups.pipeline)[owner], group=self.groups.pipeline)
        return tensor

    def _is_apart(self, parameter: Parameter) -> bool:
        return self.mtp_apart and of_mtp(parameter, self.architecture)


def _is_vocabulary(parameter: Parameter) -> bool:
    return parameter.layer is None and parameter.tp_dim is not None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor.contiguous(), group=group)
    return pieces
