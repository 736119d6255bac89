"""Small cases of every kernel, forward and backward, for compute-sanitizer. On a machine with a GPU:

    python tests/gpu/memcheck.py                      # compiles, then starts itself under compute-sanitizer
    --tool memcheck; exit code 0: clean
    python tests/gpu/memcheck.py --tool initcheck     # or racecheck, synccheck

PyTorch's caching allocator would hide a step past a tensor's end inside a larger block: it is off, so that each
tensor is an allocation of its own.

Every kernel of the package has to be launched: those that were not are listed, and the exit code is 1.
`TRITON_INTERPRET=1 python tests/gpu/memcheck.py --work` does the same without a card,
on smaller cases and without the sanitizer: it says that the script works, not that the kernels are clean."""

import os
import shutil
import subprocess
import sys
from functools import partial
from glob import glob
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]


def sanitizer() -> str:
    "Where the program is."
    for found in (
        shutil.which("compute-sanitizer"), *sorted(glob("/usr/local/cuda*/bin/compute-sanitizer")),
        *sorted(glob("/opt/nvidia/**/compute-sanitizer", recursive=True)),
        *sorted(glob(f"{sys.prefix}/lib/python*/site-packages/nvidia/**/compute-sanitizer", recursive=True)),
    ):
        if found and os.access(found, os.X_OK): return found
    sys.exit("compute-sanitizer was not found: it comes with the CUDA toolkit")


def attention_cases(small: bool):
    import torch
    from triton_cases import SHAPES, Config, Shape
    more = dict(n_init=1, n_local=2, seed=0)
    if small:
        s = Shape("tiny", torch.float32, 1, 2, 8, 8, 4, 2, 4, 4)
        yield Config(s, 17, 5, cu=None, strided=True, **more)
        yield Config(s, 17, 5, cu=(0, 1, 7, 17), spare=True, **more)
        return
    for name in ("paper", "h3", "fp32"):      # 16-bit with whole widths, widths that are masked, fp32
        s = SHAPES[name]
        yield Config(s, 3 * s.l_sel + 13, 33, cu=None, strided=True, **more)
        yield Config(s, 3 * s.l_sel + 13, 33, cu=(0, 1, s.l, s.l + s.l_sel, 3 * s.l_sel + 13), spare=True, **more)


def finite(case, xs):
    assert all(x.isfinite().all() for x in xs), case


def attention(c, algorithm, device):
    "The operation's forward and backward."
    from triton_cases import make, run
    inputs, do = make(c, device)
    finite((c, algorithm), run(inputs, do, c, algorithm).values())


def phi(kind, cu, dtype, device, l, d, S, G, D):
    "Compression of keys and values, slices of one tensor, forward and backward."
    import torch
    from nsa_nb.compress import Compressor
    from nsa_nb.geometry import Geometry
    from nsa_nb.kernels.packing import compressed_borders
    from nsa_nb.kernels.compress import triton_compress
    a, b = (Compressor(kind, l, d, G, D).to(device, dtype) for _ in range(2))
    x = torch.randn(2, 1, S, 3, G, D).to(device, dtype).requires_grad_()
    at = cu and torch.tensor(cu, dtype=torch.int32, device=device)
    out = triton_compress(
        a, b, x[0, :, :, 1], x[1, :, :, 1], at, cu and compressed_borders(at, Geometry(l, d, l, 3, 1))
    )
    finite(
        (kind, cu, dtype),
        [*out, *torch.autograd.grad(out, [x, *a.parameters(), *b.parameters()], [torch.randn_like(y) for y in out])],
    )


def split(pairs, dtype, device, H, G, D, S):
    "A layer's one product taken apart and turned, forward and backward."
    import torch
    from nsa_nb.kernels.projection import split_turn
    from nsa_nb.rope import rope_tables
    y = torch.randn(2, S, (H + 2 * pairs * G) * D + 3 * H + 5).to(device, dtype).requires_grad_()
    q, ks, vs, z = split_turn(y, *rope_tables(torch.arange(S, device=device), D), H, G, D, D, pairs, 3 * H)
    parts = [q, *ks, *vs, z]
    finite((pairs, dtype), [*parts, *torch.autograd.grad(parts, y, [torch.randn_like(x) for x in parts])])


def decode(launches, dtype, device, steps, B, G, h, D, **sizes):
    "Steps of decoding, each with the appending of its token, from an empty cache to a full one."
    import torch
    from nsa_nb.cache import StaticNSACache
    from nsa_nb.kernels.decode import DecodePlan, decode_append, decode_attention
    from nsa_nb.geometry import Geometry
    cache = StaticNSACache(Geometry(**sizes), B, steps, G, D, D, dtype, device)
    new = lambda *shape: torch.randn(*shape).to(device, dtype)
    for _ in range(steps):
        decode_append(cache, *(new(B, 1, G, D) for _ in range(6)))
        finite(
            (launches, dtype),
            [
                decode_attention(
                    new(B, 1, G * h, D), cache, new(B, 1, G * h, 3).sigmoid(),
                    plan=DecodePlan(4, 2, 4, 64, 1024, 0, launches=2) if launches == 2 else None,
                )
            ],
        )


def cases(small: bool, device: str):
    "(name, function) of all."
    import torch
    from triton_cases import ALGORITHMS
    for c in attention_cases(small):
        for a in ALGORITHMS: yield f"attention {a}", partial(attention, c, a, device)
    for dtype in (torch.float32,) if small else (torch.bfloat16, torch.float16, torch.float32):
        one = dict(l=4, d=2, S=15, G=1, D=8) if small else dict(l=32, d=16, S=301, G=2, D=64)
        for kind in ("avg", "conv", "mlp"):
            for cu in (None, [0, 1, 1 + one["l"], one["S"]]):
                yield f"φ {kind}", partial(phi, kind, cu, dtype, device, **one)
        if not small:
            # widths that are masked
            for kind in ("avg", "conv", "mlp"):
                yield f"φ {kind}", partial(phi, kind, None, dtype, device, l=9, d=3, S=100, G=1, D=24)
        for pairs in (1, 3):
            for D in (8,) if small else (64, 40):
                yield (
                    "split",
                    partial(split, pairs, dtype, device, 2 if small else 6, 1 if small else 2, D, 5 if small else 131),
                )
        for launches in (1, 2):
            yield (
                "decode",
                partial(
                    decode,
                    launches,
                    dtype,
                    device,
                    **dict(steps=6, B=1, G=1, h=2, D=8, l=4, d=2, l_sel=4, n_sel=3, w=5)
                    if small
                    else dict(steps=150, B=2, G=2, h=3, D=64, l=32, d=16, l_sel=32, n_sel=4, w=33),
                ),
            )


def watch() -> set:
    "Names of the kernels that are launched from now on."
    import triton
    from triton.runtime.interpreter import InterpretedFunction
    launched = set()
    for kind in (triton.JITFunction, InterpretedFunction):
        def run(self, *args, was=kind.run, **kw):
            if not kw.get("warmup"): launched.add(self.fn.__name__)
            return was(self, *args, **kw)
        kind.run = run
    return launched


def work(only: str = "") -> int:
    "All cases whose name has this text, on the card or in Triton's interpreter; 1 when a kernel was not launched."
    import torch
    small = os.environ.get("TRITON_INTERPRET") == "1"
    launched = watch()
    n = 0
    torch.manual_seed(0)
    for name, f in cases(small, "cpu" if small else "cuda"):
        if only in name:
            f()
            n += 1
    if not small: torch.cuda.synchronize()
    from kernel_compile import kernels      # last: it takes the interpreter's variable away
    missing = {k: where for k, where in kernels().items() if k not in launched}
    for k, where in missing.items(): print(f"{k} of nsa_nb/{where}: no case launches it")
    print(f"{n} cases are done, {len(launched)} kernels were launched")
    return int(bool(missing))


if __name__ == "__main__":
    if "--work" in sys.argv: sys.exit(work(sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""))
    else:
        tool = sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else "memcheck"
        me = [sys.executable, str(Path(__file__).resolve()), "--work"]
        if (code := subprocess.run(me).returncode): sys.exit(code)  # compiles into Triton's cache
        sys.exit(
            subprocess.run(
                [sanitizer(), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *me],
                env=os.environ | dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
            ).returncode
        )
