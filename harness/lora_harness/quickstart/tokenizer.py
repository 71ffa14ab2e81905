"""A character-level tokenizer for arithmetic, saved as transformers saves any fast tokenizer."""

from __future__ import annotations

from typing import Any

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY: tuple[str, ...] = (PAD, EOS, UNK, *"0123456789+-=")


def build_tokenizer() -> Any:
    """One token a character; nothing is added around a text. `VOCABULARY` lists the tokens by id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK)
