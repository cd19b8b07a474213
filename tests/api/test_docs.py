"""docs/python.md: every block of Python runs, as one program, in the order of the page. README.md shows the first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_the_pages_first_block() -> None:
    assert blocks("README.md") == blocks("docs/python.md")[:1]


@pytest.mark.slow
@pytest.mark.chain
def test_every_block_of_the_page_runs(workplace: Path) -> None:
    write_checkpoint("qwen3", workplace / "my-model", vocab_size=260, max_position_embeddings=512)
    found = blocks("docs/python.md")
    assert len(found) > 6
    (workplace / "page.py").write_text("\n".join(found))
    done = subprocess.run(
        [sys.executable, "page.py"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "E200 the reward function 'asks' cannot be written down: it uses 'client'" in done.stdout
    assert "steps run rl/nemo_rl/rlvr -c cpu --input policy=my-model" in done.stdout
    assert re.search(r"^\S+-hf-to-megatron-\w+ done ", done.stdout, re.MULTILINE)
