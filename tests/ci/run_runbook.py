"""Run a runbook through papermill and print its result.   python tests/ci/run_runbook.py smoke [-p name value] …

The executed notebook is runs/NAME/NAME.out.ipynb. What is printed is the text output of the cells tagged
`result`, or, where
none is tagged, of the last cell that has any."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cell_text(cell: dict) -> str:
    "The text outputs of a cell, without terminal colours."
    parts = []
    for out in cell.get("outputs", []):
        data = out.get("data", {})
        parts.append(
            "".join(
                out.get("text") or data.get("text/markdown") or data.get("text/plain") or out.get("traceback") or ""
            )
        )
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(p.rstrip("\n") for p in parts)).strip("\n")


def result(nb: dict) -> str:
    "What a reader wants to know of an executed runbook."
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    tagged = [t for c in code if "result" in c["metadata"].get("tags", []) and (t := cell_text(c))]
    texts = tagged or [t for c in code if (t := cell_text(c))][-1:]
    return "\n\n".join(texts) or "(the notebook printed nothing)"


def failure(nb: dict) -> str:
    "The error of the cell that failed; empty where none did."
    for cell in nb["cells"]:
        for out in cell.get("outputs", []):
            if out["output_type"] == "error": return f"{out['ename']}: {out['evalue']}"
    return ""


def papermill(notebook: str, out: str, args: list[str]) -> tuple[int, str]:
    "Run papermill, showing what the notebook prints while it prints it; its exit code, and what it said of a failure."
    cmd = [
        sys.executable, "-m", "papermill", "--no-progress-bar", "--log-level", "WARNING", "--stdout-file", "-",
        notebook, out, *args,
    ]
    said = []
    with subprocess.Popen(cmd, cwd=ROOT, stderr=subprocess.PIPE, text=True) as p:
        for line in p.stderr:
            # the notebook has it, in better form
            if said or line.startswith("Traceback"): said.append(line)
            elif "Kernel is running over TCP" not in line: print(line, end="", file=sys.stderr)   # local, as always
    return p.returncode, "".join(said)


def main() -> int:
    name, *args = sys.argv[1:] or ["smoke"]
    out = ROOT/"runs"/name/f"{name}.out.ipynb"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    rel = out.relative_to(ROOT)
    print(f"Running nbs/runbooks/{name}.ipynb; the notebook with its results grows in {rel}\n", flush=True)
    code, said = papermill(f"nbs/runbooks/{name}.ipynb", str(rel), args)
    nb = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"cells": []}
    if code: print(f"\nThe runbook failed. {failure(nb) or said}\nThe whole story: {rel}")
    else: print(f"\n{result(nb)}\n\nThe whole notebook, with its curves: {rel}")
    return code


if __name__ == "__main__": sys.exit(main())
