"""Check that notebooks and package are in step: in a fresh clone of HEAD, nbdev_clean and nbdev_export change nothing.

Without git (an unpacked archive) the working folder is copied and checked instead."""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIP = {
    ".git", ".venv", "_proc", "_docs", "runs", "artifacts", "__pycache__", ".pytest_cache", ".hypothesis",
    ".ipynb_checkpoints",
}


def git(*args) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)


def snapshot(root: Path) -> dict[str, bytes]:
    "Path → content of every file that is not a build product."
    files = (p for p in root.rglob("*") if p.is_file() and not SKIP & set(p.relative_to(root).parts))
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def fresh_copy(to: Path) -> None:
    "A clone of HEAD, or a copy of the folder where there is no git."
    if git("rev-parse", "--git-dir").returncode:
        print("  no git here: checking a copy of the folder")
        shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*SKIP, ".venv*", "*.egg-info"))
        return
    if dirty := git("status", "--porcelain").stdout:
        print("  the working tree has changes that are not committed; what is checked is HEAD:")
        print("".join(f"    {l}\n" for l in dirty.splitlines()[:10]), end="")
    done = subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(to)], capture_output=True, text=True)
    if done.returncode: sys.exit(f"git clone failed:\n{done.stderr}")


def main() -> int:
    print("== nbdev_clean and nbdev_export leave a fresh clone as it is", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        clone = Path(tmp)/"clone"
        fresh_copy(clone)
        before = snapshot(clone)
        for tool in ("nbdev_clean", "nbdev_export"):
            # this environment's first
            exe = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
            if not exe: sys.exit(f"{tool} is not installed: run make install, and this script with .venv/bin/python")
            done = subprocess.run([exe], cwd=clone, capture_output=True, text=True)
            if done.returncode:
                print(done.stdout + done.stderr)
                return 1
        after = snapshot(clone)
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    for n in changed: print(f"  {'new' if n not in before else 'gone' if n not in after else 'changed'}: {n}")
    if changed: print("Run nbdev_clean and nbdev_export and commit what they write.")
    else: print(f"  {len(before)} files, none changed")
    return bool(changed)


if __name__ == "__main__": sys.exit(main())
