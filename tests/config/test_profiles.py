from __future__ import annotations

import pytest

from nemotron_steps.config.profiles import load_environment
from nemotron_steps.errors import ConfigError, UnknownNameError
from nemotron_steps.runs.executors.base import profile_model

ENV = """\
[wandb]
project = "alignment"

[base]
executor = "slurm"
account = "research"
partition = "batch"
env_vars = { HF_TOKEN = "hf_abcdefgh", OMP_NUM_THREADS = "4" }

[big]
extends = "base"
nodes = 16
time = "04:00:00"
container_image = "nemo.sqsh"
mounts = ["/data:/data"]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "nemotron_steps").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.chdir(tmp_path)

    def write(text: str, *, user: bool = False) -> None:
        (home / "nemotron_steps" / "env.toml" if user else tmp_path / "env.toml").write_text(text)

    return write


def test_a_profile_inherits_what_it_extends(write):
    write(ENV)
    environment = load_environment()
    big = environment.profile("big", profile_model)
    assert (big.executor, big.account, big.nodes, big.time) == ("slurm", "research", 16, "04:00:00")
    assert environment.profile("base", profile_model).nodes == 1
    assert environment.names == ("base", "big")
    assert environment.mirrors.names == ("wandb",)
    assert environment.mirrors.wandb is not None
    assert environment.mirrors.wandb.project == "alignment"


def test_secrets_of_a_profile_are_not_shown(write):
    write(ENV)
    shown = load_environment().profile("big", profile_model).shown()
    assert shown["env_vars"] == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "4"}
    assert "hf_abcdefgh" not in repr(shown)


def test_the_working_directory_hides_the_users_file(write):
    write('[base]\nexecutor = "local"\n[mine]\n', user=True)
    write(ENV)
    environment = load_environment()
    assert environment.profile("base", profile_model).executor == "slurm"
    assert environment.profile("mine", profile_model).executor == "local"


def test_no_file_means_no_profiles(write):
    with pytest.raises(UnknownNameError) as caught:
        load_environment().profile("big", profile_model)
    assert "env.toml" in caught.value.expected


def test_an_unknown_profile_names_the_nearest(write):
    write(ENV)
    with pytest.raises(UnknownNameError) as caught:
        load_environment().profile("bgi", profile_model)
    assert caught.value.hints == ("-r big",)


def test_every_mistake_of_a_profile_with_its_line(write):
    write(ENV + 'nodez = 3\nexclusive = "yes"\ntime_limit = "1"\n[loop]\nextends = "loop"\n[lost]\nextends = "bsae"\n')
    environment = load_environment()
    with pytest.raises(ConfigError) as caught:
        environment.profile("big", profile_model)
    problems = {p.what: p for p in caught.value.problems}
    assert set(problems) == {
        "unknown key 'nodez' in [big], whose executor is slurm",
        "'exclusive' in [big] is wrong",
        "unknown key 'time_limit' in [big], whose executor is slurm",
    }
    assert problems["unknown key 'nodez' in [big], whose executor is slurm"].expected == "nodes"
    assert problems["unknown key 'nodez' in [big], whose executor is slurm"].where.endswith("env.toml:16")
    with pytest.raises(ConfigError, match="circle: loop → loop"):
        environment.profile("loop", profile_model)
    with pytest.raises(UnknownNameError) as lost:
        environment.profile("lost", profile_model)
    assert lost.value.where.endswith("env.toml:22")


@pytest.mark.parametrize(("text", "line"), [("[a\n", 1), ("x = 1\n", 1), ("[a]\nb = = 1\n", 2)])
def test_a_malformed_file_is_named_with_its_line(write, text, line):
    write(text)
    with pytest.raises(ConfigError) as caught:
        load_environment()
    assert caught.value.where.endswith(f"env.toml:{line}")
