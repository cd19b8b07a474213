"""Libraries' scan, convolution and norm, called as they document it, give the plain code's results; what does not
work is left alone."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nemotron_steps.engine.policy.mamba import libraries
from nemotron_steps.engine.policy.mamba import mixer as mixer_module
from nemotron_steps.engine.policy.mamba import scan as scan_module
from nemotron_steps.engine.policy.mamba.scan import Runs, conv, scan
from tests.engine.policy.mamba import recurrence as stand_ins
from tests.engine.policy.mamba.test_scan import inputs

CPU = torch.device("cpu")
MODULES = {
    "mamba_ssm.ops.triton.ssd_combined": "mamba_chunk_scan_combined",
    "mamba_ssm.ops.triton.layernorm_gated": "rmsnorm_fn",
    "fla.modules.causal_conv1d": "causal_conv1d",
}


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins in the places of the libraries."""
    made: dict[str, ModuleType] = {}
    for path, name in MODULES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in made:
                made[package] = ModuleType(package)
                monkeypatch.setitem(sys.modules, package, made[package])
        setattr(sys.modules[path], name, getattr(stand_ins, name))


def gradients(function, given):
    out, final = function()
    total = (out.float() * torch.arange(out.numel()).view_as(out).cos()).sum() + final.sum()
    return [out, final, *torch.autograd.grad(total, given)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_library_scans_rows_suffixes_and_states(begun, installed, monkeypatch):
    runs = Runs([9, 1, 4, 17, 5, 8], [0, 0], padding=2)
    given = inputs(runs.tokens + 2)
    initial = torch.randn(runs.roots, 4, 3, 5, requires_grad=True) if begun else None
    wanted = [*given.values(), *([initial] if begun else [])]
    call = lambda: scan(**given, runs=runs, chunk_size=8, initial=initial, final=True)  # noqa: E731
    expected = gradients(call, wanted)
    used = []
    library = libraries.mamba_ssm_scan()
    monkeypatch.setattr(scan_module, "library_for", lambda *_: lambda *a: used.append(a) or library(*a))
    found = gradients(call, wanted)
    assert len(used) == len(runs.levels)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    flat = scan(**given, runs=Runs([20, 26]), chunk_size=8)[0]
    monkeypatch.undo()
    torch.testing.assert_close(flat, scan(**given, runs=Runs([20, 26]), chunk_size=8)[0], atol=1e-4, rtol=1e-4)


def test_a_library_convolves_rows_and_suffixes_and_norms_groups(installed, monkeypatch):
    runs = Runs([9, 1, 4, 5, 8], [0, 1], padding=2)
    given = [torch.randn(shape, requires_grad=True) for shape in ((29, 6), (6, 1, 4), (6,), (3, 6, 3))]
    call = lambda: (conv(*given[:3], runs, given[3]), given[0].sum())  # noqa: E731
    expected = gradients(call, given)
    library = libraries.fla_conv()
    monkeypatch.setattr(scan_module, "library_for", lambda *_: library)
    for mine, theirs in zip(gradients(call, given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    libraries.try_conv(library, scan_module._Conv.apply, CPU, torch.float32, 6, 4)
    plain = mixer_module._GatedNorm.apply
    libraries.try_norm(libraries.mamba_ssm_norm(), plain, CPU, torch.float32, 12, 3)
    with pytest.raises(RuntimeError, match="away from the plain one"):
        libraries.try_norm(lambda *g: plain(*g) * torch.nan, plain, CPU, torch.float32, 12, 3)


def test_the_triton_part_needs_no_cuda_extension(tmp_path, monkeypatch):
    """mamba_ssm built without it cannot be imported as a package."""
    for folder in ("", "ops", "ops/triton"):
        (tmp_path / "mamba_ssm" / folder).mkdir(exist_ok=True)
        (tmp_path / "mamba_ssm" / folder / "__init__.py").touch()
    (tmp_path / "mamba_ssm/__init__.py").write_text("import an_extension_that_was_not_built\n")
    source = "import mamba_ssm.ops.triton as here\nmamba_chunk_scan_combined = here.__name__\n"
    (tmp_path / "mamba_ssm/ops/triton/ssd_combined.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("mamba_ssm")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert libraries._import_triton_part("ssd_combined").mamba_chunk_scan_combined == "mamba_ssm.ops.triton"
        assert "mamba_ssm" not in sys.modules
    finally:
        for name in [name for name in sys.modules if name.startswith("mamba_ssm")]:
            del sys.modules[name]


def test_batches_of_rows_are_less_than_half_padding():
    lengths = torch.randint(1, 500, (60,)).tolist()
    batches = Runs(lengths).batches[0]
    assert sum(rows for rows, _ in batches.shapes) == 60
    assert sum(rows * width for rows, width in batches.shapes) < 2 * sum(lengths)
    assert torch.equal(batches.pad[batches.unpad], torch.arange(sum(lengths)))
    assert batches.filled.sum() == sum(lengths)


def attempt(candidate):
    libraries.try_scan(candidate, scan_module._scan_level, CPU, torch.float32, (2, 3), (1, 4))


def wrong_state(*arguments):
    out, end = scan_module._scan_level(*arguments)
    return out, None if end is None else end.transpose(2, 3).reshape(end.shape)


def wrong_gradient(tokens, *arguments):
    return scan_module._scan_level([tensor.detach() + 0 * tensor for tensor in tokens], *arguments)


def refuses(*arguments):
    raise NotImplementedError("no gradient on this GPU\nand a long explanation")


def absent():
    import absent.ops  # noqa: F401


def broken():
    raise OSError("undefined symbol")


@pytest.mark.parametrize(
    ("name", "load", "told"),
    [
        ("absent", absent, None),
        ("broken", broken, "undefined symbol"),
        ("refuses", lambda: refuses, "no gradient on this GPU"),
        ("another state", lambda: wrong_state, "away from the plain one"),
        ("another gradient", lambda: wrong_gradient, "away from the plain one"),
    ],
)
def test_what_does_not_work_is_left_alone(name, load, told, caplog):
    with caplog.at_level(logging.INFO):
        assert libraries.if_it_works("scan", name, load, attempt) is None
    assert [record.getMessage().endswith(told) for record in caplog.records] == ([True] if told else [])


def test_a_trial_leaves_the_pass_that_asks_alone(installed, caplog):
    """The first pass may run without gradients, or under hooks that count what is saved, as checkpointing does."""
    saved = []
    given = "scan", "mamba_ssm", libraries.mamba_ssm_scan, attempt
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert libraries.if_it_works(*given) is not None
    assert not saved
    with torch.inference_mode(), caplog.at_level(logging.INFO):
        assert libraries.if_it_works(*given) is not None
    assert [record.getMessage() for record in caplog.records] == ["the Mamba-2 scan is that of mamba_ssm"]


def test_on_cpu_and_in_float32_there_is_none():
    assert libraries.library_for("convolution", torch.zeros(1, 2).bfloat16(), scan_module._Conv.apply, 2, 4) is None
    on_cuda = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert libraries.library_for("convolution", on_cuda, scan_module._Conv.apply, 2, 4) is None


def test_without_memory_for_a_trial_the_plain_code_is_taken_once_and_the_library_tried_again(monkeypatch):
    trials = []

    def attempt(*_):
        trials.append(1)
        if len(trials) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def library(*_):
        raise AssertionError

    monkeypatch.setitem(libraries.LIBRARIES, "scan", ("fake", lambda: library, attempt))
    x = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.bfloat16)
    assert [libraries.library_for("scan", x, scan, (3, 7), (1, 9)) for _ in range(3)] == [None, library, library]
    assert len(trials) == 2
