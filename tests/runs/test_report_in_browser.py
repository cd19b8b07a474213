"""The report in a real Chromium: nothing of a sample runs, it fits a phone, follows dark and light, and takes keys."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report.page import write_report
from tests.runs.runner_toy_plan import run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.browser
HOSTILE = (
    '</pre><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'>'
    '<svg onload=document.title="owned"> ${"a" * 5} \u202e ' + "w" * 3000
)
PROBE = """<script>
const links = [...document.querySelectorAll("nav a, summary")].every((each) => each.tabIndex >= 0);
const width = document.documentElement.scrollWidth;
const color = getComputedStyle(document.body).backgroundColor;
const shown = {width, color, links, title: document.title};
document.body.insertAdjacentHTML("beforeend", `<p id="probe">${JSON.stringify(shown)}</p>`);
</script></body>"""


def seen(folder: Path, width: int, scheme: str) -> dict[str, Any]:
    """What a page that looks at itself finds, at a width of the window in a colour scheme."""
    page = folder / "probed.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", PROBE))
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *(f"--window-size={width},900", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (found,) = re.findall(r'<p id="probe">(\{.*?\})</p>', done.stdout)
    return json.loads(found)  # type: ignore[no-any-return]


def test_a_hostile_sample_on_a_phone_in_the_dark_and_on_a_screen_in_the_light(store: ArtifactStore) -> None:
    result = run(store)
    sample = {"step": 1, "which": "best", "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0, HOSTILE: HOSTILE}
    said = {"reasoning": HOSTILE, "verdict": HOSTILE, HOSTILE: HOSTILE}
    sample["judge"] = [said, said, {"verdict": [HOSTILE]}, HOSTILE]
    with (result.folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "sample", "step": "toy/train", "sample": sample}) + "\n")
    with (result.folder / "metrics.jsonl").open("a") as file:
        for index in (1, 2):
            names = ("maths", HOSTILE.replace("/", ""))
            values = {f"{what}/{name}/mean": index for what in ("reward", "response_length") for name in names}
            file.write(json.dumps({"kind": "metrics", "step": "toy/train", "index": index, "values": values}) + "\n")
    write_report(result.folder, store)
    phone, screen = seen(result.folder, 500, "dark"), seen(result.folder, 1200, "light")
    assert phone["width"] <= 500 and screen["width"] <= 1200
    for each in (phone, screen):
        assert each["title"] == "toy · done" and each["links"]
    assert phone["color"] != screen["color"]
