"""The policy's attention over packed rows that may share a prompt."""
