"""A transformers causal LM that answers with logprobs, and how it is cut for tensor parallelism."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemotron_steps.engine.losses.loss import SampledFrom
from nemotron_steps.engine.policy.logprob import OutputLayer, linear_logprobs
from nemotron_steps.errors import ArtifactError, UnsupportedError, fetch_again
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import WeightReader, two_for_one

_ON_DISK = {"nemotron_h": "backbone."}
"""What checkpoints say where transformers has `model.` in memory."""


class LogprobModel(torch.nn.Module):
    """The decoder, then logprobs: one module, so that FSDP gathers the output layer while its weight is read."""

    def __init__(self, hf: Any, *, chunk: int, sampled_from: SampledFrom) -> None:
        super().__init__()
        self.hf, self.chunk = hf, chunk
        self.sampled_from = replace(sampled_from, temperature=sampled_from.temperature / logit_factor(hf.config))

    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers, in order."""
        return list(self.hf.model.layers)

    def forward(self, input_ids: Tensor, source: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [R] logprobs and entropies of targets [R], read at cells `source` [R] of ids [n, W]."""
        hidden = self.hf.model(input_ids=input_ids, use_cache=False).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, source)
        weight = self.hf.get_output_embeddings().weight
        layer = OutputLayer(self.chunk, weight.shape[0])
        return linear_logprobs(chosen.to(weight.dtype), weight, targets, layer, sampled_from=self.sampled_from)


def load_hf_model(folder: Path, *, activation_checkpointing: bool) -> Any:
    """A float32 causal LM on CPU. UnsupportedError or ArtifactError where its logprobs would be wrong."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a run draws its own
    read: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, trust_remote_code=False, local_files_only=True, output_loading_info=True
    )
    hf, loaded = read
    _check_tensors(hf, loaded, folder)
    noise = ("dropout", "pdrop", "jitter")
    dropouts = {k: v for k, v in hf.config.to_dict().items() if any(kind in k for kind in noise) and v}
    if dropouts:
        what, hint = "a policy with dropout has no well-defined logprobs", f"set {', '.join(sorted(dropouts))} to 0"
        raise _refused(folder, what, str(dropouts), f"{hint} in {folder / 'config.json'}")
    if not hasattr(hf, "model") or not hasattr(hf.model, "layers") or hf.get_output_embeddings() is None:
        what = "the dtensor policy needs a decoder with `model.layers` and an output layer"
        hint = "policy.dtensor_cfg.enabled=false   # the megatron policy, for the families that it knows"
        raise _refused(folder, what, type(hf).__name__, hint)
    mamba = Architecture.from_folder(folder).mamba if hf.config.model_type == "nemotron_h" else None
    for layer in hf.model.layers:
        if mamba is not None and hasattr(layer.mixer, "time_step_limit"):  # as generators bound them
            layer.mixer.time_step_limit = mamba.time_step_limit
    difference = _difference(hf.eval())
    if difference:  # every logprob would be wrong
        what = "the model's logits are not the product of its hidden states and its output layer's weight"
        hint = "--input policy=PATH   # a model with a plain output layer, such as Qwen, Llama or Mistral"
        raise _refused(folder, what, f"{type(hf).__name__}, whose logits differ by up to {difference:.3g}", hint)
    hf.train()
    if activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return hf


def _refused(folder: Path, what: str, found: str, hint: str) -> UnsupportedError:
    return UnsupportedError(what, where=str(folder / "config.json"), found=found, hints=(hint,))


def _check_tensors(hf: Any, loaded: Mapping[str, Any], folder: Path) -> None:
    """Refuse weights of which transformers would draw some, leave some out, or keep two for one."""
    WeightReader(folder)  # refuses what nobody could read
    missing, extra = sorted(loaded["missing_keys"]), sorted(loaded["unexpected_keys"])
    if missing or extra:
        lacks = "the checkpoint lacks the tensor"
        more = "the checkpoint has a tensor that this model has no place for:"
        raise ArtifactError(
            f"{lacks} {missing[0]}" if missing else f"{more} {extra[0]}",
            where=str(folder),
            found=f"{len(missing)} missing, {len(extra)} more",
            hints=fetch_again(folder),
        )
    tied = hf.config.get_text_config().tie_word_embeddings and hf._tied_weights_keys
    output, words = hf.get_output_embeddings(), hf.get_input_embeddings()
    if tied and output is not None and output.weight is not words.weight:
        raise two_for_one(folder / "config.json")


def logit_factor(config: Any) -> float:
    """What the model multiplies its output layer's products with (Cohere, Granite); 1 for most."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def _difference(hf: Any) -> float:
    """Between a model's logits and its output layer's products, 0 for rounding: a bias (Phi), a soft cap (Gemma 2)."""
    ids = torch.arange(8).remainder(hf.get_output_embeddings().weight.shape[0]).unsqueeze(0)
    logits = hf(input_ids=ids, use_cache=False).logits
    hidden = hf.model(input_ids=ids, use_cache=False).last_hidden_state
    computed = hidden @ hf.get_output_embeddings().weight.t() * logit_factor(hf.config)
    difference = float((computed - logits).abs().max())
    if getattr(hf.config, "final_logit_softcapping", None):  # of small logits, a cap changes nothing yet
        return max(difference, 1e-9)
    return 0.0 if difference <= 1e-3 * float(logits.abs().max()) else difference


def tensor_parallel(hf: Any, mesh: DeviceMesh) -> None:
    """Cut linears over the ranks of a mesh as the model's own plan says. UnsupportedError without a plan."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    # Embeddings stay whole: the output layer may be tied to them, and logprobs read its weight as one.
    plan = {
        name: style
        for name, style in (getattr(hf.model.config, "base_model_tp_plan", None) or {}).items()
        if style != "embedding_rowwise"
    }
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # Norms of heads: each rank has some of the heads, in dimension 2.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    unknown = sorted(set(plan.values()) - set(styles))
    if not plan or unknown:
        raise UnsupportedError(
            "this model has no tensor-parallel plan that is implemented",
            where="policy.dtensor_cfg.tensor_parallel_size",
            expected=" | ".join(styles),
            found=", ".join(unknown) or "no plan",
            hints=("policy.dtensor_cfg.tensor_parallel_size=1",),
        )
    parallelize_module(hf.model, mesh, {name: styles[style] for name, style in plan.items()})


def checkpoint_tensors(name: str, tensor: Tensor, family: str) -> Iterator[tuple[str, Tensor]]:
    """A parameter under the names checkpoints use: transformers fuses experts in memory but not on disk."""
    prefix = _ON_DISK.get(family)
    if prefix is not None and name.startswith("model."):
        name = prefix + name.removeprefix("model.")
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts") or kind not in ("gate_up_proj", "up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor.unbind()):
        if kind != "gate_up_proj":
            yield f"{stem}.{expert}.{kind}.weight", weight
        else:
            for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield f"{stem}.{expert}.{part}_proj.weight", half
