"""Rows as anybody writes them → the project's own: lines of a file, messages and tools, prompts, chats and pairs."""
