"""Whatever a request holds: it is converted, or refused with an error that is the caller's own. Nothing else comes out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from router.api.vllm.requests import to_mesh

numbers = st.floats(width=32)
wide = st.sampled_from([0, 1, 2**31, 2**32 - 1])
signed = st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1])
params = st.builds(
    lambda fields: pb.SamplingParams(**fields),
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"), numbers),
            **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n"), wide),
            **dict.fromkeys(("logprobs", "seed", "prompt_logprobs", "truncate_prompt_tokens"), signed),
            "stop": st.lists(st.text(max_size=4), max_size=2),
            "json_object": st.booleans(),
        },
    ),
)
inputs = st.sampled_from([{}, {"text": "x"}, {"tokenized": pb.TokenizedInput(input_ids=[1, 2**32 - 1])}])


@settings(max_examples=150, deadline=None)
@given(params, inputs, signed, st.text(max_size=80))
def test_requests(params: pb.SamplingParams, given_input: dict[str, object], rank: int, request_id: str) -> None:
    request = pb.GenerateRequest(
        sampling_params=params,
        data_parallel_rank=rank,
        request_id=request_id,
        **given_input,  # type: ignore[arg-type]
    )
    try:
        message = to_mesh(request)
    except InvalidArgument as error:
        assert error.field and error.field in error.message
    else:
        message.SerializeToString()
        assert len(message.options.request_id) <= 64
