"""What every model of the family is: its initial weights, the backends that it accepts, how it is loaded and saved."""

import math
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import CommitInfo
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import is_flash_attention_requested

from .alignment import TriptychAlignedAttention
from .configuration_triptych import TriptychConfig
from .linear_attention import TriptychFeatureMap, TriptychLinearAttention, TriptychShortConvolution
from .norms import TriptychZeroCenteredRMSNorm
from .recurrence import first_weights
from .sharing import CARD, code_fields, code_files, make_repository, model_card, push_files
from .weight_files import check_claim, check_names, check_source

# Arguments of `from_pretrained` that say which files of a repository are meant.
WHERE = ("variant", "subfolder", "revision", "cache_dir", "force_download", "local_files_only", "token", "proxies")


class TriptychPreTrainedModel(PreTrainedModel):
    """What all panels and heads share: initial weights, backends, saving."""

    config: TriptychConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TriptychLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # A pooling layer belongs to what reads it; another model that is loaded from the same weights goes without.
    _keys_to_ignore_on_load_unexpected = [r"\bpooler\."]

    def __init__(self, config: TriptychConfig, *args, **kwargs):
        topology = self.config_class.__dataclass_fields__["topology"].default
        if type(self).config_class is not TriptychConfig and config.topology != topology:
            raise ValueError(
                f"`config.topology` is {config.topology!r}, but {type(self).__name__} is built from {topology!r}."
            )
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args, use_safetensors: bool | None = None, **kwargs):
        """Loads as transformers does, but never a pickle: a file of weights must not be able to run code."""
        source = pretrained_model_name_or_path
        if use_safetensors is False:
            raise ValueError("`use_safetensors` is False, but weights are only read from safetensors files.")
        if source is not None:
            check_source(source, **{name: kwargs[name] for name in WHERE if name in kwargs})
        try:
            return super().from_pretrained(source, *args, use_safetensors=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"'{source}' has no weights that can be read: {error}.") from error

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        """Every file comes through here; those of adapters, with the keys that they should have."""
        check_names(checkpoint_files or ())
        if checkpoint_files and expected_keys is None:
            check_claim(model, checkpoint_files, load_config.pretrained_model_name_or_path)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)

    def _load_and_finalize_distributed_pretrained_model(self, checkpoint_dir, *args):
        check_claim(self, Path(checkpoint_dir).glob("*.safetensors"), checkpoint_dir)
        return super()._load_and_finalize_distributed_pretrained_model(checkpoint_dir, *args)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """Refuses, at construction and at every switch, a backend that would ignore part of the configuration."""
        if is_flash_attention_requested(requested_attention_implementation=attn_implementation):
            config = self.config
            for stack in (config.encoder, config.decoder) if config.topology == "encoder_decoder" else (config,):
                if stack.position_embedding_type in ("relative", "alibi"):
                    raise ValueError(
                        f"`attn_implementation` is {attn_implementation!r}, which cannot add the biases of "
                        f"`position_embedding_type` = {stack.position_embedding_type!r}; use sdpa or flex_attention."
                    )
                if getattr(stack, "add_cross_attention", False) and stack.is_aligned:
                    raise ValueError(
                        f"`attn_implementation` is {attn_implementation!r}, which cannot add the scores of "
                        f"`cross_attention_score` = {stack.cross_attention_score!r} or of `cross_attention_window` = "
                        f"{stack.cross_attention_window}; use sdpa or flex_attention."
                    )
                if "chunked_attention" in stack.layer_types:
                    raise ValueError(
                        f"`attn_implementation` is {attn_implementation!r}, which has no chunks, but `layer_types` has "
                        "'chunked_attention'; use sdpa or flex_attention."
                    )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _init_weights(self, module: nn.Module):
        """All initial weights.

        Biases are 0 and the gains of norms 1. With an `initializer_range`, weights are normal of that deviation;
        without, projections are Glorot-uniform (Glorot & Bengio 2010) and embeddings normal of deviation
        `width ** -0.5`, as in the 2017 code. What writes into the residual stream of a deep stack starts smaller: see
        `residual_gain`. Each gate of a recurrence has weights of its own, orthogonal ones for the state where no range
        is given (Bahdanau et al. 2015, appendix B.1), and an LSTM's gate that forgets has a bias of 1, so that it does
        not at first (Gers et al. 2000; Jozefowicz et al. 2015).
        """
        super()._init_weights(module)
        std = self.config.initializer_range
        for token in (getattr(module, name, None) for name in ("class_token", "mask_token")):
            if token is not None:
                init.normal_(token, std=token.shape[-1] ** -0.5 if std is None else std)
        if isinstance(module, TriptychZeroCenteredRMSNorm):
            init.zeros_(module.weight)
        elif isinstance(module, TriptychFeatureMap) and module.kind == "hedgehog":
            init.copy_(module.weight, torch.eye(module.weight.shape[-1]).expand_as(module.weight))
        elif isinstance(module, TriptychShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, TriptychLinearAttention) and hasattr(module, "decay_rate"):
            # Rates from 1 to 16 and steps from 0.001 to 0.1, as Dao & Gu (2024) have them.
            init.copy_(module.decay_rate, torch.empty(len(module.decay_rate)).uniform_(1, 16).log())
            step = torch.empty(len(module.decay_bias)).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            init.copy_(module.decay_bias, step + torch.log(-torch.expm1(-step)))
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and std is None:
            bound = (6 / (module.weight[0].numel() + len(module.weight))) ** 0.5  # of the projection that it slides
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, TriptychAlignedAttention) and module.is_additive:
            init.normal_(module.score_weight, std=module.head_dim**-0.5 if std is None else std)
        elif isinstance(module, nn.RNNBase):
            for name, parameter in module.named_parameters():
                init.copy_(parameter, first_weights(name, parameter, std, module.mode == "LSTM"))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5 if std is None else std)
        elif isinstance(module, nn.Linear):
            gain = getattr(module, "init_gain", 1.0)
            if std is None:
                init.xavier_uniform_(module.weight, gain=gain)
            else:
                init.normal_(module.weight, std=std * gain)

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs) -> nn.Embedding:
        """As in transformers; source and target tables follow if they are one table."""
        config = self.config
        has_two = config.topology == "encoder_decoder" and config.encoder.input_type == "text"
        if has_two and not config.share_embeddings:
            raise ValueError("`share_embeddings` is False, so source and target vocabularies cannot be resized as one.")
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        for part in (config, config.encoder, config.decoder) if config.topology == "encoder_decoder" else ():
            part.vocab_size = embeddings.num_embeddings
        return embeddings

    def save_pretrained(self, save_directory, *args, with_code: bool | None = None, **kwargs):
        """Saves as transformers does, as safetensors.

        Args:
            with_code: also copy the family's code, so that `trust_remote_code=True` loads every head of the folder, and
                runs its pipelines, where the package is not installed; None does so if this model came with code, or
                its class was given to `register_for_auto_class`.
        """
        if with_code is None:
            with_code = self.is_remote_code() or hasattr(self.config, "auto_map")
        fields = code_fields(self.config.topology)
        for name in fields:
            if not with_code and hasattr(self.config, name):
                delattr(self.config, name)
        super().save_pretrained(save_directory, *args, **kwargs)
        if with_code and kwargs.get("is_main_process", True):
            for name, value in fields.items():
                setattr(self.config, name, value)
            self.config.save_pretrained(save_directory)
            for name, file in code_files().items():
                shutil.copyfile(file, Path(save_directory) / name)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        with_code: bool | None = None,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        private: bool | None = None,
        revision: str | None = None,
        token: bool | str | None = None,
        **commit,
    ) -> CommitInfo:
        """Push as transformers does, with a card that says what the model is, in one commit.

        Args:
            with_code: as of `save_pretrained`.
            tags: of the card.
            private, revision: see `triptych.sharing.make_repository`.
            **commit: `commit_message`, `commit_description`, `create_pr`.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, with_code=with_code, max_shard_size=max_shard_size)
            files = {path.name: path for path in Path(folder).iterdir()}
            has_code = "modeling_triptych.py" in files
            repo_id = make_repository(repo_id, private, revision, token)
            card = model_card(self.config, repo_id, self.num_parameters(), has_code, tags=tags)
            return push_files({**files, CARD: str(card).encode()}, repo_id, revision, token, **commit)
