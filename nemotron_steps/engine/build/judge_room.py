"""Questions that leave a judge no room for its answer, found before anything is loaded. Nothing here may import torch.

A question is counted by its texts alone, and its environment asks about answers that say nothing: what is too long here
is too long in any case. Texts of fewer bytes than the judge's context cannot have more tokens, and are not looked at.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.environments.judged.judges import Messages, longer_context
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.architecture import hf_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class JudgeToBe:
    """Stands for a judge that is not loaded yet.

    Args:
        role: one of JUDGE_ROLES.
    """

    def __init__(self, role: str, config: VllmModelConfig) -> None:
        self._role = role
        self._config = config

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """Never asked."""
        raise AssertionError("rows are checked without a judge")

    def refuse_longer(self, messages: Messages, where: str, *, max_tokens: int) -> None:
        """DataError for a question, of the row at `where`, that fills the context; see MeasuringJudge."""
        limit, texts = self._config.max_total_sequence_length, [message["content"] for message in messages]
        if sum(len(text.encode()) for text in texts) < limit or self._tokenizer is None:
            return
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = sum(len(each.ids) for each in encoded)
        if tokens < limit:
            return
        key = f"env.nemo_gym.{self._role}.responses_api_models.vllm_model.max_total_sequence_length"
        raise DataError(
            f"what {self._role} is asked about this row leaves no room for its answer",
            where=where,
            expected=f"fewer than {limit} tokens ({key})",
            found=f"{tokens}, without the answers that it is to judge",
            hints=(longer_context(key, tokens + max_tokens), *show_line(where)),
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """None for a judge that somebody else serves, or that is not here yet."""
        if self._config.backend == "http" or self._config.model is None:
            return None
        file = hf_folder(self._config.model) / "tokenizer.json"
        if not file.is_file():
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        return tokenizer
