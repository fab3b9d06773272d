"""ONNX Runtime and OpenVINO: a classifier converted for another engine, on the CPU. Both are optional packages.

converted = convert(model, "openvino", folder)
session = open_session(converted, ENGINES["openvino_bfloat16"], threads=2)
logits = session(input_ids, attention_mask)  # padded on the right, int64 [rows, tokens]; float32 [rows, labels]
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from boundby.inference.precision import Precision, to_int8

Library = Literal["onnxruntime", "openvino"]
Session = Callable[[np.ndarray, np.ndarray], np.ndarray]
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "logits"
EXAMPLE = (3, 24)  # texts and tokens that are traced: sizes of 1 would become constants
LEAST_CALIBRATION, MOST_CALIBRATION = 64, 256  # texts: fewer leave ranges to chance, NNCF itself takes 300


@dataclass(frozen=True)
class Engine:
    """One precision of one library. `packages` are those it needs; `calibrated`: its ranges are found with texts."""

    library: Library
    precision: Literal["float32", "bfloat16", "int8"]
    words: str
    packages: tuple[str, ...]
    calibrated: bool = False

    @property
    def lacking(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)


_ONNX = ("onnxruntime", "onnx", "onnxscript")
ENGINES = {
    "onnxruntime": Engine("onnxruntime", "float32", "ONNX Runtime", _ONNX),
    "onnxruntime_int8": Engine("onnxruntime", "int8", "ONNX Runtime int8", _ONNX),
    "openvino": Engine("openvino", "float32", "OpenVINO", ("openvino",)),
    "openvino_bfloat16": Engine("openvino", "bfloat16", "OpenVINO bfloat16", ("openvino",)),
    "openvino_int8": Engine("openvino", "int8", "OpenVINO int8", ("openvino", "nncf"), calibrated=True),
}


class _Logits(nn.Module):
    """The model as the engines take it: two tensors in, one out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return the logits."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def convert(model: Any, library: Library, folder: Path) -> Path:
    """Write a float32 model on the CPU for this library and return the file, which takes any batch and length.

    It turns off the model's cache. Raises what the library raises.
    """
    model.config.use_cache = False
    module = _Logits(model).eval()
    ids = (torch.arange(EXAMPLE[0] * EXAMPLE[1]) % model.config.vocab_size).view(EXAMPLE)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        if library == "openvino":
            import openvino

            path = file_of(folder, library)
            openvino.save_model(openvino.convert_model(module, example_input=example), path, compress_to_fp16=False)
            return path
        from torch.onnx import export

        path, any_size = file_of(folder, library), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
        program = export(
            module,
            tuple(example.values()),
            dynamo=True,
            input_names=INPUTS,
            output_names=(OUTPUT,),
            dynamic_shapes=(any_size, any_size),
            verbose=False,
        )
        assert program is not None
        program.save(str(path))
        return path


def quantized(path: Path, engine: Engine, texts: Iterable[np.ndarray]) -> Path:
    """Write the converted model in int8, weights and matmul inputs, and return the file.

    ONNX Runtime finds the range of an input when it runs; OpenVINO is calibrated with the token ids of `texts`.
    """
    target = file_of(path.parent, engine.library, "int8")
    if engine.library == "onnxruntime":
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model = onnx.load(path)
        del model.graph.value_info[:]  # of the exporter; its own shape inference disagrees with them and gives up
        extra = {"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True}
        quantize_dynamic(model, target, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True,
                         weight_type=QuantType.QInt8, extra_options=extra)  # fmt: skip
        return target
    import nncf
    import openvino

    inputs = [dict(zip(INPUTS, (ids[None], np.ones_like(ids[None])), strict=True)) for ids in texts]
    rounded = nncf.quantize(openvino.Core().read_model(path), nncf.Dataset(inputs),
                          model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs))  # fmt: skip
    openvino.save_model(rounded, target, compress_to_fp16=False)
    return target


def open_session(path: Path, engine: Engine, threads: int) -> Session:
    """Return what gives logits by the model at `path`, on so many threads; they do not spin while they wait.

    It raises ValueError where the model was converted for another batch size.
    """
    infer = _inference(path, engine, threads)

    def logits(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rows = infer(ids, mask)
        if len(rows) != len(ids):
            raise ValueError(f"the converted model gives {len(rows)} rows of logits for {len(ids)} texts")
        return rows

    return logits


def _inference(path: Path, engine: Engine, threads: int) -> Session:
    if engine.library == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        for pool in ("intra_op", "inter_op"):
            options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda *inputs: session.run([OUTPUT], dict(zip(INPUTS, inputs, strict=True)))[0]
    import openvino

    hint = "bf16" if engine.precision == "bfloat16" else "f32"  # else it takes bfloat16 where the processor has AMX
    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda *inputs: request.infer(dict(zip(INPUTS, inputs, strict=True)), share_inputs=True)[0].copy()


def as_precision(name: str, session: Session) -> Precision:
    """Return this engine as a predictor takes it."""
    precision = ENGINES[name].precision
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return Precision(name, dtype, convert=to_int8 if precision == "int8" else None, session=session)


def file_of(folder: Path, library: Library, precision: str = "float32") -> Path:
    """Return the file of a converted model in this folder."""
    return folder / f"{'int8' if precision == 'int8' else 'model'}.{'xml' if library == 'openvino' else 'onnx'}"


def file_bytes(path: Path) -> int:
    """Return the size of a converted model: OpenVINO's weights lie beside its graph."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*") if file.is_file())
