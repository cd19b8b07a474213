"""The `steps` and `nemotron` commands: parse, call the session below, print, exit code. No decisions are made here."""
