"""The tensors of a model, as its metadata lists them; names as Triton's backends for language models use them."""

from dataclasses import dataclass

VERSION = "1"
PLATFORM = "pdmesh"


@dataclass(frozen=True)
class Tensor:
    """One input or output. `shape`: (1,) for one element, (-1,) for any number. `datatypes`: those accepted, the usual first."""

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...] = (1,)

    @property
    def datatype(self) -> str:
        """The usual one: what outputs have and metadata shows."""
        return self.datatypes[0]


_ID_TYPES = ("INT32", "INT64", "UINT32", "UINT64")
FLAGS = {
    # input → the outputs that it adds
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
INPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_input", ("BYTES",)),  # exactly one of the first three
        Tensor("messages", ("BYTES",)),  # JSON: [{"role": …, "content": …}, …]
        Tensor("input_ids", _ID_TYPES, (-1,)),
        Tensor("sampling_parameters", ("BYTES",)),  # JSON object
        Tensor("stream", ("BOOL",)),
        Tensor("exclude_input_in_output", ("BOOL",)),
        *(Tensor(name, ("BOOL",)) for name in FLAGS),
    )
}
OUTPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_output", ("BYTES",), (-1,)),
        Tensor("output_ids", ("INT32",), (-1,)),  # of all choices, one after the other
        Tensor("finish_reason", ("BYTES",), (-1,)),  # "stop", "length"; "" while the choice goes on
        Tensor("stop_reason", ("BYTES",), (-1,)),
        Tensor("logprobs", ("BYTES",), (-1,)),  # JSON, one entry for each token
        Tensor("cumulative_logprob", ("FP32",), (-1,)),
        Tensor("index", ("UINT32",), (-1,)),  # of the choice
        Tensor("num_output_tokens", ("UINT32",), (-1,)),
        Tensor("num_input_tokens", ("UINT32",)),
        Tensor("num_cached_tokens", ("UINT32",)),
        Tensor("num_drafted_tokens", ("UINT32",)),
        Tensor("num_accepted_tokens", ("UINT32",)),
        Tensor("seed", ("UINT64",)),
    )
}
# Without a list of outputs in the request.
WHOLE_OUTPUTS = ("text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
PIECE_OUTPUTS = ("text_output", "output_ids", "finish_reason", "index")
# Known when the answer is complete: not for its pieces.
LATE_OUTPUTS = frozenset({"num_cached_tokens", "num_drafted_tokens", "num_accepted_tokens"})
