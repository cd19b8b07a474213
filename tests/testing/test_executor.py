"""Every check of an executor can fail: what `steps new` writes, with one rule broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemotron_steps.testing import executor
from nemotron_steps.testing.suite import Examination, State
from tests.testing.scaffolds import CODE, HEAVY, Package, failed, made
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
    "importing_it_is_light": ((CODE, "import os\n", "import os\nimport jax\n"), HEAVY),
    "its_profile_is_strict": (
        (CODE, "    niceness: int", "    model_config = {'extra': 'allow'}\n\n    niceness: int"),
    ),
    "a_job_runs": ((CODE, "*launch.command()]", "'false']"),),
    "names_are_plain": (
        (CODE, NAME, NAME.replace(' or 0}"', ' or 0}\\n"')),
        (CODE, 'job.partition("@")', 'job.strip().partition("@")'),
    ),
    "a_running_job_is_known": (
        (CODE, NAME, f"self.__dict__.setdefault('mine', set()).add(process.pid)\n        {NAME}"),
        (CODE, "        pid = _running(job)\n        return", "        pid = _running(job)\n"
         "        pid = pid if pid in getattr(self, 'mine', ()) else None\n        return"),
    ),
    "cancel_stops_a_job": ((CODE, "SIGTERM", "SIGKILL"),),
    "cancel_of_what_is_over_does_nothing": (
        (CODE, "        if pid:\n            os.kill(pid,", "        if pid or '@' in job:\n"
         "            os.kill(pid or 2**22 + 1,"),
    ),
    "an_unknown_job_is_lost": ((CODE, LOST, f"{LOST} if job else JobStatus(JobState.DONE)"),),
    "words_arrive_as_they_are": ((CODE, f'{SUBMIT}"nice"', f'{THROUGH_A_SHELL}"nice"'),),
    "variables_arrive": ((CODE, ", **launch.environment", ""),),
    "it_runs_where_it_was_asked": ((CODE, "cwd=launch.working_dir", "cwd='/'"),),
    "setup_lines_come_first": ((CODE, "if profile.setup_lines:", "if False:"),),
    "secrets_are_not_written_down": (
        (CODE, BEFORE, "        (launch.folder / 'env').write_text(str(profile.env_vars))\n" + BEFORE),
    ),
    "what_cannot_start_is_told": ((CODE, "if not launch.working_dir.is_dir():", "if False:"),),
    "keys_are_described": ((CODE, '    """How far the job gives way to others, as `nice` takes it."""\n', ""),),
    "submitting_does_not_wait": ((CODE, NAME, f"if launch.attached:\n            process.wait()\n        {NAME}"),),
    "submitting_leaves_the_process_as_it_was": (
        (CODE, BEFORE, "        os.environ['KIT_TOY'] = launch.run_id\n" + BEFORE),
    ),
    "it_prints_nothing": ((CODE, "        if pid:\n", "        print('stopping', job)\n        if pid:\n"),),
    "the_launch_has_the_last_word": (
        (CODE, "**profile.env_vars, **launch.environment", "**launch.environment, **profile.env_vars"),
    ),
    "folders_have_any_name": (
        (CODE, f'{SUBMIT}"nice"',
         f'{SUBMIT}"bash", "-c", f\'cd {{launch.folder}} && cd - > /dev/null && exec "$@"\', "bash", "nice"'),
    ),
    "it_writes_in_the_run_folder_only": (
        (CODE, BEFORE, "        (launch.working_dir / f'{launch.run_id}.sh').touch()\n" + BEFORE),
    ),
    "it_waits_for_no_input": ((CODE, "                stdin=subprocess.DEVNULL,\n", ""),),
    "what_it_prints_is_kept": ((CODE, "stderr=console", "stderr=subprocess.DEVNULL"),),
    "a_lot_of_output_does_no_harm": (
        (CODE, "stderr=console,", "stderr=console,\n                preexec_fn=lambda: "
         "__import__('resource').setrlimit(__import__('resource').RLIMIT_FSIZE, (200_000, 200_000)),"),
    ),
    "a_run_can_be_submitted_again": (
        (CODE, BEFORE, "        if (launch.folder / 'console.txt').exists():\n"
         "            raise RequestError('the run was submitted already')\n" + BEFORE),
    ),
    "output_of_attempts_adds_up": ((CODE, '"ab"', '"wb"'),),
    "a_refusal_keeps_secrets": (
        (CODE, "where=str(launch.working_dir)", "found=' '.join(profile.env_vars.values())"),
    ),
    "values_of_keys_are_checked": (
        (CODE, "    niceness: int", "    label: object = None\n    \"\"\"A name.\"\"\"\n\n    niceness: int"),
    ),
    "its_profile_can_be_written_down": (
        (CODE, "    niceness: int", "    labels: set[int] = {1}\n    \"\"\"Names.\"\"\"\n\n    niceness: int"),
    ),
    "a_job_outlives_its_submitter": ((CODE, "                start_new_session=True,\n", ""),),
    "nobody_to_ask_is_no_end": (
        (CODE, "        pid = _running(job)\n        return", "        try:\n            subprocess.run(['true'])\n"
         "        except OSError:\n            return JobStatus(JobState.LOST)\n"
         "        pid = _running(job)\n        return"),
    ),
    "a_killed_job_is_not_done": (
        (CODE, NAME, KEPT.format("process")),
        (CODE, LOST, "JobStatus(JobState.DONE if job in getattr(self, 'kept', ()) and (self.kept[job].poll() or 0) < 0 "
         "else JobState.LOST)"),
    ),
    "a_failed_job_is_not_tried_again": (
        (CODE, "        if profile.setup_lines:", "        if 'fail' in launch.arguments:\n            command = "
         "['bash', '-c', '\"$@\" || exec \"$@\"', 'bash', *command]\n        if profile.setup_lines:"),
    ),
    "cancel_reaches_past_setup_lines": ((CODE, "'exec \"$@\"'", "'\"$@\"; true'"),),
    "a_job_can_be_cancelled_at_once": (
        (CODE, NAME, KEPT.format("launch.folder / 'begun'")),
        (CODE, "        if pid:\n", "        if pid and (job not in self.kept or self.kept[job].exists()):\n"),
    ),
    "jobs_at_once_are_their_own": (
        (CODE, BEFORE, "        self.launch = launch\n        __import__('time').sleep(0.02)\n"
         "        launch = self.launch\n" + BEFORE),
    ),
    "fetch_keeps_what_is_here": (
        (CODE, "    def cancel(", "    def fetch(self, job, folder):\n        for path in folder.glob('*.*'):\n"
         "            if path.name != 'console.txt':\n                path.unlink()\n\n    def cancel("),
    ),
    "a_failure_is_over": (
        (CODE, NAME, KEPT.format("process")),
        (CODE, LOST, "JobStatus(JobState.DONE if job in getattr(self, 'kept', ()) and self.kept[job].poll() == 3 "
         "else JobState.LOST)"),
    ),
    "jobs_do_not_mix": (
        (CODE, NAME, KEPT.format("process.pid")),
        (CODE, "            os.kill(pid, signal.SIGTERM)", "            for each in self.kept.values():\n"
         "                if _started(each):\n                    os.kill(each, signal.SIGTERM)"),
    ),
}  # fmt: skip
POINTS = {"nemotron_steps.executors": "toykit_thing = toykit_new.toykit_thing:ToykitThing"}
WAITING = dict.fromkeys(
    (
        "a_job_runs",
        "submitting_does_not_wait",
        "a_job_can_be_cancelled_at_once",
        "folders_have_any_name",
        "what_it_prints_is_kept",
    ),
    2.0,
)
"""Toys whose job never does what the kit waits for, and seconds that it then waits."""


def test_there_is_a_toy_for_every_check():
    assert set(EXECUTOR) == set(executor.SUITE.checks)


@pytest.mark.slow
@pytest.mark.parametrize("check", EXECUTOR)
def test_a_broken_executor_fails_the_check_that_is_about_it(
    tmp_path: Path, package: Package, check: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KIT_TOY", "")
    folder = made(tmp_path, package, "executor", EXECUTOR[check], POINTS)
    subject = executor.ExecutorSubject("toykit_thing", folder, {}, WAITING.get(check, 10.0))
    assert failed(Examination(executor.SUITE, subject), but=check) == [check]


CANCEL = '        """Ask a job to stop."""\n'
WRITTEN = f"{CANCEL}        with open('cancelled', 'a') as file:\n            file.write(job + '\\n')\n"


def test_what_the_kit_cancels_is_no_process_and_no_group(tmp_path: Path, package: Package):
    folder = made(tmp_path, package, "executor", ((CODE, CANCEL, WRITTEN),), POINTS)
    subject = executor.ExecutorSubject("toykit_thing", folder, {}, 10.0)
    outcome = Examination(executor.SUITE, subject).outcome("cancel_of_what_is_over_does_nothing")
    assert outcome.state is State.PASSED, outcome.text
    _, *strangers = Path("cancelled").read_text().splitlines()
    assert strangers
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    for name in strangers:
        assert name
        assert all(int(number) > most for number in re.findall(r"-?\d+", name)), name


def test_an_executor_that_takes_any_number_for_a_job_is_not_asked_to_cancel_strangers(tmp_path: Path, package: Package):
    changes = (
        (CODE, CANCEL, WRITTEN),
        (CODE, "        pid = _running(job)\n        return", "        pid = _running(job)\n        if job == '0':\n"
         "            return JobStatus(JobState.RUNNING)\n        return"),
    )  # fmt: skip
    subject = executor.ExecutorSubject("toykit_thing", made(tmp_path, package, "executor", changes, POINTS), {}, 10.0)
    examination = Examination(executor.SUITE, subject)
    assert examination.outcome("cancel_of_what_is_over_does_nothing").state is State.SKIPPED
    assert examination.outcome("an_unknown_job_is_lost").state is State.FAILED
    assert not Path("cancelled").exists()
