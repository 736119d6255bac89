"""Small cases of every kernel, forward and backward, for compute-sanitizer. On a machine with a GPU:

    python tests/gpu/memcheck.py                      # compiles, then starts itself under compute-sanitizer --tool memcheck; exit code 0: clean
    python tests/gpu/memcheck.py --tool initcheck     # or racecheck, synccheck

PyTorch's caching allocator would hide a step past a tensor's end inside a larger block: it is off, so that each tensor is an allocation of its own."""
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]


def sanitizer() -> str:
    "Where the program is."
    for found in (shutil.which("compute-sanitizer"), *sorted(glob("/usr/local/cuda*/bin/compute-sanitizer")), *sorted(glob("/opt/nvidia/**/compute-sanitizer", recursive=True)),
                  *sorted(glob(f"{sys.prefix}/lib/python*/site-packages/nvidia/**/compute-sanitizer", recursive=True))):
        if found and os.access(found, os.X_OK): return found
    sys.exit("compute-sanitizer was not found: it comes with the CUDA toolkit")


def cases():
    from triton_cases import SHAPES, Config
    more = dict(n_init=1, n_local=2, seed=0)
    for name in ("paper", "h3", "fp32"):      # 16-bit with whole widths, widths that are masked, fp32
        s = SHAPES[name]
        yield Config(s, 3 * s.l_sel + 13, 33, cu=None, strided=True, **more)
        yield Config(s, 3 * s.l_sel + 13, 33, cu=(0, 1, s.l, s.l + s.l_sel, 3 * s.l_sel + 13), spare=True, **more)


def work():
    "Each algorithm on each case."
    import torch
    from triton_cases import ALGORITHMS, make, run
    n = 0
    for c in cases():
        inputs, do = make(c)
        for a in ALGORITHMS:
            got = run(inputs, do, c, a)
            assert all(x.isfinite().all() for x in got.values()), (c, a)
            n += 1
    torch.cuda.synchronize()
    print(f"{n} forwards and backwards are done")


if __name__ == "__main__":
    if "--work" in sys.argv: work()
    else:
        tool = sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else "memcheck"
        me = [sys.executable, str(Path(__file__).resolve()), "--work"]
        subprocess.run(me, check=True)                                                    # compiles into Triton's cache
        sys.exit(subprocess.run([sanitizer(), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *me], env=os.environ | dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1")).returncode)
