"""README's table of the default experiment, played again: `make test-slow`,
some three minutes on two cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| (fedavg|fedla|fednoro) \| ([\d.]+) ± [\d.]+ \| ([\d.]+) ± [\d.]+ \| (\S+(?: of \d+)?) \|",
    re.MULTILINE,
)
POINTS = 1.0  # another processor rounds otherwise, and rounding grows over 40 rounds


def rows(text: str) -> dict[str, tuple[float, float, str]]:
    return {
        name: (float(best), float(last), exact) for name, best, last, exact in ROW.findall(text)
    }


@pytest.mark.slow
def test_the_default_experiment_gives_what_the_readme_says() -> None:
    said = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.digits"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert list(said) == list(found) == ["fedavg", "fedla", "fednoro"]
    for name, (best, last, exact) in said.items():
        assert found[name] == (
            pytest.approx(best, abs=POINTS),
            pytest.approx(last, abs=POINTS),
            exact,
        ), (name, found)
