"""The `steps` and `nemotron` commands: parse, call the layer below, print, exit code. No decisions are made here.

    main        entry points, dispatch, exit codes; the one place that renders an error is `errors`
    parser      every command and flag
    terminal    colour, width, tables and trees without rich (a listing must answer in 150 ms)
    request     command-line arguments → composed configs, supplied inputs and a plan
    catalog     list, show, types        planning  plan, run --dry-run      running  run, with `live` and `summary`
    history     runs, logs, status, cancel, report                         artifact_commands  artifacts ...
    environment_commands  env ...
    doctor      what is missing on this machine                            scaffold  new

Each command module is imported when its command is used, and imports heavy layers only when it needs them.
"""
