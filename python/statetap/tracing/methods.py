"""What a whole model answers for: its sizes, the logit lens, steering, skipping blocks; nnterp's names."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from ..errors import ArgumentError, Unavailable
from ..mixers import fitting


class Methods:
    """Mixed into `StandardizedTransformer`, whose `layers`, `config` and `family` it uses."""

    layers: Any
    config: Any
    family: Any
    _text: Any
    _head: Any

    # -- sizes: the text model's configuration ---------------------------------------------

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """The width of one residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.config.vocab_size

    @property
    def num_heads(self) -> int:
        """Query heads of softmax attention; a recurrent mixer's heads are an axis of its values."""
        return self.config.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of softmax attention."""
        return getattr(self.config, "num_key_value_heads", None) or self.num_heads

    @property
    def head_dim(self) -> int:
        """The width of a softmax head's values and outputs."""
        own = getattr(self.config, "v_head_dim", None) or getattr(self.config, "head_dim", None)
        return own or self.hidden_size // self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """The width of a softmax head's queries and keys: not `head_dim` in latent attention."""
        if hasattr(self.config, "qk_nope_head_dim"):
            return self.config.qk_nope_head_dim + self.config.qk_rope_head_dim
        return self.head_dim

    @property
    def intermediate_size(self) -> int:
        """The width of a dense MLP."""
        size = getattr(self.config, "intermediate_size", None)
        if size is None:
            raise Unavailable("intermediate_size: every MLP here is a mixture; see config.moe_intermediate_size")
        return size

    # -- modules by Llama's names ----------------------------------------------------------

    @property
    def embed_tokens(self) -> Any:
        """The embedding module."""
        return self._text.get("embed_tokens")

    @property
    def norm(self) -> Any:
        """The last module before the language-model head."""
        return self._text.get(self.family.FAMILY.final_norm[-1])

    # -- methods ---------------------------------------------------------------------------

    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocabulary]` of a residual stream, as the model makes its own: the logit lens.

        Args:
            hidden: what a block's `layer_output` is. Inside a trace or, saved, outside of one.
        """
        if not isinstance(hidden, Tensor) or hidden.shape[-1:].numel() % self.hidden_size:
            raise ArgumentError(f"hidden: got {_kind(hidden)}, needs [..., {self.hidden_size}], as layer_output is")
        for name in self.family.FAMILY.final_norm:
            hidden = self._text.get(name)(hidden)
        return self._head(hidden)

    def steer(
        self,
        layers: int | list[int],
        vector: Tensor,
        factor: float = 1.0,
        token_positions: int | list[int] | slice | None = None,
        batch_index: int | list[int] | slice | None = None,
    ) -> None:
        """Add `factor * vector` to the `layer_output` of `layers`; inside a trace, before they have run.

        Args:
            layers: a block or several, negative from the end.
            vector: `[hidden]`, or what broadcasts to the chosen `[rows, tokens, hidden]`. Where there are several
                residual streams, each of them gets it.
            token_positions, batch_index: where; by default everywhere.
        """
        if not isinstance(vector, Tensor) or vector.shape[-1:] != (self.hidden_size,):
            raise ArgumentError(f"vector: got {_kind(vector)}, needs a tensor [..., {self.hidden_size}]")
        for index in sorted(
            self._block(layer) for layer in ([layers] if isinstance(layers, SupportsIndex) else layers)
        ):
            block = self.layers[index]
            stream = block.layer_output.clone()
            streams = stream if stream.shape[-1] == vector.shape[-1] else stream.unflatten(-1, (-1, vector.shape[-1]))
            rows = _chosen("batch_index", batch_index, streams.shape[0])[:, None]
            streams[rows, _chosen("token_positions", token_positions, streams.shape[1])] += factor * vector.to(stream)
            block.layer_output = stream

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None:
        """Blocks `start` to `end`, both included, do not run; inside a trace, before they would.

        Args:
            start, end: blocks, negative from the end.
            skip_with: what goes to the block after them, instead of what came to `start`.
        """
        first, last = self._block(start), self._block(end)
        if first > last:
            raise ArgumentError(f"skip_layers: start {start} comes after end {end}")
        for block in self.layers[first : last + 1]:
            entering, beside = block.input, self._handed_on(block)
            hidden = entering
            if skip_with is not None:
                hidden = fitting("skip_with", skip_with, entering.shape, entering.dtype, entering.device)
            block.skip((hidden, *beside) if beside else hidden)

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None:
        """One block does not run: `skip_layers(layer, layer)`."""
        self.skip_layers(layer, layer, skip_with)

    def _handed_on(self, block: Any) -> list[Any]:
        """What a block returns beside its stream, as it came in."""
        names = self.family.FAMILY.handed_on
        return [block.inputs[1].get(name) for name in names] if names else []

    def _block(self, layer: SupportsIndex) -> int:
        """The index of a block from the start."""
        count = len(self.layers)
        index = None if isinstance(layer, bool) or not hasattr(layer, "__index__") else layer.__index__()
        if index is None or not -count <= index < count:
            raise ArgumentError(f"layer: got {layer!r}, needs an int from {-count} to {count - 1}")
        return index % count


def _chosen(name: str, where: int | list[int] | slice | None, size: int) -> Tensor:
    """Indices along an axis of this size."""
    try:
        chosen = slice(None) if where is None else where if isinstance(where, slice) else torch.as_tensor(where)
        return torch.arange(size)[chosen].reshape(-1)
    except (TypeError, ValueError, IndexError) as error:
        raise ArgumentError(f"{name}: got {where!r}, needs an int, ints or a slice within {size}: {error}") from None


def _kind(x: Any) -> str:
    return f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
