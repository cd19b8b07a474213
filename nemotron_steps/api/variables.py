"""A local profile's variables, in this process for as long as something of the profile is planned or run here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nemotron_steps.config.profiles import Profile


@contextmanager
def variables_of(profile: Profile | None) -> Iterator[None]:
    """Set a local profile's `env_vars` for a while: the next request may have another profile, or none.

    Configs read them (`${oc.env:NAME}`), so a plan made without them is not what the run does. The variables of any
    other executor's profile are those of its job alone.
    """
    values = profile.env_vars if profile is not None and profile.executor == "local" else {}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
