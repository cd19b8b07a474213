"""The secrets of one run, masked in everything it writes: those of the environment and those in what was asked."""

from __future__ import annotations

import os
from typing import Any

from nemotron_steps.config.secrets import Redactor, secrets_in
from nemotron_steps.errors import StepsError


class Secrets(Redactor):
    """What must not be written down.

    Args:
        sources: configs, requests and overrides. The value of a secret key anywhere in them (`{"api_key": "x"}`,
            `"a.api_key=x"`, `["--api-key", "x"]`) is masked wherever it turns up later: in a log line, a sample, an
            error.
    """

    def __init__(self, *sources: Any) -> None:
        super().__init__(os.environ, secrets_in(sources))

    def mask_error(self, error: StepsError) -> None:
        """Mask every text of an error, for whoever shows it knows less about the run's secrets."""
        error.what = self.mask_text(error.what)
        error.where, error.expected, error.found = (
            None if text is None else self.mask_text(text) for text in (error.where, error.expected, error.found)
        )
        error.hints = tuple(self.mask_text(hint) for hint in error.hints)
        error.args = (error.what,)
