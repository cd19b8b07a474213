from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nemotron_steps.cli.main import steps


def test_doctor_looks_at_everything(cli, workplace):
    result = cli("doctor", "--json")
    findings = {finding["name"]: finding for finding in result.json}
    assert result.code == 0, findings
    assert findings["torch"]["state"] == "ok"
    assert {"python", "megatron-core", "ray", "vllm", "bubblewrap", "C compiler", "slurm", "home", "disk"} <= set(
        findings
    )
    assert findings["toy_pack"]["detail"].startswith("4 steps")
    assert {"local", "ray", "slurm"} <= set(findings["executors"]["detail"].split(", "))
    for finding in findings.values():
        assert finding["state"] == "ok" or finding["fix"] or finding["detail"], finding


def test_doctor_finds_what_is_wrong(cli, workplace, monkeypatch):
    monkeypatch.setattr("nemotron_steps.cli.doctor._software", lambda: iter(()))
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "bad.toml").write_text("[step\n")
    (workplace / "env.toml").write_text("[here]\nnodez = 2\n")
    monkeypatch.setenv("STEPS_HOME", "/proc/nowhere")
    result = cli("doctor")
    assert result.code == 1
    assert "bad.toml" in result.out
    assert "unknown key 'nodez' in [here]" in result.out
    assert "✗ home" in result.out
    assert "3 to fix" in result.out


def findings_where(cli, monkeypatch, *kept):
    """Of the named parts of doctor alone, by name."""
    for part in {"_software", "_programs", "_home", "_packs"} - set(kept):
        monkeypatch.setattr(f"nemotron_steps.cli.doctor.{part}", lambda *_: iter(()))
    return {finding["name"]: finding for finding in cli("doctor", "--json").json}


@pytest.mark.parametrize(
    ("returned", "state", "detail"),
    [
        ((1, "", "Traceback\nImportError: libcudart"), "failed", "ImportError: libcudart"),
        ((1, "", ""), "failed", "does not load"),
        ((0, "a warning\n2.12|True|8|H100\n", ""), "ok", "2.12, 8 × H100"),
        ((0, "2.12|False|0|\n", ""), "warning", "2.12, sees no GPU although there is a driver"),
        (None, "failed", "does not load within"),
    ],
)
def test_doctor_says_how_torch_stands(cli, workplace, monkeypatch, returned, state, detail):
    def probe(program):
        if returned is None:
            raise subprocess.TimeoutExpired("torch", 60)
        return subprocess.CompletedProcess([], *returned)

    monkeypatch.setattr("nemotron_steps.cli.doctor._probe", probe)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    torch = findings_where(cli, monkeypatch, "_software")["torch"]
    assert torch["state"] == state and torch["detail"].startswith(detail)
    assert bool(torch["fix"]) == (state != "ok")


def test_doctor_lists_the_profiles(cli, workplace, monkeypatch):
    assert findings_where(cli, monkeypatch, "_packs")["env.toml"]["state"] == "absent"
    (workplace / "env.toml").write_text("[here]\n[there]\n")
    found = findings_where(cli, monkeypatch, "_packs")["env.toml"]
    assert (found["state"], found["detail"]) == ("ok", "here, there")


def compiler_finding(cli):
    result = cli("doctor", "--json")
    (finding,) = [finding for finding in result.json if finding["name"] == "C compiler"]
    return result.code, finding


@pytest.fixture
def one_kernel(tmp_path, monkeypatch):
    """A C file that takes no time, and nothing else to look at."""
    monkeypatch.setattr("nemotron_steps.cli.doctor._software", lambda: iter(()))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr("nemotron_steps.engine.kernels.compiler._SOURCES", tmp_path / "kernels")
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "kernels" / "one.c"


@pytest.mark.compiler
def test_doctor_compiles_the_kernels(cli, workplace, one_kernel):
    code, finding = compiler_finding(cli)
    assert (code, finding["state"]) == (0, "ok")
    assert len(list((workplace.parent / "cache" / "nemotron_steps" / "kernels").iterdir())) == 1


@pytest.mark.compiler
def test_doctor_says_that_compiled_kernels_do_not_load(cli, workplace, one_kernel):
    """As clang's, which need an OpenMP that torch does not have."""
    one_kernel.write_text("void of_nowhere(void);\nvoid work(void) { of_nowhere(); }\n")
    code, finding = compiler_finding(cli)
    assert (code, finding["state"], finding["fix"]) == (0, "warning", "export CC=gcc")
    assert "of_nowhere" in finding["detail"]


def test_what_doctor_tries_dies_with_it():
    program = (
        "from nemotron_steps.cli.doctor import _probe; _probe('print(1, flush=True); input()', 'a-hanging-driver')"
    )
    doctor = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)

    def tried():
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # another process that ends meanwhile
                if b"a-hanging-driver" in path.read_bytes().split(b"\0"):
                    return True
        return False

    try:
        assert eventually(tried)
        time.sleep(0.2)  # it has asked the kernel
    finally:
        doctor.kill()
    assert eventually(lambda: not tried())
    doctor.communicate()


def eventually(condition):
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_new_step_runs_as_it_is(cli, workplace, monkeypatch):
    made = cli("new", "data_prep/my_prep")
    assert made.code == 0, made.err
    pack = workplace / "steps_pack"
    monkeypatch.setenv("STEPS_PATH", str(pack / "steps_pack" / "pack"))
    monkeypatch.syspath_prepend(str(pack))
    rows = workplace / "rows.jsonl"
    rows.write_text('{"a": "short"}\n{"a": "' + "x" * 90 + '"}\n')
    run = cli("run", "data_prep/my_prep", "--input", f"rows={rows}", "max_characters=50", "--json")
    assert run.code == 0, run.out + run.err
    assert run.json["steps"][0]["summary"] == {"kept": 1, "dropped": 1}
    assert cli("show", "data_prep/my_prep").code == 0


def test_a_pack_grows_and_nothing_is_overwritten(cli, workplace):
    assert steps(["new", "data_prep/first", "--into", "pack"]) == 0
    assert steps(["new", "eval/second", "--into", "pack"]) == 0
    again = cli("new", "data_prep/first", "--into", "pack")
    assert again.code == 2
    assert "overwrite" in again.err
    assert (workplace / "pack" / "pack" / "second.py").is_file()
    (workplace / "other").mkdir()
    (workplace / "other" / "file").write_text("")
    assert "is no pack" in cli("new", "data_prep/x", "--into", "other").err
    assert cli("new", "Bad Name").code == 2
    taken = cli("new", "toy/train")
    assert taken.code == 2
    assert "there is a step 'toy/train' already" in taken.err
