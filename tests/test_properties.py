"""Any NF4 tensor: random shape, block size, dtype, storage, alignment and packed shape, in raw bits, called repeatedly.

On a GPU each combination that the kernel is compiled for costs about 0.1 s, so storage dtypes other than uint8 come
with two of the block sizes only.
"""

import collections
import math
from typing import NamedTuple

import hypothesis
import notebook
import peer
import pytest
import torch
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STORAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FORMS = {"(n, 1)": (-1, 1), "(1, n)": (1, -1), "flat": (-1,)}


class Case(NamedTuple):
    shape: tuple
    dtype: torch.dtype
    blocksize: int
    nested: bool
    storage: torch.dtype
    offset: int  # of the packed weight in a larger buffer, in bytes
    form: str  # the packed weight's shape
    scale: float  # of the weights: 1e-4 makes subnormal fp16
    seed: int

    def by_words(self):
        """Whether the kernel's fast path takes this case."""
        whole = self.dtype != torch.float32 and math.prod(self.shape) % 1024 == 0
        return whole and 64 <= self.blocksize <= 1024 and self.offset % 4 == 0


def ragged_shapes():
    longest = 300 if GPU else 100
    matrix = st.tuples(st.integers(1, longest), st.integers(1, longest))
    vector = st.tuples(st.integers(1, longest**2))
    corner = st.sampled_from(((1,), (1, 1), (2, 1), (1, 2), (8,), (1, 8), (8, 1), (1, 4096), (4096, 1)))
    return st.sampled_from((matrix, vector, corner)).flatmap(lambda kind: kind)


def whole_shapes():
    """Whole programs of the fast path: multiples of 1024 weights."""
    programs = st.integers(1, 300 if GPU else 6)
    return st.builds(lambda n, columns: (n * 1024 // columns, columns), programs, st.sampled_from((32, 64, 512, 1024)))


@st.composite
def cases(draw):
    def one_of(*choices):
        return draw(st.sampled_from(choices))

    fast = one_of(True, True, False, False, False)
    shape = draw(whole_shapes() if fast or one_of(True, False, False) else ragged_shapes())
    n_bytes = (math.prod(shape) + 1) // 2
    offset = one_of(0, 0, 4, 8, 12) if fast else one_of(*[0] * 16, *range(16))
    possible = [dtype for dtype in STORAGES if n_bytes % dtype.itemsize == 0 and offset % dtype.itemsize == 0]
    storage = one_of(torch.uint8, torch.uint8, *possible)
    blocksizes = BLOCKSIZES[1:6] if fast else BLOCKSIZES
    return Case(
        shape,
        one_of(*DTYPES[:2]) if fast else one_of(*DTYPES),
        one_of(*(blocksizes if storage == torch.uint8 or not GPU else blocksizes[1::3])),
        one_of(True, False),
        storage,
        offset,
        one_of(*FORMS),
        one_of(1.0, 1e-4, 1e3),
        draw(st.integers(0, 2**32)),
    )


def packed(weight, case, form, offset):
    """A copy of the weight's bytes at an offset in a larger buffer, in the case's storage dtype and the given form."""
    flat = weight.view(-1)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=weight.device)
    moved = buffer[offset : offset + flat.numel()].copy_(flat)
    return moved.view(case.storage).view(FORMS[form])


def check(nf4, device, tally, case):
    weight, state = nf4.quantized(case.shape, case.dtype, device, case.blocksize, case.nested, case.seed)
    for scale in (state.state2.absmax, state.offset) if case.nested else (state.absmax,):
        scale.mul_(case.scale)
    turned = "(n, 1)" if case.form == "(1, n)" else "(1, n)"  # as a backward pass asks, for the same bytes
    ours = packed(weight, case, case.form, case.offset)
    assert ours.data_ptr() % 16 == case.offset
    outs = []
    for form in (case.form, case.form, turned):
        outs.append(out := nf4.dequantize_nf4(ours.view(FORMS[form]) if form == turned else ours, state))
        want = peer.expected(nf4, packed(weight, case, form, 0), state)
        assert out.shape == want.shape and out.dtype == want.dtype and out.stride() == want.stride()
        assert peer.differing(nf4, tally, out, want) == 0, form
        assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*outs, ours)}) == 4, "not freshly allocated"
    assert torch.equal(ours.view(-1).view(torch.uint8), weight.view(-1)), "the packed weight was written to"
    if GPU and case.nested:
        assert state._nf4_launch is not None, "no launch was kept, so the later calls test nothing new"


# More than 256 blocks, so two absmax2, on either path.
BY_BYTES = Case((1, 9000), torch.float32, 32, True, torch.uint8, 3, "(n, 1)", 1.0, 0)
BY_WORDS = Case((272, 64), torch.float16, 64, True, torch.uint8, 0, "(n, 1)", 1.0, 0)


def run(nf4, device, tally, examples, **settings):
    """Checks `examples` cases; how many of them took which path of the kernel."""
    seen = collections.Counter()

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        **settings,
    )
    @hypothesis.example(BY_BYTES)
    @hypothesis.example(BY_WORDS)
    @hypothesis.given(cases())
    def each(case):
        seen["words" if case.by_words() else "bytes"] += 1
        check(nf4, device, tally, case)

    each()
    return seen


def test_any_tensor(nf4, device, tally):
    examples = 3000 if GPU else 300
    seen = run(nf4, device, tally, examples)
    assert min(seen["words"], seen["bytes"]) > examples / 6, seen


WRONG = {  # what is made wrong -> (text in the kernel, its replacement)
    "the path by bytes": ("tl.load(code_ptr + (packed >> 4)", "tl.load(code_ptr + (packed & 0xF)"),
    "the path by words, by table": ("((word >> (SHIFT + 4)) & 0xF)", "((word >> SHIFT) & 0xF)"),
    "the path by words, by shuffle": ("nibble, $9, 12;", "nibble, $9, 8;"),
    "one rounding of the scale too few": ("tl.fma(code2, absmax2, 0.0) + offset", "tl.fma(code2, absmax2, offset)"),
    "absmax2 by bytes": ("block // BLOCKSIZE2, mask=inside", "block // (BLOCKSIZE2 * 2), mask=inside"),
    "absmax2 by words": ("block // BLOCKSIZE2, eviction_policy", "block // (BLOCKSIZE2 * 2), eviction_policy"),
}
COMPILED = ("the path by words, by shuffle", "one rounding of the scale too few")  # the interpreter has neither


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(device, wrong):
    if wrong == "the path by words, by table" and GPU:
        pytest.skip("a GPU decodes by shuffle here")
    if wrong in COMPILED and not GPU:
        pytest.skip("needs a CUDA GPU")
    broken, tally = notebook.load("nf4_wrong", edit=WRONG[wrong]), collections.Counter()
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    with pytest.raises(AssertionError):
        run(broken, device, tally, 300, phases=phases)
    assert tally["differing"] > 0
