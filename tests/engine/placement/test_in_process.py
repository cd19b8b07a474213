"""What a run's parts are given where all of them are in one process."""

import pytest

from nemotron_steps.engine.placement import run as in_process
from nemotron_steps.engine.setup.backends import build_judges
from tests.engine.grpo.grpo_runs import config_of, start


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_judge_waits_for_the_policys_sampling_only_where_that_ever_ends(
    asynchronous, checkpoint, tmp_path, monkeypatch
):
    judge = {"responses_api_models": {"vllm_model": {"model": str(checkpoint), "max_total_sequence_length": 96}}}
    config = config_of(
        checkpoint,
        2,
        environment="judged",
        env__nemo_gym={"judge_model": judge},
        grpo__async_grpo__enabled=asynchronous,
    )
    given = []

    def noted(*arguments, **options):
        given.append(options["defer_to"])
        return build_judges(*arguments, **options)

    monkeypatch.setattr(in_process, "build_judges", noted)
    run = start(config, tmp_path)
    run.close()
    assert given == [None if asynchronous else run.sampler] and len(run.judges) == 1
