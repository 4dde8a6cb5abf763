"""The header of a GGUF file, key by key (ggml's docs/gguf.md): what nothing has read is refused by name. No torch."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader

_HINT = "use the model's Hugging Face folder"
_NEUTRAL = frozenset({
    "vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "tensor_data_layout",
    "rope.scaling.finetuned", "rope.scaling.factor", "rope.scaling.original_context_length",
})  # fmt: skip
"""Keys that no number depends on in the architectures read here, or not without another key that is read."""
_OFF: dict[str, tuple[object, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,), "leading_dense_block_count": (0,),
    "expert_group_count": (1, 0), "expert_group_used_count": (1, 0), "attention.causal": (True,),
    "use_parallel_residual": (False,), "rope.scaling.yarn_log_multiplier": (0.0,),
}  # fmt: skip
"""Keys of parts that a model may be without, and the values that say so."""
_TOKENIZER = frozenset({
    # What pdmesh/text/gguf_tokenizer.py reads.
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id",
    "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
    # Of other tasks: filling in the middle, sentence pairs, masks.
    "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
    "prefix_token_id", "suffix_token_id", "middle_token_id", "seperator_token_id", "separator_token_id", "cls_token_id",
    "mask_token_id", "token_type_count",
})  # fmt: skip
"""Keys `tokenizer.ggml.*` that are read or change no text. Others may change how text becomes tokens."""
_OTHER_TOKENIZER = r"tokenizer\.(chat_template(\..*|s)?|huggingface\.json)"


class Header:
    """Read a file's keys with their types; the architecture's prefix is put before them. Errors name file and key."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self._fields = path, reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._read: set[str] = set()
        self.architecture = str(self._value("general.architecture", "unknown"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as torch has it. Raises ValueError where there is none."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: no tensor {name!r}; the file is incomplete")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def has(self, *names: str) -> bool:
        """Return whether one of these tensors of the first layer is there, or of another that is named whole."""
        return any(name in self._tensors or f"blk.0.{name}" in self._tensors for name in names)

    def layers_with(self, stem: str) -> tuple[bool, ...]:
        """Return for each layer whether it has the tensor."""
        return tuple(f"blk.{layer}.{stem}" in self._tensors for layer in range(self.num_layers))

    def floats(self, name: str) -> np.ndarray | None:
        """Return the numbers of a tensor of divisors; None where it is not there."""
        return np.array(self._tensors[name].data, dtype=np.float32) if name in self._tensors else None

    @property
    def num_layers(self) -> int:
        """Return the layers that compute tokens: without those that predict further ones, which stand last."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    @property
    def head_dim(self) -> int:
        """Return the width of a query's head."""
        return self.integer("attention.key_length", self.integer("embedding_length") // self.integer("attention.head_count"))

    def given(self, key: str) -> bool:
        """Return whether the file has the key."""
        return f"{self.architecture}.{key}" in self._fields

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number. Raises ValueError: it is absent without a default, or no number."""
        return int(self.number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Raises ValueError: it is absent without a default, or no number."""
        value = self._value(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.path}: GGUF key {self.architecture}.{key} is {value!r}, not a number")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether a switch is on."""
        return bool(self._value(f"{self.architecture}.{key}", default))

    def ignore(self, *keys: str) -> None:
        """Count `keys` as read: tensors say the same."""
        self._read.update(f"{self.architecture}.{key}" for key in keys)

    def layer_types(self, period: int) -> list[str]:
        """Return transformers' `layer_types`: without the file's own pattern, the last of every `period` layers sees all."""
        pattern = self._value(f"{self.architecture}.attention.sliding_window_pattern", period)
        if isinstance(pattern, list):
            if len(pattern) < self.num_layers:
                raise ValueError(f"{self.path}: attention.sliding_window_pattern has {len(pattern)} entries, fewer than layers")
            windows = [bool(own) for own in pattern[: self.num_layers]]
        else:
            every = int(str(pattern))
            windows = [every > 0 and (layer + 1) % every != 0 for layer in range(self.num_layers)]
        return ["sliding_attention" if own else "full_attention" for own in windows]

    def token_ids(self) -> dict[str, object]:
        """Return ids for beginning, padding, and end of sequence; a file may name an end of turn besides the end of text."""
        keys = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
        ids = {name: self._value(f"tokenizer.ggml.{key}", None) for name, key in keys.items()}
        ends = [self._value(f"tokenizer.ggml.{key}", None) for key in ("eos_token_id", "eot_token_id")]
        known = list(dict.fromkeys(end for end in ends if end is not None))
        return {**ids, "eos_token_id": known[0] if len(known) == 1 else known or None}

    def rope_scaling(self) -> dict[str, object] | None:
        """Return the scaling of positions by keys or by the tensors of divisors; None without one."""
        if (divisors := self.floats("rope_freqs.weight")) is not None:
            return self._llama3(divisors)
        if (long := self.floats("rope_factors_long.weight")) is not None:
            return self._longrope(long)
        kind = self._value(f"{self.architecture}.rope.scaling.type", "none")
        linear = self.number("rope.scale_linear", 1.0)  # an older key
        if kind == "none" and linear != 1.0:
            return {"rope_type": "linear", "factor": linear}
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        factor = self.number("rope.scaling.factor")
        return {"rope_type": kind, "factor": factor, **(self._yarn(factor) if kind == "yarn" else {})}

    def _yarn(self, factor: float) -> dict[str, object]:
        """Return YaRN's own parameters. llama.cpp multiplies its factor of attention with the one that follows from the scaling
        (ggml's rope_yarn), transformers takes it as the whole."""
        given = self.number("rope.scaling.yarn_attn_factor", self.number("rope.scaling.attn_factor", 1.0))
        whole = {} if given == 1.0 else {"attention_factor": given * (1.0 + 0.1 * math.log(factor))}
        betas = {f"beta_{n}": self.number(f"rope.scaling.yarn_beta_{n}", d) for n, d in (("fast", 32.0), ("slow", 1.0))}
        return {"original_max_position_embeddings": self.integer("rope.scaling.original_context_length"), **betas, **whole}

    def _longrope(self, long: np.ndarray) -> dict[str, object]:
        """Return LongRoPE's divisors: those of the file's tensors, and the factor of its attention."""
        short = self.floats("rope_factors_short.weight")
        if short is None:
            raise ValueError(f"{self.path}: rope_factors_long.weight is there and rope_factors_short.weight is not; get it again")
        kind = self._value(f"{self.architecture}.rope.scaling.type", "longrope")
        if kind not in ("longrope", "none"):
            raise ValueError(f"{self.path}: rope scaling {kind!r} has no tensors of divisors, and the file holds them")
        context = self.integer("rope.scaling.original_context_length", self.integer("context_length"))
        factor = {"attention_factor": self.number("rope.scaling.attn_factor")} if self.given("rope.scaling.attn_factor") else {}
        divisors = {"long_factor": long.tolist(), "short_factor": short.tolist()}
        return {"rope_type": "longrope", "original_max_position_embeddings": context, **divisors, **factor}

    def _llama3(self, divisors: np.ndarray) -> dict[str, object]:
        """Return the scaling of Llama 3.1 and later: the file holds the divisor of each frequency instead of the parameters.

        The published models differ in `factor` only, the largest divisor; other parameters are rejected."""
        factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
        base, width = self.number("rope.freq_base", 10000.0), 2 * len(divisors)
        wavelengths = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
        smooth = (original / wavelengths - low) / (high - low)
        expected = 1.0 / ((1.0 - smooth.clip(0.0, 1.0)) / factor + smooth.clip(0.0, 1.0))
        if not np.allclose(divisors, expected, rtol=1e-4):
            raise ValueError(
                f"{self.path}: rope_freqs.weight does not hold Llama 3 frequencies; this rotary scaling is not supported"
            )
        parameters = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
        return {"rope_type": "llama3", "factor": factor, **parameters}

    def require(self, key: str, *expected: object) -> None:
        """Raise ValueError unless the key is absent or has a value that this engine computes."""
        value = self._value(f"{self.architecture}.{key}", expected[0])
        if value not in expected:
            raise ValueError(
                f"{self.path}: GGUF key {self.architecture}.{key} is {value!r} and this engine computes {expected[0]!r} alone; "
                f"{_HINT}"
            )

    def check_kind(self) -> None:
        """Raise ValueError for a file that is not one whole model."""
        kind, parts = self._value("general.type", "model"), self._value("split.count", 1)
        if kind != "model":
            raise ValueError(f"{self.path}: general.type is {kind!r}, not a model; give the model's own file")
        if isinstance(parts, int) and parts > 1:
            raise ValueError(f"{self.path}: one of {parts} parts; join them with llama.cpp's llama-gguf-split --merge")

    def finish(self) -> None:
        """Raise ValueError for a key of this architecture or of the tokenizer that was not read, unless its value changes
        nothing. Keys of other prefixes (`general.`, those of tools) say how the file was made."""
        for key, off in _OFF.items():
            if not self._was_read(key):
                self.require(key, *off)
        for key in ("rope.dimension_count", "attention.value_length"):
            if not self._was_read(key):
                self.require(key, self.head_dim)
        if not self._was_read("attention.sliding_window"):
            window = self._value(f"{self.architecture}.attention.sliding_window", 0)
            if not isinstance(window, int) or 0 < window < self.integer("context_length"):
                self.require("attention.sliding_window", 0)
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        prefix = f"{self.architecture}."
        own = [key for key in self._fields if key.startswith(prefix) and key not in self._read]
        unknown = [key for key in own if key.removeprefix(prefix) not in _NEUTRAL and not self._is_one(key)]
        unknown += [key for key in self._fields if key.startswith("tokenizer.") and not self._is_known_of_tokenizer(key)]
        if unknown:
            raise ValueError(
                f"{self.path}: GGUF keys {', '.join(unknown)} are not read for architecture {self.architecture}, so this model "
                f"might be computed wrongly; {_HINT}"
            )

    def _was_read(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._read

    def _is_known_of_tokenizer(self, key: str) -> bool:
        known = key.removeprefix("tokenizer.ggml.") in _TOKENIZER or re.fullmatch(_OTHER_TOKENIZER, key) is not None
        return known or self._fields[key].contents() is False

    def _is_one(self, key: str) -> bool:
        """Return whether it is a factor that changes nothing."""
        return key.endswith(("_scale", "_factor")) and self._fields[key].contents() == 1.0

    def _value(self, key: str, default: object) -> object:
        self._read.add(key)
        field = self._fields.get(key)
        return default if field is None else field.contents()


def open_file(path: Path) -> GGUFReader:
    """Map the file. Raises ValueError for one that is no GGUF file, or damaged."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file; give one, or a Hugging Face folder")
    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OverflowError) as error:  # numpy raises them for too few bytes
        raise ValueError(f"{path} cannot be read ({error}); it is cut off or damaged, get it again") from error
