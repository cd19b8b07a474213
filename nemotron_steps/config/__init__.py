"""From a config file and overrides to one frozen model: find, compose, resolve, validate.

    compose      finds a config and composes it; hydra_loader, which it calls, has Hydra's part
    validation   composed values → pydantic model, every mistake at once; published: keys of published recipes
    profiles     env.toml: where a run is launched
    secrets      the same values with secrets masked, for print and for run folders

Importing this package, `compose` or `secrets` loads neither Hydra nor pydantic.
"""
