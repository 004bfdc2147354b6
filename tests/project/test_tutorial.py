"""The tutorial does what it says: every block of it is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial-own-data.md"
BLOCK = re.compile(r"```(sh|python|yaml)(?: (\S+))?\n(.*?)```", re.DOTALL)


def test_the_tutorial_finds_the_two_sites_with_wrong_labels(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "FEDNORO_CACHE": str(tmp_path / "cache"),
    }
    env |= {"OMP_NUM_THREADS": "1"}
    printed = ""
    blocks = BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))
    assert [kind for kind, _, _ in blocks] == ["python", "sh", "yaml", "sh", "python"]
    for kind, name, text in blocks:
        if kind == "yaml":
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        command = [sys.executable, "-c", text] if kind == "python" else ["sh", "-ec", text]
        ended = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr
        printed += ended.stdout
    assert re.findall(r"(\w+) looks noisy", printed) == ["north", "west"]
    assert len(re.findall(r"looks clean", printed)) == 4
    assert "720 images" in printed
    # nobody knows the truth about a user's labels
    assert "labels wrong" not in printed and "recall" not in printed
