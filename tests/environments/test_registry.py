import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.environments import registry
from nemotron_steps.errors import ConfigError, UnknownNameError, UnsupportedError
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.containers import ContainerSandbox


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.create("reasoning_gim")
    assert "reasoning_gym" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("name", "settings", "hints"),
    [
        ("reward_function", {}, ("functions=VALUE",)),
        ("code_gen", {"max_stepz": 3}, ("max_steps=3",)),
        ("code_gen", {"qqq": 3}, ()),
        ("code_gen", {"max_steps": "no"}, ()),
    ],
)
def test_wrong_settings_are_told_with_what_to_write(
    name: str, settings: dict[str, Any], hints: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.settings_of(name, settings)
    where = f"env.nemo_gym.environments.{name}"
    assert caught.value.hints == tuple(f"{where}.{hint}" for hint in hints)
    assert caught.value.where == where and caught.value.found == (", ".join(settings) or "none")
    assert "max_steps" in str(caught.value.expected)


@pytest.mark.parametrize("name", ["code_gen", "math_formal_lean", "ns_tools"])
def test_programs_run_in_the_sandbox_and_the_image_that_the_settings_name(name: str) -> None:
    environment: Any = registry.environment_class(name)
    made = environment(registry.settings_of(name, {"sandbox": "podman", "sandbox_image": "an/image:1"}), {})
    assert isinstance(made.sandbox, ContainerSandbox)
    assert (made.sandbox.engine, made.sandbox.image) == ("podman", "an/image:1")
    plain = environment(registry.settings_of(name, {}), {})
    assert isinstance(plain.sandbox, BubblewrapSandbox)


def test_the_layer_is_light() -> None:
    code = (
        "import sys, nemotron_steps.environments.registry as r\n"
        "[r.environment_class(n) for n in r.BUILT_IN]\n"
        "names = 'torch ray vllm hydra wandb reasoning_gym sympy transformers numpy'\n"
        "heavy = set(names.split()) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not any(m.startswith(('nemotron_steps.engine','nemotron_steps.manifest')) for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plug_ins_are_refused_where_they_are_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, value: str) -> Any:
        return SimpleNamespace(name=name, value=value, dist=SimpleNamespace(name=value.partition(":")[0]))

    entries = (
        entry("odd", "builtins:dict"),
        entry("gone", "no_such_module:A"),
        entry("two", "b:A"),
        entry("two", "a:A"),
    )
    monkeypatch.setattr(registry, "_plugins", lambda path: entries)
    with pytest.raises(ConfigError, match="is not an Environment class"):
        registry.environment_class("odd")
    with pytest.raises(UnsupportedError, match="cannot be loaded") as caught:
        registry.environment_class("gone")
    assert caught.value.hints == ("pip uninstall no_such_module",)
    with pytest.raises(ConfigError, match="several installed packages") as rivals:
        registry.environment_class("two")
    assert rivals.value.hints == ("pip uninstall a", "pip uninstall b")
    assert set(registry.names()) - set(registry.BUILT_IN) == {"odd", "gone", "two"}
