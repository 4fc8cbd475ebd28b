"""A kept launch may never serve stale weights.

Each change below must be noticed. On a CPU the same changes go through the interpreter's plain launch. On a GPU each
check of the kept launch is also removed in turn: the test that is there for it must then fail, or it tests nothing.
"""

import copy
import gc
import io
import pickle
import types
import weakref

import notebook
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit


def fresh(nf4, device, shape=(64, 128), dtype=torch.float16, seed=0):
    weight, state = nf4.quantized(shape, dtype, device, seed=seed)
    return torch.nn.Parameter(weight, requires_grad=False), state


def data_swapped(name):
    """The tensor object stays, its memory is another: only an address tells."""

    def change(weight, state, other_weight, other_state):
        tensor, other = (weight, other_weight) if name == "weight" else (field(state, name), field(other_state, name))
        # The codes of two states are equal; flipped they differ.
        tensor.data = other.data.flip(0) if tensor.dim() else other.data.clone()

    return change


def object_replaced(name):
    """Another tensor object over the same memory, with another dtype: only the identity tells. To be refused."""

    def change(weight, state, other_weight, other_state):
        if name == "weight":
            return weight.data.view(torch.int8)
        owner, last = (state.state2, name.split(".")[1]) if "." in name else (state, name)
        tensor = getattr(owner, last)
        setattr(owner, last, tensor.view(torch.int8 if tensor.dtype == torch.uint8 else torch.int32))

    return change


def attribute_set(name, value):
    def change(weight, state, other_weight, other_state):
        owner, last = (state.state2, name.split(".")[1]) if "." in name else (state, name)
        setattr(owner, last, value)

    return change


def field(state, name):
    return getattr(state.state2, name.split(".")[1]) if "." in name else getattr(state, name)


STATE = ("absmax", "code", "offset", "state2.absmax", "state2.code")
NOTICED = {f"{name}.data = ...": data_swapped(name) for name in ("weight", *STATE)}
NOTICED |= {
    "dtype = bfloat16": attribute_set("dtype", torch.bfloat16),
    "shape = 128 x 64": attribute_set("shape", torch.Size((128, 64))),
}
REFUSED = {f"another {name} object": object_replaced(name) for name in ("weight", *STATE)}
REFUSED |= {
    "weight = None": None,
    "weight.data = its first half": lambda weight, *_: setattr(weight, "data", weight.data[: len(weight) // 2]),
    "weight as a list": lambda weight, *_: weight.tolist(),
    **{f"{name} = None": attribute_set(name, None) for name in STATE},
    "blocksize = 128": attribute_set("blocksize", 128),
    "state2.blocksize = 32": attribute_set("state2.blocksize", 32),
    "state2.dtype = float16": attribute_set("state2.dtype", torch.float16),
    "state2 = None": attribute_set("state2", None),
    "quant_type = fp4": attribute_set("quant_type", "fp4"),
    "another state2 object": lambda weight, state, *_: setattr(
        state, "state2", types.SimpleNamespace(absmax=state.state2.absmax)
    ),
    "weight sparse": lambda weight, *_: weight.data.to_sparse(),
}


def apply_and_call(nf4, device, change):
    weight, state = fresh(nf4, device)
    nf4.dequantize_nf4(weight, state)
    nf4.dequantize_nf4(weight, state)
    if device == "cuda":
        assert state._nf4_launch is not None, "no launch was kept, so nothing is tested"
    replacement = change(weight, state, *fresh(nf4, device, seed=1))
    weight = weight if replacement is None else replacement
    return nf4.dequantize_nf4(weight, state), weight, state


def check_noticed(nf4, device, name):
    out, weight, state = apply_and_call(nf4, device, NOTICED[name])
    expected = nf4.dequantize_reference(weight, state)  # bitsandbytes on a GPU does not read the state's code
    assert out.dtype == expected.dtype and out.shape == expected.shape
    assert nf4.bits_differing(out, expected) == 0


def check_refused(nf4, device, name):
    with pytest.raises((ValueError, TypeError)):
        if name == "weight = None":  # and the weight is gone
            state = apply_and_call(nf4, device, attribute_set("dtype", torch.float16))[2]
            nf4.dequantize_nf4(None, state)
        else:
            apply_and_call(nf4, device, REFUSED[name])


@pytest.mark.parametrize("name", NOTICED)
def test_changes_are_noticed(nf4, device, name):
    check_noticed(nf4, device, name)


@pytest.mark.parametrize("name", REFUSED)
def test_changes_are_refused(nf4, device, name):
    check_refused(nf4, device, name)


def test_contents_changed_in_place(nf4, device):
    weight, state = fresh(nf4, device)
    other_weight, other_state = fresh(nf4, device, seed=1)
    nf4.dequantize_nf4(weight, state)
    weight.data.copy_(other_weight)
    for name in STATE:
        field(state, name).copy_(field(other_state, name))
    assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), dequantize_4bit(other_weight.data, other_state)) == 0


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_start_without_a_launch(nf4, device, how):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    expected = nf4.your_dequantize_nf4(layer)
    if how == "deepcopy":
        clone = copy.deepcopy(layer)
    elif how == "copy":
        clone = copy.copy(layer)
    elif how == "pickle":
        clone = pickle.loads(pickle.dumps(layer))
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        clone = torch.load(buffer, weights_only=False)
    if how != "copy":  # a shallow copy shares tensors and state, so it may share the launch
        assert getattr(clone.weight.quant_state, "_nf4_launch", None) is None
        layer.weight.data.zero_()
    assert nf4.bits_differing(nf4.your_dequantize_nf4(clone), expected) == 0


def test_load_state_dict(nf4, device):
    layer, other = (nf4.bnb_Linear4bit(64, 128).to(device) for _ in range(2))
    nf4.your_dequantize_nf4(layer)
    state = layer.weight.quant_state
    layer.load_state_dict({"weight": other.weight.data}, strict=False)
    expected = dequantize_4bit(other.weight.data, state)
    assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), expected) == 0


def test_nothing_is_kept_alive(nf4, device):
    weight, state = fresh(nf4, device)
    nf4.dequantize_nf4(weight, state)
    nf4.dequantize_nf4(weight, state)
    watched = [weakref.ref(weight), weakref.ref(state.absmax)]
    state.absmax = state.absmax.clone()
    del weight
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


@pytest.mark.gpu
def test_moved_away_and_back(nf4):
    layer = nf4.bnb_Linear4bit(64, 128).to("cuda")
    expected = nf4.your_dequantize_nf4(layer)
    layer = layer.to("cpu")
    with pytest.raises(ValueError, match="cpu"):
        nf4.your_dequantize_nf4(layer)
    layer = layer.to("cuda")
    for _ in range(2):
        assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), expected) == 0


def check_stream(nf4):
    weight, state = fresh(nf4, "cuda", (4096, 4096))
    other_weight, _ = fresh(nf4, "cuda", (4096, 4096), seed=1)
    expected = dequantize_4bit(other_weight.data, state)
    nf4.dequantize_nf4(weight, state)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        weight.data.copy_(other_weight)  # ordered on this stream only
        out = nf4.dequantize_nf4(weight, state)
    torch.cuda.synchronize()
    assert nf4.bits_differing(out, expected) == 0


def check_graph(nf4):
    weight, state = fresh(nf4, "cuda")
    other_weight, _ = fresh(nf4, "cuda", seed=1)
    nf4.dequantize_nf4(weight, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nf4.dequantize_nf4(weight, state)
    weight.data.copy_(other_weight)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert nf4.bits_differing(out, dequantize_4bit(other_weight.data, state)) == 0


def plain_launches(nf4, monkeypatch):
    """Counts the plain launches from now on."""
    count, launch = [0], nf4.launch

    def counting(*arguments):
        count[0] += 1
        return launch(*arguments)

    monkeypatch.setattr(nf4, "launch", counting)
    return count


def check_hook(nf4, monkeypatch, which):
    from triton import knobs

    weight, state = fresh(nf4, "cuda")
    nf4.dequantize_nf4(weight, state)
    seen, hook = [], getattr(knobs.runtime, which)
    note = lambda metadata: seen.append(metadata)  # noqa: E731
    hook.add(note)
    try:
        nf4.dequantize_nf4(weight, state)
    finally:
        hook.remove(note)
    assert len(seen) == 1


def check_device(nf4, monkeypatch):
    weight, state = fresh(nf4, "cuda")
    current, real = [0], torch._C._cuda_getDevice
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: real() + current[0])
    nf4.dequantize_nf4(weight, state)
    count = plain_launches(nf4, monkeypatch)
    nf4.dequantize_nf4(weight, state)
    assert count == [0]
    current[0] = 1
    monkeypatch.setattr(torch._C, "_cuda_getDevice", real)
    nf4.dequantize_nf4(weight, state)
    assert count == [1]


def check_modes(nf4, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    weight, state = fresh(nf4, "cuda")
    nf4.dequantize_nf4(weight, state)
    with Seen():
        nf4.dequantize_nf4(weight, state)
    assert any("dequantize" in name for name in Seen.names)


def check_strided(nf4, monkeypatch):
    """The same object at the same address with the same number of bytes, but only every second one."""
    weight, state = fresh(nf4, "cuda")
    roomy = torch.zeros(2 * weight.numel(), dtype=torch.uint8, device="cuda")
    roomy[: weight.numel()] = weight.data.view(-1)
    weight.data = roomy[: weight.numel()]
    nf4.dequantize_nf4(weight, state)
    weight.data = roomy[::2]
    with pytest.raises(ValueError, match="contiguous: False"):
        nf4.dequantize_nf4(weight, state)


def check_transposed(nf4, monkeypatch):
    weight, state = fresh(nf4, "cuda")
    expected = nf4.dequantize_nf4(weight, state)
    for view in (weight.data.t(), weight.t()):
        assert torch.equal(nf4.dequantize_nf4(view, state), expected.t())


def check_shape_in_place(nf4, monkeypatch):
    weight, state = fresh(nf4, "cuda")
    state.shape = list(state.shape)
    nf4.dequantize_nf4(weight, state)
    state.shape.reverse()
    assert nf4.dequantize_nf4(weight, state).shape == (128, 64)


def check_subclass(nf4, monkeypatch):
    """Over the same memory, but it wants to see operators."""

    class Watching(torch.Tensor):
        names = []

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            cls.names.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    weight, state = fresh(nf4, "cuda")
    expected = nf4.dequantize_nf4(weight, state)
    watching = torch.Tensor._make_subclass(Watching, weight.data)
    assert watching.data_ptr() == weight.data_ptr()
    assert nf4.bits_differing(nf4.dequantize_nf4(watching, state), expected) == 0
    assert any("dequantize" in name for name in Watching.names)


def check_torch_function(nf4, monkeypatch):
    """A layer's weight answers every method in Python; the repeated call must not ask it."""
    layer = nf4.bnb_Linear4bit(64, 128).to("cuda")
    nf4.your_dequantize_nf4(layer)
    kind, asked = type(layer.weight), []
    answer = kind.__torch_function__

    def counting(cls, func, types, args=(), kwargs=None):
        asked.append(func)
        return answer(func, types, args, kwargs or {})

    monkeypatch.setattr(kind, "__torch_function__", classmethod(counting))
    nf4.your_dequantize_nf4(layer)
    assert not asked


def check_state2_appears(nf4, monkeypatch):
    """A launch kept for plain absmax."""
    weight, state = nf4.quantized((64, 128), torch.float16, "cuda", nested=False)
    expected = dequantize_4bit(weight, state)
    for _ in range(2):
        assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), expected) == 0
    assert state._nf4_launch is not None
    state.state2 = fresh(nf4, "cuda")[1].state2
    with pytest.raises(ValueError, match="absmax must be"):
        nf4.dequantize_nf4(weight, state)


WATCHED = {
    "stream": lambda nf4, monkeypatch: check_stream(nf4),
    "graph": lambda nf4, monkeypatch: check_graph(nf4),
    "enter hook": lambda nf4, monkeypatch: check_hook(nf4, monkeypatch, "launch_enter_hook"),
    "exit hook": lambda nf4, monkeypatch: check_hook(nf4, monkeypatch, "launch_exit_hook"),
    "device": check_device,
    "modes": check_modes,
    "strided": check_strided,
    "transposed": check_transposed,
    "shape in place": check_shape_in_place,
    "subclass": check_subclass,
    "torch function": check_torch_function,
    "state2 appears": check_state2_appears,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WATCHED)
def test_the_world_around(nf4, monkeypatch, name):
    WATCHED[name](nf4, monkeypatch)


@pytest.mark.gpu
def test_a_repeated_call_is_the_kept_one(nf4, monkeypatch):
    weight, state = fresh(nf4, "cuda")
    nf4.dequantize_nf4(weight, state)
    count = plain_launches(nf4, monkeypatch)
    out = nf4.dequantize_nf4(weight, state)
    assert count == [0] and nf4.bits_differing(out, dequantize_4bit(weight.data, state)) == 0


def test_keeps_no_launch_without_triton_knobs(nf4, device, monkeypatch):
    """Triton 3.3 has none."""
    weight, state = fresh(nf4, device)
    monkeypatch.setattr(nf4, "empty_cuda", lambda *_: pytest.fail("used"))
    monkeypatch.setattr(nf4, "triton", types.SimpleNamespace())
    assert nf4.keep_launch(types.SimpleNamespace(run=print), weight, state, {}, 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["run", "empty_cuda"])
def test_falls_back_where_internals_are_not_as_expected(nf4, monkeypatch, missing):
    if missing == "run":
        keep = nf4.keep_launch
        monkeypatch.setattr(nf4, "keep_launch", lambda compiled, *rest: keep(object(), *rest))
    else:
        monkeypatch.setattr(nf4, "empty_cuda", None)
    weight, state = fresh(nf4, "cuda")
    for _ in range(3):
        assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), dequantize_4bit(weight.data, state)) == 0
    assert state._nf4_launch is None


@pytest.mark.gpu
def test_starts_through_run_where_the_c_function_is_another(nf4, monkeypatch):
    weight, state = fresh(nf4, "cuda", (96, 128))
    compiled = nf4.launched(weight.data, state, nf4.Setting(), compiled=True)
    seen, run, call = [], compiled.run, type(compiled.run).__call__

    def counting(self, *arguments):
        seen.append(arguments)
        return call(self, *arguments)

    monkeypatch.setattr(run, "arg_annotations", (), raising=False)  # as in Triton 3.7 and later
    monkeypatch.setattr(type(run), "__call__", counting)
    for _ in range(3):
        assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), dequantize_4bit(weight.data, state)) == 0
    assert state._nf4_launch is not None and len(seen) == 3


REMOVED = {  # a line of the check -> (its replacement, the test that must then fail)
    "state2_ref() is state2 is not None": ("state2 is not None", "another state2 object"),
    "state2_ref() is state2 is not None\n": ("state2_ref() is state2\n", "state2 = None"),
    "or same_bytes(weight)": ("or True", "another weight object"),
    "weight_ref() is weight ": ("weight ", "another weight object"),
    "is_plain(other)": ("True", "subclass"),
    "(other.dtype, other.layout) == packed": ("other.layout == torch.strided", "another weight object"),
    "other.dtype, other.layout": ("other.dtype, torch.strided", "weight sparse"),
    "isinstance(other, torch.Tensor)": ("True", "weight as a list"),
    "weight.numel() == n_packed": ("True", "weight.data = its first half"),
    "and weight.is_contiguous()": ("and True", "strided"),
    "out if weight.size(0) != 1 else out.t()": ("out", "transposed"),
    "torch.Size(quant_state.shape)  # a list": ("quant_state.shape  # a list", "shape in place"),
    "state2.dtype is torch.float32": ("True", "state2.dtype = float16"),
    "absmax_ref() is (absmax := quant_state.absmax)": ("(absmax := quant_state.absmax)", "another absmax object"),
    "code_ref() is (code := quant_state.code)": ("(code := quant_state.code)", "another code object"),
    "offset_ref() is (offset := quant_state.offset)": ("(offset := quant_state.offset)", "another offset object"),
    "absmax2_ref() is (absmax2 := state2.absmax)": ("(absmax2 := state2.absmax)", "another state2.absmax object"),
    "code2_ref() is (code2 := state2.code)": ("(code2 := state2.code)", "another state2.code object"),
    "weight.data_ptr() == weight_at": ("True", "weight.data = ..."),
    " absmax.data_ptr() == absmax_at": (" True", "absmax.data = ..."),
    " code.data_ptr() == code_at": (" True", "code.data = ..."),
    "offset.data_ptr() == offset_at": ("True", "offset.data = ..."),
    "absmax2.data_ptr() == absmax2_at": ("True", "state2.absmax.data = ..."),
    "code2.data_ptr() == code2_at": ("True", "state2.code.data = ..."),
    "quant_state.dtype is dtype": ("True", "dtype = bfloat16"),
    "quant_state.shape == shape": ("True", "shape = 128 x 64"),
    'quant_state.quant_type == "nf4"': ("True", "quant_type = fp4"),
    "quant_state.blocksize == blocksize": ("True", "blocksize = 128"),
    "state2.blocksize == blocksize2": ("True", "state2.blocksize = 32"),
    "is weight is not None": ("is weight", "weight = None"),
    ":= quant_state.absmax) is not None": (":= quant_state.absmax)", "absmax = None"),
    ":= quant_state.code) is not None": (":= quant_state.code)", "code = None"),
    ":= quant_state.offset) is not None": (":= quant_state.offset)", "offset = None"),
    ":= state2.absmax) is not None": (":= state2.absmax)", "state2.absmax = None"),
    ":= state2.code) is not None": (":= state2.code)", "state2.code = None"),
    "and nested_fits(quant_state)": ("and True", "state2 = None"),
    "lambda quant_state: quant_state.state2 is None": ("lambda quant_state: True", "state2 appears"),
    "current_device() == index": ("True", "device"),
    "not modes()": ("True", "modes"),
    "not hooks.launch_enter_hook.calls": ("True", "enter hook"),
    "not hooks.launch_exit_hook.calls": ("True", "exit hook"),
    "current_stream(index)": ("0", "stream"),
    "with no_torch_function():": ("with contextlib.nullcontext():", "torch function"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("line", REMOVED)
def test_each_check_is_needed(line, monkeypatch):
    replacement, name = REMOVED[line]
    weakened = notebook.load("nf4_weakened", edit=(line, replacement))
    with pytest.raises((AssertionError, AttributeError, RuntimeError, pytest.fail.Exception)):
        if name in NOTICED:
            check_noticed(weakened, "cuda", name)
        elif name in REFUSED:
            check_refused(weakened, "cuda", name)
        else:
            WATCHED[name](weakened, monkeypatch)


def test_the_removals_cover_the_whole_check():
    """A line added to the checks must come with a removal above."""
    checks = []
    for name, start, end in (
        ("keep_launch", "            if (\n", "            ):\n"),
        ("fits", "return (\n", "        )\n"),
    ):
        source = next(source for _, source in notebook.exports() if f"def {name}(" in source)
        checks += source.split(f"def {name}(")[1].split(start)[1].split(end)[0].splitlines()
    assert len(checks) > 25
    for line in checks:
        assert any(removed.strip() in line for removed in REMOVED), line


@pytest.mark.gpu
def test_a_failing_candidate_is_skipped_and_reported(nf4, monkeypatch):
    broken, launched = nf4.Setting(8, 2), nf4.launched

    def sometimes(weight, state, setting, compiled=False):
        if setting == broken:
            raise RuntimeError("out of resources")
        out = launched(weight, state, setting, compiled)
        return out * 2 if setting == nf4.Setting(1, 1) else out

    monkeypatch.setattr(nf4, "launched", sometimes)
    monkeypatch.setattr(nf4, "SETTINGS", {})
    candidates = (broken, nf4.Setting(), nf4.Setting(1, 1))
    rows = nf4.tune((torch.float16,), candidates, {"small": (1024, 1024)})
    (_, _, results, chosen), *rest = rows
    assert not rest and chosen == nf4.Setting() and nf4.SETTINGS == {(0, torch.float16, "small"): chosen}
    assert "out of resources" in results[broken] and "weights differ" in results[nf4.Setting(1, 1)]
    assert isinstance(results[nf4.Setting()], float)


def test_size_classes_follow_the_harness(nf4):
    sizes = sorted(option.hd * option.m for option in nf4.OPTIONS)
    assert [nf4.size_class(n) for n in sizes] == list(nf4.SIZE_CLASSES)
