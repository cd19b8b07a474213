"""What `import nemotron_steps` offers, and that it does nothing until it is asked."""

import subprocess
import sys

import nemotron_steps

NAMES = {"DPO", "GRPO", "SFT", "Artifacts", "Planned", "Registry", "Result", "StepsError"}
NAMES |= {"evaluate", "open_run", "plan", "run"}


def test_the_public_names_are_exactly_these() -> None:
    assert set(nemotron_steps.__all__) == NAMES | {"__version__"}
    for name in NAMES:
        assert getattr(nemotron_steps, name).__name__ == name
        assert name in dir(nemotron_steps)
    assert not hasattr(nemotron_steps, "trainer")


def test_importing_the_package_imports_none_of_it() -> None:
    code = "import sys, nemotron_steps; print(*[n for n in sys.modules if n.startswith('nemotron_steps')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert sorted(done.stdout.split()) == ["nemotron_steps", "nemotron_steps.deprecated"]
