"""A local profile's variables, in this process for as long as something of the profile is planned or run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemotron_steps.config.process_variables import variables_set
from nemotron_steps.config.profiles import Profile


@contextmanager
def variables_of(profile: Profile | None) -> Iterator[None]:
    """Set a local profile's `env_vars` for a while: the next request may have another profile, or none.

    Configs read them (`${oc.env:NAME}`), so a plan made without them is not what the run does.
    """
    with variables_set(profile.variables_here if profile is not None else {}):
        yield
