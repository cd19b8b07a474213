"""What is pinned can be installed where docs/install.md says."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

from packaging.specifiers import SpecifierSet

from tests.docs.pages import ROOT


def test_every_pin_installs_on_the_oldest_python_that_is_promised() -> None:
    """3.11.2 is Debian's; a patch release of Python is no reason to be refused."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE)
    wanted = {}
    for name in pins:
        with suppress(PackageNotFoundError):
            wanted[name] = metadata(name)["Requires-Python"] or ""
    assert len(wanted) > 100
    assert {name: text for name, text in wanted.items() if not SpecifierSet(text).contains("3.11.2")} == {}
