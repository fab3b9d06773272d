"""Profiles by layer, made up without a model: GPT-2 as it is built, and any number of layers with any names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from boundby.layers.records import Coverage, LayerProfile, ModelProfile, Storage
from boundby.timing.stats import Summary, summarize
from boundby.work.roofline import Interval, Limits

REPOSITORY = Path(__file__).resolve().parents[1]
END_TO_END_S = 0.050
TOKENS, WIDTH, VOCABULARY = 128, 768, 50257
HOSTILE = (
    "</title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}<!--"
    "\u2028\u2029\u202e\u200b\x1b\x00<b>bold</b><a href='javascript:alert(3)'>link</a>&lt;i&gt;$x$%{y}"
)
ODD_NAMES = (
    "<script>alert(1)</script>",
    "</script>",
    "'\"><svg onload=alert(1)>",
    "\u202egnp.exe",
    "x" * 10_000,
    "a\u2028b",
    "مرحبا بالعالم",
    "2020-01-01",
    "1e5",
    "__proto__",
    "constructor",
    "\u200b",
)
LIMITS = Limits(
    flops_per_s=Interval.exact(1.8e11),
    bytes_per_s=((1_000_000, Interval.exact(1.5e11)), (268_435_456, Interval.exact(3.2e10))),
    dispatch_s=Interval.exact(1.4e-6),
)
REASONS = {
    "device_self_s": "cpu has no device clock of its own",
    "memory_before_bytes": "cpu has no allocator statistics",
    "activation_peak_bytes": "cpu has no allocator statistics",
    "limits": "the machine was not calibrated",
}


def spread(seconds: float, runs: int = 60) -> Summary:
    """Return a summary of runs around `seconds`, a few of them slower."""
    return summarize([seconds * (1 + 0.004 * (at % 7) + (0.35 if at % 19 == 18 else 0)) for at in range(runs)])


def layer(path: str, type_: str = "Linear", self_s: float | None = 1e-3, /, **fields: object) -> LayerProfile:
    """Return a layer whose parent is the path before its last dot, and whose inclusive time is its own."""
    times = None if self_s is None else spread(self_s)
    known = {
        "parent": None if path == "" else path.rpartition(".")[0],
        "name": path,
        "depth": 0 if path == "" else path.count(".") + 1,
        "order": 0,
        "calls": 1.0,
        "host_self_s": times,
        "host_inclusive_s": times,
    }
    return LayerProfile(path=path, type=type_, **{**known, **fields})


def nested(layers: Sequence[LayerProfile], parents: Mapping[str, str] | None = None) -> tuple[LayerProfile, ...]:
    """Return the layers numbered in their order, with the inclusive times and parameters that follow from them.

    `parents` are the callers of layers whose own path does not name them, as lists of modules are not called.
    """
    known = {layer.path for layer in layers}
    placed = []
    for order, row in enumerate(layers):
        parent = (parents or {}).get(row.path, row.parent)
        while parent is not None and parent not in known:
            parent = parent.rpartition(".")[0]
        placed.append(replace(row, parent=parent, order=order))
    by_path = {row.path: row for row in placed}
    raised = spread(1.0).median  # by which `spread` lifts the median over what it is given
    seconds = {row.path: row.host_self_s.median / raised if row.host_self_s else 0.0 for row in placed}
    parameters = {row.path: row.parameters for row in placed}
    for row in reversed(placed):
        if row.parent is not None:
            seconds[row.parent] += seconds[row.path]
            parameters[row.parent] += parameters[row.path]
    depths: dict[str, int] = {}
    complete = []
    for path, row in by_path.items():
        depths[path] = 0 if row.parent is None else depths[row.parent] + 1
        inclusive = spread(seconds[path]) if row.host_self_s else None
        complete.append(replace(row, depth=depths[path], host_inclusive_s=inclusive, parameters=parameters[path]))
    return tuple(complete)


def model_profile(layers: Sequence[LayerProfile], **fields: object) -> ModelProfile:
    known = {
        "profile_name": "made up",
        "model_name": "a model",
        "device": "cpu",
        "device_name": "AMD EPYC, 2 cores",
        "dtype": "float32",
        "num_runs": 60,
        "reference_s": spread(END_TO_END_S),
        "instrumented_s": spread(1.006 * END_TO_END_S),
        "probe_cost_s": 1.6e-6,
        "module_calls": float(len(layers)),
        "coverage": Coverage(ratio=1.004, status="pass", leaf_ratio=0.81),
        "layers": tuple(layers),
        "reasons": REASONS,
        "doubts": (),
        "environment": {"torch": "2.13.0", "python": "3.11.2", "threads": "2"},
    }
    return ModelProfile(**{**known, **fields})


def busy(
    path: str, type_: str, seconds: float, share_of_limit: float, inputs: int, outputs: int, **fields: object
) -> LayerProfile:
    """Return a layer with work that takes `inputs` numbers for each token and gives `outputs`."""
    return layer(
        path,
        type_,
        seconds,
        share_of_limit=share_of_limit,
        gain_at_limit_s=(1 - share_of_limit) * seconds,
        input_shapes=(f"float32[1, {TOKENS}, {inputs}]",),
        output_shapes=(f"float32[1, {TOKENS}, {outputs}]",),
        output_bytes=4 * TOKENS * outputs,
        **fields,
    )


def linear(path: str, type_: str, inputs: int, outputs: int, share_of_limit: float = 0.72) -> LayerProfile:
    """Return a layer that multiplies by a matrix, as fast as `share_of_limit` says."""
    weights, flops = inputs * outputs + outputs, 2.0 * TOKENS * inputs * outputs
    moved = 4.0 * (inputs * outputs + TOKENS * (inputs + outputs))
    by_flops, by_bytes = flops / LIMITS.flops_per_s.value, moved / LIMITS.bytes_per_s[-1][1].value
    known = {"parameters": weights, "storages": (Storage(path, 4 * weights, True),)}
    known |= {"flops_self": flops, "bytes_self": moved, "bound": "compute" if by_flops >= by_bytes else "memory"}
    return busy(path, type_, max(by_flops, by_bytes) / share_of_limit, share_of_limit, inputs, outputs, **known)


def light(path: str, type_: str, seconds: float, width: int = WIDTH, parameters: int = 0) -> LayerProfile:
    """Return a layer that only moves data."""
    known = {"flops_self": 5.0 * TOKENS * width, "bytes_self": 8.0 * TOKENS * width, "bound": "launch"}
    return busy(path, type_, seconds, 0.2, width, width, parameters=parameters, **known)


def gpt2_block(at: int) -> list[LayerProfile]:
    """Return a block of GPT-2; attention itself is a function, so it is the own work of `attn`."""
    path = f"transformer.h.{at}"
    return [
        layer(path, "GPT2Block", 2.1e-5 + (4e-4 if at == 11 else 0)),
        light(f"{path}.ln_1", "LayerNorm", 4.2e-5, parameters=2 * WIDTH),
        light(f"{path}.attn", "GPT2Attention", 3.6e-4),
        linear(f"{path}.attn.c_attn", "Conv1D", WIDTH, 3 * WIDTH),
        linear(f"{path}.attn.c_proj", "Conv1D", WIDTH, WIDTH, 0.66),
        light(f"{path}.attn.resid_dropout", "Dropout", 3e-6),
        light(f"{path}.ln_2", "LayerNorm", 4.1e-5, parameters=2 * WIDTH),
        layer(f"{path}.mlp", "GPT2MLP", 9e-6),
        linear(f"{path}.mlp.c_fc", "Conv1D", WIDTH, 4 * WIDTH, 0.75),
        light(f"{path}.mlp.act", "NewGELUActivation", 6.1e-4, 4 * WIDTH),
        linear(f"{path}.mlp.c_proj", "Conv1D", 4 * WIDTH, WIDTH, 0.7),
        light(f"{path}.mlp.dropout", "Dropout", 3e-6),
    ]


def gpt2(blocks: int = 12, **fields: object) -> ModelProfile:
    """Return GPT-2 on a CPU, in about the times that it takes there."""
    layers = [
        layer("", "GPT2LMHeadModel", 6e-5),
        layer("transformer", "GPT2Model", 2.4e-4),
        light("transformer.wte", "Embedding", 5.5e-5, parameters=VOCABULARY * WIDTH),
        light("transformer.wpe", "Embedding", 2e-5, parameters=1024 * WIDTH),
        light("transformer.drop", "Dropout", 3e-6),
        *(part for at in range(blocks) for part in gpt2_block(at)),
        light("transformer.ln_f", "LayerNorm", 4.3e-5, parameters=2 * WIDTH),
        linear("lm_head", "Linear", WIDTH, VOCABULARY, 0.8),
    ]
    complete = nested(layers)
    whole = complete[0].host_inclusive_s
    assert whole
    known = {
        "model_name": "gpt2",
        "profile_name": "gpt2_profile",
        "reference_s": spread(whole.median / 1.004),
        "instrumented_s": spread(whole.median),
        "limits": LIMITS,
    }
    return model_profile(complete, **{**known, **fields})


def with_memory(profile: ModelProfile) -> ModelProfile:
    """Return the profile as a GPU gives it: with device times and memory at every boundary."""
    held, layers = 498_000_000, []
    for layer in profile.layers:
        output = layer.output_bytes or 0
        layers.append(
            replace(
                layer,
                device_self_s=layer.host_self_s,
                device_inclusive_s=layer.host_inclusive_s,
                is_launch_bound=False,
                memory_before_bytes=held,
                memory_after_bytes=held + output // 4,
                activation_peak_bytes=2 * output + 100_000,
            )
        )
        held += output // 4 if layer.type != "Dropout" else -output // 2
    return replace(profile, device="cuda:0", device_name="NVIDIA H200", layers=tuple(layers))


def many(number: int, **fields: object) -> ModelProfile:
    """Return a model of `number` layers beside its root, in blocks of five."""
    layers = [layer("", "Model", 1e-4)]
    for at in range(number):
        block, part = divmod(at, 5)
        path = f"stack.blocks.{block}" + ("" if part == 0 else f".part_{part}")
        type_ = "Block" if part == 0 else ("Linear", "LayerNorm", "Linear", "Activation")[part - 1]
        seconds = 1e-5 * (1 + part) * (1 + (at * 7919 % 101) / 50)
        layers.append(layer(path, type_, seconds, parameters=0 if part in (0, 4) else 1000 * (1 + at % 97)))
    complete = nested(layers)
    whole = complete[0].host_inclusive_s
    assert whole
    return model_profile(complete, **{"reference_s": whole, "instrumented_s": whole, **fields})


def hostile(text: str) -> ModelProfile:
    """Return a profile in which every text that comes from outside is `text`, or a name that parsers trip over."""
    layers = [layer("", text)]
    for at, path in enumerate((text, *ODD_NAMES)):
        odd = layer(
            path,
            text if at % 2 == 0 else path,
            1e-3 * (at + 1),
            name=f"{path}, called elsewhere",
            parent="",
            depth=1,
            order=at + 1,
            parameters=10 ** (at % 7 + 1),
            flops_self=1e6 * (at + 1),
            bytes_self=1e5,
            bound="memory",
            memory_before_bytes=1_000_000,
            memory_after_bytes=2_000_000,
            activation_peak_bytes=3_000_000 + at,
            input_shapes=(text,),
            output_shapes=(text,),
            doubts=(text,),
        )
        layers.append(odd)
    return model_profile(
        layers,
        profile_name=text,
        model_name=text,
        device=text,
        device_name=text,
        dtype=text,
        reasons=dict.fromkeys(REASONS, text),
        doubts=(text,),
        environment={text: text},
    )
