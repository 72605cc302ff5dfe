"""llama.cpp through its C interface, and models with random weights for it.

`NVSHARE_LLAMA_DIR` names the folder with libllama, libggml and its CUDA backend, such as that of the npm package
`@node-llama-cpp/linux-x64-cuda`.  The CUDA runtime and cuBLAS come from the loader's paths or from the wheels beside
PyTorch.  Writing a model needs PyPI's `gguf`.

Parameter records are passed as blocks that are longer than any version's: both sides copy what they know, and only the
leading fields, which have not moved for years, are read or written here.

Non-goals: text; the models have no vocabulary of words.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

DIRECTORY_VARIABLE = "NVSHARE_LLAMA_DIR"
CUDA_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13")
GIB = 1 << 30
BLOCK, BLOCK_BYTES = 32, 34
"""Weights of a block of Q8_0, and its bytes: a half-precision factor, then a byte a weight."""


class LlamaMissingError(Exception):
    """llama.cpp cannot be used here.  The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of the Llama architecture."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the quantised tensors of a layer."""
        keys = self.width // self.heads * self.key_heads
        return {
            "attn_q": (self.width, self.width), "attn_k": (keys, self.width), "attn_v": (keys, self.width),
            "attn_output": (self.width, self.width), "ffn_gate": (self.inner, self.width),
            "ffn_up": (self.inner, self.width), "ffn_down": (self.width, self.inner),
        }  # fmt: skip


def shape_of(size_bytes: int) -> Shape:
    """About this many bytes of weights: layers of Llama 3 8B, or of a small model below 1 GiB."""
    wide = size_bytes >= GIB
    sizes = (4096, 14336, 32, 8, 32768) if wide else (512, 1536, 8, 4, 4096)
    one = Shape(1, *sizes)
    layer = sum(rows * columns for rows, columns in one.matrices().values()) * BLOCK_BYTES // BLOCK
    rest = 2 * one.vocabulary * one.width * BLOCK_BYTES // BLOCK
    return Shape(max(1, round((size_bytes - rest) / layer)), *sizes)


def write_model(path: Path, size_bytes: int, seed: int = 1) -> None:
    """A GGUF file with random weights in Q8_0, the same for the same seed.  Raises LlamaMissingError.

    All tensors are windows of one random pool, so that writing is as fast as the disk.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise LlamaMissingError(f"{error.name} is not installed (pip install gguf)") from None
    shape = shape_of(size_bytes)
    partial = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, "llama")
    facts: tuple[tuple[Any, Any], ...] = (
        (writer.add_context_length, 8192), (writer.add_embedding_length, shape.width),
        (writer.add_block_count, shape.layers), (writer.add_feed_forward_length, shape.inner),
        (writer.add_head_count, shape.heads), (writer.add_head_count_kv, shape.key_heads),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, shape.width // shape.heads),
        (writer.add_vocab_size, shape.vocabulary), (writer.add_tokenizer_model, "no_vocab"),
        (writer.add_file_type, gguf.LlamaFileType.MOSTLY_Q8_0),
    )  # fmt: skip
    for add, value in facts:
        add(value)
    matrices = {"token_embd": (shape.vocabulary, shape.width), "output": (shape.vocabulary, shape.width)}
    for layer in range(shape.layers):
        matrices |= {f"blk.{layer}.{name}": sides for name, sides in shape.matrices().items()}
    largest = max(rows * columns for rows, columns in matrices.values()) // BLOCK
    pools = {
        columns: _blocks(largest + len(matrices) * 1009, columns, seed) for columns in {shape.width, shape.inner}
    }
    for number, (name, (rows, columns)) in enumerate(matrices.items()):
        start, count = number * 1009, rows * columns // BLOCK
        window = pools[columns][start : start + count].reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", window, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    ones = numpy.ones(shape.width, dtype=numpy.float32)
    norms = [f"blk.{layer}.{kind}_norm" for layer in range(shape.layers) for kind in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _blocks(count: int, columns: int, seed: int) -> Any:
    """Random blocks whose products with a row of `columns` values keep their variance."""
    blocks = numpy.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=numpy.uint8)
    deviation = 256 / 12**0.5
    blocks[:, :2] = numpy.array([1 / (deviation * columns**0.5)], dtype=numpy.float16).view(numpy.uint8)
    return blocks


def model_file(directory: Path, size_bytes: int) -> Path:
    """The model of this size in the directory, written if it is not there."""
    path = directory / f"random-{size_bytes >> 20}MiB.gguf"
    if not path.exists():
        write_model(path, size_bytes)
    return path


class _Parameters(ctypes.Structure):
    """`llama_model_params` or `llama_context_params`."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class _Batch(ctypes.Structure):
    """`llama_batch`; without positions the tokens follow those before, and the last one's logits are kept."""

    _fields_ = (
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


def _preload(name: str) -> None:
    with suppress(OSError):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        return
    for place in sys.path:
        for found in Path(place).glob(f"nvidia/*/lib/{name}"):
            ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
            return
    raise LlamaMissingError(f"{name} not found: set LD_LIBRARY_PATH, or install PyTorch with CUDA 13")


def _library() -> Any:
    """libllama with its backends, ready to use."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        raise LlamaMissingError(f"{DIRECTORY_VARIABLE} does not name a folder with llama.cpp's libraries")
    for name in CUDA_LIBRARIES:
        _preload(name)
    found = [next(Path(folder).glob(pattern), None) for pattern in ("libggml-base.so", "libggml.*", "libllama.*")]
    if None in found:
        raise LlamaMissingError(f"{folder} has no libllama, libggml and libggml-base")
    _, ggml, llama = (ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in found)
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("llama_model_default_params", _Parameters, ()), ("llama_context_default_params", _Parameters, ()),
        ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _Parameters)),
        ("llama_init_from_model", pointer, (pointer, _Parameters)), ("llama_decode", ctypes.c_int32, (pointer, _Batch)),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (pointer, ctypes.c_int32)),
        ("llama_get_memory", pointer, (pointer,)), ("llama_memory_clear", None, (pointer, ctypes.c_bool)),
        ("llama_model_get_vocab", pointer, (pointer,)), ("llama_vocab_n_tokens", ctypes.c_int32, (pointer,)),
    ):  # fmt: skip
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


class Llama:
    """A model on the GPU, and one sequence.  Raises LlamaMissingError, and RuntimeError where llama.cpp fails."""

    def __init__(self, model: Path, context: int = 2048) -> None:
        self._llama = llama = _library()
        self._model = llama.llama_model_load_from_file(os.fsencode(model), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}: out of memory, or see its messages above")
        parameters = llama.llama_context_default_params()
        parameters.words[0] = context
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context: out of memory, or see its messages above")
        self.vocabulary = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))

    def generate(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """The likeliest tokens after the prompt, one at a time, from an empty cache."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        tokens = list(prompt)
        for _ in range(count):
            token = int(self._logits(tokens).argmax())
            yield token
            tokens = [token]

    def _logits(self, tokens: Sequence[int]) -> Any:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if result := self._llama.llama_decode(self._context, _Batch(len(tokens), ctypes.addressof(array))):
            raise RuntimeError(f"llama_decode: {result}")
        return numpy.ctypeslib.as_array(self._llama.llama_get_logits_ith(self._context, -1), (self.vocabulary,))
