"""The `steps` and `nemotron` commands: parse, call the session below, print, exit code. No decisions are made here.

Each command module is imported when its command is used, and imports heavy layers only when it needs them.
"""
