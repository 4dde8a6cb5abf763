"""A validated request: what is left of a client's message once every field has been checked."""

from dataclasses import dataclass, field

from pdmesh.runtime.files import cache_root_of
from pdmesh.text.block_hash import hash_prompt, short_name
from pdmesh.v1 import common_pb2
from router.routing.worker_snapshot import Mode
from router.tokenization.served_model import ServedModel


@dataclass(frozen=True, eq=False)
class Job:
    """One request, ready to be placed.

    `sampling` is what workers get: seed, max_tokens and n are set; stop strings are the router's and stand in `stop` instead.
    `emitted` is empty, or holds one entry for each choice in order. `deadline` is monotonic seconds, None without one.
    `slo_ttft_ms` and `slo_tpot_ms` are its own objectives; 0: those of its model and priority. `attempt`: how often it was sent
    before.
    """

    request_id: str
    model: ServedModel
    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    emitted: tuple[common_pb2.EmittedChoice, ...] = ()
    tenant: str = ""
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_STANDARD
    cache_salt: str = ""
    mode: Mode | None = None
    deadline: float | None = None
    slo_ttft_ms: int = 0
    slo_tpot_ms: int = 0
    attempt: int = 0
    is_chat: bool = False
    _names: dict[tuple[bytes, int], list[int]] = field(default_factory=dict, repr=False)

    @property
    def num_choices(self) -> int:
        """n of the request."""
        return self.sampling.n

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end a choice: stop tokens, and end-of-sequence unless ignored."""
        stops = frozenset(self.sampling.stop_token_ids)
        return stops if self.sampling.ignore_eos else stops | self.model.eos_token_ids

    def block_names(self, identity: common_pb2.Identity, kv_dtype: str, block_size: int) -> list[int]:
        """Short names of the prompt's full blocks, as workers of this kind call them."""
        root = cache_root_of(identity, kv_dtype, tenant=self.tenant, cache_salt=self.cache_salt)
        names = self._names.get((root, block_size))
        if names is None:
            names = [short_name(block) for block in hash_prompt(root, self.prompt, block_size)]
            self._names[root, block_size] = names
        return names

    def token_request(self, emitted: list[common_pb2.EmittedChoice]) -> common_pb2.TokenRequest:
        """The request as workers see it, forced to `emitted`."""
        return common_pb2.TokenRequest(
            model=self.model.name,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            emitted=emitted,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            priority=self.priority,
        )


def scoped_salt(tenant: str, cache_salt: str) -> str:
    """The salt on the wire: caches are shared within a tenant and, with a salt, within that. Empty if both are."""
    return f"{len(tenant)}:{tenant}:{cache_salt}" if tenant or cache_salt else ""
