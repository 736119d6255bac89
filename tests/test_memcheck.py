"The script that compute-sanitizer runs launches every kernel of the package; here on a CPU, in Triton's interpreter."
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zygote import search_path

SCRIPT = Path(__file__).parent/"gpu"/"memcheck.py"


def work(*args):
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=search_path())
    return subprocess.run([sys.executable, SCRIPT, "--work", *args], capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_every_kernel_is_launched():
    done = work()
    assert (
        done.returncode == 0 and "no case launches it" not in done.stdout and "kernels were launched" in done.stdout
    ), done.stdout + done.stderr[-2000:]


def test_a_kernel_that_is_not_launched_is_named():
    done = work("--only", "split")
    assert (
        done.returncode == 1
        and "_decode of nsa_nb/kernels/decode.py: no case launches it" in done.stdout
        and "_split_turn of" not in done.stdout
    ), done.stdout + done.stderr[-2000:]
