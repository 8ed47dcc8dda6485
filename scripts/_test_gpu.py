"""Compiles the kernels, then runs the tests that need a GPU or may use one, some files at a time, and sums up.

`scripts/test-gpu` runs this in the checkout's own environment; any Python with torch, Triton and the tests' packages
will do: `python scripts/_test_gpu.py`. What was compiled stays in Triton's cache.

Exit code: 0 if all passed, 1 if any failed, 2 if there is no GPU, 3 if the time limit came before the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PARTS = ("tests/kernels", "tests/model", "tests/test_equality.py")
TEST_TIMEOUT_S = 600
"""Of one test: several files compile kernels at once."""
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_EXIT_CODE = 97
GRACE_S = 20
"""How long a process that was interrupted may take to end."""


@dataclass
class FileResult:
    """What the tests of one file came to."""

    path: str
    collected: list[str] | None = None
    """None: it did not come so far."""
    outcomes: dict[str, str] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Last lines of each failure."""
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    @property
    def not_reached(self) -> list[str]:
        """Tests without a result; the file itself, where they are not known."""
        if self.collected is None:
            return [] if self.outcomes else [self.path]
        return [test for test in self.collected if self.outcomes.get(test, "started") == "started"]

    def line(self) -> str:
        counts = Counter(self.outcomes.values())
        del counts["started"]
        counts["not reached"] = len(self.not_reached)
        said = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
        return f"{self.path}: {said or 'no tests'} in {self.seconds:.0f} s"


class Running:
    """A pytest process for one file."""

    def __init__(self, path: str, options: list[str], folder: Path, sanitizer: str | None) -> None:
        self.path = path
        self._report = folder / f"{path.replace('/', '_')}.jsonl"
        self._output = self._report.with_suffix(".txt")
        self._started = time.monotonic()
        command = [sys.executable, "-m", "pytest", path, "-n", "0", "--tb", "short", "-p", "_test_gpu_report"]
        command += ["-p", "no:cacheprovider", "-o", f"timeout={TEST_TIMEOUT_S}", *options]
        environment = _environment(ROOT / "scripts") | {"TEST_GPU_REPORT": str(self._report)}
        if sanitizer is not None:
            command = [*_sanitize(sanitizer), *command]
            # Each tensor is an allocation of its own then, so that what lies past its end is nobody's.
            environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Interrupt it, which ends pytest in good order, and kill what does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, *, was_interrupted: bool) -> FileResult:
        found = FileResult(self.path, seconds=time.monotonic() - self._started)
        for line in self._report.read_text().splitlines() if self._report.exists() else ():
            said = json.loads(line)
            if "collected" in said:
                found.collected = said["collected"]
            elif found.outcomes.get(said["test"]) != "failed":  # a teardown after a failure changes nothing
                found.outcomes[said["test"]] = said["outcome"]
                if said["outcome"] == "failed":
                    found.lines[said["test"]] = said["lines"]
        if self.process.returncode in {0, 1, 5} or was_interrupted:  # 5: no test was chosen
            return found
        begun = [test for test, outcome in found.outcomes.items() if outcome == "started"]
        where = begun[-1] if begun else self.path
        found.outcomes[where] = "failed"
        found.lines[where] = [
            *_last_lines(self._output.read_text(errors="replace")),
            f"the process ended with {_code(self.process.returncode)}",
        ]
        return found


def run_files(
    paths: list[str],
    options: list[str],
    num_processes: int,
    deadline: float | None,
    sanitizer: str | None = None,
) -> Iterator[tuple[FileResult, bool]]:
    """Each file's result as it ends, and whether the deadline (of `time.monotonic`) ended it."""
    with tempfile.TemporaryDirectory() as folder:
        waiting = list(paths)
        running: list[Running] = []
        try:
            while waiting or running:
                is_late = deadline is not None and time.monotonic() >= deadline
                for each in list(running):
                    if is_late:
                        each.end()
                    if each.process.poll() is not None:
                        running.remove(each)
                        yield each.result(was_interrupted=is_late), is_late
                if is_late:
                    yield from ((FileResult(path), True) for path in waiting)
                    return
                while waiting and len(running) < num_processes:
                    running.append(Running(waiting.pop(0), options, Path(folder), sanitizer))
                time.sleep(0.05)
        finally:
            for each in running:
                each.end()


def test_files(parts: list[str]) -> list[str]:
    """Relative to the checkout; those that are for a GPU alone first, then the longest, so that none of these is last.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    found: list[Path] = []
    for part in parts:
        path = (ROOT / part).resolve()
        if not path.exists():
            raise FileNotFoundError(part)
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    order = sorted(dict.fromkeys(found), key=lambda path: ("gpu" not in path.name, -path.stat().st_size))
    return [os.path.relpath(path, ROOT) for path in order]


def compile_kernels(cover: str, num_processes: int, deadline: float | None) -> bool:
    """Whether all of it compiled; what is not done at the deadline is left to the tests."""
    command = [sys.executable, "-W", "ignore", "-m", "chatserve_kernels.aot", "--quiet"]
    command += ["--cover", cover, "--processes", str(num_processes)]
    with subprocess.Popen(command, cwd=ROOT, env=_environment(), start_new_session=True) as process:
        try:
            return process.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            print("the time limit came before all kernels were compiled")
            return True
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def device_name() -> str | None:
    """The GPU's, or None where torch sees none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return asked.stdout.strip() or None


def summary(results: list[FileResult], seconds: float) -> list[str]:
    """The failures with their last lines, what was not reached, and one line that counts all."""
    lines = []
    for result in results:
        for test in result.failed:
            lines += ["", f"FAILED {test}", *(f"    {line}" for line in result.lines.get(test, []))]
    not_reached = [test for result in results for test in result.not_reached]
    if not_reached:
        lines += ["", "Not reached:", *(f"    {test}" for test in not_reached)]
    counts = Counter(outcome for result in results for outcome in result.outcomes.values())
    said = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
    if not_reached:
        files = sum(result.collected is None and bool(result.not_reached) for result in results)
        said.append(f"{len(not_reached) - files} tests and {files} whole files not reached")
    return [*lines, "", f"{', '.join(said)} in {seconds:.0f} s"]


def main(arguments: list[str]) -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="scripts/test-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", default=[*DEFAULT_PARTS], help=f"files or folders: {', '.join(DEFAULT_PARTS)}"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests of such names, as pytest's")
    parser.add_argument("--only-gpu", action="store_true", help="only tests that are skipped without a GPU")
    parser.add_argument("--processes", type=int, default=min(4, cores), help="test files at a time (%(default)s)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of everything, compilation included")
    parser.add_argument(
        "--cover", choices=["values", "pairs", "triples"], default="pairs", help="what is compiled first"
    )
    parser.add_argument("--compile-processes", type=int, default=cores, help="(%(default)s)")
    parser.add_argument(
        "--sanitizer",
        choices=SANITIZERS,
        help="run the tests under NVIDIA's compute-sanitizer, which is slow: choose few, and none that capture graphs",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave compilation to whoever launches first")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    deadline = None if chosen.time_limit is None else started + chosen.time_limit
    try:
        files = test_files(chosen.parts)
    except FileNotFoundError as error:
        parser.error(f"there is no {error}")
    if min(chosen.processes, chosen.compile_processes) < 1:
        parser.error("expected at least 1 process")
    name = device_name()
    if name is None:
        print("scripts/test-gpu: torch sees no CUDA device here; run this on a machine with a GPU", file=sys.stderr)
        return 2
    print(name, flush=True)
    has_compiled = chosen.no_compile or compile_kernels(chosen.cover, chosen.compile_processes, deadline)
    options = ["-k", chosen.k] if chosen.k else []
    options += ["-m", "gpu"] if chosen.only_gpu else []
    results = []
    for result, _ in run_files(files, options, chosen.processes, deadline, chosen.sanitizer):
        results.append(result)
        print(result.line(), flush=True)
    print("\n".join(summary(results, time.monotonic() - started)))
    if not has_compiled or any(result.failed for result in results):
        return 1
    return 3 if any(result.not_reached for result in results) else 0


def _environment(*folders: Path) -> dict[str, str]:
    """This process' own, with the checkout before whatever else its PYTHONPATH names: packages may be there alone."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [*map(str, (ROOT, ROOT / "kernels", *folders)), *([inherited] if inherited else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _sanitize(tool: str) -> list[str]:
    code = str(SANITIZER_EXIT_CODE)
    return ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", code]


def _last_lines(output: str) -> list[str]:
    """Of a process that ended badly: a sanitizer's report from its beginning, or what was said at last."""
    lines = output.splitlines()
    reported = [line for line in lines if line.startswith("========= ") and not line.endswith("=")]
    return [*reported[:24], *reported[-1:]] if reported else lines[-8:]


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
