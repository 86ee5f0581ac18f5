"""Smoke test of the kernels: runs the tests with the accelerator's mark and counts outcomes as they come."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2] / "tests"


class Counts:
    """A pytest plugin that counts outcomes and passes the counts so far to `keep`."""

    def __init__(self, keep):
        self.result = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
        self._keep = keep

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:  # setup and teardown count only if they fail or skip
            self._count(report.outcome, report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._count("failed", report)

    def _count(self, outcome, report):
        self.result[outcome] += 1
        if outcome == "failed":
            lines = [line[1:] for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.result["failures"].append({"test": report.nodeid, "says": " ".join(" ".join(lines).split())[:300]})
        self._keep(self.result)


def marked(mark: str) -> list[str]:
    """Test files that use a mark; importing all of them would take longer than the tests."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if f"mark.{mark}" in path.read_text()]


def measure(mark, *, chip, keep) -> dict:
    """Runs the tests in this process."""
    counts = Counts(keep)
    keep(counts.result)
    files = marked(mark)
    options = ["-q", "-m", mark, "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    code = pytest.main([*options, *files], plugins=[counts]) if files else pytest.ExitCode.NO_TESTS_COLLECTED
    known = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    if code not in known and not counts.result["failed"]:
        raise RuntimeError(f"pytest ended with exit code {int(code)}")
    return counts.result
