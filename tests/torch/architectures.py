"""Every architecture of `transformers` that takes text or images, with few and small layers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
WORDS = 12
MOST_PARAMETERS = 5_000_000
Batch = dict[str, Tensor]
Batches = Callable[[torch.Generator, Any], Batch]


def words(draw: torch.Generator) -> Tensor:
    return torch.randint(2, 100, (2, WORDS), generator=draw)


def labels(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2, (2, *shape), generator=draw)


def continued(draw: torch.Generator, config: Any) -> Batch:
    ids = words(draw)
    return {"input_ids": ids, "labels": ids}


def classified(draw: torch.Generator, config: Any) -> Batch:
    return {"input_ids": words(draw), "labels": labels(draw)}


def tagged(draw: torch.Generator, config: Any) -> Batch:
    return {"input_ids": words(draw), "labels": labels(draw, WORDS)}


def answered(draw: torch.Generator, config: Any) -> Batch:
    start, end = (torch.randint(0, WORDS, (2,), generator=draw) for _ in range(2))
    return {"input_ids": words(draw), "start_positions": start, "end_positions": end}


def chosen(draw: torch.Generator, config: Any) -> Batch:
    return {"input_ids": words(draw).view(2, 2, WORDS // 2), "labels": labels(draw)}


def pictures(draw: torch.Generator, config: Any) -> Tensor:
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else 32
    return torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=draw)


def seen(draw: torch.Generator, config: Any) -> Batch:
    return {"pixel_values": pictures(draw, config), "labels": labels(draw)}


def segmented(draw: torch.Generator, config: Any) -> Batch:
    pixels = pictures(draw, config)
    return {"pixel_values": pixels, "labels": labels(draw, *pixels.shape[2:])}


#: By the name of the mapping from configurations to models.
TASKS: dict[str, Batches] = {
    "CAUSAL_LM": continued,
    "MASKED_LM": continued,
    "SEQ_TO_SEQ_CAUSAL_LM": continued,
    "SEQUENCE_CLASSIFICATION": classified,
    "TOKEN_CLASSIFICATION": tagged,
    "QUESTION_ANSWERING": answered,
    "MULTIPLE_CHOICE": chosen,
    "IMAGE_CLASSIFICATION": seen,
    "SEMANTIC_SEGMENTATION": segmented,
}

WIDTHS = {"hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim", "hidden_dim"}
HEADS = {"n_head", "n_heads"}
HEAD_SIZES = {"head_dim", "d_kv", "d_head", "qk_head_dim", "v_head_dim", "qk_nope_head_dim"}
LAYERS = {"n_layer", "n_layers", "depth"}
BETWEEN = {"d_ff", "n_inner", "mlp_dim", "d_inner"}
EXACT = {"qk_rope_head_dim": 4, "image_size": 32, "sliding_window": 8, "n_groups": 1, "n_positions": 64, "n_ctx": 64}


def of_every_part(name: str, value: int) -> int:
    """A smaller number in the place of one of a configuration; numbers of the same meaning become equal."""
    if name.endswith(("_token_id", "token_index")):
        return value if value < 100 else 1
    if name in EXACT:
        return EXACT[name]
    for meant, most in [
        ("vocab_size" in name, VOCABULARY),
        (name in HEAD_SIZES, 8),
        ("num_key_value_heads" in name or name == "num_kv_heads", 2),
        ("heads" in name or name in HEADS, 4),
        ("layers" in name or name in LAYERS, 2),
        ("experts" in name and ("per" in name or "top" in name), 2),
        ("expert" in name, 4),
        (name in WIDTHS, 32),
        ("intermediate" in name or "ffn" in name or name in BETWEEN, 64),
        ("lora_rank" in name or name == "patch_size", 8),
        ("max_position" in name, 64),
    ]:
        if meant:
            return min(value, most)
    return value


def of_few_layers(name: str, value: int) -> int:
    """The same for models whose heads depend on other numbers: these stay as they are."""
    kept = name in WIDTHS | HEADS | HEAD_SIZES | EXACT.keys() or "heads" in name or "lora_rank" in name
    return value if kept else of_every_part(name, value)


def small(config: Any, shrunk: Callable[[str, int], int]) -> Any:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):  # a configuration inside
            small(value, shrunk)
        elif name == "layer_types" and isinstance(value, list):
            set_if_taken(config, name, value[:2])
        elif name == "depths" and isinstance(value, list):
            set_if_taken(config, name, [min(each, 2) for each in value])
        elif isinstance(value, int) and not isinstance(value, bool):
            set_if_taken(config, name, shrunk(name, value))
    return config


def set_if_taken(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # configurations check themselves in ways of their own
        return


def make(task: str, config_class: Any, model_class: Any) -> tuple[nn.Module, Any]:
    """A model in training mode with its configuration. Raises whatever its code raises if it cannot be that small."""
    problem: Exception | None = None
    for shrunk in (of_every_part, of_few_layers):
        try:
            config = small(config_class(), shrunk)
            config.use_cache = False
            if getattr(config, "pad_token_id", None) is None:
                config.pad_token_id = 0
            if task == "SEQ_TO_SEQ_CAUSAL_LM" and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 1
            with torch.device("meta"):
                if sum(each.numel() for each in model_class(config).parameters()) > MOST_PARAMETERS:
                    raise ValueError("too large")
            torch.manual_seed(0)
            model = model_class(config).train()
            model(**TASKS[task](torch.Generator().manual_seed(1), config)).loss.backward()
            model.zero_grad()
            return model, config
        except Exception as raised:
            problem = problem or raised
    assert problem is not None
    raise problem


def names() -> Iterator[tuple[str, str, str]]:
    """Tasks, kinds of configurations and classes of models, each class once."""
    from transformers.models.auto import modeling_auto

    known = set()
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, found in mapping.items():
            for name in found if isinstance(found, (tuple, list)) else (found,):
                if name not in known:
                    known.add(name)
                    yield task, kind, name
