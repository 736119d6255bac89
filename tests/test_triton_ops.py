"""The Triton backend as operators of torch.library: opcheck, what fake kernels promise, torch.compile, CUDA
graphs, no synchronisation, autocast.

On a CPU a process of its own runs the first ones in Triton's interpreter, tiny."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from zygote import search_path

from nsa_nb.kernels import backend as tb
from nsa_nb.attention import nsa_attention
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.packing import compressed_borders
from nsa_nb.model import LlamaBlockNSA
from torch._subclasses.fake_tensor import FakeTensorMode

F32, BF16 = torch.float32, torch.bfloat16
SIZES = dict(l=8, d=4, l_sel=16, n_sel=5, w=17)
TINY = dict(l=2, d=2, l_sel=2, n_sel=3, w=3)
cuda = pytest.mark.cuda
algorithms = pytest.mark.parametrize("algorithm", ["v1", "v2", "v3", "v3_skip"])
selections = pytest.mark.parametrize("selection", ["v1", "v2", "v3"])
packings = pytest.mark.parametrize("cu", [None, (0, 1, 70, 103, 200)], ids=["plain", "packed"])


def make(device, dtype, S, sizes, G=2, h=2, D=16, cu=None, strided=True, seed=0):
    "The eight inputs, leaves; keys and values as a layer gives them, slices of one projection."
    gen = torch.Generator().manual_seed(seed)
    geo = Geometry(**sizes)
    r = lambda *s: torch.randn(*s, generator=gen).to(device, dtype)
    N = sum(geo.num_cmp(b - a) for a, b in zip(cu, cu[1:])) if cu else geo.num_cmp(S)
    kv = lambda n: r(1, n, 3, G, D)[:, :, 1] if strided else r(1, n, G, D)
    return [
        x.detach().requires_grad_()
        for x in (r(1, S, G * h, D), kv(N), kv(N), kv(S), kv(S), kv(S), kv(S), r(1, S, G * h, 3).sigmoid())
    ]


def borders(cu, device): return None if cu is None else torch.tensor(cu, dtype=torch.int32, device=device)


def calls(device, dtype, S, sizes, algorithm, cu=None, **more):
    "Arguments of the two operators; the backward's with all four gradients of outputs, and with the first alone."
    xs = make(device, dtype, S, sizes, cu=cu, **more)
    at = borders(cu, device)
    geo = Geometry(**sizes)
    rest = at, None if at is None else compressed_borders(at, geo), tb._sizes(geo, S), 0.25, algorithm
    with torch.no_grad(): o, *kept = tb.attention_op(*xs, *rest)
    det = [x.detach() for x in xs]
    dos = [torch.randn_like(o) for _ in range(4)]
    return (*xs, *rest), [(*d, *det, *kept, *rest) for d in (dos, [dos[0], None, None, None])]


def check_operators(
    device, dtype, S, sizes, algorithm, cu=None,
    utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"), **more,
):
    forward, backwards = calls(device, dtype, S, sizes, algorithm, cu, **more)
    torch.library.opcheck(tb.attention_op, forward, test_utils=utils)
    for b in backwards: torch.library.opcheck(tb.attention_backward_op, b, test_utils=utils)


def storage(x): return x.untyped_storage().data_ptr()


def check_promises(device, dtype, S, sizes, algorithm, cu=None, **more):
    """Shapes, dtypes, strides and devices are what the fake kernels say; no result shares memory with an input or
    another result."""
    forward, backwards = calls(device, dtype, S, sizes, algorithm, cu, **more)
    for op, args in ((tb.attention_op, forward), *((tb.attention_backward_op, b) for b in backwards)):
        with torch.no_grad():
            real = op(*args)
            det = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            with FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in det))
        for i, (x, y) in enumerate(zip(real, fake, strict=True)):
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), (i, x.shape, y.shape)
            assert not x.numel() or x.stride() == y.stride(), (i, x.stride(), y.stride())
            assert x.storage_offset() == 0
        held = [x for x in real if x.numel()]
        for x, y in combinations(held, 2): assert storage(x) != storage(y)
        for x in held:
            for y in args: assert not isinstance(y, torch.Tensor) or not y.numel() or storage(x) != storage(y)


def step(xs, do, **kw):
    o = nsa_attention(*xs, **kw)
    return o, *torch.autograd.grad(o, xs, do)


def equal(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_compiled(device, dtype, S, sizes, selection, cu=None, backend="aot_eager", aux=False, **more):
    "The compiled operation is the eager one, bit for bit, forward and backward."
    torch.compiler.reset()      # PyTorch keeps eight versions of a function, and there are more of f
    xs = make(device, dtype, S, sizes, cu=cu, **more)
    kw = sizes | dict(backend="triton", selection=selection, cu_seqlens=borders(cu, device))
    def f(*xs):
        if not aux: return nsa_attention(*xs, **kw)
        o, more = nsa_attention(*xs, **kw, return_aux=True)
        return o + more["o_cmp"] * more["o_win"]
    g = torch.compile(f, fullgraph=True, backend=backend)
    a = f(*xs)
    b = g(*xs)
    do = torch.randn_like(a)
    assert equal((a, *torch.autograd.grad(a, xs, do)), (b, *torch.autograd.grad(b, xs, do)))


def check_strides(device, dtype, S, sizes, selection, cu=None, **more):
    "Inputs that lie in memory in another order of axes give the same bits."
    xs = make(device, dtype, S, sizes, cu=cu, strided=False, **more)
    kw = sizes | dict(backend="triton", selection=selection, cu_seqlens=borders(cu, device))
    do = torch.randn_like(nsa_attention(*xs, **kw))
    want = step(xs, do, **kw)
    for a, b in ((1, 3), (1, 2), (2, 3)):
        assert equal(
            want,
            step(
                [x.detach().transpose(a, b).contiguous().transpose(a, b).requires_grad_() for x in xs],
                do.transpose(a, b).contiguous().transpose(a, b), **kw,
            ),
        ), (a, b)


def block(device, dtype=F32, dim=32, **more):
    torch.manual_seed(0)
    return LlamaBlockNSA(dim=dim, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, backend="triton", **more).to(device, dtype)


def check_block(device, S, sizes, backend, tol):
    m = block(device, **sizes)
    x = torch.randn(1, S, 32, device=device)
    c = torch.compile(m, fullgraph=True, backend=backend)
    def run(f):
        m.zero_grad()
        y = f(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in m.parameters())]

    for a, b in zip(run(m), run(c), strict=True):
        assert torch.equal(a, b) if tol == 0 else (a - b).norm() <= tol * a.norm()


# ---------------------------------------------------------------- in the interpreter

ON_CPU = {
    "opcheck": """
t.check_operators('cpu', t.F32, 6, t.TINY, 'v2', G=1)
utils = ('test_schema', 'test_autograd_registration', 'test_faketensor')
t.check_operators('cpu', t.F32, 4, t.TINY, 'v3', (0, 1, 4), G=1, utils=utils)""",
    "promises": """
for a in ('v1', 'v2', 'v3'): t.check_promises('cpu', t.F32, 4, t.TINY, a, G=1)
t.check_promises('cpu', t.F32, 1, t.TINY, 'v2', G=1)""",
    "wide groups": """
from triton_cases import Config, Shape, compare
compare(Config(Shape('h20', t.F32, 1, 20, 4, 4, 4, 4, 4, 2), 14, 5, 1, 1, (0, 3, 14)), 'cpu', ('v1', 'v2', 'v3'))""",
    "strides": """
for a in ('v1', 'v2', 'v3'): t.check_strides('cpu', t.F32, 6, t.TINY, a)
t.check_strides('cpu', t.F32, 7, t.TINY, 'v2', (0, 3, 7))""",
    "compiled": """
for a in ('v2', 'v3'): t.check_compiled('cpu', t.F32, 4, t.TINY, a, G=1, aux=a == 'v3')
t.check_block('cpu', 4, t.TINY, 'aot_eager', 0)""",
}


LONG = ("strides",)      # rarely fail
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in ON_CPU]


@pytest.mark.parametrize("name", NAMES)
def test_in_the_interpreter(name):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=search_path(here.parent, here))
    code = f"import torch; torch.set_num_threads(1)\nimport test_triton_ops as t{ON_CPU[name]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


# ---------------------------------------------------------------- on a GPU

@cuda
@packings
@algorithms
def test_opcheck(algorithm, cu):
    check_operators("cuda", F32, 200, SIZES, algorithm, cu)


@cuda
@packings
@algorithms
def test_fake_kernels_promise_what_comes(algorithm, cu):
    for dtype in (F32, BF16):
        for strided in (True, False): check_promises("cuda", dtype, 200, SIZES, algorithm, cu, strided=strided)
    if cu is None: check_promises("cuda", F32, 7, SIZES, algorithm)      # no compressed block


@cuda
@packings
@selections
def test_the_compiled_operation_is_the_eager_one(selection, cu):
    for backend in ("aot_eager", "inductor"): check_compiled("cuda", BF16, 200, SIZES, selection, cu, backend)


@cuda
def test_compiled_with_the_branches_outputs(): check_compiled("cuda", F32, 200, SIZES, "v3", aux=True)


@cuda
@pytest.mark.parametrize("backend,tol", [("aot_eager", 1e-5), ("inductor", 1e-4)])
def test_a_compiled_block_is_the_eager_one(backend, tol):
    """fullgraph: a part that could not be traced would raise. Compiled, q, k, v and gates come from one product,
    which adds up in another order than four do, and inductor has its own; fp32, and seeds, so that no selection
    falls the other way."""
    check_block("cuda", 200, SIZES, backend, tol)


@cuda
@packings
@selections
def test_a_replayed_graph_is_the_eager_call(selection, cu):
    "Captured once, forward and backward; replayed on other numbers, and packed also on other borders."
    xs = make("cuda", BF16, 200, SIZES, cu=cu)
    do = torch.randn(1, 200, 4, 16, device="cuda", dtype=BF16)
    kw = SIZES | dict(backend="triton", selection=selection, cu_seqlens=borders(cu, "cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2): step(xs, do, **kw)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): captured = step(xs, do, **kw)
    # as many compressed blocks as before, 46
    for seed, ends in ((1, (0, 2, 70, 104, 200)), (2, (0, 1, 70, 100, 200))):
        with torch.no_grad():
            for x, y in zip(xs, make("cuda", BF16, 200, SIZES, cu=cu, seed=seed)): x.copy_(y)
            do.normal_()
            if cu: kw["cu_seqlens"].copy_(borders(ends, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert equal(captured, step(xs, do, **kw)), seed


@cuda
@packings
@selections
def test_nothing_waits_for_the_gpu(selection, cu):
    xs = make("cuda", BF16, 200, SIZES, cu=cu)
    do = torch.randn(1, 200, 4, 16, device="cuda", dtype=BF16)
    kw = SIZES | dict(backend="triton", selection=selection, cu_seqlens=borders(cu, "cuda"))
    step(xs, do, **kw)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(xs, do, **kw)
        o, aux = nsa_attention(*xs, **kw, return_aux=True)
        (o.float().mean() + aux["o_cmp"].float().mean()).backward()
    finally: torch.cuda.set_sync_debug_mode("default")


@cuda
def test_a_block_does_not_wait_for_the_gpu():
    m = block("cuda", BF16, **SIZES)
    x = torch.randn(1, 200, 32, device="cuda", dtype=BF16)
    m(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try: m(x).sum().backward()
    finally: torch.cuda.set_sync_debug_mode("default")


@cuda
@selections
def test_autocast(selection):
    """Inside autocast the operation keeps its inputs' dtype and its bits; a block with fp32 weights gives fp32
    gradients near those of fp32."""
    xs = make("cuda", BF16, 200, SIZES)
    do = torch.randn(1, 200, 4, 16, device="cuda", dtype=BF16)
    kw = SIZES | dict(backend="triton", selection=selection)
    want = step(xs, do, **kw)
    with torch.autocast("cuda", torch.float16): got = step(xs, do, **kw)
    assert got[0].dtype == BF16 and equal(want, got)
    # gates in fp32 beside bf16: what autocast may give
    xs[7] = xs[7].detach().float().requires_grad_()
    with torch.autocast("cuda", BF16): o = nsa_attention(*xs, **kw)
    grads = torch.autograd.grad(o, xs, do)
    assert (
        o.dtype == BF16
        and grads[7].dtype == F32
        and (o.double() - want[0].double()).norm() <= 1e-2 * want[0].double().norm()
    )


@cuda
def test_a_block_under_autocast():
    m = block("cuda", **SIZES)
    x = torch.randn(1, 200, 32, device="cuda")
    y = m(x)
    with torch.autocast("cuda", BF16): z = m(x)
    z.float().square().mean().backward()
    assert (y - z.float()).norm() <= 3e-2 * y.norm() and all(
        p.grad.dtype == F32 and p.grad.isfinite().all() for p in m.parameters()
    )


@cuda
def test_borders_that_do_not_rise_stop_the_process():
    "Checked on the GPU without waiting; an assertion there ends the process' CUDA context, hence a process of its own."
    code = ("import torch, test_triton_ops as t\nfrom nsa_nb.kernels.packing import check_borders\n"
            "check_borders(t.borders((0, 9, 5, 20), 'cuda'), 1, 20, 20); torch.cuda.synchronize()")
    here = Path(__file__).parent
    env = os.environ | dict(PYTHONPATH=search_path(here.parent, here))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode != 0 and "assert" in done.stderr.lower()


@cuda
@pytest.mark.parametrize("selection", ["v1", "v2", "v3"])
def test_the_second_stream_changes_no_bit(selection, monkeypatch):
    """Eager calls as small as these go without it: with it, ten times on end, memory taken and freed by both, the
    same bits."""
    xs = make("cuda", BF16, 1000, SIZES)
    do = torch.randn(1, 1000, 4, 16, device="cuda", dtype=BF16)
    kw = SIZES | dict(backend="triton", selection=selection)
    alone = step(xs, do, **kw)
    monkeypatch.setattr(tb, "HOST_BOUND", 0)
    for _ in range(10): assert equal(alone, step(xs, do, **kw))
