"""The defaults of sampling that a model's publisher set in generation_config.json, for requests that leave parameters out.

As vLLM has it: what the file names is the default, `do_sample` and the rules of beam search count for nothing, and its end
tokens hold in any case (pdmesh/text/tokenizer.py). `max_new_tokens` is no rule of sampling and is not read: a request without
max_tokens may use the rest of its context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pdmesh.sampling_params import MIN_TEMPERATURE, MODEL_DEFAULTS, Kind, Parameter

GenerationConfig = Literal["auto", "none"]
"""auto: the model folder's generation_config.json sets defaults; none: it does not."""
FILE = "generation_config.json"
REMEDY = "mend it, or ignore the file's defaults with --generation-config none"


def sampling_defaults(config: Mapping[str, object], folder: Path) -> dict[str, float]:
    """Return the parameters that a generation_config.json sets, by name. Raises ValueError naming file, key and remedy."""
    found = {parameter: config[parameter.name] for parameter in MODEL_DEFAULTS if config.get(parameter.name) is not None}
    return {parameter.name: _default(parameter, value, folder) for parameter, value in found.items()}


def _default(parameter: Parameter, value: object, folder: Path) -> float:
    where = f"{folder / FILE}: {parameter.name}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}, not a number; {REMEDY}")
    if parameter.kind is Kind.COUNT and value != int(value):
        raise ValueError(f"{where} is {value!r}, not a whole number; {REMEDY}")
    number = int(value) if parameter.kind is Kind.COUNT else float(value)
    if parameter.rules.is_minus_one_all and number == -1:
        return 0
    if parameter.name == "temperature" and 0 < number < MIN_TEMPERATURE:
        return 0.0  # as near to greedy as makes no difference
    problem = parameter.refusal(number)
    if problem is not None:
        raise ValueError(f"{where}: {problem}; {REMEDY}")
    return number
