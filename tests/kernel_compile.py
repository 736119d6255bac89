"""Compile every kernel of the package for cards that are not there.   python tests/kernel_compile.py [--only TEXT]
[--kernel TEXT] [--every-target] [--ptx FOLDER] [--json FILE]

The package's own launch code runs on small CPU tensors, with a launcher that writes down what it was asked for
instead of launching: so the
specialisations (types, divisibility by 16, constants, warps, stages) are those that a card would get, and a new
kernel is covered by
being called. Each is then compiled down to machine code for each target. New tensors are zeros, for nothing
fills them here.

The table says registers, bytes of stack (spills are there) and shared memory of each, and which matrix
instruction it uses. Shared memory must be within the
card's, and within what nsa_nb.kernels.tuning.shared_bytes promises: by that the package chooses tiles, and by
nsa_nb.kernels.decode.decode_bytes whether a step is decoded by kernels. Cases named "wide …" ask for that
alone, unless --every-target
is given: code for heads of 256 takes minutes to make, its tiles' place in memory half a second."""

import argparse
import ast
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from triton._C.libtriton import ir, nvidia, passes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptx_version_from_options  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime import jit as tjit  # noqa: E402

# target: compute capability, multiprocessors, and the shared memory one program can have (CUDA C++ Programming Guide,
# table of compute capabilities)
TARGETS = {80: ((8, 0), 108, 163 * 1024), 89: ((8, 9), 128, 99 * 1024), 90: ((9, 0), 132, 227 * 1024)}
# kernels whose tiles the card's shared memory decides -> their name in nsa_nb.kernels.tuning.SHRINK
TILED = {
    f"_{k}": k for k in ("rows_fwd", "rows_dq", "keys_bwd", "block_fwd", "block_bwd", "tiles_fwd", "tiles_dq")
} | dict(_scores="select", _tiles_dkv="tiles_bwd", _sel_fwd="query_fwd", _sel_dq="query_dq")
now = SimpleNamespace(target=90, case="", memory_only=False, fits=True)      # what is being recorded


# ---- calls that launch the kernels: name -> (targets, function)
# A kernel that none of them launches fails the test. A case named "… +" counts only for kernels that no case of its
# name before it has launched for that target. With --every-target each case is compiled for all of TARGETS.
def attention(H, G, Dk, dtype, S=256, Dv=None, cu=None, selection="adaptive", **sizes):
    "Forward and backward of the operation."
    from nsa_nb.attention import nsa_attention
    from nsa_nb.geometry import Geometry
    geo = Geometry(**sizes)
    Dv = Dv or Dk
    ends = cu or [0, S]
    N = sum(geo.num_cmp(b - a) for a, b in zip(ends, ends[1:]))
    def t(*shape): return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    xs = (
        t(1, S, H, Dk), t(1, N, G, Dk), t(1, N, G, Dv), t(1, S, G, Dk), t(1, S, G, Dv), t(1, S, G, Dk), t(1, S, G, Dv),
        t(1, S, H, 3),
    )
    o = nsa_attention(
        *xs, **sizes, cu_seqlens=cu and torch.tensor(cu, dtype=torch.int32), backend="triton", selection=selection
    )
    torch.autograd.grad(o.float().sum(), xs)


PAPER, SMALL = dict(l=32, d=16, l_sel=64, n_sel=16, w=512), dict(l=8, d=4, l_sel=8, n_sel=4, w=12)
CASES = {}
for v in ("v3", "v2", "v1"):
    more = " +" if v != "v3" else ""
    CASES[f"A bf16 h6 d64 {v}{more}"] = (80, 90), partial(attention, 12, 2, 64, torch.bfloat16, selection=v, **PAPER)
    # sm_89 has the least shared memory
    CASES[f"B bf16 h16 d128 {v}{more}"] = (89,), partial(attention, 64, 4, 128, torch.bfloat16, selection=v, **PAPER)
    CASES[f"fp32 h1 d16 {v}{more}"] = (), partial(attention, 2, 2, 16, torch.float32, S=50, selection=v, **SMALL)
    if v == "v2":
        CASES["one place, nothing forced v2"] = (
            (90,),
            partial(attention, 12, 2, 64, torch.bfloat16, selection=v, **PAPER | dict(n_sel=1, n_init=0, n_local=0)),
        )
    CASES[f"A bf16 packed {v}{more}"] = (
        (),
        partial(attention, 12, 2, 64, torch.bfloat16, cu=[0, 56, 256], selection=v, **PAPER),
    )
    # it skips blocks from some length on
    if v == "v3":
        CASES["A bf16 h6 d64 long v3"] = (
            (90,),
            partial(attention, 12, 2, 64, torch.bfloat16, S=4160, selection=v, **PAPER),
        )
    CASES[f"wide fp16 h3 d256 {v}{more}"] = (
        (80, 89),
        partial(attention, 6, 2, 192, torch.float16, Dv=256, selection=v, **PAPER),
    )
    CASES[f"wide fp32 h3 d256 {v}{more}"] = (80, 89), partial(attention, 6, 2, 256, torch.float32, selection=v, **PAPER)
    CASES[f"wide bf16 l_sel 128 {v}{more}"] = (
        (80, 89),
        partial(attention, 6, 2, 256, torch.bfloat16, selection=v, **PAPER | dict(l_sel=128)),
    )


def phi(kind, G, D, dtype, l, d, S=512, cu=None):
    "Compression of keys and values, forward and backward."
    from nsa_nb.compress import Compressor
    from nsa_nb.geometry import Geometry
    from nsa_nb.kernels.packing import compressed_borders
    from nsa_nb.kernels.compress import triton_compress
    a, b = Compressor(kind, l, d, G, D), Compressor(kind, l, d, G, D)
    x = torch.zeros(2, 1, S, 3, G, D, dtype=dtype, requires_grad=True)
    at = cu and torch.tensor(cu, dtype=torch.int32)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        out = triton_compress(
            a, b, x[0, :, :, 0], x[1, :, :, 0], at, cu and compressed_borders(at, Geometry(l, d, l, 3, 1))
        )
    torch.autograd.grad([y.float().sum() for y in out], [x, *a.parameters(), *b.parameters()])


def decode(H, G, D, dtype, B=2, room=True, **sizes):
    "One decoding step with the appending of its token; room=False: also where the card has none for it."
    from nsa_nb.kernels import decode as package
    from nsa_nb.cache import StaticNSACache
    from nsa_nb.geometry import Geometry
    geo = Geometry(**sizes)
    asked = package.decode_unsupported
    cache = StaticNSACache(geo, B, 4096, G, D, D, dtype)
    now.fits = (reason := asked(cache.k_sel, cache.v_sel, geo, H // G, limit=TARGETS[now.target][2])) is None
    assert now.fits or not room, reason
    package.decode_unsupported = lambda *a: None
    try:
        package.decode_append(cache, *(torch.zeros(B, 1, G, D, dtype=dtype) for _ in range(6)))
        package.decode_attention(torch.zeros(B, 1, H, D, dtype=dtype), cache, torch.zeros(B, 1, H, 3, dtype=dtype))
    finally: package.decode_unsupported, now.fits = asked, True


def split(H, G, D, dtype, pairs=3, nz=36, fill=28, B=1, S=256):
    "A layer's one product taken apart and turned, forward and backward."
    from nsa_nb.kernels.projection import split_turn
    y = torch.zeros(B, S, H * D + 2 * pairs * G * D + nz + fill, dtype=dtype, requires_grad=True)
    q, ks, vs, z = split_turn(y, torch.zeros(S, 1, D // 2), torch.zeros(S, 1, D // 2), H, G, D, D, pairs, nz)
    torch.autograd.grad([x.float().sum() for x in (q, *ks, *vs, z)], [y])


for kind in ("avg", "conv", "mlp"):
    CASES[f"{kind} A"] = (80, 89, 90), partial(phi, kind, 2, 64, torch.bfloat16, 32, 16)
    CASES[f"{kind} A packed"] = (90,), partial(phi, kind, 2, 64, torch.bfloat16, 32, 16, 512, [0, 100, 512])
    CASES[f"{kind} fp32 d192"] = (80,), partial(phi, kind, 2, 192, torch.float32, 9, 3)
CASES["split A"] = (80, 89, 90), partial(split, 12, 2, 64, torch.bfloat16)
CASES["split one pair"] = (80, 90), partial(split, 12, 2, 64, torch.bfloat16, pairs=1, nz=0, fill=0, B=4)
CASES["split fp32 d6"] = (90,), partial(split, 3, 1, 6, torch.float32, nz=9, fill=0)
CASES["decode A"] = (80, 90), partial(decode, 12, 2, 64, torch.bfloat16, **PAPER)
CASES["decode one place, nothing forced"] = (
    (90,),
    partial(decode, 12, 2, 64, torch.bfloat16, **PAPER | dict(n_sel=1, n_init=0, n_local=0)),
)
CASES["decode B"] = (89, 90), partial(decode, 64, 4, 128, torch.bfloat16, **PAPER)
# one tile under way
CASES["decode B, many rows"] = (80, 90), partial(decode, 64, 4, 128, torch.bfloat16, B=4, **PAPER)
for h, dtype in ((1, torch.float16), (16, torch.bfloat16), (32, torch.bfloat16)):
    CASES[f"wide decode h{h} d256, many rows"] = (
        (80, 90),
        partial(decode, 4 * h, 4, 256, dtype, B=4, room=False, **PAPER),
    )
# those that a card has no room for ask for the bound alone: decode_attention refuses them
for name, where, G, h, D, dtype, sizes in (
    ("fp32 h1 d256", (89,), 2, 1, 256, torch.float32, PAPER), ("fp32 h6 d64", (89,), 2, 6, 64, torch.float32, PAPER),
    ("fp32 h20 d256", (80, 89), 1, 20, 256, torch.float32, PAPER),
    ("bf16 h16 d256", (89,), 2, 16, 256, torch.bfloat16, PAPER),
    ("fp16 h64 d128", (89, 90), 1, 64, 128, torch.float16, PAPER),
    ("bf16 h128 d64", (90,), 1, 128, 64, torch.bfloat16, PAPER),
    ("bf16 h6 d128 128 blocks", (89,), 1, 6, 128, torch.bfloat16, PAPER | dict(l=4, d=1, l_sel=128)),
    ("bf16 h6 d64 l = l_sel = d", (89,), 1, 6, 64, torch.bfloat16, PAPER | dict(l=16, l_sel=16)),
    ("bf16 h6 d64 l 32d", (89,), 1, 6, 64, torch.bfloat16, PAPER | dict(l=64, d=2)),
):
    CASES[f"wide decode {name}"] = where, partial(decode, G * h, G, D, dtype, room=False, **sizes)


# ---- recording ----
recorded = {}     # (kernel, specialisation, target) -> what to compile


def fake_run(self, *args, grid, warmup=False, **kwargs):
    "In place of JITFunction.run: bind as it does, and write down."
    backend = make_backend(GPUTarget("cuda", now.target, 32))
    bound, spec, rest = tjit.create_function_from_signature(self.signature, self.params, backend)(*args, **kwargs)
    _, signature, constexprs, attrs = self._pack_args(backend, kwargs, bound, spec, rest)
    if callable(grid): grid = grid(bound)
    if (now.memory_only or not now.fits) and self.fn.__qualname__ not in (*TILED, "_decode"): return
    if now.case.endswith("+") and self.fn.__qualname__ in now.known: return
    key = (
        self.fn.__qualname__,
        str(
            (
                signature, sorted(map(str, constexprs.items())), sorted(map(str, attrs.items())),
                sorted(map(str, rest.items())),
            )
        ),
        now.target,
    )
    recorded.setdefault(
        key,
        dict(
            memory_only=now.memory_only or not now.fits, fits=now.fits, fn=self, signature=signature,
            constexprs=constexprs, attrs=attrs, options=rest, target=now.target, case=now.case,
        ),
    )


def stage():
    "Make this process believe in the card, and new tensors hold zeros."
    import nsa_nb.kernels.jit as package_jit       # before any module that takes names from it
    package_jit.triton_unavailable = lambda device: None
    import nsa_nb.kernels.tuning as package_tuning
    package_tuning.shared_memory = lambda: TARGETS[now.target][2]    # before any module that takes its name
    tjit.JITFunction.run = fake_run
    # every launch is Triton's own
    package_jit.Kernel.launch = lambda self, grid, args, consts: self.run(*args, grid=grid, **consts)
    cap = lambda *a: TARGETS[now.target][0]
    torch.cuda.get_device_capability = cap
    torch.cuda.get_device_properties = lambda *a: SimpleNamespace(
        name=f"sm_{now.target}", major=cap()[0], minor=cap()[1], multi_processor_count=TARGETS[now.target][1],
        shared_memory_per_block_optin=TARGETS[now.target][2], total_memory=80 << 30, L2_cache_size=50 << 20,
    )
    torch.cuda.get_device_name = lambda *a: f"sm_{now.target}"
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros


def record(only: str, every: bool):
    stage()
    for name, (where, f) in CASES.items():
        if only not in name: continue
        now.memory_only = name.startswith("wide") and not every
        for now.target in TARGETS if every else where:
            kind = name.rsplit(" v", 1)[0]
            now.case, now.known = (
                name,
                {
                    k[0]
                    for k, r in recorded.items()
                    if r["target"] == now.target and r["case"] != name and (r["case"].rsplit(" v", 1)[0] == kind)
                },
            )
            f()


# ---- which kernels there are: @jit functions that no other @jit function calls ----
def kernels() -> dict[str, str]:
    "Kernel -> file, read from the sources, so that a module nobody imports is seen too."
    where = {}
    called = set()
    for path in sorted((ROOT/"nsa_nb").rglob("*.py")):
        for f in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(f, ast.FunctionDef) and any(re.search(r"\bjit\b", ast.unparse(x)) for x in f.decorator_list)
            ):
                continue
            where[f.name] = path.relative_to(ROOT/"nsa_nb").as_posix()
            called |= {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} | {
                n.attr for n in ast.walk(f) if isinstance(n, ast.Attribute)
            }
    return {k: v for k, v in where.items() if k not in called}


# ---- compiling ----
def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack a thread, read from the machine code by NVIDIA's tool, which comes
    with Triton."""
    tool = Path(triton.__file__).parent/"backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        said = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    m = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return dict(registers=int(m[1]), stack=int(m[2])) if m else dict(registers=-1, stack=-1)


def allocated(r: dict) -> int:
    "Bytes of shared memory of a program: the compiler's passes up to where they are known."
    target = GPUTarget("cuda", r["target"], 32)
    backend = make_backend(target)
    source = ASTSource(r["fn"], r["signature"], r["constexprs"], r["attrs"])
    options = backend.parse_options(dict(r["options"]))
    context = ir.context()
    stages = {}
    backend.add_stages(stages, options, source.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata = dict(target=target, **vars(options))
    for stage in ("ttir", "ttgir"): module = stages[stage](module, metadata)
    pm = ir.pass_manager(context)          # the first passes of the next stage, make_llir
    passes.ttgpuir.add_combine_tensor_select_and_if(pm)
    passes.ttgpuir.add_allocate_warp_groups(pm)
    passes.convert.add_scf_to_cf(pm)
    passes.gluon.add_inliner(pm)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(
        pm, r["target"], get_ptx_version_from_options(options, r["target"])
    )
    pm.run(module, "allocate")
    return module.get_int_attr("ttg.shared")


def promised(name: str, r: dict) -> int:
    """What nsa_nb.kernels.tuning.shared_bytes, or for decoding nsa_nb.kernels.decode.decode_bytes, says about a
    launch; nothing is said of kernels whose tiles are small: the card's."""
    from nsa_nb.kernels.decode import decode_bytes
    from nsa_nb.geometry import Geometry
    from nsa_nb.kernels.tuning import shared_bytes
    limit = TARGETS[r["target"]][2]
    if name not in (*TILED, "_decode"): return limit
    c = {r["fn"].arg_names[at[0]]: x for at, x in r["constexprs"].items()}
    if name == "_decode":
        geo = Geometry(c["L"], c["STRIDE"], c["LSEL"], c["NSEL"], c["W"], c["NINIT"], c["NLOCAL"])
        return decode_bytes(
            c["D"], c["DV"], geo, c["BH"], 4 if c["PREC"] == "ieee" else 2, c["BN"], r["options"]["num_stages"], limit
        )
    size = c | dict(
        BM=c.get("BM", c.get("BH")), BN=c.get("BN", c.get("BL")), BDV=c.get("BDV", c["BD"]),
        num_stages=r["options"]["num_stages"],
    )
    return shared_bytes(TILED[name], size, 4 if c["PREC"] == "ieee" else 2, limit)


def compile_one(job: tuple) -> dict:
    key, ptx_dir = job
    r = recorded[job[0]]
    row = dict(
        kernel=key[0], case=r["case"], target=r["target"], num_warps=r["options"].get("num_warps"),
        num_stages=r["options"].get("num_stages"),
    )
    began = time.monotonic()
    try:
        if r["memory_only"]:
            row["shared"] = allocated(r)
        else:
            k = triton.compile(
                ASTSource(r["fn"], r["signature"], r["constexprs"], r["attrs"]),
                target=GPUTarget("cuda", r["target"], 32), options=dict(r["options"]),
            )
        if not r["memory_only"]:
            ptx = k.asm["ptx"]
            row |= resources(k.asm["cubin"]) | dict(
                shared=k.metadata.shared,
                dot="wgmma"
                if "wgmma" in ptx
                else "mma"
                if "mma.sync" in ptx
                else "fma"
                if "fma.rn.f32" in ptx
                else "-",
            )
            if ptx_dir: (Path(ptx_dir)/f"{key[0]}.{r['case'].replace(' ', '_')}.sm{r['target']}.ptx").write_text(ptx)
        limit = TARGETS[r["target"]][2]
        most = promised(key[0], r)
        if row["shared"] > most:
            row["error"] = (
                f"takes {row['shared']:,} bytes of shared memory, "
                f"{'kernels.decode.decode_bytes' if key[0] == '_decode' else 'kernels.tuning.shared_bytes'} "
                f"says at most {most:,}"
            )
        row["promised"] = most
        if r["fits"] and row["shared"] > limit:
            row["error"] = f"needs {row['shared']:,} bytes of shared memory, sm_{r['target']} has {limit:,}"
    except Exception as e:
        row["error"] = f"{type(e).__name__}: {str(e)[-1500:]}"
    return row | dict(seconds=round(time.monotonic() - began, 2))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="cases whose name has this text")
    p.add_argument("--kernel", default="", help="kernels whose name has this text")
    p.add_argument("--every-target", action="store_true", help="each case for sm_80, sm_89 and sm_90 (minutes)")
    p.add_argument("--targets", default="80,89,90", help="of these, only those; e.g. 80,90")
    p.add_argument("--ptx", help="folder to write the PTX of each to")
    p.add_argument("--json", help="file to write the rows to")
    p.add_argument("--workers", type=int, default=2)
    ns = p.parse_args()
    began = time.monotonic()
    record(ns.only, ns.every_target)
    missing = {k: f for k, f in kernels().items() if k not in {r[0] for r in recorded}}
    if ns.ptx: Path(ns.ptx).mkdir(parents=True, exist_ok=True)
    targets = {int(t) for t in ns.targets.split(",")}
    jobs = [(k, ns.ptx) for k, r in recorded.items() if ns.kernel in k[0] and r["target"] in targets]
    with multiprocessing.get_context("fork").Pool(ns.workers) as pool: rows = pool.map(compile_one, jobs, chunksize=1)
    for r in sorted(rows, key=lambda r: (r["kernel"], r["case"], r["target"])):
        print(
            f"{r['kernel']:22} {r['case']:22} sm_{r['target']} "
            + (
                f"FAILED {r['error']}"
                if "error" in r
                else f"warps {r['num_warps'] or 4}  shared {r['shared']:6}  {r['seconds']:5.1f} s, memory alone"
                if "dot" not in r
                else f"warps {r['num_warps'] or 4}  registers {r['registers']:3}  stack {r['stack']:5}  shared "
                     f"{r['shared']:6}  {r['dot']:5}  {r['seconds']:5.1f} s"
            )
        )
    for k, f in missing.items(): print(f"{k} of nsa_nb/{f}: nothing in CASES of tests/kernel_compile.py launches it")
    print(f"{len(rows)} compiled in {time.monotonic() - began:.0f} s")
    if ns.json: Path(ns.json).write_text(json.dumps(dict(rows=rows, missing=missing)))
    return int(any("error" in r for r in rows))


if __name__ == "__main__": sys.exit(main())
