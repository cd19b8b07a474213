"""An environment with a tool."""
