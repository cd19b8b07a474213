"""The `steps` and `nemotron` commands: parse, call the session below, print, exit code. No decisions are made here.

    main        entry points, dispatch, exit codes; the one place that renders an error is `errors`
    parser      every command and flag           completion  what makes a shell complete them
    terminal    colour, width, tables and trees without rich (a listing must answer in 150 ms)
    run, plans  run, plan and --dry-run          watch       a run while it works
    history     runs, logs, status, cancel, report
    catalog     list, show, types, explain       artifacts   artifacts ...
    environments  env ...                        recipes     the public recipes' command line
    doctor      what is missing on this machine  scaffold    new

Each command module is imported when its command is used, and imports heavy layers only when it needs them.
"""
