"""Keys of the published Nemotron 3 RL configs that no schema here has: renamed, always so, or refused with the reason.

    table.py       every such key, one a row
    translate.py   a config with such keys → the same in this project's keys

docs/published_keys.md lists them all.
"""
