"""A checkpoint's config.json, read key by key: what no family has read is an error, so that no model runs slightly wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

MOST_LAYERS = 10_000
_LAYERS = frozenset({"num_hidden_layers", "n_layer"})
_HUGE = 1e300  # whole numbers of JSON have no bound
NEUTRAL = frozenset({
    "_attn_implementation", "_commit_hash", "_name_or_path", "add_cross_attention", "architectures", "attention_dropout",
    "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "custom_pipelines", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dropout", "early_stopping", "embd_pdrop", "embedding_dropout", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "ffn_dropout", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label", "init_std", "initializer_range",
    "is_decoder", "is_encoder_decoder", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "layerdrop",
    "length_penalty", "max_length", "min_length", "mlp_dropout", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "resid_pdrop", "residual_dropout", "return_dict", "return_dict_in_generate", "rope_dropout", "router_aux_loss_coef",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "tokens_file", "top_k", "top_p", "torchscript", "transformers_version", "typical_p", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "use_mamba_kernels",
})  # fmt: skip
"""Keys of which no number of a forward pass depends on: for training, for other tasks, for the tool that wrote the file."""


class UnsupportedModel(ValueError):
    """A checkpoint needs something that this engine does not compute; the message names it."""


def _is_off(key: str, value: object) -> bool:
    return value is False and (key.startswith("use_") or key.endswith("bias"))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether this is a finite number: JSON of Python also has NaN and Infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_HUGE < value < _HUGE


class ConfigReader(Mapping[str, object]):
    """Give values by key, checked, and remember which keys were asked for."""

    def __init__(self, content: Mapping[str, object], prefix: str = "") -> None:
        self._content, self._prefix = content, prefix
        self._read: set[str] = set()
        self._children: dict[str, ConfigReader] = {}

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def unread(self) -> list[str]:
        """Return the keys with a value that no family asked for and that are not NEUTRAL, nor a switch that is off."""
        known = self._read | NEUTRAL
        own = (key for key, value in self._content.items() if key not in known and value is not None and not _is_off(key, value))
        return [self._prefix + key for key in own] + [key for child in self._children.values() for key in child.unread()]

    def ignore(self, *keys: str) -> None:
        """Count `keys` as read: this family computes the same whatever they say."""
        self._read.update(keys)

    def name(self, key: str) -> str:
        """Return the key with those of the mappings around it."""
        return self._prefix + key

    def sections(self) -> list[str]:
        """Return the keys that hold mappings."""
        return [key for key, value in self._content.items() if isinstance(value, Mapping)]

    def section(self, key: str) -> ConfigReader | None:
        """Return the mapping at `key`, whose keys have to be read too; None where there is none, or an empty one."""
        value = self.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {self.name(key)} is {value!r}, not a mapping")
        return self._children.setdefault(key, ConfigReader(value, f"{self.name(key)}."))

    def joined_section(self, first: str, second: str) -> ConfigReader | None:
        """Return the mappings at both keys as one, in which those of `second` count; None where neither is there."""
        one, two = self.section(first), self.section(second)
        if one is None or two is None:
            return two if one is None else one
        del self._children[first], self._children[second]
        earlier = {
            key: value for key, value in one._content.items() if not (key == "rope_type" and "type" in two)
        }  # an older name
        return self._children.setdefault(first, ConfigReader({**earlier, **two._content}, f"{self.name(second)}."))

    def count(self, *keys: str, default: int | None = None) -> int:
        """Return the first of `keys` that is there. Raises ValueError where there is none and no default, and for 0."""
        value = self.optional_count(*keys)
        value = default if value is None else value
        if not value:
            raise ValueError(f"config.json has no {self.name(keys[0])!r}, or it is 0; it is needed to build the model")
        return value

    def optional_count(self, *keys: str) -> int | None:
        """Return the first of `keys` that is there, a whole number not below 0, or None."""
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if not is_number(value) or value != int(value) or value < 0:
                raise ValueError(f"config.json: {self.name(key)} is {value!r}, not a count")
            if key in _LAYERS and value > MOST_LAYERS:  # lists of so many are made before a tensor is looked for
                raise ValueError(f"config.json: {self.name(key)} is {value!r}, and a model has {MOST_LAYERS} layers at most")
            return int(value)
        return None

    def number(self, *keys: str, default: float) -> float:
        """Return the first of `keys` that is there. Raises ValueError for what is no finite number."""
        for key in keys:
            if key in self._content:
                value = self[key]
                if not is_number(value):
                    raise ValueError(f"config.json: {self.name(key)} is {value!r}, not a number")
                return float(value)
        return default

    def above_zero(self, *keys: str, default: float) -> float:
        """Return the first of `keys` that is there. Raises ValueError for what is no number above 0."""
        value = self.number(*keys, default=default)
        if value <= 0:
            key = next((key for key in keys if key in self._content), keys[0])
            raise ValueError(f"config.json: {self.name(key)} is {value!r}; it must be above 0")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return None where the key is absent or null."""
        return None if self.get(key) is None else self.number(key, default=0.0)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether the key is set; null counts as absent. Raises ValueError for other than true, false, 1 and 0: the text
        "False" would count as true."""
        value = self.get(key)
        if value is not None and value not in (True, False):
            raise ValueError(f"config.json: {self.name(key)} is {value!r}, neither true nor false")
        return default if value is None else bool(value)

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings; None where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"config.json: {self.name(key)} is {value!r}, not a list")
        return [str(item) for item in value]

    def require(self, key: str, *allowed: object) -> None:
        """Raise UnsupportedModel unless the key is absent, null, or one of `allowed`: what this engine computes."""
        value = self.get(key)
        if value is not None and value not in allowed:
            computed = " or ".join(repr(value) for value in allowed)
            raise UnsupportedModel(f"{self.name(key)} {value!r} is not supported; this engine computes {computed}")
