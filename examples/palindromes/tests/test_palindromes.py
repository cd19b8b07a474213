from __future__ import annotations

from nemotron_steps.testing import environment_conformance, step_conformance

TestStep = step_conformance("data_prep/palindrome_prompts", overrides=("train=8", "validation=2", "heldout=2"))

ROWS = [
    {
        "responses_create_params": {"input": f"Answer with a palindrome. Use letters of: {letters}"},
        "agent_ref": {"type": "responses_api_agents", "name": "palindromes"},
    }
    for letters in ("level", "noon")
]

# The reward is by degrees: letters that mirror each other by chance earn their share.
TestEnvironment = environment_conformance("palindromes", rows=ROWS, answer=lambda row: "level", worthless=0.5)
