"""Every check of an executor can fail: what `steps new` writes, with one rule broken."""

from pathlib import Path

import pytest

from nemotron_steps.testing import executor
from nemotron_steps.testing.suite import Examination
from tests.testing.scaffolds import CODE, Package, failed, made
from tests.testing.toy_packages import Change

NAME = 'return f"{process.pid}@{_started(process.pid) or 0}"'
KEPT = NAME.replace("return ", "name = ").replace("{", "{{").replace("}", "}}") + (
    "\n        self.__dict__.setdefault('kept', dict())[name] = {}\n        return name"
)
LOST = 'JobStatus(JobState.LOST, "it is gone")'
SUBMIT, BEFORE = "        command = [", "        # The command goes"
THROUGH_A_SHELL = (
    '        words = ["bash", "-c", "exec " + " ".join([*map(__import__("shlex").quote, launch.command()[:7]), '
    "*(f\"'{word}'\".replace('it', 'i t') for word in launch.arguments[1:] if \"'\" not in word)])]\n"
    "        command = words if len(launch.arguments) > 1 else ["
)
EXECUTOR: dict[str, tuple[Change, ...]] = {
    "is_registered": ((CODE, "    def cancel(", "    def stop("),),
    "its_profile_is_strict": (
        (CODE, "    niceness: int", "    model_config = {'extra': 'allow'}\n\n    niceness: int"),
    ),
    "a_job_runs": ((CODE, "*launch.command()]", "'false']"),),
    "cancel_stops_a_job": ((CODE, "SIGTERM", "SIGKILL"),),
    "it_gets_what_it_was_given: words": ((CODE, f'{SUBMIT}"nice"', f'{THROUGH_A_SHELL}"nice"'),),
    "secrets_are_not_written_down": (
        (CODE, BEFORE, "        (launch.folder / 'env').write_text(str(profile.env_vars))\n" + BEFORE),
    ),
    "secrets_are_not_written_down: in a command line": (
        (CODE, "*launch.command()]", "*launch.command(), *filter(None, [launch.environment.get('KIT_TOKEN')])]"),
    ),
    "a_job_runs: waited for": ((CODE, NAME, f"process.wait()\n        {NAME}"),),
    "it_gets_what_it_was_given: variables": (
        (CODE, "**profile.env_vars, **launch.environment", "**launch.environment, **profile.env_vars"),
    ),
    "what_it_prints_is_kept": ((CODE, "stderr=console", "stderr=subprocess.DEVNULL"),),
    "a_failure_is_not_done: tried again": (
        (CODE, "        if profile.setup_lines:", "        if 'fail' in launch.arguments:\n            command = "
         "['bash', '-c', '\"$@\" || exec \"$@\"', 'bash', *command]\n        if profile.setup_lines:"),
    ),
    "a_failure_is_not_done": (
        (CODE, NAME, KEPT.format("process")),
        (CODE, LOST, "JobStatus(JobState.DONE if job in getattr(self, 'kept', ()) and self.kept[job].poll() == 3 "
         "else JobState.LOST)"),
    ),
}  # fmt: skip
POINTS = {"nemotron_steps.executors": "toykit_thing = toykit_new.toykit_thing:ToykitThing"}
WAITING = {"a_job_runs", "what_it_prints_is_kept"}
"""Checks whose toys have a job that never does what the kit waits for: two seconds are enough."""


def test_there_is_a_toy_for_every_check():
    assert {toy.partition(":")[0] for toy in EXECUTOR} == set(executor.SUITE.checks)


@pytest.mark.slow
@pytest.mark.parametrize("toy", EXECUTOR)
def test_a_broken_executor_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, toy: str):
    check = toy.partition(":")[0]
    folder = made(tmp_path, package, "executor", EXECUTOR[toy], POINTS)
    subject = executor.ExecutorSubject("toykit_thing", folder, {}, 2.0 if check in WAITING else 10.0)
    assert failed(Examination(executor.SUITE, subject)) == [check]
