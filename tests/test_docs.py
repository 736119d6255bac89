"The documentation as nbdev prepares it for Quarto, without Quarto."
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.docs
def test_documentation_is_processed_and_no_link_is_dead():
    "In a process of its own: nbdev starts workers and executes the notebooks' exported cells."
    done = subprocess.run([sys.executable, "tests/ci/docs.py"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
