"""Launches that remember against Triton's own, on a driver that loads nothing and writes down what it is asked to
launch."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from zygote import search_path

from nsa_nb.kernels.jit import interpreting, jit


class Driver:
    "What Triton asks of a driver; a card of compute capability 9.0."
    def __init__(self):
        self.launched = []
        self.device = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *a: (1, 2, 64, 0, 1024), get_device_properties=lambda device: dict(max_shared_mem=232448)
        )

    def launcher_cls(self, source, metadata):
        return lambda x, y, z, stream, function, packed, about, enter, exit, *args: self.launched.append(
            ((x, y, z), stream, source.hash(), packed, args)
        )

    def get_current_device(self): return self.device
    def get_current_stream(self, device): return 7 + device
    def get_current_target(self): return GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def driver():
    if interpreting(): pytest.skip("Triton interprets here")
    d = Driver()
    triton.runtime.driver.set_active(d)
    yield d
    triton.runtime.driver._active = None      # reset_active() looks for a card at once


@jit
def _probe(X, Y, a, n_docs, b, c, WIDTH: tl.constexpr, FLAG: tl.constexpr):
    i = tl.arange(0, WIDTH)
    if FLAG: tl.store(X + i, i + a + n_docs + b)


floats = torch.zeros(8, dtype=torch.float32)
halves = torch.zeros(32, dtype=torch.bfloat16)
tensors = st.sampled_from([floats, floats[1:], halves, halves[1:], halves[8:], torch.nn.Parameter(floats), None])
whole = st.sampled_from(
    [
        0, 1, -1, 2, 15, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 16, 2**40, 2**40 + 1,
        2**32 + 1,
    ]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    x=st.sampled_from([floats, floats[1:]]), y=tensors, a=whole, n_docs=whole, b=whole,
    c=st.sampled_from([0.5, 1.0, True, None]), width=st.sampled_from([16, 32]), flag=st.booleans(),
    warps=st.sampled_from([1, 4]), grid=st.sampled_from([(3,), (3, 2), (3, 2, 5)]),
)
def test_what_is_launched_is_what_triton_would_launch(driver, x, y, a, n_docs, b, c, width, flag, warps, grid):
    """The compiled kernel, its arguments, the grid and the stream; twice, so that one launch at least is
    remembered. Divisibility, 1, 64 bits, alignment, types, constants, options and the device all count."""
    args = (x, y, a, n_docs, b, c)
    consts = dict(WIDTH=width, FLAG=flag, num_warps=warps)
    for driver.device in (0, 1):
        found = [_probe[grid](*args, **consts) for _ in range(2)]
        found.append(_probe.run(*args, grid=grid, warmup=False, **consts))
        assert found[0] is found[1] is found[2]
        one, two, triton_s = driver.launched[-3:]
        assert one[:4] == two[:4] == triton_s[:4] and one[0] == (*grid, 1, 1)[:3] and one[1] == 7 + driver.device
        assert all(p is q for other in (one, two) for p, q in zip(other[4], triton_s[4], strict=True))


def test_every_kernel_of_an_attention_is_remembered(driver, monkeypatch):
    """A second forward and backward, of each algorithm, asks Triton nothing. What the first one made is not looked
    at: nothing ran."""
    from nsa_nb.kernels import backend as tb
    from nsa_nb.geometry import Geometry
    driver.device = 0
    geo = Geometry(8, 4, 8, 4, 12)
    S = 64
    H = 4
    G = 2
    D = 16
    def z(*shape): return torch.zeros(*shape, dtype=torch.bfloat16)
    q = z(1, S, H, D)
    do = z(1, S, H, D)
    gates = z(1, S, H, 3)
    N = geo.num_cmp(S)
    kv = [z(1, n, G, D) for n in (N, N, S, S, S, S)]
    own = triton.JITFunction.run
    asked = []
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda self, *a, **k: asked.append(self.fn.__name__) or own(self, *a, **k)
    )
    for algorithm in ("v1", "v2", "v3"):
        xs = [x.requires_grad_() for x in (q, *kv, gates)]
        def both(): torch.autograd.grad(tb.triton_attention(*xs, geo, .25, algorithm=algorithm)[0], xs, do)

        both()
        first = len(asked)
        before = len(driver.launched)
        both()
        assert first and len(asked) == first and len(driver.launched) > before, asked[first:]


def test_unusual_launches_are_not_remembered(driver):
    "Constants that are no constants, and ones left out, go through Triton each time, which says what is wrong."
    @jit
    def _pair(X, n, W: tl.constexpr): tl.store(X + tl.arange(0, W), n)

    _pair[(1,)](floats, n=3, W=8)
    assert not _pair.known
    _pair[(1,)](floats, 3, 8)
    assert not _pair.known
    with pytest.raises(TypeError, match="W"): _pair[(1,)](floats, 3)
    assert not _pair.known
    _pair[(1,)](floats, 3, W=8)
    assert len(_pair.known) == 1


def test_a_profiler_s_hooks_are_called(driver):
    "Set after the first launch, as a profiler does."
    @jit
    def _one(X, W: tl.constexpr): tl.store(X + tl.arange(0, W), 1.0)
    seen = []
    own = driver.launcher_cls
    driver.launcher_cls = lambda *a: (lambda *b: (own(*a)(*b), seen.append(b[7:9])))
    try: _one[(1,)](floats, W=8)
    finally: driver.launcher_cls = own
    def enter(about): pass
    triton.knobs.runtime.launch_enter_hook, was = enter, triton.knobs.runtime.launch_enter_hook
    try: _one[(1,)](floats, W=8)
    finally: triton.knobs.runtime.launch_enter_hook = was
    assert len(seen) == 2 and seen[0][0] is not enter and seen[1][0] is enter


def test_interpreted_kernels_are_triton_s_own(tmp_path):
    "Where Triton interprets there is nothing to remember."
    code = (
        "import torch, triton.language as tl; from nsa_nb.kernels.jit import jit\n"
        "@jit\n"
        "def k(X, n, W: tl.constexpr): tl.store(X + tl.arange(0, W), n)\n"
    )
    path = tmp_path/"probe.py"
    path.write_text(code + "x = torch.zeros(8); k[(1,)](x, 3, W=8); assert x.eq(3).all() and not hasattr(k, 'known')\n")
    done = subprocess.run(
        [sys.executable, path], env=os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=search_path()),
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
