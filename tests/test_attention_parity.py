"""nsa_attention against the oracle on whatever sizes hypothesis finds: values, selection and all eight gradients."""
import pytest
import torch
from attn_cases import BACKENDS, BF16, F32, F64, Case, check, geo, make_inputs, truth_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch.set_num_threads(1)
# an example is a whole oracle run: a quarter of the profile's number, the same ones each time unless the profile asks
# for many
n = settings().max_examples
few = settings(
    max_examples=max(1, n // 4), deadline=None, derandomize=n <= 100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def cases(draw, max_len=40, packed=None):
    d = draw(st.sampled_from([1, 2, 3, 4]))
    l = d * draw(st.integers(1, 3))
    l_sel = d * draw(st.integers(l // d, 5))
    n_init, n_local = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    n_sel = max(1, n_init + n_local) + draw(st.integers(0, 4))
    w = draw(st.sampled_from([1, 2, 3, 7, 16, 100]))
    G, h = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    Dk, Dv = draw(st.sampled_from([1, 2, 3, 8, 17])), draw(st.sampled_from([1, 2, 5, 8]))
    if packed if packed is not None else draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, max_len // 2), min_size=1, max_size=4))
        cu = [0]
        for n in lengths:
            cu.append(cu[-1] + n)
        S = cu[-1]
        B = 1
        cu = tuple(cu)
    else:
        S = draw(st.integers(1, max_len))
        B = draw(st.integers(1, 2))
        cu = None
    return Case("drawn", S, B, G * h, G, Dk, Dv, geo(l, d, l_sel, n_sel, w, n_init=n_init, n_local=n_local), cu,
                seed=draw(st.integers(0, 10 ** 6)))


@few
@given(cases())
def test_float64(case):
    t = truth_of(*make_inputs(case), **case.kw)
    for backend in BACKENDS:
        check(t, F64, backend, **case.kw)


@few
@given(cases(packed=True))
def test_packed_float64(case):
    t = truth_of(*make_inputs(case), **case.kw)
    for backend in BACKENDS:
        check(t, F64, backend, **case.kw)


@few
@given(cases())
def test_float32(case):
    t = truth_of(*make_inputs(case), **case.kw)
    for backend in BACKENDS:
        check(t, F32, backend, **case.kw)


@few
@given(cases())
def test_bfloat16(case):
    # documents of a token or two make exact zeros by cancellation: degenerate
    t = truth_of(*make_inputs(case), **case.kw)
    for backend in BACKENDS:
        check(t, BF16, backend, degenerate=True, **case.kw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S", range(1, 27))
def test_every_length(S, backend):
    """l 4, d 2, l_sel 8: lengths from one token to past three selection blocks, and n_sel 3 begins to drop at the
    fourth."""
    case = Case("every S", S, geo=geo(4, 2, 8, 3, 6), seed=S)
    check(truth_of(*make_inputs(case), **case.kw), F64, backend, **case.kw)
