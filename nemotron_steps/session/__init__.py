"""From what a command line or a Python call requests to a finished run; `cli` and `api` only say it and show it."""
