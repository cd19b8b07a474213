"""From a config file and overrides to one frozen model: find, compose, resolve, validate.

    search   where a step's config files are (light)
    compose  Hydra's composition and override grammar, with the origin of every key (imports Hydra when called)
    validation  composed values → pydantic model, every mistake at once (imports pydantic when called)
    profiles    env.toml: where a run is launched
    secrets     the same values with secrets masked, for print and for run folders

Importing this package, or any module of it but `hydra_loader` and `schema`, loads neither Hydra nor pydantic.
"""
