"""The edges of public functions: nothing at all, absurd numbers, wrong kinds of tensors, function transforms,
Python without docstrings. An empty result, a right one, or one clear line."""

import itertools
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from zygote import search_path

from nsa_nb.attention import NSAAttention, nsa_attention
from nsa_nb.bench.measure import Shape, random_case
from nsa_nb.generate import generate_text
from nsa_nb.config import load_config
from nsa_nb.dense import DenseAttention
from nsa_nb.errors import MAX_SEED, RangeError, UsageError
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.inverted_index import inverted_index
from nsa_nb.generation import generate, sample
from nsa_nb.model import LlamaBlockNSA, TinyLM
from nsa_nb.choices import BACKENDS
from nsa_nb.probe import future_leak
from nsa_nb.bench.validate import validate

torch.set_num_threads(1)
SIZES = dict(l=4, d=2, l_sel=8, n_sel=4, w=5)
SHAPE = dict(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=6)
backends = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.filterwarnings("ignore:.*triton")      # it is not there: PyTorch serves, and says so


def inputs(B, S, N=None, dtype=torch.float64, **more):
    N = Geometry(**SIZES).num_cmp(S) if N is None else N
    gen = torch.Generator().manual_seed(0)
    r = lambda n, h, w: torch.randn(B, n, h, w, generator=gen, dtype=dtype, **more)
    return [r(S, 4, 8), r(N, 2, 8), r(N, 2, 6), r(S, 2, 8), r(S, 2, 6), r(S, 2, 8), r(S, 2, 6), r(S, 4, 3)]


def refused(words, call, kind=UsageError):
    with pytest.raises(kind, match=words): call()


# ---------------------------------------------------------------- nothing

NOTHING = [(0, 9), (2, 0), (0, 0), (0, 1), (1, 0)]


def no_gradient(parameters):
    return all(p.grad is not None and p.grad.shape == p.shape and not p.grad.any() for p in parameters)


@backends
@pytest.mark.parametrize("B,S", NOTHING)
def test_no_tokens_through_the_operation(backend, B, S):
    xs = [x.requires_grad_() for x in inputs(B, S)]
    o, aux = nsa_attention(*xs, **SIZES, backend=backend, return_aux=True)
    assert (
        o.shape == aux["o_cmp"].shape == aux["o_sel"].shape == aux["o_win"].shape == (B, S, 4, 6)
        and o.dtype == xs[0].dtype
    )
    assert aux["indices"].shape == (B, S, 2, 4) and aux["indices"].dtype == torch.int32
    (o.sum() + aux["o_sel"].sum()).backward()
    assert no_gradient(xs)
    if B == 1:
        assert nsa_attention(*xs, **SIZES, backend=backend, cu_seqlens=torch.tensor([0, 0, 0])).shape == (1, 0, 4, 6)
    refused(
        "k_cmp has shape|v_win has shape",
        lambda: nsa_attention(
            *inputs(B, S)[:6], torch.zeros(B, S, 2, 7, dtype=torch.float64)[:, :, :, :5], xs[7], **SIZES,
            backend=backend,
        ),
    )


@pytest.mark.parametrize("B,S", NOTHING)
@pytest.mark.parametrize(
    "more", [*[dict(backend=b) for b in BACKENDS], dict(phi="mlp"), dict(phi="conv", shared_kv=True), "dense"], ids=str
)
def test_no_tokens_through_layers(more, B, S):
    "Layer, block, model: forward, loss, every parameter's gradient; decoding; statistics asked for."
    more = dict(attention="dense") if more == "dense" else more
    block = LlamaBlockNSA(**SHAPE, **SIZES, **more)
    m = TinyLM(31, n_layers=2, **SHAPE, **SIZES, **more)
    m.collect_stats(True)
    x, ids = torch.zeros(B, S, 16, requires_grad=True), torch.zeros(B, S, dtype=torch.int64)
    for f in (block.attn, block):
        f.zero_grad()
        y = f(x)
        assert y.shape == x.shape
        y.sum().backward()
        assert no_gradient([x, *f.parameters()])
    assert m(ids).shape == (B, S, 31)
    loss = m.nll(ids, ids)
    loss.backward()
    assert loss.item() == 0 and no_gradient(m.parameters()) and m.read_stats() == {}
    cache = block.attn.new_cache()
    with torch.no_grad():
        assert block(x, cache=cache).shape == x.shape and block(x[:, :1], cache=cache).shape == x[:, :1].shape
    if S: assert m.generate(ids, 3, temperature=1.0).shape == (B, S + 3)
    else: refused(r"ids must be \[B, T\] with T ≥ 1", lambda: m.generate(ids, 3))


def test_nothing_leaves_statistics_and_inspection_alone():
    a = NSAAttention(**SHAPE, **SIZES)
    refused("inspect looks at one token at least", lambda: a.inspect(torch.zeros(0, 3, 16)))
    assert a.watch is None and generate(SimpleNamespace(), torch.zeros(0, 4, dtype=torch.int64), 2).shape == (0, 6)


@pytest.mark.cuda
@pytest.mark.parametrize("B,S", NOTHING)
@pytest.mark.parametrize("phi", ["avg", "conv", "mlp"])
def test_no_tokens_on_a_card(phi, B, S):
    m = TinyLM(
        31, n_layers=2, dim=32, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, **SIZES, phi=phi, backend="triton"
    ).cuda()
    ids = torch.zeros(B, S, dtype=torch.int64, device="cuda")
    m.nll(ids, ids).backward()
    assert m(ids).shape == (B, S, 31) and no_gradient(m.parameters())


# ---------------------------------------------------------------- sampling

LOGITS = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    LOGITS, st.floats(0, 1e38) | st.sampled_from([1e-40, 5e-324, 1e-30, 1e-45, 1e300]), st.none() | st.integers(1, 9),
    st.none() | st.floats(1e-9, 1),
)
def test_any_temperature_draws(logits, temperature, top_k, top_p):
    "Whatever is allowed gives a token; near 0 it is one of the largest logits."
    row = torch.tensor([logits, logits[::-1]])
    got = sample(row, temperature, top_k, top_p, torch.Generator().manual_seed(0))
    assert got.shape == (2, 1) and got.dtype == torch.int64 and 0 <= int(got.min()) and int(got.max()) < len(logits)
    if (
        temperature < 1e-38
        and (row.max(-1, keepdim=True).values - row)
        .ne(0)
        .logical_and(row.max(-1, keepdim=True).values - row < 1e-25)
        .sum()
        == 0
    ):
        assert torch.equal(row.gather(1, got), row.max(-1, keepdim=True).values)


def test_sampling_says_what_is_wrong():
    rows = torch.randn(3, 7)
    for t in (-1e-9, math.inf, -math.inf, math.nan):
        refused(f"temperature={t}: must be ≥ 0 and finite", lambda: sample(rows, t))
    for bad in (rows[0], rows[None], rows[:, :0], rows.long(), rows.to(torch.complex64), [0.1]):
        refused(r"logits must be floats \[B, vocab\]", lambda: sample(bad, 1.0))
    refused(
        "generator is on cuda, the logits on cpu",
        lambda: sample(rows, 1.0, generator=SimpleNamespace(device=torch.device("cuda"))),
    )
    for bad in (rows * math.nan, torch.full((1, 4), math.inf), torch.full((1, 4), -math.inf)):
        refused("not finite", lambda: sample(bad, 1.0), RangeError)
    dead = torch.full((50, 3), -math.inf)
    dead[:, 1] = 0
    assert (sample(dead, 1e-40) == 1).all() and (sample(dead, 1e30) == 1).all()


# ---------------------------------------------------------------- seeds

BAD_SEEDS = [-1, 2**32, 12345678901234567890, -12345678901234567890]


@pytest.mark.parametrize("seed", BAD_SEEDS)
def test_seeds_out_of_range(seed, tmp_path):
    "One range for all, said before anything is loaded or started."
    words = f"seed={seed}: must be"
    refused(words + ".*4294967295", lambda: generate_text(tmp_path/"none", "", seed=seed))
    refused(words + ".*4294967295", lambda: random_case(Shape("s", 4, 2, 8), 8, seed=seed, device="cpu"))
    refused(words + ".*4294967295", lambda: validate("cpu", seed=seed))
    refused(f"train.seed={seed}", lambda: load_config(None, {"train.seed": seed}, {}))
    if not 0 <= seed < 2**63:
        refused(f"seed={seed}", lambda: future_leak(torch.nn.Linear(3, 3), torch.zeros(1, 4, 3), seed=seed))


def test_largest_seed():
    assert load_config(None, {"train.seed": MAX_SEED}, {}).train.seed == MAX_SEED
    assert random_case(Shape("s", 4, 2, 8), 64, seed=MAX_SEED, device="cpu", dtype=torch.float32).q.isfinite().all()


# ---------------------------------------------------------------- kinds of tensors

@backends
@pytest.mark.parametrize("at", range(8))
def test_wrong_kinds_of_tensors(backend, at):
    "Each argument in turn, on each backend: named."
    name = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")[at]
    def call(change):
        xs = inputs(2, 20)
        xs[at] = change(xs[at])
        return nsa_attention(*xs, **SIZES, backend=backend)

    for change, words in (
        (lambda x: x.long(), f"{name} is torch.int64, must be a float"),
        (lambda x: x.to(torch.complex64), f"{name} is torch.complex64, must be a float"),
        (lambda x: x[0], f"{name} must have 4 axes"), (lambda x: x[..., None], f"{name} must have 4 axes"),
        (lambda x: x.to("meta"), f"{name} is on meta"), (lambda x: x.numpy(), f"{name} is a ndarray"),
        (lambda x: None, f"{name} is a NoneType"), (lambda x: x.bool(), f"{name} is torch.bool"),
    ):
        refused(words, lambda: call(change))
    if name != "gates":
        refused(
            "torch.float32, q is torch.float64|torch.float64, q is torch.float32", lambda: call(lambda x: x.float())
        )
    refused("has shape|shape", lambda: call(lambda x: x[:1]))


@backends
def test_strides_and_numbers_do_not_matter(backend):
    xs = inputs(2, 20)
    want = nsa_attention(*xs, **SIZES, backend=backend)
    for a, b in itertools.combinations(range(4), 2):
        # float64; a product may sum in another order
        assert torch.allclose(
            nsa_attention(*(x.transpose(a, b).contiguous().transpose(a, b) for x in xs), **SIZES, backend=backend),
            want, rtol=1e-11, atol=1e-13,
        )
    wide = [torch.cat((x, x), -1)[..., :x.shape[-1]] for x in xs]
    assert torch.allclose(nsa_attention(*wide, **SIZES, backend=backend), want, rtol=1e-11, atol=1e-13)
    for scale in (math.nan, math.inf, -math.inf):
        refused("scale=.*finite", lambda: nsa_attention(*xs, **SIZES, scale=scale, backend=backend))


@pytest.mark.parametrize("make", [NSAAttention, LlamaBlockNSA, DenseAttention])
def test_layers_name_what_is_wrong_with_x(make):
    f = make(**SHAPE, **({} if make is DenseAttention else SIZES))
    x = torch.randn(2, 9, 16)
    for bad, words in (
        (x[0], r"x must be \[B, S, 16\], got \[9, 16\]"), (x[..., :15], r"got \[2, 9, 15\]"),
        (x[None], r"got \[1, 2, 9, 16\]"), (x.double(), "x is torch.float64, the layer's weights are torch.float32"),
        (x.to("meta"), "x is on meta"), (x.tolist(), "list"),
    ):
        refused(words, lambda: f(bad))
    with torch.autocast("cpu", torch.bfloat16): assert f(x).shape == x.shape
    assert f.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_models_name_what_is_wrong_with_ids():
    m = TinyLM(31, n_layers=1, **SHAPE, **SIZES).eval()
    ids = torch.randint(0, 31, (2, 9))
    for bad, words in (
        (ids[0], r"ids must be whole numbers \[B, S\]"), (ids.float(), "torch.float32"), (ids.bool(), "torch.bool"),
        (ids + 31, r"ids must lie in \[0, 31\), got 3\d"), (ids - 31, r"in \[0, 31\), got -"),
        (ids.tolist(), "ids is a list"), (ids.to("meta"), "ids are on meta, the model on cpu"),
    ):
        refused(words, lambda: m(bad))
    refused("y must be like ids", lambda: m.nll(ids, ids[:, 1:]))
    refused("prefill_tile=-1", lambda: m.generate(ids, 2, prefill_tile=-1))
    with torch.no_grad(): assert torch.equal(m(ids.int()), m(ids))


# ---------------------------------------------------------------- function transforms

T = 14


@pytest.fixture(scope="module")
def operation():
    xs = inputs(1, T)
    return SimpleNamespace(
        xs=xs, t=torch.randn_like(xs[0]),
        loss=lambda q, backend: nsa_attention(q, *xs[1:], **SIZES, backend=backend).square().sum(),
    )


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def test_the_reference_takes_every_transform(operation):
    "grad and jvp are autograd's, vmap is a loop: up to rounding in float64."
    xs, t = operation.xs, operation.t
    loss = lambda q: operation.loss(q, "reference")
    want = gradient(loss, xs[0])
    assert torch.allclose(grad(loss)(xs[0]), want, rtol=1e-12) and torch.allclose(jacrev(loss)(xs[0]), want, rtol=1e-12)
    slope = (want * t).sum()
    assert torch.allclose(jvp(loss, (xs[0],), (t,))[1], slope, rtol=1e-10)
    with forward_ad.dual_level():
        assert torch.allclose(forward_ad.unpack_dual(loss(forward_ad.make_dual(xs[0], t))).tangent, slope, rtol=1e-10)
    many = [torch.stack([x, 2 * x]) for x in xs]
    for y, one in zip(vmap(lambda *a: nsa_attention(*a, **SIZES, backend="reference"))(*many), zip(*many)):
        assert torch.allclose(y, nsa_attention(*one, **SIZES, backend="reference"), rtol=1e-12)


def test_second_derivatives_of_the_reference(operation):
    """They are difference quotients of the first ones (central, step 1e-5: its error is about 1e-10 of the third
    derivatives, and 1e-6 is asked)."""
    loss = lambda q: operation.loss(q, "reference")
    q = operation.xs[0].clone().requires_grad_()
    first, = torch.autograd.grad(loss(q), q, create_graph=True)
    second, = torch.autograd.grad((first * operation.t).sum(), q)
    step = 1e-5 * operation.t
    quotient = (gradient(loss, operation.xs[0] + step) - gradient(loss, operation.xs[0] - step)) / 2e-5
    assert torch.allclose(second, quotient, rtol=1e-6, atol=1e-6)


def every_transform(f, x):
    "Calls that other backends refuse."
    yield lambda: grad(lambda y: f(y).sum())(x)
    yield lambda: vmap(f)(torch.stack([x, x]))
    yield lambda: vmap(grad(lambda y: f(y).sum()))(torch.stack([x, x]))
    yield lambda: jvp(f, (x,), (x,))
    yield lambda: jacrev(f)(x)
    def dual():
        with forward_ad.dual_level(): f(forward_ad.make_dual(x, x))
    yield dual


def check_refusals(device="cpu", backends=("torch", "triton", "auto"), dtype=torch.float32):
    x = torch.randn(1, T, 16, device=device, dtype=dtype)
    xs = [y.to(device, dtype) for y in inputs(1, T)]
    for backend in backends:
        a = NSAAttention(**SHAPE, **SIZES, backend=backend).to(device, dtype)
        for f, y in ((lambda q: nsa_attention(q, *xs[1:], **SIZES, backend=backend), xs[0]), (a, x)):
            for call in every_transform(f, y): refused('backend="reference"', call)
            z = y.clone().requires_grad_()
            first, = torch.autograd.grad(f(z).square().sum(), z, create_graph=True)      # no mistake yet
            refused('second derivatives.*backend="reference"', lambda: first.sum().backward())
        p = dict(a.named_parameters())
        refused('backend="reference"', lambda: grad(lambda p: functional_call(a, p, (x,)).sum())(p))
        with forward_ad.dual_level():
            p["q_proj.weight"] = forward_ad.make_dual(p["q_proj.weight"].detach(), torch.ones_like(p["q_proj.weight"]))
            refused('backend="reference"', lambda: functional_call(a, p, (x,)))


def test_other_backends_refuse_them_with_the_way_out(): check_refusals()


@pytest.mark.cuda
def test_kernels_refuse_them_with_the_way_out(): check_refusals("cuda", ("triton", "auto"))


def test_layers_and_models_on_the_reference_take_them():
    m = TinyLM(31, n_layers=1, **SHAPE, **SIZES, backend="reference")
    ids = torch.randint(0, 31, (3, T))
    p = dict(m.named_parameters())
    each = vmap(grad(lambda p, row: functional_call(m, p, (row[None],)).square().mean()), in_dims=(None, 0))(p, ids)
    for i in range(3):
        m.zero_grad()
        m(ids[i:i + 1]).square().mean().backward()
        for name, q in m.named_parameters(): assert torch.allclose(each[name][i], q.grad, rtol=1e-4, atol=1e-6), name
    a = NSAAttention(**SHAPE, **SIZES, backend="reference").double()
    x = torch.randn(1, T, 16, dtype=torch.float64)
    cu = torch.tensor([0, 5, T], dtype=torch.int32)
    for f in (a, lambda x: a(x, cu)):
        y = x.clone().requires_grad_()
        want, = torch.autograd.grad(f(y).sum(), y)
        assert torch.allclose(jvp(lambda x: f(x).sum(), (x,), (x,))[1], (want * x).sum(), rtol=1e-9)


# ---------------------------------------------------------------- Python without docstrings and asserts

WITHOUT = """
    import contextlib, io, sys, warnings
    warnings.simplefilter("ignore")
    from nsa_nb.cli import VERBS, main
    from nsa_nb.kernels.inverted_index import inverted_index
    assert False, "asserts are off"
    def nsa(*argv):
        sys.argv, out = ["nsa", *argv], io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out): main()
        except SystemExit as e: code = e.code
        if code: sys.exit(f"{argv} -> {code}: {out.getvalue()[-800:]}")
    inner = [("data", "smoke"), ("data", "bootstrap"), ("bench", "tune"), ("config", "show")]
    for verb in [(), *((v,) for v in VERBS), *inner]: nsa(*verb, "--help")
    nsa("config", "check")
    tiny = dict(steps=2, seq_len=64, batch_size=1, dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8,
                eval_every=0, save_every=0, sample_tokens=0, eval_batches=1, device="cpu", out_dir="r",
                dataset="synthetic")
    nsa("train", *(x for k, v in tiny.items() for x in ("--" + k.replace("_", "-"), str(v))))
    nsa("generate", "--model", "r", "--max-new-tokens", "3", "--temperature", "1e-40", "--seed", "4294967295")
"""


def test_python_without_docstrings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-OO", "-c", textwrap.dedent(WITHOUT)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=search_path()),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path/"r"/"model.pt").exists()


def test_what_an_assert_said_is_an_error():
    refused(
        "chunk=100: must be a multiple of 64",
        lambda: inverted_index(torch.zeros(1, 300, 1, 1, dtype=torch.int32), 8, chunk=100),
    )
