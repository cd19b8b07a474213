"""A generator behind an OpenAI-compatible HTTP endpoint on loopback, for agents and judges."""
