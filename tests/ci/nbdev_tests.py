"""Run the cells of all notebooks as tests (nbdev_test), with the time of each notebook and a count of the cells
left out.

Cells marked `#| cuda` run where there is a GPU, `#| multigpu` where there are two, `#| slow` with --flags slow."""

import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def skip_flags() -> list[str]:
    "The flags that make nbdev_test skip a cell, from settings.ini."
    ini = configparser.ConfigParser(delimiters=["="])
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    return ini["DEFAULT"]["tst_flags"].split()


def skipped_cells(nbs: Path, run: tuple = ()) -> Counter:
    "How many code cells each flag leaves out, below `nbs`; flags in `run` leave out none. Runbooks are not counted."
    found = Counter()
    for path in sorted(nbs.rglob("*.ipynb")):
        if (path.parent/".notest").exists() or ".ipynb_checkpoints" in path.parts: continue
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            marks = re.findall(r"^#\s*\|\s*(\w+)", "".join(cell["source"]), re.M) if cell["cell_type"] == "code" else []
            if hit := [m for m in marks if m in skip_flags() and m not in run]: found[hit[0]] += 1
    return found


def gpus() -> int:
    "GPUs that torch sees, asked of another process: nbdev_test forks, and CUDA does not survive a fork."
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() or 0)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--flags", default="", help="cells to run that are otherwise skipped, e.g. 'slow'")
    ap.add_argument("--n-workers", default=2, type=int, help="notebooks at a time")
    args = ap.parse_args()
    have = gpus()
    flags = sorted({*args.flags.split(), *(["cuda"] if have else []), *(["multigpu"] if have > 1 else [])})
    print(f"== nbdev_test ({args.n_workers} at a time, {have} GPUs)", flush=True)
    # this environment's first
    exe = shutil.which("nbdev_test", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not exe: sys.exit("nbdev_test is not installed: run make install, and this script with .venv/bin/python")
    # a run's, not a test's
    settings = {k: v for k, v in os.environ.items() if not k.startswith("NSA_") and k not in ("CONFIG", "DDP_SAFE")}
    env = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"} | settings   # one thread a worker: the workers share the cores
    if not have: env["TRITON_INTERPRET"] = "1"   # before any worker imports Triton, or its kernels' tests stand aside
    start = time.time()
    code = subprocess.run([exe, "--n_workers", str(args.n_workers), "--timing",
                           "--flags", " ".join(flags)], cwd=ROOT, env=env).returncode
    skipped = skipped_cells(ROOT/"nbs", tuple(flags))
    left = ", ".join(f"{skipped[f]} {f}" for f in skip_flags())
    print(f"  {time.time() - start:.0f} s; cells left out: {left}", flush=True)
    return code


if __name__ == "__main__": sys.exit(main())
