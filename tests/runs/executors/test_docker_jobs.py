"""The docker executor with real containers of Docker and Podman: runs of the toy chain."""

import sys
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState
from nemotron_steps.runs.executors.docker import DockerExecutor, DockerProfile
from nemotron_steps.runs.run_folder import get_run, read_events
from tests.containers.engines import Engines
from tests.runs.executors.jobs import HERE, ROOT, submit, wait_until

pytestmark = pytest.mark.containers


@pytest.fixture
def profile(real_engine: str, container_engines: Engines, toy: Path) -> DockerProfile:
    """Containers of an image that has no more than Python's libraries: all else is this machine's, read-only."""
    shown = {str(path) for name in (sys.prefix, sys.base_prefix, ROOT) for path in (Path(name), Path(name).resolve())}
    return DockerProfile.model_validate(
        {
            "executor": "docker",
            "engine": real_engine,
            "container_image": container_engines.image,
            "mounts": [*(f"{path}:{path}:ro" for path in sorted(shown)), f"{toy.parent}:{toy.parent}"],
            "env_vars": {"PYTHONPATH": f"{ROOT}:{HERE}", "TOY_GATE": str(toy)},
            "shm_size": "64m",
        }
    )


def test_a_run_in_a_container_leaves_its_artifacts_in_the_home_and_its_log_is_followed(
    store: ArtifactStore, profile: DockerProfile, container_engines: Engines
) -> None:
    info = submit(store, profile)
    engine, _, name = info.job.partition("/")
    text: list[str] = []
    assert launching.follow(store, info.id, text.append).status == "done"
    assert "step 10:" in "".join(text)
    assert store.find("toy/train/model").producer is not None
    wait_until(lambda: DockerExecutor().status(info.job).state is JobState.DONE)
    container_engines.call(engine, "rm", name)
    assert DockerExecutor().status(info.job).state is JobState.LOST


def test_a_run_in_a_container_is_cancelled_saves_and_goes_on(
    store: ArtifactStore, profile: DockerProfile, toy: Path, container_engines: Engines
) -> None:
    toy.touch()
    run_id = submit(store, profile).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    first = get_run(store, run_id)
    assert DockerExecutor().status(first.job).state is JobState.RUNNING
    launching.cancel(store, first)
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, run_id, lambda text: None)
    toy.unlink()
    second = submit(store, profile, run_id=run_id)
    assert launching.follow(store, run_id, lambda text: None).status == "done"
    assert [e["fields"]["step"] for e in read_events(store, run_id) if e.get("name") == "loaded"] == [0, 4]
    for job in (first.job, second.job):
        container_engines.call(*"{} rm --force {}".format(*job.split("/")).split())
