from pathlib import Path

import pytest

from tests.models.checkpoints import write_checkpoint

TINY = {
    "grpo": {"max_num_steps": 2, "num_prompts_per_step": 2, "num_generations_per_prompt": 2},
    "policy": {
        "max_total_sequence_length": 64,
        "train_global_batch_size": 4,
        "generation": {"max_new_tokens": 4},
        "megatron_cfg": {"optimizer": {"lr": 1e-3}},
    },
}
"""Two GRPO steps of two prompts: some seconds."""
ROWS = [{"prompt": f"{a} + {a}?", "answer": str(2 * a)} for a in range(1, 9)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of some 100,000 parameters."""
    folder = tmp_path_factory.mktemp("models") / "own-model"
    write_checkpoint("qwen3", folder, vocab_size=260)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
