"""`scripts/test-gpu` says what failed, what was not reached, and that there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as it would be in a checkout whose tests are in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("_test_gpu", ROOT / "scripts" / "_test_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "_test_gpu", module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def run(script: ModuleType, files: dict[str, str], limit_s: float | None = None) -> list[str]:
    """The summary of the files' tests, two files at a time."""
    for name, text in files.items():
        (script.ROOT / name).write_text(text)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    results = [result for result, _ in script.run_files(script.test_files(["."]), [], 2, deadline)]
    return script.summary(results, 1.0)


def test_failures_are_told_with_their_last_lines_and_all_are_counted(script: ModuleType) -> None:
    lines = run(
        script,
        {
            "test_a.py": "import pytest\n\ndef test_good(): pass\n\ndef test_bad():\n    assert 1 + 1 == 3, 'no sum'\n"
            "\n@pytest.mark.skip\ndef test_left(): pass\n",
            "test_b.py": "import pytest\n\n@pytest.fixture\ndef broken():\n    yield\n    raise OSError('at its end')\n"
            "\ndef test_good(broken): pass\n",
        },
    )
    assert lines[-1].startswith("1 passed, 2 failed, 1 skipped in ")
    said = "\n".join(lines)
    assert "FAILED test_a.py::test_bad\n" in said
    assert "no sum" in said
    assert "FAILED test_b.py::test_good\n" in said
    assert "OSError: at its end" in said
    assert "reached" not in said


def test_a_file_that_cannot_be_imported_is_a_failure(script: ModuleType) -> None:
    lines = run(script, {"test_a.py": "import nothing_of_this_name\n"})
    assert "FAILED test_a.py" in lines
    assert any("nothing_of_this_name" in line for line in lines)
    assert lines[-1].startswith("0 passed, 1 failed, 0 skipped in ")


def test_a_process_that_dies_fails_the_test_that_ran_and_leaves_the_others(script: ModuleType) -> None:
    text = "import os\n\ndef test_good(): pass\n\ndef test_fatal():\n    os.abort()\n\ndef test_after(): pass\n"
    lines = run(script, {"test_a.py": text})
    said = "\n".join(lines)
    assert "FAILED test_a.py::test_fatal\n" in said
    assert "the process ended with SIGABRT" in said
    assert lines[-1].startswith("1 passed, 1 failed, 0 skipped, 1 tests and 0 whole files not reached")


def test_the_time_limit_ends_what_runs_and_says_what_it_left(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a file was collected by then is a matter of luck, and no result of it is."""
    monkeypatch.setattr(script, "GRACE_S", 1)
    waits = "import threading\n\ndef test_waits():\n    threading.Event().wait()\n"
    lines = run(script, {f"test_{name}.py": waits for name in "abc"}, limit_s=2.0)
    assert lines[-1].startswith("0 passed, 0 failed, 0 skipped, ")
    assert "not reached" in lines[-1]
    told = [line.strip() for line in lines[lines.index("Not reached:") + 1 : -2]]
    assert [name.split(":")[0] for name in sorted(told)] == ["test_a.py", "test_b.py", "test_c.py"]


def test_without_a_gpu_it_is_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "device_name", lambda: None)
    monkeypatch.setattr(script, "DEFAULT_PARTS", ())  # there are no such folders beside this copy
    assert script.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("scripts/test-gpu: torch sees no CUDA device here")
    assert said.err.count("\n") == 1


def test_with_a_gpu_it_ends_by_what_was_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "device_name", lambda: "a GPU")
    monkeypatch.setattr(script, "compile_kernels", lambda *_: True)
    (script.ROOT / "test_a.py").write_text("def test_good(): pass\n")
    assert script.main(["test_a.py", "--processes", "1"]) == 0
    assert "a GPU\ntest_a.py: 1 passed in " in capsys.readouterr().out
    assert script.main(["test_a.py", "--time-limit", "0"]) == 3
    assert "0 tests and 1 whole files not reached" in capsys.readouterr().out
    (script.ROOT / "test_a.py").write_text("def test_bad(): raise ValueError\n")
    assert script.main(["test_a.py"]) == 1
    with pytest.raises(SystemExit, match="2"):
        script.main(["test_b.py"])
    assert "there is no test_b.py" in capsys.readouterr().err


def test_compilation_ends_at_the_time_limit(script: ModuleType) -> None:
    package = script.ROOT / "kernels" / "chatserve_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    compiler = package / "aot.py"
    compiler.write_text("import sys\n\nassert sys.argv[1:] == ['--quiet', '--cover', 'pairs', '--processes', '3']\n")
    assert script.compile_kernels("pairs", 3, None)
    assert not script.compile_kernels("values", 3, None)
    compiler.write_text("import threading\n\nthreading.Event().wait()\n")
    assert script.compile_kernels("pairs", 3, time.monotonic() + 0.5)


def test_kernels_that_do_not_compile_are_a_failure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "device_name", lambda: "a GPU")
    monkeypatch.setattr(script, "compile_kernels", lambda *_: False)
    (script.ROOT / "test_a.py").write_text("def test_good(): pass\n")
    assert script.main(["test_a.py"]) == 1


def test_packages_that_only_pythonpath_names_are_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "found_by_pythonpath.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    lines = run(script, {"test_a.py": "import found_by_pythonpath\n\ndef test_good(): pass\n"})
    assert lines[-1].startswith("1 passed, 0 failed")


def test_what_a_sanitizer_finds_is_a_failure_with_its_report(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "bin" / "compute-sanitizer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        "#!/bin/sh\n[ $2 = memcheck ] || exit 3\nshift 6\n"
        'echo "========= Invalid __global__ read of size 4 bytes"\n"$@"\nexit 97\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
    code = "import os\n\ndef test_good(): assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
    (tmp_path / "test_a.py").write_text(code)
    results = [result for result, _ in script.run_files(["test_a.py"], [], 1, None, "memcheck")]
    said = "\n".join(script.summary(results, 1.0))
    assert "1 passed, 1 failed" in said
    assert "Invalid __global__ read" in said
    assert f"exit code {script.SANITIZER_EXIT_CODE}" in said
