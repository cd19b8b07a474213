"""env.toml: where it is found, what profiles inherit and fill in, and what is shown."""

import os

import pytest

from nemotron_steps.config.profiles import Profile, load_environment
from nemotron_steps.errors import ConfigError, UnknownNameError
from nemotron_steps.runs.executors.base import profile_model


@pytest.fixture
def write(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "nemotron_steps").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.chdir(tmp_path)

    def write(text: str, *, user: bool = False) -> None:
        (home / "nemotron_steps" / "env.toml" if user else tmp_path / "env.toml").write_text(text)

    return write


def test_the_nearest_profile_counts_variables_add_up_and_none_with_setup_works_in_the_process_that_asks(write):
    write(
        '[base]\nnodes = 2\nsetup_lines = ["a"]\nenv_vars = {A = "1", B = "2"}\n[middle]\nextends = "base"\nnodes = 3\n'
        '[top]\nextends = "middle"\nenv_vars = {C = "3"}\n[plain]\nenv_vars = {A = "1"}\n[far]\nexecutor = "slurm"\n'
    )
    top, plain, far = profile("top"), profile("plain"), profile("far")
    assert (top.nodes, top.setup_lines, top.extends) == (3, ("a",), "middle")
    assert top.env_vars == top.variables_here == {"A": "1", "B": "2", "C": "3"}
    assert [each.runs_here for each in (top, plain, far)] == [False, True, False] and far.variables_here == {}


def test_a_strangers_file_in_a_folder_for_everybody_is_not_found_by_walking_up(write, tmp_path, monkeypatch):
    write("[base]\n[big]\n")
    inner = tmp_path / "a"
    inner.mkdir()
    monkeypatch.chdir(inner)
    tmp_path.chmod(0o1777)
    assert load_environment().names == ("base", "big")
    if os.geteuid() == 0:
        os.chown(tmp_path / "env.toml", 54321, -1)
    else:
        monkeypatch.setattr("nemotron_steps.config.locations.os.geteuid", lambda: 54321)
    assert load_environment().names == ()


def test_a_variable_names_the_file_in_place_of_the_nearest(write, tmp_path, monkeypatch):
    write("[base]\n[big]\n")
    write("[mine]\n", user=True)
    other = tmp_path / "other.toml"
    other.write_text("[there]\n")
    monkeypatch.setenv("NEMOTRON_ENV_FILE", str(other))
    assert load_environment().names == ("mine", "there")
    monkeypatch.setenv("NEMOTRON_ENV_FILE", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_environment()
    assert caught.value.where == "NEMOTRON_ENV_FILE"


def test_values_read_the_environment_and_say_which_variable_is_missing(write, monkeypatch):
    write('[a]\nenv_vars = {HF_TOKEN = "${oc.env:SITE_SECRET}", MODE = "${oc.env:M,${oc.env:N,${oc.env:O,a{b}}}}"}\n')
    monkeypatch.setenv("SITE_SECRET", "hf_qwertyuiop")
    profile = load_environment().profile("a", profile_model)
    assert profile.env_vars == {"HF_TOKEN": "hf_qwertyuiop", "MODE": "a{b}"}
    assert "qwertyuiop" not in repr(profile.shown())
    monkeypatch.delenv("SITE_SECRET")
    with pytest.raises(ConfigError, match="SITE_SECRET is not set") as caught:
        load_environment().profile("a", profile_model)
    assert caught.value.where.endswith("env.toml:2") and caught.value.hints == ("export SITE_SECRET=...",)
    write('[a]\nexecutor = "lepton"\ncontainer_image = "x"\n')
    with pytest.raises(ConfigError, match=r"'resource_shape' must be given a value in \[a\]") as caught:
        load_environment().profile("a", profile_model)
    assert caught.value.hints == (f"""sed -i '1a resource_shape = "..."' {os.path.abspath("env.toml")}""",)


@pytest.mark.parametrize("name", ["", "A=B", "A;true", "1A"])
def test_a_variable_has_a_name_that_every_shell_exports(write, name):
    write(f'[a]\nenv_vars = {{"{name}" = "x"}}\n')
    with pytest.raises(ConfigError, match="env_vars") as caught:
        load_environment().profile("a", profile_model)
    assert caught.value.where.endswith("env.toml:2")


def test_public_profiles_names_of_keys_and_tables_are_read(write):
    write(
        '[artifacts]\nbackend = "file"\n[cli]\ntheme = "x"\n[cache]\ngit_dir = "/x"\n'
        '[a]\nexecutor = "slurm"\ncontainer = "/i/a.sqsh"\nstartup_commands = ["module load x"]\n'
        '[b]\nextends = "a"\ncontainer_image = "/i/b.sqsh"\n'
        '[both]\nexecutor = "slurm"\ncontainer = "/x.sqsh"\ncontainer_image = "/y.sqsh"\n'
    )
    environment = load_environment()
    assert environment.names == ("a", "b", "both")
    profile = environment.profile("b", profile_model)
    assert (profile.container_image, profile.setup_lines) == ("/i/b.sqsh", ("module load x",))
    assert environment.profile("a", profile_model).container_image == "/i/a.sqsh"
    with pytest.raises(ConfigError, match="'container' is another name of 'container_image'"):
        environment.profile("both", profile_model)
    with pytest.raises(UnknownNameError) as caught:
        environment.profile("cache", profile_model)
    assert "other tools" in caught.value.found


def profile(name: str, model: type[Profile] = Profile) -> Profile:
    return load_environment().profile(name, lambda executor: model)


def test_a_profile_is_shown_with_what_it_sets_and_without_secrets(write):
    write(
        '[base]\nnodes = 1\n[a]\nextends = "base"\ngpus_per_node = 8\nsetup_lines = ["export HF_TOKEN=abc"]\n'
        'env_vars = {HF_TOKEN = "abc", MODE = "fast"}\n'
    )
    assert profile("a").shown() == {
        "executor": "local",
        "gpus_per_node": 8,
        "env_vars": {"HF_TOKEN": "***", "MODE": "fast"},
        "setup_lines": ["export HF_TOKEN=***"],
    }
    assert profile("base").shown() == {"executor": "local"}


@pytest.mark.parametrize(
    ("name", "hint", "found"),
    [
        ("YOUR-CLUSTER", "printf '\\n[YOUR-CLUSTER]\\nexecutor = \"slurm\"\\n' >> ", "YOUR-CLUSTER"),
        ("my_local", "printf '\\n[my_local]\\nexecutor = \"local\"\\n' >> ", "my_local"),
        ("wandb", None, "[wandb], a mirror, not a profile"),
        ("cli", None, "[cli], which other tools read"),
    ],
)
def test_a_profile_that_is_not_there_is_offered_or_made(write, name, hint, found):
    write("[base]\n[wandb]\nproject = 'x'\n[cli]\n")
    with pytest.raises(UnknownNameError, match=f"no profile '{name}'") as caught:
        load_environment().profile(name, profile_model)
    assert [h.startswith(str(hint)) for h in caught.value.hints] == ([True] if hint else [])
    assert (caught.value.expected, caught.value.found) == ("base", found)
    assert str(caught.value.where).endswith("env.toml:2" if name == "wandb" else "env.toml")
    if hint and hint.startswith("printf"):
        assert os.system(caught.value.hints[0]) == 0
        made = load_environment().profile(name, profile_model)
        assert f'executor = "{made.executor}"' in caught.value.hints[0]
