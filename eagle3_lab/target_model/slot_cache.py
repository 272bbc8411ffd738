"""The key-value cache as transformers' models ask for it. Apart, since transformers takes a second to import."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle3_lab.kv_cache import KVCache


class SlotLayer(CacheLayerMixin):
    """transformers' view of one layer of a :class:`KVCache`."""

    is_sliding, is_compileable, is_croppable = False, True, False

    def __init__(self, owner: SlotCache, layer: int) -> None:
        super().__init__()
        self._owner, self._layer = owner, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write at the owner's slots, read to its view. What else transformers passes differs between versions."""
        owner = self._owner
        owner.cache.write(self._layer, key_states, value_states, owner.slots)
        return owner.cache.read(self._layer, owner.view)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.view, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.cache.capacity

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """A :class:`KVCache` in the shape transformers' models ask for; ``slots`` and ``view`` are set before a forward."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.view = cache.capacity
        self.slots = cache.slots(1)
        super().__init__(layers=[SlotLayer(self, i) for i in range(len(cache._keys))])
