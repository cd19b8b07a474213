"""What a pipeline's file says: sources, and what a config's name means for each stage."""

from pathlib import Path

import pytest

from nemotron_steps.manifest.loader import parse_pipeline, read_toml
from nemotron_steps.manifest.pipeline_models import PipelineManifest


def read(tmp_path: Path, text: str) -> tuple[PipelineManifest | None, list[str]]:
    (tmp_path / "p.toml").write_text(f'[pipeline]\nname = "p"\n{text}')
    pipeline, problems = parse_pipeline(read_toml(tmp_path / "p.toml"), pack="mine")
    return pipeline, [f"{str(problem.where).rpartition(':')[2]} {problem.what}" for problem in problems]


def fine(tmp_path: Path, text: str) -> PipelineManifest:
    pipeline, problems = read(tmp_path, text)
    assert pipeline is not None, problems
    return pipeline


TWO = '[[stages]]\nstep = "a/one"\n[[stages]]\nstep = "a/two"\n'


def test_a_source_is_a_stage_a_stage_and_port_or_a_reference_and_a_port_of_many_has_a_table(tmp_path: Path) -> None:
    inputs = 'a = "one"\nb = "one.out"\nc = { ref = "x:v1" }\nd = { stage = "one", port = "out" }\n'
    many = 'e.first = "one"\ne.second = { ref = "y:v1" }\ne.ref = { ref = "z:v1" }\n'
    stage = fine(tmp_path, f"{TWO}[stages.inputs]\n{inputs}{many}").stages[1]
    assert {port: (source.stage, source.port, source.ref) for port, source in stage.inputs.items()} == {
        "a": ("one", None, None),
        "b": ("one", "out", None),
        "c": (None, None, "x:v1"),
        "d": ("one", "out", None),
        "e.first": ("one", None, None),
        "e.second": (None, None, "y:v1"),
        "e.ref": (None, None, "z:v1"),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[stages]]\nstep = "a"\ninputs = { x = { stage = "a", ref = "b" } }\n', "name either a stage"),
        ('[[stages]]\nstep = "a"\ninputs = { x = "a" }\n', "reads stage 'a', which is not before it"),
        ('[[stages]]\nstep = "a"\nfan_out = { "a b" = [1] }\n', "is not a dotted config key"),
        ('[[stages]]\nstep = "a"\n[[stages.checks]]\nmetric = "m"\n', "has no bound"),
        ('[[stages]]\nstep = "a"\n[[stages.checks]]\nmetric = "m"\nat_least = 2\nat_most = 1\n', "no number passes"),
        ('[configs.t]\none = "x"\n' + TWO, "configs.t: names no config for stage 'two'"),
        ('[configs.t]\none = "x"\ntwo = "x"\nthree = "x"\n' + TWO, "configs.t: there is no stage 'three'"),
        (TWO + '[pack]\nname = "mine"\n', "unknown key 'pack' in a pipeline"),
    ],
)
def test_what_a_pipeline_cannot_say(text: str, said: str, tmp_path: Path) -> None:
    pipeline, problems = read(tmp_path, text)
    assert pipeline is None and any(said in problem for problem in problems), problems


def test_a_config_name_may_mean_another_step_for_a_stage(tmp_path: Path) -> None:
    configs = fine(tmp_path, TWO + '[configs.t]\none = "tiny"\ntwo = { step = "b/two", config = "large" }\n').configs
    assert {stage: (each.step, each.config) for stage, each in configs["t"].items()} == {
        "one": (None, "tiny"),
        "two": ("b/two", "large"),
    }
