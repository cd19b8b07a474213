"""What the CUDA path keeps for its gradients, predicted and counted where there is no GPU.

Every function of the path is the real one, told that its tensors are on a GPU: it allocates and saves what it would
there. Only the kernels themselves are not launched, so the numbers mean nothing and the shapes do.
"""

import json

import pytest
import torch
import torch.nn.functional as F

from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.engine.policy import layers as attention
from tests.config.layout.memory.kept_tensors import built, kept_bytes
from tests.config.layout.memory.shapes import flat
from tests.config.layout.memory.test_activations import SIZES, WITHIN, predicted
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

triton_kernels = pytest.importorskip("nemotron_steps.engine.kernels.triton_kernels")
triton_attention = pytest.importorskip("nemotron_steps.engine.kernels.triton_attention")
KERNELS = ("_swiglu_forward", "_heads_forward", "_squared_relu_forward")


class _NotLaunched:
    """In the place of a Triton kernel."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


class _FusedNorm(torch.autograd.Function):
    """torch's norm as it is on CUDA: it keeps its input and the root mean squares."""

    @staticmethod
    def forward(ctx, states, weight):
        ctx.save_for_backward(states, weight, states.new_empty(*states.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("forward passes are counted alone")


def _attend(query, key, value, rows, longest, out):
    out.zero_()
    return torch.zeros(query.shape[1], query.shape[0], dtype=torch.float32)


@pytest.fixture
def on_cuda(monkeypatch):
    def begin():
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        monkeypatch.setattr(F, "rms_norm", lambda states, shape, weight, eps: _FusedNorm.apply(states, weight))
        monkeypatch.setattr(F, "grouped_mm", _grouped)
        monkeypatch.setattr(attention, "packed_takes", lambda query, key: True)
        monkeypatch.setattr(triton_attention, "attention_forward", _attend)
        for name in KERNELS:
            monkeypatch.setattr(triton_kernels, name, _NotLaunched())

    return begin


class _Grouped(torch.autograd.Function):
    """The grouped product, which keeps both of its operands."""

    @staticmethod
    def forward(ctx, states, weight, offs):
        ctx.save_for_backward(states, weight, offs)
        return states.new_zeros(states.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("forward passes are counted alone")


def _grouped(states, weight, *, offs):
    return _Grouped.apply(states, weight, offs)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mixture", "latent"])
def test_what_is_kept_on_cuda_is_predicted(name, recomputed, on_cuda, tmp_path):
    if name in hybrid_twins.TWINS:
        hybrid_twins.write_hybrid(name, tmp_path, hidden_size=128, head_dim=32)
    else:
        write_checkpoint(name, tmp_path, **SIZES)
    megatron = {"activation_checkpointing": recomputed}
    policy = built(tmp_path, "bfloat16", megatron)
    on_cuda()
    counted, tokens = kept_bytes(policy, rows=32, group=8)
    values = {
        "policy": {
            "precision": "bfloat16",
            "megatron_cfg": megatron,
            "max_total_sequence_length": 64,
            "generation": {"backend": "embedded"},
        },
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 8},
        "cluster": {"gpus_per_node": 1},
    }
    shape = ModelShape.read(json.loads((tmp_path / "config.json").read_text()))
    found = predicted(shape, MemorySettings.read(flat(values).get), tokens, 32)
    assert found == pytest.approx(counted, rel=WITHIN if name in hybrid_twins.TWINS else 0.001)
