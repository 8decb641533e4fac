"""What distinguishes one decoder from another: sizes and a few flags. All families are flags of one decoder."""

import dataclasses
from dataclasses import dataclass

from jfuse.models.rope import LongRope, Rope


@dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder-only model with grouped-query attention, RMSNorm, RoPE and SwiGLU.

    Attributes:
        rope: the angles in force; with `longrope`, one of its two sets.
        longrope: both factor sets of a longrope model and the length at which they change, else None.
        max_positions: positions the model was made for; a longer request is refused by `check_request`.
    """

    family: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    rope: Rope
    longrope: LongRope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self):
        for name in ("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "mlp_width", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig.{name} is {getattr(self, name)}; use an integer >= 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; "
                "grouped-query attention needs num_heads to be a multiple of num_kv_heads."
            )
        if not 2 <= 2 * len(self.rope.inv_freq) <= self.head_size:
            raise ValueError(
                f"RoPE turns {2 * len(self.rope.inv_freq)} dimensions of each head, but head_size is {self.head_size}; "
                "use from 2 to head_size dimensions."
            )

    def for_requests(self, longest: int | None) -> "ModelConfig":
        """The config whose longrope factor set serves requests of `longest` positions; unchanged without longrope.

        The set is chosen once, when a store is opened: cached keys, placement, query and full prefill must agree.
        None keeps the set in force (the short one after loading).

        Raises:
            ValueError: `longest` is below 1 or beyond `max_positions`.
        """
        if longest is None:
            return self
        self.check_length(longest)
        return self if self.longrope is None else dataclasses.replace(self, rope=self.longrope.at(longest))

    def check_request(self, total: int) -> None:
        """Refuses a request of `total` positions (prefix, context, query and new tokens) that this config cannot serve.

        Raises:
            ValueError: beyond `max_positions`, or on the other side of the longrope boundary.
        """
        self.check_length(total)
        if self.longrope is not None and self.rope != self.longrope.at(total):
            boundary = self.longrope.boundary
            long = total > boundary
            raise ValueError(
                f"The request needs {total} positions, {'more' if long else 'not more'} than the longrope boundary of "
                f"{boundary}, but the {'short' if long else 'long'} factor set is in force, and caches of one set "
                f"cannot serve the other. Load the model with longest_request={total} and encode the chunks with it."
            )

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that keys and values of one token take over all layers, at `itemsize` bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * itemsize

    def check_length(self, total: int) -> None:
        """Refuses more positions than the model was made for; `check_request` also knows the longrope boundary.

        Raises:
            ValueError: names `total` and the limit.
        """
        if not 1 <= total <= self.max_positions:
            raise ValueError(
                f"The request needs {total} positions (prefix, context, query and new tokens), but this {self.family} "
                f"model serves 1 to {self.max_positions}. Use fewer chunks, a shorter query or fewer new tokens."
            )
