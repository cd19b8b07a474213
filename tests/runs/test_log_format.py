"""Records as lines of the log."""

import subprocess
import sys
from pathlib import Path


def test_the_log_goes_on_after_a_library_configured_logging(tmp_path: Path) -> None:
    code = (
        "import logging, logging.config, pathlib, sys\n"
        "from nemotron_steps.runs.log_format import RunLog\n"
        "log = RunLog(pathlib.Path(sys.argv[1]), str)\n"
        "logging.getLogger().addHandler(log)\n"
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "logging.getLogger('library').warning('imported')\n"
        "log.write_text('the run goes on')\n"
        "log.end()\n"
    )
    # A process of its own: what is configured cannot be undone.
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log.txt")], check=True, timeout=60)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["library WARNING: imported", "the run goes on"]
