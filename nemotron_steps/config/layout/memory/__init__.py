"""The memory that a step's parts take on one device, predicted from its config and its model's shape: plain arithmetic
without torch, in bytes. docs/memory.md has the formulas and what was measured."""
