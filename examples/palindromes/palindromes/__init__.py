"""A step that writes prompts, and the environment that grades the answers."""
