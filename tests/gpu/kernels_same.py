"""Which Triton kernels differ between a commit and the working tree, by their syntax trees.

    python tests/gpu/kernels_same.py COMMIT [--renamed OLD=NEW ...]

Equal trees compile to equal code, so a change of host code, layout or prose needs no card to keep the kernels'
bits; what the launches pass is shown by tests/gpu/hashes.py. Line breaks of docstrings don't count. Exit code 1 where a
kernel differs or is gone."""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def is_kernel(node: ast.AST) -> bool:
    "A function under @jit or @triton.jit, with or without arguments."
    if not isinstance(node, ast.FunctionDef): return False
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and called.attr == "jit": return True
        if isinstance(called, ast.Name) and called.id == "jit": return True
    return False


class Plain(ast.NodeTransformer):
    "New names for renamed kernels, docstrings in one line."

    def __init__(self, renamed: dict[str, str]): self.renamed = renamed

    def visit_Name(self, node):
        node.id = self.renamed.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node):
        node.name = self.renamed.get(node.name, node.name)
        self.generic_visit(node)
        first = node.body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_text and isinstance(first.value.value, str): first.value.value = " ".join(first.value.value.split())
        return node


def kernels(texts: Iterable[str], renamed: dict[str, str]) -> dict[str, list[str]]:
    "Name → syntax trees of the kernels of that name, over all modules."
    found = {}
    for text in texts:
        for node in ast.walk(Plain(renamed).visit(ast.parse(text))):
            if is_kernel(node): found.setdefault(node.name, []).append(ast.dump(node))
    return {name: sorted(trees) for name, trees in found.items()}


def git(*args: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True).stdout


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("commit")
    p.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    args = p.parse_args()
    renamed = dict(pair.split("=") for pair in args.renamed)
    files = [f for f in git("ls-tree", "-r", "--name-only", args.commit, "nsa_nb").splitlines() if f.endswith(".py")]
    before = kernels((git("show", f"{args.commit}:{f}") for f in files), renamed)
    now = kernels((f.read_text(encoding="utf-8") for f in sorted((ROOT/"nsa_nb").rglob("*.py"))), {})
    changed = [name for name in before if now.get(name) != before[name]]
    for name in changed: print("differs" if name in now else "gone", name)
    for name in sorted(now.keys() - before.keys()): print("new", name)
    print(f"{len(before)} kernels at {args.commit}, {len(now)} here, {len(changed)} differ")
    return bool(changed)


if __name__ == "__main__": sys.exit(main())
