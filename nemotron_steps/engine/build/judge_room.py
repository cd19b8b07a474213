"""Questions that leave a judge no room for its answer, or that its chat template does not write, found before anything
is loaded. Nothing here may import torch.

A question is counted by its texts alone, and its environment asks about answers that say nothing: what is too long here
is too long in any case. Texts of fewer bytes than the judge's context cannot have more tokens, and are not looked at.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.environments.judged.judges import Messages, longer_context
from nemotron_steps.errors import ArtifactError, DataError, show_line
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import COMMON_ROLES, ChatFormat

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
        self._unwritten: dict[tuple[str, ...], tuple[str, ...]] = {}

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

    def unwritten(self, messages: Messages) -> tuple[str, ...]:
        """Roles of a question that the judge's template refuses or leaves out; see MeasuringJudge."""
        own = tuple(role for role in (message["role"] for message in messages) if role not in COMMON_ROLES)
        if own not in self._unwritten:
            self._unwritten[own] = self._tried(own, self._folder) if own and self._folder is not None else ()
        return self._unwritten[own]

    def _tried(self, own: tuple[str, ...], folder: Path) -> tuple[str, ...]:
        marked = [{"role": role, "content": f"what {role} said"} for role in ("user", *own)]
        try:
            text = ChatFormat.from_folder(folder).render_text(marked)
            return tuple(each["role"] for each in marked if each["content"] not in text)
        except ArtifactError:  # without a template; who loads it says so
            return ()
        except (TemplateError, TypeError, ValueError):  # `raise_exception` of a role that it does not know
            return own

    @cached_property
    def _folder(self) -> Path | None:
        """None for a judge that somebody else serves, or that is not here yet."""
        if self._config.backend == "http" or self._config.model is None:
            return None
        folder = hf_folder(self._config.model)
        return folder if (folder / "tokenizer.json").is_file() else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self._folder is None:
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.no_truncation()
        return tokenizer
