"""One layer of a cache that evicts."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class EvictionLayer(DynamicLayer):
    """Keys and values [b hkv s d] of one layer; what they are of is known by the cache."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.queries: Tensor | None = None  # post-RoPE queries of the newest tokens [b hq w d]
        self.columns: dict[str, Tensor] = {}  # per-entry state that moves with its entry [b hkv s ...]
        self.state: dict[str, Tensor] = {}  # what a policy's `watch` made of every query so far [b ...]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # the offset lines new keys up with new queries, so that stock masks are right for uniform counts
        physical = 0 if self.keys is None else self.keys.shape[-2]
        return physical + query_length, self.seen - physical

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("an evicting cache cannot be cropped: what a round took cannot come back")

    def reset(self) -> None:
        super().reset()
        self.seen, self.queries, self.columns, self.state = 0, None, {}, {}

    def index_rows(self, rows: Tensor) -> None:
        def pick(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        self.keys, self.values = pick(self.keys), pick(self.values)
        self.queries = None if self.queries is None else pick(self.queries)
        self.columns, self.state = ({name: pick(x) for name, x in some.items()} for some in (self.columns, self.state))
