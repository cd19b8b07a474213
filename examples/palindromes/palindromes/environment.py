"""Rewards answers that read the same in both directions."""

from __future__ import annotations

from typing import ClassVar

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Row, Session


class PalindromesConfig(EnvironmentConfig):
    """Options, under `env.nemo_gym.environments.palindromes`."""

    min_length: int = 4
    """Shorter answers earn nothing: one letter is always a palindrome."""


class Palindromes(Environment):
    """Share of an answer's letters that equal their mirror image."""

    name: ClassVar[str] = "palindromes"
    config_class = PalindromesConfig
    config: PalindromesConfig

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """1.0 for a palindrome, less for an answer that is nearly one."""
        letters = [character.lower() for character in response.text if character.isalpha()]
        if len(letters) < self.config.min_length:
            return GradeResult(0.0, {"too_short": 1.0})
        mirrored = sum(a == b for a, b in zip(letters, reversed(letters), strict=True)) / len(letters)
        return GradeResult(mirrored, {"too_short": 0.0})
