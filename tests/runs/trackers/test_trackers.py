"""Which trackers a run has, and one that another package brings."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import load_environment
from nemotron_steps.errors import ConfigError, UnsupportedError
from tests.runs.runner_toy_plan import run

PLUGIN = {
    "toy_tracker-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy-tracker\nVersion: 1.0\n",
    "toy_tracker-1.0.dist-info/entry_points.txt": "[nemotron_steps.trackers]\ntoy = toy_tracker:ToyTracker\n",
    "toy_tracker.py": """
from nemotron_steps.config.profiles import Table
from nemotron_steps.runs.trackers.base import ExperimentTracker

class ToySettings(Table):
    file: str

class ToyTracker(ExperimentTracker):
    target, module, table, settings_model = "Toy", "json", "toy", ToySettings

    def _on_step_started(self, record):
        self._run = open(self._settings.file, "a")

    def _on_metrics(self, record):
        self._run.write(f"{record['step']} {record['index']}\\n")

    def _interrupt(self):
        self._run.close()
""",
}


def test_a_package_brings_a_tracker_and_the_model_of_its_table(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in PLUGIN.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    Path("env.toml").write_text('[toy]\nfile = "seen.txt"\n')
    assert load_environment().names == ()
    run(store, mirrored=load_environment().mirrors)
    assert Path("seen.txt").read_text().splitlines() == [f"toy/train {index}" for index in range(1, 11)]
    Path("env.toml").write_text('[toy]\nfiel = "seen.txt"\n')
    with pytest.raises(ConfigError):
        _ = load_environment().mirrors


def test_a_tracker_that_is_not_installed_says_what_to_install(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemotron_steps.config.profiles.entry_points", lambda group: ())
    monkeypatch.chdir(tmp_path)
    Path("env.toml").write_text('[mlflow]\nexperiment = "toys"\n')
    with pytest.raises(UnsupportedError) as caught:
        run(store, mirrored=load_environment().mirrors)
    assert caught.value.hints == ("pip install ./examples/mlflow_tracker   # in a checkout of nemotron-steps",)
