"""The panels: a stack of layers that reads both ways, one that reads left to right, and the two joined.

Shapes: B batch, T tokens, S encoder tokens, D hidden_size, E embedding_size.
"""

from typing import Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    Seq2SeqModelOutput,
)
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import TriptychAttention
from .banded import Band
from .configuration_triptych import (
    TriptychDecoderConfig,
    TriptychEncoderConfig,
    TriptychEncoderDecoderConfig,
    TriptychStackConfig,
    rope_by_layer_type,
)
from .dropout import TriptychDropout
from .layers import TriptychLayer, activation
from .layout import (
    Layout,
    find_documents,
    lay_on_grid,
    mark_patterns,
    read_layout,
    read_targets,
    two_streams,
)
from .masks import check_encoder_padding, cross_attention_mask, self_attention_mask
from .norms import build_norm
from .positions import (
    TriptychRelativeBias,
    TriptychRotaryEmbedding,
    alibi_bias,
    axial_embedding,
    grid_coordinates,
    resize_positions,
)
from .pretrained import TriptychPreTrainedModel
from .projections import TriptychLinear
from .senses import SENSES
from .states import Text
from .tracing import is_tracing
from .unpadding import Places, find_places, find_rows, has_pads, move

OF_DECODERS = ("use_cache", "is_causal", "prefix_length")  # said of the one beside an encoder, which reads both ways

renamed_cache = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")


def check_batch(name: str, given: torch.Tensor, ndim: int):
    if given.ndim != ndim or 0 in given.shape:
        raise ValueError(f"`{name}` has shape {list(given.shape)}, but must be a batch of at least one token.")


def check_ids(name: str, ids: torch.Tensor, size: int, field: str):
    """Refuses ids outside their table. Free on a CPU; elsewhere it would wait for the device, which checks itself."""
    if ids.device.type != "cpu" or is_tracing(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        length = f" (a sequence of {high + 1} tokens)" if name == "position_ids" else ""
        raise ValueError(
            f"`{name}` has {low if low < 0 else high}{length}, but must be from 0 to {size - 1}, as `{field}` is "
            f"{size}."
        )


class TriptychStack(TriptychPreTrainedModel):
    """Embeddings, layers and the final norm, which encoder and decoder share."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        input_type = getattr(config, "input_type", "text")
        self.num_leading_tokens, self.grid = 0, None
        if input_type == "text":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        else:
            self.embed_tokens = None
            self.embed_patches = SENSES[input_type](config)
            self.main_input_name = config.main_input_name
            self.num_leading_tokens, self.grid = config.num_leading_tokens, config.grid if config.has_grid else None
        if config.position_embedding_type == "learned":
            rows = config.position_offset + config.max_position_embeddings
            self.embed_positions = nn.Embedding(rows, config.embedding_size)
        if config.type_vocab_size:
            self.embed_token_types = nn.Embedding(config.type_vocab_size, config.embedding_size)
        if config.embedding_norm:
            self.embed_norm = build_norm(config, config.embedding_size)
        if config.embedding_size != config.hidden_size:
            self.embed_proj = TriptychLinear(config.embedding_size, config.hidden_size)
        self.dropout = TriptychDropout(config.hidden_dropout)
        if config.position_embedding_type == "rotary":
            settings = rope_by_layer_type(config)
            self.rotary_emb = nn.ModuleDict(
                {name: TriptychRotaryEmbedding(config, settings[name]) for name in settings}
            )
        elif config.position_embedding_type == "relative":
            self.relative_bias = TriptychRelativeBias(config)
        self.layer_kinds = [config.layer_kind(layer_idx) for layer_idx in range(config.num_hidden_layers)]
        depth = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList([TriptychLayer(config, layer_idx) for layer_idx in range(depth)])
        # After a post-norm layer the stream is normalised already.
        has_norm = config.norm_position not in ("post", "none")
        self.norm = build_norm(config, config.hidden_size) if has_norm else nn.Identity()
        self.gradient_checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_patches if hasattr(self, "embed_patches") else self.embed_tokens

    def check_inputs(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"Exactly one of `{self.main_input_name}` and `inputs_embeds` must be given.")
        if inputs_embeds is None:
            check_batch("input_ids", input_ids, 2)
        else:
            check_batch("inputs_embeds", inputs_embeds, 3)

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the token table [B, T, E]."""
        if self.embed_tokens is None:
            raise ValueError("`input_ids` are given, but this stack has no table of its own; give `inputs_embeds`.")
        check_ids("input_ids", input_ids, self.embed_tokens.num_embeddings, "vocab_size")
        return self.embed_tokens(input_ids)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Token embeddings [B, T, E], scaled by sqrt(E) if the configuration says so (2017, section 3.4)."""
        if inputs_embeds is None:
            inputs_embeds = self.look_up(input_ids)
        return inputs_embeds * self.config.embedding_size**0.5 if self.config.scale_embedding else inputs_embeds

    def add_queries(
        self,
        hidden_states: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        layout: Layout,
        perm_mask: torch.Tensor | None,
        target_mapping: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Layout]:
        """Puts the P queries behind the T tokens: embeddings [B, T + P, E], types and layout of both streams.

        Every query starts as the mask token, whose row of the table is the vector w of Yang et al. 2019, section 2.3.
        """
        if self.config.topology != "encoder":
            raise ValueError("`perm_mask` and `target_mapping` are inputs of an encoder, and this stack is a decoder.")
        targets = read_targets(layout, perm_mask, target_mapping)
        if target_mapping is not None:
            if self.config.mask_token_id is None:
                raise ValueError("`target_mapping` needs `config.mask_token_id`, which is None but must be a token id.")
            queries = self.embed(torch.full_like(targets, self.config.mask_token_id), None)
            hidden_states = torch.cat((hidden_states, queries), dim=1)
        if token_type_ids is not None:
            types = token_type_ids.expand(targets.shape[0], -1)
            token_type_ids = torch.cat((types, types.gather(1, targets.to(types.device))), dim=1)
        return hidden_states, token_type_ids, two_streams(layout, perm_mask, targets)

    def coordinates(self, position_ids: torch.Tensor, grid: tuple[int, ...] | None) -> torch.Tensor:
        """Where tokens stand, [B, T, A], along each axis of what is read."""
        return grid_coordinates(position_ids, grid or (), self.num_leading_tokens)

    def positions(self, position_ids: torch.Tensor, grid: tuple[int, ...] | None) -> torch.Tensor:
        """What sinusoidal or learned positions add to tokens, [B, T, E]; sinusoids leave a class token out."""
        config = self.config
        if config.position_embedding_type == "sinusoidal":
            coordinates = self.coordinates(position_ids, grid)
            vectors = axial_embedding(coordinates, config.embedding_size, config.sinusoidal_layout)
            if not self.num_leading_tokens:
                return vectors
            return vectors * (position_ids >= self.num_leading_tokens)[..., None]
        if grid != self.grid:
            table = resize_positions(self.embed_positions.weight, self.grid, grid)
            return F.embedding(position_ids + config.position_offset, table)
        check_ids("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")
        return self.embed_positions(position_ids + config.position_offset)

    def add_positions(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        grid: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Input of the first layer [B, T, D]: tokens plus positions plus types, normalised, projected, dropped out."""
        if self.config.position_embedding_type in ("sinusoidal", "learned"):
            hidden_states = hidden_states + self.positions(position_ids, grid).to(hidden_states.dtype)
        if self.config.type_vocab_size:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(position_ids)
            check_ids("token_type_ids", token_type_ids, self.config.type_vocab_size, "type_vocab_size")
            hidden_states = hidden_states + self.embed_token_types(token_type_ids)
        if self.config.embedding_norm:
            hidden_states = self.embed_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        if self.config.embedding_size != self.config.hidden_size:
            hidden_states = self.embed_proj(hidden_states)
        return hidden_states

    def position_bias(
        self, layout: Layout, mask, keys: tuple[int, int], is_causal: bool, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What relative and ALiBi positions add to the scores: [B, H, T, S], or those of a band, or None."""
        kind = self.config.position_embedding_type
        if kind not in ("relative", "alibi") or isinstance(mask, Text):
            return None

        def between(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            if kind == "relative":
                bias = self.relative_bias(queries, keys, bidirectional=not is_causal)
            else:
                bias = alibi_bias(queries, keys, self.config.num_attention_heads)
            return bias.to(dtype)

        queries, keys = layout.position_ids, layout.key_positions(*keys)
        if isinstance(mask, Band):
            return mask.bias(lambda part: between(part.at_queries(queries), part.at_keys(keys)))
        return between(queries, keys).expand(layout.batch_size, -1, -1, -1)

    def layer_inputs(self, hidden_states: torch.Tensor, layout: Layout, cache: Cache | None, is_causal: bool) -> list:
        """What each layer needs beside the stream: mask, bias, rotary angles, causal flag; made once for each kind."""
        position = self.config.position_embedding_type
        if isinstance(cache, PagedAttentionCache) and position in ("relative", "alibi"):
            raise ValueError(f"Continuous batching cannot add the biases of `position_embedding_type` = {position!r}.")
        inputs = {}
        for layer_idx, kind in enumerate(self.layer_kinds):
            if kind in inputs:
                continue
            mask, keys = self_attention_mask(self.config, layout, layer_idx, is_causal, cache, hidden_states.dtype)
            bias = self.position_bias(layout, mask, keys, is_causal, hidden_states.dtype)
            hides_future = is_causal
            if layout.custom is not None and not isinstance(cache, PagedAttentionCache):
                # The caller's own mask is the whole mask, and an additive one: it joins the bias.
                bias = mask if bias is None else bias + mask
                bias = bias.expand(layout.batch_size, self.config.num_attention_heads, -1, -1)
                mask, hides_future = None, False
            angles = None
            if position == "rotary" and kind[0] in self.rotary_emb:
                coordinates = self.coordinates(layout.position_ids, layout.grid)
                angles = self.rotary_emb[kind[0]](hidden_states, coordinates)
            inputs[kind] = bias, dict(attention_mask=mask, position_embeddings=angles, is_causal=hides_future)
        return [inputs[kind] for kind in self.layer_kinds]

    def cross_inputs(
        self,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None,
        encoder_seq_idx: torch.Tensor | None,
        layout: Layout,
        places: Places | None,
        may_unpad: bool,
    ) -> tuple[torch.Tensor, dict]:
        """The encoder's states, without pads where they may leave, and what cross-attention needs beside them.

        Args:
            layout: of the decoder's tokens as the caller gave them.
            places: where in it those tokens stood that are left, if some are not.
        """
        padding = check_encoder_padding(encoder_attention_mask, encoder_hidden_states)
        dtype, key_length, rows, encoder_rows = encoder_hidden_states.dtype, encoder_hidden_states.shape[1], None, None
        if places is not None:
            layout, rows = layout.beside_encoder(places)
        if may_unpad and padding is not None and padding.ndim == 2 and has_pads(padding):
            encoder_places = find_places(padding)
            encoder_rows, _ = find_rows(encoder_places)
            encoder_hidden_states = encoder_places.take(encoder_hidden_states)
            padding, encoder_seq_idx = (
                move(table, encoder_places, encoder_rows) for table in (padding, encoder_seq_idx)
            )
            key_length = encoder_rows.shape[1]
        mask = cross_attention_mask(self.config, layout, key_length, padding, encoder_seq_idx, dtype)
        return encoder_hidden_states, dict(encoder_attention_mask=mask, cross_rows=rows, encoder_rows=encoder_rows)

    def records_layers(self, kwargs: dict) -> bool:
        """Whether the caller is to have what layers write or attend to, for all tokens as they were given."""
        flags = [f"output_{what}" for what in self._can_record_outputs]
        return any(kwargs.get(flag, getattr(self.config, flag, False)) for flag in flags)

    def read(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        is_causal: bool,
        prefix_length: torch.Tensor | None = None,
        cache: Cache | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoder_seq_idx: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """The whole stack, from tokens [B, T] to hidden states [B, T, D], or [B, T + P, D] with a query stream.

        Layers are given the real tokens alone [1, N, D], unless there is a cache, a query stream, a 4D mask, a graph
        that is compiled, or somebody who asked for what the layers write.
        """
        self.check_inputs(input_ids, inputs_embeds)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        types = token_type_ids if self.config.type_vocab_size else None
        layout = read_layout(tokens, attention_mask, position_ids, seq_idx, prefix_length, own_cache, types)
        mark_patterns(layout, self.config, global_attention_mask, own_cache)
        if self.grid is not None:
            lay_on_grid(layout, grid or self.grid, is_placed=position_ids is not None)
        has_queries = perm_mask is not None or target_mapping is not None
        has_pairs = encoder_attention_mask is not None and encoder_attention_mask.ndim == 4  # of the tokens as given
        is_free = cache is None and not has_queries and not has_pairs
        is_free = is_free and not is_tracing(tokens) and not self.records_layers(kwargs)
        position_ids, given_layout, places, rows = layout.position_ids, layout, None, None
        if is_free and layout.custom is None and (has_pads(layout.padding) or layout.documents is not None):
            layout, places, rows = layout.unpadded(is_causal, not is_flash_attention_requested(self.config))
            input_ids, inputs_embeds, position_ids, types = (
                None if table is None else places.take(table)
                for table in (input_ids, inputs_embeds, position_ids, types)
            )
        hidden_states = self.embed(input_ids, inputs_embeds)
        if has_queries:
            hidden_states, types, layout = self.add_queries(hidden_states, types, layout, perm_mask, target_mapping)
            position_ids = layout.position_ids
        hidden_states = self.add_positions(hidden_states, position_ids, types, layout.grid)
        inputs = self.layer_inputs(hidden_states, layout, own_cache, is_causal)
        cross_inputs = {}
        if encoder_hidden_states is not None:
            encoder_hidden_states, cross_inputs = self.cross_inputs(
                encoder_hidden_states, encoder_attention_mask, encoder_seq_idx, given_layout, places, is_free
            )
        for layer_idx, (bias, rest) in enumerate(inputs):
            layer = self.layers[layer_idx % len(self.layers)]  # one for all depths, if they share it
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                bias,
                cache=cache,
                layer_idx=layer_idx,
                position_ids=layout.position_ids,
                rows=rows,
                **rest,
                **cross_inputs,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return hidden_states if places is None else places.put(hidden_states)


def pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """The vector [B, D] that stands for each text [B, T, D]: its first or last real token, or the mean of all."""
    if attention_mask is None or attention_mask.ndim != 2:
        real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
    else:
        real = attention_mask[:, -hidden_states.shape[1] :].to(hidden_states.device, torch.bool)
    if pooling == "mean":
        # In single precision at least: half precision may not hold the sum of a long text.
        weights = real.to(torch.promote_types(hidden_states.dtype, torch.float32))[..., None]
        return ((hidden_states * weights).sum(1) / weights.sum(1).clamp(min=1)).to(hidden_states.dtype)
    index = real.int().argmax(-1) if pooling == "first" else (real.cumsum(-1) * real).argmax(-1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), index]


class TriptychPooler(nn.Module):
    """act(W x) of the pooled vector, what a sentence-level answer is read from (Devlin et al. 2019)."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__()
        self.dense = TriptychLinear(config.hidden_size, config.hidden_size)
        self.act = activation(config.pooler_act)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(pooled))


class TriptychEncoderModel(TriptychStack):
    """The left panel: every token sees every other (BERT and its kind)."""

    config: TriptychEncoderConfig
    _can_record_outputs = {
        "hidden_states": TriptychLayer,
        "attentions": OutputRecorder(TriptychAttention, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: TriptychEncoderConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        if config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer:
            self.pooler = TriptychPooler(config)
        self.post_init()

    def perceive(
        self, name: str, values: torch.Tensor, tokens: dict, attention_mask: torch.Tensor | None, may_differ: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...] | None]:
        """What stands in the place of `tokens` [B, T, E], its mask [B, T] and its grid, from the input of that name."""
        if name != self.main_input_name:
            raise ValueError(
                f"`{name}` are given, but `input_type` is {self.config.input_type!r}, read from "
                f"`{self.main_input_name}`."
            )
        for other, given in tokens.items():
            if given is not None:
                raise ValueError(f"`{name}` and `{other}` are both given, but only one of them can be read.")
        grid = self.embed_patches.grid(values, may_differ)
        return self.embed_patches(values, attention_mask), self.token_mask(attention_mask), grid

    def token_mask(self, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which tokens are real, from the mask that came with the input; of recordings, that is one of frames."""
        if attention_mask is None or self.config.input_type == "text":
            return attention_mask
        return self.embed_patches.token_mask(attention_mask)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        input_features: torch.FloatTensor | None = None,
        interpolate_pos_encoding: bool = False,
        seq_idx: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Reads texts both ways, or in a given order of prediction.

        Args:
            input_ids: [B, T] token ids, or `inputs_embeds` [B, T, E] in their place.
            attention_mask: [B, T], 1 on real tokens; or a 4D mask [B or 1, H or 1, T, T], boolean (True is visible) or
                additive, which then is the whole mask.
            token_type_ids: [B, T] segments; zeros if not given.
            position_ids: [B, T]; by default real tokens count from 0. Where they restart at 0, a new document begins.
            pixel_values: [B, channels, height, width] images, or [B, frames, channels, height, width] videos, in the
                place of tokens, where `input_type` says so.
            input_features: [B, mel bins, frames] of recordings, likewise. Their `attention_mask` [B, frames] is 1 on
                real frames, which stand first.
            interpolate_pos_encoding: images and videos may have other sizes than the configuration says. A learned
                table is interpolated, other positions go on counting.
            seq_idx: [B, T] document numbers of packed texts, which do not see each other.
            global_attention_mask: [B, T], 1 on tokens that see all others, and are seen by all, in layers with a window
                or chunks (Beltagy et al. 2020, section 3.1); besides the first `num_global_tokens`.
            perm_mask: [B, T, T], 1 where token i may not see token j; itself a token always sees.
            target_mapping: [B, P, T], each row one-hot at a token to predict. A second stream of P queries then runs
                along, which have the places of these tokens but not what stands there, and see what `perm_mask`
                leaves to them (Yang et al. 2019, arXiv 1906.08237, section 2.3). A row of zeros names the first slot.

        Returns:
            `last_hidden_state` [B, T, D] and `pooler_output` [B, D], the token (or mean) that `pooling` names,
            through the pooling layer if there is one. With
            `target_mapping`, `last_hidden_state` is [B, P, D], of the queries alone; `pooler_output` is still of the
            tokens, and what layers record is of both, T tokens and P queries.

        Raises:
            ValueError: an input has a wrong shape, an id is outside its table, or the batch is empty.
        """
        grid = kwargs.pop("grid", None)
        for name, values in (("pixel_values", pixel_values), ("input_features", input_features)):
            if values is not None:
                tokens = dict(input_ids=input_ids, inputs_embeds=inputs_embeds)
                inputs_embeds, attention_mask, grid = self.perceive(
                    name, values, tokens, attention_mask, interpolate_pos_encoding
                )
        hidden_states = self.read(
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            token_type_ids,
            seq_idx,
            is_causal=False,
            global_attention_mask=global_attention_mask,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            grid=grid,
            **{name: value for name, value in kwargs.items() if name not in OF_DECODERS},
        )
        queries = 0 if target_mapping is None else target_mapping.shape[1]
        tokens = hidden_states[:, : hidden_states.shape[1] - queries]
        pooled = pool(tokens, attention_mask, self.config.pooling)
        if hasattr(self, "pooler"):
            pooled = self.pooler(pooled)
        hidden_states = hidden_states[:, -queries:]  # of all tokens if there are no queries
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class TriptychDecoderModel(TriptychStack):
    """The right panel: a token sees itself and those before it, and the encoder's where there is one."""

    config: TriptychDecoderConfig
    _can_record_outputs = {
        "hidden_states": TriptychLayer,
        "attentions": OutputRecorder(TriptychAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(TriptychAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: TriptychDecoderConfig):
        super().__init__(config)
        self.post_init()

    @renamed_cache
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        encoder_seq_idx: torch.Tensor | None = None,
        prefix_length: torch.LongTensor | None = None,
        is_causal: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Reads texts left to right; the arguments of `TriptychEncoderModel.forward`, and:

        Args:
            attention_mask: [B, P + T] with P cached tokens.
            cache: what earlier calls left behind; made here if `use_cache` and the model does not train.
            encoder_hidden_states: [B, S, D'] and its `encoder_attention_mask` [B, S], for cross-attention.
            encoder_seq_idx: [B, S] document numbers of the encoder tokens, to be matched with this side's.
            prefix_length: [B], so many leading real tokens see each other both ways (Raffel et al. 2020, section 3.2).
            is_causal: False reads both ways, as `config.is_causal` does for good.

        Returns:
            `last_hidden_state` [B, T, D] and the `cache`.
        """
        needs_encoder = self.config.add_cross_attention
        if needs_encoder != (encoder_hidden_states is not None):
            raise ValueError(
                "`encoder_hidden_states` must be given, as `add_cross_attention` is True."
                if needs_encoder
                else "`encoder_hidden_states` is given, but `add_cross_attention` is False."
            )
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not self.training:
            cache = DynamicCache(config=self.config)
            if needs_encoder:  # whatever the layer types, cross-attention sees the whole encoder
                cache = EncoderDecoderCache(cache, DynamicCache())
        hidden_states = self.read(
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            token_type_ids,
            seq_idx,
            is_causal=self.config.is_causal if is_causal is None else is_causal,
            prefix_length=prefix_length,
            cache=cache,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            encoder_seq_idx=encoder_seq_idx,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, cache=cache)


class TriptychEncoderDecoderModel(TriptychPreTrainedModel):
    """The whole altarpiece: the decoder reads what the encoder wrote (Vaswani et al. 2017, figure 1)."""

    config: TriptychEncoderDecoderConfig

    def __init__(self, config: TriptychEncoderDecoderConfig):
        super().__init__(config)
        self.encoder = TriptychEncoderModel(config.encoder)
        self.main_input_name = self.encoder.main_input_name
        self.decoder = TriptychDecoderModel(config.decoder)
        if config.share_embeddings:
            # The one table is registered once: two modules with one parameter could not be sharded (FSDP2).
            self.decoder.embed_tokens = None
            for plan in (self.decoder._tp_plan, self.decoder._fsdp_plan):
                plan.pop("embed_tokens", None)
        self.post_init()

    @property
    def table_stack(self) -> TriptychStack:
        """The stack that has the token table: the encoder where it reads texts, whose table may be shared."""
        return self.decoder if self.encoder.embed_tokens is None else self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.table_stack.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        self.table_stack.embed_tokens = value

    @can_return_tuple
    @renamed_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.Tensor | None = None,
        decoder_seq_idx: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        input_features: torch.FloatTensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Reads sources [B, S], of any kind, and targets [B, T]; see the two stacks for the arguments.

        Returns:
            `last_hidden_state` [B, T, D] of the decoder, `encoder_last_hidden_state` [B, S, D'] and the `cache`.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError("`decoder_input_ids`, `decoder_inputs_embeds` or a head's `labels` must be given.")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                seq_idx=seq_idx,
                global_attention_mask=global_attention_mask,
                pixel_values=pixel_values,
                input_features=input_features,
                interpolate_pos_encoding=interpolate_pos_encoding,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutputWithPooling(
                **dict(zip(("last_hidden_state", "hidden_states", "attentions"), encoder_outputs, strict=False))
            )
        if self.config.share_embeddings and decoder_inputs_embeds is None:
            check_batch("decoder_input_ids", decoder_input_ids, 2)
            decoder_input_ids, decoder_inputs_embeds = None, self.encoder.look_up(decoder_input_ids)
        encoder_hidden_states = encoder_outputs.last_hidden_state
        batch_size, length = encoder_hidden_states.shape[:2]
        if inputs_embeds is None:
            attention_mask = self.encoder.token_mask(attention_mask)
        padding = attention_mask.bool() if attention_mask is not None and attention_mask.ndim == 2 else None
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=self.config.use_cache if use_cache is None else use_cache,
            encoder_hidden_states=encoder_hidden_states,
            # A mask between source tokens says nothing of what targets see.
            encoder_attention_mask=attention_mask if padding is not None else None,
            seq_idx=decoder_seq_idx,
            encoder_seq_idx=find_documents(position_ids, seq_idx, padding, 0, batch_size, length),
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_hidden_states,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )
